/* test_server.c - the server role alone: its answers to workers whose links break at bad moments. */
#include "core/sched/client.h"
#include "core/sparse/sparse_apply.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* A model of more bytes than are applied in one step, so that events can occur between steps. */
enum { COUNT = 3 << 20, BYTES = COUNT * 4, CHUNK = 1 << 20 };

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__server server;
  mlfab__push_ack ack; /* the last one */
  uint32_t acks, drops;
  mlfab__define_ack defined[3]; /* per worker, the last one */
  mlfab__waiting waiting[3];    /* per worker, the last one */
  uint64_t granted[3];          /* per worker, the last one */
} fixture;

static void port_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  fixture *f = self;
  if (type == MLFAB__DEFINE_ACK)
    assert_int_equal(mlfab__decode_define_ack(meta, bytes, &f->defined[peer]), 0);
  if (type == MLFAB__WAITING)
    assert_int_equal(mlfab__decode_waiting(meta, bytes, &f->waiting[peer]), 0);
  if (type == MLFAB__GRANT) {
    mlfab__grant grant;
    assert_int_equal(mlfab__decode_grant(meta, bytes, &grant), 0);
    f->granted[peer] = grant.upto;
  }
  if (type != MLFAB__PUSH_ACK) return;
  assert_int_equal(mlfab__decode_push_ack(meta, bytes, &f->ack), 0);
  f->acks++;
}
static void port_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void port_drop(void *self, uint32_t peer, int code, const char *text) {
  fixture *f = self;
  (void)peer, (void)code, (void)text;
  f->drops++;
}
static void port_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void port_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static void frame_of(fixture *f, uint32_t worker, uint8_t type, const uint8_t *meta, uint32_t bytes,
                     const void *bulk, uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, meta, bulk};
  mlfab__server_frame(&f->server, worker, &in, 1000);
}

static void frame(fixture *f, uint8_t type, const uint8_t *meta, uint32_t bytes, const void *bulk,
                  uint32_t bulk_bytes) {
  frame_of(f, 0, type, meta, bytes, bulk, bulk_bytes);
}

static mlfab__hello_ack hello_of(fixture *f, uint32_t worker, uint32_t incarnation) {
  mlfab__hello h = {worker, incarnation, MLFAB_ROLE_WORKER, 0, 0, 0, 0, 0};
  mlfab__hello_ack ack;
  assert_int_equal(mlfab__server_hello(&f->server, worker, &h, &ack, 1000), 0);
  return ack;
}

static mlfab__hello_ack hello(fixture *f, uint32_t incarnation) {
  return hello_of(f, 0, incarnation);
}

static void define_as(fixture *f, uint32_t worker, const mlfab__define *define) {
  uint8_t meta[256], table[MLFAB__TENSOR_INFO_BYTES];
  mlfab__tensor_info info = {0, MLFAB_F32, COUNT};
  mlfab__encode_tensor_info(table, &info);
  mlfab__frame_in in = {MLFAB__DEFINE, mlfab__encode_define(meta, define), sizeof table, meta,
                        table};
  mlfab__server_frame(&f->server, worker, &in, 1000);
}

static void define(fixture *f, const mlfab__define *define, uint32_t id, uint64_t count) {
  uint8_t meta[256], table[MLFAB__TENSOR_INFO_BYTES];
  mlfab__tensor_info info = {id, MLFAB_F32, count};
  mlfab__encode_tensor_info(table, &info);
  frame(f, MLFAB__DEFINE, meta, mlfab__encode_define(meta, define), table, sizeof table);
}

static int open_servers(void **state, uint32_t workers) {
  static fixture f;
  mlfab__port port = {&f, port_post, port_ready, port_drop, port_detach, port_event};
  memset(&f, 0, sizeof f);
  assert_int_equal(mlfab__env_init(&f.env, NULL), 0);
  mlfab_config_init(&f.config);
  f.config.servers = 1;
  f.config.workers = workers;
  f.config.block_bytes = f.config.chunk_bytes = CHUNK;
  f.config.eager_bytes = 65536;
  f.config.heartbeat_ns = 500000000;
  f.config.model_max_bytes = 1 << 30;
  assert_int_equal(mlfab__server_init(&f.server, &f.env, &f.config, 0, &port, &f.stats), 0);
  assert_int_equal(mlfab__client_init(&f.server), 0);
  mlfab__sparse_attach(&f.server);
  *state = &f;
  return 0;
}

static int open_server(void **state) { return open_servers(state, 1); }
static int open_three(void **state) { return open_servers(state, 3); }

static int close_server(void **state) {
  fixture *f = *state;
  mlfab__server_free(&f->server);
  assert_int_equal(f->env.bytes, 0);
  return 0;
}

/* Sends all bytes of update `seq` under a generation; the server then applies it in several steps. */
static void push_whole(fixture *f, uint64_t seq, uint32_t generation) {
  static float ones[CHUNK / 4];
  uint8_t meta[512];
  mlfab__segment segment = {0, BYTES};
  uint64_t version = 0;
  mlfab__push p;
  for (uint32_t i = 0; i < CHUNK / 4; i++) ones[i] = 1.0f;
  memset(&p, 0, sizeof p);
  p.seq = seq;
  p.members = p.segments = p.versions = 1;
  p.generation = generation;
  p.bytes = BYTES;
  p.scale = 1.0;
  frame(f, MLFAB__PUSH, meta, mlfab__encode_push(meta, &p, &segment, &version), NULL, 0);
  for (uint64_t at = 0; at < BYTES; at += CHUNK) {
    mlfab__chunk chunk = {seq, at, generation};
    frame(f, MLFAB__CHUNK, meta, mlfab__encode_chunk(meta, &chunk), ones, CHUNK);
  }
  assert_int_equal(f->server.apply.applying, MLFAB__APPLY_UPDATE);
}

static void start(fixture *f, mlfab__hello_ack *ack) {
  mlfab__define d;
  memset(&d, 0, sizeof d);
  d.tensors = 1;
  d.options.optimizer = MLFAB_OPTIMIZER_MOMENTUM;
  d.options.gamma = 0.9, d.options.adadelay_c = 1.0, d.options.beta1 = 0.9, d.options.beta2 = 0.999,
  d.options.epsilon = 1e-8;
  d.options.gamma = 0.5;
  hello(f, 1);
  define(f, &d, 0, COUNT);
  *ack = hello(f, 1);
  assert_int_equal(f->server.phase, MLFAB__MODEL_STANDS);
}

/* The link breaks while an update is applied: the answer to the next HELLO says that it is applied.
 * Otherwise a worker that has withdrawn the update would push it again. */
static void test_reconnect_while_applying(void **state) {
  fixture *f = *state;
  mlfab__hello_ack ack;
  start(f, &ack);
  push_whole(f, 7, ack.generation);
  mlfab__server_lost(&f->server, 0, 1000);
  ack = hello(f, 1);
  assert_int_equal(ack.top, 7);
  assert_int_equal(ack.applied[0] & 1, 1);
  assert_int_equal(f->stats.updates_applied, 1);
}

/* A new process takes the rank while the old one's update is applied: its numbers start again, and its
 * updates are applied. */
static void test_new_process_while_applying(void **state) {
  fixture *f = *state;
  mlfab__hello_ack ack;
  start(f, &ack);
  push_whole(f, 7, ack.generation);
  mlfab__server_lost(&f->server, 0, 1000);
  ack = hello(f, 2);
  assert_int_equal(ack.top, 0);
  while (f->server.apply.applying) mlfab__server_tick(&f->server, 2000);
  assert_int_equal(f->server.windows.windows[0].top, 0);
  push_whole(f, 1, ack.generation);
  while (f->server.apply.applying) mlfab__server_tick(&f->server, 3000);
  assert_int_equal(f->ack.seq, 1);
  assert_int_equal(f->ack.code, 0);
  assert_int_equal(f->stats.updates_applied, 2);
}

/* Worker 0 gives up before its first weights have arrived, and starts again with another model: the second
 * one counts. */
static void test_other_model_again(void **state) {
  fixture *f = *state;
  mlfab__define d;
  memset(&d, 0, sizeof d);
  d.tensors = d.first_weights = 1;
  hello(f, 1);
  define(f, &d, 0, COUNT);
  assert_int_equal(f->server.phase, MLFAB__MODEL_DEFINED);
  define(f, &d, 5, 1000);
  assert_int_equal(f->server.layout.bytes, 4000);
  assert_int_equal(f->server.layout.tensors[0].id, 5);
  d.first_weights = 0;
  define(f, &d, 5, 2000);
  assert_int_equal(f->server.layout.bytes, 8000);
  assert_int_equal(f->server.phase, MLFAB__MODEL_STANDS);
}

static void say_push_of(fixture *f, uint32_t worker, uint64_t seq, uint64_t progress,
                        uint32_t eager, uint64_t bytes, uint32_t generation, const void *bulk,
                        uint32_t bulk_bytes) {
  uint8_t meta[512];
  mlfab__segment segment = {0, bytes};
  uint64_t version = 0;
  mlfab__push p;
  memset(&p, 0, sizeof p);
  p.seq = seq;
  p.members = p.segments = p.versions = 1;
  p.generation = generation;
  p.progress = progress;
  p.eager = eager;
  p.bytes = bytes;
  p.scale = 1.0;
  frame_of(f, worker, MLFAB__PUSH, meta, mlfab__encode_push(meta, &p, &segment, &version), bulk,
           bulk_bytes);
}

static void say_push(fixture *f, uint64_t seq, uint64_t progress, uint32_t eager, uint64_t bytes,
                     uint32_t generation, const void *bulk, uint32_t bulk_bytes) {
  say_push_of(f, 0, seq, progress, eager, bytes, generation, bulk, bulk_bytes);
}

static void say_chunk(fixture *f, uint32_t worker, uint64_t seq, uint64_t at, uint32_t generation,
                      uint32_t bytes) {
  static uint8_t zeros[CHUNK];
  uint8_t meta[64];
  mlfab__chunk chunk = {seq, at, generation};
  frame_of(f, worker, MLFAB__CHUNK, meta, mlfab__encode_chunk(meta, &chunk), zeros, bytes);
}

/* The next update is granted when no more than two chunks of earlier grants are outstanding: of the update
 * that is applied, and of eager bytes of those behind it. */
static void test_released_when_little_comes(void **state) {
  enum { SMALL = 4096, EAGER = 65536, MOST = 1 << 20 };
  static uint8_t zeros[EAGER];
  fixture *f = *state;
  mlfab__define d;
  memset(&d, 0, sizeof d);
  d.tensors = 1;
  f->config.chunk_bytes = SMALL;
  for (uint32_t w = 0; w < 3; w++) {
    hello_of(f, w, 1);
    define_as(f, w, &d);
  }
  assert_int_equal(f->server.phase, MLFAB__MODEL_STANDS);
  uint32_t generation = hello_of(f, 0, 1).generation;
  hello_of(f, 1, 1);
  say_push_of(f, 0, 1, 0, 64, MOST, generation, zeros, 64);
  assert_true(f->granted[0] == MOST); /* it is the head */
  say_push_of(f, 1, 1, 0, EAGER, MOST, generation, zeros, EAGER - 2 * SMALL);
  uint64_t at = 64;
  for (; at + 3 * SMALL < MOST; at += SMALL) say_chunk(f, 0, 1, at, generation, SMALL);
  assert_int_equal(f->granted[1], 0);
  say_chunk(f, 0, 1, at, generation, (uint32_t)(MOST - 2 * SMALL - at));
  assert_int_equal(f->granted[1], 0); /* two chunks of each are outstanding */
  say_chunk(f, 1, 1, EAGER - 2 * SMALL, generation, SMALL);
  assert_int_equal(f->granted[1], 0);
  say_chunk(f, 1, 1, EAGER - SMALL, generation, SMALL - 64);
  assert_int_equal(f->granted[1], 0);
  say_chunk(f, 1, 1, EAGER - 64, generation, 64);
  assert_int_equal(f->granted[1], MOST);
  assert_int_equal(f->drops, 0);
}

/* A ghost model has no memory for bytes, and a real one cannot apply ghosts: in both cases the server
 * closes the sender's link. */
static void test_ghosts_and_bytes(void **state) {
  static uint8_t bytes[4096];
  fixture *f = *state;
  mlfab__define d;
  memset(&d, 0, sizeof d);
  d.tensors = d.options.ghost = 1;
  hello(f, 1);
  define(f, &d, 0, COUNT);
  mlfab__hello_ack ack = hello(f, 1);
  say_push(f, 1, 0, 4096, 8192, ack.generation, bytes, 4096);
  assert_int_equal(f->drops, 1);
  ack = hello(f, 1);
  say_push(f, 2, 0, 4096, 8192, ack.generation, NULL, 4096);
  assert_int_equal(f->drops, 1);
  uint8_t meta[64];
  mlfab__chunk chunk = {2, 4096, ack.generation};
  frame(f, MLFAB__CHUNK, meta, mlfab__encode_chunk(meta, &chunk), bytes, 4096);
  assert_int_equal(f->drops, 2);
}

static void test_ghosts_for_real(void **state) {
  fixture *f = *state;
  mlfab__hello_ack ack;
  start(f, &ack);
  say_push(f, 1, 0, 4096, 8192, ack.generation, NULL, 4096);
  assert_int_equal(f->drops, 1);
}

/* A worker's progress increases: the server closes the link of one whose progress decreases. It may
 * increase by more than one, when this server had no part of some updates, or another server has moved the
 * worker on. */
static void test_progress_back(void **state) {
  static uint8_t bytes[65536];
  fixture *f = *state;
  mlfab__define d;
  memset(&d, 0, sizeof d);
  d.tensors = 1;
  d.options.consistency.kind = MLFAB_SYNC_BSP;
  hello(f, 1);
  define(f, &d, 0, COUNT);
  mlfab__hello_ack ack = hello(f, 1);
  say_push(f, 1, 5, 64, 128, ack.generation, bytes, 64);
  assert_int_equal(f->drops, 0);
  say_push(f, 2, 4, 64, 64, ack.generation, bytes, 64);
  assert_int_equal(f->drops, 1);
  say_push(f, 2, 99, 64, 64, ack.generation, bytes, 64);
  assert_int_equal(f->drops, 1);
  assert_int_equal(f->server.peers[0].pushed, 5); /* the first one is undecided */
  /* Undecided updates keep their own numbers. */
  mlfab__progress told = {99};
  uint8_t meta[16];
  frame(f, MLFAB__PROGRESS, meta, mlfab__encode_progress(meta, &told), NULL, 0);
  assert_int_equal(f->server.peers[0].pushed, 99);
  assert_int_equal(f->server.queue.first->push.progress, 99);
  assert_int_equal(f->server.queue.first->next->push.progress, 100);
  say_push(f, 3, MLFAB__PROGRESS_MAX + 1, 64, 64, ack.generation, bytes, 64);
  assert_int_equal(f->drops, 2);
}

/* PROGRESS about updates without a part for this server advances V_train, by any amount at once; a smaller
 * value undoes nothing. The same when all leave, the one that is ahead first. */
static void test_progress_told(void **state) {
  fixture *f = *state;
  mlfab__define d;
  uint8_t meta[16];
  memset(&d, 0, sizeof d);
  d.tensors = 1;
  d.options.consistency.kind = MLFAB_SYNC_BSP;
  for (uint32_t w = 0; w < 3; w++) {
    mlfab__hello h = {.node = w, .incarnation = 1, .roles = MLFAB_ROLE_WORKER};
    mlfab__hello_ack ack;
    assert_int_equal(mlfab__server_hello(&f->server, w, &h, &ack, 1000), 0);
    define_as(f, w, &d);
  }
  for (uint32_t w = 0; w < 3; w++) {
    mlfab__progress told[2] = {{((uint64_t)1 << 40) + w * 1000000}, {7}};
    for (uint32_t i = 0; i < 2; i++) {
      mlfab__frame_in in = {MLFAB__PROGRESS, mlfab__encode_progress(meta, &told[i]), 0, meta, NULL};
      mlfab__server_frame(&f->server, w, &in, 1000);
      assert_true(f->server.peers[w].pushed == told[0].progress);
    }
    assert_true(f->server.clocks[0].v_train == (w < 2 ? 0 : (uint64_t)1 << 40));
  }
  mlfab__progress wrong = {MLFAB__PROGRESS_MAX + 1};
  frame(f, MLFAB__PROGRESS, meta, mlfab__encode_progress(meta, &wrong), NULL, 0);
  assert_int_equal(f->drops, 1);
  for (uint32_t w = 3; w-- > 0;) mlfab__server_gone(&f->server, w, 1, 2000);
  assert_true(f->server.clocks[0].v_train == ((uint64_t)1 << 40) + 2000000);
  assert_true(f->stats.rounds < 10);
}

static void say_progress(fixture *f, uint32_t worker, uint64_t progress) {
  mlfab__progress told = {progress};
  uint8_t meta[16];
  mlfab__frame_in in = {MLFAB__PROGRESS, mlfab__encode_progress(meta, &told), 0, meta, NULL};
  mlfab__server_frame(&f->server, worker, &in, 1000);
}

/* Compares the tally that a clock's conditions use with a literal count. */
static void same_state(fixture *f) {
  for (uint32_t g = 0; g < f->server.ngates; g++) {
    const mlfab__clock *clock = &f->server.clocks[g];
    mlfab_sync_state want, state;
    memset(&want, 0, sizeof want);
    uint64_t slowest = UINT64_MAX;
    for (uint32_t w = 0; w < f->server.workers; w++) {
      const mlfab__server_peer *peer = &f->server.peers[w];
      if (peer->dead || peer->left || peer->done || peer->guest) continue;
      want.members++;
      want.arrived += peer->pushed > clock->v_train;
      want.fastest = want.fastest > peer->pushed ? want.fastest : peer->pushed;
      slowest = slowest < peer->pushed ? slowest : peer->pushed;
    }
    want.slowest = want.members > 0 ? slowest : 0;
    mlfab__clock_state(&f->server, clock, 0, 0, &state);
    assert_int_equal(state.members, want.members);
    assert_int_equal(state.arrived, want.arrived);
    assert_int_equal(state.fastest, want.fastest);
    assert_int_equal(state.slowest, want.slowest);
  }
}

/* Workers join, leave, advance and change the model in any order: the tally equals the count. */
static void test_tally(void **state) {
  static const uint32_t kinds[] = {MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP,
                                   MLFAB_SYNC_DROP};
  fixture *f = *state;
  mlfab__rng rng;
  mlfab__define d;
  uint32_t incarnation[3] = {1, 1, 1};
  mlfab__rng_seed(&rng, 1);
  memset(&d, 0, sizeof d);
  d.tensors = 1;
  d.options.consistency.kind = MLFAB_SYNC_SSP;
  for (uint32_t w = 0; w < 3; w++) {
    hello_of(f, w, 1);
    define_as(f, w, &d);
  }
  assert_int_equal(f->server.phase, MLFAB__MODEL_STANDS);
  for (int round = 0; round < 20000; round++) {
    uint32_t w = (uint32_t)mlfab__rng_below(&rng, 3);
    mlfab__server_peer *peer = &f->server.peers[w];
    uint64_t dice = mlfab__rng_below(&rng, 20);
    mlfab__sync_ask change;
    uint8_t meta[256];
    if (dice < 14) {
      if (!peer->dead && !peer->left) say_progress(f, w, peer->pushed + mlfab__rng_below(&rng, 3));
    } else if (dice < 16) {
      mlfab__server_gone(&f->server, w, dice == 14, 1000);
    } else if (dice < 19) {
      incarnation[w] += (uint32_t)mlfab__rng_below(&rng, 2);
      hello_of(f, w, incarnation[w]);
      define_as(f, w, &d);
    } else if (!peer->dead && !peer->left) {
      memset(&change, 0, sizeof change);
      change.ask = (uint64_t)round + 1;
      change.tensor = MLFAB_ALL;
      change.consistency.kind = kinds[mlfab__rng_below(&rng, 4)];
      change.consistency.need = 2;
      frame_of(f, w, MLFAB__SYNC, meta, mlfab__encode_sync_ask(meta, &change), NULL, 0);
    }
    same_state(f);
  }
  assert_true(f->stats.rounds > 1000);
}

/* One of three pushes closes a round, and one worker is far ahead: V_train jumps instead of counting up. */
static void test_one_far_ahead(void **state) {
  fixture *f = *state;
  mlfab__define d;
  mlfab__push p;
  mlfab__sync_ask change;
  uint64_t version = 0;
  uint8_t meta[256];
  mlfab__hello_ack ack;
  memset(&d, 0, sizeof d);
  memset(&p, 0, sizeof p);
  memset(&change, 0, sizeof change);
  d.tensors = 1;
  for (uint32_t w = 3; w-- > 0;) {
    mlfab__hello h = {.node = w, .incarnation = 1, .roles = MLFAB_ROLE_WORKER};
    assert_int_equal(mlfab__server_hello(&f->server, w, &h, &ack, 1000), 0);
    define_as(f, w, &d);
  }
  p.seq = p.members = p.versions = 1;
  p.progress = 2000000;
  p.scale = 1.0;
  p.generation = ack.generation; /* worker 0's generation */
  frame(f, MLFAB__PUSH, meta, mlfab__encode_push(meta, &p, NULL, &version), NULL, 0);
  assert_int_equal(f->acks, 1);
  change.ask = 1;
  change.tensor = MLFAB_ALL;
  change.consistency.kind = MLFAB_SYNC_DROP;
  change.consistency.need = 1;
  frame(f, MLFAB__SYNC, meta, mlfab__encode_sync_ask(meta, &change), NULL, 0);
  assert_int_equal(f->server.clocks[0].sync.kind, MLFAB_SYNC_DROP);
  assert_int_equal(f->server.clocks[0].v_train, 2000001);
  assert_true(f->stats.rounds < 10);
}

/* Two of three pushes close a round. The former process's decided updates count for the open round, but not
 * for later rounds that it had pushed into (with another model). The new process is past those rounds
 * because it was dropped from them at another server. */
static void test_new_process_in_round(void **state) {
  fixture *f = *state;
  mlfab__define d;
  mlfab__push p;
  uint64_t version = 0;
  uint8_t meta[256];
  mlfab__hello_ack ack;
  memset(&d, 0, sizeof d);
  memset(&p, 0, sizeof p);
  d.tensors = 1;
  d.options.consistency.kind = MLFAB_SYNC_DROP;
  d.options.consistency.need = 2;
  for (uint32_t w = 3; w-- > 0;) {
    mlfab__hello h = {.node = w, .incarnation = 1, .roles = MLFAB_ROLE_WORKER};
    assert_int_equal(mlfab__server_hello(&f->server, w, &h, &ack, 1000), 0);
    define_as(f, w, &d);
  }
  f->server.peers[2].pushed = f->server.peers[2].decided = 4;
  mlfab__clock_members(&f->server);
  mlfab__hello again = {.node = 2, .incarnation = 2, .roles = MLFAB_ROLE_WORKER};
  mlfab__hello_ack other;
  assert_int_equal(mlfab__server_hello(&f->server, 2, &again, &other, 1000), 0);
  say_progress(f, 2, 2);
  for (uint64_t seq = 1; seq <= 2; seq++) {
    p.seq = seq;
    p.progress = seq - 1;
    p.members = p.versions = 1;
    p.scale = 1.0;
    p.generation = ack.generation; /* worker 0's generation */
    mlfab__frame_in in = {MLFAB__PUSH, mlfab__encode_push(meta, &p, NULL, &version), 0, meta, NULL};
    mlfab__server_frame(&f->server, 0, &in, 1000);
    assert_int_equal(f->acks, seq);
    while (f->server.apply.applying) mlfab__server_tick(&f->server, 2000);
    assert_int_equal(f->server.clocks[0].v_train, 1);
  }
}

/* A worker rejoins while a round that closed without it is applied: its pushes go into the next round, and
 * it is told so, so its pulls wait for that round. */
static void test_rejoin_while_round_is_applied(void **state) {
  fixture *f = *state;
  mlfab__define d;
  memset(&d, 0, sizeof d);
  d.tensors = 1;
  d.options.optimizer = MLFAB_OPTIMIZER_MOMENTUM;
  d.options.gamma = 0.9, d.options.adadelay_c = 1.0, d.options.beta1 = 0.9, d.options.beta2 = 0.999,
  d.options.epsilon = 1e-8;
  d.options.consistency.kind = MLFAB_SYNC_BSP;
  hello(f, 1);
  define(f, &d, 0, COUNT);
  mlfab__hello_ack ack = hello(f, 1);
  assert_int_equal(ack.v_train, 0);
  f->server.apply.applying = MLFAB__APPLY_ROUND;
  f->server.clocks[0].contributors = 1;
  f->server.apply.slice = f->server.apply.position = 0;
  for (uint32_t p = 0; p < f->server.store.positions; p++) {
    f->server.store.sum[p] = mlfab__store_take(&f->server.store);
    memset(f->server.store.blocks[f->server.store.sum[p]].data, 0, f->server.store.block_bytes);
  }
  ack = hello(f, 1);
  assert_int_equal(f->server.apply.applying, MLFAB__APPLY_ROUND);
  assert_int_equal(ack.v_train, 1);
  while (f->server.apply.applying) mlfab__server_tick(&f->server, 2000);
  ack = hello(f, 1);
  assert_int_equal(ack.v_train, 1);
}

/* Workers that wait for worker 0's definition are told once that it was refused, and why, also those that
 * come later; bytes of first weights already on their way are no violation. */
static void test_refusal_reaches_all(void **state) {
  fixture *f = *state;
  uint8_t meta[512];
  mlfab__hello_ack ack;
  mlfab__segment segment = {0, BYTES};
  uint64_t version = 0;
  mlfab__define d;
  mlfab__push p;
  memset(&d, 0, sizeof d);
  memset(&p, 0, sizeof p);
  d.tensors = d.first_weights = 1;
  d.options.consistency.kind = MLFAB_SYNC_USER; /* there are no conditions */
  for (uint32_t w = 0; w < 3; w++) {
    mlfab__hello h = {.node = w, .incarnation = 1, .roles = MLFAB_ROLE_WORKER};
    assert_int_equal(mlfab__server_hello(&f->server, w, &h, &ack, 1000), 0);
  }
  define_as(f, 1, &d);
  assert_int_equal(f->waiting[1].kind, MLFAB__REQUEST_MODEL);
  assert_string_equal(f->waiting[1].text, ", which has not defined the model at server 0");
  define_as(f, 0, &d);
  for (uint32_t w = 0; w < 2; w++) assert_int_equal(f->defined[w].code, MLFAB_ERR_UNSUPPORTED);
  assert_non_null(strstr(f->defined[0].text, "not supported: MLFAB_SYNC_USER at server 0"));
  assert_non_null(strstr(f->defined[1].text, "worker 0's model: not supported: MLFAB_SYNC_USER"));
  define_as(f, 2, &d);
  assert_int_equal(f->defined[2].code, MLFAB_ERR_UNSUPPORTED);
  assert_int_equal(f->waiting[2].kind, 0);
  define_as(f, 2, &d);
  assert_int_equal(f->waiting[2].kind, MLFAB__REQUEST_MODEL);
  p.seq = p.members = p.segments = p.versions = 1;
  p.flags = MLFAB__PUSH_INIT;
  p.generation = ack.generation;
  p.bytes = BYTES;
  p.scale = 1.0;
  frame(f, MLFAB__PUSH, meta, mlfab__encode_push(meta, &p, &segment, &version), NULL, 0);
  d.options.consistency.kind = MLFAB_SYNC_BSP;
  d.first_weights = 0;
  assert_int_equal(f->drops, 0);
  define_as(f, 0, &d);
  assert_int_equal(f->defined[0].code, 0);
  assert_int_equal(f->defined[2].code, 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_reconnect_while_applying, open_server, close_server),
      cmocka_unit_test_setup_teardown(test_new_process_while_applying, open_server, close_server),
      cmocka_unit_test_setup_teardown(test_other_model_again, open_server, close_server),
      cmocka_unit_test_setup_teardown(test_ghosts_and_bytes, open_server, close_server),
      cmocka_unit_test_setup_teardown(test_ghosts_for_real, open_server, close_server),
      cmocka_unit_test_setup_teardown(test_progress_back, open_server, close_server),
      cmocka_unit_test_setup_teardown(test_rejoin_while_round_is_applied, open_server,
                                      close_server),
      cmocka_unit_test_setup_teardown(test_refusal_reaches_all, open_three, close_server),
      cmocka_unit_test_setup_teardown(test_progress_told, open_three, close_server),
      cmocka_unit_test_setup_teardown(test_released_when_little_comes, open_three, close_server),
      cmocka_unit_test_setup_teardown(test_new_process_in_round, open_three, close_server),
      cmocka_unit_test_setup_teardown(test_one_far_ahead, open_three, close_server),
      cmocka_unit_test_setup_teardown(test_tally, open_three, close_server),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
