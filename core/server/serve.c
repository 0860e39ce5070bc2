/* serve.c - the server role: answers pulls. See server.h.
 *
 * A pull waits until the pull condition holds. Then the server sends its segments slice by slice: it pins
 * the blocks of a slice, so that all of them have one version, and unpins them when the transport has taken
 * their last byte. If the reader stalls, or spare blocks run out, the server unpins a slice in the middle;
 * the pull begins the slice again, with the version of that time.
 *
 * With a keeper, commits may be hidden until the replica has them, one right after another. A pull then sends the slice
 * that it has pinned before, and pins the next one between two of them (mlfab__keeper_offer).
 *
 * A policy may hold a large pull back once its condition holds (`held`), give it a place and a turn, or
 * have another node forward it (`spread`). A placed pull lends only a limited number of bytes; otherwise
 * the transport's queues would decide the order.
 *
 * Source: FluentPS Alg. 1, lines of the pull request. */
#include "server.h"

#include "../kernels/kernels.h"

#include <stdio.h>

/* Bytes that a placed pull may lend to its link; at least two chunks. */
enum { SERVE_LENT = 1 << 20 };

/* It has left the buffer of the clock. */
static void serve_unwait(mlfab__server *server, mlfab__server_pull *pull) {
  server->serve.waiting--;
  pull->waiting = 0;
}

/* Appends to the list of open pulls; removes from it. */
static void serve_list(mlfab__server *server, mlfab__server_pull *pull) {
  server->peers[pull->worker].pulling++;
  pull->opened = ++server->serve.opened;
  pull->next = NULL;
  pull->previous = server->serve.last;
  *(pull->previous ? &pull->previous->next : &server->serve.first) = pull;
  server->serve.last = pull;
}

static void serve_unlist(mlfab__server *server, mlfab__server_pull *pull) {
  server->peers[pull->worker].pulling--;
  *(pull->previous ? &pull->previous->next : &server->serve.first) = pull->next;
  *(pull->next ? &pull->next->previous : &server->serve.last) = pull->previous;
}

MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_each(const mlfab__server *server,
                                                      mlfab__serve_walk *walk) {
  mlfab__server_pull *pull = walk->at;
  if (pull && pull->request != 0 && pull->opened == walk->opened) {
    pull = pull->next;
  } else {
    pull = server->serve.first;
    while (pull && pull->opened <= walk->opened) pull = pull->next;
  }
  walk->at = pull;
  if (pull) walk->opened = pull->opened;
  return pull;
}

MLFAB__INTERNAL void mlfab__serve_end(mlfab__server *server, mlfab__server_pull *pull) {
  assert(pull->request != 0);
  if (pull->waiting) {
    mlfab__lazy_remove(&server->clock.lazy, pull->tag);
    serve_unwait(server, pull);
  }
  mlfab__blocks_unpin(server, pull);
  serve_unlist(server, pull);
  pull->request = pull->place = pull->spread = 0;
  if (pull->view) server->lender->over(server, pull);
  pull->held = MLFAB__PULL_GOES;
  pull->attempt = 0;
}

MLFAB__INTERNAL void mlfab__serve_over(mlfab__server *server, mlfab__server_pull *pull, int code) {
  const mlfab__server_pull was = *pull;
  mlfab__serve_end(server, pull);
  if (server->policy) server->policy->pull_over(server, &was, code);
}

MLFAB__INTERNAL void mlfab__serve_fail(mlfab__server *server, uint32_t worker, uint64_t request,
                                       int code, const char *text) {
  mlfab__pull_fail fail;
  memset(&fail, 0, sizeof fail);
  fail.request = request;
  fail.code = code;
  snprintf(fail.text, sizeof fail.text, "%s", text);
  MLFAB__POST(&server->port, worker, MLFAB__PULL_FAIL, pull_fail, &fail);
}

/* Tells the worker whom the pull waits for, so that a deadline can name it. */
static void serve_wait(mlfab__server *server, mlfab__server_pull *pull) {
  mlfab_sync_state state;
  mlfab__waiting wait = {pull->request, MLFAB__REQUEST_PULL, MLFAB_NO_RANK, ""};
  mlfab__clock_state(server, pull->worker, pull->progress, &state);
  wait.rank = mlfab__clock_slowest(server);
  snprintf(
      wait.text, sizeof wait.text,
      ", the slowest, at server %u: %s: this worker has pushed %llu updates, the fastest %llu, the "
      "slowest %llu; V_train is %llu, %u of %u have pushed the next",
      server->number, mlfab__sync_name(server->clock.sync.kind), (unsigned long long)pull->progress,
      (unsigned long long)state.fastest, (unsigned long long)state.slowest,
      (unsigned long long)state.v_train, state.arrived, state.members);
  pull->progress_ns = server->now_ns;
  MLFAB__POST(&server->port, pull->worker, MLFAB__WAITING, waiting, &wait);
}

MLFAB__INTERNAL int mlfab__serve_view(mlfab__server *server, mlfab__server_pull *pull, int code) {
  if (!code) return 0;
  mlfab__serve_fail(server, pull->worker, pull->request, code,
                    code == MLFAB_ERR_LIMIT    ? "too many views are out"
                    : code == MLFAB_ERR_MEMORY ? "out of memory for a view"
                                               : "the model is not in shared memory");
  mlfab__serve_end(server, pull);
  return code;
}

MLFAB__INTERNAL void mlfab__serve_begin(mlfab__server *server, mlfab__server_pull *pull) {
  pull->held = MLFAB__PULL_GOES;
  pull->progress_ns = server->now_ns;
  if (pull->view && mlfab__server_shows(server) == MLFAB__SHOWS_ALL &&
      mlfab__serve_view(server, pull, server->lender->pin(server, pull)))
    return;
  if (server->policy && !pull->view) server->policy->pull_goes(server, pull);
  server->port.ready(server->port.self, pull->worker);
}

MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_find(mlfab__server *server, uint32_t worker,
                                                      uint64_t request) {
  for (uint32_t k = 0; server->peers[worker].pulling && k < MLFAB__SERVER_SLOTS; k++) {
    mlfab__server_pull *pull = &server->peers[worker].pulls[k];
    if (request != 0 && pull->request == request) return pull;
  }
  return NULL;
}

/* --- the pull condition --- */

/* Does the pull condition hold? `again`: the pull was delayed before. */
static int serve_may(mlfab__server *server, const mlfab__server_pull *pull, int again) {
  const mlfab__clock *clock = &server->clock;
  mlfab_sync_state state;
  if (clock->sync.kind == MLFAB_SYNC_ASYNC) return 1;
  mlfab__clock_state(server, pull->worker, pull->progress, &state);
  if (clock->sync.kind == MLFAB_SYNC_USER)
    return server->config->pull_condition(server->config->user, &state) != 0;
  uint64_t threshold = clock->tuner.threshold;
  if (again) return mlfab__sync_may_pull_again(&clock->sync, threshold, &state);
  double draw =
      mlfab__sync_draw(server->config->seed, server->number, pull->worker, pull->progress);
  return mlfab__sync_may_pull(&clock->sync, threshold, &state, draw);
}

/* 1 if the pull may be answered; 0 when it waits or has failed. */
static int serve_pass(mlfab__server *server, mlfab__server_pull *pull, int again) {
  mlfab__clock *clock = &server->clock;
  if (serve_may(server, pull, again)) return 1;
  uint64_t at = mlfab__lazy_at((int)clock->sync.soft, pull->progress, clock->v_train);
  if (mlfab__lazy_add(server->env, &clock->lazy, at, pull->tag)) {
    mlfab__serve_fail(server, pull->worker, pull->request, MLFAB_ERR_MEMORY, "out of memory");
    mlfab__serve_end(server, pull);
    return 0;
  }
  server->serve.waiting += !pull->waiting;
  pull->waiting = 1;
  return 0;
}

/* The pull condition holds: begins to answer, or the policy holds the pull back. */
static void serve_start(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->waiting) serve_unwait(server, pull);
  /* Reported once: the next pull gets the model as it is. */
  uint64_t refused = server->clock.refused_round;
  uint64_t told = server->peers[pull->worker].refused_told;
  if (refused != 0 && pull->progress == refused && told != refused) {
    server->peers[pull->worker].refused_told = refused;
    mlfab__serve_fail(server, pull->worker, pull->request, MLFAB_ERR_CALLBACK,
                      "the server's update callback refused the round");
    mlfab__serve_end(server, pull);
    return;
  }
  if (!server->policy || pull->view || !server->policy->pull_hold(server, pull))
    mlfab__serve_begin(server, pull);
}

/* Looks at the delayed pulls that are due, and starts those that may be answered: all, if they `pass`. */
static void serve_due(mlfab__server *server, int pass) {
  uint64_t tag;
  while (mlfab__lazy_pop(&server->clock.lazy, server->clock.v_train, &tag)) {
    mlfab__server_pull *pull =
        &server->peers[tag / MLFAB__SERVER_SLOTS].pulls[tag % MLFAB__SERVER_SLOTS];
    if (pass || serve_pass(server, pull, 1)) serve_start(server, pull);
  }
}

MLFAB__INTERNAL void mlfab__serve_look(mlfab__server *server) {
  mlfab__clock *clock = &server->clock;
  int changed = server->serve.changed, due = server->serve.due;
  server->serve.changed = server->serve.due = 0;
  if (server->serve.waiting == 0) return;
  if (changed) {
    mlfab__lazy_wake_all(&clock->lazy);
    serve_due(server, 0);
  }
  if (!due) return;
  if (mlfab__sync_watches(clock->sync.kind)) mlfab__lazy_wake_all(&clock->lazy);
  serve_due(server, !mlfab__sync_rechecks(&clock->sync));
}

MLFAB__INTERNAL mlfab__server_pull *mlfab__serve_slot(mlfab__server *server, uint32_t worker,
                                                      uint32_t segments, int own, int *code_p) {
  mlfab__server_pull *pull = NULL;
  *code_p = MLFAB_ERR_LIMIT;
  uint32_t end = own ? MLFAB__SERVER_SLOTS : MLFAB__SERVER_PULLS;
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
  mlfab__segment *room =
      mlfab__grow(server->env, pull->segments, &pull->segment_room, segments, sizeof *room);
  if (!room) return NULL;
  pull->segments = room;
  return pull;
}

MLFAB__INTERNAL void mlfab__serve_fill(mlfab__server *server, uint32_t worker,
                                       mlfab__server_pull *pull, uint64_t request,
                                       const mlfab__segment *segments, uint32_t n, uint64_t bytes) {
  pull->worker = worker;
  serve_list(server, pull);
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
  pull->waiting = pull->offered = pull->poor = 0;
  pull->view = NULL;
  pull->held = MLFAB__PULL_GOES;
}

MLFAB__INTERNAL void mlfab__serve_pull(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame) {
  mlfab__pull in;
  if (mlfab__port_refuse(&server->port, worker, frame,
                         mlfab__decode_pull(frame->meta, frame->meta_bytes, &in,
                                            server->lists->segments, server->lists->versions) ||
                             in.request == 0 || (in.request & MLFAB__SPREAD_BIT) != 0 ||
                             in.flags > MLFAB__PULL_VIEW || (in.flags && in.sinces > 0) ||
                             mlfab__serve_find(server, worker, in.request) ||
                             (server->lender && server->lender->has(server, worker, in.request))))
    return;
  if (server->phase != MLFAB__MODEL_STANDS) {
    mlfab__serve_fail(server, worker, in.request, MLFAB_ERR_STATE,
                      "a pull before the model exists");
    return;
  }
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < in.segments; i++) {
    bytes += server->lists->segments[i].bytes;
    if (!mlfab__layout_valid(&server->layout, server->number, &server->lists->segments[i])) {
      mlfab__server_drop(server, worker, MLFAB_ERR_FRAME,
                         "a pull of what is not of this server's slices");
      return;
    }
  }
  int view = (in.flags & MLFAB__PULL_VIEW) != 0 && in.segments > 0;
  const mlfab__server_sparse *sparse = view ? NULL : server->sparse;
  if (sparse && sparse->cache(server, worker, &in)) return;
  mlfab_pull_info info = {worker, server->number, in.progress, bytes};
  if (server->config->on_pull && server->config->on_pull(server->config->user, &info)) {
    mlfab__serve_fail(server, worker, in.request, MLFAB_ERR_CALLBACK,
                      "the server's request callback refused");
    return;
  }
  int code;
  mlfab__server_pull *pull = mlfab__serve_slot(server, worker, in.segments, 0, &code);
  if (!pull) {
    mlfab__serve_fail(server, worker, in.request, code,
                      code == MLFAB_ERR_MEMORY ? "out of memory" : "too many pulls at once");
    return;
  }
  mlfab__serve_fill(server, worker, pull, in.request, server->lists->segments, in.segments, bytes);
  if (view && mlfab__serve_view(server, pull,
                                server->lender ? server->lender->ask(server, pull, in.epoch)
                                               : MLFAB_ERR_UNSUPPORTED))
    return;
  if (sparse && sparse->keep(server, pull, &in)) {
    mlfab__serve_fail(server, worker, in.request, MLFAB_ERR_MEMORY, "out of memory");
    mlfab__serve_end(server, pull);
    return;
  }
  pull->progress = in.progress;
  pull->tag =
      (uint64_t)worker * MLFAB__SERVER_SLOTS + (uint64_t)(pull - server->peers[worker].pulls);
  if (serve_pass(server, pull, 0)) {
    serve_start(server, pull);
  } else if (pull->waiting) {
    server->stats->pulls_delayed++;
    server->clock.delayed++;
    serve_wait(server, pull);
  }
}

MLFAB__INTERNAL void mlfab__serve_cancel(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_in *frame) {
  mlfab__pull_cancel cancel;
  if (MLFAB__MALFORMED(&server->port, worker, frame, pull_cancel, &cancel)) return;
  if (cancel.request & MLFAB__SPREAD_BIT) return; /* a worker cannot cancel a spread */
  mlfab__server_pull *pull = mlfab__serve_find(server, worker, cancel.request);
  if (server->lender) server->lender->end(server, worker, cancel.request);
  if (!pull) return;
  mlfab__serve_over(server, pull, MLFAB_ERR_CANCELLED);
  if (server->policy) server->policy->turns(server);
}

MLFAB__INTERNAL uint32_t mlfab__serve_cut(const mlfab__server *server,
                                          const mlfab__segment *segment, uint64_t in_segment,
                                          uint32_t most, uint32_t *slice_p) {
  const mlfab__store *store = &server->store;
  uint64_t offset = segment->offset + in_segment;
  *slice_p = store->local[mlfab__layout_slice_at(&server->layout, offset)];
  const mlfab__shard_slice *s = &store->slices[*slice_p];
  uint64_t in_slice = offset - s->offset, at = in_slice % store->block_bytes;
  uint64_t bytes = mlfab__min(segment->bytes - in_segment,
                              mlfab__min(store->block_bytes - at, s->bytes - in_slice));
  return (uint32_t)mlfab__min(bytes, most);
}

/* --- frames --- */

/* Number of chunks that a placed pull may lend. */
static uint32_t serve_lent(const mlfab__server *server) {
  uint32_t chunks = SERVE_LENT / server->config->chunk_bytes;
  return chunks < 2 ? 2 : chunks;
}

/* The pull that sends next: unplaced (small) pulls first, then by place, then the oldest. */
static mlfab__server_pull *serve_pick(const mlfab__server *server, mlfab__server_peer *peer) {
  mlfab__server_pull *pull = NULL;
  int full = peer->nsends >= serve_lent(server);
  enum mlfab__shows shows = mlfab__server_shows(server);
  if (shows == MLFAB__SHOWS_NOTHING) return NULL;
  for (uint32_t k = 0, left = peer->pulling; left > 0 && k < MLFAB__SERVER_SLOTS; k++) {
    mlfab__server_pull *p = &peer->pulls[k];
    if (p->request == 0) continue;
    left--;
    if (!mlfab__server_goes(p) || (p->place != 0 && full)) continue;
    int pinned = p->view                ? server->lender->pinned(p)
                 : p->segments_used > 0 ? p->slice != MLFAB__NO_BLOCK
                                        : p->offered;
    if (p->view && !pinned) continue;
    if (shows == MLFAB__SHOWS_PINNED && !pinned) continue;
    if (!pull || p->place < pull->place || (p->place == pull->place && p->request < pull->request))
      pull = p;
  }
  return pull;
}

/* The pull's next bytes, of the pinned slice, into the frame. 1; 0: they are being copied from a device, with the rest of the slice;
 * MEMORY. */
static int serve_plain(mlfab__server *server, const mlfab__server_pull *pull, uint64_t in_slice,
                       uint32_t bytes, mlfab__frame_out *frame) {
  mlfab__store *store = &server->store;
  const mlfab__shard_slice *s = &store->slices[pull->slice];
  uint32_t nth = (uint32_t)(in_slice / store->block_bytes);
  uint32_t block = pull->pinned[nth];
  const uint8_t *at = NULL, *later = NULL;
  frame->bulk = NULL;
  frame->token = server->lender && server->lender->copies(server, pull->worker, bytes)
                     ? 0
                     : (uint64_t)block + 1;
  if (store->ghost) return 1;
  int there = mlfab__store_lend(store, block, &at);
  if (there > 0) frame->bulk = at + in_slice % store->block_bytes;
  if (there != 0) return there;
  for (uint32_t i = nth + 1; i < s->count; i++)
    (void)mlfab__store_lend(store, pull->pinned[i], &later);
  server->serve.copies = 1;
  return 0;
}

/* Fills the frame with the next bytes of a pull, from its pinned blocks. Returns as serve_plain. */
static int serve_bytes(mlfab__server *server, mlfab__server_pull *pull, mlfab__model *model,
                       mlfab__frame_out *frame) {
  const mlfab__store *store = &server->store;
  const mlfab__segment *segment = &pull->segments[pull->segment];
  const uint32_t most =
      pull->request & MLFAB__SPREAD_BIT
          ? pull->chunk
          : mlfab__port_chunk(&server->port, pull->worker, server->config->chunk_bytes);
  uint32_t slice, bytes = mlfab__serve_cut(server, segment, pull->in_segment, most, &slice);
  model->offset = segment->offset + pull->in_segment;
  if (pull->slice == MLFAB__NO_BLOCK) mlfab__blocks_pin(server, pull, slice);
  const mlfab__shard_slice *s = &store->slices[slice];
  uint64_t in_slice = model->offset - s->offset;
  uint64_t end = mlfab__min(segment->offset + segment->bytes - s->offset, s->bytes);
  if (server->sparse)
    model->bytes = server->sparse->answer(server, pull, in_slice, end, &bytes, frame);
  if (model->bytes > 0) {
    model->flags |= MLFAB__MODEL_PACKED;
  } else {
    int there = serve_plain(server, pull, in_slice, bytes, frame);
    if (there <= 0) return there;
    model->bytes = frame->bulk_bytes = bytes;
  }
  if (pull->segment + 1 < pull->segments_used || pull->in_segment + model->bytes < segment->bytes)
    model->flags &= ~(uint32_t)MLFAB__MODEL_LAST;
  model->version = pull->version;
  model->commit = pull->commit;
  model->epoch = server->epoch;
  model->slice = s->number;
  return 1;
}

MLFAB__INTERNAL int mlfab__server_next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  mlfab__server *server = self;
  mlfab__server_peer *peer = &server->peers[at.peer];
  mlfab__model model;
  server->now_ns = at.now_ns;
  mlfab__server_pull *pull = peer->nsends < MLFAB__SERVER_SENDS ? serve_pick(server, peer) : NULL;
  if (!pull) return 0;
  memset(&model, 0, sizeof model);
  model.request = pull->request;
  model.flags = MLFAB__MODEL_LAST;
  frame->slot = (uint32_t)(pull - peer->pulls);
  frame->type = MLFAB__MODEL;
  frame->bulk = NULL;
  frame->bulk_bytes = 0;
  frame->token = 0;
  if (pull->view) return server->lender->next(pull, frame);
  int there = pull->segments_used > 0 ? serve_bytes(server, pull, &model, frame) : 1;
  if (there < 0)
    server->serve.copies = pull->poor = 1; /* `next` posts nothing: see mlfab__serve_tick */
  if (there <= 0) return 0;
  frame->note[0] = model.bytes;
  frame->meta_bytes = mlfab__encode_model(frame->meta, &model);
  return 1;
}

/* The transport has taken all of a pull. */
static void serve_out(mlfab__server *server, mlfab__server_pull *pull) {
  int placed = pull->place != 0;
  if (pull->request & MLFAB__SPREAD_BIT) {
    server->policy->pull_out(server, pull);
  } else {
    server->stats->pulls_answered++;
    mlfab__serve_over(server, pull, 0);
  }
  if (placed) server->policy->turns(server);
}

/* Moves the cursor behind the frame's bytes; at the end of a slice, unpins it. */
static void serve_moved(mlfab__server *server, mlfab__server_pull *pull,
                        const mlfab__frame_out *frame) {
  pull->in_segment += frame->note[0];
  server->stats->pull_raw_bytes += frame->note[0];
  server->stats->pull_bytes += frame->bulk_bytes;
  uint64_t at = pull->segments[pull->segment].offset + pull->in_segment;
  if (pull->in_segment == pull->segments[pull->segment].bytes) {
    pull->segment++;
    pull->in_segment = 0;
    at = pull->segment < pull->segments_used ? pull->segments[pull->segment].offset : MLFAB__NEVER;
  }
  const mlfab__shard_slice *s = &server->store.slices[pull->slice];
  if (at >= s->offset + s->bytes) mlfab__blocks_unpin(server, pull);
}

MLFAB__INTERNAL void mlfab__server_taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  mlfab__server *server = self;
  mlfab__server_peer *peer = &server->peers[at.peer];
  mlfab__server_pull *pull = &peer->pulls[frame->slot];
  server->now_ns = at.now_ns;
  if (frame->token != 0) {
    uint32_t block = (uint32_t)(frame->token - 1);
    mlfab__store_ref(&server->store, block);
    peer->sends[peer->nsends++] = block;
  }
  if (pull->view) {
    if (server->lender->taken(server, pull, frame)) serve_out(server, pull);
    return;
  }
  if (pull->segments_used > 0) serve_moved(server, pull, frame);
  pull->progress_ns = at.now_ns;
  /* The link makes progress: a spread behind another pull of this worker is not stalled. */
  for (uint32_t k = MLFAB__SERVER_PULLS; k < MLFAB__SERVER_SLOTS; k++)
    peer->pulls[k].progress_ns = at.now_ns;
  if (pull->segment == pull->segments_used) {
    serve_out(server, pull);
  } else if (pull->place != 0) {
    /* The policy reports to the scheduler how much is still to be sent. */
    server->policy->pull_left(server, pull, frame->note[0]);
  }
}

MLFAB__INTERNAL void mlfab__server_sent(void *self, mlfab__at at, uint64_t token) {
  mlfab__server *server = self;
  mlfab__server_peer *peer = &server->peers[at.peer];
  for (uint32_t i = 0; i < peer->nsends; i++) {
    if ((uint64_t)peer->sends[i] + 1 != token) continue;
    mlfab__store_unref(&server->store, peer->sends[i]);
    peer->sends[i] = peer->sends[--peer->nsends];
    server->port.ready(server->port.self, at.peer);
    return;
  }
}

MLFAB__INTERNAL void mlfab__serve_stop(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
    mlfab__server_pull *pull = &peer->pulls[k];
    if (pull->request == 0) continue;
    if (pull->view) server->lender->end(server, worker, pull->request);
    mlfab__serve_over(server, pull, MLFAB_ERR_PEER_CLOSED);
  }
  for (uint32_t k = MLFAB__SERVER_PULLS; k < MLFAB__SERVER_SLOTS; k++) {
    if (peer->pulls[k].request != 0) mlfab__serve_end(server, &peer->pulls[k]);
  }
  if (server->policy) server->policy->stopped(server, worker);
}

MLFAB__INTERNAL void mlfab__serve_reset(mlfab__server *server, uint32_t worker) {
  mlfab__serve_stop(server, worker);
  mlfab__blocks_unlend(server, worker);
  if (server->lender) server->lender->lost(server, worker);
}

MLFAB__INTERNAL void mlfab__serve_tick(mlfab__server *server) {
  mlfab__serve_walk walk = {NULL, 0};
  if (server->serve.copies) server->memory->on->again(server->memory);
  mlfab__blocks_drop_orphans(server);
  if (server->lender) server->lender->tick(server);
  for (mlfab__server_pull *pull; (pull = mlfab__serve_each(server, &walk)) != NULL;) {
    /* the policy watches these */
    if ((pull->request & MLFAB__SPREAD_BIT) || pull->spread != 0) continue;
    if (server->now_ns - pull->progress_ns < server->heartbeat_ns) continue;
    if (pull->waiting) serve_wait(server, pull);
    if (pull->slice == MLFAB__NO_BLOCK) continue;
    if (!mlfab__port_stalled(&server->port, pull->worker, 1, pull->progress_ns, server->now_ns,
                             3 * server->heartbeat_ns,
                             MLFAB__PORT_STANDS_BEATS * server->heartbeat_ns))
      continue;
    mlfab__blocks_restart(server, pull);
    pull->progress_ns = server->now_ns;
  }
}

MLFAB__INTERNAL void mlfab__serve_free(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_SLOTS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0) mlfab__serve_end(server, pull);
      mlfab__free(server->env, pull->segments, pull->segment_room * sizeof *pull->segments);
      if (pull->since) server->sparse->forget(server, pull);
      mlfab__free(server->env, pull->pinned,
                  server->store.positions_per_slice * sizeof *pull->pinned);
    }
    mlfab__blocks_unlend(server, w);
  }
  mlfab__blocks_drop_orphans(server);
  mlfab__free(server->env, server->serve.orphans,
              server->serve.orphan_room * sizeof *server->serve.orphans);
  server->serve.orphans = NULL;
  server->serve.orphan_room = 0;
}
