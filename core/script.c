/* script.c - the communicator: schedules of the user's own. See comm.h; what may run when is
 * dag.h's.
 *
 * A round is a play. Messages are numbered by the rounds that were armed in this epoch, which are
 * the same on all workers; the user's numbers count what was over here, with or without success, so
 * that a round and the call that waits for it go together whatever failed.
 *
 *    BUILT --open--> OPENING --opened--> OPEN, in which a round is armed, played, over, and so on
 *
 * Everything is sent when its receiver has asked for it (READY), however small: what a schedule
 * waits for first may be what its peer sends last, and credit must not stand in between. So nobody
 * with messages that have bytes is more than a round ahead.
 *
 * Invariants. (1) At most one round is armed. (2) Each verdict ends the present round, and all
 * requests with it. (3) A trigger counts for the round that is present when it comes, also where
 * that one is not armed yet. (4) A round is over when none of its memory is lent any
 * more. */
#include "script.h"

#include <stdio.h>

enum { SCRIPT_MESSAGE_MAX = 1 << 30, SCRIPT_FEW = 16 };

static void script_run(mlfab__script *script);

static int script_refuse(mlfab_error *error, int code, const char *what) {
  return mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, "a schedule: %s", what);
}

/* --- building --- */

MLFAB__INTERNAL void mlfab__script_init(mlfab__script *script, mlfab__comm *comm,
                                        const mlfab__script_user *user) {
  memset(script, 0, sizeof *script);
  script->comm = comm;
  script->user = *user;
  script->stranger = MLFAB_NO_RANK;
  mlfab__dag_init(&script->play.dag, comm->env);
}

static int script_check_building(const mlfab__script *script, mlfab_error *error) {
  if (script->state == MLFAB__SCRIPT_BUILT) return 0;
  return script_refuse(error, MLFAB_ERR_STATE, "it is open and cannot be changed");
}

static int script_no_memory(mlfab_error *error) {
  return script_refuse(error, MLFAB_ERR_MEMORY, "out of memory");
}

static int script_grow(mlfab__script *script) {
  mlfab__env *env = script->comm->env;
  uint32_t n = script->play.dag.nops, room = script->room ? 2 * script->room : SCRIPT_FEW;
  if (n < script->room) return 0;
  mlfab__script_op *ops = mlfab__alloc_array(env, room, sizeof *ops);
  if (!ops) return MLFAB_ERR_MEMORY;
  if (n > 0) memcpy(ops, script->ops, n * sizeof *ops);
  mlfab__free(env, script->ops, script->room * sizeof *ops);
  script->ops = ops;
  script->room = room;
  return 0;
}

static int script_add(mlfab__script *script, const mlfab__dag_op *op, const mlfab__script_op *more,
                      uint32_t *op_p, mlfab_error *error) {
  uint32_t id;
  int code = script_check_building(script, error);
  if (code) return code;
  if (!op_p) return script_refuse(error, MLFAB_ERR_ARGUMENT, "op_p is NULL");
  code = script_grow(script);
  if (!code) code = mlfab__dag_add(&script->play.dag, op, &id);
  if (code == MLFAB_ERR_LIMIT)
    return mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, "a schedule: more than %u operations",
                        MLFAB__DAG_OPS_MAX);
  if (code) return script_no_memory(error);
  script->ops[id] = *more;
  *op_p = id;
  return 0;
}

static int script_check_message(const mlfab__script *script, const mlfab__script_message *message,
                                mlfab_error *error) {
  uint32_t workers = script->comm->config->workers;
  unsigned long long bytes = message->bytes;
  if (message->rank < 0 || (uint32_t)message->rank >= workers)
    return mlfab__error(error, MLFAB_ERR_RANK_RANGE, message->rank, 0, 0,
                        "a schedule: rank %d is not one of %u workers", (int)message->rank,
                        workers);
  if ((uint32_t)message->rank == script->comm->rank)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, message->rank, 0, 0,
                        "a schedule: worker %d sends to itself", (int)message->rank);
  if (bytes > SCRIPT_MESSAGE_MAX)
    return mlfab__error(error, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0, 0,
                        "a schedule: a message of %llu bytes, the limit is %d", bytes,
                        SCRIPT_MESSAGE_MAX);
  if (bytes > 0 && !message->data)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "a schedule: data is NULL, and the message has %llu bytes", bytes);
  return 0;
}

/* What comes is combined with elements of this type. */
static int script_check_reduction(const mlfab__script_message *message, uint32_t width,
                                  mlfab_error *error) {
  if (width == 0)
    return mlfab__error(error, MLFAB_ERR_DTYPE, MLFAB_NO_RANK, 0, 0,
                        "a schedule: %d is not an element type", message->dtype);
  if (message->op < MLFAB_SUM || message->op > MLFAB_PRODUCT)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "a schedule: %d is not an operation (MLFAB_SUM ... MLFAB_PRODUCT)",
                        message->op);
  if (message->op == MLFAB_MEAN)
    return script_refuse(error, MLFAB_ERR_UNSUPPORTED,
                         "not supported: a mean of two; add, and divide in a compute operation");
  if ((uintptr_t)message->data % width)
    return script_refuse(error, MLFAB_ERR_ARGUMENT, "data is not aligned to its elements");
  return 0;
}

MLFAB__INTERNAL int mlfab__script_message_op(mlfab__script *script, uint8_t kind,
                                             const mlfab__script_message *given, uint32_t *op_p,
                                             mlfab_error *error) {
  mlfab__script_message message = *given;
  mlfab__dag_op op = {.kind = kind, .tag = message.tag};
  int code = 0;
  if (kind == MLFAB__DAG_RECV_REDUCE) {
    uint32_t width = mlfab__element_bytes(message.dtype);
    code = script_check_reduction(&message, width, error);
    if (code) return code;
    message.bytes = message.bytes > SCRIPT_MESSAGE_MAX ? UINT64_MAX : message.bytes * width;
    op.reduce = MLFAB__COMM_REDUCE(message.dtype, message.op);
  }
  code = script_check_message(script, &message, error);
  if (code) return code;
  op.peer = (uint32_t)message.rank; /* a member's index when it is armed */
  op.bytes = message.bytes;
  const mlfab__script_op more = {.rank = op.peer, .data = (uintptr_t)message.data};
  return script_add(script, &op, &more, op_p, error);
}

MLFAB__INTERNAL int mlfab__script_compute(mlfab__script *script, mlfab_compute_fn fn, void *user,
                                          uint32_t *op_p, mlfab_error *error) {
  const mlfab__dag_op op = {.kind = MLFAB__DAG_COMPUTE};
  const mlfab__script_op more = {.fn = fn, .user = user};
  if (!fn) return script_refuse(error, MLFAB_ERR_ARGUMENT, "the function to compute is NULL");
  return script_add(script, &op, &more, op_p, error);
}

MLFAB__INTERNAL int mlfab__script_nop(mlfab__script *script, uint32_t *op_p, mlfab_error *error) {
  const mlfab__dag_op op = {.kind = MLFAB__DAG_NOP};
  const mlfab__script_op more = {0};
  return script_add(script, &op, &more, op_p, error);
}

static int script_check_op(const mlfab__script *script, uint32_t op, mlfab_error *error) {
  if (op < script->play.dag.nops) return 0;
  return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                      "a schedule: there is no operation %u, only %u of them, from 0", op,
                      script->play.dag.nops);
}

MLFAB__INTERNAL int mlfab__script_after(mlfab__script *script, uint32_t op, uint32_t dependency,
                                        mlfab_error *error) {
  int code = script_check_building(script, error);
  if (!code) code = script_check_op(script, op, error);
  if (!code) code = script_check_op(script, dependency, error);
  if (code) return code;
  code = mlfab__dag_after(&script->play.dag, op, dependency);
  if (code == MLFAB_ERR_LIMIT)
    return mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, "a schedule: more than %u dependencies",
                        MLFAB__DAG_EDGES_MAX);
  return code ? script_no_memory(error) : 0;
}

MLFAB__INTERNAL int mlfab__script_set(mlfab__script *script, uint32_t op, uint32_t need,
                                      uint32_t flags, mlfab_error *error) {
  int code = script_check_building(script, error);
  if (!code) code = script_check_op(script, op, error);
  if (code) return code;
  if (flags & ~(uint32_t)(MLFAB_DAG_OUTSIDE | MLFAB_DAG_OPTIONAL))
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "a schedule: 0x%x are not flags (MLFAB_DAG_*)", flags);
  mlfab__dag_op *its = &script->play.dag.ops[op];
  its->need = need;
  its->outside = (flags & MLFAB_DAG_OUTSIDE) != 0;
  its->optional = (flags & MLFAB_DAG_OPTIONAL) != 0;
  return 0;
}

/* --- opening --- */

static int script_is_message(const mlfab__dag_op *op) {
  return op->kind != MLFAB__DAG_NOP && op->kind != MLFAB__DAG_COMPUTE;
}

static int script_flaw(const mlfab__script *script, uint32_t culprit, mlfab_error *error) {
  const mlfab__dag_op *op = &script->play.dag.ops[culprit];
  switch (script->play.dag.flaw) {
    case MLFAB__DAG_CYCLE:
      return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                          "a schedule: operation %u comes after itself", culprit);
    case MLFAB__DAG_NEED:
      return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                          "a schedule: operation %u needs %u of what it comes after, more than "
                          "there is",
                          culprit, op->need);
    case MLFAB__DAG_TWICE:
      return mlfab__error(error, MLFAB_ERR_ARGUMENT, (int32_t)op->peer, 0, 0,
                          "a schedule: operation %u: another one %s worker %u under tag %u too",
                          culprit, op->kind == MLFAB__DAG_SEND ? "sends to" : "receives from",
                          op->peer, op->tag);
    default:
      return script_no_memory(error);
  }
}

/* Would a round be over without a trigger, and without a message? */
static int script_runs_alone(mlfab__dag *dag) {
  uint32_t id;
  mlfab__dag_start(dag);
  while (mlfab__dag_next(dag, &id)) {
    uint8_t kind = dag->ops[id].kind;
    if (kind != MLFAB__DAG_RECV && kind != MLFAB__DAG_RECV_REDUCE) mlfab__dag_done(dag, id);
  }
  return mlfab__dag_finished(dag);
}

/* Where memory lies: addresses are reckoned from the lowest, as offsets into one stretch, which a
 * message finds at once, in place of a list. What comes after a SEND may change its bytes. */
static void script_lay_out(mlfab__script *script) {
  mlfab__dag *dag = &script->play.dag;
  uintptr_t low = UINTPTR_MAX, high = 0;
  for (uint32_t id = 0; id < dag->nops; id++) {
    if (dag->ops[id].bytes == 0) continue;
    low = (uintptr_t)mlfab__min(low, script->ops[id].data);
    high = (uintptr_t)mlfab__max(high, script->ops[id].data + dag->ops[id].bytes);
  }
  for (uint32_t id = 0; id < dag->nops; id++) {
    mlfab__dag_op *op = &dag->ops[id];
    op->at = op->bytes > 0 ? script->ops[id].data - low : 0;
    op->copy = op->kind == MLFAB__DAG_SEND && dag->first[id + 1] > dag->first[id];
  }
  script->whole = (mlfab_vec){(void *)low, high > low ? high - low : 0};
}

/* Seals it by ranks: `peer` is a rank here. */
static int script_seal(mlfab__script *script, mlfab_error *error) {
  mlfab__dag *dag = &script->play.dag;
  uint32_t culprit;
  if (dag->nops == 0) return script_refuse(error, MLFAB_ERR_ARGUMENT, "it has no operations");
  for (uint32_t id = 0; id < dag->nops; id++) dag->ops[id].peer = script->ops[id].rank;
  if (mlfab__dag_seal(dag, &culprit)) return script_flaw(script, culprit, error);
  if (script->persistent && script_runs_alone(dag))
    return script_refuse(error, MLFAB_ERR_ARGUMENT,
                         "a persistent one must wait for a trigger or a message: this one would "
                         "run without end");
  script_lay_out(script);
  return 0;
}

static int script_check_comm(mlfab__comm *comm, mlfab_error *error) {
  if (comm->dead)
    return mlfab__error(error, MLFAB_ERR_PEER_DEAD, 0, 1, 0, "a schedule: server 0 is dead");
  if (comm->leaving)
    return script_refuse(error, MLFAB_ERR_STATE, "this worker takes no further part");
  return 0;
}

/* --- rounds --- */

static void script_fail_memory(const mlfab__script *script) {
  char text[64];
  snprintf(text, sizeof text, "a schedule: worker %u is out of memory", script->comm->rank);
  mlfab__comm_fail(script->comm, MLFAB_ERR_MEMORY, (int32_t)script->comm->rank, text);
}

/* Requests that wait for rounds below `round` are finished: 0, or an error of this worker alone. */
static void script_finish(mlfab__script *script, uint64_t round, int code, int32_t rank,
                          const char *text) {
  mlfab__comm *comm = script->comm;
  for (uint32_t i = 0; i < script->nwaiters;) {
    mlfab__script_waiter waiter = script->waiters[i];
    if (waiter.round >= round) {
      i++;
      continue;
    }
    script->waiters[i] = script->waiters[--script->nwaiters];
    mlfab__request *request = mlfab__request_find(comm->requests, waiter.request);
    if (request && !request->done)
      mlfab__request_finish(comm->requests, request, code, rank, 0, comm->now_ns, "%s", text);
  }
}

/* Members' indices for ranks. The epoch's, or MLFAB_ERR_MEMORY; script->stranger: a rank that is no
 * member. */
static int script_map(mlfab__script *script) {
  mlfab__comm *comm = script->comm;
  mlfab__dag *dag = &script->play.dag;
  uint64_t bytes = comm->config->workers * sizeof(uint32_t);
  uint32_t culprit, *index;
  if (script->epoch == comm->epoch) return 0;
  index = mlfab__comm_block(comm, bytes);
  if (!index) return MLFAB_ERR_MEMORY;
  memset(index, 0, bytes);
  for (uint32_t m = 0; m < comm->members; m++) index[comm->ranks[m]] = m + 1;
  script->stranger = MLFAB_NO_RANK;
  for (uint32_t id = dag->nops; id-- > 0;) {
    uint32_t rank = script->ops[id].rank;
    if (!script_is_message(&dag->ops[id])) continue;
    if (!index[rank]) script->stranger = (int32_t)rank;
    dag->ops[id].peer = index[rank] - 1;
  }
  mlfab__comm_release(comm, index, bytes);
  script->epoch = comm->epoch;
  if (script->stranger != MLFAB_NO_RANK) return 0;
  return mlfab__dag_seal(dag, &culprit);
}

static int script_stranger(const mlfab__script *script, mlfab_error *error) {
  return mlfab__error(error, MLFAB_ERR_PEER_DEAD, script->stranger, 0, 0,
                      "a schedule: worker %d does not take part any more, and is sent to or "
                      "received from",
                      (int)script->stranger);
}

static int script_may_arm(const mlfab__script *script) {
  const mlfab__comm *comm = script->comm;
  return script->state == MLFAB__SCRIPT_OPEN && script->started && !script->play.armed &&
         comm->phase == MLFAB__COMM_IN && !comm->failing && !comm->ending;
}

/* Not 0: there is nothing more to arm. */
static int script_arm(mlfab__script *script) {
  mlfab__comm *comm = script->comm;
  uint64_t round = script->round;
  int code = script_map(script);
  if (!code && script->stranger != MLFAB_NO_RANK) {
    mlfab_error error;
    code = script_stranger(script, &error);
    script->started = script->persistent;
    script_finish(script, MLFAB__NEVER, code, error.rank, error.text);
    return code;
  }
  script->play.number = script->number++;
  if (!code) code = mlfab__comm_arm(comm, &script->play, comm->now_ns);
  if (code) {
    script_fail_memory(script);
    return code;
  }
  for (uint32_t id = 0; script->npending > 0 && id < script->play.dag.nops; id++) {
    if (!script->ops[id].pending) continue;
    script->ops[id].pending = 0;
    script->npending--;
    if (script->round == round) mlfab__comm_trigger(comm, &script->play, id, 0);
  }
  return 0;
}

/* Arms as many rounds as come to their end at once. */
static void script_run(mlfab__script *script) {
  if (script->arming) return; /* it is seen to further out */
  script->arming = 1;
  while (script_may_arm(script) && !script_arm(script)) {
  }
  script->arming = 0;
}

/* It was told of the end by the epoch (script_over), or has ended by itself. */
static void script_played(void *self, mlfab__play *play, int status, uint64_t now_ns) {
  mlfab__script *script = self;
  (void)play, (void)now_ns;
  if (status) return;
  script->round++;
  script->started = script->persistent;
  script_finish(script, script->round, 0, MLFAB_NO_RANK, "");
  script_run(script);
}

static int script_call(void *self, mlfab__play *play, const mlfab__dag_op *op) {
  mlfab__script *script = self;
  uint32_t id = (uint32_t)(op - play->dag.ops);
  char text[160];
  int code = script->user.compute(script->user.self, script->ops[id].fn, script->ops[id].user,
                                  script->round);
  if (!code) return 0;
  snprintf(text, sizeof text, "a schedule: operation %u of worker %u has returned %d in round %llu",
           id, script->comm->rank, code, (unsigned long long)script->round);
  mlfab__comm_fail(script->comm, MLFAB_ERR_CALLBACK, (int32_t)script->comm->rank, text);
  return MLFAB_ERR_CALLBACK;
}

/* --- what the communicator tells --- */

static void script_begin(void *self, uint64_t round, uint64_t now_ns) {
  mlfab__script *script = self;
  (void)round, (void)now_ns; /* those are of objects whose rounds are the same everywhere */
  script->number = 0;
  script_run(script);
}

static void script_over(void *self, int code, uint64_t now_ns) {
  mlfab__script *script = self;
  (void)code;
  if (script->state != MLFAB__SCRIPT_OPEN) return;
  if (script->lost_end != script->round) script->lost = script->round;
  script->lost_end = ++script->round;
  script->started = script->persistent;
  for (uint32_t id = 0; id < script->play.dag.nops; id++) script->ops[id].pending = 0;
  script->npending = 0;
  for (; script->nwaiters > 0; script->nwaiters--)
    mlfab__comm_end_request(script->comm, script->waiters[script->nwaiters - 1].request, now_ns);
}

/* Whom the round waits for, and why as far as known. */
static int32_t script_awaited(const mlfab__script *script, const char **why_p) {
  mlfab__comm *comm = script->comm;
  int32_t missing = mlfab__comm_missing(comm, script->object);
  *why_p = "is not in this round";
  if (missing != MLFAB_NO_RANK) return missing;
  *why_p = "is awaited";
  return script->play.armed ? mlfab__play_awaits(comm, &script->play) : (int32_t)MLFAB_NO_RANK;
}

static void script_withdraw(void *self, mlfab__request *request, int code, uint64_t now_ns) {
  const mlfab__script *script = self;
  unsigned rank = script->comm->rank;
  unsigned long long round = script->round;
  char text[MLFAB__TEXT_MAX], waited[24];
  const char *why = "";
  int32_t blamed = (int32_t)rank;
  mlfab__duration(waited, now_ns - request->started_ns);
  if (code == MLFAB_ERR_TIMEOUT) blamed = script_awaited(script, &why);
  if (code != MLFAB_ERR_TIMEOUT) {
    snprintf(text, sizeof text, "a schedule (round %llu): withdrawn by worker %u after %s", round,
             rank, waited);
  } else if (blamed == MLFAB_NO_RANK) {
    snprintf(text, sizeof text, "a schedule (round %llu): worker %u's deadline passed after %s",
             round, rank, waited);
  } else {
    snprintf(text, sizeof text,
             "a schedule (round %llu): worker %u's deadline passed after %s: worker %d %s", round,
             rank, waited, (int)blamed, why);
  }
  mlfab__comm_fail(script->comm, code, blamed, text);
}

static int script_called(void *self, uint64_t number, int32_t *awaited_p) {
  const mlfab__script *script = self;
  *awaited_p =
      script->play.armed ? mlfab__play_awaits(script->comm, &script->play) : (int32_t)MLFAB_NO_RANK;
  return number < script->number;
}

static void script_gone(void *self) {
  mlfab__script *script = self;
  script->state = MLFAB__SCRIPT_BUILT;
  script->user.gone(script->user.self);
}

MLFAB__INTERNAL int mlfab__script_open(mlfab__script *script, int persistent, uint64_t timeout_ns,
                                       uint64_t now_ns, mlfab_request *request_p,
                                       mlfab_error *error) {
  mlfab__comm *comm = script->comm;
  const mlfab__comm_object object = {.self = script,
                                     .begin = script_begin,
                                     .over = script_over,
                                     .withdraw = script_withdraw,
                                     .called = script_called,
                                     .free_self = script_gone};
  int code = script_check_building(script, error);
  if (!code) code = script_check_comm(comm, error);
  if (code) return code;
  script->persistent = persistent != 0;
  code = script_seal(script, error);
  if (code) return code;
  if (mlfab__comm_owed(comm, error)) return comm->verdict.code;
  mlfab__comm_enter(comm, now_ns);
  script->object = mlfab__comm_object_add(comm, &object);
  if (!script->object) {
    code = mlfab__error(error, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0, 0,
                        "a schedule: %d objects are open", MLFAB__COMM_OBJECTS);
  } else {
    script->play.signature = mlfab__hash(3, &script->persistent, sizeof script->persistent) | 1;
    const mlfab__comm_call call = {.kind = MLFAB__RING_BARRIER,
                                   .salt = script->play.signature,
                                   .opens = script->object->id,
                                   .words = "the opening of a schedule"};
    script->state = MLFAB__SCRIPT_OPENING;
    code = mlfab__comm_start(comm, &call, timeout_ns, now_ns, request_p, error);
    if (code) mlfab__script_opened(script, code, now_ns);
  }
  mlfab__comm_exit(comm);
  return code;
}

static void script_forget_object(mlfab__script *script) {
  mlfab__comm_object_remove(script->comm, script->object);
  script->state = MLFAB__SCRIPT_BUILT;
  script->object = NULL;
  script->epoch = 0;
}

MLFAB__INTERNAL void mlfab__script_opened(mlfab__script *script, int code, uint64_t now_ns) {
  mlfab__play *play = &script->play;
  if (script->state != MLFAB__SCRIPT_OPENING) return;
  if (code) {
    script_forget_object(script);
    return;
  }
  play->channel = script->object->channel;
  play->spaces[0] = (mlfab__comm_space){&script->whole, 1};
  play->compute = script_call;
  play->over = script_played;
  play->self = script;
  script->state = MLFAB__SCRIPT_OPEN;
  script->started = script->persistent;
  script->round = script->number = script->lost = script->lost_end = 0;
  mlfab__comm_enter(script->comm, now_ns);
  script_run(script);
  mlfab__comm_exit(script->comm);
}

/* --- calls --- */

static int script_check_open(const mlfab__script *script, mlfab_error *error) {
  if (script->state == MLFAB__SCRIPT_OPEN) return 0;
  return script_refuse(error, MLFAB_ERR_STATE, "it is not open");
}

/* 0, or that a rank of it is not in the epoch that stands. */
static int script_check_members(mlfab__script *script, mlfab_error *error) {
  if (script->comm->phase != MLFAB__COMM_IN) return 0;
  if (script_map(script)) return script_no_memory(error);
  return script->stranger == MLFAB_NO_RANK ? 0 : script_stranger(script, error);
}

static int script_await(mlfab__script *script, uint64_t round, uint64_t timeout_ns, uint64_t now_ns,
                        mlfab_request *request_p, mlfab_error *error) {
  mlfab__comm *comm = script->comm;
  mlfab__request *request = NULL;
  if (script->nwaiters < MLFAB__COUNT(script->waiters))
    request = mlfab__request_open(comm->requests, MLFAB__REQUEST_COLLECTIVE,
                                  MLFAB__COMM_REQUEST(script->object->id), now_ns,
                                  timeout_ns ? timeout_ns : comm->config->timeout_ns);
  if (!request) return script_refuse(error, MLFAB_ERR_AGAIN, "too many requests are open");
  script->waiters[script->nwaiters++] = (mlfab__script_waiter){request->id, round};
  *request_p = request->id;
  return 0;
}

MLFAB__INTERNAL int mlfab__script_start(mlfab__script *script, uint64_t timeout_ns, uint64_t now_ns,
                                        mlfab_request *request_p, mlfab_error *error) {
  mlfab__comm *comm = script->comm;
  int code = script_check_open(script, error);
  if (code) return code;
  if (!request_p) return script_refuse(error, MLFAB_ERR_ARGUMENT, "request_p is NULL");
  if (script->persistent)
    return script_refuse(error, MLFAB_ERR_STATE, "a persistent one starts its rounds itself");
  if (script->started)
    return mlfab__error(error, MLFAB_ERR_AGAIN, MLFAB_NO_RANK, 0, 0,
                        "a schedule: round %llu is under way", (unsigned long long)script->round);
  code = script_check_comm(comm, error);
  if (!code && mlfab__comm_owed(comm, error)) return comm->verdict.code;
  if (!code) code = script_check_members(script, error);
  if (!code) code = script_await(script, script->round, timeout_ns, now_ns, request_p, error);
  if (code) return code;
  script->started = 1;
  mlfab__comm_enter(comm, now_ns);
  script_run(script);
  mlfab__comm_exit(comm);
  return 0;
}

/* May the round be waited for? 1: it is over. */
static int script_look(const mlfab__script *script, uint64_t round, mlfab_error *error) {
  unsigned long long number = round;
  if (round >= script->lost && round < script->lost_end)
    return mlfab__error(error, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
                        "a schedule: round %llu was ended by a failure; the next is %llu", number,
                        (unsigned long long)script->round);
  if (round < script->round) return 1;
  if (script->persistent || (script->started && round == script->round)) return 0;
  return mlfab__error(error, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
                      "a schedule: round %llu has not been started", number);
}

MLFAB__INTERNAL int mlfab__script_wait(mlfab__script *script, uint64_t round, uint64_t timeout_ns,
                                       uint64_t now_ns, mlfab_request *request_p,
                                       mlfab_error *error) {
  *request_p = 0;
  int code = script_check_open(script, error);
  if (code) return code;
  if (mlfab__comm_owed(script->comm, error)) return script->comm->verdict.code;
  code = script_look(script, round, error);
  if (code) return code == 1 ? 0 : code;
  code = script_check_comm(script->comm, error);
  if (!code) code = script_check_members(script, error);
  return code ? code : script_await(script, round, timeout_ns, now_ns, request_p, error);
}

MLFAB__INTERNAL int mlfab__script_trigger(mlfab__script *script, uint32_t op, int inside,
                                          uint64_t now_ns, mlfab_error *error) {
  mlfab__comm *comm = script->comm;
  int code = script_check_open(script, error);
  if (!code) code = script_check_op(script, op, error);
  if (code) return code;
  if (!script->play.dag.ops[op].outside)
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "a schedule: operation %u is not MLFAB_DAG_OUTSIDE", op);
  code = script_check_comm(comm, error);
  if (!code && !inside && mlfab__comm_owed(comm, error)) return comm->verdict.code;
  if (!code && !script->started)
    return script_refuse(error, MLFAB_ERR_STATE, "no round is under way");
  if (!code) code = script_check_members(script, error);
  if (code) return code;
  if (script->play.armed) {
    mlfab__comm_trigger(comm, &script->play, op, inside ? 0 : now_ns);
  } else if (!script->ops[op].pending) {
    script->ops[op].pending = 1;
    script->npending++;
  }
  return 0;
}

/* --- the end --- */

MLFAB__INTERNAL int mlfab__script_lends(const mlfab__script *script) {
  return script->play.armed && script->play.lent > 0;
}

static void script_close(mlfab__script *script) {
  mlfab__comm *comm = script->comm;
  char text[MLFAB__TEXT_MAX];
  snprintf(text, sizeof text, "a schedule (round %llu): freed by worker %u",
           (unsigned long long)script->round, comm->rank);
  if (script->started && !script->persistent)
    mlfab__comm_fail(comm, MLFAB_ERR_CANCELLED, (int32_t)comm->rank, text);
  script->started = 0;
  mlfab__comm_disarm(comm, &script->play);
  script_finish(script, MLFAB__NEVER, MLFAB_ERR_CANCELLED, (int32_t)comm->rank, text);
  /* The next round of a persistent one has begun elsewhere by itself, and nobody may miss it. */
  if (script->persistent) script->object->upto = MLFAB__NEVER;
  script_forget_object(script);
}

MLFAB__INTERNAL void mlfab__script_free(mlfab__script *script) {
  mlfab__env *env = script->comm->env;
  if (script->state == MLFAB__SCRIPT_OPENING) script_forget_object(script);
  if (script->state == MLFAB__SCRIPT_OPEN) script_close(script);
  mlfab__dag_free(&script->play.dag);
  mlfab__free(env, script->ops, script->room * sizeof *script->ops);
  script->ops = NULL;
  script->room = 0;
}
