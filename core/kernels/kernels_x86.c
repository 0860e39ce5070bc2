/* kernels_x86.c - the rows of the kernel table for AVX2 and AVX-512. Layer 1.
 *
 * Invariants: as in kernels.c; results equal those of the portable kernels bit by bit. */
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

/* As the portable kernels; masks of all ones or zeros select. */
#define X86_REALS(name, isa, real, word, width, most, infinity, suffix)             \
  X86_TYPES(name, real, word, width)                                                \
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

X86_REALS(x86_f32x8, X86_AVX2, float, int32_t, 32, X86_F32_MOST, X86_F32_INFINITY, "s")
X86_REALS(x86_f64x4, X86_AVX2, double, int64_t, 32, X86_F64_MOST, X86_F64_INFINITY, "d")
X86_INTEGERS(x86_i64x4, X86_AVX2, 32)
X86_REALS(x86_f32x16, X86_AVX512, float, int32_t, 64, X86_F32_MOST, X86_F32_INFINITY, "s")
X86_REALS(x86_f64x8, X86_AVX512, double, int64_t, 64, X86_F64_MOST, X86_F64_INFINITY, "d")
X86_INTEGERS(x86_i64x8, X86_AVX512, 64)

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

/* ---- adding an update ---- */

enum { X86_LOOK, X86_SCALE, X86_ADD, X86_ADD_STREAM };

/* `what` is constant in every call, so the loop has no test of it. The loop is memory-bound without
 * unrolling. */
#define X86_ADD_KERNEL(name, isa, type, real, infinity, one)                                      \
  isa X86_INLINE int name##_add_loop(real *dst, const real *w, const real *u, real s, uint64_t n, \
                                     int what) {                                                  \
    const uint64_t lanes = sizeof(type##_value) / sizeof(real);                                   \
    type##_bits carry = {0};                                                                      \
    uint64_t any = 0;                                                                             \
    for (uint64_t i = 0; i < n; i += lanes) {                                                     \
      type##_value x = name##_load(u + i) * s;                                                    \
      __asm__("" : "+v"(x));                                                                      \
      carry |= ((type##_bits)x & (infinity)) + (one);                                             \
      if (what >= X86_ADD) x = name##_load(w + i) + x;                                            \
      if (what != X86_LOOK) name##_store(dst + i, x, what == X86_ADD_STREAM);                     \
    }                                                                                             \
    if (what == X86_ADD_STREAM) _mm_sfence();                                                     \
    for (size_t i = 0; i < lanes; i++) any |= carry[i];                                           \
    return !(any >> (8 * sizeof(real) - 1));                                                      \
  }                                                                                               \
  isa static int name##_add(void *to, const void *from, const void *what, double s, uint64_t n,   \
                            int stream) {                                                         \
    real *dst = (real *)to;                                                                       \
    const real *w = (const real *)from, *u = (const real *)what;                                  \
    if (dst == NULL) return name##_add_loop(dst, w, u, (real)s, n, X86_LOOK);                     \
    if (w == NULL) return name##_add_loop(dst, w, u, (real)s, n, X86_SCALE);                      \
    if (stream) return name##_add_loop(dst, w, u, (real)s, n, X86_ADD_STREAM);                    \
    return name##_add_loop(dst, w, u, (real)s, n, X86_ADD);                                       \
  }

/* Two vectors of partial sums, added in a fixed order. F64 norms are rarer and left to the compiler. */
#define X86_NORM2(name, isa, lanes)                                                          \
  typedef double name##_sums __attribute__((vector_size((lanes)*8)));                        \
  typedef float name##_items __attribute__((vector_size((lanes)*4), aligned(4), may_alias)); \
  isa static double name(const void *data, uint64_t n, uint64_t *done_p) {                   \
    const float *u = (const float *)data;                                                    \
    name##_sums a = {0}, b = {0};                                                            \
    uint64_t whole = n - n % (2 * (lanes));                                                  \
    double sum = 0.0;                                                                        \
    for (uint64_t i = 0; i < whole; i += 2 * (lanes)) {                                      \
      name##_sums x = __builtin_convertvector(*(const name##_items *)(u + i), name##_sums);  \
      name##_sums y =                                                                        \
          __builtin_convertvector(*(const name##_items *)(u + i + (lanes)), name##_sums);    \
      a += x * x;                                                                            \
      b += y * y;                                                                            \
    }                                                                                        \
    a += b;                                                                                  \
    for (size_t j = 0; j < (lanes); j++) sum += a[j];                                        \
    *done_p = whole;                                                                         \
    return sum;                                                                              \
  }

/* ---- 16-bit numbers: as for collectives, but values that are too large are clamped before rounding ---- */

#define X86_LEAST8(a, b) (x86_f32x8_words) _mm256_min_epi32((__m256i)(a), (__m256i)(b))
#define X86_LEAST16(a, b) (x86_f32x16_words) _mm512_min_epi32((__m512i)(a), (__m512i)(b))
#define X86_HALVES(name, isa, type, half, vector, least, cut, write)                  \
  isa static uint64_t name##_half_store(uint16_t *out, const float *in, uint64_t n) { \
    const type##_words top = (type##_words){0} + (int32_t)mlfab__half_top(half);      \
    const uint64_t lanes = sizeof(type##_value) / sizeof(float);                      \
    uint64_t i = 0;                                                                   \
    for (; i + lanes <= n; i += lanes) {                                              \
      type##_words x = (type##_words) * (const type##_line *)(in + i);                \
      x = (x & ~X86_F32_MOST) | least(x & X86_F32_MOST, top);                         \
      write((vector *)(void *)(out + i), cut((type##_value)x));                       \
    }                                                                                 \
    return i;                                                                         \
  }                                                                                   \
  isa static uint64_t name##_half_load(float *out, const uint16_t *in, uint64_t n) {  \
    const uint64_t lanes = sizeof(type##_value) / sizeof(float);                      \
    uint64_t i = 0;                                                                   \
    for (; i + lanes <= n; i += lanes)                                                \
      *(type##_line *)(out + i) = (type##_line)name##_load(in + i);                   \
    return i;                                                                         \
  }

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
    else if (k == 2 && ndst == 1 && past == 0) /* the usual case, as a loop of its own */          \
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

/* ---- the rows ---- */

X86_AS_IT_IS(x86_f32_avx2, X86_AVX2, x86_f32x8, _mm256_stream_si256, __m256i)
X86_AS_IT_IS(x86_f64_avx2, X86_AVX2, x86_f64x4, _mm256_stream_si256, __m256i)
X86_AS_IT_IS(x86_i64_avx2, X86_AVX2, x86_i64x4, _mm256_stream_si256, __m256i)
X86_AS_IT_IS(x86_f32_avx512, X86_AVX512, x86_f32x16, _mm512_stream_si512, __m512i)
X86_AS_IT_IS(x86_f64_avx512, X86_AVX512, x86_f64x8, _mm512_stream_si512, __m512i)
X86_AS_IT_IS(x86_i64_avx512, X86_AVX512, x86_i64x8, _mm512_stream_si512, __m512i)
X86_AS_HALF(x86_f16_avx2, X86_AVX2, x86_f32x8, __m128i, _mm_loadu_si128, X86_F16X8_LOAD,
            X86_F16X8_ROUND, _mm_storeu_si128, _mm_stream_si128)
X86_AS_HALF(x86_bf16_avx2, X86_AVX2, x86_f32x8, __m128i, _mm_loadu_si128, X86_BF16X8_LOAD,
            x86_bf16x8_round, _mm_storeu_si128, _mm_stream_si128)
X86_AS_HALF(x86_f16_avx512, X86_AVX512, x86_f32x16, __m256i, _mm256_loadu_si256, X86_F16X16_LOAD,
            X86_F16X16_ROUND, _mm256_storeu_si256, _mm256_stream_si256)
X86_AS_HALF(x86_bf16_avx512, X86_AVX512, x86_f32x16, __m256i, _mm256_loadu_si256, X86_BF16X16_LOAD,
            x86_bf16x16_round, _mm256_storeu_si256, _mm256_stream_si256)

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

X86_ADD_KERNEL(x86_f32_avx2, X86_AVX2, x86_f32x8, float, X86_F32_INFINITY, 0x00800000)
X86_ADD_KERNEL(x86_f64_avx2, X86_AVX2, x86_f64x4, double, X86_F64_INFINITY, 0x0010000000000000)
X86_ADD_KERNEL(x86_f32_avx512, X86_AVX512, x86_f32x16, float, X86_F32_INFINITY, 0x00800000)
X86_ADD_KERNEL(x86_f64_avx512, X86_AVX512, x86_f64x8, double, X86_F64_INFINITY, 0x0010000000000000)

X86_NORM2(x86_norm2_avx2, X86_AVX2, 4)
X86_NORM2(x86_norm2_avx512, X86_AVX512, 8)

X86_HALVES(x86_f16_avx2, X86_AVX2, x86_f32x8, MLFAB_HALF_F16, __m128i, X86_LEAST8, X86_F16X8_ROUND,
           _mm_storeu_si128)
X86_HALVES(x86_bf16_avx2, X86_AVX2, x86_f32x8, MLFAB_HALF_BF16, __m128i, X86_LEAST8, x86_bf16x8_cut,
           _mm_storeu_si128)
X86_HALVES(x86_f16_avx512, X86_AVX512, x86_f32x16, MLFAB_HALF_F16, __m256i, X86_LEAST16,
           X86_F16X16_ROUND, _mm256_storeu_si256)
X86_HALVES(x86_bf16_avx512, X86_AVX512, x86_f32x16, MLFAB_HALF_BF16, __m256i, X86_LEAST16,
           x86_bf16x16_cut, _mm256_storeu_si256)

#define X86_ROW(isa)                                                               \
  {                                                                                \
    .add = {[MLFAB_F32] = x86_f32_##isa##_add, [MLFAB_F64] = x86_f64_##isa##_add}, \
    .combine = {[MLFAB_F32] = x86_f32_##isa,                                       \
                [MLFAB_F64] = x86_f64_##isa,                                       \
                [MLFAB_I64] = x86_i64_##isa,                                       \
                [MLFAB_F16] = x86_f16_##isa,                                       \
                [MLFAB_BF16] = x86_bf16_##isa},                                    \
    .divide = {[MLFAB_F32] = x86_f32_##isa##_divide,                               \
               [MLFAB_F64] = x86_f64_##isa##_divide,                               \
               [MLFAB_F16] = x86_f16_##isa##_divide,                               \
               [MLFAB_BF16] = x86_bf16_##isa##_divide},                            \
    .norm2 = {[MLFAB_F32] = x86_norm2_##isa},                                      \
    .half_store = {[MLFAB_HALF_F16] = x86_f16_##isa##_half_store,                  \
                   [MLFAB_HALF_BF16] = x86_bf16_##isa##_half_store},               \
    .half_load = {                                                                 \
      [MLFAB_HALF_F16] = x86_f16_##isa##_half_load,                                \
      [MLFAB_HALF_BF16] = x86_bf16_##isa##_half_load                               \
    }                                                                              \
  }

MLFAB__INTERNAL const mlfab__kernels *mlfab__kernels_row(int level) {
  static const mlfab__kernels rows[] = {{.norm2 = {NULL}}, X86_ROW(avx2), X86_ROW(avx512)};
  return &rows[level];
}

/* Not every compiler can test for F16C; processors with AVX2 and FMA have it. The filters' kernels need
 * BMI2. */
MLFAB__INTERNAL int mlfab__kernel_level(void) {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}

#endif
