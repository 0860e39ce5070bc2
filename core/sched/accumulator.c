/* accumulator.c - the aggregator role: accumulators, and their loans. See aggregator.h.
 *
 * Used by aggregator.c for groups and by distributor.c for spreads. */
#include "aggregator.h"

MLFAB__INTERNAL int mlfab__aggregator_stands(const mlfab__aggregator *aggregator, uint32_t worker,
                                             uint32_t incarnation) {
  return aggregator->connected[worker] && aggregator->incarnations[worker] == incarnation;
}

MLFAB__INTERNAL mlfab__accumulator *mlfab__aggregator_find(mlfab__aggregator *aggregator,
                                                           uint32_t server, uint64_t number) {
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *a = &aggregator->accumulators[i];
    if (a->state != MLFAB__ACCUMULATOR_FREE && a->server == server && a->number == number) return a;
  }
  return NULL;
}

/* The memory changes only here, when none of it is lent. */
MLFAB__INTERNAL mlfab__accumulator *mlfab__aggregator_take(mlfab__aggregator *aggregator,
                                                           uint32_t server, uint64_t number,
                                                           uint64_t bytes, int clean) {
  mlfab__accumulator *best = NULL;
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *a = &aggregator->accumulators[i];
    if (a->state != MLFAB__ACCUMULATOR_FREE || (best && best->lent <= a->lent)) continue;
    if (a->lent == 0 || (!clean && a->room >= aggregator->data_bytes)) best = a;
  }
  if (!best) return NULL;
  if (!aggregator->ghost && best->room < aggregator->data_bytes) {
    mlfab__free_aligned(aggregator->env, best->data, best->room);
    best->data = mlfab__alloc_aligned(aggregator->env, aggregator->data_bytes);
    best->room = best->data ? aggregator->data_bytes : 0;
    if (!best->data) return NULL;
  }
  best->server = server;
  best->number = number;
  best->bytes = bytes;
  best->age = ++aggregator->ages;
  best->since_ns = aggregator->now_ns;
  return best;
}

MLFAB__INTERNAL int mlfab__aggregator_lends(const mlfab__accumulator *accumulator, int up,
                                            uint32_t peer) {
  uint32_t n = 0;
  if (accumulator->lent == MLFAB__AGGREGATOR_LOANS) return 0;
  for (uint32_t i = 0; accumulator->lent > 0 && i < MLFAB__AGGREGATOR_LOANS; i++) {
    const mlfab__loan *loan = &accumulator->loans[i];
    n += loan->serial != 0 && loan->up == up && loan->peer == peer;
  }
  return n < MLFAB__AGGREGATOR_LINK_LOANS;
}

/* Makes a token: the accumulator, the loan, and a serial number that identifies stale tokens. */
MLFAB__INTERNAL void mlfab__aggregator_offer(mlfab__aggregator *aggregator,
                                             const mlfab__accumulator *accumulator, int up,
                                             uint32_t peer, uint64_t at, mlfab__frame_out *frame) {
  int lends =
      mlfab__port_lends(up ? &aggregator->up : &aggregator->down, peer,
                        aggregator->config->chunk_bytes, frame->bulk_bytes, MLFAB__AGGREGATOR_COPY);
  uint64_t slot = 0;
  frame->slot = (uint32_t)(accumulator - aggregator->accumulators);
  frame->bulk = aggregator->ghost ? NULL : accumulator->data + at;
  frame->token = 0;
  if (aggregator->ghost || !lends) return;
  while (accumulator->loans[slot].serial != 0) slot++;
  uint32_t serial = aggregator->serials + 1 ? aggregator->serials + 1 : 1;
  frame->token = (uint64_t)frame->slot << 40 | slot << 32 | serial;
}

MLFAB__INTERNAL int mlfab__aggregator_lend(mlfab__aggregator *aggregator, int up, uint32_t peer,
                                           uint32_t recipient, uint64_t end,
                                           const mlfab__frame_out *frame) {
  mlfab__accumulator *accumulator = &aggregator->accumulators[frame->slot];
  if (frame->token == 0) return 0;
  aggregator->serials = (uint32_t)frame->token;
  accumulator->loans[frame->token >> 32 & 0xff] =
      (mlfab__loan){(uint32_t)frame->token, peer, (uint8_t)up, recipient, accumulator->age, end};
  accumulator->lent++;
  return 1;
}

MLFAB__INTERNAL void mlfab__aggregator_all_returned(mlfab__aggregator *aggregator, int up,
                                                    uint32_t peer) {
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *accumulator = &aggregator->accumulators[i];
    for (uint32_t k = 0; accumulator->lent > 0 && k < MLFAB__AGGREGATOR_LOANS; k++) {
      mlfab__loan *loan = &accumulator->loans[k];
      if (loan->serial == 0 || loan->up != up || loan->peer != peer) continue;
      loan->serial = 0;
      accumulator->lent--;
    }
  }
}
