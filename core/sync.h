/* sync.h - consistency: when a pull may be answered and when a round is complete. Layer 2, pure.
 *
 * Source: FluentPS Alg. 1 (pull condition, push condition). A consistency model is a pair of
 * predicates over the state below; the server asks them and does the rest. A new model is one more
 * case in each. */
#ifndef MLFAB__SYNC_H
#define MLFAB__SYNC_H

#include "base.h"

/* What a condition may look at. Progress counts rounds, from 0. */
typedef struct mlfab__sync_state {
  uint64_t v_train; /* rounds committed */
  uint64_t
      progress; /* of the worker that asks: rounds it has pushed (pull), or the round of its push */
  uint32_t arrived; /* members whose update of the open round is complete */
  uint32_t members; /* live workers that still push */
} mlfab__sync_state;

MLFAB__INTERNAL int mlfab__sync_known(uint32_t kind);
/* 1 when updates of a round are summed before they are applied. */
MLFAB__INTERNAL int mlfab__sync_rounds(uint32_t kind);
/* Pull condition: may this pull be answered now? */
MLFAB__INTERNAL int mlfab__sync_may_pull(uint32_t kind, const mlfab__sync_state *state);
/* May a push of round `progress` be taken in now? One of a later round waits. */
MLFAB__INTERNAL int mlfab__sync_may_push(uint32_t kind, const mlfab__sync_state *state);
/* Push condition: is the open round complete? */
MLFAB__INTERNAL int mlfab__sync_round_complete(uint32_t kind, const mlfab__sync_state *state);

#endif
