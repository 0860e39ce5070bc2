/* traffic.c - a node that only pushes and pulls, to measure a network's throughput.
 *
 *   traffic SECONDS BYTES [IN_FLIGHT]
 *
 * Its place in the fabric comes from MLFAB_* variables. A worker pulls the model, pushes an update of the
 * same size, and repeats, with at most IN_FLIGHT pushes in progress. At the end each node prints one line:
 *   worker R: applied N dropped N failed N seconds S delay_max D delays C0 C1 ... (how many had delay 0, 1, ...)
 *   server N: applied N commits N groups N delay_max D sum S
 * The model starts at zero, and every update adds 1 to one element of its worker's tensor: the server's sum
 * is the number of applied updates. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { IN_FLIGHT_MAX = 8, DELAYS = 64 };

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

static int serve(mlfab *fabric, const mlfab_config *config) {
  mlfab_stats stats;
  if (mlfab_serve(fabric, 0)) return fail(fabric, "serve");
  mlfab_get_stats(fabric, &stats, sizeof stats);
  if (config->roles == MLFAB_ROLE_SCHEDULER) {
    printf("scheduler: plans %llu grouped %llu dropped %llu\n",
           (unsigned long long)stats.plans_made, (unsigned long long)stats.plans_grouped,
           (unsigned long long)stats.plans_dropped);
    return 0;
  }
  printf(
      "server: applied %llu dropped %llu commits %llu groups %llu failed %llu spreads %llu "
      "delay_max %llu bytes_in %llu\n",
      (unsigned long long)stats.updates_applied, (unsigned long long)stats.updates_dropped,
      (unsigned long long)stats.commits, (unsigned long long)stats.groups_applied,
      (unsigned long long)stats.groups_failed, (unsigned long long)stats.spreads_answered,
      (unsigned long long)stats.delay_max, (unsigned long long)stats.bytes_received);
  return 0;
}

typedef struct tally {
  uint64_t applied, dropped, failed, delay_max, delays[DELAYS];
} tally;

/* Waits for a push and counts its result. */
static int settle(mlfab *fabric, mlfab_request request, tally *t) {
  mlfab_result result;
  memset(&result, 0, sizeof result);
  int code = mlfab_wait(fabric, request, 0, &result);
  if (code == MLFAB_ERR_DROPPED) {
    t->dropped++;
  } else if (code) {
    t->failed++;
    return fail(fabric, "push");
  } else {
    t->applied++;
    t->delays[result.delay < DELAYS ? result.delay : DELAYS - 1]++;
    if (result.delay > t->delay_max) t->delay_max = result.delay;
  }
  return 0;
}

static int work(mlfab *fabric, int32_t rank, double seconds, uint64_t count, uint32_t in_flight) {
  float *weights = calloc(count, sizeof *weights), *update = calloc(count, sizeof *update);
  if (!weights || !update) return fail(NULL, "out of memory");
  update[(uint64_t)rank % count] = 1.0f;
  mlfab_buf model = {MLFAB_ALL, 0, weights, count}, gradient = {MLFAB_ALL, 0, update, count};
  mlfab_request pushes[IN_FLIGHT_MAX];
  uint32_t open = 0, oldest = 0;
  tally t;
  memset(&t, 0, sizeof t);
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, count) || mlfab_model_start(fabric, NULL, NULL, 0))
    return fail(fabric, "model");
  if (mlfab_barrier(fabric, NULL)) return fail(fabric, "barrier");
  double began = seconds_now();
  int status = 0;
  while (!status && seconds_now() - began < seconds) {
    if (mlfab_pull(fabric, &model, 1, NULL, NULL)) status = fail(fabric, "pull");
    if (!status && open == in_flight) {
      status = settle(fabric, pushes[oldest], &t);
      oldest = (oldest + 1) % IN_FLIGHT_MAX;
      open--;
    }
    if (!status &&
        mlfab_push_start(fabric, &gradient, 1, NULL, &pushes[(oldest + open) % IN_FLIGHT_MAX]))
      status = fail(fabric, "push_start");
    if (!status) open++;
  }
  double took = seconds_now() - began;
  for (; open > 0 && !status; open--, oldest = (oldest + 1) % IN_FLIGHT_MAX)
    status = settle(fabric, pushes[oldest], &t);
  printf("worker %d: applied %llu dropped %llu failed %llu seconds %.3f delay_max %llu delays",
         (int)rank, (unsigned long long)t.applied, (unsigned long long)t.dropped,
         (unsigned long long)t.failed, took, (unsigned long long)t.delay_max);
  for (int i = 0; i < DELAYS; i++) printf(" %llu", (unsigned long long)t.delays[i]);
  printf("\n");
  /* No worker leaves before everything is counted: worker 0 reads the sum. */
  if (!status && mlfab_barrier(fabric, NULL)) status = fail(fabric, "barrier");
  if (!status && rank == 0) {
    double sum = 0.0;
    if (mlfab_pull(fabric, &model, 1, NULL, NULL)) status = fail(fabric, "pull");
    for (uint64_t i = 0; i < count; i++) sum += (double)weights[i];
    printf("sum: %.0f\n", sum);
  }
  free(weights);
  free(update);
  return status;
}

int main(int argc, char **argv) {
  double seconds = argc > 1 ? strtod(argv[1], NULL) : 10.0;
  uint64_t count = (argc > 2 ? strtoull(argv[2], NULL, 10) : 4000000) / 4;
  uint32_t in_flight = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 1;
  mlfab *fabric = NULL;
  mlfab_error error;
  mlfab_config config;
  memset(&error, 0, sizeof error);
  mlfab_config_init(&config);
  if (in_flight < 1 || in_flight > IN_FLIGHT_MAX || count == 0) {
    fprintf(stderr, "usage: traffic SECONDS BYTES [IN_FLIGHT, at most %d]\n", IN_FLIGHT_MAX);
    return 2;
  }
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &fabric, &error)) {
    fprintf(stderr, "open: %s\n", error.text);
    return 1;
  }
  int32_t rank = -1;
  mlfab_rank(fabric, &rank, NULL, NULL);
  int served = config.roles == MLFAB_ROLE_SERVER || config.roles == MLFAB_ROLE_SCHEDULER;
  int status = served ? serve(fabric, &config) : work(fabric, rank, seconds, count, in_flight);
  mlfab_close(&fabric);
  return status;
}
