/* drive.h - a context, for the files of module drive. Layer 6.
 *
 * drive.c has the lock, the thread, the transports and most calls; collective.c collectives and the
 * memory that workers of one host share. How they wait for each other: drive.c.
 *
 * Closing while other threads are in calls. A context is
 *
 *    OPEN --mlfab_close, mlfab_abandon--> CLOSED --nobody else is inside--> LEAVING --all has gone out--> freed
 *
 * Invariants. (1) `inside` counts the threads between enter and leave, those that wait for the lock too; a
 * call that gives up the lock for a while (save) stays inside. (2) From CLOSED on no call begins (the node says
 * MLFAB_ERR_CLOSED), and waiting ends (mlfab__drive_until, the pause of the arena): a request that was waited
 * for is withdrawn like by mlfab_cancel, so that nothing of its caller's is touched any more, and its call
 * returns MLFAB_ERR_CLOSED. (3) The closing thread says goodbye when it is alone inside, and frees when it
 * is alone once more: who came meanwhile has been told CLOSED. The progress thread is not counted; it is
 * ended before. In a simulation, where all are one thread, nobody is waited for. */
#ifndef MLFAB__DRIVE_H
#define MLFAB__DRIVE_H

#include "node.h"
#include "arena.h"

#include <pthread.h>
#include <stdatomic.h>

enum { MLFAB__DRIVE_TRANSPORTS = 2 };

typedef struct mlfab__drive_transport {
  const mlfab_transport *table;
  void *self;
  uint32_t links; /* that are up */
} mlfab__drive_transport;

typedef struct mlfab__snapshot mlfab__snapshot;         /* drive.c */
typedef struct mlfab__drive_memory mlfab__drive_memory; /* collective.c: of mlfab_alloc */
typedef struct mlfab__drive_turn mlfab__drive_turn;     /* collective.c: a call for the arena */

struct mlfab {
  mlfab_node *node;
  uint32_t forks; /* of the process that opened it: others are its children */
  mlfab__env env;
  mlfab_env hooks; /* complete: what transports are given */
  mlfab__drive_transport transports[MLFAB__DRIVE_TRANSPORTS];
  uint32_t ntransports;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  pthread_t thread;
  int has_thread, stop;
  _Atomic uint32_t inside; /* threads in calls */
  int closed;
  int parked;            /* the thread stays aside: callers move things */
  int dozing;            /* it does so for long, and wants to be told when there is work: DRIVE_* */
  int brisk;             /* calls come one upon the other */
  uint64_t left_ns;      /* about when the last one ended */
  uint64_t calls;        /* that have ended */
  uint32_t calls_asleep; /* during the thread's present sleep */
  int sleeping, thread_sleeps; /* somebody is in a transport's wait; it is the thread */
  uint32_t waiters;
  int simulated;        /* time stands still while we run */
  uint64_t looks;       /* pumps, */
  uint64_t moves;       /* and those that moved something */
  uint32_t idle_looks;  /* pumps in a row that found nothing */
  uint32_t quiet_looks; /* at a transport without links, that were left out */
  uint64_t now_ns;      /* the clock, when it was last read */
  uint64_t spin_ns, timeout_ns, heartbeat_ns;
  uint64_t measure_ns; /* when transports are to be measured again; MLFAB__NEVER: not at all */
  int fd;              /* given out by mlfab_fd, or -1 */
  int tell;            /* an eventfd in it */
  uint64_t moves_told; /* moves, when mlfab_progress last returned */
  mlfab__snapshot *snapshots;
  /* Collectives in shared memory. */
  mlfab__arena *arena;
  int arena_tried;          /* it was made, or cannot be */
  int arena_runs;           /* somebody is in a call of it, without the lock */
  mlfab__drive_turn *turns; /* calls for it, in the order of their numbers */
  mlfab__drive_memory *memories;
};

/* Every public call that touches the node is between these two. */
MLFAB__INTERNAL uint64_t mlfab__drive_enter(mlfab *ctx); /* what the clock says */
MLFAB__INTERNAL void mlfab__drive_leave(mlfab *ctx);
MLFAB__INTERNAL uint64_t mlfab__drive_now(const mlfab *ctx);

/* The others: with the lock. */

/* Moves what can be moved now; 1 when something was. */
MLFAB__INTERNAL int mlfab__drive_pump(mlfab *ctx);
/* Ends a sleep in the transports. */
MLFAB__INTERNAL void mlfab__drive_wake(mlfab *ctx);
/* What a waiter waits for: not 0 when it is there. */
typedef int (*mlfab__drive_test)(mlfab *ctx, void *what);
/* Drives until the test holds, the deadline has passed, or the context is closed. Returns the test's
 * last answer. Gives up the lock now and then. */
MLFAB__INTERNAL int mlfab__drive_until(mlfab *ctx, uint64_t deadline, mlfab__drive_test test,
                                       void *what);
/* What a call returns that waited in vain: CLOSED where that is why, else this code. */
MLFAB__INTERNAL int mlfab__drive_in_vain(mlfab *ctx, int code);
/* Waits for a request and ends it, as mlfab_wait. */
MLFAB__INTERNAL int mlfab__drive_await(mlfab *ctx, mlfab_request id, uint64_t timeout_ns,
                                       mlfab_result *result_p);
/* Sends what a call has set off. */
MLFAB__INTERNAL void mlfab__drive_send(mlfab *ctx, uint64_t now);

/* --- collective.c --- */

/* Makes the memory for others of this host, where that is possible, and has the next ROLL speak of it.
 * To be called before whatever may send the first ROLL. 1 when there is some. */
MLFAB__INTERNAL int mlfab__drive_arena(mlfab *ctx);
/* The communicator asks to map the memory of others: does it, unless somebody is in a call of it. 1 when the
 * node has something to send. */
MLFAB__INTERNAL int mlfab__drive_map(mlfab *ctx);
/* Frees memory of all kinds. */
MLFAB__INTERNAL void mlfab__drive_free_memory(mlfab *ctx);

/* --- how calls look --- */

/* Before anything is touched: ARGUMENT without a context; STATE in a child of the process that opened
 * it, where the lock may be held for ever and the connections are the parent's. Else 0. */
MLFAB__INTERNAL int mlfab__drive_check(const mlfab *ctx);

#define DRIVE_CHECK(ctx)                         \
  do {                                           \
    int wrong_with_it = mlfab__drive_check(ctx); \
    if (wrong_with_it) return wrong_with_it;     \
  } while (0)

/* A call that starts a request, under the lock. */
#define DRIVE_START(call)                 \
  uint64_t now = mlfab__drive_enter(ctx); \
  int code = (call);                      \
  mlfab__drive_send(ctx, now);            \
  mlfab__drive_leave(ctx);                \
  return code

/* The same, and waits for it. */
#define DRIVE_BLOCK(call, result_p)                       \
  mlfab_request request = 0;                              \
  uint64_t now = mlfab__drive_enter(ctx);                 \
  int code = (call);                                      \
  if (code)                                               \
    mlfab__drive_send(ctx, now);                          \
  else                                                    \
    code = mlfab__drive_await(ctx, request, 0, result_p); \
  mlfab__drive_leave(ctx);                                \
  return code

#endif
