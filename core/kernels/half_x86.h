/* half_x86.h - 16-bit numbers in vectors of x86: <name>_load, _round to any, _cut of finite numbers. */
#ifndef MLFAB__HALF_X86_H
#define MLFAB__HALF_X86_H

#include "half.h"
#include "kernels_x86.h"

#if KERNELS_X86
#define X86_F16X8_LOAD(x) _mm256_cvtph_ps(x)
#define X86_F16X8_ROUND(x) _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT)
#define X86_BF16X8_LOAD(x) _mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)
#define X86_F16X16_LOAD(x) _mm512_cvtph_ps(x)
#define X86_F16X16_ROUND(x) \
  _mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define X86_BF16X16_LOAD(x) _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)

/* Conversion to bf16: of a finite number (cut), and of any (round): a NaN becomes quiet. */
#define X86_BF16(name, isa, type, vector, narrow)                              \
  isa X86_INLINE vector name##_cut(type##_value x) {                           \
    type##_bits bits = (type##_bits)x;                                         \
    return narrow((bits + (bits >> 16 & 1) + 0x7fff) >> 16);                   \
  }                                                                            \
  isa X86_INLINE vector name##_round(type##_value x) {                         \
    type##_bits bits = (type##_bits)x, up = bits + (bits >> 16 & 1) + 0x7fff;  \
    type##_bits nan = (type##_bits)((bits & X86_F32_MOST) > X86_F32_INFINITY); \
    return narrow(((up & ~nan) | ((bits | 0x400000) & nan)) >> 16);            \
  }

X86_AVX2 X86_INLINE __m128i x86_narrow8(x86_f32x8_bits x) {
  return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x),
                          _mm256_extracti128_si256((__m256i)x, 1));
}
#define X86_NARROW16(x) _mm512_cvtepi32_epi16((__m512i)(x))
X86_BF16(x86_bf16x8, X86_AVX2, x86_f32x8, __m128i, x86_narrow8)
X86_BF16(x86_bf16x16, X86_AVX512, x86_f32x16, __m256i, X86_NARROW16)
#endif

#endif
