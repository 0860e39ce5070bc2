/* rng.h - hashes, and for the groups that need them, seeded random numbers (random.h). */
#ifndef MLFAB__RNG_H
#define MLFAB__RNG_H

#include "base.h"
#include "random.h"

#define MLFAB__RNG_GAMMA 0x9e3779b97f4a7c15u /* 2^64 divided by the golden ratio, odd */

/* A 64-bit hash of x, also for counter-based draws. */
MLFAB__INTERNAL uint64_t mlfab__mix(uint64_t x);
/* FNV-1a with a final mix: for names of jobs, signatures, traces. */
MLFAB__INTERNAL uint64_t mlfab__hash(uint64_t seed, const void *data, size_t bytes);

#endif
