/* test_collect.c - a copy of a server: moments of a random server, all of it and what has changed since, give the copy
 * its whole state, byte by byte; streams that are cut or wrong change nothing; and the copy goes on as the server would. */
#include "core/checkpoint/collect.h"
#include "core/checkpoint/moment.h"
#include "scale.h"
#include "shards.h"

enum { RECORDS = 8192 };

/* A stream, as it would travel. */
typedef struct stream {
  mlfab__file_record records[RECORDS];
  uint32_t n;
} stream;

static void stream_free(stream *s) {
  for (uint32_t i = 0; i < s->n; i++) {
    free((void *)(uintptr_t)s->records[i].meta);
    free((void *)(uintptr_t)s->records[i].bulk);
  }
  s->n = 0;
}

static const void *copy_of(const void *from, size_t bytes) {
  uint8_t *to = malloc(bytes + 1);
  assert_non_null(to);
  memcpy(to, from, bytes);
  return to;
}

/* All records of the server's moment; the number of that moment. */
static uint64_t stream_make(stream *to, shard *from, mlfab__moment *moment, uint64_t since) {
  static uint8_t meta[MLFAB__MOMENT_META];
  mlfab__file_record record;
  moment->complete = 1;
  assert_int_equal(mlfab__moment_pin(moment, &from->env, &from->server, since), 0);
  for (to->n = 0; mlfab__moment_next(moment, meta, &record); to->n++) {
    assert_true(to->n < RECORDS);
    record.set = moment->at * 7;
    record.meta = copy_of(record.meta, record.meta_bytes);
    if (record.bulk) record.bulk = copy_of(record.bulk, record.bulk_bytes);
    to->records[to->n] = record;
  }
  uint64_t at = moment->at;
  mlfab__moment_unpin(moment);
  return at;
}

/* Gives the copy the first n records: the last result. */
static int feed(mlfab__collect *collect, shard *b, const stream *from, uint32_t n, uint64_t since,
                mlfab_error *error) {
  int code = 0;
  mlfab__collect_begin(collect, &b->env, &b->server, since);
  for (uint32_t i = 0; i < n && code == 0; i++)
    code = mlfab__collect_take(collect, &from->records[i], error);
  return code;
}

/* --- whole states --- */

typedef struct picture {
  int phase;
  mlfab__checkpoint_slice slices[64];
  uint8_t bytes[4][SHARD_MODEL], summed[64];
  mlfab__window windows[SHARD_WORKERS];
  uint64_t pushed[SHARD_WORKERS], decided[SHARD_WORKERS], changed[SHARD_WORKERS];
  uint32_t contributed[SHARD_WORKERS], flags[SHARD_WORKERS], incarnation[SHARD_WORKERS];
  double significance[SHARD_WORKERS];
  mlfab__reshard_server_clock clocks[MLFAB__CLOCKS];
  uint32_t ngates, epoch, nslices;
  uint64_t bytes_here;
} picture;

static const uint8_t *place(const mlfab__store *store, uint32_t kind, uint32_t p) {
  if (kind == MLFAB__IMAGE_STATE0) return store->s0 ? store->s0[p] : NULL;
  if (kind == MLFAB__IMAGE_STATE1) return store->s1 ? store->s1[p] : NULL;
  uint32_t block = kind == MLFAB__IMAGE_SUM ? store->sum[p] : store->w[p];
  return block == MLFAB__NO_BLOCK ? NULL : store->blocks[block].data;
}

static void picture_slices(const mlfab__store *store, picture *to) {
  assert_true(store->nslices <= 64);
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    to->slices[i] = (mlfab__checkpoint_slice){s->number, s->clock, s->version, s->commit};
    for (uint32_t p = s->first; p < s->first + s->count; p++) {
      uint64_t at = s->offset + (uint64_t)(p - s->first) * store->block_bytes;
      to->summed[i] |= store->sum[p] != MLFAB__NO_BLOCK;
      for (uint32_t k = 0; k < 4; k++)
        if (place(store, k, p))
          memcpy(to->bytes[k] + at, place(store, k, p), mlfab__store_block_bytes(store, i, p));
    }
  }
}

static void picture_take(const mlfab__server *server, picture *to) {
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  memset(to, 0, sizeof *to);
  to->phase = (int)server->phase;
  picture_slices(&server->store, to);
  memcpy(to->windows, server->windows.windows, sizeof to->windows);
  for (uint32_t w = 0; w < SHARD_WORKERS; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    to->pushed[w] = peer->pushed;
    to->decided[w] = peer->decided;
    to->changed[w] = peer->changed;
    to->contributed[w] = peer->contributed;
    to->incarnation[w] = peer->incarnation;
    to->significance[w] = peer->significance;
    to->flags[w] = (uint32_t)(peer->dead | peer->left << 1 | peer->done << 2 | peer->absent << 3 |
                              peer->guest << 4);
  }
  for (uint32_t g = 0; g < server->ngates; g++)
    if (server->clocks[g].used) mlfab__clock_told(server, g, &to->clocks[g], words);
  to->ngates = server->ngates;
  to->epoch = server->epoch;
  to->nslices = server->layout.nslices;
}

#define SAME(member) assert_memory_equal(&a->member, &b->member, sizeof a->member)
static void same_pictures(const picture *a, const picture *b) {
  assert_int_equal(a->phase, b->phase);
  assert_int_equal(a->ngates, b->ngates);
  assert_int_equal(a->epoch, b->epoch);
  assert_int_equal(a->nslices, b->nslices);
  SAME(slices);
  for (uint32_t k = 0; k < 4; k++) SAME(bytes[k]);
  SAME(summed);
  SAME(windows);
  SAME(pushed);
  SAME(decided);
  SAME(changed);
  SAME(contributed);
  SAME(flags);
  SAME(incarnation);
  SAME(significance);
  SAME(clocks);
}

static void same_servers(const shard *a, const shard *b) {
  static picture x, y;
  picture_take(&a->server, &x);
  picture_take(&b->server, &y);
  same_pictures(&x, &y);
}

/* --- streams that must not be taken --- */

static int of_sum(const mlfab__file_record *r) {
  mlfab__checkpoint_bytes bytes;
  if (r->type != MLFAB__RECORD_IMAGE) return 0;
  assert_int_equal(mlfab__decode_checkpoint_bytes(r->meta, r->meta_bytes, &bytes), 0);
  return bytes.kind == MLFAB__IMAGE_SUM;
}

/* Makes one record wrong in a way that no later record can mend; 0: this record cannot be wrong like that. */
static int spoil(stream *s, mlfab__rng *prng, uint32_t i) {
  mlfab__file_record *r = &s->records[i], keep = *r;
  switch (mlfab__rng_below(prng, 8)) {
    case 0:
      r->index++;
      return 1;
    case 1:
      if (i == 0) return 0;
      r->set++;
      return 1;
    case 2:
      r->type = (uint16_t)(r->type + 1);
      return 1;
    case 3:
      r->meta_bytes--;
      return 1;
    case 4: /* a sum may have gaps */
      if (r->bulk_bytes == 0 || of_sum(r)) return 0;
      r->bulk_bytes--;
      return 1;
    case 5: /* it is missing */
      memmove(r, r + 1, (s->n - i - 1) * sizeof *r);
      s->records[--s->n] = keep;
      return i < s->n;
    case 6: /* it comes twice */
      if (i + 1 == s->n) return 0;
      s->records[i + 1] = keep;
      return 1;
    default:
      if (r->bulk_bytes == 0) return 0;
      if (r->bulk && r->type == MLFAB__RECORD_IMAGE) { /* as of a ghost */
        r->bulk = NULL;
        return 1;
      }
      return 0;
  }
}

static uint64_t spoilt, cuts;

/* A wrong stream is refused, and the copy stays as it was. */
static void wrong_stream(mlfab__collect *collect, shard *b, stream *good, uint64_t since,
                         mlfab__rng *prng) {
  static picture before, after;
  static stream bad;
  mlfab_error error;
  picture_take(&b->server, &before);
  bad = *good;
  uint32_t i = (uint32_t)mlfab__rng_below(prng, bad.n);
  error.text[0] = 0;
  if (spoil(&bad, prng, i)) {
    int code = feed(collect, b, &bad, bad.n, since, &error);
    if (code >= 0) fail_msg("record %u of %u, type %u: %d", i, bad.n, good->records[i].type, code);
    assert_true(error.text[0] != 0);
    assert_int_equal(mlfab__collect_take(collect, &good->records[0], &error), MLFAB_ERR_STATE);
    spoilt++;
  } else {
    i = (uint32_t)mlfab__rng_below(prng, good->n);
    assert_int_equal(feed(collect, b, good, i, since, &error), 0);
    if (mlfab__rng_below(prng, 2)) mlfab__collect_void(collect);
    cuts++;
  }
  mlfab__collect_void(collect);
  picture_take(&b->server, &after);
  same_pictures(&before, &after);
}

/* Bytes of a meta change: it may be refused or not. */
static void noise(mlfab__collect *collect, shard *b, stream *good, uint64_t since,
                  mlfab__rng *prng) {
  mlfab_error error;
  uint32_t i = (uint32_t)mlfab__rng_below(prng, good->n);
  uint8_t *at = (uint8_t *)(uintptr_t)good->records[i].meta +
                mlfab__rng_below(prng, good->records[i].meta_bytes);
  uint8_t bits = (uint8_t)(1u << mlfab__rng_below(prng, 8));
  *at ^= bits;
  feed(collect, b, good, good->n, since, &error);
  mlfab__collect_void(collect);
  *at ^= bits;
}

/* --- a server and its copy --- */

static uint64_t applied, rounds, deltas, clocks, ghosts, tagged, open;

/* The copy serves from now on; both get the same. */
static void promote(shard *a, shard *b, mlfab__rng *prng) {
  /* What waits at the server is not the copy's: workers send it again. */
  for (uint32_t w = 0; w < SHARD_WORKERS; w++) mlfab__apply_reset(&a->server, w);
  for (uint32_t w = 0; w < SHARD_WORKERS; w++) {
    b->asks[w] = a->asks[w];
    if (a->server.peers[w].left || a->server.peers[w].dead) continue;
    shard_hello(a, w, a->incarnation[w]);
    shard_hello(b, w, a->incarnation[w]);
    assert_int_equal(a->seq[w], b->seq[w]);
  }
  for (int step = 0; step < 40; step++) {
    mlfab__rng same = *prng;
    shard_step(a, prng);
    shard_step(b, &same);
    uint64_t x = a->acks, y = b->acks;
    assert_true(x >= y || y > 0);
    if (step % 5 == 0) same_servers(a, b);
  }
  same_servers(a, b);
}

/* Members come and go. */
static void people(shard *a, mlfab__rng *prng) {
  uint32_t w = 1 + (uint32_t)mlfab__rng_below(prng, SHARD_WORKERS - 1);
  if (mlfab__rng_below(prng, 12)) return;
  if (a->server.peers[w].dead)
    shard_hello(a, w, a->incarnation[w] + (uint32_t)mlfab__rng_below(prng, 2));
  else
    mlfab__server_gone(&a->server, w, 0, 1000);
}

static void run(uint64_t seed) {
  static stream s;
  mlfab__rng prng;
  shard_setting setting;
  mlfab_error error;
  mlfab__moment moment = {0};
  mlfab__collect collect = {0};
  uint64_t since = 0;
  mlfab__rng_seed(&prng, seed);
  shard_random_setting(&prng, &setting);
  shard *a = shard_new(&setting);
  if (mlfab__rng_below(&prng, 4) == 0) setting.block_bytes = 64u << mlfab__rng_below(&prng, 6);
  shard *b = shard_new(&setting);
  shard_define(a, &setting);
  for (int round = 0; round < 12; round++) {
    for (uint64_t n = mlfab__rng_below(&prng, 8); n > 0; n--) {
      people(a, &prng);
      shard_step(a, &prng);
    }
    if (mlfab__rng_below(&prng, 6) == 0) since = 0;
    deltas += since > 0;
    uint64_t at = stream_make(&s, a, &moment, since);
    for (int i = 0; i < 3; i++) wrong_stream(&collect, b, &s, since, &prng);
    noise(&collect, b, &s, since, &prng);
    int code = feed(&collect, b, &s, s.n, since, &error);
    if (code != 1) fail_msg("%d %s", code, error.text);
    mlfab__collect_install(&collect);
    same_servers(a, b);
    stream_free(&s);
    since = at;
    for (uint32_t i = 0; i < a->server.store.positions; i++)
      open += a->server.store.sum[i] != MLFAB__NO_BLOCK;
  }
  clocks += a->server.ngates > 1;
  ghosts += (uint64_t)a->server.store.ghost;
  tagged += a->server.store.tags != NULL;
  mlfab__collect_free(&collect);
  mlfab__moment_free(&moment);
  /* The sign of a zero depends on which blocks of a sum are missing. */
  if (a->config.block_bytes == b->config.block_bytes) promote(a, b, &prng);
  applied += b->stats.updates_applied;
  rounds += b->stats.rounds;
  shard_free(a);
  shard_free(b);
}

static void test_copies(void **state) {
  (void)state;
  for (uint64_t seed = 0; seed < test_cases(300); seed++) run(seed);
  if (test_scale() < 1.0) return;
  assert_true(spoilt > 3000 && cuts > 1000 && deltas > 1000);
  assert_true(applied > 3000 && rounds > 500 && open > 1000);
  assert_true(clocks > 20 && ghosts > 3 && tagged > 30);
}

static shard_setting small_setting(void) {
  shard_setting setting = {.define = {.tensors = 1, .options = MLFAB_MODEL_OPTIONS_INIT},
                           .tensors = {{1, MLFAB_F32, 4096}},
                           .block_bytes = 256,
                           .chunk_bytes = 8192,
                           .servers = 1};
  setting.define.options.optimizer = MLFAB_OPTIMIZER_ADAM;
  setting.define.options.slices = 4;
  return setting;
}

static void expect(shard *b, mlfab__collect *collect, stream *s, uint64_t since, int code,
                   const char *text) {
  mlfab_error error;
  assert_int_equal(feed(collect, b, s, s->n, since, &error), code);
  if (!strstr(error.text, text)) fail_msg("'%s' has no '%s'", error.text, text);
}

/* What another server, fabric or model says. */
static void test_others(void **state) {
  (void)state;
  static stream s, t;
  mlfab__moment moment = {0}, other = {0};
  mlfab__collect collect = {0};
  mlfab_error error;
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 1);
  shard_setting setting = small_setting();
  shard *a = shard_new(&setting), *b = shard_new(&setting);
  shard_define(a, &setting);
  uint64_t at = stream_make(&s, a, &moment, 0);
  assert_int_equal(feed(&collect, b, &s, s.n, 0, &error), 1);
  mlfab__collect_install(&collect);
  /* Another definition. */
  for (int kind = 0; kind < 4; kind++) {
    shard_setting changed = setting;
    if (kind == 0) changed.tensors[0].count = 5000;
    if (kind == 1) changed.define.options.beta1 = 0.5;
    if (kind == 2) changed.servers = 2;
    if (kind == 3) changed.define.options.slices = 2;
    shard *c = shard_new(&changed);
    shard_define(c, &changed);
    stream_make(&t, c, &other, 0);
    mlfab__moment_free(&other);
    static const char *texts[] = {"tensor number 0", "options of its model", "server 0 of 2",
                                  "options of its model"};
    static const int codes[] = {MLFAB_ERR_MODEL, MLFAB_ERR_CONFIG, MLFAB_ERR_CONFIG,
                                MLFAB_ERR_CONFIG};
    expect(b, &collect, &t, 0, codes[kind], texts[kind]);
    stream_free(&t);
    shard_free(c);
  }
  /* Another moment, an older layout, a model that has gone on by itself. */
  shard_push(a, &prng, 0);
  stream_make(&t, a, &moment, at);
  expect(b, &collect, &t, at + 1, MLFAB_ERR_STATE, "another moment");
  b->server.epoch = 2;
  expect(b, &collect, &t, at, MLFAB_ERR_STATE, "epoch 1 of the layout; epoch 2 is here");
  expect(b, &collect, &s, 0, MLFAB_ERR_STATE, "epoch 1 of the layout");
  b->server.epoch = 1;
  mlfab__store_change(&b->server.store, 0);
  expect(b, &collect, &t, at, MLFAB_ERR_STATE, "another moment");
  expect(b, &collect, &t, 0, MLFAB_ERR_CHECKPOINT, "is missing");
  assert_int_equal(feed(&collect, b, &s, s.n, 0, &error), 1);
  mlfab__collect_install(&collect);
  assert_int_equal(feed(&collect, b, &t, t.n, at, &error), 1);
  mlfab__collect_install(&collect);
  same_servers(a, b);
  stream_free(&s);
  stream_free(&t);
  mlfab__collect_free(&collect);
  mlfab__moment_free(&moment);
  shard_free(a);
  shard_free(b);
}

/* The k-th allocation fails, for every k: MEMORY, and nothing has changed; a stream then succeeds. */
static void test_memory(void **state) {
  (void)state;
  static stream s;
  static picture before, after;
  mlfab__moment moment = {0};
  mlfab__collect collect = {0};
  mlfab_error error;
  uint32_t fails = 0;
  shard_setting setting = small_setting();
  shard *a = shard_new(&setting), *b = shard_new(&setting);
  shard_define(a, &setting);
  picture_take(&b->server, &before);
  stream_make(&s, a, &moment, 0);
  for (uint64_t k = 1;; k++) {
    b->fail_at = b->env.allocations + k;
    int code = feed(&collect, b, &s, s.n, 0, &error);
    b->fail_at = 0;
    if (code == 1) break;
    assert_int_equal(code, MLFAB_ERR_MEMORY);
    picture_take(&b->server, &after);
    same_pictures(&before, &after);
    if (k % 3 == 0) mlfab__collect_free(&collect);
    fails++;
  }
  assert_true(fails > 20);
  mlfab__collect_install(&collect);
  same_servers(a, b);
  /* The second time needs nothing. */
  uint64_t allocations = b->env.allocations;
  assert_int_equal(feed(&collect, b, &s, s.n, 0, &error), 1);
  mlfab__collect_install(&collect);
  assert_int_equal(feed(&collect, b, &s, s.n, 0, &error), 1);
  mlfab__collect_install(&collect);
  assert_int_equal(b->env.allocations, allocations);
  /* A copy that holds a moment of its own. */
  mlfab__moment own = {0};
  static uint8_t meta[MLFAB__MOMENT_META];
  mlfab__file_record record;
  assert_int_equal(mlfab__moment_pin(&own, &b->env, &b->server, 0), 0);
  for (int i = 0; i < 3; i++) {
    assert_int_equal(feed(&collect, b, &s, s.n, 0, &error), 1);
    mlfab__collect_install(&collect);
  }
  while (mlfab__moment_next(&own, meta, &record)) continue;
  assert_int_equal(mlfab__moment_restart(&own), 0);
  assert_true(mlfab__moment_next(&own, meta, &record));
  assert_int_equal(record.type, MLFAB__RECORD_HEAD);
  mlfab__moment_give(&own, 1);
  assert_int_equal(mlfab__moment_restart(&own), MLFAB_ERR_STATE);
  mlfab__moment_free(&own);
  stream_free(&s);
  mlfab__collect_free(&collect);
  mlfab__moment_free(&moment);
  shard_free(a);
  shard_free(b);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_copies),
      cmocka_unit_test(test_others),
      cmocka_unit_test(test_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
