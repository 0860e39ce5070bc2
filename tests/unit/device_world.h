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

/* Writes it. On a device the stream does that, sooner or later, with what `from` has then. */
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

#endif
