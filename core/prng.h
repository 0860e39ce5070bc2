/* prng.h - seeded random numbers (splitmix64, xoshiro256**). Layer 0. Same seed, same numbers. */
#ifndef MLFAB__PRNG_H
#define MLFAB__PRNG_H

#include "base.h"

typedef struct mlfab__prng {
  uint64_t s[4];
} mlfab__prng;

MLFAB__INTERNAL void mlfab__prng_seed(mlfab__prng *prng, uint64_t seed);
MLFAB__INTERNAL uint64_t mlfab__prng_next(mlfab__prng *prng);
/* Uniform in 0..bound-1 without bias; bound 0 gives 0. */
MLFAB__INTERNAL uint64_t mlfab__prng_below(mlfab__prng *prng, uint64_t bound);
/* Uniform in [0, 1). */
MLFAB__INTERNAL double mlfab__prng_unit(mlfab__prng *prng);
/* A good 64-bit mix of x: hashing, counter-based draws. */
MLFAB__INTERNAL uint64_t mlfab__mix(uint64_t x);

#endif
