/* test_joiners.c - workers that join loops of pushes, pulls, collectives and barriers, in any order.
 *
 * All workers run one loop of random calls, each call after the one before. Joiners come at any time, some die before or
 * in their first step, all others finish after some steps. No call fails, and every call ends. */
#include "../unit/on_device.h"
#include "job.h"

enum { COUNT = 64, STEPS = 8, MOST = 5, CALLS = 6, LONG_S = 20 };

enum call { PUSH, PULL, ALLREDUCE, BARRIER, BROADCAST, KINDS };
static const char *const call_words[] = {"push", "pull", "allreduce", "barrier", "broadcast"};

enum phase { ABSENT, OPENS, IDLES, RUNS, LEAVES, AWAY, DEAD };

typedef struct worker {
  struct job *job;
  uint32_t rank;
  enum phase phase;
  int busy, open;    /* inside a blocking call; a call is open */
  uint64_t comes_ns; /* a joiner: when it opens; when it crashes, 0: never */
  uint64_t dies_ns;
  uint64_t step, pushes, next_ns, asked_ns;
  uint32_t at; /* its next call in the loop */
  mlfab_request request;
  float u[COUNT], w[COUNT], x[4];
} worker;

typedef struct job {
  world w;
  uint64_t random;
  uint32_t founders, most, calls;
  enum call loop[CALLS];
  mlfab_sync sync;
  int model;
  int leaving;      /* a worker finishes: the others go on meanwhile */
  int died, broken; /* a worker; what it was in */
  worker of[MOST];
} job;

static uint64_t below(job *j, uint64_t n) { return chance_below(&j->random, n); }
static uint64_t now_of(job *j) { return mlfab_sim_clock(j->w.sim); }

static void open_node(job *j, uint32_t i) {
  mlfab_config c = world_config(&j->w, i);
  c.workers = j->founders;
  c.workers_max = j->most;
  sim_open(j->w.sim, i, &c, &j->w.node[i]);
}

static void step_of(void *user);

static void think(worker *me) {
  job *j = me->job;
  me->next_ns = now_of(j) + 100000u * (1 + below(j, me->rank == 1 ? 200 : 40));
  assert_int_equal(mlfab_sim_at(j->w.sim, me->next_ns + 1, step_of, me), 0);
}

static int others_are_over(const job *j) {
  for (uint32_t k = 1; k < j->most; k++)
    if (j->of[k].phase < AWAY) return 0;
  return 1;
}

static void begin_call(worker *me) {
  mlfab *node = me->job->w.node[me->rank];
  mlfab_buf update = {0, 0, me->u, COUNT}, image = {0, 0, me->w, COUNT};
  mlfab_vec vec = {me->x, 1};
  int code = 0;
  me->open = 1;
  me->asked_ns = now_of(me->job);
  switch (me->job->loop[me->at]) {
    case PUSH:
      code = mlfab_push_start(node, &update, 1, NULL, &me->request);
      me->pushes++;
      break;
    case PULL:
      code = mlfab_pull_start(node, &image, 1, NULL, &me->request);
      break;
    case ALLREDUCE:
      me->x[0] = 1.0f;
      code = mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &me->request);
      break;
    case BARRIER:
      code = mlfab_barrier_start(node, NULL, &me->request);
      break;
    default:
      code = mlfab_broadcast_start(node, 0, me->x, sizeof me->x, NULL, &me->request);
  }
  if (code == MLFAB_ERR_PEER_DEAD && me->job->died)
    me->job->broken = 1; /* one that took part has died: the loops do not match any more */
  else
    world_expect(node, code, 0, call_words[me->job->loop[me->at]]);
}

static void step_of(void *user) {
  worker *me = user;
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_result result;
  int done = 0;
  if (me->busy || !node || me->phase != RUNS || j->broken) return;
  if (!me->open) {
    if (now_of(j) > me->next_ns) begin_call(me);
    return;
  }
  OK(node, mlfab_test(node, me->request, &done, &result));
  if (!done) {
    if (now_of(j) - me->asked_ns > LONG_S * SECOND)
      wrong("worker %u waits for ever in the %s of its step %llu", me->rank,
            call_words[j->loop[me->at]], (unsigned long long)me->step);
    return;
  }
  me->open = 0;
  if (result.status == MLFAB_ERR_PEER_DEAD && j->died) {
    j->broken = 1;
    return;
  }
  world_expect(node, result.status, 0, call_words[j->loop[me->at]]);
  say(j->w.sim, "worker %u: %s of step %llu", me->rank, call_words[j->loop[me->at]],
      (unsigned long long)me->step);
  if (++me->at == j->calls) {
    me->at = 0;
    me->step++;
  }
  if (me->at == 0 && (me->rank == 0 ? others_are_over(j) : me->step >= STEPS && !j->leaving)) {
    me->phase = LEAVES;
    j->leaving = 1;
  } else {
    think(me);
  }
}

static void start_model(worker *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_model_options options = {.size = sizeof options, .slices = 4};
  mlfab_buf image = {0, 0, me->w, COUNT};
  options.consistency = j->sync;
  memset(me->w, 0, sizeof me->w);
  for (uint32_t i = 0; i < COUNT; i++) me->u[i] = i % j->most == me->rank;
  me->busy = 1;
  OK(node, mlfab_tensor_add(node, 0, MLFAB_F32, COUNT));
  OK(node, mlfab_model_start(node, &options, &image, 1));
  me->busy = 0;
}

/* What a worker does outside its loop: it comes, dies, leaves. */
static void look_at(worker *me) {
  job *j = me->job;
  mlfab **node = &j->w.node[me->rank];
  uint64_t now = now_of(j);
  if (me->dies_ns && me->phase > ABSENT && me->phase <= RUNS && me->step == 0 && !me->busy &&
      now >= me->dies_ns) {
    say(j->w.sim, "worker %u dies", me->rank);
    assert_int_equal(mlfab_sim_crash(j->w.sim, me->rank), 0);
    me->phase = DEAD;
    j->died = 1;
  } else if (me->phase == ABSENT && now >= me->comes_ns) {
    open_node(j, me->rank);
    me->phase = OPENS;
  } else if (me->phase == OPENS && !me->busy && sim_ready(*node)) {
    say(j->w.sim, "worker %u has joined", me->rank);
    if (j->model) start_model(me);
    me->phase = RUNS;
    think(me);
  } else if (me->phase == LEAVES && !me->busy) {
    me->busy = 1;
    OK(*node, mlfab_finish(*node, 0));
    me->busy = j->leaving = 0;
    me->phase = AWAY;
    say(j->w.sim, "worker %u has finished", me->rank);
  }
}

static void make_loop(job *j) {
  enum call collective = below(j, 3) ? ALLREDUCE : BROADCAST;
  for (uint32_t k = 0; k < KINDS; k++) {
    if (!j->model && k <= PULL) continue;
    if ((k == ALLREDUCE || k == BROADCAST) && k != collective) continue;
    if (k > PULL && below(j, 3) == 0) continue;
    uint32_t at = (uint32_t)below(j, j->calls + 1);
    for (uint32_t i = j->calls++; i > at; i--) j->loop[i] = j->loop[i - 1];
    j->loop[at] = (enum call)k;
  }
  if (j->calls == 0) j->loop[j->calls++] = ALLREDUCE;
}

static void begin(job *j, uint64_t seed) {
  static const uint32_t kinds[] = {MLFAB_SYNC_BSP, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP,
                                   MLFAB_SYNC_ASYNC};
  memset(j, 0, sizeof *j);
  j->random = seed;
  j->founders = 1 + (uint32_t)below(j, 3);
  j->most = j->founders + 1 + (uint32_t)below(j, MOST - j->founders);
  uint32_t servers = 1 + (uint32_t)below(j, 2);
  world_init(&j->w, j->most, servers, 1);
  j->sync = (mlfab_sync){.size = sizeof j->sync, .kind = kinds[below(j, 4)], .staleness = 1};
  j->model = below(j, 5) != 0;
  make_loop(j);
  char words[128] = "";
  for (uint32_t i = 0; i < j->calls; i++) {
    strcat(words, " ");
    strcat(words, call_words[j->loop[i]]);
  }
  seeds_about(", kind %u,%s", j->sync.kind, words);
  world_network(&j->w, seed);
  for (uint32_t i = 0; i < j->w.nodes; i++)
    if (i < j->founders || i >= j->most) open_node(j, i);
  for (uint32_t i = 0; i < j->w.nodes; i++)
    if (i < j->founders || i >= j->most) world_await(&j->w, i);
  for (uint32_t k = 0; k < j->most; k++) {
    worker *me = &j->of[k];
    me->job = j;
    me->rank = k;
    me->comes_ns = now_of(j) + MS * below(j, 120);
    if (k >= j->founders && below(j, 6) == 0) me->dies_ns = me->comes_ns + MS * below(j, 30);
    assert_int_equal(mlfab_sim_watch(j->w.sim, k, step_of, me), 0);
  }
  for (uint32_t k = 0; k < j->founders && j->model; k++) start_model(&j->of[k]);
  for (uint32_t k = 0; k < j->founders; k++) {
    j->of[k].phase = RUNS;
    think(&j->of[k]);
  }
}

static void play(uint64_t seed) {
  static job j;
  begin(&j, seed);
  while (j.of[0].phase != LEAVES && !j.broken) {
    sim_step(j.w.sim);
    for (uint32_t k = 1; k < j.most; k++) look_at(&j.of[k]);
  }
  mlfab_buf image = {0, 0, j.of[0].w, COUNT};
  if (j.broken) {
    world_close(&j.w);
    return;
  }
  if (j.model) OK(j.w.node[0], mlfab_pull(j.w.node[0], &image, 1, NULL, NULL));
  for (uint32_t i = 0; i < COUNT && j.model; i++) {
    const worker *o = &j.of[i % j.most];
    if (o->phase != DEAD && (uint64_t)j.of[0].w[i] != o->pushes)
      wrong("in the end element %u is %g, of %llu updates", i, (double)j.of[0].w[i],
            (unsigned long long)o->pushes);
  }
  world_close(&j.w);
}

static void test_loops(void **state) {
  (void)state;
  seeds_run("joiners", test_cases(600), play);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_loops)};
  return cmocka_run_group_tests_name("joiners", tests, NULL, NULL);
}
