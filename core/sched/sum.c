/* sum.c - the aggregator role: groups whose members and sum are sent as packets. See aggregator.h, packet.h.
 *
 * The sum is kept dense. Packets of the first incomplete member are added as they arrive, from a private copy of their
 * frame, member after member in the manifest's order. A later member stages as many of its packets as a ring holds,
 * from its start and without wrapping. Elements that no member names are zero; the sum equals the sum of the members'
 * dense values, except for the sign of zeros. When the last member is complete, the sum is encoded as packets, a part
 * in each tick, and forwarded as far as it is released, in frames of whole packets. Its length is known only then, so
 * there is no cut-through. */
#include "aggregator.h"

#include "../kernels/kernels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define SUM_X86 1
#include <immintrin.h>
#else
#define SUM_X86 0
#endif

enum {
  SUM_TICK_BYTES = 4 << 20, /* bytes of the sum encoded in one tick */
  SUM_MOST = 8,             /* maximum size of packets, as a multiple of their elements' size */
  SUM_MORE = 32,            /* overhead of a dense packet */
  SUM_WORDS = MLFAB__PACKET_ELEMENTS / 64,
  SUM_AT_BODY = 16 /* offset in a packet of its body's size */
};

/* Adjacent elements that one packet may hold. */
typedef struct sum_piece {
  const uint8_t *data;
  mlfab__packet_shape shape;
  uint64_t bytes;
} sum_piece;

/* Takes the piece at a cursor, and advances it: returns 1, or 0 after the last. */
static int sum_next(const mlfab__aggregator *aggregator, const mlfab__accumulator *group,
                    mlfab__sum_cursor *cursor, sum_piece *piece) {
  const mlfab__layout *layout = aggregator->layout;
  if (cursor->stretch == group->nstretches) return 0;
  const mlfab__sum_stretch *stretch = &group->stretches[cursor->stretch];
  uint64_t offset = stretch->segment.offset + cursor->in;
  uint64_t left = stretch->segment.bytes - cursor->in;
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, offset);
  const mlfab__slice *slice = &layout->slices[mlfab__layout_slice_at(layout, offset)];
  uint32_t width = mlfab__dtype_bytes((int)tensor->dtype);
  uint64_t bytes = mlfab__min(left, MLFAB__PACKET_ELEMENTS * (uint64_t)width);
  bytes = mlfab__min(bytes, tensor->offset + tensor->bytes - offset);
  bytes = mlfab__min(bytes, slice->offset + slice->bytes - offset);
  memset(piece, 0, sizeof *piece);
  piece->data = group->data + stretch->at + cursor->in;
  piece->bytes = bytes;
  piece->shape.offset = offset;
  piece->shape.dtype = (int)tensor->dtype;
  piece->shape.half = MLFAB_HALF_NONE;
  piece->shape.elements = (uint32_t)(bytes / width);
  cursor->in += bytes;
  if (bytes == left) {
    cursor->stretch++;
    cursor->in = 0;
  }
  return 1;
}

/* --- a new group --- */

/* Allocates memory for the sum's packets. Errors: AGAIN (no memory, or the old memory is lent). */
static int sum_room(mlfab__aggregator *aggregator, mlfab__accumulator *group) {
  mlfab__sum_cursor cursor = {0, 0};
  sum_piece piece;
  /* A packer writes at most the dense packet, but may need room for a bitmap besides. */
  uint64_t more = SUM_MORE + MLFAB__PACKET_ELEMENTS / 8;
  while (sum_next(aggregator, group, &cursor, &piece)) more += SUM_MORE;
  if (group->stream_room >= group->bytes + more) return 0;
  if (group->lent > 0) return MLFAB_ERR_AGAIN;
  uint64_t room = aggregator->data_bytes + more;
  mlfab__free_aligned(aggregator->env, group->stream, group->stream_room);
  group->stream = mlfab__alloc_aligned(aggregator->env, room);
  group->stream_room = group->stream ? room : 0;
  return group->stream ? 0 : MLFAB_ERR_AGAIN;
}

MLFAB__INTERNAL int mlfab__sum_begin(mlfab__aggregator *aggregator, mlfab__accumulator *group,
                                     const mlfab__segment *segments, uint32_t n) {
  uint64_t at = 0;
  if (aggregator->ghost) return MLFAB_ERR_UNSUPPORTED;
  mlfab__sum_stretch *stretches =
      mlfab__grow(aggregator->env, group->stretches, &group->stretch_room, n, sizeof *stretches);
  if (!stretches) return MLFAB_ERR_AGAIN;
  for (uint32_t i = 0; i < n; i++) {
    stretches[i] = (mlfab__sum_stretch){segments[i], at};
    at += segments[i].bytes;
  }
  group->stretches = stretches;
  group->nstretches = n;
  group->cursor = (mlfab__sum_cursor){0, 0};
  group->cleared = group->length = 0;
  group->encoded = 0;
  if (mlfab__packet_room(aggregator->env, &aggregator->came)) return MLFAB_ERR_AGAIN;
  return sum_room(aggregator, group);
}

/* --- packets of members --- */

/* Returns the stretch that contains this offset, or the next one. */
static const mlfab__sum_stretch *sum_find(const mlfab__accumulator *group, uint64_t offset) {
  uint32_t low = 0, high = group->nstretches;
  MLFAB__SEARCH(low, high, at,
                group->stretches[at].segment.offset + group->stretches[at].segment.bytes <= offset)
  return low < group->nstretches ? &group->stretches[low] : NULL;
}

/* Returns a text if a packet of this group must not be at its position, else NULL. */
static const char *sum_check_place(const mlfab__aggregator *aggregator,
                                   const mlfab__accumulator *group, const mlfab__packet *packet) {
  const mlfab__layout *layout = aggregator->layout;
  uint64_t begin = packet->offset;
  uint64_t end = begin + (uint64_t)packet->elements * mlfab__dtype_bytes(packet->dtype);
  const mlfab__sum_stretch *stretch = sum_find(group, begin);
  if (!stretch || begin < stretch->segment.offset ||
      end - stretch->segment.offset > stretch->segment.bytes)
    return "a packet outside the stretches of its group";
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, begin);
  const mlfab__slice *slice = &layout->slices[mlfab__layout_slice_at(layout, begin)];
  if (packet->dtype != tensor->dtype) return "a packet of another type than its tensor";
  if (end - tensor->offset > tensor->bytes || end - slice->offset > slice->bytes)
    return "a packet that is not of one tensor and one slice";
  return NULL;
}

MLFAB__INTERNAL const char *mlfab__sum_check(mlfab__aggregator *aggregator,
                                             const mlfab__accumulator *group, mlfab__addend *addend,
                                             const mlfab__hop_chunk *chunk,
                                             mlfab__frame_in *frame) {
  uint64_t end = addend->total ? mlfab__min(addend->total, addend->granted) : addend->granted;
  uint64_t next = addend->next;
  mlfab__packet packet;
  if (chunk->total == 0 || chunk->total > SUM_MOST * group->bytes)
    return "an update of no packets, or of more than its elements need";
  if (addend->total && chunk->total != addend->total) return "an update whose length changes";
  if (chunk->offset != addend->received || frame->bulk_bytes > end - addend->received ||
      frame->bulk_bytes > chunk->total - addend->received)
    return "a chunk out of place or not granted";
  if (frame->bulk_bytes == 0 || !frame->bulk) return "a chunk without packets";
  frame->bulk = mlfab__packet_private(aggregator->came, frame->bulk, frame->bulk_bytes);
  const uint8_t *at = frame->bulk;
  for (uint32_t left = frame->bulk_bytes, n; left > 0; left -= n, at += n) {
    n = mlfab__packet_open(at, left, &packet);
    if (n == 0) return "a packet that is malformed, or cut by the end of its frame";
    if (packet.offset < next) return "packets out of order, or overlapping";
    const char *wrong = sum_check_place(aggregator, group, &packet);
    if (wrong) return wrong;
    next = packet.offset + (uint64_t)packet.elements * mlfab__dtype_bytes(packet.dtype);
  }
  addend->next = next;
  addend->total = chunk->total;
  return NULL;
}

/* Initialises the sum with zeros up to here. */
static void sum_clear(mlfab__accumulator *group, uint64_t upto) {
  if (upto <= group->cleared) return;
  memset(group->data + group->cleared, 0, upto - group->cleared);
  group->cleared = upto;
}

/* Adds the next packets of member k, which are checked. Errors: NOT_FINITE, FRAME. */
static int sum_add(mlfab__accumulator *group, uint32_t k, const uint8_t *from, uint64_t bytes) {
  mlfab__addend *addend = &group->addends[k];
  mlfab__packet packet;
  for (uint32_t n; bytes > 0; bytes -= n, from += n, addend->added += n) {
    n = mlfab__packet_open(from, bytes, &packet);
    const mlfab__sum_stretch *stretch = n > 0 ? sum_find(group, packet.offset) : NULL;
    if (!stretch) return MLFAB_ERR_FRAME;
    uint64_t at = stretch->at + (packet.offset - stretch->segment.offset);
    sum_clear(group, at + (uint64_t)packet.elements * mlfab__dtype_bytes(packet.dtype));
    if (!mlfab__unpack_add(&packet, group->data + at, addend->weight)) return MLFAB_ERR_NOT_FINITE;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__sum_take(mlfab__accumulator *group, mlfab__addend *addend,
                                    const mlfab__frame_in *frame) {
  uint32_t k = (uint32_t)(addend - group->addends);
  if (k == group->head) return sum_add(group, k, frame->bulk, frame->bulk_bytes);
  memcpy(group->rings[addend->ring - 1] + (addend->received - frame->bulk_bytes), frame->bulk,
         frame->bulk_bytes);
  return 0;
}

MLFAB__INTERNAL int mlfab__sum_unstage(mlfab__accumulator *group, mlfab__addend *addend) {
  return sum_add(group, (uint32_t)(addend - group->addends), group->rings[addend->ring - 1],
                 addend->received);
}

/* --- packets of the sum --- */

/* Bit i: the i-th of 64 words of 4 bytes is non-zero. */
static uint64_t sum_words(const uint8_t *at) {
  uint64_t bits = 0;
#if SUM_X86
  const __m128i *from = (const __m128i *)(const void *)at;
  __m128i zero = _mm_setzero_si128(), are[4];
  for (uint32_t i = 0; i < 64; i += 16, from += 4) {
    for (uint32_t k = 0; k < 4; k++) are[k] = _mm_cmpeq_epi32(_mm_loadu_si128(from + k), zero);
    __m128i all = _mm_packs_epi16(_mm_packs_epi32(are[0], are[1]), _mm_packs_epi32(are[2], are[3]));
    bits |= (uint64_t)(~(uint32_t)_mm_movemask_epi8(all) & 0xffff) << i;
  }
#else
  uint32_t x[64];
  memcpy(x, at, sizeof x);
  for (uint32_t i = 0; i < 64; i++) bits |= (uint64_t)(x[i] != 0) << i;
#endif
  return bits;
}

/* Bit i: bit 2i or 2i + 1 is set. */
static uint64_t sum_pairs(uint64_t x) {
  x = (x | x >> 1) & 0x5555555555555555u;
  x = (x | x >> 1) & 0x3333333333333333u;
  x = (x | x >> 2) & 0x0f0f0f0f0f0f0f0fu;
  x = (x | x >> 4) & 0x00ff00ff00ff00ffu;
  x = (x | x >> 8) & 0x0000ffff0000ffffu;
  return (x | x >> 16) & 0xffffffffu;
}

/* Marks the non-zero elements of n; returns their number. Compares bits: a sum that began with 0 is never -0. */
static uint32_t sum_mark(const uint8_t *at, uint32_t width, uint32_t n, uint64_t *keep) {
  uint8_t last[64 * 8];
  uint32_t kept = 0;
  for (uint32_t first = 0; first < n; first += 64, at += 64 * width) {
    const uint8_t *from = at;
    if (n - first < 64) {
      memset(last, 0, sizeof last);
      memcpy(last, at, (size_t)(n - first) * width);
      from = last;
    }
    uint64_t bits = sum_words(from);
    if (width == 8) bits = sum_pairs(bits) | sum_pairs(sum_words(from + 256)) << 32;
    kept += mlfab__bits(bits);
    keep[first / 64] = bits;
  }
  return kept;
}

/* Encodes a piece: dense if more than half of its elements are non-zero. */
static uint32_t sum_pack(uint8_t *out, const sum_piece *piece) {
  uint64_t keep[SUM_WORDS];
  uint32_t n = piece->shape.elements;
  uint32_t kept = sum_mark(piece->data, mlfab__dtype_bytes(piece->shape.dtype), n, keep);
  if (kept > n / 2) return mlfab__packet_dense(out, &piece->shape, piece->data);
  return mlfab__packet_marked(out, &piece->shape, piece->data, keep, 1);
}

MLFAB__INTERNAL int mlfab__sum_encode(mlfab__aggregator *aggregator, mlfab__accumulator *group) {
  uint64_t budget = SUM_TICK_BYTES;
  sum_piece piece;
  if (!group->packed || group->encoded || group->head < group->naddends) return 0;
  sum_clear(group, group->bytes);
  while (budget > 0) {
    if (!sum_next(aggregator, group, &group->cursor, &piece)) {
      group->encoded = 1;
      break;
    }
    group->length += sum_pack(group->stream + group->length, &piece);
    budget -= mlfab__min(budget, piece.bytes);
  }
  if (!group->encoded) return 0;
  if (group->length == 0) {
    /* A length of 0 means unknown, so a sum of zeros is encoded as one zero. */
    mlfab__sum_cursor first = {0, 0};
    if (!sum_next(aggregator, group, &first, &piece)) return 1;
    piece.shape.elements = 1;
    group->length = mlfab__packet_dense(group->stream, &piece.shape, piece.data);
  }
  return 1;
}

MLFAB__INTERNAL uint32_t mlfab__sum_forwardable(const mlfab__aggregator *aggregator,
                                                const mlfab__accumulator *group) {
  uint64_t upto = mlfab__min(group->released, group->length), n = 0;
  if (!group->encoded) return 0;
  uint32_t chunk =
      mlfab__port_chunk(&aggregator->up, group->server, aggregator->config->chunk_bytes);
  while (group->sent + n < upto) {
    uint64_t at = group->sent + n;
    uint32_t bytes;
    memcpy(&bytes, group->stream + at + SUM_AT_BODY, sizeof bytes);
    bytes += MLFAB__PACKET_HEADER;
    int large = n > 0 && n + bytes > chunk;
    if (large || bytes > upto - at) break;
    n += bytes;
  }
  return (uint32_t)n;
}
