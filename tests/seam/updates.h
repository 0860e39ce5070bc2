/* updates.h - random updates of stretches of a model, dense or as packets, and their literal sum: for tests of nodes that take
 * packets. */
#ifndef MLFAB_TEST_UPDATES_H
#define MLFAB_TEST_UPDATES_H

#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "core/kernels/packet.h"
#include "core/model/layout.h"
#include "tests/unit/scale.h"

#include <math.h>
#include "tests/seam/scene.h"

enum { UPDATE_SEGMENTS = 8 };

/* The seeds of a random test: as many as usual, or the one of MLFAB_SEED. */
static uint64_t first_seed, last_seed;

static inline void seeds(double usual) {
  first_seed = test_number("MLFAB_SEED", 1);
  last_seed = test_seed() ? first_seed : test_cases(usual);
}

/* Segments of the model, one after another. */
typedef struct shape {
  mlfab__segment segments[256];
  uint32_t n;
  uint64_t bytes;
} shape;

/* An update: its values, and as packets; the test sends one or the other. */
typedef struct update {
  uint8_t *dense, *packets, *data;
  uint64_t bytes; /* of data */
} update;

static inline void random_segments(mlfab__rng *prng, const mlfab__layout *layout, uint32_t server,
                                   shape *s) {
  uint64_t begin, end;
  mlfab__layout_run(layout, server, 0, &begin, &end);
  memset(s, 0, sizeof *s);
  if (mlfab__rng_below(prng, 3) == 0 || end - begin > 1 << 20) {
    s->segments[s->n++] = (mlfab__segment){begin, end - begin};
  } else {
    for (uint64_t at = begin; at < end && s->n < UPDATE_SEGMENTS;) {
      uint64_t stop = mlfab__min(end, at + 8 + 8 * mlfab__rng_below(prng, 1200));
      mlfab__segment segment = {at, stop - at};
      if (mlfab__layout_valid(layout, server, &segment)) s->segments[s->n++] = segment;
      at = stop + 8 * (1 + mlfab__rng_below(prng, 20));
    }
  }
  for (uint32_t i = 0; i < s->n; i++) s->bytes += s->segments[i].bytes;
}

/* The position of a model byte in the shape. */
static inline uint64_t place_of(const shape *s, uint64_t offset) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < s->n; i++) {
    if (offset - s->segments[i].offset < s->segments[i].bytes)
      return at + offset - s->segments[i].offset;
    at += s->segments[i].bytes;
  }
  fail_msg("an offset outside the shape");
  return 0;
}

/* The element type at a position, and how many elements follow it in one tensor, slice and segment. */
static inline int piece_at(const mlfab__layout *layout, const shape *s, uint64_t at,
                           uint64_t *offset_p, uint32_t *elements_p) {
  uint32_t i = 0;
  while (at >= s->segments[i].bytes) at -= s->segments[i++].bytes;
  uint64_t offset = s->segments[i].offset + at, end = offset + s->segments[i].bytes - at;
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, offset);
  const mlfab__slice *slice = &layout->slices[mlfab__layout_slice_at(layout, offset)];
  end = mlfab__min(end, tensor->offset + tensor->bytes);
  end = mlfab__min(end, slice->offset + slice->bytes);
  uint64_t elements = (end - offset) / mlfab__dtype_bytes((int)tensor->dtype);
  *offset_p = offset;
  *elements_p = (uint32_t)mlfab__min(elements, MLFAB__PACKET_ELEMENTS);
  return (int)tensor->dtype;
}

static inline void random_values(mlfab__rng *prng, int dtype, int whole, void *values, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    double x = whole ? (double)mlfab__rng_below(prng, 9) - 4.0 : mlfab__rng_unit(prng) - 0.5;
    if (mlfab__rng_below(prng, 20) == 0) x = mlfab__rng_below(prng, 2) ? 0.0 : -0.0;
    if (dtype == MLFAB_F32) ((float *)values)[i] = (float)x;
    if (dtype == MLFAB_F64) ((double *)values)[i] = whole ? x : x * 1e3;
    if (dtype == MLFAB_I64)
      ((uint64_t *)values)[i] = whole ? (uint64_t)(int64_t)x : mlfab__rng_next(prng);
  }
}

/* A packet of a random form. Returns its size, 0 when nothing is kept. */
static inline uint32_t random_packet(mlfab__rng *prng, uint8_t *out, mlfab__packet_shape *ps,
                                     int whole, uint64_t most) {
  static double values[MLFAB__PACKET_ELEMENTS];
  static uint64_t keep[MLFAB__PACKET_ELEMENTS / 64];
  static uint32_t indices[MLFAB__PACKET_ELEMENTS];
  uint64_t rate = mlfab__rng_below(prng, most + 1);
  random_values(prng, ps->dtype, whole, values, ps->elements);
  ps->half = ps->dtype == MLFAB_I64 || mlfab__rng_below(prng, 2)
                 ? MLFAB_HALF_NONE
                 : 1 + (int)mlfab__rng_below(prng, 2);
  ps->grain_log2 = mlfab__rng_below(prng, 3) ? 0 : (uint32_t)mlfab__rng_below(prng, 7);
  if (rate >= 90) return mlfab__packet_dense(out, ps, values);
  memset(keep, 0, sizeof keep);
  uint32_t kept = 0, grains = ((ps->elements - 1) >> ps->grain_log2) + 1;
  for (uint32_t g = 0; g < grains; g++) {
    if (mlfab__rng_below(prng, 100) >= rate) continue;
    keep[g / 64] |= 1ull << g % 64;
    indices[kept++] = g;
  }
  if (ps->grain_log2 == 0 && mlfab__rng_below(prng, 2)) /* the first `kept` of the values */
    return mlfab__packet_sparse(out, ps, indices, values, kept);
  return mlfab__packet_marked(out, ps, values, keep, (int)mlfab__rng_below(prng, 2));
}

/* Random values; packed: at least one random packet, and the dense values that it stands for. whole: of small integers. */
static inline void random_update(mlfab__rng *prng, const mlfab__layout *layout, const shape *s,
                                 int packed, int whole, uint64_t most, update *u) {
  uint64_t longest =
      mlfab__rng_below(prng, 4) ? MLFAB__PACKET_ELEMENTS : 1 + mlfab__rng_below(prng, 12);
  u->dense = calloc(1, s->bytes);
  u->packets = packed ? malloc(10 * s->bytes + (1 << 16)) : NULL;
  assert_true(u->dense && (u->packets || !packed));
  u->data = packed ? u->packets : u->dense;
  u->bytes = packed ? 0 : s->bytes;
  for (uint64_t at = 0; at < s->bytes;) {
    mlfab__packet_shape piece;
    mlfab__packet packet;
    memset(&piece, 0, sizeof piece);
    piece.dtype = piece_at(layout, s, at, &piece.offset, &piece.elements);
    if (!packed) random_values(prng, piece.dtype, whole, u->dense + at, piece.elements);
    if (packed && mlfab__rng_below(prng, 2))
      piece.elements = 1 + (uint32_t)mlfab__rng_below(prng, mlfab__min(longest, piece.elements));
    uint64_t end = at + (uint64_t)piece.elements * mlfab__dtype_bytes(piece.dtype);
    int last = end == s->bytes && u->bytes == 0;
    if (packed && (mlfab__rng_below(prng, 5) > 0 || last)) {
      uint8_t *out = u->packets + u->bytes;
      double zero = 0.0;
      uint32_t n = random_packet(prng, out, &piece, whole, most);
      if (n == 0 && last) {
        piece.elements = 1;
        n = mlfab__packet_dense(out, &piece, &zero);
      }
      if (n > 0) assert_int_equal(mlfab__packet_open(out, n, &packet), n);
      if (n > 0) mlfab__unpack_dense(&packet, u->dense + at);
      u->bytes += n;
    }
    at = end;
  }
}

/* The size of the packet at `at`. */
static inline uint32_t packet_bytes(const update *u, uint64_t at) {
  mlfab__packet packet;
  uint32_t n = mlfab__packet_open(u->packets + at, u->bytes - at, &packet);
  assert_true(n > 0);
  return n;
}

/* Adds w * u to the sum so far, element by element; storing each result keeps its rounding. */
static inline void literal_add(const mlfab__layout *layout, const shape *s, uint8_t *sum,
                               const uint8_t *u, double w, int first) {
  for (uint64_t at = 0, offset; at < s->bytes;) {
    uint32_t n;
    int dtype = piece_at(layout, s, at, &offset, &n);
    for (uint32_t i = 0; i < n; i++) {
      if (dtype == MLFAB_F32) {
        float *to = (float *)(void *)(sum + at);
        volatile float product = (float)w * *(const float *)(const void *)(u + at);
        *to = first ? product : *to + product;
      } else if (dtype == MLFAB_F64) {
        double *to = (double *)(void *)(sum + at);
        volatile double product = w * *(const double *)(const void *)(u + at);
        *to = first ? product : *to + product;
      } else {
        uint64_t *to = (uint64_t *)(void *)(sum + at);
        *to = (first ? 0 : *to) + (uint64_t)(int64_t)w * *(const uint64_t *)(const void *)(u + at);
      }
      at += mlfab__dtype_bytes(dtype);
    }
  }
}

/* Adds w * u to the stretches of the model that u changes. */
static inline void literal_apply(const mlfab__layout *layout, const shape *s, uint8_t *model,
                                 const uint8_t *u, double w) {
  uint64_t from = 0;
  for (uint32_t k = 0; k < s->n; k++) {
    const shape one = {{s->segments[k]}, 1, s->segments[k].bytes};
    literal_add(layout, &one, model + one.segments[0].offset, u + from, w, 0);
    from += one.bytes;
  }
}

/* Equal but for the sign of zeros. */
static inline int same_values(const mlfab__layout *layout, const shape *s, const uint8_t *a,
                              const uint8_t *b) {
  for (uint64_t at = 0, offset; at < s->bytes;) {
    uint32_t n;
    int dtype = piece_at(layout, s, at, &offset, &n);
    uint32_t width = mlfab__dtype_bytes(dtype);
    for (uint32_t i = 0; i < n; i++, at += width) {
      int same = memcmp(a + at, b + at, width) == 0;
      if (dtype == MLFAB_F32)
        same |= *(const float *)(const void *)(a + at) == *(const float *)(const void *)(b + at);
      if (dtype == MLFAB_F64)
        same |= *(const double *)(const void *)(a + at) == *(const double *)(const void *)(b + at);
      if (!same) return 0;
    }
  }
  return 1;
}

static inline void free_update(update *u) {
  free(u->dense);
  free(u->packets);
  memset(u, 0, sizeof *u);
}

/* Puts a value that is not finite into an update, if it has a float there: a packed one has it in its first packet. Returns 1 when
 * it did. */
static inline int spoil(mlfab__rng *prng, const mlfab__layout *layout, const shape *s, update *u) {
  uint64_t at = mlfab__rng_below(prng, s->bytes) / 8 * 8, offset;
  uint32_t elements;
  mlfab__packet packet;
  uint8_t *to = u->dense + at;
  int dtype = piece_at(layout, s, at, &offset, &elements), half = MLFAB_HALF_NONE;
  if (u->packets) {
    mlfab__packet_open(u->packets, u->bytes, &packet);
    if (packet.count == 0) return 0;
    to = (uint8_t *)(uintptr_t)packet.values;
    dtype = packet.dtype;
    half = packet.value;
  }
  double bad = u->packets || mlfab__rng_below(prng, 2) ? (double)NAN : (double)INFINITY;
  float bad32 = (float)bad;
  if (dtype == MLFAB_I64) return 0;
  if (half != MLFAB_HALF_NONE)
    memset(to, 0xff, 2);
  else if (dtype == MLFAB_F32)
    memcpy(to, &bad32, 4);
  else
    memcpy(to, &bad, 8);
  return 1;
}

#endif
