/* test_device_direct.c - collectives of device memory from device to device: results have the bits of the host's kernels in the order
 * of members; whatever fails, and whenever, ends the call at all workers, nobody gets a wrong sum, and the calls after it match again.
 *
 * Nodes live in the simulator, each with a device that is played (played.h) and can read the others'. MLFAB_SCALE=100 runs 4,000
 * seeds. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* memfd_create */
#endif
#include "device_world.h"

#include "core/api/calls.h"
#include "core/api/direct.h"
#include "core/kernels/kernels_combine.h"
#include "../testing.h"

enum { MOST = 8, COUNT = 3000, LEAST = 2048, SLOTS = 6 };

/* What the host's collectives in shared memory do. */
static void combine(int op, int dtype, void *to, const void *const *in, uint32_t k, uint64_t n) {
  mlfab__kernel_combine_many(op == MLFAB_OP_MEAN ? MLFAB_OP_SUM : op, dtype, &to, 1, in, k, n, 0);
  if (op == MLFAB_OP_MEAN) mlfab__kernel_divide(dtype, to, n, k);
}

static void begin(fixture *f, uint32_t workers, uint64_t seed, uint64_t staging_bytes) {
  prepare_world(f, workers, 1, 0, seed);
  open_with_devices(f, seed, staging_bytes);
  for (uint32_t i = 0; i < workers; i++) f->device[i]->combine = combine;
}

/* Ends what mlfab__context_enter has begun. */
static void leave(mlfab *node) {
  mlfab__context_sent(node, 0);
  (void)mlfab__context_leave(node, 0);
}

/* All workers call mlfab_device_share; code_p: by worker. Returns what those got that succeeded: all the same. */
static int share(fixture *f, uint64_t least, int *code_p) {
  mlfab__direct_share asks[MOST];
  int shared = -1, over[MOST] = {0};
  for (uint32_t i = 0; i < f->w.workers; i++) {
    mlfab *node = f->w.node[i];
    if (!node) continue;
    mlfab__context_enter(node);
    code_p[i] = mlfab__direct_share_begin(node, &asks[i], least, 0);
    over[i] = code_p[i] != 0;
    leave(node);
  }
  for (uint32_t left = f->w.workers, rounds = 0; left > 0; rounds++) {
    assert_true(rounds < 2000000);
    left = 0;
    run_all(f, 1, 20000);
    for (uint32_t i = 0; i < f->w.workers; i++) {
      mlfab *node = f->w.node[i];
      int own = -1;
      if (!node || over[i]) continue;
      mlfab__context_enter(node);
      over[i] = mlfab__direct_share_poll(node, &asks[i]);
      if (over[i]) {
        code_p[i] = mlfab__direct_share_end(node, &asks[i], &own);
        if (!code_p[i]) {
          if (shared >= 0) assert_int_equal(own, shared);
          shared = own;
        }
      }
      leave(node);
      left += !over[i];
    }
  }
  return shared;
}

/* The same where all must succeed. */
static int share_all(fixture *f) {
  int codes[MOST] = {0};
  int shared = share(f, LEAST, codes);
  for (uint32_t i = 0; i < f->w.workers; i++)
    if (f->w.node[i]) EXPECT(f->w.node[i], codes[i], 0);
  return shared;
}

/* A world whose workers share their memory. */
static void begin_shared(fixture *f, uint32_t workers, uint64_t seed, uint64_t staging_bytes) {
  begin(f, workers, seed, staging_bytes);
  assert_int_equal(share_all(f), 1);
}

/* --- results --- */

enum { WAY_DIRECT, WAY_SMALL, WAY_HOST, WAY_PARTS, WAY_INPUTS, WAY_UNSHARED, WAY_BARRIER, WAYS };

typedef struct slot {
  int way, kind, op, dtype;
  int32_t root;
  uint32_t width;
  uint64_t count, bytes, counts[MOST]; /* counts: of blocks, by rank */
  mlfab_request request[MOST];
  void *data[MOST], *input[MOST];
  int on[MOST]; /* device memory */
  uint8_t was[MOST][COUNT * 8], want[COUNT * 8], got[COUNT * 8];
} slot;

static void fill(fixture *f, slot *s, uint32_t worker) {
  for (uint64_t i = 0; i < s->count; i++) {
    const float x = (float)((int64_t)below(f, 2001) - 1000) / 64.0f;
    float f32 = x * 1.001f;
    double f64 = (double)x * 1.0000001;
    int64_t i64 = (int64_t)below(f, 1u << 30) - (1 << 29);
    void *at = s->was[worker] + i * (s->bytes / s->count);
    if (s->dtype == MLFAB_F32) memcpy(at, &f32, 4);
    if (s->dtype == MLFAB_F64) memcpy(at, &f64, 8);
    if (s->dtype == MLFAB_I64) memcpy(at, &i64, 8);
    if (s->dtype == MLFAB_F16) mlfab__half_store(MLFAB_HALF_F16, at, &f32, 1);
    if (s->dtype == MLFAB_BF16) mlfab__half_store(MLFAB_HALF_BF16, at, &f32, 1);
  }
}

/* Where workers do not go from device to device, the order of additions is another one: these calls add integers. */
static void prepare(fixture *f, slot *s, const uint32_t *members, int direct) {
  static const int dtypes[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64, MLFAB_F16, MLFAB_BF16};
  static const uint32_t widths[] = {4, 8, 8, 2, 2};
  const uint32_t type = (uint32_t)below(f, 5);
  memset(s, 0, sizeof *s);
  s->way = direct || below(f, 2) ? WAY_DIRECT : (int)below(f, WAYS);
  s->dtype = s->way == WAY_DIRECT ? dtypes[type] : MLFAB_I64;
  s->op = (int)below(f, 5);
  if (s->dtype == MLFAB_I64 && s->op == MLFAB_OP_MEAN) s->op = MLFAB_OP_SUM;
  const uint32_t width = s->way == WAY_DIRECT ? widths[type] : 8;
  s->count = (LEAST + width - 1) / width + below(f, COUNT - LEAST / 2);
  if (s->way == WAY_SMALL) s->count = 1 + below(f, LEAST / 8 - 1);
  s->bytes = s->count * width;
  s->width = width;
  s->kind = s->way == WAY_DIRECT ? (int)below(f, KINDS) : KIND_ALLREDUCE;
  s->root = (int32_t)below(f, f->w.workers);
  uint64_t left = s->count, at = 0;
  for (uint32_t r = 0; r < f->w.workers; r++) { /* a block may be empty */
    s->counts[r] = r + 1 == f->w.workers ? left : below(f, left + 1) / (1 + below(f, 3));
    left -= s->counts[r];
  }
  const void *in[MOST];
  for (uint32_t r = 0; r < f->w.workers; r++) fill(f, s, r);
  for (uint32_t m = 0; m < f->w.workers; m++) in[m] = s->was[members[m]];
  if (s->kind <= KIND_SCATTER) combine(s->op, s->dtype, s->want, in, f->w.workers, s->count);
  if (s->kind == KIND_BROADCAST) memcpy(s->want, s->was[s->root], s->bytes);
  for (uint32_t r = 0; s->kind == KIND_GATHER && r < f->w.workers; at += s->counts[r++])
    memcpy(s->want + at * width, s->was[r] + at * width, s->counts[r] * width);
}

static void start(fixture *f, slot *s, uint32_t worker) {
  mlfab *node = f->w.node[worker];
  played *p = f->device[worker];
  const int odd = worker == f->w.workers - 1; /* who does not do as the others do */
  const void *inputs[1];
  mlfab_collective o = {.size = sizeof o, .op = (uint32_t)s->op};
  if (s->way == WAY_BARRIER) {
    OK(node, mlfab_barrier_start(node, NULL, &s->request[worker]));
    return;
  }
  s->on[worker] = !(s->way == WAY_HOST && odd);
  s->data[worker] = memory_on(f, worker, s->on[worker], s->bytes);
  mlfab_vec vecs[2] = {{s->data[worker], s->count}, {NULL, 0}};
  void *from = s->data[worker];
  if (s->way == WAY_INPUTS && odd) {
    from = s->input[worker] = memory_on(f, worker, s->on[worker], s->bytes);
    inputs[0] = from;
    o.inputs = inputs;
  }
  uint32_t n = 1;
  if (s->way == WAY_PARTS && odd) {
    vecs[0].count = s->count / 3;
    vecs[1] = (mlfab_vec){(int64_t *)s->data[worker] + s->count / 3, s->count - s->count / 3};
    n = 2;
  }
  p->unshared = s->way == WAY_UNSHARED && odd;
  p->unshared_from = 0;
  memory_write(f, worker, s->on[worker], from, s->was[worker], s->bytes);
  mlfab_request *request = &s->request[worker];
  void *data = s->data[worker];
  if (s->kind == KIND_SCATTER)
    OK(node, mlfab_reduce_scatter_start(node, data, s->counts, s->dtype, &o, request));
  else if (s->kind == KIND_GATHER)
    OK(node, mlfab_allgather_start(node, data, s->counts, s->dtype, NULL, request));
  else if (s->kind == KIND_BROADCAST)
    OK(node, mlfab_broadcast_start(node, s->root, data, s->bytes, NULL, request));
  else
    OK(node, mlfab_allreduce_start(node, vecs, n, s->dtype, &o, request));
}

static void check(fixture *f, slot *s, uint32_t worker) {
  if (s->way == WAY_BARRIER) return;
  memory_read(f, worker, s->on[worker], s->got, s->data[worker], s->bytes);
  uint64_t from = 0, bytes = s->bytes;
  for (uint32_t r = 0; s->kind == KIND_SCATTER && r < worker; r++) from += s->counts[r] * s->width;
  if (s->kind == KIND_SCATTER) bytes = s->counts[worker] * s->width;
  if (memcmp(s->got + from, s->want + from, bytes) != 0)
    fail_msg("way %d, kind %d, op %d, dtype %d, %llu elements: worker %u of %u has a wrong result",
             s->way, s->kind, s->op, s->dtype, (unsigned long long)s->count, worker, f->w.workers);
  if (!s->on[worker]) free(s->data[worker]);
}

static void play_results(uint64_t seed) {
  static slot slots[SLOTS];
  fixture f;
  uint32_t members[MOST], n = 0, direct = 0, parts = 0, plain = 0;
  begin_shared(&f, 1 + (uint32_t)(seed % MOST), seed, 1 << 20);
  OK(f.w.node[0], mlfab_present(f.w.node[0], members, MOST, &n));
  assert_int_equal(n, f.w.workers);
  for (uint32_t k = 0; k < SLOTS; k++) prepare(&f, &slots[k], members, seed % 3 == 0);
  for (uint32_t k = 0; k < SLOTS; k++) {
    /* Whether memory can be shared is asked when a call begins: one such call at a time. */
    const int alone = slots[k].way == WAY_UNSHARED;
    for (uint32_t j = 0; alone && j < k; j++)
      for (uint32_t r = 0; r < f.w.workers; r++)
        if (slots[j].request[r]) {
          assert_int_equal(until_done(&f, r, slots[j].request[r]), 0);
          slots[j].request[r] = 0;
        }
    for (uint32_t r = 0; r < f.w.workers; r++) {
      if (below(&f, 4) == 0) played_stop(f.device[r]);
      start(&f, &slots[k], r);
    }
    mlfab_sim_run(f.w.sim, below(&f, 300000));
    for (uint32_t r = 0; r < f.w.workers; r++) f.device[r]->gate = 0;
    for (uint32_t r = 0; alone && r < f.w.workers; r++) {
      assert_int_equal(until_done(&f, r, slots[k].request[r]), 0);
      slots[k].request[r] = 0;
    }
    plain += slots[k].way == WAY_DIRECT;
    direct += slots[k].way == WAY_DIRECT && slots[k].kind == KIND_ALLREDUCE;
    parts += slots[k].way == WAY_DIRECT && slots[k].kind == KIND_SCATTER;
  }
  for (uint32_t k = 0; k < SLOTS; k++)
    for (uint32_t r = 0; r < f.w.workers; r++)
      if (slots[k].request[r]) assert_int_equal(until_done(&f, r, slots[k].request[r]), 0);
  for (uint32_t k = 0; k < SLOTS; k++)
    for (uint32_t r = 0; r < f.w.workers; r++) check(&f, &slots[k], r);
  for (uint32_t r = 0; r < f.w.workers; r++) {
    assert_true(f.device[r]->reduced <= direct + parts);
    if (f.w.workers < 4) assert_true(f.device[r]->reduced >= direct); /* no part is empty */
    /* Nothing was staged but what had to be. */
    assert_true(f.device[r]->pinned_most == 0 || plain < SLOTS);
    assert_true(f.device[r]->mapped_most <= 64);
  }
  end_world(&f);
}

TEST(test_results) {
  for (uint64_t seed = 1; seed <= test_cases_from(24, 40); seed++) play_results(seed);
}

/* --- failures --- */

enum { RANKS = 3, CALLS = 4 };

/* All calls of all who live: a call that fails may fail for all. Returns how many failed. */
static uint32_t sum_all(fixture *f, sum_call *s) {
  uint32_t failures = 0;
  sum_prepare(f, s);
  for (uint32_t r = 0; r < f->w.workers; r++)
    if (f->w.node[r]) sum_start(f, s, r, 1);
  for (uint32_t r = 0; r < f->w.workers; r++)
    if (f->w.node[r]) failures += sum_end(f, s, r) != 0;
  return failures;
}

/* A founder's result is the sum of the first two, or (third) of all three. */
static void expect_sum(fixture *f, const sum_call *s, uint32_t r, int third) {
  int64_t got[LENGTH];
  played_read(f->device[r], got, s->at[r], sizeof got);
  for (uint32_t i = 0; i < LENGTH; i++)
    assert_int_equal(got[i], s->was[0][i] + s->was[1][i] + (third ? s->was[2][i] : 0));
}

static uint32_t reduced(const fixture *f) {
  uint32_t n = 0;
  for (uint32_t r = 0; r < f->w.workers; r++) n += f->device[r]->reduced;
  return n;
}

/* The device of worker 1 fails in its k-th call of a function: the call fails at all workers, with the rank and the words, or at
 * none; then calls are staged, until the workers share again. */
static uint32_t play_failure(int function, uint32_t k, uint64_t seed, int kind) {
  static sum_call s;
  fixture f;
  uint32_t failures = 0, staged = 0;
  int codes[MOST];
  begin_shared(&f, RANKS, seed, 0);
  played *p = f.device[1];
  f.kind = kind;
  p->fails = function;
  p->fails_at = function < PLAYED_ALL ? p->calls[function] + k : 0;
  p->fails_for = 1;
  if (function == PLAYED_ALL) p->copy_fails_at = p->copies + k; /* one that is under way */
  for (int i = 0; i < CALLS; i++) {
    const uint32_t before = reduced(&f);
    sum_prepare(&f, &s);
    for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &s, r, 1);
    for (uint32_t r = 0; r < RANKS; r++) {
      int code = sum_end(&f, &s, r);
      failures += code != 0;
      if (code) {
        said(f.w.node[r], MLFAB_ERR_DEVICE, "worker 1: ");
        said(f.w.node[r], MLFAB_ERR_DEVICE, "played");
      }
    }
    assert_true(failures % RANKS == 0);
    staged += reduced(&f) == before;
    if (failures) assert_true(i > 0 || reduced(&f) <= before + RANKS);
  }
  p->fails = -1;
  p->copy_fails_at = 0;
  sums_meet(&f, 1);
  const int shared = share(&f, LEAST, codes) == 1;
  const uint32_t before = reduced(&f);
  assert_int_equal(sum_all(&f, &s), 0);
  assert_int_equal(reduced(&f), before + (shared && kind <= KIND_SCATTER ? RANKS : 0));
  if (function == PLAYED_MARK && failures) assert_int_equal(codes[1], MLFAB_ERR_DEVICE);
  if (function != PLAYED_MARK) assert_int_equal(shared, 1);
  for (uint32_t r = 0; r < RANKS; r++) played_finish(f.device[r]);
  end_failed(&f);
  return failures + staged;
}

TEST(test_failures) {
  uint32_t seen[PLAYED_ALL + 1] = {0};
  for (int function = 0; function <= PLAYED_ALL; function++)
    for (uint32_t k = 1; k <= 9; k++)
      seen[function] += play_failure(function, k, 100 + k, KIND_ALLREDUCE);
  for (int kind = KIND_SCATTER; kind < KINDS; kind++)
    for (int function = 0; function <= PLAYED_ALL; function++)
      for (uint32_t k = 1; k <= 4; k++) (void)play_failure(function, k, 200 + k, kind);
  for (int function = PLAYED_WHERE; function <= PLAYED_ALL; function++) {
    const int unused = function == PLAYED_PIN || function == PLAYED_AFTER ||
                       function == PLAYED_ORDER || function == PLAYED_IDENTIFY ||
                       function == PLAYED_REACHES;
    if (!unused && !seen[function]) fail_msg("no failure of function %d was seen", function);
  }
}

/* A worker dies, at any moment: the others' call succeeds or names it, and they go on by the host. */
TEST(test_death) {
  static sum_call s;
  uint32_t failed = 0, done = 0;
  for (int when = 0; when < (int)test_cases_from(60, 60); when++) {
    fixture f;
    begin_shared(&f, RANKS, 300 + (uint64_t)when, 0);
    sum_prepare(&f, &s);
    for (uint32_t r = 0; r < RANKS; r++) {
      f.device[r]->eager = when % 2;
      sum_start(&f, &s, r, 1);
    }
    run_all(&f, when, 40000);
    assert_int_equal(mlfab_sim_crash(f.w.sim, 1), 0);
    f.w.node[1] = NULL;
    for (uint32_t r = 0; r < RANKS; r += 2) {
      int code = until_done(&f, r, s.request[r]);
      if (code) said(f.w.node[r], MLFAB_ERR_PEER_DEAD, "worker 1");
      failed += code != 0;
      done += code == 0;
      if (!code) expect_sum(&f, &s, r, 1);
    }
    sums_meet(&f, 1);
    const uint32_t staged = reduced(&f);
    assert_int_equal(sum_all(&f, &s), 0);
    assert_int_equal(reduced(&f), staged);
    assert_int_equal(share_all(&f), 1);
    assert_int_equal(sum_all(&f, &s), 0);
    assert_int_equal(reduced(&f), staged + 2);
    end_failed(&f);
  }
  assert_true(failed > 0 && done > 0);
}

/* Cancelled at any moment: the call ends for all, and what comes after meets. */
TEST(test_cancel) {
  static sum_call s;
  uint32_t cancelled = 0, done = 0;
  for (int when = 0; when < (int)test_cases_from(60, 60); when++) {
    fixture f;
    begin_shared(&f, RANKS, 500 + (uint64_t)when, 0);
    sum_prepare(&f, &s);
    if (when == 0) played_stop(f.device[1]);
    for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &s, r, 1);
    run_all(&f, when, 40000);
    (void)mlfab_cancel(f.w.node[1], s.request[1]);
    f.device[1]->gate = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
      int code = sum_end(&f, &s, (i + 1) % RANKS);
      assert_true(code == MLFAB_ERR_CANCELLED || (when > 0 && code == 0));
      cancelled += code != 0;
      done += code == 0;
    }
    sums_meet(&f, 1);
    assert_int_equal(share_all(&f), 1);
    assert_int_equal(sum_all(&f, &s), 0);
    end_world(&f);
  }
  assert_true(cancelled > 0 && done > 0);
}

/* A device that hangs in its part: all workers are told at its deadline, and it shares no more until it is over. */
TEST(test_hanging) {
  static sum_call s;
  int codes[MOST];
  for (int when = 0; when < 2; when++) {
    fixture f;
    begin_shared(&f, RANKS, 9 + (uint64_t)when, 0);
    sum_prepare(&f, &s);
    if (when == 0) f.device[1]->hung = 1;
    for (uint32_t r = 0; r < RANKS; r++) sum_start(&f, &s, r, 1);
    for (int i = 0; when == 1 && i < 100000 && !f.device[1]->reduced; i++) run_all(&f, 1, 5000);
    f.device[1]->hung = 1; /* in its reduction, or in what it copies */
    const uint64_t began = mlfab_sim_clock(f.w.sim);
    assert_int_equal(sum_end(&f, &s, 1), MLFAB_ERR_TIMEOUT);
    said(f.w.node[1], MLFAB_ERR_TIMEOUT, "the device is not done with other workers' memory");
    for (uint32_t r = 0; r < RANKS; r += 2) assert_int_not_equal(sum_end(&f, &s, r), 0);
    assert_in_range(mlfab_sim_clock(f.w.sim) - began, 18ull * WORLD_S, 25ull * WORLD_S);
    assert_int_equal(share(&f, LEAST, codes), -1);
    for (uint32_t r = 0; r < RANKS; r++)
      REFUSED(f.w.node[r], codes[r], MLFAB_ERR_DEVICE, "worker 1's device may still use memory");
    assert_true(played_mapped(f.device[1]) > 0);
    f.device[1]->hung = 0;
    run_all(&f, 100, 1000000);
    assert_int_equal(share_all(&f), 1);
    assert_int_equal(played_mapped(f.device[1]), 0);
    assert_int_equal(sum_all(&f, &s), 0);
    end_world(&f);
  }
}

/* Worker 0 is done with its part and gives up while worker 1 still copies from it: what is written there now must not become
 * part of a result. */
static uint32_t play_late_reader(uint64_t seed, int kind) {
  static sum_call s;
  fixture f;
  begin_shared(&f, 2, seed, 0);
  f.kind = kind;
  sum_prepare(&f, &s);
  f.device[0]->eager = f.device[1]->eager = 1;
  for (uint32_t r = 0; r < 2; r++) sum_start(&f, &s, r, 1);
  /* Worker 1 stops before it reads for the last time. */
  if (kind != KIND_ALLREDUCE) f.device[1]->hung = 1;
  for (int i = 0; i < 100000 && kind == KIND_ALLREDUCE && !f.device[1]->reduced; i++)
    run_all(&f, 1, 1000);
  const uint32_t copied = f.device[0]->copies;
  f.device[1]->hung = 1;
  run_all(&f, 3000, 1000); /* worker 0 does its part, and meets */
  const uint32_t caught = f.device[0]->copies > copied;
  (void)mlfab_cancel(f.w.node[0], s.request[0]);
  memset(played_own(f.device[0], s.at[0]), 0x77, sizeof s.was[0]);
  f.device[1]->hung = 0;
  for (int i = 0; i < 3; i++) (void)mlfab_progress(f.w.node[1], 0);
  int code = sum_end(&f, &s, 1);
  assert_true(code == 0 || code == MLFAB_ERR_CANCELLED);
  (void)until_done(&f, 0, s.request[0]);
  end_world(&f);
  return caught;
}

TEST(test_late_reader) {
  uint32_t caught[KINDS] = {0};
  for (uint64_t seed = 1; seed <= 20; seed++)
    for (int kind = 0; kind < KIND_BROADCAST; kind++) caught[kind] += play_late_reader(seed, kind);
  for (int kind = 0; kind < KIND_BROADCAST; kind++) assert_true(caught[kind] > 0);
}

/* --- who cannot, and what differs --- */

TEST(test_mismatch) {
  fixture f;
  mlfab_request request[2];
  for (int k = 0; k < 3; k++) {
    begin_shared(&f, 2, 7, 0);
    int64_t *at[2] = {played_alloc(f.device[0], 8 * LENGTH), played_alloc(f.device[1], 8 * LENGTH)};
    const uint64_t other = k == 0 ? LENGTH - 1 : k == 1 ? 10 : LENGTH;
    const mlfab_collective max = {.size = sizeof max, .op = MLFAB_OP_MAX};
    mlfab_vec vec[2] = {{at[0], LENGTH}, {at[1], other}};
    OK(f.w.node[0], mlfab_allreduce_start(f.w.node[0], &vec[0], 1, MLFAB_I64, NULL, &request[0]));
    OK(f.w.node[1], mlfab_allreduce_start(f.w.node[1], &vec[1], 1, MLFAB_I64, k == 2 ? &max : NULL,
                                          &request[1]));
    for (uint32_t r = 0; r < 2; r++) {
      assert_int_equal(until_done(&f, r, request[r]), MLFAB_ERR_MISMATCH);
      said(f.w.node[r], MLFAB_ERR_MISMATCH,
           k == 1 ? "a meeting about device memory" : "an allreduce");
    }
    assert_int_equal(reduced(&f), 0);
    end_world(&f);
  }
}

TEST(test_cannot_share) {
  static sum_call s;
  mlfab_device poor = played_device;
  for (int why = 0; why < 3; why++) {
    fixture f;
    prepare_world(&f, RANKS, 1, 0, 3);
    world_open(&f.w, 3);
    poor.size = offsetof(mlfab_device, identify);
    for (uint32_t i = 0; i < RANKS; i++) {
      f.device[i] = played_begin(i);
      if (why == 0 && i == 1) f.device[i]->host = 7;
      if (why == 2 && i == 1) continue; /* no device at all */
      OK(f.w.node[i], mlfab_device_attach(f.w.node[i], why == 1 && i == 1 ? &poor : &played_device,
                                          f.device[i], 0));
    }
    assert_int_equal(share_all(&f), 0);
    if (why < 2) assert_int_equal(sum_all(&f, &s), 0);
    assert_int_equal(reduced(&f), 0);
    end_failed(&f);
  }
}

TEST(test_arguments) {
  fixture f;
  int shared = 7;
  begin(&f, 1, 1, 0);
  assert_int_equal(mlfab_device_share(NULL, 0, 0, &shared), MLFAB_ERR_ARGUMENT);
  EXPECT(f.w.node[0], mlfab_device_share(f.w.node[0], 0, 0, NULL), MLFAB_ERR_ARGUMENT);
  OK(f.w.node[0], mlfab_device_share(f.w.node[0], LEAST, 0, &shared));
  assert_int_equal(shared, 1);
  int64_t *at = played_alloc(f.device[0], 8 * LENGTH);
  OK(f.w.node[0], mlfab_allreduce(f.w.node[0], at, LENGTH, MLFAB_I64, NULL));
  assert_int_equal(f.device[0]->reduced, 1);
  OK(f.w.node[0], mlfab_allreduce(f.w.node[0], at, LEAST / 8 - 1, MLFAB_I64, NULL));
  assert_int_equal(f.device[0]->reduced, 1);
  end_world(&f);
}

/* Pushes pass a call that waits for other workers; a call with a number does not. */
TEST(test_order) {
  static sum_call s, second;
  fixture f;
  mlfab_request barrier[2], small[2];
  int64_t *at[2];
  begin_shared(&f, 2, 4, 0);
  sum_prepare(&f, &s);
  sum_prepare(&f, &second);
  for (uint32_t r = 0; r < 2; r++) at[r] = played_alloc(f.device[r], 64);
  sum_start(&f, &s, 0, 1);
  sum_start(&f, &second, 0, 1);
  for (uint32_t r = 0; r < 2; r++) {
    static const int64_t eight[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    mlfab_vec vec = {at[r], 8};
    played_produce(f.device[r], at[r], eight, sizeof eight);
    if (r == 0)
      OK(f.w.node[0], mlfab_allreduce_start(f.w.node[0], &vec, 1, MLFAB_I64, NULL, &small[0]));
    OK(f.w.node[r], mlfab_barrier_start(f.w.node[r], NULL, &barrier[r]));
  }
  for (uint32_t r = 0; r < 2; r++) assert_int_equal(until_done(&f, r, barrier[r]), 0);
  sum_start(&f, &s, 1, 1);
  sum_start(&f, &second, 1, 1);
  mlfab_vec vec = {at[1], 8};
  OK(f.w.node[1], mlfab_allreduce_start(f.w.node[1], &vec, 1, MLFAB_I64, NULL, &small[1]));
  for (uint32_t r = 0; r < 2; r++) {
    int64_t got[8];
    assert_int_equal(sum_end(&f, &s, r), 0);
    assert_int_equal(sum_end(&f, &second, r), 0);
    assert_int_equal(until_done(&f, r, small[r]), 0);
    played_read(f.device[r], got, at[r], sizeof got);
    for (int64_t i = 0; i < 8; i++) assert_int_equal(got[i], 2 * (i + 1));
  }
  end_world(&f);
}

/* --- a worker that joins --- */

static void open_one(fixture *f, uint32_t i) {
  mlfab_config c = world_config(&f->w, i);
  c.workers = 2;
  c.workers_max = RANKS;
  sim_open(f->w.sim, i, &c, &f->w.node[i]);
}

/* 1: the call of a founder is over: with the sum of both, or (*joined_p) of all three. */
static int founder_looks(fixture *f, sum_call *s, uint32_t r, int *joined_p) {
  mlfab_result result;
  int64_t first;
  int done = 0;
  OK(f->w.node[r], mlfab_test(f->w.node[r], s->request[r], &done, &result));
  if (!done) return 0;
  EXPECT(f->w.node[r], result.status, 0);
  played_read(f->device[r], &first, s->at[r], sizeof first);
  *joined_p = first != s->was[0][0] + s->was[1][0];
  expect_sum(f, s, r, *joined_p);
  return 1;
}

/* It comes at any moment, while the founders call all the time: no call fails, and the first one after it has its data. */
static void play_join(uint64_t seed, uint32_t when) {
  static sum_call s;
  fixture f;
  int joined[2] = {0}, open = 0;
  uint32_t calls[2] = {0};
  prepare_world(&f, RANKS, 1, 1, seed);
  world_network(&f.w, seed);
  const uint32_t first[] = {3, 0, 1};
  for (int i = 0; i < 3; i++) open_one(&f, first[i]);
  for (int i = 0; i < 3; i++) world_await(&f.w, first[i]);
  for (uint32_t i = 0; i < RANKS; i++) f.device[i] = played_begin(seed + i);
  for (uint32_t i = 0; i < 2; i++)
    OK(f.w.node[i], mlfab_device_attach(f.w.node[i], &played_device, f.device[i], 0));
  assert_int_equal(share_all(&f), 1);
  sum_prepare(&f, &s);
  for (uint32_t r = 0; r < 2; r++) sum_start(&f, &s, r, 1);
  for (uint32_t i = 0; !joined[0] || !joined[1]; i++) {
    assert_true(i < 2000000);
    if (i == when) open_one(&f, 2);
    mlfab_error error;
    if (i >= when && !open && mlfab_is_ready(f.w.node[2], &error) == 1) {
      OK(f.w.node[2], mlfab_device_attach(f.w.node[2], &played_device, f.device[2], 0));
      sum_start(&f, &s, 2, 1);
      open = 1;
    }
    run_all(&f, 1, 20000);
    for (uint32_t r = 0; r < 2; r++) {
      if (joined[r] || !founder_looks(&f, &s, r, &joined[r])) continue;
      calls[r]++;
      if (!joined[r]) sum_start(&f, &s, r, 1);
    }
  }
  assert_int_equal(calls[0], calls[1]);
  assert_int_equal(until_done(&f, 2, s.request[2]), 0);
  const uint32_t before = reduced(&f);
  assert_int_equal(share_all(&f), 1);
  assert_int_equal(sum_all(&f, &s), 0);
  assert_int_equal(reduced(&f), before + RANKS);
  end_world(&f);
}

TEST(test_join) {
  for (uint32_t k = 0; k < (uint32_t)test_cases_from(60, 60); k++) play_join(700 + k, 1 + k);
}

/* --- a worker that finishes --- */

/* Worker 2 has no more data when the others' next call has begun, or has not: no call fails, and each is the sum of both. */
TEST(test_finish) {
  static sum_call s;
  for (int when = 0; when < 30; when++) {
    const mlfab_call finish = {.size = sizeof finish, .kind = MLFAB_CALL_FINISH};
    fixture f;
    mlfab_request request;
    begin_shared(&f, RANKS, 900 + (uint64_t)when, 0);
    assert_int_equal(sum_all(&f, &s), 0);
    const uint32_t before = reduced(&f);
    for (int call = 0; call < 3; call++) {
      sum_prepare(&f, &s);
      for (uint32_t r = 0; r < 2; r++) sum_start(&f, &s, r, 1);
      for (int i = 0; call == 0 && i < when; i++) run_all(&f, 1, 20000);
      mlfab *node = f.w.node[2];
      mlfab__context_enter(node);
      if (call == 0)
        OK(node, mlfab__node_submit(node->node, &finish, node->now_ns, &request, NULL));
      leave(node);
      for (uint32_t r = 0; r < 2; r++) {
        EXPECT(f.w.node[r], until_done(&f, r, s.request[r]), 0);
        expect_sum(&f, &s, r, 0);
      }
    }
    assert_int_equal(reduced(&f), before);
    end_world(&f);
  }
}

TESTS(NULL, NULL)
