/* calls_coll.c - collectives: reads the options of a call. The communicator checks the rest (comm.h). */
#include "calls_coll.h"
#include "extent.h"

#include "../kernels/kernels_combine.h"

/* --- a node --- */

/* By kind of call, from MLFAB_CALL_ALLREDUCE on. */
static const struct {
  uint8_t kind; /* MLFAB__COLLECTIVE_* */
  const char *words;
} coll_collectives[] = {{MLFAB__COLLECTIVE_ALLREDUCE, "an allreduce"},
                        {MLFAB__COLLECTIVE_REDUCE_SCATTER, "a reduce-scatter"},
                        {MLFAB__COLLECTIVE_ALLGATHER, "an allgather"},
                        {MLFAB__COLLECTIVE_BROADCAST, "a broadcast"}};

#define CALLS_OPTION(options, member) \
  (MLFAB__HAS(options, mlfab_collective, member) ? (options)->member : 0)

/* Reads the options of the reduction. */
static int coll_reduction(const mlfab_collective *options, mlfab__comm_call *call,
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
static int coll_blocks(const mlfab__call_in *e, mlfab__collective *into) {
  mlfab__comm_call *call = &into->call;
  uint64_t *sum = &into->one.count;
  if (!e->call->counts)
    return MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "%s: counts is NULL", call->words);
  *sum = 0;
  for (uint32_t r = 0; r < e->node->config.workers; r++)
    *sum = mlfab__add_sat(*sum, e->call->counts[r]);
  call->counts = e->call->counts;
  if (call->kind == MLFAB__COLLECTIVE_ALLGATHER && call->dtype == MLFAB_BYTES)
    call->dtype = 0;
  else if (call->kind == MLFAB__COLLECTIVE_ALLGATHER && !mlfab__element_bytes(call->dtype))
    return MLFAB__FAIL(e->error, MLFAB_ERR_DTYPE, "%s: %d is not an element type", call->words,
                       call->dtype);
  return 0;
}

/* Fills in the members that depend on the kind. */
static int coll_complete(const mlfab__call_in *e, mlfab__collective *into,
                         const mlfab_collective *options) {
  const mlfab_call *c = e->call;
  mlfab__comm_call *call = &into->call;
  int code = 0;
  switch (c->kind) {
    case MLFAB_CALL_BROADCAST:
      call->root = c->root;
      return 0;
    case MLFAB_CALL_ALLREDUCE:
      call->vecs = c->vecs;
      call->n = c->n;
      if (c->n > 0 && !c->vecs)
        code = MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "%s: the list of buffers is NULL",
                           call->words);
  }
  call->dtype = c->dtype;
  if (call->kind != MLFAB__COLLECTIVE_ALLREDUCE) code = coll_blocks(e, into);
  if (code || call->kind == MLFAB__COLLECTIVE_ALLGATHER) return code;
  return coll_reduction(options, call, e->error);
}

/* --- the buffers of a call --- */

#define CALLS_BOTH (MLFAB__EXTENT_IN | MLFAB__EXTENT_OUT)

/* The inputs of the options, one for each of n buffers. */
static void coll_visit_input(const mlfab__call_in *e, const mlfab_collective *options, uint32_t i,
                             uint64_t bytes, uint32_t width) {
  const void **inputs = (const void **)(uintptr_t)options->inputs;
  const void *at = e->visit->extent(e, inputs[i], bytes, width, MLFAB__EXTENT_IN);
  if (at != inputs[i]) inputs[i] = at;
}

static void coll_visit_vecs(const mlfab__call_in *e, const mlfab_collective *options,
                            uint32_t width) {
  const mlfab_call *c = e->call;
  int apart = CALLS_OPTION(options, inputs) != NULL;
  for (uint32_t i = 0; c->vecs && i < c->n; i++) {
    const mlfab_vec *vec = &c->vecs[i];
    uint64_t bytes = mlfab__mul_sat(vec->count, width);
    if (apart) coll_visit_input(e, options, i, bytes, width);
    void *at = e->visit->extent(e, vec->data, bytes, width, apart ? MLFAB__EXTENT_OUT : CALLS_BOTH);
    if (at != vec->data) ((mlfab_vec *)(uintptr_t)vec)->data = at;
  }
}

/* Blocks of all ranks: a reduce-scatter reads them all and writes this rank's; an allgather the reverse. */
static void coll_visit_blocks(const mlfab__call_in *e, const mlfab_collective *options,
                              uint32_t width) {
  const mlfab_call *c = e->call;
  const uint32_t workers = e->node->config.workers, me = (uint32_t)e->node->config.rank;
  int apart = CALLS_OPTION(options, inputs) != NULL;
  int gathers = c->kind == MLFAB_CALL_ALLGATHER;
  uint64_t all = 0, before = 0, own = 0;
  for (uint32_t r = 0; c->counts && r < workers; r++) {
    if (r == me) before = all, own = mlfab__mul_sat(c->counts[r], width);
    all = mlfab__add_sat(all, mlfab__mul_sat(c->counts[r], width));
  }
  mlfab__extent extent = {.at = c->data, .bytes = all, .align = width, .out_bytes = all};
  if (apart) coll_visit_input(e, options, 0, gathers ? own : all, width);
  if (gathers && !apart) extent.in = before, extent.in_bytes = own;
  if (!gathers) extent.out = before, extent.out_bytes = own;
  if (!gathers && !apart) extent.in_bytes = all;
  e->visit->data(e, &extent);
}

static int coll_visit(const mlfab__call_in *e, const mlfab_collective *options) {
  const mlfab_call *c = e->call;
  uint32_t width = c->dtype == MLFAB_BYTES ? 1 : mlfab__element_bytes(c->dtype);
  if (CALLS_OPTION(options, reduce) && c->kind <= MLFAB_CALL_REDUCE_SCATTER)
    width = CALLS_OPTION(options, element_bytes);
  if (c->kind == MLFAB_CALL_ALLREDUCE) {
    coll_visit_vecs(e, options, width);
  } else if (c->kind == MLFAB_CALL_BROADCAST) {
    int apart = CALLS_OPTION(options, inputs) != NULL, root = e->node->config.rank == c->root;
    mlfab__extent extent = {.at = c->data, .bytes = c->count, .align = 1};
    if (root && apart) coll_visit_input(e, options, 0, c->count, 1);
    if (root && !apart)
      extent.in_bytes = c->count;
    else
      extent.out_bytes = c->count;
    e->visit->data(e, &extent);
  } else {
    coll_visit_blocks(e, options, width);
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__calls_coll(const mlfab__call_in *e) {
  const mlfab_call *c = e->call;
  const mlfab_collective plain = {.size = sizeof plain};
  const mlfab_collective *options = c->options;
  mlfab__collective own, *into = e->shared ? e->shared : &own;
  mlfab__comm_call *call = &into->call;
  if (!options) options = &plain;
  if (e->visit) return coll_visit(e, options);
  if (e->forgone) return mlfab__comm_forgo(e->node->parts->comm, e->forgone, e->node->now_ns);
  memset(call, 0, sizeof *call);
  into->one = (mlfab_vec){c->data, c->count};
  call->vecs = &into->one;
  call->n = 1;
  call->callers = 1;
  call->kind = coll_collectives[c->kind - MLFAB_CALL_ALLREDUCE].kind;
  call->words = coll_collectives[c->kind - MLFAB_CALL_ALLREDUCE].words;
  call->algorithm = (uint8_t)mlfab__min(CALLS_OPTION(options, algorithm), UINT8_MAX);
  call->tag = CALLS_OPTION(options, tag);
  call->inputs = CALLS_OPTION(options, inputs);
  if (options->size == 0)
    return MLFAB__FAIL(e->error, MLFAB_ERR_ARGUMENT, "%s: options.size is not set", call->words);
  uint64_t timeout_ns = CALLS_OPTION(options, timeout_ns);
  int code = coll_complete(e, into, options);
  if (code) return code;
  call->outside = e->shared && call->kind <= MLFAB__COLLECTIVE_ALLGATHER && call->dtype &&
                  !call->reduce && call->algorithm == MLFAB_ALGORITHM_AUTO;
  return mlfab__comm_start(e->node->parts->comm, call, timeout_ns, e->node->now_ns, e->request_p,
                           e->error);
}
#undef CALLS_OPTION

/* --- a context --- */

MLFAB__INTERNAL int mlfab__coll_submit(mlfab *ctx, const mlfab_call *call, int waits,
                                       mlfab_request *request_p) {
  mlfab__collective shared;
  mlfab_request request = 0;
  if (waits && mlfab__context_is_told(ctx)) return MLFAB_ERR_STATE;
  int arena = mlfab__context_arena(ctx) && waits;
  if (!arena) return mlfab__submit(ctx, call, waits, request_p, NULL);
  shared.call.outside = 0;
  int code = mlfab__context_begin(ctx, call, waits, &request, &shared);
  if (!code && shared.call.outside) mlfab__shared_run(ctx, request, &shared.call);
  if (!code && request) return mlfab__context_await(ctx, request, 0, NULL);
  return mlfab__context_sent(ctx, code);
}

MLFAB__INTERNAL int mlfab__coll_call(mlfab *ctx, const mlfab_call *call, int waits,
                                     mlfab_request *request_p) {
  CONTEXT_ENTER(ctx);
  return mlfab__context_leave(ctx, mlfab__coll_submit(ctx, call, waits, request_p));
}

MLFAB__INTERNAL int mlfab__coll_open(mlfab *ctx, const mlfab_call *call, uint32_t next,
                                     int if_open) {
  uint32_t id = 0;
  mlfab_call open = *call, then = {.size = sizeof then, .kind = next};
  open.id_p = call->id_p ? &id : NULL;
  CONTEXT_ENTER(ctx);
  int code = mlfab__coll_submit(ctx, &open, 1, NULL);
  then.id = id;
  int next_code = id && if_open == !code ? mlfab__coll_submit(ctx, &then, 0, NULL) : 0;
  if (!code) code = next_code;
  (void)mlfab__context_leave(ctx, 0);
  if (!code) *call->id_p = id;
  return code;
}

MLFAB_API int mlfab_broadcast(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                              const mlfab_collective *options) {
  COLL_WAIT(BROADCAST, .options = options, .root = root, .data = data, .count = bytes);
}

MLFAB_API int mlfab_broadcast_start(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                                    const mlfab_collective *options, mlfab_request *request_p) {
  COLL_START(BROADCAST, request_p, .options = options, .root = root, .data = data, .count = bytes);
}

MLFAB_API int mlfab_allreduce(mlfab *ctx, void *data, uint64_t count, int dtype,
                              const mlfab_collective *options) {
  const mlfab_vec vec = {data, count};
  COLL_WAIT(ALLREDUCE, .options = options, .vecs = &vec, .n = 1, .dtype = dtype);
}

MLFAB_API int mlfab_allreduce_mean(mlfab *ctx, float *data, uint64_t count) {
  const mlfab_collective mean = {.size = sizeof mean, .op = MLFAB_OP_MEAN};
  return mlfab_allreduce(ctx, data, count, MLFAB_F32, &mean);
}

MLFAB_API int mlfab_allreduce_list(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                   const mlfab_collective *options) {
  COLL_WAIT(ALLREDUCE, .options = options, .vecs = bufs, .n = n, .dtype = dtype);
}

MLFAB_API int mlfab_allreduce_start(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p) {
  COLL_START(ALLREDUCE, request_p, .options = options, .vecs = bufs, .n = n, .dtype = dtype);
}

MLFAB_API int mlfab_reduce_scatter(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                   const mlfab_collective *options) {
  COLL_WAIT(REDUCE_SCATTER, .options = options, .data = data, .counts = counts, .dtype = dtype);
}

MLFAB_API int mlfab_reduce_scatter_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                         const mlfab_collective *options,
                                         mlfab_request *request_p) {
  COLL_START(REDUCE_SCATTER, request_p, .options = options, .data = data, .counts = counts,
             .dtype = dtype);
}

MLFAB_API int mlfab_allgather(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                              const mlfab_collective *options) {
  COLL_WAIT(ALLGATHER, .options = options, .data = data, .counts = counts, .dtype = dtype);
}

MLFAB_API int mlfab_allgather_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p) {
  COLL_START(ALLGATHER, request_p, .options = options, .data = data, .counts = counts,
             .dtype = dtype);
}

MLFAB_API int mlfab_present(mlfab *ctx, uint32_t *ranks, uint32_t room, uint32_t *count_p) {
  CONTEXT_ENTER(ctx);
  int code = 0;
  if (!count_p || (!ranks && room > 0))
    code = MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_ARGUMENT, "present: %s is NULL",
                       count_p ? "ranks" : "count_p");
  else if (!ctx->node->is_worker)
    code = MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_STATE,
                       "present: this node is not a worker");
  else
    *count_p = mlfab__comm_present(ctx->node->parts->comm, ranks, room);
  return mlfab__context_leave(ctx, code);
}
