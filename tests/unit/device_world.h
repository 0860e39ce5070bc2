/* device_world.h - nodes of the simulator, each with a device that is played. */
#ifndef DEVICE_WORLD_H
#define DEVICE_WORLD_H

#include "played.h"
#include "said.h"

typedef struct fixture {
  world w;
  played *device[WORLD_NODES];
  uint64_t random;
  int kind; /* of the collectives that a test calls */
} fixture;

static inline uint64_t below(fixture *f, uint64_t n) { return chance_below(&f->random, n); }

/* A world that is not open yet. */
static inline void prepare_world(fixture *f, uint32_t workers, uint32_t servers, uint32_t dedicated,
                                 uint64_t seed) {
  memset(f, 0, sizeof *f);
  f->random = seed;
  world_init(&f->w, workers, servers, dedicated);
  f->w.config.timeout_ns = 20ull * WORLD_S;
  f->w.config.model_max_bytes = 1 << 22;
}

static inline void open_with_devices(fixture *f, uint64_t seed, uint64_t staging_bytes) {
  world_open(&f->w, seed);
  for (uint32_t i = 0; i < f->w.workers; i++) {
    f->device[i] = played_begin(seed + i);
    OK(f->w.node[i],
       mlfab_device_attach(f->w.node[i], &played_device, f->device[i], staging_bytes));
  }
}

/* Memory of a worker's device, or of the host. */
static inline void *memory_on(fixture *f, uint32_t worker, int device, uint64_t bytes) {
  void *at = device ? played_alloc(f->device[worker], bytes) : malloc(bytes);
  assert_non_null(at);
  return at;
}

/* Writes it. On a device the stream does that sooner or later, with the content that `from` has then. */
static inline void memory_write(fixture *f, uint32_t worker, int device, void *to, const void *from,
                                uint64_t bytes) {
  if (device)
    played_produce(f->device[worker], to, from, bytes);
  else
    memcpy(to, from, bytes);
}

static inline void memory_read(fixture *f, uint32_t worker, int device, void *to, const void *from,
                               uint64_t bytes) {
  if (device)
    played_read(f->device[worker], to, from, bytes);
  else
    memcpy(to, from, bytes);
}

/* Closes a world in which a device has failed: its pinned memory may still be in use, and stays. */
static inline void end_failed(fixture *f) {
  world_close(&f->w);
  for (uint32_t i = 0; i < WORLD_NODES && f->device[i]; i++) played_end(f->device[i]);
}

static inline void end_world(fixture *f) {
  world_close(&f->w);
  for (uint32_t i = 0; i < WORLD_NODES && f->device[i]; i++) {
    assert_int_equal(f->device[i]->closed, 1);
    assert_int_equal(f->device[i]->pinned_now, 0);
    assert_int_equal(played_mapped(f->device[i]), 0);
  }
  end_failed(f);
}

/* All workers make progress, some times, with so much time between. */
static inline void run_all(fixture *f, int rounds, uint64_t ns) {
  for (int i = 0; i < rounds; i++) {
    for (uint32_t r = 0; r < f->w.workers; r++)
      if (f->w.node[r]) (void)mlfab_progress(f->w.node[r], 0);
    mlfab_sim_run(f->w.sim, ns);
  }
}

/* Drives all workers until this request has ended. Returns how. */
static inline int until_done(fixture *f, uint32_t worker, mlfab_request request) {
  for (int round = 0; round < 2000000; round++) {
    mlfab_result result;
    int done = 0;
    for (uint32_t i = 0; i < f->w.workers; i++)
      if (f->w.node[i] && i != worker) (void)mlfab_progress(f->w.node[i], 0);
    assert_int_equal(mlfab_test(f->w.node[worker], request, &done, &result), 0);
    if (done) return result.status;
    mlfab_sim_run(f->w.sim, 50000);
  }
  fail_msg("the request of worker %u does not end", worker);
  return 0;
}

/* --- collectives --- */

enum { KIND_ALLREDUCE, KIND_SCATTER, KIND_GATHER, KIND_BROADCAST, KINDS, LENGTH = 1000 };

/* A collective of every worker's array, on devices or on memory of the host. */
typedef struct sum_call {
  mlfab_request request[WORLD_NODES];
  int64_t *at[WORLD_NODES], *host[WORLD_NODES];
  int64_t was[WORLD_NODES][LENGTH];
} sum_call;

static inline void sum_prepare(fixture *f, sum_call *s) {
  memset(s, 0, sizeof *s);
  for (uint32_t r = 0; r < f->w.workers; r++) {
    s->at[r] = played_alloc(f->device[r], sizeof s->was[r]);
    for (uint32_t i = 0; i < LENGTH; i++) s->was[r][i] = 1 + (int64_t)below(f, 1000000);
  }
}

/* The block of a rank. */
static inline uint64_t block(const fixture *f, uint32_t r, uint64_t *n_p) {
  const uint64_t even = LENGTH / f->w.workers;
  *n_p = r + 1 == f->w.workers ? LENGTH - r * even : even;
  return r * even;
}

static inline int sum_call_on(fixture *f, sum_call *s, uint32_t r, int64_t *data) {
  mlfab *node = f->w.node[r];
  const mlfab_vec vec = {data, LENGTH};
  uint64_t counts[WORLD_NODES];
  for (uint32_t i = 0; i < f->w.workers; i++) (void)block(f, i, &counts[i]);
  switch (f->kind) {
    case KIND_ALLREDUCE:
      return mlfab_allreduce_start(node, &vec, 1, MLFAB_I64, NULL, &s->request[r]);
    case KIND_SCATTER:
      return mlfab_reduce_scatter_start(node, data, counts, MLFAB_I64, NULL, &s->request[r]);
    case KIND_GATHER:
      return mlfab_allgather_start(node, data, counts, MLFAB_I64, NULL, &s->request[r]);
    default:
      return mlfab_broadcast_start(node, 0, data, sizeof s->was[r], NULL, &s->request[r]);
  }
}

/* If the device refuses the call at once, the call uses memory of the host. */
static inline void sum_start(fixture *f, sum_call *s, uint32_t r, int on) {
  if (on) {
    played_produce(f->device[r], s->at[r], s->was[r], sizeof s->was[r]);
    int code = sum_call_on(f, s, r, s->at[r]);
    if (code == 0) return;
    said(f->w.node[r], code, "played");
    assert_true(code == MLFAB_ERR_DEVICE || code == MLFAB_ERR_ARGUMENT);
  }
  s->host[r] = malloc(sizeof s->was[r]);
  memcpy(s->host[r], s->was[r], sizeof s->was[r]);
  OK(f->w.node[r], sum_call_on(f, s, r, s->host[r]));
}

/* The value of place i at worker r after a call that succeeds, of the living workers. *given_p: 0: it is unspecified. */
static inline int64_t sum_wanted(const fixture *f, const sum_call *s, uint32_t r, uint64_t i,
                                 int *given_p) {
  int64_t sum = 0;
  uint32_t owner = 0;
  for (uint32_t from = 0; from < f->w.workers; from++) {
    uint64_t n, at = block(f, from, &n);
    if (f->w.node[from]) sum += s->was[from][i];
    if (i >= at && i < at + n) owner = from;
  }
  *given_p = f->kind != KIND_SCATTER || owner == r;
  return f->kind <= KIND_SCATTER ? sum : s->was[f->kind == KIND_GATHER ? owner : 0][i];
}

/* How the call ended at a worker; a success must be the sum of those who live. */
static inline int sum_end(fixture *f, sum_call *s, uint32_t r) {
  int code = until_done(f, r, s->request[r]);
  int64_t got[LENGTH];
  memory_read(f, r, !s->host[r], got, s->host[r] ? s->host[r] : s->at[r], sizeof got);
  free(s->host[r]);
  s->host[r] = NULL;
  if (code) said(f->w.node[r], code, "");
  for (uint32_t i = 0; code == 0 && i < LENGTH; i++) {
    int given = 0;
    const int64_t want = sum_wanted(f, s, r, i, &given);
    if (given && got[i] != want)
      fail_msg("kind %d, worker %u, element %u: %lld, not %lld", f->kind, r, i, (long long)got[i],
               (long long)want);
  }
  return code;
}

/* A worker whose call fails calls again, as a program does: at some call all meet. */
static inline void sums_meet(fixture *f, int on) {
  static sum_call s;
  uint32_t left = 0, tries = 0;
  sum_prepare(f, &s);
  for (uint32_t r = 0; r < f->w.workers; r++) {
    if (f->w.node[r]) sum_start(f, &s, r, on);
    left |= (uint32_t)(f->w.node[r] != NULL) << r;
  }
  while (left) {
    run_all(f, 1, 50000);
    for (uint32_t r = 0; r < f->w.workers; r++) {
      mlfab_result result;
      int done = 0;
      if (!(left >> r & 1)) continue;
      assert_int_equal(mlfab_test(f->w.node[r], s.request[r], &done, &result), 0);
      if (!done) continue;
      if (result.status == 0) left &= ~(1u << r);
      if (result.status == 0) continue;
      assert_true(++tries < 4 * f->w.workers);
      free(s.host[r]);
      s.host[r] = NULL;
      sum_start(f, &s, r, on);
    }
  }
  for (uint32_t r = 0; r < f->w.workers; r++) free(s.host[r]);
}

#endif
