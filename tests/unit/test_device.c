/* test_device.c - buffers in device memory: results are those of host memory, in the order of the stream; every failure of the
 * device is told once, by the call that it belongs to, and the calls after it match again.
 *
 * Nodes live in the simulator, each with a device that is played (played.h). MLFAB_SCALE=100 runs 10,000 seeds. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* memfd_create */
#endif
#include "played.h"
#include "scale.h"
#include "world.h"

#include <stddef.h>

enum { RANKS = 3, COUNT = 600, SLOTS = 12, TENSORS = 3 };

typedef struct fixture {
  world w;
  played *device[WORLD_NODES];
  uint64_t random;
} fixture;

static uint64_t below(fixture *f, uint64_t n) { return chance_below(&f->random, n); }

static void begin(fixture *f, uint32_t workers, uint64_t seed, uint64_t staging_bytes) {
  memset(f, 0, sizeof *f);
  f->random = seed;
  world_init(&f->w, workers, 1, 1);
  f->w.config.timeout_ns = 20ull * WORLD_S;
  f->w.config.model_max_bytes = 1 << 22;
  world_open(&f->w, seed);
  for (uint32_t i = 0; i < workers; i++) {
    f->device[i] = played_begin(seed + i);
    OK(f->w.node[i],
       mlfab_device_attach(f->w.node[i], &played_device, f->device[i], staging_bytes));
  }
}

static void end(fixture *f) {
  world_close(&f->w);
  for (uint32_t i = 0; i < WORLD_NODES && f->device[i]; i++) {
    assert_int_equal(f->device[i]->closed, 1);
    assert_int_equal(f->device[i]->pinned_now, 0);
    played_end(f->device[i]);
  }
}

static void said(mlfab *node, int code, const char *text) {
  mlfab_error error;
  assert_int_equal(mlfab_last_error(node, &error), 0);
  if (error.code != code || !strstr(error.text, text))
    fail_msg("last error is %s \"%s\", not %s \"%s\"", mlfab_error_name(error.code), error.text,
             mlfab_error_name(code), text);
}

/* Drives all workers until this request has ended; returns how. */
static int until_done(fixture *f, uint32_t worker, mlfab_request request, mlfab_result *result_p) {
  for (int round = 0; round < 1000000; round++) {
    for (uint32_t i = 0; i < f->w.workers; i++) {
      int done = 0;
      if (!f->w.node[i]) continue;
      if (i != worker) {
        (void)mlfab_progress(f->w.node[i], 0);
        continue;
      }
      mlfab_result result;
      int code = mlfab_test(f->w.node[i], request, &done, &result);
      assert_int_equal(code, 0);
      if (!done) continue;
      if (result_p) *result_p = result;
      return result.status;
    }
    mlfab_sim_run(f->w.sim, 50000);
  }
  fail_msg("the request of worker %u does not end", worker);
  return 0;
}

/* --- a world of one: the model --- */

static const uint32_t tensor_counts[TENSORS] = {3, 257, 5000};

static void model(fixture *f, void *const *at) {
  mlfab_buf bufs[TENSORS];
  for (uint32_t t = 0; t < TENSORS; t++) {
    bufs[t] = (mlfab_buf){t, 0, at[t], tensor_counts[t]};
    OK(f->w.node[0], mlfab_tensor_add(f->w.node[0], t, MLFAB_F32, tensor_counts[t]));
  }
  OK(f->w.node[0], mlfab_model_start(f->w.node[0], NULL, bufs, TENSORS));
}

/* Pushes and pulls of tensors in any memory give what a plain sum gives. */
static void play_model(uint64_t seed) {
  static float w[TENSORS][5000], got[5000], u[5000];
  fixture f;
  begin(&f, 1, seed, 1 << 20);
  mlfab *node = f.w.node[0];
  played *p = f.device[0];
  void *at[TENSORS], *host[TENSORS];
  for (uint32_t t = 0; t < TENSORS; t++) {
    at[t] = played_alloc(p, sizeof w[t]);
    host[t] = calloc(5000, sizeof(float));
    for (uint32_t i = 0; i < tensor_counts[t]; i++) w[t][i] = (float)below(&f, 1000);
    played_write(p, at[t], w[t], tensor_counts[t] * sizeof(float));
    memcpy(host[t], w[t], tensor_counts[t] * sizeof(float));
  }
  model(&f, seed % 3 ? at : host);
  for (int step = 0; step < 40; step++) {
    mlfab_buf bufs[TENSORS];
    uint64_t indices[16];
    uint32_t n = 1 + (uint32_t)below(&f, TENSORS), on[TENSORS];
    for (uint32_t t = 0; t < n; t++) {
      on[t] = (uint32_t)below(&f, 2);
      bufs[t] = (mlfab_buf){t, 0, on[t] ? at[t] : host[t], tensor_counts[t]};
    }
    switch (below(&f, 4)) {
      case 0: /* the stream still has to make the update when it is pushed */
      case 1: {
        int value = (int)below(&f, 3);
        mlfab_request request;
        for (uint32_t t = 0; t < n; t++) {
          memset(u, value, sizeof u);
          if (on[t])
            played_kernel(p, at[t], value, tensor_counts[t] * sizeof(float));
          else
            memcpy(host[t], u, tensor_counts[t] * sizeof(float));
          for (uint32_t i = 0; i < tensor_counts[t]; i++) w[t][i] += u[i];
        }
        if (below(&f, 2)) {
          OK(node, mlfab_push(node, bufs, n, NULL, NULL));
          break;
        }
        OK(node, mlfab_push_start(node, bufs, n, NULL, &request));
        for (uint32_t t = 0; t < n; t++) { /* small: the buffers are the caller's again */
          if (on[t])
            played_kernel(p, at[t], 0x77, tensor_counts[t] * sizeof(float));
          else
            memset(host[t], 0x77, tensor_counts[t] * sizeof(float));
        }
        OK(node, mlfab_wait(node, request, 0, NULL));
        break;
      }
      case 2: {
        uint32_t t = (uint32_t)below(&f, TENSORS), k = 0;
        float *values = u;
        for (uint32_t i = 0; k < 16 && i < tensor_counts[t]; i += 1 + (uint32_t)below(&f, 40)) {
          indices[k] = i;
          values[k] = (float)below(&f, 100);
          w[t][i] += values[k++];
        }
        uint64_t *on_device = played_alloc(p, sizeof indices);
        float *of_device = played_alloc(p, sizeof indices);
        played_write(p, on_device, indices, sizeof indices);
        played_write(p, of_device, values, 16 * sizeof *values);
        OK(node, mlfab_push_sparse(node, t, below(&f, 2) ? on_device : indices,
                                   below(&f, 2) ? of_device : values, k, NULL, NULL));
        break;
      }
      default:
        for (uint32_t t = 0; t < n; t++) {
          if (on[t]) played_kernel(p, at[t], 0x33, tensor_counts[t] * sizeof(float));
        }
        OK(node, mlfab_pull(node, bufs, n, NULL, NULL));
        played_finish(p);
        for (uint32_t t = 0; t < n; t++) {
          if (on[t])
            played_read(p, got, at[t], tensor_counts[t] * sizeof(float));
          else
            memcpy(got, host[t], tensor_counts[t] * sizeof(float));
          assert_memory_equal(got, w[t], tensor_counts[t] * sizeof(float));
        }
    }
  }
  OK(node, mlfab_flush(node, 0));
  assert_true(p->pinned_most <= 1 << 20);
  for (uint32_t t = 0; t < TENSORS; t++) free(host[t]);
  end(&f);
}

/* --- collectives --- */

/* One collective of all workers, each with its own memory. */
typedef struct slot {
  uint32_t kind, counts[RANKS];
  int32_t root;
  mlfab_request request[RANKS];
  int device[RANKS], apart[RANKS];
  int64_t *data[RANKS], *input[RANKS];
  int64_t was[RANKS][COUNT], want[RANKS][COUNT];
} slot;

static uint64_t total(const slot *s) {
  uint64_t n = 0;
  for (uint32_t r = 0; r < RANKS; r++) n += s->counts[r];
  return n;
}

static void *memory_on(fixture *f, uint32_t worker, int device, uint64_t bytes) {
  void *at = device ? played_alloc(f->device[worker], bytes) : malloc(bytes);
  assert_non_null(at);
  return at;
}

/* What the call must give, by a plain loop. */
static void expect_slot(slot *s) {
  uint64_t n = total(s), at = 0;
  memcpy(s->want, s->was, sizeof s->want);
  for (uint32_t r = 0; r < RANKS; at += s->counts[r++]) {
    for (uint64_t i = 0; i < n; i++) {
      int64_t sum = s->was[0][i] + s->was[1][i] + s->was[2][i];
      int mine = i >= at && i < at + s->counts[r];
      for (uint32_t to = 0; to < RANKS; to++) {
        if (s->kind == 0) s->want[to][i] = sum;
        if (s->kind == 1 && to == r && mine) s->want[to][i] = sum;
        if (s->kind == 2 && mine) s->want[to][i] = s->was[r][i];
        if (s->kind == 3) s->want[to][i] = s->was[s->root][i];
      }
    }
  }
}

static void start_slot(fixture *f, slot *s, uint32_t worker) {
  mlfab *node = f->w.node[worker];
  const uint64_t n = total(s), bytes = n * sizeof(int64_t);
  uint64_t counts[RANKS], before = 0;
  for (uint32_t r = 0; r < RANKS; r++) counts[r] = s->counts[r];
  for (uint32_t r = 0; r < worker; r++) before += counts[r];
  s->device[worker] = (int)below(f, 3) > 0;
  s->apart[worker] = below(f, 3) == 0 && (s->kind != 3 || (int32_t)worker == s->root);
  s->data[worker] = memory_on(f, worker, s->device[worker], bytes);
  s->input[worker] = memory_on(f, worker, s->device[worker], bytes);
  int64_t *from = s->apart[worker] ? s->input[worker] : s->data[worker];
  /* On a device the stream makes the input, sooner or later. An allgather's separate input is the block alone. */
  const int block = s->kind == 2 && s->apart[worker];
  const int64_t *was = s->was[worker] + (block ? before : 0);
  const uint64_t was_bytes = block ? counts[worker] * sizeof(int64_t) : bytes;
  if (s->device[worker])
    played_produce(f->device[worker], from, was, was_bytes);
  else
    memcpy(from, was, was_bytes);
  const void *inputs[1] = {s->input[worker]};
  mlfab_collective o;
  memset(&o, 0, sizeof o);
  o.size = sizeof o;
  if (s->apart[worker]) o.inputs = inputs;
  mlfab_vec vec = {s->data[worker], n};
  mlfab_request *r = &s->request[worker];
  switch (s->kind) {
    case 0:
      OK(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_I64, &o, r));
      break;
    case 1:
      OK(node, mlfab_reduce_scatter_start(node, vec.data, counts, MLFAB_I64, &o, r));
      break;
    case 2:
      OK(node, mlfab_allgather_start(node, vec.data, counts, MLFAB_I64, &o, r));
      break;
    case 3:
      OK(node, mlfab_broadcast_start(node, s->root, vec.data, bytes, &o, r));
      break;
    default:
      OK(node, mlfab_barrier_start(node, NULL, r));
  }
  inputs[0] = NULL; /* lists are the caller's again */
  vec = (mlfab_vec){NULL, 0};
  memset(counts, 0xff, sizeof counts);
}

static void check_slot(fixture *f, const slot *s, uint32_t worker) {
  int64_t got[COUNT];
  const uint64_t n = total(s);
  uint64_t from = 0, to = n;
  if (s->kind == 4) return;
  if (s->device[worker])
    played_read(f->device[worker], got, s->data[worker], n * sizeof *got);
  else
    memcpy(got, s->data[worker], n * sizeof *got);
  for (uint32_t r = 0; s->kind == 1 && r < worker; r++) from += s->counts[r];
  if (s->kind == 1) to = from + s->counts[worker]; /* the other blocks are unspecified */
  if (s->kind == 3 && (int32_t)worker == s->root && s->apart[worker]) to = n;
  for (uint64_t i = from; i < to; i++)
    if (got[i] != s->want[worker][i])
      fail_msg("kind %u, worker %u, element %llu: %lld, not %lld", s->kind, worker,
               (unsigned long long)i, (long long)got[i], (long long)s->want[worker][i]);
}

static void free_slot(slot *s) {
  for (uint32_t r = 0; r < RANKS; r++) {
    if (s->device[r]) continue;
    free(s->data[r]);
    free(s->input[r]);
  }
}

/* Many collectives under way, of any kind and memory, begin in one order at all workers. */
static void play_collectives(uint64_t seed) {
  static slot slots[SLOTS];
  fixture f;
  begin(&f, RANKS, seed, 1 << 20);
  memset(slots, 0, sizeof slots);
  for (uint32_t k = 0; k < SLOTS; k++) {
    slot *s = &slots[k];
    s->kind = (uint32_t)below(&f, 5);
    s->root = (int32_t)below(&f, RANKS);
    for (uint32_t r = 0; r < RANKS; r++) s->counts[r] = 1 + (uint32_t)below(&f, COUNT / RANKS);
    for (uint32_t r = 0; r < RANKS; r++)
      for (uint32_t i = 0; i < COUNT; i++) s->was[r][i] = (int64_t)below(&f, 1000000);
    expect_slot(s);
  }
  for (uint32_t r = 0; r < RANKS; r++) {
    if (below(&f, 2)) played_stop(f.device[r]);
    for (uint32_t k = 0; k < SLOTS; k++) start_slot(&f, &slots[k], r);
  }
  mlfab_sim_run(f.w.sim, 1000000);
  for (uint32_t r = 0; r < RANKS; r++) f.device[r]->gate = 0;
  for (uint32_t k = 0; k < SLOTS; k++) {
    for (uint32_t r = 0; r < RANKS; r++)
      assert_int_equal(until_done(&f, r, slots[k].request[r], NULL), 0);
  }
  for (uint32_t k = 0; k < SLOTS; k++) {
    for (uint32_t r = 0; r < RANKS; r++) check_slot(&f, &slots[k], r);
    free_slot(&slots[k]);
  }
  end(&f);
}

/* --- objects --- */

static void open_gate(void *user) { ((played *)user)->gate = 0; }

/* Steps of a partial and of a stochastic reduction, and a flush, of a worker that is alone. */
static void test_objects(void **state) {
  fixture f;
  uint32_t partial = 0, stochastic = 0;
  float got[8];
  mlfab_partial_info info = {.size = sizeof info};
  const mlfab_partial_options po = {.size = sizeof po, .mode = MLFAB_PARTIAL_SOLO};
  const mlfab_stochastic_options so = {.size = sizeof so, .graph = MLFAB_GRAPH_ALL};
  (void)state;
  begin(&f, 1, 5, 0);
  mlfab *node = f.w.node[0];
  float *data = played_alloc(f.device[0], sizeof got);
  static const float made[8] = {1, 2, 3, 4, 5, 6, 7, 8}, zeros[8];
  OK(node, mlfab_partial_open(node, 8, MLFAB_F32, &po, &partial));
  OK(node, mlfab_stochastic_open(node, 8, MLFAB_F32, &so, &stochastic));
  played_stop(f.device[0]);
  played_produce(f.device[0], data, made, sizeof made);
  mlfab_request request;
  OK(node, mlfab_partial_start(node, partial, data, 0, &info, &request));
  assert_int_equal(mlfab_wait(node, request, 1000000, NULL), MLFAB_ERR_TIMEOUT);
  said(node, MLFAB_ERR_TIMEOUT, "what was given to the device's stream before is not over");
  f.device[0]->gate = 0;
  OK(node, mlfab_wait(node, request, 0, NULL));
  played_read(f.device[0], got, data, sizeof got);
  assert_memory_equal(got, made, sizeof got);
  assert_int_equal(info.included, 1);
  OK(node, mlfab_partial_flush(node, partial, data, 0));
  played_read(f.device[0], got, data, sizeof got);
  assert_memory_equal(got, zeros, sizeof got);
  played_produce(f.device[0], data, made, sizeof made);
  OK(node, mlfab_stochastic_reduce(node, stochastic, data, 0, NULL));
  /* A call that has no _start form waits for its turn. */
  uint32_t other = 0;
  const uint64_t now = mlfab_sim_clock(f.w.sim);
  played_stop(f.device[0]);
  OK(node, mlfab_partial_start(node, partial, data, 0, &info, &request));
  assert_int_equal(mlfab_sim_at(f.w.sim, now + WORLD_S, open_gate, f.device[0]), 0);
  OK(node, mlfab_partial_open(node, 8, MLFAB_F32, &po, &other));
  assert_true(mlfab_sim_clock(f.w.sim) >= now + WORLD_S);
  OK(node, mlfab_wait(node, request, 0, NULL));
  played_read(f.device[0], got, data, sizeof got);
  assert_memory_equal(got, made, sizeof got);
  end(&f);
}

/* --- failures --- */

enum { CALLS = 4 };

/* An allreduce of one number of each worker; worker 1 falls back to memory of the host where the device refuses at once. */
typedef struct sum_call {
  mlfab_request request[RANKS];
  int64_t *device[RANKS], host[RANKS], was[RANKS];
  int on[RANKS];
} sum_call;

static void sum_start(fixture *f, sum_call *s, uint32_t worker, int on) {
  mlfab_vec vec = {s->device[worker], 1};
  s->on[worker] = on;
  if (on) {
    played_produce(f->device[worker], s->device[worker], &s->was[worker], sizeof(int64_t));
    int code =
        mlfab_allreduce_start(f->w.node[worker], &vec, 1, MLFAB_I64, NULL, &s->request[worker]);
    if (code == 0) return;
    said(f->w.node[worker], code, "played");
    assert_true(code == MLFAB_ERR_DEVICE || code == MLFAB_ERR_ARGUMENT);
  }
  s->on[worker] = 0;
  s->host[worker] = s->was[worker];
  vec.data = &s->host[worker];
  OK(f->w.node[worker],
     mlfab_allreduce_start(f->w.node[worker], &vec, 1, MLFAB_I64, NULL, &s->request[worker]));
}

/* How the call ended at a worker; a success must be the sum. */
static int sum_end(fixture *f, sum_call *s, uint32_t worker) {
  int code = until_done(f, worker, s->request[worker], NULL);
  if (code) {
    said(f->w.node[worker], code, "");
    return code;
  }
  int64_t got = s->host[worker];
  if (s->on[worker]) played_read(f->device[worker], &got, s->device[worker], sizeof got);
  if (got != s->was[0] + s->was[1] + s->was[2])
    fail_msg("worker %u: %lld is not the sum", worker, (long long)got);
  return 0;
}

static void sums_begin(fixture *f, sum_call *sums) {
  memset(sums, 0, CALLS * sizeof *sums);
  for (int k = 0; k < CALLS; k++) {
    for (uint32_t r = 0; r < RANKS; r++) {
      sums[k].device[r] = played_alloc(f->device[r], sizeof(int64_t));
      sums[k].was[r] = 1 + (int64_t)below(f, 1000);
    }
  }
}

/* Calls in memory of the host meet again, after at most a few that tell of what was before. */
static void sums_meet(fixture *f) {
  int failed = 1;
  for (int turn = 0; turn < 3 && failed; turn++) {
    sum_call again;
    memset(&again, 0, sizeof again);
    failed = 0;
    for (uint32_t r = 0; r < RANKS; r++) {
      again.host[r] = again.was[r] = 7 + (int64_t)r;
      const mlfab_vec vec = {&again.host[r], 1};
      failed |= mlfab_allreduce_start(f->w.node[r], &vec, 1, MLFAB_I64, NULL, &again.request[r]);
    }
    for (uint32_t r = 0; r < RANKS; r++) failed |= again.request[r] && sum_end(f, &again, r) != 0;
  }
  assert_false(failed);
}

/* The device of worker 1 fails in its k-th call of a function: the request that it belongs to fails, at all workers or at
 * none but this one, nobody gets a wrong sum, and later calls are right. Returns how many calls failed. */
static uint32_t play_failure(int function, uint32_t k, uint64_t seed) {
  static sum_call sums[CALLS];
  fixture f;
  uint32_t failures = 0;
  begin(&f, RANKS, seed, 0);
  sums_begin(&f, sums);
  played *p = f.device[1];
  p->fails = function;
  p->fails_at = function < PLAYED_CALLS ? p->calls[function] + k : 0;
  p->fails_for = 1;
  if (function == PLAYED_CALLS) p->copy_fails_at = p->copies + k; /* one that is under way */
  for (int i = 0; i < CALLS; i++) {
    for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &sums[i], r, r == 1);
    for (uint32_t r = 0; r < RANKS; r++) {
      int code = sum_end(&f, &sums[i], r);
      failures += code != 0;
      if (code && r == 1) {
        said(f.w.node[1], MLFAB_ERR_DEVICE, "played");
        said(f.w.node[1], MLFAB_ERR_DEVICE, "allreduce: ");
      } else if (code) {
        said(f.w.node[r], MLFAB_ERR_DEVICE, "worker 1: allreduce: copying");
      }
    }
  }
  p->fails = -1;
  p->copy_fails_at = 0;
  sums_meet(&f);
  played_finish(p);
  const uint64_t pinned = p->pinned_now;
  world_close(&f.w);
  /* What was lost with its mark may have been in use: it stays. */
  assert_true(p->pinned_now == 0 || (function == PLAYED_MARK && pinned > 0));
  for (uint32_t r = 0; r < RANKS; r++) played_end(f.device[r]);
  return failures;
}

static void test_failures(void **state) {
  uint32_t failures[PLAYED_CALLS + 1] = {0};
  (void)state;
  for (int function = 0; function <= PLAYED_CALLS; function++) {
    for (uint32_t k = 1; k <= 9; k++) failures[function] += play_failure(function, k, 100 + k);
  }
  assert_int_equal(failures[PLAYED_WHERE], 0); /* the call falls back, before it has begun */
  assert_int_equal(failures[PLAYED_PIN], 0);
  for (int function = PLAYED_FENCE; function <= PLAYED_CALLS; function++)
    if (function != PLAYED_ORDER) assert_true(failures[function] > 0);
}

/* A device that is lost fails every call, and closing ends. */
static void test_lost(void **state) {
  (void)state;
  for (int when = 0; when < 6; when++) {
    static sum_call sums[CALLS];
    fixture f;
    begin(&f, RANKS, 50 + (uint64_t)when, 0);
    sums_begin(&f, sums);
    for (int i = 0; i < 2; i++)
      for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &sums[i], r, r == 1);
    for (int i = 0; i < when; i++) {
      for (uint32_t r = 0; r < RANKS; r++) (void)mlfab_progress(f.w.node[r], 0);
      mlfab_sim_run(f.w.sim, 50000);
    }
    played_lose(f.device[1]);
    for (int i = 0; i < 2; i++) {
      for (uint32_t r = 0; r < RANKS; r++) {
        int code = sum_end(&f, &sums[i], r);
        assert_true(code == 0 || code == MLFAB_ERR_DEVICE);
      }
    }
    mlfab_vec vec = {sums[3].device[1], 1};
    mlfab_request request;
    EXPECT(f.w.node[1], mlfab_allreduce_start(f.w.node[1], &vec, 1, MLFAB_I64, NULL, &request),
           MLFAB_ERR_DEVICE);
    world_close(&f.w);
    for (uint32_t r = 0; r < RANKS; r++) played_end(f.device[r]);
  }
}

/* A stream that hangs keeps nobody longer than a deadline, and what is behind it meets again. */
static void test_hanging(void **state) {
  static sum_call sums[CALLS];
  fixture f;
  mlfab_request request;
  (void)state;
  begin(&f, RANKS, 9, 0);
  sums_begin(&f, sums);
  played_stop(f.device[1]);
  const uint64_t began = mlfab_sim_clock(f.w.sim);
  for (int i = 0; i < 2; i++)
    for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &sums[i], r, r == 1);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(sum_end(&f, &sums[i], 1), MLFAB_ERR_TIMEOUT);
    said(f.w.node[1], MLFAB_ERR_TIMEOUT,
         "what was given to the device's stream before is not over");
  }
  for (int i = 0; i < 2; i++) {
    assert_int_not_equal(sum_end(&f, &sums[i], 0), 0);
    assert_int_not_equal(sum_end(&f, &sums[i], 2), 0);
  }
  const uint64_t took = mlfab_sim_clock(f.w.sim) - began;
  assert_in_range(took, 19ull * WORLD_S, 25ull * WORLD_S);
  f.device[1]->gate = 0;
  for (int i = 0; i < 400; i++) {
    for (uint32_t r = 0; r < RANKS; r++) (void)mlfab_progress(f.w.node[r], 0);
    mlfab_sim_run(f.w.sim, 1000000);
  }
  sums_meet(&f);
  /* Closing waits two heartbeats for copies, and keeps what they use. */
  mlfab_vec vec = {sums[3].device[1], 1};
  played_stop(f.device[1]);
  OK(f.w.node[1], mlfab_allreduce_start(f.w.node[1], &vec, 1, MLFAB_I64, NULL, &request));
  OK(f.w.node[1], mlfab_abandon(&f.w.node[1]));
  assert_int_equal(f.device[1]->closed, 1);
  assert_true(f.device[1]->pinned_now > 0);
  f.device[1]->gate = 0;
  played_finish(f.device[1]); /* the copy finds its memory */
  world_close(&f.w);
  for (uint32_t r = 0; r < RANKS; r++) played_end(f.device[r]);
}

/* Cancelled calls end at once, wherever they are; cancelled collectives end for all. */
static void test_cancel(void **state) {
  (void)state;
  for (int where = 0; where < 12; where++) {
    static sum_call sums[CALLS];
    fixture f;
    begin(&f, RANKS, 70 + (uint64_t)where, 0);
    sums_begin(&f, sums);
    if (where == 0) played_stop(f.device[1]);
    for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &sums[0], r, r == 1);
    for (int i = 0; i < where; i++) {
      for (uint32_t r = 0; r < RANKS; r++) (void)mlfab_progress(f.w.node[r], 0);
      mlfab_sim_run(f.w.sim, 20000);
    }
    OK(f.w.node[1], mlfab_cancel(f.w.node[1], sums[0].request[1]));
    f.device[1]->gate = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
      int code = sum_end(&f, &sums[0], (i + 1) % RANKS);
      assert_true(code == MLFAB_ERR_CANCELLED || (where > 0 && code == 0));
    }
    EXPECT(f.w.node[1], mlfab_cancel(f.w.node[1], sums[0].request[1]), MLFAB_ERR_REQUEST);
    sums_meet(&f);
    end(&f);
  }
}

/* A push that nobody waits for: mlfab_flush has its failure, and the model is as it was. */
static void test_flush(void **state) {
  fixture f;
  float got[3], *at[TENSORS];
  (void)state;
  begin(&f, 1, 3, 0);
  mlfab *node = f.w.node[0];
  played *p = f.device[0];
  for (uint32_t t = 0; t < TENSORS; t++) at[t] = played_alloc(p, tensor_counts[t] * sizeof(float));
  model(&f, (void **)at);
  const mlfab_buf buf = {0, 0, at[0], 3}, host = {0, 0, got, 3};
  static const float ones[3] = {1, 1, 1}, zeros[3];
  played_produce(p, at[0], ones, sizeof ones);
  p->copy_fails_at = p->copies + 1;
  OK(node, mlfab_push_start(node, &buf, 1, NULL, NULL));
  EXPECT(node, mlfab_flush(node, 0), MLFAB_ERR_DEVICE);
  said(node, MLFAB_ERR_DEVICE, "push: copying from device memory: played 800");
  OK(node, mlfab_pull(node, &host, 1, NULL, NULL));
  assert_memory_equal(got, zeros, sizeof got);
  OK(node, mlfab_push_start(node, &buf, 1, NULL, NULL));
  OK(node, mlfab_flush(node, 0));
  OK(node, mlfab_pull(node, &host, 1, NULL, NULL));
  assert_memory_equal(got, ones, sizeof got);
  end(&f);
}

/* --- what is refused --- */

static const uint8_t *owned; /* of the "GPU" that this program has code for */

int mlfab_device_owns(const void *memory);
int mlfab_device_owns(const void *memory) {
  return owned && memory >= (const void *)owned && memory < (const void *)(owned + PLAYED_BYTES);
}

static void test_without_a_device(void **state) {
  world w;
  mlfab_request request;
  (void)state;
  world_init(&w, 2, 1, 1);
  world_open(&w, 1);
  played *p = played_begin(1);
  owned = p->at;
  mlfab_vec vec = {played_alloc(p, 64), 2};
  EXPECT(w.node[0], mlfab_allreduce_start(w.node[0], &vec, 1, MLFAB_F32, NULL, &request),
         MLFAB_ERR_ARGUMENT);
  said(w.node[0], MLFAB_ERR_ARGUMENT, "this context has no device: call mlfab_gpu_attach");
  OK(w.node[0], mlfab_device_attach(w.node[0], &played_device, p, 0));
  OK(w.node[0], mlfab_allreduce_start(w.node[0], &vec, 1, MLFAB_F32, NULL, &request));
  owned = NULL;
  world_close(&w);
  assert_int_equal(p->closed, 1);
  played_end(p);
}

static void test_attach(void **state) {
  fixture f;
  static const size_t members[] = {
      offsetof(mlfab_device, name),  offsetof(mlfab_device, where), offsetof(mlfab_device, pin),
      offsetof(mlfab_device, unpin), offsetof(mlfab_device, fence), offsetof(mlfab_device, after),
      offsetof(mlfab_device, copy),  offsetof(mlfab_device, mark),  offsetof(mlfab_device, order),
      offsetof(mlfab_device, poll),  offsetof(mlfab_device, drop),  offsetof(mlfab_device, text)};
  (void)state;
  begin(&f, 1, 1, 0);
  mlfab *node = f.w.node[0], *server = f.w.node[1];
  EXPECT(node, mlfab_device_attach(node, &played_device, f.device[0], 0), MLFAB_ERR_STATE);
  said(node, MLFAB_ERR_STATE, "a played device is attached already");
  EXPECT(server, mlfab_device_attach(server, &played_device, f.device[0], 0), MLFAB_ERR_STATE);
  EXPECT(node, mlfab_device_attach(node, NULL, NULL, 0), MLFAB_ERR_ARGUMENT);
  for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
    mlfab_device holed = played_device;
    memset((char *)&holed + members[i], 0, sizeof(void *));
    EXPECT(node, mlfab_device_attach(node, &holed, NULL, 0), MLFAB_ERR_ARGUMENT);
    said(node, MLFAB_ERR_ARGUMENT, "is not set");
  }
  assert_int_equal(mlfab_device_attach(NULL, &played_device, NULL, 0), MLFAB_ERR_ARGUMENT);
  end(&f);
}

static void test_refused(void **state) {
  fixture f;
  uint32_t op = 0;
  mlfab_dag *dag = NULL;
  mlfab_request requests[80];
  (void)state;
  begin(&f, RANKS, 1, 1 << 17);
  mlfab *node = f.w.node[0];
  played *p = f.device[0];
  uint8_t *at = played_alloc(p, 1 << 18);
  mlfab_vec vec = {at, (1 << 17) / 4 + 1}, two[2] = {{at, 100}, {at + 396, 100}};
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[0]),
         MLFAB_ERR_LIMIT);
  said(node, MLFAB_ERR_LIMIT,
       "allreduce: 131076 bytes of device memory, but staging_bytes is 131072");
  EXPECT(node, mlfab_allreduce_start(node, two, 2, MLFAB_F32, NULL, &requests[0]),
         MLFAB_ERR_ARGUMENT);
  said(node, MLFAB_ERR_ARGUMENT, "overlap");
  vec = (mlfab_vec){at + 2, 10};
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[0]),
         MLFAB_ERR_ARGUMENT);
  said(node, MLFAB_ERR_ARGUMENT, "is not aligned to its elements of 4 bytes");
  vec = (mlfab_vec){p->at + PLAYED_BYTES - 8, 10};
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[0]),
         MLFAB_ERR_ARGUMENT);
  said(node, MLFAB_ERR_ARGUMENT, "ends behind the device's memory");
  vec = (mlfab_vec){at, 10};
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, 77, NULL, &requests[0]), MLFAB_ERR_DTYPE);
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, NULL), MLFAB_ERR_ARGUMENT);
  OK(node, mlfab_dag_create(node, &dag));
  assert_int_equal(mlfab_dag_send(dag, 1, 0, at, 4, &op), MLFAB_ERR_UNSUPPORTED);
  said(node, MLFAB_ERR_UNSUPPORTED, "a task graph: takes memory of the host only");
  assert_int_equal(mlfab_dag_recv(dag, 1, 0, at, 4, &op), MLFAB_ERR_UNSUPPORTED);
  assert_int_equal(mlfab_dag_recv_reduce(dag, 1, 0, at, 4, MLFAB_F32, 0, &op),
                   MLFAB_ERR_UNSUPPORTED);
  OK(node, mlfab_dag_close(&dag));
  /* All of the staging memory is in use; then all calls. */
  vec = (mlfab_vec){at, (1 << 16) / 4};
  for (int i = 0; i < 2; i++)
    OK(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[i]));
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[2]),
         MLFAB_ERR_AGAIN);
  said(node, MLFAB_ERR_AGAIN, "131072 of 131072 bytes are in use, and this call needs 65536");
  played_stop(p);
  for (int i = 2; i < 64; i++) OK(node, mlfab_barrier_start(node, NULL, &requests[i]));
  EXPECT(node, mlfab_barrier_start(node, NULL, &requests[64]), MLFAB_ERR_AGAIN);
  said(node, MLFAB_ERR_AGAIN, "64 calls are under way");
  p->gate = 0;
  played_finish(p);
  end(&f);
}

static void test_model(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= (uint64_t)test_cases_from(20, 2000); seed++) play_model(seed);
}

static void test_collectives(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= (uint64_t)test_cases_from(40, 4000); seed++)
    play_collectives(seed);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_model),
                                     cmocka_unit_test(test_collectives),
                                     cmocka_unit_test(test_objects),
                                     cmocka_unit_test(test_failures),
                                     cmocka_unit_test(test_lost),
                                     cmocka_unit_test(test_hanging),
                                     cmocka_unit_test(test_cancel),
                                     cmocka_unit_test(test_flush),
                                     cmocka_unit_test(test_without_a_device),
                                     cmocka_unit_test(test_attach),
                                     cmocka_unit_test(test_refused)};
  return cmocka_run_group_tests_name("device", tests, NULL, NULL);
}
