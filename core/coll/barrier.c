/* barrier.c - the barrier: roles at server 0 (links WORKER) and at a worker (its link to server 0). See barrier.h. */
#include "barrier.h"

#include "../node/node.h"

#include <stdio.h>

/* --- server 0 --- */

static void barrier_answer(mlfab__barrier_server *server, uint32_t worker, uint64_t number) {
  mlfab__barrier barrier = {.number = number};
  MLFAB__POST(&server->port, worker, MLFAB__BARRIER_DONE, barrier, &barrier);
}

static void barrier_blame(mlfab__barrier_server *server, uint32_t worker, int32_t missing) {
  mlfab__waiting waiting = {.kind = MLFAB__REQUEST_BARRIER, .rank = missing};
  if (missing != MLFAB_NO_RANK && server->entries[missing].elsewhere)
    snprintf(waiting.text, sizeof waiting.text, ", which waits in a collective instead");
  MLFAB__POST(&server->port, worker, MLFAB__WAITING, waiting, &waiting);
}

static int barrier_asks(const mlfab__barrier_server *server, const mlfab__barrier_entry *entry) {
  return entry->asked > server->over && !entry->gone && !entry->guest;
}

/* Returns the first live worker that has not asked for the next barrier, or NO_RANK. *next_p: up to this barrier all
 * waiting workers have asked; `over` if nobody waits. */
static int32_t barrier_missing(const mlfab__barrier_server *server, uint64_t *next_p) {
  int32_t missing = MLFAB_NO_RANK;
  uint64_t least = UINT64_MAX;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__barrier_entry *entry = &server->entries[w];
    if (barrier_asks(server, entry)) {
      least = mlfab__min(least, entry->asked);
    } else if (!entry->gone && !entry->done && !entry->guest && missing == MLFAB_NO_RANK) {
      missing = (int32_t)w;
    }
  }
  *next_p = least == UINT64_MAX ? server->over : least;
  return missing;
}

static int barrier_collects(const mlfab__barrier_server *server) {
  for (uint32_t w = 0; w < server->workers; w++)
    if (server->entries[w].among && !server->entries[w].gone) return 1;
  return 0;
}

/* Makes a worker that came late, and counts in barriers only, a guest again, if others take part in collectives. */
static void barrier_look_again(const mlfab__barrier_server *server, uint32_t worker) {
  const mlfab__barrier_entry *entry = &server->entries[worker];
  const mlfab__barrier barrier = {.what = MLFAB__BARRIER_LEAVES};
  if (entry->half && !entry->guest && !entry->among && !entry->gone && barrier_collects(server))
    MLFAB__POST(&server->port, worker, MLFAB__BARRIER_DONE, barrier, &barrier);
}

/* Holds the next barrier, if all others have asked for it, until the guests that have asked count. Tells these guests.
 * Returns the first of them, or NO_RANK. */
static int32_t barrier_meets(const mlfab__barrier_server *server, uint64_t next) {
  mlfab__barrier barrier = {.what = barrier_collects(server) ? MLFAB__BARRIER_PASSES
                                                             : MLFAB__BARRIER_MEETS};
  int32_t first = MLFAB_NO_RANK;
  uint64_t guests = 0; /* newcomers alone follow the first newcomer */
  int waits = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__barrier_entry *entry = &server->entries[w];
    if (barrier_asks(server, entry)) waits = 1;
    if (barrier_asks(server, entry) && entry->asked == next)
      barrier.progress = mlfab__max(barrier.progress, entry->progress);
    if (entry->guest && entry->wants && !entry->gone) guests = mlfab__max(guests, entry->progress);
  }
  if (!waits) barrier.progress = guests;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__barrier_entry *entry = &server->entries[w];
    if (!entry->guest || !entry->wants || entry->gone) continue;
    MLFAB__POST(&server->port, w, MLFAB__BARRIER_DONE, barrier, &barrier);
    if (first == MLFAB_NO_RANK) first = (int32_t)w;
  }
  return first;
}

/* Counts a guest from now on. After a collective its barriers follow those of another worker that has called it, too.
 * Else its newest barrier is the next of the others. If none is open, the last that is over is theirs. */
static void barrier_admit(mlfab__barrier_server *server, uint32_t worker,
                          const mlfab__barrier *in) {
  mlfab__barrier_entry *entry = &server->entries[worker];
  uint64_t most = server->over, next;
  if (!entry->guest) return;
  (void)barrier_missing(server, &next);
  for (uint32_t w = 0; w < server->workers; w++)
    if (barrier_asks(server, &server->entries[w]))
      most = mlfab__max(most, server->entries[w].asked);
  if (entry->wants) most = mlfab__max(next, server->over + 1);
  if (in->of >= 0 && (uint32_t)in->of < server->workers) {
    uint64_t at = mlfab__add_sat(server->entries[in->of].base, in->theirs);
    most = mlfab__add_sat(at > in->mine ? at - in->mine : 0, in->number);
  }
  entry->asked = mlfab__max(most, in->number);
  entry->base = entry->asked - in->number;
  entry->guest = entry->wants = 0;
  entry->half = in->of < 0;
  barrier_look_again(server, worker);
  if (in->number > 0 && server->over > entry->base)
    barrier_answer(server, worker, mlfab__min(entry->asked, server->over) - entry->base);
}

/* Releases the barriers that all have asked for. Tells who is missing: to a newcomer, and to all when it changes. */
static void barrier_check(mlfab__barrier_server *server, uint32_t newcomer) {
  uint64_t before = server->over, next;
  int32_t missing = barrier_missing(server, &next);
  int32_t guest = missing == MLFAB_NO_RANK ? barrier_meets(server, next) : MLFAB_NO_RANK;
  if (guest != MLFAB_NO_RANK) missing = guest;
  while (missing == MLFAB_NO_RANK && next > server->over) {
    server->over = next;
    missing = barrier_missing(server, &next);
  }
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__barrier_entry *entry = &server->entries[w];
    if (entry->gone || entry->guest) continue;
    if (entry->asked > before && server->over > mlfab__max(before, entry->base))
      barrier_answer(server, w, mlfab__min(entry->asked, server->over) - entry->base);
    if (barrier_asks(server, entry) &&
        (w == newcomer || missing != server->missing || server->over > before))
      barrier_blame(server, w, missing);
  }
  server->missing = missing;
}

MLFAB__INTERNAL int mlfab__barrier_waits(const mlfab__barrier_server *server, uint32_t worker) {
  return barrier_asks(server, &server->entries[worker]);
}

MLFAB__INTERNAL void mlfab__barrier_elsewhere(mlfab__barrier_server *server, uint32_t worker,
                                              int waits) {
  if (server->entries[worker].elsewhere == waits) return;
  server->entries[worker].elsewhere = waits != 0;
  for (uint32_t w = 0; server->missing == (int32_t)worker && w < server->workers; w++)
    if (barrier_asks(server, &server->entries[w])) barrier_blame(server, w, (int32_t)worker);
}

/* Records that a worker's event changed its entry, and perhaps `over`. */
static void barrier_touch(mlfab__barrier_server *server, uint32_t worker) {
  if (server->touched) server->touched(server, worker);
}

static void barrier_server_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__barrier_server *server = self;
  barrier_touch(server, at.peer);
  mlfab__barrier_entry *entry = &server->entries[at.peer];
  uint64_t base = server->over;
  /* One that joins in good order has no part in the barriers that others have called already. */
  for (uint32_t w = 0; entry->left && w < server->workers; w++)
    if (!server->entries[w].gone) base = mlfab__max(base, server->entries[w].asked);
  entry->gone = 0;
  if (greeting->fresh)
    *entry = (mlfab__barrier_entry){
        .base = base, .asked = base, .guest = greeting->ack && greeting->ack->guest};
  barrier_look_again(server, at.peer);
  if (greeting->fresh && entry->guest)
    barrier_check(server, MLFAB__NO_NODE); /* nobody may have heard of a death */
}

static void barrier_server_gone(void *self, mlfab__at at, int left) {
  mlfab__barrier_server *server = self;
  barrier_touch(server, at.peer);
  server->entries[at.peer].left = left != 0;
  server->entries[at.peer].gone = 1;
  if (left == MLFAB__NEVER_HERE)
    return; /* nobody has called yet, and there may be 65536 such ranks */
  barrier_check(server, MLFAB__NO_NODE);
}

static int barrier_server_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__barrier_server *server = self;
  mlfab__barrier_entry *entry = &server->entries[at.peer];
  mlfab__barrier in;
  barrier_touch(server, at.peer);
  if (frame->type == MLFAB__DONE) {
    entry->done = 1;
    barrier_check(server, MLFAB__NO_NODE);
  }
  if (frame->type != MLFAB__BARRIER) return 0; /* others want DONE, too */
  if (mlfab__port_refuse(&server->port, at.peer, frame,
                         mlfab__decode_barrier(frame->meta, frame->meta_bytes, &in) ||
                             in.number > UINT64_MAX / 2 || in.what > MLFAB__BARRIER_COLLECTS ||
                             (in.number == 0 && in.what == MLFAB__BARRIER_ASKS)))
    return 1;
  if (in.what == MLFAB__BARRIER_COLLECTS) {
    entry->among = 1;
    for (uint32_t w = 0; w < server->workers; w++) barrier_look_again(server, w);
    return 1;
  }
  entry->progress = in.progress;
  if (in.what == MLFAB__BARRIER_HERE) {
    barrier_admit(server, at.peer, &in);
  } else if (in.what == MLFAB__BARRIER_APART) {
    entry->guest = 1;
    entry->wants = 0;
  } else if (entry->guest) {
    entry->wants = 1;
  }
  if (entry->guest || in.what != MLFAB__BARRIER_ASKS) {
    barrier_check(server, at.peer);
    return 1;
  }
  uint64_t asked = mlfab__add_sat(entry->base, in.number);
  /* Asked again, or late: the answer may have been lost. */
  if (asked <= mlfab__max(entry->asked, server->over) && server->over > entry->base)
    barrier_answer(server, at.peer, mlfab__min(asked, server->over) - entry->base);
  entry->asked = mlfab__max(entry->asked, asked);
  barrier_check(server, at.peer);
  return 1;
}

static void barrier_server_free(void *self) {
  mlfab__barrier_server *server = self;
  mlfab__free(server->env, server->entries, server->workers * sizeof *server->entries);
}

static const mlfab__role barrier_server_row = {
    .from = MLFAB__BARRIER,
    .to = MLFAB__DONE,
    .name = "barrier server",
    .links = MLFAB__ON(WORKER),
    .frame = barrier_server_frame,
    .up = barrier_server_up,
    .gone = barrier_server_gone,
    .free = barrier_server_free,
};

MLFAB__INTERNAL int mlfab__barrier_server_attach(mlfab_node *node,
                                                 mlfab__barrier_server **barrier_p) {
  mlfab__role *role = mlfab__roles_add(node, &barrier_server_row, sizeof(mlfab__barrier_server));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__barrier_server *server = role->self;
  *server = (mlfab__barrier_server){.env = &node->env,
                                    .port = mlfab__roles_port(node, role, MLFAB__LINK_WORKER),
                                    .workers = node->config.workers,
                                    .missing = MLFAB_NO_RANK};
  server->entries = mlfab__alloc_array(server->env, server->workers, sizeof *server->entries);
  if (!server->entries) return MLFAB_ERR_MEMORY;
  *barrier_p = server;
  return 0;
}

/* --- a worker --- */

static void barrier_say(const mlfab__barrier_worker *worker, uint32_t what) {
  const mlfab__barrier barrier = {.number = worker->over + worker->open,
                                  .what = what,
                                  .progress = worker->mark.progress,
                                  .of = worker->of,
                                  .theirs = worker->theirs,
                                  .mine = worker->mine};
  MLFAB__POST(&worker->port, 0, MLFAB__BARRIER, barrier, &barrier);
}

/* Tells server 0 that no barrier waits for this worker. */
static void barrier_rest(mlfab__barrier_worker *worker) {
  worker->newcomer = 1;
  worker->told = worker->wants = worker->passing = 0;
  barrier_say(worker, MLFAB__BARRIER_APART);
  if (worker->counting.worker)
    worker->counting.back(worker->counting.worker, MLFAB__APART_BARRIER, NULL);
}

/* A newcomer asks when its updates are decided. */
static void barrier_look(mlfab__barrier_worker *worker) {
  const mlfab__counting *counting = &worker->counting;
  if (!worker->newcomer || worker->open == 0 || worker->held || worker->dead || worker->wants)
    return;
  if (counting->worker && !counting->idle(counting->worker)) return;
  worker->wants = 1;
  if (counting->worker) counting->apart(counting->worker, MLFAB__APART_BARRIER);
  barrier_say(worker, MLFAB__BARRIER_ASKS);
}

MLFAB__INTERNAL void mlfab__barrier_apart(mlfab__barrier_worker *worker) {
  worker->held = worker->newcomer = 1;
  if (!worker->dead) barrier_rest(worker);
}

MLFAB__INTERNAL void mlfab__barrier_alone(mlfab__barrier_worker *worker) {
  worker->held = 0;
  barrier_look(worker);
}

MLFAB__INTERNAL void mlfab__barrier_here(mlfab__barrier_worker *worker, int32_t of, uint64_t theirs,
                                         uint64_t mine) {
  worker->told = worker->wants = worker->held = worker->passing = 0;
  if (!worker->newcomer || worker->dead) return;
  worker->of = of;
  worker->theirs = theirs;
  worker->mine = mine;
  worker->newcomer = worker->half = 0;
  worker->admitted = 1;
  barrier_say(worker, MLFAB__BARRIER_HERE);
}

/* Counts this worker, in this barrier at least. */
static void barrier_met(mlfab__barrier_worker *worker) {
  uint8_t passing = worker->told == MLFAB__BARRIER_PASSES;
  mlfab__barrier_here(worker, MLFAB_NO_RANK, 0, 0);
  worker->passing = passing;
  worker->half = 1;
}

MLFAB__INTERNAL void mlfab__barrier_among(mlfab__barrier_worker *worker) {
  if (worker->among || worker->dead) return;
  worker->among = 1;
  barrier_say(worker, MLFAB__BARRIER_COLLECTS);
}

/* Server 0 has told the progress from which this worker counts: it counts when all servers agree. */
static void barrier_settle(void *self) {
  mlfab__barrier_worker *worker = self;
  if (worker->told && worker->counting.counted(worker->counting.worker)) barrier_met(worker);
  if (worker->newcomer) barrier_look(worker);
}

/* Gives up: a joiner has no waiting barrier any more, before it was admitted. */
static void barrier_gives_up(mlfab__barrier_worker *worker) {
  if ((worker->newcomer || worker->passing) && worker->open == 0) barrier_rest(worker);
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
  if (worker->passing) barrier_rest(worker);
  if (worker->counting.worker) worker->counting.mark(worker->counting.worker, &worker->mark);
  if (worker->newcomer && !worker->wants) {
    barrier_look(worker);
  } else {
    barrier_say(worker, MLFAB__BARRIER_ASKS);
  }
  return 0;
}

/* Returns the first open call, or NULL. Ids grow. */
static mlfab__request *barrier_first(const mlfab__barrier_worker *worker) {
  mlfab__request *first = NULL, *r = NULL;
  while ((r = mlfab__request_of(worker->requests, MLFAB__REQUEST_BARRIER, 0, r)))
    if (!first || r->id < first->id) first = r;
  return first;
}

static void barrier_withdraw(void *self, mlfab__request *request, int code, uint64_t now_ns) {
  mlfab__barrier_worker *worker = self;
  worker->open--;
  if (request->blame.rank == MLFAB_NO_RANK) mlfab__request_blame(request, 0, 1, "%s", "");
  mlfab__request_expire(worker->requests, request, code, now_ns);
  barrier_gives_up(worker);
}

/* A lost link changes nothing: the worker asks again on the next link. */
static void barrier_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__barrier_worker *worker = self;
  if (at.peer != 0 || greeting->ack->kind >= MLFAB__ACK_CREDIT) return;
  if (!worker->known) worker->newcomer = greeting->ack->guest != 0;
  worker->known = 1;
  if (worker->among) barrier_say(worker, MLFAB__BARRIER_COLLECTS);
  if (worker->newcomer && (worker->admitted || worker->held))
    barrier_say(worker, MLFAB__BARRIER_APART);
  if (worker->open > 0 && (!worker->newcomer || worker->wants))
    barrier_say(worker, MLFAB__BARRIER_ASKS);
  if (!worker->newcomer && worker->admitted) barrier_say(worker, MLFAB__BARRIER_HERE);
}

static void barrier_gone(void *self, mlfab__at at, int left) {
  mlfab__barrier_worker *worker = self;
  (void)left;
  if (at.peer != 0) return;
  worker->dead = 1;
  for (; worker->open > 0; worker->open--)
    mlfab__request_dead(worker->requests, barrier_first(worker), 0, at.now_ns);
}

static int barrier_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__barrier_worker *worker = self;
  mlfab__barrier in;
  if (at.peer != 0 || frame->type != MLFAB__BARRIER_DONE) return 0;
  if (MLFAB__MALFORMED(&worker->port, 0, frame, barrier, &in)) return 1;
  if (in.what == MLFAB__BARRIER_LEAVES) {
    if (worker->newcomer || worker->passing || worker->among) return 1;
    barrier_rest(worker);
    barrier_look(worker);
  } else if (in.what && !worker->newcomer) {
    barrier_say(worker, MLFAB__BARRIER_HERE);
  } else if (in.what && !worker->wants) {
    barrier_say(worker, MLFAB__BARRIER_APART);
  } else if (in.what && !worker->told) {
    const uint64_t level = in.progress - worker->mark.pushes;
    worker->told = (uint8_t)in.what;
    if (!worker->counting.worker)
      barrier_met(worker);
    else
      worker->counting.back(worker->counting.worker, MLFAB__APART_BARRIER, &level);
  }
  if (in.what) return 1;
  for (; worker->over < in.number && worker->open > 0; worker->open--) {
    worker->over++;
    mlfab__request_succeed(worker->requests, barrier_first(worker), at.now_ns);
  }
  if (worker->passing && worker->open == 0) barrier_rest(worker);
  return 1;
}

/* A barrier has admitted it, perhaps another than it meant: rounds do not wait for it while it waits for long. */
static void barrier_scan(void *self, uint64_t now_ns) {
  mlfab__barrier_worker *worker = self;
  const mlfab__request *first = barrier_first(worker);
  if (!worker->half || worker->newcomer || worker->among || !first) return;
  if (now_ns - first->started_ns < worker->beat_ns) return;
  barrier_rest(worker);
  barrier_look(worker);
}

static int barrier_scans(const void *self) {
  const mlfab__barrier_worker *worker = self;
  return worker->half && !worker->newcomer && worker->open > 0;
}

static void barrier_leave(void *self) {
  mlfab__barrier_worker *worker = self;
  worker->leaving = 1;
}

static const mlfab__role barrier_row = {
    .from = MLFAB__BARRIER,
    .to = MLFAB__BARRIER_DONE,
    .name = "barrier",
    .links = MLFAB__ON(SERVER),
    .requests = MLFAB__SERVES(BARRIER),
    .frame = barrier_frame,
    .up = barrier_up,
    .gone = barrier_gone,
    .withdraw = barrier_withdraw,
    .scan = barrier_scan,
    .waits = barrier_scans,
    .settle = barrier_settle,
    .leave = barrier_leave,
    .finish = barrier_leave,
};

MLFAB__INTERNAL int mlfab__barrier_attach(mlfab_node *node, mlfab__barrier_worker **barrier_p) {
  mlfab__role *role = mlfab__roles_add(node, &barrier_row, sizeof **barrier_p);
  if (!role) return MLFAB_ERR_MEMORY;
  *barrier_p = role->self;
  **barrier_p = (mlfab__barrier_worker){.port = mlfab__roles_port(node, role, MLFAB__LINK_SERVER),
                                        .requests = &node->requests,
                                        .beat_ns = node->config.heartbeat_ns,
                                        .of = MLFAB_NO_RANK};
  return 0;
}
