/* test_workload.c - one workload over every transport, and over three at a time; without a scheduler, with
 * one beside the server, and with a dedicated one. The model at the end is the same, bit for bit.
 *
 * Every node is a thread with its own context and the library's threads; in the simulator all contexts
 * share this thread. Updates are large, so that a scheduler plans and groups them, and spreads the pulls.
 * Asynchronous updates are integers, whose sum has no order; rounds are of floats, added in the order of
 * ranks. */
#include "child.h"

#include "mlfab_sim.h"
#include "mlfab_transport.h"
#include "../unit/chance.h"

#include <pthread.h>
#include <stdatomic.h>

enum { WORKERS = 4, NODES = WORKERS + 2, SERVER = WORKERS, SCHEDULER, UPDATES = 6, COUNT = 20000 };
#define SECOND 1000000000ull

struct job;
typedef struct node {
  struct job *job;
  uint32_t number;
  mlfab *ctx;
  int line; /* of the failure, or 0 */
  mlfab_request request;
  int64_t update[COUNT], model[COUNT];
} node;

typedef struct job {
  const char *name;
  uint32_t scheduler, rounds;
  char coordinator[128];
  const mlfab_transport *own;
  mlfab_sim *sim;
  node nodes[NODES];
  uint64_t groups, plans;
} job;

/* ---- a user-defined transport: TCP under another name, between some nodes only ---- */

static _Atomic(void *) own_self[NODES];
static atomic_uint own_connects, own_passes; /* addresses that it left to other transports */

static int own_open(const mlfab_transport_options *options, void **self_p, char *address) {
  char there[256];
  const node *n = options->user;
  int code = mlfab_transport_tcp()->open(options, self_p, there);
  if (code) return code;
  atomic_store(&own_self[n->number], *self_p);
  snprintf(address, 256, "own:%u:%.200s", (unsigned)n->number, there);
  return 0;
}

static int own_reach(void *self, const char *address) {
  unsigned me = 0, other;
  if (strncmp(address, "own:", 4) != 0) return 0;
  while (atomic_load(&own_self[me]) != self) me++;
  other = (unsigned)strtoul(address + 4, NULL, 10);
  if ((me + other) % 3 == 0) return 1;
  atomic_fetch_add(&own_passes, 1);
  return 0;
}

static int own_connect(void *self, const char *address, uint64_t token) {
  atomic_fetch_add(&own_connects, 1);
  return mlfab_transport_tcp()->connect(self, strchr(address + 4, ':') + 1, token);
}

static const mlfab_transport *own_transport(void) {
  static mlfab_transport table;
  if (table.size) return &table;
  table = *mlfab_transport_tcp();
  table.name = "own";
  table.open = own_open;
  table.reach = own_reach;
  table.connect = own_connect;
  return &table;
}

static uint32_t nodes_of(const job *j) {
  return j->scheduler == MLFAB_SCHEDULER_OWN ? NODES : NODES - 1;
}

static void configure(const job *j, uint32_t number, mlfab_config *c) {
  mlfab_config_init(c);
  c->workers = WORKERS;
  c->servers = c->dedicated = 1;
  c->roles = number == SERVER      ? MLFAB_ROLE_SERVER
             : number == SCHEDULER ? MLFAB_ROLE_SCHEDULER
                                   : MLFAB_ROLE_WORKER;
  c->rank = number < WORKERS ? (int32_t)number : 0;
  c->scheduler = j->scheduler;
  mlfab_schedule_init(&c->schedule);
  c->schedule.interval_ns = SECOND / 100; /* so that many wait for a plan */
  /* As if each node were a host: on one host groups would gain nothing. */
  c->host = number + 1;
  c->eager_bytes = 16384;
  c->chunk_bytes = 16384;
  c->heartbeat_ns = SECOND; /* nobody dies of a busy machine */
  c->timeout_ns = 60 * SECOND;
  c->transports = strncmp(j->coordinator, "shm:", 4) ? MLFAB_USE_TCP : MLFAB_USE_SHM;
  c->allow_insecure = 1; /* without a key, over the loopback */
  if (!strncmp(j->coordinator, "tcp:", 4)) strcpy(c->listen, "tcp:127.0.0.1:0");
  if (j->own) {
    c->transport = j->own;
    c->transport_user = (void *)(uintptr_t)&j->nodes[number];
    c->transports = number % 2 ? MLFAB_USE_TCP | MLFAB_USE_SHM : MLFAB_USE_TCP;
  }
  snprintf(c->job, sizeof c->job, "workload");
  snprintf(c->coordinator, sizeof c->coordinator, "%s", j->coordinator);
}

static void fill(node *n, uint32_t k) {
  for (uint64_t i = 0; i < COUNT; i++) {
    uint64_t x = mix((i * WORKERS + n->number) * UPDATES + k);
    double wide = ((double)(x >> 11) * 0x1p-53 - 0.5) * (double)(1u << (x & 15));
    n->update[i] = (int64_t)x;
    if (n->job->rounds) memcpy(&n->update[i], &wide, sizeof wide);
  }
}

/* The expected model. */
static int64_t wanted(const job *j, uint64_t i) {
  uint64_t sum = 0;
  double wide = 0.0;
  for (uint32_t k = 0; k < UPDATES; k++) {
    double round = 0.0;
    for (uint32_t w = 0; w < WORKERS; w++) {
      uint64_t x = mix((i * WORKERS + w) * UPDATES + k);
      sum += x;
      round += ((double)(x >> 11) * 0x1p-53 - 0.5) * (double)(1u << (x & 15));
    }
    wide += round;
  }
  if (j->rounds) memcpy(&sum, &wide, sizeof sum);
  return (int64_t)sum;
}

#define TRY(call)                        \
  do {                                   \
    if (call) return n->line = __LINE__; \
  } while (0)

/* Sets the capacity of its links. */
static int limit(node *n) {
  if (n->job->scheduler) TRY(mlfab_set_link(n->ctx, 20e6, 20e6));
  return 0;
}

static int define(node *n) {
  mlfab_model_options options = {.size = sizeof options,
                                 .sync = n->job->rounds ? MLFAB_SYNC_BSP : MLFAB_SYNC_ASYNC,
                                 .deterministic = n->job->rounds};
  TRY(mlfab_tensor_add(n->ctx, 1, n->job->rounds ? MLFAB_F64 : MLFAB_I64, COUNT));
  TRY(mlfab_model_start(n->ctx, &options, NULL, 0));
  return 0;
}

static int push(node *n, uint32_t k) {
  mlfab_buf buf = {1, 0, n->update, COUNT};
  fill(n, k);
  TRY(mlfab_push_start(n->ctx, &buf, 1, NULL, &n->request));
  return 0;
}

static int pull(node *n) {
  mlfab_buf buf = {1, 0, n->model, COUNT};
  TRY(mlfab_pull_start(n->ctx, &buf, 1, NULL, &n->request));
  return 0;
}

static int finish(node *n) {
  TRY(mlfab_wait(n->ctx, n->request, 0, NULL));
  return 0;
}

/* A worker from open to close; the barrier ensures that all pushes are in the model that is read. */
static int work(node *n) {
  if (define(n)) return 1;
  for (uint32_t k = 0; k < UPDATES; k++) {
    if (push(n, k) || finish(n)) return 1;
    if ((k % 2 || n->job->rounds) && (pull(n) || finish(n))) return 1;
  }
  TRY(mlfab_barrier(n->ctx, NULL));
  if (pull(n) || finish(n)) return 1;
  TRY(mlfab_close(&n->ctx));
  return 0;
}

static int live(node *n) {
  mlfab_config c;
  mlfab_error error;
  mlfab_stats stats;
  configure(n->job, n->number, &c);
  if (mlfab_open(&c, &n->ctx, &error)) {
    fprintf(stderr, "node %u: %s\n", n->number, error.text);
    return n->line = __LINE__;
  }
  if (limit(n)) return 1;
  if (n->number < WORKERS) return work(n);
  TRY(mlfab_serve(n->ctx, 60 * SECOND));
  TRY(mlfab_get_stats(n->ctx, &stats, sizeof stats));
  if (n->number == SERVER) n->job->groups = stats.groups_applied;
  if (stats.plans_made) n->job->plans = stats.plans_made;
  TRY(mlfab_close(&n->ctx));
  return 0;
}

static void *live_thread(void *argument) {
  live(argument);
  return NULL;
}

static void run_threads(job *j) {
  pthread_t threads[NODES];
  for (uint32_t i = 0; i < nodes_of(j); i++)
    assert_int_equal(pthread_create(&threads[i], NULL, live_thread, &j->nodes[i]), 0);
  for (uint32_t i = 0; i < nodes_of(j); i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
}

/* The same in the simulator: a blocking call lets the others continue. */
static void run_sim(job *j) {
  mlfab_sim_options options = {
      .size = sizeof options, .hosts = NODES, .rate_bytes_per_s = 20000000};
  mlfab_error error;
  mlfab_stats stats;
  assert_int_equal(mlfab_sim_create(&options, &j->sim), 0);
  for (uint32_t i = 0; i < nodes_of(j); i++) {
    mlfab_config c;
    configure(j, i, &c);
    c.transports = 0;
    snprintf(c.coordinator, sizeof c.coordinator, "sim:%u", (unsigned)SERVER);
    assert_int_equal(mlfab_sim_open(j->sim, i, &c, &j->nodes[i].ctx, &error), 0);
  }
  for (uint32_t i = 0; i < nodes_of(j); i += mlfab_is_ready(j->nodes[i].ctx, &error) == 1)
    assert_int_equal(mlfab_sim_step(j->sim), 1);
  for (uint32_t i = 0; i < WORKERS; i++)
    assert_int_equal(define(&j->nodes[i]) || limit(&j->nodes[i]), 0);
  for (uint32_t k = 0; k < 2 * UPDATES; k++) {
    for (uint32_t i = 0; i < WORKERS; i++)
      assert_int_equal(k % 2 ? pull(&j->nodes[i]) : push(&j->nodes[i], k / 2), 0);
    for (uint32_t i = 0; i < WORKERS; i++) assert_int_equal(finish(&j->nodes[i]), 0);
  }
  assert_int_equal(mlfab_get_stats(j->nodes[SERVER].ctx, &stats, sizeof stats), 0);
  j->groups = stats.groups_applied;
  for (uint32_t i = SERVER; i < nodes_of(j); i++) {
    assert_int_equal(mlfab_get_stats(j->nodes[i].ctx, &stats, sizeof stats), 0);
    if (stats.plans_made) j->plans = stats.plans_made;
  }
  for (uint32_t i = 0; i < nodes_of(j); i++) mlfab_abandon(&j->nodes[i].ctx);
  mlfab_sim_destroy(&j->sim);
}

static void run_job(const char *name, uint32_t scheduler, uint32_t rounds) {
  job *j = calloc(1, sizeof *j);
  assert_non_null(j);
  *j = (job){.name = name, .scheduler = scheduler, .rounds = rounds};
  for (uint32_t i = 0; i < NODES; i++) {
    j->nodes[i].job = j;
    j->nodes[i].number = i;
  }
  if (!strcmp(name, "several")) j->own = own_transport();
  if (!strcmp(name, "tcp") || j->own)
    snprintf(j->coordinator, sizeof j->coordinator, "tcp:127.0.0.1:%u", free_port());
  else
    snprintf(j->coordinator, sizeof j->coordinator,
             strcmp(name, "unix") ? "shm:workload-%ld" : "unix:/tmp/mlfab-workload-%ld.sock",
             (long)getpid());
  if (!strcmp(name, "sim")) {
    run_sim(j);
  } else {
    run_threads(j);
  }
  for (uint32_t i = 0; i < nodes_of(j); i++)
    if (j->nodes[i].line) fail_msg("node %u: line %d", i, j->nodes[i].line);
  for (uint32_t w = 0; w < WORKERS; w++)
    for (uint64_t i = 0; i < COUNT; i++)
      if (j->nodes[w].model[i] != wanted(j, i)) fail_msg("worker %u: element %u", w, (unsigned)i);
  if (scheduler) assert_true(j->plans > 0);
  print_message("%s, %s, scheduler %u: %u plans, %u groups\n", name, rounds ? "rounds" : "async",
                scheduler, (unsigned)j->plans, (unsigned)j->groups);
  free(j);
}

/* Of "several": every node has two or three transports, and reaches its peers over each of them. */
static void run_all(void **state) {
  const char *name = *state;
  for (uint32_t rounds = 0; rounds < 2; rounds++)
    for (uint32_t scheduler = MLFAB_SCHEDULER_NONE; scheduler <= MLFAB_SCHEDULER_OWN; scheduler++)
      run_job(name, scheduler, rounds);
  if (!strcmp(name, "several"))
    assert_true(atomic_load(&own_connects) > 0 && atomic_load(&own_passes) > 0);
}

int main(void) {
  static char names[][8] = {"sim", "tcp", "unix", "shm", "several"};
  struct CMUnitTest tests[sizeof names / sizeof *names];
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    tests[i] = (struct CMUnitTest){names[i], run_all, NULL, NULL, names[i]};
  return cmocka_run_group_tests_name("workload", tests, NULL, NULL);
}
