/* barrier.c - the barrier at server 0 and at a worker. See barrier.h. */
#include "barrier.h"

/* --- server 0 --- */

MLFAB__INTERNAL int mlfab__barrier_server_init(mlfab__barrier_server *server, mlfab__env *env,
                                               const mlfab_config *config,
                                               const mlfab__port *port) {
  memset(server, 0, sizeof *server);
  server->env = env;
  server->port = *port;
  server->workers = config->workers;
  server->missing = MLFAB_NO_RANK;
  server->entries = mlfab__alloc_array(env, server->workers, sizeof *server->entries);
  return server->entries ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__barrier_server_free(mlfab__barrier_server *server) {
  if (!server->env) return;
  mlfab__free(server->env, server->entries, server->workers * sizeof *server->entries);
  memset(server, 0, sizeof *server);
}

static void barrier_answer(mlfab__barrier_server *server, uint32_t worker, uint64_t number) {
  mlfab__barrier barrier = {number};
  MLFAB__POST(&server->port, worker, MLFAB__BARRIER_DONE, barrier, &barrier);
}

static void barrier_blame(mlfab__barrier_server *server, uint32_t worker, int32_t missing) {
  mlfab__waiting waiting = {.kind = MLFAB__REQUEST_BARRIER, .rank = missing};
  MLFAB__POST(&server->port, worker, MLFAB__WAITING, waiting, &waiting);
}

static int barrier_waits(const mlfab__barrier_server *server, const mlfab__barrier_entry *entry) {
  return entry->asked > server->over && !entry->gone;
}

/* The first live worker that has not asked for the next barrier, or NO_RANK. *next_p: up to which
 * barrier all who wait have asked, or `over` when nobody waits. */
static int32_t barrier_missing(const mlfab__barrier_server *server, uint64_t *next_p) {
  int32_t missing = MLFAB_NO_RANK;
  uint64_t least = UINT64_MAX;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__barrier_entry *entry = &server->entries[w];
    if (barrier_waits(server, entry)) {
      least = mlfab__min(least, entry->asked);
    } else if (!entry->gone && !entry->done && missing == MLFAB_NO_RANK) {
      missing = (int32_t)w;
    }
  }
  *next_p = least == UINT64_MAX ? server->over : least;
  return MLFAB__PLANTED(7) ? MLFAB_NO_RANK : missing;
}

/* Releases what all have asked for. Tells who is missing: a newcomer, and all when it changes. */
static void barrier_check(mlfab__barrier_server *server, uint32_t newcomer) {
  uint64_t before = server->over, next;
  int32_t missing = barrier_missing(server, &next);
  while (missing == MLFAB_NO_RANK && next > server->over) {
    server->over = next;
    missing = barrier_missing(server, &next);
  }
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__barrier_entry *entry = &server->entries[w];
    if (entry->gone) continue;
    if (entry->asked > before && server->over > before)
      barrier_answer(server, w, mlfab__min(entry->asked, server->over) - entry->base);
    if (barrier_waits(server, entry) &&
        (w == newcomer || missing != server->missing || server->over > before))
      barrier_blame(server, w, missing);
  }
  server->missing = missing;
}

MLFAB__INTERNAL void mlfab__barrier_server_hello(mlfab__barrier_server *server, uint32_t worker,
                                                 int fresh) {
  mlfab__barrier_entry *entry = &server->entries[worker];
  entry->gone = 0;
  if (fresh) *entry = (mlfab__barrier_entry){.base = server->over};
}

MLFAB__INTERNAL void mlfab__barrier_server_gone(mlfab__barrier_server *server, uint32_t worker) {
  server->entries[worker].gone = 1;
  barrier_check(server, MLFAB__NO_NODE);
}

MLFAB__INTERNAL void mlfab__barrier_server_done(mlfab__barrier_server *server, uint32_t worker) {
  server->entries[worker].done = 1;
  barrier_check(server, MLFAB__NO_NODE);
}

MLFAB__INTERNAL int mlfab__barrier_server_frame(mlfab__barrier_server *server, uint32_t worker,
                                                const mlfab__frame_in *frame) {
  mlfab__barrier_entry *entry = &server->entries[worker];
  mlfab__barrier in;
  if (frame->type != MLFAB__BARRIER) return 0;
  if (mlfab__port_refuse(&server->port, worker, frame,
                         mlfab__decode_barrier(frame->meta, frame->meta_bytes, &in) ||
                             in.number == 0 || in.number > UINT64_MAX / 2))
    return 1;
  uint64_t asked = mlfab__add_sat(entry->base, in.number);
  /* Asked again, or late: the answer may have been lost. */
  if (asked <= mlfab__max(entry->asked, server->over) && server->over > entry->base)
    barrier_answer(server, worker, mlfab__min(asked, server->over) - entry->base);
  entry->asked = mlfab__max(entry->asked, asked);
  barrier_check(server, worker);
  return 1;
}

/* --- a worker --- */

MLFAB__INTERNAL void mlfab__barrier_worker_init(mlfab__barrier_worker *worker,
                                                const mlfab__port *port,
                                                mlfab__requests *requests) {
  memset(worker, 0, sizeof *worker);
  worker->port = *port;
  worker->requests = requests;
}

static void barrier_ask(mlfab__barrier_worker *worker) {
  mlfab__barrier barrier = {worker->over + worker->open};
  MLFAB__POST(&worker->port, 0, MLFAB__BARRIER, barrier, &barrier);
}

MLFAB__INTERNAL int mlfab__barrier_start(mlfab__barrier_worker *worker, uint64_t timeout_ns,
                                         uint64_t now_ns, mlfab_request *request_p,
                                         mlfab_error *error) {
  if (worker->leaving)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "a barrier: this worker takes no further part");
  if (worker->dead)
    return mlfab__error(error, MLFAB_ERR_PEER_DEAD, 0, 1, 0, "barrier: server 0 is dead");
  int code = mlfab__request_room(worker->requests, MLFAB__REQUEST_BARRIER, error);
  if (code) return code;
  mlfab__request *request =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_BARRIER, 0, now_ns, timeout_ns);
  *request_p = request->id;
  worker->open++;
  barrier_ask(worker);
  return 0;
}

/* The first call that is open, or NULL. Ids grow. */
static mlfab__request *barrier_first(const mlfab__barrier_worker *worker) {
  mlfab__request *first = NULL, *r = NULL;
  while ((r = mlfab__request_of(worker->requests, MLFAB__REQUEST_BARRIER, 0, r)))
    if (!first || r->id < first->id) first = r;
  return first;
}

MLFAB__INTERNAL void mlfab__barrier_withdraw(mlfab__barrier_worker *worker, mlfab__request *request,
                                             int code, uint64_t now_ns) {
  worker->open--;
  if (request->blame.rank == MLFAB_NO_RANK) mlfab__request_blame(request, 0, 1, "%s", "");
  mlfab__request_expire(worker->requests, request, code, now_ns);
}

MLFAB__INTERNAL void mlfab__barrier_worker_hello(mlfab__barrier_worker *worker) {
  if (worker->open > 0) barrier_ask(worker);
}

MLFAB__INTERNAL void mlfab__barrier_worker_dead(mlfab__barrier_worker *worker, uint64_t now_ns) {
  worker->dead = 1;
  for (; worker->open > 0; worker->open--)
    mlfab__request_dead(worker->requests, barrier_first(worker), 0, now_ns);
}

MLFAB__INTERNAL int mlfab__barrier_worker_frame(mlfab__barrier_worker *worker,
                                                const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__barrier in;
  if (frame->type != MLFAB__BARRIER_DONE) return 0;
  if (MLFAB__MALFORMED(&worker->port, 0, frame, barrier, &in)) return 1;
  for (; worker->over < in.number && worker->open > 0; worker->open--) {
    worker->over++;
    mlfab__request_succeed(worker->requests, barrier_first(worker), now_ns);
  }
  return 1;
}
