/* crowd.c - one of many nodes of a host, whose memory is measured: for crowd_test.py.
 *
 *   crowd MODEL_BYTES REDUCED_BYTES ROUNDS
 *
 * Its place in the fabric comes from MLFAB_* variables. In each round a worker pushes and pulls the whole model, and reduces
 * vectors up to REDUCED_BYTES. Then it gives its own buffers back to the system, so that what it has left is the library's, and
 * worker 0 prints "ready". All leave when worker 0's standard input ends. */
#include "node.h"

#include <sys/mman.h>

/* Zeroed pages, or NULL. */
static float *pages(uint64_t bytes) {
  void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return at == MAP_FAILED ? NULL : at;
}

static void push_and_pull(float *values, uint64_t count) {
  mlfab_buf all = {MLFAB_ALL, 0, values, count};
  must("push", mlfab_push(fabric, &all, 1, NULL, NULL));
  must("pull", mlfab_pull(fabric, &all, 1, NULL, NULL));
}

static int reduce(float *values, uint64_t count) {
  for (uint64_t n = count; n > 0; n /= 64) {
    for (uint64_t i = 0; i < n; i++) values[i] = 1.0f;
    must("allreduce", mlfab_allreduce(fabric, values, n, MLFAB_F32, NULL));
    if (values[0] != (float)workers || values[n - 1] != (float)workers) {
      fprintf(stderr, "a sum of %u ones is %g\n", workers, (double)values[n - 1]);
      return 1;
    }
  }
  return 0;
}

static int work(uint64_t model, uint64_t reduced, int rounds) {
  char c;
  float *values = pages(model), *vector = pages(reduced);
  if (!values || !vector) return failed("out of memory");
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F32, model / 4));
  must("model", mlfab_model_start(fabric, NULL, NULL, 0));
  for (int round = 0; round < rounds; round++) {
    push_and_pull(values, model / 4);
    if (reduce(vector, reduced / 4)) return 1;
  }
  munmap(values, model);
  munmap(vector, reduced);
  must("barrier", mlfab_barrier(fabric, NULL));
  if (rank == 0) {
    tell("ready");
    while (read(STDIN_FILENO, &c, 1) > 0) continue;
  }
  must("barrier", mlfab_barrier(fabric, NULL));
  return 0;
}

int main(int argc, char **argv) {
  uint64_t model = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
  uint64_t reduced = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
  int rounds = argc > 3 ? (int)strtol(argv[3], NULL, 10) : 0;
  mlfab_config config;
  if (model < 4 || reduced < 4 || rounds < 1) {
    fprintf(stderr, "usage: crowd MODEL_BYTES REDUCED_BYTES ROUNDS\n");
    return 2;
  }
  configure(&config);
  open_node(&config);
  if (config.roles != MLFAB_ROLE_SERVER) return close_node(work(model, reduced, rounds));
  must("serve", mlfab_serve(fabric, 0));
  return close_node(0);
}
