/* test_filters.c - filters, sparse pushes, packets, version tags and caches in whole fabrics, with every
 * consistency model, with and without aggregators.
 *
 * Gradients are small integers, so that sums are exact in float32 and in half precision in any order. At
 * the end every worker removes its filters and pushes once more, which sends the residuals; then the model
 * must equal the sum of all gradients, and every cache the model. */
#include "job.h"

#include <math.h>

enum { MOST = 5, TENSORS = 3, ROOM = 40000, STEPS = 7 };

typedef struct worker {
  enum { RESTS, PUSHES, PULLS, LAST, JOINED } phase;
  uint64_t until, asked_ns;
  uint32_t step;
  mlfab_request request;
  mlfab_buf update[TENSORS], weights[TENSORS];
  float *u, *w; /* all tensors, one behind another */
} worker;

typedef struct job {
  world w;
  uint64_t seed, random;
  mlfab_model_options options;
  uint32_t ntensors, count[TENSORS], first[TENSORS], total;
  worker of[MOST];
  double *sum; /* of all gradients, the literal model */
} job;

static uint64_t below(job *j, uint64_t n) { return chance_below(&j->random, n); }

static void random_sync(job *j, mlfab_sync *s) {
  static const uint32_t kinds[] = {MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP,  MLFAB_SYNC_SSP,
                                   MLFAB_SYNC_DSPS,  MLFAB_SYNC_PSSP, MLFAB_SYNC_PSSP_DYNAMIC,
                                   MLFAB_SYNC_DROP};
  memset(s, 0, sizeof *s);
  s->size = sizeof *s;
  s->kind = kinds[below(j, 7)];
  s->staleness = (int64_t)below(j, 3);
  s->need = j->w.workers; /* drops no straggler, so that sums are known */
  s->chance = 0.5;
}

/* Sets a random filter for a tensor or all: any of its members, or none. */
static void random_filter(job *j, uint32_t k) {
  mlfab *node = j->w.node[k];
  mlfab_filter f;
  uint32_t tensor = below(j, 2) ? MLFAB_ALL : (uint32_t)below(j, j->ntensors);
  memset(&f, 0, sizeof f);
  f.size = sizeof f;
  if (below(j, 2)) f.threshold = (double)below(j, 4);
  if (below(j, 2)) f.decay = (double)below(j, 2);
  if (f.threshold > 0 && below(j, 2)) f.drop = (double)below(j, 5) / 4;
  if (f.drop > 0 && f.drop < 1 && below(j, 2)) f.threshold = HUGE_VAL;
  if (below(j, 4) == 0) f.top = 0.1;
  if (below(j, 2)) f.half = 1 + (uint32_t)below(j, 2);
  int none = below(j, 5) == 0;
  OK(node, mlfab_set_filter(node, tensor, none ? NULL : &f));
}

static void gradient(job *j, worker *me) {
  uint64_t dense = below(j, 3);
  for (uint32_t i = 0; i < j->total; i++) {
    int some = dense == 2 || below(j, dense ? 10 : 300) == 0;
    me->u[i] = some ? (float)((int)below(j, 7) - 3) : 0.0f;
    j->sum[i] += (double)me->u[i];
  }
}

/* A sparse update of one tensor. */
static void push_sparse(job *j, uint32_t k, mlfab_request *request) {
  static uint64_t indices[ROOM];
  static float values[ROOM];
  uint32_t t = (uint32_t)below(j, j->ntensors), n = 0;
  for (uint64_t i = below(j, 50); i < j->count[t] && n < ROOM; i += 1 + below(j, 200)) {
    indices[n] = i;
    values[n] = (float)((int)below(j, 9) - 4);
    j->sum[j->first[t] + i] += (double)values[n++];
  }
  OK(j->w.node[k], mlfab_push_sparse_start(j->w.node[k], t, indices, values, n, NULL, request));
}

static void begin_push(job *j, uint32_t k) {
  worker *me = &j->of[k];
  if (below(j, 3) == 0) random_filter(j, k);
  if (below(j, 4) == 0) {
    push_sparse(j, k, &me->request);
  } else {
    gradient(j, me);
    OK(j->w.node[k], mlfab_push_start(j->w.node[k], me->update, j->ntensors, NULL, &me->request));
  }
  me->step++;
  me->phase = PUSHES;
  me->asked_ns = mlfab_sim_clock(j->w.sim);
}

static void begin_pull(job *j, uint32_t k) {
  worker *me = &j->of[k];
  mlfab_pull_options o;
  memset(&o, 0, sizeof o);
  o.size = sizeof o;
  if (j->options.tags) o.flags = (uint32_t)below(j, 4) ? MLFAB_PULL_KEPT : MLFAB_PULL_FULL;
  /* The first pull has no buffers to keep. */
  if (me->step == 1) o.flags = 0;
  OK(j->w.node[k], mlfab_pull_start(j->w.node[k], me->weights, j->ntensors, &o, &me->request));
  me->phase = PULLS;
}

static void advance(job *j, uint32_t k) {
  worker *me = &j->of[k];
  mlfab *node = j->w.node[k];
  mlfab_result result;
  int done = 0;
  uint64_t now = mlfab_sim_clock(j->w.sim);
  if (me->phase == RESTS && now >= me->until) begin_push(j, k);
  if (me->phase != RESTS && now - me->asked_ns > 20000000000u)
    wrong("worker %u waits for more than 20 s in step %u", k, me->step);
  if (me->phase == RESTS) return;
  OK(node, mlfab_test(node, me->request, &done, &result));
  if (!done) return;
  world_expect(node, result.status, 0, me->phase == PULLS ? "pull" : "push");
  if (me->phase == PUSHES) {
    begin_pull(j, k);
  } else if (me->phase == PULLS && me->step < STEPS) {
    me->phase = RESTS;
    me->until = now + below(j, 20000000);
  } else if (me->phase == PULLS) {
    /* Sends the residuals. */
    OK(node, mlfab_set_filter(node, MLFAB_ALL, NULL));
    memset(me->u, 0, j->total * sizeof *me->u);
    OK(node, mlfab_push_start(node, me->update, j->ntensors, NULL, &me->request));
    me->phase = LAST;
  } else {
    me->phase = JOINED;
    OK(node, mlfab_finish(node, 0));
  }
}

static void shape(job *j) {
  j->ntensors = 1 + (uint32_t)below(j, TENSORS);
  for (uint32_t t = 0; t < j->ntensors; t++) {
    j->count[t] = 1 + (uint32_t)below(j, below(j, 3) ? ROOM : 300);
    j->first[t] = j->total;
    j->total += j->count[t];
  }
  j->sum = calloc(j->total, sizeof *j->sum);
  for (uint32_t k = 0; k < j->w.workers; k++) {
    worker *me = &j->of[k];
    me->u = calloc(j->total, sizeof *me->u);
    me->w = calloc(j->total, sizeof *me->w);
    assert_true(me->u && me->w && j->sum);
    for (uint32_t t = 0; t < j->ntensors; t++) {
      me->update[t] = (mlfab_buf){t, 0, me->u + j->first[t], j->count[t]};
      me->weights[t] = (mlfab_buf){t, 0, me->w + j->first[t], j->count[t]};
    }
  }
}

/* Every kind of pull returns the literal model. */
static void compare(job *j, uint32_t k) {
  static const uint32_t flags[] = {0, MLFAB_PULL_KEPT, MLFAB_PULL_FULL};
  worker *me = &j->of[k];
  for (uint32_t f = 0; f < (j->options.tags ? 3u : 1u); f++) {
    mlfab_pull_options o = {.size = sizeof o, .flags = flags[f]};
    OK(j->w.node[k], mlfab_pull(j->w.node[k], me->weights, j->ntensors, &o, NULL));
    for (uint32_t i = 0; i < j->total; i++) {
      if ((double)me->w[i] != j->sum[i])
        wrong("worker %u, flags %u: element %u is %g, not %g", k, flags[f], i, (double)me->w[i],
              j->sum[i]);
    }
  }
  for (uint32_t t = 0; j->options.tags && t < j->ntensors; t++) {
    const void *data = NULL;
    uint64_t count = 0;
    OK(j->w.node[k], mlfab_cached(j->w.node[k], t, &data, &count));
    assert_int_equal(count, j->count[t]);
    assert_memory_equal(data, me->weights[t].data, count * 4);
  }
}

static void start(job *j) {
  static const uint32_t tags[] = {0, 1, 16, 256};
  uint32_t workers = 2 + (uint32_t)below(j, MOST - 1), servers = 1 + (uint32_t)below(j, 2);
  world_init(&j->w, workers, servers, (uint32_t)below(j, 2));
  if (below(j, 3) == 0) j->w.config.eager_bytes = 4096;
  if (below(j, 3) == 0) j->w.config.chunk_bytes = 16384;
  if (below(j, 3) == 0) j->w.config.scheduler = MLFAB_SCHEDULER_BESIDE;
  world_open(&j->w, j->seed);
  shape(j);
  j->options.size = sizeof j->options;
  j->options.slices = (uint32_t)below(j, 9);
  j->options.tags = tags[below(j, 4)];
  if (below(j, 3) == 0) j->options.pull_half = MLFAB_HALF_F16;
  random_sync(j, &j->options.consistency);
  seeds_about(", kind %u, tags %u, half %u, scheduler %u", j->options.consistency.kind,
              j->options.tags, j->options.pull_half, j->w.config.scheduler);
  for (uint32_t k = 0; k < workers; k++)
    for (uint32_t t = 0; t < j->ntensors; t++)
      OK(j->w.node[k], mlfab_tensor_add(j->w.node[k], t, MLFAB_F32, j->count[t]));
  for (uint32_t k = 0; k < workers; k++)
    OK(j->w.node[k], mlfab_model_start(j->w.node[k], &j->options, NULL, 0));
}

static void play(uint64_t seed) {
  static job j;
  memset(&j, 0, sizeof j);
  j.seed = j.random = seed;
  start(&j);
  /* In some cases links break. */
  mlfab_sim_options faults = {.size = sizeof faults, .loss = 0.003, .reorder = 0.05};
  if (below(&j, 3) == 0) assert_int_equal(mlfab_sim_set_faults(j.w.sim, &faults), 0);
  for (uint32_t joined = 0; joined < j.w.workers;) {
    sim_step(j.w.sim);
    joined = 0;
    for (uint32_t k = 0; k < j.w.workers; k++) {
      if (j.of[k].phase != JOINED) advance(&j, k);
      joined += j.of[k].phase == JOINED;
    }
  }
  mlfab_sim_set_faults(j.w.sim, NULL);
  for (uint32_t k = 0; k < j.w.workers; k++) compare(&j, k);
  world_close(&j.w);
  for (uint32_t k = 0; k < j.w.workers; k++) free(j.of[k].u), free(j.of[k].w);
  free(j.sum);
}

TEST(test_seeds) { seeds_run("filters", test_cases(40), play); }

TESTS(NULL, NULL)
