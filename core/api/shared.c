/* shared.c - a context: collectives in memory that workers of one host share, and that memory.
 *
 * A blocking call of workers that are all on one host, and have mapped each other's memory, is
 * carried out there (shm_coll.h), without frames. It takes a number from the communicator like any
 * other (comm.h, `outside`), waits until that one's turn has come, and leaves the lock meanwhile:
 * while it waits for the others it looks now and then whether the communicator has ended it. What all do
 * alike is chosen by what is in the call's signature and by the epoch; where another worker's call
 * of this number did not block, the communicator says so, and all go on with frames. */
#include "context.h"

/* One thread's call; they are run in the order in which they got their numbers. */
struct mlfab__context_turn {
  mlfab__context_turn *next;
  mlfab *ctx;
  mlfab_request request;
  uint64_t number, signature;
  int ended; /* not by the arena */
};

/* --- a call in the arena --- */

static void shared_queue(mlfab *ctx, mlfab__context_turn *turn) {
  mlfab__context_turn **at = &ctx->turns;
  while (*at) at = &(*at)->next;
  *at = turn;
}

/* Lets the next one in, and those who wait until nobody is. */
static void shared_unqueue(mlfab *ctx, mlfab__context_turn *turn) {
  mlfab__context_turn **at = &ctx->turns;
  while (*at != turn) at = &(*at)->next;
  *at = turn->next;
  if (ctx->waiters == 0) return;
  pthread_cond_broadcast(&ctx->changed);
  if (ctx->sleeping) mlfab__context_wake(ctx);
}

/* 1 when it may run; not 0 when it need not be waited for. */
static int shared_stands(mlfab *ctx, void *what) {
  mlfab__context_turn *turn = what;
  int state =
      mlfab__comm_outside(ctx->node->parts->comm, turn->request, &turn->number, &turn->signature);
  return state == 1 && ctx->turns != turn ? 0 : state;
}

/* Somebody is awaited in the arena. The thread does not stay aside, and where there is none this does
 * its work. */
static int shared_pause(void *user) {
  mlfab__context_turn *turn = user;
  mlfab *ctx = turn->ctx;
  pthread_mutex_lock(&ctx->lock);
  if (ctx->thread_is >= MLFAB__THREAD_DOZES) pthread_cond_broadcast(&ctx->changed);
  mlfab__context_pump(ctx);
  int code = mlfab__comm_outside_over(ctx->node->parts->comm, turn->request);
  code = mlfab__context_in_vain(ctx, code);
  turn->ended = code != 0;
  pthread_mutex_unlock(&ctx->lock);
  return code;
}

/* Runs it without the lock. Members of one host are in the order of their ranks: the data of blocks
 * lies as the arena has it. */
static void shared_share(mlfab *ctx, mlfab__context_turn *turn, const mlfab__comm_call *call) {
  const mlfab__comm *comm = ctx->node->parts->comm;
  uint64_t counts[MLFAB__SHM_COLL_MOST];
  uint32_t ranks[MLFAB__SHM_COLL_MOST], culprit = 0;
  mlfab__shm_coll_call run = {.number = turn->number,
                              .signature = turn->signature,
                              .kind = call->kind,
                              .dtype = call->dtype,
                              .op = call->op,
                              .refuse = call->refuse_nan,
                              .bufs = call->vecs,
                              .nbufs = call->n,
                              .counts = call->counts ? counts : NULL,
                              .pause = shared_pause,
                              .user = turn};
  for (uint32_t i = 0; i < call->n; i++) run.count += call->vecs[i].count;
  for (uint32_t i = 0; i < comm->members; i++) {
    ranks[i] = comm->ranks[i];
    if (call->counts) counts[i] = call->counts[ranks[i]];
  }
  ctx->arena_runs = 1;
  pthread_mutex_unlock(&ctx->lock);
  int code = ctx->shm_coll->run(ctx->arena, &run, &culprit);
  pthread_mutex_lock(&ctx->lock);
  ctx->arena_runs = 0;
  int blames = code == MLFAB_ERR_SHAPE || code == MLFAB_ERR_NOT_FINITE || code == MLFAB_ERR_FRAME;
  if (turn->ended) {
    /* Others do without: it goes on with frames, unless it has failed. */
    (void)mlfab__comm_outside(ctx->node->parts->comm, turn->request, &turn->number,
                              &turn->signature);
  } else {
    ctx->now_ns = mlfab__context_now(ctx);
    ctx->node->now_ns = mlfab__max(ctx->node->now_ns, ctx->now_ns);
    mlfab__comm_finish(ctx->node->parts->comm, turn->request, code,
                       blames ? (int32_t)ranks[culprit] : MLFAB_NO_RANK, ctx->now_ns);
  }
  mlfab__node_return(ctx->node, 0, NULL);
  if (comm->arena_asked) mlfab__context_pump(ctx); /* it had to wait */
}

MLFAB__INTERNAL void mlfab__shared_run(mlfab *ctx, mlfab_request request,
                                       const mlfab__comm_call *call) {
  mlfab__context_turn turn = {.ctx = ctx, .request = request};
  shared_queue(ctx, &turn);
  int state = shared_stands(ctx, &turn);
  if (state == 0) {
    mlfab__context_sent(ctx, 0);
    state = mlfab__context_until(ctx, MLFAB__NEVER, shared_stands, &turn);
  }
  if (state == 1) shared_share(ctx, &turn, call);
  shared_unqueue(ctx, &turn);
}

/* --- memory --- */

static int shared_rests(mlfab *ctx, void *what) {
  (void)what;
  return !ctx->arena_runs;
}

/* 0, or MEMORY. */
static int shared_alloc(mlfab *ctx, mlfab__context_memory *memory) {
  if (mlfab__context_arena(ctx)) {
    if (!mlfab__context_until(ctx, MLFAB__NEVER, shared_rests, NULL)) return MLFAB_ERR_CLOSED;
    memory->at = ctx->shm_coll->alloc(ctx->arena, memory->bytes);
    memory->shared = memory->at != NULL;
  }
  if (!memory->at && memory->bytes < SIZE_MAX / 2) {
    memory->at = mlfab__alloc_aligned(&ctx->env, (size_t)memory->bytes);
    if (memory->at) memset(memory->at, 0, (size_t)memory->bytes);
  }
  return memory->at ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB_API int mlfab_alloc(mlfab *ctx, uint64_t bytes, void **memory_p) {
  CONTEXT_CHECK(ctx);
  mlfab__context_enter(ctx);
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
    if (!memory || shared_alloc(ctx, memory))
      code = MLFAB__FAIL(last, MLFAB_ERR_MEMORY, "alloc: out of memory for %llu bytes",
                         (unsigned long long)bytes);
    code = mlfab__context_in_vain(ctx, code);
  }
  if (!code) {
    memory->next = ctx->memories;
    ctx->memories = memory;
    *memory_p = memory->at;
  } else {
    mlfab__free(&ctx->env, memory, sizeof *memory);
  }
  mlfab__context_leave(ctx);
  return code;
}

MLFAB_API int mlfab_free(mlfab *ctx, void *memory) {
  CONTEXT_CHECK(ctx);
  mlfab__context_enter(ctx);
  if (!mlfab__context_until(ctx, MLFAB__NEVER, shared_rests, NULL)) {
    int closed = mlfab__context_in_vain(ctx, 0); /* which frees it */
    mlfab__context_leave(ctx);
    return closed;
  }
  mlfab__context_memory **at = &ctx->memories;
  while (*at && (*at)->at != memory) at = &(*at)->next;
  mlfab__context_memory *found = *at;
  int code = 0;
  if (found) {
    *at = found->next;
    if (found->shared) ctx->shm_coll->release(ctx->arena, found->at);
    mlfab__context_free_memory(ctx, found);
  } else {
    code = MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_ARGUMENT,
                       "free: this memory is not of mlfab_alloc of this context");
  }
  mlfab__context_leave(ctx);
  return code;
}
