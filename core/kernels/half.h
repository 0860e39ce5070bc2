/* half.h - float32 in 16 bits, and back. Layer 1.
 *
 * `half` is MLFAB_HALF_F16 (IEEE half precision) or MLFAB_HALF_BF16 (the upper half of a float32).
 * Rounding is to nearest, ties to even. What is finite stays finite: beyond the largest number it
 * saturates. Infinity and NaN are the caller's to refuse; here they saturate too. The bits are the same
 * whatever the flags of the compiler. Arrays: kernels.h. */
#ifndef MLFAB__HALF_H
#define MLFAB__HALF_H

#include "../base/base.h"

/* Magnitudes as bits of float32, NONE included: what is not above `zero` rounds to zero, what is
 * above `top` saturates. */
MLFAB__INTERNAL uint32_t mlfab__half_zero(int half);
MLFAB__INTERNAL uint32_t mlfab__half_top(int half);

MLFAB__INTERNAL uint16_t mlfab__half_one(int half, float x);
MLFAB__INTERNAL float mlfab__half_back(int half, uint16_t bits);
/* A double on its way through float32: beyond its range the largest float32. */
MLFAB__INTERNAL float mlfab__half_narrow(double x);
/* 1 when none of them is infinite or NaN. */
MLFAB__INTERNAL int mlfab__half_finite(int half, const uint16_t *in, uint64_t n);

#endif
