/* stochastic.c - a worker of stochastic_test.py: stochastic reduces between real processes.
 *
 * Computing is simulated by sleeping. The time depends on the worker and on the iteration, within 50 % of
 * the mean. Worker j sends in its iteration k an array whose element e is k where e % workers = j, else 0:
 * the mean shows its contributors, and an array whose segments differ was torn.
 *
 *   stochastic shares MODE ITERATIONS COUNT MICROSECONDS
 *       first measures the time of writing in back-to-back iterations; then prints:
 *       "shares <reduces> <seconds> <write us> <torn> <stale> <reduces with 0, 1, ... whole inputs>"
 *   stochastic fail WHAT COUNT
 *       worker 2 dies (WHAT die) or does not call (WHAT sleep) at its 20th iteration.
 *       The others print "failed <code> <rank> <iterations> <text>", then after five more iterations:
 * "on <senders>" */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { WARM = 30, VICTIM = 2, INPUTS = 16 };
#define SECOND 1000000000ull

static mlfab *fabric;
static int32_t rank;
static uint32_t workers;
static uint64_t count;
static float *data;

static int failed(const char *what) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  mlfab_last_error(fabric, &error);
  fprintf(stderr, "worker %d: %s: %s: %s\n", (int)rank, what, mlfab_error_name(error.code),
          error.text);
  return 1;
}

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void pause_us(double us) {
  struct timespec t = {(time_t)(us / 1e6), (long)(fmod(us, 1e6) * 1e3)};
  nanosleep(&t, NULL);
}

static double uniform(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return (double)((x ^ x >> 31) >> 11) * 0x1p-53;
}

static void fill(uint32_t k) {
  for (uint64_t e = 0; e < count; e++) data[e] = e % workers == (uint32_t)rank ? (float)k : 0;
}

/* Checks the contributors of the mean. Returns 0, or 1 when the mean is impossible. */
static int check(const mlfab_stochastic_info *info, uint32_t k, uint32_t mode) {
  uint32_t whole = 0;
  for (uint64_t e = workers; e < count; e++)
    if (!(data[e] >= data[e % workers] && data[e] <= data[e % workers])) return 1;
  for (uint32_t j = 0; j < workers; j++) {
    double of = (double)data[j] * (info->whole + 1);
    if (fabs(of - floor(of + 0.5)) > 0.01) return 1;
    if (j == (uint32_t)rank
            ? fabs(of - k) > 0.01
            : mode == MLFAB_STOCHASTIC_NOTIFY_ACK && of > 0.5 && fabs(of - k) > 0.01)
      return 1;
    whole += j != (uint32_t)rank && of > 0.5;
  }
  return whole != info->whole || info->whole + info->torn + info->stale != info->senders;
}

static int open_one(uint32_t graph, uint32_t mode, uint32_t *id_p) {
  mlfab_stochastic_options options = {.size = sizeof options, .graph = graph, .mode = mode};
  return mlfab_stochastic_open(fabric, count, MLFAB_F32, &options, id_p);
}

static int meet(void) {
  mlfab_request request;
  int code = mlfab_barrier_start(fabric, NULL, &request);
  return code ? code : mlfab_wait(fabric, request, 0, NULL);
}

/* Measures the time of writing: iterations without computing. */
static int warm_up(double *us_p) {
  mlfab_stochastic_info info = {.size = sizeof info};
  uint32_t id;
  if (open_one(MLFAB_GRAPH_ALL, MLFAB_STOCHASTIC_NOTIFY_ACK, &id) || meet()) return failed("open");
  double begin = seconds();
  for (uint32_t k = 1; k <= WARM; k++) {
    fill(k);
    if (mlfab_stochastic_reduce(fabric, id, data, 0, &info)) return failed("reduce");
    if (info.whole != workers - 1 || check(&info, k, MLFAB_STOCHASTIC_NOTIFY_ACK))
      return failed("a mean");
  }
  *us_p = (seconds() - begin) / WARM * 1e6;
  if (meet() || mlfab_stochastic_close(fabric, id)) return failed("close");
  return 0;
}

static int shares(uint32_t mode, uint32_t iterations, double us) {
  double write_us = 0, pace = 0.5 + uniform((uint64_t)rank * 7 + 3);
  uint64_t inputs[INPUTS] = {0}, torn = 0, stale = 0;
  mlfab_stochastic_info info = {.size = sizeof info};
  uint32_t id, k = 0;
  if (warm_up(&write_us)) return 1;
  if (open_one(MLFAB_GRAPH_ALL, mode, &id) || meet()) return failed("open");
  double begin = seconds(), end = begin + iterations * us * 1e-6;
  /* Workers do not wait for each other: iterate as long as the others would need. */
  while (mode == MLFAB_STOCHASTIC_ASYNC ? seconds() < end : k < iterations) {
    pause_us(us * pace * (0.9 + 0.2 * uniform((uint64_t)k * 64 + (uint64_t)rank)));
    fill(++k);
    if (mlfab_stochastic_reduce(fabric, id, data, 0, &info)) return failed("reduce");
    if (check(&info, k, mode)) return failed("a mean");
    inputs[info.whole < INPUTS ? info.whole : INPUTS - 1]++;
    torn += info.torn;
    stale += info.stale;
  }
  double took = seconds() - begin;
  if (meet() || mlfab_stochastic_close(fabric, id)) return failed("close");
  printf("shares %u %.3f %.0f %llu %llu", k, took, write_us, (unsigned long long)torn,
         (unsigned long long)stale);
  for (uint32_t i = 0; i < workers && i < INPUTS; i++)
    printf(" %llu", (unsigned long long)inputs[i]);
  printf("\n");
  return 0;
}

static int fail(const char *what) {
  mlfab_stochastic_info info = {.size = sizeof info};
  mlfab_error error;
  uint64_t patience = strcmp(what, "die") ? SECOND : 20 * SECOND;
  uint32_t id, k = 0;
  int code = 0;
  if (open_one(MLFAB_GRAPH_EXPANDER, MLFAB_STOCHASTIC_NOTIFY_ACK, &id)) return failed("open");
  while (!code) {
    fill(++k);
    if (k == 20 && rank == VICTIM && !strcmp(what, "die")) _exit(0);
    if (k == 20 && rank == VICTIM) pause_us(3e6);
    pause_us(2000);
    code = mlfab_stochastic_reduce(fabric, id, data, patience, &info);
    if (!code && check(&info, k, MLFAB_STOCHASTIC_NOTIFY_ACK)) return failed("a mean");
  }
  mlfab_last_error(fabric, &error);
  for (uint64_t e = 0; e < count; e++) { /* unchanged */
    float was = e % workers == (uint32_t)rank ? (float)k : 0;
    if (!(data[e] >= was && data[e] <= was)) return failed("data of a failed call");
  }
  printf("failed %s %d %u %s\n", mlfab_error_name(code), (int)error.rank, k, error.text);
  for (k = 1; k <= 5; k++) {
    fill(k);
    if (mlfab_stochastic_reduce(fabric, id, data, 10 * SECOND, &info)) return failed("go on");
    if (check(&info, k, MLFAB_STOCHASTIC_NOTIFY_ACK)) return failed("a mean afterwards");
  }
  printf("on %u\n", info.senders);
  return meet() ? failed("meet") : 0;
}

static int run(int argc, char **argv) {
  if (argc == 6 && !strcmp(argv[1], "shares")) {
    count = strtoull(argv[4], NULL, 10);
    data = calloc(count, sizeof *data);
    return data == NULL || shares((uint32_t)atoi(argv[2]), (uint32_t)atoi(argv[3]), atof(argv[5]));
  }
  if (argc == 4 && !strcmp(argv[1], "fail")) {
    count = strtoull(argv[3], NULL, 10);
    data = calloc(count, sizeof *data);
    return data == NULL || fail(argv[2]);
  }
  fprintf(stderr, "usage: stochastic shares MODE ITERATIONS COUNT US | fail die|sleep COUNT\n");
  return 2;
}

int main(int argc, char **argv) {
  mlfab_config config;
  mlfab_error error;
  mlfab_config_init(&config);
  if (mlfab_config_from_env(&config, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  config.chunk_bytes = 4096;
  if (mlfab_open(&config, &fabric, &error)) {
    fprintf(stderr, "%s\n", error.text);
    return 1;
  }
  int code = mlfab_rank(fabric, &rank, &workers, NULL) ? failed("rank") : run(argc, argv);
  mlfab_close(&fabric);
  free(data);
  return code;
}
