/* clock.c - the server role: its consistency model. See server.h.
 *
 * A server has one clock: a model with its V_train. A worker's progress is the number of its
 * whole updates. It is the same at all servers (push.c), whatever slices the updates touched. A server
 * knows it (`pushed`) from the updates that it decided, and from PUSH and PROGRESS frames, which report
 * updates that this server had no part of. `pushed` may be too small, never larger than is true before the
 * first update that is undecided here. An update may be taken in, and a pull answered (serve.c), when the clock allows it.
 *
 *    COUNTING (all but rounds):  --(push condition)--> V_train + 1, repeated until the condition is false
 *    OPEN (a round)              --(push condition)--> APPLYING --(all blocks)--> V_train + 1, OPEN
 *                                --(change of model)--> APPLYING, flush --> V_train stays
 *
 * Members. Rounds and iterations wait for the live workers. A process that takes the number of a worker that left or
 * died, or one that nobody has had, is a guest first: it may define the model and pull, and nobody waits for it. When it
 * has the model it tells every server (PROGRESS), and each counts it from then on:
 *
 *    ABSENT --HELLO--> GUEST --PROGRESS--> MEMBER from its round here, told to the worker --(dead, left, done)--> ABSENT
 *
 * Its first round is one for all servers. From its PROGRESS on, each server s holds the round b(s) open for it. The
 * worker waits for all b(s), takes the largest, B, and tells the others (push.c, aligned); then they close the rounds
 * below B without it. No server is beyond B by then: it would have closed b(s) without its member. So the worker's first
 * update is in round B everywhere, and it is missing from the rounds below B everywhere. A MEMBER that stands apart
 * (PROGRESS with `apart`) is a GUEST again. It returns with the number that the members have (coll/membership.h), even
 * if the open round has an update of it. Only then a round has two updates of one worker. A worker that dies on the way
 * is absent again at every server. Servers whose slices move, or that have stopped the worker for a move, do not take
 * its PROGRESS; it tells them again when they greet it after the move.
 *
 * A change of models waits until no update is being written, because with rounds the bytes go to other
 * blocks. Then, in one step, the server applies an open round that is abandoned, sets the model,
 * evaluates its push condition, and looks again at every delayed pull.
 *
 * Invariants. (1) v_train never falls, and never passes the largest progress, even if a push condition is
 * always true. (2) The sum of a round is applied once, by the model that built it.
 *
 * Source: FluentPS Alg. 1 (server side), §III-B (conditions a shard, SetcondPull, SetcondPush). */
#include "server.h"

#include "../kernels/kernels.h"

#include <math.h>
#include <stdio.h>

MLFAB__INTERNAL int mlfab__clock_lives(const mlfab__server_peer *peer) {
  if (peer->guest) return 0;
  return !peer->dead && !peer->left && !peer->done;
}

MLFAB__INTERNAL void mlfab__clock_measure(mlfab__server *server) {
  server->significant = mlfab__sync_significant(&server->clock.sync);
  server->measures = server->significant || server->keeper;
  server->rounds = mlfab__sync_rounds(server->clock.sync.kind);
}

MLFAB__INTERNAL void mlfab__clock_start(mlfab__server *server, const mlfab_sync *sync) {
  mlfab__clock *clock = &server->clock;
  mlfab__clock_free(server);
  clock->due = 1;
  clock->sync = *sync;
  mlfab__sync_complete(&clock->sync);
  clock->tuner.threshold = (uint64_t)clock->sync.staleness;
  mlfab__clock_measure(server);
}

MLFAB__INTERNAL void mlfab__clock_free(mlfab__server *server) {
  mlfab__heap_free(&server->clock.lazy.heap, server->env);
  memset(&server->clock, 0, sizeof server->clock);
  for (uint32_t w = 0; server->peers && w < server->workers; w++) server->peers[w].change.ask = 0;
  server->rounds = 0;
  server->norm_commits = 0;
}

MLFAB__INTERNAL int mlfab__clock_absolute(const mlfab__server *server) {
  int told = server->config->on_update && !server->rounds;
  return mlfab__optimizer_linear(&server->optimizer) && !told;
}

/* --- the workers' progress --- */

/* Recomputes the tally from all workers: once for every worker that comes or goes, and once for every step of
 * the slowest. */
static void clock_count(mlfab__server *server) {
  mlfab__clock_tally *tally = &server->tally;
  memset(tally, 0, sizeof *tally);
  tally->counted = 1;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    tally->stopped += peer->stopped != 0;
    tally->most = mlfab__max(tally->most, peer->pushed);
    if (!mlfab__clock_lives(peer)) continue;
    if (tally->members++ == 0 || peer->pushed < tally->slowest) {
      tally->slowest = peer->pushed;
      tally->lowest = 0;
    }
    tally->lowest += peer->pushed == tally->slowest;
    tally->fastest = mlfab__max(tally->fastest, peer->pushed);
  }
  server->clock.arrived_at = 0;
}

/* Number of members whose update of the open iteration was decided. The tally is valid. */
static uint32_t clock_arrived(mlfab__server *server) {
  mlfab__clock *clock = &server->clock;
  if (clock->v_train < server->tally.slowest) return server->tally.members;
  if (clock->arrived_at == clock->v_train + 1) return clock->arrived;
  clock->arrived_at = clock->v_train + 1;
  clock->arrived = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    clock->arrived += mlfab__clock_lives(peer) && peer->pushed > clock->v_train;
  }
  return clock->arrived;
}

/* Updates the tally after a worker's progress has grown from `before`. */
static void clock_tell_tally(mlfab__server *server, const mlfab__server_peer *peer,
                             uint64_t before) {
  mlfab__clock_tally *tally = &server->tally;
  if (!tally->counted) return;
  tally->most = mlfab__max(tally->most, peer->pushed);
  if (!mlfab__clock_lives(peer) || peer->pushed == before) return;
  tally->fastest = mlfab__max(tally->fastest, peer->pushed);
  if (before == tally->slowest && --tally->lowest == 0) tally->counted = 0;
  mlfab__clock *clock = &server->clock;
  clock->arrived += before < clock->arrived_at && peer->pushed >= clock->arrived_at;
}

MLFAB__INTERNAL int32_t mlfab__clock_slowest(mlfab__server *server) {
  mlfab__clock_tally *tally = &server->tally;
  if (!tally->counted) clock_count(server);
  for (; tally->first < server->workers; tally->first++) {
    const mlfab__server_peer *peer = &server->peers[tally->first];
    if (mlfab__clock_lives(peer) && peer->pushed == tally->slowest) return (int32_t)tally->first;
  }
  return MLFAB_NO_RANK;
}

MLFAB__INTERNAL void mlfab__clock_state(mlfab__server *server, uint32_t worker, uint64_t progress,
                                        mlfab_sync_state *state) {
  if (!server->tally.counted) clock_count(server);
  memset(state, 0, sizeof *state);
  state->server = server->number;
  state->worker = worker;
  state->iteration = progress;
  state->v_train = server->clock.v_train;
  state->significance = worker < server->workers ? server->peers[worker].significance : -1.0;
  state->members = server->tally.members;
  state->arrived = clock_arrived(server);
  state->fastest = server->tally.fastest;
  state->slowest = server->tally.slowest;
}

/* --- updates --- */

MLFAB__INTERNAL int mlfab__clock_may_push(const mlfab__server *server, uint32_t worker,
                                          uint64_t progress) {
  const mlfab__clock *clock = &server->clock;
  /* An update that is not the worker's next has a larger number than `pushed`. */
  uint64_t pushed = mlfab__max(server->peers[worker].pushed, progress);
  if (!mlfab__sync_may_push(&clock->sync, pushed, clock->v_train)) return 0;
  for (uint32_t w = 0; server->rounds && server->options.deterministic && w < worker; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    if (peer->pushed <= clock->v_train && mlfab__clock_lives(peer) && !peer->drained) return 0;
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__clock_late(const mlfab__server *server, uint32_t worker) {
  return mlfab__sync_late(&server->clock.sync, server->peers[worker].pushed, server->clock.v_train);
}

/* |w| of the shard after its last commit. Cached; costs one pass over the shard. */
static double clock_norm(mlfab__server *server) {
  const mlfab__store *store = &server->store;
  if (server->norm_commits == server->stats->commits + 1) return server->norm_w;
  double sum = 0.0;
  for (uint32_t i = 0; i < store->nslices && !store->ghost; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    mlfab__piece piece;
    for (uint64_t at = 0; at < s->bytes; at += piece.bytes) {
      mlfab__store_piece(store, s->offset + at, mlfab__store_seen(s->bytes - at), &piece);
      const uint8_t *w = store->blocks[store->w[piece.position]].data + piece.at;
      w = mlfab__memory_see(store->memory, w, piece.bytes, server->window);
      sum += mlfab__kernel_norm2_by(server->config->kernels, piece.dtype, w, piece.count);
    }
  }
  server->norm_w = sqrt(sum);
  server->norm_commits = server->stats->commits + 1;
  return server->norm_w;
}

/* |g| / |w|, where g is what the update adds. */
static void clock_significance(mlfab__server *server, const mlfab__incoming *update) {
  server->peers[update->worker].significance = -1.0;
  if (!server->significant) return;
  double g = sqrt(update->norm2) * fabs(update->push.scale), w = clock_norm(server);
  server->peers[update->worker].significance = w > 0.0 ? g / w : g > 0.0 ? HUGE_VAL : 0.0;
}

/* A worker's progress has grown from `before`. */
static void clock_crossed(mlfab__server *server, const mlfab__server_peer *peer, uint64_t before) {
  clock_tell_tally(server, peer, before);
  mlfab__clock *clock = &server->clock;
  int crossed = before <= clock->v_train && peer->pushed > clock->v_train;
  if (crossed || mlfab__sync_watches(clock->sync.kind)) clock->due = 1;
}

/* Raises the numbers of a worker's queued updates, except `decided`, to follow its progress; `falls`: they may fall, too. Two
 * queued updates of one worker never have one number. */
static void clock_renumber(mlfab__server *server, uint32_t worker, const mlfab__incoming *decided,
                           int falls) {
  mlfab__incoming *lists[2] = {server->queue.first, server->queue.unplaced_first};
  uint64_t next = server->peers[worker].pushed;
  for (uint32_t i = 0; i < 2 && server->peers[worker].queued > 0; i++) {
    for (mlfab__incoming *u = lists[i]; u; u = u->next) {
      if (u->worker != worker || u == decided || (u->push.flags & MLFAB__PUSH_INIT)) continue;
      u->push.progress = falls ? next : mlfab__max(u->push.progress, next);
      next = u->push.progress + !(u->push.flags & MLFAB__PUSH_MORE);
    }
  }
}

MLFAB__INTERNAL void mlfab__clock_reach(mlfab__server *server, uint32_t worker, uint64_t progress) {
  mlfab__server_peer *peer = &server->peers[worker];
  uint64_t before = peer->pushed;
  if (progress <= before) return;
  peer->pushed = progress;
  clock_renumber(server, worker, NULL, 0);
  clock_crossed(server, peer, before);
}

MLFAB__INTERNAL void mlfab__clock_progress(mlfab__server *server, uint32_t worker,
                                           const mlfab__frame_in *frame) {
  mlfab__progress in;
  if (mlfab__port_refuse(&server->port, worker, frame,
                         mlfab__decode_progress(frame->meta, frame->meta_bytes, &in) ||
                             in.progress > MLFAB__PROGRESS_MAX))
    return;
  if (server->phase != MLFAB__MODEL_STANDS) return;
  mlfab__server_peer *peer = &server->peers[worker];
  server->due = 1;
  if (in.apart) {
    if (!peer->guest) mlfab__clock_members(server);
    peer->guest = 1;
  } else if (!peer->guest && !in.entry) {
    mlfab__clock_reach(server, worker, in.progress);
  } else if (!peer->stopped) {
    mlfab__clock_enter(server, worker, in.progress, in.entry);
  }
}

MLFAB__INTERNAL void mlfab__clock_enter(mlfab__server *server, uint32_t worker, uint64_t progress,
                                        uint32_t entry) {
  mlfab__server_peer *peer = &server->peers[worker];
  peer->guest = 0;
  peer->pushed = 0; /* The round that has an update of it already may have its next one, too. */
  peer->pushed = mlfab__max(progress, mlfab__clock_join(server, worker));
  peer->decided = mlfab__min(peer->decided, peer->pushed);
  clock_renumber(server, worker, NULL, 1);
  mlfab__clock_members(server);
  mlfab__progress told = {peer->pushed, 0, entry};
  MLFAB__POST(&server->port, worker, MLFAB__PROGRESS, progress, &told);
}

MLFAB__INTERNAL void mlfab__clock_decided(mlfab__server *server, const mlfab__incoming *update,
                                          int code) {
  mlfab__server_peer *peer = &server->peers[update->worker];
  uint64_t known = peer->pushed, before = mlfab__max(known, update->push.progress);
  int whole = !(update->push.flags & MLFAB__PUSH_MORE);
  if (code == 0) clock_significance(server, update);
  peer->pushed = before + (uint64_t)whole;
  if (whole) peer->decided = peer->pushed;
  /* Counts even if the update has nothing for this server: a mean must not depend on which server holds
   * which slice. A late update that is kept does not contribute. */
  mlfab__clock *clock = &server->clock;
  if (code == 0 && server->rounds) {
    clock->round_members += update->push.members;
    if (clock->sync.kind == MLFAB_SYNC_BSP || before >= clock->v_train) {
      clock->contributors += !peer->contributed;
      peer->contributed = 1;
    }
  }
  /* A worker that was too late continues with the open round, whether its update was dropped or kept. */
  if (whole && clock->sync.kind == MLFAB_SYNC_DROP)
    peer->pushed = mlfab__max(peer->pushed, clock->v_train);
  if (peer->pushed > before + 1) clock_renumber(server, update->worker, update, 0);
  clock_crossed(server, peer, known);
}

MLFAB__INTERNAL uint64_t mlfab__clock_join(const mlfab__server *server, uint32_t worker) {
  const mlfab__clock *clock = &server->clock;
  int applying = server->apply.applying == MLFAB__APPLY_ROUND && !clock->flush;
  int closed = server->rounds && (server->peers[worker].pushed > clock->v_train || applying);
  return clock->v_train + (closed ? 1 : 0);
}

/* --- rounds and iterations --- */

MLFAB__INTERNAL void mlfab__clock_members(mlfab__server *server) {
  server->tally.counted = 0;
  server->queue.place_due = 1;
  server->clock.due = 1;
}

/* Number of live workers whose update of the open round is here. Others may be past the round because they
 * were late in it at another server. */
static uint32_t clock_came(const mlfab__server *server) {
  const mlfab__clock *clock = &server->clock;
  uint32_t n = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    n += mlfab__clock_lives(peer) && peer->pushed > clock->v_train &&
         (peer->decided > clock->v_train || peer->contributed);
  }
  return n;
}

/* Evaluates the push condition. Without members, an iteration in which anything arrived is closed as it is,
 * even without a sum, because pulls wait for it. */
static int clock_complete(mlfab__server *server) {
  const mlfab__clock *clock = &server->clock;
  mlfab_sync_state state;
  if (!server->tally.counted) clock_count(server);
  uint64_t most = server->tally.most;
  mlfab__clock_state(server, MLFAB__NO_NODE, most, &state);
  if (state.members == 0) return clock->round_members > 0 || most > clock->v_train;
  if (most <= clock->v_train) return 0;
  if (clock->sync.kind == MLFAB_SYNC_USER)
    return server->config->push_condition(server->config->user, &state) != 0;
  if (clock->sync.kind == MLFAB_SYNC_DROP && state.arrived < state.members &&
      state.arrived >= clock->sync.need)
    state.arrived = clock_came(server);
  return mlfab__sync_complete_round(&clock->sync, &state) ||
         (server->move.hooks && server->move.hooks->forces(server));
}

/* Number of live workers whose decided updates here reach this progress. */
static uint32_t clock_behind(const mlfab__server *server, uint64_t progress) {
  uint32_t n = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    n += mlfab__clock_lives(peer) && mlfab__min(peer->pushed, peer->decided) >= progress;
  }
  return n;
}

/* The iteration up to which all is complete: for all members, or for as many as a round needs. Without
 * members: the largest progress of any worker that was ever here. */
static uint64_t clock_reached(const mlfab__server *server, const mlfab_sync_state *state) {
  const mlfab__clock *clock = &server->clock;
  uint64_t reached = clock->v_train;
  if (state->members == 0) return server->tally.most;
  if (clock->sync.kind != MLFAB_SYNC_DROP || clock->sync.need >= state->members ||
      clock_behind(server, reached + MLFAB__SERVER_QUEUED + 1) < clock->sync.need)
    return state->slowest;
  for (uint64_t step = MLFAB__PROGRESS_MAX; step > 0; step /= 2)
    if (clock_behind(server, reached + step) >= clock->sync.need) reached += step;
  return reached;
}

MLFAB__INTERNAL void mlfab__clock_step(mlfab__server *server) {
  mlfab__clock *clock = &server->clock;
  mlfab_sync_state state;
  clock->v_train++;
  server->stats->rounds++;
  /* Progress beyond the updates that can be in flight was only reported: V_train jumps there in one step. */
  mlfab__clock_state(server, MLFAB__NO_NODE, 0, &state);
  uint64_t reached = clock_reached(server, &state);
  if (clock->sync.kind != MLFAB_SYNC_USER && reached > clock->v_train + MLFAB__SERVER_QUEUED)
    clock->v_train = reached;
  if (clock->sync.kind == MLFAB_SYNC_DSPS) {
    mlfab__clock_state(server, MLFAB__NO_NODE, 0, &state);
    mlfab__sync_tune(&clock->sync, &clock->tuner, clock->delayed, state.fastest - state.slowest);
  }
  clock->delayed = 0;
}

MLFAB__INTERNAL void mlfab__clock_close(mlfab__server *server, int flush) {
  server->clock.flush = flush;
  server->apply.applying = MLFAB__APPLY_ROUND;
  server->apply.code = 0;
  server->apply.slice = 0;
  server->apply.position = 0;
}

MLFAB__INTERNAL double mlfab__clock_share(mlfab__server *server) {
  const mlfab__clock *clock = &server->clock;
  uint32_t n = clock->contributors;
  if (!server->options.mean) return 1.0;
  if (clock->sync.kind == MLFAB_SYNC_DROP && clock->sync.keep_late) {
    mlfab_sync_state state;
    mlfab__clock_state(server, MLFAB__NO_NODE, 0, &state);
    if (state.members > n) n = state.members;
  }
  return 1.0 / (n > 0 ? n : 1);
}

/* Does the keeper not let the open round be applied yet? It stays due. */
static int clock_held(mlfab__server *server) {
  if (!server->keeper) return 0;
  const mlfab__commit commit = server->keeper->round(server);
  return !server->keeper->may(server, &commit);
}

MLFAB__INTERNAL int mlfab__clock_advance(mlfab__server *server) {
  mlfab__clock *clock = &server->clock;
  int moved = 0;
  if (server->phase != MLFAB__MODEL_STANDS) return 0;
  while (clock->due) {
    clock->due = clock_complete(server);
    if (!clock->due) break;
    if (server->rounds && clock->round_members > 0) {
      if (clock_held(server)) break;
      mlfab__clock_close(server, 0);
      return 1;
    }
    mlfab__clock_step(server);
    server->queue.place_due = 1;
    moved = 1;
  }
  server->serve.due |= moved || mlfab__sync_watches(clock->sync.kind);
  return 0;
}

/* --- changes --- */

static void clock_answer(mlfab__server *server, uint32_t worker, uint64_t ask, int code,
                         const char *text) {
  mlfab__sync_ack ack;
  memset(&ack, 0, sizeof ack);
  ack.ask = ask;
  ack.code = code;
  ack.counts = (uint32_t)mlfab__sync_counts(server->clock.sync.kind);
  snprintf(ack.text, sizeof ack.text, "%s", text);
  MLFAB__POST(&server->port, worker, MLFAB__SYNC_ACK, sync_ack, &ack);
}

MLFAB__INTERNAL void mlfab__clock_tell(mlfab__server *server, uint32_t worker) {
  clock_answer(server, worker, 0, 0, "");
}

MLFAB__INTERNAL int mlfab__clock_follows(const mlfab__server *server, uint32_t kind,
                                         mlfab_error *error) {
  const mlfab_config *config = server->config;
  if (kind != MLFAB_SYNC_USER || (config->pull_condition && config->push_condition)) return 0;
  return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, (int32_t)server->number, 1, 0,
                      "not supported: MLFAB_SYNC_USER at server %u, which has no pull_condition or "
                      "no push_condition",
                      server->number);
}

/* Sets *error and returns a code if the change is impossible, else 0. */
static int clock_refuse(const mlfab__server *server, const mlfab_sync *sync, mlfab_error *error) {
  int rounds = mlfab__sync_rounds(sync->kind);
  const char *text = NULL;
  int code = mlfab__sync_check(sync, server->workers, error);
  if (!code) code = mlfab__clock_follows(server, sync->kind, error);
  if (code) return code;
  if (server->phase != MLFAB__MODEL_STANDS)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "before the model exists");
  if (rounds && server->delay_bound != MLFAB_UNBOUNDED) text = "rounds with a delay bound";
  if (!rounds && server->options.mean) text = "leaving rounds of a model with mean";
  if (sync->kind != MLFAB_SYNC_BSP && server->options.deterministic)
    text = "another model than BSP with deterministic";
  if (!text) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "not supported: %s", text);
}

MLFAB__INTERNAL void mlfab__clock_ask(mlfab__server *server, uint32_t worker,
                                      const mlfab__frame_in *frame) {
  mlfab__sync_ask change;
  mlfab_error error;
  if (mlfab__port_refuse(
          &server->port, worker, frame,
          mlfab__decode_sync_ask(frame->meta, frame->meta_bytes, &change) || change.ask == 0))
    return;
  mlfab__server_peer *peer = &server->peers[worker];
  if (peer->change.ask == change.ask) return; /* repeated on a new link */
  if (change.ask <= peer->changed) {
    clock_answer(server, worker, change.ask, 0, "");
    return;
  }
  mlfab__sync_complete(&change.consistency);
  int code = clock_refuse(server, &change.consistency, &error);
  if (code) {
    clock_answer(server, worker, change.ask, code, error.text);
    return;
  }
  peer->change = change;
  peer->change_turn = ++server->change_turns;
  server->due = server->changes = 1;
}

static void clock_install(mlfab__server *server, const mlfab_sync *sync) {
  server->clock.sync = *sync;
  server->clock.tuner = (mlfab__sync_tuner){(uint64_t)sync->staleness, 0};
  mlfab__clock_measure(server);
  mlfab__clock_members(server);
  server->serve.changed = 1;
}

/* The worker whose change has waited longest, or `workers`. */
static uint32_t clock_next_change(const mlfab__server *server) {
  uint32_t first = server->workers;
  for (uint32_t w = 0; server->changes && w < server->workers; w++) {
    if (server->peers[w].change.ask != 0 &&
        (first == server->workers ||
         server->peers[w].change_turn < server->peers[first].change_turn))
      first = w;
  }
  return first;
}

MLFAB__INTERNAL int mlfab__clock_change(mlfab__server *server) {
  for (uint32_t w; (w = clock_next_change(server)) < server->workers;) {
    mlfab__sync_ask *change = &server->peers[w].change;
    /* Updates leave their open round. */
    if (server->clock.round_members > 0 && !mlfab__sync_rounds(change->consistency.kind)) {
      if (clock_held(server)) return 0;
      mlfab__clock_close(server, 1);
      return 1;
    }
    int counted = mlfab__sync_counts(server->clock.sync.kind);
    int absolute = mlfab__clock_absolute(server);
    clock_install(server, &change->consistency);
    server->regroups |= absolute != mlfab__clock_absolute(server);
    server->peers[w].changed = change->ask;
    change->ask = 0;
    clock_answer(server, w, server->peers[w].changed, 0, "");
    for (uint32_t k = 0;
         counted != mlfab__sync_counts(server->clock.sync.kind) && k < server->workers; k++)
      mlfab__clock_tell(server, k);
    server->retold = 1;
  }
  server->changes = 0;
  return 0;
}
