/* keeper.h - decides what a server with a replica may apply, answer and show. Server and copy.c call it.
 *
 * The server sends its state to its replica, moment by moment: a moment is the server's state between two commits. When
 * the replica has a moment, everything that the server had decided by then is durable. The keeper counts decisions and
 * commits, and knows which of them the replica has.
 *
 *    ALONE    there is no replica to be kept close: everything is applied and shown; answers that ask for DURABLE wait
 *      |  moment(joins): the replica has all but a little                                  ^
 *      v                                                                                   |
 *    JOINING  commits keep within Div_max of that moment                   alone(): the replica is lost, or lags
 *      |  joined(): the replica has it, and two of three voters know that it is in sync    |
 *      v                                                                                   |
 *    IN_SYNC  commits keep within Div_max of the last moment that the replica has ---------+
 *
 * A commit waits while the bound would be above Div_max with it (divergence.h). If that commit alone exceeds Div_max,
 * it waits until the replica has all other commits. Then the server applies it and hides it until the replica has it,
 * too: no answer and no pull shows it. So Div_max 0 is lock step, and infinity sets no bound. An answer to an update
 * that asks for DURABLE waits until a moment with the update is IN_SYNC at the replica, or until the worker withdraws
 * the request at its deadline. Then it is answered like any other: else, without a replica, it would block the worker's
 * next updates forever.
 *
 * One hidden commit may directly follow another. For progress, each pull pins the next slice that it reads at the
 * moment between the two (mlfab__keeper_offer), and sends it while the next commit is hidden.
 *
 * With rounds and a finite Div_max all answers wait like this, because the bound does not count the open round's sum.
 *
 * Waiting answers are lost with the worker's link. HELLO then tells the worker which of its updates are durable,
 * instead of which are applied. The worker sends the others again, and the answer to a repetition waits like the first.
 *
 * FROZEN, beside these states: the server answers and shows only durable updates.
 *
 * Invariants. (1) IN_SYNC, and JOINING from its moment on: the bound of the commits that are visible is at most
 * Div_max, and at most one commit is hidden. (2) An answer DURABLE is posted only IN_SYNC, and only for an update in a
 * moment that the replica has. (3) Memory: at most one waiting answer for each update in flight of a worker.
 *
 * Source: MLfabric §5.3. Departs: there, the scheduler checks the bound when a batch ends. Here the server keeps it all
 * the time (design: the bound does not depend on a scheduler). */
#ifndef MLFAB__KEEPER_H
#define MLFAB__KEEPER_H

#include "../server/server.h"
#include "divergence.h"

enum mlfab__keeper_phase { MLFAB__KEEPER_ALONE, MLFAB__KEEPER_JOINING, MLFAB__KEEPER_IN_SYNC };

typedef struct mlfab__keeper_answer { /* a waiting answer */
  uint32_t worker;
  int durable;     /* it waits to be durable */
  uint64_t moment; /* number of decisions when its update was decided */
  mlfab__push_ack ack;
} mlfab__keeper_answer;

typedef struct mlfab__keeper {
  enum mlfab__keeper_phase phase;
  double div_max;
  mlfab__divergence ledger;
  uint64_t decisions;                    /* number of answers to pushes so far */
  uint64_t sent_decisions, sent_commits; /* numbers at the moment that is being sent */
  double sent_history;                   /* |h| then, if the optimizer is momentum */
  int sending;
  int frozen;             /* this copy may not report any update as applied */
  uint64_t has_decisions; /* number at the last moment that the replica has */
  /* By worker: its windows at these moments. `sent` are the windows that the replica is about to have. */
  mlfab__window *sent, *has;
  mlfab__window *told; /* by worker: the last answer of `window` */
  uint8_t *asked;      /* by worker: it has asked for DURABLE before */
  mlfab__keeper_answer *answers;
  uint32_t nanswers, room;
  /* The copy (copy.h) above the keeper; `end` runs when the model is freed and ends its moments. */
  void *above;
  void (*stop)(void *above);
  void (*model)(void *above); /* called for a new model. ALONE */
  /* Has the copy its lease at this time? A process that was stopped finds out only at its next look. */
  int (*leased)(void *above, uint64_t now_ns);
} mlfab__keeper;

/* Attaches a keeper, ALONE. Errors: MEMORY, ARGUMENT (Div_max negative or NaN). */
MLFAB__INTERNAL int mlfab__keeper_attach(mlfab__server *server, double div_max);
/* Returns why a model cannot be kept within Div_max, or NULL: 0 and infinity fit every optimizer. */
MLFAB__INTERNAL const char *mlfab__keeper_check(const mlfab_model_options *options, double div_max,
                                                int callback);
/* Starts with a state that came from another copy: this server has told and promised nothing yet. ALONE. */
MLFAB__INTERNAL void mlfab__keeper_begin(mlfab__server *server);
/* Makes the present state the moment that is sent; joins: from now on commits keep close to it. */
MLFAB__INTERNAL void mlfab__keeper_moment(mlfab__server *server, int joins);
/* has: the replica has that moment. joined: it is also known to be in sync. alone: no replica is in sync any more. */
MLFAB__INTERNAL void mlfab__keeper_has(mlfab__server *server);
/* Drops the moment being sent: it will not arrive. */
MLFAB__INTERNAL void mlfab__keeper_unsend(mlfab__server *server);
MLFAB__INTERNAL void mlfab__keeper_joined(mlfab__server *server);
MLFAB__INTERNAL void mlfab__keeper_alone(mlfab__server *server);
/* Freezes: without its lease (vote.h) a copy may neither report nor show an update as applied. Everything that is not
 * durable yet waits. */
MLFAB__INTERNAL void mlfab__keeper_freeze(mlfab__server *server, int frozen);
/* Was anything decided since the moment being sent, or else since the last one sent? Then another moment is due. */
MLFAB__INTERNAL int mlfab__keeper_behind(const mlfab__server *server);
/* Prepares for a hidden commit: pins the next slice of each running pull, so that the pull continues meanwhile. */
MLFAB__INTERNAL void mlfab__keeper_offer(mlfab__server *server);

#endif
