/* calls.c - the calls of a node. This file checks the common rules of all calls; the role that carries out a call
 * checks its members. Calls of optional groups are in calls_*.c; the table below names them. */
#include "calls.h"

#include "../coll/barrier.h"

static int calls_barrier(const mlfab__call_in *e) {
  const mlfab_collective *options = e->call->options;
  uint64_t timeout_ns = 0;
  if (options && options->size == 0)
    return MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "a barrier: options.size is not set");
  if (options)
    timeout_ns = MLFAB__HAS(options, mlfab_collective, timeout_ns) ? options->timeout_ns : 0;
  return mlfab__barrier_start(e->node->parts->barrier, timeout_ns, e->node->now_ns, e->request_p,
                              e->error);
}

/* This worker takes no further part in barriers and collectives either. */
static int calls_finish(const mlfab__call_in *e) {
  const mlfab__parts *parts = e->node->parts;
  int code =
      parts->finish(parts->finisher, e->call->timeout_ns, e->node->now_ns, e->request_p, e->error);
  if (code) return code;
  MLFAB__EACH_ROLE(role, e->node, finish) role->finish(role->self);
  return 0;
}

/* --- submitting --- */

/* By kind. */
static const struct {
  mlfab__call_begin *begin;
  uint8_t flags;
} calls_kinds[] = {[MLFAB_CALL_TENSOR_ADD] = {mlfab__calls_push, CALLS_AT_ONCE | CALLS_EARLY},
                   [MLFAB_CALL_SET_FILTER] = {mlfab__calls_sparse, CALLS_AT_ONCE},
                   [MLFAB_CALL_SET_SCHEDULE] = {mlfab__calls_sched, CALLS_AT_ONCE},
                   [MLFAB_CALL_MODEL_START] = {mlfab__calls_push, CALLS_BUFFERS},
                   [MLFAB_CALL_PUSH] = {mlfab__calls_push, CALLS_UNASKED | CALLS_BUFFERS},
                   [MLFAB_CALL_PUSH_SPARSE] = {mlfab__calls_sparse, CALLS_UNASKED | CALLS_BUFFERS},
                   [MLFAB_CALL_PULL] = {mlfab__calls_push, CALLS_BUFFERS},
                   [MLFAB_CALL_FINISH] = {calls_finish, 0},
                   [MLFAB_CALL_SET_SYNC] = {mlfab__calls_push, 0},
                   [MLFAB_CALL_SET_SERVERS] = {mlfab__calls_reshard, 0},
                   [MLFAB_CALL_ALLREDUCE] = {mlfab__calls_coll, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_REDUCE_SCATTER] = {mlfab__calls_coll, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_ALLGATHER] = {mlfab__calls_coll, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_BROADCAST] = {mlfab__calls_coll, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_BARRIER] = {calls_barrier, 0},
                   [MLFAB_CALL_PARTIAL_OPEN] = {mlfab__calls_partial, CALLS_OPENS},
                   [MLFAB_CALL_PARTIAL_REDUCE] = {mlfab__calls_partial, CALLS_BUFFERS},
                   [MLFAB_CALL_PARTIAL_FLUSH] = {mlfab__calls_partial, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_PARTIAL_CLOSE] = {mlfab__calls_partial, CALLS_AT_ONCE},
                   [MLFAB_CALL_STOCHASTIC_OPEN] = {mlfab__calls_stochastic, CALLS_OPENS},
                   [MLFAB_CALL_STOCHASTIC_STATE] = {mlfab__calls_stochastic, CALLS_AT_ONCE},
                   [MLFAB_CALL_STOCHASTIC_REDUCE] = {mlfab__calls_stochastic, CALLS_BUFFERS},
                   [MLFAB_CALL_STOCHASTIC_CLOSE] = {mlfab__calls_stochastic, CALLS_AT_ONCE},
                   [MLFAB_CALL_CHECKPOINT] = {mlfab__calls_checkpoint, 0},
                   [MLFAB_CALL_RESTORE] = {mlfab__calls_checkpoint, CALLS_AT_ONCE},
                   [MLFAB_CALL_PULL_VIEW] = {mlfab__calls_lend, 0},
                   [MLFAB_CALL_VIEW_RELEASE] = {mlfab__calls_lend, CALLS_AT_ONCE}};

MLFAB__INTERNAL int mlfab__calls_check(const mlfab__call_in *e, mlfab__call_begin **begin_p,
                                       uint32_t *flags_p) {
  const mlfab_call *c = e->call;
  const char *wrong = NULL;
  uint32_t flags = 0;
  if (!c || !MLFAB__HAS(c, mlfab_call, timeout_ns))
    wrong = c ? "call.size is not set" : "call is NULL";
  else if (c->kind == 0 || c->kind >= MLFAB__COUNT(calls_kinds))
    wrong = "call.kind is unknown";
  else
    flags = calls_kinds[c->kind].flags;
  if (!wrong && !e->request_p && !(flags & (CALLS_AT_ONCE | CALLS_UNASKED)))
    wrong = "request_p is NULL";
  if (!wrong && flags & CALLS_OPENS && !c->id_p) wrong = "id_p is NULL";
  if (!wrong) *begin_p = calls_kinds[c->kind].begin;
  *flags_p = flags;
  return wrong ? MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "%s", wrong) : 0;
}

MLFAB__INTERNAL int mlfab__node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                       mlfab_request *request_p, mlfab__collective *shared) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  mlfab__call_in e = {
      .node = node, .call = call, .request_p = request_p, .error = &error, .shared = shared};
  mlfab__call_begin *begin = NULL;
  uint32_t flags = 0;
  int code = mlfab__calls_check(&e, &begin, &flags);
  int early = !code && flags & CALLS_EARLY && node->is_worker;
  if (!code && !early) code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code) code = begin(&e); /* NOLINT(clang-analyzer-core.CallAndMessage): the check set it */
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                mlfab_request *request_p) {
  return mlfab__node_submit(node, call, now_ns, request_p, NULL);
}
