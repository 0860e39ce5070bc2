/* context.c - a context: a node, its transports, a lock, and in most modes a progress thread.
 *
 * Only this file calls transports, reads the clock, and knows threads. One lock guards node and transports. A thread
 * that waits drives: it moves events and actions (pump). If a pump moves nothing, the thread spins. Then it polls
 * between yields of the processor, for as long as a wake-up would cost. Then it sleeps in the transport without the
 * lock (`sleeping`). Other waiters meanwhile sleep on `changed`. It is signalled after every pump with an effect, and
 * when the sleeper wakes.
 *
 * The progress thread drives while no thread waits. Two threads that drive only wake each other. So the progress thread
 * stays aside for waiters, and for callers that call again and again and drive themselves (`parked`; `brisk`: less than
 * CONTEXT_GRACE_NS between two calls). Its states (`thread_is`):
 *
 *    NONE     The thread does not exist: callers drive.
 *    DRIVES   It polls.
 *    LISTENS  It sleeps in the transport. A new waiter wakes it.
 *    ASIDE    It sleeps on `changed` for CONTEXT_GRACE_NS: work is under way, others drive.
 *    DOZES    It sleeps on `changed` for longer: a thread waits, or nothing is under way.
 *    NAPS     As DOZES, but for CONTEXT_NAP_NS: calls are brisk, and peers may need this node.
 *
 *    DRIVES  --nothing moved, spun--> LISTENS --something came, woken--> DRIVES
 *    DRIVES  --parked, or a thread waits--> ASIDE, DOZES or NAPS --signalled, time over--> DRIVES
 *
 *    parked  0 -> 1: a call ends all work, while the thread is not in LISTENS; the fourth call ends in one
 *                    sleep of LISTENS; calls have driven since it went aside, and are brisk.
 *            1 -> 0: it comes back, no thread waits, and calls have not driven since it went aside.
 *
 * Invariants. (1) When a call leaves work and no thread waits, a thread polls soon. The call wakes a thread that DOZES;
 * if calls are not brisk, also a thread that NAPS. ASIDE and NAPS end by themselves. (2) At most one thread is in a
 * transport's wait (`sleeping`). */
#include "context.h"

#include "../base/system.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/epoll.h>
#include <sys/eventfd.h>
#endif

enum {
  CONTEXT_BATCH = 64,
  CONTEXT_LINK_BITS = 24,
  CONTEXT_CALLS_ASLEEP = 4,  /* calls during one sleep of the thread after which it stays aside */
  CONTEXT_PUMP_EVERY = 8,    /* while it stays aside, one of so many calls that do not wait pumps */
  CONTEXT_GRACE_NS = 200000, /* time without a call after which the thread takes over again */
  CONTEXT_NAP_NS = 1000000,  /* of the thread, while calls are brisk */
  CONTEXT_YIELD_NS =
      200000, /* time that a waiter polls between yields after spinning: the cost of a wake-up */
  CONTEXT_STACK_BYTES =
      1 << 20, /* least stack of the thread: musl gives 128 KiB, and callbacks run on it */
  CONTEXT_DRAIN_NS =
      10000000,             /* between two checks whether all threads have left a closed context */
  CONTEXT_COPY_NS = 100000, /* between two looks at copies of a device, which wake nobody */
  CONTEXT_CLOCK_EVERY = 16,
  CONTEXT_LOOK_EVERY = 64
};

static void context_no_log(void *user, int level, const char *line) {
  (void)user;
  (void)level;
  (void)line;
}

/* Number of contexts opened in this process. Unlike an address, a number is never used again. */
static _Atomic uint64_t context_count;

/* --- forks --- */

/* The number of forks between this process and the first that used the library. The child adds one before it runs any
 * other code: contexts with another count are its parents'. */
static uint32_t context_forks;
static int context_fork_error;
static pthread_once_t context_once = PTHREAD_ONCE_INIT;

static void context_forked(void) { context_forks++; }

static void context_watch_forks(void) {
  context_fork_error = pthread_atfork(NULL, NULL, context_forked);
}

/* A simulated context is complete in a child, too, and shares nothing with the parent. */
static int context_is_child(const mlfab *ctx) {
  return ctx->forks != context_forks && !ctx->simulated;
}

MLFAB__INTERNAL int mlfab__context_check(const mlfab *ctx) {
  if (MLFAB__UNLIKELY(!ctx)) return MLFAB_ERR_ARGUMENT;
  return MLFAB__UNLIKELY(context_is_child(ctx)) ? MLFAB_ERR_STATE : 0;
}

MLFAB__INTERNAL int mlfab__context_null(mlfab *ctx, const char *what) {
  CONTEXT_LOOK(ctx, MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_ARGUMENT, "%s is NULL", what));
}

MLFAB__INTERNAL uint64_t mlfab__context_now(const mlfab *ctx) {
  return ctx->hooks.clock(ctx->hooks.user);
}

/* --- moving --- */

static int context_send(const mlfab__context_transport *transport, uint32_t link,
                        const mlfab_action *action) {
  const mlfab_transport *table = transport->table;
  return (action->callers && action->token && table->lend ? table->lend : table->send)(
      transport->self, link, action->head, action->head_bytes, action->bulk, action->bulk_bytes,
      action->token);
}

/* --- buffers that a transport still reads --- */

/* Returns the number of buffers that transports still have after they were taken back. While there are any, finished
 * requests are not reported: one could own such a buffer. `whom`: as for keeps. */
static uint32_t context_keeps(const mlfab *ctx, char *whom, size_t room) {
  uint32_t kept = 0;
  if (MLFAB__LIKELY(!ctx->lends)) return 0;
  for (uint32_t t = 0; t < ctx->ntransports && kept == 0; t++) {
    const mlfab__context_transport *transport = &ctx->transports[t];
    if (transport->table->keeps) kept = transport->table->keeps(transport->self, whom, room);
  }
  return kept;
}

static int context_action(mlfab *ctx, const mlfab_action *action) {
  if (action->kind == MLFAB_ACTION_FILE) return ctx->files->begin(ctx, action);
  if (action->kind == MLFAB_ACTION_CONNECT)
    return mlfab__calling_begin(ctx, action->address, action->token);
  mlfab__context_transport *transport = &ctx->transports[action->link >> CONTEXT_LINK_BITS];
  uint32_t link = action->link & ((1u << CONTEXT_LINK_BITS) - 1);
  switch (action->kind) {
    case MLFAB_ACTION_SEND:
      return context_send(transport, link, action);
    case MLFAB_ACTION_DETACH:
      return transport->table->detach(transport->self, link, action->token);
    case MLFAB_ACTION_PROBE:
      return transport->table->probe ? transport->table->probe(transport->self, link)
                                     : MLFAB_ERR_UNSUPPORTED;
    case MLFAB_ACTION_DISCONNECT:
      transport->table->disconnect(transport->self, link);
      if (transport->links > 0) transport->links--;
      return 0;
    default:
      return MLFAB_ERR_INTERNAL;
  }
}

/* Carries out the node's actions. */
static int context_actions(mlfab *ctx, uint64_t now) {
  mlfab_action action;
  int moved = 0;
  do {
    while (mlfab_node_next(ctx->node, now, &action)) {
      mlfab_node_done(ctx->node, &action, context_action(ctx, &action), now);
      moved = 1;
    }
  } while (ctx->disk && ctx->files->events(ctx, now));
  for (uint32_t t = 0; moved && t < ctx->ntransports; t++)
    ctx->transports[t].table->flush(ctx->transports[t].self);
  return moved;
}

/* Hands at most a batch of one transport's events to the node. The clock is read with the first. */
static int context_events(mlfab *ctx, uint32_t t, uint64_t *now_p) {
  mlfab__context_transport *transport = &ctx->transports[t];
  mlfab_io_event event;
  int moved = 0;
  while (moved < CONTEXT_BATCH && transport->table->poll(transport->self, &event)) {
    if (*now_p == 0) *now_p = mlfab__context_now(ctx);
    mlfab_io_event mapped = event;
    if (event.link) mapped.link = event.link | (t << CONTEXT_LINK_BITS);
    if (event.kind == MLFAB_IO_UP) {
      mapped.caps = transport->table->caps | (event.caps & MLFAB_CAP_VOUCHED);
      transport->links++;
    }
    if (event.kind == MLFAB_IO_DOWN && event.link && transport->links > 0) transport->links--;
    int called = event.kind == MLFAB_IO_UP || event.kind == MLFAB_IO_DOWN;
    if (!called || !mlfab__calling_event(ctx, t, &mapped))
      mlfab_node_event(ctx->node, &mapped, *now_p);
    transport->table->release(transport->self, &event);
    /* Memory that a request has given back must leave the transport before the next event writes to it. */
    if (ctx->node->actions_count > 0) context_actions(ctx, *now_p);
    moved++;
  }
  return moved;
}

/* --- looking --- */

/* The descriptor of mlfab_fd is an epoll of the transports' descriptors, armed between calls, and of `tell`. `tell` is
 * readable if another call or the thread has moved anything since mlfab_progress last returned. */
MLFAB__INTERNAL void mlfab__context_tell(mlfab *ctx) {
  uint64_t one = 1;
  if (ctx->fd >= 0 && write(ctx->tell, &one, sizeof one) < 0) return; /* full: readable already */
}

/* --- memory that processes of one host share --- */

MLFAB__INTERNAL int mlfab__context_arena(mlfab *ctx) {
  if (ctx->arena_tried) return ctx->arena != NULL;
  ctx->arena_tried = 1;
  if (!ctx->node->is_worker || ctx->node->config.workers == 1 || !ctx->shm_coll || !ctx->sharing ||
      !ctx->memory)
    return 0;
  return ctx->sharing->make(ctx);
}

MLFAB__INTERNAL void mlfab__context_free_memory(mlfab *ctx, mlfab__context_memory *memory) {
  if (!memory->shared) mlfab__free_aligned(&ctx->env, memory->at, (size_t)memory->bytes);
  mlfab__free(&ctx->env, memory, sizeof *memory);
}

/* --- a look --- */

/* Reading the clock costs as much as polling a ring: an idle waiter reads it only once in CONTEXT_CLOCK_EVERY pumps. A
 * transport without links costs a system call a poll. While other transports have links, it is polled only once in
 * CONTEXT_LOOK_EVERY pumps, and after every sleep. */
MLFAB__INTERNAL int mlfab__context_pump(mlfab *ctx) {
  const mlfab_node *node = ctx->node;
  uint64_t now = 0;
  uint32_t links = 0;
  int moved = 0;
  ctx->looks++;
  ctx->quiet_looks++;
  for (uint32_t t = 0; t < ctx->ntransports; t++) links += ctx->transports[t].links;
  int all = links == 0 || ctx->quiet_looks % CONTEXT_LOOK_EVERY == 0 ||
            node->phase != MLFAB__BOOTSTRAP_READY;
  for (uint32_t t = 0; t < ctx->ntransports; t++)
    if (all || ctx->transports[t].links > 0) moved |= context_events(ctx, t, &now) > 0;
  if (now == 0 && (ctx->idle_looks++ % CONTEXT_CLOCK_EVERY == 0 || ctx->simulated))
    now = mlfab__context_now(ctx);
  if (now != 0) {
    ctx->now_ns = now;
    if (now >= ctx->measure_ns) node->parts->measure(ctx, now);
    if (now >= mlfab_node_deadline(ctx->node)) {
      /* A deadline may have ended a request without anything to send. */
      mlfab_node_tick(ctx->node, now);
      moved = 1;
    }
  }
  if (ctx->sharing) moved |= ctx->sharing->map(ctx);
  if (ctx->stager) moved |= ctx->stager->move(ctx);
  if (moved || ctx->disk || node->ready_count + node->actions_count + node->nidles > 0)
    moved |= context_actions(ctx, ctx->now_ns);
  if (moved) {
    ctx->idle_looks = 0;
    ctx->moves++;
    if (ctx->thread_is) mlfab__context_tell(ctx);
  }
  if (moved && ctx->waiters > 1) pthread_cond_broadcast(&ctx->changed);
  return moved;
}

/* --- sleeping --- */

/* The only transport that has links; NULL: the sleep covers all. */
static mlfab__context_transport *context_only(mlfab *ctx) {
  mlfab__context_transport *only = NULL;
  if (ctx->ntransports == 1) return &ctx->transports[0];
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    if (ctx->transports[t].links == 0) continue;
    if (only) return NULL;
    only = &ctx->transports[t];
  }
  return mlfab_node_ready(ctx->node, NULL) == 1 ? only : NULL;
}

/* Arms the descriptors of all transports for a sleep. With the lock. Returns 1 if an event is there already. */
static int context_arm(mlfab *ctx, struct pollfd *fds) {
  int pending = 0;
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    mlfab__context_transport *transport = &ctx->transports[t];
    fds[t].fd = transport->table->fd(transport->self);
    fds[t].events = POLLIN;
    fds[t].revents = 0;
    pending |= transport->table->arm(transport->self, 1);
  }
  return pending;
}

static void context_disarm(mlfab *ctx) {
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    ctx->transports[t].table->arm(ctx->transports[t].self, 0);
  }
}

/* A transport without a descriptor has to be polled. */
static void context_sleep_many(struct pollfd *fds, uint32_t n, uint64_t timeout) {
  uint64_t ms = (timeout + 999999) / 1000000;
  for (uint32_t t = 0; t < n; t++) {
    if (fds[t].fd < 0) ms = mlfab__min(ms, 1);
  }
  poll(fds, n, ms > 1000 ? 1000 : (int)ms);
}

static void context_cond_wait(mlfab *ctx, uint64_t ns);

/* Sleeps without the lock until an event may have come, at most until `until`. */
static void context_sleep(mlfab *ctx, uint64_t until) {
  uint64_t now = mlfab__context_now(ctx);
  until = mlfab__min(until, mlfab_node_deadline(ctx->node));
  if (until <= now && !ctx->simulated) return;
  if (ctx->stager && ctx->stager->copies(ctx)) until = mlfab__min(until, now + CONTEXT_COPY_NS);
  uint64_t timeout = until > now ? until - now : 0;
  mlfab__context_transport *only = context_only(ctx);
  if (only && ctx->ntransports > 1) timeout = mlfab__min(timeout, 50000000);
  uint32_t n = ctx->ntransports;
  struct pollfd fds[MLFAB__CONTEXT_TRANSPORTS];
  int many = !only && n > 0;
  if (many && context_arm(ctx, fds)) timeout = 0;
  int files = n == 0 && ctx->disk ? ctx->files->waits(ctx) : 0;
  if (files) { /* the disk's thread signals `changed` */
    if (files == 1) context_cond_wait(ctx, mlfab__min(timeout, 10000000));
    return;
  }
  ctx->sleeping = 1;
  ctx->sleeps_until_ns = until;
  pthread_mutex_unlock(&ctx->lock);
  if (n == 0) {
    struct timespec t = {0, (long)mlfab__min(timeout, 10000000)};
    nanosleep(&t, NULL);
  } else if (only) {
    only->table->wait(only->self, timeout);
  } else {
    context_sleep_many(fds, n, timeout);
  }
  pthread_mutex_lock(&ctx->lock);
  if (many) context_disarm(ctx);
  ctx->sleeping = 0;
  ctx->quiet_looks = UINT32_MAX;
  if (ctx->waiters > 0 || ctx->parked) pthread_cond_broadcast(&ctx->changed);
}

MLFAB__INTERNAL void mlfab__context_wake(mlfab *ctx) {
  for (uint32_t t = 0; t < ctx->ntransports; t++)
    ctx->transports[t].table->wake(ctx->transports[t].self);
}

static void context_cond_wait(mlfab *ctx, uint64_t ns) {
  uint64_t at = mlfab__monotonic(NULL) + ns;
  struct timespec t = {(time_t)(at / 1000000000u), (long)(at % 1000000000u)};
  pthread_cond_timedwait(&ctx->changed, &ctx->lock, &t);
}

/* Returns 1 if a waiter polls on, 0 if it sleeps now. Between two polls it gives up the lock: for other waiters, at
 * times for callers, and for other processes, which may have to run first. */
static int context_polls_on(mlfab *ctx, uint64_t idle_ns) {
  int spun = idle_ns >= ctx->spin_ns;
  if (ctx->simulated || ctx->ntransports == 0) return 0;
  if (spun && idle_ns - ctx->spin_ns >= CONTEXT_YIELD_NS) return 0;
  int yields = spun || ctx->idle_looks % CONTEXT_CLOCK_EVERY == 0;
  if (!yields && ctx->waiters < 2) return 1;
  pthread_mutex_unlock(&ctx->lock);
  if (yields) sched_yield();
  pthread_mutex_lock(&ctx->lock);
  if (spun) ctx->idle_looks = 0; /* the yield may have been long: read the clock */
  return 1;
}

/* --- the errors of a thread --- */

/* The last error of this thread, and the number of its context. */
static _Thread_local mlfab_error context_error;
static _Thread_local uint64_t context_error_of;

/* Does this process lack descriptors for one more connection (shared memory: three)? Returns 0, or their limit. */
static unsigned long context_starves(void) {
  struct rlimit limit;
  int fds[4], n = 0, number = 0;
  for (; n < 4 && !number; n += number ? 0 : 2) {
#if defined(__linux__)
    number = pipe2(&fds[n], O_CLOEXEC) ? errno : 0;
#else
    number = pipe(&fds[n]) ? errno : 0;
#endif
  }
  while (n > 0) (void)close(fds[--n]);
  return number == EMFILE && !getrlimit(RLIMIT_NOFILE, &limit) ? (unsigned long)limit.rlim_cur : 0;
}

MLFAB__INTERNAL void mlfab__context_trouble(mlfab *ctx, mlfab_error *error) {
  char text[200] = "";
  if (error->code != MLFAB_ERR_TIMEOUT && error->code != MLFAB_ERR_PEER_DEAD &&
      error->code != MLFAB_ERR_PEER_CLOSED)
    return;
  /* A program may poll with short deadlines: looking costs some 20 us, and more with many links. */
  if (error->code == MLFAB_ERR_TIMEOUT && error->waited_ns > 0 &&
      error->waited_ns < ctx->heartbeat_ns)
    return;
  unsigned long most = ctx->simulated ? 0 : context_starves();
  if (most > 0)
    snprintf(
        text, sizeof text,
        "this process has no descriptors left for connections: raise its limit (ulimit -n is %lu)",
        most);
  for (uint32_t t = 0; t < ctx->ntransports && !text[0]; t++) {
    const mlfab__context_transport *transport = &ctx->transports[t];
    if (MLFAB__HAS(transport->table, mlfab_transport, trouble) && transport->table->trouble &&
        !transport->table->trouble(transport->self, text, sizeof text))
      text[0] = 0;
  }
  if (!text[0] || strstr(error->text, text)) return;
  /* The cause counts more than the end of a long text. */
  size_t bytes = strlen(text), most_at = sizeof error->text - bytes - 3, at = strlen(error->text);
  at = mlfab__min(at, most_at);
  snprintf(error->text + at, sizeof error->text - at, "; %s", text);
}

/* Takes the last error for this thread. With the lock, before a call gives it up for the last time: if the call failed,
 * the last written error belongs to it. Errors that another thread has already taken do not. */
static void context_take_error(mlfab *ctx) {
  mlfab_error *last = &ctx->node->requests.last;
  if (last->code == 0 || last->reserved) return;
  mlfab__context_trouble(ctx, last);
  context_error = *last;
  context_error_of = ctx->number;
  last->reserved = 1;
}

/* --- functions that watch requests --- */

/* The context for which this thread runs a watching function. */
static _Thread_local const mlfab *context_told;

MLFAB__INTERNAL int mlfab__context_is_told(mlfab *ctx) {
  if (context_told != ctx) return 0;
  MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_STATE,
              "a call that waits, inside a function of mlfab_on_done");
  return 1;
}

MLFAB__INTERNAL int mlfab__context_is_over(mlfab *ctx, void *id) {
  const mlfab__request *request =
      mlfab__request_find(&ctx->node->requests, *(const mlfab_request *)id);
  return !request || (request->done && (!ctx->lends || context_keeps(ctx, NULL, 0) == 0));
}

/* As mlfab_node_test, but a request is not done while its buffers may still be read. */
static int context_test(mlfab *ctx, mlfab_request id, int *done_p, mlfab_result *result_p) {
  if (done_p && ctx->lends && !mlfab__context_is_over(ctx, &id)) {
    *done_p = 0;
    return 0;
  }
  return mlfab_node_test(ctx->node, id, done_p, result_p);
}

/* Takes a watch from the list: the first with a request that is done, or that the caller has ended. */
static mlfab__context_watch *context_next_watch(mlfab *ctx) {
  mlfab__context_watch **at = &ctx->watches;
  for (; *at; at = &(*at)->next) {
    mlfab__context_watch *watch = *at;
    if (!mlfab__context_is_over(ctx, &watch->request)) continue;
    *at = watch->next;
    return watch;
  }
  return NULL;
}

/* Calls the functions that watch finished requests, one at a time, without the lock. */
static void context_tell_done(mlfab *ctx) {
  const mlfab *outer = context_told;
  mlfab__context_watch *watch;
  if (ctx->tells || ctx->closed) return;
  ctx->tells = 1;
  const mlfab_error own = context_error;
  const uint64_t own_of = context_error_of;
  while (ctx->node->requests.to_tell > 0 && !ctx->closed &&
         (watch = context_next_watch(ctx)) != NULL) {
    mlfab_result result;
    int done = 0;
    /* If the request was ended meanwhile, its function is not called. */
    if (mlfab__request_find(&ctx->node->requests, watch->request) &&
        !mlfab_node_test(ctx->node, watch->request, &done, &result) && done) {
      context_take_error(ctx); /* for the function; the thread's own error comes back */
      pthread_mutex_unlock(&ctx->lock);
      context_told = ctx;
      watch->fn(watch->user, watch->request, &result);
      context_told = outer;
      pthread_mutex_lock(&ctx->lock);
    }
    mlfab__free(&ctx->env, watch, sizeof *watch);
  }
  context_error = own;
  context_error_of = own_of;
  ctx->tells = 0;
}

MLFAB_API int mlfab_on_done(mlfab *ctx, mlfab_request id, mlfab_done_fn fn, void *user) {
  CONTEXT_ENTER(ctx);
  mlfab_error *last = &ctx->node->requests.last;
  mlfab__request *request = mlfab__request_find(&ctx->node->requests, id);
  mlfab__context_watch *watch = NULL;
  int code = 0;
  if (!fn)
    code = MLFAB__FAIL(last, MLFAB_ERR_ARGUMENT, "on_done: the function is NULL");
  else if (!request || request->watched)
    code = MLFAB__FAIL(last, MLFAB_ERR_REQUEST, "on_done: the request %s",
                       request ? "has a function" : "is unknown, or was ended before");
  else if (!(watch = mlfab__alloc(&ctx->env, sizeof *watch)))
    code = MLFAB__FAIL(last, MLFAB_ERR_MEMORY, "on_done: out of memory");
  if (!code) {
    mlfab__context_watch **end = &ctx->watches;
    while (*end) end = &(*end)->next;
    *watch = (mlfab__context_watch){NULL, id, fn, user};
    *end = watch;
    request->watched = 1;
    ctx->node->requests.to_tell += request->done;
  }
  return mlfab__context_leave(ctx, code);
}

static int context_pump_and_tell(mlfab *ctx) {
  int moved = mlfab__context_pump(ctx);
  if (ctx->node->requests.to_tell > 0) context_tell_done(ctx);
  return moved;
}

/* closed: 1 if the context was closed when the wait began; the wait ends when that changes. */
static int context_wait_until(mlfab *ctx, uint64_t deadline, mlfab__context_test test, void *what,
                              int closed) {
  uint64_t idle_since = 0;
  int holds;
  ctx->waiters++;
  while (!(holds = test(ctx, what)) && ctx->closed == closed) {
    if (context_pump_and_tell(ctx)) {
      idle_since = 0;
      if (ctx->now_ns < deadline) continue;
      holds = test(ctx, what);
      break;
    }
    uint64_t now = ctx->simulated ? mlfab__context_now(ctx) : ctx->now_ns;
    if (now >= deadline) break;
    if (idle_since == 0) idle_since = now;
    if (ctx->sleeping) {
      /* Another thread sleeps in the transport. If it is the progress thread, ask it to step aside. */
      if (ctx->thread_is == MLFAB__THREAD_LISTENS) mlfab__context_wake(ctx);
      context_cond_wait(ctx, mlfab__min(deadline - now, 100000000));
    } else if (!context_polls_on(ctx, now - idle_since)) {
      context_sleep(ctx, deadline);
    }
  }
  ctx->waiters--;
  if (ctx->waiters > 0) pthread_cond_broadcast(&ctx->changed);
  return holds;
}

MLFAB__INTERNAL int mlfab__context_until(mlfab *ctx, uint64_t deadline, mlfab__context_test test,
                                         void *what) {
  return context_wait_until(ctx, deadline, test, what, 0);
}

MLFAB__INTERNAL int mlfab__context_in_vain(mlfab *ctx, int code) {
  if (!ctx->closed) return code;
  return MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_CLOSED,
                     "the context was closed by another thread");
}

/* Returns the number of updates that have not ended. */
static uint32_t context_unfinished(const mlfab *ctx, uint32_t *server_p) {
  const mlfab__parts *parts = ctx->node->parts;
  return parts->push ? parts->push->unfinished(parts, server_p) : 0;
}

/* Returns 1 if work is under way that the thread has to drive. */
static int context_busy(const mlfab *ctx) {
  const mlfab_node *node = ctx->node;
  return node->requests.open > 0 || context_unfinished(ctx, NULL) > 0 || mlfab__roles_serve(node);
}

/* Stays aside while other threads drive. If work is under way, the thread comes back after a moment in which no call
 * drove. While calls follow each other closely (`called`: they did the last time), it wakes by itself at times: a
 * signal after each call would cost more than the call. Returns 1 if calls did drive. */
static int context_step_aside(mlfab *ctx, int called) {
  uint64_t calls = ctx->calls, looks = ctx->looks, ns = CONTEXT_GRACE_NS;
  ctx->thread_is = MLFAB__THREAD_ASIDE;
  if (ctx->waiters > 0 || !context_busy(ctx)) {
    int naps = called && ctx->brisk && mlfab__roles_serve(ctx->node);
    ctx->thread_is = naps ? MLFAB__THREAD_NAPS : MLFAB__THREAD_DOZES;
    ns = naps ? CONTEXT_NAP_NS : mlfab__min(ctx->heartbeat_ns / 4, 50000000);
  }
  context_cond_wait(ctx, ns);
  ctx->thread_is = MLFAB__THREAD_DRIVES;
  called = calls != ctx->calls && looks != ctx->looks;
  if (called && ctx->brisk) ctx->parked = 1;
  if (!called && ctx->waiters == 0) ctx->parked = 0;
  return called;
}

static void *context_thread(void *argument) {
  mlfab *ctx = argument;
  uint64_t idle_since = 0;
  int called = 0;
  pthread_mutex_lock(&ctx->lock);
  while (!ctx->stop) {
    if (ctx->waiters > 0 || ctx->parked) {
      called = context_step_aside(ctx, called);
      idle_since = 0;
    } else if (context_pump_and_tell(ctx)) {
      idle_since = 0;
    } else if (context_busy(ctx) && (idle_since == 0 || ctx->now_ns - idle_since < ctx->spin_ns)) {
      /* More events may come soon: poll again before sleeping, and give up the lock meanwhile. */
      if (idle_since == 0) idle_since = ctx->now_ns;
      pthread_mutex_unlock(&ctx->lock);
      pthread_mutex_lock(&ctx->lock);
    } else {
      idle_since = 0;
      ctx->calls_asleep = 0;
      ctx->thread_is = MLFAB__THREAD_LISTENS;
      context_sleep(ctx, MLFAB__NEVER);
      ctx->thread_is = MLFAB__THREAD_DRIVES;
    }
  }
  pthread_mutex_unlock(&ctx->lock);
  return NULL;
}

static void context_rearm(mlfab *ctx) {
  if (ctx->fd < 0) return;
  int pending = ctx->moves != ctx->moves_told;
  for (uint32_t t = 0; t < ctx->ntransports && !ctx->thread_is; t++) {
    pending |= ctx->transports[t].table->arm(ctx->transports[t].self, 1);
  }
  if (pending) mlfab__context_tell(ctx);
}

MLFAB__INTERNAL uint64_t mlfab__context_enter(mlfab *ctx) {
  if (pthread_mutex_trylock(&ctx->lock)) {
    atomic_fetch_add(&ctx->at_door, 1);
    pthread_mutex_lock(&ctx->lock);
    atomic_fetch_sub(&ctx->at_door, 1);
  }
  ctx->inside++;
  ctx->now_ns = mlfab__context_now(ctx);
  ctx->brisk = ctx->now_ns - ctx->left_ns < CONTEXT_GRACE_NS;
  return ctx->now_ns;
}

/* Decides who drives the remaining work. It is the caller while it calls again and again and so drives itself: two
 * threads would only wake each other. Else it is the thread. */
MLFAB__INTERNAL int mlfab__context_leave(mlfab *ctx, int code) {
  context_take_error(ctx);
  if (ctx->node->requests.to_tell > 0) context_tell_done(ctx);
  ctx->calls++;
  if (ctx->thread_is && ctx->waiters == 0) {
    int busy = context_busy(ctx), listens = ctx->thread_is == MLFAB__THREAD_LISTENS;
    if (listens ? ++ctx->calls_asleep >= CONTEXT_CALLS_ASLEEP : !busy) ctx->parked = 1;
    if (busy && (ctx->thread_is == MLFAB__THREAD_DOZES ||
                 (ctx->thread_is == MLFAB__THREAD_NAPS && !ctx->brisk)))
      pthread_cond_broadcast(&ctx->changed);
  }
  /* A request that has begun may be due before the sleeper wakes by itself. */
  if (ctx->sleeping && ctx->node->requests.earliest < ctx->sleeps_until_ns)
    mlfab__context_wake(ctx);
  ctx->left_ns = ctx->now_ns;
  context_rearm(ctx);
  if (ctx->closed) pthread_cond_broadcast(&ctx->changed);
  /* Must be last: the closing thread frees the context when it gets the lock. */
  ctx->inside--;
  pthread_mutex_unlock(&ctx->lock);
  return code;
}

/* --- opening --- */

static int context_open_one(mlfab *ctx, const mlfab_config *c, const mlfab__context_choice *choice,
                            char *addresses, size_t room, mlfab_error *error) {
  mlfab_transport_options options;
  const mlfab_transport *table = choice->table;
  char address[256] = "";
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.allow_insecure = c->allow_insecure;
  options.keyed = c->key[0] != 0;
  options.key = c->key;
  options.listen = choice->listen;
  options.ifname = c->ifname;
  options.job = c->job;
  options.env = &ctx->hooks;
  options.user = c->transport_user;
  options.error = error;
  options.timeout_ns = c->timeout_ns;
  options.lend = c->mpi_lend;
  options.neighbours = choice->neighbours;
  if (!ctx->areas && choice->areas) {
    ctx->areas = choice->areas;
    if (ctx->areas->open(ctx))
      return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the context");
  }
  options.memory = ctx->memory;
  mlfab__context_transport *transport = &ctx->transports[ctx->ntransports];
  int code = table->open(&options, &transport->self, address);
  if (code)
    return error->code
               ? code
               : MLFAB__FAIL(error, code, "transport %s: %s", table->name, mlfab_error_text(code));
  transport->table = table;
  ctx->ntransports++;
  ctx->simulated |= (table->caps & MLFAB_CAP_VIRTUAL) != 0;
  ctx->lends |= table->keeps && c->mpi_lend;
  if (!ctx->shm_coll) ctx->shm_coll = choice->shm_coll;
  size_t at = strlen(addresses);
  if (!choice->publish) return 0;
  int n = snprintf(addresses + at, room - at, "%s%s", at ? " " : "", address);
  if (n < (int)(room - at)) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
                     "transport %s: the addresses of all transports take more than %u bytes",
                     table->name, (unsigned)room - 1);
}

static void context_free(mlfab *ctx) {
  const int child = context_is_child(ctx);
  if (ctx->freed) ctx->freed(ctx, child);
  if (ctx->observer) ctx->observer->stop(ctx, child);
  if (ctx->disk) ctx->files->close(ctx, child);
  mlfab__calling_free(ctx);
  while (ctx->watches) {
    mlfab__context_watch *watch = ctx->watches;
    ctx->watches = watch->next;
    mlfab__free(&ctx->env, watch, sizeof *watch);
  }
  mlfab__env env = ctx->env;
  for (uint32_t t = 0; t < ctx->ntransports; t++)
    ctx->transports[t].table->close(ctx->transports[t].self);
  if (ctx->stager) ctx->stager->free(ctx, child);
  if (ctx->direct_close) ctx->direct_close(ctx, child); /* it has no device */
  if (child && ctx->node && ctx->node->parts && ctx->node->parts->push)
    ctx->node->parts->push->disown(ctx->node->parts);
  mlfab_node_close(&ctx->node);
  while (ctx->memories && !ctx->arena_runs) { /* 1 here only in a forked child */
    mlfab__context_memory *memory = ctx->memories;
    ctx->memories = memory->next;
    mlfab__context_free_memory(ctx, memory);
  }
  if (ctx->arena && !ctx->arena_runs) ctx->sharing->destroy(ctx);
  if (ctx->memory && !ctx->arena_runs) ctx->areas->close(ctx);
  if (ctx->observer) ctx->observer->free(ctx, child);
  if (ctx->fd >= 0) close(ctx->fd);
  if (ctx->tell >= 0) close(ctx->tell);
  /* In a child it would wait for threads of the parent that waited there at the fork. */
  if (!context_is_child(ctx)) pthread_cond_destroy(&ctx->changed);
  pthread_mutex_destroy(&ctx->lock);
  mlfab__free(&env, ctx, sizeof *ctx);
}

static mlfab *context_new(const mlfab_config *c, mlfab_error *error) {
  mlfab__env env;
  int code = mlfab__env_init(&env, c->env);
  if (code) {
    MLFAB__FAIL(error, code, "env: allocate and release must both be set, or both be NULL");
    return NULL;
  }
  pthread_once(&context_once, context_watch_forks);
  mlfab *ctx = context_fork_error ? NULL : mlfab__alloc(&env, sizeof *ctx);
  if (!ctx) {
    MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the context");
    return NULL;
  }
  ctx->env = env;
  ctx->forks = context_forks;
  ctx->number = atomic_fetch_add(&context_count, 1) + 1;
  ctx->hooks = env.hooks;
  ctx->log_level = env.hooks.log ? env.hooks.log_level : 0;
  if (!ctx->hooks.clock) ctx->hooks.clock = mlfab__monotonic;
  if (!ctx->hooks.log) ctx->hooks.log = context_no_log;
  ctx->fd = ctx->tell = -1;
  ctx->spin_ns = c->spin_ns;
  ctx->timeout_ns = c->timeout_ns;
  ctx->heartbeat_ns = c->heartbeat_ns;
  ctx->measure_ns = c->scheduler != MLFAB_SCHEDULER_NONE || c->order_by_rate ? 0 : MLFAB__NEVER;
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
  pthread_mutex_init(&ctx->lock, NULL);
  pthread_cond_init(&ctx->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  ctx->opened_ns = mlfab__context_now(ctx);
  return ctx;
}

static int context_start_thread(mlfab *ctx, const mlfab_config *c, mlfab_error *error) {
  int alone = ctx->ntransports == 0;
  if (c->progress == MLFAB_PROGRESS_HAND || ctx->simulated || alone) return 0;
  pthread_attr_t attributes;
  size_t stack = 0;
  pthread_attr_init(&attributes);
  pthread_attr_getstacksize(&attributes, &stack);
  if (stack < CONTEXT_STACK_BYTES) pthread_attr_setstacksize(&attributes, CONTEXT_STACK_BYTES);
  ctx->thread_is = MLFAB__THREAD_DRIVES; /* the thread reads it */
  int failed = mlfab__thread_start(&ctx->thread, &attributes, context_thread, ctx);
  pthread_attr_destroy(&attributes);
  if (failed) {
    ctx->thread_is = MLFAB__THREAD_NONE;
    return MLFAB__FAIL(error, MLFAB_ERR_IO, "the progress thread cannot be started");
  }
  return 0;
}

static void context_stop_thread(mlfab *ctx) {
  pthread_mutex_lock(&ctx->lock);
  int runs = ctx->thread_is != MLFAB__THREAD_NONE;
  ctx->stop = 1;
  pthread_cond_broadcast(&ctx->changed);
  pthread_mutex_unlock(&ctx->lock);
  if (!runs) return;
  mlfab__context_wake(ctx);
  pthread_join(ctx->thread, NULL);
  ctx->thread_is = MLFAB__THREAD_NONE;
}

MLFAB__INTERNAL int mlfab__context_open(mlfab_config *c, const mlfab__context_choice *choices,
                                        uint32_t n, mlfab__node_opener *open,
                                        const mlfab__context_sharing *sharing,
                                        const mlfab__context_observer *observer,
                                        const mlfab__context_files *files, mlfab **ctx_p,
                                        mlfab_error *error) {
  char addresses[MLFAB__ADDRESSES_MAX] = "";
  mlfab *ctx = context_new(c, error);
  if (!ctx) return error->code;
  ctx->sharing = sharing;
  ctx->observer = observer;
  ctx->files = files;
  uint64_t began_ns =
      mlfab__context_now(ctx); /* joining includes resolving the address to listen at */
  int code = observer ? observer->open(ctx, c, error) : 0;
  for (uint32_t i = 0; i < n && !code; i++) {
    code = context_open_one(ctx, c, &choices[i], addresses, sizeof addresses, error);
    if (!code || !choices[i].spare) continue;
    mlfab__env env = ctx->env;
    env.hooks = ctx->hooks; /* with the log that the configuration asks for */
    mlfab__log(&env, MLFAB_LOG_WARN, "this node does without %s: %s", choices[i].table->name,
               error->text);
    memset(error, 0, sizeof *error);
    error->rank = MLFAB_NO_RANK;
    code = 0;
  }
  if (!code) {
    c->env = &ctx->hooks;
    code = open(c, addresses, began_ns, &ctx->node, error);
  }
  if (!code && ctx->memory && ctx->node->parts) ctx->areas->share(ctx);
  if (!code && observer) code = observer->attach(ctx, error);
  if (!code) {
    context_actions(ctx, mlfab__context_now(ctx));
    code = context_start_thread(ctx, c, error);
  }
  if (!code && observer) code = observer->start(ctx, error);
  if (code) context_stop_thread(ctx);
  if (code) {
    context_free(ctx);
  } else {
    *ctx_p = ctx;
  }
  return code;
}

MLFAB_API int mlfab_is_ready(mlfab *ctx, mlfab_error *error_p) {
  CONTEXT_LOOK(ctx, mlfab_node_ready(ctx->node, error_p));
}

/* --- closing --- */

static int context_test_served(mlfab *ctx, void *what) {
  (void)what;
  const mlfab_node *node = ctx->node;
  if (node->crashes) return 1;
  if (!node->is_server) return mlfab__node_finished(node);
  return node->ended || (!node->standby && mlfab__caller_awaited(node) == MLFAB__NO_NODE);
}

static int context_test_silent(mlfab *ctx, void *what) {
  (void)what;
  if (ctx->node->parting) return 0; /* peers still need something of this node */
  /* A goodbye is still to be sent or acknowledged. */
  for (uint32_t i = 0; i < ctx->node->nlinks; i++) {
    if (ctx->node->links[i].closing) return 0;
  }
  return ctx->node->ready_count == 0 && ctx->node->actions_count == 0;
}

/* Closes a context in a forked child. If a thread of the parent held the lock at the fork, the context may be half
 * changed. The child then leaves it to the system, which frees it at the end of the child. */
static int context_disown(mlfab **ctx_p) {
  mlfab *ctx = *ctx_p;
  *ctx_p = NULL;
  if (pthread_mutex_trylock(&ctx->lock)) return 0;
  pthread_mutex_unlock(&ctx->lock);
  context_free(ctx);
  return 0;
}

/* Waits until all other threads have left. With the lock. */
static void context_drain(mlfab *ctx) {
  while (!ctx->simulated && ctx->inside + atomic_load(&ctx->at_door) > 1) {
    pthread_cond_broadcast(&ctx->changed);
    if (ctx->sleeping) mlfab__context_wake(ctx);
    context_cond_wait(ctx, CONTEXT_DRAIN_NS);
  }
}

/* Goes from OPEN to CLOSED, waits until this thread is alone inside, and keeps the lock. In a forked child it frees as
 * much as possible, and *closed_p is NULL. Errors: ARGUMENT, CLOSED. */
static int context_shut(mlfab **ctx_p, mlfab **closed_p) {
  mlfab *ctx = ctx_p ? *ctx_p : NULL;
  *closed_p = NULL;
  if (!ctx_p) return MLFAB_ERR_ARGUMENT;
  if (!ctx) return MLFAB_ERR_CLOSED;
  if (context_is_child(ctx)) return context_disown(ctx_p);
  mlfab__context_enter(ctx);
  if (mlfab__context_is_told(ctx)) return mlfab__context_leave(ctx, MLFAB_ERR_STATE);
  if (ctx->closed) return mlfab__context_leave(ctx, MLFAB_ERR_CLOSED);
  ctx->closed = ctx->node->closed = 1;
  *ctx_p = NULL;
  context_drain(ctx);
  *closed_p = ctx;
  return 0;
}

static void context_end(mlfab *ctx) {
  context_drain(ctx);
  pthread_mutex_unlock(&ctx->lock);
  context_stop_thread(ctx);
  context_free(ctx);
}

MLFAB_API int mlfab_close(mlfab **ctx_p) {
  mlfab *ctx;
  int code = context_shut(ctx_p, &ctx);
  if (!ctx) return code;
  mlfab_node *node = ctx->node;
  uint64_t now = mlfab__context_now(ctx);
  if (node->phase == MLFAB__BOOTSTRAP_READY && node->is_server && node->is_worker) {
    /* The other workers need this node's shard until they have left. */
    mlfab__node_stop_working(node, now);
    context_wait_until(ctx, mlfab__add_sat(now, ctx->timeout_ns), context_test_served, NULL, 1);
  }
  /* In GREETING some servers may know this node already. */
  if (node->phase == MLFAB__BOOTSTRAP_READY || node->phase == MLFAB__BOOTSTRAP_GREETING) {
    now = mlfab__context_now(ctx);
    mlfab_node_leave(node, now);
    /* One heartbeat for peers that still need this node, and one for the goodbye. */
    context_wait_until(ctx, now + 2 * ctx->heartbeat_ns, context_test_silent, NULL, 1);
  }
  context_end(ctx);
  return 0;
}

MLFAB_API int mlfab_abandon(mlfab **ctx_p) {
  mlfab *ctx;
  int code = context_shut(ctx_p, &ctx);
  if (ctx) context_end(ctx);
  return code;
}

/* --- waiting for requests --- */

MLFAB__INTERNAL int mlfab__context_cancel(mlfab *ctx, mlfab_request id) {
  ctx->now_ns = mlfab__context_now(ctx);
  if (ctx->stager && ctx->stager->cancel(ctx, id)) return 0;
  return mlfab_node_cancel(ctx->node, id, ctx->now_ns);
}

static int context_test_let_go(mlfab *ctx, void *what) {
  (void)what;
  return context_keeps(ctx, NULL, 0) == 0;
}

/* Called when the timeout of a wait has passed: the error names the peer that the request awaits. Returns TIMEOUT. */
static int context_pending(mlfab *ctx, mlfab_request id) {
  const mlfab__request *request = mlfab__request_find(&ctx->node->requests, id);
  uint64_t now = mlfab__context_now(ctx);
  char whom[64] = "the peer", waited[24];
  if (ctx->stager) ctx->stager->blame(ctx, id);
  if (!request || !request->done) return mlfab__request_pending(&ctx->node->requests, id, now);
  context_keeps(ctx, whom, sizeof whom);
  uint64_t since_ns = now - request->started_ns;
  return mlfab__error(&ctx->node->requests.last, MLFAB_ERR_TIMEOUT, MLFAB_NO_RANK, 0, since_ns,
                      "wait: the timeout passed; the %s has ended, but after %s its buffers are "
                      "not free: %s has not taken all that is being sent from them",
                      mlfab__request_call(request->kind), mlfab__duration(waited, since_ns), whom);
}

MLFAB__INTERNAL int mlfab__context_await(mlfab *ctx, mlfab_request id, uint64_t timeout_ns,
                                         mlfab_result *result_p) {
  mlfab_result result;
  int done = 0;
  uint64_t now = ctx->now_ns;
  if (mlfab__context_is_over(ctx, &id)) /* it is done already, but peers may wait for its frames */
    mlfab__context_sent(ctx, 0);
  else
    context_actions(ctx, now);
  mlfab__context_until(ctx, timeout_ns ? mlfab__add_sat(now, timeout_ns) : MLFAB__NEVER,
                       mlfab__context_is_over, &id);
  int code = context_test(ctx, id, &done, &result);
  if (code) return code;
  if (!done && ctx->closed) {
    now = mlfab__context_now(ctx);
    mlfab__context_cancel(ctx, id);
    context_actions(ctx, now); /* transports return borrowed memory, at once or soon */
    context_wait_until(ctx, MLFAB__NEVER, context_test_let_go, NULL, 1);
    return mlfab__context_in_vain(ctx, 0);
  }
  if (!done) return context_pending(ctx, id);
  if (result_p) *result_p = result;
  /* Closing by another thread cancels all open collectives. */
  if (result.status == MLFAB_ERR_CANCELLED) return mlfab__context_in_vain(ctx, result.status);
  return result.status;
}

/* Carries out the actions of a call. A sleeping thread would not notice the events that these cause in a transport, so
 * this call pumps. While the thread stays aside, one of CONTEXT_PUMP_EVERY calls pumps, too. */
MLFAB__INTERNAL int mlfab__context_sent(mlfab *ctx, int code) {
  int moved = context_actions(ctx, ctx->now_ns);
  int turn = ctx->parked && ctx->calls % CONTEXT_PUMP_EVERY == 0;
  if (turn || (moved && ctx->sleeping)) mlfab__context_pump(ctx);
  return code;
}

MLFAB_API int mlfab_test(mlfab *ctx, mlfab_request request, int *done_p, mlfab_result *result_p) {
  CONTEXT_ENTER(ctx);
  /* If no thread drives, the polling call has to drive. */
  if (!ctx->thread_is || ctx->parked) mlfab__context_pump(ctx);
  int code = mlfab__context_in_vain(ctx, 0);
  if (!code) code = context_test(ctx, request, done_p, result_p);
  return mlfab__context_leave(ctx, code);
}

MLFAB_API int mlfab_wait(mlfab *ctx, mlfab_request request, uint64_t timeout_ns,
                         mlfab_result *result_p) {
  CONTEXT_ENTER_TO_WAIT(ctx);
  return mlfab__context_leave(ctx, mlfab__context_await(ctx, request, timeout_ns, result_p));
}

/* Reports the error with which a node has ended by itself. */
static int context_crashed(mlfab *ctx) {
  ctx->node->requests.last = ctx->node->failure;
  return ctx->node->failure.code;
}

static int context_test_flushed(mlfab *ctx, void *what) {
  (void)what;
  if (ctx->node->crashes) return 1;
  return context_unfinished(ctx, NULL) == 0 && context_keeps(ctx, NULL, 0) == 0 &&
         !(ctx->stager && ctx->stager->updates(ctx) > 0);
}

MLFAB_API int mlfab_flush(mlfab *ctx, uint64_t timeout_ns) {
  CONTEXT_ENTER_TO_WAIT(ctx);
  if (!ctx->node->is_worker)
    return mlfab__context_leave(ctx, MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_STATE,
                                                 "flush: this node is not a worker"));
  uint64_t start = mlfab__context_now(ctx);
  uint64_t deadline = mlfab__add_sat(start, timeout_ns ? timeout_ns : ctx->timeout_ns);
  int code = 0, flushed = mlfab__context_until(ctx, deadline, context_test_flushed, NULL);
  if (ctx->node->crashes) {
    code = context_crashed(ctx);
  } else if (!flushed) {
    char waited[24], whom[64] = "the peer";
    uint64_t since_ns = mlfab__context_now(ctx) - start;
    uint32_t server = 0, unfinished = context_unfinished(ctx, &server);
    mlfab_error *last = &ctx->node->requests.last;
    mlfab__duration(waited, since_ns);
    if (unfinished == 0) {
      if (context_keeps(ctx, whom, sizeof whom) == 0) snprintf(whom, sizeof whom, "the device");
      code = mlfab__error(last, MLFAB_ERR_TIMEOUT, MLFAB_NO_RANK, 0, since_ns,
                          "flush: after %s %s has not taken all that is being sent from buffers",
                          waited, whom);
    } else {
      code = mlfab__error(last, MLFAB_ERR_TIMEOUT, (int32_t)server, 1, since_ns,
                          "flush: after %s server %u has not decided the oldest of %u updates",
                          waited, server, unfinished);
    }
    code = mlfab__context_in_vain(ctx, code);
  } else if (ctx->node->requests.abandoned.code) {
    ctx->node->requests.last = ctx->node->requests.abandoned;
    ctx->node->requests.last.reserved = 0;
    mlfab__server_link_say_why(ctx->node);
    code = ctx->node->requests.abandoned.code;
    ctx->node->requests.abandoned.code = 0;
  }
  return mlfab__context_leave(ctx, code);
}

/* Returns 1 if a pump has moved anything since. */
static int context_test_moved(mlfab *ctx, void *what) {
  const uint64_t *before = what;
  return ctx->moves != *before;
}

/* Empties the descriptor: this call handles the news. */
static void context_untell(mlfab *ctx) {
  uint64_t count;
  if (ctx->fd < 0) return;
  if (read(ctx->tell, &count, sizeof count) < 0) count = 0; /* nothing was told */
  for (uint32_t t = 0; t < ctx->ntransports && !ctx->thread_is; t++) {
    ctx->transports[t].table->arm(ctx->transports[t].self, 0);
  }
  ctx->idle_looks = 0; /* read the clock: the caller may have slept until a deadline */
}

MLFAB_API int mlfab_progress(mlfab *ctx, uint64_t timeout_ns) {
  CONTEXT_ENTER_TO_WAIT(ctx);
  context_untell(ctx);
  uint64_t before = ctx->moves;
  int moved = mlfab__context_pump(ctx) || (ctx->fd >= 0 && before != ctx->moves_told);
  if (!moved && timeout_ns > 0) {
    moved = mlfab__context_until(ctx, mlfab__add_sat(mlfab__context_now(ctx), timeout_ns),
                                 context_test_moved, &before);
  }
  ctx->moves_told = ctx->moves;
  moved = mlfab__context_in_vain(ctx, moved);
  if (ctx->node->crashes) moved = context_crashed(ctx);
  return mlfab__context_leave(ctx, moved);
}

MLFAB_API int mlfab_deadline(mlfab *ctx, uint64_t *at_ns_p) {
  CONTEXT_CHECK(ctx);
  if (!at_ns_p) return mlfab__context_null(ctx, "deadline: at_ns_p");
  mlfab__context_enter(ctx);
  int code = mlfab__context_in_vain(ctx, 0);
  if (!code) *at_ns_p = mlfab_node_deadline(ctx->node);
  if (!code && ctx->stager && ctx->stager->copies(ctx))
    *at_ns_p = mlfab__min(*at_ns_p, mlfab__context_now(ctx) + CONTEXT_COPY_NS);
  return mlfab__context_leave(ctx, code);
}

MLFAB_API int mlfab_serve(mlfab *ctx, uint64_t timeout_ns) {
  CONTEXT_ENTER_TO_WAIT(ctx);
  if (!ctx->node->is_server && !ctx->node->is_scheduler)
    return mlfab__context_leave(ctx,
                                MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_STATE,
                                            "serve: this node is neither server nor scheduler"));
  uint64_t deadline =
      timeout_ns ? mlfab__add_sat(mlfab__context_now(ctx), timeout_ns) : MLFAB__NEVER;
  int code = 0;
  if (!mlfab__context_until(ctx, deadline, context_test_served, NULL)) {
    const mlfab_node *node = ctx->node;
    mlfab_error *last = &ctx->node->requests.last;
    char waited[24];
    mlfab__duration(waited, timeout_ns);
    uint32_t worker = MLFAB__NO_NODE;
    if (node->is_server && !node->standby) worker = mlfab__caller_awaited(node);
    code = worker != MLFAB__NO_NODE
               ? mlfab__error(last, MLFAB_ERR_TIMEOUT, (int32_t)worker, 0, timeout_ns,
                              "serve: after %s worker %u has not left", waited, worker)
               : mlfab__error(last, MLFAB_ERR_TIMEOUT, 0, 1, timeout_ns,
                              "serve: after %s server 0 has not ended the run", waited);
    code = mlfab__context_in_vain(ctx, code);
  }
  if (ctx->node->crashes) code = context_crashed(ctx);
  return mlfab__context_leave(ctx, code);
}

/* --- descriptors, numbers --- */

#if defined(__linux__)
static int context_open_fd(mlfab *ctx) {
  int fds[MLFAB__CONTEXT_TRANSPORTS + 1], n = 0, code = 0;
  int fd = epoll_create1(EPOLL_CLOEXEC);
  ctx->tell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  fds[n++] = ctx->tell;
  /* With a thread, the thread listens to the transports. */
  for (uint32_t t = 0; t < ctx->ntransports && !ctx->thread_is; t++) {
    fds[n++] = ctx->transports[t].table->fd(ctx->transports[t].self);
  }
  for (int i = 0; i < n && !code; i++) {
    struct epoll_event event;
    memset(&event, 0, sizeof event);
    event.events = EPOLLIN;
    if (fds[i] < 0) code = i == 0 ? MLFAB_ERR_IO : MLFAB_ERR_UNSUPPORTED;
    if (!code && (fd < 0 || epoll_ctl(fd, EPOLL_CTL_ADD, fds[i], &event))) code = MLFAB_ERR_IO;
  }
  if (!code) {
    ctx->fd = fd;
    ctx->moves_told = ctx->moves;
    return 0;
  }
  if (fd >= 0) close(fd);
  if (ctx->tell >= 0) close(ctx->tell);
  ctx->tell = -1;
  return MLFAB__FAIL(
      &ctx->node->requests.last, code, "fd: %s",
      code == MLFAB_ERR_IO ? mlfab__reason(errno) : "the transport has no descriptor");
}
#else
static int context_open_fd(mlfab *ctx) {
  return MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_UNSUPPORTED, "fd: only on Linux");
}
#endif

MLFAB_API int mlfab_fd(mlfab *ctx, int *fd_p) {
  CONTEXT_CHECK(ctx);
  if (!fd_p) return mlfab__context_null(ctx, "fd: fd_p");
  mlfab__context_enter(ctx);
  int code = mlfab__context_in_vain(ctx, 0);
  if (!code && ctx->fd < 0) code = context_open_fd(ctx);
  if (!code) *fd_p = ctx->fd;
  return mlfab__context_leave(ctx, code);
}

MLFAB_API int mlfab_rank(const mlfab *ctx, int32_t *rank_p, uint32_t *workers_p,
                         uint32_t *servers_p) {
  CONTEXT_CHECK(ctx);
  const mlfab_config *c = &ctx->node->config;
  if (rank_p) *rank_p = ctx->node->is_worker ? c->rank : -1;
  if (workers_p) *workers_p = c->workers;
  if (servers_p) *servers_p = c->servers;
  return 0;
}

MLFAB_API int mlfab_servers(mlfab *ctx, uint32_t *servers, uint32_t room, uint32_t *count_p) {
  CONTEXT_CHECK(ctx);
  if (!count_p) return mlfab__context_null(ctx, "servers: count_p");
  if (!servers && room > 0) return mlfab__context_null(ctx, "servers: servers");
  mlfab__context_enter(ctx);
  uint32_t n = 0;
  for (uint32_t s = 0; s < ctx->node->config.servers; s++) {
    if (!mlfab__server_link_here(ctx->node, s)) continue;
    if (n < room) servers[n] = s;
    n++;
  }
  *count_p = n;
  return mlfab__context_leave(ctx, 0);
}

MLFAB_API int mlfab_last_error(mlfab *ctx, mlfab_error *error_p) {
  if (ctx && error_p && context_is_child(ctx)) {
    MLFAB__FAIL(
        error_p, MLFAB_ERR_STATE,
        "this process is a fork of the process that opened the context: it can only close it");
    return 0;
  }
  CONTEXT_CHECK(ctx);
  if (!error_p) return MLFAB_ERR_ARGUMENT;
  mlfab__context_enter(ctx);
  *error_p = context_error_of == ctx->number ? context_error : ctx->node->requests.last;
  error_p->reserved = 0;
  return mlfab__context_leave(ctx, 0);
}

MLFAB_API int mlfab_get_stats(mlfab *ctx, mlfab_stats *stats_p, size_t size) {
  CONTEXT_CHECK(ctx);
  if (!stats_p) return mlfab__context_null(ctx, "get_stats: stats_p");
  mlfab__context_enter(ctx);
  return mlfab__context_leave(ctx, mlfab_node_stats(ctx->node, stats_p, size));
}
