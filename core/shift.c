/* shift.c - the server role: slices that leave for other servers, and those that come. See reslice.h.
 *
 * PREPARE: held; once nothing is under way and nothing lent, a second layout and store are made. SEND:
 * to each server that gets slices from here a cursor walks over them, kind by kind of bytes; a link
 * that breaks sends it back to the start, and what is there already is passed over by the receiver.
 * Frames are copied by the transport, so nothing of the old store is lent. INSTALL: cannot fail. Blocks
 * and states of kept slices change places with those of the new store, which then is the store. */
#include "server.h"

#include <stdio.h>

typedef struct shift_cursor {
  uint32_t slice, kind; /* slice: index in the old store */
  uint64_t offset;
} shift_cursor;

typedef struct shift_entry { /* a slice of the new store, and what has come of it */
  uint8_t done;
  uint32_t kind, gate; /* gate: index into `gates` */
  uint64_t offset;
} shift_entry;

typedef struct shift_gate { /* of slices that come */
  uint32_t from, target;
  mlfab__shift_gate state;
  uint32_t *words;
} shift_gate;

struct mlfab__shift {
  uint32_t attempt;
  int ready, sending, answered; /* answered: SEND */
  int leaderless;               /* server 0 is out of reach, and it had been answered */
  uint8_t *heard;               /* by server: leaderless as well, or out of reach */
  uint32_t *owners;
  uint32_t nowners, servers;
  mlfab__layout layout;
  mlfab__store store;
  uint64_t *ahead;
  uint8_t *stage, *scratch;
  uint64_t stage_bytes;
  shift_entry *entries;  /* by slice of the new store */
  uint32_t coming;       /* of those, not done */
  shift_cursor *cursors; /* by server */
  shift_gate *gates;
  uint32_t ngates, gates_room, nwords;
};

/* --- memory --- */

static void shift_drop(mlfab__server *server) {
  struct mlfab__shift *shift = server->shift;
  mlfab__env *env = server->env;
  if (!shift) return;
  for (uint32_t g = 0; g < shift->ngates; g++)
    mlfab__free(env, shift->gates[g].words, shift->nwords * sizeof *shift->gates[g].words);
  mlfab__free(env, shift->gates, shift->gates_room * sizeof *shift->gates);
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
  server->shift = NULL;
}

MLFAB__INTERNAL void mlfab__shift_free(mlfab__server *server) { shift_drop(server); }

static int shift_begin(mlfab__server *server, uint32_t attempt, const uint32_t *owners,
                       uint32_t n) {
  mlfab__env *env = server->env;
  struct mlfab__shift *shift = mlfab__alloc(env, sizeof *shift);
  if (!shift) return MLFAB_ERR_MEMORY;
  memset(shift, 0, sizeof *shift);
  server->shift = shift;
  shift->attempt = attempt;
  shift->nwords = (server->workers + 31) / 32;
  shift->servers = server->servers;
  shift->owners = mlfab__alloc_array(env, n, sizeof *shift->owners);
  shift->nowners = shift->owners ? n : 0;
  shift->cursors = mlfab__alloc_array(env, server->servers, sizeof *shift->cursors);
  shift->heard = mlfab__alloc(env, server->servers);
  if (!shift->owners || !shift->cursors || !shift->heard) {
    shift_drop(server); /* a part of it serves nobody */
    return MLFAB_ERR_MEMORY;
  }
  memcpy(shift->owners, owners, n * sizeof *owners);
  return 0;
}

/* What depends on the size of the shard. */
static int shift_room(mlfab__server *server, struct mlfab__shift *shift) {
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

/* The store of the new slices, beside the one that counts. */
static int shift_build(mlfab__server *server, struct mlfab__shift *shift) {
  mlfab__env *env = server->env;
  const mlfab__define *options = &server->options;
  mlfab_error error;
  int code = mlfab__layout_build(env, server->definition, server->ndefinition, options->slices,
                                 server->servers, options->active, server->config->model_max_bytes,
                                 &shift->layout, &error);
  if (code) return code;
  mlfab__layout_assign(&shift->layout, shift->owners);
  uint32_t states = server->config->on_update ? 0 : mlfab__rule_states(server->rule.kind);
  code = mlfab__store_init(env, &shift->store, &shift->layout, server->number,
                           server->config->block_bytes, mlfab__gate_rounds(server), states,
                           options->ghost != 0);
  if (!code && options->tags > 0) code = mlfab__store_tag(env, &shift->store, options->tags);
  if (!code) code = shift_room(server, shift);
  if (code) return code;
  for (uint32_t i = 0; i < shift->store.nslices; i++) {
    uint32_t number = shift->store.slices[i].number;
    shift->entries[i].done = server->store.local[number] != MLFAB__NO_SLICE;
    shift->coming += !shift->entries[i].done;
  }
  return 0;
}

/* --- what server 0 is told --- */

static void shift_answer(mlfab__server *server) {
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  server->across.ready(server->across.self, 0);
  server->across.post(server->across.self, 0, MLFAB__MOVED, meta,
                      mlfab__encode_moved(meta, &server->moved));
}

static void shift_done(mlfab__server *server, uint32_t attempt, uint32_t step, int code,
                       const char *text) {
  mlfab__moved *moved = &server->moved;
  memset(moved, 0, sizeof *moved);
  moved->attempt = attempt;
  moved->step = step;
  moved->server = server->number;
  moved->code = code;
  snprintf(moved->text, sizeof moved->text, "%s", text);
  shift_answer(server);
}

static void shift_failed(mlfab__server *server, uint32_t step, int code, const char *what) {
  char text[MLFAB__TEXT_MAX];
  snprintf(text, sizeof text, "server %u %s", server->number, what);
  shift_done(server, server->shift->attempt, step, code, text);
}

/* --- workers that stop --- */

/* Its stream and its pulls end here; what is past recall is decided first. */
static void shift_stop_worker(mlfab__server *server, uint32_t worker) {
  mlfab__intake_finish(server, worker);
  mlfab__intake_reset(server, worker);
  mlfab__answer_stop(server, worker);
  uint32_t kept = 0;
  for (uint32_t i = 0; i < server->nchanges; i++) {
    if (server->changes[i].worker != worker) server->changes[kept++] = server->changes[i];
  }
  server->nchanges = kept;
}

MLFAB__INTERNAL void mlfab__shift_stop(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame) {
  mlfab__server_peer *peer = &server->peers[worker];
  mlfab__stop stop;
  if (mlfab__decode_stop(frame->meta, frame->meta_bytes, &stop) || stop.kind > MLFAB__STOP_OVER) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a STOP that does not parse");
    return;
  }
  peer->stopped = stop.kind == MLFAB__STOP_OVER ? 0 : stop.attempt;
  peer->drained = stop.kind == MLFAB__STOP_DRAINED;
  if (stop.kind != MLFAB__STOP_DRAINED) {
    shift_stop_worker(server, worker);
    mlfab__server_tell(server, worker);
  }
  mlfab__gate_members(server);
  mlfab__intake_advance(server);
}

/* Those that were not here to be frozen hear that the slices are on the move. */
static void shift_hold(mlfab__server *server) {
  server->held = 1;
  for (uint32_t w = 0; w < server->workers; w++) {
    shift_stop_worker(server, w);
    if (server->peers[w].connected && !server->peers[w].stopped) mlfab__server_tell(server, w);
  }
}

/* --- leaving --- */

/* Moves the cursor to the next bytes for `to`, from where it stands: 1, or 0 behind the last. */
static int shift_seek(const mlfab__server *server, uint32_t to, shift_cursor *c) {
  const mlfab__store *store = &server->store;
  for (; c->slice < store->nslices; c->slice++, c->kind = 0, c->offset = 0) {
    const mlfab__shard_slice *s = &store->slices[c->slice];
    if (server->shift->owners[s->number] != to) continue;
    for (; c->kind <= MLFAB__SHIFT_SUM; c->kind++, c->offset = 0) {
      if (c->kind == MLFAB__SHIFT_STATE0 && !store->s0) continue;
      if (c->kind == MLFAB__SHIFT_STATE1 && !store->s1) continue;
      /* Of the sum only the blocks that there are. */
      while (c->kind == MLFAB__SHIFT_SUM && c->offset < s->bytes &&
             store->sum[s->first + c->offset / store->block_bytes] == MLFAB__NO_BLOCK)
        c->offset = (c->offset / store->block_bytes + 1) * store->block_bytes;
      if (c->offset < s->bytes) return 1;
    }
  }
  return 0;
}

/* Bytes of a position by their kind; NULL: ghosts. */
static uint8_t *shift_bytes(const mlfab__store *store, uint32_t kind, uint32_t position) {
  if (kind == MLFAB__SHIFT_STATE0) return store->s0[position];
  if (kind == MLFAB__SHIFT_STATE1) return store->s1[position];
  return store->blocks[kind == MLFAB__SHIFT_SUM ? store->sum[position] : store->w[position]].data;
}

MLFAB__INTERNAL int mlfab__shift_wants(const mlfab__server *server, uint32_t to) {
  const struct mlfab__shift *shift = server->shift;
  shift_cursor cursor = {0, 0, 0};
  /* An answer may have to be told again. */
  if (to == 0) return shift || server->moved.attempt != 0;
  if (shift && shift->leaderless) return to != server->number;
  return shift && shift->sending && to != server->number && shift_seek(server, to, &cursor);
}

MLFAB__INTERNAL int mlfab__shift_next(mlfab__server *server, uint32_t to, mlfab__frame_out *frame) {
  const struct mlfab__shift *shift = server->shift;
  const mlfab__store *store = &server->store;
  if (!shift || !shift->sending || to == server->number) return 0;
  shift_cursor cursor = shift->cursors[to];
  if (!shift_seek(server, to, &cursor)) return 0;
  const mlfab__shard_slice *s = &store->slices[cursor.slice];
  uint64_t at = cursor.offset % store->block_bytes;
  uint32_t position = s->first + (uint32_t)(cursor.offset / store->block_bytes);
  uint64_t bytes = mlfab__min(store->block_bytes - at, s->bytes - cursor.offset);
  bytes = mlfab__min(bytes, server->config->chunk_bytes);
  mlfab__shift_bytes head = {shift->attempt, s->number,  s->gate,   cursor.kind,
                             cursor.offset,  s->version, s->commit, 0};
  uint8_t *data = shift_bytes(store, cursor.kind, position);
  shift_cursor next = cursor;
  next.offset += bytes;
  head.last = !shift_seek(server, to, &next) || next.slice != cursor.slice;
  frame->type = MLFAB__SHIFT;
  frame->meta_bytes = mlfab__encode_shift_bytes(frame->meta, &head);
  frame->bulk = data ? data + at : NULL;
  frame->bulk_bytes = (uint32_t)bytes;
  frame->token = 0;
  return 1;
}

MLFAB__INTERNAL void mlfab__shift_taken(mlfab__server *server, uint32_t to,
                                        const mlfab__frame_out *frame) {
  shift_cursor *cursor = &server->shift->cursors[to];
  shift_seek(server, to, cursor);
  cursor->offset += frame->bulk_bytes;
}

/* The gates of what leaves for `to`, before it. */
static void shift_tell_gates(mlfab__server *server, uint32_t to) {
  uint8_t meta[256 + 4 * MLFAB__SHIFT_WORDS_MAX];
  uint32_t words[MLFAB__SHIFT_WORDS_MAX];
  struct mlfab__shift *shift = server->shift;
  for (uint32_t g = 0; g < server->ngates; g++) {
    mlfab__shift_gate state;
    if (!server->gates[g].used) continue;
    mlfab__gate_told(server, g, &state, words);
    state.attempt = shift->attempt;
    server->across.post(server->across.self, to, MLFAB__SHIFT_GATE, meta,
                        mlfab__encode_shift_gate(meta, &state, words));
  }
}

MLFAB__INTERNAL void mlfab__shift_up(mlfab__server *server, uint32_t to) {
  struct mlfab__shift *shift = server->shift;
  if (to == 0) server->orphan = 0;
  /* It may be that the last answer was lost; one of an attempt that is over is ignored. */
  if (to == 0 && server->moved.attempt != 0) shift_answer(server);
  if (!shift) return;
  memset(&shift->cursors[to], 0, sizeof shift->cursors[to]);
  if (!mlfab__shift_wants(server, to)) return;
  shift_tell_gates(server, to);
  server->across.ready(server->across.self, to);
}

static void shift_send(mlfab__server *server) {
  struct mlfab__shift *shift = server->shift;
  shift->sending = 1;
  for (uint32_t s = 0; s < server->servers; s++) {
    if (s == server->number || !mlfab__shift_wants(server, s)) continue;
    shift_tell_gates(server, s); /* without a link it is for nothing: see mlfab__shift_up */
    server->across.ready(server->across.self, s);
  }
}

/* --- coming --- */

static shift_gate *shift_find_gate(struct mlfab__shift *shift, uint32_t from, uint32_t gate) {
  for (uint32_t i = 0; i < shift->ngates; i++) {
    if (shift->gates[i].from == from && shift->gates[i].state.gate == gate) return &shift->gates[i];
  }
  return NULL;
}

static int shift_take_gate(mlfab__server *server, uint32_t from, const mlfab__frame_in *frame) {
  struct mlfab__shift *shift = server->shift;
  uint32_t words[MLFAB__SHIFT_WORDS_MAX];
  mlfab__shift_gate state;
  if (mlfab__decode_shift_gate(frame->meta, frame->meta_bytes, &state, words))
    return MLFAB_ERR_FRAME;
  if (!shift || !shift->ready || state.attempt != shift->attempt) return 0;
  state.consistency.size = sizeof state.consistency;
  if (state.words != shift->nwords || state.gate >= MLFAB__GATES ||
      mlfab__sync_check(&state.consistency, server->workers, NULL))
    return MLFAB_ERR_FRAME;
  if (shift_find_gate(shift, from, state.gate)) return 0;
  if (shift->ngates == shift->gates_room) {
    uint32_t room = shift->gates_room ? 2 * shift->gates_room : 8;
    shift_gate *more = mlfab__alloc_array(server->env, room, sizeof *more);
    if (!more) return MLFAB_ERR_MEMORY;
    if (shift->ngates) memcpy(more, shift->gates, shift->ngates * sizeof *more);
    mlfab__free(server->env, shift->gates, shift->gates_room * sizeof *more);
    shift->gates = more;
    shift->gates_room = room;
  }
  shift_gate *gate = &shift->gates[shift->ngates];
  gate->words = mlfab__alloc_array(server->env, shift->nwords, sizeof *gate->words);
  if (!gate->words) return MLFAB_ERR_MEMORY;
  memcpy(gate->words, words, shift->nwords * sizeof *words);
  gate->from = from;
  gate->state = state;
  shift->ngates++;
  return 0;
}

/* Is what has come of a slice, before these bytes, all that comes before them? Moves on to their
 * kind. */
static int shift_follows(const mlfab__store *store, const mlfab__shard_slice *slice,
                         shift_entry *entry, uint32_t kind, uint64_t offset) {
  while (entry->kind < kind) {
    int none = (entry->kind == MLFAB__SHIFT_STATE0 && !store->s0) ||
               (entry->kind == MLFAB__SHIFT_STATE1 && !store->s1);
    if (!none && entry->offset != slice->bytes) return 0;
    entry->kind++;
    entry->offset = 0;
  }
  return entry->kind == kind &&
         (kind == MLFAB__SHIFT_SUM ? offset >= entry->offset : offset == entry->offset);
}

/* From the first byte again, after a link broke. */
static void shift_restart(mlfab__store *store, const mlfab__shard_slice *slice,
                          shift_entry *entry) {
  entry->kind = 0;
  entry->offset = 0;
  for (uint32_t p = slice->first; p < slice->first + slice->count; p++)
    mlfab__store_put(store, &store->sum[p], MLFAB__NO_BLOCK);
}

/* A block of zeros for a sum. */
static int shift_sum_block(mlfab__server *server, mlfab__store *store, uint32_t position) {
  if (store->sum[position] != MLFAB__NO_BLOCK) return 0;
  if (store->free_count == 0 && mlfab__store_grow(server->env, store)) return MLFAB_ERR_MEMORY;
  store->sum[position] = mlfab__store_take(store);
  uint8_t *data = store->blocks[store->sum[position]].data;
  if (data) memset(data, 0, store->block_bytes);
  return 0;
}

static int shift_write(mlfab__server *server, mlfab__store *store, const mlfab__shard_slice *slice,
                       const mlfab__shift_bytes *head, const uint8_t *from, uint64_t bytes) {
  for (uint64_t offset = head->offset, n; bytes > 0; offset += n, bytes -= n) {
    uint64_t at = offset % store->block_bytes;
    uint32_t position = slice->first + (uint32_t)(offset / store->block_bytes);
    n = mlfab__min(bytes, store->block_bytes - at);
    if (head->kind == MLFAB__SHIFT_SUM && shift_sum_block(server, store, position))
      return MLFAB_ERR_MEMORY;
    uint8_t *data = shift_bytes(store, head->kind, position);
    if (!data || !from) continue;
    memcpy(data + at, from, n);
    from += n;
  }
  return 0;
}

static int shift_take_bytes(mlfab__server *server, uint32_t from, const mlfab__frame_in *frame) {
  struct mlfab__shift *shift = server->shift;
  mlfab__shift_bytes head;
  if (mlfab__decode_shift_bytes(frame->meta, frame->meta_bytes, &head)) return MLFAB_ERR_FRAME;
  if (!shift || !shift->ready || head.attempt != shift->attempt) return 0;
  mlfab__store *store = &shift->store;
  if (head.slice >= shift->nowners || store->local[head.slice] == MLFAB__NO_SLICE ||
      server->layout.slices[head.slice].server != from || head.kind > MLFAB__SHIFT_SUM)
    return MLFAB_ERR_FRAME;
  /* It has another rule: only one of the two has a callback that applies updates. */
  if ((head.kind == MLFAB__SHIFT_STATE0 && !store->s0) ||
      (head.kind == MLFAB__SHIFT_STATE1 && !store->s1))
    return MLFAB_ERR_FRAME;
  uint32_t local = store->local[head.slice];
  mlfab__shard_slice *slice = &store->slices[local];
  shift_entry *entry = &shift->entries[local];
  if (entry->done) return 0;
  const shift_gate *gate = shift_find_gate(shift, from, head.gate);
  if (head.kind == MLFAB__SHIFT_WEIGHTS && head.offset == 0) shift_restart(store, slice, entry);
  if (!gate || !shift_follows(store, slice, entry, head.kind, head.offset) ||
      frame->bulk_bytes == 0 || head.offset > slice->bytes ||
      frame->bulk_bytes > slice->bytes - head.offset || (frame->bulk == NULL) != store->ghost)
    return MLFAB_ERR_FRAME;
  int code = shift_write(server, store, slice, &head, frame->bulk, frame->bulk_bytes);
  if (code) return code;
  entry->offset = head.offset + frame->bulk_bytes;
  if (!head.last) return 0;
  if (!shift_follows(store, slice, entry, MLFAB__SHIFT_SUM, slice->bytes)) return MLFAB_ERR_FRAME;
  entry->done = 1;
  entry->gate = (uint32_t)(gate - shift->gates);
  slice->version = head.version;
  slice->commit = head.commit;
  shift->coming--;
  return 0;
}

MLFAB__INTERNAL int mlfab__shift_frame(mlfab__server *server, uint32_t from,
                                       const mlfab__frame_in *frame) {
  int code = frame->type == MLFAB__SHIFT        ? shift_take_bytes(server, from, frame)
             : frame->type == MLFAB__SHIFT_GATE ? shift_take_gate(server, from, frame)
                                                : MLFAB_ERR_FRAME;
  if (code != MLFAB_ERR_MEMORY) return code;
  shift_failed(server, MLFAB__MOVE_SEND, code, "is out of memory for slices that come");
  return 0;
}

/* --- the new store --- */

/* Does a slice come with this gate? */
static int shift_comes(const mlfab__server *server, uint32_t gate) {
  const struct mlfab__shift *shift = server->shift;
  for (uint32_t i = 0; i < shift->store.nslices; i++) {
    int kept = server->store.local[shift->store.slices[i].number] != MLFAB__NO_SLICE;
    if (!kept && shift->entries[i].gate == gate) return 1;
  }
  return 0;
}

/* Is it one with a gate that is here, or with one that comes before it? */
static int shift_is_known(const mlfab__server *server, uint32_t gate) {
  const struct mlfab__shift *shift = server->shift;
  const shift_gate *in = &shift->gates[gate];
  for (uint32_t i = 0; i < gate; i++) {
    const shift_gate *earlier = &shift->gates[i];
    if (shift_comes(server, i) &&
        mlfab__gate_joins(server, &earlier->state, earlier->words, &in->state, in->words))
      return 1;
  }
  return mlfab__gate_match(server, &in->state, in->words) != MLFAB__GATES;
}

/* Would there be no more models than a server may have? */
static int shift_fits(const mlfab__server *server) {
  uint32_t n = 0;
  for (uint32_t g = 0; g < server->ngates; g++) n += (uint32_t)server->gates[g].used;
  for (uint32_t i = 0; i < server->shift->ngates; i++)
    n += shift_comes(server, i) && !shift_is_known(server, i);
  return n <= MLFAB__GATES;
}

static void shift_swap(uint8_t **a, uint8_t **b) {
  uint8_t *c = *a;
  *a = *b;
  *b = c;
}

/* A kept slice: its bytes change places with those that were set aside for it. */
static void shift_keep(mlfab__server *server, mlfab__store *to, uint32_t local) {
  mlfab__store *from = &server->store;
  mlfab__shard_slice *s = &to->slices[local];
  const mlfab__shard_slice *old = &from->slices[from->local[s->number]];
  s->version = old->version;
  s->commit = old->commit;
  s->gate = old->gate;
  assert(from->block_bytes == to->block_bytes);
  for (uint32_t i = 0; i < s->count; i++) {
    uint32_t p = old->first + i, q = s->first + i;
    shift_swap(&from->blocks[from->w[p]].data, &to->blocks[to->w[q]].data);
    if (from->s0) shift_swap(&from->s0[p], &to->s0[q]);
    if (from->s1) shift_swap(&from->s1[p], &to->s1[q]);
    if (from->sum[p] == MLFAB__NO_BLOCK) continue;
    /* There is one: nothing is being written, so at least as many are spare as there are
     * positions. */
    to->sum[q] = mlfab__store_take(to);
    shift_swap(&from->blocks[from->sum[p]].data, &to->blocks[to->sum[q]].data);
  }
}

/* Everything that was made to the old shard's measure. */
static void shift_replace(mlfab__server *server, struct mlfab__shift *shift) {
  mlfab__env *env = server->env;
  mlfab__answer_resize(server);
  for (uint32_t w = 0; w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    mlfab__free(env, peer->arena, peer->arena_bytes);
    peer->arena = NULL;
    peer->arena_bytes = peer->arena_head = peer->arena_tail = 0;
  }
  for (uint32_t i = 0; i < MLFAB__SERVER_STAGES; i++) {
    mlfab__free(env, server->stages[i], server->stages[i] ? server->stage_bytes : 0);
    server->stages[i] = NULL;
  }
  mlfab__free_aligned(env, server->scratch, server->store.block_bytes);
  mlfab__free(env, server->ahead, server->store.nslices * sizeof *server->ahead);
  mlfab__store_free(env, &server->store);
  mlfab__layout_free(env, &server->layout);
  server->layout = shift->layout;
  server->store = shift->store;
  server->store.layout = &server->layout;
  server->ahead = shift->ahead;
  server->scratch = shift->scratch;
  server->stages[0] = shift->stage;
  server->stage_bytes = mlfab__server_stage(server, server->store.bytes, server->store.ghost);
  server->eager_bytes = mlfab__server_credit(server, server->store.bytes);
  mlfab__free(env, shift->entries, server->store.nslices * sizeof *shift->entries);
  memset(&shift->layout, 0, sizeof shift->layout);
  memset(&shift->store, 0, sizeof shift->store);
  shift->entries = NULL;
  shift->ahead = NULL;
  shift->scratch = shift->stage = NULL;
  shift->stage_bytes = 0;
}

static void shift_install(mlfab__server *server) {
  struct mlfab__shift *shift = server->shift;
  mlfab__store *store = &shift->store;
  for (uint32_t g = 0; g < shift->ngates; g++) {
    if (shift_comes(server, g))
      shift->gates[g].target =
          mlfab__gate_adopt(server, &shift->gates[g].state, shift->gates[g].words);
  }
  for (uint32_t i = 0; i < store->nslices; i++) {
    mlfab__shard_slice *s = &store->slices[i];
    if (server->store.local[s->number] != MLFAB__NO_SLICE) {
      shift_keep(server, store, i);
    } else {
      s->gate = (uint8_t)shift->gates[shift->entries[i].gate].target;
      server->stats->slices_moved++;
      server->stats->bytes_moved += s->bytes;
    }
    /* What changed before is not known any more. */
    if (store->tags) store->tags[i].base = mlfab__changed_label(s);
  }
  shift_replace(server, shift);
  mlfab__gate_tidy(server);
  server->norm_commits = 0;
  server->epoch = shift->attempt;
}

/* The attempt is over here. */
static void shift_end(mlfab__server *server) {
  shift_drop(server);
  server->held = 0;
  for (uint32_t w = 0; w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    peer->stopped = 0;
    peer->drained = 0;
    /* THAW may have been faster than the word that put it off. */
    if (peer->put_off && peer->connected) mlfab__server_tell(server, w);
  }
  mlfab__gate_members(server);
  server->place_due = 1;
  mlfab__server_retold(server);
  mlfab__intake_advance(server);
}

/* --- steps --- */

/* Nothing under way into or out of the blocks. */
static int shift_quiet(const mlfab__server *server) {
  return server->applying == MLFAB__APPLY_NONE && !server->head && !server->first &&
         !server->unplaced_first && mlfab__answer_quiet(server);
}

static void shift_prepare(mlfab__server *server) {
  struct mlfab__shift *shift = server->shift;
  int code = shift_build(server, shift);
  if (code) {
    shift_failed(server, MLFAB__MOVE_PREPARE, code, "is out of memory for its new slices");
    return;
  }
  shift->ready = 1;
  shift_done(server, shift->attempt, MLFAB__MOVE_PREPARE, 0, "");
}

MLFAB__INTERNAL void mlfab__shift_check(mlfab__server *server) {
  struct mlfab__shift *shift = server->shift;
  if (!shift) return;
  int failed = server->moved.attempt == shift->attempt && server->moved.code;
  if (failed) return; /* ABORT will come */
  if (!shift->ready) {
    if (shift_quiet(server)) shift_prepare(server);
  } else if (shift->sending && shift->coming == 0 && !shift->answered) {
    shift->answered = 1;
    if (shift_fits(server)) {
      shift_done(server, shift->attempt, MLFAB__MOVE_SEND, 0, "");
    } else {
      shift_failed(server, MLFAB__MOVE_SEND, MLFAB_ERR_LIMIT,
                   "would have more than 8 consistency models");
    }
  }
}

/* It is over here, and the new layout counts. */
static void shift_finish(mlfab__server *server) {
  uint32_t attempt = server->shift->attempt;
  shift_install(server);
  shift_end(server);
  shift_done(server, attempt, MLFAB__MOVE_INSTALL, 0, "");
}

/* It is over here, nothing has changed, and nothing of this attempt is taken any more. */
static void shift_undo(mlfab__server *server) {
  uint32_t attempt = server->shift->attempt;
  shift_end(server);
  shift_done(server, attempt, MLFAB__MOVE_ABORT, 0, "");
}

/* This process was not here when the move began. */
static void shift_unknown(mlfab__server *server, const mlfab__move *move) {
  char text[64];
  snprintf(text, sizeof text, "server %u was restarted", server->number);
  shift_done(server, move->attempt, move->step, MLFAB_ERR_STATE, text);
}

/* --- without server 0 --- */

static void shift_say(mlfab__server *server, uint32_t to, uint32_t attempt, uint32_t step,
                      int code) {
  mlfab__moved moved;
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  memset(&moved, 0, sizeof moved);
  moved.attempt = attempt;
  moved.step = step;
  moved.server = server->number;
  moved.code = code;
  server->across.post(server->across.self, to, MLFAB__MOVED, meta,
                      mlfab__encode_moved(meta, &moved));
}

static int shift_is_other(const mlfab__server *server, uint32_t s) {
  return s != 0 && s != server->number;
}

/* Nobody can have installed where all others in reach are leaderless, too. */
static void shift_decide(mlfab__server *server) {
  const struct mlfab__shift *shift = server->shift;
  if (!shift || !shift->leaderless) return;
  for (uint32_t s = 0; s < server->servers; s++) {
    if (shift_is_other(server, s) && !shift->heard[s]) return;
  }
  shift_undo(server);
}

MLFAB__INTERNAL void mlfab__shift_dead(mlfab__server *server, uint32_t which) {
  struct mlfab__shift *shift = server->shift;
  if (server->number == 0) return;
  if (which == 0) server->orphan = 1;
  if (!shift) return;
  if (which != 0) {
    shift->heard[which] = 1;
  } else if (!shift->answered || server->moved.code) {
    shift_undo(server);
    return;
  } else if (!shift->leaderless) {
    shift->leaderless = 1;
    server->said_ns = 0;
    memset(shift->heard, 0, server->servers);
    for (uint32_t s = 0; s < server->servers; s++) {
      if (shift_is_other(server, s)) server->across.ready(server->across.self, s);
    }
  }
  shift_decide(server);
}

/* Nobody leads any more: a worker that has lost server 0, too, hears from here which layout counts. */
static void shift_thaw(mlfab__server *server, uint32_t worker) {
  uint32_t owners[MLFAB__SLICES_MAX];
  uint8_t meta[64 + 2 * MLFAB__SLICES_MAX];
  mlfab__thaw thaw = {server->epoch, server->epoch, server->layout.nslices};
  if (server->phase != MLFAB__MODEL_STANDS || !server->peers[worker].connected) return;
  for (uint32_t i = 0; i < thaw.slices; i++) owners[i] = server->layout.slices[i].server;
  server->port.post(server->port.self, worker, MLFAB__THAW, meta,
                    mlfab__encode_thaw(meta, &thaw, owners));
}

MLFAB__INTERNAL void mlfab__shift_tick(mlfab__server *server) {
  struct mlfab__shift *shift = server->shift;
  if (server->number == 0 || (!shift && !server->orphan)) return;
  if (server->now_ns - server->said_ns < server->config->heartbeat_ns) return;
  server->said_ns = server->now_ns;
  if (!shift) {
    for (uint32_t w = 0; w < server->workers; w++) shift_thaw(server, w);
    return;
  }
  if (!shift->leaderless) {
    const mlfab__moved *moved = &server->moved;
    if (moved->attempt == shift->attempt)
      shift_say(server, 0, moved->attempt, moved->step, moved->code);
    return;
  }
  for (uint32_t s = 0; s < server->servers; s++) {
    if (shift_is_other(server, s))
      shift_say(server, s, shift->attempt, MLFAB__MOVE_SEND, MLFAB_ERR_PEER_DEAD);
  }
}

/* A leaderless server asks: what is known here of its attempt. */
static void shift_asked(mlfab__server *server, uint32_t from, uint32_t attempt) {
  struct mlfab__shift *shift = server->shift;
  if (shift && shift->attempt == attempt && shift->answered && !server->moved.code) {
    shift->heard[from] = 1;
    shift_decide(server);
    return; /* it is told by server 0, or asks, too */
  }
  uint32_t step = MLFAB__MOVE_ABORT;
  server->across.ready(server->across.self, from);
  if (shift && shift->attempt == attempt) {
    shift_undo(server);
  } else if (server->phase != MLFAB__MODEL_STANDS) {
    step = MLFAB__MOVE_PREPARE; /* a new process, which cannot know */
  } else if (server->epoch == attempt) {
    step = MLFAB__MOVE_INSTALL;
  } else if (attempt > server->moved.attempt) {
    shift_done(server, attempt, MLFAB__MOVE_ABORT, 0, "");
  }
  shift_say(server, from, attempt, step, 0);
}

MLFAB__INTERNAL int mlfab__shift_told(mlfab__server *server, uint32_t from,
                                      const mlfab__frame_in *frame) {
  struct mlfab__shift *shift = server->shift;
  mlfab__moved moved;
  if (mlfab__decode_moved(frame->meta, frame->meta_bytes, &moved) || moved.server != from ||
      from == 0 || moved.attempt == 0)
    return MLFAB_ERR_FRAME;
  if (moved.step == MLFAB__MOVE_SEND) {
    shift_asked(server, from, moved.attempt);
    return 0;
  }
  if (!shift || shift->attempt != moved.attempt || !shift->leaderless) return 0;
  if (moved.step == MLFAB__MOVE_INSTALL) {
    shift_finish(server);
  } else if (moved.step == MLFAB__MOVE_ABORT) {
    shift_undo(server);
  } else {
    shift->heard[from] = 1;
    shift_decide(server);
  }
  return 0;
}

/* --- steps of server 0 --- */

static void shift_moving(mlfab__server *server, const mlfab__move *move, const uint32_t *owners) {
  int code = 0;
  shift_drop(server);
  if (server->phase == MLFAB__MODEL_STANDS) {
    code = shift_begin(server, move->attempt, owners, move->slices);
    if (!code) shift_hold(server);
  } else {
    code = MLFAB_ERR_STATE;
  }
  if (!code) return;
  char text[64];
  snprintf(text, sizeof text, "server %u %s", server->number,
           code == MLFAB_ERR_STATE ? "has no model" : "is out of memory");
  shift_done(server, move->attempt, MLFAB__MOVE_PREPARE, code, text);
}

MLFAB__INTERNAL int mlfab__shift_move(mlfab__server *server, const mlfab__frame_in *frame,
                                      uint64_t now_ns) {
  uint32_t owners[MLFAB__SLICES_MAX];
  mlfab__move move;
  struct mlfab__shift *shift = server->shift;
  server->now_ns = now_ns;
  server->orphan = 0;
  if (mlfab__decode_move(frame->meta, frame->meta_bytes, &move, owners) || move.attempt == 0)
    return MLFAB_ERR_FRAME;
  for (uint32_t i = 0; i < move.slices; i++) {
    if (owners[i] >= server->servers) return MLFAB_ERR_FRAME;
  }
  if (move.attempt < server->moved.attempt) return 0;
  if (move.attempt == server->moved.attempt &&
      (move.step == server->moved.step || server->moved.step == MLFAB__MOVE_ABORT)) {
    shift_answer(server); /* it was lost with a link, or was not asked for */
    return 0;
  }
  if (shift && shift->attempt == move.attempt && shift->leaderless)
    return 0; /* the others decide */
  int ours = shift && shift->attempt == move.attempt;
  switch (move.step) {
    case MLFAB__MOVE_PREPARE:
      if (server->phase == MLFAB__MODEL_STANDS && move.slices != server->layout.nslices)
        return MLFAB_ERR_FRAME;
      if (!ours) shift_moving(server, &move, owners);
      break;
    case MLFAB__MOVE_SEND:
      if (!ours) shift_unknown(server, &move);
      if (ours && shift->ready && !shift->sending) shift_send(server);
      break;
    case MLFAB__MOVE_INSTALL:
      if (!ours) shift_unknown(server, &move);
      if (ours && !shift->answered) return MLFAB_ERR_FRAME;
      if (ours) shift_finish(server);
      break;
    case MLFAB__MOVE_ABORT:
      shift_end(server);
      shift_done(server, move.attempt, MLFAB__MOVE_ABORT, 0, "");
      break;
    default:
      return MLFAB_ERR_FRAME;
  }
  return 0;
}
