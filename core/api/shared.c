/* shared.c - a context: collectives in memory that workers of one host share (the arena).
 *
 * When all workers are on one host and have mapped each other's memory, a blocking collective runs there (shm_coll.h),
 * without frames. The call takes a number from the communicator as any other call (comm.h, `outside`), and waits for
 * its turn. It runs without the lock. While it waits for the other workers, it asks at times whether the communicator
 * has ended it. The call's signature and the epoch make all workers choose alike. If another worker's call of this
 * number does not block, the communicator reports that, and all workers use frames. */
#include "../base/shm_coll.h"
#include "calls_coll.h"

/* The call of one thread. Calls run in the order of their numbers. */
struct mlfab__context_turn {
  mlfab__context_turn *next;
  mlfab *ctx;
  mlfab_request request;
  uint64_t number, signature;
  int ended; /* by the communicator, not by the arena */
};

/* --- a call in the arena --- */

static void shared_queue(mlfab *ctx, mlfab__context_turn *turn) {
  mlfab__context_turn **at = &ctx->turns;
  while (*at) at = &(*at)->next;
  *at = turn;
}

/* Ends a turn: the next call may run, and so may calls that wait until no call is in the arena. */
static void shared_unqueue(mlfab *ctx, mlfab__context_turn *turn) {
  mlfab__context_turn **at = &ctx->turns;
  while (*at != turn) at = &(*at)->next;
  *at = turn->next;
  if (ctx->waiters == 0) return;
  pthread_cond_broadcast(&ctx->changed);
  if (ctx->sleeping) mlfab__context_wake(ctx);
}

/* Returns 0: it has to wait; 1: it may run; another value: it does not run in the arena. */
static int shared_stands(mlfab *ctx, void *what) {
  mlfab__context_turn *turn = what;
  int state =
      mlfab__comm_outside(ctx->node->parts->comm, turn->request, &turn->number, &turn->signature);
  return state == 1 && ctx->turns != turn ? 0 : state;
}

/* Called while a worker in the arena waits for another: drives the context, because no other call does meanwhile. */
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

/* Runs the call without the lock. The members of one host are in the order of their ranks, so the blocks have the
 * order of the arena. */
static void shared_share(mlfab *ctx, mlfab__context_turn *turn, const mlfab__comm_call *call) {
  const mlfab__comm *comm = ctx->node->parts->comm;
  uint64_t counts[MLFAB__SHM_COLL_MOST];
  uint32_t ranks[MLFAB__SHM_COLL_MOST], culprit = 0;
  mlfab__shm_coll_call run = {.number = turn->number,
                              .signature = turn->signature,
                              .kind = call->kind,
                              .dtype = call->dtype,
                              .op = call->op,
                              .kernels = comm->config->kernels,
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
  int blames =
      code == MLFAB_ERR_MISMATCH || code == MLFAB_ERR_NOT_FINITE || code == MLFAB_ERR_FRAME;
  if (turn->ended) {
    /* Others do without the arena: it goes on with frames, if it has not failed. */
    (void)mlfab__comm_outside(ctx->node->parts->comm, turn->request, &turn->number,
                              &turn->signature);
  } else {
    ctx->now_ns = mlfab__context_now(ctx);
    ctx->node->now_ns = mlfab__max(ctx->node->now_ns, ctx->now_ns);
    mlfab__comm_finish(ctx->node->parts->comm, turn->request, code,
                       blames ? (int32_t)ranks[culprit] : MLFAB_NO_RANK, ctx->now_ns);
  }
  mlfab__node_return(ctx->node, 0, NULL);
  if (comm->phase == MLFAB__COMM_LISTED) mlfab__context_pump(ctx); /* it had to wait */
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

/* --- the arena --- */

static int shared_make(mlfab *ctx) {
  mlfab__shm_coll_name name;
  mlfab__comm *comm = ctx->node->parts->comm;
  if (ctx->shm_coll->create(&ctx->env, ctx->memory, &ctx->arena, &name)) return 0;
  comm->arena_pid = name.pid;
  comm->arena_fd = name.fd;
  comm->arena_nonce = name.nonce;
  comm->arena_bytes = name.bytes;
  return 1;
}

static void shared_destroy(mlfab *ctx) { ctx->shm_coll->destroy(&ctx->arena); }

static int shared_map(mlfab *ctx) {
  mlfab__shm_coll_name names[MLFAB__SHM_COLL_MOST];
  mlfab__comm *comm = ctx->node->parts->comm;
  if (!comm || comm->phase != MLFAB__COMM_LISTED || ctx->arena_runs) return 0;
  int ok = ctx->arena && comm->members <= MLFAB__SHM_COLL_MOST;
  for (uint32_t i = 0; ok && i < comm->members; i++) {
    const mlfab__membership_member *m = &comm->list[i];
    names[i] = (mlfab__shm_coll_name){m->arena_pid, m->arena_fd, m->arena_nonce, m->arena_bytes};
  }
  ok = ok && !ctx->shm_coll->join(ctx->arena, names, comm->members, comm->me, comm->epoch);
  mlfab__comm_mapped(comm, ok);
  mlfab__node_return(ctx->node, 0, NULL);
  return 1;
}

MLFAB__INTERNAL const mlfab__context_sharing *mlfab__shared_memory(void) {
  static const mlfab__context_sharing functions = {shared_make, shared_destroy, shared_map};
  return &functions;
}
