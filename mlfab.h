/*
 * mlfab.h - the communication layer of a distributed trainer, in two files.
 *
 * mlfab moves model updates between the processes of a trainer, and decides when, where to and
 * whether each one travels. Copy mlfab.h and mlfab.c beside your trainer, or link libmlfab.a.
 *
 * This header is the manual. It goes from simple to expert:
 *
 *    1  a complete program          8  push and pull
 *    2  version                     9  the fabric: barrier, broadcast, finish, changes while it runs
 *    3  errors                     10  collectives
 *    4  types and units            11  telemetry
 *    5  env: memory, clock, log    12  transport interface
 *    6  open and close             13  built-in transports
 *    7  the model
 *
 * Stepping a node by hand, for embedders with an event loop of their own: mlfab_node.h.
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
 *      if (!status) status = mlfab_model_start(fabric, NULL, &weights, 1);  // worker 0's weights win
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
 * Started by hand it is a world of one: it learns alone, without a server or sockets, and mlfab_open_env says so
 * on stderr. mlfab_open without rank and coordinator makes a world of one, too, silently.
 *
 * Conventions
 * -----------
 * Every function that returns an int returns 0 or a negative MLFAB_ERR_* code (some, 1 as well: their
 * comments say so). Pointers to single outputs end in `_p`; but for error_p and result_p they are set on success
 * only. NULL is accepted where a comment says so and refused with MLFAB_ERR_ARGUMENT everywhere else.
 *
 * Structs that callers fill begin with `size`. Initialise them, then change members:
 *    mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;                       // C and C++
 *    mlfab_collective how = {.size = sizeof how};                                // where there is no _INIT
 * The _INIT macros and _init functions set real defaults, so that zero can be said: scale = 0 is 0. In structs
 * without one, zero means the default that is told beside the member. Counts are elements, sizes are bytes, times
 * are nanoseconds, rates are bytes a second.
 *
 * Threads: a context may be used from several threads at once; calls on one context exclude each
 * other for a few microseconds and blocking calls wait without holding the others up. Contexts
 * share nothing. No function exits, aborts, installs a signal handler, or raises SIGPIPE or SIGXFSZ. Only
 * mlfab_open_env prints (one line, above), and only it and the _from_env functions read the environment. Threads of
 * the library's block all signals but those of faults, so that the program's own threads get them.
 *
 * Forks: a context belongs to the process that opened it. In a child of fork every call on it returns
 * MLFAB_ERR_STATE (mlfab_last_error says why) but mlfab_close and mlfab_abandon, which free there what is
 * the child's and say nothing to anybody. The child has copies of the descriptors: while it lives and has
 * not closed the context, others notice the end of its parent by silence only. Where a thread of the
 * parent's was in the library at the fork, all of that stays until the child ends, closed or not. It may
 * open contexts of its own. Memory of mlfab_alloc that is shared is not in the child: touching it there
 * is a fault.
 *
 * Limits: of a context, 1,024 requests may be open, those of blocking calls included, and 64 updates, 8 pulls
 * and 1,024 collectives may be under way; one more gets MLFAB_ERR_AGAIN at once. At most 16 objects of
 * section 10 are open.
 *
 * Compile-time switches
 * ---------------------
 * Each is 1; define it as 0 when you compile mlfab.c to leave something out:
 *    MLFAB_WITH_TCP, MLFAB_WITH_SHM   a transport
 *    MLFAB_WITH_COLL                  collectives; PARTIAL, STOCHASTIC and DAG are parts of them:
 *    MLFAB_WITH_PARTIAL               partial collectives
 *    MLFAB_WITH_STOCHASTIC            stochastic reductions
 *    MLFAB_WITH_DAG                   task graphs of operations
 *    MLFAB_WITH_SCHED                 the scheduler, aggregators, measured links
 *    MLFAB_WITH_SPARSE                filters, sparse updates, version tags
 *    MLFAB_WITH_RESHARD               moving slices between servers
 * A function of something that was left out returns MLFAB_ERR_UNSUPPORTED, and mlfab_last_error names the
 * switch; so does opening with a configuration that needs it. All processes of a fabric should be built
 * alike. `amalgamate.py --profile minimal|core` writes a mlfab.c without the text of such groups.
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
/* Two copies of mlfab talk exactly when their protocol numbers are equal. */
#define MLFAB_PROTOCOL 6

#ifndef MLFAB_API
#define MLFAB_API
#endif

/* The version of the compiled library, "major.minor.patch". */
MLFAB_API const char *mlfab_version(void);

/* For bindings: the size of a public struct by its name without mlfab_ ("config", "push_options"); 0 when there is
 * none of that name. */
MLFAB_API size_t mlfab_struct_size(const char *name);

/* ------------------------------------------------------------------------------------------------
 * 3. Errors
 *
 * Codes are pinned: they never change their number. Four kinds: usage (the caller's mistake, nothing
 * changed), retryable (try again; a push with retry_seq, or it may count twice), peer (another rank caused it; `rank` says which), fatal
 * (this context or this machine).
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
  X(INSECURE, -10, "an address other than loopback needs allow_insecure")                 \
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
  X(FENCED, -53, "a newer incarnation of this rank has joined")                           \
  X(CALLBACK, -54, "a user callback refused")                                             \
  X(WITHDRAWN, -55, "the update was withdrawn before it was applied")                     \
  X(PARTIAL, -56, "withdrawn when some servers had applied it, and others had not")       \
  X(DROPPED, -57, "dropped: it came, or would have come, too late, or held others up")    \
  X(MISMATCH, -58, "the collective calls of the workers differ")                          \
  /* fatal */                                                                             \
  X(MEMORY, -70, "out of memory")                                                         \
  X(IO, -71, "an operating system call failed")                                           \
  X(INTERNAL, -72, "an invariant of the library is broken")

enum mlfab_error_code {
  MLFAB_OK = 0,
#define MLFAB_ERROR_ENUM_(name, number, text) MLFAB_ERR_##name = number,
  MLFAB_ERRORS(MLFAB_ERROR_ENUM_)
#undef MLFAB_ERROR_ENUM_
      MLFAB_ERR_END_ = -1000
};

#define MLFAB_NO_RANK (-1)

/* What went wrong, in full: filled by whoever decided that it is an error. */
typedef struct mlfab_error {
  int32_t code;      /* MLFAB_ERR_* */
  int32_t rank;      /* the rank to blame, or MLFAB_NO_RANK; a server's number when `is_server` */
  int32_t is_server; /* 1: `rank` is the number of a server */
  int32_t reserved;
  uint64_t waited_ns; /* how long had been waited, 0 if nothing was */
  char text[296];     /* one line: what, who, awaiting what, for how long */
} mlfab_error;

/* The name of a code ("MLFAB_ERR_TIMEOUT"), and its one-line meaning. Never NULL. */
MLFAB_API const char *mlfab_error_name(int code);
MLFAB_API const char *mlfab_error_text(int code);

/* ------------------------------------------------------------------------------------------------
 * 4. Types and units
 */
typedef struct mlfab mlfab;                       /* a context: one node of one fabric */
typedef struct mlfab_collective mlfab_collective; /* options of a collective: section 10 */
typedef uint64_t mlfab_request; /* a handle, never reused within a context; 0 is none */

enum mlfab_dtype {
  MLFAB_F32 = 1, /* 4 bytes */
  MLFAB_F64 = 2, /* 8 bytes */
  MLFAB_I64 = 3, /* 8 bytes, sums are exact modulo 2^64 */
  /* Collectives only; tensors of the model are not made of them. */
  MLFAB_F16 = 4,  /* 2 bytes, IEEE half precision; added in float32 */
  MLFAB_BF16 = 5, /* 2 bytes, the upper half of a float32; added in float32 */
  MLFAB_BYTES = 6 /* 1 byte, of any meaning: mlfab_allgather only */
};

/* Names the whole model: one array that holds all tensors in the order in which they were added.
 * Only where all tensors have one element type. */
#define MLFAB_ALL 0xffffffffu

/* One tensor's elements in the caller's memory. Borrowed for the length of the call, or until the
 * request has finished. */
typedef struct mlfab_buf {
  uint32_t tensor;   /* its id, or MLFAB_ALL */
  uint32_t reserved; /* 0 */
  void *data;        /* `count` elements of the tensor's type, aligned to it; pulls write here */
  uint64_t count;    /* elements; must equal the tensor's */
} mlfab_buf;

/* ------------------------------------------------------------------------------------------------
 * 5. Env: memory, clock, log
 *
 * A table of hooks, copied when the context opens. NULL members mean the built-in: malloc, the
 * monotonic clock, silence. Hooks may be called from the progress thread.
 */
enum mlfab_log_level {
  MLFAB_LOG_ERROR = 1,
  MLFAB_LOG_WARN = 2,
  MLFAB_LOG_INFO = 3,
  MLFAB_LOG_DEBUG = 4
};

typedef struct mlfab_env {
  uint32_t size;
  uint32_t log_level; /* largest level that is passed to log; 0: MLFAB_LOG_WARN */
  void *user;
  /* At least 16-byte aligned, or NULL. `bytes` of free is what was asked for. */
  void *(*allocate)(void *user, size_t bytes);
  void (*release)(void *user, void *memory, size_t bytes);
  /* Nanoseconds from any origin, never going back. */
  uint64_t (*clock)(void *user);
  /* One line without newline. */
  void (*log)(void *user, int level, const char *line);
  /* Files (mlfab_save): write the whole of `bytes` to `path`, atomically. 0 or MLFAB_ERR_IO. */
  int (*store)(void *user, const char *path, const void *data, size_t bytes);
} mlfab_env;

/* ------------------------------------------------------------------------------------------------
 * 6. Open and close
 */
enum mlfab_role {
  MLFAB_ROLE_WORKER = 1,   /* pushes and pulls */
  MLFAB_ROLE_SERVER = 2,   /* holds a shard of the model */
  MLFAB_ROLE_SCHEDULER = 4 /* a process of its own that plans: see mlfab_schedule */
};

enum mlfab_scheduler_kind {
  MLFAB_SCHEDULER_NONE = 0,   /* servers grant first come, first served */
  MLFAB_SCHEDULER_BESIDE = 1, /* in the process of server 0 */
  MLFAB_SCHEDULER_OWN = 2     /* a process of its own, with roles = MLFAB_ROLE_SCHEDULER */
};

#define MLFAB_UNBOUNDED UINT64_MAX

/* How large pushes and pulls travel in a fabric with a scheduler (MLfabric §3 to §5.2, §10.2, §10.3):
 * those of more than eager_bytes are announced, planned over the measured links, and come in the
 * planned order, directly or added up at aggregators on the way; the model goes down distribution
 * trees. Small ones are sent at once and enter the queue behind what is planned. While the scheduler
 * is away, servers grant first come, first served, and the bound still holds. */
typedef struct mlfab_schedule {
  uint32_t size;
  uint32_t best; /* 1: also try plans that the paper rules out, keep the shortest */
  /* tau_max: every applied update has a delay below it, others are dropped (MLFAB_ERR_DROPPED). At
   * least 1; MLFAB_UNBOUNDED, the default: none. Not with rounds (BSP, DROP). Servers hold to it by
   * themselves, in a fabric without a scheduler too. */
  uint64_t delay_bound;
  /* Plan when the server's link is booked for less than this (MLfabric's setting behaves best with
   * 150 ms). 0: plan when the server's in-link is booked for less than the queued
   * bytes need, plus 6 %. */
  uint64_t plan_ahead_ns;
  /* Plan every so often instead, as in the paper. 0: as above. */
  uint64_t interval_ns;
  /* 1: aggregators and distributors store and forward, as in the paper. 0: they cut through. */
  uint32_t whole;
  uint32_t no_aggregation;  /* 1: order only */
  uint32_t no_distribution; /* 1: every pull comes from the server itself */
  uint32_t reserved;
} mlfab_schedule;

/* Sets every member to its default and `size`. */
MLFAB_API void mlfab_schedule_init(mlfab_schedule *schedule);

enum mlfab_progress_mode {
  MLFAB_PROGRESS_AUTO = 0,   /* a thread, if the platform has them */
  MLFAB_PROGRESS_THREAD = 1, /* a thread of the library's sends heartbeats and moves data */
  /* Nothing moves except inside calls. Said to the others when joining: a worker that computes for
   * long is not missed for its silence, only when its connection breaks or its system does not answer. */
  MLFAB_PROGRESS_HAND = 2
};

enum mlfab_transport_bits { MLFAB_USE_TCP = 1, MLFAB_USE_SHM = 2 };

struct mlfab_transport; /* section 12 */
struct mlfab_update_info;
struct mlfab_pull_info;
struct mlfab_event_info;

/* Server side, MLfabric Table 1 registerUpdateCallback. Called once per commit and stretch of a
 * tensor: replace w (count elements from element `first` of tensor) by what the sum of the
 * update's members makes of it. On entry w holds the present weights. Returning non-zero refuses
 * the whole update: the model stays bit-identical and the member gets MLFAB_ERR_CALLBACK; of a round, the
 * pulls that wait for it do, since its pushes were acknowledged when they were in the sum. Must not
 * call back into the context. Runs on whatever thread drives the context. */
typedef int (*mlfab_update_fn)(void *user, const struct mlfab_update_info *info, uint32_t tensor,
                               int dtype, uint64_t first, uint64_t count, void *w, const void *sum);

/* Server side, MLfabric Table 1 registerRequestCallback. Called when a pull arrives; non-zero
 * refuses it (the worker gets MLFAB_ERR_CALLBACK). */
typedef int (*mlfab_pull_fn)(void *user, const struct mlfab_pull_info *info);

/* Server side, FluentPS's conditions in the user's own words: non-zero says yes. Called for every pull
 * when it arrives and whenever progress or members change while it is buffered, and for every round:
 * again until it says no, so that one push may complete several. Must not call back into the
 * context. */
struct mlfab_sync_state;
typedef int (*mlfab_condition_fn)(void *user, const struct mlfab_sync_state *state);

/* A filter in the user's own words: clears the bits of elements that shall not travel (gradient side:
 * they stay in the residual), or not change (parameter side: `before` is what they were, and stay).
 * `values` and `before` are `count` elements, at most 65536; bit i of keep[i / 64] is set on entry for
 * all of them that matter. Must not call back into the context. */
struct mlfab_filter_info;
typedef void (*mlfab_filter_fn)(void *user, const struct mlfab_filter_info *info,
                                const void *values, const void *before, uint64_t *keep);

/* Any role: ranks that come, go and die. For display; must not call back into the context. */
typedef void (*mlfab_event_fn)(void *user, const struct mlfab_event_info *info);

typedef struct mlfab_config {
  uint32_t size;
  uint32_t roles;        /* MLFAB_ROLE_* bits; 0: worker, and server too when rank < servers */
  int32_t rank;          /* worker rank 0..workers-1; of a dedicated server: 0..servers-1 */
  uint32_t workers;      /* 0: 1 */
  uint32_t servers;      /* 0: 1 */
  uint32_t dedicated;    /* 1: servers are processes of their own; all nodes must agree */
  char coordinator[256]; /* where server 0 is met: "tcp:host:port", "tcp:[::1]:port", "unix:/path",
                            "unix:@name", "shm:name"; empty with a world of one. A host name that
                            does not resolve yet is asked for again while joining lasts */
  char job[64];          /* name of the fabric; strangers are turned away. "": "mlfab" */
  char listen[256];      /* where this node listens, like coordinator; "": chosen */
  char ifname[128];      /* interfaces for TCP, NCCL's syntax: "eth", "^docker", "=eth0,eth1" */
  uint32_t allow_insecure; /* 1: TCP on other addresses than loopback */
  uint32_t
      transports;    /* MLFAB_USE_* bits; 0: shared memory within a host, TCP between hosts; with a
                              transport of the caller's own: that one alone */
  uint32_t progress; /* MLFAB_PROGRESS_* */
  uint32_t no_payload_crc; /* 1: no CRC32C over payloads on TCP (headers keep theirs) */
  uint64_t timeout_ns;     /* default deadline of every blocking call, joining included; 0: 300 s */
  uint64_t heartbeat_ns;   /* 0: 500 ms. Suspect after 3; dead after 5, unless silent_death_ns
                            applies; a worker whose connection broke and does not come back, after 2 */
  uint64_t spin_ns;     /* a waiter polls this long, then for 200 us more in turns with whoever else
                            wants the processor, before it sleeps; 0: 20 us, ~0: for ever */
  uint64_t seed;        /* 0: 1 */
  uint32_t chunk_bytes; /* largest payload of a frame; 0: 256 KiB; at most 1 MiB */
  uint32_t eager_bytes; /* a worker may have this much under way at a server without a grant;
                            0: 256 KiB. Costs a server twice as much memory for each worker */
  uint32_t block_bytes; /* 0: 1 MiB */
  uint32_t merge_max;   /* small pushes that wait are added together, up to this many; 0: 128;
                            1: never */
  uint64_t model_max_bytes; /* a larger model is refused; 0: 64 GiB */
  const mlfab_env *env;     /* copied; NULL: built-in */
  /* Callbacks; each may be NULL. */
  mlfab_update_fn on_update; /* set: replaces the model's update rule at this server */
  mlfab_pull_fn on_pull;
  mlfab_event_fn on_event;
  void *user; /* passed to all of them */
  /* The caller's own transport; borrowed until close. It is opened beside those that `transports` names, and
   * where a peer can be reached by several, it is taken. */
  const struct mlfab_transport *transport;
  void *transport_user; /* passed to its open */
  /* A fabric with a scheduler. */
  uint32_t scheduler; /* MLFAB_SCHEDULER_*; all nodes must agree */
  /* Workers: groups that this node may add up or models that it may hand on for others at a time, each
   * allocates one shard on first use. At most 64. 0: 2, or none with MLFAB_PROGRESS_HAND; ~0: none. */
  uint32_t accumulators;
  uint64_t host;           /* nodes with one number share network links; 0: told by the address */
  mlfab_schedule schedule; /* server 0's counts; size 0: defaults */
  /* Servers: MLFAB_SYNC_USER needs both; a parameter filter of the user's own, or NULL. */
  mlfab_condition_fn pull_condition, push_condition;
  mlfab_filter_fn change_filter;
  /* Collectives: hosts with more bandwidth come first in the order of members. Server 0's counts; on
   * other nodes it has their links measured, as a scheduler would. What is known when an epoch begins
   * (a while after opening, or told by mlfab_set_link) counts until the next. */
  uint32_t order_by_rate;
  /* 32 hexadecimal digits that all processes of the fabric were given, and nobody else; "": none.
   * Every connection opens with it, and whoever has another one, or none, is refused
   * (MLFAB_ERR_JOB). It is a password that travels in clear text: it keeps out those who cannot read the traffic. mlfab-run
   * makes one for each run. */
  char secret[64];
  /* A peer that says nothing although its connection stands and its system acknowledges what is sent
   * (it was stopped, or its host is overloaded) is dead after this time; less than 5 heartbeats counts
   * as 5. 0: 30 s. Rounds and collectives wait for such a worker, at most as long. */
  uint64_t silent_death_ns;
} mlfab_config;

/* Sets every member to its default and `size` to sizeof *config. */
MLFAB_API void mlfab_config_init(mlfab_config *config);

/* Fills members that are still at their default from the environment: MLFAB_* first (MLFAB_RANK,
 * MLFAB_WORKERS, MLFAB_SERVERS, MLFAB_ROLE=worker|server|scheduler, MLFAB_DEDICATED,
 * MLFAB_COORDINATOR, MLFAB_JOB, MLFAB_JOB_SECRET, MLFAB_LISTEN, MLFAB_SOCKET_IFNAME, MLFAB_ALLOW_INSECURE,
 * MLFAB_TRANSPORT=auto|tcp|shm, MLFAB_PROGRESS=thread|hand, MLFAB_TIMEOUT_MS, MLFAB_HEARTBEAT_MS,
 * MLFAB_SILENT_DEATH_MS, MLFAB_PAYLOAD_CRC=0|1, MLFAB_SEED, MLFAB_SCHEDULER=none|beside|own,
 * MLFAB_DELAY_BOUND=<number>|none, MLFAB_PLAN_AHEAD_MS, MLFAB_ACCUMULATORS=<number>|none,
 * MLFAB_ORDER_BY_RATE=0|1), then torchrun's RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, then the
 * launcher's: OMPI_COMM_WORLD_RANK and _SIZE, PMI_RANK and PMI_SIZE, SLURM_PROCID and SLURM_NTASKS (these
 * only inside a step, with SLURM_STEP_ID set). Nothing set: a world of one.
 * error_p may be NULL.
 * Errors: MLFAB_ERR_CONFIG, naming the variable and its value (but for MLFAB_JOB_SECRET's). Reads the
 * environment; do not call while another thread changes it. */
MLFAB_API int mlfab_config_from_env(mlfab_config *config, mlfab_error *error_p);

/* Sets one member by the name that it has in the environment, without MLFAB_ and in small letters: ("workers",
 * "4"), ("timeout_ms", "500"). Errors: CONFIG, naming setting and value; nothing has changed then. */
MLFAB_API int mlfab_config_set(mlfab_config *config, const char *name, const char *value,
                               mlfab_error *error_p);

/* Opens a node and joins the fabric: returns when all ranks of the world are there, at most
 * timeout_ns later. A world of one opens at once and does no I/O. `error_p` may be NULL; on failure
 * it says why and which ranks were missing.
 * Errors: CONFIG, ADDRESS, ADDRESS_IN_USE, INSECURE, RANK_TAKEN, RANK_RANGE, WORLD, JOB,
 * PROTOCOL_OLDER/NEWER, TIMEOUT, MEMORY, IO. */
MLFAB_API int mlfab_open(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p);

/* mlfab_config_init, mlfab_config_from_env and mlfab_open. mlfab_model_start without options then takes those of the
 * environment (mlfab_model_options_from_env), and the filter of the environment for all tensors
 * (mlfab_filter_from_env). Where no launcher has set anything, one line on stderr says that this is a world of one.
 * Errors: of the three. */
MLFAB_API int mlfab_open_env(mlfab **ctx_p, mlfab_error *error_p);

/* The same, and waits for nothing but a host name to listen at, until it resolves or timeout_ns has passed:
 * the context is there, the fabric not yet. Drive it (mlfab_progress) until mlfab_is_ready returns 1. For
 * hand-driven programs and the simulator. */
MLFAB_API int mlfab_open_start(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p);
/* 1 when every rank has joined, 0 not yet, or the error that ended joining. error_p may be NULL. */
MLFAB_API int mlfab_is_ready(mlfab *ctx, mlfab_error *error_p);

/* Leaves the fabric and frees everything; finishes sends that are under way, waits at most two
 * heartbeats for them. A worker that serves too (dedicated 0) first goes on serving until all other
 * workers have closed or died, at most timeout_ns of the config: without servers of their own (a
 * launcher, mlfab-run -s 0) those are the first workers.
 * *ctx_p becomes NULL at once; a second call gets MLFAB_ERR_CLOSED.
 * Requests that are open are forgotten, their buffers are the caller's again.
 * Other threads may be in calls of this context: what they wait for is withdrawn, as by mlfab_cancel, and
 * they return MLFAB_ERR_CLOSED, as do calls that begin meanwhile; memory is freed when the last of them has
 * left. After it has returned nobody may call with a copy of the old pointer. */
MLFAB_API int mlfab_close(mlfab **ctx_p);

/* Frees everything without a word to anybody, as a crash would look from outside; for other threads as
 * mlfab_close. */
MLFAB_API int mlfab_abandon(mlfab **ctx_p);

/* This node: worker rank (-1 on a dedicated server), number of workers and servers. NULL to skip. */
MLFAB_API int mlfab_rank(const mlfab *ctx, int32_t *rank_p, uint32_t *workers_p,
                         uint32_t *servers_p);

/* The last error in full of the calling thread's calls on this context; where it had none, or has called another
 * context since, of any thread's. A request keeps its error until it is ended; mlfab_wait and mlfab_test make it the
 * caller's last one. */
MLFAB_API int mlfab_last_error(mlfab *ctx, mlfab_error *error_p);

/* ------------------------------------------------------------------------------------------------
 * 7. The model
 *
 * A model is a list of tensors with ids of the caller's choice, cut into slices that are spread over
 * the servers. Every worker defines it; worker 0's definition, options and first weights win, and a
 * definition with other tensors is refused with an error that names the first difference.
 */
/* What a server does with an update u, or with the sum of a round. With weight_decay each of them makes
 * w <- w + scale * weight_decay * w first (decoupled decay; ADAM with it is AdamW).
 * t, and what mhat and vhat are corrected by, counts the commits that touched a slice, and small
 * tensors share slices. With ADADELAY and ADAM push all tensors in one call therefore, or with
 * MLFAB_PUSH_MORE in rounds: one asynchronous push a tensor makes t run ahead. */
enum mlfab_optimizer_kind {
  MLFAB_OPTIMIZER_SGD = 0,      /* w <- w + scale * u */
  MLFAB_OPTIMIZER_MOMENTUM = 1, /* h <- gamma * h + scale * u; w <- w + h      (MLfabric eq. 2) */
  MLFAB_OPTIMIZER_ADADELAY =
      2,                    /* w <- w + c / sqrt(t + delay) * scale * u    (MLfabric 3.1, 10.4) */
  MLFAB_OPTIMIZER_ADAM = 3, /* w <- w + scale * mhat / (sqrt(vhat) + epsilon) */
  MLFAB_OPTIMIZER_RMSPROP =
      4, /* v <- beta2 * v + (1 - beta2) * u^2; w <- w + scale * u / (sqrt(v) + epsilon) */
  MLFAB_OPTIMIZER_ADAGRAD = 5 /* v <- v + u^2; w <- w + scale * u / (sqrt(v) + epsilon) */
};

/* Consistency: when a pull may be answered and when a round is complete (FluentPS Alg. 1, Table
 * III). Every worker has a progress, the number of whole updates that it has pushed (an iteration
 * that pushes more than once says MLFAB_PUSH_MORE in all pushes but the last); a server counts, and
 * V_train is the number of iterations that are complete. A pull behind i pushes asks for what
 * iteration i - 1 made of the model; it is answered at once or buffered. BSP and DROP are rounds: what
 * is pushed is added up and applied in one commit when the round is complete. In all others an update
 * is applied when it arrives, and only pulls wait. */
enum mlfab_sync_kind {
  MLFAB_SYNC_ASYNC = 0, /* ASP: every pull is answered at once */
  MLFAB_SYNC_BSP = 1,   /* round i is one commit, made when every live worker has pushed its i-th
                           update; a pull after i pushes waits for round i to be committed */
  MLFAB_SYNC_SSP = 2,   /* at most `staleness` of the slowest worker's updates may be missing */
  MLFAB_SYNC_DSPS =
      3, /* SSP whose threshold adapts between staleness and staleness_max: up by one when
                           pulls of a round had to wait, down by one after 8 in which none did */
  MLFAB_SYNC_DROP = 4, /* drop-stragglers: a round is complete with `need` updates; what comes later
                           is dropped (MLFAB_ERR_DROPPED), and its worker goes on with the open round */
  MLFAB_SYNC_PSSP =
      5, /* as SSP, but a pull past the threshold waits only with probability `chance` */
  MLFAB_SYNC_PSSP_DYNAMIC =
      6,              /* with probability alpha / (1 + e^(staleness - k)), k = i - V_train */
  MLFAB_SYNC_USER = 7 /* config.pull_condition and push_condition of the servers */
};

typedef struct mlfab_sync {
  uint32_t size;
  uint32_t kind;         /* MLFAB_SYNC_* */
  int64_t staleness;     /* s, at least 0; 0 with SSP: nobody is ahead, as BSP */
  int64_t staleness_max; /* DSPS; 0: 4 * staleness + 4 */
  uint32_t need; /* DROP: N_t, 1 to the workers, no default; of those that live, all at most */
  uint32_t soft; /* 1: soft barrier: a buffered pull is looked at when V_train moves; 0: lazy
                              execution: answered when its own iteration is complete, so that it
                              sees all of it */
  uint32_t only_fastest; /* PSSP: 1: only a worker that nobody is ahead of may have to wait */
  uint32_t keep_late; /* DROP: 1: what comes late is added to the open round, as FluentPS prints */
  double chance;      /* PSSP: c, 0 to 1; 0: nobody waits */
  double alpha;       /* PSSP_DYNAMIC: at least 0; 0: the significance |g| / |w| of the worker's
                              last update, on each server's part of the model */
} mlfab_sync;

/* What a condition may look at. Progress is told in whole updates: a pull with progress i + 1 asks for
 * the result of iteration i. */
typedef struct mlfab_sync_state {
  uint32_t server;
  uint32_t worker;           /* that pulls; of a push condition: that pushed last */
  uint64_t iteration;        /* its */
  uint64_t fastest, slowest; /* largest and smallest progress of live workers */
  uint64_t v_train;          /* iterations complete */
  uint32_t arrived;          /* live workers that have pushed iteration v_train */
  uint32_t members;          /* live workers that still push */
  double significance;       /* |g| / |w| of the worker's last update; negative: not known */
} mlfab_sync_state;

/* How values of float tensors travel. They are kept, and added up, in their own type. */
enum mlfab_half {
  MLFAB_HALF_NONE = 0, /* as they are */
  MLFAB_HALF_F16 = 1,  /* IEEE half precision; what is beyond +-65504 is sent as that */
  MLFAB_HALF_BF16 = 2  /* the upper half of a float32 */
};

typedef struct mlfab_model_options {
  uint32_t size;
  uint32_t optimizer; /* MLFAB_OPTIMIZER_* */
  uint32_t sync;      /* MLFAB_SYNC_*, with the defaults of its members; see consistency */
  uint32_t mean;      /* 1: a round's sum is divided by its contributors (rounds; not with I64) */
  uint32_t deterministic; /* 1: a round adds in the order of ranks, not of arrival (BSP) */
  uint32_t slices;        /* 0: 16 times the servers; at most 4096 */
  uint32_t ghost;         /* 1: tensors have a length but no bytes (simulator only) */
  uint32_t active;        /* servers that hold slices at first, the first so many; 0: all */
  double gamma;           /* MOMENTUM, in [0, 1); initially 0.9 */
  double adadelay_c;      /* ADADELAY, positive; initially 1 */
  double beta1, beta2;    /* ADAM; RMSPROP: beta2; in [0, 1); initially 0.9 and 0.999 */
  double epsilon;         /* positive with every optimizer but SGD; initially 1e-8 */
  double weight_decay;    /* initially 0 */
  /* The consistency model with its members; all zero: `sync` says it. */
  mlfab_sync consistency;
  /* Version tags (TDF 3): so many elements share a tag, the commit that changed them last, and a
   * pull brings only what changed since the one before, out of the library's cache of the model.
   * Memory: as much as the model at every worker, and 4 bytes a tag at the servers. A power of two
   * up to 65536; 1 as in the paper; 256 costs next to nothing; 0: no tags. */
  uint32_t tags;
  uint32_t pull_half; /* MLFAB_HALF_*: how parameters travel in pulls */
  /* Parameter filter (TDF P-SMP): a change of an element by less than this share of it, divided by
   * 1 + change_decay * ln(t), t the iteration, is not made: it is discarded. A change of an element
   * that is 0 is always made. Not with I64; nor is pull_half. 0: none. */
  double change_threshold, change_decay;
} mlfab_model_options;

/* The values that are called initial above, 0 in all other members. An optimizer other than SGD needs them: its
 * options are refused with CONFIG when epsilon is 0. */
#define MLFAB_MODEL_OPTIONS_INIT                                                       \
  {                                                                                    \
    sizeof(mlfab_model_options), 0, 0, 0, 0, 0, 0, 0, 0.9, 1.0, 0.9, 0.999, 1e-8, 0.0, \
        {0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0.0}, 0, 0, 0.0, 0.0                             \
  }
/* Sets *options to the same. */
MLFAB_API void mlfab_model_options_init(mlfab_model_options *options);

/* Sets one member by name: "optimizer" (sgd, momentum, adadelay, adam, rmsprop, adagrad), "gamma", "beta1", "beta2",
 * "epsilon", "weight_decay", "consistency" (async, bsp, ssp, dsps, drop, pssp, pssp_dynamic), "staleness", "need",
 * "chance", "alpha", "mean", "slices", "tags". Errors: CONFIG, naming setting and value; nothing has changed then. */
MLFAB_API int mlfab_model_options_set(mlfab_model_options *options, const char *name,
                                      const char *value, mlfab_error *error_p);
/* Sets members that are still at their initial value from the environment: MLFAB_OPTIMIZER and so on. A program that
 * calls this leaves these choices to whoever runs it. Errors: CONFIG, naming the variable. */
MLFAB_API int mlfab_model_options_from_env(mlfab_model_options *options, mlfab_error *error_p);

/* Adds a tensor of `count` elements under `id` (any number but MLFAB_ALL). Local; before
 * mlfab_model_start. Errors: ARGUMENT, TENSOR (id used twice), STATE, LIMIT. */
MLFAB_API int mlfab_tensor_add(mlfab *ctx, uint32_t id, int dtype, uint64_t count);

/* Agrees on the model with the servers and the other workers; blocks until the model stands, at most
 * timeout_ns of the config. `bufs` hold the first weights: worker 0's are sent; on every other worker
 * they are overwritten with worker 0's. bufs NULL with n 0: zeros, and nothing is written back.
 * options may be NULL: all initial, or as the environment says (mlfab_open_env). Costs the model's bytes once per worker on the wire. What is wrong with the
 * options is said at once where it can be; what only a server knows (UNSUPPORTED: conditions of the
 * user's that it does not have, a delay bound with rounds; MEMORY) refuses worker 0's model, and every
 * worker is told so. Whoever got an error may call again.
 * Errors: MODEL (names the difference), ARGUMENT and CONFIG (a member of the options), STATE,
 * UNSUPPORTED, LIMIT, TIMEOUT, PEER_DEAD, MEMORY. */
MLFAB_API int mlfab_model_start(mlfab *ctx, const mlfab_model_options *options,
                                const mlfab_buf *bufs, uint32_t n);

/* Pulls the model and writes it to `path` as a safetensors file (tensors are named by their id),
 * through env.store. Any worker. */
MLFAB_API int mlfab_save(mlfab *ctx, const char *path);

/* ------------------------------------------------------------------------------------------------
 * 8. Push and pull
 *
 * An update is (worker, incarnation, sequence number), and is applied at most once at every server
 * whatever is lost, repeated or restarted. `bufs` is a list of whole tensors (one a layer), or one
 * MLFAB_ALL, and is one operation: all of it is applied at a server in one step, or none.
 */
enum mlfab_push_flags {
  /* More of this worker's update follows in a later push: together they are one in its progress,
   * and in a round. Outside of rounds each is applied when it comes. */
  MLFAB_PUSH_MORE = 1
};

typedef struct mlfab_push_options {
  uint32_t size;
  /* w <- w + scale * u: a gradient takes minus the learning rate. 0 means 0; initially 1. Integers only,
   * when the model has an I64 tensor. */
  double scale;
  uint32_t flags; /* MLFAB_PUSH_* */
  uint32_t reserved;
  double clip_norm; /* > 0: scale *= clip_norm / n where n, u's global norm, is larger; no I64 */
  uint64_t version; /* the model version the update was computed from, plus one; 0: last pulled */
  uint64_t timeout_ns; /* 0: the config's */
  /* The identity of an update that ended IN_DOUBT, WITHDRAWN or DROPPED; 0: a new one. A filtered update
   * is sent again as it was, whatever the buffers hold; STATE when that is not kept any more. Nothing of
   * an update that ended so is folded back into its residual. */
  uint64_t retry_seq;
  double norm; /* u's global norm for whoever is told of the update; 0: not known */
  /* Expected iteration + 1: a mismatch with the library's count, which is one a whole push, returns ARGUMENT with
   * both numbers. 0: not checked. */
  uint64_t iteration;
} mlfab_push_options;

/* scale is 1, all other members 0. */
#define MLFAB_PUSH_OPTIONS_INIT \
  { sizeof(mlfab_push_options), 1.0, 0, 0, 0.0, 0, 0, 0, 0.0, 0 }
/* Sets *options to the same. */
MLFAB_API void mlfab_push_options_init(mlfab_push_options *options);

enum mlfab_pull_flags {
  MLFAB_PULL_FULL = 1, /* tags: bring everything, whatever the cache has */
  MLFAB_PULL_KEPT =
      2 /* tags: the buffers still hold what the last pull wrote into them, so that only
                          what changed has to be written */
};

typedef struct mlfab_pull_options {
  uint32_t size;
  uint32_t flags; /* MLFAB_PULL_* */
  uint64_t timeout_ns;
} mlfab_pull_options;

/* What became of a request. */
typedef struct mlfab_result {
  int32_t status;   /* 0 or MLFAB_ERR_*; the same as the call's return value */
  int32_t rank;     /* to blame, or MLFAB_NO_RANK */
  uint64_t seq;     /* push: the update's identity (with rank and incarnation) */
  uint64_t version; /* largest slice version after the commit, or of what was pulled */
  uint64_t delay;   /* push: the largest delay over its slices (0 for BSP rounds) */
  uint32_t applied; /* push: servers that applied it ... */
  uint32_t refused; /* ... and that did not */
  uint64_t waited_ns;
} mlfab_result;

/* Pushes an update and waits until every server has applied or refused it. The buffers are only
 * read, and are the caller's again on return, whatever is returned. options, result_p may be NULL.
 * Errors: usage codes before anything is sent; NOT_FINITE (refused whole, model unchanged); DROPPED
 * (by a delay bound, or too late for its round); TIMEOUT / IN_DOUBT; PARTIAL; PEER_DEAD naming the
 * server; CALLBACK.
 * Cost: update bytes up, one small frame back per server. */
MLFAB_API int mlfab_push(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_push_options *options, mlfab_result *result_p);

/* The same without waiting: the buffers stay borrowed until the request has finished. Updates of up
 * to 64 KiB are copied: their buffers are the caller's again at return. request_p NULL: nobody will
 * ask; a failure then shows in the stats, in mlfab_flush and in mlfab_last_error.
 * Errors: usage codes, AGAIN when 1,024 requests are open that were not ended with mlfab_wait or
 * mlfab_test, or 64 updates are under way: wait for one, or call mlfab_flush, and try again. */
MLFAB_API int mlfab_push_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_push_options *options, mlfab_request *request_p);

/* A sparse update: `count` elements of one tensor, at ascending indices. Values are of the tensor's
 * type; all is copied before it returns. Filters do not touch it. It is an update like any other:
 * one iteration that also pushes other tensors says MLFAB_PUSH_MORE in all but its last push.
 * Errors beside mlfab_push's: ARGUMENT with the first index that is out of range, not ascending or
 * repeated; UNSUPPORTED (ghost tensors). Cost: the values and 2 bytes an index, or a bit an element
 * where that is less, and 24 bytes for each stretch of 65536 elements or less. */
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

/* What of this worker's updates travels (TDF 4.2, 4.3). An element of update plus residual is held back
 * when it is below threshold / (1 + decay * ln t) and the random policy selects it; what is held back
 * stays in the residual and is in the next push. Exact zeros never travel. With `half` the rest is
 * rounded; what is beyond +-65504 is sent as that and counted, and what is left of it, or rounds to
 * zero, stays in the residual; ordinary rounding is not carried. */
typedef struct mlfab_filter {
  uint32_t size;
  uint32_t half;          /* MLFAB_HALF_* */
  double threshold;       /* phi; 0: nothing is held back; HUGE_VAL: everything is below it */
  double decay;           /* d, at least 0 */
  double drop;            /* p, 0 to 1: probability to be selected; 0: 1. Below 1 it needs a
                             threshold; with 1 a threshold above all numbers is refused */
  double top;             /* 0 to 1: only this share of the elements, the largest; 0: no limit */
  mlfab_filter_fn select; /* the user's own, after the others; or NULL */
  void *user;
} mlfab_filter;

/* Sets the filter of a tensor's updates, or of all (MLFAB_ALL), from this worker's next push on;
 * NULL: none. Costs once the tensor's bytes for the residual, and the encoded update while it is
 * under way; the caller's buffers are its own again when mlfab_push_start returns. A filter that is
 * taken away leaves its residual to the next push. Errors, and nothing has changed: ARGUMENT,
 * TENSOR, DTYPE (int64; of all, when one is), UNSUPPORTED (ghost tensors), STATE before the model,
 * MEMORY. */
MLFAB_API int mlfab_set_filter(mlfab *ctx, uint32_t tensor, const mlfab_filter *filter);

/* As mlfab_model_options_set and _from_env: "filter_threshold", "filter_decay", "filter_drop", "filter_top",
 * "filter_half" (none, f16, bf16). */
MLFAB_API int mlfab_filter_set(mlfab_filter *filter, const char *name, const char *value,
                               mlfab_error *error_p);
MLFAB_API int mlfab_filter_from_env(mlfab_filter *filter, mlfab_error *error_p);

/* Pulls whole tensors, one version per slice, into the caller's buffers. The consistency model says
 * when; BSP: waits for the round of this worker's last push. With tags, `data` of a buffer may be
 * NULL: then only the cache is brought up to date (mlfab_cached). A TIMEOUT names the slowest
 * worker. A pull that fails may have written some buffers. Errors as mlfab_push; ARGUMENT also for
 * flags without tags, CALLBACK also when on_pull refused it or on_update the round that it waited
 * for.
 * At most 8 pulls may be under way at once: one more gets AGAIN. mlfab_pull_start needs its
 * request_p; its buffers are borrowed until the request has finished.
 * Cost: one small frame up, tensor bytes down, per server. */
MLFAB_API int mlfab_pull(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_pull_options *options, mlfab_result *result_p);
MLFAB_API int mlfab_pull_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_pull_options *options, mlfab_request *request_p);

/* With tags: a tensor in the library's cache, or with MLFAB_ALL all of it, as the last pull left
 * it; zeros where nothing was pulled. Written by pulls only (that are under way, too); valid until
 * the context is closed. Either output may be NULL. Errors: STATE without tags or before the model,
 * TENSOR. */
MLFAB_API int mlfab_cached(mlfab *ctx, uint32_t tensor, const void **data_p, uint64_t *count_p);

/* Polls a request: *done_p 1 when it has finished, which also ends it. result_p may be NULL.
 * Errors: REQUEST when it is unknown or was ended before. */
MLFAB_API int mlfab_test(mlfab *ctx, mlfab_request request, int *done_p, mlfab_result *result_p);

/* Waits for a request at most timeout_ns (0: its own deadline) and ends it. Returns its status, or
 * TIMEOUT when the wait was shorter than the request's deadline; the request is then still open. */
MLFAB_API int mlfab_wait(mlfab *ctx, mlfab_request request, uint64_t timeout_ns,
                         mlfab_result *result_p);

/* Calls fn once when the request has finished, which also ends it: test and wait then do not know it any more. If the
 * request has finished already, fn is called soon, possibly before mlfab_on_done returns. The thread that drives
 * the context calls it: the progress thread, or one that is in any call of this context. A context calls one
 * function at a time; of those that are due, the one that was given first. Inside, every call is allowed that does
 * not wait: the _start forms, test, cancel, on_done. One that waits, mlfab_close and mlfab_abandon
 * return MLFAB_ERR_STATE. Requests that are open when the context is closed are not told of. Errors:
 * REQUEST (unknown, or it has a function), ARGUMENT (fn is NULL), MEMORY. */
typedef void (*mlfab_done_fn)(void *user, mlfab_request request, const mlfab_result *result);
MLFAB_API int mlfab_on_done(mlfab *ctx, mlfab_request request, mlfab_done_fn fn, void *user);

/* Withdraws a request and gives its buffers back at once. It still has to be ended with test or wait,
 * which say CANCELLED (it never left, or the server dropped it), 0 (it was too late: applied) or
 * IN_DOUBT (not known yet: ask mlfab_push_status later). A collective's ends all that are open, on all
 * workers (section 10). */
MLFAB_API int mlfab_cancel(mlfab *ctx, mlfab_request request);

/* What became of update `seq` of this node: *status_p is 0 (applied everywhere), IN_DOUBT (still
 * under way), WITHDRAWN (applied nowhere), PARTIAL (withdrawn too late at some of several servers), or
 * what it was refused for. Remembers the last 256. */
MLFAB_API int mlfab_push_status(mlfab *ctx, uint64_t seq, int *status_p);

/* Waits until every push of this node is finished; returns the first failure of a push that nobody
 * waited for. timeout_ns 0: the config's. */
MLFAB_API int mlfab_flush(mlfab *ctx, uint64_t timeout_ns);

/* A descriptor for poll, epoll, a GUI loop: readable from the moment that mlfab_progress would do
 * something, or that something was done inside another call, until mlfab_progress(ctx, 0) has returned
 * 0. The loop: while (mlfab_progress(ctx, 0) == 1) {}; look after your requests; sleep on the descriptor
 * until mlfab_deadline at the latest. The library's: do not read or close it. With a progress thread
 * it tells that the thread did something. Errors: UNSUPPORTED (simulator, other systems than Linux). */
MLFAB_API int mlfab_fd(mlfab *ctx, int *fd_p);

/* Moves data for at most timeout_ns, 0: without waiting. Returns 1 if anything happened, 0 if not, or
 * an error. Needed only with MLFAB_PROGRESS_HAND. */
MLFAB_API int mlfab_progress(mlfab *ctx, uint64_t timeout_ns);

/* When mlfab_progress must be called at the latest, on the clock of env. Hand-driven contexts. */
MLFAB_API int mlfab_deadline(mlfab *ctx, uint64_t *at_ns_p);

/* ------------------------------------------------------------------------------------------------
 * 9. The fabric: barrier, broadcast, finish, allreduce, changes while it runs
 */

/* Waits until every live worker that has not finished is here. Server 0 counts: a barrier
 * needs no collectives, has no limit of workers, and is not failed by the death of a worker, who is then
 * no longer waited for. Barriers match in the order of calls, whether or not they wait
 * (mlfab_barrier_start); one that has run out of time may be called again and is then the same one.
 * timeout_ns 0: the config's. Errors: TIMEOUT naming the first rank that is missing; PEER_DEAD when
 * server 0 is dead; AGAIN (too many requests are open). */
MLFAB_API int mlfab_barrier(mlfab *ctx, const mlfab_collective *options);

/* Copies `bytes` bytes from worker `root` to all others, from worker to worker, up to model_max_bytes.
 * A collective (section 10): every worker calls it in the same order, with the same root and size, as
 * this or as mlfab_broadcast_start. Errors: as of mlfab_allreduce_list; also RANK_RANGE (root) and
 * ARGUMENT (0 bytes; root does not take part). */
MLFAB_API int mlfab_broadcast(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                              const mlfab_collective *options);

/* This worker has no more data. Rounds, barriers and collectives of the others go on without it, and none of
 * their calls fails for it; its pulls still work, its pushes and collectives afterwards are MLFAB_ERR_STATE.
 * Collectives: it takes effect between two calls, the same two on every worker. Others may have begun calls that
 * this worker never makes: in those the library contributes the operation's identity for it (0 to a sum), and a
 * mean is divided by the number of the others. A call that cannot do without it (a broadcast from it, an allgather with a block of it, a reducer
 * of the user's) fails with MLFAB_ERR_PEER_CLOSED; so does a call of an object (partial, stochastic, task
 * graph) that is under way when it takes effect. Waits for its own pushes, and until no other worker needs it any more.
 * Errors: STATE (it has finished before), TIMEOUT, PEER_DEAD. */
MLFAB_API int mlfab_finish(mlfab *ctx, uint64_t timeout_ns);

/* Who takes part in this worker's next collective, as far as it is known here: *count_p workers, the first
 * `room` of them in `ranks` (NULL with room 0). A worker that has finished is not among them. Before the
 * first collective: all workers. Errors: STATE on a node that is not a worker. */
MLFAB_API int mlfab_present(mlfab *ctx, uint32_t *ranks, uint32_t room, uint32_t *count_p);

/* Server: serves until every worker has closed or died, then returns 0. A scheduler of its own: plans
 * until every server has closed or died. timeout_ns 0: no limit. With a progress thread it only waits.
 * Errors: TIMEOUT; STATE on a node that does neither. */
MLFAB_API int mlfab_serve(mlfab *ctx, uint64_t timeout_ns);

/* Adds `count` elements of every live worker's `data` and gives all of them the sum, the same bits on
 * every rank. Every worker must call it, in the same order, with the same count and type. Those who have
 * called mlfab_finish are not waited for. NaN and infinity are added like any number. `data` is borrowed
 * until the call returns; the sum is formed in it, and after a failure what it holds is of no use.
 *
 * It is mlfab_allreduce_list with one buffer and no options: what is said of failures, matching, types
 * and cost there (section 10) holds here.
 * Errors: as of mlfab_allreduce_list. */
MLFAB_API int mlfab_allreduce(mlfab *ctx, void *data, uint64_t count, int dtype,
                              const mlfab_collective *options);

/* The mean of one array over all workers, in place. A data-parallel trainer needs no more than this:
 *    status = mlfab_allreduce_mean(fabric, gradient, count);
 * As mlfab_allreduce_list with MLFAB_F32, MLFAB_OP_MEAN and the config's timeout. */
MLFAB_API int mlfab_allreduce_mean(mlfab *ctx, float *data, uint64_t count);

/* Changes the consistency model while the fabric runs, from any worker: of the slices that have
 * bytes of a tensor, or of all (MLFAB_ALL), at one server or at all (MLFAB_ALL). The last change
 * wins. Pulls that are buffered are looked at again: those that the new condition satisfies are
 * answered at once, the others wait by it; leaving rounds commits the open one as it stands. Waits
 * until every server in question has done it; timeout_ns 0: the config's. Slices of a server may
 * have up to 8 different models; a push waits until all slices that it touches may take it, a pull
 * until all may answer.
 * Errors: ARGUMENT (what is out of range is named), TENSOR, STATE before the model, LIMIT (a ninth
 * model), UNSUPPORTED (rounds with a delay bound; leaving rounds with `mean`; another than BSP with
 * `deterministic`; USER without conditions there), AGAIN (another change of this worker is under
 * way, or 8 of others wait), TIMEOUT (it may still happen), PEER_DEAD. After an error some servers
 * may have changed: call it again. */
MLFAB_API int mlfab_set_sync(mlfab *ctx, const mlfab_sync *sync, uint32_t server, uint32_t tensor,
                             uint64_t timeout_ns);

/* Moves slices so that these servers, and no others, hold the model, balanced by bytes and with the
 * fewest bytes moved (FluentPS elastic slicing). Pushes and pulls of all workers go on: they wait
 * meanwhile, nothing is lost and nothing applied twice. Any worker; one at a time. timeout_ns 0:
 * the config's. Every worker has to stop for it: one that is hand-driven and computes is waited
 * for.
 * Cost: the bytes that move, once; meanwhile memory for the old and the new shard at each server;
 * with tags the next pull of every worker brings everything.
 * Errors: ARGUMENT (none, one twice, or one that there is not), STATE before the model, AGAIN
 * (somebody's is under way), TIMEOUT (naming who has not stopped; it may still happen), PEER_DEAD
 * naming the server, MEMORY and LIMIT (a ninth consistency model at a server): all is as it was. */
MLFAB_API int mlfab_set_servers(mlfab *ctx, const uint32_t *servers, uint32_t n,
                                uint64_t timeout_ns);

/* Changes the schedule of the fabric while it runs, from any worker; the last change wins. Returns
 * when it was sent. Errors: ARGUMENT (delay_bound 0: no update has a delay below 0), STATE without a
 * scheduler, UNSUPPORTED (a delay bound with rounds), AGAIN or PEER_DEAD without a link to server 0. */
MLFAB_API int mlfab_set_schedule(mlfab *ctx, const mlfab_schedule *schedule);

/* The capacity of this node's network links, for those who know better than what is measured: bytes
 * a second in and out, for the scheduler and, from the next epoch on, for collectives (algorithms,
 * order_by_rate). 0: the link is cut; negative: measure again.
 * Errors: ARGUMENT (not a number, infinite), STATE without a scheduler on a node that is no worker. */
MLFAB_API int mlfab_set_link(mlfab *ctx, double in_bytes_per_s, double out_bytes_per_s);

/* What the scheduler planned last, for people: for each update its hop, group, start, end and delay,
 * or why it was dropped, and the links that it reckoned with. Text of at most `room` bytes with its end;
 * *bytes_p, unless NULL, is how long the whole text is. On the node of the scheduler. Errors: STATE
 * elsewhere. */
MLFAB_API int mlfab_explain(mlfab *ctx, char *text, size_t room, size_t *bytes_p);

/* ------------------------------------------------------------------------------------------------
 * 10. Collectives
 *
 * Worker to worker, without a server. Every live worker that has not called mlfab_finish calls the same
 * collectives, in the same order, with the same sizes; up to 1,024 may be open, and the first 32 of them run. Objects (partial
 * reductions, stochastic reductions, task graphs) are opened by all workers in the same order. Calls of
 * several threads match in the order in which they were made, so threads must take turns alike on all
 * workers.
 *
 * Failures. Whatever ends one collective ends all that are open, on all workers, with one code, one
 * rank and one text (unless several workers fail by themselves at a time: each of those returns its
 * own): a worker that died or left, sizes that differ, a deadline, a NaN that was refused, a cancelled
 * request. Every worker sees a failure once: its open calls return it, or its next call does (of
 * several since its last call, the last one). After that calls match again, among the workers that
 * live: a new epoch. Workers may see one failure in different calls: a call that returned 0 on one may fail on
 * another. Before they repeat a step, all workers must agree which one: every worker that has seen the
 * failure calls an allreduce of MLFAB_OP_MAX over step * workers + rank, then takes the model of that rank
 * by a broadcast into other memory (examples/11_comes_and_goes.c). A worker's deadline names the first
 * rank that has not called; one shorter than two heartbeats may name the worker whose deadline it was.
 * The first call after another worker's close fails once with MLFAB_ERR_PEER_CLOSED naming it, with whatever
 * is still open, unless it had finished. A worker that comes back to a fabric ends the epoch of the
 * others (MLFAB_ERR_AGAIN), and they wait for its first collective: it should call that early. It has
 * none of their objects: what they call on these ends with its deadline, naming it; they close them,
 * and all open new ones. After a failure the contents of its buffers are
 * undefined. Server 0 manages membership and is not on the data path. When it dies, what is open fails with MLFAB_ERR_PEER_DEAD
 * (is_server 1), and so does every later call of this section: without servers of their own (mlfab-run
 * -s 0, torchrun, mpirun) it is in worker 0's process.
 *
 * Same bits: a full collective gives all ranks the same bits, whatever arrived first, and from run to
 * run where the same workers call it in the same form. Members are in the order of their hosts, then ranks.
 * Two things may change the last bits: forms that wait add in another order than forms that do not; and
 * MLFAB_ALGORITHM_AUTO on several hosts whose links are measured or told (mlfab_set_link), and
 * order_by_rate, look at what the links carried when the epoch began. NaN is passed on, by MIN and MAX too,
 * unless `refuse_nan` is set.
 */
enum mlfab_op {
  MLFAB_OP_SUM = 0,
  MLFAB_OP_MEAN = 1, /* the sum divided by the number of workers that take part; not of MLFAB_I64 */
  MLFAB_OP_MIN = 2,
  MLFAB_OP_MAX = 3,
  MLFAB_OP_PRODUCT = 4
};

enum mlfab_algorithm {
  /* By size, number of workers, hosts, and links where known; in a fabric with a scheduler allreduces of
   * more than eager_bytes (the same on all nodes) are PLANNED, but for those in shared memory. */
  MLFAB_ALGORITHM_AUTO = 0,
  MLFAB_ALGORITHM_RING = 1,     /* fewest bytes, 2 (P - 1) steps */
  MLFAB_ALGORITHM_HALVING = 2,  /* recursive halving, then doubling: fewest bytes, 2 log2 P steps */
  MLFAB_ALGORITHM_DOUBLING = 3, /* recursive doubling: log2 P steps, all bytes in each */
  MLFAB_ALGORITHM_TREE = 4,     /* binomial tree up and down */
  /* Allreduces but `ordered` ones: up a tree to a root drawn from the seed, whose aggregators the scheduler
   * chooses by the links, and down a distribution tree (MLfabric §6). The array's bytes go up and down once
   * per worker; an aggregator stages up to 4 MiB of what comes early. Two round trips beside. Of two
   * workers, and where there is no scheduler, or it is silent for a heartbeat, as AUTO without one. */
  MLFAB_ALGORITHM_PLANNED = 5
};

/* A reducer of the user's: inout = in o inout, `count` elements of element_bytes each; both aligned to 8
 * bytes or to the element, whichever is less. It must be associative and, unless `ordered` is set,
 * commutative; with `ordered` what is in `in` comes before what is in inout. Must not call back into the
 * context. */
typedef void (*mlfab_reduce_fn)(void *user, void *inout, const void *in, uint64_t count);

struct mlfab_collective { /* options of a collective */
  uint32_t size;
  uint32_t op;            /* MLFAB_OP_SUM ... */
  uint32_t algorithm;     /* MLFAB_ALGORITHM_* */
  uint32_t refuse_nan;    /* 1: NaN and infinity in what this worker brings to an allreduce or a
                          reduce-scatter fail it, naming the worker; sums are not looked at */
  mlfab_reduce_fn reduce; /* instead of op; `dtype` is then ignored */
  void *user;
  uint32_t element_bytes; /* of opaque elements, with reduce: 1..65536 */
  uint32_t ordered;    /* 1: reduce does not commute: x_0 o x_1 o ... in the order of members, which
                       is that of ranks where each host has consecutive ones */
  uint64_t timeout_ns; /* 0: the config's */
  /* A number of the caller's, 0: none. Calls match by their order; workers whose calls have different tags
   * get MLFAB_ERR_MISMATCH with both, where equal sizes would give a wrong sum. */
  uint64_t tag;
  /* Where the data comes from, one pointer for each buffer; NULL: in place. The call only reads it, and not
   * any more when it has returned or begun; the result is in the buffer. An allgather's is this rank's block; a
   * broadcast's counts at the root. It must not overlap any buffer of the call (ARGUMENT). */
  const void *const *inputs;
};

/* One of a list of buffers that are reduced as one operation. */
typedef struct mlfab_vec {
  void *data;
  uint64_t count; /* elements, 0 allowed */
} mlfab_vec;

/* Memory that workers of one host share in blocking collectives, which copy less on it: from the third
 * call on, and where the vector begins at a page and ends at one, or at the memory's end. Others add in it
 * during a call; when one fails, its pages are replaced by new ones with the same contents, which matters
 * to whoever has pinned them. At a page, zero; freed by mlfab_free or close. A child of fork does not have
 * it: it gets SIGSEGV when it touches it. Elsewhere ordinary memory, of which a child has a copy. Both wait
 * while another thread is in a blocking collective. Errors: ARGUMENT (0 bytes), MEMORY. */
MLFAB_API int mlfab_alloc(mlfab *ctx, uint64_t bytes, void **memory_p);
MLFAB_API int mlfab_free(mlfab *ctx, void *memory);

/* Reduces the workers' buffers, a list taken as one array, in place: every worker gets the result.
 * options may be NULL: sum. The _start form returns at once; the buffers are borrowed until the
 * request has finished. They must not overlap.
 * Errors: ARGUMENT (no elements, overlap, what is out of range), DTYPE, UNSUPPORTED (mean of
 * MLFAB_I64, what an algorithm cannot do, refuse_nan with a reducer of the caller's), LIMIT (more than
 * 4096 buffers, model_max_bytes, a fabric of more than 1024 workers), AGAIN (1,024 are under way), STATE
 * (this worker has called mlfab_finish), MEMORY; then of failures: MISMATCH naming a rank whose sizes or
 * options differ, TIMEOUT naming the first rank that is missing, PEER_DEAD, PEER_CLOSED, NOT_FINITE,
 * CANCELLED, CALLBACK (of a task graph), MEMORY naming the rank, and AGAIN where a worker has come back.
 * Cost: RING and HALVING 2 (P-1)/P of the array's bytes out and in for each worker; within one host the
 * blocking form goes through shared memory, with MLFAB_ALGORITHM_AUTO, without a reducer of the
 * caller's, and up to 64 workers. Half types are added in float32 and rounded to nearest once for each
 * hop (in shared memory once, when all are added), beyond the largest number to infinity: the error of
 * a sum is at most (P - 1) half units in the last place of its largest partial sum. MEAN divides that
 * sum and rounds once more, so where the sum is infinite the mean is, too. */
MLFAB_API int mlfab_allreduce_list(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                   const mlfab_collective *options);
MLFAB_API int mlfab_allreduce_start(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p);

/* Reduces; every worker gets its block. `data` is the blocks of all ranks one after the other, counts[r]
 * elements (0 allowed; 0 for ranks that take no part, ARGUMENT names one that has more) for rank r; on
 * return block `rank` holds the result and the others nothing of use. Errors and cost as above, (P-1)/P
 * of the bytes. */
MLFAB_API int mlfab_reduce_scatter(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                   const mlfab_collective *options);
MLFAB_API int mlfab_reduce_scatter_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                         const mlfab_collective *options, mlfab_request *request_p);

/* Every worker brings its block of `data` and gets all others'. counts as above; with MLFAB_BYTES they are bytes,
 * any number of them. Of the options algorithm, timeout, tag and inputs count. */
MLFAB_API int mlfab_allgather(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                              const mlfab_collective *options);
MLFAB_API int mlfab_allgather_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p);

/* mlfab_broadcast and mlfab_barrier of section 9 without waiting; they match those. Of the options only
 * timeout counts, for the broadcast also algorithm, tag and inputs. Any number of barriers may be open, as far as
 * there are requests. Errors: as of the forms that wait; ARGUMENT (options.size). */
MLFAB_API int mlfab_broadcast_start(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                                    const mlfab_collective *options, mlfab_request *request_p);
MLFAB_API int mlfab_barrier_start(mlfab *ctx, const mlfab_collective *options,
                                  mlfab_request *request_p);

/* --- collectives that do not wait (eagerSGD) ---
 *
 * A partial reduction adds what is there when it starts, and starts before everybody is there: SOLO
 * when the first worker calls, MAJORITY when one drawn from the seed calls (so that half of them
 * have on average), QUORUM when `quorum` workers have called, whoever they are. Others take part
 * from their progress threads, with what they had called with before, or zeros. What came too late
 * is kept and added to the next contribution: nothing is lost, nothing added twice.
 * A call of a worker is a step, counted from 0; reductions are rounds, counted from 0 on all workers.
 * Step s waits until round s is over: a worker that lags returns at once. A worker without a progress
 * thread (MLFAB_PROGRESS_HAND) takes part in its calls and in mlfab_progress only: rounds wait for it.
 */
enum mlfab_partial_mode {
  MLFAB_PARTIAL_SOLO = 1,
  MLFAB_PARTIAL_MAJORITY = 2,
  MLFAB_PARTIAL_QUORUM = 3
};

enum mlfab_partial_results {
  MLFAB_PARTIAL_LATEST =
      0, /* a call returns the newest round's result; older ones are overwritten. The workers' models drift
            apart (eagerSGD 5): average them with mlfab_allreduce and MLFAB_OP_MEAN now and then */
  MLFAB_PARTIAL_QUEUED =
      1 /* every round's result is returned once, in order, by every worker; a worker with
                       queue_max results that it has not taken holds the next round up */
};

typedef struct mlfab_partial_options {
  uint32_t size;
  uint32_t mode;    /* MLFAB_PARTIAL_SOLO ... */
  uint32_t quorum;  /* with QUORUM: 1..workers that live when it opens; later at most those alive */
  uint32_t results; /* MLFAB_PARTIAL_LATEST, MLFAB_PARTIAL_QUEUED */
  uint32_t queue_max; /* 0: 8 */
  uint32_t op;        /* MLFAB_OP_SUM or MLFAB_OP_MEAN (divided by the number of workers) */
  uint32_t algorithm; /* of the exchange: MLFAB_ALGORITHM_AUTO ... TREE */
  uint32_t
      refuse_nan; /* 1: a contribution with NaN or infinity is refused alone, nothing is changed */
  uint64_t seed;  /* of MAJORITY's initiators and of who counts a QUORUM; 0: the config's */
  uint64_t timeout_ns; /* of mlfab_partial_open */
} mlfab_partial_options;

/* What a call got. */
typedef struct mlfab_partial_info {
  uint32_t size;
  uint32_t included;   /* 1: this call's data is in the result */
  uint64_t round;      /* of the result */
  uint64_t step;       /* this call's number */
  uint32_t active;     /* workers whose call of this round is in the result */
  uint32_t workers;    /* that took part */
  uint32_t stale;      /* calls of this worker that no result has included yet */
  uint64_t bitmap[16]; /* bit r: rank r was active; ranks above 1023 are not told */
} mlfab_partial_info;

/* Opens a partial reduction of `count` elements: collective, waits for all workers. At most 16 objects
 * of section 10 are open. Errors: ARGUMENT (quorum 0 or above the world, ...), DTYPE, UNSUPPORTED (mean of
 * MLFAB_I64), LIMIT, MEMORY, and failures (MISMATCH: the options differ).
 * Memory: 4 arrays, and queue_max more with QUEUED. */
MLFAB_API int mlfab_partial_open(mlfab *ctx, uint64_t count, int dtype,
                                 const mlfab_partial_options *options, uint32_t *id_p);
/* A step: contributes `data` and puts a result in its place. info_p may be NULL, else its size is set. One
 * at a time an object. Errors: ARGUMENT, NOT_FINITE, AGAIN (a step or a flush is under way), STATE
 * (after mlfab_finish), and failures, also those that are told at once: the
 * contribution is then kept for the next round, unless it is in a result that some worker's call has
 * returned. Afterwards steps and rounds go on, for all alike, at the first round that no call has
 * returned; results that were queued before are gone. */
MLFAB_API int mlfab_partial_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                   mlfab_partial_info *info_p);
/* The same without waiting; info_p and data are borrowed until the request has finished. */
MLFAB_API int mlfab_partial_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                  mlfab_partial_info *info_p, mlfab_request *request_p);
/* The sum (or mean) of what no result has included yet, of all workers, into `data`: a full allreduce at the
 * end of a training. Every worker calls it. Errors: as of a step; what this
 * worker would have added is then kept, unless it is in a sum that some worker's flush has returned: those
 * who repeat it agree on that first, as after any failure. Memory: one array. */
MLFAB_API int mlfab_partial_flush(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns);
/* Closes it on this worker; rounds that others start afterwards fail, naming it. Call flush or a
 * barrier before. Errors: ARGUMENT (no such id), STATE (a step or a flush is under way). */
MLFAB_API int mlfab_partial_close(mlfab *ctx, uint32_t id);

/* --- stochastic reduce (ASAP) ---
 *
 * A worker sends its model to the few workers that a graph names, and averages what comes from those
 * that name it. NOTIFY_ACK waits for the notice of every sender of the same iteration and
 * acknowledges what it has used, so that no whole fabric waits for one; BSP and ASYNC are the forms that
 * it is compared with: both average what is whole when they look, BSP after a barrier that waits for
 * nobody's bytes, ASYNC at once.
 */
enum mlfab_graph_kind {
  MLFAB_GRAPH_ALL = 1,       /* all to all */
  MLFAB_GRAPH_EXPANDER = 2,  /* i to i + 1 and i + round(sqrt N): ASAP's root expander */
  MLFAB_GRAPH_CHAIN = 3,     /* i to i + 1 */
  MLFAB_GRAPH_RING = 4,      /* i to i + 1 and i - 1 */
  MLFAB_GRAPH_HYPERCUBE = 5, /* N a power of 2 */
  MLFAB_GRAPH_REGULAR = 6,   /* random, `degree` out and in, from the seed */
  MLFAB_GRAPH_STAR = 7,      /* all to 0 and back: not for reducing, only for comparison */
  MLFAB_GRAPH_USER = 8       /* the caller's edges */
};

typedef struct mlfab_edge {
  uint32_t from, to;
} mlfab_edge;

typedef struct mlfab_graph_info {
  uint32_t in_degree; /* with itself; 0: not the same for all */
  uint32_t connected; /* 1: strongly */
  uint32_t doubly_stochastic;
  uint32_t edges; /* without duplicates and loops */
  double gap;     /* 1 - sigma_2 of the averaging matrix */
} mlfab_graph_info;

/* Writes the edges of a graph: *edges_p of them, at most `room`. degree and seed: REGULAR. Errors: ARGUMENT
 * (nodes 0 or above 1024, a hypercube of another size, degree), LIMIT (room; *edges_p tells how many),
 * MEMORY. */
MLFAB_API int mlfab_graph_build(uint32_t kind, uint32_t nodes, uint32_t degree, uint64_t seed,
                                mlfab_edge *edges, uint32_t room, uint32_t *edges_p);
/* Looks at a graph. *info_p is set whenever the edges are in range. Errors: ARGUMENT with the edge, or
 * the node that cannot be reached, or whose in-degree differs, or a gap of 0; MEMORY. error_p may be
 * NULL. Cost: nodes^3. */
MLFAB_API int mlfab_graph_check(const mlfab_edge *edges, uint32_t n, uint32_t nodes,
                                mlfab_graph_info *info_p, mlfab_error *error_p);

enum mlfab_notify_mode { MLFAB_NOTIFY_ACK = 1, MLFAB_NOTIFY_BSP = 2, MLFAB_NOTIFY_ASYNC = 3 };

typedef struct mlfab_stochastic_options {
  uint32_t size;
  uint32_t graph;          /* MLFAB_GRAPH_*, not STAR */
  uint32_t degree;         /* REGULAR */
  uint32_t mode;           /* MLFAB_NOTIFY_*; 0: NOTIFY_ACK */
  const mlfab_edge *edges; /* USER: of worker ranks; read during the call */
  uint32_t nedges;
  uint32_t refuse_nan; /* 1: NaN and infinity are refused by the call alone, nothing is changed */
  uint64_t seed;       /* REGULAR; 0: the config's */
  uint64_t timeout_ns; /* of mlfab_stochastic_open */
} mlfab_stochastic_options;

typedef struct mlfab_stochastic_info {
  uint32_t size;
  uint32_t senders; /* in-degree without itself */
  uint32_t whole;   /* inputs averaged: whole and not used before */
  uint32_t torn;    /* inputs that were being written (BSP, ASYNC) */
  uint32_t stale;   /* inputs that had been used before or had not come */
  uint32_t reserved;
  uint64_t iteration;  /* that this worker has finished, from 1 */
  uint64_t sent_bytes; /* of this call */
} mlfab_stochastic_info;

/* Opens a stochastic reduction of `count` elements (F32 or F64): collective, all with the same options.
 * The graph is that of the workers that take part, in the order of their hosts, then ranks; after a
 * failure it is built anew for those that are left: of USER's edges those among them. It is checked:
 * in-degrees must be equal. Out-degrees need not be, but then the mean of all models drifts towards
 * those that send to more: see doubly_stochastic of mlfab_graph_check.
 * Errors: ARGUMENT (what mlfab_graph_check says), DTYPE, LIMIT, MEMORY, UNSUPPORTED, and failures (MISMATCH:
 * the options differ). Memory: an array a sender, and one. */
MLFAB_API int mlfab_stochastic_open(mlfab *ctx, uint64_t count, int dtype,
                                    const mlfab_stochastic_options *options, uint32_t *id_p);
/* One iteration: sends `data` to this worker's receivers and replaces it by the mean of it and what came.
 * One at a time an object. info_p may be NULL, else its size is set. With any error `data` is as it was.
 * Errors: ARGUMENT (also: the workers that are left have no graph), NOT_FINITE, AGAIN (one is under way),
 * and failures: TIMEOUT names a rank that has not called.
 * Cost: the array once to each receiver, and in NOTIFY_ACK one small message back; BSP: one to every
 * worker. */
MLFAB_API int mlfab_stochastic_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                      mlfab_stochastic_info *info_p);
MLFAB_API int mlfab_stochastic_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                     mlfab_stochastic_info *info_p, mlfab_request *request_p);
/* Closes it on this worker; what is under way to others still goes. Iterations that others call beyond
 * this worker's last fail, naming it, but with ASYNC: so call as many everywhere. Errors: ARGUMENT, STATE
 * (one is under way). */
MLFAB_API int mlfab_stochastic_close(mlfab *ctx, uint32_t id);

/* --- task graphs of the user's own ---
 *
 * A directed acyclic graph of operations, executed by whatever drives the context (eagerSGD §4). An operation
 * runs when all it comes after are done, or `need` of them (1: OR), and once a round, whatever comes
 * later. Every worker makes its own part; sends and receives match by (rank, tag).
 */
typedef struct mlfab_dag mlfab_dag;
/* Non-zero fails the task graph on all workers (MLFAB_ERR_CALLBACK). Must not call back into the context, but for
 * mlfab_dag_trigger. */
typedef int (*mlfab_compute_fn)(void *user, uint64_t round);

enum mlfab_dag_flags {
  MLFAB_DAG_OUTSIDE = 1, /* mlfab_dag_trigger counts as one more operation that it comes after */
  MLFAB_DAG_OPTIONAL = 2 /* a round is over without it */
};

MLFAB_API int mlfab_dag_create(mlfab *ctx, mlfab_dag **dag_p);
/* Operations; *op_p is its number. Memory is the caller's, borrowed until the task graph is freed. Up to 1 GiB a
 * message. Errors: ARGUMENT, RANK_RANGE, LIMIT, STATE (it is open), MEMORY; of recv_reduce also DTYPE
 * and UNSUPPORTED (mean). */
MLFAB_API int mlfab_dag_send(mlfab_dag *dag, int32_t rank, uint32_t tag, const void *data,
                             uint64_t bytes, uint32_t *op_p);
MLFAB_API int mlfab_dag_recv(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data, uint64_t bytes,
                             uint32_t *op_p);
MLFAB_API int mlfab_dag_recv_reduce(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data,
                                    uint64_t count, int dtype, int op, uint32_t *op_p);
MLFAB_API int mlfab_dag_compute(mlfab_dag *dag, mlfab_compute_fn fn, void *user, uint32_t *op_p);
MLFAB_API int mlfab_dag_nop(mlfab_dag *dag, uint32_t *op_p);
/* `op` comes after `dependency`. */
MLFAB_API int mlfab_dag_after(mlfab_dag *dag, uint32_t op, uint32_t dependency);
/* need: how many dependencies start it, 0: all. flags: MLFAB_DAG_*. */
MLFAB_API int mlfab_dag_set(mlfab_dag *dag, uint32_t op, uint32_t need, uint32_t flags);
/* Checks it and opens it: collective. persistent 1: every round arms the next without a call; it must
 * have an operation that waits for a trigger or a message. Errors: ARGUMENT naming an operation (a cycle, need
 * above its dependencies, a (rank, tag) twice), STATE, LIMIT, and failures. */
MLFAB_API int mlfab_dag_open(mlfab_dag *dag, int persistent, uint64_t timeout_ns);
/* Runs a round (not persistent ones); they follow each other, counted on each worker. Errors: STATE (not
 * open, persistent), AGAIN (the last one is under way), PEER_DEAD (a rank of it takes no part any more),
 * and failures. */
MLFAB_API int mlfab_dag_start(mlfab_dag *dag, uint64_t timeout_ns, mlfab_request *request_p);
/* Waits until `round` (from 0) is over. Errors: STATE (it was not started, or a failure has ended it),
 * and failures. */
MLFAB_API int mlfab_dag_wait(mlfab_dag *dag, uint64_t round, uint64_t timeout_ns);
/* Triggers an OUTSIDE operation in the present round; again in the same round: nothing. Errors: ARGUMENT
 * (no such operation, or another sort), STATE (no round is under way). */
MLFAB_API int mlfab_dag_trigger(mlfab_dag *dag, uint32_t op);
/* Closes it on this worker: others cannot go on with it then (PEER_CLOSED), and a round that is under way
 * fails everywhere (CANCELLED). *dag_p becomes NULL. Call it before mlfab_close and mlfab_abandon: a task graph
 * whose context is closed may be given to no call any more, not to this one either, and its memory is lost.
 * Errors: ARGUMENT (dag_p is NULL), CLOSED (*dag_p is NULL). */
MLFAB_API int mlfab_dag_close(mlfab_dag **dag_p);

/* ------------------------------------------------------------------------------------------------
 * 11. Telemetry
 */
typedef struct mlfab_stats {
  uint64_t frames_sent, frames_received;
  uint64_t bytes_sent, bytes_received;     /* headers included */
  uint64_t payload_sent, payload_received; /* tensor bytes */
  uint64_t frames_refused;                 /* malformed, wrong checksum, wrong protocol */
  uint64_t strangers_refused;              /* connections that were not of this job */
  uint64_t reconnects, peers_died, transfers_revoked;
  uint64_t pushes_started, pushes_applied, pushes_refused, pushes_merged; /* worker */
  uint64_t pulls_finished;                                                /* worker */
  uint64_t updates_applied, updates_refused, updates_repeated;            /* server */
  uint64_t commits, pulls_answered, pulls_delayed, pulls_restarted;       /* server */
  uint64_t delay_sum, delay_max; /* server: over applied updates */
  uint64_t allocations;          /* calls of env.allocate since open */
  uint64_t memory_bytes;         /* allocated now */
  uint64_t trace_hash;           /* of every event and action so far */
  /* A fabric with a scheduler. */
  uint64_t updates_dropped; /* server: by plan, bound or round; worker: pushes that came back so */
  uint64_t groups_applied, groups_failed;    /* server: aggregates; those that were begun again */
  uint64_t spreads_answered, spreads_failed; /* server: pulls answered by way of a distributor */
  uint64_t members_added, members_served;    /* aggregator: updates added up; pulls handed on */
  /* Scheduler: plans; updates that they dropped, and grouped. */
  uint64_t plans_made, plans_dropped, plans_grouped;
  /* Capacity of this node's host as measured or set, bytes a second; 0: unknown. */
  uint64_t link_in, link_out;
  /* Filters: elements of updates offered to them and sent; beyond +-65504; bytes that these pushes had,
   * and what they became (worker). */
  uint64_t filter_offered, filter_sent, filter_saturated, filter_raw_bytes, filter_bytes;
  /* Pulls: bytes of the model asked for, and what was sent for them (server). */
  uint64_t pull_raw_bytes, pull_bytes;
  uint64_t rounds;                    /* server: iterations completed, of its first slice's model */
  uint64_t slices_moved, bytes_moved; /* server: that came here from others */
  /* Section 10: collectives that finished and failed here, epochs that this worker was in, partial
   * rounds that it has seen the end of. */
  uint64_t collectives, collectives_failed, collective_epochs, rounds_partial;
} mlfab_stats;

/* A consistent copy of the counters. `size` is sizeof *stats_p. */
MLFAB_API int mlfab_get_stats(mlfab *ctx, mlfab_stats *stats_p, size_t size);

typedef struct mlfab_update_info {
  uint32_t worker, incarnation;
  uint64_t seq;     /* first of the update's members */
  uint32_t members; /* updates in the commit: 1, merged small ones, or a round's contributors */
  uint32_t server;
  uint64_t delay;   /* largest over the slices touched */
  uint64_t version; /* of the first slice touched, before the commit */
  uint64_t commit;
  uint64_t iteration; /* the worker's iteration, or the round */
  double scale, norm; /* norm: of the sum as pushed, 0 when not known */
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
  MLFAB_EVENT_SCHEDULER_LOST = 7, /* server: first come, first served from now on */
  MLFAB_EVENT_SCHEDULER_BACK = 8
};
typedef struct mlfab_event_info {
  uint32_t kind;
  int32_t rank; /* of a worker, or the number of a server */
  uint32_t is_server;
  uint32_t incarnation;
  int32_t code;     /* MLFAB_ERR_* where there is one */
  const char *text; /* valid during the call */
} mlfab_event_info;

/* ------------------------------------------------------------------------------------------------
 * 12. Transport interface
 *
 * A transport is a table of functions, passed by pointer. It carries frames between two ends of a
 * link: whole, once, in order between UP and DOWN; at DOWN any suffix is lost. Nothing blocks but
 * wait. No function is called from two threads at once, except wait, wake and fd, which may run
 * beside any other but close.
 *
 * A frame is a head (64-byte header with lengths inside, then meta) and a bulk. A transport of
 * streams finds the lengths with mlfab_frame_check, which also refuses what cannot be a frame before
 * anything is allocated; a transport of messages need not look inside. The first frame that a caller sends
 * on a link has 4096 bytes at most, and so has every frame of a link that begins with JOIN: a
 * transport may give up one that announces more.
 */
#define MLFAB_TRANSPORT_ABI 3
#define MLFAB_HEADER_BYTES 64
#define MLFAB_META_MAX 65536   /* largest meta of a frame, bytes */
#define MLFAB_BULK_MAX 1048576 /* largest bulk of a frame, bytes */

enum mlfab_io_kind {
  MLFAB_IO_UP = 1,    /* a connection stands: `link`, and `token` of connect (0: they called us) */
  MLFAB_IO_DOWN = 2,  /* it broke (or, link 0: the connect of `token` failed): `code`, `text`.
                            Everything borrowed by its sends is given back by this event */
  MLFAB_IO_FRAME = 3, /* a frame came: head, bulk; borrowed until release */
  MLFAB_IO_SENT = 4,  /* the bulk of the send with `token` is no longer needed */
  MLFAB_IO_WRITABLE = 5, /* a link that refused a send may take one now */
  MLFAB_IO_REFUSED = 6,  /* a connection was dropped before it was a link (stranger, bad frame) */
  MLFAB_IO_MEASURED = 7  /* link 0: what the driver measured of this host, in `measure` */
};

/* What passed through a host's network interface since the last measure, or a node's own bytes where
 * the interface does not tell. */
typedef struct mlfab_measure {
  uint64_t elapsed_ns;
  uint64_t bytes_in, bytes_out;
  double delivery_in, delivery_out; /* the rate of the stretches in which somebody had more to send,
                                       bytes a second; 0: there were none worth the name */
  double nominal;                   /* speed of the interface, bytes a second; 0: not told */
  uint32_t limited_in, limited_out; /* 1: nobody had more to send for some of the time, so that
                                       the bytes are a lower bound only */
} mlfab_measure;

/* What a transport reports. */
typedef struct mlfab_io_event {
  uint32_t kind; /* MLFAB_IO_* */
  uint32_t link; /* the transport's number for the connection, 1..2^24-1 */
  uint64_t token;
  const void *head; /* 64-byte frame header and its meta, contiguous, 8-byte aligned */
  const void *bulk; /* tensor bytes, 8-byte aligned; NULL with bulk_bytes > 0: a ghost */
  uint32_t head_bytes, bulk_bytes;
  int32_t code;                 /* MLFAB_ERR_* */
  uint32_t caps;                /* UP: MLFAB_CAP_* of the link's transport; set by the driver */
  const char *text;             /* why; may be NULL; valid until release */
  void *opaque;                 /* the transport's own, for release */
  const mlfab_measure *measure; /* MEASURED */
} mlfab_io_event;

enum mlfab_transport_caps {
  MLFAB_CAP_RELIABLE = 1, /* bytes arrive unchanged: payload checksums are not computed */
  MLFAB_CAP_GHOST = 2,    /* carries ghosts */
  MLFAB_CAP_LOCAL = 4,    /* reaches this host only */
  MLFAB_CAP_CHECKED = 8,  /* hands out only frames that passed mlfab_frame_check and, unless it is
                             reliable, mlfab_frame_verify */
  MLFAB_CAP_PROBE = 16,   /* has the function probe */
  MLFAB_CAP_VIRTUAL =
      32 /* time is virtual, and all contexts are in one thread: env's clock stands still
                             but inside wait, which carries out what others do meanwhile */
};

typedef struct mlfab_transport_options {
  uint32_t size;
  uint32_t allow_insecure;
  const char *listen; /* address to listen at, or "" for one of the transport's choice */
  const char *ifname; /* as in mlfab_config */
  const char *job;
  const mlfab_env *env; /* complete: no member is NULL but store */
  void *user;           /* mlfab_config.transport_user */
  mlfab_error *error;   /* filled on failure; never NULL */
  uint64_t timeout_ns;  /* open may wait so long until a host name to listen at resolves, and asks
                           again meanwhile; 0: it asks once */
} mlfab_transport_options;

typedef struct mlfab_transport {
  uint32_t size;
  uint32_t abi;     /* MLFAB_TRANSPORT_ABI */
  const char *name; /* "tcp"; also what its addresses begin with, before ':' */
  uint32_t caps;    /* MLFAB_CAP_* */
  uint32_t reserved;
  /* Begins to listen; writes the address that others connect to into address (256 bytes). */
  int (*open)(const mlfab_transport_options *options, void **self_p, char *address);
  /* Closes every link at once; frees everything. In a child (fork) of the process that called open: frees
   * what is the child's, and nothing that it does may reach the parent's links or their peers. */
  void (*close)(void *self);
  /* 1 when this address is of this transport's kind and can be reached from here, else 0. */
  int (*reach)(void *self, const char *address);
  /* Begins to connect, and waits for nothing, name servers included. Sooner or later UP or DOWN (link
   * 0) with this token: a name that does not resolve is DOWN with ADDRESS, and may be tried again. A
   * second connect with a token that is pending replaces the first, which is then never reported.
   * Errors: ADDRESS, INSECURE, MEMORY, IO: nothing will be reported. */
  int (*connect)(void *self, const char *address, uint64_t token);
  /* Sends what was accepted as far as it goes at once, then closes; no event of this link follows,
   * and nothing of the caller's is borrowed any more on return. */
  void (*disconnect)(void *self, uint32_t link);
  /* Takes a whole frame or nothing. head is copied before it returns. bulk is borrowed until SENT
   * with the token (which may be reported only by a later poll), or DOWN; with token 0 it is copied.
   * Errors: AGAIN (no room: WRITABLE follows when there is), PEER_CLOSED (DOWN follows). */
  int (*send)(void *self, uint32_t link, const void *head, uint32_t head_bytes, const void *bulk,
              uint32_t bulk_bytes, uint64_t token);
  /* Pushes out what send has gathered; called before the driver sleeps or looks elsewhere. */
  void (*flush)(void *self);
  /* The next event: 1, or 0 when there is none. */
  int (*poll)(void *self, mlfab_io_event *event_p);
  /* Ends the borrowing of a FRAME event's memory; in the order of the events. */
  void (*release)(void *self, const mlfab_io_event *event);
  /* Stops borrowing the bulks of all sends with this token: what is still needed of them is copied.
   * Afterwards SENT for it may or may not come. Errors: MEMORY (still borrowed). */
  int (*detach)(void *self, uint32_t link, uint64_t token);
  /* Sleeps until poll may have something, wake is called, or timeout_ns. */
  void (*wait)(void *self, uint64_t timeout_ns);
  /* Ends a wait that is under way, or the next one. Any thread. */
  void (*wake)(void *self);
  /* A descriptor that is readable when poll may have something, or -1. `arm` is called with 1 before
   * somebody sleeps on it, and with 0 after; it returns 1 when there is something already. */
  int (*fd)(void *self);
  int (*arm)(void *self, int on);
  /* What passed since the last call; may be NULL. 1, or 0 when there is nothing to say. */
  int (*measure)(void *self, uint64_t now_ns, mlfab_measure *measure_p);
  /* With MLFAB_CAP_PROBE; else NULL. Is the far side of a link up, though its process says nothing?
   * Asked of links that are silent, a few times a heartbeat. 0: nothing speaks against it: its system
   * acknowledges what was sent, its process exists. Errors: AGAIN (what was sent is not acknowledged,
   * or the process is gone), UNSUPPORTED (this system does not tell). */
  int (*probe)(void *self, uint32_t link);
} mlfab_transport;

/* Looks at the first 64 bytes of a frame: magic, protocol, limits, checksum of the header.
 * *head_bytes_p (header and meta) and *bulk_bytes_p are set on success.
 * Errors: FRAME, CRC, PROTOCOL_OLDER, PROTOCOL_NEWER, LIMIT. */
MLFAB_API int mlfab_frame_check(const void *header, uint32_t *head_bytes_p, uint32_t *bulk_bytes_p);

/* Compares the frame's payload checksum with its bulk (and meta): 0, or CRC. Frames whose sender
 * computed none pass. */
MLFAB_API int mlfab_frame_verify(const void *head, uint32_t head_bytes, const void *bulk,
                                 uint32_t bulk_bytes);

/* ------------------------------------------------------------------------------------------------
 * 13. Built-in transports
 *
 * Left out of mlfab.c when MLFAB_WITH_TCP or MLFAB_WITH_SHM is defined as 0; the function then returns
 * NULL. The simulator is a transport in files of its own: mlfab_sim.h.
 */
MLFAB_API const mlfab_transport *mlfab_transport_tcp(void);
MLFAB_API const mlfab_transport *mlfab_transport_shm(void);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_H */
