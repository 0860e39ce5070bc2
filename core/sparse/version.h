/* version.h - version tags: which parts of a slice changed after a commit.
 *
 * A slice is divided into grains of equal size. Each has a tag, the last commit that changed it. Every 64 grains have
 * their largest tag, so that a search skips unchanged grains 64 at a time. A cache that holds the slice as of commit c
 * lacks the grains with a tag above c. Tags are stored as distances from a base, in half the memory. Changes up to the
 * base are unknown: a cache older than the base gets everything.
 *
 * A pull first pins the slice's blocks and notes its commit, then reads the tags as it proceeds. Tags that change
 * meanwhile make it send more than necessary, never less.
 *
 * Source: TDF §3 (versioned store). Departs: there a pull asks for v >= w, where w is the first number that it lacks;
 * here for v > c, where c = w - 1 is its last number. Labels are the slice's own commits: with iterations of workers as
 * labels, a slow worker's updates would be lost. */
#ifndef MLFAB__VERSION_H
#define MLFAB__VERSION_H

#include "../base/env.h"

typedef struct mlfab__tags {
  uint32_t *fine;   /* by grain: last commit that changed it - base; 0: none after the base */
  uint32_t *coarse; /* by 64 grains: their largest tag */
  uint64_t grains, bytes;
  uint64_t grain_bytes; /* a power of two */
  uint32_t shift;       /* its logarithm */
  /* Set it to the commit of a slice that arrives with a history: caches older than that get everything. */
  uint64_t base;
} mlfab__tags;

/* Allocates tags for a slice of `bytes` (at least 1) in grains of grain_bytes (a power of two, at least 4); the last
 * grain may be shorter. Errors: MEMORY, nothing left allocated. */
MLFAB__INTERNAL int mlfab__tags_init(mlfab__env *env, mlfab__tags *tags, uint64_t bytes,
                                     uint64_t grain_bytes);
MLFAB__INTERNAL void mlfab__tags_free(mlfab__env *env, mlfab__tags *tags);

/* A commit changed `bytes` at byte `at` of the slice from `before` to `after`: tags the grains in which any
 * bit differs, and returns their number. The bytes need not be aligned to grains. Commits are above the
 * base and do not decrease. Reads both once (twice, from the cache, with grains below 256 bytes). */
MLFAB__INTERNAL uint64_t mlfab__tags_mark(mlfab__tags *tags, const void *before, const void *after,
                                          uint64_t at, uint64_t bytes, uint64_t commit);

/* The functions below concern a cache that holds the slice as of commit `since`. For 0, or a commit below the base,
 * everything counts as changed. The caller refuses a commit in the future. */

/* Finds the next changed grains in the bytes `from` to `end` of the slice, clipped to these; without changes, begin and
 * stop are `end`. */
MLFAB__INTERNAL void mlfab__tags_next(const mlfab__tags *tags, uint64_t since, uint64_t from,
                                      uint64_t end, uint64_t *begin_p, uint64_t *stop_p);
/* Sets bit g of keep[g / 64] if the g-th of `grains` stretches of grain_bytes from byte `at` on may have
 * changed. If `at` is inside a grain, each stretch lies in two grains, and either counts. Bits behind the
 * last are 0. */
MLFAB__INTERNAL void mlfab__tags_bitmap(const mlfab__tags *tags, uint64_t since, uint64_t at,
                                        uint64_t grains, uint64_t *keep);
typedef struct mlfab__tags_share {
  uint32_t grains; /* grains that may have changed, in 1/256 */
  uint32_t blocks; /* blocks of 64 grains with such a grain, in 1/256 */
} mlfab__tags_share;

/* Returns an estimate for the bytes `at` to `end` (not empty), from the tags of 11 to 31 of the blocks; exact if there
 * are fewer than 32. */
MLFAB__INTERNAL mlfab__tags_share mlfab__tags_estimate(const mlfab__tags *tags, uint64_t since,
                                                       uint64_t at, uint64_t end);

#endif
