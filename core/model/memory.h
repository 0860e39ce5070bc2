/* memory.h - access to the bytes of a shard, in memory of the host or of a device.
 *
 * All code that touches bytes of blocks, sums or optimizer state uses these functions. A memory that is NULL is the
 * host's: the functions are plain loops and copies then. With a device (core/device/resident.c) they queue the work in
 * one order, and return before it is carried out; only mlfab__memory_see waits for it. So a commit counts when its work
 * is queued: later reads queue behind it.
 *
 * Only `take` and `lend` can fail, for lack of memory. A device that fails takes the server down (mlfab__node_crash),
 * since it has the model. These functions then do nothing, and give unspecified results, which are safe to use. */
#ifndef MLFAB__MEMORY_H
#define MLFAB__MEMORY_H

#include "../base/env.h"
#include "../kernels/kernels.h"
#include "optimizer.h"

typedef struct mlfab__memory mlfab__memory;
typedef struct mlfab__block mlfab__block;

/* The functions of a device's memory; see the wrappers below. */
typedef struct mlfab__memory_table {
  uint8_t *(*take)(mlfab__memory *memory, uint64_t bytes);
  void (*give)(mlfab__memory *memory, uint8_t *at, uint64_t bytes);
  void (*zero)(mlfab__memory *memory, uint8_t *to, uint64_t bytes);
  void (*copy)(mlfab__memory *memory, uint8_t *to, const uint8_t *from, uint64_t bytes);
  void (*write)(mlfab__memory *memory, uint8_t *to, const uint8_t *from, uint64_t bytes);
  void (*see)(mlfab__memory *memory, uint8_t *to, const uint8_t *from, uint64_t bytes);
  int (*add)(mlfab__memory *memory, uint32_t kernels, int dtype, uint8_t *to, const uint8_t *w,
             const uint8_t *u, double scale, uint64_t n);
  void (*scale)(mlfab__memory *memory, int dtype, uint8_t *data, double by, uint64_t n);
  void (*step)(mlfab__memory *memory, const mlfab__optimizer *optimizer,
               const mlfab__optimizer_step *step, int dtype, uint8_t *dst, const uint8_t *w,
               const uint8_t *u, uint8_t *s0, uint8_t *s1, uint64_t n);
  int (*lend)(mlfab__memory *memory, mlfab__block *block, uint64_t bytes, const uint8_t **at_p);
  /* lend: gives the block's bytes in memory of the host, valid until it is written. 1: at *at_p; 0: not copied yet, ask
   * again. Errors: MEMORY. forget: ends the need for them. again: asks again for pulls that await copies. */
  void (*forget)(mlfab__memory *memory, mlfab__block *block);
  void (*again)(mlfab__memory *memory);
  void (*disown)(mlfab__memory *memory); /* the device is not called again */
  void (*free)(mlfab__memory *memory);   /* all has been given back */
} mlfab__memory_table;

struct mlfab__memory {
  const mlfab__memory_table *on;
};

/* Returns memory aligned to 64 bytes, with any contents, or NULL. Give it back with its size. */
static inline uint8_t *mlfab__memory_take(mlfab__memory *memory, mlfab__env *env, uint64_t bytes) {
  return memory ? memory->on->take(memory, bytes) : mlfab__alloc_aligned(env, bytes);
}

static inline void mlfab__memory_give(mlfab__memory *memory, mlfab__env *env, uint8_t *at,
                                      uint64_t bytes) {
  if (!memory)
    mlfab__free_aligned(env, at, bytes);
  else if (at)
    memory->on->give(memory, at, bytes);
}

static inline void mlfab__memory_zero(mlfab__memory *memory, uint8_t *to, uint64_t bytes) {
  if (memory)
    memory->on->zero(memory, to, bytes);
  else
    memset(to, 0, bytes);
}

/* Copies within this memory; no overlap. */
static inline void mlfab__memory_copy(mlfab__memory *memory, uint8_t *to, const uint8_t *from,
                                      uint64_t bytes) {
  if (memory)
    memory->on->copy(memory, to, from, bytes);
  else
    memcpy(to, from, bytes);
}

/* Returns the bytes in memory of the host: `from` itself, or a copy in `room`. Waits for a device. */
static inline const uint8_t *mlfab__memory_see(mlfab__memory *memory, const uint8_t *from,
                                               uint64_t bytes, uint8_t *room) {
  if (!memory || !from) return from;
  memory->on->see(memory, room, from, bytes);
  return room;
}

/* to = w + scale * u, as mlfab__kernel_add; u is in memory of the host, and is read once. w may be NULL, or `to`.
 * Returns 1 if all of scale * u is finite, else 0 (the contents of `to` are unspecified then). */
static inline int mlfab__memory_add(mlfab__memory *memory, uint32_t kernels, int dtype, uint8_t *to,
                                    const uint8_t *w, const uint8_t *u, double scale, uint64_t n,
                                    int stream) {
  return memory ? memory->on->add(memory, kernels, dtype, to, w, u, scale, n)
                : mlfab__kernel_add_by(kernels, dtype, to, w, u, scale, n, stream);
}

/* data *= by. */
static inline void mlfab__memory_scale(mlfab__memory *memory, uint32_t kernels, int dtype,
                                       uint8_t *data, double by, uint64_t n) {
  if (memory)
    memory->on->scale(memory, dtype, data, by, n);
  else
    (void)mlfab__kernel_add_by(kernels, dtype, data, NULL, data, by, n, 0);
}

/* As mlfab__optimizer_apply. All arrays are in this memory. */
static inline void mlfab__memory_step(mlfab__memory *memory, const mlfab__optimizer *optimizer,
                                      const mlfab__optimizer_step *step, int dtype, uint8_t *dst,
                                      const uint8_t *w, const uint8_t *u, uint8_t *s0, uint8_t *s1,
                                      uint64_t n) {
  if (memory)
    memory->on->step(memory, optimizer, step, dtype, dst, w, u, s0, s1, n);
  else
    mlfab__optimizer_apply(optimizer, step, dtype, dst, w, u, s0, s1, n);
}

#endif
