/* test_schedule_settings.c - the precedence of schedule settings: the environment overrides a program's
 * defaults, and server 0's settings hold for the whole fabric. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* setenv */
#endif
#include "world.h"
#include "../testing.h"

/* A schedule of size 0 means the defaults, so the environment fills it like one that was initialised. */
TEST(test_environment) {
  mlfab_config config, fresh;
  mlfab_error error;
  unsetenv("MLFAB_ACCUMULATORS");
  setenv("MLFAB_SCHEDULER", "beside", 1);
  setenv("MLFAB_DELAY_BOUND", "7", 1);
  setenv("MLFAB_PLAN_AHEAD_MS", "20", 1);
  for (int zero = 0; zero < 2; zero++) {
    mlfab_config_init(&config);
    if (zero) memset(&config.schedule, 0, sizeof config.schedule);
    assert_int_equal(mlfab_config_from_env(&config, &error), 0);
    assert_int_equal(config.scheduler, MLFAB_SCHEDULER_BESIDE);
    assert_int_equal(config.schedule.size, sizeof config.schedule);
    assert_int_equal(config.schedule.delay_bound, 7);
    assert_int_equal(config.schedule.plan_ahead_ns, 20 * WORLD_MS);
  }
  setenv("MLFAB_DELAY_BOUND", "0", 1);
  mlfab_config_init(&config);
  assert_int_equal(mlfab_config_from_env(&config, &error), MLFAB_ERR_CONFIG);
  assert_non_null(strstr(error.text, "MLFAB_DELAY_BOUND"));
  unsetenv("MLFAB_SCHEDULER");
  unsetenv("MLFAB_PLAN_AHEAD_MS");
  setenv("MLFAB_DELAY_BOUND", "none", 1);
  mlfab_config_init(&config);
  mlfab_config_init(&fresh);
  assert_int_equal(mlfab_config_from_env(&config, &error), 0);
  assert_memory_equal(&config, &fresh, sizeof config);
  unsetenv("MLFAB_DELAY_BOUND");
}

enum { FLOATS = 4096 }; /* 16 KiB: slices for two servers */

/* Three workers and two servers, each opened with its own bound; the model is defined. */
static void fabric_open(world *w, uint64_t bound0, uint64_t bound1) {
  world_init(w, 3, 2, 1);
  w->config.scheduler = MLFAB_SCHEDULER_BESIDE;
  world_network(w, 3);
  for (uint32_t i = 0; i < w->nodes; i++) {
    mlfab_config c = world_config(w, i);
    if (i == w->workers) c.schedule.delay_bound = bound0;
    if (i == w->workers + 1) c.schedule.delay_bound = bound1;
    sim_open(w->sim, i, &c, &w->node[i]);
  }
  for (uint32_t i = 0; i < w->nodes; i++) world_await(w, i);
  for (uint32_t i = 0; i < w->workers; i++) {
    OK(w->node[i], mlfab_tensor_add(w->node[i], 1, MLFAB_F32, FLOATS));
    OK(w->node[i], mlfab_model_start(w->node[i], NULL, NULL, 0));
  }
}

/* Pushes an update that was computed from the first version. */
static int fabric_push(world *w, uint32_t worker, mlfab_result *result) {
  static float update[FLOATS];
  mlfab_buf buf = {MLFAB_ALL, 0, update, FLOATS};
  mlfab_push_options options = {.size = sizeof options, .scale = 1.0, .version = 1};
  return mlfab_push(w->node[worker], &buf, 1, &options, result);
}

/* Whatever bounds the others were opened with: an update is dropped by all servers or by none. */
TEST(test_server_0_counts) {
  static const uint64_t bounds[][2] = {{1, MLFAB_UNBOUNDED}, {MLFAB_UNBOUNDED, 1}, {2, 1}};
  for (size_t i = 0; i < sizeof bounds / sizeof bounds[0]; i++) {
    static world w;
    mlfab_result result;
    fabric_open(&w, bounds[i][0], bounds[i][1]);
    OK(w.node[0], fabric_push(&w, 0, &result));
    int dropped = bounds[i][0] == 1;
    assert_int_equal(fabric_push(&w, 1, &result), dropped ? MLFAB_ERR_DROPPED : 0);
    assert_int_equal(result.applied, dropped ? 0 : 2);
    assert_int_equal(result.refused, dropped ? 2 : 0);
    mlfab_schedule schedule;
    mlfab_schedule_init(&schedule);
    schedule.delay_bound = dropped ? MLFAB_UNBOUNDED : 1;
    OK(w.node[2], mlfab_set_schedule(w.node[2], &schedule));
    mlfab_sim_run(w.sim, 100 * WORLD_MS);
    assert_int_equal(fabric_push(&w, 1, &result), dropped ? 0 : MLFAB_ERR_DROPPED);
    assert_int_equal(result.applied, dropped ? 2 : 0);
    world_close(&w);
  }
}

/* Rounds drop nothing, whatever the bound. It counts when they have ended. */
TEST(test_bound_beside_rounds) {
  static world w;
  mlfab_sync sync = {.size = sizeof sync, .kind = MLFAB_SYNC_BSP};
  mlfab_schedule schedule;
  mlfab_schedule_init(&schedule);
  schedule.delay_bound = 1;
  world_init(&w, 1, 1, 1);
  w.config.scheduler = MLFAB_SCHEDULER_BESIDE;
  world_open(&w, 3);
  OK(w.node[0], mlfab_tensor_add(w.node[0], 1, MLFAB_F32, FLOATS));
  OK(w.node[0], mlfab_model_start(w.node[0], NULL, NULL, 0));
  OK(w.node[0], mlfab_set_sync(w.node[0], &sync, MLFAB_ALL, 1000 * WORLD_MS));
  OK(w.node[0], mlfab_set_schedule(w.node[0], &schedule));
  for (int i = 0; i < 3; i++) OK(w.node[0], fabric_push(&w, 0, NULL));
  sync.kind = MLFAB_SYNC_ASYNC;
  OK(w.node[0], mlfab_set_sync(w.node[0], &sync, MLFAB_ALL, 1000 * WORLD_MS));
  assert_int_equal(fabric_push(&w, 0, NULL), MLFAB_ERR_DROPPED);
  world_close(&w);
}

/* Without a link to server 0 nothing changes, and the caller gets an error. */
TEST(test_not_sent) {
  static world w;
  mlfab_sim_options faults = {.size = sizeof faults, .loss = 1.0};
  mlfab_schedule schedule;
  mlfab_schedule_init(&schedule);
  fabric_open(&w, MLFAB_UNBOUNDED, MLFAB_UNBOUNDED);
  OK(w.node[1], mlfab_set_schedule(w.node[1], &schedule));
  assert_int_equal(mlfab_sim_set_faults(w.sim, &faults), 0);
  mlfab_sim_run(w.sim,
                1200 * WORLD_MS); /* the heartbeats are lost, and the connections with them */
  int code = 0;
  for (int i = 0; i < 100 && code != MLFAB_ERR_AGAIN; i++) {
    code = mlfab_set_schedule(w.node[1], &schedule);
    mlfab_sim_run(w.sim, 10 * WORLD_MS);
  }
  EXPECT(w.node[1], code, MLFAB_ERR_AGAIN);
  world_close(&w);
}

TESTS(NULL, NULL)
