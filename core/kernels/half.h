/* half.h - converts float32 to 16 bits and back. Layer 1.
 *
 * `half` is MLFAB_HALF_F16 (IEEE half precision) or MLFAB_HALF_BF16 (the upper half of a float32). Rounding
 * is to nearest, ties to even. Finite values stay finite: beyond the largest number they saturate. Callers
 * refuse infinity and NaN; here these saturate too. The bits do not depend on compiler flags. Arrays:
 * kernels.h. */
#ifndef MLFAB__HALF_H
#define MLFAB__HALF_H

#include "../base/base.h"

/* For MLFAB_F16 or MLFAB_BF16. */
MLFAB__UNUSED static inline int mlfab__half_of(int dtype) {
  return dtype == MLFAB_F16 ? MLFAB_HALF_F16 : MLFAB_HALF_BF16;
}

/* Magnitudes as bits of float32, also for NONE: values up to `zero` round to zero, values above `top`
 * saturate. */
MLFAB__INTERNAL uint32_t mlfab__half_zero(int half);
MLFAB__INTERNAL uint32_t mlfab__half_top(int half);

MLFAB__INTERNAL uint16_t mlfab__half_one(int half, float x);
MLFAB__INTERNAL float mlfab__half_back(int half, uint16_t bits);
/* A double as float32, clamped to its range. */
MLFAB__INTERNAL float mlfab__half_narrow(double x);
/* 1 when no element is infinite or NaN. */
MLFAB__INTERNAL int mlfab__half_finite(int half, const uint16_t *in, uint64_t n);

#endif
