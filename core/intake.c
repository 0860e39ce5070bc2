/* intake.c - the server role: updates on their way into the model. See server.h.
 *
 * How the bytes of the head are written depends on what the model makes of a sum:
 *   INIT    next = u                 the first weights
 *   DIRECT  next = w + scale * u     the plain rule, asynchronous: one pass while the bytes are hot
 *   STAGE   next = u                 other rules and callbacks: applied block by block at commit
 *   SUM     next = sum + weight * u  rounds: the round is applied when it is complete
 * A small update that lies whole in memory is checked first and then added in place, where no
 * pull holds the block. Updates of packets: packed.c.
 *
 * What came may lie in memory that its sender can still write. Values are checked as they are added, in
 * one pass that reads them once. Where they are read again, in place or as packets, they are copied to
 * private memory first. */
#include "server.h"

#include "reduce.h"

enum {
  INTAKE_WHOLE_BYTES = 256 * 1024,
  INTAKE_TICK_BYTES = 4 << 20,
  INTAKE_STREAM_BYTES = 64 << 20,
  INTAKE_STAGES_BYTES = 256 << 20 /* of all stages together, but two at least */
};

/* By the gate of a slice: an update may touch several. */
MLFAB__INTERNAL enum mlfab__intake_mode mlfab__intake_mode(const mlfab__server *server,
                                                           const mlfab__incoming *update,
                                                           uint32_t slice) {
  if (update->push.flags & MLFAB__PUSH_INIT) return MLFAB__INTAKE_INIT;
  const mlfab__gate *gate = &server->gates[server->store.slices[slice].gate];
  if (mlfab__sync_rounds(gate->sync.kind)) return MLFAB__INTAKE_SUM;
  if (server->config->on_update || server->rule.kind != MLFAB_RULE_PLAIN)
    return MLFAB__INTAKE_STAGE;
  return MLFAB__INTAKE_DIRECT;
}

/* Does the slice's version move with the update, or with its round? */
static int intake_at_once(const mlfab__server *server, uint32_t slice) {
  return !mlfab__sync_rounds(server->gates[server->store.slices[slice].gate].sync.kind);
}

/* The scale of what comes in: the aggregator of a group may have multiplied each member with its
 * own. */
static double intake_scale(const mlfab__server *server, const mlfab__incoming *update) {
  return update->group && mlfab__place_absolute(server) ? 1.0 : update->push.scale;
}

/* A rule that is not linear gets the sum with weights
 * relative to the round's first member, whose scale then counts for all. */
MLFAB__INTERNAL double mlfab__intake_weight(const mlfab__server *server,
                                            const mlfab__incoming *update,
                                            enum mlfab__intake_mode mode, uint32_t slice) {
  if (mode == MLFAB__INTAKE_INIT || mode == MLFAB__INTAKE_STAGE) return 1.0;
  if (mode == MLFAB__INTAKE_DIRECT || mlfab__rule_linear(server->rule.kind))
    return intake_scale(server, update);
  const mlfab__gate *gate = &server->gates[server->store.slices[slice].gate];
  if (gate->round_members == 0) return 1.0;
  return gate->round_scale != 0.0 ? update->push.scale / gate->round_scale : 0.0;
}

/* Gates of the update that apply at once, and those that sum, as bits. */
static uint32_t intake_gates(const mlfab__server *server, const mlfab__incoming *update,
                             uint32_t *sums_p) {
  uint32_t mask = mlfab__gate_mask(server, update->segments, update->push.segments);
  *sums_p = 0;
  for (uint32_t g = 0; g < server->ngates; g++) {
    if ((mask >> g & 1) && mlfab__sync_rounds(server->gates[g].sync.kind)) *sums_p |= 1u << g;
  }
  return mask & ~*sums_p;
}

/* Is anything of it to be stepped by rule or callback? */
static int intake_steps(const mlfab__server *server, const mlfab__incoming *update) {
  uint32_t sums, at_once = intake_gates(server, update, &sums);
  int plain = !server->config->on_update && server->rule.kind == MLFAB_RULE_PLAIN;
  return at_once != 0 && !plain && !(update->push.flags & MLFAB__PUSH_INIT);
}

/* --- the queue --- */

static void intake_give_back(mlfab__server *server, mlfab__incoming *update) {
  update->next = server->free_list;
  server->free_list = update;
}

static mlfab__incoming *intake_new(mlfab__server *server, const mlfab__push *push) {
  mlfab__incoming *update = server->free_list;
  if (update) {
    server->free_list = update->next;
  } else {
    update = mlfab__alloc(server->env, sizeof *update);
    if (!update) return NULL;
  }
  if (push->segments > update->segment_room) {
    mlfab__free(server->env, update->segments, update->segment_room * sizeof *update->segments);
    update->segments = mlfab__alloc_array(server->env, push->segments, sizeof *update->segments);
    update->segment_room = update->segments ? push->segments : 0;
  }
  if (push->versions > update->version_room) {
    mlfab__free(server->env, update->versions, update->version_room * sizeof *update->versions);
    update->versions = mlfab__alloc_array(server->env, push->versions, sizeof *update->versions);
    update->version_room = update->versions ? push->versions : 0;
  }
  if (push->segments > update->segment_room || push->versions > update->version_room) {
    intake_give_back(server, update);
    return NULL;
  }
  mlfab__incoming kept = *update;
  memset(update, 0, sizeof *update);
  update->segments = kept.segments;
  update->versions = kept.versions;
  update->segment_room = kept.segment_room;
  update->version_room = kept.version_room;
  update->push = *push;
  if (push->segments > 0)
    memcpy(update->segments, server->segments_scratch, push->segments * sizeof *update->segments);
  if (push->versions > 0)
    memcpy(update->versions, server->versions_scratch, push->versions * sizeof *update->versions);
  return update;
}

MLFAB__INTERNAL void mlfab__intake_append(mlfab__server *server, mlfab__incoming *update,
                                          int unplaced) {
  mlfab__incoming **first = unplaced ? &server->unplaced_first : &server->first;
  mlfab__incoming **last = unplaced ? &server->unplaced_last : &server->last;
  update->unplaced = unplaced;
  update->previous = *last;
  update->next = NULL;
  *(*last ? &(*last)->next : first) = update;
  *last = update;
}

MLFAB__INTERNAL void mlfab__intake_unlink(mlfab__server *server, mlfab__incoming *update) {
  mlfab__incoming **first = update->unplaced ? &server->unplaced_first : &server->first;
  mlfab__incoming **last = update->unplaced ? &server->unplaced_last : &server->last;
  *(update->previous ? &update->previous->next : first) = update->next;
  *(update->next ? &update->next->previous : last) = update->previous;
}

/* What was written of the head is void: it has to begin again. */
MLFAB__INTERNAL void mlfab__intake_abort(mlfab__server *server) {
  for (uint32_t p = 0; p < server->store.positions && !MLFAB__PLANTED(9); p++) {
    mlfab__store_put(&server->store, &server->store.next[p], MLFAB__NO_BLOCK);
  }
  server->head = NULL;
}

MLFAB__INTERNAL void mlfab__intake_leave_stage(mlfab__server *server, mlfab__incoming *update) {
  if (update->stage) server->stage_owner[update->stage - 1] = NULL;
  update->stage = 0;
}

/* Takes the update out of the queue and gives back what it holds: arena, stage, `next` blocks. */
static void intake_remove(mlfab__server *server, mlfab__incoming *update) {
  mlfab__server_peer *peer = &server->peers[update->worker];
  mlfab__intake_unlink(server, update);
  if (server->head == update) mlfab__intake_abort(server);
  mlfab__place_forget(server, update, update->unplaced);
  mlfab__intake_leave_stage(server, update);
  peer->queued--;
  if (update->announced)
    mlfab__server_report(server, MLFAB__TRANSFER_PUSH, update->worker, update->push.seq, 0);
  peer->eager_used -= update->push.eager;
  if (update->push.eager > 0) peer->arena_tail = update->arena_at + update->push.eager;
  if (peer->queued == 0) peer->arena_head = peer->arena_tail = 0;
  intake_give_back(server, update);
}

/* Room for an update's eager bytes, contiguous in the ring of twice the credit and what rounding
 * takes. */
static void intake_reserve(mlfab__server_peer *peer, mlfab__incoming *update) {
  uint32_t eager = update->push.eager;
  peer->eager_used += eager;
  if (eager == 0 || peer->arena_bytes == 0) return;
  uint64_t at = peer->arena_head % peer->arena_bytes;
  if (at + eager > peer->arena_bytes) peer->arena_head += peer->arena_bytes - at;
  update->arena_at = peer->arena_head;
  peer->arena_head += (eager + 7u) / 8 * 8; /* the next may begin with doubles */
  assert(peer->arena_head - peer->arena_tail <= peer->arena_bytes);
}

static int intake_versions(mlfab__server *server, const mlfab__incoming *update, int commit,
                           uint64_t *delay_p, uint64_t *version_p);

/* --- bytes into blocks --- */

/* The cursor's piece: as much as lies in one block, one tensor and one segment. */
static void intake_piece(const mlfab__server *server, const mlfab__incoming *update, uint64_t limit,
                         mlfab__piece *piece) {
  const mlfab__segment *segment = &update->segments[update->segment];
  mlfab__store_piece(&server->store, segment->offset + update->in_segment,
                     mlfab__min(limit, segment->bytes - update->in_segment), piece);
}

static void intake_moved(mlfab__incoming *update, uint32_t bytes) {
  update->in_segment += bytes;
  update->consumed += bytes;
  if (update->in_segment == update->segments[update->segment].bytes) {
    update->segment++;
    update->in_segment = 0;
  }
}

static void intake_rewind(mlfab__incoming *update) {
  update->segment = 0;
  update->in_segment = update->consumed = 0;
}

/* Does the current segment cover the whole block of the piece? */
static int intake_covers(const mlfab__server *server, const mlfab__incoming *update,
                         const mlfab__piece *piece) {
  const mlfab__shard_slice *slice = &server->store.slices[piece->slice];
  uint64_t begin =
      slice->offset + (uint64_t)(piece->position - slice->first) * server->store.block_bytes;
  uint64_t end = begin + mlfab__store_block_bytes(&server->store, piece->slice, piece->position);
  const mlfab__segment *segment = &update->segments[update->segment];
  return segment->offset <= begin && end - segment->offset <= segment->bytes;
}

MLFAB__INTERNAL int mlfab__intake_fresh(mlfab__server *server, uint32_t *place, uint32_t from,
                                        int fill) {
  mlfab__store *store = &server->store;
  uint32_t block = mlfab__server_spare(server);
  if (block == MLFAB__NO_BLOCK) return MLFAB_ERR_MEMORY;
  uint8_t *data = store->blocks[block].data;
  if (fill && data && from != MLFAB__NO_BLOCK)
    memcpy(data, store->blocks[from].data, store->block_bytes);
  if (fill && data && from == MLFAB__NO_BLOCK) memset(data, 0, store->block_bytes);
  mlfab__store_put(store, place, block);
  return 0;
}

/* Writes the next bytes of the head into `next` blocks. data NULL: a ghost.
 * Errors: NOT_FINITE, MEMORY, FRAME (an element is cut); the head is then to be refused. */
static int intake_consume(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                          uint64_t bytes) {
  mlfab__store *store = &server->store;
  /* What is looked at once more had better stay in the cache. */
  int stream = store->bytes >= INTAKE_STREAM_BYTES && !server->watch;
  if (update->push.flags & MLFAB__PUSH_PACKED)
    return mlfab__packed_consume(server, update, data, bytes);
  while (bytes > 0) {
    mlfab__piece piece;
    intake_piece(server, update, bytes, &piece);
    enum mlfab__intake_mode mode = mlfab__intake_mode(server, update, piece.slice);
    double weight = mlfab__intake_weight(server, update, mode, piece.slice);
    if (piece.count * mlfab__dtype_bytes(piece.dtype) != piece.bytes) return MLFAB_ERR_FRAME;
    uint32_t p = piece.position;
    uint32_t base = mode == MLFAB__INTAKE_SUM ? store->sum[p] : store->w[p];
    if (store->next[p] == MLFAB__NO_BLOCK) {
      int code = mlfab__intake_fresh(server, &store->next[p], base,
                                     !intake_covers(server, update, &piece));
      if (code) return code;
    }
    if (data) {
      uint8_t *dst = store->blocks[store->next[p]].data + piece.at;
      int adds =
          (mode == MLFAB__INTAKE_SUM && base != MLFAB__NO_BLOCK) || mode == MLFAB__INTAKE_DIRECT;
      const uint8_t *from = adds ? store->blocks[base].data + piece.at : NULL;
      int finite = mlfab__reduce_add(piece.dtype, dst, from, data, weight, piece.count, stream);
      if (!finite && !MLFAB__PLANTED(3)) return MLFAB_ERR_NOT_FINITE;
      if (server->significant) update->norm2 += mlfab__reduce_norm2(piece.dtype, data, piece.count);
      if (update->norm2 != update->norm2) return MLFAB_ERR_NOT_FINITE; /* changed meanwhile */
      if (server->watch && mode == MLFAB__INTAKE_DIRECT)
        mlfab__changed_piece(server, &piece, from, dst);
      data += piece.bytes;
    }
    bytes -= piece.bytes;
    intake_moved(update, piece.bytes);
  }
  return 0;
}

/* The update lies whole at `data`, in private memory: checks all of it, then adds it in place. 1 when it was done, 0
 * when the long way has to be taken. *code_p tells what became of it. */
static int intake_whole(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                        int *code_p) {
  mlfab__store *store = &server->store;
  mlfab__piece piece;
  uint64_t delay = 0;
  if ((update->push.flags & MLFAB__PUSH_INIT) || server->config->on_update) return 0;
  if (update->push.flags & MLFAB__PUSH_PACKED)
    return !intake_steps(server, update) && mlfab__packed_whole(server, update, data, code_p);
  intake_versions(server, update, 0, &delay, NULL);
  for (uint64_t at = 0; at < update->push.bytes; at += piece.bytes) {
    intake_piece(server, update, update->push.bytes - at, &piece);
    enum mlfab__intake_mode mode = mlfab__intake_mode(server, update, piece.slice);
    double weight = mlfab__intake_weight(server, update, mode, piece.slice);
    /* A larger scale could make infinity of finite numbers: only the long way looks at products. */
    if (!(weight >= -1.0 && weight <= 1.0)) {
      update->norm2 = 0.0;
      intake_rewind(update);
      return 0;
    }
    if (!mlfab__reduce_finite(piece.dtype, data + at, piece.count) && !MLFAB__PLANTED(3)) {
      *code_p = MLFAB_ERR_NOT_FINITE;
      return 1;
    }
    if (server->significant)
      update->norm2 += mlfab__reduce_norm2(piece.dtype, data + at, piece.count);
    intake_moved(update, piece.bytes);
  }
  intake_rewind(update);
  for (uint64_t at = 0; at < update->push.bytes; at += piece.bytes) {
    intake_piece(server, update, update->push.bytes - at, &piece);
    int sum = mlfab__intake_mode(server, update, piece.slice) == MLFAB__INTAKE_SUM;
    uint32_t *place = sum ? &store->sum[piece.position] : &store->w[piece.position];
    if (*place == MLFAB__NO_BLOCK || store->blocks[*place].refs > 1) {
      /* Copy on write now, while nothing has changed: a copy is harmless if there is no room for
       * the next. */
      *code_p = mlfab__intake_fresh(server, place, *place, 1);
      if (*code_p) return 1;
    }
    intake_moved(update, piece.bytes);
  }
  intake_rewind(update);
  for (uint64_t at = 0; at < update->push.bytes; at += piece.bytes) {
    intake_piece(server, update, update->push.bytes - at, &piece);
    enum mlfab__intake_mode mode = mlfab__intake_mode(server, update, piece.slice);
    double weight = mlfab__intake_weight(server, update, mode, piece.slice);
    uint32_t block =
        mode == MLFAB__INTAKE_SUM ? store->sum[piece.position] : store->w[piece.position];
    uint8_t *w = store->blocks[block].data + piece.at;
    int watch = server->watch && mode != MLFAB__INTAKE_SUM;
    if (watch) memcpy(server->packed, w, piece.bytes);
    if (mode == MLFAB__INTAKE_STAGE) {
      mlfab__rule_step step = {update->push.scale, store->slices[piece.slice].commit + 1, delay};
      uint8_t *s0 = store->s0 ? store->s0[piece.position] + piece.at : NULL;
      uint8_t *s1 = store->s1 ? store->s1[piece.position] + piece.at : NULL;
      mlfab__rule_apply(&server->rule, &step, piece.dtype, w, w, data + at, s0, s1, piece.count);
    } else {
      mlfab__reduce_add(piece.dtype, w, w, data + at, weight, piece.count, 0);
    }
    if (watch) mlfab__changed_piece(server, &piece, server->packed, w);
    intake_moved(update, piece.bytes);
  }
  *code_p = 0;
  return 1;
}

/* --- deciding --- */

MLFAB__INTERNAL uint32_t mlfab__intake_touched(const mlfab__server *server,
                                               const mlfab__incoming *update, uint32_t segment,
                                               uint32_t *last_p) {
  const mlfab__segment *s = &update->segments[segment];
  const uint32_t *local = server->store.local;
  *last_p = local[mlfab__layout_slice_at(&server->layout, s->offset + s->bytes - 1)];
  return local[mlfab__layout_slice_at(&server->layout, s->offset)];
}

/* Walks the slices that an update touches, in order: measures the largest delay, and with `commit`
 * 1 moves versions and commits on, with 2 versions only (a further member of a group); those of
 * slices in rounds move with the round. A pull tells
 * the largest version of its slices; for those that are behind it, it means their present one.
 * Returns 0, or ARGUMENT for too few versions. */
static int intake_versions(mlfab__server *server, const mlfab__incoming *update, int commit,
                           uint64_t *delay_p, uint64_t *version_p) {
  uint64_t delay = 0, version = 0;
  uint32_t seen = 0, next = 0;
  for (uint32_t k = 0; k < update->push.segments; k++) {
    uint32_t last, i = mlfab__intake_touched(server, update, k, &last);
    for (i = i < next ? next : i; i <= last; i++, seen++) {
      mlfab__shard_slice *slice = &server->store.slices[i];
      uint32_t at = update->push.versions == 1 ? 0 : seen;
      if (at >= update->push.versions) return MLFAB_ERR_ARGUMENT;
      uint64_t base = mlfab__min(update->versions[at], slice->version);
      if (intake_at_once(server, i)) {
        delay = mlfab__max(delay, slice->version - base);
        if (commit) slice->version += update->push.members;
        if (commit == 1) slice->commit++;
      }
      version = mlfab__max(version, slice->version);
    }
    next = last + 1;
  }
  if (delay_p) *delay_p = delay;
  if (version_p) *version_p = version;
  return 0;
}

static void intake_ack(mlfab__server *server, uint32_t worker, uint64_t seq, uint32_t members,
                       int code, uint64_t version, uint64_t delay) {
  const mlfab__server_peer *peer = &server->peers[worker];
  mlfab__push_ack ack = {seq, members, peer->generation, code, version, delay, peer->pushed};
  uint8_t meta[128];
  server->port.post(server->port.self, worker, MLFAB__PUSH_ACK, meta,
                    mlfab__encode_push_ack(meta, &ack));
}

/* Answers a repetition of what is decided. */
static void intake_known(mlfab__server *server, uint32_t worker, const mlfab__push *push) {
  const mlfab__window *window = &server->dedup.windows[worker];
  enum mlfab__decision known = mlfab__dedup_ask(window, push->seq, push->members);
  int code = known == MLFAB__APPLIED   ? 0
             : known == MLFAB__DROPPED ? MLFAB_ERR_DROPPED
                                       : MLFAB_ERR_WITHDRAWN;
  server->stats->updates_repeated += push->members;
  intake_ack(server, worker, push->seq, push->members, code, 0, 0);
}

/* Decides an update: answers, counts, and takes it out of the queue. */
MLFAB__INTERNAL void mlfab__intake_decide(mlfab__server *server, mlfab__incoming *update, int code,
                                          uint64_t version, uint64_t delay) {
  uint32_t worker = update->worker;
  mlfab__push *push = &update->push;
  int init = (push->flags & MLFAB__PUSH_INIT) != 0;
  mlfab__dedup_decide(&server->dedup.windows[worker], push->seq, push->members, code);
  if (!init) mlfab__gate_decided(server, update, code);
  if (code == 0 && !init) {
    server->stats->updates_applied += push->members;
    server->stats->delay_sum += delay * push->members;
    server->stats->delay_max = mlfab__max(server->stats->delay_max, delay);
  } else if (code == MLFAB_ERR_DROPPED) {
    server->stats->updates_dropped += push->members;
  } else if (code != 0 && code != MLFAB_ERR_WITHDRAWN) {
    server->stats->updates_refused += push->members;
    server->port.event(server->port.self, MLFAB_EVENT_REFUSED_UPDATE, (int32_t)worker, 0,
                       server->peers[worker].incarnation, code, mlfab_error_text(code));
  }
  intake_ack(server, worker, push->seq, push->members, code, version, delay);
  intake_remove(server, update);
}

/* What was written of the head becomes the model, or the sum of its round. */
static void intake_swap(mlfab__server *server, int init) {
  mlfab__store *store = &server->store;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    uint32_t *place = init || intake_at_once(server, i) ? store->w : store->sum;
    for (uint32_t p = s->first; p < s->first + s->count; p++) {
      if (store->next[p] == MLFAB__NO_BLOCK) continue;
      mlfab__store_put(store, &place[p], store->next[p]);
      store->next[p] = MLFAB__NO_BLOCK;
    }
  }
}

/* The first in a round: its scale is the sum's. */
static void intake_open_rounds(mlfab__server *server, const mlfab__incoming *update,
                               uint32_t sums) {
  for (uint32_t g = 0; g < server->ngates; g++) {
    mlfab__gate *gate = &server->gates[g];
    if ((sums >> g & 1) && gate->round_members == 0) gate->round_scale = update->push.scale;
  }
}

/* An update, or all members of a group, are applied or in their rounds' sums: versions move on where
 * they were applied. One commit. */
static void intake_commit(mlfab__server *server, mlfab__incoming *update) {
  uint64_t group = update->group;
  uint32_t sums, at_once = intake_gates(server, update, &sums);
  int commit = 1;
  if (at_once) server->stats->commits++;
  intake_open_rounds(server, update, sums);
  if (group) mlfab__place_applied(server, update);
  for (mlfab__incoming *next; update; update = next) {
    uint64_t delay = 0, version = 0;
    next = group && update->next && update->next->group == group ? update->next : NULL;
    intake_versions(server, update, commit, &delay, &version);
    mlfab__intake_decide(server, update, 0, at_once ? version : server->gates[0].v_train, delay);
    commit = MLFAB__PLANTED(16) ? 1 : 2;
  }
}

/* All bytes of the head are in `next`. */
static void intake_complete(mlfab__server *server, mlfab__incoming *update) {
  if (mlfab__packed_complete(server, update)) {
    mlfab__place_refuse(server, update, MLFAB_ERR_MEMORY);
    return;
  }
  if (intake_steps(server, update)) {
    server->applying = MLFAB__APPLY_UPDATE;
    server->apply_code = 0;
    server->apply_segment = 0;
    intake_rewind(update);
    return;
  }
  int init = (update->push.flags & MLFAB__PUSH_INIT) != 0;
  intake_swap(server, init);
  if (!init) {
    intake_commit(server, update);
    return;
  }
  mlfab__intake_decide(server, update, 0, 0, 0);
  server->phase = MLFAB__MODEL_STANDS;
  server->first_weights_incarnation = server->peers[0].incarnation;
  mlfab__server_stands(server);
}

/* --- applying, block by block --- */

static int intake_callback(mlfab__server *server, const mlfab_update_info *info,
                           const mlfab__piece *piece, uint8_t *dst, const uint8_t *w,
                           const uint8_t *sum) {
  if (sum == dst) {
    memcpy(server->scratch, sum, piece->bytes);
    sum = server->scratch;
  }
  memcpy(dst, w, piece->bytes);
  return server->config->on_update(server->config->user, info, piece->tensor->id, piece->dtype,
                                   piece->first, piece->count, dst, sum);
}

MLFAB__INTERNAL int mlfab__intake_apply_piece(mlfab__server *server, const mlfab_update_info *info,
                                              const mlfab__piece *piece, const uint8_t *sum) {
  mlfab__store *store = &server->store;
  uint32_t p = piece->position;
  uint8_t *dst = store->blocks[store->next[p]].data + piece->at;
  const uint8_t *w = store->blocks[store->w[p]].data + piece->at;
  if (server->config->on_update) {
    if (intake_callback(server, info, piece, dst, w, sum)) return MLFAB_ERR_CALLBACK;
  } else {
    mlfab__rule_step step = {info->scale, store->slices[piece->slice].commit + 1, info->delay};
    mlfab__rule_apply(&server->rule, &step, piece->dtype, dst, w, sum,
                      store->s0 ? store->s0[p] + piece->at : NULL,
                      store->s1 ? store->s1[p] + piece->at : NULL, piece->count);
  }
  if (server->watch) mlfab__changed_piece(server, piece, w, dst);
  return 0;
}

static void intake_info(const mlfab__server *server, const mlfab__incoming *update, uint64_t delay,
                        mlfab_update_info *info) {
  memset(info, 0, sizeof *info);
  info->worker = update->worker;
  info->incarnation = server->peers[update->worker].incarnation;
  info->seq = update->push.seq;
  info->members = update->push.members;
  for (const mlfab__incoming *u = update->next; update->group && u && u->group == update->group;
       u = u->next) {
    uint64_t later = 0;
    intake_versions((mlfab__server *)(uintptr_t)server, u, 0, &later, NULL);
    delay = mlfab__max(delay, later + info->members);
    info->members += u->push.members;
  }
  info->server = server->number;
  info->delay = delay;
  if (update->push.segments > 0) {
    uint32_t last, slice = mlfab__intake_touched(server, update, 0, &last);
    info->version = server->store.slices[slice].version;
    info->commit = server->store.slices[slice].commit;
  }
  info->progress = update->push.progress;
  info->scale = intake_scale(server, update);
  info->norm = update->group ? 0.0 : update->push.norm;
}

/* Goes on applying the head, at most `budget` bytes. 1 when it is finished. */
static int intake_apply_update(mlfab__server *server, uint64_t budget) {
  mlfab__incoming *update = server->head;
  const uint32_t *next = server->store.next;
  mlfab_update_info info;
  uint64_t delay = 0;
  intake_versions(server, update, 0, &delay, NULL);
  intake_info(server, update, delay, &info);
  while (update->segment < update->push.segments && budget > 0 && !server->apply_code) {
    mlfab__piece piece;
    intake_piece(server, update, UINT64_MAX, &piece);
    if (!server->store.ghost && intake_at_once(server, piece.slice)) {
      if (next[piece.position] == MLFAB__NO_BLOCK)
        server->apply_code = mlfab__packed_fresh(server, update, piece.slice, piece.position);
      if (server->apply_code) break;
      const uint8_t *u = server->store.blocks[next[piece.position]].data + piece.at;
      server->apply_code = mlfab__intake_apply_piece(server, &info, &piece, u);
    }
    intake_moved(update, piece.bytes);
    budget -= mlfab__min(budget, piece.bytes);
  }
  if (update->segment < update->push.segments && !server->apply_code) return 0;
  server->applying = MLFAB__APPLY_NONE;
  if (server->apply_code) {
    mlfab__place_refuse(server, update, server->apply_code);
  } else {
    intake_swap(server, 0);
    intake_commit(server, update);
  }
  return 1;
}

/* --- heads --- */

/* May this update be taken in now? */
MLFAB__INTERNAL int mlfab__intake_eligible(const mlfab__server *server,
                                           const mlfab__incoming *update) {
  if (update->push.flags & MLFAB__PUSH_INIT) return 1;
  if (server->phase != MLFAB__MODEL_STANDS) return 0;
  /* With several models one may let a worker's second update in while another holds the first. */
  for (const mlfab__incoming *u = server->ngates > 1 ? server->first : NULL; u && u != update;
       u = u->next) {
    if (u->worker == update->worker) return 0;
  }
  return mlfab__gate_may_push(server, update->worker, update->push.progress,
                              mlfab__gate_mask(server, update->segments, update->push.segments));
}

static mlfab__incoming *intake_eligible_from(const mlfab__server *server, mlfab__incoming *update) {
  while (update && !mlfab__intake_eligible(server, update)) update = update->next;
  return update;
}

static void intake_grant(mlfab__server *server, mlfab__incoming *update, uint64_t upto) {
  uint8_t meta[64];
  if (update->group) {
    mlfab__place_release(server, update, upto);
    return;
  }
  if (upto <= update->granted) return;
  update->granted = upto;
  mlfab__grant grant = {update->push.seq, upto, server->peers[update->worker].generation};
  server->port.post(server->port.self, update->worker, MLFAB__GRANT, meta,
                    mlfab__encode_grant(meta, &grant));
}

/* A stage that nobody owns, or MLFAB__SERVER_STAGES. Those after the first are for planned
 * transfers, which may come over links of very different speed at the same time. */
static uint32_t intake_free_stage(mlfab__server *server) {
  uint64_t fit = INTAKE_STAGES_BYTES / mlfab__max(server->stage_bytes, 1);
  uint32_t n = server->scheduled ? MLFAB__SERVER_STAGES : 1;
  if (!server->store.ghost && n > 1 && fit < n) n = (uint32_t)mlfab__max(fit, 2);
  for (uint32_t i = 0; i < n; i++) {
    if (server->stage_owner[i]) continue;
    if (!server->stages[i] && !server->store.ghost)
      server->stages[i] = mlfab__alloc(server->env, server->stage_bytes);
    if (server->stages[i] || server->store.ghost) return i;
  }
  return MLFAB__SERVER_STAGES;
}

/* The next in the queue that is not released. Followers in a group come with its first. */
static mlfab__incoming *intake_unreleased(mlfab__server *server) {
  mlfab__incoming *update = intake_eligible_from(server, server->first);
  while (update && (update == server->head || update->granted == update->push.bytes ||
                    update->granted > update->push.eager || update->refused ||
                    mlfab__place_follows(update))) {
    update = intake_eligible_from(server, update->next);
  }
  return update;
}

/* Releases the next transfer when those before it leave the in-link unused: shortly before their
 * end, or because they come more slowly than the link carries. What is staged is copied once
 * more. */
static void intake_release(mlfab__server *server) {
  const mlfab__incoming *head = server->head;
  uint64_t coming = 0, little = 2 * (uint64_t)server->config->chunk_bytes;
  if (server->stage_bytes == 0 || !head) return;
  int ends = head->push.bytes - head->received <= little;
  int idle = server->scheduled && mlfab__meter_idle(&server->meter, server->now_ns);
  if (!ends && !idle) return;
  for (const mlfab__incoming *u = server->first; u && !idle; u = u->next)
    coming += mlfab__max(u->granted, u->received) - u->received;
  if (coming > little) return;
  mlfab__meter_begin(&server->meter, server->now_ns);
  mlfab__incoming *update = intake_unreleased(server);
  if (!update) return;
  uint32_t stage = intake_free_stage(server);
  if (stage == MLFAB__SERVER_STAGES) return;
  update->stage = stage + 1;
  server->stage_owner[stage] = update;
  intake_grant(server, update,
               mlfab__min(update->push.bytes, update->push.eager + server->stage_bytes));
}

static const uint8_t *intake_staged(const mlfab__server *server, const mlfab__incoming *update,
                                    uint64_t at) {
  const mlfab__server_peer *peer = &server->peers[update->worker];
  if (server->store.ghost) return NULL;
  if (at < update->push.eager) return peer->arena + update->arena_at % peer->arena_bytes + at;
  /* An empty update has neither; what is returned then only has to be something. */
  return server->stages[update->stage ? update->stage - 1 : 0] + (at - update->push.eager);
}

/* Consumes what is staged of the head. */
static int intake_unstage(mlfab__server *server, mlfab__incoming *update) {
  int code = 0;
  while (update->consumed < update->received && !code) {
    uint64_t at = update->consumed;
    uint64_t end = at < update->push.eager ? mlfab__min(update->push.eager, update->received)
                                           : update->received;
    code = intake_consume(server, update, intake_staged(server, update, at), end - at);
  }
  return code;
}

/* Is every member still undecided and below the bound? Else what is wrong, and with which. */
static int intake_judge(mlfab__server *server, mlfab__incoming *update,
                        mlfab__incoming **culprit_p) {
  uint64_t group = update->group, ahead = 0;
  for (; update; update = update->next) {
    if (group && update->group != group) return 0;
    *culprit_p = update;
    const mlfab__window *window = &server->dedup.windows[update->worker];
    enum mlfab__decision known = mlfab__dedup_ask(window, update->push.seq, update->push.members);
    if (known != MLFAB__UNDECIDED) return 1;
    int code = update->withdrawn ? MLFAB_ERR_WITHDRAWN : update->refused;
    uint64_t delay = 0;
    int stands = server->phase == MLFAB__MODEL_STANDS && !(update->push.flags & MLFAB__PUSH_INIT);
    if (!code && stands) code = intake_versions(server, update, 0, &delay, NULL);
    if (!code) code = mlfab__place_late(server, update, delay + ahead);
    uint32_t mask = mlfab__gate_mask(server, update->segments, update->push.segments);
    if (!code && stands && mlfab__gate_late(server, update->worker, mask)) code = MLFAB_ERR_DROPPED;
    if (code) return code;
    ahead += update->push.members;
    if (!group) return 0;
  }
  return 0;
}

/* Makes the update the head. `data` is its first and only bytes when they came with its announcement
 * and are not staged: in private memory, where that is all of it or packets. */
static void intake_begin(mlfab__server *server, mlfab__incoming *update, const uint8_t *data) {
  mlfab__incoming *culprit = update->group ? mlfab__place_stray(server, update) : NULL;
  if (culprit && !MLFAB__PLANTED(91)) {
    mlfab__place_ungroup(server, update, culprit, 0);
    return;
  }
  server->head = update;
  update->last_byte_ns = server->now_ns;
  int code = intake_judge(server, update, &culprit);
  if (code && update->group) {
    if (code < 0) culprit->refused = code;
    if (code == MLFAB_ERR_DROPPED) server->late++;
    mlfab__place_ungroup(server, update, culprit, 0);
    return;
  }
  if (code > 0) {
    /* Decided while a repetition of it waited. */
    intake_known(server, update->worker, &update->push);
    intake_remove(server, update);
    return;
  }
  if (code) {
    mlfab__intake_decide(server, update, code, 0, update->delay);
    return;
  }
  if (!data && update->received == update->push.bytes && update->push.bytes == update->push.eager) {
    data = intake_staged(server, update, 0);
  }
  update->norm2 = 0.0; /* it may have begun before */
  int whole =
      data && update->received == update->push.bytes && update->push.bytes <= INTAKE_WHOLE_BYTES;
  if (whole && intake_whole(server, update, data, &code)) {
    if (code) {
      mlfab__place_refuse(server, update, code);
    } else {
      intake_commit(server, update);
    }
    return;
  }
  if (data) {
    code = intake_consume(server, update, data, update->received);
  } else {
    code = intake_unstage(server, update);
  }
  if (code) {
    mlfab__place_refuse(server, update, code);
    return;
  }
  mlfab__intake_leave_stage(server, update);
  if (update->consumed == update->push.bytes) {
    intake_complete(server, update);
    return;
  }
  intake_grant(server, update, update->push.bytes);
}

MLFAB__INTERNAL void mlfab__intake_advance(mlfab__server *server) {
  uint64_t budget = INTAKE_TICK_BYTES;
  if (!server->held) mlfab__place_advance(server);
  for (;;) {
    if (server->applying == MLFAB__APPLY_UPDATE && !intake_apply_update(server, budget)) return;
    if (server->applying == MLFAB__APPLY_ROUND && !mlfab__round_apply(server, budget)) return;
    if (server->held) return;
    if (server->head) break;
    if (mlfab__gate_change(server) || mlfab__gate_advance(server)) continue;
    mlfab__incoming *update = intake_eligible_from(server, server->first);
    if (!update) return;
    intake_begin(server, update, NULL);
  }
  intake_release(server);
}

/* --- frames --- */

/* Bytes for a model that has none, or none for one that has. */
static int intake_strange(const mlfab__server *server, const mlfab__frame_in *frame) {
  return frame->bulk_bytes > 0 && (frame->bulk == NULL) != (server->store.ghost != 0);
}

/* Checks an announcement against model and credit. Returns a text when it breaks the protocol. */
static const char *intake_check(const mlfab__server *server, uint32_t worker,
                                const mlfab__push *push, const mlfab__frame_in *frame) {
  const mlfab__server_peer *peer = &server->peers[worker];
  if (server->phase == MLFAB__NO_MODEL) return "a push before the model exists";
  if (push->seq == 0) return "an update without a number";
  if ((push->flags & MLFAB__PUSH_INIT) && worker != 0)
    return "first weights from another worker than 0";
  uint32_t known = MLFAB__PUSH_MORE | MLFAB__PUSH_INIT | MLFAB__PUSH_PLANNED | MLFAB__PUSH_PACKED;
  if (push->flags & ~known) return "unknown flags in a push";
  if ((push->flags & MLFAB__PUSH_PACKED) &&
      ((push->flags & MLFAB__PUSH_INIT) || server->store.ghost))
    return "packets for first weights, or for ghosts";
  if ((push->flags & MLFAB__PUSH_PLANNED) &&
      (!server->scheduled || push->eager > 0 || (push->flags & MLFAB__PUSH_INIT)))
    return "a push to be planned, with bytes or without a scheduler";
  if (peer->queued >= MLFAB__SERVER_QUEUED) return "more updates in flight than allowed";
  if (push->eager > server->eager_bytes || peer->eager_used > server->eager_bytes - push->eager) {
    return "more eager bytes than its credit";
  }
  if (push->eager > 0 && peer->arena_bytes == 0 && !server->store.ghost)
    return "eager bytes without credit";
  if (frame->bulk_bytes > push->eager) return "more bytes than granted";
  if (intake_strange(server, frame)) return "ghosts for a model with bytes, or bytes for ghosts";
  if (peer->queued > 0 && push->seq <= peer->last_queued) return "an update number that went back";
  if (peer->queued > 0 && push->progress < peer->last_progress && mlfab__gate_counts(server))
    return "a progress that went back";
  if (push->progress > MLFAB__PROGRESS_MAX) return "a progress that cannot be";
  for (uint32_t i = 0; i < push->segments; i++) {
    if (!mlfab__layout_valid(&server->layout, server->number, &server->segments_scratch[i])) {
      return "a stretch that is not of this server's slices";
    }
  }
  return NULL;
}

/* Looks at packets that came, the first of them byte `at` of the update. From then on they are read from
 * private memory. 0 when they are wrong: the link to `peer` is given up. */
static int intake_look(mlfab__server *server, uint32_t peer, mlfab__incoming *update, uint64_t at,
                       mlfab__frame_in *frame) {
  if (!(update->push.flags & MLFAB__PUSH_PACKED) || frame->bulk_bytes == 0) return 1;
  frame->bulk = mlfab__pack_private(server->came, frame->bulk, frame->bulk_bytes);
  const char *wrong = mlfab__packed_check(server, update, at, frame->bulk, frame->bulk_bytes);
  if (wrong) mlfab__server_drop(server, peer, MLFAB_ERR_FRAME, wrong);
  return !wrong;
}

/* Begins an update whose turn it is already, with the bytes that came with its announcement. */
static void intake_begin_now(mlfab__server *server, mlfab__incoming *update,
                             const mlfab__frame_in *frame) {
  const uint8_t *data = frame->bulk_bytes > 0 ? frame->bulk : NULL;
  int whole = update->received == update->push.bytes && update->push.bytes <= INTAKE_WHOLE_BYTES;
  if (data && whole && !(update->push.flags & MLFAB__PUSH_PACKED)) {
    memcpy((uint8_t *)(uintptr_t)intake_staged(server, update, 0), data, frame->bulk_bytes);
    data = NULL; /* it is found there */
  }
  intake_begin(server, update, data);
}

MLFAB__INTERNAL void mlfab__intake_push(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame) {
  mlfab__server_peer *peer = &server->peers[worker];
  mlfab__frame_in own = *frame;
  mlfab__push push;
  if (mlfab__decode_push(frame->meta, frame->meta_bytes, &push, server->segments_scratch,
                         server->versions_scratch) ||
      push.seq == 0) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a PUSH that does not parse");
    return;
  }
  if (push.generation != peer->generation) return; /* of a stream that was reset since */
  /* First weights of a model that was refused: they were on their way. */
  if (worker == 0 && (push.flags & MLFAB__PUSH_INIT) && server->phase == MLFAB__NO_MODEL &&
      !MLFAB__PLANTED(77))
    return;
  const mlfab__window *window = &server->dedup.windows[worker];
  enum mlfab__decision known = mlfab__dedup_ask(window, push.seq, push.members);
  /* A repetition of what is decided: worker 0's first weights for a model that stands count as
   * such. */
  if (known == MLFAB__UNDECIDED && worker == 0 && (push.flags & MLFAB__PUSH_INIT) &&
      server->phase == MLFAB__MODEL_STANDS) {
    if (peer->queued == 0)
      mlfab__dedup_decide(&server->dedup.windows[worker], push.seq, push.members, 0);
    known = MLFAB__APPLIED;
  }
  if (known != MLFAB__UNDECIDED) {
    intake_known(server, worker, &push);
    return;
  }
  const char *wrong = intake_check(server, worker, &push, frame);
  if (wrong) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, wrong);
    return;
  }
  mlfab__incoming *update = intake_new(server, &push);
  if (!update || ((push.flags & MLFAB__PUSH_PACKED) && mlfab__packed_room(server))) {
    if (update) intake_give_back(server, update);
    mlfab__server_drop(server, worker, MLFAB_ERR_MEMORY, "out of memory for an update");
    return;
  }
  if (!intake_look(server, worker, update, 0, &own)) {
    intake_give_back(server, update);
    return;
  }
  /* Of what came before this one nothing is undecided here. */
  if (peer->queued == 0 && !(push.flags & MLFAB__PUSH_INIT))
    mlfab__gate_reach(server, worker, push.progress);
  update->worker = worker;
  update->granted = push.eager;
  update->received = frame->bulk_bytes;
  update->last_byte_ns = server->now_ns;
  peer->queued++;
  peer->last_queued = push.seq + push.members - 1;
  peer->last_progress = push.progress;
  intake_reserve(peer, update);
  mlfab__place_new(server, update);
  int at_once = !update->unplaced && !update->refused && !server->head &&
                server->applying == MLFAB__APPLY_NONE && server->first == update &&
                mlfab__intake_eligible(server, update);
  if (at_once && (own.bulk || own.bulk_bytes == 0)) {
    intake_begin_now(server, update, &own);
  } else if (own.bulk) {
    uint8_t *to = peer->arena + update->arena_at % peer->arena_bytes;
    memcpy(to, own.bulk, own.bulk_bytes);
  }
  mlfab__intake_advance(server);
}

static mlfab__incoming *intake_find(const mlfab__server *server, uint32_t worker, uint64_t seq) {
  mlfab__incoming *update = server->head;
  if (update && update->worker == worker && update->push.seq == seq) return update;
  for (update = server->first; update; update = update->next) {
    if (update->worker == worker && update->push.seq == seq) return update;
  }
  for (update = server->unplaced_first; update; update = update->next) {
    if (update->worker == worker && update->push.seq == seq) return update;
  }
  return NULL;
}

/* The next bytes of an update, or of a group as those of its first: they came on the link of
 * `peer`. */
static void intake_bytes(mlfab__server *server, uint32_t peer, mlfab__incoming *update,
                         uint64_t offset, const mlfab__frame_in *frame) {
  if (offset != update->received || frame->bulk_bytes > update->granted - update->received ||
      intake_strange(server, frame)) {
    mlfab__server_drop(server, peer, MLFAB_ERR_FRAME, "a chunk out of place or not granted");
    return;
  }
  mlfab__frame_in own = *frame;
  if (!intake_look(server, peer, update, offset, &own)) return;
  update->last_byte_ns = server->now_ns;
  int direct = update == server->head && update->consumed == update->received &&
               server->applying == MLFAB__APPLY_NONE;
  uint64_t at = update->received;
  update->received += frame->bulk_bytes;
  mlfab__meter_count(&server->meter, frame->bulk_bytes);
  if (!direct) {
    /* A chunk may begin in the arena and end in the stage. */
    uint64_t eager =
        at < update->push.eager ? mlfab__min(update->push.eager - at, frame->bulk_bytes) : 0;
    const uint8_t *bulk = own.bulk;
    if (eager > 0 && bulk)
      memcpy((uint8_t *)(uintptr_t)intake_staged(server, update, at), bulk, eager);
    if (frame->bulk_bytes > eager && bulk) {
      memcpy(server->stages[update->stage - 1] + (at + eager - update->push.eager), bulk + eager,
             frame->bulk_bytes - eager);
    }
    intake_release(server);
    return;
  }
  int code = intake_consume(server, update, own.bulk, own.bulk_bytes);
  if (code) {
    mlfab__place_refuse(server, update, code);
  } else if (update->consumed == update->push.bytes) {
    intake_complete(server, update);
  } else {
    mlfab__place_progress(server, update);
  }
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL void mlfab__intake_chunk(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_in *frame) {
  mlfab__chunk chunk;
  if (mlfab__decode_chunk(frame->meta, frame->meta_bytes, &chunk)) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a CHUNK that does not parse");
    return;
  }
  if (chunk.generation != server->peers[worker].generation) return;
  mlfab__incoming *update = intake_find(server, worker, chunk.seq);
  if (!update) return;       /* refused or withdrawn meanwhile */
  if (update->group) return; /* it goes by another way now */
  /* Dropped or withdrawn before its turn: what was on its way already does not matter. */
  if (update->refused || update->withdrawn) return;
  intake_bytes(server, worker, update, chunk.offset, frame);
}

MLFAB__INTERNAL void mlfab__intake_forward(mlfab__server *server, uint32_t aggregator,
                                           const mlfab__frame_in *frame) {
  mlfab__forward forward;
  if (mlfab__decode_forward(frame->meta, frame->meta_bytes, &forward)) {
    mlfab__server_drop(server, aggregator, MLFAB_ERR_FRAME, "a FORWARD that does not parse");
    return;
  }
  mlfab__incoming *update = mlfab__place_find(server, aggregator, forward.group);
  if (!update) return;
  const char *wrong = mlfab__place_sum(update, &forward, frame->bulk_bytes);
  if (wrong) {
    mlfab__server_drop(server, aggregator, MLFAB_ERR_FRAME, wrong);
    return;
  }
  intake_bytes(server, aggregator, update, forward.offset, frame);
}

MLFAB__INTERNAL void mlfab__intake_withdraw(mlfab__server *server, uint32_t worker,
                                            const mlfab__frame_in *frame) {
  mlfab__withdraw withdraw;
  if (mlfab__decode_withdraw(frame->meta, frame->meta_bytes, &withdraw)) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a WITHDRAW that does not parse");
    return;
  }
  if (withdraw.generation != server->peers[worker].generation) return;
  mlfab__incoming *update = intake_find(server, worker, withdraw.seq);
  if (!update) return;                             /* decided: its PUSH_ACK is on the way */
  if (mlfab__place_recall(server, update)) return; /* too late: it will be acknowledged */
  if (update == server->head) {
    mlfab__intake_decide(server, update, MLFAB_ERR_WITHDRAWN, 0, 0);
  } else {
    update->withdrawn = 1;
    server->place_due = 1;
    /* It keeps its place in the queue, so that the worker's order stays; nothing more will come. */
    update->received = update->granted = update->push.bytes;
  }
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL void mlfab__intake_finish(mlfab__server *server, uint32_t worker) {
  if (server->applying != MLFAB__APPLY_UPDATE) return;
  const mlfab__incoming *update = server->head;
  while (update && update->worker != worker)
    update =
        update->group && update->next && update->next->group == update->group ? update->next : NULL;
  if (update) intake_apply_update(server, MLFAB__NEVER);
}

/* The first update of a worker that is not past recall: what is being applied has all its bytes,
 * and is decided when it is done. */
static mlfab__incoming *intake_first_of(const mlfab__server *server, uint32_t worker) {
  mlfab__incoming *update = server->first;
  while (update && (update->worker != worker || mlfab__place_applying(server, update)))
    update = update->next;
  if (update) return update;
  update = server->unplaced_first;
  while (update && update->worker != worker) update = update->next;
  return update;
}

MLFAB__INTERNAL void mlfab__intake_reset(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  mlfab__incoming *update;
  while ((update = intake_first_of(server, worker)) != NULL) {
    if (update->group) mlfab__place_ungroup(server, update, update, 0);
    intake_remove(server, update);
  }
  peer->generation++;
  peer->last_queued = 0;
}

MLFAB__INTERNAL void mlfab__intake_tick(mlfab__server *server) {
  mlfab__incoming *head = server->head;
  uint64_t silent = head ? server->now_ns - head->last_byte_ns : 0;
  if (head && head->group && server->applying == MLFAB__APPLY_NONE) {
    /* The aggregator names a silent member after three; this is its own silence. */
    if (silent >= 5 * server->heartbeat_ns) mlfab__place_ungroup(server, head, NULL, 1);
  } else if (head && server->applying == MLFAB__APPLY_NONE && silent >= 3 * server->heartbeat_ns) {
    uint32_t worker = head->worker;
    server->stats->transfers_revoked++;
    mlfab__intake_reset(server, worker);
    const mlfab__window *window = &server->dedup.windows[worker];
    mlfab__resend resend;
    resend.generation = server->peers[worker].generation;
    resend.top = window->top;
    memcpy(resend.applied, window->applied, sizeof resend.applied);
    memcpy(resend.dropped, window->dropped, sizeof resend.dropped);
    uint8_t meta[96];
    server->port.post(server->port.self, worker, MLFAB__RESEND, meta,
                      mlfab__encode_resend(meta, &resend));
  }
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL uint64_t mlfab__intake_deadline(const mlfab__server *server) {
  if (server->applying != MLFAB__APPLY_NONE) return 0;
  if (!server->head) return MLFAB__NEVER;
  uint64_t beats = server->head->group ? 5 : 3;
  uint64_t deadline = server->head->last_byte_ns + beats * server->heartbeat_ns;
  int more = server->scheduled && server->last != server->head;
  return more ? mlfab__min(deadline, mlfab__meter_due(&server->meter)) : deadline;
}

MLFAB__INTERNAL void mlfab__intake_free(mlfab__server *server) {
  while (server->first) intake_remove(server, server->first);
  while (server->unplaced_first) intake_remove(server, server->unplaced_first);
  while (server->free_list) {
    mlfab__incoming *update = server->free_list;
    server->free_list = update->next;
    mlfab__free(server->env, update->segments, update->segment_room * sizeof *update->segments);
    mlfab__free(server->env, update->versions, update->version_room * sizeof *update->versions);
    mlfab__free(server->env, update, sizeof *update);
  }
}
