/* calls_sparse.c - filters and sparse updates. */
#include "../sparse/sparse_push.h"
#include "../worker/worker.h"
#include "context.h"

MLFAB__INTERNAL int mlfab__calls_sparse(const mlfab__call_in *in) {
  const mlfab_call *c = in->call;
  mlfab__worker *worker = in->node->parts->worker;
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
