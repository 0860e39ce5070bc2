/* network.h - the capacity of a network over time, and the reservations made of it.
 *
 * Every node has an egress and an ingress, and the core may have shared links. Each is a step function of time: the
 * capacity that is not yet reserved (the residual). A transfer from u to v uses egress(u), ingress(v) and the links
 * listed for (u, v), at every instant at the smallest of their residuals. It ends when the integral of that rate has
 * reached its size; reserving it subtracts that rate from each of them. A transfer from a node to itself is free. Sizes
 * and rates share a unit; time starts at 0.
 *
 * It does not plan: order.h and group.h do. It also has the tools of both: the comparison of times, the candidate, the
 * bundle (an update in components, one for each server), and cut-through.
 *
 * Invariants: the steps of a profile ascend strictly, begin at 0, and differ from their neighbours in rate;
 * no residual is negative; undoing a reservation restores the same bits.
 *
 * Doubles. Two times differ only if they differ by more than a relative 1e-9 (mlfab__network_less). A transfer ends
 * within a step as soon as all but 1e-9 of it fits, so that rounding cannot make it wait for the end of an outage.
 * Products pass through mlfab__network_exact before they are added, and infinity is recognised by its bits: a result
 * does not depend on contraction or -ffast-math. With integer rates all residuals are exact. With other rates they are
 * not: this costs additional steps, and results stay correct.
 *
 * Source: MLfabric §4 (network state), fig. 4b and 4c, §10.1 (paths), §10.2 (several servers). Departs: aggregators
 * store and forward unless `cut` is set; the components of a bundle are reserved one after another, because concurrent
 * components would count the worker's egress several times. */
#ifndef MLFAB__NETWORK_H
#define MLFAB__NETWORK_H

#include "../base/env.h"
#include "../base/map.h"
#include "sched_wire.h"

/* ---- time ---- */

/* Returns the time of an event that never happens: positive infinity, made from its bits. */
static inline double mlfab__network_never(void) {
  const uint64_t bits = 0x7ff0000000000000u;
  double never;
  memcpy(&never, &bits, sizeof never);
  return never;
}

/* Returns x, hidden from the optimizer, which then cannot contract or reorder operations around it. */
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

/* Returns 1 if a is smaller than b by more than rounding explains: 1e-9 of the larger magnitude, or of 1 if that is
 * larger. Every finite time is smaller than never. */
static inline int mlfab__network_less(double a, double b) {
  if (!(a < b)) return 0;
  if (!mlfab__finite(b)) return 1;
  double scale = b > -a ? b : -a; /* the larger magnitude, as a < b */
  return a < mlfab__network_exact(b - mlfab__network_exact(1e-9 * (scale > 1 ? scale : 1)));
}

/* ---- the network ---- */

enum mlfab__capacity_kind { MLFAB__EGRESS, MLFAB__INGRESS, MLFAB__SHARED };

/* The rate from `at` to the next step, or for ever. */
typedef struct mlfab__step {
  double at, rate;
} mlfab__step;

typedef struct mlfab__profile {
  mlfab__step *steps;
  uint32_t n, room;
} mlfab__profile;

/* A part of a transfer with a constant rate along its whole path. */
typedef struct mlfab__stretch {
  double from, to, rate;
} mlfab__stretch;

/* The purpose of a transfer. `index`: number of the update or request, or the aggregator's q (from 1). */
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
  const mlfab__stretch *pieces; /* neighbours of equal rate are merged; gaps are pauses */
  uint32_t n;
} mlfab__transfer;

/* The change of one profile by a reservation. */
typedef struct mlfab__change {
  uint32_t profile, first; /* the steps from `first` on */
  uint32_t before, after;  /* this many steps became this many */
} mlfab__change;

typedef struct mlfab__network {
  mlfab__env *env;
  uint32_t nodes, links;
  mlfab__profile *profiles; /* egress of each node, ingress of each node, links */
  mlfab__step *slab;        /* initial memory for each profile's steps */
  mlfab__map paths;         /* from * nodes + to + 1 -> where in path_links its list begins */
  uint32_t *path_links;     /* a length, then that many links */
  uint32_t path_count, path_room, path_longest;
  mlfab__change *changes; /* the undo log, and the steps that reservations replaced */
  mlfab__step *replaced;
  uint32_t nchanges, changes_room, nreplaced, replaced_room;
  mlfab__step *built; /* scratch memory of a reservation */
  mlfab__stretch *pieces;
  struct mlfab__cursor *cursors;
  uint32_t built_room, pieces_room, cursors_room;
  uint32_t npieces; /* of the newest reservation, in `pieces`; 0: it takes no time */
  /* 1: every transfer is charged to the path in the opposite direction */
  int mirror;
  /* Called for every reservation while `searching` is 0 (planners try many). NULL: not called. */
  void (*watch)(void *user, const mlfab__transfer *transfer);
  void *user;
  int searching;
  uint32_t purpose, index; /* for the next reservations */
} mlfab__network;

/* Initialises with all capacities 0 and no paths. Errors: ARGUMENT (no nodes), LIMIT (above 2^24), MEMORY. */
MLFAB__INTERNAL int mlfab__network_init(mlfab__network *net, mlfab__env *env, uint32_t nodes,
                                        uint32_t links);
MLFAB__INTERNAL void mlfab__network_free(mlfab__network *net);
/* Sets a residual: rate[k] from at[k] on, at[0] = 0. A rate of 0 is an outage. Forgets reservations on it. Errors:
 * ARGUMENT (negative, NaN or infinite rate, times that do not ascend, no such index), STATE (there are reservations to
 * undo), MEMORY. */
MLFAB__INTERNAL int mlfab__network_capacity(mlfab__network *net, enum mlfab__capacity_kind kind,
                                            uint32_t index, uint32_t n, const double *at,
                                            const double *rate);
/* The same for one constant rate. Never allocates. */
MLFAB__INTERNAL int mlfab__network_constant(mlfab__network *net, enum mlfab__capacity_kind kind,
                                            uint32_t index, double rate);
/* Sets the links that transfers from u to v cross besides the two nodes; once for each pair. Errors: ARGUMENT (no such
 * node or link, u = v, a link twice, a path twice), MEMORY. */
MLFAB__INTERNAL int mlfab__network_path(mlfab__network *net, uint32_t from, uint32_t to, uint32_t n,
                                        const uint32_t *links);
/* Sets all capacities to 0 and forgets all reservations; paths stay. O(nodes + links), never allocates. */
MLFAB__INTERNAL void mlfab__network_reset(mlfab__network *net);
/* Returns the residual: its steps, and their number. */
MLFAB__INTERNAL const mlfab__profile *mlfab__network_residual(const mlfab__network *net,
                                                              enum mlfab__capacity_kind kind,
                                                              uint32_t index);

/* Returns when a transfer that is ready at `available` ends: `available` if it is free, `never` if it cannot end.
 * Reserves nothing. */
MLFAB__INTERNAL double mlfab__network_end(const mlfab__network *net, uint32_t from, uint32_t to,
                                          double bytes, double available);
/* Computes when ingress(to) of these n nodes (egress(to) in a mirrored network), used together from `available` on and
 * at no more than `most` in sum, would have carried these bytes. It is a lower bound for each transfer to those nodes,
 * if the transfer is ready at that time or later and its sender is not faster. It grows with the bytes. LATE and ENDS
 * as for bundles below. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__network_carries(mlfab__network *net, const uint32_t *to, uint32_t n,
                                           double most, double bytes, double available,
                                           double limit, double *end_p);
/* Returns the first time from `available` on at which ingress(to) of one of these n nodes is not 0; never: there is
 * none. */
MLFAB__INTERNAL double mlfab__network_idle(const mlfab__network *net, const uint32_t *to,
                                           uint32_t n, double available);
/* Returns the highest rate at any time of egress(from) (ingress(from) in a mirrored network). */
MLFAB__INTERNAL double mlfab__network_most(const mlfab__network *net, uint32_t from);
/* Returns the bytes that ingress(to) (egress(to) in a mirrored network) can still carry until then. */
MLFAB__INTERNAL double mlfab__network_room(const mlfab__network *net, uint32_t to, double until);
/* Reserves a transfer, if it can end. Errors: MEMORY, with nothing changed. */
MLFAB__INTERNAL int mlfab__network_reserve(mlfab__network *net, uint32_t from, uint32_t to,
                                           double bytes, double available, double *end_p);
/* Gives back a reserved transfer, whatever was reserved after it, given its stretches (which must not be those
 * of `net`). Undo takes the giving back first. Residuals are exact if rates are integers. Errors: MEMORY,
 * with nothing changed. */
MLFAB__INTERNAL int mlfab__network_release(mlfab__network *net, uint32_t from, uint32_t to,
                                           const mlfab__stretch *pieces, uint32_t n);
/* Returns a mark of the current reservations; undo removes all later reservations, bit for bit. */
MLFAB__INTERNAL uint32_t mlfab__network_mark(const mlfab__network *net);
MLFAB__INTERNAL void mlfab__network_undo(mlfab__network *net, uint32_t mark);
/* Makes all reservations permanent; marks become invalid. */
MLFAB__INTERNAL void mlfab__network_keep(mlfab__network *net);

/* ---- bundles: one component for each server, from one node; a bundle ends with its last component ---- */

typedef struct mlfab__bundle {
  const uint32_t *from; /* one node a component; from_step 0: all from from[0] */
  const uint32_t *to;   /* one node a component; to_step 0: all to to[0] */
  uint32_t from_step, to_step;
  const double *bytes; /* one a component */
  uint32_t n;
  uint32_t component; /* number of the first component, if this is a part of a bundle */
  double available;
} mlfab__bundle;

/* The result of following a transfer no further than a limit. */
enum mlfab__walked { MLFAB__LATE = 0, MLFAB__ENDS = 1 };

/* Computes when the bundle ends: ENDS, or LATE as soon as it is certainly after `limit`; *end_p is then a lower bound
 * of the end, later than the limit by mlfab__network_less. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__bundle_end(mlfab__network *net, const mlfab__bundle *bundle,
                                      double limit, double *end_p);
/* Reserves the bundle if it ends by `limit` (never: in any case): returns ENDS. Otherwise reserves nothing and returns
 * LATE, with *end_p as above. Errors: MEMORY, with nothing changed. */
MLFAB__INTERNAL int mlfab__bundle_reserve(mlfab__network *net, const mlfab__bundle *bundle,
                                          double limit, double *end_p);

/* ---- cut-through: a transfer that forwards the bytes of another one while they arrive ---- */

/* The timing of a transfer: in stretches, or all bytes at one instant. */
typedef struct mlfab__course {
  const mlfab__stretch *pieces; /* must not be those of `net`, which are overwritten */
  uint32_t n, component;
  double have;      /* bytes that were there before */
  double bytes, at; /* bytes that arrive, and when the last of them has arrived */
} mlfab__course;

/* Computes the earliest start of a transfer from u to v, at or after `available`, at which it never has to wait for
 * bytes of `in`. This transfer ends at the same time as one that starts at once and pauses for missing bytes. If it
 * cannot end, the start is `never`. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__network_cut_through(mlfab__network *net, uint32_t from, uint32_t to,
                                               double available, const mlfab__course *in,
                                               double *begin_p);

/* ---- input of the planners ---- */

typedef struct mlfab__candidate {
  uint64_t id;
  uint32_t node;
  double available;    /* when its transfer may start; never: it cannot */
  int64_t version;     /* of the model from which it was computed */
  double norm;         /* unused for transfers to servers */
  const double *bytes; /* one a server */
} mlfab__candidate;

#endif
