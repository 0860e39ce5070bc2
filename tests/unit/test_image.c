/* test_image.c - slices from store to store as chunks: every byte of every kind arrives once and in order,
 * for any chunk size and with links that break anywhere; a chunk out of order is refused and changes
 * nothing. */
#include "core/base/rng.h"
#include "core/model/image.h"

#include "../testing.h"

enum { SLICES = 6, BLOCK = 1024, COUNT = 6300, SERVERS = 2 };

typedef struct side {
  mlfab__env env;
  mlfab__layout layout;
  mlfab__store store;
} side;

/* The value of a byte of the source, which encodes its kind and its place in the flat model. */
static uint8_t byte_of(uint32_t kind, uint64_t offset) {
  return (uint8_t)(offset * 31 + kind * 101 + offset / 251 + 1);
}

static uint8_t *bytes_at(const mlfab__store *store, uint32_t kind, uint32_t position) {
  if (kind == MLFAB__IMAGE_STATE0) return store->s0 ? store->s0[position] : NULL;
  if (kind == MLFAB__IMAGE_STATE1) return store->s1 ? store->s1[position] : NULL;
  uint32_t block = kind == MLFAB__IMAGE_SUM ? store->sum[position] : store->w[position];
  return block == MLFAB__NO_BLOCK ? NULL : store->blocks[block].data;
}

static void open_side(side *s, uint32_t server, uint32_t states, int ghost) {
  const mlfab__tensor_info info = {0, MLFAB_F32, COUNT};
  mlfab_error error;
  memset(s, 0, sizeof *s);
  assert_int_equal(mlfab__env_init(&s->env, NULL), 0);
  assert_int_equal(
      mlfab__layout_build(&s->env, &info, 1, SLICES, SERVERS, SERVERS, 1 << 20, &s->layout, &error),
      0);
  uint32_t owners[SLICES];
  for (uint32_t i = 0; i < SLICES; i++) owners[i] = server;
  mlfab__layout_assign(&s->layout, owners);
  assert_int_equal(mlfab__store_init(&s->env, &s->store, NULL, NULL, &s->layout, server, BLOCK, 1,
                                     states, ghost),
                   0);
}

static void close_side(side *s) {
  mlfab__store_free(&s->env, &s->store);
  mlfab__layout_free(&s->env, &s->layout);
}

/* Fills every kind with bytes that no other kind has; every third block, at random, has a sum. */
static void fill(side *s, mlfab__rng *prng) {
  mlfab__store *store = &s->store;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *slice = &store->slices[i];
    for (uint32_t p = slice->first; p < slice->first + slice->count; p++) {
      if (mlfab__rng_below(prng, 3) == 0) store->sum[p] = mlfab__store_take(store);
      for (uint32_t kind = 0; kind < MLFAB__IMAGE_KINDS; kind++) {
        uint8_t *data = bytes_at(store, kind, p);
        uint64_t offset = slice->offset + (uint64_t)(p - slice->first) * BLOCK;
        for (uint32_t b = 0; data && b < mlfab__store_block_bytes(store, i, p); b++)
          data[b] = byte_of(kind, offset + b);
      }
    }
  }
}

/* The slices of `owner` equal the source: all kinds, and sums where the source had them. */
static void expect_same(const side *from, const side *to, const uint32_t *owners, uint32_t owner) {
  for (uint32_t i = 0; i < from->store.nslices; i++) {
    const mlfab__shard_slice *slice = &from->store.slices[i];
    if (owners[slice->number] != owner) continue;
    for (uint32_t p = slice->first; p < slice->first + slice->count; p++) {
      for (uint32_t kind = 0; kind < MLFAB__IMAGE_KINDS; kind++) {
        const uint8_t *a = bytes_at(&from->store, kind, p), *b = bytes_at(&to->store, kind, p);
        assert_int_equal(a == NULL, b == NULL);
        if (a) assert_memory_equal(a, b, mlfab__store_block_bytes(&from->store, i, p));
      }
    }
  }
}

/* Makes of this chunk one that no writer makes while the slice is in progress. */
static mlfab__image_chunk wrong_chunk(mlfab__rng *prng, const mlfab__image_chunk *chunk,
                                      const mlfab__store *store) {
  mlfab__image_chunk bad = *chunk;
  uint64_t bytes = store->slices[chunk->slice].bytes;
  switch (mlfab__rng_below(prng, 6)) {
    case 0:
      bad.bytes = 0;
      break;
    case 1:
      bad.bytes = (uint32_t)(bytes - bad.offset + 1);
      break;
    case 2:
      bad.offset = bytes + 1 + mlfab__rng_below(prng, 1000);
      break;
    case 3:
      bad.kind = MLFAB__IMAGE_KINDS + (uint32_t)mlfab__rng_below(prng, 3);
      break;
    case 4:
      bad.slice = store->nslices + (uint32_t)mlfab__rng_below(prng, 3);
      break;
    default:
      bad.kind = MLFAB__IMAGE_WEIGHTS, bad.offset = 4, bad.bytes = 4, bad.last = 1; /* too early */
  }
  return bad;
}

static void run(uint64_t seed) {
  static const uint8_t zeros[COUNT * 8];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  uint32_t states = (uint32_t)mlfab__rng_below(&prng, 3), owners[SLICES], parts_done = 0, mine = 0;
  int ghost = mlfab__rng_below(&prng, 5) == 0;
  uint64_t limit = 4 + 4 * mlfab__rng_below(&prng, 400);
  side from, to;
  open_side(&from, 0, states, ghost);
  open_side(&to, 0, states, ghost);
  assert_int_equal(from.store.nslices, SLICES);
  fill(&from, &prng);
  for (uint32_t i = 0; i < SLICES; i++) {
    owners[i] = (uint32_t)mlfab__rng_below(&prng, SERVERS);
    mine += owners[i] == 1;
  }
  mlfab__image_part parts[SLICES] = {{0, 0, 0}};
  mlfab__image_cursor cursor = {0, 0, 0};
  mlfab__image_chunk chunk;
  while (mlfab__image_next(&from.store, owners, 1, limit, &cursor, &chunk)) {
    mlfab__image_part *part = &parts[chunk.slice];
    assert_int_equal(owners[from.store.slices[chunk.slice].number], 1);
    assert_true(chunk.bytes > 0 && chunk.bytes <= limit && (chunk.data == NULL) == ghost);
    if (mlfab__rng_below(&prng, 3) == 0 && !part->done && part->offset != 4) {
      mlfab__image_part before = *part;
      mlfab__image_chunk bad = wrong_chunk(&prng, &chunk, &to.store);
      assert_int_equal(mlfab__image_take(&to.env, &to.store, part, &bad, ghost ? NULL : zeros),
                       MLFAB_ERR_FRAME);
      assert_memory_equal(part, &before, sizeof before);
    }
    int was = part->done;
    assert_int_equal(mlfab__image_take(&to.env, &to.store, part, &chunk, chunk.data), 0);
    if (!was) assert_int_equal(part->done, chunk.last);
    parts_done += part->done && !was;
    cursor.offset += chunk.bytes;
    /* A link breaks: the current slice starts again; finished ones stay. */
    if (mlfab__rng_below(&prng, 400) == 0) memset(&cursor, 0, sizeof cursor);
  }
  assert_int_equal(parts_done, mine);
  if (!ghost) expect_same(&from, &to, owners, 1);
  close_side(&from);
  close_side(&to);
}

TEST(test_images) {
  for (uint64_t seed = 1; seed <= 400; seed++) run(seed);
}

/* Bytes for a ghost model, and states for a store that has none. */
TEST(test_other_stores) {
  side s;
  mlfab__image_part part = {0, 0, 0};
  const uint8_t data[8] = {1};
  mlfab__image_chunk chunk = {.bytes = 8};
  open_side(&s, 0, 0, 0);
  assert_int_equal(mlfab__image_take(&s.env, &s.store, &part, &chunk, NULL), MLFAB_ERR_FRAME);
  chunk.kind = MLFAB__IMAGE_STATE0;
  assert_int_equal(mlfab__image_take(&s.env, &s.store, &part, &chunk, data), MLFAB_ERR_FRAME);
  close_side(&s);
  open_side(&s, 0, 0, 1);
  chunk.kind = MLFAB__IMAGE_WEIGHTS;
  assert_int_equal(mlfab__image_take(&s.env, &s.store, &part, &chunk, data), MLFAB_ERR_FRAME);
  assert_int_equal(mlfab__image_take(&s.env, &s.store, &part, &chunk, NULL), 0);
  close_side(&s);
}

TESTS(NULL, NULL)
