/* 11_comes_and_goes.c - a trainer on allreduce whose third worker dies, and comes back.
 *
 * Shows:  what to do when a collective fails: all workers that live agree on a step, by the maximum of
 *         step * workers + rank, and take the model of the rank that has come so far. Who begins and who
 *         comes back does the same, so there is one path for all of it.
 * Run:    build/mlfab-run -n 4 -s 1 --on-failure=restart build/examples/11_comes_and_goes
 * SPDX-License-Identifier: MIT
 */
#define _POSIX_C_SOURCE 200809L
#include "mlfab.h"

#include <signal.h>
#include <stdio.h>
#include <time.h>

enum { FEATURES = 8, STEPS = 300, BATCH = 16, VICTIM = 2, DIES_AT = 30, TRIES = 20 };

static mlfab *fabric;
static int32_t rank;
static uint32_t workers;

/* What all workers have after every step. */
static float weights[FEATURES];
static int64_t step;

static uint64_t state;
static float uniform(void) { /* -1 to 1 */
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

/* The gradient of a batch of this worker's: y = 1 x1 + 2 x2 + ... */
static void compute(float *gradient) {
  struct timespec pause = {0, 5000000};
  nanosleep(&pause, NULL);
  for (int f = 0; f < FEATURES; f++) gradient[f] = 0;
  for (int i = 0; i < BATCH; i++) {
    float x[FEATURES], error = 0;
    for (int f = 0; f < FEATURES; f++) {
      x[f] = uniform();
      error += (weights[f] - (float)(f + 1)) * x[f];
    }
    for (int f = 0; f < FEATURES; f++) gradient[f] += 2 * error * x[f] / BATCH;
  }
}

static void say(const char *what) {
  mlfab_error error;
  mlfab_last_error(fabric, &error);
  printf("step %d: %s: %s\n", (int)step, what, error.text);
  fflush(stdout);
}

/* Everybody who lives has the model of whoever has come so far. This may fail, too, while workers die
 * and come: a few times. */
static int agree(void) {
  const mlfab_collective options = {.size = sizeof options, .op = MLFAB_MAX};
  int code = 0;
  for (int tries = 0; tries < TRIES; tries++) {
    int64_t most = step * workers + rank;
    const mlfab_vec vec = {&most, 1};
    mlfab_request request;
    code = mlfab_allreduce_list(fabric, &vec, 1, MLFAB_I64, &options);
    if (!code) {
      int32_t root = (int32_t)(most % workers);
      code = mlfab_broadcast_start(fabric, root, weights, sizeof weights, NULL, &request);
    }
    if (!code) code = mlfab_wait(fabric, request, 0, NULL);
    if (!code) {
      step = most / workers;
      return 0;
    }
  }
  say("cannot agree");
  return code;
}

static int train(void) {
  float gradient[FEATURES];
  int returned, code = agree();
  returned = step > 0;
  if (returned) printf("is back at step %d\n", (int)step);
  while (!code && step < STEPS) {
    const mlfab_collective mean = {.size = sizeof mean, .op = MLFAB_MEAN};
    const mlfab_vec vec = {gradient, FEATURES};
    compute(gradient);
    if (rank == VICTIM && step == DIES_AT && !returned) raise(SIGKILL);
    code = mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, &mean);
    if (code) {
      say("goes on after");
      code = agree();
      continue;
    }
    for (int f = 0; f < FEATURES; f++) weights[f] -= 0.2f * gradient[f];
    step++;
  }
  return code;
}

/* Have all the same bits? */
static int same_everywhere(void) {
  float low[FEATURES], high[FEATURES];
  mlfab_collective options = {.size = sizeof options, .op = MLFAB_MIN};
  mlfab_vec vec = {low, FEATURES};
  for (int f = 0; f < FEATURES; f++) low[f] = high[f] = weights[f];
  if (mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, &options)) return 0;
  options.op = MLFAB_MAX;
  vec.data = high;
  if (mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, &options)) return 0;
  for (int f = 0; f < FEATURES; f++)
    if (low[f] != high[f]) return 0;
  return 1;
}

int main(void) {
  mlfab_config config;
  mlfab_error error;
  mlfab_config_init(&config);
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  mlfab_rank(fabric, &rank, &workers, NULL);
  state = (uint64_t)rank + 1;
  int code = train();
  if (!code && !same_everywhere()) code = 1;
  if (code) {
    say("failed");
  } else {
    printf("weights %.3f %.3f %.3f ..., the same everywhere after %d steps\n", (double)weights[0],
           (double)weights[1], (double)weights[2], (int)step);
  }
  mlfab_close(&fabric);
  return code != 0;
}
