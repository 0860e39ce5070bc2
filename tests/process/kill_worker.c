/* kill_worker.c - a worker of kill9_test.py, which is killed and restarted at random times.
 *
 * Each push adds 1.0 to this worker's own element of a small tensor, and to every element of a large one,
 * as one operation: the model shows which pushes were lost, applied twice, or applied in part. The memory of the large one is of
 * mlfab_alloc. Lines on
 * stdout, one write each, so that they survive a kill:
 *
 *   pid <pid>              at every start
 *   start                  before a push
 *   done                   after the push was acknowledged
 *   barrier                after a barrier
 *   stopped                after mlfab_finish, once the file <folder>/stop exists
 *   added <updates>        before that, with a scheduler: updates that this process aggregated
 *   final <small elements> <least and largest of the large tensor>
 *                          once <folder>/read exists
 *
 * Usage: kill_worker <folder> <elements of the large tensor>
 *        kill_worker        as a server, whose link is as slow as the workers' */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LINK 50e6 /* bytes a second */
enum { SMALL = 0, LARGE = 1, PUSHES_A_BARRIER = 7 };

__attribute__((__format__(__printf__, 1, 2))) static void tell(const char *format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  line[n++] = '\n';
  if (write(STDOUT_FILENO, line, (size_t)n) != n) exit(9);
}

static int exists(const char *folder, const char *name) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return access(path, F_OK) == 0;
}

static int failed(mlfab *fabric, const char *what, int code) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s: %s\n", what, mlfab_error_name(code), error.text);
  return 1;
}

/* Prints the current model. */
static int read_model(mlfab *fabric, mlfab_buf *bufs, uint32_t workers) {
  const double *small = bufs[SMALL].data;
  const float *large = bufs[LARGE].data;
  int code = mlfab_pull(fabric, bufs, 2, NULL, NULL);
  if (code) return failed(fabric, "last pull", code);
  float least = large[0], most = large[0];
  for (uint64_t i = 0; i < bufs[LARGE].count; i++) {
    if (large[i] < least) least = large[i];
    if (large[i] > most) most = large[i];
  }
  char text[512];
  size_t n = 0;
  for (uint32_t r = 0; r < workers && n < sizeof text - 32; r++)
    n += (size_t)snprintf(text + n, sizeof text - n, " %.0f", small[r]);
  tell("final%s %.1f %.1f", text, (double)least, (double)most);
  return 0;
}

/* All workers run on one host. With a scheduler they report different hosts with slow links, and a long
 * interval lets several updates wait, so that groups form. */
static int spread_out(mlfab *fabric) {
  mlfab_schedule schedule;
  mlfab_schedule_init(&schedule);
  schedule.interval_ns = 10000000;
  int code = mlfab_set_link(fabric, LINK, LINK);
  return code ? code : mlfab_set_schedule(fabric, &schedule);
}

static void tell_added(mlfab *fabric) {
  mlfab_stats stats;
  if (!mlfab_get_stats(fabric, &stats, sizeof stats))
    tell("added %llu", (unsigned long long)stats.members_added);
}

static int work(mlfab *fabric, const char *folder, uint64_t elements, int scheduled) {
  int32_t rank = 0;
  uint32_t workers = 0;
  mlfab_rank(fabric, &rank, &workers, NULL);
  double *small = calloc(workers, sizeof *small);
  float *large = calloc(elements, sizeof *large);
  double *one = calloc(workers, sizeof *one);
  void *lent = NULL; /* where the server is on this host, it reads the memory in place */
  if (!small || !large || !one || mlfab_alloc(fabric, elements * sizeof(float), &lent)) return 1;
  float *ones = lent;
  one[rank] = 1.0;
  for (uint64_t i = 0; i < elements; i++) ones[i] = 1.0f;
  mlfab_buf model[2] = {{SMALL, 0, small, workers}, {LARGE, 0, large, elements}};
  mlfab_buf update[2] = {{SMALL, 0, one, workers}, {LARGE, 0, ones, elements}};

  int code = mlfab_tensor_add(fabric, SMALL, MLFAB_F64, workers);
  if (!code) code = mlfab_tensor_add(fabric, LARGE, MLFAB_F32, elements);
  /* Zeros at every start: only the first process of worker 0 may set the model. */
  if (!code) code = mlfab_model_start(fabric, NULL, model, 2);
  if (code) return failed(fabric, "model_start", code);
  if (scheduled && (code = spread_out(fabric)) != 0) return failed(fabric, "set_schedule", code);
  tell("ready");
  for (int pushes = 1; !exists(folder, "stop"); pushes++) {
    tell("start");
    code = mlfab_push(fabric, update, 2, NULL, NULL);
    if (code) return failed(fabric, "push", code);
    tell("done");
    if (pushes % PUSHES_A_BARRIER == 0) {
      code = mlfab_barrier(fabric, NULL);
      if (code) return failed(fabric, "barrier", code);
      tell("barrier");
    }
  }
  code = mlfab_finish(fabric, 0);
  if (code) return failed(fabric, "join", code);
  if (scheduled) tell_added(fabric);
  tell("stopped");
  while (!exists(folder, "read")) {
    struct timespec nap = {0, 10000000};
    nanosleep(&nap, NULL);
  }
  int status = read_model(fabric, model, workers);
  free(small);
  free(large);
  free(one);
  return status;
}

static int serve(mlfab *fabric) {
  int code = mlfab_set_link(fabric, LINK, LINK);
  if (!code) code = mlfab_serve(fabric, 0);
  return code ? failed(fabric, "serve", code) : 0;
}

int main(int argc, char **argv) {
  if (argc != 3 && argc != 1) return 2;
  mlfab *fabric = NULL;
  mlfab_error error;
  mlfab_config config;
  memset(&error, 0, sizeof error);
  if (argc == 3) tell("pid %ld", (long)getpid());
  mlfab_config_init(&config);
  int code = mlfab_config_from_env(&config, &error);
  config.timeout_ns = 60000000000u;
  config.host = argc == 3 ? (uint64_t)config.rank + 1 : 1000;
  if (!code) code = mlfab_open(&config, &fabric, &error);
  if (code) {
    fprintf(stderr, "open: %s: %s\n", mlfab_error_name(code), error.text);
    return 1;
  }
  int scheduled = config.scheduler != MLFAB_SCHEDULER_NONE;
  int status =
      argc == 1 ? serve(fabric) : work(fabric, argv[1], strtoull(argv[2], NULL, 10), scheduled);
  mlfab_close(&fabric);
  return status;
}
