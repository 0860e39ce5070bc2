/* filter.c - selects the values of an update that are sent, and the changes of the model that are made.
 *
 * It has TDF's gradient filters (significance, random, half precision) with their residual, the selection of the
 * largest values, and the parameter filter. packet.c encodes values in packets; each call here works on one part of a
 * tensor.
 *
 * Invariants: an element is compared in its own type, with the smallest number of that type that is at least tau; the
 * result is that of a comparison in double. All comparisons are integer comparisons of bits, so -ffast-math has no
 * effect. A draw depends on seed, iteration and element only, not on how the tensor is divided, the level, or other
 * draws. Mark and emit both compute a: the second time the data comes from the cache, and no intermediate memory is
 * needed.
 *
 * Source: TDF §4.2 (thresholds), §4.3 (filters). Departs: values that round to zero stay in the residual, as does the
 * excess over the largest value. Exact zeros are never sent. TDF has no selection of the largest share. */
#include "filter.h"

#include "../kernels/half.h"
#include "../base/rng.h"
#include "../kernels/kernels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define FILTER_X86 1
#include <immintrin.h>
#define FILTER_AVX2 __attribute__((target("avx2,f16c,bmi2,popcnt")))
#define FILTER_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt")))
#else
#define FILTER_X86 0
#endif

#define FILTER_F32_MAGNITUDE 0x7fffffffu
#define FILTER_F64_MAGNITUDE 0x7fffffffffffffffu
#define FILTER_F32_INFINITY 0x7f800000u
#define FILTER_F64_INFINITY 0x7ff0000000000000u
#define FILTER_F64_ONE 0x3ff0000000000000u /* the bits of 1.0 */

/* ---- thresholds and draws ---- */

/* The natural logarithm: for t = 2^e m with m near 1, ln m = 2 artanh((m - 1) / (m + 1)). Gives the same bits
 * everywhere, without libm. */
static double filter_ln(uint64_t t) {
  const double ln2 = 0.69314718055994530942;
  double m = (double)t, e = 0.0, sum = 0.0;
  while (m > 1.4142135623730951) m *= 0.5, e += 1.0;
  double s = (m - 1.0) / (m + 1.0), s2 = s * s;
  for (int k = 23; k >= 1; k -= 2) sum = sum * s2 + 1.0 / k;
  return e * ln2 + 2.0 * s * sum;
}

MLFAB__INTERNAL double mlfab__filter_threshold(double phi, double d, uint64_t t) {
  return phi / (1.0 + d * filter_ln(t > 1 ? t : 1));
}

static uint64_t filter_key(uint64_t seed, uint64_t t) { return mlfab__mix(mlfab__mix(seed) + t); }

/* One hash draws for two elements. */
static inline uint32_t filter_word(uint64_t key, uint64_t element) {
  return (uint32_t)(mlfab__mix(key + element / 2) >> (element % 2 * 32));
}

/* ---- a prepared rule: an element is sent if it is at least `low`, and at least `high` or drawn ---- */

typedef struct filter_limits {
  uint64_t low, high; /* magnitudes, as bits of the type */
  uint64_t key, draw; /* held back if the word drawn is below `draw` */
} filter_limits;

/* Returns the bits of the smallest float32 that is at least tau >= 0. */
static uint64_t filter_f32_ceiling(double tau) {
  uint32_t bits;
  if (tau > 0x1.fffffep127) return FILTER_F32_INFINITY;
  float nearest = (float)tau;
  memcpy(&bits, &nearest, sizeof bits);
  return bits + ((double)nearest < tau);
}

/* Returns the bits of the smallest double that rounds to a float32 above `magnitude`: the double after the middle
 * between it and its neighbour, or the middle itself if the neighbour is even. Never reads a subnormal float32 (a
 * processor may take it for zero); the middle is a normal double. */
static uint64_t filter_f64_above(uint32_t magnitude) {
  const uint32_t normal = 0x00800000u;
  uint64_t bits = (((uint64_t)magnitude << 1) + 1) << 28; /* the middle, with float32's exponent */
  if (magnitude < normal) {
    double middle = (2.0 * magnitude + 1.0) * 0x1p-150;
    memcpy(&bits, &middle, sizeof bits);
  } else {
    bits += (uint64_t)(1023 - 127) << 52;
  }
  return bits + ((magnitude + 1) & 1);
}

static filter_limits filter_prepare(const mlfab__filter_rule *rule) {
  filter_limits limits = {0};
  uint64_t tau = 0;
  uint32_t zero = mlfab__half_zero(rule->half);
  if (rule->dtype == MLFAB_F32) {
    if (rule->tau > 0) tau = filter_f32_ceiling(rule->tau);
    limits.low = zero + 1;
  } else {
    if (rule->tau > 0) memcpy(&tau, &rule->tau, sizeof tau);
    limits.low = rule->half == MLFAB_HALF_NONE ? 1 : filter_f64_above(zero);
  }
  if (!(rule->p > 0)) tau = 0;
  limits.high = mlfab__max(tau, limits.low);
  if (rule->p < 1 && limits.high > limits.low) {
    double chance = rule->p * 0x1p32;
    limits.key = filter_key(rule->seed, rule->t);
    limits.draw = (uint64_t)chance;
    limits.draw += (double)limits.draw < chance;
  }
  /* A word of 32 bits is always below 2^32. */
  if (rule->p >= 1 || limits.draw > UINT32_MAX) limits.low = limits.high;
  return limits;
}

/* ---- the portable kernels ---- */

#define FILTER_MARK(name, real, word, magnitude, infinity)                                         \
  static uint32_t name(const filter_limits *limits, const real *g, const real *residual,           \
                       uint64_t first, uint32_t n, uint64_t *keep) {                               \
    uint32_t kept = 0;                                                                             \
    word worst = 0, m;                                                                             \
    for (uint32_t at = 0; at < n; at += 64) {                                                      \
      uint32_t end = n - at < 64 ? n : at + 64;                                                    \
      uint64_t marks = 0;                                                                          \
      for (uint32_t i = at; i < end; i++) {                                                        \
        real a = residual[i];                                                                      \
        if (g != NULL) a += g[i];                                                                  \
        memcpy(&m, &a, sizeof m);                                                                  \
        m &= magnitude;                                                                            \
        if (m > worst) worst = m;                                                                  \
        int sent = m >= limits->high;                                                              \
        if (!sent && m >= limits->low) sent = filter_word(limits->key, first + i) >= limits->draw; \
        marks |= (uint64_t)sent << (i - at);                                                       \
      }                                                                                            \
      keep[at / 64] = marks;                                                                       \
      kept += mlfab__bits(marks);                                                                  \
    }                                                                                              \
    return worst >= (infinity) ? MLFAB__FILTER_REFUSED : kept;                                     \
  }

FILTER_MARK(filter_mark_f32, float, uint32_t, FILTER_F32_MAGNITUDE, FILTER_F32_INFINITY)
FILTER_MARK(filter_mark_f64, double, uint64_t, FILTER_F64_MAGNITUDE, FILTER_F64_INFINITY)

/* The largest magnitude that can be sent, in the element's type. */
static float filter_top_f32(int half) {
  uint32_t bits = mlfab__half_top(half);
  float top;
  memcpy(&top, &bits, sizeof top);
  return top;
}

static double filter_top_f64(int half) {
  const double most = 0x1.fffffffffffffp1023;
  return half == MLFAB_HALF_NONE ? most : (double)filter_top_f32(half);
}

#define FILTER_EMIT(name, real, narrow, top_of)                                                   \
  static uint32_t name(int half, const real *g, real *residual, uint32_t n, const uint64_t *keep, \
                       void *values, uint64_t *saturated) {                                       \
    const real top = top_of(half);                                                                \
    uint16_t *halves = (uint16_t *)values;                                                        \
    real *whole = (real *)values;                                                                 \
    uint32_t k = 0;                                                                               \
    for (uint32_t i = 0; i < n; i++) {                                                            \
      real a = residual[i], rest = 0;                                                             \
      if (g != NULL) a += g[i];                                                                   \
      if (!(keep[i / 64] >> (i % 64) & 1)) {                                                      \
        residual[i] = a;                                                                          \
        continue;                                                                                 \
      }                                                                                           \
      if (a > top || a < -top) {                                                                  \
        rest = a > 0 ? a - top : a + top;                                                         \
        ++*saturated;                                                                             \
      }                                                                                           \
      if (half == MLFAB_HALF_NONE)                                                                \
        whole[k++] = a;                                                                           \
      else                                                                                        \
        halves[k++] = mlfab__half_one(half, narrow(a));                                           \
      residual[i] = rest;                                                                         \
    }                                                                                             \
    return k;                                                                                     \
  }

#define FILTER_AS_IT_IS(a) (a)
FILTER_EMIT(filter_emit_f32, float, FILTER_AS_IT_IS, filter_top_f32)
FILTER_EMIT(filter_emit_f64, double, mlfab__half_narrow, filter_top_f64)

/* ---- float32 with vectors: whole words of 64 marks; the portable kernels do the rest ---- */

#if FILTER_X86
/* Prefetches a line of both arrays; harmless beyond their end. Hardware prefetching stops at page
 * boundaries, and the data that emit reads is in the cache already: it prefetches the part after its own,
 * which is probably next. */
#define FILTER_AHEAD(g, residual, i)                                                   \
  do {                                                                                 \
    const uintptr_t off_ = (uintptr_t)(i) * sizeof(float);                             \
    if ((g) != NULL) _mm_prefetch((const char *)((uintptr_t)(g) + off_), _MM_HINT_T0); \
    _mm_prefetch((const char *)((uintptr_t)(residual) + off_), _MM_HINT_T0);           \
  } while (0)

FILTER_AVX512 static inline __m512i filter_mix_avx512(__m512i x) {
  x = _mm512_add_epi64(x, _mm512_set1_epi64((long long)0x9e3779b97f4a7c15u));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 30)),
                         _mm512_set1_epi64((long long)0xbf58476d1ce4e5b9u));
  x = _mm512_mullo_epi64(_mm512_xor_si512(x, _mm512_srli_epi64(x, 27)),
                         _mm512_set1_epi64((long long)0x94d049bb133111ebu));
  return _mm512_xor_si512(x, _mm512_srli_epi64(x, 31));
}

/* The words of 16 elements from `element` on: 8 hashes in order; from an odd element, one word later. */
FILTER_AVX512 static inline __m512i filter_words_avx512(uint64_t key, uint64_t element) {
  const __m512i counter = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
  uint64_t from = key + element / 2;
  __m512i x = filter_mix_avx512(_mm512_add_epi64(_mm512_set1_epi64((long long)from), counter));
  if (element % 2 == 0) return x;
  __m512i y =
      filter_mix_avx512(_mm512_add_epi64(_mm512_set1_epi64((long long)(from + 8)), counter));
  return _mm512_alignr_epi32(y, x, 1);
}

FILTER_AVX512 static inline __m512i filter_sum_avx512(const float *g, const float *residual,
                                                      uint32_t i) {
  __m512 a = _mm512_loadu_ps(residual + i);
  if (g != NULL) a = _mm512_add_ps(a, _mm512_loadu_ps(g + i));
  return _mm512_castps_si512(a);
}

FILTER_AVX512 static uint32_t filter_mark_avx512(const filter_limits *limits, const float *g,
                                                 const float *residual, uint64_t first, uint32_t n,
                                                 uint64_t *keep) {
  const __m512i magnitude = _mm512_set1_epi32((int)FILTER_F32_MAGNITUDE);
  const __m512i high = _mm512_set1_epi32((int)limits->high);
  const __m512i low = _mm512_set1_epi32((int)limits->low);
  const __m512i draw = _mm512_set1_epi32((int)(uint32_t)limits->draw);
  const int draws = limits->low < limits->high;
  __m512i worst = _mm512_setzero_si512();
  uint32_t kept = 0;
  for (uint32_t at = 0; at < n; at += 64) {
    uint64_t marks = 0;
    for (uint32_t i = 0; i < 64; i += 16) {
      FILTER_AHEAD(g, residual, at + i + 128);
      __m512i m = _mm512_and_si512(filter_sum_avx512(g, residual, at + i), magnitude);
      worst = _mm512_max_epu32(worst, m);
      __mmask16 sent = _mm512_cmpge_epu32_mask(m, high);
      __mmask16 open = draws ? _mm512_cmpge_epu32_mask(m, low) & (__mmask16)~sent : 0;
      if (open)
        sent |= _mm512_mask_cmpge_epu32_mask(open, filter_words_avx512(limits->key, first + at + i),
                                             draw);
      marks |= (uint64_t)sent << i;
    }
    keep[at / 64] = marks;
    kept += (uint32_t)_mm_popcnt_u64(marks);
  }
  return _mm512_reduce_max_epu32(worst) >= FILTER_F32_INFINITY ? MLFAB__FILTER_REFUSED : kept;
}

/* A masked store writes the values and nothing beyond them. */
FILTER_AVX512 static uint32_t filter_emit_avx512(int half, const float *g, float *residual,
                                                 uint32_t n, const uint64_t *keep, void *values,
                                                 uint64_t *saturated) {
  const __m512i magnitude = _mm512_set1_epi32((int)FILTER_F32_MAGNITUDE);
  const __m512i top = _mm512_set1_epi32((int)mlfab__half_top(half));
  uint16_t *halves = (uint16_t *)values;
  float *whole = (float *)values;
  uint32_t k = 0;
  for (uint32_t i = 0; i < n; i += 16) {
    __mmask16 marks = (__mmask16)(keep[i / 64] >> (i % 64));
    FILTER_AHEAD(g, residual, i + n);
    if (marks == 0) {
      if (g != NULL) _mm512_storeu_si512(residual + i, filter_sum_avx512(g, residual, i));
      continue;
    }
    uint32_t count = (uint32_t)_mm_popcnt_u32(marks);
    __mmask16 there = (__mmask16)((1u << count) - 1);
    __m512i a = filter_sum_avx512(g, residual, i);
    __m512i rest = _mm512_maskz_mov_epi32((__mmask16)~marks, a);
    if (half != MLFAB_HALF_NONE) {
      __mmask16 over = _mm512_mask_cmpgt_epu32_mask(marks, _mm512_and_si512(a, magnitude), top);
      if (MLFAB__UNLIKELY(over)) {
        __m512i cut = _mm512_or_si512(_mm512_andnot_si512(magnitude, a), top);
        __m512 left = _mm512_sub_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(cut));
        rest = _mm512_mask_mov_epi32(rest, over, _mm512_castps_si512(left));
        a = _mm512_mask_mov_epi32(a, over, cut);
        *saturated += (uint32_t)_mm_popcnt_u32(over);
      }
    }
    /* If all elements are sent, the residual stays zero and is not written. */
    if (_mm512_cmpneq_epi32_mask(rest, _mm512_loadu_si512(residual + i)))
      _mm512_storeu_si512(residual + i, rest);
    a = _mm512_maskz_compress_epi32(marks, a);
    if (half == MLFAB_HALF_NONE) {
      _mm512_mask_storeu_epi32(whole + k, there, a);
    } else if (half == MLFAB_HALF_F16) {
      _mm256_mask_storeu_epi16(
          halves + k, there,
          _mm512_cvtps_ph(_mm512_castsi512_ps(a), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    } else {
      __m512i odd = _mm512_and_si512(_mm512_srli_epi32(a, 16), _mm512_set1_epi32(1));
      a = _mm512_add_epi32(a, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
      _mm256_mask_storeu_epi16(halves + k, there, _mm512_cvtepi32_epi16(_mm512_srli_epi32(a, 16)));
    }
    k += count;
  }
  return k;
}

/* Magnitudes are below 2^31, so signed comparisons are correct. */
FILTER_AVX2 static inline __m256i filter_sum_avx2(const float *g, const float *residual,
                                                  uint32_t i) {
  __m256 a = _mm256_loadu_ps(residual + i);
  if (g != NULL) a = _mm256_add_ps(a, _mm256_loadu_ps(g + i));
  return _mm256_castps_si256(a);
}

/* With draws the portable kernel is used: AVX2 has no fast 64-bit multiplication. */
FILTER_AVX2 static uint32_t filter_mark_avx2(const filter_limits *limits, const float *g,
                                             const float *residual, uint64_t first, uint32_t n,
                                             uint64_t *keep) {
  const __m256i magnitude = _mm256_set1_epi32((int)FILTER_F32_MAGNITUDE);
  const __m256i below = _mm256_set1_epi32((int)limits->high - 1);
  __m256i worst = _mm256_setzero_si256();
  uint32_t kept = 0;
  if (limits->low < limits->high) return filter_mark_f32(limits, g, residual, first, n, keep);
  for (uint32_t at = 0; at < n; at += 64) {
    uint64_t marks = 0;
    for (uint32_t i = 0; i < 64; i += 8) {
      __m256i m = _mm256_and_si256(filter_sum_avx2(g, residual, at + i), magnitude);
      worst = _mm256_max_epu32(worst, m);
      __m256 sent = _mm256_castsi256_ps(_mm256_cmpgt_epi32(m, below));
      marks |= (uint64_t)(uint32_t)_mm256_movemask_ps(sent) << i;
    }
    keep[at / 64] = marks;
    kept += (uint32_t)_mm_popcnt_u64(marks);
  }
  worst = _mm256_cmpgt_epi32(worst, _mm256_set1_epi32((int)FILTER_F32_INFINITY - 1));
  return _mm256_movemask_epi8(worst) ? MLFAB__FILTER_REFUSED : kept;
}

/* Packs the marked values of eight lanes: pext collects their indices, a byte each. */
FILTER_AVX2 static inline __m256i filter_pack_avx2(__m256i a, uint32_t marks) {
  uint64_t lanes = _pext_u64(0x0706050403020100u, _pdep_u64(marks, 0x0101010101010101u) * 0xff);
  return _mm256_permutevar8x32_epi32(a, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)lanes)));
}

FILTER_AVX2 static inline uint32_t filter_lanes_avx2(__m256i marks) {
  return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(marks));
}

/* Stores a whole vector as long as later values overwrite the excess. */
FILTER_AVX2 static uint32_t filter_emit_avx2(int half, const float *g, float *residual, uint32_t n,
                                             const uint64_t *keep, void *values,
                                             uint64_t *saturated) {
  const __m256i magnitude = _mm256_set1_epi32((int)FILTER_F32_MAGNITUDE);
  const __m256i top = _mm256_set1_epi32((int)mlfab__half_top(half));
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const uint32_t width = half == MLFAB_HALF_NONE ? 4 : 2;
  uint8_t *out = (uint8_t *)values, spare[32];
  uint32_t k = 0, total = 0;
  for (uint32_t i = 0; i < n; i += 64) total += (uint32_t)_mm_popcnt_u64(keep[i / 64]);
  for (uint32_t i = 0; i < n; i += 8) {
    uint32_t marks = (uint32_t)(keep[i / 64] >> (i % 64)) & 0xff;
    FILTER_AHEAD(g, residual, i + n);
    uint32_t count = (uint32_t)_mm_popcnt_u32(marks);
    __m256i sent = _mm256_and_si256(_mm256_set1_epi32((int)marks), bit);
    __m256i a = filter_sum_avx2(g, residual, i), rest;
    sent = _mm256_cmpeq_epi32(sent, bit);
    rest = _mm256_andnot_si256(sent, a);
    /* An unsent value must not overflow in the conversion. */
    a = _mm256_and_si256(sent, a);
    if (half != MLFAB_HALF_NONE) {
      __m256i over = _mm256_cmpgt_epi32(_mm256_and_si256(a, magnitude), top);
      over = _mm256_and_si256(over, sent);
      if (MLFAB__UNLIKELY(!_mm256_testz_si256(over, over))) {
        __m256i cut = _mm256_or_si256(_mm256_andnot_si256(magnitude, a), top);
        __m256 left = _mm256_sub_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(cut));
        rest = _mm256_blendv_epi8(rest, _mm256_castps_si256(left), over);
        a = _mm256_blendv_epi8(a, cut, over);
        *saturated += mlfab__bits((uint32_t)_mm256_movemask_epi8(over)) / 4;
      }
    }
    _mm256_storeu_si256((__m256i *)(void *)(residual + i), rest);
    a = filter_pack_avx2(a, marks);
    if (half == MLFAB_HALF_F16) {
      a = _mm256_castsi128_si256(
          _mm256_cvtps_ph(_mm256_castsi256_ps(a), _MM_FROUND_TO_NEAREST_INT));
    } else if (half != MLFAB_HALF_NONE) {
      __m256i odd = _mm256_and_si256(_mm256_srli_epi32(a, 16), _mm256_set1_epi32(1));
      a = _mm256_add_epi32(a, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
      a = _mm256_srli_epi32(a, 16);
      a = _mm256_castsi128_si256(
          _mm_packus_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
    }
    if (total - k < 8) {
      _mm256_storeu_si256((__m256i *)(void *)spare, a);
      memcpy(out + (size_t)k * width, spare, (size_t)count * width);
    } else if (half == MLFAB_HALF_NONE) {
      _mm256_storeu_si256((__m256i *)(void *)(out + (size_t)k * width), a);
    } else {
      _mm_storeu_si128((__m128i *)(void *)(out + (size_t)k * width), _mm256_castsi256_si128(a));
    }
    k += count;
  }
  return k;
}
#endif

static const float *filter_skip(const float *g, uint32_t n) { return g != NULL ? g + n : NULL; }

MLFAB__INTERNAL uint32_t mlfab__filter_mark_with(int level, const mlfab__filter_rule *rule,
                                                 const void *g, const void *residual,
                                                 uint64_t first, uint32_t n, uint64_t *keep) {
  filter_limits limits = filter_prepare(rule);
  const float *g32 = (const float *)g, *r32 = (const float *)residual;
  uint32_t whole = 0, kept = 0, rest;
  (void)level;
  if (rule->dtype != MLFAB_F32)
    return filter_mark_f64(&limits, (const double *)g, (const double *)residual, first, n, keep);
#if FILTER_X86
  if (level >= 1) whole = n - n % 64;
  if (level >= 2) kept = filter_mark_avx512(&limits, g32, r32, first, whole, keep);
  if (level == 1) kept = filter_mark_avx2(&limits, g32, r32, first, whole, keep);
#endif
  rest = filter_mark_f32(&limits, filter_skip(g32, whole), r32 + whole, first + whole, n - whole,
                         keep + whole / 64);
  return kept == MLFAB__FILTER_REFUSED || rest == MLFAB__FILTER_REFUSED ? MLFAB__FILTER_REFUSED
                                                                        : kept + rest;
}

MLFAB__INTERNAL uint32_t mlfab__filter_emit_with(int level, const mlfab__filter_rule *rule,
                                                 const void *g, void *residual, uint32_t n,
                                                 const uint64_t *keep, void *values,
                                                 uint64_t *saturated) {
  const float *g32 = (const float *)g;
  float *r32 = (float *)residual;
  uint32_t whole = 0, k = 0;
  uint32_t width = rule->half == MLFAB_HALF_NONE ? 4 : 2;
  (void)level;
  if (rule->dtype != MLFAB_F32)
    return filter_emit_f64(rule->half, (const double *)g, (double *)residual, n, keep, values,
                           saturated);
#if FILTER_X86
  if (level >= 1) whole = n - n % 64;
  if (level >= 2) k = filter_emit_avx512(rule->half, g32, r32, whole, keep, values, saturated);
  if (level == 1) k = filter_emit_avx2(rule->half, g32, r32, whole, keep, values, saturated);
#endif
  return k + filter_emit_f32(rule->half, filter_skip(g32, whole), r32 + whole, n - whole,
                             keep + whole / 64, (uint8_t *)values + (size_t)k * width, saturated);
}

MLFAB__INTERNAL uint32_t mlfab__filter_mark(const mlfab__filter_rule *rule, const void *g,
                                            const void *residual, uint64_t first, uint32_t n,
                                            uint64_t *keep) {
  return mlfab__filter_mark_with(mlfab__kernel_level(), rule, g, residual, first, n, keep);
}

MLFAB__INTERNAL uint32_t mlfab__filter_emit(const mlfab__filter_rule *rule, const void *g,
                                            void *residual, uint32_t n, const uint64_t *keep,
                                            void *values, uint64_t *saturated) {
  return mlfab__filter_emit_with(mlfab__kernel_level(), rule, g, residual, n, keep, values,
                                 saturated);
}

/* ---- the largest ---- */

/* Element i of a, its magnitude as bits, and the histogram of a digit among the magnitudes that begin with
 * `found`. */
#define FILTER_RANK(name, real, word, magnitude)                                                   \
  static inline real filter_at_##name(const void *g, const void *residual, uint64_t i) {           \
    real a = ((const real *)residual)[i];                                                          \
    if (g != NULL) a += ((const real *)g)[i];                                                      \
    return a;                                                                                      \
  }                                                                                                \
  static inline word filter_size_##name(real a) {                                                  \
    word m;                                                                                        \
    memcpy(&m, &a, sizeof m);                                                                      \
    return m & magnitude;                                                                          \
  }                                                                                                \
  static void filter_count_##name(const void *g, const void *residual, uint64_t n, uint32_t above, \
                                  uint32_t at, uint64_t found, uint64_t *count) {                  \
    uint64_t most = ((uint64_t)1 << (above - at)) - 1;                                             \
    for (uint64_t i = 0; i < n; i++) {                                                             \
      word m = filter_size_##name(filter_at_##name(g, residual, i));                               \
      if ((uint64_t)m >> above == found) count[m >> at & most]++;                                  \
    }                                                                                              \
  }

FILTER_RANK(f32, float, uint32_t, FILTER_F32_MAGNITUDE)
FILTER_RANK(f64, double, uint64_t, FILTER_F64_MAGNITUDE)

static inline uint64_t filter_magnitude(int dtype, const void *g, const void *residual,
                                        uint64_t i) {
  return dtype == MLFAB_F32 ? filter_size_f32(filter_at_f32(g, residual, i))
                            : filter_size_f64(filter_at_f64(g, residual, i));
}

/* Radix selection, 11 bits of the magnitude at a time, highest first: finds the digit of the k-th largest by counting.
 * The next pass counts only values with this digit. */
MLFAB__INTERNAL void mlfab__filter_kth(int dtype, const void *g, const void *residual, uint64_t n,
                                       uint64_t k, mlfab__filter_cut *cut) {
  enum { DIGIT = 11 };
  uint64_t count[1u << DIGIT], found = 0;
  uint32_t left = dtype == MLFAB_F32 ? 31 : 63;
  if (k == 0) {
    *cut = (mlfab__filter_cut){UINT64_MAX, 0};
    return;
  }
  while (left > 0) {
    uint32_t digit = left < DIGIT ? left : DIGIT, above = left;
    uint64_t most = ((uint64_t)1 << digit) - 1, at = most;
    left -= digit;
    memset(count, 0, sizeof count);
    if (dtype == MLFAB_F32)
      filter_count_f32(g, residual, n, above, left, found, count);
    else
      filter_count_f64(g, residual, n, above, left, found, count);
    while (count[at] < k) k -= count[at--];
    found = found << digit | at;
  }
  *cut = (mlfab__filter_cut){found, k};
}

/* Is an element of this magnitude among the k largest? The caller asks in the order of the array. */
static inline uint64_t filter_within(mlfab__filter_cut *cut, uint64_t magnitude) {
  uint64_t tie = (magnitude == cut->magnitude) & (cut->ties > 0);
  cut->ties -= tie;
  return tie | (magnitude > cut->magnitude);
}

MLFAB__INTERNAL uint32_t mlfab__filter_top(int dtype, const void *g, const void *residual,
                                           uint32_t n, mlfab__filter_cut *cut, uint64_t *keep) {
  uint32_t kept = 0;
  for (uint32_t at = 0; at < n; at += 64) {
    uint32_t end = n - at < 64 ? n : at + 64;
    uint64_t marks = 0;
    for (uint32_t i = at; i < end; i++)
      marks |= filter_within(cut, filter_magnitude(dtype, g, residual, i)) << (i - at);
    keep[at / 64] &= marks;
    kept += mlfab__bits(keep[at / 64]);
  }
  return kept;
}

/* ---- the largest, while they are marked ---- */

enum {
  FILTER_SAMPLE = 32768, /* elements in the sample */
  FILTER_ROOM_LOG2 = 5,  /* room for one element in 32 besides */
  FILTER_WORDS = 512,    /* words of marks that are settled at a time */
  FILTER_SIGMAS = 4      /* standard deviations of the sample between its estimate and a limit */
};

static uint64_t filter_room(uint64_t n) {
  return mlfab__min(n, FILTER_SAMPLE + (n >> FILTER_ROOM_LOG2));
}

MLFAB__INTERNAL uint64_t mlfab__filter_choice_words(int dtype, uint64_t n, uint64_t mark_words) {
  return mark_words + ((filter_room(n) + 64) * mlfab__dtype_bytes(dtype) + 7) / 8;
}

/* Sets the limits between which the k-th largest of all elements probably is, from one element of each of
 * FILTER_SAMPLE equal stretches, at a random place. */
static void filter_sample(mlfab__filter_choice *choice) {
  uint64_t stretch = choice->n / FILTER_SAMPLE, rest = choice->n % FILTER_SAMPLE, margin = 1;
  double share = (double)choice->k / (double)choice->n;
  double variance = FILTER_SAMPLE * share * (1.0 - share);
  uint64_t rank = (uint64_t)(FILTER_SAMPLE * share);
  mlfab__filter_cut cut;
  for (uint64_t i = 0; i < FILTER_SAMPLE; i++) {
    uint64_t place = (mlfab__mix(i) >> 40) * stretch >> 24;
    uint64_t at = stretch * i + rest * i / FILTER_SAMPLE + place;
    if (choice->dtype == MLFAB_F32)
      ((float *)choice->between)[i] = filter_at_f32(choice->g, choice->residual, at);
    else
      ((double *)choice->between)[i] = filter_at_f64(choice->g, choice->residual, at);
  }
  while ((double)(margin * margin) < FILTER_SIGMAS * FILTER_SIGMAS * variance) margin++;
  if (rank > margin) {
    mlfab__filter_kth(choice->dtype, NULL, choice->between, FILTER_SAMPLE, rank - margin, &cut);
    choice->high = cut.magnitude;
  }
  if (rank + margin < FILTER_SAMPLE) {
    mlfab__filter_kth(choice->dtype, NULL, choice->between, FILTER_SAMPLE, rank + margin, &cut);
    choice->low = cut.magnitude;
  }
}

MLFAB__INTERNAL void mlfab__filter_choose_with(int level, mlfab__filter_choice *choice, int dtype,
                                               const void *g, const void *residual, uint64_t n,
                                               uint64_t k, uint64_t *room) {
  *choice = (mlfab__filter_choice){.level = level, .dtype = dtype, .n = n, .k = k};
  choice->g = (const uint8_t *)g;
  choice->residual = (const uint8_t *)residual;
  choice->room = filter_room(n);
  choice->between = room;
  choice->open = room + mlfab__filter_choice_words(dtype, n, 0);
  choice->high = dtype == MLFAB_F32 ? FILTER_F32_MAGNITUDE : FILTER_F64_MAGNITUDE;
  if (choice->room < n) filter_sample(choice);
}

MLFAB__INTERNAL void mlfab__filter_choose(mlfab__filter_choice *choice, int dtype, const void *g,
                                          const void *residual, uint64_t n, uint64_t k,
                                          uint64_t *room) {
  mlfab__filter_choose_with(mlfab__kernel_level(), choice, dtype, g, residual, n, k, room);
}

/* Marks the elements above `low` with at least `least`, and lists those above `low` up to `high`. Stops when the list
 * has no room for a word of marks, which settle notices. Returns 1 if the elements are finite. */
#define FILTER_COMPARE(name, real, infinity)                                                    \
  static int filter_compare_##name(mlfab__filter_choice *choice, uint64_t least, const void *g, \
                                   const void *residual, uint32_t n, uint64_t *keep) {          \
    const uint64_t low = choice->low, high = choice->high;                                      \
    real *between = (real *)choice->between;                                                    \
    uint64_t worst = 0, count = choice->count;                                                  \
    for (uint32_t at = 0; at < n && count <= choice->room; at += 64) {                          \
      uint32_t end = n - at < 64 ? n : at + 64;                                                 \
      uint64_t past = 0, over = 0, sent = 0;                                                    \
      for (uint32_t i = at; i < end; i++) {                                                     \
        real a = filter_at_##name(g, residual, i);                                              \
        uint64_t m = filter_size_##name(a);                                                     \
        if (m > worst) worst = m;                                                               \
        past |= (uint64_t)(m > low) << (i - at);                                                \
        over |= (uint64_t)(m > high) << (i - at);                                               \
        sent |= (uint64_t)(m >= least) << (i - at);                                             \
        between[count] = a;                                                                     \
        count += (uint64_t)(m > low) & (uint64_t)(m <= high);                                   \
      }                                                                                         \
      choice->above += mlfab__bits(over);                                                       \
      choice->open[choice->words++] = past ^ over;                                              \
      keep[at / 64] = past & sent;                                                              \
    }                                                                                           \
    choice->count = count;                                                                      \
    return worst < (infinity);                                                                  \
  }

FILTER_COMPARE(f32, float, FILTER_F32_INFINITY)
FILTER_COMPARE(f64, double, FILTER_F64_INFINITY)

#if FILTER_X86
FILTER_AVX512 static int filter_compare_avx512(mlfab__filter_choice *choice, uint64_t least,
                                               const float *g, const float *residual, uint32_t n,
                                               uint64_t *keep) {
  const __m512i magnitude = _mm512_set1_epi32((int)FILTER_F32_MAGNITUDE);
  const __m512i low = _mm512_set1_epi32((int)choice->low);
  const __m512i high = _mm512_set1_epi32((int)choice->high);
  const __m512i limit = _mm512_set1_epi32((int)least);
  __m512i worst = _mm512_setzero_si512();
  float *between = (float *)choice->between;
  uint64_t count = choice->count;
  for (uint32_t at = 0; at < n && count <= choice->room; at += 64) {
    uint64_t past = 0, over = 0, sent = 0;
    for (uint32_t i = 0; i < 64; i += 16) {
      __m512i a = filter_sum_avx512(g, residual, at + i), m = _mm512_and_si512(a, magnitude);
      __mmask16 is_past = _mm512_cmpgt_epu32_mask(m, low);
      __mmask16 is_over = _mm512_cmpgt_epu32_mask(m, high);
      __mmask16 open = is_past ^ is_over;
      worst = _mm512_max_epu32(worst, m);
      _mm512_storeu_si512(between + count, _mm512_maskz_compress_epi32(open, a));
      count += (uint32_t)_mm_popcnt_u32(open);
      past |= (uint64_t)is_past << i;
      over |= (uint64_t)is_over << i;
      sent |= (uint64_t)_mm512_cmpge_epu32_mask(m, limit) << i;
    }
    choice->above += (uint64_t)_mm_popcnt_u64(over);
    choice->open[choice->words++] = past ^ over;
    keep[at / 64] = past & sent;
  }
  choice->count = count;
  return _mm512_reduce_max_epu32(worst) < FILTER_F32_INFINITY;
}

FILTER_AVX2 static int filter_compare_avx2(mlfab__filter_choice *choice, uint64_t least,
                                           const float *g, const float *residual, uint32_t n,
                                           uint64_t *keep) {
  const __m256i magnitude = _mm256_set1_epi32((int)FILTER_F32_MAGNITUDE);
  const __m256i low = _mm256_set1_epi32((int)choice->low);
  const __m256i high = _mm256_set1_epi32((int)choice->high);
  const __m256i below = _mm256_set1_epi32((int)least - 1);
  __m256i worst = _mm256_setzero_si256();
  float *between = (float *)choice->between;
  uint64_t count = choice->count;
  for (uint32_t at = 0; at < n && count <= choice->room; at += 64) {
    uint64_t past = 0, over = 0, sent = 0;
    for (uint32_t i = 0; i < 64; i += 8) {
      __m256i a = filter_sum_avx2(g, residual, at + i), m = _mm256_and_si256(a, magnitude);
      uint32_t is_past = filter_lanes_avx2(_mm256_cmpgt_epi32(m, low));
      uint32_t is_over = filter_lanes_avx2(_mm256_cmpgt_epi32(m, high));
      uint32_t open = is_past ^ is_over;
      worst = _mm256_max_epu32(worst, m);
      _mm256_storeu_si256((__m256i *)(void *)(between + count), filter_pack_avx2(a, open));
      count += (uint32_t)_mm_popcnt_u32(open);
      past |= (uint64_t)is_past << i;
      over |= (uint64_t)is_over << i;
      sent |= (uint64_t)filter_lanes_avx2(_mm256_cmpgt_epi32(m, below)) << i;
    }
    choice->above += (uint64_t)_mm_popcnt_u64(over);
    choice->open[choice->words++] = past ^ over;
    keep[at / 64] = past & sent;
  }
  choice->count = count;
  return filter_lanes_avx2(
             _mm256_cmpgt_epi32(worst, _mm256_set1_epi32((int)FILTER_F32_INFINITY - 1))) == 0;
}
#endif

static int filter_compare(mlfab__filter_choice *choice, uint64_t least, const void *g,
                          const void *residual, uint32_t n, uint64_t *keep) {
  const float *g32 = (const float *)g, *r32 = (const float *)residual;
  uint32_t whole = 0;
  int finite = 1;
  if (choice->dtype != MLFAB_F32) return filter_compare_f64(choice, least, g, residual, n, keep);
#if FILTER_X86
  if (choice->level >= 1) whole = n - n % 64;
  if (choice->level >= 2) finite = filter_compare_avx512(choice, least, g32, r32, whole, keep);
  if (choice->level == 1) finite = filter_compare_avx2(choice, least, g32, r32, whole, keep);
#endif
  return filter_compare_f32(choice, least, filter_skip(g32, whole), r32 + whole, n - whole,
                            keep + whole / 64) &&
         finite;
}

MLFAB__INTERNAL int mlfab__filter_look(mlfab__filter_choice *choice, const mlfab__filter_rule *rule,
                                       uint64_t first, uint32_t n, uint64_t *keep) {
  uint64_t drawn[MLFAB__FILTER_MOST / 64];
  uint32_t width = mlfab__dtype_bytes(choice->dtype);
  const uint8_t *g = choice->g ? choice->g + first * width : NULL;
  const uint8_t *residual = choice->residual + first * width;
  filter_limits limits = filter_prepare(rule);
  if (limits.low == limits.high) return filter_compare(choice, limits.high, g, residual, n, keep);
  if (mlfab__filter_mark_with(choice->level, rule, g, residual, first, n, drawn) ==
      MLFAB__FILTER_REFUSED)
    return 0;
  filter_compare(choice, 0, g, residual, n, keep);
  for (uint32_t i = 0; i < (n + 63) / 64; i++) keep[i] &= drawn[i];
  return 1;
}

/* Clears the marks of listed elements that are not among the k largest, from element `at` of the list on; returns its
 * new position. It takes at most FILTER_WORDS words of marks, and first collects those with a listed element, because a
 * branch would be unpredictable. */
static uint64_t filter_clear(const mlfab__filter_choice *choice, uint64_t at,
                             mlfab__filter_cut *cut, uint32_t words, const uint64_t *open,
                             uint64_t *keep) {
  uint16_t some[FILTER_WORDS];
  uint32_t n = 0;
  for (uint32_t w = 0; w < words; w++) {
    some[n] = (uint16_t)w;
    n += open[w] != 0;
  }
  for (uint32_t i = 0; i < n; i++) {
    for (uint64_t left = open[some[i]]; left != 0; left &= left - 1) {
      uint64_t m = filter_magnitude(choice->dtype, NULL, choice->between, at++);
      keep[some[i]] &= ~(left & (0 - left) & (filter_within(cut, m) - 1));
    }
  }
  return at;
}

MLFAB__INTERNAL int mlfab__filter_settle(mlfab__filter_choice *choice, uint64_t *keep) {
  mlfab__filter_cut cut;
  uint64_t at = 0;
  if (choice->count > choice->room || choice->k <= choice->above) return 0;
  /* With fewer elements than k above 0, zeros are among the k largest; their marks are clear. */
  if (choice->k > choice->above + choice->count) return choice->low == 0;
  mlfab__filter_kth(choice->dtype, NULL, choice->between, choice->count, choice->k - choice->above,
                    &cut);
  for (uint64_t w = 0; w < choice->words; w += FILTER_WORDS) {
    uint32_t words = (uint32_t)mlfab__min(choice->words - w, FILTER_WORDS);
    at = filter_clear(choice, at, &cut, words, choice->open + w, keep + w);
  }
  return 1;
}

/* ---- changes of the model ---- */

/* It has no branches, because signs and small changes are unpredictable. Values that are not finite stay unchanged, for
 * later checks to find. If the quotient is unused or would exceed 2^500, it is computed from 0 and 1, because a program
 * may have enabled floating-point traps. */
#define FILTER_FAR 0x1p-500
static inline double filter_size(double x) {
#if defined(__GNUC__) || defined(__clang__)
  return __builtin_fabs(x);
#else
  return x < 0 ? -x : x;
#endif
}

#define FILTER_CHANGE(name, real, word, infinity)                                 \
  static uint64_t name(const real *before, real *after, uint64_t n, double tau) { \
    uint64_t back = 0;                                                            \
    for (uint64_t i = 0; i < n; i++) {                                            \
      real is = after[i], was = before[i];                                        \
      word x, y;                                                                  \
      memcpy(&x, &was, sizeof x);                                                 \
      memcpy(&y, &is, sizeof y);                                                  \
      double change = filter_size((double)is - (double)was);                      \
      double size = filter_size((double)was);                                     \
      int finite = (y & (infinity)) != (infinity);                                \
      int open = finite & (change > 0) & (change * FILTER_FAR < size);            \
      int small = open & ((open ? change : 0.0) / (open ? size : 1.0) < tau);     \
      word old = (word)0 - (word)(small | (finite & (is == was)));                \
      y = (x & old) | (y & ~old);                                                 \
      memcpy(&after[i], &y, sizeof y);                                            \
      back += (uint64_t)small;                                                    \
    }                                                                             \
    return back;                                                                  \
  }

FILTER_CHANGE(filter_change_f32, float, uint32_t, FILTER_F32_INFINITY)
FILTER_CHANGE(filter_change_f64, double, uint64_t, FILTER_F64_INFINITY)

#if FILTER_X86
/* The same for eight elements at a time; the portable kernel does the rest. */
#define FILTER_CHANGE_VECTOR(name, isa, portable, real, word)                           \
  typedef real name##_items                                                             \
      __attribute__((vector_size(8 * sizeof(real)), aligned(sizeof(real)), may_alias)); \
  typedef word name##_words __attribute__((vector_size(8 * sizeof(word))));             \
  typedef double name##_wide __attribute__((vector_size(64)));                          \
  typedef int64_t name##_marks __attribute__((vector_size(64)));                        \
  isa static uint64_t name(const real *before, real *after, uint64_t n, double tau) {   \
    const name##_marks zero = {0}, magnitude = zero + INT64_MAX;                        \
    const name##_marks infinity = zero + (int64_t)FILTER_F64_INFINITY;                  \
    const name##_marks one = zero + (int64_t)FILTER_F64_ONE;                            \
    name##_marks sum = {0};                                                             \
    uint64_t back = 0, i = 0;                                                           \
    for (; i + 8 <= n; i += 8) {                                                        \
      name##_items was = *(const name##_items *)(before + i);                           \
      name##_items is = *(const name##_items *)(after + i);                             \
      name##_wide size = __builtin_convertvector(was, name##_wide);                     \
      name##_wide change = __builtin_convertvector(is, name##_wide) - size;             \
      size = (name##_wide)((name##_marks)size & magnitude);                             \
      change = (name##_wide)((name##_marks)change & magnitude);                         \
      name##_marks finite = ((name##_marks)change & infinity) != infinity;              \
      name##_marks open = finite & (change > 0) & (change * FILTER_FAR < size);         \
      size = (name##_wide)(((name##_marks)size & open) | (one & ~open));                \
      change = (name##_wide)((name##_marks)change & open);                              \
      name##_marks small = open & (change / size < tau);                                \
      name##_words old = (name##_words)(is == was);                                     \
      old &= __builtin_convertvector(finite, name##_words);                             \
      old |= __builtin_convertvector(small, name##_words);                              \
      *(name##_items *)(after + i) =                                                    \
          (name##_items)(((name##_words)was & old) | ((name##_words)is & ~old));        \
      sum -= small;                                                                     \
    }                                                                                   \
    for (size_t j = 0; j < 8; j++) back += (uint64_t)sum[j];                            \
    return back + portable(before + i, after + i, n - i, tau);                          \
  }

FILTER_CHANGE_VECTOR(filter_change_f32_avx2, FILTER_AVX2, filter_change_f32, float, int32_t)
FILTER_CHANGE_VECTOR(filter_change_f64_avx2, FILTER_AVX2, filter_change_f64, double, int64_t)
FILTER_CHANGE_VECTOR(filter_change_f32_avx512, FILTER_AVX512, filter_change_f32, float, int32_t)
FILTER_CHANGE_VECTOR(filter_change_f64_avx512, FILTER_AVX512, filter_change_f64, double, int64_t)
#endif

MLFAB__INTERNAL uint64_t mlfab__filter_change_with(int level, int dtype, const void *before,
                                                   void *after, uint64_t n, double tau) {
  const float *b32 = (const float *)before;
  const double *b64 = (const double *)before;
  (void)level;
#if FILTER_X86
  if (dtype == MLFAB_F32 && level >= 2)
    return filter_change_f32_avx512(b32, (float *)after, n, tau);
  if (dtype == MLFAB_F32 && level == 1) return filter_change_f32_avx2(b32, (float *)after, n, tau);
  if (dtype == MLFAB_F64 && level >= 2)
    return filter_change_f64_avx512(b64, (double *)after, n, tau);
  if (dtype == MLFAB_F64 && level == 1) return filter_change_f64_avx2(b64, (double *)after, n, tau);
#endif
  if (dtype == MLFAB_F32) return filter_change_f32(b32, (float *)after, n, tau);
  if (dtype == MLFAB_F64) return filter_change_f64(b64, (double *)after, n, tau);
  return 0;
}

MLFAB__INTERNAL uint64_t mlfab__filter_change(int dtype, const void *before, void *after,
                                              uint64_t n, double tau) {
  return mlfab__filter_change_with(mlfab__kernel_level(), dtype, before, after, n, tau);
}
