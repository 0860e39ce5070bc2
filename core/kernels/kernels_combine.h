/* kernels_combine.h - element-wise operations of collectives. */
#ifndef MLFAB__KERNELS_COMBINE_H
#define MLFAB__KERNELS_COMBINE_H

#include "half.h"

/* Besides the values of enum mlfab_op: bitwise or of 64-bit words, for MLFAB_I64. */
#define MLFAB__OP_OR 5

/* Maximum number of arrays that are read, and written, in one pass. */
#define MLFAB__COMBINE_MOST 64u

/* A row, by element type. NULL: use the portable code. */
typedef struct mlfab__combines {
  /* Elements from..to-1, a multiple of 256 bytes. Bit d of `past`: write dst[d] with non-temporal stores;
   * it is aligned to 64 bytes then. */
  mlfab__combine_fn *combine[MLFAB_BF16 + 1];
  void (*divide[MLFAB_BF16 + 1])(void *data, uint32_t by, uint64_t from, uint64_t to);
} mlfab__combines;
/* kernels_combine_x86.c. Row 0 has no members. */
MLFAB__INTERNAL const mlfab__combines *mlfab__combines_row(int level);

/* As mlfab__kernel_finite, also for F16 and BF16. */
MLFAB__INTERNAL int mlfab__elements_finite(int dtype, const void *data, uint64_t n);

/* Bytes of a collective's element, which may be F16 or BF16; 0 for an unknown type. */
MLFAB__INTERNAL uint32_t mlfab__element_bytes(int dtype);
MLFAB__INTERNAL const char *mlfab__op_name(int op);

/* Each dst = in[0] op in[1] op ... op in[k-1], from left to right, in one pass; k and ndst 1..64. A dst may
 * be any of `in`; no other overlap. For F32, F64 and I64 the bits are those of k - 1 pairwise passes. k 1
 * copies. `stream` as above. */
MLFAB__INTERNAL void mlfab__kernel_combine_many_with(int level, int op, int dtype, void *const *dst,
                                                     uint32_t ndst, const void *const *in,
                                                     uint32_t k, uint64_t n, int stream);
#define mlfab__kernel_combine_many(...) \
  mlfab__kernel_combine_many_with(mlfab__kernel_level(), __VA_ARGS__)
#define mlfab__kernel_combine_many_by(kernels, ...) \
  mlfab__kernel_combine_many_with(mlfab__kernel_row_of(kernels), __VA_ARGS__)

/* dst = a op b. dst may be a or b; no other overlap. */
MLFAB__INTERNAL void mlfab__kernel_combine_with(int level, int op, int dtype, void *dst,
                                                const void *a, const void *b, uint64_t n,
                                                int stream);
#define mlfab__kernel_combine(...) mlfab__kernel_combine_with(mlfab__kernel_level(), __VA_ARGS__)
#define mlfab__kernel_combine_by(kernels, ...) \
  mlfab__kernel_combine_with(mlfab__kernel_row_of(kernels), __VA_ARGS__)

/* data[i] /= by, rounded once; by 1..2^24. Not for I64. */
MLFAB__INTERNAL void mlfab__kernel_divide_with(int level, int dtype, void *data, uint64_t n,
                                               uint32_t by);
#define mlfab__kernel_divide(...) mlfab__kernel_divide_with(mlfab__kernel_level(), __VA_ARGS__)

#endif
