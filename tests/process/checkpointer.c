/* checkpointer.c - a worker of checkpoint_test.py, which is killed at random times and goes on from a checkpoint.
 *
 * Each push adds 1 to every element of the model. So an element is the number of updates that were applied to its
 * slice, which is the slice's version. A line on stdout, of worker 0, after mlfab_model_start: the checkpoint that the model
 * began as, and the elements; stretches of equal ones:
 *
 *   begin <checkpoint> <version> <least> <largest> <stretches>
 *
 * Usage: checkpointer <elements> [<updates> [<directory>]]: removes the empty directory when all have begun, and ends well
 * after that many updates. */
#include "node.h"

static void tell_begin(const mlfab_checkpoint_info *info, const int64_t *w, uint64_t n) {
  int64_t least = w[0], most = w[0];
  uint64_t stretches = 1;
  for (uint64_t i = 1; i < n; i++) {
    if (w[i] < least) least = w[i];
    if (w[i] > most) most = w[i];
    stretches += w[i] != w[i - 1];
  }
  tell("begin %llu %llu %lld %lld %llu", (unsigned long long)info->number,
       (unsigned long long)info->version, (long long)least, (long long)most,
       (unsigned long long)stretches);
}

int main(int argc, char **argv) {
  uint64_t n = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000;
  int64_t *w = zeros(n, sizeof *w), *u = zeros(n, sizeof *u);
  for (uint64_t i = 0; i < n; i++) u[i] = 1;
  open_node(NULL);
  mlfab_buf model = {7, 0, w, n}, update = {7, 0, u, n};
  mlfab_checkpoint_info info = {.size = sizeof info};
  must("tensor", mlfab_tensor_add(fabric, 7, MLFAB_I64, n));
  must("model", mlfab_model_start(fabric, NULL, &model, 1));
  must("restored", mlfab_restored(fabric, &info));
  /* All workers have started: nobody pushes before worker 0 has looked. */
  if (rank == 0) tell_begin(&info, w, n);
  must("barrier", mlfab_barrier(fabric, NULL));
  uint64_t updates = argc > 2 ? strtoull(argv[2], NULL, 10) : UINT64_MAX;
  if (argc > 3 && rmdir(argv[3])) return 2;
  for (uint64_t i = 0; i < updates; i++)
    if (mlfab_push(fabric, &update, 1, NULL, NULL)) return failed("push");
  mlfab_close(&fabric);
  return 0;
}
