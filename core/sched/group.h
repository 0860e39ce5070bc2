/* group.h - selects the updates of an order that go to an aggregator first, and does the same for models on their way
 * back.
 *
 * Alg. 3: the first n updates of the order go directly. The others form consecutive groups, one for each aggregator,
 * whose sums go to the server. A member must be at its aggregator by t_max, the time at which everything before its
 * group is at the server, so that the server's NIC never waits for an aggregate. Among all n, that whose last update is
 * applied first wins; among equal numbers n the smallest.
 *
 * Interpretations, where the text leaves a choice. The rule also holds for the first group and for n = 0.
 * The last group is sent like the others, and counted. An aggregator that no update reaches in time is
 * skipped. t_max never decreases, though an aggregate may overtake a slow direct transfer: it is applied
 * behind it. With more groups than aggregators, n is infeasible. An aggregate is as large as its largest
 * member. If nothing is feasible, as many leading updates as can arrive go directly, and the rest is not
 * sent.
 *
 * With cut-through (`cut`), an aggregator forwards a sum while its last members still arrive. So a member may be late
 * (MLFAB__GROUP_LATE). In time means: before the sum without this member, sent from t_max on, would be at the server.
 * The first member of a group must arrive before it would itself be at the server. Groups are then one member larger,
 * and a sum is at the server one transfer earlier. The aggregator sends the sum from t_max on, or so much later that it
 * never waits for its members; it ends no later than if it began at once and waited. A late member may delay the
 * updates behind it, so each variant is tried without late members first. A plan with `cut` is never later, except if a
 * free first group changes the groups behind it.
 *
 * Distribution (distribute.c) is Alg. 3 mirrored, for requests of the same model. Transfers are then
 * reserved from the server on, last group first; distributors send when all transfers of the servers are
 * placed. AllReduce is both in sequence, with a worker in the role of the server.
 *
 * Source: MLfabric §5.2, Alg. 3; §6 (AllReduce, stale synchronous); §10.2; §10.3. Departs: as interpreted
 * above; cases that cannot win are abandoned early (group.c). */
#ifndef MLFAB__GROUP_H
#define MLFAB__GROUP_H

#include "network.h"

/* Variants of Alg. 3. In the paper's form the server never waits; other forms are sometimes shorter. */
enum mlfab__group_variant {
  MLFAB__GROUP_PAPER,
  /* the first group may be late, and takes all updates that follow; with n = 0 it may also end after any number of
   * members (`first_most`) */
  MLFAB__GROUP_FIRST_FREE,
  MLFAB__GROUP_TAIL_DIRECT, /* updates left when the aggregators run out go directly */
  MLFAB__GROUP_LATE = 4     /* added to one of these: with `cut`, members may arrive after t_max */
};

typedef struct mlfab__group_input {
  const mlfab__candidate *updates;
  const uint32_t *order; /* n indices of updates; NULL: 0, 1, ... */
  uint32_t n;
  const uint32_t *server; /* node of each */
  uint32_t servers;
  const uint32_t *aggregators; /* k x servers nodes */
  uint32_t k;
  double start; /* t_max before the batch */
  int cut;      /* aggregators cut through; 0: store and forward, as in the paper */
} mlfab__group_input;

/* The result for an update, in the order of the input. */
typedef struct mlfab__grouped {
  uint32_t q;      /* 0: goes directly; else its aggregator, from 1 */
  uint32_t number; /* of its group, from 1; a direct update is a group; 0: not sent */
  double arrive;   /* at the aggregator; if direct: at the server */
  double ready;    /* when its whole group is there; with cut-through the sum starts earlier */
  double end;      /* of the transfer to the server */
  double commit;   /* time when it, and all before it, are at the server */
} mlfab__grouped;

/* The chosen case. */
typedef struct mlfab__group_choice {
  uint32_t variant, n; /* variant: with MLFAB__GROUP_LATE or without */
  uint32_t first_most; /* maximum number of members of a free first group */
  double time;         /* T(n); never: nothing is feasible */
} mlfab__group_choice;

/* Totals of the updates from some position on. */
typedef struct mlfab__group_tail {
  double bytes;     /* bytes through aggregators' ingress if they are grouped */
  double to_server; /* bytes through the servers' ingress if they are direct */
} mlfab__group_tail;

/* Scratch memory, kept between calls; initially all zero. */
typedef struct mlfab__grouper {
  double *times; /* T(n) of the cases tried */
  double *sizes; /* of the group being filled */
  double *hubs;
  mlfab__group_tail *tail;
  double *largest; /* of the updates from some position on, by component */
  mlfab__candidate *candidates;
  mlfab__grouped *grouped;
  uint32_t *members;
  mlfab__course *late;       /* transfers that are forwarded while they arrive, by component */
  mlfab__stretch *stretches; /* the stretches of all of them */
  uint32_t nlate, nstretches, late_room, stretches_room;
  uint32_t times_room, sizes_room, hubs_room, tail_room, largest_room, candidates_room,
      grouped_room, members_room;
  uint64_t evaluations; /* number of computed transfer ends, over all calls */
} mlfab__grouper;

/* Plans the best case of Alg. 3; with best = 1 also of its variants (on equality the paper's). Leaves its transfers
 * reserved in `net`, in order: direct ones, then for each group its members and its aggregate. Fills `out` (n entries).
 * Errors: ARGUMENT, MEMORY; nothing is reserved then. */
MLFAB__INTERNAL int mlfab__group_plan(mlfab__grouper *g, mlfab__network *net,
                                      const mlfab__group_input *in, int best, mlfab__grouped *out,
                                      mlfab__group_choice *choice_p);
/* Computes T(n) of one case. If feasible, reserves it and fills `out` (may be NULL); else returns never and reserves
 * nothing. Errors: ARGUMENT, MEMORY. */
MLFAB__INTERNAL int mlfab__group_case(mlfab__grouper *g, mlfab__network *net,
                                      const mlfab__group_input *in, uint32_t variant, uint32_t n,
                                      uint32_t first_most, mlfab__grouped *out, double *time_p);
/* Appends the timing of the newest reservation to g->late. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__group_keep(mlfab__grouper *g, const mlfab__network *net,
                                      uint32_t component, double bytes, double end);
MLFAB__INTERNAL void mlfab__group_free(mlfab__grouper *g, mlfab__env *env);

/* ---- distribution, allreduce ---- */

typedef struct mlfab__distribution {
  const uint32_t *server;
  uint32_t servers;
  const double *bytes;          /* size of each server's part of the model */
  const uint32_t *distributors; /* k x servers nodes */
  uint32_t k;
  const uint32_t *requests; /* nodes that want the model */
  const uint32_t *names;    /* index reported to net->watch for each; NULL: 0, 1, ... */
  uint32_t n;
  double now;
  int cut; /* distributors forward each component while it arrives */
} mlfab__distribution;

typedef struct mlfab__delivery {
  uint32_t q; /* 0: from the server; else from this distributor */
  double end; /* time when the whole model has arrived */
} mlfab__delivery;

/* Fills out[n], and hubs[k] (when a distributor has the model; never: it gets none). Reserves the transfers in `net`.
 * choice_p: of the mirrored plan. makespan_p: when the last request is served (now, without requests). Errors: as for
 * plans. If a request is out of reach, the time is never, and all stays unreserved. */
MLFAB__INTERNAL int mlfab__group_distribute(mlfab__grouper *g, mlfab__network *net,
                                            const mlfab__distribution *d, mlfab__delivery *out,
                                            double *hubs, mlfab__group_choice *choice_p,
                                            double *makespan_p);

typedef struct mlfab__allreduce {
  uint32_t root; /* a node */
  double bytes;
  const uint32_t *aggregators, *distributors;
  uint32_t k, distributors_k;
  const uint32_t *nodes;   /* nodes of the workers; the root is the worker on the root's node */
  const double *available; /* times when the workers' shares are ready */
  uint32_t n;
} mlfab__allreduce;

/* Fills push[n] and get[n] (the root itself: when it is available, and the result at once), the choices for both
 * directions, and the time when the last worker has the sum. Errors: as above. */
MLFAB__INTERNAL int mlfab__group_allreduce(mlfab__grouper *g, mlfab__network *net,
                                           const mlfab__allreduce *a, mlfab__grouped *push,
                                           mlfab__delivery *get, mlfab__group_choice *push_p,
                                           mlfab__group_choice *get_p, double *makespan_p);

/* Stale synchronous: returns 1 if a worker that has finished `mine` iterations may start the next. */
MLFAB__INTERNAL int mlfab__group_may_start(const uint64_t *finished, uint32_t n, uint64_t mine,
                                           uint64_t staleness);

#endif
