/* test_kernels.c - the row of cblas against the portable kernels: sums and products bit for bit, norms against a sum in
 * long double. And that OpenBLAS stays in the calling thread, with the number of threads that the program has set.
 * MLFAB_SCALE=100 a hundred times as many cases. */
#include "core/base/rng.h"
#include "core/kernels/kernels_combine.h"
#include "tests/unit/scale.h"

#include <math.h>
#include <time.h>
#include <unistd.h>
#include <cblas.h>
#include "../testing.h"

enum { ROOM = 40000, INPUTS_MAX = 64, GUARD = 0x5a };
enum { SEPARATE, ONTO_W, ONTO_U, ALL_ONE, NO_W, NO_W_ONTO_U, SHAPES };

static const int dtypes[] = {MLFAB_F32, MLFAB_F64};
static const double scales[] = {1.0,    -1.0,   0.0,   -0.0, 0.1, -0.037,
                                1e-310, -1e-42, 1e-50, 3.0,  1e30};
/* Around the lengths of vectors, and around one, two and many pieces. */
static const uint64_t lengths[] = {0,    1,    2,    3,    7,    8,    15,   16,    17,
                                   31,   33,   63,   64,   65,   255,  257,  2047,  2048,
                                   2049, 4095, 4096, 4097, 6145, 8191, 9999, 10001, ROOM - 64};

static uint64_t some_length(mlfab__rng *prng) {
  if (mlfab__rng_below(prng, 2)) return mlfab__rng_below(prng, 100);
  if (mlfab__rng_below(prng, 2)) return mlfab__rng_below(prng, ROOM - 64);
  return lengths[mlfab__rng_below(prng, MLFAB__COUNT(lengths))];
}

/* Numbers of all magnitudes, zeros of both signs and subnormals; where `wild`, infinities and NaNs as well. */
static void fill(mlfab__rng *prng, int dtype, void *array, uint64_t n, int wild) {
  for (uint64_t i = 0; i < n; i++) {
    double x = (mlfab__rng_unit(prng) - 0.5) * (mlfab__rng_below(prng, 4) ? 1.0 : 1e18);
    if (mlfab__rng_below(prng, 50) == 0) x = mlfab__rng_below(prng, 2) ? 0.0 : -0.0;
    if (mlfab__rng_below(prng, 50) == 0) x *= dtype == MLFAB_F32 ? 1e-40 : 1e-310;
    if (wild && mlfab__rng_below(prng, 500) == 0)
      x = mlfab__rng_below(prng, 2) ? INFINITY : -INFINITY;
    if (wild && mlfab__rng_below(prng, 500) == 0) x = NAN;
    if (dtype == MLFAB_F32)
      ((float *)array)[i] = (float)x;
    else
      ((double *)array)[i] = x;
  }
}

static double element(int dtype, const void *array, uint64_t i) {
  return dtype == MLFAB_F32 ? (double)((const float *)array)[i] : ((const double *)array)[i];
}

/* Bit-equal; a NaN may be another one. */
static int same(int dtype, const void *a, const void *b, uint64_t n) {
  uint32_t width = mlfab__dtype_bytes(dtype);
  if (memcmp(a, b, n * width) == 0) return 1;
  for (uint64_t i = 0; i < n; i++) {
    if (isnan(element(dtype, a, i)) && isnan(element(dtype, b, i))) continue;
    if (memcmp((const char *)a + i * width, (const char *)b + i * width, width) != 0) return 0;
  }
  return 1;
}

/* ---- adding an update ---- */

typedef struct arena {
  double w[ROOM], u[ROOM], out[ROOM], w_kept[ROOM], u_kept[ROOM], expected[ROOM];
} arena;

static void add_case(mlfab__rng *prng, arena *a, int level) {
  int dtype = dtypes[mlfab__rng_below(prng, 2)], shape = (int)mlfab__rng_below(prng, SHAPES);
  uint64_t n = some_length(prng), width = mlfab__dtype_bytes(dtype);
  double scale = scales[mlfab__rng_below(prng, MLFAB__COUNT(scales))];
  char *w = (char *)a->w + width * (1 + mlfab__rng_below(prng, 31));
  char *u = (char *)a->u + width * (1 + mlfab__rng_below(prng, 31));
  char *out = (char *)a->out + width * (1 + mlfab__rng_below(prng, 31));
  fill(prng, dtype, w, n, mlfab__rng_below(prng, 4) == 0);
  fill(prng, dtype, u, n, mlfab__rng_below(prng, 4) == 0);
  if (shape == ALL_ONE) u = w;
  memcpy(a->w_kept, w, n * width);
  memcpy(a->u_kept, u, n * width);
  const void *from = shape == NO_W || shape == NO_W_ONTO_U ? NULL : a->w_kept;
  int wanted = mlfab__kernel_add_with(0, dtype, a->expected, from, a->u_kept, scale, n, 0);
  char *dst = shape == ONTO_W || shape == ALL_ONE       ? w
              : shape == ONTO_U || shape == NO_W_ONTO_U ? u
                                                        : out;
  unsigned char before[8], behind[8];
  memset(dst + n * width, GUARD, 8);
  memcpy(before, dst - width, width);
  memcpy(behind, dst + n * width, 8);
  int finite = mlfab__kernel_add_with(level | MLFAB__KERNEL_CBLAS, dtype, dst, from ? w : NULL, u,
                                      scale, n, (int)mlfab__rng_below(prng, 2));
  if (finite != wanted || (finite && !same(dtype, dst, a->expected, n)))
    fail_msg("%s: %u elements, scale %g, shape %d, finite %d, %d expected",
             mlfab__dtype_name(dtype), (unsigned)n, scale, shape, finite, wanted);
  assert_memory_equal(dst - width, before, width);
  assert_memory_equal(dst + n * width, behind, 8);
  if (dst != w) assert_memory_equal(w, a->w_kept, n * width);
  if (dst != u) assert_memory_equal(u, a->u_kept, n * width);
}

TEST(adds_the_same_bits) {
  arena *a = malloc(sizeof *a);
  mlfab__rng prng;
  assert_non_null(a);
  for (int level = 0; level <= mlfab__kernel_level(); level++) {
    mlfab__rng_seed(&prng, 11);
    for (uint64_t i = 0; i < test_cases(800); i++) add_case(&prng, a, level);
  }
  free(a);
}

TEST(refuses_infinite_products) {
  float u[5000] = {0}, w[5000] = {0};
  for (size_t i = 0; i < MLFAB__COUNT(u); i += 499) {
    u[i] = INFINITY;
    assert_false(mlfab__kernel_add_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, w, w, u, 0.5, 5000, 0));
    u[i] = 3e38f;
    assert_false(mlfab__kernel_add_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, w, w, u, 2.0, 5000, 0));
    u[i] = 0;
    memset(w, 0, sizeof w);
  }
}

/* ---- collectives ---- */

typedef struct inputs {
  double in[INPUTS_MAX][ROOM / 8], out[3][ROOM / 8], expected[ROOM / 8];
} inputs;

static void combine_case(mlfab__rng *prng, inputs *x) {
  static const int ops[] = {MLFAB_OP_SUM, MLFAB_OP_MEAN, MLFAB_OP_MIN, MLFAB_OP_PRODUCT};
  int dtype = dtypes[mlfab__rng_below(prng, 2)], op = ops[mlfab__rng_below(prng, 4)];
  uint32_t width = mlfab__dtype_bytes(dtype), ndst = 1 + (uint32_t)mlfab__rng_below(prng, 3);
  uint32_t k = 1 + (uint32_t)mlfab__rng_below(prng, mlfab__rng_below(prng, 20) ? 6 : INPUTS_MAX);
  uint64_t n = mlfab__min(some_length(prng), ROOM / 8 - 40);
  const void *in[INPUTS_MAX];
  void *dst[3], *expected = x->expected;
  for (uint32_t j = 0; j < k; j++) {
    in[j] = (char *)x->in[j] + width * mlfab__rng_below(prng, 32);
    fill(prng, dtype, (void *)(uintptr_t)in[j], n, mlfab__rng_below(prng, 8) == 0);
  }
  mlfab__kernel_combine_many_with(0, op, dtype, &expected, 1, in, k, n, 0);
  for (uint32_t d = 0; d < ndst; d++) {
    dst[d] = (char *)x->out[d] + width * mlfab__rng_below(prng, 32);
    if (d == 0 && mlfab__rng_below(prng, 2))
      dst[0] = (void *)(uintptr_t)in[mlfab__rng_below(prng, k)];
    memset((char *)dst[d] + n * width, GUARD, 8);
  }
  mlfab__kernel_combine_many_by(MLFAB_KERNELS_CBLAS, op, dtype, dst, ndst, in, k, n, 1);
  for (uint32_t d = 0; d < ndst; d++) {
    if (!same(dtype, dst[d], expected, n))
      fail_msg("%s %s: %u elements of %u inputs, destination %u of %u", mlfab__dtype_name(dtype),
               mlfab__op_name(op), (unsigned)n, k, d, ndst);
    for (int b = 0; b < 8; b++)
      assert_int_equal(((unsigned char *)dst[d])[n * width + (size_t)b], GUARD);
  }
}

TEST(combines_the_same_bits) {
  inputs *x = malloc(sizeof *x);
  mlfab__rng prng;
  assert_non_null(x);
  mlfab__rng_seed(&prng, 12);
  for (uint64_t i = 0; i < test_cases(800); i++) combine_case(&prng, x);
  free(x);
}

/* Types that cblas does not know go the usual way. */
TEST(leaves_other_types) {
  int64_t a[300], b[300], sum[300];
  uint16_t half[300], expected[300];
  for (int i = 0; i < 300; i++) {
    a[i] = i - 7;
    b[i] = 1000 - i;
    half[i] = (uint16_t)(i * 11);
  }
  mlfab__kernel_combine_by(MLFAB_KERNELS_CBLAS, MLFAB_OP_SUM, MLFAB_I64, sum, a, b, 300, 0);
  for (int i = 0; i < 300; i++) assert_int_equal(sum[i], 993);
  mlfab__kernel_combine_with(0, MLFAB_OP_SUM, MLFAB_F16, expected, half, half, 300, 0);
  mlfab__kernel_combine_by(MLFAB_KERNELS_CBLAS, MLFAB_OP_SUM, MLFAB_F16, half, half, half, 300, 0);
  assert_memory_equal(half, expected, sizeof half);
  assert_true(mlfab__kernel_add_by(MLFAB_KERNELS_CBLAS, MLFAB_I64, sum, a, b, 2, 300, 0));
  for (int i = 0; i < 300; i++) assert_int_equal(sum[i], 1993 - i);
  assert_true(mlfab__kernel_norm2_by(MLFAB_KERNELS_CBLAS, MLFAB_I64, a, 2) == 85.0);
}

/* ---- norms ---- */

/* Whatever the order in which a library adds the m squares of a piece, and even if it adds floats, the relative error of
 * the sum is at most m eps / (1 - m eps) to first order, plus that of the root and of its square. The pieces are added
 * in double. Squares of F32 that would be subnormal as floats are left out of this test. */
static double norm_tolerance(int dtype) {
  double eps = dtype == MLFAB_F32 ? 0x1p-24 : 0x1p-53;
  return 1.01 * (MLFAB__CBLAS_MOST + 4) * eps;
}

static void norm_case(mlfab__rng *prng, double *array, double worst[2]) {
  int dtype = dtypes[mlfab__rng_below(prng, 2)];
  uint64_t n = some_length(prng), width = mlfab__dtype_bytes(dtype);
  char *u = (char *)array + width * mlfab__rng_below(prng, 32);
  long double sum = 0;
  for (uint64_t i = 0; i < n; i++) {
    double x = (mlfab__rng_unit(prng) - 0.5) * (mlfab__rng_below(prng, 9) ? 1.0 : 1e8);
    if (dtype == MLFAB_F32)
      ((float *)(void *)u)[i] = (float)x;
    else
      ((double *)(void *)u)[i] = x;
    sum += (long double)element(dtype, u, i) * (long double)element(dtype, u, i);
  }
  double is = mlfab__kernel_norm2_by(MLFAB_KERNELS_CBLAS, dtype, u, n);
  double off = sum > 0 ? (double)fabsl((long double)is - sum) / (double)sum : is;
  if (!(off <= norm_tolerance(dtype)))
    fail_msg("%s, %u elements: %.17g instead of %.17Lg", mlfab__dtype_name(dtype), (unsigned)n, is,
             sum);
  if (off > worst[dtype == MLFAB_F64]) worst[dtype == MLFAB_F64] = off;
}

TEST(norms_are_close) {
  static double array[ROOM];
  double worst[2] = {0, 0};
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 13);
  for (uint64_t i = 0; i < test_cases(500); i++) norm_case(&prng, array, worst);
  print_message("# largest relative error of |u|^2: F32 %.1e, F64 %.1e\n", worst[0], worst[1]);
}

/* A norm beyond the largest float is finite in double, and NaN and infinity arrive. */
TEST(norms_of_extremes) {
  static float u[5000];
  for (int i = 0; i < 5000; i++) u[i] = 3e38f;
  double is = mlfab__kernel_norm2_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, u, 5000);
  double wanted = 5000.0 * (double)u[0] * (double)u[0];
  assert_true(fabs(is - wanted) <= 1e-12 * wanted);
  u[4321] = INFINITY;
  assert_true(isinf(mlfab__kernel_norm2_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, u, 5000)));
  u[17] = NAN;
  assert_true(isnan(mlfab__kernel_norm2_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, u, 5000)));
  assert_true(mlfab__kernel_norm2_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, u, 0) == 0.0);
}

/* ---- threads ---- */

static double seconds(clockid_t clock) {
  struct timespec t;
  assert_int_equal(clock_gettime(clock, &t), 0);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* The processor time of the process, less that of this thread: what the library's threads have used. */
static double others(void) {
  return seconds(CLOCK_PROCESS_CPUTIME_ID) - seconds(CLOCK_THREAD_CPUTIME_ID);
}

static void all_three(float *a, float *b, uint64_t n, int times) {
  const void *in[2] = {a, b};
  void *dst = a;
  for (int i = 0; i < times; i++) {
    assert_true(mlfab__kernel_add_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, a, a, b, 0.5, n, 0));
    mlfab__kernel_combine_many_by(MLFAB_KERNELS_CBLAS, MLFAB_OP_SUM, MLFAB_F32, &dst, 1, in, 2, n,
                                  0);
    assert_true(mlfab__kernel_norm2_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, a, n) >= 0);
  }
}

/* The threads of OpenBLAS exist, and would be used for a vector this long: axpy as a whole shows that they can be seen.
 * They spin for a moment after their work, and after they were started. */
TEST(stays_in_the_calling_thread) {
#ifdef OPENBLAS_VERSION
  const uint64_t n = (uint64_t)1 << 20;
  float *a = calloc(n, sizeof *a), *b = calloc(n, sizeof *b);
  int before = openblas_get_num_threads();
  assert_true(a && b);
  openblas_set_num_threads(4);
  int set = openblas_get_num_threads();
  double start = others();
  for (int i = 0; i < 200; i++) cblas_saxpy((int)n, 0.5f, b, 1, a, 1);
  double seen = others() - start;
  for (double then = -1; others() - then > 0.0005;) {
    then = others();
    usleep(200000);
  }
  start = others();
  double own = seconds(CLOCK_THREAD_CPUTIME_ID);
  all_three(a, b, n, 100);
  own = seconds(CLOCK_THREAD_CPUTIME_ID) - own;
  double used = others() - start;
  print_message(
      "# other threads: %.4f s of a whole axpy with %d threads, %.4f s of ours (%.3f s)\n", seen,
      set, used, own);
  if (set > 1) assert_true(seen > 0.001);
  assert_true(used < 0.02 * own + 0.001);
  assert_int_equal(openblas_get_num_threads(), set);
  openblas_set_num_threads(before);
  free(a);
  free(b);
#else
  (void)others;
  (void)all_three;
  print_message("# not OpenBLAS\n");
  skip();
#endif
}

TESTS(NULL, NULL)
