/* test_consistency.c - every consistency model in whole fabrics: which updates a pull may lack, and changes
 * of the model while pulls are delayed.
 *
 * Every worker adds 1 to its own elements of the tensors that it pushes, so the result of a pull tells
 * exactly which updates it contains. In two thirds of the fabrics a worker's updates cover some tensors
 * only, so that not every server has a part of them. */
#include "../unit/on_device.h"
#include "job.h"

enum { COUNT = 6144, STEPS = 12, MOST = 6, SERVERS = 4, TENSORS = 4, PART = COUNT / TENSORS };

typedef struct worker {
  enum { COMPUTES, PUSHES, PULLS, JOINED } phase;
  uint64_t until;         /* end of computing */
  uint64_t step;          /* updates pushed */
  uint64_t lost[TENSORS]; /* of these, dropped */
  uint32_t pulled;        /* tensors of the pull, as bits */
  mlfab_request push, pull;
  uint64_t asked_ns;
  int early; /* the pull starts with the push, and may lack it */
  float u[COUNT], w[COUNT];
} worker;

typedef struct job {
  world w;
  uint64_t random;
  mlfab_sync sync;
  int change; /* the model changes in one of so many steps; 0: never */
  int sparse; /* updates and pulls cover some tensors; 2: always the same for a worker */
  double speed[MOST];
  worker of[MOST];
  uint64_t seed;
  uint64_t changes;
  int late; /* a model that drops was in force at some time */
} job;

static uint64_t below(job *j, uint64_t n) { return chance_below(&j->random, n); }

/* User conditions: stale synchronous with 2. */
static int may_pull(void *user, const mlfab_sync_state *s) {
  (void)user;
  return s->iteration <= s->v_train + 2;
}
static int complete(void *user, const mlfab_sync_state *s) {
  (void)user;
  return s->arrived >= s->members;
}

static mlfab_sync random_sync(job *j) {
  mlfab_sync s;
  memset(&s, 0, sizeof s);
  s.size = sizeof s;
  s.kind = (uint32_t)below(j, MLFAB_SYNC_COUNT);
  s.staleness = (int64_t)below(j, 4);
  s.need = 1 + (uint32_t)below(j, j->w.workers);
  s.soft = (uint32_t)below(j, 2);
  s.only_fastest = (uint32_t)below(j, 2);
  s.keep_late = (uint32_t)below(j, 2);
  s.chance = (double)below(j, 5) / 4;
  s.alpha = (double)below(j, 3) / 2;
  return s;
}

/* The tensors of a worker's update, as bits: some, but never none. */
static uint32_t touched(const job *j, uint32_t k, uint64_t step) {
  if (j->sparse == 2) step = 0;
  uint32_t bits = (uint32_t)((j->seed * 7919 + k * 131 + step) * 0x9e3779b97f4a7c15u >> 41) % 16;
  return j->sparse && bits ? bits : (1u << TENSORS) - 1;
}

/* How many of a worker's first updates have the tensor. */
static double with_tensor(const job *j, uint32_t k, double steps, uint32_t tensor) {
  uint32_t n = 0;
  for (uint64_t s = 0; (double)s < steps; s++) n += touched(j, k, s) >> tensor & 1;
  return (double)n;
}

static uint32_t buffers(mlfab_buf bufs[TENSORS], float *data, uint32_t bits) {
  uint32_t n = 0;
  for (uint32_t t = 0; t < TENSORS; t++)
    if (bits >> t & 1) bufs[n++] = (mlfab_buf){t, 0, data + (size_t)t * PART, PART};
  return n;
}

static void compute(job *j, uint32_t k) {
  double ms = 10.0 * j->speed[k] * (0.5 + (double)below(j, 1000) / 1000.0);
  j->of[k].phase = COMPUTES;
  j->of[k].until = mlfab_sim_clock(j->w.sim) + (uint64_t)(ms * 1e6);
}

/* The least number of others' updates that worker k's pull must contain. PSSP does not check again a pull
 * that the soft barrier releases: if a pull skipped a server, the next one may be two iterations ahead
 * there, and is answered when one of them is complete. */
static double least(const job *j, double step) {
  const mlfab_sync *s = &j->sync;
  int always = s->kind == MLFAB_SYNC_PSSP && s->chance >= 1.0 && !s->only_fastest && !s->soft;
  if (s->kind == MLFAB_SYNC_BSP) return step;
  if (s->kind == MLFAB_SYNC_SSP || always) return step - (double)s->staleness;
  if (s->kind == MLFAB_SYNC_DSPS) return step - (double)(4 * s->staleness + 4);
  return s->kind == MLFAB_SYNC_USER ? step - 2.0 : 0.0;
}

static void judge(job *j, uint32_t k) {
  const worker *me = &j->of[k];
  double step = (double)me->step;
  for (uint32_t i = 0; i < COUNT; i++) {
    uint32_t o = i % j->w.workers, t = i / PART;
    double got = (double)me->w[i], all = with_tensor(j, o, step, t);
    int done = j->of[o].step == STEPS;
    if (!(me->pulled >> t & 1)) continue;
    if (o == k) {
      double early = me->early && (touched(j, k, me->step - 1) >> t & 1);
      double own = all - (double)me->lost[t] - early;
      if (got > all || (got < own && !j->late))
        wrong("worker %u has %g of its own %g updates, element %u", k, got, all, i);
    }
    if (j->change || o == k) continue;
    if (j->sync.kind == MLFAB_SYNC_BSP && (got > all || got < all))
      wrong("BSP: worker %u at %g got %g of worker %u, not %g", k, step, got, o, all);
    if (!done && got < with_tensor(j, o, least(j, step), t))
      wrong("worker %u at %g got %g of worker %u", k, step, got, o);
  }
}

static void begin_pull(job *j, uint32_t k) {
  worker *me = &j->of[k];
  mlfab_buf bufs[TENSORS];
  me->pulled = j->sparse ? 1 + (uint32_t)below(j, (1u << TENSORS) - 1) : (1u << TENSORS) - 1;
  uint32_t n = buffers(bufs, me->w, me->pulled);
  OK(j->w.node[k], mlfab_pull_start(j->w.node[k], bufs, n, NULL, &me->pull));
}

static void begin_push(job *j, uint32_t k) {
  worker *me = &j->of[k];
  mlfab_buf bufs[TENSORS];
  for (uint32_t i = 0; i < COUNT; i++) me->u[i] = i % j->w.workers == k ? 1.0f : 0.0f;
  uint32_t n = buffers(bufs, me->u, touched(j, k, me->step));
  OK(j->w.node[k], mlfab_push_start(j->w.node[k], bufs, n, NULL, &me->push));
  me->step++;
  me->phase = PUSHES;
  me->asked_ns = mlfab_sim_clock(j->w.sim);
  /* Pulls right behind the push, or after its answer. */
  me->pull = 0;
  me->early = (int)below(j, 2);
  if (me->early) begin_pull(j, k);
}

static void advance(job *j, uint32_t k) {
  worker *me = &j->of[k];
  mlfab *node = j->w.node[k];
  mlfab_result result;
  int done = 0;
  uint64_t now = mlfab_sim_clock(j->w.sim);
  if (me->phase == COMPUTES && now >= me->until) begin_push(j, k);
  if ((me->phase == PUSHES || me->phase == PULLS) && now - me->asked_ns > 5000000000u)
    wrong("worker %u waits for more than 5 s in step %llu", k, (unsigned long long)me->step);
  if (me->phase == PUSHES) {
    OK(node, mlfab_test(node, me->push, &done, &result));
    if (!done) return;
    if ((result.status == MLFAB_ERR_DROPPED || result.status == MLFAB_ERR_PARTIAL) && j->late)
      for (uint32_t t = 0; t < TENSORS; t++) me->lost[t] += touched(j, k, me->step - 1) >> t & 1;
    else if (result.status)
      world_expect(node, result.status, 0, "push");
    me->phase = PULLS;
    if (!me->pull) begin_pull(j, k);
  }
  if (me->phase == PULLS) {
    OK(node, mlfab_test(node, me->pull, &done, &result));
    if (!done) return;
    world_expect(node, result.status, 0, "pull");
    judge(j, k);
    if (me->step < STEPS) {
      compute(j, k);
    } else {
      me->phase = JOINED;
      OK(node, mlfab_finish(node, 0));
    }
  }
}

static void change(job *j) {
  mlfab *node = j->w.node[below(j, j->w.workers)];
  if (below(j, (uint64_t)j->change)) return;
  mlfab_sync s = random_sync(j);
  if (s.kind == MLFAB_SYNC_DROP) j->late = 1;
  uint32_t server = below(j, 3) ? MLFAB_ALL : (uint32_t)below(j, j->w.servers);
  OK(node, mlfab_set_sync(node, &s, server, 0));
  j->changes++;
}

static void play(uint64_t seed, int changes) {
  static job j;
  mlfab_buf bufs[TENSORS];
  mlfab_model_options options;
  memset(&j, 0, sizeof j);
  j.seed = seed;
  j.random = seed;
  if (changes) j.change = below(&j, 2) ? 100 : 1000;
  uint32_t workers = 2 + (uint32_t)below(&j, MOST - 1);
  uint32_t servers = 1 + (uint32_t)below(&j, SERVERS), dedicated = (uint32_t)below(&j, 2);
  if (servers > workers) dedicated = 1;
  if (dedicated && workers + servers > WORLD_NODES) servers = WORLD_NODES - workers;
  world_init(&j.w, workers, servers, dedicated);
  j.w.config.pull_condition = may_pull;
  j.w.config.push_condition = complete;
  if (below(&j, 3) == 0) j.w.config.eager_bytes = 4096; /* updates wait for grants */
  world_open(&j.w, seed);
  j.sync = random_sync(&j);
  if (j.change > 100) j.sync.kind = MLFAB_SYNC_ASYNC; /* change is rare: servers come to differ */
  seeds_about(", kind %u", j.sync.kind);
  j.late = j.sync.kind == MLFAB_SYNC_DROP;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.slices = 1 + (uint32_t)below(&j, 6);
  options.consistency = j.sync;
  for (uint32_t k = 0; k < workers; k++) {
    j.speed[k] = 1.0 + (double)below(&j, 30) / 10.0;
    for (uint32_t t = 0; t < TENSORS; t++)
      OK(j.w.node[k], mlfab_tensor_add(j.w.node[k], t, MLFAB_F32, PART));
  }
  j.sparse = (int)below(&j, 3);
  for (uint32_t k = 0; k < workers; k++)
    OK(j.w.node[k], mlfab_model_start(j.w.node[k], &options, NULL, 0));
  /* In some cases links break. */
  mlfab_sim_options faults = {.size = sizeof faults, .loss = 0.003, .reorder = 0.05};
  if (below(&j, 3) == 0) assert_int_equal(mlfab_sim_set_faults(j.w.sim, &faults), 0);
  uint32_t joined = 0;
  for (uint32_t k = 0; k < workers; k++) compute(&j, k);
  while (joined < workers) {
    sim_step(j.w.sim);
    joined = 0;
    for (uint32_t k = 0; k < workers; k++) {
      if (j.of[k].phase != JOINED) advance(&j, k);
      joined += j.of[k].phase == JOINED;
    }
    if (changes) change(&j);
  }
  mlfab_sim_set_faults(j.w.sim, NULL);
  /* At the end every update that was not dropped is in the model, once. */
  uint32_t n = buffers(bufs, j.of[0].w, (1u << TENSORS) - 1);
  OK(j.w.node[0], mlfab_pull(j.w.node[0], bufs, n, NULL, NULL));
  for (uint32_t i = 0; i < COUNT; i++) {
    uint64_t lost = j.of[i % workers].lost[i / PART];
    double got = (double)j.of[0].w[i], all = with_tensor(&j, i % workers, STEPS, i / PART);
    if (got > all || got < all - (double)lost)
      wrong("in the end element %u is %g, of %g updates with %llu dropped", i, got, all,
            (unsigned long long)lost);
  }
  world_close(&j.w);
}

static void play_one_model(uint64_t seed) { play(seed, 0); }
static void play_changing(uint64_t seed) { play(seed, 1); }

TEST(test_models) { seeds_run("consistency", test_cases(60), play_one_model); }

TEST(test_changes) { seeds_run("consistency", test_cases(60), play_changing); }

/* Runs some iterations of two workers that add 1 to both tensors; afterwards `sum` updates are in the
 * model. */
static void iterate(world *w, int n, float *sum) {
  static float u[COUNT], got[2 * COUNT];
  for (uint32_t i = 0; i < COUNT; i++) u[i] = 1.0f;
  mlfab_buf update[2] = {{0, 0, u, COUNT}, {1, 0, u, COUNT}};
  mlfab_buf image[2] = {{0, 0, got, COUNT}, {1, 0, got + COUNT, COUNT}};
  for (int k = 0; k < n; k++) {
    mlfab_request push[2];
    for (uint32_t i = 0; i < 2; i++)
      OK(w->node[i], mlfab_push_start(w->node[i], update, 2, NULL, &push[i]));
    for (uint32_t i = 0; i < 2; i++) OK(w->node[i], mlfab_wait(w->node[i], push[i], 0, NULL));
    *sum += 2.0f;
    for (uint32_t i = 0; i < 2; i++) OK(w->node[i], mlfab_pull(w->node[i], image, 2, NULL, NULL));
  }
  for (uint32_t i = 0; i < 2 * COUNT; i++)
    if (got[i] < *sum || got[i] > *sum)
      fail_msg("element %u is %g, not %g", i, (double)got[i], (double)*sum);
}

/* A server with a model of its own loses its slices: it follows the others, and gets slices again. */
TEST(test_server_without_slices) {
  static const uint32_t kinds[] = {MLFAB_SYNC_DROP, MLFAB_SYNC_DSPS, MLFAB_SYNC_BSP,
                                   MLFAB_SYNC_ASYNC};
  const uint32_t all[2] = {0, 1};
  if (!WORLD_COMPLETE) skip();
  for (uint32_t k = 0; k < 4; k++) {
    world w;
    float sum = 0.0f;
    mlfab_model_options options = {.size = sizeof options, .sync = MLFAB_SYNC_BSP, .slices = 8};
    mlfab_sync sync = {.size = sizeof sync, .kind = MLFAB_SYNC_SSP, .staleness = 2};
    world_init(&w, 2, 2, 1);
    world_open(&w, 7 + k);
    for (uint32_t i = 0; i < 4; i++)
      OK(w.node[i / 2], mlfab_tensor_add(w.node[i / 2], i % 2, MLFAB_F32, COUNT));
    for (uint32_t i = 0; i < 2; i++) OK(w.node[i], mlfab_model_start(w.node[i], &options, NULL, 0));
    iterate(&w, 3, &sum);
    OK(w.node[0], mlfab_set_sync(w.node[0], &sync, 0, 0));
    OK(w.node[0], mlfab_set_servers(w.node[0], &all[1], 1, 0));
    iterate(&w, 3, &sum);
    OK(w.node[0], mlfab_set_servers(w.node[0], &all[0], 1, 0));
    iterate(&w, 3, &sum);
    sync = (mlfab_sync){.size = sizeof sync, .kind = kinds[k], .need = 2};
    OK(w.node[0], mlfab_set_sync(w.node[0], &sync, MLFAB_ALL, 0));
    iterate(&w, 3, &sum);
    OK(w.node[0], mlfab_set_servers(w.node[0], all, 2, 0));
    iterate(&w, 3, &sum);
    world_close(&w);
  }
}

/* Errors in a model's options are reported by the call if possible. What only a server knows comes as its
 * refusal, to every worker, even with first weights under way. Then all may try again. */
TEST(test_refused_models) {
  static float first[COUNT], got[COUNT];
  mlfab_buf bufs = {0, 0, first, COUNT}, image = {0, 0, got, COUNT};
  mlfab_model_options options = {.size = sizeof options, .mean = 1};
  mlfab_error error;
  world w;
  world_init(&w, 3, 2, 1);
  world_open(&w, 5);
  for (uint32_t i = 0; i < COUNT; i++) first[i] = (float)i;
  for (uint32_t i = 0; i < 3; i++) OK(w.node[i], mlfab_tensor_add(w.node[i], 0, MLFAB_F32, COUNT));
  uint64_t begun = mlfab_sim_clock(w.sim);
  EXPECT(w.node[0], mlfab_model_start(w.node[0], &options, &bufs, 1), MLFAB_ERR_UNSUPPORTED);
  options = (mlfab_model_options){.size = sizeof options, .optimizer = 77};
  EXPECT(w.node[0], mlfab_model_start(w.node[0], &options, &bufs, 1), MLFAB_ERR_UNSUPPORTED);
  options = (mlfab_model_options){
      .size = sizeof options, .optimizer = MLFAB_OPTIMIZER_ADAM, .beta1 = 2.0, .epsilon = 1.0};
  EXPECT(w.node[0], mlfab_model_start(w.node[0], &options, &bufs, 1), MLFAB_ERR_CONFIG);
  mlfab_last_error(w.node[0], &error);
  assert_string_equal(error.text, "model_start: beta1 is 2, must be in [0, 1)");
  assert_true(mlfab_sim_clock(w.sim) == begun); /* no server was asked */
  /* No server has these conditions. */
  options = (mlfab_model_options){.size = sizeof options, .sync = MLFAB_SYNC_USER};
  for (uint32_t i = 0; i < 3; i++) {
    EXPECT(w.node[i], mlfab_model_start(w.node[i], &options, &bufs, 1), MLFAB_ERR_UNSUPPORTED);
    mlfab_last_error(w.node[i], &error);
    const char *why = strstr(error.text, "not supported: MLFAB_SYNC_USER at server");
    assert_non_null(why);
    assert_true((strstr(error.text, "worker 0's model: ") != NULL) == (i > 0));
  }
  options.sync = MLFAB_SYNC_BSP;
  for (uint32_t i = 0; i < 3; i++)
    OK(w.node[i], mlfab_model_start(w.node[i], &options, i ? NULL : &bufs, !i));
  OK(w.node[2], mlfab_pull(w.node[2], &image, 1, NULL, NULL));
  assert_memory_equal(first, got, sizeof got);
  assert_true(mlfab_sim_clock(w.sim) - begun < WORLD_S);
  assert_false(world_saw(&w, MLFAB_EVENT_SUSPECT, 0, 0)); /* no link was dropped */
  world_close(&w);
}

TESTS(NULL, NULL)
