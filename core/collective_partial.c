/* collective_partial.c - a context: partial reductions. Layer 6. What they are: partial.h,
 * eager.c. */
#include "drive.h"

MLFAB_API int mlfab_partial_open(mlfab *ctx, uint64_t count, int dtype,
                                 const mlfab_partial_options *options, uint64_t timeout_ns,
                                 uint32_t *id_p) {
  mlfab_request request = 0;
  uint32_t id = 0;
  DRIVE_CHECK(ctx);
  if (!id_p) return MLFAB_ERR_ARGUMENT;
  mlfab__drive_enter(ctx);
  (void)mlfab__drive_arena(ctx);
  int code = mlfab_node_partial_open(ctx->node, count, dtype, options, timeout_ns,
                                     mlfab__drive_now(ctx), &id, &request);
  if (!code) {
    code = mlfab__drive_await(ctx, request, 0, NULL);
    if (code) (void)mlfab_node_partial_close(ctx->node, id, mlfab__drive_now(ctx));
  }
  mlfab__drive_send(ctx, mlfab__drive_now(ctx));
  if (!code) *id_p = id;
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_partial_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                   mlfab_partial_info *info_p) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_partial_start(ctx->node, id, data, timeout_ns, now, info_p, &request),
              NULL);
}

MLFAB_API int mlfab_partial_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                  mlfab_partial_info *info_p, mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  DRIVE_START(mlfab_node_partial_start(ctx->node, id, data, timeout_ns, now, info_p, request_p));
}

MLFAB_API int mlfab_partial_flush(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_partial_flush(ctx->node, id, data, timeout_ns, now, &request), NULL);
}

MLFAB_API int mlfab_partial_resync(mlfab *ctx, uint32_t id, void *model, uint64_t count, int dtype,
                                   uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(
      mlfab_node_partial_resync(ctx->node, id, model, count, dtype, timeout_ns, now, &request),
      NULL);
}

MLFAB_API int mlfab_partial_close(mlfab *ctx, uint32_t id) {
  DRIVE_CHECK(ctx);
  DRIVE_START(mlfab_node_partial_close(ctx->node, id, now));
}
