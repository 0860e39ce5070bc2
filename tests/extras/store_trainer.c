/* store_trainer.c - a node whose checkpoints may be in a WebDAV server or in S3 (extras/mlfab_store.h), configured by its
 * environment.
 *
 *    store_trainer ELEMENTS ROUNDS [DIR]
 *
 * Each push adds 1 to every element of the model. So an element is the version of its slice. ROUNDS pushes of each worker,
 * without end when it is 0. With DIR worker 0 then makes a checkpoint there, and waits for STORE_WAIT seconds, in
 * which older files are removed. STORE_OFF=1: without a store. Lines on stdout,
 * by worker 0:
 *
 *    begin <checkpoint> <version> <least> <largest> <stretches>   after mlfab_model_start: the checkpoint that the model
 *                                  began as, and the elements; stretches of equal ones
 *    pushed <seconds>              all rounds, and how long the longest push took
 *    checkpoint <number>           DIR
 *    closed <seconds>              how long mlfab_close took
 *
 * Errors go to stderr, with their name; the exit status is 1 then. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "extras/mlfab_store.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static int fail(mlfab *fabric, const char *what, int code) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s: %s\n", what, mlfab_error_name(code), error.text);
  return code;
}

static void tell_begin(mlfab *fabric, const int64_t *w, uint64_t n) {
  mlfab_checkpoint_info info = {.size = sizeof info};
  int64_t least = w[0], most = w[0];
  uint64_t stretches = 1;
  mlfab_restored(fabric, &info);
  for (uint64_t i = 1; i < n; i++) {
    if (w[i] < least) least = w[i];
    if (w[i] > most) most = w[i];
    stretches += w[i] != w[i - 1];
  }
  printf("begin %llu %llu %lld %lld %llu\n", (unsigned long long)info.number,
         (unsigned long long)info.version, (long long)least, (long long)most,
         (unsigned long long)stretches);
  fflush(stdout);
}

static int work(mlfab *fabric, uint64_t n, int rounds, const char *dir) {
  int32_t rank = 0;
  int64_t *w = calloc(n, sizeof *w), *u = calloc(n, sizeof *u);
  mlfab_buf model = {7, 0, w, n}, update = {7, 0, u, n};
  double longest = 0;
  int code = w && u ? mlfab_rank(fabric, &rank, NULL, NULL) : MLFAB_ERR_MEMORY;
  for (uint64_t i = 0; i < n && !code; i++) u[i] = 1;
  if (!code) code = mlfab_tensor_add(fabric, 7, MLFAB_I64, n);
  if (!code) code = mlfab_model_start(fabric, NULL, &model, 1);
  if (code) fail(fabric, "start", code);
  if (!code && rank == 0) tell_begin(fabric, w, n);
  if (!code) code = mlfab_barrier(fabric, NULL); /* nobody pushes before worker 0 has looked */
  for (int i = 0; !code && (i < rounds || rounds == 0); i++) {
    double began = now();
    code = mlfab_push(fabric, &update, 1, NULL, NULL);
    if (code) fail(fabric, "push", code);
    if (now() - began > longest) longest = now() - began;
  }
  if (!code && rank == 0) printf("pushed %.3f\n", longest);
  if (!code && dir)
    code = mlfab_barrier(fabric, NULL); /* all workers' pushes are in the checkpoint */
  if (!code && rank == 0 && dir) {
    mlfab_checkpoint_info info = {.size = sizeof info};
    mlfab_checkpoint_options how = {.size = sizeof how, .dir = dir};
    code = mlfab_checkpoint(fabric, &how, &info);
    if (code) fail(fabric, "checkpoint", code);
    if (!code) printf("checkpoint %llu\n", (unsigned long long)info.number);
    if (getenv("STORE_WAIT")) sleep((unsigned)atoi(getenv("STORE_WAIT")));
  }
  fflush(stdout);
  int all = mlfab_barrier(fabric, NULL);
  free(w);
  free(u);
  return code ? code : all;
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_store *store = NULL;
  mlfab_error error;
  mlfab_config config;
  mlfab_env env = {.size = sizeof env};
  memset(&error, 0, sizeof error);
  mlfab_config_init(&config);
  int code = mlfab_config_from_env(&config, &error);
  if (!code && !getenv("STORE_OFF")) {
    code = mlfab_store_open(NULL, &store, &error);
    if (!code) env.files = mlfab_store_files(store);
    config.env = &env;
  }
  if (!code) code = mlfab_open(&config, &fabric, &error);
  if (code) {
    fprintf(stderr, "open: %s: %s\n", mlfab_error_name(code), error.text);
    mlfab_store_close(&store);
    return 1;
  }
  int served = config.roles == MLFAB_ROLE_SERVER;
  uint64_t elements = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000;
  if (served)
    code = mlfab_serve(fabric, 0);
  else
    code = work(fabric, elements, argc > 2 ? atoi(argv[2]) : 10, argc > 3 ? argv[3] : NULL);
  double began = now();
  mlfab_close(&fabric);
  mlfab_store_close(&store);
  if (!served) printf("closed %.3f\n", now() - began);
  return code != 0;
}
