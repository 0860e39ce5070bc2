/* packet.h - packets: how values travel that are rounded, sparse or both. Layer 2.
 *
 * A packet is one stretch of the flat model, at most 65536 elements of one slice and one tensor:
 *
 *     0 u64 offset in the flat model, bytes    20 u8 form: MLFAB__PACKET_*
 *     8 u32 elements of the stretch            21 u8 values: MLFAB_HALF_*
 *    12 u32 kept grains (DENSE: all)           22 u8 log2 of the elements a grain (the last: fewer)
 *    16 u32 bytes of the body                  23 u8 element type
 *    24 body: bitmap (a bit a grain) or indices of grains (u16, ascending), padded to 8 bytes; the
 *       values of the kept grains, in their order, padded to 8 bytes. Padding is zero.
 *
 * Packets follow one another without gaps; each is a multiple of 8 bytes, and must begin at one. A
 * packer writes nothing beyond mlfab__packet_bound of its elements, and returns the packet's bytes; 0
 * when nothing is kept, and then nothing was written that matters. I64 has no halves. */
#ifndef MLFAB__PACKET_H
#define MLFAB__PACKET_H

#include "../base/env.h"

#define MLFAB__PACKET_ELEMENTS 65536u /* most of a packet */
#define MLFAB__PACKET_HEADER 24u

enum mlfab__packet_form {
  MLFAB__PACKET_DENSE = 0,
  MLFAB__PACKET_BITMAP = 1,
  MLFAB__PACKET_INDEX = 2
};

typedef struct mlfab__packet {
  uint64_t offset; /* in the flat model, bytes */
  uint32_t elements, kept, body, grains;
  uint32_t count; /* values: the elements of the kept grains */
  uint8_t form, value, grain_log2, dtype;
  const uint8_t *marks;  /* bitmap or indices; borrowed, as values */
  const uint8_t *values; /* `count` */
} mlfab__packet;

/* Looks at all of the packet that begins at `at` but its values: its bytes, 0 when it is malformed or
 * longer than `room`. Whatever is there, nothing beyond `room` is read. A packet that keeps nothing is
 * in order. Whether the stretch is the model's is the caller's question. */
MLFAB__INTERNAL uint32_t mlfab__packet_open(const uint8_t *at, uint64_t room,
                                            mlfab__packet *packet);

/* Packets are read more than once: they are looked at, and later taken. Memory that their sender still maps
 * may hold something else by then. So the packets of a frame are copied to private memory before the
 * first look, and nothing is read from the frame afterwards. Such memory, for one frame; its owner
 * calls mlfab__free_aligned. Does nothing when there is some. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__packet_room(mlfab__env *env, uint8_t **room_p);
#define MLFAB__PACKET_ROOM MLFAB_BULK_MAX
/* A copy of these bytes in that memory. */
MLFAB__INTERNAL const uint8_t *mlfab__packet_private(uint8_t *room, const void *from,
                                                     uint32_t bytes);

/* The most bytes that a packet of so many elements takes. */
MLFAB__INTERNAL uint64_t mlfab__packet_bound(uint32_t elements, int dtype);

/* Where a packet lies and what of. */
typedef struct mlfab__packet_shape {
  uint64_t offset;
  int dtype, half;
  uint32_t grain_log2; /* at most 16 */
  uint32_t elements;   /* 1 to MLFAB__PACKET_ELEMENTS */
} mlfab__packet_shape;

/* All elements. */
MLFAB__INTERNAL uint32_t mlfab__packet_dense(uint8_t *out, const mlfab__packet_shape *shape,
                                             const void *values);
/* Of an array of all elements those whose grains are marked (bit i of keep[i / 64] is grain i, bits
 * beyond the last are 0), in the smallest form. may_dense: values that are not marked may travel too,
 * when that makes it smaller. */
MLFAB__INTERNAL uint32_t mlfab__packet_marked(uint8_t *out, const mlfab__packet_shape *shape,
                                              const void *values, const uint64_t *keep,
                                              int may_dense);
/* `kept` elements at ascending indices below shape->elements; grain_log2 is taken for 0. */
MLFAB__INTERNAL uint32_t mlfab__packet_sparse(uint8_t *out, const mlfab__packet_shape *shape,
                                              const uint32_t *indices, const void *values,
                                              uint32_t kept);
/* All of a packet but its values, in the smallest form: *values_p is where exactly as many of them as
 * are marked are to be written (of the type, or uint16_t), such as by mlfab__filter_emit. */
MLFAB__INTERNAL uint32_t mlfab__packet_begin(uint8_t *out, const mlfab__packet_shape *shape,
                                             const uint64_t *keep, uint8_t **values_p);

/* What unpacks takes a packet that mlfab__packet_open has passed; arrays are of the stretch, in its own
 * type. */

/* Zeros where nothing is kept. */
MLFAB__INTERNAL void mlfab__unpack_dense(const mlfab__packet *packet, void *out);
MLFAB__INTERNAL int mlfab__unpack_finite(const mlfab__packet *packet);
/* w += scale * u where something is kept, rounded as mlfab__kernel_add does; 0 when some scale * u is
 * not finite, or an I64's scale is none: what w holds is then unspecified. */
MLFAB__INTERNAL int mlfab__unpack_add(const mlfab__packet *packet, void *w, double scale);
/* w := u where something is kept. */
MLFAB__INTERNAL void mlfab__unpack_store(const mlfab__packet *packet, void *w);

/* The kept elements as runs: fills *first_p, *n_p with the next and returns 1, or 0 behind the last.
 * Begin with a cursor of zeros. */
typedef struct mlfab__packet_cursor {
  uint32_t grain, mark;
} mlfab__packet_cursor;
MLFAB__INTERNAL int mlfab__unpack_run(const mlfab__packet *packet, mlfab__packet_cursor *cursor,
                                      uint32_t *first_p, uint32_t *n_p);

#endif
