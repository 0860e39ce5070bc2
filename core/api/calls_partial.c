/* calls_partial.c - partial reductions. */
#include "../coll/partial_run.h"
#include "calls_coll.h"
#include "extent.h"

static int partial_visit(const mlfab__call_in *e) {
  const mlfab_call *c = e->call;
  uint32_t width = 1;
  mlfab__extent extent = {.at = c->data};
  extent.bytes = extent.out_bytes = mlfab__partial_run_bytes(e->node->parts->comm, c->id, &width);
  if (c->kind == MLFAB_CALL_PARTIAL_REDUCE) extent.in_bytes = extent.bytes;
  extent.align = width;
  e->visit->data(e, &extent);
  return 0;
}

MLFAB__INTERNAL int mlfab__calls_partial(const mlfab__call_in *e) {
  const mlfab_call *c = e->call;
  mlfab__comm *comm = e->node->parts->comm;
  mlfab_request *r = e->request_p;
  mlfab_error *error = e->error;
  const mlfab_partial_options *o = c->options;
  uint64_t now = e->node->now_ns, timeout = c->timeout_ns;
  if (e->visit) return partial_visit(e);
  if (e->forgone) return mlfab__comm_forgo(comm, e->forgone, now);
  switch (c->kind) {
    case MLFAB_CALL_PARTIAL_OPEN:
      timeout = o && MLFAB__HAS(o, mlfab_partial_options, timeout_ns) ? o->timeout_ns : 0;
      return mlfab__partial_run_open(comm, c->count, c->dtype, o, timeout, now, c->id_p, r, error);
    case MLFAB_CALL_PARTIAL_REDUCE:
      return mlfab__partial_run_start(comm, c->id, c->data, timeout, now, c->info_p, r, error);
    case MLFAB_CALL_PARTIAL_FLUSH:
      return mlfab__partial_run_flush(comm, c->id, c->data, timeout, now, r, error);
    default:
      return mlfab__partial_run_close(comm, c->id, error);
  }
}

/* If opening fails, the object is closed again. */
MLFAB_API int mlfab_partial_open(mlfab *ctx, uint64_t count, int dtype,
                                 const mlfab_partial_options *options, uint32_t *id_p) {
  CONTEXT_DESCRIBE(PARTIAL_OPEN, .options = options, .count = count, .dtype = dtype, .id_p = id_p);
  return mlfab__coll_open(ctx, &call, MLFAB_CALL_PARTIAL_CLOSE, 0);
}

MLFAB_API int mlfab_partial_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                   mlfab_partial_info *info_p) {
  COLL_WAIT(PARTIAL_REDUCE, .id = id, .data = data, .info_p = info_p, .timeout_ns = timeout_ns);
}

MLFAB_API int mlfab_partial_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                  mlfab_partial_info *info_p, mlfab_request *request_p) {
  COLL_START(PARTIAL_REDUCE, request_p, .id = id, .data = data, .info_p = info_p,
             .timeout_ns = timeout_ns);
}

MLFAB_API int mlfab_partial_flush(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns) {
  COLL_WAIT(PARTIAL_FLUSH, .id = id, .data = data, .timeout_ns = timeout_ns);
}

MLFAB_API int mlfab_partial_close(mlfab *ctx, uint32_t id) {
  COLL_AT_ONCE(PARTIAL_CLOSE, .id = id);
}
