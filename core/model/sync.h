/* sync.h - consistency: when a pull may be answered and when an iteration is complete. Layer 2,
 * pure.
 *
 * A consistency model is a pull condition and a push condition over the state of one server's clock;
 * the server asks them and does the rest, and lazy.h keeps the pulls that have to wait. The
 * conditions of MLFAB_SYNC_USER are the caller's functions: no predicate here is asked for it.
 *
 * Progress of a pull is a count: with `progress` i + 1 it asks for what iteration i made, and 0 for
 * the first weights, which nobody waits for. Progress of a push is its iteration, from 0.
 *
 * Source: FluentPS Alg. 1, Table III, §III-E. Departs: the push condition is >=, asked again until
 * it says no, because it is overtaken when members leave, `need` is lowered or the model changes; a
 * draw passes with u >= P, so that c = 0 is ASP and c = 1 is SSP exactly. */
#ifndef MLFAB__SYNC_H
#define MLFAB__SYNC_H

#include "../base/base.h"
#include "../base/env.h"

/* --- the description of a model; all members are there, whatever `size` says --- */

/* Is what the kind uses in range? Other members are ignored. 0 or ARGUMENT, naming the member. */
MLFAB__INTERNAL int mlfab__sync_check(const mlfab_sync *sync, uint32_t workers, mlfab_error *error);
/* Fills in `size` and the defaults of a checked one. */
MLFAB__INTERNAL void mlfab__sync_complete(mlfab_sync *sync);
/* 1 when both, complete, are the same model: members that the kind does not use do not count. */
MLFAB__INTERNAL int mlfab__sync_equal(const mlfab_sync *a, const mlfab_sync *b);
/* "ssp"; "unknown" for a number that is no kind. */
MLFAB__INTERNAL const char *mlfab__sync_name(uint32_t kind);

/* 1 when updates are summed, and applied in one commit a round. */
MLFAB__INTERNAL int mlfab__sync_rounds(uint32_t kind);
/* 1 when V_train matters: every server must be told of every update, also of one that has no bytes
 * there. */
MLFAB__INTERNAL int mlfab__sync_counts(uint32_t kind);
/* 1 when the state's significance is looked at. */
MLFAB__INTERNAL int mlfab__sync_significant(const mlfab_sync *sync);
/* 1: a pull that leaves the buffer is asked about once more. 0 (PSSP): it is answered, as its draw
 * has only delayed it. */
MLFAB__INTERNAL int mlfab__sync_rechecks(const mlfab_sync *sync);

/* --- conditions; `threshold` is the s in force: of DSPS its tuner's, else sync->staleness --- */

/* P: the probability with which this pull has to wait; 0 and 1 where no chance is involved. Looks
 * at the state's progress, fastest, v_train and significance; one not known counts as 1. */
MLFAB__INTERNAL double mlfab__sync_pause(const mlfab_sync *sync, uint64_t threshold,
                                         const mlfab_sync_state *state);
/* Pull condition of a pull that comes; `draw` is its own, uniform in [0, 1). */
MLFAB__INTERNAL int mlfab__sync_may_pull(const mlfab_sync *sync, uint64_t threshold,
                                         const mlfab_sync_state *state, double draw);
/* The same of one that is in the buffer: without a second draw. */
MLFAB__INTERNAL int mlfab__sync_may_pull_again(const mlfab_sync *sync, uint64_t threshold,
                                               const mlfab_sync_state *state);
/* May a push of iteration `progress` be taken in now? In rounds one that is ahead waits. */
MLFAB__INTERNAL int mlfab__sync_may_push(const mlfab_sync *sync, uint64_t progress,
                                         uint64_t v_train);
/* 1 when a push of iteration `progress` comes too late and is dropped. */
MLFAB__INTERNAL int mlfab__sync_late(const mlfab_sync *sync, uint64_t progress, uint64_t v_train);
/* Push condition: is iteration v_train complete? Asked again after each step of v_train. Without
 * members left, anything that arrived completes it: `arrived` is then told of dead workers, too. */
MLFAB__INTERNAL int mlfab__sync_complete_round(const mlfab_sync *sync,
                                               const mlfab_sync_state *state);

/* Uniform in [0, 1), a function of its arguments alone: one draw a pull, and a run replays. */
MLFAB__INTERNAL double mlfab__sync_draw(uint64_t seed, uint32_t server, uint32_t worker,
                                        uint64_t progress);

/* DSPS: the threshold that a clock has come to. Begins with {staleness, 0}. */
typedef struct mlfab__sync_tuner {
  uint64_t threshold;
  uint32_t quiet; /* steps on end in which no pull had to wait */
} mlfab__sync_tuner;

/* Once a step of V_train: `delayed` pulls had to wait since the one before, `spread` is fastest -
 * slowest. Whoever is further ahead than the threshold is waiting still, so that such a step is not
 * quiet either. */
MLFAB__INTERNAL void mlfab__sync_tune(const mlfab_sync *sync, mlfab__sync_tuner *tuner,
                                      uint64_t delayed, uint64_t spread);

#endif
