/* 10_stochastic_reduce.c - averaging with a few workers instead of with all: eight workers.
 *
 * Shows:  mlfab_graph_build and _check (a graph's edges and gap), then mlfab_stochastic_open, _reduce and _close. First
 *         each worker starts with its rank, and they only average: the larger the gap, the sooner all agree. Then
 *         they train a plane of which each worker sees two features: with any of the graphs all workers learn the
 *         whole plane, and the sparse graphs send a fraction of the bytes. MLFAB_STOCHASTIC_NOTIFY_ACK: a worker
 *         waits for its senders, never for the whole fabric.
 * Build:  cc -O2 -o 10_stochastic_reduce 10_stochastic_reduce.c mlfab.o -lpthread -lm
 * Run:    build/mlfab-run -n 8 -s 0 build/examples/10_stochastic_reduce
 * SPDX-License-Identifier: MIT
 */
#include "mlfab_partial.h"
#include "example.h"

#include <stdio.h>
#include <string.h>

enum { FEATURES = 16, STEPS = 400, EDGES = 4096 };

static float weights[FEATURES];

/* Fits this worker's model to a sample of its own: y = sum of f * x[f] over its features. */
static void learn(uint32_t rank, uint32_t workers, uint64_t *state) {
  float x[FEATURES] = {0}, error = 0, norm = 0;
  for (uint32_t f = rank; f < FEATURES; f += workers) {
    x[f] = example_uniform(state);
    error += (weights[f] - (float)f) * x[f];
    norm += x[f] * x[f];
  }
  for (uint32_t f = 0; f < FEATURES; f++) weights[f] -= error * x[f] / norm;
}

/* The largest error of a weight. */
static float distance(int plane, float mean) {
  float most = 0;
  for (int f = 0; f < FEATURES; f++) {
    float d = weights[f] - (plane ? (float)f : mean);
    if (d * d > most * most) most = d < 0 ? -d : d;
  }
  return most;
}

/* Steps until the errors of all weights are below 0.05 and stay there. */
static int run(mlfab *fabric, uint32_t id, int plane, uint32_t *steps_p, uint64_t *sent_p) {
  mlfab_stochastic_info info = {.size = sizeof info};
  uint32_t workers, steps = 1;
  int32_t rank;
  if (mlfab_rank(fabric, &rank, &workers, NULL)) return 1;
  uint64_t state = (uint64_t)rank + 1;
  for (int f = 0; f < FEATURES; f++) weights[f] = plane ? 0 : (float)rank;
  for (uint32_t step = 1; step <= STEPS; step++) {
    if (plane) learn((uint32_t)rank, workers, &state);
    if (mlfab_stochastic_reduce(fabric, id, weights, 0, &info)) return 1;
    if (distance(plane, (float)(workers - 1) / 2) > 0.05f) steps = step + 1;
  }
  *steps_p = steps;
  *sent_p = info.sent_bytes;
  return steps > STEPS; /* it did not */
}

static int try_graph(mlfab *fabric, uint32_t rank, uint32_t workers, const char *name,
                     uint32_t graph) {
  static mlfab_edge edges[EDGES];
  mlfab_stochastic_options options = {.size = sizeof options, .graph = graph};
  mlfab_graph_info shape;
  uint32_t count, id, agreed, learned;
  uint64_t sent;
  if (mlfab_graph_build(graph, workers, 0, 0, edges, EDGES, &count)) return 1;
  if (mlfab_graph_check(edges, count, workers, &shape, NULL)) return 1;
  if (mlfab_stochastic_open(fabric, FEATURES, MLFAB_F32, &options, &id)) return 1;
  if (run(fabric, id, 0, &agreed, &sent) || run(fabric, id, 1, &learned, &sent)) return 1;
  if (mlfab_stochastic_close(fabric, id)) return 1;
  if (rank == 0)
    printf("%-8s gap %.3f: agree after %2u steps, have learned after %3u, %3u bytes a step\n", name,
           shape.gap, agreed, learned, (unsigned)sent);
  return 0;
}

int main(void) {
  mlfab *fabric = NULL;
  mlfab_error error;
  if (mlfab_open_env(&fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int32_t me = 0;
  uint32_t workers = 0;
  mlfab_rank(fabric, &me, &workers, NULL);
  uint32_t rank = (uint32_t)me;
  if (workers < 2 || workers > FEATURES) {
    fprintf(stderr, "start it with 2 to 16 workers: mlfab-run -n 8 -s 0 ...\n");
    mlfab_close(&fabric);
    return 2;
  }
  int status = try_graph(fabric, rank, workers, "all", MLFAB_GRAPH_ALL) ||
               try_graph(fabric, rank, workers, "expander", MLFAB_GRAPH_EXPANDER) ||
               try_graph(fabric, rank, workers, "chain", MLFAB_GRAPH_CHAIN);
  if (status && !mlfab_last_error(fabric, &error)) fprintf(stderr, "%s\n", error.text);
  mlfab_close(&fabric);
  return status;
}
