/* play_values.h - random elements of every type, for tests that compare kernels. */
#ifndef PLAY_VALUES_H
#define PLAY_VALUES_H

#include "play.h"

static inline uint64_t infinity_of(int dtype) {
  return dtype == MLFAB_F64   ? 0x7ff0000000000000u
         : dtype == MLFAB_F32 ? 0x7f800000u
         : dtype == MLFAB_F16 ? 0x7c00u
                              : 0x7f80u;
}

static inline uint64_t sign_of(int dtype) { return (uint64_t)1 << (8 * elements_width(dtype) - 1); }

static inline int is_nan(int dtype, uint64_t bits) {
  return dtype != MLFAB_I64 && (bits & (sign_of(dtype) - 1)) > infinity_of(dtype);
}

static inline int same(int dtype, uint64_t a, uint64_t b) {
  return a == b || (is_nan(dtype, a) && is_nan(dtype, b));
}

static inline uint64_t number(int dtype, double x) {
  elements_number any = {(float)x, x, (uint64_t)(int64_t)(fabs(x) < 1e15 ? x : 0)};
  return elements_bits_of(dtype, any);
}

/* Any bits, ordinary numbers, and the first and the last number of each kind. `finite`: neither infinite nor NaN,
 * nor so large that a sum of a few overflows. */
static inline uint64_t any_bits(uint64_t *state, int dtype, int finite) {
  uint64_t bits = chance_below(state, UINT64_MAX), top = infinity_of(dtype),
           sign = bits & sign_of(dtype);
  double x = (double)(int64_t)bits * 0x1p-62;
  uint64_t kind = chance_below(state, 8);
  if (dtype == MLFAB_I64)
    return kind < 2 ? bits : (uint64_t)((int64_t)bits >> chance_below(state, 64));
  bits &= 2 * sign_of(dtype) - 1;
  if (kind == 0 && !finite) return bits;
  if (kind == 1) return sign | chance_below(state, 3); /* zero, and the smallest */
  if (kind == 2 && !finite)
    return (sign | top) - 1 + chance_below(state, 3);         /* the largest, infinity, a NaN */
  if (kind == 3) return sign | chance_below(state, top / 16); /* small and subnormal */
  if (kind == 4) return number(dtype, x * 1024);
  return number(dtype, x);
}

/* A number of a gradient or its residual: around tau, around the ends of the types, or small. */
static inline uint64_t any_gradient(uint64_t *state, int dtype, double tau, uint64_t density) {
  static const double some[] = {0.0,
                                -0.0,
                                0x1p-25,
                                0x1.8p-25,
                                65504.0,
                                65519.0,
                                -65520.0,
                                1e9,
                                3.389e38,
                                -3.395e38,
                                1e-40,
                                0x1p-134,
                                0x1p-133,
                                0x1p-149,
                                0x1p-25 + 0x1p-60,
                                0x1p-25 + 0x1p-49,
                                0x1p-134 + 0x1p-150,
                                0x1p-25 + 0x1p-48,
                                0x1p-25 + 0x1p-49 + 0x1p-77,
                                0x1p-134 + 0x1p-149,
                                0x1p-134 + 0x1p-150 + 0x1p-186,
                                65504.5};
  double x = (double)(int64_t)chance_below(state, UINT64_MAX) * 0x1p-63;
  if (chance_below(state, 50) == 0)
    return number(dtype, some[chance_below(state, sizeof some / sizeof *some)]);
  if (chance_below(state, 100) < density) return number(dtype, x * 2);
  if (chance_below(state, 20) == 0) return number(dtype, x < 0 ? -tau : tau);
  return number(dtype, x * 1e-3);
}

static inline double any_weight(uint64_t *state, int dtype) {
  if (dtype == MLFAB_I64) return (double)(int64_t)(chance_below(state, 2001)) - 1000.25;
  static const double some[] = {1.0, -1.0, 0.5, 1.0 / 3.0, 0.0, -0.1, 1e-3, (double)INFINITY};
  return some[chance_below(state, sizeof some / sizeof *some)];
}

#endif
