/* hold.c - a server's state of one moment, held while updates go on. See hold.h. */
#include "hold.h"

/* Does a holder need the store's state of this position? */
static int hold_shared(const mlfab__store *store, uint32_t position) {
  for (const mlfab__holder *h = store->holders; h; h = h->next) {
    if (!h->lost && h->s0 && h->s0[position] == store->s0[position]) return 1;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__store_held(const mlfab__store *store, uint32_t position) {
  for (const mlfab__holder *h = store->holders; h; h = h->next)
    if (h->s0 && h->s0[position] == store->s0[position]) return 1;
  return 0;
}

/* Called if there is no memory for a copy: the holders of this state lose their moment. */
static void hold_lose(mlfab__store *store, uint32_t position) {
  for (mlfab__holder *h = store->holders; h; h = h->next)
    h->lost |= h->s0 && h->s0[position] == store->s0[position];
}

static void hold_own(mlfab__env *env, mlfab__store *store, uint32_t position) {
  uint8_t **states[2] = {store->s0, store->s1}, *copies[2] = {NULL, NULL};
  if (!store->s0 || !hold_shared(store, position)) return;
  for (int k = 0; k < 2; k++) {
    if (!states[k]) continue;
    copies[k] = mlfab__memory_take(store->memory, env, store->block_bytes);
    if (copies[k]) continue;
    mlfab__memory_give(store->memory, env, copies[0], store->block_bytes);
    hold_lose(store, position);
    return;
  }
  for (int k = 0; k < 2; k++) {
    if (!states[k]) continue;
    mlfab__memory_copy(store->memory, copies[k], states[k][position], store->block_bytes);
    states[k][position] = copies[k];
  }
}

MLFAB__INTERNAL int mlfab__store_hold(mlfab__env *env, mlfab__store *store, mlfab__holder *holder,
                                      uint32_t positions, int sums) {
  uint64_t held = positions;
  for (const mlfab__holder *h = store->holders; h; h = h->next) held += h->held;
  uint64_t wanted = mlfab__store_wanted(store, held, sums);
  if (positions > 0 && wanted > store->nblocks) {
    int code = mlfab__store_spare(env, store, store->free_count + wanted - store->nblocks);
    if (code) return code;
  }
  holder->held = 0;
  holder->lost = 0;
  holder->next = store->holders;
  store->holders = holder;
  store->own = hold_own;
  return 0;
}

MLFAB__INTERNAL void mlfab__store_hold_slice(mlfab__store *store, mlfab__holder *holder,
                                             uint32_t slice) {
  const mlfab__shard_slice *s = &store->slices[slice];
  for (uint32_t p = s->first; p < s->first + s->count; p++) {
    holder->w[p] = store->w[p];
    mlfab__store_ref(store, store->w[p]);
    holder->sum[p] = store->sum[p];
    if (store->sum[p] != MLFAB__NO_BLOCK) mlfab__store_ref(store, store->sum[p]);
    if (holder->s0) holder->s0[p] = store->s0[p];
    if (holder->s1) holder->s1[p] = store->s1[p];
  }
  holder->held += s->count;
}

/* Frees a state that no holder names any more. */
static void hold_give_state(mlfab__env *env, const mlfab__store *store, uint32_t position,
                            uint8_t *s0, uint8_t *s1) {
  if (store->s0[position] == s0) return;
  for (const mlfab__holder *h = store->holders; h; h = h->next) {
    if (h->s0[position] == s0) return;
  }
  mlfab__memory_give(store->memory, env, s0, store->block_bytes);
  if (s1) mlfab__memory_give(store->memory, env, s1, store->block_bytes);
}

MLFAB__INTERNAL void mlfab__store_give_slice(mlfab__env *env, mlfab__store *store,
                                             mlfab__holder *holder, uint32_t slice) {
  const mlfab__shard_slice *s = &store->slices[slice];
  for (uint32_t p = s->first; p < s->first + s->count; p++) {
    if (holder->w[p] == MLFAB__NO_BLOCK) return;
    mlfab__store_unref(store, holder->w[p]);
    if (holder->sum[p] != MLFAB__NO_BLOCK) mlfab__store_unref(store, holder->sum[p]);
    holder->w[p] = holder->sum[p] = MLFAB__NO_BLOCK;
    if (!holder->s0) continue;
    uint8_t *s0 = holder->s0[p], *s1 = holder->s1 ? holder->s1[p] : NULL;
    holder->s0[p] = NULL;
    if (holder->s1) holder->s1[p] = NULL;
    hold_give_state(env, store, p, s0, s1);
  }
}

MLFAB__INTERNAL void mlfab__store_release(mlfab__store *store, mlfab__holder *holder) {
  mlfab__holder **at = &store->holders;
  while (*at != holder) at = &(*at)->next;
  *at = holder->next;
  holder->next = NULL;
  holder->held = 0;
}
