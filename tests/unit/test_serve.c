/* test_serve.c - the server role's answers to pulls that a scheduler places: turns, spreads, and what
 * happens to both when a peer fails. The scheduler, the workers and their links are simulated. */
#include "core/base/rng.h"
#include "core/sched/client.h"
#include "core/sparse/sparse_apply.h"
#include "scale.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum {
  W = 6,
  SLICES = 4,
  SLICE = 32768,
  BYTES = SLICES * SLICE,
  BLOCK = 16384,
  CHUNK = 4096,
  EAGER = 8192,
  FRAMES = BYTES / CHUNK,
  LOG = 4096,
  FOR_PLAN = 1, /* why a pull is held; from serve.c */
  FOR_TURN = 2
};
#define BEAT 500000000ull

/* A frame that the server posted. */
typedef struct said {
  uint32_t peer;
  uint8_t type;
  mlfab__pull_via via;
  mlfab__pull_fail fail;
  mlfab__waiting waiting;
  mlfab__announce announce;
  mlfab__report report;
  mlfab__spread spread;
  mlfab__spread_member members[W + 2];
} said;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__server server;
  uint64_t now;
  said *log;
  uint32_t nlog, drops, dropped;
  int ready[W + 1];
  uint8_t meta[MLFAB_META_MAX];
  uint64_t tokens[W][MLFAB__SERVER_SENDS];
  uint32_t ntokens[W];
  int unequal;        /* capacities are known, and differ */
  mlfab__model model; /* of the last frame */
  const uint32_t *bulk;
  uint32_t bulk_bytes;
  int held[W][MLFAB__SERVER_PULLS + MLFAB__SERVER_SPREADS]; /* before a call of the server */
  void *world; /* of the random test: receives posted frames */
} fixture;

static void world_post(fixture *f, const said *s);

static void port_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  static mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  fixture *f = self;
  int bad = 0;
  assert_true(bytes > 0 && peer <= W && f->nlog < LOG);
  said *s = &f->log[f->nlog];
  memset(s, 0, sizeof *s);
  s->peer = peer;
  s->type = type;
  if (type == MLFAB__PULL_VIA) {
    bad = mlfab__decode_pull_via(meta, bytes, &s->via);
  } else if (type == MLFAB__PULL_FAIL) {
    bad = mlfab__decode_pull_fail(meta, bytes, &s->fail);
  } else if (type == MLFAB__WAITING) {
    bad = mlfab__decode_waiting(meta, bytes, &s->waiting);
  } else if (type == MLFAB__SPREAD_FAIL && !f->world) {
    mlfab__spread_fail skip;
    bad = mlfab__decode_spread_fail(meta, bytes, &skip);
  } else if (type == MLFAB__ANNOUNCE) {
    bad = mlfab__decode_announce(meta, bytes, &s->announce);
  } else if (type == MLFAB__REPORT) {
    bad = mlfab__decode_report(meta, bytes, &s->report);
    if (s->report.kind != MLFAB__TRANSFER_PULL) return;
  } else if (type == MLFAB__SPREAD) {
    bad = mlfab__decode_spread(meta, bytes, &s->spread, members);
    assert_true(s->spread.members <= W + 2);
    memcpy(s->members, members, s->spread.members * sizeof *members);
  } else {
    return;
  }
  assert_int_equal(bad, 0);
  if (f->world) {
    world_post(f, s);
  } else {
    f->nlog++;
  }
}
static void port_ready(void *self, uint32_t peer) {
  fixture *f = self;
  assert_true(peer <= W);
  f->ready[peer] = 1;
}
static void port_drop(void *self, uint32_t peer, int code, const char *text) {
  fixture *f = self;
  (void)text;
  assert_int_equal(code, MLFAB_ERR_FRAME);
  f->drops++;
  f->dropped = peer;
}
static void port_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void port_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

/* Called around every call of the server: turns are given in the order of places, to at most two moving
 * pulls. */
static void watch(fixture *f) {
  for (uint32_t w = 0; w < W; w++) {
    for (uint32_t k = 0; k < MLFAB__COUNT(f->held[w]); k++)
      f->held[w][k] = f->server.peers[w].pulls[k].held;
  }
}
static void watched(fixture *f) {
  uint64_t given = 0, next = UINT64_MAX;
  uint32_t moving = 0;
  double taking = 0.0, out = f->server.sched->own.out;
  for (uint32_t w = 0; w < W; w++) {
    for (uint32_t k = 0; k < MLFAB__COUNT(f->held[w]); k++) {
      const mlfab__server_pull *p = &f->server.peers[w].pulls[k];
      double in = f->server.peers[w].link_in;
      if (p->request == 0 || p->place == 0 || p->spread != 0) continue;
      if (p->held == FOR_TURN) next = mlfab__min(next, p->place);
      if (p->held == FOR_TURN || f->now - p->progress_ns >= BEAT / 2) continue;
      moving++;
      taking += in > 0.0 ? in : 0.0;
      if (f->held[w][k] == FOR_TURN) given = mlfab__max(given, p->place);
    }
  }
  assert_true(given < next);
  assert_true(given == 0 || moving <= 2 || f->unequal);
  /* A pull waits only when two move or the link is full. */
  assert_true(next == UINT64_MAX || moving >= 2 || (out > 0.0 && taking >= 0.95 * out));
}

static void frame(fixture *f, uint32_t worker, uint8_t type, uint32_t bytes) {
  mlfab__frame_in in = {type, bytes, 0, f->meta, NULL};
  watch(f);
  mlfab__server_frame(&f->server, worker, &in, f->now);
  watched(f);
}

static void hello(fixture *f, uint32_t worker, uint32_t incarnation) {
  mlfab__hello h;
  mlfab__hello_ack ack;
  memset(&h, 0, sizeof h);
  h.node = worker;
  h.incarnation = incarnation;
  h.roles = MLFAB_ROLE_WORKER;
  h.accumulators = 4;
  f->ntokens[worker] = 0;
  watch(f);
  assert_int_equal(mlfab__server_hello(&f->server, worker, &h, &ack, f->now), 0);
  watched(f);
}

static void lost(fixture *f, uint32_t worker) {
  f->ntokens[worker] = 0;
  watch(f);
  mlfab__server_lost(&f->server, worker, f->now);
  watched(f);
}

static void open_model(fixture *f, uint32_t sync) {
  uint8_t table[MLFAB__TENSOR_INFO_BYTES];
  mlfab__tensor_info info = {0, MLFAB_F32, BYTES / 4};
  mlfab__define d;
  memset(&d, 0, sizeof d);
  d.tensors = 1;
  d.options.consistency.kind = sync;
  d.options.slices = SLICES;
  for (uint32_t w = 0; w < W; w++) hello(f, w, 1);
  mlfab__encode_tensor_info(table, &info);
  mlfab__frame_in in = {MLFAB__DEFINE, mlfab__encode_define(f->meta, &d), sizeof table, f->meta,
                        table};
  mlfab__server_frame(&f->server, 0, &in, f->now);
  assert_int_equal(f->server.phase, MLFAB__MODEL_STANDS);
  assert_int_equal(f->server.store.nslices, SLICES);
  mlfab__server_scheduler_hello(&f->server, f->now);
  f->nlog = 0;
}

static int open_server(void **state) {
  static fixture f;
  mlfab__port port = {&f, port_post, port_ready, port_drop, port_detach, port_event};
  memset(&f, 0, sizeof f);
  assert_int_equal(mlfab__env_init(&f.env, NULL), 0);
  mlfab_config_init(&f.config);
  f.config.workers = W;
  f.config.servers = 1;
  f.config.scheduler = MLFAB_SCHEDULER_BESIDE;
  mlfab_schedule_init(&f.config.schedule);
  f.config.block_bytes = BLOCK;
  f.config.chunk_bytes = CHUNK;
  f.config.eager_bytes = EAGER;
  f.config.heartbeat_ns = BEAT;
  f.config.model_max_bytes = 1 << 30;
  f.now = 1000;
  f.log = calloc(LOG, sizeof *f.log);
  assert_non_null(f.log);
  assert_int_equal(mlfab__server_init(&f.server, &f.env, &f.config, 0, &port, &f.stats), 0);
  assert_int_equal(mlfab__client_init(&f.server), 0);
  mlfab__sparse_attach(&f.server);
  *state = &f;
  return 0;
}

static int close_server(void **state) {
  fixture *f = *state;
  mlfab__server_free(&f->server);
  free(f->log);
  assert_int_equal(f->env.bytes, 0);
  return 0;
}

/* --- what workers and the scheduler send --- */

static void ask(fixture *f, uint32_t worker, uint64_t request, uint64_t offset, uint64_t bytes,
                uint64_t progress) {
  mlfab__segment segment = {offset, bytes};
  mlfab__pull pull = {request, progress, 0, 0, 1, 0};
  frame(f, worker, MLFAB__PULL, mlfab__encode_pull(f->meta, &pull, &segment, NULL));
}
static void ask_all(fixture *f, uint32_t worker, uint64_t request) {
  ask(f, worker, request, 0, BYTES, 0);
}
static void cancel(fixture *f, uint32_t worker, uint64_t request) {
  mlfab__pull_cancel c = {request};
  frame(f, worker, MLFAB__PULL_CANCEL, mlfab__encode_pull_cancel(f->meta, &c));
}
static void done(fixture *f, uint32_t worker, uint64_t request) {
  mlfab__pull_done d = {request};
  frame(f, worker, MLFAB__PULL_DONE, mlfab__encode_pull_done(f->meta, &d));
}
static void spread_fail(fixture *f, uint32_t aggregator, uint64_t spread, uint64_t request,
                        uint32_t worker) {
  mlfab__spread_fail fail = {spread, request, worker, MLFAB_ERR_PEER_DEAD};
  frame(f, aggregator, MLFAB__SPREAD_FAIL, mlfab__encode_spread_fail(f->meta, &fail));
}

static mlfab__plan_entry entry(uint32_t worker, uint64_t id, uint32_t group, uint32_t aggregator) {
  mlfab__plan_entry e;
  memset(&e, 0, sizeof e);
  e.kind = MLFAB__TRANSFER_PULL;
  e.worker = worker;
  e.id = id;
  e.group = group;
  e.aggregator = aggregator;
  return e;
}

static void send_plan(fixture *f, const mlfab__plan_entry *entries, uint32_t n) {
  mlfab__plan p;
  memset(&p, 0, sizeof p);
  p.serial = 1;
  p.rate_in = p.rate_out = -1.0;
  p.entries = n;
  mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(f->meta, &p, entries), 0, f->meta, NULL};
  watch(f);
  mlfab__server_scheduler_frame(&f->server, &in, f->now);
  watched(f);
}
static void plan_one(fixture *f, uint32_t worker, uint64_t id) {
  mlfab__plan_entry e = entry(worker, id, 0, MLFAB__NO_NODE);
  send_plan(f, &e, 1);
}
/* Pulls `id` of workers first .. last, passed on by `aggregator`. */
static void plan_spread(fixture *f, uint32_t first, uint32_t last, uint64_t id,
                        uint32_t aggregator) {
  mlfab__plan_entry e[W];
  for (uint32_t w = first; w <= last; w++) e[w - first] = entry(w, id, 7, aggregator);
  send_plan(f, e, last - first + 1);
}

/* The next frame for a worker; `take`: its link takes it. Tokens stay out until `give_back`. */
static int step(fixture *f, uint32_t worker, int take) {
  mlfab__frame_out out;
  memset(&out, 0, sizeof out);
  out.meta = f->meta;
  if (!mlfab__server_next(&f->server, worker, &out, f->now)) return 0;
  assert_int_equal(mlfab__decode_model(out.meta, out.meta_bytes, &f->model), 0);
  f->bulk = out.bulk;
  f->bulk_bytes = out.bulk_bytes;
  if (!take) return 1;
  watch(f);
  mlfab__server_taken(&f->server, worker, &out, f->now);
  watched(f);
  assert_true(f->ntokens[worker] < MLFAB__SERVER_SENDS);
  if (out.token) f->tokens[worker][f->ntokens[worker]++] = out.token;
  return 1;
}
static void give_back(fixture *f, uint32_t worker) {
  while (f->ntokens[worker] > 0)
    mlfab__server_sent(&f->server, worker, f->tokens[worker][--f->ntokens[worker]]);
}
/* Takes up to `most` frames for a worker; all must belong to this request. Returns how many. */
static uint32_t drain(fixture *f, uint32_t worker, uint64_t request, uint32_t most) {
  uint32_t n = 0;
  while (n < most && step(f, worker, 1)) {
    assert_true(f->model.request == request);
    give_back(f, worker);
    n++;
  }
  return n;
}
static void tick(fixture *f, uint64_t ns) {
  f->now += ns;
  watch(f);
  mlfab__server_tick(&f->server, f->now);
  watched(f);
}

static uint32_t count(const fixture *f, uint8_t type, uint32_t peer) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < f->nlog; i++) n += f->log[i].type == type && f->log[i].peer == peer;
  return n;
}
/* The last posted frame of this type to this peer. */
static const said *last(const fixture *f, uint8_t type, uint32_t peer) {
  for (uint32_t i = f->nlog; i-- > 0;) {
    if (f->log[i].type == type && f->log[i].peer == peer) return &f->log[i];
  }
  fail_msg("peer %u was not told type %d", peer, type);
  return NULL;
}
/* How often this pull was reported to the scheduler with this code. */
static uint32_t reported(const fixture *f, uint32_t worker, uint64_t id, int code) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < f->nlog; i++) {
    const said *s = &f->log[i];
    n += s->type == MLFAB__REPORT && s->report.worker == worker && s->report.id == id &&
         s->report.code == code;
  }
  return n;
}
static void all_over(const fixture *f) {
  for (uint32_t w = 0; w < W; w++) {
    for (uint32_t k = 0; k < MLFAB__COUNT(f->server.peers[w].pulls); k++)
      assert_true(f->server.peers[w].pulls[k].request == 0);
  }
  assert_int_equal(mlfab__report_out_backlog(&f->server), 0);
}

/* --- single cases --- */

static void test_small_and_unscheduled(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  ask(f, 1, 1, 0, EAGER, 0);
  assert_int_equal(drain(f, 1, 1, 100), EAGER / CHUNK);
  mlfab__server_scheduler_lost(&f->server, f->now);
  ask_all(f, 1, 2);
  assert_int_equal(mlfab__report_out_backlog(&f->server), BYTES);
  assert_int_equal(drain(f, 1, 2, 100), FRAMES);
  assert_int_equal(f->nlog, 0);
  assert_int_equal(f->stats.pulls_answered, 2);
  all_over(f);
}

static void test_announced_and_placed(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  ask_all(f, 2, 9);
  assert_int_equal(step(f, 2, 1), 0);
  assert_int_equal(count(f, MLFAB__ANNOUNCE, W), 1);
  const mlfab__announce *a = &last(f, MLFAB__ANNOUNCE, W)->announce;
  mlfab__segment whole = {0, BYTES};
  assert_int_equal(a->kind, MLFAB__TRANSFER_PULL);
  assert_int_equal(a->id, 9);
  assert_int_equal(a->worker, 2);
  assert_int_equal(a->incarnation, 1);
  assert_int_equal(a->bytes, BYTES);
  assert_int_equal(a->members, 1);
  assert_int_equal(a->parts, 1);
  assert_int_equal(a->lag, 0);
  assert_true(a->shape == mlfab__report_shape(&whole, 1));
  assert_int_equal(mlfab__report_out_backlog(&f->server), 0);
  plan_one(f, 2, 9);
  plan_one(f, 2, 9); /* placed twice: no effect */
  assert_int_equal(f->ready[2], 1);
  assert_int_equal(mlfab__report_out_backlog(&f->server), BYTES);
  assert_int_equal(drain(f, 2, 9, 8), 8);
  assert_int_equal(mlfab__report_out_backlog(&f->server), BYTES - 8 * CHUNK);
  assert_int_equal(last(f, MLFAB__REPORT, W)->report.worker, MLFAB__NO_NODE);
  assert_int_equal(drain(f, 2, 9, 100), FRAMES - 8);
  assert_int_equal(reported(f, 2, 9, 0), 1);
  assert_int_equal(last(f, MLFAB__REPORT, W)->report.out_backlog, 0);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 0);
  all_over(f);
}

/* A plan entry for a pull that is gone is skipped, and so are pushes. */
static void test_plan_of_others(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  ask_all(f, 2, 9);
  cancel(f, 2, 9);
  assert_int_equal(reported(f, 2, 9, MLFAB_ERR_CANCELLED), 1);
  plan_one(f, 2, 9);
  ask_all(f, 2, 10);
  mlfab__plan_entry e = entry(2, 10, 0, MLFAB__NO_NODE);
  e.kind = MLFAB__TRANSFER_PUSH;
  mlfab__spread_plan(&f->server, &e, 1);
  assert_int_equal(step(f, 2, 1), 0);
  ask(f, 2, 11, 0, EAGER, 0); /* small ones are answered at once */
  assert_int_equal(drain(f, 2, 11, 100), EAGER / CHUNK);
  plan_one(f, 2, 10);
  ask(f, 2, 12, 0, EAGER, 0);
  assert_int_equal(drain(f, 2, 12, EAGER / CHUNK), EAGER / CHUNK);
  assert_int_equal(drain(f, 2, 10, 100), FRAMES);
  all_over(f);
}

/* Two pulls at a time, in the order of places. A pull whose reader takes nothing for half a beat stops
 * counting. */
static void test_turns(void **state) {
  fixture *f = *state;
  static const uint32_t order[] = {4, 1, 3, 0, 2};
  open_model(f, MLFAB_SYNC_ASYNC);
  for (uint32_t w = 0; w < 5; w++) ask_all(f, w, 20 + w);
  mlfab__plan_entry e[5];
  for (uint32_t i = 0; i < 5; i++) e[i] = entry(order[i], 20 + order[i], 0, MLFAB__NO_NODE);
  send_plan(f, e, 5);
  for (uint32_t i = 0; i < 5; i++) assert_int_equal(step(f, order[i], 0), i < 2);
  assert_int_equal(drain(f, 1, 21, 100), FRAMES);
  for (uint32_t i = 2; i < 5; i++) assert_int_equal(step(f, order[i], 0), i < 3);
  assert_int_equal(drain(f, 3, 23, 5), 5);
  tick(f, BEAT / 4);
  assert_int_equal(step(f, 0, 0), 0);
  assert_int_equal(drain(f, 3, 23, 5), 5);
  tick(f, BEAT / 4); /* worker 4 has taken nothing */
  assert_int_equal(step(f, 0, 0), 1);
  assert_int_equal(step(f, 2, 0), 0);
  assert_int_equal(step(f, 4, 0), 1);
  cancel(f, 3, 23);
  assert_int_equal(reported(f, 3, 23, MLFAB_ERR_CANCELLED), 1);
  assert_int_equal(step(f, 2, 0), 1);
  lost(f, 0);
  assert_int_equal(reported(f, 0, 20, MLFAB_ERR_PEER_CLOSED), 1);
  assert_int_equal(drain(f, 4, 24, 100), FRAMES);
  assert_int_equal(drain(f, 2, 22, 100), FRAMES);
  all_over(f);
}

/* With known capacities of the readers' links, more pulls move until together they can fill the server's
 * link. */
static void test_slow_readers(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  mlfab__capacity own = {0, 200.0, 200.0};
  mlfab__server_capacity(&f->server, &own, f->now);
  for (uint32_t w = 0; w < 5; w++) {
    mlfab__capacity slow = {0, w == 1 ? -1.0 : 50.0, 50.0};
    frame(f, w, MLFAB__CAPACITY, mlfab__encode_capacity(f->meta, &slow));
    ask_all(f, w, 5);
    if (w != 1) plan_one(f, w, 5);
  }
  f->unequal = 1;
  for (uint32_t w = 0; w < 5; w++) assert_int_equal(step(f, w, 0), w != 1);
  assert_int_equal(drain(f, 0, 5, 100), FRAMES);
  plan_one(f, 1, 5); /* 150 are used, and this reader may take the rest */
  ask_all(f, 0, 6);
  plan_one(f, 0, 6);
  assert_int_equal(step(f, 1, 0), 1);
  assert_int_equal(step(f, 0, 0), 0);
  assert_int_equal(drain(f, 2, 5, 100), FRAMES);
  assert_int_equal(drain(f, 3, 5, 100), FRAMES);
  assert_int_equal(step(f, 0, 0), 0);
  assert_int_equal(drain(f, 4, 5, 100), FRAMES);
  assert_int_equal(drain(f, 0, 6, 100), FRAMES);
  assert_int_equal(drain(f, 1, 5, 100), FRAMES);
  all_over(f);
}

/* A placed pull has at most one MiB in the transport, here all its slots; its next frame is sent when
 * tokens come back. */
static void test_lent(void **state) {
  fixture *f = *state;
  f->config.chunk_bytes = 512 * 1024; /* two of them */
  open_model(f, MLFAB_SYNC_ASYNC);
  ask_all(f, 2, 9);
  plan_one(f, 2, 9);
  assert_int_equal(step(f, 2, 1), 1);
  assert_int_equal(step(f, 2, 1), 1);
  assert_int_equal(step(f, 2, 1), 0);
  ask(f, 2, 10, 0, EAGER, 0); /* a small one is not held up */
  assert_int_equal(step(f, 2, 1), 1);
  assert_int_equal(f->model.request, 10);
  f->ready[2] = 0;
  give_back(f, 2);
  assert_int_equal(f->ready[2], 1);
  assert_int_equal(drain(f, 2, 9, 100), BYTES / BLOCK - 2);
  all_over(f);
}

static void *no_memory(void *user, size_t bytes) {
  (void)user, (void)bytes;
  return NULL;
}

/* A peer may read what its lost link was lent until the transport has been told. So these blocks are not free before the next
 * tick, also when there is no memory. */
static void test_lent_and_lost(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  ask(f, 2, 9, 0, EAGER, 0);
  assert_int_equal(step(f, 2, 1), 1);
  assert_int_equal(f->ntokens[2], 1);
  mlfab__store *store = &f->server.store;
  uint32_t block = (uint32_t)f->tokens[2][0] - 1, left = store->free_count;
  assert_int_equal(store->w[0], block);
  void *(*allocate)(void *, size_t) = f->env.hooks.allocate;
  f->env.hooks.allocate = no_memory;
  lost(f, 2);
  f->env.hooks.allocate = allocate;
  mlfab__store_put(store, &store->w[0], mlfab__store_take(store)); /* as a commit does */
  assert_int_equal(store->blocks[block].refs, 1);
  assert_int_equal(store->free_count, left - 1);
  tick(f, 1);
  assert_int_equal(store->blocks[block].refs, 0);
  assert_int_equal(store->free_count, left);
}

static void test_scheduler_lost(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  ask_all(f, 2, 9);
  ask_all(f, 3, 8);
  /* another scheduler: both are announced to it */
  mlfab__server_scheduler_hello(&f->server, f->now);
  assert_int_equal(count(f, MLFAB__ANNOUNCE, W), 4);
  plan_one(f, 3, 8);
  mlfab__server_scheduler_lost(&f->server, f->now);
  assert_int_equal(drain(f, 2, 9, 100), FRAMES);
  mlfab__server_scheduler_hello(&f->server, f->now); /* placed pulls are not announced again */
  assert_int_equal(count(f, MLFAB__ANNOUNCE, W), 4);
  assert_int_equal(drain(f, 3, 8, 100), FRAMES);
  all_over(f);
}

/* A pull of a future round tells its worker to wait; it is announced when the round is complete. */
static void test_rounds(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_BSP);
  ask(f, 2, 9, 0, BYTES, 1);
  assert_int_equal(count(f, MLFAB__ANNOUNCE, W), 0);
  assert_int_equal(last(f, MLFAB__WAITING, 2)->waiting.kind, MLFAB__REQUEST_PULL);
  assert_int_equal(last(f, MLFAB__WAITING, 2)->waiting.request, 9);
  assert_int_equal(last(f, MLFAB__WAITING, 2)->waiting.rank, 0);
  plan_one(f, 2, 9); /* not announced */
  assert_int_equal(step(f, 2, 1), 0);
  f->server.clocks[0].v_train = 1;
  f->server.serve.due = 1;
  mlfab__serve_look(&f->server);
  assert_int_equal(count(f, MLFAB__ANNOUNCE, W), 1);
  assert_int_equal(step(f, 2, 1), 0);
  plan_one(f, 2, 9);
  assert_int_equal(drain(f, 2, 9, 100), FRAMES);
  /* A round that a callback refused fails its pull once, without an announcement. */
  f->server.clocks[0].v_train = 2;
  f->server.clocks[0].refused_round = 2;
  ask(f, 2, 10, 0, BYTES, 2);
  assert_int_equal(last(f, MLFAB__PULL_FAIL, 2)->fail.code, MLFAB_ERR_CALLBACK);
  assert_int_equal(count(f, MLFAB__ANNOUNCE, W), 1);
  all_over(f);
}

/* --- spreads --- */

/* Starts a spread of pulls 5 of workers 1 to 3 by worker 0's node. Returns its number. */
static uint64_t begin_spread(fixture *f) {
  open_model(f, MLFAB_SYNC_ASYNC);
  for (uint32_t w = 1; w <= 3; w++) ask_all(f, w, 5);
  plan_spread(f, 1, 3, 5, 0);
  return last(f, MLFAB__SPREAD, 0)->spread.request;
}

static void test_spread(void **state) {
  fixture *f = *state;
  f->config.schedule.whole = 1;
  f->server.schedule.whole = 1;
  uint64_t number = begin_spread(f);
  const said *s = last(f, MLFAB__SPREAD, 0);
  assert_true((number & MLFAB__SPREAD_BIT) != 0);
  assert_true(s->spread.bytes == BYTES && s->spread.frames == FRAMES);
  assert_int_equal(s->spread.whole, 1);
  assert_int_equal(s->spread.members, 3);
  for (uint32_t w = 1; w <= 3; w++) {
    const said *via = last(f, MLFAB__PULL_VIA, w);
    assert_true(via < s); /* members are told first */
    assert_int_equal(via->via.request, 5);
    assert_int_equal(via->via.aggregator, 0);
    assert_true(via->via.attempt > 0);
    assert_int_equal(s->members[w - 1].worker, w);
    assert_int_equal(s->members[w - 1].request, 5);
    assert_int_equal(s->members[w - 1].incarnation, 1);
    assert_int_equal(s->members[w - 1].attempt, via->via.attempt);
    assert_int_equal(step(f, w, 1), 0);
  }
  assert_int_equal(mlfab__report_out_backlog(&f->server), BYTES);
  assert_int_equal(drain(f, 0, number, 100), FRAMES);
  assert_int_equal(f->model.flags, MLFAB__MODEL_LAST);
  assert_int_equal(mlfab__report_out_backlog(&f->server), 0);
  assert_int_equal(f->stats.pulls_answered, 0);
  for (uint32_t w = 3; w >= 1; w--) {
    assert_int_equal(reported(f, w, 5, 0), 0);
    done(f, w, 5);
    done(f, w, 5); /* the server knows already */
    assert_int_equal(reported(f, w, 5, 0), 1);
  }
  assert_int_equal(f->stats.pulls_answered, 3);
  assert_int_equal(f->stats.spreads_answered, 3);
  assert_int_equal(f->stats.spreads_failed, 0);
  assert_int_equal(count(f, MLFAB__PULL_FAIL, 0), 0);
  assert_int_equal(f->drops, 0);
  all_over(f);
}

/* The announced number of frames is right for every list of segments. */
static void test_frames(void **state) {
  fixture *f = *state;
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 5);
  open_model(f, MLFAB_SYNC_ASYNC);
  for (uint64_t id = 1; id <= 200; id++) {
    mlfab__segment segments[8];
    mlfab__pull pull = {id, 0, 0, 0, 0, 0};
    uint64_t bytes = 0, at = 0;
    for (; pull.segments < 8; pull.segments++) {
      at += 4 + 4 * mlfab__rng_below(&prng, 4000);
      uint64_t n = 4 + 4 * mlfab__rng_below(&prng, 8000);
      if (at + n > BYTES) break;
      segments[pull.segments] = (mlfab__segment){at, n};
      at += n;
      bytes += n;
    }
    for (uint32_t w = 1; w <= 2; w++)
      frame(f, w, MLFAB__PULL, mlfab__encode_pull(f->meta, &pull, segments, NULL));
    f->nlog = 0;
    plan_spread(f, 1, 2, id, 0);
    if (bytes <= EAGER) {
      for (uint32_t w = 1; w <= 2; w++) drain(f, w, id, UINT32_MAX);
      continue;
    }
    mlfab__spread s = last(f, MLFAB__SPREAD, 0)->spread;
    assert_int_equal(s.bytes, bytes);
    assert_int_equal(drain(f, 0, s.request, UINT32_MAX), s.frames);
    for (uint32_t w = 1; w <= 2; w++) done(f, w, id);
    all_over(f);
  }
}

/* No spread starts for: one member, another shape, an unknown distributor, a dead one, no free slot. */
static void test_no_spread(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  for (uint32_t w = 1; w <= 4; w++) ask_all(f, w, 5);
  ask(f, 5, 5, 0, BYTES - 4, 0);
  plan_spread(f, 1, 1, 5, 0);
  assert_int_equal(drain(f, 1, 5, 100), FRAMES);
  mlfab__plan_entry two[2] = {entry(2, 5, 7, 0), entry(5, 5, 7, 0)};
  send_plan(f, two, 2);
  assert_int_equal(drain(f, 2, 5, 100), FRAMES);
  assert_int_equal(drain(f, 5, 5, 100), FRAMES);
  plan_spread(f, 3, 4, 5, MLFAB__NO_NODE);
  assert_int_equal(drain(f, 3, 5, 100), FRAMES);
  assert_int_equal(drain(f, 4, 5, 100), FRAMES);
  lost(f, 0);
  for (uint32_t w = 3; w <= 4; w++) ask_all(f, w, 6);
  plan_spread(f, 3, 4, 6, 0);
  assert_int_equal(drain(f, 3, 6, 100), FRAMES);
  assert_int_equal(drain(f, 4, 6, 100), FRAMES);
  /* Entries with different distributors, or not adjacent, are not one spread. */
  hello(f, 0, 1);
  for (uint32_t w = 3; w <= 4; w++) ask_all(f, w, 7);
  mlfab__plan_entry split[2] = {entry(3, 7, 7, 0), entry(4, 7, 7, 1)};
  send_plan(f, split, 2);
  assert_int_equal(drain(f, 3, 7, 100), FRAMES);
  assert_int_equal(drain(f, 4, 7, 100), FRAMES);
  for (uint32_t w = 0; w < W; w++) assert_int_equal(count(f, MLFAB__SPREAD, w), 0);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 3), 0);
  for (uint64_t id = 10; id <= 10 + MLFAB__SERVER_SPREADS; id++) {
    for (uint32_t w = 3; w <= 4; w++) ask_all(f, w, id);
    plan_spread(f, 3, 4, id, 0);
  }
  assert_int_equal(count(f, MLFAB__SPREAD, 0), MLFAB__SERVER_SPREADS);
  all_over((lost(f, 3), lost(f, 4), f));
}

/* A pull of another shape in a row is answered directly, the others are spread; the distributor may be a
 * member. */
static void test_row_with_odd_one(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  ask_all(f, 0, 5);
  ask_all(f, 1, 5);
  ask(f, 2, 5, 0, BYTES - SLICE, 0);
  ask_all(f, 3, 5);
  plan_spread(f, 0, 3, 5, 0);
  const said *s = last(f, MLFAB__SPREAD, 0);
  assert_int_equal(s->spread.members, 3);
  assert_int_equal(s->members[2].worker, 3);
  assert_int_equal(drain(f, 2, 5, 100), (BYTES - SLICE) / CHUNK);
  assert_int_equal(last(f, MLFAB__PULL_VIA, 2)->via.aggregator, MLFAB__NO_NODE);
  assert_int_equal(drain(f, 0, s->spread.request, 100), FRAMES);
  for (uint32_t w = 0; w <= 3; w++) done(f, w, 5);
  all_over(f);
}

/* One member has to be served directly; the others are not affected. */
static void test_member_fails(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  uint32_t before = last(f, MLFAB__PULL_VIA, 2)->via.attempt;
  assert_int_equal(drain(f, 0, number, 10), 10);
  spread_fail(f, 4, number, 5, 2);     /* from another node */
  spread_fail(f, 0, number, 6, 2);     /* no such pull */
  spread_fail(f, 0, number + 1, 5, 2); /* no such spread */
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 1);
  spread_fail(f, 0, number, 5, 2);
  spread_fail(f, 0, number, 5, 2); /* repeated */
  const mlfab__pull_via *via = &last(f, MLFAB__PULL_VIA, 2)->via;
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 2);
  assert_int_equal(via->aggregator, MLFAB__NO_NODE);
  assert_true(via->attempt > before);
  assert_int_equal(f->stats.spreads_failed, 1);
  assert_int_equal(drain(f, 2, 5, 100), FRAMES);
  assert_int_equal(reported(f, 2, 5, 0), 1);
  assert_int_equal(drain(f, 0, number, 100), FRAMES - 10);
  done(f, 1, 5);
  done(f, 3, 5);
  assert_int_equal(f->stats.spreads_answered, 2);
  assert_int_equal(f->stats.pulls_answered, 3);
  all_over(f);
}

/* The distributor refuses: all members are served directly, in their old order, before pulls that were
 * placed later. */
static void test_spread_refused(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  ask_all(f, 4, 5);
  ask_all(f, 5, 5);
  plan_one(f, 4, 5);
  plan_one(f, 5, 5);
  assert_int_equal(step(f, 5, 0), 0);
  spread_fail(f, 0, number, 0, MLFAB__NO_NODE);
  assert_int_equal(step(f, 0, 1), 0);
  assert_int_equal(f->stats.spreads_failed, 3);
  assert_int_equal(step(f, 1, 0), 1);
  assert_int_equal(step(f, 2, 0), 0);
  assert_int_equal(drain(f, 1, 5, 100), FRAMES);
  assert_int_equal(step(f, 5, 0), 0);
  assert_int_equal(drain(f, 2, 5, 100), FRAMES);
  assert_int_equal(drain(f, 3, 5, 100), FRAMES);
  assert_int_equal(drain(f, 5, 5, 100), FRAMES);
  assert_int_equal(drain(f, 4, 5, 100), FRAMES);
  all_over(f);
}

static void test_distributor_lost(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  ask_all(f, 0, 6);
  assert_int_equal(drain(f, 0, number, 10), 10);
  done(f, 3, 5); /* accepted */
  lost(f, 0);
  assert_int_equal(reported(f, 0, 6, MLFAB_ERR_PEER_CLOSED), 1);
  for (uint32_t w = 1; w <= 2; w++) {
    assert_int_equal(last(f, MLFAB__PULL_VIA, w)->via.aggregator, MLFAB__NO_NODE);
    assert_int_equal(drain(f, w, 5, 100), FRAMES);
  }
  all_over(f);
}

/* The distributor reconnects after it has received all frames, before its loss is noticed. */
static void test_distributor_lost_late(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  assert_int_equal(drain(f, 0, number, 100), FRAMES);
  done(f, 1, 5);
  hello(f, 0, 1);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 1), 1);
  done(f, 2, 5); /* crossed with PULL_VIA: the worker has everything */
  assert_int_equal(drain(f, 2, 5, 100), 0);
  assert_int_equal(drain(f, 3, 5, 100), FRAMES);
  assert_int_equal(f->stats.spreads_answered, 1);
  assert_int_equal(f->stats.spreads_failed, 2);
  assert_int_equal(f->stats.pulls_answered, 3);
  all_over(f);
}

/* Leaving members do not stop the others; when the last one leaves, the spread ends and the distributor is
 * told. */
static void test_members_leave(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  assert_int_equal(drain(f, 0, number, 10), 10);
  lost(f, 1);
  assert_int_equal(reported(f, 1, 5, MLFAB_ERR_PEER_CLOSED), 1);
  cancel(f, 2, 5);
  assert_int_equal(reported(f, 2, 5, MLFAB_ERR_CANCELLED), 1);
  assert_int_equal(drain(f, 0, number, 10), 10);
  assert_int_equal(count(f, MLFAB__PULL_FAIL, 0), 0);
  mlfab__server_gone(&f->server, 3, 0, f->now);
  assert_true(last(f, MLFAB__PULL_FAIL, 0)->fail.request == number);
  assert_int_equal(last(f, MLFAB__PULL_FAIL, 0)->fail.code, MLFAB_ERR_CANCELLED);
  assert_int_equal(step(f, 0, 1), 0);
  all_over(f);
}

/* The last member leaves in other ways: it cancels, or is done before all frames are out. */
static void test_last_member_leaves(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  assert_int_equal(drain(f, 0, number, 10), 10);
  for (uint32_t w = 1; w <= 3; w++) cancel(f, w, 5);
  assert_int_equal(count(f, MLFAB__PULL_FAIL, 0), 1);
  all_over(f);
  for (uint32_t w = 1; w <= 3; w++) ask_all(f, w, 6);
  plan_spread(f, 1, 3, 6, 0);
  for (uint32_t w = 1; w <= 3; w++) done(f, w, 6);
  assert_int_equal(count(f, MLFAB__PULL_FAIL, 0), 2);
  all_over(f);
}

/* A distributor that reads nothing has failed after three beats, and is told so. */
static void test_distributor_stuck(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  assert_int_equal(drain(f, 0, number, 10), 10);
  for (int i = 0; i < 11; i++) tick(f, BEAT / 4);
  assert_int_equal(step(f, 1, 0), 0);
  tick(f, BEAT / 4);
  assert_true(last(f, MLFAB__PULL_FAIL, 0)->fail.request == number);
  assert_int_equal(step(f, 0, 1), 0);
  for (uint32_t w = 1; w <= 3; w++) assert_int_equal(drain(f, w, 5, 100), FRAMES);
  all_over(f);
}

/* A distributor that reads other frames meanwhile is not stuck. */
static void test_distributor_busy(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  for (uint32_t i = 0; i < 40; i++) {
    tick(f, BEAT / 4);
    ask(f, 0, 100 + i, 0, 4096, 0);
    assert_int_equal(drain(f, 0, 100 + i, 1), 1);
  }
  assert_int_equal(drain(f, 0, number, 100), FRAMES);
  for (uint32_t w = 1; w <= 3; w++) done(f, w, 5);
  assert_int_equal(f->stats.spreads_answered, 3);
  all_over(f);
}

/* A distributor that has all frames and reports nothing: the server waits four beats plus the expected time
 * of handing on, counted from the last report. */
static void test_distributor_silent(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  assert_int_equal(drain(f, 0, number, 100), FRAMES);
  for (int i = 0; i < 15; i++) tick(f, BEAT / 4);
  done(f, 1, 5);
  for (int i = 0; i < 15; i++) tick(f, BEAT / 4);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 1);
  tick(f, BEAT / 4);
  for (uint32_t w = 2; w <= 3; w++) {
    assert_int_equal(last(f, MLFAB__PULL_VIA, w)->via.aggregator, MLFAB__NO_NODE);
    assert_int_equal(drain(f, w, 5, 100), FRAMES);
  }
  assert_true(last(f, MLFAB__PULL_FAIL, 0)->fail.request == number);
  all_over(f);
}

/* The server needed two beats, so the distributor gets that time too: the server waits longer for the
 * second member than for the first. */
static void test_distributor_slow(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  tick(f, BEAT);
  assert_int_equal(drain(f, 0, number, 10), 10);
  tick(f, BEAT);
  assert_int_equal(drain(f, 0, number, 100), FRAMES - 10);
  /* The out-link is not idle: one reader is slow. */
  ask_all(f, 4, 5);
  plan_one(f, 4, 5);
  for (int i = 0; i < 4 * (4 + 2 * 2 * 2) - 1; i++) tick(f, BEAT / 4);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 1), 1);
  tick(f, BEAT / 4);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 1), 2);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 1);
  for (int i = 0; i < 4 * 2 * 2; i++) tick(f, BEAT / 4);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 2);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 3), 1);
  done(f, 3, 5);
  lost(f, 1);
  assert_int_equal(drain(f, 2, 5, 100), FRAMES);
  assert_int_equal(drain(f, 4, 5, 100), FRAMES);
  all_over(f);
}

/* The distributor has become slow while the out-link is idle: the server takes overdue members back one at
 * a time, the last one first, and tells the distributor to skip them. */
static void test_idle_link_takes_back(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  tick(f, BEAT);
  assert_int_equal(drain(f, 0, number, 100), FRAMES);
  /* It took one beat: the members are due after 2, 3 and 4 beats, and a quarter. */
  for (int i = 0; i < 4 * 2; i++) tick(f, BEAT / 4);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 1), 1);
  f->now += 2 * BEAT;
  tick(f, BEAT / 4);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 3), 2);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 1);
  assert_int_equal(count(f, MLFAB__SPREAD_FAIL, 0), 1);
  tick(f, BEAT / 8);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 1); /* the link is not idle now */
  assert_int_equal(drain(f, 3, 5, 100), FRAMES);
  tick(f, BEAT / 8);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 2), 2);
  assert_int_equal(drain(f, 2, 5, 100), FRAMES);
  done(f, 1, 5);
  all_over(f);
}

/* The time that a spread waits for its turn does not count as its duration. */
static void test_late_turn(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  for (uint32_t w = 1; w <= 5; w++) ask_all(f, w, 5);
  plan_one(f, 4, 5);
  plan_one(f, 5, 5);
  plan_spread(f, 1, 3, 5, 0);
  uint64_t number = last(f, MLFAB__SPREAD, 0)->spread.request;
  for (uint32_t i = 0; i < FRAMES / 2; i++) {
    assert_int_equal(drain(f, 4, 5, 1), 1);
    assert_int_equal(drain(f, 5, 5, 1), 1);
    tick(f, BEAT / 4);
  }
  assert_int_equal(step(f, 0, 0), 0);
  assert_int_equal(drain(f, 4, 5, 100), FRAMES / 2);
  assert_int_equal(drain(f, 0, number, 100), FRAMES);
  for (int i = 0; i < 4 * 4; i++) tick(f, BEAT / 4);
  assert_int_equal(count(f, MLFAB__PULL_VIA, 3), 2);
  for (uint32_t w = 1; w <= 3; w++) done(f, w, 5);
  assert_int_equal(drain(f, 5, 5, 100), FRAMES / 2);
  all_over(f);
}

/* A worker that lost its link pulls again under the same number: its former distributor's frames have an
 * older attempt than any PULL_VIA from now on. */
static void test_reconnect(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  uint32_t before = last(f, MLFAB__PULL_VIA, 2)->via.attempt;
  assert_int_equal(drain(f, 0, number, 100), FRAMES);
  hello(f, 2, 1);
  ask_all(f, 2, 5);
  plan_one(f, 2, 5);
  assert_true(last(f, MLFAB__PULL_VIA, 2)->via.attempt > before);
  assert_int_equal(last(f, MLFAB__PULL_VIA, 2)->via.aggregator, MLFAB__NO_NODE);
  assert_int_equal(drain(f, 2, 5, 100), FRAMES);
  hello(f, 3, 2);
  ask_all(f, 3, 5);
  ask_all(f, 4, 5);
  before = last(f, MLFAB__PULL_VIA, 3)->via.attempt;
  plan_spread(f, 3, 4, 5, 0);
  assert_true(last(f, MLFAB__PULL_VIA, 3)->via.attempt > before);
  assert_int_equal(last(f, MLFAB__SPREAD, 0)->members[0].incarnation, 2);
  done(f, 3, 5); /* complete with the frames that were on their way */
  mlfab__server_scheduler_lost(&f->server, f->now);
  hello(f, 1, 1);
  ask_all(f, 1, 5); /* told without a scheduler too */
  assert_int_equal(last(f, MLFAB__PULL_VIA, 1)->via.aggregator, MLFAB__NO_NODE);
  lost(f, 0);
  assert_int_equal(drain(f, 1, 5, 100), FRAMES);
  assert_int_equal(drain(f, 4, 5, 100), FRAMES);
  all_over(f);
}

/* A server short of spare blocks unpins a spread's slice; more frames than announced are sent. */
static void test_unpinned(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  assert_int_equal(drain(f, 0, number, 10), 10);
  mlfab__blocks_unpin_all(&f->server);
  assert_int_equal(drain(f, 0, number, 100), FRAMES - 8);
  assert_int_equal(f->stats.pulls_restarted, 1);
}

static void refused(fixture *f, uint32_t peer) {
  assert_int_equal(f->drops, 1);
  assert_int_equal(f->dropped, peer);
  f->drops = 0;
}

static void test_bad_frames(void **state) {
  fixture *f = *state;
  uint64_t number = begin_spread(f);
  ask_all(f, 4, MLFAB__SPREAD_BIT | 1);
  refused(f, 4);
  ask_all(f, 1, 5); /* in progress already */
  refused(f, 1);
  memset(f->meta, 0, 64);
  frame(f, 1, MLFAB__PULL_DONE, 3);
  refused(f, 1);
  done(f, 1, number);
  refused(f, 1);
  done(f, 0, number); /* the node's aggregator cannot say that */
  refused(f, 0);
  frame(f, 0, MLFAB__SPREAD_FAIL, 5);
  refused(f, 0);
  spread_fail(f, 0, number, 5, W);
  refused(f, 0);
  spread_fail(f, 0, 5, 5, 1);
  refused(f, 0);
  cancel(f, 0, number); /* the worker cannot cancel it */
  assert_int_equal(f->drops, 0);
  ask_all(f, 4, 5);
  plan_one(f, W, 5);
  refused(f, W);
  mlfab__plan_entry e[2] = {entry(4, 5, 0, MLFAB__NO_NODE), entry(1, 5, 0, W)};
  send_plan(f, e, 2);
  refused(f, W);
  assert_int_equal(step(f, 4, 0), 0); /* the whole plan is void */
  spread_fail(f, 1, MLFAB__SPREAD_BIT | 999, 5, MLFAB__NO_NODE);
  assert_int_equal(f->drops, 0);
  assert_int_equal(drain(f, 0, number, 100), FRAMES);
}

/* Without memory for a slot the members are served directly. */
static void test_no_memory(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  for (uint32_t w = 1; w <= 2; w++) ask_all(f, w, 5);
  void *(*allocate)(void *, size_t) = f->env.hooks.allocate;
  f->env.hooks.allocate = no_memory;
  plan_spread(f, 1, 2, 5, 0);
  f->env.hooks.allocate = allocate;
  for (uint32_t w = 1; w <= 2; w++) assert_int_equal(drain(f, w, 5, 100), FRAMES);
  assert_int_equal(count(f, MLFAB__SPREAD, 0), 0);
  all_over(f);
}

/* --- everything at once --- */

enum { OPEN = 3, KEPT = 400 };

typedef struct client_pull {
  uint64_t request; /* 0: free */
  uint64_t offset, bytes;
  uint32_t attempt, hop;
  uint32_t words[BYTES / 4];
} client_pull;

typedef struct kept_frame {
  uint64_t offset;
  uint32_t bytes, value, flags;
} kept_frame;

typedef struct handing { /* a spread at its distributor */
  uint64_t request;      /* 0: free */
  mlfab__spread_member members[W + 2];
  uint32_t at[W + 2], n; /* frames that each member has; KEPT: it has ended */
  kept_frame frames[KEPT];
  uint32_t nframes;
} handing;

typedef struct client {
  uint32_t incarnation;
  int up, mute, stuck; /* mute: passes nothing on; stuck: reads nothing */
  int broken[W];       /* links to members */
  client_pull pulls[OPEN];
  handing spreads[MLFAB__SERVER_SPREADS];
  said queue[256]; /* posted, not yet delivered */
  uint32_t nqueue;
} client;

typedef struct known_pull {
  uint64_t id;
  uint32_t worker;
  int waiting;
} known_pull;

typedef struct world {
  fixture *f;
  mlfab__rng prng;
  client clients[W];
  known_pull known[256]; /* announced and not reported */
  uint32_t nknown;
  int scheduler;
  uint64_t ids, earlier, finished;
} world;

static uint64_t pick(world *w, uint64_t below) { return mlfab__rng_below(&w->prng, below); }

static void world_forget(world *w, uint32_t i) { w->known[i] = w->known[--w->nknown]; }

static void world_scheduler(world *w, const said *s) {
  uint32_t worker = s->type == MLFAB__ANNOUNCE ? s->announce.worker : s->report.worker;
  uint64_t id = s->type == MLFAB__ANNOUNCE ? s->announce.id : s->report.id;
  uint32_t i = 0;
  if (worker == MLFAB__NO_NODE) return;
  while (i < w->nknown && (w->known[i].id != id || w->known[i].worker != worker)) i++;
  if (s->type == MLFAB__ANNOUNCE) {
    assert_true(i == w->nknown && i < MLFAB__COUNT(w->known));
    w->known[w->nknown++] = (known_pull){id, worker, 1};
  } else if (i < w->nknown) {
    world_forget(w, i);
  } else {
    assert_true(id <= w->earlier); /* placed by an earlier scheduler */
  }
}

static void world_post(fixture *f, const said *s) {
  world *w = f->world;
  if (s->peer == W) {
    assert_true(w->scheduler);
    world_scheduler(w, s);
  } else if (w->clients[s->peer].up) {
    client *c = &w->clients[s->peer];
    assert_true(c->nqueue < MLFAB__COUNT(c->queue));
    c->queue[c->nqueue++] = *s;
  }
}

static client_pull *client_find(client *c, uint64_t request) {
  for (uint32_t i = 0; i < OPEN; i++) {
    if (request != 0 && c->pulls[i].request == request) return &c->pulls[i];
  }
  return NULL;
}

static void client_write(client_pull *p, uint64_t offset, uint32_t bytes, uint32_t value) {
  assert_true(offset >= p->offset && offset + bytes <= p->offset + p->bytes);
  for (uint32_t i = 0; i < bytes / 4; i++) p->words[offset / 4 + i] = value;
}

/* All bytes have arrived, and the bytes of a slice have one version. */
static void client_finish(world *w, client_pull *p) {
  for (uint64_t at = p->offset; at < p->offset + p->bytes; at += 4) {
    assert_true(p->words[at / 4] != UINT32_MAX);
    if (at > p->offset && at % SLICE != 0) assert_int_equal(p->words[at / 4], p->words[at / 4 - 1]);
  }
  p->request = 0;
  w->finished++;
}

static handing *client_spread(client *c, uint64_t request) {
  for (uint32_t i = 0; i < MLFAB__SERVER_SPREADS; i++) {
    if (c->spreads[i].request == request) return &c->spreads[i];
  }
  return NULL;
}

/* Posted frames arrive. */
static void client_read(client *c) {
  for (uint32_t i = 0; i < c->nqueue; i++) {
    const said *s = &c->queue[i];
    if (s->type == MLFAB__PULL_VIA) {
      client_pull *p = client_find(c, s->via.request);
      if (!p || s->via.attempt <= p->attempt) continue;
      p->attempt = s->via.attempt;
      p->hop = s->via.aggregator;
    } else if (s->type == MLFAB__SPREAD) {
      handing *h = client_spread(c, 0);
      if (!h) continue; /* no slot: it says so when frames arrive */
      memset(h, 0, sizeof *h);
      h->request = s->spread.request;
      h->n = s->spread.members;
      memcpy(h->members, s->members, sizeof h->members);
    } else if (s->type == MLFAB__PULL_FAIL) {
      handing *h = client_spread(c, s->fail.request);
      assert_true((s->fail.request & MLFAB__SPREAD_BIT) != 0);
      if (h) h->request = 0;
    }
  }
  c->nqueue = 0;
}

/* A worker's link takes one more MODEL frame, or is blocked. */
static int client_receive(world *w, uint32_t i, int take) {
  client *c = &w->clients[i];
  fixture *f = w->f;
  if (!c->up || c->stuck) return 0;
  client_read(c);
  if (!step(f, i, take) || !take) return 0;
  mlfab__model m = f->model;
  uint32_t bytes = f->bulk_bytes, value = f->bulk[0];
  for (uint32_t k = 0; k < bytes / 4; k++) assert_int_equal(f->bulk[k], m.version);
  client_read(c);
  if (m.request & MLFAB__SPREAD_BIT) {
    handing *h = client_spread(c, m.request);
    if (!h) {
      spread_fail(f, i, m.request, 0, MLFAB__NO_NODE);
    } else {
      assert_true(h->nframes < KEPT);
      h->frames[h->nframes++] = (kept_frame){m.offset, bytes, value, m.flags};
    }
    return 1;
  }
  client_pull *p = client_find(c, m.request);
  if (!p || p->hop != MLFAB__NO_NODE) return 1;
  client_write(p, m.offset, bytes, value);
  if (m.flags & MLFAB__MODEL_LAST) client_finish(w, p);
  return 1;
}

/* A distributor passes one frame to a member, or fails to. */
static int client_hand(world *w, uint32_t i, uint32_t slot, uint32_t k) {
  handing *h = &w->clients[i].spreads[slot];
  if (h->request == 0 || k >= h->n || w->clients[i].mute || h->at[k] == KEPT) return 0;
  const mlfab__spread_member *m = &h->members[k];
  client *to = &w->clients[m->worker];
  if (w->clients[i].broken[m->worker] || to->incarnation != m->incarnation) {
    h->at[k] = KEPT;
    if (w->clients[i].up) spread_fail(w->f, i, h->request, m->request, m->worker);
    return 1;
  }
  if (h->at[k] == h->nframes || to->stuck) return 0;
  const kept_frame *frame = &h->frames[h->at[k]++];
  if (frame->flags & MLFAB__MODEL_LAST) h->at[k] = KEPT;
  client_pull *p = client_find(to, m->request);
  if (!p || m->attempt < p->attempt) return 1;
  p->attempt = m->attempt;
  p->hop = i;
  client_write(p, frame->offset, frame->bytes, frame->value);
  if (frame->flags & MLFAB__MODEL_LAST) {
    client_finish(w, p);
    if (to->up) done(w->f, m->worker, m->request);
  }
  return 1;
}

/* Removes spreads in which all members have ended. */
static void client_tidy(client *c) {
  for (uint32_t i = 0; i < MLFAB__SERVER_SPREADS; i++) {
    handing *h = &c->spreads[i];
    uint32_t over = 0;
    for (uint32_t k = 0; k < h->n; k++) over += h->at[k] == KEPT;
    if (over == h->n) h->request = 0;
  }
}

static void client_ask(world *w, uint32_t i) {
  static const uint64_t stretches[][2] = {
      {0, BYTES}, {0, BYTES}, {0, BYTES}, {SLICE / 2, 2 * SLICE}, {8192, EAGER}};
  client_pull *p = NULL;
  for (uint32_t k = 0; k < OPEN && !p; k++) {
    if (w->clients[i].pulls[k].request == 0) p = &w->clients[i].pulls[k];
  }
  if (!p || !w->clients[i].up) return;
  uint64_t which = pick(w, MLFAB__COUNT(stretches));
  p->request = ++w->ids;
  p->offset = stretches[which][0];
  p->bytes = stretches[which][1];
  p->attempt = 0;
  p->hop = MLFAB__NO_NODE;
  memset(p->words, 0xff, sizeof p->words);
  ask(w->f, i, p->request, p->offset, p->bytes, 0);
}

static void client_down(world *w, uint32_t i) {
  client *c = &w->clients[i];
  if (!c->up) return;
  c->up = 0;
  c->nqueue = 0;
  for (uint32_t k = 0; k < MLFAB__SERVER_SPREADS; k++) c->spreads[k].request = 0;
  lost(w->f, i);
}

/* A new link; if there was none, perhaps a new process. Pulls in progress are sent again. */
static void client_up(world *w, uint32_t i) {
  client *c = &w->clients[i];
  int fresh = !c->up && pick(w, 3) == 0, forget = (int)pick(w, 2);
  c->up = 1;
  c->nqueue = 0;
  for (uint32_t k = 0; k < MLFAB__SERVER_SPREADS; k++) c->spreads[k].request = 0;
  c->incarnation += (uint32_t)fresh;
  hello(w->f, i, c->incarnation);
  for (uint32_t k = 0; k < OPEN; k++) {
    client_pull *p = &c->pulls[k];
    if (fresh) p->request = 0;
    if (p->request == 0) continue;
    if (forget) {
      p->attempt = 0;
      p->hop = MLFAB__NO_NODE;
    }
    ask(w->f, i, p->request, p->offset, p->bytes, 0);
  }
}

static void world_plan(world *w) {
  mlfab__plan_entry e[64];
  uint32_t n = 0, group = 0, aggregator = MLFAB__NO_NODE;
  for (uint32_t i = 0; i < w->nknown && n < 60; i++) {
    if (!w->known[i].waiting || pick(w, 4) == 0) continue;
    w->known[i].waiting = 0;
    if (pick(w, 4) == 0) {
      group = (uint32_t)pick(w, 8);
      aggregator = pick(w, 8) ? (uint32_t)pick(w, W) : MLFAB__NO_NODE;
    }
    e[n++] = entry(w->known[i].worker, w->known[i].id, group, aggregator);
    if (pick(w, 16) == 0) e[n++] = entry((uint32_t)pick(w, W), 1 + pick(w, w->ids), group, 0);
  }
  /* Pulls that came in between are placed too, if they wait. */
  for (uint32_t k = 0; k < n; k++) {
    for (uint32_t i = 0; i < w->nknown; i++) {
      if (w->known[i].worker == e[k].worker && w->known[i].id == e[k].id) w->known[i].waiting = 0;
    }
  }
  if (n > 0 && w->scheduler) send_plan(w->f, e, n);
}

static void world_scheduler_down(world *w) {
  w->scheduler = 0;
  w->earlier = w->ids;
  for (uint32_t i = w->nknown; i-- > 0;) world_forget(w, i);
  watch(w->f);
  mlfab__server_scheduler_lost(&w->f->server, w->f->now);
  watched(w->f);
}

static void world_commit(world *w) {
  mlfab__server *server = &w->f->server;
  mlfab__shard_slice *s = &server->store.slices[pick(w, SLICES)];
  s->version++;
  s->commit++;
  for (uint32_t p = s->first; p < s->first + s->count; p++) {
    uint32_t block = mlfab__blocks_spare(server);
    uint32_t *words = (uint32_t *)(void *)server->store.blocks[block].data;
    for (uint32_t i = 0; i < BLOCK / 4; i++) words[i] = (uint32_t)s->version;
    mlfab__store_put(&server->store, &server->store.w[p], block);
  }
}

static void world_fault(world *w) {
  uint32_t i = (uint32_t)pick(w, W);
  client *c = &w->clients[i];
  switch (pick(w, 8)) {
    case 0:
      client_down(w, i);
      break;
    case 1:
      client_up(w, i);
      break;
    case 2:
      c->mute = pick(w, 3) == 0;
      break;
    case 3:
      c->stuck = pick(w, 3) == 0;
      break;
    case 4:
      c->broken[pick(w, W)] ^= 1;
      break;
    case 5:
      for (uint32_t k = 0; k < OPEN; k++) {
        if (c->pulls[k].request == 0 || !c->up || pick(w, 2)) continue;
        cancel(w->f, i, c->pulls[k].request);
        c->pulls[k].request = 0;
      }
      break;
    case 6:
      if (w->scheduler && pick(w, 2)) world_scheduler_down(w);
      break;
    default:
      if (w->scheduler) break;
      w->scheduler = 1;
      mlfab__server_scheduler_hello(&w->f->server, w->f->now);
      break;
  }
}

static void world_step(world *w) {
  uint32_t i = (uint32_t)pick(w, W);
  switch (pick(w, 12)) {
    case 0:
      client_ask(w, i);
      break;
    case 1:
      if (pick(w, 8) == 0) world_plan(w);
      break;
    case 2:
      if (pick(w, 4) == 0) world_commit(w);
      break;
    case 3:
      if (pick(w, 8) == 0) world_fault(w);
      break;
    case 4:
      tick(w->f, pick(w, BEAT / 8));
      break;
    case 5:
      client_read(&w->clients[i]);
      client_tidy(&w->clients[i]);
      break;
    case 6:
      client_receive(w, i, 0);
      break;
    case 7:
      if (w->clients[i].up) give_back(w->f, i);
      break;
    case 8:
    case 9:
      for (uint64_t n = pick(w, 16); n > 0 && client_receive(w, i, 1); n--) {
        if (w->f->ntokens[i] == MLFAB__SERVER_SENDS) give_back(w->f, i);
      }
      break;
    default:
      for (uint32_t at = 0; at < MLFAB__SERVER_SPREADS * W; at++) {
        for (uint64_t n = pick(w, 16); n > 0 && client_hand(w, i, at / W, at % W); n--) continue;
      }
      break;
  }
}

/* Faults end, but stuck and mute distributors stay so, and the scheduler may be gone. Then every worker
 * that reads gets its answer. */
static void world_settle(world *w) {
  uint32_t open = 1;
  for (uint32_t i = 0; i < W; i++) {
    memset(w->clients[i].broken, 0, sizeof w->clients[i].broken);
    if (!w->clients[i].up) client_up(w, i);
  }
  for (uint32_t round = 0; open > 0; round++) {
    assert_true(round < 4000);
    if (w->scheduler) world_plan(w);
    open = 0;
    for (uint32_t i = 0; i < W; i++) {
      client *c = &w->clients[i];
      while (client_receive(w, i, 1)) give_back(w->f, i);
      give_back(w->f, i);
      for (uint32_t slot = 0; slot < MLFAB__SERVER_SPREADS; slot++) {
        for (uint32_t k = 0; k < W; k++) {
          while (client_hand(w, i, slot, k)) continue;
        }
      }
      client_tidy(c);
      for (uint32_t k = 0; k < OPEN; k++) open += c->pulls[k].request != 0 && !c->stuck;
    }
    tick(w->f, BEAT / 8);
  }
}

static void test_random(void **state) {
  fixture *f = *state;
  static world w;
  uint64_t runs = test_cases(40), finished = 0;
  open_model(f, MLFAB_SYNC_ASYNC);
  uint32_t incarnation = 1;
  for (uint64_t seed = 1; seed <= runs; seed++) {
    memset(&w, 0, sizeof w);
    w.f = f;
    mlfab__rng_seed(&w.prng, seed);
    f->world = &w;
    w.scheduler = 1;
    mlfab__server_scheduler_hello(&f->server, f->now);
    incarnation += 100;
    for (uint32_t i = 0; i < W; i++) {
      w.clients[i].up = 1;
      w.clients[i].incarnation = incarnation;
      hello(f, i, incarnation);
    }
    for (int n = 0; n < 4000; n++) world_step(&w);
    world_settle(&w);
    for (uint32_t i = 0; i < W; i++) {
      client_down(&w, i);
      incarnation = w.clients[i].incarnation > incarnation ? w.clients[i].incarnation : incarnation;
    }
    all_over(f);
    assert_int_equal(w.nknown, 0);
    finished += w.finished;
  }
  f->world = NULL;
  uint32_t held = 0;
  for (uint32_t b = 0; b < f->server.store.nblocks; b++) held += f->server.store.blocks[b].refs;
  assert_int_equal(held, f->server.store.positions);
  assert_true(finished > 20 * runs);
  assert_true(f->stats.spreads_answered > runs && f->stats.spreads_failed > runs);
}

/* A change whose answer was lost is requested again: it is not made twice, and another worker's later
 * change stays. */
static void test_change_asked_again(void **state) {
  fixture *f = *state;
  open_model(f, MLFAB_SYNC_ASYNC);
  mlfab__sync_ask first = {.ask = 1, .tensor = MLFAB_ALL}, second = first, third;
  first.consistency = (mlfab_sync){.kind = MLFAB_SYNC_SSP, .staleness = 3};
  second.consistency = (mlfab_sync){.kind = MLFAB_SYNC_BSP};
  third = first;
  third.ask = 2;
  const mlfab__sync_ask *asks[] = {&first, &second, &first, &third};
  for (uint32_t i = 0; i < 4; i++) {
    frame(f, i == 1, MLFAB__SYNC, mlfab__encode_sync_ask(f->meta, asks[i]));
    assert_int_equal(f->server.clocks[0].sync.kind,
                     i == 1 || i == 2 ? MLFAB_SYNC_BSP : MLFAB_SYNC_SSP);
  }
  f->nlog = 0;
}

int main(void) {
#define TEST(name) cmocka_unit_test_setup_teardown(name, open_server, close_server)
  const struct CMUnitTest tests[] = {
      TEST(test_small_and_unscheduled),
      TEST(test_announced_and_placed),
      TEST(test_plan_of_others),
      TEST(test_turns),
      TEST(test_slow_readers),
      TEST(test_lent),
      TEST(test_lent_and_lost),
      TEST(test_scheduler_lost),
      TEST(test_rounds),
      TEST(test_spread),
      TEST(test_frames),
      TEST(test_no_spread),
      TEST(test_row_with_odd_one),
      TEST(test_member_fails),
      TEST(test_spread_refused),
      TEST(test_distributor_lost),
      TEST(test_distributor_lost_late),
      TEST(test_members_leave),
      TEST(test_last_member_leaves),
      TEST(test_distributor_stuck),
      TEST(test_distributor_busy),
      TEST(test_distributor_silent),
      TEST(test_distributor_slow),
      TEST(test_idle_link_takes_back),
      TEST(test_late_turn),
      TEST(test_reconnect),
      TEST(test_unpinned),
      TEST(test_change_asked_again),
      TEST(test_bad_frames),
      TEST(test_no_memory),
      TEST(test_random),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
