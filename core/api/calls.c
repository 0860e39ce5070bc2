/* calls.c - the calls of a node. This file checks what all calls have in common; the role that carries a call out
 * checks its members. Calls of optional groups are in calls_*.c; the table below names them. */
#include "calls.h"

#include "../coll/barrier.h"
#include "../worker/worker.h"

/* --- the model, pushes, pulls --- */

/* Ghost tensors need transports that carry them. */
static int calls_check_ghost(const mlfab__call_in *e) {
  const mlfab_node *node = e->node;
  const mlfab_model_options *options = e->call->options;
  int ghost = options && MLFAB__HAS(options, mlfab_model_options, ghost) && options->ghost;
  for (uint32_t s = 0; ghost && s < node->config.servers; s++) {
    uint32_t link = node->routes[s].link;
    if (link == MLFAB__NO_LINK || node->links[link].caps & MLFAB_CAP_GHOST) continue;
    return mlfab__error(
        e->error, MLFAB_ERR_UNSUPPORTED, (int32_t)s, 1, 0,
        "not supported: ghost tensors (data NULL) on a transport that carries bytes");
  }
  return 0;
}

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

static int calls_core(const mlfab__call_in *e) {
  const mlfab_call *c = e->call;
  mlfab__worker *worker = e->node->parts->worker;
  mlfab_request *r = e->request_p;
  mlfab_error *error = e->error;
  uint64_t now = e->node->now_ns, timeout = c->timeout_ns;
  int code = 0;
  switch (c->kind) {
    case MLFAB_CALL_TENSOR_ADD:
      return mlfab__worker_tensor(worker, c->tensor, c->dtype, c->count, error);
    case MLFAB_CALL_MODEL_START:
      code = calls_check_ghost(e);
      return code ? code : mlfab__worker_model(worker, c->options, c->bufs, c->n, now, r, error);
    case MLFAB_CALL_PUSH:
      return mlfab__worker_push(worker, c->bufs, c->n, c->options, now, r, error);
    case MLFAB_CALL_PULL:
      return mlfab__worker_pull(worker, c->bufs, c->n, c->options, now, r, error);
    case MLFAB_CALL_FINISH:
      code = mlfab__worker_finish(worker, timeout, now, r, error);
      if (!code)
        mlfab__roles_finish(e->node); /* no further part in barriers and collectives either */
      return code;
    case MLFAB_CALL_SET_SYNC:
      return mlfab__worker_set_sync(worker, c->options, c->server, c->tensor, timeout, now, r,
                                    error);
    default:
      return calls_barrier(e);
  }
}

/* --- submitting --- */

/* By kind. */
static const struct {
  mlfab__call_begin *begin;
  uint8_t flags;
} calls_kinds[] = {[MLFAB_CALL_TENSOR_ADD] = {calls_core, CALLS_AT_ONCE | CALLS_EARLY},
                   [MLFAB_CALL_SET_FILTER] = {mlfab__calls_sparse, CALLS_AT_ONCE},
                   [MLFAB_CALL_SET_SCHEDULE] = {mlfab__calls_sched, CALLS_AT_ONCE},
                   [MLFAB_CALL_MODEL_START] = {calls_core, CALLS_BUFFERS},
                   [MLFAB_CALL_PUSH] = {calls_core, CALLS_UNASKED | CALLS_BUFFERS},
                   [MLFAB_CALL_PUSH_SPARSE] = {mlfab__calls_sparse, CALLS_UNASKED | CALLS_BUFFERS},
                   [MLFAB_CALL_PULL] = {calls_core, CALLS_BUFFERS},
                   [MLFAB_CALL_FINISH] = {calls_core, 0},
                   [MLFAB_CALL_SET_SYNC] = {calls_core, 0},
                   [MLFAB_CALL_SET_SERVERS] = {mlfab__calls_reshard, 0},
                   [MLFAB_CALL_ALLREDUCE] = {mlfab__calls_coll, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_REDUCE_SCATTER] = {mlfab__calls_coll, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_ALLGATHER] = {mlfab__calls_coll, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_BROADCAST] = {mlfab__calls_coll, CALLS_BUFFERS | CALLS_MEETS},
                   [MLFAB_CALL_BARRIER] = {calls_core, 0},
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
  mlfab__call_begin *begin;
  uint32_t flags;
  int code = mlfab__calls_check(&e, &begin, &flags);
  int early = !code && flags & CALLS_EARLY && node->is_worker;
  if (!code && !early) code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code) code = begin(&e);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                mlfab_request *request_p) {
  return mlfab__node_submit(node, call, now_ns, request_p, NULL);
}

MLFAB_API int mlfab_node_push_status(mlfab_node *node, uint64_t seq, int *status_p) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  if (!status_p)
    return MLFAB__FAIL(&node->requests.last, MLFAB_ERR_ARGUMENT, "push_status: status_p is NULL");
  if (!node->is_worker)
    return MLFAB__FAIL(&node->requests.last, MLFAB_ERR_STATE,
                       "push_status: this node is not a worker");
  int code = mlfab__worker_status(node->parts->worker, seq, status_p);
  return code ? MLFAB__FAIL(&node->requests.last, code, "push_status: update %llu is unknown",
                            (unsigned long long)seq)
              : 0;
}
