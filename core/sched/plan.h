/* plan.h - the plan of a batch: the applied updates, their order, and their aggregators. The scheduler role calls it.
 *
 * order.h finds the order, group.h the aggregators. This file combines the two in one call, with everything that a
 * scheduler reports of each update. A batch that is a list keeps its order, and only updates that can never arrive are
 * dropped.
 *
 * Positions, and so delays, do not depend on grouping: an aggregate of m updates makes the version m
 * larger. So every plan that group.h may choose respects the delay bound.
 *
 * Source: MLfabric §5, §6. */
#ifndef MLFAB__PLAN_H
#define MLFAB__PLAN_H

#include "group.h"
#include "order.h"

typedef struct mlfab__batch {
  const mlfab__candidate *updates;
  uint32_t n;
  const uint32_t *server; /* node of each */
  uint32_t servers;
  const uint32_t *aggregators; /* k x servers nodes */
  uint32_t k;
  int64_t delay_bound; /* tau_max: an applied update's delay is smaller; INT64_MAX: no bound */
  int64_t version;     /* version of the model when the first update of the batch is applied */
  double backlog;      /* time when all earlier planned updates are at the server; 0: now */
  int list;            /* the updates stay as listed; none is dropped */
  int best;            /* variants of Alg. 3 are tried too */
  int cut;             /* aggregators cut through */
} mlfab__batch;

enum mlfab__outcome { MLFAB__PLAN_APPLIED = 1, MLFAB__PLAN_DROPPED };

typedef struct mlfab__planned {
  uint32_t update; /* index into updates */
  uint8_t fate;    /* mlfab__outcome */
  uint8_t reason;  /* mlfab__reason */
  uint32_t group;  /* 0: directly; else its aggregator, from 1 */
  /* 1, 2, ... in the order of commits; a direct update is a group of its own */
  uint32_t group_number;
  double start;  /* when its own transfer may start */
  double arrive; /* at its aggregator; directly: at the server */
  double ready;  /* when its whole group is at the aggregator */
  double end;    /* of the transfer to the server */
  double commit; /* when it is applied, at the earliest */
  /* its delay; if dropped: the delay that it would have behind all applied updates. Negative with versions from the
   * future. */
  int64_t delay;
} mlfab__planned;

typedef struct mlfab__planner {
  mlfab__env *env;
  mlfab__orderer orderer;
  mlfab__grouper grouper;
  mlfab__ordered *ordered;
  mlfab__grouped *grouped;
  uint32_t *order;
  uint32_t room;
} mlfab__planner;

/* Allocates nothing yet. A planner keeps its memory between calls. */
MLFAB__INTERNAL void mlfab__planner_init(mlfab__planner *planner, mlfab__env *env);
MLFAB__INTERNAL void mlfab__planner_free(mlfab__planner *planner);
/* Plans a batch on `net`, and leaves the transfers of the plan reserved there (net->watch is called for each). Fills
 * `out` (n entries): the *applied_p applied updates in the order of commits, then the dropped updates in the order of the
 * list. choice_p (may be NULL): the case of Alg. 3; its time is when the last update is applied, or never if a list
 * cannot be planned as a whole. Errors: ARGUMENT (a node that does not exist; bytes, an available time or a backlog
 * that is negative or NaN), MEMORY; nothing is reserved then. */
MLFAB__INTERNAL int mlfab__plan_batch(mlfab__planner *planner, mlfab__network *net,
                                      const mlfab__batch *batch, mlfab__planned *out,
                                      uint32_t *applied_p, mlfab__group_choice *choice_p);

#endif
