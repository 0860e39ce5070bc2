/* half.c - converts float32 to 16 bits and back.
 *
 * For: values that are sent in half precision. Storage and sums are never in 16 bits.
 *
 * Invariants: the portable code works on bits only, so neither the processor's rounding mode nor
 * -ffast-math affects a result. Magnitudes are clamped before they are rounded: values between the largest
 * number and the point from which rounding would give infinity round down in any case.
 *
 * Source: IEEE 754-2019 §3.6 (binary16); TDF §4.3 sends gradients in this form. */
#include "half_x86.h"

#define HALF_MAGNITUDE 0x7fffffffu
#define HALF_F16_TOP 0x477fe000u  /* 65504 */
#define HALF_BF16_TOP 0x7f7f0000u /* (2 - 2^-7) 2^127 */
#define HALF_F32_TOP 0x7f7fffffu

/* 2^-25 and 2^-134 are halfway to the smallest number; the even neighbour is zero. */
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

/* A NaN becomes quiet, as with the processor's instruction. */
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

/* The largest float32 is (2 - 2^-23) 2^127; in C, converting larger values is undefined. */
MLFAB__INTERNAL float mlfab__half_narrow(double x) {
  const double most = 0x1.fffffep127;
  return (float)(x > most ? most : x < -most ? -most : x);
}

/* Four at a time: adding one to an exponent of all ones carries into the sign bit, which is masked off. The carry stops
 * there. */
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

/* ---- arrays: values that are too large are clamped before rounding ---- */

#if KERNELS_X86

#define X86_LEAST8(a, b) (x86_f32x8_words) _mm256_min_epi32((__m256i)(a), (__m256i)(b))
#define X86_LEAST16(a, b) (x86_f32x16_words) _mm512_min_epi32((__m512i)(a), (__m512i)(b))
#define X86_HALVES(name, isa, type, half, vector, least, load, read, cut, write)                   \
  isa static uint64_t name##_half_store(uint16_t *out, const float *in, uint64_t n) {              \
    const type##_words top = (type##_words){0} + (int32_t)mlfab__half_top(half);                   \
    const uint64_t lanes = sizeof(type##_value) / sizeof(float);                                   \
    uint64_t i = 0;                                                                                \
    for (; i + lanes <= n; i += lanes) {                                                           \
      type##_words x = (type##_words) * (const type##_line *)(in + i);                             \
      x = (x & ~X86_F32_MOST) | least(x & X86_F32_MOST, top);                                      \
      write((vector *)(void *)(out + i), cut((type##_value)x));                                    \
    }                                                                                              \
    return i;                                                                                      \
  }                                                                                                \
  isa static uint64_t name##_half_load(float *out, const uint16_t *in, uint64_t n) {               \
    const uint64_t lanes = sizeof(type##_value) / sizeof(float);                                   \
    uint64_t i = 0;                                                                                \
    for (; i + lanes <= n; i += lanes)                                                             \
      *(type##_line *)(out + i) = (type##_line)load(read((const vector *)(const void *)(in + i))); \
    return i;                                                                                      \
  }

X86_HALVES(x86_f16_avx2, X86_AVX2, x86_f32x8, MLFAB_HALF_F16, __m128i, X86_LEAST8, X86_F16X8_LOAD,
           _mm_loadu_si128, X86_F16X8_ROUND, _mm_storeu_si128)
X86_HALVES(x86_bf16_avx2, X86_AVX2, x86_f32x8, MLFAB_HALF_BF16, __m128i, X86_LEAST8,
           X86_BF16X8_LOAD, _mm_loadu_si128, x86_bf16x8_cut, _mm_storeu_si128)
X86_HALVES(x86_f16_avx512, X86_AVX512, x86_f32x16, MLFAB_HALF_F16, __m256i, X86_LEAST16,
           X86_F16X16_LOAD, _mm256_loadu_si256, X86_F16X16_ROUND, _mm256_storeu_si256)
X86_HALVES(x86_bf16_avx512, X86_AVX512, x86_f32x16, MLFAB_HALF_BF16, __m256i, X86_LEAST16,
           X86_BF16X16_LOAD, _mm256_loadu_si256, x86_bf16x16_cut, _mm256_storeu_si256)

/* By level and MLFAB_HALF_*. They return the number of converted elements, from the first on: at most n. */
static uint64_t (*const half_stores[3][3])(uint16_t *out, const float *in, uint64_t n) = {
    {NULL},
    {NULL, x86_f16_avx2_half_store, x86_bf16_avx2_half_store},
    {NULL, x86_f16_avx512_half_store, x86_bf16_avx512_half_store}};
static uint64_t (*const half_loads[3][3])(float *out, const uint16_t *in, uint64_t n) = {
    {NULL},
    {NULL, x86_f16_avx2_half_load, x86_bf16_avx2_half_load},
    {NULL, x86_f16_avx512_half_load, x86_bf16_avx512_half_load}};
#endif

MLFAB__INTERNAL void mlfab__half_store_with(int level, int half, uint16_t *out, const float *in,
                                            uint64_t n) {
  uint64_t i = 0;
  (void)level;
#if KERNELS_X86
  if (half_stores[level][half]) i = half_stores[level][half](out, in, n);
#endif
  for (; i < n; i++) out[i] = mlfab__half_one(half, in[i]);
}

MLFAB__INTERNAL void mlfab__half_load_with(int level, int half, float *out, const uint16_t *in,
                                           uint64_t n) {
  uint64_t i = 0;
  (void)level;
#if KERNELS_X86
  if (half_loads[level][half]) i = half_loads[level][half](out, in, n);
#endif
  for (; i < n; i++) out[i] = mlfab__half_back(half, in[i]);
}
