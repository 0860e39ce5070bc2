/* push.c - the worker role: outgoing updates. See worker.h.
 *
 * The worker copies small updates (up to MLFAB__WORKER_PACK) and makes them contiguous. With the plain asynchronous
 * model it adds updates that wait while others are under way into one update of several members, as MLfabric's
 * aggregators do (§3.2): the busier the link, the fewer frames.
 *
 * Progress. The worker counts whole updates, and an update has the same number at all servers:
 *
 *    stream->round + (undecided updates before it there) is the same for all streams   (aligned)
 *
 * A server knows the number of the worker's last update, or a smaller one. It may not have heard of an update
 * without a part for it (ASYNC), and other servers may have moved the worker on (it joined behind the others, or
 * was late in a round that drops). The next PUSH tells it. A server that counts iterations makes other workers wait
 * for the number that it knows. So the worker sends it PROGRESS when it begins to count, on a new link, when the
 * worker is moved on, and when its answer shows a smaller number. Therefore no worker waits for ever: the slowest
 * has the same number everywhere, and no server makes it wait for itself. ASYNC costs no frame. */
#include "worker.h"

#include "../kernels/kernels.h"

#include <stdio.h>

enum { PUSH_PAGE = 4096 };

static int push_rounds(const mlfab__worker *worker) {
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (worker->streams[s].counts) return 1;
  }
  return 0;
}

/* If some server counts a withdrawn update for a round, all others must count it too, or their rounds would
 * diverge: the worker sends it there as an empty update. */
static void push_empty(mlfab__worker *worker, mlfab__outgoing *update, uint32_t server) {
  mlfab__part *part = &update->parts[server];
  part->empty = 1;
  part->planned = 0;
  part->bytes = 0;
  worker->port.ready(worker->port.self, server);
}

MLFAB__INTERNAL void mlfab__push_tell(mlfab__worker *worker, uint32_t server) {
  const mlfab__stream *stream = &worker->streams[server];
  mlfab__progress progress = {stream->round, 0, 0};
  if (!worker->stands || !stream->counts || !stream->up || worker->apart) return;
  MLFAB__POST(&worker->port, server, MLFAB__PROGRESS, progress, &progress);
}

/* Undecided updates at a server have larger numbers now: repeats the pulls after them with those numbers. */
static void push_moved_on(mlfab__worker *worker, uint32_t server) {
  if (worker->streams[server].counts && mlfab__worker_ahead(worker, server, worker->next_seq) > 0)
    mlfab__pull_again(worker, server, 0);
}

MLFAB__INTERNAL void mlfab__push_align(mlfab__worker *worker) {
  uint64_t most = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    const mlfab__stream *stream = &worker->streams[s];
    if (stream->dead || stream->absent) continue;
    most = mlfab__max(most, stream->round + mlfab__worker_ahead(worker, s, worker->next_seq));
  }
  for (uint32_t s = 0; s < worker->servers && worker->stands; s++) {
    mlfab__stream *stream = &worker->streams[s];
    uint64_t next = stream->round + mlfab__worker_ahead(worker, s, worker->next_seq);
    if (stream->dead || stream->absent || next == most) continue;
    stream->round += most - next;
    mlfab__push_tell(worker, s);
    push_moved_on(worker, s);
  }
}

MLFAB__INTERNAL void mlfab__push_reached(mlfab__worker *worker, uint32_t server, uint64_t reached) {
  mlfab__stream *stream = &worker->streams[server];
  if (reached > stream->round) {
    stream->round = reached;
    push_moved_on(worker, server);
    mlfab__push_align(worker);
  } else if (reached < stream->round) {
    mlfab__push_tell(worker, server);
  }
}

MLFAB__INTERNAL int mlfab__push_pending(const mlfab__worker *worker, uint32_t server) {
  for (uint32_t i = 0; i < worker->norder; i++) {
    if (worker->updates[worker->order[i]].parts[server].state >= MLFAB__PART_QUEUED) return 1;
  }
  return 0;
}

/* --- the route of an update --- */

/* The worker whose node forwards a part, or MLFAB__NO_NODE: it goes by the server's link. */
static uint32_t push_by(const mlfab__worker *worker, const mlfab__outgoing *update,
                        uint32_t server) {
  return worker->routes ? worker->routes->by(worker, update, server) : MLFAB__NO_NODE;
}

static void push_leave(mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server) {
  if (worker->routes) worker->routes->leave(worker, update, server);
}

/* All bulks of an update that are lent to one server's link share a token, so that one detach takes all of
 * them back. */
MLFAB__INTERNAL uint64_t mlfab__push_token(const mlfab__worker *worker,
                                           const mlfab__outgoing *update) {
  uint64_t slot = (uint64_t)(update - worker->updates);
  return ((uint64_t)(update->serial & 0xffffffu) << 8) + slot + 1;
}

/* --- the end of an update --- */

/* Does a server's code take precedence over another's? PEER_DEAD over WITHDRAWN: a dead server may have
 * applied the update, which is worse than to know that it did not. Any other code over DROPPED, which says
 * nothing about the update itself. */
static int push_outweighs(int code, int other) {
  if (other == MLFAB_ERR_DROPPED) return code != MLFAB_ERR_DROPPED;
  return other == MLFAB_ERR_WITHDRAWN && code == MLFAB_ERR_PEER_DEAD;
}

/* Sums up the decided parts: the code with precedence, the server to blame for it, the counts, the largest delay. A dropped
 * update gets the delay that it would have had. Returns 0 while a part is undecided or lent. */
static int push_verdict(const mlfab__worker *worker, const mlfab__outgoing *update,
                        mlfab_result *result, uint32_t *server_p) {
  uint64_t delays[2] = {0, 0}; /* the second: of dropped parts */
  int code = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    const mlfab__part *part = &update->parts[s];
    if (part->state >= MLFAB__PART_QUEUED) return 0;
    uint32_t lent = part->lent + (worker->routes ? worker->routes->lent(worker, update, s) : 0);
    if (lent > 0 && !update->withdrawn) return 0;
    if (part->state != MLFAB__PART_DECIDED) continue;
    ++*(part->code ? &result->refused : &result->applied);
    uint64_t *delay = &delays[part->code == MLFAB_ERR_DROPPED];
    *delay = mlfab__max(*delay, part->delay);
    if (part->code && (!code || push_outweighs(part->code, code))) {
      code = part->code;
      *server_p = s;
    }
  }
  /* Withdrawn or dropped means applied nowhere, because the caller may push the same again: else PARTIAL. */
  int nowhere = code == MLFAB_ERR_WITHDRAWN || code == MLFAB_ERR_DROPPED;
  result->status = nowhere && result->applied > 0 ? MLFAB_ERR_PARTIAL : code;
  result->delay = delays[result->status == MLFAB_ERR_DROPPED];
  return 1;
}

/* Error text of an update that a server dropped while `applied` others did not. */
static void push_tell_dropped(mlfab__worker *worker, mlfab__request *request, int code,
                              uint32_t server, const mlfab__part *part, uint64_t now_ns) {
  char others[112] = "", why[96];
  if (request->result.applied > 0) {
    snprintf(others, sizeof others,
             "; %u of %u servers applied their parts: only what was dropped may be pushed again",
             request->result.applied, request->result.applied + request->result.refused);
  }
  if (part->untold) {
    snprintf(why, sizeof why, "dropped by server %u, whose answer is lost", server);
  } else if (part->missed) {
    snprintf(why, sizeof why, "too late at server %u: iteration %llu was complete", server,
             (unsigned long long)(part->missed - 1));
  } else {
    snprintf(why, sizeof why, "dropped by the plan at server %u: its delay would be %llu", server,
             (unsigned long long)part->delay);
  }
  mlfab__request_finish(worker->requests, request, code, (int32_t)server, 1, now_ns,
                        "update %llu: %s%s", (unsigned long long)request->result.seq, why, others);
}

/* Ends a request for an update that has failed. */
static void push_end_failed(mlfab__worker *worker, mlfab__request *request,
                            const mlfab__outgoing *update, int code, uint32_t server,
                            uint64_t now_ns) {
  char waited[24];
  mlfab__duration(waited, now_ns - request->started_ns);
  unsigned long long seq = request->result.seq;
  const mlfab__part *part = &update->parts[server];
  if (part->code == MLFAB_ERR_DROPPED) {
    push_tell_dropped(worker, request, code, server, part, now_ns);
    return;
  }
  switch (code) {
    case MLFAB_ERR_NOT_FINITE:
      mlfab__request_finish(
          worker->requests, request, code, (int32_t)worker->rank, 0, now_ns,
          "update %llu of worker %u holds NaN or infinity: refused whole by server %u", seq,
          worker->rank, server);
      break;
    case MLFAB_ERR_PEER_DEAD:
      mlfab__request_finish(worker->requests, request, code, (int32_t)server, 1, now_ns,
                            "update %llu has waited %s for server %u, which is dead", seq, waited,
                            server);
      break;
    default:
      mlfab__request_finish(worker->requests, request, code, (int32_t)server, 1, now_ns,
                            "update %llu: server %u says: %s (after %s)", seq, server,
                            mlfab_error_text(code), waited);
  }
}

/* Ends every request for the update. Reports an error that has no request once. */
static void push_tell_all(mlfab__worker *worker, const mlfab__outgoing *update,
                          const mlfab_result *verdict, uint32_t server, uint64_t now_ns) {
  uint32_t slot = (uint32_t)(update - worker->updates), told = 0;
  int code = verdict->status;
  mlfab__request *request = NULL;
  while ((request = mlfab__request_of(worker->requests, MLFAB__REQUEST_PUSH, slot, request))) {
    request->result.applied = verdict->applied;
    request->result.refused = verdict->refused;
    request->result.version = update->version;
    request->result.delay = verdict->delay;
    if (code)
      push_end_failed(worker, request, update, code, server, now_ns);
    else
      mlfab__request_succeed(worker->requests, request, now_ns);
    told++;
  }
  if (!code || told > 0 || worker->requests->abandoned.code || update->withdrawn) return;
  mlfab__request nobody;
  memset(&nobody, 0, sizeof nobody);
  nobody.result = *verdict;
  nobody.result.seq = update->seq;
  nobody.started_ns = update->started_ns;
  push_end_failed(worker, &nobody, update, code, server, now_ns);
  worker->requests->abandoned = worker->requests->last;
}

/* Ends the update once it is over: all parts are decided, and none of them is lent. */
MLFAB__INTERNAL void mlfab__push_settle(mlfab__worker *worker, mlfab__outgoing *update,
                                        uint64_t now_ns) {
  mlfab_result verdict;
  mlfab_stats *stats = worker->stats;
  uint32_t server = 0, at = 0, members = update->members;
  memset(&verdict, 0, sizeof verdict);
  if (update->seq == 0 || !push_verdict(worker, update, &verdict, &server)) return;
  int code = verdict.status;
  for (uint32_t i = 0; i < members; i++)
    worker->status[(update->seq + i) % MLFAB__WINDOW] = (int16_t)code;
  if (!(update->flags & MLFAB__PUSH_INIT)) {
    if (code == MLFAB_ERR_DROPPED) stats->updates_dropped += members;
    *(code ? &stats->pushes_refused : &stats->pushes_applied) += members;
    if (mlfab__worker_whole(update)) stats->iterations += members;
    if (!code) stats->push_delay_sum += verdict.delay * members;
  }
  push_tell_all(worker, update, &verdict, server, now_ns);
  while (&worker->updates[worker->order[at]] != update) at++;
  memmove(&worker->order[at], &worker->order[at + 1], worker->norder - at - 1);
  worker->norder--;
  int again = code == MLFAB_ERR_WITHDRAWN || code == MLFAB_ERR_DROPPED;
  update->kept = again && update->codec->keeps ? update->seq : 0;
  update->seq = 0;
  update->serial++;
  worker->due = 1;
}

MLFAB__INTERNAL void mlfab__push_decide(mlfab__worker *worker, mlfab__outgoing *update,
                                        uint32_t server, int code, uint64_t now_ns) {
  mlfab__part *part = &update->parts[server];
  mlfab__stream *stream = &worker->streams[server];
  if (part->state < MLFAB__PART_QUEUED) return;
  if (part->state == MLFAB__PART_ANNOUNCED) {
    stream->eager_used -= part->eager;
    if (update->mergeable) --stream->small[update->durable];
  }
  part->state = MLFAB__PART_DECIDED;
  if (code == 0) stream->taken += update->members;
  part->code = code || !part->empty ? code : MLFAB_ERR_WITHDRAWN;
  if (mlfab__worker_whole(update)) {
    uint64_t next = stream->round + 1;
    /* Only a plan drops an update that is not late. */
    int missed = code == MLFAB_ERR_DROPPED &&
                 (part->reached > next || worker->config->scheduler == MLFAB_SCHEDULER_NONE);
    part->missed = missed ? next : 0;
    stream->round = next;
  }
  if (worker->norder > 1) worker->port.ready(worker->port.self, server);
  mlfab__push_settle(worker, update, now_ns);
  worker->due = 1;
}

MLFAB__INTERNAL void mlfab__push_acked(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__push_ack ack;
  if (MLFAB__MALFORMED(&worker->port, server, frame, push_ack, &ack)) return;
  for (uint32_t i = 0; i < worker->norder; i++) {
    mlfab__outgoing *update = &worker->updates[worker->order[i]];
    mlfab__part *part = &update->parts[server];
    if (update->seq != ack.seq) continue;
    if (part->state < MLFAB__PART_QUEUED) return;
    update->version = mlfab__max(update->version, ack.version);
    part->delay = ack.delay;
    part->reached = ack.code == MLFAB_ERR_DROPPED ? ack.v_train : 0;
    mlfab__push_decide(worker, update, server, ack.code, now_ns);
    if (ack.v_train != worker->streams[server].round)
      mlfab__push_reached(worker, server, ack.v_train);
    return;
  }
}

MLFAB__INTERNAL void mlfab__push_granted(mlfab__worker *worker, uint32_t server,
                                         const mlfab__frame_in *frame) {
  mlfab__grant grant;
  if (MLFAB__MALFORMED(&worker->port, server, frame, grant, &grant)) return;
  if (grant.generation != worker->streams[server].generation) return;
  for (uint32_t i = 0; i < worker->norder; i++) {
    mlfab__outgoing *update = &worker->updates[worker->order[i]];
    mlfab__part *part = &update->parts[server];
    if (update->seq != grant.seq || part->state != MLFAB__PART_ANNOUNCED) continue;
    if (worker->routes && !worker->routes->direct(worker, update, server)) return;
    part->granted = mlfab__min(part->bytes, mlfab__max(part->granted, grant.upto));
    worker->port.ready(worker->port.self, server);
  }
}

/* --- the stream starts again --- */

MLFAB__INTERNAL void mlfab__push_lost(mlfab__worker *worker, uint32_t server,
                                      enum mlfab__part_state state, uint64_t now_ns) {
  mlfab__stream *stream = &worker->streams[server];
  mlfab__outgoing *update;
  for (uint32_t i = 0; i < worker->norder; i += update->seq != 0) {
    update = &worker->updates[worker->order[i]];
    mlfab__part *part = &update->parts[server];
    part->lent = 0;
    if (part->state == MLFAB__PART_ANNOUNCED && push_by(worker, update, server) != MLFAB__NO_NODE) {
      /* The group goes on without it: the server has lost it, too. */
      push_leave(worker, update, server);
      mlfab__push_rewind(part);
    }
    if (state == MLFAB__PART_DECIDED) {
      mlfab__push_decide(worker, update, server, MLFAB_ERR_PEER_DEAD, now_ns);
    } else if (state == MLFAB__PART_NONE && !part->code) {
      int announced = part->state == MLFAB__PART_ANNOUNCED;
      if (announced) stream->eager_used -= part->eager;
      if (announced && update->mergeable) --stream->small[update->durable];
      part->state = MLFAB__PART_NONE;
    }
    mlfab__push_settle(worker, update, now_ns);
  }
}

MLFAB__INTERNAL void mlfab__push_resync(mlfab__worker *worker, uint32_t server, uint32_t generation,
                                        const mlfab__window *window, uint64_t now_ns) {
  mlfab__stream *stream = &worker->streams[server];
  mlfab__outgoing *update;
  stream->generation = generation;
  for (uint32_t i = 0; i < worker->norder; i += update->seq != 0) {
    update = &worker->updates[worker->order[i]];
    mlfab__part *part = &update->parts[server];
    if (part->state < MLFAB__PART_QUEUED) continue;
    enum mlfab__decision known = mlfab__windows_ask(window, update->seq, update->members);
    if (known != MLFAB__UNDECIDED) {
      /* The answer is lost; as a reason the window only records that the update was dropped. */
      int refused = update->withdrawn         ? MLFAB_ERR_WITHDRAWN
                    : known == MLFAB__DROPPED ? MLFAB_ERR_DROPPED
                                              : MLFAB_ERR_REFUSED;
      part->untold = 1;
      mlfab__push_decide(worker, update, server, known == MLFAB__APPLIED ? 0 : refused, now_ns);
    } else if (update->withdrawn && !push_rounds(worker)) {
      mlfab__push_decide(worker, update, server, MLFAB_ERR_WITHDRAWN, now_ns);
    } else if (part->state == MLFAB__PART_ANNOUNCED) {
      if (update->mergeable) --stream->small[update->durable];
      stream->eager_used -= part->eager;
      part->state = MLFAB__PART_QUEUED;
      part->eager = 0;
      update->stalled |= update->lacks != NULL;
      /* The number of its route stays: the aggregator may grant it once more before it learns of this. */
      push_leave(worker, update, server);
      mlfab__push_rewind(part);
      if (update->withdrawn) push_empty(worker, update, server);
    }
  }
  worker->port.ready(worker->port.self, server);
}

/* --- updates without packets --- */

static const mlfab__push_codec push_dense;

/* Copies a small update into one contiguous image in the order of the flat model. The sources point into
 * the image then. */
static int push_pack(mlfab__worker *worker, mlfab__outgoing *update, uint32_t n) {
  if (!update->image) update->image = mlfab__alloc(worker->env, MLFAB__WORKER_PACK);
  if (!update->image) return MLFAB_ERR_MEMORY;
  uint64_t at = 0;
  for (uint32_t i = 0; i < update->nsources; i++) {
    mlfab__source *source = &update->sources[i];
    memcpy(update->image + at, source->data, source->bytes);
    source->data = update->image + at;
    at += source->bytes;
  }
  update->nbufs = n;
  /* Join neighbours: they are adjacent in the model and in the image. */
  uint32_t kept = 0;
  for (uint32_t i = 1; i < update->nsources; i++) {
    mlfab__source *last = &update->sources[kept], *source = &update->sources[i];
    if (last->offset + last->bytes == source->offset) {
      last->bytes += source->bytes;
    } else {
      update->sources[++kept] = *source;
    }
  }
  update->nsources = kept + 1;
  return 0;
}

/* Makes the image of a small update; a large one stays in the caller's buffers. */
static int push_dense_encode(mlfab__worker *worker, mlfab__outgoing *update,
                             const mlfab__push_what *what, uint64_t t, mlfab_error *error) {
  (void)t;
  update->packed = update->bytes <= MLFAB__WORKER_PACK && !worker->define.options.ghost;
  if (update->packed && push_pack(worker, update, what->n))
    return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for an update");
  return 0;
}

/* Never cuts an element. */
static uint64_t push_dense_bytes(const mlfab__worker *worker, const mlfab__outgoing *update,
                                 uint32_t server, uint64_t most) {
  uint64_t bytes = update->parts[server].bytes;
  (void)worker;
  return most < bytes ? most - most % 8 : bytes;
}

MLFAB__INTERNAL uint32_t mlfab__push_chunk_bytes(const mlfab__worker *worker,
                                                 const mlfab__outgoing *update, uint32_t server) {
  uint32_t hop = push_by(worker, update, server);
  if (hop != MLFAB__NO_NODE) return worker->routes->chunk(worker, hop);
  return mlfab__port_chunk(&worker->port, server, worker->config->chunk_bytes);
}

/* A piece lies within one source and one run of the server's slices. If a run begins inside a page of the source, the first
 * piece ends at the end of a page, so that later pieces begin at pages. A transport avoids the copy of whole pages only. */
static uint64_t push_dense_piece(const mlfab__worker *worker, const mlfab__outgoing *update,
                                 uint32_t server, const mlfab__part *part, uint64_t most,
                                 const uint8_t **data_p) {
  uint64_t begin = 0, end = 0, in_source = part->in_source;
  *data_p = NULL;
  for (uint32_t i = part->source; i < update->nsources; i++, in_source = 0) {
    const mlfab__source *source = &update->sources[i];
    uint64_t from = source->offset + in_source;
    if (from >= end) mlfab__layout_run(&worker->layout, server, from, &begin, &end);
    from = mlfab__max(from, begin);
    uint64_t to = mlfab__min(source->offset + source->bytes, end);
    if (from >= to) continue;
    if (source->data) *data_p = source->data + (from - source->offset);
    uint64_t chunk = mlfab__push_chunk_bytes(worker, update, server);
    uint64_t over = (from - source->offset) % PUSH_PAGE;
    return mlfab__min(to - from, mlfab__min(most, chunk > PUSH_PAGE ? chunk - over : chunk));
  }
  return 0;
}

static void push_dense_advance(const mlfab__worker *worker, const mlfab__outgoing *update,
                               uint32_t server, mlfab__part *part, uint64_t bytes) {
  uint64_t begin = 0, end = 0;
  while (bytes > 0) {
    const mlfab__source *source = &update->sources[part->source];
    uint64_t from = source->offset + part->in_source, stop = source->offset + source->bytes;
    if (from >= end) mlfab__layout_run(&worker->layout, server, from, &begin, &end);
    from = mlfab__max(from, begin);
    uint64_t to = mlfab__min(stop, end);
    uint64_t step = from < to ? mlfab__min(bytes, to - from) : 0;
    bytes -= step;
    part->in_source = from + step - source->offset;
    if (from + step >= stop) {
      part->source++;
      part->in_source = 0;
    }
  }
}

static const mlfab__push_codec push_dense = {
    0, 0, push_dense_encode, push_dense_bytes, push_dense_piece, push_dense_advance};

/* --- a new update --- */

MLFAB__INTERNAL int mlfab__push_parts_begin(mlfab__worker *worker, mlfab__outgoing *update,
                                            mlfab_error *error) {
  int rounds = push_rounds(worker), again = update->seq != 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    mlfab__part *part = &update->parts[s], former = *part;
    memset(part, 0, sizeof *part);
    if (again) {
      push_leave(worker, update, s);
      part->lent = former.lent;
    }
    uint32_t segments =
        mlfab__worker_clip(worker, s, update->sources, update->nsources, &part->bytes);
    if (segments == UINT32_MAX) {
      return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
                         "more than %d separate stretches of the model in one update",
                         MLFAB__SEGMENTS_MAX);
    }
    int counts = rounds || (update->flags & MLFAB__PUSH_INIT);
    if (segments > 0 || (counts && !worker->streams[s].absent)) part->state = MLFAB__PART_QUEUED;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__push_parts_end(mlfab__worker *worker, mlfab__outgoing *update) {
  for (uint32_t s = 0; s < worker->servers; s++)
    update->parts[s].bytes = update->codec->bytes(worker, update, s, UINT64_MAX);
  if (worker->routes) worker->routes->plan(worker, update);
}

static int push_check(mlfab__worker *worker, const mlfab_push_options *options,
                      mlfab_error *error) {
  int code = 0;
  const char *text = NULL;
  double scale = options->scale;
  uint64_t bits;
  memcpy(&bits, &scale, sizeof bits); /* 0: +0.0. Minus a learning rate of 0 is -0.0 */
  if (bits == 0 && !options->initialised)
    code = MLFAB_ERR_ARGUMENT,
    text = "scale is 0, and nobody initialised the options: begin with MLFAB_PUSH_OPTIONS_INIT";
  if (!mlfab__finite(scale)) code = MLFAB_ERR_ARGUMENT, text = "scale is not finite";
  if (!(options->clip_norm >= 0.0) || !mlfab__finite(options->clip_norm)) {
    code = MLFAB_ERR_ARGUMENT, text = "clip_norm is negative or not finite";
  }
  if (!(options->norm >= 0.0) || !mlfab__finite(options->norm)) {
    code = MLFAB_ERR_ARGUMENT, text = "norm is negative or not finite";
  }
  if (options->flags & ~(uint32_t)MLFAB_PUSH_MORE)
    code = MLFAB_ERR_ARGUMENT, text = "unknown flags";
  if (options->ack > MLFAB_ACK_DURABLE) code = MLFAB_ERR_ARGUMENT, text = "ack is no MLFAB_ACK_*";
  if (options->ack == MLFAB_ACK_DURABLE && !worker->config->replicas)
    code = MLFAB_ERR_UNSUPPORTED, text = "ack = MLFAB_ACK_DURABLE needs servers with replicas";
  for (uint32_t i = 0; i < worker->layout.ntensors && !code; i++) {
    if (worker->layout.tensors[i].dtype != MLFAB_I64) continue;
    if (!(scale >= -9007199254740992.0 && scale <= 9007199254740992.0) ||
        (double)(int64_t)scale != scale) {
      code = MLFAB_ERR_DTYPE, text = "scale must be an integer for int64 tensors";
    }
    if (options->clip_norm > 0)
      code = MLFAB_ERR_DTYPE, text = "clip_norm does not go with int64 tensors";
    break;
  }
  if (!worker->stands)
    code = MLFAB_ERR_STATE, text = "there is no model yet: call mlfab_model_start first";
  if (worker->done) code = MLFAB_ERR_STATE, text = "a push after mlfab_finish";
  return code ? MLFAB__FAIL(error, code, "push: %s", text)
              : mlfab__worker_reaches(worker, MLFAB_ALL, "push", error);
}

MLFAB__INTERNAL uint64_t mlfab__worker_progress(const mlfab__worker *worker) {
  return worker->streams[0].round + mlfab__worker_ahead(worker, 0, worker->next_seq);
}

static int push_check_progress(const mlfab__worker *worker, uint64_t wanted, mlfab_error *error) {
  uint64_t next = mlfab__worker_progress(worker) + 1;
  if (wanted == next) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                     "push: iteration is %llu, this worker's next is %llu",
                     (unsigned long long)wanted, (unsigned long long)next);
}

/* Computes the global norm of the update; returns the scale after clipping. */
static double push_clip(const mlfab__worker *worker, const mlfab__outgoing *update,
                        const struct mlfab__sparse *sparse, double limit, double *norm_p) {
  double sum = sparse ? worker->sparse->norm2(worker, sparse) : 0.0;
  for (uint32_t i = 0; i < update->nsources && !sparse; i++) {
    const mlfab__source *source = &update->sources[i];
    for (uint64_t at = 0; at < source->bytes;) {
      const mlfab__tensor *tensor = mlfab__layout_tensor_at(&worker->layout, source->offset + at);
      uint64_t bytes =
          mlfab__min(source->bytes - at, tensor->offset + tensor->bytes - (source->offset + at));
      sum += mlfab__kernel_norm2_by(worker->config->kernels, (int)tensor->dtype, source->data + at,
                                    bytes / mlfab__dtype_bytes((int)tensor->dtype));
      at += bytes;
    }
  }
  double root = sum > 0.0 ? 1.0 : 0.0;
  if (sum > 0.0 && mlfab__finite(sum)) {
    /* Newton's iteration from above: monotone, no libm. */
    root = sum > 1.0 ? sum : 1.0;
    for (double before = 0.0; root != before && !(before != 0.0 && root > before);) {
      before = root;
      root = 0.5 * (root + sum / root);
    }
  }
  *norm_p = root;
  return root > limit ? update->scale * (limit / root) : update->scale;
}

/* Adds a small update to the last waiting one, if they can be merged. */
static mlfab__outgoing *push_merge(mlfab__worker *worker, const mlfab_buf *bufs,
                                   const mlfab_push_options *options, int durable) {
  mlfab__outgoing *update = &worker->updates[worker->order[worker->norder - 1]];
  /* Members have consecutive numbers; an update between them may have been withdrawn. */
  if (update->seq + update->members != worker->next_seq) return NULL;
  if (worker->sparse && worker->sparse->sifts(worker, bufs)) return NULL;
  if (!update->mergeable || update->nbufs != 1 || update->withdrawn ||
      update->members >= worker->config->merge_max || update->pull_count != worker->pull_count ||
      options->version != update->base || options->retry_seq || options->iteration ||
      options->clip_norm > 0.0 || options->scale < update->scale ||
      options->scale > update->scale) {
    return NULL;
  }
  if (durable != update->durable) return NULL;
  for (uint32_t s = 0; s < worker->servers; s++) {
    uint8_t state = update->parts[s].state;
    if (state != MLFAB__PART_NONE && state != MLFAB__PART_QUEUED) return NULL;
  }
  const mlfab__tensor *tensor = bufs->tensor == MLFAB_ALL
                                    ? &worker->layout.tensors[worker->layout.by_offset[0]]
                                    : mlfab__layout_find(&worker->layout, bufs->tensor);
  if (!tensor || !bufs->data || tensor->offset != update->sources[0].offset) return NULL;
  uint64_t bytes = bufs->count * mlfab__dtype_bytes((int)tensor->dtype);
  if (bytes != update->bytes || (bufs->tensor != MLFAB_ALL && bufs->count != tensor->count))
    return NULL;
  if (bufs->tensor == MLFAB_ALL && (!worker->layout.uniform_dtype || bytes != worker->layout.bytes))
    return NULL;
  /* An update that is not finite goes alone, so that the servers refuse only that one. Check this update
   * and the waiting one. */
  if (!mlfab__kernel_finite((int)tensor->dtype, bufs->data, bufs->count)) return NULL;
  if (update->members == 1 &&
      !mlfab__kernel_finite((int)tensor->dtype, update->image, bufs->count)) {
    update->mergeable = 0;
    return NULL;
  }
  mlfab__kernel_add((int)tensor->dtype, update->image, update->image, bufs->data, 1.0, bufs->count,
                    0);
  update->members++;
  update->norm = 0.0; /* unknown for the sum */
  worker->stats->pushes_merged++;
  worker->next_seq++;
  return update;
}

/* The slot that keeps the bytes of the update to retry; else a slot that keeps none; else the slot with the
 * oldest bytes. */
static mlfab__outgoing *push_free_slot(mlfab__worker *worker, uint64_t retry_seq,
                                       uint32_t *slot_p) {
  mlfab__outgoing *best = NULL;
  for (uint32_t i = 0; i < MLFAB__WORKER_UPDATES; i++) {
    mlfab__outgoing *update = &worker->updates[i];
    if (update->seq != 0) continue;
    int wanted = retry_seq != 0 && update->kept == retry_seq;
    if (best && !wanted && update->kept >= best->kept) continue;
    best = update;
    *slot_p = i;
    if (wanted || (retry_seq == 0 && update->kept == 0)) break;
  }
  return best;
}

/* Puts a filled slot into the order and tells the streams. */
static void push_enqueue(mlfab__worker *worker, mlfab__outgoing *update, uint32_t slot,
                         uint64_t now_ns) {
  update->started_ns = now_ns;
  uint32_t at = worker->norder++;
  while (at > 0 && worker->updates[worker->order[at - 1]].seq > update->seq) {
    worker->order[at] = worker->order[at - 1];
    at--;
  }
  worker->order[at] = (uint8_t)slot;
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (update->parts[s].state == MLFAB__PART_QUEUED) {
      worker->port.ready(worker->port.self, s);
    } else if (mlfab__worker_whole(update)) {
      worker->streams[s].round++; /* this server does not hear of the update */
    }
  }
}

/* Chooses the codec of the update, and makes its bytes. */
static int push_encode(mlfab__worker *worker, mlfab__outgoing *update, const mlfab__push_what *what,
                       const mlfab_push_options *options, mlfab_error *error) {
  int again = 0, code = 0;
  update->codec = &push_dense;
  if (worker->sparse)
    code = worker->sparse->choose(worker, update, what, options->retry_seq, &again, error);
  if (code || again) return code;
  update->kept = 0;
  code = update->codec->encode(worker, update, what, mlfab__worker_progress(worker) + 1, error);
  update->mergeable = !code && update->packed && !push_rounds(worker) &&
                      worker->define.options.optimizer == MLFAB_OPTIMIZER_SGD &&
                      !(worker->define.options.weight_decay > 0.0) &&
                      !(update->flags & ~(uint32_t)MLFAB__PUSH_DURABLE) &&
                      worker->config->merge_max > 1 && options->clip_norm <= 0.0;
  return code;
}

static int push_fill(mlfab__worker *worker, mlfab__outgoing *update, const mlfab__push_what *what,
                     const mlfab_push_options *options, uint32_t flags, mlfab_error *error) {
  if (!update->parts)
    update->parts = mlfab__alloc_array(worker->env, worker->servers, sizeof *update->parts);
  if (!update->versions)
    update->versions =
        mlfab__alloc_array(worker->env, worker->layout.nslices, sizeof *update->versions);
  if (!update->parts || !update->versions)
    return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for an update");
  int code =
      mlfab__worker_sources(worker, what->bufs, what->n, what->sparse != NULL, &update->sources,
                            &update->nsources, &update->source_room, error);
  if (code) return code;
  update->members = 1;
  update->flags = flags;
  update->scale = options->scale;
  update->norm = options->norm;
  update->base = options->version;
  update->withdrawn = update->mergeable = update->packed = 0;
  update->durable = (flags & MLFAB__PUSH_DURABLE) != 0;
  update->version = update->bytes = 0;
  update->lacks = worker->lacks;
  update->lacks_end = worker->lacks_end;
  update->stalled = 0;
  update->nbufs = what->n;
  update->pull_count = worker->pull_count;
  for (uint32_t i = 0; i < update->nsources; i++) update->bytes += update->sources[i].bytes;
  for (uint32_t i = 0; i < worker->layout.nslices; i++) {
    update->versions[i] = options->version ? options->version - 1 : worker->pulled[i];
  }
  if (options->clip_norm > 0.0 && !worker->define.options.ghost) {
    update->scale = push_clip(worker, update, what->sparse, options->clip_norm, &update->norm);
  }
  code = mlfab__push_parts_begin(worker, update, error);
  if (!code && options->iteration) code = push_check_progress(worker, options->iteration, error);
  if (!code) code = push_encode(worker, update, what, options, error);
  if (!code) mlfab__push_parts_end(worker, update);
  assert(code || !update->lacks || (update->codec == &push_dense && !update->packed));
  return code;
}

/* A retry: if the update was applied after all, there is nothing to send. If it was applied nowhere, the
 * retry gets a new number, because the servers have passed over the old one. */
static int push_retry(const mlfab__worker *worker, uint64_t seq, int *applied_p,
                      mlfab_error *error) {
  int status = 0;
  if (mlfab__worker_status(worker, seq, &status)) {
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "push: nothing is known of update %llu",
                       (unsigned long long)seq);
  }
  if (status == MLFAB_ERR_IN_DOUBT) {
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN, "push: update %llu is still in doubt",
                       (unsigned long long)seq);
  }
  if (status != 0 && status != MLFAB_ERR_WITHDRAWN && status != MLFAB_ERR_DROPPED) {
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "push: update %llu cannot be repeated: %s",
                       (unsigned long long)seq, mlfab_error_text(status));
  }
  *applied_p = status == 0;
  return 0;
}

/* Starts a new update in a slot of its own. */
static mlfab__outgoing *push_new(mlfab__worker *worker, const mlfab__push_what *what,
                                 const mlfab_push_options *options, uint32_t flags, uint64_t now_ns,
                                 int *code_p, mlfab_error *error) {
  uint32_t slot = 0;
  mlfab__outgoing *update = push_free_slot(worker, options->retry_seq, &slot);
  /* The oldest number in flight must stay inside every server's window. */
  uint64_t oldest = worker->norder > 0 ? worker->updates[worker->order[0]].seq : worker->next_seq;
  if (!update || worker->next_seq - oldest >= MLFAB__WINDOW - worker->config->merge_max) {
    *code_p = MLFAB__FAIL(error, MLFAB_ERR_AGAIN, "push: %u updates are under way", worker->norder);
    return NULL;
  }
  /* An update for a round that is closed gets into the open one, and does not end it. */
  int owed =
      worker->debt > 0 && !((options->flags | flags) & (MLFAB__PUSH_MORE | MLFAB__PUSH_INIT));
  *code_p = push_fill(worker, update, what, options, flags | (owed ? MLFAB__PUSH_MORE : 0), error);
  if (*code_p) return NULL;
  worker->debt -= (uint64_t)owed;
  update->seq = worker->next_seq++;
  worker->wholes += (uint64_t)(owed || mlfab__worker_whole(update));
  push_enqueue(worker, update, slot, now_ns);
  return update;
}

/* A retry of an applied update: its request is done from the start. */
static void push_known(mlfab__worker *worker, const mlfab_push_options *options, uint64_t now_ns,
                       mlfab_request *request_p) {
  mlfab__request *known = mlfab__request_open(worker->requests, MLFAB__REQUEST_PUSH,
                                              MLFAB__WORKER_UPDATES, now_ns, options->timeout_ns);
  known->result.seq = options->retry_seq;
  *request_p = known->id;
  mlfab__request_succeed(worker->requests, known, now_ns);
}

MLFAB__INTERNAL int mlfab__push_start(mlfab__worker *worker, const mlfab__push_what *what,
                                      const mlfab_push_options *given, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error) {
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  if (given) memcpy(&options, given, mlfab__min(given->size, sizeof options));
  if (given && given->size < offsetof(mlfab_push_options, flags))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "push: options.size is not set");
  int applied = 0, code = push_check(worker, &options, error);
  if (!code && options.retry_seq) code = push_retry(worker, options.retry_seq, &applied, error);
  if (code) return code;
  uint64_t seq = worker->next_seq;
  code = request_p ? mlfab__request_room(worker->requests, MLFAB__REQUEST_PUSH, error) : 0;
  if (code) return code;
  if (applied) {
    if (request_p) push_known(worker, &options, now_ns, request_p);
    return 0;
  }
  mlfab__outgoing *update = NULL;
  /* Is the push done only when the replicas have it? */
  int durable = (options.ack ? options.ack : worker->config->ack) == MLFAB_ACK_DURABLE;
  if (what->bufs && what->n == 1 && !what->sparse && !options.flags && worker->norder > 0)
    update = push_merge(worker, what->bufs, &options, durable);
  if (update && update->members == worker->config->merge_max) {
    for (uint32_t s = 0; s < worker->servers; s++) worker->port.ready(worker->port.self, s);
  }
  uint32_t flags = options.flags & MLFAB_PUSH_MORE ? MLFAB__PUSH_MORE : 0;
  if (durable) flags |= MLFAB__PUSH_DURABLE;
  if (!update) update = push_new(worker, what, &options, flags, now_ns, &code, error);
  if (code) return code;
  worker->status[seq % MLFAB__WINDOW] = MLFAB_ERR_IN_DOUBT;
  worker->stats->pushes_started++;
  if (!request_p) return 0;
  mlfab__request *request =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_PUSH,
                          (uint32_t)(update - worker->updates), now_ns, options.timeout_ns);
  request->result.seq = seq;
  *request_p = request->id;
  return 0;
}

MLFAB__INTERNAL int mlfab__push_first(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                      uint64_t now_ns, mlfab_error *error) {
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  int code = 0;
  mlfab__push_what what = {bufs, n, NULL};
  push_new(worker, &what, &options, MLFAB__PUSH_INIT, now_ns, &code, error);
  return code;
}

/* --- outgoing frames --- */

/* The next bytes of a part that may be sent, at most `most`; may be none. */
static uint64_t push_piece(const mlfab__worker *worker, const mlfab__outgoing *update,
                           uint32_t server, uint64_t most, const uint8_t **data_p) {
  const mlfab__part *part = &update->parts[server];
  uint64_t bytes = update->codec->piece(worker, update, server, part, most, data_p);
  return update->lacks ? worker->has(update, part, *data_p, bytes) : bytes;
}

/* May the first queued part of a stream be announced now? */
static int push_may_announce(const mlfab__worker *worker, uint32_t server, uint32_t i) {
  const mlfab__stream *stream = &worker->streams[server];
  const mlfab__outgoing *update = &worker->updates[worker->order[i]];
  const mlfab__part *part = &update->parts[server];
  const uint8_t *data;
  if (!stream->define && !stream->defined && !(update->flags & MLFAB__PUSH_INIT)) return 0;
  /* Announced without bytes, it would keep the updates behind it at the server, or be applied at once. */
  if (update->lacks && !part->empty && !push_piece(worker, update, server, UINT64_MAX, &data))
    return 0;
  /* Updates like it are under way: wait for more to merge, unless another update is behind it. */
  if (update->mergeable && stream->small[update->durable] >= 1 && i + 1 == worker->norder &&
      update->members < worker->config->merge_max) {
    return 0;
  }
  /* An update that fits the credit goes whole, when the credit is free, which is soon. A planned one uses
   * no credit. */
  return part->planned || part->bytes > stream->eager_bytes ||
         part->bytes <= stream->eager_bytes - stream->eager_used;
}

/* Versions of the slices that the segments in scratch touch; one if all are equal. */
static uint32_t push_versions(mlfab__worker *worker, const mlfab__outgoing *update,
                              uint32_t segments) {
  uint64_t *out = worker->lists->versions;
  uint32_t n = 0, next = 0;
  int equal = 1;
  for (uint32_t k = 0; k < segments; k++) {
    const mlfab__segment *segment = &worker->lists->segments[k];
    uint32_t first = mlfab__layout_slice_at(&worker->layout, segment->offset);
    uint32_t last = mlfab__layout_slice_at(&worker->layout, segment->offset + segment->bytes - 1);
    for (uint32_t i = first < next ? next : first; i <= last; i++) {
      out[n++] = update->versions[i];
      if (out[n - 1] != out[0]) equal = 0;
    }
    next = last + 1;
  }
  if (n == 0) out[0] = 0;
  return equal ? 1 : n;
}

/* Bytes that go with an announcement, within the credit and without delaying other updates. */
static uint32_t push_eager(const mlfab__worker *worker, const mlfab__outgoing *update,
                           uint32_t server) {
  const mlfab__stream *stream = &worker->streams[server];
  const mlfab__part *part = &update->parts[server];
  if (part->planned) return 0;
  /* Of a large update only enough to hide the latency of its grant: the server stages eager bytes while
   * other updates are first. */
  uint64_t most = part->bytes > stream->eager_bytes ? MLFAB__WORKER_PACK : part->bytes;
  uint32_t eager = (uint32_t)mlfab__min(most, stream->eager_bytes - stream->eager_used);
  /* The remaining credit may be any number: round down to whole elements or packets. */
  return eager < part->bytes ? (uint32_t)update->codec->bytes(worker, update, server, eager)
                             : eager;
}

/* The frame with a bulk of the update is complete. Does the transport borrow the bulk? It copies a small one. */
static void push_lend(const mlfab__worker *worker, const mlfab__port *port, uint32_t peer,
                      const mlfab__outgoing *update, uint64_t token, mlfab__frame_out *frame) {
  int lends = frame->bulk && mlfab__port_lends(port, peer, worker->config->chunk_bytes,
                                               frame->bulk_bytes, MLFAB__WORKER_COPY);
  frame->slot = (uint32_t)(update - worker->updates);
  frame->token = lends ? token : 0;
  frame->callers = update->codec == &push_dense && !update->packed;
}

static int push_announce(mlfab__worker *worker, uint32_t server, mlfab__outgoing *update,
                         mlfab__frame_out *frame) {
  const mlfab__stream *stream = &worker->streams[server];
  const mlfab__part *part = &update->parts[server];
  uint64_t bytes;
  uint32_t nsources = part->empty ? 0 : update->nsources;
  mlfab__push push;
  memset(&push, 0, sizeof push);
  push.segments = mlfab__worker_clip(worker, server, update->sources, nsources, &bytes);
  push.versions = push_versions(worker, update, push.segments);
  push.seq = update->seq;
  push.members = update->members;
  push.generation = stream->generation;
  push.flags = update->flags | (part->planned ? MLFAB__PUSH_PLANNED : 0u) |
               (part->empty ? 0u : update->codec->flags);
  push.eager = push_eager(worker, update, server);
  if (worker->routes) push.parts = worker->routes->parts(worker, update);
  push.progress = stream->round + mlfab__worker_ahead(worker, server, update->seq);
  push.bytes = part->bytes;
  push.scale = update->scale;
  push.norm = update->norm;
  const uint8_t *data = NULL;
  uint64_t piece = part->empty ? 0 : push_piece(worker, update, server, push.eager, &data);
  frame->type = MLFAB__PUSH;
  frame->meta_bytes =
      mlfab__encode_push(frame->meta, &push, worker->lists->segments, worker->lists->versions);
  frame->bulk = piece > 0 ? data : NULL;
  frame->bulk_bytes = (uint32_t)piece;
  frame->note[1] = push.eager;
  push_lend(worker, &worker->port, server, update, mlfab__push_token(worker, update), frame);
  return frame->meta_bytes > 0;
}

MLFAB__INTERNAL int mlfab__push_bulk(const mlfab__worker *worker, const mlfab__port *port,
                                     uint32_t peer, const mlfab__outgoing *update, uint32_t server,
                                     uint64_t token, mlfab__frame_out *frame) {
  const mlfab__part *part = &update->parts[server];
  const uint8_t *data;
  frame->bulk_bytes =
      (uint32_t)push_piece(worker, update, server, part->granted - part->sent, &data);
  frame->bulk = data;
  push_lend(worker, port, peer, update, token, frame);
  return frame->bulk_bytes > 0;
}

static int push_chunk(const mlfab__worker *worker, uint32_t server, const mlfab__outgoing *update,
                      mlfab__frame_out *frame) {
  mlfab__chunk chunk = {update->seq, update->parts[server].sent,
                        worker->streams[server].generation};
  frame->type = MLFAB__CHUNK;
  frame->meta_bytes = mlfab__encode_chunk(frame->meta, &chunk);
  return mlfab__push_bulk(worker, &worker->port, server, update, server,
                          mlfab__push_token(worker, update), frame);
}

MLFAB__INTERNAL int mlfab__push_next(mlfab__worker *worker, uint32_t server,
                                     mlfab__frame_out *frame) {
  for (uint32_t i = 0; i < worker->norder; i++) {
    mlfab__outgoing *update = &worker->updates[worker->order[i]];
    const mlfab__part *part = &update->parts[server];
    int found = 0;
    frame->note[0] = MLFAB__NOTE_CHUNK;
    if (part->state == MLFAB__PART_QUEUED) {
      if (!mlfab__worker_announces(worker, server, update->seq)) return 0;
      if (!push_may_announce(worker, server, i)) return 0;
      frame->note[0] = MLFAB__NOTE_PUSH;
      found = push_announce(worker, server, update, frame);
    } else if (part->state == MLFAB__PART_ANNOUNCED && part->sent < part->granted &&
               push_by(worker, update, server) == MLFAB__NO_NODE && !update->withdrawn) {
      found = push_chunk(worker, server, update, frame);
    }
    if (found) return 1;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__push_taken(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_out *frame) {
  mlfab__outgoing *update = &worker->updates[frame->slot];
  mlfab__part *part = &update->parts[server];
  mlfab__stream *stream = &worker->streams[server];
  if (frame->note[0] == MLFAB__NOTE_PUSH) {
    part->state = MLFAB__PART_ANNOUNCED;
    stream->announced = mlfab__max(stream->announced, update->seq + update->members - 1);
    part->eager = (uint32_t)frame->note[1];
    part->granted = part->eager;
    stream->eager_used += part->eager;
    if (update->mergeable) ++stream->small[update->durable];
  }
  part->sent += frame->bulk_bytes;
  update->codec->advance(worker, update, server, part, frame->bulk_bytes);
  if (frame->token != 0) part->lent++;
}

MLFAB__INTERNAL void mlfab__push_sent(mlfab__worker *worker, uint32_t server, uint64_t token,
                                      uint64_t now_ns) {
  uint32_t slot = (uint32_t)((token & 0xff) - 1);
  if (slot >= MLFAB__WORKER_UPDATES) return;
  mlfab__outgoing *update = &worker->updates[slot];
  if (update->seq == 0 || mlfab__push_token(worker, update) != token)
    return; /* detached meanwhile */
  if (update->parts[server].lent > 0) update->parts[server].lent--;
  mlfab__push_settle(worker, update, now_ns);
}

/* --- withdrawing --- */

/* Takes the buffers back from every transport, and the update back from every server that has not decided
 * it. 1 if it was announced anywhere. */
static int push_recall(mlfab__worker *worker, mlfab__outgoing *update) {
  int announced = 0;
  update->withdrawn = 1;
  update->lacks = NULL; /* no more of it is sent */
  for (uint32_t s = 0; s < worker->servers; s++) {
    mlfab__part *part = &update->parts[s];
    if (part->lent > 0) {
      worker->port.detach(worker->port.self, s, mlfab__push_token(worker, update));
      part->lent = 0;
    }
    push_leave(worker, update, s);
    if (part->state == MLFAB__PART_ANNOUNCED || part->state == MLFAB__PART_DECIDED) announced = 1;
    if (part->state != MLFAB__PART_ANNOUNCED) continue;
    mlfab__withdraw withdraw = {update->seq, update->members, worker->streams[s].generation};
    MLFAB__POST(&worker->port, s, MLFAB__WITHDRAW, withdraw, &withdraw);
  }
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (update->parts[s].state == MLFAB__PART_QUEUED && announced && push_rounds(worker)) {
      push_empty(worker, update, s);
    } else if (update->parts[s].state == MLFAB__PART_QUEUED) {
      /* Never announced there: decided now, and not counted for a round. */
      update->parts[s].state = MLFAB__PART_DECIDED;
      update->parts[s].code = MLFAB_ERR_WITHDRAWN;
      worker->port.ready(worker->port.self, s);
      if (push_rounds(worker) && mlfab__worker_whole(update))
        mlfab__pull_again(worker, s, update->seq);
    }
  }
  return announced;
}

/* A server that has not decided this update. */
static uint32_t push_awaits(const mlfab__worker *worker, const mlfab__outgoing *update) {
  uint32_t server = 0;
  while (server + 1 < worker->servers && update->parts[server].state < MLFAB__PART_QUEUED) server++;
  return server;
}

MLFAB__INTERNAL uint32_t mlfab__worker_unfinished(const mlfab__worker *worker, uint32_t *server_p) {
  if (server_p && worker->norder > 0)
    *server_p = push_awaits(worker, &worker->updates[worker->order[0]]);
  return worker->norder;
}

MLFAB__INTERNAL void mlfab__push_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                          uint64_t now_ns) {
  mlfab__outgoing *update = &worker->updates[request->slot];
  uint32_t server = push_awaits(worker, update);
  char by[48] = "";
  if (push_by(worker, update, server) != MLFAB__NO_NODE)
    snprintf(by, sizeof by, " by way of worker %u", push_by(worker, update, server));
  /* Merged with others: only this caller's request ends; the update goes on from the library's copy. */
  int shared = update->members > 1, lacked = update->lacks != NULL;
  int announced = shared || push_recall(worker, update);
  if (!shared) mlfab__push_align(worker);
  request->blame.in_doubt = announced && !lacked;
  mlfab__request_blame(request, (int32_t)server, 1, " to apply it%s%s%s", by,
                       update->durable ? ", and its replica to have it" : "",
                       !announced ? "; it was not sent"
                       : lacked   ? "; no server has got all of it"
                                  : "; it is not known yet whether it was");
  mlfab__request_expire(worker->requests, request, code, now_ns);
  if (!shared) mlfab__push_settle(worker, update, now_ns);
  worker->due = 1;
}

MLFAB__INTERNAL void mlfab__push_forget(mlfab__worker *worker) {
  for (uint32_t i = 0; i < worker->norder; i++)
    push_recall(worker, &worker->updates[worker->order[i]]);
  worker->norder = 0;
  for (uint32_t s = 0; worker->streams && s < worker->servers; s++)
    memset(worker->streams[s].small, 0, sizeof worker->streams[s].small);
  for (uint32_t i = 0; i < MLFAB__WORKER_UPDATES; i++) {
    mlfab__outgoing *update = &worker->updates[i];
    mlfab__free(worker->env, update->versions, worker->layout.nslices * sizeof *update->versions);
    update->versions = NULL;
    if (update->seq != 0) update->serial++;
    update->seq = update->kept = 0;
  }
}

MLFAB__INTERNAL void mlfab__push_free(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  for (uint32_t i = 0; i < MLFAB__WORKER_UPDATES; i++) {
    mlfab__outgoing *update = &worker->updates[i];
    mlfab__free(env, update->sources, update->source_room * sizeof *update->sources);
    mlfab__free(env, update->image, MLFAB__WORKER_PACK);
    mlfab__free(env, update->parts, worker->servers * sizeof *update->parts);
    memset(update, 0, sizeof *update);
  }
}
