/* packet.h - packets: the encoding of rounded or sparse values in frames.
 *
 * A packet covers at most 65536 elements of one slice and one tensor:
 *
 *     0 u64 offset in the flat model, bytes    20 u8 form: MLFAB__PACKET_*
 *     8 u32 elements covered                   21 u8 values: MLFAB_HALF_*
 *    12 u32 kept grains (DENSE: all)           22 u8 log2 of the elements a grain (the last: fewer)
 *    16 u32 bytes of the body                  23 u8 element type
 *    24 body: bitmap (a bit a grain) or indices of grains (u16, ascending), padded to 8 bytes; the
 *       values of the kept grains, in order, padded to 8 bytes. Padding is zero.
 *
 * Packets follow one another without gaps; each is a multiple of 8 bytes and must be aligned to 8. A packer writes at
 * most mlfab__packet_bound of its elements. It returns the packet's size; 0 if it keeps no element, with unspecified
 * output. I64 cannot be sent in 16 bits. */
#ifndef MLFAB__PACKET_H
#define MLFAB__PACKET_H

#include "../base/env.h"
#include "../../mlfab_transport.h"

#define MLFAB__PACKET_ELEMENTS 65536u /* maximum number of elements in a packet */
#define MLFAB__PACKET_HEADER 24u

enum mlfab__packet_form {
  MLFAB__PACKET_DENSE = 0,
  MLFAB__PACKET_BITMAP = 1,
  MLFAB__PACKET_INDEX = 2
};

typedef struct mlfab__packet {
  uint64_t offset; /* in the flat model, bytes */
  uint32_t elements, kept, body, grains;
  uint32_t count; /* number of values: the elements of the kept grains */
  uint8_t form, value, grain_log2, dtype;
  const uint8_t *marks;  /* bitmap or indices; borrowed, like values */
  const uint8_t *values; /* `count` values */
} mlfab__packet;

/* Checks the packet at `at`, except its values. Returns its size, or 0 when it is malformed or longer than
 * `room`; never reads beyond `room`. A packet that keeps nothing is valid. The caller checks that its
 * elements belong to the model. */
MLFAB__INTERNAL uint32_t mlfab__packet_open(const uint8_t *at, uint64_t room,
                                            mlfab__packet *packet);

/* Packets are read more than once: first checked, later used. Memory that the sender still maps may change
 * in between. So the packets of a frame are copied to private memory before the check, and the frame is not
 * read afterwards. This allocates such memory, for one frame, if it is missing; its owner calls mlfab__free_aligned.
 * Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__packet_room(mlfab__env *env, uint8_t **room_p);
#define MLFAB__PACKET_ROOM MLFAB_BULK_MAX
/* Copies these bytes to that memory. */
MLFAB__INTERNAL const uint8_t *mlfab__packet_private(uint8_t *room, const void *from,
                                                     uint32_t bytes);

/* The maximum size of a packet with this many elements. */
MLFAB__INTERNAL uint64_t mlfab__packet_bound(uint32_t elements, int dtype);

/* The position and the form of a packet. */
typedef struct mlfab__packet_shape {
  uint64_t offset;
  int dtype, half;
  uint32_t grain_log2; /* at most 16 */
  uint32_t elements;   /* 1 to MLFAB__PACKET_ELEMENTS */
} mlfab__packet_shape;

/* Packs all elements. */
MLFAB__INTERNAL uint32_t mlfab__packet_dense(uint8_t *out, const mlfab__packet_shape *shape,
                                             const void *values);
/* Packs the elements of marked grains, in the smallest form; `values` is the array of all elements. Bit i
 * of keep[i / 64] is grain i; bits beyond the last are 0. may_dense: unmarked values may be sent, too, if that is
 * smaller. */
MLFAB__INTERNAL uint32_t mlfab__packet_marked(uint8_t *out, const mlfab__packet_shape *shape,
                                              const void *values, const uint64_t *keep,
                                              int may_dense);
/* Packs `kept` elements at ascending indices below shape->elements; grain_log2 counts as 0. */
MLFAB__INTERNAL uint32_t mlfab__packet_sparse(uint8_t *out, const mlfab__packet_shape *shape,
                                              const uint32_t *indices, const void *values,
                                              uint32_t kept);
/* Writes a packet except its values, in the smallest form. *values_p: place for one value of each marked element (of
 * the type, or uint16_t). The caller must write them, for instance with mlfab__filter_emit. */
MLFAB__INTERNAL uint32_t mlfab__packet_begin(uint8_t *out, const mlfab__packet_shape *shape,
                                             const uint64_t *keep, uint8_t **values_p);

/* The unpack functions take a packet that mlfab__packet_open has accepted; arrays hold the covered
 * elements, in their type. */

/* With zeros for elements that are not kept. */
MLFAB__INTERNAL void mlfab__unpack_dense(const mlfab__packet *packet, void *out);
MLFAB__INTERNAL int mlfab__unpack_finite(const mlfab__packet *packet);
/* w += scale * u for kept elements, rounded as in mlfab__kernel_add. Returns 0 if a product is infinite or NaN, or the
 * scale of I64 is invalid. The contents of w are unspecified then. */
MLFAB__INTERNAL int mlfab__unpack_add(const mlfab__packet *packet, void *w, double scale);
/* w = u for kept elements. */
MLFAB__INTERNAL void mlfab__unpack_store(const mlfab__packet *packet, void *w);

/* Iterates over the kept elements as runs: sets *first_p and *n_p to the next run and returns 1, or 0
 * behind the last. Begin with a cursor of zeros. */
typedef struct mlfab__packet_cursor {
  uint32_t grain, mark;
} mlfab__packet_cursor;
MLFAB__INTERNAL int mlfab__unpack_run(const mlfab__packet *packet, mlfab__packet_cursor *cursor,
                                      uint32_t *first_p, uint32_t *n_p);

#endif
