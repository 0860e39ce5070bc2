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
#include "node.h"
#include "mlfab_partial.h"

#include <math.h>

enum { WARM = 20, VICTIM = 2, INPUTS = 16, PATIENCE_MS = 8000 };

static uint64_t count;
static float *data;

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

/* Ends the program: a mean is impossible. */
static void wrong(const char *what) { exit(failed(what)); }

static uint32_t open_one(uint32_t graph, uint32_t mode) {
  mlfab_stochastic_options options = {.size = sizeof options, .graph = graph, .mode = mode};
  uint32_t id;
  must("open", mlfab_stochastic_open(fabric, count, MLFAB_F32, &options, &id));
  return id;
}

static void meet(void) {
  mlfab_request request;
  must("barrier", mlfab_barrier_start(fabric, NULL, &request));
  must("barrier", mlfab_wait(fabric, request, 0, NULL));
}

/* Measures the time of writing: iterations without computing. */
static double warm_up(void) {
  mlfab_stochastic_info info = {.size = sizeof info};
  uint32_t id = open_one(MLFAB_GRAPH_ALL, MLFAB_STOCHASTIC_NOTIFY_ACK);
  meet();
  double begin = seconds_now();
  for (uint32_t k = 1; k <= WARM; k++) {
    fill(k);
    must("reduce", mlfab_stochastic_reduce(fabric, id, data, 0, &info));
    if (info.whole != workers - 1 || check(&info, k, MLFAB_STOCHASTIC_NOTIFY_ACK)) wrong("a mean");
  }
  double us = (seconds_now() - begin) / WARM * 1e6;
  meet();
  must("close", mlfab_stochastic_close(fabric, id));
  return us;
}

static void shares(uint32_t mode, uint32_t iterations, double us) {
  double write_us = warm_up(), pace = 0.5 + uniform((uint64_t)rank * 7 + 3);
  uint64_t inputs[INPUTS] = {0}, torn = 0, stale = 0;
  mlfab_stochastic_info info = {.size = sizeof info};
  uint32_t id = open_one(MLFAB_GRAPH_ALL, mode), k = 0;
  meet();
  double begin = seconds_now(), end = begin + iterations * us * 1e-6;
  /* Workers do not wait for each other: iterate as long as the others would need. */
  while (mode == MLFAB_STOCHASTIC_ASYNC ? seconds_now() < end : k < iterations) {
    nap(1e-3 * us * pace * (0.9 + 0.2 * uniform((uint64_t)k * 64 + (uint64_t)rank)));
    fill(++k);
    must("reduce", mlfab_stochastic_reduce(fabric, id, data, 0, &info));
    if (check(&info, k, mode)) wrong("a mean");
    inputs[info.whole < INPUTS ? info.whole : INPUTS - 1]++;
    torn += info.torn;
    stale += info.stale;
  }
  double took = seconds_now() - begin;
  meet();
  must("close", mlfab_stochastic_close(fabric, id));
  printf("shares %u %.3f %.0f %llu %llu", k, took, write_us, (unsigned long long)torn,
         (unsigned long long)stale);
  for (uint32_t i = 0; i < workers && i < INPUTS; i++)
    printf(" %llu", (unsigned long long)inputs[i]);
  printf("\n");
}

static void fail(const char *what) {
  mlfab_stochastic_info info = {.size = sizeof info};
  mlfab_error error;
  const int dies = !strcmp(what, "die");
  uint32_t id = open_one(MLFAB_GRAPH_EXPANDER, MLFAB_STOCHASTIC_NOTIFY_ACK), k = 0;
  for (int code = 0; !code;) {
    fill(++k);
    if (k == 20 && rank == VICTIM && dies) _exit(0);
    if (k == 20 && rank == VICTIM) nap(2.0 * PATIENCE_MS);
    nap(2);
    code = mlfab_stochastic_reduce(fabric, id, data, dies ? 0 : PATIENCE_MS * MS, &info);
    if (!code && check(&info, k, MLFAB_STOCHASTIC_NOTIFY_ACK)) wrong("a mean");
  }
  mlfab_last_error(fabric, &error);
  for (uint64_t e = 0; e < count; e++) { /* unchanged */
    float was = e % workers == (uint32_t)rank ? (float)k : 0;
    if (!(data[e] >= was && data[e] <= was)) wrong("data of a failed call");
  }
  printf("failed %s %d %u %s\n", mlfab_error_name(error.code), (int)error.rank, k, error.text);
  for (k = 1; k <= 5; k++) {
    fill(k);
    must("go on", mlfab_stochastic_reduce(fabric, id, data, 0, &info));
    if (check(&info, k, MLFAB_STOCHASTIC_NOTIFY_ACK)) wrong("a mean afterwards");
  }
  printf("on %u\n", info.senders);
  meet();
}

int main(int argc, char **argv) {
  mlfab_config config;
  int of_shares = argc == 6 && !strcmp(argv[1], "shares");
  if (!of_shares && (argc != 4 || strcmp(argv[1], "fail"))) {
    fprintf(stderr, "usage: stochastic shares MODE ITERATIONS COUNT US | fail die|sleep COUNT\n");
    return 2;
  }
  configure(&config);
  config.chunk_bytes = 4096;
  open_node(&config);
  count = strtoull(argv[of_shares ? 4 : 3], NULL, 10);
  data = zeros(count, sizeof *data);
  if (of_shares)
    shares((uint32_t)atoi(argv[2]), (uint32_t)atoi(argv[3]), atof(argv[5]));
  else
    fail(argv[2]);
  return close_node(0);
}
