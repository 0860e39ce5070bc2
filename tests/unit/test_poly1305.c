/* test_poly1305.c - Poly1305 against the vectors of RFC 8439, a literal implementation, and libsodium where there is one. */
#include "core/keys/poly1305.h"
#include "core/base/rng.h"

#include <dlfcn.h>
#include "../testing.h"

/* --- by the book: numbers of 17 bytes, products digit by digit --- */

static void book_carry(uint32_t h[17]) {
  uint32_t carry = 0;
  for (int pass = 0; pass < 2; pass++) {
    for (int i = 0; i < 16; i++) {
      carry += h[i];
      h[i] = carry & 255;
      carry >>= 8;
    }
    carry += h[16];
    h[16] = carry & 3;
    carry = 5 * (carry >> 2); /* 2^130 = 5 */
  }
  h[0] += carry;
}

static void book(const uint8_t key[32], const uint8_t *data, size_t bytes, uint8_t tag[16]) {
  uint32_t h[17] = {0}, r[17] = {0}, g[17], carry = 5;
  for (int i = 0; i < 16; i++) r[i] = key[i];
  for (int i = 3; i < 16; i += 4) r[i] &= 15;
  for (int i = 4; i < 16; i += 4) r[i] &= 252;
  while (bytes > 0) {
    size_t n = mlfab__min(bytes, 16);
    uint32_t product[17] = {0};
    for (size_t i = 0; i < n; i++) h[i] += data[i];
    h[n] += 1;
    data += n;
    bytes -= n;
    book_carry(h);
    /* 2^136 = 5 * 2^6 */
    for (int i = 0; i < 17; i++) {
      for (int j = 0; j < 17; j++) product[(i + j) % 17] += h[i] * r[j] * (i + j < 17 ? 1 : 320);
      book_carry(product);
    }
    memcpy(h, product, sizeof h);
  }
  book_carry(h);
  book_carry(h);
  for (int i = 0; i < 17; i++) { /* h - p, by adding 5 and dropping 2^130 */
    carry += h[i];
    g[i] = i < 16 ? carry & 255 : carry;
    carry >>= 8;
  }
  if (g[16] >= 4) memcpy(h, g, sizeof h);
  carry = 0;
  for (int i = 0; i < 16; i++) {
    carry += h[i] + key[16 + i];
    tag[i] = (uint8_t)carry;
    carry >>= 8;
  }
}

static void check(const uint8_t key[32], const uint8_t *data, size_t bytes, const uint8_t *wanted) {
  uint8_t tag[16];
  for (int level = 0; level <= mlfab__poly1305_level(); level++) {
    mlfab__poly1305_with(level, key, data, bytes, tag);
    assert_memory_equal(tag, wanted, sizeof tag);
  }
  mlfab__poly1305(key, data, bytes, tag);
  assert_memory_equal(tag, wanted, sizeof tag);
}

/* --- the tests --- */

/* RFC 8439 §2.5.2, and from appendix A.3 those that try carries: numbers 7 to 11. */
TEST(test_rfc) {
  static const uint8_t text_key[32] = {0x85, 0xd6, 0xbe, 0x78, 0x57, 0x55, 0x6d, 0x33,
                                       0x7f, 0x44, 0x52, 0xfe, 0x42, 0xd5, 0x06, 0xa8,
                                       0x01, 0x03, 0x80, 0x8a, 0xfb, 0x0d, 0xb2, 0xfd,
                                       0x4a, 0xbf, 0xf6, 0xaf, 0x41, 0x49, 0xf5, 0x1b};
  static const uint8_t text_tag[16] = {0xa8, 0x06, 0x1d, 0xc1, 0x30, 0x51, 0x36, 0xc6,
                                       0xc2, 0x2b, 0x8b, 0xaf, 0x0c, 0x01, 0x27, 0xa9};
  static const struct {
    uint8_t r, s; /* their first bytes; s_all: the others of s */
    uint8_t s_all, tag;
    size_t bytes;
    uint8_t data[48];
  } cases[] = {
      {2,
       0,
       0,
       3,
       16,
       {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255}},
      {2, 255, 255, 3, 16, {2}},
      {1, 0, 0, 5, 48, {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
                        255, 255, 255, 255, 255, 240, 255, 255, 255, 255, 255,
                        255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 17}},
      {1, 0, 0, 0, 48, {255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
                        255, 255, 255, 255, 251, 254, 254, 254, 254, 254, 254, 254,
                        254, 254, 254, 254, 254, 254, 254, 254, 1,   1,   1,   1,
                        1,   1,   1,   1,   1,   1,   1,   1,   1,   1,   1,   1}},
  };
  check(text_key, (const uint8_t *)"Cryptographic Forum Research Group", 34, text_tag);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    uint8_t key[32] = {cases[i].r}, tag[16] = {cases[i].tag}, own[16];
    memset(key + 16, cases[i].s_all, 16);
    key[16] = cases[i].s;
    check(key, cases[i].data, cases[i].bytes, tag);
    book(key, cases[i].data, cases[i].bytes, own);
    assert_memory_equal(own, tag, sizeof tag);
  }
}

TEST(test_book) {
  static uint8_t data[5000];
  uint8_t key[32], wanted[16];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 3);
  for (size_t round = 0; round < 4000; round++) {
    size_t n = round < 1400 ? round : (size_t)mlfab__rng_below(&prng, sizeof data - 8);
    uint8_t *at = data + mlfab__rng_below(&prng, 8);
    int ones = round % 5 == 0; /* the largest numbers, for the carries */
    for (size_t i = 0; i < n; i++) at[i] = ones ? 255 : (uint8_t)mlfab__rng_next(&prng);
    for (size_t i = 0; i < sizeof key; i++)
      key[i] = ones && round % 10 == 0 ? 255 : (uint8_t)mlfab__rng_next(&prng);
    book(key, at, n, wanted);
    check(key, at, n, wanted);
  }
}

typedef int sodium_once(unsigned char *, const unsigned char *, unsigned long long,
                        const unsigned char *);

TEST(test_sodium) {
  void *library = dlopen("libsodium.so.23", RTLD_NOW);
  static uint8_t data[300000];
  uint8_t key[32], wanted[16];
  mlfab__rng prng;
  if (!library) library = dlopen("libsodium.so", RTLD_NOW);
  if (!library) skip();
  sodium_once *once;
  void *found = dlsym(library, "crypto_onetimeauth");
  assert_non_null(found);
  memcpy(&once, &found, sizeof once);
  mlfab__rng_seed(&prng, 4);
  for (size_t i = 0; i < sizeof data; i++) data[i] = (uint8_t)mlfab__rng_next(&prng);
  for (int round = 0; round < 300; round++) {
    size_t n = (size_t)mlfab__rng_below(&prng, round % 10 ? 5000 : sizeof data);
    for (size_t i = 0; i < sizeof key; i++) key[i] = (uint8_t)mlfab__rng_next(&prng);
    assert_int_equal(once(wanted, data, n, key), 0);
    check(key, data, n, wanted);
  }
  dlclose(library);
}

TESTS(NULL, NULL)
