/* test_growth.c - what a worker that joins a running fabric means to collectives and objects; how server 0
 * gives numbers; wrong configurations. tests/sim/test_growth.c has the rounds. */
#define _GNU_SOURCE 1
#include "world.h"
#include "../testing.h"
#include "../../mlfab_partial.h"

#include <pthread.h>
#include <unistd.h>

enum { COUNT = 8 };

/* --- two founders and a third number, simulated --- */

static world w;

static void open_one(uint32_t i) {
  mlfab_config c = world_config(&w, i);
  c.workers = 2;
  c.workers_max = 3;
  sim_open(w.sim, i, &c, &w.node[i]);
}

static void open_founders(uint64_t seed) {
  world_init(&w, 3, 1, 1);
  world_network(&w, seed);
  for (uint32_t i = 0; i < 4; i++)
    if (i != 2) open_one(i);
  for (uint32_t i = 0; i < 4; i++)
    if (i != 2) world_await(&w, i);
}

static void open_joiner(void) {
  open_one(2);
  world_await(&w, 2);
}

static int is_done(uint32_t i, mlfab_request request, int status) {
  mlfab_result result;
  int done;
  OK(w.node[i], mlfab_test(w.node[i], request, &done, &result));
  if (done) world_expect(w.node[i], result.status, status, "request");
  return done;
}

/* Waits for a request, while the simulator drives all nodes. */
static void wait_for(uint32_t i, mlfab_request request, int status) {
  while (!is_done(i, request, status)) sim_step(w.sim);
}

static float data[3][COUNT];

static mlfab_request allreduce(uint32_t i) {
  const mlfab_vec vec = {data[i], COUNT};
  mlfab_request request;
  for (uint32_t k = 0; k < COUNT; k++) data[i][k] = (float)(1 << i);
  OK(w.node[i], mlfab_allreduce_start(w.node[i], &vec, 1, MLFAB_F32, NULL, &request));
  return request;
}

static void expect_sum(uint32_t i, float sum) {
  for (uint32_t k = 0; k < COUNT; k++)
    if (data[i][k] < sum || data[i][k] > sum)
      fail_msg("worker %u has %g, not %g", i, (double)data[i][k], (double)sum);
}

/* A call that is open when a joiner calls ends with the members that it had; the next one has the joiner. */
TEST(test_collectives) {
  mlfab_request first[2], r[3];
  uint32_t ranks[4], n = 0;
  for (uint64_t seed = 1; seed < 20; seed++) {
    int late = seed % 2 == 1; /* is a call open when the joiner comes? */
    open_founders(seed);
    for (uint32_t i = 0; i < 2; i++) first[i] = allreduce(i);
    for (uint32_t i = 0; i < 2; i++) wait_for(i, first[i], 0);
    if (late) first[0] = allreduce(0);
    open_joiner();
    OK(w.node[2], mlfab_present(w.node[2], ranks, 4, &n));
    assert_int_equal(n, 3);
    r[2] = allreduce(2);
    mlfab_sim_run(w.sim, WORLD_S * (seed % 3));
    assert_false(is_done(2, r[2], 0));
    if (late) {
      first[1] = allreduce(1);
      for (uint32_t i = 0; i < 2; i++) wait_for(i, first[i], 0);
      for (uint32_t i = 0; i < 2; i++) expect_sum(i, 3.0f);
    }
    if (late) mlfab_sim_run(w.sim, WORLD_MS); /* the epoch ends when its calls have */
    /* The founders may have begun another call before they were told. */
    for (int calls = 0; data[0][0] < 3.5f || calls == 0; calls++) {
      for (uint32_t i = 0; i < 2; i++) r[i] = allreduce(i);
      for (uint32_t i = 0; i < 2; i++) wait_for(i, r[i], 0);
      expect_sum(1, data[0][0]);
      assert_true(calls < 8);
    }
    wait_for(2, r[2], 0);
    for (uint32_t i = 0; i < 3; i++) expect_sum(i, 7.0f);
    OK(w.node[0], mlfab_present(w.node[0], ranks, 4, &n));
    assert_int_equal(n, 3);
    /* It leaves in good order, and its number is taken again: still no failure. */
    OK(w.node[2], mlfab_finish(w.node[2], 0));
    mlfab_close(&w.node[2]);
    open_joiner();
    r[2] = allreduce(2);
    mlfab_sim_run(w.sim, WORLD_S);
    for (uint32_t i = 0; i < 2; i++) r[i] = allreduce(i);
    for (uint32_t i = 0; i < 3; i++) wait_for(i, r[i], 0);
    for (uint32_t i = 0; i < 3; i++) expect_sum(i, 7.0f);
    world_close(&w);
  }
}

/* --- real processes' contexts, in one process: opening with `join` waits --- */

static char address[64];

static mlfab_config config_of(int32_t rank, uint32_t workers, uint32_t workers_max) {
  mlfab_config c;
  mlfab_config_init(&c);
  c.rank = rank;
  c.workers = workers;
  c.workers_max = workers_max;
  c.timeout_ns = 20 * (uint64_t)WORLD_S;
  c.heartbeat_ns = 100 * WORLD_MS;
  memcpy(c.coordinator, address, sizeof address);
  return c;
}

static void fresh_address(const char *name) {
  snprintf(address, sizeof address, "unix:@mlfab-growth-%s-%ld", name, (long)getpid());
}

static mlfab *open_as(const mlfab_config *c) {
  mlfab *node = NULL;
  mlfab_error error;
  if (mlfab_open(c, &node, &error)) fail_msg("open: %s", error.text);
  return node;
}

static mlfab_config joining(void) {
  mlfab_config c = config_of(0, 0, 0);
  c.join = 1;
  return c;
}

static void refused(const mlfab_config *c, int code, const char *text) {
  mlfab *node = NULL;
  mlfab_error error;
  assert_int_equal(mlfab_open(c, &node, &error), code);
  if (!strstr(error.text, text)) fail_msg("'%s' is not in '%s'", text, error.text);
  assert_null(node);
}

static void has_rank(mlfab *node, int32_t want) {
  int32_t rank;
  uint32_t workers, servers;
  OK(node, mlfab_rank(node, &rank, &workers, &servers));
  assert_int_equal(rank, want);
  assert_int_equal(workers, 3);
  assert_int_equal(servers, 1);
}

/* Server 0 gives numbers that nobody has, then those of workers that have left; and no more than there are. */
TEST(test_numbers) {
  mlfab_error error;
  fresh_address("numbers");
  mlfab_config first = config_of(0, 1, 3), c = joining();
  mlfab *founder = open_as(&first), *one = open_as(&c), *two = open_as(&c);
  has_rank(founder, 0);
  has_rank(one, 1);
  has_rank(two, 2);
  refused(&c, MLFAB_ERR_LIMIT, "no number for one more worker: workers is 1, workers_max 3");
  mlfab_config taken = config_of(2, 1, 3), other = config_of(2, 1, 4), few = config_of(1, 2, 3);
  refused(&taken, MLFAB_ERR_RANK_TAKEN, "worker 2 is another process");
  refused(&other, MLFAB_ERR_WORLD,
          "workers_max (MLFAB_WORKERS_MAX) is 4 at worker 2, 3 at server 0");
  refused(&few, MLFAB_ERR_WORLD, "is 2 at worker 1, 1 at server 0");
  /* A joiner with another model, and then with the right one. */
  mlfab_buf none = {7, 0, data[0], COUNT};
  OK(founder, mlfab_tensor_add(founder, 7, MLFAB_F32, COUNT));
  OK(founder, mlfab_model_start(founder, NULL, NULL, 0));
  OK(one, mlfab_tensor_add(one, 7, MLFAB_F32, COUNT + 1));
  EXPECT(one, mlfab_model_start(one, NULL, NULL, 0), MLFAB_ERR_MODEL);
  OK(one, mlfab_last_error(one, &error));
  assert_non_null(strstr(error.text, "tensor number 0 is id 7, 9 x "));
  OK(two, mlfab_tensor_add(two, 7, MLFAB_F32, COUNT));
  OK(two, mlfab_model_start(two, NULL, &none, 1));
  OK(two, mlfab_push(two, &none, 1, NULL, NULL));
  mlfab_close(&one);
  one = open_as(&c); /* a new process of the number: it counts its updates anew */
  has_rank(one, 1);
  OK(one, mlfab_tensor_add(one, 7, MLFAB_F32, COUNT));
  OK(one, mlfab_model_start(one, NULL, &none, 1));
  OK(one, mlfab_push(one, &none, 1, NULL, NULL));
  mlfab_close(&one);
  mlfab_close(&two);
  mlfab_close(&founder);
}

TEST(test_configurations) {
  mlfab *node = NULL;
  mlfab_error error;
  fresh_address("none");
  mlfab_config c = config_of(0, 4, 3);
  refused(&c, MLFAB_ERR_CONFIG, "workers_max is below workers");
  c = config_of(0, 4, 70000);
  refused(&c, MLFAB_ERR_CONFIG, "the limits are 65536 workers");
  c = config_of(3, 2, 3);
  refused(&c, MLFAB_ERR_RANK_RANGE, "rank 3 is not in 0..2");
  c = joining();
  c.roles = MLFAB_ROLE_SERVER | MLFAB_ROLE_WORKER;
  refused(&c, MLFAB_ERR_CONFIG, "is a worker, or a server");
  c = config_of(0, 1, 1);
  c.servers_max = 2;
  refused(&c, MLFAB_ERR_CONFIG, "only dedicated servers can join");
  c.dedicated = 1;
  c.servers = 3;
  refused(&c, MLFAB_ERR_CONFIG, "servers_max is below servers");
  c.servers_max = 4097;
  refused(&c, MLFAB_ERR_CONFIG, "4096 servers");
  c.servers_max = 4;
  c.roles = MLFAB_ROLE_SERVER;
  c.rank = 4;
  refused(&c, MLFAB_ERR_RANK_RANGE, "rank 4 is not in 0..3");
  c = joining();
  c.coordinator[0] = 0;
  refused(&c, MLFAB_ERR_CONFIG, "needs server 0's address");
  c = joining();
  assert_int_equal(mlfab_open_start(&c, &node, &error), MLFAB_ERR_UNSUPPORTED);
  assert_non_null(strstr(error.text, "call mlfab_open"));
  c.timeout_ns = 100 * WORLD_MS;
  refused(&c, MLFAB_ERR_TIMEOUT, "no answer from server 0");
  c = config_of(0, 0, 0);
  assert_int_equal(mlfab_config_set(&c, "workers_max", "12", &error), 0);
  assert_int_equal(mlfab_config_set(&c, "join", "1", &error), 0);
  assert_int_equal(mlfab_config_set(&c, "servers_max", "5", &error), 0);
  assert_true(c.workers_max == 12 && c.join == 1 && c.servers_max == 5);
  assert_int_equal(mlfab_config_set(&c, "join", "2", &error), MLFAB_ERR_CONFIG);
}

/* --- objects: opening them waits, so the founders have a thread each --- */

typedef struct founder {
  pthread_t thread;
  int32_t rank;
  mlfab *node;
  float sum;   /* of the last allreduce */
  int widened; /* the joiner is in it */
} founder;

static pthread_barrier_t meet; /* the founders and the joiner's thread */

static float sum_of(mlfab *node, float own) {
  float x = own;
  OK(node, mlfab_allreduce(node, &x, 1, MLFAB_F32, NULL));
  return x;
}

static void *founder_runs(void *user) {
  founder *me = user;
  const mlfab_partial_options options = {.size = sizeof options, .mode = MLFAB_PARTIAL_SOLO};
  mlfab_config c = config_of(me->rank, 2, 3);
  uint32_t id;
  float x;
  me->node = open_as(&c);
  me->sum = sum_of(me->node, 1.0f);
  OK(me->node, mlfab_partial_open(me->node, 1, MLFAB_F32, &options, &id));
  pthread_barrier_wait(&meet); /* it is open */
  pthread_barrier_wait(&meet); /* the joiner has called */
  for (int k = 0; k < 20; k++) {
    x = 1.0f;
    OK(me->node, mlfab_partial_reduce(me->node, id, &x, 0, NULL));
    me->sum = sum_of(me->node, 1.0f);
    if (me->sum > 2.5f) me->widened = 1;
    usleep(20000);
  }
  x = 0.0f;
  OK(me->node, mlfab_partial_flush(me->node, id, &x, 0));
  pthread_barrier_wait(&meet); /* it was told who it waits for */
  OK(me->node, mlfab_partial_close(me->node, id));
  for (int k = 0; me->sum < 2.5f; k++) {
    me->sum = sum_of(me->node, 1.0f);
    usleep(10000);
  }
  pthread_barrier_wait(&meet);
  return NULL;
}

/* A partial reduction stays with the members that opened it. A joiner's calls wait for its end, and say for whom. */
TEST(test_objects) {
  founder f[2] = {{.rank = 0}, {.rank = 1}};
  mlfab_collective soon = {.size = sizeof soon, .timeout_ns = 300 * WORLD_MS};
  mlfab_config c = joining();
  mlfab_error error;
  float x = 4.0f;
  if (!WORLD_COMPLETE) skip();
  fresh_address("objects");
  c = joining();
  assert_int_equal(pthread_barrier_init(&meet, NULL, 3), 0);
  for (int i = 0; i < 2; i++)
    assert_int_equal(pthread_create(&f[i].thread, NULL, founder_runs, &f[i]), 0);
  pthread_barrier_wait(&meet);
  mlfab *node = open_as(&c);
  pthread_barrier_wait(&meet);
  EXPECT(node, mlfab_allreduce(node, &x, 1, MLFAB_F32, &soon), MLFAB_ERR_TIMEOUT);
  OK(node, mlfab_last_error(node, &error));
  assert_int_equal(error.rank, 0); /* the first founder has the object */
  pthread_barrier_wait(&meet);
  x = 4.0f;
  OK(node, mlfab_allreduce(node, &x, 1, MLFAB_F32, NULL));
  assert_true(x > 5.5f && x < 6.5f);
  pthread_barrier_wait(&meet);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(pthread_join(f[i].thread, NULL), 0);
    assert_false(f[i].widened);
    assert_true(f[i].sum > 5.5f && f[i].sum < 6.5f);
  }
  mlfab_close(&node);
  mlfab_close(&f[1].node);
  mlfab_close(&f[0].node);
  pthread_barrier_destroy(&meet);
}

TESTS(NULL, NULL)
