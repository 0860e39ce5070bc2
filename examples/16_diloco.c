/* 16_diloco.c - DiLoCo: many local steps, Nesterov's momentum at the server, half precision.
 *
 * Four workers and a server, each with a link of 10 Mbit/s and 100 ms, train a linear model of 20,000 weights in three
 * ways. Every way makes 600 steps of 20 ms at each worker.
 *   every step   a worker pushes each gradient; the server adds the mean
 *   local steps  a worker makes 50 steps, then pushes the difference; the server adds the mean (15_local_steps.c)
 *   DiLoCo       the same with AdamW at the workers, NESTEROV at the server, and 16-bit numbers on the links
 * Shows:  the bytes, the time and the loss of each way.
 * Build:  cc -O2 -o 16_diloco 16_diloco.c mlfab.o mlfab_sim.o -lpthread -lm
 * Run:    build/examples/16_diloco
 * Source: Douillard et al. 2023, DiLoCo, Alg. 1; its outer rate 0.7 and momentum 0.9.
 *
 * SPDX-License-Identifier: MIT
 */
#include "mlfab_sim.h"
#include "example.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { WORKERS = 4, COUNT = 20000, SHOWN = 20, BATCH = 16, STEPS = 600, LOCAL = 50, MS = 1000000 };

static struct worker {
  uint64_t samples;
  float pulled[COUNT], local[COUNT], update[COUNT];
  float m[COUNT], v[COUNT]; /* of AdamW */
} worker[WORKERS];
static float truth[COUNT], gradient[COUNT];
static mlfab *node[WORKERS + 1]; /* the workers, and behind them the server */
static mlfab_sim *sim;

static uint32_t draw(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33);
}

/* Returns the mean squared error of a batch, and writes its gradient to `gradient`. Features with low numbers are more
 * frequent, as words are. */
static double learn(const float *w, uint64_t *samples) {
  double loss = 0;
  memset(gradient, 0, sizeof gradient);
  for (int b = 0; b < BATCH; b++) {
    uint32_t shown[SHOWN];
    float error = 0;
    for (int k = 0; k < SHOWN; k++) {
      double a = draw(samples) % 1000 / 1000.0, c = a * a * a;
      shown[k] = (uint32_t)(c * c * COUNT);
      error += w[shown[k]] - truth[shown[k]];
    }
    for (int k = 0; k < SHOWN; k++) gradient[shown[k]] += error / BATCH;
    loss += (double)(error * error) / BATCH;
  }
  return loss;
}

/* One local step, the t-th: AdamW, or SGD with the largest rate that does not diverge. */
static void step_of(struct worker *w, int adam, int t) {
  learn(w->local, &w->samples);
  float rate = adam ? 0.01f : 0.1f, c1 = 1 - powf(0.9f, (float)t), c2 = 1 - powf(0.99f, (float)t);
  for (int i = 0; i < COUNT; i++) {
    if (!adam) {
      w->local[i] -= rate * gradient[i];
      continue;
    }
    w->m[i] += 0.1f * (gradient[i] - w->m[i]);
    w->v[i] += 0.01f * (gradient[i] * gradient[i] - w->v[i]);
    w->local[i] -= rate * (w->m[i] / c1 / (sqrtf(w->v[i] / c2) + 1e-8f) + 0.001f * w->local[i]);
  }
}

static int open_all(const mlfab_model_options *model, const mlfab_filter *filter) {
  mlfab_config config;
  mlfab_config_init(&config);
  config.workers = WORKERS;
  config.dedicated = 1;
  int status = example_open_all(sim, &config, COUNT, model, node);
  for (int i = 0; i < WORKERS && filter && !status; i++)
    status = mlfab_set_filter(node[i], MLFAB_ALL, filter);
  return status;
}

/* All workers pull, or push their updates, at the same time. */
static int travel(int pull, const mlfab_push_options *options) {
  mlfab_request request[WORKERS];
  for (int i = 0; i < WORKERS; i++) {
    mlfab_buf w = {0, 0, worker[i].pulled, COUNT}, u = {0, 0, worker[i].update, COUNT};
    if (pull ? mlfab_pull_start(node[i], &w, 1, NULL, &request[i])
             : mlfab_push_start(node[i], &u, 1, options, &request[i]))
      return 1;
  }
  for (int i = 0; i < WORKERS; i++)
    if (mlfab_wait(node[i], request[i], 0, NULL)) return 1;
  return 0;
}

/* Trains in one way, and prints a line. */
static int run(const char *name, int local, int adam, const mlfab_model_options *model,
               const mlfab_filter *filter, double scale) {
  static const mlfab_sim_options network = {.size = sizeof network,
                                            .hosts = WORKERS + 1,
                                            .latency_ns = 100 * MS,
                                            .rate_bytes_per_s = 1250000};
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  options.scale = scale;
  memset(worker, 0, sizeof worker);
  for (int i = 0; i < WORKERS; i++) worker[i].samples = (uint64_t)i + 1;
  if (mlfab_sim_create(&network, &sim) || open_all(model, filter)) return 1;
  uint64_t begin = mlfab_sim_clock(sim);
  for (int step = 0; step < STEPS; step += local) {
    if (travel(1, NULL)) return 1;
    mlfab_sim_run(sim, (uint64_t)local * 20 * MS); /* all workers compute at the same time */
    for (int i = 0; i < WORKERS; i++) {
      struct worker *w = &worker[i];
      memcpy(w->local, w->pulled, sizeof w->local);
      for (int k = 0; k < local; k++) step_of(w, adam, step + k + 1);
      for (int k = 0; k < COUNT; k++) w->update[k] = w->local[k] - w->pulled[k];
    }
    if (travel(0, &options)) return 1;
  }
  if (travel(1, NULL)) return 1;
  double seconds = (double)(mlfab_sim_clock(sim) - begin) * 1e-9, loss = 0, bytes = 0;
  uint64_t held_out = 1000;
  for (int i = 0; i < 50; i++) loss += learn(worker[0].pulled, &held_out) / 50;
  for (int i = 0; i <= WORKERS; i++) {
    mlfab_stats stats;
    if (mlfab_get_stats(node[i], &stats, sizeof stats)) return 1;
    bytes += (double)stats.bytes_sent;
  }
  printf("%-12s %9.2f MB %9.1f s   loss %.4f\n", name, bytes / 1e6, seconds, loss);
  example_close_all(&sim, node, WORKERS + 1);
  return 0;
}

int main(void) {
  uint64_t state = 7;
  for (int i = 0; i < COUNT; i++) truth[i] = (float)(draw(&state) % 2000) / 1000 - 1;
  mlfab_model_options mean = MLFAB_MODEL_OPTIONS_INIT, outer;
  mean.sync = MLFAB_SYNC_BSP;
  mean.mean = 1; /* the server divides a round's sum by the number of workers */
  outer = mean;
  outer.optimizer = MLFAB_OPTIMIZER_NESTEROV;
  outer.gamma = 0.9;
  outer.pull_half = MLFAB_HALF_BF16;
  mlfab_filter half = {.size = sizeof half, .half = MLFAB_HALF_BF16};
  return run("every step", 1, 0, &mean, NULL, 1.0) ||
         run("local steps", LOCAL, 0, &mean, NULL, 1.0) ||
         run("DiLoCo", LOCAL, 1, &outer, &half, 0.7);
}
