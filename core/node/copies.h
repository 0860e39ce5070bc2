/* copies.h - a node of a fabric whose servers have replicas. Layer 3.
 *
 * With config.replicas two processes are server s: copy 0, the dedicated server, and copy 1, its replica. The
 * group `replica` decides which of them serves; it says so with a term, which grows. The node has the rest:
 *
 *    stands by --mlfab__copy_serve(term)--> serves --mlfab__copy_stand_by(why)--> stands by
 *
 *  (1) A copy that stands by has no callers but voters. It turns away those that it has when it stops to serve, and
 *      every JOIN and HELLO: BYE with AGAIN, the reason and its nonce. Only the process at which the fabric is formed
 *      (`meets`) takes JOIN before it serves.
 *  (2) A route leads to a server, and `copy` says which copy is called. The next call is to the other one if a call
 *      failed, took 4 beats or was turned away, or a link ended in silence or before HELLO_ACK. If a link breaks
 *      otherwise, the same copy is called first. What a copy says before HELLO_ACK does not show that the server
 *      lives. A route without a copy that serves for HALT_BEATS is dead.
 *  (3) Terms. HELLO_ACK tells a worker or the scheduler the term, HELLO another server; from then on both have it in
 *      the epoch of every frame of the link. A route takes no copy with a term below the largest that it has heard,
 *      and a link no frame with a term below its own.
 *  (4) Links to a copy, and between voters, are LOST after 5 beats even if the peer's system answers: another copy
 *      may serve instead. A worker without a link has 5 beats in any case, because it may call the other copy first.
 *  (5) Voters: copy c of server s has number c * servers + s, the scheduler is the last. A copy calls the other copy
 *      and the scheduler, the scheduler calls all copies. VOTER links are called again forever, and nobody is dead
 *      for them.
 *  (6) A process that replaces another joins at the copy of server 0 that serves, which it looks for at both addresses
 *      of config.coordinator. So does server 0, at the other copy's, as long as it is forming a fabric (`meets`): if the
 *      other copy lets it in, there is one already. Such a process is READY when another voter of its server has admitted it.
 *      Voters go by its incarnation: the greater one is the newer process. It says where it listens (MEMBER), and
 *      copies tell their callers (PLACE).
 *  (7) A copy of server 0 that takes over issues incarnations from term << 16 on, knows of nodes what peers.c has
 *      told it, and turns JOIN of workers and the scheduler away for 5 beats: processes that are here speak first.
 *
 * Server 0's copies have a record of each node (peers.c): whether it has joined, with which incarnation and nonce; and of a
 * worker whether it has greeted, is dead or has left. */
#ifndef MLFAB__COPIES_H
#define MLFAB__COPIES_H

#include "../wire/kept_wire.h"
#include "mirrored.h"
#include "node.h"

typedef struct mlfab__copies {
  char standby_why[128]; /* what a copy that does not serve tells callers */
  /* Has this copy its lease (../replica/vote.h)? Without it, it may have been stopped and replaced, and its
   * workers may be with the other copy: it declares none dead. NULL: always. */
  int (*leased)(void *copy, uint64_t now_ns);
  void *leased_copy;
  uint64_t served_ns;                            /* when it began to serve */
  mlfab__mirrored mirrored[MLFAB__MIRRORED_MAX]; /* parts that the other copy has, too */
  uint32_t nmirrored;
  /* peers.c: server 0. WELCOME is said when the other copy knows the node. */
  mlfab__port joiners;
  mlfab__touch *peers_touch;
  int peers_known; /* by the other copy that served before */
} mlfab__copies;

MLFAB__INTERNAL const mlfab__copies_table *mlfab__copies_of_servers(void);
/* This copy serves from now on, under this term: it answers callers. Or it does not: hangs up on them, for this reason,
 * so that they call the other copy. Call it from a role. */
MLFAB__INTERNAL void mlfab__copy_serve(mlfab_node *node, uint32_t term);
MLFAB__INTERNAL void mlfab__copy_stand_by(mlfab_node *node, const char *why);

/* --- peers.c: what server 0 knows of nodes, at both of its copies --- */

/* Makes replica->joiners, and at server 0 the part. */
MLFAB__INTERNAL void mlfab__peers_attach(mlfab_node *node);
/* WELCOME is due to the node that joins, as soon as the other copy knows of it. */
MLFAB__INTERNAL void mlfab__peers_welcome(mlfab_node *node, uint32_t id);

#endif
