/* test_growth.c - workers that join a running fabric, leave it and die on the way, in whole simulated fabrics.
 *
 * Every worker adds 1 to its own elements of the model, which several servers hold, so a pull tells which updates it
 * contains at which server. With BSP the updates of worker 0, which is there from the first round to the last, count
 * the rounds: each other worker must be missing from all rounds before one, the same at all servers, and be in all
 * rounds from that one on. */
#include "../unit/on_device.h"
#include "job.h"

enum { COUNT = 6144, STEPS = 10, MOST = 5, UNKNOWN = -1 };

enum phase { ABSENT, OPENS, IDLES, COMPUTES, PUSHES, PULLS, LEAVES, AWAY, DEAD };

typedef struct worker {
  struct job *job;
  uint32_t rank;
  enum phase phase;
  int busy;          /* inside a blocking call */
  uint64_t comes_ns; /* a joiner: when it opens */
  int dies;          /* it crashes: 1 before it has a model, 2 before its first update */
  uint64_t step;     /* updates pushed */
  int64_t first;     /* BSP: its first round, once it is known */
  uint64_t asked_ns;
  mlfab_request request;
  float u[COUNT], w[COUNT];
} worker;

typedef struct job {
  world w;
  uint64_t random, seed;
  uint32_t founders, most;
  mlfab_sync sync;
  worker of[MOST];
} job;

static uint64_t below(job *j, uint64_t n) { return chance_below(&j->random, n); }

static int over(const worker *me) { return me->phase >= AWAY; }

/* The configuration of a node: workers 0..most-1 on the first hosts, servers on those behind. */
static mlfab_config node_config(job *j, uint32_t i) {
  mlfab_config c = world_config(&j->w, i);
  c.workers = j->founders;
  c.workers_max = j->most;
  return c;
}

static void open_node(job *j, uint32_t i) {
  mlfab_config c = node_config(j, i);
  sim_open(j->w.sim, i, &c, &j->w.node[i]);
}

/* --- one worker --- */

static void step_of(void *user);
static void join(worker *me);

static void compute(worker *me) {
  uint64_t ns = 1000000u * (1 + below(me->job, 12));
  me->phase = COMPUTES;
  me->asked_ns = mlfab_sim_clock(me->job->w.sim);
  assert_int_equal(mlfab_sim_at(me->job->w.sim, me->asked_ns + ns, step_of, me), 0);
}

static void judge_round(worker *me, const uint64_t *got) {
  job *j = me->job;
  uint64_t round = got[0];
  if (me->first == UNKNOWN) me->first = (int64_t)(round - me->step);
  if (me->first != (int64_t)(round - me->step))
    wrong("worker %u is at %llu in round %llu, and began in round %lld", me->rank,
          (unsigned long long)me->step, (unsigned long long)round, (long long)me->first);
  for (uint32_t o = 1; o < j->most; o++) {
    worker *other = &j->of[o];
    if (other->phase == DEAD) continue;
    if (other->first == UNKNOWN && got[o] > 0 && other->phase < LEAVES)
      other->first = (int64_t)(round - got[o]);
    uint64_t want = other->first == UNKNOWN || round < (uint64_t)other->first
                        ? 0
                        : round - (uint64_t)other->first;
    if (other->phase >= LEAVES && want > other->step) want = other->step;
    if (other->first != UNKNOWN && got[o] != want)
      wrong("round %llu has %llu updates of worker %u, which began in round %lld, not %llu",
            (unsigned long long)round, (unsigned long long)got[o], o, (long long)other->first,
            (unsigned long long)want);
  }
}

static void judge(worker *me) {
  job *j = me->job;
  uint64_t got[MOST] = {0};
  for (uint32_t i = 0; i < COUNT; i++) {
    uint32_t o = i % j->most;
    uint64_t n = (uint64_t)me->w[i];
    if (i < j->most) got[o] = n;
    if (n > j->of[o].step)
      wrong("element %u has %llu updates, of %llu", i, (unsigned long long)n,
            (unsigned long long)j->of[o].step);
    if (o == me->rank && n != me->step)
      wrong("worker %u has %llu of its own %llu updates, element %u", o, (unsigned long long)n,
            (unsigned long long)me->step, i);
    if (j->sync.kind == MLFAB_SYNC_BSP && n != got[o] && j->of[o].phase != DEAD)
      wrong("worker %u got %llu updates of worker %u in one place, %llu in another", me->rank,
            (unsigned long long)got[o], o, (unsigned long long)n);
  }
  if (j->sync.kind == MLFAB_SYNC_BSP) judge_round(me, got);
}

static int others_are_over(const job *j) {
  for (uint32_t k = 1; k < j->most; k++) {
    if (!over(&j->of[k])) return 0;
  }
  return 1;
}

/* Goes on with whatever has ended. Called after every event of the host, and when a computation ends. */
static void step_of(void *user) {
  worker *me = user;
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_buf update = {0, 0, me->u, COUNT}, image = {0, 0, me->w, COUNT};
  mlfab_result result;
  uint64_t now = mlfab_sim_clock(j->w.sim);
  int done = 0;
  if (me->busy || !node) return;
  /* Also while another joiner waits: some get their model at the same time. */
  if (me->phase < COMPUTES && me->rank >= j->founders && me->dies == 0) join(me);
  if ((me->phase == PUSHES || me->phase == PULLS) && now - me->asked_ns > 30000000000u)
    wrong("worker %u waits for more than 30 s in step %llu", me->rank,
          (unsigned long long)me->step);
  if (me->phase == COMPUTES && now > me->asked_ns) {
    for (uint32_t i = 0; i < COUNT; i++) me->u[i] = i % j->most == me->rank ? 1.0f : 0.0f;
    OK(node, mlfab_push_start(node, &update, 1, NULL, &me->request));
    me->step++;
    me->phase = PUSHES;
    me->asked_ns = now;
  } else if (me->phase == PUSHES || me->phase == PULLS) {
    OK(node, mlfab_test(node, me->request, &done, &result));
    if (!done) return;
    world_expect(node, result.status, 0, me->phase == PUSHES ? "push" : "pull");
    if (me->phase == PUSHES) {
      OK(node, mlfab_pull_start(node, &image, 1, NULL, &me->request));
      me->phase = PULLS;
      return;
    }
    judge(me);
    if (me->rank == 0 ? others_are_over(j) : me->step >= STEPS)
      me->phase = LEAVES;
    else
      compute(me);
  }
}

/* --- the fabric --- */

static void start_model(worker *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_model_options options = {.size = sizeof options, .slices = 6};
  mlfab_buf image = {0, 0, me->w, COUNT};
  options.consistency = j->sync;
  memset(me->w, 0, sizeof me->w);
  me->busy = 1;
  OK(node, mlfab_model_start(node, &options, &image, 1));
  me->busy = 0;
}

static void die(worker *me) {
  assert_int_equal(mlfab_sim_crash(me->job->w.sim, me->rank), 0);
  me->phase = DEAD;
}

static void join(worker *me) {
  job *j = me->job;
  if (me->phase == ABSENT && mlfab_sim_clock(j->w.sim) >= me->comes_ns) {
    open_node(j, me->rank);
    me->phase = OPENS;
    me->asked_ns = mlfab_sim_clock(j->w.sim);
  } else if (me->phase == OPENS && mlfab_sim_clock(j->w.sim) > me->asked_ns) {
    me->asked_ns = mlfab_sim_clock(
        j->w.sim); /* once at a time: a host that is paused has a deadline in the past */
    if (!sim_ready(j->w.node[me->rank])) return;
    me->phase = IDLES;
    OK(j->w.node[me->rank], mlfab_tensor_add(j->w.node[me->rank], 0, MLFAB_F32, COUNT));
  } else if (me->phase == IDLES && mlfab_sim_clock(j->w.sim) > me->asked_ns + 20000000u) {
    if (me->dies == 1) {
      die(me);
      return;
    }
    start_model(me);
    if (me->dies == 2) die(me);
    if (me->dies != 2) compute(me);
  }
}

static void leave(worker *me, int closes) {
  me->busy = 1;
  OK(me->job->w.node[me->rank], mlfab_finish(me->job->w.node[me->rank], 0));
  if (closes) mlfab_close(&me->job->w.node[me->rank]);
  me->busy = 0;
  me->phase = AWAY;
}

static void move_slices(job *j) {
  uint32_t list[3], n = 0;
  for (uint32_t s = 0; s < j->w.servers; s++) {
    if (below(j, 2) || (s + 1 == j->w.servers && n == 0)) list[n++] = s;
  }
  j->of[0].busy = 1;
  int code = mlfab_set_servers(j->w.node[0], list, n, 0);
  j->of[0].busy = 0;
  world_expect(j->w.node[0], code, 0, "set_servers");
}

static void begin(job *j, uint64_t seed) {
  memset(j, 0, sizeof *j);
  j->seed = j->random = seed;
  j->founders = 1 + (uint32_t)below(j, 3);
  j->most = j->founders + 1 + (uint32_t)below(j, MOST - j->founders);
  uint32_t servers = 1 + (uint32_t)below(j, 3);
  world_init(&j->w, j->most, servers, 1);
  static const uint32_t kinds[] = {MLFAB_SYNC_BSP, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP, MLFAB_SYNC_ASYNC,
                                   MLFAB_SYNC_DSPS};
  j->sync = (mlfab_sync){.size = sizeof j->sync, .kind = kinds[below(j, 5)], .staleness = 2};
  seeds_about(", kind %u", j->sync.kind);
  world_network(&j->w, seed);
  /* Slow servers: rounds end at different times at different servers. */
  for (uint32_t s = 0; s < servers; s++) {
    uint64_t rate = below(j, 2) ? 1250000000 : 2000000 + 1000000 * below(j, 20);
    assert_int_equal(mlfab_sim_set_rate(j->w.sim, j->most + s, rate, rate), 0);
  }
  for (uint32_t i = 0; i < j->w.nodes; i++) {
    if (i >= j->founders && i < j->most) continue;
    open_node(j, i);
  }
  for (uint32_t i = 0; i < j->w.nodes; i++)
    if (i < j->founders || i >= j->most) world_await(&j->w, i);
  for (uint32_t k = 0; k < j->most; k++) {
    worker *me = &j->of[k];
    me->job = j;
    me->rank = k;
    me->first = k < j->founders ? 0 : UNKNOWN;
    me->dies = k >= j->founders && below(j, 5) == 0 ? 1 + (int)below(j, 2) : 0;
    /* Some come at the same time. */
    me->comes_ns = mlfab_sim_clock(j->w.sim) + 30000000u * below(j, 4);
    assert_int_equal(mlfab_sim_watch(j->w.sim, k, step_of, me), 0);
  }
  for (uint32_t k = 0; k < j->founders; k++)
    OK(j->w.node[k], mlfab_tensor_add(j->w.node[k], 0, MLFAB_F32, COUNT));
  for (uint32_t k = 0; k < j->founders; k++) start_model(&j->of[k]);
  for (uint32_t k = 0; k < j->founders; k++) compute(&j->of[k]);
}

static void play(uint64_t seed) {
  static job j;
  begin(&j, seed);
  mlfab_sim_options faults = {
      .size = sizeof faults, .loss = 0.002, .reorder = 0.05, .pause = 0.3, .pause_ns = 50000000};
  int moves = below(&j, 3) == 0 && WORLD_COMPLETE;
  if (below(&j, 3) == 0) assert_int_equal(mlfab_sim_set_faults(j.w.sim, &faults), 0);
  while (j.of[0].phase != LEAVES) {
    sim_step(j.w.sim);
    for (uint32_t k = 1; k < j.most; k++) {
      if (j.of[k].phase < COMPUTES) join(&j.of[k]);
      if (j.of[k].phase == LEAVES) leave(&j.of[k], (int)below(&j, 2));
    }
    if (moves && below(&j, 4000) == 0) move_slices(&j);
  }
  mlfab_sim_set_faults(j.w.sim, NULL);
  mlfab_buf image = {0, 0, j.of[0].w, COUNT};
  OK(j.w.node[0], mlfab_pull(j.w.node[0], &image, 1, NULL, NULL));
  for (uint32_t i = 0; i < COUNT; i++) {
    const worker *o = &j.of[i % j.most];
    if ((uint64_t)j.of[0].w[i] != o->step)
      wrong("in the end element %u is %g, of %llu updates", i, (double)j.of[0].w[i],
            (unsigned long long)o->step);
  }
  for (uint32_t k = 0; k < j.w.nodes; k++) {
    if (world_saw(&j.w, MLFAB_EVENT_DEAD, (int32_t)k, 0) && k < j.most && j.of[k].dies == 0)
      wrong("worker %u was taken for dead", k);
  }
  world_close(&j.w);
}

static void test_joins(void **state) {
  (void)state;
  seeds_run("growth", test_cases(400), play);
}

/* Rounds do not wait for a process that has joined and has no model. It then begins in the round that is open. */
static void test_guest(void **state) {
  static job j;
  (void)state;
  memset(&j, 0, sizeof j);
  j.seed = j.random = 1;
  j.founders = 1;
  j.most = 2;
  j.sync = (mlfab_sync){.size = sizeof j.sync, .kind = MLFAB_SYNC_BSP};
  world_init(&j.w, 2, 2, 1);
  world_network(&j.w, 1);
  for (uint32_t i = 0; i < 4; i++) {
    j.of[i % 2].job = &j;
    if (i != 1) open_node(&j, i);
  }
  j.of[1].rank = 1;
  for (uint32_t i = 0; i < 4; i++)
    if (i != 1) world_await(&j.w, i);
  OK(j.w.node[0], mlfab_tensor_add(j.w.node[0], 0, MLFAB_F32, COUNT));
  start_model(&j.of[0]);
  open_node(&j, 1);
  world_await(&j.w, 1);
  mlfab_buf one[2] = {{0, 0, j.of[0].u, COUNT}, {0, 0, j.of[1].u, COUNT}};
  mlfab_buf image[2] = {{0, 0, j.of[0].w, COUNT}, {0, 0, j.of[1].w, COUNT}};
  for (uint32_t i = 0; i < COUNT; i++) j.of[0].u[i] = j.of[1].u[i] = 1.0f;
  uint64_t begun = mlfab_sim_clock(j.w.sim);
  for (int k = 0; k < 5; k++) {
    OK(j.w.node[0], mlfab_push(j.w.node[0], one, 1, NULL, NULL));
    OK(j.w.node[0], mlfab_pull(j.w.node[0], image, 1, NULL, NULL));
  }
  assert_true(mlfab_sim_clock(j.w.sim) - begun < WORLD_S);
  OK(j.w.node[1], mlfab_tensor_add(j.w.node[1], 0, MLFAB_F32, COUNT));
  start_model(&j.of[1]);
  assert_true(j.of[1].w[0] > 4.5f && j.of[1].w[0] < 5.5f);
  /* From here on a round waits for it. */
  mlfab_request pull;
  int done = 0;
  OK(j.w.node[0], mlfab_push(j.w.node[0], one, 1, NULL, NULL));
  OK(j.w.node[0], mlfab_pull_start(j.w.node[0], image, 1, NULL, &pull));
  mlfab_sim_run(j.w.sim, WORLD_S);
  OK(j.w.node[0], mlfab_test(j.w.node[0], pull, &done, NULL));
  assert_int_equal(done, 0);
  OK(j.w.node[1], mlfab_push(j.w.node[1], &one[1], 1, NULL, NULL));
  OK(j.w.node[0], mlfab_wait(j.w.node[0], pull, 0, NULL));
  OK(j.w.node[1], mlfab_pull(j.w.node[1], &image[1], 1, NULL, NULL));
  assert_true(j.of[0].w[0] > 6.5f && j.of[0].w[0] < 7.5f);
  assert_memory_equal(j.of[0].w, j.of[1].w, sizeof j.of[0].w);
  world_close(&j.w);
}

/* A new process of worker 0 comes with first weights, which the standing model does not take, and counts again. */
static void test_first_worker_again(void **state) {
  static job j;
  (void)state;
  memset(&j, 0, sizeof j);
  j.seed = j.random = 1;
  j.founders = j.most = 2;
  j.sync = (mlfab_sync){.size = sizeof j.sync, .kind = MLFAB_SYNC_BSP};
  world_init(&j.w, 2, 2, 1);
  world_open(&j.w, 1);
  for (uint32_t k = 0; k < 2; k++) {
    j.of[k].job = &j;
    j.of[k].rank = k;
    for (uint32_t i = 0; i < COUNT; i++) j.of[k].u[i] = 1.0f;
    OK(j.w.node[k], mlfab_tensor_add(j.w.node[k], 0, MLFAB_F32, COUNT));
    start_model(&j.of[k]);
  }
  assert_int_equal(mlfab_sim_crash(j.w.sim, 0), 0);
  mlfab_buf one[2] = {{0, 0, j.of[0].u, COUNT}, {0, 0, j.of[1].u, COUNT}};
  mlfab_buf image[2] = {{0, 0, j.of[0].w, COUNT}, {0, 0, j.of[1].w, COUNT}};
  for (int k = 0; k < 3; k++) {
    OK(j.w.node[1], mlfab_push(j.w.node[1], &one[1], 1, NULL, NULL));
    OK(j.w.node[1], mlfab_pull(j.w.node[1], &image[1], 1, NULL, NULL));
  }
  uint64_t begun = mlfab_sim_clock(j.w.sim);
  open_node(&j, 0);
  world_await(&j.w, 0);
  OK(j.w.node[0], mlfab_tensor_add(j.w.node[0], 0, MLFAB_F32, COUNT));
  start_model(&j.of[0]);
  assert_true(mlfab_sim_clock(j.w.sim) - begun < WORLD_S);
  assert_true(j.of[0].w[0] > 2.5f && j.of[0].w[0] < 3.5f);
  for (uint32_t k = 0; k < 2; k++) OK(j.w.node[k], mlfab_push(j.w.node[k], &one[k], 1, NULL, NULL));
  for (uint32_t k = 0; k < 2; k++) {
    OK(j.w.node[k], mlfab_pull(j.w.node[k], &image[k], 1, NULL, NULL));
    assert_true(j.of[k].w[0] > 4.5f && j.of[k].w[0] < 5.5f);
  }
  world_close(&j.w);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_joins), cmocka_unit_test(test_guest),
                                     cmocka_unit_test(test_first_worker_again)};
  return cmocka_run_group_tests_name("growth", tests, NULL, NULL);
}
