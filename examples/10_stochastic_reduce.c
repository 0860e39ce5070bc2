/* 10_stochastic_reduce.c - averaging with few neighbours instead of everybody.
 *
 * Shows:  mlfab_graph_build and _check, mlfab_stochastic_open, _reduce and _close: every worker averages with
 *         those that send to it on the root expander, in which i sends to i + 1 and i + sqrt(N). All come
 *         near the mean of all for a part of the bytes; the spectral gap of the graph tells how fast.
 * Run:    build/mlfab-run -n 8 -s 0 build/examples/10_stochastic_reduce
 * SPDX-License-Identifier: MIT
 */
#include "mlfab.h"

#include <stdio.h>

enum { COUNT = 1000, ITERATIONS = 20, EDGES = 4096 };

/* What the graph promises: printed by worker 0. */
static int show_graph(uint32_t workers) {
  static mlfab_edge edges[EDGES];
  mlfab_graph_info info;
  mlfab_error error;
  uint32_t n;
  int status = mlfab_graph_build(MLFAB_GRAPH_EXPANDER, workers, 0, 0, edges, EDGES, &n);
  if (!status) status = mlfab_graph_check(edges, n, workers, &info, &error);
  if (!status)
    printf("%u workers, %u edges (all to all: %u), spectral gap %.3f\n", workers, info.edges,
           workers * (workers - 1), info.gap);
  return status;
}

static int average(mlfab *fabric, int32_t rank) {
  mlfab_stochastic_options options = {.size = sizeof options, .graph = MLFAB_GRAPH_EXPANDER};
  mlfab_stochastic_info info = {.size = sizeof info};
  float model[COUNT];
  uint32_t id;
  for (int i = 0; i < COUNT; i++) model[i] = (float)rank;
  int status = mlfab_stochastic_open(fabric, COUNT, MLFAB_F32, &options, 0, &id);
  if (status) return status;
  for (int i = 0; i < ITERATIONS && !status; i++)
    status = mlfab_stochastic_reduce(fabric, id, model, 0, &info);
  if (!status)
    printf("worker %d has %.4f after %llu iterations, from %u inputs each\n", (int)rank,
           (double)model[0], (unsigned long long)info.iteration, info.whole);
  /* Nobody closes while another still needs it. */
  if (!status) status = mlfab_barrier(fabric, 0);
  mlfab_stochastic_close(fabric, id);
  return status;
}

int main(void) {
  mlfab *fabric = NULL;
  mlfab_error error = {0};
  mlfab_config config;
  int32_t rank;
  uint32_t workers;
  mlfab_config_init(&config);
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int status = mlfab_rank(fabric, &rank, &workers, NULL);
  if (!status && workers > 1 && rank == 0) status = show_graph(workers);
  if (!status) status = average(fabric, rank);
  if (status) {
    mlfab_last_error(fabric, &error);
    fprintf(stderr, "worker %d: %s: %s\n", (int)rank, mlfab_error_name(status), error.text);
  }
  mlfab_close(&fabric);
  return status ? 1 : 0;
}
