/* 08_collectives.c - from worker to worker, without a server: collectives, and your own task graph.
 *
 * Shows:  an allreduce of a list of buffers; a reduce-scatter; an allreduce that runs while the worker computes; a
 *         task graph (send, receive, compute), opened once, that runs a round for each trigger. Every worker
 *         makes the same calls in the same order.
 * Build:  cc -O2 -o 08_collectives 08_collectives.c mlfab.o -lpthread -lm
 * Run:    build/mlfab-run -n 4 -s 1 build/examples/08_collectives
 *
 * SPDX-License-Identifier: MIT
 */
#include "mlfab_partial.h"
#include "example.h"

#include <stdio.h>

enum { COUNT = 100000, FEW = 10, WORKERS_MAX = 64, ROUNDS = 60 };

static float gradient[COUNT], bias[FEW];
static int32_t rank;
static uint32_t workers;

static void fill(float x) {
  for (int i = 0; i < COUNT; i++) gradient[i] = x;
  for (int i = 0; i < FEW; i++) bias[i] = 2 * x;
}

/* 1. The mean of all workers' gradients, in place: two buffers, one operation. */
static int mean_of_a_list(mlfab *fabric) {
  const mlfab_vec list[] = {{gradient, COUNT}, {bias, FEW}};
  const mlfab_collective mean = {.size = sizeof mean, .op = MLFAB_OP_MEAN};
  fill((float)rank);
  int status = mlfab_allreduce_list(fabric, list, 2, MLFAB_F32, &mean);
  if (!status && rank == 0)
    printf("mean of the ranks: %g, of twice the ranks: %g\n", (double)gradient[COUNT - 1],
           (double)bias[0]);
  return status;
}

/* 2. Worker r gets the sum of block r. */
static int sum_of_my_block(mlfab *fabric) {
  uint64_t counts[WORKERS_MAX] = {0}, before = 0;
  for (uint32_t r = 0; r < workers; r++) counts[r] = COUNT / workers;
  counts[workers - 1] += COUNT % workers;
  for (int32_t r = 0; r < rank; r++) before += counts[r];
  fill(1);
  int status = mlfab_reduce_scatter(fabric, gradient, counts, MLFAB_F32, NULL);
  if (!status)
    printf("worker %d has %llu sums: %g\n", (int)rank, (unsigned long long)counts[rank],
           (double)gradient[before]);
  return status;
}

/* 3. Exchanges a layer while it computes the next. The library borrows the buffer until the request has ended. */
static int overlap(mlfab *fabric) {
  const mlfab_vec layer = {gradient, COUNT};
  mlfab_request request;
  double sum = 0;
  fill(1);
  int status = mlfab_allreduce_start(fabric, &layer, 1, MLFAB_F32, NULL, &request);
  for (int i = 1; i < 1000000; i++) sum += 1.0 / ((double)i * i); /* the next layer */
  if (!status) status = mlfab_wait(fabric, request, 0, NULL);
  if (!status && rank == 0) printf("meanwhile %.3f, then %g\n", sum, (double)gradient[0]);
  return status;
}

/* 4. A task graph: each worker sends its number to the next rank, and replaces it by the mean of it and the number
 * from the rank before. All numbers approach each other, and no worker waits for more than a neighbour. */
typedef struct ring {
  double mine, other;
} ring;

static int average(void *user, uint64_t round) {
  ring *r = user;
  (void)round;
  r->mine = (r->mine + r->other) / 2;
  return 0;
}

static int make_ring(mlfab *fabric, ring *r, mlfab_dag **dag_p, uint32_t *begin_p) {
  int32_t behind = (int32_t)((uint32_t)(rank + 1) % workers);
  int32_t before = (int32_t)((uint32_t)rank + workers - 1) % (int32_t)workers;
  uint32_t send, recv, compute;
  int status = mlfab_dag_create(fabric, dag_p);
  if (!status) status = mlfab_dag_nop(*dag_p, begin_p);
  if (!status) status = mlfab_dag_set(*dag_p, *begin_p, 0, MLFAB_DAG_OUTSIDE);
  if (!status) status = mlfab_dag_send(*dag_p, behind, 0, &r->mine, sizeof r->mine, &send);
  if (!status) status = mlfab_dag_after(*dag_p, send, *begin_p);
  if (!status) status = mlfab_dag_recv(*dag_p, before, 0, &r->other, sizeof r->other, &recv);
  if (!status) status = mlfab_dag_compute(*dag_p, average, r, &compute);
  if (!status) status = mlfab_dag_after(*dag_p, compute, send);
  if (!status) status = mlfab_dag_after(*dag_p, compute, recv);
  return status ? status : mlfab_dag_open(*dag_p, 1, 0);
}

static int go_round(mlfab *fabric) {
  ring r = {.mine = rank};
  mlfab_dag *dag = NULL;
  uint32_t begin;
  if (workers == 1) return 0; /* there is no neighbour */
  int status = make_ring(fabric, &r, &dag, &begin);
  for (uint64_t round = 0; !status && round < ROUNDS; round++) {
    status = mlfab_dag_trigger(dag, begin);
    if (!status) status = mlfab_dag_wait(dag, round, 0);
  }
  if (!status) printf("worker %d ends at %.3f\n", (int)rank, r.mine);
  if (dag) mlfab_dag_close(&dag); /* before the context is closed */
  return status;
}

static int all(mlfab *fabric) {
  int status = mlfab_rank(fabric, &rank, &workers, NULL);
  if (workers > WORKERS_MAX)
    return fprintf(stderr, "this example is for %d workers at most\n", WORKERS_MAX),
           MLFAB_ERR_UNSUPPORTED;
  if (!status) status = mean_of_a_list(fabric);
  if (!status) status = sum_of_my_block(fabric);
  if (!status) status = overlap(fabric);
  return status ? status : go_round(fabric);
}

int main(void) { return example_main(all); }
