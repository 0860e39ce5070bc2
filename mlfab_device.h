/*
 * mlfab_device.h - buffers, and servers' models, in the memory of a device such as a GPU.
 *
 * The rules of mlfab.h apply: return values, NULL, `size`, units. mlfab.c has the code.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_DEVICE_H
#define MLFAB_DEVICE_H

#include "mlfab.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------
 * Device memory
 *
 * With a device attached, buffers of these calls, and of their _start forms, may be in its memory. One call may mix
 * memories.
 *    mlfab_model_start, mlfab_push, mlfab_push_sparse (indices, too), mlfab_pull, mlfab_broadcast
 *    the collectives with their inputs; mlfab_partial_reduce and _flush, mlfab_stochastic_reduce
 * All others take memory of the host: task graphs (UNSUPPORTED), mlfab_cached, mlfab_alloc, a user's reducers.
 * gpu/mlfab_gpu.h attaches a CUDA device. It uses this interface, which is for devices of other makers, too.
 *
 * Staging. A call copies its inputs to pinned memory of the host, runs there, and copies its outputs back. Large pushes
 * (more than 4 MiB, or staging_bytes / 64 if that is less) and pulls overlap with their copies. These calls do not:
 * pushes with clip_norm, a filter, retry_seq or a scheduler; pulls of a model with version tags; collectives.
 *
 * Order. The copies wait for all work that the caller has queued on the device's stream before the call; the caller
 * does not wait. When the call, or its request, has ended with 0, any stream sees the results. A buffer is borrowed as
 * always. If the call takes a copy (small pushes, sparse updates, filters), work that is queued after the call may
 * overwrite the buffer. Calls of one context begin in the order in which they were made. So a call behind a call that
 * waits for the stream waits, too: a _start form still returns at once, other calls wait before they begin.
 *
 * Errors.
 *    DEVICE, with the device's own words. If the copy to the host failed, the call had no effect: no server applies the
 *    push, but a round may count it as empty, as after mlfab_cancel. The other workers of a collective get the same code
 *    and this rank. If the copy back failed, the call was carried out, or a pull cancelled, and the buffers are
 *    unspecified. A pull that fails for any reason leaves its buffers unspecified.
 *    ARGUMENT: memory of another device, an address that is not aligned to its elements, buffers that overlap if one of
 *    them is written.
 *    LIMIT: a call needs more than staging_bytes.
 *    AGAIN: a _start form finds all of staging_bytes in use, or 64 calls under way. Other calls wait.
 * A mistake of a _start form is found when the call begins: its request fails. At the deadline a request ends whatever
 * the stream does; the copies that it has queued stay queued.
 *
 * Progress. The end of a copy wakes nobody: the thread that drives looks every 100 us during copies, and mlfab_fd does
 * not become readable for them.
 * Cost: one copy of the inputs and one of the outputs over the device's bus. If a server sends parts of a pull again,
 * they may be copied again. A call of a size that was used before pins nothing. mlfab_device_share avoids the bus among
 * workers of one host.
 *
 * A server's model on a device. With config.device set, a server keeps weights, optimizer state and sums of rounds in
 * memory of the device and applies updates there, with the bits of a host. The host checks and scales an update on its
 * way to pinned memory, and then copies it. A pulled version is copied once for all workers, and stays in pinned memory
 * while it is the present version. All else works as with a model on the host: consistency, replicas, checkpoints,
 * moves. Tags, pull_half, a change filter and config.on_update are refused (UNSUPPORTED).
 * Out of device memory: as out of memory of the host. Any other failure of the device ends the node like a crash: it
 * hangs up, and calls on its context and mlfab_serve return DEVICE with the device's words. Updates since the last
 * checkpoint, or updates that no replica has, are lost.
 * A device and its `self` serve one open context at a time.
 * Price, for a shard of b bytes: 2b of device memory, 3b with rounds, and b for each state of the optimizer; b of
 * pinned memory, and more for pulls of older versions. The server keeps this memory until it is closed, or has a model
 * with blocks of another size.
 */
enum mlfab_memory {
  MLFAB_MEMORY_HOST = 0,
  /* host and stream may use it: used in place, after the queued work */
  MLFAB_MEMORY_PINNED = 1,
  MLFAB_MEMORY_DEVICE = 2 /* has to be copied; also memory that moves to and fro (managed) */
};
/* Directions of copies. Copies of one direction are carried out one after the other. */
enum mlfab_device_way { MLFAB_DEVICE_TO_HOST = 0, MLFAB_DEVICE_FROM_HOST = 1 };
enum mlfab_device_sizes {
  MLFAB_DEVICE_ID = 32,
  MLFAB_DEVICE_HANDLE = 128,
  MLFAB_DEVICE_SHARE_MOST = 16, /* workers that share device memory */
  MLFAB_DEVICE_STAGE = 1 << 20  /* bytes of `stage` */
};

/* An update rule and the parameters of one commit: the members of mlfab_model_options that it needs, which have been checked. */
typedef struct mlfab_device_rule {
  uint32_t kind;  /* MLFAB_OPTIMIZER_* */
  uint32_t spare; /* 0 */
  double gamma, adadelay_c, beta1, beta2, epsilon, weight_decay;
  double scale;   /* of u */
  uint64_t t;     /* number of this commit, from 1 */
  uint64_t delay; /* ADADELAY */
} mlfab_device_rule;

/* A device. No function may wait for the stream. They are called with a lock held, by any thread, one at a time.
 * Functions that return int return 0 or a positive error number of the device, unless it says otherwise. */
struct mlfab_device {
  uint32_t size; /* sizeof(mlfab_device) */
  const char *name;
  /* A value of enum mlfab_memory. MLFAB_ERR_ARGUMENT: memory that this device cannot use; MLFAB_ERR_DEVICE: it cannot
   * tell. Text then says why. */
  int (*where)(void *self, const void *memory, uint64_t bytes, char *text, size_t room);
  int (*pin)(void *self, uint64_t bytes,
             void **memory_p); /* host memory that copies of this device use */
  void (*unpin)(void *self, void *memory);
  int (*fence)(void *self, void **fence_p); /* marks the stream's work so far */
  int (*after)(void *self, int way,
               void *fence); /* copies of this direction that follow wait for the fence */
  int (*copy)(void *self, int way, void *to, const void *from, uint64_t bytes);
  int (*mark)(void *self, int way, void **mark_p); /* marks the copies of this direction so far */
  int (*order)(void *self, void *mark);            /* later work of the stream waits for the mark */
  int (*poll)(void *self, void *mark); /* 1: reached; 0: not yet; negative: minus an error number */
  void (*drop)(void *self, void *mark); /* of a mark or a fence that is not needed any more */
  const char *(*text)(void *self, int number); /* of an error number: "cudaErrorX: a text" */
  void (*close)(void *self);                   /* the context uses it no longer; may be NULL */
  /* Sharing memory with other workers (mlfab_device_share). NULL, or a size that ends before them: it cannot. */
  /* A name for `reaches` of other workers, MLFAB_DEVICE_ID bytes: which device of which host it is. */
  int (*identify)(void *self, void *id);
  /* 1: this worker's device can read another worker's memory on the device of that name; 0: it cannot, or the device is
   * on another host. */
  int (*reaches)(void *self, const void *id);
  /* Describes the allocation that the memory is in, for `map` of other workers: MLFAB_DEVICE_HANDLE bytes. Two
   * allocations differ in them, also after one was freed. The memory begins at *offset_p in it. An error number: this
   * memory cannot be shared. */
  int (*share)(void *self, const void *memory, uint64_t bytes, void *handle, uint64_t *offset_p);
  /* Makes an allocation of another worker, of *bytes_p bytes, readable for reduce and copy, until unmap. May take milliseconds. */
  int (*map)(void *self, const void *handle, void **memory_p, uint64_t *bytes_p);
  void (*unmap)(void *self, void *memory);
  /* to = from[0] op from[1] ..., n elements, from left to right, k up to MLFAB_DEVICE_SHARE_MOST. One of `from` is
   * `to`. All MLFAB_OP_* and element types, with the bits of mlfab_allreduce in shared memory; MEAN divides by k. In
   * the order of copies of MLFAB_DEVICE_FROM_HOST, and marked like these. An error writes nothing. */
  int (*reduce)(void *self, int op, int dtype, void *to, const void *const *from, uint32_t k,
                uint64_t n);
  /* The members from here on serve for config.device, which never calls where, fence, order and close. NULL: the device
   * holds no models. Copies of the direction FROM_HOST may then be within the device, too. zero, add and step are
   * carried out in the order of that direction. Only give, stage and fetch may wait for the device's work, at most
   * about 10 s. After failed work all later calls return its error. */
  int (*take)(void *self, uint64_t bytes,
              void **memory_p); /* memory of the device, aligned to 256 bytes */
  /* Frees it after the device's work so far; may also wait for work of others. */
  void (*give)(void *self, void *memory);
  /* Pinned memory for at most MLFAB_DEVICE_STAGE bytes, to be filled and copied FROM_HOST. The caller no longer uses
   * the memory of the last call. */
  int (*stage)(void *self, void **pinned_p);
  /* Copies to any memory of the host, behind all that the direction FROM_HOST has been given, and waits for it. */
  int (*fetch)(void *self, void *to, const void *from, uint64_t bytes);
  int (*zero)(void *self, void *to, uint64_t bytes);
  /* dst = w + scale * u, n elements of MLFAB_F32, F64 or I64. Each product and each sum is rounded once (scale 1 and -1
   * change only the sign of u; I64: its integer part). w NULL: dst = scale * u. dst may be w or u; no other overlap. */
  int (*add)(void *self, int dtype, void *dst, const void *w, const void *u, double scale,
             uint64_t n);
  /* dst = the rule's step applied to w, and the states s0 and s1, as many as the rule has, stepped in place. dst may be
   * w or u. */
  int (*step)(void *self, const mlfab_device_rule *rule, int dtype, void *dst, const void *w,
              const void *u, void *s0, void *s1, uint64_t n);
};

/* Attaches a device to a context of a worker, for good. `device` is borrowed until close. staging_bytes: the most
 * pinned memory at a time, 0: 256 MiB. Errors: ARGUMENT (with the member that is missing), STATE (a device is attached
 * already; this node is not a worker), MEMORY. */
MLFAB_API int mlfab_device_attach(mlfab *ctx, const mlfab_device *device, void *self,
                                  uint64_t staging_bytes);

/* Collectives from device to device. All workers call it. *shared_p becomes 1 on all if at most 16 workers take part,
 * and each has a device that can read the others' memory; else 0, and the log says why (INFO). With 1, allreduces,
 * reduce-scatters, allgathers and broadcasts of at least least_bytes avoid the host: each worker's device adds a part,
 * reads it from all workers' memory, and copies the others' parts. least_bytes 0: 1 MiB; the largest of the workers'
 * numbers counts. timeout_ns: for each of two steps; 0: the configured one. Conditions: MLFAB_ALGORITHM_AUTO, no
 * reducer, no `inputs`, no refuse_nan; each worker's data is one buffer in device memory, of one allocation that can be
 * shared. If one worker's call differs, all workers stage that call.
 *
 * Order and errors are those of staging, except:
 *    Calls with a number among the workers (collectives, opening of objects) wait until such a call has ended.
 *    A device that fails ends the call with DEVICE on all workers, with its rank and words.
 *    After a failure the buffers are unspecified, and the agreement is void. It is void, too, once workers die, join,
 *    leave or finish: calls are staged until all workers call this again. A worker that joins may end only this call,
 *    with AGAIN on all workers.
 *
 * Memory. Devices keep up to 64 allocations of other workers mapped, and may read them until the call has ended on all
 * workers. They write only their own. Before a program frees memory that such calls have used, all workers call this
 * again, which unmaps all memory when it returns 0, or close.
 *
 * Bits: those of blocking calls in shared memory of the host.
 * Cost: three or four small messages to and from all workers, one after the other; mlfab_stats counts each as a
 * collective. In an allreduce of P workers a device reads (2P-1)/P of the bytes, and writes them once. The bus to the
 * host carries nothing.
 * Errors: ARGUMENT, STATE (not a worker; inside a function of mlfab_on_done), MEMORY, AGAIN, TIMEOUT, and failures of
 * collectives. DEVICE, on all workers, with a rank: its device has not ended the work of a failed call, and mappings
 * stay. */
MLFAB_API int mlfab_device_share(mlfab *ctx, uint64_t least_bytes, uint64_t timeout_ns,
                                 int *shared_p);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_DEVICE_H */
