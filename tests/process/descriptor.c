/* descriptor.c - a hand-driven worker that waits on the descriptor of mlfab_fd alone.
 *
 * It pulls again and again, two at a time, and sleeps in poll() in between. Prints how often poll() timed
 * out although the pull had finished (a lost wake-up), and how often the descriptor was readable without an
 * event (a busy loop). */
#include "node.h"

#include <poll.h>

enum { COUNT = 10000, PULLS = 200, TIMEOUT_MS = 60000 };

static float weights[COUNT];

int main(void) {
  mlfab_config config;
  mlfab_buf buf = {0, 0, weights, COUNT};
  struct pollfd fd = {.events = POLLIN};
  int late = 0, lost = 0, empty = 0;
  configure(&config);
  config.progress = MLFAB_PROGRESS_HAND;
  open_node(&config);
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT));
  must("model", mlfab_model_start(fabric, NULL, &buf, 1));
  must("fd", mlfab_fd(fabric, &fd.fd));
  for (int i = 0; i < PULLS && !lost; i++) {
    mlfab_request request[2];
    int done[2] = {0, 0};
    for (int k = 0; k < 2; k++) must("pull", mlfab_pull_start(fabric, &buf, 1, NULL, &request[k]));
    for (;;) {
      /* Testing the second pull may read the answer to the first one: the descriptor must report it. */
      for (int k = 0; k < 2; k++) {
        if (k == 1 && !done[0]) nap(0.2); /* long enough for both answers */
        if (!done[k]) must("test", mlfab_test(fabric, request[k], &done[k], NULL));
      }
      if (done[0] && done[1]) break;
      int timeout = poll(&fd, 1, TIMEOUT_MS) == 0;
      int moved = mlfab_progress(fabric, 0);
      late += timeout;
      lost += timeout && moved;
      empty += !timeout && moved == 0;
    }
  }
  printf("pulls %d lost %d late %d empty %d\n", PULLS, lost, late, empty);
  return close_node(0);
}
