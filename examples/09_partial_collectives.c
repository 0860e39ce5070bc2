/* 09_partial_collectives.c - reductions that do not wait for all: four workers, the last of which is slow.
 *
 * Shows:  mlfab_partial_open, _reduce, _flush and _close. An allreduce is as slow as the slowest worker. SOLO starts
 *         when the first worker calls, MAJORITY when a worker drawn from the seed calls, QUORUM when enough have
 *         called. A late contribution is in the next sum, or in the flush at the end: nothing is lost.
 * Build:  cc -O2 -o 09_partial_collectives 09_partial_collectives.c mlfab.o -lpthread -lm
 * Run:    build/mlfab-run -n 4 -s 0 build/examples/09_partial_collectives
 * SPDX-License-Identifier: MIT
 */
#define _POSIX_C_SOURCE 200809L
#include "mlfab_partial.h"

#include <stdio.h>
#include <time.h>

enum { STEPS = 8, QUICK_MS = 5, SLOW_MS = 40, RANKS_MAX = 8 };

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* Computes for a while. The result is a 1 in this worker's byte of the sum. */
static int64_t compute(int rank, int slow) {
  struct timespec t = {0, 1000000L * (slow ? SLOW_MS : QUICK_MS)};
  nanosleep(&t, NULL);
  return (int64_t)1 << (8 * rank);
}

/* The workers in a step's sum: "012." is all but the last of four. */
static void show(const mlfab_partial_info *info, uint32_t workers) {
  for (uint32_t r = 0; r < workers; r++) putchar(info->bitmap[0] >> r & 1 ? (int)('0' + r) : '.');
  putchar(' ');
}

static int full(mlfab *fabric, int rank, int slow) {
  double begin = now_ms();
  for (int step = 0; step < STEPS; step++) {
    int64_t sum = compute(rank, slow);
    if (mlfab_allreduce(fabric, &sum, 1, MLFAB_I64, NULL)) return 1;
  }
  if (rank == 0) printf("%-10s %4.0f ms, everybody in every step\n", "full", now_ms() - begin);
  return 0;
}

static int partial(mlfab *fabric, int rank, int slow, const char *name, uint32_t mode) {
  mlfab_partial_options options = {.size = sizeof options, .mode = mode, .quorum = 3};
  mlfab_partial_info info[STEPS];
  uint32_t workers, id;
  int64_t total = 0, rest = 0, all = 0;
  options.results =
      MLFAB_PARTIAL_QUEUED; /* every round's result once, in order: no worker misses one */
  if (mlfab_rank(fabric, NULL, &workers, NULL)) return 1;
  if (mlfab_partial_open(fabric, 1, MLFAB_I64, &options, &id)) return 1; /* waits for all */
  double begin = now_ms();
  for (int step = 0; step < STEPS; step++) {
    int64_t sum = compute(rank, slow);
    info[step].size = sizeof info[step];
    if (mlfab_partial_reduce(fabric, id, &sum, 0, &info[step])) return 1;
    total += sum; /* a trainer would apply it to its weights */
  }
  double took = now_ms() - begin;
  /* Contributions that were too late for the last round. */
  if (mlfab_partial_flush(fabric, id, &rest, 0) || mlfab_partial_close(fabric, id)) return 1;
  for (uint32_t r = 0; r < workers; r++) all += (int64_t)STEPS << (8 * r);
  if (rank == 0) {
    printf("%-10s %4.0f ms, active: ", name, took);
    for (int step = 0; step < STEPS; step++) show(&info[step], workers);
    printf("%s\n", total + rest == all ? "and nothing was lost" : "something was lost");
  }
  return total + rest != all;
}

int main(void) {
  mlfab *fabric = NULL;
  mlfab_error error;
  if (mlfab_open_env(&fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int32_t rank = 0;
  uint32_t workers = 0;
  mlfab_rank(fabric, &rank, &workers, NULL);
  int slow = rank + 1 == (int)workers;
  if (workers < 3 || workers >= RANKS_MAX) {
    fprintf(stderr, "start it with 3 to 7 workers: mlfab-run -n 4 -s 0 ...\n");
    mlfab_close(&fabric);
    return 2;
  }
  int status = full(fabric, rank, slow) ||
               partial(fabric, rank, slow, "solo", MLFAB_PARTIAL_SOLO) ||
               partial(fabric, rank, slow, "majority", MLFAB_PARTIAL_MAJORITY) ||
               partial(fabric, rank, slow, "quorum(3)", MLFAB_PARTIAL_QUORUM);
  if (status && !mlfab_last_error(fabric, &error)) fprintf(stderr, "%s\n", error.text);
  mlfab_close(&fabric);
  return status;
}
