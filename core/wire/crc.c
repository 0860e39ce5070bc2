/* crc.c - CRC32C (Castagnoli), of headers, payloads and records. See wire.h.
 *
 * There are three ways to compute it: tables, streams, folds. mlfab__crc32c takes the last that the processor has.
 *
 * Source: RFC 3720 §12.1; Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction",
 * Intel 2011 (three interleaved streams); Gopal et al., "Fast CRC Computation for Generic Polynomials Using
 * PCLMULQDQ Instruction", Intel 2009 (folding). */
#include "codec.h"

/* crc_table[k][i] is the remainder of byte i followed by k zero bytes. A remainder is linear in its bits, so the
 * preprocessor adds the tables from the remainders of the 64 single bits. These are the first 64 states of the shift
 * register that starts at the polynomial. */
#define CRC_AT(i, a, b, c, d, e, f, g, h)                                                   \
  (((i)&128 ? (a) : 0u) ^ ((i)&64 ? (b) : 0u) ^ ((i)&32 ? (c) : 0u) ^ ((i)&16 ? (d) : 0u) ^ \
   ((i)&8 ? (e) : 0u) ^ ((i)&4 ? (f) : 0u) ^ ((i)&2 ? (g) : 0u) ^ ((i)&1 ? (h) : 0u))
#define CRC_4(i, ...)                                                                 \
  CRC_AT(i, __VA_ARGS__), CRC_AT((i) + 1, __VA_ARGS__), CRC_AT((i) + 2, __VA_ARGS__), \
      CRC_AT((i) + 3, __VA_ARGS__)
#define CRC_16(i, ...)                                                             \
  CRC_4(i, __VA_ARGS__), CRC_4((i) + 4, __VA_ARGS__), CRC_4((i) + 8, __VA_ARGS__), \
      CRC_4((i) + 12, __VA_ARGS__)
#define CRC_64(i, ...)                                                                  \
  CRC_16(i, __VA_ARGS__), CRC_16((i) + 16, __VA_ARGS__), CRC_16((i) + 32, __VA_ARGS__), \
      CRC_16((i) + 48, __VA_ARGS__)
#define CRC_256(...)                                                           \
  {                                                                            \
    CRC_64(0, __VA_ARGS__), CRC_64(64, __VA_ARGS__), CRC_64(128, __VA_ARGS__), \
        CRC_64(192, __VA_ARGS__)                                               \
  }

/* clang-format off */
static const uint32_t crc_table[8][256] = {
  CRC_256(0x82f63b78u, 0x417b1dbcu, 0x20bd8edeu, 0x105ec76fu,
               0x8ad958cfu, 0xc79a971fu, 0xe13b70f7u, 0xf26b8303u),
  CRC_256(0xfbc3faf9u, 0xff17c604u, 0x7f8be302u, 0x3fc5f181u,
               0x9d14c3b8u, 0x4e8a61dcu, 0x274530eeu, 0x13a29877u),
  CRC_256(0x8b277743u, 0xc76580d9u, 0xe144fb14u, 0x70a27d8au,
               0x38513ec5u, 0x9edea41au, 0x4f6f520du, 0xa541927eu),
  CRC_256(0x52a0c93fu, 0xaba65fe7u, 0xd725148bu, 0xe964b13du,
               0xf64463e6u, 0x7b2231f3u, 0xbf672381u, 0xdd45aab8u),
  CRC_256(0x6ea2d55cu, 0x37516aaeu, 0x1ba8b557u, 0x8f2261d3u,
               0xc5670b91u, 0xe045beb0u, 0x7022df58u, 0x38116facu),
  CRC_256(0x1c08b7d6u, 0x0e045bebu, 0x85f4168du, 0xc00c303eu,
               0x6006181fu, 0xb2f53777u, 0xdb8ca0c3u, 0xef306b19u),
  CRC_256(0xf56e0ef4u, 0x7ab7077au, 0x3d5b83bdu, 0x9c5bfaa6u,
               0x4e2dfd53u, 0xa5e0c5d1u, 0xd0065990u, 0x68032cc8u),
  CRC_256(0x34019664u, 0x1a00cb32u, 0x0d006599u, 0x847609b4u,
               0x423b04dau, 0x211d826du, 0x9278fa4eu, 0x493c7d27u)};
/* clang-format on */

#undef CRC_AT
#undef CRC_4
#undef CRC_16
#undef CRC_64
#undef CRC_256

/* Eight bytes a step (slicing-by-8, Kounavis and Berry 2005). */
static uint32_t crc_portable(uint32_t crc, const void *data, size_t bytes) {
  const uint8_t *at = data;
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint32_t x = wire_get32(at) ^ crc, y = wire_get32(at + 4);
    crc = crc_table[7][x & 0xff] ^ crc_table[6][x >> 8 & 0xff] ^ crc_table[5][x >> 16 & 0xff] ^
          crc_table[4][x >> 24] ^ crc_table[3][y & 0xff] ^ crc_table[2][y >> 8 & 0xff] ^
          crc_table[1][y >> 16 & 0xff] ^ crc_table[0][y >> 24];
  }
  for (; bytes > 0; bytes--) crc = crc >> 8 ^ crc_table[0][(crc ^ *at++) & 0xff];
  return ~crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Eight bytes at any address. */
typedef uint64_t crc_word __attribute__((aligned(1), may_alias));
#define CRC_WORD(at) (*(const crc_word *)(at))

/* The instruction has a latency of three cycles but starts every cycle, so three streams of equal length
 * run in parallel. The first two remainders are then shifted past the bytes that follow them by a
 * carry-less product with x^(8 * distance - 33); the factor x^33 comes from the product's position in its
 * 64 bits and from the reduction, which the instruction itself does. */
typedef struct crc_stride {
  size_t bytes;      /* of one stream */
  uint32_t two, one; /* the factors for two streams and for one */
} crc_stride;

__attribute__((target("sse4.2,pclmul"))) static uint32_t crc_streams(uint32_t crc,
                                                                     const uint8_t *at,
                                                                     size_t bytes) {
  static const crc_stride strides[] = {{4096, 0x54a86326u, 0x82f89c77u},
                                       {512, 0x170076fau, 0xdd7e3b0cu},
                                       {64, 0x0d3b6092u, 0x9e4addf8u}};
  uint64_t a = ~crc;
  for (size_t i = bytes < 192 ? 3 : 0; i < 3; i++) {
    const crc_stride *s = &strides[i];
    for (; bytes >= 3 * s->bytes; bytes -= 3 * s->bytes, at += 2 * s->bytes) {
      const uint8_t *end = at + s->bytes;
      uint64_t b = 0, c = 0;
      for (; at != end; at += 8) {
        a = _mm_crc32_u64(a, CRC_WORD(at));
        b = _mm_crc32_u64(b, CRC_WORD(at + s->bytes));
        c = _mm_crc32_u64(c, CRC_WORD(at + 2 * s->bytes));
      }
      __m128i moved_a = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)a),
                                             _mm_cvtsi64_si128((long long)s->two), 0);
      __m128i moved_b = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)b),
                                             _mm_cvtsi64_si128((long long)s->one), 0);
      a = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(_mm_xor_si128(moved_a, moved_b))) ^ c;
    }
  }
  for (; bytes >= 8; bytes -= 8, at += 8) a = _mm_crc32_u64(a, CRC_WORD(at));
  for (; bytes > 0; bytes--) a = _mm_crc32_u8((uint32_t)a, *at++);
  return ~(uint32_t)a;
}

/* clang would link its test for the products to a symbol that the libgcc of old systems lacks. */
#if __GNUC__ >= 8 && !defined(__clang__)

enum { CRC_FOLDED = 512 }; /* least bytes for which folding is the faster way */

/* crc_folds keeps sixteen lanes of 128 bits in four registers. A step multiplies each lane by x^distance, and adds the
 * bytes that stand at this distance behind it. The halves of a lane are multiplied separately: the first half by
 * x^(distance + 64). The factors are as above. */
typedef struct crc_fold {
  uint64_t high, low; /* x^(distance + 31), x^(distance - 33) */
} crc_fold;

static const crc_fold crc_by_2048 = {0xdcb17aa4u, 0xb9e02b86u};
static const crc_fold crc_by_512 = {0x740eef02u, 0x9e4addf8u};
static const crc_fold crc_by_128 = {0xf20c0dfeu, 0x493c7d27u};

#define CRC_WIDE __attribute__((target("avx512f,vpclmulqdq,sse4.2,pclmul")))

CRC_WIDE static inline __m512i crc_folded(__m512i lanes, const crc_fold *by, __m512i next) {
  __m512i factors = _mm512_broadcast_i32x4(_mm_set_epi64x((long long)by->low, (long long)by->high));
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, factors, 0x00),
                                   _mm512_clmulepi64_epi128(lanes, factors, 0x11), next, 0x96);
}

/* bytes >= CRC_FOLDED. */
CRC_WIDE static uint32_t crc_folds(uint32_t crc, const uint8_t *at, size_t bytes) {
  __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + 64);
  __m512i c = _mm512_loadu_si512(at + 128), d = _mm512_loadu_si512(at + 192);
  __m128i lanes[4];
  __m512i begin = _mm512_inserti32x4(_mm512_setzero_si512(), _mm_cvtsi32_si128((int)~crc), 0);
  a = _mm512_xor_si512(a, begin);
  for (at += 256, bytes -= 256; bytes >= 256; at += 256, bytes -= 256) {
    a = crc_folded(a, &crc_by_2048, _mm512_loadu_si512(at));
    b = crc_folded(b, &crc_by_2048, _mm512_loadu_si512(at + 64));
    c = crc_folded(c, &crc_by_2048, _mm512_loadu_si512(at + 128));
    d = crc_folded(d, &crc_by_2048, _mm512_loadu_si512(at + 192));
  }
  b = crc_folded(a, &crc_by_512, b);
  c = crc_folded(b, &crc_by_512, c);
  d = crc_folded(c, &crc_by_512, d);
  memcpy(lanes, &d, sizeof lanes);
  __m128i factors = _mm_set_epi64x((long long)crc_by_128.low, (long long)crc_by_128.high);
  for (size_t i = 0; i < 3; i++) {
    __m128i moved = _mm_xor_si128(_mm_clmulepi64_si128(lanes[i], factors, 0x00),
                                  _mm_clmulepi64_si128(lanes[i], factors, 0x11));
    lanes[i + 1] = _mm_xor_si128(lanes[i + 1], moved);
  }
  uint64_t left = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(lanes[3]));
  left = _mm_crc32_u64(left, (uint64_t)_mm_extract_epi64(lanes[3], 1));
  return crc_streams(~(uint32_t)left, at, bytes);
}

#define CRC_HAS_WIDE (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))

#else

enum { CRC_FOLDED = 1 };

static uint32_t crc_folds(uint32_t crc, const uint8_t *at, size_t bytes) {
  return crc_streams(crc, at, bytes);
}

#define CRC_HAS_WIDE 0

#endif

MLFAB__INTERNAL int mlfab__crc32c_level(void) {
  if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return 0;
  return CRC_HAS_WIDE ? 2 : 1;
}

MLFAB__INTERNAL uint32_t mlfab__crc32c_with(int level, uint32_t crc, const void *data,
                                            size_t bytes) {
  if (level == 2 && bytes >= CRC_FOLDED) return crc_folds(crc, data, bytes);
  return level > 0 ? crc_streams(crc, data, bytes) : crc_portable(crc, data, bytes);
}

#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>

MLFAB__INTERNAL int mlfab__crc32c_level(void) { return 1; }

MLFAB__INTERNAL uint32_t mlfab__crc32c_with(int level, uint32_t crc, const void *data,
                                            size_t bytes) {
  const uint8_t *at = data;
  crc = ~crc;
  for (; level > 0 && bytes >= 8; bytes -= 8, at += 8) crc = __crc32cd(crc, wire_get64(at));
  return crc_portable(~crc, at, bytes);
}

#else

MLFAB__INTERNAL int mlfab__crc32c_level(void) { return 0; }

MLFAB__INTERNAL uint32_t mlfab__crc32c_with(int level, uint32_t crc, const void *data,
                                            size_t bytes) {
  (void)level;
  return crc_portable(crc, data, bytes);
}
#endif

MLFAB__INTERNAL uint32_t mlfab__crc32c(uint32_t crc, const void *data, size_t bytes) {
  return mlfab__crc32c_with(mlfab__crc32c_level(), crc, data, bytes);
}
