/* half.h - converts float32 to 16 bits and back.
 *
 * `half` is MLFAB_HALF_F16 (IEEE half precision) or MLFAB_HALF_BF16 (the upper half of a float32). Rounding
 * is to nearest, ties to even. Finite values stay finite: beyond the largest number they saturate. Callers
 * refuse infinity and NaN; here these saturate too. The bits do not depend on compiler flags. */
#ifndef MLFAB__HALF_H
#define MLFAB__HALF_H

#include "kernels.h"

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

/* float32 to 16 bits and back ; n elements; in and out do not overlap. */
MLFAB__INTERNAL void mlfab__half_store_with(int level, int half, uint16_t *out, const float *in,
                                            uint64_t n);
MLFAB__INTERNAL void mlfab__half_load_with(int level, int half, float *out, const uint16_t *in,
                                           uint64_t n);
#define mlfab__half_store(...) mlfab__half_store_with(mlfab__kernel_level(), __VA_ARGS__)
#define mlfab__half_load(...) mlfab__half_load_with(mlfab__kernel_level(), __VA_ARGS__)

#endif
