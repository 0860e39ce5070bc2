/* kernels_cblas.c - the row of cblas: OpenBLAS, or another library with cblas.h.
 *
 * For: adding and scaling by axpy and scal, norms by nrm2. config.kernels alone decides which arrays take this way,
 * without measurements. kernels.c cuts arrays and passes pieces.
 *
 * Invariants:
 *  (C1) Sums and products have the bits of the other rows, except that of two NaNs either may stay. scal rounds a
 *       product. axpy, which some libraries fuse, is called with a factor of 1, so its product is exact.
 *  (C2) A call has at most MLFAB__CBLAS_MOST elements. OpenBLAS computes such vectors in the calling thread (its axpy
 *       uses threads from 10,001 elements on, scal from 1,048,577 on, nrm2 never or from 10,001 on), so mlfab neither
 *       reads nor changes the number of threads, which the program sets. The reference library has no threads. Other
 *       libraries may use theirs.
 *  (C3) The two arrays of an axpy differ: an input that is also the destination is copied first. If only the first
 *       input is the destination, the sums grow in it instead.
 *  (C4) |u|^2 is the square of nrm2, so it has the relative error of a float for F32. If it is infinite or NaN, our own
 *       kernels, whose sum is a double, do the elements.
 * cblas is called with increments of 1 only. It allocates nothing for such calls.
 *
 * Source: Lawson, Hanson, Kincaid and Krogh, "Basic Linear Algebra Subprograms for Fortran Usage", 1979. */
#include "kernels.h"

#if MLFAB_WITH_CBLAS

#include <cblas.h>

#define CBLAS_ROW(name, real, axpy, scal, nrm2)                                                 \
  static int name##_add(void *to, const void *from, const void *what, double scale, uint64_t n, \
                        int stream) {                                                           \
    real *dst = (real *)to, product[MLFAB__CBLAS_MOST];                                         \
    const real s = (real)scale;                                                                 \
    const size_t bytes = (size_t)n * sizeof(real);                                              \
    (void)stream;                                                                               \
    if (from == NULL || dst != (const real *)from) {                                            \
      /* dst = s * u, then + w. */                                                              \
      if (dst != (const real *)what) memcpy(dst, what, bytes);                                  \
      if (s != 1) scal((int)n, s, dst, 1);                                                      \
      if (from != NULL) axpy((int)n, 1, (const real *)from, 1, dst, 1);                         \
    } else {                                                                                    \
      const real *u = (const real *)what;                                                       \
      if (s != 1 || u == dst) u = (const real *)memcpy(product, what, bytes);                   \
      if (s != 1) scal((int)n, s, product, 1);                                                  \
      axpy((int)n, 1, u, 1, dst, 1);                                                            \
    }                                                                                           \
    return 1;                                                                                   \
  }                                                                                             \
  static void name##_combine(int op, void *const *dst, uint32_t ndst, uint64_t past,            \
                             const void *const *in, uint32_t k, uint64_t from, uint64_t to) {   \
    real stage[MLFAB__CBLAS_MOST], *sum = stage;                                                \
    const size_t bytes = (size_t)(to - from) * sizeof(real);                                    \
    uint32_t first = dst[0] == in[0]; /* the first destination to copy to */                    \
    (void)op;                                                                                   \
    (void)past;                                                                                 \
    for (uint32_t j = 1; j < k; j++) first &= dst[0] != in[j];                                  \
    if (first)                                                                                  \
      sum = (real *)dst[0] + from;                                                              \
    else                                                                                        \
      memcpy(sum, (const real *)in[0] + from, bytes);                                           \
    for (uint32_t j = 1; j < k; j++)                                                            \
      axpy((int)(to - from), 1, (const real *)in[j] + from, 1, sum, 1);                         \
    for (uint32_t d = first; d < ndst; d++) memcpy((real *)dst[d] + from, sum, bytes);          \
  }                                                                                             \
  static double name##_norm2(const void *u, uint64_t n, uint64_t *done_p) {                     \
    double norm = (double)nrm2((int)n, (const real *)u, 1);                                     \
    *done_p = mlfab__finite(norm * norm) ? n : 0;                                               \
    return norm * norm;                                                                         \
  }

CBLAS_ROW(cblas_f32, float, cblas_saxpy, cblas_sscal, cblas_snrm2)
CBLAS_ROW(cblas_f64, double, cblas_daxpy, cblas_dscal, cblas_dnrm2)

MLFAB__INTERNAL const mlfab__kernels *mlfab__kernels_cblas(void) {
  static const mlfab__kernels row = {
      .add = {[MLFAB_F32] = cblas_f32_add, [MLFAB_F64] = cblas_f64_add},
      .combine = {[MLFAB_F32] = cblas_f32_combine, [MLFAB_F64] = cblas_f64_combine},
      .norm2 = {[MLFAB_F32] = cblas_f32_norm2, [MLFAB_F64] = cblas_f64_norm2}};
  return &row;
}

#endif
