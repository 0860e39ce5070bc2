/* poly1305.c - Poly1305. See poly1305.h.
 *
 * Numbers modulo 2^130 - 5 have five limbs of 26 bits. Sums of limbs may be a little larger. Every product below has a
 * factor below 2^28 and a factor below 2^29 (r, and r times 5), so a sum of ten products fits 64 bits. The time of all
 * steps depends on the number of bytes only. */
#include "poly1305.h"

#include "blake2b.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define POLY1305_X86 1
#include <immintrin.h>
#else
#define POLY1305_X86 0
#endif

#define POLY1305_LIMB 0x3ffffffu

enum { POLY1305_BLOCK = 16, POLY1305_WIDE = 512 /* least bytes for four blocks at a time */ };

typedef struct poly1305_number {
  uint32_t limb[5];
} poly1305_number;

static inline uint32_t poly1305_load(const uint8_t *at) {
  return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Sixteen bytes, little-endian, and 2^128 if `whole`. */
static inline poly1305_number poly1305_read(const uint8_t *at, uint32_t whole) {
  uint64_t a = poly1305_load(at), b = poly1305_load(at + 4), c = poly1305_load(at + 8),
           d = poly1305_load(at + 12);
  uint64_t low = a | b << 32, high = c | d << 32;
  return (poly1305_number){{(uint32_t)low & POLY1305_LIMB, (uint32_t)(low >> 26) & POLY1305_LIMB,
                            (uint32_t)(low >> 52 | high << 12) & POLY1305_LIMB,
                            (uint32_t)(high >> 14) & POLY1305_LIMB,
                            (uint32_t)(high >> 40) | whole << 24}};
}

/* Carries the bits above 26 of each limb to the next limb. The last limb carries to the first, times 5: 2^130 = 5. */
static inline poly1305_number poly1305_carried(const uint64_t sum[5]) {
  uint64_t a = sum[0], b = sum[1] + (a >> 26), c = sum[2] + (b >> 26), d = sum[3] + (c >> 26);
  uint64_t e = sum[4] + (d >> 26), back = (a & POLY1305_LIMB) + 5 * (e >> 26);
  return (poly1305_number){
      {(uint32_t)back & POLY1305_LIMB, ((uint32_t)b & POLY1305_LIMB) + (uint32_t)(back >> 26),
       (uint32_t)c & POLY1305_LIMB, (uint32_t)d & POLY1305_LIMB, (uint32_t)e & POLY1305_LIMB}};
}

/* One limb of a product: the factors of h, from the highest limb of r down. Beyond the lowest: times 5. */
#define POLY1305_LIMB_OF(r0, r1, r2, r3, r4)                                                 \
  ((uint64_t)h->limb[0] * (r0) + (uint64_t)h->limb[1] * (r1) + (uint64_t)h->limb[2] * (r2) + \
   (uint64_t)h->limb[3] * (r3) + (uint64_t)h->limb[4] * (r4))

static inline poly1305_number poly1305_product(const poly1305_number *h, const poly1305_number *r) {
  uint32_t a = r->limb[0], b = r->limb[1], c = r->limb[2], d = r->limb[3], e = r->limb[4];
  uint32_t b5 = 5 * b, c5 = 5 * c, d5 = 5 * d, e5 = 5 * e;
  const uint64_t sum[5] = {POLY1305_LIMB_OF(a, e5, d5, c5, b5), POLY1305_LIMB_OF(b, a, e5, d5, c5),
                           POLY1305_LIMB_OF(c, b, a, e5, d5), POLY1305_LIMB_OF(d, c, b, a, e5),
                           POLY1305_LIMB_OF(e, d, c, b, a)};
  return poly1305_carried(sum);
}

#undef POLY1305_LIMB_OF

static void poly1305_blocks(poly1305_number *sum, const poly1305_number *r, const uint8_t *at,
                            size_t bytes, uint32_t whole) {
  poly1305_number h = *sum;
  for (; bytes >= POLY1305_BLOCK; bytes -= POLY1305_BLOCK, at += POLY1305_BLOCK) {
    poly1305_number next = poly1305_read(at, whole);
    h.limb[0] += next.limb[0];
    h.limb[1] += next.limb[1];
    h.limb[2] += next.limb[2];
    h.limb[3] += next.limb[3];
    h.limb[4] += next.limb[4];
    h = poly1305_product(&h, r);
  }
  *sum = h;
}

#if POLY1305_X86

#define POLY1305_AVX2 __attribute__((target("avx2")))
/* Otherwise gcc calls these functions, with all lanes in memory. */
#define POLY1305_INLINE __attribute__((target("avx2"), always_inline)) static inline

typedef struct poly1305_four { /* a number in each of four lanes */
  __m256i limb[5];
} poly1305_four;

typedef struct poly1305_factor { /* and the same times 5, for the higher limbs */
  __m256i limb[5], five[5];
} poly1305_factor;

typedef struct poly1305_powers { /* of r; wiped after use */
  poly1305_number r2, r3, r4, r8;
  poly1305_factor by4, by8, last;
} poly1305_powers;

/* The lanes are those of the blocks 0, 2, 1 and 3. */
POLY1305_INLINE poly1305_four poly1305_read4(const uint8_t *at) {
  const __m256i limb = _mm256_set1_epi64x(POLY1305_LIMB);
  __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)at);
  __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(at + 32));
  __m256i low = _mm256_unpacklo_epi64(a, b), high = _mm256_unpackhi_epi64(a, b);
  __m256i middle = _mm256_or_si256(_mm256_srli_epi64(low, 52), _mm256_slli_epi64(high, 12));
  __m256i top = _mm256_or_si256(_mm256_srli_epi64(high, 40), _mm256_set1_epi64x(1 << 24));
  return (poly1305_four){
      {_mm256_and_si256(low, limb), _mm256_and_si256(_mm256_srli_epi64(low, 26), limb),
       _mm256_and_si256(middle, limb), _mm256_and_si256(_mm256_srli_epi64(high, 14), limb), top}};
}

POLY1305_INLINE poly1305_four poly1305_plus4(poly1305_four a, poly1305_four b) {
  return (poly1305_four){
      {_mm256_add_epi64(a.limb[0], b.limb[0]), _mm256_add_epi64(a.limb[1], b.limb[1]),
       _mm256_add_epi64(a.limb[2], b.limb[2]), _mm256_add_epi64(a.limb[3], b.limb[3]),
       _mm256_add_epi64(a.limb[4], b.limb[4])}};
}

/* Lane by lane, without carries: two such products may be added. */
#define POLY1305_MUL(i, j) \
  _mm256_mul_epu32(h.limb[j], (j) <= (i) ? r->limb[(i) - (j)] : r->five[5 + (i) - (j)])
#define POLY1305_SUM(i)                                                                        \
  _mm256_add_epi64(_mm256_add_epi64(_mm256_add_epi64(POLY1305_MUL(i, 0), POLY1305_MUL(i, 1)),  \
                                    _mm256_add_epi64(POLY1305_MUL(i, 2), POLY1305_MUL(i, 3))), \
                   POLY1305_MUL(i, 4))

POLY1305_INLINE poly1305_four poly1305_times4(poly1305_four h, const poly1305_factor *r) {
  return (poly1305_four){
      {POLY1305_SUM(0), POLY1305_SUM(1), POLY1305_SUM(2), POLY1305_SUM(3), POLY1305_SUM(4)}};
}

#undef POLY1305_MUL
#undef POLY1305_SUM

/* Moves the bits above 26 from a limb to another limb. */
#define POLY1305_CARRY(from, to)                                    \
  do {                                                              \
    __m256i above = _mm256_srli_epi64(n.limb[from], 26);            \
    n.limb[from] = _mm256_and_si256(n.limb[from], limb);            \
    if ((from) == 4) /* times 5 */                                  \
      above = _mm256_add_epi64(above, _mm256_slli_epi64(above, 2)); \
    n.limb[to] = _mm256_add_epi64(n.limb[to], above);               \
  } while (0)

/* Two chains of carries, which the processor runs in parallel. */
POLY1305_INLINE poly1305_four poly1305_carry4(poly1305_four n) {
  const __m256i limb = _mm256_set1_epi64x(POLY1305_LIMB);
  POLY1305_CARRY(0, 1);
  POLY1305_CARRY(3, 4);
  POLY1305_CARRY(1, 2);
  POLY1305_CARRY(4, 0);
  POLY1305_CARRY(2, 3);
  POLY1305_CARRY(0, 1);
  POLY1305_CARRY(3, 4);
  return n;
}

#undef POLY1305_CARRY

POLY1305_AVX2 static poly1305_factor poly1305_factor4(const poly1305_number *a,
                                                      const poly1305_number *b,
                                                      const poly1305_number *c,
                                                      const poly1305_number *d) {
  poly1305_factor f;
  for (int i = 0; i < 5; i++) {
    f.limb[i] = _mm256_set_epi64x(d->limb[i], c->limb[i], b->limb[i], a->limb[i]);
    f.five[i] = _mm256_mul_epu32(f.limb[i], _mm256_set1_epi64x(5));
  }
  return f;
}

/* Each of four lanes sums every fourth block, and multiplies by r^4 after each block. In the end the lanes are
 * multiplied by r^4 to r, and so add up to one sum. `bytes` is a positive multiple of 64. */
POLY1305_AVX2 static poly1305_number poly1305_wide(const poly1305_number *r, const uint8_t *at,
                                                   size_t bytes) {
  poly1305_powers k;
  k.r2 = poly1305_product(r, r);
  k.r3 = poly1305_product(&k.r2, r);
  k.r4 = poly1305_product(&k.r2, &k.r2);
  k.r8 = poly1305_product(&k.r4, &k.r4);
  k.by4 = poly1305_factor4(&k.r4, &k.r4, &k.r4, &k.r4);
  k.by8 = poly1305_factor4(&k.r8, &k.r8, &k.r8, &k.r8);
  k.last = poly1305_factor4(&k.r4, &k.r2, &k.r3, r);
  poly1305_four sum = {{_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                        _mm256_setzero_si256(), _mm256_setzero_si256()}};
  for (; bytes > 128; bytes -= 128, at += 128) {
    poly1305_four first = poly1305_times4(poly1305_plus4(sum, poly1305_read4(at)), &k.by8);
    poly1305_four second = poly1305_times4(poly1305_read4(at + 64), &k.by4);
    sum = poly1305_carry4(poly1305_plus4(first, second));
  }
  for (; bytes > 0; bytes -= 64, at += 64) {
    sum = poly1305_plus4(sum, poly1305_read4(at));
    sum = poly1305_carry4(poly1305_times4(sum, bytes > 64 ? &k.by4 : &k.last));
  }
  uint64_t total[5];
  for (int i = 0; i < 5; i++) {
    uint64_t lanes[4];
    memcpy(lanes, &sum.limb[i], sizeof lanes);
    total[i] = lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }
  mlfab__wipe(&k, sizeof k);
  return poly1305_carried(total);
}

MLFAB__INTERNAL int mlfab__poly1305_level(void) { return __builtin_cpu_supports("avx2") != 0; }

#else

static poly1305_number poly1305_wide(const poly1305_number *r, const uint8_t *at, size_t bytes) {
  poly1305_number h = {{0}};
  poly1305_blocks(&h, r, at, bytes, 1);
  return h;
}

MLFAB__INTERNAL int mlfab__poly1305_level(void) { return 0; }

#endif

/* Writes the tag: the sum modulo 2^130 - 5, plus s, modulo 2^128. */
static void poly1305_end(const poly1305_number *h, const uint8_t *s, uint8_t *tag) {
  uint64_t sum[5], less[5], carry = 5, word = 0;
  for (int i = 0; i < 5; i++) sum[i] = h->limb[i];
  poly1305_number n = poly1305_carried(sum);
  for (int i = 0; i < 5; i++) sum[i] = n.limb[i];
  n = poly1305_carried(sum); /* all limbs below 2^26 now */
  for (int i = 0; i < 5; i++) {
    carry += n.limb[i];
    less[i] = carry & POLY1305_LIMB;
    carry >>= 26;
  }
  uint64_t keep = carry - 1; /* all ones when the number is below 2^130 - 5 */
  for (int i = 0; i < 5; i++) sum[i] = (n.limb[i] & keep) | (less[i] & ~keep);
  uint64_t low = sum[0] | sum[1] << 26 | sum[2] << 52;
  uint64_t high = sum[2] >> 12 | sum[3] << 14 | sum[4] << 40;
  for (int i = 0; i < 4; i++) {
    uint64_t part = (i < 2 ? low : high) >> (32 * (i % 2)) & UINT32_MAX;
    word = (word >> 32) + part + poly1305_load(s + 4 * i);
    for (int k = 0; k < 4; k++) tag[4 * i + k] = (uint8_t)(word >> 8 * k);
  }
}

MLFAB__INTERNAL void mlfab__poly1305_with(int level, const uint8_t key[MLFAB__POLY1305_KEY],
                                          const void *data, size_t bytes,
                                          uint8_t tag[MLFAB__POLY1305_TAG]) {
  const uint8_t *at = data;
  uint8_t masked[POLY1305_BLOCK], last[POLY1305_BLOCK] = {0};
  poly1305_number h = {{0}}, r;
  size_t rest = bytes % POLY1305_BLOCK;
  size_t wide = level == 0 || bytes < POLY1305_WIDE ? 0 : bytes - bytes % 64;
  memcpy(masked, key, sizeof masked);
  for (int i = 3; i < POLY1305_BLOCK; i += 4) masked[i] &= 15;
  for (int i = 4; i < POLY1305_BLOCK; i += 4) masked[i] &= 252;
  r = poly1305_read(masked, 0);
  if (wide > 0) h = poly1305_wide(&r, at, wide);
  poly1305_blocks(&h, &r, at + wide, bytes - wide - rest, 1);
  if (rest > 0) {
    memcpy(last, at + bytes - rest, rest);
    last[rest] = 1;
    poly1305_blocks(&h, &r, last, sizeof last, 0);
  }
  poly1305_end(&h, key + POLY1305_BLOCK, tag);
  mlfab__wipe(masked, sizeof masked);
  mlfab__wipe(&r, sizeof r);
}

MLFAB__INTERNAL void mlfab__poly1305(const uint8_t key[MLFAB__POLY1305_KEY], const void *data,
                                     size_t bytes, uint8_t tag[MLFAB__POLY1305_TAG]) {
  mlfab__poly1305_with(mlfab__poly1305_level(), key, data, bytes, tag);
}
