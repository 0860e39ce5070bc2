/* user_dag.h - task graphs of the user's own (mlfab_dag) over the communicator. See user_dag.c. */
#ifndef MLFAB__USER_DAG_H
#define MLFAB__USER_DAG_H

#include "comm.h"
#include "../../mlfab_partial.h"

enum { MLFAB__USER_DAG_WAITERS = 8 }; /* open requests of one task graph */

enum { MLFAB__USER_DAG_BUILT, MLFAB__USER_DAG_OPENING, MLFAB__USER_DAG_OPEN };

typedef struct mlfab__user_dag_user {
  void *self;
  /* Calls the user's function, which may call mlfab__user_dag_trigger (inside), and nothing else. */
  int (*compute)(void *self, mlfab_dag_compute_fn fn, void *user, uint64_t round);
  /* The communicator ends: the owner frees the graph now. */
  void (*gone)(void *self);
} mlfab__user_dag_user;

typedef struct mlfab__user_dag_op { /* data beside the dag's operation */
  mlfab_dag_compute_fn fn;
  void *user;
  uintptr_t data;
  uint32_t rank;
  uint8_t pending; /* triggered in the present round, which is not armed yet */
} mlfab__user_dag_op;

typedef struct mlfab__user_dag_waiter {
  mlfab_request request;
  uint64_t round;
} mlfab__user_dag_waiter;

/* Its owner provides the memory, which must not move. */
typedef struct mlfab__user_dag {
  mlfab__comm *comm;
  mlfab__user_dag_user user;
  uint8_t state; /* MLFAB__USER_DAG_* */
  uint8_t persistent;
  uint8_t started;           /* the present round may be armed; always when persistent */
  uint8_t arming;            /* user_dag_run is running */
  mlfab__comm_object object; /* added when it becomes OPENING */
  uint32_t epoch;            /* epoch to whose members the operations refer; 0: none */
  int32_t stranger;          /* a rank that is no member of it */
  uint64_t round;            /* the present round; earlier rounds are over */
  uint64_t lost, lost_end;   /* the last consecutive rounds that failures ended */
  uint64_t number;           /* number of rounds armed in this epoch */
  mlfab__user_dag_op *ops;   /* beside those of run.dag */
  uint32_t room, npending;
  mlfab__user_dag_waiter waiters[MLFAB__USER_DAG_WAITERS];
  uint32_t nwaiters;
  mlfab_vec whole; /* from the lowest address of a message to the highest */
  mlfab__engine_run run;
} mlfab__user_dag;

typedef struct mlfab__user_dag_message {
  int32_t rank;
  uint32_t tag;
  void *data;
  uint64_t bytes; /* RECV_REDUCE: elements of dtype, to be combined by op (MLFAB_OP_SUM ...) */
  int dtype, op;
} mlfab__user_dag_message;

MLFAB__INTERNAL void mlfab__user_dag_init(mlfab__user_dag *graph, mlfab__comm *comm,
                                          const mlfab__user_dag_user *user);
/* Closes it, too. A round that was started and is not over fails on all workers (CANCELLED). A round of a persistent
 * graph is forgotten here, except if a message borrows its memory (mlfab__user_dag_lends). */
MLFAB__INTERNAL void mlfab__user_dag_free(mlfab__user_dag *graph);

/* Building: like the calls of mlfab.h. kind: MLFAB__DAG_SEND, RECV, RECV_REDUCE. */
MLFAB__INTERNAL int mlfab__user_dag_message_op(mlfab__user_dag *graph, uint8_t kind,
                                               const mlfab__user_dag_message *message,
                                               uint32_t *op_p, mlfab_error *error);
MLFAB__INTERNAL int mlfab__user_dag_compute(mlfab__user_dag *graph, mlfab_dag_compute_fn fn,
                                            void *user, uint32_t *op_p, mlfab_error *error);
MLFAB__INTERNAL int mlfab__user_dag_nop(mlfab__user_dag *graph, uint32_t *op_p, mlfab_error *error);
MLFAB__INTERNAL int mlfab__user_dag_after(mlfab__user_dag *graph, uint32_t op, uint32_t dependency,
                                          mlfab_error *error);
MLFAB__INTERNAL int mlfab__user_dag_set(mlfab__user_dag *graph, uint32_t op, uint32_t need,
                                        uint32_t flags, mlfab_error *error);

/* Checks it and begins to open it. After 0 the caller reports to mlfab__user_dag_opened how the request has ended;
 * after an error it is unchanged. */
MLFAB__INTERNAL int mlfab__user_dag_open(mlfab__user_dag *graph, int persistent,
                                         uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error);
MLFAB__INTERNAL void mlfab__user_dag_opened(mlfab__user_dag *graph, int code, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__user_dag_start(mlfab__user_dag *graph, uint64_t timeout_ns,
                                          uint64_t now_ns, mlfab_request *request_p,
                                          mlfab_error *error);
/* *request_p is 0 if the round is over. */
MLFAB__INTERNAL int mlfab__user_dag_wait(mlfab__user_dag *graph, uint64_t round,
                                         uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error);
/* inside: the caller is a function that an operation computes. */
MLFAB__INTERNAL int mlfab__user_dag_trigger(mlfab__user_dag *graph, uint32_t op, int inside,
                                            uint64_t now_ns, mlfab_error *error);
/* Returns 1 if messages borrow memory of an armed round. */
MLFAB__INTERNAL int mlfab__user_dag_lends(const mlfab__user_dag *graph);

#endif
