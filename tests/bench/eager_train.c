/* eager_train.c - a worker of eagerSGD's trainings: mlfab-run -n 8 -s 0 --shm --no-prefix bench-eager-train ...
 *
 *    --task hyperplane|digits|generated   8192 dimensions, 2048 points a step; MNIST, or data like it,
 *                                         128 images a step
 *    --mode full|solo|majority|Q          Q: a quorum
 *    --queued                             results each once, in order, instead of the latest
 *    --steps N  --resync N                models are made equal every N steps; 0: at the end only
 *    --compute MS                         what a step's computation takes at least
 *    --delay MS                           hyperplane: one random worker a step takes so much longer; images:
 *                                         the workers take 1, 2, ... times as much longer, shifted after
 *                                         each step
 *
 * A computation is a real one, and then sleep: eight processes on two cores would measure the cores. Rank
 * 0 prints a line: seconds of the slowest worker, share of contributions that came in time, of results
 * that a worker never saw, and how good the model is.
 *
 * Source: eagerSGD §6.2.1, §6.2.3. SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

enum { HIDDEN = 64 };
#include "digits.h"
#include "mlfab_partial.h"

#include <time.h>

enum { DIMENSIONS = 8192, POINTS = 32768, POINTS_A_STEP = 2048, VALIDATION = 1024 };
enum { IMAGES_A_STEP = 128, LANES = 16, GENERATED = 20000, GENERATED_TEST = 4000 };

typedef struct trainer {
  mlfab *ctx;
  int rank, ranks;
  const char *task, *mode;
  uint32_t steps, resync, queued;
  double compute_ms, delay_ms, rate; /* rate: of learning */
  uint32_t count;                    /* weights */
  float *w, *g;
  images train, test;
  uint32_t id;
  uint64_t newest; /* rounds below it are in the model, or were never seen */
  double seconds, in_time, not_seen;
} trainer;

static void fail(const char *why) {
  fprintf(stderr, "bench-eager-train: %s\n", why);
  exit(1);
}

static void require(trainer *t, int code, const char *what) {
  mlfab_error error = {.code = 0};
  if (code == 0) return;
  mlfab_last_error(t->ctx, &error);
  fprintf(stderr, "bench-eager-train: rank %d: %s: %s\n", t->rank, what, error.text);
  exit(1);
}

static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void sleep_until(double at_ms) {
  double left = at_ms - now_ms();
  if (left <= 0) return;
  struct timespec t = {(time_t)(left / 1e3), (long)(fmod(left, 1e3) * 1e6)};
  nanosleep(&t, NULL);
}

static uint64_t draw_at(uint64_t what) { return digits_next(&what); }

static float draw_float(uint64_t *state) { /* in [-1, 1) */
  return (float)(digits_next(state) >> 40) * (1.0f / 8388608.0f) - 1.0f;
}

/* Partial sums, so that the compiler can vectorize it. */
static float dot(const float *a, const float *b, size_t n) {
  float lane[LANES] = {0}, sum = 0;
  for (size_t i = 0; i + LANES <= n; i += LANES)
    for (size_t k = 0; k < LANES; k++) lane[k] += a[i + k] * b[i + k];
  for (size_t i = n - n % LANES; i < n; i++) sum += a[i] * b[i];
  for (size_t k = 0; k < LANES; k++) sum += lane[k];
  return sum;
}

/* ---- the hyperplane: y = a . x + noise of variance 4; weights a, and a constant ---- */

/* Point `sample`; returns y. x has mean 0 and variance 1, eight of them from a random number. */
static float point(size_t sample, const float *truth, float *x) {
  uint64_t state = 0x2545f4914f6cdd1du * (sample + 1);
  unsigned char bytes[DIMENSIONS];
  for (size_t i = 0; i < DIMENSIONS; i += sizeof state) {
    uint64_t bits = digits_next(&state);
    memcpy(bytes + i, &bits, sizeof bits);
  }
  for (size_t i = 0; i < DIMENSIONS; i++) x[i] = ((float)bytes[i] - 127.5f) * (1.0f / 73.9f);
  return dot(truth, x, DIMENSIONS) + 3.4641f * draw_float(&state);
}

static const float *truth(void) {
  static float a[DIMENSIONS];
  static int made;
  uint64_t state = 1;
  for (size_t i = 0; !made && i < DIMENSIONS; i++) a[i] = draw_float(&state);
  made = 1;
  return a;
}

/* Sets g to the mean gradient of this worker's points of a step. */
static void plane_gradient(trainer *t, uint32_t step) {
  float x[DIMENSIONS];
  size_t each = POINTS_A_STEP / (size_t)t->ranks;
  for (size_t k = 0; k < each; k++) {
    size_t sample = ((size_t)step * POINTS_A_STEP + (size_t)t->rank * each + k) % POINTS;
    float y = point(sample, truth(), x), error = dot(t->w, x, DIMENSIONS) + t->w[DIMENSIONS] - y;
    add_scaled(t->g, error / (float)each, x, DIMENSIONS);
    t->g[DIMENSIONS] += error / (float)each;
  }
}

/* Mean squared error of points that are not in the training set. */
static double plane_loss(const trainer *t) {
  double sum = 0;
  float x[DIMENSIONS];
  for (size_t k = 0; k < VALIDATION; k++) {
    float y = point(POINTS + k, truth(), x);
    double error = (double)(dot(t->w, x, DIMENSIONS) + t->w[DIMENSIONS] - y);
    sum += error * error / VALIDATION;
  }
  return sum;
}

/* ---- images ---- */

static void read_or_fail(images *set, const char *pixels, const char *labels) {
  if (!images_read(set, pixels, labels)) fail("no MNIST in MLFAB_DATA or ~/.cache/mlfab");
}

/* A class is a pattern of pixels; an image shows a part of it, and random other pixels. */
static void images_generate(images *set, uint32_t n, uint64_t state) {
  set->pixels = allocate(n, INPUTS);
  set->label = allocate(n, 1);
  set->n = n;
  for (size_t i = 0; i < n; i++) {
    uint64_t label = digits_next(&state) % CLASSES;
    set->label[i] = (unsigned char)label;
    for (size_t k = 0; k < INPUTS; k++) {
      uint64_t bits = digits_next(&state);
      int noise = bits % 100 < 85;
      uint64_t from = noise ? bits >> 8 : draw_at(label * INPUTS + k + 1);
      set->pixels[i * INPUTS + k] = from % 5 ? 0 : (unsigned char)(bits >> 56 | 128);
    }
  }
}

/* Every worker draws from all images. */
static void images_gradient(trainer *t, uint32_t step) {
  size_t each = IMAGES_A_STEP / (size_t)t->ranks;
  uint64_t state = ((uint64_t)step << 16) + (uint64_t)t->rank;
  for (size_t k = 0; k < each; k++) {
    size_t sample = digits_next(&state) % t->train.n;
    digits_add_gradient(t->w, t->train.pixels + sample * INPUTS, t->train.label[sample],
                        1.0f / (float)each, t->g);
  }
}

/* ---- training ---- */

static int is_plane(const trainer *t) { return strcmp(t->task, "hyperplane") == 0; }
static int is_full(const trainer *t) { return strcmp(t->mode, "full") == 0; }

static double delay_ms(const trainer *t, uint32_t step) {
  uint32_t ranks = (uint32_t)t->ranks, rank = (uint32_t)t->rank;
  if (is_plane(t)) return draw_at(step + 1) % ranks == rank ? t->delay_ms : 0;
  return t->delay_ms * ((rank + step) % ranks + 1);
}

static void prepare(trainer *t) {
  uint64_t state = 17;
  t->count = is_plane(t) ? DIMENSIONS + 1 : DIGITS_PARAMS;
  /* Half of the rate at which points in d dimensions learn fastest, b per step: 1 / (1 + d/b). */
  t->rate = is_plane(t) ? 0.5 / (1.0 + (double)DIMENSIONS / POINTS_A_STEP) : 0.1;
  t->w = allocate(t->count, sizeof(float));
  t->g = allocate(t->count, sizeof(float));
  if (is_plane(t)) return;
  if (!strcmp(t->task, "generated")) {
    images_generate(&t->train, GENERATED, 1);
    images_generate(&t->test, GENERATED_TEST, 2);
  } else {
    read_or_fail(&t->train, "mnist/train-images-idx3-ubyte", "mnist/train-labels-idx1-ubyte");
    read_or_fail(&t->test, "mnist/t10k-images-idx3-ubyte", "mnist/t10k-labels-idx1-ubyte");
  }
  for (size_t i = W1; i < B1; i++) t->w[i] = 0.06f * draw_float(&state);
  for (size_t i = W2; i < B2; i++) t->w[i] = 0.15f * draw_float(&state);
}

static void open_partial(trainer *t) {
  mlfab_partial_options options = {.size = sizeof options, .op = MLFAB_OP_MEAN};
  options.mode = !strcmp(t->mode, "solo")       ? MLFAB_PARTIAL_SOLO
                 : !strcmp(t->mode, "majority") ? MLFAB_PARTIAL_MAJORITY
                                                : MLFAB_PARTIAL_QUORUM;
  options.quorum = options.mode == MLFAB_PARTIAL_QUORUM ? (uint32_t)strtoul(t->mode, NULL, 10) : 0;
  options.results = t->queued ? MLFAB_PARTIAL_QUEUED : MLFAB_PARTIAL_LATEST;
  require(t, mlfab_partial_open(t->ctx, t->count, MLFAB_F32, &options, &t->id), "opening");
}

static void learn(trainer *t) { add_scaled(t->w, -(float)t->rate, t->g, t->count); }

/* Contributes the gradient and gets a result; one that was applied before is not applied again. */
static void step_partial(trainer *t) {
  mlfab_partial_info info = {.size = sizeof info};
  require(t, mlfab_partial_reduce(t->ctx, t->id, t->g, 0, &info), "a step");
  t->in_time += info.included;
  if (info.round >= t->newest) {
    t->not_seen += (double)(info.round - t->newest);
    t->newest = info.round + 1;
    learn(t);
  }
  /* With all results in order models stay equal. */
  if (!t->queued && t->resync && (info.step + 1) % t->resync == 0)
    require(t, mlfab_allreduce_mean(t->ctx, t->w, t->count), "resync");
}

static void step_full(trainer *t) {
  mlfab_collective options = {.size = sizeof options, .op = MLFAB_OP_MEAN};
  mlfab_vec vec = {t->g, t->count};
  require(t, mlfab_allreduce_list(t->ctx, &vec, 1, MLFAB_F32, &options), "a step");
  t->in_time += 1;
  learn(t);
}

static void train(trainer *t) {
  if (!is_full(t)) open_partial(t);
  require(t, mlfab_barrier(t->ctx, NULL), "the start");
  double began = now_ms();
  for (uint32_t step = 0; step < t->steps; step++) {
    double begin = now_ms();
    memset(t->g, 0, t->count * sizeof *t->g);
    if (is_plane(t))
      plane_gradient(t, step);
    else
      images_gradient(t, step);
    sleep_until(begin + t->compute_ms + delay_ms(t, step));
    if (is_full(t))
      step_full(t);
    else
      step_partial(t);
  }
  t->seconds = (now_ms() - began) / 1e3;
  if (is_full(t)) return;
  require(t, mlfab_partial_flush(t->ctx, t->id, t->g, 0), "the last gradients");
  learn(t);
  require(t, mlfab_allreduce_mean(t->ctx, t->w, t->count), "the last resync");
  require(t, mlfab_partial_close(t->ctx, t->id), "closing");
}

static void report(trainer *t) {
  double sums[2] = {t->in_time, t->not_seen};
  mlfab_collective most = {.size = sizeof most, .op = MLFAB_OP_MAX};
  mlfab_vec seconds = {&t->seconds, 1};
  require(t, mlfab_allreduce(t->ctx, sums, 2, MLFAB_F64, NULL), "adding up");
  require(t, mlfab_allreduce_list(t->ctx, &seconds, 1, MLFAB_F64, &most), "the slowest");
  if (t->rank) return;
  double calls = (double)t->steps * t->ranks;
  printf("result seconds %.4f in_time %.4f not_seen %.4f %s %.5f\n", t->seconds, sums[0] / calls,
         sums[1] / calls, is_plane(t) ? "loss" : "accuracy",
         is_plane(t) ? plane_loss(t) : digits_right(&t->test, t->w));
}

static void options_read(trainer *t, int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    const char *name = argv[i], *value = i + 1 < argc ? argv[i + 1] : "";
    i += strcmp(name, "--queued") != 0;
    if (!strcmp(name, "--queued"))
      t->queued = 1;
    else if (!strcmp(name, "--task"))
      t->task = value;
    else if (!strcmp(name, "--mode"))
      t->mode = value;
    else if (!strcmp(name, "--steps"))
      t->steps = (uint32_t)strtoul(value, NULL, 10);
    else if (!strcmp(name, "--resync"))
      t->resync = (uint32_t)strtoul(value, NULL, 10);
    else if (!strcmp(name, "--compute"))
      t->compute_ms = strtod(value, NULL);
    else if (!strcmp(name, "--delay"))
      t->delay_ms = strtod(value, NULL);
    else
      fail("there is no such option");
  }
}

int main(int argc, char **argv) {
  trainer t = {.task = "hyperplane", .mode = "full", .steps = 100};
  mlfab_error error = {.code = 0};
  mlfab_config config;
  options_read(&t, argc, argv);
  mlfab_config_init(&config);
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &t.ctx, &error))
    fail(error.text);
  t.rank = (int)config.rank;
  t.ranks = (int)config.workers;
  prepare(&t);
  train(&t);
  report(&t);
  free(t.w);
  free(t.g);
  free(t.train.pixels);
  free(t.train.label);
  free(t.test.pixels);
  free(t.test.label);
  return mlfab_close(&t.ctx) ? 1 : 0;
}
