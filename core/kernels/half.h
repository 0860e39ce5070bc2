/* half.h - float32 in 16 bits, and back. Layer 1.
 *
 * `half` is MLFAB_HALF_F16 (IEEE half precision) or MLFAB_HALF_BF16 (the upper half of a float32).
 * Rounding is to nearest, ties to even. What is finite stays finite: beyond the largest number it
 * saturates. Infinity and NaN are the caller's to refuse; here they saturate too. Every level gives
 * the same bits, whatever the flags of the compiler. Pointers need the alignment of their elements. */
#ifndef MLFAB__HALF_H
#define MLFAB__HALF_H

#include "../base/base.h"

/* Magnitudes as bits of float32, NONE included: what is not above `zero` rounds to zero, what is
 * above `top` saturates. */
MLFAB__INTERNAL uint32_t mlfab__half_zero(int half);
MLFAB__INTERNAL uint32_t mlfab__half_top(int half);

MLFAB__INTERNAL uint16_t mlfab__half_one(int half, float x);
MLFAB__INTERNAL float mlfab__half_back(int half, uint16_t bits);
/* n elements; in and out do not overlap. */
MLFAB__INTERNAL void mlfab__half_store(int half, uint16_t *out, const float *in, uint64_t n);
MLFAB__INTERNAL void mlfab__half_load(int half, float *out, const uint16_t *in, uint64_t n);
/* A double on its way through float32: beyond its range the largest float32. */
MLFAB__INTERNAL float mlfab__half_narrow(double x);
/* 1 when none of them is infinite or NaN. */
MLFAB__INTERNAL int mlfab__half_finite(int half, const uint16_t *in, uint64_t n);

/* The kernels by level: 0 portable, 1 AVX2 with F16C and BMI2, 2 AVX-512 (F, BW, DQ,
 * VL).
 * mlfab__half_level is the highest that this CPU has; a higher one must not be asked for. */
MLFAB__INTERNAL int mlfab__half_level(void);
MLFAB__INTERNAL void mlfab__half_store_with(int level, int half, uint16_t *out, const float *in,
                                            uint64_t n);
MLFAB__INTERNAL void mlfab__half_load_with(int level, int half, float *out, const uint16_t *in,
                                           uint64_t n);

#endif
