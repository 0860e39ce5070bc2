/* test_split.c - how arrays are cut for cblas, whose functions this program replaces: every call has at most
 * MLFAB__CBLAS_MOST elements and increments of 1, and the calls cover the array once, also one of more than INT_MAX
 * elements. The functions here only count, so such an array is not touched. */
#include "core/kernels/kernels_combine.h"

#include <limits.h>
#include <sys/mman.h>
#include <cblas.h>
#include "../testing.h"

static struct {
  uint64_t calls, elements, largest;
  uintptr_t first, next; /* addresses of the array that is covered */
  int gaps;
} seen;

/* A call of n elements at this address. */
static void see(long n, const void *at, size_t width, long increment) {
  assert_int_equal(increment, 1);
  assert_true(n > 0 && n <= (long)MLFAB__CBLAS_MOST);
  if (seen.calls == 0) seen.first = (uintptr_t)at;
  if (seen.calls > 0 && (uintptr_t)at != seen.next) seen.gaps++;
  seen.next = (uintptr_t)at + (size_t)n * width;
  seen.calls++;
  seen.elements += (uint64_t)n;
  if ((uint64_t)n > seen.largest) seen.largest = (uint64_t)n;
}

static void forget(void) { memset(&seen, 0, sizeof seen); }

#ifdef OPENBLAS_VERSION
typedef blasint length;
#else
typedef int length;
#endif

/* In their place. */
void cblas_saxpy(const length n, const float a, const float *x, const length incx, float *y,
                 const length incy) {
  assert_true(a == 1.0f && incy == 1 && x != y);
  see(n, x, sizeof *x, incx);
}
void cblas_daxpy(const length n, const double a, const double *x, const length incx, double *y,
                 const length incy) {
  assert_true(a == 1.0 && incy == 1 && x != y);
  see(n, x, sizeof *x, incx);
}
void cblas_sscal(const length n, const float a, float *x, const length incx) {
  assert_true(a != 0.0f && a != 1.0f && incx == 1 && n <= (length)MLFAB__CBLAS_MOST && x != NULL);
}
void cblas_dscal(const length n, const double a, double *x, const length incx) {
  assert_true(a != 0.0 && a != 1.0 && incx == 1 && n <= (length)MLFAB__CBLAS_MOST && x != NULL);
}
float cblas_snrm2(const length n, const float *x, const length incx) {
  see(n, x, sizeof *x, incx);
  return 2.0f;
}
double cblas_dnrm2(const length n, const double *x, const length incx) {
  see(n, x, sizeof *x, incx);
  return 2.0;
}

static void covers(uint64_t n, const void *array) {
  uint64_t calls = (n + MLFAB__CBLAS_MOST - 1) / MLFAB__CBLAS_MOST;
  assert_int_equal(seen.calls, calls);
  assert_int_equal(seen.elements, n);
  assert_int_equal(seen.gaps, 0);
  if (n > 0) assert_true(seen.first == (uintptr_t)array);
  if (n >= MLFAB__CBLAS_MOST) assert_int_equal(seen.largest, MLFAB__CBLAS_MOST);
}

static const uint64_t lengths[] = {0,    1,    2047, 2048,  2049,  4095,
                                   4096, 4097, 9999, 10001, 65536, 100003};

TEST(cuts_additions) {
  float *w = calloc(100003, sizeof *w), *u = calloc(100003, sizeof *u);
  const void *in[2] = {w, u};
  void *dst = w;
  assert_true(w && u);
  for (size_t i = 0; i < MLFAB__COUNT(lengths); i++) {
    forget();
    assert_true(mlfab__kernel_add_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, w, w, u, 1.0, lengths[i], 0));
    covers(lengths[i], u);
    forget();
    assert_true(mlfab__kernel_add_by(MLFAB_KERNELS_CBLAS, MLFAB_F32, u, w, u, 2.0, lengths[i], 0));
    covers(lengths[i], w);
    forget();
    assert_true(
        mlfab__kernel_add_by(MLFAB_KERNELS_CBLAS, MLFAB_F64, w, w, u, 1.0, lengths[i] / 2, 0));
    covers(lengths[i] / 2, u);
    forget();
    mlfab__kernel_combine_many_by(MLFAB_KERNELS_CBLAS, MLFAB_OP_SUM, MLFAB_F32, &dst, 1, in, 2,
                                  lengths[i], 0);
    covers(lengths[i], u);
  }
  free(w);
  free(u);
}

/* Pages that nobody may touch. */
TEST(cuts_more_than_an_int_holds) {
  const uint64_t n = (uint64_t)INT_MAX + 5000;
  void *array = mmap(NULL, n * 8, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (array == MAP_FAILED) {
    print_message("# no address space\n");
    skip();
  }
  for (int dtype = MLFAB_F32; dtype <= MLFAB_F64; dtype++) {
    forget();
    double sum = mlfab__kernel_norm2_by(MLFAB_KERNELS_CBLAS, dtype, array, n);
    covers(n, array);
    assert_true(sum == 4.0 * (double)seen.calls);
  }
  munmap(array, n * 8);
}

TESTS(NULL, NULL)
