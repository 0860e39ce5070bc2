/* group.h - which updates of an order go to an aggregator first, and the same for models on their
 * way back. Layer 2.
 *
 * Alg. 3: the first n updates of the order go directly; the others form consecutive groups, one an
 * aggregator, whose sums go to the server. A member must be at its aggregator by t_max, when
 * everything before its group is at the server, so that the server's NIC never waits for an
 * aggregate. Of all n the one whose last update is applied first is taken, and the smallest of
 * those.
 *
 * Readings, where the text leaves a choice. The rule holds for the first group and for n = 0 too.
 * The last group is sent like the others, and counted. An aggregator that nobody reaches in time is
 * skipped. t_max never goes back, though an aggregate may overtake a slow direct transfer: it is
 * applied behind it. More groups than aggregators: n is infeasible. An aggregate is as large as its
 * largest member. Nothing feasible: as many leading updates as can arrive go directly, and the rest
 * does not go.
 *
 * Aggregators that cut through (`cut`) forward a sum while its last members still come in. So a
 * member may be late (MLFAB__GROUP_LATE): it is in time when it is there before the sum without it
 * would be at the server, begun at t_max; the first of a group, before it would be there itself.
 * Groups are a member larger then, and a sum is there a transfer earlier. It is forwarded from
 * t_max on, or as much later that it never lacks what its members bring: that is no later than if
 * it began at once and waited. A late member may hold up what stands behind it, and so each variant
 * is tried without late members first: with `cut` the plan is never later, but where a free first
 * group makes the ones behind it others.
 *
 * Distribution (distribute.c) is Alg. 3 in a mirror, for requests of the same model; transfers are
 * then reserved from the server on, last group first, and distributors send when the servers'
 * transfers are all placed, cutting through or not. AllReduce is the one behind the other, with a
 * worker for a server.
 *
 * Source: MLfabric §5.2, Alg. 3; §6 (AllReduce, stale synchronous); §10.2; §10.3. Departs: as read
 * above, and cases that cannot win are left before they end (group.c). */
#ifndef MLFAB__GROUP_H
#define MLFAB__GROUP_H

#include "network.h"

/* How Alg. 3 is varied. In the paper's own form the server never waits, which is not always
 * shortest. */
enum mlfab__group_variant {
  MLFAB__GROUP_PAPER,
  MLFAB__GROUP_FIRST_FREE, /* the first group need not be in time, and takes all that follow; with n = 0
                            * it may also end after any number of members (`first_most`) */
  MLFAB__GROUP_TAIL_DIRECT, /* what is left when the aggregators run out goes directly */
  MLFAB__GROUP_LATE = 4 /* added to one of these: with `cut`, members may be there behind t_max */
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
  int cut;      /* aggregators cut through; 0: store and forward, as the paper reckons */
} mlfab__group_input;

/* What becomes of an update, in the order of the input. */
typedef struct mlfab__grouped {
  uint32_t q;      /* 0: goes directly; else its aggregator, from 1 */
  uint32_t number; /* of its group, from 1; a direct update is a group; 0: it does not go at all */
  double arrive;   /* at the aggregator; directly: at the server */
  double ready;    /* when all of its group is there; only cutting through its sum goes before */
  double end;      /* of that transfer */
  double commit;   /* when it, and all before it, are there */
} mlfab__grouped;

/* Which case. */
typedef struct mlfab__group_choice {
  uint32_t variant, n; /* variant: with MLFAB__GROUP_LATE or without */
  uint32_t first_most; /* members that a free first group has at most */
  double time;         /* T(n); never: nothing is feasible */
} mlfab__group_choice;

/* Of the updates from some place on. */
typedef struct mlfab__group_tail {
  double bytes;     /* that pass an aggregator's ingress if they are grouped */
  double to_server; /* that pass the server's ingress if they are not */
  double largest;
} mlfab__group_tail;

/* Scratch memory, kept between calls; all zero at first. */
typedef struct mlfab__grouper {
  double *times; /* T(n) of the cases that were tried */
  double *sizes; /* of the group that is being filled */
  double *hubs;
  mlfab__group_tail *tail;
  mlfab__candidate *candidates;
  mlfab__grouped *grouped;
  uint32_t *members;
  mlfab__course *late;       /* what is passed on while it comes, component by component */
  mlfab__stretch *stretches; /* of those, one after the other */
  uint32_t nlate, nstretches, late_room, stretches_room;
  uint32_t times_room, sizes_room, hubs_room, tail_room, candidates_room, grouped_room,
      members_room;
  uint64_t evaluations; /* of when a transfer ends, over all calls */
} mlfab__grouper;

/* The best case of Alg. 3, or with best = 1 of its variants too (the paper's own on equality),
 * leaving its transfers reserved in `net`, in the order: direct ones, then group after group its
 * members and its aggregate. Fills `out` (n entries). Errors: ARGUMENT, MEMORY; nothing is reserved
 * then. */
MLFAB__INTERNAL int mlfab__group_plan(mlfab__grouper *g, mlfab__network *net,
                                      const mlfab__group_input *in, int best, mlfab__grouped *out,
                                      mlfab__group_choice *choice_p);
/* T(n) of one case; reserves it and fills `out` (NULL: not wanted) when it is feasible. Never, and
 * nothing reserved, when it is not. Errors: ARGUMENT, MEMORY. */
MLFAB__INTERNAL int mlfab__group_case(mlfab__grouper *g, mlfab__network *net,
                                      const mlfab__group_input *in, uint32_t variant, uint32_t n,
                                      uint32_t first_most, mlfab__grouped *out, double *time_p);
/* Keeps how the newest reservation goes at the end of g->late. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__group_keep(mlfab__grouper *g, const mlfab__network *net,
                                      uint32_t component, double bytes, double end);
MLFAB__INTERNAL void mlfab__group_free(mlfab__grouper *g, mlfab__env *env);

/* ---- distribution, allreduce ---- */

typedef struct mlfab__distribution {
  const uint32_t *server;
  uint32_t servers;
  const double *bytes;          /* of each server's part of the model */
  const uint32_t *distributors; /* k x servers nodes */
  uint32_t k;
  const uint32_t *requests; /* nodes that want the model */
  const uint32_t *names;    /* how net->watch is told of them; NULL: 0, 1, ... */
  uint32_t n;
  double now;
  int cut; /* distributors cut through: each component is handed on as it comes */
} mlfab__distribution;

typedef struct mlfab__delivery {
  uint32_t q; /* 0: from the server; else from this distributor */
  double end; /* when it has the model */
} mlfab__delivery;

/* Fills out[n], and hubs[k] (when a distributor has the model; never: it gets none). The transfers
 * are reserved in `net`. choice_p: of the mirrored plan. makespan_p: when the last one has it (now,
 * without requests). Errors: as for plans; time never and nothing reserved when somebody cannot be
 * reached. */
MLFAB__INTERNAL int mlfab__group_distribute(mlfab__grouper *g, mlfab__network *net,
                                            const mlfab__distribution *d, mlfab__delivery *out,
                                            double *hubs, mlfab__group_choice *choice_p,
                                            double *makespan_p);

typedef struct mlfab__allreduce {
  uint32_t root; /* a node */
  double bytes;
  const uint32_t *aggregators, *distributors;
  uint32_t k, distributors_k;
  const uint32_t *nodes;   /* of the workers; the root is the one on the root's node */
  const double *available; /* when each one's share is ready */
  uint32_t n;
} mlfab__allreduce;

/* Fills push[n] and get[n] (the root's own entries: all there when available, and has it at once),
 * the choices of both ways, and when the last one has the sum. Errors: as above. */
MLFAB__INTERNAL int mlfab__group_allreduce(mlfab__grouper *g, mlfab__network *net,
                                           const mlfab__allreduce *a, mlfab__grouped *push,
                                           mlfab__delivery *get, mlfab__group_choice *push_p,
                                           mlfab__group_choice *get_p, double *makespan_p);

/* Stale synchronous: 1 when a worker that has finished `mine` iterations may start the next. */
MLFAB__INTERNAL int mlfab__group_may_start(const uint64_t *finished, uint32_t n, uint64_t mine,
                                           uint64_t staleness);

#endif
