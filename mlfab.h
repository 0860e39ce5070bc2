/*
 * mlfab.h - the communication layer of a distributed trainer, in two files.
 *
 * mlfab moves model updates between the processes of a trainer. It decides when an update travels, by which way,
 * and whether it travels at all. Copy mlfab.h and mlfab.c beside your trainer, or link libmlfab.a.
 *
 * This header is the manual. It goes from simple to expert:
 *
 *    1  a complete program, words,  8  push and pull
 *       rules and limits            9  the fabric: barrier, broadcast, finish, changes while it runs
 *    2  version                    10  collectives
 *    3  errors                     11  telemetry
 *    4  types and units            12  transport interface
 *    5  env: memory, clock, log    13  built-in transports
 *    6  open and close             14  device memory
 *    7  the model
 *
 * For a program with its own event loop, without sockets and threads of the library: mlfab_node.h.
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
 * version     of a slice: how many updates the server has applied to it.
 * update      what one push sends: an array for each tensor that it names.
 * iteration   one whole update of a worker, counted from 0: a push, or several with MLFAB_PUSH_MORE.
 * round       with BSP and DROP: the updates that a server adds up and applies in one step.
 * delay       of an update: how many updates the server has applied since the version of the model that it was
 *             computed from.
 * request     a handle of a call that has begun. mlfab_wait or mlfab_test ends it.
 * epoch       a stretch of collectives with the same workers. A failure, or a worker that comes or goes, ends it.
 * joiner      a worker that comes when the fabric runs already (section 6).
 * live        a worker that has not died, closed or finished.
 * incarnation of a rank: counts the processes that have had it, from 1. A restarted process has a new one.
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
 * An _INIT macro or _init function sets the real defaults. In a struct without one, 0 means the default that its
 * comment gives; where a member's comment says nothing of 0, 0 means 0. Structs grow at the end only. The library takes
 * a struct of an older header by its `size`, and uses the defaults for what it lacks; the functions that fill a struct
 * (_init, _set, _from_env) need a header of the library's own version.
 *
 * Units. Counts are elements, sizes are bytes, times are nanoseconds, rates are bytes per second.
 *
 * Deadlines. Every call that waits for another node has a deadline: timeout_ns in its options, or, where they have
 * none, timeout_ns among its arguments; 0 means config.timeout_ns (300 s). A call with neither uses
 * config.timeout_ns. When the deadline passes, the call returns MLFAB_ERR_TIMEOUT, and the error names a rank that it
 * waited for. In three calls 0 means something else: mlfab_wait (the request's own deadline), mlfab_progress (do not
 * wait), mlfab_serve (no limit).
 *
 * Memory. The library borrows a buffer until the call returns; with a _start form, until the request has ended.
 * A _start form takes the arguments of the form that waits, and request_p, and returns at once.
 *
 * Threads. Several threads may use one context. Calls exclude each other for a few microseconds; a call that waits
 * does not hold up the others. Contexts share nothing. The library's threads block all signals but those of faults.
 * No function exits, aborts, installs a signal handler, or raises SIGPIPE or SIGXFSZ. Only mlfab_open_env prints, and
 * telemetry that was asked for (section 11).
 * Only mlfab_open_env, the _from_env functions, and mlfab_model_start with NULL options after mlfab_open_env read the
 * environment.
 *
 * Callbacks run in the thread that drives the context: the progress thread, or a thread inside a call. They must not
 * call back into the context, except where their comments say so.
 *
 * Forks. A context belongs to the process that opened it. In a forked child every call on it returns MLFAB_ERR_STATE,
 * except mlfab_close and mlfab_abandon, which free the child's memory and send nothing. Close it early in the child:
 * until then the child keeps the descriptors open, and when its parent dies, the peers notice only by silence. If
 * another thread of the parent was in the library at the fork, that memory stays until the child ends. A child may
 * open contexts of its own. Shared memory of mlfab_alloc is not in the child: touching it is a fault.
 *
 * Limits
 * ------
 *    open requests of a context, blocking calls included     1,024      one more: MLFAB_ERR_AGAIN at once
 *    updates under way                                          64      MLFAB_ERR_AGAIN at once
 *    pulls under way                                             8      MLFAB_ERR_AGAIN at once
 *    collectives open                                        1,024      MLFAB_ERR_AGAIN at once; the first 32 of them run
 *    partial reductions, stochastic reductions and task
 *    graphs, together                                           16      MLFAB_ERR_LIMIT
 *    buffers in the list of a collective                     4,096      MLFAB_ERR_LIMIT
 *    separate stretches of the model in one push or pull     2,048      MLFAB_ERR_LIMIT
 *    operations of a task graph, edges of a graph        1,048,576      MLFAB_ERR_LIMIT
 *    workers of a fabric; with collectives                   65,536; 1,024
 *    servers; slices of a model                              4,096; 4,096
 *    model                                                   config.model_max_bytes (64 GiB)
 *    updates that mlfab_push_status remembers                  256
 *
 * What often goes wrong
 * ---------------------
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
 * All are 1 (MLFAB_WITH_SHM only on Linux), except MLFAB_WITH_MPI and MLFAB_WITH_CBLAS. Define one as 0 when you
 * compile mlfab.c to leave something out:
 *    MLFAB_WITH_TCP, MLFAB_WITH_SHM   a transport
 *    MLFAB_WITH_MPI                   the transport over MPI (section 13): 0 unless you define it as 1
 *    MLFAB_WITH_CBLAS                 additions by OpenBLAS or another cblas (config.kernels): 0 unless you define it as
 *                                     1, with the flags of `pkg-config --cflags --libs openblas`
 *    MLFAB_WITH_PUSH                  models, pushes and pulls. _SCHED, _SPARSE, _RESHARD, _GROWTH, _CHECKPOINT, _DEVICE, _LEND need it
 *    MLFAB_WITH_COLL                  collectives, and with them the next three:
 *    MLFAB_WITH_PARTIAL               partial reductions
 *    MLFAB_WITH_STOCHASTIC            stochastic reductions
 *    MLFAB_WITH_DAG                   task graphs of operations
 *    MLFAB_WITH_SCHED                 the scheduler, aggregators, measured links
 *    MLFAB_WITH_SPARSE                filters, sparse updates, version tags
 *    MLFAB_WITH_RESHARD               moving slices between servers; needs MLFAB_WITH_GROWTH
 *    MLFAB_WITH_GROWTH                processes that join the running fabric (join, workers_max, servers_max)
 *    MLFAB_WITH_KEYS                  proofs and tags (config.key), which mlfab-run needs
 *    MLFAB_WITH_CHECKPOINT            checkpoints, mlfab_load, mlfab_save
 *    MLFAB_WITH_REPLICA               replicas of servers; needs MLFAB_WITH_SCHED, and for vote_dir
 *                                     MLFAB_WITH_CHECKPOINT
 *    MLFAB_WITH_DEVICE                buffers, and servers' models, in device memory (section 14)
 *    MLFAB_WITH_TELEMETRY             config.log, metrics and trace
 *    MLFAB_WITH_LEND                  views, memory of mlfab_alloc that is read in place, small rings for many
 *                                     processes of one host
 * A function that was left out returns MLFAB_ERR_UNSUPPORTED, and the error names the switch. Opening returns the
 * same for a configuration that needs what was left out. Build all processes of a fabric alike.
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
#define MLFAB_PROTOCOL 10

#ifndef MLFAB_API
#define MLFAB_API
#endif

/* The version of the compiled library, "major.minor.patch". */
MLFAB_API const char *mlfab_version(void);

/* What was compiled in, as one line of text for people, without a newline: the version and the protocol, the
 * switches that are on and those that are off (with the MPI and the BLAS library that it was compiled with), the
 * compiler. Static; any thread may ask at any time. */
MLFAB_API const char *mlfab_build_info(void);

/* For bindings: the size in bytes of a public struct, named without mlfab_ ("config", "push_options"). 0: no such
 * struct. */
MLFAB_API size_t mlfab_struct_size(const char *name);

/* The names of all settings: of mlfab_config_set, then of mlfab_model_options_set and mlfab_filter_set. Static. NULL
 * behind the last. */
MLFAB_API const char *mlfab_setting_name(uint32_t index);

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

/* What went wrong, in full. The code that found the error filled it in. */
typedef struct mlfab_error {
  int32_t code; /* MLFAB_ERR_* */
  int32_t rank; /* the rank that caused it, or MLFAB_NO_RANK; a server's number when `is_server` */
  int32_t is_server; /* 1: `rank` is the number of a server */
  int32_t reserved;
  uint64_t waited_ns; /* how long the call had waited; 0: it did not wait */
  char text[296];     /* one line: what failed, who caused it, what was awaited, for how long */
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

/* Files, for checkpoints: the system's calls, or those of extras/mlfab_store.h for URLs. They return a number of at least 0, or a negative errno; the library
 * repeats a call after -EINTR, and goes on after a short write or read. A thread of the library calls them, one call at
 * a time; in a simulation the thread that drives; mlfab_load its caller's thread. */
typedef struct mlfab_files {
  uint32_t size;
  uint32_t reserved;
  void *user;
  /* A handle. create 1: a new empty file to write, in place of an old one; 0: an existing one to read. */
  int (*open)(void *user, const char *path, int create);
  int64_t (*write)(void *user, int file, const void *data, size_t bytes); /* how many, at the end */
  int64_t (*read)(void *user, int file, void *data, size_t bytes, uint64_t offset); /* how many */
  int (*sync)(void *user, int file);
  int (*close)(void *user, int file);
  int (*rename)(void *user, const char *from, const char *to);
  int (*sync_dir)(void *user, const char *path);
  /* The names in a directory that begin with `prefix`, each with a newline behind it: how many bytes. -ERANGE: more
   * than `room`. */
  int64_t (*list)(void *user, const char *path, const char *prefix, char *names, size_t room);
  int (*remove)(void *user, const char *path);
  /* These two may be NULL. explain: what there is to say of the last call that failed, besides its errno; 0, or -1 when
   * there is nothing. cancel 1: until cancel 0 calls, and the one under way, soon end with -ECANCELED; mlfab_close does
   * so, in its caller's thread. Files that are far away then do not make it wait. */
  int (*explain)(void *user, char *text, size_t room);
  void (*cancel)(void *user, int on);
} mlfab_files;

/* The system's calls: what env.files NULL means. For a table that passes some paths on. NULL without
 * MLFAB_WITH_CHECKPOINT. */
MLFAB_API const mlfab_files *mlfab_files_system(void);

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
  MLFAB_ROLE_REPLICA = 8 /* the second copy of a dedicated server: see "Servers that fail" below */
};

/* What ends a push, in a fabric with replicas. */
enum mlfab_ack {
  MLFAB_ACK_APPLIED =
      1, /* its servers have applied it; the last of them may be lost with a server */
  MLFAB_ACK_DURABLE = 2 /* their replicas have it, too: it stays when a server is lost */
};

enum mlfab_scheduler_kind {
  MLFAB_SCHEDULER_NONE = 0,   /* a server takes updates in the order in which they are announced */
  MLFAB_SCHEDULER_BESIDE = 1, /* a scheduler in the process of server 0 */
  /* a scheduler in a process of its own, with roles = MLFAB_ROLE_SCHEDULER */
  MLFAB_SCHEDULER_OWN = 2
};

#define MLFAB_UNBOUNDED UINT64_MAX

/* How large pushes and pulls travel in a fabric with a scheduler (MLfabric §3 to §5.2, §10.2, §10.3). A worker
 * announces a push of more than eager_bytes. The scheduler plans it over the measured links: when it travels, and
 * whether it goes directly or through an aggregator, a worker that adds up several updates. The model comes back
 * through distributors, workers that pass it on. Small pushes and pulls are sent at once and queue behind the planned
 * ones. Without its scheduler a fabric goes on: servers take updates in the order of announcement, and keep to
 * delay_bound. */
typedef struct mlfab_schedule {
  uint32_t size;
  uint32_t best; /* 1: also try plans that the paper excludes, and take the shortest */
  /* tau_max: a server drops an update whose delay would be this or more (MLFAB_ERR_DROPPED), with a scheduler or
   * without. At least 1; MLFAB_UNBOUNDED, the default: no bound. Not with rounds (BSP, DROP). */
  uint64_t delay_bound;
  /* When to plan: when the server's incoming link is booked for less than this. 150 ms suits MLfabric's setting. 0:
   * when it is booked for less than the queued bytes need, plus 6 %. */
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
  /* Data moves only inside calls. The other nodes know it: they do not take this worker for dead while it computes,
   * unless its connection breaks or its system does not answer. */
  MLFAB_PROGRESS_HAND = 2
};

/* What adds up updates of servers and aggregators, and the data of collectives, of F32 and F64. The sums have the same
 * bits with both. Norms (clipping, MLFAB_SYNC_PSSP's significance) differ in the last bits, so all nodes must have the
 * same; nothing is chosen by timing. Additions are bound by memory, so little depends on it: measure with
 * `make bench`, rows kernels/. */
enum mlfab_kernels {
  MLFAB_KERNELS_OWN = 0,
  /* axpy, scal and nrm2 of cblas, in MLFAB_WITH_CBLAS=1. mlfab calls it with at most 2,048 elements, for which OpenBLAS
   * (0.3) uses no thread but the caller's; the program's own number of threads is left alone. Another cblas that
   * uses threads for vectors that short must be told not to by the program. */
  MLFAB_KERNELS_CBLAS = 1
};

enum mlfab_transport_bits { MLFAB_USE_TCP = 1, MLFAB_USE_SHM = 2, MLFAB_USE_MPI = 4 };

struct mlfab_transport; /* section 12 */
struct mlfab_update_info;
struct mlfab_pull_info;
struct mlfab_event_info;

/* Replaces the server's optimizer (MLfabric Table 1, registerUpdateCallback). The server calls it once for each
 * commit and stretch of a tensor. w: `count` weights from element `first` of the tensor, to be changed in place. sum:
 * as many elements, the sum of the updates in the commit. Non-zero refuses the whole update: the weights stay as they
 * were, and the pusher gets MLFAB_ERR_CALLBACK; of a round, the pulls that wait for it do. */
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

/* A filter of the user's. It clears the bits of elements that are not to be sent (mlfab_filter: they stay in the
 * residual) or not to be changed (config.change_filter: they keep the value in `before`). `values` and `before`:
 * `count` elements, at most 65,536. On entry bit i % 64 of keep[i / 64] is set for each element i that counts. */
struct mlfab_filter_info;
typedef void (*mlfab_filter_fn)(void *user, const struct mlfab_filter_info *info,
                                const void *values, const void *before, uint64_t *keep);

/* Tells of ranks that come, go and die. For display. */
typedef void (*mlfab_event_fn)(void *user, const struct mlfab_event_info *info);

/* Writes the fabric's key, a text, into `key` (room bytes). Returns 0, or an MLFAB_ERR_*. */
typedef int (*mlfab_key_fn)(void *user, char *key, size_t room);

typedef struct mlfab_config {
  uint32_t size;
  uint32_t roles; /* MLFAB_ROLE_* bits; 0: worker, and server too when rank < servers */
  /* A worker's rank, 0..workers-1; the number of a dedicated server, or of that whose replica this is, 0..servers-1 (with
   * growth to the largest number - 1). */
  int32_t rank;
  uint32_t workers;   /* 0: 1; workers that the fabric begins with (workers_max) */
  uint32_t servers;   /* 0: 1; servers that the fabric begins with (servers_max) */
  uint32_t dedicated; /* 1: servers are processes of their own; the same on all nodes */
  /* Address of server 0: "tcp:host:port", "tcp:[::1]:port", "unix:/path", "unix:@name", "shm:name"; "" in a world of
   * one. While this node joins, it asks again for a host name that does not resolve yet. With replicas, behind a
   * comma: where the replica of server 0 listens, so that processes can join when server 0 has died. A range of ports,
   * "tcp:host:29400-29410": server 0 takes the first that is free, the others try all until this job's server 0 answers. */
  char coordinator[256];
  /* Name of the fabric; nodes of another one are refused. "": "mlfab". "NAME~N" is restart N of the job NAME: its
   * processes end those of an earlier start (FENCED). */
  char job[64];
  /* Address to listen at, like coordinator; "": the transport chooses. Over TCP that is every address of the host. Others
   * get the one from which server 0 was called, and those of interfaces that are up, have a carrier and are not
   * link-local. */
  char listen[256];
  char ifname[128]; /* interfaces for TCP, in NCCL's syntax: "eth", "^docker", "=eth0,eth1" */
  /* 1: allow TCP without a key. Without either, a node uses Unix sockets and shared memory of this user only. */
  uint32_t allow_insecure;
  /* MLFAB_USE_* bits; 0: shared memory within a host and TCP between hosts, or only `transport` where that is set.
   * MPI only where its bit is set: section 13. */
  uint32_t transports;
  uint32_t progress;       /* MLFAB_PROGRESS_* */
  uint32_t no_payload_crc; /* 1: no CRC32C of payloads on TCP; headers keep theirs */
  uint64_t timeout_ns;     /* default deadline (section 1), joining included; 0: 300 s */
  /* 0: 500 ms; at least 1 ms. With replicas the same at all nodes: a node with another one is refused (WORLD). A silent
   * peer is suspect after 3 heartbeats and dead after 5, unless silent_death_ns applies. A worker whose connection broke
   * is dead after 2. It has to be longer than a round trip between any two nodes. On a link that is slow, bytes count as
   * heartbeats, and pieces are so small that heartbeats pass between them. */
  uint64_t heartbeat_ns;
  /* A waiter polls this long, then 200 us more while it yields the processor, then it sleeps. 0: 20 us; ~0: it never
   * sleeps. */
  uint64_t spin_ns;
  uint64_t seed; /* of random choices; 0: 1 */
  /* Largest payload of a frame; 0: 256 KiB; at most 1 MiB. This and the next two are multiples of 64. */
  uint32_t chunk_bytes;
  /* A worker may send this much to a server without a grant. 0: 256 KiB. Price: twice as much memory at the server
   * for each worker. */
  uint32_t eager_bytes;
  uint32_t block_bytes; /* a server applies an update in blocks of this size; 0: 1 MiB */
  uint32_t
      merge_max; /* this many waiting small pushes of a worker become one; 0: 128, the most; 1: none */
  uint64_t model_max_bytes; /* a larger model is refused; 0: 64 GiB */
  const mlfab_env *env;     /* copied; NULL: the built-in hooks */
  /* Callbacks; each may be NULL. */
  mlfab_update_fn on_update; /* replaces the optimizer of this server */
  mlfab_pull_fn on_pull;
  mlfab_event_fn on_event;
  void *user; /* passed to all callbacks */
  /* A transport of the caller's, borrowed until close. It is opened beside those of `transports`, and is preferred
   * where it reaches a peer. */
  const struct mlfab_transport *transport;
  void *transport_user; /* passed to its open; with MLFAB_USE_MPI: MPI_Comm *, or NULL */
  /* Fabrics with a scheduler. */
  uint32_t scheduler; /* MLFAB_SCHEDULER_*; the same on all nodes */
  /* How many sums or models this worker may add up or pass on for others at a time, at most 64. Each takes the memory
   * of one shard from its first use on. 0: 2, or none with MLFAB_PROGRESS_HAND; ~0: none. */
  uint32_t accumulators;
  uint64_t host; /* nodes with the same number share network links; 0: the address tells */
  mlfab_schedule schedule; /* server 0's is used; size 0: defaults */
  /* Servers. MLFAB_SYNC_USER needs both conditions; change_filter is a parameter filter, or NULL. */
  mlfab_condition_fn pull_condition, push_condition;
  mlfab_filter_fn change_filter;
  /* Collectives. 1: hosts with more bandwidth come first in the order of members. Server 0's is used; on the other
   * nodes it makes them measure their links. A change takes effect with the next epoch. */
  uint32_t order_by_rate;
  /* The fabric's key, the same on all nodes: 16 to 128 printable characters ("openssl rand -hex 32"); "": none. Every
   * connection begins with a proof from both ends that they have it; a node with another one, or none, is refused
   * (MLFAB_ERR_JOB). Then every frame has an authentication tag, except over Unix sockets and shared memory. Nothing
   * is encrypted (extras/mlfab_tls.h is a transport that encrypts). To change the key: "NEW,OLD" accepts both and prefers NEW. mlfab-run makes one for each run.
   * Price: about 0.2 s of processor time a GB at each end, 0.6 s without AVX2; over loopback 2 GB/s instead of 4 to 5. */
  char key[264];
  /* How long a peer may be silent while its connection stands and its system acknowledges what is sent (it was
   * stopped, or its host is overloaded) before it is dead. 0: 30 s; at least 5 heartbeats. Rounds and collectives
   * wait this long for such a worker. */
  uint64_t silent_death_ns;
  /* Where the key is, if not in `key`: a file (one or two lines, each a key) that belongs to this user and that no
   * other can read; or a function that writes the text of `key`, and returns 0 or an error. Both are asked once, by
   * mlfab_open; the function counts before the file, and the file before `key`. */
  char key_file[256];
  mlfab_key_fn key_from;
  void *key_user;
  /* Random bytes for the proofs of a node that is driven without mlfab_open (mlfab_node.h), other ones each time.
   * mlfab_open draws them itself. */
  uint8_t entropy[32];
  /* Growth: see "Workers that come and go" below. The largest number of workers that the fabric may have at a time;
   * the same on all nodes. 0: workers. Price: about 4 KB for each at a server, and 16 bytes at a worker. With
   * collectives at most 1,024. */
  uint32_t workers_max;
  /* 1: this process joins a fabric as one more worker, or with roles MLFAB_ROLE_SERVER as one more server. Server 0
   * gives it a rank, and tells workers, workers_max, servers, servers_max, dedicated and scheduler, which are ignored
   * here. Not with mlfab_open_start. */
  uint32_t join;
  /* Checkpoints: section 7. Server 0's are used. A directory ("": mlfab_checkpoint names one), and after how many of
   * its commits server 0 begins the next checkpoint by itself. A server that opens makes an empty file there, and removes
   * it: CONFIG where that is impossible. It does not try a URL, or where env.files are the caller's. */
  char checkpoint_dir[256];
  uint64_t checkpoint_commits; /* 0: never */
  uint32_t checkpoint_keep;    /* how many checkpoints stay in the directory; 0: 2 */
  /* Worker 0: as mlfab_restore with this directory, before anything else. "": a new model. Neither of the two may be a
   * URL with a user or a password in it: they are sent to servers, and are in logs and errors. */
  char resume[256];
  /* Telemetry: section 11. "": none. */
  char log[256];       /* "LEVEL" (error, warn, info, debug), or "LEVEL:FILE" */
  char metrics[256];   /* a file */
  char trace[256];     /* a file */
  uint64_t metrics_ns; /* how often the metrics are written; 0: 1 s; at least 10 ms */
  /* The largest number of dedicated servers that the fabric may have at a time; the same on all nodes. 0: servers.
   * Price: about 3 KB for each at every node. */
  uint32_t servers_max;
  /* Servers that fail: see below. 1: each dedicated server has a replica in a process of its own (MLFAB_ROLE_REPLICA);
   * needs scheduler = MLFAB_SCHEDULER_OWN. The same on all nodes. 0: none. */
  uint32_t replicas;
  /* Servers: the largest distance |w_s - w_r| of a shard's weights from the replica's, in the Euclidean norm. 0: what
   * anyone sees of the model, both copies have; HUGE_VAL: no bound. */
  double div_max;
  /* Servers, replicas and the scheduler: a directory that exists and may be written (else mlfab_open returns IO), in
   * which each keeps its votes. "": a process that starts again has forgotten them, and votes again only when both
   * others have told it what they know. */
  char vote_dir[256];
  uint32_t ack; /* workers: MLFAB_ACK_* of updates whose options do not say; 0: MLFAB_ACK_APPLIED */
  /* MLFAB_KERNELS_*; the same on all nodes: server 0 refuses a node with another one (MLFAB_ERR_WORLD). */
  uint32_t kernels;
  /* Over MPI (section 13). 1: MPI sends large updates and large data of plain collectives from the caller's buffers,
   * without a copy. Price: a request that was cancelled, or that has failed, is open until MPI has let go of its
   * buffers. */
  uint32_t mpi_lend;
  /* Servers: a device that holds this server's model (section 14), and the `self` of its functions; both are borrowed until
   * the context is closed. NULL: the model is in memory of the host. Ignored at nodes without the role of a server. */
  const struct mlfab_device *device;
  void *device_self;
  /* Servers: a model begins as the newest checkpoint of this history (section 7), and those of others are passed over.
   * 0: as the newest of any. */
  uint32_t history;
} mlfab_config;

/* Sets every member to its default and `size` to sizeof *config. */
MLFAB_API void mlfab_config_init(mlfab_config *config);

/* Sets one member by name: "rank", "workers", "servers", "role" (worker, server, replica, scheduler), "dedicated",
 * "coordinator", "job", "key", "key_file", "listen", "socket_ifname", "allow_insecure", "transport" (auto, tcp, shm, mpi, mpi+shm),
 * "progress" (thread, hand), "timeout_ms", "heartbeat_ms", "silent_death_ms", "payload_crc" (0, 1), "seed",
 * "scheduler" (none, beside, own), "delay_bound" (a number, none), "plan_ahead_ms", "accumulators" (a number, none),
 * "order_by_rate" (0, 1), "workers_max", "servers_max", "join" (0, 1), "checkpoint_dir", "checkpoint_commits",
 * "checkpoint_keep", "resume", "history", "log", "metrics", "metrics_ms", "trace", "kernels" (own, cblas), "mpi_lend" (0, 1), "replicas" (0, 1),
 * "div_max" (a number, inf), "vote_dir", "ack" (applied, durable). Set "dedicated" or "join" before
 * "role" server, which means nothing without them.
 * Errors: CONFIG, with the name and the value; nothing has changed then. */
MLFAB_API int mlfab_config_set(mlfab_config *config, const char *name, const char *value,
                               mlfab_error *error_p);

/* Sets members that are still at their default from the environment: from MLFAB_RANK, MLFAB_WORKERS and so on, the
 * names above in capitals; then from torchrun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT (where these
 * tell of one host, and there is neither a key nor allow_insecure, the address is a Unix socket named after the port); then from the launcher's
 * OMPI_COMM_WORLD_RANK and _SIZE, PMI_RANK and PMI_SIZE, SLURM_PROCID and SLURM_NTASKS (only in a task of srun, where
 * SLURM_STEP_ID is set); where Open MPI or Slurm tells of one host, the address is a Unix socket named after its job.
 * The job is named after TORCHELASTIC_RUN_ID and SLURM_JOB_ID, with the restarts that TORCHELASTIC_RESTART_COUNT (of one
 * agent) and SLURM_RESTART_COUNT tell. With workers above 1 also PMIX_RANK (PMIx) and JOB_COMPLETION_INDEX (an indexed Job
 * of Kubernetes) tell the rank. Over MPI no address is taken from the environment but MLFAB_COORDINATOR. Without any of
 * them: a world of one. error_p may be NULL.
 * Do not call it while another thread changes the environment.
 * Errors: CONFIG, with the variable and its value (without the value of MLFAB_KEY), also for MLFAB_RANK where neither
 * MLFAB_WORKERS nor the caller says how many ranks there are. */
MLFAB_API int mlfab_config_from_env(mlfab_config *config, mlfab_error *error_p);

/* Opens a node and joins the fabric. Waits until the first config.workers ranks have joined, at most
 * config.timeout_ns. A world of one (workers and workers_max 1, no dedicated server) opens at once, without I/O.
 * error_p may be NULL; on failure it says why, and which ranks were missing.
 * Errors: CONFIG, ADDRESS, ADDRESS_IN_USE, INSECURE, RANK_TAKEN, RANK_RANGE, WORLD, JOB, FENCED, PROTOCOL_OLDER/NEWER,
 * UNSUPPORTED (naming what was left out), TIMEOUT, MEMORY, IO; with config.join LIMIT (all ranks are taken). */
MLFAB_API int mlfab_open(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p);

/* mlfab_config_init, mlfab_config_from_env and mlfab_open in one call. mlfab_model_start with options NULL then takes
 * options and filter from the environment too (mlfab_model_options_from_env, mlfab_filter_from_env). Where no
 * launcher has set anything, it writes one line to stderr: this is a world of one. Worker 0 writes one line for each
 * variable MLFAB_* that nothing reads and whose name is nearly that of a setting. Errors: of the three. */
MLFAB_API int mlfab_open_env(mlfab **ctx_p, mlfab_error *error_p);

/* As mlfab_open, but returns before the fabric is complete. It waits for a host name to listen at. It also waits while another process has the port: 5 s at
 * most, or half of config.timeout_ns in a restart of the job. Drive the
 * context (mlfab_progress) until mlfab_is_ready returns 1. For programs without a progress thread, and the
 * simulator. */
MLFAB_API int mlfab_open_start(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p);
/* Returns 1 when every rank has joined, 0 before, or the error that ended joining. error_p may be NULL. */
MLFAB_API int mlfab_is_ready(mlfab *ctx, mlfab_error *error_p);

/* Leaves the fabric and frees the context. *ctx_p becomes NULL at once; a second call returns MLFAB_ERR_CLOSED. It
 * sends what it had begun to send, for at most two heartbeats. A worker that is a server too (dedicated 0) first
 * serves until all other workers have closed or died, at most config.timeout_ns. Open requests are forgotten, and
 * their buffers are the caller's again. Other threads may be inside calls: these calls are cancelled and return
 * MLFAB_ERR_CLOSED, and the memory is freed when the last of them has left. A thread that calls in a loop must stop at
 * MLFAB_ERR_CLOSED: its next call would find freed memory. So would any call with a copy of the pointer that has not
 * begun when mlfab_close returns: no error tells of that. A process that exits without mlfab_close, with any status, is
 * dead to the others (PEER_DEAD), and mlfab-run counts it as failed. */
MLFAB_API int mlfab_close(mlfab **ctx_p);

/* Frees the context and tells nobody: to the other nodes it looks like a crash. Other threads: as mlfab_close. */
MLFAB_API int mlfab_abandon(mlfab **ctx_p);

/* Workers that come and go. A fabric with workers_max above workers takes in more workers at any time: processes that
 * open with config.join (MLFAB_JOIN=1, or mlfab-run --join ADDRESS), or with a rank of their own from workers to
 * workers_max - 1. No call of the others fails because one comes, and none waits for it before it counts:
 *
 *    rounds, SSP     count it from the end of its mlfab_model_start on: from one round, the same at all servers, which is
 *                    then open. It has the model by then; another model than worker 0's is refused (MODEL), with the
 *                    first tensor that differs. Members, quorums and means follow the living workers. While it waits in
 *                    its first collective or barrier, rounds do not wait for it; from the end of that call on it counts
 *                    in the round in which the others are. So a round between may go without it, and a round may have
 *                    two of its updates.
 *    collectives     have it from its first call on, which meets the next call of the others that is the same: kind, sizes,
 *                    operation and tag. Others make their other calls without it meanwhile. If they never make that call,
 *                    it ends at its deadline, and names it and a call of the others. mlfab_present tells who takes part.
 *    objects         partial and stochastic reductions and task graphs stay with the workers that opened them; as long
 *                    as one is open, the joiner's collectives wait, and a deadline names a worker that has it open.
 *    barriers        none waits for it before its first, which meets the first that is not over; later ones wait for it.
 *                    If workers make collectives, barriers wait for it from its first collective on.
 *
 * Its loop begins at the first call of a step, whatever that is: push, pull, collective or barrier. Loops may have these in
 * any order, and calls may be started and waited for later. Call mlfab_model_start before the first collective or barrier.
 * If a step makes its first collective several times, give these calls different tags. A process that takes the rank of a dead
 * one is admitted in the same way (section 10, A worker comes back).
 *
 * A worker leaves for good with mlfab_finish and mlfab_close; others may then take its rank, as a new incarnation whose
 * updates are counted anew. A process that takes the rank of a living one is refused (RANK_TAKEN). One that takes the
 * rank of a dead one counts in the same way. Arrays by rank (counts of mlfab_allgather and mlfab_reduce_scatter) have workers_max entries.
 *
 * Servers that come and go. A fabric with servers_max above servers takes in more dedicated servers at any time:
 * processes with config.join and roles MLFAB_ROLE_SERVER (MLFAB_JOIN=1 and MLFAB_ROLE=server, or mlfab-run --join
 * ADDRESS --servers K), or with a number of their own from servers to servers_max - 1. Every node reports it
 * (MLFAB_EVENT_JOINED with is_server), and mlfab_servers lists it. It has no slices, and nobody waits for it, until
 * mlfab_set_servers names it: then it gets the model's definition, its slices and their clocks. A worker that cannot
 * reach it, or its death before it has them, ends that call with PEER_DEAD, and everything is as it was.
 *
 * A server leaves in two steps: mlfab_set_servers without it takes its slices away, and then mlfab_close, or its death,
 * is MLFAB_EVENT_LEFT or DEAD and no error for anyone. Another process may then take its number. Server 0 stays. A
 * server that dies with slices takes them with it, as before. All servers need the same callbacks and switches.
 *
 * Servers that fail. Without replicas the death of a server ends the training (PEER_DEAD), and a checkpoint is what
 * is left. With config.replicas each dedicated server has a replica, a process with a copy of its shard, and a calm
 * fabric outlives the death of either, and of the scheduler: no call of a worker fails because of it. Calls that need
 * the server wait for 5 to 8 heartbeats, until the other copy serves; then the library sends again what that copy
 * lacks. Pushes and pulls, collectives, barriers, rounds and checkpoints go on.
 *
 *    processes    server s (roles MLFAB_ROLE_SERVER, rank s), its replica (MLFAB_ROLE_REPLICA, rank s), and one
 *                 scheduler for all (scheduler = MLFAB_SCHEDULER_OWN): on three hosts, if a host may fail.
 *                 mlfab-run --replicas starts them on one. Replica and server call mlfab_serve, and need the same
 *                 callbacks and switches.
 *    who serves   two of these three decide it, so two copies never serve at the same time. A copy that has not
 *                 heard the one that serves for 5 heartbeats asks the scheduler, which agrees if it has not either.
 *                 A server that hears neither of the others stops answering after 4 heartbeats.
 *    halting      with two of the three lost, or when the copy that is left was not in sync, the shard halts: calls
 *                 wait, and after 20 heartbeats fail with PEER_DEAD and what became of each copy. So before a
 *                 process may fail, the last one that failed must be replaced: the copy that serves tells
 *                 (MLFAB_EVENT_IN_SYNC, code 0).
 *    replacing    start the process that died again, anywhere, with the same configuration: server 0 asks its replica
 *                 whether the fabric runs already. It gets the shard from the other copy, which goes on serving
 *                 meanwhile. mlfab-run does it. A process that comes back has to be let in by the copy of server 0 that
 *                 serves, which must have heard one of the others within 4 heartbeats. With `vote_dir`,
 *                 on the former one's disk, it votes then; else it has to hear both others first, and a second failure
 *                 before that halts the shard. A shard that has halted for 20 heartbeats does not come back: begin
 *                 again from a checkpoint.
 *
 * What a push promises. It returns 0 when each server that has a part of it has answered. With several servers and a
 * failover while it is open, its part at the failed server may be lost and the push still returns 0, if that server
 * had answered before it failed: stats.updates_lost counts it. MLFAB_ACK_APPLIED, the default: its servers have applied it. When a server is lost, what its
 * replica had not got is lost with it: in each shard at most div_max of such updates, and of each update all or
 * nothing. Every worker is told how many of its own (MLFAB_EVENT_UPDATES_LOST, stats.updates_lost); its iteration
 * counts do not go back, so no round waits for them. MLFAB_ACK_DURABLE: the replica has it, too, and the loss of one
 * of the two does not undo it. The answer comes a state later, and while no replica is in sync it waits, at most
 * until the push's deadline; from then on it counts as an APPLIED one. An update without an answer is sent again, and applied once.
 *
 * The replica gets states, not updates: what has changed in the shard since the last state, as often as the link
 * takes it, while updates go on. div_max 0, the default, is lock step: an update is not shown before the replica has
 * it. A positive div_max lets the server be ahead: it holds back updates that would take it further. That needs SGD
 * or momentum, without weight_decay and on_update (else mlfab_model_start returns UNSUPPORTED). HUGE_VAL bounds
 * nothing; it and 0 are for every optimizer. With rounds and a bound, 0 included, an answer waits for the next state. A
 * replica that does not get a state within silent_death_ns is out of sync, and the server goes on without it.
 *
 * Not with replicas: servers beside workers (dedicated 0), servers_max, mlfab_set_servers (UNSUPPORTED), ghost
 * tensors, progress by hand at servers, replicas and scheduler, MPI (which ends the job). Workers may join, die and
 * come back. Memory: at the server as for a checkpoint; at the replica the shard twice. Cost: a server's link carries
 * out up to a shard for each state, and each worker's link is called anew when the other copy serves.
 *
 * This node's worker rank (-1 on a dedicated server), the number of ranks for workers (config.workers_max), the number
 * of servers' numbers (config.servers_max). Each output may be NULL. */
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
/* What a server does to the weights w with an update u, or with the sum u of a round. weight_decay is decoupled:
 * before the line below, w <- w + scale * weight_decay * w. (ADAM with it is AdamW.) t, which also corrects ADAM's
 * mhat and vhat, counts the commits that touched a slice. Small tensors share slices. With ADADELAY and ADAM
 * therefore push all tensors in one call, or in rounds with MLFAB_PUSH_MORE: a push for each tensor advances t too
 * often. */
enum mlfab_optimizer_kind {
  MLFAB_OPTIMIZER_SGD = 0,      /* w <- w + scale * u */
  MLFAB_OPTIMIZER_MOMENTUM = 1, /* h <- gamma * h + scale * u; w <- w + h      (MLfabric eq. 2) */
  /* w <- w + c / sqrt(t + delay) * scale * u (MLfabric 3.1, 10.4) */
  MLFAB_OPTIMIZER_ADADELAY = 2,
  MLFAB_OPTIMIZER_ADAM = 3, /* w <- w + scale * mhat / (sqrt(vhat) + epsilon) */
  /* v <- beta2 * v + (1 - beta2) * u^2; w <- w + scale * u / (sqrt(v) + epsilon) */
  MLFAB_OPTIMIZER_RMSPROP = 4,
  MLFAB_OPTIMIZER_ADAGRAD = 5 /* v <- v + u^2; w <- w + scale * u / (sqrt(v) + epsilon) */
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
  MLFAB_SYNC_USER = 7 /* pull_condition and push_condition of the servers' config decide */
};

typedef struct mlfab_sync {
  uint32_t size;
  uint32_t kind;         /* MLFAB_SYNC_* */
  int64_t staleness;     /* s, at least 0; SSP with 0 lets nobody run ahead, as BSP */
  int64_t staleness_max; /* DSPS; 0: 4 * staleness + 4 */
  /* DROP, required: N_t, number of updates that complete a round, 1..workers; capped at the number of live workers */
  uint32_t need;
  /* 1: soft barrier: a waiting pull is answered as soon as V_train allows it. 0: lazy execution: it is answered when
   * its own iteration is complete, and so sees all of it */
  uint32_t soft;
  uint32_t only_fastest; /* PSSP. 1: only a worker that nobody is ahead of may have to wait */
  uint32_t keep_late; /* DROP. 1: a late update is added to the open round, as FluentPS prints it */
  double chance;      /* PSSP: c, 0 to 1; 0: no pull waits */
  /* PSSP_DYNAMIC: at least 0; 0: the significance |g| / |w| of the worker's last update, on each server's part of the
   * model */
  double alpha;
} mlfab_sync;

/* What a condition is given. `iteration`, `fastest` and `slowest` count whole updates: a pull with iteration i + 1
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
  double gamma;           /* MOMENTUM, in [0, 1); initially 0.9 */
  double adadelay_c;      /* ADADELAY, positive; initially 1 */
  double beta1, beta2;    /* ADAM, and beta2 RMSPROP; in [0, 1); initially 0.9 and 0.999 */
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
   * divided by 1 + change_decay * ln(t), t the iteration. It always changes an element that is 0. Not with I64, nor
   * is pull_half. 0: no filter. */
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

/* Sets one member by name: "optimizer" (sgd, momentum, adadelay, adam, rmsprop, adagrad), "gamma", "beta1", "beta2",
 * "epsilon", "weight_decay", "consistency" (async, bsp, ssp, dsps, drop, pssp, pssp_dynamic), "staleness", "need",
 * "chance", "alpha", "mean", "slices", "tags". Errors: CONFIG, with the name and the value; nothing has changed
 * then. */
MLFAB_API int mlfab_model_options_set(mlfab_model_options *options, const char *name,
                                      const char *value, mlfab_error *error_p);
/* Sets members that are still at their initial value from the environment: MLFAB_OPTIMIZER and so on, so that whoever
 * runs the program can choose. Errors: CONFIG, with the variable. */
MLFAB_API int mlfab_model_options_from_env(mlfab_model_options *options, mlfab_error *error_p);

/* Adds a tensor of `count` elements as `id` (any number but MLFAB_ALL). Before mlfab_model_start; sends nothing.
 * Errors: ARGUMENT, TENSOR (the id is used), STATE, LIMIT. */
MLFAB_API int mlfab_tensor_add(mlfab *ctx, uint32_t id, int dtype, uint64_t count);

/* Agrees on the model with the servers and the other workers, and waits until it stands. bufs: the first weights;
 * worker 0's are sent, and on the other workers they are overwritten with worker 0's. bufs NULL and n 0: zeros, and
 * nothing is written. options NULL: all initial, or as the environment says after mlfab_open_env. Cost: the model's
 * bytes once for each worker. A mistake in the options is an error here at once where the worker can see it. What
 * only a server can see refuses worker 0's model, and every worker gets the error: UNSUPPORTED (MLFAB_SYNC_USER
 * without conditions, a delay bound with rounds; with replicas what div_max excludes), MEMORY. After an error call it
 * again.
 * Errors: MODEL (with the first difference), ARGUMENT and CONFIG (with the member), STATE, UNSUPPORTED, LIMIT,
 * TIMEOUT, PEER_DEAD, MEMORY. */
MLFAB_API int mlfab_model_start(mlfab *ctx, const mlfab_model_options *options,
                                const mlfab_buf *bufs, uint32_t n);

/* Checkpoints. Every server writes its shard to a file in one directory: weights, optimizer state, open rounds,
 * versions, and which updates it has applied. Server 0 then writes the manifest, which makes the checkpoint whole, and
 * removes older checkpoints. A process or a host may fail at any time: the newest whole checkpoint can be loaded.
 * Training continues meanwhile: each server writes its state as it was between two commits, and copies a block before an
 * update changes it. Servers choose that time independently, so one shard may contain an update that another shard
 * does not, and a run that resumes has lost that part of it. No update is lost this way if no worker pushes during the
 * checkpoint. Servers on several hosts need a shared directory.
 *
 * A history is a number. It is drawn when a model begins anew, and all checkpoints of the model have it. A replica that takes
 * over keeps it, and so does a run that resumes. A checkpoint removes only files of its own history: of older
 * checkpoints, and of attempts that failed. Checkpoints of another history stay. The next checkpoint has a larger number than any in the directory. Two runs at the same time need directories of their own.
 * Memory: the shard's weights once more, from the first checkpoint on; the optimizer state once more at most, while it is
 * written. */
typedef struct mlfab_checkpoint_options {
  uint32_t size;
  uint32_t
      keep; /* how many checkpoints stay in the directory, this one included; 0: server 0's config */
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
 * Errors: ARGUMENT, STATE (before mlfab_model_start; no directory), AGAIN (another checkpoint is being made, slices are moving),
 * IO with the server, the file and the system's error; UNSUPPORTED (ghost tensors); TIMEOUT; PEER_DEAD with the server;
 * MEMORY. After an error the older ones are as before, and the files of the attempt are
 * removed; what a killed process of this history has left goes before the next attempt. The log of server 0 has one line for each
 * kind of failure and minute.
 * Cost: two small frames for each server; the shards are written. */
MLFAB_API int mlfab_checkpoint(mlfab *ctx, const mlfab_checkpoint_options *options,
                               mlfab_checkpoint_info *info_p);
MLFAB_API int mlfab_checkpoint_start(mlfab *ctx, const mlfab_checkpoint_options *options,
                                     mlfab_checkpoint_info *info_p, mlfab_request *request_p);

/* Before mlfab_model_start, on worker 0: the model will begin as the newest whole checkpoint in `dir`, with any number
 * of servers and workers. `dir` "": it will not. Sends nothing that waits. mlfab_model_start then ignores the first weights,
 * and bufs get the model's. Tensors and optimizer must be those of the checkpoint, and so must its consistency, mean
 * and number of slices where they are given. Iterations go on from V_train; every worker is a new process to the
 * servers. Errors of mlfab_model_start then: CHECKPOINT (none is whole: the file, and why), MODEL (the first tensor
 * that differs), CONFIG (the option that differs), IO. A damaged or incomplete checkpoint is
 * logged, and the next older one is taken.
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
 * Errors: ARGUMENT, TENSOR (not added, or not in the file), DTYPE, SHAPE, IO, CHECKPOINT (no whole safetensors file). */
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
  /* Sends an update again that ended IN_DOUBT, WITHDRAWN or DROPPED: its sequence number (result.seq). 0: a new
   * update. A filtered update is sent as it was, whatever the buffers hold now; STATE when the library no longer has
   * it. */
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
  /* with tags: the buffers still hold what the last pull wrote, so that this pull writes only what has changed */
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
  uint64_t version; /* the largest slice version: after the commit, or of what was pulled */
  uint64_t delay;   /* push: the largest delay over its slices (0 in BSP rounds) */
  uint32_t applied; /* push: number of servers that applied it, */
  uint32_t refused; /* and of those that did not */
  uint64_t waited_ns;
} mlfab_result;

/* Pushes an update and waits until every server has applied or refused it; in a round, has added it to the sum; with
 * MLFAB_ACK_DURABLE, until the replicas have it, too. The library only reads the buffers. options and result_p may be
 * NULL.
 * Errors: usage codes before anything is sent, UNSUPPORTED for MLFAB_ACK_DURABLE without replicas among them;
 * NOT_FINITE (NaN or infinity: the model is unchanged); DROPPED (by the
 * delay bound, or too late for its round); TIMEOUT, IN_DOUBT (see mlfab_push_status); PARTIAL; PEER_DEAD with the
 * server; CALLBACK.
 * Cost: the update's bytes up, one small frame back from each server. */
MLFAB_API int mlfab_push(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_push_options *options, mlfab_result *result_p);

/* The same without waiting. Updates of up to 64 KiB are copied: their buffers are the caller's again on return.
 * request_p NULL: nobody will wait for it; mlfab_flush returns its failure, and the counters show it.
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

/* Which part of this worker's updates travels (TDF 4.2, 4.3). The library adds the update to a residual. An element
 * below threshold / (1 + decay * ln t), t the iteration, that the random draw selects is held back: it stays in the
 * residual and is part of the next push. Exact zeros never travel. With `half` the other elements are rounded: beyond
 * +-65504 they are sent as +-65504 and counted; what that cuts off, or what rounds to zero, stays in the residual;
 * ordinary rounding errors do not. An update that ended IN_DOUBT, WITHDRAWN or DROPPED is not folded back into the
 * residual: send it again with retry_seq. */
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
 * NULL: none; what the residual holds goes with the next push. Memory: the tensor's bytes for the residual, and the
 * encoded update while it travels; the buffers of mlfab_push_start are then the caller's again on return. Errors
 * (nothing has changed): ARGUMENT, TENSOR, DTYPE (int64; with MLFAB_ALL when any tensor is), UNSUPPORTED (ghost
 * tensors), STATE before mlfab_model_start, MEMORY. */
MLFAB_API int mlfab_set_filter(mlfab *ctx, uint32_t tensor, const mlfab_filter *filter);

/* As mlfab_model_options_set and _from_env: "filter_threshold", "filter_decay", "filter_drop", "filter_top",
 * "filter_half" (none, f16, bf16). */
MLFAB_API int mlfab_filter_set(mlfab_filter *filter, const char *name, const char *value,
                               mlfab_error *error_p);
MLFAB_API int mlfab_filter_from_env(mlfab_filter *filter, mlfab_error *error_p);

/* Pulls whole tensors into the caller's buffers; each slice is of one version. The consistency model says when the
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
 * only. They stay as they are, whatever is pushed meanwhile, until mlfab_view_release or mlfab_close; also if the server
 * dies. (If the link breaks and the server has no memory to copy what is read, it goes on without, and they may change.) A
 * forked child does not have them. `data` of the buffers is ignored. Each slice is of one version, and the consistency model says when the server
 * answers, as with mlfab_pull. Where not all of it can be read in place (another host, another transport than shared
 * memory, a model on a device, less than 32 KiB that lie together, a server or worker short of descriptors), the parts are a copy, one for each tensor. *view_p is
 * written when the request ends with 0, and must be there until then. options: no flags.
 * Errors: of mlfab_pull; LIMIT (MLFAB_VIEWS_MAX of this worker are out); UNSUPPORTED (ghost tensors).
 * Cost: one small frame up and one down for each server, or a few of a model of many blocks. A view keeps the server's blocks of its version: at most
 * MLFAB_VIEWS_MAX times the model for each worker, beside what the server needs anyway. */
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

/* Waits for a request at most timeout_ns (0: its own deadline), ends it, and returns its status. result_p may be
 * NULL. When timeout_ns is shorter than the request's deadline and passes, it returns TIMEOUT, and the request stays
 * open. */
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

/* Cancels a request; its buffers are the caller's again on return (with mpi_lend: when it has been ended). End it with test or wait, which return CANCELLED
 * (it was not sent, or the server dropped it), 0 (too late: it was applied), or IN_DOUBT (the server has not said:
 * ask mlfab_push_status later). Cancelling a collective ends all open collectives, on all workers (section 10). */
MLFAB_API int mlfab_cancel(mlfab *ctx, mlfab_request request);

/* The fate of this node's update `seq`. *status_p: 0 (applied at all servers), IN_DOUBT (not decided yet), WITHDRAWN
 * (applied at no server), PARTIAL (applied at some servers only), or the code for which it was refused. The library
 * remembers the last 256 updates. */
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
 * too. After a TIMEOUT the next call is the same barrier. Of the options only timeout_ns is used; NULL: none.
 * Errors: TIMEOUT with the first rank that is missing; PEER_DEAD (server 0); AGAIN (too many requests are open). */
MLFAB_API int mlfab_barrier(mlfab *ctx, const mlfab_collective *options);

/* Copies `bytes` bytes, at most model_max_bytes, from worker `root` to all others, from worker to worker. A
 * collective (section 10): every worker calls it, in the same order, with the same root and size. Of the options
 * algorithm, timeout_ns, tag and inputs are used; NULL: none.
 * Errors: of mlfab_allreduce_list; RANK_RANGE (root); ARGUMENT (0 bytes; root does not take part). */
MLFAB_API int mlfab_broadcast(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                              const mlfab_collective *options);

/* Declares that this worker has no more data. Rounds, barriers and collectives of the others go on without it, and
 * none of their calls fails because of it. Its pulls still work; its later pushes and collectives return
 * MLFAB_ERR_STATE. In collectives it takes effect between two calls, the same two on every worker. In earlier calls
 * that others began and this worker never makes, the library contributes the operation's identity for it (0 to a
 * sum), and a mean is divided by the number of the others. Earlier calls that need its data fail with
 * MLFAB_ERR_PEER_CLOSED: a broadcast from it, an allgather with a block of it, a user's reducer, a call under way of
 * a partial or stochastic reduction or a task graph. Waits for this worker's pushes, and until no other worker needs
 * it.
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

/* Changes the consistency model while the fabric runs, from any worker: of the slices that hold bytes of `tensor`, or
 * of all (MLFAB_ALL), at `server`, or at all (MLFAB_ALL). The last change wins. The server looks at its waiting pulls
 * again: it answers those that the new model allows. Leaving rounds commits the open round as it is. Waits until
 * every server in question has changed. The slices of one server may have up to 8 different models; a push or a pull
 * then waits until all slices that it touches allow it.
 * Errors: ARGUMENT (with the member), TENSOR, STATE before mlfab_model_start, LIMIT (a ninth model), UNSUPPORTED
 * (rounds with a delay bound; leaving rounds with `mean`; another than BSP with `deterministic`; USER without
 * conditions there), AGAIN (this worker has another change under way, or 8 of others wait), TIMEOUT (it may still
 * happen), PEER_DEAD. After an error some servers may have changed: call it again. */
MLFAB_API int mlfab_set_sync(mlfab *ctx, const mlfab_sync *sync, uint32_t server, uint32_t tensor,
                             uint64_t timeout_ns);

/* Moves slices so that the n servers of the list, and no others, hold the model, balanced by bytes and with the
 * fewest bytes moved (FluentPS elastic slicing). From any worker, one at a time. Pushes and pulls of all workers wait
 * meanwhile; none is lost, and none is applied twice. Every worker has to pause for it: a worker with
 * MLFAB_PROGRESS_HAND does so only inside a call.
 * Cost: the bytes that move, once; memory for the old and the new shard at each server meanwhile; with tags, the next
 * pull of every worker fetches all elements.
 * Errors: ARGUMENT (an empty list, a server twice, a number that no server can have), STATE before mlfab_model_start, or
 * with the server that is not here (mlfab_servers), AGAIN (another one is under way), TIMEOUT (with the worker that has
 * not paused; it may still happen), PEER_DEAD with the server, which is dead or which a worker cannot reach, UNSUPPORTED
 * (a server that has joined lacks what the model needs; servers with replicas), MEMORY and LIMIT (a ninth consistency
 * model at a server):
 * everything is as it was. */
MLFAB_API int mlfab_set_servers(mlfab *ctx, const uint32_t *servers, uint32_t n,
                                uint64_t timeout_ns);

/* Changes the delay bound and the planning options at run time, from any worker. The last change wins. Returns when
 * it is sent. The replica of server 0 goes on with what it was told by server 0; a change that server 0 got in its last
 * moments may be lost with it. Errors: ARGUMENT (delay_bound 0), STATE without a scheduler, UNSUPPORTED (a delay bound
 * with rounds), AGAIN or PEER_DEAD without a link to server 0. */
MLFAB_API int mlfab_set_schedule(mlfab *ctx, const mlfab_schedule *schedule);

/* Overrides the measured capacity of this node's network links: bytes per second in and out, for the scheduler, and
 * from the next epoch on for collectives (algorithms, order_by_rate). 0: the link is cut; negative: measure again.
 * Errors: ARGUMENT (not a finite number), STATE without a scheduler on a node that is not a worker. */
MLFAB_API int mlfab_set_link(mlfab *ctx, double in_bytes_per_s, double out_bytes_per_s);

/* Tells the traffic of others on this host's network link, in bytes per second: the scheduler is told the measured
 * capacity without it, at least an eighth of the capacity. It holds until the next call; 0, 0: none. speed: of the
 * link, where the system does not tell this process (in a container); 0: not known. extras/mlfab_curl.h calls it with
 * what node_exporter says.
 * Errors: ARGUMENT (negative, or not a finite number), STATE (neither scheduler nor order_by_rate: links are not
 * measured). */
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
 * Failures. A failure ends all open collectives on all workers with one code, one rank and one text: a worker died or
 * closed, sizes differ, a deadline passed, a NaN was refused, a request was cancelled. (When several workers fail at
 * the same time, each returns its own failure.) Every worker sees a failure once: its open calls return it, or else
 * its next call. After several failures since its last call, it sees the last one. Then calls match again among the
 * workers that live, in a new epoch.
 *    Repeating a step. A call may return 0 on one worker and the failure on another, so workers must agree which step
 *    to repeat: each calls an allreduce of MLFAB_OP_MAX over step * workers + rank, then all take the model of that
 *    rank by a broadcast into other memory (examples/11_comes_and_goes.c).
 *    Deadlines. A TIMEOUT names the first rank that has not called; below two heartbeats, perhaps the caller.
 *    A worker closes. The next call of the others fails once with MLFAB_ERR_PEER_CLOSED, unless the worker had
 *    finished (mlfab_finish).
 *    A worker joins (section 6). No call fails, and the epoch ends between two calls, the same two on every worker.
 *    Where 1024 workers take part already, the joiner's call fails with MLFAB_ERR_LIMIT, and later ones wait for room.
 *    A worker comes back after its death, as a new process. It is admitted like one that joins: no call waits for it before its
 *    first collective, which meets the next call of the others that is the same, and none fails. If they make no such call for a
 *    tenth of config.timeout_ns, their epoch ends with MLFAB_ERR_AGAIN, and it takes part in the next one. So does it at once if
 *    they have objects open: they close these, and all open new ones.
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
  /* For allreduces that are not `ordered` (MLfabric §6): up a tree to a root drawn from the seed, with aggregators
   * that the scheduler chooses by link capacity, then down a distribution tree. Each worker sends and receives the
   * array once; two more round trips; an aggregator buffers up to 4 MiB of early data. With two workers, without a
   * scheduler, or when it is silent for a heartbeat: as AUTO without a scheduler. */
  MLFAB_ALGORITHM_PLANNED = 5
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
  /* A number of the caller's; 0: none. Where the tags of matching calls differ, the call fails with
   * MLFAB_ERR_MISMATCH and both tags. Without tags, calls of equal size in different orders give wrong sums. */
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
 * Do not write to it before the call has ended: the update or the sum may then be wrong. When a call fails, is
 * cancelled, or loses its link, the library replaces its pages by new ones with the same contents: this takes as long
 * as a copy, and pinned pages must be pinned again. A context has 255 such memories, of which a peer reads 32 in place
 * and gets copies of the others. Beyond that, and where shared memory is not among the transports, it is ordinary
 * memory. mlfab_free waits while another thread is in a blocking collective.
 * Errors: ARGUMENT (0 bytes), MEMORY. */
MLFAB_API int mlfab_alloc(mlfab *ctx, uint64_t bytes, void **memory_p);
MLFAB_API int mlfab_free(mlfab *ctx, void *memory);

/* Reduces the workers' buffers in place, as if the list were one array; every worker gets the result. The buffers
 * must not overlap. options NULL: sum.
 * Errors: ARGUMENT (no elements, overlap, the option that is out of range), DTYPE, UNSUPPORTED (mean of MLFAB_I64,
 * what an algorithm cannot do, refuse_nan with a user's reducer), LIMIT (more than 4,096 buffers, model_max_bytes, or
 * 1,024 workers), AGAIN (1,024 are open), STATE (this worker has finished), MEMORY. Failures: MISMATCH with a rank
 * whose sizes, options or tag differ; TIMEOUT with the first rank that is missing; PEER_DEAD; PEER_CLOSED;
 * NOT_FINITE; CANCELLED; CALLBACK (of a task graph); MEMORY with the rank; AGAIN (a worker has come back).
 * Cost: with RING and HALVING 2 (P-1)/P of the array's bytes out and in for each worker. Within one host, up to 64
 * workers, the blocking form goes through shared memory, with MLFAB_ALGORITHM_AUTO and no user's reducer.
 * Precision: half types are added in float32 and rounded to nearest once for each transfer (in shared memory once in
 * all); sums beyond the largest number are infinite. The error of a sum is at most (P - 1) half units in the last
 * place of its largest partial sum. MEAN divides that sum and rounds once more, so the mean of an infinite sum is
 * infinite. */
MLFAB_API int mlfab_allreduce_list(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                   const mlfab_collective *options);
MLFAB_API int mlfab_allreduce_start(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p);

/* Reduces; every worker gets its block. `data` holds the blocks of all ranks one after the other, counts[r] elements
 * for rank r (0 allowed, and required for ranks that do not take part: ARGUMENT names one). On return block `rank`
 * holds the result; the contents of the others are undefined. Errors as above. Cost: (P-1)/P of the bytes. */
MLFAB_API int mlfab_reduce_scatter(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                   const mlfab_collective *options);
MLFAB_API int mlfab_reduce_scatter_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                         const mlfab_collective *options, mlfab_request *request_p);

/* Every worker gives its block of `data` and gets all others. counts as above; bytes with MLFAB_BYTES. Of the options
 * algorithm, timeout_ns, tag and inputs are used. Errors and cost as above. */
MLFAB_API int mlfab_allgather(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                              const mlfab_collective *options);
MLFAB_API int mlfab_allgather_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p);

/* mlfab_broadcast and mlfab_barrier of section 9 without waiting. */
MLFAB_API int mlfab_broadcast_start(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                                    const mlfab_collective *options, mlfab_request *request_p);
MLFAB_API int mlfab_barrier_start(mlfab *ctx, const mlfab_collective *options,
                                  mlfab_request *request_p);

/* --- partial reductions (eagerSGD) ---
 *
 * A partial reduction starts before all workers have called, and adds what is there. SOLO starts when the first
 * worker calls; MAJORITY when a worker drawn from the seed calls (on average half of the workers have called then);
 * QUORUM when `quorum` workers have called. The progress threads of the other workers give what these had not yet
 * contributed, or zeros. A late contribution is carried into the next round: nothing is lost, and nothing is added
 * twice. A call of a worker is a step; steps are counted from 0. Reductions are rounds, counted from 0 on all
 * workers. Step s waits until round s is over, so the call of a worker that lags returns at once. A worker with
 * MLFAB_PROGRESS_HAND takes part only inside calls, and the others' rounds wait for it.
 */
enum mlfab_partial_mode {
  MLFAB_PARTIAL_SOLO = 1,
  MLFAB_PARTIAL_MAJORITY = 2,
  MLFAB_PARTIAL_QUORUM = 3
};

enum mlfab_partial_results {
  /* A call returns the newest round's result; older results are overwritten. Workers that skip results have models
   * that drift apart: average the models now and then with mlfab_allreduce and MLFAB_OP_MEAN (eagerSGD §5). */
  MLFAB_PARTIAL_LATEST = 0,
  /* Every worker gets every round's result once, in order. A worker that has queue_max results waiting holds up the
   * next round. */
  MLFAB_PARTIAL_QUEUED = 1
};

typedef struct mlfab_partial_options {
  uint32_t size;
  uint32_t mode; /* MLFAB_PARTIAL_SOLO ... */
  /* QUORUM: 1..live workers when it opens; later capped at the number of live workers */
  uint32_t quorum;
  uint32_t results;   /* MLFAB_PARTIAL_LATEST, MLFAB_PARTIAL_QUEUED */
  uint32_t queue_max; /* 0: 8 */
  uint32_t op; /* MLFAB_OP_SUM or MLFAB_OP_MEAN (divided by the number of workers that take part) */
  uint32_t algorithm; /* of the exchange: MLFAB_ALGORITHM_AUTO ... TREE */
  /* 1: a contribution with NaN or infinity is refused (NOT_FINITE); nothing has changed */
  uint32_t refuse_nan;
  uint64_t seed;       /* draws the worker of MAJORITY, and who counts a QUORUM; 0: the config's */
  uint64_t timeout_ns; /* of mlfab_partial_open */
} mlfab_partial_options;

/* What a step got. */
typedef struct mlfab_partial_info {
  uint32_t size;
  uint32_t included;   /* 1: this call's data is in the result */
  uint64_t round;      /* of the result */
  uint64_t step;       /* this call's number */
  uint32_t active;     /* workers whose call of this round is in the result */
  uint32_t workers;    /* that took part */
  uint32_t stale;      /* calls of this worker that are in no result yet */
  uint64_t bitmap[16]; /* bit r: rank r was active; only ranks up to 1,023 */
} mlfab_partial_info;

/* Opens a partial reduction of `count` elements; a collective that waits for all workers. *id_p names it.
 * Errors: ARGUMENT (quorum 0 or above the number of workers, ...), DTYPE, UNSUPPORTED (mean of MLFAB_I64), LIMIT (16
 * objects are open), MEMORY, and failures (MISMATCH: the options differ). Memory: 4 arrays, with QUEUED queue_max
 * more. */
MLFAB_API int mlfab_partial_open(mlfab *ctx, uint64_t count, int dtype,
                                 const mlfab_partial_options *options, uint32_t *id_p);
/* A step: contributes `data`, and overwrites it with a result. One at a time for an object. info_p may be NULL; else
 * set its size.
 * Errors: ARGUMENT, NOT_FINITE, AGAIN (a step or a flush is under way), STATE (after mlfab_finish), and failures.
 * After a failure the library keeps the contribution for the next round, unless it is in a result that some worker
 * has. Steps and rounds go on, at the first round that no worker has a result of; queued results are discarded. */
MLFAB_API int mlfab_partial_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                   mlfab_partial_info *info_p);
/* The same without waiting; info_p and data are borrowed until the request has ended. */
MLFAB_API int mlfab_partial_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                  mlfab_partial_info *info_p, mlfab_request *request_p);
/* The sum (or mean) of all workers' contributions that are in no result yet, into `data`: for the end of a training.
 * A full allreduce; every worker calls it. After a failure the library keeps this worker's contribution, unless it is
 * in a sum that some worker has: before they repeat the flush, workers agree on that as after any failure. Errors: of
 * a step.
 * Memory: one array. */
MLFAB_API int mlfab_partial_flush(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns);
/* Closes it on this worker. Later rounds of others fail and name this worker, so call a flush or a barrier before.
 * Errors: ARGUMENT (no such id), STATE (a step or a flush is under way). */
MLFAB_API int mlfab_partial_close(mlfab *ctx, uint32_t id);

/* --- stochastic reductions (ASAP) ---
 *
 * A worker sends its array to the few workers that a graph names, and takes the mean of its own and of those that it
 * receives. With NOTIFY_ACK it waits for the array of every sender in the same iteration, and acknowledges those it
 * has used; nobody waits for the whole fabric. BSP and ASYNC are there for comparison: they take the arrays that are
 * complete when they look, BSP after a barrier (which does not wait for arrays), ASYNC at once.
 */
enum mlfab_graph_kind {
  MLFAB_GRAPH_ALL = 1,       /* all to all */
  MLFAB_GRAPH_EXPANDER = 2,  /* i to i + 1 and i + round(sqrt N): ASAP's root expander */
  MLFAB_GRAPH_CHAIN = 3,     /* i to i + 1 */
  MLFAB_GRAPH_RING = 4,      /* i to i + 1 and i - 1 */
  MLFAB_GRAPH_HYPERCUBE = 5, /* N a power of 2 */
  MLFAB_GRAPH_REGULAR = 6,   /* random, `degree` out and in, from the seed */
  MLFAB_GRAPH_STAR = 7,      /* all to 0 and back: only for mlfab_graph_check, not for reductions */
  MLFAB_GRAPH_USER = 8       /* the caller's edges */
};

typedef struct mlfab_edge {
  uint32_t from, to;
} mlfab_edge;

typedef struct mlfab_graph_info {
  uint32_t in_degree; /* counting the node itself; 0: not the same for all nodes */
  uint32_t connected; /* 1: strongly */
  uint32_t doubly_stochastic;
  uint32_t edges; /* without duplicates and loops */
  double gap;     /* 1 - sigma_2 of the averaging matrix */
} mlfab_graph_info;

/* Writes the edges of a graph: *edges_p of them, at most `room`. degree and seed: REGULAR. Errors: ARGUMENT (nodes 0
 * or above 1,024, a hypercube of another size, degree), LIMIT (room is too small; *edges_p is the number needed),
 * MEMORY. */
MLFAB_API int mlfab_graph_build(uint32_t kind, uint32_t nodes, uint32_t degree, uint64_t seed,
                                mlfab_edge *edges, uint32_t room, uint32_t *edges_p);
/* Examines a graph. *info_p is set whenever the edges are in range. error_p may be NULL. Errors: ARGUMENT with the
 * edge that is out of range, the node that cannot be reached, the node whose in-degree differs, or a gap of 0;
 * MEMORY. Cost: nodes^3. */
MLFAB_API int mlfab_graph_check(const mlfab_edge *edges, uint32_t n, uint32_t nodes,
                                mlfab_graph_info *info_p, mlfab_error *error_p);

enum mlfab_stochastic_mode {
  MLFAB_STOCHASTIC_NOTIFY_ACK = 1,
  MLFAB_STOCHASTIC_BSP = 2,
  MLFAB_STOCHASTIC_ASYNC = 3
};

typedef struct mlfab_stochastic_options {
  uint32_t size;
  uint32_t graph;          /* MLFAB_GRAPH_*, not STAR */
  uint32_t degree;         /* REGULAR */
  uint32_t mode;           /* MLFAB_STOCHASTIC_NOTIFY_ACK ...; 0: that */
  const mlfab_edge *edges; /* USER: between worker ranks; read during the call */
  uint32_t nedges;
  uint32_t refuse_nan; /* 1: the call refuses NaN and infinity (NOT_FINITE); nothing has changed */
  uint64_t seed;       /* REGULAR; 0: the config's */
  uint64_t timeout_ns; /* of mlfab_stochastic_open */
} mlfab_stochastic_options;

typedef struct mlfab_stochastic_info {
  uint32_t size;
  uint32_t senders; /* in-degree without the worker itself */
  uint32_t whole;   /* inputs averaged: complete, and not used before */
  uint32_t torn;    /* inputs that were being written (BSP, ASYNC) */
  uint32_t stale;   /* inputs that were used before or had not come */
  uint32_t reserved;
  uint64_t iteration;  /* that this worker has finished, from 1 */
  uint64_t sent_bytes; /* by this call */
} mlfab_stochastic_info;

/* Opens a stochastic reduction of `count` elements (F32 or F64); a collective, with the same options on all workers.
 * *id_p names it. The graph is over the workers that take part, in the order of members. After a failure it is built
 * again over those that are left; of USER's edges it keeps those between them. All in-degrees must be equal.
 * Out-degrees may differ, but then the mean of all models drifts towards workers that send to more (see
 * doubly_stochastic).
 * Errors: ARGUMENT (as mlfab_graph_check), DTYPE, LIMIT, MEMORY, UNSUPPORTED, and failures (MISMATCH: the options
 * differ).
 * Memory: one array for each sender, and one more. */
MLFAB_API int mlfab_stochastic_open(mlfab *ctx, uint64_t count, int dtype,
                                    const mlfab_stochastic_options *options, uint32_t *id_p);
/* One iteration: sends `data` to this worker's receivers, and replaces it by the mean of itself and what came. One at
 * a time for an object. info_p may be NULL; else set its size. With any error `data` is unchanged.
 * Errors: ARGUMENT (also: the workers that are left have no valid graph), NOT_FINITE, AGAIN (one is under way), and
 * failures; TIMEOUT names a rank that has not called.
 * Cost: the array once to each receiver; with NOTIFY_ACK one small message back from each, with BSP one to every
 * worker. */
MLFAB_API int mlfab_stochastic_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                      mlfab_stochastic_info *info_p);
MLFAB_API int mlfab_stochastic_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                     mlfab_stochastic_info *info_p, mlfab_request *request_p);
/* Closes it on this worker. What it has begun to send still goes out. Iterations of others beyond this worker's last
 * fail and name it, except with ASYNC: make the same number of calls everywhere. Errors: ARGUMENT, STATE (one is
 * under way). */
MLFAB_API int mlfab_stochastic_close(mlfab *ctx, uint32_t id);

/* --- task graphs ---
 *
 * A directed acyclic graph of the user's operations (eagerSGD §4). The thread that drives the context executes it. In
 * each round an operation runs once: when all operations that it comes after are done, or `need` of them (1: OR).
 * Every worker makes its own part; sends and receives match by (rank, tag).
 */
typedef struct mlfab_dag mlfab_dag;
/* Non-zero fails the task graph on all workers (MLFAB_ERR_CALLBACK). It may call mlfab_dag_trigger. */
typedef int (*mlfab_dag_compute_fn)(void *user, uint64_t round);

enum mlfab_dag_flags {
  MLFAB_DAG_OUTSIDE = 1, /* mlfab_dag_trigger counts as one more operation that it comes after */
  MLFAB_DAG_OPTIONAL = 2 /* a round may end without it */
};

/* Makes an empty task graph. Sends nothing. */
MLFAB_API int mlfab_dag_create(mlfab *ctx, mlfab_dag **dag_p);
/* Each adds an operation; *op_p is its number. The memory is the caller's, borrowed until the task graph is closed.
 * At most 1 GiB a message. mlfab_dag_nop only waits for other operations. Errors: ARGUMENT, RANK_RANGE, LIMIT, STATE
 * (it is open), MEMORY; of recv_reduce also DTYPE and UNSUPPORTED (mean). */
MLFAB_API int mlfab_dag_send(mlfab_dag *dag, int32_t rank, uint32_t tag, const void *data,
                             uint64_t bytes, uint32_t *op_p);
MLFAB_API int mlfab_dag_recv(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data, uint64_t bytes,
                             uint32_t *op_p);
MLFAB_API int mlfab_dag_recv_reduce(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data,
                                    uint64_t count, int dtype, int op, uint32_t *op_p);
MLFAB_API int mlfab_dag_compute(mlfab_dag *dag, mlfab_dag_compute_fn fn, void *user,
                                uint32_t *op_p);
MLFAB_API int mlfab_dag_nop(mlfab_dag *dag, uint32_t *op_p);
/* `op` comes after `dependency`. */
MLFAB_API int mlfab_dag_after(mlfab_dag *dag, uint32_t op, uint32_t dependency);
/* need: how many dependencies must be done before it runs; 0: all. flags: MLFAB_DAG_*. */
MLFAB_API int mlfab_dag_set(mlfab_dag *dag, uint32_t op, uint32_t need, uint32_t flags);
/* Checks it and opens it; a collective. persistent 1: each round begins by itself after the last; it then needs an
 * operation that waits for a trigger or a message. Errors: ARGUMENT with the operation (a cycle, need above its
 * dependencies, a (rank, tag) twice), STATE, LIMIT, and failures. */
MLFAB_API int mlfab_dag_open(mlfab_dag *dag, int persistent, uint64_t timeout_ns);
/* Begins the next round (not of a persistent one); each worker counts rounds from 0. Errors: STATE (not open,
 * persistent), AGAIN (a round is under way), PEER_DEAD (a rank of the graph no longer takes part), and failures. */
MLFAB_API int mlfab_dag_start(mlfab_dag *dag, uint64_t timeout_ns, mlfab_request *request_p);
/* Waits until `round` is over. Errors: STATE (it was not begun, or a failure has ended it), and failures. */
MLFAB_API int mlfab_dag_wait(mlfab_dag *dag, uint64_t round, uint64_t timeout_ns);
/* Triggers an OUTSIDE operation in the present round; a second time in a round does nothing. Errors: ARGUMENT (no
 * such operation, or not OUTSIDE), STATE (no round is under way). */
MLFAB_API int mlfab_dag_trigger(mlfab_dag *dag, uint32_t op);
/* Closes it on this worker and frees it; *dag_p becomes NULL. A round under way fails everywhere (CANCELLED), and
 * others cannot go on with it (PEER_CLOSED). Call it before mlfab_close and mlfab_abandon: afterwards the task graph
 * must not be used, not even here, and its memory is lost. Errors: ARGUMENT (dag_p is NULL), CLOSED (*dag_p is
 * NULL). */
MLFAB_API int mlfab_dag_close(mlfab_dag **dag_p);

/* ------------------------------------------------------------------------------------------------
 * 11. Telemetry
 *
 * Three files, which the configuration names, or the environment (MLFAB_LOG, MLFAB_METRICS, MLFAB_TRACE). A thread of
 * the library writes them; training never waits for it. A file that cannot be written is one line in the log, and
 * training goes on; the thread tries again. Symbolic links are not followed. Every node writes its own: "{node}" in a file's name is replaced by the
 * node's name (worker-3, server-0, scheduler); without it the name is put before the last dot of the file's name
 * ("run/m.prom" becomes "run/m.worker-3.prom"), or behind it if there is no dot. Not with a transport of virtual time
 * (UNSUPPORTED).
 *
 * log      "info" writes lines of this level and worse to stderr, "info:FILE" appends them to the file. env.log gets
 *          its lines as well. If the thread cannot keep up, lines are dropped and counted in the log.
 * metrics  OpenMetrics text, for mlfab-top and Prometheus: every counter of mlfab_stats, the iteration, and whom the
 *          oldest open call waits for. Written beside the file, then renamed: a reader sees a whole file. The last one,
 *          written when the context closes (mlfab_close waits for it), has mlfab_state 3.
 * trace    Chrome trace events (JSON), for ui.perfetto.dev: a lane for each direction of each link, a slice while it
 *          carries a transfer, and an arrow from sender to receiver; at a scheduler also the plan. A process that is
 *          killed leaves a file that Perfetto takes. At most 256 MiB; what the thread cannot keep up with is dropped
 *          and counted in the trace. tools/trace.py joins the files of several nodes.
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
  uint64_t rounds; /* server: iterations completed, by the model of its first slice */
  uint64_t slices_moved, bytes_moved; /* server: received from other servers */
  /* Worker: collectives that succeeded and failed, epochs, rounds of partial reductions that ended. */
  uint64_t collectives, collectives_failed, collective_epochs, rounds_partial;
  /* Worker: whole iterations of pushes that every server has decided; the sum of the delays of its applied updates. */
  uint64_t iterations, push_delay_sum;
  /* Bytes of this node on network links of its host, where links are measured (a scheduler, order_by_rate). */
  uint64_t network_sent, network_received;
  /* Servers with replicas. Worker: parts of updates (one for each server) that were applied, and lost with a server. The
   * copy that serves: states that the other one has got, the bytes of their weights and optimizer, and how often this
   * one has taken over. */
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
  uint32_t members; /* updates in the commit: 1, or merged small ones, or those of a round */
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

/* ------------------------------------------------------------------------------------------------
 * 12. Transport interface
 *
 * A transport is a table of functions. It carries frames between the two ends of a link: whole, once, and in order
 * between UP and DOWN; at DOWN any suffix of them may be lost. Only `wait` blocks. The library calls no function of a
 * transport from two threads at once, except wait, wake and fd, which may run beside any other but close.
 *
 * A frame is a head (64-byte header with lengths inside, then meta) and a bulk. A transport of streams finds the
 * lengths with mlfab_frame_check, which also refuses what cannot be a frame before memory is allocated. A transport
 * of messages need not look inside. The first frame that a caller sends on a link, and every frame of a link that
 * begins with JOIN, has at most 4096 bytes: a transport may close a link that announces more.
 */
#define MLFAB_TRANSPORT_ABI 3
#define MLFAB_HEADER_BYTES 64
#define MLFAB_META_MAX 65536   /* largest meta of a frame, bytes */
#define MLFAB_BULK_MAX 1048576 /* largest bulk of a frame, bytes */

enum mlfab_io_kind {
  MLFAB_IO_UP = 1, /* `link` is connected; `token` of connect, or 0: the peer connected */
  /* the link broke (link 0: the connect of `token` failed): `code`, `text`. Its sends no longer borrow anything */
  MLFAB_IO_DOWN = 2,
  MLFAB_IO_FRAME = 3,    /* a frame arrived: head, bulk; borrowed until release */
  MLFAB_IO_SENT = 4,     /* the bulk of the send with `token` is no longer borrowed */
  MLFAB_IO_WRITABLE = 5, /* a link that refused a send may take one now */
  MLFAB_IO_REFUSED = 6,  /* a connection was closed before it was a link (stranger, bad frame) */
  MLFAB_IO_MEASURED = 7, /* link 0: traffic of this host, in `measure` */
  MLFAB_IO_FILE = 8, /* mlfab_node.h: the file operation `token` has ended: `code`, `text`, bulk */
  /* head: the header (64 bytes) of a frame of which more has to come. token 1: it came in the midst of another frame, and
   * may be tensor bytes. A transport may report both in a fabric with a key: the node finds wrong lengths before it waits */
  MLFAB_IO_HEAD = 9
};

/* Traffic of a host's network interface since the last measure; of this node only where the interface does not tell. */
typedef struct mlfab_measure {
  uint64_t elapsed_ns;
  uint64_t bytes_in, bytes_out;
  /* The rate while a sender had more to send, bytes per second; 0: too short to measure. */
  double delivery_in, delivery_out;
  double nominal; /* speed of the interface, bytes per second; 0: not told */
  /* 1: for some of the time no sender had more to send, so the bytes are a lower bound of the capacity. */
  uint32_t limited_in, limited_out;
  uint64_t own_in, own_out; /* of these bytes, those of this node */
} mlfab_measure;

/* What a transport reports. */
typedef struct mlfab_io_event {
  uint32_t kind; /* MLFAB_IO_* */
  uint32_t link; /* the transport's number for the connection, 1..2^24-1 */
  uint64_t token;
  const void *head; /* 64-byte frame header and its meta, contiguous, 8-byte aligned */
  const void *bulk; /* tensor bytes, 8-byte aligned; NULL with bulk_bytes > 0: a ghost */
  uint32_t head_bytes, bulk_bytes;
  int32_t code;  /* MLFAB_ERR_* */
  uint32_t caps; /* UP: MLFAB_CAP_* of the link's transport; set by the driver */
  /* DOWN, REFUSED: why. UP of a call: the address at which this node is reached on the way that the call took, where open
   * was given none. May be NULL; valid until release */
  const char *text;
  void *opaque;                 /* the transport's own, for release */
  const mlfab_measure *measure; /* MEASURED */
} mlfab_io_event;

enum mlfab_transport_caps {
  MLFAB_CAP_RELIABLE = 1, /* bytes arrive unchanged: payload checksums are not computed */
  MLFAB_CAP_GHOST = 2,    /* carries ghosts */
  MLFAB_CAP_LOCAL = 4,    /* reaches this host only */
  /* reports only frames that passed mlfab_frame_check and, unless it is reliable, mlfab_frame_verify */
  MLFAB_CAP_CHECKED = 8,
  MLFAB_CAP_PROBE = 16, /* has the function probe */
  /* time is virtual, and all contexts are in one thread: env.clock moves only inside wait, which runs the other
   * contexts */
  MLFAB_CAP_VIRTUAL = 32,
  /* frames need no tags: the kernel of each end confirms that the other process belongs to this user or to root, or the
   * transport lets through nothing that a process without the fabric's key has sent or changed. May also be set in the
   * UP event of a link */
  MLFAB_CAP_VOUCHED = 64
};

typedef struct mlfab_transport_options {
  uint32_t size;
  uint32_t allow_insecure;
  const char *listen; /* address to listen at; "": the transport chooses */
  const char *ifname; /* as in mlfab_config */
  const char *job;
  const mlfab_env *env; /* complete: no member is NULL but store and files */
  void *user;           /* mlfab_config.transport_user */
  mlfab_error *error;   /* filled on failure; never NULL */
  uint64_t timeout_ns;  /* how long open may retry a host name to listen at; 0: it asks once */
  uint32_t keyed; /* 1: links prove a key, so addresses of the loopback need no allow_insecure */
  /* The fabric's key, one or two texts as in mlfab_config; "": none. It is wiped when the node is open. */
  const char *key;
  /* A layer for the TCP transport, or NULL; other transports ignore it. When open succeeds, the layer is the
   * transport's until close. */
  const struct mlfab_layer *layer;
  void *layer_user;
  uint32_t lend;                    /* mlfab_config.mpi_lend */
  uint32_t neighbours;              /* nodes of the fabric, if all are on this host; 0: not known */
  struct mlfab__shm_memory *memory; /* of mlfab_alloc, for the shared memory transport; or NULL */
} mlfab_transport_options;

typedef struct mlfab_transport {
  uint32_t size;
  uint32_t abi;     /* MLFAB_TRANSPORT_ABI */
  const char *name; /* "tcp"; also what its addresses begin with, before ':' */
  uint32_t caps;    /* MLFAB_CAP_* */
  uint32_t reserved;
  /* Begins to listen. Writes the address that others connect to into `address` (256 bytes). */
  int (*open)(const mlfab_transport_options *options, void **self_p, char *address);
  /* Closes every link at once and frees everything. In a forked child of the process that called open: frees the
   * child's memory only, and touches neither the parent's links nor their peers. */
  void (*close)(void *self);
  /* 1 when the address is of this transport's kind and this node can reach it, else 0. */
  int (*reach)(void *self, const char *address);
  /* Begins to connect. Waits for nothing, not for name servers either. Reports UP or DOWN (link 0) with this token
   * later; a name that does not resolve is DOWN with ADDRESS, and may be tried again. A second connect with a token
   * that is pending replaces the first, which is never reported.
   * Errors: ADDRESS, INSECURE, MEMORY, IO; then nothing is reported. */
  int (*connect)(void *self, const char *address, uint64_t token);
  /* Sends as much of what it accepted as it can at once, then closes. No event of this link follows, and on return
   * the link borrows nothing. */
  void (*disconnect)(void *self, uint32_t link);
  /* Takes a whole frame or nothing: a fabric's key is safe only if nothing of a refused frame leaves. Copies head before
   * it returns. Borrows bulk until a later poll reports SENT with the token, or DOWN; with token 0 it copies bulk.
   * Errors: AGAIN (no room; WRITABLE follows when there is), PEER_CLOSED (DOWN follows). */
  int (*send)(void *self, uint32_t link, const void *head, uint32_t head_bytes, const void *bulk,
              uint32_t bulk_bytes, uint64_t token);
  /* Sends what `send` has gathered. The driver calls it before it sleeps or polls another transport. */
  void (*flush)(void *self);
  /* The next event: 1, or 0 when there is none. */
  int (*poll)(void *self, mlfab_io_event *event_p);
  /* Returns the memory of a FRAME event; in the order of the events. */
  void (*release)(void *self, const mlfab_io_event *event);
  /* Stops borrowing the bulks of all sends with this token, and copies what it still needs of them. SENT for it may
   * follow or not. Errors: MEMORY (still borrowed). */
  int (*detach)(void *self, uint32_t link, uint64_t token);
  /* Sleeps until poll may have something, wake is called, or timeout_ns. */
  void (*wait)(void *self, uint64_t timeout_ns);
  /* Ends a wait that is under way, or else the next one. From any thread. */
  void (*wake)(void *self);
  /* A descriptor that is readable when poll may have something, or -1. The driver calls arm(1) before it sleeps on
   * the descriptor and arm(0) after; arm(1) returns 1 when poll has something already. */
  int (*fd)(void *self);
  int (*arm)(void *self, int on);
  /* Traffic since the last call. Returns 1, or 0 when there is nothing to tell. May be NULL. */
  int (*measure)(void *self, uint64_t now_ns, mlfab_measure *measure_p);
  /* With MLFAB_CAP_PROBE; else NULL. Tells whether the peer of a silent link may still live. Called a few times a
   * heartbeat. 1: bytes of a frame that is not complete yet have come since the last call; 0: its system acknowledges
   * what was sent, and its process exists. Errors: AGAIN (no acknowledgement, or the process is gone), UNSUPPORTED
   * (this system does not tell). */
  int (*probe)(void *self, uint32_t link);
  /* Both or neither may be NULL. lend: as send with a token, for memory that the program gets back from finished
   * requests only. After detach, disconnect or DOWN the transport may go on reading such a bulk; the driver tells
   * nobody of a finished request while `keeps` counts any. close waits for them.
   * keeps: writes whom the first one waits for ("MPI rank 2") into `whom`, unless that is NULL. Called often: without
   * `whom` it costs no more than a load. wait returns when it has become 0. */
  int (*lend)(void *self, uint32_t link, const void *head, uint32_t head_bytes, const void *bulk,
              uint32_t bulk_bytes, uint64_t token);
  uint32_t (*keeps)(void *self, char *whom, size_t room);
  /* For the error of a call that has waited in vain: what hinders this process's connections now ("the path to ...
   * loses large packets"). 1 and a text, or 0. May be NULL. */
  int (*trouble)(void *self, char *text, size_t room);
} mlfab_transport;

struct iovec; /* <sys/uio.h> */

/* What may stand between frames and sockets in the TCP transport, for encryption: extras/mlfab_tls.c is one. A transport
 * with a layer uses no Unix sockets. A session is one connection. No function blocks. */
typedef struct mlfab_layer {
  uint32_t size;
  uint32_t reserved;
  const char *name; /* its addresses begin with it, before ':', instead of "tcp" */
  /* A session of a connected socket, which the transport closes. called: the peer has connected. attempt: how often
   * `shake` has refused this call. Errors: MEMORY. */
  int (*begin)(void *user, int fd, int called, uint32_t attempt, void **session_p);
  /* Goes on with the handshake: 0 when it is done.
   * Errors: AGAIN (when the socket is readable or, with *out_p set to 1, writable), REFUSED (a caller: connect again,
   * with another attempt), JOB (a caller: no attempt will succeed), others. */
  int (*shake)(void *session, int *out_p);
  /* As sendmsg and recvmsg on a non-blocking socket. A send that was refused is repeated with the same bytes, and
   * perhaps more behind them. errno EBADMSG: the peer's bytes were changed on the way. */
  ptrdiff_t (*send)(void *session, const struct iovec *pieces, int count);
  ptrdiff_t (*receive)(void *session, const struct iovec *pieces, int count);
  /* Tells the peer, if it can, that nothing more will be sent. */
  void (*finish)(void *session);
  const char *(*why)(void *session); /* about the last error; "": nothing to add */
  void (*end)(void *session);        /* frees the session, and does not touch the socket */
  void (*close)(void *user);         /* after the last session */
} mlfab_layer;

/* Checks the first 64 bytes of a frame: magic, protocol, limits, checksum of the header. On success sets
 * *head_bytes_p (header and meta) and *bulk_bytes_p.
 * Errors: FRAME, CRC, PROTOCOL_OLDER, PROTOCOL_NEWER, LIMIT. */
MLFAB_API int mlfab_frame_check(const void *header, uint32_t *head_bytes_p, uint32_t *bulk_bytes_p);

/* Compares the frame's payload checksum with its meta and bulk: 0 or CRC. A frame without a payload checksum passes. */
MLFAB_API int mlfab_frame_verify(const void *head, uint32_t head_bytes, const void *bulk,
                                 uint32_t bulk_bytes);

/* ------------------------------------------------------------------------------------------------
 * 13. Built-in transports
 *
 * NULL where MLFAB_WITH_TCP, MLFAB_WITH_SHM or MLFAB_WITH_MPI is 0. The simulator is a transport in files of its own:
 * mlfab_sim.h.
 */
MLFAB_API const mlfab_transport *mlfab_transport_tcp(void);
MLFAB_API const mlfab_transport *mlfab_transport_shm(void);

/* MPI. Compile mlfab.c with mpicc and -DMLFAB_WITH_MPI=1, set config.transports to MLFAB_USE_MPI (MLFAB_TRANSPORT=mpi),
 * and start the program with mpirun or srun. With MLFAB_USE_MPI | MLFAB_USE_SHM (mpi+shm) processes of one host use
 * shared memory.
 *
 * World. mlfab_open is then collective over the communicator: MPI_COMM_WORLD, or the one that config.transport_user
 * points to (MPI_Comm *). mlfab uses a duplicate. Leave `coordinator` empty; rank and workers are overwritten: workers
 * are numbered in the order of their MPI ranks. With `dedicated` the processes that set the role server (MLFAB_ROLE)
 * are the servers, or, where none does, the last `servers` ones; with `scheduler` own, likewise, the scheduler. Such a
 * process, where mlfab_rank gives -1, calls mlfab_serve. join, workers_max, servers_max and replicas are refused. The job,
 * transports, servers, dedicated and scheduler must be equal in all processes.
 *
 * MPI_Init. Where the program has not initialised MPI, mlfab_open does, and MPI is finalised when the process exits
 * after it has closed its contexts. Where it has, MPI_THREAD_MULTIPLE is needed for a progress thread. With
 * MPI_THREAD_FUNNELED or _SERIALIZED progress is by hand: FUNNELED: only the thread that initialised MPI calls mlfab;
 * SERIALIZED: no thread is in MPI while another is in mlfab. MPI_THREAD_SINGLE (MPI_Init) is refused. Close contexts
 * before MPI_Finalize.
 *
 * Buffers. Bulks are copied into blocks that MPI sends. With mpi_lend (MLFAB_MPI_LEND=1) MPI sends pushes of more than
 * 64 KiB and pieces of more than 32 KiB of plain collectives from the caller's buffers. MPI cannot take a send back:
 * until it has let go of all that was taken back, each request that has finished stays open: mlfab_test says not done,
 * mlfab_wait returns TIMEOUT and names the MPI rank that has not taken the data, and calls that wait return later than
 * their deadline. So the rule is the usual one with one exception: after mlfab_cancel the buffers are the
 * caller's when test or wait has ended the request, not before. mlfab_close and mlfab_abandon wait, at most for
 * timeout_ns, until MPI has let go of everything; if it has not then (the log says so), the buffers must stay as they
 * are until MPI_Finalize. MPI lets go when the other process calls mlfab or MPI again.
 *
 * Price. At most 2.5 MiB are under way for each link and direction, and as much memory is in blocks. MPI cannot wake a
 * sleeper: a waiter that has spun polls with naps of up to 1 ms; mlfab_fd returns UNSUPPORTED. When a process dies, MPI
 * ends the job: take checkpoints (section 7).
 * Errors of mlfab_open: CONFIG (thread level, roles), STATE (MPI was finalised; wrong thread; an open over this
 * communicator has failed before), WORLD and JOB (settings differ), TIMEOUT (processes have not opened), IO. The texts
 * name MPI ranks; `rank` is MLFAB_NO_RANK. Before an opening that takes too long fails, processes ask each other over
 * the program's communicator, by empty messages with the largest tag (MPI_TAG_UB). */
MLFAB_API const mlfab_transport *mlfab_transport_mpi(void);

/* ------------------------------------------------------------------------------------------------
 * 14. Device memory
 *
 * With a device attached, the buffers of these calls, and of their _start forms, may be in its memory: mlfab_model_start,
 * mlfab_push, mlfab_push_sparse (indices, too), mlfab_pull, mlfab_broadcast, the collectives with their inputs,
 * mlfab_partial_reduce and _flush, mlfab_stochastic_reduce. One call may mix memories. Everything else takes memory of the
 * host: task graphs (UNSUPPORTED), mlfab_cached, mlfab_alloc, reducers of the user's. gpu/mlfab_gpu.h attaches a CUDA
 * device; this section is the interface that it uses, for devices of other makers.
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
typedef struct mlfab_device {
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
} mlfab_device;

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
#endif /* MLFAB_H */
