/* replica_worker.c - a worker of replica_test.py and soak_test.py: it counts what it was promised.
 *
 *   replica_worker FOLDER COUNT [collective] [versions] [expires=MS]
 *
 * The model is one F64 tensor of 2 * workers * COUNT elements. Element e counts updates: those of worker e / 2 % workers
 * that were to be DURABLE if e is even, APPLIED if it is odd. A worker has one durable push in flight at a time, and
 * beside it applied ones, one after the other. `collective`: with each of these it makes an allreduce, too. `versions`:
 * FOLDER/RANK.versions gets a line for each push that was answered: d or a, and the version of its commit. `expires`: a
 * durable push has so long, and one that had no answer by then is counted.
 *
 * Its counters are in the file FOLDER/RANK, which survives it (enum below). At the end it prints a line for each worker:
 *   final R <least and largest of the durable elements> <least and largest of the applied ones> */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RUN, STOP, READ }; /* of CONTROL, which the test writes */
enum {
  CONTROL,
  PID,
  LIVES,           /* processes that have begun to push */
  STARTED_DURABLE, /* pushes */
  DONE_DURABLE,
  STARTED_APPLIED,
  DONE_APPLIED,
  LOST,       /* stats.updates_lost */
  LAST_START, /* the last applied push that is done: CLOCK_MONOTONIC, in ns */
  LAST_DONE,
  STOPPED, /* it has finished, and waits for READ */
  SUMS,    /* collectives */
  EXPIRED, /* durable pushes without an answer at their own deadline */
  WORDS
};

typedef struct worker {
  mlfab *fabric;
  volatile uint64_t *at;
  uint64_t lost_before; /* by former processes */
  uint32_t rank, workers;
  uint64_t count;
  double *model, *durable, *applied;
  mlfab_request request;          /* of the durable push */
  uint64_t timeout_ns, opened_ns; /* the durable push has so long */
  int open, collective;
  uint64_t expires_ns; /* a durable push's own deadline; 0: the configuration's */
  FILE *versions;
} worker;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int failed(mlfab *fabric, const char *what, int code) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s: %s\n", what, mlfab_error_name(code), error.text);
  return 1;
}

static volatile uint64_t *counters(const char *folder, uint32_t rank) {
  char path[512];
  snprintf(path, sizeof path, "%s/%u", folder, rank);
  int fd = open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, WORDS * 8)) return NULL;
  void *at = mmap(NULL, WORDS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return at == MAP_FAILED ? NULL : at;
}

static void count_losses(worker *w) {
  mlfab_stats stats;
  if (!mlfab_get_stats(w->fabric, &stats, sizeof stats))
    w->at[LOST] = w->lost_before + stats.updates_lost;
}

/* A push was answered. */
static void note_version(const worker *w, char kind, const mlfab_result *result) {
  if (!w->versions) return;
  fprintf(w->versions, "%c %llu\n", kind, (unsigned long long)result->version);
  fflush(w->versions);
}

/* Ends the durable push if it is done, or waits for that, and starts the next one unless all is to end. */
static int push_durable(worker *w, int wait) {
  int done = 0, code = 0;
  mlfab_result result;
  if (w->open && !wait) code = mlfab_test(w->fabric, w->request, &done, &result);
  if (!code && done) code = result.status;
  if (!code && !done && w->open && now_ns() - w->opened_ns > w->timeout_ns) wait = 1;
  if (w->open && wait) code = mlfab_wait(w->fabric, w->request, w->timeout_ns, &result);
  int expired = w->expires_ns && (code == MLFAB_ERR_TIMEOUT || code == MLFAB_ERR_IN_DOUBT);
  if (code && !expired) return failed(w->fabric, "durable push", code);
  if (w->open && !wait && !done) return 0;
  if (w->open) w->at[expired ? EXPIRED : DONE_DURABLE]++;
  if (w->open && !expired) note_version(w, 'd', &result);
  w->open = 0;
  if (wait) return 0;
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  mlfab_buf update = {0, 0, w->durable, 2 * w->workers * w->count};
  options.ack = MLFAB_ACK_DURABLE;
  options.timeout_ns = w->expires_ns;
  w->at[STARTED_DURABLE]++;
  code = mlfab_push_start(w->fabric, &update, 1, &options, &w->request);
  if (code == MLFAB_ERR_AGAIN) { /* too many are under way */
    w->at[STARTED_DURABLE]--;
    return 0;
  }
  w->open = 1;
  w->opened_ns = now_ns();
  return code ? failed(w->fabric, "durable push", code) : 0;
}

static int push_applied(worker *w) {
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  mlfab_buf update = {0, 0, w->applied, 2 * w->workers * w->count};
  options.ack = MLFAB_ACK_APPLIED;
  uint64_t began = now_ns();
  w->at[STARTED_APPLIED]++;
  mlfab_result result;
  int code = mlfab_push(w->fabric, &update, 1, &options, &result);
  if (code == MLFAB_ERR_AGAIN) { /* the durable one waits for long */
    struct timespec nap = {0, 1000000};
    w->at[STARTED_APPLIED]--;
    nanosleep(&nap, NULL);
    return 0;
  }
  if (code) return failed(w->fabric, "applied push", code);
  note_version(w, 'a', &result);
  w->at[DONE_APPLIED]++;
  w->at[LAST_DONE] = now_ns();
  w->at[LAST_START] = began;
  return 0;
}

/* All stop after the same collective. */
static int stops(worker *w, int *stops_p) {
  double sum[2] = {w->at[CONTROL] != RUN, 1.0};
  *stops_p = sum[0] > 0;
  if (!w->collective) return 0;
  int code = mlfab_allreduce(w->fabric, sum, 2, MLFAB_F64, NULL);
  if (code) return failed(w->fabric, "allreduce", code);
  *stops_p = sum[0] > 0;
  w->at[SUMS]++;
  if (sum[1] == (double)w->workers) return 0;
  fprintf(stderr, "a sum over %g of %u workers\n", sum[1], w->workers);
  return 1;
}

static int read_model(const worker *w) {
  mlfab_buf all = {0, 0, w->model, 2 * w->workers * w->count};
  int code = mlfab_pull(w->fabric, &all, 1, NULL, NULL);
  if (code) return failed(w->fabric, "last pull", code);
  for (uint32_t r = 0; r < w->workers; r++) {
    double least[2], most[2];
    for (int k = 0; k < 2; k++) {
      least[k] = most[k] = w->model[2 * r + (uint32_t)k];
      for (uint64_t i = 0; i < w->count; i++) {
        double v = w->model[2 * (i * w->workers + r) + (uint64_t)k];
        if (v < least[k]) least[k] = v;
        if (v > most[k]) most[k] = v;
      }
    }
    printf("final %u %.17g %.17g %.17g %.17g\n", r, least[0], most[0], least[1], most[1]);
  }
  return 0;
}

static int work(worker *w) {
  uint64_t n = 2 * w->workers * w->count;
  mlfab_buf zeros = {0, 0, w->model, n};
  for (uint64_t i = 0; i < w->count; i++)
    w->durable[2 * (i * w->workers + w->rank)] = w->applied[2 * (i * w->workers + w->rank) + 1] =
        1.0;
  int code = mlfab_tensor_add(w->fabric, 0, MLFAB_F64, n);
  if (!code) code = mlfab_model_start(w->fabric, NULL, &zeros, 1);
  if (code) return failed(w->fabric, "model", code);
  w->at[LIVES]++;
  for (int end = 0; !end;) {
    if (push_durable(w, 0) || push_applied(w) || stops(w, &end)) return 1;
    count_losses(w);
  }
  if (push_durable(w, 1)) return 1;
  code = mlfab_finish(w->fabric, 0);
  if (code) return failed(w->fabric, "finish", code);
  count_losses(w);
  w->at[STOPPED] = 1;
  while (w->at[CONTROL] != READ) {
    struct timespec nap = {0, 5000000};
    nanosleep(&nap, NULL);
  }
  return read_model(w);
}

static int prepare(worker *w, const char *folder, char **words) {
  for (; *words; words++) {
    char path[512];
    snprintf(path, sizeof path, "%s/%u.versions", folder, w->rank);
    if (!strcmp(*words, "collective")) w->collective = 1;
    if (!strncmp(*words, "expires=", 8)) w->expires_ns = strtoull(*words + 8, NULL, 10) * 1000000u;
    if (!strcmp(*words, "versions") && !(w->versions = fopen(path, "a")))
      return failed(NULL, path, MLFAB_ERR_IO);
  }
  w->at = counters(folder, w->rank);
  uint64_t n = 2 * w->workers * w->count;
  w->model = calloc(n, sizeof *w->model);
  w->durable = calloc(n, sizeof *w->durable);
  w->applied = calloc(n, sizeof *w->applied);
  if (!w->at || !w->model || !w->durable || !w->applied)
    return failed(NULL, "prepare", MLFAB_ERR_MEMORY);
  w->at[PID] = (uint64_t)getpid();
  w->at[STOPPED] = 0;
  w->lost_before = w->at[LOST];
  return 0;
}

int main(int argc, char **argv) {
  mlfab_config config;
  mlfab_error error;
  worker w;
  if (argc < 3) return 2;
  memset(&error, 0, sizeof error);
  memset(&w, 0, sizeof w);
  mlfab_config_init(&config);
  int code = mlfab_config_from_env(&config, &error);
  if (!code) code = mlfab_open(&config, &w.fabric, &error);
  if (code) {
    fprintf(stderr, "open: %s: %s\n", mlfab_error_name(code), error.text);
    return 1;
  }
  int32_t rank = 0;
  mlfab_rank(w.fabric, &rank, &w.workers, NULL);
  w.rank = (uint32_t)rank;
  w.count = strtoull(argv[2], NULL, 10);
  w.timeout_ns = config.timeout_ns;
  int status = prepare(&w, argv[1], argv + 3);
  if (!status) status = work(&w);
  mlfab_close(&w.fabric);
  if (w.versions) fclose(w.versions);
  free(w.model);
  free(w.durable);
  free(w.applied);
  return status;
}
