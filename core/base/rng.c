/* rng.c - hashes. Equal on every machine.
 *
 * Source: Steele, Lea and Flood 2014 (splitmix64); Fowler, Noll and Vo (FNV-1a). */
#include "rng.h"

/* One output of splitmix64 with state x. Gamma is added first, so that 0 is not mapped to 0. */
MLFAB__INTERNAL uint64_t mlfab__mix(uint64_t x) {
  x += MLFAB__RNG_GAMMA;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* FNV-1a alone gives poor high bits for short names. */
MLFAB__INTERNAL uint64_t mlfab__hash(uint64_t seed, const void *data, size_t bytes) {
  const uint8_t *at = data;
  uint64_t hash = 0xcbf29ce484222325u ^ seed;
  for (size_t i = 0; i < bytes; i++) hash = (hash ^ at[i]) * 0x100000001b3u;
  return mlfab__mix(hash);
}
