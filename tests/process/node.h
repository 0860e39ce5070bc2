/* node.h - shared by the programs of this folder: a node is opened as its environment says, and tells its errors. */
#ifndef NODE_H
#define NODE_H

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

#define MS UINT64_C(1000000)

static mlfab *fabric;
static int32_t rank;
static uint32_t workers, servers;

/* Prints the last error of the fabric, behind what was tried. Returns 1. */
static inline int failed(const char *what) {
  mlfab_error error = {.text = ""};
  if (fabric) mlfab_last_error(fabric, &error);
  fprintf(stderr, "%s: %s: %s\n", what, mlfab_error_name(error.code), error.text);
  return 1;
}

/* Ends the program if the call did not succeed. */
static inline void must(const char *what, int code) {
  if (code) exit(failed(what));
}

static inline void opened(int code, const mlfab_error *error) {
  if (code) {
    fprintf(stderr, "open: %s: %s\n", mlfab_error_name(code), error->text);
    exit(1);
  }
  mlfab_rank(fabric, &rank, &workers, &servers);
}

/* mlfab_config_from_env may fail here, and mlfab_open in open_node; both end the program. */
static inline void configure(mlfab_config *config) {
  mlfab_error error = {.text = ""};
  mlfab_config_init(config);
  int code = mlfab_config_from_env(config, &error);
  if (code) opened(code, &error);
}

/* NULL: mlfab_open_env, after which models begin as the environment says. */
static inline void open_node(const mlfab_config *config) {
  mlfab_error error = {.text = ""};
  int code = config ? mlfab_open(config, &fabric, &error) : mlfab_open_env(&fabric, &error);
  opened(code, &error);
}

static inline int close_node(int status) {
  mlfab_close(&fabric);
  return status;
}

/* Zeros. */
static inline void *zeros(uint64_t count, size_t size) {
  void *at = calloc(count, size);
  if (!at) {
    fprintf(stderr, "out of memory\n");
    exit(1);
  }
  return at;
}

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000 * MS + (uint64_t)t.tv_nsec;
}

static inline double seconds_now(void) { return (double)now_ns() * 1e-9; }

static inline void nap(double ms) {
  uint64_t ns = (uint64_t)(ms * 1e6);
  struct timespec t = {(time_t)(ns / (1000 * MS)), (long)(ns % (1000 * MS))};
  nanosleep(&t, NULL);
}

/* A line on stdout, in one write, so that it survives a kill. */
__attribute__((__format__(__printf__, 1, 2))) static inline void tell(const char *format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  line[n++] = '\n';
  if (write(STDOUT_FILENO, line, (size_t)n) != n) exit(9);
}

/* Files by which the processes of a test wait for each other. */
static inline const char *path_of(const char *folder, const char *name) {
  static _Thread_local char path[512];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  return path;
}

static inline int exists(const char *folder, const char *name) {
  return access(path_of(folder, name), F_OK) == 0;
}

static inline void make_file(const char *folder, const char *name) {
  FILE *file = fopen(path_of(folder, name), "w");
  if (!file || fclose(file)) exit(4);
}

/* Ends the program if that takes 100 s. */
static inline void await_file(const char *folder, const char *name) {
  for (int i = 0; !exists(folder, name); i++) {
    if (i == 10000) exit(5);
    nap(10);
  }
}

#endif
