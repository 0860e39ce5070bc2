/* context.h - a context, for the files of this group.
 *
 * context.c has the lock, the thread, the transports, opening and closing, and what waits; submit.c the calls
 * that a node carries out, calls_*.c those of optional groups; shared.c collectives in memory that workers of
 * one host share. How threads wait for each other: context.c.
 *
 * Closing while other threads are in calls. A context is
 *
 *    OPEN --mlfab_close, mlfab_abandon--> CLOSED --nobody else is inside--> LEAVING --all has gone out--> freed
 *
 * Invariants. (1) `inside` counts the threads between enter and leave, `at_door` those that wait for the
 * lock in enter; a call that gives up the lock for a while (save) stays inside. (2) From CLOSED on no call begins (the node says
 * MLFAB_ERR_CLOSED), and waiting ends (mlfab__context_until, the pause of the arena): a request that was waited
 * for is withdrawn like by mlfab_cancel, so that nothing of its caller's is touched any more, and its call
 * returns MLFAB_ERR_CLOSED. (3) The closing thread says goodbye when it is alone inside, and frees when it
 * is alone once more: who came meanwhile has been told CLOSED. The progress thread is not counted; it is
 * ended before. In a simulation, where all are one thread, nobody is waited for. */
#ifndef MLFAB__CONTEXT_H
#define MLFAB__CONTEXT_H

#include "../base/env.h"
#include "calls.h"

#include <pthread.h>
#include <stdatomic.h>

/* The number of a link is the transport's, 24 bits, and above it the transport's place in the array. */
enum { MLFAB__CONTEXT_TRANSPORTS = 8 };

/* A transport that a context is to open. */
typedef struct mlfab__context_choice {
  const mlfab_transport *table;
  const char *listen;                           /* "": where the transport likes */
  int publish;                                  /* others are told where it listens */
  const struct mlfab__shm_coll_table *shm_coll; /* collectives for those that it reaches, or NULL */
} mlfab__context_choice;

typedef struct mlfab__context_transport {
  const mlfab_transport *table;
  void *self;
  uint32_t links; /* that are up */
} mlfab__context_transport;

typedef struct mlfab__context_turn mlfab__context_turn; /* shared.c: a call for the arena */

/* What can be done in memory that workers of one host share: shared.c, where collectives are compiled in. */
typedef struct mlfab__context_sharing {
  /* Makes it, and has the next MEMBERSHIP speak of it: 1 when there is some. Gives it back. */
  int (*make)(mlfab *ctx);
  void (*destroy)(mlfab *ctx);
  /* The communicator asks to map the memory of others: does it, unless somebody is in a call of it. 1 when the
   * node has something to send. */
  int (*map)(mlfab *ctx);
  /* As of mlfab__shm_coll_table. */
  void *(*alloc)(mlfab *ctx, uint64_t bytes);
  int (*release)(mlfab *ctx, void *memory);
} mlfab__context_sharing;

/* A request whose end somebody is to be told. */
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

/* What the progress thread does: a table in context.c. */
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
  uint32_t forks;  /* of the process that opened it: others are its children */
  uint64_t number; /* of this process, from 1 */
  mlfab__env env;
  mlfab_env hooks; /* complete: what transports are given */
  mlfab__context_transport transports[MLFAB__CONTEXT_TRANSPORTS];
  uint32_t ntransports;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t thread;
  enum mlfab__context_thread thread_is;
  int parked; /* callers move things: the thread is aside, or goes there when it looks next */
  int stop;
  uint32_t inside;          /* threads between enter and leave */
  _Atomic uint32_t at_door; /* threads in enter that wait for the lock */
  int closed;
  int brisk;             /* calls come one upon the other */
  uint64_t left_ns;      /* about when the last one ended */
  uint64_t calls;        /* that have ended */
  uint32_t calls_asleep; /* during the thread's present sleep */
  int sleeping;          /* somebody, the thread or a waiter, is in a transport's wait */
  uint32_t waiters;
  int simulated;        /* MLFAB_CAP_VIRTUAL: time stands still while we run */
  uint64_t looks;       /* pumps, */
  uint64_t moves;       /* and those that moved something */
  uint32_t idle_looks;  /* pumps in a row that found nothing */
  uint32_t quiet_looks; /* pumps since transports without links were all looked at */
  uint64_t now_ns;      /* the clock, when it was last read */
  uint64_t spin_ns, timeout_ns, heartbeat_ns;
  uint64_t measure_ns; /* when transports are to be measured again; MLFAB__NEVER: not at all */
  int fd;              /* given out by mlfab_fd, or -1 */
  int tell;            /* an eventfd in it */
  uint64_t moves_told; /* moves, when mlfab_progress last returned */
  mlfab__context_watch *watches;
  int tells; /* some thread is calling what watches */
  /* Collectives in shared memory. */
  const mlfab__context_sharing *sharing;        /* NULL: they are not compiled in */
  const struct mlfab__shm_coll_table *shm_coll; /* NULL: none */
  struct mlfab__shm_coll *arena;
  int arena_tried;            /* it was made, or cannot be */
  int arena_runs;             /* somebody is in a call of it, without the lock */
  mlfab__context_turn *turns; /* calls for it, in the order of their numbers */
  mlfab__context_memory *memories;
};

/* As mlfab_node_open. */
typedef int mlfab__node_opener(const mlfab_config *config, const char *addresses, uint64_t now_ns,
                               mlfab_node **node_p, mlfab_error *error);
/* A context over these transports, best first, of a configuration that is complete, and a node that `open`
 * makes; it is joining then. `sharing`: or NULL. With an error nothing is left. */
MLFAB__INTERNAL int mlfab__context_open(mlfab_config *config, const mlfab__context_choice *choices,
                                        uint32_t n, mlfab__node_opener *open,
                                        const mlfab__context_sharing *sharing, mlfab **ctx_p,
                                        mlfab_error *error);

/* Every public call that touches the node is between these two. */
MLFAB__INTERNAL uint64_t mlfab__context_enter(mlfab *ctx); /* what the clock says */
MLFAB__INTERNAL void mlfab__context_leave(mlfab *ctx);
MLFAB__INTERNAL uint64_t mlfab__context_now(const mlfab *ctx);

/* The others: with the lock. */

/* Moves what can be moved now; 1 when something was. */
MLFAB__INTERNAL int mlfab__context_pump(mlfab *ctx);
/* 1 in a function that watches a request, which must not wait: sets the error. */
MLFAB__INTERNAL int mlfab__context_is_told(mlfab *ctx);
MLFAB__INTERNAL int mlfab__context_refuses(mlfab *ctx); /* the same without the lock */
/* Ends a sleep in the transports. */
MLFAB__INTERNAL void mlfab__context_wake(mlfab *ctx);
/* What a waiter waits for: not 0 when it is there. */
typedef int (*mlfab__context_test)(mlfab *ctx, void *what);
/* Drives until the test holds, the deadline has passed, or the context is closed. Returns the test's
 * last answer. Gives up the lock now and then. */
MLFAB__INTERNAL int mlfab__context_until(mlfab *ctx, uint64_t deadline, mlfab__context_test test,
                                         void *what);
/* What a call returns that waited in vain: CLOSED where that is why, else this code. */
MLFAB__INTERNAL int mlfab__context_in_vain(mlfab *ctx, int code);
/* Waits for a request and ends it, as mlfab_wait. */
MLFAB__INTERNAL int mlfab__context_await(mlfab *ctx, mlfab_request id, uint64_t timeout_ns,
                                         mlfab_result *result_p);
/* Sends what a call has set off. Returns the call's code. */
MLFAB__INTERNAL int mlfab__context_sent(mlfab *ctx, int code);

/* Makes the memory for others of this host, where that is possible. To be called before whatever may send the first MEMBERSHIP. 1 when there is some. */
MLFAB__INTERNAL int mlfab__context_arena(mlfab *ctx);
/* A call of something that was not compiled in, which `what` names, with its switch: UNSUPPORTED, and the error
 * where the caller finds it. */
MLFAB__INTERNAL int mlfab__error_without(mlfab_error *error, const char *what);
MLFAB__INTERNAL int mlfab__node_without(mlfab_node *node, const char *what);
MLFAB__INTERNAL int mlfab__context_without(mlfab *ctx, const char *what);
/* Memory of mlfab_alloc that no list has any more. What is shared goes back to the arena, or with it. */
MLFAB__INTERNAL void mlfab__context_free_memory(mlfab *ctx, mlfab__context_memory *memory);

/* Before anything is touched: ARGUMENT without a context; STATE in a child of the process that opened
 * it, where the lock may be held for ever and the connections are the parent's. Else 0. */
MLFAB__INTERNAL int mlfab__context_check(const mlfab *ctx);

#define CONTEXT_CHECK(ctx)                         \
  do {                                             \
    int wrong_with_it = mlfab__context_check(ctx); \
    if (wrong_with_it) return wrong_with_it;       \
  } while (0)

/* Where a call waits: not in a function that is told of the end of a request, whose thread may be the one that
 * is waited for. */
#define CONTEXT_MAY_WAIT(ctx)                                \
  do {                                                       \
    if (mlfab__context_refuses(ctx)) return MLFAB_ERR_STATE; \
  } while (0)

/* A call that needs the lock, and waits for nothing; CONTEXT_LOOK: that sets off nothing either. */
#define CONTEXT_LOOK(ctx, call) \
  CONTEXT_CHECK(ctx);           \
  mlfab__context_enter(ctx);    \
  int code = (call);            \
  mlfab__context_leave(ctx);    \
  return code
#define CONTEXT_CALL(ctx, call) CONTEXT_LOOK(ctx, mlfab__context_sent(ctx, call))

/* --- submit.c --- */

/* Submits a call. waits: waits for its request and ends it, with the lock; else *request_p is its handle. */
MLFAB__INTERNAL int mlfab__submit(mlfab *ctx, const mlfab_call *call, int waits,
                                  mlfab_request *request_p, mlfab_result *result_p);
/* The same without the lock: the body of a public function. */
MLFAB__INTERNAL int mlfab__submit_call(mlfab *ctx, const mlfab_call *call, int waits,
                                       mlfab_request *request_p, mlfab_result *result_p);

#define CONTEXT_DESCRIBE(call_kind, ...) \
  const mlfab_call call = {.size = sizeof call, .kind = MLFAB_CALL_##call_kind, __VA_ARGS__}
/* A call that waits; SUBMIT_START: one that begins something; SUBMIT_AT_ONCE: one without a request. */
#define SUBMIT(call_kind, result_p, ...)    \
  CONTEXT_DESCRIBE(call_kind, __VA_ARGS__); \
  return mlfab__submit_call(ctx, &call, 1, NULL, result_p)
#define SUBMIT_START(call_kind, request_p, ...) \
  CONTEXT_DESCRIBE(call_kind, __VA_ARGS__);     \
  return mlfab__submit_call(ctx, &call, 0, request_p, NULL)
#define SUBMIT_AT_ONCE(call_kind, ...) SUBMIT_START(call_kind, NULL, __VA_ARGS__)

#endif
