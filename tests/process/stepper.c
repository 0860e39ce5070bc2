/* stepper.c - a worker that pushes and pulls, for the tests of telemetry.
 *
 *   stepper ELEMENTS ITERATIONS [SLOW_RANK SLOW_MS]
 *
 * Its place and the consistency come from MLFAB_* variables. Each iteration pulls the model, pushes an update of 1.0 for
 * every element, and adds one number over all workers. The slow rank sleeps before each iteration. A dropped update is
 * no failure. */
#include "node.h"

int main(int argc, char **argv) {
  if (argc != 3 && argc != 5) return 2;
  uint64_t elements = strtoull(argv[1], NULL, 10);
  int iterations = atoi(argv[2]), slow = argc == 5 ? atoi(argv[3]) : -1;
  float *w = zeros(elements, sizeof *w), *u = zeros(elements, sizeof *u), one = 1.0f;
  for (uint64_t i = 0; i < elements; i++) u[i] = 1.0f;
  open_node(NULL);
  mlfab_buf weights = {0, 0, w, elements}, update = {0, 0, u, elements};
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F32, elements));
  must("model", mlfab_model_start(fabric, NULL, &weights, 1));
  for (int i = 0; i < iterations; i++) {
    if (rank == slow) nap(atof(argv[4]));
    must("pull", mlfab_pull(fabric, &weights, 1, NULL, NULL));
    int code = mlfab_push(fabric, &update, 1, NULL, NULL);
    must("push", code == MLFAB_ERR_DROPPED ? 0 : code);
    must("allreduce", mlfab_allreduce(fabric, &one, 1, MLFAB_F32, NULL));
    if (i == 0) tell("began");
  }
  must("finish", mlfab_finish(fabric, 0));
  return close_node(0);
}
