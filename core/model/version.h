/* version.h - version tags: which stretches of a slice changed after a commit. Layer 2.
 *
 * A slice is divided into grains of equal size; each has a tag, the commit that changed it last, and
 * every 64 of them have the largest of theirs, so that what has not changed is passed over 64 grains
 * at a time. A cache that holds the slice as of commit c lacks the grains with a tag above c. Tags
 * are told as distances from a base, in half the memory: of changes up to the base nothing is known
 * any more, and caches older than it get everything.
 *
 * A pull first pins what the slice holds and notes its commit, then looks at the tags as it goes: tags
 * that move meanwhile make it bring more than it must, never less.
 *
 * Source: TDF §3 (versioned store). Departs: a pull there asks for v >= w, where w is the first number
 * that it lacks; here for v > c, where c = w - 1 is the last that it has. Labels are the slice's own
 * commits and not iterations of workers, under which updates of a slow one would be lost. */
#ifndef MLFAB__VERSION_H
#define MLFAB__VERSION_H

#include "../base/env.h"

typedef struct mlfab__tags {
  uint32_t *fine;   /* by grain: commit of the last change - base; 0: none after the base */
  uint32_t *coarse; /* by 64 grains: the largest of theirs */
  uint64_t grains, bytes;
  uint64_t grain_bytes; /* a power of two */
  uint32_t shift;       /* its logarithm */
  /* Set it to the commit of a slice that comes with a history of its own: caches older than that get
   * everything. */
  uint64_t base;
} mlfab__tags;

/* Tags of a slice of `bytes` (at least 1) in grains of grain_bytes (a power of two, 4 or more), the
 * last of which may be shorter. Errors: MEMORY, nothing left allocated. */
MLFAB__INTERNAL int mlfab__tags_init(mlfab__env *env, mlfab__tags *tags, uint64_t bytes,
                                     uint64_t grain_bytes);
MLFAB__INTERNAL void mlfab__tags_free(mlfab__env *env, mlfab__tags *tags);
/* Bytes that the tags of such a slice take. */
MLFAB__INTERNAL uint64_t mlfab__tags_memory(uint64_t bytes, uint64_t grain_bytes);

/* A commit changed `bytes` at byte `at` of the slice from what is at `before` to what is at `after`:
 * tags the grains in which any bit differs, and returns how many. The stretch need not be aligned to
 * grains. Commits are above the base, and none is below the one before it. Reads both once (twice,
 * cached, grains below 256 bytes). */
MLFAB__INTERNAL uint64_t mlfab__tags_mark(mlfab__tags *tags, const void *before, const void *after,
                                          uint64_t at, uint64_t bytes, uint64_t commit);
/* The same where all of it counts as changed. */
MLFAB__INTERNAL void mlfab__tags_touch(mlfab__tags *tags, uint64_t at, uint64_t bytes,
                                       uint64_t commit);

/* All that follows is about a cache that holds the slice as of commit `since`; 0, or one below the
 * base: everything counts as changed. The caller refuses one from the future. */

/* The next stretch of changed grains in the bytes `from` to `end` of the slice, clipped to these; none:
 * it begins and ends at `end`. */
MLFAB__INTERNAL void mlfab__tags_next(const mlfab__tags *tags, uint64_t since, uint64_t from,
                                      uint64_t end, uint64_t *begin_p, uint64_t *stop_p);
/* Bit g of keep[g / 64], for the `grains` stretches of grain_bytes that follow one another from byte
 * `at`: something in it may have changed. Where `at` is inside a grain each lies in two of them, and
 * either counts. Bits behind the last are 0. */
MLFAB__INTERNAL void mlfab__tags_bitmap(const mlfab__tags *tags, uint64_t since, uint64_t at,
                                        uint64_t grains, uint64_t *keep);

#endif
