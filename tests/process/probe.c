/* probe.c - one rank, configured by its environment, that opens, waits at a barrier and closes.
 *
 * Prints one line a step: "open <error name> <rank to blame> <milliseconds> <text>", then "barrier ...",
 * then "close". Usage: probe [milliseconds to sleep before the barrier] */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static uint64_t now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000u;
}

static void tell(const char *step, int code, const mlfab_error *error, uint64_t since_ms) {
  const char *side = error->is_server ? "server" : "worker";
  printf("%s %s %s %d %llu %s\n", step, code ? mlfab_error_name(code) : "OK", side,
         code ? (int)error->rank : MLFAB_NO_RANK, (unsigned long long)(now_ms() - since_ms),
         code ? error->text : "");
  fflush(stdout);
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_error error;
  mlfab_config config;
  memset(&error, 0, sizeof error);
  mlfab_config_init(&config);
  uint64_t since = now_ms();
  int code = mlfab_config_from_env(&config, &error);
  if (!code) code = mlfab_open(&config, &fabric, &error);
  tell("open", code, &error, since);
  if (code) return 1;

  int32_t rank = 0;
  mlfab_rank(fabric, &rank, NULL, NULL);
  since = now_ms();
  if (rank < 0) {
    code = mlfab_serve(fabric, 0);
    if (code) mlfab_last_error(fabric, &error);
    tell("serve", code, &error, since);
  } else {
    if (argc > 1) {
      long ms = atol(argv[1]);
      struct timespec nap = {ms / 1000, ms % 1000 * 1000000};
      nanosleep(&nap, NULL);
    }
    since = now_ms();
    code = mlfab_barrier(fabric, NULL);
    if (code) mlfab_last_error(fabric, &error);
    tell("barrier", code, &error, since);
  }
  mlfab_stats stats;
  if (mlfab_get_stats(fabric, &stats, sizeof stats) == 0)
    printf("strangers %llu\n", (unsigned long long)stats.strangers_refused);
  mlfab_close(&fabric);
  return code ? 1 : 0;
}
