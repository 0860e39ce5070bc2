/* blake2b.c - BLAKE2b with a key. See blake2b.h. Source: RFC 7693 §3. */
#include "blake2b.h"

static const uint64_t blake2b_iv[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};

MLFAB__INTERNAL void mlfab__wipe(void *memory, size_t bytes) {
#if defined(__GNUC__) || defined(__clang__)
  memset(memory, 0, bytes);
  __asm__ volatile("" : : "r"(memory) : "memory"); /* forces the writes: it may read them */
#else
  volatile uint8_t *at = memory;
  while (bytes-- > 0) *at++ = 0;
#endif
}

MLFAB__INTERNAL int mlfab__same_secret(const void *a, const void *b, size_t bytes) {
  const uint8_t *x = a, *y = b;
  volatile uint8_t differ = 0;
  for (size_t i = 0; i < bytes; i++) differ = (uint8_t)(differ | (x[i] ^ y[i]));
  return differ == 0;
}

static inline uint64_t blake2b_load(const uint8_t *at) {
  uint64_t x;
  memcpy(&x, at, sizeof x);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  x = __builtin_bswap64(x);
#endif
  return x;
}

static inline uint64_t blake2b_rotate(uint64_t x, unsigned n) { return x >> n | x << (64 - n); }

/* One of the four mixings of half a round. All indexes are constants, so that v stays in registers. */
#define BLAKE2B_G(a, b, c, d, x, y) \
  do {                              \
    a = a + b + (x);                \
    d = blake2b_rotate(d ^ a, 32);  \
    c = c + d;                      \
    b = blake2b_rotate(b ^ c, 24);  \
    a = a + b + (y);                \
    d = blake2b_rotate(d ^ a, 16);  \
    c = c + d;                      \
    b = blake2b_rotate(b ^ c, 63);  \
  } while (0)

#define BLAKE2B_ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, sa, sb, sc, sd, se, sf) \
  do {                                                                                \
    BLAKE2B_G(v0, v4, v8, vc, m[s0], m[s1]);                                          \
    BLAKE2B_G(v1, v5, v9, vd, m[s2], m[s3]);                                          \
    BLAKE2B_G(v2, v6, va, ve, m[s4], m[s5]);                                          \
    BLAKE2B_G(v3, v7, vb, vf, m[s6], m[s7]);                                          \
    BLAKE2B_G(v0, v5, va, vf, m[s8], m[s9]);                                          \
    BLAKE2B_G(v1, v6, vb, vc, m[sa], m[sb]);                                          \
    BLAKE2B_G(v2, v7, v8, vd, m[sc], m[sd]);                                          \
    BLAKE2B_G(v3, v4, v9, ve, m[se], m[sf]);                                          \
  } while (0)

/* Hashes one block; t: bytes up to its end; last: all ones for the last block, else 0. */
static void blake2b_block(uint64_t h[8], const uint8_t *block, uint64_t t, uint64_t last) {
  uint64_t m[16];
  for (int i = 0; i < 16; i++) m[i] = blake2b_load(block + 8 * i);
  uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
  uint64_t v8 = blake2b_iv[0], v9 = blake2b_iv[1], va = blake2b_iv[2], vb = blake2b_iv[3];
  uint64_t vc = blake2b_iv[4] ^ t, vd = blake2b_iv[5];
  uint64_t ve = blake2b_iv[6] ^ last, vf = blake2b_iv[7];
  BLAKE2B_ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  BLAKE2B_ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
  BLAKE2B_ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
  BLAKE2B_ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
  BLAKE2B_ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
  BLAKE2B_ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
  BLAKE2B_ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
  BLAKE2B_ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
  BLAKE2B_ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
  BLAKE2B_ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
  BLAKE2B_ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  BLAKE2B_ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
  h[0] ^= v0 ^ v8;
  h[1] ^= v1 ^ v9;
  h[2] ^= v2 ^ va;
  h[3] ^= v3 ^ vb;
  h[4] ^= v4 ^ vc;
  h[5] ^= v5 ^ vd;
  h[6] ^= v6 ^ ve;
  h[7] ^= v7 ^ vf;
}

MLFAB__INTERNAL void mlfab__blake2b_begin(mlfab__blake2b *s, uint32_t digest_bytes, const void *key,
                                          uint32_t key_bytes) {
  assert(digest_bytes >= 1 && digest_bytes <= MLFAB__BLAKE2B_MAX &&
         key_bytes <= MLFAB__BLAKE2B_MAX);
  memcpy(s->h, blake2b_iv, sizeof s->h);
  s->h[0] ^= 0x01010000u ^ (uint64_t)key_bytes << 8 ^ digest_bytes;
  s->bytes = 0;
  s->held = 0;
  s->digest_bytes = digest_bytes;
  if (key_bytes == 0) return;
  memset(s->block, 0, sizeof s->block);
  memcpy(s->block, key, key_bytes);
  s->held = MLFAB__BLAKE2B_BLOCK;
}

/* Keeps the last block, full or not, because only `end` knows that it is the last. */
MLFAB__INTERNAL void mlfab__blake2b_add(mlfab__blake2b *s, const void *data, size_t bytes) {
  const uint8_t *at = data;
  while (bytes > 0) {
    if (s->held == MLFAB__BLAKE2B_BLOCK) {
      s->bytes += MLFAB__BLAKE2B_BLOCK;
      blake2b_block(s->h, s->block, s->bytes, 0);
      s->held = 0;
    }
    while (s->held == 0 && bytes > MLFAB__BLAKE2B_BLOCK) {
      s->bytes += MLFAB__BLAKE2B_BLOCK;
      blake2b_block(s->h, at, s->bytes, 0);
      at += MLFAB__BLAKE2B_BLOCK;
      bytes -= MLFAB__BLAKE2B_BLOCK;
    }
    size_t n = mlfab__min(bytes, MLFAB__BLAKE2B_BLOCK - s->held);
    memcpy(s->block + s->held, at, n);
    s->held += (uint32_t)n;
    at += n;
    bytes -= n;
  }
}

MLFAB__INTERNAL void mlfab__blake2b_end(mlfab__blake2b *s, void *digest) {
  uint8_t out[MLFAB__BLAKE2B_MAX];
  memset(s->block + s->held, 0, MLFAB__BLAKE2B_BLOCK - s->held);
  blake2b_block(s->h, s->block, s->bytes + s->held, UINT64_MAX);
  for (int i = 0; i < 64; i++) out[i] = (uint8_t)(s->h[i / 8] >> 8 * (i % 8));
  memcpy(digest, out, s->digest_bytes);
  mlfab__wipe(out, sizeof out);
  mlfab__wipe(s, sizeof *s);
}

MLFAB__INTERNAL void mlfab__blake2b_prepare(uint64_t h[8], uint32_t digest_bytes, const void *key,
                                            uint32_t key_bytes) {
  mlfab__blake2b s;
  mlfab__blake2b_begin(&s, digest_bytes, key, key_bytes);
  blake2b_block(s.h, s.block, MLFAB__BLAKE2B_BLOCK, 0);
  memcpy(h, s.h, sizeof s.h);
  mlfab__wipe(&s, sizeof s);
}

MLFAB__INTERNAL void mlfab__blake2b_resume(mlfab__blake2b *s, const uint64_t h[8],
                                           uint32_t digest_bytes) {
  memcpy(s->h, h, sizeof s->h);
  s->bytes = MLFAB__BLAKE2B_BLOCK;
  s->held = 0;
  s->digest_bytes = digest_bytes;
}
