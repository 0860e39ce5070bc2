/* copy.h - a server and its replica: one serves, and sends its states to the other, which takes over when the first is
 * lost. Layer 5.
 *
 * Three processes keep a shard alive: copy A (the dedicated server of the configuration), copy B (its replica), and the
 * scheduler as witness (witness.c). Which copy serves is decided by votes (vote.h). Both copies have all roles of a
 * server, and this one; the copy that does not serve has no callers, because the node turns them away (node.h, Copies).
 *
 *    STANDS_BY --the vote says: this copy, and its state is whole--> SERVES --it hears neither of the others for 6 beats-->
 *    SUSPENDED --it hears one again--> SERVES
 *       \-- SERVES or SUSPENDED --another copy serves by a later record--> STANDS_BY, its state is void
 *
 * While it has no lease (vote.h) the copy that serves is frozen: it answers nothing (keeper.h). When it is SUSPENDED
 * workers are turned away, so that they find the copy that took over.
 *
 * The stream. The serving copy sends moments (../checkpoint/moment.h), record by record, on its VOTER link to the other:
 *
 *    sender:    IDLE --something was decided since, or the other copy has nothing--> SENDS --END is sent--> SENT
 *                 ^--MOMENT_HAS, all bytes returned: keeper_has-----------------------------------------------/
 *               link lost: IDLE; when it is back, the receiver says which moment it has
 *    receiver:  NOTHING --a full moment begins--> COLLECTS --END--> installs it in one step, MOMENT_HAS
 *                 ^--link lost, sender of another term: what was collected is void; the last moment stays
 *
 * A moment is full, or has what changed since the last one that the receiver has. One is under way at a time, and a new
 * one begins as soon as the last has arrived: so updates merge by themselves, and the traffic is a state for each moment
 * instead of one for each update. The receiver takes a stream only from the copy that serves by its own bond, and none
 * while it asks to replace it.
 *
 * A server without a model, in a fabric that uses collectives only or has none yet, sends END alone. When it gets a model
 * the other copy, which has none, leaves the record; until then nothing is answered.
 *
 * In sync. When the receiver has a full moment, the next one joins (keeper.h), and when it has that, the sender proposes
 * the record that names both copies. It drops the other copy from the record when it is silent for 5 beats, or has not
 * got a moment within silent_death_ns.
 *
 * Promotion. The collected rest is void, and the server role begins with the last moment: windows, clocks, optimizer.
 * Workers say HELLO, and
 *  - go by the windows for their open updates: send again what is not decided there (../worker/push.c, resync);
 *  - count what they were told is applied and is not: at most div_max of it; their progress goes on without it
 *    (PROGRESS), so that rounds do not wait for it;
 *  - void their cache of the shard, and ask their pulls again.
 *
 * Invariants. (1) An update is decided once in the history that the serving copies make together: a moment has windows
 * and weights of one instant. (2) DURABLE: keeper.h (2) and vote.h (2). (3) A worker takes answers of one copy at a time,
 * that of the largest term it has heard of. (4) A copy that does not serve answers no HELLO of a worker.
 *
 * Departs from MLfabric §3.3: there, workers send their updates to the replica, through aggregators of its own. Here the
 * server sends its state: it outlives the worker, carries optimizers of any kind, merges without limit, and needs no
 * second order of updates; the price is the server's link out. tools/replicate.h plans the paper's way. */
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

typedef struct mlfab__copy {
  mlfab_node *node;
  mlfab__server *server;
  mlfab__port port;     /* peers are voters */
  mlfab__voters voters; /* of one shard */
  uint32_t self, other; /* parts of this copy and of the other one in the shard */
  uint32_t peer;        /* the other copy's number among the voters */
  enum mlfab__copy_phase phase;
  uint32_t term;         /* of the record by which it began to serve */
  int stops;             /* the other copy has closed while it served: so does this one */
  mlfab__mirror *mirror; /* of server 0's other jobs; NULL: this server has none */
  int arrived;           /* the other copy has the moment by which it joins */
  uint64_t apart_ns;  /* since when it has no stream of the mirror, though it should; 0: it has */
  uint64_t frozen_ns; /* since when the copy that serves has no lease; 0: it has one */
  /* Sender. */
  mlfab__moment moment;
  int sends;          /* a moment is under way; its last record was sent: 2 */
  int link_up;        /* the other copy has said what it has, on the present link */
  int bare;           /* the moment under way is that of a server without a model: END alone */
  uint64_t since, at; /* of the moment under way: store.changes before it, and then */
  int joins;          /* likewise */
  int drops;          /* the other copy is to leave the record */
  uint64_t retry_ns;  /* after a lack of memory */
  uint64_t number;    /* of the moment under way, or of the last one */
  uint64_t has;       /* the last one that the other copy has; 0: none */
  uint64_t has_at;    /* store.changes of that moment */
  uint64_t began_ns;  /* when the moment under way was pinned */
  uint64_t heard_ns;  /* when the other copy said what it has */
  uint32_t lent;      /* bits: loans of it that the transport has not returned */
  mlfab__file_record record; /* the next one to send; its meta in `meta` */
  int ready;                 /* `record` is filled */
  uint8_t *meta;             /* MLFAB__MOMENT_META */
  /* Receiver. */
  int voids;         /* what was collected is being freed */
  int takes;         /* moments of the other copy */
  uint64_t heard_of; /* the last moment of which a record came */
  mlfab__collect collect;
  uint64_t number_in; /* of the moment that is collected; 0: none */
  uint64_t got;       /* the last whole one ... */
  uint32_t term_in;   /* ... and the term of its sender; 0: nothing */
} mlfab__copy;

/* Adds the role; the server gets a keeper. disk: of votes, or NULL. Errors: MEMORY, ARGUMENT (Div_max). */
MLFAB__INTERNAL int mlfab__copy_attach(mlfab_node *node, mlfab__server *server,
                                       const mlfab__voter_disk *disk);
/* losses.c: a worker whose server is replaced by its replica counts what is lost. */
MLFAB__INTERNAL void mlfab__losses_attach(struct mlfab__worker *worker);

#endif
