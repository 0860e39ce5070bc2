/* collective_stochastic.c - a context: stochastic reductions. Layer 6. What they are: gossip.c. */
#include "drive.h"

/* It is open for all: whether the workers have a graph. Closed again where they have none, on all. */
static int stochastic_check(mlfab *ctx, uint32_t id) {
  int code = 0;
#if MLFAB_WITH_STOCHASTIC
  mlfab_error error, ignored;
  code = mlfab__node_enter(ctx->node, mlfab__drive_now(ctx), 1, &error);
  if (!code) {
    code = mlfab__gossip_state(&ctx->node->comm, id, &error);
    if (code) (void)mlfab__gossip_close(&ctx->node->comm, id, &ignored);
  }
  code = mlfab__node_return(ctx->node, code, &error);
#else
  (void)ctx, (void)id;
#endif
  return code;
}

MLFAB_API int mlfab_stochastic_open(mlfab *ctx, uint64_t count, int dtype,
                                    const mlfab_stochastic_options *options, uint64_t timeout_ns,
                                    uint32_t *id_p) {
  mlfab_request request = 0;
  uint32_t id = 0;
  DRIVE_CHECK(ctx);
  if (!id_p) return MLFAB_ERR_ARGUMENT;
  mlfab__drive_enter(ctx);
  (void)mlfab__drive_arena(ctx);
  int code = mlfab_node_stochastic_open(ctx->node, count, dtype, options, timeout_ns,
                                        mlfab__drive_now(ctx), &id, &request);
  if (!code) code = mlfab__drive_await(ctx, request, 0, NULL);
  if (!code) code = stochastic_check(ctx, id);
  mlfab__drive_send(ctx, mlfab__drive_now(ctx));
  if (!code) *id_p = id;
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_stochastic_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                      mlfab_stochastic_info *info_p) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_stochastic_start(ctx->node, id, data, timeout_ns, now, info_p, &request),
              NULL);
}

MLFAB_API int mlfab_stochastic_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                     mlfab_stochastic_info *info_p, mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  DRIVE_START(mlfab_node_stochastic_start(ctx->node, id, data, timeout_ns, now, info_p, request_p));
}

MLFAB_API int mlfab_stochastic_close(mlfab *ctx, uint32_t id) {
  DRIVE_CHECK(ctx);
  DRIVE_START(mlfab_node_stochastic_close(ctx->node, id, now));
}
