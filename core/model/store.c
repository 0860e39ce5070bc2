/* store.c - blocks of a server's shard. See store.h. */
#include "store.h"

#include "../kernels/kernels.h"
#include "sync.h"

/* Divides the shard's slices into positions. */
static int store_cut(mlfab__env *env, mlfab__store *store, uint32_t server) {
  const mlfab__layout *layout = store->layout;
  const uint32_t *owned = layout->owned + layout->owned_at[server];
  store->local = mlfab__alloc_array(env, layout->nslices, sizeof *store->local);
  if (!store->local) return MLFAB_ERR_MEMORY;
  store->nlocal = layout->nslices;
  memset(store->local, 0xff, store->nlocal * sizeof *store->local);
  store->nslices = layout->owned_at[server + 1] - layout->owned_at[server];
  if (store->nslices == 0) return 0;
  store->slices = mlfab__alloc_array(env, store->nslices, sizeof *store->slices);
  if (!store->slices) return MLFAB_ERR_MEMORY;
  uint64_t largest = 0;
  for (uint32_t i = 0; i < layout->nslices; i++)
    largest = mlfab__max(largest, layout->slices[i].bytes);
  /* Blocks are no larger than the largest slice, so that small models need little memory. All servers use
   * the same size, so that slices can move. */
  store->block_bytes = (uint32_t)mlfab__min(store->block_bytes, (largest + 63) / 64 * 64);
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__slice *from = &layout->slices[owned[i]];
    mlfab__shard_slice *slice = &store->slices[i];
    store->local[owned[i]] = i;
    store->bytes += from->bytes;
    slice->number = owned[i];
    slice->offset = from->offset;
    slice->bytes = from->bytes;
    slice->changed = store->changes;
    slice->first = store->positions;
    slice->count = (uint32_t)((from->bytes + store->block_bytes - 1) / store->block_bytes);
    store->positions += slice->count;
    if (slice->count > store->positions_per_slice) store->positions_per_slice = slice->count;
  }
  return 0;
}

static int store_places(mlfab__env *env, mlfab__store *store, uint32_t states) {
  uint32_t n = store->positions;
  if (n == 0) return 0;
  store->w = mlfab__alloc_array(env, n, sizeof *store->w);
  store->next = mlfab__alloc_array(env, n, sizeof *store->next);
  store->sum = mlfab__alloc_array(env, n, sizeof *store->sum);
  if (!store->w || !store->next || !store->sum) return MLFAB_ERR_MEMORY;
  memset(store->w, 0xff, n * sizeof *store->w);
  memset(store->next, 0xff, n * sizeof *store->next);
  memset(store->sum, 0xff, n * sizeof *store->sum);
  for (uint32_t k = 0; k < states && !store->ghost; k++) {
    uint8_t **state = mlfab__alloc_array(env, n, sizeof *state);
    if (!state) return MLFAB_ERR_MEMORY;
    *(k == 0 ? &store->s0 : &store->s1) = state;
    for (uint32_t p = 0; p < n; p++) {
      state[p] = mlfab__memory_take(store->memory, env, store->block_bytes);
      if (!state[p]) return MLFAB_ERR_MEMORY;
      mlfab__memory_zero(store->memory, state[p], store->block_bytes);
    }
  }
  return 0;
}

/* Number of blocks: w and next for each position, and sum if rounds are summed; two slices for older versions that
 * pulls pin; w and sum once more for each position that holders have. */
MLFAB__INTERNAL uint64_t mlfab__store_wanted(const mlfab__store *store, uint64_t held, int sums) {
  return (uint64_t)store->positions * (sums ? 3 : 2) + held * (sums ? 2 : 1) +
         mlfab__min(store->positions, 2 * (uint64_t)store->positions_per_slice + 8);
}

/* Takes memory for a block; `more` blocks follow. */
static uint8_t *store_data(mlfab__env *env, const mlfab__store *store, uint64_t more) {
  if (store->memory || !store->slab)
    return mlfab__memory_take(store->memory, env, store->block_bytes);
  return store->slab->take(env, store->slab, store->block_bytes, (uint32_t)more);
}

static void store_give_data(mlfab__env *env, const mlfab__store *store, uint8_t *data) {
  if (store->memory || !store->slab)
    mlfab__memory_give(store->memory, env, data, store->block_bytes);
  else
    store->slab->give(env, store->slab, data);
}

MLFAB__INTERNAL int mlfab__store_init(mlfab__env *env, mlfab__store *store, mlfab__memory *memory,
                                      mlfab__slab *slab, const mlfab__layout *layout,
                                      uint32_t server, uint32_t block_bytes, int sums,
                                      uint32_t states, int ghost) {
  memset(store, 0, sizeof *store);
  store->layout = layout;
  store->memory = ghost ? NULL : memory;
  store->slab = slab;
  store->block_bytes = block_bytes;
  store->ghost = ghost;
  store->changes = 1;
  store->free_head = MLFAB__NO_BLOCK;
  if (store_cut(env, store, server) || store_places(env, store, states)) goto no_memory;
  if (store->positions == 0) return 0;
  uint64_t wanted = mlfab__store_wanted(store, 0, sums);
  if (wanted >= MLFAB__NO_BLOCK / 2) goto no_memory;
  store->nblocks = (uint32_t)wanted;
  store->blocks = mlfab__alloc_array(env, store->nblocks, sizeof *store->blocks);
  if (!store->blocks) goto no_memory;
  for (uint32_t i = 0; i < store->nblocks; i++) {
    if (!ghost) {
      store->blocks[i].data = store_data(env, store, store->nblocks - 1 - i);
      if (!store->blocks[i].data) goto no_memory;
    }
    store->blocks[i].next_free = i + 1 < store->nblocks ? i + 1 : MLFAB__NO_BLOCK;
  }
  store->free_head = 0;
  store->free_count = store->nblocks;
  for (uint32_t p = 0; p < store->positions; p++) {
    store->w[p] = mlfab__store_take(store);
    if (!ghost)
      mlfab__memory_zero(store->memory, store->blocks[store->w[p]].data, store->block_bytes);
  }
  return 0;
no_memory:
  mlfab__store_free(env, store);
  return MLFAB_ERR_MEMORY;
}

static void store_free_states(mlfab__env *env, mlfab__store *store, uint8_t **state) {
  for (uint32_t p = 0; state && p < store->positions; p++) {
    mlfab__memory_give(store->memory, env, state[p], store->block_bytes);
  }
  mlfab__free(env, state, store->positions * sizeof *state);
}

MLFAB__INTERNAL void mlfab__store_free_places(mlfab__env *env, mlfab__store *store) {
  assert(!store->holders);
  if (store->tags) store->tags->free(env, store);
  store_free_states(env, store, store->s0);
  store_free_states(env, store, store->s1);
  mlfab__free(env, store->w, store->positions * sizeof *store->w);
  mlfab__free(env, store->next, store->positions * sizeof *store->next);
  mlfab__free(env, store->sum, store->positions * sizeof *store->sum);
  mlfab__free(env, store->slices, store->nslices * sizeof *store->slices);
  mlfab__free(env, store->local, store->nlocal * sizeof *store->local);
}

MLFAB__INTERNAL void mlfab__store_free_block(mlfab__env *env, const mlfab__store *store,
                                             mlfab__block *block) {
  if (block->shadow) store->memory->on->forget(store->memory, block);
  store_give_data(env, store, block->data);
  block->data = NULL;
}

MLFAB__INTERNAL void mlfab__store_free(mlfab__env *env, mlfab__store *store) {
  mlfab__store_free_places(env, store);
  for (uint32_t i = 0; store->blocks && i < store->nblocks; i++)
    mlfab__store_free_block(env, store, &store->blocks[i]);
  mlfab__free(env, store->blocks, store->nblocks * sizeof *store->blocks);
  memset(store, 0, sizeof *store);
}

MLFAB__INTERNAL void mlfab__store_piece(const mlfab__store *store, uint64_t offset, uint64_t limit,
                                        mlfab__piece *piece) {
  uint32_t index = store->local[mlfab__layout_slice_at(store->layout, offset)];
  assert(index != MLFAB__NO_SLICE);
  const mlfab__shard_slice *slice = &store->slices[index];
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(store->layout, offset);
  uint64_t in_slice = offset - slice->offset;
  uint64_t block = in_slice / store->block_bytes;
  uint64_t bytes = mlfab__min(limit, tensor->offset + tensor->bytes - offset);
  bytes = mlfab__min(bytes, mlfab__min((block + 1) * store->block_bytes, slice->bytes) - in_slice);
  piece->slice = index;
  piece->position = slice->first + (uint32_t)block;
  piece->at = (uint32_t)(in_slice - block * store->block_bytes);
  piece->bytes = (uint32_t)bytes;
  piece->dtype = (int)tensor->dtype;
  piece->tensor = tensor;
  uint32_t width = mlfab__dtype_bytes((int)tensor->dtype);
  piece->count = bytes / width;
  piece->first = (offset - tensor->offset) / width;
}

MLFAB__INTERNAL uint32_t mlfab__store_block_bytes(const mlfab__store *store, uint32_t slice,
                                                  uint32_t position) {
  const mlfab__shard_slice *s = &store->slices[slice];
  uint64_t at = (uint64_t)(position - s->first) * store->block_bytes;
  return (uint32_t)mlfab__min(store->block_bytes, s->bytes - at);
}

MLFAB__INTERNAL int mlfab__store_spare(mlfab__env *env, mlfab__store *store, uint64_t spare) {
  if (store->free_count >= spare) return 0;
  uint64_t n = spare - store->free_count;
  if (n >= MLFAB__NO_BLOCK / 2 - store->nblocks) return MLFAB_ERR_MEMORY;
  mlfab__block *more = mlfab__alloc_array(env, store->nblocks + n, sizeof *more);
  if (!more) return MLFAB_ERR_MEMORY;
  memcpy(more, store->blocks, store->nblocks * sizeof *more);
  for (uint64_t i = 0; i < n; i++) {
    mlfab__block *block = &more[store->nblocks + i];
    if (!store->ghost) block->data = store_data(env, store, n - 1 - i);
    if (block->data || store->ghost) continue;
    while (i-- > 0) store_give_data(env, store, more[store->nblocks + i].data);
    mlfab__free(env, more, (store->nblocks + n) * sizeof *more);
    return MLFAB_ERR_MEMORY;
  }
  mlfab__free(env, store->blocks, store->nblocks * sizeof *more);
  store->blocks = more;
  for (uint64_t i = 0; i < n; i++) {
    more[store->nblocks].next_free = store->free_head;
    store->free_head = store->nblocks++;
    store->free_count++;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__store_grow(mlfab__env *env, mlfab__store *store) {
  return mlfab__store_spare(env, store, (uint64_t)store->free_count + 1);
}

/* --- blocks --- */

MLFAB__INTERNAL uint32_t mlfab__store_take(mlfab__store *store) {
  uint32_t block = store->free_head;
  if (block == MLFAB__NO_BLOCK) return block;
  store->free_head = store->blocks[block].next_free;
  store->free_count--;
  assert(store->blocks[block].refs == 0);
  store->blocks[block].refs = 1;
  return block;
}

MLFAB__INTERNAL void mlfab__store_ref(mlfab__store *store, uint32_t block) {
  assert(store->blocks[block].refs > 0);
  store->blocks[block].refs++;
}

MLFAB__INTERNAL void mlfab__store_unref(mlfab__store *store, uint32_t block) {
  assert(store->blocks[block].refs > 0);
  if (--store->blocks[block].refs > 0) return;
  if (store->blocks[block].shadow) store->memory->on->forget(store->memory, &store->blocks[block]);
  store->blocks[block].next_free = store->free_head;
  store->free_head = block;
  store->free_count++;
}

MLFAB__INTERNAL void mlfab__store_put(mlfab__store *store, uint32_t *place, uint32_t block) {
  if (*place != MLFAB__NO_BLOCK) mlfab__store_unref(store, *place);
  *place = block;
}

MLFAB__INTERNAL int mlfab__store_check(const mlfab_model_options *options,
                                       const mlfab__layout *layout, mlfab__optimizer *optimizer,
                                       mlfab_error *error) {
  int code = mlfab__optimizer_init(optimizer, options, error);
  if (code) return code;
  int rounds = mlfab__sync_rounds(options->consistency.kind);
  const char *text = NULL;
  if (options->mean && !rounds)
    text = "mean with an asynchronous model: there is no round to divide by";
  if (options->deterministic && options->consistency.kind != MLFAB_SYNC_BSP)
    text = "deterministic with another model than BSP: there is no round of all to order";
  for (uint32_t i = 0; i < layout->ntensors && !text; i++) {
    if (layout->tensors[i].dtype != MLFAB_I64) continue;
    if (options->mean) text = "mean with int64 tensors: the division is not exact";
    if (!mlfab__optimizer_adds(optimizer))
      text = "int64 tensors with another optimizer than SGD, or weight_decay";
  }
  if (!text) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "not supported: %s", text);
}
