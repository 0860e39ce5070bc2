/* saver.c - a worker that saves its model at the end, for run_test.py.
 *
 *   saver MS
 *
 * It pushes and pulls until SIGTERM comes. Then it waits MS milliseconds, makes a barrier, pulls the model once more, tells
 * "saved" and closes. */
#include "node.h"

#include <signal.h>

enum { COUNT = 1000 };

static volatile sig_atomic_t told;

static void on_term(int number) {
  (void)number;
  told = 1;
}

int main(int argc, char **argv) {
  if (argc != 2) return 2;
  float weights[COUNT] = {0}, gradient[COUNT] = {0};
  mlfab_buf first = {MLFAB_ALL, 0, weights, COUNT};
  mlfab_buf model = {0, 0, weights, COUNT}, update = {0, 0, gradient, COUNT};
  signal(SIGTERM, on_term);
  open_node(NULL);
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT));
  must("start", mlfab_model_start(fabric, NULL, &first, 1));
  for (int step = 0; !told; step++) {
    must("push", mlfab_push(fabric, &update, 1, NULL, NULL));
    if (step == 2) tell("up");
    nap(20);
  }
  nap(atof(argv[1]));
  must("barrier", mlfab_barrier(fabric, NULL));
  must("pull", mlfab_pull(fabric, &model, 1, NULL, NULL));
  tell("saved");
  return close_node(0);
}
