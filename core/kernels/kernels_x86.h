/* kernels_x86.h - vector types for the kernels of x86. Included by the files that have such kernels. */
#ifndef MLFAB__KERNELS_X86_H
#define MLFAB__KERNELS_X86_H

#include "kernels.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KERNELS_X86 1
#include <immintrin.h>

#define X86_AVX2 __attribute__((target("avx2,f16c")))
#define X86_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define X86_INLINE __attribute__((always_inline, unused)) static inline

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

X86_TYPES(x86_f32x8, float, int32_t, 32)
X86_TYPES(x86_f64x4, double, int64_t, 32)
X86_TYPES(x86_f32x16, float, int32_t, 64)
X86_TYPES(x86_f64x8, double, int64_t, 64)

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

X86_AS_IT_IS(x86_f32_avx2, X86_AVX2, x86_f32x8, _mm256_stream_si256, __m256i)
X86_AS_IT_IS(x86_f64_avx2, X86_AVX2, x86_f64x4, _mm256_stream_si256, __m256i)
X86_AS_IT_IS(x86_f32_avx512, X86_AVX512, x86_f32x16, _mm512_stream_si512, __m512i)
X86_AS_IT_IS(x86_f64_avx512, X86_AVX512, x86_f64x8, _mm512_stream_si512, __m512i)
#else
#define KERNELS_X86 0
#endif

#endif
