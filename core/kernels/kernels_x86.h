/* kernels_x86.h - vectors of AVX2 and AVX-512, for the files with rows of the kernel tables. Layer 1. */
#ifndef MLFAB__KERNELS_X86_H
#define MLFAB__KERNELS_X86_H

#include "kernels.h"

#include "half.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

#define X86_AVX2 __attribute__((target("avx2,f16c")))
#define X86_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define X86_INLINE __attribute__((always_inline)) static inline

#define X86_F32_MOST INT32_MAX
#define X86_F32_INFINITY 0x7f800000
#define X86_F64_MOST INT64_MAX
#define X86_F64_INFINITY 0x7ff0000000000000

/* Vector types: `value` numbers, `words` their bits, `line` an unaligned value in memory. */
#define X86_TYPES(name, real, word, width)                         \
  typedef real name##_value __attribute__((vector_size(width)));   \
  typedef word name##_words __attribute__((vector_size(width)));   \
  typedef u##word name##_bits __attribute__((vector_size(width))); \
  typedef real name##_line __attribute__((vector_size(width), may_alias, aligned(sizeof(real))));

#define X86_INSTRUCTION(name, isa, value, instruction)             \
  isa X86_INLINE value name(value a, value b) {                    \
    __asm__(instruction " %2, %1, %0" : "=v"(a) : "v"(a), "v"(b)); \
    return a;                                                      \
  }

#define X86_REALS(name, isa, real, word, width, suffix)          \
  X86_TYPES(name, real, word, width)                             \
  X86_INSTRUCTION(name##_add, isa, name##_value, "vaddp" suffix) \
  X86_INSTRUCTION(name##_multiply, isa, name##_value, "vmulp" suffix)

X86_REALS(x86_f32x8, X86_AVX2, float, int32_t, 32, "s")
X86_REALS(x86_f64x4, X86_AVX2, double, int64_t, 32, "d")
X86_REALS(x86_f32x16, X86_AVX512, float, int32_t, 64, "s")
X86_REALS(x86_f64x8, X86_AVX512, double, int64_t, 64, "d")

/* Loads and stores: <kernel>_load, <kernel>_store (non-temporal if `past`). */
#define X86_AS_IT_IS(name, isa, type, stream, vector)                    \
  isa X86_INLINE type##_value name##_load(const void *at) {              \
    return (type##_value) * (const type##_line *)at;                     \
  }                                                                      \
  isa X86_INLINE void name##_store(void *at, type##_value x, int past) { \
    if (past)                                                            \
      stream((vector *)at, (vector)x);                                   \
    else                                                                 \
      *(type##_line *)at = (type##_line)x;                               \
  }

#define X86_AS_HALF(name, isa, type, vector, read, load, round, write, stream) \
  isa X86_INLINE type##_value name##_load(const void *at) {                    \
    return (type##_value)load(read((const vector *)at));                       \
  }                                                                            \
  isa X86_INLINE void name##_store(void *at, type##_value x, int past) {       \
    vector y = round(x);                                                       \
    if (past)                                                                  \
      stream((vector *)at, y);                                                 \
    else                                                                       \
      write((vector *)at, y);                                                  \
  }

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

X86_AS_IT_IS(x86_f32_avx2, X86_AVX2, x86_f32x8, _mm256_stream_si256, __m256i)
X86_AS_IT_IS(x86_f64_avx2, X86_AVX2, x86_f64x4, _mm256_stream_si256, __m256i)
X86_AS_IT_IS(x86_f32_avx512, X86_AVX512, x86_f32x16, _mm512_stream_si512, __m512i)
X86_AS_IT_IS(x86_f64_avx512, X86_AVX512, x86_f64x8, _mm512_stream_si512, __m512i)
X86_AS_HALF(x86_f16_avx2, X86_AVX2, x86_f32x8, __m128i, _mm_loadu_si128, X86_F16X8_LOAD,
            X86_F16X8_ROUND, _mm_storeu_si128, _mm_stream_si128)
X86_AS_HALF(x86_bf16_avx2, X86_AVX2, x86_f32x8, __m128i, _mm_loadu_si128, X86_BF16X8_LOAD,
            x86_bf16x8_round, _mm_storeu_si128, _mm_stream_si128)
X86_AS_HALF(x86_f16_avx512, X86_AVX512, x86_f32x16, __m256i, _mm256_loadu_si256, X86_F16X16_LOAD,
            X86_F16X16_ROUND, _mm256_storeu_si256, _mm256_stream_si256)
X86_AS_HALF(x86_bf16_avx512, X86_AVX512, x86_f32x16, __m256i, _mm256_loadu_si256, X86_BF16X16_LOAD,
            x86_bf16x16_round, _mm256_storeu_si256, _mm256_stream_si256)

#endif

#endif
