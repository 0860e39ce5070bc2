/* hops.c - a worker's routes through other workers' nodes: takes VIA, sends and receives there. See hops.h. */
#include "hops.h"

static mlfab__hops *hops_of(const mlfab__worker *worker) {
  return (mlfab__hops *)(void *)worker->routes;
}

static mlfab__hop_part *hops_part(const mlfab__worker *worker, const mlfab__outgoing *update,
                                  uint32_t server) {
  size_t slot = (size_t)(update - worker->updates);
  mlfab__hop_part *part = &hops_of(worker)->parts[slot * worker->servers + server];
  if (part->serial != update->serial + 1)
    *part = (mlfab__hop_part){.serial = update->serial + 1, .aggregator = MLFAB__NO_NODE};
  return part;
}

static mlfab__hop_pull *hops_pull(const mlfab__worker *worker, const mlfab__fetch *fetch,
                                  uint32_t server) {
  size_t slot = (size_t)(fetch - worker->fetches);
  mlfab__hop_pull *pull = &hops_of(worker)->pulls[slot * worker->servers + server];
  if (pull->request != fetch->request)
    *pull = (mlfab__hop_pull){.request = fetch->request, .hop = MLFAB__NO_NODE};
  return pull;
}

/* Returns the update with this number, or NULL. */
static mlfab__outgoing *hops_find(mlfab__worker *worker, uint64_t seq) {
  for (uint32_t i = 0; i < worker->norder; i++) {
    mlfab__outgoing *update = &worker->updates[worker->order[i]];
    if (update->seq == seq) return update;
  }
  return NULL;
}

/* --- pushes: questions of the worker --- */

/* The link to an aggregator may carry the parts of several servers, and a part may leave it and return: the token
 * contains the server and `way`. Less than 2^60. */
static uint64_t hops_token(const mlfab__worker *worker, const mlfab__outgoing *update,
                           uint32_t server) {
  return mlfab__push_token(worker, update) | (uint64_t)(server & 0xffffu) << 32 |
         (uint64_t)(hops_part(worker, update, server)->way & 0xfffu) << 48;
}

/* A deterministic round adds in the order of ranks, so there is nothing to plan. */
static void hops_plan(const mlfab__worker *worker, mlfab__outgoing *update) {
  int plans = !worker->define.options.deterministic && !(update->flags & MLFAB__PUSH_INIT);
  for (uint32_t s = 0; s < worker->servers; s++) {
    mlfab__part *part = &update->parts[s];
    part->planned = plans && part->bytes > worker->config->eager_bytes;
    /* The scheduler places, or drops, each one separately. */
    if (part->planned) update->mergeable = 0;
  }
}

static uint32_t hops_parts(const mlfab__worker *worker, const mlfab__outgoing *update) {
  uint32_t n = 0;
  for (uint32_t s = 0; s < worker->servers; s++)
    n += update->parts[s].planned && update->parts[s].state != MLFAB__PART_DECIDED;
  return n;
}

static uint32_t hops_by(const mlfab__worker *worker, const mlfab__outgoing *update,
                        uint32_t server) {
  return hops_part(worker, update, server)->aggregator;
}

static uint32_t hops_lent(const mlfab__worker *worker, const mlfab__outgoing *update,
                          uint32_t server) {
  return hops_part(worker, update, server)->lent;
}

static uint32_t hops_chunk(const mlfab__worker *worker, uint32_t aggregator) {
  return mlfab__port_chunk(&hops_of(worker)->port, aggregator, worker->config->chunk_bytes);
}

/* Ends a part's route through the aggregator: takes back all that its link still has. If the worker waited instead, a
 * stalled aggregator would hold the caller's buffers after the update has gone another way. */
static void hops_leave(mlfab__worker *worker, const mlfab__outgoing *update, uint32_t server) {
  const mlfab__port *port = &hops_of(worker)->port;
  mlfab__hop_part *part = hops_part(worker, update, server);
  if (part->lent > 0)
    port->detach(port->self, part->aggregator, hops_token(worker, update, server));
  part->lent = 0;
  part->way++;
  part->aggregator = MLFAB__NO_NODE;
  part->adopted = 0;
}

/* Sends the part on this route from now on, from its first byte. */
static void hops_route(mlfab__worker *worker, mlfab__outgoing *update, uint32_t server,
                       uint64_t group, uint32_t aggregator) {
  const mlfab__port *port = &hops_of(worker)->port;
  mlfab__hop_part *part = hops_part(worker, update, server);
  if (part->aggregator != aggregator) hops_leave(worker, update, server);
  mlfab__push_rewind(&update->parts[server]);
  part->aggregator = aggregator;
  part->group = group;
  if (aggregator != MLFAB__NO_NODE) port->ready(port->self, aggregator);
}

/* The server wants it directly and sent no VIA, so an adopted route belongs to a stream that was reset. */
static int hops_direct(mlfab__worker *worker, mlfab__outgoing *update, uint32_t server) {
  const mlfab__hop_part *part = hops_part(worker, update, server);
  if (part->adopted) hops_route(worker, update, server, part->group, MLFAB__NO_NODE);
  return part->aggregator == MLFAB__NO_NODE;
}

/* --- pushes: frames --- */

static void hops_via(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__via via;
  if (mlfab__port_refuse(
          &worker->port, server, frame,
          mlfab__decode_via(frame->meta, frame->meta_bytes, &via) || via.group == 0 ||
              (via.aggregator >= worker->config->workers && via.aggregator != MLFAB__NO_NODE)))
    return;
  mlfab__outgoing *update = hops_find(worker, via.seq);
  if (via.generation != worker->streams[server].generation || !update || update->withdrawn) return;
  if (update->parts[server].state != MLFAB__PART_ANNOUNCED) return;
  if (!update->parts[server].planned) {
    worker->port.drop(worker->port.self, server, MLFAB_ERR_FRAME,
                      "a VIA for an update that is not planned");
    return;
  }
  mlfab__hop_part *part = hops_part(worker, update, server);
  /* A server's frames come in order; only an aggregator's grant can overtake them. */
  if (part->adopted && via.group < part->group) return;
  int known = via.group == part->group && via.aggregator == part->aggregator;
  part->adopted = 0;
  if (!known) hops_route(worker, update, server, via.group, via.aggregator);
}

static void hops_granted(mlfab__hops *hops, uint32_t aggregator, const mlfab__frame_in *frame) {
  mlfab__worker *worker = hops->worker;
  mlfab__hop_grant grant;
  if (mlfab__port_refuse(&hops->port, aggregator, frame,
                         mlfab__decode_hop_grant(frame->meta, frame->meta_bytes, &grant) ||
                             grant.group == 0 || grant.server >= worker->servers))
    return;
  mlfab__outgoing *update = hops_find(worker, grant.seq);
  if (!update || update->withdrawn || !worker->streams[grant.server].up) return;
  mlfab__part *sent = &update->parts[grant.server];
  mlfab__hop_part *part = hops_part(worker, update, grant.server);
  if (sent->state != MLFAB__PART_ANNOUNCED || grant.group < part->group) return;
  if (!sent->planned) {
    hops->port.drop(hops->port.self, aggregator, MLFAB_ERR_FRAME,
                    "a HOP_GRANT for an update that is not planned");
    return;
  }
  if (grant.group > part->group) {
    hops_route(worker, update, grant.server, grant.group, aggregator);
    part->adopted = 1;
  }
  if (part->aggregator != aggregator) return;
  sent->granted = mlfab__min(sent->bytes, mlfab__max(sent->granted, grant.upto));
  hops->port.ready(hops->port.self, aggregator);
}

/* Does an update go through this aggregator? */
static int hops_push_wanted(const mlfab__worker *worker, uint32_t aggregator) {
  for (uint32_t i = 0; i < worker->norder; i++) {
    const mlfab__outgoing *update = &worker->updates[worker->order[i]];
    for (uint32_t s = 0; s < worker->servers; s++) {
      if (update->parts[s].state == MLFAB__PART_ANNOUNCED &&
          hops_by(worker, update, s) == aggregator)
        return 1;
    }
  }
  return 0;
}

static void hops_push_lost(mlfab__worker *worker, uint32_t aggregator, uint64_t now_ns) {
  mlfab__outgoing *update;
  for (uint32_t i = 0; i < worker->norder; i += update->seq != 0) {
    update = &worker->updates[worker->order[i]];
    for (uint32_t s = 0; s < worker->servers; s++) {
      mlfab__hop_part *part = hops_part(worker, update, s);
      if (part->aggregator != aggregator) continue;
      part->lent = 0;
      part->way++;
      if (update->parts[s].state == MLFAB__PART_ANNOUNCED) mlfab__push_rewind(&update->parts[s]);
    }
    mlfab__push_settle(worker, update, now_ns);
  }
}

MLFAB__INTERNAL int mlfab__hops_next(mlfab__hops *hops, mlfab__at at, mlfab__frame_out *frame) {
  mlfab__worker *worker = hops->worker;
  for (uint32_t i = 0; i < worker->norder; i++) {
    mlfab__outgoing *update = &worker->updates[worker->order[i]];
    for (uint32_t s = 0; s < worker->servers; s++) {
      const mlfab__part *part = &update->parts[s];
      if (part->state != MLFAB__PART_ANNOUNCED || part->sent >= part->granted ||
          hops_by(worker, update, s) != at.peer)
        continue;
      mlfab__hop_chunk chunk = {hops_part(worker, update, s)->group, update->seq, part->sent,
                                part->bytes, s};
      frame->type = MLFAB__HOP_CHUNK;
      frame->meta_bytes = mlfab__encode_hop_chunk(frame->meta, &chunk);
      frame->note[0] = s;
      if (mlfab__push_bulk(worker, &hops->port, at.peer, update, s, hops_token(worker, update, s),
                           frame))
        return 1;
    }
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__hops_taken(mlfab__hops *hops, mlfab__at at,
                                       const mlfab__frame_out *frame) {
  mlfab__worker *worker = hops->worker;
  uint32_t server = (uint32_t)frame->note[0];
  mlfab__outgoing *update = &worker->updates[frame->slot];
  mlfab__part *part = &update->parts[server];
  assert(hops_by(worker, update, server) == at.peer);
  (void)at;
  part->sent += frame->bulk_bytes;
  update->codec->advance(worker, update, server, part, frame->bulk_bytes);
  if (frame->token != 0) hops_part(worker, update, server)->lent++;
}

MLFAB__INTERNAL void mlfab__hops_returned(mlfab__hops *hops, mlfab__at at, uint64_t token) {
  mlfab__worker *worker = hops->worker;
  uint32_t slot = (uint32_t)((token & 0xff) - 1), server = (uint32_t)(token >> 32 & 0xffff);
  if (slot >= MLFAB__WORKER_UPDATES || server >= worker->servers) return;
  mlfab__outgoing *update = &worker->updates[slot];
  /* A bulk that was taken back may still be reported: its route, or its update, has ended then. */
  if (update->seq == 0 || hops_token(worker, update, server) != token) return;
  mlfab__hop_part *part = hops_part(worker, update, server);
  if (part->aggregator != at.peer || part->lent == 0) return;
  part->lent--;
  mlfab__push_settle(worker, update, at.now_ns);
  mlfab__worker_advance(worker, at.now_ns);
}

/* --- pulls --- */

static uint32_t hops_pull_by(const mlfab__worker *worker, const mlfab__fetch *fetch,
                             uint32_t server) {
  return hops_pull(worker, fetch, server)->hop;
}

/* The number of the last route stays: the server's next numbers are larger, and frames that the former hop still sends
 * are void. */
static void hops_pull_leave(mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t server) {
  mlfab__hop_pull *pull = hops_pull(worker, fetch, server);
  pull->hop = MLFAB__NO_NODE;
  pull->begun = 0;
}

static void hops_pull_route(mlfab__hops *hops, mlfab__hop_pull *pull, uint32_t attempt,
                            uint32_t hop) {
  pull->attempt = attempt;
  pull->hop = hop;
  pull->begun = 0;
  if (hop != MLFAB__NO_NODE) hops->port.ready(hops->port.self, hop);
}

static void hops_pull_via(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__pull_via via;
  if (mlfab__port_refuse(
          &worker->port, server, frame,
          mlfab__decode_pull_via(frame->meta, frame->meta_bytes, &via) || via.attempt == 0 ||
              (via.aggregator >= worker->config->workers && via.aggregator != MLFAB__NO_NODE)))
    return;
  const mlfab__fetch *fetch = mlfab__pull_find(worker, via.request);
  if (!fetch || !fetch->parts[server].waiting) return;
  mlfab__hop_pull *pull = hops_pull(worker, fetch, server);
  /* If the known route is as new, the hop was faster. */
  if (via.attempt > pull->attempt)
    hops_pull_route(hops_of(worker), pull, via.attempt, via.aggregator);
}

static void hops_model(mlfab__hops *hops, uint32_t aggregator, const mlfab__frame_in *frame,
                       uint64_t now_ns) {
  mlfab__worker *worker = hops->worker;
  mlfab__hop_model in;
  if (mlfab__port_refuse(&hops->port, aggregator, frame,
                         mlfab__decode_hop_model(frame->meta, frame->meta_bytes, &in) ||
                             in.server >= worker->servers))
    return;
  mlfab__fetch *fetch = mlfab__pull_find(worker, in.request);
  if (!fetch || !fetch->parts[in.server].waiting) return;
  mlfab__hop_pull *pull = hops_pull(worker, fetch, in.server);
  if (in.attempt < pull->attempt) return;
  if (in.attempt > pull->attempt) hops_pull_route(hops, pull, in.attempt, aggregator);
  if (pull->hop != aggregator) return;
  mlfab__model model = {in.request, in.offset, in.bytes, in.version,
                        in.commit,  in.slice,  in.flags, in.epoch};
  pull->begun = 1;
  int code = mlfab__pull_take(worker, fetch, in.server, &model, frame);
  if (code) {
    hops->port.drop(hops->port.self, aggregator, code,
                    code == MLFAB_ERR_MEMORY ? "out of memory for packets"
                                             : "a HOP_MODEL frame that was not asked for");
    return;
  }
  if (!(in.flags & MLFAB__MODEL_LAST)) return;
  mlfab__pull_done done = {in.request};
  MLFAB__POST(&worker->port, in.server, MLFAB__PULL_DONE, pull_done, &done);
  mlfab__pull_part_done(worker, fetch, in.server, now_ns);
}

/* Returns the first waiting part of a pull that this hop forwards, from number *at_p on; NULL: none. */
static mlfab__hop_pull *hops_pull_next(const mlfab__worker *worker, uint32_t hop, uint32_t *at_p) {
  for (; *at_p < MLFAB__WORKER_PULLS * worker->servers; ++*at_p) {
    const mlfab__fetch *fetch = &worker->fetches[*at_p / worker->servers];
    uint32_t server = *at_p % worker->servers;
    if (fetch->request == 0 || !fetch->parts[server].waiting) continue;
    mlfab__hop_pull *pull = hops_pull(worker, fetch, server);
    if (pull->hop == hop) return pull;
  }
  return NULL;
}

/* --- all frames of a link --- */

static int hops_server_frame(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame) {
  if (frame->type == MLFAB__VIA) hops_via(worker, server, frame);
  if (frame->type == MLFAB__PULL_VIA) hops_pull_via(worker, server, frame);
  return frame->type == MLFAB__VIA || frame->type == MLFAB__PULL_VIA;
}

MLFAB__INTERNAL void mlfab__hops_frame(mlfab__hops *hops, mlfab__at at,
                                       const mlfab__frame_in *frame) {
  switch (frame->type) {
    case MLFAB__HOP_GRANT:
      hops_granted(hops, at.peer, frame);
      break;
    case MLFAB__HOP_MODEL:
      hops_model(hops, at.peer, frame, at.now_ns);
      break;
    default:
      hops->port.drop(hops->port.self, at.peer, MLFAB_ERR_FRAME,
                      "a frame that no aggregator sends");
  }
  mlfab__worker_advance(hops->worker, at.now_ns);
}

MLFAB__INTERNAL void mlfab__hops_lost(mlfab__hops *hops, mlfab__at at) {
  mlfab__worker *worker = hops->worker;
  mlfab__hop_pull *pull;
  /* Some of it may be lost: the worker ignores the rest of this route, and the server chooses another route. If nothing
   * had come yet, the hop may still begin on a new link. */
  for (uint32_t i = 0; (pull = hops_pull_next(worker, at.peer, &i)) != NULL; i++)
    if (pull->begun) pull->hop = MLFAB__NO_NODE;
  hops_push_lost(worker, at.peer, at.now_ns);
  mlfab__worker_advance(worker, at.now_ns);
}

MLFAB__INTERNAL int mlfab__hops_wants(const mlfab__hops *hops, uint32_t aggregator) {
  uint32_t first = 0;
  return hops_push_wanted(hops->worker, aggregator) ||
         hops_pull_next(hops->worker, aggregator, &first) != NULL;
}

static const mlfab__worker_routes hops_routes = {
    .frame = hops_server_frame,
    .plan = hops_plan,
    .parts = hops_parts,
    .direct = hops_direct,
    .by = hops_by,
    .lent = hops_lent,
    .chunk = hops_chunk,
    .leave = hops_leave,
    .pull_by = hops_pull_by,
    .pull_leave = hops_pull_leave,
};

MLFAB__INTERNAL int mlfab__hops_begin(mlfab__hops *hops, mlfab__worker *worker) {
  hops->routes = hops_routes;
  hops->worker = worker;
  hops->parts = mlfab__alloc_array(worker->env, (size_t)MLFAB__WORKER_UPDATES * worker->servers,
                                   sizeof *hops->parts);
  hops->pulls = mlfab__alloc_array(worker->env, (size_t)MLFAB__WORKER_PULLS * worker->servers,
                                   sizeof *hops->pulls);
  if (!hops->parts || !hops->pulls) return MLFAB_ERR_MEMORY;
  worker->routes = &hops->routes;
  return 0;
}

MLFAB__INTERNAL void mlfab__hops_free(mlfab__hops *hops) {
  mlfab__worker *worker = hops->worker;
  if (!worker) return;
  worker->routes = NULL;
  mlfab__free(worker->env, hops->parts,
              (size_t)MLFAB__WORKER_UPDATES * worker->servers * sizeof *hops->parts);
  mlfab__free(worker->env, hops->pulls,
              (size_t)MLFAB__WORKER_PULLS * worker->servers * sizeof *hops->pulls);
}
