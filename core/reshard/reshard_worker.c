/* reshard_worker.c - the worker role: stops while slices move, and continues with their new servers. See reshard.h.
 *
 *    RUNS --FREEZE--> STOPPING --all servers stopped--> DRAINING --all decided--> FROZEN --RESUME--> RUNS
 *     |                  ^                                                                         ^
 *     +--RESUME, another --+--- all servers stopped: partly decided updates are lost ----------------+
 *        epoch (over)
 *
 * DRAINING: let M be the largest number that any server has decided. The worker announces updates up to M again at the
 * servers that have not decided them, even those that all servers have yet to decide: a server that has decided M would
 * pass over its part of an earlier update if that part came later. Updates after M stay undecided everywhere.
 *
 * DRAINING ends. Only rounds make a server wait: it takes round r of a worker w when all members have pushed round r -
 * 1 there. Say server t has decided w's round r, and s keeps it waiting for round r - 1 of a member x. At t, x had
 * pushed round r - 1 before t took w's round r. So x finds it decided at t when it stops, or announces it in its own
 * draining; in either case x does not finish before s has decided it, too. By induction over r, every update that s
 * waits for arrives. The argument fails if t has another model than s and did not make w wait, or if x became a member
 * while the servers stood at different rounds. Then x is drained, and s closes the round without it
 * (reshard_server_forces). The answer to the end of its STOP tells x, which tells the other servers (push.c).
 *
 * A late worker is one that server 0 could not reach, and so did not freeze: it learns the new layout when the move is
 * over. It stops first, to learn which updates are decided. A partly decided update stays so (PARTIAL), because its
 * rest would go to servers that do not know the updates before it.
 *
 * The worker sends to a server only in RUNS and in DRAINING, and only if the server has reported the worker's own
 * epoch. */
#include "reshard.h"

#include "../worker/worker.h"

#include <stdio.h>

enum mlfab__pause_state {
  MLFAB__PAUSE_RUNS,
  MLFAB__PAUSE_STOPPING,
  MLFAB__PAUSE_DRAINING,
  MLFAB__PAUSE_FROZEN
};

typedef struct mlfab__pause {
  enum mlfab__pause_state state;
  uint32_t attempt;
  int over;         /* the move is over; adopt its layout when the servers have stopped */
  uint64_t last;    /* all updates up to this one are decided everywhere before FROZEN */
  uint32_t *owners; /* owners and epoch of the last RESUME */
  uint32_t nowners, epoch;
} mlfab__pause;

typedef struct mlfab__resize { /* mlfab_set_servers under way */
  uint64_t request;            /* 0: none */
  uint64_t ask, timeout_ns;
  uint32_t *servers;
  uint32_t n;
} mlfab__resize;

struct mlfab__moving {
  mlfab__pause pause;
  mlfab__resize resize;
  struct moving_server {
    uint8_t stopped; /* it has answered STOP */
    uint8_t spare;   /* it is an added server, or has gone: it counts only while it has slices */
    uint8_t comes;   /* the move under way will give it its first slices */
  } * servers;
};

static void reshard_worker_stop(mlfab__worker *worker, uint32_t server, uint32_t kind) {
  mlfab__stop stop = {worker->moving->pause.attempt, kind};
  if (worker->streams[server].up) MLFAB__POST(&worker->port, server, MLFAB__STOP, stop, &stop);
}

static void reshard_worker_tell_frozen(mlfab__worker *worker, uint32_t unreached) {
  mlfab__frozen frozen = {worker->moving->pause.attempt, unreached};
  MLFAB__POST(&worker->port, 0, MLFAB__FROZEN, frozen, &frozen);
}

/* Has this worker a link to each server that gets its first slices? It needs these before it stops for the move.
 * Returns 1: it has; 0: not yet; -1: it cannot reach *server_p. */
static int reshard_worker_reaches(const mlfab__worker *worker, uint32_t *server_p) {
  int all = 1;
  for (uint32_t s = 0; s < worker->servers; s++) {
    const mlfab__stream *stream = &worker->streams[s];
    if (!worker->moving->servers[s].comes || stream->up) continue;
    *server_p = s;
    if (stream->dead) return -1;
    all = 0;
  }
  return all;
}

/* --- servers that come and go --- */

static void reshard_worker_check(mlfab__worker *worker, uint64_t now_ns);
static void reshard_worker_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns);

/* Does the server own slices, as far as this worker knows? Before there is a model, all first servers count as
 * owners. */
static int reshard_worker_owns(const mlfab__worker *worker, uint32_t server) {
  const mlfab__layout *layout = &worker->layout;
  const mlfab__pause *pause = &worker->moving->pause;
  for (uint32_t i = 0; layout->nslices == 0 && i < pause->nowners; i++)
    if (pause->owners[i] == server) return 1;
  if (layout->nslices == 0) return pause->nowners == 0 && !worker->moving->servers[server].spare;
  return layout->owned_at[server] < layout->owned_at[server + 1];
}

/* Marks this server as absent: calls that waited for it continue. */
static void reshard_worker_without(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  reshard_worker_dead(worker, server, now_ns);
  worker->due = 1;
  mlfab__worker_advance(worker, now_ns);
}

/* Called when a server other than 0 has gone: returns 1 if it had no slices. Nothing is lost, and it counts no more. */
static int reshard_worker_spare(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  mlfab__stream *stream = &worker->streams[server];
  int knows = worker->stands || worker->moving->pause.nowners > 0;
  if (server == 0 || !knows) return 0;
  /* Its slices may have moved: the end of the move decides. */
  if (worker->moving->pause.state == MLFAB__PAUSE_FROZEN) {
    stream->up = 0;
    mlfab__push_lost(worker, server, MLFAB__PART_ANNOUNCED, now_ns);
    return 1;
  }
  if (reshard_worker_owns(worker, server)) return 0;
  worker->moving->servers[server].spare = 1;
  mlfab__worker_spare(worker, server, now_ns);
  reshard_worker_without(worker, server, now_ns);
  return 1;
}

static int reshard_worker_spares(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  if (!worker->streams[server].absent) return reshard_worker_spare(worker, server, now_ns);
  reshard_worker_dead(worker, server, now_ns);
  return 1;
}

/* Ends a move for the servers that died meanwhile: they are missed if they own slices. */
static void reshard_worker_bury(mlfab__worker *worker, uint64_t now_ns) {
  for (uint32_t s = 0; s < worker->servers; s++) {
    const mlfab__stream *stream = &worker->streams[s];
    if (stream->dead && !stream->absent && !reshard_worker_spare(worker, s, now_ns))
      mlfab__worker_bereave(worker, s, now_ns);
  }
}

static void reshard_worker_vacant(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  mlfab__stream *stream = &worker->streams[server];
  if (!stream->absent && worker->stands && reshard_worker_owns(worker, server)) {
    mlfab__worker_dead(worker, server, now_ns); /* its slices are lost */
    return;
  }
  if (!stream->absent) reshard_worker_spare(worker, server, now_ns);
  memset(stream, 0, sizeof *stream);
  stream->absent = worker->moving->servers[server].spare = 1;
  worker->moving->servers[server].stopped = 0;
  reshard_worker_without(worker, server, now_ns);
}

/* Counts a spare server from now on, or no longer; call it before updates are divided anew. */
static void reshard_worker_count(mlfab__worker *worker, uint32_t server, int counts) {
  mlfab__stream *stream = &worker->streams[server];
  worker->moving->servers[server].comes = 0;
  if (counts == !stream->absent) return;
  stream->absent = !counts;
  if (!counts) return;
  stream->packets = worker->streams[0].packets;
  stream->counts = worker->streams[0].counts;
  /* After the servers have agreed on the model, nobody awaits the answer to one more DEFINE. */
  int agreed = worker->stands || worker->model_pull || worker->enters;
  stream->defined = agreed != 0;
  stream->define = worker->table && !agreed;
  stream->done_told = stream->done_acked = 0;
  stream->round = 0;
  worker->due = 1;
}

/* --- stopping --- */

static void reshard_worker_begin(mlfab__worker *worker, uint32_t attempt, int over) {
  mlfab__pause *pause = &worker->moving->pause;
  pause->state = MLFAB__PAUSE_STOPPING;
  worker->announces = 0;
  pause->attempt = attempt;
  pause->over = over;
  pause->last = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    worker->moving->servers[s].stopped = 0;
    if (!worker->streams[s].absent) reshard_worker_stop(worker, s, MLFAB__STOP_BEGIN);
  }
}

/* Is the update decided at one of its servers, and undecided at another? */
static int reshard_worker_partial(const mlfab__worker *worker, const mlfab__outgoing *update) {
  int decided = 0, open = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    uint8_t state = update->parts[s].state;
    decided |= state == MLFAB__PART_DECIDED;
    open |= state >= MLFAB__PART_QUEUED;
  }
  return decided && open;
}

static int reshard_worker_stopped(const mlfab__worker *worker) {
  for (uint32_t s = 0; s < worker->servers; s++) {
    const mlfab__stream *stream = &worker->streams[s];
    if (!worker->moving->servers[s].stopped && !stream->dead && !stream->absent) return 0;
  }
  return 1;
}

static int reshard_worker_drained(const mlfab__worker *worker) {
  for (uint32_t i = 0; i < worker->norder; i++) {
    const mlfab__outgoing *update = &worker->updates[worker->order[i]];
    if (update->seq > worker->moving->pause.last) break;
    for (uint32_t s = 0; s < worker->servers; s++)
      if (update->parts[s].state >= MLFAB__PART_QUEUED) return 0;
  }
  return 1;
}

static void reshard_worker_adopt(mlfab__worker *worker, uint64_t now_ns);

static void reshard_worker_check(mlfab__worker *worker, uint64_t now_ns) {
  mlfab__pause *pause = &worker->moving->pause;
  if (pause->state == MLFAB__PAUSE_STOPPING && reshard_worker_stopped(worker)) {
    if (pause->over) {
      reshard_worker_adopt(worker, now_ns);
      return;
    }
    pause->state = MLFAB__PAUSE_DRAINING;
    worker->announces = pause->last;
    for (uint32_t s = 0; s < worker->servers; s++) worker->port.ready(worker->port.self, s);
  }
  if (pause->state != MLFAB__PAUSE_DRAINING || !reshard_worker_drained(worker)) return;
  uint32_t unreached = MLFAB__NO_NODE;
  int reaches = reshard_worker_reaches(worker, &unreached);
  if (reaches == 0) return;
  pause->state = MLFAB__PAUSE_FROZEN;
  worker->announces = 0;
  for (uint32_t s = 0; s < worker->servers; s++)
    if (!worker->streams[s].absent) reshard_worker_stop(worker, s, MLFAB__STOP_DRAINED);
  reshard_worker_tell_frozen(worker, reaches < 0 ? unreached : MLFAB__NO_NODE);
}

static void reshard_worker_freeze(mlfab__worker *worker, const mlfab__frame_in *frame,
                                  uint64_t now_ns) {
  mlfab__pause *pause = &worker->moving->pause;
  mlfab__freeze freeze;
  uint32_t servers[MLFAB__SLICES_MAX], unreached = MLFAB__NO_NODE;
  int bad = mlfab__decode_freeze(frame->meta, frame->meta_bytes, &freeze, servers) != 0;
  for (uint32_t i = 0; !bad && i < freeze.servers; i++) bad = servers[i] >= worker->servers;
  if (mlfab__port_refuse(&worker->port, 0, frame, bad)) return;
  if (pause->state != MLFAB__PAUSE_RUNS && freeze.attempt == pause->attempt && !pause->over) {
    if (pause->state != MLFAB__PAUSE_FROZEN) return;
    int reaches = reshard_worker_reaches(worker, &unreached);
    reshard_worker_tell_frozen(worker, reaches < 0 ? unreached : MLFAB__NO_NODE);
    return;
  }
  for (uint32_t s = 0; s < worker->servers; s++) worker->moving->servers[s].comes = 0;
  for (uint32_t i = 0; i < freeze.servers; i++) worker->moving->servers[servers[i]].comes = 1;
  reshard_worker_begin(worker, freeze.attempt, 0);
  reshard_worker_check(worker, now_ns);
}

/* --- resuming --- */

/* For a late worker, or after the death of a server: a partly decided update stays so, and an update that a server has
 * passed over is lost. */
static void reshard_worker_lose(mlfab__worker *worker, uint64_t now_ns) {
  mlfab__outgoing *update;
  for (uint32_t i = 0; i < worker->norder; i += update->seq != 0) {
    update = &worker->updates[worker->order[i]];
    int lost = update->seq <= worker->moving->pause.last || reshard_worker_partial(worker, update);
    for (uint32_t s = 0; lost && s < worker->servers; s++)
      mlfab__push_decide(worker, update, s, MLFAB_ERR_WITHDRAWN, now_ns);
  }
}

/* Tells the servers to continue. They answer with their epoch, credit and progress. */
static void reshard_worker_run(mlfab__worker *worker) {
  worker->moving->pause.state = MLFAB__PAUSE_RUNS;
  worker->announces = MLFAB__NEVER;
  worker->moving->pause.over = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    worker->streams[s].epoch = 0;
    worker->moving->servers[s].comes = 0;
    if (!worker->streams[s].absent) reshard_worker_stop(worker, s, MLFAB__STOP_OVER);
  }
}

/* A spare server counts while it owns slices. */
static void reshard_worker_count_all(mlfab__worker *worker) {
  const mlfab__pause *pause = &worker->moving->pause;
  uint8_t owns[4096] = {0};
  for (uint32_t i = 0; i < pause->nowners; i++) owns[pause->owners[i] % sizeof owns] = 1;
  for (uint32_t s = 0; s < worker->servers; s++)
    if (worker->moving->servers[s].spare) reshard_worker_count(worker, s, owns[s]);
}

/* Adopts the layout of RESUME. */
static void reshard_worker_adopt(mlfab__worker *worker, uint64_t now_ns) {
  mlfab__pause *pause = &worker->moving->pause;
  reshard_worker_lose(worker, now_ns);
  worker->epoch = pause->epoch;
  reshard_worker_count_all(worker);
  if (worker->layout.nslices == pause->nowners && pause->nowners > 0) {
    mlfab__layout_assign(&worker->layout, pause->owners);
    mlfab__push_recut(worker, now_ns);
    mlfab__pull_recut(worker, now_ns);
    mlfab__worker_change_again(worker);
  }
  reshard_worker_run(worker);
  reshard_worker_bury(worker, now_ns);
}

/* Stores the owners, also for a model that is not defined yet. */
static int reshard_worker_keep(mlfab__worker *worker, const mlfab__resume *resume,
                               const uint32_t *owners) {
  mlfab__pause *pause = &worker->moving->pause;
  if (resume->slices != pause->nowners) {
    mlfab__free(worker->env, pause->owners, pause->nowners * sizeof *owners);
    pause->owners = mlfab__alloc_array(worker->env, resume->slices, sizeof *owners);
    pause->nowners = pause->owners ? resume->slices : 0;
    if (!pause->owners) return MLFAB_ERR_MEMORY;
  }
  memcpy(pause->owners, owners, resume->slices * sizeof *owners);
  pause->epoch = resume->epoch;
  return 0;
}

static void reshard_worker_resume(mlfab__worker *worker, uint32_t server,
                                  const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__pause *pause = &worker->moving->pause;
  mlfab__resume resume;
  uint32_t owners[MLFAB__SLICES_MAX];
  int bad =
      mlfab__decode_resume(frame->meta, frame->meta_bytes, &resume, owners) || resume.slices == 0;
  for (uint32_t i = 0; !bad && i < resume.slices; i++) bad = owners[i] >= worker->servers;
  if (mlfab__port_refuse(&worker->port, 0, frame,
                         bad || (worker->stands && resume.slices != worker->layout.nslices)))
    return;
  if (resume.attempt < pause->attempt) return;
  if (server != 0 && resume.epoch <= worker->epoch) return; /* its layout is not newer */
  if (reshard_worker_keep(worker, &resume, owners)) {
    worker->port.drop(worker->port.self, 0, MLFAB_ERR_MEMORY, "out of memory for a layout");
    return;
  }
  int frozen = pause->state == MLFAB__PAUSE_FROZEN && pause->attempt == resume.attempt;
  if (frozen || worker->layout.nslices == 0) {
    pause->attempt = resume.attempt;
    reshard_worker_adopt(worker, now_ns);
  } else if (resume.epoch != worker->epoch) {
    /* It stops for this attempt already. */
    if (pause->over && pause->attempt == resume.attempt) return;
    reshard_worker_begin(worker, resume.attempt, 1);
    reshard_worker_check(worker, now_ns);
  } else {
    /* Nothing has moved. Some servers may have announced a move. */
    int greets = pause->state != MLFAB__PAUSE_RUNS;
    pause->attempt = resume.attempt;
    for (uint32_t s = 0; s < worker->servers; s++) {
      const mlfab__stream *stream = &worker->streams[s];
      greets |= stream->up && !stream->absent && stream->epoch != worker->epoch;
    }
    if (greets) reshard_worker_run(worker);
  }
}

/* --- links --- */

/* Asks server 0, if a call of set_servers is under way. */
static void reshard_worker_ask(mlfab__worker *worker) {
  const mlfab__resize *resize = &worker->moving->resize;
  mlfab__reshard_ask ask = {resize->ask, resize->timeout_ns, resize->n};
  if (resize->request == 0) return;
  MLFAB__POST_LIST(64 + 2 * MLFAB__SLICES_MAX, &worker->port, 0, MLFAB__RESHARD, reshard_ask, &ask,
                   resize->servers);
}

static void reshard_worker_hello(mlfab__worker *worker, uint32_t server,
                                 const mlfab__hello_ack *ack, uint64_t now_ns) {
  mlfab__pause *pause = &worker->moving->pause;
  int knows = pause->attempt != 0 && ack->stopped == pause->attempt;
  if (server == 0 && ack->kind < MLFAB__ACK_CREDIT) reshard_worker_ask(worker);
  if (pause->state == MLFAB__PAUSE_RUNS) return;
  if (worker->streams[server].absent) {
    reshard_worker_check(worker, now_ns); /* the move may have waited for this link */
    return;
  }
  if (!knows) {
    reshard_worker_stop(
        worker, server,
        pause->state == MLFAB__PAUSE_FROZEN ? MLFAB__STOP_DRAINED : MLFAB__STOP_BEGIN);
  } else if (pause->state == MLFAB__PAUSE_STOPPING) {
    worker->moving->servers[server].stopped = 1;
    pause->last = mlfab__max(pause->last, ack->top);
  }
  reshard_worker_check(worker, now_ns);
}

static void reshard_worker_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  mlfab__request *request = mlfab__request_find(worker->requests, worker->moving->resize.request);
  if (server != 0) {
    reshard_worker_check(worker, now_ns);
    return;
  }
  /* Continues with the known layout: only server 0 leads. */
  if (worker->moving->pause.state != MLFAB__PAUSE_RUNS) reshard_worker_run(worker);
  reshard_worker_bury(worker, now_ns);
  worker->moving->resize.request = 0;
  mlfab__request_dead(worker->requests, request, 0, now_ns);
}

/* --- requests --- */

static int reshard_worker_refuse(const mlfab__worker *worker, const uint32_t *servers, uint32_t n,
                                 mlfab_error *error) {
  if (!servers || n == 0) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "set_servers: no servers");
  for (uint32_t i = 0; i < n; i++) {
    if (servers[i] >= worker->servers)
      return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                         "set_servers: there is no server %u, there are %u", servers[i],
                         worker->servers);
    for (uint32_t k = 0; k < i; k++) {
      if (servers[i] == servers[k])
        return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                           "set_servers: server %u is named twice in the list", servers[i]);
    }
  }
  if (!worker->stands)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "set_servers: there is no model yet: call mlfab_model_start first");
  if (worker->moving->resize.request)
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN,
                       "set_servers: another call of this worker is under way");
  int code = mlfab__worker_reaches(worker, MLFAB_ALL, "set_servers", error);
  return code ? code : mlfab__request_room(worker->requests, MLFAB__REQUEST_RESLICE, error);
}

MLFAB__INTERNAL int mlfab__worker_set_servers(mlfab__worker *worker, const uint32_t *servers,
                                              uint32_t n, uint64_t timeout_ns, uint64_t now_ns,
                                              mlfab_request *request_p, mlfab_error *error) {
  mlfab__resize *resize = &worker->moving->resize;
  int code = reshard_worker_refuse(worker, servers, n, error);
  if (code) return code;
  if (!resize->servers)
    resize->servers = mlfab__alloc_array(worker->env, worker->servers, sizeof *servers);
  if (!resize->servers) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "set_servers: out of memory");
  if (timeout_ns == 0) timeout_ns = worker->config->timeout_ns;
  mlfab__request *request =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_RESLICE, 0, now_ns, timeout_ns);
  memcpy(resize->servers, servers, n * sizeof *servers);
  resize->n = n;
  resize->ask++;
  resize->request = request->id;
  /* Server 0 gives up a little earlier, so that it can name the process that it waited for. */
  resize->timeout_ns = timeout_ns - timeout_ns / 8;
  reshard_worker_ask(worker);
  *request_p = request->id;
  return 0;
}

static void reshard_worker_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                    uint64_t now_ns) {
  if (worker->moving->resize.request == request->id) worker->moving->resize.request = 0;
  mlfab__request_blame(request, 0, 1, "; slices may still move");
  mlfab__request_expire(worker->requests, request, code, now_ns);
}

static void reshard_worker_done(mlfab__worker *worker, const mlfab__frame_in *frame,
                                uint64_t now_ns) {
  mlfab__resize *resize = &worker->moving->resize;
  mlfab__reshard_done done;
  if (MLFAB__MALFORMED(&worker->port, 0, frame, reshard_done, &done)) return;
  mlfab__request *request = mlfab__request_find(worker->requests, resize->request);
  if (resize->request == 0 || done.ask != resize->ask) return;
  resize->request = 0;
  mlfab__request_finish(worker->requests, request, done.code, done.rank, (int)done.is_server,
                        now_ns, "set_servers: %s",
                        done.text[0] || !done.code ? done.text : mlfab_error_text(done.code));
}

static int reshard_worker_frame(mlfab__worker *worker, uint32_t server,
                                const mlfab__frame_in *frame, uint64_t now_ns) {
  /* Without server 0 the other servers tell the layout. */
  if (server != 0 && frame->type != MLFAB__RESUME) return 0;
  if (server != 0 && !worker->streams[0].dead) return 1;
  switch (frame->type) {
    case MLFAB__FREEZE:
      reshard_worker_freeze(worker, frame, now_ns);
      return 1;
    case MLFAB__RESUME:
      reshard_worker_resume(worker, server, frame, now_ns);
      return 1;
    case MLFAB__RESHARD_DONE:
      reshard_worker_done(worker, frame, now_ns);
      return 1;
    default:
      return 0;
  }
}

static void reshard_worker_assign(const mlfab__worker *worker, mlfab__layout *layout) {
  const mlfab__pause *pause = &worker->moving->pause;
  if (pause->owners && pause->nowners == layout->nslices)
    mlfab__layout_assign(layout, pause->owners);
}

static void reshard_worker_free(mlfab__worker *worker) {
  struct mlfab__moving *moving = worker->moving;
  mlfab__pause *pause = &moving->pause;
  mlfab__free(worker->env, pause->owners, pause->nowners * sizeof *pause->owners);
  mlfab__free(worker->env, moving->resize.servers,
              moving->resize.servers ? worker->servers * sizeof *moving->resize.servers : 0);
  mlfab__free(worker->env, moving->servers,
              moving->servers ? worker->servers * sizeof *moving->servers : 0);
  mlfab__free(worker->env, moving, sizeof *moving);
}

MLFAB__INTERNAL int mlfab__reshard_worker_attach(mlfab__worker *worker) {
  static const mlfab__worker_mover mover = {
      .assign = reshard_worker_assign,
      .hello = reshard_worker_hello,
      .spares = reshard_worker_spares,
      .dead = reshard_worker_dead,
      .vacant = reshard_worker_vacant,
      .frame = reshard_worker_frame,
      .decided = reshard_worker_check,
      .withdraw = reshard_worker_withdraw,
      .free = reshard_worker_free,
  };
  worker->moving = mlfab__alloc(worker->env, sizeof *worker->moving);
  if (!worker->moving) return MLFAB_ERR_MEMORY;
  worker->mover = &mover;
  worker->moving->servers =
      mlfab__alloc_array(worker->env, worker->servers, sizeof *worker->moving->servers);
  return worker->moving->servers ? 0 : MLFAB_ERR_MEMORY;
}
