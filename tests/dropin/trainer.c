/* trainer.c - the small trainer that the drop-in test builds in an empty folder beside the two files. Alone
 * it is a world of one; under mlfab-run it is distributed. Exits with 0 when the model is as expected and
 * an update with a NaN was refused as a whole. */
#include "mlfab.h"

#include <stdio.h>
#include <string.h>

enum { COUNT = 1000, STEPS = 200 };

static float w[COUNT], g[COUNT], before[COUNT];

/* Sets the bits: under -Ofast a compiler may assume that there is no NaN. */
static void put_nan(float *at) {
  uint32_t bits = 0x7fc00000u;
  memcpy(at, &bits, sizeof bits);
}

static int failed(mlfab *fabric, const char *what) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", what, error.text);
  return 1;
}

static int train(mlfab *fabric) {
  mlfab_buf weights = {MLFAB_ALL, 0, w, COUNT}, update = {MLFAB_ALL, 0, g, COUNT};
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  options.scale = -0.05;
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT)) return failed(fabric, "tensor_add");
  if (mlfab_model_start(fabric, NULL, &weights, 1)) return failed(fabric, "model_start");
  for (int step = 0; step < STEPS; step++) {
    if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return failed(fabric, "pull");
    for (int i = 0; i < COUNT; i++) g[i] = w[i] - 1.0f;
    if (mlfab_push(fabric, &update, 1, &options, NULL)) return failed(fabric, "push");
  }
  if (mlfab_barrier(fabric, NULL)) return failed(fabric, "barrier");
  if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return failed(fabric, "pull");
  for (int i = 0; i < COUNT; i++)
    if (!(w[i] > 0.999f && w[i] < 1.001f)) return failed(NULL, "the model is not near 1");

  put_nan(&g[COUNT / 2]);
  memcpy(before, w, sizeof w);
  int code = mlfab_push(fabric, &update, 1, &options, NULL);
  if (code != MLFAB_ERR_NOT_FINITE) return failed(NULL, "a NaN was not refused");
  if (mlfab_pull(fabric, &weights, 1, NULL, NULL)) return failed(fabric, "pull");
  if (memcmp(before, w, sizeof w) != 0) return failed(NULL, "a refused update changed the model");
  return 0;
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
  if (status == 0) puts("trained, and a NaN was refused");
  return status;
}
