/* divergence.h - how far a replica may be from its server, computed from the norms of updates alone. keeper.c calls it.
 *
 * Server and replica apply the same commits in the same order by eq. (2), h <- gamma h + u, w <- w + h; the replica
 * lags. With H_t = gamma H_(t-1) + |u_t|, |w_s - w_r| is at most B(s, r) = H_(r+1) + ... + H_s, if the server has
 * applied s commits and the replica r. Updates that the replica has applied still count, because their momentum still
 * moves the server. Norms alone allow no smaller bound.
 *
 * This is the ledger of a server that admits updates. It applies a commit only if B(s + 1, r) <= Div_max, where r is
 * the last commit that the replica has acknowledged. So the divergence never exceeds Div_max, whatever a plan said, and
 * also while an acknowledgement is on its way (the replica is then ahead of r, and B falls with r).
 *
 * The unit is the commit. If the server applies the sum of several updates as one step, this is one commit, with the
 * norm of the sum. A replica may merge commits: its states are then still states of the server's history, and it
 * acknowledges the last commit of the merge. B does not cover a replica that groups updates in its own way, as its own
 * steps. tools/replicate.h has the formulas of planners.
 *
 * Invariants of the ledger: `bound` is at least B(s, r), and `history` at least H_s, because every operation rounds up.
 * A result that a double holds exactly is exact, so equality with Div_max admits. Memory is constant: if there are more
 * outstanding commits than entries, neighbours become one entry, which leaves when its last commit is acknowledged.
 * Until then the bound is larger than necessary, and still valid.
 *
 * The ledger covers real numbers. Each commit rounds w to its type: this adds up to half a unit in the last place of
 * each element for each commit that the replica lacks. The ledger measures no norms.
 *
 * Source: MLfabric §5.3, eq. 7 to 11. Departs: eq. 10 and 11 are squares, here without the square root; the printed a_6
 * multiplies |u_2| by |h_0|; the bound holds between commits, not only when a batch ends. */
#ifndef MLFAB__DIVERGENCE_H
#define MLFAB__DIVERGENCE_H

#include "../sched/network.h"

/* Returns an upper bound of |scale u| from the sum of the squares of u's n elements, each computed in double and added
 * in any order. NaN or infinite if `squares` is. */
MLFAB__INTERNAL double mlfab__divergence_norm(double squares, uint64_t n, double scale);

enum { MLFAB__DIVERGENCE_ENTRIES = 64 }; /* even */

/* One outstanding commit, or several neighbours. From H before them: the sum of their H is a H + c, the
 * last H is g H + d. */
typedef struct mlfab__divergence_entry {
  uint64_t last; /* number of the last commit */
  double a, c, g, d;
} mlfab__divergence_entry;

typedef struct mlfab__divergence {
  double gamma, div_max;
  uint64_t committed, acknowledged; /* s and r; in lock step r leads by one */
  uint64_t start;                   /* the commit before the first entry; s without entries */
  double history, base;             /* H at `committed`, and at `start` */
  double bound;                     /* B(s, r) */
  mlfab__divergence_entry ring[MLFAB__DIVERGENCE_ENTRIES];
  uint32_t first, n;
} mlfab__divergence;

/* Is gamma a valid momentum (0..1) and div_max a valid bound (0: lock step; infinity: no bound)? Errors: ARGUMENT (NaN,
 * negative, gamma infinite or above 1). */
MLFAB__INTERNAL int mlfab__divergence_check(double gamma, double div_max);
/* Begins with a replica that equals the server after `commit` commits; history >= |h|. Used also when a
 * replica is promoted or replaced. Errors: ARGUMENT (as above; history negative or NaN). */
MLFAB__INTERNAL int mlfab__divergence_init(mlfab__divergence *d, double gamma, double div_max,
                                           uint64_t commit, double history);
/* Returns 1 if one more commit with this norm leaves the bound at or below Div_max, or if the replica has acknowledged
 * that commit already. Returns 0 otherwise, and for an invalid norm. O(1). In lock step the replica acknowledges a
 * commit before the server applies it. */
MLFAB__INTERNAL int mlfab__divergence_may(const mlfab__divergence *d, double norm);
/* The same for a commit that leaves some elements unchanged (append_part). */
MLFAB__INTERNAL int mlfab__divergence_may_part(const mlfab__divergence *d, double norm);
/* Records a commit; the caller decides whether it is allowed. Amortised O(1). Errors: ARGUMENT (the norm is negative,
 * NaN or infinite); then it records nothing. */
MLFAB__INTERNAL int mlfab__divergence_append(mlfab__divergence *d, double norm);
/* The same for a commit that leaves some elements unchanged: their h does not decay. */
MLFAB__INTERNAL int mlfab__divergence_append_part(mlfab__divergence *d, double norm);
/* Notes that the replica has applied all commits up to r. Older acknowledgements change nothing. O(entries). */
MLFAB__INTERNAL void mlfab__divergence_acked(mlfab__divergence *d, uint64_t r);
/* Takes the measured |h| after commit r: it replaces H_r if it is smaller and `start` is r. Ignores other values and
 * invalid norms. O(entries). */
MLFAB__INTERNAL void mlfab__divergence_measured(mlfab__divergence *d, uint64_t r, double norm);

#endif
