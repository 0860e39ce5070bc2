/* puller.c - a worker of kill9_test.py that pulls and views a model which changes all the time, and may be stopped or killed.
 *
 * Worker 0 adds 1.0 to every element after each pull. So what anybody pulls must be uniform, or somebody wrote to memory that was
 * lent to a reader. The server declares a silent worker dead after 300 ms, even when the worker is only stopped. Lines on stdout:
 *
 *   pid <pid>                       once the model has begun
 *   torn <first> <other>            a pull or view that is not uniform
 *   end <pulls> <copied>            at the end, once the file <folder>/stop exists: how many views were copies
 *
 * Usage: puller <folder>
 *        puller             as a server */
#include "mlfab.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COUNT = 1 << 20 }; /* 4 MiB: several blocks, of several chunks */

static int failed(mlfab *fabric, const char *what, int code) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s: %s\n", what, mlfab_error_name(code), error.text);
  return 1;
}

static int uniform(const float *at, uint64_t count, float expected) {
  for (uint64_t i = 0; i < count; i++) {
    if (at[i] == expected) continue;
    printf("torn %g %g\n", (double)expected, (double)at[i]);
    return 0;
  }
  return 1;
}

static int look_at(const mlfab_view *view) {
  float expected = *(const float *)view->parts[0].data;
  for (uint32_t i = 0; i < view->nparts; i++) {
    if (!uniform(view->parts[i].data, view->parts[i].count, expected)) return 0;
  }
  return 1;
}

static int work(mlfab *fabric, const char *folder) {
  char stop[512];
  int32_t rank = 0;
  long pulls = 0, copied = 0;
  mlfab_rank(fabric, &rank, NULL, NULL);
  snprintf(stop, sizeof stop, "%s/stop", folder);
  float *weights = calloc(COUNT, sizeof *weights), *ones = calloc(COUNT, sizeof *ones);
  if (!weights || !ones) return 1;
  for (uint64_t i = 0; i < COUNT; i++) ones[i] = 1.0f;
  mlfab_buf model = {0, 0, weights, COUNT}, update = {0, 0, ones, COUNT};
  mlfab_model_options options;
  mlfab_model_options_init(&options);
  options.consistency.kind = MLFAB_SYNC_ASYNC;
  options.slices = 1; /* so that every pull is of one commit */
  int code = mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT);
  if (!code) code = mlfab_model_start(fabric, &options, &model, 1);
  if (code) return failed(fabric, "model_start", code);
  printf("pid %ld\n", (long)getpid());
  do {
    if ((code = mlfab_pull(fabric, &model, 1, NULL, NULL)) != 0)
      return failed(fabric, "pull", code);
    if (!uniform(weights, COUNT, weights[0])) return 1;
    pulls++;
    if (rank == 0 && (code = mlfab_push(fabric, &update, 1, NULL, NULL)) != 0)
      return failed(fabric, "push", code);
    mlfab_view view = {.size = sizeof view};
    if ((code = mlfab_pull_view(fabric, &model, 1, NULL, &view)) != 0)
      return failed(fabric, "pull_view", code);
    copied += view.copied;
    if (!look_at(&view)) return 1;
    if ((code = mlfab_view_release(fabric, &view)) != 0) return failed(fabric, "release", code);
  } while (access(stop, F_OK) != 0);
  printf("end %ld %ld\n", pulls, copied);
  free(weights);
  free(ones);
  return 0;
}

int main(int argc, char **argv) {
  mlfab *fabric = NULL;
  mlfab_error error;
  mlfab_config config;
  memset(&error, 0, sizeof error);
  setvbuf(stdout, NULL, _IOLBF, 0);
  mlfab_config_init(&config);
  int code = mlfab_config_from_env(&config, &error);
  config.heartbeat_ns = 50000000;
  config.silent_death_ns = 300000000;
  if (!code) code = mlfab_open(&config, &fabric, &error);
  if (code) {
    fprintf(stderr, "open: %s: %s\n", mlfab_error_name(code), error.text);
    return 1;
  }
  int status = argc == 2 ? work(fabric, argv[1]) : mlfab_serve(fabric, 0) != 0;
  mlfab_close(&fabric);
  return status;
}
