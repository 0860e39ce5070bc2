/* calls_sparse.c - filters, sparse updates, the cached model. */
#include "../sparse/sparse_push.h"
#include "../worker/worker.h"
#include "context.h"
#include "extent.h"

static int sparse_visit(const mlfab__call_in *in) {
  const mlfab_call *c = in->call;
  uint32_t width = in->visit->width(in, c->tensor);
  uint64_t bytes = mlfab__mul_sat(c->count, width);
  const mlfab__extent values = {.at = c->data, .bytes = bytes, .in_bytes = bytes, .align = width};
  if (width == 0) return 0;
  const void *indices = in->visit->extent(
      in, c->indices, mlfab__mul_sat(c->count, sizeof *c->indices), 8, MLFAB__EXTENT_IN);
  if (indices != c->indices) ((mlfab_call *)(uintptr_t)c)->indices = indices;
  in->visit->data(in, &values);
  return 0;
}

MLFAB__INTERNAL int mlfab__calls_sparse(const mlfab__call_in *in) {
  const mlfab_call *c = in->call;
  mlfab__worker *worker = in->node->parts->worker;
  if (in->visit) return sparse_visit(in);
  if (c->kind == MLFAB_CALL_SET_FILTER)
    return mlfab__worker_set_filter(worker, c->tensor, c->options, in->error);
  return mlfab__worker_push_sparse(worker, c->tensor, c->indices, c->data, c->count, c->options,
                                   in->node->now_ns, in->request_p, in->error);
}

/* The library only reads the values. */
MLFAB_API int mlfab_push_sparse(mlfab *ctx, uint32_t tensor, const uint64_t *indices,
                                const void *values, uint64_t count,
                                const mlfab_push_options *options, mlfab_result *result_p) {
  SUBMIT(PUSH_SPARSE, result_p, .options = options, .tensor = tensor, .indices = indices,
         .data = (void *)(uintptr_t)values, .count = count);
}

MLFAB_API int mlfab_push_sparse_start(mlfab *ctx, uint32_t tensor, const uint64_t *indices,
                                      const void *values, uint64_t count,
                                      const mlfab_push_options *options, mlfab_request *request_p) {
  SUBMIT_START(PUSH_SPARSE, request_p, .options = options, .tensor = tensor, .indices = indices,
               .data = (void *)(uintptr_t)values, .count = count);
}

MLFAB_API int mlfab_set_filter(mlfab *ctx, uint32_t tensor, const mlfab_filter *filter) {
  SUBMIT_AT_ONCE(SET_FILTER, .options = filter, .tensor = tensor);
}

MLFAB_API int mlfab_node_cached(mlfab_node *node, uint32_t tensor, const void **data_p,
                                uint64_t *count_p) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, node->now_ns, 1, &error);
  if (!code) code = mlfab__worker_cached(node->parts->worker, tensor, data_p, count_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_cached(mlfab *ctx, uint32_t tensor, const void **data_p, uint64_t *count_p) {
  CONTEXT_CALL(ctx, mlfab_node_cached(ctx->node, tensor, data_p, count_p));
}
