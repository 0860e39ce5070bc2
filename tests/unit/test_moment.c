/* test_moment.c - moments of a server against literal copies of its state, several at a time, while updates go on. */
#include "core/checkpoint/moment.h"
#include "shards.h"
#include "../testing.h"

enum { MOMENTS = 3, LENT = 4096, PLACES = 4096 };

/* The state as it was, byte by byte. */
typedef struct picture {
  uint64_t at;
  mlfab__shard_slice slices[64];
  uint8_t bytes[4][SHARD_MODEL]; /* by kind of image.h */
  uint8_t summed[PLACES];        /* by position */
  mlfab__window windows[SHARD_WORKERS];
  uint64_t pushed[SHARD_WORKERS];
} picture;

typedef struct reader {
  mlfab__moment moment;
  picture was, before; /* before: at `since` */
  uint64_t since;
  uint32_t records, slice, kind, slices;
  uint64_t offset;
  uint8_t has[64]; /* by slice of the store */
  struct {
    const uint8_t *at, *was;
    uint32_t bytes, slice;
  } lent[LENT];
  uint32_t nlent;
  int ended;
} reader;

static const uint8_t *place(const mlfab__store *store, uint32_t kind, uint32_t p) {
  if (kind == MLFAB__IMAGE_STATE0) return store->s0 ? store->s0[p] : NULL;
  if (kind == MLFAB__IMAGE_STATE1) return store->s1 ? store->s1[p] : NULL;
  uint32_t block = kind == MLFAB__IMAGE_SUM ? store->sum[p] : store->w[p];
  return block == MLFAB__NO_BLOCK ? NULL : store->blocks[block].data;
}

static void picture_take(const mlfab__server *server, picture *to) {
  const mlfab__store *store = &server->store;
  memset(to, 0, sizeof *to);
  to->at = store->changes;
  assert_true(store->nslices <= 64 && store->positions <= PLACES);
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    to->slices[i] = *s;
    for (uint32_t p = s->first; p < s->first + s->count; p++) {
      uint64_t at = s->offset + (uint64_t)(p - s->first) * store->block_bytes;
      to->summed[p] = store->sum[p] != MLFAB__NO_BLOCK;
      for (uint32_t k = 0; k < 4; k++)
        if (place(store, k, p))
          memcpy(to->bytes[k] + at, place(store, k, p), mlfab__store_block_bytes(store, i, p));
    }
  }
  memcpy(to->windows, server->windows.windows, sizeof to->windows);
  for (uint32_t w = 0; w < SHARD_WORKERS; w++) to->pushed[w] = server->peers[w].pushed;
}

/* Has a slice changed from one picture to the other? */
static int differs(const picture *a, const picture *b, uint32_t i) {
  const mlfab__shard_slice *s = &a->slices[i], *t = &b->slices[i];
  for (uint32_t k = 0; k < 4; k++)
    if (memcmp(a->bytes[k] + s->offset, b->bytes[k] + s->offset, s->bytes)) return 1;
  return s->version != t->version || s->commit != t->commit ||
         memcmp(a->summed + s->first, b->summed + s->first, s->count);
}

static void reader_pin(reader *r, shard *s, const picture *before) {
  memset(&r->was, 0, sizeof *r - sizeof r->moment);
  if (before) r->before = *before;
  r->since = r->before.at;
  r->kind = MLFAB__IMAGE_KINDS;
  picture_take(&s->server, &r->was);
  assert_int_equal(mlfab__moment_pin(&r->moment, &s->env, &s->server, r->since), 0);
  assert_null(r->moment.window); /* the host's memory needs no copy */
  assert_int_equal(r->moment.at, r->was.at);
}

static void check_head(const reader *r, const shard *s, const mlfab__file_record *record) {
  mlfab__checkpoint_head head;
  assert_int_equal(mlfab__decode_checkpoint_head(record->meta, record->meta_bytes, &head), 0);
  assert_int_equal(head.number, r->was.at);
  assert_int_equal(head.server, s->server.number);
  assert_int_equal(head.servers, s->server.servers);
  assert_int_equal(head.workers, SHARD_WORKERS);
  assert_int_equal(head.slices, s->server.layout.nslices);
}

static void check_worker(const reader *r, const mlfab__file_record *record) {
  mlfab__checkpoint_worker worker;
  assert_int_equal(mlfab__decode_checkpoint_worker(record->meta, record->meta_bytes, &worker), 0);
  const mlfab__window *window = &r->was.windows[worker.worker];
  assert_int_equal(worker.pushed, r->was.pushed[worker.worker]);
  assert_int_equal(worker.top, window->top);
  assert_memory_equal(worker.applied, window->applied, sizeof worker.applied);
  assert_memory_equal(worker.dropped, window->dropped, sizeof worker.dropped);
}

/* All bytes of a kind that the moment left out: states that are not there, or missing sums. */
static void check_left_out(const reader *r, const shard *s, uint64_t from, uint64_t to) {
  const mlfab__store *store = &s->server.store;
  const mlfab__shard_slice *slice = &r->was.slices[r->slice];
  if (r->kind == MLFAB__IMAGE_STATE0 && !store->s0) return;
  if (r->kind == MLFAB__IMAGE_STATE1 && !store->s1) return;
  if (r->kind != MLFAB__IMAGE_SUM) assert_int_equal(from, to);
  for (; from < to; from += store->block_bytes)
    assert_false(r->was.summed[slice->first + from / store->block_bytes]);
}

static void check_rest(reader *r, const shard *s) {
  for (; r->kind < MLFAB__IMAGE_KINDS; r->kind++, r->offset = 0)
    check_left_out(r, s, r->offset, r->was.slices[r->slice].bytes);
}

static void check_slice(reader *r, const shard *s, const mlfab__file_record *record) {
  mlfab__checkpoint_slice slice;
  assert_int_equal(mlfab__decode_checkpoint_slice(record->meta, record->meta_bytes, &slice), 0);
  check_rest(r, s);
  r->slice = s->server.store.local[slice.slice];
  r->kind = 0;
  r->offset = 0;
  const mlfab__shard_slice *was = &r->was.slices[r->slice];
  assert_int_equal(slice.version, was->version);
  assert_int_equal(slice.commit, was->commit);
  assert_false(r->has[r->slice]);
  r->has[r->slice] = 1;
  r->slices++;
}

static void check_image(reader *r, const shard *s, const mlfab__file_record *record) {
  mlfab__checkpoint_bytes bytes;
  assert_int_equal(mlfab__decode_checkpoint_bytes(record->meta, record->meta_bytes, &bytes), 0);
  assert_int_equal(s->server.store.local[bytes.slice], r->slice);
  assert_int_equal(r->moment.cursor.slice, r->slice);
  const mlfab__shard_slice *was = &r->was.slices[r->slice];
  for (; r->kind < bytes.kind; r->kind++, r->offset = 0)
    check_left_out(r, s, r->offset, was->bytes);
  check_left_out(r, s, r->offset, bytes.offset);
  r->offset = bytes.offset + record->bulk_bytes;
  if (s->server.store.ghost) {
    assert_null(record->bulk);
    return;
  }
  const uint8_t *expected = r->was.bytes[bytes.kind] + was->offset + bytes.offset;
  assert_memory_equal(record->bulk, expected, record->bulk_bytes);
  assert_true(r->nlent < LENT);
  r->lent[r->nlent].at = record->bulk;
  r->lent[r->nlent].was = expected;
  r->lent[r->nlent].bytes = record->bulk_bytes;
  r->lent[r->nlent++].slice = r->slice;
}

/* Gives back the slices before `end`; what was lent of them is still as it was. */
static void reader_give(reader *r, uint32_t end) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < r->nlent; i++) {
    if (r->lent[i].slice >= end) r->lent[kept++] = r->lent[i];
    if (r->lent[i].slice < end)
      assert_memory_equal(r->lent[i].at, r->lent[i].was, r->lent[i].bytes);
  }
  r->nlent = kept;
  mlfab__moment_give(&r->moment, end);
}

static void check_end(reader *r, const shard *s, const mlfab__file_record *record) {
  mlfab__checkpoint_end end;
  assert_int_equal(mlfab__decode_checkpoint_end(record->meta, record->meta_bytes, &end), 0);
  assert_int_equal(end.records, r->records - 1);
  check_rest(r, s);
  assert_int_equal(r->moment.head.owned, r->slices);
  for (uint32_t i = 0; i < s->server.store.nslices; i++)
    if (r->since == 0 || differs(&r->before, &r->was, i)) assert_true(r->has[i]);
  r->ended = 1;
}

/* Reads a record; 0 behind the last. */
static int reader_read(reader *r, const shard *s) {
  static uint8_t meta[MLFAB__MOMENT_META];
  mlfab__file_record record;
  if (!mlfab__moment_next(&r->moment, meta, &record)) return 0;
  assert_false(r->ended);
  assert_int_equal(record.index, r->records++);
  assert_int_equal(record.index == 0, record.type == MLFAB__RECORD_HEAD);
  if (record.type == MLFAB__RECORD_HEAD) check_head(r, s, &record);
  if (record.type == MLFAB__RECORD_WORKER) check_worker(r, &record);
  if (record.type == MLFAB__RECORD_SLICE) check_slice(r, s, &record);
  if (record.type == MLFAB__RECORD_IMAGE) check_image(r, s, &record);
  if (record.type == MLFAB__RECORD_END) check_end(r, s, &record);
  return 1;
}

static uint64_t delta_slices, delta_all, deltas, whole, applied, rounds;

static void run(uint64_t seed) {
  static reader readers[MOMENTS];
  static picture last;
  mlfab__rng prng;
  shard_setting setting;
  mlfab__rng_seed(&prng, seed);
  shard_random_setting(&prng, &setting);
  shard *s = shard_new(&setting);
  shard_define(s, &setting);
  memset(readers, 0, sizeof readers);
  memset(&last, 0, sizeof last);
  for (int step = 0; step < 120; step++) {
    reader *r = &readers[mlfab__rng_below(&prng, MOMENTS)];
    if (mlfab__rng_below(&prng, 3) == 0) shard_step(s, &prng);
    if (!r->moment.pinned) {
      reader_pin(r, s, mlfab__rng_below(&prng, 3) ? &last : NULL);
      if (r->since > 0) {
        deltas++;
        delta_slices += r->moment.head.owned;
        delta_all += s->server.store.nslices;
      }
    }
    for (uint64_t n = mlfab__rng_below(&prng, 30); r->moment.pinned && n > 0; n--) {
      int more = reader_read(r, s);
      if (mlfab__rng_below(&prng, 4) == 0 && r->kind < MLFAB__IMAGE_KINDS) reader_give(r, r->slice);
      int stops = mlfab__rng_below(&prng, 400) == 0;
      if (more && !stops) continue;
      assert_true(stops || r->ended);
      assert_false(mlfab__moment_lost(&r->moment));
      whole += !more;
      if (!more) last = r->was;
      reader_give(r, s->server.store.nslices);
      mlfab__moment_unpin(&r->moment);
    }
  }
  for (int i = 0; i < MOMENTS; i++) mlfab__moment_free(&readers[i].moment);
  assert_null(s->server.store.holders);
  applied += s->stats.updates_applied;
  rounds += s->stats.rounds;
  shard_free(s);
}

TEST(test_moments) {
  for (uint64_t seed = 0; seed < test_cases(400); seed++) run(seed);
  assert_true(deltas > 0 && delta_slices < delta_all);
  if (test_scale() >= 1.0) assert_true(whole > 2000 && applied > 5000 && rounds > 1000);
}

static shard *with_model(uint32_t optimizer) {
  shard_setting setting = {.define = {.tensors = 1, .options = MLFAB_MODEL_OPTIONS_INIT},
                           .tensors = {{1, MLFAB_F32, 4096}},
                           .block_bytes = 256,
                           .chunk_bytes = 8192,
                           .servers = 1};
  setting.define.options.optimizer = optimizer;
  setting.define.options.slices = 4;
  setting.define.options.consistency.kind = MLFAB_SYNC_ASYNC;
  shard *s = shard_new(&setting);
  shard_define(s, &setting);
  return s;
}

/* An update of one slice is one slice of the next moment; without an update there is none. */
TEST(test_since) {
  static uint8_t meta[MLFAB_META_MAX], values[4096];
  shard *s = with_model(MLFAB_OPTIMIZER_ADAM);
  mlfab__moment moment = {0};
  const uint64_t version = UINT64_MAX;
  uint64_t since = 0;
  for (uint32_t i = 0; i < 8; i++) {
    const mlfab__shard_slice *slice = &s->server.store.slices[i % 4];
    const mlfab__segment segment = {slice->offset, slice->bytes};
    assert_int_equal(mlfab__moment_pin(&moment, &s->env, &s->server, since), 0);
    assert_int_equal(moment.head.owned, i == 0 ? 4 : 1);
    since = moment.at;
    mlfab__moment_unpin(&moment);
    assert_int_equal(mlfab__moment_pin(&moment, &s->env, &s->server, since), 0);
    assert_int_equal(moment.head.owned, 0);
    mlfab__moment_unpin(&moment);
    const mlfab__push p = {.seq = i + 1,
                           .members = 1,
                           .versions = 1,
                           .generation = s->generation[0],
                           .eager = 4096,
                           .bytes = 4096,
                           .progress = i,
                           .scale = 1.0,
                           .segments = 1};
    shard_frame(s, 0, MLFAB__PUSH, meta, mlfab__encode_push(meta, &p, &segment, &version), values,
                4096);
    assert_int_equal(s->acks, i + 1);
  }
  mlfab__moment_free(&moment);
  shard_free(s);
}

/* The k-th allocation fails, for every k: MEMORY, nothing is held, and the next attempt succeeds. */
TEST(test_memory) {
  shard *s = with_model(MLFAB_OPTIMIZER_ADAM);
  mlfab__moment moment = {0};
  int code = MLFAB_ERR_MEMORY;
  uint32_t fails = 0;
  for (uint64_t k = 1; code; k++) {
    s->fail_at = s->env.allocations + k;
    code = mlfab__moment_pin(&moment, &s->env, &s->server, 0);
    s->fail_at = 0;
    if (!code) break;
    fails++;
    assert_int_equal(code, MLFAB_ERR_MEMORY);
    assert_null(s->server.store.holders);
    for (uint32_t p = 0; p < s->server.store.positions; p++)
      assert_int_equal(s->server.store.blocks[s->server.store.w[p]].refs, 1);
    mlfab__moment_unpin(&moment);
    if (k % 2) mlfab__moment_free(&moment);
  }
  assert_true(fails >= 8); /* the blocks come in one area */
  mlfab__moment_free(&moment);
  shard_free(s);
}

/* No memory to copy a state: the moments that share it are lost, and no other; training goes on. */
TEST(test_lost) {
  shard *s = with_model(MLFAB_OPTIMIZER_MOMENTUM);
  mlfab__moment a = {0}, b = {0}, c = {0}, d = {0};
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 3);
  for (int i = 0; i < 5; i++) shard_push(s, &prng, 0);
  assert_int_equal(mlfab__moment_pin(&a, &s->env, &s->server, 0), 0);
  assert_int_equal(mlfab__moment_pin(&b, &s->env, &s->server, 0), 0);
  assert_int_equal(mlfab__moment_pin(&c, &s->env, &s->server, 0), 0);
  mlfab__moment_give(&c, 4);
  uint64_t acks = s->acks;
  s->fail_at = s->env.allocations + 1;
  for (int i = 0; i < 5; i++) shard_push(s, &prng, 0);
  assert_int_equal(s->acks, acks + 5);
  s->fail_at = 0;
  assert_true(mlfab__moment_lost(&a) && mlfab__moment_lost(&b) && !mlfab__moment_lost(&c));
  assert_int_equal(mlfab__moment_pin(&d, &s->env, &s->server, 0), 0);
  for (int i = 0; i < 5; i++) shard_push(s, &prng, 0);
  assert_false(mlfab__moment_lost(&d));
  mlfab__moment_unpin(&a);
  assert_int_equal(mlfab__moment_pin(&a, &s->env, &s->server, 0), 0);
  assert_false(mlfab__moment_lost(&a));
  mlfab__moment_free(&b);
  mlfab__moment_free(&d);
  mlfab__moment_free(&a);
  mlfab__moment_free(&c);
  shard_free(s);
}

TESTS(NULL, NULL)
