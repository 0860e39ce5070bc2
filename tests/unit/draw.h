/* draw.h - for tests of filters: the draw of an element, uniform in [0, 1), a multiple of 2^-32. */
#ifndef TESTS_DRAW_H
#define TESTS_DRAW_H

#include "core/base/rng.h"

/* One hash draws for two elements. */
static inline double draw_of(uint64_t seed, uint64_t t, uint64_t element) {
  uint64_t key = mlfab__mix(mlfab__mix(seed) + t);
  return (uint32_t)(mlfab__mix(key + element / 2) >> (element % 2 * 32)) * 0x1p-32;
}

#endif
