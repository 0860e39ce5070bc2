/* stepper.c - a worker that pushes and pulls, for the tests of telemetry.
 *
 *   stepper ELEMENTS ITERATIONS [SLOW_RANK SLOW_MS]
 *
 * Its place and the consistency come from MLFAB_* variables. Each iteration pulls the model, pushes an update of 1.0 for
 * every element, and adds one number over all workers. The slow rank sleeps before each iteration. A dropped update is
 * no failure. At the end it prints its counters and closes. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int fail(mlfab *fabric, const char *what) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", what, error.text);
  return 1;
}

static int step(mlfab *fabric, mlfab_buf *weights, mlfab_buf *update) {
  float one = 1.0f;
  if (mlfab_pull(fabric, weights, 1, NULL, NULL)) return fail(fabric, "pull");
  int code = mlfab_push(fabric, update, 1, NULL, NULL);
  if (code && code != MLFAB_ERR_DROPPED) return fail(fabric, "push");
  if (mlfab_allreduce(fabric, &one, 1, MLFAB_F32, NULL)) return fail(fabric, "allreduce");
  return 0;
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_error error;
  int32_t rank = 0;
  if (argc != 3 && argc != 5) return 2;
  uint64_t elements = strtoull(argv[1], NULL, 10);
  int iterations = atoi(argv[2]), slow = argc == 5 ? atoi(argv[3]) : -1;
  long ms = argc == 5 ? atol(argv[4]) : 0;
  struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
  float *w = calloc(elements, sizeof *w), *u = calloc(elements, sizeof *u);
  if (!w || !u) return 1;
  for (uint64_t i = 0; i < elements; i++) u[i] = 1.0f;
  if (mlfab_open_env(&fabric, &error)) {
    fprintf(stderr, "open: %s\n", error.text);
    return 1;
  }
  mlfab_rank(fabric, &rank, NULL, NULL);
  mlfab_buf weights = {0, 0, w, elements}, update = {0, 0, u, elements};
  int status = mlfab_tensor_add(fabric, 0, MLFAB_F32, elements) ||
               mlfab_model_start(fabric, NULL, &weights, 1);
  if (status) fail(fabric, "model");
  for (int i = 0; i < iterations && !status; i++) {
    if (rank == slow) nanosleep(&pause, NULL);
    status = step(fabric, &weights, &update);
    if (!status && i == 0) printf("began\n");
    fflush(stdout);
  }
  if (!status) status = mlfab_finish(fabric, 0) ? fail(fabric, "finish") : 0;
  mlfab_stats stats;
  mlfab_get_stats(fabric, &stats, sizeof stats);
  printf("pushes %llu pulls %llu collectives %llu\n", (unsigned long long)stats.pushes_started,
         (unsigned long long)stats.pulls_finished, (unsigned long long)stats.collectives);
  mlfab_close(&fabric);
  free(w);
  free(u);
  return status;
}
