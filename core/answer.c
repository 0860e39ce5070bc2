/* answer.c - the server role: answering pulls. See server.h.
 *
 * A pull waits until the pull condition holds, then sends its stretches slice by slice: it pins the
 * blocks of a slice, so that all of them are of one version, and unpins them when their last
 * byte is handed to the transport. A reader that stalls, or a server short of spare blocks, unpins a
 * slice in the middle: the slice is begun again, at the version of that time.
 *
 * Source: FluentPS Alg. 1, lines of the pull request. */
#include "server.h"

#include "reduce.h"

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
  pull->commit = s->commit;
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
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0) answer_restart(server, pull);
    }
  }
}

static void answer_end(mlfab__server *server, mlfab__server_pull *pull) {
  if (pull->waiting) server->waiting--;
  pull->waiting = 0;
  answer_unpin(server, pull);
  pull->request = 0;
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
  mlfab__pull_fail wait;
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  memset(&wait, 0, sizeof wait);
  wait.request = pull->request;
  wait.code = MLFAB_ERR_AGAIN;
  wait.rank = MLFAB_NO_RANK;
  for (uint32_t w = server->workers; w-- > 0;) {
    const mlfab__server_peer *peer = &server->peers[w];
    if (!peer->arrived && !peer->dead && !peer->left && !peer->done) wait.rank = (int32_t)w;
  }
  pull->progress_ns = server->now_ns;
  server->port.post(server->port.self, worker, MLFAB__PULL_FAIL, meta,
                    mlfab__encode_pull_fail(meta, &wait));
}

static int answer_may(const mlfab__server *server, const mlfab__server_pull *pull) {
  mlfab__sync_state state = {server->v_train, pull->progress, 0, 0};
  return mlfab__sync_may_pull(server->options.sync, &state);
}

/* The pull condition holds: begins to answer. */
static void answer_start(mlfab__server *server, uint32_t worker, mlfab__server_pull *pull) {
  if (pull->waiting) server->waiting--;
  pull->waiting = 0;
  /* Said once: the next pull gets the model as it stands. */
  uint64_t refused = server->refused_round;
  if (refused != 0 && pull->progress == refused && server->peers[worker].refused_told != refused) {
    server->peers[worker].refused_told = refused;
    answer_fail(server, worker, pull->request, MLFAB_ERR_CALLBACK,
                "the server's update callback refused the round");
    answer_end(server, pull);
    return;
  }
  pull->progress_ns = server->now_ns;
  server->port.ready(server->port.self, worker);
}

MLFAB__INTERNAL void mlfab__answer_check(mlfab__server *server) {
  for (uint32_t w = 0; server->waiting > 0 && w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request != 0 && pull->waiting && answer_may(server, pull))
        answer_start(server, w, pull);
    }
  }
}

static mlfab__server_pull *answer_slot(mlfab__server *server, uint32_t worker, uint32_t segments,
                                       int *code_p) {
  mlfab__server_pull *pull = NULL;
  *code_p = MLFAB_ERR_LIMIT;
  for (uint32_t k = 0; k < MLFAB__SERVER_PULLS && !pull; k++) {
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

MLFAB__INTERNAL void mlfab__answer_pull(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame) {
  mlfab__pull in;
  if (mlfab__decode_pull(frame->meta, frame->meta_bytes, &in, server->segments_scratch) ||
      in.request == 0) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a PULL that does not parse");
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
  mlfab_pull_info info = {worker, server->number, in.progress, bytes};
  if (server->config->on_pull && server->config->on_pull(server->config->user, &info)) {
    answer_fail(server, worker, in.request, MLFAB_ERR_CALLBACK,
                "the server's request callback refused");
    return;
  }
  int code;
  mlfab__server_pull *pull = answer_slot(server, worker, in.segments, &code);
  if (!pull) {
    answer_fail(server, worker, in.request, code,
                code == MLFAB_ERR_MEMORY ? "out of memory" : "too many pulls at once");
    return;
  }
  memcpy(pull->segments, server->segments_scratch, in.segments * sizeof *pull->segments);
  pull->request = in.request;
  pull->progress = in.progress;
  pull->segments_used = in.segments;
  pull->segment = 0;
  pull->in_segment = 0;
  pull->slice = MLFAB__NO_BLOCK;
  pull->waiting = 1;
  server->waiting++;
  if (answer_may(server, pull)) {
    answer_start(server, worker, pull);
  } else {
    server->stats->pulls_delayed++;
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
  for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
    mlfab__server_pull *pull = &server->peers[worker].pulls[k];
    if (pull->request != 0 && pull->request == cancel.request) answer_end(server, pull);
  }
}

MLFAB__INTERNAL int mlfab__server_next(mlfab__server *server, uint32_t worker,
                                       mlfab__frame_out *frame, uint64_t now_ns) {
  mlfab__server_peer *peer = &server->peers[worker];
  server->now_ns = now_ns;
  if (peer->nsends == MLFAB__SERVER_SENDS) return 0;
  /* The oldest pull first. */
  mlfab__server_pull *pull = NULL;
  for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
    mlfab__server_pull *p = &peer->pulls[k];
    if (p->request != 0 && !p->waiting && (!pull || p->request < pull->request)) {
      pull = p;
      frame->slot = k;
    }
  }
  if (!pull) return 0;
  mlfab__store *store = &server->store;
  mlfab__model model = {pull->request, 0, 0, 0, 0, MLFAB__MODEL_LAST};
  frame->type = MLFAB__MODEL;
  frame->bulk = NULL;
  frame->bulk_bytes = 0;
  frame->token = 0;
  if (pull->segments_used > 0) {
    const mlfab__segment *segment = &pull->segments[pull->segment];
    model.offset = segment->offset + pull->in_segment;
    uint32_t slice = mlfab__layout_slice_at(&server->layout, model.offset) - store->first_slice;
    if (pull->slice == MLFAB__NO_BLOCK) answer_pin(server, pull, slice);
    const mlfab__shard_slice *s = &store->slices[slice];
    uint64_t in_slice = model.offset - s->offset;
    uint64_t at = in_slice % store->block_bytes;
    uint64_t bytes = mlfab__min(segment->bytes - pull->in_segment,
                                mlfab__min(store->block_bytes - at, s->bytes - in_slice));
    bytes = mlfab__min(bytes, server->config->chunk_bytes);
    if (pull->segment + 1 < pull->segments_used || pull->in_segment + bytes < segment->bytes)
      model.flags = 0;
    uint32_t nth = (uint32_t)(in_slice / store->block_bytes);
    uint32_t block = MLFAB__PLANTED(4) ? store->w[s->first + nth] : pull->pinned[nth];
    model.version = pull->version;
    model.commit = pull->commit;
    model.slice = slice + store->first_slice;
    frame->bulk = store->ghost ? NULL : store->blocks[block].data + at;
    frame->bulk_bytes = (uint32_t)bytes;
    frame->token = (uint64_t)block + 1;
  }
  frame->meta_bytes = mlfab__encode_model(frame->meta, &model);
  return 1;
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
    pull->in_segment += frame->bulk_bytes;
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
  if (pull->segment == pull->segments_used) {
    server->stats->pulls_answered++;
    answer_end(server, pull);
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

MLFAB__INTERNAL void mlfab__answer_reset(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
    if (peer->pulls[k].request != 0) answer_end(server, &peer->pulls[k]);
  }
  for (uint32_t i = 0; i < peer->nsends; i++) mlfab__store_unref(&server->store, peer->sends[i]);
  peer->nsends = 0;
}

MLFAB__INTERNAL void mlfab__answer_tick(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      if (pull->request == 0 || server->now_ns - pull->progress_ns < server->heartbeat_ns) continue;
      if (pull->waiting) answer_wait(server, w, pull);
      if (pull->slice == MLFAB__NO_BLOCK) continue;
      if (server->now_ns - pull->progress_ns < 3 * server->heartbeat_ns) continue;
      answer_restart(server, pull);
      pull->progress_ns = server->now_ns;
    }
  }
}

MLFAB__INTERNAL void mlfab__answer_free(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    mlfab__answer_reset(server, w);
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      mlfab__free(server->env, pull->segments, pull->segment_room * sizeof *pull->segments);
      mlfab__free(server->env, pull->pinned,
                  server->store.positions_per_slice * sizeof *pull->pinned);
    }
  }
}
