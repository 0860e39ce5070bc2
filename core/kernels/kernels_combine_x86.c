/* kernels_combine_x86.c - element-wise operations of collectives for AVX2 and AVX-512.
 *
 * Invariants: as in kernels_combine.c; results equal those of the portable kernels bit by bit. */
#include "kernels_combine.h"

#include "half_x86.h"

#if KERNELS_X86
#define X86_INSTRUCTION(name, isa, value, instruction)             \
  isa X86_INLINE value name(value a, value b) {                    \
    __asm__(instruction " %2, %1, %0" : "=v"(a) : "v"(a), "v"(b)); \
    return a;                                                      \
  }

/* As the portable kernels; masks of all ones or zeros select. */
#define X86_REALS(name, isa, most, infinity, suffix)                                \
  X86_INSTRUCTION(name##_add, isa, name##_value, "vaddp" suffix)                    \
  X86_INSTRUCTION(name##_multiply, isa, name##_value, "vmulp" suffix)               \
  X86_INSTRUCTION(name##_quotient, isa, name##_value, "vdivp" suffix)               \
  isa X86_INLINE name##_words name##_rank(int op, name##_value x) {                 \
    name##_words v = (name##_words)x, nan = (v & (most)) > (infinity);              \
    v ^= (v < 0) & (most);                                                          \
    return (v & ~nan) | (nan & (op == MLFAB_OP_MAX ? (most) : ~(most)));            \
  }                                                                                 \
  isa X86_INLINE name##_value name##_step(int op, name##_value a, name##_value b) { \
    if (op == MLFAB_OP_PRODUCT) return name##_multiply(a, b);                       \
    if (op == MLFAB_OP_SUM) return name##_add(a, b);                                \
    name##_words x = name##_rank(op, a), y = name##_rank(op, b);                    \
    name##_words take = op == MLFAB_OP_MAX ? y > x : y < x;                         \
    return (name##_value)(((name##_words)b & take) | ((name##_words)a & ~take));    \
  }

#define X86_INTEGERS(name, isa, width)                                              \
  X86_TYPES(name, uint64_t, int64_t, width)                                         \
  isa X86_INLINE name##_value name##_step(int op, name##_value a, name##_value b) { \
    if (op == MLFAB_OP_PRODUCT) return a * b;                                       \
    if (op == MLFAB_OP_SUM) return a + b;                                           \
    if (op == MLFAB__OP_OR) return a | b;                                           \
    name##_words x = (name##_words)a, y = (name##_words)b;                          \
    name##_words take = op == MLFAB_OP_MAX ? y > x : y < x;                         \
    return (name##_value)((y & take) | (x & ~take));                                \
  }

X86_REALS(x86_f32x8, X86_AVX2, X86_F32_MOST, X86_F32_INFINITY, "s")
X86_REALS(x86_f64x4, X86_AVX2, X86_F64_MOST, X86_F64_INFINITY, "d")
X86_INTEGERS(x86_i64x4, X86_AVX2, 32)
X86_REALS(x86_f32x16, X86_AVX512, X86_F32_MOST, X86_F32_INFINITY, "s")
X86_REALS(x86_f64x8, X86_AVX512, X86_F64_MOST, X86_F64_INFINITY, "d")
X86_INTEGERS(x86_i64x8, X86_AVX512, 64)

X86_AS_IT_IS(x86_i64_avx2, X86_AVX2, x86_i64x4, _mm256_stream_si256, __m256i)
X86_AS_IT_IS(x86_i64_avx512, X86_AVX512, x86_i64x8, _mm512_stream_si512, __m512i)

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

X86_AS_HALF(x86_f16_avx2, X86_AVX2, x86_f32x8, __m128i, _mm_loadu_si128, X86_F16X8_LOAD,
            X86_F16X8_ROUND, _mm_storeu_si128, _mm_stream_si128)
X86_AS_HALF(x86_bf16_avx2, X86_AVX2, x86_f32x8, __m128i, _mm_loadu_si128, X86_BF16X8_LOAD,
            x86_bf16x8_round, _mm_storeu_si128, _mm_stream_si128)
X86_AS_HALF(x86_f16_avx512, X86_AVX512, x86_f32x16, __m256i, _mm256_loadu_si256, X86_F16X16_LOAD,
            X86_F16X16_ROUND, _mm256_storeu_si256, _mm256_stream_si256)
X86_AS_HALF(x86_bf16_avx512, X86_AVX512, x86_f32x16, __m256i, _mm256_loadu_si256, X86_BF16X16_LOAD,
            x86_bf16x16_round, _mm256_storeu_si256, _mm256_stream_si256)

/* ---- element-wise operations of collectives ---- */

/* Elements from..to-1, four vectors in each iteration, so that the additions are independent. `op` is
 * constant in every call of the loop. Bit d of `past`: write dst[d] with non-temporal stores; it is aligned
 * then. */
#define X86_KERNEL(name, isa, type, real, lanes, has_or)                                           \
  isa X86_INLINE void name##_loop(int op, void *const *dst, uint32_t ndst, uint64_t past,          \
                                  const void *const *in, uint32_t k, uint64_t from, uint64_t to) { \
    for (; from < to; from += 4 * (lanes)) {                                                       \
      const real *x = (const real *)in[0] + from;                                                  \
      type##_value a = name##_load(x), b = name##_load(x + (lanes));                               \
      type##_value c = name##_load(x + 2 * (lanes)), e = name##_load(x + 3 * (lanes));             \
      for (uint32_t j = 1; j < k; j++) {                                                           \
        x = (const real *)in[j] + from;                                                            \
        a = type##_step(op, a, name##_load(x));                                                    \
        b = type##_step(op, b, name##_load(x + (lanes)));                                          \
        c = type##_step(op, c, name##_load(x + 2 * (lanes)));                                      \
        e = type##_step(op, e, name##_load(x + 3 * (lanes)));                                      \
      }                                                                                            \
      for (uint32_t d = 0; d < ndst; d++) {                                                        \
        real *y = (real *)dst[d] + from;                                                           \
        int stream = (int)(past >> d & 1);                                                         \
        name##_store(y, a, stream);                                                                \
        name##_store(y + (lanes), b, stream);                                                      \
        name##_store(y + 2 * (lanes), c, stream);                                                  \
        name##_store(y + 3 * (lanes), e, stream);                                                  \
      }                                                                                            \
    }                                                                                              \
    if (past) _mm_sfence();                                                                        \
  }                                                                                                \
  isa static void name(int op, void *const *dst, uint32_t ndst, uint64_t past,                     \
                       const void *const *in, uint32_t k, uint64_t from, uint64_t to) {            \
    if (op == MLFAB_OP_MIN)                                                                        \
      name##_loop(MLFAB_OP_MIN, dst, ndst, past, in, k, from, to);                                 \
    else if (op == MLFAB_OP_MAX)                                                                   \
      name##_loop(MLFAB_OP_MAX, dst, ndst, past, in, k, from, to);                                 \
    else if (op == MLFAB_OP_PRODUCT)                                                               \
      name##_loop(MLFAB_OP_PRODUCT, dst, ndst, past, in, k, from, to);                             \
    else if ((has_or) && op == MLFAB__OP_OR)                                                       \
      name##_loop(MLFAB__OP_OR, dst, ndst, past, in, k, from, to);                                 \
    else if (k == 2 && ndst == 1 && past == 0) /* the usual case has a loop of its own */          \
      name##_loop(MLFAB_OP_SUM, dst, 1, 0, in, 2, from, to);                                       \
    else                                                                                           \
      name##_loop(MLFAB_OP_SUM, dst, ndst, past, in, k, from, to);                                 \
  }

#define X86_DIVIDE(name, isa, type, real, number, lanes)                               \
  isa static void name##_divide(void *data, uint32_t by, uint64_t from, uint64_t to) { \
    type##_value divisor = (type##_value){0} + (number)by;                             \
    for (; from < to; from += (lanes)) {                                               \
      real *x = (real *)data + from;                                                   \
      name##_store(x, type##_quotient(name##_load(x), divisor), 0);                    \
    }                                                                                  \
  }

X86_KERNEL(x86_f32_avx2, X86_AVX2, x86_f32x8, float, 8, 0)
X86_KERNEL(x86_f64_avx2, X86_AVX2, x86_f64x4, double, 4, 0)
X86_KERNEL(x86_i64_avx2, X86_AVX2, x86_i64x4, int64_t, 4, 1)
X86_KERNEL(x86_f16_avx2, X86_AVX2, x86_f32x8, uint16_t, 8, 0)
X86_KERNEL(x86_bf16_avx2, X86_AVX2, x86_f32x8, uint16_t, 8, 0)
X86_KERNEL(x86_f32_avx512, X86_AVX512, x86_f32x16, float, 16, 0)
X86_KERNEL(x86_f64_avx512, X86_AVX512, x86_f64x8, double, 8, 0)
X86_KERNEL(x86_i64_avx512, X86_AVX512, x86_i64x8, int64_t, 8, 1)
X86_KERNEL(x86_f16_avx512, X86_AVX512, x86_f32x16, uint16_t, 16, 0)
X86_KERNEL(x86_bf16_avx512, X86_AVX512, x86_f32x16, uint16_t, 16, 0)

X86_DIVIDE(x86_f32_avx2, X86_AVX2, x86_f32x8, float, float, 8)
X86_DIVIDE(x86_f64_avx2, X86_AVX2, x86_f64x4, double, double, 4)
X86_DIVIDE(x86_f16_avx2, X86_AVX2, x86_f32x8, uint16_t, float, 8)
X86_DIVIDE(x86_bf16_avx2, X86_AVX2, x86_f32x8, uint16_t, float, 8)
X86_DIVIDE(x86_f32_avx512, X86_AVX512, x86_f32x16, float, float, 16)
X86_DIVIDE(x86_f64_avx512, X86_AVX512, x86_f64x8, double, double, 8)
X86_DIVIDE(x86_f16_avx512, X86_AVX512, x86_f32x16, uint16_t, float, 16)
X86_DIVIDE(x86_bf16_avx512, X86_AVX512, x86_f32x16, uint16_t, float, 16)

#define X86_COMBINES(isa)                       \
  {                                             \
    .combine = {[MLFAB_F32] = x86_f32_##isa,    \
                [MLFAB_F64] = x86_f64_##isa,    \
                [MLFAB_I64] = x86_i64_##isa,    \
                [MLFAB_F16] = x86_f16_##isa,    \
                [MLFAB_BF16] = x86_bf16_##isa}, \
    .divide = {                                 \
      [MLFAB_F32] = x86_f32_##isa##_divide,     \
      [MLFAB_F64] = x86_f64_##isa##_divide,     \
      [MLFAB_F16] = x86_f16_##isa##_divide,     \
      [MLFAB_BF16] = x86_bf16_##isa##_divide    \
    }                                           \
  }

MLFAB__INTERNAL const mlfab__combines *mlfab__combines_row(int level) {
  static const mlfab__combines rows[] = {
      {.divide = {NULL}}, X86_COMBINES(avx2), X86_COMBINES(avx512)};
  return &rows[level];
}

#else

MLFAB__INTERNAL const mlfab__combines *mlfab__combines_row(int level) {
  static const mlfab__combines portable;
  (void)level;
  return &portable;
}

#endif
