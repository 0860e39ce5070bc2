/* elements.h - the arithmetic of the kernels in kernels.cu, written once: CUDA and plain C11 compile the same text.
 *
 * It has everything that decides a bit of a result. kernels.cu adds the launches, the barriers and the checks. The
 * tests compile this header as C and play grids, blocks and warps by loops: so they compare the kernels with the CPU's
 * without a GPU. Only a GPU shows the rest, such as speed.
 *
 * Three levels:
 *  - Numbers. Each operation rounds once. On the device it is an instruction that no compiler contracts and that
 *    flushes no subnormal numbers, whatever the flags. On the host its result passes through an empty asm statement: so
 *    the compiler's flags cannot contract or reassociate it.
 *  - Threads. A thread reads chunks of 16 bytes at once, or element by element if an array is not aligned, and at its
 *    end. In both cases a thread has the same elements. (A conversion reads or writes half chunks of 16-bit numbers.)
 *  - Warps. Exchanges between lanes use lane arrays. On the device such an array has one place, that of the thread's
 *    own lane, and an exchange is a shuffle. On the host it has 32 places, and an exchange is a loop. A barrier of a
 *    block lies between two functions that take the block's shared memory.
 *
 * Geometry: n elements are cut into tiles, and tiles into at most ELEMENTS_PARTS parts with equal numbers of
 * consecutive tiles; a block handles a part. The cut depends on n and the type only. A thread adds its elements in
 * ascending order, a warp adds its lanes by halves, a block its warps by halves, and one block adds the parts. So a
 * norm does not depend on the device, the grid or the alignment.
 *
 * Error bound of a norm: a term goes through at most d = e ceil(tiles / 8192) + 52 additions, with e elements of a
 * thread in a tile (F32: 16, F64 and I64: 8, F16 and BF16: 32). It also goes through one rounding of its square (I64:
 * three). So norm2 differs from the exact sum by at most about (d + 1) 2^-53 of it (I64: d + 3).
 *
 * Source: the CPU's kernels (core/kernels/kernels.c and half.c, core/model/optimizer.c, core/sparse/filter.c),
 * which name theirs. */
#ifndef MLFAB_GPU_ELEMENTS_H
#define MLFAB_GPU_ELEMENTS_H

#include "../mlfab_gpu.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ELEMENTS_FN static __host__ __device__ __forceinline__
#else
#define ELEMENTS_FN static inline
#endif

#ifdef __CUDA_ARCH__
#define ELEMENTS_UNROLL _Pragma("unroll")
#define ELEMENTS_ONCE _Pragma("unroll 1")
#else
#define ELEMENTS_UNROLL
#define ELEMENTS_ONCE
#endif

/* The numbers of cudaErrorInvalidValue and cudaErrorMisalignedAddress; kernels.cu checks them. */
#define ELEMENTS_INVALID 1
#define ELEMENTS_MISALIGNED 716

/* ---- numbers ---- */

#define ELEMENTS_F32_INFINITY 0x7f800000u
#define ELEMENTS_F32_MAGNITUDE 0x7fffffffu
#define ELEMENTS_F64_INFINITY 0x7ff0000000000000u
#define ELEMENTS_F64_MAGNITUDE 0x7fffffffffffffffu
#define ELEMENTS_F16_TOP 0x477fe000u  /* 65504, as bits of float32 */
#define ELEMENTS_F16_OVER 0x477ff000u /* 65520: rounds to infinity */
#define ELEMENTS_BF16_TOP 0x7f7f0000u /* (2 - 2^-7) 2^127 */
#define ELEMENTS_F32_TOP 0x7f7fffffu

ELEMENTS_FN uint32_t elements_f32_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ELEMENTS_FN float elements_f32(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

ELEMENTS_FN uint64_t elements_f64_bits(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

ELEMENTS_FN double elements_f64(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define ELEMENTS_SETTLE(type, x) __asm__("" : "+x"(x))
#elif defined(__GNUC__)
#define ELEMENTS_SETTLE(type, x) __asm__("" : "+m"(x))
#else
#define ELEMENTS_SETTLE(type, x) \
  do {                           \
    volatile type settled_ = x;  \
    x = settled_;                \
  } while (0)
#endif

#ifdef __CUDA_ARCH__
#define ELEMENTS_BINARY(name, type, device, operator) \
  ELEMENTS_FN type name(type a, type b) {             \
    type r;                                           \
    device;                                           \
    return r;                                         \
  }
#else
#define ELEMENTS_BINARY(name, type, device, operator) \
  ELEMENTS_FN type name(type a, type b) {             \
    type r = a operator b;                            \
    ELEMENTS_SETTLE(type, r);                         \
    return r;                                         \
  }
#endif

/* The instructions by name: __fadd_rn and __fmul_rn flush subnormal numbers under -ftz=true. */
ELEMENTS_BINARY(elements_f32_add, float,
                asm("add.rn.f32 %0, %1, %2;"
                    : "=f"(r)
                    : "f"(a), "f"(b)),
                +)
ELEMENTS_BINARY(elements_f32_mul, float,
                asm("mul.rn.f32 %0, %1, %2;"
                    : "=f"(r)
                    : "f"(a), "f"(b)),
                    *)
ELEMENTS_BINARY(elements_f32_div, float,
                asm("div.rn.f32 %0, %1, %2;"
                    : "=f"(r)
                    : "f"(a), "f"(b)),
                /)
ELEMENTS_BINARY(elements_f64_add, double, r = __dadd_rn(a, b), +)
ELEMENTS_BINARY(elements_f64_mul, double, r = __dmul_rn(a, b), *)
ELEMENTS_BINARY(elements_f64_div, double, r = __ddiv_rn(a, b), /)

ELEMENTS_FN double elements_f64_sqrt(double x) {
#ifdef __CUDA_ARCH__
  return __dsqrt_rn(x);
#else
  double r = sqrt(x);
  ELEMENTS_SETTLE(double, r);
  return r;
#endif
}

ELEMENTS_FN double elements_f64_of_f32(float x) {
#ifdef __CUDA_ARCH__
  double r;
  asm("cvt.f64.f32 %0, %1;" : "=d"(r) : "f"(x));
  return r;
#else
  return (double)x;
#endif
}

/* To nearest; subnormal results, too. */
ELEMENTS_FN float elements_f32_of_f64(double x) {
#ifdef __CUDA_ARCH__
  float r;
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(r) : "d"(x));
  return r;
#else
  return (float)x;
#endif
}

/* Returns how many bits are set; and the index of the lowest in x > 0. */
ELEMENTS_FN uint32_t elements_bits(uint32_t x) {
#ifdef __CUDA_ARCH__
  return (uint32_t)__popc(x);
#else
  x -= x >> 1 & 0x55555555u;
  x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
  return (((x + (x >> 4)) & 0x0f0f0f0fu) * 0x01010101u) >> 24;
#endif
}

ELEMENTS_FN uint32_t elements_lowest(uint32_t x) { return elements_bits((x & (0u - x)) - 1); }

/* ---- 16 bits ---- */

/* Converts a magnitude below 65520 to binary16; for others, returns some bits. Below 2^-14 numbers are multiples of
 * 2^-24, the last place of 0.5: the sum rounds to one. */
ELEMENTS_FN uint32_t elements_f16_magnitude(uint32_t m) {
#ifdef __CUDA_ARCH__
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(elements_f32(m)));
  return h;
#else
  uint32_t small = elements_f32_bits(elements_f32_add(elements_f32(m), 0.5f)) - 0x3f000000u;
  return m < 0x38800000u ? small : (m - 0x38000000u + 0xfffu + (m >> 13 & 1)) >> 13;
#endif
}

/* Rounds like half.c: every value stays finite. */
ELEMENTS_FN uint16_t elements_f16_saturate(float x) {
  uint32_t bits = elements_f32_bits(x), m = bits & ELEMENTS_F32_MAGNITUDE;
  if (m > ELEMENTS_F16_TOP) m = ELEMENTS_F16_TOP;
  return (uint16_t)((bits >> 16 & 0x8000u) | elements_f16_magnitude(m));
}

/* Rounds like kernels.c: infinity and NaN stay, and numbers overflow. */
ELEMENTS_FN uint16_t elements_f16_round(float x) {
  uint32_t bits = elements_f32_bits(x), m = bits & ELEMENTS_F32_MAGNITUDE;
  uint32_t h = elements_f16_magnitude(m);
  h = m >= ELEMENTS_F16_OVER ? 0x7c00u : h;
  h = m > ELEMENTS_F32_INFINITY ? 0x7e00u | (m >> 13 & 0x3ffu) : h;
  return (uint16_t)((bits >> 16 & 0x8000u) | h);
}

ELEMENTS_FN uint16_t elements_bf16_saturate(float x) {
  uint32_t bits = elements_f32_bits(x), m = bits & ELEMENTS_F32_MAGNITUDE;
  if (m > ELEMENTS_BF16_TOP) m = ELEMENTS_BF16_TOP;
  return (uint16_t)((bits >> 16 & 0x8000u) | (m + 0x7fffu + (m >> 16 & 1)) >> 16);
}

ELEMENTS_FN uint16_t elements_bf16_round(float x) {
  uint32_t bits = elements_f32_bits(x);
  if ((bits & ELEMENTS_F32_MAGNITUDE) > ELEMENTS_F32_INFINITY)
    return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* Converts a binary16 to float32; a NaN becomes quiet, and keeps its fraction. Below 2^-14, m 2^-24 is the difference
 * between 2^-14 + m 2^-24 and 2^-14. */
ELEMENTS_FN float elements_f16_exactly(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, m = h & 0x7fffu, bits;
#ifdef __CUDA_ARCH__
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((uint16_t)m));
  bits = elements_f32_bits(x);
#else
  bits = elements_f32_bits(elements_f32_add(elements_f32(0x38800000u + (m << 13)), -0x1p-14f));
  bits = m >= 0x400u ? (m << 13) + 0x38000000u : bits;
  bits = m == 0x7c00u ? 0x7f800000u : bits;
#endif
  bits = m > 0x7c00u ? 0x7fc00000u | (m & 0x3ffu) << 13 : bits;
  return elements_f32(sign | bits);
}

/* The same, if any NaN will do. */
ELEMENTS_FN float elements_f16_back(uint16_t h) {
#ifdef __CUDA_ARCH__
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
#else
  return elements_f16_exactly(h);
#endif
}

ELEMENTS_FN float elements_bf16_back(uint16_t h) { return elements_f32((uint32_t)h << 16); }

/* Converts a double to float32, clamped to its range. */
ELEMENTS_FN float elements_narrow(double x) {
  const double most = 0x1.fffffep127;
  return elements_f32_of_f64(x > most ? most : x < -most ? -most : x);
}

/* `half` is MLFAB_HALF_F16 or MLFAB_HALF_BF16. */
ELEMENTS_FN uint16_t elements_half_saturate(int half, float x) {
  return half == MLFAB_HALF_F16 ? elements_f16_saturate(x) : elements_bf16_saturate(x);
}

ELEMENTS_FN float elements_half_back(int half, uint16_t h) {
  return half == MLFAB_HALF_F16 ? elements_f16_back(h) : elements_bf16_back(h);
}

/* ---- numbers of any type ---- */

/* Only the member of its type is used: f32 for F32, F16 and BF16. */
typedef struct elements_number {
  float f32;
  double f64;
  uint64_t i64;
} elements_number;

ELEMENTS_FN uint32_t elements_width(int dtype) {
  return dtype == MLFAB_F32                          ? 4u
         : dtype == MLFAB_F64 || dtype == MLFAB_I64  ? 8u
         : dtype == MLFAB_F16 || dtype == MLFAB_BF16 ? 2u
                                                     : 0u;
}

/* Returns the number of elements in a chunk. */
ELEMENTS_FN uint32_t elements_many(int dtype) { return 16u / elements_width(dtype); }

ELEMENTS_FN elements_number elements_add(int dtype, elements_number a, elements_number b) {
  elements_number r = {0.0f, 0.0, 0};
  if (dtype == MLFAB_I64)
    r.i64 = a.i64 + b.i64;
  else if (dtype == MLFAB_F64)
    r.f64 = elements_f64_add(a.f64, b.f64);
  else
    r.f32 = elements_f32_add(a.f32, b.f32);
  return r;
}

ELEMENTS_FN elements_number elements_mul(int dtype, elements_number a, elements_number b) {
  elements_number r = {0.0f, 0.0, 0};
  if (dtype == MLFAB_I64)
    r.i64 = a.i64 * b.i64;
  else if (dtype == MLFAB_F64)
    r.f64 = elements_f64_mul(a.f64, b.f64);
  else
    r.f32 = elements_f32_mul(a.f32, b.f32);
  return r;
}

/* w + scale * u, each rounded. */
ELEMENTS_FN elements_number elements_axpy(int dtype, elements_number w, elements_number scale,
                                          elements_number u) {
  return elements_add(dtype, w, elements_mul(dtype, scale, u));
}

ELEMENTS_FN double elements_square(int dtype, elements_number x) {
  double d = dtype == MLFAB_I64   ? (double)(int64_t)x.i64
             : dtype == MLFAB_F64 ? x.f64
                                  : elements_f64_of_f32(x.f32);
  return elements_f64_mul(d, d);
}

/* Returns 1 if it is infinite or NaN, by the exponent's bits. */
ELEMENTS_FN uint32_t elements_bad(int dtype, elements_number x) {
  if (dtype == MLFAB_I64) return 0;
  if (dtype == MLFAB_F64)
    return (elements_f64_bits(x.f64) & ELEMENTS_F64_INFINITY) == ELEMENTS_F64_INFINITY;
  return (elements_f32_bits(x.f32) & ELEMENTS_F32_INFINITY) == ELEMENTS_F32_INFINITY;
}

/* Converts a scalar to the type; returns 0 if it cannot: an int64 beyond its range. */
ELEMENTS_FN int elements_scalar(int dtype, double x, elements_number *number_p) {
  elements_number r = {0.0f, 0.0, 0};
  if (dtype == MLFAB_I64) {
    uint64_t bits = elements_f64_bits(x);
    if ((bits & ELEMENTS_F64_INFINITY) == ELEMENTS_F64_INFINITY) return 0;
    if (x < -9223372036854775808.0 || x >= 9223372036854775808.0) return 0;
    r.i64 = (uint64_t)(int64_t)x;
  } else if (dtype == MLFAB_F64) {
    r.f64 = x;
  } else {
    r.f32 = elements_f32_of_f64(x);
  }
  *number_p = r;
  return 1;
}

/* ---- chunks ---- */

typedef struct elements_chunk {
  uint32_t word[4];
} elements_chunk;

/* Word pairs hold 8 bytes in the order of memory; a GPU's is little-endian. */
#if !defined(__CUDA_ARCH__) && defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#error "elements.h: chunks are little-endian"
#endif

ELEMENTS_FN uint64_t elements_pair(const elements_chunk *chunk, uint32_t j) {
  return (uint64_t)chunk->word[2 * j + 1] << 32 | chunk->word[2 * j];
}

ELEMENTS_FN uint16_t elements_short(const elements_chunk *chunk, uint32_t j) {
  return (uint16_t)(chunk->word[j / 2] >> (16 * (j % 2)));
}

ELEMENTS_FN elements_number elements_take(int dtype, const elements_chunk *chunk, uint32_t j) {
  elements_number r = {0.0f, 0.0, 0};
  if (dtype == MLFAB_F32)
    r.f32 = elements_f32(chunk->word[j]);
  else if (dtype == MLFAB_F64)
    r.f64 = elements_f64(elements_pair(chunk, j));
  else if (dtype == MLFAB_I64)
    r.i64 = elements_pair(chunk, j);
  else if (dtype == MLFAB_F16)
    r.f32 = elements_f16_back(elements_short(chunk, j));
  else
    r.f32 = elements_bf16_back(elements_short(chunk, j));
  return r;
}

/* Fills place j of a chunk, which must be zero. */
ELEMENTS_FN void elements_put_bits(uint32_t width, elements_chunk *chunk, uint32_t j,
                                   uint64_t bits) {
  if (width == 4) {
    chunk->word[j] = (uint32_t)bits;
  } else if (width == 8) {
    chunk->word[2 * j] = (uint32_t)bits;
    chunk->word[2 * j + 1] = (uint32_t)(bits >> 32);
  } else {
    chunk->word[j / 2] |= (uint32_t)(bits & 0xffffu) << (16 * (j % 2));
  }
}

ELEMENTS_FN uint64_t elements_bits_of(int dtype, elements_number x) {
  return dtype == MLFAB_F32   ? elements_f32_bits(x.f32)
         : dtype == MLFAB_F64 ? elements_f64_bits(x.f64)
         : dtype == MLFAB_I64 ? x.i64
         : dtype == MLFAB_F16 ? elements_f16_round(x.f32)
                              : elements_bf16_round(x.f32);
}

ELEMENTS_FN void elements_put(int dtype, elements_chunk *chunk, uint32_t j, elements_number x) {
  elements_put_bits(elements_width(dtype), chunk, j, elements_bits_of(dtype, x));
}

ELEMENTS_FN uint64_t elements_bits_at(uint32_t width, const elements_chunk *chunk, uint32_t j) {
  return width == 4   ? chunk->word[j]
         : width == 8 ? elements_pair(chunk, j)
                      : elements_short(chunk, j);
}

/* Returns one element of an array. */
ELEMENTS_FN uint64_t elements_get(uint32_t width, const void *array, uint64_t i) {
#ifdef __CUDA_ARCH__
  return width == 4   ? (uint64_t)((const uint32_t *)array)[i]
         : width == 8 ? ((const uint64_t *)array)[i]
                      : (uint64_t)((const uint16_t *)array)[i];
#else
  uint32_t b32 = 0;
  uint16_t b16 = 0;
  uint64_t bits = 0;
  const char *at = (const char *)array + i * width;
  if (width == 8) return memcpy(&bits, at, 8), bits;
  if (width == 4) return memcpy(&b32, at, 4), b32;
  return memcpy(&b16, at, 2), b16;
#endif
}

ELEMENTS_FN void elements_set(uint32_t width, void *array, uint64_t i, uint64_t bits) {
#ifdef __CUDA_ARCH__
  if (width == 4)
    ((uint32_t *)array)[i] = (uint32_t)bits;
  else if (width == 8)
    ((uint64_t *)array)[i] = bits;
  else
    ((uint16_t *)array)[i] = (uint16_t)bits;
#else
  uint32_t b32 = (uint32_t)bits;
  uint16_t b16 = (uint16_t)bits;
  char *at = (char *)array + i * width;
  if (width == 8)
    memcpy(at, &bits, 8);
  else if (width == 4)
    memcpy(at, &b32, 4);
  else
    memcpy(at, &b16, 2);
#endif
}

/* Loads the chunk from element `at` on. `whole`: it is aligned, and ends before n. Otherwise elements from n on are
 * 0. */
ELEMENTS_FN elements_chunk elements_load(uint32_t width, int whole, const void *array, uint64_t at,
                                         uint64_t n) {
  elements_chunk chunk = {{0, 0, 0, 0}};
  if (whole) {
#ifdef __CUDA_ARCH__
    uint4 four = *(const uint4 *)((const char *)array + at * width);
    chunk.word[0] = four.x;
    chunk.word[1] = four.y;
    chunk.word[2] = four.z;
    chunk.word[3] = four.w;
#else
    memcpy(&chunk, (const char *)array + at * width, sizeof chunk);
#endif
    return chunk;
  }
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < 16u / width; j++)
    if (at + j < n) elements_put_bits(width, &chunk, j, elements_get(width, array, at + j));
  return chunk;
}

ELEMENTS_FN void elements_store(uint32_t width, int whole, void *array, uint64_t at, uint64_t n,
                                const elements_chunk *chunk) {
  if (whole) {
#ifdef __CUDA_ARCH__
    *(uint4 *)((char *)array + at * width) =
        make_uint4(chunk->word[0], chunk->word[1], chunk->word[2], chunk->word[3]);
#else
    memcpy((char *)array + at * width, chunk, sizeof *chunk);
#endif
    return;
  }
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < 16u / width; j++)
    if (at + j < n) elements_set(width, array, at + j, elements_bits_at(width, chunk, j));
}

/* Loads 4 elements of 16 bits into the first half of a chunk, by the same rules. */
ELEMENTS_FN elements_chunk elements_load_shorts(int whole, const void *array, uint64_t at,
                                                uint64_t n) {
  elements_chunk chunk = {{0, 0, 0, 0}};
  if (whole) {
#ifdef __CUDA_ARCH__
    uint2 two = *(const uint2 *)((const char *)array + at * 2);
    chunk.word[0] = two.x;
    chunk.word[1] = two.y;
#else
    memcpy(&chunk, (const char *)array + at * 2, sizeof chunk / 2);
#endif
    return chunk;
  }
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < 4; j++)
    if (at + j < n) elements_put_bits(2, &chunk, j, elements_get(2, array, at + j));
  return chunk;
}

ELEMENTS_FN void elements_store_shorts(int whole, void *array, uint64_t at, uint64_t n,
                                       const elements_chunk *chunk) {
  if (whole) {
#ifdef __CUDA_ARCH__
    *(uint2 *)((char *)array + at * 2) = make_uint2(chunk->word[0], chunk->word[1]);
#else
    memcpy((char *)array + at * 2, chunk, sizeof *chunk / 2);
#endif
    return;
  }
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < 4; j++)
    if (at + j < n) elements_set(2, array, at + j, elements_short(chunk, j));
}

/* Returns 0 if `array` is misaligned for `width` (NULL is aligned); else collects the address bits that miss 16
 * bytes. */
ELEMENTS_FN int elements_aligned(const void *array, uint32_t width, uint32_t *off) {
  *off |= (uint32_t)((uintptr_t)array % 16u);
  return (uintptr_t)array % width == 0;
}

/* ---- geometry ---- */

#define ELEMENTS_WARP 32u
#define ELEMENTS_WARPS 8u
#define ELEMENTS_THREADS 256u /* of a block */
#define ELEMENTS_ROUNDS 4u    /* chunks of a thread in a tile */
#ifndef ELEMENTS_PARTS
#define ELEMENTS_PARTS 8192u /* limit; a test sets less, to see parts of many tiles */
#endif

typedef struct elements_cut {
  uint64_t n, tiles, per; /* per: tiles in a part */
  uint32_t tile, parts;   /* elements in a tile; number of parts */
  uint32_t aligned;       /* 1: all arrays, to 16 bytes */
} elements_cut;

ELEMENTS_FN elements_cut elements_cut_of(uint64_t n, uint32_t tile, uint32_t off) {
  elements_cut cut;
  cut.n = n;
  cut.tile = tile;
  cut.tiles = n / tile + (n % tile != 0);
  cut.per = cut.tiles / ELEMENTS_PARTS + (cut.tiles % ELEMENTS_PARTS != 0);
  cut.parts = cut.tiles == 0 ? 0 : (uint32_t)((cut.tiles - 1) / cut.per + 1);
  cut.aligned = off == 0;
  return cut;
}

/* Returns the elements of the usual tile. */
ELEMENTS_FN uint32_t elements_tile(int dtype) {
  return ELEMENTS_THREADS * ELEMENTS_ROUNDS * elements_many(dtype);
}

/* The tiles of a part are first..end-1. */
ELEMENTS_FN uint64_t elements_first(const elements_cut *cut, uint32_t part) {
  return part * cut->per;
}
ELEMENTS_FN uint64_t elements_end(const elements_cut *cut, uint32_t part) {
  uint64_t end = (part + (uint64_t)1) * cut->per;
  return end < cut->tiles ? end : cut->tiles;
}

/* Can the tile be read by whole chunks? */
ELEMENTS_FN int elements_whole(const elements_cut *cut, uint64_t tile) {
  return cut->aligned && cut->n - tile * cut->tile >= cut->tile;
}

/* Returns the start of a thread's chunk in a round. */
ELEMENTS_FN uint64_t elements_at(const elements_cut *cut, uint64_t tile, uint32_t round,
                                 uint32_t thread, uint32_t many) {
  return tile * cut->tile + (uint64_t)(round * ELEMENTS_THREADS + thread) * many;
}

/* ---- lanes ---- */

#ifdef __CUDA_ARCH__
#define ELEMENTS_LANES 1u
#define ELEMENTS_LANE(l) ((void)(l), (uint32_t)(threadIdx.x % ELEMENTS_WARP))
#else
#define ELEMENTS_LANES ELEMENTS_WARP
#define ELEMENTS_LANE(l) (l)
#endif
#define ELEMENTS_EACH(l) ELEMENTS_UNROLL for (uint32_t l = 0; l < ELEMENTS_LANES; l++)

/* to[lane] = from[the lane that is `step` higher, lower, or differs by the bit]; its own if there is none. */
#ifdef __CUDA_ARCH__
#define ELEMENTS_EXCHANGE(name, type, shuffle, where, there)         \
  ELEMENTS_FN void name(const type *from, type *to, uint32_t step) { \
    to[0] = shuffle(0xffffffffu, from[0], step);                     \
  }
#else
#define ELEMENTS_EXCHANGE(name, type, shuffle, where, there)         \
  ELEMENTS_FN void name(const type *from, type *to, uint32_t step) { \
    for (uint32_t lane = 0; lane < ELEMENTS_WARP; lane++)            \
      to[lane] = from[(there) ? (where) : lane];                     \
  }
#endif
ELEMENTS_EXCHANGE(elements_down_f64, double, __shfl_down_sync, lane + step,
                  lane + step < ELEMENTS_WARP)
ELEMENTS_EXCHANGE(elements_xor_u32, uint32_t, __shfl_xor_sync, lane ^ step, 1)
ELEMENTS_EXCHANGE(elements_xor_u64, uint64_t, __shfl_xor_sync, lane ^ step, 1)
ELEMENTS_EXCHANGE(elements_up_u32, uint32_t, __shfl_up_sync, lane - step, lane >= step)
ELEMENTS_EXCHANGE(elements_up_u64, uint64_t, __shfl_up_sync, lane - step, lane >= step)

/* Lane 0 has the sum, added by halves. */
ELEMENTS_FN void elements_warp_add(double *x) {
  double y[ELEMENTS_LANES];
  ELEMENTS_UNROLL
  for (uint32_t step = ELEMENTS_WARP / 2; step > 0; step /= 2) {
    elements_down_f64(x, y, step);
    ELEMENTS_EACH(l) x[l] = elements_f64_add(x[l], y[l]);
  }
}

/* Every lane has the sum, or the or. */
ELEMENTS_FN void elements_warp_count(uint64_t *x) {
  uint64_t y[ELEMENTS_LANES];
  ELEMENTS_UNROLL
  for (uint32_t step = ELEMENTS_WARP / 2; step > 0; step /= 2) {
    elements_xor_u64(x, y, step);
    ELEMENTS_EACH(l) x[l] += y[l];
  }
}

/* Among `lanes` neighbours. */
ELEMENTS_FN void elements_warp_or(uint32_t *x, uint32_t lanes) {
  uint32_t y[ELEMENTS_LANES];
  ELEMENTS_UNROLL
  for (uint32_t step = lanes / 2; step > 0; step /= 2) {
    elements_xor_u32(x, y, step);
    ELEMENTS_EACH(l) x[l] |= y[l];
  }
}

/* Each lane has the sum of the lanes up to itself. */
#define ELEMENTS_SCAN(name, type, up)                               \
  ELEMENTS_FN void name(type *x) {                                  \
    type y[ELEMENTS_LANES];                                         \
    ELEMENTS_UNROLL                                                 \
    for (uint32_t step = 1; step < ELEMENTS_WARP; step *= 2) {      \
      up(x, y, step);                                               \
      ELEMENTS_EACH(l) x[l] += ELEMENTS_LANE(l) >= step ? y[l] : 0; \
    }                                                               \
  }
ELEMENTS_SCAN(elements_warp_scan_u32, uint32_t, elements_up_u32)
ELEMENTS_SCAN(elements_warp_scan_u64, uint64_t, elements_up_u64)

/* ---- norms and finiteness ---- */

/* Results of a thread. */
typedef struct elements_tally {
  double norm2;
  uint32_t bad;
} elements_tally;

/* Results of blocks, in the caller's scratch; 0 without stats. */
typedef struct elements_sums {
  double *norm2; /* by part */
  uint32_t *bad;
} elements_sums;

typedef struct elements_tally_shared {
  double norm2[ELEMENTS_WARPS];
  uint32_t bad[ELEMENTS_WARPS];
} elements_tally_shared;

#define ELEMENTS_STATS_BYTES (ELEMENTS_PARTS * 12u)

ELEMENTS_FN elements_sums elements_sums_in(void *scratch) {
  elements_sums sums;
  sums.norm2 = (double *)scratch;
  sums.bad = scratch ? (uint32_t *)(void *)(sums.norm2 + ELEMENTS_PARTS) : NULL;
  return sums;
}

ELEMENTS_FN void elements_see(elements_tally *tally, double square, uint32_t bad) {
  tally->norm2 = elements_f64_add(tally->norm2, square);
  tally->bad |= bad;
}

/* Adds in each warp; then a barrier; then warp 0, whose lane 0 gets the block's. */
ELEMENTS_FN void elements_tally_warp(elements_tally_shared *shared, uint32_t warp,
                                     const elements_tally *tally) {
  double norm2[ELEMENTS_LANES];
  uint32_t bad[ELEMENTS_LANES];
  ELEMENTS_EACH(l) {
    norm2[l] = tally[l].norm2;
    bad[l] = tally[l].bad;
  }
  elements_warp_add(norm2);
  elements_warp_or(bad, ELEMENTS_WARP);
  ELEMENTS_EACH(l) {
    if (ELEMENTS_LANE(l) == 0) {
      shared->norm2[warp] = norm2[l];
      shared->bad[warp] = bad[l];
    }
  }
}

ELEMENTS_FN void elements_tally_block(const elements_tally_shared *shared, double *norm2_p,
                                      uint32_t *bad_p) {
  double norm2[ELEMENTS_LANES];
  uint32_t bad[ELEMENTS_LANES];
  ELEMENTS_EACH(l) {
    uint32_t lane = ELEMENTS_LANE(l);
    norm2[l] = lane < ELEMENTS_WARPS ? shared->norm2[lane] : 0.0;
    bad[l] = lane < ELEMENTS_WARPS ? shared->bad[lane] : 0;
  }
  elements_warp_add(norm2);
  elements_warp_or(bad, ELEMENTS_WARP);
  ELEMENTS_EACH(l) {
    if (ELEMENTS_LANE(l) == 0) {
      *norm2_p = norm2[l];
      *bad_p = bad[l];
    }
  }
}

/* Adds the parts of a thread in the last block. */
ELEMENTS_FN elements_tally elements_tally_parts(elements_sums sums, uint32_t parts,
                                                uint32_t thread) {
  elements_tally tally = {0.0, 0};
  for (uint32_t p = thread; p < parts; p += ELEMENTS_THREADS)
    elements_see(&tally, sums.norm2[p], sums.bad[p]);
  return tally;
}

ELEMENTS_FN void elements_stats_set(mlfab_gpu_stats *stats, double norm2, uint32_t bad) {
  stats->norm2 = norm2;
  stats->finite = !bad;
  stats->spare = 0;
}

/* Checks the arguments of a call with stats. */
ELEMENTS_FN int elements_stats_check(const mlfab_gpu_stats *stats, const void *scratch) {
  uint32_t off = 0;
  if (stats == NULL) return 0;
  if (scratch == NULL) return ELEMENTS_INVALID;
  if (!elements_aligned(stats, 8, &off)) return ELEMENTS_MISALIGNED;
  return (uintptr_t)scratch % 16 != 0 ? ELEMENTS_MISALIGNED : 0;
}

/* ---- weighted sums ---- */

typedef struct elements_sum {
  elements_cut cut;
  elements_sums sums;
  void *dst;
  const void *in[MLFAB_GPU_SUM_MOST];
  elements_number weight[MLFAB_GPU_SUM_MOST];
  uint32_t k, copies; /* copies: one input, whose bits are the result, also those of NaN */
} elements_sum;

/* Checks the arguments of mlfab_gpu_sum; returns 0 or the number of an error. */
static inline int elements_sum_of(elements_sum *sum, int dtype, void *dst, const void *const *in,
                                  const double *weight, uint32_t k, uint64_t n,
                                  const mlfab_gpu_stats *stats, void *scratch) {
  uint32_t width = elements_width(dtype), off = 0;
  int code = elements_stats_check(stats, scratch), aligned;
  if (code) return code;
  if (width == 0 || k < 1 || k > MLFAB_GPU_SUM_MOST || in == NULL) return ELEMENTS_INVALID;
  if (dst == NULL && stats == NULL) return ELEMENTS_INVALID;
  memset(sum, 0, sizeof *sum);
  aligned = elements_aligned(dst, width, &off);
  for (uint32_t i = 0; i < k; i++) {
    if (in[i] == NULL && n > 0) return ELEMENTS_INVALID;
    aligned &= elements_aligned(in[i], width, &off);
    sum->in[i] = in[i];
    if (!elements_scalar(dtype, weight ? weight[i] : 1.0, &sum->weight[i])) return ELEMENTS_INVALID;
  }
  if (!aligned) return ELEMENTS_MISALIGNED;
  sum->cut = elements_cut_of(n, elements_tile(dtype), off);
  sum->sums = elements_sums_in(stats ? scratch : NULL);
  sum->dst = dst;
  sum->k = k;
  sum->copies = k == 1 && weight == NULL;
  return 0;
}

/* Stores a chunk of sums, and adds it to the tally. */
ELEMENTS_FN void elements_sum_end(int dtype, int whole, const elements_sum *sum, uint64_t at,
                                  const elements_chunk *chunk, elements_tally *tally) {
  if (sum->dst) elements_store(elements_width(dtype), whole, sum->dst, at, sum->cut.n, chunk);
  if (!sum->sums.norm2) return;
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < elements_many(dtype); j++) {
    elements_number x = elements_take(dtype, chunk, j);
    if (!whole && at + j >= sum->cut.n) break;
    elements_see(tally, elements_square(dtype, x), elements_bad(dtype, x));
  }
}

/* Without weights all weights are 1, which leaves numbers unchanged: a branch for each element would cost more. */
ELEMENTS_FN elements_number elements_sum_one(int dtype, const elements_sum *sum, uint32_t i,
                                             elements_number acc, elements_number x) {
  x = elements_mul(dtype, sum->weight[i], x);
  return i == 0 ? x : elements_add(dtype, acc, x);
}

/* A thread's chunks of a whole tile; k is sum->k, and a constant. All inputs of `step` rounds are loading before the
 * first is used. */
ELEMENTS_FN void elements_sum_whole(int dtype, uint32_t k, const elements_sum *sum, uint64_t tile,
                                    uint32_t thread, elements_tally *tally) {
  const uint32_t width = elements_width(dtype), many = 16u / width;
  const uint32_t step = k == 1 ? 4u : k == 2 ? 2u : 1u;
  ELEMENTS_ONCE
  for (uint32_t from = 0; from < ELEMENTS_ROUNDS; from += step) {
    elements_chunk in[4][MLFAB_GPU_SUM_MOST];
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < step; r++) {
      uint64_t at = elements_at(&sum->cut, tile, from + r, thread, many);
      ELEMENTS_UNROLL
      for (uint32_t i = 0; i < k; i++)
        in[r][i] = elements_load(width, 1, sum->in[i], at, sum->cut.n);
    }
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < step; r++) {
      uint64_t at = elements_at(&sum->cut, tile, from + r, thread, many);
      elements_chunk out = {{0, 0, 0, 0}};
      ELEMENTS_UNROLL
      for (uint32_t j = 0; j < many; j++) {
        elements_number acc = {0.0f, 0.0, 0};
        ELEMENTS_UNROLL
        for (uint32_t i = 0; i < k; i++)
          acc = elements_sum_one(dtype, sum, i, acc, elements_take(dtype, &in[r][i], j));
        elements_put(dtype, &out, j, acc);
      }
      if (k == 1 && sum->copies) out = in[r][0];
      elements_sum_end(dtype, 1, sum, at, &out, tally);
    }
  }
}

/* The same element by element. */
ELEMENTS_FN void elements_sum_ragged(int dtype, const elements_sum *sum, uint64_t tile,
                                     uint32_t thread, elements_tally *tally) {
  const uint32_t width = elements_width(dtype), many = 16u / width;
  ELEMENTS_ONCE
  for (uint32_t round = 0; round < ELEMENTS_ROUNDS; round++) {
    uint64_t at = elements_at(&sum->cut, tile, round, thread, many);
    elements_chunk out = {{0, 0, 0, 0}};
    elements_number acc[8];
    if (at >= sum->cut.n) return;
    ELEMENTS_ONCE
    for (uint32_t i = 0; i < sum->k; i++) {
      elements_chunk in = elements_load(width, 0, sum->in[i], at, sum->cut.n);
      if (sum->copies) out = in;
      ELEMENTS_UNROLL
      for (uint32_t j = 0; j < many; j++) {
        if (i == 0) memset(&acc[j], 0, sizeof acc[j]);
        acc[j] = elements_sum_one(dtype, sum, i, acc[j], elements_take(dtype, &in, j));
      }
    }
    if (!sum->copies) {
      ELEMENTS_UNROLL
      for (uint32_t j = 0; j < many; j++) elements_put(dtype, &out, j, acc[j]);
    }
    elements_sum_end(dtype, 0, sum, at, &out, tally);
  }
}

ELEMENTS_FN elements_tally elements_sum_thread(int dtype, uint32_t k, const elements_sum *sum,
                                               uint32_t part, uint32_t thread) {
  elements_tally tally = {0.0, 0};
  for (uint64_t tile = elements_first(&sum->cut, part); tile < elements_end(&sum->cut, part);
       tile++) {
    if (elements_whole(&sum->cut, tile))
      elements_sum_whole(dtype, k, sum, tile, thread, &tally);
    else
      elements_sum_ragged(dtype, sum, tile, thread, &tally);
  }
  return tally;
}

/* ---- reductions ---- */

typedef struct elements_reduce {
  elements_cut cut;
  void *dst;
  const void *in[MLFAB_GPU_SUM_MOST];
  uint32_t k;
  int op;
} elements_reduce;

/* Checks the arguments of mlfab_gpu_reduce; returns 0 or the number of an error. */
static inline int elements_reduce_of(elements_reduce *reduce, int op, int dtype, void *dst,
                                     const void *const *in, uint32_t k, uint64_t n) {
  uint32_t width = elements_width(dtype), off = 0;
  int aligned;
  if (width == 0 || k < 1 || k > MLFAB_GPU_SUM_MOST || in == NULL) return ELEMENTS_INVALID;
  if (op < MLFAB_OP_SUM || op > MLFAB_OP_PRODUCT) return ELEMENTS_INVALID;
  if ((op == MLFAB_OP_MEAN && dtype == MLFAB_I64) || (dst == NULL && n > 0))
    return ELEMENTS_INVALID;
  memset(reduce, 0, sizeof *reduce);
  aligned = elements_aligned(dst, width, &off);
  for (uint32_t i = 0; i < k; i++) {
    if (in[i] == NULL && n > 0) return ELEMENTS_INVALID;
    aligned &= elements_aligned(in[i], width, &off);
    reduce->in[i] = in[i];
  }
  if (!aligned) return ELEMENTS_MISALIGNED;
  reduce->cut = elements_cut_of(n, elements_tile(dtype), off);
  reduce->dst = dst;
  reduce->k = k;
  reduce->op = op;
  return 0;
}

/* Returns an integer that orders the numbers: -0 below +0, and NaN at the end that wins. */
ELEMENTS_FN int64_t elements_rank(int op, int dtype, elements_number x) {
  const int64_t last = op == MLFAB_OP_MAX ? INT64_MAX : INT64_MIN;
  if (dtype == MLFAB_I64) return (int64_t)x.i64;
  if (dtype == MLFAB_F64) {
    int64_t v = (int64_t)elements_f64_bits(x.f64);
    if ((v & INT64_MAX) > (int64_t)ELEMENTS_F64_INFINITY) return last;
    return v < 0 ? v ^ INT64_MAX : v;
  }
  int32_t v = (int32_t)elements_f32_bits(x.f32);
  if ((v & INT32_MAX) > (int32_t)ELEMENTS_F32_INFINITY) return last;
  return v < 0 ? v ^ INT32_MAX : v;
}

ELEMENTS_FN elements_number elements_combine(int op, int dtype, elements_number a,
                                             elements_number b) {
  if (op == MLFAB_OP_MIN) return elements_rank(op, dtype, b) < elements_rank(op, dtype, a) ? b : a;
  if (op == MLFAB_OP_MAX) return elements_rank(op, dtype, b) > elements_rank(op, dtype, a) ? b : a;
  return op == MLFAB_OP_PRODUCT ? elements_mul(dtype, a, b) : elements_add(dtype, a, b);
}

/* Divides sums, which are rounded already. */
ELEMENTS_FN void elements_divide(int dtype, elements_chunk *chunk, uint32_t by) {
  elements_chunk out = {{0, 0, 0, 0}};
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < elements_many(dtype); j++) {
    elements_number x = elements_take(dtype, chunk, j);
    if (dtype == MLFAB_F64)
      x.f64 = elements_f64_div(x.f64, (double)by);
    else
      x.f32 = elements_f32_div(x.f32, (float)by);
    elements_put(dtype, &out, j, x);
  }
  *chunk = out;
}

ELEMENTS_FN void elements_reduce_tile(int dtype, int whole, const elements_reduce *reduce,
                                      uint64_t tile, uint32_t thread) {
  const uint32_t width = elements_width(dtype), many = 16u / width;
  ELEMENTS_ONCE
  for (uint32_t round = 0; round < ELEMENTS_ROUNDS; round++) {
    uint64_t at = elements_at(&reduce->cut, tile, round, thread, many);
    elements_chunk out = {{0, 0, 0, 0}};
    elements_number acc[8];
    if (at >= reduce->cut.n) return;
    ELEMENTS_ONCE
    for (uint32_t i = 0; i < reduce->k; i++) {
      elements_chunk in = elements_load(width, whole, reduce->in[i], at, reduce->cut.n);
      ELEMENTS_UNROLL
      for (uint32_t j = 0; j < many; j++) {
        elements_number x = elements_take(dtype, &in, j);
        acc[j] = i == 0 ? x : elements_combine(reduce->op, dtype, acc[j], x);
      }
    }
    ELEMENTS_UNROLL
    for (uint32_t j = 0; j < many; j++) elements_put(dtype, &out, j, acc[j]);
    if (reduce->op == MLFAB_OP_MEAN) elements_divide(dtype, &out, reduce->k);
    elements_store(width, whole, reduce->dst, at, reduce->cut.n, &out);
  }
}

ELEMENTS_FN void elements_reduce_thread(int dtype, const elements_reduce *reduce, uint32_t part,
                                        uint32_t thread) {
  for (uint64_t tile = elements_first(&reduce->cut, part); tile < elements_end(&reduce->cut, part);
       tile++) {
    if (elements_whole(&reduce->cut, tile))
      elements_reduce_tile(dtype, 1, reduce, tile, thread);
    else
      elements_reduce_tile(dtype, 0, reduce, tile, thread);
  }
}

/* ---- adding an update ---- */

typedef struct elements_update {
  elements_cut cut;
  elements_sums sums;
  void *dst;
  const void *w, *u;
  elements_number scale;
} elements_update;

static inline int elements_update_of(elements_update *update, int dtype, void *dst, const void *w,
                                     const void *u, double scale, uint64_t n,
                                     const mlfab_gpu_stats *stats, void *scratch) {
  uint32_t width = elements_width(dtype), off = 0;
  int code = elements_stats_check(stats, scratch), aligned;
  if (code) return code;
  if (width < 4 || (dst == NULL && stats == NULL) || (u == NULL && n > 0)) return ELEMENTS_INVALID;
  memset(update, 0, sizeof *update);
  if (!elements_scalar(dtype, scale, &update->scale)) return ELEMENTS_INVALID;
  aligned = elements_aligned(dst, width, &off);
  aligned &= elements_aligned(w, width, &off);
  aligned &= elements_aligned(u, width, &off);
  if (!aligned) return ELEMENTS_MISALIGNED;
  update->cut = elements_cut_of(n, elements_tile(dtype), off);
  update->sums = elements_sums_in(stats ? scratch : NULL);
  update->dst = dst;
  update->w = dst ? w : NULL;
  update->u = u;
  return 0;
}

/* Without w it is -0, which leaves numbers unchanged: a branch for each element would cost more. */
ELEMENTS_FN elements_chunk elements_nothing(int dtype) {
  elements_number zero = {-0.0f, -0.0, 0};
  elements_chunk chunk = {{0, 0, 0, 0}};
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < elements_many(dtype); j++) elements_put(dtype, &chunk, j, zero);
  return chunk;
}

ELEMENTS_FN void elements_update_end(int dtype, int whole, const elements_update *update,
                                     uint64_t at, const elements_chunk *w, const elements_chunk *u,
                                     elements_tally *tally) {
  const uint32_t many = elements_many(dtype);
  elements_chunk out = {{0, 0, 0, 0}};
  elements_number product[4];
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < many; j++) {
    product[j] = elements_mul(dtype, update->scale, elements_take(dtype, u, j));
    elements_put(dtype, &out, j, elements_add(dtype, elements_take(dtype, w, j), product[j]));
  }
  if (update->dst) elements_store(16u / many, whole, update->dst, at, update->cut.n, &out);
  if (!update->sums.norm2) return;
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < many; j++) {
    if (!whole && at + j >= update->cut.n) break;
    elements_see(tally, elements_square(dtype, elements_take(dtype, u, j)),
                 elements_bad(dtype, product[j]));
  }
}

/* `step` rounds of a thread. */
ELEMENTS_FN void elements_update_rounds(int dtype, int whole, uint32_t step,
                                        const elements_update *update, uint64_t tile,
                                        uint32_t thread, elements_tally *tally) {
  const uint32_t width = elements_width(dtype), many = 16u / width;
  ELEMENTS_ONCE
  for (uint32_t from = 0; from < ELEMENTS_ROUNDS; from += step) {
    elements_chunk w[ELEMENTS_ROUNDS], u[ELEMENTS_ROUNDS];
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < step; r++) {
      uint64_t at = elements_at(&update->cut, tile, from + r, thread, many);
      u[r] = elements_load(width, whole, update->u, at, update->cut.n);
      w[r] = elements_nothing(dtype);
      if (update->w) w[r] = elements_load(width, whole, update->w, at, update->cut.n);
    }
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < step; r++) {
      uint64_t at = elements_at(&update->cut, tile, from + r, thread, many);
      if (whole || at < update->cut.n)
        elements_update_end(dtype, whole, update, at, &w[r], &u[r], tally);
    }
  }
}

ELEMENTS_FN elements_tally elements_update_thread(int dtype, const elements_update *update,
                                                  uint32_t part, uint32_t thread) {
  elements_tally tally = {0.0, 0};
  for (uint64_t tile = elements_first(&update->cut, part); tile < elements_end(&update->cut, part);
       tile++) {
    if (elements_whole(&update->cut, tile))
      elements_update_rounds(dtype, 1, 2, update, tile, thread, &tally);
    else
      elements_update_rounds(dtype, 0, 1, update, tile, thread, &tally);
  }
  return tally;
}

/* ---- update rules ---- */

enum elements_rule {
  ELEMENTS_PLAIN,
  ELEMENTS_MOMENTUM,
  ELEMENTS_NESTEROV,
  ELEMENTS_LION,
  ELEMENTS_ROOT,
  ELEMENTS_ADAM
};

/* A step with the scalars of a commit. A scalar is computed in double and rounded to the type once. */
typedef struct elements_step {
  elements_cut cut;
  void *dst, *s0, *s1;
  const void *w, *u;
  elements_number decay, scale;
  elements_number keep0, take0; /* of s0: momentum's gamma and scale; beta1 of Adam and Lion */
  elements_number keep1, take1; /* of squares; Lion's beta2 */
  double epsilon;
  uint32_t rule, decays;
} elements_step;

/* A new optimizer does not compile before its step stands here. */
typedef char elements_know_all_rules[MLFAB_OPTIMIZER_COUNT == 8 ? 1 : -1];

/* As optimizer.c computes beta^t. */
static inline double elements_power(double base, uint64_t exponent) {
  double power = 1.0;
  for (; exponent != 0; exponent >>= 1, base = elements_f64_mul(base, base))
    if (exponent & 1) power = elements_f64_mul(power, base);
  return power;
}

static inline void elements_step_scalars(elements_step *step, int dtype,
                                         const mlfab_gpu_rule *rule) {
  double scale = rule->scale, one = 1.0, keep0 = one, take0 = one, keep1 = one, take1 = one;
  step->epsilon = rule->epsilon;
  step->decays = rule->weight_decay > 0.0;
  step->rule = ELEMENTS_PLAIN;
  if (rule->kind == MLFAB_OPTIMIZER_ADADELAY) {
    double age = elements_f64_add((double)rule->t, (double)rule->delay);
    scale *= elements_f64_div(rule->adadelay_c, elements_f64_sqrt(age));
  } else if (rule->kind == MLFAB_OPTIMIZER_MOMENTUM || rule->kind == MLFAB_OPTIMIZER_NESTEROV) {
    step->rule = rule->kind == MLFAB_OPTIMIZER_MOMENTUM ? ELEMENTS_MOMENTUM : ELEMENTS_NESTEROV;
    keep0 = rule->gamma;
    take0 = scale;
  } else if (rule->kind == MLFAB_OPTIMIZER_RMSPROP || rule->kind == MLFAB_OPTIMIZER_ADAGRAD) {
    step->rule = ELEMENTS_ROOT;
    if (rule->kind == MLFAB_OPTIMIZER_RMSPROP) {
      keep1 = rule->beta2;
      take1 = 1.0 - rule->beta2;
    }
  } else if (rule->kind == MLFAB_OPTIMIZER_LION) {
    step->rule = ELEMENTS_LION;
    keep0 = rule->beta1;
    take0 = 1.0 - rule->beta1;
    keep1 = rule->beta2;
    take1 = 1.0 - rule->beta2;
  } else if (rule->kind == MLFAB_OPTIMIZER_ADAM) {
    double correction1 = 1.0 - elements_power(rule->beta1, rule->t);
    double correction2 = elements_f64_sqrt(1.0 - elements_power(rule->beta2, rule->t));
    step->rule = ELEMENTS_ADAM;
    step->epsilon = elements_f64_mul(rule->epsilon, correction2);
    scale = elements_f64_div(elements_f64_mul(scale, correction2), correction1);
    keep0 = rule->beta1;
    take0 = 1.0 - rule->beta1;
    keep1 = rule->beta2;
    take1 = 1.0 - rule->beta2;
  }
  (void)elements_scalar(dtype, elements_f64_mul(rule->scale, rule->weight_decay), &step->decay);
  (void)elements_scalar(dtype, scale, &step->scale);
  (void)elements_scalar(dtype, keep0, &step->keep0);
  (void)elements_scalar(dtype, take0, &step->take0);
  (void)elements_scalar(dtype, keep1, &step->keep1);
  (void)elements_scalar(dtype, take1, &step->take1);
}

ELEMENTS_FN uint32_t elements_states(uint32_t rule) {
  return rule == ELEMENTS_PLAIN ? 0 : rule == ELEMENTS_ADAM ? 2 : 1;
}

/* Checks the arguments of mlfab_gpu_apply, except the tag. */
static inline int elements_step_of(elements_step *step, const mlfab_gpu_rule *rule, int dtype,
                                   void *dst, const void *w, const void *u, void *s0, void *s1,
                                   uint64_t n) {
  uint32_t width = elements_width(dtype), off = 0, states;
  int aligned;
  if (rule == NULL || rule->t < 1 || rule->kind >= MLFAB_OPTIMIZER_COUNT) return ELEMENTS_INVALID;
  if (dtype != MLFAB_F32 && dtype != MLFAB_F64) return ELEMENTS_INVALID;
  memset(step, 0, sizeof *step);
  elements_step_scalars(step, dtype, rule);
  states = elements_states(step->rule);
  if (n > 0 && (!dst || !w || !u || (states > 0 && !s0) || (states > 1 && !s1)))
    return ELEMENTS_INVALID;
  step->s0 = states > 0 ? s0 : NULL;
  step->s1 = states > 1 ? s1 : NULL;
  aligned = elements_aligned(dst, width, &off);
  aligned &= elements_aligned(w, width, &off);
  aligned &= elements_aligned(u, width, &off);
  aligned &= elements_aligned(step->s0, width, &off);
  aligned &= elements_aligned(step->s1, width, &off);
  if (!aligned) return ELEMENTS_MISALIGNED;
  step->cut = elements_cut_of(n, elements_tile(dtype), off);
  step->dst = dst;
  step->w = w;
  step->u = u;
  return 0;
}

/* keep * v + take * x, each operation rounded. */
ELEMENTS_FN elements_number elements_blend(int dtype, elements_number keep, elements_number v,
                                           elements_number take, elements_number x) {
  return elements_axpy(dtype, elements_mul(dtype, keep, v), take, x);
}

/* m / (sqrt(v) + epsilon) in double, rounded to the type. */
ELEMENTS_FN elements_number elements_quotient(int dtype, elements_number m, elements_number v,
                                              double epsilon) {
  elements_number r = {0.0f, 0.0, 0};
  double top = dtype == MLFAB_F32 ? elements_f64_of_f32(m.f32) : m.f64;
  double root = elements_f64_sqrt(dtype == MLFAB_F32 ? elements_f64_of_f32(v.f32) : v.f64);
  double quotient = elements_f64_div(top, elements_f64_add(root, epsilon));
  if (dtype == MLFAB_F32)
    r.f32 = elements_f32_of_f64(quotient);
  else
    r.f64 = quotient;
  return r;
}

/* -1, 0 or 1. */
ELEMENTS_FN elements_number elements_sign(int dtype, elements_number x) {
  if (dtype == MLFAB_F32)
    x.f32 = (float)((x.f32 > 0.0f) - (x.f32 < 0.0f));
  else
    x.f64 = (double)((x.f64 > 0.0) - (x.f64 < 0.0));
  return x;
}

/* The step of an element, whose w has decayed: optimizer.c, rule by rule. */
ELEMENTS_FN elements_number elements_apply(int dtype, uint32_t rule, const elements_step *step,
                                           elements_number w, elements_number u,
                                           elements_number *s0, elements_number *s1) {
  if (rule == ELEMENTS_PLAIN) return elements_axpy(dtype, w, step->scale, u);
  if (rule == ELEMENTS_MOMENTUM) {
    *s0 = elements_blend(dtype, step->keep0, *s0, step->take0, u);
    return elements_add(dtype, w, *s0);
  }
  if (rule == ELEMENTS_NESTEROV) {
    *s0 = elements_blend(dtype, step->keep0, *s0, step->take0, u);
    return elements_axpy(dtype, elements_axpy(dtype, w, step->keep0, *s0), step->scale, u);
  }
  if (rule == ELEMENTS_LION) {
    elements_number ahead = elements_blend(dtype, step->keep0, *s0, step->take0, u);
    *s0 = elements_blend(dtype, step->keep1, *s0, step->take1, u);
    return elements_axpy(dtype, w, step->scale, elements_sign(dtype, ahead));
  }
  elements_number square = elements_mul(dtype, u, u);
  if (rule == ELEMENTS_ROOT) {
    *s0 = elements_blend(dtype, step->keep1, *s0, step->take1, square);
    return elements_axpy(dtype, w, step->scale, elements_quotient(dtype, u, *s0, step->epsilon));
  }
  *s0 = elements_blend(dtype, step->keep0, *s0, step->take0, u);
  *s1 = elements_blend(dtype, step->keep1, *s1, step->take1, square);
  return elements_axpy(dtype, w, step->scale, elements_quotient(dtype, *s0, *s1, step->epsilon));
}

/* w + decay * w, for a chunk. */
ELEMENTS_FN elements_chunk elements_decay(int dtype, const elements_step *step,
                                          const elements_chunk *w) {
  elements_chunk decayed = {{0, 0, 0, 0}};
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < elements_many(dtype); j++) {
    elements_number x = elements_take(dtype, w, j);
    elements_put(dtype, &decayed, j, elements_axpy(dtype, x, step->decay, x));
  }
  return decayed;
}

/* A thread's chunk of one round; `rule` is a constant. */
ELEMENTS_FN void elements_step_round(int dtype, uint32_t rule, int whole, const elements_step *step,
                                     uint64_t at) {
  const uint32_t width = elements_width(dtype), states = elements_states(rule);
  const uint64_t n = step->cut.n;
  elements_chunk w = elements_load(width, whole, step->w, at, n),
                 u = elements_load(width, whole, step->u, at, n);
  elements_chunk s0 = {{0, 0, 0, 0}}, s1 = {{0, 0, 0, 0}};
  elements_chunk out = {{0, 0, 0, 0}}, new0 = {{0, 0, 0, 0}}, new1 = {{0, 0, 0, 0}};
  if (states > 0) s0 = elements_load(width, whole, step->s0, at, n);
  if (states > 1) s1 = elements_load(width, whole, step->s1, at, n);
  if (step->decays) w = elements_decay(dtype, step, &w);
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < elements_many(dtype); j++) {
    elements_number x0 = elements_take(dtype, &s0, j), x1 = elements_take(dtype, &s1, j);
    elements_put(dtype, &out, j,
                 elements_apply(dtype, rule, step, elements_take(dtype, &w, j),
                                elements_take(dtype, &u, j), &x0, &x1));
    elements_put(dtype, &new0, j, x0);
    elements_put(dtype, &new1, j, x1);
  }
  if (states > 0) elements_store(width, whole, step->s0, at, n, &new0);
  if (states > 1) elements_store(width, whole, step->s1, at, n, &new1);
  elements_store(width, whole, step->dst, at, n, &out);
}

ELEMENTS_FN void elements_step_thread(int dtype, uint32_t rule, const elements_step *step,
                                      uint32_t part, uint32_t thread) {
  for (uint64_t tile = elements_first(&step->cut, part); tile < elements_end(&step->cut, part);
       tile++) {
    const int whole = elements_whole(&step->cut, tile);
    ELEMENTS_ONCE
    for (uint32_t round = 0; round < ELEMENTS_ROUNDS; round++) {
      uint64_t at = elements_at(&step->cut, tile, round, thread, elements_many(dtype));
      if (whole)
        elements_step_round(dtype, rule, 1, step, at);
      else if (at < step->cut.n)
        elements_step_round(dtype, rule, 0, step, at);
    }
  }
}

/* ---- conversions ---- */

/* In each round a thread converts 4 elements: a chunk of float32, half a chunk of 16-bit numbers. So a warp's reads and its
 * writes are both coalesced. */
typedef struct elements_convert {
  elements_cut cut;
  void *to;
  const void *from;
} elements_convert;

static inline int elements_convert_of(elements_convert *convert, int to_dtype, void *to,
                                      int from_dtype, const void *from, uint64_t n) {
  int to16 = to_dtype == MLFAB_F16 || to_dtype == MLFAB_BF16,
      from16 = from_dtype == MLFAB_F16 || from_dtype == MLFAB_BF16;
  uint32_t off = 0;
  int aligned;
  if (!(to16 && from_dtype == MLFAB_F32) && !(from16 && to_dtype == MLFAB_F32))
    return ELEMENTS_INVALID;
  if (n > 0 && (!to || !from)) return ELEMENTS_INVALID;
  aligned = elements_aligned(to, elements_width(to_dtype), &off);
  aligned &= elements_aligned(from, elements_width(from_dtype), &off);
  if (!aligned) return ELEMENTS_MISALIGNED;
  memset(convert, 0, sizeof *convert);
  convert->cut = elements_cut_of(n, 2 * elements_tile(MLFAB_F32), off);
  convert->to = to;
  convert->from = from;
  return 0;
}

ELEMENTS_FN uint16_t elements_to_16(int dtype, int saturate, float x) {
  if (dtype == MLFAB_F16) return saturate ? elements_f16_saturate(x) : elements_f16_round(x);
  return saturate ? elements_bf16_saturate(x) : elements_bf16_round(x);
}

ELEMENTS_FN float elements_from_16(int dtype, uint16_t h) {
  return dtype == MLFAB_F16 ? elements_f16_exactly(h) : elements_bf16_back(h);
}

/* `rounds` of a thread; saturate is a constant. */
ELEMENTS_FN void elements_convert_rounds(int to_dtype, int from_dtype, int saturate, int whole,
                                         uint32_t rounds, const elements_convert *convert,
                                         uint64_t tile, uint32_t thread) {
  const uint64_t n = convert->cut.n;
  ELEMENTS_ONCE
  for (uint32_t from = 0; from < 2 * ELEMENTS_ROUNDS; from += rounds) {
    elements_chunk in[ELEMENTS_ROUNDS];
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < rounds; r++) {
      uint64_t at = elements_at(&convert->cut, tile, from + r, thread, 4);
      in[r] = from_dtype == MLFAB_F32 ? elements_load(4, whole, convert->from, at, n)
                                      : elements_load_shorts(whole, convert->from, at, n);
    }
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < rounds; r++) {
      uint64_t at = elements_at(&convert->cut, tile, from + r, thread, 4);
      elements_chunk out = {{0, 0, 0, 0}};
      ELEMENTS_UNROLL
      for (uint32_t j = 0; j < 4; j++) {
        if (from_dtype == MLFAB_F32)
          elements_put_bits(2, &out, j,
                            elements_to_16(to_dtype, saturate, elements_f32(in[r].word[j])));
        else
          out.word[j] = elements_f32_bits(elements_from_16(from_dtype, elements_short(&in[r], j)));
      }
      if (to_dtype == MLFAB_F32)
        elements_store(4, whole, convert->to, at, n, &out);
      else
        elements_store_shorts(whole, convert->to, at, n, &out);
    }
  }
}

ELEMENTS_FN void elements_convert_thread(int to_dtype, int from_dtype, int saturate,
                                         const elements_convert *convert, uint32_t part,
                                         uint32_t thread) {
  for (uint64_t tile = elements_first(&convert->cut, part);
       tile < elements_end(&convert->cut, part); tile++) {
    if (elements_whole(&convert->cut, tile))
      elements_convert_rounds(to_dtype, from_dtype, saturate, 1, ELEMENTS_ROUNDS, convert, tile,
                              thread);
    else
      elements_convert_rounds(to_dtype, from_dtype, saturate, 0, 1, convert, tile, thread);
  }
}

/* ---- compaction ---- */

/* Three launches. The whole array decides if anything changes: only if all elements are finite and there is room.
 *  1. Mark reads g and residual, writes a bit for each element, and counts for each part; with another array for
 *     the new residual it also writes a there.
 *  2. Scan, one block, adds the counts up and decides.
 *  3. Emit writes the marked elements. If a is stored, and as long as they are few, it reads the bits and only those
 *     elements; else it computes a again, and writes the residual of all elements.
 *
 * Bytes for an element of F32 if d = 1 % are sent. Memory moves pieces of 64 bytes. 1 - 0.99^16 = 0.15 of them hold an
 * element that is sent: 0.6 bytes per element:
 *     mark          4 (residual) [+ 4 (g)] [+ 4 (a)] + 1/8 (bits)
 *     emit, sparse  1/8 (bits) + 0.6 read + 0.6 written (residual) + 8 d = 0.08 (index and value)
 *     emit, dense   1/8 (bits) + 4 (residual) [+ 4 (g)] + 4 (residual) + 8 d
 * g NULL, in place: 5.5 bytes, and 4.12 are necessary (a once, and the sent elements). g, into another array: 13.5, and
 * 12.08. g, in place: 20.3, and 20.08. The scan moves less than 200 KiB. */
#define ELEMENTS_COMPACT_TILE 8192u
#define ELEMENTS_COMPACT_WORDS 256u /* words of a tile: one for each thread */
#define ELEMENTS_SCAN_THREADS 1024u
#define ELEMENTS_SCAN_EACH 8u /* number of parts for each thread */
#define ELEMENTS_SPARSE 8u    /* a part with fewer than one marked element in so many is sparse */

typedef struct elements_compact {
  elements_cut cut;
  const void *g, *residual;
  void *to;           /* place of the new residual */
  void *a;            /* place of a; NULL: mark does not store a */
  const void *kept;   /* the stored a; NULL: emit computes a again */
  uint64_t high, top; /* bits of magnitudes: from `high` on, send; above `top`, keep an excess */
  uint32_t *indices;
  void *values;
  uint64_t room;
  mlfab_gpu_compacted *result;
  uint64_t *before; /* by part: marked elements of the parts before it */
  uint32_t *count, *over, *bad;
  uint32_t *verdict; /* 1: emit */
  uint32_t *words;   /* the marks */
  int half;
} elements_compact;

#define ELEMENTS_COMPACT_HEAD (ELEMENTS_PARTS * 20u + 16u)

static inline uint64_t elements_compact_bytes(uint64_t n) {
  uint64_t tiles = n / ELEMENTS_COMPACT_TILE + (n % ELEMENTS_COMPACT_TILE != 0);
  return ELEMENTS_COMPACT_HEAD + tiles * (ELEMENTS_COMPACT_TILE / 8);
}

/* Returns the bits of the smallest number of the type that is at least tau > 0. */
static inline uint64_t elements_ceiling(int dtype, double tau) {
  float nearest;
  if (dtype == MLFAB_F64) return elements_f64_bits(tau);
  if (tau > 0x1.fffffep127) return ELEMENTS_F32_INFINITY;
  nearest = (float)tau;
  return elements_f32_bits(nearest) + (uint64_t)((double)nearest < tau);
}

/* Returns the bits of the smallest number of the type that `half` does not round to zero: float32 above 2^-25 or
 * 2^-134. A float64 is rounded to float32 first. So it must be above the middle between these and the next float32; the
 * middle itself rounds down, to even. */
static inline uint64_t elements_low(int dtype, int half) {
  if (half == MLFAB_HALF_NONE) return 1;
  if (dtype == MLFAB_F32) return half == MLFAB_HALF_F16 ? 0x33000001u : 0x00008001u;
  return elements_f64_bits(half == MLFAB_HALF_F16 ? 0x1p-25 + 0x1p-49 : 0x1p-134 + 0x1p-150) + 1;
}

static inline uint64_t elements_top(int dtype, int half) {
  uint32_t bits = half == MLFAB_HALF_F16    ? ELEMENTS_F16_TOP
                  : half == MLFAB_HALF_BF16 ? ELEMENTS_BF16_TOP
                                            : ELEMENTS_F32_TOP;
  if (dtype == MLFAB_F32) return bits;
  return half == MLFAB_HALF_NONE ? ELEMENTS_F64_INFINITY - 1
                                 : elements_f64_bits((double)elements_f32(bits));
}

static inline int elements_compact_of(elements_compact *c, int dtype, const void *g,
                                      const void *residual, void *to, uint64_t n, double tau,
                                      int half, uint32_t *indices, void *values, uint64_t room,
                                      mlfab_gpu_compacted *result, void *scratch) {
  uint32_t width = elements_width(dtype), off = 0, other = 0;
  uint64_t high = 0;
  int aligned;
  if (dtype != MLFAB_F32 && dtype != MLFAB_F64) return ELEMENTS_INVALID;
  if (half < MLFAB_HALF_NONE || half > MLFAB_HALF_BF16 || n > UINT64_C(1) << 32)
    return ELEMENTS_INVALID;
  if (!result || !scratch || (n > 0 && (!residual || !to)) ||
      (room > 0 && n > 0 && (!indices || !values)))
    return ELEMENTS_INVALID;
  if ((elements_f64_bits(tau) & ELEMENTS_F64_MAGNITUDE) > ELEMENTS_F64_INFINITY)
    return ELEMENTS_INVALID;
  aligned = elements_aligned(g, width, &off);
  aligned &= elements_aligned(residual, width, &off);
  aligned &= elements_aligned(to, width, &off);
  aligned &= elements_aligned(indices, 4, &other);
  aligned &= elements_aligned(values, half == MLFAB_HALF_NONE ? width : 2, &other);
  aligned &= elements_aligned(result, 8, &other);
  aligned &= elements_aligned(scratch, 16, &other);
  if (!aligned) return ELEMENTS_MISALIGNED;
  memset(c, 0, sizeof *c);
  if (tau > 0) high = elements_ceiling(dtype, tau);
  c->high = elements_low(dtype, half);
  if (high > c->high) c->high = high;
  c->top = elements_top(dtype, half);
  c->cut = elements_cut_of(n, ELEMENTS_COMPACT_TILE, off);
  c->g = g;
  c->residual = residual;
  c->to = to;
  c->a = to != residual ? to : NULL;
  c->kept = c->a ? to : g ? NULL : residual;
  c->indices = indices;
  c->values = values;
  c->room = room;
  c->result = result;
  c->before = (uint64_t *)scratch;
  c->count = (uint32_t *)(void *)(c->before + ELEMENTS_PARTS);
  c->over = c->count + ELEMENTS_PARTS;
  c->bad = c->over + ELEMENTS_PARTS;
  c->verdict = c->bad + ELEMENTS_PARTS;
  c->words = (uint32_t *)(void *)((char *)scratch + ELEMENTS_COMPACT_HEAD);
  c->half = half;
  return 0;
}

ELEMENTS_FN uint64_t elements_magnitude(int dtype, elements_number x) {
  return dtype == MLFAB_F32 ? elements_f32_bits(x.f32) & ELEMENTS_F32_MAGNITUDE
                            : elements_f64_bits(x.f64) & ELEMENTS_F64_MAGNITUDE;
}

/* a = residual + g, for a chunk. */
ELEMENTS_FN elements_chunk elements_sum_chunk(int dtype, const elements_chunk *residual,
                                              const elements_chunk *g) {
  elements_chunk a = {{0, 0, 0, 0}};
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < elements_many(dtype); j++)
    elements_put(
        dtype, &a, j,
        elements_add(dtype, elements_take(dtype, residual, j), elements_take(dtype, g, j)));
  return a;
}

/* Results of a thread in its part. */
typedef struct elements_marks {
  uint32_t count, over, bad;
} elements_marks;

/* Magnitudes of float32 are compared as words of 32 bits, which are native on a GPU. */
ELEMENTS_FN int elements_above(int dtype, uint64_t m, uint64_t than) {
  return dtype == MLFAB_F32 ? (uint32_t)m > (uint32_t)than : m > than;
}

/* Returns the marks of a chunk, one bit per element. Beyond n elements are 0, and are not sent. */
ELEMENTS_FN uint32_t elements_mark_chunk(int dtype, const elements_compact *c,
                                         const elements_chunk *a, elements_marks *seen) {
  const uint64_t infinity = dtype == MLFAB_F32 ? ELEMENTS_F32_INFINITY : ELEMENTS_F64_INFINITY;
  const uint64_t below = c->high - 1;
  uint64_t most = 0;
  uint32_t marks = 0;
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < elements_many(dtype); j++) {
    uint64_t m = elements_magnitude(dtype, elements_take(dtype, a, j));
    marks |= (uint32_t)elements_above(dtype, m, below) << j;
    most = elements_above(dtype, m, most) ? m : most;
  }
  seen->count += elements_bits(marks);
  seen->bad |= (uint32_t)elements_above(dtype, most, infinity - 1);
  if (!elements_above(dtype, most, c->top)) return marks;
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < elements_many(dtype); j++) {
    uint64_t m = elements_magnitude(dtype, elements_take(dtype, a, j));
    seen->over += (uint32_t)elements_above(dtype, m, c->top) & marks >> j;
  }
  return marks;
}

/* `step` rounds of a warp: the lanes of a word or their marks together, and the first of them writes it. */
ELEMENTS_FN void elements_mark_rounds(int dtype, int whole, uint32_t step,
                                      const elements_compact *c, uint64_t tile, uint32_t warp,
                                      elements_marks *seen) {
  const uint32_t width = elements_width(dtype), many = 16u / width, lanes = 32u / many;
  const uint32_t rounds = ELEMENTS_COMPACT_TILE / (ELEMENTS_THREADS * many);
  const uint64_t n = c->cut.n;
  ELEMENTS_ONCE
  for (uint32_t from = 0; from < rounds; from += step) {
    elements_chunk a[ELEMENTS_ROUNDS][ELEMENTS_LANES], g[ELEMENTS_ROUNDS][ELEMENTS_LANES];
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < step; r++) {
      ELEMENTS_EACH(l) {
        uint64_t at =
            elements_at(&c->cut, tile, from + r, warp * ELEMENTS_WARP + ELEMENTS_LANE(l), many);
        a[r][l] = elements_load(width, whole, c->residual, at, n);
        if (c->g) g[r][l] = elements_load(width, whole, c->g, at, n);
      }
    }
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < step; r++) {
      uint32_t word[ELEMENTS_LANES];
      ELEMENTS_EACH(l) {
        uint32_t lane = ELEMENTS_LANE(l);
        uint64_t at = elements_at(&c->cut, tile, from + r, warp * ELEMENTS_WARP + lane, many);
        if (c->g) a[r][l] = elements_sum_chunk(dtype, &a[r][l], &g[r][l]);
        if (c->a) elements_store(width, whole, c->a, at, n, &a[r][l]);
        word[l] = elements_mark_chunk(dtype, c, &a[r][l], &seen[l]) << (lane % lanes * many);
      }
      elements_warp_or(word, lanes);
      ELEMENTS_EACH(l) {
        uint32_t lane = ELEMENTS_LANE(l);
        uint64_t at = elements_at(&c->cut, tile, from + r, warp * ELEMENTS_WARP + lane, many);
        if (lane % lanes == 0) c->words[at / 32] = word[l];
      }
    }
  }
}

ELEMENTS_FN void elements_mark_warp(int dtype, const elements_compact *c, uint32_t part,
                                    uint32_t warp, elements_marks *seen) {
  ELEMENTS_EACH(l) seen[l].count = seen[l].over = seen[l].bad = 0;
  for (uint64_t tile = elements_first(&c->cut, part); tile < elements_end(&c->cut, part); tile++) {
    if (elements_whole(&c->cut, tile))
      elements_mark_rounds(dtype, 1, 4, c, tile, warp, seen);
    else
      elements_mark_rounds(dtype, 0, 1, c, tile, warp, seen);
  }
}

typedef struct elements_marks_shared {
  uint32_t count[ELEMENTS_WARPS], over[ELEMENTS_WARPS], bad[ELEMENTS_WARPS];
} elements_marks_shared;

/* The three sums of a warp, in every lane: a part has at most 64 tiles, so two counts fit a word. */
ELEMENTS_FN void elements_marks_add(elements_marks *seen) {
  uint64_t two[ELEMENTS_LANES];
  uint32_t bad[ELEMENTS_LANES];
  ELEMENTS_EACH(l) {
    two[l] = (uint64_t)seen[l].over << 32 | seen[l].count;
    bad[l] = seen[l].bad;
  }
  elements_warp_count(two);
  elements_warp_or(bad, ELEMENTS_WARP);
  ELEMENTS_EACH(l) {
    seen[l].over = (uint32_t)(two[l] >> 32);
    seen[l].count = (uint32_t)two[l];
    seen[l].bad = bad[l];
  }
}

/* Each warp; then a barrier; then warp 0. */
ELEMENTS_FN void elements_marks_warp(elements_marks_shared *shared, uint32_t warp,
                                     elements_marks *seen) {
  elements_marks_add(seen);
  ELEMENTS_EACH(l) {
    if (ELEMENTS_LANE(l) == 0) {
      shared->count[warp] = seen[l].count;
      shared->over[warp] = seen[l].over;
      shared->bad[warp] = seen[l].bad;
    }
  }
}

ELEMENTS_FN void elements_marks_block(const elements_marks_shared *shared,
                                      const elements_compact *c, uint32_t part) {
  elements_marks seen[ELEMENTS_LANES];
  ELEMENTS_EACH(l) {
    uint32_t lane = ELEMENTS_LANE(l);
    int in = lane < ELEMENTS_WARPS;
    seen[l].count = in ? shared->count[lane] : 0;
    seen[l].over = in ? shared->over[lane] : 0;
    seen[l].bad = in ? shared->bad[lane] : 0;
  }
  elements_marks_add(seen);
  ELEMENTS_EACH(l) {
    if (ELEMENTS_LANE(l) == 0) {
      c->count[part] = seen[l].count;
      c->over[part] = seen[l].over;
      c->bad[part] = seen[l].bad;
    }
  }
}

/* ---- compaction: the scan of the parts, one block of 32 warps ---- */

typedef struct elements_scan_shared {
  uint64_t count[ELEMENTS_WARP], over[ELEMENTS_WARP]; /* by warp */
  uint32_t bad[ELEMENTS_WARP];
} elements_scan_shared;

/* State of a thread across the barriers. */
typedef struct elements_scan {
  uint64_t before;                    /* marked elements of the warp's parts before the thread's */
  uint32_t count[ELEMENTS_SCAN_EACH]; /* by part of the thread */
} elements_scan;

/* Reads the numbers of the thread's parts. Parts beyond the last one count 0. `whole` is a constant. */
ELEMENTS_FN void elements_scan_read(int whole, const elements_compact *c, const uint32_t *numbers,
                                    uint32_t from, uint32_t *to) {
  ELEMENTS_UNROLL
  for (uint32_t p = 0; p < ELEMENTS_SCAN_EACH; p += 4) {
    elements_chunk four = elements_load(4, whole, numbers, from + p, c->cut.parts);
    ELEMENTS_UNROLL
    for (uint32_t j = 0; j < 4; j++) to[p + j] = four.word[j];
  }
}

/* Returns the first part of a thread. */
ELEMENTS_FN uint32_t elements_scan_from(uint32_t warp, uint32_t lane) {
  return (warp * ELEMENTS_WARP + lane) * ELEMENTS_SCAN_EACH;
}
/* Do all of the thread's parts exist? */
ELEMENTS_FN int elements_scan_whole(const elements_compact *c, uint32_t from) {
  return from + ELEMENTS_SCAN_EACH <= c->cut.parts;
}

/* First: each warp scans its parts. */
ELEMENTS_FN void elements_scan_warp(const elements_compact *c, elements_scan_shared *shared,
                                    uint32_t warp, elements_scan *scan) {
  uint64_t count[ELEMENTS_LANES], over[ELEMENTS_LANES];
  uint32_t bad[ELEMENTS_LANES];
  ELEMENTS_EACH(l) {
    const uint32_t from = elements_scan_from(warp, ELEMENTS_LANE(l));
    uint32_t overs[ELEMENTS_SCAN_EACH], bads[ELEMENTS_SCAN_EACH];
    if (elements_scan_whole(c, from)) {
      elements_scan_read(1, c, c->count, from, scan[l].count);
      elements_scan_read(1, c, c->over, from, overs);
      elements_scan_read(1, c, c->bad, from, bads);
    } else {
      elements_scan_read(0, c, c->count, from, scan[l].count);
      elements_scan_read(0, c, c->over, from, overs);
      elements_scan_read(0, c, c->bad, from, bads);
    }
    count[l] = over[l] = 0;
    bad[l] = 0;
    ELEMENTS_UNROLL
    for (uint32_t p = 0; p < ELEMENTS_SCAN_EACH; p++) {
      count[l] += scan[l].count[p];
      over[l] += overs[p];
      bad[l] |= bads[p];
    }
    scan[l].before = 0 - count[l];
  }
  elements_warp_scan_u64(count);
  elements_warp_count(over);
  elements_warp_or(bad, ELEMENTS_WARP);
  ELEMENTS_EACH(l) {
    scan[l].before += count[l];
    if (ELEMENTS_LANE(l) == ELEMENTS_WARP - 1) {
      shared->count[warp] = count[l];
      shared->over[warp] = over[l];
      shared->bad[warp] = bad[l];
    }
  }
}

/* Second: warp 0 scans the warps, and decides. */
ELEMENTS_FN void elements_scan_block(const elements_compact *c, elements_scan_shared *shared) {
  uint64_t count[ELEMENTS_LANES], over[ELEMENTS_LANES];
  uint32_t bad[ELEMENTS_LANES];
  ELEMENTS_EACH(l) {
    uint32_t lane = ELEMENTS_LANE(l);
    count[l] = shared->count[lane];
    over[l] = shared->over[lane];
    bad[l] = shared->bad[lane];
  }
  elements_warp_scan_u64(count);
  elements_warp_count(over);
  elements_warp_or(bad, ELEMENTS_WARP);
  ELEMENTS_EACH(l) {
    uint32_t lane = ELEMENTS_LANE(l);
    shared->count[lane] = count[l];
    if (lane == ELEMENTS_WARP - 1) {
      mlfab_gpu_compacted result;
      result.finite = !bad[l];
      result.kept = bad[l] ? 0 : count[l];
      result.saturated = bad[l] ? 0 : over[l];
      result.done = !bad[l] && count[l] <= c->room;
      *c->result = result;
      *c->verdict = result.done;
    }
  }
}

/* Third: each thread writes the number before its parts. */
ELEMENTS_FN void elements_scan_write(int whole, const elements_compact *c, uint32_t from,
                                     uint64_t before, const elements_scan *scan) {
  ELEMENTS_UNROLL
  for (uint32_t p = 0; p < ELEMENTS_SCAN_EACH; p += 2) {
    elements_chunk two = {{0, 0, 0, 0}};
    elements_put_bits(8, &two, 0, before);
    elements_put_bits(8, &two, 1, before + scan->count[p]);
    elements_store(8, whole, c->before, from + p, c->cut.parts, &two);
    before += (uint64_t)scan->count[p] + scan->count[p + 1];
  }
}

ELEMENTS_FN void elements_scan_end(const elements_compact *c, const elements_scan_shared *shared,
                                   uint32_t warp, const elements_scan *scan) {
  ELEMENTS_EACH(l) {
    const uint32_t from = elements_scan_from(warp, ELEMENTS_LANE(l));
    const uint64_t before = (warp > 0 ? shared->count[warp - 1] : 0) + scan[l].before;
    if (elements_scan_whole(c, from))
      elements_scan_write(1, c, from, before, &scan[l]);
    else
      elements_scan_write(0, c, from, before, &scan[l]);
  }
}

/* ---- compaction: writing the sent elements ---- */

typedef struct elements_emit_shared {
  uint32_t warp[ELEMENTS_WARPS]; /* marks of the tile, by warp */
  union {
    struct {
      uint32_t word[ELEMENTS_COMPACT_WORDS],
          before[ELEMENTS_COMPACT_WORDS]; /* marks of the tile; number of marks before */
    } dense;
    uint16_t sparse[ELEMENTS_COMPACT_TILE]; /* the tile's marked elements, counted from its first */
  } of;
} elements_emit_shared;

/* State of a thread across the barriers of a tile. */
typedef struct elements_emit {
  uint32_t word, before;
} elements_emit;

ELEMENTS_FN int elements_sparse(const elements_compact *c, uint32_t part) {
  uint64_t tiles = elements_end(&c->cut, part) - elements_first(&c->cut, part);
  return c->kept != NULL &&
         (uint64_t)c->count[part] * ELEMENTS_SPARSE < tiles * ELEMENTS_COMPACT_TILE;
}

ELEMENTS_FN elements_number elements_number_of(int dtype, uint64_t bits) {
  elements_number r = {0.0f, 0.0, 0};
  if (dtype == MLFAB_F32)
    r.f32 = elements_f32((uint32_t)bits);
  else if (dtype == MLFAB_F64)
    r.f64 = elements_f64(bits);
  else
    r.i64 = bits;
  return r;
}

/* Sends a as entry k, and returns the rest: 0, or the excess over the largest value. */
ELEMENTS_FN elements_number elements_send(int dtype, const elements_compact *c, elements_number a,
                                          uint64_t i, uint64_t k) {
  elements_number rest = {0.0f, 0.0, 0}, top = elements_number_of(dtype, c->top);
  c->indices[k] = (uint32_t)i;
  if (c->half == MLFAB_HALF_NONE)
    elements_set(elements_width(dtype), c->values, k, elements_bits_of(dtype, a));
  else
    elements_set(
        2, c->values, k,
        elements_half_saturate(c->half, dtype == MLFAB_F32 ? a.f32 : elements_narrow(a.f64)));
  if (elements_magnitude(dtype, a) <= c->top) return rest;
  if (dtype == MLFAB_F32)
    rest.f32 = elements_f32_add(a.f32, a.f32 > 0 ? -top.f32 : top.f32);
  else
    rest.f64 = elements_f64_add(a.f64, a.f64 > 0 ? -top.f64 : top.f64);
  return rest;
}

/* First: each warp reads and scans its words of the tile. */
ELEMENTS_FN void elements_emit_scan(const elements_compact *c, elements_emit_shared *shared,
                                    uint64_t tile, uint32_t warp, elements_emit *emit) {
  uint32_t count[ELEMENTS_LANES];
  ELEMENTS_EACH(l) {
    uint32_t thread = warp * ELEMENTS_WARP + ELEMENTS_LANE(l);
    emit[l].word = c->words[tile * ELEMENTS_COMPACT_WORDS + thread];
    count[l] = elements_bits(emit[l].word);
    emit[l].before = 0u - count[l];
  }
  elements_warp_scan_u32(count);
  ELEMENTS_EACH(l) {
    emit[l].before += count[l];
    if (ELEMENTS_LANE(l) == ELEMENTS_WARP - 1) shared->warp[warp] = count[l];
  }
}

/* Second: each thread computes the number of marked elements before its word in the tile, and writes the data of its
 * word for the third step to shared memory. Returns the number of marked elements in the tile. */
ELEMENTS_FN uint32_t elements_emit_places(int sparse, elements_emit_shared *shared, uint32_t warp,
                                          elements_emit *emit) {
  uint32_t before = 0, all = 0;
  ELEMENTS_UNROLL
  for (uint32_t w = 0; w < ELEMENTS_WARPS; w++) {
    before += w < warp ? shared->warp[w] : 0;
    all += shared->warp[w];
  }
  ELEMENTS_EACH(l) {
    uint32_t thread = warp * ELEMENTS_WARP + ELEMENTS_LANE(l), k = emit[l].before + before;
    if (!sparse) {
      shared->of.dense.word[thread] = emit[l].word;
      shared->of.dense.before[thread] = k;
      continue;
    }
    ELEMENTS_ONCE
    for (uint32_t left = emit[l].word; left; left &= left - 1)
      shared->of.sparse[k++] = (uint16_t)(thread * 32 + elements_lowest(left));
  }
  return all;
}

/* Third, sparse: the threads of the block take the tile's marked elements in turn. The first element goes to entry k. */
ELEMENTS_FN void elements_emit_sparse(int dtype, const elements_compact *c,
                                      const elements_emit_shared *shared, uint64_t tile,
                                      uint32_t thread, uint32_t all, uint64_t k) {
  const uint32_t width = elements_width(dtype);
  ELEMENTS_ONCE
  for (uint32_t q = thread; q < all; q += ELEMENTS_THREADS) {
    uint64_t i = tile * ELEMENTS_COMPACT_TILE + shared->of.sparse[q];
    elements_number a = elements_number_of(dtype, elements_get(width, c->kept, i));
    elements_set(width, c->to, i, elements_bits_of(dtype, elements_send(dtype, c, a, i, k + q)));
  }
}

/* Third, dense: a thread's chunk of a round. */
ELEMENTS_FN void elements_emit_chunk(int dtype, int whole, const elements_compact *c,
                                     const elements_emit_shared *shared, uint64_t tile, uint64_t at,
                                     uint64_t k) {
  const uint32_t width = elements_width(dtype), many = 16u / width;
  const uint32_t in = (uint32_t)(at - tile * ELEMENTS_COMPACT_TILE),
                 word = shared->of.dense.word[in / 32];
  uint32_t marks = word >> (in % 32) & ((1u << many) - 1);
  elements_chunk a;
  if (c->kept) {
    if (!marks) return;
    a = elements_load(width, whole, c->kept, at, c->cut.n);
  } else {
    a = elements_load(width, whole, c->residual, at, c->cut.n);
    elements_chunk g = elements_load(width, whole, c->g, at, c->cut.n);
    a = elements_sum_chunk(dtype, &a, &g);
  }
  k += shared->of.dense.before[in / 32] + elements_bits(word & ((1u << (in % 32)) - 1));
  elements_chunk rest = {{0, 0, 0, 0}};
  ELEMENTS_UNROLL
  for (uint32_t j = 0; j < many; j++) {
    elements_number x = elements_take(dtype, &a, j);
    if (marks >> j & 1) x = elements_send(dtype, c, x, at + j, k++);
    elements_put(dtype, &rest, j, x);
  }
  elements_store(width, whole, c->to, at, c->cut.n, &rest);
}

ELEMENTS_FN void elements_emit_dense(int dtype, const elements_compact *c,
                                     const elements_emit_shared *shared, uint64_t tile,
                                     uint32_t thread, uint64_t k) {
  const uint32_t many = elements_many(dtype),
                 rounds = ELEMENTS_COMPACT_TILE / (ELEMENTS_THREADS * many);
  const int whole = elements_whole(&c->cut, tile);
  ELEMENTS_ONCE
  for (uint32_t round = 0; round < rounds; round++) {
    uint64_t at = elements_at(&c->cut, tile, round, thread, many);
    if (whole)
      elements_emit_chunk(dtype, 1, c, shared, tile, at, k);
    else if (at < c->cut.n)
      elements_emit_chunk(dtype, 0, c, shared, tile, at, k);
  }
}

/* ---- scatter ---- */

#define ELEMENTS_SCATTER_EACH \
  4u /* values of a thread in a tile: their elements are on their way together */
#define ELEMENTS_SCATTER_TILE (ELEMENTS_THREADS * ELEMENTS_SCATTER_EACH)

typedef struct elements_scatter {
  elements_cut cut;
  void *dst;
  const uint32_t *indices;
  const void *values;
  elements_number scale;
  int half;
} elements_scatter;

static inline int elements_scatter_of(elements_scatter *scatter, int dtype, void *dst,
                                      const uint32_t *indices, const void *values, int value_half,
                                      uint64_t n, double scale) {
  uint32_t width = elements_width(dtype), off = 0;
  int aligned;
  if (width < 4 || value_half < MLFAB_HALF_NONE || value_half > MLFAB_HALF_BF16)
    return ELEMENTS_INVALID;
  if (dtype == MLFAB_I64 && value_half != MLFAB_HALF_NONE) return ELEMENTS_INVALID;
  if (n > 0 && (!dst || !indices || !values)) return ELEMENTS_INVALID;
  memset(scatter, 0, sizeof *scatter);
  if (!elements_scalar(dtype, scale, &scatter->scale)) return ELEMENTS_INVALID;
  aligned = elements_aligned(dst, width, &off);
  aligned &= elements_aligned(indices, 4, &off);
  aligned &= elements_aligned(values, value_half == MLFAB_HALF_NONE ? width : 2, &off);
  if (!aligned) return ELEMENTS_MISALIGNED;
  scatter->cut = elements_cut_of(n, ELEMENTS_SCATTER_TILE, off);
  scatter->dst = dst;
  scatter->indices = indices;
  scatter->values = values;
  scatter->half = value_half;
  return 0;
}

ELEMENTS_FN elements_number elements_value(int dtype, const elements_scatter *scatter, uint64_t i) {
  elements_number x = {0.0f, 0.0, 0};
  if (scatter->half == MLFAB_HALF_NONE)
    return elements_number_of(dtype, elements_get(elements_width(dtype), scatter->values, i));
  x.f32 = elements_half_back(scatter->half, (uint16_t)elements_get(2, scatter->values, i));
  x.f64 = elements_f64_of_f32(x.f32);
  return x;
}

ELEMENTS_FN void elements_scatter_thread(int dtype, const elements_scatter *scatter, uint32_t part,
                                         uint32_t thread) {
  const uint32_t width = elements_width(dtype);
  for (uint64_t tile = elements_first(&scatter->cut, part);
       tile < elements_end(&scatter->cut, part); tile++) {
    uint64_t to[ELEMENTS_SCATTER_EACH], old[ELEMENTS_SCATTER_EACH];
    elements_number value[ELEMENTS_SCATTER_EACH];
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < ELEMENTS_SCATTER_EACH; r++) {
      uint64_t i = elements_at(&scatter->cut, tile, r, thread, 1);
      to[r] = 0;
      memset(&value[r], 0, sizeof value[r]);
      if (i >= scatter->cut.n) continue;
      to[r] = scatter->indices[i];
      value[r] = elements_value(dtype, scatter, i);
    }
    /* Comes after all index loads were issued, because these loads wait for them. */
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < ELEMENTS_SCATTER_EACH; r++) {
      uint64_t i = elements_at(&scatter->cut, tile, r, thread, 1);
      old[r] = i < scatter->cut.n ? elements_get(width, scatter->dst, to[r]) : 0;
    }
    ELEMENTS_UNROLL
    for (uint32_t r = 0; r < ELEMENTS_SCATTER_EACH; r++) {
      elements_number now;
      if (elements_at(&scatter->cut, tile, r, thread, 1) >= scatter->cut.n) continue;
      now = elements_axpy(dtype, elements_number_of(dtype, old[r]), scatter->scale, value[r]);
      elements_set(width, scatter->dst, to[r], elements_bits_of(dtype, now));
    }
  }
}

#endif
