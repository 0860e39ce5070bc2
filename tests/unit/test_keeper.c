/* test_keeper.c - core/replica/keeper.c: the server role with a keeper and a made-up replica, from seeds.
 *
 * Two workers push to a model of doubles; links break, updates have NaN, and moments reach the replica late or never.
 * The replica is a copy of the server's memory at a moment. Checks, after every event: the true distance of server and
 * replica is within Div_max, from the moment on at which the replica joins; an answer that was asked to be DURABLE is
 * posted only when the replica, known to be in sync, has the update; while a step beyond Div_max is not at the replica,
 * nobody hears of it, and pulls are not answered. At the end, when moments go through: every update is answered, once.
 *
 * MLFAB_SEED=n runs one seed alone. */
#include "core/replica/keeper.h"

#include "core/base/rng.h"
#include "core/sparse/sparse_apply.h"

#include <math.h>
#include "../testing.h"
#include "ports.h"

enum { COUNT = 4096, BYTES = COUNT * 8, WORKERS = 2, UPDATES = 24, WINDOW_MOST = 8 };

enum fate { UNSENT, SENT, ANSWERED };

typedef struct update {
  enum fate fate;
  int repeated;           /* it was decided when it was sent last */
  int durable, nan, half; /* half: of the first half of the model only */
  int32_t code;
  double scale;
  double values[COUNT];
} update;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__server server;
  mlfab__rng rng;
  double div_max, halves;
  int rounds;
  int stopped; /* the process was stopped for longer than its lease, and has not looked yet */
  uint32_t generation[WORKERS];
  int connected[WORKERS];
  update updates[WORKERS][UPDATES + 1]; /* by number, from 1 */
  uint64_t next[WORKERS];               /* the next number to send for the first time */
  /* The moment that is sent, and what the replica has. */
  int sending, has_any, joins;
  double moment[COUNT], replica[COUNT];
  mlfab__window moment_windows[WORKERS], replica_windows[WORKERS];
  uint64_t seed, holds, answers, pulls, hidden;
} fixture;

static fixture f;

static double distance(void);
static double most(void) { return f.div_max * (1 + 1e-9); }
static int in_sync(void) { return f.server.keeping->phase == MLFAB__KEEPER_IN_SYNC; }
static int alone(void) { return f.server.keeping->phase == MLFAB__KEEPER_ALONE; }

static void on_answer(uint32_t worker, const mlfab__push_ack *ack) {
  if (ack->generation != f.generation[worker]) return;
  assert_in_range(ack->seq, 1, UPDATES);
  update *u = &f.updates[worker][ack->seq];
  assert_int_equal(u->fate, SENT);
  u->fate = ANSWERED;
  u->code = ack->code;
  f.answers++;
  int has = mlfab__windows_ask(&f.replica_windows[worker], ack->seq, 1) != MLFAB__UNDECIDED;
  assert_int_equal(ack->code != 0, u->nan); /* repeated: WITHDRAWN */
  if (u->durable && ack->code == 0) assert_true(in_sync() && has);
  if (!alone() && distance() > most()) assert_true(has || ack->code != 0);
  if (f.stopped) assert_true(in_sync() && has);
  /* Not beyond what it says: later ones may be decided, too, and may be lost yet. */
  if (u->repeated) assert_true(ack->v_train <= ack->seq);
}

static void port_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self;
  mlfab__push_ack ack;
  if (type != MLFAB__PUSH_ACK) return;
  assert_int_equal(mlfab__decode_push_ack(meta, bytes, &ack), 0);
  on_answer(peer, &ack);
}
static void port_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)code;
  fail_msg("seed %llu: dropped: %s", (unsigned long long)f.seed, text);
}

static uint64_t below(uint64_t n) { return mlfab__rng_below(&f.rng, n); }
static int chance(double p) { return mlfab__rng_unit(&f.rng) < p; }

/* ---- the model and its distance ---- */

static void read_model(double *to) {
  const mlfab__store *store = &f.server.store;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    for (uint32_t p = 0; p < s->count; p++) {
      uint64_t at = (uint64_t)p * store->block_bytes;
      memcpy((uint8_t *)to + s->offset + at, store->blocks[store->w[s->first + p]].data,
             mlfab__min(store->block_bytes, s->bytes - at));
    }
  }
}

/* From what the replica has, or will have when it joins. */
static double distance(void) {
  static double model[COUNT];
  const double *from = in_sync() ? f.replica : f.moment;
  double squares = 0.0;
  read_model(model);
  for (int i = 0; i < COUNT; i++) squares += (model[i] - from[i]) * (model[i] - from[i]);
  return sqrt(squares);
}

/* At most one commit beyond Div_max, which the server hides. */
static void check(void) {
  if (alone() || distance() <= most()) return;
  f.hidden++;
  assert_true(f.server.keeper->shows(&f.server) < MLFAB__SHOWS_ALL);
  assert_int_equal(f.server.keeping->ledger.committed, f.server.keeping->ledger.acknowledged + 1);
}

/* ---- workers ---- */

static void say_hello(uint32_t worker) {
  mlfab__hello h = {worker, 1, MLFAB_ROLE_WORKER, 0, 0, 0, 0, 0};
  mlfab__hello_ack ack;
  assert_int_equal(mlfab__server_hello(&f.server, worker, &h, &ack, 1000), 0);
  f.generation[worker] = ack.generation;
  f.connected[worker] = 1;
  mlfab__window window = {.top = ack.top, .incarnation = 1};
  memcpy(window.applied, ack.applied, sizeof window.applied);
  memcpy(window.dropped, ack.dropped, sizeof window.dropped);
  for (uint64_t seq = 1; seq <= ack.v_train; seq++)
    assert_int_not_equal(mlfab__windows_ask(&window, seq, 1), MLFAB__UNDECIDED);
  for (uint64_t seq = 1; seq < f.next[worker]; seq++) {
    update *u = &f.updates[worker][seq];
    enum mlfab__decision known = mlfab__windows_ask(&window, seq, 1);
    if (u->fate != SENT) continue;
    if (known == MLFAB__UNDECIDED) {
      u->fate = UNSENT;
    } else {
      mlfab__push_ack answer = {
          seq, 1, ack.generation, known == MLFAB__APPLIED ? 0 : MLFAB_ERR_NOT_FINITE, 0, 0, 0};
      on_answer(worker, &answer);
    }
  }
}

static void say_push(uint32_t worker, uint64_t seq) {
  uint8_t meta[512];
  update *u = &f.updates[worker][seq];
  uint32_t bytes = u->half ? BYTES / 2 : BYTES;
  mlfab__segment segment = {0, bytes};
  uint64_t version = 0;
  mlfab__push p;
  memset(&p, 0, sizeof p);
  p.seq = seq;
  p.members = p.segments = p.versions = 1;
  p.generation = f.generation[worker];
  p.bytes = p.eager = bytes;
  p.scale = u->scale;
  p.progress = seq - 1;
  p.flags = u->durable ? MLFAB__PUSH_DURABLE : 0;
  u->fate = SENT;
  u->repeated = mlfab__windows_ask(&f.server.windows.windows[worker], seq, 1) != MLFAB__UNDECIDED;
  mlfab__frame_in in = {MLFAB__PUSH, mlfab__encode_push(meta, &p, &segment, &version), bytes, meta,
                        u->values};
  mlfab__server_frame(&f.server, (mlfab__at){MLFAB__LINK_WORKER, worker, 1000}, &in);
}

/* Sends the oldest update that is to be sent (again), if few are under way. 0: there is none. */
static int push(uint32_t worker) {
  int open = 0;
  if (!f.connected[worker]) return 0;
  for (uint64_t seq = 1; seq < f.next[worker]; seq++) {
    if (f.updates[worker][seq].fate == UNSENT) {
      say_push(worker, seq);
      return 1;
    }
    open += f.updates[worker][seq].fate == SENT;
  }
  if (f.next[worker] > UPDATES || open >= WINDOW_MOST) return 0;
  update *u = &f.updates[worker][f.next[worker]];
  u->scale = chance(0.2) ? -0.5 : 1.0;
  u->durable = chance(0.5);
  u->nan = chance(0.05);
  double size = f.div_max > 0.0 && f.div_max < 1e9 ? f.div_max * 0.3 / sqrt(COUNT) : 1.0;
  int same = chance(0.3); /* collinear updates meet the bound */
  for (int i = 0; i < COUNT; i++)
    u->values[i] = size * (same ? 1.0 : 2.0 * mlfab__rng_unit(&f.rng) - 1.0);
  u->half = chance(f.halves);
  if (u->nan) u->values[below(COUNT / 2)] = NAN;
  say_push(worker, f.next[worker]++);
  return 1;
}

/* Asks for the whole model. Returns the number of the request. */
static uint64_t ask(uint32_t worker) {
  static uint64_t request = 0;
  uint8_t meta[512];
  mlfab__segment segment = {0, BYTES};
  uint64_t since = 0;
  mlfab__pull p = {.request = ++request, .segments = 1};
  mlfab__frame_in in = {MLFAB__PULL, mlfab__encode_pull(meta, &p, &segment, &since), 0, meta, NULL};
  mlfab__server_frame(&f.server, (mlfab__at){MLFAB__LINK_WORKER, worker, 1000}, &in);
  return request;
}

/* Returns how many bytes of the model the server sends now. */
static uint64_t take(uint32_t worker, double *got) {
  uint8_t out[MLFAB_META_MAX];
  uint64_t bytes = 0;
  mlfab__frame_out frame = {.meta = out};
  while (mlfab__server_next(&f.server, (mlfab__at){MLFAB__LINK_WORKER, worker, 1000}, &frame)) {
    mlfab__model model;
    assert_int_equal(mlfab__decode_model(out, frame.meta_bytes, &model), 0);
    memcpy((uint8_t *)got + bytes, frame.bulk, model.bytes);
    bytes += model.bytes;
    mlfab__server_taken(&f.server, (mlfab__at){MLFAB__LINK_WORKER, worker, 1000}, &frame);
    mlfab__server_sent(&f.server, (mlfab__at){MLFAB__LINK_WORKER, worker, 1000}, frame.token);
  }
  return bytes;
}

/* Pulls the whole model, as far as the server answers. */
static void pull(uint32_t worker) {
  static double got[COUNT];
  if (!f.connected[worker]) return;
  uint64_t request = ask(worker), bytes = take(worker, got);
  if (bytes == BYTES) {
    f.pulls++;
    assert_false(f.stopped);
    assert_true(alone() || distance() <= most());
    if (f.div_max == 0.0 && in_sync()) assert_memory_equal(got, f.replica, BYTES);
  } else {
    assert_int_equal(bytes, 0);
    assert_true(f.rounds || f.server.keeper->shows(&f.server) < MLFAB__SHOWS_ALL);
    uint8_t meta[512];
    mlfab__pull_cancel cancel = {request};
    mlfab__frame_in in = {MLFAB__PULL_CANCEL, mlfab__encode_pull_cancel(meta, &cancel), 0, meta,
                          NULL};
    mlfab__server_frame(&f.server, (mlfab__at){MLFAB__LINK_WORKER, worker, 1000}, &in);
  }
}

/* ---- the replica ---- */

static void send_moment(int joins) {
  if (f.sending || f.server.apply.applying > MLFAB__APPLY_HELD) return;
  f.sending = 1;
  f.joins = joins && alone();
  read_model(f.moment);
  memcpy(f.moment_windows, f.server.windows.windows, sizeof f.moment_windows);
  mlfab__keeper_moment(&f.server, joins);
}

static void arrive(void) {
  if (!f.sending) return;
  f.sending = 0;
  memcpy(f.replica, f.moment, sizeof f.replica);
  memcpy(f.replica_windows, f.moment_windows, sizeof f.replica_windows);
  mlfab__keeper_has(&f.server);
}

static void lose_replica(void) {
  f.sending = 0;
  mlfab__keeper_alone(&f.server);
}

/* It has no lease, and does not know it yet. */
static int leased(void *above, uint64_t now_ns) {
  (void)above, (void)now_ns;
  return !f.stopped;
}

/* The copy looks at its lease, and gets another one. */
static void wake(void) {
  if (!f.stopped) return;
  mlfab__keeper_freeze(&f.server, 1);
  f.stopped = 0;
  mlfab__keeper_freeze(&f.server, 0);
}

/* ---- a seed ---- */

static void open_world(uint64_t seed) {
  mlfab__port port = {&f, port_post, no_ready, port_drop, no_detach, no_event, NULL, NULL};
  memset(&f, 0, sizeof f);
  f.seed = seed;
  mlfab__rng_seed(&f.rng, seed);
  assert_int_equal(mlfab__env_init(&f.env, NULL), 0);
  mlfab_config_init(&f.config);
  f.config.servers = 1;
  f.config.workers = WORKERS;
  f.config.block_bytes = f.config.chunk_bytes = 4096;
  f.config.eager_bytes = 1 << 20;
  f.config.heartbeat_ns = 500000000;
  f.config.model_max_bytes = 1 << 30;
  static const double bounds[] = {0.0, 1.0, 10.0, HUGE_VAL};
  f.div_max = bounds[below(4)];
  f.rounds = chance(0.3);
  f.halves = chance(0.3) ? 0.5 : 0.0;
  assert_int_equal(mlfab__server_init(&f.server, &f.env, &f.config, 0, &port, &f.stats), 0);
  mlfab__sparse_attach(&f.server);
  assert_int_equal(mlfab__keeper_attach(&f.server, f.div_max), 0);
  f.server.keeping->leased = leased;
  mlfab__define d;
  uint8_t meta[256], table[MLFAB__TENSOR_INFO_BYTES];
  mlfab__tensor_info info = {0, MLFAB_F64, COUNT};
  memset(&d, 0, sizeof d);
  d.tensors = 1;
  d.options.optimizer = chance(0.5) ? MLFAB_OPTIMIZER_MOMENTUM : MLFAB_OPTIMIZER_SGD;
  d.options.gamma = chance(0.5) ? 0.9 : 0.5;
  d.options.adadelay_c = 1.0, d.options.beta1 = 0.9, d.options.beta2 = 0.999;
  d.options.epsilon = 1e-8;
  d.options.slices = 1 + (uint32_t)below(4);
  d.options.consistency.kind = f.rounds ? MLFAB_SYNC_BSP : MLFAB_SYNC_ASYNC;
  assert_null(mlfab__keeper_check(&d.options, f.div_max, 0));
  mlfab__encode_tensor_info(table, &info);
  for (uint32_t w = 0; w < WORKERS; w++) {
    f.next[w] = 1;
    say_hello(w);
    mlfab__frame_in in = {MLFAB__DEFINE, mlfab__encode_define(meta, &d), sizeof table, meta, table};
    mlfab__server_frame(&f.server, (mlfab__at){MLFAB__LINK_WORKER, w, 1000}, &in);
  }
  assert_int_equal(f.server.phase, MLFAB__MODEL_STANDS);
  for (uint32_t w = 0; w < WORKERS; w++) say_hello(w);
}

static void event(void) {
  uint32_t w = (uint32_t)below(WORKERS);
  switch (below(12)) {
    case 0:
      if (!f.connected[w]) {
        say_hello(w);
      } else if (chance(0.3)) {
        mlfab__server_lost(&f.server, w, 1000);
        f.connected[w] = 0;
      }
      break;
    case 1:
    case 2:
      send_moment(chance(0.7));
      break;
    case 3:
    case 4:
      arrive();
      break;
    case 5:
      if (!f.sending || !f.joins) mlfab__keeper_joined(&f.server);
      break;
    case 6:
      if (chance(0.15)) lose_replica();
      if (chance(0.2)) f.stopped = 1;
      if (chance(0.5)) wake();
      break;
    case 7:
      pull(w);
      break;
    default:
      push(w);
  }
  f.holds += f.server.apply.applying == MLFAB__APPLY_HELD;
  check();
}

static uint64_t unanswered(void) {
  uint64_t n = 0;
  for (uint32_t w = 0; w < WORKERS; w++)
    for (uint64_t seq = 1; seq <= UPDATES; seq++) n += f.updates[w][seq].fate != ANSWERED;
  return n;
}

static void run(uint64_t seed, uint64_t *holds, uint64_t *pulls) {
  open_world(seed);
  for (int i = 0; i < 150; i++) event();
  /* Everything goes through now. */
  wake();
  for (int i = 0; i < 400 && unanswered() > 0; i++) {
    for (uint32_t w = 0; w < WORKERS; w++) {
      if (!f.connected[w]) say_hello(w);
      while (push(w)) continue;
      check();
    }
    send_moment(1);
    check();
    arrive();
    check();
    mlfab__keeper_joined(&f.server);
    check();
  }
  if (unanswered() > 0)
    fail_msg("seed %llu: %llu updates without an answer", (unsigned long long)seed,
             (unsigned long long)unanswered());
  *holds += f.holds;
  *pulls += f.pulls;
  mlfab__server_free(&f.server);
  assert_int_equal(f.env.bytes, 0);
}

static int say_seed(void **state) {
  (void)state;
  if (f.seed) print_message("MLFAB_SEED=%llu\n", (unsigned long long)f.seed);
  return 0;
}

TEST_WITH(test_seeds, NULL, say_seed) {
  uint64_t n = test_cases(400);
  uint64_t holds = 0, pulls = 0;
  for (SEEDS(seed, 400)) run(seed, &holds, &pulls);
  f.seed = 0;
  print_message("%llu seeds: %llu events with a commit held back, %llu pulls\n",
                (unsigned long long)n, (unsigned long long)holds, (unsigned long long)pulls);
  if (testing_whole()) assert_true(holds > n && pulls > n);
}

/* In lock step, with an update held back whenever the replica gets one: a pull gets on all the same, slice by slice. */
TEST_WITH(test_pulls_under_pushes, NULL, say_seed) {
  static double got[COUNT];
  uint32_t slices = 0;
  for (uint64_t seed = 1; seed <= 200; seed++) {
    open_world(seed);
    if (f.div_max == 0.0 && !f.rounds) {
      send_moment(1), arrive();
      send_moment(1), arrive();
      mlfab__keeper_joined(&f.server);
      uint64_t bytes = 0, turns = 0;
      while (f.next[0] < 4) push(0);
      ask(1);
      for (; bytes < BYTES; turns++) {
        if (f.server.apply.applying == MLFAB__APPLY_NONE && !push(0)) break;
        send_moment(0), arrive();
        uint64_t more = take(1, got + bytes / sizeof *got);
        assert_true(more > 0);
        assert_memory_equal(got + bytes / sizeof *got, f.replica + bytes / sizeof *got, more);
        bytes += more;
      }
      assert_int_equal(bytes, BYTES);
      slices = turns > slices ? (uint32_t)turns : slices;
    }
    mlfab__server_free(&f.server);
  }
  f.seed = 0;
  assert_true(slices > 1);
}

/* A bound that could not be kept is refused, and so is one that is no bound. */
TEST(test_refused) {
  mlfab_model_options options;
  memset(&options, 0, sizeof options);
  options.optimizer = MLFAB_OPTIMIZER_ADAM;
  assert_non_null(mlfab__keeper_check(&options, 1.0, 0));
  assert_null(mlfab__keeper_check(&options, 0.0, 0));
  assert_null(mlfab__keeper_check(&options, HUGE_VAL, 1));
  options.optimizer = MLFAB_OPTIMIZER_SGD;
  assert_null(mlfab__keeper_check(&options, 1.0, 0));
  assert_non_null(mlfab__keeper_check(&options, 1.0, 1));
  options.weight_decay = 0.1;
  assert_non_null(mlfab__keeper_check(&options, 1.0, 0));
  open_world(1);
  mlfab__server_free(&f.server);
  f.seed = 0;
  mlfab__port port = {&f, port_post, no_ready, port_drop, no_detach, no_event, NULL, NULL};
  assert_int_equal(mlfab__server_init(&f.server, &f.env, &f.config, 0, &port, &f.stats), 0);
  assert_int_equal(mlfab__keeper_attach(&f.server, NAN), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__keeper_attach(&f.server, -1.0), MLFAB_ERR_ARGUMENT);
  assert_null(f.server.keeper);
  mlfab__server_free(&f.server);
}

TESTS(NULL, NULL)
