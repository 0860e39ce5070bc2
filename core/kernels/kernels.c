/* kernels.c - arithmetic on arrays: the portable kernels, and the choice of a row. Layer 1.
 *
 * For: adding a scaled update to weights, summing the data of several workers, finding NaN and infinity in
 * the same pass over memory, 16-bit numbers. Not for: choosing what is added, or threads: a caller may
 * split the work.
 *
 * Invariants: an element of a result depends only on its operands and their order, never on the row,
 * alignment, position in the array or compiler flags: workers that compute the same sum must get the same
 * bits. This is ensured as follows:
 *  - The product of an update and its scale passes through an empty asm statement or a settled array before
 *    it is added, so that no compiler can contract the two into a fused multiply-add. (gcc contracts in gnu
 *    modes and has no pragma against it; clang ignores the pragma under -ffast-math.)
 *  - On x86, sums, products and quotients of collectives are asm instructions. No compiler can reassociate
 *    or contract them, divide by a reciprocal, or exchange operands (of two NaNs the processor keeps the
 *    first).
 *  - Minimum and maximum compare integers that ascend as the numbers do, so that neither -ffinite-math-only
 *    nor -fno-signed-zeros has an effect.
 *  - Finiteness is tested on exponent bits in integers. Adding one to an exponent of all ones carries into
 *    the sign bit; or-ing the carries keeps branches out of the loops.
 *  - The portable kernels process the unaligned ends for the rows.
 * All inputs of a block are read before it is written, so a destination may be an input.
 *
 * Source: MLfabric §5 adds at aggregators and servers, but does not describe kernels. */
#include "kernels.h"

#include "half.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KERNEL_X86 1
#else
#define KERNEL_X86 0
#endif

/* The compiler must assume that the array was rewritten. */
#if defined(__GNUC__) || defined(__clang__)
#define KERNEL_SETTLE(array) __asm__ volatile("" : : "r"(array) : "memory")
#else
#pragma STDC FP_CONTRACT OFF
#define KERNEL_SETTLE(array) ((void)(array))
#endif

/* Elements staged by the portable kernels: fits the L1 cache. */
#define KERNEL_STAGE 256u
/* A smaller destination may still be in a cache when it is read; streaming would evict it. */
#define KERNEL_STREAM_BYTES 65536u
/* Vector kernels process multiples of this, from a cache line on unless the array is small. */
#define KERNEL_LINE 64u
#define KERNEL_TURN 256u
#define KERNEL_LITTLE_BYTES 32768u
/* Copies to several destinations proceed in pieces that stay in the L1 cache. */
#define KERNEL_COPY_BYTES 16384u

#define KERNEL_F32_MOST INT32_MAX
#define KERNEL_F32_INFINITY 0x7f800000
#define KERNEL_F64_MOST INT64_MAX
#define KERNEL_F64_INFINITY 0x7ff0000000000000

#define KERNEL_F32_EXPONENT 0x7f800000u
#define KERNEL_F32_ONE 0x00800000u
#define KERNEL_F64_EXPONENT 0x7ff0000000000000u
#define KERNEL_F64_ONE 0x0010000000000000u

MLFAB__INTERNAL uint32_t mlfab__dtype_bytes(int dtype) {
  return dtype == MLFAB_F32 ? 4 : dtype == MLFAB_F64 || dtype == MLFAB_I64 ? 8 : 0;
}

MLFAB__INTERNAL uint32_t mlfab__element_bytes(int dtype) {
  return dtype == MLFAB_F16 || dtype == MLFAB_BF16 ? 2 : mlfab__dtype_bytes(dtype);
}

MLFAB__INTERNAL const char *mlfab__dtype_name(int dtype) {
  static const char *const names[] = {"unknown", "F32", "F64", "I64", "F16", "BF16"};
  return dtype > 0 && (size_t)dtype < MLFAB__COUNT(names) ? names[dtype] : names[0];
}

MLFAB__INTERNAL const char *mlfab__op_name(int op) {
  static const char *const names[] = {"SUM", "MEAN", "MIN", "MAX", "PRODUCT", "OR"};
  return op >= 0 && (size_t)op < MLFAB__COUNT(names) ? names[op] : "unknown";
}

#if !KERNEL_X86
MLFAB__INTERNAL int mlfab__kernel_level(void) { return 0; }

MLFAB__INTERNAL const mlfab__kernels *mlfab__kernels_row(int level) {
  static const mlfab__kernels portable;
  (void)level;
  return &portable;
}
#endif

/* An address in an array, or NULL if the array is NULL. */
static void *kernel_at(const void *array, uint64_t bytes) {
  return array != NULL ? (void *)((uintptr_t)array + bytes) : NULL;
}

static int kernel_half(int dtype) { return dtype == MLFAB_F16 ? MLFAB_HALF_F16 : MLFAB_HALF_BF16; }

/* ---- adding an update ---- */

/* The portable kernel: dst = w + s * u; s * u when w is NULL; only the check when dst is NULL. dst == w has
 * a loop of its own, because compilers vectorise two pointers only after a test for overlap. */
#define KERNEL_PORTABLE(name, real, word, exponent, one)                                    \
  static int name(void *to, const void *from, const void *what, double scale, uint64_t n) { \
    real *dst = (real *)to;                                                                 \
    const real *w = (const real *)from, *u = (const real *)what;                            \
    const real s = (real)scale;                                                             \
    real product[KERNEL_STAGE];                                                             \
    word carry = 0;                                                                         \
    for (uint64_t at = 0; at < n; at += KERNEL_STAGE) {                                     \
      size_t count = (size_t)mlfab__min(n - at, KERNEL_STAGE);                              \
      for (size_t i = 0; i < count; i++) product[i] = s * u[at + i];                        \
      KERNEL_SETTLE(product);                                                               \
      for (size_t i = 0; i < count; i++) {                                                  \
        word bits;                                                                          \
        memcpy(&bits, &product[i], sizeof bits);                                            \
        carry |= (bits & (exponent)) + (one);                                               \
      }                                                                                     \
      if (dst == NULL) continue;                                                            \
      if (w == NULL)                                                                        \
        memcpy(dst + at, product, count * sizeof(real));                                    \
      else if (w == dst)                                                                    \
        for (size_t i = 0; i < count; i++) dst[at + i] += product[i];                       \
      else                                                                                  \
        for (size_t i = 0; i < count; i++) dst[at + i] = w[at + i] + product[i];            \
      KERNEL_SETTLE(dst);                                                                   \
    }                                                                                       \
    return !(carry >> (8 * sizeof(word) - 1));                                              \
  }

KERNEL_PORTABLE(kernel_f32_portable, float, uint32_t, KERNEL_F32_EXPONENT, KERNEL_F32_ONE)
KERNEL_PORTABLE(kernel_f64_portable, double, uint64_t, KERNEL_F64_EXPONENT, KERNEL_F64_ONE)

/* Wraps through unsigned numbers. Multiplying by 1 costs no time compared with memory access. */
static void kernel_i64(int64_t *dst, const int64_t *w, const int64_t *u, int64_t scale,
                       uint64_t n) {
  uint64_t s = (uint64_t)scale;
  if (w == NULL)
    for (uint64_t i = 0; i < n; i++) dst[i] = (int64_t)(s * (uint64_t)u[i]);
  else if (w == dst)
    for (uint64_t i = 0; i < n; i++) dst[i] = (int64_t)((uint64_t)dst[i] + s * (uint64_t)u[i]);
  else
    for (uint64_t i = 0; i < n; i++) dst[i] = (int64_t)((uint64_t)w[i] + s * (uint64_t)u[i]);
}

/* The row of cblas for this call, or NULL. */
static const mlfab__kernels *kernel_cblas(int level, int dtype) {
  int takes = level & MLFAB__KERNEL_CBLAS && (dtype == MLFAB_F32 || dtype == MLFAB_F64);
  const mlfab__kernels *row = takes ? mlfab__kernels_cblas() : NULL;
  assert((!takes || row) && "MLFAB_WITH_CBLAS is 0");
  return row;
}

/* Elements of the next call of cblas. */
static uint64_t kernel_cblas_count(uint64_t left) { return mlfab__min(left, MLFAB__CBLAS_MOST); }

/* In pieces: our own kernel checks the products, while cblas finds them in the cache afterwards. */
static int kernel_cblas_add(const mlfab__kernels *row, int level, int dtype, void *dst,
                            const void *w, const void *u, double scale, uint64_t n) {
  uint64_t bytes = mlfab__dtype_bytes(dtype), count;
  int finite = 1;
  for (uint64_t at = 0; at < n; at += count) {
    void *from = kernel_at(u, at * bytes);
    count = kernel_cblas_count(n - at);
    finite &= mlfab__kernel_add_with(level & ~MLFAB__KERNEL_CBLAS, dtype, NULL, NULL, from, scale,
                                     count, 0);
    row->add[dtype](kernel_at(dst, at * bytes), kernel_at(w, at * bytes), from, scale, count, 0);
  }
  return finite;
}

/* Does multiplying by the scale, as rounded to the type, clear the numbers? Then only the signs of zeros are left, and
 * cblas need not keep those. */
static int kernel_clears(int dtype, double scale) {
  return dtype == MLFAB_F32 ? (float)scale == 0.0f : scale == 0.0;
}

/* Portable up to the first 64-byte line of dst, then the row's kernel for whole lines, then portable again. */
MLFAB__INTERNAL int mlfab__kernel_add_with(int level, int dtype, void *dst, const void *w,
                                           const void *u, double scale, uint64_t n, int stream) {
  if (dtype == MLFAB_I64) {
    /* Outside these bounds the conversion is undefined in C. */
    if (!mlfab__finite(scale)) return 0;
    if (scale < -9223372036854775808.0 || scale >= 9223372036854775808.0) return 0;
    kernel_i64((int64_t *)dst, (const int64_t *)w, (const int64_t *)u, (int64_t)scale, n);
    return 1;
  }
  assert((dtype == MLFAB_F32 || dtype == MLFAB_F64) && "element type");
  int (*portable)(void *, const void *, const void *, double, uint64_t) =
      dtype == MLFAB_F32 ? kernel_f32_portable : kernel_f64_portable;
  const mlfab__kernels *cblas = kernel_cblas(level, dtype);
  if (cblas && dst != NULL && !kernel_clears(dtype, scale))
    return kernel_cblas_add(cblas, level, dtype, dst, w, u, scale, n);
  const mlfab__kernels *row = mlfab__kernels_row(level & ~MLFAB__KERNEL_CBLAS);
  uint64_t bytes = mlfab__dtype_bytes(dtype);
  uint64_t head = mlfab__min(n, (0 - (uintptr_t)(dst != NULL ? dst : u)) % KERNEL_LINE / bytes);
  uint64_t body = (n - head) - (n - head) % (KERNEL_LINE / bytes);
  if (!row->add[dtype] || body == 0) return portable(dst, w, u, scale, n);
  if (dst == w || dst == u || n * bytes < KERNEL_STREAM_BYTES) stream = 0;
  uint64_t at = head * bytes, end = (head + body) * bytes;
  int finite = head == 0 || portable(dst, w, u, scale, head);
  finite &=
      row->add[dtype](kernel_at(dst, at), kernel_at(w, at), kernel_at(u, at), scale, body, stream);
  if (head + body == n) return finite;
  return finite & portable(kernel_at(dst, end), kernel_at(w, end), kernel_at(u, end), scale,
                           n - head - body);
}

MLFAB__INTERNAL int mlfab__kernel_finite(int dtype, const void *data, uint64_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16)
    return mlfab__half_finite(kernel_half(dtype), (const uint16_t *)data, n);
  return dtype == MLFAB_I64 || mlfab__kernel_add(dtype, NULL, NULL, data, 1.0, n, 0);
}

/* Eight partial sums, added in a fixed order: fast, and the same bits every time on one machine. Alignment
 * is not used, so that the array's address has no effect. */
#define KERNEL_NORM2(name, type)                                                              \
  static double name(const type *u, uint64_t n) {                                             \
    double sum[8] = {0};                                                                      \
    uint64_t whole = n - n % 8;                                                               \
    for (uint64_t i = 0; i < whole; i += 8)                                                   \
      for (size_t j = 0; j < 8; j++) sum[j] += (double)u[i + j] * (double)u[i + j];           \
    for (uint64_t i = whole; i < n; i++) sum[i - whole] += (double)u[i] * (double)u[i];       \
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7])); \
  }

KERNEL_NORM2(kernel_norm2_f32, float)
KERNEL_NORM2(kernel_norm2_f64, double)
KERNEL_NORM2(kernel_norm2_i64, int64_t)

static double kernel_norm2_own(int level, int dtype, const void *u, uint64_t n) {
  const mlfab__kernels *row = mlfab__kernels_row(level);
  uint64_t done = 0;
  if (dtype == MLFAB_I64) return kernel_norm2_i64((const int64_t *)u, n);
  if (dtype == MLFAB_F64) return kernel_norm2_f64((const double *)u, n);
  assert(dtype == MLFAB_F32 && "element type");
  double sum = row->norm2[dtype] ? row->norm2[dtype](u, n, &done) : 0.0;
  return sum + kernel_norm2_f32((const float *)u + done, n - done);
}

MLFAB__INTERNAL double mlfab__kernel_norm2_with(int level, int dtype, const void *u, uint64_t n) {
  const mlfab__kernels *cblas = kernel_cblas(level, dtype);
  uint64_t bytes = mlfab__dtype_bytes(dtype), count;
  double sum = 0.0;
  level &= ~MLFAB__KERNEL_CBLAS;
  if (!cblas) return kernel_norm2_own(level, dtype, u, n);
  for (uint64_t at = 0; at < n; at += count) {
    const void *from = kernel_at(u, at * bytes);
    uint64_t done = 0;
    count = kernel_cblas_count(n - at);
    double piece = cblas->norm2[dtype](from, count, &done);
    sum += done == count ? piece : kernel_norm2_own(level, dtype, from, count);
  }
  return sum;
}

/* ---- 16-bit numbers ---- */

static void kernel_half_load(int half, float *out, const uint16_t *in, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) out[i] = mlfab__half_back(half, in[i]);
}

MLFAB__INTERNAL void mlfab__half_store_with(int level, int half, uint16_t *out, const float *in,
                                            uint64_t n) {
  const mlfab__kernels *row = mlfab__kernels_row(level);
  uint64_t i = row->half_store[half] ? row->half_store[half](out, in, n) : 0;
  for (; i < n; i++) out[i] = mlfab__half_one(half, in[i]);
}

MLFAB__INTERNAL void mlfab__half_load_with(int level, int half, float *out, const uint16_t *in,
                                           uint64_t n) {
  const mlfab__kernels *row = mlfab__kernels_row(level);
  uint64_t done = row->half_load[half] ? row->half_load[half](out, in, n) : 0;
  kernel_half_load(half, out + done, in + done, n - done);
}

/* ---- element-wise operations of collectives ---- */

/* ---- unlike in half.h, infinity and NaN are kept, and sums overflow ---- */

/* A NaN stays one and becomes quiet, as with the processor's instruction. 65520 is halfway between the
 * largest number and the next one, which does not exist. */
static uint16_t kernel_round_f16(uint32_t bits) {
  uint32_t sign = bits >> 16 & 0x8000u, m = bits & 0x7fffffffu;
  float x;
  if (m > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (m >> 13 & 0x3ffu));
  if (m >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  memcpy(&x, &bits, sizeof x);
  return mlfab__half_one(MLFAB_HALF_F16, x);
}

static uint16_t kernel_round_bf16(uint32_t bits) {
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* ---- the portable kernels ---- */

typedef union kernel_stage {
  float f32[KERNEL_STAGE];
  double f64[KERNEL_STAGE];
  int64_t i64[KERNEL_STAGE];
} kernel_stage;

/* On other processors, one array after another is added to a stage: sums keep their order, but the compiler
 * chooses which of two NaNs is kept. The divisor is volatile so that the compiler does not use its
 * reciprocal. */
#if KERNEL_X86
#define KERNEL_SCALAR(name, real, instruction, operator) \
  static inline real name(real a, real b) {              \
    __asm__(instruction " %1, %0" : "+x"(a) : "x"(b));   \
    return a;                                            \
  }
#define KERNEL_QUOTIENT(name, real, instruction) KERNEL_SCALAR(name, real, instruction, /)
#else
#define KERNEL_SCALAR(name, real, instruction, operator) \
  static inline real name(real a, real b) { return a operator b; }
#define KERNEL_QUOTIENT(name, real, instruction) \
  static inline real name(real a, real b) {      \
    volatile real by = b;                        \
    return a / by;                               \
  }
#endif

KERNEL_SCALAR(kernel_f32_add, float, "addss", +)
KERNEL_SCALAR(kernel_f64_add, double, "addsd", +)
KERNEL_SCALAR(kernel_f32_multiply, float, "mulss", *)
KERNEL_SCALAR(kernel_f64_multiply, double, "mulsd", *)
KERNEL_QUOTIENT(kernel_f32_quotient, float, "divss")
KERNEL_QUOTIENT(kernel_f64_quotient, double, "divsd")

/* An integer that orders the numbers: -0 just below +0, and NaN at the end that wins. Negative numbers
 * descend with their bits, so these are inverted. */
#define KERNEL_STEPS(name, real, word, most, infinity)                                          \
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

KERNEL_STEPS(kernel_f32, float, int32_t, KERNEL_F32_MOST, KERNEL_F32_INFINITY)
KERNEL_STEPS(kernel_f64, double, int64_t, KERNEL_F64_MOST, KERNEL_F64_INFINITY)

static void kernel_i64_steps(int op, int64_t *to, const int64_t *x, size_t n) {
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

static void kernel_load(int dtype, kernel_stage *stage, const void *in, uint64_t at, size_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16) {
    kernel_half_load(kernel_half(dtype), stage->f32, (const uint16_t *)in + at, n);
  } else {
    uint32_t bytes = mlfab__element_bytes(dtype);
    memcpy(stage, (const char *)in + at * bytes, n * bytes);
  }
}

static void kernel_store(int dtype, void *out, uint64_t at, const kernel_stage *stage, size_t n) {
  if (dtype == MLFAB_F16 || dtype == MLFAB_BF16) {
    for (size_t i = 0; i < n; i++) {
      uint32_t bits;
      memcpy(&bits, &stage->f32[i], sizeof bits);
      ((uint16_t *)out)[at + i] =
          dtype == MLFAB_F16 ? kernel_round_f16(bits) : kernel_round_bf16(bits);
    }
  } else {
    uint32_t bytes = mlfab__element_bytes(dtype);
    memcpy((char *)out + at * bytes, stage, n * bytes);
  }
}

/* Combines the elements from..to-1. */
static void kernel_portable(int op, int dtype, void *const *dst, uint32_t ndst,
                            const void *const *in, uint32_t k, uint64_t from, uint64_t to) {
  kernel_stage sum, next;
  for (; from < to; from += KERNEL_STAGE) {
    size_t n = (size_t)mlfab__min(to - from, KERNEL_STAGE);
    kernel_load(dtype, &sum, in[0], from, n);
    for (uint32_t j = 1; j < k; j++) {
      kernel_load(dtype, &next, in[j], from, n);
      if (dtype == MLFAB_I64)
        kernel_i64_steps(op, sum.i64, next.i64, n);
      else if (dtype == MLFAB_F64)
        kernel_f64_steps(op, sum.f64, next.f64, n);
      else
        kernel_f32_steps(op, sum.f32, next.f32, n);
    }
    for (uint32_t d = 0; d < ndst; d++) kernel_store(dtype, dst[d], from, &sum, n);
  }
}

static void kernel_divide_portable(int dtype, void *data, uint32_t by, uint64_t from, uint64_t to) {
  kernel_stage stage;
  for (; from < to; from += KERNEL_STAGE) {
    size_t n = (size_t)mlfab__min(to - from, KERNEL_STAGE);
    kernel_load(dtype, &stage, data, from, n);
    if (dtype == MLFAB_F64)
      for (size_t i = 0; i < n; i++) stage.f64[i] = kernel_f64_quotient(stage.f64[i], by);
    else
      for (size_t i = 0; i < n; i++) stage.f32[i] = kernel_f32_quotient(stage.f32[i], (float)by);
    kernel_store(dtype, data, from, &stage, n);
  }
}

/* The destinations to write with non-temporal stores: not those that are inputs, whose lines are in the
 * cache. */
static uint64_t kernel_past(void *const *dst, uint32_t ndst, const void *const *in, uint32_t k) {
  uint64_t past = 0;
  for (uint32_t d = 0; d < ndst; d++) {
    uint32_t j = 0;
    while (j < k && in[j] != dst[d]) j++;
    if (j == k && ((uintptr_t)dst[d] - (uintptr_t)dst[0]) % KERNEL_LINE == 0)
      past |= (uint64_t)1 << d;
  }
  return past;
}

/* Splits n elements into those before the first cache line, and those for vectors. For small arrays the
 * head would cost more than alignment saves. */
static void kernel_split(const void *at, uint64_t n, uint32_t bytes, uint64_t *head,
                         uint64_t *body) {
  *head = mlfab__min(n, (0 - (uintptr_t)at) % KERNEL_LINE / bytes);
  if (n * bytes <= KERNEL_LITTLE_BYTES) *head = 0;
  *body = (n - *head) - (n - *head) % (KERNEL_TURN / bytes);
}

MLFAB__INTERNAL void mlfab__kernel_copy(void *dst, const void *src, uint64_t bytes, int stream) {
  uint8_t *to = dst;
  const uint8_t *from = src;
#if defined(__SSE2__)
  if (stream && bytes >= KERNEL_STREAM_BYTES) {
    uint64_t head = (0 - (uintptr_t)to) % KERNEL_LINE, lines = (bytes - head) / KERNEL_LINE;
    memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head + lines * KERNEL_LINE;
    for (; lines > 0; lines--, to += KERNEL_LINE, from += KERNEL_LINE) {
      __m128i words[KERNEL_LINE / 16];
      memcpy(words, from, sizeof words);
      for (uint32_t i = 0; i < KERNEL_LINE / 16; i++)
        _mm_stream_si128((__m128i *)(void *)to + i, words[i]);
    }
    _mm_sfence();
  }
#endif
  memcpy(to, from, bytes);
}

static void kernel_copy(void *const *dst, uint32_t ndst, const char *in, uint64_t bytes) {
  uint64_t most = ndst == 1 ? bytes : KERNEL_COPY_BYTES;
  for (uint64_t at = 0; at < bytes; at += most)
    for (uint32_t d = 0; d < ndst; d++)
      if (dst[d] != (const void *)in)
        memcpy((char *)dst[d] + at, in + at, (size_t)mlfab__min(most, bytes - at));
}

MLFAB__INTERNAL void mlfab__kernel_combine_many_with(int level, int op, int dtype, void *const *dst,
                                                     uint32_t ndst, const void *const *in,
                                                     uint32_t k, uint64_t n, int stream) {
  const mlfab__kernels *row = mlfab__kernels_row(level & ~MLFAB__KERNEL_CBLAS);
  const mlfab__kernels *cblas = kernel_cblas(level, dtype);
  uint32_t bytes = mlfab__element_bytes(dtype);
  uint64_t head, body, done = 0;
  assert(bytes > 0 && k >= 1 && k <= MLFAB__COMBINE_MOST);
  assert(ndst >= 1 && ndst <= MLFAB__COMBINE_MOST);
  assert(op != MLFAB__OP_OR || dtype == MLFAB_I64);
  if (k == 1) {
    kernel_copy(dst, ndst, (const char *)in[0], n * bytes);
    return;
  }
  if (cblas && (op == MLFAB_OP_SUM || op == MLFAB_OP_MEAN)) {
    for (uint64_t count; done < n; done += count) {
      count = kernel_cblas_count(n - done);
      cblas->combine[dtype](op, dst, ndst, 0, in, k, done, done + count);
    }
    return;
  }
  kernel_split(dst[0], n, bytes, &head, &body);
  if (row->combine[dtype] && body > 0) {
    uint64_t past = stream && n * bytes >= KERNEL_STREAM_BYTES ? kernel_past(dst, ndst, in, k) : 0;
    kernel_portable(op, dtype, dst, ndst, in, k, 0, head);
    done = head + body;
    row->combine[dtype](op, dst, ndst, past, in, k, head, done);
  }
  kernel_portable(op, dtype, dst, ndst, in, k, done, n);
}

MLFAB__INTERNAL void mlfab__kernel_combine_with(int level, int op, int dtype, void *dst,
                                                const void *a, const void *b, uint64_t n,
                                                int stream) {
  const void *in[2] = {a, b};
  mlfab__kernel_combine_many_with(level, op, dtype, &dst, 1, in, 2, n, stream);
}

MLFAB__INTERNAL void mlfab__kernel_divide_with(int level, int dtype, void *data, uint64_t n,
                                               uint32_t by) {
  const mlfab__kernels *row = mlfab__kernels_row(level);
  uint64_t head, body, done = 0;
  assert(dtype != MLFAB_I64 && mlfab__element_bytes(dtype) > 0 && by > 0 && by <= 1u << 24);
  kernel_split(data, n, mlfab__element_bytes(dtype), &head, &body);
  if (row->divide[dtype] && body > 0) {
    kernel_divide_portable(dtype, data, by, 0, head);
    done = head + body;
    row->divide[dtype](data, by, head, done);
  }
  kernel_divide_portable(dtype, data, by, done, n);
}
