/* test_blake2b.c - BLAKE2b against the vectors of RFC 7693, and against libsodium where there is one. */
#include "core/keys/blake2b.h"
#include "core/base/rng.h"

#include <dlfcn.h>
#include "../testing.h"

static void digest(uint8_t *out, uint32_t bytes, const void *key, uint32_t key_bytes,
                   const uint8_t *data, size_t n, size_t piece) {
  mlfab__blake2b s;
  mlfab__blake2b_begin(&s, bytes, key, key_bytes);
  for (size_t at = 0; at < n; at += piece)
    mlfab__blake2b_add(&s, data + at, mlfab__min(piece, n - at));
  mlfab__blake2b_end(&s, out);
  for (size_t i = 0; i < sizeof s; i++) assert_int_equal(((uint8_t *)&s)[i], 0);
}

/* RFC 7693, Appendix A. */
TEST(test_abc) {
  static const uint8_t wanted[64] = {
      0xba, 0x80, 0xa5, 0x3f, 0x98, 0x1c, 0x4d, 0x0d, 0x6a, 0x27, 0x97, 0xb6, 0x9f,
      0x12, 0xf6, 0xe9, 0x4c, 0x21, 0x2f, 0x14, 0x68, 0x5a, 0xc4, 0xb7, 0x4b, 0x12,
      0xbb, 0x6f, 0xdb, 0xff, 0xa2, 0xd1, 0x7d, 0x87, 0xc5, 0x39, 0x2a, 0xab, 0x79,
      0x2d, 0xc2, 0x52, 0xd5, 0xde, 0x45, 0x33, 0xcc, 0x95, 0x18, 0xd3, 0x8a, 0xa8,
      0xdb, 0xf1, 0x92, 0x5a, 0xb9, 0x23, 0x86, 0xed, 0xd4, 0x00, 0x99, 0x23};
  uint8_t out[64];
  digest(out, 64, NULL, 0, (const uint8_t *)"abc", 3, 3);
  assert_memory_equal(out, wanted, 64);
}

/* The deterministic sequences of RFC 7693, Appendix E. */
static void selftest_seq(uint8_t *out, size_t bytes, uint32_t seed) {
  uint32_t a = 0xdead4badu * seed, b = 1;
  for (size_t i = 0; i < bytes; i++) {
    uint32_t t = a + b;
    a = b;
    b = t;
    out[i] = (uint8_t)(t >> 24);
  }
}

TEST(test_rfc) {
  static const uint8_t wanted[32] = {0xc2, 0x3a, 0x78, 0x00, 0xd9, 0x81, 0x23, 0xbd,
                                     0x10, 0xf5, 0x06, 0xc6, 0x1e, 0x29, 0xda, 0x56,
                                     0x03, 0xd7, 0x63, 0xb8, 0xbb, 0xad, 0x2e, 0x73,
                                     0x7f, 0x5e, 0x76, 0x5a, 0x7b, 0xcc, 0xd4, 0x75};
  static const uint32_t digests[4] = {20, 32, 48, 64};
  static const size_t lengths[6] = {0, 3, 128, 129, 255, 1024};
  uint8_t in[1024], md[64], key[64];
  mlfab__blake2b all;
  mlfab__blake2b_begin(&all, 32, NULL, 0);
  for (int i = 0; i < 4; i++) {
    for (int j = 0; j < 6; j++) {
      selftest_seq(in, lengths[j], (uint32_t)lengths[j]);
      digest(md, digests[i], NULL, 0, in, lengths[j], lengths[j] + 1);
      mlfab__blake2b_add(&all, md, digests[i]);
      selftest_seq(key, digests[i], digests[i]);
      digest(md, digests[i], key, digests[i], in, lengths[j], lengths[j] + 1);
      mlfab__blake2b_add(&all, md, digests[i]);
    }
  }
  mlfab__blake2b_end(&all, md);
  assert_memory_equal(md, wanted, sizeof wanted);
}

/* In pieces, and from a prepared state, the digest is the same. */
TEST(test_pieces) {
  uint8_t data[1000], key[64], one[64], other[64];
  uint64_t h[8];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 1);
  for (int round = 0; round < 500; round++) {
    size_t n = 1 + (size_t)mlfab__rng_below(&prng, sizeof data - 1);
    for (size_t i = 0; i < n; i++) data[i] = (uint8_t)mlfab__rng_next(&prng);
    for (size_t i = 0; i < 64; i++) key[i] = (uint8_t)mlfab__rng_next(&prng);
    uint32_t bytes = 1 + (uint32_t)mlfab__rng_below(&prng, 64);
    digest(one, bytes, key, 64, data, n, n);
    digest(other, bytes, key, 64, data, n, 1 + (size_t)mlfab__rng_below(&prng, 200));
    assert_memory_equal(one, other, bytes);
    mlfab__blake2b s;
    mlfab__blake2b_prepare(h, bytes, key, 64);
    mlfab__blake2b_resume(&s, h, bytes);
    mlfab__blake2b_add(&s, data, n);
    mlfab__blake2b_end(&s, other);
    assert_memory_equal(one, other, bytes);
  }
}

typedef int sodium_hash(unsigned char *, size_t, const unsigned char *, unsigned long long,
                        const unsigned char *, size_t);

TEST(test_sodium) {
  void *library = dlopen("libsodium.so.23", RTLD_NOW);
  uint8_t data[1200], key[64], ours[64], theirs[64];
  mlfab__rng prng;
  if (!library) library = dlopen("libsodium.so", RTLD_NOW);
  if (!library) skip();
  sodium_hash *hash;
  void *found = dlsym(library, "crypto_generichash");
  assert_non_null(found);
  memcpy(&hash, &found, sizeof hash);
  mlfab__rng_seed(&prng, 2);
  for (int round = 0; round < 2000; round++) {
    size_t n = round < 600 ? (size_t)round : (size_t)mlfab__rng_below(&prng, sizeof data);
    uint32_t bytes = 16 + (uint32_t)mlfab__rng_below(&prng, 49); /* libsodium's limits */
    uint32_t key_bytes = round % 3 ? 16 + (uint32_t)mlfab__rng_below(&prng, 49) : 0;
    for (size_t i = 0; i < n; i++) data[i] = (uint8_t)mlfab__rng_next(&prng);
    for (size_t i = 0; i < 64; i++) key[i] = (uint8_t)mlfab__rng_next(&prng);
    digest(ours, bytes, key, key_bytes, data, n, n + 1);
    assert_int_equal(hash(theirs, bytes, data, n, key_bytes ? key : NULL, key_bytes), 0);
    assert_memory_equal(ours, theirs, bytes);
  }
  dlclose(library);
}

TEST(test_compare) {
  uint8_t a[16] = {0}, b[16] = {0};
  assert_true(mlfab__same_secret(a, b, 16));
  for (int bit = 0; bit < 128; bit++) {
    b[bit / 8] ^= (uint8_t)(1 << bit % 8);
    assert_false(mlfab__same_secret(a, b, 16));
    b[bit / 8] ^= (uint8_t)(1 << bit % 8);
  }
}

TESTS(NULL, NULL)
