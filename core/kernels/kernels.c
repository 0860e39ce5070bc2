/* kernels.c - arithmetic on arrays: the portable kernels, and the choice of a row.
 *
 * For: adding a scaled update to weights, finding NaN and infinity in
 * the same pass over memory. The caller chooses the arrays, and may split the
 * work among threads.
 *
 * Invariants: an element of a result depends only on its operands and their order. The row, alignment, position in the
 * array and compiler flags have no effect: workers that compute the same sum must get the same bits. The means:
 *  - The product of an update and its scale passes through an empty asm statement or a settled array before it is
 *    added. So no compiler can contract the two into a fused multiply-add. (gcc contracts in gnu modes and has no
 *    pragma against it; clang ignores the pragma under -ffast-math.)
 *  - Finiteness is tested on exponent bits in integers. Adding one to an exponent of all ones carries into
 *    the sign bit; or-ing the carries keeps branches out of the loops.
 *  - The portable kernels process the unaligned ends for the rows.
 * All inputs of a block are read before it is written, so a destination may be an input.
 *
 * Source: MLfabric §5 adds at aggregators and servers, but does not describe kernels. */
#include "kernels.h"

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
#define KERNEL_LINE 64u

#define KERNEL_F32_EXPONENT 0x7f800000u
#define KERNEL_F32_ONE 0x00800000u
#define KERNEL_F64_EXPONENT 0x7ff0000000000000u
#define KERNEL_F64_ONE 0x0010000000000000u

MLFAB__INTERNAL uint32_t mlfab__dtype_bytes(int dtype) {
  return dtype == MLFAB_F32 ? 4 : dtype == MLFAB_F64 || dtype == MLFAB_I64 ? 8 : 0;
}

MLFAB__INTERNAL const char *mlfab__dtype_name(int dtype) {
  static const char *const names[] = {"unknown", "F32", "F64", "I64", "F16", "BF16"};
  return dtype > 0 && (size_t)dtype < MLFAB__COUNT(names) ? names[dtype] : names[0];
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
#define KERNEL_AT(array, bytes) ((array) != NULL ? (void *)((uintptr_t)(array) + (bytes)) : NULL)

/* ---- adding an update ---- */

/* The portable kernel: dst = w + s * u; without w (NULL) dst = s * u; without dst only the check. dst == w has a loop
 * of its own, because compilers vectorise two pointers only after a test for overlap. */
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

#if MLFAB_WITH_CBLAS
MLFAB__INTERNAL const mlfab__kernels *mlfab__kernel_cblas(int level, int dtype) {
  int takes = level & MLFAB__KERNEL_CBLAS && (dtype == MLFAB_F32 || dtype == MLFAB_F64);
  return takes ? mlfab__kernels_cblas() : NULL;
}

/* Elements of the next call of cblas. */
static uint64_t kernel_cblas_count(uint64_t left) { return mlfab__min(left, MLFAB__CBLAS_MOST); }

/* Works in pieces: our own kernel checks the products, and cblas then finds them in the cache. */
static int kernel_cblas_add(const mlfab__kernels *row, int level, int dtype, void *dst,
                            const void *w, const void *u, double scale, uint64_t n) {
  uint64_t bytes = mlfab__dtype_bytes(dtype), count;
  int finite = 1;
  for (uint64_t at = 0; at < n; at += count) {
    void *from = KERNEL_AT(u, at * bytes);
    count = kernel_cblas_count(n - at);
    finite &= mlfab__kernel_add_with(level & ~MLFAB__KERNEL_CBLAS, dtype, NULL, NULL, from, scale,
                                     count, 0);
    row->add[dtype](KERNEL_AT(dst, at * bytes), KERNEL_AT(w, at * bytes), from, scale, count, 0);
  }
  return finite;
}

static double kernel_cblas_norm2(const mlfab__kernels *row, int level, int dtype, const void *u,
                                 uint64_t n) {
  uint64_t bytes = mlfab__dtype_bytes(dtype), count;
  double sum = 0.0;
  for (uint64_t at = 0; at < n; at += count) {
    const void *from = KERNEL_AT(u, at * bytes);
    uint64_t done = 0;
    count = kernel_cblas_count(n - at);
    double piece = row->norm2[dtype](from, count, &done);
    if (done < count)
      piece = mlfab__kernel_norm2_with(level & ~MLFAB__KERNEL_CBLAS, dtype, from, count);
    sum += piece;
  }
  return sum;
}
#endif

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
#if MLFAB_WITH_CBLAS
  const mlfab__kernels *cblas = mlfab__kernel_cblas(level, dtype);
  /* A scale that is rounded to 0 leaves only the signs of zeros, and cblas may change those. */
  int clears = dtype == MLFAB_F32 ? (float)scale == 0.0f : scale == 0.0;
  if (cblas && dst != NULL && !clears)
    return kernel_cblas_add(cblas, level, dtype, dst, w, u, scale, n);
#endif
  const mlfab__kernels *row = mlfab__kernels_row(level & ~MLFAB__KERNEL_CBLAS);
  uint64_t bytes = mlfab__dtype_bytes(dtype);
  uint64_t head = mlfab__min(n, (0 - (uintptr_t)(dst != NULL ? dst : u)) % KERNEL_LINE / bytes);
  uint64_t body = (n - head) - (n - head) % (KERNEL_LINE / bytes);
  if (!row->add[dtype] || body == 0) return portable(dst, w, u, scale, n);
  if (dst == w || dst == u || n * bytes < KERNEL_STREAM_BYTES) stream = 0;
  uint64_t at = head * bytes, end = (head + body) * bytes;
  int finite = head == 0 || portable(dst, w, u, scale, head);
  finite &=
      row->add[dtype](KERNEL_AT(dst, at), KERNEL_AT(w, at), KERNEL_AT(u, at), scale, body, stream);
  if (head + body == n) return finite;
  return finite & portable(KERNEL_AT(dst, end), KERNEL_AT(w, end), KERNEL_AT(u, end), scale,
                           n - head - body);
}

MLFAB__INTERNAL int mlfab__kernel_finite(int dtype, const void *data, uint64_t n) {
  return dtype == MLFAB_I64 || mlfab__kernel_add(dtype, NULL, NULL, data, 1.0, n, 0);
}

/* Eight partial sums, added in a fixed order: fast, and the same bits every time on one machine. Ignores alignment, so
 * that the array's address has no effect. */
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

MLFAB__INTERNAL double mlfab__kernel_norm2_with(int level, int dtype, const void *u, uint64_t n) {
#if MLFAB_WITH_CBLAS
  const mlfab__kernels *cblas = mlfab__kernel_cblas(level, dtype);
  if (cblas) return kernel_cblas_norm2(cblas, level, dtype, u, n);
#endif
  const mlfab__kernels *row = mlfab__kernels_row(level & ~MLFAB__KERNEL_CBLAS);
  uint64_t done = 0;
  if (dtype == MLFAB_I64) return kernel_norm2_i64((const int64_t *)u, n);
  if (dtype == MLFAB_F64) return kernel_norm2_f64((const double *)u, n);
  assert(dtype == MLFAB_F32 && "element type");
  double sum = row->norm2[dtype] ? row->norm2[dtype](u, n, &done) : 0.0;
  return sum + kernel_norm2_f32((const float *)u + done, n - done);
}

/* ---- copying ---- */

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
