/* test_oom.c - the k-th allocation fails, for every k of a session: in a world of one, and on each node of
 * small fabrics in the simulator, one with a scheduler and one that moves slices. In the same way every
 * write to a file fails once. In a world of one, all allocations of collectives from the k-th on fail, too,
 * until the call has returned.
 *
 * Every failure is an error in time: no crash, no hang, no leak (the allocator counts); the model holds
 * exactly the pushes that succeeded, and a failed call succeeds when it is repeated. */
#include "../testing.h" /* and cmocka.h */

#include "../unit/kept.h"
#include "../unit/memory_disk.h"
#include "../unit/scale.h"
#include "mlfab_partial.h"
#include "mlfab_sim.h"

#include <math.h>

/* COUNT: a collective of so many elements is not eager, and succeeds on both workers or on none. */
enum { COUNT = 9000, NODES = 3, PLANNED_NODES = 5, MOST = 5000 };
/* FAILING: more allocations than any failing call attempts. */
enum { FAILING = 2000 };
#define SECOND 1000000000ull

/* ---- an allocator that fails once, files that fail once ---- */

typedef struct faults {
  uint64_t calls, fail_at; /* the fail_at-th call from the first fails; 0: none */
  uint64_t bytes;
  int fired;
  int lasts; /* all later ones fail as well, until it is 0 */
  int store_fails, stored;
  const mlfab_files *files; /* for checkpoints */
} faults;

static void *allocate(void *user, size_t bytes) {
  faults *f = user;
  if (++f->calls == f->fail_at || (f->lasts && f->fired)) {
    f->fired = 1;
    if (f->calls > f->fail_at + FAILING) fail_msg("it tries for ever");
    return NULL;
  }
  f->bytes += bytes;
  return kept_allocate(bytes);
}

static void release(void *user, void *memory, size_t bytes) {
  faults *f = user;
  assert_true(f->bytes >= bytes);
  f->bytes -= bytes;
  kept_release(memory, bytes);
}

static int store(void *user, const char *path, const void *data, size_t bytes) {
  faults *f = user;
  (void)path;
  assert_non_null(data);
  assert_true(bytes > 8);
  if (f->store_fails) return MLFAB_ERR_IO;
  f->stored++;
  return 0;
}

static void env_of(faults *f, mlfab_env *env) {
  memset(env, 0, sizeof *env);
  env->size = sizeof *env;
  env->user = f;
  env->allocate = allocate;
  env->release = release;
  env->store = store;
  env->files = f->files;
}

/* ---- a world of one ---- */

typedef struct alone {
  faults faults;
  mlfab *ctx;
  mlfab_dag *dag;
  uint32_t partial, stochastic; /* open objects */
  int64_t data[COUNT], weights[COUNT];
  int64_t pushed; /* the expected model */
} alone;

typedef int (*call)(alone *a);

static int alone_open(alone *a) {
  mlfab_config config;
  mlfab_env env;
  mlfab_error error;
  env_of(&a->faults, &env);
  mlfab_config_init(&config);
  config.env = &env;
  config.timeout_ns = 5 * SECOND;
  config.heartbeat_ns = SECOND / 50; /* messages lost for lack of memory are repeated then */
  config.eager_bytes = 4096;
  /* Telemetry takes its memory; its files cannot be written, which this level does not tell. */
  strcpy(config.log, "error");
  strcpy(config.metrics, "/dev/null/metrics");
  strcpy(config.trace, "/dev/null/trace");
  return mlfab_open(&config, &a->ctx, &error);
}

static mlfab_buf alone_buf(int64_t *data) { return (mlfab_buf){7, 0, data, COUNT}; }

static int alone_tensor(alone *a) { return mlfab_tensor_add(a->ctx, 7, MLFAB_I64, COUNT); }

/* Another tensor, of a type that filters accept. */
static int alone_floats(alone *a) { return mlfab_tensor_add(a->ctx, 8, MLFAB_F32, COUNT); }

static int alone_model(alone *a) {
  for (int i = 0; i < COUNT; i++) a->weights[i] = 5;
  a->pushed = 5;
  mlfab_buf w = alone_buf(a->weights);
  return mlfab_model_start(a->ctx, NULL, &w, 1);
}

static int alone_push(alone *a) {
  for (int i = 0; i < COUNT; i++) a->data[i] = 1;
  mlfab_buf u = alone_buf(a->data);
  int code = mlfab_push(a->ctx, &u, 1, NULL, NULL);
  a->pushed += code == 0;
  return code;
}

static int alone_start(alone *a) {
  mlfab_buf u = alone_buf(a->data);
  mlfab_request request = 0;
  int code = mlfab_push_start(a->ctx, &u, 1, NULL, &request);
  if (!code) code = mlfab_wait(a->ctx, request, 0, NULL);
  a->pushed += code == 0;
  return code;
}

static int alone_pull(alone *a) {
  mlfab_buf w = alone_buf(a->weights);
  int code = mlfab_pull(a->ctx, &w, 1, NULL, NULL);
  for (int i = 0; i < COUNT && !code; i++) assert_int_equal(a->weights[i], a->pushed);
  return code;
}

static int alone_barrier(alone *a) { return mlfab_barrier(a->ctx, NULL); }
static int alone_broadcast(alone *a) { return mlfab_broadcast(a->ctx, 0, a->data, 100, NULL); }
static int alone_allreduce(alone *a) {
  return mlfab_allreduce(a->ctx, a->data, COUNT, MLFAB_I64, NULL);
}
static int alone_checkpoint(alone *a) {
  const mlfab_checkpoint_options o = {.size = sizeof o, .dir = "/disk"};
  return mlfab_checkpoint(a->ctx, &o, NULL);
}
static int alone_restore(alone *a) { return mlfab_restore(a->ctx, "/disk"); }

/* The model begins as the checkpoint, and not with these weights. */
static int alone_restored(alone *a) {
  for (int i = 0; i < COUNT; i++) a->weights[i] = -1;
  mlfab_buf w = alone_buf(a->weights);
  int code = mlfab_model_start(a->ctx, NULL, &w, 1);
  for (int i = 0; i < COUNT && !code; i++) assert_int_equal(a->weights[i], a->pushed);
  return code;
}

static int alone_save(alone *a) { return mlfab_save(a->ctx, "a model"); }

static int alone_filter(alone *a) {
  const mlfab_filter filter = {.size = sizeof filter, .threshold = 0.5};
  return mlfab_set_filter(a->ctx, 8, &filter);
}

static int alone_filtered(alone *a) {
  float *data = (float *)(void *)a->data;
  for (int i = 0; i < COUNT; i++) data[i] = i % 10 == 0 ? 1.0f : 0.0f;
  const mlfab_buf u = {8, 0, data, COUNT};
  return mlfab_push(a->ctx, &u, 1, NULL, NULL);
}

static int alone_sync(alone *a) {
  const mlfab_sync sync = {.size = sizeof sync, .kind = MLFAB_SYNC_SSP, .staleness = 1};
  return mlfab_set_sync(a->ctx, &sync, MLFAB_ALL, 0);
}

static int alone_servers(alone *a) {
  const uint32_t server = 0;
  return mlfab_set_servers(a->ctx, &server, 1, 0);
}

static int alone_partial_open(alone *a) {
  const mlfab_partial_options o = {
      .size = sizeof o, .mode = MLFAB_PARTIAL_SOLO, .results = MLFAB_PARTIAL_QUEUED};
  return mlfab_partial_open(a->ctx, COUNT, MLFAB_I64, &o, &a->partial);
}

/* One worker's own data come back; a failed step leaves its data for the next one. */
static int alone_partial_reduce(alone *a) {
  for (int i = 0; i < COUNT; i++) a->data[i] = 4;
  int code = mlfab_partial_reduce(a->ctx, a->partial, a->data, 0, NULL);
  for (int i = 0; i < COUNT && !code; i++) assert_true(a->data[i] == 4 || a->data[i] == 8);
  return code;
}

static int alone_partial_flush(alone *a) {
  return mlfab_partial_flush(a->ctx, a->partial, a->data, 0);
}

static int alone_partial_close(alone *a) { return mlfab_partial_close(a->ctx, a->partial); }

static int alone_stochastic_open(alone *a) {
  const mlfab_stochastic_options o = {.size = sizeof o, .graph = MLFAB_GRAPH_ALL};
  return mlfab_stochastic_open(a->ctx, COUNT, MLFAB_F64, &o, &a->stochastic);
}

static int alone_stochastic_reduce(alone *a) {
  double *data = (double *)(void *)a->data;
  for (int i = 0; i < COUNT; i++) data[i] = 2.0;
  int code = mlfab_stochastic_reduce(a->ctx, a->stochastic, data, 0, NULL);
  for (int i = 0; i < COUNT && !code; i++) assert_false(data[i] < 2.0 || data[i] > 2.0);
  return code;
}

static int alone_stochastic_close(alone *a) {
  return mlfab_stochastic_close(a->ctx, a->stochastic);
}

/* Ends the epoch: open objects start another one. */
static int alone_refused(alone *a) {
  const mlfab_collective o = {.size = sizeof o, .refuse_nan = 1};
  float infinite = HUGE_VALF;
  mlfab_vec vec = {&infinite, 1};
  int code = mlfab_allreduce_list(a->ctx, &vec, 1, MLFAB_F32, &o);
  return code == MLFAB_ERR_NOT_FINITE ? 0 : code ? code : MLFAB_ERR_INTERNAL;
}

static int alone_compute(void *user, uint64_t round) {
  (void)user, (void)round;
  return 0;
}

static int alone_dag_create(alone *a) {
  uint32_t ops[3] = {0};
  int code = mlfab_dag_create(a->ctx, &a->dag);
  if (code) return code;
  for (int i = 0; i < 3 && !code; i++) {
    code = mlfab_dag_compute(a->dag, alone_compute, a, &ops[i]);
    if (!code && i > 0) code = mlfab_dag_after(a->dag, ops[i], ops[i - 1]);
  }
  if (code) assert_int_equal(mlfab_dag_close(&a->dag), 0);
  return code;
}

static int alone_dag_open(alone *a) { return mlfab_dag_open(a->dag, 0, 0); }

static int alone_dag_round(alone *a) {
  mlfab_request request = 0;
  int code = mlfab_dag_start(a->dag, 0, &request);
  return code ? code : mlfab_wait(a->ctx, request, 0, NULL);
}

static int alone_dag_free(alone *a) { return mlfab_dag_close(&a->dag); }
static int alone_join(alone *a) { return mlfab_finish(a->ctx, 0); }

/* One call: it fails when the fault strikes, and succeeds when repeated. */
static void alone_call(alone *a, call fn, size_t number) {
  int fired = a->faults.fired, lasts = a->faults.lasts, code = fn(a);
  if (a->faults.fired) a->faults.lasts = 0;
  if (!code) return;
  if ((fired && !lasts) || !a->faults.fired || code != MLFAB_ERR_MEMORY)
    print_error("allocation %d, call %d: %s\n", (int)a->faults.fail_at, (int)number,
                mlfab_error_name(code));
  assert_true(a->faults.fired && !(fired && !lasts));
  assert_int_equal(code, MLFAB_ERR_MEMORY);
  code = fn(a);
  /* The world could not form either, and reports it to the next call. */
  if (lasts && code == MLFAB_ERR_MEMORY) code = fn(a);
  if (code)
    print_error("allocation %d, call %d again: %s\n", (int)a->faults.fail_at, (int)number,
                mlfab_error_name(code));
  assert_int_equal(code, 0);
}

/* A checkpoint, and a model that begins as one; returns 1 when the fault struck. */
static int alone_checkpoints(uint64_t fail_at) {
  static const call first[] = {alone_open, alone_tensor, alone_floats,     alone_model,
                               alone_push, alone_pull,   alone_checkpoint, alone_push},
                    then[] = {alone_open,     alone_tensor, alone_floats,     alone_restore,
                              alone_restored, alone_push,   alone_checkpoint, alone_pull};
  memory_disk *disk = calloc(1, sizeof *disk);
  int fired = 0;
  int64_t pushed = 0;
  assert_non_null(disk);
  disk_init(disk);
  for (int life = 0; life < 2; life++) {
    alone *a = calloc(1, sizeof *a);
    assert_non_null(a);
    a->faults.files = &disk->table;
    a->pushed = life ? pushed - 1 : 0; /* the last push came after the checkpoint */
    a->faults.fail_at = life == (int)(1 - fail_at % 2) ? (fail_at + 1) / 2 : 0;
    for (size_t i = 0; i < 8; i++) alone_call(a, life ? then[i] : first[i], i);
    pushed = a->pushed;
    fired |= a->faults.fired;
    assert_int_equal(mlfab_close(&a->ctx), 0);
    assert_int_equal(a->faults.bytes, 0);
    free(a);
  }
  disk_free(disk);
  free(disk);
  return fired;
}

TEST(test_checkpoints) {
  uint64_t k = 1;
  /* Odd numbers fail in the first life, even ones in the second. */
  while (k < MOST && (alone_checkpoints(k) | alone_checkpoints(k + 1))) k += 2;
  print_message("%d allocations\n", (int)k - 1);
  assert_true(k > 20 && k < MOST);
}

/* The session; returns 1 when the fault struck. */
static int alone_session(uint64_t fail_at, int lasts) {
  static const call calls[] = {alone_open,
                               alone_tensor,
                               alone_floats,
                               alone_model,
                               alone_push,
                               alone_start,
                               alone_pull,
                               alone_barrier,
                               alone_broadcast,
                               alone_allreduce,
                               alone_save,
                               alone_filter,
                               alone_filtered,
                               alone_push,
                               alone_sync,
                               alone_servers,
                               alone_pull,
                               alone_partial_open,
                               alone_stochastic_open,
                               alone_dag_create,
                               alone_dag_open,
                               alone_partial_reduce,
                               alone_stochastic_reduce,
                               alone_dag_round,
                               alone_refused,
                               alone_partial_reduce,
                               alone_stochastic_reduce,
                               alone_dag_round,
                               alone_partial_flush,
                               alone_partial_close,
                               alone_stochastic_close,
                               alone_dag_free,
                               alone_allreduce,
                               alone_join};
  alone *a = calloc(1, sizeof *a);
  assert_non_null(a);
  for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
    if (calls[i] == (lasts ? alone_partial_open : alone_open)) {
      a->faults.fail_at = a->faults.calls + fail_at;
      a->faults.lasts = lasts;
    }
    alone_call(a, calls[i], i);
  }
  assert_int_equal(alone_pull(a), 0);
  assert_int_equal(mlfab_close(&a->ctx), 0);
  if (a->faults.bytes)
    print_error("allocation %d: %d bytes stay\n", (int)fail_at, (int)a->faults.bytes);
  assert_int_equal(a->faults.bytes, 0);
  int fired = a->faults.fired;
  free(a);
  return fired;
}

static void world_of_one(int lasts) {
  uint64_t k = 1;
  while (k < MOST && alone_session(k, lasts)) k++;
  print_message("%d allocations\n", (int)k - 1);
  assert_true(k > 10 && k < MOST);
}

TEST(test_world_of_one) { world_of_one(0); }

TEST(test_world_of_one_without_memory) { world_of_one(1); }

TEST(test_files) {
  alone *a = calloc(1, sizeof *a);
  assert_non_null(a);
  assert_int_equal(alone_open(a), 0);
  assert_int_equal(alone_tensor(a), 0);
  assert_int_equal(alone_model(a), 0);
  a->faults.store_fails = 1;
  assert_int_equal(alone_save(a), MLFAB_ERR_IO);
  a->faults.store_fails = 0;
  assert_int_equal(alone_save(a), 0);
  assert_int_equal(a->faults.stored, 1);
  assert_int_equal(mlfab_close(&a->ctx), 0);
  assert_int_equal(a->faults.bytes, 0);
  free(a);
}

/* ---- a server and two workers ---- */

typedef struct fabric {
  mlfab_sim *sim;
  uint32_t nodes, scheduler; /* scheduler: the last node, or 0 */
  faults faults[PLANNED_NODES];
  mlfab *node[PLANNED_NODES]; /* the server, then the workers, then the scheduler */
  mlfab_request request[PLANNED_NODES];
  uint64_t groups;
  int64_t data[COUNT], weights[COUNT];
  int64_t most, least; /* bounds of the model: a push that failed may have been applied */
  int barriers, sums, gathering, inside;
  int summing;                                   /* node 2 is in the call */
  uint32_t servers;                              /* nodes that are servers; 0: one */
  int (*together)(struct fabric *f, uint32_t i); /* the call that both workers make */
  int codes[PLANNED_NODES];
  mlfab_dag *dag[PLANNED_NODES];
  uint32_t object[PLANNED_NODES];
  int64_t in[PLANNED_NODES][COUNT],
      out[PLANNED_NODES][COUNT]; /* for schedules; doubles for objects */
  int failures;
} fabric;

static int fabric_open(fabric *f, uint32_t i) {
  mlfab_config config;
  mlfab_env env;
  mlfab_error error;
  env_of(&f->faults[i], &env);
  mlfab_config_init(&config);
  config.env = &env;
  uint32_t servers = f->servers ? f->servers : 1;
  config.servers = servers;
  config.workers = f->nodes - servers - (f->scheduler > 0);
  config.dedicated = 1;
  config.roles = i < servers ? MLFAB_ROLE_SERVER : MLFAB_ROLE_WORKER;
  config.rank = (int32_t)(i < servers ? i : i - servers);
  if (f->scheduler) {
    config.scheduler = MLFAB_SCHEDULER_OWN;
    config.heartbeat_ns = SECOND / 10;
    mlfab_schedule_init(&config.schedule);
    config.schedule.interval_ns = SECOND / 50; /* so that many wait for a plan */
  }
  if (f->scheduler && i == f->scheduler) {
    config.roles = MLFAB_ROLE_SCHEDULER;
    config.rank = 0;
  }
  config.timeout_ns = 5 * SECOND;
  config.eager_bytes = 4096;
  if (f->scheduler > 0) strcpy(config.key, "the-key-of-this-test");
  config.chunk_bytes = 8192;
  config.block_bytes = 8192;
  return mlfab_sim_open(f->sim, i, &config, &f->node[i], &error);
}

/* Opens all nodes, and repeats failed ones: the fault strikes once. */
static void fabric_join(fabric *f) {
  uint64_t until = mlfab_sim_clock(f->sim) + 60 * SECOND;
  for (uint32_t ready = 0; ready < f->nodes;) {
    ready = 0;
    assert_true(mlfab_sim_clock(f->sim) < until);
    for (uint32_t i = 0; i < f->nodes; i++) {
      if (!f->node[i] && fabric_open(f, i)) f->failures++;
      int code = f->node[i] ? mlfab_is_ready(f->node[i], NULL) : 0;
      if (code < 0) {
        f->failures++;
        mlfab_abandon(&f->node[i]);
      }
      ready += code == 1;
    }
    mlfab_sim_run(f->sim, SECOND / 100);
  }
}

static int fabric_model(fabric *f, uint32_t i) {
  mlfab_buf w = {1, 0, f->weights, COUNT};
  memset(f->weights, 0, sizeof f->weights);
  int code = mlfab_tensor_add(f->node[i], 1, MLFAB_I64, COUNT);
  if (code && code != MLFAB_ERR_TENSOR) return code;
  return mlfab_model_start(f->node[i], NULL, &w, 1);
}

static int fabric_push(fabric *f, uint32_t i) {
  for (int k = 0; k < COUNT; k++) f->data[k] = 1;
  mlfab_buf u = {1, 0, f->data, COUNT};
  int code = mlfab_push(f->node[i], &u, 1, NULL, NULL);
  f->most++;
  f->least += code == 0;
  return code;
}

static int fabric_pull(fabric *f, uint32_t i) {
  mlfab_buf w = {1, 0, f->weights, COUNT};
  int code = mlfab_pull(f->node[i], &w, 1, NULL, NULL);
  for (int k = 0; k < COUNT && !code; k++) {
    /* A slice has all of an update or nothing; slices may have different versions. */
    assert_true(f->weights[k] >= f->least && f->weights[k] <= f->most);
  }
  return code;
}

static int fabric_save(fabric *f, uint32_t i) { return mlfab_save(f->node[i], "a model"); }

static void other_barrier(void *user) {
  fabric *f = user;
  f->barriers += mlfab_barrier(f->node[2], &(mlfab_collective){.size = sizeof(mlfab_collective),
                                                               .timeout_ns = 2 * SECOND}) == 0;
}

static int fabric_barrier(fabric *f, uint32_t i) {
  if (i != 1) return 0;
  mlfab_sim_at(f->sim, mlfab_sim_clock(f->sim) + 1000000, other_barrier, f);
  return mlfab_barrier(
      f->node[1], &(mlfab_collective){.size = sizeof(mlfab_collective), .timeout_ns = 2 * SECOND});
}

static void other_allreduce(void *user) {
  fabric *f = user;
  int64_t share[COUNT];
  if (!f->node[2] || f->summing) return;
  f->summing = 1;
  for (int attempt = 0, code = -1; attempt < 4 && code; attempt++) {
    for (int k = 0; k < COUNT; k++) share[k] = 2;
    code = mlfab_allreduce(
        f->node[2], share, COUNT, MLFAB_I64,
        &(mlfab_collective){.size = sizeof(mlfab_collective), .timeout_ns = 2 * SECOND});
    for (int k = 0; k < COUNT && !code; k++) assert_int_equal(share[k], 3);
    f->sums += code == 0;
  }
  f->summing = 0;
}

/* Whichever has no memory, both repeat: node 2 inside node 1's call. */
static int fabric_allreduce(fabric *f, uint32_t i) {
  if (i != 1) return 0;
  for (int k = 0; k < COUNT; k++) f->data[k] = 1;
  mlfab_sim_at(f->sim, mlfab_sim_clock(f->sim) + 1000000, other_allreduce, f);
  int code = mlfab_allreduce(
      f->node[1], f->data, COUNT, MLFAB_I64,
      &(mlfab_collective){.size = sizeof(mlfab_collective), .timeout_ns = 2 * SECOND});
  for (int k = 0; k < COUNT && !code; k++) assert_int_equal(f->data[k], 3);
  return code;
}

/* A reduce-scatter into uneven blocks, or an allgather of them. */
static int blocks(fabric *f, uint32_t i, int64_t *data) {
  static const uint64_t counts[] = {COUNT - 100, 100};
  const mlfab_collective options = {.size = sizeof options, .timeout_ns = 2 * SECOND};
  int from = i == 1 ? 0 : COUNT - 100, to = i == 1 ? COUNT - 100 : COUNT;
  for (int k = 0; k < COUNT; k++) data[k] = !f->gathering ? i : k >= from && k < to ? 3 : 0;
  int code = f->gathering ? mlfab_allgather(f->node[i], data, counts, MLFAB_I64, &options)
                          : mlfab_reduce_scatter(f->node[i], data, counts, MLFAB_I64, &options);
  for (int k = 0; k < COUNT && !code; k++) {
    if (f->gathering || (k >= from && k < to)) assert_int_equal(data[k], 3);
  }
  return code;
}

static void other_blocks(void *user) {
  fabric *f = user;
  int64_t data[COUNT];
  if (!f->node[2] || f->inside) return; /* the call that should have triggered it failed at once */
  uint64_t since = mlfab_sim_clock(f->sim);
  f->inside = 1;
  int code = blocks(f, 2, data);
  if (code && mlfab_sim_clock(f->sim) == since) code = blocks(f, 2, data); /* the other one waits */
  f->sums += code == 0;
  f->inside = 0;
}

static int fabric_blocks(fabric *f, uint32_t i) {
  if (i != 1) return 0;
  mlfab_sim_at(f->sim, mlfab_sim_clock(f->sim) + 1000000, other_blocks, f);
  return blocks(f, 1, f->data);
}

/* Makes a call on both workers, and repeats failed ones; a worker that lost the server reopens. */
static void fabric_call(fabric *f, int (*fn)(fabric *f, uint32_t i), const char *what) {
  for (uint32_t i = 1; i < f->nodes - (f->scheduler > 0); i++) {
    int code = -1;
    for (int attempt = 0; attempt < 4 && code; attempt++) {
      uint64_t since = mlfab_sim_clock(f->sim);
      code = fn(f, i);
      assert_true(mlfab_sim_clock(f->sim) - since < 12 * SECOND);
      f->failures += code != 0;
      if (code != MLFAB_ERR_PEER_DEAD) continue;
      mlfab_abandon(&f->node[i]);
      fabric_join(f);
      if (fn != fabric_model) assert_int_equal(fabric_model(f, i), 0);
    }
    if (code) print_error("%s on node %d: %s\n", what, (int)i, mlfab_error_name(code));
    assert_int_equal(code, 0);
  }
}

/* All workers push at once, so that updates can be grouped. */
static void fabric_push_all(fabric *f) {
  mlfab_buf u = {1, 0, f->data, COUNT};
  int codes[PLANNED_NODES] = {0};
  for (int k = 0; k < COUNT; k++) f->data[k] = 1;
  for (uint32_t i = 1; i < f->scheduler; i++) {
    codes[i] = mlfab_push_start(f->node[i], &u, 1, NULL, &f->request[i]);
    if (codes[i]) f->request[i] = 0;
  }
  for (uint32_t i = 1; i < f->scheduler; i++) {
    if (f->request[i]) codes[i] = mlfab_wait(f->node[i], f->request[i], 0, NULL);
    f->request[i] = 0;
    f->most++;
    f->least += codes[i] == 0;
    f->failures += codes[i] != 0;
    if (codes[i] == MLFAB_ERR_PEER_DEAD) {
      mlfab_abandon(&f->node[i]);
      fabric_join(f);
      assert_int_equal(fabric_model(f, i), 0);
    }
  }
}

static void fabric_end(fabric *f, uint32_t victim, uint64_t fail_at) {
  for (uint32_t i = f->nodes; i-- > 0;) {
    if (i >= (f->servers ? f->servers : 1) && i != f->scheduler) mlfab_close(&f->node[i]);
    if (f->node[i]) mlfab_abandon(&f->node[i]);
    if (f->faults[i].bytes)
      print_error("node %d, allocation %d of node %d: %d bytes stay\n", (int)i, (int)fail_at,
                  (int)victim, (int)f->faults[i].bytes);
    assert_int_equal(f->faults[i].bytes, 0);
  }
  mlfab_sim_destroy(&f->sim);
}

static fabric *fabric_begin(uint32_t nodes, uint32_t servers, uint32_t scheduler, uint32_t victim,
                            uint64_t fail_at) {
  mlfab_sim_options options = {.size = sizeof options,
                               .hosts = nodes,
                               .seed = 3,
                               .rate_bytes_per_s = scheduler ? 10000000 : 0};
  fabric *f = calloc(1, sizeof *f);
  assert_non_null(f);
  assert_int_equal(mlfab_sim_create(&options, &f->sim), 0);
  f->nodes = nodes;
  f->scheduler = scheduler;
  f->servers = servers;
  f->faults[victim].fail_at = fail_at;
  fabric_join(f);
  return f;
}

/* The session with the fault on one node; returns 1 when it struck. */
static int fabric_session(uint32_t victim, uint64_t fail_at, uint64_t *failures_p) {
  fabric *f = fabric_begin(NODES, 1, 0, victim, fail_at);
  fabric_call(f, fabric_model, "model_start");
  fabric_call(f, fabric_push, "push");
  fabric_call(f, fabric_pull, "pull");
  fabric_call(f, fabric_barrier, "barrier");
  fabric_call(f, fabric_allreduce, "allreduce");
  assert_true(f->sums > 0);
  fabric_call(f, fabric_blocks, "reduce_scatter");
  f->gathering = 1;
  fabric_call(f, fabric_blocks, "allgather");
  assert_true(f->sums > 2);
  fabric_call(f, fabric_push, "push");
  fabric_call(f, fabric_save, "save");
  fabric_call(f, fabric_pull, "pull");
  fabric_end(f, victim, fail_at);
  int fired = f->faults[victim].fired;
  *failures_p += (uint64_t)f->failures;
  free(f);
  return fired;
}

/* The same with planned transfers: joining, plans, groups, spreads. */
static int planned_session(uint32_t victim, uint64_t fail_at, uint64_t *failures_p,
                           uint64_t *groups_p) {
  fabric *f = fabric_begin(PLANNED_NODES, 1, PLANNED_NODES - 1, victim, fail_at);
  mlfab_stats stats;
  fabric_call(f, fabric_model, "model_start");
  for (int k = 0; k < 3; k++) fabric_push_all(f);
  fabric_call(f, fabric_pull, "pull");
  fabric_push_all(f);
  fabric_call(f, fabric_pull, "pull");
  assert_int_equal(mlfab_get_stats(f->node[0], &stats, sizeof stats), 0);
  *groups_p += stats.groups_applied;
  fabric_end(f, victim, fail_at);
  int fired = f->faults[victim].fired;
  *failures_p += (uint64_t)f->failures;
  free(f);
  return fired;
}

/* ---- two servers and two workers: objects, filters, moving slices ---- */

enum { FIRST = 2, SECOND_WORKER = 3, OBJECT_NODES = 4 };

static int object_partial_open(fabric *f, uint32_t i) {
  const mlfab_partial_options o = {
      .size = sizeof o, .mode = MLFAB_PARTIAL_QUORUM, .quorum = 2, .timeout_ns = 2 * SECOND};
  return mlfab_partial_open(f->node[i], COUNT, MLFAB_I64, &o, &f->object[i]);
}

/* Each step adds the same to all elements: the result is not torn. */
static int object_partial_reduce(fabric *f, uint32_t i) {
  for (int k = 0; k < COUNT; k++) f->in[i][k] = 1;
  int code = mlfab_partial_reduce(f->node[i], f->object[i], f->in[i], 2 * SECOND, NULL);
  for (int k = 0; k < COUNT && !code; k++) assert_int_equal(f->in[i][k], f->in[i][0]);
  if (!code) assert_true(f->in[i][0] >= 1);
  return code;
}

static int object_partial_flush(fabric *f, uint32_t i) {
  return mlfab_partial_flush(f->node[i], f->object[i], f->in[i], 2 * SECOND);
}

static int object_partial_close(fabric *f, uint32_t i) {
  return mlfab_partial_close(f->node[i], f->object[i]);
}

static int object_stochastic_open(fabric *f, uint32_t i) {
  const mlfab_stochastic_options o = {
      .size = sizeof o, .graph = MLFAB_GRAPH_ALL, .timeout_ns = 2 * SECOND};
  return mlfab_stochastic_open(f->node[i], COUNT, MLFAB_F64, &o, &f->object[i]);
}

static int object_stochastic_reduce(fabric *f, uint32_t i) {
  double *data = (double *)(void *)f->in[i];
  for (int k = 0; k < COUNT; k++) data[k] = 2.0;
  int code = mlfab_stochastic_reduce(f->node[i], f->object[i], data, 2 * SECOND, NULL);
  for (int k = 0; k < COUNT && !code; k++) assert_false(data[k] < 2.0 || data[k] > 2.0);
  return code;
}

static int object_stochastic_close(fabric *f, uint32_t i) {
  return mlfab_stochastic_close(f->node[i], f->object[i]);
}

static int object_dag_free(fabric *f, uint32_t i) { return mlfab_dag_close(&f->dag[i]); }

/* An exchange: each worker sends its array and receives the other's. */
static int object_dag_open(fabric *f, uint32_t i) {
  const int32_t other = i == FIRST ? 1 : 0;
  uint32_t op;
  int code = mlfab_dag_create(f->node[i], &f->dag[i]);
  if (code) return code;
  code = mlfab_dag_send(f->dag[i], other, 0, f->out[i], sizeof f->out[i], &op);
  if (!code) code = mlfab_dag_recv(f->dag[i], other, 0, f->in[i], sizeof f->in[i], &op);
  if (!code) code = mlfab_dag_open(f->dag[i], 0, 2 * SECOND);
  if (code) assert_int_equal(object_dag_free(f, i), 0);
  return code;
}

static int object_dag_round(fabric *f, uint32_t i) {
  mlfab_request request = 0;
  for (int k = 0; k < COUNT; k++) f->out[i][k] = 100 + (int)i, f->in[i][k] = 0;
  int code = mlfab_dag_start(f->dag[i], 2 * SECOND, &request);
  if (!code) code = mlfab_wait(f->node[i], request, 0, NULL);
  for (int k = 0; k < COUNT && !code; k++)
    assert_int_equal(f->in[i][k], 100 + FIRST + SECOND_WORKER - (int)i);
  return code;
}

/* The rank to blame is in the text, too. */
static void object_said(fabric *f, uint32_t i, int code) {
  mlfab_error error;
  char who[32];
  if (!code) return;
  f->failures++;
  assert_int_equal(mlfab_last_error(f->node[i], &error), 0);
  if (error.rank < 0) return;
  snprintf(who, sizeof who, "%s %d", error.is_server ? "server" : "worker", (int)error.rank);
  if (!strstr(error.text, who))
    fail_msg("%s \"%s\" does not name %s", mlfab_error_name(error.code), error.text, who);
}

/* Calls, and repeats the call when it fails before its deadline: the other worker waits, and the error may
 * be an earlier call's, which this worker had not received yet. */
static int object_try(fabric *f, uint32_t i) {
  uint64_t since = mlfab_sim_clock(f->sim);
  int code = f->together(f, i);
  object_said(f, i, code);
  if (code && code != MLFAB_ERR_PEER_DEAD && mlfab_sim_clock(f->sim) - since < SECOND) {
    code = f->together(f, i);
    object_said(f, i, code);
  }
  return code;
}

static void object_other(void *user) {
  fabric *f = user;
  f->codes[SECOND_WORKER] = object_try(f, SECOND_WORKER);
}

/* Both workers call once. When one of them fails, the other one undoes its call with `back`, and both
 * repeat. Returns 0, or the error of a worker that lost a server. */
static int object_call(fabric *f, int (*fn)(fabric *f, uint32_t i),
                       int (*back)(fabric *f, uint32_t i), const char *what) {
  int failed = 1;
  for (int attempt = 0; attempt < 6 && failed; attempt++) {
    uint64_t since = mlfab_sim_clock(f->sim);
    f->together = fn;
    f->codes[SECOND_WORKER] = 1;
    mlfab_sim_at(f->sim, since + 1000000, object_other, f);
    f->codes[FIRST] = object_try(f, FIRST);
    while (f->codes[SECOND_WORKER] == 1) mlfab_sim_run(f->sim, SECOND / 100);
    assert_true(mlfab_sim_clock(f->sim) - since < 12 * SECOND);
    failed = f->codes[FIRST] || f->codes[SECOND_WORKER];
    for (uint32_t i = FIRST; i < OBJECT_NODES; i++) {
      if (f->codes[i] == MLFAB_ERR_PEER_DEAD) return f->codes[i];
      if (failed && back && !f->codes[i]) assert_int_equal(back(f, i), 0);
    }
    if (failed) mlfab_sim_run(f->sim, SECOND / 2); /* until both know it */
  }
  if (failed)
    print_error("%s: %s, %s\n", what, mlfab_error_name(f->codes[FIRST]),
                mlfab_error_name(f->codes[SECOND_WORKER]));
  assert_false(failed);
  return 0;
}

static int object_filter(fabric *f, uint32_t i) {
  const mlfab_filter filter = {.size = sizeof filter, .threshold = 0.5};
  return mlfab_set_filter(f->node[i], 2, &filter);
}

static int object_filtered(fabric *f, uint32_t i) {
  static float data[COUNT];
  for (int k = 0; k < COUNT; k++) data[k] = k % 10 == 0 ? 1.0f : 0.0f;
  const mlfab_buf u = {2, 0, data, COUNT};
  return mlfab_push(f->node[i], &u, 1, NULL, NULL);
}

static int object_one_server(fabric *f, uint32_t i) {
  const uint32_t server = 0;
  return mlfab_set_servers(f->node[i], &server, 1, 2 * SECOND);
}

static int object_two_servers(fabric *f, uint32_t i) {
  const uint32_t servers[] = {0, 1};
  return mlfab_set_servers(f->node[i], servers, 2, 2 * SECOND);
}

static int object_model(fabric *f, uint32_t i) {
  int code = mlfab_tensor_add(f->node[i], 2, MLFAB_F32, COUNT);
  return code && code != MLFAB_ERR_TENSOR ? code : fabric_model(f, i);
}

/* One worker alone calls. */
static int object_alone(fabric *f, int (*fn)(fabric *f, uint32_t i), const char *what) {
  int code = -1;
  for (int attempt = 0; attempt < 6 && code; attempt++) {
    code = fn(f, FIRST);
    object_said(f, FIRST, code);
    if (code == MLFAB_ERR_PEER_DEAD) return code;
  }
  if (code) print_error("%s: %s\n", what, mlfab_error_name(code));
  assert_int_equal(code, 0);
  return 0;
}

static int object_calls(fabric *f) {
  static const struct {
    int (*fn)(fabric *f, uint32_t i), (*back)(fabric *f, uint32_t i);
    const char *what;
    int both;
  } calls[] = {{object_model, NULL, "model_start", 1},
               {object_filter, NULL, "set_filter", 0},
               {object_filtered, NULL, "filtered push", 0},
               {object_one_server, NULL, "set_servers: one", 0},
               {object_filtered, NULL, "filtered push", 0},
               {fabric_push, NULL, "push", 0},
               {object_two_servers, NULL, "set_servers: two", 0},
               {fabric_pull, NULL, "pull", 0},
               {object_partial_open, object_partial_close, "partial_open", 1},
               {object_partial_reduce, NULL, "partial_reduce", 1},
               {object_partial_flush, NULL, "partial_flush", 1},
               {object_partial_close, NULL, "partial_close", 1},
               {object_stochastic_open, object_stochastic_close, "stochastic_open", 1},
               {object_stochastic_reduce, NULL, "stochastic_reduce", 1},
               {object_stochastic_close, NULL, "stochastic_close", 1},
               {object_dag_open, object_dag_free, "dag_open", 1},
               {object_dag_round, NULL, "dag_start", 1},
               {object_dag_free, NULL, "dag_free", 1}};
  int code = 0;
  for (size_t i = 0; i < sizeof calls / sizeof *calls && !code; i++)
    code = calls[i].both ? object_call(f, calls[i].fn, calls[i].back, calls[i].what)
                         : object_alone(f, calls[i].fn, calls[i].what);
  return code;
}

/* The session; a worker that lost a server for lack of memory ends it there. */
static int object_session(uint32_t victim, uint64_t fail_at, uint64_t *failures_p,
                          uint64_t *cut_p) {
  fabric *f = fabric_begin(OBJECT_NODES, 2, 0, victim, fail_at);
  *cut_p += object_calls(f) != 0;
  for (uint32_t i = FIRST; i < OBJECT_NODES; i++) (void)mlfab_dag_close(&f->dag[i]);
  fabric_end(f, victim, fail_at);
  int fired = f->faults[victim].fired;
  *failures_p += (uint64_t)f->failures;
  free(f);
  return fired;
}

TEST(test_objects) {
  uint64_t stride = test_scale() < 1.0 ? (uint64_t)(1.0 / test_scale()) : 1;
  for (uint32_t victim = 0; victim < OBJECT_NODES; victim++) {
    uint64_t k = 1 + victim, failures = 0, cut = 0, sessions = 1;
    for (; k < MOST && object_session(victim, k, &failures, &cut); k += stride) sessions++;
    print_message("node %u: %d allocations, %d calls that failed, %d sessions of %d cut\n", victim,
                  (int)k - 1, (int)failures, (int)cut, (int)sessions);
    assert_true(k > 10 && k < MOST);
    assert_true(10 * cut <= sessions + 10);
  }
}

TEST(test_fabric) {
  for (uint32_t victim = 0; victim < NODES; victim++) {
    uint64_t k = 1, failures = 0;
    while (k < MOST && fabric_session(victim, k, &failures)) k++;
    print_message("node %u: %d allocations, %d calls that failed\n", victim, (int)k - 1,
                  (int)failures);
    assert_true(k > 10 && k < MOST);
  }
}

TEST(test_planned_fabric) {
  for (uint32_t victim = 0; victim < PLANNED_NODES; victim++) {
    uint64_t k = 1, failures = 0, groups = 0;
    while (k < MOST && planned_session(victim, k, &failures, &groups)) k++;
    print_message("node %u: %d allocations, %d calls that failed, %d groups\n", victim, (int)k - 1,
                  (int)failures, (int)groups);
    assert_true(k > 10 && k < MOST && groups > k);
  }
}

TESTS(NULL, NULL)
