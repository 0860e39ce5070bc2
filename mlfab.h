/*
 * mlfab.h - the communication layer of a distributed trainer, in two files.
 *
 * mlfab moves model updates between the processes of a trainer. It decides when an update travels, by which way,
 * and whether it travels at all. Copy mlfab.h and mlfab.c beside your trainer, or link libmlfab.a.
 *
 * This header is the manual. It goes from simple to expert:
 *
 *    1  a complete program, words,  7  the model
 *       rules and limits            8  push and pull
 *    2  version                     9  the fabric: barrier, broadcast, finish, changes while it runs
 *    3  errors                     10  collectives
 *    4  types and units            11  telemetry
 *    5  env: memory, clock, log
 *    6  open and close
 *
 * Experts include one of these, too. Each includes mlfab.h; mlfab.c has the code of the first four.
 *
 *    mlfab_partial.h    collectives that do not wait for all: partial and stochastic reductions, task graphs
 *    mlfab_transport.h  the interfaces of transports and of files; TCP, shared memory and MPI
 *    mlfab_device.h     buffers, and servers' models, in memory of a GPU
 *    mlfab_node.h       a program with its own event loop, without sockets and threads of the library
 *    mlfab_sim.h        a simulated network, in virtual time
 *
 * 1. A complete program
 * ---------------------
 * Start it with `mlfab-run -n 4 -s 1 ./trainer`: four workers and a built-in parameter server.
 *
 *    #include "mlfab.h"
 *    #include <stdio.h>
 *
 *    int main(void) {
 *      mlfab *fabric = NULL;
 *      mlfab_error error;
 *      if (mlfab_open_env(&fabric, &error)) {
 *        fprintf(stderr, "%s\n", error.text);
 *        return 1;
 *      }
 *      float w[1000] = {0}, gradient[1000];
 *      mlfab_buf weights = {MLFAB_ALL, 0, w, 1000}, update = {MLFAB_ALL, 0, gradient, 1000};
 *      mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
 *      options.scale = -0.01;  // -learning rate
 *      int status = mlfab_tensor_add(fabric, 0, MLFAB_F32, 1000);
 *      if (!status) status = mlfab_model_start(fabric, NULL, &weights, 1);  // all start with worker 0's weights
 *      for (int step = 0; step < 1000 && !status; step++) {
 *        status = mlfab_pull(fabric, &weights, 1, NULL, NULL);
 *        for (int i = 0; i < 1000; i++) gradient[i] = w[i] - 1.0f;
 *        if (!status) status = mlfab_push(fabric, &update, 1, &options, NULL);
 *      }
 *      if (status) {
 *        mlfab_last_error(fabric, &error);
 *        fprintf(stderr, "%s\n", error.text);
 *      }
 *      mlfab_close(&fabric);
 *      return status ? 1 : 0;
 *    }
 *
 * Without a launcher the program is a world of one: it trains alone, without a server or sockets, and
 * mlfab_open_env says so in one line on stderr.
 *
 * Words
 * -----
 * fabric      all processes of one training run. Each has a context (struct mlfab), which is one node.
 * worker      a node that computes. Workers have ranks 0..workers-1, up to workers_max-1 where more may join.
 * server      a node that holds a part of the model and applies updates to it. A process may be worker and server.
 * slice       a part of the model that one server holds. A server's slices are its shard.
 * version     of a slice: the number of updates that the server has applied to it.
 * update      the content of one push: an array for each tensor.
 * iteration   one whole update of a worker, counted from 0: a push, or several pushes with MLFAB_PUSH_MORE.
 * round       with BSP and DROP: the updates that a server adds up and applies in one step.
 * delay       of an update: the number of updates applied since the version that the worker computed it from.
 * request     a handle of a call that has begun. mlfab_wait or mlfab_test ends it.
 * epoch       a stretch of collectives with the same workers. A failure ends it, and a worker that comes or goes.
 * joiner      a worker that comes when the fabric runs already (section 6).
 * live        a worker that has not died, closed or finished.
 * incarnation of a rank: the number of processes that have had the rank, from 1.
 *
 * Rules
 * -----
 * Return values. A function that returns int returns 0 or a negative MLFAB_ERR_* code; where it may return 1, its
 * comment says so. Outputs end in `_p` and are set on success only, except error_p and result_p. NULL is allowed
 * where a comment says so; elsewhere it gives MLFAB_ERR_ARGUMENT.
 *
 * Options. A struct that the caller fills begins with `size`. Initialise it, then change members:
 *    mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;                       // C and C++
 *    mlfab_collective how = {.size = sizeof how};                                // structs without an _INIT
 * An _INIT macro or _init function sets the real defaults. In a struct without one, 0 means the default in its comment;
 * if a member's comment says nothing of 0, 0 means 0. Structs grow at the end only. The library takes a struct of an
 * older header by its `size`, and uses the defaults for the missing members. It refuses a mlfab_config from before the
 * last change of its order (CONFIG). Functions that fill a struct (_init, _set, _from_env) need a header of the
 * library's own version.
 *
 * Units. Counts are elements, sizes are bytes, times are nanoseconds, rates are bytes per second.
 *
 * Deadlines. Every call that waits for another node has a deadline: timeout_ns in its options, or, where they have
 * none, timeout_ns among its arguments; 0 means config.timeout_ns (300 s). A call with neither uses
 * config.timeout_ns. When the deadline passes, the call returns MLFAB_ERR_TIMEOUT, and the error names a rank that it
 * waited for. Three calls give 0 another meaning: mlfab_wait (the request's own deadline), mlfab_progress (returns at
 * once), mlfab_serve (no limit).
 *
 * Memory. The library borrows a buffer until the call returns; with a _start form, until the request has ended.
 * A _start form takes the arguments of the form that waits, and request_p, and returns at once.
 *
 * Threads. Several threads may use one context. Calls exclude each other for a few microseconds; a call that waits
 * does not hold up the others. Contexts share nothing. The library's threads block all signals but those of faults.
 * No function exits, aborts, installs a signal handler, or raises SIGPIPE or SIGXFSZ. Only mlfab_open_env prints, and
 * telemetry that was asked for (section 11). The environment is read by mlfab_open_env, by mlfab_model_start with NULL
 * options after it, and by the _from_env functions.
 *
 * Callbacks run in the thread that drives the context: the progress thread, or a thread inside a call. They must not
 * call back into the context, except where their comments say so.
 *
 * Forks. A context belongs to the process that opened it. In a forked child every call on it returns MLFAB_ERR_STATE,
 * except mlfab_close and mlfab_abandon, which free the child's memory and send nothing. Close it early in the child:
 * until then the child keeps the descriptors open, and the peers notice its parent's death only by silence. If another
 * thread of the parent was in the library at the fork, that memory stays until the child ends. A child may open
 * contexts of its own. Shared memory of mlfab_alloc is not in the child: touching it is a fault.
 *
 * Limits
 * ------
 *    open requests of a context, blocking calls included     1,024      one more: MLFAB_ERR_AGAIN at once
 *    updates under way                                          64      MLFAB_ERR_AGAIN at once
 *    pulls under way                                             8      MLFAB_ERR_AGAIN at once
 *    collectives open                                        1,024      MLFAB_ERR_AGAIN at once; the first 32 run
 *    buffers in the list of a collective                     4,096      MLFAB_ERR_LIMIT
 *    separate stretches of the model in one push or pull     2,048      MLFAB_ERR_LIMIT
 *    workers of a fabric; with collectives                   65,536; 1,024
 *    servers; slices of a model                              4,096; 4,096
 *
 * Frequent mistakes
 * -----------------
 * - A timeout of 300 s is long while you try things: set MLFAB_TIMEOUT_MS=10000.
 * - With BSP and DROP each worker's push is one update of the round. A worker that pushes tensor by tensor must set
 *   MLFAB_PUSH_MORE in all pushes but the last, or each tensor counts as a round.
 * - A worker that has no more data must call mlfab_finish. Without it, rounds and collectives wait for the worker, or
 *   fail once when it closes.
 * - mlfab_push adds scale * u to the model: a gradient needs a negative scale.
 * - MLFAB_ERR_DROPPED is not a failure: the update was too late. Add it to the next one, or forget it.
 * - All workers must make the same collective calls in the same order. Set `tag` to have it checked.
 *
 * Compile-time switches
 * ---------------------
 * All are 1 (MLFAB_WITH_SHM only on Linux), except MLFAB_WITH_MPI and MLFAB_WITH_CBLAS. Define one as 0, or these two
 * as 1, when you compile mlfab.c. Start a program without MLFAB_WITH_KEYS by mlfab-run --insecure.
 *    MLFAB_WITH_TCP, MLFAB_WITH_SHM   a transport              MLFAB_WITH_MPI         the transport over MPI
 *    MLFAB_WITH_PUSH        models, pushes and pulls           MLFAB_WITH_COLL        collectives
 *    MLFAB_WITH_SPARSE      filters, sparse updates, tags      MLFAB_WITH_PARTIAL     partial reductions
 *    MLFAB_WITH_SCHED       scheduler, measured links          MLFAB_WITH_STOCHASTIC  stochastic reductions
 *    MLFAB_WITH_GROWTH      processes that join                MLFAB_WITH_DAG         task graphs
 *    MLFAB_WITH_RESHARD     moving slices between servers      MLFAB_WITH_KEYS        proofs and tags (config.key)
 *    MLFAB_WITH_CHECKPOINT  checkpoints, mlfab_load, _save     MLFAB_WITH_REPLICA     replicas of servers
 *    MLFAB_WITH_DEVICE      device memory (mlfab_device.h)     MLFAB_WITH_TELEMETRY   config.log, metrics and trace
 *    MLFAB_WITH_LEND        views, memory that is read in place, small rings for many processes of one host
 *    MLFAB_WITH_CBLAS       additions by a cblas (config.kernels); `pkg-config --cflags --libs openblas` has its flags
 * SPARSE, SCHED, GROWTH, CHECKPOINT, DEVICE and LEND need PUSH; RESHARD needs GROWTH; REPLICA needs SCHED, and
 * CHECKPOINT for vote_dir; PARTIAL, STOCHASTIC and DAG need COLL.
 * A function that was left out returns MLFAB_ERR_UNSUPPORTED, and the error names the switch. So does mlfab_open for a
 * configuration that needs such a function. Build all processes of a fabric alike.
 * `amalgamate.py --profile minimal|coll|core` writes a mlfab.c without the text of such groups.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_H
#define MLFAB_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------------------------------
 * 2. Version
 */
#define MLFAB_VERSION_MAJOR 0
#define MLFAB_VERSION_MINOR 1
#define MLFAB_VERSION_PATCH 0
#define MLFAB_VERSION "0.1.0"
/* Two copies of mlfab can talk to each other exactly when their protocol numbers are equal. */
#define MLFAB_PROTOCOL 11

#ifndef MLFAB_API
#define MLFAB_API
#endif

/* The version of the compiled library, "major.minor.patch". */
MLFAB_API const char *mlfab_version(void);

/* One line of text for people, without a newline: version, protocol, the switches that are on or off, the MPI and BLAS
 * library, the compiler. Static; any thread may ask at any time. */
MLFAB_API const char *mlfab_build_info(void);

/* For bindings: the size in bytes of a public struct, named without mlfab_ ("config", "push_options"). 0: no such
 * struct. */
MLFAB_API size_t mlfab_struct_size(const char *name);

/* The names of all settings: of mlfab_config_set, then of mlfab_model_options_set and mlfab_filter_set. Static. NULL
 * behind the last. */
MLFAB_API const char *mlfab_setting_name(uint32_t index);

/* Writes three texts about this setting, with a tab between two: the values that it takes, its default ("-": none) and
 * its meaning. Errors: ARGUMENT (text is NULL, or there is no such setting). */
MLFAB_API int mlfab_setting_text(uint32_t index, char *text, size_t room);

/* ------------------------------------------------------------------------------------------------
 * 3. Errors
 *
 * Codes never change their number. There are four kinds:
 *    usage      the caller's mistake; nothing has changed
 *    retryable  try again; a push with retry_seq, or it may count twice
 *    peer       another rank caused it; `rank` says which
 *    fatal      this context or this machine
 */
#define MLFAB_ERRORS(X)                                                                   \
  /* usage */                                                                             \
  X(ARGUMENT, -1, "an argument is NULL or out of range")                                  \
  X(STATE, -2, "the call does not fit the state of the context")                          \
  X(CONFIG, -3, "the configuration is contradictory or incomplete")                       \
  X(TENSOR, -4, "unknown tensor")                                                         \
  X(SHAPE, -5, "the element count is not the tensor's")                                   \
  X(DTYPE, -6, "the element type does not fit")                                           \
  X(REQUEST, -7, "unknown or already finished request")                                   \
  X(CLOSED, -8, "the context is closed")                                                  \
  X(UNSUPPORTED, -9, "this combination is not supported")                                 \
  X(INSECURE, -10, "TCP needs a key (MLFAB_KEY_FILE), or allow_insecure")                 \
  X(LIMIT, -11, "a size or count is beyond its limit")                                    \
  X(ADDRESS, -12, "the address does not parse or does not resolve")                       \
  /* retryable */                                                                         \
  X(AGAIN, -20, "no room or nothing to do now; try again")                                \
  X(TIMEOUT, -21, "the deadline passed")                                                  \
  X(CANCELLED, -22, "withdrawn by the caller")                                            \
  X(IN_DOUBT, -23, "withdrawn under way: the server has not said whether it was applied") \
  X(ADDRESS_IN_USE, -24, "the address is taken")                                          \
  /* peer */                                                                              \
  X(PEER_DEAD, -40, "a peer is dead")                                                     \
  X(PEER_CLOSED, -41, "a peer closed the connection")                                     \
  X(REFUSED, -42, "a peer refused")                                                       \
  X(RANK_TAKEN, -43, "another process has this rank")                                     \
  X(RANK_RANGE, -44, "the rank is not in the world")                                      \
  X(WORLD, -45, "the worlds disagree")                                                    \
  X(JOB, -46, "the peer belongs to another job")                                          \
  X(PROTOCOL_OLDER, -47, "the peer's protocol is older than this one's")                  \
  X(PROTOCOL_NEWER, -48, "the peer's protocol is newer than this one's")                  \
  X(FRAME, -49, "a frame does not parse")                                                 \
  X(CRC, -50, "a checksum is wrong")                                                      \
  X(NOT_FINITE, -51, "an update holds NaN or infinity")                                   \
  X(MODEL, -52, "the model differs from worker 0's")                                      \
  X(FENCED, -53, "a newer process has this rank, or the job was started again")           \
  X(CALLBACK, -54, "a user callback refused")                                             \
  X(WITHDRAWN, -55, "the update was withdrawn before it was applied")                     \
  X(PARTIAL, -56, "withdrawn when some servers had applied it, and others had not")       \
  X(DROPPED, -57, "dropped: it came, or would have come, too late, or held others up")    \
  X(MISMATCH, -58, "the collective calls of the workers differ")                          \
  /* fatal */                                                                             \
  X(MEMORY, -70, "out of memory")                                                         \
  X(IO, -71, "an operating system call failed")                                           \
  X(INTERNAL, -72, "an invariant of the library is broken")                               \
  X(CHECKPOINT, -73, "a checkpoint is missing, incomplete, damaged or foreign")           \
  X(DEVICE, -74, "a device such as a GPU failed, or the memory is another's")

enum mlfab_error_code {
  MLFAB_OK = 0,
#define MLFAB_ERROR_ENUM_(name, number, text) MLFAB_ERR_##name = number,
  MLFAB_ERRORS(MLFAB_ERROR_ENUM_)
#undef MLFAB_ERROR_ENUM_
      MLFAB_ERR_END_ = -1000
};

#define MLFAB_NO_RANK (-1)

/* An error in full. The code that found the error filled it in. */
typedef struct mlfab_error {
  int32_t code; /* MLFAB_ERR_* */
  int32_t rank; /* the rank that caused it, or MLFAB_NO_RANK; a server's number when `is_server` */
  int32_t is_server; /* 1: `rank` is the number of a server */
  int32_t reserved;
  uint64_t waited_ns; /* how long the call had waited; 0: it did not wait */
  char text[296];     /* one line: the failure, its cause, whom the call waited for, how long */
} mlfab_error;

/* The name of a code ("MLFAB_ERR_TIMEOUT"), and its one-line meaning. Never NULL. */
MLFAB_API const char *mlfab_error_name(int code);
MLFAB_API const char *mlfab_error_text(int code);

/* ------------------------------------------------------------------------------------------------
 * 4. Types and units
 */
typedef struct mlfab mlfab;     /* a context: one node of one fabric */
typedef uint64_t mlfab_request; /* a handle, never reused within a context; 0 is none */

typedef struct mlfab_collective mlfab_collective; /* options of a collective: section 10 */
typedef struct mlfab_transport mlfab_transport;   /* mlfab_transport.h */
typedef struct mlfab_files mlfab_files;           /* mlfab_transport.h */
typedef struct mlfab_device mlfab_device;         /* mlfab_device.h */

enum mlfab_dtype {
  MLFAB_F32 = 1, /* 4 bytes */
  MLFAB_F64 = 2, /* 8 bytes */
  MLFAB_I64 = 3, /* 8 bytes; sums are exact modulo 2^64 */
  /* Only for collectives, not for tensors of the model. */
  MLFAB_F16 = 4,  /* 2 bytes, IEEE half precision; added in float32 */
  MLFAB_BF16 = 5, /* 2 bytes, the upper half of a float32; added in float32 */
  MLFAB_BYTES = 6 /* 1 byte of any meaning; only for mlfab_allgather */
};

/* Instead of a tensor's id: the whole model, as one array of all tensors in the order in which they were added. All
 * tensors must have the same element type. */
#define MLFAB_ALL 0xffffffffu

/* All elements of one tensor, in the caller's memory. */
typedef struct mlfab_buf {
  uint32_t tensor;   /* its id, or MLFAB_ALL */
  uint32_t reserved; /* 0 */
  void *data;        /* `count` elements of the tensor's type, aligned to it; pulls write here */
  uint64_t count;    /* elements: as many as the tensor has */
} mlfab_buf;

/* ------------------------------------------------------------------------------------------------
 * 5. Env: memory, clock, log
 *
 * A table of hooks. The context copies it when it opens. A member that is NULL means the built-in: malloc, the
 * monotonic clock, no log, files. A thread of the library may call a hook.
 */
enum mlfab_log_level {
  MLFAB_LOG_ERROR = 1,
  MLFAB_LOG_WARN = 2,
  MLFAB_LOG_INFO = 3,
  MLFAB_LOG_DEBUG = 4
};

typedef struct mlfab_env {
  uint32_t size;
  uint32_t log_level; /* the largest level that the library passes to log; 0: MLFAB_LOG_WARN */
  void *user;         /* passed to every hook */
  /* Allocates `bytes` aligned to 16 or more, or returns NULL. release gets the `bytes` that were asked for. Set both
   * or neither. */
  void *(*allocate)(void *user, size_t bytes);
  void (*release)(void *user, void *memory, size_t bytes);
  /* Nanoseconds since any origin; never goes back. */
  uint64_t (*clock)(void *user);
  /* Writes one line, which has no newline. */
  void (*log)(void *user, int level, const char *line);
  /* For mlfab_save: writes all `bytes` to `path` atomically. Returns 0 or MLFAB_ERR_IO. */
  int (*store)(void *user, const char *path, const void *data, size_t bytes);
  const mlfab_files *files; /* for checkpoints; borrowed until close */
} mlfab_env;

/* ------------------------------------------------------------------------------------------------
 * 6. Open and close
 */
enum mlfab_role {
  MLFAB_ROLE_WORKER = 1,    /* pushes and pulls */
  MLFAB_ROLE_SERVER = 2,    /* holds slices of the model */
  MLFAB_ROLE_SCHEDULER = 4, /* only plans, in a process of its own: see mlfab_schedule */
  MLFAB_ROLE_REPLICA = 8    /* the second copy of a dedicated server: docs/replicas.md */
};

/* The end of a push, in a fabric with replicas. */
enum mlfab_ack {
  MLFAB_ACK_APPLIED = 1, /* its servers have applied it; the last may be lost with a server */
  MLFAB_ACK_DURABLE = 2  /* their replicas have it, too: it stays when a server is lost */
};

enum mlfab_scheduler_kind {
  MLFAB_SCHEDULER_NONE = 0,   /* a server takes updates in the order in which they are announced */
  MLFAB_SCHEDULER_BESIDE = 1, /* a scheduler in the process of server 0 */
  MLFAB_SCHEDULER_OWN = 2     /* in a process of its own, with roles = MLFAB_ROLE_SCHEDULER */
};

#define MLFAB_UNBOUNDED UINT64_MAX

/* How large pushes and pulls travel in a fabric with a scheduler (MLfabric §3 to §5.2, §10.2, §10.3). A worker
 * announces a push of more than eager_bytes. The scheduler plans it over the measured links: when it travels, and
 * whether it goes directly or through an aggregator, a worker that adds up several updates. The model comes back
 * through distributors, workers that pass it on. Small pushes and pulls are sent at once, and queue behind planned
 * transfers. Without its scheduler a fabric goes on: servers take updates in the order of announcement, and keep to
 * delay_bound. */
typedef struct mlfab_schedule {
  uint32_t size;
  uint32_t best; /* 1: also try plans that the paper excludes, and take the shortest */
  /* tau_max: a server drops an update whose delay would be this or more (MLFAB_ERR_DROPPED), with a scheduler or
   * without. At least 1; MLFAB_UNBOUNDED, the default: no bound. Not with rounds (BSP, DROP). */
  uint64_t delay_bound;
  /* The scheduler plans once the server's incoming link is booked for less than this time. 150 ms suits MLfabric's
   * setting. 0: the time that the queued bytes need, plus 6 %. */
  uint64_t plan_ahead_ns;
  /* Plan at this interval instead, as the paper does. 0: as above. */
  uint64_t interval_ns;
  /* 1: aggregators and distributors receive all bytes before they send any, as in the paper. 0: they pass each piece
   * on as it arrives. */
  uint32_t whole;
  uint32_t no_aggregation;  /* 1: the scheduler orders updates only */
  uint32_t no_distribution; /* 1: every pull comes from the server itself */
  uint32_t reserved;
} mlfab_schedule;

/* Sets every member to its default and `size`. */
MLFAB_API void mlfab_schedule_init(mlfab_schedule *schedule);

enum mlfab_progress_mode {
  MLFAB_PROGRESS_AUTO = 0,   /* a thread, if the platform has them */
  MLFAB_PROGRESS_THREAD = 1, /* a thread of the library moves data and sends heartbeats */
  /* Data moves only inside calls. The other nodes know it: this worker is dead to them only if its connection breaks or
   * its system does not answer. */
  MLFAB_PROGRESS_HAND = 2
};

/* Who adds F32 and F64 arrays: updates at servers and aggregators, data of collectives. The sums have the same bits
 * with both. Norms (clipping, MLFAB_SYNC_PSSP's significance) differ in the last bits, so all nodes must have the same.
 * Additions are bound by memory, so little depends on the choice: measure with `make bench`, rows kernels/. */
enum mlfab_kernels {
  MLFAB_KERNELS_OWN = 0,
  /* axpy, scal and nrm2 of cblas, in MLFAB_WITH_CBLAS=1. mlfab calls them with at most 2,048 elements. For these
   * OpenBLAS (0.3) uses only the caller's thread. The program's own number of threads stays. If another cblas uses
   * threads for such short vectors, the program must forbid it. */
  MLFAB_KERNELS_CBLAS = 1
};

enum mlfab_transport_bits { MLFAB_USE_TCP = 1, MLFAB_USE_SHM = 2, MLFAB_USE_MPI = 4 };

struct mlfab_update_info;
struct mlfab_pull_info;
struct mlfab_event_info;

/* Replaces the server's optimizer (MLfabric Table 1, registerUpdateCallback). The server calls it once for each commit
 * and stretch of a tensor. It changes w in place: `count` weights from element `first` on. `sum` has as many elements:
 * the sum of the updates in the commit. Non-zero refuses the whole update: the weights stay as they were, and the
 * pusher, or in a round the waiting pulls, get MLFAB_ERR_CALLBACK. */
typedef int (*mlfab_update_fn)(void *user, const struct mlfab_update_info *info, uint32_t tensor,
                               int dtype, uint64_t first, uint64_t count, void *w, const void *sum);

/* The server calls it for each pull that arrives (MLfabric Table 1, registerRequestCallback). Non-zero refuses the
 * pull: the worker gets MLFAB_ERR_CALLBACK. */
typedef int (*mlfab_pull_fn)(void *user, const struct mlfab_pull_info *info);

/* A condition of MLFAB_SYNC_USER: non-zero means yes. The server calls pull_condition when a pull arrives, and again
 * while the pull waits, whenever an iteration count or the set of live workers changes. It calls push_condition to
 * ask whether a round is complete, until the answer is no: one push may complete several rounds. */
struct mlfab_sync_state;
typedef int (*mlfab_condition_fn)(void *user, const struct mlfab_sync_state *state);

/* A filter of the user's. It clears the bits of elements that stay in the residual (mlfab_filter) or keep the value in
 * `before` (config.change_filter). `values` and `before` have `count` elements, at most 65,536. On entry bit i % 64 of
 * keep[i / 64] is set for each element i that counts. */
struct mlfab_filter_info;
typedef void (*mlfab_filter_fn)(void *user, const struct mlfab_filter_info *info,
                                const void *values, const void *before, uint64_t *keep);

/* Tells of ranks that come, go and die. For display. */
typedef void (*mlfab_event_fn)(void *user, const struct mlfab_event_info *info);

/* Writes the fabric's key, a text, into `key` (room bytes). Returns 0, or an MLFAB_ERR_*. */
typedef int (*mlfab_key_fn)(void *user, char *key, size_t room);

typedef struct mlfab_config {
  uint32_t size;
  /* --- the world: a launcher sets these, or every program --- */
  uint32_t roles; /* MLFAB_ROLE_* bits; 0: worker, and server too if rank < servers */
  /* A worker's rank, 0..workers-1. A dedicated server: its number, 0..servers-1. A replica: its server's number. With
   * growth up to the largest number - 1. */
  int32_t rank;
  uint32_t workers;   /* 0: 1; workers that the fabric begins with (workers_max) */
  uint32_t servers;   /* 0: 1; servers that the fabric begins with (servers_max) */
  uint32_t dedicated; /* 1: servers are processes of their own; the same on all nodes */
  /* Address of server 0: "tcp:host:port", "tcp:[::1]:port", "unix:/path", "unix:@name", "shm:name"; "" in a world of
   * one. A range of ports, "tcp:host:29400-29410": server 0 takes the first that is free; the others try all ports
   * until this job's server 0 answers, or has given up. With replicas append a comma and the address of server 0's replica: then
   * processes can join after server 0 has died. While this node joins, it repeats the look-up of an unknown host. */
  char coordinator[256];
  /* Name of the fabric: it refuses nodes with another name. "": "mlfab". "NAME~N" is restart N of the job NAME: its
   * processes end those of an earlier start (FENCED). */
  char job[64];
  /* --- the key: without a key a node uses only Unix sockets and shared memory of this user --- */
  /* The same on all nodes: 16 to 128 printable characters ("openssl rand -hex 32"); "": none. Both ends of every
   * connection prove that they have it. A node with another key or none is refused (MLFAB_ERR_JOB). Every frame then
   * has an authentication tag, except over Unix sockets and shared memory. "NEW,OLD" accepts both keys and prefers
   * NEW. mlfab-run makes a key for each run. Nothing is encrypted: extras/mlfab_tls.h is a transport that encrypts.
   * Price: 0.2 s of processor time a GB at each end, 0.6 s without AVX2; over loopback 2 GB/s instead of 4 to 5. */
  char key[264];
  /* Instead of `key`: a file of this user that no other can read, with one or two lines, each a key; or a function.
   * mlfab_open asks once. The function comes before the file, the file before `key`. */
  char key_file[256];
  mlfab_key_fn key_from;
  void *key_user;          /* passed to key_from */
  uint32_t allow_insecure; /* 1: allow TCP without a key */
  /* --- time --- */
  uint32_t progress;   /* MLFAB_PROGRESS_* */
  uint64_t timeout_ns; /* default deadline (section 1), joining included; 0: 300 s */
  /* --- telemetry: section 11; "": none --- */
  char log[256];       /* "LEVEL" (error, warn, info, debug), or "LEVEL:FILE" */
  char metrics[256];   /* a file */
  char trace[256];     /* a file */
  uint64_t metrics_ns; /* interval between two writes of the metrics; 0: 1 s; at least 10 ms */
  /* --- checkpoints: section 7. Server 0's first three members are used --- */
  /* A directory ("": mlfab_checkpoint names one). A server that opens makes an empty file there and removes it: CONFIG
   * if that fails. It skips this test for a URL, or if env.files is the caller's. */
  char checkpoint_dir[256];
  uint64_t checkpoint_commits; /* server 0 begins a checkpoint after so many commits; 0: never */
  uint32_t checkpoint_keep;    /* how many checkpoints stay in the directory; 0: 2 */
  uint32_t history; /* servers: the model begins as the newest checkpoint of this one; 0: of any */
  /* Worker 0: as mlfab_restore with this directory, before anything else; "": a new model. Logs and errors show
   * checkpoint_dir and resume, so a URL with a user or a password is refused (CONFIG). */
  char resume[256];
  /* --- growth: docs/growth.md --- */
  /* 1: this process joins a running fabric as one more worker, or with roles MLFAB_ROLE_SERVER as one more server.
   * Server 0 gives it a rank, and tells workers, workers_max, servers, servers_max, dedicated and scheduler, which are
   * ignored here. Not with mlfab_open_start. */
  uint32_t join;
  /* The largest number of workers at a time; the same on all nodes. 0: workers. With collectives at most 1,024. Price:
   * about 4 KB for each at a server, and 16 bytes at a worker. */
  uint32_t workers_max;
  uint32_t servers_max; /* the same for dedicated servers; price: 3 KB for each at every node */
  /* --- servers that fail: docs/replicas.md --- */
  /* 1: each dedicated server has a replica in a process of its own (MLFAB_ROLE_REPLICA). Needs scheduler =
   * MLFAB_SCHEDULER_OWN. The same on all nodes. */
  uint32_t replicas;
  /* Servers: the largest distance |w_s - w_r| between a shard's weights and the replica's, in the Euclidean norm. 0:
   * both copies have all that anyone sees of the model. HUGE_VAL: no limit. */
  double div_max;
  /* Servers, replicas and the scheduler: an existing directory in which each keeps its votes; mlfab_open returns IO if
   * it is not writable. "": a process that starts again votes only after both others have told it their state. */
  char vote_dir[256];
  uint32_t ack; /* workers: MLFAB_ACK_* of pushes whose options set none; 0: MLFAB_ACK_APPLIED */
  /* --- fabrics with a scheduler --- */
  uint32_t scheduler; /* MLFAB_SCHEDULER_*; the same on all nodes */
  /* How many sums or models this worker may add up or pass on for others at a time, at most 64. Each takes the memory
   * of one shard from its first use on. 0: 2, or none with MLFAB_PROGRESS_HAND; ~0: none. */
  uint32_t accumulators;
  /* Collectives. 1: hosts with more bandwidth come first in the order of members. Server 0's value is used; with 1 the
   * other nodes measure their links. A change takes effect with the next epoch. */
  uint32_t order_by_rate;
  mlfab_schedule schedule; /* server 0's is used; size 0: defaults */
  /* --- the network --- */
  /* Address to listen at, like coordinator; "": the transport chooses. Over TCP that is every address of the host.
   * Others get the address at which this node called server 0, and those of interfaces that are up, have a carrier and
   * are not link-local. */
  char listen[256];
  char ifname[256]; /* interfaces for TCP, in NCCL's syntax: "eth", "^docker", "=eth0,eth1" */
  /* MLFAB_USE_* bits; 0: shared memory within a host and TCP between hosts, or only `transport` if it is set. */
  uint32_t transports;
  uint32_t no_payload_crc; /* 1: no CRC32C of payloads on TCP; headers keep theirs */
  /* A transport of the caller's, borrowed until close. It is opened beside those of `transports`, and is preferred if
   * it reaches a peer. */
  const mlfab_transport *transport;
  void *transport_user; /* passed to its open; with MLFAB_USE_MPI: MPI_Comm *, or NULL */
  uint64_t host;        /* nodes with the same number share network links; 0: the address tells */
  /* 1: MPI sends large updates and large data of plain collectives from the caller's buffers, without a copy. Price: a
   * request that was cancelled, or has failed, stays open until MPI releases its buffers (mlfab_transport.h). */
  uint32_t mpi_lend;
  /* --- sizes; the first three are multiples of 64 --- */
  uint32_t chunk_bytes; /* largest payload of a frame; 0: 256 KiB; at most 1 MiB */
  /* A worker may send this much without a grant. 0: 256 KiB. Price: twice as much memory at the server per worker. */
  uint32_t eager_bytes;
  uint32_t block_bytes; /* a server applies an update in blocks of this size; 0: 1 MiB */
  uint32_t merge_max;   /* so many waiting small pushes become one; 0: 128, the most; 1: none */
  uint32_t kernels;     /* MLFAB_KERNELS_*; server 0 refuses a node with another value (WORLD) */
  uint64_t model_max_bytes; /* a larger model is refused; 0: 64 GiB */
  /* --- heartbeats --- */
  /* 0: 500 ms; at least 1 ms, and longer than a round trip between any two nodes. With replicas the same on all nodes
   * (WORLD). A silent peer is suspect after 3 heartbeats and dead after 5, unless silent_death_ns applies. A worker is
   * dead 2 heartbeats after its connection broke. On a slow link bytes count as heartbeats, and pieces are so small
   * that heartbeats pass between them. */
  uint64_t heartbeat_ns;
  /* How long a peer may be silent if its connection stands and its system acknowledges bytes: it was stopped, or its
   * host is overloaded. Then it is dead. 0: 30 s; at least 5 heartbeats. Rounds and collectives wait this long. */
  uint64_t silent_death_ns;
  /* A waiter polls this long, then 200 us more while it yields the processor, then sleeps. 0: 20 us; ~0: never. */
  uint64_t spin_ns;
  /* --- callbacks and servers; each may be NULL --- */
  mlfab_update_fn on_update; /* replaces the optimizer of this server */
  mlfab_pull_fn on_pull;
  mlfab_event_fn on_event;
  mlfab_condition_fn pull_condition, push_condition; /* MLFAB_SYNC_USER needs both */
  mlfab_filter_fn change_filter;                     /* a parameter filter */
  void *user;                                        /* passed to all callbacks */
  /* Servers: a device that holds this server's model (mlfab_device.h), and the `self` of its functions; both are
   * borrowed until close. NULL: the model is in memory of the host. Other nodes ignore it. */
  const mlfab_device *device;
  void *device_self;
  const mlfab_env *env; /* copied; NULL: the built-in hooks */
  uint64_t seed;        /* of random choices; 0: 1 */
  /* Fresh random bytes for the proofs of a node without mlfab_open (mlfab_node.h). mlfab_open draws them itself. */
  uint8_t entropy[32];
} mlfab_config;

/* Sets every member to its default and `size` to sizeof *config. */
MLFAB_API void mlfab_config_init(mlfab_config *config);

/* Sets one member by name: "workers", "coordinator", "transport" and so on. mlfab_setting_name lists the names, and
 * mlfab_setting_text explains each; `mlfab-run --settings` prints both. A time takes a unit (ns, us, ms, s, min, h):
 * "timeout_ms" is 2000 or "2s". Set "dedicated" or "join" before "role" server. Errors: CONFIG, with the name and the
 * value; nothing has changed then. */
MLFAB_API int mlfab_config_set(mlfab_config *config, const char *name, const char *value,
                               mlfab_error *error_p);

/* Sets members that are still at their default from the environment. The order of precedence (docs/clusters.md):
 *    MLFAB_RANK, MLFAB_WORKERS and so on: the names above in capitals
 *    RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, of torchrun
 *    the launcher's rank and size: OMPI_COMM_WORLD_*, PMI_*, and in a task of srun SLURM_PROCID and SLURM_NTASKS
 *    with workers above 1, a rank alone: PMIX_RANK, JOB_COMPLETION_INDEX
 * On one host, without a key and allow_insecure, the address is a Unix socket named after torchrun's port or the
 * launcher's job. TORCHELASTIC_RUN_ID or SLURM_JOB_ID name the job, with their counts of restarts. Over MPI only
 * MLFAB_COORDINATOR gives an address. Without any variable: a world of one. error_p may be NULL. Do not call it while
 * another thread changes the environment.
 * Errors: CONFIG, with the variable and its value (without the value of MLFAB_KEY), also for MLFAB_RANK if the number
 * of ranks is not known. */
MLFAB_API int mlfab_config_from_env(mlfab_config *config, mlfab_error *error_p);

/* Opens a node and joins the fabric. Waits until the first config.workers ranks have joined, at most
 * config.timeout_ns. A world of one (workers and workers_max 1, no dedicated server) opens at once and does no I/O.
 * error_p may be NULL; on failure it has the cause, and the ranks that were missing.
 * Errors: CONFIG, ADDRESS, ADDRESS_IN_USE, INSECURE, RANK_TAKEN, RANK_RANGE, WORLD, JOB, FENCED, PROTOCOL_OLDER/NEWER,
 * UNSUPPORTED (naming the missing part), TIMEOUT, MEMORY, IO; with config.join LIMIT (all ranks are taken). */
MLFAB_API int mlfab_open(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p);

/* mlfab_config_init, mlfab_config_from_env and mlfab_open in one call. mlfab_model_start with options NULL then takes
 * options and filter from the environment too (mlfab_model_options_from_env, mlfab_filter_from_env). Without a launcher
 * it writes one line to stderr: this is a world of one. Worker 0 writes one line for each variable MLFAB_* that nothing
 * reads and that is nearly the name of a setting. Errors: of the three. */
MLFAB_API int mlfab_open_env(mlfab **ctx_p, mlfab_error *error_p);

/* As mlfab_open, but returns before the fabric is complete. It waits for a host name to listen at. It also waits
 * while another process has the port: 5 s at most, or half of config.timeout_ns in a restart of the job. Drive the
 * context (mlfab_progress) until mlfab_is_ready returns 1. For programs without a progress thread, and the simulator.
 */
MLFAB_API int mlfab_open_start(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p);
/* Returns 1 when every rank has joined, 0 before, or the error that ended joining. error_p may be NULL. */
MLFAB_API int mlfab_is_ready(mlfab *ctx, mlfab_error *error_p);

/* Leaves the fabric and frees the context. *ctx_p becomes NULL at once; a second call returns MLFAB_ERR_CLOSED. It
 * sends the rest of begun frames, for at most two heartbeats. A worker that is a server too (dedicated 0) first serves
 * until all other workers have closed or died, at most config.timeout_ns. Open requests are forgotten, and their
 * buffers are the caller's again. Other threads may be inside calls: these calls are cancelled and return
 * MLFAB_ERR_CLOSED, and the memory is freed when the last of them has left. A thread that calls in a loop must stop at
 * MLFAB_ERR_CLOSED. A call that begins after mlfab_close has returned, with a copy of the pointer, uses freed memory:
 * no error tells of that. A process that exits without mlfab_close, with any status, is dead to the others (PEER_DEAD),
 * and mlfab-run counts it as failed. */
MLFAB_API int mlfab_close(mlfab **ctx_p);

/* Frees the context and tells nobody: to the other nodes it looks like a crash. Other threads: as mlfab_close. */
MLFAB_API int mlfab_abandon(mlfab **ctx_p);

/* Workers that come and go (docs/growth.md). With workers_max above workers, more workers may join at any time: by
 * config.join, or with a rank from workers to workers_max - 1. Calls of the others neither fail because of a joiner nor
 * wait for it before it counts. Rounds count it from the end of its mlfab_model_start on, collectives and barriers from
 * its first call on. So call mlfab_model_start first. A worker leaves with mlfab_finish and mlfab_close; then another
 * process may take its rank. A process that takes the rank of a dead worker is admitted in the same way. Arrays by rank
 * have workers_max entries.
 *
 * Servers that come and go (docs/growth.md). With servers_max above servers, more dedicated servers may join at any
 * time. mlfab_servers lists them. mlfab_set_servers gives slices to them, and takes slices away from a server that
 * leaves. Server 0 stays. A server that dies with slices takes them with it. All servers need the same callbacks and
 * switches.
 *
 * Servers that fail (docs/replicas.md). With config.replicas each dedicated server has a replica, a process with a copy
 * of its shard. The fabric outlives the death of either copy, and of the scheduler: no call of a worker fails because
 * of it. Calls that need the server wait for 5 to 8 heartbeats, until the other copy serves. If two of the three are
 * lost, or the copy that is left was not in sync, calls fail with PEER_DEAD after 20 heartbeats: begin again from a
 * checkpoint. Without replicas the death of a server ends the training (PEER_DEAD).
 * A push that was answered as MLFAB_ACK_DURABLE stays when one server is lost. Of APPLIED pushes a server takes at most
 * div_max with it: stats.updates_lost and MLFAB_EVENT_UPDATES_LOST tell each worker how many of its own. An update
 * without an answer is sent again, and applied once.
 */

/* This node's worker rank (-1 on a dedicated server), and the numbers of ranks for workers (config.workers_max) and for
 * servers (config.servers_max). Each output may be NULL. */
MLFAB_API int mlfab_rank(const mlfab *ctx, int32_t *rank_p, uint32_t *workers_p,
                         uint32_t *servers_p);

/* The servers that are here, as far as this node knows: *count_p of them, the first `room` numbers in `servers` (NULL
 * with room 0), ascending. mlfab_set_servers can name these. Sends nothing. */
MLFAB_API int mlfab_servers(mlfab *ctx, uint32_t *servers, uint32_t room, uint32_t *count_p);

/* The last error in full of the calls that this thread made on this context. If it had none, or has failed in a call
 * on another context since: the last error of any thread. A request keeps its error until it is ended: mlfab_wait and
 * mlfab_test make it the caller's last error. */
MLFAB_API int mlfab_last_error(mlfab *ctx, mlfab_error *error_p);

/* ------------------------------------------------------------------------------------------------
 * 7. The model
 *
 * A model is a list of tensors with ids of the caller's choice. The library cuts it into slices and spreads them over
 * the servers. Every worker adds the same tensors; worker 0's options and first weights are used. A worker whose
 * tensors differ gets an error that names the first difference.
 */
/* A server changes the weights w by an update u, or by the sum u of a round. weight_decay is decoupled: first the
 * server sets w <- w + scale * weight_decay * w. (ADAM with it is AdamW.) t counts the commits that touched a slice;
 * ADAM's mhat and vhat depend on it, too. Small tensors share slices. With ADADELAY and ADAM therefore push all tensors
 * in one call, or in rounds with MLFAB_PUSH_MORE: a push for each tensor advances t too often. */
enum mlfab_optimizer_kind {
  MLFAB_OPTIMIZER_SGD = 0,      /* w <- w + scale * u */
  MLFAB_OPTIMIZER_MOMENTUM = 1, /* h <- gamma * h + scale * u; w <- w + h      (MLfabric eq. 2) */
  /* w <- w + c / sqrt(t + delay) * scale * u (MLfabric 3.1, 10.4) */
  MLFAB_OPTIMIZER_ADADELAY = 2,
  MLFAB_OPTIMIZER_ADAM = 3, /* w <- w + scale * mhat / (sqrt(vhat) + epsilon) */
  /* v <- beta2 * v + (1 - beta2) * u^2; w <- w + scale * u / (sqrt(v) + epsilon) */
  MLFAB_OPTIMIZER_RMSPROP = 4,
  MLFAB_OPTIMIZER_ADAGRAD = 5,  /* v <- v + u^2; w <- w + scale * u / (sqrt(v) + epsilon) */
  MLFAB_OPTIMIZER_NESTEROV = 6, /* h <- gamma * h + scale * u; w <- w + gamma * h + scale * u */
  /* c <- beta1 * m + (1 - beta1) * u; w <- w + scale * sign(c); m <- beta2 * m + (1 - beta2) * u */
  MLFAB_OPTIMIZER_LION = 7,
  MLFAB_OPTIMIZER_COUNT /* no optimizer: their number */
};

/* Consistency (FluentPS Alg. 1, Table III): when a server answers a pull, and when a round is complete. A server
 * counts the iterations of every worker. V_train is the number of complete iterations: every live worker has pushed
 * them, or with DROP `need` of them have. A worker's pull after i pushes asks for the result of iteration i - 1. BSP
 * and DROP are rounds: the server adds updates up, and applies the sum in one commit when the round is complete. With
 * the others it applies each update when it arrives, and only pulls wait. */
enum mlfab_sync_kind {
  MLFAB_SYNC_ASYNC = 0, /* the server answers every pull at once */
  /* round i is complete when every live worker has pushed its i-th update; a pull after i pushes waits for the commit
   * of round i */
  MLFAB_SYNC_BSP = 1,
  /* a pull waits while the slowest worker is more than `staleness` iterations behind */
  MLFAB_SYNC_SSP = 2,
  /* SSP with a threshold between staleness and staleness_max: one more after a round in which pulls had to wait, one
   * less after 8 rounds in which none had to */
  MLFAB_SYNC_DSPS = 3,
  /* a round is complete with `need` updates; a later one is dropped (MLFAB_ERR_DROPPED), and its worker goes on with
   * the open round */
  MLFAB_SYNC_DROP = 4,
  MLFAB_SYNC_PSSP = 5, /* SSP, but a pull past the threshold waits only with probability `chance` */
  /* with probability alpha / (1 + e^(staleness - k)), k = i - V_train */
  MLFAB_SYNC_PSSP_DYNAMIC = 6,
  MLFAB_SYNC_USER = 7, /* pull_condition and push_condition of the servers' config decide */
  MLFAB_SYNC_COUNT     /* no model: their number */
};

typedef struct mlfab_sync {
  uint32_t size;
  uint32_t kind;         /* MLFAB_SYNC_* */
  int64_t staleness;     /* s, at least 0; SSP with 0 lets nobody run ahead, as BSP */
  int64_t staleness_max; /* DSPS; 0: 4 * staleness + 4 */
  /* DROP, required: N_t, number of updates that complete a round, 1..workers; capped at the number of live workers */
  uint32_t need;
  /* 1: soft barrier: the server answers a waiting pull as soon as V_train allows. 0: lazy execution: it answers when
   * the pull's own iteration is complete, so the pull sees all of that iteration */
  uint32_t soft;
  uint32_t only_fastest; /* PSSP. 1: only a worker that nobody is ahead of may have to wait */
  uint32_t keep_late; /* DROP. 1: a late update is added to the open round, as FluentPS prints it */
  double chance;      /* PSSP: c, 0 to 1; 0: no pull waits */
  /* PSSP_DYNAMIC: at least 0; 0: the significance |g| / |w| of the worker's last update, on each server's part of the
   * model */
  double alpha;
} mlfab_sync;

/* The arguments of a condition. `iteration`, `fastest` and `slowest` count whole updates: a pull with iteration i + 1
 * asks for the result of iteration i. */
typedef struct mlfab_sync_state {
  uint32_t server;
  uint32_t worker;           /* the one that pulls; of a push_condition: the one that pushed last */
  uint64_t iteration;        /* how many updates `worker` has pushed */
  uint64_t fastest, slowest; /* most and fewest updates that a live worker has pushed */
  uint64_t v_train;          /* iterations complete */
  uint32_t arrived;          /* live workers that have pushed iteration v_train */
  uint32_t members;          /* live workers that still push */
  double significance;       /* |g| / |w| of the worker's last update; negative: not known */
} mlfab_sync_state;

/* How values of float tensors travel. Memory holds, and sums are made in, the tensor's own type. */
enum mlfab_half {
  MLFAB_HALF_NONE = 0, /* unchanged */
  MLFAB_HALF_F16 = 1,  /* IEEE half precision; values beyond +-65504 are sent as +-65504 */
  MLFAB_HALF_BF16 = 2  /* the upper half of a float32 */
};

typedef struct mlfab_model_options {
  uint32_t size;
  uint32_t optimizer; /* MLFAB_OPTIMIZER_* */
  uint32_t sync; /* MLFAB_SYNC_*, short for consistency with its members at 0. Set one of the two */
  /* 1: a round's sum is divided by the number of its updates (rounds; not with I64) */
  uint32_t mean;
  uint32_t deterministic; /* 1: a round adds in the order of ranks, not of arrival (BSP) */
  uint32_t slices;        /* 0: 16 per server; at most 4,096 */
  uint32_t ghost;         /* 1: tensors have a length but no bytes (simulator only) */
  uint32_t active;        /* only the first so many servers hold slices at first; 0: all */
  double gamma;           /* MOMENTUM and NESTEROV, in [0, 1); initially 0.9 */
  double adadelay_c;      /* ADADELAY, positive; initially 1 */
  double beta1, beta2;    /* ADAM and LION, and beta2 RMSPROP; in [0, 1); initially 0.9 and 0.999 */
  double epsilon;         /* positive with every optimizer but SGD; initially 1e-8 */
  double weight_decay;    /* initially 0 */
  /* The consistency model with its members; all 0: as `sync` says. */
  mlfab_sync consistency;
  /* Version tags (TDF 3): this many elements share a tag, the number of the commit that changed them last. A pull
   * then brings only what changed since the last pull. A power of two up to 65,536; 0: no tags. Price: the model once
   * more at every worker, and 4 bytes a tag at the servers; 1, as in the paper, costs as much as the model, 256 next
   * to nothing. */
  uint32_t tags;
  uint32_t pull_half; /* MLFAB_HALF_*: how parameters travel in pulls */
  /* Parameter filter (TDF P-SMP): the server discards a change of an element by less than this share of its value,
   * divided by 1 + change_decay * ln(t), t the iteration. It always changes an element that is 0. 0: no filter. Neither
   * this filter nor pull_half takes I64. */
  double change_threshold, change_decay;
} mlfab_model_options;

/* The initial values above; 0 in all other members. Options without it have epsilon 0, which is refused (CONFIG) for
 * an optimizer other than SGD. */
#define MLFAB_MODEL_OPTIONS_INIT                                                       \
  {                                                                                    \
    sizeof(mlfab_model_options), 0, 0, 0, 0, 0, 0, 0, 0.9, 1.0, 0.9, 0.999, 1e-8, 0.0, \
        {0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0}, 0, 0, 0.0, 0.0                             \
  }
/* Sets *options to the same. */
MLFAB_API void mlfab_model_options_init(mlfab_model_options *options);

/* Sets one member by name, as mlfab_config_set: "optimizer" (its names are those of MLFAB_OPTIMIZER_*, in small
 * letters), "consistency" (async, bsp, ssp, dsps, drop, pssp, pssp_dynamic, user), "gamma", "staleness" and so on. */
MLFAB_API int mlfab_model_options_set(mlfab_model_options *options, const char *name,
                                      const char *value, mlfab_error *error_p);
/* Sets members that are still at their initial value from the environment: MLFAB_OPTIMIZER and so on, so that whoever
 * runs the program can choose. Errors: CONFIG, with the variable. */
MLFAB_API int mlfab_model_options_from_env(mlfab_model_options *options, mlfab_error *error_p);

/* Adds a tensor of `count` elements as `id` (any number but MLFAB_ALL). Before mlfab_model_start; sends nothing.
 * Errors: ARGUMENT, TENSOR (the id is used), STATE, LIMIT. */
MLFAB_API int mlfab_tensor_add(mlfab *ctx, uint32_t id, int dtype, uint64_t count);

/* Agrees on the model with the servers and the other workers, and waits for them. bufs: the first weights. Worker 0's
 * are sent, and overwrite those of the other workers. bufs NULL and n 0: zeros; nothing is written. options NULL: all
 * initial, or as the environment says after mlfab_open_env. Cost: the model's bytes once for each worker. The worker
 * checks the options at once. A server may still refuse worker 0's model, and then every worker gets the error: MEMORY,
 * or UNSUPPORTED (MLFAB_SYNC_USER without conditions, a delay bound with rounds, an optimizer that div_max excludes).
 * After an error call it again.
 * Errors: MODEL (with the first difference), ARGUMENT and CONFIG (with the member), STATE, UNSUPPORTED, LIMIT,
 * TIMEOUT, PEER_DEAD, MEMORY. */
MLFAB_API int mlfab_model_start(mlfab *ctx, const mlfab_model_options *options,
                                const mlfab_buf *bufs, uint32_t n);

/* Checkpoints. Every server writes its shard to a file in one directory: weights, optimizer state, open rounds,
 * versions, and the numbers of applied updates. Then server 0 writes the manifest, which makes the checkpoint whole,
 * and removes older checkpoints. A process or a host may fail at any time: the newest whole checkpoint can be loaded.
 * Training goes on meanwhile: a shard's state is that between two commits. Servers choose these commits independently:
 * a shard may lack an update that another shard has, and a run that resumes has lost that part. To avoid this loss,
 * push nothing during the checkpoint. Servers on several hosts need a shared directory.
 *
 * A history is a random number of a new model, and all its checkpoints have it. A replica that takes over and a run
 * that resumes keep it. A checkpoint removes only files of its own history: older checkpoints, and failed attempts. Its
 * number is larger than any in the directory. Two runs at the same time need two directories.
 * Memory: the shard's weights once more, from the first checkpoint on; the optimizer state at most once more, during
 * the writing. */
typedef struct mlfab_checkpoint_options {
  uint32_t size;
  uint32_t keep; /* how many stay in the directory, this one included; 0: server 0's config */
  /* Exists already; NULL: server 0's config.checkpoint_dir. Below 256 bytes. No user or password, if it is a URL. */
  const char *dir;
  uint64_t timeout_ns;
} mlfab_checkpoint_options;

typedef struct mlfab_checkpoint_info {
  uint32_t size;
  uint32_t servers; /* how many shards it has */
  uint64_t number;  /* from 1, ascending in a directory; 0: there is none */
  uint64_t version; /* the largest of a slice */
  uint64_t bytes;   /* of the shards' files */
} mlfab_checkpoint_info;

/* Makes a checkpoint of the model, and waits until it is whole. On any worker. options and info_p may be NULL.
 * Errors: ARGUMENT, STATE (before mlfab_model_start; no directory), AGAIN (another checkpoint is being made, slices are
 * moving), IO with the server, the file and the system's error; UNSUPPORTED (ghost tensors); TIMEOUT; PEER_DEAD with
 * the server; MEMORY. After an error the older checkpoints are as before, and the files of the attempt are removed;
 * files of a killed process of this history go before the next attempt. The log of server 0 has one line for each kind
 * of failure and minute.
 * Cost: two small frames for each server; the shards are written. */
MLFAB_API int mlfab_checkpoint(mlfab *ctx, const mlfab_checkpoint_options *options,
                               mlfab_checkpoint_info *info_p);
MLFAB_API int mlfab_checkpoint_start(mlfab *ctx, const mlfab_checkpoint_options *options,
                                     mlfab_checkpoint_info *info_p, mlfab_request *request_p);

/* Before mlfab_model_start, on worker 0: the model will begin as the newest whole checkpoint in `dir`, with any number
 * of servers and workers. `dir` "": it will not. Sends nothing that waits. mlfab_model_start then ignores the first
 * weights, and bufs get the model's. Tensors and optimizer must be those of the checkpoint, and so must its
 * consistency, mean and number of slices where they are given. Iterations go on from V_train; every worker is a new
 * process to the servers. Errors of mlfab_model_start then: CHECKPOINT (none is whole: the file, and why), MODEL (the
 * first tensor that differs), CONFIG (the option that differs), UNSUPPORTED (a consistency model of conditions that a
 * server does not have), IO. A damaged or incomplete checkpoint is logged, and the next older checkpoint is taken.
 * Errors: STATE (the model was started, or this is not worker 0), ARGUMENT (dir is NULL or too long). */
MLFAB_API int mlfab_restore(mlfab *ctx, const char *dir);

/* The checkpoint that this worker's model began as; number 0: none. Errors: STATE before mlfab_model_start. */
MLFAB_API int mlfab_restored(mlfab *ctx, mlfab_checkpoint_info *info_p);

/* Pulls the model and writes it to `path` with env.store, as a safetensors file whose tensors are named by their ids.
 * On any worker. Errors: of mlfab_pull; IO. Memory: the model once. */
MLFAB_API int mlfab_save(mlfab *ctx, const char *path);

/* Reads tensors from a safetensors file into the caller's buffers: first weights for mlfab_model_start. After
 * mlfab_tensor_add; sends nothing. names[i] is the name of bufs[i] in the file; names NULL: the tensor's id, as
 * mlfab_save writes it. Element types and counts must be those of the tensors; shapes do not matter. With MLFAB_ALL the
 * names are the ids. A call that fails may have written some buffers.
 * Errors: ARGUMENT, TENSOR (not added, or not in the file), DTYPE, SHAPE, IO, CHECKPOINT (the safetensors file is
 * damaged). */
MLFAB_API int mlfab_load(mlfab *ctx, const char *path, const mlfab_buf *bufs, uint32_t n,
                         const char *const *names);

/* ------------------------------------------------------------------------------------------------
 * 8. Push and pull
 *
 * An update is identified by (worker, incarnation, sequence number). A server applies it at most once, whatever is
 * lost, repeated or restarted. `bufs` is a list of whole tensors, or one buffer of MLFAB_ALL. The list is one
 * operation: a server applies all of it in one step, or nothing.
 */
enum mlfab_push_flags {
  /* A later push belongs to the same iteration. The pushes up to the first one without this flag count as one update,
   * and in a round they are applied together. Outside of rounds the server applies each when it arrives. */
  MLFAB_PUSH_MORE = 1
};

typedef struct mlfab_push_options {
  uint32_t size;
  /* 1, set by MLFAB_PUSH_OPTIONS_INIT. In options without it, scale 0 is a forgotten member: refused (ARGUMENT). */
  uint32_t initialised;
  /* SGD: w <- w + scale * u. For a gradient it is minus the learning rate. Initially 1; 0 means 0. A whole number
   * when the model has an I64 tensor. */
  double scale;
  uint32_t flags;   /* MLFAB_PUSH_* */
  uint32_t ack;     /* MLFAB_ACK_*: when the push is done; 0: as config.ack says */
  double clip_norm; /* > 0: where u's global norm n is larger, scale *= clip_norm / n; no I64 */
  uint64_t version; /* that the update was computed from, plus one; 0: the last one pulled */
  uint64_t timeout_ns;
  /* Sends an update again that ended IN_DOUBT, WITHDRAWN or DROPPED: its sequence number (result.seq). 0: a new update.
   * A filtered update is sent as it was, whatever the buffers hold now; STATE when the library no longer has it. */
  uint64_t retry_seq;
  double norm; /* u's global norm, for on_update; 0: not known */
  /* The expected number of this worker's iteration, plus one: a mismatch returns ARGUMENT with both numbers. 0: not
   * checked. */
  uint64_t iteration;
} mlfab_push_options;

/* scale and `initialised` are 1, all other members 0. */
#define MLFAB_PUSH_OPTIONS_INIT \
  { sizeof(mlfab_push_options), 1, 1.0, 0, 0, 0.0, 0, 0, 0, 0.0, 0 }
/* Sets *options to the same. */
MLFAB_API void mlfab_push_options_init(mlfab_push_options *options);

enum mlfab_pull_flags {
  MLFAB_PULL_FULL = 1, /* with tags: fetch all elements, whatever the cache has */
  /* with tags: the buffers still hold the data of the last pull, so this pull writes only the changed elements */
  MLFAB_PULL_KEPT = 2
};

typedef struct mlfab_pull_options {
  uint32_t size;
  uint32_t flags; /* MLFAB_PULL_* */
  uint64_t timeout_ns;
} mlfab_pull_options;

/* How a request ended. */
typedef struct mlfab_result {
  int32_t status;   /* 0 or MLFAB_ERR_*; the same as the call's return value */
  int32_t rank;     /* the rank that caused it, or MLFAB_NO_RANK */
  uint64_t seq;     /* push: the update's sequence number */
  uint64_t version; /* the largest slice version: after the commit, or of the pulled slices */
  uint64_t delay;   /* push: the largest delay over its slices (0 in BSP rounds) */
  uint32_t applied; /* push: number of servers that applied it, */
  uint32_t refused; /* and of those that did not */
  uint64_t waited_ns;
} mlfab_result;

/* Pushes an update and waits until every server has applied or refused it; in a round, has added it to the sum; with
 * MLFAB_ACK_DURABLE, until the replicas have it, too. The library only reads the buffers. options and result_p may be
 * NULL.
 * Errors: usage codes before anything is sent, UNSUPPORTED for MLFAB_ACK_DURABLE without replicas among them;
 * NOT_FINITE (NaN or infinity: the model is unchanged); DROPPED (by the delay bound, or too late for its round);
 * TIMEOUT, IN_DOUBT (see mlfab_push_status); PARTIAL; PEER_DEAD with the server; CALLBACK.
 * Cost: the update's bytes up, one small frame back from each server. */
MLFAB_API int mlfab_push(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_push_options *options, mlfab_result *result_p);

/* The same without waiting. The library copies updates of up to 64 KiB: their buffers are the caller's again on return.
 * request_p NULL: nobody waits for the push; mlfab_flush returns its failure, and the counters show it.
 * Errors: usage codes; AGAIN (a limit of section 1 is reached): wait for a request, or call mlfab_flush. */
MLFAB_API int mlfab_push_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_push_options *options, mlfab_request *request_p);

/* Pushes `count` elements of one tensor: `values`, of the tensor's type, at ascending `indices`. The library copies
 * both before it returns. Filters do not apply. It counts as an update: an iteration that pushes other tensors too
 * sets MLFAB_PUSH_MORE in all pushes but the last.
 * Errors: of mlfab_push; ARGUMENT with the first index that is out of range, repeated or not ascending; UNSUPPORTED
 * (ghost tensors). Cost: the values, 2 bytes an index or one bit an element, whichever is less, and 24 bytes for each
 * stretch of up to 65,536 elements. */
MLFAB_API int mlfab_push_sparse(mlfab *ctx, uint32_t tensor, const uint64_t *indices,
                                const void *values, uint64_t count,
                                const mlfab_push_options *options, mlfab_result *result_p);
MLFAB_API int mlfab_push_sparse_start(mlfab *ctx, uint32_t tensor, const uint64_t *indices,
                                      const void *values, uint64_t count,
                                      const mlfab_push_options *options, mlfab_request *request_p);

typedef struct mlfab_filter_info {
  uint32_t tensor, dtype;
  uint64_t first, count; /* elements of the tensor */
  uint64_t t;            /* the iteration, from 1 */
} mlfab_filter_info;

/* A filter of this worker's updates: only a part of each travels (TDF 4.2, 4.3). The library adds the update to a
 * residual. It holds back an element below threshold / (1 + decay * ln t), t the iteration, if the random draw selects
 * it: the element stays in the residual for the next push. Exact zeros never travel. With `half` the other elements are
 * rounded. Beyond +-65504 they are sent as +-65504 and counted. The residual keeps the part that this cuts off, and
 * elements that round to zero, but no ordinary rounding errors. Send an update that ended IN_DOUBT, WITHDRAWN or
 * DROPPED again with retry_seq: it is not folded back into the residual. */
typedef struct mlfab_filter {
  uint32_t size;
  uint32_t half;    /* MLFAB_HALF_* */
  double threshold; /* phi; 0: holds nothing back; HUGE_VAL: every element is below it */
  double decay;     /* d, at least 0 */
  /* p, 0 to 1: probability that the draw selects an element; 0: 1. Below 1 it needs a threshold; 1 with threshold
   * HUGE_VAL is refused: nothing would travel */
  double drop;
  double top; /* 0 to 1: only this share of the elements travels, the largest; 0: no limit */
  mlfab_filter_fn select; /* the user's own filter, after the others; or NULL */
  void *user;
} mlfab_filter;

/* Sets the filter of a tensor's updates, or of all tensors' (MLFAB_ALL), from this worker's next push on. filter
 * NULL: none; the residual goes with the next push. Memory: the tensor's bytes for the residual, and the
 * encoded update while it travels; the buffers of mlfab_push_start are then the caller's again on return. Errors
 * (nothing has changed): ARGUMENT, TENSOR, DTYPE (int64; with MLFAB_ALL when any tensor is), UNSUPPORTED (ghost
 * tensors), STATE before mlfab_model_start, MEMORY. */
MLFAB_API int mlfab_set_filter(mlfab *ctx, uint32_t tensor, const mlfab_filter *filter);

/* As mlfab_model_options_set and _from_env: "filter_threshold", "filter_decay", "filter_drop", "filter_top",
 * "filter_half" (none, f16, bf16). */
MLFAB_API int mlfab_filter_set(mlfab_filter *filter, const char *name, const char *value,
                               mlfab_error *error_p);
MLFAB_API int mlfab_filter_from_env(mlfab_filter *filter, mlfab_error *error_p);

/* Pulls whole tensors into the caller's buffers. Each slice has one version. The consistency model says when the
 * server answers: with BSP after the commit of the round of this worker's last push. With tags, `data` of a buffer
 * may be NULL: the pull then only updates the cache (mlfab_cached). A pull that fails may have written some buffers.
 * TIMEOUT names the slowest worker. mlfab_pull_start needs request_p.
 * Errors: of mlfab_push; ARGUMENT also for flags without tags; CALLBACK also when on_pull refused the pull, or
 * on_update the round that it waited for; AGAIN (8 pulls are under way).
 * Cost: one small frame up and the tensors' bytes down, for each server. */
MLFAB_API int mlfab_pull(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_pull_options *options, mlfab_result *result_p);
MLFAB_API int mlfab_pull_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_pull_options *options, mlfab_request *request_p);

#define MLFAB_VIEWS_MAX 4

/* Consecutive elements of a tensor, contiguous in memory. */
typedef struct mlfab_view_part {
  const void *data;      /* read only, aligned to the element type */
  uint64_t first, count; /* elements of the tensor, or with MLFAB_ALL of the model */
  uint32_t tensor, dtype;
} mlfab_view_part;

/* Set `size` to sizeof (mlfab_view); the call fills in the rest. */
typedef struct mlfab_view {
  uint32_t size;
  uint32_t copied;  /* 1: the parts are a copy */
  uint64_t id;      /* 0 after mlfab_view_release */
  uint64_t version; /* the largest version of its slices */
  /* In the order of the model; the parts of a tensor follow each other. The server stores
   * slices in blocks (config.block_bytes); a part is one block, or several that are neighbours in memory. */
  const mlfab_view_part *parts;
  uint32_t nparts;
  uint32_t reserved;
} mlfab_view;

/* A pull that is read in place: view_p->parts point to the weights in the memory of servers of this host, mapped read
 * only. They stay as they are until mlfab_view_release or mlfab_close, also if others push or the server dies. (If the
 * link breaks while the server is out of memory, they may change.) A forked child does not have them. `data` of the
 * buffers is ignored. Versions and consistency: as mlfab_pull. The parts are a copy, one for each tensor, if the
 * weights cannot be read in place: another host, another transport than shared memory, a model on a device, stretches
 * below 32 KiB, no descriptors left. *view_p is written when the request ends with 0, and must be there until then.
 * options: no flags.
 * Errors: of mlfab_pull; LIMIT (MLFAB_VIEWS_MAX of this worker are out); UNSUPPORTED (ghost tensors).
 * Cost: one small frame up and one down for each server, a few for a model of many blocks. A view keeps the server's
 * blocks of its version: at most MLFAB_VIEWS_MAX times the model more for each worker. */
MLFAB_API int mlfab_pull_view(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                              const mlfab_pull_options *options, mlfab_view *view_p);
MLFAB_API int mlfab_pull_view_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                                    const mlfab_pull_options *options, mlfab_view *view_p,
                                    mlfab_request *request_p);

/* Ends a view: its parts must not be read any more. Waits for nothing.
 * Errors: ARGUMENT (released before, of another context, or no view). */
MLFAB_API int mlfab_view_release(mlfab *ctx, mlfab_view *view);

/* With tags: a tensor, or with MLFAB_ALL the model, in the library's cache, as the last pull left it; zeros where
 * nothing was pulled. The memory is valid until the context is closed, and pulls write to it while they are under
 * way. Either output may be NULL. Errors: STATE (no tags, or before mlfab_model_start), TENSOR. */
MLFAB_API int mlfab_cached(mlfab *ctx, uint32_t tensor, const void **data_p, uint64_t *count_p);

/* Polls a request. *done_p: 1 when it has finished, and this call has ended it; else 0. How it ended is
 * result_p->status, not what this call returns; result_p may be NULL. Errors: REQUEST (unknown, or ended before). */
MLFAB_API int mlfab_test(mlfab *ctx, mlfab_request request, int *done_p, mlfab_result *result_p);

/* Waits for a request at most timeout_ns (0: its own deadline), ends it, and returns its status. result_p may be NULL.
 * When timeout_ns is shorter than the request's deadline and passes, it returns TIMEOUT, and the request stays open. */
MLFAB_API int mlfab_wait(mlfab *ctx, mlfab_request request, uint64_t timeout_ns,
                         mlfab_result *result_p);

/* Calls fn once when the request has finished, which also ends the request: test and wait do not know it any more. If
 * it has finished already, the call comes soon, possibly before mlfab_on_done returns. A context calls one function
 * at a time, in the order in which they were given. Inside fn, calls that do not wait are allowed: _start forms,
 * test, cancel, on_done. Calls that wait, mlfab_close and mlfab_abandon return MLFAB_ERR_STATE there. mlfab_close
 * does not call the functions of requests that are still open.
 * Errors: REQUEST (unknown, or it has a function), ARGUMENT (fn is NULL), MEMORY. */
typedef void (*mlfab_done_fn)(void *user, mlfab_request request, const mlfab_result *result);
MLFAB_API int mlfab_on_done(mlfab *ctx, mlfab_request request, mlfab_done_fn fn, void *user);

/* Cancels a request; its buffers are the caller's again on return (with mpi_lend: when it has been ended). End it with
 * test or wait. They return CANCELLED (not sent, or dropped by the server), 0 (too late: applied), or IN_DOUBT (the
 * server has not said: ask mlfab_push_status later). Cancelling a collective ends all open collectives, on all workers
 * (section 10). */
MLFAB_API int mlfab_cancel(mlfab *ctx, mlfab_request request);

/* The fate of this node's update `seq`. *status_p: 0 (applied at all servers), IN_DOUBT (still open), WITHDRAWN (no
 * server applied it), PARTIAL (some servers applied it), or the code of its refusal. The library remembers the last 256
 * updates. */
MLFAB_API int mlfab_push_status(mlfab *ctx, uint64_t seq, int *status_p);

/* Waits until every push of this node has finished. Returns the first failure of a push that was started without
 * request_p. */
MLFAB_API int mlfab_flush(mlfab *ctx, uint64_t timeout_ns);

/* A descriptor for poll, epoll or a GUI loop. It is readable when mlfab_progress has something to do, or when
 * something moved inside another call, until mlfab_progress(ctx, 0) has returned 0. The loop: while
 * (mlfab_progress(ctx, 0) == 1) {}; look after your requests; sleep on the descriptor, at most until mlfab_deadline.
 * The library owns it: do not read or close it. With a progress thread it tells that the thread moved something.
 * Errors: UNSUPPORTED (the simulator, systems other than Linux). */
MLFAB_API int mlfab_fd(mlfab *ctx, int *fd_p);

/* Moves data for at most timeout_ns; 0: does not wait. Returns 1 when something moved, 0 when not, or an error. Only
 * MLFAB_PROGRESS_HAND needs it. */
MLFAB_API int mlfab_progress(mlfab *ctx, uint64_t timeout_ns);

/* The time on env.clock by which mlfab_progress must be called. For MLFAB_PROGRESS_HAND. */
MLFAB_API int mlfab_deadline(mlfab *ctx, uint64_t *at_ns_p);

/* ------------------------------------------------------------------------------------------------
 * 9. The fabric: barrier, broadcast, finish, allreduce, changes while it runs
 */

/* Waits until every live worker is here. Server 0 counts them: it works without MLFAB_WITH_COLL, for any number of
 * workers, and the death of a worker does not fail it. Barriers match in the order of calls, with mlfab_barrier_start
 * too. After a TIMEOUT the next call is the same barrier. It uses timeout_ns of the options; NULL: none.
 * Errors: TIMEOUT with the first rank that is missing; PEER_DEAD (server 0); AGAIN (too many requests are open). */
MLFAB_API int mlfab_barrier(mlfab *ctx, const mlfab_collective *options);

/* Copies `bytes` bytes, at most model_max_bytes, from worker `root` to all others, from worker to worker. A
 * collective (section 10): every worker calls it, in the same order, with the same root and size. It uses algorithm,
 * timeout_ns, tag and inputs of the options; NULL: none.
 * Errors: of mlfab_allreduce_list; RANK_RANGE (root); ARGUMENT (0 bytes; root does not take part). */
MLFAB_API int mlfab_broadcast(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                              const mlfab_collective *options);

/* Declares that this worker has no more data. Rounds, barriers and collectives of the others go on without it, and
 * their calls do not fail. Its pulls still work; its later pushes and collectives return MLFAB_ERR_STATE. In
 * collectives it takes effect between two calls, the same two on every worker. To earlier calls that this worker never
 * makes the library contributes the operation's identity (0 to a sum), and a mean is divided by the number of the
 * others. Earlier calls that need its data fail with MLFAB_ERR_PEER_CLOSED: a broadcast from it, an allgather with a
 * block of it, a user's reducer, a call of an object (mlfab_partial.h). Waits for this worker's pushes, and until no
 * other worker needs it.
 * Errors: STATE (it has finished before), TIMEOUT, PEER_DEAD. */
MLFAB_API int mlfab_finish(mlfab *ctx, uint64_t timeout_ns);

/* The workers that take part in this worker's next collective, as far as this node knows: *count_p of them, the first
 * `room` in `ranks` (NULL with room 0). Workers that have finished are not among them. Before the first collective:
 * the first config.workers, and this one. Sends nothing. Errors: STATE (this node is not a worker). */
MLFAB_API int mlfab_present(mlfab *ctx, uint32_t *ranks, uint32_t room, uint32_t *count_p);

/* On a server: serves until every worker has closed or died. On a scheduler of its own: plans until every server has.
 * Then it returns 0. timeout_ns 0: no limit. With a progress thread it only waits.
 * Errors: TIMEOUT; STATE on other nodes. */
MLFAB_API int mlfab_serve(mlfab *ctx, uint64_t timeout_ns);

/* Adds `count` elements of every live worker's `data`, and gives all workers the sum, the same bits on every rank. A
 * collective (section 10): every worker calls it, in the same order, with the same count and type. NaN and infinity
 * are added like any number. The sum replaces the contents of `data`, which are undefined after a failure. It is
 * mlfab_allreduce_list with one buffer, and has its options (NULL: sum), errors and cost. */
MLFAB_API int mlfab_allreduce(mlfab *ctx, void *data, uint64_t count, int dtype,
                              const mlfab_collective *options);

/* The mean of one array over all workers, in place. A data-parallel trainer needs no more than this:
 *    status = mlfab_allreduce_mean(fabric, gradient, count);
 * It is mlfab_allreduce with MLFAB_F32 and MLFAB_OP_MEAN. */
MLFAB_API int mlfab_allreduce_mean(mlfab *ctx, float *data, uint64_t count);

/* Changes the consistency model while the fabric runs, from any worker: of `server`, or of all (MLFAB_ALL). The last
 * change wins. The server answers waiting pulls that the new model allows. Leaving rounds commits the open round as it
 * is. Waits until every server in question has changed. A server has one model; a slice that moves there takes it.
 * UNSUPPORTED: rounds with a delay bound; leaving rounds with `mean`; another model than BSP with `deterministic`; USER
 * without conditions there. AGAIN: another change of this worker is under way.
 * Other errors: ARGUMENT (with the member), STATE before mlfab_model_start, TIMEOUT (it may still happen), PEER_DEAD.
 * After an error some servers may have changed: call it again. */
MLFAB_API int mlfab_set_sync(mlfab *ctx, const mlfab_sync *sync, uint32_t server,
                             uint64_t timeout_ns);

/* Moves slices so that exactly the n servers of the list hold the model, balanced by bytes and with the fewest bytes
 * moved (FluentPS elastic slicing). From any worker, one at a time. Pushes and pulls of all workers wait meanwhile;
 * each update is applied once. Every worker has to pause: a worker with MLFAB_PROGRESS_HAND does so only inside a call.
 * Cost: the bytes that move, once; memory for the old and the new shard at each server meanwhile; with tags, the next
 * pull of every worker fetches all elements.
 * If the open rounds of two servers differ (mlfab_set_sync, MLFAB_SYNC_DROP, a refused update), every server commits its
 * open round as it is before slices move.
 * TIMEOUT names the worker that has not paused; the move may still happen. After other errors slices are as they were:
 * ARGUMENT (an empty list, a server twice, a wrong number), STATE before mlfab_model_start, or with the server that is
 * not here (mlfab_servers), AGAIN (another move is under way), PEER_DEAD with the server, which is dead or which a
 * worker cannot reach, UNSUPPORTED (the model needs a part that a server lacks; servers with replicas), MEMORY. */
MLFAB_API int mlfab_set_servers(mlfab *ctx, const uint32_t *servers, uint32_t n,
                                uint64_t timeout_ns);

/* Changes the delay bound and the planning options at run time, from any worker. The last change wins. Returns when it
 * is sent. Rounds drop nothing: a bound has no effect while mlfab_set_sync has chosen them. A copy of server 0 that takes
 * over keeps the change, but may lack one of server 0's last moments. Errors: ARGUMENT (delay_bound 0), STATE (no
 * scheduler), UNSUPPORTED (a bound, if mlfab_model_start chose rounds), AGAIN or PEER_DEAD (no link to server 0). */
MLFAB_API int mlfab_set_schedule(mlfab *ctx, const mlfab_schedule *schedule);

/* Overrides the measured capacity of this node's network links: bytes per second in and out, for the scheduler. From
 * the next epoch on collectives use it, too (algorithms, order_by_rate). 0: the link is cut; negative: measure again.
 * Errors: ARGUMENT (NaN or infinity), STATE (this node is no worker, and there is no scheduler). */
MLFAB_API int mlfab_set_link(mlfab *ctx, double in_bytes_per_s, double out_bytes_per_s);

/* Tells the traffic of others on this host's network link, in bytes per second: the scheduler is told the measured
 * capacity without it, at least an eighth of the capacity. It holds until the next call; 0, 0: none. speed: of the
 * link, where the system does not tell this process (in a container); 0: not known. extras/mlfab_curl.h calls it with
 * what node_exporter says.
 * Errors: ARGUMENT (negative, NaN or infinity), STATE (links are measured only with a scheduler or order_by_rate). */
MLFAB_API int mlfab_set_other_traffic(mlfab *ctx, double in_bytes_per_s, double out_bytes_per_s,
                                      double speed_bytes_per_s);

/* Describes the scheduler's last plan as text for people: for each update its aggregator, group, start, end and
 * delay, or why it was dropped, and the assumed link capacities. Writes at most `room` bytes, the final 0 included.
 * *bytes_p, unless NULL: the length of the whole text. Only on the node of the scheduler. Errors: STATE elsewhere. */
MLFAB_API int mlfab_explain(mlfab *ctx, char *text, size_t room, size_t *bytes_p);

/* ------------------------------------------------------------------------------------------------
 * 10. Collectives
 *
 * Collectives go from worker to worker, without a server. Every live worker makes the same calls, in the same order,
 * with the same sizes; blocking calls and _start forms match each other. All workers open objects (partial
 * reductions, stochastic reductions, task graphs) in the same order. Calls of several threads match in the order in
 * which the threads made them, so threads must take turns in the same way on all workers.
 *
 * Failures. A failure ends all open collectives on all workers with one code, one rank and one text. Its causes: a
 * worker died or closed, sizes differ, a deadline passed, a NaN was refused, a request was cancelled. (If several
 * workers fail at the same time, each returns its own failure.) Every worker sees a failure once, in its open calls or
 * in its next call; of several failures the last. Then calls match again among the workers that live, in a new epoch.
 *    Repeating a step. A call may return 0 on one worker and the failure on another, so workers must agree which step
 *    to repeat: each calls an allreduce of MLFAB_OP_MAX over step * workers + rank, then all take the model of that
 *    rank by a broadcast into other memory (examples/11_comes_and_goes.c).
 *    Deadlines. A TIMEOUT names the first rank that has not called; below two heartbeats, perhaps the caller.
 *    A worker closes. The next call of the others fails once with MLFAB_ERR_PEER_CLOSED, unless the worker had
 *    finished (mlfab_finish).
 *    A worker joins (section 6). No call fails, and the epoch ends between two calls, the same two on every worker.
 *    If 1024 workers take part already, the joiner's call fails with MLFAB_ERR_LIMIT, and its later calls wait for room.
 *    A worker comes back after its death: it is admitted like a joiner. If the others do not make its first collective
 *    within a tenth of config.timeout_ns, or have objects open, their epoch ends with MLFAB_ERR_AGAIN (docs/growth.md).
 *    Server 0 dies. Server 0 keeps the list of members and is not on the data path. All open and all later
 *    collectives fail with MLFAB_ERR_PEER_DEAD (is_server 1). Without dedicated servers (mlfab-run -s 0, torchrun,
 *    mpirun) it is in worker 0's process.
 * After a failure the contents of the call's buffers are undefined.
 *
 * Same bits. A collective gives all ranks the same bits, and the same from run to run where the same workers call it
 * in the same form. Members are ordered by host, then rank. Blocking calls add in another order than _start forms.
 * With MLFAB_ALGORITHM_AUTO on several hosts, and with order_by_rate, the order depends on the link capacities that
 * were known when the epoch began. NaN is passed on, also by MIN and MAX, unless refuse_nan is set.
 */
enum mlfab_op {
  MLFAB_OP_SUM = 0,
  MLFAB_OP_MEAN = 1, /* the sum divided by the number of workers that take part; not of MLFAB_I64 */
  MLFAB_OP_MIN = 2,
  MLFAB_OP_MAX = 3,
  MLFAB_OP_PRODUCT = 4
};

enum mlfab_algorithm {
  /* Chosen by size, number of workers, hosts, and link capacities where known. In a fabric with a scheduler,
   * allreduces of more than eager_bytes (the same on all nodes) are PLANNED, except those in shared memory. */
  MLFAB_ALGORITHM_AUTO = 0,
  MLFAB_ALGORITHM_RING = 1,     /* fewest bytes, 2 (P - 1) steps */
  MLFAB_ALGORITHM_HALVING = 2,  /* recursive halving, then doubling: fewest bytes, 2 log2 P steps */
  MLFAB_ALGORITHM_DOUBLING = 3, /* recursive doubling: log2 P steps, all bytes in each */
  MLFAB_ALGORITHM_TREE = 4,     /* binomial tree up and down */
  /* Allreduces that are not `ordered` (MLfabric §6): up a tree to a root drawn by seed, and down a tree. The scheduler
   * chooses both by link capacity. A worker sends and receives the array once; two more round trips; an aggregator
   * buffers up to 4 MiB of early data. As AUTO with two workers, or if no scheduler answers for a heartbeat. */
  MLFAB_ALGORITHM_PLANNED = 5,
  MLFAB_ALGORITHM_COUNT /* no algorithm: their number */
};

/* A user's reducer: inout = in o inout, for `count` elements of element_bytes each, both aligned to 8 bytes or to the
 * element, whichever is less. It must be associative and, unless `ordered` is set, commutative. With `ordered`, `in`
 * is the left operand. */
typedef void (*mlfab_reduce_fn)(void *user, void *inout, const void *in, uint64_t count);

struct mlfab_collective { /* options of a collective */
  uint32_t size;
  uint32_t op;        /* MLFAB_OP_SUM ... */
  uint32_t algorithm; /* MLFAB_ALGORITHM_* */
  /* 1: NaN or infinity in this worker's input of an allreduce or a reduce-scatter fails it and names the worker;
   * results are not checked */
  uint32_t refuse_nan;
  mlfab_reduce_fn reduce; /* instead of op; `dtype` is then ignored */
  void *user;
  uint32_t element_bytes; /* size of an element for reduce: 1..65,536 */
  /* 1: reduce does not commute: x_0 o x_1 o ... in the order of members, which is the order of ranks where each host
   * has consecutive ranks */
  uint32_t ordered;
  uint64_t timeout_ns;
  /* A number of the caller's; 0: none. If the tags of matching calls differ, the call fails with MLFAB_ERR_MISMATCH and
   * both tags. Without tags, calls of equal size in different orders give wrong sums. */
  uint64_t tag;
  /* The inputs, one pointer for each buffer; NULL: in place. The library only reads them, until the call returns or
   * the request has ended. Results go to the buffers. For an allgather: this rank's block. For a broadcast: used at
   * the root. An input must not overlap a buffer of the call (ARGUMENT). */
  const void *const *inputs;
};

/* One of a list of buffers that are reduced as one array. */
typedef struct mlfab_vec {
  void *data;
  uint64_t count; /* elements, 0 allowed */
} mlfab_vec;

/* Memory that other processes of the host can read in place, which saves copies. It is zero, and begins at a page. Free
 * it with mlfab_free, or close the context. It is used for bytes that begin at a page, and end at a page or at the end
 * of the memory:
 *
 *    blocking collectives of workers on one host: from the third call on. Other workers add in it during a call.
 *    pushes of more than 64 KiB over shared memory: the server reads them in place.
 *    collectives that do not block, over shared memory: workers read pieces of 32 KiB and more in place.
 *
 * Do not write to it before the call has ended: the update or the sum may then be wrong. After a call that failed, was
 * cancelled or lost its link, the library replaces its pages by copies. Pinned pages must then be pinned again. A
 * context has 255 such memories. A peer reads 32 of them in place, and gets copies of the others. Beyond that, or
 * without the transport of shared memory, it is ordinary memory. mlfab_free waits while another thread is in a blocking
 * collective. Errors: ARGUMENT (0 bytes), MEMORY. */
MLFAB_API int mlfab_alloc(mlfab *ctx, uint64_t bytes, void **memory_p);
MLFAB_API int mlfab_free(mlfab *ctx, void *memory);

/* Reduces the workers' buffers in place, as if the list were one array; every worker gets the result. The buffers
 * must not overlap. options NULL: sum.
 * Errors: ARGUMENT (no elements, overlap, the wrong option), DTYPE, AGAIN (1,024 are open), STATE (this worker has
 * finished), MEMORY.
 *    UNSUPPORTED: mean of MLFAB_I64; the algorithm cannot do it; refuse_nan with a user's reducer.
 *    LIMIT: more than 4,096 buffers, model_max_bytes, or 1,024 workers.
 *    Failures: MISMATCH with a rank whose sizes, options or tag differ; TIMEOUT with the first rank that is missing;
 *    PEER_DEAD; PEER_CLOSED; NOT_FINITE; CANCELLED; CALLBACK (task graphs); MEMORY with the rank; AGAIN (a new epoch).
 * Cost: with RING and HALVING 2 (P-1)/P of the array's bytes out and in for each worker. Within one host, up to 64
 * workers, the blocking form goes through shared memory, with MLFAB_ALGORITHM_AUTO and no user's reducer.
 * Precision: half types are added in float32 and rounded to nearest once for each transfer (in shared memory once in
 * all); sums beyond the largest number are infinite. The error of a sum is at most (P - 1) half units in the last place
 * of its largest partial sum. MEAN divides that sum and rounds once more: the mean of an infinite sum is infinite. */
MLFAB_API int mlfab_allreduce_list(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                   const mlfab_collective *options);
MLFAB_API int mlfab_allreduce_start(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p);

/* Reduces; every worker gets its block. `data` holds the blocks of all ranks one after the other, counts[r] elements
 * for rank r. A count may be 0, and must be 0 for absent ranks: ARGUMENT names one. On return block `rank` holds the
 * result; the contents of the others are undefined. Errors as above. Cost: (P-1)/P of the bytes. */
MLFAB_API int mlfab_reduce_scatter(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                   const mlfab_collective *options);
MLFAB_API int mlfab_reduce_scatter_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                         const mlfab_collective *options, mlfab_request *request_p);

/* Every worker gives its block of `data` and gets all others. counts as above; bytes with MLFAB_BYTES. It uses
 * algorithm, timeout_ns, tag and inputs of the options. Errors and cost as above. */
MLFAB_API int mlfab_allgather(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                              const mlfab_collective *options);
MLFAB_API int mlfab_allgather_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p);

/* mlfab_broadcast and mlfab_barrier of section 9 without waiting. */
MLFAB_API int mlfab_broadcast_start(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                                    const mlfab_collective *options, mlfab_request *request_p);
MLFAB_API int mlfab_barrier_start(mlfab *ctx, const mlfab_collective *options,
                                  mlfab_request *request_p);

/* ------------------------------------------------------------------------------------------------
 * 11. Telemetry
 *
 * Three files, which the configuration names, or the environment (MLFAB_LOG, MLFAB_METRICS, MLFAB_TRACE). A thread of
 * the library writes them; training never waits for it. A failed write is one line in the log; the thread tries again.
 * Symbolic links are not followed. Every node has files of its own: its name (worker-3, server-0, scheduler) replaces
 * "{node}" in a file's name, or else stands before the last dot ("run/m.worker-3.prom"). A transport of virtual time
 * has no such files (UNSUPPORTED). docs/operating.md tells how to read them.
 *
 * log      "info" writes lines of this level and worse to stderr, "info:FILE" appends them to the file. env.log gets its
 *          lines as well. If the thread is too slow, it drops lines, and counts them in the log.
 * metrics  OpenMetrics text: every counter of mlfab_stats, the iteration, and the rank that the oldest open call waits
 *          for. A reader always sees a whole file. The last one, which mlfab_close waits for, has mlfab_state 3.
 * trace    Chrome trace events (JSON), for ui.perfetto.dev: a lane for each direction of each link, a slice for each
 *          transfer, an arrow from sender to receiver; at a scheduler also the plan. At most 256 MiB; the trace counts
 *          dropped events. A killed process leaves a file that Perfetto takes. tools/trace.py joins files.
 */
typedef struct mlfab_stats {
  uint64_t frames_sent, frames_received;
  uint64_t bytes_sent, bytes_received;     /* headers included */
  uint64_t payload_sent, payload_received; /* tensor bytes */
  uint64_t frames_refused;                 /* malformed, wrong checksum or protocol */
  uint64_t strangers_refused;              /* connections from nodes that are not of this job */
  uint64_t reconnects, peers_died, transfers_revoked;
  uint64_t pushes_started, pushes_applied, pushes_refused, pushes_merged; /* worker */
  uint64_t pulls_finished;                                                /* worker */
  uint64_t updates_applied, updates_refused, updates_repeated;            /* server */
  uint64_t commits, pulls_answered, pulls_delayed, pulls_restarted;       /* server */
  uint64_t delay_sum, delay_max; /* server: over applied updates */
  uint64_t allocations;          /* calls of env.allocate since open */
  uint64_t memory_bytes;         /* allocated now */
  uint64_t trace_hash;           /* of all events and actions so far */
  /* A fabric with a scheduler. */
  uint64_t updates_dropped; /* server: by plan, bound or round; worker: pushes that ended DROPPED */
  uint64_t groups_applied, groups_failed;    /* server: aggregates; those that it began again */
  uint64_t spreads_answered, spreads_failed; /* server: pulls answered through a distributor */
  uint64_t members_added, members_served; /* worker as aggregator: updates added; pulls passed on */
  /* Scheduler: plans; updates that they dropped and grouped. */
  uint64_t plans_made, plans_dropped, plans_grouped;
  /* Link capacity of this node's host, measured or set, bytes per second; 0: unknown. */
  uint64_t link_in, link_out;
  /* Worker: elements that filters were given, and that they sent; that were beyond +-65504; bytes of these pushes
   * before and after. */
  uint64_t filter_offered, filter_sent, filter_saturated, filter_raw_bytes, filter_bytes;
  /* Server: bytes that pulls asked for, and bytes sent for them. */
  uint64_t pull_raw_bytes, pull_bytes;
  uint64_t rounds;                    /* server: iterations completed */
  uint64_t slices_moved, bytes_moved; /* server: received from other servers */
  /* Worker: collectives that succeeded and failed, epochs, rounds of partial reductions that ended. */
  uint64_t collectives, collectives_failed, collective_epochs, rounds_partial;
  /* Worker: whole iterations of pushes that every server has decided; the sum of the delays of its applied updates. */
  uint64_t iterations, push_delay_sum;
  /* Bytes of this node on network links of its host, where links are measured (a scheduler, order_by_rate). */
  uint64_t network_sent, network_received;
  /* Servers with replicas. Worker: parts of updates (one for each server) that were applied, and lost with a server.
   * The copy that serves: states that the other one has got, the bytes of their weights and optimizer, and how often
   * this one has taken over. */
  uint64_t updates_lost, replica_moments, replica_bytes, promotions;
} mlfab_stats;

/* Copies the counters, all of one moment. `size` is sizeof *stats_p. */
MLFAB_API int mlfab_get_stats(mlfab *ctx, mlfab_stats *stats_p, size_t size);

enum mlfab_metrics_format {
  MLFAB_METRICS_OPENMETRICS = 0, /* as config.metrics writes it */
  MLFAB_METRICS_PROMETHEUS = 1   /* the older text format, 0.0.4, which a Pushgateway takes */
};

/* Writes this node's metrics as text: at most `room` bytes, the final 0 included. *bytes_p, unless NULL: the length of
 * the whole text (about 16 KB). With or without config.metrics.
 * Errors: ARGUMENT, UNSUPPORTED (a transport of virtual time). */
MLFAB_API int mlfab_metrics(mlfab *ctx, int format, char *text, size_t room, size_t *bytes_p);

/* Writes a line to the log, as the library does; control characters become '?'. Returns 1, or 0 where no log takes
 * lines of this level. From any thread. Errors: ARGUMENT. */
MLFAB_API int mlfab_log(mlfab *ctx, int level, const char *line);

typedef struct mlfab_update_info {
  uint32_t worker, incarnation;
  uint64_t seq;     /* of the first update in the commit */
  uint32_t members; /* updates in the commit: 1, or merged small updates, or those of a round */
  uint32_t server;
  uint64_t delay;   /* the largest over the slices that it changes */
  uint64_t version; /* of the first of these slices, before the commit */
  uint64_t commit;
  uint64_t iteration; /* the worker's iteration, or the round */
  double scale, norm; /* norm: of the sum as pushed; 0: not known */
} mlfab_update_info;

typedef struct mlfab_pull_info {
  uint32_t worker, server;
  uint64_t iteration, bytes;
} mlfab_pull_info;

enum mlfab_event_kind {
  MLFAB_EVENT_JOINED = 1,
  MLFAB_EVENT_SUSPECT = 2,
  MLFAB_EVENT_DEAD = 3,
  MLFAB_EVENT_LEFT = 4,
  MLFAB_EVENT_REJOINED = 5,
  MLFAB_EVENT_REFUSED_UPDATE = 6,
  MLFAB_EVENT_SCHEDULER_LOST = 7, /* this server now takes updates in the order of announcement */
  MLFAB_EVENT_SCHEDULER_BACK = 8,
  MLFAB_EVENT_CHECKPOINT = 9, /* at server 0: a checkpoint is whole, or `code` says why not */
  MLFAB_EVENT_RESTORED = 10,  /* at a server: it has loaded a checkpoint */
  /* Servers with replicas; `rank` is the server's number. At a copy: it serves from now on; it does not serve any more;
   * the other copy is in sync (code 0), or not any more. At a worker: updates that were applied are lost. */
  MLFAB_EVENT_SERVES = 11,
  MLFAB_EVENT_STANDS_BY = 12,
  MLFAB_EVENT_IN_SYNC = 13,
  MLFAB_EVENT_UPDATES_LOST = 14
};
typedef struct mlfab_event_info {
  uint32_t kind;
  int32_t rank; /* a worker's rank, or a server's number */
  uint32_t is_server;
  uint32_t incarnation;
  int32_t code;     /* MLFAB_ERR_* where there is one */
  const char *text; /* valid during the call */
} mlfab_event_info;

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_H */
