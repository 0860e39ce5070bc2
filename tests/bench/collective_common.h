/* collective_common.h - a rank of a contestant of the benchmark of collectives.
 *
 * A contestant is a group of processes that stay for the whole benchmark and sleep in a read while
 * others are measured. tests/bench/collective.py writes an order to the named pipe DIR/in.RANK of
 * each of them, and every rank answers with a line in DIR/out:
 *
 *    check BYTES       one allreduce, whose sum is looked at       RANK 0, or RANK wrong
 *    run BYTES COUNT   COUNT of them, one behind the other         RANK SECONDS
 *
 * A size is checked before it is run. A trial is warmed up by one allreduce, so that all ranks
 * begin together. The arrays hold zeros in a trial: sums of anything else would grow. End of file
 * ends the rank. */
#ifndef MLFAB_BENCH_COLLECTIVE_COMMON_H
#define MLFAB_BENCH_COLLECTIVE_COMMON_H

#include <fcntl.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct collective_rank {
  int rank, ranks;
  float *data;
  void *self; /* the contestant's own data */
  void (*prepare)(struct collective_rank *,
                  size_t); /* called before the first call with a new count, or NULL */
  void (*allreduce)(struct collective_rank *, size_t count);
} collective_rank;

enum { COLLECTIVE_BYTES_MAX = 100 << 20 };

static inline double collective_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline void collective_fail(const char *who, const char *why) {
  fprintf(stderr, "%s: %s\n", who, why);
  exit(1);
}

static inline float *collective_memory(void) {
  float *data = (float *)aligned_alloc(4096, COLLECTIVE_BYTES_MAX);
  if (!data) collective_fail("bench-collective", "out of memory");
  memset(data, 0, COLLECTIVE_BYTES_MAX);
  return data;
}

/* Open MPI binds its ranks when there is a core for each, so the other contestants' ranks are bound too. */
static inline void collective_bind(int rank, int ranks) {
  cpu_set_t set;
  if (ranks > sysconf(_SC_NPROCESSORS_ONLN)) return;
  CPU_ZERO(&set);
  CPU_SET((size_t)rank, &set);
  sched_setaffinity(0, sizeof set, &set);
}

static inline int collective_check(collective_rank *r, size_t count) {
  float sum = (float)(r->ranks * (r->ranks + 1) / 2);
  int right = 1;
  if (r->prepare) r->prepare(r, count);
  for (size_t i = 0; i < count; i++) r->data[i] = (float)(r->rank + 1);
  r->allreduce(r, count);
  for (size_t i = 0; i < count; i++) right &= r->data[i] == sum;
  memset(r->data, 0, count * sizeof(float));
  return right;
}

static inline double collective_run(collective_rank *r, size_t count, unsigned long times) {
  r->allreduce(r, count);
  double begin = collective_now();
  for (unsigned long i = 0; i < times; i++) r->allreduce(r, count);
  return collective_now() - begin;
}

/* Executes orders until end of file. */
static inline void collective_serve(collective_rank *r, const char *dir) {
  char path[512], order[128], answer[64];
  unsigned long bytes, times;
  snprintf(path, sizeof path, "%s/in.%d", dir, r->rank);
  FILE *in = fopen(path, "r");
  snprintf(path, sizeof path, "%s/out", dir);
  int out = open(path, O_WRONLY);
  if (!in || out < 0) collective_fail("bench-collective: no pipe", path);
  while (fgets(order, (int)sizeof order, in)) {
    if (sscanf(order, "run %lu %lu", &bytes, &times) == 2) {
      double seconds = collective_run(r, bytes / sizeof(float), times);
      snprintf(answer, sizeof answer, "%d %.9f\n", r->rank, seconds);
    } else if (sscanf(order, "check %lu", &bytes) == 1) {
      int right = collective_check(r, bytes / sizeof(float));
      snprintf(answer, sizeof answer, "%d %s\n", r->rank, right ? "0" : "wrong");
    } else {
      collective_fail("bench-collective: no such order", order);
    }
    if (write(out, answer, strlen(answer)) < 0) break;
  }
  fclose(in);
  close(out);
}

#endif
