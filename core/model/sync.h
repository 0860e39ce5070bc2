/* sync.h - consistency: decides when a pull may be answered, and when an iteration is complete. Pure.
 *
 * A consistency model is a pull condition and a push condition over the state of one server's clock. The
 * server evaluates them and does the rest; lazy.h holds the delayed pulls. The conditions of
 * MLFAB_SYNC_USER are the caller's functions; the predicates here do not handle them.
 *
 * The progress of a pull is a count: `progress` i + 1 asks for the result of iteration i, and 0 for the
 * first weights, which need no iteration. The progress of a push is its iteration, from 0.
 *
 * Source: FluentPS Alg. 1, Table III, §III-E. Departs: the push condition is >=, evaluated until it is false. Reason:
 * the count may exceed it when members leave, `need` is lowered or the model changes. A draw passes with u >= P, so
 * that c = 0 is exactly ASP and c = 1 exactly SSP. */
#ifndef MLFAB__SYNC_H
#define MLFAB__SYNC_H

#include "../base/base.h"
#include "../base/env.h"
#include "options.h"

/* Of a kind: the members of mlfab_sync that it uses, and its rules. ROUNDS: updates are summed, and
 * applied in one commit a round. DRAWS: past the threshold chance decides, once, and only_fastest counts. WATCHES: any
 * update may change the answers of the conditions. */
enum { MLFAB__SYNC_STALENESS = 1, MLFAB__SYNC_MAX = 2, MLFAB__SYNC_NEED = 4, MLFAB__SYNC_SOFT = 8 };
enum { MLFAB__SYNC_LATE = 16, MLFAB__SYNC_CHANCE = 32, MLFAB__SYNC_ALPHA = 64 };
enum { MLFAB__SYNC_ROUNDS = 128, MLFAB__SYNC_DRAWS = 256, MLFAB__SYNC_WATCHES = 512 };
enum { MLFAB__SYNC_STALE = MLFAB__SYNC_SOFT | MLFAB__SYNC_STALENESS };

/* --- the description of a model; all members are valid, for any `size` --- */

/* The name, for instance "ssp"; "unknown" for an invalid kind. */
MLFAB__INTERNAL const char *mlfab__sync_name(uint32_t kind);
/* Checks the members that the kind uses; others are ignored. 0, or ARGUMENT naming the member. */
MLFAB__INTERNAL int mlfab__sync_check(const mlfab_sync *sync, uint32_t workers, mlfab_error *error);
/* Sets `size` and the defaults of a checked description. */
MLFAB__INTERNAL void mlfab__sync_complete(mlfab_sync *sync);
/* The members and rules of a kind (MLFAB__SYNC_*), as bits; 0 for an invalid kind. */
MLFAB__INTERNAL unsigned mlfab__sync_uses(uint32_t kind);
/* 1 when updates are summed, and applied in one commit a round. */
static inline int mlfab__sync_rounds(uint32_t kind) {
  return (mlfab__sync_uses(kind) & MLFAB__SYNC_ROUNDS) != 0;
}
/* Returns 1 if the model uses V_train: every server must then be told of every update, even of updates without bytes
 * for that server. */
static inline int mlfab__sync_counts(uint32_t kind) { return kind != MLFAB_SYNC_ASYNC; }
/* 1 when the conditions use the state's significance. */
static inline int mlfab__sync_significant(const mlfab_sync *sync) {
  return sync->kind == MLFAB_SYNC_USER ||
         (sync->kind == MLFAB_SYNC_PSSP_DYNAMIC && sync->alpha == 0.0);
}
/* 1: every update of a worker may change the answers of the conditions, not only a step of V_train. */
static inline int mlfab__sync_watches(uint32_t kind) {
  return (mlfab__sync_uses(kind) & MLFAB__SYNC_WATCHES) != 0;
}
/* 1: the condition of a delayed pull is evaluated again. 0 (PSSP): the pull is answered, because its draw only delayed
 * it. */
static inline int mlfab__sync_rechecks(const mlfab_sync *sync) {
  return !(mlfab__sync_uses(sync->kind) & MLFAB__SYNC_DRAWS);
}

/* --- conditions; `threshold` is the s in force: for DSPS the tuner's, else sync->staleness --- */

/* P: the probability that this pull must wait; 0 or 1 for deterministic models. Uses the state's progress,
 * fastest, v_train and significance; unknown significance counts as 1. */
MLFAB__INTERNAL double mlfab__sync_pause(const mlfab_sync *sync, uint64_t threshold,
                                         const mlfab_sync_state *state);
/* Pull condition of a new pull; `draw` is its own, uniform in [0, 1). */
MLFAB__INTERNAL int mlfab__sync_may_pull(const mlfab_sync *sync, uint64_t threshold,
                                         const mlfab_sync_state *state, double draw);
/* Pull condition of a delayed pull: without a second draw. */
MLFAB__INTERNAL int mlfab__sync_may_pull_again(const mlfab_sync *sync, uint64_t threshold,
                                               const mlfab_sync_state *state);
/* May a push of iteration `progress` be taken in now? With rounds, a push that is ahead waits. */
MLFAB__INTERNAL int mlfab__sync_may_push(const mlfab_sync *sync, uint64_t progress,
                                         uint64_t v_train);
/* Returns 1 if a push of iteration `progress` is too late and must be dropped. */
MLFAB__INTERNAL int mlfab__sync_late(const mlfab_sync *sync, uint64_t progress, uint64_t v_train);
/* Push condition: is iteration v_train complete? Evaluated again after each step of v_train. Without members, any
 * arrived update completes it; `arrived` then counts dead workers, too. */
MLFAB__INTERNAL int mlfab__sync_complete_round(const mlfab_sync *sync,
                                               const mlfab_sync_state *state);

/* One draw for a pull, uniform in [0, 1). It depends on the arguments only, so a run can be replayed. */
MLFAB__INTERNAL double mlfab__sync_draw(uint64_t seed, uint32_t server, uint32_t worker,
                                        uint64_t progress);

/* DSPS: the present threshold of a clock. Begins with {staleness, 0}. */
typedef struct mlfab__sync_tuner {
  uint64_t threshold;
  uint32_t quiet; /* consecutive steps without a waiting pull */
} mlfab__sync_tuner;

/* Called for every step of V_train. `delayed`: pulls that had to wait since the last step; `spread`:
 * fastest - slowest. If the spread exceeds the threshold, a worker still waits, and the step does not count as
 * quiet. */
MLFAB__INTERNAL void mlfab__sync_tune(const mlfab_sync *sync, mlfab__sync_tuner *tuner,
                                      uint64_t delayed, uint64_t spread);

#endif
