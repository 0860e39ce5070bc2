/* keeper.h - what a server with a replica may apply, answer and show. Layer 4.
 *
 * The server sends its replica its state, moment by moment: a moment is what the server has between two commits. When
 * the replica has a moment, all that the server had decided by then is durable. The keeper counts decisions and commits,
 * and knows which of them the replica has.
 *
 *    ALONE    there is no replica to be kept close: everything is applied and shown; answers that ask for DURABLE wait
 *      |  moment(joins): the replica has all but a little                                  ^
 *      v                                                                                   |
 *    JOINING  commits keep within Div_max of that moment                   alone(): the replica is lost, or lags
 *      |  joined(): the replica has it, and two of three voters know that it is in sync    |
 *      v                                                                                   |
 *    IN_SYNC  commits keep within Div_max of the last moment that the replica has ---------+
 *
 * A commit waits while the bound would be above Div_max with it (divergence.h). If it would be above Div_max by that
 * commit alone, the commit waits until the replica has all others; then it is applied, and hidden until the replica
 * has it, too: neither answers nor pulls tell anybody of it. So Div_max 0 is lock step, and infinity bounds nothing. An
 * answer to an update that asks for DURABLE waits until a moment with it is IN_SYNC at the replica, or until the worker
 * withdraws it, at its deadline: then it is answered like any other, or it would be in the way of the worker's next ones
 * as long as there is no replica.
 *
 * Commits may be hidden one right after another. So that pulls get on, each pins the next slice that it reads at the
 * moment between two of them (mlfab__serve_offer), and sends it while the next commit is hidden.
 *
 * With rounds and a finite Div_max all answers wait so, because the bound does not count the open round's sum.
 *
 * Answers that wait are lost with the worker's link. HELLO then tells the worker which of its updates are durable, not
 * which are applied; it sends the others again, and the answer to a repetition waits like the first.
 *
 * FROZEN beside these: nothing is answered or shown but what is durable.
 *
 * Invariants. (1) IN_SYNC, and JOINING from its moment on: the bound for what is not hidden is at most Div_max, and at most
 * one commit is hidden. (2) An answer DURABLE is posted only IN_SYNC, and for an update that is in
 * a moment which the replica has. (3) Memory: at most one waiting answer for each update in flight of a worker.
 *
 * Source: MLfabric §5.3. Departs: there, the scheduler checks the bound when a batch ends; here, the server keeps it,
 * always (design: the bound does not depend on a scheduler). */
#ifndef MLFAB__KEEPER_H
#define MLFAB__KEEPER_H

#include "../server/server.h"
#include "divergence.h"

enum mlfab__keeper_phase { MLFAB__KEEPER_ALONE, MLFAB__KEEPER_JOINING, MLFAB__KEEPER_IN_SYNC };

typedef struct mlfab__keeper_answer { /* one that waits */
  uint32_t worker;
  int durable;     /* it waits for that */
  uint64_t moment; /* number of decisions when it was decided */
  mlfab__push_ack ack;
} mlfab__keeper_answer;

typedef struct mlfab__keeper {
  enum mlfab__keeper_phase phase;
  double div_max;
  mlfab__divergence ledger;
  uint64_t decisions;                    /* answers to pushes so far */
  uint64_t sent_decisions, sent_commits; /* at the moment that is being sent */
  double sent_history;                   /* |h| then, if the optimizer is momentum */
  int sending;
  int frozen;             /* this copy may not say that anything is applied */
  uint64_t has_decisions; /* at the last moment that the replica has */
  /* By worker: windows at these moments. `sent` is what the replica's will be. */
  mlfab__window *sent, *has;
  mlfab__window *told; /* by worker: the answer of `window` */
  uint8_t *asked;      /* by worker: it has asked for DURABLE */
  mlfab__keeper_answer *answers;
  uint32_t nanswers, room;
  /* The copy that the server is: its moments end when the model is freed. */
  void *above;
  void (*stop)(void *above);
  void (*model)(void *above); /* there is a new model. ALONE */
  /* Has it its lease at this time? A process that was stopped finds out only when it looks. */
  int (*leased)(void *above, uint64_t now_ns);
} mlfab__keeper;

/* Attaches a keeper, ALONE. Errors: MEMORY, ARGUMENT (Div_max negative or NaN). */
MLFAB__INTERNAL int mlfab__keeper_attach(mlfab__server *server, double div_max);
/* Why a model cannot be kept within Div_max, or NULL: 0 and infinity fit every optimizer. */
MLFAB__INTERNAL const char *mlfab__keeper_check(const mlfab_model_options *options, double div_max,
                                                int callback);
/* The server begins to serve with a state that came from another copy: it has told and promised nothing yet. ALONE. */
MLFAB__INTERNAL void mlfab__keeper_begin(mlfab__server *server);
/* The present state becomes the moment that is sent; joins: commits keep close to it from now on. */
MLFAB__INTERNAL void mlfab__keeper_moment(mlfab__server *server, int joins);
/* The replica has that moment. joined: and it is known to be in sync. alone: no replica is in sync any more. */
MLFAB__INTERNAL void mlfab__keeper_has(mlfab__server *server);
/* The moment that was being sent will not arrive. */
MLFAB__INTERNAL void mlfab__keeper_unsend(mlfab__server *server);
MLFAB__INTERNAL void mlfab__keeper_joined(mlfab__server *server);
MLFAB__INTERNAL void mlfab__keeper_alone(mlfab__server *server);
/* Without its lease (vote.h) a copy may tell nobody that an update is applied, nor show it: everything that is not
 * durable already waits. */
MLFAB__INTERNAL void mlfab__keeper_freeze(mlfab__server *server, int frozen);
/* Has anything been decided since that moment, or since the last one that was sent? Then another one is due. */
MLFAB__INTERNAL int mlfab__keeper_behind(const mlfab__server *server);
/* The next commit may be hidden: pins the next slice of each pull that goes, so that it gets on meanwhile. */
MLFAB__INTERNAL void mlfab__serve_offer(mlfab__server *server);

#endif
