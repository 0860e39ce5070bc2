/* sync.c - consistency models as pairs of conditions. See sync.h.
 *
 * All pull conditions are one: a pull waits with probability P, and only P differs. */
#include "../base/rng.h"
#include "../kernels/kernels.h"
#include "sync.h"

/* By MLFAB_SYNC_*. */
#define SYNC_ROW(kind, name, uses) [MLFAB_SYNC_##kind] = {#name, uses},
static const struct {
  const char *name;
  unsigned uses; /* MLFAB__SYNC_* */
} sync_kinds[] = {MLFAB__SYNCS(SYNC_ROW)};

/* 1 / e, and the number of quiet steps after which DSPS lowers the threshold. */
static const double sync_inverse_e = 0.36787944117144232160;
enum { SYNC_QUIET = 8 };

MLFAB__INTERNAL unsigned mlfab__sync_uses(uint32_t kind) {
  return kind < MLFAB__COUNT(sync_kinds) ? sync_kinds[kind].uses : 0;
}

MLFAB__INTERNAL const char *mlfab__sync_name(uint32_t kind) {
  return kind < MLFAB__COUNT(sync_kinds) ? sync_kinds[kind].name : "unknown";
}

/* --- the description --- */

static int sync_flag(const char *kind, const char *name, uint32_t value, mlfab_error *error) {
  if (value <= 1) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: %s is %u, must be 0 or 1", kind, name, value);
}

/* A probability or a factor: must be finite, and in [0, most]. */
static int sync_number(const char *kind, const char *name, double value, double most,
                       const char *range, mlfab_error *error) {
  /* Checked before any comparison: -ffast-math assumes that comparisons never see a NaN. */
  if (mlfab__finite(value) && value >= 0.0 && value <= most) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: %s is %g, must be %s", kind, name, value,
                     range);
}

/* A negative value is refused for every kind. */
static int sync_check_staleness(const mlfab_sync *sync, const char *kind, mlfab_error *error) {
  if (sync->staleness < 0)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "%s: staleness is %lld, must be 0 or more", kind,
                       (long long)sync->staleness);
  if ((mlfab__sync_uses(sync->kind) & MLFAB__SYNC_MAX) && sync->staleness_max != 0 &&
      sync->staleness_max < sync->staleness)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "%s: staleness_max is %lld, must be 0 or at least staleness, which is %lld",
                       kind, (long long)sync->staleness_max, (long long)sync->staleness);
  return 0;
}

MLFAB__INTERNAL int mlfab__sync_check(const mlfab_sync *sync, uint32_t workers,
                                      mlfab_error *error) {
  unsigned uses = mlfab__sync_uses(sync->kind);
  const char *kind = mlfab__sync_name(sync->kind);
  int code = 0;
  if (sync->kind >= MLFAB__COUNT(sync_kinds))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "kind of consistency is %u, must be 0 to %d (MLFAB_SYNC_*)", sync->kind,
                       MLFAB_SYNC_COUNT - 1);
  code = sync_check_staleness(sync, kind, error);
  if (!code && (uses & MLFAB__SYNC_NEED) && (sync->need == 0 || sync->need > workers))
    code = MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "%s: need is %u, must be 1 to %u, the number of workers", kind, sync->need,
                       workers);
  if (!code && (uses & MLFAB__SYNC_CHANCE))
    code = sync_number(kind, "chance", sync->chance, 1.0, "0 to 1", error);
  if (!code && (uses & MLFAB__SYNC_ALPHA))
    code = sync_number(kind, "alpha", sync->alpha, 1.7976931348623157e308, "0 or more and finite",
                       error);
  if (!code && (uses & MLFAB__SYNC_SOFT)) code = sync_flag(kind, "soft", sync->soft, error);
  if (!code && (uses & MLFAB__SYNC_DRAWS))
    code = sync_flag(kind, "only_fastest", sync->only_fastest, error);
  if (!code && (uses & MLFAB__SYNC_LATE))
    code = sync_flag(kind, "keep_late", sync->keep_late, error);
  return code;
}

MLFAB__INTERNAL void mlfab__sync_complete(mlfab_sync *sync) {
  sync->size = (uint32_t)sizeof *sync;
  if (!(mlfab__sync_uses(sync->kind) & MLFAB__SYNC_MAX) || sync->staleness_max != 0) return;
  if (sync->staleness < 0) return; /* sync_check refuses it */
  sync->staleness_max = sync->staleness > INT64_MAX / 4 - 1 ? INT64_MAX : 4 * sync->staleness + 4;
}

/* --- pull conditions --- */

/* The number of iterations by which this pull exceeds the allowed lead over v_train, or 0. progress <= v + s is Table
 * III's i < v + s, with i = progress - 1. */
static uint64_t sync_excess(const mlfab_sync *sync, uint64_t threshold,
                            const mlfab_sync_state *state) {
  if (sync->kind == MLFAB_SYNC_ASYNC) return 0;
  uint64_t most = mlfab__add_sat(state->v_train, mlfab__sync_rounds(sync->kind) ? 0 : threshold);
  return state->iteration > most ? state->iteration - most : 0;
}

/* alpha / (1 + e^(s - k)) with k - s = beyond, an integer, so that the power needs no libm. */
static double sync_dynamic(const mlfab_sync *sync, double significance, uint64_t beyond) {
  double alpha = sync->alpha > 0.0 ? sync->alpha : significance < 0.0 ? 1.0 : significance;
  double power = 1.0, square = sync_inverse_e;
  for (; beyond != 0; beyond >>= 1, square *= square)
    if (beyond & 1) power *= square;
  double pause = alpha / (1.0 + power);
  return pause < 1.0 ? pause : 1.0;
}

MLFAB__INTERNAL double mlfab__sync_pause(const mlfab_sync *sync, uint64_t threshold,
                                         const mlfab_sync_state *state) {
  uint64_t excess = sync_excess(sync, threshold, state);
  if (excess == 0) return 0.0;
  if (mlfab__sync_rechecks(sync)) return 1.0;
  if (sync->only_fastest && state->iteration < state->fastest) return 0.0;
  if (sync->kind == MLFAB_SYNC_PSSP) return sync->chance;
  /* i = v + s, the first iteration that may have to wait, has k = s. */
  return sync_dynamic(sync, state->significance, excess - 1);
}

MLFAB__INTERNAL int mlfab__sync_may_pull(const mlfab_sync *sync, uint64_t threshold,
                                         const mlfab_sync_state *state, double draw) {
  return draw >= mlfab__sync_pause(sync, threshold, state);
}

MLFAB__INTERNAL int mlfab__sync_may_pull_again(const mlfab_sync *sync, uint64_t threshold,
                                               const mlfab_sync_state *state) {
  return sync_excess(sync, threshold, state) == 0;
}

/* --- push conditions --- */

MLFAB__INTERNAL int mlfab__sync_may_push(const mlfab_sync *sync, uint64_t progress,
                                         uint64_t v_train) {
  return !mlfab__sync_rounds(sync->kind) || progress <= v_train;
}

MLFAB__INTERNAL int mlfab__sync_late(const mlfab_sync *sync, uint64_t progress, uint64_t v_train) {
  return sync->kind == MLFAB_SYNC_DROP && !sync->keep_late && progress < v_train;
}

MLFAB__INTERNAL int mlfab__sync_complete_round(const mlfab_sync *sync,
                                               const mlfab_sync_state *state) {
  if (state->members == 0) return state->arrived > 0;
  uint32_t need = state->members;
  if (sync->kind == MLFAB_SYNC_DROP && sync->need < need) need = sync->need;
  return state->arrived >= need;
}

/* --- draws and the threshold of DSPS --- */

MLFAB__INTERNAL double mlfab__sync_draw(uint64_t seed, uint32_t server, uint32_t worker,
                                        uint64_t progress) {
  uint64_t who = (uint64_t)server << 32 | worker;
  uint64_t bits = mlfab__mix(mlfab__mix(mlfab__mix(seed) ^ who) ^ progress);
  return (double)(bits >> 11) * 0x1p-53; /* 53 bits, as many as a double holds; always below 1 */
}

MLFAB__INTERNAL void mlfab__sync_tune(const mlfab_sync *sync, mlfab__sync_tuner *tuner,
                                      uint64_t delayed, uint64_t spread) {
  if (delayed > 0) {
    tuner->quiet = 0;
    if (tuner->threshold < (uint64_t)sync->staleness_max) tuner->threshold++;
  } else if (spread > tuner->threshold) {
    tuner->quiet = 0;
  } else if (++tuner->quiet == SYNC_QUIET) {
    tuner->quiet = 0;
    if (tuner->threshold > (uint64_t)sync->staleness) tuner->threshold--;
  }
}
