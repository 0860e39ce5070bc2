/* kernels.h - element types, and arithmetic on arrays: the table of kernels.
 *
 * A portable kernel exists for everything. A row of the table holds faster kernels for a kind of processor; for each
 * gap the portable kernel is used. Every row gives the same bits (except norms), whatever the compiler flags, the
 * alignment and the position in the array: fused multiply-add and reassociation are excluded. Finiteness is tested on
 * bits, so that -ffast-math cannot hide a NaN. Pointers need only the alignment of their elements.
 *
 * Arithmetic: F32 and F64 round once an operation. F16 and BF16 are computed in float32 and rounded once at
 * the end, to nearest, ties to even, overflowing to infinity. I64 is modulo 2^64. MLFAB_OP_MIN and
 * MLFAB_OP_MAX: NaN wins over any number, of two NaNs the left one; -0 < +0. A sum or product of two NaNs
 * is one of them, on x86 the left one; it is quiet, and so is every NaN stored in 16 bits. MLFAB_OP_MEAN
 * adds; mlfab__kernel_divide does the rest.
 *
 * Functions ending in _with take the row: 0 portable, 1 AVX2 (with F16C and BMI2), 2 AVX-512 (F, BW, DQ,
 * VL). It must not be above mlfab__kernel_level. Functions ending in _by take config.kernels. All others take the
 * highest row. Tests compare the rows. */
#ifndef MLFAB__KERNELS_H
#define MLFAB__KERNELS_H

#include "../base/base.h"

/* Bytes of an element of a tensor, 0 for an unknown type. */
MLFAB__INTERNAL uint32_t mlfab__dtype_bytes(int dtype);
MLFAB__INTERNAL const char *mlfab__dtype_name(int dtype);

/* The highest row that this processor supports. */
MLFAB__INTERNAL int mlfab__kernel_level(void);

/* A bit to add to a row, only if MLFAB_WITH_CBLAS is 1. For add, combine_many and norm2. */
#define MLFAB__KERNEL_CBLAS 4
/* Maximum elements of one call of cblas. The pieces of an addition stay in the L1 cache. OpenBLAS uses its threads from
 * 10,001 elements on. A count of cblas may be a 32-bit int. */
#define MLFAB__CBLAS_MOST 2048u

/* The row for config.kernels. */
static inline int mlfab__kernel_row_of(uint32_t kernels) {
  return mlfab__kernel_level() | (kernels == MLFAB_KERNELS_CBLAS ? MLFAB__KERNEL_CBLAS : 0);
}

/* dst = w + scale * u, each element round(w + round(scale * u)). Returns 1 if all of scale * u is finite, else 0 (the
 * contents of dst are unspecified then); checked in the same pass. w NULL: dst = scale * u. dst may be w or u; no other
 * overlap. scale 1 keeps all bits of u, and -1 all but the sign. F32 multiplies by (float)scale; I64 by its integer
 * part, and returns 0 with dst untouched for a scale beyond int64. `stream` 1: dst will not be read soon (non-temporal
 * stores where they help). Not for F16, BF16. */
MLFAB__INTERNAL int mlfab__kernel_add_with(int level, int dtype, void *dst, const void *w,
                                           const void *u, double scale, uint64_t n, int stream);
#define mlfab__kernel_add(...) mlfab__kernel_add_with(mlfab__kernel_level(), __VA_ARGS__)
#define mlfab__kernel_add_by(kernels, ...) \
  mlfab__kernel_add_with(mlfab__kernel_row_of(kernels), __VA_ARGS__)

/* Copies bytes that do not overlap. `stream` as above. */
MLFAB__INTERNAL void mlfab__kernel_copy(void *dst, const void *src, uint64_t bytes, int stream);

/* 1 when no element is infinite or NaN (I64: always). */
MLFAB__INTERNAL int mlfab__kernel_finite(int dtype, const void *data, uint64_t n);

/* Sum of squares in double; I64 as doubles. Not for F16, BF16. */
MLFAB__INTERNAL double mlfab__kernel_norm2_with(int level, int dtype, const void *u, uint64_t n);
#define mlfab__kernel_norm2(...) mlfab__kernel_norm2_with(mlfab__kernel_level(), __VA_ARGS__)
#define mlfab__kernel_norm2_by(kernels, ...) \
  mlfab__kernel_norm2_with(mlfab__kernel_row_of(kernels), __VA_ARGS__)

/* A row, by element type; the functions are described above. NULL: use the portable code. A device would be a row of
 * its own, with start and poll in addition if it completes later. */
typedef void mlfab__combine_fn(int op, void *const *dst, uint32_t ndst, uint64_t past,
                               const void *const *in, uint32_t k, uint64_t from, uint64_t to);
typedef struct mlfab__kernels {
  /* n is a multiple of 64 bytes; dst (u without a dst) is aligned to 64 bytes. */
  int (*add[MLFAB_F64 + 1])(void *dst, const void *w, const void *u, double scale, uint64_t n,
                            int stream);
  double (*norm2[MLFAB_F64 + 1])(const void *u, uint64_t n, uint64_t *done_p);
  mlfab__combine_fn *combine[MLFAB_F64 + 1]; /* of cblas only: see kernels_combine.h */
} mlfab__kernels;
/* Row 0 has no members. */
MLFAB__INTERNAL const mlfab__kernels *mlfab__kernels_row(int level);

#if MLFAB_WITH_CBLAS
/* A row with the bit MLFAB__KERNEL_CBLAS lets cblas add, scale and compute norms of F32 and F64, in pieces of
 * at most MLFAB__CBLAS_MOST elements; everything else is as without the bit. Results have the same bits, with two
 * exceptions: norms, and the choice between two NaNs. scal rounds the product. axpy is called with 1 only, and rounds the
 * sum. So fusing in the library, the beginning of an array and the processor of a rank have no effect.
 *
 * kernels_cblas.c: the row of cblas. Its functions take at most MLFAB__CBLAS_MOST elements of any alignment. `add` does
 * not test products for NaN. `combine` computes SUM and MEAN only, and ignores `past`. norm2 leaves elements to our own
 * kernels if its result would overflow. */
MLFAB__INTERNAL const mlfab__kernels *mlfab__kernels_cblas(void);
/* kernels.c: that row for a call with this level and type, or NULL. */
MLFAB__INTERNAL const mlfab__kernels *mlfab__kernel_cblas(int level, int dtype);
#endif

#endif
