/* collective.c - a context: collectives between workers, and memory that those of one host share.
 *
 * A blocking call of workers that are all on one host, and have mapped each other's memory, is
 * carried out there (arena.h), without frames. It takes a number from the communicator like any
 * other (comm.h, `outside`), waits until that one's turn has come, and leaves the lock meanwhile:
 * while it waits for the others it looks now and then whether the communicator has ended it. What all do
 * alike is chosen by what is in the call's signature and by the epoch; where another worker's call
 * of this number did not block, the communicator says so, and all go on with frames. */
#include "calls.h"
#include "drive.h"

/* One thread's call; they are run in the order in which they got their numbers. */
struct mlfab__drive_turn {
  mlfab__drive_turn *next;
  mlfab *ctx;
  mlfab_request request;
  uint64_t number, signature;
  int ended; /* not by the arena */
};

struct mlfab__drive_memory {
  mlfab__drive_memory *next;
  void *at;
  uint64_t bytes;
  int shared;
};

/* --- the arena --- */

static int collective_may_share(const mlfab *ctx) {
  const mlfab_transport *shm = mlfab_transport_shm();
  if (!ctx->node->is_worker || ctx->node->config.workers == 1 || ctx->simulated || !shm) return 0;
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    if (ctx->transports[t].table == shm) return 1;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__drive_arena(mlfab *ctx) {
  mlfab__arena_name name;
  if (ctx->arena_tried) return ctx->arena != NULL;
  ctx->arena_tried = 1;
  if (!collective_may_share(ctx) || mlfab__arena_create(&ctx->env, &ctx->arena, &name)) return 0;
  ctx->node->comm.arena_pid = name.pid;
  ctx->node->comm.arena_fd = name.fd;
  ctx->node->comm.arena_nonce = name.nonce;
  ctx->node->comm.arena_bytes = name.bytes;
  return 1;
}

MLFAB__INTERNAL int mlfab__drive_map(mlfab *ctx) {
  mlfab__arena_name names[MLFAB__ARENA_MOST];
  const mlfab__comm *comm = &ctx->node->comm;
  if (!ctx->node->is_worker || !comm->arena_asked || ctx->arena_runs) return 0;
  int ok = ctx->arena && comm->members <= MLFAB__ARENA_MOST;
  for (uint32_t i = 0; ok && i < comm->members; i++) {
    const mlfab__roll_member *m = &comm->list[i];
    names[i] = (mlfab__arena_name){m->arena_pid, m->arena_fd, m->arena_nonce, m->arena_bytes};
  }
  ok = ok && !mlfab__arena_join(ctx->arena, names, comm->members, comm->me, comm->epoch);
  mlfab__node_mapped(ctx->node, ok);
  return 1;
}

/* --- a call in the arena --- */

static void collective_queue(mlfab *ctx, mlfab__drive_turn *turn) {
  mlfab__drive_turn **at = &ctx->turns;
  while (*at) at = &(*at)->next;
  *at = turn;
}

/* Lets the next one in, and those who wait until nobody is. */
static void collective_unqueue(mlfab *ctx, mlfab__drive_turn *turn) {
  mlfab__drive_turn **at = &ctx->turns;
  while (*at != turn) at = &(*at)->next;
  *at = turn->next;
  if (ctx->waiters == 0) return;
  pthread_cond_broadcast(&ctx->changed);
  if (ctx->sleeping) mlfab__drive_wake(ctx);
}

/* 1 when it may run; not 0 when it need not be waited for. */
static int collective_stands(mlfab *ctx, void *what) {
  mlfab__drive_turn *turn = what;
  int state = mlfab__comm_outside(&ctx->node->comm, turn->request, &turn->number, &turn->signature);
  return state == 1 && ctx->turns != turn ? 0 : state;
}

/* Somebody is awaited in the arena. The thread does not stay aside, and where there is none this does
 * its work. */
static int collective_pause(void *user) {
  mlfab__drive_turn *turn = user;
  mlfab *ctx = turn->ctx;
  pthread_mutex_lock(&ctx->lock);
  if (ctx->dozing) pthread_cond_broadcast(&ctx->changed);
  mlfab__drive_pump(ctx);
  int code = mlfab__comm_outside_over(&ctx->node->comm, turn->request);
  code = mlfab__drive_in_vain(ctx, code);
  turn->ended = code != 0;
  pthread_mutex_unlock(&ctx->lock);
  return code;
}

/* Runs it without the lock. Members of one host are in the order of their ranks: the data of blocks
 * lies as the arena has it. */
static void collective_share(mlfab *ctx, mlfab__drive_turn *turn, const mlfab__comm_call *call) {
  const mlfab__comm *comm = &ctx->node->comm;
  uint64_t counts[MLFAB__ARENA_MOST];
  uint32_t ranks[MLFAB__ARENA_MOST], culprit = 0;
  mlfab__arena_call run = {.number = turn->number,
                           .signature = turn->signature,
                           .kind = call->kind,
                           .dtype = call->dtype,
                           .op = call->op,
                           .refuse = call->refuse_nan,
                           .bufs = call->vecs,
                           .nbufs = call->n,
                           .counts = call->counts ? counts : NULL,
                           .pause = collective_pause,
                           .user = turn};
  for (uint32_t i = 0; i < call->n; i++) run.count += call->vecs[i].count;
  for (uint32_t i = 0; i < comm->members; i++) {
    ranks[i] = comm->ranks[i];
    if (call->counts) counts[i] = call->counts[ranks[i]];
  }
  ctx->arena_runs = 1;
  pthread_mutex_unlock(&ctx->lock);
  int code = mlfab__arena_run(ctx->arena, &run, &culprit);
  pthread_mutex_lock(&ctx->lock);
  ctx->arena_runs = 0;
  int blames = code == MLFAB_ERR_SHAPE || code == MLFAB_ERR_NOT_FINITE || code == MLFAB_ERR_FRAME;
  if (turn->ended) {
    mlfab__node_turn_plain(ctx->node, turn->request);
  } else {
    ctx->now_ns = mlfab__drive_now(ctx);
    mlfab__node_carried_out(ctx->node, turn->request, code,
                            blames ? (int32_t)ranks[culprit] : MLFAB_NO_RANK, ctx->now_ns);
  }
  if (comm->arena_asked) mlfab__drive_pump(ctx); /* it had to wait */
}

/* A call that has a number, and may go through the arena. */
static void collective_run(mlfab *ctx, mlfab_request request, const mlfab__comm_call *call,
                           uint64_t now) {
  mlfab__drive_turn turn = {.ctx = ctx, .request = request};
  collective_queue(ctx, &turn);
  int state = collective_stands(ctx, &turn);
  if (state == 0) {
    mlfab__drive_send(ctx, now);
    state = mlfab__drive_until(ctx, MLFAB__NEVER, collective_stands, &turn);
  }
  if (state == 1) collective_share(ctx, &turn, call);
  collective_unqueue(ctx, &turn);
}

/* --- calls --- */

static int collective_block(mlfab *ctx, mlfab__collective *c) {
  mlfab_request request = 0;
  mlfab_result result;
  int done = 0;
  uint64_t now = mlfab__drive_enter(ctx);
  c->block = (uint8_t)mlfab__drive_arena(ctx);
  int code = mlfab__node_collective(ctx->node, c, now, &request);
  if (!code && c->call.outside) collective_run(ctx, request, &c->call, now);
  if (!code) code = mlfab_node_test(ctx->node, request, &done, &result);
  if (!code && !done) {
    code = mlfab__drive_await(ctx, request, 0, NULL);
  } else { /* others may wait for what it took no time to make, or to fail */
    mlfab__drive_send(ctx, now);
    if (done) code = result.status;
    if (code == MLFAB_ERR_CANCELLED) code = mlfab__drive_in_vain(ctx, code);
  }
  mlfab__drive_leave(ctx);
  return code;
}

static int collective_begin(mlfab *ctx, mlfab__collective *c, mlfab_request *request_p) {
  DRIVE_START(
      ((void)mlfab__drive_arena(ctx), mlfab__node_collective(ctx->node, c, now, request_p)));
}

MLFAB_API int mlfab_allreduce(mlfab *ctx, void *data, uint64_t count, int dtype,
                              uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  mlfab_vec vec = {data, count};
  mlfab_collective options = {.size = sizeof options, .timeout_ns = timeout_ns};
  mlfab__collective c = {.kind = MLFAB__RING_ALLREDUCE,
                         .plan = 1,
                         .bufs = &vec,
                         .n = 1,
                         .dtype = dtype,
                         .options = &options};
  return collective_block(ctx, &c);
}

static mlfab__collective collective_list(const mlfab_vec *bufs, uint32_t n, int dtype,
                                         const mlfab_collective *options) {
  return (mlfab__collective){
      .kind = MLFAB__RING_ALLREDUCE, .bufs = bufs, .n = n, .dtype = dtype, .options = options};
}

MLFAB_API int mlfab_allreduce_list(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                   const mlfab_collective *options) {
  DRIVE_CHECK(ctx);
  mlfab__collective c = collective_list(bufs, n, dtype, options);
  return collective_block(ctx, &c);
}

MLFAB_API int mlfab_allreduce_start(mlfab *ctx, const mlfab_vec *bufs, uint32_t n, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  mlfab__collective c = collective_list(bufs, n, dtype, options);
  return collective_begin(ctx, &c, request_p);
}

static mlfab__collective collective_blocks(uint8_t kind, void *data, const uint64_t *counts,
                                           int dtype, const mlfab_collective *options) {
  return (mlfab__collective){
      .kind = kind, .data = data, .counts = counts, .dtype = dtype, .options = options};
}

MLFAB_API int mlfab_reduce_scatter(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                   const mlfab_collective *options) {
  DRIVE_CHECK(ctx);
  mlfab__collective c = collective_blocks(MLFAB__RING_REDUCE_SCATTER, data, counts, dtype, options);
  return collective_block(ctx, &c);
}

MLFAB_API int mlfab_reduce_scatter_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                         const mlfab_collective *options,
                                         mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  mlfab__collective c = collective_blocks(MLFAB__RING_REDUCE_SCATTER, data, counts, dtype, options);
  return collective_begin(ctx, &c, request_p);
}

MLFAB_API int mlfab_allgather(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                              const mlfab_collective *options) {
  DRIVE_CHECK(ctx);
  mlfab__collective c = collective_blocks(MLFAB__RING_ALLGATHER, data, counts, dtype, options);
  return collective_block(ctx, &c);
}

MLFAB_API int mlfab_allgather_start(mlfab *ctx, void *data, const uint64_t *counts, int dtype,
                                    const mlfab_collective *options, mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  mlfab__collective c = collective_blocks(MLFAB__RING_ALLGATHER, data, counts, dtype, options);
  return collective_begin(ctx, &c, request_p);
}

MLFAB_API int mlfab_broadcast_start(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                                    const mlfab_collective *options, mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  mlfab__collective c = {.kind = MLFAB__RING_BROADCAST,
                         .root = root,
                         .data = data,
                         .bytes = bytes,
                         .options = options};
  return collective_begin(ctx, &c, request_p);
}

MLFAB_API int mlfab_barrier_start(mlfab *ctx, const mlfab_collective *options,
                                  mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  mlfab__collective c = {.kind = MLFAB__RING_BARRIER, .options = options};
  return collective_begin(ctx, &c, request_p);
}

/* --- memory --- */

static int collective_rests(mlfab *ctx, void *what) {
  (void)what;
  return !ctx->arena_runs;
}

/* 0, or MEMORY. */
static int collective_alloc(mlfab *ctx, mlfab__drive_memory *memory) {
  if (mlfab__drive_arena(ctx)) {
    if (!mlfab__drive_until(ctx, MLFAB__NEVER, collective_rests, NULL)) return MLFAB_ERR_CLOSED;
    memory->at = mlfab__arena_alloc(ctx->arena, memory->bytes);
    memory->shared = memory->at != NULL;
  }
  if (!memory->at && memory->bytes < SIZE_MAX / 2) {
    memory->at = mlfab__alloc_aligned(&ctx->env, (size_t)memory->bytes);
    if (memory->at) memset(memory->at, 0, (size_t)memory->bytes);
  }
  return memory->at ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB_API int mlfab_alloc(mlfab *ctx, uint64_t bytes, void **memory_p) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  mlfab_error *last = &ctx->node->requests.last;
  mlfab__drive_memory *memory = NULL;
  int code = 0;
  if (!memory_p || bytes == 0)
    code = mlfab__error(last, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "alloc: %s",
                        memory_p ? "0 bytes" : "memory_p is NULL");
  if (!code) code = mlfab__drive_in_vain(ctx, 0);
  if (!code) {
    memory = mlfab__alloc(&ctx->env, sizeof *memory);
    if (memory) memory->bytes = bytes;
    if (!memory || collective_alloc(ctx, memory))
      code = mlfab__error(last, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, 0,
                          "alloc: out of memory for %llu bytes", (unsigned long long)bytes);
    code = mlfab__drive_in_vain(ctx, code);
  }
  if (!code) {
    memory->next = ctx->memories;
    ctx->memories = memory;
    *memory_p = memory->at;
  } else {
    mlfab__free(&ctx->env, memory, sizeof *memory);
  }
  mlfab__drive_leave(ctx);
  return code;
}

static void collective_free(mlfab *ctx, mlfab__drive_memory *memory) {
  if (!memory->shared) mlfab__free_aligned(&ctx->env, memory->at, (size_t)memory->bytes);
  mlfab__free(&ctx->env, memory, sizeof *memory);
}

MLFAB_API int mlfab_free(mlfab *ctx, void *memory) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  if (!mlfab__drive_until(ctx, MLFAB__NEVER, collective_rests, NULL)) {
    int closed = mlfab__drive_in_vain(ctx, 0); /* which frees it */
    mlfab__drive_leave(ctx);
    return closed;
  }
  mlfab__drive_memory **at = &ctx->memories;
  while (*at && (*at)->at != memory) at = &(*at)->next;
  mlfab__drive_memory *found = *at;
  int code = 0;
  if (found) {
    *at = found->next;
    if (found->shared) mlfab__arena_release(ctx->arena, found->at);
    collective_free(ctx, found);
  } else {
    code = mlfab__error(&ctx->node->requests.last, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                        "free: this memory is not of mlfab_alloc of this context");
  }
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB__INTERNAL void mlfab__drive_free_memory(mlfab *ctx) {
  while (ctx->memories) {
    mlfab__drive_memory *memory = ctx->memories;
    ctx->memories = memory->next;
    collective_free(ctx, memory);
  }
  mlfab__arena_destroy(&ctx->arena); /* and what is of it */
}
