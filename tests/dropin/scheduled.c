/* scheduled.c - pushes and pulls that a scheduler plans, with a filter: for builds with both (the profile `core`). Run it with
 * mlfab-run --scheduler=beside. Exits with 0 when the model is as expected, and plans and the filter were in use. */
#include "mlfab.h"

#include <stdio.h>
#include <string.h>

enum { COUNT = 1 << 18, STEPS = 10 };

static float w[COUNT], g[COUNT];

static int failed(mlfab *fabric, const char *what) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", what, error.text);
  return 1;
}

/* Halves hold every update exactly, so the sum is exact. */
static int train(mlfab *fabric) {
  mlfab_buf weights = {MLFAB_ALL, 0, w, COUNT}, update = {MLFAB_ALL, 0, g, COUNT};
  mlfab_filter filter = {.size = sizeof filter, .half = MLFAB_HALF_F16};
  mlfab_stats stats;
  int32_t rank = 0;
  uint32_t workers = 0;
  if (mlfab_rank(fabric, &rank, &workers, NULL)) return failed(fabric, "rank");
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT)) return failed(fabric, "tensor_add");
  if (mlfab_model_start(fabric, NULL, &weights, 1)) return failed(fabric, "model_start");
  if (mlfab_set_link(fabric, 1e9, 1e9)) return failed(fabric, "set_link");
  if (mlfab_set_filter(fabric, MLFAB_ALL, &filter)) return failed(fabric, "set_filter");
  for (int i = 0; i < COUNT; i++) g[i] = (float)(i % 64) * (float)(rank + 1);
  for (int step = 0; step < STEPS; step++) {
    if (mlfab_push(fabric, &update, 1, NULL, NULL)) return failed(fabric, "push");
    if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return failed(fabric, "pull");
  }
  if (mlfab_barrier(fabric, NULL)) return failed(fabric, "barrier");
  if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return failed(fabric, "pull");
  float sum = (float)(STEPS * workers * (workers + 1) / 2);
  for (int i = 0; i < COUNT; i++)
    if (w[i] != (float)(i % 64) * sum) return failed(NULL, "a wrong sum");
  if (mlfab_get_stats(fabric, &stats, sizeof stats)) return failed(fabric, "stats");
  if (stats.filter_bytes * 3 > stats.filter_raw_bytes * 2)
    return failed(NULL, "the filter has not shortened updates");
  if (rank == 0 && stats.plans_made == 0) return failed(NULL, "nothing was planned");
  return mlfab_barrier(fabric, NULL) ? failed(fabric, "barrier") : 0;
}

int main(void) {
  mlfab *fabric = NULL;
  mlfab_error error;
  if (mlfab_open_env(&fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int status = train(fabric);
  mlfab_close(&fabric);
  if (status == 0) puts("planned");
  return status;
}
