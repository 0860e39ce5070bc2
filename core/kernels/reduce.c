/* reduce.c - the kernels that add updates. Layer 1.
 *
 * For: adding a scaled update to weights and finding NaN and infinity in the same pass over memory.
 * Not for: choosing what is added, nor for threads: a caller splits the work if it wants to.
 *
 * Invariants: each element is round(w + round(scale * u)) at every level, so the level, the
 * position of an element and the flags of the compiler never show in the bits. Three things guard
 * this:
 *  - A product passes through an empty asm statement or a settled array before it is added, and no
 *    compiler can contract the two into a fused multiply-add, whatever its defaults are. (gcc
 *    contracts in gnu modes and knows no pragma against it; clang ignores the pragma under
 *    -ffast-math.)
 *  - Finiteness is a question about exponent bits asked in integers, which -ffinite-math-only does
 *    not touch. Adding one to an exponent of all ones carries into the sign bit; or-ing these
 *    carries keeps branches out of the loops.
 *  - The portable kernel also does the ragged ends for the vector kernels.
 *
 * Source: MLfabric §5 adds at aggregators and servers; its kernels are not described. */
#include "reduce.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define REDUCE_X86 1
#include <immintrin.h>
#else
#define REDUCE_X86 0
#endif

/* After this the compiler believes that anybody may have rewritten the array. */
#if defined(__GNUC__) || defined(__clang__)
#define REDUCE_SETTLE(array) __asm__ volatile("" : : "r"(array) : "memory")
#else
#pragma STDC FP_CONTRACT OFF
#define REDUCE_SETTLE(array) ((void)(array))
#endif

/* Elements whose products are staged at a time: small enough for the first cache. */
#define REDUCE_STAGE 256u
/* Below this a destination may still be in a cache when it is read, and streaming would evict
 * it. */
#define REDUCE_STREAM_BYTES 65536u

#define REDUCE_F32_EXPONENT 0x7f800000u
#define REDUCE_F32_ONE 0x00800000u
#define REDUCE_F64_EXPONENT 0x7ff0000000000000u
#define REDUCE_F64_ONE 0x0010000000000000u

MLFAB__INTERNAL uint32_t mlfab__dtype_bytes(int dtype) {
  switch (dtype) {
    case MLFAB_F32:
      return 4;
    case MLFAB_F64:
      return 8;
    case MLFAB_I64:
      return 8;
    default:
      return 0;
  }
}

MLFAB__INTERNAL const char *mlfab__dtype_name(int dtype) {
  switch (dtype) {
    case MLFAB_F32:
      return "F32";
    case MLFAB_F64:
      return "F64";
    case MLFAB_I64:
      return "I64";
    default:
      return "unknown";
  }
}

/* The portable kernel: dst = w + s * u, dst = s * u when w is NULL, nothing but the look when dst
 * is NULL. The destination gets loops of its own when it is w, because compilers vectorise two
 * pointers only after a test that they are apart. */
#define REDUCE_PORTABLE(name, real, word, exponent, one)                         \
  static int name(real *dst, const real *w, const real *u, real s, uint64_t n) { \
    real product[REDUCE_STAGE];                                                  \
    word carry = 0;                                                              \
    for (uint64_t at = 0; at < n; at += REDUCE_STAGE) {                          \
      size_t count = (size_t)mlfab__min(n - at, REDUCE_STAGE);                   \
      for (size_t i = 0; i < count; i++) product[i] = s * u[at + i];             \
      REDUCE_SETTLE(product);                                                    \
      for (size_t i = 0; i < count; i++) {                                       \
        word bits;                                                               \
        memcpy(&bits, &product[i], sizeof bits);                                 \
        carry |= (bits & (exponent)) + (one);                                    \
      }                                                                          \
      if (dst == NULL) continue;                                                 \
      if (w == NULL)                                                             \
        memcpy(dst + at, product, count * sizeof(real));                         \
      else if (w == dst)                                                         \
        for (size_t i = 0; i < count; i++) dst[at + i] += product[i];            \
      else                                                                       \
        for (size_t i = 0; i < count; i++) dst[at + i] = w[at + i] + product[i]; \
      REDUCE_SETTLE(dst);                                                        \
    }                                                                            \
    return !(carry >> (8 * sizeof(word) - 1));                                   \
  }

REDUCE_PORTABLE(reduce_f32_portable, float, uint32_t, REDUCE_F32_EXPONENT, REDUCE_F32_ONE)
REDUCE_PORTABLE(reduce_f64_portable, double, uint64_t, REDUCE_F64_EXPONENT, REDUCE_F64_ONE)

/* Wraps round through unsigned numbers; a multiply by 1 costs no time beside the memory. */
static void reduce_i64(int64_t *dst, const int64_t *w, const int64_t *u, int64_t scale,
                       uint64_t n) {
  uint64_t s = (uint64_t)scale;
  if (w == NULL)
    for (uint64_t i = 0; i < n; i++) dst[i] = (int64_t)(s * (uint64_t)u[i]);
  else if (w == dst)
    for (uint64_t i = 0; i < n; i++) dst[i] = (int64_t)((uint64_t)dst[i] + s * (uint64_t)u[i]);
  else
    for (uint64_t i = 0; i < n; i++) dst[i] = (int64_t)((uint64_t)w[i] + s * (uint64_t)u[i]);
}

#if REDUCE_X86
enum { REDUCE_LOOK, REDUCE_SCALE, REDUCE_ADD, REDUCE_ADD_STREAM };

/* A vector kernel for n elements, a multiple of 64 bytes; dst lies at 64 bytes when it is streamed
 * to. `what` is constant in every call, so that no test of it is left in the loop. The loop is
 * short enough to be bound by memory without being unrolled. */
#define REDUCE_VECTOR(name, isa, class, real, word, width, exponent, one, store_past_caches)       \
  typedef real name##_reals __attribute__((vector_size(width), aligned(sizeof(real)), may_alias)); \
  typedef word name##_words __attribute__((vector_size(width)));                                   \
  __attribute__((target(isa), always_inline)) static inline int name##_loop(                       \
      real *dst, const real *w, const real *u, real s, uint64_t n, int what) {                     \
    name##_words carry = {0};                                                                      \
    word any = 0;                                                                                  \
    for (uint64_t i = 0; i < n; i += (width) / sizeof(real)) {                                     \
      name##_reals x = *(const name##_reals *)(u + i) * s;                                         \
      __asm__("" : "+" class(x));                                                                  \
      carry |= ((name##_words)x & (exponent)) + (one);                                             \
      if (what >= REDUCE_ADD) x = *(const name##_reals *)(w + i) + x;                              \
      if (what == REDUCE_ADD_STREAM)                                                               \
        store_past_caches(dst + i, x);                                                             \
      else if (what != REDUCE_LOOK)                                                                \
        *(name##_reals *)(dst + i) = x;                                                            \
    }                                                                                              \
    if (what == REDUCE_ADD_STREAM) _mm_sfence();                                                   \
    for (size_t i = 0; i < (width) / sizeof(real); i++) any |= carry[i];                           \
    return !(any >> (8 * sizeof(word) - 1));                                                       \
  }                                                                                                \
  __attribute__((target(isa))) static int name(real *dst, const real *w, const real *u, real s,    \
                                               uint64_t n, int stream) {                           \
    if (dst == NULL) return name##_loop(dst, w, u, s, n, REDUCE_LOOK);                             \
    if (w == NULL) return name##_loop(dst, w, u, s, n, REDUCE_SCALE);                              \
    if (stream) return name##_loop(dst, w, u, s, n, REDUCE_ADD_STREAM);                            \
    return name##_loop(dst, w, u, s, n, REDUCE_ADD);                                               \
  }

#define REDUCE_STREAM_32(at, x) _mm256_stream_si256((__m256i *)(void *)(at), (__m256i)(x))
#define REDUCE_STREAM_64(at, x) _mm512_stream_si512((__m512i *)(void *)(at), (__m512i)(x))

REDUCE_VECTOR(reduce_f32_avx2, "avx2", "x", float, uint32_t, 32, REDUCE_F32_EXPONENT,
              REDUCE_F32_ONE, REDUCE_STREAM_32)
REDUCE_VECTOR(reduce_f64_avx2, "avx2", "x", double, uint64_t, 32, REDUCE_F64_EXPONENT,
              REDUCE_F64_ONE, REDUCE_STREAM_32)
REDUCE_VECTOR(reduce_f32_avx512, "avx512f", "v", float, uint32_t, 64, REDUCE_F32_EXPONENT,
              REDUCE_F32_ONE, REDUCE_STREAM_64)
REDUCE_VECTOR(reduce_f64_avx512, "avx512f", "v", double, uint64_t, 64, REDUCE_F64_EXPONENT,
              REDUCE_F64_ONE, REDUCE_STREAM_64)

/* Portable up to the first 64-byte line of dst, vectors while whole lines last, portable again. */
#define REDUCE_LEVELS(name, real)                                                         \
  static int name(int level, real *dst, const real *w, const real *u, real s, uint64_t n, \
                  int stream) {                                                           \
    const uint64_t lanes = 64 / sizeof(real);                                             \
    uintptr_t address = (uintptr_t)(dst != NULL ? (const real *)dst : u);                 \
    uint64_t head = mlfab__min(n, (0 - address) % 64 / sizeof(real));                     \
    uint64_t tail = (n - head) % lanes;                                                   \
    uint64_t body = n - head - tail;                                                      \
    if (level == 0 || body == 0) return name##_portable(dst, w, u, s, n);                 \
    if (dst == w || dst == u || n * sizeof(real) < REDUCE_STREAM_BYTES) stream = 0;       \
    int finite = name##_portable(dst, w, u, s, head);                                     \
    if (dst != NULL) dst += head;                                                         \
    if (w != NULL) w += head;                                                             \
    u += head;                                                                            \
    finite &= level >= 2 ? name##_avx512(dst, w, u, s, body, stream)                      \
                         : name##_avx2(dst, w, u, s, body, stream);                       \
    if (dst != NULL) dst += body;                                                         \
    if (w != NULL) w += body;                                                             \
    return finite & name##_portable(dst, w, u + body, s, tail);                           \
  }

REDUCE_LEVELS(reduce_f32, float)
REDUCE_LEVELS(reduce_f64, double)

MLFAB__INTERNAL int mlfab__reduce_level(void) {
  if (__builtin_cpu_supports("avx512f")) return 2;
  return __builtin_cpu_supports("avx2") ? 1 : 0;
}
#else
#define reduce_f32(level, dst, w, u, s, n, stream) reduce_f32_portable(dst, w, u, s, n)
#define reduce_f64(level, dst, w, u, s, n, stream) reduce_f64_portable(dst, w, u, s, n)

MLFAB__INTERNAL int mlfab__reduce_level(void) { return 0; }
#endif

MLFAB__INTERNAL int mlfab__reduce_finite(int dtype, const void *u, uint64_t n) {
  int level = mlfab__reduce_level();
  (void)level;
  if (dtype == MLFAB_F32) return reduce_f32(level, NULL, NULL, (const float *)u, 1.0f, n, 0);
  if (dtype == MLFAB_F64) return reduce_f64(level, NULL, NULL, (const double *)u, 1.0, n, 0);
  return 1;
}

MLFAB__INTERNAL int mlfab__reduce_add_with(int level, int dtype, void *dst, const void *w,
                                           const void *u, double scale, uint64_t n, int stream) {
  (void)level;
  (void)stream;
  switch (dtype) {
    case MLFAB_F32:
      return reduce_f32(level, (float *)dst, (const float *)w, (const float *)u, (float)scale, n,
                        stream);
    case MLFAB_F64:
      return reduce_f64(level, (double *)dst, (const double *)w, (const double *)u, scale, n,
                        stream);
    case MLFAB_I64:
      /* Beyond these bounds C gives the conversion no meaning. */
      if (!mlfab__finite(scale)) return 0;
      if (scale < -9223372036854775808.0 || scale >= 9223372036854775808.0) return 0;
      reduce_i64((int64_t *)dst, (const int64_t *)w, (const int64_t *)u, (int64_t)scale, n);
      return 1;
    default:
      assert(0 && "element type");
      return 0;
  }
}

MLFAB__INTERNAL int mlfab__reduce_add(int dtype, void *dst, const void *w, const void *u,
                                      double scale, uint64_t n, int stream) {
  return mlfab__reduce_add_with(mlfab__reduce_level(), dtype, dst, w, u, scale, n, stream);
}

/* a + -1 * b has the bits of a - b, because the product is exact. */
MLFAB__INTERNAL void mlfab__reduce_subtract(int dtype, void *dst, const void *a, const void *b,
                                            uint64_t n) {
  (void)mlfab__reduce_add(dtype, dst, a, b, -1.0, n, 0);
}

/* Several partial sums taken in turn and added in one order: fast, and the same bits every time on
 * one machine. No test of alignment, so that the place of the array does not show either. */
#define REDUCE_NORM2(name, type)                                                              \
  static double name(const type *u, uint64_t n) {                                             \
    double sum[8] = {0};                                                                      \
    uint64_t whole = n - n % 8;                                                               \
    for (uint64_t i = 0; i < whole; i += 8)                                                   \
      for (size_t j = 0; j < 8; j++) sum[j] += (double)u[i + j] * (double)u[i + j];           \
    for (uint64_t i = whole; i < n; i++) sum[i - whole] += (double)u[i] * (double)u[i];       \
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7])); \
  }

REDUCE_NORM2(reduce_norm2_f32, float)
REDUCE_NORM2(reduce_norm2_f64, double)
REDUCE_NORM2(reduce_norm2_i64, int64_t)

#if REDUCE_X86
/* The same for floats with two vectors of partial sums; what is left over goes the portable way.
 * Norms of F64 are rarer and are left to the compiler. */
#define REDUCE_NORM2_VECTOR(name, isa, lanes)                                                \
  typedef double name##_sums __attribute__((vector_size((lanes)*8)));                        \
  typedef float name##_items __attribute__((vector_size((lanes)*4), aligned(4), may_alias)); \
  __attribute__((target(isa))) static double name(const float *u, uint64_t n) {              \
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
    return sum + reduce_norm2_f32(u + whole, n - whole);                                     \
  }

REDUCE_NORM2_VECTOR(reduce_norm2_avx2, "avx2", 4)
REDUCE_NORM2_VECTOR(reduce_norm2_avx512, "avx512f", 8)
#endif

MLFAB__INTERNAL double mlfab__reduce_norm2(int dtype, const void *u, uint64_t n) {
#if REDUCE_X86
  int level = dtype == MLFAB_F32 ? mlfab__reduce_level() : 0;
  if (level >= 2) return reduce_norm2_avx512((const float *)u, n);
  if (level == 1) return reduce_norm2_avx2((const float *)u, n);
#endif
  switch (dtype) {
    case MLFAB_F32:
      return reduce_norm2_f32((const float *)u, n);
    case MLFAB_F64:
      return reduce_norm2_f64((const double *)u, n);
    case MLFAB_I64:
      return reduce_norm2_i64((const int64_t *)u, n);
    default:
      assert(0 && "element type");
      return 0.0;
  }
}

#undef REDUCE_X86
#undef REDUCE_SETTLE
#undef REDUCE_STAGE
#undef REDUCE_STREAM_BYTES
#undef REDUCE_F32_EXPONENT
#undef REDUCE_F32_ONE
#undef REDUCE_F64_EXPONENT
#undef REDUCE_F64_ONE
#undef REDUCE_PORTABLE
#undef REDUCE_VECTOR
#undef REDUCE_STREAM_32
#undef REDUCE_STREAM_64
#undef REDUCE_LEVELS
#undef REDUCE_NORM2
#undef REDUCE_NORM2_VECTOR
#undef reduce_f32
#undef reduce_f64
