/* test_slow.c - links on which a chunk takes longer than three heartbeats: work ends, and no transfer is begun again. */
#include "mlfab.h"
#include "mlfab_sim.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { COUNT = 300000 };

/* One worker, one server: model_start, push, pull. */
static void over(uint64_t rate, uint64_t latency_ns, uint64_t beat_ns) {
  const mlfab_sim_options options = {.size = sizeof options,
                                     .hosts = 2,
                                     .seed = 5,
                                     .latency_ns = latency_ns,
                                     .rate_bytes_per_s = rate};
  mlfab_sim *sim;
  mlfab *node[2];
  mlfab_error error;
  mlfab_stats worker, server;
  assert_int_equal(mlfab_sim_create(&options, &sim), 0);
  for (uint32_t h = 0; h < 2; h++) {
    mlfab_config config;
    mlfab_config_init(&config);
    config.workers = config.servers = config.dedicated = 1;
    config.roles = h == 0 ? MLFAB_ROLE_WORKER : MLFAB_ROLE_SERVER;
    config.heartbeat_ns = beat_ns;
    config.timeout_ns = 120000000000u;
    (void)memcpy(config.coordinator, "sim:1", sizeof "sim:1");
    assert_int_equal(mlfab_sim_open(sim, h, &config, &node[h], &error), 0);
  }
  while (mlfab_is_ready(node[0], &error) != 1 || mlfab_is_ready(node[1], &error) != 1)
    assert_int_equal(mlfab_sim_step(sim), 1);
  float *data = calloc(COUNT, sizeof *data);
  mlfab_buf buf = {MLFAB_ALL, 0, data, COUNT};
  assert_int_equal(mlfab_tensor_add(node[0], 0, MLFAB_F32, COUNT), 0);
  assert_int_equal(mlfab_model_start(node[0], NULL, &buf, 1), 0);
  assert_int_equal(mlfab_push(node[0], &buf, 1, NULL, NULL), 0);
  assert_int_equal(mlfab_pull(node[0], &buf, 1, NULL, NULL), 0);
  assert_int_equal(mlfab_get_stats(node[0], &worker, sizeof worker), 0);
  assert_int_equal(mlfab_get_stats(node[1], &server, sizeof server), 0);
  assert_in_range(worker.bytes_sent, 2 * COUNT * 4, 2 * COUNT * 6);
  assert_in_range(server.bytes_sent, COUNT * 4, COUNT * 6);
  assert_int_equal(server.transfers_revoked, 0);
  assert_int_equal(server.pulls_restarted, 0);
  free(data);
  for (uint32_t h = 0; h < 2; h++) mlfab_close(&node[h]);
  mlfab_sim_destroy(&sim);
}

static void test_slow_links(void **state) {
  (void)state;
  over(340000, 100000, 500000000);
  over(300000, 100000, 50000000);
  over(1500000, 100000000, 50000000);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_slow_links)};
  return cmocka_run_group_tests_name("slow", tests, NULL, NULL);
}
