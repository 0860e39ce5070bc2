/* network.h - what a network can carry over time, and what has been promised of it. Layer 1.
 *
 * Every node has an egress and an ingress, and the core may have shared links; each is a step
 * function of time, which here means what is left of it (the residual). A transfer from u to v uses
 * egress(u), ingress(v) and the links listed for (u, v), at every instant the least of their
 * residuals; it ends when the integral of that has reached its size, and reserving it takes just
 * that away from each of them. From a node to itself a transfer is free. Sizes and rates share a
 * unit, time starts at 0.
 *
 * It does not plan anything: order.h and group.h do. What the two have in common stands here too:
 * the comparison of times, the candidate, a bundle (an update in pieces, one a server), and what
 * cuts through.
 *
 * Invariants: the steps of a profile ascend strictly, begin at 0 and differ from their neighbours
 * in rate; no residual is negative; undoing a reservation gives back the same bits.
 *
 * Doubles. Two times are told apart only beyond a relative 1e-9 (mlfab__network_less), and a transfer
 * ends inside a step already when all but 1e-9 of it fits, so that rounding cannot make it wait for
 * the end of an outage. Products pass through mlfab__network_exact before they are added to anything,
 * and what is infinite is told by its bits: a result does not depend on contraction or -ffast-math.
 * With rates that are whole numbers all residuals are exact; with others they are not, which costs
 * steps, not safety.
 *
 * Source: MLfabric §4 (network state), fig. 4b and 4c, §10.1 (paths), §10.2 (several servers).
 * Departs: aggregators store and forward, unless they are said to cut through; a bundle's
 * components are reserved one after the other, since at the same time they would count the worker's
 * egress several times. */
#ifndef MLFAB__LINK_H
#define MLFAB__LINK_H

#include "../base/env.h"
#include "../base/map.h"
#include "sched_wire.h"

/* ---- time ---- */

/* The time of what does not happen: positive infinity, made of bits. */
static inline double mlfab__network_never(void) {
  const uint64_t bits = 0x7ff0000000000000u;
  double never;
  memcpy(&never, &bits, sizeof never);
  return never;
}

/* x, out of sight of the optimizer: nothing is contracted with it or reordered around it. */
static inline double mlfab__network_exact(double x) {
#if defined(__GNUC__) && defined(__x86_64__)
  __asm__("" : "+x"(x));
  return x;
#elif defined(__GNUC__) && defined(__aarch64__)
  __asm__("" : "+w"(x));
  return x;
#else
  volatile double seen = x;
  return seen;
#endif
}

/* 1 when a is smaller than b by more than rounding explains: by 1e-9 of the larger, of 1 at least.
 * Everything is smaller than never, but never. */
static inline int mlfab__network_less(double a, double b) {
  if (!(a < b)) return 0;
  if (!mlfab__finite(b)) return 1;
  double scale = b > -a ? b : -a; /* the larger absolute value, as a < b */
  return a < mlfab__network_exact(b - mlfab__network_exact(1e-9 * (scale > 1 ? scale : 1)));
}

/* ---- the network ---- */

enum mlfab__capacity_kind { MLFAB__EGRESS, MLFAB__INGRESS, MLFAB__SHARED };

/* From `at` to the next step (or for ever): this rate. */
typedef struct mlfab__step {
  double at, rate;
} mlfab__step;

typedef struct mlfab__profile {
  mlfab__step *steps;
  uint32_t n, room;
} mlfab__profile;

/* A stretch of a transfer: this rate, all the way along its path. */
typedef struct mlfab__stretch {
  double from, to, rate;
} mlfab__stretch;

/* What a transfer is for. `index`: of the update or request, or the aggregator's q (from 1). */
enum mlfab__purpose {
  MLFAB__TO_SERVER = 1, /* an update goes directly */
  MLFAB__TO_AGGREGATOR, /* a member of a group */
  MLFAB__AGGREGATE,     /* a group's sum */
  MLFAB__TO_DISTRIBUTOR,
  MLFAB__TO_WORKER
};

typedef struct mlfab__transfer {
  uint32_t purpose, index, component, from, to;
  double bytes, available, end;
  const mlfab__stretch *pieces; /* adjacent ones of one rate are one; gaps are pauses */
  uint32_t n;
} mlfab__transfer;

/* What a reservation changed in one profile. */
typedef struct mlfab__change {
  uint32_t profile, first; /* the steps from `first` on */
  uint32_t before, after;  /* so many became so many */
} mlfab__change;

typedef struct mlfab__network {
  mlfab__env *env;
  uint32_t nodes, links;
  mlfab__profile *profiles; /* egress of each node, ingress of each node, links */
  mlfab__step *slab;        /* the first few steps of each */
  mlfab__map paths;         /* from * nodes + to + 1 -> where in path_links its list begins */
  uint32_t *path_links;     /* a length, then that many links */
  uint32_t path_count, path_room, path_longest;
  mlfab__change *changes; /* the undo log, and the steps that were replaced */
  mlfab__step *replaced;
  uint32_t nchanges, changes_room, nreplaced, replaced_room;
  mlfab__step *built; /* scratch of a reservation */
  mlfab__stretch *pieces;
  struct mlfab__cursor *cursors;
  uint32_t built_room, pieces_room, cursors_room;
  uint32_t npieces; /* of the newest reservation, in `pieces`; 0: it takes no time */
  /* 1: every transfer is charged what the one in the opposite direction costs. */
  int mirror;
  /* Told of every reservation while `searching` is 0 (planners try many). NULL: nobody. */
  void (*watch)(void *user, const mlfab__transfer *transfer);
  void *user;
  int searching;
  uint32_t purpose, index; /* for the next reservations */
} mlfab__network;

/* Capacities are 0, there are no paths. Errors: ARGUMENT (no nodes), LIMIT (above 2^24), MEMORY. */
MLFAB__INTERNAL int mlfab__network_init(mlfab__network *net, mlfab__env *env, uint32_t nodes,
                                        uint32_t links);
MLFAB__INTERNAL void mlfab__network_free(mlfab__network *net);
/* Sets the residual: rate[k] from at[k] on, at[0] = 0. A rate of 0 is a cut. What is reserved there
 * is forgotten. Errors: ARGUMENT (negative, NaN, infinite, not ascending, no such thing), STATE
 * (there are reservations to undo), MEMORY. */
MLFAB__INTERNAL int mlfab__network_capacity(mlfab__network *net, enum mlfab__capacity_kind kind,
                                            uint32_t index, uint32_t n, const double *at,
                                            const double *rate);
/* The same for one constant rate; never allocates. */
MLFAB__INTERNAL int mlfab__network_constant(mlfab__network *net, enum mlfab__capacity_kind kind,
                                            uint32_t index, double rate);
/* The links that transfers from u to v cross besides the two nodes, once and for all. Errors:
 * ARGUMENT (no such node or link, u = v, a link twice, a path twice), MEMORY. */
MLFAB__INTERNAL int mlfab__network_path(mlfab__network *net, uint32_t from, uint32_t to, uint32_t n,
                                        const uint32_t *links);
/* All capacities 0 and nothing reserved; paths stay. O(nodes + links), never allocates. */
MLFAB__INTERNAL void mlfab__network_reset(mlfab__network *net);
/* Makes `copy` (initialised, or all zero) carry the same residuals and paths; there is nothing to
 * undo in it, and nobody watches. Errors: MEMORY, and it is empty. */
MLFAB__INTERNAL int mlfab__network_copy(mlfab__network *copy, const mlfab__network *net,
                                        mlfab__env *env);
/* What is left: the steps, and their number. */
MLFAB__INTERNAL const mlfab__profile *mlfab__network_residual(const mlfab__network *net,
                                                              enum mlfab__capacity_kind kind,
                                                              uint32_t index);

/* When a transfer that is ready at `available` ends: `available` when it is free, never when it
 * does not end. Reserves nothing. */
MLFAB__INTERNAL double mlfab__network_end(const mlfab__network *net, uint32_t from, uint32_t to,
                                          double bytes, double available);
/* When ingress(to), or what stands for it in a mirrored network, alone and used from `available` on
 * would have carried so much: no transfer to that node that is ready no earlier ends before, and
 * more bytes take longer. LATE and ENDS as for bundles below. */
MLFAB__INTERNAL int mlfab__network_carries(const mlfab__network *net, uint32_t to, double bytes,
                                           double available, double limit, double *end_p);
/* What ingress(to), or what stands for it in a mirrored network, can still carry by then. */
MLFAB__INTERNAL double mlfab__network_room(const mlfab__network *net, uint32_t to, double until);
/* Reserves it; one that never ends reserves nothing. Errors: MEMORY, and nothing has changed. */
MLFAB__INTERNAL int mlfab__network_reserve(mlfab__network *net, uint32_t from, uint32_t to,
                                           double bytes, double available, double *end_p);
/* A reservation's mark, to go back to: everything reserved since is undone, bit for bit. */
MLFAB__INTERNAL uint32_t mlfab__network_mark(const mlfab__network *net);
MLFAB__INTERNAL void mlfab__network_undo(mlfab__network *net, uint32_t mark);
/* Nothing that is reserved now can be undone any more; marks are void. */
MLFAB__INTERNAL void mlfab__network_keep(mlfab__network *net);

/* ---- bundles: a component a server, from one node; the end is the last one's ---- */

typedef struct mlfab__bundle {
  const uint32_t *from; /* a node each; from_step 0: all from from[0] */
  const uint32_t *to;   /* a node each; to_step 0: all to to[0] */
  uint32_t from_step, to_step;
  const double *bytes; /* one each */
  uint32_t n;
  uint32_t component; /* the number of the first, when it is a part of a bundle */
  double available;
} mlfab__bundle;

/* What a search knows about a transfer that it need not follow to its end. */
enum mlfab__walked { MLFAB__LATE = 0, MLFAB__ENDS = 1 };

/* When the bundle ends if that is not certainly after `limit`: ENDS, or LATE with a time that is
 * later than limit by mlfab__network_less, before which it does not end. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__bundle_end(mlfab__network *net, const mlfab__bundle *bundle,
                                      double limit, double *end_p);
/* Reserves the bundle if it ends by `limit` (never: whenever it ends): ENDS; else nothing is
 * reserved: LATE and *end_p as above. Errors: MEMORY, and nothing has changed. */
MLFAB__INTERNAL int mlfab__bundle_reserve(mlfab__network *net, const mlfab__bundle *bundle,
                                          double limit, double *end_p);

/* ---- cutting through: a transfer that passes on what another one brings ---- */

/* How a transfer goes: in stretches, or all of it at once. */
typedef struct mlfab__course {
  const mlfab__stretch *pieces; /* not those of `net`, which is written to */
  uint32_t n, component;
  double have;      /* so much was there before */
  double bytes, at; /* what comes; at: when it is all there */
} mlfab__course;

/* When a transfer from u to v may begin, at `available` or later, so that it never lacks what `in`
 * brings: it then ends just when one ends that begins at once and waits whenever there is nothing
 * to pass on. Never, when it does not end. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__network_cut_through(mlfab__network *net, uint32_t from, uint32_t to,
                                               double available, const mlfab__course *in,
                                               double *begin_p);

/* ---- what planners take ---- */

typedef struct mlfab__candidate {
  uint64_t id;
  uint32_t node;
  double available;    /* when its transfer may start; never: it cannot */
  int64_t version;     /* of the model that it was computed from */
  double norm;         /* not used for planning transfers to servers */
  const double *bytes; /* one a server */
} mlfab__candidate;

#endif
