/* random.h - seeded random numbers (splitmix64, xoshiro256**). Same seed, same numbers. rng.h includes it. */
#ifndef MLFAB__RANDOM_H
#define MLFAB__RANDOM_H

#include "base.h"

typedef struct mlfab__rng {
  uint64_t s[4];
} mlfab__rng;

MLFAB__INTERNAL void mlfab__rng_seed(mlfab__rng *prng, uint64_t seed);
MLFAB__INTERNAL uint64_t mlfab__rng_next(mlfab__rng *prng);
/* Uniform in 0..bound-1 without bias; bound 0 gives 0. */
MLFAB__INTERNAL uint64_t mlfab__rng_below(mlfab__rng *prng, uint64_t bound);
/* Uniform in [0, 1). */
MLFAB__INTERNAL double mlfab__rng_unit(mlfab__rng *prng);

#endif
