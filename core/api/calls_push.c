/* calls_push.c - the model, pushes and pulls: the calls of a node, and those of a context. The worker checks the members
 * of a call (../worker/worker.h). */
#include "calls_push.h"

#include "../server/server.h"
#include "../worker/worker.h"

/* --- a node --- */

/* Ghost tensors need transports that carry them. */
static int transfer_check_ghost(const mlfab__call_in *e) {
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

MLFAB__INTERNAL int mlfab__calls_push(const mlfab__call_in *e) {
  const mlfab_call *c = e->call;
  mlfab__worker *worker = e->node->parts->worker;
  mlfab_request *r = e->request_p;
  mlfab_error *error = e->error;
  uint64_t now = e->node->now_ns, timeout = c->timeout_ns;
  const mlfab__push_what what = {c->bufs, c->n, NULL};
  int code = 0;
  switch (c->kind) {
    case MLFAB_CALL_TENSOR_ADD:
      return mlfab__worker_tensor(worker, c->tensor, c->dtype, c->count, error);
    case MLFAB_CALL_MODEL_START:
      code = transfer_check_ghost(e);
      return code ? code : mlfab__worker_model(worker, c->options, c->bufs, c->n, now, r, error);
    case MLFAB_CALL_PUSH:
      return mlfab__push_start(worker, &what, c->options, now, r, error);
    case MLFAB_CALL_PULL:
      return mlfab__pull_open(worker, c->bufs, c->n, c->options, NULL, now, r, error);
    default:
      return mlfab__worker_set_sync(worker, c->options, c->server, timeout, now, r, error);
  }
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

static uint32_t transfer_unfinished(const mlfab__parts *parts, uint32_t *server_p) {
  return parts->worker ? mlfab__worker_unfinished(parts->worker, server_p) : 0;
}

static void transfer_disown(const mlfab__parts *parts) {
  if (parts->server) mlfab__server_disown(parts->server);
}

MLFAB__INTERNAL const mlfab__parts_push *mlfab__push_functions(void) {
  static const mlfab__parts_push functions = {transfer_unfinished, transfer_disown};
  return &functions;
}

/* --- a context --- */

MLFAB_API int mlfab_tensor_add(mlfab *ctx, uint32_t id, int dtype, uint64_t count) {
  SUBMIT_AT_ONCE(TENSOR_ADD, .tensor = id, .dtype = dtype, .count = count);
}

static int transfer_model(mlfab *ctx, const mlfab_model_options *options, const mlfab_buf *bufs,
                          uint32_t n) {
  SUBMIT(MODEL_START, NULL, .options = options, .bufs = bufs, .n = n);
}

/* Adds options and filter from the environment, after mlfab_open_env. */
static int transfer_model_from_env(mlfab *ctx, const mlfab_buf *bufs, uint32_t n) {
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_filter filter = {.size = sizeof filter};
  const mlfab_filter none = filter;
  mlfab_error error;
  int code = mlfab_model_options_from_env(&options, &error);
  if (!code) code = mlfab_filter_from_env(&filter, &error);
  if (code) {
    mlfab__context_enter(ctx);
    ctx->node->requests.last = error;
    return mlfab__context_leave(ctx, code);
  }
  code = transfer_model(ctx, &options, bufs, n);
  if (!code && memcmp(&filter, &none, sizeof filter) != 0)
    code = mlfab_set_filter(ctx, MLFAB_ALL, &filter);
  return code;
}

MLFAB_API int mlfab_model_start(mlfab *ctx, const mlfab_model_options *options,
                                const mlfab_buf *bufs, uint32_t n) {
  CONTEXT_CHECK(ctx);
  return !options && ctx->from_env ? transfer_model_from_env(ctx, bufs, n)
                                   : transfer_model(ctx, options, bufs, n);
}

/* For the most frequent calls. It sets every member by name, because compilers clear the rest of a large struct with an
 * instruction that takes longer than the call. */
static int transfer_call(mlfab *ctx, uint32_t kind, const void *options, const mlfab_buf *bufs,
                         uint32_t n, int waits, mlfab_request *request_p, mlfab_result *result_p) {
  mlfab_call call;
  call.size = sizeof call;
  call.kind = kind;
  call.options = options;
  call.bufs = bufs;
  call.n = n;
  call.tensor = call.server = call.id = 0;
  call.dtype = call.root = 0;
  call.vecs = NULL;
  call.servers = NULL;
  call.data = call.info_p = NULL;
  call.counts = call.indices = NULL;
  call.id_p = NULL;
  call.count = call.timeout_ns = 0;
  return mlfab__submit_call(ctx, &call, waits, request_p, result_p);
}

MLFAB_API int mlfab_push(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_push_options *options, mlfab_result *result_p) {
  return transfer_call(ctx, MLFAB_CALL_PUSH, options, bufs, n, 1, NULL, result_p);
}

MLFAB_API int mlfab_push_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_push_options *options, mlfab_request *request_p) {
  return transfer_call(ctx, MLFAB_CALL_PUSH, options, bufs, n, 0, request_p, NULL);
}

MLFAB_API int mlfab_pull(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_pull_options *options, mlfab_result *result_p) {
  return transfer_call(ctx, MLFAB_CALL_PULL, options, bufs, n, 1, NULL, result_p);
}

MLFAB_API int mlfab_pull_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_pull_options *options, mlfab_request *request_p) {
  return transfer_call(ctx, MLFAB_CALL_PULL, options, bufs, n, 0, request_p, NULL);
}

MLFAB_API int mlfab_push_status(mlfab *ctx, uint64_t seq, int *status_p) {
  CONTEXT_CALL(ctx, mlfab_node_push_status(ctx->node, seq, status_p));
}

MLFAB_API int mlfab_set_sync(mlfab *ctx, const mlfab_sync *sync, uint32_t server,
                             uint64_t timeout_ns) {
  SUBMIT(SET_SYNC, NULL, .options = sync, .server = server, .timeout_ns = timeout_ns);
}
