/* descriptor.c - a hand-driven worker that waits on the descriptor of mlfab_fd alone.
 *
 * It pulls again and again, two at a time, and sleeps in poll() in between. Prints how often poll() timed
 * out although the pull had finished (a lost wake-up), and how often the descriptor was readable without an
 * event (a busy loop). */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <poll.h>
#include <stdio.h>
#include <time.h>

enum { COUNT = 10000, PULLS = 500, TIMEOUT_MS = 500 };

static float weights[COUNT];

static int fail(mlfab *fabric, const char *what) {
  mlfab_error error = {.text = ""};
  if (fabric) mlfab_last_error(fabric, &error);
  printf("%s: %s\n", what, error.text);
  return 1;
}

int main(void) {
  mlfab *fabric = NULL;
  mlfab_error error;
  mlfab_config config;
  mlfab_buf buf = {0, 0, weights, COUNT};
  struct pollfd fd = {.events = POLLIN};
  int late = 0, lost = 0, empty = 0;
  const struct timespec nap = {0, 200000}; /* long enough for both answers */
  mlfab_config_init(&config);
  config.progress = MLFAB_PROGRESS_HAND;
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &fabric, &error)) {
    printf("open: %s\n", error.text);
    return 1;
  }
  if (mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT) || mlfab_model_start(fabric, NULL, &buf, 1) ||
      mlfab_fd(fabric, &fd.fd)) {
    return fail(fabric, "start");
  }
  for (int i = 0; i < PULLS; i++) {
    mlfab_request request[2];
    int done[2] = {0, 0};
    for (int k = 0; k < 2; k++) {
      if (mlfab_pull_start(fabric, &buf, 1, NULL, &request[k])) return fail(fabric, "pull");
    }
    for (;;) {
      /* Testing the second pull may read the answer to the first one: the descriptor must report it. */
      for (int k = 0; k < 2; k++) {
        if (k == 1 && !done[0]) nanosleep(&nap, NULL);
        if (!done[k] && mlfab_test(fabric, request[k], &done[k], NULL)) return fail(fabric, "test");
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
  mlfab_close(&fabric);
  return 0;
}
