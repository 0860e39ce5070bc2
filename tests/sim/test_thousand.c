/* test_thousand.c - a thousand nodes in one process: 996 workers and 4 dedicated servers, asynchronous and
 * in rounds. Every worker adds 1 to its own element and to a shared one; at the end the model equals the
 * sum of the pushes, and every worker has seen its own part. */
#include "job.h"

enum { SERVERS = 4, WORKERS = 996, STEPS = 3, COUNT = 4096 }; /* 32 KiB: a slice for every server */

typedef struct crowd {
  mlfab_sim *sim;
  mlfab *server[SERVERS], *worker[WORKERS];
  mlfab_request request[WORKERS];
  int64_t *update, *weights; /* COUNT elements a worker */
} crowd;

static void open_node(crowd *c, uint32_t host, uint32_t roles, uint32_t rank, mlfab **node) {
  mlfab_config config;
  mlfab_config_init(&config);
  config.roles = roles;
  config.rank = (int32_t)rank;
  config.workers = WORKERS;
  config.servers = SERVERS;
  config.dedicated = 1;
  config.eager_bytes = 16384;
  sim_open(c->sim, host, &config, node);
}

static void open_all(crowd *c) {
  mlfab_sim_options options = {.size = sizeof options, .hosts = SERVERS + WORKERS, .seed = 1000};
  assert_int_equal(mlfab_sim_create(&options, &c->sim), 0);
  for (uint32_t i = 0; i < SERVERS; i++) open_node(c, i, MLFAB_ROLE_SERVER, i, &c->server[i]);
  for (uint32_t i = 0; i < WORKERS; i++)
    open_node(c, SERVERS + i, MLFAB_ROLE_WORKER, i, &c->worker[i]);
  for (uint32_t i = 0; i < WORKERS; i++) sim_await(c->sim, c->worker[i]);
}

/* Steps the simulator until all requests are done, and ends them. */
static void finish_all(crowd *c) {
  for (uint32_t i = 0; i < WORKERS; i++) {
    mlfab_result result;
    assert_int_equal(mlfab_wait(c->worker[i], c->request[i], 0, &result), 0);
  }
}

/* Worker i's element; they lie in all four shards. */
static uint32_t own(uint32_t i) { return 4 * i + 1; }

static void step(crowd *c, int64_t step_number) {
  for (uint32_t i = 0; i < WORKERS; i++) {
    mlfab_buf u = {MLFAB_ALL, 0, c->update + (size_t)i * COUNT, COUNT};
    assert_int_equal(mlfab_push_start(c->worker[i], &u, 1, NULL, &c->request[i]), 0);
  }
  finish_all(c);
  for (uint32_t i = 0; i < WORKERS; i++) {
    mlfab_buf w = {MLFAB_ALL, 0, c->weights + (size_t)i * COUNT, COUNT};
    assert_int_equal(mlfab_pull_start(c->worker[i], &w, 1, NULL, &c->request[i]), 0);
  }
  finish_all(c);
  for (uint32_t i = 0; i < WORKERS; i++) {
    const int64_t *w = c->weights + (size_t)i * COUNT;
    assert_int_equal(w[own(i)], step_number);
    assert_int_equal(w[0], step_number * WORKERS);
    assert_int_equal(w[own(WORKERS - 1 - i)], step_number);
  }
}

static void run_crowd(uint32_t sync) {
  crowd *c = calloc(1, sizeof *c);
  assert_non_null(c);
  size_t bytes = (size_t)WORKERS * COUNT * sizeof(int64_t);
  c->update = calloc(1, bytes);
  c->weights = calloc(1, bytes);
  assert_true(c->update && c->weights);
  open_all(c);
  mlfab_model_options options = {.size = sizeof options, .sync = sync};
  for (uint32_t i = 0; i < WORKERS; i++) {
    c->update[(size_t)i * COUNT] = c->update[(size_t)i * COUNT + own(i)] = 1;
    assert_int_equal(mlfab_tensor_add(c->worker[i], 1, MLFAB_I64, COUNT), 0);
    assert_int_equal(mlfab_model_start(c->worker[i], &options, NULL, 0), 0);
  }
  for (int64_t s = 1; s <= STEPS; s++) step(c, s);
  mlfab_stats stats;
  assert_int_equal(mlfab_get_stats(c->server[0], &stats, sizeof stats), 0);
  assert_int_equal(stats.peers_died, 0);
  assert_int_equal(stats.updates_applied, (uint64_t)STEPS * WORKERS);
  print_message("%s: %.3f s of virtual time\n", sync ? "bsp" : "async",
                (double)(mlfab_sim_clock(c->sim) - 1000000000u) * 1e-9);
  for (uint32_t i = 0; i < WORKERS; i++) mlfab_abandon(&c->worker[i]);
  for (uint32_t i = 0; i < SERVERS; i++) mlfab_abandon(&c->server[i]);
  mlfab_sim_destroy(&c->sim);
  free(c->update);
  free(c->weights);
  free(c);
}

TEST(test_async) { run_crowd(MLFAB_SYNC_ASYNC); }

TEST(test_rounds) { run_crowd(MLFAB_SYNC_BSP); }

TESTS(NULL, NULL)
