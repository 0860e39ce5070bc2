/* calls.c - a node: collectives between workers, as they are called: section 9b of mlfab.h.
 *
 * Reads the options, and chooses between the communicator (comm.h) and the scheduler's tree (tree.h).
 * The choice depends on what all workers have in common: the kind of fabric, and what the call says.
 * What there is to check beside, they check. */
#include "calls.h"

#include "combine.h"

static const char *const calls_words[] = {[MLFAB__RING_ALLREDUCE] = "an allreduce",
                                          [MLFAB__RING_REDUCE_SCATTER] = "a reduce-scatter",
                                          [MLFAB__RING_ALLGATHER] = "an allgather",
                                          [MLFAB__RING_BROADCAST] = "a broadcast",
                                          [MLFAB__RING_BARRIER] = "a barrier"};

#define CALLS_OPTION(options, member) \
  ((options) && MLFAB__HAS(options, mlfab_collective, member) ? (options)->member : 0)

static int calls_refuse(mlfab_error *error, int code, const mlfab__collective *c,
                        const char *text) {
  return mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, "%s: %s", calls_words[c->kind], text);
}

/* What the options say of the reduction; other kinds do not look at it. */
static int calls_reduction(mlfab__collective *c, mlfab_error *error) {
  const mlfab_collective *options = c->options;
  mlfab__comm_call *call = &c->call;
  call->op = (int)mlfab__min(CALLS_OPTION(options, op), INT32_MAX);
  call->refuse_nan = CALLS_OPTION(options, refuse_nan) != 0;
  call->reduce = CALLS_OPTION(options, reduce);
  if (!call->reduce) return 0;
  call->reduce_user = CALLS_OPTION(options, user);
  call->width = CALLS_OPTION(options, element_bytes);
  call->ordered = CALLS_OPTION(options, ordered) != 0;
  call->dtype = 0;
  if (!call->refuse_nan) return 0;
  return calls_refuse(error, MLFAB_ERR_UNSUPPORTED, c,
                      "not supported: refuse_nan with a reducer, whose elements are not numbers");
}

/* The blocks of all ranks, as one buffer. */
static int calls_blocks(const mlfab_node *node, mlfab__collective *c, mlfab_error *error) {
  uint64_t sum = 0;
  if (!c->counts) return calls_refuse(error, MLFAB_ERR_ARGUMENT, c, "counts is NULL");
  for (uint32_t r = 0; r < node->config.workers; r++) sum = mlfab__add_sat(sum, c->counts[r]);
  c->one = (mlfab_vec){c->data, sum};
  c->call.counts = c->counts;
  if (c->kind == MLFAB__RING_ALLGATHER && !mlfab__element_bytes(c->dtype))
    return mlfab__error(error, MLFAB_ERR_DTYPE, MLFAB_NO_RANK, 0, 0,
                        "%s: %d is not an element type", c->call.words, c->dtype);
  return 0;
}

/* What the communicator is asked for. */
static int calls_complete(const mlfab_node *node, mlfab__collective *c, mlfab_error *error) {
  uint32_t algorithm = CALLS_OPTION(c->options, algorithm);
  mlfab__comm_call *call = &c->call;
  memset(call, 0, sizeof *call);
  call->kind = c->kind;
  call->words = calls_words[c->kind];
  call->dtype = c->dtype;
  call->root = c->root;
  call->algorithm = (uint8_t)mlfab__min(algorithm, UINT8_MAX);
  call->vecs = &c->one;
  call->n = 1;
  c->one = (mlfab_vec){c->data, c->bytes};
  switch (c->kind) {
    case MLFAB__RING_ALLREDUCE:
      call->vecs = c->bufs;
      call->n = c->n;
      if (c->n > 0 && !c->bufs)
        return calls_refuse(error, MLFAB_ERR_ARGUMENT, c, "the list of buffers is NULL");
      return calls_reduction(c, error);
    case MLFAB__RING_REDUCE_SCATTER: {
      int code = calls_blocks(node, c, error);
      return code ? code : calls_reduction(c, error);
    }
    case MLFAB__RING_ALLGATHER:
      return calls_blocks(node, c, error);
    case MLFAB__RING_BARRIER:
      call->n = 0;
  }
  return 0;
}

static int calls_tree_has(int dtype) {
  return dtype == MLFAB_F32 || dtype == MLFAB_F64 || dtype == MLFAB_I64;
}

/* Does the scheduler arrange it? */
static int calls_planned(const mlfab_node *node, const mlfab__collective *c) {
  if (c->kind != MLFAB__RING_ALLREDUCE) return 0;
  if (!c->plan) return c->call.algorithm == MLFAB_ALGORITHM_PLANNED;
  return node->config.scheduler != MLFAB_SCHEDULER_NONE && calls_tree_has(c->dtype) &&
         c->bufs[0].count > node->config.eager_bytes / mlfab__dtype_bytes(c->dtype);
}

static int calls_tree(mlfab_node *node, const mlfab__collective *c, uint64_t timeout_ns,
                      mlfab_request *request_p, mlfab_error *error) {
  const mlfab__comm_call *call = &c->call;
  if (call->reduce || call->op != MLFAB_SUM || call->refuse_nan || c->n != 1 ||
      !calls_tree_has(c->dtype))
    return calls_refuse(error, MLFAB_ERR_UNSUPPORTED, c,
                        "not supported: MLFAB_ALGORITHM_PLANNED but for the sum of one buffer of "
                        "MLFAB_F32, MLFAB_F64 or MLFAB_I64");
  return mlfab__tree_start(&node->tree, c->bufs[0].data, c->bufs[0].count, c->dtype, timeout_ns,
                           node->now_ns, request_p, error);
}

/* Has it a form in shared memory? */
static int calls_outside(const mlfab__collective *c) {
  return c->block && c->kind <= MLFAB__RING_ALLGATHER && !c->call.reduce &&
         c->call.algorithm == MLFAB_ALGORITHM_AUTO;
}

static int calls_start(mlfab_node *node, mlfab__collective *c, mlfab_request *request_p,
                       mlfab_error *error) {
  uint64_t timeout_ns = CALLS_OPTION(c->options, timeout_ns);
  if (c->options && c->options->size == 0)
    return calls_refuse(error, MLFAB_ERR_ARGUMENT, c, "options.size is not set");
  int code = calls_complete(node, c, error);
  if (code) return code;
  if (calls_planned(node, c)) return calls_tree(node, c, timeout_ns, request_p, error);
  c->call.outside = (uint8_t)calls_outside(c);
  return mlfab__comm_start(&node->comm, &c->call, timeout_ns, node->now_ns, request_p, error);
}

MLFAB__INTERNAL int mlfab__node_collective(mlfab_node *node, mlfab__collective *c, uint64_t now_ns,
                                           mlfab_request *request_p) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 1, &error);
  if (!code && !request_p)
    code = mlfab__error(&error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "request_p is NULL");
  if (!code) code = calls_start(node, c, request_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB__INTERNAL void mlfab__node_carried_out(mlfab_node *node, mlfab_request request, int code,
                                             int32_t rank, uint64_t now_ns) {
  node->now_ns = mlfab__max(node->now_ns, now_ns);
  mlfab__comm_finish(&node->comm, request, code, rank, node->now_ns);
  mlfab__node_return(node, 0, NULL);
}

MLFAB__INTERNAL void mlfab__node_turn_plain(mlfab_node *node, mlfab_request request) {
  uint64_t number, signature;
  (void)mlfab__comm_outside(&node->comm, request, &number, &signature);
  mlfab__node_return(node, 0, NULL);
}

MLFAB__INTERNAL void mlfab__node_mapped(mlfab_node *node, int ok) {
  mlfab__comm_mapped(&node->comm, ok);
  mlfab__node_return(node, 0, NULL);
}

MLFAB_API int mlfab_node_allreduce(mlfab_node *node, void *data, uint64_t count, int dtype,
                                   uint64_t timeout_ns, uint64_t now_ns, mlfab_request *request_p) {
  mlfab_vec vec = {data, count};
  mlfab_collective options = {.size = sizeof options, .timeout_ns = timeout_ns};
  mlfab__collective c = {.kind = MLFAB__RING_ALLREDUCE,
                         .plan = 1,
                         .bufs = &vec,
                         .n = 1,
                         .dtype = dtype,
                         .options = &options};
  return mlfab__node_collective(node, &c, now_ns, request_p);
}

MLFAB_API int mlfab_node_allreduce_list(mlfab_node *node, const mlfab_vec *bufs, uint32_t n,
                                        int dtype, const mlfab_collective *options, uint64_t now_ns,
                                        mlfab_request *request_p) {
  mlfab__collective c = {
      .kind = MLFAB__RING_ALLREDUCE, .bufs = bufs, .n = n, .dtype = dtype, .options = options};
  return mlfab__node_collective(node, &c, now_ns, request_p);
}

MLFAB_API int mlfab_node_reduce_scatter(mlfab_node *node, void *data, const uint64_t *counts,
                                        int dtype, const mlfab_collective *options, uint64_t now_ns,
                                        mlfab_request *request_p) {
  mlfab__collective c = {.kind = MLFAB__RING_REDUCE_SCATTER,
                         .data = data,
                         .counts = counts,
                         .dtype = dtype,
                         .options = options};
  return mlfab__node_collective(node, &c, now_ns, request_p);
}

MLFAB_API int mlfab_node_allgather(mlfab_node *node, void *data, const uint64_t *counts, int dtype,
                                   const mlfab_collective *options, uint64_t now_ns,
                                   mlfab_request *request_p) {
  mlfab__collective c = {.kind = MLFAB__RING_ALLGATHER,
                         .data = data,
                         .counts = counts,
                         .dtype = dtype,
                         .options = options};
  return mlfab__node_collective(node, &c, now_ns, request_p);
}

MLFAB_API int mlfab_node_broadcast_workers(mlfab_node *node, int32_t root, void *data,
                                           uint64_t bytes, const mlfab_collective *options,
                                           uint64_t now_ns, mlfab_request *request_p) {
  mlfab__collective c = {.kind = MLFAB__RING_BROADCAST,
                         .data = data,
                         .bytes = bytes,
                         .root = root,
                         .options = options};
  return mlfab__node_collective(node, &c, now_ns, request_p);
}

MLFAB_API int mlfab_node_barrier_workers(mlfab_node *node, const mlfab_collective *options,
                                         uint64_t now_ns, mlfab_request *request_p) {
  mlfab__collective c = {.kind = MLFAB__RING_BARRIER, .options = options};
  return mlfab__node_collective(node, &c, now_ns, request_p);
}
#undef CALLS_OPTION
