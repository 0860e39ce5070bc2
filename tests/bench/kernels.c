/* kernels.c - adding, reducing and norms, the own kernels beside cblas: bench-kernels [FILE.tsv] [--quick]
 *
 * float32, one core, arrays from 4 KB (in the L1 cache) to 64 MB (in memory). Figures are bytes of one of the arrays a second.
 * Beside each: the rate of memcpy of such an array in the same run, and the same operation by cblas as config.kernels
 * takes it (in pieces, products checked), which is left out where make has not found a cblas. All take a trial each in
 * turns, in another order each time; medians are reported.
 *
 *    kernels/add/SIZE      dst += 0.5 * u, all of u checked to be finite: what a server does with an update
 *    kernels/reduce/SIZE   dst = dst + u: what a step of an allreduce does
 *    kernels/norm/SIZE     the sum of squares
 *
 * It links the parts, since none of this is in the public header, and so is a program of its own; rows are
 * appended to FILE.tsv in the format of bench.c. */
#include "core/kernels/kernels_combine.h"
#include "single.h"

enum { TRIALS_MAX = 31, LARGEST = 64 << 20 };
enum { ADD, REDUCE, NORM, OPERATIONS };

static int trials;
static float *weights, *update, *other;
static volatile double kept; /* so that no norm is left out */

static float *filled(float value) {
  float *array = memory(LARGEST);
  for (uint64_t i = 0; i < LARGEST / sizeof *array; i++) array[i] = value;
  return array;
}

/* Seconds of one operation on n elements: the mean of `turns`. */
static double timed(int operation, uint32_t kernels, uint64_t n, uint64_t turns) {
  double begin = cpu_now();
  for (uint64_t t = 0; t < turns; t++) {
    if (operation == ADD)
      require(mlfab__kernel_add_by(kernels, MLFAB_F32, weights, weights, update, 0.5, n, 0), "sum");
    if (operation == REDUCE)
      mlfab__kernel_combine_by(kernels, MLFAB_OP_SUM, MLFAB_F32, weights, weights, update, n, 0);
    if (operation == NORM) kept = mlfab__kernel_norm2_by(kernels, MLFAB_F32, update, n);
  }
  return (cpu_now() - begin) / (double)turns;
}

static double timed_copy(uint64_t n, uint64_t turns) {
  double begin = cpu_now();
  for (uint64_t t = 0; t < turns; t++) {
    memcpy(other, update, n * sizeof *update);
    kept = (double)other[t % n];
  }
  return (cpu_now() - begin) / (double)turns;
}

/* All contestants' trials in turns; the first one of each is a warm-up and is not counted. */
static void measure(int operation, uint64_t bytes) {
  static const char *const names[OPERATIONS] = {"add", "reduce", "norm"};
  double own[TRIALS_MAX], cblas[TRIALS_MAX], copy[TRIALS_MAX], size = (double)bytes * 1e-9;
  uint64_t n = bytes / sizeof *update, turns = ((uint64_t)64 << 20) / bytes;
  int there = MLFAB_WITH_CBLAS;
  char name[32];
  for (int t = -1; t < trials; t++) {
    int at = t < 0 ? 0 : t;
    /* In another order each time: a contestant finds in the caches what the one before has left. */
    for (int k = 0; k < 3; k++) {
      int who = (at + k) % 3;
      if (who == 0) own[at] = timed(operation, MLFAB_KERNELS_OWN, n, turns);
      if (who == 1 && there) cblas[at] = timed(operation, MLFAB_KERNELS_CBLAS, n, turns);
      if (who == 2) copy[at] = timed_copy(n, turns);
    }
  }
  double ours = size / median(own, trials), limit = size / median(copy, trials);
  double theirs = there ? size / median(cblas, trials) : 0;
  snprintf(name, sizeof name, "kernels/%s/%u%s", names[operation],
           (unsigned)(bytes >> (bytes < 1 << 20 ? 10 : 20)), bytes < 1 << 20 ? "KB" : "MB");
  printf("%-24s %9.2f GB/s       memcpy %.2f (%.2fx)", name, ours, limit, ours / limit);
  if (there) printf("  cblas %.2f (%.2fx)", theirs, ours / theirs);
  printf("\n");
  row(name, ours, "GB/s", there ? "cblas" : NULL, theirs, "memcpy", limit);
}

int main(int argc, char **argv) {
  static const uint64_t sizes[] = {4096, 32768, 262144, 2 << 20, 16 << 20, LARGEST};
  single_open(argc, argv);
  trials = quick ? 3 : 15;
  weights = filled(1.0f);
  update = filled(1e-3f);
  other = filled(0.0f);
  for (int operation = ADD; operation < OPERATIONS; operation++)
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) measure(operation, sizes[i]);
  single_close();
  free(weights);
  free(update);
  free(other);
  return 0;
}
