/* example.h - parts that several examples share: main() of a worker, a small training problem, all nodes of a simulation.
 *
 * An example that includes mlfab_sim.h before it has all parts, else the first two. Copy it beside the example.
 * SPDX-License-Identifier: MIT
 */
#ifndef EXAMPLE_H
#define EXAMPLE_H

#include "mlfab.h"

#include <assert.h>
#include <stdio.h>

/* Opens this process's node as the launcher says, works, and tells which call failed. Returns the exit status. */
static inline int example_main(int (*work)(mlfab *fabric)) {
  mlfab *fabric = NULL;
  mlfab_error error = {0};
  if (mlfab_open_env(&fabric, &error)) return fprintf(stderr, "%s\n", error.text), 1;
  int status = work(fabric);
  if (status) {
    mlfab_last_error(fabric, &error); /* the rank, the awaited thing and the time */
    fprintf(stderr, "%s: %s\n", mlfab_error_name(status), error.text);
  }
  mlfab_close(&fabric);
  return status ? 1 : 0;
}

/* A number from -1 to 1. */
static inline float example_uniform(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (float)(int32_t)(*state >> 32) / 2147483648.0f;
}

/* Draws a batch of samples of y = truth . x with truth[i] = i. Adds `scale` times half the gradient of their mean squared
 * error at `weights` to `sum`. Returns that error. count: at most 64. */
static inline double example_learn(const float *weights, int count, int batch, float scale,
                                   uint64_t *state, float *sum) {
  double loss = 0;
  float x[64];
  assert(count <= 64);
  for (int b = 0; b < batch; b++) {
    float error = 0;
    for (int i = 0; i < count; i++) {
      x[i] = example_uniform(state);
      error += (weights[i] - (float)i) * x[i];
    }
    for (int i = 0; i < count; i++) sum[i] += scale * error * x[i] / (float)batch;
    loss += (double)(error * error) / batch;
  }
  return loss;
}

#ifdef MLFAB_SIM_H
/* Opens config->workers workers, each on a host of its own; with config->dedicated also the server, on the host behind
 * them. Each worker starts a model of one tensor of `count` floats. */
static inline int example_open_all(mlfab_sim *sim, const mlfab_config *config, uint64_t count,
                                   const mlfab_model_options *model, mlfab **node) {
  mlfab_config own = *config;
  int workers = (int)config->workers, nodes = workers + (config->dedicated != 0);
  snprintf(own.coordinator, sizeof own.coordinator, "sim:%d", config->dedicated ? workers : 0);
  for (int i = 0; i < nodes; i++) {
    own.rank = i % workers;
    if (config->dedicated) own.roles = i < workers ? MLFAB_ROLE_WORKER : MLFAB_ROLE_SERVER;
    if (mlfab_sim_open(sim, (uint32_t)i, &own, &node[i], NULL)) return 1;
  }
  for (int i = 0; i < workers; i++) {
    while (!mlfab_is_ready(node[i], NULL)) mlfab_sim_step(sim);
    if (mlfab_tensor_add(node[i], 0, MLFAB_F32, count)) return 1;
    if (mlfab_model_start(node[i], model, NULL, 0)) return 1;
  }
  return 0;
}

/* Ends a simulation without a goodbye. */
static inline void example_close_all(mlfab_sim **sim_p, mlfab **node, int nodes) {
  for (int i = 0; i < nodes; i++) mlfab_abandon(&node[i]);
  mlfab_sim_destroy(sim_p);
}
#endif

#endif
