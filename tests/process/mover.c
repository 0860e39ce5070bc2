/* mover.c - a worker that pushes and pulls all the time while slices move between servers.
 *
 *   mover SECONDS COUNT
 *
 * Start it with mlfab-run -s 4. Every update adds 1 to every element of its worker's tensor: at the end
 * each worker sees in the model how often each of its updates was applied to each slice. Worker 0 changes
 * the set of servers that hold the model, again and again, from one to all and back. One line per worker:
 *   worker R: applied N moves N (worker 0's)
 * The exit status is not 0 when a call failed or an element is not N. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double seconds_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int fail(mlfab *fabric, const char *what) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", what, error.text);
  return 1;
}

/* The next set of servers in turn: one, all, two, all. */
static int move(mlfab *fabric, uint32_t servers, int turn) {
  static const uint32_t order[] = {0, 1, 2, 3, 4, 5, 6, 7}, two[] = {1, 0};
  uint32_t all = servers < 8 ? servers : 8;
  if (turn % 4 == 0) return mlfab_set_servers(fabric, order, 1, 0);
  if (turn % 4 == 2) return mlfab_set_servers(fabric, two, all < 2 ? 1 : 2, 0);
  return mlfab_set_servers(fabric, order, all, 0);
}

static int work(mlfab *fabric, double seconds, uint64_t count) {
  int32_t rank;
  uint32_t workers, servers;
  float *w = calloc(count, sizeof *w), *u = calloc(count, sizeof *u);
  mlfab_buf weights = {0, 0, w, count}, update = {0, 0, u, count};
  mlfab_model_options options = {.size = sizeof options, .active = 1, .slices = 64};
  uint64_t applied = 0, moves = 0, wrong = 0;
  if (!w || !u || mlfab_rank(fabric, &rank, &workers, &servers)) return fail(fabric, "rank");
  for (uint64_t i = (uint64_t)rank; i < count; i += workers) u[i] = 1.0f;
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, count)) return fail(fabric, "tensor");
  if (mlfab_model_start(fabric, &options, NULL, 0)) return fail(fabric, "model");
  for (double end = seconds_now() + seconds; seconds_now() < end;) {
    if (rank == 0 && applied % 8 == 7 && move(fabric, servers, (int)++moves))
      return fail(fabric, "set_servers");
    if (mlfab_push(fabric, &update, 1, NULL, NULL)) return fail(fabric, "push");
    applied++;
    if (applied % 3 == 0 && mlfab_pull(fabric, &weights, 1, NULL, NULL))
      return fail(fabric, "pull");
  }
  if (mlfab_barrier(fabric, NULL)) return fail(fabric, "barrier");
  if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return fail(fabric, "the last pull");
  for (uint64_t i = (uint64_t)rank; i < count; i += workers) wrong += w[i] != (float)applied;
  printf("worker %d: applied %llu moves %llu\n", (int)rank, (unsigned long long)applied,
         (unsigned long long)moves);
  if (wrong)
    fprintf(stderr, "worker %d: %llu elements are not %llu\n", (int)rank, (unsigned long long)wrong,
            (unsigned long long)applied);
  free(w);
  free(u);
  return wrong != 0;
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_config config;
  mlfab_error error;
  if (argc < 3) return 2;
  mlfab_config_init(&config);
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int status = work(fabric, atof(argv[1]), strtoull(argv[2], NULL, 10));
  mlfab_close(&fabric);
  return status;
}
