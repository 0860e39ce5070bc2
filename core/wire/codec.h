/* codec.h - one list of fields for both encoding and decoding a frame's meta.
 *
 * For the files that define the metas of their group's frames: wire.c, and <group>_wire.c. A meta is one list of
 * fields. Macros generate its encoder and its decoder from this list, so the two cannot disagree. Before the list, such
 * a file defines N (a number of its member's size) and other letters as needed (A: an array of four numbers; T: a text;
 * F: the fields of a struct). It undefines them after the list.
 *
 * Invariants: decoding is total (any bytes give a struct or an error; nothing outside them is read) and
 * exact (a meta that decodes encodes to the same bytes). Fields are copied one by one, at any alignment,
 * little-endian on every machine. */
#ifndef MLFAB__CODEC_H
#define MLFAB__CODEC_H

#include "wire.h"

/* ---- little-endian fields, any alignment ---- */

/* Copies a number of 2, 4 or 8 bytes between memory and the frame, in either direction. */
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
static inline void wire_number(void *to, const void *from, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) ((uint8_t *)to)[i] = ((const uint8_t *)from)[bytes - 1 - i];
}
#else
#define wire_number memcpy
#endif

#if defined(__GNUC__) || defined(__clang__)
#define WIRE_INLINE __attribute__((always_inline, unused)) static inline /* unused: by a part */
#else
#define WIRE_INLINE static inline
#endif

static inline void wire_put32(uint8_t *at, uint32_t x) { wire_number(at, &x, sizeof x); }
static inline void wire_put64(uint8_t *at, uint64_t x) { wire_number(at, &x, sizeof x); }

WIRE_INLINE uint16_t wire_get16(const uint8_t *at) {
  uint16_t x;
  wire_number(&x, at, sizeof x);
  return x;
}

static inline uint32_t wire_get32(const uint8_t *at) {
  uint32_t x;
  wire_number(&x, at, sizeof x);
  return x;
}

static inline uint64_t wire_get64(const uint8_t *at) {
  uint64_t x;
  wire_number(&x, at, sizeof x);
  return x;
}

/* ---- fields ---- */

/* Every function below writes when `decode` is 0 and reads when it is 1. Inlining removes that test. An error is
 * sticky: one check at the end suffices. Fields that could not be read are zero. */
typedef struct wire_codec {
  uint8_t *begin, *at;
  const uint8_t *end; /* when decoding */
  int bad;
} wire_codec;

WIRE_INLINE void wire_codec_number(wire_codec *c, int decode, void *member, size_t bytes) {
  if (!decode) {
    wire_number(c->at, member, bytes);
  } else if (MLFAB__UNLIKELY((size_t)(c->end - c->at) < bytes)) {
    c->bad = 1;
    memset(member, 0, bytes);
    return;
  } else {
    wire_number(member, c->at, bytes);
  }
  c->at += bytes;
}

/* Truncates an array without a terminating zero, so that the decoder accepts the result. */
static inline uint16_t wire_text_bytes(const char *text, size_t room) {
  const char *end = memchr(text, 0, room - 1);
  return (uint16_t)(end != NULL ? (size_t)(end - text) : room - 1);
}

/* When reading, zeros the rest of the array, so that equal texts give equal structs. */
static inline void wire_codec_text(wire_codec *c, int decode, char *text, size_t room) {
  uint16_t bytes = decode ? 0 : wire_text_bytes(text, room);
  wire_codec_number(c, decode, &bytes, sizeof bytes);
  if (!decode) {
    memcpy(c->at, text, bytes);
  } else if (c->bad || bytes >= room || (size_t)(c->end - c->at) < bytes ||
             memchr(c->at, 0, bytes) != NULL) {
    c->bad = 1;
    memset(text, 0, room);
    return;
  } else {
    memcpy(text, c->at, bytes);
    memset(text + bytes, 0, room - bytes);
  }
  c->at += bytes;
}

/* The count of a list, at most `most`, with `each` bytes an entry. A count beyond this limit, the meta's
 * size or the bytes left is an error before it is multiplied or used. */
static inline uint32_t wire_codec_count(wire_codec *c, int decode, uint32_t count, uint32_t most,
                                        size_t each) {
  size_t used = (size_t)(c->at - c->begin);
  if (decode || used + sizeof count <= MLFAB_META_MAX) {
    wire_codec_number(c, decode, &count, sizeof count);
    size_t room = decode ? (size_t)(c->end - c->at) : MLFAB_META_MAX - used - sizeof count;
    if (!c->bad && count <= most && count <= room / each) return count;
  }
  c->bad = 1;
  return 0;
}

/* Entries of lists of plain numbers; servers are u16 in frames. */
WIRE_INLINE void wire_u64(wire_codec *c, int decode, uint64_t *x) {
  wire_codec_number(c, decode, x, sizeof *x);
}

WIRE_INLINE void wire_u32(wire_codec *c, int decode, uint32_t *x) {
  wire_codec_number(c, decode, x, sizeof *x);
}

#if MLFAB_WITH_RESHARD
WIRE_INLINE void wire_server(wire_codec *c, int decode, uint32_t *x) {
  uint16_t number = decode ? 0 : (uint16_t)*x;
  wire_codec_number(c, decode, &number, sizeof number);
  if (decode) *x = number;
}
#endif

static inline wire_codec wire_encode(uint8_t *meta) {
  wire_codec c = {meta, meta, NULL, 0};
  return c;
}

/* Decoding does not write to the meta. */
static inline wire_codec wire_decode(const uint8_t *meta, uint32_t bytes) {
  wire_codec c = {(uint8_t *)meta, (uint8_t *)meta, meta + bytes, 0};
  return c;
}

static inline uint32_t wire_encoded(const wire_codec *c) {
  return c->bad ? 0 : (uint32_t)(c->at - c->begin);
}

static inline int wire_decoded(const wire_codec *c) {
  return c->bad || c->at != c->end ? MLFAB_ERR_FRAME : 0;
}

#define WIRE_FIELDS(name, type, ...) \
  WIRE_INLINE void wire_##name(wire_codec *c, int decode, type *m) { __VA_ARGS__ }

/* A type without lists. */
#define WIRE_META(name, ...)                                                             \
  WIRE_FIELDS(name, mlfab__##name, __VA_ARGS__)                                          \
  MLFAB__INTERNAL uint32_t mlfab__encode_##name(uint8_t *meta, const mlfab__##name *m) { \
    wire_codec c = wire_encode(meta);                                                    \
    wire_##name(&c, 0, (mlfab__##name *)m);                                              \
    return (uint32_t)(c.at - meta);                                                      \
  }                                                                                      \
  MLFAB__INTERNAL int mlfab__decode_##name(const uint8_t *meta, uint32_t bytes,          \
                                           mlfab__##name *m) {                           \
    wire_codec c = wire_decode(meta, bytes);                                             \
    wire_##name(&c, 1, m);                                                               \
    return wire_decoded(&c);                                                             \
  }

#if MLFAB_WITH_SCHED || MLFAB_WITH_RESHARD || MLFAB_WITH_COLL || MLFAB_WITH_CHECKPOINT || \
    MLFAB_WITH_REPLICA || MLFAB_WITH_LEND
/* A type with one list at the end. Arguments: the member with the count, the entries' fields, their type,
 * encoded size and maximum number. */
#define WIRE_LIST(name, count, item, type, bytes_each, most, ...)                                 \
  WIRE_FIELDS(name, mlfab__##name, __VA_ARGS__)                                                   \
  MLFAB__INTERNAL uint32_t mlfab__encode_##name(uint8_t *meta, const mlfab__##name *m,            \
                                                const type *list) {                               \
    wire_codec c = wire_encode(meta);                                                             \
    wire_##name(&c, 0, (mlfab__##name *)m);                                                       \
    uint32_t n = wire_codec_count(&c, 0, m->count, most, bytes_each);                             \
    for (uint32_t i = 0; i < n; i++) wire_##item(&c, 0, (type *)&list[i]);                        \
    return wire_encoded(&c);                                                                      \
  }                                                                                               \
  MLFAB__INTERNAL int mlfab__decode_##name(const uint8_t *meta, uint32_t bytes, mlfab__##name *m, \
                                           type *list) {                                          \
    type skipped;                                                                                 \
    wire_codec c = wire_decode(meta, bytes);                                                      \
    wire_##name(&c, 1, m);                                                                        \
    m->count = wire_codec_count(&c, 1, 0, most, bytes_each);                                      \
    for (uint32_t i = 0; i < m->count; i++) wire_##item(&c, 1, list ? &list[i] : &skipped);       \
    return wire_decoded(&c);                                                                      \
  }
#endif

/* A consistency model, used in frames of two groups, without `size`. */
/* clang-format off */
#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
WIRE_FIELDS(sync, mlfab_sync,
  N(kind) N(staleness) N(staleness_max) N(need) N(soft) N(only_fastest) N(keep_late) N(chance)
  N(alpha))
#undef N
/* clang-format on */

/* ---- segments of the model ---- */

/* Returns the sum of the segments' bytes. They ascend without overlap within 64 bits, so the sum cannot
 * overflow. */
static inline uint64_t wire_read_segments(wire_codec *c, uint32_t *count_p,
                                          mlfab__segment *segments) {
  uint64_t sum = 0, end = 0;
  uint32_t count = wire_codec_count(c, 1, 0, MLFAB__SEGMENTS_MAX, 16);
  for (uint32_t i = 0; i < count; i++) {
    mlfab__segment s;
    wire_u64(c, 1, &s.offset);
    wire_u64(c, 1, &s.bytes);
    if (s.bytes == 0 || s.bytes > UINT64_MAX - s.offset || (i > 0 && s.offset <= end)) c->bad = 1;
    end = s.offset + s.bytes;
    sum += s.bytes;
    segments[i] = s;
  }
  *count_p = count;
  return sum;
}

static inline void wire_write_segments(wire_codec *c, uint32_t count,
                                       const mlfab__segment *segments) {
  count = wire_codec_count(c, 0, count, MLFAB__SEGMENTS_MAX, 16);
  for (uint32_t i = 0; i < count; i++) {
    wire_u64(c, 0, (uint64_t *)&segments[i].offset);
    wire_u64(c, 0, (uint64_t *)&segments[i].bytes);
  }
}

#endif
