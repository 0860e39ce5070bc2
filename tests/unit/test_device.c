/* test_device.c - buffers in device memory: results are those of host memory, in the order of the stream; every failure of the
 * device is told once, by the call that it belongs to, and the calls after it match again.
 *
 * Nodes live in the simulator, each with a device that is played (played.h). MLFAB_SCALE=100 runs 100,000 seeds. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* memfd_create */
#endif
#include "device_world.h"
#include "../../mlfab_partial.h"
#include "../testing.h"

enum { RANKS = 3, COUNT = 600, SLOTS = 12, TENSORS = 3 };

static uint32_t scheduler, dedicated = 1, tags; /* of the next fabric */

static void begin_servers(fixture *f, uint32_t workers, uint32_t servers, uint32_t eager_bytes,
                          uint64_t seed, uint64_t staging_bytes) {
  prepare_world(f, workers, servers, dedicated, seed);
  f->w.config.eager_bytes = eager_bytes;
  f->w.config.scheduler = scheduler;
  if (eager_bytes) f->w.config.chunk_bytes = 4096;
  open_with_devices(f, seed, staging_bytes);
}

static void begin(fixture *f, uint32_t workers, uint64_t seed, uint64_t staging_bytes) {
  begin_servers(f, workers, 1, 0, seed, staging_bytes);
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
    uint32_t n = 1 + (uint32_t)below(&f, TENSORS);
    int on[TENSORS] = {0};
    for (uint32_t t = 0; t < n; t++) {
      on[t] = (int)below(&f, 2);
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
        for (uint32_t t = 0; t < n; t++) /* small: the buffers are the caller's again */
          if (on[t])
            played_kernel(p, at[t], 0x77, tensor_counts[t] * sizeof(float));
          else
            memset(host[t], 0x77, tensor_counts[t] * sizeof(float));
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
        for (uint32_t t = 0; t < n; t++)
          if (on[t]) played_kernel(p, at[t], 0x33, tensor_counts[t] * sizeof(float));
        OK(node, mlfab_pull(node, bufs, n, NULL, NULL));
        played_finish(p);
        for (uint32_t t = 0; t < n; t++) {
          memory_read(&f, 0, on[t], got, bufs[t].data, tensor_counts[t] * sizeof(float));
          assert_memory_equal(got, w[t], tensor_counts[t] * sizeof(float));
        }
    }
  }
  OK(node, mlfab_flush(node, 0));
  assert_true(p->pinned_most <= 1 << 20);
  for (uint32_t t = 0; t < TENSORS; t++) free(host[t]);
  end_world(&f);
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
  memory_write(f, worker, s->device[worker], from, was, was_bytes);
  const void *inputs[1] = {s->input[worker]};
  mlfab_collective o = {.size = sizeof o};
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
  memory_read(f, worker, s->device[worker], got, s->data[worker], n * sizeof *got);
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
  for (uint32_t k = 0; k < SLOTS; k++)
    for (uint32_t r = 0; r < RANKS; r++)
      assert_int_equal(until_done(&f, r, slots[k].request[r]), 0);
  for (uint32_t k = 0; k < SLOTS; k++) {
    for (uint32_t r = 0; r < RANKS; r++) check_slot(&f, &slots[k], r);
    free_slot(&slots[k]);
  }
  end_world(&f);
}

/* --- objects --- */

static void open_gate(void *user) { ((played *)user)->gate = 0; }

/* Steps of a partial and of a stochastic reduction, and a flush, of a worker that is alone. */
TEST(test_objects) {
  fixture f;
  uint32_t partial = 0, stochastic = 0;
  float got[8];
  mlfab_partial_info info = {.size = sizeof info};
  const mlfab_partial_options po = {.size = sizeof po, .mode = MLFAB_PARTIAL_SOLO};
  const mlfab_stochastic_options so = {.size = sizeof so, .graph = MLFAB_GRAPH_ALL};
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
  said(node, MLFAB_ERR_TIMEOUT, "earlier work on the device's stream is not over");
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
  end_world(&f);
}

/* --- failures --- */

enum { CALLS = 4 };

static void sums_begin(fixture *f, sum_call *sums) {
  for (int k = 0; k < CALLS; k++) sum_prepare(f, &sums[k]);
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
  sums_meet(&f, 0);
  played_finish(p);
  const uint64_t pinned = p->pinned_now;
  world_close(&f.w);
  /* What was lost with its mark may have been in use: it stays. */
  assert_true(p->pinned_now == 0 || (function == PLAYED_MARK && pinned > 0));
  for (uint32_t r = 0; r < RANKS; r++) played_end(f.device[r]);
  return failures;
}

TEST(test_failures) {
  uint32_t failures[PLAYED_CALLS + 1] = {0};
  for (int function = 0; function <= PLAYED_CALLS; function++)
    for (uint32_t k = 1; k <= 9; k++) failures[function] += play_failure(function, k, 100 + k);
  assert_int_equal(failures[PLAYED_WHERE], 0); /* the call falls back, before it has begun */
  assert_int_equal(failures[PLAYED_PIN], 0);
  for (int function = PLAYED_FENCE; function <= PLAYED_CALLS; function++)
    if (function != PLAYED_ORDER) assert_true(failures[function] > 0);
}

/* A device that is lost fails every call, and closing ends. */
TEST(test_lost) {
  for (int when = 0; when < 6; when++) {
    static sum_call sums[CALLS];
    fixture f;
    begin(&f, RANKS, 50 + (uint64_t)when, 0);
    sums_begin(&f, sums);
    for (int i = 0; i < 2; i++)
      for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &sums[i], r, r == 1);
    run_all(&f, when, 50000);
    played_lose(f.device[1]);
    for (int i = 0; i < 2; i++) {
      for (uint32_t r = 0; r < RANKS; r++) {
        int code = sum_end(&f, &sums[i], r);
        assert_true(code == 0 || code == MLFAB_ERR_DEVICE);
      }
    }
    mlfab_vec vec = {sums[3].at[1], LENGTH};
    mlfab_request request;
    EXPECT(f.w.node[1], mlfab_allreduce_start(f.w.node[1], &vec, 1, MLFAB_I64, NULL, &request),
           MLFAB_ERR_DEVICE);
    end_failed(&f);
  }
}

/* A stream that hangs keeps nobody longer than a deadline, and what is behind it meets again. */
TEST(test_hanging) {
  static sum_call sums[CALLS];
  fixture f;
  mlfab_request request;
  begin(&f, RANKS, 9, 0);
  sums_begin(&f, sums);
  played_stop(f.device[1]);
  const uint64_t began = mlfab_sim_clock(f.w.sim);
  for (int i = 0; i < 2; i++)
    for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &sums[i], r, r == 1);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(sum_end(&f, &sums[i], 1), MLFAB_ERR_TIMEOUT);
    said(f.w.node[1], MLFAB_ERR_TIMEOUT, "earlier work on the device's stream is not over");
  }
  for (int i = 0; i < 2; i++) {
    assert_int_not_equal(sum_end(&f, &sums[i], 0), 0);
    assert_int_not_equal(sum_end(&f, &sums[i], 2), 0);
  }
  const uint64_t took = mlfab_sim_clock(f.w.sim) - began;
  assert_in_range(took, 19ull * WORLD_S, 25ull * WORLD_S);
  f.device[1]->gate = 0;
  run_all(&f, 400, 1000000);
  sums_meet(&f, 0);
  /* Closing waits two heartbeats for copies, and keeps what they use. */
  mlfab_vec vec = {sums[3].at[1], LENGTH};
  played_stop(f.device[1]);
  OK(f.w.node[1], mlfab_allreduce_start(f.w.node[1], &vec, 1, MLFAB_I64, NULL, &request));
  OK(f.w.node[1], mlfab_abandon(&f.w.node[1]));
  assert_int_equal(f.device[1]->closed, 1);
  assert_true(f.device[1]->pinned_now > 0);
  f.device[1]->gate = 0;
  played_finish(f.device[1]); /* the copy finds its memory */
  end_failed(&f);
}

/* A worker that looks only when its deadline has passed: its call has not begun and does not begin; all fail, and what comes
 * then meets. */
TEST(test_looks_late) {
  static sum_call sums[CALLS];
  fixture f;
  uint64_t at = 0;
  mlfab_collective soon = {.size = sizeof soon, .timeout_ns = 50 * WORLD_MS};
  begin(&f, RANKS, 11, 0);
  sums_begin(&f, sums);
  sum_call *call = &sums[0];
  mlfab *node = f.w.node[1];
  const mlfab_vec vec = {call->at[1], LENGTH};
  sum_start(&f, call, 0, 0);
  sum_start(&f, call, 2, 0);
  OK(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_I64, &soon, &call->request[1]));
  OK(node, mlfab_deadline(node, &at));
  assert_true(at <= mlfab_sim_clock(f.w.sim) + 200000); /* when to look at the copy again */
  played_finish(f.device[1]);
  mlfab_sim_pause(f.w.sim, 1, 60 * WORLD_MS);
  mlfab_sim_run(f.w.sim, 60 * WORLD_MS);
  assert_int_equal(sum_end(&f, call, 1), MLFAB_ERR_TIMEOUT);
  said(node, MLFAB_ERR_TIMEOUT, "allreduce: the deadline passed after 60");
  for (uint32_t r = 0; r < RANKS; r += 2) {
    assert_int_equal(sum_end(&f, call, r), MLFAB_ERR_TIMEOUT);
    said(f.w.node[r], MLFAB_ERR_TIMEOUT, "worker 1: allreduce: ");
  }
  sums_meet(&f, 0);
  end_world(&f);
}

/* Cancelled calls end at once, wherever they are; cancelled collectives end for all. */
TEST(test_cancel) {
  for (int where = 0; where < 12; where++) {
    static sum_call sums[CALLS];
    fixture f;
    begin(&f, RANKS, 70 + (uint64_t)where, 0);
    sums_begin(&f, sums);
    if (where == 0) played_stop(f.device[1]);
    for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &sums[0], r, r == 1);
    run_all(&f, where, 20000);
    OK(f.w.node[1], mlfab_cancel(f.w.node[1], sums[0].request[1]));
    f.device[1]->gate = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
      int code = sum_end(&f, &sums[0], (i + 1) % RANKS);
      assert_true(code == MLFAB_ERR_CANCELLED || (where > 0 && code == 0));
    }
    EXPECT(f.w.node[1], mlfab_cancel(f.w.node[1], sums[0].request[1]), MLFAB_ERR_REQUEST);
    sums_meet(&f, 0);
    end_world(&f);
  }
}

/* A push that nobody waits for: mlfab_flush has its failure, and the model is as it was. */
TEST(test_flush) {
  fixture f;
  float got[3], *at[TENSORS];
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
  REFUSED(node, mlfab_flush(node, 0), MLFAB_ERR_DEVICE,
          "push: copying from device memory: played 800");
  OK(node, mlfab_pull(node, &host, 1, NULL, NULL));
  assert_memory_equal(got, zeros, sizeof got);
  OK(node, mlfab_push_start(node, &buf, 1, NULL, NULL));
  OK(node, mlfab_flush(node, 0));
  OK(node, mlfab_pull(node, &host, 1, NULL, NULL));
  assert_memory_equal(got, ones, sizeof got);
  end_world(&f);
}

/* --- copies that overlap with the transfer --- */

/* A model of more than 64 KiB in chunks of 8 KiB. Element i of an update, and of the model, is a factor times (i % 13 + 1). */
enum { PARTS = 3, FACTORS = 4, MODEL_STAGING = 1 << 19 };
static const uint32_t part_counts[PARTS] = {3, 2501, 30001};
static const int part_types[PARTS] = {MLFAB_F32, MLFAB_I64, MLFAB_F32};
static uint8_t *factors[FACTORS][PARTS]; /* on the host, for good */

static uint64_t part_bytes(uint32_t t) {
  return part_counts[t] * (uint64_t)(part_types[t] == MLFAB_I64 ? 8 : 4);
}

static void write_factor(void *to, uint32_t t, int64_t factor) {
  for (uint32_t i = 0; i < part_counts[t]; i++) {
    int64_t value = factor * (i % 13 + 1);
    if (part_types[t] == MLFAB_I64)
      ((int64_t *)to)[i] = value;
    else
      ((float *)to)[i] = (float)value;
  }
}

typedef struct parts {
  void *at[PARTS];
  int on[PARTS];
} parts;

static void place_parts(fixture *f, parts *p, uint32_t worker, int device) {
  for (uint32_t t = 0; t < PARTS; t++) {
    p->on[t] = device;
    p->at[t] = memory_on(f, worker, device, part_bytes(t));
  }
}

static void free_parts(parts *p) {
  for (uint32_t t = 0; t < PARTS; t++)
    if (!p->on[t]) free(p->at[t]);
}

/* The stream makes an update. */
static void make_parts(fixture *f, const parts *p, uint32_t worker, uint32_t factor) {
  for (uint32_t t = 0; t < PARTS; t++) {
    if (!factors[factor][t]) {
      factors[factor][t] = malloc(part_bytes(t));
      write_factor(factors[factor][t], t, factor);
    }
    memory_write(f, worker, p->on[t], p->at[t], factors[factor][t], part_bytes(t));
  }
}

static void list_parts(const parts *p, mlfab_buf bufs[PARTS]) {
  for (uint32_t t = 0; t < PARTS; t++) bufs[t] = (mlfab_buf){t, 0, p->at[t], part_counts[t]};
}

static void expect_parts(fixture *f, const parts *p, uint32_t worker, const int64_t want[PARTS]) {
  static uint64_t got[30001];
  for (uint32_t t = 0; t < PARTS; t++) {
    memory_read(f, worker, p->on[t], got, p->at[t], part_bytes(t));
    for (uint32_t i = 0; i < part_counts[t]; i++) {
      int64_t is =
          part_types[t] == MLFAB_I64 ? (int64_t)got[i] : (int64_t)((float *)(void *)got)[i];
      if (is != want[t] * (i % 13 + 1))
        fail_msg("worker %u, tensor %u, element %u: %lld, not %lld", worker, t, i, (long long)is,
                 (long long)(want[t] * (i % 13 + 1)));
    }
  }
}

/* A model of zeros. */
static void start_parts(fixture *f, uint32_t sync) {
  static uint8_t zeros[30001 * 4];
  mlfab_model_options o = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_buf bufs[PARTS];
  o.sync = sync;
  o.tags = tags;
  for (uint32_t r = 0; r < f->w.workers; r++) {
    for (uint32_t t = 0; t < PARTS; t++) {
      bufs[t] = (mlfab_buf){t, 0, zeros, part_counts[t]};
      OK(f->w.node[r], mlfab_tensor_add(f->w.node[r], t, part_types[t], part_counts[t]));
    }
    OK(f->w.node[r], mlfab_model_start(f->w.node[r], &o, bufs, PARTS));
    memset(zeros, 0, sizeof zeros);
  }
}

/* A world with that model, and memory for an update of each worker: of its device, but of worker 1 if `host`. */
static void open_parts(fixture *f, uint32_t workers, uint32_t servers, uint32_t eager_bytes,
                       uint64_t seed, uint32_t sync, parts *p, int host) {
  begin_servers(f, workers, servers, eager_bytes, seed, MODEL_STAGING);
  for (uint32_t r = 0; r < workers; r++) place_parts(f, &p[r], r, !(host && r == 1));
  start_parts(f, sync);
}

static mlfab_request push_parts(fixture *f, const parts *p, uint32_t worker, uint32_t factor) {
  mlfab_buf bufs[PARTS];
  mlfab_request request = 0;
  list_parts(p, bufs);
  make_parts(f, p, worker, factor);
  OK(f->w.node[worker], mlfab_push_start(f->w.node[worker], bufs, PARTS, NULL, &request));
  return request;
}

/* The whole model, pulled to memory of the host, is this factor. */
static void expect_model(fixture *f, uint32_t worker, int64_t factor) {
  const int64_t want[PARTS] = {factor, factor, factor};
  mlfab_buf bufs[PARTS];
  parts host;
  place_parts(f, &host, worker, 0);
  list_parts(&host, bufs);
  OK(f->w.node[worker], mlfab_pull(f->w.node[worker], bufs, PARTS, NULL, NULL));
  expect_parts(f, &host, worker, want);
  free_parts(&host);
}

static uint64_t received(fixture *f, uint32_t server) {
  mlfab_stats stats;
  OK(f->w.node[f->w.workers + server],
     mlfab_get_stats(f->w.node[f->w.workers + server], &stats, sizeof stats));
  return stats.payload_received;
}

static uint64_t applied(fixture *f) {
  uint64_t n = 0;
  for (uint32_t s = 0; s < f->w.servers; s++) {
    mlfab_stats stats;
    OK(f->w.node[f->w.workers + s],
       mlfab_get_stats(f->w.node[f->w.workers + s], &stats, sizeof stats));
    n += stats.updates_applied;
  }
  return n;
}

/* Pushes some of the tensors, in any order and memory. */
static mlfab_request push_some(fixture *f, const parts *p, uint32_t worker, int64_t adds[PARTS]) {
  mlfab_buf bufs[PARTS], some[PARTS];
  mlfab_request request = 0;
  uint32_t n = 0, factor = 1 + (uint32_t)below(f, FACTORS - 1);
  make_parts(f, p, worker, factor);
  list_parts(p, bufs);
  for (uint32_t t = 0; t < PARTS; t++) {
    if (below(f, 4) == 0 && t + 1 < PARTS) continue;
    adds[t] = factor;
    if (below(f, 4) == 0) bufs[t].data = factors[factor][t]; /* of the host */
    some[n++] = bufs[t];
  }
  if (n > 1 && below(f, 2)) {
    const mlfab_buf first = some[0];
    some[0] = some[n - 1];
    some[n - 1] = first;
  }
  OK(f->w.node[worker], mlfab_push_start(f->w.node[worker], some, n, NULL, &request));
  return request;
}

/* Pushes and pulls of some tensors in any memory, several under way, over links that break, while copies fail: the model is the
 * sum of the updates that succeeded. */
static void play_parts(uint64_t seed) {
  enum { SLOTS_OF = 2, WORKERS_OF = 2 };
  fixture f;
  parts p[WORKERS_OF][SLOTS_OF], to[WORKERS_OF];
  int64_t want[PARTS] = {0};
  mlfab_sim_options faults = {.size = sizeof faults};
  /* A server in the worker's node gets frames within the call that sends them. */
  dedicated = seed % 5 > 1;
  begin_servers(&f, WORKERS_OF, 1 + (uint32_t)(seed % (dedicated ? 3 : 2)), seed % 2 ? 4096 : 0,
                seed, MODEL_STAGING);
  dedicated = 1;
  faults.loss = seed % 4 == 3 ? 0.01 : 0.0;
  for (uint32_t r = 0; r < WORKERS_OF; r++) {
    for (int k = 0; k < SLOTS_OF; k++) place_parts(&f, &p[r][k], r, 1);
    place_parts(&f, &to[r], r, 1);
  }
  tags = seed % 7 == 0 ? 64 : 0; /* pulls write from a cache, at their end */
  start_parts(&f, MLFAB_SYNC_ASYNC);
  tags = 0;
  assert_int_equal(mlfab_sim_set_faults(f.w.sim, &faults), 0);
  for (int step = 0; step < 6; step++) {
    mlfab_request requests[WORKERS_OF][SLOTS_OF];
    int64_t adds[WORKERS_OF][SLOTS_OF][PARTS] = {{{0}}};
    for (uint32_t r = 0; r < WORKERS_OF; r++) {
      if (below(&f, 2)) played_stop(f.device[r]);
      if (below(&f, 3) == 0)
        f.device[r]->copy_fails_at = f.device[r]->copies + 1 + (uint32_t)below(&f, 50);
      for (int k = 0; k < SLOTS_OF; k++) requests[r][k] = push_some(&f, &p[r][k], r, adds[r][k]);
    }
    run_all(&f, (int)below(&f, 20), 50000);
    for (uint32_t r = 0; r < WORKERS_OF; r++) f.device[r]->gate = 0;
    for (uint32_t r = 0; r < WORKERS_OF; r++) {
      for (int k = 0; k < SLOTS_OF; k++) {
        const int code = until_done(&f, r, requests[r][k]);
        if (code) said(f.w.node[r], MLFAB_ERR_DEVICE, "push: copying from device memory: played");
        for (uint32_t t = 0; t < PARTS; t++) want[t] += code ? 0 : adds[r][k][t];
      }
      f.device[r]->copy_fails_at = 0;
      /* An update that failed uses its image until its copies are over. */
      played_finish(f.device[r]);
    }
    run_all(&f, 2, 50000);
    const uint32_t r = (uint32_t)below(&f, WORKERS_OF);
    mlfab_buf bufs[PARTS];
    list_parts(&to[r], bufs);
    /* What the stream still does with the buffers comes before the results. */
    make_parts(&f, &to[r], r, 1);
    OK(f.w.node[r], mlfab_pull(f.w.node[r], bufs, PARTS, NULL, NULL));
    expect_parts(&f, &to[r], r, want);
    for (uint32_t i = 0; i < WORKERS_OF; i++)
      assert_true(f.device[i]->pinned_most <= MODEL_STAGING);
  }
  end_world(&f);
}

/* The wire has bytes before the last copy is carried out; no server applies anything before it is; afterwards all do. */
static void play_overlap(uint32_t eager_bytes, uint32_t missing) {
  fixture f;
  parts p[2];
  open_parts(&f, 2, 3, eager_bytes, 1, MLFAB_SYNC_ASYNC, p, 0);
  assert_int_equal(until_done(&f, 0, push_parts(&f, p, 0, 1)), 0);
  played *d = f.device[0];
  const uint32_t copies = d->copied[0];
  const uint64_t before = applied(&f);
  uint64_t came[3];
  assert_true(copies > missing + 3);
  for (uint32_t s = 0; s < 3; s++) came[s] = received(&f, s);
  d->copies_most[0] = 2 * copies - missing;
  mlfab_request request = push_parts(&f, p, 0, 2);
  run_all(&f, 200, 50000);
  assert_int_equal(d->copied[0], 2 * copies - missing);
  /* A part of one frame is held back whole. */
  if (eager_bytes > 0) assert_true(received(&f, 0) > came[0]);
  if (eager_bytes > 0 && missing == 1) assert_true(received(&f, 2) > came[2]);
  /* Nothing of its part is copied: it does not know of the update. */
  if (missing > 10) assert_int_equal(received(&f, 2), came[2]);
  assert_int_equal(applied(&f), before);
  expect_model(&f, 1, 1);
  d->copies_most[0] = UINT32_MAX;
  assert_int_equal(until_done(&f, 0, request), 0);
  assert_int_equal(applied(&f), before + 3);
  expect_model(&f, 1, 3);
  end_world(&f);
}

TEST(test_overlap) {
  for (uint32_t missing = 1; missing < 12; missing += 5) {
    play_overlap(0, missing);
    play_overlap(4096, missing);
  }
}

/* What needs all of the update first, or would keep a group waiting, is not begun early. */
static void play_not_early(int filtered, int scheduled, double clip_norm) {
  fixture f;
  parts p;
  mlfab_buf bufs[PARTS];
  mlfab_request request;
  mlfab_push_options o = MLFAB_PUSH_OPTIONS_INIT;
  const mlfab_filter filter = {.size = sizeof filter, .threshold = 0.5};
  const int64_t want[PARTS] = {2, 2, 2};
  scheduler = scheduled ? MLFAB_SCHEDULER_BESIDE : MLFAB_SCHEDULER_NONE;
  begin_servers(&f, 1, 2, 4096, 7, MODEL_STAGING);
  scheduler = MLFAB_SCHEDULER_NONE;
  place_parts(&f, &p, 0, 1);
  mlfab *node = f.w.node[0];
  played *d = f.device[0];
  make_parts(&f, &p, 0, 0);
  list_parts(&p, bufs);
  for (uint32_t t = 0; t < PARTS; t += 2) /* without integers, which cannot be clipped */
    OK(node, mlfab_tensor_add(node, t, part_types[t], part_counts[t]));
  bufs[1] = bufs[2];
  OK(node, mlfab_model_start(node, NULL, bufs, 2));
  if (filtered) OK(node, mlfab_set_filter(node, MLFAB_ALL, &filter));
  make_parts(&f, &p, 0, 2);
  o.clip_norm = clip_norm;
  const uint64_t came = received(&f, 0);
  d->copies_most[0] = d->copied[0] + 9;
  OK(node, mlfab_push_start(node, bufs, 2, &o, &request));
  run_all(&f, 100, 50000);
  assert_int_equal(d->copied[0], d->copies_most[0]);
  assert_int_equal(received(&f, 0) > came, !filtered && !scheduled && !(clip_norm > 0.0));
  d->copies_most[0] = UINT32_MAX;
  assert_int_equal(until_done(&f, 0, request), 0);
  make_parts(&f, &p, 0, 0);
  OK(node, mlfab_pull(node, bufs, 2, NULL, NULL));
  played_write(d, p.at[1], factors[2][1], part_bytes(1)); /* it is not in the model */
  expect_parts(&f, &p, 0, want);
  end_world(&f);
}

TEST(test_not_early) {
  play_not_early(0, 0, 0.0);
  play_not_early(1, 0, 0.0);
  play_not_early(0, 1, 0.0);
  play_not_early(0, 0, 1e9);
}

/* The k-th copy fails under way, when the servers have got what was copied before: no server has applied anything of the update,
 * the other worker's counts, and so does the next one. */
static int play_late_failure(uint32_t sync, uint32_t k, uint32_t eager_bytes) {
  fixture f;
  parts p[2];
  open_parts(&f, 2, 3, eager_bytes, 40 + k, sync, p, 0);
  played *d = f.device[0];
  d->copies_most[0] = d->copied[0] + k - 1;
  d->copy_fails_at = d->copies + k;
  const int asked = k % 3 > 0;
  mlfab_request request = 0;
  if (asked) {
    request = push_parts(&f, p, 0, 1);
  } else { /* nobody waits for it: mlfab_flush tells */
    mlfab_buf bufs[PARTS];
    list_parts(p, bufs);
    make_parts(&f, p, 0, 1);
    OK(f.w.node[0], mlfab_push_start(f.w.node[0], bufs, PARTS, NULL, NULL));
  }
  run_all(&f, 200, 50000);
  mlfab_request theirs = push_parts(&f, &p[1], 1, 2);
  run_all(&f, 50, 50000);
  d->copies_most[0] = UINT32_MAX;
  int failed = asked ? until_done(&f, 0, request) != 0 : mlfab_flush(f.w.node[0], 0) != 0;
  if (failed) {
    said(f.w.node[0], MLFAB_ERR_DEVICE, "push: copying from device memory: played 800");
    assert_int_equal(until_done(&f, 1, theirs), 0);
    if (sync == MLFAB_SYNC_ASYNC) expect_model(&f, 0, 2);
    expect_model(&f, 1, 2);
    request = push_parts(&f, p, 0, 3);
    theirs = push_parts(&f, &p[1], 1, 2);
    assert_int_equal(until_done(&f, 0, request), 0);
    assert_int_equal(until_done(&f, 1, theirs), 0);
    expect_model(&f, 0, 7);
    expect_model(&f, 1, 7);
  }
  end_world(&f);
  return failed;
}

TEST(test_late_failure) {
  int failed = 0;
  /* The second copy is of the first chunk, which has two tensors: before it nothing is sent. */
  for (uint32_t k = 3; k < 30; k++) {
    failed += play_late_failure(MLFAB_SYNC_ASYNC, k, k % 2 ? 4096 : 0);
    failed += play_late_failure(MLFAB_SYNC_BSP, k, k % 2 ? 4096 : 0);
  }
  assert_true(failed >= 30);
}

/* The device fails in its k-th call of a function, in a push or a pull of many chunks. */
static int play_chunk_failure(int function, uint32_t k) {
  fixture f;
  parts p, to;
  mlfab_buf bufs[PARTS];
  mlfab_request request = 0;
  int failures = 0;
  open_parts(&f, 1, 3, k % 2 ? 4096 : 0, 60 + k, MLFAB_SYNC_ASYNC, &p, 0);
  place_parts(&f, &to, 0, 1);
  mlfab *node = f.w.node[0];
  played *d = f.device[0];
  int64_t model = 0;
  d->fails = function;
  d->fails_at = d->calls[function] + k;
  d->fails_for = 1;
  if (function == PLAYED_CALLS) d->copy_fails_at = d->copies + k;
  for (int turn = 0; turn < 2; turn++) {
    list_parts(&p, bufs);
    make_parts(&f, &p, 0, 1);
    int code = mlfab_push_start(node, bufs, PARTS, NULL, &request);
    if (!code) code = until_done(&f, 0, request);
    if (code) said(node, MLFAB_ERR_DEVICE, "played");
    model += code == 0;
    failures += code != 0;
    d->fails = -1; /* a call with memory of the host asks the device, too */
    expect_model(&f, 0, model);
    d->fails = function;
    list_parts(&to, bufs);
    code = mlfab_pull_start(node, bufs, PARTS, NULL, &request);
    if (!code) code = until_done(&f, 0, request);
    if (code) said(node, MLFAB_ERR_DEVICE, "played");
    failures += code != 0;
    const int64_t want[PARTS] = {model, model, model};
    if (!code) expect_parts(&f, &to, 0, want);
  }
  d->fails = -1;
  d->copy_fails_at = 0;
  played_finish(d);
  expect_model(&f, 0, model);
  const uint64_t pinned = d->pinned_now;
  world_close(&f.w);
  assert_true(d->pinned_now == 0 || (function == PLAYED_MARK && pinned > 0));
  played_end(d);
  return failures;
}

/* Every place, or every third where all is slow. */
static uint32_t stride(void) { return test_scale() < 1.0 ? 3 : 1; }

TEST(test_chunk_failures) {
  for (int function = 0; function <= PLAYED_CALLS; function++) {
    int failures = 0;
    const int often =
        function == PLAYED_COPY || function == PLAYED_MARK || function == PLAYED_CALLS;
    for (uint32_t k = 1; k < (often ? 60 : 8); k += often ? stride() : 1)
      failures += play_chunk_failure(function, k);
    assert_true(failures > 0 || function == PLAYED_ORDER);
  }
}

/* A pull copies back what has come whole. What a server sends again, of a newer model, is copied again. */
TEST(test_landing) {
  fixture f;
  parts p[2];
  mlfab_buf bufs[PARTS];
  mlfab_request request, theirs;
  mlfab_sim_options faults = {.size = sizeof faults};
  float zeros[3] = {0, 0, 0};
  const mlfab_buf nothing = {0, 0, zeros, 3};
  uint32_t early, again = 0;
  for (uint64_t when = 1; when < 30; when++) {
    open_parts(&f, 2, 1, 4096, when, MLFAB_SYNC_ASYNC, p, 1);
    assert_int_equal(until_done(&f, 1, push_parts(&f, &p[1], 1, 1)), 0);
    played *d = f.device[0];
    const uint32_t before = d->copied[1];
    d->eager = 1;
    assert_int_equal(mlfab_sim_set_rate(f.w.sim, 0, 5000000, 5000000), 0);
    list_parts(p, bufs);
    make_parts(&f, p, 0, 3);
    OK(f.w.node[0], mlfab_pull_start(f.w.node[0], bufs, PARTS, NULL, &request));
    run_all(&f, (int)when, 1000000);
    early = d->copied[1] - before;
    if (when >= 5) assert_true(early > 0);
    int done = 0;
    mlfab_result result;
    OK(f.w.node[0], mlfab_test(f.w.node[0], request, &done, &result));
    int64_t model = 1;
    if (!done) {
      /* The model moves on, the link is lost, and the pull begins again. */
      theirs = push_parts(&f, &p[1], 1, 2);
      assert_int_equal(until_done(&f, 1, theirs), 0);
      OK(f.w.node[0], mlfab_test(f.w.node[0], request, &done, &result));
      again += !done;
      faults.loss = 1.0;
      assert_int_equal(mlfab_sim_set_faults(f.w.sim, &faults), 0);
      OK(f.w.node[0], mlfab_push_start(f.w.node[0], &nothing, 1, NULL, NULL));
      run_all(&f, 1, 1000000);
      assert_int_equal(mlfab_sim_set_faults(f.w.sim, NULL), 0);
      model = done ? 0 : 3;
      if (!done) assert_int_equal(until_done(&f, 0, request), 0);
    }
    const int64_t want[PARTS] = {model, model, model};
    if (model > 0) expect_parts(&f, p, 0, want);
    free_parts(&p[1]);
    end_world(&f);
  }
  assert_true(again > 3);
}

/* Whoever stops between two copies - cancelled, late, closed - has changed nothing, and keeps nobody. */
TEST(test_stopping) {
  for (uint32_t k = 2; k < 26; k += stride()) { /* each way, with small parts and with large */
    fixture f;
    parts p[2];
    const int how = (int)(k % 4);
    open_parts(&f, 2, 3, k % 2 ? 4096 : 0, 90 + k, MLFAB_SYNC_ASYNC, p, 0);
    played *d = f.device[0];
    d->copies_most[0] = d->copied[0] + (k - 1) % 18;
    mlfab_request request = push_parts(&f, p, 0, 1);
    run_all(&f, 100, 50000);
    if (how == 0) OK(f.w.node[0], mlfab_cancel(f.w.node[0], request));
    if (how == 1) OK(f.w.node[0], mlfab_abandon(&f.w.node[0]));
    if (how == 2) OK(f.w.node[0], mlfab_close(&f.w.node[0]));
    if (how == 0) {
      assert_int_equal(until_done(&f, 0, request), MLFAB_ERR_CANCELLED);
      said(f.w.node[0], MLFAB_ERR_CANCELLED, "");
    }
    /* Servers wait three heartbeats for bytes, and take the other worker's then. */
    assert_int_equal(until_done(&f, 1, push_parts(&f, &p[1], 1, 2)), 0);
    expect_model(&f, 1, 2);
    if (how == 3) {
      assert_int_equal(until_done(&f, 0, request), MLFAB_ERR_TIMEOUT);
      said(f.w.node[0], MLFAB_ERR_TIMEOUT, "push: the deadline passed after");
    }
    d->copies_most[0] = UINT32_MAX;
    if (f.w.node[0]) {
      assert_int_equal(until_done(&f, 0, push_parts(&f, p, 0, 3)), 0);
      expect_model(&f, 1, 5);
    }
    played_finish(d);
    world_close(&f.w);
    for (uint32_t i = 0; i < 2; i++) {
      assert_int_equal(f.device[i]->closed, 1);
      played_end(f.device[i]);
    }
  }
}

/* Copies that stop for long, and go on: the servers have sent for the update again meanwhile, and others went first. */
TEST(test_stalling) {
  for (uint32_t k = 3; k < 18; k++) {
    fixture f;
    parts p[2];
    open_parts(&f, 2, 3, k % 2 ? 4096 : 0, 130 + k, MLFAB_SYNC_ASYNC, p, 0);
    played *d = f.device[0];
    d->copies_most[0] = d->copied[0] + k;
    mlfab_request request = push_parts(&f, p, 0, 1);
    run_all(&f, 100, 50000);
    assert_int_equal(until_done(&f, 1, push_parts(&f, &p[1], 1, 2)), 0);
    const uint64_t began = mlfab_sim_clock(f.w.sim);
    assert_int_equal(until_done(&f, 1, push_parts(&f, &p[1], 1, 3)), 0);
    assert_true(mlfab_sim_clock(f.w.sim) - began < WORLD_S); /* it does not block them again */
    expect_model(&f, 1, 5);
    d->copies_most[0] = UINT32_MAX;
    assert_int_equal(until_done(&f, 0, request), 0);
    expect_model(&f, 1, 6);
    end_world(&f);
  }
}

TEST(test_parts) {
  for (uint64_t seed = 1; seed <= test_cases_from(12, 250); seed++) play_parts(seed);
}

/* --- pinned memory --- */

/* It is used in place, but not before the stream has come to the call: also where all that the call has in device memory is only
 * written, which by itself need not wait. */
static void play_pinned(uint64_t seed) {
  static float got[5000];
  fixture f;
  void *at[TENSORS], *pinned = NULL;
  mlfab_buf bufs[TENSORS];
  begin(&f, 1, seed, 1 << 20);
  mlfab *node = f.w.node[0];
  played *p = f.device[0];
  assert_int_equal(played_pin(p, 5000 * sizeof(float), &pinned), 0);
  for (uint32_t t = 0; t < TENSORS; t++) {
    at[t] = t == 1 ? pinned : played_alloc(p, tensor_counts[t] * sizeof(float));
    bufs[t] = (mlfab_buf){t, 0, at[t], tensor_counts[t]};
    played_kernel(p, at[t], 0, tensor_counts[t] * sizeof(float));
  }
  model(&f, at);
  for (uint32_t t = 0; t < TENSORS; t++)
    played_kernel(p, at[t], 0x33, tensor_counts[t] * sizeof(float));
  OK(node, mlfab_pull(node, bufs, TENSORS, NULL, NULL));
  played_finish(p);
  for (uint32_t i = 0; i < tensor_counts[1]; i++) assert_true(((float *)pinned)[i] == 0.0f);
  const void *inputs[] = {pinned};
  const mlfab_collective how = {.size = sizeof how, .inputs = inputs};
  played_kernel(p, pinned, 0x44, tensor_counts[1] * sizeof(float));
  OK(node, mlfab_allreduce(node, at[2], tensor_counts[1], MLFAB_F32, &how));
  played_finish(p);
  played_read(p, got, at[2], tensor_counts[1] * sizeof(float));
  assert_memory_equal(got, pinned, tensor_counts[1] * sizeof(float));
  played_unpin(p, pinned);
  end_world(&f);
}

TEST(test_pinned) {
  for (uint64_t seed = 1; seed <= 20; seed++) play_pinned(seed);
}

/* --- what is refused --- */

static const uint8_t *owned; /* of the "GPU" that this program has code for */

int mlfab_device_owns(const void *memory);
int mlfab_device_owns(const void *memory) {
  return owned && memory >= (const void *)owned && memory < (const void *)(owned + PLAYED_BYTES);
}

TEST(test_without_a_device) {
  world w;
  mlfab_request request;
  world_init(&w, 2, 1, 1);
  world_open(&w, 1);
  played *p = played_begin(1);
  owned = p->at;
  mlfab_vec vec = {played_alloc(p, 64), 2};
  REFUSED(w.node[0], mlfab_allreduce_start(w.node[0], &vec, 1, MLFAB_F32, NULL, &request),
          MLFAB_ERR_ARGUMENT, "this context has no device: call mlfab_gpu_attach");
  OK(w.node[0], mlfab_device_attach(w.node[0], &played_device, p, 0));
  OK(w.node[0], mlfab_allreduce_start(w.node[0], &vec, 1, MLFAB_F32, NULL, &request));
  owned = NULL;
  world_close(&w);
  assert_int_equal(p->closed, 1);
  played_end(p);
}

TEST(test_attach) {
  fixture f;
  static const size_t members[] = {
      offsetof(mlfab_device, name),  offsetof(mlfab_device, where), offsetof(mlfab_device, pin),
      offsetof(mlfab_device, unpin), offsetof(mlfab_device, fence), offsetof(mlfab_device, after),
      offsetof(mlfab_device, copy),  offsetof(mlfab_device, mark),  offsetof(mlfab_device, order),
      offsetof(mlfab_device, poll),  offsetof(mlfab_device, drop),  offsetof(mlfab_device, text)};
  begin(&f, 1, 1, 0);
  mlfab *node = f.w.node[0], *server = f.w.node[1];
  REFUSED(node, mlfab_device_attach(node, &played_device, f.device[0], 0), MLFAB_ERR_STATE,
          "a played device is attached already");
  EXPECT(server, mlfab_device_attach(server, &played_device, f.device[0], 0), MLFAB_ERR_STATE);
  EXPECT(node, mlfab_device_attach(node, NULL, NULL, 0), MLFAB_ERR_ARGUMENT);
  for (size_t i = 0; i < sizeof members / sizeof *members; i++) {
    mlfab_device holed = played_device;
    memset((char *)&holed + members[i], 0, sizeof(void *));
    REFUSED(node, mlfab_device_attach(node, &holed, NULL, 0), MLFAB_ERR_ARGUMENT, "is not set");
  }
  assert_int_equal(mlfab_device_attach(NULL, &played_device, NULL, 0), MLFAB_ERR_ARGUMENT);
  end_world(&f);
}

TEST(test_refused) {
  fixture f;
  uint32_t op = 0;
  mlfab_dag *dag = NULL;
  mlfab_request requests[80];
  begin(&f, RANKS, 1, 1 << 17);
  mlfab *node = f.w.node[0];
  played *p = f.device[0];
  uint8_t *at = played_alloc(p, 1 << 18);
  mlfab_vec vec = {at, (1 << 17) / 4 + 1}, two[2] = {{at, 100}, {at + 396, 100}};
  REFUSED(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[0]),
          MLFAB_ERR_LIMIT, "allreduce: 131076 bytes of device memory, but staging_bytes is 131072");
  REFUSED(node, mlfab_allreduce_start(node, two, 2, MLFAB_F32, NULL, &requests[0]),
          MLFAB_ERR_ARGUMENT, "overlap");
  vec = (mlfab_vec){at + 2, 10};
  REFUSED(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[0]),
          MLFAB_ERR_ARGUMENT, "is not aligned to its elements of 4 bytes");
  vec = (mlfab_vec){p->at + PLAYED_BYTES - 8, 10};
  REFUSED(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[0]),
          MLFAB_ERR_ARGUMENT, "ends behind the device's memory");
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
  REFUSED(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &requests[2]),
          MLFAB_ERR_AGAIN, "131072 of 131072 bytes are in use, and this call needs 65536");
  played_stop(p);
  for (int i = 2; i < 64; i++) OK(node, mlfab_barrier_start(node, NULL, &requests[i]));
  REFUSED(node, mlfab_barrier_start(node, NULL, &requests[64]), MLFAB_ERR_AGAIN,
          "64 calls are under way");
  p->gate = 0;
  played_finish(p);
  end_world(&f);
}

TEST(test_model) {
  for (uint64_t seed = 1; seed <= test_cases_from(20, 500); seed++) play_model(seed);
}

TEST(test_collectives) {
  for (uint64_t seed = 1; seed <= test_cases_from(40, 1000); seed++) play_collectives(seed);
}

TESTS(NULL, NULL)
