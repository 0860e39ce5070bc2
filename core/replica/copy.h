/* copy.h - a server and its replica: one copy serves and sends its states to the other, which takes over when the first
 * is lost.
 *
 * Three processes keep a shard alive: copy A (the dedicated server of the configuration), copy B (its replica), and the
 * scheduler as witness (witness.c). The three vote which copy serves (vote.h). Both copies have all roles of a server,
 * and this role. The copy that does not serve has no callers: the node turns them away (../node/copies.h).
 *
 *    STANDS_BY --the vote says: this copy, and its state is whole--> SERVES --it hears neither of the others for 6 beats-->
 *    SUSPENDED --it hears one again--> SERVES
 *       \-- SERVES or SUSPENDED --another copy serves by a later record--> STANDS_BY, its state is void
 *
 * Without a lease (vote.h) the serving copy is frozen: it answers nothing (keeper.h). While it is SUSPENDED, the node
 * turns workers away, so that they find the copy that took over.
 *
 * The stream. The serving copy sends moments (../checkpoint/moment.h), record by record, on its VOTER link to the other:
 *
 *    sender:    IDLE --something was decided since, or the other copy has nothing--> SENDS --END is sent--> SENT
 *                 ^--MOMENT_HAS, all bytes returned: keeper_has-----------------------------------------------/
 *               link lost: IDLE; when it is back, the receiver says which moment it has
 *    receiver:  NOTHING --a full moment begins--> COLLECTS --END--> installs it in one step, MOMENT_HAS
 *                 ^--link lost, sender of another term: the unfinished moment is void; the last one stays
 *
 * A full moment has all slices; another moment has the slices that changed since the receiver's last moment. One moment
 * is under way at a time, and a new one begins as soon as the last has arrived. So updates merge by themselves, and the
 * traffic is one state per moment instead of one per update. The receiver takes a stream only from the copy that serves
 * by its own bond, and none while it asks to replace that copy.
 *
 * A server without a model (the fabric uses collectives only, or the model comes later) sends END alone. When it gets a
 * model, the other copy, which has none, leaves the record; until then the server answers nothing.
 *
 * In sync. When the receiver has a full moment, the next moment joins (keeper.h). When the receiver has that moment,
 * the sender proposes the record that names both copies. The sender drops the other copy from the record if that copy
 * is silent for 5 beats, or has not got a moment within silent_death_ns.
 *
 * Promotion. The partly collected moment is void, and the server role begins with the last complete one: windows,
 * clock, optimizer. Workers say HELLO, and
 *  - send those updates again that the server's windows do not show as decided (../worker/push.c, resync);
 *  - count their lost updates (reported as applied): at most div_max of them; their progress goes on without these
 *    (PROGRESS), so that rounds do not wait for them;
 *  - void their cache of the shard, and repeat their pulls.
 *
 * Invariants. (1) An update is decided once in the common history of the serving copies: a moment has windows and
 * weights of one instant. (2) DURABLE: keeper.h (2) and vote.h (2). (3) A worker takes answers of one copy at a time:
 * the copy of the largest term that it has heard of. (4) Only the serving copy answers HELLO of a worker.
 *
 * Departs from MLfabric §3.3: there, workers send their updates to the replica, through its own aggregators. Here the
 * server sends its state, which outlives the worker, carries optimizers of any kind, merges without limit, and needs no
 * second order; the price is the server's outgoing link. */
#ifndef MLFAB__COPY_H
#define MLFAB__COPY_H

#include "../checkpoint/collect.h"
#include "../checkpoint/moment.h"
#include "../node/copies.h"
#include "../server/server.h"
#include "keeper.h"
#include "mirror.h"
#include "voter.h"

enum { MLFAB__COPY_LOANS = 16 };

enum mlfab__copy_phase { MLFAB__COPY_STANDS_BY, MLFAB__COPY_SERVES, MLFAB__COPY_SUSPENDED };

struct mlfab__worker;

enum { MLFAB__SENDS_RECORDS = 1, MLFAB__SENDS_DONE = 2 }; /* DONE: the last record was sent */

typedef struct mlfab__copy {
  mlfab_node *node;
  mlfab__server *server;
  mlfab__port port;     /* peers are voters */
  mlfab__voters voters; /* of one shard */
  uint32_t self, other; /* parts of this copy and of the shard's other copy */
  uint32_t peer;        /* the other copy's number among the voters */
  enum mlfab__copy_phase phase;
  uint32_t term;         /* term of the record by which it began to serve */
  int stops;             /* the other copy closed while it served: so does this one */
  mlfab__mirror *mirror; /* mirror of server 0's other jobs; NULL: this server has none */
  int arrived;           /* the other copy has the moment by which it joins */
  uint64_t apart_ns;     /* start of the time in which it lacks the mirror's stream; 0: has it */
  uint64_t frozen_ns;    /* start of the time in which the serving copy has no lease; 0: has it */
  /* Sender. */
  mlfab__moment moment;
  int sends;                 /* a moment is under way: MLFAB__SENDS_*, or 0 */
  int link_up;               /* on the present link, the other copy has reported its moment */
  int bare;                  /* the moment under way has no model: END alone */
  uint64_t since, at;        /* store.changes before the moment under way, and at it */
  int joins;                 /* the moment under way joins */
  int drops;                 /* the other copy is being dropped from the record */
  uint64_t retry_ns;         /* next try after a lack of memory */
  uint64_t number;           /* number of the moment under way, or of the last one */
  uint64_t has;              /* number of the other copy's last moment; 0: none */
  uint64_t has_at;           /* store.changes of that moment */
  uint64_t began_ns;         /* when the moment under way was pinned */
  uint64_t heard_ns;         /* when the other copy last reported its moment */
  uint32_t lent;             /* bits: loans of `moment` that the transport has not returned */
  mlfab__file_record record; /* the next record to send; its meta in `meta` */
  int ready;                 /* `record` is filled */
  uint8_t *meta;             /* MLFAB__MOMENT_META */
  /* Receiver. */
  int voids;         /* the collected moment is being freed */
  int takes;         /* it takes moments of the other copy */
  uint64_t heard_of; /* number of the last moment of which a record came */
  mlfab__collect collect;
  uint64_t number_in; /* number of the moment being collected; 0: none */
  uint64_t got;       /* number of the last whole moment ... */
  uint32_t term_in;   /* ... and the term of its sender; 0: nothing */
} mlfab__copy;

/* Adds the role, and a keeper to the server. disk: storage for votes, or NULL. Errors: MEMORY, ARGUMENT (Div_max). */
MLFAB__INTERNAL int mlfab__copy_attach(mlfab_node *node, mlfab__server *server,
                                       const mlfab__voter_disk *disk);
/* losses.c: a worker counts its lost updates when the replica replaces its server. */
MLFAB__INTERNAL void mlfab__losses_attach(struct mlfab__worker *worker);

#endif
