/* kernels_x86.c - the rows of the kernel table for AVX2 and AVX-512.
 *
 * Invariants: as in kernels.c; results equal those of the portable kernels bit by bit. */
#include "kernels_x86.h"

#if KERNELS_X86
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

/* ---- the rows ---- */

X86_ADD_KERNEL(x86_f32_avx2, X86_AVX2, x86_f32x8, float, X86_F32_INFINITY, 0x00800000)
X86_ADD_KERNEL(x86_f64_avx2, X86_AVX2, x86_f64x4, double, X86_F64_INFINITY, 0x0010000000000000)
X86_ADD_KERNEL(x86_f32_avx512, X86_AVX512, x86_f32x16, float, X86_F32_INFINITY, 0x00800000)
X86_ADD_KERNEL(x86_f64_avx512, X86_AVX512, x86_f64x8, double, X86_F64_INFINITY, 0x0010000000000000)

X86_NORM2(x86_norm2_avx2, X86_AVX2, 4)
X86_NORM2(x86_norm2_avx512, X86_AVX512, 8)

#define X86_ROW(isa)                                                                          \
  {                                                                                           \
    .add = {[MLFAB_F32] = x86_f32_##isa##_add, [MLFAB_F64] = x86_f64_##isa##_add}, .norm2 = { \
      [MLFAB_F32] = x86_norm2_##isa                                                           \
    }                                                                                         \
  }

MLFAB__INTERNAL const mlfab__kernels *mlfab__kernels_row(int level) {
  static const mlfab__kernels rows[] = {{.norm2 = {NULL}}, X86_ROW(avx2), X86_ROW(avx512)};
  return &rows[level];
}

/* Some compilers cannot test for F16C, but processors with AVX2 and FMA have it. The filters' kernels need BMI2. */
MLFAB__INTERNAL int mlfab__kernel_level(void) {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}

#endif
