/* spread.c - the server role: orders and routes large pulls, and runs spreads. See client.h and serve.c.
 *
 * With a scheduler, a large pull is held once its condition holds, until a plan places it:
 *
 *    waiting --(condition)--> FOR_PLAN --(PLAN)--> FOR_TURN --(its turn)--> GOES --(last byte)--> over
 *                              |     |                ^
 *                              |     |                +--(SPREAD_FAIL, silence, distributor lost)--+
 *                              |     +--(PLAN, one of a row)--> member of a spread ----------------+
 *                              |                                   +--(PULL_DONE)--> over
 *                              +--(scheduler lost)--> GOES
 *
 * Turns follow the order of places. One placed pull is sent at a time if its reader's link is known to carry as much as
 * the server's. Otherwise SPREAD_MOVING pulls are sent, so that a slow reader leaves capacity to another, and more
 * while the readers' links together carry less than the server's. A pull that has sent nothing for half a heartbeat
 * does not count, so a stalled reader delays the next pull at most that long. A pull that has begun is not stopped. A
 * placed pull lends only a limited number of bytes; otherwise the transport's queues would decide the order.
 *
 * A spread is a pull of the server's own, in a slot of the distributor's worker, which forwards it to the
 * members. They keep their slots until PULL_DONE. While the spread is sent, its members wait; it has failed
 * when the distributor's link took nothing for 3 heartbeats. Once it is sent, a member waits as long as
 * forwarding may take if the distributor's links are four times slower than the server's, and 4 heartbeats
 * after the last news. Then, or when the distributor gives up or is lost, the server answers the member
 * directly, at its place. A distributor may have become slow while the server's own link is idle: then the
 * server takes overdue members back earlier, the last one first.
 *
 * Attempt numbers ascend over all pulls of the server together: a worker that lost its link repeats its request, and
 * frames that the former distributor still sends must be older than every later route. For the same reason the server
 * announces direct answers of large pulls, once there have been spreads.
 *
 * Invariants. (1) An announced pull is reported when it is over, as long as the scheduler lives. (2) The
 * link of a member's distributor has stood since SPREAD. (3) A spread has members. (4) Of two pulls that
 * wait for their turn, the one with the smaller place gets it first.
 *
 * Source: MLfabric §10.3. Departs: cuts through. */
#include "client.h"

enum { SPREAD_MOVING = 2 };

/* Tells the worker the new route; it ignores frames of older routes. */
static void spread_via(mlfab__server *server, mlfab__server_pull *pull, uint32_t aggregator) {
  pull->aggregator = aggregator;
  server->sched->spreads++;
  pull->attempt = (uint32_t)server->sched->spreads;
  mlfab__pull_via via = {pull->request, pull->attempt, aggregator};
  MLFAB__POST(&server->port, pull->worker, MLFAB__PULL_VIA, pull_via, &via);
}

/* The spread has made progress: restarts its members' patience. */
static void spread_touch(mlfab__server *server, uint64_t spread) {
  for (mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (pull->spread == spread) pull->progress_ns = mlfab__max(pull->progress_ns, server->now_ns);
  }
}

MLFAB__INTERNAL void mlfab__spread_turns(mlfab__server *server) {
  for (int more = server->sched->places > 0; more;) {
    mlfab__server_pull *next = NULL;
    uint32_t moving = 0, unknown = 0;
    double taking = 0.0;
    for (mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
      if (pull->place == 0) continue;
      if (pull->held == MLFAB__PULL_FOR_TURN && (!next || pull->place < next->place)) next = pull;
      uint64_t idle_ns = server->now_ns - pull->progress_ns;
      if (!mlfab__server_goes(pull) || idle_ns >= server->heartbeat_ns / 2) continue;
      double in = server->peers[pull->worker].link_in;
      taking += in > 0.0 ? in : 0.0;
      unknown += !(in > 0.0);
      moving++;
    }
    double out = server->sched->own.out;
    int fills = out > 0.0 && taking >= 0.95 * out;
    more = next && !fills && (moving < SPREAD_MOVING || (out > 0.0 && unknown == 0));
    if (!more) return;
    mlfab__serve_begin(server, next);
    if (next->request & MLFAB__SPREAD_BIT) spread_touch(server, next->request);
  }
}

/* The server answers a member itself. */
static void spread_direct(mlfab__server *server, mlfab__server_pull *pull) {
  pull->spread = 0;
  pull->held = MLFAB__PULL_FOR_TURN;
  server->stats->spreads_failed++;
  spread_via(server, pull, MLFAB__NO_NODE);
}

/* A member has left a spread. If it was the last, ends the spread, and tells the distributor unless all of it was sent;
 * with `tell` in any case. */
static void spread_dissolve(mlfab__server *server, uint32_t aggregator, uint64_t spread, int tell) {
  for (const mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (pull->spread == spread) return;
  }
  mlfab__server_pull *own = mlfab__serve_find(server, aggregator, spread);
  if (own) mlfab__serve_end(server, own);
  if (own || tell)
    mlfab__serve_fail(server, aggregator, spread, MLFAB_ERR_CANCELLED,
                      "nobody waits for it any more");
}

/* Answers all members of this distributor directly: of one spread, or (0) of all. */
static void spread_abandon(mlfab__server *server, uint32_t aggregator, uint64_t spread) {
  for (mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (pull->spread != 0 && pull->aggregator == aggregator &&
        (spread == 0 || pull->spread == spread))
      spread_direct(server, pull);
  }
}

/* Called when the spread is sent: computes when each member should have it at the latest, two at a time. */
static void spread_handed_over(mlfab__server *server, const mlfab__server_pull *own) {
  for (mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (pull->spread != own->request) continue;
    /* progress_ns was set when the spread began; the place tells how many members are before it. */
    uint64_t took_ns = server->now_ns - mlfab__min(pull->progress_ns, server->now_ns);
    uint64_t before = pull->place - own->place - 1;
    pull->progress_ns = server->now_ns + 2 * (before + 2) * took_ns;
    pull->expect_ns = server->now_ns + (before + 2) * took_ns + server->heartbeat_ns / 4;
  }
}

static void spread_announce(mlfab__server *server, const mlfab__server_pull *pull) {
  mlfab__announce announce;
  memset(&announce, 0, sizeof announce);
  announce.kind = MLFAB__TRANSFER_PULL;
  announce.worker = pull->worker;
  announce.id = pull->request;
  announce.bytes = pull->bytes;
  announce.shape = mlfab__report_shape(pull->segments, pull->segments_used);
  announce.members = announce.parts = 1;
  mlfab__report_announce(server, &announce);
}

static uint32_t spread_frames(const mlfab__server *server, const mlfab__server_pull *pull) {
  uint32_t frames = 0, slice;
  for (uint32_t i = 0; i < pull->segments_used; i++) {
    const mlfab__segment *segment = &pull->segments[i];
    for (uint64_t at = 0; at < segment->bytes; frames++)
      at += mlfab__serve_cut(server, segment, at, pull->chunk, &slice);
  }
  return frames;
}

static int spread_alike(const mlfab__server_pull *a, const mlfab__server_pull *b) {
  return a->segments_used == b->segments_used &&
         memcmp(a->segments, b->segments, a->segments_used * sizeof *a->segments) == 0;
}

/* Makes placed pulls, all behind `place`, members of a spread. They are answered directly if the
 * distributor is gone or has no free slot. */
static void spread_begin(mlfab__server *server, uint32_t aggregator, uint64_t place,
                         mlfab__spread_member *members, uint32_t n) {
  if (aggregator == MLFAB__NO_NODE || !server->peers[aggregator].connected) return;
  int code;
  const mlfab__server_pull *first =
      mlfab__serve_find(server, members[0].worker, members[0].request);
  mlfab__server_pull *own = mlfab__serve_slot(server, aggregator, first->segments_used, 1, &code);
  if (!own) return;
  mlfab__serve_fill(server, aggregator, own, MLFAB__SPREAD_BIT | ++server->sched->spreads,
                    first->segments, first->segments_used, first->bytes);
  own->held = MLFAB__PULL_FOR_TURN;
  own->chunk = mlfab__port_chunk(&server->port, aggregator, server->config->chunk_bytes);
  own->place = place;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__server_pull *pull = mlfab__serve_find(server, members[i].worker, members[i].request);
    pull->held = MLFAB__PULL_GOES;
    pull->spread = own->request;
    spread_via(server, pull, aggregator);
    members[i].attempt = pull->attempt;
  }
  mlfab__spread spread = {own->request, own->bytes, spread_frames(server, own),
                          server->sched->schedule.whole, n};
  server->port.post(server->port.self, aggregator, MLFAB__SPREAD, server->sched->meta,
                    mlfab__encode_spread(server->sched->meta, &spread, members));
}

/* Places the pulls of one row of a plan that still wait for it, and spreads them if possible. */
static void spread_row(mlfab__server *server, const mlfab__plan_entry *row, uint32_t n) {
  mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  const mlfab__server_pull *first = NULL;
  uint32_t count = 0;
  uint64_t place = ++server->sched->places;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__server_pull *pull = mlfab__serve_find(server, row[i].worker, row[i].id);
    if (!pull || pull->held != MLFAB__PULL_FOR_PLAN) continue; /* ended meanwhile */
    pull->held = MLFAB__PULL_FOR_TURN;
    pull->place = ++server->sched->places;
    if (!first) first = pull;
    if (count == MLFAB__GROUP_MEMBERS_MAX || !spread_alike(first, pull)) continue;
    mlfab__spread_member member = {row[i].id, row[i].worker,
                                   server->peers[row[i].worker].incarnation, 0};
    members[count++] = member;
  }
  if (count >= 2 && row[0].group != 0)
    spread_begin(server, row[0].aggregator, place, members, count);
}

/* Do entries i and i + 1 belong to one spread? */
static int spread_in_row(const mlfab__plan_entry *entries, uint32_t i) {
  return entries[i].group != 0 && entries[i + 1].kind == MLFAB__TRANSFER_PULL &&
         entries[i + 1].group == entries[i].group &&
         entries[i + 1].aggregator == entries[i].aggregator;
}

MLFAB__INTERNAL void mlfab__spread_plan(mlfab__server *server, const mlfab__plan_entry *entries,
                                        uint32_t n) {
  for (uint32_t i = 0, next; i < n; i = next) {
    next = i + 1;
    if (entries[i].kind != MLFAB__TRANSFER_PULL) continue;
    while (next < n && spread_in_row(entries, next - 1)) next++;
    spread_row(server, &entries[i], next - i);
  }
  mlfab__spread_turns(server);
}

MLFAB__INTERNAL int mlfab__spread_waits(const mlfab__server *server) {
  for (const mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (pull->held == MLFAB__PULL_FOR_PLAN) return 1;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__spread_announce_all(mlfab__server *server) {
  for (const mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (pull->held == MLFAB__PULL_FOR_PLAN) spread_announce(server, pull);
  }
}

MLFAB__INTERNAL void mlfab__spread_unschedule(mlfab__server *server) {
  for (mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (pull->held == MLFAB__PULL_FOR_PLAN) mlfab__serve_begin(server, pull);
  }
}

static void spread_done(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame) {
  mlfab__pull_done done;
  if (mlfab__port_refuse(&server->port, worker, frame,
                         mlfab__decode_pull_done(frame->meta, frame->meta_bytes, &done) ||
                             (done.request & MLFAB__SPREAD_BIT) != 0))
    return;
  /* Whatever its present route: the worker has all of it, perhaps from a former distributor. */
  mlfab__server_pull *pull = mlfab__serve_find(server, worker, done.request);
  if (!pull) return;
  uint64_t spread = pull->spread;
  server->stats->pulls_answered++;
  if (spread != 0) server->stats->spreads_answered++;
  mlfab__serve_over(server, pull, 0);
  mlfab__spread_turns(server);
}

static void spread_fail_frame(mlfab__server *server, uint32_t aggregator,
                              const mlfab__frame_in *frame) {
  mlfab__spread_fail fail;
  if (mlfab__port_refuse(&server->port, aggregator, frame,
                         mlfab__decode_spread_fail(frame->meta, frame->meta_bytes, &fail) ||
                             (fail.request & MLFAB__SPREAD_BIT) == 0 ||
                             (fail.worker >= server->workers && fail.worker != MLFAB__NO_NODE)))
    return;
  if (fail.worker == MLFAB__NO_NODE) {
    spread_abandon(server, aggregator, fail.request);
  } else {
    mlfab__server_pull *pull = mlfab__serve_find(server, fail.worker, fail.member_request);
    if (!pull || pull->spread != fail.request || pull->aggregator != aggregator) return;
    spread_direct(server, pull);
  }
  spread_dissolve(server, aggregator, fail.request, 0);
  mlfab__spread_turns(server);
}

/* Checks whether a spread, or a member of one, must be given up. */
static void spread_tick_one(mlfab__server *server, mlfab__server_pull *pull) {
  uint64_t beat = server->heartbeat_ns;
  uint64_t silent_ns = server->now_ns - mlfab__min(pull->progress_ns, server->now_ns);
  if (pull->spread == 0) {
    uint64_t spread = pull->request;
    if (pull->held != MLFAB__PULL_GOES ||
        !mlfab__port_stalled(&server->port, pull->worker, 1, pull->progress_ns, server->now_ns,
                             3 * beat, MLFAB__PORT_STANDS_BEATS * beat))
      return;
    spread_abandon(server, pull->worker, spread);
    spread_dissolve(server, pull->worker, spread, 0);
  } else if (silent_ns >= 4 * beat && !mlfab__serve_find(server, pull->aggregator, pull->spread)) {
    uint64_t spread = pull->spread;
    uint32_t aggregator = pull->aggregator;
    spread_direct(server, pull);
    spread_dissolve(server, aggregator, spread, 1);
  }
}

/* Answers the last overdue member directly, while the out-link is idle. */
static void spread_take_back(mlfab__server *server) {
  mlfab__server_pull *last = NULL;
  for (mlfab__server_pull *pull = server->serve.first; pull; pull = pull->next) {
    if (pull->place == 0) continue;
    if (mlfab__server_goes(pull) || pull->held == MLFAB__PULL_FOR_TURN) return;
    if (pull->spread == 0 || pull->expect_ns == 0 || pull->expect_ns > server->now_ns) continue;
    if (!last || pull->place > last->place) last = pull;
  }
  if (!last) return;
  mlfab__spread_fail skip = {last->spread, last->request, last->worker, 0};
  uint32_t aggregator = last->aggregator;
  MLFAB__POST(&server->port, aggregator, MLFAB__SPREAD_FAIL, spread_fail, &skip);
  uint64_t spread = last->spread;
  spread_direct(server, last);
  spread_dissolve(server, aggregator, spread, 1);
  mlfab__spread_turns(server);
}

MLFAB__INTERNAL void mlfab__spread_tick(mlfab__server *server) {
  mlfab__serve_walk walk = {NULL, 0};
  for (mlfab__server_pull *pull; (pull = mlfab__serve_each(server, &walk)) != NULL;) {
    if ((pull->request & MLFAB__SPREAD_BIT) || pull->spread != 0) spread_tick_one(server, pull);
  }
  mlfab__spread_turns(server);
  if (server->sched->spreads > 0) spread_take_back(server);
}

/* --- hooks of serve.c --- */

MLFAB__INTERNAL int mlfab__spread_hold(mlfab__server *server, mlfab__server_pull *pull) {
  if (!mlfab__report_plans(server, pull->bytes)) return 0;
  pull->held = MLFAB__PULL_FOR_PLAN;
  spread_announce(server, pull);
  return 1;
}

MLFAB__INTERNAL void mlfab__spread_goes(mlfab__server *server, mlfab__server_pull *pull) {
  int own = (pull->request & MLFAB__SPREAD_BIT) != 0;
  if (!own && pull->attempt == 0 && server->sched->spreads > 0 &&
      pull->bytes > server->config->eager_bytes)
    spread_via(server, pull, MLFAB__NO_NODE);
}

MLFAB__INTERNAL void mlfab__spread_left(mlfab__server *server, const mlfab__server_pull *pull,
                                        uint64_t taken) {
  uint64_t left = mlfab__report_left(pull), part = pull->bytes / 4 + 1;
  if (left / part != (left + taken) / part)
    mlfab__report_over(server, MLFAB__TRANSFER_PULL, MLFAB__NO_NODE, 0, 0);
}

MLFAB__INTERNAL void mlfab__spread_out(mlfab__server *server, mlfab__server_pull *own) {
  spread_handed_over(server, own);
  mlfab__serve_end(server, own);
  mlfab__report_over(server, MLFAB__TRANSFER_PULL, MLFAB__NO_NODE, 0, 0);
}

MLFAB__INTERNAL void mlfab__spread_over(mlfab__server *server, const mlfab__server_pull *was,
                                        int code) {
  if (was->held == MLFAB__PULL_FOR_PLAN || was->place != 0)
    mlfab__report_over(server, MLFAB__TRANSFER_PULL, was->worker, was->request, code);
  if (was->spread == 0) return;
  if (code == 0) spread_touch(server, was->spread);
  if (was->aggregator != was->worker || code != MLFAB_ERR_PEER_CLOSED)
    spread_dissolve(server, was->aggregator, was->spread, 0);
}

MLFAB__INTERNAL void mlfab__spread_stopped(mlfab__server *server, uint32_t worker) {
  spread_abandon(server, worker, 0);
  mlfab__spread_turns(server);
}

MLFAB__INTERNAL int mlfab__spread_frame(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame) {
  if (frame->type == MLFAB__PULL_DONE) {
    spread_done(server, worker, frame);
  } else if (frame->type == MLFAB__SPREAD_FAIL) {
    spread_fail_frame(server, worker, frame);
  } else {
    return 0;
  }
  return 1;
}
