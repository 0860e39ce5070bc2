/* test_review_schedule.c - whose schedule counts: the environment's where a program leaves it at its defaults, and
 * server 0's for the whole fabric. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* setenv */
#endif
#include "world.h"

/* A schedule of size 0 means the defaults, so the environment fills it like one that was initialised. */
static void test_environment(void **state) {
  (void)state;
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

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_environment)};
  return cmocka_run_group_tests_name("review_schedule", tests, NULL, NULL);
}
