/* test_packet.c - packets are written, read back and compared with plain arrays, in every form, type and
 * grain; malformed packets are refused. MLFAB_SEED=n runs one random case alone, MLFAB_SCALE=100 a hundred
 * times as many. */
#include "core/kernels/packet.h"

#include "core/kernels/half.h"
#include "core/base/rng.h"
#include "core/kernels/kernels.h"

#include "../testing.h"

enum { LENGTH_MAX = 3000, WORDS = LENGTH_MAX / 64 + 2, GUARD = 0x5a };

/* A stretch, the kept elements, and their values after decoding. */
typedef struct stretch {
  mlfab__packet_shape shape;
  uint32_t width, grains, kept, count;
  int may_dense;
  uint64_t keep[WORDS];
  uint8_t kept_element[LENGTH_MAX];
  double values[LENGTH_MAX], travelled[LENGTH_MAX]; /* room for any type */
  uint64_t out[LENGTH_MAX * 2 + 64];
} stretch;

static uint8_t *out_of(stretch *s) { return (uint8_t *)s->out; }

static void fill(mlfab__rng *prng, const stretch *s, void *array, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    double x = (mlfab__rng_unit(prng) - 0.5) * (mlfab__rng_below(prng, 9) ? 1.0 : 1e6);
    if (s->shape.dtype == MLFAB_F32) ((float *)array)[i] = (float)x;
    if (s->shape.dtype == MLFAB_F64) ((double *)array)[i] = x;
    if (s->shape.dtype == MLFAB_I64) ((uint64_t *)array)[i] = mlfab__rng_next(prng);
  }
}

static void travel(const stretch *s, void *out, const void *in, uint32_t i) {
  int half = s->shape.half;
  if (half == MLFAB_HALF_NONE) {
    memcpy((char *)out + i * s->width, (const char *)in + i * s->width, s->width);
  } else if (s->shape.dtype == MLFAB_F32) {
    ((float *)out)[i] = mlfab__half_back(half, mlfab__half_one(half, ((const float *)in)[i]));
  } else {
    float narrow = mlfab__half_narrow(((const double *)in)[i]);
    ((double *)out)[i] = (double)mlfab__half_back(half, mlfab__half_one(half, narrow));
  }
}

static void mark(stretch *s, mlfab__rng *prng) {
  static const double shares[] = {0, 0.001, 0.01, 0.05, 0.3, 0.9, 0.995, 1};
  double share = shares[mlfab__rng_below(prng, 8)];
  int runs = mlfab__rng_below(prng, 2) == 0, on = 0;
  memset(s->keep, 0, sizeof s->keep);
  s->kept = s->count = 0;
  for (uint32_t g = 0; g < s->grains; g++) {
    if (!runs || mlfab__rng_below(prng, 40) == 0) on = mlfab__rng_unit(prng) < share;
    if (share == 1) on = 1;
    if (!on) continue;
    s->keep[g / 64] |= (uint64_t)1 << g % 64;
    s->kept++;
  }
  for (uint32_t i = 0; i < s->shape.elements; i++) {
    uint32_t g = i >> s->shape.grain_log2;
    s->kept_element[i] = s->keep[g / 64] >> g % 64 & 1;
    s->count += s->kept_element[i];
  }
}

static void make(stretch *s, uint64_t seed) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  s->shape.dtype = 1 + (int)mlfab__rng_below(&prng, 3);
  s->shape.half = s->shape.dtype == MLFAB_I64 ? 0 : (int)mlfab__rng_below(&prng, 3);
  s->width = mlfab__dtype_bytes(s->shape.dtype);
  s->shape.elements =
      1 + (uint32_t)mlfab__rng_below(&prng, mlfab__rng_below(&prng, 2) ? 150 : LENGTH_MAX);
  s->shape.grain_log2 = mlfab__rng_below(&prng, 2) ? 0 : (uint32_t)mlfab__rng_below(&prng, 17);
  s->shape.offset = mlfab__rng_below(&prng, 1u << 30) * s->width;
  s->grains = (s->shape.elements - 1) / (1u << s->shape.grain_log2) + 1;
  s->may_dense = (int)mlfab__rng_below(&prng, 2);
  mark(s, &prng);
  fill(&prng, s, s->values, s->shape.elements);
  for (uint32_t i = 0; i < s->shape.elements; i++) travel(s, s->travelled, s->values, i);
  memset(s->out, GUARD, sizeof s->out);
}

/* The size of each form, from the description in packet.h. */
static uint32_t bytes_of(const stretch *s, int form, uint32_t kept, uint32_t count) {
  uint32_t marks = form == MLFAB__PACKET_BITMAP  ? (s->grains + 7) / 8
                   : form == MLFAB__PACKET_INDEX ? 2 * kept
                                                 : 0;
  uint32_t values = count * (s->shape.half ? 2 : s->width);
  return 24 + (marks + 7) / 8 * 8 + (values + 7) / 8 * 8;
}

static void check_elements(const stretch *s, const mlfab__packet *p, const uint8_t *kept_element) {
  uint8_t seen[LENGTH_MAX] = {0};
  mlfab__packet_cursor cursor = {0, 0};
  uint32_t sum = 0;
  for (uint32_t first, n, end = 0; mlfab__unpack_run(p, &cursor, &first, &n); end = first + n) {
    assert_true(n > 0 && (first > end || (end == 0 && first == 0)));
    assert_true(first + n <= s->shape.elements);
    memset(seen + first, 1, n);
    sum += n;
  }
  assert_memory_equal(seen, kept_element, s->shape.elements);
  assert_int_equal(sum, p->count);
}

/* One element of w += scale * u; the product is stored, so it is rounded. */
static void add_one(const stretch *s, void *w, uint32_t i, double scale) {
  volatile float p32;
  volatile double p64;
  if (s->shape.dtype == MLFAB_F32) {
    p32 = (float)scale * ((const float *)s->travelled)[i];
    ((float *)w)[i] += p32;
  } else if (s->shape.dtype == MLFAB_F64) {
    p64 = scale * s->travelled[i];
    ((double *)w)[i] += p64;
  } else {
    ((uint64_t *)w)[i] += (uint64_t)(int64_t)scale * ((const uint64_t *)s->travelled)[i];
  }
}

static void check_unpacking(const stretch *s, const mlfab__packet *p, const uint8_t *kept_element,
                            mlfab__rng *prng) {
  static double w[LENGTH_MAX], wanted[LENGTH_MAX];
  uint32_t n = s->shape.elements, bytes = n * s->width;
  static const double scales[] = {1, -1, -0.037, 3};
  double scale = scales[mlfab__rng_below(prng, 4)];
  memset(wanted, 0, sizeof wanted);
  for (uint32_t i = 0; i < n; i++)
    if (kept_element[i])
      memcpy((char *)wanted + i * s->width, (const char *)s->travelled + i * s->width, s->width);
  memset(w, GUARD, sizeof w);
  mlfab__unpack_dense(p, w);
  assert_memory_equal(w, wanted, bytes);
  if (n < LENGTH_MAX) assert_int_equal(((uint8_t *)w)[bytes], GUARD);

  fill(prng, s, w, n);
  memcpy(wanted, w, sizeof w);
  for (uint32_t i = 0; i < n; i++)
    if (kept_element[i])
      memcpy((char *)wanted + i * s->width, (const char *)s->travelled + i * s->width, s->width);
  mlfab__unpack_store(p, w);
  assert_memory_equal(w, wanted, bytes);

  fill(prng, s, w, n);
  memcpy(wanted, w, sizeof w);
  for (uint32_t i = 0; i < n; i++)
    if (kept_element[i]) add_one(s, wanted, i, scale);
  assert_int_equal(mlfab__unpack_add(p, w, scale), 1);
  assert_memory_equal(w, wanted, bytes);
  assert_int_equal(mlfab__unpack_finite(p), 1);
}

static void check(stretch *s, uint32_t bytes, const uint8_t *kept_element, uint64_t seed) {
  mlfab__packet p;
  mlfab__rng prng;
  mlfab__rng_seed(&prng, mlfab__mix(seed));
  assert_int_equal(bytes % 8, 0);
  assert_true(bytes <= mlfab__packet_bound(s->shape.elements, s->shape.dtype));
  for (uint32_t i = 0; i < 64; i++)
    assert_int_equal(out_of(s)[mlfab__packet_bound(s->shape.elements, s->shape.dtype) + i], GUARD);
  assert_int_equal(mlfab__packet_open(out_of(s), bytes + mlfab__rng_below(&prng, 9), &p), bytes);
  assert_int_equal(mlfab__packet_open(out_of(s), bytes - 1, &p), 0);
  assert_int_equal(p.offset, s->shape.offset);
  assert_int_equal(p.elements, s->shape.elements);
  assert_int_equal(p.dtype, s->shape.dtype);
  assert_int_equal(p.value, s->shape.half);
  assert_int_equal(p.body, bytes - 24);
  check_elements(s, &p, kept_element);
  check_unpacking(s, &p, kept_element, &prng);
}

static void dense_case(stretch *s, uint64_t seed) {
  uint8_t all[LENGTH_MAX];
  memset(all, 1, sizeof all);
  uint32_t bytes = mlfab__packet_dense(out_of(s), &s->shape, s->values);
  assert_int_equal(bytes, bytes_of(s, MLFAB__PACKET_DENSE, 0, s->shape.elements));
  check(s, bytes, all, seed);
}

static void marked_case(stretch *s, uint64_t seed) {
  uint8_t all[LENGTH_MAX];
  memset(all, 1, sizeof all);
  uint32_t bytes = mlfab__packet_marked(out_of(s), &s->shape, s->values, s->keep, s->may_dense);
  if (s->kept == 0) {
    assert_int_equal(bytes, 0);
    return;
  }
  uint32_t least = bytes_of(s, MLFAB__PACKET_BITMAP, s->kept, s->count);
  uint32_t index = bytes_of(s, MLFAB__PACKET_INDEX, s->kept, s->count);
  uint32_t dense = bytes_of(s, MLFAB__PACKET_DENSE, 0, s->shape.elements);
  if (index < least) least = index;
  if (s->may_dense || s->count == s->shape.elements) least = dense < least ? dense : least;
  assert_int_equal(bytes, least);
  int is_dense = out_of(s)[20] == MLFAB__PACKET_DENSE;
  assert_true(!is_dense || s->may_dense || s->count == s->shape.elements);
  check(s, bytes, is_dense ? all : s->kept_element, seed);
}

/* mlfab__packet_begin, filled by hand, gives the same bytes as packing the whole array. */
static void begun_case(stretch *s, uint64_t seed) {
  static uint64_t other[LENGTH_MAX * 2 + 64];
  uint8_t *values = NULL;
  uint32_t width = s->shape.half ? 2 : s->width, k = 0;
  memset(other, GUARD, sizeof other);
  uint32_t marked = mlfab__packet_marked((uint8_t *)other, &s->shape, s->values, s->keep, 0);
  uint32_t bytes = mlfab__packet_begin(out_of(s), &s->shape, s->keep, &values);
  assert_int_equal(bytes, marked);
  if (bytes == 0) return;
  const uint8_t *from = (const uint8_t *)other + (values - out_of(s));
  for (uint32_t i = 0; i < s->shape.elements; i++)
    if (s->kept_element[i]) {
      memcpy(values + (size_t)k * width, from + (size_t)k * width, width);
      k++;
    }
  assert_memory_equal(out_of(s), other, bytes);
  check(s, bytes, s->kept_element, seed);
}

static void sparse_case(stretch *s, uint64_t seed) {
  static uint64_t other[LENGTH_MAX * 2 + 64];
  static uint32_t indices[LENGTH_MAX];
  static double values[LENGTH_MAX];
  uint32_t kept = 0;
  for (uint32_t i = 0; i < s->shape.elements; i++) {
    if (!s->kept_element[i]) continue;
    memcpy((char *)values + kept * s->width, (char *)s->values + i * s->width, s->width);
    indices[kept++] = i;
  }
  uint32_t bytes = mlfab__packet_sparse(out_of(s), &s->shape, indices, values, kept);
  if (kept == 0) {
    assert_int_equal(bytes, 0);
    return;
  }
  check(s, bytes, s->kept_element, seed);
  if (s->shape.grain_log2 > 0) return;
  memset(other, GUARD, sizeof other);
  assert_int_equal(mlfab__packet_marked((uint8_t *)other, &s->shape, s->values, s->keep, 0), bytes);
  assert_memory_equal(out_of(s), other, bytes);
}

TEST(what_goes_in_comes_out) {
  static void (*const kinds[])(stretch *, uint64_t) = {dense_case, marked_case, begun_case,
                                                       sparse_case};
  static stretch s;
  for (SEEDS(seed, 10000)) {
    make(&s, seed);
    kinds[seed % 4](&s, seed);
  }
}

/* The largest stretch: indices up to 65535, and the largest grain. */
TEST(takes_65536_elements) {
  enum { N = 65536 };
  mlfab__packet_shape shape = {0, MLFAB_F32, 0, 0, N};
  float *values = calloc(N, sizeof *values), *back = calloc(N, sizeof *back);
  uint64_t *keep = calloc(N / 64, 8), *out = calloc(1, mlfab__packet_bound(N, MLFAB_F64));
  mlfab__packet p;
  assert_true(values && back && keep && out);
  for (int i = 0; i < N; i++) values[i] = (float)(i + 1);
  keep[N / 64 - 1] = (uint64_t)1 << 63;
  assert_int_equal(mlfab__packet_marked((uint8_t *)out, &shape, values, keep, 0), 24 + 8 + 8);
  assert_int_equal(mlfab__packet_open((uint8_t *)out, 40, &p), 40);
  assert_int_equal(p.form, MLFAB__PACKET_INDEX);
  assert_int_equal(mlfab__unpack_add(&p, back, 2.0), 1);
  assert_true(back[N - 1] == 131072.0f && back[N - 2] == 0);
  memset(keep, 0xff, N / 8);
  uint32_t bytes = mlfab__packet_marked((uint8_t *)out, &shape, values, keep, 0);
  assert_int_equal(bytes, 24 + 4 * N);
  shape.grain_log2 = 16;
  keep[0] = 1;
  bytes = mlfab__packet_marked((uint8_t *)out, &shape, values, keep, 0);
  assert_int_equal(mlfab__packet_open((uint8_t *)out, bytes, &p), bytes);
  assert_true(p.grains == 1 && p.kept == 1 && p.count == N);
  mlfab__unpack_dense(&p, back);
  assert_memory_equal(back, values, N * sizeof *back);
  free(out);
  free(keep);
  free(back);
  free(values);
}

/* Sets and compares bits: with -ffast-math arithmetic on NaN and infinity is undefined. */
TEST(finds_what_is_not_finite) {
  static const uint8_t nan16[2] = {0x01, 0x7c}, nanbf[2] = {0x80, 0xff};
  static const uint8_t nan32[4] = {0, 0, 0x80, 0x7f};
  static const uint8_t nan64[8] = {0, 0, 0, 0, 0, 0, 0xf8, 0x7f};
  static stretch s;
  static double w[LENGTH_MAX];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 5);
  for (uint64_t seed = 1; seed <= 2000; seed++) {
    mlfab__packet p;
    make(&s, seed);
    if (s.shape.dtype == MLFAB_I64 || s.count == 0) continue;
    uint32_t bytes = mlfab__packet_marked(out_of(&s), &s.shape, s.values, s.keep, 0);
    mlfab__packet_open(out_of(&s), bytes, &p);
    uint8_t *values = out_of(&s) + (p.values - out_of(&s));
    uint64_t at = mlfab__rng_below(&prng, p.count);
    if (s.shape.half)
      memcpy(values + 2 * at, s.shape.half == MLFAB_HALF_F16 ? nan16 : nanbf, 2);
    else
      memcpy(values + s.width * at, s.width == 4 ? nan32 : nan64, s.width);
    assert_int_equal(mlfab__packet_open(out_of(&s), bytes, &p), bytes);
    assert_int_equal(mlfab__unpack_finite(&p), 0);
    assert_int_equal(mlfab__unpack_add(&p, w, 0.5), 0);
  }
  /* A product can overflow, too; and an I64's scale is an integer. */
  float most[3] = {1, 3e38f, 1}, sum[3] = {0};
  int64_t whole[3] = {1, 2, 3}, total[3] = {4, 5, 6};
  uint64_t keep = 7;
  mlfab__packet p;
  mlfab__packet_shape shape = {0, MLFAB_F32, 0, 0, 3};
  mlfab__packet_open(out_of(&s), mlfab__packet_marked(out_of(&s), &shape, most, &keep, 0), &p);
  assert_int_equal(mlfab__unpack_finite(&p), 1);
  assert_int_equal(mlfab__unpack_add(&p, sum, 2.0), 0);
  keep = 5;
  shape.dtype = MLFAB_I64;
  mlfab__packet_open(out_of(&s), mlfab__packet_marked(out_of(&s), &shape, whole, &keep, 0), &p);
  assert_int_equal(mlfab__unpack_finite(&p), 1);
  assert_int_equal(mlfab__unpack_add(&p, total, 1e19), 0);
  assert_true(total[0] == 4 && total[1] == 5 && total[2] == 6);
}

/* ---- malformed packets ---- */

static void put16(uint8_t *at, uint32_t x) {
  at[0] = (uint8_t)x;
  at[1] = (uint8_t)(x >> 8);
}

static void put32(uint8_t *at, uint32_t x) {
  put16(at, x);
  put16(at + 2, x >> 16);
}

/* 100 float32 of which 3 are kept: by indices, or as 7 in 10 by a bitmap. */
static uint32_t good_index(uint8_t *out) {
  static const uint32_t indices[3] = {0, 41, 99};
  static const float values[3] = {1, 2, 3};
  mlfab__packet_shape shape = {400, MLFAB_F32, 0, 0, 100};
  return mlfab__packet_sparse(out, &shape, indices, values, 3);
}

static uint32_t good_bitmap(uint8_t *out, int half) {
  float values[100];
  uint64_t keep[2] = {0x7f7f7f7f7f7f7f7fu, 0x200000003u};
  mlfab__packet_shape shape = {400, MLFAB_F32, half, 0, 100};
  for (int i = 0; i < 100; i++) values[i] = (float)i;
  return mlfab__packet_marked(out, &shape, values, keep, 0);
}

static void refused(const uint8_t *out, uint32_t bytes, const char *why) {
  mlfab__packet p = {.elements = 77};
  if (mlfab__packet_open(out, bytes, &p) != 0) fail_msg("%s: was taken", why);
  assert_int_equal(p.elements, 77);
}

#define REFUSES(why, good, change) \
  do {                             \
    uint32_t bytes = good;         \
    change;                        \
    refused(out, bytes, why);      \
  } while (0)

TEST(refuses_each_flaw) {
  uint64_t room[200] = {0};
  uint8_t *out = (uint8_t *)room;
  assert_int_equal(good_index(out), 24 + 8 + 16);
  assert_int_equal(good_bitmap(out, 0), 24 + 16 + (56 + 3) / 2 * 8 + 8);
  REFUSES("offset within an element", good_index(out), out[0] = 1);
  REFUSES("offset at the end of all", good_index(out), memset(out, 0xff, 8); out[0] = 0xfc);
  REFUSES("no elements", good_index(out), put32(out + 8, 0));
  REFUSES("65537 elements", good_index(out), put32(out + 8, 65537));
  REFUSES("fewer elements than the last index", good_index(out), put32(out + 8, 99));
  REFUSES("one kept less", good_index(out), put32(out + 12, 2));
  REFUSES("one kept more", good_index(out), put32(out + 12, 4));
  REFUSES("more kept than there is", good_index(out), put32(out + 12, 0xffffffffu));
  REFUSES("a longer body", good_index(out), put32(out + 16, 32); bytes += 8);
  REFUSES("a shorter body", good_index(out), put32(out + 16, 16));
  REFUSES("an enormous body", good_index(out), put32(out + 16, 0xfffffff8u));
  REFUSES("form 3", good_index(out), out[20] = 3);
  REFUSES("dense with three", good_index(out), out[20] = MLFAB__PACKET_DENSE);
  REFUSES("values 3", good_index(out), out[21] = 3);
  REFUSES("grain 2^17", good_index(out), out[22] = 17);
  REFUSES("grain 2^255", good_index(out), out[22] = 255);
  REFUSES("no type", good_index(out), out[23] = 0);
  REFUSES("type 4", good_index(out), out[23] = 4);
  REFUSES("halves of integers", good_index(out), out[23] = MLFAB_I64; out[21] = 1; bytes -= 8;
          put32(out + 16, 16); memset(out + 24 + 8, 0, 8));
  REFUSES("an index twice", good_index(out), put16(out + 26, 0));
  REFUSES("indices descending", good_index(out), put16(out + 26, 99); put16(out + 28, 41));
  REFUSES("an index beyond", good_index(out), put16(out + 28, 100));
  REFUSES("padding of indices", good_index(out), out[24 + 7] = 1);
  REFUSES("padding of values", good_index(out), out[24 + 8 + 12] = 1);
  REFUSES("a bit too many", good_bitmap(out, 0), out[24] |= 0x80);
  REFUSES("a bit too few", good_bitmap(out, 0), out[24] = 0x3f);
  REFUSES("a bit beyond the end", good_bitmap(out, 0), out[24] = 0x3f; out[24 + 12] |= 0x10);
  REFUSES("padding of the bitmap", good_bitmap(out, 0), out[24] = 0x3f; out[24 + 15] = 1);
  REFUSES("padding of halves", good_bitmap(out, 1), out[bytes - 1] = 1);
}

/* A packet with no kept element is valid and changes nothing. */
TEST(takes_nothing_kept) {
  uint64_t room[4] = {0};
  uint8_t *out = (uint8_t *)room;
  mlfab__packet p;
  mlfab__packet_cursor cursor = {0, 0};
  uint32_t first, n;
  float w[100] = {1}, zeros[100] = {0};
  put32(out + 8, 100);
  out[20] = MLFAB__PACKET_INDEX;
  out[23] = MLFAB_F32;
  assert_int_equal(mlfab__packet_open(out, sizeof room, &p), 24);
  assert_int_equal(mlfab__unpack_run(&p, &cursor, &first, &n), 0);
  assert_int_equal(mlfab__unpack_finite(&p), 1);
  assert_int_equal(mlfab__unpack_add(&p, w, 3), 1);
  assert_true(w[0] == 1);
  mlfab__unpack_dense(&p, w);
  assert_memory_equal(w, zeros, sizeof w);
}

/* Random damage: a packet that is still accepted must be safe to unpack (a sanitizer shows it). */
TEST(survives_damage) {
  static stretch s;
  static double w[65536];
  uint64_t taken = 0;
  for (uint64_t seed = 1; seed <= test_cases(10000); seed++) {
    mlfab__rng prng;
    mlfab__packet p;
    make(&s, seed);
    mlfab__rng_seed(&prng, seed);
    uint32_t bytes = mlfab__packet_marked(out_of(&s), &s.shape, s.values, s.keep, s.may_dense);
    if (bytes == 0) continue;
    for (uint64_t k = 1 + mlfab__rng_below(&prng, 3); k > 0; k--) {
      uint64_t at = mlfab__rng_below(&prng, mlfab__rng_below(&prng, 2) ? 24 : bytes);
      out_of(&s)[at] ^= (uint8_t)(1u << mlfab__rng_below(&prng, 8));
    }
    if (mlfab__rng_below(&prng, 4) == 0) bytes -= (uint32_t)mlfab__rng_below(&prng, bytes);
    uint8_t *copy = malloc(bytes + (bytes == 0));
    assert_non_null(copy);
    memcpy(copy, s.out, bytes);
    uint32_t is = mlfab__packet_open(copy, bytes, &p);
    assert_true(is <= bytes);
    if (is > 0) {
      taken++;
      (void)mlfab__unpack_finite(&p);
      (void)mlfab__unpack_add(&p, w, 0.5);
      mlfab__unpack_store(&p, w);
      mlfab__unpack_dense(&p, w);
    }
    free(copy);
  }
  assert_true(test_scale() < 1.0 || taken > 100);
}

TESTS(NULL, NULL)
