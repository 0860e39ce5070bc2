/* drive.c - a context: a node, its transports, a lock and perhaps a thread. Layer 6.
 *
 * The only code that calls a transport, reads a clock or knows threads. One lock guards node and
 * transports. Whoever has to wait drives: it moves events and actions (pump), and when nothing
 * moves spins a little, looks on between others' turns on the processor for as long as being woken
 * would cost, then sleeps in the transport without the lock (`sleeping`). Others who wait
 * meanwhile sleep on `changed`, which is signalled after every pump that moved something and when
 * the sleeper comes back. The progress thread does the same when nobody waits; when somebody begins
 * to, it is woken and steps aside (`parked`), and it is called back when the last waiter leaves
 * work behind, unless calls come one upon the other (`brisk`): then it looks by itself. */
#include "drive.h"

#include "prng.h"
#include "reduce.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
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
  DRIVE_BATCH = 64,
  DRIVE_LINK_BITS = 24,
  DRIVE_CALLS_ASLEEP = 4,  /* calls during one sleep of the thread after which it stays aside */
  DRIVE_PUMP_EVERY = 8,    /* calls that only begin something, while it stays aside */
  DRIVE_GRACE_NS = 200000, /* without a call after which it takes over again */
  DRIVE_NAP_NS = 1000000,  /* of the thread, while calls are brisk */
  DRIVE_YIELD_NS =
      200000, /* a waiter that has spun looks on between others' turns: being woken costs as much */
  DRIVE_STACK_BYTES =
      1 << 20,               /* least of the thread: musl gives 128 KiB, callbacks want some, too */
  DRIVE_DRAIN_NS = 10000000, /* between two looks whether all have left a context that is closed */
  DRIVE_CLOCK_EVERY = 16,
  DRIVE_LOOK_EVERY = 64
};

/* How the thread stays aside: is it to be told of work after every call? */
enum { DRIVE_SLEEPS = 1, DRIVE_NAPS = 2 };

/* A tensor's weights as they were, for trainers without gradients. */
struct mlfab__snapshot {
  mlfab__snapshot *next;
  uint32_t tensor;
  int dtype;
  uint64_t count, bytes;
  uint8_t *before, *difference;
};

static uint64_t drive_monotonic(void *user) {
  struct timespec t;
  (void)user;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void drive_no_log(void *user, int level, const char *line) {
  (void)user;
  (void)level;
  (void)line;
}

/* A new file beside `path` that nobody else writes to, with the mode of any new file. Its descriptor, or -1
 * with errno. mkstemp would make it the owner's alone. */
static int drive_beside(const char *path, char *name, size_t room) {
  uint64_t salt = drive_monotonic(NULL) ^ (uint64_t)(uintptr_t)&room; /* another in every thread */
  int fd = -1;
  errno = EEXIST;
  for (uint64_t i = 0; fd < 0 && errno == EEXIST && i < 1000; i++) {
    int n = snprintf(name, room, "%s.%ld-%08x.part", path, (long)getpid(),
                     (unsigned)(mlfab__mix(salt + i) >> 32));
    if (n < 0 || (size_t)n >= room) {
      errno = ENAMETOOLONG;
      return -1;
    }
    if (MLFAB__PLANTED(88)) snprintf(name, room, "%s.part", path);
    fd = open(name, O_WRONLY | O_CREAT | (MLFAB__PLANTED(88) ? 0 : O_EXCL) | O_CLOEXEC, 0666);
  }
  return fd;
}

static int drive_write(int fd, const uint8_t *data, size_t bytes) {
  while (bytes > 0) {
    ssize_t n = write(fd, data, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return -1;
    data += n;
    bytes -= (size_t)n;
  }
  return fsync(fd);
}

/* Writes beside the file and renames: a reader sees the old file or the new one, and of several that are
 * written at a time the one that was renamed last. */
static int drive_store(void *user, const char *path, const void *data, size_t bytes) {
  (void)user;
  char name[4096];
  struct rlimit most; /* to write beyond it raises SIGXFSZ, which is not ours to handle */
  if (getrlimit(RLIMIT_FSIZE, &most) == 0 && bytes > most.rlim_cur) {
    errno = EFBIG;
    return MLFAB_ERR_IO;
  }
  int fd = drive_beside(path, name, sizeof name);
  if (fd < 0) return MLFAB_ERR_IO;
  int failed = drive_write(fd, data, bytes), why = errno;
  if (close(fd) && !failed) failed = 1, why = errno;
  if (!failed && rename(name, path)) failed = 1, why = errno;
  if (!failed) return 0;
  unlink(name);
  errno = why;
  return MLFAB_ERR_IO;
}

/* --- forks --- */

/* How many times this process is a child of one that had used the library. Counted in the child, before
 * it runs anything else: contexts of other counts are its parents'. */
static uint32_t drive_forks;
static int drive_fork_error;
static pthread_once_t drive_once = PTHREAD_ONCE_INIT;

static void drive_forked(void) { drive_forks++; }

static void drive_watch_forks(void) { drive_fork_error = pthread_atfork(NULL, NULL, drive_forked); }

/* What is simulated is whole in a child too, and nobody else's. */
static int drive_is_child(const mlfab *ctx) { return ctx->forks != drive_forks && !ctx->simulated; }

MLFAB__INTERNAL int mlfab__drive_check(const mlfab *ctx) {
  if (MLFAB__UNLIKELY(!ctx)) return MLFAB_ERR_ARGUMENT;
  return MLFAB__UNLIKELY(drive_is_child(ctx)) ? MLFAB_ERR_STATE : 0;
}

MLFAB__INTERNAL uint64_t mlfab__drive_now(const mlfab *ctx) {
  return ctx->hooks.clock(ctx->hooks.user);
}

/* --- moving --- */

static int drive_reach(mlfab *ctx, const char *list, uint64_t token) {
  char address[256];
  for (const char *at = list; *at;) {
    size_t n = strcspn(at, " ");
    if (n > 0 && n < sizeof address) {
      memcpy(address, at, n);
      address[n] = 0;
      for (uint32_t t = 0; t < ctx->ntransports; t++) {
        const mlfab__drive_transport *transport = &ctx->transports[t];
        if (transport->table->reach(transport->self, address))
          return transport->table->connect(transport->self, address, token);
      }
    }
    at += n + (at[n] == ' ');
  }
  return MLFAB_ERR_ADDRESS;
}

static int drive_action(mlfab *ctx, const mlfab_action *action) {
  if (action->kind == MLFAB_ACTION_CONNECT) return drive_reach(ctx, action->address, action->token);
  mlfab__drive_transport *transport = &ctx->transports[action->link >> DRIVE_LINK_BITS];
  uint32_t link = action->link & ((1u << DRIVE_LINK_BITS) - 1);
  switch (action->kind) {
    case MLFAB_ACTION_SEND:
      return transport->table->send(transport->self, link, action->head, action->head_bytes,
                                    action->bulk, action->bulk_bytes, action->token);
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

/* Carries out what the node wants. */
static int drive_actions(mlfab *ctx, uint64_t now) {
  mlfab_action action;
  int moved = 0;
  while (mlfab_node_next(ctx->node, now, &action)) {
    mlfab_node_done(ctx->node, &action, drive_action(ctx, &action), now);
    moved = 1;
  }
  for (uint32_t t = 0; moved && t < ctx->ntransports; t++)
    ctx->transports[t].table->flush(ctx->transports[t].self);
  return moved;
}

/* Hands at most a batch of one transport's events to the node. The clock is read with the first. */
static int drive_events(mlfab *ctx, uint32_t t, uint64_t *now_p) {
  mlfab__drive_transport *transport = &ctx->transports[t];
  mlfab_io_event event;
  int moved = 0;
  while (moved < DRIVE_BATCH && transport->table->poll(transport->self, &event)) {
    if (*now_p == 0) *now_p = mlfab__drive_now(ctx);
    mlfab_io_event mapped = event;
    if (event.link) mapped.link = event.link | (t << DRIVE_LINK_BITS);
    if (event.kind == MLFAB_IO_UP) {
      mapped.caps = transport->table->caps;
      transport->links++;
    }
    if (event.kind == MLFAB_IO_DOWN && event.link && transport->links > 0) transport->links--;
    mlfab_node_event(ctx->node, &mapped, *now_p);
    transport->table->release(transport->self, &event);
    /* What is no longer lent must be out of the transport's hands before the next event writes
     * it. */
    if (ctx->node->actions_count > 0) drive_actions(ctx, *now_p);
    moved++;
  }
  return moved;
}

/* --- measuring --- */

/* What passed on one more transport of this node. */
static void drive_measure_add(mlfab_measure *sum, const mlfab_measure *one) {
  sum->elapsed_ns = mlfab__max(sum->elapsed_ns, one->elapsed_ns);
  sum->bytes_in += one->bytes_in;
  sum->bytes_out += one->bytes_out;
  if (one->delivery_in > sum->delivery_in) sum->delivery_in = one->delivery_in;
  if (one->delivery_out > sum->delivery_out) sum->delivery_out = one->delivery_out;
  if (one->nominal > sum->nominal) sum->nominal = one->nominal;
  sum->limited_in &= one->limited_in;
  sum->limited_out &= one->limited_out;
}

/* Tells a node of a scheduled fabric, twice a heartbeat at most, what passed through the network
 * since it was told last. What stays within the host takes nothing of a network link. */
static void drive_measure(mlfab *ctx, uint64_t now) {
  mlfab_measure sum = {.limited_in = 1, .limited_out = 1};
  if (now < ctx->measure_ns) return;
  ctx->measure_ns = mlfab__add_sat(now, ctx->heartbeat_ns / 2);
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    const mlfab__drive_transport *transport = &ctx->transports[t];
    mlfab_measure one = {0};
    if (!transport->table->measure || transport->table->caps & MLFAB_CAP_LOCAL) continue;
    if (transport->table->measure(transport->self, now, &one) == 1) drive_measure_add(&sum, &one);
  }
  if (!sum.elapsed_ns) return;
  mlfab_io_event event = {.kind = MLFAB_IO_MEASURED, .measure = &sum};
  mlfab_node_event(ctx->node, &event, now);
}

/* --- looking --- */

/* The descriptor of mlfab_fd is an epoll of the transports' own, ready to be slept on between two
 * calls, and of `tell`, which is readable when something has moved inside another call, or by the
 * thread, since mlfab_progress last returned. */
static void drive_tell(mlfab *ctx) {
  uint64_t one = 1;
  if (ctx->fd >= 0 && write(ctx->tell, &one, sizeof one) < 0) return; /* full: readable already */
}

/* A transport that only listens, while another has all the links, costs a system call a look: it is
 * looked at now and then, and after every sleep. */
static int drive_quiet(mlfab *ctx, uint32_t t) {
  if (ctx->ntransports == 1 || ctx->transports[t].links > 0) return 0;
  if (++ctx->quiet_looks % DRIVE_LOOK_EVERY == 0) return 0;
  return ctx->transports[1 - t].links > 0 && mlfab_node_ready(ctx->node, NULL) == 1;
}

/* Reading the clock costs as much as looking at a ring, so that a waiter who looks again and again
 * does it only now and then. */
MLFAB__INTERNAL int mlfab__drive_pump(mlfab *ctx) {
  uint64_t now = 0;
  int moved = 0;
  ctx->looks++;
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    if (drive_quiet(ctx, t)) continue;
    moved |= drive_events(ctx, t, &now) > 0;
  }
  if (now == 0 && (ctx->idle_looks++ % DRIVE_CLOCK_EVERY == 0 || ctx->simulated))
    now = mlfab__drive_now(ctx);
  if (now != 0) {
    ctx->now_ns = now;
    drive_measure(ctx, now);
    if (now >= mlfab_node_deadline(ctx->node)) {
      mlfab_node_tick(ctx->node, now);
      /* A commit in steps has more to do at once. */
      moved |= mlfab_node_deadline(ctx->node) <= now;
    }
  }
  moved |= mlfab__drive_map(ctx);
  moved |= drive_actions(ctx, ctx->now_ns);
  if (moved) {
    ctx->idle_looks = 0;
    ctx->moves++;
    if (ctx->has_thread) drive_tell(ctx);
  }
  if (moved && ctx->waiters > 1) pthread_cond_broadcast(&ctx->changed);
  return moved;
}

/* --- sleeping --- */

/* The one transport that has links, if listening ones can wait for the next slice of time. */
static mlfab__drive_transport *drive_only(mlfab *ctx) {
  mlfab__drive_transport *only = NULL;
  if (ctx->ntransports == 1) return &ctx->transports[0];
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    if (ctx->transports[t].links == 0) continue;
    if (only) return NULL;
    only = &ctx->transports[t];
  }
  return mlfab_node_ready(ctx->node, NULL) == 1 ? only : NULL;
}

/* Readies the descriptors of all transports to be slept on. With the lock. 1 when something is
 * there. */
static int drive_arm(mlfab *ctx, struct pollfd *fds) {
  int pending = 0;
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    mlfab__drive_transport *transport = &ctx->transports[t];
    fds[t].fd = transport->table->fd(transport->self);
    fds[t].events = POLLIN;
    fds[t].revents = 0;
    pending |= transport->table->arm(transport->self, 1);
  }
  return pending;
}

static void drive_disarm(mlfab *ctx) {
  for (uint32_t t = 0; t < ctx->ntransports; t++) {
    ctx->transports[t].table->arm(ctx->transports[t].self, 0);
  }
}

static void drive_sleep_many(struct pollfd *fds, uint32_t n, uint64_t timeout) {
  uint64_t ms = (timeout + 999999) / 1000000;
  poll(fds, n, ms > 1000 ? 1000 : (int)ms);
}

/* Sleeps until something may have come, at most until `until`. Gives up the lock meanwhile. */
static void drive_sleep(mlfab *ctx, uint64_t until) {
  uint64_t now = mlfab__drive_now(ctx);
  until = mlfab__min(until, mlfab_node_deadline(ctx->node));
  if (until <= now && !ctx->simulated) return;
  uint64_t timeout = until > now ? until - now : 0;
  mlfab__drive_transport *only = drive_only(ctx);
  if (only && ctx->ntransports > 1) timeout = mlfab__min(timeout, 50000000);
  struct pollfd fds[MLFAB__DRIVE_TRANSPORTS];
  int many = !only && ctx->ntransports > 0;
  if (many && drive_arm(ctx, fds)) timeout = 0;
  ctx->sleeping = 1;
  pthread_mutex_unlock(&ctx->lock);
  if (ctx->ntransports == 0) {
    struct timespec t = {0, (long)mlfab__min(timeout, 10000000)};
    nanosleep(&t, NULL);
  } else if (only) {
    only->table->wait(only->self, timeout);
  } else {
    drive_sleep_many(fds, ctx->ntransports, timeout);
  }
  pthread_mutex_lock(&ctx->lock);
  if (many) drive_disarm(ctx);
  ctx->sleeping = 0;
  ctx->quiet_looks = UINT32_MAX;
  if (ctx->waiters > 0 || ctx->parked) pthread_cond_broadcast(&ctx->changed);
}

MLFAB__INTERNAL void mlfab__drive_wake(mlfab *ctx) {
  for (uint32_t t = 0; t < ctx->ntransports; t++)
    ctx->transports[t].table->wake(ctx->transports[t].self);
}

static void drive_cond_wait(mlfab *ctx, uint64_t ns) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  uint64_t at = (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec + ns;
  t.tv_sec = (time_t)(at / 1000000000u);
  t.tv_nsec = (long)(at % 1000000000u);
  pthread_cond_timedwait(&ctx->changed, &ctx->lock, &t);
}

/* Rather than to sleep? */
static int drive_looks_on(const mlfab *ctx, uint64_t idle_ns) {
  return !ctx->simulated && ctx->ntransports > 0 &&
         idle_ns < mlfab__add_sat(ctx->spin_ns, DRIVE_YIELD_NS);
}

/* Others get in between two looks: threads that wait too, now and then those that call, and other
 * processes, which may be what is waited for. */
static void drive_let_others(mlfab *ctx, uint64_t idle_ns) {
  int spun = idle_ns >= ctx->spin_ns;
  int yields = spun || ctx->idle_looks % DRIVE_CLOCK_EVERY == 0;
  if (!yields && ctx->waiters < 2) return;
  pthread_mutex_unlock(&ctx->lock);
  if (yields) sched_yield();
  pthread_mutex_lock(&ctx->lock);
  if (spun) ctx->idle_looks = 0; /* a turn of another's may have been long: the clock is read */
}

/* closed: whether the context was when the wait began; it ends when that changes. */
static int drive_until(mlfab *ctx, uint64_t deadline, mlfab__drive_test test, void *what,
                       int closed) {
  uint64_t idle_since = 0;
  int holds;
  ctx->waiters++;
  while (!(holds = test(ctx, what)) && ctx->closed == closed) {
    if (mlfab__drive_pump(ctx)) {
      idle_since = 0;
      if (ctx->now_ns < deadline) continue;
      holds = test(ctx, what);
      break;
    }
    uint64_t now = ctx->simulated ? mlfab__drive_now(ctx) : ctx->now_ns;
    if (now >= deadline) break;
    if (idle_since == 0) idle_since = now;
    if (ctx->sleeping) {
      /* Somebody else listens. The thread is asked to step aside. */
      if (ctx->thread_sleeps) mlfab__drive_wake(ctx);
      drive_cond_wait(ctx, mlfab__min(deadline - now, 100000000));
    } else if (drive_looks_on(ctx, now - idle_since)) {
      drive_let_others(ctx, now - idle_since);
    } else {
      drive_sleep(ctx, deadline);
    }
  }
  ctx->waiters--;
  if (ctx->waiters > 0) pthread_cond_broadcast(&ctx->changed);
  return holds;
}

MLFAB__INTERNAL int mlfab__drive_until(mlfab *ctx, uint64_t deadline, mlfab__drive_test test,
                                       void *what) {
  return drive_until(ctx, deadline, test, what, 0);
}

MLFAB__INTERNAL int mlfab__drive_in_vain(mlfab *ctx, int code) {
  if (!ctx->closed) return code;
  return mlfab__error(&ctx->node->requests.last, MLFAB_ERR_CLOSED, MLFAB_NO_RANK, 0, 0,
                      "the context was closed by another thread");
}

/* May others want something of this node at any time? */
static int drive_serves(const mlfab *ctx) {
  /* Rounds of an open object go on without this worker's call. */
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++)
    if (ctx->node->comm.objects[i].id) return 1;
  return ctx->node->is_server;
}

/* Is anything under way that the thread should see to? */
static int drive_busy(const mlfab *ctx) {
  const mlfab_node *node = ctx->node;
  return drive_serves(ctx) || node->requests.open > 0 ||
         (node->is_worker && mlfab__worker_unfinished(&node->worker) > 0);
}

/* Stays aside while others drive: until nobody has called and moved things for a moment, if something
 * is under way. While calls come one upon the other (`called`: so it was the last time), being told
 * after each of them would cost more than the call: it looks by itself now and then. 1 when others
 * did drive. */
static int drive_step_aside(mlfab *ctx, int called) {
  uint64_t calls = ctx->calls, looks = ctx->looks, ns = DRIVE_GRACE_NS;
  if (ctx->waiters > 0 || !drive_busy(ctx)) {
    int naps = called && ctx->brisk && drive_serves(ctx);
    ctx->dozing = naps ? DRIVE_NAPS : DRIVE_SLEEPS;
    ns = naps ? DRIVE_NAP_NS : mlfab__min(ctx->heartbeat_ns / 4, 50000000);
  }
  drive_cond_wait(ctx, ns);
  ctx->dozing = 0;
  called = calls != ctx->calls && looks != ctx->looks;
  if (called && ctx->brisk) ctx->parked = 1;
  if (!called && ctx->waiters == 0) ctx->parked = 0;
  return called;
}

static void *drive_thread(void *argument) {
  mlfab *ctx = argument;
  uint64_t idle_since = 0;
  int called = 0;
  pthread_mutex_lock(&ctx->lock);
  while (!ctx->stop) {
    if (ctx->waiters > 0 || ctx->parked) {
      called = drive_step_aside(ctx, called);
      idle_since = 0;
    } else if (mlfab__drive_pump(ctx)) {
      idle_since = 0;
    } else if (drive_busy(ctx) && (idle_since == 0 || ctx->now_ns - idle_since < ctx->spin_ns)) {
      /* More is to be expected soon: look again before sleeping, and let others in meanwhile. */
      if (idle_since == 0) idle_since = ctx->now_ns;
      pthread_mutex_unlock(&ctx->lock);
      pthread_mutex_lock(&ctx->lock);
    } else {
      idle_since = 0;
      ctx->calls_asleep = 0;
      ctx->thread_sleeps = 1;
      drive_sleep(ctx, MLFAB__NEVER);
      ctx->thread_sleeps = 0;
    }
  }
  pthread_mutex_unlock(&ctx->lock);
  return NULL;
}

static void drive_rearm(mlfab *ctx) {
  if (ctx->fd < 0) return;
  int pending = ctx->moves != ctx->moves_told;
  for (uint32_t t = 0; t < ctx->ntransports && !ctx->has_thread; t++) {
    pending |= ctx->transports[t].table->arm(ctx->transports[t].self, 1);
  }
  if (pending) drive_tell(ctx);
}

MLFAB__INTERNAL uint64_t mlfab__drive_enter(mlfab *ctx) {
  atomic_fetch_add(&ctx->inside, 1);
  pthread_mutex_lock(&ctx->lock);
  ctx->now_ns = mlfab__drive_now(ctx);
  ctx->brisk = ctx->now_ns - ctx->left_ns < DRIVE_GRACE_NS;
  return ctx->now_ns;
}

/* Who looks after what is left? The caller, as long as it calls again and again and so moves things
 * itself: two threads would only wake each other. Else the thread. */
MLFAB__INTERNAL void mlfab__drive_leave(mlfab *ctx) {
  ctx->calls++;
  if (ctx->has_thread && ctx->waiters == 0) {
    int busy = drive_busy(ctx);
    if (ctx->thread_sleeps && ++ctx->calls_asleep >= DRIVE_CALLS_ASLEEP) ctx->parked = 1;
    if (!busy && !ctx->thread_sleeps) ctx->parked = 1;
    if (busy && ctx->dozing && !(ctx->brisk && ctx->dozing == DRIVE_NAPS))
      pthread_cond_broadcast(&ctx->changed);
  }
  ctx->left_ns = ctx->now_ns;
  drive_rearm(ctx);
  if (ctx->closed) pthread_cond_broadcast(&ctx->changed);
  /* The last that is done here: whoever closes frees when it has the lock. */
  atomic_fetch_sub(&ctx->inside, 1);
  pthread_mutex_unlock(&ctx->lock);
}

/* --- opening --- */

/* Does the transport carry addresses of this kind? */
static int drive_kind(const char *name, const char *address) {
  size_t n = strlen(name);
  int is_shm = !strncmp(address, "shm:", 4), is_sim = !strncmp(address, "sim:", 4);
  if (!strncmp(address, name, n) && address[n] == ':') return 1;
  return !strcmp(name, "tcp") && !is_shm && !is_sim;
}

static int drive_open_one(mlfab *ctx, const mlfab_config *c, const mlfab_transport *table,
                          int publish, char *addresses, size_t room, mlfab_error *error) {
  mlfab_transport_options options;
  char address[256] = "";
  int coordinator = c->rank == 0 && c->roles != MLFAB_ROLE_SCHEDULER &&
                    (c->dedicated ? c->roles == MLFAB_ROLE_SERVER : 1);
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.allow_insecure = c->allow_insecure;
  options.listen = "";
  if (c->listen[0] && drive_kind(table->name, c->listen)) options.listen = c->listen;
  if (coordinator && drive_kind(table->name, c->coordinator)) options.listen = c->coordinator;
  options.ifname = c->ifname;
  options.job = c->job;
  options.env = &ctx->hooks;
  options.user = c->transport_user;
  options.error = error;
  options.timeout_ns = c->timeout_ns;
  mlfab__drive_transport *transport = &ctx->transports[ctx->ntransports];
  int code = table->open(&options, &transport->self, address);
  if (code)
    return error->code ? code
                       : mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, "transport %s: %s",
                                      table->name, mlfab_error_text(code));
  transport->table = table;
  ctx->ntransports++;
  size_t at = strlen(addresses);
  if (publish) snprintf(addresses + at, room - at, "%s%s", at ? " " : "", address);
  return 0;
}

static int drive_open_transports(mlfab *ctx, const mlfab_config *c, char *addresses, size_t room,
                                 mlfab_error *error) {
  uint32_t nodes =
      c->workers + (c->dedicated ? c->servers : 0) + (c->scheduler == MLFAB_SCHEDULER_OWN);
  if (c->transport) {
    const mlfab_transport *t = c->transport;
    if (t->abi != MLFAB_TRANSPORT_ABI || t->size < sizeof *t)
      return mlfab__error(error, MLFAB_ERR_CONFIG, MLFAB_NO_RANK, 0, 0,
                          "the transport is of another ABI");
    return drive_open_one(ctx, c, t, 1, addresses, room, error);
  }
  if (nodes == 1) return 0;
  uint32_t bits = c->transports ? c->transports : MLFAB_USE_TCP | MLFAB_USE_SHM;
  const mlfab_transport *tables[2] = {mlfab_transport_shm(), mlfab_transport_tcp()};
  int code = 0, opened = 0;
  for (int i = 0; i < 2 && !code; i++) {
    int wanted = (bits & (i == 0 ? MLFAB_USE_SHM : MLFAB_USE_TCP)) != 0;
    int meets = tables[i] && drive_kind(tables[i]->name, c->coordinator);
    if (!tables[i] || (!wanted && !meets)) continue;
    code = drive_open_one(ctx, c, tables[i], wanted, addresses, room, error);
    opened |= meets;
  }
  if (!code && !opened)
    return mlfab__error(error, MLFAB_ERR_CONFIG, MLFAB_NO_RANK, 0, 0,
                        "no transport for the coordinator address '%s'", c->coordinator);
  return code;
}

static void drive_free(mlfab *ctx) {
  mlfab__env env = ctx->env;
  for (uint32_t t = 0; t < ctx->ntransports; t++)
    ctx->transports[t].table->close(ctx->transports[t].self);
  mlfab_node_close(&ctx->node);
  if (!ctx->arena_runs) mlfab__drive_free_memory(ctx); /* it does in a child only */
  while (ctx->snapshots) {
    mlfab__snapshot *snapshot = ctx->snapshots;
    ctx->snapshots = snapshot->next;
    mlfab__free_aligned(&ctx->env, snapshot->before, snapshot->bytes);
    mlfab__free_aligned(&ctx->env, snapshot->difference, snapshot->bytes);
    mlfab__free(&ctx->env, snapshot, sizeof *snapshot);
  }
  if (ctx->fd >= 0) close(ctx->fd);
  if (ctx->tell >= 0) close(ctx->tell);
  /* Of a child it would wait for the threads that its parent had waiting there. */
  if (!drive_is_child(ctx)) pthread_cond_destroy(&ctx->changed);
  pthread_mutex_destroy(&ctx->lock);
  mlfab__free(&env, ctx, sizeof *ctx);
}

static mlfab *drive_new(const mlfab_config *c, mlfab_error *error) {
  mlfab__env env;
  int code = mlfab__env_init(&env, c->env);
  if (code) {
    mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, "env: allocate and release go together");
    return NULL;
  }
  pthread_once(&drive_once, drive_watch_forks);
  mlfab *ctx = drive_fork_error ? NULL : mlfab__alloc(&env, sizeof *ctx);
  if (!ctx) {
    mlfab__error(error, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, 0, "out of memory for the context");
    return NULL;
  }
  ctx->env = env;
  ctx->forks = drive_forks;
  ctx->hooks = env.hooks;
  if (!ctx->hooks.clock) ctx->hooks.clock = drive_monotonic;
  if (!ctx->hooks.log) ctx->hooks.log = drive_no_log;
  if (!ctx->hooks.store) ctx->hooks.store = drive_store;
  ctx->fd = ctx->tell = -1;
  ctx->spin_ns = c->spin_ns;
  ctx->timeout_ns = c->timeout_ns;
  ctx->heartbeat_ns = c->heartbeat_ns;
  ctx->measure_ns = c->scheduler != MLFAB_SCHEDULER_NONE || c->order_by_rate ? 0 : MLFAB__NEVER;
  ctx->simulated = c->transport && !strcmp(c->transport->name, "sim");
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
  pthread_mutex_init(&ctx->lock, NULL);
  pthread_cond_init(&ctx->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  return ctx;
}

/* Signals that a thread sends to itself, by a fault: blocked, they kill without asking the program's
 * handler. All others are for the program's own threads. */
static void drive_signals(sigset_t *blocked) {
  static const int faults[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
  sigfillset(blocked);
  for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++) sigdelset(blocked, faults[i]);
}

static int drive_start_thread(mlfab *ctx, const mlfab_config *c, mlfab_error *error) {
  int alone = ctx->ntransports == 0;
  sigset_t blocked, before;
  if (c->progress == MLFAB_PROGRESS_HAND || ctx->simulated || alone) return 0;
  pthread_attr_t attributes;
  size_t stack = 0;
  pthread_attr_init(&attributes);
  pthread_attr_getstacksize(&attributes, &stack);
  if (stack < DRIVE_STACK_BYTES) pthread_attr_setstacksize(&attributes, DRIVE_STACK_BYTES);
  ctx->has_thread = 1; /* the thread reads it */
  drive_signals(&blocked);
  pthread_sigmask(SIG_SETMASK, &blocked,
                  &before); /* the thread has it from its first instruction */
  int failed = pthread_create(&ctx->thread, &attributes, drive_thread, ctx);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  if (failed) {
    ctx->has_thread = 0;
    return mlfab__error(error, MLFAB_ERR_IO, MLFAB_NO_RANK, 0, 0,
                        "the progress thread cannot be started");
  }
  return 0;
}

MLFAB_API int mlfab_open_start(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p) {
  mlfab_error error;
  mlfab_config c;
  char addresses[MLFAB__ADDRESSES_MAX] = "";
  memset(&error, 0, sizeof error);
  error.rank = MLFAB_NO_RANK;
  mlfab *ctx = NULL;
  uint64_t began_ns = 0; /* finding out where to listen is a part of joining */
  int code = ctx_p ? mlfab__config_complete(config, &c, &error)
                   : mlfab__error(&error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "ctx_p is NULL");
  if (!code) {
    ctx = drive_new(&c, &error);
    code = ctx ? 0 : error.code;
  }
  if (!code) began_ns = mlfab__drive_now(ctx);
  if (!code) code = drive_open_transports(ctx, &c, addresses, sizeof addresses, &error);
  if (!code) {
    c.env = &ctx->hooks;
    code = mlfab_node_open(&c, addresses, began_ns, &ctx->node, &error);
  }
  if (!code) {
    drive_actions(ctx, mlfab__drive_now(ctx));
    code = drive_start_thread(ctx, &c, &error);
  }
  if (error_p) *error_p = error;
  if (!code) *ctx_p = ctx;
  if (code && ctx) drive_free(ctx);
  return code;
}

static int drive_test_ready(mlfab *ctx, void *what) {
  (void)what;
  return mlfab_node_ready(ctx->node, NULL) != 0;
}

MLFAB_API int mlfab_open(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p) {
  mlfab *ctx = NULL;
  if (!ctx_p)
    return mlfab__error(error_p, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "ctx_p is NULL");
  int code = mlfab_open_start(config, &ctx, error_p);
  if (code) return code;
  mlfab__drive_enter(ctx);
  /* The node has its own deadline for joining, and then says why. */
  mlfab__drive_until(ctx, MLFAB__NEVER, drive_test_ready, NULL);
  code = mlfab_node_ready(ctx->node, error_p);
  mlfab__drive_leave(ctx);
  if (code == 1) {
    *ctx_p = ctx;
    return 0;
  }
  mlfab_abandon(&ctx);
  return code;
}

MLFAB_API int mlfab_is_ready(mlfab *ctx, mlfab_error *error_p) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  int ready = mlfab_node_ready(ctx->node, error_p);
  mlfab__drive_leave(ctx);
  return ready;
}

/* --- closing --- */

static int drive_test_served(mlfab *ctx, void *what) {
  (void)what;
  return ctx->node->is_server ? mlfab__server_finished(&ctx->node->server)
                              : mlfab__node_finished(ctx->node);
}

static int drive_test_silent(mlfab *ctx, void *what) {
  (void)what;
  if (ctx->node->parting) return 0; /* others wait for something of ours */
  /* A goodbye has not gone out, or has not been heard. */
  for (uint32_t i = 0; i < ctx->node->nlinks; i++) {
    if (ctx->node->links[i].closing) return 0;
  }
  return ctx->node->ready_count == 0 && ctx->node->actions_count == 0;
}

static void drive_stop_thread(mlfab *ctx) {
  if (!ctx->has_thread) return;
  pthread_mutex_lock(&ctx->lock);
  ctx->stop = 1;
  pthread_cond_broadcast(&ctx->changed);
  pthread_mutex_unlock(&ctx->lock);
  mlfab__drive_wake(ctx);
  pthread_join(ctx->thread, NULL);
  ctx->has_thread = 0;
}

/* Closes a context in a forked child. If a thread of the parent held the lock at the fork, the context may be
 * half changed: the child then frees nothing, and the system frees it when the child ends. */
static int drive_disown(mlfab **ctx_p) {
  mlfab *ctx = *ctx_p;
  *ctx_p = NULL;
  if (pthread_mutex_trylock(&ctx->lock)) return 0;
  pthread_mutex_unlock(&ctx->lock);
  drive_free(ctx);
  return 0;
}

/* Until all other threads have left. With the lock. */
static void drive_drain(mlfab *ctx) {
  while (!ctx->simulated && atomic_load(&ctx->inside) > 1) {
    pthread_cond_broadcast(&ctx->changed);
    if (ctx->sleeping) mlfab__drive_wake(ctx);
    drive_cond_wait(ctx, DRIVE_DRAIN_NS);
  }
}

/* From OPEN to CLOSED, and until this thread is alone; it has the lock then. In a child of the process that
 * opened it there is nothing left to do, and *closed_p is NULL. Errors: ARGUMENT, CLOSED. */
static int drive_shut(mlfab **ctx_p, mlfab **closed_p) {
  mlfab *ctx = ctx_p ? *ctx_p : NULL;
  *closed_p = NULL;
  if (!ctx_p) return MLFAB_ERR_ARGUMENT;
  if (!ctx) return MLFAB_ERR_CLOSED;
  if (drive_is_child(ctx)) return drive_disown(ctx_p);
  mlfab__drive_enter(ctx);
  if (ctx->closed) {
    mlfab__drive_leave(ctx);
    return MLFAB_ERR_CLOSED;
  }
  ctx->closed = ctx->node->closed = 1;
  *ctx_p = NULL;
  drive_drain(ctx);
  *closed_p = ctx;
  return 0;
}

static void drive_end(mlfab *ctx) {
  drive_drain(ctx);
  pthread_mutex_unlock(&ctx->lock);
  drive_stop_thread(ctx);
  drive_free(ctx);
}

MLFAB_API int mlfab_close(mlfab **ctx_p) {
  mlfab *ctx;
  int code = drive_shut(ctx_p, &ctx);
  if (!ctx) return code;
  mlfab_node *node = ctx->node;
  uint64_t now = mlfab__drive_now(ctx);
  if (node->phase == MLFAB__BOOT_READY && node->is_server && node->is_worker) {
    /* The shard that lives here is needed until the others have left too. */
    mlfab__node_stop_working(node, now);
    drive_until(ctx, mlfab__add_sat(now, ctx->timeout_ns), drive_test_served, NULL, 1);
  }
  /* Before all servers have greeted it, some may have. */
  if (node->phase == MLFAB__BOOT_READY || node->phase == MLFAB__BOOT_GREETING) {
    now = mlfab__drive_now(ctx);
    mlfab_node_leave(node, now);
    /* A beat for what others wait for, and one for the goodbye. */
    drive_until(ctx, now + 2 * ctx->heartbeat_ns, drive_test_silent, NULL, 1);
  }
  drive_end(ctx);
  return 0;
}

MLFAB_API int mlfab_abandon(mlfab **ctx_p) {
  mlfab *ctx;
  int code = drive_shut(ctx_p, &ctx);
  if (ctx) drive_end(ctx);
  return code;
}

/* --- waiting for requests --- */

typedef struct drive_wait {
  mlfab_request request;
} drive_wait;

static int drive_test_request(mlfab *ctx, void *what) {
  const drive_wait *wait = what;
  const mlfab__request *request = mlfab__request_find(&ctx->node->requests, wait->request);
  return !request || request->done;
}

MLFAB__INTERNAL int mlfab__drive_await(mlfab *ctx, mlfab_request id, uint64_t timeout_ns,
                                       mlfab_result *result_p) {
  drive_wait wait = {id};
  mlfab_result result;
  int done = 0;
  uint64_t now = mlfab__drive_now(ctx);
  drive_actions(ctx, now);
  mlfab__drive_until(ctx, timeout_ns ? mlfab__add_sat(now, timeout_ns) : MLFAB__NEVER,
                     drive_test_request, &wait);
  int code = mlfab_node_test(ctx->node, id, &done, &result);
  if (code) return code;
  if (!done && ctx->closed) {
    now = mlfab__drive_now(ctx);
    mlfab_node_cancel(ctx->node, id, now);
    drive_actions(ctx, now); /* transports let go of what was lent */
    return mlfab__drive_in_vain(ctx, 0);
  }
  if (!done) return MLFAB_ERR_TIMEOUT;
  if (result_p) *result_p = result;
  /* By another thread's withdrawal, which ends all open collectives. */
  if (result.status == MLFAB_ERR_CANCELLED) return mlfab__drive_in_vain(ctx, result.status);
  return result.status;
}

/* Sends what a call has set off. What a transport has to say of it, a thread that is asleep would
 * not notice; and while the thread stays aside, the answers to earlier calls are taken in here. */
MLFAB__INTERNAL void mlfab__drive_send(mlfab *ctx, uint64_t now) {
  int moved = drive_actions(ctx, now);
  int turn = ctx->parked && ctx->calls % DRIVE_PUMP_EVERY == 0;
  if (turn || (moved && ctx->sleeping)) mlfab__drive_pump(ctx);
}

MLFAB_API int mlfab_tensor_add(mlfab *ctx, uint32_t id, int dtype, uint64_t count) {
  DRIVE_CHECK(ctx);
  DRIVE_START(((void)now, mlfab_node_tensor_add(ctx->node, id, dtype, count)));
}

MLFAB_API int mlfab_model_start(mlfab *ctx, const mlfab_model_options *options,
                                const mlfab_buf *bufs, uint32_t n) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_model_start(ctx->node, options, bufs, n, now, &request), NULL);
}

MLFAB_API int mlfab_push(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_push_options *options, mlfab_result *result_p) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_push(ctx->node, bufs, n, options, now, &request), result_p);
}

MLFAB_API int mlfab_push_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_push_options *options, mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  DRIVE_START(mlfab_node_push(ctx->node, bufs, n, options, now, request_p));
}

MLFAB_API int mlfab_pull(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                         const mlfab_pull_options *options, mlfab_result *result_p) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_pull(ctx->node, bufs, n, options, now, &request), result_p);
}

MLFAB_API int mlfab_pull_start(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                               const mlfab_pull_options *options, mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  DRIVE_START(mlfab_node_pull(ctx->node, bufs, n, options, now, request_p));
}

MLFAB_API int mlfab_push_sparse(mlfab *ctx, uint32_t tensor, const uint64_t *indices,
                                const void *values, uint64_t count,
                                const mlfab_push_options *options, mlfab_result *result_p) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(
      mlfab_node_push_sparse(ctx->node, tensor, indices, values, count, options, now, &request),
      result_p);
}

MLFAB_API int mlfab_push_sparse_start(mlfab *ctx, uint32_t tensor, const uint64_t *indices,
                                      const void *values, uint64_t count,
                                      const mlfab_push_options *options, mlfab_request *request_p) {
  DRIVE_CHECK(ctx);
  DRIVE_START(
      mlfab_node_push_sparse(ctx->node, tensor, indices, values, count, options, now, request_p));
}

MLFAB_API int mlfab_set_filter(mlfab *ctx, uint32_t tensor, const mlfab_filter *filter) {
  DRIVE_CHECK(ctx);
  DRIVE_START(((void)now, mlfab_node_set_filter(ctx->node, tensor, filter)));
}

MLFAB_API int mlfab_cached(mlfab *ctx, uint32_t tensor, const void **data_p, uint64_t *count_p) {
  DRIVE_CHECK(ctx);
  DRIVE_START(((void)now, mlfab_node_cached(ctx->node, tensor, data_p, count_p)));
}

MLFAB_API int mlfab_set_sync(mlfab *ctx, const mlfab_sync *sync, uint32_t server, uint32_t tensor,
                             uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_set_sync(ctx->node, sync, server, tensor, timeout_ns, now, &request),
              NULL);
}

MLFAB_API int mlfab_set_servers(mlfab *ctx, const uint32_t *servers, uint32_t n,
                                uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_set_servers(ctx->node, servers, n, timeout_ns, now, &request), NULL);
}

MLFAB_API int mlfab_barrier(mlfab *ctx, uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_barrier(ctx->node, timeout_ns, now, &request), NULL);
}

MLFAB_API int mlfab_broadcast(mlfab *ctx, int32_t root, void *data, uint64_t bytes,
                              uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_broadcast(ctx->node, root, data, bytes, timeout_ns, now, &request), NULL);
}

MLFAB_API int mlfab_join(mlfab *ctx, uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  DRIVE_BLOCK(mlfab_node_join(ctx->node, timeout_ns, now, &request), NULL);
}

MLFAB_API int mlfab_test(mlfab *ctx, mlfab_request request, int *done_p, mlfab_result *result_p) {
  DRIVE_CHECK(ctx);
  if (!done_p) return MLFAB_ERR_ARGUMENT;
  mlfab__drive_enter(ctx);
  /* Hand-driven programs poll with it; otherwise the thread moves things, unless it has stepped
   * aside. */
  if (!ctx->has_thread || ctx->parked) mlfab__drive_pump(ctx);
  int code = mlfab_node_test(ctx->node, request, done_p, result_p);
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_wait(mlfab *ctx, mlfab_request request, uint64_t timeout_ns,
                         mlfab_result *result_p) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  int code = mlfab__drive_await(ctx, request, timeout_ns, result_p);
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_cancel(mlfab *ctx, mlfab_request request) {
  DRIVE_CHECK(ctx);
  DRIVE_START(mlfab_node_cancel(ctx->node, request, now));
}

MLFAB_API int mlfab_push_status(mlfab *ctx, uint64_t seq, int *status_p) {
  DRIVE_CHECK(ctx);
  DRIVE_START(((void)now, mlfab_node_push_status(ctx->node, seq, status_p)));
}

static int drive_test_flushed(mlfab *ctx, void *what) {
  (void)what;
  return mlfab__worker_unfinished(&ctx->node->worker) == 0;
}

MLFAB_API int mlfab_flush(mlfab *ctx, uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  if (!ctx->node->is_worker) {
    int wrong = mlfab__error(&ctx->node->requests.last, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
                             "flush: this node is not a worker");
    mlfab__drive_leave(ctx);
    return wrong;
  }
  uint64_t start = mlfab__drive_now(ctx);
  uint64_t deadline = mlfab__add_sat(start, timeout_ns ? timeout_ns : ctx->timeout_ns);
  int code = 0;
  if (!mlfab__drive_until(ctx, deadline, drive_test_flushed, NULL)) {
    char waited[24];
    code = mlfab__error(&ctx->node->requests.last, MLFAB_ERR_TIMEOUT, MLFAB_NO_RANK, 0,
                        mlfab__drive_now(ctx) - start,
                        "flush: after %s %u updates are not decided by every server",
                        mlfab__duration(waited, mlfab__drive_now(ctx) - start),
                        mlfab__worker_unfinished(&ctx->node->worker));
    code = mlfab__drive_in_vain(ctx, code);
  } else if (ctx->node->requests.abandoned_code) {
    code = ctx->node->requests.abandoned_code;
    ctx->node->requests.abandoned_code = 0;
  }
  mlfab__drive_leave(ctx);
  return code;
}

/* Has anything moved since? */
static int drive_test_moved(mlfab *ctx, void *what) {
  const uint64_t *before = what;
  return ctx->moves != *before;
}

/* Empties the descriptor: what was told is taken in by the call that begins. */
static void drive_untell(mlfab *ctx) {
  uint64_t count;
  if (ctx->fd < 0) return;
  if (read(ctx->tell, &count, sizeof count) < 0) count = 0; /* nothing was told */
  for (uint32_t t = 0; t < ctx->ntransports && !ctx->has_thread; t++) {
    ctx->transports[t].table->arm(ctx->transports[t].self, 0);
  }
  ctx->idle_looks = 0; /* deadlines count: somebody slept until one */
}

MLFAB_API int mlfab_progress(mlfab *ctx, uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  drive_untell(ctx);
  uint64_t before = ctx->moves;
  int moved = mlfab__drive_pump(ctx) || (ctx->fd >= 0 && before != ctx->moves_told);
  if (!moved && timeout_ns > 0) {
    moved = mlfab__drive_until(ctx, mlfab__add_sat(mlfab__drive_now(ctx), timeout_ns),
                               drive_test_moved, &before);
  }
  ctx->moves_told = ctx->moves;
  mlfab__drive_leave(ctx);
  return moved;
}

MLFAB_API int mlfab_deadline(mlfab *ctx, uint64_t *at_ns_p) {
  DRIVE_CHECK(ctx);
  if (!at_ns_p) return MLFAB_ERR_ARGUMENT;
  mlfab__drive_enter(ctx);
  *at_ns_p = mlfab_node_deadline(ctx->node);
  mlfab__drive_leave(ctx);
  return 0;
}

MLFAB_API int mlfab_set_schedule(mlfab *ctx, const mlfab_schedule *schedule) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  int code = mlfab_node_set_schedule(ctx->node, schedule, mlfab__drive_now(ctx));
  drive_actions(ctx, mlfab__drive_now(ctx));
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_set_link(mlfab *ctx, double in_bytes_per_s, double out_bytes_per_s) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  int code = mlfab_node_set_link(ctx->node, in_bytes_per_s, out_bytes_per_s, mlfab__drive_now(ctx));
  drive_actions(ctx, mlfab__drive_now(ctx));
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_explain(mlfab *ctx, char *text, size_t room, size_t *bytes_p) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  int code = mlfab_node_explain(ctx->node, text, room, bytes_p);
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_serve(mlfab *ctx, uint64_t timeout_ns) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  if (!ctx->node->is_server && !ctx->node->is_scheduler) {
    int wrong = mlfab__error(&ctx->node->requests.last, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
                             "serve: this node is neither server nor scheduler");
    mlfab__drive_leave(ctx);
    return wrong;
  }
  uint64_t deadline = timeout_ns ? mlfab__add_sat(mlfab__drive_now(ctx), timeout_ns) : MLFAB__NEVER;
  int served = mlfab__drive_until(ctx, deadline, drive_test_served, NULL);
  int code =
      served ? 0
             : mlfab__error(&ctx->node->requests.last, MLFAB_ERR_TIMEOUT, MLFAB_NO_RANK, 0,
                            timeout_ns, "serve: the deadline passed, and workers are still here");
  if (!served) code = mlfab__drive_in_vain(ctx, code);
  mlfab__drive_leave(ctx);
  return code;
}

/* --- descriptors, numbers --- */

#if defined(__linux__)
static int drive_open_fd(mlfab *ctx) {
  int fds[MLFAB__DRIVE_TRANSPORTS + 1], n = 0, code = 0;
  int fd = epoll_create1(EPOLL_CLOEXEC);
  ctx->tell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  fds[n++] = ctx->tell;
  /* The thread, where there is one, listens to the transports. */
  for (uint32_t t = 0; t < ctx->ntransports && !ctx->has_thread; t++) {
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
  return mlfab__error(&ctx->node->requests.last, code, MLFAB_NO_RANK, 0, 0, "fd: %s",
                      code == MLFAB_ERR_IO ? strerror(errno) : "the transport has no descriptor");
}
#else
static int drive_open_fd(mlfab *ctx) {
  return mlfab__error(&ctx->node->requests.last, MLFAB_ERR_UNSUPPORTED, MLFAB_NO_RANK, 0, 0,
                      "fd: only on Linux");
}
#endif

MLFAB_API int mlfab_fd(mlfab *ctx, int *fd_p) {
  DRIVE_CHECK(ctx);
  if (!fd_p) return MLFAB_ERR_ARGUMENT;
  mlfab__drive_enter(ctx);
  int code = ctx->fd >= 0 ? 0 : drive_open_fd(ctx);
  if (!code) *fd_p = ctx->fd;
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_rank(const mlfab *ctx, int32_t *rank_p, uint32_t *workers_p,
                         uint32_t *servers_p) {
  DRIVE_CHECK(ctx);
  const mlfab_config *c = &ctx->node->config;
  if (rank_p) *rank_p = ctx->node->is_worker ? c->rank : -1;
  if (workers_p) *workers_p = c->workers;
  if (servers_p) *servers_p = c->servers;
  return 0;
}

MLFAB_API int mlfab_last_error(mlfab *ctx, mlfab_error *error_p) {
  if (ctx && error_p && drive_is_child(ctx)) {
    mlfab__error(
        error_p, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
        "this process is a child of the one that opened the context: it can only close it");
    return 0;
  }
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  int code = mlfab_node_last_error(ctx->node, error_p);
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_get_stats(mlfab *ctx, mlfab_stats *stats_p, size_t size) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  int code = mlfab_node_stats(ctx->node, stats_p, size);
  mlfab__drive_leave(ctx);
  return code;
}

/* --- snapshots --- */

static mlfab__snapshot *drive_find_snapshot(const mlfab *ctx, const mlfab_buf *buf) {
  mlfab__snapshot *snapshot = ctx->snapshots;
  while (snapshot && (snapshot->tensor != buf->tensor || snapshot->count != buf->count))
    snapshot = snapshot->next;
  return snapshot;
}

static int drive_snapshot_one(mlfab *ctx, const mlfab_buf *buf) {
  mlfab__snapshot *snapshot = drive_find_snapshot(ctx, buf);
  const mlfab__layout *layout = &ctx->node->worker.layout;
  if (!snapshot) {
    const mlfab__tensor *tensor =
        buf->tensor == MLFAB_ALL ? NULL : mlfab__layout_find(layout, buf->tensor);
    snapshot = mlfab__alloc(&ctx->env, sizeof *snapshot);
    if (!snapshot) return MLFAB_ERR_MEMORY;
    snapshot->tensor = buf->tensor;
    snapshot->dtype = (int)(tensor ? tensor->dtype : layout->uniform_dtype);
    snapshot->count = buf->count;
    snapshot->bytes = buf->count * mlfab__dtype_bytes(snapshot->dtype);
    snapshot->before = mlfab__alloc_aligned(&ctx->env, snapshot->bytes);
    snapshot->difference = mlfab__alloc_aligned(&ctx->env, snapshot->bytes);
    if (!snapshot->before || !snapshot->difference) {
      mlfab__free_aligned(&ctx->env, snapshot->before, snapshot->bytes);
      mlfab__free_aligned(&ctx->env, snapshot->difference, snapshot->bytes);
      mlfab__free(&ctx->env, snapshot, sizeof *snapshot);
      return MLFAB_ERR_MEMORY;
    }
    snapshot->next = ctx->snapshots;
    ctx->snapshots = snapshot;
  }
  memcpy(snapshot->before, buf->data, snapshot->bytes);
  return 0;
}

/* Are these whole tensors of a model that stands? */
static int drive_check_bufs(mlfab *ctx, const mlfab_buf *bufs, uint32_t n) {
  mlfab__worker *worker = &ctx->node->worker;
  mlfab__source *sources = NULL;
  uint32_t nsources, room = 0;
  mlfab_error *last = &ctx->node->requests.last;
  if (!ctx->node->is_worker || !worker->stands)
    return mlfab__error(last, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
                        "snapshot: before the model exists");
  int code = mlfab__worker_sources(worker, bufs, n, 0, &sources, &nsources, &room, last);
  mlfab__free(&ctx->node->env, sources, room * sizeof *sources);
  return code;
}

MLFAB_API int mlfab_snapshot(mlfab *ctx, const mlfab_buf *bufs, uint32_t n) {
  DRIVE_CHECK(ctx);
  mlfab__drive_enter(ctx);
  int code = drive_check_bufs(ctx, bufs, n);
  for (uint32_t i = 0; i < n && !code; i++) code = drive_snapshot_one(ctx, &bufs[i]);
  mlfab__drive_leave(ctx);
  return code;
}

MLFAB_API int mlfab_push_difference(mlfab *ctx, const mlfab_buf *bufs, uint32_t n,
                                    const mlfab_push_options *options, mlfab_result *result_p) {
  DRIVE_CHECK(ctx);
  mlfab_request request = 0;
  mlfab__drive_enter(ctx);
  int code = drive_check_bufs(ctx, bufs, n);
  for (uint32_t i = 0; i < n && !code; i++) {
    if (!drive_find_snapshot(ctx, &bufs[i]))
      code = mlfab__error(&ctx->node->requests.last, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
                          "push_difference: no snapshot of tensor %u", bufs[i].tensor);
  }
  mlfab_buf *list = code ? NULL : mlfab__alloc_array(&ctx->env, n, sizeof *list);
  if (!code && !list) code = MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < n && !code; i++) {
    mlfab__snapshot *snapshot = drive_find_snapshot(ctx, &bufs[i]);
    mlfab__reduce_subtract(snapshot->dtype, snapshot->difference, bufs[i].data, snapshot->before,
                           snapshot->count);
    list[i] = bufs[i];
    list[i].data = snapshot->difference;
  }
  if (!code) code = mlfab_node_push(ctx->node, list, n, options, mlfab__drive_now(ctx), &request);
  if (!code) code = mlfab__drive_await(ctx, request, 0, result_p);
  for (uint32_t i = 0; i < n && !code; i++) {
    mlfab__snapshot *snapshot = drive_find_snapshot(ctx, &bufs[i]);
    memcpy(snapshot->before, bufs[i].data, snapshot->bytes);
  }
  mlfab__free(&ctx->env, list, n * sizeof *list);
  mlfab__drive_leave(ctx);
  return code;
}

/* --- saving --- */

/* The safetensors header: one JSON object, offsets within the data that follow it. The data lie
 * as in the flat model, where every element is aligned. Returns its bytes. */
static size_t drive_save_header(const mlfab__layout *layout, char *text, size_t room) {
  size_t at = 0;
  for (uint32_t i = 0; i < layout->ntensors; i++) {
    const mlfab__tensor *t = &layout->tensors[i];
    const char *name = t->dtype == MLFAB_F32 ? "F32" : t->dtype == MLFAB_F64 ? "F64" : "I64";
    int n = snprintf(text ? text + at : NULL, text ? room - at : 0,
                     "%s\"%u\":{\"dtype\":\"%s\",\"shape\":[%llu],\"data_offsets\":[%llu,%llu]}",
                     i ? "," : "{", t->id, name, (unsigned long long)t->count,
                     (unsigned long long)t->offset, (unsigned long long)(t->offset + t->bytes));
    at += (size_t)n;
  }
  if (text) memcpy(text + at, "}", 2);
  return at + 1;
}

MLFAB_API int mlfab_save(mlfab *ctx, const char *path) {
  DRIVE_CHECK(ctx);
  if (!path) return MLFAB_ERR_ARGUMENT;
  mlfab__drive_enter(ctx);
  const mlfab__layout *layout = &ctx->node->worker.layout;
  mlfab_error *last = &ctx->node->requests.last;
  int code = 0;
  if (!ctx->node->is_worker || !ctx->node->worker.stands || ctx->node->worker.define.ghost) {
    code = mlfab__error(last, MLFAB_ERR_STATE, MLFAB_NO_RANK, 0, 0,
                        "save: there is no model with bytes here");
    mlfab__drive_leave(ctx);
    return code;
  }
  size_t header = drive_save_header(layout, NULL, 0), padded = (header + 7) / 8 * 8;
  size_t bytes = 8 + padded + layout->bytes;
  uint8_t *file = mlfab__alloc_aligned(&ctx->env, bytes + 1);
  mlfab_buf *bufs = mlfab__alloc_array(&ctx->env, layout->ntensors, sizeof *bufs);
  if (!file || !bufs)
    code = mlfab__error(last, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, 0, "save: out of memory");
  if (!code) {
    for (int i = 0; i < 8; i++) file[i] = (uint8_t)((uint64_t)padded >> (8 * i));
    drive_save_header(layout, (char *)file + 8, padded + 1);
    memset(file + 8 + header, ' ', padded - header);
    for (uint32_t i = 0; i < layout->ntensors; i++) {
      const mlfab__tensor *t = &layout->tensors[i];
      bufs[i].tensor = t->id;
      bufs[i].count = t->count;
      bufs[i].data = file + 8 + padded + t->offset;
    }
    mlfab_request request = 0;
    code =
        mlfab_node_pull(ctx->node, bufs, layout->ntensors, NULL, mlfab__drive_now(ctx), &request);
    if (!code) code = mlfab__drive_await(ctx, request, 0, NULL);
  }
  pthread_mutex_unlock(&ctx->lock); /* others go on while it writes */
  errno = 0;
  int failed = !code && ctx->hooks.store(ctx->hooks.user, path, file, bytes), number = errno;
  pthread_mutex_lock(&ctx->lock);
  if (failed)
    code = mlfab__error(last, MLFAB_ERR_IO, MLFAB_NO_RANK, 0, 0,
                        "save: '%.200s' cannot be written: %s", path,
                        number ? strerror(number) : "env.store failed");
  mlfab__free(&ctx->env, bufs, layout->ntensors * sizeof *bufs);
  mlfab__free_aligned(&ctx->env, file, bytes + 1);
  mlfab__drive_leave(ctx);
  return code;
}
