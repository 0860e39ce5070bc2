/* reduce.h - element types and the kernels that add. Layer 1.
 *
 * A portable kernel fills each entry, a faster one for this CPU replaces it where there is one, and
 * gives the same bits: one rounding per multiply and one per add, no fused multiply-add, no
 * reassociation (norms excepted). Finiteness is tested on bits, so that -ffast-math cannot lose a
 * NaN. int64 arithmetic is modulo 2^64. Pointers need only the alignment of their elements. */
#ifndef MLFAB__REDUCE_H
#define MLFAB__REDUCE_H

#include "../base/base.h"

/* Bytes of an element, 0 for an unknown type. */
MLFAB__INTERNAL uint32_t mlfab__dtype_bytes(int dtype);
MLFAB__INTERNAL const char *mlfab__dtype_name(int dtype);

/* 1 when all n elements are finite (I64: always). */
MLFAB__INTERNAL int mlfab__reduce_finite(int dtype, const void *u, uint64_t n);

/* dst = w + scale * u, and in the same pass looks whether all of scale * u is finite: returns 1 if
 * so (else what dst holds is unspecified). w NULL: dst = scale * u. dst may be w, or u, or neither;
 * no other overlap. scale 1 and -1 change no bit of u but the sign; F32 multiplies by (float)scale;
 * I64 by its integer part, and refuses with 0, dst untouched, a scale that is no int64. `stream` 1:
 * dst will not be read soon (non-temporal stores where that helps). */
MLFAB__INTERNAL int mlfab__reduce_add(int dtype, void *dst, const void *w, const void *u,
                                      double scale, uint64_t n, int stream);

/* The kernels by level: 0 portable, 1 AVX2, 2 AVX-512. mlfab__reduce_level is the highest that this
 * CPU has; a higher one must not be asked for. Tests compare them. */
MLFAB__INTERNAL int mlfab__reduce_level(void);
MLFAB__INTERNAL int mlfab__reduce_add_with(int level, int dtype, void *dst, const void *w,
                                           const void *u, double scale, uint64_t n, int stream);

/* dst = a - b. dst may be a or b. */
MLFAB__INTERNAL void mlfab__reduce_subtract(int dtype, void *dst, const void *a, const void *b,
                                            uint64_t n);

/* Sum of squares in double; I64 as doubles. */
MLFAB__INTERNAL double mlfab__reduce_norm2(int dtype, const void *u, uint64_t n);

#endif
