/* packet.c - packets: the encoding of rounded or sparse values in frames.
 *
 * For: writing packets, and reading untrusted packets. Callers choose the elements to keep, send packets, and check
 * that the elements are in one slice.
 *
 * Invariants: a packet that passes mlfab__packet_open is safe to unpack while its bytes do not change:
 * marks are counted and in range, and lengths follow from them. Equal contents give equal packets: the
 * smallest form, with zero padding. Values added from a packet are rounded as in a dense push: the product
 * in the type of the tensor, stored, then the sum.
 *
 * Source: TDF §4.3 leaves the encoding open; its text suggests values with their indices. */
#include "packet.h"

#include "half.h"
#include "kernels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PACKET_X86 1
#include <immintrin.h>
#define PACKET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt")))
#else
#define PACKET_X86 0
#endif

/* Values decoded at a time: fits the stack and the L1 cache. */
#define PACKET_STAGE 1024u

/* Offsets in the header. */
enum { PACKET_AT_ELEMENTS = 8, PACKET_AT_KEPT = 12, PACKET_AT_BODY = 16, PACKET_AT_FORM = 20 };

typedef union packet_stage {
  float f32[PACKET_STAGE];
  double f64[PACKET_STAGE];
  int64_t i64[PACKET_STAGE];
  uint64_t word[PACKET_STAGE];
} packet_stage;

static inline uint32_t packet_pad(uint32_t bytes) { return (bytes + 7) & ~7u; }

#if PACKET_X86
__attribute__((target("popcnt"))) static uint32_t packet_sum_popcnt(const uint8_t *marks,
                                                                    uint32_t words) {
  uint64_t sum = 0, word;
  for (uint32_t i = 0; i < words; i++) {
    memcpy(&word, marks + (size_t)i * 8, sizeof word);
    sum += (uint64_t)_mm_popcnt_u64(word);
  }
  return (uint32_t)sum;
}
#endif

static inline uint64_t packet_word(const uint8_t *marks, uint32_t i) {
  uint64_t word;
  memcpy(&word, marks + (size_t)i * 8, sizeof word);
  return word;
}

/* The number of set bits among n. */
static uint32_t packet_sum(const uint8_t *marks, uint32_t n) {
  uint32_t words = (n + 63) / 64, sum = 0;
#if PACKET_X86
  if (__builtin_cpu_supports("popcnt")) return packet_sum_popcnt(marks, words);
#endif
  for (uint32_t i = 0; i < words; i++) sum += mlfab__bits(packet_word(marks, i));
  return sum;
}

static inline uint32_t packet_index(const uint8_t *marks, uint32_t i) {
  uint16_t index;
  memcpy(&index, marks + (size_t)i * 2, sizeof index);
  return index;
}

static inline uint32_t packet_width(int dtype, int half) {
  return half == MLFAB_HALF_NONE ? mlfab__dtype_bytes(dtype) : 2;
}

static uint32_t packet_marks_bytes(int form, uint32_t grains, uint32_t kept) {
  if (form == MLFAB__PACKET_BITMAP) return packet_pad((grains + 7) / 8);
  return form == MLFAB__PACKET_INDEX ? packet_pad(2 * kept) : 0;
}

/* The elements of the kept grains; the last grain of the packet may be shorter. */
static uint32_t packet_count(uint32_t elements, uint32_t grain_log2, uint32_t kept, int last) {
  uint32_t count = kept << grain_log2, more = (0 - elements) & ((1u << grain_log2) - 1);
  return last ? count - more : count;
}

static uint32_t packet_grains(uint32_t elements, uint32_t grain_log2) {
  return (uint32_t)(((uint64_t)elements + (1u << grain_log2) - 1) >> grain_log2);
}

MLFAB__INTERNAL uint64_t mlfab__packet_bound(uint32_t elements, int dtype) {
  return MLFAB__PACKET_HEADER + packet_pad((elements + 7) / 8) +
         packet_pad(elements * mlfab__dtype_bytes(dtype));
}

/* ---- received packets ---- */

MLFAB__INTERNAL int mlfab__packet_room(mlfab__env *env, uint8_t **room_p) {
  if (!*room_p) *room_p = mlfab__alloc_aligned(env, MLFAB__PACKET_ROOM);
  return *room_p ? 0 : MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL const uint8_t *mlfab__packet_private(uint8_t *room, const void *from,
                                                     uint32_t bytes) {
  assert(bytes <= MLFAB__PACKET_ROOM);
  if (bytes > 0) memcpy(room, from, bytes);
  return room;
}

/* ---- reading ---- */

/* Are the bits from `n` on zero, and `kept` of the others set? *last_p: bit n - 1. */
static int packet_check_bitmap(const uint8_t *marks, uint32_t n, uint32_t kept, int *last_p) {
  uint64_t end = packet_word(marks, (n - 1) / 64) >> ((n - 1) % 64);
  *last_p = (int)(end & 1);
  return end <= 1 && packet_sum(marks, n) == kept;
}

static int packet_check_indices(const uint8_t *marks, uint32_t n, uint32_t kept, int *last_p) {
  uint32_t next = 0;
  for (uint32_t i = 0; i < kept; i++) {
    uint32_t index = packet_index(marks, i);
    if (index < next || index >= n) return 0;
    next = index + 1;
  }
  *last_p = next == n;
  return 1;
}

static int packet_is_zero(const uint8_t *at, const uint8_t *end) {
  while (at < end)
    if (*at++ != 0) return 0;
  return 1;
}

static void packet_read_header(const uint8_t *at, mlfab__packet *packet) {
  memcpy(&packet->offset, at, 8);
  memcpy(&packet->elements, at + PACKET_AT_ELEMENTS, 4);
  memcpy(&packet->kept, at + PACKET_AT_KEPT, 4);
  memcpy(&packet->body, at + PACKET_AT_BODY, 4);
  packet->form = at[PACKET_AT_FORM];
  packet->value = at[PACKET_AT_FORM + 1];
  packet->grain_log2 = at[PACKET_AT_FORM + 2];
  packet->dtype = at[PACKET_AT_FORM + 3];
}

static int packet_check_header(const mlfab__packet *packet) {
  uint32_t width = mlfab__dtype_bytes(packet->dtype);
  if (width == 0 || packet->form > MLFAB__PACKET_INDEX || packet->value > MLFAB_HALF_BF16) return 0;
  if (packet->value != MLFAB_HALF_NONE && packet->dtype == MLFAB_I64) return 0;
  if (packet->elements == 0 || packet->elements > MLFAB__PACKET_ELEMENTS) return 0;
  return packet->grain_log2 <= 16 && packet->offset % width == 0 &&
         packet->offset <= UINT64_MAX - (uint64_t)packet->elements * width;
}

MLFAB__INTERNAL uint32_t mlfab__packet_open(const uint8_t *at, uint64_t room,
                                            mlfab__packet *packet) {
  mlfab__packet p = {0};
  int last = 1;
  if (room < MLFAB__PACKET_HEADER) return 0;
  packet_read_header(at, &p);
  if (!packet_check_header(&p)) return 0;
  p.grains = packet_grains(p.elements, p.grain_log2);
  if (p.kept > p.grains || (p.form == MLFAB__PACKET_DENSE && p.kept < p.grains)) return 0;
  uint32_t marks = packet_marks_bytes(p.form, p.grains, p.kept);
  if (room - MLFAB__PACKET_HEADER < marks) return 0;
  p.marks = at + MLFAB__PACKET_HEADER;
  p.values = p.marks + marks;
  if (p.form == MLFAB__PACKET_BITMAP && !packet_check_bitmap(p.marks, p.grains, p.kept, &last))
    return 0;
  if (p.form == MLFAB__PACKET_INDEX && (!packet_check_indices(p.marks, p.grains, p.kept, &last) ||
                                        !packet_is_zero(p.marks + (size_t)p.kept * 2, p.values)))
    return 0;
  p.count = packet_count(p.elements, p.grain_log2, p.kept, last);
  uint32_t bytes = p.count * packet_width(p.dtype, p.value);
  if (p.body != marks + packet_pad(bytes) || room - MLFAB__PACKET_HEADER < p.body) return 0;
  if (!packet_is_zero(p.values + bytes, p.marks + p.body)) return 0;
  *packet = p;
  return MLFAB__PACKET_HEADER + p.body;
}

/* ---- writing ---- */

/* Writes n values of the tensor's type in the packet's form. */
static void packet_put(uint8_t *out, int dtype, int half, const void *values, uint32_t n) {
  packet_stage stage;
  if (half == MLFAB_HALF_NONE) {
    memcpy(out, values, (size_t)n * mlfab__dtype_bytes(dtype));
    return;
  }
  uint16_t *halves = (uint16_t *)(void *)out;
  if (dtype == MLFAB_F32) {
    mlfab__half_store(half, halves, (const float *)values, n);
    return;
  }
  for (uint32_t at = 0; at < n; at += PACKET_STAGE) {
    uint32_t count = n - at < PACKET_STAGE ? n - at : PACKET_STAGE;
    for (uint32_t i = 0; i < count; i++)
      stage.f32[i] = mlfab__half_narrow(((const double *)values)[at + i]);
    mlfab__half_store(half, halves + at, stage.f32, count);
  }
}

/* Writes the header, and zeros in the places of possible padding; later writes cover the rest of these. Returns the
 * address for the values; *packet is as mlfab__packet_open will set it. */
static uint8_t *packet_header(uint8_t *out, const mlfab__packet_shape *shape, int form,
                              uint32_t kept, int last, mlfab__packet *packet) {
  mlfab__packet p = {.offset = shape->offset,
                     .elements = shape->elements,
                     .kept = kept,
                     .grains = packet_grains(shape->elements, shape->grain_log2),
                     .form = (uint8_t)form,
                     .value = (uint8_t)shape->half,
                     .grain_log2 = (uint8_t)shape->grain_log2,
                     .dtype = (uint8_t)shape->dtype};
  uint32_t marks = packet_marks_bytes(form, p.grains, kept);
  p.count = packet_count(p.elements, p.grain_log2, kept, last);
  p.body = marks + packet_pad(p.count * packet_width(shape->dtype, shape->half));
  p.marks = out + MLFAB__PACKET_HEADER;
  p.values = p.marks + marks;
  memcpy(out, &p.offset, 8);
  memcpy(out + PACKET_AT_ELEMENTS, &p.elements, 4);
  memcpy(out + PACKET_AT_KEPT, &p.kept, 4);
  memcpy(out + PACKET_AT_BODY, &p.body, 4);
  out[PACKET_AT_FORM] = p.form;
  out[PACKET_AT_FORM + 1] = p.value;
  out[PACKET_AT_FORM + 2] = p.grain_log2;
  out[PACKET_AT_FORM + 3] = p.dtype;
  uint8_t *body = out + MLFAB__PACKET_HEADER;
  if (marks > 0) memset(body + marks - 8, 0, 8);
  if (p.body > marks) memset(body + p.body - 8, 0, 8);
  *packet = p;
  return body + marks;
}

static int packet_smaller(uint32_t grains, uint32_t kept) {
  return packet_marks_bytes(MLFAB__PACKET_INDEX, grains, kept) <
                 packet_marks_bytes(MLFAB__PACKET_BITMAP, grains, kept)
             ? MLFAB__PACKET_INDEX
             : MLFAB__PACKET_BITMAP;
}

static void packet_write_marks(uint8_t *marks, const mlfab__packet *packet, const uint64_t *keep) {
  uint32_t words = (packet->grains + 63) / 64;
  if (packet->form == MLFAB__PACKET_BITMAP) memcpy(marks, keep, (size_t)words * 8);
  if (packet->form != MLFAB__PACKET_INDEX) return;
  for (uint32_t i = 0; i < words; i++) {
    /* With few marks, most words have one mark or none. The first index is written without a branch; if there is none,
     * a zero is written, which the next index, padding or value overwrites. */
    uint64_t word = keep[i];
    uint32_t any = word != 0, first = mlfab__lowest(word | (uint64_t)1 << 63);
    uint16_t index = (uint16_t)((i * 64 + first) * any);
    memcpy(marks, &index, sizeof index);
    marks += any * sizeof index;
    for (word &= word - any; word != 0; word &= word - 1) {
      index = (uint16_t)(i * 64 + mlfab__lowest(word));
      memcpy(marks, &index, sizeof index);
      marks += sizeof index;
    }
  }
}

/* Writes header and marks; NULL when nothing is marked. */
static uint8_t *packet_prepare(uint8_t *out, const mlfab__packet_shape *shape, const uint64_t *keep,
                               int may_dense, mlfab__packet *packet) {
  uint32_t grains = packet_grains(shape->elements, shape->grain_log2);
  uint32_t width = packet_width(shape->dtype, shape->half);
  uint32_t kept = packet_sum((const uint8_t *)keep, grains);
  if (kept == 0) return NULL;
  int form = packet_smaller(grains, kept),
      last = (int)(keep[(grains - 1) / 64] >> ((grains - 1) % 64) & 1);
  uint32_t count = packet_count(shape->elements, shape->grain_log2, kept, last);
  uint32_t bytes = packet_marks_bytes(form, grains, kept) + packet_pad(count * width);
  if (kept == grains || (may_dense && packet_pad(shape->elements * width) <= bytes)) {
    form = MLFAB__PACKET_DENSE;
    kept = grains;
    last = 1;
  }
  uint8_t *values = packet_header(out, shape, form, kept, last, packet);
  packet_write_marks(out + MLFAB__PACKET_HEADER, packet, keep);
  return values;
}

MLFAB__INTERNAL uint32_t mlfab__packet_begin(uint8_t *out, const mlfab__packet_shape *shape,
                                             const uint64_t *keep, uint8_t **values_p) {
  mlfab__packet packet;
  uint8_t *values = packet_prepare(out, shape, keep, 0, &packet);
  if (values == NULL) return 0;
  *values_p = values;
  return MLFAB__PACKET_HEADER + packet.body;
}

MLFAB__INTERNAL uint32_t mlfab__packet_dense(uint8_t *out, const mlfab__packet_shape *shape,
                                             const void *values) {
  mlfab__packet packet;
  uint32_t grains = packet_grains(shape->elements, shape->grain_log2);
  uint8_t *at = packet_header(out, shape, MLFAB__PACKET_DENSE, grains, 1, &packet);
  packet_put(at, shape->dtype, shape->half, values, shape->elements);
  return MLFAB__PACKET_HEADER + packet.body;
}

MLFAB__INTERNAL uint32_t mlfab__packet_sparse(uint8_t *out, const mlfab__packet_shape *shape,
                                              const uint32_t *indices, const void *values,
                                              uint32_t kept) {
  mlfab__packet_shape single = *shape;
  mlfab__packet packet;
  single.grain_log2 = 0;
  if (kept == 0) return 0;
  int form = kept == shape->elements ? MLFAB__PACKET_DENSE : packet_smaller(shape->elements, kept);
  uint8_t *at = packet_header(out, &single, form, kept, 1, &packet);
  uint8_t *marks = out + MLFAB__PACKET_HEADER;
  if (form == MLFAB__PACKET_BITMAP) {
    memset(marks, 0, (size_t)(at - marks));
    for (uint32_t i = 0; i < kept; i++)
      marks[indices[i] / 8] = (uint8_t)(marks[indices[i] / 8] | 1u << indices[i] % 8);
  } else if (form == MLFAB__PACKET_INDEX) {
    for (uint32_t i = 0; i < kept; i++) {
      uint16_t index = (uint16_t)indices[i];
      memcpy(marks + (size_t)i * 2, &index, sizeof index);
    }
  }
  packet_put(at, shape->dtype, shape->half, values, kept);
  return MLFAB__PACKET_HEADER + packet.body;
}

/* ---- runs ---- */

/* The first bit from `at` on that equals `set`, or n. */
static uint32_t packet_find(const uint8_t *marks, uint32_t at, uint32_t n, int set) {
  while (at < n) {
    uint64_t word = packet_word(marks, at / 64);
    word = (set ? word : ~word) >> (at % 64);
    if (word != 0) return (uint32_t)mlfab__min(n, at + mlfab__lowest(word));
    at = (at | 63) + 1;
  }
  return n;
}

MLFAB__INTERNAL int mlfab__unpack_run(const mlfab__packet *packet, mlfab__packet_cursor *cursor,
                                      uint32_t *first_p, uint32_t *n_p) {
  uint32_t begin = cursor->grain, end = packet->grains;
  if (packet->form == MLFAB__PACKET_BITMAP) {
    begin = packet_find(packet->marks, begin, packet->grains, 1);
    end = packet_find(packet->marks, begin, packet->grains, 0);
  } else if (packet->form == MLFAB__PACKET_INDEX) {
    if (cursor->mark == packet->kept) return 0;
    begin = packet_index(packet->marks, cursor->mark++);
    end = begin + 1;
    while (cursor->mark < packet->kept && packet_index(packet->marks, cursor->mark) == end)
      cursor->mark++, end++;
  }
  if (begin == packet->grains) return 0;
  cursor->grain = end;
  *first_p = begin << packet->grain_log2;
  *n_p = (uint32_t)mlfab__min(packet->elements, (uint64_t)end << packet->grain_log2) - *first_p;
  return 1;
}

/* ---- values ---- */

/* Values k to k + n of a packet in the tensor's type: in place, or decoded to the stage, which has room for
 * n. */
static const void *packet_values(const mlfab__packet *packet, uint32_t k, uint32_t n,
                                 packet_stage *stage) {
  const uint8_t *at = packet->values + (size_t)k * packet_width(packet->dtype, packet->value);
  const uint16_t *halves = (const uint16_t *)(const void *)at;
  if (packet->value == MLFAB_HALF_NONE) return at;
  if (packet->dtype == MLFAB_F32) {
    mlfab__half_load(packet->value, stage->f32, halves, n);
  } else {
    for (uint32_t i = 0; i < n; i++)
      stage->f64[i] = (double)mlfab__half_back(packet->value, halves[i]);
  }
  return stage;
}

MLFAB__INTERNAL int mlfab__unpack_finite(const mlfab__packet *packet) {
  if (packet->value == MLFAB_HALF_NONE)
    return mlfab__kernel_finite(packet->dtype, packet->values, packet->count);
  return mlfab__half_finite(packet->value, (const uint16_t *)(const void *)packet->values,
                            packet->count);
}

/* ---- single elements ---- */

/* gather: array to values; scatter and place: values to array, or added to it. n elements of the array have
 * marks; marks beyond are 0. */
#define PACKET_SINGLES(type, name)                                                       \
  static void pack_gather_##name(type *values, const type *array, const uint8_t *marks,  \
                                 uint32_t n) {                                           \
    for (uint32_t at = 0; at < n; at += 64)                                              \
      for (uint64_t word = packet_word(marks, at / 64); word != 0; word &= word - 1)     \
        *values++ = array[at + mlfab__lowest(word)];                                     \
  }                                                                                      \
  static void pack_scatter_##name(type *array, const type *values, const uint8_t *marks, \
                                  uint32_t n, int add) {                                 \
    for (uint32_t at = 0; at < n; at += 64)                                              \
      for (uint64_t word = packet_word(marks, at / 64); word != 0; word &= word - 1) {   \
        type *to = array + at + mlfab__lowest(word);                                     \
        *to = add ? (type)(*to + *values) : *values;                                     \
        values++;                                                                        \
      }                                                                                  \
  }                                                                                      \
  static void pack_place_##name(type *array, const type *values, const uint8_t *indices, \
                                uint32_t n, int add) {                                   \
    for (uint32_t k = 0; k < n; k++) {                                                   \
      type *to = array + packet_index(indices, k);                                       \
      *to = add ? (type)(*to + values[k]) : values[k];                                   \
    }                                                                                    \
  }

PACKET_SINGLES(float, f32)
PACKET_SINGLES(double, f64)
PACKET_SINGLES(uint64_t, u64)

#if PACKET_X86
PACKET_AVX512 static void packet_gather_avx512(float *values, const float *array,
                                               const uint8_t *marks, uint32_t n) {
  for (uint32_t i = 0; i < n; i += 16) {
    __mmask16 mask = (__mmask16)(packet_word(marks, i / 64) >> (i % 64));
    uint32_t count = (uint32_t)_mm_popcnt_u32(mask);
    __m512 x = _mm512_maskz_compress_ps(mask, _mm512_maskz_loadu_ps(mask, array + i));
    _mm512_mask_storeu_ps(values, (__mmask16)((1u << count) - 1), x);
    values += count;
  }
}

PACKET_AVX512 static void packet_scatter_avx512(float *array, const float *values,
                                                const uint8_t *marks, uint32_t n, int add) {
  for (uint32_t i = 0; i < n; i += 16) {
    __mmask16 mask = (__mmask16)(packet_word(marks, i / 64) >> (i % 64));
    uint32_t count = (uint32_t)_mm_popcnt_u32(mask);
    __m512 x = _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), values);
    x = _mm512_maskz_expand_ps(mask, x);
    if (add) x = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, array + i), x);
    _mm512_mask_storeu_ps(array + i, mask, x);
    values += count;
  }
}
#endif

static void packet_gather(int dtype, void *values, const void *array, const uint8_t *marks,
                          uint32_t n) {
#if PACKET_X86
  if (dtype == MLFAB_F32 && mlfab__kernel_level() >= 2) {
    packet_gather_avx512((float *)values, (const float *)array, marks, n);
    return;
  }
#endif
  if (dtype == MLFAB_F32)
    pack_gather_f32((float *)values, (const float *)array, marks, n);
  else if (dtype == MLFAB_F64)
    pack_gather_f64((double *)values, (const double *)array, marks, n);
  else
    pack_gather_u64((uint64_t *)values, (const uint64_t *)array, marks, n);
}

static void packet_scatter(int dtype, void *array, const void *values, const uint8_t *marks,
                           uint32_t n, int add) {
#if PACKET_X86
  if (dtype == MLFAB_F32 && mlfab__kernel_level() >= 2) {
    packet_scatter_avx512((float *)array, (const float *)values, marks, n, add);
    return;
  }
#endif
  if (dtype == MLFAB_F32)
    pack_scatter_f32((float *)array, (const float *)values, marks, n, add);
  else if (dtype == MLFAB_F64)
    pack_scatter_f64((double *)array, (const double *)values, marks, n, add);
  else
    pack_scatter_u64((uint64_t *)array, (const uint64_t *)values, marks, n, add);
}

static void packet_place(int dtype, void *array, const void *values, const uint8_t *indices,
                         uint32_t n, int add) {
  if (dtype == MLFAB_F32)
    pack_place_f32((float *)array, (const float *)values, indices, n, add);
  else if (dtype == MLFAB_F64)
    pack_place_f64((double *)array, (const double *)values, indices, n, add);
  else
    pack_place_u64((uint64_t *)array, (const uint64_t *)values, indices, n, add);
}

MLFAB__INTERNAL uint32_t mlfab__packet_marked(uint8_t *out, const mlfab__packet_shape *shape,
                                              const void *values, const uint64_t *keep,
                                              int may_dense) {
  mlfab__packet packet;
  const uint8_t *array = (const uint8_t *)values, *marks = (const uint8_t *)keep;
  uint32_t bytes = mlfab__dtype_bytes(shape->dtype),
           width = packet_width(shape->dtype, shape->half);
  uint8_t *at = packet_prepare(out, shape, keep, may_dense, &packet);
  if (at == NULL) return 0;
  if (packet.form == MLFAB__PACKET_DENSE || shape->grain_log2 > 0) {
    mlfab__packet_cursor cursor = {0, 0};
    for (uint32_t first, n; mlfab__unpack_run(&packet, &cursor, &first, &n);) {
      packet_put(at, shape->dtype, shape->half, array + (size_t)first * bytes, n);
      at += (size_t)n * width;
    }
    return MLFAB__PACKET_HEADER + packet.body;
  }
  for (uint32_t first = 0; first < shape->elements; first += PACKET_STAGE) {
    packet_stage stage;
    uint32_t n = (uint32_t)mlfab__min(shape->elements - first, PACKET_STAGE);
    uint32_t count = packet_sum(marks + first / 8, n);
    packet_gather(shape->dtype, &stage, array + (size_t)first * bytes, marks + first / 8, n);
    packet_put(at, shape->dtype, shape->half, &stage, count);
    at += (size_t)count * width;
  }
  return MLFAB__PACKET_HEADER + packet.body;
}

/* ---- unpacking ---- */

/* Values k to k + n, times scale if they are to be added; 0 when a product is not finite. The product is
 * stored before it is added, so that no compiler fuses the two. */
static int packet_terms(const mlfab__packet *packet, uint32_t k, uint32_t n, int add, double scale,
                        packet_stage *stage, const void **terms_p) {
  *terms_p = packet_values(packet, k, n, stage);
  if (!add) return 1;
  int finite = mlfab__kernel_add(packet->dtype, stage, NULL, *terms_p, scale, n, 0);
  *terms_p = stage;
  return finite;
}

static int packet_apply_singles(const mlfab__packet *packet, uint8_t *w, int add, double scale) {
  packet_stage stage;
  const void *terms;
  uint32_t bytes = mlfab__dtype_bytes(packet->dtype);
  if (packet->form == MLFAB__PACKET_INDEX) {
    for (uint32_t k = 0; k < packet->kept; k += PACKET_STAGE) {
      uint32_t n = (uint32_t)mlfab__min(packet->kept - k, PACKET_STAGE);
      if (!packet_terms(packet, k, n, add, scale, &stage, &terms)) return 0;
      packet_place(packet->dtype, w, terms, packet->marks + (size_t)k * 2, n, add);
    }
    return 1;
  }
  for (uint32_t first = 0, k = 0; first < packet->elements; first += PACKET_STAGE) {
    const uint8_t *marks = packet->marks + first / 8;
    uint32_t n = (uint32_t)mlfab__min(packet->elements - first, PACKET_STAGE);
    uint32_t count = packet_sum(marks, n);
    if (!packet_terms(packet, k, count, add, scale, &stage, &terms)) return 0;
    packet_scatter(packet->dtype, w + (size_t)first * bytes, terms, marks, n, add);
    k += count;
  }
  return 1;
}

/* Long runs go directly to the kernels; 16-bit values through the stage. */
static int packet_apply(const mlfab__packet *packet, uint8_t *w, int add, double scale) {
  mlfab__packet_cursor cursor = {0, 0};
  packet_stage stage;
  uint32_t bytes = mlfab__dtype_bytes(packet->dtype), k = 0;
  uint32_t most = packet->value == MLFAB_HALF_NONE ? MLFAB__PACKET_ELEMENTS : PACKET_STAGE;
  if (packet->form != MLFAB__PACKET_DENSE && packet->grain_log2 == 0)
    return packet_apply_singles(packet, w, add, scale);
  for (uint32_t first, left; mlfab__unpack_run(packet, &cursor, &first, &left);) {
    for (uint32_t n; left > 0; left -= n, first += n, k += n) {
      uint8_t *at = w + (size_t)first * bytes;
      n = (uint32_t)mlfab__min(left, most);
      const void *u = packet_values(packet, k, n, &stage);
      if (!add)
        memcpy(at, u, (size_t)n * bytes);
      else if (!mlfab__kernel_add(packet->dtype, at, at, u, scale, n, 0))
        return 0;
    }
  }
  return 1;
}

MLFAB__INTERNAL int mlfab__unpack_add(const mlfab__packet *packet, void *w, double scale) {
  return packet_apply(packet, (uint8_t *)w, 1, scale);
}

MLFAB__INTERNAL void mlfab__unpack_store(const mlfab__packet *packet, void *w) {
  (void)packet_apply(packet, (uint8_t *)w, 0, 1.0);
}

MLFAB__INTERNAL void mlfab__unpack_dense(const mlfab__packet *packet, void *out) {
  if (packet->form != MLFAB__PACKET_DENSE)
    memset(out, 0, (size_t)packet->elements * mlfab__dtype_bytes(packet->dtype));
  mlfab__unpack_store(packet, out);
}
