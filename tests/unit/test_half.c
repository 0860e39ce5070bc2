/* test_half.c - conversions of halves against a search through all of them, and the levels against each
 * other, bit for bit. MLFAB_SCALE=100 goes through every float32. */
#include "core/kernels/half.h"
#include "core/kernels/kernels.h"
#include "core/base/rng.h"

#include "../testing.h"

enum { N = 4096 };

static const int halves[] = {MLFAB_HALF_F16, MLFAB_HALF_BF16};

static float of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

/* The value of a pattern by its definition, as a double, which holds all of them exactly. */
static double meaning(int half, uint32_t bits) {
  int width = half == MLFAB_HALF_F16 ? 10 : 7, bias = half == MLFAB_HALF_F16 ? 15 : 127;
  int exponent = (int)((bits & 0x7fffu) >> width);
  double m = bits & ((1u << width) - 1), one = 1 << width;
  double x = exponent == 0 ? m / one : 1 + m / one;
  for (int e = (exponent == 0 ? 1 : exponent) - bias; e != 0; e += e > 0 ? -1 : 1)
    x = e > 0 ? x * 2 : x / 2;
  return bits & 0x8000u ? -x : x;
}

static uint32_t top_of(int half) { return half == MLFAB_HALF_F16 ? 0x7bffu : 0x7f7fu; }

/* The nearest finite one, the even one of two: magnitudes ascend with their bits. */
static uint16_t nearest(int half, float x) {
  double size = x < 0 ? -(double)x : (double)x;
  uint32_t low = 0, high = top_of(half);
  while (low < high) { /* the last one not above */
    uint32_t middle = (low + high + 1) / 2;
    if (meaning(half, middle) <= size)
      low = middle;
    else
      high = middle - 1;
  }
  if (low < top_of(half)) {
    double below = size - meaning(half, low), above = meaning(half, low + 1) - size;
    if (above < below || (above == below && (low & 1))) low++;
  }
  return (uint16_t)(low | (bits_of(x) >> 16 & 0x8000u));
}

static void expect_one(int half, float x) {
  uint16_t is = mlfab__half_one(half, x), wanted = nearest(half, x);
  if (is != wanted) fail_msg("half %d of %a: %04x, not %04x", half, (double)x, is, wanted);
}

TEST(every_half_comes_back) {
  for (size_t h = 0; h < 2; h++)
    for (uint32_t bits = 0; bits < 0x10000u; bits++) {
      if ((bits & 0x7fffu) > top_of(halves[h])) continue;
      float x = mlfab__half_back(halves[h], (uint16_t)bits);
      assert_true((double)x == meaning(halves[h], bits));
      assert_int_equal(bits_of(x) >> 31, bits >> 15);
      assert_int_equal(mlfab__half_one(halves[h], x), bits);
    }
}

/* Halves, the midpoints between them, and their neighbours; then random numbers. */
TEST(rounds_to_the_nearest) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 1);
  for (size_t h = 0; h < 2; h++) {
    uint32_t skip = halves[h] == MLFAB_HALF_F16 ? 1 : 7;
    for (uint32_t bits = 0; bits < top_of(halves[h]); bits += skip) {
      double low = meaning(halves[h], bits), high = meaning(halves[h], bits + 1);
      uint32_t middle = bits_of((float)((low + high) / 2));
      for (uint32_t off = 0; off < 3; off++) {
        uint32_t around = middle + off - 1;
        if (around == 0xffffffffu) continue;
        expect_one(halves[h], of_bits(around));
        expect_one(halves[h], of_bits(around | 0x80000000u));
      }
      expect_one(halves[h], (float)low);
    }
    /* Also beyond the largest, where rounding alone would give infinity. */
    uint32_t top = mlfab__half_top(halves[h]);
    for (uint32_t bits = top; bits < top + 0x20000u && bits < 0x7f800000u; bits += 0x100)
      expect_one(halves[h], of_bits(bits));
    for (int i = 0; i < 200000; i++) {
      uint32_t bits = (uint32_t)mlfab__rng_next(&prng);
      if ((bits & 0x7f800000u) != 0x7f800000u) expect_one(halves[h], of_bits(bits));
    }
  }
}

TEST(says_what_is_zero_and_what_saturates) {
  for (size_t h = 0; h < 2; h++) {
    uint32_t zero = mlfab__half_zero(halves[h]), top = mlfab__half_top(halves[h]);
    assert_int_equal(mlfab__half_one(halves[h], of_bits(zero)), 0);
    assert_int_equal(mlfab__half_one(halves[h], of_bits(zero + 1)), 1);
    assert_int_equal(mlfab__half_one(halves[h], of_bits(top)), top_of(halves[h]));
    assert_true((double)of_bits(top) == meaning(halves[h], top_of(halves[h])));
    assert_int_equal(mlfab__half_one(halves[h], of_bits(0x7f7fffffu)), top_of(halves[h]));
    assert_int_equal(mlfab__half_one(halves[h], of_bits(0xff7fffffu)), top_of(halves[h]) | 0x8000u);
  }
  assert_int_equal(mlfab__half_zero(MLFAB_HALF_NONE), 0);
  assert_int_equal(mlfab__half_top(MLFAB_HALF_NONE), 0x7f7fffffu);
  assert_int_equal(bits_of(mlfab__half_narrow(1e300)), 0x7f7fffffu);
  assert_int_equal(bits_of(mlfab__half_narrow(-1e300)), 0xff7fffffu);
  assert_int_equal(bits_of(mlfab__half_narrow(-0.5)), 0xbf000000u);
}

/* Runs of consecutive patterns from the whole range; infinity and NaN among them. */
TEST(levels_agree) {
  uint64_t runs = test_cases((1u << 20) / 100.0);
  static float in[N], back[N], other[N];
  static uint16_t expected[N], out[N + 1];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 2);
  if (runs > 1u << 20) runs = 1u << 20;
  for (uint64_t run = 0; run < runs; run++) {
    uint32_t base = (uint32_t)(run * ((1u << 20) / runs) * N), n = N - (uint32_t)run % 33;
    uint32_t skip = (uint32_t)mlfab__rng_below(&prng, 16);
    for (uint32_t i = 0; i < N; i++) in[i] = of_bits(base + i);
    n -= skip;
    for (size_t h = 0; h < 2; h++) {
      mlfab__half_store_with(0, halves[h], expected, in + skip, n);
      mlfab__half_load_with(0, halves[h], back, expected, n);
      for (int level = 1; level <= mlfab__kernel_level(); level++) {
        out[n] = 0x5a5a;
        mlfab__half_store_with(level, halves[h], out, in + skip, n);
        assert_memory_equal(out, expected, n * sizeof *out);
        assert_int_equal(out[n], 0x5a5a);
        mlfab__half_load_with(level, halves[h], other, out, n);
        assert_memory_equal(other, back, n * sizeof *back);
      }
    }
  }
  for (size_t h = 0; h < 2; h++)
    for (int level = 0; level <= mlfab__kernel_level(); level++)
      for (uint32_t base = 0; base < 0x10000u; base += N) { /* every half, NaNs too */
        for (uint32_t i = 0; i < N; i++) out[i] = (uint16_t)(base + i);
        mlfab__half_load_with(level, halves[h], back, out, N);
        for (uint32_t i = 0; i < N; i++)
          assert_int_equal(bits_of(back[i]), bits_of(mlfab__half_back(halves[h], out[i])));
      }
}

TEST(arrays_are_single_ones) {
  float in[100], back[100];
  uint16_t out[100];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 3);
  for (size_t h = 0; h < 2; h++)
    for (uint64_t n = 0; n <= 100; n++) {
      for (uint64_t i = 0; i < n; i++) in[i] = (float)(mlfab__rng_unit(&prng) - 0.5) * 1e6f;
      mlfab__half_store(halves[h], out, in, n);
      mlfab__half_load(halves[h], back, out, n);
      for (uint64_t i = 0; i < n; i++) {
        assert_int_equal(out[i], mlfab__half_one(halves[h], in[i]));
        assert_int_equal(bits_of(back[i]), bits_of(mlfab__half_back(halves[h], out[i])));
      }
    }
}

TEST(finds_infinity_and_nan) {
  static const uint16_t bad[2][4] = {{0x7c00, 0xfc00, 0x7c01, 0xffff},
                                     {0x7f80, 0xff80, 0x7f81, 0xffff}};
  uint16_t in[23];
  for (size_t h = 0; h < 2; h++)
    for (uint64_t n = 0; n <= 23; n++) {
      for (uint64_t i = 0; i < 23; i++)
        in[i] = (uint16_t)(top_of(halves[h]) | (i % 2 ? 0x8000u : 0));
      assert_int_equal(mlfab__half_finite(halves[h], in, n), 1);
      for (uint64_t at = 0; at < n; at++)
        for (size_t b = 0; b < 4; b++) {
          uint16_t kept = in[at];
          in[at] = bad[h][b];
          assert_int_equal(mlfab__half_finite(halves[h], in, n), 0);
          assert_int_equal(mlfab__half_finite(halves[h], in, at), 1);
          in[at] = kept;
        }
    }
}

TESTS(NULL, NULL)
