/* kernels_combine.c - element-wise operations of collectives: the portable kernels, and the choice of a row.
 *
 * Invariants: as in kernels.c. Results have the same bits for every row, because:
 *  - On x86, sums, products and quotients are asm instructions. No compiler can reassociate or contract them, divide by
 *    a reciprocal, or exchange operands (of two NaNs the processor keeps the first).
 *  - Minimum and maximum compare integers that ascend as the numbers do, so that neither -ffinite-math-only nor
 *    -fno-signed-zeros has an effect. */
#include "kernels_combine.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define COMBINE_X86 1
#else
#define COMBINE_X86 0
#endif

/* Elements staged by the portable kernels: fits the L1 cache. */
#define COMBINE_STAGE 256u
/* A smaller destination may still be in a cache when it is read; streaming would evict it. */
#define COMBINE_STREAM_BYTES 65536u
/* Vector kernels process multiples of this; in larger arrays, from a cache line on. */
#define COMBINE_LINE 64u
#define COMBINE_TURN 256u
#define COMBINE_LITTLE_BYTES 32768u
/* Copies to several destinations proceed in pieces that stay in the L1 cache. */
#define COMBINE_COPY_BYTES 16384u

#define COMBINE_F32_MOST INT32_MAX
#define COMBINE_F32_INFINITY 0x7f800000
#define COMBINE_F64_MOST INT64_MAX
#define COMBINE_F64_INFINITY 0x7ff0000000000000

MLFAB__INTERNAL uint32_t mlfab__element_bytes(int dtype) {
  return dtype == MLFAB_F16 || dtype == MLFAB_BF16 ? 2 : mlfab__dtype_bytes(dtype);
}

MLFAB__INTERNAL const char *mlfab__op_name(int op) {
  static const char *const names[] = {"SUM", "MEAN", "MIN", "MAX", "PRODUCT", "OR"};
  return op >= 0 && (size_t)op < MLFAB__COUNT(names) ? names[op] : "unknown";
}

/* ---- unlike in half.h, infinity and NaN are kept, and sums overflow ---- */

/* A NaN stays NaN and becomes quiet, as with the processor's instruction. 65520 is halfway between the largest number
 * and the next one, which does not exist. */
static uint16_t combine_round_f16(uint32_t bits) {
  uint32_t sign = bits >> 16 & 0x8000u, m = bits & 0x7fffffffu;
  float x;
  if (m > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (m >> 13 & 0x3ffu));
  if (m >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  memcpy(&x, &bits, sizeof x);
  return mlfab__half_one(MLFAB_HALF_F16, x);
}

static uint16_t combine_round_bf16(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* ---- the portable kernels ---- */

typedef union combine_stage {
  float f32[COMBINE_STAGE];
  double f64[COMBINE_STAGE];
  int64_t i64[COMBINE_STAGE];
} combine_stage;

/* On other processors, one array after another is added to a stage: sums keep their order, but the compiler
 * chooses which of two NaNs is kept. The divisor is volatile so that the compiler does not use its
 * reciprocal. */
#if COMBINE_X86
#define COMBINE_SCALAR(name, real, instruction, operator) \
  static inline real name(real a, real b) {               \
    __asm__(instruction " %1, %0" : "+x"(a) : "x"(b));    \
    return a;                                             \
  }
#define COMBINE_QUOTIENT(name, real, instruction) COMBINE_SCALAR(name, real, instruction, /)
#else
#define COMBINE_SCALAR(name, real, instruction, operator) \
  static inline real name(real a, real b) { return a operator b; }
#define COMBINE_QUOTIENT(name, real, instruction) \
  static inline real name(real a, real b) {       \
    volatile real by = b;                         \
    return a / by;                                \
  }
#endif

COMBINE_SCALAR(combine_f32_add, float, "addss", +)
COMBINE_SCALAR(combine_f64_add, double, "addsd", +)
COMBINE_SCALAR(combine_f32_multiply, float, "mulss", *)
COMBINE_SCALAR(combine_f64_multiply, double, "mulsd", *)
COMBINE_QUOTIENT(combine_f32_quotient, float, "divss")
COMBINE_QUOTIENT(combine_f64_quotient, double, "divsd")

/* An integer that orders the numbers: -0 just below +0, and NaN at the end that wins. Negative numbers
 * descend with their bits, so these are inverted. */
#define COMBINE_STEPS(name, real, word, most, infinity)                                         \
  static inline word name##_rank(int op, real x) {                                              \
    word v;                                                                                     \
    memcpy(&v, &x, sizeof v);                                                                   \
    if ((v & (most)) > (infinity)) return op == MLFAB_OP_MAX ? (most) : ~(most);                \
    return v < 0 ? v ^ (most) : v;                                                              \
  }                                                                                             \
  static void name##_steps(int op, real *to, const real *x, size_t n) {                         \
    switch (op) {                                                                               \
      case MLFAB_OP_MIN:                                                                        \
        for (size_t i = 0; i < n; i++)                                                          \
          if (name##_rank(op, x[i]) < name##_rank(op, to[i])) memcpy(to + i, x + i, sizeof *x); \
        return;                                                                                 \
      case MLFAB_OP_MAX:                                                                        \
        for (size_t i = 0; i < n; i++)                                                          \
          if (name##_rank(op, x[i]) > name##_rank(op, to[i])) memcpy(to + i, x + i, sizeof *x); \
        return;                                                                                 \
      case MLFAB_OP_PRODUCT:                                                                    \
        for (size_t i = 0; i < n; i++) to[i] = name##_multiply(to[i], x[i]);                    \
        return;                                                                                 \
      default:                                                                                  \
        for (size_t i = 0; i < n; i++) to[i] = name##_add(to[i], x[i]);                         \
    }                                                                                           \
  }

COMBINE_STEPS(combine_f32, float, int32_t, COMBINE_F32_MOST, COMBINE_F32_INFINITY)
COMBINE_STEPS(combine_f64, double, int64_t, COMBINE_F64_MOST, COMBINE_F64_INFINITY)

static void combine_i64_steps(int op, int64_t *to, const int64_t *x, size_t n) {
  switch (op) {
    case MLFAB_OP_MIN:
      for (size_t i = 0; i < n; i++) to[i] = x[i] < to[i] ? x[i] : to[i];
      return;
    case MLFAB_OP_MAX:
      for (size_t i = 0; i < n; i++) to[i] = x[i] > to[i] ? x[i] : to[i];
      return;
    case MLFAB_OP_PRODUCT:
      for (size_t i = 0; i < n; i++) to[i] = (int64_t)((uint64_t)to[i] * (uint64_t)x[i]);
      return;
    case MLFAB__OP_OR:
      for (size_t i = 0; i < n; i++) to[i] |= x[i];
      return;
    default:
      for (size_t i = 0; i < n; i++) to[i] = (int64_t)((uint64_t)to[i] + (uint64_t)x[i]);
  }
}

static void combine_load(int dtype, combine_stage *stage, const void *in, uint64_t at, size_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16) {
    for (size_t i = 0; i < n; i++)
      stage->f32[i] = mlfab__half_back(mlfab__half_of(dtype), ((const uint16_t *)in)[at + i]);
  } else {
    uint32_t bytes = mlfab__element_bytes(dtype);
    memcpy(stage, (const char *)in + at * bytes, n * bytes);
  }
}

static void combine_store(int dtype, void *out, uint64_t at, const combine_stage *stage, size_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16) {
    for (size_t i = 0; i < n; i++) {
      uint32_t bits;
      memcpy(&bits, &stage->f32[i], sizeof bits);
      ((uint16_t *)out)[at + i] =
          dtype == MLFAB_F16 ? combine_round_f16(bits) : combine_round_bf16(bits);
    }
  } else {
    uint32_t bytes = mlfab__element_bytes(dtype);
    memcpy((char *)out + at * bytes, stage, n * bytes);
  }
}

/* Combines the elements from..to-1. */
static void combine_portable(int op, int dtype, void *const *dst, uint32_t ndst,
                             const void *const *in, uint32_t k, uint64_t from, uint64_t to) {
  combine_stage sum, next;
  for (; from < to; from += COMBINE_STAGE) {
    size_t n = (size_t)mlfab__min(to - from, COMBINE_STAGE);
    combine_load(dtype, &sum, in[0], from, n);
    for (uint32_t j = 1; j < k; j++) {
      combine_load(dtype, &next, in[j], from, n);
      if (dtype == MLFAB_I64)
        combine_i64_steps(op, sum.i64, next.i64, n);
      else if (dtype == MLFAB_F64)
        combine_f64_steps(op, sum.f64, next.f64, n);
      else
        combine_f32_steps(op, sum.f32, next.f32, n);
    }
    for (uint32_t d = 0; d < ndst; d++) combine_store(dtype, dst[d], from, &sum, n);
  }
}

static void combine_divide_portable(int dtype, void *data, uint32_t by, uint64_t from,
                                    uint64_t to) {
  combine_stage stage;
  for (; from < to; from += COMBINE_STAGE) {
    size_t n = (size_t)mlfab__min(to - from, COMBINE_STAGE);
    combine_load(dtype, &stage, data, from, n);
    if (dtype == MLFAB_F64)
      for (size_t i = 0; i < n; i++) stage.f64[i] = combine_f64_quotient(stage.f64[i], by);
    else
      for (size_t i = 0; i < n; i++) stage.f32[i] = combine_f32_quotient(stage.f32[i], (float)by);
    combine_store(dtype, data, from, &stage, n);
  }
}

MLFAB__INTERNAL int mlfab__elements_finite(int dtype, const void *data, uint64_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16)
    return mlfab__half_finite(mlfab__half_of(dtype), (const uint16_t *)data, n);
  return mlfab__kernel_finite(dtype, data, n);
}

/* The destinations to write with non-temporal stores: all but those that are inputs, whose lines are in the cache. */
static uint64_t combine_past(void *const *dst, uint32_t ndst, const void *const *in, uint32_t k) {
  uint64_t past = 0;
  for (uint32_t d = 0; d < ndst; d++) {
    uint32_t j = 0;
    while (j < k && in[j] != dst[d]) j++;
    if (j == k && ((uintptr_t)dst[d] - (uintptr_t)dst[0]) % COMBINE_LINE == 0)
      past |= (uint64_t)1 << d;
  }
  return past;
}

/* Splits n elements into those before the first cache line, and those for vectors. For small arrays the
 * head would cost more than alignment saves. */
static void combine_split(const void *at, uint64_t n, uint32_t bytes, uint64_t *head,
                          uint64_t *body) {
  *head = mlfab__min(n, (0 - (uintptr_t)at) % COMBINE_LINE / bytes);
  if (n * bytes <= COMBINE_LITTLE_BYTES) *head = 0;
  *body = (n - *head) - (n - *head) % (COMBINE_TURN / bytes);
}

static void combine_copy(void *const *dst, uint32_t ndst, const char *in, uint64_t bytes) {
  uint64_t most = ndst == 1 ? bytes : COMBINE_COPY_BYTES;
  for (uint64_t at = 0; at < bytes; at += most)
    for (uint32_t d = 0; d < ndst; d++)
      if (dst[d] != (const void *)in)
        memcpy((char *)dst[d] + at, in + at, (size_t)mlfab__min(most, bytes - at));
}

MLFAB__INTERNAL void mlfab__kernel_combine_many_with(int level, int op, int dtype, void *const *dst,
                                                     uint32_t ndst, const void *const *in,
                                                     uint32_t k, uint64_t n, int stream) {
  const mlfab__combines *row = mlfab__combines_row(level & ~MLFAB__KERNEL_CBLAS);
  uint32_t bytes = mlfab__element_bytes(dtype);
  uint64_t head, body, done = 0;
  assert(bytes > 0 && k >= 1 && k <= MLFAB__COMBINE_MOST);
  assert(ndst >= 1 && ndst <= MLFAB__COMBINE_MOST);
  assert(op != MLFAB__OP_OR || dtype == MLFAB_I64);
  if (k == 1) {
    combine_copy(dst, ndst, (const char *)in[0], n * bytes);
    return;
  }
#if MLFAB_WITH_CBLAS
  const mlfab__kernels *cblas = mlfab__kernel_cblas(level, dtype);
  if (cblas && (op == MLFAB_OP_SUM || op == MLFAB_OP_MEAN)) {
    for (uint64_t count; done < n; done += count) {
      count = mlfab__min(n - done, MLFAB__CBLAS_MOST);
      cblas->combine[dtype](op, dst, ndst, 0, in, k, done, done + count);
    }
    return;
  }
#endif
  combine_split(dst[0], n, bytes, &head, &body);
  if (row->combine[dtype] && body > 0) {
    uint64_t past =
        stream && n * bytes >= COMBINE_STREAM_BYTES ? combine_past(dst, ndst, in, k) : 0;
    combine_portable(op, dtype, dst, ndst, in, k, 0, head);
    done = head + body;
    row->combine[dtype](op, dst, ndst, past, in, k, head, done);
  }
  combine_portable(op, dtype, dst, ndst, in, k, done, n);
}

MLFAB__INTERNAL void mlfab__kernel_combine_with(int level, int op, int dtype, void *dst,
                                                const void *a, const void *b, uint64_t n,
                                                int stream) {
  const void *in[2] = {a, b};
  mlfab__kernel_combine_many_with(level, op, dtype, &dst, 1, in, 2, n, stream);
}

MLFAB__INTERNAL void mlfab__kernel_divide_with(int level, int dtype, void *data, uint64_t n,
                                               uint32_t by) {
  const mlfab__combines *row = mlfab__combines_row(level);
  uint64_t head, body, done = 0;
  assert(dtype != MLFAB_I64 && mlfab__element_bytes(dtype) > 0 && by > 0 && by <= 1u << 24);
  combine_split(data, n, mlfab__element_bytes(dtype), &head, &body);
  if (row->divide[dtype] && body > 0) {
    combine_divide_portable(dtype, data, by, 0, head);
    done = head + body;
    row->divide[dtype](data, by, head, done);
  }
  combine_divide_portable(dtype, data, by, done, n);
}
