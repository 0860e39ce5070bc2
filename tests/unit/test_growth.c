/* test_growth.c - workers that join a running fabric of contexts in one process: how server 0 gives numbers, objects that keep
 * their members, wrong configurations. sim/test_servers.c has the rounds, sim/test_joiners.c collectives and barriers. */
#define _GNU_SOURCE 1
#include "world.h"
#include "../testing.h"
#include "../../mlfab_partial.h"

#include <pthread.h>
#include <unistd.h>

enum { COUNT = 8 };

/* --- real processes' contexts, in one process: opening with `join` waits --- */

static char address[64];
static float data[COUNT];

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
  mlfab_buf none = {7, 0, data, COUNT};
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
