/* single.h - shared by the benchmarks that are programs of their own: NAME [FILE.tsv] [--quick]. Clocks, memory, medians,
 * the command line, and rows in the format of bench.c. */
#ifndef MLFAB_BENCH_SINGLE_H
#define MLFAB_BENCH_SINGLE_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SINGLE_UNUSED __attribute__((unused))

static const char *single_name = "bench"; /* of the program */
static FILE *tsv;                         /* rows are appended to it; NULL: to none */
static int quick;                         /* --quick was given */

SINGLE_UNUSED static double single_seconds(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Seconds of processor time of this process: other processes on the machine do not count. */
SINGLE_UNUSED static double cpu_now(void) { return single_seconds(CLOCK_PROCESS_CPUTIME_ID); }

/* Seconds of the wall's clock. */
SINGLE_UNUSED static double wall_now(void) { return single_seconds(CLOCK_MONOTONIC); }

SINGLE_UNUSED static void require(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "%s: %s\n", single_name, what);
  exit(1);
}

/* Pages that have been touched. */
SINGLE_UNUSED static void *memory(uint64_t bytes) {
  void *array = aligned_alloc(64, (bytes + 63) / 64 * 64);
  require(array != NULL, "out of memory");
  memset(array, 1, bytes);
  return array;
}

/* Reads the command line. Ends the program when a file cannot be opened. */
SINGLE_UNUSED static void single_open(int argc, char **argv) {
  const char *slash = strrchr(argv[0], '/');
  single_name = slash ? slash + 1 : argv[0];
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], "--quick") == 0) {
      quick = 1;
    } else if ((tsv = fopen(argv[i], "a")) == NULL) {
      perror(argv[i]);
      exit(2);
    }
  }
}

SINGLE_UNUSED static void single_close(void) {
  if (tsv) fclose(tsv);
}

SINGLE_UNUSED static int single_ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Sorts the values. */
SINGLE_UNUSED static double median(double *values, int n) {
  qsort(values, (size_t)n, sizeof *values, single_ascending);
  return values[n / 2];
}

/* One row: the value beside that of a peer and that of a limit. No name, or 0: there is none. */
SINGLE_UNUSED static void row(const char *name, double value, const char *unit, const char *peer,
                              double peer_value, const char *limit, double limit_value) {
  const char *const names[] = {peer, limit};
  const double values[] = {peer_value, limit_value};
  if (!tsv) return;
  fprintf(tsv, "%s\t%.6g\t%s", name, value, unit);
  for (int i = 0; i < 2; i++) {
    fprintf(tsv, "\t%s\t", names[i] ? names[i] : "-");
    if (values[i] > 0) fprintf(tsv, "%.6g", values[i]);
    if (!(values[i] > 0)) fprintf(tsv, "-");
  }
  fprintf(tsv, "\n");
}

#endif
