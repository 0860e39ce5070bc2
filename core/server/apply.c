/* apply.c - the server role: takes updates into the model. See server.h.
 *
 * How the bytes of the head are written depends on the consistency model and the optimizer:
 *   INIT    next = u                 the first weights
 *   DIRECT  next = w + scale * u     plain SGD, asynchronous: one pass while the bytes are in the cache
 *   STAGE   next = u                 other optimizers and callbacks: applied block by block at commit
 *   SUM     next = sum + weight * u  rounds: the round is applied when it is complete
 * A small update that is wholly in memory is checked first and then added in place, unless a pull pins the
 * block, or the model is on a device. For that its bytes are copied to private memory and read twice. So above 64 KiB
 * the server does it only where `next` would cost more: a copy of each block that is touched in part, or a second pass.
 * sparse_apply.c takes packets in, with a codec of the same form.
 *
 * Received bytes may lie in memory that the sender can still write. Values are therefore checked as they
 * are added, in one pass that reads them once. (A norm that a clock asks for is of a second reading: a sender that
 * writes meanwhile gets a wrong one.) Bytes that are read twice (in place, or as packets) are
 * first copied to private memory. */
#include "server.h"

#include "../kernels/kernels.h"

enum {
  APPLY_WHOLE_BYTES = 256 * 1024,
  APPLY_LITTLE_BYTES = 64 * 1024,
  APPLY_STREAM_BYTES = 12 << 20, /* with the copy that is written, more than a cache holds */
  APPLY_STAGES_BYTES = 256 << 20 /* of all stages together; two stages are always allowed */
};

MLFAB__INTERNAL enum mlfab__apply_mode mlfab__apply_mode(const mlfab__server *server,
                                                         const mlfab__incoming *update) {
  if (update->push.flags & MLFAB__PUSH_INIT) return MLFAB__APPLY_INIT;
  if (server->rounds) return MLFAB__APPLY_SUM;
  if (server->config->on_update || !mlfab__optimizer_adds(&server->optimizer))
    return MLFAB__APPLY_STAGE;
  return MLFAB__APPLY_DIRECT;
}

/* The scale of the received bytes; 1 if the aggregator has already scaled each member. */
static double apply_scale(const mlfab__server *server, const mlfab__incoming *update) {
  return update->group && mlfab__clock_absolute(server) ? 1.0 : update->push.scale;
}

/* A non-linear optimizer gets a sum with weights relative to the round's first member, and steps with that
 * member's scale. */
MLFAB__INTERNAL double mlfab__apply_weight(const mlfab__server *server,
                                           const mlfab__incoming *update,
                                           enum mlfab__apply_mode mode) {
  if (mode == MLFAB__APPLY_INIT || mode == MLFAB__APPLY_STAGE) return 1.0;
  if (mode == MLFAB__APPLY_DIRECT || mlfab__optimizer_linear(&server->optimizer))
    return apply_scale(server, update);
  const mlfab__clock *clock = &server->clock;
  if (clock->round_members == 0) return 1.0;
  return clock->round_scale != 0.0 ? update->push.scale / clock->round_scale : 0.0;
}

MLFAB__INTERNAL int mlfab__apply_steps(const mlfab__server *server, const mlfab__incoming *update) {
  return mlfab__apply_mode(server, update) == MLFAB__APPLY_STAGE;
}

/* --- leaving the queue --- */

MLFAB__INTERNAL void mlfab__apply_abort(mlfab__server *server) {
  for (uint32_t p = 0; p < server->store.positions; p++) {
    mlfab__store_put(&server->store, &server->store.next[p], MLFAB__NO_BLOCK);
  }
  server->apply.head = NULL;
  if (server->apply.applying == MLFAB__APPLY_HELD) server->apply.applying = MLFAB__APPLY_NONE;
}

/* Removes the update from the queue and releases its arena, its stage and its `next` blocks. */
static void apply_remove(mlfab__server *server, mlfab__incoming *update) {
  mlfab__server_peer *peer = &server->peers[update->worker];
  mlfab__queue_unlink(server, update);
  if (server->apply.head == update) mlfab__apply_abort(server);
  mlfab__queue_forget(server, update);
  mlfab__queue_leave_stage(server, update);
  peer->queued--;
  if (update->announced) server->policy->over(server, update);
  peer->eager_used -= update->push.eager;
  if (update->push.eager > 0) peer->arena_tail = update->arena_at + update->push.eager;
  if (peer->queued == 0) peer->arena_head = peer->arena_tail = 0;
  mlfab__queue_give_back(server, update);
}

/* Reserves contiguous room for an update's eager bytes in the ring, whose size is twice the credit plus
 * rounding. */
static void apply_reserve(mlfab__server_peer *peer, mlfab__incoming *update) {
  uint32_t eager = update->push.eager;
  peer->eager_used += eager;
  if (eager == 0 || peer->arena_bytes == 0) return;
  uint64_t at = peer->arena_head % peer->arena_bytes;
  if (at + eager > peer->arena_bytes) peer->arena_head += peer->arena_bytes - at;
  update->arena_at = peer->arena_head;
  peer->arena_head += (eager + 7u) / 8 * 8; /* aligned for doubles */
  assert(peer->arena_head - peer->arena_tail <= peer->arena_bytes);
}

/* The effect of apply_versions: none; the update's slices begin a commit; they belong to the commit that has begun. */
enum { APPLY_ASKS, APPLY_COMMITS, APPLY_JOINS };

static int apply_versions(mlfab__server *server, const mlfab__incoming *update, int commit,
                          uint64_t *delay_p, uint64_t *version_p);

/* --- bytes into blocks --- */

/* The piece at the cursor: as much as lies in one block, one tensor and one segment. */
static void apply_piece_at(const mlfab__server *server, const mlfab__incoming *update,
                           uint64_t limit, mlfab__piece *piece) {
  const mlfab__segment *segment = &update->segments[update->segment];
  mlfab__store_piece(&server->store, segment->offset + update->in_segment,
                     mlfab__min(limit, segment->bytes - update->in_segment), piece);
}

static void apply_moved(mlfab__incoming *update, uint32_t bytes) {
  update->in_segment += bytes;
  update->consumed += bytes;
  if (update->in_segment == update->segments[update->segment].bytes) {
    update->segment++;
    update->in_segment = 0;
  }
}

static void apply_rewind(mlfab__incoming *update) {
  update->segment = 0;
  update->in_segment = update->consumed = 0;
}

/* Does the current segment cover the whole block of the piece? */
static int apply_covers(const mlfab__server *server, const mlfab__incoming *update,
                        const mlfab__piece *piece) {
  const mlfab__shard_slice *slice = &server->store.slices[piece->slice];
  uint64_t begin =
      slice->offset + (uint64_t)(piece->position - slice->first) * server->store.block_bytes;
  uint64_t end = begin + mlfab__store_block_bytes(&server->store, piece->slice, piece->position);
  const mlfab__segment *segment = &update->segments[update->segment];
  return segment->offset <= begin && end - segment->offset <= segment->bytes;
}

/* Is it better to add an update, all of which is here, in place? The cursor is at the start, and stays there. Depends on
 * nothing that the sender can still write: apply_begin_now and mlfab__apply_begin must get the same answer. */
static int apply_in_place(const mlfab__server *server, mlfab__incoming *update) {
  uint64_t bytes = update->push.bytes, copied = 0;
  uint32_t last = MLFAB__NO_BLOCK;
  if (update->received < bytes || bytes > APPLY_WHOLE_BYTES) return 0;
  if (bytes <= APPLY_LITTLE_BYTES || (update->push.flags & MLFAB__PUSH_PACKED)) return 1;
  /* Out of place they are read twice, too. */
  if (server->measures || mlfab__apply_steps(server, update)) return 1;
  while (update->consumed < bytes) {
    mlfab__piece piece;
    apply_piece_at(server, update, bytes - update->consumed, &piece);
    if (piece.position != last && !apply_covers(server, update, &piece))
      copied += mlfab__store_block_bytes(&server->store, piece.slice, piece.position);
    last = piece.position;
    apply_moved(update, piece.bytes);
  }
  apply_rewind(update);
  return copied > bytes;
}

/* Writes the next bytes of the head into `next` blocks. data NULL: a ghost. Errors: NOT_FINITE, MEMORY,
 * FRAME (an element is cut); the caller then refuses the head. */
static int apply_dense_consume(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                               uint64_t bytes) {
  mlfab__store *store = &server->store;
  enum mlfab__apply_mode mode = mlfab__apply_mode(server, update);
  double weight = mlfab__apply_weight(server, update, mode);
  /* Data that is read again soon should stay in the cache. */
  int stream = store->bytes >= APPLY_STREAM_BYTES && !server->watch;
  while (bytes > 0) {
    mlfab__piece piece;
    apply_piece_at(server, update, bytes, &piece);
    if (piece.count * mlfab__dtype_bytes(piece.dtype) != piece.bytes) return MLFAB_ERR_FRAME;
    uint32_t p = piece.position;
    uint32_t base = mode == MLFAB__APPLY_SUM ? store->sum[p] : store->w[p];
    if (store->next[p] == MLFAB__NO_BLOCK) {
      int code =
          mlfab__blocks_fresh(server, &store->next[p], base, !apply_covers(server, update, &piece));
      if (code) return code;
    }
    if (data) {
      uint8_t *dst = store->blocks[store->next[p]].data + piece.at;
      int adds =
          (mode == MLFAB__APPLY_SUM && base != MLFAB__NO_BLOCK) || mode == MLFAB__APPLY_DIRECT;
      const uint8_t *from = adds ? store->blocks[base].data + piece.at : NULL;
      int finite = mlfab__memory_add(store->memory, server->config->kernels, piece.dtype, dst, from,
                                     data, weight, piece.count, stream);
      if (!finite) return MLFAB_ERR_NOT_FINITE;
      if (server->measures)
        update->norm2 +=
            mlfab__kernel_norm2_by(server->config->kernels, piece.dtype, data, piece.count);
      /* the sender changed it meanwhile */
      if (update->norm2 != update->norm2) return MLFAB_ERR_NOT_FINITE;
      if (server->watch && mode == MLFAB__APPLY_DIRECT)
        server->sparse->piece(server, &piece, from, dst);
      data += piece.bytes;
    }
    bytes -= piece.bytes;
    apply_moved(update, piece.bytes);
  }
  return 0;
}

/* The update's next piece and its address: 1; 0 behind the last, with the cursor back at the start. */
static int apply_each(const mlfab__server *server, mlfab__incoming *update, const uint8_t **data_p,
                      mlfab__piece *piece) {
  if (update->consumed == update->push.bytes) {
    apply_rewind(update);
    return 0;
  }
  apply_piece_at(server, update, update->push.bytes - update->consumed, piece);
  *data_p += update->consumed;
  apply_moved(update, piece->bytes);
  return 1;
}

/* May the update be added in place? Sets *code_p if it is not finite. */
static int apply_whole_judge(mlfab__server *server, mlfab__incoming *update, const uint8_t *whole,
                             int *code_p) {
  mlfab__piece piece;
  double weight = mlfab__apply_weight(server, update, mlfab__apply_mode(server, update));
  *code_p = 0;
  /* A larger factor could make products infinite: only `consume` checks products. */
  if (!(weight >= -1.0 && weight <= 1.0)) return 0;
  for (const uint8_t *data = whole; apply_each(server, update, &data, &piece); data = whole) {
    if (!mlfab__kernel_finite(piece.dtype, data, piece.count)) {
      *code_p = MLFAB_ERR_NOT_FINITE;
      return 1;
    }
    if (server->measures)
      update->norm2 +=
          mlfab__kernel_norm2_by(server->config->kernels, piece.dtype, data, piece.count);
  }
  return 1;
}

/* Makes private copies of all blocks before anything changes: if memory runs out, the copies do no harm. */
static int apply_whole_own(mlfab__server *server, mlfab__incoming *update, const uint8_t *whole) {
  mlfab__piece piece;
  for (const uint8_t *data = whole; apply_each(server, update, &data, &piece); data = whole) {
    uint32_t *place = mlfab__apply_target(server, &piece);
    if (*place != MLFAB__NO_BLOCK && server->store.blocks[*place].refs == 1) continue;
    int code = mlfab__blocks_fresh(server, place, *place, 1);
    if (code) return code;
  }
  return 0;
}

static void apply_whole_add(mlfab__server *server, mlfab__incoming *update, const uint8_t *whole) {
  mlfab__store *store = &server->store;
  mlfab__piece piece;
  enum mlfab__apply_mode mode = mlfab__apply_mode(server, update);
  double weight = mlfab__apply_weight(server, update, mode);
  uint64_t delay = 0;
  if (mode == MLFAB__APPLY_STAGE) apply_versions(server, update, APPLY_ASKS, &delay, NULL);
  for (const uint8_t *data = whole; apply_each(server, update, &data, &piece); data = whole) {
    uint8_t *w = store->blocks[*mlfab__apply_target(server, &piece)].data + piece.at;
    int watch = server->watch && mode != MLFAB__APPLY_SUM;
    if (watch) memcpy(server->packed, w, piece.bytes);
    if (mode == MLFAB__APPLY_STAGE) {
      mlfab__optimizer_step step = {update->push.scale, store->slices[piece.slice].commit + 1,
                                    delay};
      if (store->holders) store->own(server->env, store, piece.position);
      uint8_t *s0 = store->s0 ? store->s0[piece.position] + piece.at : NULL;
      uint8_t *s1 = store->s1 ? store->s1[piece.position] + piece.at : NULL;
      mlfab__optimizer_apply(&server->optimizer, &step, piece.dtype, w, w, data, s0, s1,
                             piece.count);
    } else {
      mlfab__kernel_add_by(server->config->kernels, piece.dtype, w, w, data, weight, piece.count,
                           0);
    }
    if (watch) server->sparse->piece(server, &piece, server->packed, w);
  }
}

static int apply_dense_whole(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                             int *code_p) {
  if (!apply_whole_judge(server, update, data, code_p)) return 0;
  if (!*code_p) *code_p = apply_whole_own(server, update, data);
  if (!*code_p) apply_whole_add(server, update, data);
  return 1;
}

/* Dense: every touched position has a `next` block once all bytes are in. */
static const mlfab__apply_codec apply_dense = {
    NULL, apply_dense_consume, apply_dense_whole, NULL, NULL,
};

/* --- deciding --- */

/* Walks the slices that an update touches, in order, and computes the largest delay. `commit` 1 also moves
 * versions and commits on; 2 moves versions only (a further member of a group). Slices in rounds move with
 * their round; that their sum has changed is noted, too. If the update has one version for all slices, it is the largest of them: a slice that is
 * behind it counts with its present version. Returns 0, or ARGUMENT when there are too few versions. */
static int apply_versions(mlfab__server *server, const mlfab__incoming *update, int commit,
                          uint64_t *delay_p, uint64_t *version_p) {
  uint64_t delay = 0, version = 0;
  uint32_t seen = 0, next = 0;
  for (uint32_t k = 0; k < update->push.segments; k++) {
    uint32_t last, i = mlfab__queue_touched(server, update, k, &last);
    for (i = i < next ? next : i; i <= last; i++, seen++) {
      mlfab__shard_slice *slice = &server->store.slices[i];
      uint32_t at = update->push.versions == 1 ? 0 : seen;
      if (at >= update->push.versions) return MLFAB_ERR_ARGUMENT;
      uint64_t base = mlfab__min(update->versions[at], slice->version);
      if (!server->rounds) {
        delay = mlfab__max(delay, slice->version - base);
        if (commit) slice->version += update->push.members;
        if (commit == APPLY_COMMITS) slice->commit++;
      }
      version = mlfab__max(version, slice->version);
      if (commit) mlfab__store_change(&server->store, i);
    }
    next = last + 1;
  }
  if (delay_p) *delay_p = delay;
  if (version_p) *version_p = version;
  return 0;
}

static void apply_ack(mlfab__server *server, uint32_t worker, const mlfab__push *push, int code,
                      uint64_t version, uint64_t delay, uint64_t pushed) {
  const mlfab__server_peer *peer = &server->peers[worker];
  mlfab__push_ack ack = {push->seq, push->members, peer->generation, code, version, delay, pushed};
  if (server->keeper && server->keeper->defers(server, worker, push->flags, &ack)) return;
  MLFAB__POST(&server->port, worker, MLFAB__PUSH_ACK, push_ack, &ack);
}

/* Answers a repetition of a decided update. */
static void apply_known(mlfab__server *server, uint32_t worker, const mlfab__push *push) {
  const mlfab__window *window = &server->windows.windows[worker];
  enum mlfab__decision known = mlfab__windows_ask(window, push->seq, push->members);
  int code = known == MLFAB__APPLIED   ? 0
             : known == MLFAB__DROPPED ? MLFAB_ERR_DROPPED
                                       : MLFAB_ERR_WITHDRAWN;
  server->stats->updates_repeated += push->members;
  /* Later updates may be decided, too. The worker is told so by their own answers. */
  uint64_t then = push->progress + !(push->flags & MLFAB__PUSH_MORE);
  apply_ack(server, worker, push, code, 0, 0, mlfab__min(then, server->peers[worker].pushed));
}

MLFAB__INTERNAL void mlfab__apply_decide(mlfab__server *server, mlfab__incoming *update, int code,
                                         uint64_t version, uint64_t delay) {
  uint32_t worker = update->worker;
  mlfab__push *push = &update->push;
  int init = (push->flags & MLFAB__PUSH_INIT) != 0;
  mlfab__windows_decide(&server->windows.windows[worker], push->seq, push->members, code);
  if (!init) mlfab__clock_decided(server, update, code);
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
  apply_ack(server, worker, push, code, version, delay, server->peers[worker].pushed);
  apply_remove(server, update);
}

/* Refuses the head, with all members if it is a group. */
static void apply_refuse(mlfab__server *server, mlfab__incoming *update, int code) {
  if (update->group && code == MLFAB_ERR_NOT_FINITE) {
    /* The sum overflowed: each member is then checked alone. */
    server->policy->split(server, update, NULL, 1);
    return;
  }
  if (update->group) server->policy->end(server, update, 0);
  mlfab__incoming *next;
  for (; update; update = next) {
    next = mlfab__queue_member(update);
    mlfab__apply_decide(server, update, code, 0, 0);
  }
}

/* The worker withdraws it: it leaves its group. Returns 1 when it is too late. */
static int apply_recall(mlfab__server *server, mlfab__incoming *update) {
  if (mlfab__queue_applying(server, update)) return 1;
  if (update->group) {
    update->withdrawn = 1;
    server->policy->split(server, update, update, 0);
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__apply_tell_dropped(mlfab__server *server) {
  mlfab__incoming *next;
  for (mlfab__incoming *update = server->queue.first; update && server->queue.ndropped > 0;
       update = next) {
    next = update->next;
    if (update->refused != MLFAB_ERR_DROPPED || update == server->apply.head) continue;
    const mlfab__incoming *earlier = server->queue.first;
    while (earlier->worker != update->worker) earlier = earlier->next;
    if (earlier == update) mlfab__apply_decide(server, update, MLFAB_ERR_DROPPED, 0, update->delay);
  }
}

/* Swaps the `next` blocks into the model, or into the sum of their round. */
static void apply_swap(mlfab__server *server, int init) {
  mlfab__store *store = &server->store;
  uint32_t *place = init || !server->rounds ? store->w : store->sum;
  for (uint32_t i = 0; i < store->nslices; i++) {
    const mlfab__shard_slice *s = &store->slices[i];
    for (uint32_t p = s->first; p < s->first + s->count; p++) {
      if (store->next[p] == MLFAB__NO_BLOCK) continue;
      mlfab__store_put(store, &place[p], store->next[p]);
      store->next[p] = MLFAB__NO_BLOCK;
    }
  }
}

/* The commit of an update that is applied at once. */
static mlfab__commit apply_commit_of(const mlfab__server *server, const mlfab__incoming *update) {
  uint64_t bytes = 0;
  for (uint32_t k = 0; k < update->push.segments; k++) bytes += update->segments[k].bytes;
  return (mlfab__commit){update->norm2, apply_scale(server, update), bytes,
                         bytes < server->store.bytes};
}

/* An update, or all members of a group, are in the model or in the round's sum: one commit; versions
 * move if they were applied. */
static void apply_commit(mlfab__server *server, mlfab__incoming *update) {
  uint64_t group = update->group;
  int commit = APPLY_COMMITS;
  if (!server->rounds) {
    server->stats->commits++;
    const mlfab__commit applied = apply_commit_of(server, update);
    if (server->keeper) server->keeper->committed(server, &applied);
  } else if (server->clock.round_members == 0) {
    server->clock.round_scale = update->push.scale; /* of the sum */
  }
  if (group) server->policy->end(server, update, 1);
  for (mlfab__incoming *next; update; update = next) {
    uint64_t delay = 0, version = 0;
    next = mlfab__queue_member(update);
    apply_versions(server, update, commit, &delay, &version);
    mlfab__apply_decide(server, update, 0, server->rounds ? server->clock.v_train : version, delay);
    commit = APPLY_JOINS;
  }
}

/* All bytes of the head are in `next`, and it may be applied. */
static void apply_admitted(mlfab__server *server, mlfab__incoming *update) {
  if (mlfab__apply_steps(server, update)) {
    server->apply.applying = MLFAB__APPLY_UPDATE;
    server->apply.code = 0;
    apply_rewind(update);
    return;
  }
  int init = (update->push.flags & MLFAB__PUSH_INIT) != 0;
  apply_swap(server, init);
  if (!init) {
    apply_commit(server, update);
    return;
  }
  for (uint32_t i = 0; i < server->store.nslices; i++) mlfab__store_change(&server->store, i);
  mlfab__apply_decide(server, update, 0, 0, 0);
  server->phase = MLFAB__MODEL_STANDS;
  server->first_weights_incarnation = server->peers[0].incarnation;
  server->greets = 1;
}

MLFAB__INTERNAL int mlfab__apply_held(mlfab__server *server) {
  mlfab__incoming *update = server->apply.head;
  int asks = server->keeper && !server->rounds && !(update->push.flags & MLFAB__PUSH_INIT);
  const mlfab__commit commit = apply_commit_of(server, update);
  server->apply.applying = MLFAB__APPLY_HELD;
  if (asks && !server->keeper->may(server, &commit)) return 0;
  server->apply.applying = MLFAB__APPLY_NONE;
  apply_admitted(server, update);
  return 1;
}

/* All bytes of the head are in `next`. */
static void apply_complete(mlfab__server *server, mlfab__incoming *update) {
  if (update->codec->complete && update->codec->complete(server, update)) {
    apply_refuse(server, update, MLFAB_ERR_MEMORY);
  } else {
    mlfab__apply_held(server);
  }
}

/* --- applying, block by block --- */

static int apply_callback(mlfab__server *server, const mlfab_update_info *info,
                          const mlfab__piece *piece, uint8_t *dst, const uint8_t *w,
                          const uint8_t *sum) {
  if (sum == dst) {
    memcpy(server->apply.scratch, sum, piece->bytes);
    sum = server->apply.scratch;
  }
  memcpy(dst, w, piece->bytes);
  return server->config->on_update(server->config->user, info, piece->tensor->id, piece->dtype,
                                   piece->first, piece->count, dst, sum);
}

MLFAB__INTERNAL int mlfab__apply_piece(mlfab__server *server, const mlfab_update_info *info,
                                       const mlfab__piece *piece, const uint8_t *sum) {
  mlfab__store *store = &server->store;
  uint32_t p = piece->position;
  uint8_t *dst = store->blocks[store->next[p]].data + piece->at;
  const uint8_t *w = store->blocks[store->w[p]].data + piece->at;
  if (server->config->on_update) {
    if (apply_callback(server, info, piece, dst, w, sum)) return MLFAB_ERR_CALLBACK;
  } else {
    mlfab__optimizer_step step = {info->scale, store->slices[piece->slice].commit + 1, info->delay};
    if (store->holders) store->own(server->env, store, p);
    mlfab__memory_step(store->memory, &server->optimizer, &step, piece->dtype, dst, w, sum,
                       store->s0 ? store->s0[p] + piece->at : NULL,
                       store->s1 ? store->s1[p] + piece->at : NULL, piece->count);
  }
  if (server->watch) server->sparse->piece(server, piece, w, dst);
  return 0;
}

static void apply_info(const mlfab__server *server, const mlfab__incoming *update, uint64_t delay,
                       mlfab_update_info *info) {
  memset(info, 0, sizeof *info);
  info->worker = update->worker;
  info->incarnation = server->peers[update->worker].incarnation;
  info->seq = update->push.seq;
  info->members = update->push.members;
  for (const mlfab__incoming *u = update->next; update->group && u && u->group == update->group;
       u = u->next) {
    uint64_t later = 0;
    apply_versions((mlfab__server *)(uintptr_t)server, u, APPLY_ASKS, &later, NULL);
    delay = mlfab__max(delay, later + info->members);
    info->members += u->push.members;
  }
  info->server = server->number;
  info->delay = delay;
  if (update->push.segments > 0) {
    uint32_t last, slice = mlfab__queue_touched(server, update, 0, &last);
    info->version = server->store.slices[slice].version;
    info->commit = server->store.slices[slice].commit;
  }
  info->iteration = update->push.progress;
  info->scale = apply_scale(server, update);
  info->norm = update->group ? 0.0 : update->push.norm;
}

MLFAB__INTERNAL int mlfab__apply_go_on(mlfab__server *server, uint64_t budget) {
  mlfab__incoming *update = server->apply.head;
  const uint32_t *next = server->store.next;
  mlfab_update_info info;
  uint64_t delay = 0;
  apply_versions(server, update, APPLY_ASKS, &delay, NULL);
  apply_info(server, update, delay, &info);
  while (update->segment < update->push.segments && budget > 0 && !server->apply.code) {
    mlfab__piece piece;
    apply_piece_at(server, update, UINT64_MAX, &piece);
    if (!server->store.ghost) {
      if (next[piece.position] == MLFAB__NO_BLOCK)
        server->apply.code = update->codec->fresh(server, update, piece.slice, piece.position);
      if (server->apply.code) break;
      const uint8_t *u = server->store.blocks[next[piece.position]].data + piece.at;
      server->apply.code = mlfab__apply_piece(server, &info, &piece, u);
    }
    apply_moved(update, piece.bytes);
    budget -= mlfab__min(budget, piece.bytes);
  }
  if (update->segment < update->push.segments && !server->apply.code) return 0;
  server->apply.applying = MLFAB__APPLY_NONE;
  if (server->apply.code) {
    apply_refuse(server, update, server->apply.code);
  } else {
    apply_swap(server, 0);
    apply_commit(server, update);
  }
  return 1;
}

/* --- heads --- */

MLFAB__INTERNAL mlfab__incoming *mlfab__apply_eligible_from(const mlfab__server *server,
                                                            mlfab__incoming *update) {
  while (update && !mlfab__queue_eligible(server, update)) update = update->next;
  return update;
}

static void apply_grant(mlfab__server *server, mlfab__incoming *update, uint64_t upto) {
  if (update->group) {
    server->policy->grant(server, update, upto);
    return;
  }
  if (upto <= update->granted) return;
  update->granted = upto;
  mlfab__grant grant = {update->push.seq, upto, server->peers[update->worker].generation};
  MLFAB__POST(&server->port, update->worker, MLFAB__GRANT, grant, &grant);
}

/* Index of a free stage, or MLFAB__SERVER_STAGES. Only planned transfers use more than the first: they may
 * arrive at the same time over links of very different speed. */
static uint32_t apply_free_stage(mlfab__server *server) {
  uint64_t fit = APPLY_STAGES_BYTES / mlfab__max(server->apply.stage_bytes, 1);
  uint32_t n = server->scheduled ? MLFAB__SERVER_STAGES : 1;
  if (!server->store.ghost && n > 1 && fit < n) n = (uint32_t)mlfab__max(fit, 2);
  for (uint32_t i = 0; i < n; i++) {
    if (server->apply.stage_owner[i]) continue;
    if (!server->apply.stages[i] && !server->store.ghost)
      server->apply.stages[i] = mlfab__alloc(server->env, server->apply.stage_bytes);
    if (server->apply.stages[i] || server->store.ghost) return i;
  }
  return MLFAB__SERVER_STAGES;
}

/* The next update in the queue that may not send yet. Group members other than the first are skipped. */
static mlfab__incoming *apply_unreleased(mlfab__server *server) {
  mlfab__incoming *update = mlfab__apply_eligible_from(server, server->queue.first);
  while (update && (update == server->apply.head || update->granted == update->push.bytes ||
                    update->granted > update->push.eager || update->refused ||
                    mlfab__queue_follows(update))) {
    update = mlfab__apply_eligible_from(server, update->next);
  }
  return update;
}

/* Lets the next update send when the updates before it leave the in-link idle: shortly before they end, or
 * when they come more slowly than the link carries. Staged bytes cost one more copy. */
MLFAB__INTERNAL void mlfab__apply_release(mlfab__server *server) {
  const mlfab__incoming *head = server->apply.head;
  uint64_t coming = 0, little = 2 * (uint64_t)server->config->chunk_bytes;
  if (server->apply.stage_bytes == 0 || !head) return;
  /* Without a scheduler there is one stage. While an update owns it, nothing can be released. */
  if (!server->scheduled && server->apply.stage_owner[0]) return;
  int ends = head->push.bytes - head->received <= little;
  int idle = server->scheduled && server->policy->idle(server);
  if (!ends && !idle) return;
  mlfab__incoming *update = apply_unreleased(server);
  /* Without a scheduler, updates behind the one to be released send only eager bytes. */
  const mlfab__incoming *end = server->scheduled || !update ? NULL : update->next;
  if (!update && !server->scheduled) return;
  for (const mlfab__incoming *u = server->queue.first; u != end && !idle; u = u->next)
    coming += mlfab__max(u->granted, u->received) - u->received;
  if (coming > little) return;
  if (server->scheduled) server->policy->let(server);
  if (!update) return;
  uint32_t stage = apply_free_stage(server);
  if (stage == MLFAB__SERVER_STAGES) return;
  update->stage = stage + 1;
  server->apply.stage_owner[stage] = update;
  apply_grant(server, update,
              mlfab__min(update->push.bytes, update->push.eager + server->apply.stage_bytes));
}

static const uint8_t *apply_staged(const mlfab__server *server, const mlfab__incoming *update,
                                   uint64_t at) {
  const mlfab__server_peer *peer = &server->peers[update->worker];
  if (server->store.ghost) return NULL;
  if (at < update->push.eager) return peer->arena + update->arena_at % peer->arena_bytes + at;
  /* An empty update has neither arena nor stage; the pointer must only be valid to compute. */
  return server->apply.stages[update->stage ? update->stage - 1 : 0] + (at - update->push.eager);
}

/* Consumes the staged bytes of the head. */
static int apply_unstage(mlfab__server *server, mlfab__incoming *update) {
  int code = 0;
  while (update->consumed < update->received && !code) {
    uint64_t at = update->consumed;
    uint64_t end = at < update->push.eager ? mlfab__min(update->push.eager, update->received)
                                           : update->received;
    code = update->codec->consume(server, update, apply_staged(server, update, at), end - at);
  }
  return code;
}

/* Checks that every member is still undecided and within the bound. Otherwise returns what is wrong (1: it
 * was decided already), and which member. */
static int apply_judge(mlfab__server *server, mlfab__incoming *update,
                       mlfab__incoming **culprit_p) {
  uint64_t group = update->group, ahead = 0;
  for (; update; update = update->next) {
    if (group && update->group != group) return 0;
    *culprit_p = update;
    const mlfab__window *window = &server->windows.windows[update->worker];
    enum mlfab__decision known = mlfab__windows_ask(window, update->push.seq, update->push.members);
    if (known != MLFAB__UNDECIDED) return 1;
    int code = update->withdrawn ? MLFAB_ERR_WITHDRAWN : update->refused;
    uint64_t delay = 0;
    int stands = server->phase == MLFAB__MODEL_STANDS && !(update->push.flags & MLFAB__PUSH_INIT);
    if (!code && stands) code = apply_versions(server, update, APPLY_ASKS, &delay, NULL);
    if (!code) code = mlfab__queue_late(server, update, delay + ahead);
    if (!code && stands && mlfab__clock_late(server, update->worker)) code = MLFAB_ERR_DROPPED;
    if (code) return code;
    ahead += update->push.members;
    if (!group) return 0;
  }
  return 0;
}

/* Is the update refused at its turn? */
static int apply_turn_away(mlfab__server *server, mlfab__incoming *update) {
  mlfab__incoming *culprit = NULL;
  int code = apply_judge(server, update, &culprit);
  if (!code) return 0;
  if (update->group) {
    if (code < 0) culprit->refused = code;
    if (code == MLFAB_ERR_DROPPED) server->queue.ndropped++;
    server->policy->split(server, update, culprit, 0);
  } else if (code > 0) {
    /* decided while its repetition waited */
    apply_known(server, update->worker, &update->push);
    apply_remove(server, update);
  } else {
    mlfab__apply_decide(server, update, code, 0, update->delay);
  }
  return 1;
}

/* Takes in the bytes that are here: `data`, or the staged bytes. */
static int apply_here(mlfab__server *server, mlfab__incoming *update, const uint8_t *data) {
  return data ? update->codec->consume(server, update, data, update->received)
              : apply_unstage(server, update);
}

MLFAB__INTERNAL void mlfab__apply_begin(mlfab__server *server, mlfab__incoming *update,
                                        const uint8_t *data) {
  uint64_t bytes = update->push.bytes;
  int code = 0;
  if (update->group && server->policy->strays(server, update)) return;
  server->apply.head = update;
  update->last_byte_ns = server->now_ns;
  if (apply_turn_away(server, update)) return;
  if (!data && update->received == bytes && bytes == update->push.eager)
    data = apply_staged(server, update, 0);
  update->norm2 = 0.0; /* it may have been the head before */
  int whole = data && !(update->push.flags & MLFAB__PUSH_INIT) && !server->config->on_update &&
              !server->keeper && !server->store.memory && apply_in_place(server, update);
  if (whole && update->codec->whole(server, update, data, &code)) {
    if (!code) {
      apply_commit(server, update);
      return;
    }
  } else {
    code = apply_here(server, update, data);
  }
  if (code) {
    apply_refuse(server, update, code);
    return;
  }
  mlfab__queue_leave_stage(server, update);
  if (update->consumed == bytes) {
    apply_complete(server, update);
  } else {
    apply_grant(server, update, bytes);
  }
}

/* --- frames --- */

/* Bytes for a ghost model, or no bytes for a real one. */
static int apply_strange(const mlfab__server *server, const mlfab__frame_in *frame) {
  return frame->bulk_bytes > 0 && (frame->bulk == NULL) != (server->store.ghost != 0);
}

/* Checks an announcement against model and credit. Returns a text if it breaks the protocol. */
static const char *apply_check(const mlfab__server *server, uint32_t worker,
                               const mlfab__push *push, const mlfab__frame_in *frame) {
  const mlfab__server_peer *peer = &server->peers[worker];
  if (server->phase == MLFAB__NO_MODEL) return "a push before the model exists";
  if ((push->flags & MLFAB__PUSH_INIT) && worker != 0)
    return "first weights from another worker than 0";
  uint32_t known = MLFAB__PUSH_MORE | MLFAB__PUSH_INIT | MLFAB__PUSH_PLANNED |
                   (server->sparse ? MLFAB__PUSH_PACKED : 0u) |
                   (server->keeper ? MLFAB__PUSH_DURABLE : 0u);
  if (push->flags & ~known) return "unknown flags in a push";
  if ((push->flags & MLFAB__PUSH_PACKED) &&
      ((push->flags & MLFAB__PUSH_INIT) || server->store.ghost))
    return "packets for first weights, or for ghosts";
  if ((push->flags & MLFAB__PUSH_PLANNED) &&
      (!server->scheduled || push->eager > 0 || (push->flags & MLFAB__PUSH_INIT)))
    return "a push to be planned, with bytes or without a scheduler";
  if (peer->queued >= MLFAB__SERVER_QUEUED) return "more updates in flight than allowed";
  if (push->eager > server->eager_bytes || peer->eager_used > server->eager_bytes - push->eager)
    return "more eager bytes than its credit";
  if (push->eager > 0 && peer->arena_bytes == 0 && !server->store.ghost)
    return "eager bytes without credit";
  if (frame->bulk_bytes > push->eager) return "more bytes than granted";
  if (apply_strange(server, frame)) return "ghosts for a model with bytes, or bytes for ghosts";
  if (peer->queued > 0 && push->seq <= peer->last_queued) return "an update number that went back";
  if (peer->queued > 0 && push->progress < peer->last_progress &&
      mlfab__sync_counts(server->clock.sync.kind))
    return "a progress that went back";
  if (push->progress > MLFAB__PROGRESS_MAX) return "a progress that cannot be";
  for (uint32_t i = 0; i < push->segments; i++) {
    if (!mlfab__layout_valid(&server->layout, server->number, &server->lists->segments[i]))
      return "a stretch that is not of this server's slices";
  }
  return NULL;
}

/* Checks received packets, of which the first is byte `at` of the update, and copies them to private
 * memory. 0 when they are wrong: the server drops the link to `peer`. */
static int apply_look(mlfab__server *server, uint32_t peer, mlfab__incoming *update, uint64_t at,
                      mlfab__frame_in *frame) {
  const char *wrong = update->codec->look(server, update, at, frame);
  if (wrong) mlfab__server_drop(server, peer, MLFAB_ERR_FRAME, wrong);
  return !wrong;
}

/* Begins an update whose turn it already is, with the bytes of its announcement. */
static void apply_begin_now(mlfab__server *server, mlfab__incoming *update,
                            const mlfab__frame_in *frame) {
  const uint8_t *data = frame->bulk_bytes > 0 ? frame->bulk : NULL;
  if (data && update->codec == &apply_dense && apply_in_place(server, update)) {
    memcpy((uint8_t *)(uintptr_t)apply_staged(server, update, 0), data, frame->bulk_bytes);
    data = NULL; /* mlfab__apply_begin finds it staged */
  }
  mlfab__apply_begin(server, update, data);
}

MLFAB__INTERNAL void mlfab__apply_push(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame) {
  mlfab__server_peer *peer = &server->peers[worker];
  mlfab__frame_in own = *frame;
  mlfab__push push;
  if (mlfab__port_refuse(&server->port, worker, frame,
                         mlfab__decode_push(frame->meta, frame->meta_bytes, &push,
                                            server->lists->segments, server->lists->versions) ||
                             push.seq == 0))
    return;
  if (push.generation != peer->generation) return; /* of a stream that was reset since */
  /* First weights of a refused model, sent before the refusal arrived: ignored. */
  if (worker == 0 && (push.flags & MLFAB__PUSH_INIT) && server->phase == MLFAB__NO_MODEL) return;
  const mlfab__window *window = &server->windows.windows[worker];
  enum mlfab__decision known = mlfab__windows_ask(window, push.seq, push.members);
  /* A repetition of a decided update. First weights of worker 0 count as one when the model already stands. */
  if (known == MLFAB__UNDECIDED && worker == 0 && (push.flags & MLFAB__PUSH_INIT) &&
      server->phase == MLFAB__MODEL_STANDS) {
    if (peer->queued == 0)
      mlfab__windows_decide(&server->windows.windows[worker], push.seq, push.members, 0);
    known = MLFAB__APPLIED;
  }
  if (known != MLFAB__UNDECIDED) {
    apply_known(server, worker, &push);
    return;
  }
  const char *wrong = apply_check(server, worker, &push, frame);
  if (wrong) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, wrong);
    return;
  }
  /* A worker asks to be counted before it pushes (clock.c). This server would not count the updates of one that did
   * not. */
  if (peer->guest && server->phase == MLFAB__MODEL_STANDS) mlfab__clock_enter(server, worker, 0, 0);
  mlfab__incoming *update = mlfab__queue_take(server, &push);
  if (!update || ((push.flags & MLFAB__PUSH_PACKED) && server->sparse->room(server))) {
    if (update) mlfab__queue_give_back(server, update);
    mlfab__server_drop(server, worker, MLFAB_ERR_MEMORY, "out of memory for an update");
    return;
  }
  update->codec = push.flags & MLFAB__PUSH_PACKED ? server->sparse->packed() : &apply_dense;
  if (update->codec->look && !apply_look(server, worker, update, 0, &own)) {
    mlfab__queue_give_back(server, update);
    return;
  }
  /* No earlier update of this worker is undecided here. */
  if (peer->queued == 0 && !(push.flags & MLFAB__PUSH_INIT))
    mlfab__clock_reach(server, worker, push.progress);
  update->worker = worker;
  update->granted = push.eager;
  update->received = frame->bulk_bytes;
  update->last_byte_ns = server->now_ns;
  peer->queued++;
  peer->last_queued = push.seq + push.members - 1;
  peer->last_progress = push.progress;
  apply_reserve(peer, update);
  mlfab__queue_new(server, update);
  int at_once = !update->unplaced && !update->refused && !server->apply.head &&
                server->apply.applying == MLFAB__APPLY_NONE && server->queue.first == update &&
                mlfab__queue_eligible(server, update);
  if (at_once && (own.bulk || own.bulk_bytes == 0)) {
    apply_begin_now(server, update, &own);
  } else if (own.bulk) {
    uint8_t *to = peer->arena + update->arena_at % peer->arena_bytes;
    memcpy(to, own.bulk, own.bulk_bytes);
  }
  server->due = 1;
}

MLFAB__INTERNAL void mlfab__apply_bytes(mlfab__server *server, uint32_t peer,
                                        mlfab__incoming *update, uint64_t offset,
                                        const mlfab__frame_in *frame) {
  if (offset != update->received || frame->bulk_bytes > update->granted - update->received ||
      apply_strange(server, frame)) {
    mlfab__server_drop(server, peer, MLFAB_ERR_FRAME, "a chunk out of place or not granted");
    return;
  }
  mlfab__frame_in own = *frame;
  if (update->codec->look && !apply_look(server, peer, update, offset, &own)) return;
  update->last_byte_ns = server->now_ns;
  int direct = update == server->apply.head && update->consumed == update->received &&
               server->apply.applying == MLFAB__APPLY_NONE;
  uint64_t at = update->received;
  update->received += frame->bulk_bytes;
  if (server->scheduled) server->policy->came(server, frame->bulk_bytes);
  if (!direct) {
    /* A chunk may begin in the arena and end in the stage. */
    uint64_t eager =
        at < update->push.eager ? mlfab__min(update->push.eager - at, frame->bulk_bytes) : 0;
    const uint8_t *bulk = own.bulk;
    if (eager > 0 && bulk)
      memcpy((uint8_t *)(uintptr_t)apply_staged(server, update, at), bulk, eager);
    if (frame->bulk_bytes > eager && bulk) {
      memcpy(server->apply.stages[update->stage - 1] + (at + eager - update->push.eager),
             bulk + eager, frame->bulk_bytes - eager);
    }
    mlfab__apply_release(server);
    return;
  }
  int code = update->codec->consume(server, update, own.bulk, own.bulk_bytes);
  if (code) {
    apply_refuse(server, update, code);
  } else if (update->consumed == update->push.bytes) {
    apply_complete(server, update);
  } else if (server->policy) {
    server->policy->progress(server, update);
  }
  server->due = 1;
}

MLFAB__INTERNAL void mlfab__apply_chunk(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame) {
  mlfab__chunk chunk;
  if (MLFAB__MALFORMED(&server->port, worker, frame, chunk, &chunk)) return;
  if (chunk.generation != server->peers[worker].generation) return;
  mlfab__incoming *update = mlfab__queue_find(server, worker, chunk.seq);
  if (!update) return;       /* refused or withdrawn meanwhile */
  if (update->group) return; /* it comes through an aggregator now */
  /* Dropped or withdrawn before its turn: chunks that were already sent are ignored. */
  if (update->refused || update->withdrawn) return;
  mlfab__apply_bytes(server, worker, update, chunk.offset, frame);
}

MLFAB__INTERNAL void mlfab__apply_withdraw(mlfab__server *server, uint32_t worker,
                                           const mlfab__frame_in *frame) {
  mlfab__withdraw withdraw;
  if (MLFAB__MALFORMED(&server->port, worker, frame, withdraw, &withdraw)) return;
  if (withdraw.generation != server->peers[worker].generation) return;
  mlfab__incoming *update = mlfab__queue_find(server, worker, withdraw.seq);
  if (!update) { /* decided: its PUSH_ACK is on the way, or waits */
    if (server->keeper) server->keeper->withdrawn(server, worker, withdraw.seq);
    return;
  }
  if (apply_recall(server, update)) { /* too late: the update will be acknowledged */
    update->push.flags &= ~(uint32_t)MLFAB__PUSH_DURABLE;
    return;
  }
  if (update == server->apply.head) {
    mlfab__apply_decide(server, update, MLFAB_ERR_WITHDRAWN, 0, 0);
  } else {
    update->withdrawn = 1;
    server->queue.place_due = 1;
    /* It keeps its place in the queue, so that the worker's order holds; no more bytes will come. */
    update->received = update->granted = update->push.bytes;
  }
  server->due = 1;
}

MLFAB__INTERNAL void mlfab__apply_finish(mlfab__server *server, uint32_t worker) {
  if (server->apply.applying != MLFAB__APPLY_UPDATE) return;
  const mlfab__incoming *update = server->apply.head;
  while (update && update->worker != worker) update = mlfab__queue_member(update);
  if (update) mlfab__apply_go_on(server, MLFAB__NEVER);
}

/* The first update of a worker that is not being applied. One that is being applied has all its bytes and
 * will be decided. */
static mlfab__incoming *apply_first_of(const mlfab__server *server, uint32_t worker) {
  mlfab__incoming *update = server->queue.first;
  while (update && (update->worker != worker || mlfab__queue_applying(server, update)))
    update = update->next;
  if (update) return update;
  update = server->queue.unplaced_first;
  while (update && update->worker != worker) update = update->next;
  return update;
}

MLFAB__INTERNAL void mlfab__apply_reset(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  mlfab__incoming *update;
  while ((update = apply_first_of(server, worker)) != NULL) {
    if (update->group) server->policy->split(server, update, update, 0);
    apply_remove(server, update);
  }
  peer->generation++;
  peer->last_queued = 0;
}

MLFAB__INTERNAL void mlfab__apply_tick(mlfab__server *server) {
  mlfab__incoming *head = server->apply.head;
  if (head && head->group && server->apply.applying == MLFAB__APPLY_NONE) {
    /* The aggregator names a silent member after 3 heartbeats; 5 mean that the aggregator itself is silent. */
    if (mlfab__port_stalled(&server->port, head->aggregator, 1, head->last_byte_ns, server->now_ns,
                            5 * server->heartbeat_ns,
                            MLFAB__PORT_STANDS_BEATS * server->heartbeat_ns))
      server->policy->split(server, head, NULL, 1);
  } else if (head && server->apply.applying == MLFAB__APPLY_NONE &&
             mlfab__port_stalled(&server->port, head->worker, 0, head->last_byte_ns, server->now_ns,
                                 3 * server->heartbeat_ns, server->config->silent_death_ns)) {
    uint32_t worker = head->worker;
    server->stats->transfers_revoked++;
    mlfab__apply_reset(server, worker);
    const mlfab__window *window = mlfab__server_window(server, worker);
    mlfab__resend resend;
    resend.generation = server->peers[worker].generation;
    resend.top = window->top;
    memcpy(resend.applied, window->applied, sizeof resend.applied);
    memcpy(resend.dropped, window->dropped, sizeof resend.dropped);
    MLFAB__POST(&server->port, worker, MLFAB__RESEND, resend, &resend);
  }
}

MLFAB__INTERNAL uint64_t mlfab__apply_deadline(const mlfab__server *server) {
  if (server->apply.applying == MLFAB__APPLY_HELD) return MLFAB__NEVER;
  if (server->apply.applying != MLFAB__APPLY_NONE) return 0;
  if (!server->apply.head) return MLFAB__NEVER;
  const mlfab__incoming *head = server->apply.head;
  uint64_t beat = server->heartbeat_ns;
  uint64_t deadline = mlfab__port_stalls_at(
      head->last_byte_ns, server->now_ns, (head->group ? 5 : 3) * beat,
      head->group ? MLFAB__PORT_STANDS_BEATS * beat : server->config->silent_death_ns);
  int more = server->scheduled && server->queue.last != server->apply.head;
  return more ? mlfab__min(deadline, server->policy->idle_at(server)) : deadline;
}

MLFAB__INTERNAL void mlfab__apply_free(mlfab__server *server) {
  while (server->queue.first) apply_remove(server, server->queue.first);
  while (server->queue.unplaced_first) apply_remove(server, server->queue.unplaced_first);
  while (server->queue.free_list) {
    mlfab__incoming *update = server->queue.free_list;
    server->queue.free_list = update->next;
    mlfab__free(server->env, update->segments, update->segment_room * sizeof *update->segments);
    mlfab__free(server->env, update->versions, update->version_room * sizeof *update->versions);
    mlfab__free(server->env, update, sizeof *update);
  }
}
