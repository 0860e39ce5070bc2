/* test_reduce.c - the kernels of core/kernels/kernels.c that add updates, against a literal loop, and their
 * levels against each other, bit for bit. Holds under -Ofast -march=native too: the reference stores each
 * result, which keeps its rounding, and compares bits. */
#include "core/base/rng.h"
#include "core/kernels/kernels.h"

#include "../testing.h"

enum { LENGTH_MAX = 5000, ROOM = LENGTH_MAX + 16, STREAMED = 40000 };
enum { SEPARATE, ONTO_W, ONTO_U, NO_W, SHAPES };

static const int dtypes[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64};
static const double scales[] = {1.0, -1.0, 0.0, 0.1, -0.037, 1e-310, -1e-42, 3.0};

static size_t bytes_of(int dtype) { return mlfab__dtype_bytes(dtype); }

/* Numbers of all magnitudes, including zeros of both signs and subnormals; the scaled sum of two of them
 * cannot overflow. */
static void fill(mlfab__rng *prng, int dtype, void *array, size_t n) {
  for (size_t i = 0; i < n; i++) {
    double x = (mlfab__rng_unit(prng) - 0.5) * (mlfab__rng_below(prng, 4) ? 1.0 : 1e18);
    if (mlfab__rng_below(prng, 50) == 0) x = mlfab__rng_below(prng, 2) ? 0.0 : -0.0;
    if (mlfab__rng_below(prng, 50) == 0) x *= dtype == MLFAB_F32 ? 1e-40 : 1e-310;
    if (dtype == MLFAB_F32) ((float *)array)[i] = (float)x;
    if (dtype == MLFAB_F64) ((double *)array)[i] = x;
    if (dtype == MLFAB_I64) ((int64_t *)array)[i] = (int64_t)mlfab__rng_next(prng);
  }
}

/* One element at a time; volatile stores round each step. */
static void reference(int dtype, void *dst, const void *w, const void *u, double scale, size_t n) {
  volatile float s32 = (float)scale, p32, r32;
  volatile double s64 = scale, p64, r64;
  for (size_t i = 0; i < n; i++) {
    if (dtype == MLFAB_F32) {
      p32 = s32 * ((const float *)u)[i];
      r32 = p32;
      if (w != NULL) r32 = ((const float *)w)[i] + p32;
      ((float *)dst)[i] = r32;
    } else if (dtype == MLFAB_F64) {
      p64 = s64 * ((const double *)u)[i];
      r64 = p64;
      if (w != NULL) r64 = ((const double *)w)[i] + p64;
      ((double *)dst)[i] = r64;
    } else {
      uint64_t sum = (uint64_t)(int64_t)scale * (uint64_t)((const int64_t *)u)[i];
      if (w != NULL) sum += (uint64_t)((const int64_t *)w)[i];
      ((int64_t *)dst)[i] = (int64_t)sum;
    }
  }
}

/* The two arrays, the expected result and the kernel's destination, each with its own offset. */
typedef struct arena {
  double w[ROOM], u[ROOM], expected[ROOM], out[ROOM], w_kept[ROOM], u_kept[ROOM];
} arena;

static void one_case(mlfab__rng *prng, arena *a) {
  int dtype = dtypes[mlfab__rng_below(prng, 3)];
  size_t width = bytes_of(dtype);
  size_t n = (size_t)mlfab__rng_below(prng, mlfab__rng_below(prng, 2) ? 100 : LENGTH_MAX + 1);
  double scale = scales[mlfab__rng_below(prng, MLFAB__COUNT(scales))];
  int stream = (int)mlfab__rng_below(prng, 2), shape = (int)mlfab__rng_below(prng, SHAPES);
  char *w = (char *)a->w + width * mlfab__rng_below(prng, 16);
  char *u = (char *)a->u + width * mlfab__rng_below(prng, 16);
  char *out = (char *)a->out + width * mlfab__rng_below(prng, 16);
  fill(prng, dtype, w, n);
  fill(prng, dtype, u, n);
  memcpy(a->w_kept, w, n * width);
  memcpy(a->u_kept, u, n * width);
  reference(dtype, a->expected, shape == NO_W ? NULL : w, u, scale, n);
  for (int level = 0; level <= mlfab__kernel_level(); level++) {
    memcpy(w, a->w_kept, n * width);
    memcpy(u, a->u_kept, n * width);
    char *dst = shape == ONTO_W ? w : shape == ONTO_U ? u : out;
    memset(dst + n * width, 0x5a, width);
    int finite =
        mlfab__kernel_add_with(level, dtype, dst, shape == NO_W ? NULL : w, u, scale, n, stream);
    assert_int_equal(finite, 1);
    assert_memory_equal(dst, a->expected, n * width);
    for (size_t i = 0; i < width; i++) assert_int_equal(dst[n * width + i], 0x5a);
    if (dst != w) assert_memory_equal(w, a->w_kept, n * width);
    if (dst != u) assert_memory_equal(u, a->u_kept, n * width);
  }
}

TEST(equals_the_loop_at_every_level) {
  mlfab__rng prng;
  arena *a = (arena *)calloc(1, sizeof *a);
  assert_non_null(a);
  mlfab__rng_seed(&prng, 1);
  for (int i = 0; i < 3000; i++) one_case(&prng, a);
  free(a);
}

/* Long enough for non-temporal stores, with the destination at every position within a cache line. */
TEST(streams_long_arrays) {
  mlfab__rng prng;
  double *w = (double *)malloc((STREAMED + 16) * sizeof *w);
  double *u = (double *)malloc((STREAMED + 16) * sizeof *u);
  double *out = (double *)malloc((STREAMED + 16) * sizeof *out);
  double *expected = (double *)malloc((STREAMED + 16) * sizeof *expected);
  assert_true(w && u && out && expected);
  mlfab__rng_seed(&prng, 2);
  for (size_t d = 0; d < 2; d++) {
    size_t width = bytes_of(dtypes[d]);
    fill(&prng, dtypes[d], w, STREAMED);
    fill(&prng, dtypes[d], u, STREAMED);
    for (size_t offset = 0; offset < 16; offset++) {
      char *dst = (char *)out + offset * width;
      size_t n = STREAMED - offset * 3;
      reference(dtypes[d], expected, w, u, -0.037, n);
      for (int level = 0; level <= mlfab__kernel_level(); level++) {
        memset(dst, 0, n * width);
        assert_int_equal(mlfab__kernel_add_with(level, dtypes[d], dst, w, u, -0.037, n, 1), 1);
        assert_memory_equal(dst, expected, n * width);
      }
    }
  }
  free(w);
  free(u);
  free(out);
  free(expected);
}

/* Writes bits: with -ffast-math NAN and INFINITY are undefined. */
static void plant(int dtype, void *array, size_t at, int what) {
  static const uint32_t bad32[] = {0x7f800000u, 0xff800000u, 0x7fc00000u, 0x7f800001u, 0xffffffffu};
  static const uint64_t bad64[] = {0x7ff0000000000000u, 0xfff0000000000000u, 0x7ff8000000000000u,
                                   0x7ff0000000000001u, 0xffffffffffffffffu};
  if (dtype == MLFAB_F32)
    memcpy((float *)array + at, &bad32[what], 4);
  else
    memcpy((double *)array + at, &bad64[what], 8);
}

/* At every position of arrays that have a head, a body and a tail, one bad number is found. */
TEST(finds_nan_and_infinity) {
  enum { N = 83 };
  double w[N + 8], u[N + 8], dst[N + 8];
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 3);
  for (size_t d = 0; d < 2; d++) {
    size_t width = bytes_of(dtypes[d]);
    fill(&prng, dtypes[d], w, N + 8);
    for (size_t at = 0; at < N; at++)
      for (int what = 0; what < 5; what++) {
        size_t skip = mlfab__rng_below(&prng, 8) * width;
        double scale = mlfab__rng_below(&prng, 2) ? -0.037 : 1.0;
        char *v = (char *)u + skip;
        fill(&prng, dtypes[d], v, N);
        assert_int_equal(mlfab__kernel_finite(dtypes[d], v, N), 1);
        plant(dtypes[d], v, at, what);
        assert_int_equal(mlfab__kernel_finite(dtypes[d], v, N), 0);
        assert_int_equal(mlfab__kernel_finite(dtypes[d], v, at), 1);
        for (int level = 0; level <= mlfab__kernel_level(); level++) {
          assert_int_equal(mlfab__kernel_add_with(level, dtypes[d], dst, w, v, scale, N, 0), 0);
          assert_int_equal(mlfab__kernel_add_with(level, dtypes[d], dst, NULL, v, scale, N, 0), 0);
          assert_int_equal(mlfab__kernel_add_with(level, dtypes[d], dst, w, v, scale, at, 0), 1);
        }
      }
  }
}

/* The product is checked, not u alone, and not the sum: the update is not to blame for weights that are
 * infinite already. The largest finite number passes. */
TEST(looks_at_the_product) {
  enum { N = 100 };
  float u[N], w[N], dst[N];
  double u64[N], dst64[N];
  for (int level = 0; level <= mlfab__kernel_level(); level++)
    for (size_t at = 0; at < N; at++) {
      for (size_t i = 0; i < N; i++) u[i] = w[i] = 1.0f, u64[i] = 1.0;
      u[at] = 3.4028234e38f;
      u64[at] = 1.7e308;
      assert_int_equal(mlfab__kernel_add_with(level, MLFAB_F32, dst, w, u, -1.0, N, 0), 1);
      assert_int_equal(mlfab__kernel_add_with(level, MLFAB_F32, dst, w, u, -1.5, N, 0), 0);
      assert_int_equal(mlfab__kernel_add_with(level, MLFAB_F64, dst64, u64, u64, 1.0, N, 0), 1);
      assert_int_equal(mlfab__kernel_add_with(level, MLFAB_F64, dst64, u64, u64, 1.5, N, 0), 0);
      plant(MLFAB_F32, w, at, 0);
      assert_int_equal(mlfab__kernel_add_with(level, MLFAB_F32, dst, w, u, 1.0, N, 0), 1);
      assert_int_equal(mlfab__kernel_add_with(level, MLFAB_F32, dst, w, u, 1e39, N, 0), 0);
    }
}

TEST(integers_wrap_and_refuse_scales) {
  int64_t w[3] = {INT64_MAX, INT64_MIN, 5}, u[3] = {1, -1, 7}, dst[3] = {8, 8, 8};
  assert_int_equal(mlfab__kernel_add(MLFAB_I64, dst, w, u, 1e19, 3, 0), 0);
  assert_int_equal(mlfab__kernel_add(MLFAB_I64, dst, w, u, -1e19, 3, 0), 0);
  double nan;
  plant(MLFAB_F64, &nan, 0, 2);
  assert_int_equal(mlfab__kernel_add(MLFAB_I64, dst, w, u, nan, 3, 0), 0);
  assert_true(dst[0] == 8 && dst[1] == 8 && dst[2] == 8);
  assert_int_equal(mlfab__kernel_add(MLFAB_I64, dst, w, u, 1.0, 3, 0), 1);
  assert_true(dst[0] == INT64_MIN && dst[1] == INT64_MAX && dst[2] == 12);
  assert_int_equal(mlfab__kernel_add(MLFAB_I64, dst, w, u, -9223372036854775808.0, 3, 0), 1);
  assert_true(dst[0] == -1 && dst[1] == 0 && dst[2] == INT64_MIN + 5);
  assert_int_equal(mlfab__kernel_finite(MLFAB_I64, u, 3), 1);
}

TEST(subtracts) {
  mlfab__rng prng;
  double a[200], b[200], expected[200], dst[200];
  mlfab__rng_seed(&prng, 4);
  for (size_t d = 0; d < 3; d++)
    for (size_t n = 0; n <= 200; n += 7) {
      size_t bytes = n * bytes_of(dtypes[d]);
      fill(&prng, dtypes[d], a, n);
      fill(&prng, dtypes[d], b, n);
      reference(dtypes[d], expected, a, b, -1.0, n);
      (void)mlfab__kernel_add(dtypes[d], dst, a, b, -1.0, n, 0);
      assert_memory_equal(dst, expected, bytes);
      memcpy(dst, b, bytes);
      (void)mlfab__kernel_add(dtypes[d], dst, a, dst, -1.0, n, 0);
      assert_memory_equal(dst, expected, bytes);
      (void)mlfab__kernel_add(dtypes[d], a, a, b, -1.0, n, 0);
      assert_memory_equal(a, expected, bytes);
    }
}

TEST(norms_are_right_and_repeat) {
  mlfab__rng prng;
  double u[1016], moved[1016];
  mlfab__rng_seed(&prng, 5);
  for (size_t d = 0; d < 3; d++)
    for (size_t n = 0; n < 1000; n += 1 + n / 8) {
      size_t width = bytes_of(dtypes[d]);
      double expected = 0.0;
      fill(&prng, dtypes[d], u, n);
      for (size_t i = 0; i < n; i++) {
        double x = dtypes[d] == MLFAB_F32   ? (double)((float *)u)[i]
                   : dtypes[d] == MLFAB_F64 ? u[i]
                                            : (double)((int64_t *)u)[i];
        expected += x * x;
      }
      double norm2 = mlfab__kernel_norm2(dtypes[d], u, n);
      double error = norm2 < expected ? expected - norm2 : norm2 - expected;
      assert_true(error <= 1e-12 * expected);
      for (size_t offset = 0; offset < 16; offset++) {
        memcpy((char *)moved + offset * width, u, n * width);
        double again = mlfab__kernel_norm2(dtypes[d], (char *)moved + offset * width, n);
        assert_memory_equal(&again, &norm2, sizeof again);
      }
    }
}

TEST(knows_its_types) {
  assert_int_equal(mlfab__dtype_bytes(MLFAB_F32), 4);
  assert_int_equal(mlfab__dtype_bytes(MLFAB_F64), 8);
  assert_int_equal(mlfab__dtype_bytes(MLFAB_I64), 8);
  assert_int_equal(mlfab__dtype_bytes(0), 0);
  assert_int_equal(mlfab__dtype_bytes(4), 0);
  assert_string_equal(mlfab__dtype_name(MLFAB_F32), "F32");
  assert_string_equal(mlfab__dtype_name(MLFAB_F64), "F64");
  assert_string_equal(mlfab__dtype_name(MLFAB_I64), "I64");
  assert_string_equal(mlfab__dtype_name(-1), "unknown");
}

TESTS(NULL, NULL)
