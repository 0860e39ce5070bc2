/* image.c - reads and writes slices as a stream of chunks. See image.h. */
#include "image.h"

static int image_has(const mlfab__store *store, uint32_t kind) {
  return kind == MLFAB__IMAGE_STATE0   ? store->s0 != NULL
         : kind == MLFAB__IMAGE_STATE1 ? store->s1 != NULL
                                       : kind < MLFAB__IMAGE_KINDS;
}

/* The bytes of a position, by kind; NULL: ghosts. */
static uint8_t *image_bytes(const mlfab__store *store, uint32_t kind, uint32_t position) {
  if (kind == MLFAB__IMAGE_STATE0) return store->s0[position];
  if (kind == MLFAB__IMAGE_STATE1) return store->s1[position];
  return store->blocks[kind == MLFAB__IMAGE_SUM ? store->sum[position] : store->w[position]].data;
}

/* ---- writing ---- */

/* Moves the cursor to the next existing bytes: 1, or 0 behind the last. */
static int image_seek(const mlfab__store *store, const uint32_t *owners, uint32_t owner,
                      mlfab__image_cursor *c) {
  for (; c->slice < store->nslices; c->slice++, c->kind = 0, c->offset = 0) {
    const mlfab__shard_slice *s = &store->slices[c->slice];
    if (owners[s->number] != owner) continue;
    for (; c->kind < MLFAB__IMAGE_KINDS; c->kind++, c->offset = 0) {
      if (!image_has(store, c->kind)) continue;
      /* Skips missing blocks of the sum. */
      while (c->kind == MLFAB__IMAGE_SUM && c->offset < s->bytes &&
             store->sum[s->first + c->offset / store->block_bytes] == MLFAB__NO_BLOCK)
        c->offset = (c->offset / store->block_bytes + 1) * store->block_bytes;
      if (c->offset < s->bytes) return 1;
    }
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__image_next(const mlfab__store *store, const uint32_t *owners,
                                      uint32_t owner, uint64_t limit, mlfab__image_cursor *cursor,
                                      mlfab__image_chunk *chunk) {
  if (!image_seek(store, owners, owner, cursor)) return 0;
  const mlfab__shard_slice *s = &store->slices[cursor->slice];
  uint64_t at = cursor->offset % store->block_bytes;
  uint32_t position = s->first + (uint32_t)(cursor->offset / store->block_bytes);
  uint64_t bytes = mlfab__min(store->block_bytes - at, s->bytes - cursor->offset);
  uint8_t *data = image_bytes(store, cursor->kind, position);
  *chunk = (mlfab__image_chunk){.slice = cursor->slice,
                                .kind = cursor->kind,
                                .offset = cursor->offset,
                                .data = data ? data + at : NULL,
                                .bytes = (uint32_t)mlfab__min(bytes, limit)};
  mlfab__image_cursor next = *cursor;
  next.offset += chunk->bytes;
  chunk->last = !image_seek(store, owners, owner, &next) || next.slice != cursor->slice;
  return 1;
}

/* ---- reading ---- */

/* Have all earlier bytes arrived? Moves the part to this kind. */
static int image_follows(const mlfab__store *store, const mlfab__shard_slice *slice,
                         mlfab__image_part *part, uint32_t kind, uint64_t offset) {
  while (part->kind < kind) {
    if (image_has(store, part->kind) && part->offset != slice->bytes) return 0;
    part->kind++;
    part->offset = 0;
  }
  return part->kind == kind &&
         (kind == MLFAB__IMAGE_SUM ? offset >= part->offset : offset == part->offset);
}

/* Provides a zeroed block for a sum. */
static int image_sum_block(mlfab__env *env, mlfab__store *store, uint32_t position) {
  if (store->sum[position] != MLFAB__NO_BLOCK) return 0;
  if (store->free_count == 0 && mlfab__store_grow(env, store)) return MLFAB_ERR_MEMORY;
  store->sum[position] = mlfab__store_take(store);
  uint8_t *data = store->blocks[store->sum[position]].data;
  if (data) mlfab__memory_zero(store->memory, data, store->block_bytes);
  return 0;
}

/* Copies from memory of the host; the caller may reuse `from` afterwards. */
static void image_put(mlfab__memory *memory, uint8_t *to, const uint8_t *from, uint64_t bytes) {
  if (memory)
    memory->on->write(memory, to, from, bytes);
  else
    memcpy(to, from, bytes);
}

static int image_write(mlfab__env *env, mlfab__store *store, const mlfab__image_chunk *chunk,
                       const uint8_t *from) {
  const mlfab__shard_slice *slice = &store->slices[chunk->slice];
  uint64_t bytes = chunk->bytes;
  for (uint64_t offset = chunk->offset, n; bytes > 0; offset += n, bytes -= n) {
    uint64_t at = offset % store->block_bytes;
    uint32_t position = slice->first + (uint32_t)(offset / store->block_bytes);
    n = mlfab__min(bytes, store->block_bytes - at);
    if (chunk->kind == MLFAB__IMAGE_SUM && image_sum_block(env, store, position))
      return MLFAB_ERR_MEMORY;
    uint8_t *data = image_bytes(store, chunk->kind, position);
    if (!data || !from) continue;
    image_put(store->memory, data + at, from, n);
    from += n;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__image_take(mlfab__env *env, mlfab__store *store, mlfab__image_part *part,
                                      const mlfab__image_chunk *chunk, const uint8_t *data) {
  if (chunk->slice >= store->nslices || !image_has(store, chunk->kind)) return MLFAB_ERR_FRAME;
  if (part->done) return 0;
  const mlfab__shard_slice *slice = &store->slices[chunk->slice];
  if (chunk->bytes == 0 || chunk->offset > slice->bytes ||
      chunk->bytes > slice->bytes - chunk->offset || (data == NULL) != store->ghost)
    return MLFAB_ERR_FRAME;
  if (chunk->kind == MLFAB__IMAGE_WEIGHTS && chunk->offset == 0) {
    memset(part, 0, sizeof *part); /* starts again, after a link was lost */
    for (uint32_t p = slice->first; p < slice->first + slice->count; p++)
      mlfab__store_put(store, &store->sum[p], MLFAB__NO_BLOCK);
  }
  mlfab__image_part next = *part;
  if (!image_follows(store, slice, &next, chunk->kind, chunk->offset)) return MLFAB_ERR_FRAME;
  next.offset = chunk->offset + chunk->bytes;
  mlfab__image_part end = next;
  if (chunk->last && !image_follows(store, slice, &end, MLFAB__IMAGE_SUM, slice->bytes))
    return MLFAB_ERR_FRAME;
  int code = image_write(env, store, chunk, data);
  if (code) return code;
  *part = next;
  part->done = chunk->last != 0;
  return 0;
}
