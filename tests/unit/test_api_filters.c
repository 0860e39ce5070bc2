/* test_api_filters.c - wrong calls about consistency, filters, tags and sparse updates: each gets its own
 * error, and changes nothing; and the edges of what is right.
 *
 * Source: FluentPS Table III; TDF 3, 4.2, 4.3. */
#include "said.h"

#include <math.h>

#include "../testing.h"

enum { COUNT = 3000 };

/* Of the test that runs. */
static world w;
static float u[COUNT], v[COUNT];
static const mlfab_buf update = {5, 0, u, COUNT}, weights = {5, 0, v, COUNT};

static mlfab_sync sync_of(uint32_t kind) {
  return (mlfab_sync){.size = sizeof(mlfab_sync), .kind = kind, .need = 1};
}

static mlfab_model_options model_of(mlfab_sync s) {
  return (mlfab_model_options){.size = sizeof(mlfab_model_options), .consistency = s};
}

static void begin(uint32_t workers, uint32_t servers) {
  memset(u, 0, sizeof u);
  memset(v, 0, sizeof v);
  world_init(&w, workers, servers, 1);
}

/* Returns worker 0. */
static mlfab *open_world(uint32_t workers, uint32_t servers) {
  begin(workers, servers);
  world_open(&w, 7);
  return w.node[0];
}

static int end(void **state) {
  (void)state;
  world_close(&w);
  return 0;
}

/* A test whose world is closed behind it. */
#define WORLD_TEST(name) TEST_WITH(name, NULL, end)

static void add(int dtype) {
  for (uint32_t k = 0; k < w.workers; k++)
    OK(w.node[k], mlfab_tensor_add(w.node[k], 5, dtype, COUNT));
}

static void start(const mlfab_model_options *o) {
  add(MLFAB_F32);
  for (uint32_t k = 0; k < w.workers; k++) OK(w.node[k], mlfab_model_start(w.node[k], o, NULL, 0));
}

static void start_with(uint32_t kind) {
  mlfab_model_options o = model_of(sync_of(kind));
  start(&o);
}

/* A world with a model of this consistency. Returns worker 0. */
static mlfab *start_world(uint32_t workers, uint32_t servers, uint32_t kind) {
  mlfab *node = open_world(workers, servers);
  start_with(kind);
  return node;
}

static void push(uint32_t k) { OK(w.node[k], mlfab_push(w.node[k], &update, 1, NULL, NULL)); }
static void pull(void) { OK(w.node[0], mlfab_pull(w.node[0], &weights, 1, NULL, NULL)); }

/* --- consistency --- */

/* Members that are out of range, by themselves and with what the message has to name. */
static uint32_t wrong_syncs(mlfab_sync *s, const char **text) {
  uint32_t n = 0;
  s[n] = sync_of(8), text[n++] = "kind";
  s[n] = sync_of(MLFAB_SYNC_SSP), s[n].staleness = -1, text[n++] = "staleness";
  s[n] = sync_of(MLFAB_SYNC_DSPS), s[n].staleness = 5, s[n].staleness_max = 4,
  text[n++] = "staleness_max";
  s[n] = sync_of(MLFAB_SYNC_DROP), s[n].need = 0, text[n++] = "need";
  s[n] = sync_of(MLFAB_SYNC_DROP), s[n].need = 3, text[n++] = "need";
  s[n] = sync_of(MLFAB_SYNC_PSSP), s[n].chance = 1.01, text[n++] = "chance";
  s[n] = sync_of(MLFAB_SYNC_PSSP), s[n].chance = -0.01, text[n++] = "chance";
  s[n] = sync_of(MLFAB_SYNC_PSSP), s[n].chance = NAN, text[n++] = "chance";
  s[n] = sync_of(MLFAB_SYNC_PSSP_DYNAMIC), s[n].alpha = -1, text[n++] = "alpha";
  s[n] = sync_of(MLFAB_SYNC_SSP), s[n].soft = 2, text[n++] = "soft";
  return n;
}

WORLD_TEST(test_wrong_models) {
  mlfab_sync s[16];
  const char *text[16];
  mlfab *node = open_world(2, 1);
  mlfab_sync ssp = sync_of(MLFAB_SYNC_SSP);
  EXPECT(node, mlfab_set_sync(node, &ssp, MLFAB_ALL, 0), MLFAB_ERR_STATE);
  add(MLFAB_F32);
  uint32_t n = wrong_syncs(s, text);
  for (uint32_t i = 0; i < n; i++) {
    mlfab_model_options o = model_of(s[i]);
    REFUSED(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_ARGUMENT, text[i]);
  }
  mlfab_model_options o = model_of(ssp);
  o.consistency.size = 0; /* forgotten: not a model without consistency */
  REFUSED(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_ARGUMENT, "consistency.size");
  o = model_of(ssp), o.sync = MLFAB_SYNC_BSP; /* two models at once */
  REFUSED(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_ARGUMENT, "set one of them");
  o = (mlfab_model_options)MLFAB_MODEL_OPTIONS_INIT, o.sync = MLFAB_SYNC_PSSP;
  REFUSED(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_ARGUMENT, "chance");
  o = model_of(sync_of(MLFAB_SYNC_USER));
  REFUSED(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_UNSUPPORTED, "pull_condition");
  o = model_of(sync_of(MLFAB_SYNC_DROP)), o.deterministic = 1;
  REFUSED(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_UNSUPPORTED, "deterministic");
  o = model_of(sync_of(MLFAB_SYNC_SSP)), o.mean = 1;
  REFUSED(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_UNSUPPORTED, "mean");
}

/* A definition that was refused is tried again: what a slower server still says of the first is not taken for
 * an answer to the second. */
TEST(test_second_definition) {
  for (uint64_t seed = 1; seed <= 20; seed++) {
    begin(1, 3);
    world_open(&w, seed);
    mlfab_sim_set_rate(w.sim, 3, 20000, 20000);
    add(MLFAB_F32);
    mlfab_model_options bad = {.size = sizeof bad, .mean = 1}, good = {.size = sizeof good};
    EXPECT(w.node[0], mlfab_model_start(w.node[0], &bad, NULL, 0), MLFAB_ERR_UNSUPPORTED);
    OK(w.node[0], mlfab_model_start(w.node[0], &good, NULL, 0));
    world_close(&w);
  }
}

WORLD_TEST(test_wrong_changes) {
  mlfab_sync s[16];
  const char *text[16];
  open_world(2, 2);
  mlfab *node = w.node[1];
  mlfab_model_options o = model_of(sync_of(MLFAB_SYNC_BSP));
  o.mean = 1;
  start(&o);
  uint32_t n = wrong_syncs(s, text);
  for (uint32_t i = 0; i < n; i++)
    REFUSED(node, mlfab_set_sync(node, &s[i], MLFAB_ALL, 0), MLFAB_ERR_ARGUMENT, text[i]);
  mlfab_sync drop = sync_of(MLFAB_SYNC_DROP), ssp = sync_of(MLFAB_SYNC_SSP), small = drop;
  EXPECT(node, mlfab_set_sync(node, NULL, MLFAB_ALL, 0), MLFAB_ERR_ARGUMENT);
  small.size = 3;
  EXPECT(node, mlfab_set_sync(node, &small, MLFAB_ALL, 0), MLFAB_ERR_ARGUMENT);
  EXPECT(node, mlfab_set_sync(node, &drop, 2, 0), MLFAB_ERR_ARGUMENT);
  REFUSED(node, mlfab_set_sync(node, &ssp, MLFAB_ALL, 0), MLFAB_ERR_UNSUPPORTED, "mean");
  mlfab_sync user = sync_of(MLFAB_SYNC_USER);
  EXPECT(node, mlfab_set_sync(node, &user, MLFAB_ALL, 0), MLFAB_ERR_UNSUPPORTED);
  OK(node, mlfab_set_sync(node, &drop, 1, 0));
  OK(node, mlfab_set_sync(node, &drop, MLFAB_ALL, 0));
}

static int never(void *user, const mlfab_sync_state *s) {
  mlfab_sync_state *seen = user;
  if (s->worker != UINT32_MAX) *seen = *s;
  return 0;
}
static int always(void *user, const mlfab_sync_state *s) {
  (void)user, (void)s;
  return 1;
}

/* A condition that never says yes costs its pull the deadline, which tells the state that it saw; one
 * that always does ends at the fastest worker. */
WORLD_TEST(test_conditions_of_fools) {
  static mlfab_sync_state seen;
  mlfab_pull_options patience = {.size = sizeof patience, .timeout_ns = 3 * (uint64_t)WORLD_S};
  mlfab_stats stats;
  begin(2, 1);
  w.config.pull_condition = never;
  w.config.push_condition = always;
  w.config.user = &seen;
  world_open(&w, 3);
  mlfab_model_options o = model_of(sync_of(MLFAB_SYNC_USER));
  add(MLFAB_F32);
  for (uint32_t k = 0; k < 2; k++) OK(w.node[k], mlfab_model_start(w.node[k], &o, NULL, 0));
  for (int i = 0; i < 3; i++) push(1);
  REFUSED(w.node[1], mlfab_pull(w.node[1], &weights, 1, &patience, NULL), MLFAB_ERR_TIMEOUT,
          "user: this worker has pushed 3 updates, the fastest 3, the slowest 0");
  assert_int_equal(seen.worker, 1);
  assert_int_equal(seen.iteration, 3);
  assert_int_equal(seen.v_train, 3);
  OK(w.node[2], mlfab_get_stats(w.node[2], &stats, sizeof stats));
  assert_int_equal(stats.rounds, 3);
}

/* The slowest leaves: who waited for it goes on. */
WORLD_TEST(test_slowest_leaves) {
  mlfab_pull_options patience = {.size = sizeof patience, .timeout_ns = 2 * (uint64_t)WORLD_S};
  open_world(3, 1);
  mlfab_sync s = sync_of(MLFAB_SYNC_SSP);
  s.staleness = 1;
  mlfab_model_options o = model_of(s);
  start(&o);
  for (int i = 0; i < 3; i++) push(0), push(1);
  REFUSED(w.node[0], mlfab_pull(w.node[0], &weights, 1, &patience, NULL), MLFAB_ERR_TIMEOUT,
          "worker 2");
  mlfab_request request;
  OK(w.node[0], mlfab_pull_start(w.node[0], &weights, 1, NULL, &request));
  OK(w.node[2], mlfab_finish(w.node[2], 0));
  OK(w.node[0], mlfab_wait(w.node[0], request, 0, NULL));
}

/* A progress of the caller's own that goes back or jumps. */
WORLD_TEST(test_progress) {
  mlfab_push_options options = {.size = sizeof options, .scale = 1.0};
  open_world(1, 2);
  start_with(MLFAB_SYNC_SSP);
  mlfab *node = w.node[0];
  for (options.iteration = 1; options.iteration <= 3; options.iteration++)
    OK(node, mlfab_push(node, &update, 1, &options, NULL));
  options.iteration = 3;
  EXPECT(node, mlfab_push(node, &update, 1, &options, NULL), MLFAB_ERR_ARGUMENT);
  options.iteration = 5;
  EXPECT(node, mlfab_push(node, &update, 1, &options, NULL), MLFAB_ERR_ARGUMENT);
  options.iteration = 4;
  OK(node, mlfab_push(node, &update, 1, &options, NULL));
}

/* Small updates are merged only where their numbers follow one another: one between was withdrawn. */
WORLD_TEST(test_merged_numbers) {
  mlfab_push_options twice = {.size = sizeof twice, .scale = 2};
  mlfab_request request[4];
  mlfab_result result;
  int status;
  mlfab *node = start_world(1, 1, MLFAB_SYNC_ASYNC);
  u[0] = 1;
  for (int i = 0; i < 4; i++) {
    OK(node, mlfab_push_start(node, &update, 1, i == 2 ? &twice : NULL, &request[i]));
    if (i == 2) OK(node, mlfab_cancel(node, request[i]));
  }
  for (int i = 0; i < 4; i++) {
    EXPECT(node, mlfab_wait(node, request[i], 0, &result), i == 2 ? MLFAB_ERR_CANCELLED : 0);
    if (i == 2) continue;
    OK(node, mlfab_push_status(node, result.seq, &status));
    assert_int_equal(status, 0);
  }
  OK(node, mlfab_pull(node, &weights, 1, NULL, NULL));
  assert_true(v[0] == 3.0f);
}

/* --- filters --- */

WORLD_TEST(test_wrong_filters) {
  static const struct {
    double threshold, decay, drop, top;
    uint32_t half;
    const char *text;
  } bad[] = {{-1, 0, 0, 0, 0, "threshold"}, {NAN, 0, 0, 0, 0, "threshold"},
             {1, -1, 0, 0, 0, "decay"},     {1, 0, 1.5, 0, 0, "drop"},
             {1, 0, NAN, 0, 0, "drop"},     {0, 0, 0, 2, 0, "top"},
             {0, 0, 0, 0, 3, "half"}};
  mlfab *node = open_world(1, 1);
  mlfab_filter filter = {.size = sizeof filter};
  EXPECT(node, mlfab_set_filter(node, MLFAB_ALL, &filter), MLFAB_ERR_STATE);
  start_with(MLFAB_SYNC_ASYNC);
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    filter.threshold = bad[i].threshold, filter.decay = bad[i].decay, filter.drop = bad[i].drop;
    filter.top = bad[i].top, filter.half = bad[i].half;
    REFUSED(node, mlfab_set_filter(node, 5, &filter), MLFAB_ERR_ARGUMENT, bad[i].text);
  }
  memset(&filter, 0, sizeof filter);
  EXPECT(node, mlfab_set_filter(node, 5, &filter), MLFAB_ERR_ARGUMENT); /* size is not set */
  filter.size = sizeof filter;
  EXPECT(node, mlfab_set_filter(node, 4, &filter), MLFAB_ERR_TENSOR);
  OK(node, mlfab_set_filter(node, 5, &filter));
  /* What is not finite is refused before anything changes. */
  filter.threshold = 10;
  OK(node, mlfab_set_filter(node, 5, &filter));
  for (int i = 0; i < COUNT; i++) u[i] = 1;
  push(0);
  u[COUNT - 1] = INFINITY;
  EXPECT(node, mlfab_push(node, &update, 1, NULL, NULL), MLFAB_ERR_NOT_FINITE);
  memset(u, 0, sizeof u);
  OK(node, mlfab_set_filter(node, 5, NULL));
  push(0); /* the residual of the first, and nothing else */
  OK(node, mlfab_pull(node, &weights, 1, NULL, NULL));
  for (int i = 0; i < COUNT; i++) assert_true(v[i] == 1.0f);
}

WORLD_TEST(test_filters_on_counts) {
  mlfab_filter filter = {.size = sizeof filter};
  mlfab *node = open_world(1, 1);
  add(MLFAB_I64);
  mlfab_model_options o = model_of(sync_of(MLFAB_SYNC_ASYNC));
  o.pull_half = MLFAB_HALF_F16;
  EXPECT(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_UNSUPPORTED);
  o.pull_half = 0, o.change_threshold = 0.1;
  EXPECT(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_UNSUPPORTED);
  o.change_threshold = 0, o.tags = 3;
  EXPECT(node, mlfab_model_start(node, &o, NULL, 0), MLFAB_ERR_ARGUMENT);
  o.tags = 64;
  OK(node, mlfab_model_start(node, &o, NULL, 0));
  EXPECT(node, mlfab_set_filter(node, 5, &filter), MLFAB_ERR_DTYPE);
  EXPECT(node, mlfab_set_filter(node, MLFAB_ALL, &filter), MLFAB_ERR_DTYPE);
}

/* Beyond the largest half, and below the smallest: the rest stays, and comes in the end. */
WORLD_TEST(test_halves) {
  mlfab_filter filter = {.size = sizeof filter, .half = MLFAB_HALF_F16};
  mlfab_stats stats;
  mlfab *node = start_world(1, 1, MLFAB_SYNC_ASYNC);
  OK(node, mlfab_set_filter(node, MLFAB_ALL, &filter));
  u[0] = 100000.0f, u[1] = -1e6f, u[2] = 1e-9f, u[3] = 3.0f;
  push(0);
  pull();
  assert_true(v[0] == 65504.0f && v[1] == -65504.0f && v[2] == 0.0f && v[3] == 3.0f);
  OK(node, mlfab_get_stats(node, &stats, sizeof stats));
  assert_int_equal(stats.filter_saturated, 2);
  assert_int_equal(stats.filter_offered, COUNT);
  memset(u, 0, sizeof u);
  OK(node, mlfab_set_filter(node, MLFAB_ALL, NULL));
  push(0);
  pull();
  assert_true(v[0] == 100000.0f && v[1] == -1e6f && v[2] == 1e-9f && v[3] == 3.0f);
}

/* --- sparse updates, tags --- */

WORLD_TEST(test_sparse) {
  static const uint64_t beyond[] = {1, COUNT}, back[] = {4, 2}, twice[] = {4, 4}, good[] = {0, 7};
  static const float values[] = {2, 3}, bad[] = {1, NAN};
  mlfab *node = open_world(1, 2);
  EXPECT(node, mlfab_push_sparse(node, 5, good, values, 2, NULL, NULL), MLFAB_ERR_STATE);
  start_with(MLFAB_SYNC_ASYNC);
  REFUSED(node, mlfab_push_sparse(node, 5, beyond, values, 2, NULL, NULL), MLFAB_ERR_ARGUMENT,
          "3000");
  REFUSED(node, mlfab_push_sparse(node, 5, back, values, 2, NULL, NULL), MLFAB_ERR_ARGUMENT, "2");
  REFUSED(node, mlfab_push_sparse(node, 5, twice, values, 2, NULL, NULL), MLFAB_ERR_ARGUMENT, "4");
  EXPECT(node, mlfab_push_sparse(node, 6, good, values, 2, NULL, NULL), MLFAB_ERR_TENSOR);
  EXPECT(node, mlfab_push_sparse(node, 5, NULL, values, 2, NULL, NULL), MLFAB_ERR_ARGUMENT);
  EXPECT(node, mlfab_push_sparse(node, 5, good, NULL, 2, NULL, NULL), MLFAB_ERR_ARGUMENT);
  EXPECT(node, mlfab_push_sparse(node, 5, good, bad, 2, NULL, NULL), MLFAB_ERR_NOT_FINITE);
  /* Misaligned by every number of bytes; nothing is sent of it. */
  static uint64_t indices[4];
  static float sparse[4] = {1, 1, 1, 1};
  indices[1] = 7;
  for (uintptr_t off = 1; off < 8; off++) {
    const uint64_t *at = (const uint64_t *)(const void *)((const char *)indices + off);
    REFUSED(node, mlfab_push_sparse(node, 5, at, values, 2, NULL, NULL), MLFAB_ERR_ARGUMENT,
            "not aligned");
    const void *data = (const char *)sparse + off;
    if (off % 4)
      REFUSED(node, mlfab_push_sparse(node, 5, good, data, 2, NULL, NULL), MLFAB_ERR_ARGUMENT,
              "not aligned");
  }
  OK(node, mlfab_push_sparse(node, 5, NULL, NULL, 0, NULL, NULL));
  OK(node, mlfab_push_sparse(node, 5, good, values, 2, NULL, NULL));
  pull();
  assert_true(v[0] == 2.0f && v[7] == 3.0f && v[1] == 0.0f && v[COUNT - 1] == 0.0f);
}

TEST(test_caches) {
  mlfab_pull_options options = {.size = sizeof options, .flags = MLFAB_PULL_KEPT};
  const void *data;
  uint64_t count;
  for (uint32_t tags = 0; tags < 2; tags++) {
    mlfab *node = open_world(1, 1);
    mlfab_model_options o = model_of(sync_of(MLFAB_SYNC_ASYNC));
    o.tags = tags;
    EXPECT(node, mlfab_cached(node, 5, &data, &count), MLFAB_ERR_STATE);
    start(&o);
    const mlfab_buf none = {5, 0, NULL, COUNT};
    if (tags == 0) {
      EXPECT(node, mlfab_pull(node, &weights, 1, &options, NULL), MLFAB_ERR_ARGUMENT);
      EXPECT(node, mlfab_pull(node, &none, 1, NULL, NULL), MLFAB_ERR_ARGUMENT);
      EXPECT(node, mlfab_cached(node, 5, &data, &count), MLFAB_ERR_STATE);
      world_close(&w);
      continue;
    }
    u[9] = 4;
    push(0);
    OK(node, mlfab_pull(node, &none, 1, NULL, NULL));
    OK(node, mlfab_cached(node, 5, &data, &count));
    assert_int_equal(count, COUNT);
    assert_true(((const float *)data)[9] == 4.0f);
    EXPECT(node, mlfab_cached(node, 4, &data, &count), MLFAB_ERR_TENSOR);
    options.flags = 8;
    EXPECT(node, mlfab_pull(node, &weights, 1, &options, NULL), MLFAB_ERR_ARGUMENT);
    world_close(&w);
  }
}

TESTS(NULL, NULL)
