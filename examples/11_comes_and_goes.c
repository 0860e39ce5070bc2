/* 11_comes_and_goes.c - a trainer on allreduce whose third worker dies and comes back.
 *
 * Shows:  what to do when a collective fails: all live workers agree on a step (by the maximum of step * workers +
 *         rank) and take the model of the rank that is furthest. A worker that begins, comes back, or has done its last
 *         step does the same, so one function does all of it. All also agree every ten steps: a worker that comes back
 *         begins with this call, which then meets that of the others.
 * Build:  cc -O2 -o 11_comes_and_goes 11_comes_and_goes.c mlfab.o -lpthread -lm
 * Run:    build/mlfab-run -n 4 -s 1 --on-failure=restart build/examples/11_comes_and_goes
 * SPDX-License-Identifier: MIT
 */
#define _POSIX_C_SOURCE 200809L
#include "example.h"

#include <signal.h>
#include <stdio.h>
#include <time.h>

enum { FEATURES = 8, STEPS = 300, BATCH = 16, VICTIM = 2, DIES_AT = 30, TRIES = 20, EVERY = 10 };

static mlfab *fabric;
static int32_t rank;
static uint32_t workers;

/* The state that all workers have after every step. */
static float weights[FEATURES];
static int64_t step;

static int64_t alive; /* workers that took part in the last agreement */

static uint64_t state; /* of this worker's samples */

static void say(const char *what) {
  mlfab_error error;
  mlfab_last_error(fabric, &error);
  printf("step %d: %s: %s\n", (int)step, what, error.text);
  fflush(stdout);
}

static int reduce(void *data, uint64_t count, int dtype, uint32_t op) {
  const mlfab_collective options = {.size = sizeof options, .op = op};
  const mlfab_vec vec = {data, count};
  return mlfab_allreduce_list(fabric, &vec, 1, dtype, &options);
}

/* Gives all live workers the model of the worker that is furthest. It may fail a few times, too, while workers die
 * and come. A failure leaves the weights unchanged. */
static int agree(void) {
  float taken[FEATURES];
  int code = 0;
  for (int tries = 0; tries < TRIES; tries++) {
    int64_t most = step * workers + rank, others = 1;
    mlfab_request request;
    for (int f = 0; f < FEATURES; f++) taken[f] = weights[f];
    code = reduce(&most, 1, MLFAB_I64, MLFAB_OP_MAX);
    if (!code) code = reduce(&others, 1, MLFAB_I64, MLFAB_OP_SUM);
    if (!code) {
      int32_t root = (int32_t)(most % workers);
      code = mlfab_broadcast_start(fabric, root, taken, sizeof taken, NULL, &request);
    }
    if (!code) code = mlfab_wait(fabric, request, 0, NULL);
    if (!code) {
      for (int f = 0; f < FEATURES; f++) weights[f] = taken[f];
      step = most / workers;
      alive = others;
      return 0;
    }
  }
  say("cannot agree");
  return code;
}

/* One step with the same result on all workers, or an error that all live workers get. */
static int advance(void) {
  const struct timespec computing = {0, 5000000};
  float gradient[FEATURES] = {0};
  example_learn(weights, FEATURES, BATCH, 0.4f, &state, gradient);
  nanosleep(&computing, NULL);
  int code = reduce(gradient, FEATURES, MLFAB_F32, MLFAB_OP_MEAN);
  if (code) return code;
  for (int f = 0; f < FEATURES; f++) weights[f] -= gradient[f];
  step++;
  return 0;
}

/* Returns whether all workers have the same bits, or an error. */
static int compare(int *same_p) {
  float low[FEATURES], high[FEATURES];
  for (int f = 0; f < FEATURES; f++) low[f] = high[f] = weights[f];
  int code = reduce(low, FEATURES, MLFAB_F32, MLFAB_OP_MIN);
  if (!code) code = reduce(high, FEATURES, MLFAB_F32, MLFAB_OP_MAX);
  *same_p = 1;
  for (int f = 0; f < FEATURES; f++) *same_p &= low[f] == high[f];
  return code;
}

static int train(mlfab *opened) {
  fabric = opened;
  int code = mlfab_rank(fabric, &rank, &workers, NULL), returned, over = 0, same = 0;
  state = (uint64_t)rank + 1;
  if (!code) code = agree();
  returned = step > 0;
  if (!code && returned) printf("is back at step %d\n", (int)step);
  while (!code && !over) {
    int all = alive == (int64_t)workers;
    if (rank == VICTIM && step == DIES_AT && all && !returned) raise(SIGKILL);
    over = step == STEPS;
    code = over ? compare(&same) : advance();
    if (!code && !over && step % EVERY == 0) code = agree();
    if (!code) continue;
    say("goes on after");
    over = 0;
    code = agree();
  }
  if (!code && same)
    printf("weights ... %.3f %.3f %.3f, the same everywhere after %d steps\n", (double)weights[5],
           (double)weights[6], (double)weights[7], (int)step);
  if (!code && !same) printf("weights differ\n");
  return code || same ? code : MLFAB_ERR_INTERNAL;
}

int main(void) { return example_main(train); }
