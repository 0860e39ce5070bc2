/* context.h - a context, for the files of this group.
 *
 * context.c has the lock, the thread, the transports, opening, closing and waiting. It describes how threads wait for
 * each other. disk.c carries out file operations. submit.c has the calls of a node; calls_*.c the calls of optional
 * groups. telemetry.c writes log, metrics and trace. shared.c has collectives in memory that workers of one host share.
 *
 * Closing while other threads are in calls. The states of a context:
 *
 *    OPEN --mlfab_close, mlfab_abandon--> CLOSED --no other thread is inside--> LEAVING --all is sent--> freed
 *
 * Invariants. (1) `inside` counts the threads between enter and leave; `at_door` the threads that wait for the lock in
 * enter. A call that gives up the lock for a while (save) stays inside. (2) From CLOSED on new calls fail (the node
 * returns MLFAB_ERR_CLOSED), and waits end (mlfab__context_until, the pause of the arena). A waiting call cancels its
 * request, as mlfab_cancel does, and so ends all access to its caller's memory. It returns MLFAB_ERR_CLOSED.
 * (3) The closing thread says goodbye when it is alone inside, and frees when it is alone once more: threads that came
 * meanwhile got CLOSED. The progress thread is not counted; the closing thread ends it first. In a simulation all
 * contexts are in one thread, and the closing call waits for nobody. */
#ifndef MLFAB__CONTEXT_H
#define MLFAB__CONTEXT_H

#include "../base/env.h"
#include "calls.h"

#include <pthread.h>
#include <stdatomic.h>

/* A link's number: the transport's own number in 24 bits, and above it the transport's place in the array. */
enum { MLFAB__CONTEXT_TRANSPORTS = 8 };

/* A transport for a context to open. */
typedef struct mlfab__context_choice {
  const mlfab_transport *table;
  const char *listen;  /* "": the transport chooses */
  int publish;         /* 1: peers get its address */
  int spare;           /* 1: if it cannot be opened, the others suffice */
  uint32_t neighbours; /* as in mlfab_transport_options */
  /* For a transport that reaches nodes of this host: memory that they may map, and collectives in it. Or NULL. */
  const struct mlfab__context_areas *areas;
  const struct mlfab__shm_coll_table *shm_coll;
} mlfab__context_choice;

typedef struct mlfab__context_transport {
  const mlfab_transport *table;
  void *self;
  uint32_t links; /* that are up */
} mlfab__context_transport;

/* Memory that other processes of the host may map: core/open/areas.c, if views or collectives are compiled in. */
typedef struct mlfab__context_areas {
  /* open: ctx->memory. Errors: MEMORY. close: frees it, and all that is in it. */
  int (*open)(mlfab *ctx);
  void (*close)(mlfab *ctx);
  /* Gives the roles of the new node the memory, before the first pump. */
  void (*share)(mlfab *ctx);
  /* Zeroed bytes; NULL: use ordinary memory. */
  void *(*alloc)(mlfab *ctx, uint64_t bytes);
  void (*release)(mlfab *ctx, void *at);
} mlfab__context_areas;

typedef struct mlfab__context_turn
    mlfab__context_turn; /* shared.c: a call that may use the arena */

/* Functions on memory that workers of one host share (the arena): in shared.c, if collectives are compiled in. */
typedef struct mlfab__context_sharing {
  /* make: makes the arena, which the next MEMBERSHIP then announces. Returns 1 if made. destroy: frees it. */
  int (*make)(mlfab *ctx);
  void (*destroy)(mlfab *ctx);
  /* Maps the memory of the other workers if the communicator has asked for it and no thread is in a call of the arena.
   * Returns 1 if the node has frames to send. */
  int (*map)(mlfab *ctx);
} mlfab__context_sharing;

/* File operations in a thread of their own: disk.c. */
typedef struct mlfab__context_files {
  /* Begins the operation of an action, as mlfab__disk_begin; the first call makes ctx->disk. */
  int (*begin)(mlfab *ctx, const mlfab_action *action);
  /* If there is a disk: hands ended operations to the node. Returns 1 if there were any. */
  int (*events)(mlfab *ctx, uint64_t now);
  /* Returns 1: operations run and none has ended; 2: one has ended; 0: there are none. */
  int (*waits)(const mlfab *ctx);
  void (*close)(mlfab *ctx, int child);
} mlfab__context_files;

typedef struct mlfab__telemetry mlfab__telemetry; /* telemetry.c */

/* Functions that write a context's log, metrics and trace: telemetry.c. They have no effect if the configuration asks
 * for none of these. */
typedef struct mlfab__context_observer {
  /* Called before transports and node. Takes its settings out of *config. Errors: CONFIG, MEMORY. */
  int (*open)(mlfab *ctx, mlfab_config *config, mlfab_error *error);
  /* Called for the new node, before the first pump. Errors: UNSUPPORTED, MEMORY. */
  int (*attach)(mlfab *ctx, mlfab_error *error);
  /* Called when the context is open. Errors: IO. */
  int (*start)(mlfab *ctx, mlfab_error *error);
  /* stop: called without the lock, while the node is still there. free: all else is gone. child: in a forked child. */
  void (*stop)(mlfab *ctx, int child);
  void (*free)(mlfab *ctx, int child);
} mlfab__context_observer;

/* Calls with buffers in device memory: staging.c, from mlfab_device_attach on. All need the lock. */
typedef struct mlfab__context_stager {
  /* Takes over a call that has such buffers, or that must wait until others have begun: *taken_p is 1, and the result
   * is as of mlfab__node_submit. A call without a request may have to wait. */
  int (*begin)(mlfab *ctx, const mlfab_call *call, int waits, mlfab_request *request_p,
               int *taken_p);
  /* Waits until all calls have begun. Errors: STATE (in a function of mlfab_on_done), TIMEOUT, CLOSED. */
  int (*settle)(mlfab *ctx);
  /* 1: something moved. */
  int (*move)(mlfab *ctx);
  /* Are copies under way? Their end is not reported: look again. */
  int (*copies)(const mlfab *ctx);
  /* Returns 1 if the request is its own, and is withdrawn. */
  int (*cancel)(mlfab *ctx, mlfab_request request);
  /* Gives a request of its own the blame of the call that it has begun. */
  void (*blame)(mlfab *ctx, mlfab_request request);
  /* Returns the number of updates that have not ended. */
  uint32_t (*updates)(const mlfab *ctx);
  /* Refuses device memory for a function without staging: ARGUMENT, DEVICE; else 0. `what` names the memory. */
  int (*refuse)(mlfab *ctx, const void *memory, uint64_t bytes, const char *what,
                mlfab_error *error);
  /* The device that is attached, or NULL. */
  const mlfab_device *(*device)(const mlfab *ctx, void **self_p);
  /* Called when nodes and transports are closed. */
  void (*free)(mlfab *ctx, int child);
} mlfab__context_stager;

/* A function to be called when a request has finished. */
typedef struct mlfab__context_watch {
  struct mlfab__context_watch *next;
  mlfab_request request;
  mlfab_done_fn fn;
  void *user;
} mlfab__context_watch;

typedef struct mlfab__context_memory { /* of mlfab_alloc */
  struct mlfab__context_memory *next;
  void *at;
  uint64_t bytes;
  int shared;
} mlfab__context_memory;

/* States of the progress thread; context.c has the table. */
enum mlfab__context_thread {
  MLFAB__THREAD_NONE,
  MLFAB__THREAD_DRIVES,
  MLFAB__THREAD_LISTENS,
  MLFAB__THREAD_ASIDE,
  MLFAB__THREAD_DOZES,
  MLFAB__THREAD_NAPS
};

struct mlfab {
  mlfab_node *node;
  int from_env;    /* opened by mlfab_open_env */
  uint32_t forks;  /* forks of the process that opened it: another number means a child of it */
  uint64_t number; /* of this process, from 1 */
  mlfab__env env;
  mlfab_env hooks; /* complete; for transports */
  mlfab__context_transport transports[MLFAB__CONTEXT_TRANSPORTS];
  uint32_t ntransports;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  const mlfab__context_files *files; /* NULL: left out, with all roles that have files */
  struct mlfab__disk *disk;          /* from the first operation on */
  pthread_t thread;
  enum mlfab__context_thread thread_is;
  int parked; /* callers drive: the thread stays aside, or goes aside at its next look */
  int stop;
  uint32_t inside;          /* threads between enter and leave */
  _Atomic uint32_t at_door; /* threads in enter that wait for the lock */
  int closed;
  int brisk;                /* calls follow each other closely */
  uint32_t log_level;       /* the largest level that a log takes; 0: no log */
  uint64_t opened_ns;       /* on the clock */
  uint64_t left_ns;         /* about when the last call ended */
  uint64_t calls;           /* calls that have ended */
  uint32_t calls_asleep;    /* calls during the thread's present sleep */
  int sleeping;             /* the thread or a waiter is in a transport's wait ... */
  uint64_t sleeps_until_ns; /* ... at most until then */
  uint32_t waiters;
  int simulated;        /* MLFAB_CAP_VIRTUAL: time stands still while this context runs */
  uint64_t looks;       /* pumps */
  uint64_t moves;       /* pumps that moved something */
  uint32_t idle_looks;  /* pumps in a row that moved nothing */
  uint32_t quiet_looks; /* pumps since all transports without links were polled */
  uint64_t now_ns;      /* the time when the clock was last read */
  uint64_t spin_ns, timeout_ns, heartbeat_ns;
  uint64_t measure_ns; /* time of the next measurement of transports; MLFAB__NEVER: never */
  int fd;              /* of mlfab_fd, or -1 */
  int tell;            /* an eventfd in it */
  void (*freed)(mlfab *ctx, int child); /* called when the context is freed; or NULL */
  int report;                           /* the pipe that `freed` writes to ... */
  char place[8];                        /* ... and the place that it writes there */
  uint64_t moves_told;                  /* moves when mlfab_progress last returned */
  struct mlfab__calling *callings;      /* calls to nodes with several addresses: calling.c */
  mlfab__context_watch *watches;
  int tells;                               /* a thread is calling a watching function */
  int lends;                               /* a transport may keep buffers: ask `keeps` */
  const mlfab__context_observer *observer; /* NULL: not compiled in */
  mlfab__telemetry *telemetry;             /* NULL: not asked for */
  const mlfab__context_stager *stager;     /* NULL: no device is attached */
  struct mlfab__staging *staging;
  const struct mlfab__context_direct *direct;         /* NULL: mlfab_device_share was not called */
  void (*direct_close)(struct mlfab *ctx, int child); /* with `direct` */
  struct mlfab__direct *shares;
  /* Memory that other processes of the host may map, and collectives in it. */
  const mlfab__context_areas *areas;            /* NULL: no transport has one */
  struct mlfab__shm_memory *memory;             /* or NULL */
  const mlfab__context_sharing *sharing;        /* NULL: not compiled in */
  const struct mlfab__shm_coll_table *shm_coll; /* NULL: no transport has one */
  struct mlfab__shm_coll *arena;
  int arena_tried;            /* the arena was made, or cannot be made */
  int arena_runs;             /* a thread is in a call of the arena, without the lock */
  mlfab__context_turn *turns; /* calls that may use it, in the order of their numbers */
  mlfab__context_memory *memories;
};

/* As mlfab_node_open. */
typedef int mlfab__node_opener(const mlfab_config *config, const char *addresses, uint64_t now_ns,
                               mlfab_node **node_p, mlfab_error *error);
/* Opens a context over these transports, best first. `c` is complete. `open` makes the node, which begins to join.
 * sharing, observer and files may be NULL. On failure it has freed everything. */
MLFAB__INTERNAL int mlfab__context_open(mlfab_config *config, const mlfab__context_choice *choices,
                                        uint32_t n, mlfab__node_opener *open,
                                        const mlfab__context_sharing *sharing,
                                        const mlfab__context_observer *observer,
                                        const mlfab__context_files *files, mlfab **ctx_p,
                                        mlfab_error *error);

/* Take and give up the lock. Every public call that touches the node is between these two. */
MLFAB__INTERNAL uint64_t mlfab__context_enter(mlfab *ctx);      /* returns the time */
MLFAB__INTERNAL int mlfab__context_leave(mlfab *ctx, int code); /* returns the code */
MLFAB__INTERNAL uint64_t mlfab__context_now(const mlfab *ctx);

/* The functions below need the lock. */

/* Calls the first of these addresses that a transport reaches, and on failure the others. As mlfab_transport.connect. */
MLFAB__INTERNAL int mlfab__calling_begin(mlfab *ctx, const char *list, uint64_t token);
/* Takes UP or DOWN of a transport. Returns 1 if the node must not see it, because another address is called. */
MLFAB__INTERNAL int mlfab__calling_event(mlfab *ctx, uint32_t transport, mlfab_io_event *event);
MLFAB__INTERNAL void mlfab__calling_free(mlfab *ctx);

/* Moves events and actions that can move now. Returns 1 if any moved. */
MLFAB__INTERNAL int mlfab__context_pump(mlfab *ctx);
/* Returns 1, and sets the error, inside a function of mlfab_on_done, which must not wait. */
MLFAB__INTERNAL int mlfab__context_is_told(mlfab *ctx);
/* With the lock: a call has waited in vain; adds to its error the obstacle to this process's connections. */
MLFAB__INTERNAL void mlfab__context_trouble(mlfab *ctx, mlfab_error *error);
/* Ends a sleep in the transports. */
MLFAB__INTERNAL void mlfab__context_wake(mlfab *ctx);
/* Makes the descriptor of mlfab_fd readable. */
MLFAB__INTERNAL void mlfab__context_tell(mlfab *ctx);
/* The condition that a waiter awaits: nonzero if it holds. */
typedef int (*mlfab__context_test)(mlfab *ctx, void *what);
/* Drives until the test holds, the deadline has passed, or the context is closed. Returns the test's last answer.
 * Gives up the lock at times. */
MLFAB__INTERNAL int mlfab__context_until(mlfab *ctx, uint64_t deadline, mlfab__context_test test,
                                         void *what);
/* The code of a call whose wait failed: CLOSED when the context was closed, else `code`. */
MLFAB__INTERNAL int mlfab__context_in_vain(mlfab *ctx, int code);
/* Waits for a request and ends it, as mlfab_wait. */
MLFAB__INTERNAL int mlfab__context_await(mlfab *ctx, mlfab_request id, uint64_t timeout_ns,
                                         mlfab_result *result_p);
/* Ends a request, as mlfab_cancel. */
MLFAB__INTERNAL int mlfab__context_cancel(mlfab *ctx, mlfab_request id);
/* Begins a call, as mlfab__node_submit. If a device is attached, its buffers may be in device memory. */
MLFAB__INTERNAL int mlfab__context_begin(mlfab *ctx, const mlfab_call *call, int waits,
                                         mlfab_request *request_p, mlfab__collective *shared);
/* Returns 1 if the request *id is done and its buffers are the caller's, or if there is no such request. It is a test. */
MLFAB__INTERNAL int mlfab__context_is_over(mlfab *ctx, void *id);
/* Carries out the actions that a call caused. Returns `code`. */
MLFAB__INTERNAL int mlfab__context_sent(mlfab *ctx, int code);

/* Makes the arena, if that is possible. Returns 1 if there is one. Call it before the first MEMBERSHIP may be sent. */
MLFAB__INTERNAL int mlfab__context_arena(mlfab *ctx);
/* For a function that was not compiled in: sets the error and returns UNSUPPORTED. `what` names the group and its
 * switch. */
MLFAB__INTERNAL int mlfab__error_without(mlfab_error *error, const char *what);
MLFAB__INTERNAL int mlfab__node_without(mlfab_node *node, const char *what);
MLFAB__INTERNAL int mlfab__context_without(mlfab *ctx, const char *what);
/* Frees memory of mlfab_alloc that is in no list any more. The arena frees shared memory. */
MLFAB__INTERNAL void mlfab__context_free_memory(mlfab *ctx, mlfab__context_memory *memory);

/* Checks the context before any member is touched. ARGUMENT: it is NULL. STATE: this process is a child of the process
 * that opened it; the lock may be held for ever here, and the connections belong to the parent. */
MLFAB__INTERNAL int mlfab__context_check(const mlfab *ctx);

/* For an argument that is NULL: sets the error "<what> is NULL" and returns ARGUMENT. Takes the lock. */
MLFAB__INTERNAL int mlfab__context_null(mlfab *ctx, const char *what);

#define CONTEXT_CHECK(ctx)                         \
  do {                                             \
    int wrong_with_it = mlfab__context_check(ctx); \
    if (wrong_with_it) return wrong_with_it;       \
  } while (0)

/* Checks, and takes the lock. ENTER_TO_WAIT: for a call that waits, which is refused inside a function of mlfab_on_done:
 * its thread may be just the thread that the call would wait for. */
#define CONTEXT_ENTER(ctx) \
  CONTEXT_CHECK(ctx);      \
  mlfab__context_enter(ctx)
#define CONTEXT_ENTER_TO_WAIT(ctx) \
  CONTEXT_ENTER(ctx);              \
  if (mlfab__context_is_told(ctx)) return mlfab__context_leave(ctx, MLFAB_ERR_STATE)

/* The body of a call that needs the lock and does not wait. CONTEXT_LOOK: for a call that causes no actions, too. */
#define CONTEXT_LOOK(ctx, call)                                     \
  CONTEXT_ENTER(ctx);                                               \
  int code = ctx->closed ? mlfab__context_in_vain(ctx, 0) : (call); \
  return mlfab__context_leave(ctx, code)
#define CONTEXT_CALL(ctx, call) CONTEXT_LOOK(ctx, mlfab__context_sent(ctx, call))

/* --- submit.c --- */

/* Submits a call, with the lock. waits 1: waits for its request and ends it; 0: *request_p is its handle. */
MLFAB__INTERNAL int mlfab__submit(mlfab *ctx, const mlfab_call *call, int waits,
                                  mlfab_request *request_p, mlfab_result *result_p);
/* The same without the lock: the body of a public function. */
MLFAB__INTERNAL int mlfab__submit_call(mlfab *ctx, const mlfab_call *call, int waits,
                                       mlfab_request *request_p, mlfab_result *result_p);

#define CONTEXT_DESCRIBE(call_kind, ...) \
  const mlfab_call call = {.size = sizeof call, .kind = MLFAB_CALL_##call_kind, __VA_ARGS__}
/* The body of a call that waits; SUBMIT_START: of a _start form; SUBMIT_AT_ONCE: of a call without a request. */
#define SUBMIT(call_kind, result_p, ...)    \
  CONTEXT_DESCRIBE(call_kind, __VA_ARGS__); \
  return mlfab__submit_call(ctx, &call, 1, NULL, result_p)
#define SUBMIT_START(call_kind, request_p, ...) \
  CONTEXT_DESCRIBE(call_kind, __VA_ARGS__);     \
  return mlfab__submit_call(ctx, &call, 0, request_p, NULL)
#define SUBMIT_AT_ONCE(call_kind, ...) SUBMIT_START(call_kind, NULL, __VA_ARGS__)

#endif
