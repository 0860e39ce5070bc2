/* copies.h - a node of a fabric whose servers have replicas.
 *
 * With config.replicas two processes are server s: copy 0, the dedicated server, and copy 1, its replica. The group
 * `replica` decides which copy serves. It gives each decision a term, which grows. The node does the rest:
 *
 *    stands by --mlfab__copy_serve(term)--> serves --mlfab__copy_stand_by(why)--> stands by
 *
 *  (1) A copy that stands by has voters as its only callers. It turns away its other callers when it stops serving, and
 *      every JOIN and HELLO: BYE with AGAIN, the reason and its nonce. Only the process at which the fabric is formed
 *      (`meets`) takes JOIN before it serves.
 *  (2) A route leads to a server, and `copy` tells which copy is called. The next call is to the other copy if a call
 *      failed, took 4 beats or was turned away, or a link ended in silence or before HELLO_ACK. If a link breaks
 *      otherwise, the same copy is called first. Before HELLO_ACK, frames of a copy do not prove that the server lives.
 *      A route is dead if no copy serves for HALT_BEATS.
 *  (3) Terms. HELLO_ACK tells a worker or the scheduler the term, HELLO another server; from then on both have it in
 *      the epoch of every frame of the link. A route refuses a copy with a term below the largest that it has heard. A
 *      link refuses a frame with a term below its own.
 *  (4) Links to a copy, and between voters, are LOST after 5 beats even if the peer's system answers: another copy
 *      may serve instead. A worker without a link has 5 beats in any case, because it may call the other copy first.
 *  (5) Voters: copy c of server s has number c * servers + s; the scheduler is the last. A copy calls the other copy
 *      and the scheduler; the scheduler calls all copies. A VOTER link carries HELLO, HELLO_ACK, votes, a copy's states
 *      and the answers to them. VOTER links are called again forever, and declare nobody
 *      dead.
 *  (6) A process that replaces another joins at the serving copy of server 0, and tries both addresses of
 *      config.coordinator. Server 0 does so, too, at the other copy's address, while it is forming a fabric (`meets`):
 *      if the other copy lets it in, there is a fabric already. Such a process is READY when another voter of its
 *      server has admitted it. Voters compare incarnations: the greater is the newer process. It tells its address
 *      (MEMBER), and copies tell their callers (PLACE).
 *  (7) A copy of server 0 that takes over issues incarnations from term << 16 on, and knows the nodes from peers.c. It
 *      turns JOIN of workers and the scheduler away for 5 beats: present processes speak first.
 *
 * Server 0's copies have a record of each node (peers.c): joined or not, incarnation and nonce; for a worker also:
 * greeted, dead or left. */
#ifndef MLFAB__COPIES_H
#define MLFAB__COPIES_H

#include "../wire/kept_wire.h"
#include "mirrored.h"
#include "node.h"

typedef struct mlfab__copies {
  char standby_why[128]; /* the reason that a copy that does not serve tells callers */
  /* Does this copy have its lease (../replica/vote.h)? A copy without a lease may have been stopped and replaced, and
   * its workers may be with the other copy: it declares none dead. NULL: always. */
  int (*leased)(void *copy, uint64_t now_ns);
  void *leased_copy;
  uint64_t served_ns;                            /* time at which it began to serve */
  mlfab__mirrored mirrored[MLFAB__MIRRORED_MAX]; /* parts that both copies have */
  uint32_t nmirrored;
  /* peers.c: server 0. WELCOME is sent when the other copy knows the node. */
  mlfab__port joiners;
  mlfab__touch *peers_touch;
  int peers_known; /* by the copy that served before */
} mlfab__copies;

MLFAB__INTERNAL const mlfab__copies_table *mlfab__copies_of_servers(void);
/* serve: this copy serves from now on, under this term, and answers callers. stand_by: it hangs up on callers, for this
 * reason, so that they call the other copy. Call them from a role. */
MLFAB__INTERNAL void mlfab__copy_serve(mlfab_node *node, uint32_t term);
MLFAB__INTERNAL void mlfab__copy_stand_by(mlfab_node *node, const char *why);

/* --- peers.c: server 0's records of nodes, at both of its copies --- */

/* Makes replica->joiners, and at server 0 the mirrored part. */
MLFAB__INTERNAL void mlfab__peers_attach(mlfab_node *node);
/* Sends WELCOME to the joining node as soon as the other copy knows that node. */
MLFAB__INTERNAL void mlfab__peers_welcome(mlfab_node *node, uint32_t id);

#endif
