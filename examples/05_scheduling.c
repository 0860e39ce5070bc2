/* 05_scheduling.c - a scheduler: the same workers on the same network without it, and with it.
 *
 * Twelve workers compute for 60 ms, push 5 MB and pull 5 MB. Links carry 1 Gbit/s, worker 11's link a fifth of
 * it. Without a scheduler the server takes updates in the order of announcement, and all others wait 200 ms for
 * worker 11's, which is outdated when it arrives.
 * Shows:  the two lines that switch a scheduler on. It orders the transfers, lets other workers add up updates on
 *         their way and pass the model on, and drops an update that would be too late, before a byte of it is
 *         sent. A dropped update is not lost: the worker adds the next one to it.
 * Build:  cc -O2 -o 05_scheduling 05_scheduling.c mlfab.o mlfab_sim.o -lpthread -lm
 * Run:    build/examples/05_scheduling
 *         With the name of a file it also writes all transfers there, from which make plots draws lanes.
 * SPDX-License-Identifier: MIT
 */
#include "mlfab_sim.h"
#include "example.h"

#include <stdio.h>
#include <string.h>

enum { WORKERS = 12, SERVER = WORKERS, SLOW = 11, COUNT = 1250000, BOUND = 16, MS = 1000000 };

static struct worker {
  enum { COMPUTES, PUSHES, PULLS } does;
  uint64_t until_ns, began_ns; /* of computing; of the transfer under way */
  mlfab_request request;
  uint64_t computed, applied, dropped, delay_max;
  float weights[COUNT], update[COUNT]; /* a gradient is 1 everywhere: the model counts gradients */
} worker[WORKERS];
static mlfab *node[WORKERS + 1];
static mlfab_sim *sim;
static uint64_t begin_ns; /* of a run */
static int scheduled;
static FILE *lanes; /* a line for each transfer: run, worker, kind, ms of its begin and end */
static char text[65536], plan[65536];

static int open_all(void) {
  mlfab_config config;
  mlfab_config_init(&config);
  config.workers = WORKERS;
  config.dedicated = 1;
  if (scheduled) config.scheduler = MLFAB_SCHEDULER_BESIDE; /* in the server's process */
  if (scheduled) config.schedule.delay_bound = BOUND;       /* of every applied update */
  return example_open_all(sim, &config, COUNT, NULL, node) ||
         mlfab_sim_set_rate(sim, SLOW, 25000000, 25000000);
}

/* A push has ended. */
static void pushed(struct worker *w, const mlfab_result *result) {
  if (result->status == MLFAB_ERR_DROPPED) {
    w->dropped++; /* keep `update` */
    return;
  }
  memset(w->update, 0, sizeof w->update);
  w->applied += result->status == 0;
  if (result->delay > w->delay_max) w->delay_max = result->delay;
  mlfab_explain(node[SERVER], text, sizeof text, NULL); /* the last plan of pushes, and of pulls */
  if (strstr(text, ", group")) memcpy(plan, text, sizeof plan);
}

/* Runs a worker as far as it can go now. Returns 1 while it works. */
static int turn(struct worker *w, mlfab *fabric, uint64_t now_ns, uint64_t end_ns) {
  mlfab_buf update = {0, 0, w->update, COUNT}, weights = {0, 0, w->weights, COUNT};
  mlfab_result result;
  int done = 0;
  if (w->does == COMPUTES) {
    if (now_ns < w->until_ns || now_ns >= end_ns) return now_ns < end_ns;
    for (int k = 0; k < COUNT; k++) w->update[k] += 1; /* added to a dropped update */
    w->computed++;
    w->does = PUSHES, w->began_ns = now_ns;
    return mlfab_push_start(fabric, &update, 1, NULL, &w->request) == 0;
  }
  if (mlfab_test(fabric, w->request, &done, &result) || !done) return 1;
  if (lanes)
    fprintf(lanes, "%d\t%d\t%s\t%.1f\t%.1f\n", scheduled, (int)(w - worker),
            w->does == PULLS     ? "pull"
            : result.status == 0 ? "push"
                                 : "dropped",
            (double)(w->began_ns - begin_ns) / MS, (double)(now_ns - begin_ns) / MS);
  w->until_ns = now_ns + 60 * MS, w->began_ns = now_ns;
  w->does = w->does == PUSHES ? PULLS : COMPUTES;
  if (w->does == COMPUTES) return 1;
  pushed(w, &result);
  return mlfab_pull_start(fabric, &weights, 1, NULL, &w->request) == 0;
}

/* Four seconds of training; 0 when every gradient is in the model, or in an update that was dropped. */
static int run(int with) {
  mlfab_sim_options network = {.size = sizeof network, .hosts = WORKERS + 1};
  mlfab_buf weights = {0, 0, worker[0].weights, COUNT};
  network.rate_bytes_per_s = 125000000;
  scheduled = with;
  memset(worker, 0, sizeof worker);
  if (mlfab_sim_create(&network, &sim) || open_all()) return 1;
  begin_ns = mlfab_sim_clock(sim);
  uint64_t applied = 0, delay_max = 0, end_ns = begin_ns + 4000ull * MS;
  for (int busy = 1; busy; mlfab_sim_run(sim, MS / 10)) {
    busy = 0;
    for (int i = 0; i < WORKERS; i++)
      busy |= turn(&worker[i], node[i], mlfab_sim_clock(sim), end_ns);
  }
  if (mlfab_pull(node[0], &weights, 1, NULL, NULL)) return 1;
  float lost = -worker[0].weights[0];
  for (int i = 0; i < WORKERS; i++) {
    lost += (float)worker[i].computed - worker[i].update[0];
    applied += worker[i].applied;
    if (worker[i].delay_max > delay_max) delay_max = worker[i].delay_max;
  }
  const struct worker *slow = &worker[SLOW];
  printf("%s: %.1f updates/s, delays up to %d\n",
         scheduled ? "With a scheduler" : "First come, first served", (double)applied / 4,
         (int)delay_max);
  printf("  of %d updates of the slow worker %d were applied, and %d added to the next\n",
         (int)slow->computed, (int)slow->applied, (int)slow->dropped);
  example_close_all(&sim, node, WORKERS + 1);
  return lost != 0;
}

int main(int argc, char **argv) {
  if (argc > 1 && !(lanes = fopen(argv[1], "w"))) return perror(argv[1]), 1;
  int status = run(0) || run(1);
  if (lanes && fclose(lanes)) return perror(argv[1]), 1;
  printf("\nThe last plan with a group in it:\n%s", plan);
  return status;
}
