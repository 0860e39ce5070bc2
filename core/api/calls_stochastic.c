/* calls_stochastic.c - stochastic reductions. */
#include "../coll/stochastic.h"
#include "calls_coll.h"
#include "extent.h"

static int stochastic_visit(const mlfab__call_in *e) {
  const mlfab_call *c = e->call;
  uint32_t width = 1;
  mlfab__extent extent = {.at = c->data};
  extent.bytes = extent.in_bytes = extent.out_bytes =
      mlfab__stochastic_bytes(e->node->parts->comm, c->id, &width);
  extent.align = width;
  e->visit->data(e, &extent);
  return 0;
}

MLFAB__INTERNAL int mlfab__calls_stochastic(const mlfab__call_in *e) {
  const mlfab_call *c = e->call;
  mlfab__comm *comm = e->node->parts->comm;
  mlfab_request *r = e->request_p;
  mlfab_error ignored, *error = e->error;
  const mlfab_stochastic_options *o = c->options;
  uint64_t now = e->node->now_ns, timeout = c->timeout_ns;
  int code = 0;
  if (e->visit) return stochastic_visit(e);
  switch (c->kind) {
    case MLFAB_CALL_STOCHASTIC_OPEN:
      timeout = o && MLFAB__HAS(o, mlfab_stochastic_options, timeout_ns) ? o->timeout_ns : 0;
      return mlfab__stochastic_open(comm, c->count, c->dtype, o, timeout, now, c->id_p, r, error);
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

/* If the workers have no valid graph, all of them close the object again. */
MLFAB_API int mlfab_stochastic_open(mlfab *ctx, uint64_t count, int dtype,
                                    const mlfab_stochastic_options *options, uint32_t *id_p) {
  CONTEXT_DESCRIBE(STOCHASTIC_OPEN, .options = options, .count = count, .dtype = dtype,
                   .id_p = id_p);
  return mlfab__coll_open(ctx, &call, MLFAB_CALL_STOCHASTIC_STATE, 1);
}

MLFAB_API int mlfab_stochastic_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                      mlfab_stochastic_info *info_p) {
  COLL_WAIT(STOCHASTIC_REDUCE, .id = id, .data = data, .info_p = info_p, .timeout_ns = timeout_ns);
}

MLFAB_API int mlfab_stochastic_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                     mlfab_stochastic_info *info_p, mlfab_request *request_p) {
  COLL_START(STOCHASTIC_REDUCE, request_p, .id = id, .data = data, .info_p = info_p,
             .timeout_ns = timeout_ns);
}

MLFAB_API int mlfab_stochastic_close(mlfab *ctx, uint32_t id) {
  COLL_AT_ONCE(STOCHASTIC_CLOSE, .id = id);
}
