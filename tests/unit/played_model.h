/* played_model.h - a device that is played and holds the model of a server: memory that is taken and given, and arithmetic in the
 * order of copies from the host. The arithmetic is that of the CUDA kernels, played (play.h), when the device gets to it. */
#ifndef PLAYED_MODEL_H
#define PLAYED_MODEL_H

#include "played.h"

#include "play.h"

enum { PLAYED_TAKEN = 65536, PLAYED_STAGES = 3, PLAYED_STUCK = 777 };

typedef struct played_model {
  struct {
    uint8_t *at;
    uint64_t bytes;
    int used;
  } taken[PLAYED_TAKEN];
  uint32_t ntaken, used;
  uint64_t bytes, most; /* that are taken now, and were at a time */
  uint64_t limit;       /* `take` fails beyond; 0: none */
  uint8_t *stages[PLAYED_STAGES];
  uint32_t stage;
} played_model;

typedef struct played_work {
  int dtype;
  void *dst;
  const void *w, *u;
  void *s0, *s1;
  uint64_t n;
  double scale;
  mlfab_device_rule rule;
} played_work;

static inline int played_take(void *self, uint64_t bytes, void **memory_p) {
  played *p = self;
  played_model *m = p->model;
  int number = played_called(p, PLAYED_TAKE);
  if (number) return number;
  if (m->limit && m->bytes + bytes > m->limit) return 2; /* as cudaErrorMemoryAllocation */
  uint32_t i = m->used < m->ntaken ? 0 : m->ntaken;
  while (i < m->ntaken && (m->taken[i].used || m->taken[i].bytes != bytes)) i++;
  if (i == m->ntaken) {
    assert_true(i < PLAYED_TAKEN);
    p->used = (p->used + 255) / 256 * 256;
    m->taken[i].at = played_alloc(p, bytes);
    m->taken[i].bytes = bytes;
    m->ntaken++;
  }
  m->taken[i].used = 1;
  m->bytes += bytes;
  m->used++;
  if (m->bytes > m->most) m->most = m->bytes;
  memset(played_own(p, m->taken[i].at), 0x77, bytes); /* it holds anything */
  *memory_p = m->taken[i].at;
  return 0;
}

static inline void played_give(void *self, void *memory) {
  played *p = self;
  played_model *m = p->model;
  uint32_t i = 0, end = m->ntaken; /* in ascending order of addresses */
  while (i + 1 < end) {
    uint32_t middle = i + (end - i) / 2;
    if (m->taken[middle].at <= (uint8_t *)memory)
      i = middle;
    else
      end = middle;
  }
  assert_true(i < m->ntaken && m->taken[i].at == memory && m->taken[i].used);
  played_finish(p); /* what was given before is carried out before */
  m->taken[i].used = 0;
  m->bytes -= m->taken[i].bytes;
  m->used--;
}

/* Carries out operations until the queue from the host has come to `upto`: 0, or it cannot. */
static inline int played_until(played *p, uint32_t upto) {
  int number = 0;
  pthread_mutex_lock(&p->lock);
  while (!number && (int32_t)(upto - p->head[MLFAB_DEVICE_FROM_HOST]) > 0) {
    if (!played_step(p, MLFAB_DEVICE_FROM_HOST) && !played_step(p, MLFAB_DEVICE_TO_HOST))
      number = PLAYED_STUCK;
  }
  pthread_mutex_unlock(&p->lock);
  return number;
}

static inline int played_stage(void *self, void **pinned_p) {
  played *p = self;
  played_model *m = p->model;
  int number = played_called(p, PLAYED_STAGE);
  if (number) return number;
  uint8_t **at = &m->stages[m->stage++ % PLAYED_STAGES];
  if (!*at) *at = aligned_alloc(64, MLFAB_DEVICE_STAGE);
  assert_non_null(*at);
  while (played_copies(p, *at, MLFAB_DEVICE_STAGE) && !number)
    number = played_until(p, p->head[MLFAB_DEVICE_FROM_HOST] + 1);
  if (!number) memset(*at, 0x5a, 4096);
  *pinned_p = *at;
  return number;
}

static inline int played_fetch(void *self, void *to, const void *from, uint64_t bytes) {
  played *p = self;
  int number = played_called(p, PLAYED_FETCH);
  const played_op op = {.kind = PLAYED_COPIES, .to = to, .from = from, .bytes = bytes};
  assert_true(played_is_here(p, from) && !played_is_here(p, to));
  if (number) return number;
  played_add(p, MLFAB_DEVICE_FROM_HOST, op);
  return played_until(p, p->tail[MLFAB_DEVICE_FROM_HOST]);
}

static inline int played_work_on(played *p, int function, const played_work *work,
                                 void (*run)(played *, void *)) {
  int number = played_called(p, function);
  if (number) return number;
  played_work *copy = malloc(sizeof *copy);
  assert_non_null(copy);
  *copy = *work;
  const played_op op = {.kind = PLAYED_RUNS, .to = copy, .run = run};
  played_add(p, MLFAB_DEVICE_FROM_HOST, op);
  return 0;
}

static inline void *played_at(const played *p, const void *at) {
  assert_true(!at || played_is_here(p, at));
  return at ? played_own(p, at) : NULL;
}

static inline void played_run_zero(played *p, void *args) {
  const played_work *work = args;
  memset(played_at(p, work->dst), 0, work->n);
}

static inline void played_run_add(played *p, void *args) {
  const played_work *work = args;
  assert_int_equal(play_add(work->dtype, played_at(p, work->dst), played_at(p, work->w),
                            played_at(p, work->u), work->scale, work->n, NULL),
                   0);
}

static inline void played_run_step(played *p, void *args) {
  const played_work *work = args;
  if (work->dtype == MLFAB_I64) { /* as mlfab_gpu_apply */
    played_work sum = *work;
    assert_true(work->rule.kind == MLFAB_OPTIMIZER_SGD && !(work->rule.weight_decay > 0.0));
    sum.scale = work->rule.scale;
    played_run_add(p, &sum);
    return;
  }
  assert_int_equal(
      play_apply(&work->rule, work->dtype, played_at(p, work->dst), played_at(p, work->w),
                 played_at(p, work->u), played_at(p, work->s0), played_at(p, work->s1), work->n),
      0);
}

static inline int played_zero(void *self, void *to, uint64_t bytes) {
  const played_work work = {.dst = to, .n = bytes};
  return played_work_on(self, PLAYED_ZERO, &work, played_run_zero);
}

static inline int played_sum(void *self, int dtype, void *dst, const void *w, const void *u,
                             double scale, uint64_t n) {
  const played_work work = {.dtype = dtype, .dst = dst, .w = w, .u = u, .n = n, .scale = scale};
  return played_work_on(self, PLAYED_ADD, &work, played_run_add);
}

static inline int played_rule(void *self, const mlfab_device_rule *rule, int dtype, void *dst,
                              const void *w, const void *u, void *s0, void *s1, uint64_t n) {
  const played_work work = {
      .dtype = dtype, .dst = dst, .w = w, .u = u, .s0 = s0, .s1 = s1, .n = n, .rule = *rule};
  return played_work_on(self, PLAYED_STEP, &work, played_run_step);
}

static const mlfab_device played_model_device = {
    .size = sizeof played_model_device,
    .name = "a played device with a model",
    .pin = played_pin,
    .unpin = played_unpin,
    .after = played_after,
    .copy = played_copy,
    .mark = played_mark,
    .poll = played_poll,
    .drop = played_drop,
    .text = played_text,
    .take = played_take,
    .give = played_give,
    .stage = played_stage,
    .fetch = played_fetch,
    .zero = played_zero,
    .add = played_sum,
    .step = played_rule,
};

static inline played *played_model_begin(uint64_t seed) {
  played *p = played_begin(seed);
  p->model = calloc(1, sizeof *p->model);
  assert_non_null(p->model);
  return p;
}

/* All of its memory was given back, unless it was lost. */
static inline void played_model_end(played *p) {
  if (!p->lost) {
    assert_int_equal(p->model->used, 0);
    assert_int_equal(p->pinned_now, 0);
  }
  for (uint32_t i = 0; i < PLAYED_STAGES; i++) free(p->model->stages[i]);
  free(p->model);
  played_lose(p);
  played_end(p);
}

#endif
