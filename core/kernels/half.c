/* half.c - float32 in 16 bits, and back. Layer 1.
 *
 * For: what travels in half precision. Not for: arithmetic; nothing is kept or added up in 16 bits.
 *
 * Invariants: the portable code works on bits alone, so neither the mode of the processor nor
 * -ffast-math shows in a result; the instructions that replace it are told how to round and take
 * subnormal numbers as they are. Magnitudes are cut off before they are rounded: what lies between
 * the largest number and the point from which rounding would give infinity rounds down anyway.
 *
 * Source: IEEE 754-2019 §3.6 (binary16); TDF §4.3 sends gradients so. */
#include "half.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HALF_X86 1
#include <immintrin.h>
#define HALF_AVX2 __attribute__((target("avx2,f16c")))
#define HALF_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define HALF_X86 0
#endif

#define HALF_MAGNITUDE 0x7fffffffu
#define HALF_F16_TOP 0x477fe000u  /* 65504 */
#define HALF_BF16_TOP 0x7f7f0000u /* (2 - 2^-7) 2^127 */
#define HALF_F32_TOP 0x7f7fffffu

/* 2^-25 and 2^-134 lie halfway to the smallest number, and the even neighbour is zero. */
MLFAB__INTERNAL uint32_t mlfab__half_zero(int half) {
  return half == MLFAB_HALF_F16 ? 0x33000000u : half == MLFAB_HALF_BF16 ? 0x00008000u : 0;
}

MLFAB__INTERNAL uint32_t mlfab__half_top(int half) {
  return half == MLFAB_HALF_F16    ? HALF_F16_TOP
         : half == MLFAB_HALF_BF16 ? HALF_BF16_TOP
                                   : HALF_F32_TOP;
}

/* Below 2^-14 numbers are multiples of 2^-24. */
static uint32_t half_subnormal(uint32_t magnitude) {
  uint32_t exponent = magnitude >> 23, shift = 126 - exponent;
  if (exponent < 102) return 0;
  uint32_t m = (magnitude & 0x7fffffu) | 0x800000u, tie = 1u << (shift - 1);
  uint32_t whole = m >> shift, rest = m & (2 * tie - 1);
  return whole + (rest > tie || (rest == tie && (whole & 1)));
}

static inline uint16_t half_f16(uint32_t bits) {
  uint32_t sign = bits >> 16 & 0x8000u, m = bits & HALF_MAGNITUDE;
  if (m > HALF_F16_TOP) m = HALF_F16_TOP;
  if (m < 0x38800000u) return (uint16_t)(sign | half_subnormal(m));
  return (uint16_t)(sign | ((m - 0x38000000u + 0xfffu + (m >> 13 & 1)) >> 13));
}

static inline uint16_t half_bf16(uint32_t bits) {
  uint32_t sign = bits >> 16 & 0x8000u, m = bits & HALF_MAGNITUDE;
  if (m > HALF_BF16_TOP) m = HALF_BF16_TOP;
  return (uint16_t)(sign | ((m + 0x7fffu + (m >> 16 & 1)) >> 16));
}

/* NaN becomes a quiet one, as the instruction has it. */
static inline uint32_t half_f16_back(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, m = bits & 0x3ffu, exponent = bits >> 10 & 31u;
  if (exponent == 31) return sign | 0x7f800000u | m << 13 | (m != 0 ? 0x400000u : 0);
  if (exponent != 0) return sign | (((uint32_t)(bits & 0x7fffu) << 13) + 0x38000000u);
  if (m == 0) return sign;
  exponent = 113;
  while (m < 0x400u) m <<= 1, exponent--;
  return sign | exponent << 23 | (m & 0x3ffu) << 13;
}

MLFAB__INTERNAL uint16_t mlfab__half_one(int half, float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return half == MLFAB_HALF_F16 ? half_f16(bits) : half_bf16(bits);
}

MLFAB__INTERNAL float mlfab__half_back(int half, uint16_t bits) {
  uint32_t wide = half == MLFAB_HALF_F16 ? half_f16_back(bits) : (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, sizeof x);
  return x;
}

/* The largest float32 is (2 - 2^-23) 2^127; C gives a conversion from beyond it no meaning. */
MLFAB__INTERNAL float mlfab__half_narrow(double x) {
  const double most = 0x1.fffffep127;
  return (float)(x > most ? most : x < -most ? -most : x);
}

/* Four at a time: one added to an exponent of all ones carries into the sign bit, which was masked
 * away, and no further. */
MLFAB__INTERNAL int mlfab__half_finite(int half, const uint16_t *in, uint64_t n) {
  const uint64_t each = 0x0001000100010001u;
  uint64_t exponent = each * (half == MLFAB_HALF_F16 ? 0x7c00u : 0x7f80u);
  uint64_t one = each * (half == MLFAB_HALF_F16 ? 0x0400u : 0x0080u), carry = 0, word;
  for (; n >= 4; n -= 4, in += 4) {
    memcpy(&word, in, sizeof word);
    carry |= (word & exponent) + one;
  }
  for (; n > 0; n--) carry |= (*in++ & exponent & 0xffffu) + (one & 0xffffu);
  return !(carry & each << 15);
}

/* ---- the kernels: what they leave of n is done by the portable ones ---- */

static void half_store_portable(int half, uint16_t *out, const float *in, uint64_t n) {
  uint32_t bits;
  for (uint64_t i = 0; i < n; i++) {
    memcpy(&bits, &in[i], sizeof bits);
    out[i] = half == MLFAB_HALF_F16 ? half_f16(bits) : half_bf16(bits);
  }
}

static void half_load_portable(int half, float *out, const uint16_t *in, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) out[i] = mlfab__half_back(half, in[i]);
}

#if HALF_X86
HALF_AVX2 static uint64_t half_store_avx2(int half, uint16_t *out, const float *in, uint64_t n) {
  const __m256i magnitude = _mm256_set1_epi32((int)HALF_MAGNITUDE), one = _mm256_set1_epi32(1);
  const __m256i top = _mm256_set1_epi32((int)mlfab__half_top(half));
  const __m256i tie = _mm256_set1_epi32(0x7fff);
  uint64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(in + i));
    __m256i m = _mm256_min_epu32(_mm256_and_si256(x, magnitude), top);
    x = _mm256_or_si256(_mm256_andnot_si256(magnitude, x), m);
    __m128i y;
    if (half == MLFAB_HALF_F16) {
      y = _mm256_cvtps_ph(_mm256_castsi256_ps(x), _MM_FROUND_TO_NEAREST_INT);
    } else {
      __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), one);
      x = _mm256_srli_epi32(_mm256_add_epi32(x, _mm256_add_epi32(odd, tie)), 16);
      y = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    }
    _mm_storeu_si128((__m128i *)(void *)(out + i), y);
  }
  return i;
}

HALF_AVX2 static uint64_t half_load_avx2(int half, float *out, const uint16_t *in, uint64_t n) {
  uint64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m128i x = _mm_loadu_si128((const __m128i *)(const void *)(in + i));
    __m256 y = half == MLFAB_HALF_F16
                   ? _mm256_cvtph_ps(x)
                   : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
    _mm256_storeu_ps(out + i, y);
  }
  return i;
}

HALF_AVX512 static uint64_t half_store_avx512(int half, uint16_t *out, const float *in,
                                              uint64_t n) {
  const __m512i magnitude = _mm512_set1_epi32((int)HALF_MAGNITUDE), one = _mm512_set1_epi32(1);
  const __m512i top = _mm512_set1_epi32((int)mlfab__half_top(half));
  const __m512i tie = _mm512_set1_epi32(0x7fff);
  uint64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m512i x = _mm512_loadu_si512(in + i);
    __m512i m = _mm512_min_epu32(_mm512_and_si512(x, magnitude), top);
    x = _mm512_or_si512(_mm512_andnot_si512(magnitude, x), m);
    __m256i y;
    if (half == MLFAB_HALF_F16) {
      y = _mm512_cvtps_ph(_mm512_castsi512_ps(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {
      __m512i odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), one);
      x = _mm512_srli_epi32(_mm512_add_epi32(x, _mm512_add_epi32(odd, tie)), 16);
      y = _mm512_cvtepi32_epi16(x);
    }
    _mm256_storeu_si256((__m256i *)(void *)(out + i), y);
  }
  return i;
}

HALF_AVX512 static uint64_t half_load_avx512(int half, float *out, const uint16_t *in, uint64_t n) {
  uint64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(in + i));
    __m512 y = half == MLFAB_HALF_F16
                   ? _mm512_cvtph_ps(x)
                   : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
    _mm512_storeu_ps(out + i, y);
  }
  return i;
}

/* Not every compiler can ask for F16C; whoever has AVX2 and FMA has it. BMI2 is for those that pick
 * lanes. */
MLFAB__INTERNAL int mlfab__half_level(void) {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}

MLFAB__INTERNAL void mlfab__half_store_with(int level, int half, uint16_t *out, const float *in,
                                            uint64_t n) {
  uint64_t done = level >= 2   ? half_store_avx512(half, out, in, n)
                  : level == 1 ? half_store_avx2(half, out, in, n)
                               : 0;
  half_store_portable(half, out + done, in + done, n - done);
}

MLFAB__INTERNAL void mlfab__half_load_with(int level, int half, float *out, const uint16_t *in,
                                           uint64_t n) {
  uint64_t done = level >= 2   ? half_load_avx512(half, out, in, n)
                  : level == 1 ? half_load_avx2(half, out, in, n)
                               : 0;
  half_load_portable(half, out + done, in + done, n - done);
}
#else
MLFAB__INTERNAL int mlfab__half_level(void) { return 0; }

MLFAB__INTERNAL void mlfab__half_store_with(int level, int half, uint16_t *out, const float *in,
                                            uint64_t n) {
  (void)level;
  half_store_portable(half, out, in, n);
}

MLFAB__INTERNAL void mlfab__half_load_with(int level, int half, float *out, const uint16_t *in,
                                           uint64_t n) {
  (void)level;
  half_load_portable(half, out, in, n);
}
#endif

MLFAB__INTERNAL void mlfab__half_store(int half, uint16_t *out, const float *in, uint64_t n) {
  mlfab__half_store_with(mlfab__half_level(), half, out, in, n);
}

MLFAB__INTERNAL void mlfab__half_load(int half, float *out, const uint16_t *in, uint64_t n) {
  mlfab__half_load_with(mlfab__half_level(), half, out, in, n);
}

#undef HALF_X86
#undef HALF_AVX2
#undef HALF_AVX512
#undef HALF_MAGNITUDE
#undef HALF_F16_TOP
#undef HALF_BF16_TOP
#undef HALF_F32_TOP
