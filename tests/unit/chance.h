/* chance.h - the chance of tests: splitmix64 (Steele, Lea and Flood, OOPSLA 2014), the same on every machine, so that a
 * seed is all that a failure needs to be seen again. */
#ifndef CHANCE_H
#define CHANCE_H

#include <stdint.h>

#define CHANCE_STEP 0x9e3779b97f4a7c15u

static inline uint64_t mix(uint64_t x) {
  x += CHANCE_STEP;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* The next number of the sequence, 0 to n - 1. */
static inline uint64_t chance_below(uint64_t *state, uint64_t n) {
  uint64_t x = mix(*state);
  *state += CHANCE_STEP;
  return x % n;
}

#endif
