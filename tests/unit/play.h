/* play.h - plays the kernels of gpu/src on the CPU: grids, blocks, warps and lanes are loops, and a barrier is the
 * end of one. The functions are those of gpu/mlfab_gpu.h, with host memory and without a stream. Also compiles
 * as C++.
 *
 * What is not said by the order of launches and barriers must not matter: `backwards` plays blocks, warps and
 * threads in the opposite order. */
#ifndef PLAY_H
#define PLAY_H

#include "gpu/src/elements.h"

#include "chance.h"

#include <stdlib.h>

static int play_backwards;

static inline uint32_t play_at(uint32_t i, uint32_t n) { return play_backwards ? n - 1 - i : i; }

/* Poisoned, as a caller's scratch may be. */
static inline void *play_scratch(uint64_t bytes) {
  void *scratch = aligned_alloc(64, (size_t)((bytes + 63) / 64 * 64));
  if (!scratch) abort();
  memset(scratch, 0xa5, (size_t)bytes);
  return scratch;
}

static inline void play_stats(elements_sums sums, uint32_t parts, mlfab_gpu_stats *stats) {
  elements_tally_shared shared;
  double norm2 = 0.0;
  uint32_t bad = 0;
  for (uint32_t i = 0; i < ELEMENTS_WARPS; i++) {
    uint32_t warp = play_at(i, ELEMENTS_WARPS);
    elements_tally tally[ELEMENTS_WARP];
    for (uint32_t l = 0; l < ELEMENTS_WARP; l++)
      tally[l] = elements_tally_parts(sums, parts, warp * ELEMENTS_WARP + l);
    elements_tally_warp(&shared, warp, tally);
  }
  elements_tally_block(&shared, &norm2, &bad);
  elements_stats_set(stats, norm2, bad);
}

/* All blocks of a kernel whose threads leave tallies. */
#define PLAY_TALLIES(args, call)                                                        \
  for (uint32_t b_ = 0; b_ < (args).cut.parts; b_++) {                                  \
    uint32_t part = play_at(b_, (args).cut.parts);                                      \
    elements_tally_shared shared_;                                                      \
    for (uint32_t w_ = 0; w_ < ELEMENTS_WARPS; w_++) {                                  \
      uint32_t warp_ = play_at(w_, ELEMENTS_WARPS);                                     \
      elements_tally tally_[ELEMENTS_WARP];                                             \
      for (uint32_t l_ = 0; l_ < ELEMENTS_WARP; l_++) {                                 \
        uint32_t lane_ = play_at(l_, ELEMENTS_WARP);                                    \
        uint32_t thread = warp_ * ELEMENTS_WARP + lane_;                                \
        tally_[lane_] = call;                                                           \
      }                                                                                 \
      if ((args).sums.norm2) elements_tally_warp(&shared_, warp_, tally_);              \
    }                                                                                   \
    if ((args).sums.norm2)                                                              \
      elements_tally_block(&shared_, &(args).sums.norm2[part], &(args).sums.bad[part]); \
  }

static inline int play_sum(int dtype, void *dst, const void *const *in, const double *weight,
                           uint32_t k, uint64_t n, mlfab_gpu_stats *stats) {
  void *scratch = stats ? play_scratch(ELEMENTS_STATS_BYTES) : NULL;
  elements_sum sum;
  int code = elements_sum_of(&sum, dtype, dst, in, weight, k, n, stats, scratch);
  if (code == 0) {
    PLAY_TALLIES(sum, elements_sum_thread(dtype, k, &sum, part, thread))
    if (stats) play_stats(sum.sums, sum.cut.parts, stats);
  }
  free(scratch);
  return code;
}

static inline int play_reduce(int op, int dtype, void *dst, const void *const *in, uint32_t k,
                              uint64_t n) {
  elements_reduce reduce;
  int code = elements_reduce_of(&reduce, op, dtype, dst, in, k, n);
  for (uint32_t part = 0; code == 0 && part < reduce.cut.parts; part++)
    for (uint32_t thread = 0; thread < ELEMENTS_THREADS; thread++)
      elements_reduce_thread(dtype, &reduce, part, thread);
  return code;
}

static inline int play_add(int dtype, void *dst, const void *w, const void *u, double scale,
                           uint64_t n, mlfab_gpu_stats *stats) {
  void *scratch = stats ? play_scratch(ELEMENTS_STATS_BYTES) : NULL;
  elements_update update;
  int code = elements_update_of(&update, dtype, dst, w, u, scale, n, stats, scratch);
  if (code == 0) {
    PLAY_TALLIES(update, elements_update_thread(dtype, &update, part, thread))
    if (stats) play_stats(update.sums, update.cut.parts, stats);
  }
  free(scratch);
  return code;
}

/* All threads of a kernel without barriers. */
#define PLAY_THREADS(args, call)                         \
  for (uint32_t b_ = 0; b_ < (args).cut.parts; b_++) {   \
    uint32_t part = play_at(b_, (args).cut.parts);       \
    for (uint32_t t_ = 0; t_ < ELEMENTS_THREADS; t_++) { \
      uint32_t thread = play_at(t_, ELEMENTS_THREADS);   \
      call;                                              \
    }                                                    \
  }

static inline int play_apply(const mlfab_gpu_rule *rule, int dtype, void *dst, const void *w,
                             const void *u, void *s0, void *s1, uint64_t n) {
  elements_step step;
  int code = elements_step_of(&step, rule, dtype, dst, w, u, s0, s1, n);
  if (code) return code;
  PLAY_THREADS(step, elements_step_thread(dtype, step.rule, &step, part, thread))
  return 0;
}

static inline int play_convert(int to_dtype, void *to, int from_dtype, const void *from,
                               int saturate, uint64_t n) {
  elements_convert convert;
  int code = elements_convert_of(&convert, to_dtype, to, from_dtype, from, n);
  if (code) return code;
  PLAY_THREADS(convert,
               elements_convert_thread(to_dtype, from_dtype, saturate, &convert, part, thread))
  return 0;
}

static inline int play_scatter_add(int dtype, void *dst, const uint32_t *indices,
                                   const void *values, int value_half, uint64_t n, double scale) {
  elements_scatter scatter;
  int code = elements_scatter_of(&scatter, dtype, dst, indices, values, value_half, n, scale);
  if (code) return code;
  PLAY_THREADS(scatter, elements_scatter_thread(dtype, &scatter, part, thread))
  return 0;
}

/* ---- compaction ---- */

static inline void play_mark(int dtype, const elements_compact *c) {
  for (uint32_t b = 0; b < c->cut.parts; b++) {
    uint32_t part = play_at(b, c->cut.parts);
    elements_marks_shared shared;
    for (uint32_t i = 0; i < ELEMENTS_WARPS; i++) {
      uint32_t warp = play_at(i, ELEMENTS_WARPS);
      elements_marks seen[ELEMENTS_WARP];
      elements_mark_warp(dtype, c, part, warp, seen);
      elements_marks_warp(&shared, warp, seen);
    }
    elements_marks_block(&shared, c, part);
  }
}

static inline void play_scan(const elements_compact *c) {
  elements_scan_shared shared;
  elements_scan scan[ELEMENTS_WARP][ELEMENTS_WARP];
  for (uint32_t i = 0; i < ELEMENTS_WARP; i++) {
    uint32_t warp = play_at(i, ELEMENTS_WARP);
    elements_scan_warp(c, &shared, warp, scan[warp]);
  }
  elements_scan_block(c, &shared);
  for (uint32_t i = 0; i < ELEMENTS_WARP; i++) {
    uint32_t warp = play_at(i, ELEMENTS_WARP);
    elements_scan_end(c, &shared, warp, scan[warp]);
  }
}

static inline void play_emit_part(int dtype, const elements_compact *c, uint32_t part) {
  const int sparse = elements_sparse(c, part);
  elements_emit_shared shared;
  uint64_t k = c->before[part];
  for (uint64_t tile = elements_first(&c->cut, part); tile < elements_end(&c->cut, part); tile++) {
    elements_emit emit[ELEMENTS_WARPS][ELEMENTS_WARP];
    uint32_t all = 0;
    for (uint32_t i = 0; i < ELEMENTS_WARPS; i++) {
      uint32_t warp = play_at(i, ELEMENTS_WARPS);
      elements_emit_scan(c, &shared, tile, warp, emit[warp]);
    }
    for (uint32_t i = 0; i < ELEMENTS_WARPS; i++) {
      uint32_t warp = play_at(i, ELEMENTS_WARPS);
      all = elements_emit_places(sparse, &shared, warp, emit[warp]);
    }
    for (uint32_t i = 0; i < ELEMENTS_THREADS; i++) {
      uint32_t thread = play_at(i, ELEMENTS_THREADS);
      if (sparse)
        elements_emit_sparse(dtype, c, &shared, tile, thread, all, k);
      else
        elements_emit_dense(dtype, c, &shared, tile, thread, k);
    }
    k += all;
  }
}

static inline int play_compact(int dtype, const void *g, const void *residual, void *to, uint64_t n,
                               double tau, int half, uint32_t *indices, void *values, uint64_t room,
                               mlfab_gpu_compacted *result) {
  void *scratch = play_scratch(elements_compact_bytes(n));
  elements_compact c;
  int code = elements_compact_of(&c, dtype, g, residual, to, n, tau, half, indices, values, room,
                                 result, scratch);
  if (code == 0) {
    play_mark(dtype, &c);
    play_scan(&c);
    for (uint32_t b = 0; b < c.cut.parts && *c.verdict; b++)
      play_emit_part(dtype, &c, play_at(b, c.cut.parts));
  }
  free(scratch);
  return code;
}

#endif
