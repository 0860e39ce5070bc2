/* tags.h - for tests of version tags: marks bytes as changed whatever their values are, and the tags' memory. */
#ifndef TESTS_TAGS_H
#define TESTS_TAGS_H

#include "core/sparse/version.h"

static inline void tags_touch(mlfab__tags *tags, uint64_t at, uint64_t bytes, uint64_t commit) {
  static const uint8_t before[4096] = {0};
  uint8_t after[4096];
  memset(after, 1, sizeof after);
  for (uint64_t done = 0, n; done < bytes; done += n) {
    n = mlfab__min(bytes - done, sizeof after);
    mlfab__tags_mark(tags, before, after, at + done, n, commit);
  }
}

/* A tag of four bytes a grain, and one for each 64 grains. */
static inline uint64_t tags_memory(uint64_t bytes, uint64_t grain_bytes) {
  uint64_t grains = (bytes + grain_bytes - 1) / grain_bytes;
  return (grains + 63) / 64 * 65 * 4;
}

#endif
