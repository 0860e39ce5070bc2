/* test_api_dag.c - task graphs of the user's own, call by call: what is refused and how, rounds and
 * their numbers, triggers from outside and from inside, persistent ones, and what failures leave
 * behind.
 *
 * Fabrics live in the simulator; random task graphs over broken links are in tests/sim/test_dag.c. */
#include "world.h"
#include "../../mlfab_partial.h"
#include "../testing.h"

#include <pthread.h>

typedef struct rig { /* a worker of a fabric, with a task graph */
  mlfab *ctx;
  mlfab_dag *dag;
  uint32_t rank;
  int code, persistent, done;
  uint64_t timeout_ns, round;
  int64_t in[4], out[4];
  /* What its computing operations have seen. */
  uint64_t ran, last_round;
  int answer;        /* what they return */
  uint32_t triggers; /* an operation that they trigger, plus one */
} rig;

static world w;
static rig rigs[WORLD_NODES];

static void begin(uint32_t workers) {
  memset(rigs, 0, sizeof rigs);
  world_init(&w, workers, 1, 0);
  w.config.heartbeat_ns = 100 * WORLD_MS;
  world_open(&w, 1);
  for (uint32_t i = 0; i < workers; i++) {
    rigs[i].ctx = w.node[i];
    rigs[i].rank = i;
    rigs[i].timeout_ns = 2ull * WORLD_S;
    OK(w.node[i], mlfab_dag_create(w.node[i], &rigs[i].dag));
  }
}

static int end(void **state) {
  (void)state;
  for (uint32_t i = 0; i < w.workers; i++)
    if (rigs[i].dag && w.node[i]) OK(w.node[i], mlfab_dag_close(&rigs[i].dag));
  world_close(&w);
  return 0;
}

/* A test whose world is closed behind it. */
#define WORLD_TEST(name) TEST_WITH(name, NULL, end)

/* What the worker was told last. */
static const mlfab_error *said(uint32_t i) {
  static mlfab_error error;
  mlfab_last_error(w.node[i], &error);
  return &error;
}

/* The request of this worker fails, and the worker is told who is to blame. */
static void fails(uint32_t i, mlfab_request request, int code, int32_t rank) {
  EXPECT(w.node[i], mlfab_wait(w.node[i], request, 0, NULL), code);
  assert_int_equal(said(i)->rank, rank);
}

static void dies(uint32_t i) {
  assert_int_equal(mlfab_sim_crash(w.sim, i), 0);
  w.node[i] = NULL;
}

/* A blocking call of every worker, one inside the other. */
static void together(void (*call)(void *)) {
  for (uint32_t i = 0; i < w.workers; i++) {
    rigs[i].done = 0;
    if (w.node[i])
      assert_int_equal(mlfab_sim_at(w.sim, mlfab_sim_clock(w.sim) + 1 + i, call, &rigs[i]), 0);
  }
  for (uint32_t i = 0; i < w.workers; i++)
    while (w.node[i] && !rigs[i].done) assert_int_equal(mlfab_sim_step(w.sim), 1);
}

static void open_one(void *user) {
  rig *r = user;
  r->code = mlfab_dag_open(r->dag, r->persistent, r->timeout_ns);
  r->done = 1;
}

/* A round, begun and waited for. */
static void run_one(void *user) {
  rig *r = user;
  mlfab_request request;
  r->code = mlfab_dag_start(r->dag, r->timeout_ns, &request);
  if (!r->code) r->code = mlfab_wait(r->ctx, request, 0, NULL);
  r->done = 1;
}

static void wait_one(void *user) {
  rig *r = user;
  r->code = mlfab_dag_wait(r->dag, r->round, r->timeout_ns);
  r->done = 1;
}

/* The same, and how it ends for all. */
static void all_end(void (*call)(void *), int code) {
  together(call);
  for (uint32_t i = 0; i < w.workers; i++)
    if (w.node[i]) world_expect(w.node[i], rigs[i].code, code, "one of all");
}

static void open_all(int persistent) {
  for (uint32_t i = 0; i < w.workers; i++) rigs[i].persistent = persistent;
  all_end(open_one, 0);
}

static int note(void *user, uint64_t round) {
  rig *r = user;
  r->ran++;
  r->last_round = round;
  if (r->triggers) OK(r->ctx, mlfab_dag_trigger(r->dag, r->triggers - 1));
  return r->answer;
}

/* Worker 0 sends `out` to all others, who compute when it is there. */
static void spread(rig *r) {
  uint32_t op, then;
  if (r->rank > 0) {
    OK(r->ctx, mlfab_dag_recv(r->dag, 0, 5, r->in, sizeof r->in, &op));
    OK(r->ctx, mlfab_dag_compute(r->dag, note, r, &then));
    OK(r->ctx, mlfab_dag_after(r->dag, then, op));
    return;
  }
  for (uint32_t i = 1; i < w.workers; i++)
    OK(r->ctx, mlfab_dag_send(r->dag, (int32_t)i, 5, r->out, sizeof r->out, &op));
}

/* Its members only spread. */
static void begin_spread(uint32_t workers) {
  begin(workers);
  for (uint32_t i = 0; i < workers; i++) spread(&rigs[i]);
}

/* An operation that waits for its trigger. */
static uint32_t add_clock(rig *r) {
  uint32_t op;
  OK(r->ctx, mlfab_dag_nop(r->dag, &op));
  OK(r->ctx, mlfab_dag_set(r->dag, op, 0, MLFAB_DAG_OUTSIDE));
  return op;
}

/* The same, which calls note(). */
static uint32_t add_note(rig *r) {
  uint32_t op;
  OK(r->ctx, mlfab_dag_compute(r->dag, note, r, &op));
  OK(r->ctx, mlfab_dag_set(r->dag, op, 0, MLFAB_DAG_OUTSIDE));
  return op;
}

/* Sends behind another operation. */
static void add_send(rig *r, int32_t to, uint32_t tag, const void *data, uint64_t bytes,
                     uint32_t after) {
  uint32_t op;
  OK(r->ctx, mlfab_dag_send(r->dag, to, tag, data, bytes, &op));
  OK(r->ctx, mlfab_dag_after(r->dag, op, after));
}

/* All begin a round. */
static void start_all(uint64_t timeout_ns, mlfab_request *requests) {
  for (uint32_t i = 0; i < w.workers; i++)
    OK(w.node[i], mlfab_dag_start(rigs[i].dag, timeout_ns, &requests[i]));
}

/* --- what is refused --- */

WORLD_TEST(test_building) {
  uint32_t op = 77;
  int64_t x[2] = {0};
  begin(2);
  mlfab *n = w.node[0];
  mlfab_dag *d = rigs[0].dag, *none = NULL;
  assert_int_equal(mlfab_dag_create(NULL, &none), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_create(n, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_dag_nop(NULL, &op), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_nop(d, NULL), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_send(d, 2, 0, x, 8, &op), MLFAB_ERR_RANK_RANGE);
  EXPECT(n, mlfab_dag_send(d, -1, 0, x, 8, &op), MLFAB_ERR_RANK_RANGE);
  EXPECT(n, mlfab_dag_send(d, 0, 0, x, 8, &op), MLFAB_ERR_ARGUMENT); /* itself */
  EXPECT(n, mlfab_dag_send(d, 1, 0, NULL, 8, &op), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_recv(d, 1, 0, x, (1u << 30) + 1, &op), MLFAB_ERR_LIMIT);
  EXPECT(n, mlfab_dag_recv_reduce(d, 1, 0, x, 1ull << 61, MLFAB_I64, MLFAB_OP_SUM, &op),
         MLFAB_ERR_LIMIT);
  EXPECT(n, mlfab_dag_recv_reduce(d, 1, 0, x, 1, 99, MLFAB_OP_SUM, &op), MLFAB_ERR_DTYPE);
  EXPECT(n, mlfab_dag_recv_reduce(d, 1, 0, x, 1, MLFAB_F32, 5, &op), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_recv_reduce(d, 1, 0, x, 1, MLFAB_F32, MLFAB_OP_MEAN, &op),
         MLFAB_ERR_UNSUPPORTED);
  EXPECT(n, mlfab_dag_recv_reduce(d, 1, 0, (char *)x + 4, 1, MLFAB_F64, MLFAB_OP_SUM, &op),
         MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_compute(d, NULL, x, &op), MLFAB_ERR_ARGUMENT);
  assert_int_equal(op, 77);
  OK(n, mlfab_dag_nop(d, &op));
  assert_int_equal(op, 0); /* nothing was added by any of them */
  OK(n, mlfab_dag_send(d, 1, 0, NULL, 0, &op));
  assert_int_equal(op, 1);
  EXPECT(n, mlfab_dag_after(d, 2, 0), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_after(d, 0, 2), MLFAB_ERR_ARGUMENT);
  assert_non_null(strstr(said(0)->text, "no operation 2"));
  EXPECT(n, mlfab_dag_set(d, 2, 0, 0), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_set(d, 0, 0, 4), MLFAB_ERR_ARGUMENT);
  EXPECT(n, mlfab_dag_start(d, 0, &(mlfab_request){0}), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_dag_wait(d, 0, 0), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_dag_trigger(d, 0), MLFAB_ERR_STATE);
  assert_int_equal(mlfab_dag_close(NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_dag_close(&none), MLFAB_ERR_CLOSED);
}

/* The task graph of worker 0, anew. */
static mlfab_dag *afresh(void) {
  OK(w.node[0], mlfab_dag_close(&rigs[0].dag));
  OK(w.node[0], mlfab_dag_create(w.node[0], &rigs[0].dag));
  return rigs[0].dag;
}

static void flawed(mlfab_dag *d, int persistent, const char *text) {
  EXPECT(w.node[0], mlfab_dag_open(d, persistent, 0), MLFAB_ERR_ARGUMENT);
  assert_non_null(strstr(said(0)->text, text));
}

WORLD_TEST(test_flaws) {
  uint32_t a, b, c;
  int64_t x;
  begin(2);
  mlfab *n = w.node[0];
  mlfab_dag *d = rigs[0].dag;
  flawed(d, 0, "no operations");

  OK(n, mlfab_dag_nop(d, &a));
  OK(n, mlfab_dag_nop(d, &b));
  OK(n, mlfab_dag_nop(d, &c));
  OK(n, mlfab_dag_after(d, b, c));
  OK(n, mlfab_dag_after(d, c, b));
  OK(n, mlfab_dag_after(d, a, b));
  EXPECT(n, mlfab_dag_open(d, 0, 0), MLFAB_ERR_ARGUMENT);
  assert_true(strstr(said(0)->text, "operation 1 comes after itself") ||
              strstr(said(0)->text, "operation 2 comes after itself"));

  d = afresh();
  OK(n, mlfab_dag_nop(d, &a));
  OK(n, mlfab_dag_nop(d, &b));
  OK(n, mlfab_dag_after(d, b, a));
  OK(n, mlfab_dag_set(d, b, 2, 0));
  flawed(d, 0, "operation 1 needs 2");

  d = afresh();
  OK(n, mlfab_dag_recv(d, 1, 4, &x, 8, &a));
  OK(n, mlfab_dag_send(d, 1, 4, &x, 8, &b)); /* another direction */
  OK(n, mlfab_dag_recv_reduce(d, 1, 4, &x, 1, MLFAB_I64, MLFAB_OP_SUM, &c));
  flawed(d, 0, "operation 2");
  assert_non_null(strstr(said(0)->text, "worker 1 under tag 4"));

  /* Persistent ones that nothing holds: no clock at all; one beside the way. */
  d = afresh();
  OK(n, mlfab_dag_nop(d, &a));
  EXPECT(n, mlfab_dag_open(d, 1, 0), MLFAB_ERR_ARGUMENT);
  OK(n, mlfab_dag_recv(d, 1, 0, &x, 8, &b));
  OK(n, mlfab_dag_set(d, b, 0, MLFAB_DAG_OPTIONAL));
  flawed(d, 1, "without end");
  (void)add_clock(&rigs[0]);

  /* Nothing of this was told to anybody: both open theirs now. */
  (void)add_clock(&rigs[1]);
  open_all(1);
  EXPECT(n, mlfab_dag_open(d, 1, 0), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_dag_nop(d, &a), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_dag_after(d, 0, 1), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_dag_set(d, 0, 0, 0), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_dag_start(d, 0, &(mlfab_request){0}), MLFAB_ERR_STATE);
  EXPECT(n, mlfab_dag_trigger(d, 0), MLFAB_ERR_ARGUMENT); /* not OUTSIDE */
  EXPECT(n, mlfab_dag_trigger(d, 9), MLFAB_ERR_ARGUMENT);
}

/* --- rounds --- */

WORLD_TEST(test_rounds) {
  mlfab_request request;
  begin_spread(4);
  open_all(0);
  for (int64_t round = 0; round < 70; round++) {
    rigs[0].out[3] = 1000 + round;
    all_end(run_one, 0);
    for (uint32_t i = 1; i < 4; i++) {
      assert_int_equal(rigs[i].in[3], 1000 + round);
      assert_int_equal(rigs[i].ran, round + 1);
      assert_int_equal(rigs[i].last_round, round);
      OK(w.node[i], mlfab_dag_wait(rigs[i].dag, (uint64_t)round, 1));
      EXPECT(w.node[i], mlfab_dag_wait(rigs[i].dag, (uint64_t)round + 1, 1), MLFAB_ERR_STATE);
    }
  }
  EXPECT(w.node[1], mlfab_dag_start(rigs[1].dag, 0, NULL), MLFAB_ERR_ARGUMENT);
  OK(w.node[1], mlfab_dag_start(rigs[1].dag, 0, &request));
  EXPECT(w.node[1], mlfab_dag_start(rigs[1].dag, 0, &request), MLFAB_ERR_AGAIN);
  for (uint32_t i = 0; i < 4; i++) {
    rigs[i].round = 70;
    if (i != 1) OK(w.node[i], mlfab_dag_start(rigs[i].dag, 0, &(mlfab_request){0}));
  }
  all_end(wait_one, 0);
  OK(w.node[1], mlfab_wait(w.node[1], request, 0, NULL));
}

/* Two types and operations, one of them in a large message. */
WORLD_TEST(test_reduce) {
  enum { LARGE = 300000 };
  static double sums[2][LARGE];
  static float most[2][5];
  uint32_t op;
  begin(2);
  mlfab_dag *to = rigs[0].dag, *from = rigs[1].dag;
  OK(w.node[0], mlfab_dag_recv_reduce(to, 1, 1, sums[0], LARGE, MLFAB_F64, MLFAB_OP_SUM, &op));
  OK(w.node[0], mlfab_dag_recv_reduce(to, 1, 2, most[0], 5, MLFAB_F32, MLFAB_OP_MAX, &op));
  OK(w.node[1], mlfab_dag_send(from, 0, 1, sums[1], sizeof sums[1], &op));
  OK(w.node[1], mlfab_dag_send(from, 0, 2, most[1], sizeof most[1], &op));
  open_all(0);
  for (int round = 0; round < 3; round++) {
    for (int i = 0; i < 2; i++) {
      for (int k = 0; k < LARGE; k++) sums[i][k] = k + 10 * i + round;
      for (int k = 0; k < 5; k++) most[i][k] = (float)((k + 2 * i) % 3);
    }
    all_end(run_one, 0);
    for (int k = 0; k < LARGE; k++) assert_true(sums[0][k] == 2.0 * k + 10 + 2 * round);
    for (int k = 0; k < 5; k++) assert_true(most[0][k] == (float)(k % 3 ? k % 3 : 2));
  }
}

static int scribble(void *user, uint64_t round) {
  memset(user, (int)round + 100, 100000);
  return 0;
}

/* What comes after a message may change what was sent. */
WORLD_TEST(test_sent) {
  static unsigned char from[100000], to[100000];
  uint32_t op, then;
  begin(2);
  OK(w.node[0], mlfab_dag_send(rigs[0].dag, 1, 0, from, sizeof from, &op));
  OK(w.node[0], mlfab_dag_compute(rigs[0].dag, scribble, from, &then));
  OK(w.node[0], mlfab_dag_after(rigs[0].dag, then, op));
  OK(w.node[1], mlfab_dag_recv(rigs[1].dag, 0, 0, to, sizeof to, &op));
  open_all(0);
  for (int round = 0; round < 5; round++) {
    all_end(run_one, 0);
    for (size_t i = 0; i < sizeof to; i++) assert_int_equal(to[i], round ? round + 99 : 0);
  }
}

/* --- triggers --- */

/* Two clocks of three start a round of a worker alone; what an operation computes triggers
 * another. */
WORLD_TEST(test_triggers) {
  uint32_t clock[3], quorum;
  mlfab_request request;
  int done;
  begin(1);
  rig *r = &rigs[0];
  mlfab *n = r->ctx;
  for (int i = 0; i < 3; i++) {
    OK(n, mlfab_dag_nop(r->dag, &clock[i]));
    OK(n, mlfab_dag_set(r->dag, clock[i], 0, MLFAB_DAG_OUTSIDE | MLFAB_DAG_OPTIONAL));
  }
  OK(n, mlfab_dag_compute(r->dag, note, r, &quorum));
  for (int i = 0; i < 3; i++) OK(n, mlfab_dag_after(r->dag, quorum, clock[i]));
  OK(n, mlfab_dag_set(r->dag, quorum, 2, 0));
  r->triggers = add_clock(r) + 1;
  open_all(0);
  EXPECT(n, mlfab_dag_trigger(r->dag, clock[0]), MLFAB_ERR_STATE); /* no round */
  for (uint64_t round = 0; round < 20; round++) {
    OK(n, mlfab_dag_start(r->dag, 0, &request));
    OK(n, mlfab_dag_trigger(r->dag, clock[round % 3]));
    OK(n, mlfab_dag_trigger(r->dag, clock[round % 3])); /* once a round */
    OK(n, mlfab_test(n, request, &done, NULL));
    assert_false(done);
    assert_int_equal(r->ran, round);
    OK(n, mlfab_dag_trigger(r->dag, clock[(round + 1) % 3]));
    assert_int_equal(r->ran, round + 1);
    OK(n, mlfab_wait(n, request, 0, NULL));
  }
}

static void pull_clock(void *user) {
  rig *r = user;
  OK(r->ctx, mlfab_dag_trigger(r->dag, 0));
}

/* Rounds of a persistent task graph go from worker to worker, driven by one; the others only look. */
WORLD_TEST(test_persistent) {
  uint32_t clock = 0, op, in;
  begin(3);
  for (uint32_t i = 0; i < 3; i++) {
    rig *r = &rigs[i];
    if (i == 0) {
      in = clock = add_clock(r);
    } else {
      OK(r->ctx, mlfab_dag_recv(r->dag, (int32_t)i - 1, 0, r->in, sizeof r->in, &in));
      OK(r->ctx, mlfab_dag_compute(r->dag, note, r, &op));
      OK(r->ctx, mlfab_dag_after(r->dag, op, in));
      in = op;
    }
    if (i == 2) continue;
    add_send(r, (int32_t)i + 1, 0, i ? r->in : r->out, sizeof r->in, in);
  }
  open_all(1);
  for (uint64_t round = 0; round < 40; round++) {
    rigs[0].out[0] = (int64_t)round * 3;
    OK(w.node[0], mlfab_dag_trigger(rigs[0].dag, clock));
    OK(w.node[2], mlfab_dag_wait(rigs[2].dag, round, 0));
    assert_int_equal(rigs[2].in[0], round * 3);
    assert_int_equal(rigs[2].last_round, round);
    OK(w.node[0], mlfab_dag_wait(rigs[0].dag, round, 0));
  }
  /* One may wait for a round that is far ahead. */
  for (int i = 0; i < 5; i++)
    assert_int_equal(mlfab_sim_at(w.sim, mlfab_sim_clock(w.sim) + (1 + (uint64_t)i) * 10 * WORLD_MS,
                                  pull_clock, &rigs[0]),
                     0);
  OK(w.node[2], mlfab_dag_wait(rigs[2].dag, 44, 0));
  assert_int_equal(rigs[2].last_round, 44);
  /* Closing in any order disturbs nobody, as nothing was triggered. */
  OK(w.node[1], mlfab_dag_close(&rigs[1].dag));
  mlfab_sim_run(w.sim, WORLD_S);
  OK(w.node[0], mlfab_dag_close(&rigs[0].dag));
  OK(w.node[2], mlfab_dag_close(&rigs[2].dag));
  mlfab_sim_run(w.sim, WORLD_S);
  mlfab_stats stats;
  OK(w.node[0], mlfab_get_stats(w.node[0], &stats, sizeof stats));
  assert_int_equal(stats.collective_epochs, 1);
}

/* --- failures --- */

/* An operation fails: everybody hears who and why, once, and rounds go on. */
WORLD_TEST(test_callback) {
  begin_spread(4);
  /* So that nobody is done before all are. */
  for (uint32_t i = 0; i < 4; i++) {
    uint32_t op;
    if (i == 2) continue;
    OK(w.node[i], mlfab_dag_recv(rigs[i].dag, 2, 9, NULL, 0, &op));
    add_send(&rigs[2], (int32_t)i, 9, NULL, 0, 1);
  }
  open_all(0);
  for (uint64_t round = 0; round < 12; round++) {
    int fails = round % 3 == 1;
    rigs[2].answer = fails ? 41 : 0;
    all_end(run_one, fails ? MLFAB_ERR_CALLBACK : 0);
    for (uint32_t i = 0; fails && i < 4; i++) {
      assert_int_equal(said(i)->rank, 2);
      assert_non_null(strstr(said(i)->text, "operation 1 of worker 2 has returned 41"));
      EXPECT(w.node[i], mlfab_dag_wait(rigs[i].dag, round, 0), MLFAB_ERR_STATE);
    }
    for (uint32_t i = 0; !fails && i < 4; i++) OK(w.node[i], mlfab_dag_wait(rigs[i].dag, round, 0));
    assert_int_equal(rigs[2].last_round, round);
  }
}

/* What is started and triggered while no epoch stands comes as soon as one does; and a failure that
 * is not seen by then is told by a trigger. */
TEST(test_early) {
  uint32_t clock[2];
  mlfab_request request[2];
  for (int persistent = 0; persistent < 2; persistent++) {
    begin(2);
    for (uint32_t i = 0; i < 2; i++) {
      rig *r = &rigs[i];
      uint32_t in;
      clock[i] = add_note(r);
      add_send(r, 1 - (int32_t)i, 0, r->out, 8, clock[i]);
      OK(r->ctx, mlfab_dag_recv(r->dag, 1 - (int32_t)i, 0, r->in, 8, &in));
    }
    open_all(persistent);
    for (uint64_t round = 0; round < 12; round += 2) {
      for (uint32_t i = 0; i < 2; i++) {
        if (!persistent) OK(w.node[i], mlfab_dag_start(rigs[i].dag, 0, &request[i]));
        rigs[i].out[0] = (int64_t)(round + i);
        OK(w.node[i], mlfab_dag_trigger(rigs[i].dag, clock[i]));
      }
      for (uint32_t i = 0; i < 2; i++) {
        OK(w.node[i], mlfab_dag_wait(rigs[i].dag, round, 0));
        assert_int_equal(rigs[i].in[0], (int64_t)(round + 1 - i));
        if (!persistent) OK(w.node[i], mlfab_wait(w.node[i], request[i], 0, NULL));
      }
      if (!persistent) start_all(0, request);
      rigs[1].answer = 3;
      OK(w.node[1], mlfab_dag_trigger(rigs[1].dag, clock[1]));
      rigs[1].answer = 0;
      EXPECT(w.node[1], mlfab_dag_trigger(rigs[1].dag, clock[1]),
             persistent ? MLFAB_ERR_CALLBACK : MLFAB_ERR_STATE);
      mlfab_sim_run(w.sim, round % 4 * WORLD_MS);
      if (!persistent) {
        for (uint32_t i = 0; i < 2; i++)
          EXPECT(w.node[i], mlfab_wait(w.node[i], request[i], 0, NULL), MLFAB_ERR_CALLBACK);
      } else if (round % 4 == 0) {
        EXPECT(w.node[0], mlfab_dag_wait(rigs[0].dag, round + 1, 0), MLFAB_ERR_CALLBACK);
      } else {
        EXPECT(w.node[0], mlfab_dag_trigger(rigs[0].dag, clock[0]), MLFAB_ERR_CALLBACK);
        assert_int_equal(said(0)->rank, 1);
      }
    }
    (void)end(NULL);
  }
}

WORLD_TEST(test_callback_alone) {
  begin(1);
  const uint32_t op = add_note(&rigs[0]);
  open_all(1);
  for (uint64_t round = 0; round < 6; round++) {
    rigs[0].answer = round % 2 == 1;
    OK(w.node[0], mlfab_dag_trigger(rigs[0].dag, op));
    EXPECT(w.node[0], mlfab_dag_wait(rigs[0].dag, round, 0), round % 2 ? MLFAB_ERR_CALLBACK : 0);
    assert_int_equal(rigs[0].last_round, round);
  }
}

/* Somebody does not start his round: the others name him when their time is up. */
WORLD_TEST(test_missing) {
  begin_spread(3);
  open_all(0);
  mlfab_request request[3];
  OK(w.node[1], mlfab_dag_start(rigs[1].dag, WORLD_S, &request[1]));
  OK(w.node[2], mlfab_dag_start(rigs[2].dag, WORLD_S, &request[2]));
  fails(1, request[1], MLFAB_ERR_TIMEOUT, 0);
  fails(2, request[2], MLFAB_ERR_TIMEOUT, 0);
  mlfab_sim_run(w.sim, WORLD_S);
  EXPECT(w.node[0], mlfab_dag_start(rigs[0].dag, WORLD_S, &request[0]), MLFAB_ERR_TIMEOUT);
  all_end(run_one, 0);
}

WORLD_TEST(test_sizes_differ) {
  uint32_t op;
  begin(2);
  OK(w.node[0], mlfab_dag_send(rigs[0].dag, 1, 3, rigs[0].out, 16, &op));
  OK(w.node[1], mlfab_dag_recv(rigs[1].dag, 0, 3, rigs[1].in, 24, &op));
  open_all(0);
  mlfab_request request[2];
  start_all(WORLD_S, request);
  fails(1, request[1], MLFAB_ERR_MISMATCH, 0);
  /* The sender may have been through with it. */
  mlfab_sim_run(w.sim, WORLD_S);
}

/* A message that its receiver does not know. */
WORLD_TEST(test_tags_differ) {
  uint32_t op;
  mlfab_request request[2];
  begin(2);
  OK(w.node[0], mlfab_dag_send(rigs[0].dag, 1, 3, rigs[0].out, 16, &op));
  OK(w.node[1], mlfab_dag_recv(rigs[1].dag, 0, 4, rigs[1].in, 16, &op));
  open_all(0);
  start_all(WORLD_S, request);
  int code = mlfab_wait(w.node[1], request[1], 0, NULL);
  assert_true(code == MLFAB_ERR_MISMATCH || code == MLFAB_ERR_TIMEOUT);
  assert_int_equal(said(1)->rank, 0);
}

/* One frees its task graph in a round; another dies; a third one's rank is then told. */
WORLD_TEST(test_leaving) {
  begin_spread(4);
  open_all(0);
  all_end(run_one, 0);
  mlfab_request request[4];
  for (uint32_t i = 1; i < 4; i++)
    OK(w.node[i], mlfab_dag_start(rigs[i].dag, 5ull * WORLD_S, &request[i]));
  OK(w.node[3], mlfab_dag_close(&rigs[3].dag));
  EXPECT(w.node[3], mlfab_wait(w.node[3], request[3], 0, NULL), MLFAB_ERR_CANCELLED);
  fails(1, request[1], MLFAB_ERR_CANCELLED, 3);
  EXPECT(w.node[2], mlfab_wait(w.node[2], request[2], 0, NULL), MLFAB_ERR_CANCELLED);
  mlfab_sim_run(w.sim, WORLD_S);
  EXPECT(w.node[0], mlfab_dag_start(rigs[0].dag, 0, &request[0]), MLFAB_ERR_CANCELLED);
  (void)end(NULL);

  begin_spread(4);
  open_all(0);
  OK(w.node[2], mlfab_dag_start(rigs[2].dag, 5ull * WORLD_S, &request[2]));
  dies(1);
  fails(2, request[2], MLFAB_ERR_PEER_DEAD, 1);
  mlfab_sim_run(w.sim, WORLD_S);
  for (int again = 0; again < 2; again++) {
    EXPECT(w.node[0], mlfab_dag_start(rigs[0].dag, 0, &request[0]), MLFAB_ERR_PEER_DEAD);
    assert_int_equal(said(0)->rank, 1);
  }
  assert_non_null(strstr(said(0)->text, "worker 1 does not take part"));
}

/* The numbers of members change, the ranks of a task graph do not. */
WORLD_TEST(test_others_die) {
  uint32_t op;
  begin(4);
  OK(w.node[3], mlfab_dag_send(rigs[3].dag, 2, 0, rigs[3].out, 8, &op));
  OK(w.node[2], mlfab_dag_recv(rigs[2].dag, 3, 0, rigs[2].in, 8, &op));
  for (uint32_t i = 0; i < 2; i++) OK(w.node[i], mlfab_dag_nop(rigs[i].dag, &op));
  open_all(0);
  all_end(run_one, 0);
  dies(1);
  mlfab_sim_run(w.sim, 5ull * WORLD_S);
  all_end(run_one, MLFAB_ERR_PEER_DEAD);
  for (int64_t round = 0; round < 3; round++) {
    rigs[3].out[0] = round + 5;
    all_end(run_one, 0);
    assert_int_equal(rigs[2].in[0], round + 5);
  }
}

/* --- the context closes --- */

TEST(test_abandoned) {
  begin(2);
  for (uint32_t i = 0; i < 2; i++) (void)add_note(&rigs[i]);
  open_all(1);
  world_close(&w); /* frees what is open; a leak would be told by the sanitizer */
}

/* --- threads --- */

static int count_down(void *user, uint64_t round) { return (void)round, ((rig *)user)->ran++, 0; }

static void *trigger_many(void *user) {
  rig *r = user;
  for (uint64_t round = 0; round < 2000; round++)
    if (mlfab_dag_trigger(r->dag, 0) || mlfab_dag_wait(r->dag, round, 0)) r->code = 1;
  return NULL;
}

/* Several threads trigger and wait, one of them from inside: under the thread sanitizer, too. */
TEST(test_threads) {
  mlfab_config config;
  pthread_t threads[3];
  uint32_t inner;
  memset(rigs, 0, sizeof rigs);
  mlfab_config_init(&config);
  rig *r = &rigs[0];
  assert_int_equal(mlfab_open(&config, &r->ctx, NULL), 0);
  OK(r->ctx, mlfab_dag_create(r->ctx, &r->dag));
  (void)add_note(r);
  OK(r->ctx, mlfab_dag_compute(r->dag, count_down, &rigs[1], &inner));
  OK(r->ctx, mlfab_dag_set(r->dag, inner, 0, MLFAB_DAG_OUTSIDE));
  r->triggers = inner + 1;
  OK(r->ctx, mlfab_dag_open(r->dag, 1, 0));
  for (int i = 0; i < 3; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, trigger_many, r), 0);
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  assert_int_equal(r->code, 0);
  assert_true(r->ran >= 2000);
  assert_int_equal(r->ran, rigs[1].ran);
  OK(r->ctx, mlfab_dag_close(&r->dag));
  assert_int_equal(mlfab_close(&r->ctx), 0);
}

TESTS(NULL, NULL)
