/* 02_hello_sim.c - a whole fabric in one process: three hosts in the simulator, in virtual time.
 *
 * Shows:  mlfab_sim_create and mlfab_sim_open, a model, one push, one pull, and the time that they take over
 *         links of 10 Gbit/s with 50 us of latency. Host 0 is worker 0 and the server, hosts 1 and 2 are
 *         workers. Nothing sleeps: a blocking call runs the simulator until the answer is there.
 * Build:  cc -O2 -o 02_hello_sim 02_hello_sim.c mlfab.o mlfab_sim.o -lpthread -lm
 * Run:    build/examples/02_hello_sim
 *
 * SPDX-License-Identifier: MIT
 */
#include "mlfab_sim.h"

#include <stdio.h>

enum { HOSTS = 3, COUNT = 250000 }; /* 1 MB of float32 */

static float weights[COUNT], update[COUNT];

static uint64_t start_ns; /* the virtual clock does not begin at 0 */

static double milliseconds(mlfab_sim *sim) {
  return (double)(mlfab_sim_clock(sim) - start_ns) * 1e-6;
}

/* Opens a worker on every host, and runs the simulator until all have joined. */
static int open_all(mlfab_sim *sim, mlfab **node) {
  mlfab_error error = {0};
  for (uint32_t host = 0; host < HOSTS; host++) {
    mlfab_config config;
    mlfab_config_init(&config);
    config.rank = (int32_t)host;
    config.workers = HOSTS; /* one server, in the process of rank 0 */
    if (mlfab_sim_open(sim, host, &config, &node[host], &error)) {
      fprintf(stderr, "host %u: %s\n", (unsigned)host, error.text);
      return 1;
    }
  }
  for (uint32_t host = 0; host < HOSTS;) {
    int ready = mlfab_is_ready(node[host], &error);
    if (ready < 0 || (ready == 0 && !mlfab_sim_step(sim))) {
      fprintf(stderr, "host %u: %s\n", (unsigned)host, error.text);
      return 1;
    }
    if (ready == 1) host++;
  }
  printf("%8.3f ms: %d hosts have met\n", milliseconds(sim), HOSTS);
  return 0;
}

/* The model is one tensor of zeros; each worker adds its rank + 1 to every element. */
static int hello(mlfab_sim *sim, mlfab **node) {
  mlfab_buf w = {MLFAB_ALL, 0, weights, COUNT}, u = {MLFAB_ALL, 0, update, COUNT};
  for (int host = 0; host < HOSTS; host++) {
    if (mlfab_tensor_add(node[host], 0, MLFAB_F32, COUNT)) return 1;
    if (mlfab_model_start(node[host], NULL, NULL, 0)) return 1;
  }
  printf("%8.3f ms: the model stands\n", milliseconds(sim));
  for (int host = 0; host < HOSTS; host++) {
    mlfab_result result;
    for (int i = 0; i < COUNT; i++) update[i] = (float)(host + 1);
    if (mlfab_push(node[host], &u, 1, NULL, &result)) return 1;
    printf("%8.3f ms: worker %d's push is applied, the model has version %llu\n", milliseconds(sim),
           host, (unsigned long long)result.version);
  }
  if (mlfab_pull(node[2], &w, 1, NULL, NULL)) return 1;
  printf("%8.3f ms: worker 2 has pulled the model: every weight is %g\n", milliseconds(sim),
         (double)weights[COUNT - 1]);
  return weights[0] == 6.0f && weights[COUNT - 1] == 6.0f ? 0 : 1;
}

int main(void) {
  mlfab_sim_options options = {.size = sizeof options, .hosts = HOSTS, .seed = 1};
  mlfab_sim *sim = NULL;
  mlfab *node[HOSTS] = {NULL};
  if (mlfab_sim_create(&options, &sim)) return 1;
  start_ns = mlfab_sim_clock(sim);
  int status = open_all(sim, node) || hello(sim, node);
  for (int host = HOSTS - 1; host >= 0; host--) {
    mlfab_error error;
    if (status && node[host] && !mlfab_last_error(node[host], &error) && error.code) {
      fprintf(stderr, "host %d: %s\n", host, error.text);
    }
    if (node[host]) mlfab_close(&node[host]);
  }
  mlfab_sim_destroy(&sim);
  return status;
}
