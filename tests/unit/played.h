/* played.h - a device that is played: its memory, a stream, copies and their order, without a GPU and without threads.
 *
 * Device memory is mapped twice: at the addresses that a program has it can be neither read nor written, so whoever touches
 * it without a copy of the device faults; the device itself uses the other mapping. The stream and the two directions of copies
 * are queues of operations, of which each look carries out a few, by chance, in an order that CUDA allows. The stream may hang
 * at a gate, and a direction of copies after so many of them; the k-th call of a function may fail, and so may the k-th copy
 * under way.
 *
 * Devices of one program can read each other's memory where it was mapped: at the addresses that its own program has. Reading what
 * is not mapped any more ends the test. */
#ifndef PLAYED_H
#define PLAYED_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* memfd_create */
#endif
#include "../../mlfab_device.h"
#include "chance.h"

#include <setjmp.h>
#include <stdarg.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

enum { PLAYED_BYTES = 1 << 26, PLAYED_OPS = 4096, PLAYED_EVENTS = 4096, PLAYED_PINS = 16384 };
enum { PLAYED_INPUTS = 16, PLAYED_MAPS = 65, PLAYED_ALLOCATION = 1 << 16 };
enum { PLAYED_STREAM = 2, PLAYED_QUEUES = 3 };
enum played_call {
  PLAYED_WHERE,
  PLAYED_PIN,
  PLAYED_FENCE,
  PLAYED_AFTER,
  PLAYED_COPY,
  PLAYED_MARK,
  PLAYED_ORDER,
  PLAYED_CALLS,
  PLAYED_IDENTIFY = PLAYED_CALLS,
  PLAYED_REACHES,
  PLAYED_SHARE,
  PLAYED_MAP,
  PLAYED_REDUCE,
  PLAYED_ALL,
  PLAYED_TAKE = PLAYED_ALL, /* from here on: played_model.h */
  PLAYED_STAGE,
  PLAYED_FETCH,
  PLAYED_ZERO,
  PLAYED_ADD,
  PLAYED_STEP,
  PLAYED_LAST
};

typedef struct played_event {
  int used, reached, failed, dropped;
  uint32_t serial; /* an event whose memory is used again is another one */
} played_event;

struct played;

typedef struct played_op {
  enum {
    PLAYED_WAITS,
    PLAYED_RECORDS,
    PLAYED_COPIES,
    PLAYED_KERNEL,
    PLAYED_GATE,
    PLAYED_REDUCES,
    PLAYED_RUNS
  } kind;
  uint32_t event, serial;
  void *to;
  const void *from;
  uint64_t bytes;
  int value; /* of a kernel: every byte */
  /* Of a reduction of `bytes` elements. */
  int op, dtype;
  uint32_t k;
  const void *in[PLAYED_INPUTS];
  void (*run)(struct played *p, void *to); /* PLAYED_RUNS: with `to`, which is freed then */
} played_op;

/* Adds memory of the host: to = in[0] op in[1] ... */
typedef void played_combine(int op, int dtype, void *to, const void *const *in, uint32_t k,
                            uint64_t n);

typedef struct played {
  pthread_mutex_t lock; /* threads of a program use a device at the same time as the library does */
  uint8_t *at, *own;    /* as the program sees it; as the device does */
  uint64_t used;
  played_op ops[PLAYED_QUEUES][PLAYED_OPS];
  uint32_t head[PLAYED_QUEUES], tail[PLAYED_QUEUES];
  played_event events[PLAYED_EVENTS];
  uint32_t pins; /* places of `pinned` that were ever used */
  void *pinned[PLAYED_PINS];
  uint64_t pinned_bytes[PLAYED_PINS], pinned_now, pinned_most;
  uint64_t random;
  int gate;                        /* 1: the stream does not get past a gate */
  int eager;                       /* 1: each look carries out all that can be */
  int hung;                        /* 1: nor do copies and reductions that end in the device */
  uint32_t calls[PLAYED_LAST + 1]; /* so far */
  int fails;                       /* this function ... */
  uint32_t fails_at, fails_for;    /* ... from this call on, so many times */
  uint32_t copies, copy_fails_at;  /* the n-th copy fails when it is carried out; 0: none */
  uint32_t copied[2];
  uint32_t copies_most[2]; /* by direction: copies carried out, and no more than so many are */
  int lost;                /* every call fails, and every event */
  int closed;
  uint32_t host; /* others of the same host can read this device's memory */
  int unshared;  /* 1: memory from `unshared_from` on cannot be shared */
  uint64_t unshared_from;
  played_combine *combine;
  struct played *maps[PLAYED_MAPS]; /* of which memory is mapped here, once for each time */
  uint32_t reduced, mapped_most;    /* reductions carried out */
  struct played_model *model;       /* played_model.h */
} played;

static inline uint8_t *played_own(const played *p, const void *at) {
  return p->own + ((const uint8_t *)at - p->at);
}

static inline int played_is_here(const played *p, const void *at) {
  return (const uint8_t *)at >= p->at && (const uint8_t *)at < p->at + PLAYED_BYTES;
}

/* Where the device finds memory: its own, that of another device which is mapped, or the host's. */
static inline void *played_find(const played *p, const void *at) {
  if (played_is_here(p, at)) return played_own(p, at);
  for (uint32_t i = 0; i < PLAYED_MAPS; i++)
    if (p->maps[i] && played_is_here(p->maps[i], at)) return played_own(p->maps[i], at);
  return (void *)(uintptr_t)at;
}

/* Held where a device reads another's memory, which has a lock of its own. */
static pthread_mutex_t played_among = PTHREAD_MUTEX_INITIALIZER;

/* Device memory. Never freed before the device. */
static inline void *played_alloc(played *p, uint64_t bytes) {
  uint8_t *at = p->at + p->used;
  p->used += (bytes + 63) / 64 * 64;
  assert_true(p->used <= PLAYED_BYTES);
  return at;
}

/* What a program would do with a synchronous copy. */
static inline void played_write(played *p, void *to, const void *from, uint64_t bytes) {
  memcpy(played_own(p, to), from, bytes);
}
static inline void played_read(const played *p, void *to, const void *from, uint64_t bytes) {
  memcpy(to, played_own(p, from), bytes);
}

static inline void played_combine_plain(int op, int dtype, void *to, const void *const *in,
                                        uint32_t k, uint64_t n) {
#define PLAYED_COMBINE(type, divided)                                      \
  for (uint64_t i = 0; i < n; i++) {                                       \
    type sum = ((const type *)in[0])[i];                                   \
    for (uint32_t j = 1; j < k; j++) {                                     \
      const type x = ((const type *)in[j])[i];                             \
      sum = op == MLFAB_OP_MIN       ? x < sum ? x : sum                   \
            : op == MLFAB_OP_MAX     ? x > sum ? x : sum                   \
            : op == MLFAB_OP_PRODUCT ? (type)(sum * x)                     \
                                     : (type)(sum + x);                    \
    }                                                                      \
    ((type *)to)[i] = op == MLFAB_OP_MEAN ? (type)(sum / (divided)) : sum; \
  }
  assert_true(dtype == MLFAB_F32 || dtype == MLFAB_F64 || dtype == MLFAB_I64);
  if (dtype == MLFAB_F32) PLAYED_COMBINE(float, (float)k)
  if (dtype == MLFAB_F64) PLAYED_COMBINE(double, (double)k)
  if (dtype == MLFAB_I64) PLAYED_COMBINE(int64_t, (int64_t)k)
}

static inline void played_carry_out_reduction(played *p, const played_op *op) {
  const void *in[PLAYED_INPUTS];
  pthread_mutex_lock(&played_among);
  for (uint32_t j = 0; j < op->k; j++) in[j] = played_find(p, op->in[j]);
  p->combine(op->op, op->dtype, played_own(p, op->to), in, op->k, op->bytes);
  p->reduced++;
  pthread_mutex_unlock(&played_among);
}

static inline void played_carry_out_copy(played *p, const played_op *op) {
  pthread_mutex_lock(&played_among);
  memcpy(played_find(p, op->to), played_find(p, op->from), op->bytes);
  pthread_mutex_unlock(&played_among);
}

/* 1: the first operation of the queue was carried out. */
static inline int played_step(played *p, uint32_t queue) {
  if (p->head[queue] == p->tail[queue]) return 0;
  const played_op op = p->ops[queue][p->head[queue] % PLAYED_OPS];
  played_event *event = &p->events[op.event];
  uint8_t *to = op.to;
  if (op.kind == PLAYED_GATE && p->gate) return 0;
  if (p->hung && queue == MLFAB_DEVICE_FROM_HOST) return 0;
  if (op.kind == PLAYED_WAITS && event->serial == op.serial && event->used && !event->reached)
    return 0;
  if (op.kind == PLAYED_COPIES && p->copied[queue] == p->copies_most[queue]) return 0;
  p->head[queue]++;
  if (op.kind == PLAYED_COPIES) p->copied[queue]++;
  if (op.kind == PLAYED_RECORDS) {
    event->reached = 1;
    event->used = !event->dropped;
  }
  if (op.kind == PLAYED_KERNEL) {
    pthread_mutex_lock(&played_among);
    if (op.from)
      memcpy(played_find(p, to), op.from, op.bytes);
    else
      memset(played_find(p, to), op.value, op.bytes);
    pthread_mutex_unlock(&played_among);
  }
  if (op.kind == PLAYED_RUNS) {
    op.run(p, to);
    free(to);
  }
  if (op.kind != PLAYED_COPIES && op.kind != PLAYED_REDUCES) return 1;
  if (++p->copies == p->copy_fails_at) {
    p->lost |= p->model != NULL; /* as in CUDA, where errors of what is under way stay */
    for (uint32_t i = p->head[queue]; i != p->tail[queue]; i++) {
      const played_op *next = &p->ops[queue][i % PLAYED_OPS];
      if (next->kind == PLAYED_RECORDS) {
        p->events[next->event].failed = 1;
        break;
      }
    }
    return 1;
  }
  if (op.kind == PLAYED_REDUCES)
    played_carry_out_reduction(p, &op);
  else
    played_carry_out_copy(p, &op);
  return 1;
}

/* A queue that is full takes one more when it has carried out its first, as in CUDA. */
static inline void played_add_locked(played *p, uint32_t queue, played_op op) {
  for (uint32_t tries = 0; p->tail[queue] - p->head[queue] == PLAYED_OPS; tries++) {
    assert_true(tries < PLAYED_QUEUES * PLAYED_OPS);
    if (!played_step(p, queue))
      for (uint32_t other = 0; other < PLAYED_QUEUES; other++) (void)played_step(p, other);
  }
  p->ops[queue][p->tail[queue]++ % PLAYED_OPS] = op;
}

static inline void played_add(played *p, uint32_t queue, played_op op) {
  pthread_mutex_lock(&p->lock);
  played_add_locked(p, queue, op);
  pthread_mutex_unlock(&p->lock);
}

/* A kernel on the stream: sets bytes of device memory, or of pinned memory. */
static inline void played_kernel(played *p, void *at, int value, uint64_t bytes) {
  const played_op op = {.kind = PLAYED_KERNEL, .to = at, .bytes = bytes, .value = value};
  played_add(p, PLAYED_STREAM, op);
}
/* The same: writes what `from`, memory of the host that stays, has. */
static inline void played_produce(played *p, void *at, const void *from, uint64_t bytes) {
  const played_op op = {.kind = PLAYED_KERNEL, .to = at, .from = from, .bytes = bytes};
  played_add(p, PLAYED_STREAM, op);
}
/* What follows on the stream waits until the gate is opened. */
static inline void played_stop(played *p) {
  const played_op op = {.kind = PLAYED_GATE};
  p->gate = 1;
  played_add(p, PLAYED_STREAM, op);
}

static inline void played_look(played *p) {
  uint32_t steps = p->eager ? UINT32_MAX : (uint32_t)chance_below(&p->random, 4);
  for (uint32_t idle = 0; idle < PLAYED_QUEUES && steps > 0; steps--) {
    uint32_t first = (uint32_t)chance_below(&p->random, PLAYED_QUEUES);
    idle = 0;
    while (idle < PLAYED_QUEUES && !played_step(p, (first + idle) % PLAYED_QUEUES)) idle++;
  }
}

/* Everything that can be carried out is. */
static inline void played_finish(played *p) {
  pthread_mutex_lock(&p->lock);
  const int eager = p->eager;
  p->eager = 1;
  played_look(p);
  p->eager = eager;
  pthread_mutex_unlock(&p->lock);
}

/* From now on every call fails; what was under way never happens. */
static inline void played_lose(played *p) {
  p->lost = 1;
  for (uint32_t queue = 0; queue < PLAYED_QUEUES; queue++) {
    for (; p->head[queue] != p->tail[queue]; p->head[queue]++) {
      const played_op *op = &p->ops[queue][p->head[queue] % PLAYED_OPS];
      if (op->kind == PLAYED_RUNS) free(op->to);
    }
  }
}

/* The error number of this call of a function, or 0. */
static inline int played_called(played *p, int function) {
  uint32_t n = ++p->calls[function];
  if (p->lost) return 999;
  return p->fails == function && n >= p->fails_at && n < p->fails_at + p->fails_for ? 700 + function
                                                                                    : 0;
}

static inline int played_where(void *self, const void *memory, uint64_t bytes, char *text,
                               size_t room) {
  played *p = self;
  const uint8_t *at = memory;
  if (played_called(p, PLAYED_WHERE)) {
    snprintf(text, room, "played 700: nobody knows what it is");
    return MLFAB_ERR_DEVICE;
  }
  if (played_is_here(p, at)) {
    if (at + bytes <= p->at + PLAYED_BYTES) return MLFAB_MEMORY_DEVICE;
    snprintf(text, room, "it ends behind the device's memory");
    return MLFAB_ERR_ARGUMENT;
  }
  for (uint32_t i = 0; i < p->pins; i++) {
    const uint8_t *from = p->pinned[i];
    if (from && at >= from && at < from + p->pinned_bytes[i]) return MLFAB_MEMORY_PINNED;
  }
  return MLFAB_MEMORY_HOST;
}

static inline int played_pin(void *self, uint64_t bytes, void **memory_p) {
  played *p = self;
  uint32_t i = 0;
  int number = played_called(p, PLAYED_PIN);
  if (number) return number;
  while (i < p->pins && p->pinned[i]) i++;
  assert_true(i < PLAYED_PINS);
  if (i == p->pins) p->pins++;
  assert_int_equal(posix_memalign(&p->pinned[i], 4096, bytes), 0);
  memset(p->pinned[i], 0x5a, bytes); /* whoever uses what was not copied will see it */
  p->pinned_bytes[i] = bytes;
  p->pinned_now += bytes;
  if (p->pinned_now > p->pinned_most) p->pinned_most = p->pinned_now;
  *memory_p = p->pinned[i];
  return 0;
}

/* Does a copy that is under way use this memory? */
static inline int played_copies(const played *p, const uint8_t *at, uint64_t bytes) {
  for (uint32_t queue = 0; queue < 2; queue++) {
    for (uint32_t i = p->head[queue]; i != p->tail[queue]; i++) {
      const played_op *op = &p->ops[queue][i % PLAYED_OPS];
      const uint8_t *to = op->to, *from = op->from;
      if (op->kind != PLAYED_COPIES) continue;
      if ((to >= at && to < at + bytes) || (from >= at && from < at + bytes)) return 1;
    }
  }
  return 0;
}

static inline void played_unpin(void *self, void *memory) {
  played *p = self;
  for (uint32_t i = 0; i < p->pins; i++) {
    if (p->pinned[i] != memory) continue;
    assert_false(played_copies(p, memory, p->pinned_bytes[i]));
    p->pinned_now -= p->pinned_bytes[i];
    p->pinned[i] = NULL;
    free(memory);
    return;
  }
  fail_msg("unpinned memory that was not pinned");
}

static inline int played_record(played *p, uint32_t queue, void **mark_p) {
  uint32_t i = 1;
  pthread_mutex_lock(&p->lock);
  while (i < PLAYED_EVENTS && p->events[i].used) i++;
  assert_true(i < PLAYED_EVENTS);
  const played_event fresh = {1, 0, 0, 0, p->events[i].serial + 1};
  const played_op op = {.kind = PLAYED_RECORDS, .event = i, .serial = fresh.serial};
  p->events[i] = fresh;
  played_add_locked(p, queue, op);
  *mark_p = &p->events[i];
  pthread_mutex_unlock(&p->lock);
  return 0;
}

static inline void played_waits(played *p, uint32_t queue, void *mark) {
  const played_event *event = mark;
  const played_op op = {
      .kind = PLAYED_WAITS, .event = (uint32_t)(event - p->events), .serial = event->serial};
  played_add(p, queue, op);
}

static inline int played_fence(void *self, void **fence_p) {
  int number = played_called(self, PLAYED_FENCE);
  return number ? number : played_record(self, PLAYED_STREAM, fence_p);
}

static inline int played_after(void *self, int way, void *fence) {
  int number = played_called(self, PLAYED_AFTER);
  if (!number) played_waits(self, (uint32_t)way, fence);
  return number;
}

static inline int played_copy(void *self, int way, void *to, const void *from, uint64_t bytes) {
  played *p = self;
  const played_op op = {.kind = PLAYED_COPIES, .to = to, .from = from, .bytes = bytes};
  int number = played_called(p, PLAYED_COPY);
  assert_true(way == MLFAB_DEVICE_TO_HOST ? !played_is_here(p, to) : played_is_here(p, to));
  if (!number) played_add(p, (uint32_t)way, op);
  return number;
}

static inline int played_mark(void *self, int way, void **mark_p) {
  int number = played_called(self, PLAYED_MARK);
  return number ? number : played_record(self, (uint32_t)way, mark_p);
}

static inline int played_order(void *self, void *mark) {
  int number = played_called(self, PLAYED_ORDER);
  if (!number) played_waits(self, PLAYED_STREAM, mark);
  return number;
}

static inline int played_poll(void *self, void *mark) {
  played *p = self;
  const played_event *event = mark;
  if (p->lost) return -999;
  pthread_mutex_lock(&p->lock);
  played_look(p);
  int reached = event->failed && event->reached ? -800 : event->reached;
  pthread_mutex_unlock(&p->lock);
  return reached;
}

/* An event that somebody waits for stays until it is reached, as in CUDA. */
static inline void played_drop(void *self, void *mark) {
  played *p = self;
  played_event *event = mark;
  pthread_mutex_lock(&p->lock);
  assert_true(event->used);
  event->dropped = 1;
  if (event->reached) event->used = 0;
  pthread_mutex_unlock(&p->lock);
}

static inline const char *played_text(void *self, int number) {
  static char text[64];
  (void)self;
  snprintf(text, sizeof text, "played %d: it was told to fail", number);
  return text;
}

static inline void played_close(void *self) { ((played *)self)->closed++; }

/* --- sharing --- */

static inline int played_identify(void *self, void *id) {
  played *p = self;
  memset(id, 0, MLFAB_DEVICE_ID);
  memcpy(id, &p->host, sizeof p->host);
  return played_called(p, PLAYED_IDENTIFY);
}

static inline int played_reaches(void *self, const void *id) {
  played *p = self;
  return !played_called(p, PLAYED_REACHES) && memcmp(id, &p->host, sizeof p->host) == 0;
}

static inline int played_share(void *self, const void *memory, uint64_t bytes, void *handle,
                               uint64_t *offset_p) {
  played *p = self;
  const uint64_t at = (uint64_t)((const uint8_t *)memory - p->at);
  const int number = played_called(p, PLAYED_SHARE);
  assert_true(played_is_here(p, memory) && at + bytes <= PLAYED_BYTES);
  const uint64_t base = at / PLAYED_ALLOCATION * PLAYED_ALLOCATION;
  memset(handle, 0, MLFAB_DEVICE_HANDLE);
  memcpy(handle, &p, sizeof p);
  memcpy((uint8_t *)handle + sizeof p, &base, sizeof base);
  *offset_p = at - base;
  return number ? number : p->unshared && at >= p->unshared_from ? 801 : 0;
}

static inline int played_map(void *self, const void *handle, void **memory_p, uint64_t *bytes_p) {
  played *p = self, *other;
  uint32_t i = 0, mapped = 1;
  const int number = played_called(p, PLAYED_MAP);
  if (number) return number;
  uint64_t base;
  memcpy(&other, handle, sizeof other);
  memcpy(&base, (const uint8_t *)handle + sizeof other, sizeof base);
  pthread_mutex_lock(&p->lock);
  for (uint32_t j = 0; j < PLAYED_MAPS; j++) mapped += p->maps[j] != NULL;
  while (i < PLAYED_MAPS && p->maps[i]) i++;
  assert_true(i < PLAYED_MAPS && other != p);
  p->maps[i] = other;
  if (mapped > p->mapped_most) p->mapped_most = mapped;
  pthread_mutex_unlock(&p->lock);
  *memory_p = other->at + base;
  *bytes_p = PLAYED_BYTES - base;
  return 0;
}

static inline void played_unmap(void *self, void *memory) {
  played *p = self;
  uint32_t i = 0;
  pthread_mutex_lock(&p->lock);
  while (i < PLAYED_MAPS && !(p->maps[i] && played_is_here(p->maps[i], memory))) i++;
  assert_true(i < PLAYED_MAPS);
  p->maps[i] = NULL;
  for (uint32_t n = p->head[MLFAB_DEVICE_FROM_HOST]; n != p->tail[MLFAB_DEVICE_FROM_HOST]; n++)
    assert_int_not_equal(p->ops[MLFAB_DEVICE_FROM_HOST][n % PLAYED_OPS].kind, PLAYED_REDUCES);
  pthread_mutex_unlock(&p->lock);
}

static inline int played_reduce(void *self, int op, int dtype, void *to, const void *const *from,
                                uint32_t k, uint64_t n) {
  played *p = self;
  played_op todo = {.kind = PLAYED_REDUCES, .to = to, .bytes = n, .op = op, .dtype = dtype, .k = k};
  const int number = played_called(p, PLAYED_REDUCE);
  int own = 0;
  assert_true(k >= 1 && k <= PLAYED_INPUTS && n > 0 && played_is_here(p, to));
  for (uint32_t j = 0; j < k; j++) {
    todo.in[j] = from[j];
    own |= from[j] == to;
    assert_true(played_find(p, from[j]) != from[j]); /* mapped */
  }
  assert_true(own);
  if (!number) played_add(p, MLFAB_DEVICE_FROM_HOST, todo);
  return number;
}

static inline uint32_t played_mapped(const played *p) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < PLAYED_MAPS; i++) n += p->maps[i] != NULL;
  return n;
}

static const mlfab_device played_device = {
    .size = sizeof played_device,
    .name = "a played device",
    .where = played_where,
    .pin = played_pin,
    .unpin = played_unpin,
    .fence = played_fence,
    .after = played_after,
    .copy = played_copy,
    .mark = played_mark,
    .order = played_order,
    .poll = played_poll,
    .drop = played_drop,
    .text = played_text,
    .close = played_close,
    .identify = played_identify,
    .reaches = played_reaches,
    .share = played_share,
    .map = played_map,
    .unmap = played_unmap,
    .reduce = played_reduce,
};

static inline played *played_begin(uint64_t seed) {
  /* Pages that are not used cost nothing. */
  played *p = mmap(NULL, sizeof *p, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(p != MAP_FAILED);
  int fd = memfd_create("played", MFD_CLOEXEC);
  assert_true(fd >= 0 && ftruncate(fd, PLAYED_BYTES) == 0);
  p->own = mmap(NULL, PLAYED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  p->at = mmap(NULL, PLAYED_BYTES, PROT_NONE, MAP_SHARED, fd, 0);
  assert_true(p->own != MAP_FAILED && p->at != MAP_FAILED);
  close(fd);
  p->random = seed;
  p->fails = -1;
  p->copies_most[0] = p->copies_most[1] = UINT32_MAX;
  p->combine = played_combine_plain;
  pthread_mutex_init(&p->lock, NULL);
  return p;
}

static inline void played_end(played *p) {
  for (uint32_t i = 0; i < p->pins; i++) free(p->pinned[i]); /* what a test lost on purpose */
  pthread_mutex_destroy(&p->lock);
  munmap(p->own, PLAYED_BYTES);
  munmap(p->at, PLAYED_BYTES);
  munmap(p, sizeof *p);
}

#endif
