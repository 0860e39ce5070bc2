/* test_reshard_server.c - slices move from one server to another, frame by frame: all bytes arrive, and the
 * receiver refuses wrong frames. After a refused frame the link ends, and everything is sent again from the
 * first byte. */
#include "core/reshard/reshard.h"
#include "core/model/image.h"
#include "core/server/server.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { COUNT = 6000, SLICES = 4, BLOCK = 2048, CHUNK = 1024, ATTEMPT = 2, FRAMES = 128 };

typedef struct frame {
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  uint8_t meta[512], bulk[CHUNK];
} frame;

typedef struct side {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__server server;
  mlfab__moved moved; /* the last one */
  frame clocks[8];    /* for the other server */
  uint32_t ngates;
} side;

typedef struct fixture {
  side sides[2]; /* server 0, which leads, and server 1 */
  frame frames[FRAMES];
  uint32_t n;
} fixture;

static void post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self, (void)peer, (void)type, (void)meta, (void)bytes;
}
static void ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer;
  fail_msg("%d: %s", code, text);
}
static void across_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  side *s = self;
  if (type == MLFAB__MOVED) assert_int_equal(mlfab__decode_moved(meta, bytes, &s->moved), 0);
  if (type != MLFAB__RESHARD_SERVER_CLOCK || peer == s->server.number) return;
  assert_true(s->ngates < 8 && bytes <= sizeof s->clocks[0].meta);
  frame *f = &s->clocks[s->ngates++];
  f->type = type;
  f->meta_bytes = bytes;
  memcpy(f->meta, meta, bytes);
}

static int update(void *user, const mlfab_update_info *info, uint32_t tensor, int32_t dtype,
                  uint64_t offset, uint64_t count, void *weights, const void *change) {
  (void)user, (void)info, (void)tensor, (void)dtype, (void)offset, (void)count, (void)weights;
  return change == NULL;
}

/* Weights, states and (in every third block) a sum, each with its own bytes. */
static uint8_t byte_of(uint32_t kind, uint64_t offset) {
  return (uint8_t)(offset * 31 + kind * 101 + offset / 251);
}

static void open_side(side *s, uint32_t number, uint32_t rule, int own_rule) {
  mlfab__port port = {.self = s, .post = post, .ready = ready, .drop = drop};
  mlfab__hello h = {0, 1, MLFAB_ROLE_WORKER, 0, 0, 0, 0, 0};
  mlfab__define d = {.tensors = 1,
                     .options.slices = SLICES,
                     .options.active = 2,
                     .options.optimizer = rule,
                     .options.gamma = 0.9,
                     .options.adadelay_c = 1.0,
                     .options.beta1 = 0.9,
                     .options.beta2 = 0.999,
                     .options.epsilon = 1e-8};
  mlfab__tensor_info info = {0, MLFAB_F32, COUNT};
  uint8_t meta[256], table[MLFAB__TENSOR_INFO_BYTES];
  mlfab__hello_ack ack;
  d.options.gamma = 0.5;
  d.options.beta1 = d.options.beta2 = 0.9;
  d.options.epsilon = 1e-8;
  d.options.consistency.kind = MLFAB_SYNC_BSP;
  assert_int_equal(mlfab__env_init(&s->env, NULL), 0);
  mlfab_config_init(&s->config);
  s->config.servers = 2;
  s->config.workers = 1;
  s->config.block_bytes = BLOCK;
  s->config.chunk_bytes = CHUNK;
  s->config.model_max_bytes = 1 << 20;
  if (own_rule) s->config.on_update = update;
  assert_int_equal(mlfab__server_init(&s->server, &s->env, &s->config, number, &port, &s->stats),
                   0);
  mlfab__reshard_server_init(&s->server);
  s->server.move.across =
      (mlfab__port){.self = s, .post = across_post, .ready = ready, .drop = drop};
  assert_int_equal(mlfab__server_hello(&s->server, 0, &h, &ack, 1000), 0);
  mlfab__encode_tensor_info(table, &info);
  mlfab__frame_in in = {MLFAB__DEFINE, mlfab__encode_define(meta, &d), sizeof table, meta, table};
  mlfab__server_frame(&s->server, 0, &in, 1000);
  assert_int_equal(s->server.phase, MLFAB__MODEL_STANDS);
}

static uint8_t *data_at(const mlfab__store *store, uint32_t kind, uint32_t position) {
  if (kind == MLFAB__IMAGE_STATE0) return store->s0 ? store->s0[position] : NULL;
  if (kind == MLFAB__IMAGE_STATE1) return store->s1 ? store->s1[position] : NULL;
  uint32_t block = kind == MLFAB__IMAGE_SUM ? store->sum[position] : store->w[position];
  return block == MLFAB__NO_BLOCK ? NULL : store->blocks[block].data;
}

/* Calls `each` for every block of every kind that the server has. */
static uint32_t visit(mlfab__server *server,
                      void (*each)(uint8_t *data, uint32_t kind, uint64_t offset, uint64_t n)) {
  const mlfab__store *store = &server->store;
  uint32_t sums = 0;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    for (uint64_t at = 0; at < s->bytes; at += BLOCK) {
      for (uint32_t kind = 0; kind <= MLFAB__IMAGE_SUM; kind++) {
        uint8_t *data = data_at(store, kind, s->first + (uint32_t)(at / BLOCK));
        if (data) each(data, kind, s->offset + at, mlfab__min(s->bytes - at, BLOCK));
        sums += kind == MLFAB__IMAGE_SUM && data;
      }
    }
  }
  return sums;
}

static void fill(uint8_t *data, uint32_t kind, uint64_t offset, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) data[i] = byte_of(kind, offset + i);
}
static void compare(uint8_t *data, uint32_t kind, uint64_t offset, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) assert_int_equal(data[i], byte_of(kind, offset + i));
}

static void make_sums(mlfab__server *server) {
  mlfab__store *store = &server->store;
  for (uint32_t i = 0; i < store->nslices; i++) {
    for (uint32_t p = 0; p < store->slices[i].count; p++) {
      if ((i + p) % 3 != 1) continue;
      if (store->free_count == 0) assert_int_equal(mlfab__store_grow(server->env, store), 0);
      store->sum[store->slices[i].first + p] = mlfab__store_take(store);
    }
  }
}

static int move(side *s, uint32_t step, uint32_t attempt) {
  uint32_t owners[SLICES] = {1, 1, 1, 1};
  uint8_t meta[256];
  mlfab__move m = {attempt, step, step == MLFAB__MOVE_PREPARE ? SLICES : 0};
  mlfab__frame_in in = {MLFAB__MOVE, mlfab__encode_move(meta, &m, owners), 0, meta, NULL};
  int code = mlfab__reshard_server_move(&s->server, &in, 1000);
  mlfab__reshard_server_check(&s->server);
  return code;
}

static int to_one(fixture *f, const frame *one) {
  mlfab__frame_in in = {one->type, one->meta_bytes, one->bulk_bytes, one->meta,
                        one->bulk_bytes ? one->bulk : NULL};
  return mlfab__reshard_server_frame(&f->sides[1].server, 0, &in);
}

/* Both servers are ready to move the whole model to server 1, and server 1 knows server 0's clock. */
static void open_with(fixture *f, uint32_t rule, int own_rule) {
  memset(f, 0, sizeof *f);
  for (uint32_t i = 0; i < 2; i++) {
    side *s = &f->sides[i];
    open_side(s, i, rule, own_rule && i == 1);
    if (!own_rule) make_sums(&s->server);
    visit(&s->server, fill);
    assert_int_equal(move(s, MLFAB__MOVE_PREPARE, ATTEMPT), 0);
    assert_int_equal(s->moved.step, MLFAB__MOVE_PREPARE);
    assert_int_equal(s->moved.code, 0);
    s->ngates = 0;
    assert_int_equal(move(s, MLFAB__MOVE_SEND, ATTEMPT), 0);
  }
  for (;;) {
    frame *one = &f->frames[f->n];
    mlfab__frame_out out = {.meta = one->meta};
    if (!mlfab__reshard_server_next(&f->sides[0].server, 1, &out)) break;
    assert_true(++f->n < FRAMES && out.bulk_bytes <= CHUNK);
    one->type = out.type;
    one->meta_bytes = out.meta_bytes;
    one->bulk_bytes = out.bulk_bytes;
    memcpy(one->bulk, out.bulk, out.bulk_bytes);
    mlfab__reshard_server_taken(&f->sides[0].server, 1, &out);
  }
  assert_int_equal(f->sides[0].ngates, 1);
}

static void open_both(fixture *f, int own_rule) { open_with(f, MLFAB_OPTIMIZER_ADAM, own_rule); }

static void close_both(fixture *f) {
  for (uint32_t i = 0; i < 2; i++) {
    mlfab__server_free(&f->sides[i].server);
    assert_int_equal(f->sides[i].env.bytes, 0);
  }
}

/* Everything from the first byte; then the move takes effect. */
static void complete(fixture *f) {
  side *to = &f->sides[1];
  for (uint32_t i = 0; i < f->n; i++) {
    assert_int_equal(to_one(f, &f->frames[i]), 0);
    mlfab__reshard_server_check(&to->server);
    assert_int_equal(to->moved.step, i + 1 < f->n ? MLFAB__MOVE_PREPARE : MLFAB__MOVE_SEND);
  }
  assert_int_equal(to->moved.code, 0);
  assert_int_equal(move(to, MLFAB__MOVE_INSTALL, ATTEMPT), 0);
  assert_int_equal(to->moved.step, MLFAB__MOVE_INSTALL);
  assert_int_equal(to->server.epoch, ATTEMPT);
  assert_int_equal(to->server.store.nslices, SLICES);
  assert_int_equal(to->stats.slices_moved, SLICES / 2);
  assert_int_equal(visit(&to->server, compare), 4);
}

/* With rules that have no state, one and two. */
static void test_all_arrives(void **state) {
  static const struct {
    uint32_t rule, frames;
  } rules[] = {
      {MLFAB_OPTIMIZER_SGD, 16}, {MLFAB_OPTIMIZER_MOMENTUM, 28}, {MLFAB_OPTIMIZER_ADAM, 40}};
  static fixture f;
  (void)state;
  for (uint32_t i = 0; i < MLFAB__COUNT(rules); i++) {
    open_with(&f, rules[i].rule, 0);
    assert_int_equal(f.n, rules[i].frames);
    assert_int_equal(to_one(&f, f.sides[0].clocks), 0);
    assert_int_equal(to_one(&f, f.sides[0].clocks), 0); /* a repetition changes nothing */
    complete(&f);
    assert_int_equal(to_one(&f, &f.frames[0]), 0); /* of an attempt that has ended */
    close_both(&f);
  }
}

/* --- refused bytes --- */

enum wrong {
  TRUNCATED,
  NO_SUCH_SLICE,
  KEPT_SLICE,
  NO_SUCH_KIND,
  NO_SUCH_CLOCK,
  NO_BYTES,
  GHOSTS,
  GAP,
  NEXT_KIND,
  KIND_BEFORE,
  TOO_FAR,
  TOO_LONG,
  LAST_TOO_EARLY,
  WRONGS
};

/* Sends the next frame with one error in it. Returns the code, or 1 when the frame cannot have that error. */
static int send_wrong(fixture *f, const frame *right, enum wrong wrong) {
  frame bad = *right;
  mlfab__reshard_server_bytes head;
  const mlfab__layout *layout = &f->sides[1].server.layout;
  assert_int_equal(mlfab__decode_reshard_server_bytes(right->meta, right->meta_bytes, &head), 0);
  const mlfab__slice *slice = &layout->slices[head.slice];
  uint32_t kept = 0;
  while (layout->slices[kept].server != 1) kept++;
  if (wrong == NO_SUCH_SLICE) head.slice = SLICES;
  if (wrong == KEPT_SLICE) head.slice = kept;
  if (wrong == NO_SUCH_KIND) head.kind = MLFAB__IMAGE_SUM + 1;
  if (wrong == NO_SUCH_CLOCK) head.clock++;
  if (wrong == NO_BYTES) bad.bulk_bytes = 0;
  if (wrong == GAP) {
    if (head.kind == MLFAB__IMAGE_SUM || head.offset + 4 + bad.bulk_bytes > slice->bytes) return 1;
    head.offset += 4;
  }
  if (wrong == NEXT_KIND) {
    if (head.kind == MLFAB__IMAGE_SUM || (head.kind > 0 && head.offset == 0)) return 1;
    head.kind++;
    head.offset = 0;
  }
  if (wrong == KIND_BEFORE) {
    if (head.kind == 0 || head.offset == 0) return 1;
    head.kind--;
  }
  if (wrong == TOO_FAR) {
    if (head.kind != MLFAB__IMAGE_SUM) return 1;
    head.offset = slice->bytes + BLOCK;
  }
  if (wrong == TOO_LONG) {
    if (head.kind != MLFAB__IMAGE_SUM) return 1;
    head.offset = slice->bytes - bad.bulk_bytes + 4;
  }
  if (wrong == LAST_TOO_EARLY) {
    if (head.last || head.kind >= MLFAB__IMAGE_STATE1) return 1;
    head.last = 1;
  }
  bad.meta_bytes = mlfab__encode_reshard_server_bytes(bad.meta, &head);
  if (wrong == TRUNCATED) bad.meta_bytes--;
  if (wrong != GHOSTS) return to_one(f, &bad);
  mlfab__frame_in in = {bad.type, bad.meta_bytes, bad.bulk_bytes, bad.meta, NULL};
  return mlfab__reshard_server_frame(&f->sides[1].server, 0, &in);
}

/* Replaces each frame by a wrong one: nothing of it is kept, and the repeated attempt succeeds. */
static void test_wrong_bytes(void **state) {
  static fixture f;
  uint32_t tried[WRONGS] = {0};
  (void)state;
  for (uint32_t wrong = 0; wrong < WRONGS; wrong++) {
    for (uint32_t at = 0; at < f.n || at == 0; at++) {
      open_both(&f, 0);
      assert_int_equal(to_one(&f, f.sides[0].clocks), 0);
      for (uint32_t i = 0; i < at; i++) assert_int_equal(to_one(&f, &f.frames[i]), 0);
      int code = send_wrong(&f, &f.frames[at], (enum wrong)wrong);
      if (code != 1 && code != MLFAB_ERR_FRAME) fail_msg("wrong %u at %u: %d", wrong, at, code);
      tried[wrong] += code != 1;
      complete(&f);
      close_both(&f);
    }
    if (!tried[wrong]) fail_msg("wrong %u was never tried", wrong);
  }
}

/* A server whose callback applies updates has no states, and a server without a clock for the slices
 * refuses them. */
static void test_states_of_another_rule(void **state) {
  static fixture f;
  (void)state;
  open_both(&f, 1);
  assert_int_equal(to_one(&f, &f.frames[0]), MLFAB_ERR_FRAME);
  assert_int_equal(to_one(&f, f.sides[0].clocks), 0);
  for (uint32_t i = 0;; i++) {
    mlfab__reshard_server_bytes head;
    assert_int_equal(
        mlfab__decode_reshard_server_bytes(f.frames[i].meta, f.frames[i].meta_bytes, &head), 0);
    assert_int_equal(to_one(&f, &f.frames[i]), head.kind ? MLFAB_ERR_FRAME : 0);
    if (head.kind) break;
  }
  close_both(&f);
}

static void test_wrong_clocks(void **state) {
  static fixture f;
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX] = {0};
  mlfab__reshard_server_clock right, bad;
  (void)state;
  open_both(&f, 0);
  frame *clock = &f.sides[0].clocks[0], other = *clock;
  assert_int_equal(
      mlfab__decode_reshard_server_clock(clock->meta, clock->meta_bytes, &right, words), 0);
  other.meta_bytes--;
  assert_int_equal(to_one(&f, &other), MLFAB_ERR_FRAME);
  bad = right;
  bad.clock = MLFAB__CLOCKS;
  other.meta_bytes = mlfab__encode_reshard_server_clock(other.meta, &bad, words);
  assert_int_equal(to_one(&f, &other), MLFAB_ERR_FRAME);
  bad = right;
  bad.words++;
  other.meta_bytes = mlfab__encode_reshard_server_clock(other.meta, &bad, words);
  assert_int_equal(to_one(&f, &other), MLFAB_ERR_FRAME);
  bad = right;
  bad.consistency.kind = 99;
  other.meta_bytes = mlfab__encode_reshard_server_clock(other.meta, &bad, words);
  assert_int_equal(to_one(&f, &other), MLFAB_ERR_FRAME);
  bad = right;
  bad.attempt++; /* another attempt: ignored */
  other.meta_bytes = mlfab__encode_reshard_server_clock(other.meta, &bad, words);
  assert_int_equal(to_one(&f, &other), 0);
  assert_int_equal(to_one(&f, &f.frames[0]), MLFAB_ERR_FRAME); /* it has no clock */
  other.type = MLFAB__HEARTBEAT;
  assert_int_equal(to_one(&f, &other), MLFAB_ERR_FRAME);
  assert_int_equal(to_one(&f, clock), 0);
  complete(&f);
  close_both(&f);
}

/* --- messages of server 0 and of others --- */

static int move_as(side *s, const mlfab__move *m, const uint32_t *owners, uint32_t less) {
  uint8_t meta[256];
  mlfab__frame_in in = {MLFAB__MOVE, mlfab__encode_move(meta, m, owners) - less, 0, meta, NULL};
  return mlfab__reshard_server_move(&s->server, &in, 1000);
}

static int told(side *s, uint32_t from, uint32_t server, uint32_t attempt, uint32_t less) {
  mlfab__moved m = {.attempt = attempt, .step = MLFAB__MOVE_ABORT, .server = server};
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  mlfab__frame_in in = {MLFAB__MOVED, mlfab__encode_moved(meta, &m) - less, 0, meta, NULL};
  return mlfab__reshard_server_told(&s->server, from, &in);
}

static void test_wrong_words(void **state) {
  static fixture f;
  static const uint32_t good[SLICES + 1] = {1, 1, 1, 1, 1}, bad[SLICES] = {1, 1, 1, 2};
  side *s = &f.sides[1];
  (void)state;
  open_both(&f, 0);
  assert_int_equal(move_as(s, &(mlfab__move){0, MLFAB__MOVE_ABORT, 0}, good, 0), MLFAB_ERR_FRAME);
  assert_int_equal(move_as(s, &(mlfab__move){9, MLFAB__MOVE_ABORT, 0}, good, 1), MLFAB_ERR_FRAME);
  assert_int_equal(move_as(s, &(mlfab__move){9, MLFAB__MOVE_PREPARE, SLICES}, bad, 0),
                   MLFAB_ERR_FRAME);
  assert_int_equal(move_as(s, &(mlfab__move){9, MLFAB__MOVE_PREPARE, SLICES - 1}, good, 0),
                   MLFAB_ERR_FRAME);
  assert_int_equal(move_as(s, &(mlfab__move){9, MLFAB__MOVE_PREPARE, SLICES + 1}, good, 0),
                   MLFAB_ERR_FRAME);
  assert_int_equal(move_as(s, &(mlfab__move){9, 77, 0}, good, 0), MLFAB_ERR_FRAME);
  /* not everything has arrived */
  assert_int_equal(move(s, MLFAB__MOVE_INSTALL, ATTEMPT), MLFAB_ERR_FRAME);
  assert_int_equal(told(s, 0, 0, ATTEMPT, 0), MLFAB_ERR_FRAME);
  assert_int_equal(told(s, 1, 0, ATTEMPT, 0), MLFAB_ERR_FRAME);
  assert_int_equal(told(s, 1, 1, 0, 0), MLFAB_ERR_FRAME);
  assert_int_equal(told(s, 1, 1, ATTEMPT, 1), MLFAB_ERR_FRAME);
  assert_int_equal(told(s, 1, 1, ATTEMPT, 0), 0); /* server 0 leads: others cannot decide */
  assert_int_equal(to_one(&f, f.sides[0].clocks), 0);
  complete(&f);
  close_both(&f);
}

/* After an abort everything is as before, and the next attempt succeeds. */
static void test_abort(void **state) {
  static fixture f;
  side *s = &f.sides[1];
  (void)state;
  open_both(&f, 0);
  assert_int_equal(to_one(&f, f.sides[0].clocks), 0);
  for (uint32_t i = 0; i < f.n; i++) assert_int_equal(to_one(&f, &f.frames[i]), 0);
  assert_int_equal(move(s, MLFAB__MOVE_ABORT, ATTEMPT), 0);
  assert_int_equal(s->moved.step, MLFAB__MOVE_ABORT);
  assert_int_equal(s->server.move.held, 0);
  assert_int_equal(s->server.epoch, 1);
  assert_int_equal(s->server.store.nslices, SLICES / 2);
  visit(&s->server, compare);
  s->moved.step = 0;
  assert_int_equal(move(s, MLFAB__MOVE_SEND, ATTEMPT), 0); /* late: the answer is repeated */
  assert_int_equal(s->moved.step, MLFAB__MOVE_ABORT);
  assert_int_equal(move(s, MLFAB__MOVE_INSTALL, ATTEMPT + 1), 0); /* an unknown attempt */
  assert_int_equal(s->moved.code, MLFAB_ERR_STATE);
  assert_int_equal(move(s, MLFAB__MOVE_PREPARE, ATTEMPT + 2), 0);
  assert_int_equal(s->moved.attempt, ATTEMPT + 2);
  assert_int_equal(s->moved.code, 0);
  assert_int_equal(s->server.move.held, 1);
  close_both(&f);
}

/* --- a server that joins: ADOPT --- */

/* A server without a model, of three. */
static void open_bare(side *s) {
  mlfab__port port = {.self = s, .post = post, .ready = ready, .drop = drop};
  mlfab__hello h = {0, 1, MLFAB_ROLE_WORKER, 0, 0, 0, 0, 0};
  mlfab__hello_ack ack;
  memset(s, 0, sizeof *s);
  assert_int_equal(mlfab__env_init(&s->env, NULL), 0);
  mlfab_config_init(&s->config);
  s->config.servers = 3;
  s->config.workers = 2;
  s->config.block_bytes = BLOCK;
  s->config.chunk_bytes = CHUNK;
  s->config.model_max_bytes = 1 << 20;
  assert_int_equal(mlfab__server_init(&s->server, &s->env, &s->config, 1, &port, &s->stats), 0);
  mlfab__reshard_server_init(&s->server);
  s->server.move.across =
      (mlfab__port){.self = s, .post = across_post, .ready = ready, .drop = drop};
  assert_int_equal(mlfab__server_hello(&s->server, 0, &h, &ack, 1000), 0);
}

static int adopt(side *s, mlfab__adopt a, const uint32_t *words, uint32_t bulk_bytes) {
  static uint8_t meta[MLFAB_META_MAX];
  mlfab__tensor_info info = {0, MLFAB_F32, COUNT};
  uint8_t table[2 * MLFAB__TENSOR_INFO_BYTES] = {0};
  mlfab__encode_tensor_info(table, &info);
  mlfab__frame_in in = {MLFAB__ADOPT, mlfab__encode_adopt(meta, &a, words), bulk_bytes, meta,
                        table};
  return mlfab__reshard_server_adopt(&s->server, &in, 2000);
}

static void test_adopt(void **state) {
  static side bare;
  side *s = &bare;
  uint32_t words[SLICES + 2] = {0}, own[SLICES + 2] = {1}, beyond[SLICES + 2] = {3};
  const uint32_t bytes = MLFAB__TENSOR_INFO_BYTES;
  mlfab__adopt good = {.attempt = ATTEMPT,
                       .slices = SLICES,
                       .restored = 7,
                       .tensors = 1,
                       .options.slices = SLICES,
                       .options.active = 1,
                       .options.gamma = 0.5,
                       .options.adadelay_c = 1.0,
                       .options.beta1 = 0.9,
                       .options.beta2 = 0.9,
                       .options.epsilon = 1e-8,
                       .options.consistency.kind = MLFAB_SYNC_BSP,
                       .words = SLICES + 1};
  (void)state;
  open_bare(s);
  words[SLICES] = 2; /* worker 1 counts, worker 0 does not */
  for (int k = 0; k < 7; k++) {
    mlfab__adopt bad = good;
    if (k == 0) bad.attempt = 0;
    if (k == 1) bad.slices = 0;
    if (k == 2) bad.words = SLICES;
    if (k == 3) bad.words = SLICES + 2;
    if (k == 4) bad.slices = SLICES + 1;
    const uint32_t *list = k == 5 ? own : k == 6 ? beyond : words;
    assert_int_equal(adopt(s, bad, list, bytes), MLFAB_ERR_FRAME);
  }
  assert_int_equal(adopt(s, good, words, 2 * bytes), MLFAB_ERR_FRAME);
  assert_int_equal(s->server.phase, MLFAB__NO_MODEL);
  assert_int_equal(s->moved.attempt, 0);
  /* What it cannot do, it says. */
  good.packets = 1;
  assert_int_equal(adopt(s, good, words, bytes), 0);
  assert_true(s->moved.attempt == ATTEMPT && s->moved.code == MLFAB_ERR_UNSUPPORTED);
  assert_int_equal(s->moved.step, MLFAB__MOVE_PREPARE);
  assert_int_equal(s->server.phase, MLFAB__NO_MODEL);
  good.packets = 0;
  good.attempt++;
  assert_int_equal(adopt(s, good, words, bytes), 0);
  assert_int_equal(s->server.phase, MLFAB__MODEL_STANDS);
  assert_int_equal(s->server.store.nslices, 0);
  assert_int_equal(s->server.layout.nslices, SLICES);
  assert_true(s->server.save.restored == 7);
  assert_true(s->server.peers[0].guest && !s->server.peers[1].guest);
  /* A server that has lost server 0 asks about a move of which this one knows nothing: it cannot say that it has failed. */
  mlfab__moved ask = {.attempt = ATTEMPT + 5, .step = MLFAB__MOVE_SEND, .server = 2};
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  mlfab__frame_in in = {MLFAB__MOVED, mlfab__encode_moved(meta, &ask), 0, meta, NULL};
  assert_int_equal(mlfab__reshard_server_told(&s->server, 2, &in), 0);
  assert_true(s->moved.attempt == ATTEMPT + 5 && s->moved.step == MLFAB__MOVE_PREPARE);
  /* The move that it was told of: it prepares, once. */
  static const uint32_t to[SLICES] = {1, 1, 1, 1};
  assert_int_equal(move_as(s, &(mlfab__move){ATTEMPT + 1, MLFAB__MOVE_PREPARE, SLICES}, to, 0), 0);
  mlfab__reshard_server_check(&s->server);
  assert_true(s->moved.attempt == ATTEMPT + 1 && s->moved.code == 0);
  assert_int_equal(adopt(s, good, words, bytes), 0); /* repeated on another link */
  assert_int_equal(s->server.move.held, 1);
  mlfab__server_free(&s->server);
  assert_int_equal(s->env.bytes, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_all_arrives),
      cmocka_unit_test(test_wrong_bytes),
      cmocka_unit_test(test_states_of_another_rule),
      cmocka_unit_test(test_wrong_clocks),
      cmocka_unit_test(test_wrong_words),
      cmocka_unit_test(test_abort),
      cmocka_unit_test(test_adopt),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
