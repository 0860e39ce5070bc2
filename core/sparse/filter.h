/* filter.h - what of an update travels, and what of a change of the model is made. Layer 2.
 *
 * Gradient side: a = update + residual is sent or held back element by element. It goes in two steps,
 * so that an update that holds a NaN changes nothing and a packet's form is known before its values
 * are written: mark (looks only) and emit (writes the values, and what is left into the residual).
 * In between others may clear marks: a share of the largest, a user's filter. These need a as an
 * array: add the update to the residual first (mlfab__kernel_add), and pass g NULL from then on.
 * Parameter side: a change that is too small for its element is not made.
 *
 * Bitmaps: bit i % 64 of keep[i / 64] is element i; bits beyond n are 0. */
#ifndef MLFAB__FILTER_H
#define MLFAB__FILTER_H

#include "../base/base.h"

#define MLFAB__FILTER_MOST 65536u /* elements a call */
/* So many at a time are fast: what mark has read, emit finds in the first caches. */
#define MLFAB__FILTER_STRETCH 8192u
#define MLFAB__FILTER_REFUSED UINT32_MAX

typedef struct mlfab__filter_rule {
  int dtype;        /* MLFAB_F32, MLFAB_F64 */
  int half;         /* MLFAB_HALF_*: how values travel */
  double tau;       /* held back: |a| < tau (not NaN; infinity: all) ... */
  double p;         /* ... and draw < p; from 1 on nothing is drawn, 0: nothing is held back */
  uint64_t seed, t; /* of the draws, with the element's number: equal ones, equal draws */
} mlfab__filter_rule;

/* phi / (1 + d ln max(t, 1)), TDF 4.2. */
MLFAB__INTERNAL double mlfab__filter_threshold(double phi, double d, uint64_t t);

/* The draw of an element, uniform in [0, 1), a multiple of 2^-32. */
MLFAB__INTERNAL double mlfab__filter_draw(uint64_t seed, uint64_t t, uint64_t element);

/* Marks in keep what of a = g + residual is sent: all but what is held back, zeros, and what `half`
 * rounds to zero. g NULL: residual holds a. `first` is the number of element 0 in its tensor.
 * Returns how many are marked, or MLFAB__FILTER_REFUSED when some a is infinite or NaN; keep is
 * unspecified then. Nothing else is written. One pass over g and residual. */
MLFAB__INTERNAL uint32_t mlfab__filter_mark(const mlfab__filter_rule *rule, const void *g,
                                            const void *residual, uint64_t first, uint32_t n,
                                            uint64_t *keep);

/* Writes the marked elements of a = g + residual to `values`, one behind the other, of the type
 * (uint16_t with `half`), and nothing beyond them; returns how many. residual := a where there is no
 * mark, else 0, or what saturation cut off: *saturated is raised by one for each of these. What is
 * marked must be finite. g NULL: residual holds a. One pass over g and residual. */
MLFAB__INTERNAL uint32_t mlfab__filter_emit(const mlfab__filter_rule *rule, const void *g,
                                            void *residual, uint32_t n, const uint64_t *keep,
                                            void *values, uint64_t *saturated);

/* The magnitude of the k-th largest of an array, as the bits of its type, and how many of those that
 * equal it are among the k, lowest index first. k 0: nothing passes. */
typedef struct mlfab__filter_cut {
  uint64_t magnitude, ties;
} mlfab__filter_cut;

/* Exact, O(n): three passes (F64: six) and 16 KiB of the stack. k is at most n. */
MLFAB__INTERNAL void mlfab__filter_kth(int dtype, const void *values, uint64_t n, uint64_t k,
                                       mlfab__filter_cut *cut);
/* Clears the marks of what does not belong to the k largest; counts cut's ties down, so the array is
 * to be shown from its beginning, a stretch (n <= 65536) at a time. Returns the marks that are left. */
MLFAB__INTERNAL uint32_t mlfab__filter_top(int dtype, const void *values, uint32_t n,
                                           mlfab__filter_cut *cut, uint64_t *keep);

/* after[i] := before[i] where 0 < |after - before| / |before| < tau, in double; a before of 0 that
 * changes has changed infinitely. Returns how many changes were put back. Equal values get before's
 * bits, uncounted. F32 and F64; others: 0. n is any. */
MLFAB__INTERNAL uint64_t mlfab__filter_change(int dtype, const void *before, void *after,
                                              uint64_t n, double tau);

/* The kernels by level, as in half.h. Tests compare them. */
MLFAB__INTERNAL uint32_t mlfab__filter_mark_with(int level, const mlfab__filter_rule *rule,
                                                 const void *g, const void *residual,
                                                 uint64_t first, uint32_t n, uint64_t *keep);
MLFAB__INTERNAL uint32_t mlfab__filter_emit_with(int level, const mlfab__filter_rule *rule,
                                                 const void *g, void *residual, uint32_t n,
                                                 const uint64_t *keep, void *values,
                                                 uint64_t *saturated);
MLFAB__INTERNAL uint64_t mlfab__filter_change_with(int level, int dtype, const void *before,
                                                   void *after, uint64_t n, double tau);

#endif
