/* 06_consistency.c - consistency models: who waits for whom, and what a pull may have missed.
 *
 * Six workers compute for about 10 ms, push and pull; worker 5 takes three times as long. Every worker counts
 * its updates in an element of its own, so a pull shows how many updates of each worker it has missed.
 * Shows:  the one line that chooses the model (bulk-synchronous, stale synchronous, probabilistic,
 *         drop-stragglers, asynchronous), the call that changes it at run time (mlfab_set_sync), and what each
 *         model costs: time, waiting, staleness, dropped updates.
 * Build:  cc -O2 -o 06_consistency 06_consistency.c mlfab.o mlfab_sim.o -lpthread -lm
 * Run:    build/examples/06_consistency
 * SPDX-License-Identifier: MIT
 */
#include "mlfab_sim.h"
#include "example.h"

#include <stdio.h>
#include <string.h>

enum { WORKERS = 6, SLOW = 5, COUNT = 1024, STEPS = 60, MS = 1000000 };

static struct worker {
  enum { COMPUTES, PUSHES, PULLS, DONE } does;
  uint64_t until_ns, asked_ns, steps, dropped;
  mlfab_request request;
  float weights[COUNT], update[COUNT];
} worker[WORKERS];
static mlfab *node[WORKERS];
static mlfab_sim *sim;
static uint64_t waited_ns, oldest;

static int open_all(const mlfab_sync *sync) {
  mlfab_model_options model = {.size = sizeof model, .consistency = *sync}; /* the one line */
  mlfab_config config;
  mlfab_config_init(&config);
  config.workers = WORKERS; /* worker 0 is the server, too */
  return example_open_all(sim, &config, COUNT, &model, node);
}

/* Runs a worker as far as it can go now. Returns 1 while it works. */
static int turn(int i, uint64_t now_ns) {
  struct worker *w = &worker[i];
  mlfab_buf update = {0, 0, w->update, COUNT}, weights = {0, 0, w->weights, COUNT};
  mlfab_result result;
  int done = 0;
  if (w->does == DONE) return 0;
  if (w->does == COMPUTES) {
    if (now_ns < w->until_ns) return 1;
    w->update[i] = 1;
    w->does = PUSHES;
    return mlfab_push_start(node[i], &update, 1, NULL, &w->request) == 0;
  }
  if (mlfab_test(node[i], w->request, &done, &result) || !done) return 1;
  if (w->does == PUSHES) {
    w->steps++;
    w->dropped += result.status == MLFAB_ERR_DROPPED; /* too late for its round */
    w->does = PULLS;
    w->asked_ns = now_ns;
    return mlfab_pull_start(node[i], &weights, 1, NULL, &w->request) == 0;
  }
  waited_ns += now_ns - w->asked_ns;
  for (int k = 0; k < WORKERS; k++) {
    uint64_t seen = (uint64_t)w->weights[k] + worker[k].dropped;
    if (seen < w->steps && w->steps - seen > oldest) oldest = w->steps - seen;
  }
  uint64_t spread = (w->steps * 7919 + (uint64_t)i * 104729) % 5; /* 8 to 12 ms */
  w->until_ns = now_ns + (8 + spread) * MS * (i == SLOW ? 3 : 1);
  w->does = w->steps < STEPS ? COMPUTES : DONE;
  if (w->does == DONE) mlfab_finish(node[i], 0); /* the others need not wait for it */
  return 1;
}

/* 60 steps of every worker. After a third of a second the model changes to `then`, unless it is NULL. */
static int run(const char *name, const mlfab_sync *sync, const mlfab_sync *then) {
  mlfab_sim_options network = {.size = sizeof network, .hosts = WORKERS};
  memset(worker, 0, sizeof worker);
  waited_ns = oldest = 0;
  if (mlfab_sim_create(&network, &sim) || open_all(sync)) return 1;
  uint64_t begin = mlfab_sim_clock(sim), fast_ns = 0;
  for (int busy = 1; busy; mlfab_sim_run(sim, MS / 10)) {
    uint64_t now = mlfab_sim_clock(sim);
    busy = 0;
    for (int i = 0; i < WORKERS; i++) busy |= turn(i, now);
    if (fast_ns == 0 && worker[0].does == DONE) fast_ns = now - begin;
    if (then && now - begin > 333 * MS) {
      if (mlfab_set_sync(node[3], then, MLFAB_ALL, 0)) return 1;
      then = NULL;
    }
  }
  printf("%-24s %7.0f %9.0f %10.0f %9d %9d\n", name, (double)fast_ns / MS,
         (double)(mlfab_sim_clock(sim) - begin) / MS, (double)waited_ns / MS / WORKERS, (int)oldest,
         (int)worker[SLOW].dropped);
  example_close_all(&sim, node, WORKERS);
  return 0;
}

int main(void) {
  static const mlfab_sync bsp = {.size = sizeof bsp, .kind = MLFAB_SYNC_BSP};
  static const mlfab_sync ssp = {.size = sizeof ssp, .kind = MLFAB_SYNC_SSP, .staleness = 3};
  static const mlfab_sync pssp = {
      .size = sizeof pssp, .kind = MLFAB_SYNC_PSSP, .staleness = 3, .chance = 0.3};
  static const mlfab_sync drop = {.size = sizeof drop, .kind = MLFAB_SYNC_DROP, .need = 5};
  static const mlfab_sync async = {.size = sizeof async, .kind = MLFAB_SYNC_ASYNC};
  printf("%-24s %7s %9s %10s %9s %9s\n", "ms of virtual time", "fast", "all", "waited", "oldest",
         "dropped");
  return run("bulk-synchronous", &bsp, NULL) || run("stale synchronous, 3", &ssp, NULL) ||
         run("probabilistic, 3, 0.3", &pssp, NULL) || run("drop-stragglers, 5 of 6", &drop, NULL) ||
         run("asynchronous", &async, NULL) || run("bulk-, then asynchronous", &bsp, &async);
}
