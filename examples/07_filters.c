/* 07_filters.c - which bytes travel: gradient filter, half precision, version tags, parameter filter.
 *
 * Four workers train a linear model of 20,000 weights with samples of 20 features: most elements of a gradient are
 * zero, most of the others are small, and most weights do not change between two pulls. The server has a host of its own, so
 * all these bytes go over the network: within a host bytes cost little, and a pull brings more than what has changed.
 * Shows:  mlfab_set_filter on the worker (a residual keeps what is held back, and sends it later), tags and
 *         change_threshold of the model, and pulls that bring only what changed; how many bytes each saves, and
 *         that the model is as good.
 * Build:  cc -O2 -o 07_filters 07_filters.c mlfab.o mlfab_sim.o -lpthread -lm
 * Run:    build/examples/07_filters
 * SPDX-License-Identifier: MIT
 */
#include "mlfab_sim.h"
#include "example.h"

#include <stdio.h>
#include <string.h>

enum { WORKERS = 4, COUNT = 20000, SHOWN = 20, BATCH = 16, STEPS = 400 };

static float truth[COUNT], weights[WORKERS][COUNT], gradient[COUNT];
static mlfab *node[WORKERS + 1]; /* the workers, and behind them the server */
static mlfab_sim *sim;

static uint32_t draw(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33);
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

/* Returns the mean squared error of a batch, and writes its gradient to `gradient`. Features with low numbers are
 * more frequent, as words are. */
static double learn(int worker, int step) {
  uint64_t state = (uint64_t)(step * WORKERS + worker + 1) * 977;
  double loss = 0;
  memset(gradient, 0, sizeof gradient);
  for (int b = 0; b < BATCH; b++) {
    uint32_t shown[SHOWN];
    float error = 0;
    for (int k = 0; k < SHOWN; k++) {
      double a = draw(&state) % 1000 / 1000.0, c = a * a * a;
      shown[k] = (uint32_t)(c * c * COUNT) + draw(&state) % 4 * (uint32_t)(c > 0.1);
      error += weights[worker][shown[k]] - truth[shown[k]];
    }
    for (int k = 0; k < SHOWN; k++) gradient[shown[k]] += error / BATCH;
    loss += (double)(error * error) / BATCH;
  }
  return loss;
}

static int run(const char *name, const mlfab_model_options *model, const mlfab_filter *filter) {
  mlfab_sim_options network = {.size = sizeof network, .hosts = WORKERS + 1};
  mlfab_push_options push = {.size = sizeof push, .scale = -0.03};
  double loss = 0;
  memset(weights, 0, sizeof weights);
  if (mlfab_sim_create(&network, &sim) || open_all(model, filter)) return 1;
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < WORKERS; i++) {
      mlfab_buf w = {0, 0, weights[i], COUNT}, u = {0, 0, gradient, COUNT};
      if (mlfab_pull(node[i], &w, 1, NULL, NULL)) return 1;
      double l = learn(i, step);
      if (step >= STEPS - 10) loss += l / (10 * WORKERS);
      if (mlfab_push(node[i], &u, 1, &push, NULL)) return 1;
    }
  }
  mlfab_stats all = {0}, one;
  for (int i = 0; i <= WORKERS; i++) {
    if (mlfab_get_stats(node[i], &one, sizeof one)) return 1;
    all.filter_bytes += one.filter_bytes; /* counted at the workers, where there is a filter */
    all.pull_bytes += one.pull_bytes;     /* counted at the server */
  }
  if (!filter) all.filter_bytes = (uint64_t)WORKERS * STEPS * COUNT * 4;
  printf("%-32s pushes %6.2f MB  pulls %6.2f MB  loss at the end %.3f\n", name,
         (double)all.filter_bytes / 1e6, (double)all.pull_bytes / 1e6, loss);
  example_close_all(&sim, node, WORKERS + 1);
  return 0;
}

int main(void) {
  mlfab_model_options dense = {.size = sizeof dense}, tagged = dense, all;
  mlfab_filter zeros = {.size = sizeof zeros, .half = MLFAB_HALF_F16}, some = zeros;
  uint64_t state = 7;
  for (int i = 0; i < COUNT; i++) truth[i] = (float)(draw(&state) % 2000) / 1000 - 1;
  some.threshold = 0.1; /* phi: smaller elements are held back ... */
  some.decay = 0.1;     /* ... fewer and fewer as training goes on */
  tagged.tags = 1;      /* a tag for every weight */
  all = tagged;
  all.pull_half = MLFAB_HALF_F16;
  all.change_threshold = 0.002; /* discards changes below 0.2 % of a weight */
  return run("everything", &dense, NULL) || run("no zeros, half precision", &dense, &zeros) ||
         run("and a threshold", &dense, &some) || run("and version tags", &tagged, &some) ||
         run("and a parameter filter, half", &all, &some);
}
