/* calls_dag.c - a context: task graphs (user_dag.c).
 *
 * A compute function runs under the lock, in the thread that drives the context. It may trigger operations:
 * `dag_inside` tells that this thread has the lock already. A triggered operation runs when the function has
 * returned. */
#include "../coll/user_dag.h"
#include "../kernels/kernels_combine.h"
#include "calls_coll.h"

/* The node frees a task graph that is open when the context is closed. */
struct mlfab_dag {
  mlfab__user_dag graph;
  mlfab *ctx;
};

/* The context whose lock this thread holds for the user's function. */
static _Thread_local const mlfab *dag_inside;

static int dag_compute(void *self, mlfab_dag_compute_fn fn, void *user, uint64_t round) {
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
  mlfab__user_dag_free(&dag->graph);
  mlfab__free(&ctx->env, dag, sizeof *dag);
}

/* These two enclose every call on a task graph. waits 1: the call waits, which a function of mlfab_on_done must not.
 * dag_leave waits for the request, if there is one. */
static int dag_enter(mlfab *ctx, int waits, mlfab_error *error) {
  mlfab__context_enter(ctx);
  if (!waits || !mlfab__context_is_told(ctx))
    return mlfab__node_enter(ctx->node, ctx->now_ns, 1, error);
  *error = ctx->node->requests.last;
  return MLFAB_ERR_STATE;
}

static int dag_leave(mlfab *ctx, int code, mlfab_request request, const mlfab_error *error) {
  code = mlfab__node_return(ctx->node, code, error);
  if (!code && request)
    code = mlfab__context_await(ctx, request, 0, NULL);
  else
    mlfab__context_sent(ctx, 0);
  return mlfab__context_leave(ctx, code);
}

/* Refuses device memory: returns 0, or the error. */
static int dag_refuse(mlfab *ctx, const void *data, uint64_t bytes, mlfab_error *error) {
  return ctx->stager ? ctx->stager->refuse(ctx, data, bytes, "a task graph", error) : 0;
}

/* `call` may use dag and error; if it sets `request`, DAG_CALL waits for that. */
#define DAG_CALL(call) DAG_DO(0, call)
#define DAG_DO(waits, call)                      \
  mlfab_error error;                             \
  mlfab_request request = 0;                     \
  if (!dag) return MLFAB_ERR_ARGUMENT;           \
  CONTEXT_CHECK(dag->ctx);                       \
  int code = dag_enter(dag->ctx, waits, &error); \
  if (!code) code = call;                        \
  return dag_leave(dag->ctx, code, request, &error)

MLFAB_API int mlfab_dag_create(mlfab *ctx, mlfab_dag **dag_p) {
  mlfab_error error;
  mlfab_dag *dag = NULL;
  CONTEXT_CHECK(ctx);
  int code = dag_enter(ctx, 0, &error);
  if (!code && !dag_p) code = MLFAB__FAIL(&error, MLFAB_ERR_ARGUMENT, "dag_p is NULL");
  if (!code) {
    dag = mlfab__alloc(&ctx->env, sizeof *dag);
    if (!dag) code = MLFAB__FAIL(&error, MLFAB_ERR_MEMORY, "a task graph: out of memory");
  }
  if (!code) {
    const mlfab__user_dag_user user = {dag, dag_compute, dag_gone};
    dag->ctx = ctx;
    mlfab__user_dag_init(&dag->graph, ctx->node->parts->comm, &user);
    *dag_p = dag;
  }
  return dag_leave(ctx, code, 0, &error);
}

static int dag_message(mlfab_dag *dag, uint8_t kind, const mlfab__user_dag_message *message,
                       uint64_t bytes, uint32_t *op_p, mlfab_error *error) {
  int code = dag_refuse(dag->ctx, message->data, bytes, error);
  return code ? code : mlfab__user_dag_message_op(&dag->graph, kind, message, op_p, error);
}

MLFAB_API int mlfab_dag_send(mlfab_dag *dag, int32_t rank, uint32_t tag, const void *data,
                             uint64_t bytes, uint32_t *op_p) {
  /* A send only reads the data. */
  const mlfab__user_dag_message message = {rank, tag, (void *)(uintptr_t)data, bytes, 0, 0};
  DAG_CALL(dag_message(dag, MLFAB__DAG_SEND, &message, bytes, op_p, &error));
}

MLFAB_API int mlfab_dag_recv(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data, uint64_t bytes,
                             uint32_t *op_p) {
  const mlfab__user_dag_message message = {rank, tag, data, bytes, 0, 0};
  DAG_CALL(dag_message(dag, MLFAB__DAG_RECV, &message, bytes, op_p, &error));
}

MLFAB_API int mlfab_dag_recv_reduce(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data,
                                    uint64_t count, int dtype, int op, uint32_t *op_p) {
  const mlfab__user_dag_message message = {rank, tag, data, count, dtype, op};
  const uint64_t bytes = mlfab__mul_sat(count, mlfab__element_bytes(dtype));
  DAG_CALL(dag_message(dag, MLFAB__DAG_RECV_REDUCE, &message, bytes, op_p, &error));
}

MLFAB_API int mlfab_dag_compute(mlfab_dag *dag, mlfab_dag_compute_fn fn, void *user,
                                uint32_t *op_p) {
  DAG_CALL(mlfab__user_dag_compute(&dag->graph, fn, user, op_p, &error));
}

MLFAB_API int mlfab_dag_nop(mlfab_dag *dag, uint32_t *op_p) {
  DAG_CALL(mlfab__user_dag_nop(&dag->graph, op_p, &error));
}

MLFAB_API int mlfab_dag_after(mlfab_dag *dag, uint32_t op, uint32_t dependency) {
  DAG_CALL(mlfab__user_dag_after(&dag->graph, op, dependency, &error));
}

MLFAB_API int mlfab_dag_set(mlfab_dag *dag, uint32_t op, uint32_t need, uint32_t flags) {
  DAG_CALL(mlfab__user_dag_set(&dag->graph, op, need, flags, &error));
}

MLFAB_API int mlfab_dag_open(mlfab_dag *dag, int persistent, uint64_t timeout_ns) {
  mlfab_error error;
  mlfab_request request = 0;
  if (!dag) return MLFAB_ERR_ARGUMENT;
  CONTEXT_CHECK(dag->ctx);
  mlfab *ctx = dag->ctx;
  int code = dag_enter(ctx, 1, &error);
  if (!code && ctx->stager && (code = ctx->stager->settle(ctx)) != 0)
    error = ctx->node->requests.last;
  if (!code) {
    (void)mlfab__context_arena(ctx);
    code = mlfab__user_dag_open(&dag->graph, persistent, timeout_ns, ctx->now_ns, &request, &error);
  }
  code = mlfab__node_return(ctx->node, code, &error);
  if (!code) {
    code = mlfab__context_await(ctx, request, 0, NULL);
    ctx->now_ns = mlfab__context_now(ctx);
    mlfab__user_dag_opened(&dag->graph, code, ctx->now_ns);
    mlfab__node_return(ctx->node, 0, NULL);
    mlfab__context_sent(ctx, 0);
  }
  return mlfab__context_leave(ctx, code);
}

MLFAB_API int mlfab_dag_start(mlfab_dag *dag, uint64_t timeout_ns, mlfab_request *request_p) {
  DAG_CALL(mlfab__user_dag_start(&dag->graph, timeout_ns, dag->ctx->now_ns, request_p, &error));
}

MLFAB_API int mlfab_dag_wait(mlfab_dag *dag, uint64_t round, uint64_t timeout_ns) {
  DAG_DO(1,
         mlfab__user_dag_wait(&dag->graph, round, timeout_ns, dag->ctx->now_ns, &request, &error));
}

/* Triggers inside a compute function: its caller has the lock, and carries out the actions. */
static int dag_trigger_inside(mlfab_dag *dag, uint32_t op) {
  mlfab_error error;
  int code = mlfab__user_dag_trigger(&dag->graph, op, 1, 0, &error);
  if (code) dag->ctx->node->requests.last = error;
  return code;
}

MLFAB_API int mlfab_dag_trigger(mlfab_dag *dag, uint32_t op) {
  if (dag && dag_inside == dag->ctx) return dag_trigger_inside(dag, op);
  DAG_CALL(mlfab__user_dag_trigger(&dag->graph, op, 0, dag->ctx->now_ns, &error));
}

static int dag_test_given_back(mlfab *ctx, void *what) {
  (void)ctx;
  return !mlfab__user_dag_lends(what);
}

MLFAB_API int mlfab_dag_close(mlfab_dag **dag_p) {
  if (!dag_p) return MLFAB_ERR_ARGUMENT;
  mlfab_dag *dag = *dag_p;
  if (!dag) return MLFAB_ERR_CLOSED;
  mlfab *ctx = dag->ctx;
  CONTEXT_CHECK(ctx);
  uint64_t now = mlfab__context_enter(ctx);
  /* A persistent graph may have begun to send for a round that no worker will wait for. */
  if (dag->graph.persistent)
    mlfab__context_until(ctx, mlfab__add_sat(now, ctx->heartbeat_ns), dag_test_given_back,
                         &dag->graph);
  dag_gone(dag);
  mlfab__node_return(ctx->node, 0, NULL);
  mlfab__context_sent(ctx, 0);
  (void)mlfab__context_leave(ctx, 0);
  *dag_p = NULL;
  return 0;
}
