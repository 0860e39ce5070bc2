/* calls.c - a node: its calls. What is common to all is checked here once; what a call says is checked by the
 * role that carries it out.
 *
 * Collectives: reads the options. What there is to check beside, the communicator checks (comm.h). */
#include "calls.h"

#include "../kernels/combine.h"
#include "../sparse/sparse_push.h"

/* A call that is being submitted. */
typedef struct calls_entry {
  mlfab_node *node;
  const mlfab_call *call;
  mlfab_request *request_p;
  mlfab_error *error;
  mlfab__collective *collective;
  int may_share;
} calls_entry;

/* --- the model, pushes, pulls --- */

static int calls_set_schedule(const calls_entry *e) {
  mlfab_node *node = e->node;
  mlfab_schedule s;
  if (!e->call->options)
    return MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "set_schedule: schedule is NULL");
  int code = mlfab__schedule_complete(e->call->options, &s, e->error);
  if (code) return code;
  if (node->config.scheduler == MLFAB_SCHEDULER_NONE)
    return MLFAB__FAIL(e->error, MLFAB_ERR_STATE, "set_schedule: this fabric has no scheduler");
  if (s.delay_bound != MLFAB_UNBOUNDED && node->worker.stands &&
      mlfab__sync_rounds(node->worker.define.consistency.kind))
    return MLFAB__FAIL(e->error, MLFAB_ERR_UNSUPPORTED,
                       "not supported: a delay bound with rounds, which drop nothing");
  if (node->routes[0].dead)
    return mlfab__error(e->error, MLFAB_ERR_PEER_DEAD, 0, 1, 0, "set_schedule: server 0 is dead");
  if (node->routes[0].link == MLFAB__NO_LINK)
    return mlfab__error(e->error, MLFAB_ERR_AGAIN, 0, 1, 0,
                        "set_schedule: server 0, whose schedule counts, is being called again");
  const mlfab__schedule frame = {.delay_bound = s.delay_bound,
                                 .plan_ahead_ns = s.plan_ahead_ns,
                                 .interval_ns = s.interval_ns,
                                 .best = s.best,
                                 .whole = s.whole,
                                 .no_aggregation = s.no_aggregation,
                                 .no_distribution = s.no_distribution};
  for (uint32_t i = 0; i < node->config.servers; i++)
    MLFAB__POST(&node->worker.port, i, MLFAB__SCHEDULE, schedule, &frame);
  return 0;
}

/* Ghosts need transports that carry them. */
static int calls_check_ghost(const calls_entry *e) {
  const mlfab_node *node = e->node;
  const mlfab_model_options *options = e->call->options;
  int ghost = options && MLFAB__HAS(options, mlfab_model_options, ghost) && options->ghost;
  for (uint32_t s = 0; ghost && s < node->config.servers; s++) {
    uint32_t link = node->routes[s].link;
    if (link == MLFAB__NO_LINK || node->links[link].caps & MLFAB_CAP_GHOST) continue;
    return mlfab__error(e->error, MLFAB_ERR_UNSUPPORTED, (int32_t)s, 1, 0,
                        "not supported: ghost tensors on a transport that carries bytes");
  }
  return 0;
}

static int calls_worker(const calls_entry *e) {
  const mlfab_call *c = e->call;
  mlfab__worker *worker = &e->node->worker;
  mlfab_request *r = e->request_p;
  mlfab_error *error = e->error;
  uint64_t now = e->node->now_ns, timeout = c->timeout_ns;
  int code = 0;
  switch (c->kind) {
    case MLFAB_CALL_TENSOR_ADD:
      return mlfab__worker_tensor(worker, c->tensor, c->dtype, c->count, error);
    case MLFAB_CALL_SET_FILTER:
      return mlfab__worker_set_filter(worker, c->tensor, c->options, error);
    case MLFAB_CALL_SET_SCHEDULE:
      return calls_set_schedule(e);
    case MLFAB_CALL_MODEL_START:
      code = calls_check_ghost(e);
      return code ? code : mlfab__worker_model(worker, c->options, c->bufs, c->n, now, r, error);
    case MLFAB_CALL_PUSH:
      return mlfab__worker_push(worker, c->bufs, c->n, c->options, now, r, error);
    case MLFAB_CALL_PUSH_SPARSE:
      return mlfab__worker_push_sparse(worker, c->tensor, c->indices, c->data, c->count, c->options,
                                       now, r, error);
    case MLFAB_CALL_PULL:
      return mlfab__worker_pull(worker, c->bufs, c->n, c->options, now, r, error);
    case MLFAB_CALL_JOIN:
      code = mlfab__worker_join(worker, timeout, now, r, error);
      if (!code) mlfab__comm_leave(&e->node->comm); /* no further part in collectives either */
      return code;
    case MLFAB_CALL_SET_SYNC:
      return mlfab__worker_set_sync(worker, c->options, c->server, c->tensor, timeout, now, r,
                                    error);
    default:
      return mlfab__worker_set_servers(worker, c->servers, c->n, timeout, now, r, error);
  }
}

/* --- collectives --- */

/* By kind of call, from MLFAB_CALL_ALLREDUCE on. */
static const struct {
  uint8_t kind; /* MLFAB__COLLECTIVE_* */
  const char *words;
} calls_collectives[] = {{MLFAB__COLLECTIVE_ALLREDUCE, "an allreduce"},
                         {MLFAB__COLLECTIVE_ALLREDUCE, "an allreduce"},
                         {MLFAB__COLLECTIVE_REDUCE_SCATTER, "a reduce-scatter"},
                         {MLFAB__COLLECTIVE_ALLGATHER, "an allgather"},
                         {MLFAB__COLLECTIVE_BROADCAST, "a broadcast"},
                         {MLFAB__COLLECTIVE_BARRIER, "a barrier"}};

#define CALLS_OPTION(options, member) \
  (MLFAB__HAS(options, mlfab_collective, member) ? (options)->member : 0)

/* What the options say of the reduction; other kinds do not look at it. */
static int calls_reduction(const mlfab_collective *options, mlfab__comm_call *call,
                           mlfab_error *error) {
  call->op = (int)mlfab__min(CALLS_OPTION(options, op), INT32_MAX);
  call->refuse_nan = CALLS_OPTION(options, refuse_nan) != 0;
  call->reduce = CALLS_OPTION(options, reduce);
  if (!call->reduce) return 0;
  call->reduce_user = CALLS_OPTION(options, user);
  call->width = CALLS_OPTION(options, element_bytes);
  call->ordered = CALLS_OPTION(options, ordered) != 0;
  call->dtype = 0;
  if (!call->refuse_nan) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                     "%s: not supported: refuse_nan with a reducer, whose elements are not numbers",
                     call->words);
}

/* The blocks of all ranks, as one buffer. */
static int calls_blocks(const calls_entry *e) {
  mlfab__comm_call *call = &e->collective->call;
  uint64_t *sum = &e->collective->one.count;
  if (!e->call->counts)
    return MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "%s: counts is NULL", call->words);
  *sum = 0;
  for (uint32_t r = 0; r < e->node->config.workers; r++)
    *sum = mlfab__add_sat(*sum, e->call->counts[r]);
  call->counts = e->call->counts;
  if (call->kind == MLFAB__COLLECTIVE_ALLGATHER && !mlfab__element_bytes(call->dtype))
    return MLFAB__FAIL(e->error, MLFAB_ERR_DTYPE, "%s: %d is not an element type", call->words,
                       call->dtype);
  return 0;
}

/* Completes what the communicator is asked for. */
static int calls_complete(const calls_entry *e, const mlfab_collective *options) {
  const mlfab_call *c = e->call;
  mlfab__comm_call *call = &e->collective->call;
  int code = 0;
  switch (c->kind) {
    case MLFAB_CALL_BROADCAST:
      call->root = c->root;
      return 0;
    case MLFAB_CALL_ALLREDUCE_LIST:
      call->vecs = c->vecs;
      call->n = c->n;
      if (c->n > 0 && !c->vecs)
        code = MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "%s: the list of buffers is NULL",
                           call->words);
  }
  call->dtype = c->dtype;
  if (call->kind != MLFAB__COLLECTIVE_ALLREDUCE) code = calls_blocks(e);
  if (code || call->kind == MLFAB__COLLECTIVE_ALLGATHER) return code;
  return calls_reduction(options, call, e->error);
}

static int calls_collective(const calls_entry *e) {
  const mlfab_call *c = e->call;
  const mlfab_collective plain = {.size = sizeof plain, .timeout_ns = c->timeout_ns};
  const mlfab_collective *options = c->options;
  mlfab__comm_call *call = &e->collective->call;
  if (!options || c->kind == MLFAB_CALL_ALLREDUCE) options = &plain;
  memset(call, 0, sizeof *call);
  e->collective->one = (mlfab_vec){c->data, c->count};
  call->vecs = &e->collective->one;
  call->n = 1;
  call->kind = calls_collectives[c->kind - MLFAB_CALL_ALLREDUCE].kind;
  call->words = calls_collectives[c->kind - MLFAB_CALL_ALLREDUCE].words;
  call->algorithm = (uint8_t)mlfab__min(CALLS_OPTION(options, algorithm), UINT8_MAX);
  if (options->size == 0)
    return MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "%s: options.size is not set", call->words);
  uint64_t timeout_ns = CALLS_OPTION(options, timeout_ns);
  if (c->kind == MLFAB_CALL_BARRIER && e->node->comm.leaving)
    return MLFAB__FAIL(e->error, MLFAB_ERR_STATE, "%s: this worker takes no further part",
                       call->words);
  if (c->kind == MLFAB_CALL_BARRIER)
    return mlfab__barrier_start(&e->node->barrier, timeout_ns, e->node->now_ns, e->request_p,
                                e->error);
  int code = calls_complete(e, options);
  if (code) return code;
  call->outside = e->may_share && call->kind <= MLFAB__COLLECTIVE_ALLGATHER && !call->reduce &&
                  call->algorithm == MLFAB_ALGORITHM_AUTO;
  return mlfab__comm_start(&e->node->comm, call, timeout_ns, e->node->now_ns, e->request_p,
                           e->error);
}
#undef CALLS_OPTION

/* --- partial and stochastic reductions --- */

static int calls_partial(const calls_entry *e) {
  const mlfab_call *c = e->call;
  mlfab__comm *comm = &e->node->comm;
  mlfab_request *r = e->request_p;
  mlfab_error *error = e->error;
  uint64_t now = e->node->now_ns, timeout = c->timeout_ns;
  switch (c->kind) {
    case MLFAB_CALL_PARTIAL_OPEN:
      return mlfab__partial_run_open(comm, c->count, c->dtype, c->options, timeout, now, c->id_p, r,
                                     error);
    case MLFAB_CALL_PARTIAL_REDUCE:
      return mlfab__partial_run_start(comm, c->id, c->data, timeout, now, c->info_p, r, error);
    case MLFAB_CALL_PARTIAL_FLUSH:
      return mlfab__partial_run_flush(comm, c->id, c->data, timeout, now, r, error);
    case MLFAB_CALL_PARTIAL_RESYNC:
      return mlfab__partial_run_resync(comm, c->id, c->data, c->count, c->dtype, timeout, now, r,
                                       error);
    default:
      return mlfab__partial_run_close(comm, c->id, error);
  }
}

#if MLFAB_WITH_STOCHASTIC
static int calls_stochastic(const calls_entry *e) {
  const mlfab_call *c = e->call;
  mlfab__comm *comm = &e->node->comm;
  mlfab_request *r = e->request_p;
  mlfab_error ignored, *error = e->error;
  uint64_t now = e->node->now_ns, timeout = c->timeout_ns;
  int code = 0;
  switch (c->kind) {
    case MLFAB_CALL_STOCHASTIC_OPEN:
      return mlfab__stochastic_open(comm, c->count, c->dtype, c->options, timeout, now, c->id_p, r,
                                    error);
    case MLFAB_CALL_STOCHASTIC_STATE:
      code = mlfab__stochastic_state(comm, c->id, error);
      if (code) (void)mlfab__stochastic_close(comm, c->id, &ignored);
      return code;
    case MLFAB_CALL_STOCHASTIC_REDUCE:
      return mlfab__stochastic_start(comm, c->id, c->data, timeout, now, c->info_p, r, error);
    default:
      return mlfab__stochastic_close(comm, c->id, error);
  }
}
#else
static int calls_stochastic(const calls_entry *e) {
  return MLFAB__FAIL(e->error, MLFAB_ERR_UNSUPPORTED,
                     "stochastic reductions were left out: MLFAB_WITH_STOCHASTIC is 0");
}
#endif

/* --- submitting --- */

enum {
  CALLS_AT_ONCE = 1, /* has no request */
  CALLS_UNASKED = 2, /* request_p may be NULL */
  CALLS_EARLY = 4,   /* before the fabric is complete, too */
  CALLS_OPENS = 8    /* needs id_p */
};

static const uint8_t calls_flags[MLFAB_CALL_STOCHASTIC_CLOSE + 1] = {
    [MLFAB_CALL_TENSOR_ADD] = CALLS_AT_ONCE | CALLS_EARLY,
    [MLFAB_CALL_SET_FILTER] = CALLS_AT_ONCE,
    [MLFAB_CALL_SET_SCHEDULE] = CALLS_AT_ONCE,
    [MLFAB_CALL_PUSH] = CALLS_UNASKED,
    [MLFAB_CALL_PUSH_SPARSE] = CALLS_UNASKED,
    [MLFAB_CALL_PARTIAL_OPEN] = CALLS_OPENS,
    [MLFAB_CALL_PARTIAL_CLOSE] = CALLS_AT_ONCE,
    [MLFAB_CALL_STOCHASTIC_OPEN] = CALLS_OPENS,
    [MLFAB_CALL_STOCHASTIC_STATE] = CALLS_AT_ONCE,
    [MLFAB_CALL_STOCHASTIC_CLOSE] = CALLS_AT_ONCE};

/* What is wrong with the call as such. */
static int calls_check(const calls_entry *e) {
  const mlfab_call *c = e->call;
  const char *wrong = NULL;
  uint32_t flags = 0;
  if (!c || !MLFAB__HAS(c, mlfab_call, timeout_ns))
    wrong = c ? "call.size is not set" : "call is NULL";
  else if (c->kind == 0 || c->kind >= MLFAB__COUNT(calls_flags))
    wrong = "call.kind is unknown";
  else
    flags = calls_flags[c->kind];
  if (!wrong && !e->request_p && !(flags & (CALLS_AT_ONCE | CALLS_UNASKED)))
    wrong = "request_p is NULL";
  if (!wrong && flags & CALLS_OPENS && !c->id_p) wrong = "id_p is NULL";
  return wrong ? MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "%s", wrong) : 0;
}

static int calls_begin(const calls_entry *e) {
  if (e->call->kind < MLFAB_CALL_ALLREDUCE) return calls_worker(e);
  if (e->call->kind < MLFAB_CALL_PARTIAL_OPEN) return calls_collective(e);
  if (e->call->kind < MLFAB_CALL_STOCHASTIC_OPEN) return calls_partial(e);
  return calls_stochastic(e);
}

MLFAB__INTERNAL int mlfab__node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                       mlfab_request *request_p, mlfab__collective *shared) {
  mlfab_error error;
  mlfab__collective local;
  if (!node) return MLFAB_ERR_ARGUMENT;
  calls_entry e = {.node = node,
                   .call = call,
                   .request_p = request_p,
                   .error = &error,
                   .collective = shared ? shared : &local,
                   .may_share = shared != NULL};
  e.collective->call.outside = 0;
  int code = calls_check(&e);
  int early = !code && calls_flags[call->kind] & CALLS_EARLY && node->is_worker;
  if (!code && !early) code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code) code = calls_begin(&e);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                mlfab_request *request_p) {
  return mlfab__node_submit(node, call, now_ns, request_p, NULL);
}

MLFAB_API int mlfab_node_cached(mlfab_node *node, uint32_t tensor, const void **data_p,
                                uint64_t *count_p) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, node->now_ns, 1, &error);
  if (!code) code = mlfab__worker_cached(&node->worker, tensor, data_p, count_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_node_explain(const mlfab_node *node, char *text, size_t room, size_t *bytes_p) {
  if (!node || (!text && room > 0)) return MLFAB_ERR_ARGUMENT;
  if (!node->is_scheduler) return MLFAB_ERR_STATE;
  mlfab__scheduler_explain(node->scheduler, text, room, bytes_p);
  return 0;
}
