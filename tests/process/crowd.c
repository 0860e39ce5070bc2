/* crowd.c - one of many nodes of a host, whose memory is measured: for crowd_test.py.
 *
 *   crowd MODEL_BYTES REDUCED_BYTES ROUNDS
 *
 * Its place in the fabric comes from MLFAB_* variables. In each round a worker pushes and pulls the whole model, and reduces
 * vectors up to REDUCED_BYTES. Then it gives its own buffers back to the system, so that what it has left is the library's, and
 * worker 0 prints "ready". All leave when worker 0's standard input ends. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static mlfab *fabric;

static int fail(const char *what) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s\n", what, error.text);
  return 1;
}

/* Zeroed pages, or NULL. */
static float *pages(uint64_t bytes) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? NULL : at;
}

static int push_and_pull(float *values, uint64_t count) {
  mlfab_buf all = {MLFAB_ALL, 0, values, count};
  return mlfab_push(fabric, &all, 1, NULL, NULL) || mlfab_pull(fabric, &all, 1, NULL, NULL)
             ? fail("push or pull")
             : 0;
}

static int reduce(float *values, uint64_t count, uint32_t workers) {
  for (uint64_t n = count; n > 0; n /= 64) {
    for (uint64_t i = 0; i < n; i++) values[i] = 1.0f;
    if (mlfab_allreduce(fabric, values, n, MLFAB_F32, NULL)) return fail("allreduce");
    if (values[0] != (float)workers || values[n - 1] != (float)workers) {
      fprintf(stderr, "a sum of %u ones is %g\n", workers, (double)values[n - 1]);
      return 1;
    }
  }
  return 0;
}

static int work(uint64_t model, uint64_t reduced, int rounds) {
  int32_t rank;
  uint32_t workers;
  char c;
  float *values = pages(model), *vector = pages(reduced);
  mlfab_rank(fabric, &rank, &workers, NULL);
  if (!values || !vector) return fail("out of memory");
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, model / 4) || mlfab_model_start(fabric, NULL, NULL, 0))
    return fail("model");
  for (int round = 0; round < rounds; round++)
    if (push_and_pull(values, model / 4) || reduce(vector, reduced / 4, workers)) return 1;
  munmap(values, model);
  munmap(vector, reduced);
  if (mlfab_barrier(fabric, NULL)) return fail("barrier");
  if (rank == 0) {
    printf("ready\n");
    fflush(stdout);
    while (read(STDIN_FILENO, &c, 1) > 0) continue;
  }
  return mlfab_barrier(fabric, NULL) ? fail("barrier") : 0;
}

int main(int argc, char **argv) {
  uint64_t model = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
  uint64_t reduced = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
  int rounds = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 0;
  mlfab_error error;
  mlfab_config config;
  memset(&error, 0, sizeof error);
  mlfab_config_init(&config);
  if (model < 4 || reduced < 4 || rounds < 1) {
    fprintf(stderr, "usage: crowd MODEL_BYTES REDUCED_BYTES ROUNDS\n");
    return 2;
  }
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &fabric, &error)) {
    fprintf(stderr, "open: %s\n", error.text);
    return 1;
  }
  int status = config.roles == MLFAB_ROLE_SERVER ? mlfab_serve(fabric, 0) && fail("serve")
                                                 : work(model, reduced, rounds);
  mlfab_close(&fabric);
  return status;
}
