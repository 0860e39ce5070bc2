/* calls_lend.c - views. */
#include "../lend/view.h"
#include "context.h"

MLFAB__INTERNAL int mlfab__calls_lend(const mlfab__call_in *in) {
  const mlfab_call *c = in->call;
  mlfab__worker *worker = in->node->parts->worker;
  if (c->kind == MLFAB_CALL_VIEW_RELEASE)
    return mlfab__worker_view_release(worker, c->count, c->data, in->error);
  return mlfab__worker_pull_view(worker, c->bufs, c->n, c->options, c->info_p, in->node->now_ns,
                                 in->request_p, in->error);
}

MLFAB_API int mlfab_pull_view(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                              const mlfab_pull_options *options, mlfab_view *view_p) {
  SUBMIT(PULL_VIEW, NULL, .options = options, .bufs = bufs, .n = n, .info_p = view_p);
}

MLFAB_API int mlfab_pull_view_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                                    const mlfab_pull_options *options, mlfab_view *view_p,
                                    mlfab_request *request_p) {
  SUBMIT_START(PULL_VIEW, request_p, .options = options, .bufs = bufs, .n = n, .info_p = view_p);
}

MLFAB_API int mlfab_view_release(mlfab *ctx, mlfab_view *view) {
  CONTEXT_ENTER(ctx);
  const mlfab_call call = {.size = sizeof call,
                           .kind = MLFAB_CALL_VIEW_RELEASE,
                           .count = view ? view->id : 0,
                           .data = view ? (void *)(uintptr_t)view->parts : NULL};
  int code = mlfab__submit(ctx, &call, 0, NULL, NULL);
  (void)mlfab__context_leave(ctx, 0);
  if (code) return code;
  view->id = 0;
  view->parts = NULL;
  view->nparts = 0;
  return 0;
}
