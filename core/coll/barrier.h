/* barrier.h - the barrier: workers ask, server 0 counts and answers. compose.c attaches it.
 *
 * A worker numbers its barriers from 1, and may have any number of them open: those above `over`, in the order of its
 * calls. It asks by the number of the newest (BARRIER). Server 0 releases barrier n when every live worker that is not
 * done has asked for n or a later one. It answers by the number of the newest that is over (BARRIER_DONE), and tells
 * those who wait which rank is missing (WAITING). A process that came late counts from `over` (`base`) if it replaces a
 * dead process; else from the barriers that others have called, which do not wait for it.
 *
 * A newcomer (membership.h) is a guest: no barrier waits for it. When it asks, server 0 holds the next barrier that all
 * others have asked for, and tells the guest their progress (MEETS). The guest has all servers count it, and sends
 * HERE: then that barrier is its own, too, and server 0 releases it. It does not ask while one of its collectives
 * waits. If workers make collectives (COLLECTS), the barrier that it met may belong to another place in the loop. So it
 * is a guest again afterwards (PASSES, LEAVES), until a collective admits it: HERE then matches its barriers to the
 * others'. Until then, rounds do not wait for it while it waits in a barrier for longer than a heartbeat.
 *
 * Invariants. (1) Numbers that are asked for, and answers, only grow: both are repeated on a new link, and counted
 * once. (2) A call that is withdrawn here still counts as asked at server 0. The next call of this worker takes its
 * number: a second try is the same barrier. (3) If a worker dies or is done, barriers go on without it, and do not
 * fail. A barrier ends with success, by its deadline, by cancel, or by the death of server 0 (of both copies, if it has
 * a replica: the numbers are at both). */
#ifndef MLFAB__BARRIER_H
#define MLFAB__BARRIER_H

#include "../node/role.h"
#include "../base/request.h"

typedef struct mlfab__barrier_entry { /* a worker, as server 0 sees it */
  uint8_t gone, done, left;           /* left: gone in good order, or never here */
  uint8_t guest, wants; /* a joiner that does not count yet; it has asked (membership.h) */
  uint8_t elsewhere;    /* it waits in a collective */
  uint8_t half, among;  /* only a barrier has admitted it; it takes part in collectives */
  uint64_t base, asked; /* asked: the newest, as all count; it waits if above `over` */
  uint64_t progress;    /* updates that it had pushed when it asked */
} mlfab__barrier_entry;

typedef struct mlfab__barrier_server {
  mlfab__env *env;
  mlfab__port port; /* port to workers */
  uint32_t workers;
  mlfab__barrier_entry *entries;
  uint64_t over;
  int32_t missing; /* the rank reported to waiting workers as missing */
  /* Tells a replica of server 0 (barrier_kept.h), or NULL. The entry of this worker may have changed. */
  void (*touched)(struct mlfab__barrier_server *server, uint32_t worker);
  struct mlfab__touch *touch;
} mlfab__barrier_server;

typedef struct mlfab__barrier_worker {
  mlfab__port port; /* port; peer 0 is server 0 */
  mlfab__requests *requests;
  uint64_t over; /* barriers that have succeeded */
  uint32_t open; /* number of open requests */
  uint64_t beat_ns;
  int dead;    /* server 0 is dead */
  int leaving; /* this worker takes no further part */
  mlfab__counting counting;
  /* State of this worker. newcomer: as in membership.h. wants: stands apart and has asked. held: does not ask, as its
   * collective waits. among: takes part in collectives. passing: only others do; it is a newcomer again after this
   * barrier. half: only a barrier has admitted it. */
  uint8_t half, known, newcomer, admitted, told, wants, held, among, passing;
  mlfab__mark mark; /* mark of the newest call */
  int32_t of;       /* the member with which HERE was sent */
  uint64_t theirs, mine;
} mlfab__barrier_worker;

/* Add the roles, at server 0 and at a worker; the node owns them. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__barrier_server_attach(struct mlfab_node *node,
                                                 mlfab__barrier_server **barrier_p);
/* waits: does this worker wait in a barrier (for errors)? elsewhere: it waits in a collective, or does so no longer. */
MLFAB__INTERNAL int mlfab__barrier_waits(const mlfab__barrier_server *server, uint32_t worker);
MLFAB__INTERNAL void mlfab__barrier_elsewhere(mlfab__barrier_server *server, uint32_t worker,
                                              int waits);
MLFAB__INTERNAL int mlfab__barrier_attach(struct mlfab_node *node,
                                          mlfab__barrier_worker **barrier_p);
/* Begins a barrier; timeout_ns 0: the config's. Errors: PEER_DEAD, AGAIN (too many requests). */
MLFAB__INTERNAL int mlfab__barrier_start(mlfab__barrier_worker *worker, uint64_t timeout_ns,
                                         uint64_t now_ns, mlfab_request *request_p,
                                         mlfab_error *error);

/* For a joiner. apart: its collective waits, so no barrier waits for it. alone: that collective has ended. here: it
 * counts from now on (membership.h). */
MLFAB__INTERNAL void mlfab__barrier_apart(mlfab__barrier_worker *worker);
MLFAB__INTERNAL void mlfab__barrier_alone(mlfab__barrier_worker *worker);
MLFAB__INTERNAL void mlfab__barrier_here(mlfab__barrier_worker *worker, int32_t of, uint64_t theirs,
                                         uint64_t mine);
/* Notes that it takes part in collectives. */
MLFAB__INTERNAL void mlfab__barrier_among(mlfab__barrier_worker *worker);

#endif
