/* 01_push_pull.c - two workers and a server as real processes over TCP: push, then pull.
 *
 * Shows:  the calls that every trainer needs: config from the environment, open, model, push, barrier,
 *         pull, close. A push or pull of a list of buffers (here two tensors) is one operation.
 * Build:  cc -O2 -o 01_push_pull 01_push_pull.c mlfab.o -lpthread -lm
 * Run:    build/mlfab-run -n 2 -s 1 --tcp build/examples/01_push_pull
 *         (--shm instead of --tcp moves the same bytes through shared memory)
 *
 * SPDX-License-Identifier: MIT
 */
#include "example.h"

#include <stdio.h>

enum { MATRIX = 1000 * 100, BIAS = 100 };

static float matrix[MATRIX], bias[BIAS];               /* the weights, as last pulled */
static float matrix_update[MATRIX], bias_update[BIAS]; /* the update */

/* Every worker defines the same model; all start with worker 0's weights. */
static int define(mlfab *fabric, const mlfab_buf *weights) {
  int status = mlfab_tensor_add(fabric, 0, MLFAB_F32, MATRIX);
  if (!status) status = mlfab_tensor_add(fabric, 1, MLFAB_F32, BIAS);
  return status ? status : mlfab_model_start(fabric, NULL, weights, 2);
}

static int push_and_pull(mlfab *fabric) {
  mlfab_buf weights[] = {{0, 0, matrix, MATRIX}, {1, 0, bias, BIAS}};
  mlfab_buf update[] = {{0, 0, matrix_update, MATRIX}, {1, 0, bias_update, BIAS}};
  int32_t rank;
  uint32_t workers;
  int status = mlfab_rank(fabric, &rank, &workers, NULL);
  if (status || (status = define(fabric, weights))) return status;

  /* Worker r adds r + 1 to the matrix, and half of that to the bias, ten times. An update's delay is
   * the number of updates that were applied since this worker's last pull. */
  for (int i = 0; i < MATRIX; i++) matrix_update[i] = (float)(rank + 1);
  for (int i = 0; i < BIAS; i++) bias_update[i] = 0.5f * (float)(rank + 1);
  for (int step = 0; step < 10; step++) {
    mlfab_result result;
    if ((status = mlfab_push(fabric, update, 2, NULL, &result))) return status;
    printf("worker %d: push %d is applied, version %llu, delay %llu\n", (int)rank, step,
           (unsigned long long)result.version, (unsigned long long)result.delay);
  }

  /* When all workers are here, all pushes are applied. */
  if ((status = mlfab_barrier(fabric, NULL))) return status;
  if ((status = mlfab_pull(fabric, weights, 2, NULL, NULL))) return status;
  float expected = 5.0f * (float)(workers * (workers + 1));
  printf("worker %d: pulled %g and %g, expected %g and %g\n", (int)rank, (double)matrix[MATRIX - 1],
         (double)bias[0], (double)expected, 0.5 * (double)expected);
  return matrix[MATRIX - 1] == expected && bias[0] == 0.5f * expected ? 0 : MLFAB_ERR_INTERNAL;
}

int main(void) { return example_main(push_and_pull); }
