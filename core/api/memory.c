/* memory.c - mlfab_alloc: memory that other processes of the host can read in place, if possible. */
#include "context.h"

static int memory_rests(mlfab *ctx, void *what) {
  (void)what;
  return !ctx->arena_runs;
}

/* 0, or MEMORY. */
static int memory_get(mlfab *ctx, mlfab__context_memory *memory) {
  (void)mlfab__context_arena(ctx); /* the first MEMBERSHIP announces it */
  if (ctx->memory) memory->at = ctx->areas->alloc(ctx, memory->bytes);
  memory->shared = memory->at != NULL;
  if (!memory->at && memory->bytes < SIZE_MAX / 2) {
    memory->at = mlfab__alloc_aligned(&ctx->env, (size_t)memory->bytes);
    if (memory->at) memset(memory->at, 0, (size_t)memory->bytes);
  }
  return memory->at ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB_API int mlfab_alloc(mlfab *ctx, uint64_t bytes, void **memory_p) {
  CONTEXT_ENTER_TO_WAIT(ctx);
  mlfab_error *last = &ctx->node->requests.last;
  mlfab__context_memory *memory = NULL;
  int code = 0;
  if (!memory_p || bytes == 0)
    code = MLFAB__FAIL(last, MLFAB_ERR_ARGUMENT, "alloc: %s",
                       memory_p ? "0 bytes" : "memory_p is NULL");
  if (!code) code = mlfab__context_in_vain(ctx, 0);
  if (!code) {
    memory = mlfab__alloc(&ctx->env, sizeof *memory);
    if (memory) memory->bytes = bytes;
    if (!memory || memory_get(ctx, memory))
      code = MLFAB__FAIL(last, MLFAB_ERR_MEMORY, "alloc: out of memory for %llu bytes",
                         (unsigned long long)bytes);
    code = mlfab__context_in_vain(ctx, code);
  }
  if (!code) {
    memory->next = ctx->memories;
    ctx->memories = memory;
    *memory_p = memory->at;
  } else if (memory) {
    mlfab__context_free_memory(ctx, memory);
  }
  return mlfab__context_leave(ctx, code);
}

MLFAB_API int mlfab_free(mlfab *ctx, void *memory) {
  CONTEXT_ENTER_TO_WAIT(ctx);
  if (!mlfab__context_until(ctx, MLFAB__NEVER, memory_rests, NULL))
    return mlfab__context_leave(ctx, mlfab__context_in_vain(ctx, 0)); /* which frees it */
  mlfab__context_memory **at = &ctx->memories;
  while (*at && (*at)->at != memory) at = &(*at)->next;
  mlfab__context_memory *found = *at;
  int code = 0;
  if (found) {
    *at = found->next;
    if (found->shared) ctx->areas->release(ctx, found->at);
    mlfab__context_free_memory(ctx, found);
  } else {
    code = MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_ARGUMENT,
                       "free: this memory does not come from mlfab_alloc of this context");
  }
  return mlfab__context_leave(ctx, code);
}
