/* joiner.c - a worker of a fabric that grows while it trains.
 *
 *   joiner WORKERS [COUNT]
 *
 * Every update adds 1 to the elements of its worker's rank. All train until WORKERS ranks have made 20 updates each,
 * as they see in the model; then they call an allreduce until WORKERS workers are in it. One line per worker:
 *   worker R: updates N mean X
 * The exit status is not 0 when a call failed, or an own element has not grown by N. COUNT: elements of the model, for a worker
 * that comes with another model. JOINER_HEIR=1: a worker of this rank was killed while it pushed; servers decide separately, so its
 * last update may be in some elements, at first or later, and not in others. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { USUAL = 1 << 16, UPDATES = 20 };

static int fail(mlfab *fabric, const char *what) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", what, error.text);
  return 1;
}

/* Ranks whose elements show enough updates. */
static uint32_t trained(const float *w, uint32_t ranks) {
  uint32_t n = 0;
  for (uint32_t r = 0; r < ranks; r++) n += w[r] >= (float)UPDATES;
  return n;
}

static int work(mlfab *fabric, uint32_t enough, uint64_t count) {
  int32_t rank;
  uint32_t ranks;
  float *w = calloc(count, sizeof *w), *u = calloc(count, sizeof *u), who[2] = {0, 0};
  float *before = calloc(count, sizeof *before);
  mlfab_buf weights = {0, 0, w, count}, update = {0, 0, u, count};
  const mlfab_sync async = {.size = sizeof async, .kind = MLFAB_SYNC_ASYNC};
  uint64_t updates = 0, wrong = 0;
  if (!w || !u || !before || mlfab_rank(fabric, &rank, &ranks, NULL)) return fail(fabric, "rank");
  for (uint64_t i = (uint64_t)rank; i < count; i += ranks) u[i] = 1.0f;
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, count)) return fail(fabric, "tensor");
  if (mlfab_model_start(fabric, NULL, &weights, 1)) return fail(fabric, "model");
  memcpy(before, w, count * sizeof *w); /* by a worker that had this rank before */
  const int heir = getenv("JOINER_HEIR") != NULL;
  while (trained(w, ranks) < enough) {
    if (mlfab_push(fabric, &update, 1, NULL, NULL)) return fail(fabric, "push");
    updates++;
    if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return fail(fabric, "pull");
    usleep(2000);
  }
  /* Workers that go on for a little must not wait for this one. With BSP all see the same model and stop together. */
  const char *kind = getenv("MLFAB_CONSISTENCY");
  if (kind && !strcmp(kind, "ssp") && mlfab_set_sync(fabric, &async, MLFAB_ALL, MLFAB_ALL, 0))
    return fail(fabric, "set_sync");
  while (who[1] < (float)enough) {
    who[0] = (float)rank;
    who[1] = 1.0f;
    if (mlfab_allreduce(fabric, who, 2, MLFAB_F32, NULL)) return fail(fabric, "allreduce");
  }
  float mean = (float)rank;
  if (mlfab_allreduce_mean(fabric, &mean, 1)) return fail(fabric, "mean");
  if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return fail(fabric, "the last pull");
  for (uint64_t i = (uint64_t)rank; i < count; i += ranks)
    wrong +=
        w[i] - before[i] != (float)updates && !(heir && w[i] - before[i] == (float)(updates + 1));
  if (wrong)
    fprintf(stderr, "worker %d: %llu elements are wrong\n", rank, (unsigned long long)wrong);
  printf("worker %d: updates %llu mean %g\n", rank, (unsigned long long)updates, (double)mean);
  free(w);
  free(u);
  free(before);
  return wrong != 0;
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_error error;
  if (argc < 2) return 2;
  if (mlfab_open_env(&fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int status =
      work(fabric, (uint32_t)atoi(argv[1]), argc > 2 ? strtoull(argv[2], NULL, 10) : USUAL);
  mlfab_close(&fabric);
  return status;
}
