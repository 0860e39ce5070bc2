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
 * With a device attached, the buffers of these calls, and of their _start forms, may be in its memory: mlfab_model_start,
 * mlfab_push, mlfab_push_sparse (indices, too), mlfab_pull, mlfab_broadcast, the collectives with their inputs,
 * mlfab_partial_reduce and _flush, mlfab_stochastic_reduce. One call may mix memories. Everything else takes memory of the
 * host: task graphs (UNSUPPORTED), mlfab_cached, mlfab_alloc, reducers of the user's. gpu/mlfab_gpu.h attaches a CUDA
 * device; this header is the interface that it uses, for devices of other makers.
 *
 * Staging. A call copies what it reads to pinned memory of the host, runs there, and copies back what it writes. A push of more
 * than 4 MiB (or staging_bytes / 64, if that is less) is sent while the rest of it is copied, and a pull is copied back while the
 * rest of it comes. Not overlapped are pushes with clip_norm, a filter or retry_seq, or with a scheduler; pulls of a
 * model with version tags; and collectives.
 *
 * Order. What the caller has queued on the device's stream before the call comes before it: the copies wait for it, not the
 * caller. When the call, or its request, has ended with 0, results are there for any stream. A buffer is borrowed as always;
 * where a call takes a copy (small pushes, sparse updates, filters), what is queued on the stream after the call may overwrite
 * the buffer. Calls of one context begin in the order in which they were made, so those behind a call that waits for the stream
 * wait too: a _start form then still returns at once; a call that has no _start form waits before it begins.
 *
 * Errors. DEVICE, with the device's own words: when copying to the host failed, the call had no effect (no server applies a
 * push, but where rounds are counted it may count as an empty one, as after mlfab_cancel), and the other workers of a
 * collective are told, with the same code and this rank; when copying back failed, the call was carried out, or a pull cancelled, and the buffers
 * are unspecified, as those of a pull are that fails for any reason. ARGUMENT:
 * memory of another device, an address that is not aligned to its elements, buffers that overlap where one is written.
 * LIMIT: a call needs more than staging_bytes. AGAIN: a _start form finds all of it in use, or 64 calls under way;
 * other calls wait. Mistakes of a _start form are found when it begins, and then its request fails with them. At the
 * deadline a request ends whatever the stream does; the copies that it has queued stay queued.
 *
 * Progress. Nobody is told when a copy ends: the thread that drives looks every 100 us while there are copies, and mlfab_fd does
 * not become readable for them.
 * Cost: one copy of what a call reads and one of what it writes over the device's bus; what a server sends again in a pull may be
 * copied again. A call of a size that was used before pins nothing. Workers of one host can do without: mlfab_device_share.
 *
 * A server's model on a device. With config.device set, a server keeps weights, optimizer state and sums of rounds in memory
 * of the device and applies updates there; bit for bit as on the host. What comes is checked and scaled on the host, on its
 * way to pinned memory, and then copied; what is pulled is copied once for all workers and kept in pinned memory while it is the
 * present version. Everything works as with a model on the host (consistency, replicas, checkpoints, moves), except that a model
 * with tags, pull_half or a change filter, and config.on_update, are refused (UNSUPPORTED).
 * Out of device memory: as out of memory of the host. Any other failure of the device ends the node like a crash: it
 * hangs up, calls on its context and mlfab_serve return DEVICE with the device's words, and what the workers have been told
 * since the last checkpoint, or what no replica has, is lost.
 * A device and its `self` serve one open context at a time.
 * Price, for a shard of b bytes: 2b of device memory, 3b with rounds, and b for each state of the optimizer; b of pinned
 * memory, and what pulls of older versions hold. The server keeps what it has taken until it is closed, or has a model with
 * blocks of another size.
 */
enum mlfab_memory {
  MLFAB_MEMORY_HOST = 0,
  MLFAB_MEMORY_PINNED =
      1, /* the host may use it, and the stream too: used in place, after what is queued */
  MLFAB_MEMORY_DEVICE =
      2 /* it has to be copied; also memory that moves between host and device (managed) */
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

/* A device. No function may wait for the stream. They are called with a lock held, by any thread, one at a time. Functions
 * that return int return 0 or a positive error number of the device, unless it says otherwise. */
struct mlfab_device {
  uint32_t size; /* sizeof(mlfab_device) */
  const char *name;
  /* A value of enum mlfab_memory. MLFAB_ERR_ARGUMENT: memory that this device cannot use; MLFAB_ERR_DEVICE: it cannot tell.
   * Text then says why. */
  int (*where)(void *self, const void *memory, uint64_t bytes, char *text, size_t room);
  int (*pin)(void *self, uint64_t bytes,
             void **memory_p); /* host memory that copies of this device use */
  void (*unpin)(void *self, void *memory);
  int (*fence)(void *self, void **fence_p); /* marks what the stream has been given so far */
  int (*after)(void *self, int way,
               void *fence); /* copies of this direction that follow wait for the fence */
  int (*copy)(void *self, int way, void *to, const void *from, uint64_t bytes);
  int (*mark)(void *self, int way, void **mark_p); /* marks the copies of this direction so far */
  int (*order)(void *self,
               void *mark);            /* what the stream is given from now on waits for the mark */
  int (*poll)(void *self, void *mark); /* 1: reached; 0: not yet; negative: minus an error number */
  void (*drop)(void *self, void *mark); /* of a mark or a fence that is not needed any more */
  const char *(*text)(void *self, int number); /* of an error number: "cudaErrorX: a text" */
  void (*close)(void *self);                   /* the context uses it no longer; may be NULL */
  /* Sharing memory with other workers (mlfab_device_share). NULL, or a size that ends before them: it cannot. */
  /* A name for `reaches` of other workers, MLFAB_DEVICE_ID bytes: which device of which host it is. */
  int (*identify)(void *self, void *id);
  /* 1: this worker's device could read memory that another worker has on the device of that name; 0: not, or not of this host. */
  int (*reaches)(void *self, const void *id);
  /* Describes the allocation that the memory is in, for `map` of other workers: MLFAB_DEVICE_HANDLE bytes, which differ for
   * different allocations also after one was freed. The memory begins at *offset_p in it. An error number: this memory cannot be
   * shared. */
  int (*share)(void *self, const void *memory, uint64_t bytes, void *handle, uint64_t *offset_p);
  /* Makes an allocation of another worker, of *bytes_p bytes, readable for reduce and copy, until unmap. May take milliseconds. */
  int (*map)(void *self, const void *handle, void **memory_p, uint64_t *bytes_p);
  void (*unmap)(void *self, void *memory);
  /* to = from[0] op from[1] ..., n elements, from left to right, k up to MLFAB_DEVICE_SHARE_MOST; all MLFAB_OP_* and element types,
   * with the bits of mlfab_allreduce in shared memory; MEAN divides by k. One of `from` is `to`. In the order of copies of
   * MLFAB_DEVICE_FROM_HOST, and marked like these. With an error nothing is written. */
  int (*reduce)(void *self, int op, int dtype, void *to, const void *const *from, uint32_t k,
                uint64_t n);
  /* The members from here on serve for config.device, which never calls where, fence, order and close. NULL: the device holds
   * no models. Copies of the direction FROM_HOST may then be within the device, too, and zero, add and step are carried out in
   * the order of that direction. Only give, stage and fetch may wait for what the device has been given, at most about 10 s. When
   * something that it was given fails, all later calls say so. */
  int (*take)(void *self, uint64_t bytes,
              void **memory_p); /* memory of the device, aligned to 256 bytes */
  /* After all that it was given so far is carried out; may also wait for what others have given it. */
  void (*give)(void *self, void *memory);
  /* Pinned memory for at most MLFAB_DEVICE_STAGE bytes, to be filled and copied FROM_HOST. The caller is done with what the last
   * call has returned. */
  int (*stage)(void *self, void **pinned_p);
  /* Copies to any memory of the host, behind all that the direction FROM_HOST has been given, and waits for it. */
  int (*fetch)(void *self, void *to, const void *from, uint64_t bytes);
  int (*zero)(void *self, void *to, uint64_t bytes);
  /* dst = w + scale * u, of n elements: MLFAB_F32, F64, I64; each product and each sum rounded once (scale 1 and -1 change only
   * the sign of u; I64: its integer part). w NULL: dst = scale * u. dst may be w or u; no other overlap. */
  int (*add)(void *self, int dtype, void *dst, const void *w, const void *u, double scale,
             uint64_t n);
  /* dst = the rule's step applied to w, and the states s0 and s1, as many as the rule has, stepped in place. dst may be w
   * or u. */
  int (*step)(void *self, const mlfab_device_rule *rule, int dtype, void *dst, const void *w,
              const void *u, void *s0, void *s1, uint64_t n);
};

/* Attaches a device to a context of a worker, for good. `device` is borrowed until close. staging_bytes: the most pinned memory
 * at a time, 0: 256 MiB. Errors: ARGUMENT (with the member that is missing), STATE (a device is attached already; this
 * node is not a worker), MEMORY. */
MLFAB_API int mlfab_device_attach(mlfab *ctx, const mlfab_device *device, void *self,
                                  uint64_t staging_bytes);

/* Collectives from device to device. All workers call it: *shared_p becomes 1 on all where up to 16 workers take part, each with a
 * device attached that can read the others' memory; else 0, and the log says why (INFO). Then allreduces, reduce-scatters,
 * allgathers and broadcasts of at least least_bytes (0: 1 MiB; the largest of the workers' numbers), with MLFAB_ALGORITHM_AUTO and no reducer, do
 * not go by the host: each worker's device adds a part, reading it from all workers' memory, and copies the others' parts. For
 * that each worker's data must be one buffer in device memory, of one allocation that can be shared, without `inputs` and
 * refuse_nan. Where it is not so on one worker, all stage that call. timeout_ns: for each of two steps; 0: the configured one.
 *
 * Order and errors are those of staging, except: calls with a number among the workers (collectives, opening of objects) wait behind
 * such a call until it has ended; a device that fails ends the call with DEVICE on all workers, with its rank and words; after
 * a failure the buffers are unspecified, and the agreement is void. It is void, too, once workers die, join, leave or
 * finish: calls are staged until all workers call this again. A worker that joins may end this call, and no other, with AGAIN on all workers.
 *
 * Memory. Devices keep up to 64 allocations of other workers mapped, and may read them until the call has ended on all workers; they
 * write none. Before a program frees memory that such calls have used, all workers call this (again), which unmaps all when it returns 0,
 * or close.
 *
 * Bits: those of blocking calls in shared memory of the host. Cost: three or four small messages to and from all workers, one after the
 * other, each of which mlfab_stats counts as a collective; in an allreduce of P workers a device reads (2P-1)/P of the bytes, and writes them once.
 * Nothing goes over the bus to the host.
 * Errors: ARGUMENT, STATE (not a worker; inside a function of mlfab_on_done), MEMORY, AGAIN, DEVICE (on all workers, with the rank whose
 * device has not ended what a failed call has given it: mappings stay), TIMEOUT, and failures of collectives. */
MLFAB_API int mlfab_device_share(mlfab *ctx, uint64_t least_bytes, uint64_t timeout_ns,
                                 int *shared_p);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_DEVICE_H */
