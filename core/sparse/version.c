/* version.c - keeps tags by grain, and by 64 grains. See version.h.
 *
 * Invariants: coarse[b] is the largest of fine[64 b] to fine[64 b + 63]; `fine` has whole blocks of 64,
 * with 0 behind the last grain. */
#include "version.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { VERSION_BLOCK = 64, VERSION_LARGE = 256, VERSION_SAMPLES = 16 };

static uint64_t version_grains(uint64_t bytes, uint64_t grain_bytes) {
  return bytes / grain_bytes + (bytes % grain_bytes != 0);
}

static uint64_t version_blocks(uint64_t grains) {
  return (grains + VERSION_BLOCK - 1) / VERSION_BLOCK;
}

MLFAB__INTERNAL int mlfab__tags_init(mlfab__env *env, mlfab__tags *tags, uint64_t bytes,
                                     uint64_t grain_bytes) {
  assert(bytes > 0 && grain_bytes >= 4 && (grain_bytes & (grain_bytes - 1)) == 0);
  memset(tags, 0, sizeof *tags);
  tags->bytes = bytes;
  tags->grain_bytes = grain_bytes;
  tags->shift = mlfab__lowest(grain_bytes);
  tags->grains = version_grains(bytes, grain_bytes);
  uint64_t blocks = version_blocks(tags->grains);
  tags->fine = mlfab__alloc_array(env, blocks * VERSION_BLOCK, sizeof *tags->fine);
  tags->coarse = mlfab__alloc_array(env, blocks, sizeof *tags->coarse);
  if (tags->fine && tags->coarse) return 0;
  mlfab__tags_free(env, tags);
  return MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__tags_free(mlfab__env *env, mlfab__tags *tags) {
  uint64_t blocks = version_blocks(tags->grains);
  mlfab__free(env, tags->fine, blocks * VERSION_BLOCK * sizeof *tags->fine);
  mlfab__free(env, tags->coarse, blocks * sizeof *tags->coarse);
  memset(tags, 0, sizeof *tags);
}

/* --- changes --- */

/* Returns a commit as a tag. Moves the base up if the distance does not fit. */
static uint32_t version_tag(mlfab__tags *tags, uint64_t commit) {
  assert(commit > tags->base);
  if (commit - tags->base > UINT32_MAX) {
    uint64_t blocks = version_blocks(tags->grains);
    memset(tags->fine, 0, blocks * VERSION_BLOCK * sizeof *tags->fine);
    memset(tags->coarse, 0, blocks * sizeof *tags->coarse);
    tags->base = commit - 1;
  }
  return (uint32_t)(commit - tags->base);
}

/* A whole block of the smallest grains, whose size is that of the word. No branches and a constant trip
 * count, so that compilers vectorise the loop. */
#define VERSION_MARK_WORDS(name, word)                                              \
  static uint64_t name(uint32_t *fine, const uint8_t *before, const uint8_t *after, \
                       uint32_t tag) {                                              \
    word a[VERSION_BLOCK], b[VERSION_BLOCK];                                        \
    uint32_t changed = 0;                                                           \
    memcpy(a, before, sizeof a);                                                    \
    memcpy(b, after, sizeof b);                                                     \
    for (int i = 0; i < VERSION_BLOCK; i++) {                                       \
      fine[i] = a[i] != b[i] ? tag : fine[i];                                       \
      changed += a[i] != b[i];                                                      \
    }                                                                               \
    return changed;                                                                 \
  }

VERSION_MARK_WORDS(version_mark_4, uint32_t)
VERSION_MARK_WORDS(version_mark_8, uint64_t)

/* Marks the differences in bytes `at` to `stop` of the slice, all in one block. */
static uint64_t version_mark_block(mlfab__tags *tags, const uint8_t *before, const uint8_t *after,
                                   uint64_t at, uint64_t stop, uint32_t tag) {
  uint64_t changed = 0, g = at >> tags->shift;
  if (tags->grain_bytes < VERSION_LARGE && memcmp(before, after, stop - at) == 0) return 0;
  if (stop - at == 4 * VERSION_BLOCK && tags->grain_bytes == 4)
    return version_mark_4(tags->fine + g, before, after, tag);
  if (stop - at == 8 * VERSION_BLOCK && tags->grain_bytes == 8)
    return version_mark_8(tags->fine + g, before, after, tag);
  for (uint64_t n; at < stop; at += n, g++) {
    n = mlfab__min(stop, (g + 1) << tags->shift) - at;
    if (memcmp(before, after, n) != 0) {
      tags->fine[g] = tag;
      changed++;
    }
    before += n;
    after += n;
  }
  return changed;
}

MLFAB__INTERNAL uint64_t mlfab__tags_mark(mlfab__tags *tags, const void *before, const void *after,
                                          uint64_t at, uint64_t bytes, uint64_t commit) {
  assert(at <= tags->bytes && bytes <= tags->bytes - at);
  const uint8_t *a = before, *b = after;
  uint64_t changed = 0, end = at + bytes;
  uint32_t tag = version_tag(tags, commit), block_shift = tags->shift + 6;
  while (at < end) {
    uint64_t block = at >> block_shift, stop = mlfab__min(end, (block + 1) << block_shift);
    uint64_t n = version_mark_block(tags, a, b, at, stop, tag);
    if (n > 0) tags->coarse[block] = tag;
    changed += n;
    a += stop - at;
    b += stop - at;
    at = stop;
  }
  return changed;
}

/* --- queries --- */

/* Returns a bit mask of the tags in a block that are above the limit. */
static uint64_t version_above(const uint32_t *fine, uint32_t limit) {
  uint64_t bits = 0;
#if defined(__SSE2__)
  /* SSE2 compares signed numbers only: flips the sign bits of both sides. */
  const __m128i half = _mm_set1_epi32(INT32_MIN);
  const __m128i most = _mm_xor_si128(_mm_set1_epi32((int32_t)limit), half);
  for (int i = 0; i < VERSION_BLOCK; i += 16) {
    __m128i above[4];
    for (int k = 0; k < 4; k++) {
      __m128i tags = _mm_loadu_si128((const __m128i *)(const void *)(fine + i + 4 * k));
      above[k] = _mm_cmpgt_epi32(_mm_xor_si128(tags, half), most);
    }
    __m128i packed =
        _mm_packs_epi16(_mm_packs_epi32(above[0], above[1]), _mm_packs_epi32(above[2], above[3]));
    bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(packed) << i;
  }
#else
  for (int i = 0; i < VERSION_BLOCK; i++) bits |= (uint64_t)(fine[i] > limit) << i;
#endif
  return bits;
}

/* Returns the changed grains of a block; 0 behind the last block. */
static uint64_t version_changed(const mlfab__tags *tags, uint64_t block, uint32_t limit) {
  if (block >= version_blocks(tags->grains) || tags->coarse[block] <= limit) return 0;
  return version_above(tags->fine + block * VERSION_BLOCK, limit);
}

/* Finds the largest tag that a cache of commit `since` has. Returns 0 if the cache needs everything. */
static int version_limit(const mlfab__tags *tags, uint64_t since, uint32_t *limit_p) {
  if (since == 0 || since < tags->base) return 0;
  *limit_p = (uint32_t)mlfab__min(since - tags->base, UINT32_MAX);
  return 1;
}

/* Returns the first block from `block` on, before `end`, with a tag above the limit, or `end`. */
static uint64_t version_skip(const uint32_t *coarse, uint64_t block, uint64_t end, uint32_t limit) {
  while (block < end && coarse[block] <= limit) block++;
  return block;
}

MLFAB__INTERNAL void mlfab__tags_next(const mlfab__tags *tags, uint64_t since, uint64_t from,
                                      uint64_t end, uint64_t *begin_p, uint64_t *stop_p) {
  assert(end <= tags->bytes);
  uint32_t limit, block_shift = tags->shift + 6;
  *begin_p = mlfab__min(from, end);
  *stop_p = end;
  if (from >= end || !version_limit(tags, since, &limit)) return;
  uint64_t blocks = ((end - 1) >> block_shift) + 1, block = from >> block_shift, bits;
  /* In the first block only the grains from `from` on. */
  bits = version_changed(tags, block, limit) & UINT64_MAX << (from >> tags->shift) % VERSION_BLOCK;
  while (bits == 0) {
    block = version_skip(tags->coarse, block + 1, blocks, limit);
    if (block >= blocks) {
      *begin_p = end;
      return;
    }
    bits = version_changed(tags, block, limit);
  }
  uint64_t g = block * VERSION_BLOCK + mlfab__lowest(bits);
  *begin_p = mlfab__min(end, mlfab__max(from, g << tags->shift));
  for (bits = ~bits & UINT64_MAX << g % VERSION_BLOCK; bits == 0 && ++block < blocks;)
    bits = ~version_changed(tags, block, limit);
  if (bits == 0) return;
  g = block * VERSION_BLOCK + mlfab__lowest(bits);
  *stop_p = mlfab__min(end, g << tags->shift);
}

/* Returns 64 bits of two words, starting at bit `by` (0 to 64). */
static uint64_t version_join(uint64_t low, uint64_t high, uint32_t by) {
  if (by == 0) return low;
  return by == 64 ? high : low >> by | high << (64 - by);
}

MLFAB__INTERNAL void mlfab__tags_bitmap(const mlfab__tags *tags, uint64_t since, uint64_t at,
                                        uint64_t grains, uint64_t *keep) {
  uint32_t limit;
  uint64_t words = version_blocks(grains), block = (at >> tags->shift) / VERSION_BLOCK;
  uint32_t by = (uint32_t)((at >> tags->shift) % VERSION_BLOCK);
  int between = (at & (tags->grain_bytes - 1)) != 0;
  if (words == 0) return;
  if (!version_limit(tags, since, &limit)) {
    memset(keep, 0xff, words * sizeof *keep);
  } else {
    uint64_t low = version_changed(tags, block, limit);
    for (uint64_t w = 0; w < words; w++) {
      uint64_t high = version_changed(tags, ++block, limit);
      keep[w] = version_join(low, high, by);
      if (between) keep[w] |= version_join(low, high, by + 1);
      low = high;
    }
  }
  if (grains % VERSION_BLOCK) keep[words - 1] &= ~(UINT64_MAX << grains % VERSION_BLOCK);
}

MLFAB__INTERNAL mlfab__tags_share mlfab__tags_estimate(const mlfab__tags *tags, uint64_t since,
                                                       uint64_t at, uint64_t end) {
  assert(at < end && end <= tags->bytes);
  uint32_t limit, blocks = 0, touched = 0;
  uint64_t first = at >> tags->shift, last = (end - 1) >> tags->shift, changed = 0, seen = 0;
  /* The stride is odd: repetitions in a tensor mostly have a power of two as period. */
  uint64_t stride = (last / VERSION_BLOCK - first / VERSION_BLOCK + 1) / VERSION_SAMPLES | 1;
  if (!version_limit(tags, since, &limit)) return (mlfab__tags_share){256, 256};
  for (uint64_t block = first / VERSION_BLOCK; block <= last / VERSION_BLOCK; block += stride) {
    uint64_t from = mlfab__max(first, block * VERSION_BLOCK);
    uint64_t grains = mlfab__min(last + 1, (block + 1) * VERSION_BLOCK) - from;
    uint64_t bits = version_changed(tags, block, limit) >> from % VERSION_BLOCK;
    if (grains < VERSION_BLOCK) bits &= ~(UINT64_MAX << grains);
    changed += mlfab__bits(bits);
    seen += grains;
    touched += bits != 0;
    blocks++;
  }
  /* At least one grain was seen. clang's analyzer does not find this. */
  return (mlfab__tags_share){(uint32_t)(256 * changed / mlfab__max(seen, 1)),
                             256 * touched / (blocks > 0 ? blocks : 1)};
}
