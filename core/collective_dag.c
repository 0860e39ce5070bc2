/* collective_dag.c - a context: schedules of the user's own. Layer 6. What they are: script.c.
 *
 * A function that a schedule computes runs under the lock, in whatever thread drives the context.
 * It may trigger operations: `dag_inside` tells that the lock is this thread's already, and what it
 * triggers runs when the function has returned. */
#include "drive.h"

/* A schedule is freed by the node when the context is closed, if it is open then. */
struct mlfab_dag {
  mlfab__script script;
  mlfab *ctx;
};

/* The context whose lock this thread holds for the user's function. */
static _Thread_local const mlfab *dag_inside;

static int dag_compute(void *self, mlfab_compute_fn fn, void *user, uint64_t round) {
  const mlfab_dag *dag = self;
  const mlfab *outer = dag_inside;
  dag_inside = dag->ctx;
  int code = fn(user, round);
  dag_inside = outer;
  return code;
}

static void dag_gone(void *self) {
  mlfab_dag *dag = self;
  mlfab *ctx = dag->ctx;
  mlfab__script_free(&dag->script);
  mlfab__free(&ctx->env, dag, sizeof *dag);
}

/* Around every call that touches the schedule: with the lock. */
static int dag_enter(mlfab *ctx, uint64_t *now_p, mlfab_error *error) {
  *now_p = mlfab__drive_enter(ctx);
  return mlfab__node_enter(ctx->node, *now_p, 1, error);
}

static int dag_leave(mlfab *ctx, int code, const mlfab_error *error) {
  code = mlfab__node_return(ctx->node, code, error);
  mlfab__drive_leave(ctx);
  return code;
}

#define DAG_CALL(call)                          \
  mlfab_error error;                            \
  uint64_t now;                                 \
  if (!dag) return MLFAB_ERR_ARGUMENT;          \
  DRIVE_CHECK(dag->ctx);                        \
  int code = dag_enter(dag->ctx, &now, &error); \
  if (!code) code = call;                       \
  return dag_leave(dag->ctx, code, &error)

MLFAB_API int mlfab_dag_create(mlfab *ctx, mlfab_dag **dag_p) {
  mlfab_error error;
  uint64_t now;
  mlfab_dag *dag = NULL;
  DRIVE_CHECK(ctx);
  int code = dag_enter(ctx, &now, &error);
  if (!code && !dag_p)
    code = mlfab__error(&error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "dag_p is NULL");
  if (!code) {
    dag = mlfab__alloc(&ctx->env, sizeof *dag);
    if (!dag)
      code =
          mlfab__error(&error, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, 0, "a schedule: out of memory");
  }
  if (!code) {
    const mlfab__script_user user = {dag, dag_compute, dag_gone};
    dag->ctx = ctx;
    mlfab__script_init(&dag->script, &ctx->node->comm, &user);
    *dag_p = dag;
  }
  return dag_leave(ctx, code, &error);
}

MLFAB_API int mlfab_dag_send(mlfab_dag *dag, int32_t rank, uint32_t tag, const void *data,
                             uint64_t bytes, uint32_t *op_p) {
  /* What is sent is only read. */
  const mlfab__script_message message = {rank, tag, (void *)(uintptr_t)data, bytes, 0, 0};
  DAG_CALL(mlfab__script_message_op(&dag->script, MLFAB__DAG_SEND, &message, op_p, &error));
}

MLFAB_API int mlfab_dag_recv(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data, uint64_t bytes,
                             uint32_t *op_p) {
  const mlfab__script_message message = {rank, tag, data, bytes, 0, 0};
  DAG_CALL(mlfab__script_message_op(&dag->script, MLFAB__DAG_RECV, &message, op_p, &error));
}

MLFAB_API int mlfab_dag_recv_reduce(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data,
                                    uint64_t count, int dtype, int op, uint32_t *op_p) {
  const mlfab__script_message message = {rank, tag, data, count, dtype, op};
  DAG_CALL(mlfab__script_message_op(&dag->script, MLFAB__DAG_RECV_REDUCE, &message, op_p, &error));
}

MLFAB_API int mlfab_dag_compute(mlfab_dag *dag, mlfab_compute_fn fn, void *user, uint32_t *op_p) {
  DAG_CALL(mlfab__script_compute(&dag->script, fn, user, op_p, &error));
}

MLFAB_API int mlfab_dag_nop(mlfab_dag *dag, uint32_t *op_p) {
  DAG_CALL(mlfab__script_nop(&dag->script, op_p, &error));
}

MLFAB_API int mlfab_dag_after(mlfab_dag *dag, uint32_t op, uint32_t dependency) {
  DAG_CALL(mlfab__script_after(&dag->script, op, dependency, &error));
}

MLFAB_API int mlfab_dag_set(mlfab_dag *dag, uint32_t op, uint32_t need, uint32_t flags) {
  DAG_CALL(mlfab__script_set(&dag->script, op, need, flags, &error));
}

MLFAB_API int mlfab_dag_open(mlfab_dag *dag, int persistent, uint64_t timeout_ns) {
  mlfab_error error;
  uint64_t now;
  mlfab_request request = 0;
  if (!dag) return MLFAB_ERR_ARGUMENT;
  DRIVE_CHECK(dag->ctx);
  mlfab *ctx = dag->ctx;
  int code = dag_enter(ctx, &now, &error);
  if (!code) {
    (void)mlfab__drive_arena(ctx);
    code = mlfab__script_open(&dag->script, persistent, timeout_ns, now, &request, &error);
  }
  code = mlfab__node_return(ctx->node, code, &error);
  if (!code) {
    code = mlfab__drive_await(ctx, request, 0, NULL);
    now = mlfab__drive_now(ctx);
    mlfab__script_opened(&dag->script, code, now);
    mlfab__node_return(ctx->node, 0, NULL);
    mlfab__drive_send(ctx, now);
  }
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_dag_start(mlfab_dag *dag, uint64_t timeout_ns, mlfab_request *request_p) {
  mlfab_error error;
  uint64_t now;
  if (!dag) return MLFAB_ERR_ARGUMENT;
  DRIVE_CHECK(dag->ctx);
  int code = dag_enter(dag->ctx, &now, &error);
  if (!code) code = mlfab__script_start(&dag->script, timeout_ns, now, request_p, &error);
  code = mlfab__node_return(dag->ctx->node, code, &error);
  mlfab__drive_send(dag->ctx, now);
  mlfab__drive_leave(dag->ctx);
  return code;
}

MLFAB_API int mlfab_dag_wait(mlfab_dag *dag, uint64_t round, uint64_t timeout_ns) {
  mlfab_error error;
  uint64_t now;
  mlfab_request request = 0;
  if (!dag) return MLFAB_ERR_ARGUMENT;
  DRIVE_CHECK(dag->ctx);
  int code = dag_enter(dag->ctx, &now, &error);
  if (!code) code = mlfab__script_wait(&dag->script, round, timeout_ns, now, &request, &error);
  code = mlfab__node_return(dag->ctx->node, code, &error);
  if (!code && request) {
    code = mlfab__drive_await(dag->ctx, request, 0, NULL);
  } else {
    mlfab__drive_send(dag->ctx, now);
  }
  mlfab__drive_leave(dag->ctx);
  return code;
}

/* Under the lock that the caller of the computing function has: what it sets off is sent there. */
static int dag_trigger_inside(mlfab_dag *dag, uint32_t op) {
  mlfab_error error;
  int code = mlfab__script_trigger(&dag->script, op, 1, 0, &error);
  if (code) dag->ctx->node->requests.last = error;
  return code;
}

MLFAB_API int mlfab_dag_trigger(mlfab_dag *dag, uint32_t op) {
  mlfab_error error;
  uint64_t now;
  if (!dag) return MLFAB_ERR_ARGUMENT;
  DRIVE_CHECK(dag->ctx);
  if (dag_inside == dag->ctx) return dag_trigger_inside(dag, op);
  int code = dag_enter(dag->ctx, &now, &error);
  if (!code) code = mlfab__script_trigger(&dag->script, op, 0, now, &error);
  code = mlfab__node_return(dag->ctx->node, code, &error);
  mlfab__drive_send(dag->ctx, now);
  mlfab__drive_leave(dag->ctx);
  return code;
}

static int dag_test_given_back(mlfab *ctx, void *what) {
  (void)ctx;
  return !mlfab__script_lends(what);
}

MLFAB_API int mlfab_dag_free(mlfab_dag **dag_p) {
  if (!dag_p) return MLFAB_ERR_ARGUMENT;
  mlfab_dag *dag = *dag_p;
  if (!dag) return MLFAB_ERR_CLOSED;
  mlfab *ctx = dag->ctx;
  DRIVE_CHECK(ctx);
  uint64_t now = mlfab__drive_enter(ctx);
  /* A persistent one may have begun to send for a round that nobody will ask for. */
  if (dag->script.persistent)
    mlfab__drive_until(ctx, mlfab__add_sat(now, ctx->heartbeat_ns), dag_test_given_back,
                       &dag->script);
  dag_gone(dag);
  mlfab__node_return(ctx->node, 0, NULL);
  mlfab__drive_send(ctx, mlfab__drive_now(ctx));
  mlfab__drive_leave(ctx);
  *dag_p = NULL;
  return 0;
}
#undef DAG_CALL
