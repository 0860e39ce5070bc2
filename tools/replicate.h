/* replicate.h - which updates of a batch go to a replica in this batch, and by which way.
 *
 * A replica gets the server's updates in the server's order, on the capacity that the batch leaves. The
 * list for it is: the updates that the server has and the replica still lacks (punted), then those of the
 * batch. Alg. 3 plans the list towards the replica, with aggregators of the replica's own. Then only a prefix
 * is kept: whole groups, of which no aggregator holds a part across batches. The others are punted to
 * the next batch, which is free to group them anew.
 *
 *   status 0: the bound holds when the last update of the batch is at the server (T_last). Kept are the groups
 *             that the replica has by then.
 *   status 1: it does not. Kept are the groups up to the first one (at T_e) with which it holds, and the last
 *             transfer to the server, alone, begins no earlier than T_e. Its members travel as planned.
 *   status 2: the bound fails with every group, or the last transfer would never end then. The last transfer is
 *             given back. The server must not apply its group, nor may a replica that gets it. The groups of status 0
 *             or 1 are kept.
 *
 * "Last" is the last in the order of commits, which is not always the last to arrive: updates behind a
 * delayed update in the order would wait with it. Several replicas are planned one after the other, each
 * with the capacity that the earlier plans leave; the last transfer waits for the latest T_e. A server of several
 * parts has a replica of as many parts.
 *
 * In parts (`part` > 0). Alg. 3 has too few aggregators for a long list, so it sends the first updates
 * directly. A plan keeps just these: the longer the list, the more bytes an update costs. In
 * parts, nothing is sent while the bound with the whole list outstanding is at most `idle`. Beyond, the list for
 * Alg. 3 is the first `part` updates, or as many as the bound needs, and all of them are kept, whenever they
 * arrive. The rest is punted.
 *
 * A plan is a wish. Between commits the bound may be exceeded in it (`peak`). The server's ledger (divergence.h) keeps
 * the bound; with it the server applies a group later than planned.
 *
 * Source: MLfabric §5.3; §10.2 (several servers). Departs: groups are kept whole or not at all; "a prefix of U
 * server updates" means replica updates; the plan does not end where the paper has no answer (status 2); parts. */
#ifndef REPLICATE_H
#define REPLICATE_H

#include "core/replica/divergence.h"
#include "core/sched/plan.h"

/* ---- the formulas of the bound (divergence.h), in plain double arithmetic that rounds to nearest ---- */

/* The coefficients of w_s - w_r (or w_r - w_s if r > s): c[0] of h_0, c[i] of u_i. c has max(s, r) + 1
 * elements. */
MLFAB__INTERNAL void mlfab__divergence_coefficients(double gamma, uint32_t s, uint32_t r,
                                                    double *c);
/* B(s, r) with h0 >= |h_0| and norms[i - 1] >= |u_i|. O(max(s, r)). */
MLFAB__INTERNAL double mlfab__divergence_between(double gamma, double h0, const double *norms,
                                                 uint32_t s, uint32_t r);
/* The same difference when a group of updates is one step: the server has applied `a` groups, the i-th of
 * groups[i] updates, the replica `b` groups. Fills c, for h_0 and the n updates that the one with more of
 * them has applied (c has n + 1 elements); returns n. Coefficients may be negative: mlfab__divergence_weigh
 * makes a bound of them. O(n (a + b)). */
MLFAB__INTERNAL uint32_t mlfab__divergence_grouped(double gamma, const uint32_t *groups, uint32_t a,
                                                   const uint32_t *others, uint32_t b, double *c);
/* |c[0]| h0 + sum of |c[i]| norms[i - 1]. */
MLFAB__INTERNAL double mlfab__divergence_weigh(const double *c, double h0, const double *norms,
                                               uint32_t n);
/* A merge of m commits has the effect of all of them. It carries X = sum of x[i] u_i and Y = sum of y[i] u_i, i from 0.
 * The replica applies it: w <- w + w_h h + X; h <- h_h h + Y. */
MLFAB__INTERNAL void mlfab__divergence_weights(double gamma, uint32_t m, double *x, double *y,
                                               double *w_h_p, double *h_h_p);
/* ---- planning ---- */

typedef struct mlfab__replica {
  const uint32_t *nodes;       /* one a server */
  const uint32_t *aggregators; /* k x servers nodes */
  uint32_t k;
  const mlfab__candidate
      *punted; /* at the server but not here, oldest first; sent from their workers */
  uint32_t npunted;
  double history; /* H at the replica's state, at least |h| */
  double start;   /* when all that was planned for it before is there; 0: now */
  /* In parts: how many updates are planned at a time, and up to which bound nothing is sent. 0: as in the
   * paper. */
  uint32_t part;
  double idle;
} mlfab__replica;

typedef struct mlfab__replication {
  const mlfab__replica *replicas;
  uint32_t n;
  double gamma, div_max; /* div_max: infinity: no bound */
} mlfab__replication;

/* The part of one replica. Counts are of its list. */
typedef struct mlfab__replica_plan {
  uint32_t status;
  mlfab__group_choice choice; /* of the whole list */
  mlfab__grouped *grouped;    /* in: room for npunted + n entries; out: the whole list as planned */
  uint32_t by_last;           /* those that are there by T_last ... */
  double divergence_by_last;  /* ... and the bound then */
  double needed;              /* T_e; never: the last transfer need not wait for it */
  uint32_t frozen, groups;    /* updates and groups that are kept */
  double divergence, peak;    /* the bound at the end; its maximum over time */
  double history;             /* H at the replica's new state: `history` of the next batch */
} mlfab__replica_plan;

typedef struct mlfab__replicated {
  uint32_t status;     /* the largest of the replicas' */
  double last, needed; /* T_last; the latest T_e, or never */
  double time;         /* when the last update is applied; never with status 2 */
} mlfab__replicated;

/* Scratch memory, kept between calls; initially all zero. */
typedef struct mlfab__replicator {
  mlfab__candidate *list;
  double *history, *lead; /* H_i, and H_1 + ... + H_i */
  uint32_t room;
  /* The newest transfer to the server: its components, and the stretches of all of them. */
  struct mlfab__sent *sent;
  mlfab__stretch *pieces;
  uint32_t nsent, sent_room, npieces, pieces_room;
  mlfab__env *env;
  void (*watch)(void *user, const mlfab__transfer *transfer); /* the caller's */
  void *user;
  int code;
} mlfab__replicator;

/* Plans a batch like mlfab__plan_batch, and what its replicas get. Leaves the transfers to the server and those
 * kept for replicas reserved in `net`. net->watch hears of the batch's, then of each replica's (`index` is
 * then a position in its list), then, with status 1, of the last to the server again: the newer report
 * counts. With status 1 `end` and `commit` of the last group in `out` are the delayed ones, with status 2 they
 * are never. `plans`: one a replica. Errors: ARGUMENT (as for a batch; gamma or div_max as for the ledger; a
 * norm or history that is negative, NaN or infinite; idle negative or NaN), MEMORY; nothing is reserved then. */
MLFAB__INTERNAL int mlfab__replicate_batch(mlfab__replicator *replicator, mlfab__planner *planner,
                                           mlfab__network *net, const mlfab__batch *batch,
                                           const mlfab__replication *replication,
                                           mlfab__planned *out, uint32_t *applied_p,
                                           mlfab__group_choice *choice_p,
                                           mlfab__replica_plan *plans, mlfab__replicated *result_p);
MLFAB__INTERNAL void mlfab__replicate_free(mlfab__replicator *replicator, mlfab__env *env);

#endif
