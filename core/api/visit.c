/* visit.c - shows the buffers of a call that does not begin. See visit.h. */
#include "visit.h"

#include "../worker/feed.h"

static void *visit_extent(const mlfab__call_in *in, const void *at, uint64_t bytes, uint32_t align,
                          int ways) {
  mlfab__extent extent = {.at = at, .bytes = bytes, .align = align};
  if (!at || bytes == 0) return (void *)(uintptr_t)at;
  if (ways & MLFAB__EXTENT_IN) extent.in_bytes = bytes;
  if (ways & MLFAB__EXTENT_OUT) extent.out_bytes = bytes;
  return in->visit->fn(in->visit->user, &extent);
}

static void visit_data(const mlfab__call_in *in, const mlfab__extent *extent) {
  if (!extent->at || extent->bytes == 0) return;
  void *at = in->visit->fn(in->visit->user, extent);
  if (at != in->call->data) ((mlfab_call *)(uintptr_t)in->call)->data = at;
}

static uint32_t visit_width(const mlfab__call_in *in, uint32_t tensor) {
  return mlfab__worker_element_bytes(in->node->parts->worker, tensor);
}

static int visit_bufs(const mlfab__call_in *e, int ways) {
  const mlfab_call *c = e->call;
  for (uint32_t i = 0; c->bufs && i < c->n; i++) {
    const mlfab_buf *buf = &c->bufs[i];
    uint32_t align = 1;
    uint64_t bytes = mlfab__worker_buf_bytes(e->node->parts->worker, buf, &align);
    void *at = visit_extent(e, buf->data, bytes, align, ways);
    if (at != buf->data) ((mlfab_buf *)(uintptr_t)buf)->data = at;
  }
  return 0;
}

/* A pull writes all of a buffer, except if it pulls changes only. */
static int visit_push(const mlfab__call_in *e) {
  const mlfab_pull_options *o = e->call->options;
  int kept = 0;
  switch (e->call->kind) {
    case MLFAB_CALL_MODEL_START:
      return visit_bufs(e, MLFAB__EXTENT_IN | MLFAB__EXTENT_OUT);
    case MLFAB_CALL_PUSH:
      return visit_bufs(e, MLFAB__EXTENT_IN);
    default:
      kept = o && MLFAB__HAS(o, mlfab_pull_options, flags) && o->flags & MLFAB_PULL_KEPT;
      return visit_bufs(e, MLFAB__EXTENT_OUT | (kept ? MLFAB__EXTENT_IN : 0));
  }
}

MLFAB__INTERNAL int mlfab__node_visit(mlfab_node *node, const mlfab_call *call,
                                      mlfab_request *request_p, mlfab__extent_fn *fn, void *user,
                                      mlfab_error *error) {
  const struct mlfab__call_visit visit = {visit_extent, visit_data, visit_width, fn, user};
  const mlfab__call_in e = {
      .node = node, .call = call, .request_p = request_p, .error = error, .visit = &visit};
  mlfab__call_begin *begin;
  uint32_t flags;
  int code = mlfab__calls_check(&e, &begin, &flags);
  if (code || !node->is_worker || !(flags & CALLS_BUFFERS)) return code;
  int push = call->kind == MLFAB_CALL_MODEL_START || call->kind == MLFAB_CALL_PUSH ||
             call->kind == MLFAB_CALL_PULL;
  return push ? visit_push(&e) : begin(&e);
}

MLFAB__INTERNAL int mlfab__node_forgo(mlfab_node *node, const mlfab_call *call,
                                      const mlfab_error *why, uint64_t now_ns) {
  mlfab_error error;
  mlfab_request none;
  const mlfab__call_in e = {
      .node = node, .call = call, .request_p = &none, .error = &error, .forgone = why};
  mlfab__call_begin *begin;
  uint32_t flags;
  if (!node->is_worker || mlfab__calls_check(&e, &begin, &flags) || !(flags & CALLS_MEETS))
    return 0;
  if (mlfab__node_enter(node, now_ns, 1, &error)) return 0; /* the node has ended */
  int code = begin(&e);
  (void)mlfab__node_return(node, 0, &error);
  return code;
}
