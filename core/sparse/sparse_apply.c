/* sparse_apply.c - the server role: decodes packets in updates, and adds them to blocks. See server.h and packet.h.
 *
 * It is the codec of packets in updates. Queue, credit and commits are elsewhere, and do not depend on the form of the
 * bytes.
 *
 * Packets are copied to private memory and checked on arrival, so staged bytes are valid and stay so; only values may
 * still be infinite or NaN. An element that no packet names is zero: it is not added, and optimizers step it like any
 * zero. The result equals that of a dense update with the same values, except for the sign of zeros.
 *
 * A packet lies in one slice, but may span several blocks. Then its runs are added one by one or, if there are many,
 * like a dense packet. */
#include "sparse_apply.h"

#include "../kernels/kernels.h"

/* Runs are processed singly if at most one element of this many is kept. */
enum { SPARSE_APPLY_SPARSE = 256 };

MLFAB__INTERNAL int mlfab__sparse_apply_room(mlfab__server *server) {
  if (!server->packed) server->packed = mlfab__alloc_aligned(server->env, MLFAB__SPARSE_APPLY_ROOM);
  return server->packed ? mlfab__packet_room(server->env, &server->came) : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__sparse_apply_free(mlfab__server *server) {
  mlfab__free_aligned(server->env, server->packed, MLFAB__SPARSE_APPLY_ROOM);
  mlfab__free_aligned(server->env, server->came, MLFAB__PACKET_ROOM);
  server->packed = server->came = NULL;
}

/* --- checking received packets --- */

/* Returns the first segment that ends behind this offset, or push.segments. */
static uint32_t sparse_apply_segment(const mlfab__incoming *update, uint64_t offset) {
  uint32_t low = 0, high = update->push.segments;
  MLFAB__SEARCH(low, high, at, update->segments[at].offset + update->segments[at].bytes <= offset)
  return low;
}

static const char *sparse_apply_check_place(const mlfab__server *server,
                                            const mlfab__incoming *update,
                                            const mlfab__packet *packet) {
  uint32_t width = mlfab__dtype_bytes(packet->dtype);
  uint64_t begin = packet->offset, end = begin + (uint64_t)packet->elements * width;
  if (begin < update->packed_end) return "packets out of order, or overlapping";
  uint32_t k = sparse_apply_segment(update, begin);
  if (k == update->push.segments || begin < update->segments[k].offset ||
      end - update->segments[k].offset > update->segments[k].bytes)
    return "a packet outside the stretches that were announced";
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(&server->layout, begin);
  if (packet->dtype != tensor->dtype) return "a packet of another type than its tensor";
  if (end - tensor->offset > tensor->bytes) return "a packet that is not of one tensor";
  const mlfab__slice *slice =
      &server->layout.slices[mlfab__layout_slice_at(&server->layout, begin)];
  return end - slice->offset > slice->bytes ? "a packet that is not of one slice" : NULL;
}

static const char *sparse_apply_look(mlfab__server *server, mlfab__incoming *update, uint64_t at,
                                     mlfab__frame_in *frame) {
  uint32_t eager = update->push.eager;
  if (frame->bulk_bytes == 0) return NULL;
  frame->bulk = mlfab__packet_private(server->came, frame->bulk, frame->bulk_bytes);
  const uint8_t *data = frame->bulk;
  if (at == 0) update->packed_end = 0;
  for (uint32_t n, left = frame->bulk_bytes; left > 0; at += n, data += n, left -= n) {
    mlfab__packet packet;
    n = mlfab__packet_open(data, left, &packet);
    if (n == 0) return "a packet that is malformed, or cut by the end of its frame";
    if (at < eager && at + n > eager) return "a packet cut by the end of the eager bytes";
    const char *wrong = sparse_apply_check_place(server, update, &packet);
    if (wrong) return wrong;
    update->packed_end =
        packet.offset + (uint64_t)packet.elements * mlfab__dtype_bytes(packet.dtype);
  }
  return NULL;
}

/* --- a packet block by block --- */

typedef struct sparse_apply_walk {
  const mlfab__server *server;
  mlfab__packet packet;
  int whole; /* the next part is the whole packet */
  mlfab__packet_cursor cursor;
  uint32_t first, left; /* of the current run: first element, elements left */
  uint32_t value;       /* index of the next value */
} sparse_apply_walk;

/* The part of a packet in one block: its position, and its values as a packet. */
typedef struct sparse_apply_part {
  mlfab__piece piece;
  mlfab__packet packet;
} sparse_apply_part;

/* A view of n elements from `first` on, all kept: values `value` and following. */
static void sparse_apply_view(const mlfab__packet *packet, uint32_t first, uint32_t value,
                              uint32_t n, mlfab__packet *view) {
  uint32_t width = mlfab__dtype_bytes(packet->dtype);
  *view = *packet;
  view->offset += (uint64_t)first * width;
  view->elements = view->kept = view->grains = view->count = n;
  view->form = MLFAB__PACKET_DENSE;
  view->grain_log2 = 0;
  view->values += (size_t)value * (packet->value == MLFAB_HALF_NONE ? width : 2);
}

/* `named`: parts contain few elements that are not kept. */
static void sparse_apply_begin(const mlfab__server *server, const mlfab__packet *packet, int named,
                               sparse_apply_walk *walk) {
  mlfab__piece piece;
  uint64_t bytes = (uint64_t)packet->elements * mlfab__dtype_bytes(packet->dtype);
  int sparse = packet->form == MLFAB__PACKET_DENSE ||
               (uint64_t)packet->kept * SPARSE_APPLY_SPARSE <= packet->elements;
  memset(walk, 0, sizeof *walk);
  walk->server = server;
  walk->packet = *packet;
  mlfab__store_piece(&server->store, packet->offset, bytes, &piece);
  walk->whole = piece.bytes == bytes && !(named && sparse);
  if (walk->whole || sparse) return;
  mlfab__unpack_dense(packet, server->packed);
  sparse_apply_view(packet, 0, 0, packet->elements, &walk->packet);
  walk->packet.value = MLFAB_HALF_NONE;
  walk->packet.values = server->packed;
}

/* Takes the next part: returns 1, or 0 after the last. */
static int sparse_apply_next(sparse_apply_walk *walk, sparse_apply_part *part) {
  const mlfab__packet *packet = &walk->packet;
  const mlfab__store *store = &walk->server->store;
  uint32_t width = mlfab__dtype_bytes(packet->dtype), n;
  if (walk->whole) {
    mlfab__store_piece(store, packet->offset, (uint64_t)packet->elements * width, &part->piece);
    part->packet = *packet;
    walk->whole = 0;
    walk->cursor.grain = packet->grains;
    walk->cursor.mark = packet->kept;
    return 1;
  }
  if (walk->left == 0 && !mlfab__unpack_run(packet, &walk->cursor, &walk->first, &walk->left))
    return 0;
  uint64_t offset = packet->offset + (uint64_t)walk->first * width;
  mlfab__store_piece(store, offset, (uint64_t)walk->left * width, &part->piece);
  n = (uint32_t)part->piece.count;
  sparse_apply_view(packet, walk->first, walk->value, n, &part->packet);
  walk->first += n;
  walk->value += n;
  walk->left -= n;
  return 1;
}

/* --- into blocks --- */

/* Returns |values|^2. Decodes 16-bit values into server->packed. */
static double sparse_apply_norm2(const mlfab__server *server, const mlfab__packet *packet) {
  const void *values = packet->values;
  mlfab__packet view;
  sparse_apply_view(packet, 0, 0, packet->count, &view);
  if (packet->value != MLFAB_HALF_NONE) {
    mlfab__unpack_dense(&view, server->packed);
    values = server->packed;
  }
  return mlfab__kernel_norm2_by(server->config->kernels, packet->dtype, values, packet->count);
}

/* Zeros the part of a block that the update touches. */
static void sparse_apply_zero(mlfab__server *server, const mlfab__incoming *update, uint32_t slice,
                              uint32_t position) {
  const mlfab__store *store = &server->store;
  const mlfab__shard_slice *s = &store->slices[slice];
  uint8_t *data = store->blocks[store->next[position]].data;
  mlfab__memory *memory = store->memory;
  uint64_t begin = s->offset + (uint64_t)(position - s->first) * store->block_bytes;
  uint64_t end = begin + mlfab__store_block_bytes(store, slice, position);
  for (uint32_t k = sparse_apply_segment(update, begin); k < update->push.segments; k++) {
    const mlfab__segment *segment = &update->segments[k];
    if (segment->offset >= end) return;
    uint64_t from = mlfab__max(segment->offset, begin);
    mlfab__memory_zero(memory, data + (from - begin),
                       mlfab__min(segment->offset + segment->bytes, end) - from);
  }
}

static int sparse_apply_fresh(mlfab__server *server, const mlfab__incoming *update, uint32_t slice,
                              uint32_t position) {
  const mlfab__store *store = &server->store;
  enum mlfab__apply_mode mode = mlfab__apply_mode(server, update);
  uint32_t base = mode == MLFAB__APPLY_SUM ? store->sum[position] : store->w[position];
  int code = mlfab__blocks_fresh(server, &server->store.next[position], base, 1);
  if (!code && mode == MLFAB__APPLY_STAGE) sparse_apply_zero(server, update, slice, position);
  return code;
}

/* Returns the number of blocks that the update steps and that have no `next` block yet. */
static uint64_t sparse_apply_missing(const mlfab__server *server, const mlfab__incoming *update) {
  const mlfab__store *store = &server->store;
  uint32_t last = MLFAB__NO_BLOCK;
  uint64_t missing = 0;
  if (!mlfab__apply_steps(server, update)) return 0;
  for (uint32_t k = 0; k < update->push.segments; k++) {
    const mlfab__segment *segment = &update->segments[k];
    mlfab__piece piece;
    for (uint64_t at = 0; at < segment->bytes; at += piece.bytes) {
      mlfab__store_piece(store, segment->offset + at, segment->bytes - at, &piece);
      if (piece.position == last || store->next[piece.position] != MLFAB__NO_BLOCK) continue;
      last = piece.position;
      missing++;
    }
  }
  return missing;
}

/* Has the slice no sum yet, in its round or from this update? */
static int sparse_apply_unsummed(const mlfab__server *server, uint32_t slice) {
  const mlfab__store *store = &server->store;
  const mlfab__shard_slice *s = &store->slices[slice];
  for (uint32_t p = s->first; p < s->first + s->count; p++) {
    if (store->sum[p] != MLFAB__NO_BLOCK || store->next[p] != MLFAB__NO_BLOCK) return 0;
  }
  return 1;
}

/* Adds a sum of zeros to touched slices without one: they are in the round, whatever elements packets name. */
static int sparse_apply_sums(mlfab__server *server, const mlfab__incoming *update) {
  for (uint32_t k = 0, next = 0; server->rounds && k < update->push.segments; k++) {
    uint32_t last, i = mlfab__queue_touched(server, update, k, &last);
    for (i = i < next ? next : i; i <= last; i++) {
      if (!sparse_apply_unsummed(server, i)) continue;
      int code = sparse_apply_fresh(server, update, i, server->store.slices[i].first);
      if (code) return code;
    }
    next = last + 1;
  }
  return 0;
}

static int sparse_apply_complete(mlfab__server *server, const mlfab__incoming *update) {
  mlfab__store *store = &server->store;
  if (sparse_apply_sums(server, update)) return MLFAB_ERR_MEMORY;
  uint64_t missing = sparse_apply_missing(server, update);
  if (store->free_count < missing) mlfab__blocks_unpin_all(server);
  while (store->free_count < missing) {
    if (mlfab__store_grow(server->env, store)) return MLFAB_ERR_MEMORY;
  }
  return 0;
}

/* Adds a packet as the dense values that it stands for: a device cannot add single elements. */
static int sparse_apply_dense(mlfab__server *server, const mlfab__incoming *update,
                              const mlfab__packet *packet) {
  const mlfab__store *store = &server->store;
  uint64_t bytes = (uint64_t)packet->elements * mlfab__dtype_bytes(packet->dtype);
  const uint8_t *data = server->packed;
  enum mlfab__apply_mode mode = mlfab__apply_mode(server, update);
  double weight = mlfab__apply_weight(server, update, mode);
  mlfab__piece piece;
  mlfab__unpack_dense(packet, server->packed);
  for (uint64_t at = 0; at < bytes; at += piece.bytes, data += piece.bytes) {
    mlfab__store_piece(store, packet->offset + at, bytes - at, &piece);
    if (store->next[piece.position] == MLFAB__NO_BLOCK) {
      int code = sparse_apply_fresh(server, update, piece.slice, piece.position);
      if (code) return code;
    }
    uint8_t *to = store->blocks[store->next[piece.position]].data + piece.at;
    if (!mlfab__memory_add(store->memory, server->config->kernels, piece.dtype, to,
                           mode == MLFAB__APPLY_STAGE ? NULL : to, data, weight, piece.count, 0))
      return MLFAB_ERR_NOT_FINITE;
  }
  return 0;
}

static int sparse_apply_take(mlfab__server *server, const mlfab__incoming *update,
                             const mlfab__packet *packet) {
  const mlfab__store *store = &server->store;
  if (store->memory) return sparse_apply_dense(server, update, packet);
  enum mlfab__apply_mode mode = mlfab__apply_mode(server, update);
  double weight = mlfab__apply_weight(server, update, mode);
  sparse_apply_walk walk;
  sparse_apply_part part;
  sparse_apply_begin(server, packet, 0, &walk);
  while (sparse_apply_next(&walk, &part)) {
    const mlfab__piece *piece = &part.piece;
    if (store->next[piece->position] == MLFAB__NO_BLOCK) {
      int code = sparse_apply_fresh(server, update, piece->slice, piece->position);
      if (code) return code;
    }
    uint8_t *to = store->blocks[store->next[piece->position]].data + piece->at;
    if (mode == MLFAB__APPLY_STAGE) {
      mlfab__unpack_store(&part.packet, to);
      continue;
    }
    if (!mlfab__unpack_add(&part.packet, to, weight)) return MLFAB_ERR_NOT_FINITE;
    if (server->watch && mode == MLFAB__APPLY_DIRECT)
      server->sparse->piece(server, piece,
                            store->blocks[store->w[piece->position]].data + piece->at, to);
  }
  return 0;
}

static int sparse_apply_consume(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                                uint64_t bytes) {
  mlfab__packet packet;
  for (uint32_t n; bytes > 0; data += n, bytes -= n, update->consumed += n) {
    n = mlfab__packet_open(data, bytes, &packet);
    if (n == 0) return MLFAB_ERR_FRAME;
    if (!mlfab__unpack_finite(&packet)) return MLFAB_ERR_NOT_FINITE;
    if (server->measures) update->norm2 += sparse_apply_norm2(server, &packet);
    int code = sparse_apply_take(server, update, &packet);
    if (code) return code;
  }
  return 0;
}

/* --- in place --- */

/* Returns 1 if every packet is finite, or with *code_p if one is not; returns 0 if products must be checked, because a
 * factor could make them infinite. */
static int sparse_apply_judge(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                              int *code_p) {
  mlfab__packet packet;
  double norm2 = 0.0;
  double weight = mlfab__apply_weight(server, update, mlfab__apply_mode(server, update));
  *code_p = 0;
  if (!(weight >= -1.0 && weight <= 1.0)) return 0;
  for (uint64_t at = 0, n; at < update->push.bytes; at += n) {
    n = mlfab__packet_open(data + at, update->push.bytes - at, &packet);
    if (n == 0) return 0;
    if (!mlfab__unpack_finite(&packet)) {
      *code_p = MLFAB_ERR_NOT_FINITE;
      return 1;
    }
    if (server->measures) norm2 += sparse_apply_norm2(server, &packet);
  }
  update->norm2 = norm2;
  return 1;
}

/* Does it touch a slice whose round has no sum yet? */
static int sparse_apply_opens(const mlfab__server *server, const mlfab__incoming *update) {
  for (uint32_t k = 0; server->rounds && k < update->push.segments; k++) {
    uint32_t last, i = mlfab__queue_touched(server, update, k, &last);
    for (; i <= last; i++) {
      if (sparse_apply_unsummed(server, i)) return 1;
    }
  }
  return 0;
}

/* Makes private copies of the blocks of all packets, part by part. Errors: MEMORY, FRAME. */
static int sparse_apply_own(mlfab__server *server, const mlfab__incoming *update,
                            const uint8_t *data) {
  mlfab__packet packet;
  sparse_apply_walk walk;
  sparse_apply_part part;
  for (uint64_t at = 0, n; at < update->push.bytes; at += n) {
    n = mlfab__packet_open(data + at, update->push.bytes - at, &packet);
    if (n == 0) return MLFAB_ERR_FRAME;
    sparse_apply_begin(server, &packet, 1, &walk);
    while (sparse_apply_next(&walk, &part)) {
      uint32_t *place = mlfab__apply_target(server, &part.piece);
      if (*place != MLFAB__NO_BLOCK && server->store.blocks[*place].refs == 1) continue;
      int code = mlfab__blocks_fresh(server, place, *place, 1);
      if (code) return code;
    }
  }
  return 0;
}

/* Adds all packets. Errors: FRAME, NOT_FINITE. */
static int sparse_apply_add(mlfab__server *server, const mlfab__incoming *update,
                            const uint8_t *data) {
  mlfab__packet packet;
  sparse_apply_walk walk;
  sparse_apply_part part;
  uint8_t *before = server->packed + MLFAB__SPARSE_APPLY_HALF;
  double weight = mlfab__apply_weight(server, update, mlfab__apply_mode(server, update));
  for (uint64_t at = 0, n; at < update->push.bytes; at += n) {
    n = mlfab__packet_open(data + at, update->push.bytes - at, &packet);
    if (n == 0) return MLFAB_ERR_FRAME;
    sparse_apply_begin(server, &packet, 1, &walk);
    while (sparse_apply_next(&walk, &part)) {
      const mlfab__piece *piece = &part.piece;
      uint8_t *to = server->store.blocks[*mlfab__apply_target(server, piece)].data + piece->at;
      int watch = server->watch && !server->rounds;
      if (watch) memcpy(before, to, piece->bytes);
      if (!mlfab__unpack_add(&part.packet, to, weight)) return MLFAB_ERR_NOT_FINITE;
      if (watch) server->sparse->piece(server, piece, before, to);
    }
  }
  return 0;
}

static int sparse_apply_whole(mlfab__server *server, mlfab__incoming *update, const uint8_t *data,
                              int *code_p) {
  if (mlfab__apply_steps(server, update) || sparse_apply_opens(server, update) ||
      !sparse_apply_judge(server, update, data, code_p))
    return 0;
  if (!*code_p) *code_p = sparse_apply_own(server, update, data);
  if (!*code_p) *code_p = sparse_apply_add(server, update, data);
  return 1;
}

MLFAB__INTERNAL const mlfab__apply_codec *mlfab__sparse_apply_codec(void) {
  static const mlfab__apply_codec codec = {sparse_apply_look, sparse_apply_consume,
                                           sparse_apply_whole, sparse_apply_complete,
                                           sparse_apply_fresh};
  return &codec;
}
