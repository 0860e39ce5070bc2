/* reshard_server.c - the server role: sends slices to other servers, and receives slices. See reshard.h.
 *
 * PREPARE: the server is held. When no update or pull is under way and all loans of blocks are back, it makes a second
 * layout and store. SEND: for each server that gets slices from here, a cursor walks over them, one kind of bytes after
 * the other. After a link breaks, the cursor starts again, and the receiver skips the slices that it has. The transport
 * copies these frames, so the old store lends nothing. INSTALL: cannot fail. Kept slices swap their blocks and states
 * with the new store's, which replaces the old store. */
#include "reshard.h"

#include "../model/image.h"
#include "../server/clock_copy.h"

#include <stdio.h>

struct mlfab__reshard_server {
  uint32_t attempt;
  int ready, sending, answered; /* answered: it has answered SEND */
  int leaderless;               /* PROMISED, and server 0 is out of reach */
  uint8_t *heard;               /* by server: it is leaderless as well, or out of reach */
  uint32_t *owners;
  uint32_t nowners, servers;
  mlfab__layout layout;
  mlfab__store store;
  uint64_t *ahead;
  uint8_t *stage, *scratch;
  uint64_t stage_bytes;
  mlfab__image_part *entries;   /* by slice of the new store: the bytes received of it */
  uint32_t coming;              /* number of entries that are not complete */
  mlfab__image_cursor *cursors; /* by server */
  uint32_t clock_from;          /* the lowest server whose clock has come, or MLFAB__NO_NODE */
  mlfab__clock_record clock;    /* its clock, with the open rounds of all */
  uint32_t *words, nwords;
};

/* --- memory --- */

static void reshard_server_drop(mlfab__server *server) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  mlfab__env *env = server->env;
  if (!shift) return;
  mlfab__free(env, shift->words, shift->nwords * sizeof *shift->words);
  mlfab__free(env, shift->cursors, shift->servers * sizeof *shift->cursors);
  mlfab__free(env, shift->heard, shift->servers);
  mlfab__free(env, shift->entries, shift->store.nslices * sizeof *shift->entries);
  mlfab__free(env, shift->ahead, shift->store.nslices * sizeof *shift->ahead);
  mlfab__free_aligned(env, shift->scratch, shift->store.block_bytes);
  mlfab__free(env, shift->stage, shift->stage_bytes);
  mlfab__store_free(env, &shift->store);
  mlfab__layout_free(env, &shift->layout);
  mlfab__free(env, shift->owners, shift->nowners * sizeof *shift->owners);
  mlfab__free(env, shift, sizeof *shift);
  server->move.under_way = NULL;
}

static int reshard_server_begin(mlfab__server *server, uint32_t attempt, const uint32_t *owners,
                                uint32_t n) {
  mlfab__env *env = server->env;
  struct mlfab__reshard_server *shift = mlfab__alloc(env, sizeof *shift);
  if (!shift) return MLFAB_ERR_MEMORY;
  memset(shift, 0, sizeof *shift);
  server->move.under_way = shift;
  shift->attempt = attempt;
  shift->clock_from = MLFAB__NO_NODE;
  shift->nwords = (server->workers + 31) / 32;
  shift->words = mlfab__alloc_array(env, shift->nwords, sizeof *shift->words);
  shift->servers = server->servers;
  shift->owners = mlfab__alloc_array(env, n, sizeof *shift->owners);
  shift->nowners = shift->owners ? n : 0;
  shift->cursors = mlfab__alloc_array(env, server->servers, sizeof *shift->cursors);
  shift->heard = mlfab__alloc(env, server->servers);
  if (!shift->words || !shift->owners || !shift->cursors || !shift->heard) {
    reshard_server_drop(server); /* a partial state is useless */
    return MLFAB_ERR_MEMORY;
  }
  memcpy(shift->owners, owners, n * sizeof *owners);
  return 0;
}

/* Allocates the arrays whose size depends on the shard. */
static int reshard_server_room(mlfab__server *server, struct mlfab__reshard_server *shift) {
  mlfab__env *env = server->env;
  const mlfab__store *store = &shift->store;
  if (store->nslices == 0) return 0;
  shift->ahead = mlfab__alloc_array(env, store->nslices, sizeof *shift->ahead);
  shift->entries = mlfab__alloc_array(env, store->nslices, sizeof *shift->entries);
  if (!shift->ahead || !shift->entries) return MLFAB_ERR_MEMORY;
  if (store->ghost) return 0;
  uint64_t stage_bytes = mlfab__server_stage(server, store->bytes, 0);
  shift->stage = mlfab__alloc(env, stage_bytes);
  if (!shift->stage) return MLFAB_ERR_MEMORY;
  shift->stage_bytes = stage_bytes;
  if (server->config->on_update) {
    shift->scratch = mlfab__alloc_aligned(env, store->block_bytes);
    if (!shift->scratch) return MLFAB_ERR_MEMORY;
  }
  return 0;
}

/* Builds the store of the new slices, beside the current one. */
static int reshard_server_build(mlfab__server *server, struct mlfab__reshard_server *shift) {
  mlfab__env *env = server->env;
  const mlfab_model_options *options = &server->options;
  mlfab_error error;
  int code =
      mlfab__layout_build(env, server->definition, server->ndefinition,
                          server->save.cut ? server->save.cut : options->slices, server->servers,
                          options->active, server->config->model_max_bytes, &shift->layout, &error);
  if (code) return code;
  mlfab__layout_assign(&shift->layout, shift->owners);
  uint32_t states = server->config->on_update ? 0 : mlfab__optimizer_states(server->optimizer.kind);
  code = mlfab__store_init(env, &shift->store, server->store.memory, server->store.slab,
                           &shift->layout, server->number, server->config->block_bytes,
                           server->rounds, states, options->ghost != 0);
  if (!code && server->sparse) code = server->sparse->tag(env, &shift->store, options->tags);
  if (!code) code = reshard_server_room(server, shift);
  if (code) return code;
  for (uint32_t i = 0; i < shift->store.nslices; i++) {
    uint32_t number = shift->store.slices[i].number;
    shift->entries[i].done = server->store.local[number] != MLFAB__NO_SLICE;
    shift->coming += !shift->entries[i].done;
  }
  return 0;
}

/* --- answers to server 0 --- */

static void reshard_server_answer(mlfab__server *server) {
  server->move.across.ready(server->move.across.self, 0);
  MLFAB__POST(&server->move.across, 0, MLFAB__MOVED, moved, &server->move.moved);
}

/* Is this an added server, and has it no slices? Then it does not count, and other servers' attempts are unknown to
 * it. */
static int reshard_server_is_idle(const mlfab__server *server) {
  return server->move.adopted && server->store.nslices == 0;
}

static void reshard_server_done(mlfab__server *server, uint32_t attempt, uint32_t step, int code,
                                const char *text) {
  mlfab__moved *moved = &server->move.moved;
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  mlfab__clock_record clock;
  memset(moved, 0, sizeof *moved);
  moved->attempt = attempt;
  moved->step = step;
  moved->server = server->number;
  moved->code = code;
  mlfab__clock_told(server, &clock, words);
  mlfab__clock_holes(server, words);
  moved->round = reshard_server_is_idle(server) ? MLFAB__NEVER : mlfab__clock_round(&clock, words);
  moved->scale = mlfab__clock_scale(server, &clock);
  snprintf(moved->text, sizeof moved->text, "%.255s", text);
  reshard_server_answer(server);
}

static void reshard_server_failed(mlfab__server *server, uint32_t step, int code,
                                  const char *what) {
  char text[MLFAB__TEXT_MAX];
  snprintf(text, sizeof text, "server %u %s", server->number, what);
  reshard_server_done(server, server->move.under_way->attempt, step, code, text);
}

/* --- workers that stop --- */

/* Ends the worker's stream and pulls. First decides updates that can no longer be recalled. */
static void reshard_server_stop_worker(mlfab__server *server, uint32_t worker) {
  mlfab__apply_finish(server, worker);
  mlfab__apply_reset(server, worker);
  mlfab__serve_stop(server, worker);
  server->peers[worker].change.ask = 0;
}

/* Sends a HELLO_ACK that answers no HELLO. */
static void reshard_server_tell(mlfab__server *server, uint32_t worker) {
  mlfab__hello_ack ack;
  /* A server that has got its first slices has another consistency model now. */
  if (server->phase == MLFAB__MODEL_STANDS && !server->move.held) mlfab__clock_tell(server, worker);
  mlfab__server_hello_ack(server, worker, MLFAB__ACK_STOP, &ack);
  MLFAB__POST(&server->port, worker, MLFAB__HELLO_ACK, hello_ack, &ack);
}

static void reshard_server_stop(mlfab__server *server, uint32_t worker,
                                const mlfab__frame_in *frame) {
  mlfab__server_peer *peer = &server->peers[worker];
  mlfab__stop stop;
  if (mlfab__port_refuse(&server->port, worker, frame,
                         mlfab__decode_stop(frame->meta, frame->meta_bytes, &stop) ||
                             stop.kind > MLFAB__STOP_OVER))
    return;
  peer->stopped = stop.kind == MLFAB__STOP_OVER ? 0 : stop.attempt;
  peer->drained = stop.kind == MLFAB__STOP_DRAINED;
  if (stop.kind != MLFAB__STOP_DRAINED) {
    reshard_server_stop_worker(server, worker);
    reshard_server_tell(server, worker);
  }
  mlfab__clock_members(server);
  mlfab__server_advance(server);
}

/* Tells workers that did not take part in FREEZING that slices are moving. A checkpoint that is being written ends. */
static void reshard_server_hold(mlfab__server *server) {
  server->move.held = 1;
  if (server->save.hooks) server->save.hooks->stop(server);
  for (uint32_t w = 0; w < server->workers; w++) {
    reshard_server_stop_worker(server, w);
    if (server->peers[w].connected && !server->peers[w].stopped) reshard_server_tell(server, w);
  }
}

/* --- slices to send --- */

/* Moves the cursor to the next bytes for `to`: returns 1, or 0 after the last. */
static int reshard_server_seek(const mlfab__server *server, uint32_t to,
                               mlfab__image_cursor *cursor, mlfab__image_chunk *chunk) {
  return mlfab__image_next(&server->store, server->move.under_way->owners, to,
                           mlfab__port_chunk(&server->move.across, to, server->config->chunk_bytes),
                           cursor, chunk);
}

MLFAB__INTERNAL int mlfab__reshard_server_wants(const mlfab__server *server, uint32_t to) {
  const struct mlfab__reshard_server *shift = server->move.under_way;
  mlfab__image_cursor cursor = {0, 0, 0};
  mlfab__image_chunk chunk;
  /* Perhaps an answer needs repeating. */
  if (to == 0) return shift || server->move.moved.attempt != 0;
  if (shift && shift->leaderless) return to != server->number;
  return shift && shift->sending && to != server->number &&
         reshard_server_seek(server, to, &cursor, &chunk);
}

MLFAB__INTERNAL int mlfab__reshard_server_next(mlfab__server *server, uint32_t to,
                                               mlfab__frame_out *frame) {
  const struct mlfab__reshard_server *shift = server->move.under_way;
  mlfab__image_chunk chunk;
  if (!shift || !shift->sending || to == server->number) return 0;
  mlfab__image_cursor cursor = shift->cursors[to];
  if (!reshard_server_seek(server, to, &cursor, &chunk)) return 0;
  const mlfab__shard_slice *s = &server->store.slices[chunk.slice];
  mlfab__reshard_server_bytes head = {shift->attempt, s->number, chunk.kind,          chunk.offset,
                                      s->version,     s->commit, (uint32_t)chunk.last};
  frame->type = MLFAB__RESHARD_SERVER;
  frame->meta_bytes = mlfab__encode_reshard_server_bytes(frame->meta, &head);
  frame->bulk = mlfab__memory_see(server->store.memory, chunk.data, chunk.bytes, server->window);
  frame->bulk_bytes = chunk.bytes;
  frame->token = 0;
  return 1;
}

MLFAB__INTERNAL void mlfab__reshard_server_taken(mlfab__server *server, uint32_t to,
                                                 const mlfab__frame_out *frame) {
  mlfab__image_cursor *cursor = &server->move.under_way->cursors[to];
  mlfab__image_chunk chunk;
  reshard_server_seek(server, to, cursor, &chunk);
  cursor->offset += frame->bulk_bytes;
}

/* Sends the clock to `to`, before the slices. A flush may change it until SEND. */
static void reshard_server_tell_clock(mlfab__server *server, uint32_t to) {
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  mlfab__clock_record clock;
  if (!server->move.under_way->sending) return;
  mlfab__clock_told(server, &clock, words);
  clock.attempt = server->move.under_way->attempt;
  MLFAB__POST_LIST(256 + 4 * MLFAB__RESHARD_SERVER_WORDS_MAX, &server->move.across, to,
                   MLFAB__RESHARD_SERVER_CLOCK, clock_record, &clock, words);
}

MLFAB__INTERNAL void mlfab__reshard_server_up(mlfab__server *server, uint32_t to) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  if (to == 0) server->move.orphan = 0;
  /* The last answer may have been lost. Server 0 answers with the outcome if the attempt is over. */
  if (to == 0 && server->move.moved.attempt != 0) reshard_server_answer(server);
  if (!shift) return;
  memset(&shift->cursors[to], 0, sizeof shift->cursors[to]);
  if (!mlfab__reshard_server_wants(server, to)) return;
  reshard_server_tell_clock(server, to);
  server->move.across.ready(server->move.across.self, to);
}

static void reshard_server_send(mlfab__server *server) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  shift->sending = 1;
  for (uint32_t s = 0; s < server->servers; s++) {
    if (s == server->number || !mlfab__reshard_server_wants(server, s)) continue;
    reshard_server_tell_clock(
        server, s); /* without a link this is lost: mlfab__reshard_server_up repeats it */
    server->move.across.ready(server->move.across.self, s);
  }
}

/* --- slices to receive --- */

/* Adds the open round of `from` to those that have come. A server that has joined, without slices, will take the clock of the
 * lowest server that sends it slices. */
static int reshard_server_take_clock(mlfab__server *server, uint32_t from,
                                     const mlfab__frame_in *frame) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX];
  mlfab__clock_record clock;
  if (mlfab__decode_clock_record(frame->meta, frame->meta_bytes, &clock, words))
    return MLFAB_ERR_FRAME;
  if (!shift || !shift->ready || clock.attempt != shift->attempt) return 0;
  clock.consistency.size = sizeof clock.consistency;
  if (clock.words != shift->nwords || mlfab__sync_check(&clock.consistency, server->workers, NULL))
    return MLFAB_ERR_FRAME;
  for (uint32_t i = 0; i < shift->nwords; i++) shift->words[i] |= words[i];
  mlfab__clock_record sum = from < shift->clock_from ? clock : shift->clock;
  sum.scale = clock.members > 0 ? clock.scale : shift->clock.scale;
  sum.members = clock.members > shift->clock.members ? clock.members : shift->clock.members;
  shift->clock = sum;
  if (shift->clock_from > from) shift->clock_from = from;
  return 0;
}

static int reshard_server_take_bytes(mlfab__server *server, uint32_t from,
                                     const mlfab__frame_in *frame) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  mlfab__reshard_server_bytes head;
  if (mlfab__decode_reshard_server_bytes(frame->meta, frame->meta_bytes, &head))
    return MLFAB_ERR_FRAME;
  if (!shift || !shift->ready || head.attempt != shift->attempt) return 0;
  mlfab__store *store = &shift->store;
  if (head.slice >= shift->nowners || store->local[head.slice] == MLFAB__NO_SLICE ||
      server->layout.slices[head.slice].server != from)
    return MLFAB_ERR_FRAME;
  uint32_t local = store->local[head.slice];
  mlfab__image_part *part = &shift->entries[local];
  if (part->done) return 0;
  if (shift->clock_from > from) return MLFAB_ERR_FRAME; /* its clock has not come */
  /* The states may be absent: perhaps only one of the two servers has a callback that applies updates. */
  const mlfab__image_chunk chunk = {.slice = local,
                                    .kind = head.kind,
                                    .offset = head.offset,
                                    .bytes = frame->bulk_bytes,
                                    .last = head.last != 0};
  int code = mlfab__image_take(server->env, store, part, &chunk, frame->bulk);
  if (code || !part->done) return code;
  store->slices[local].version = head.version;
  store->slices[local].commit = head.commit;
  shift->coming--;
  return 0;
}

MLFAB__INTERNAL int mlfab__reshard_server_frame(mlfab__server *server, uint32_t from,
                                                const mlfab__frame_in *frame) {
  int code = frame->type == MLFAB__RESHARD_SERVER ? reshard_server_take_bytes(server, from, frame)
             : frame->type == MLFAB__RESHARD_SERVER_CLOCK
                 ? reshard_server_take_clock(server, from, frame)
                 : MLFAB_ERR_FRAME;
  if (code != MLFAB_ERR_MEMORY) return code;
  reshard_server_failed(server, MLFAB__MOVE_SEND, code, "is out of memory for slices that come");
  return 0;
}

/* --- the new store --- */

static void reshard_server_swap(uint8_t **a, uint8_t **b) {
  uint8_t *c = *a;
  *a = *b;
  *b = c;
}

/* Keeps a slice: swaps its blocks with unused blocks of the new store; the bytes that a view reads do not move. */
static void reshard_server_keep(mlfab__server *server, mlfab__store *to, uint32_t local) {
  mlfab__store *from = &server->store;
  mlfab__shard_slice *s = &to->slices[local];
  const mlfab__shard_slice *old = &from->slices[from->local[s->number]];
  s->version = old->version;
  s->commit = old->commit;
  assert(from->block_bytes == to->block_bytes);
  for (uint32_t i = 0; i < s->count; i++) {
    uint32_t p = old->first + i, q = s->first + i;
    const mlfab__block *w = &from->blocks[from->w[p]];
    if (w->refs > 1)
      memcpy(to->blocks[to->w[q]].data, w->data, to->block_bytes);
    else
      reshard_server_swap(&from->blocks[from->w[p]].data, &to->blocks[to->w[q]].data);
    if (from->s0) reshard_server_swap(&from->s0[p], &to->s0[q]);
    if (from->s1) reshard_server_swap(&from->s1[p], &to->s1[q]);
    if (from->sum[p] == MLFAB__NO_BLOCK) continue;
    /* A spare block exists: nobody writes, so there are at least as many spare blocks as positions. */
    to->sum[q] = mlfab__store_take(to);
    reshard_server_swap(&from->blocks[from->sum[p]].data, &to->blocks[to->sum[q]].data);
  }
}

MLFAB__INTERNAL void mlfab__serve_resize(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_SLOTS; k++) {
      mlfab__server_pull *pull = &server->peers[w].pulls[k];
      mlfab__free(server->env, pull->pinned,
                  server->store.positions_per_slice * sizeof *pull->pinned);
      pull->pinned = NULL;
    }
  }
}

/* Replaces all arrays whose size depends on the old shard. */
static void reshard_server_replace(mlfab__server *server, struct mlfab__reshard_server *shift) {
  mlfab__env *env = server->env;
  mlfab__serve_resize(server);
  mlfab__server_empty(server);
  server->layout = shift->layout;
  server->store = shift->store;
  server->store.layout = &server->layout;
  server->queue.ahead = shift->ahead;
  server->apply.scratch = shift->scratch;
  server->apply.stages[0] = shift->stage;
  server->apply.stage_bytes = mlfab__server_stage(server, server->store.bytes, server->store.ghost);
  server->eager_bytes = mlfab__server_credit(server, server->store.bytes);
  mlfab__free(env, shift->entries, server->store.nslices * sizeof *shift->entries);
  memset(&shift->layout, 0, sizeof shift->layout);
  memset(&shift->store, 0, sizeof shift->store);
  shift->entries = NULL;
  shift->ahead = NULL;
  shift->scratch = shift->stage = NULL;
  shift->stage_bytes = 0;
}

static void reshard_server_install(mlfab__server *server) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  mlfab__store *store = &shift->store;
  if (shift->clock_from != MLFAB__NO_NODE) {
    if (reshard_server_is_idle(server)) mlfab__clock_take(server, &shift->clock, shift->words);
    mlfab__clock_unite(server, &shift->clock, shift->words);
  }
  for (uint32_t i = 0; i < store->nslices; i++) {
    mlfab__shard_slice *s = &store->slices[i];
    if (server->store.local[s->number] != MLFAB__NO_SLICE) {
      reshard_server_keep(server, store, i);
    } else {
      server->stats->slices_moved++;
      server->stats->bytes_moved += s->bytes;
    }
    /* Earlier changes are no longer known. */
    if (store->tags) store->tags->moved(store, i);
    s->changed = server->store.changes + 1;
  }
  store->changes = server->store.changes + 1;
  reshard_server_replace(server, shift);
  server->norm_commits = 0;
  server->epoch = shift->attempt;
}

/* Ends the attempt at this server. */
static void reshard_server_end(mlfab__server *server) {
  reshard_server_drop(server);
  server->move.held = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    peer->stopped = 0;
    peer->drained = 0;
    /* RESUME may have arrived before the answer that delayed the worker. */
    if (peer->put_off && peer->connected) reshard_server_tell(server, w);
  }
  mlfab__clock_members(server);
  server->queue.place_due = 1;
  server->retold = 1;
  mlfab__server_advance(server);
}

/* --- steps --- */

/* Is no block lent and no pull open? */
static int reshard_server_unread(const mlfab__server *server) {
  if (server->serve.first) return 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    if (server->peers[w].nsends > 0) return 0;
  }
  return 1;
}

/* Is nothing under way into or out of the blocks? */
static int reshard_server_quiet(const mlfab__server *server) {
  return server->apply.applying == MLFAB__APPLY_NONE && !server->apply.head &&
         !server->queue.first && !server->queue.unplaced_first && reshard_server_unread(server);
}

/* Should this round close without some workers? Slices are about to move, and an update of a stopped worker waits for a
 * round; only workers that will push nothing more before the move hold it open. This happens when servers have
 * different models, or when workers joined while the servers were at different rounds. Then the round closes without
 * them. If the servers agree, it cannot happen: another server decided the update after all workers had pushed to the
 * round before, so their updates come here first. */
static int reshard_server_forces(mlfab__server *server) {
  const mlfab__clock *clock = &server->clock;
  int waits = 0;
  if (!server->rounds || server->tally.stopped == 0) return 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    waits |= peer->stopped && !peer->drained && peer->queued > 0 && peer->pushed > clock->v_train;
    if (mlfab__clock_lives(peer) && !peer->drained && peer->pushed <= clock->v_train) return 0;
  }
  for (uint32_t w = 0; waits && w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    if (peer->drained) peer->pushed = mlfab__max(peer->pushed, clock->v_train + 1);
    server->tally.counted = 0;
  }
  return waits;
}

static void reshard_server_prepare(mlfab__server *server) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  int code = reshard_server_build(server, shift);
  if (code) {
    reshard_server_failed(server, MLFAB__MOVE_PREPARE, code, "is out of memory for its new slices");
    return;
  }
  shift->ready = 1;
  reshard_server_done(server, shift->attempt, MLFAB__MOVE_PREPARE, 0, "");
}

MLFAB__INTERNAL void mlfab__reshard_server_check(mlfab__server *server) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  if (!shift) return;
  int failed = server->move.moved.attempt == shift->attempt && server->move.moved.code;
  if (failed) return; /* ABORT follows */
  if (!shift->ready) {
    if (reshard_server_quiet(server)) reshard_server_prepare(server);
  } else if (shift->sending && shift->coming == 0 && !shift->answered) {
    int takes = reshard_server_is_idle(server) && shift->clock_from != MLFAB__NO_NODE;
    int code = takes ? mlfab__clock_follows(server, shift->clock.consistency.kind, NULL) : 0;
    shift->answered = 1;
    if (code)
      reshard_server_failed(server, MLFAB__MOVE_SEND, code,
                            "has no pull_condition or no push_condition");
    else
      reshard_server_done(server, shift->attempt, MLFAB__MOVE_SEND, 0, "");
  }
}

/* Ends the attempt: the new layout is in force. */
static void reshard_server_finish(mlfab__server *server) {
  uint32_t attempt = server->move.under_way->attempt;
  reshard_server_install(server);
  reshard_server_end(server);
  reshard_server_done(server, attempt, MLFAB__MOVE_INSTALL, 0, "");
}

/* Undoes the attempt: no slice has moved, and the server ignores its later frames. */
static void reshard_server_undo(mlfab__server *server) {
  uint32_t attempt = server->move.under_way->attempt;
  reshard_server_end(server);
  reshard_server_done(server, attempt, MLFAB__MOVE_ABORT, 0, "");
}

/* Answers for a process that did not exist when the move began. */
static void reshard_server_unknown(mlfab__server *server, const mlfab__move *move) {
  char text[64];
  snprintf(text, sizeof text, "server %u was restarted", server->number);
  reshard_server_done(server, move->attempt, move->step, MLFAB_ERR_STATE, text);
}

/* --- without server 0 --- */

static void reshard_server_say(mlfab__server *server, uint32_t to, uint32_t attempt, uint32_t step,
                               int code) {
  mlfab__moved moved;
  memset(&moved, 0, sizeof moved);
  moved.attempt = attempt;
  moved.step = step;
  moved.server = server->number;
  moved.code = code;
  MLFAB__POST(&server->move.across, to, MLFAB__MOVED, moved, &moved);
}

static int reshard_server_is_other(const mlfab__server *server, uint32_t s) {
  return s != 0 && s != server->number;
}

/* Undoes the move when all others in reach are leaderless too: then none can have installed. */
static void reshard_server_decide(mlfab__server *server) {
  const struct mlfab__reshard_server *shift = server->move.under_way;
  if (!shift || !shift->leaderless) return;
  for (uint32_t s = 0; s < server->servers; s++) {
    if (reshard_server_is_other(server, s) && !shift->heard[s]) return;
  }
  reshard_server_undo(server);
}

MLFAB__INTERNAL void mlfab__reshard_server_dead(mlfab__server *server, uint32_t which) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  if (server->number == 0) return;
  if (which == 0) server->move.orphan = 1;
  if (!shift) return;
  if (which != 0) {
    shift->heard[which] = 1;
  } else if (!shift->answered || server->move.moved.code) {
    reshard_server_undo(server);
    return;
  } else if (!shift->leaderless) {
    shift->leaderless = 1;
    server->move.said_ns = 0;
    memset(shift->heard, 0, server->servers);
    for (uint32_t s = 0; s < server->servers; s++) {
      if (reshard_server_is_other(server, s))
        server->move.across.ready(server->move.across.self, s);
    }
  }
  reshard_server_decide(server);
}

/* Server 0 is gone: tells a worker the current layout, because the worker may have lost server 0, too. */
static void reshard_server_resume(mlfab__server *server, uint32_t worker) {
  uint32_t owners[MLFAB__SLICES_MAX];
  mlfab__resume resume = {server->epoch, server->epoch, server->layout.nslices};
  if (server->phase != MLFAB__MODEL_STANDS || !server->peers[worker].connected) return;
  for (uint32_t i = 0; i < resume.slices; i++) owners[i] = server->layout.slices[i].server;
  MLFAB__POST_LIST(64 + 2 * MLFAB__SLICES_MAX, &server->port, worker, MLFAB__RESUME, resume,
                   &resume, owners);
}

static void reshard_server_tick(mlfab__server *server) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  if (server->number == 0 || (!shift && !server->move.orphan)) return;
  if (server->now_ns - server->move.said_ns < server->config->heartbeat_ns) return;
  server->move.said_ns = server->now_ns;
  if (!shift) {
    for (uint32_t w = 0; w < server->workers; w++) reshard_server_resume(server, w);
    return;
  }
  if (!shift->leaderless) {
    const mlfab__moved *moved = &server->move.moved;
    if (moved->attempt == shift->attempt)
      MLFAB__POST(&server->move.across, 0, MLFAB__MOVED, moved, moved);
    return;
  }
  for (uint32_t s = 0; s < server->servers; s++) {
    if (reshard_server_is_other(server, s))
      reshard_server_say(server, s, shift->attempt, MLFAB__MOVE_SEND, MLFAB_ERR_PEER_DEAD);
  }
}

/* Answers a leaderless server about its attempt with this server's own state. */
static void reshard_server_asked(mlfab__server *server, uint32_t from, uint32_t attempt) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  if (shift && shift->attempt == attempt && shift->answered && !server->move.moved.code) {
    shift->heard[from] = 1;
    reshard_server_decide(server);
    return; /* server 0 tells that server, or this one asks too */
  }
  uint32_t step = MLFAB__MOVE_ABORT;
  server->move.across.ready(server->move.across.self, from);
  if (shift && shift->attempt == attempt) {
    reshard_server_undo(server);
  } else if (server->phase != MLFAB__MODEL_STANDS || reshard_server_is_idle(server)) {
    step = MLFAB__MOVE_PREPARE; /* it is a new process, or took no part: it cannot know */
  } else if (server->epoch == attempt) {
    step = MLFAB__MOVE_INSTALL;
  } else if (attempt > server->move.moved.attempt) {
    reshard_server_done(server, attempt, MLFAB__MOVE_ABORT, 0, "");
  }
  reshard_server_say(server, from, attempt, step, 0);
}

MLFAB__INTERNAL int mlfab__reshard_server_told(mlfab__server *server, uint32_t from,
                                               const mlfab__frame_in *frame) {
  struct mlfab__reshard_server *shift = server->move.under_way;
  mlfab__moved moved;
  if (mlfab__decode_moved(frame->meta, frame->meta_bytes, &moved) || moved.server != from ||
      from == 0 || moved.attempt == 0)
    return MLFAB_ERR_FRAME;
  if (moved.step == MLFAB__MOVE_SEND) {
    reshard_server_asked(server, from, moved.attempt);
    return 0;
  }
  if (!shift || shift->attempt != moved.attempt || !shift->leaderless) return 0;
  if (moved.step == MLFAB__MOVE_INSTALL) {
    reshard_server_finish(server);
  } else if (moved.step == MLFAB__MOVE_ABORT) {
    reshard_server_undo(server);
  } else {
    shift->heard[from] = 1;
    reshard_server_decide(server);
  }
  return 0;
}

/* --- a server that gets its first slices --- */

/* Builds the model that server 0 describes in ADOPT, with none of its slices; it stands. Errors: those of the
 * definition, with a text; there is no model then. */
static int reshard_server_model(mlfab__server *server, const mlfab__adopt *in,
                                const uint32_t *words, const uint8_t *table, mlfab_error *error) {
  const mlfab__define define = {.options = in->options, .tensors = in->tensors};
  const uint32_t *counted = words + in->slices;
  if (in->packets && !server->sparse)
    return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, (int32_t)server->number, 1, 0,
                        "server %u was built without MLFAB_WITH_SPARSE, and server 0 with it",
                        server->number);
  mlfab__server_unbuild(server);
  int code = mlfab__server_build_owned(server, &define, table, in->cut, words, in->slices, error);
  if (code) {
    mlfab__server_unbuild(server);
    return code;
  }
  server->phase = MLFAB__MODEL_STANDS;
  server->save.restored = in->restored;
  server->save.restored_version = in->restored_version;
  for (uint32_t w = 0; w < server->workers; w++)
    server->peers[w].guest = !(counted[w / 32] >> w % 32 & 1);
  mlfab__clock_members(server);
  if (server->policy) server->policy->told(server);
  return 0;
}

MLFAB__INTERNAL int mlfab__reshard_server_adopt(mlfab__server *server, const mlfab__frame_in *frame,
                                                uint64_t now_ns) {
  uint32_t words[MLFAB__ADOPT_WORDS_MAX];
  struct mlfab__reshard_server *shift = server->move.under_way;
  mlfab__adopt in;
  mlfab_error error;
  server->now_ns = now_ns;
  if (mlfab__decode_adopt(frame->meta, frame->meta_bytes, &in, words) || in.attempt == 0 ||
      in.slices == 0 || in.slices > MLFAB__SLICES_MAX ||
      in.words != in.slices + (server->workers + 31) / 32 || !frame->bulk ||
      frame->bulk_bytes != (uint64_t)in.tensors * MLFAB__TENSOR_INFO_BYTES)
    return MLFAB_ERR_FRAME;
  for (uint32_t i = 0; i < in.slices; i++)
    if (words[i] >= server->servers || words[i] == server->number) return MLFAB_ERR_FRAME;
  if (in.attempt <= server->move.moved.attempt || (shift && shift->attempt >= in.attempt)) return 0;
  if (server->store.nslices > 0) return MLFAB_ERR_FRAME;
  in.options.size = sizeof in.options;
  in.options.sync = in.options.consistency.kind;
  in.options.consistency.size = sizeof in.options.consistency;
  reshard_server_drop(server);
  for (uint32_t w = 0; w < server->workers; w++) reshard_server_stop_worker(server, w);
  server->move.adopted = 1;
  int code = reshard_server_model(server, &in, words, frame->bulk, &error);
  if (code) reshard_server_done(server, in.attempt, MLFAB__MOVE_PREPARE, code, error.text);
  return 0;
}

/* --- steps of server 0 --- */

static void reshard_server_moving(mlfab__server *server, const mlfab__move *move,
                                  const uint32_t *owners) {
  int code = 0;
  reshard_server_drop(server);
  if (server->phase == MLFAB__MODEL_STANDS) {
    code = reshard_server_begin(server, move->attempt, owners, move->slices);
    if (!code) reshard_server_hold(server);
  } else {
    code = MLFAB_ERR_STATE;
  }
  if (!code) return;
  char text[64];
  snprintf(text, sizeof text, "server %u %s", server->number,
           code == MLFAB_ERR_STATE ? "has no model" : "is out of memory");
  reshard_server_done(server, move->attempt, MLFAB__MOVE_PREPARE, code, text);
}

MLFAB__INTERNAL int mlfab__reshard_server_move(mlfab__server *server, const mlfab__frame_in *frame,
                                               uint64_t now_ns) {
  uint32_t owners[MLFAB__SLICES_MAX];
  mlfab__move move;
  struct mlfab__reshard_server *shift = server->move.under_way;
  server->now_ns = now_ns;
  server->move.orphan = 0;
  if (mlfab__decode_move(frame->meta, frame->meta_bytes, &move, owners) || move.attempt == 0)
    return MLFAB_ERR_FRAME;
  for (uint32_t i = 0; i < move.slices; i++) {
    if (owners[i] >= server->servers) return MLFAB_ERR_FRAME;
  }
  if (move.attempt < server->move.moved.attempt) return 0;
  if (move.attempt == server->move.moved.attempt &&
      (move.step == server->move.moved.step || server->move.moved.step == MLFAB__MOVE_ABORT)) {
    /* A link has lost the answer, or server 0 had not asked for it. */
    reshard_server_answer(server);
    return 0;
  }
  if (shift && shift->attempt == move.attempt && shift->leaderless)
    return 0; /* the others decide */
  int ours = shift && shift->attempt == move.attempt;
  switch (move.step) {
    case MLFAB__MOVE_PREPARE:
      if (server->phase == MLFAB__MODEL_STANDS && move.slices != server->layout.nslices)
        return MLFAB_ERR_FRAME;
      if (!ours) reshard_server_moving(server, &move, owners);
      break;
    case MLFAB__MOVE_SEND:
      if (!ours) reshard_server_unknown(server, &move);
      if (!ours || !shift->ready || shift->sending) break;
      if (move.flush) (void)mlfab__clock_flush(server);
      reshard_server_send(server);
      break;
    case MLFAB__MOVE_INSTALL:
      if (!ours) reshard_server_unknown(server, &move);
      if (ours && !shift->answered) return MLFAB_ERR_FRAME;
      if (ours) reshard_server_finish(server);
      break;
    case MLFAB__MOVE_ABORT:
      reshard_server_end(server);
      reshard_server_done(server, move.attempt, MLFAB__MOVE_ABORT, 0, "");
      break;
    default:
      return MLFAB_ERR_FRAME;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__reshard_server_init(mlfab__server *server) {
  static const mlfab__server_mover mover = {reshard_server_stop, reshard_server_tick,
                                            reshard_server_forces, reshard_server_drop};
  server->move.hooks = &mover;
}
