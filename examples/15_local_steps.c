/* 15_local_steps.c - train locally, push the difference: a trainer for slow networks.
 *
 * Each worker pulls the model, makes 50 steps of SGD on a copy of its own, and pushes the difference between its copy
 * and the pulled weights. The server adds the mean of all differences to the model (BSP with `mean`). Bytes and waiting
 * fall to a fiftieth of those of 03_trainer.c, which pushes every gradient.
 * Shows:  a push of any difference, not only of a gradient; `mean`, so that the learning rate does not depend on the
 *         number of workers; the model on held-out samples after each round.
 * Build:  cc -O2 -o 15_local_steps 15_local_steps.c mlfab.o -lpthread -lm
 * Run:    build/mlfab-run -n 4 -s 1 build/examples/15_local_steps
 * Then:   16_diloco.c adds momentum at the server and half precision.
 *
 * SPDX-License-Identifier: MIT
 */
#include "example.h"

#include <stdio.h>
#include <string.h>

enum { DIMENSIONS = 100, BATCH = 16, LOCAL = 50, ROUNDS = 12 };
static const float rate = 0.03f;

static float pulled[DIMENSIONS], local[DIMENSIONS], difference[DIMENSIONS];

static float draw(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (float)(uint32_t)(*state >> 32) / 2147483648.0f - 1.0f;
}

/* The mean squared error of a batch of y = truth . x + noise, with truth[i] = i / 10. Unless gradient is NULL, adds the
 * gradient to it. */
static float learn(const float *w, uint64_t *state, float *gradient) {
  float loss = 0;
  for (int b = 0; b < BATCH; b++) {
    float x[DIMENSIONS], error = 0.1f * draw(state);
    for (int i = 0; i < DIMENSIONS; i++) {
      x[i] = draw(state);
      error += (w[i] - (float)i / 10) * x[i];
    }
    for (int i = 0; gradient && i < DIMENSIONS; i++) gradient[i] += error * x[i] / BATCH;
    loss += error * error / BATCH;
  }
  return loss;
}

static int train(mlfab *fabric) {
  mlfab_buf weights = {0, 0, pulled, DIMENSIONS}, update = {0, 0, difference, DIMENSIONS};
  mlfab_model_options model = MLFAB_MODEL_OPTIONS_INIT;
  model.sync = MLFAB_SYNC_BSP;
  model.mean = 1; /* the server divides the sum of a round by the number of workers */
  int32_t rank = 0;
  int status = mlfab_rank(fabric, &rank, NULL, NULL);
  if (!status) status = mlfab_tensor_add(fabric, 0, MLFAB_F32, DIMENSIONS);
  if (!status) status = mlfab_model_start(fabric, &model, &weights, 1);

  uint64_t mine = (uint64_t)rank + 1; /* the seed of this worker's samples */
  for (int round = 0; round <= ROUNDS && !status; round++) {
    if ((status = mlfab_pull(fabric, &weights, 1, NULL, NULL))) break;
    uint64_t held_out = 1000;
    if (rank == 0) {
      float loss = 0;
      for (int i = 0; i < 20; i++) loss += learn(pulled, &held_out, NULL) / 20;
      printf("round %2d: %3d steps of each worker, loss %.4f\n", round, round * LOCAL,
             (double)loss);
    }
    if (round == ROUNDS) break;
    memcpy(local, pulled, sizeof local);
    for (int step = 0; step < LOCAL; step++) {
      float gradient[DIMENSIONS] = {0};
      learn(local, &mine, gradient);
      for (int i = 0; i < DIMENSIONS; i++) local[i] -= rate * gradient[i];
    }
    for (int i = 0; i < DIMENSIONS; i++) difference[i] = local[i] - pulled[i];
    status = mlfab_push(fabric, &update, 1, NULL, NULL); /* scale is 1 */
  }
  return status ? status : mlfab_finish(fabric, 0);
}

int main(void) { return example_main(train); }
