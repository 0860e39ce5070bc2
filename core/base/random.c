/* random.c - seeded random numbers.
 *
 * For simulations, sampling and jitter, never for secrets: four outputs determine all others. The caller
 * owns the state. Equal seeds give equal numbers on every machine: nothing here depends on byte order, word
 * size or floating-point rounding.
 *
 * Source: Blackman and Vigna 2018 (xoshiro256**); Lemire 2019 (bounded numbers). */
#include "rng.h"

static inline uint64_t random_rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }

/* splitmix64 is a bijection of its state. So the four words are never all zero: xoshiro could not leave that state. */
MLFAB__INTERNAL void mlfab__rng_seed(mlfab__rng *prng, uint64_t seed) {
  for (uint64_t i = 0; i < 4; i++) prng->s[i] = mlfab__mix(seed + i * MLFAB__RNG_GAMMA);
}

MLFAB__INTERNAL uint64_t mlfab__rng_next(mlfab__rng *prng) {
  uint64_t *s = prng->s;
  uint64_t result = random_rotate(s[1] * 5, 7) * 9;
  uint64_t t = s[1] << 17;
  s[2] ^= s[0];
  s[3] ^= s[1];
  s[1] ^= s[2];
  s[0] ^= s[3];
  s[2] ^= t;
  s[3] = random_rotate(s[3], 45);
  return result;
}

/* The 128-bit product x * y as two halves, from four products of 32 bits: C11 has no wider type. */
static uint64_t random_multiply(uint64_t x, uint64_t y, uint64_t *low_p) {
  uint64_t x0 = x & 0xffffffffu, x1 = x >> 32, y0 = y & 0xffffffffu, y1 = y >> 32;
  uint64_t middle = x1 * y0 + (x0 * y0 >> 32);
  uint64_t carry = x0 * y1 + (middle & 0xffffffffu);
  *low_p = x * y;
  return x1 * y1 + (middle >> 32) + (carry >> 32);
}

/* The high half of random * bound is in range. Low halves below 2^64 mod bound are drawn again, because
 * they would make some results more likely. */
MLFAB__INTERNAL uint64_t mlfab__rng_below(mlfab__rng *prng, uint64_t bound) {
  uint64_t low, high;
  if (bound == 0) return 0;
  high = random_multiply(mlfab__rng_next(prng), bound, &low);
  if (low < bound) {
    uint64_t biased = (0 - bound) % bound;
    while (low < biased) high = random_multiply(mlfab__rng_next(prng), bound, &low);
  }
  return high;
}

/* 53 bits, as many as a double holds: every value is exact, and below 1. */
MLFAB__INTERNAL double mlfab__rng_unit(mlfab__rng *prng) {
  return (double)(mlfab__rng_next(prng) >> 11) * 0x1p-53;
}
