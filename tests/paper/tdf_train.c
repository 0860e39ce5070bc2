/* tdf_train.c - one run: five workers and a server on simulated hosts train a model with the library.
 *
 * A worker pulls, computes the gradient of its next samples, pushes it and asks for the model that
 * follows, and begins again when it has both. Samples are dealt out and drawn from the seed; so is how long a
 * computation takes: a worker's own speed in 1 +- 15 %, and every computation in 1 +- 10 % of that.
 * Settings of one seed meet the same samples in the same order.
 *
 * Bytes are the library's own counts: what pushes and pulls became as packets, and all that left the
 * nodes. Values of pulls, which it does not count, are those that differ from the pull before: a change
 * that half precision does not show is missed. */
#include "paper.h"
#include "tdf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COMPUTE_NS = 20 * MS, STALENESS = 3, SERVER_HOST = TDF_WORKERS };

struct training;

typedef struct learner {
  struct training *training;
  mlfab *ctx;
  uint32_t rank, step, done; /* done: of its push and its pull */
  mlfab_request push, pull;  /* 0: none */
  float *w, *before, *g;
  uint32_t *sample, samples, *batch; /* its part, and what it computes with */
  double speed, values;              /* values: elements that pulls changed */
} learner;

typedef struct training {
  const tdf_task *task;
  const tdf_setting *setting;
  uint64_t seed;
  mlfab_sim *sim;
  mlfab *server;
  learner learner[TDF_WORKERS];
  uint32_t left; /* learners that have not done all */
  int failed;
} training;

static void complain(training *t, const char *what, mlfab *ctx, int code) {
  mlfab_error error = {0};
  if (ctx) mlfab_last_error(ctx, &error);
  if (!t->failed)
    fprintf(stderr, "paper: %s, seed %u: %s: %s (%s)\n", t->task->name, (unsigned)t->seed, what,
            mlfab_error_name(code), error.text);
  t->failed = 1;
}

/* ---- a learner's iteration ---- */

static uint64_t compute_ns(const learner *l) {
  uint64_t state = l->training->seed * 1000003 + l->rank * 100003 + l->step;
  return (uint64_t)(COMPUTE_NS * l->speed * (0.9 + 0.2 * tdf_uniform(&state)));
}

static void computed(void *user) {
  learner *l = user;
  training *t = l->training;
  const tdf_task *task = t->task;
  uint32_t n = task->batch ? task->batch : l->samples;
  mlfab_buf update = {MLFAB_ALL, 0, l->g, task->params}, weights = update;
  mlfab_push_options options = {.size = sizeof options, .scale = -task->rate};
  memset(l->g, 0, task->params * sizeof *l->g);
  for (uint32_t i = 0; i < n; i++) l->batch[i] = l->sample[(l->step * n + i) % l->samples];
  task->gradient(l->w, l->batch, n, task->batch ? 1.0f / (float)(n * TDF_WORKERS) : 1.0f, l->g);
  memcpy(l->before, l->w, task->params * sizeof *l->w);
  weights.data = l->w;
  int code = mlfab_push_start(l->ctx, &update, 1, &options, &l->push);
  if (code) complain(t, "push", l->ctx, code);
  code = mlfab_pull_start(l->ctx, &weights, 1, NULL, &l->pull);
  if (code) complain(t, "pull", l->ctx, code);
}

static void compute(learner *l) {
  uint64_t at = mlfab_sim_clock(l->training->sim) + compute_ns(l);
  l->done = 0;
  if (mlfab_sim_at(l->training->sim, at, computed, l))
    complain(l->training, "mlfab_sim_at", NULL, MLFAB_ERR_MEMORY);
}

static void next(learner *l) {
  for (uint64_t i = 0; i < l->training->task->params; i++)
    l->values += memcmp(&l->w[i], &l->before[i], sizeof l->w[i]) != 0;
  if (++l->step < l->training->task->iterations) {
    compute(l);
  } else {
    l->training->left--;
  }
}

static void look(learner *l) {
  mlfab_request *request[2] = {&l->push, &l->pull};
  for (uint32_t i = 0; i < 2; i++) {
    mlfab_result result = {0};
    int done = 0, code;
    if (!*request[i]) continue;
    code = mlfab_test(l->ctx, *request[i], &done, &result);
    if (code || result.status)
      complain(l->training, "an iteration", l->ctx, code ? code : result.status);
    if (!done) continue;
    *request[i] = 0;
    if (++l->done == 2) next(l);
  }
}

/* ---- the fabric ---- */

static void open_node(training *t, uint32_t i, mlfab **ctx_p) {
  mlfab_config config;
  mlfab_error error = {0};
  mlfab_config_init(&config);
  config.roles = i == SERVER_HOST ? MLFAB_ROLE_SERVER : MLFAB_ROLE_WORKER;
  config.rank = i == SERVER_HOST ? 0 : (int32_t)i;
  config.workers = TDF_WORKERS;
  config.servers = 1;
  config.dedicated = 1;
  config.seed = t->seed;
  config.timeout_ns = 3600ull * SECOND;
  snprintf(config.coordinator, sizeof config.coordinator, "sim:%d", SERVER_HOST);
  int code = mlfab_sim_open(t->sim, i, &config, ctx_p, &error);
  if (code) {
    fprintf(stderr, "paper: node %u: %s\n", (unsigned)i, error.text);
    t->failed = 1;
  }
}

static void open_all(training *t) {
  mlfab_error error = {0};
  open_node(t, SERVER_HOST, &t->server);
  for (uint32_t i = 0; i < TDF_WORKERS && !t->failed; i++) open_node(t, i, &t->learner[i].ctx);
  for (uint32_t i = 0; i <= TDF_WORKERS && !t->failed;) {
    mlfab *ctx = i < TDF_WORKERS ? t->learner[i].ctx : t->server;
    int ready = mlfab_is_ready(ctx, &error);
    if (ready < 0 || (!ready && !mlfab_sim_step(t->sim))) complain(t, "join", ctx, ready);
    i += ready == 1;
  }
}

/* Rounds add in the order of ranks, so that runs whose frames differ can be compared to the bit. */
static int define(learner *l, const tdf_task *task, const tdf_setting *setting) {
  mlfab_buf weights = {MLFAB_ALL, 0, l->w, task->params};
  mlfab_model_options options = {.size = sizeof options, .tags = setting->tags};
  int code = 0;
  options.consistency.size = sizeof options.consistency;
  options.consistency.kind = setting->sync;
  options.consistency.staleness = setting->sync == MLFAB_SYNC_SSP ? STALENESS : 0;
  options.sync = setting->sync;
  options.deterministic = setting->sync == MLFAB_SYNC_BSP;
  options.pull_half = setting->half;
  options.change_threshold = setting->change;
  options.change_decay = setting->change > 0 ? setting->decay : 0;
  for (uint32_t i = 0; i < task->tensors && !code; i++)
    code = mlfab_tensor_add(l->ctx, i, MLFAB_F32, task->count[i]);
  if (!code) code = mlfab_model_start(l->ctx, &options, &weights, 1);
  if (code || !setting->filtered) return code;
  mlfab_filter filter = {.size = sizeof filter,
                         .half = setting->half,
                         .threshold = setting->threshold,
                         .decay = setting->decay,
                         .drop = setting->drop};
  return mlfab_set_filter(l->ctx, MLFAB_ALL, &filter);
}

static void counts(training *t, mlfab_stats *server, mlfab_stats *workers) {
  mlfab_get_stats(t->server, server, sizeof *server);
  memset(workers, 0, sizeof *workers);
  for (uint32_t i = 0; i < TDF_WORKERS; i++) {
    mlfab_stats one;
    mlfab_get_stats(t->learner[i].ctx, &one, sizeof one);
    workers->bytes_sent += one.bytes_sent;
    workers->filter_offered += one.filter_offered;
    workers->filter_sent += one.filter_sent;
    workers->filter_raw_bytes += one.filter_raw_bytes;
    workers->filter_bytes += one.filter_bytes;
  }
}

static void train(training *t, tdf_outcome *o) {
  const tdf_task *task = t->task;
  mlfab_stats server[2], workers[2];
  uint64_t began = mlfab_sim_clock(t->sim);
  double all = 4.0 * (double)task->params * task->iterations * TDF_WORKERS, values = 0;
  double width = t->setting->half ? 2 : 4;
  counts(t, &server[0], &workers[0]);
  t->left = TDF_WORKERS;
  for (uint32_t i = 0; i < TDF_WORKERS; i++) compute(&t->learner[i]);
  while (t->left && !t->failed) {
    if (!mlfab_sim_step(t->sim)) complain(t, "training stands still", NULL, MLFAB_ERR_TIMEOUT);
    for (uint32_t i = 0; i < TDF_WORKERS; i++) look(&t->learner[i]);
  }
  counts(t, &server[1], &workers[1]);
  for (uint32_t i = 0; i < TDF_WORKERS; i++) values += t->learner[i].values;
  o->seconds = (double)(mlfab_sim_clock(t->sim) - began) / SECOND;
  o->push_raw = o->pull_raw = all;
  o->push_values = t->setting->filtered ? width * (double)workers[1].filter_sent : all;
  o->push_packets = t->setting->filtered ? (double)workers[1].filter_bytes : all;
  o->push_frames = (double)(workers[1].bytes_sent - workers[0].bytes_sent);
  o->pull_values = t->setting->tags ? width * values : all * width / 4;
  o->pull_packets = (double)(server[1].pull_bytes - server[0].pull_bytes);
  o->pull_frames = (double)(server[1].bytes_sent - server[0].bytes_sent);
}

/* The model of the server, when everybody's updates are in it. */
static void finish(training *t, tdf_outcome *o, float *model) {
  learner *l = &t->learner[0];
  mlfab_buf weights = {MLFAB_ALL, 0, l->w, t->task->params};
  mlfab_pull_options options = {.size = sizeof options,
                                .flags = t->setting->tags ? MLFAB_PULL_FULL : 0};
  int code = mlfab_pull(l->ctx, &weights, 1, &options, NULL);
  if (code) complain(t, "the last pull", l->ctx, code);
  o->quality = t->task->quality(l->w);
  if (model) memcpy(model, l->w, t->task->params * sizeof *model);
}

/* ---- the run ---- */

/* Deals the samples out, shuffled. */
static int prepare(training *t) {
  const tdf_task *task = t->task;
  uint64_t state = t->seed;
  uint32_t *order = malloc(task->samples * sizeof *order);
  int bad = order == NULL;
  for (uint32_t i = 0; i < TDF_WORKERS && !bad; i++) {
    learner *l = &t->learner[i];
    l->training = t;
    l->rank = i;
    l->speed = 0.85 + 0.3 * tdf_uniform(&state);
    l->w = calloc(task->params, sizeof *l->w);
    l->before = calloc(task->params, sizeof *l->before);
    l->g = calloc(task->params, sizeof *l->g);
    l->sample = malloc((task->samples / TDF_WORKERS + 1) * sizeof *l->sample);
    l->batch = malloc(task->samples * sizeof *l->batch);
    bad = !l->w || !l->before || !l->g || !l->sample || !l->batch;
    if (!bad) task->first(t->seed, l->w);
  }
  for (uint32_t i = 0; i < task->samples && !bad; i++) order[i] = i;
  for (uint32_t i = 0; i < task->samples && !bad; i++) {
    uint32_t k = i + (uint32_t)(tdf_next(&state) % (task->samples - i)), taken = order[k];
    learner *l = &t->learner[i % TDF_WORKERS];
    order[k] = order[i];
    l->sample[l->samples++] = taken;
  }
  free(order);
  return bad;
}

static void clean(training *t) {
  for (uint32_t i = 0; i < TDF_WORKERS; i++) {
    learner *l = &t->learner[i];
    if (l->ctx) mlfab_abandon(&l->ctx);
    free(l->w);
    free(l->before);
    free(l->g);
    free(l->sample);
    free(l->batch);
  }
  if (t->server) mlfab_abandon(&t->server);
  if (t->sim) mlfab_sim_destroy(&t->sim);
  free(t);
}

int tdf_train(const tdf_task *task, const tdf_setting *setting, uint64_t seed, tdf_outcome *outcome,
              float *model) {
  training *t = calloc(1, sizeof *t);
  mlfab_sim_options options = {.size = sizeof options,
                               .hosts = TDF_WORKERS + 1,
                               .seed = seed,
                               .rate_bytes_per_s = setting->link_rate};
  if (!t) return 1;
  t->task = task;
  t->setting = setting;
  t->seed = seed;
  memset(outcome, 0, sizeof *outcome);
  if (prepare(t) || mlfab_sim_create(&options, &t->sim)) {
    complain(t, "no memory", NULL, MLFAB_ERR_MEMORY);
  } else {
    open_all(t);
  }
  for (uint32_t i = 0; i < TDF_WORKERS && !t->failed; i++) {
    int code = define(&t->learner[i], task, setting);
    if (code) complain(t, "model", t->learner[i].ctx, code);
  }
  if (!t->failed) train(t, outcome);
  if (!t->failed) finish(t, outcome, model);
  int failed = t->failed;
  clean(t);
  return failed;
}
