/* sync.c - consistency models as pairs of predicates. See sync.h.
 *
 * Source: FluentPS Table III, rows ASP and BSP. Departs: a worker that joined late or was dead
 * pushes into the open round whatever round it believes to be in (design: a joiner starts at
 * V_train). */
#include "sync.h"

MLFAB__INTERNAL int mlfab__sync_known(uint32_t kind) {
  return kind == MLFAB_SYNC_ASYNC || kind == MLFAB_SYNC_BSP;
}

MLFAB__INTERNAL int mlfab__sync_rounds(uint32_t kind) { return kind == MLFAB_SYNC_BSP; }

MLFAB__INTERNAL int mlfab__sync_may_pull(uint32_t kind, const mlfab__sync_state *state) {
  return kind == MLFAB_SYNC_BSP ? state->progress <= state->v_train : 1;
}

MLFAB__INTERNAL int mlfab__sync_may_push(uint32_t kind, const mlfab__sync_state *state) {
  return kind == MLFAB_SYNC_BSP ? state->progress <= state->v_train : 1;
}

MLFAB__INTERNAL int mlfab__sync_round_complete(uint32_t kind, const mlfab__sync_state *state) {
  if (MLFAB__PLANTED(1)) return state->arrived > 0;
  return kind == MLFAB_SYNC_BSP && state->arrived >= state->members;
}
