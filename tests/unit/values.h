/* values.h - elements of any type, written and read as doubles, and composition, which does not commute: for tests of
 * collectives. */
#ifndef MLFAB_TEST_VALUES_H
#define MLFAB_TEST_VALUES_H

#include "mlfab.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t value_bytes(int dtype) {
  return dtype == MLFAB_F32 ? 4 : dtype == MLFAB_F64 || dtype == MLFAB_I64 ? 8 : 2;
}

/* The layout of a half: bits of the mantissa, and what is added to the exponent. */
static inline int half_bits(int dtype) { return dtype == MLFAB_F16 ? 10 : 7; }
static inline int half_bias(int dtype) { return dtype == MLFAB_F16 ? 15 : 127; }

/* The nearest half of a type, ties to even; for normal numbers and NaN. */
static inline uint16_t half_of(int dtype, double x) {
  const int bits = half_bits(dtype), bias = half_bias(dtype);
  int exponent;
  if (isnan(x)) return (uint16_t)(0x8000 - (1 << (bits - 1)));
  if (x == 0) return 0;
  double m = frexp(fabs(x), &exponent);
  if (exponent < 2 - bias) return 0; /* not normal: not needed here */
  long units = lrint(ldexp(m, bits + 1));
  if (units == 2L << bits) {
    units >>= 1;
    exponent++;
  }
  long word = ((long)(exponent - 1 + bias) << bits) + (units - (1L << bits));
  return (uint16_t)(word | (x < 0 ? 0x8000 : 0));
}

static inline double of_half(int dtype, uint16_t h) {
  const int bits = half_bits(dtype), bias = half_bias(dtype);
  const int mantissa = h & ((1 << bits) - 1), exponent = (h & 0x7fff) >> bits;
  if (exponent == 2 * bias + 1)
    return mantissa ? (double)NAN : (double)(h & 0x8000 ? -INFINITY : INFINITY);
  double m = exponent ? ldexp((double)(mantissa | 1 << bits), exponent - bias - bits)
                      : ldexp((double)mantissa, 1 - bias - bits);
  return h & 0x8000 ? -m : m;
}

/* Element i of `data`, which need not be aligned. */
static inline void put(void *data, int dtype, uint64_t i, double x) {
  uint8_t *at = (uint8_t *)data + i * value_bytes(dtype);
  const float narrow = (float)x;
  const int64_t whole = dtype == MLFAB_I64 ? (int64_t)x : 0;
  const uint16_t half = value_bytes(dtype) == 2 ? half_of(dtype, x) : 0;
  if (dtype == MLFAB_F32) memcpy(at, &narrow, 4);
  if (dtype == MLFAB_F64) memcpy(at, &x, 8);
  if (dtype == MLFAB_I64) memcpy(at, &whole, 8);
  if (value_bytes(dtype) == 2) memcpy(at, &half, 2);
}

static inline double get(const void *data, int dtype, uint64_t i) {
  const uint8_t *at = (const uint8_t *)data + i * value_bytes(dtype);
  double x = 0;
  float narrow = 0;
  int64_t whole = 0;
  uint16_t half = 0;
  if (dtype == MLFAB_F32) memcpy(&narrow, at, 4);
  if (dtype == MLFAB_F64) memcpy(&x, at, 8);
  if (dtype == MLFAB_I64) memcpy(&whole, at, 8);
  if (value_bytes(dtype) == 2) memcpy(&half, at, 2);
  if (dtype == MLFAB_F32) return (double)narrow;
  if (dtype == MLFAB_I64) return (double)whole;
  return dtype == MLFAB_F64 ? x : of_half(dtype, half);
}

/* x -> a x + b over 32-bit words, composed of n. */
typedef struct affine {
  uint32_t a, b, n;
} affine;

/* First f, then g. */
static inline affine affine_then(affine f, affine g) {
  return (affine){g.a * f.a, g.a * f.b + g.b, f.n + g.n};
}

#endif
