/* checkpointer.c - a worker of checkpoint_test.py, which is killed at random times and goes on from a checkpoint.
 *
 * Each push adds 1 to every element of the model. So an element is the number of updates that were applied to its
 * slice, which is the slice's version. Lines on stdout:
 *
 *   begin <checkpoint> <version> <least> <largest> <stretches>   after mlfab_model_start, by worker 0: the checkpoint
 *                                 that the model began as, and the elements; stretches of equal ones
 *   pushed <number>               after every 20th push
 *
 * Usage: checkpointer <elements> */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>

static int failed(mlfab *fabric, const char *what, int code) {
  mlfab_error error = {0};
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s: %s\n", what, mlfab_error_name(code), error.text);
  return 1;
}

static void tell_begin(const mlfab_checkpoint_info *info, const int64_t *w, uint64_t n) {
  int64_t least = w[0], most = w[0];
  uint64_t stretches = 1;
  for (uint64_t i = 1; i < n; i++) {
    if (w[i] < least) least = w[i];
    if (w[i] > most) most = w[i];
    stretches += w[i] != w[i - 1];
  }
  printf("begin %llu %llu %lld %lld %llu\n", (unsigned long long)info->number,
         (unsigned long long)info->version, (long long)least, (long long)most,
         (unsigned long long)stretches);
  fflush(stdout);
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_error error;
  int32_t rank = 0;
  uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000;
  int64_t *w = calloc(n, sizeof *w), *u = calloc(n, sizeof *u);
  if (!w || !u) return 1;
  for (uint64_t i = 0; i < n; i++) u[i] = 1;
  if (mlfab_open_env(&fabric, &error)) {
    fprintf(stderr, "open: %s\n", error.text);
    return 1;
  }
  mlfab_rank(fabric, &rank, NULL, NULL);
  mlfab_buf model = {7, 0, w, n}, update = {7, 0, u, n};
  mlfab_checkpoint_info info = {.size = sizeof info};
  int code = mlfab_tensor_add(fabric, 7, MLFAB_I64, n);
  if (!code) code = mlfab_model_start(fabric, NULL, &model, 1);
  if (!code) code = mlfab_restored(fabric, &info);
  if (code) return failed(fabric, "model", code);
  /* All workers have started: nobody pushes before worker 0 has looked. */
  if (rank == 0) tell_begin(&info, w, n);
  code = mlfab_barrier(fabric, NULL);
  for (uint64_t i = 1; !code; i++) {
    code = mlfab_push(fabric, &update, 1, NULL, NULL);
    if (i % 20 == 0) printf("pushed %llu\n", (unsigned long long)i);
    if (i % 20 == 0) fflush(stdout);
  }
  return failed(fabric, "push", code);
}
