/* calls_checkpoint.c - checkpoints. */
#include "../checkpoint/checkpoint.h"
#include "context.h"
#include "disk.h"

MLFAB__INTERNAL int mlfab__calls_checkpoint(const mlfab__call_in *in) {
  const mlfab_call *c = in->call;
  mlfab__checkpoint_role *role = in->node->parts->checkpoint;
  if (c->kind == MLFAB_CALL_RESTORE) return mlfab__checkpoint_from(role, c->data, in->error);
  return mlfab__checkpoint_start(role, c->options, c->info_p, in->node->now_ns, in->request_p,
                                 in->error);
}

MLFAB_API int mlfab_checkpoint(mlfab *ctx, const mlfab_checkpoint_options *options,
                               mlfab_checkpoint_info *info_p) {
  SUBMIT(CHECKPOINT, NULL, .options = options, .info_p = info_p);
}

MLFAB_API int mlfab_checkpoint_start(mlfab *ctx, const mlfab_checkpoint_options *options,
                                     mlfab_checkpoint_info *info_p, mlfab_request *request_p) {
  SUBMIT_START(CHECKPOINT, request_p, .options = options, .info_p = info_p);
}

MLFAB_API int mlfab_restore(mlfab *ctx, const char *dir) {
  SUBMIT_AT_ONCE(RESTORE, .data = (void *)(uintptr_t)dir);
}

static int calls_restored(mlfab_node *node, mlfab_checkpoint_info *info_p) {
  mlfab_error error;
  int code = mlfab__node_enter(node, node->now_ns, 1, &error);
  if (!code) code = mlfab__checkpoint_loaded(node->parts->checkpoint, info_p, &error);
  return mlfab__node_return(node, code, &error);
}

MLFAB_API int mlfab_restored(mlfab *ctx, mlfab_checkpoint_info *info_p) {
  CONTEXT_LOOK(ctx, calls_restored(ctx->node, info_p));
}

MLFAB_API const mlfab_files *mlfab_files_system(void) { return mlfab__disk_system(); }
