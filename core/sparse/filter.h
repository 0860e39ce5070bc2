/* filter.h - selects the values of an update that are sent, and the changes of the model that are made.
 *
 * Gradients: a = update + residual is sent or held back, element by element, in two steps: mark (reads only) and emit
 * (writes the values, and the rest into the residual). So an update with a NaN changes nothing, and the form of a
 * packet is known before its values are written. In between, other selections may clear marks: the largest values, or a
 * user's filter. The latter needs a as an array: add the update to the residual first (mlfab__kernel_add), and pass g
 * NULL from then on. Parameters: a change that is too small relative to its element is not made.
 *
 * Bitmaps: bit i % 64 of keep[i / 64] is element i; bits beyond n are 0. */
#ifndef MLFAB__FILTER_H
#define MLFAB__FILTER_H

#include "../base/base.h"

#define MLFAB__FILTER_MOST 65536u /* maximum number of elements in a call */
/* Recommended size of a call: emit then finds the data of mark in the cache. */
#define MLFAB__FILTER_STRETCH 8192u
#define MLFAB__FILTER_REFUSED UINT32_MAX

typedef struct mlfab__filter_rule {
  int dtype;        /* MLFAB_F32, MLFAB_F64 */
  int half;         /* MLFAB_HALF_*: the type of sent values */
  double tau;       /* an element with |a| < tau (not NaN; infinity: every element) ... */
  double p;         /* ... is held back with probability p; from 1 on without a draw, 0: never */
  uint64_t seed, t; /* seed of the draws: with the element's index these determine each draw */
} mlfab__filter_rule;

/* Returns phi / (1 + d ln max(t, 1)), TDF 4.2. */
MLFAB__INTERNAL double mlfab__filter_threshold(double phi, double d, uint64_t t);

/* Marks in keep the elements of a = g + residual to be sent: all except those that are held back, are zero, or round to
 * zero in `half`. g NULL: residual holds a. `first` is the index of element 0 in its tensor. Returns the number of
 * marks, or MLFAB__FILTER_REFUSED if an a is infinite or NaN; then keep is unspecified. Writes nothing else. One pass
 * over g and residual. */
MLFAB__INTERNAL uint32_t mlfab__filter_mark(const mlfab__filter_rule *rule, const void *g,
                                            const void *residual, uint64_t first, uint32_t n,
                                            uint64_t *keep);

/* Writes the marked elements of a = g + residual to `values`, contiguously, in their type (uint16_t with
 * `half`), and nothing beyond them; returns their number. Sets residual to a for unmarked elements, and to
 * 0 for marked ones, or to the excess over the largest value of `half`; *saturated counts these. Marked
 * elements must be finite. g NULL: residual holds a. One pass over g and residual. */
MLFAB__INTERNAL uint32_t mlfab__filter_emit(const mlfab__filter_rule *rule, const void *g,
                                            void *residual, uint32_t n, const uint64_t *keep,
                                            void *values, uint64_t *saturated);

/* The magnitude of the k-th largest element, as the bits of its type, and the number of elements of that magnitude
 * among the k largest, lowest index first. k 0: none of them. */
typedef struct mlfab__filter_cut {
  uint64_t magnitude, ties;
} mlfab__filter_cut;

/* Finds the cut of a = g + residual; g NULL: residual holds a. Exact, O(n): three passes (F64: six) and 16 KiB of
 * stack. k is at most n. */
MLFAB__INTERNAL void mlfab__filter_kth(int dtype, const void *g, const void *residual, uint64_t n,
                                       uint64_t k, mlfab__filter_cut *cut);
/* Clears the marks of elements that are not among the k largest. Counts cut's ties down, so pass the array
 * from its beginning, in parts of n <= 65536. Returns the number of marks left. */
MLFAB__INTERNAL uint32_t mlfab__filter_top(int dtype, const void *g, const void *residual,
                                           uint32_t n, mlfab__filter_cut *cut, uint64_t *keep);

/* The same selection in one pass, while the elements are marked. A sample gives two limits between which the k-th
 * largest probably is. Look marks, clears the marks of elements up to the lower limit, and lists those between; settle
 * selects from the list. If the k-th largest is outside, or many equal magnitudes fill the list, settle fails: then
 * mark again, and use kth and top. */
typedef struct mlfab__filter_choice {
  int level, dtype;
  const uint8_t *g, *residual;
  uint64_t n, k;
  uint64_t low, high; /* the limits, as magnitudes */
  uint64_t above;     /* elements above `high` */
  uint64_t count;     /* elements above `low` up to `high`: listed in `between`, ... */
  uint64_t room;      /* ... which has room for this many plus 64 */
  uint64_t words;     /* number of words of marks so far */
  uint64_t *open;     /* bitmap of the listed elements */
  void *between;      /* of the array's type */
} mlfab__filter_choice;

/* Returns the memory of a choice, in words: a list of min(n, 32768 + n / 32) + 64 elements, and a bitmap as long as the
 * marks. */
MLFAB__INTERNAL uint64_t mlfab__filter_choice_words(int dtype, uint64_t n, uint64_t mark_words);
/* Begins the choice of the k largest of a = g + residual, n elements of F32 or F64. The caller owns `room`,
 * of mlfab__filter_choice_words. Reads 32768 elements; they need not be finite. */
MLFAB__INTERNAL void mlfab__filter_choose(mlfab__filter_choice *choice, int dtype, const void *g,
                                          const void *residual, uint64_t n, uint64_t k,
                                          uint64_t *room);
/* Marks as mlfab__filter_mark, for the next n <= 65536 elements of the array; settle clears some of the marks. Returns
 * 0 if it has found an a that is infinite or NaN; it checks nothing more once the list is full. */
MLFAB__INTERNAL int mlfab__filter_look(mlfab__filter_choice *choice, const mlfab__filter_rule *rule,
                                       uint64_t first, uint32_t n, uint64_t *keep);
/* After the last look: clears the marks of elements that are not among the k largest. `keep`: the words of
 * all looks, one after another. Returns 0 when it fails; the marks are unspecified then. */
MLFAB__INTERNAL int mlfab__filter_settle(mlfab__filter_choice *choice, uint64_t *keep);

/* Sets after[i] back to before[i] if 0 < |after - before| / |before| < tau, computed in double; a change from 0 counts
 * as infinite. Returns how many changes it set back. Equal values get before's bits, and do not count. F32 and F64; for
 * other types returns 0. Any n. */
MLFAB__INTERNAL uint64_t mlfab__filter_change(int dtype, const void *before, void *after,
                                              uint64_t n, double tau);

/* The kernels by level, as in half.h, for comparison in tests. */
MLFAB__INTERNAL uint32_t mlfab__filter_mark_with(int level, const mlfab__filter_rule *rule,
                                                 const void *g, const void *residual,
                                                 uint64_t first, uint32_t n, uint64_t *keep);
MLFAB__INTERNAL uint32_t mlfab__filter_emit_with(int level, const mlfab__filter_rule *rule,
                                                 const void *g, void *residual, uint32_t n,
                                                 const uint64_t *keep, void *values,
                                                 uint64_t *saturated);
MLFAB__INTERNAL void mlfab__filter_choose_with(int level, mlfab__filter_choice *choice, int dtype,
                                               const void *g, const void *residual, uint64_t n,
                                               uint64_t k, uint64_t *room);
MLFAB__INTERNAL uint64_t mlfab__filter_change_with(int level, int dtype, const void *before,
                                                   void *after, uint64_t n, double tau);

#endif
