/* areas.c - memory of a context that other processes of the host may map: of mlfab_alloc, and of a server's model. Top
 * floor: this file knows the memory of transports and the roles that use it. */
#include "areas.h"

#include "../base/shm_memory.h"
#if MLFAB_WITH_LEND
#include "../lend/view.h"
#include "../lend/views.h"
#endif

static int areas_open(mlfab *ctx) {
  ctx->memory = mlfab__shm_memory_functions()->create(&ctx->env);
  return ctx->memory ? 0 : MLFAB_ERR_MEMORY;
}

static void areas_close(mlfab *ctx) { mlfab__shm_memory_functions()->destroy(&ctx->memory); }

static void areas_share(mlfab *ctx) {
#if MLFAB_WITH_LEND
  const mlfab__parts *parts = ctx->node->parts;
  const mlfab__shm_memory_table *on = mlfab__shm_memory_functions();
  if (parts->server) mlfab__views_share(parts->server, on, ctx->memory);
  if (parts->worker) mlfab__view_share(parts->worker, on, ctx->memory);
#else
  (void)ctx;
#endif
}

static void *areas_alloc(mlfab *ctx, uint64_t bytes) {
  return mlfab__shm_memory_functions()->alloc(ctx->memory, bytes, 0);
}

static void areas_release(mlfab *ctx, void *at) {
  mlfab__shm_memory_functions()->release(ctx->memory, at, 0);
}

MLFAB__INTERNAL const mlfab__context_areas *mlfab__areas_functions(void) {
  static const mlfab__context_areas functions = {areas_open, areas_close, areas_share, areas_alloc,
                                                 areas_release};
  return mlfab__shm_memory_functions() ? &functions : NULL;
}
