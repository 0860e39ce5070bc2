/* combine.h - element-wise operations of collectives: any number of arrays into one. Layer 1.
 *
 * A portable kernel does everything, a faster one for this CPU does the bulk where there is one,
 * and gives the same bits, whatever the flags of the compiler. Pointers need only the alignment of
 * their elements.
 *
 * Arithmetic: F32 and F64 round once an operation; F16 and BF16 are combined in float32 and rounded
 * once at the end, to nearest, ties to even, beyond the largest number to infinity. I64 is modulo
 * 2^64. MLFAB_MIN and MLFAB_MAX: NaN wins over any number, of two NaNs the left one; -0 < +0. A sum
 * or product of two NaNs is one of them, on x86 the left one; it is quiet, as halves that are NaN
 * always come out. MLFAB_MEAN adds; mlfab__combine_divide does the rest. */
#ifndef MLFAB__COMBINE_H
#define MLFAB__COMBINE_H

#include "../base/base.h"

/* Beside those of enum mlfab_op: bits of 64-bit words, with MLFAB_I64. */
#define MLFAB__OP_OR 5

/* Most arrays that are read, and written, in one pass. */
#define MLFAB__COMBINE_MOST 64u

/* Bytes of an element of a collective, 0 for an unknown type. */
MLFAB__INTERNAL uint32_t mlfab__element_bytes(int dtype);
MLFAB__INTERNAL const char *mlfab__element_name(int dtype);
MLFAB__INTERNAL const char *mlfab__op_name(int op);

/* dst[i] = a[i] op b[i] for n elements. dst may be a or b; no other overlap. `stream` 1: dst will
 * not be read soon (non-temporal stores where that helps). */
MLFAB__INTERNAL void mlfab__combine(int op, int dtype, void *dst, const void *a, const void *b,
                                    uint64_t n, int stream);

/* Each dst = in[0] op in[1] op ... op in[k-1], from left to right, in one pass; k and ndst 1..64.
 * A dst may be any of `in`; no other overlap. For F32, F64 and I64 the bits are those of repeated
 * mlfab__combine. k 1 copies. */
MLFAB__INTERNAL void mlfab__combine_many(int op, int dtype, void *const *dst, uint32_t ndst,
                                         const void *const *in, uint32_t k, uint64_t n, int stream);

/* data[i] /= by, rounded once; by 1..2^24. Not for I64. */
MLFAB__INTERNAL void mlfab__combine_divide(int dtype, void *data, uint64_t n, uint32_t by);

/* 1 when none of n elements is infinite or NaN (I64: always). */
MLFAB__INTERNAL int mlfab__combine_finite(int dtype, const void *data, uint64_t n);

/* The kernels by level: 0 portable, 1 AVX2 with F16C, 2 AVX-512. mlfab__combine_level is the
 * highest that this CPU has; a higher one must not be asked for. Tests compare them. */
MLFAB__INTERNAL int mlfab__combine_level(void);
MLFAB__INTERNAL void mlfab__combine_many_with(int level, int op, int dtype, void *const *dst,
                                              uint32_t ndst, const void *const *in, uint32_t k,
                                              uint64_t n, int stream);
MLFAB__INTERNAL void mlfab__combine_divide_with(int level, int dtype, void *data, uint64_t n,
                                                uint32_t by);

#endif
