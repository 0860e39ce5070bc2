/* eager_ranks.c - one rank of eagerSGD's microbenchmark with real processes.
 *
 *   mlfab-run -n 32 -s 0 --shm --no-prefix bench-eager-ranks STEP_MS CASE...
 *
 * CASE is full:BYTES:ROUNDS, solo:BYTES:ROUNDS, majority:BYTES:ROUNDS or Q:BYTES:ROUNDS, a quorum. In a
 * round rank i calls i + 1 steps after a common instant; measured is the duration of the call.
 * Contributions are 2^rank, in even rounds in the lower half of an int64, in odd ones in the upper half: so
 * every element of a sum shows the active ranks of its round, and the late ones of the previous round. Rank
 * 0 prints for each case, times in ms, of means over the ranks:
 *
 *   CASE mean M median M wrong W active A0 A1 ...       Ai: active ranks of round i
 *
 * Source: eagerSGD §6.1, fig. 8. SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab_partial.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS_MAX = 32, ROUNDS_MAX = 4096, BYTES_MAX = 4 << 20 };
#define MS 1000000
/* From the agreement on an instant to that instant: all ranks have to be asleep by then. */
#define AHEAD (10 * MS)

typedef struct rank {
  mlfab *ctx;
  int number, ranks;
  int64_t step_ns, *data;
  uint64_t count, wrong;
  uint64_t active, before;   /* ranks of the last round, of the one before */
  double waited[ROUNDS_MAX]; /* ms, divided by the ranks */
  uint32_t took_part[ROUNDS_MAX];
} rank;

static void require(rank *r, int code, const char *what) {
  mlfab_error error = {.code = 0};
  if (code == 0) return;
  mlfab_last_error(r->ctx, &error);
  fprintf(stderr, "bench-eager-ranks: rank %d: %s: %s\n", r->number, what, error.text);
  exit(1);
}

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000 * MS + t.tv_nsec;
}

static void sleep_until(int64_t at_ns) {
  struct timespec t = {at_ns / (1000 * MS), at_ns % (1000 * MS)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) != 0) {
  }
}

/* Agrees on an instant with all other ranks; also a barrier. */
static int64_t agree(rank *r) {
  int64_t at = now_ns() + AHEAD;
  mlfab_vec vec = {&at, 1};
  mlfab_collective options = {.size = sizeof options, .op = MLFAB_OP_MAX};
  require(r, mlfab_allreduce_list(r->ctx, &vec, 1, MLFAB_I64, &options), "agreeing on an instant");
  return at;
}

/* Checks every element of the sum; `partial` 0: of a full allreduce. */
static void check(rank *r, int partial, uint32_t turn, const mlfab_partial_info *info) {
  uint64_t all = (1ull << r->ranks) - 1, shift = RANKS_MAX * (turn & 1), sum;
  r->before = turn && partial ? r->active : all;
  r->active = partial ? info->bitmap[0] : all;
  sum = r->active << shift | (all & ~r->before) << (RANKS_MAX - shift);
  for (uint64_t i = 0; i < r->count; i++) r->wrong += (uint64_t)r->data[i] != sum;
  if (!partial) return;
  r->wrong += info->round != turn || info->step != turn;
  r->wrong += info->active != (uint32_t)__builtin_popcountll(r->active);
  r->wrong += info->included != (r->active >> r->number & 1);
}

static void round_run(rank *r, int partial, uint32_t id, uint32_t turn) {
  mlfab_partial_info info = {.size = sizeof info};
  mlfab_vec vec = {r->data, r->count};
  int64_t mine = (int64_t)(1ull << (r->number + RANKS_MAX * (int)(turn & 1)));
  for (uint64_t i = 0; i < r->count; i++) r->data[i] = mine;
  sleep_until(agree(r) + (r->number + 1) * r->step_ns);
  int64_t began = now_ns();
  if (partial)
    require(r, mlfab_partial_reduce(r->ctx, id, r->data, 0, &info), "a partial reduction");
  else
    require(r, mlfab_allreduce_list(r->ctx, &vec, 1, MLFAB_I64, NULL), "an allreduce");
  r->waited[turn] = (double)(now_ns() - began) / MS / r->ranks;
  check(r, partial, turn, &info);
  r->took_part[turn] = partial ? info.active : (uint32_t)r->ranks;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Adds up the ranks' measurements; rank 0 prints them. */
static void report(rank *r, const char *name, uint32_t rounds) {
  double mean = 0;
  mlfab_vec waited = {r->waited, rounds}, wrong = {&r->wrong, 1};
  require(r, mlfab_allreduce_list(r->ctx, &waited, 1, MLFAB_F64, NULL), "adding up times");
  require(r, mlfab_allreduce_list(r->ctx, &wrong, 1, MLFAB_I64, NULL), "adding up errors");
  if (r->number) return;
  for (uint32_t i = 0; i < rounds; i++) mean += r->waited[i] / rounds;
  qsort(r->waited, rounds, sizeof *r->waited, ascending);
  printf("%s mean %.6f median %.6f wrong %llu active", name, mean, r->waited[rounds / 2],
         (unsigned long long)r->wrong);
  for (uint32_t i = 0; i < rounds; i++) printf(" %u", (unsigned)r->took_part[i]);
  printf("\n");
  fflush(stdout);
}

static void case_run(rank *r, const char *name) {
  mlfab_partial_options options = {.size = sizeof options};
  char mode[16];
  unsigned long bytes, rounds;
  uint32_t id = 0;
  if (sscanf(name, "%15[^:]:%lu:%lu", mode, &bytes, &rounds) != 3 || bytes < 8 ||
      bytes > BYTES_MAX || rounds < 1 || rounds > ROUNDS_MAX) {
    fprintf(stderr, "bench-eager-ranks: no such case: %s\n", name);
    exit(2);
  }
  int partial = strcmp(mode, "full") != 0;
  options.mode = !strcmp(mode, "solo")       ? MLFAB_PARTIAL_SOLO
                 : !strcmp(mode, "majority") ? MLFAB_PARTIAL_MAJORITY
                                             : MLFAB_PARTIAL_QUORUM;
  options.quorum = options.mode == MLFAB_PARTIAL_QUORUM ? (uint32_t)strtoul(mode, NULL, 10) : 0;
  r->count = bytes / sizeof(int64_t);
  r->wrong = 0;
  if (partial)
    require(r, mlfab_partial_open(r->ctx, r->count, MLFAB_I64, &options, &id), "opening");
  for (uint32_t turn = 0; turn < rounds; turn++) round_run(r, partial, id, turn);
  report(r, name, (uint32_t)rounds);
  if (partial) require(r, mlfab_partial_close(r->ctx, id), "closing");
}

int main(int argc, char **argv) {
  static rank r;
  mlfab_error error = {.code = 0};
  mlfab_config config;
  mlfab_config_init(&config);
  if (argc < 3 || mlfab_config_from_env(&config, &error) || mlfab_open(&config, &r.ctx, &error)) {
    fprintf(stderr, "bench-eager-ranks STEP_MS CASE...: %s\n", error.text);
    return 2;
  }
  r.number = (int)config.rank;
  r.ranks = (int)config.workers;
  r.step_ns = (int64_t)(strtod(argv[1], NULL) * MS);
  r.data = malloc(BYTES_MAX);
  if (!r.data || r.ranks > RANKS_MAX) return 3;
  for (int i = 2; i < argc; i++) case_run(&r, argv[i]);
  free(r.data);
  return mlfab_close(&r.ctx) ? 1 : 0;
}
