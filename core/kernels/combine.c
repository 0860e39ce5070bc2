/* combine.c - element-wise operations of collectives. Layer 1.
 *
 * For: adding up what several workers have, in one pass over memory. Not for: updates of a model
 * and their scale (reduce.c), nor for who adds what, nor for threads.
 *
 * Invariants: an element of a result depends on the elements it is made of and on their order,
 * never on the level, on alignment, on the position in the array or on the flags of the compiler:
 * workers that compute the same sum must get the same bits. Three things guard this:
 *  - On x86 sums, products and quotients are instructions of their own. No compiler can reassociate
 *    or contract them, divide by a reciprocal, or exchange operands (of two NaNs the processor
 *    keeps the first).
 *  - Smallest and largest are chosen by integers that ascend as the numbers do, so that neither
 *    -ffinite-math-only nor -fno-signed-zeros shows.
 *  - The portable kernel also does the ragged ends for the vector kernels.
 * All inputs of a stretch are read before it is written, so a destination may be an input.
 *
 * Source: the field's collectives; their kernels are not described. */
#include "combine.h"
#include "half.h"
#include "reduce.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define COMBINE_X86 1
#include <immintrin.h>
#else
#define COMBINE_X86 0
#endif

/* Elements that the portable kernel stages: small enough for the first cache. */
#define COMBINE_STAGE 256u
/* Below this a destination may still be in a cache when it is read. */
#define COMBINE_STREAM_BYTES 65536u
/* What a vector kernel does is a multiple of this, beginning at a line unless it is little. */
#define COMBINE_LINE 64u
#define COMBINE_TURN 256u
#define COMBINE_LITTLE_BYTES 32768u
/* One array goes into several destinations in pieces that stay in the first cache. */
#define COMBINE_COPY_BYTES 16384u

#define COMBINE_F32_MOST INT32_MAX
#define COMBINE_F32_INFINITY 0x7f800000
#define COMBINE_F64_MOST INT64_MAX
#define COMBINE_F64_INFINITY 0x7ff0000000000000

MLFAB__INTERNAL uint32_t mlfab__element_bytes(int dtype) {
  return dtype == MLFAB_F16 || dtype == MLFAB_BF16 ? 2 : mlfab__dtype_bytes(dtype);
}

MLFAB__INTERNAL const char *mlfab__element_name(int dtype) {
  return dtype == MLFAB_F16 ? "F16" : dtype == MLFAB_BF16 ? "BF16" : mlfab__dtype_name(dtype);
}

MLFAB__INTERNAL const char *mlfab__op_name(int op) {
  static const char *const names[] = {"SUM", "MEAN", "MIN", "MAX", "PRODUCT", "OR"};
  return op >= 0 && (size_t)op < MLFAB__COUNT(names) ? names[op] : "unknown";
}

/* ---- halves: unlike what half.h stores, infinity and NaN are kept, and sums overflow ---- */

static int combine_half(int dtype) { return dtype == MLFAB_F16 ? MLFAB_HALF_F16 : MLFAB_HALF_BF16; }

/* A NaN stays one, and becomes a quiet one, as the instruction has it. 65520 lies halfway between
 * the largest number and the next that there would be. */
static uint16_t combine_round_f16(uint32_t bits) {
  uint32_t sign = bits >> 16 & 0x8000u, m = bits & 0x7fffffffu;
  float x;
  if (m > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (m >> 13 & 0x3ffu));
  if (m >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  memcpy(&x, &bits, sizeof x);
  return mlfab__half_one(MLFAB_HALF_F16, x);
}

static uint16_t combine_round_bf16(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* ---- the portable kernels ---- */

typedef union combine_stage {
  float f32[COMBINE_STAGE];
  double f64[COMBINE_STAGE];
  int64_t i64[COMBINE_STAGE];
} combine_stage;

/* Elsewhere one array after the other is added to a whole stage, so that sums keep their order, but
 * which of two NaNs is kept is the compiler's choice. The divisor is read again each time, or the
 * compiler would take its reciprocal. */
#if COMBINE_X86
#define COMBINE_SCALAR(name, real, instruction, operator) \
  static inline real name(real a, real b) {               \
    __asm__(instruction " %1, %0" : "+x"(a) : "x"(b));    \
    return a;                                             \
  }
#define COMBINE_QUOTIENT(name, real, instruction) COMBINE_SCALAR(name, real, instruction, /)
#else
#define COMBINE_SCALAR(name, real, instruction, operator) \
  static inline real name(real a, real b) { return a operator b; }
#define COMBINE_QUOTIENT(name, real, instruction) \
  static inline real name(real a, real b) {       \
    volatile real by = b;                         \
    return a / by;                                \
  }
#endif

COMBINE_SCALAR(combine_f32_add, float, "addss", +)
COMBINE_SCALAR(combine_f64_add, double, "addsd", +)
COMBINE_SCALAR(combine_f32_multiply, float, "mulss", *)
COMBINE_SCALAR(combine_f64_multiply, double, "mulsd", *)
COMBINE_QUOTIENT(combine_f32_quotient, float, "divss")
COMBINE_QUOTIENT(combine_f64_quotient, double, "divsd")

/* Where a number stands among all: -0 just below +0, a NaN at the end that wins. Negative numbers
 * descend with their bits, so these are turned over. */
#define COMBINE_STEPS(name, real, word, most, infinity)                                         \
  static inline word name##_rank(int op, real x) {                                              \
    word v;                                                                                     \
    memcpy(&v, &x, sizeof v);                                                                   \
    if ((v & (most)) > (infinity)) return op == MLFAB_MAX ? (most) : ~(most);                   \
    return v < 0 ? v ^ (most) : v;                                                              \
  }                                                                                             \
  static void name##_steps(int op, real *to, const real *x, size_t n) {                         \
    switch (op) {                                                                               \
      case MLFAB_MIN:                                                                           \
        for (size_t i = 0; i < n; i++)                                                          \
          if (name##_rank(op, x[i]) < name##_rank(op, to[i])) memcpy(to + i, x + i, sizeof *x); \
        return;                                                                                 \
      case MLFAB_MAX:                                                                           \
        for (size_t i = 0; i < n; i++)                                                          \
          if (name##_rank(op, x[i]) > name##_rank(op, to[i])) memcpy(to + i, x + i, sizeof *x); \
        return;                                                                                 \
      case MLFAB_PRODUCT:                                                                       \
        for (size_t i = 0; i < n; i++) to[i] = name##_multiply(to[i], x[i]);                    \
        return;                                                                                 \
      default:                                                                                  \
        for (size_t i = 0; i < n; i++) to[i] = name##_add(to[i], x[i]);                         \
    }                                                                                           \
  }

COMBINE_STEPS(combine_f32, float, int32_t, COMBINE_F32_MOST, COMBINE_F32_INFINITY)
COMBINE_STEPS(combine_f64, double, int64_t, COMBINE_F64_MOST, COMBINE_F64_INFINITY)

static void combine_i64_steps(int op, int64_t *to, const int64_t *x, size_t n) {
  switch (op) {
    case MLFAB_MIN:
      for (size_t i = 0; i < n; i++) to[i] = x[i] < to[i] ? x[i] : to[i];
      return;
    case MLFAB_MAX:
      for (size_t i = 0; i < n; i++) to[i] = x[i] > to[i] ? x[i] : to[i];
      return;
    case MLFAB_PRODUCT:
      for (size_t i = 0; i < n; i++) to[i] = (int64_t)((uint64_t)to[i] * (uint64_t)x[i]);
      return;
    case MLFAB__OP_OR:
      for (size_t i = 0; i < n; i++) to[i] |= x[i];
      return;
    default:
      for (size_t i = 0; i < n; i++) to[i] = (int64_t)((uint64_t)to[i] + (uint64_t)x[i]);
  }
}

static void combine_load(int dtype, combine_stage *stage, const void *in, uint64_t at, size_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16) {
    mlfab__half_load_with(0, combine_half(dtype), stage->f32, (const uint16_t *)in + at, n);
  } else {
    uint32_t bytes = mlfab__element_bytes(dtype);
    memcpy(stage, (const char *)in + at * bytes, n * bytes);
  }
}

static void combine_store(int dtype, void *out, uint64_t at, const combine_stage *stage, size_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16) {
    for (size_t i = 0; i < n; i++) {
      uint32_t bits;
      memcpy(&bits, &stage->f32[i], sizeof bits);
      ((uint16_t *)out)[at + i] =
          dtype == MLFAB_F16 ? combine_round_f16(bits) : combine_round_bf16(bits);
    }
  } else {
    uint32_t bytes = mlfab__element_bytes(dtype);
    memcpy((char *)out + at * bytes, stage, n * bytes);
  }
}

/* The elements from..to-1. */
static void combine_portable(int op, int dtype, void *const *dst, uint32_t ndst,
                             const void *const *in, uint32_t k, uint64_t from, uint64_t to) {
  combine_stage sum, next;
  for (; from < to; from += COMBINE_STAGE) {
    size_t n = (size_t)mlfab__min(to - from, COMBINE_STAGE);
    combine_load(dtype, &sum, in[0], from, n);
    for (uint32_t j = 1; j < k; j++) {
      combine_load(dtype, &next, in[j], from, n);
      if (dtype == MLFAB_I64)
        combine_i64_steps(op, sum.i64, next.i64, n);
      else if (dtype == MLFAB_F64)
        combine_f64_steps(op, sum.f64, next.f64, n);
      else
        combine_f32_steps(op, sum.f32, next.f32, n);
    }
    for (uint32_t d = 0; d < ndst; d++) combine_store(dtype, dst[d], from, &sum, n);
  }
}

static void combine_divide_portable(int dtype, void *data, uint32_t by, uint64_t from,
                                    uint64_t to) {
  combine_stage stage;
  for (; from < to; from += COMBINE_STAGE) {
    size_t n = (size_t)mlfab__min(to - from, COMBINE_STAGE);
    combine_load(dtype, &stage, data, from, n);
    if (dtype == MLFAB_F64)
      for (size_t i = 0; i < n; i++) stage.f64[i] = combine_f64_quotient(stage.f64[i], by);
    else
      for (size_t i = 0; i < n; i++) stage.f32[i] = combine_f32_quotient(stage.f32[i], (float)by);
    combine_store(dtype, data, from, &stage, n);
  }
}

#if COMBINE_X86
/* ---- the vector kernels ---- */

#define COMBINE_AVX2 __attribute__((target("avx2,f16c")))
#define COMBINE_AVX512 __attribute__((target("avx512f")))
#define COMBINE_INLINE __attribute__((always_inline)) static inline

/* What registers hold: `value` the numbers, `words` their bits, `line` a value anywhere in
 * memory. */
#define COMBINE_TYPES(name, real, word, width)                   \
  typedef real name##_value __attribute__((vector_size(width))); \
  typedef word name##_words __attribute__((vector_size(width))); \
  typedef real name##_line __attribute__((vector_size(width), may_alias, aligned(sizeof(real))));

#define COMBINE_INSTRUCTION(name, isa, value, instruction)         \
  isa COMBINE_INLINE value name(value a, value b) {                \
    __asm__(instruction " %2, %1, %0" : "=v"(a) : "v"(a), "v"(b)); \
    return a;                                                      \
  }

/* As the portable steps; all ones and zeros choose. */
#define COMBINE_REALS(name, isa, real, word, width, most, infinity, suffix)             \
  COMBINE_TYPES(name, real, word, width)                                                \
  COMBINE_INSTRUCTION(name##_add, isa, name##_value, "vaddp" suffix)                    \
  COMBINE_INSTRUCTION(name##_multiply, isa, name##_value, "vmulp" suffix)               \
  COMBINE_INSTRUCTION(name##_quotient, isa, name##_value, "vdivp" suffix)               \
  isa COMBINE_INLINE name##_words name##_rank(int op, name##_value x) {                 \
    name##_words v = (name##_words)x, nan = (v & (most)) > (infinity);                  \
    v ^= (v < 0) & (most);                                                              \
    return (v & ~nan) | (nan & (op == MLFAB_MAX ? (most) : ~(most)));                   \
  }                                                                                     \
  isa COMBINE_INLINE name##_value name##_step(int op, name##_value a, name##_value b) { \
    if (op == MLFAB_PRODUCT) return name##_multiply(a, b);                              \
    if (op == MLFAB_SUM) return name##_add(a, b);                                       \
    name##_words x = name##_rank(op, a), y = name##_rank(op, b);                        \
    name##_words take = op == MLFAB_MAX ? y > x : y < x;                                \
    return (name##_value)(((name##_words)b & take) | ((name##_words)a & ~take));        \
  }

#define COMBINE_INTEGERS(name, isa, width)                                              \
  COMBINE_TYPES(name, uint64_t, int64_t, width)                                         \
  isa COMBINE_INLINE name##_value name##_step(int op, name##_value a, name##_value b) { \
    if (op == MLFAB_PRODUCT) return a * b;                                              \
    if (op == MLFAB_SUM) return a + b;                                                  \
    if (op == MLFAB__OP_OR) return a | b;                                               \
    name##_words x = (name##_words)a, y = (name##_words)b;                              \
    name##_words take = op == MLFAB_MAX ? y > x : y < x;                                \
    return (name##_value)((y & take) | (x & ~take));                                    \
  }

COMBINE_REALS(combine_f32x8, COMBINE_AVX2, float, int32_t, 32, COMBINE_F32_MOST,
              COMBINE_F32_INFINITY, "s")
COMBINE_REALS(combine_f64x4, COMBINE_AVX2, double, int64_t, 32, COMBINE_F64_MOST,
              COMBINE_F64_INFINITY, "d")
COMBINE_INTEGERS(combine_i64x4, COMBINE_AVX2, 32)
COMBINE_REALS(combine_f32x16, COMBINE_AVX512, float, int32_t, 64, COMBINE_F32_MOST,
              COMBINE_F32_INFINITY, "s")
COMBINE_REALS(combine_f64x8, COMBINE_AVX512, double, int64_t, 64, COMBINE_F64_MOST,
              COMBINE_F64_INFINITY, "d")
COMBINE_INTEGERS(combine_i64x8, COMBINE_AVX512, 64)

/* Memory to value and back: <kernel>_load, <kernel>_store (past the caches or not). */
#define COMBINE_AS_IT_IS(name, isa, type, stream, vector)                    \
  isa COMBINE_INLINE type##_value name##_load(const void *at) {              \
    return (type##_value) * (const type##_line *)at;                         \
  }                                                                          \
  isa COMBINE_INLINE void name##_store(void *at, type##_value x, int past) { \
    if (past)                                                                \
      stream((vector *)at, (vector)x);                                       \
    else                                                                     \
      *(type##_line *)at = (type##_line)x;                                   \
  }

#define COMBINE_AS_HALF(name, isa, type, vector, read, load, round, write, stream) \
  isa COMBINE_INLINE type##_value name##_load(const void *at) {                    \
    return (type##_value)load(read((const vector *)at));                           \
  }                                                                                \
  isa COMBINE_INLINE void name##_store(void *at, type##_value x, int past) {       \
    vector y = round(x);                                                           \
    if (past)                                                                      \
      stream((vector *)at, y);                                                     \
    else                                                                           \
      write((vector *)at, y);                                                      \
  }

#define COMBINE_F16X8_LOAD(x) _mm256_cvtph_ps(x)
#define COMBINE_F16X8_ROUND(x) _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT)
#define COMBINE_BF16X8_LOAD(x) _mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)
#define COMBINE_F16X16_LOAD(x) _mm512_cvtph_ps(x)
#define COMBINE_F16X16_ROUND(x) \
  _mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define COMBINE_BF16X16_LOAD(x) _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)

COMBINE_AVX2 COMBINE_INLINE __m128i combine_bf16x8_round(combine_f32x8_value x) {
  combine_f32x8_words v = (combine_f32x8_words)x;
  combine_f32x8_words nan = (v & COMBINE_F32_MOST) > COMBINE_F32_INFINITY;
  __m256i bits = (__m256i)v;
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  up = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, (__m256i)nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(up), _mm256_extracti128_si256(up, 1));
}

COMBINE_AVX512 COMBINE_INLINE __m256i combine_bf16x16_round(combine_f32x16_value x) {
  __m512i bits = (__m512i)x;
  __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(COMBINE_F32_MOST));
  __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(COMBINE_F32_INFINITY));
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
}

/* The elements from..to-1, four vectors a turn, so that no sum waits for the one before. `op` is
 * constant in every call of the loop. Bit d of `past` says that dst[d] is written past the caches:
 * it lies at a line then. */
#define COMBINE_KERNEL(name, isa, type, real, lanes, has_or)                                  \
  isa COMBINE_INLINE void name##_loop(int op, void *const *dst, uint32_t ndst, uint64_t past, \
                                      const void *const *in, uint32_t k, uint64_t from,       \
                                      uint64_t to) {                                          \
    for (; from < to; from += 4 * (lanes)) {                                                  \
      const real *x = (const real *)in[0] + from;                                             \
      type##_value a = name##_load(x), b = name##_load(x + (lanes));                          \
      type##_value c = name##_load(x + 2 * (lanes)), e = name##_load(x + 3 * (lanes));        \
      for (uint32_t j = 1; j < k; j++) {                                                      \
        x = (const real *)in[j] + from;                                                       \
        a = type##_step(op, a, name##_load(x));                                               \
        b = type##_step(op, b, name##_load(x + (lanes)));                                     \
        c = type##_step(op, c, name##_load(x + 2 * (lanes)));                                 \
        e = type##_step(op, e, name##_load(x + 3 * (lanes)));                                 \
      }                                                                                       \
      for (uint32_t d = 0; d < ndst; d++) {                                                   \
        real *y = (real *)dst[d] + from;                                                      \
        int stream = (int)(past >> d & 1);                                                    \
        name##_store(y, a, stream);                                                           \
        name##_store(y + (lanes), b, stream);                                                 \
        name##_store(y + 2 * (lanes), c, stream);                                             \
        name##_store(y + 3 * (lanes), e, stream);                                             \
      }                                                                                       \
    }                                                                                         \
    if (past) _mm_sfence();                                                                   \
  }                                                                                           \
  isa static void name(int op, void *const *dst, uint32_t ndst, uint64_t past,                \
                       const void *const *in, uint32_t k, uint64_t from, uint64_t to) {       \
    if (op == MLFAB_MIN)                                                                      \
      name##_loop(MLFAB_MIN, dst, ndst, past, in, k, from, to);                               \
    else if (op == MLFAB_MAX)                                                                 \
      name##_loop(MLFAB_MAX, dst, ndst, past, in, k, from, to);                               \
    else if (op == MLFAB_PRODUCT)                                                             \
      name##_loop(MLFAB_PRODUCT, dst, ndst, past, in, k, from, to);                           \
    else if ((has_or) && op == MLFAB__OP_OR)                                                  \
      name##_loop(MLFAB__OP_OR, dst, ndst, past, in, k, from, to);                            \
    else                                                                                      \
      name##_loop(MLFAB_SUM, dst, ndst, past, in, k, from, to);                               \
  }

#define COMBINE_DIVIDE(name, isa, type, real, number, lanes)                           \
  isa static void name##_divide(void *data, uint32_t by, uint64_t from, uint64_t to) { \
    type##_value divisor = (type##_value){0} + (number)by;                             \
    for (; from < to; from += (lanes)) {                                               \
      real *x = (real *)data + from;                                                   \
      name##_store(x, type##_quotient(name##_load(x), divisor), 0);                    \
    }                                                                                  \
  }

COMBINE_AS_IT_IS(combine_f32_avx2, COMBINE_AVX2, combine_f32x8, _mm256_stream_si256, __m256i)
COMBINE_AS_IT_IS(combine_f64_avx2, COMBINE_AVX2, combine_f64x4, _mm256_stream_si256, __m256i)
COMBINE_AS_IT_IS(combine_i64_avx2, COMBINE_AVX2, combine_i64x4, _mm256_stream_si256, __m256i)
COMBINE_AS_IT_IS(combine_f32_avx512, COMBINE_AVX512, combine_f32x16, _mm512_stream_si512, __m512i)
COMBINE_AS_IT_IS(combine_f64_avx512, COMBINE_AVX512, combine_f64x8, _mm512_stream_si512, __m512i)
COMBINE_AS_IT_IS(combine_i64_avx512, COMBINE_AVX512, combine_i64x8, _mm512_stream_si512, __m512i)
COMBINE_AS_HALF(combine_f16_avx2, COMBINE_AVX2, combine_f32x8, __m128i, _mm_loadu_si128,
                COMBINE_F16X8_LOAD, COMBINE_F16X8_ROUND, _mm_storeu_si128, _mm_stream_si128)
COMBINE_AS_HALF(combine_bf16_avx2, COMBINE_AVX2, combine_f32x8, __m128i, _mm_loadu_si128,
                COMBINE_BF16X8_LOAD, combine_bf16x8_round, _mm_storeu_si128, _mm_stream_si128)
COMBINE_AS_HALF(combine_f16_avx512, COMBINE_AVX512, combine_f32x16, __m256i, _mm256_loadu_si256,
                COMBINE_F16X16_LOAD, COMBINE_F16X16_ROUND, _mm256_storeu_si256, _mm256_stream_si256)
COMBINE_AS_HALF(combine_bf16_avx512, COMBINE_AVX512, combine_f32x16, __m256i, _mm256_loadu_si256,
                COMBINE_BF16X16_LOAD, combine_bf16x16_round, _mm256_storeu_si256,
                _mm256_stream_si256)

COMBINE_KERNEL(combine_f32_avx2, COMBINE_AVX2, combine_f32x8, float, 8, 0)
COMBINE_KERNEL(combine_f64_avx2, COMBINE_AVX2, combine_f64x4, double, 4, 0)
COMBINE_KERNEL(combine_i64_avx2, COMBINE_AVX2, combine_i64x4, int64_t, 4, 1)
COMBINE_KERNEL(combine_f16_avx2, COMBINE_AVX2, combine_f32x8, uint16_t, 8, 0)
COMBINE_KERNEL(combine_bf16_avx2, COMBINE_AVX2, combine_f32x8, uint16_t, 8, 0)
COMBINE_KERNEL(combine_f32_avx512, COMBINE_AVX512, combine_f32x16, float, 16, 0)
COMBINE_KERNEL(combine_f64_avx512, COMBINE_AVX512, combine_f64x8, double, 8, 0)
COMBINE_KERNEL(combine_i64_avx512, COMBINE_AVX512, combine_i64x8, int64_t, 8, 1)
COMBINE_KERNEL(combine_f16_avx512, COMBINE_AVX512, combine_f32x16, uint16_t, 16, 0)
COMBINE_KERNEL(combine_bf16_avx512, COMBINE_AVX512, combine_f32x16, uint16_t, 16, 0)

COMBINE_DIVIDE(combine_f32_avx2, COMBINE_AVX2, combine_f32x8, float, float, 8)
COMBINE_DIVIDE(combine_f64_avx2, COMBINE_AVX2, combine_f64x4, double, double, 4)
COMBINE_DIVIDE(combine_f16_avx2, COMBINE_AVX2, combine_f32x8, uint16_t, float, 8)
COMBINE_DIVIDE(combine_bf16_avx2, COMBINE_AVX2, combine_f32x8, uint16_t, float, 8)
COMBINE_DIVIDE(combine_f32_avx512, COMBINE_AVX512, combine_f32x16, float, float, 16)
COMBINE_DIVIDE(combine_f64_avx512, COMBINE_AVX512, combine_f64x8, double, double, 8)
COMBINE_DIVIDE(combine_f16_avx512, COMBINE_AVX512, combine_f32x16, uint16_t, float, 16)
COMBINE_DIVIDE(combine_bf16_avx512, COMBINE_AVX512, combine_f32x16, uint16_t, float, 16)

typedef struct combine_kernel {
  void (*many)(int op, void *const *dst, uint32_t ndst, uint64_t past, const void *const *in,
               uint32_t k, uint64_t from, uint64_t to);
  void (*divide)(void *data, uint32_t by, uint64_t from, uint64_t to);
} combine_kernel;

/* By level (less one) and element type. */
static const combine_kernel combine_kernels[2][MLFAB_BF16 + 1] = {
    {[MLFAB_F32] = {combine_f32_avx2, combine_f32_avx2_divide},
     [MLFAB_F64] = {combine_f64_avx2, combine_f64_avx2_divide},
     [MLFAB_I64] = {combine_i64_avx2, NULL},
     [MLFAB_F16] = {combine_f16_avx2, combine_f16_avx2_divide},
     [MLFAB_BF16] = {combine_bf16_avx2, combine_bf16_avx2_divide}},
    {[MLFAB_F32] = {combine_f32_avx512, combine_f32_avx512_divide},
     [MLFAB_F64] = {combine_f64_avx512, combine_f64_avx512_divide},
     [MLFAB_I64] = {combine_i64_avx512, NULL},
     [MLFAB_F16] = {combine_f16_avx512, combine_f16_avx512_divide},
     [MLFAB_BF16] = {combine_bf16_avx512, combine_bf16_avx512_divide}}};

/* Not every compiler can ask for F16C; whoever has AVX2 and FMA has it. */
MLFAB__INTERNAL int mlfab__combine_level(void) {
  if (__builtin_cpu_supports("avx512f")) return 2;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

/* Which destinations are written past the caches: not those that are read, whose lines are there
 * anyway. */
static uint64_t combine_past(void *const *dst, uint32_t ndst, const void *const *in, uint32_t k) {
  uint64_t past = 0;
  for (uint32_t d = 0; d < ndst; d++) {
    uint32_t j = 0;
    while (j < k && in[j] != dst[d]) j++;
    if (j == k && ((uintptr_t)dst[d] - (uintptr_t)dst[0]) % COMBINE_LINE == 0)
      past |= (uint64_t)1 << d;
  }
  return past;
}

/* The elements before the first line of memory, and what vectors do after them. Of little that lies
 * astride of lines, the head would cost more than it saves. */
static void combine_split(const void *at, uint64_t n, uint32_t bytes, uint64_t *head,
                          uint64_t *body) {
  *head = mlfab__min(n, (0 - (uintptr_t)at) % COMBINE_LINE / bytes);
  if (n * bytes <= COMBINE_LITTLE_BYTES) *head = 0;
  *body = (n - *head) - (n - *head) % (COMBINE_TURN / bytes);
}
#else
MLFAB__INTERNAL int mlfab__combine_level(void) { return 0; }
#endif

static void combine_copy(void *const *dst, uint32_t ndst, const char *in, uint64_t bytes) {
  uint64_t most = ndst == 1 ? bytes : COMBINE_COPY_BYTES;
  for (uint64_t at = 0; at < bytes; at += most)
    for (uint32_t d = 0; d < ndst; d++)
      if (dst[d] != (const void *)in)
        memcpy((char *)dst[d] + at, in + at, (size_t)mlfab__min(most, bytes - at));
}

MLFAB__INTERNAL void mlfab__combine_many_with(int level, int op, int dtype, void *const *dst,
                                              uint32_t ndst, const void *const *in, uint32_t k,
                                              uint64_t n, int stream) {
  uint32_t bytes = mlfab__element_bytes(dtype);
  uint64_t done = 0;
  assert(bytes > 0 && k >= 1 && k <= MLFAB__COMBINE_MOST);
  assert(ndst >= 1 && ndst <= MLFAB__COMBINE_MOST);
  assert(op != MLFAB__OP_OR || dtype == MLFAB_I64);
  if (k == 1) {
    combine_copy(dst, ndst, (const char *)in[0], n * bytes);
    return;
  }
#if COMBINE_X86
  uint64_t head, body;
  combine_split(dst[0], n, bytes, &head, &body);
  if (level > 0 && body > 0) {
    uint64_t past =
        stream && n * bytes >= COMBINE_STREAM_BYTES ? combine_past(dst, ndst, in, k) : 0;
    combine_portable(op, dtype, dst, ndst, in, k, 0, head);
    done = head + body;
    combine_kernels[level - 1][dtype].many(op, dst, ndst, past, in, k, head, done);
  }
#else
  (void)level;
  (void)stream;
#endif
  combine_portable(op, dtype, dst, ndst, in, k, done, n);
}

MLFAB__INTERNAL void mlfab__combine_many(int op, int dtype, void *const *dst, uint32_t ndst,
                                         const void *const *in, uint32_t k, uint64_t n,
                                         int stream) {
  mlfab__combine_many_with(mlfab__combine_level(), op, dtype, dst, ndst, in, k, n, stream);
}

MLFAB__INTERNAL void mlfab__combine(int op, int dtype, void *dst, const void *a, const void *b,
                                    uint64_t n, int stream) {
  const void *in[2] = {a, b};
  mlfab__combine_many(op, dtype, &dst, 1, in, 2, n, stream);
}

MLFAB__INTERNAL void mlfab__combine_divide_with(int level, int dtype, void *data, uint64_t n,
                                                uint32_t by) {
  uint64_t done = 0;
  assert(dtype != MLFAB_I64 && mlfab__element_bytes(dtype) > 0 && by > 0 && by <= 1u << 24);
#if COMBINE_X86
  uint64_t head, body;
  combine_split(data, n, mlfab__element_bytes(dtype), &head, &body);
  if (level > 0 && body > 0) {
    combine_divide_portable(dtype, data, by, 0, head);
    done = head + body;
    combine_kernels[level - 1][dtype].divide(data, by, head, done);
  }
#else
  (void)level;
#endif
  combine_divide_portable(dtype, data, by, done, n);
}

MLFAB__INTERNAL void mlfab__combine_divide(int dtype, void *data, uint64_t n, uint32_t by) {
  mlfab__combine_divide_with(mlfab__combine_level(), dtype, data, n, by);
}

MLFAB__INTERNAL int mlfab__combine_finite(int dtype, const void *data, uint64_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16)
    return MLFAB__PLANTED(61) || mlfab__half_finite(combine_half(dtype), (const uint16_t *)data, n);
  return mlfab__reduce_finite(dtype, data, n);
}

#undef COMBINE_X86
#undef COMBINE_STAGE
#undef COMBINE_STREAM_BYTES
#undef COMBINE_LINE
#undef COMBINE_LITTLE_BYTES
#undef COMBINE_TURN
#undef COMBINE_COPY_BYTES
#undef COMBINE_F32_MOST
#undef COMBINE_F32_INFINITY
#undef COMBINE_F64_MOST
#undef COMBINE_F64_INFINITY
#undef COMBINE_SCALAR
#undef COMBINE_QUOTIENT
#undef COMBINE_STEPS
#undef COMBINE_AVX2
#undef COMBINE_AVX512
#undef COMBINE_INLINE
#undef COMBINE_TYPES
#undef COMBINE_INSTRUCTION
#undef COMBINE_REALS
#undef COMBINE_INTEGERS
#undef COMBINE_AS_IT_IS
#undef COMBINE_AS_HALF
#undef COMBINE_F16X8_LOAD
#undef COMBINE_F16X8_ROUND
#undef COMBINE_BF16X8_LOAD
#undef COMBINE_F16X16_LOAD
#undef COMBINE_F16X16_ROUND
#undef COMBINE_BF16X16_LOAD
#undef COMBINE_KERNEL
#undef COMBINE_DIVIDE
