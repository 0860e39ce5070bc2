/* collect.c - a program that makes collectives only, in an empty folder beside the two files of a build for it (the profile
 * `coll`). Under mlfab-run or mpiexec it is distributed; over MPI if MLFAB_TRANSPORT says so. Exits with 0 when all results
 * are as expected. */
#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if MLFAB_WITH_MPI
#include <mpi.h>
#endif

enum { COUNT = 100000, ROUNDS = 20, RANKS_MAX = 64 };

static int failed(mlfab *fabric, const char *what) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", what, error.text);
  return 1;
}

/* The sum of rank + 1 over all ranks, times i. */
static int reduces(mlfab *fabric, float *x, uint32_t rank, uint32_t ranks) {
  for (int round = 0; round < ROUNDS; round++) {
    for (int i = 0; i < COUNT; i++) x[i] = (float)(rank + 1) * (float)(i % 64);
    if (mlfab_allreduce(fabric, x, COUNT, MLFAB_F32, NULL)) return failed(fabric, "allreduce");
    for (int i = 0; i < COUNT; i++)
      if (x[i] != (float)(ranks * (ranks + 1) / 2) * (float)(i % 64))
        return failed(NULL, "allreduce: a wrong sum");
    if (mlfab_barrier(fabric, NULL)) return failed(fabric, "barrier");
  }
  return 0;
}

static int collects(mlfab *fabric, float *x, uint32_t rank, uint32_t ranks) {
  uint64_t counts[RANKS_MAX];
  for (uint32_t r = 0; r < ranks; r++) counts[r] = 10;
  for (int i = 0; i < COUNT; i++) x[i] = rank == ranks - 1 ? (float)i : 0.0f;
  if (mlfab_broadcast(fabric, (int32_t)ranks - 1, x, COUNT * sizeof *x, NULL))
    return failed(fabric, "broadcast");
  for (int i = 0; i < COUNT; i++)
    if (x[i] != (float)i) return failed(NULL, "broadcast: wrong bytes");
  for (uint32_t i = 0; i < 10; i++) x[10 * rank + i] = (float)rank;
  if (mlfab_allgather(fabric, x, counts, MLFAB_F32, NULL)) return failed(fabric, "allgather");
  for (uint32_t i = 0; i < 10 * ranks; i++)
    if (x[i] != (float)(i / 10)) return failed(NULL, "allgather: a wrong block");
  return 0;
}

/* A build without pushes names the switch. */
static int refuses(mlfab *fabric) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (!strstr(strstr(mlfab_build_info(), "; without:"), " push")) return 0;
  int code = mlfab_push(fabric, NULL, 0, NULL, NULL);
  mlfab_last_error(fabric, &error);
  return code != MLFAB_ERR_UNSUPPORTED || !strstr(error.text, "MLFAB_WITH_PUSH")
             ? failed(fabric, "a push is not refused")
             : 0;
}

static int run(void) {
  mlfab *fabric = NULL;
  mlfab_error error;
  float *x = malloc(COUNT * sizeof *x);
  if (!x || mlfab_open_env(&fabric, &error)) {
    fprintf(stderr, "%s\n", x ? error.text : "out of memory");
    free(x);
    return 1;
  }
  int32_t number = 0;
  uint32_t ranks = 0;
  int status = mlfab_rank(fabric, &number, &ranks, NULL) || ranks > RANKS_MAX;
  uint32_t rank = (uint32_t)number;
  if (!status)
    status = reduces(fabric, x, rank, ranks) || collects(fabric, x, rank, ranks) || refuses(fabric);
  if (!status && mlfab_finish(fabric, 0)) status = failed(fabric, "finish");
  if (mlfab_close(&fabric)) status = failed(NULL, "close");
  free(x);
  return status;
}

int main(int argc, char **argv) {
  int status;
#if MLFAB_WITH_MPI
  int level;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  status = run();
  MPI_Finalize();
#else
  (void)argc;
  (void)argv;
  status = run();
#endif
  if (status == 0) puts("collected");
  return status;
}
