/* 03_trainer.c - a complete distributed trainer: linear regression, momentum at the server.
 *
 * Shows:  pull, gradient, push with scale -learning rate; workers with different amounts of data, which
 *         call mlfab_finish at its end; errors that name the rank that caused them; saving the model.
 * Build:  cc -O2 -o 03_trainer 03_trainer.c mlfab.o -lpthread -lm
 * Run:    build/mlfab-run -n 4 -s 1 build/examples/03_trainer model.safetensors
 *
 * The data are drawn from a seed: y = truth . x + a little noise, with truth[i] = i. Replace
 * gradient_of_batch() to train something else.
 *
 * SPDX-License-Identifier: MIT
 */
#include "example.h"

#include <stdio.h>
#include <stdlib.h>

enum { DIMENSIONS = 20, BATCH = 32 };

static float weights[DIMENSIONS], gradient[DIMENSIONS];

static const char *path; /* of the model that worker 0 saves, or NULL */

static float uniform(void) { return (float)rand() / (float)RAND_MAX * 2.0f - 1.0f; }

/* The gradient of the mean squared error over a batch of fresh samples; returns that error. */
static float gradient_of_batch(void) {
  float loss = 0;
  for (int i = 0; i < DIMENSIONS; i++) gradient[i] = 0;
  for (int b = 0; b < BATCH; b++) {
    float x[DIMENSIONS], error = 0.01f * uniform();
    for (int i = 0; i < DIMENSIONS; i++) {
      x[i] = uniform();
      error += (weights[i] - (float)i) * x[i];
    }
    for (int i = 0; i < DIMENSIONS; i++) gradient[i] += error * x[i] / BATCH;
    loss += error * error / BATCH;
  }
  return loss;
}

static int train(mlfab *fabric) {
  mlfab_buf pulled = {0, 0, weights, DIMENSIONS}, update = {0, 0, gradient, DIMENSIONS};
  mlfab_model_options model = MLFAB_MODEL_OPTIONS_INIT; /* gamma is 0.9 */
  model.optimizer = MLFAB_OPTIMIZER_MOMENTUM;
  mlfab_push_options push = {.size = sizeof push, .scale = -0.02};
  int32_t rank = 0;
  int status = mlfab_rank(fabric, &rank, NULL, NULL);
  if (!status) status = mlfab_tensor_add(fabric, 0, MLFAB_F32, DIMENSIONS);
  if (!status) status = mlfab_model_start(fabric, &model, &pulled, 1);
  srand((unsigned)rank + 1);

  int steps = 600 + 100 * (int)rank; /* some have more data than others */
  for (int step = 0; step < steps && !status; step++) {
    status = mlfab_pull(fabric, &pulled, 1, NULL, NULL);
    if (status) break;
    float loss = gradient_of_batch();
    status = mlfab_push(fabric, &update, 1, &push, NULL);
    if (step % 100 == 0) printf("worker %d step %3d loss %.5f\n", (int)rank, step, (double)loss);
  }

  /* Only worker 0 calls this barrier. It returns when every other worker has called mlfab_finish, or has died. */
  if (!status && rank == 0) status = mlfab_barrier(fabric, NULL);
  if (!status && rank == 0) status = mlfab_pull(fabric, &pulled, 1, NULL, NULL);
  if (!status && rank == 0 && path) status = mlfab_save(fabric, path);
  if (!status && rank == 0) {
    printf("weights 1, 2, 3 are %.3f %.3f %.3f\n", (double)weights[1], (double)weights[2],
           (double)weights[3]);
  }
  return status ? status : mlfab_finish(fabric, 0);
}

int main(int argc, char **argv) {
  path = argc > 1 ? argv[1] : NULL;
  return example_main(train);
}
