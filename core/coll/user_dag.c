/* user_dag.c - the communicator: builds, opens and runs the user's own task graphs. See comm.h, dag.h.
 *
 * A round is a run. Its messages carry the number of rounds that were armed in this epoch, which is the same on all
 * workers. The user's number counts rounds that are over here, with or without success, so a round and the call that
 * waits for it belong together, whatever fails.
 *
 *    BUILT --open--> OPENING --opened--> OPEN, in which a round is armed, run, over, and so on
 *
 * Even a small message is sent only after its receiver has sent READY: a task graph may wait first for the message that
 * its peer sends last, and credit must not stop that. So a worker whose messages have bytes is at most one round ahead.
 *
 * Invariants. (1) At most one round is armed. (2) Each verdict ends the present round, and all requests with it. (3) A
 * trigger counts for the present round, even if that is not armed yet.
 * (4) A round is over when no message borrows its memory. */
#include "user_dag.h"

#include <stdio.h>

enum { USER_DAG_MESSAGE_MAX = 1 << 30 };

static void user_dag_run(mlfab__user_dag *graph);

static const char user_dag_what[] = "a task graph";

static int user_dag_refuse(mlfab_error *error, int code, const char *what) {
  return MLFAB__FAIL(error, code, "a task graph: %s", what);
}

/* --- building --- */

MLFAB__INTERNAL void mlfab__user_dag_init(mlfab__user_dag *graph, mlfab__comm *comm,
                                          const mlfab__user_dag_user *user) {
  memset(graph, 0, sizeof *graph);
  graph->comm = comm;
  graph->user = *user;
  graph->stranger = MLFAB_NO_RANK;
  mlfab__dag_init(&graph->run.dag, comm->env);
}

static int user_dag_check_building(const mlfab__user_dag *graph, mlfab_error *error) {
  if (graph->state == MLFAB__USER_DAG_BUILT) return 0;
  return user_dag_refuse(error, MLFAB_ERR_STATE, "it is open and cannot be changed");
}

static int user_dag_no_memory(mlfab_error *error) {
  return user_dag_refuse(error, MLFAB_ERR_MEMORY, "out of memory");
}

static int user_dag_add(mlfab__user_dag *graph, const mlfab__dag_op *op,
                        const mlfab__user_dag_op *more, uint32_t *op_p, mlfab_error *error) {
  uint32_t id;
  int code = user_dag_check_building(graph, error);
  if (code) return code;
  if (!op_p) return user_dag_refuse(error, MLFAB_ERR_ARGUMENT, "op_p is NULL");
  mlfab__user_dag_op *ops = mlfab__grow(graph->comm->env, graph->ops, &graph->room,
                                        graph->run.dag.nops + 1u, sizeof *ops);
  if (ops) graph->ops = ops;
  code = ops ? mlfab__dag_add(&graph->run.dag, op, &id) : MLFAB_ERR_MEMORY;
  if (code == MLFAB_ERR_LIMIT)
    return MLFAB__FAIL(error, code, "a task graph: more than %u operations", MLFAB__DAG_OPS_MAX);
  if (code) return user_dag_no_memory(error);
  graph->ops[id] = *more;
  *op_p = id;
  return 0;
}

static int user_dag_check_message(const mlfab__user_dag *graph,
                                  const mlfab__user_dag_message *message, mlfab_error *error) {
  uint32_t workers = graph->comm->config->workers;
  unsigned long long bytes = message->bytes;
  if (message->rank < 0 || (uint32_t)message->rank >= workers)
    return mlfab__error(error, MLFAB_ERR_RANK_RANGE, message->rank, 0, 0,
                        "a task graph: rank %d is not one of %u workers", (int)message->rank,
                        workers);
  if ((uint32_t)message->rank == graph->comm->rank)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, message->rank, 0, 0,
                        "a task graph: worker %d sends to itself", (int)message->rank);
  if (bytes > USER_DAG_MESSAGE_MAX)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
                       "a task graph: a message of %llu bytes, the limit is %d", bytes,
                       USER_DAG_MESSAGE_MAX);
  if (bytes > 0 && !message->data)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a task graph: data is NULL, and the message has %llu bytes", bytes);
  return 0;
}

/* Checks type, operation and alignment of a RECV_REDUCE. */
static int user_dag_check_reduction(const mlfab__user_dag_message *message, uint32_t width,
                                    mlfab_error *error) {
  if (width == 0)
    return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "a task graph: %d is not an element type",
                       message->dtype);
  if (message->op < MLFAB_OP_SUM || message->op > MLFAB_OP_PRODUCT)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a task graph: %d is not an operation (MLFAB_OP_SUM ... MLFAB_OP_PRODUCT)",
                       message->op);
  if (message->op == MLFAB_OP_MEAN)
    return user_dag_refuse(error, MLFAB_ERR_UNSUPPORTED,
                           "not supported: a mean of two; add, and divide in a compute operation");
  if ((uintptr_t)message->data % width)
    return user_dag_refuse(error, MLFAB_ERR_ARGUMENT, "data is not aligned to its elements");
  return 0;
}

MLFAB__INTERNAL int mlfab__user_dag_message_op(mlfab__user_dag *graph, uint8_t kind,
                                               const mlfab__user_dag_message *given, uint32_t *op_p,
                                               mlfab_error *error) {
  mlfab__user_dag_message message = *given;
  mlfab__dag_op op = {.kind = kind, .tag = message.tag};
  int code = 0;
  if (kind == MLFAB__DAG_RECV_REDUCE) {
    uint32_t width = mlfab__element_bytes(message.dtype);
    code = user_dag_check_reduction(&message, width, error);
    if (code) return code;
    message.bytes = message.bytes > USER_DAG_MESSAGE_MAX ? UINT64_MAX : message.bytes * width;
    op.reduce = MLFAB__ENGINE_REDUCE(message.dtype, message.op);
  }
  code = user_dag_check_message(graph, &message, error);
  if (code) return code;
  op.peer = (uint32_t)message.rank; /* a member's index while armed */
  op.bytes = message.bytes;
  const mlfab__user_dag_op more = {.rank = op.peer, .data = (uintptr_t)message.data};
  return user_dag_add(graph, &op, &more, op_p, error);
}

MLFAB__INTERNAL int mlfab__user_dag_compute(mlfab__user_dag *graph, mlfab_dag_compute_fn fn,
                                            void *user, uint32_t *op_p, mlfab_error *error) {
  const mlfab__dag_op op = {.kind = MLFAB__DAG_COMPUTE};
  const mlfab__user_dag_op more = {.fn = fn, .user = user};
  if (!fn) return user_dag_refuse(error, MLFAB_ERR_ARGUMENT, "the function to compute is NULL");
  return user_dag_add(graph, &op, &more, op_p, error);
}

MLFAB__INTERNAL int mlfab__user_dag_nop(mlfab__user_dag *graph, uint32_t *op_p,
                                        mlfab_error *error) {
  const mlfab__dag_op op = {.kind = MLFAB__DAG_NOP};
  const mlfab__user_dag_op more = {0};
  return user_dag_add(graph, &op, &more, op_p, error);
}

static int user_dag_check_op(const mlfab__user_dag *graph, uint32_t op, mlfab_error *error) {
  if (op < graph->run.dag.nops) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                     "a task graph: there is no operation %u, only %u of them, from 0", op,
                     graph->run.dag.nops);
}

MLFAB__INTERNAL int mlfab__user_dag_after(mlfab__user_dag *graph, uint32_t op, uint32_t dependency,
                                          mlfab_error *error) {
  int code = user_dag_check_building(graph, error);
  if (!code) code = user_dag_check_op(graph, op, error);
  if (!code) code = user_dag_check_op(graph, dependency, error);
  if (code) return code;
  code = mlfab__dag_after(&graph->run.dag, op, dependency);
  if (code == MLFAB_ERR_LIMIT)
    return MLFAB__FAIL(error, code, "a task graph: more than %u dependencies",
                       MLFAB__DAG_EDGES_MAX);
  return code ? user_dag_no_memory(error) : 0;
}

MLFAB__INTERNAL int mlfab__user_dag_set(mlfab__user_dag *graph, uint32_t op, uint32_t need,
                                        uint32_t flags, mlfab_error *error) {
  int code = user_dag_check_building(graph, error);
  if (!code) code = user_dag_check_op(graph, op, error);
  if (code) return code;
  if (flags & ~(uint32_t)(MLFAB_DAG_OUTSIDE | MLFAB_DAG_OPTIONAL))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "a task graph: 0x%x are not flags (MLFAB_DAG_*)",
                       flags);
  mlfab__dag_op *its = &graph->run.dag.ops[op];
  its->need = need;
  its->outside = (flags & MLFAB_DAG_OUTSIDE) != 0;
  its->optional = (flags & MLFAB_DAG_OPTIONAL) != 0;
  return 0;
}

/* --- opening --- */

static int user_dag_is_message(const mlfab__dag_op *op) {
  return op->kind != MLFAB__DAG_NOP && op->kind != MLFAB__DAG_COMPUTE;
}

static int user_dag_flaw(const mlfab__user_dag *graph, uint32_t culprit, mlfab_error *error) {
  const mlfab__dag_op *op = &graph->run.dag.ops[culprit];
  switch (graph->run.dag.flaw) {
    case MLFAB__DAG_CYCLE:
      return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "a task graph: operation %u comes after itself",
                         culprit);
    case MLFAB__DAG_NEED:
      return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                         "a task graph: operation %u needs %u dependencies, more than it has",
                         culprit, op->need);
    case MLFAB__DAG_TWICE:
      return mlfab__error(
          error, MLFAB_ERR_ARGUMENT, (int32_t)op->peer, 0, 0,
          "a task graph: operation %u: another operation %s worker %u under tag %u, too", culprit,
          op->kind == MLFAB__DAG_SEND ? "sends to" : "receives from", op->peer, op->tag);
    default:
      return user_dag_no_memory(error);
  }
}

/* Returns 1 if a round would be over with neither trigger nor message. */
static int user_dag_runs_alone(mlfab__dag *dag) {
  uint32_t id;
  mlfab__dag_start(dag);
  while (mlfab__dag_next(dag, &id)) {
    uint8_t kind = dag->ops[id].kind;
    if (kind != MLFAB__DAG_RECV && kind != MLFAB__DAG_RECV_REDUCE) mlfab__dag_done(dag, id);
  }
  return mlfab__dag_finished(dag);
}

/* Computes the places of the messages' memory: offsets from the lowest address, so that the run has one stretch instead
 * of a list. A SEND that others wait for copies its bytes: these operations may change them. */
static void user_dag_lay_out(mlfab__user_dag *graph) {
  mlfab__dag *dag = &graph->run.dag;
  uintptr_t low = UINTPTR_MAX, high = 0;
  for (uint32_t id = 0; id < dag->nops; id++) {
    if (dag->ops[id].bytes == 0) continue;
    low = (uintptr_t)mlfab__min(low, graph->ops[id].data);
    high = (uintptr_t)mlfab__max(high, graph->ops[id].data + dag->ops[id].bytes);
  }
  for (uint32_t id = 0; id < dag->nops; id++) {
    mlfab__dag_op *op = &dag->ops[id];
    op->at = op->bytes > 0 ? graph->ops[id].data - low : 0;
    op->copy = op->kind == MLFAB__DAG_SEND && dag->first[id + 1] > dag->first[id];
  }
  graph->whole = (mlfab_vec){(void *)low, high > low ? high - low : 0};
}

/* Seals it by ranks: `peer` is a rank here. */
static int user_dag_seal(mlfab__user_dag *graph, mlfab_error *error) {
  mlfab__dag *dag = &graph->run.dag;
  uint32_t culprit;
  if (dag->nops == 0) return user_dag_refuse(error, MLFAB_ERR_ARGUMENT, "it has no operations");
  for (uint32_t id = 0; id < dag->nops; id++) dag->ops[id].peer = graph->ops[id].rank;
  if (mlfab__dag_seal(dag, &culprit)) return user_dag_flaw(graph, culprit, error);
  if (graph->persistent && user_dag_runs_alone(dag))
    return user_dag_refuse(error, MLFAB_ERR_ARGUMENT,
                           "a persistent one must wait for a trigger or a message: this one would "
                           "run without end");
  user_dag_lay_out(graph);
  return 0;
}

/* --- rounds --- */

static void user_dag_fail_memory(const mlfab__user_dag *graph) {
  mlfab__comm_fail(graph->comm, MLFAB_ERR_MEMORY, MLFAB_NO_RANK,
                   "a task graph: worker %u is out of memory", graph->comm->rank);
}

/* Finishes the requests that wait for rounds below `round`, with 0 or an error of this worker alone. */
static void user_dag_finish(mlfab__user_dag *graph, uint64_t round, int code, int32_t rank,
                            const char *text) {
  for (uint32_t i = 0; i < graph->nwaiters;) {
    mlfab__user_dag_waiter waiter = graph->waiters[i];
    if (waiter.round >= round) {
      i++;
      continue;
    }
    graph->waiters[i] = graph->waiters[--graph->nwaiters];
    mlfab__comm_end_alone(graph->comm, waiter.request, code, rank, text);
  }
}

/* Translates ranks to members of this epoch. graph->stranger: a rank that is no member. Errors: MEMORY. */
static int user_dag_map(mlfab__user_dag *graph) {
  mlfab__comm *comm = graph->comm;
  mlfab__dag *dag = &graph->run.dag;
  uint32_t culprit;
  if (graph->epoch == comm->epoch) return 0;
  graph->stranger = MLFAB_NO_RANK;
  for (uint32_t id = dag->nops; id-- > 0;) {
    uint32_t rank = graph->ops[id].rank, member = comm->streams.member_of[rank];
    if (!user_dag_is_message(&dag->ops[id])) continue;
    if (!member) graph->stranger = (int32_t)rank;
    dag->ops[id].peer = member - 1;
  }
  graph->epoch = comm->epoch;
  if (graph->stranger != MLFAB_NO_RANK) return 0;
  return mlfab__dag_seal(dag, &culprit);
}

static int user_dag_stranger(const mlfab__user_dag *graph, mlfab_error *error) {
  return mlfab__error(error, MLFAB_ERR_PEER_DEAD, graph->stranger, 0, 0,
                      "a task graph: worker %d does not take part any more, and is sent to or "
                      "received from",
                      (int)graph->stranger);
}

static int user_dag_may_arm(const mlfab__user_dag *graph) {
  const mlfab__comm *comm = graph->comm;
  return graph->state == MLFAB__USER_DAG_OPEN && graph->started && !graph->run.armed &&
         comm->phase == MLFAB__COMM_IN && !comm->failing;
}

/* Returns an error if no further round can be armed. */
static int user_dag_arm(mlfab__user_dag *graph) {
  mlfab__comm *comm = graph->comm;
  uint64_t round = graph->round;
  int code = user_dag_map(graph);
  if (!code && graph->stranger != MLFAB_NO_RANK) {
    mlfab_error error;
    code = user_dag_stranger(graph, &error);
    graph->started = graph->persistent;
    user_dag_finish(graph, MLFAB__NEVER, code, error.rank, error.text);
    return code;
  }
  graph->run.number = graph->number++;
  if (!code) code = mlfab__engine_arm(comm, &graph->run, comm->now_ns);
  if (code) {
    user_dag_fail_memory(graph);
    return code;
  }
  for (uint32_t id = 0; graph->npending > 0 && id < graph->run.dag.nops; id++) {
    if (!graph->ops[id].pending) continue;
    graph->ops[id].pending = 0;
    graph->npending--;
    if (graph->round == round) mlfab__engine_trigger(comm, &graph->run, id, 0);
  }
  return 0;
}

/* Arms the next round, and further rounds while they end at once. */
static void user_dag_run(mlfab__user_dag *graph) {
  if (graph->arming) return; /* the outer call arms the next one, too */
  graph->arming = 1;
  while (user_dag_may_arm(graph) && !user_dag_arm(graph)) {
  }
  graph->arming = 0;
}

/* Called when a round has ended by itself; user_dag_over handles those that end with the epoch. */
static void user_dag_run_over(void *self, int status) {
  mlfab__user_dag *graph = self;
  if (status) return;
  graph->round++;
  graph->started = graph->persistent;
  user_dag_finish(graph, graph->round, 0, MLFAB_NO_RANK, "");
  user_dag_run(graph);
}

static int user_dag_call(void *self, mlfab__engine_run *run, const mlfab__dag_op *op) {
  mlfab__user_dag *graph = self;
  uint32_t id = (uint32_t)(op - run->dag.ops);
  int code =
      graph->user.compute(graph->user.self, graph->ops[id].fn, graph->ops[id].user, graph->round);
  if (!code) return 0;
  mlfab__comm_fail(graph->comm, MLFAB_ERR_CALLBACK, MLFAB_NO_RANK,
                   "a task graph: operation %u of worker %u has returned %d in round %llu", id,
                   graph->comm->rank, code, (unsigned long long)graph->round);
  return MLFAB_ERR_CALLBACK;
}

/* --- functions for the communicator --- */

static void user_dag_begin(void *self) {
  mlfab__user_dag *graph = self;
  graph->number = 0;
  user_dag_run(graph);
}

static void user_dag_over(void *self) {
  mlfab__user_dag *graph = self;
  if (graph->state != MLFAB__USER_DAG_OPEN) return;
  if (graph->lost_end != graph->round) graph->lost = graph->round;
  graph->lost_end = ++graph->round;
  graph->started = graph->persistent;
  for (uint32_t id = 0; id < graph->run.dag.nops; id++) graph->ops[id].pending = 0;
  graph->npending = 0;
  for (; graph->nwaiters > 0; graph->nwaiters--)
    mlfab__comm_end_request(graph->comm, graph->waiters[graph->nwaiters - 1].request);
}

static int32_t user_dag_awaited(void *self, uint64_t *number_p, const char **why_p) {
  const mlfab__user_dag *graph = self;
  (void)why_p;
  *number_p = graph->round;
  return graph->run.armed ? mlfab__engine_awaits(graph->comm, &graph->run) : (int32_t)MLFAB_NO_RANK;
}

static int user_dag_called(void *self, uint64_t number) {
  const mlfab__user_dag *graph = self;
  return number < graph->number;
}

static void user_dag_gone(void *self) {
  mlfab__user_dag *graph = self;
  graph->state = MLFAB__USER_DAG_BUILT;
  graph->user.gone(graph->user.self);
}

static const mlfab__comm_kind user_dag_kind = {.what = user_dag_what,
                                               .opening = "the opening of a task graph",
                                               .counts = "round",
                                               .absent = "is not in this round",
                                               .begin = user_dag_begin,
                                               .over = user_dag_over,
                                               .awaited = user_dag_awaited,
                                               .called = user_dag_called,
                                               .free_self = user_dag_gone};

MLFAB__INTERNAL int mlfab__user_dag_open(mlfab__user_dag *graph, int persistent,
                                         uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error) {
  mlfab__comm *comm = graph->comm;
  int code = user_dag_check_building(graph, error);
  if (!code) code = mlfab__comm_check_state(comm, user_dag_what, error);
  if (code) return code;
  graph->persistent = persistent != 0;
  code = user_dag_seal(graph, error);
  if (code) return code;
  if (mlfab__comm_owed(comm, error)) return comm->verdict.code;
  graph->run.signature = mlfab__hash(3, &graph->persistent, sizeof graph->persistent) | 1;
  code = mlfab__comm_object_open(comm, &graph->object, &user_dag_kind, graph, graph->run.signature,
                                 timeout_ns, now_ns, request_p, error);
  graph->state = code ? MLFAB__USER_DAG_BUILT : MLFAB__USER_DAG_OPENING;
  return code;
}

static void user_dag_forget_object(mlfab__user_dag *graph) {
  mlfab__comm_object_remove(graph->comm, &graph->object);
  graph->state = MLFAB__USER_DAG_BUILT;
  graph->epoch = 0;
}

MLFAB__INTERNAL void mlfab__user_dag_opened(mlfab__user_dag *graph, int code, uint64_t now_ns) {
  mlfab__engine_run *run = &graph->run;
  if (graph->state != MLFAB__USER_DAG_OPENING) return;
  if (code) {
    user_dag_forget_object(graph);
    return;
  }
  run->channel = graph->object.channel;
  run->spaces[0] = (mlfab__engine_space){&graph->whole};
  run->compute = user_dag_call;
  run->over = user_dag_run_over;
  run->self = graph;
  graph->state = MLFAB__USER_DAG_OPEN;
  graph->started = graph->persistent;
  graph->round = graph->number = graph->lost = graph->lost_end = 0;
  mlfab__comm_enter(graph->comm, now_ns);
  user_dag_run(graph);
  mlfab__comm_exit(graph->comm);
}

/* --- calls --- */

static int user_dag_check_open(const mlfab__user_dag *graph, mlfab_error *error) {
  if (graph->state == MLFAB__USER_DAG_OPEN) return 0;
  return user_dag_refuse(error, MLFAB_ERR_STATE, "it is not open");
}

/* Checks that all its ranks are members of the epoch that stands. */
static int user_dag_check_members(mlfab__user_dag *graph, mlfab_error *error) {
  if (graph->comm->phase != MLFAB__COMM_IN) return 0;
  if (user_dag_map(graph)) return user_dag_no_memory(error);
  return graph->stranger == MLFAB_NO_RANK ? 0 : user_dag_stranger(graph, error);
}

static int user_dag_await(mlfab__user_dag *graph, uint64_t round, uint64_t timeout_ns,
                          uint64_t now_ns, mlfab_request *request_p, mlfab_error *error) {
  mlfab__comm *comm = graph->comm;
  if (graph->nwaiters == MLFAB__COUNT(graph->waiters))
    return user_dag_refuse(error, MLFAB_ERR_AGAIN,
                           "too many requests are open: end some with mlfab_wait or mlfab_test");
  int code = mlfab__comm_object_request(comm, &graph->object, timeout_ns, now_ns, request_p, error);
  if (code) return code;
  graph->waiters[graph->nwaiters++] = (mlfab__user_dag_waiter){*request_p, round};
  return 0;
}

MLFAB__INTERNAL int mlfab__user_dag_start(mlfab__user_dag *graph, uint64_t timeout_ns,
                                          uint64_t now_ns, mlfab_request *request_p,
                                          mlfab_error *error) {
  mlfab__comm *comm = graph->comm;
  int code = user_dag_check_open(graph, error);
  if (code) return code;
  if (!request_p) return user_dag_refuse(error, MLFAB_ERR_ARGUMENT, "request_p is NULL");
  if (graph->persistent)
    return user_dag_refuse(error, MLFAB_ERR_STATE, "a persistent one starts its rounds itself");
  if (graph->started)
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN, "a task graph: round %llu is under way",
                       (unsigned long long)graph->round);
  code = mlfab__comm_check_state(comm, user_dag_what, error);
  if (!code && mlfab__comm_owed(comm, error)) return comm->verdict.code;
  if (!code) code = user_dag_check_members(graph, error);
  if (!code) code = user_dag_await(graph, graph->round, timeout_ns, now_ns, request_p, error);
  if (code) return code;
  graph->started = 1;
  mlfab__comm_enter(comm, now_ns);
  user_dag_run(graph);
  mlfab__comm_exit(comm);
  return 0;
}

/* Returns 0: the round can be waited for; 1: it is over. */
static int user_dag_look(const mlfab__user_dag *graph, uint64_t round, mlfab_error *error) {
  unsigned long long number = round;
  if (round >= graph->lost && round < graph->lost_end)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "a task graph: round %llu was ended by a failure; the next is %llu", number,
                       (unsigned long long)graph->round);
  if (round < graph->round) return 1;
  if (graph->persistent || (graph->started && round == graph->round)) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_STATE, "a task graph: round %llu has not been started",
                     number);
}

MLFAB__INTERNAL int mlfab__user_dag_wait(mlfab__user_dag *graph, uint64_t round,
                                         uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error) {
  *request_p = 0;
  int code = user_dag_check_open(graph, error);
  if (code) return code;
  if (mlfab__comm_owed(graph->comm, error)) return graph->comm->verdict.code;
  code = user_dag_look(graph, round, error);
  if (code) return code == 1 ? 0 : code;
  code = mlfab__comm_check_state(graph->comm, user_dag_what, error);
  if (!code) code = user_dag_check_members(graph, error);
  return code ? code : user_dag_await(graph, round, timeout_ns, now_ns, request_p, error);
}

MLFAB__INTERNAL int mlfab__user_dag_trigger(mlfab__user_dag *graph, uint32_t op, int inside,
                                            uint64_t now_ns, mlfab_error *error) {
  mlfab__comm *comm = graph->comm;
  int code = user_dag_check_open(graph, error);
  if (!code) code = user_dag_check_op(graph, op, error);
  if (code) return code;
  if (!graph->run.dag.ops[op].outside)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "a task graph: operation %u is not MLFAB_DAG_OUTSIDE", op);
  code = mlfab__comm_check_state(comm, user_dag_what, error);
  if (!code && !inside && mlfab__comm_owed(comm, error)) return comm->verdict.code;
  if (!code && !graph->started)
    return user_dag_refuse(error, MLFAB_ERR_STATE, "no round is under way");
  if (!code) code = user_dag_check_members(graph, error);
  if (code) return code;
  if (graph->run.armed) {
    mlfab__engine_trigger(comm, &graph->run, op, inside ? 0 : now_ns);
  } else if (!graph->ops[op].pending) {
    graph->ops[op].pending = 1;
    graph->npending++;
  }
  return 0;
}

/* --- the end --- */

MLFAB__INTERNAL int mlfab__user_dag_lends(const mlfab__user_dag *graph) {
  return graph->run.armed && graph->run.lent > 0;
}

static void user_dag_close(mlfab__user_dag *graph) {
  mlfab__comm *comm = graph->comm;
  char text[MLFAB__TEXT_MAX];
  snprintf(text, sizeof text, "a task graph (round %llu): freed by worker %u",
           (unsigned long long)graph->round, comm->rank);
  if (graph->started && !graph->persistent)
    mlfab__comm_fail(comm, MLFAB_ERR_CANCELLED, (int32_t)comm->rank, "%s", text);
  graph->started = 0;
  mlfab__engine_disarm(comm, &graph->run);
  user_dag_finish(graph, MLFAB__NEVER, MLFAB_ERR_CANCELLED, (int32_t)comm->rank, text);
  /* Others have begun the next round of a persistent graph by themselves: that is no failure. */
  if (graph->persistent) graph->object.upto = MLFAB__NEVER;
  user_dag_forget_object(graph);
}

MLFAB__INTERNAL void mlfab__user_dag_free(mlfab__user_dag *graph) {
  mlfab__env *env = graph->comm->env;
  if (graph->state == MLFAB__USER_DAG_OPENING) user_dag_forget_object(graph);
  if (graph->state == MLFAB__USER_DAG_OPEN) user_dag_close(graph);
  mlfab__dag_free(&graph->run.dag);
  mlfab__free(env, graph->ops, graph->room * sizeof *graph->ops);
  graph->ops = NULL;
  graph->room = 0;
}
