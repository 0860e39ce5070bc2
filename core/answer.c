/* answer.c - the server role: answering pulls. See server.h.
 *
 * A pull waits until the pull condition holds, then sends its stretches slice by slice: it pins the
 * blocks of a slice, so that all of them are of one version, and unpins them when their last byte
 * is handed to the transport. A reader that stalls, or a server short of spare blocks, unpins a
 * slice in the middle: the slice is begun again, at the version of that time.
 *
 * With a scheduler, a large pull is held once its condition holds, until a plan places it:
 *
 *    waiting --(condition)--> FOR_PLAN --(PLAN)--> FOR_TURN --(its turn)--> GOES --(last byte)--> over
 *                              |     |                ^
 *                              |     |                +--(SPREAD_FAIL, silence, distributor lost)--+
 *                              |     +--(PLAN, one of a row)--> member of a spread ----------------+
 *                              |                                   +--(PULL_DONE)--> over
 *                              +--(no scheduler any more)--> GOES
 *
 * Turns are given in the order of places. One placed pull goes at a time when its reader's link is
 * known to carry what the server's does. Else ANSWER_MOVING do, so that a slow reader leaves the
 * link to another, and more while the readers' links together carry less than the server's. One
 * that has handed out nothing for half a heartbeat does not count: who does not read delays the
 * next for no longer than that. What has begun is not taken back. A placed pull lends only so much
 * at a time, or the transport's queues would make the order.
 *
 * A spread is a pull of the server's own, in a slot of the distributor's worker, which hands it on
 * to the members. They keep their slots until PULL_DONE. While the spread goes out they wait for
 * it; when nothing was taken on its link for 3 heartbeats it has failed. When it is out, a member
 * waits as long as handing on may take if the distributor's links are four times slower than the
 * server's, and 4 heartbeats from the last news on. Then, or when the distributor gives up or is
 * lost, it is answered directly, at its place. A distributor may have become slow while the
 * server's own link stands idle: then members that should have been served by now are taken back
 * sooner, the last one first.
 *
 * Attempts ascend over all pulls of the server and not per pull: a worker that lost its link asks
 * again under the same request, and what its former distributor still sends must be older than
 * every way told from then on. For the same reason a large pull is told that it is answered
 * directly, once there have been spreads.
 *
 * Invariants. (1) What was announced is reported when it is over, as long as its scheduler lives.
 * (2) Members have a distributor whose link has stood since SPREAD. (3) A spread has members. (4)
 * Of two pulls that wait for their turn, the one with the smaller place gets it first.
 *
 * Source: FluentPS Alg. 1, lines of the pull request; MLfabric §10.3. Departs: cuts through. */
#include "server.h"

#include "reduce.h"

#include <stdio.h>

enum {
  ANSWER_SLOTS = MLFAB__SERVER_PULLS + MLFAB__SERVER_SPREADS,
  ANSWER_MOVING = 2,
  ANSWER_LENT = 1 << 20 /* bytes that a placed pull has lent to its link at most, or two chunks */
};

/* Why a pull does not go, in mlfab__server_pull.held. */
enum { ANSWER_GOES = 0, ANSWER_FOR_PLAN, ANSWER_FOR_TURN };

static void answer_unpin(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->slice == MLFAB__NO_BLOCK) return;
  uint32_t n = server->store.slices[pull->slice].count;
  for (uint32_t i = 0; i < n; i++) mlfab__store_unref(&server->store, pull->pinned[i]);
  pull->slice = MLFAB__NO_BLOCK;
}

static void answer_pin(mlfab__server *server, mlfab__server_pull *pull, uint32_t slice) {
  const mlfab__shard_slice *s = &server->store.slices[slice];
  for (uint32_t i = 0; i < s->count; i++) {
    pull->pinned[i] = server->store.w[s->first + i];
    mlfab__store_ref(&server->store, pull->pinned[i]);
  }
  pull->slice = slice;
  pull->version = s->version;
  pull->commit = mlfab__changed_label(s);
  pull->restart_segment = pull->segment;
  pull->restart_in_segment = pull->in_segment;
}

/* Gives the slice up in the middle, to begin it again. */
static void answer_restart(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->slice == MLFAB__NO_BLOCK) return;
  answer_unpin(server, pull);
  pull->segment = pull->restart_segment;
  pull->in_segment = pull->restart_in_segment;
  server->stats->pulls_restarted++;
}

MLFAB__INTERNAL void mlfab__answer_unpin(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0) answer_restart(server, pull);
    }
  }
}

/* Out of the buffer of the gate that it waits for. */
static void answer_unwait(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->waiting) server->waiting--;
  pull->waiting = 0;
}

static void answer_end(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->waiting) mlfab__lazy_remove(&server->gates[pull->gate].lazy, pull->tag);
  answer_unwait(server, pull);
  answer_unpin(server, pull);
  pull->request = pull->place = pull->spread = 0;
  pull->held = ANSWER_GOES;
  pull->attempt = 0;
}

/* The same, and the scheduler hears of it if it ever heard of the pull. */
static void answer_over(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull,
                        int code) {
  uint64_t request = pull->request;
  int known = pull->held == ANSWER_FOR_PLAN || pull->place != 0;
  answer_end(server, pull);
  if (known) mlfab__server_report(server, MLFAB__TRANSFER_PULL, worker, request, code);
}

static void answer_fail(mlfab__server *server, uint32_t worker, uint64_t request, int code,
                        const char *text) {
  mlfab__pull_fail fail;
  memset(&fail, 0, sizeof fail);
  fail.request = request;
  fail.code = code;
  fail.rank = MLFAB_NO_RANK;
  size_t n = strlen(text);
  memcpy(fail.text, text, n < sizeof fail.text ? n : sizeof fail.text - 1);
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  server->port.post(server->port.self, worker, MLFAB__PULL_FAIL, meta,
                    mlfab__encode_pull_fail(meta, &fail));
}

/* Tells who is waited for, so that a deadline can name it: AGAIN is not the end of the pull. */
static void answer_wait(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull) {
  const mlfab__gate *gate = &server->gates[pull->gate];
  mlfab_sync_state state;
  mlfab__pull_fail wait;
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  memset(&wait, 0, sizeof wait);
  wait.request = pull->request;
  wait.code = MLFAB_ERR_AGAIN;
  wait.rank = MLFAB_NO_RANK;
  mlfab__gate_state(server, gate, worker, pull->progress, &state);
  for (uint32_t w = server->workers; w-- > 0;) {
    const mlfab__server_peer *peer = &server->peers[w];
    if (!peer->dead && !peer->left && !peer->done && peer->pushed == state.slowest)
      wait.rank = (int32_t)w;
  }
  snprintf(
      wait.text, sizeof wait.text,
      "%s: this worker has pushed %llu updates, the fastest %llu, the slowest (worker %d) %llu; "
      "V_train is %llu, %u of %u have pushed the next",
      mlfab__sync_name(gate->sync.kind), (unsigned long long)pull->progress,
      (unsigned long long)state.fastest, (int)wait.rank, (unsigned long long)state.slowest,
      (unsigned long long)state.v_train, state.arrived, state.members);
  pull->progress_ns = server->now_ns;
  server->port.post(server->port.self, worker, MLFAB__PULL_FAIL, meta,
                    mlfab__encode_pull_fail(meta, &wait));
}

/* --- places and turns --- */

/* Bytes that were not handed to the transport yet. */
static uint64_t answer_left(const mlfab__server_pull *pull) {
  uint64_t left = 0;
  for (uint32_t i = pull->segment; i < pull->segments_used; i++) left += pull->segments[i].bytes;
  return left - pull->in_segment;
}

static int answer_goes(const mlfab__server_pull *pull) {
  return pull->request != 0 && !pull->waiting && pull->held == ANSWER_GOES && pull->spread == 0;
}

/* From now on only frames of this way count. */
static void answer_via(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull,
                       uint32_t aggregator) {
  uint8_t meta[32];
  pull->aggregator = aggregator;
  server->spreads++;
  pull->attempt = MLFAB__PLANTED(31) ? pull->attempt + 1 : (uint32_t)server->spreads;
  mlfab__pull_via via = {pull->request, pull->attempt, aggregator};
  server->port.post(server->port.self, worker, MLFAB__PULL_VIA, meta,
                    mlfab__encode_pull_via(meta, &via));
}

/* Answers from here. */
static void answer_begin(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull) {
  pull->held = ANSWER_GOES;
  pull->progress_ns = server->now_ns;
  int own = (pull->request & MLFAB__SPREAD_BIT) != 0;
  if (!own && pull->attempt == 0 && server->spreads > 0 &&
      pull->bytes > server->config->eager_bytes)
    answer_via(server, worker, pull, MLFAB__NO_NODE);
  server->port.ready(server->port.self, worker);
}

/* There is news of a spread: its members may wait on from here. */
static void answer_touch(mlfab__server *server, uint64_t spread) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0 && pull->spread == spread)
        pull->progress_ns = mlfab__max(pull->progress_ns, server->now_ns);
    }
  }
}

/* Those whose turn it is begin. */
static void answer_turns(mlfab__server *server) {
  for (int more = server->places > 0; more;) {
    mlfab__server_pull *next = NULL;
    uint32_t worker = 0, moving = 0, unknown = 0;
    double taking = 0.0;
    for (uint32_t w = 0; w < server->workers; w++) {
      for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
        mlfab__server_pull *pull = &server->peers[w].pulls[k];
        if (pull->request == 0 || pull->place == 0) continue;
        if (pull->held == ANSWER_FOR_TURN && (!next || pull->place < next->place)) {
          next = pull;
          worker = w;
        }
        uint64_t idle_ns = server->now_ns - pull->progress_ns;
        if (!answer_goes(pull) || idle_ns >= server->heartbeat_ns / 2) continue;
        double in = server->peers[w].link_in;
        taking += in > 0.0 ? in : 0.0;
        unknown += !(in > 0.0);
        moving++;
      }
    }
    double out = server->own.out;
    int fills = out > 0.0 && taking >= 0.95 * out;
    more = next && !fills && (moving < ANSWER_MOVING || (out > 0.0 && unknown == 0));
    if (!more) return;
    answer_begin(server, worker, next);
    if (next->request & MLFAB__SPREAD_BIT) answer_touch(server, next->request);
  }
}

MLFAB__INTERNAL uint64_t mlfab__answer_backlog(const mlfab__server *server) {
  uint64_t bytes = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
      const mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (answer_goes(pull) || (pull->request != 0 && pull->held == ANSWER_FOR_TURN))
        bytes += answer_left(pull);
    }
  }
  return bytes;
}

/* --- spreads --- */

static mlfab__server_pull *answer_find(mlfab__server *server, uint32_t worker, uint64_t request) {
  for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
    mlfab__server_pull *pull = &server->peers[worker].pulls[k];
    if (request != 0 && pull->request == request) return pull;
  }
  return NULL;
}

/* A member is answered directly after all. */
static void answer_direct(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull) {
  pull->spread = 0;
  pull->held = ANSWER_FOR_TURN;
  server->stats->spreads_failed++;
  answer_via(server, worker, pull, MLFAB__NO_NODE);
}

/* A member has left a spread. When none is left the spread is over, and the distributor is told so
 * unless all of it is out; with `tell` in any case. */
static void answer_dissolve(mlfab__server *server, uint32_t aggregator, uint64_t spread, int tell) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      const mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0 && pull->spread == spread) return;
    }
  }
  mlfab__server_pull *own = answer_find(server, aggregator, spread);
  if (own) answer_end(server, own);
  if (own || tell)
    answer_fail(server, aggregator, spread, MLFAB_ERR_CANCELLED, "nobody waits for it any more");
}

/* All members that wait for this distributor, of one spread or (0) of all, are answered
 * directly. */
static void answer_abandon(mlfab__server *server, uint32_t aggregator, uint64_t spread) {
  for (uint32_t w = 0; w < server->workers && server->spreads > 0; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0 && pull->spread != 0 && pull->aggregator == aggregator &&
          (spread == 0 || pull->spread == spread))
        answer_direct(server, w, pull);
    }
  }
}

/* The spread is out: when each member should have it at the latest, two at a time. */
static void answer_handed_over(mlfab__server *server, const mlfab__server_pull *own) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request == 0 || pull->spread != own->request) continue;
      /* It was touched when the spread began, and its place tells how many are before it. */
      uint64_t took_ns = server->now_ns - mlfab__min(pull->progress_ns, server->now_ns);
      uint64_t before = pull->place - own->place - 1;
      pull->progress_ns = server->now_ns + 2 * (before + 2) * took_ns;
      pull->expect_ns = server->now_ns + (before + 2) * took_ns + server->heartbeat_ns / 4;
    }
  }
}

/* --- the pull condition --- */

/* Does this gate let the pull pass? `again`: it was buffered. */
static int answer_may(mlfab__server *server, uint32_t worker, const mlfab__server_pull *pull,
                      uint32_t g, int again) {
  const mlfab__gate *gate = &server->gates[g];
  mlfab_sync_state state;
  if (gate->sync.kind == MLFAB_SYNC_ASYNC) return 1;
  mlfab__gate_state(server, gate, worker, pull->progress, &state);
  if (gate->sync.kind == MLFAB_SYNC_USER)
    return server->config->pull_condition(server->config->user, &state) != 0;
  uint64_t threshold = gate->tuner.threshold;
  if (again) return mlfab__sync_may_pull_again(&gate->sync, threshold, &state);
  return mlfab__sync_may_pull(&gate->sync, threshold, &state, pull->draw);
}

/* Asks the gates that it has not passed yet, and buffers it at the first that says no. 1 when all
 * have let it pass, 0 when it waits or has failed. */
static int answer_pass(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull,
                       int again) {
  uint32_t mask = mlfab__gate_mask(server, pull->segments, pull->segments_used) & ~pull->passed;
  for (uint32_t g = 0; g < server->ngates; g++) {
    mlfab__gate *gate = &server->gates[g];
    if (!(mask >> g & 1)) continue;
    if (answer_may(server, worker, pull, g, again)) {
      pull->passed |= 1u << g;
      continue;
    }
    uint64_t at = mlfab__lazy_at((int)gate->sync.soft, pull->progress, gate->v_train);
    if (mlfab__lazy_add(server->env, &gate->lazy, at, pull->tag)) {
      answer_fail(server, worker, pull->request, MLFAB_ERR_MEMORY, "out of memory");
      answer_end(server, pull);
      return 0;
    }
    server->waiting += !pull->waiting;
    pull->waiting = 1;
    pull->gate = g;
    return 0;
  }
  return 1;
}

static void answer_announce(mlfab__server *server, uint32_t worker,
                            const mlfab__server_pull *pull) {
  mlfab__announce announce;
  memset(&announce, 0, sizeof announce);
  announce.kind = MLFAB__TRANSFER_PULL;
  announce.worker = worker;
  announce.id = pull->request;
  announce.bytes = pull->bytes;
  announce.shape = mlfab__server_shape(pull->segments, pull->segments_used);
  announce.members = announce.parts = 1;
  mlfab__server_announce(server, &announce);
}

/* The pull condition holds: begins to answer, or waits for a plan. */
static void answer_start(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull) {
  answer_unwait(server, pull);
  /* Said once: the next pull gets the model as it stands. */
  uint64_t refused = 0, told = server->peers[worker].refused_told;
  for (uint32_t g = 0; g < server->ngates; g++)
    refused = mlfab__max(refused, server->gates[g].refused_round);
  if (refused != 0 && pull->progress == refused && told != refused) {
    server->peers[worker].refused_told = refused;
    answer_fail(server, worker, pull->request, MLFAB_ERR_CALLBACK,
                "the server's update callback refused the round");
    answer_end(server, pull);
    return;
  }
  if (mlfab__server_plans(server, pull->bytes)) {
    pull->held = ANSWER_FOR_PLAN;
    answer_announce(server, worker, pull);
  } else {
    answer_begin(server, worker, pull);
  }
}

/* Pulls of a gate that are due: those that may be answered are. `passes`: what comes out of the
 * buffer has passed this gate; `changed`: it has passed none. */
static void answer_due(mlfab__server *server, uint32_t g, int passes, int changed) {
  uint64_t tag;
  while (mlfab__lazy_pop(&server->gates[g].lazy, server->gates[g].v_train, &tag)) {
    uint32_t worker = (uint32_t)(tag / ANSWER_SLOTS);
    mlfab__server_pull *pull = &server->peers[worker].pulls[tag % ANSWER_SLOTS];
    pull->passed = changed ? 0 : pull->passed | (uint32_t)passes << g;
    if (answer_pass(server, worker, pull, 1)) answer_start(server, worker, pull);
  }
}

MLFAB__INTERNAL void mlfab__answer_check(mlfab__server *server) {
  for (uint32_t g = 0; server->waiting > 0 && g < server->ngates; g++) {
    mlfab__gate *gate = &server->gates[g];
    if (gate->sync.kind == MLFAB_SYNC_USER) mlfab__lazy_wake_all(&gate->lazy);
    int passes = !mlfab__sync_rechecks(&gate->sync) || MLFAB__PLANTED(51);
    answer_due(server, g, passes, 0);
  }
}

MLFAB__INTERNAL void mlfab__answer_changed(mlfab__server *server, uint32_t gate) {
  mlfab__lazy_wake_all(&server->gates[gate].lazy);
  answer_due(server, gate, 0, 1);
}

/* A free slot with room for so many segments; `own`: for a spread. */
static mlfab__server_pull *answer_slot(mlfab__server *server, uint32_t worker, uint32_t segments,
                                       int own, int *code_p) {
  mlfab__server_pull *pull = NULL;
  *code_p = MLFAB_ERR_LIMIT;
  uint32_t end = own ? ANSWER_SLOTS : MLFAB__SERVER_PULLS;
  for (uint32_t k = own ? MLFAB__SERVER_PULLS : 0; k < end && !pull; k++) {
    if (server->peers[worker].pulls[k].request == 0) pull = &server->peers[worker].pulls[k];
  }
  if (!pull) return NULL;
  *code_p = MLFAB_ERR_MEMORY;
  if (!pull->pinned && server->store.positions_per_slice > 0) {
    pull->pinned =
        mlfab__alloc_array(server->env, server->store.positions_per_slice, sizeof *pull->pinned);
    if (!pull->pinned) return NULL;
  }
  if (segments > pull->segment_room) {
    mlfab__free(server->env, pull->segments, pull->segment_room * sizeof *pull->segments);
    pull->segments = mlfab__alloc_array(server->env, segments, sizeof *pull->segments);
    pull->segment_room = pull->segments ? segments : 0;
    if (!pull->segments) return NULL;
  }
  return pull;
}

static void answer_fill(mlfab__server_pull *pull, uint64_t request, const mlfab__segment *segments,
                        uint32_t n, uint64_t bytes) {
  if (n > 0) memcpy(pull->segments, segments, n * sizeof *segments);
  pull->request = request;
  pull->segments_used = n;
  pull->bytes = bytes;
  pull->segment = 0;
  pull->in_segment = 0;
  pull->slice = MLFAB__NO_BLOCK;
  pull->progress = pull->place = pull->spread = pull->expect_ns = 0;
  pull->aggregator = MLFAB__NO_NODE;
  pull->attempt = 0;
  pull->waiting = 0;
  pull->passed = 0;
  pull->cached = 0;
  pull->held = ANSWER_GOES;
}

/* What the reader's cache has. 0 when that is in order, else it was answered. */
static int answer_cache(mlfab__server *server, uint32_t worker, const mlfab__pull *in) {
  char text[128];
  uint32_t slice;
  uint64_t since;
  int code = mlfab__changed_cache(server, in, server->segments_scratch, server->versions_scratch,
                                  &slice, &since);
  if (code == MLFAB_ERR_FRAME) {
    mlfab__server_drop(server, worker, code,
                       "a PULL with another number of commits than of slices");
  } else if (code) {
    const mlfab__shard_slice *s = &server->store.slices[slice];
    snprintf(text, sizeof text,
             "a cache from the future: slice %u is at commit %llu, the cache at %llu", s->number,
             (unsigned long long)mlfab__changed_label(s), (unsigned long long)since);
    answer_fail(server, worker, in->request, code, text);
  }
  return code;
}

MLFAB__INTERNAL void mlfab__answer_pull(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame) {
  mlfab__pull in;
  if (mlfab__decode_pull(frame->meta, frame->meta_bytes, &in, server->segments_scratch,
                         server->versions_scratch) ||
      in.request == 0 || (in.request & MLFAB__SPREAD_BIT) != 0 ||
      answer_find(server, worker, in.request)) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME,
                       "a PULL that does not parse, or is open already");
    return;
  }
  if (server->phase != MLFAB__MODEL_STANDS) {
    answer_fail(server, worker, in.request, MLFAB_ERR_STATE, "a pull before the model exists");
    return;
  }
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < in.segments; i++) {
    bytes += server->segments_scratch[i].bytes;
    if (!mlfab__layout_valid(&server->layout, server->number, &server->segments_scratch[i])) {
      mlfab__server_drop(server, worker, MLFAB_ERR_FRAME,
                         "a pull of what is not of this server's slices");
      return;
    }
  }
  if (answer_cache(server, worker, &in)) return;
  mlfab_pull_info info = {worker, server->number, in.progress, bytes};
  if (server->config->on_pull && server->config->on_pull(server->config->user, &info)) {
    answer_fail(server, worker, in.request, MLFAB_ERR_CALLBACK,
                "the server's request callback refused");
    return;
  }
  int code;
  mlfab__server_pull *pull = answer_slot(server, worker, in.segments, 0, &code);
  if (!pull) {
    answer_fail(server, worker, in.request, code,
                code == MLFAB_ERR_MEMORY ? "out of memory" : "too many pulls at once");
    return;
  }
  answer_fill(pull, in.request, server->segments_scratch, in.segments, bytes);
  if (mlfab__changed_keep(server, pull, &in, server->versions_scratch)) {
    answer_fail(server, worker, in.request, MLFAB_ERR_MEMORY, "out of memory");
    answer_end(server, pull);
    return;
  }
  pull->progress = in.progress;
  pull->tag = (uint64_t)worker * ANSWER_SLOTS + (uint64_t)(pull - server->peers[worker].pulls);
  pull->draw = mlfab__sync_draw(server->config->seed, server->number, worker, in.progress);
  if (answer_pass(server, worker, pull, 0)) {
    answer_start(server, worker, pull);
  } else if (pull->waiting) {
    server->stats->pulls_delayed++;
    server->gates[pull->gate].delayed++;
    answer_wait(server, worker, pull);
  }
}

MLFAB__INTERNAL void mlfab__answer_cancel(mlfab__server *server, uint32_t worker,
                                          const mlfab__frame_in *frame) {
  mlfab__pull_cancel cancel;
  if (mlfab__decode_pull_cancel(frame->meta, frame->meta_bytes, &cancel)) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a PULL_CANCEL that does not parse");
    return;
  }
  if (cancel.request & MLFAB__SPREAD_BIT) return; /* not the worker's to cancel */
  mlfab__server_pull *pull = answer_find(server, worker, cancel.request);
  if (!pull) return;
  uint64_t spread = pull->spread;
  uint32_t aggregator = pull->aggregator;
  answer_over(server, worker, pull, MLFAB_ERR_CANCELLED);
  if (spread != 0) answer_dissolve(server, aggregator, spread, 0);
  answer_turns(server);
}

/* How many bytes the next frame of a segment has, and of which slice (index into store.slices). */
static uint32_t answer_cut(const mlfab__server *server, const mlfab__segment *segment,
                           uint64_t in_segment, uint32_t *slice_p) {
  const mlfab__store *store = &server->store;
  uint64_t offset = segment->offset + in_segment;
  *slice_p = store->local[mlfab__layout_slice_at(&server->layout, offset)];
  const mlfab__shard_slice *s = &store->slices[*slice_p];
  uint64_t in_slice = offset - s->offset, at = in_slice % store->block_bytes;
  uint64_t bytes = mlfab__min(segment->bytes - in_segment,
                              mlfab__min(store->block_bytes - at, s->bytes - in_slice));
  return (uint32_t)mlfab__min(bytes, server->config->chunk_bytes);
}

/* --- plans --- */

static uint32_t answer_frames(const mlfab__server *server, const mlfab__server_pull *pull) {
  uint32_t frames = 0, slice;
  for (uint32_t i = 0; i < pull->segments_used; i++) {
    const mlfab__segment *segment = &pull->segments[i];
    for (uint64_t at = 0; at < segment->bytes; frames++)
      at += answer_cut(server, segment, at, &slice);
  }
  return frames;
}

static int answer_alike(const mlfab__server_pull *a, const mlfab__server_pull *b) {
  return a->segments_used == b->segments_used &&
         memcmp(a->segments, b->segments, a->segments_used * sizeof *a->segments) == 0;
}

/* Makes members of pulls that have their places, behind `place`. They go directly where the
 * distributor is gone, or has no slot. */
static void answer_spread(mlfab__server *server, uint32_t aggregator, uint64_t place,
                          mlfab__spread_member *members, uint32_t n) {
  if (aggregator == MLFAB__NO_NODE || !server->peers[aggregator].connected) return;
  int code;
  const mlfab__server_pull *first = answer_find(server, members[0].worker, members[0].request);
  mlfab__server_pull *own = answer_slot(server, aggregator, first->segments_used, 1, &code);
  if (!own) return;
  answer_fill(own, MLFAB__SPREAD_BIT | ++server->spreads, first->segments, first->segments_used,
              first->bytes);
  own->held = ANSWER_FOR_TURN;
  own->place = place;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__server_pull *pull = answer_find(server, members[i].worker, members[i].request);
    pull->held = ANSWER_GOES;
    pull->spread = own->request;
    pull->progress_ns = server->now_ns;
    answer_via(server, members[i].worker, pull, aggregator);
    members[i].attempt = pull->attempt;
  }
  mlfab__spread spread = {own->request, own->bytes, answer_frames(server, own),
                          server->schedule.whole, n};
  server->port.post(server->port.self, aggregator, MLFAB__SPREAD, server->meta_scratch,
                    mlfab__encode_spread(server->meta_scratch, &spread, members));
}

/* A row of a plan: those that still wait for it get their places, and are spread if they can be. */
static void answer_row(mlfab__server *server, const mlfab__plan_entry *row, uint32_t n) {
  mlfab__spread_member members[MLFAB__GROUP_MEMBERS_MAX];
  const mlfab__server_pull *first = NULL;
  uint32_t count = 0;
  uint64_t place = ++server->places;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__server_pull *pull = answer_find(server, row[i].worker, row[i].id);
    if (!pull || pull->held != ANSWER_FOR_PLAN) continue; /* over meanwhile */
    pull->held = ANSWER_FOR_TURN;
    pull->place = ++server->places;
    if (!first) first = pull;
    if (count == MLFAB__GROUP_MEMBERS_MAX || !answer_alike(first, pull)) continue;
    mlfab__spread_member member = {row[i].id, row[i].worker,
                                   server->peers[row[i].worker].incarnation, 0};
    members[count++] = member;
  }
  if (count >= 2 && row[0].group != 0)
    answer_spread(server, row[0].aggregator, place, members, count);
}

/* Entries i and i + 1 are of one spread. */
static int answer_in_row(const mlfab__plan_entry *entries, uint32_t i) {
  return entries[i].group != 0 && entries[i + 1].kind == MLFAB__TRANSFER_PULL &&
         entries[i + 1].group == entries[i].group &&
         entries[i + 1].aggregator == entries[i].aggregator;
}

MLFAB__INTERNAL void mlfab__answer_plan(mlfab__server *server, const mlfab__plan_entry *entries,
                                        uint32_t n) {
  for (uint32_t i = 0, next; i < n; i = next) {
    next = i + 1;
    if (entries[i].kind != MLFAB__TRANSFER_PULL) continue;
    while (next < n && answer_in_row(entries, next - 1)) next++;
    answer_row(server, &entries[i], next - i);
  }
  answer_turns(server);
}

MLFAB__INTERNAL int mlfab__answer_waits(const mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      const mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0 && pull->held == ANSWER_FOR_PLAN) return 1;
    }
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__answer_announce_all(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      const mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0 && pull->held == ANSWER_FOR_PLAN) answer_announce(server, w, pull);
    }
  }
}

MLFAB__INTERNAL void mlfab__answer_unschedule(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0 && pull->held == ANSWER_FOR_PLAN) answer_begin(server, w, pull);
    }
  }
}

MLFAB__INTERNAL void mlfab__answer_done(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame) {
  mlfab__pull_done done;
  if (mlfab__decode_pull_done(frame->meta, frame->meta_bytes, &done) ||
      (done.request & MLFAB__SPREAD_BIT) != 0) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a PULL_DONE that does not parse");
    return;
  }
  /* Whatever way the pull is on by now: the worker has all of it, perhaps from a distributor of
   * before. */
  mlfab__server_pull *pull = answer_find(server, worker, done.request);
  if (!pull) return;
  uint64_t spread = pull->spread;
  uint32_t aggregator = pull->aggregator;
  server->stats->pulls_answered++;
  if (spread != 0) server->stats->spreads_answered++;
  answer_over(server, worker, pull, 0);
  if (spread != 0) {
    answer_touch(server, spread);
    answer_dissolve(server, aggregator, spread, 0);
  }
  answer_turns(server);
}

MLFAB__INTERNAL void mlfab__answer_spread_fail(mlfab__server *server, uint32_t aggregator,
                                               const mlfab__frame_in *frame) {
  mlfab__spread_fail fail;
  if (mlfab__decode_spread_fail(frame->meta, frame->meta_bytes, &fail) ||
      (fail.request & MLFAB__SPREAD_BIT) == 0 ||
      (fail.worker >= server->workers && fail.worker != MLFAB__NO_NODE)) {
    mlfab__server_drop(server, aggregator, MLFAB_ERR_FRAME, "a SPREAD_FAIL that does not parse");
    return;
  }
  if (fail.worker == MLFAB__NO_NODE) {
    answer_abandon(server, aggregator, fail.request);
  } else {
    mlfab__server_pull *pull = answer_find(server, fail.worker, fail.member_request);
    if (!pull || pull->spread != fail.request || pull->aggregator != aggregator) return;
    answer_direct(server, fail.worker, pull);
  }
  answer_dissolve(server, aggregator, fail.request, 0);
  answer_turns(server);
}

/* --- frames --- */

/* A placed pull lends no more than this many chunks. */
static uint32_t answer_lent(const mlfab__server *server) {
  uint32_t chunks = ANSWER_LENT / server->config->chunk_bytes;
  return chunks < 2 ? 2 : chunks;
}

/* Whose frame is next: small ones before those that have a place, then the oldest. */
static mlfab__server_pull *answer_pick(const mlfab__server *server, mlfab__server_peer *peer) {
  mlfab__server_pull *pull = NULL;
  int full = peer->nsends >= answer_lent(server);
  for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
    mlfab__server_pull *p = &peer->pulls[k];
    if (!answer_goes(p) || (p->place != 0 && full)) continue;
    if (!pull || p->place < pull->place || (p->place == pull->place && p->request < pull->request))
      pull = p;
  }
  return pull;
}

MLFAB__INTERNAL int mlfab__server_next(mlfab__server *server, uint32_t worker,
                                       mlfab__frame_out *frame, uint64_t now_ns) {
  mlfab__server_peer *peer = &server->peers[worker];
  server->now_ns = now_ns;
  if (peer->nsends == MLFAB__SERVER_SENDS) return 0;
  mlfab__server_pull *pull = answer_pick(server, peer);
  if (!pull) return 0;
  frame->slot = (uint32_t)(pull - peer->pulls);
  mlfab__store *store = &server->store;
  mlfab__model model;
  memset(&model, 0, sizeof model);
  model.request = pull->request;
  model.flags = MLFAB__MODEL_LAST;
  frame->type = MLFAB__MODEL;
  frame->bulk = NULL;
  frame->bulk_bytes = 0;
  frame->token = 0;
  frame->note[0] = 0;
  if (pull->segments_used > 0) {
    const mlfab__segment *segment = &pull->segments[pull->segment];
    uint32_t slice, bytes = answer_cut(server, segment, pull->in_segment, &slice);
    model.offset = segment->offset + pull->in_segment;
    if (pull->slice == MLFAB__NO_BLOCK) answer_pin(server, pull, slice);
    const mlfab__shard_slice *s = &store->slices[slice];
    uint64_t in_slice = model.offset - s->offset;
    uint64_t end = mlfab__min(segment->offset + segment->bytes - s->offset, s->bytes);
    model.bytes = mlfab__changed_answer(server, pull, in_slice, end, &bytes, frame);
    if (model.bytes > 0) {
      model.flags |= MLFAB__MODEL_PACKED;
    } else {
      uint32_t nth = (uint32_t)(in_slice / store->block_bytes);
      uint32_t block = MLFAB__PLANTED(4) ? store->w[s->first + nth] : pull->pinned[nth];
      frame->bulk = store->ghost ? NULL : store->blocks[block].data + in_slice % store->block_bytes;
      model.bytes = frame->bulk_bytes = bytes;
      frame->token = (uint64_t)block + 1;
    }
    if (pull->segment + 1 < pull->segments_used || pull->in_segment + model.bytes < segment->bytes)
      model.flags &= ~(uint32_t)MLFAB__MODEL_LAST;
    model.version = pull->version;
    model.commit = pull->commit;
    model.epoch = server->epoch;
    model.slice = s->number;
    frame->note[0] = model.bytes;
  }
  frame->meta_bytes = mlfab__encode_model(frame->meta, &model);
  return 1;
}

/* All of a pull was handed to the transport. */
static void answer_out(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull) {
  int placed = pull->place != 0;
  if (pull->request & MLFAB__SPREAD_BIT) {
    answer_handed_over(server, pull);
    answer_end(server, pull);
    mlfab__server_report(server, MLFAB__TRANSFER_PULL, MLFAB__NO_NODE, 0, 0);
  } else {
    server->stats->pulls_answered++;
    answer_over(server, worker, pull, 0);
  }
  if (placed) answer_turns(server);
}

MLFAB__INTERNAL void mlfab__server_taken(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_out *frame, uint64_t now_ns) {
  mlfab__server_peer *peer = &server->peers[worker];
  mlfab__server_pull *pull = &peer->pulls[frame->slot];
  server->now_ns = now_ns;
  if (frame->token != 0) {
    uint32_t block = (uint32_t)(frame->token - 1);
    mlfab__store_ref(&server->store, block);
    peer->sends[peer->nsends++] = block;
  }
  if (pull->segments_used > 0) {
    pull->in_segment += frame->note[0];
    server->stats->pull_raw_bytes += frame->note[0];
    server->stats->pull_bytes += frame->bulk_bytes;
    uint64_t at = pull->segments[pull->segment].offset + pull->in_segment;
    if (pull->in_segment == pull->segments[pull->segment].bytes) {
      pull->segment++;
      pull->in_segment = 0;
      at =
          pull->segment < pull->segments_used ? pull->segments[pull->segment].offset : MLFAB__NEVER;
    }
    const mlfab__shard_slice *s = &server->store.slices[pull->slice];
    if (at >= s->offset + s->bytes) answer_unpin(server, pull);
  }
  pull->progress_ns = now_ns;
  /* The link moves: a spread behind another pull of this worker is not stuck. */
  for (uint32_t k = MLFAB__SERVER_PULLS; k < ANSWER_SLOTS; k++) peer->pulls[k].progress_ns = now_ns;
  if (pull->segment == pull->segments_used) {
    answer_out(server, worker, pull);
  } else if (pull->place != 0) {
    /* From time to time the scheduler hears how much is still to go out. */
    uint64_t left = answer_left(pull), part = pull->bytes / 4 + 1;
    if (left / part != (left + frame->note[0]) / part)
      mlfab__server_report(server, MLFAB__TRANSFER_PULL, MLFAB__NO_NODE, 0, 0);
  }
}

MLFAB__INTERNAL void mlfab__server_sent(mlfab__server *server, uint32_t worker, uint64_t token) {
  mlfab__server_peer *peer = &server->peers[worker];
  for (uint32_t i = 0; i < peer->nsends; i++) {
    if ((uint64_t)peer->sends[i] + 1 != token) continue;
    mlfab__store_unref(&server->store, peer->sends[i]);
    peer->sends[i] = peer->sends[--peer->nsends];
    server->port.ready(server->port.self, worker);
    return;
  }
}

/* Takes back what was lent to a link. */
static void answer_unlend(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  for (uint32_t i = 0; i < peer->nsends; i++) mlfab__store_unref(&server->store, peer->sends[i]);
  peer->nsends = 0;
}

MLFAB__INTERNAL void mlfab__answer_stop(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
    mlfab__server_pull *pull = &peer->pulls[k];
    uint64_t spread = pull->spread;
    uint32_t aggregator = pull->aggregator;
    if (pull->request == 0) continue;
    answer_over(server, worker, pull, MLFAB_ERR_PEER_CLOSED);
    if (spread != 0 && aggregator != worker) answer_dissolve(server, aggregator, spread, 0);
  }
  for (uint32_t k = MLFAB__SERVER_PULLS; k < ANSWER_SLOTS; k++) {
    if (peer->pulls[k].request != 0) answer_end(server, &peer->pulls[k]);
  }
  if (!MLFAB__PLANTED(32)) answer_abandon(server, worker, 0);
  answer_turns(server);
}

MLFAB__INTERNAL void mlfab__answer_reset(mlfab__server *server, uint32_t worker) {
  mlfab__answer_stop(server, worker);
  answer_unlend(server, worker);
}

MLFAB__INTERNAL int mlfab__answer_quiet(const mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    if (peer->nsends > 0) return 0;
    for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
      if (peer->pulls[k].request != 0) return 0;
    }
  }
  return 1;
}

MLFAB__INTERNAL void mlfab__answer_resize(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      mlfab__free(server->env, pull->pinned,
                  server->store.positions_per_slice * sizeof *pull->pinned);
      pull->pinned = NULL;
    }
  }
}

/* Looks whether a spread, or a member of one, has to be given up. */
static void answer_tick_spread(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull) {
  uint64_t beat = server->heartbeat_ns;
  uint64_t silent_ns = server->now_ns - mlfab__min(pull->progress_ns, server->now_ns);
  if (pull->spread == 0) {
    uint64_t spread = pull->request;
    if (pull->held != ANSWER_GOES || silent_ns < 3 * beat) return;
    answer_abandon(server, worker, spread);
    answer_dissolve(server, worker, spread, 0);
  } else if (silent_ns >= 4 * beat && !answer_find(server, pull->aggregator, pull->spread)) {
    uint64_t spread = pull->spread;
    uint32_t aggregator = pull->aggregator;
    answer_direct(server, worker, pull);
    answer_dissolve(server, aggregator, spread, 1);
  }
}

/* The out-link stands idle: answers the last of those directly that should have been served by
 * now. */
static void answer_take_back(mlfab__server *server) {
  mlfab__server_pull *last = NULL;
  uint32_t worker = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request == 0 || pull->place == 0) continue;
      if (answer_goes(pull) || pull->held == ANSWER_FOR_TURN) return;
      if (pull->spread == 0 || pull->expect_ns == 0 || pull->expect_ns > server->now_ns) continue;
      if (last && pull->place < last->place) continue;
      last = pull;
      worker = w;
    }
  }
  if (!last) return;
  mlfab__spread_fail skip = {last->spread, last->request, worker, 0};
  uint32_t aggregator = last->aggregator;
  uint8_t meta[64];
  server->port.post(server->port.self, aggregator, MLFAB__SPREAD_FAIL, meta,
                    mlfab__encode_spread_fail(meta, &skip));
  uint64_t spread = last->spread;
  answer_direct(server, worker, last);
  answer_dissolve(server, aggregator, spread, 1);
  answer_turns(server);
}

MLFAB__INTERNAL void mlfab__answer_tick(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request == 0) continue;
      if (k >= MLFAB__SERVER_PULLS || pull->spread != 0) {
        answer_tick_spread(server, w, pull);
        continue;
      }
      if (server->now_ns - pull->progress_ns < server->heartbeat_ns) continue;
      if (pull->waiting) answer_wait(server, w, pull);
      if (pull->slice == MLFAB__NO_BLOCK) continue;
      if (server->now_ns - pull->progress_ns < 3 * server->heartbeat_ns) continue;
      answer_restart(server, pull);
      pull->progress_ns = server->now_ns;
    }
  }
  answer_turns(server);
  if (server->spreads > 0) answer_take_back(server);
}

MLFAB__INTERNAL void mlfab__answer_free(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < ANSWER_SLOTS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0) answer_end(server, pull);
      mlfab__free(server->env, pull->segments, pull->segment_room * sizeof *pull->segments);
      mlfab__free(server->env, pull->sinces, pull->since_room * sizeof *pull->sinces);
      mlfab__free(server->env, pull->pinned,
                  server->store.positions_per_slice * sizeof *pull->pinned);
    }
    answer_unlend(server, w);
  }
}
