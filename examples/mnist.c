/* mnist.c - the worker of `make demo`: trains a network on MNIST, or a hyperplane without data.
 *
 * Run it by hand:   build/mlfab-run -n 4 -s 1 build/examples/mnist --epochs 4
 *
 * Each worker has its own quarter of the training set (its own n-th part, with n workers) and repeats
 * one step: pull the weights, compute the gradient of a batch, push it with scale -learning rate.
 * The weights are one tensor a layer; a pull or a push takes the list of them and is one operation.
 *
 * The network is 784-128-10: rectified linear, softmax, cross entropy, plain stochastic gradient
 * descent. Compiled with -DMNIST_WITH_CBLAS=1, as make does where it finds OpenBLAS or another cblas, it
 * multiplies the matrices of a whole batch by cblas_sgemm; else, and with --loops, it takes one image after the
 * other. Both add the same numbers in another order. The data are the original idx files of MNIST, as they are or gzipped, in the folder
 * `mnist` of MLFAB_DATA or of ~/.cache/mlfab. If there are none, the task is the
 * 8,192-dimensional hyperplane regression of eagerSGD §6.2.1, which is generated from a seed.
 *
 * The output is for people and for tools/demo.py: words and values separated by blanks.
 *   progress rank R step S version V epoch E loss L images_per_s I      about twice a second
 *   result rank R updates U ...                                         once, at the end
 *   accuracy A           (of worker 0: on the test images; "loss L zero_loss Z" of the hyperplane)
 *
 * SPDX-License-Identifier: MIT
 */
#define _POSIX_C_SOURCE 200809L
#include "mlfab.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifndef MNIST_WITH_CBLAS
#define MNIST_WITH_CBLAS 0
#endif
#if MNIST_WITH_CBLAS
#include <cblas.h>
#endif

enum {
  INPUTS = 784,
  HIDDEN = 128,
  CLASSES = 10,
  DIMENSIONS = 8192, /* of the hyperplane */
  POINTS = 32768,
  LANES = 16, /* partial sums of a dot product, so that it becomes vector instructions */
  TENSORS_MAX = 4
};

static const char *const usage_text =
    "usage: mnist [--epochs N] [--lr X] [--batch N] [--momentum] [--sync MODEL] [--barrier]\n"
    "             MODEL: async, bsp, ssp:S, dsps:S, drop:N, pssp:S:C, or dynamic:S (alpha 1)\n"
    "             [--slow RANK:FACTOR] [--seed N] [--save FILE] [--generated] [--loops]\n"
    "Start it with mlfab-run; see the comment at the top of examples/mnist.c.\n";

struct options {
  double epochs, lr;
  size_t batch;
  int momentum, generated;
  int loops;   /* no cblas */
  int barrier; /* all workers wait for each other between push and pull */
  mlfab_sync sync;
  int slow_rank; /* -1: none */
  double slow_factor;
  uint64_t seed;
  const char *save;
};

/* The training and test images of MNIST, one byte a pixel. */
struct images {
  unsigned char *pixels, *labels;
  size_t n;
};

/* The network: the sizes of its tensors, and how to compute with them. */
struct task {
  size_t tensors, count[TENSORS_MAX];
  size_t samples; /* in the whole training set */
  uint64_t seed;
  struct images train, test;
  /* The summed gradient of one sample is added to g; returns the sample's loss. */
  double (*gradient)(const struct task *task, size_t sample, float *const *w, float *const *g,
                     float weight);
  /* The same for n samples at once, with a weight of 1/n each; their mean loss. NULL: there is only `gradient`. */
  double (*batch_gradient)(const struct task *task, const size_t *samples, size_t n,
                           float *const *w, float *const *g);
};

/* ---------------------------------------------------------------------------------------------
 * Small things
 */
static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_s(double seconds) {
  if (seconds <= 0) return;
  struct timespec t = {(time_t)seconds, (long)((seconds - floor(seconds)) * 1e9)};
  nanosleep(&t, NULL);
}

/* The next of a stream of random numbers (splitmix64). */
static uint64_t random_next(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* Uniform in [-1, 1). */
static float random_float(uint64_t *state) {
  return (float)(random_next(state) >> 40) * (1.0f / 8388608.0f) - 1.0f;
}

static void *allocate(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) {
    fprintf(stderr, "mnist: out of memory\n");
    exit(1);
  }
  return memory;
}

/* Sixteen partial sums let the compiler use vector instructions without reordering a sum. */
static float dot(const float *a, const float *b, size_t n) {
  float lane[LANES] = {0}, sum = 0;
  for (size_t i = 0; i + LANES <= n; i += LANES) {
    for (size_t k = 0; k < LANES; k++) lane[k] += a[i + k] * b[i + k];
  }
  for (size_t i = n - n % LANES; i < n; i++) sum += a[i] * b[i];
  for (size_t k = 0; k < LANES; k++) sum += lane[k];
  return sum;
}

/* y += a * x */
static void add_scaled(float *restrict y, float a, const float *restrict x, size_t n) {
  for (size_t i = 0; i < n; i++) y[i] += a * x[i];
}

/* ---------------------------------------------------------------------------------------------
 * MNIST files
 */

/* Reads the whole of an idx file, gzipped or not: `items` records of `record` bytes behind a header
 * of `header` bytes. NULL when there is no such file. */
static unsigned char *idx_read(const char *folder, const char *name, size_t header, size_t record,
                               size_t *items_p) {
  char path[1024], command[1100];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE *file = fopen(path, "rb");
  int piped = file == NULL;
  if (piped) {
    /* The name stands in quotes in the command, so one that holds a quote is not taken. */
    snprintf(path, sizeof path, "%s/%s.gz", folder, name);
    if (access(path, R_OK) || strchr(path, '\'')) return NULL;
    snprintf(command, sizeof command, "gzip -dc '%s'", path);
    file = popen(command, "r");
    if (!file) return NULL;
  }
  unsigned char head[16] = {0}, *bytes = NULL;
  if (fread(head, 1, header, file) == header) {
    size_t items = (size_t)head[4] << 24 | (size_t)head[5] << 16 | (size_t)head[6] << 8 | head[7];
    if (items > 0 && items <= 1000000) bytes = allocate(items, record);
    if (bytes && fread(bytes, record, items, file) != items) {
      free(bytes);
      bytes = NULL;
    }
    *items_p = items;
  }
  if (piped) {
    pclose(file);
  } else {
    fclose(file);
  }
  return bytes;
}

static int images_read(struct images *set, const char *folder, const char *prefix) {
  char name[64];
  size_t labels = 0;
  snprintf(name, sizeof name, "%s-images-idx3-ubyte", prefix);
  set->pixels = idx_read(folder, name, 16, INPUTS, &set->n);
  snprintf(name, sizeof name, "%s-labels-idx1-ubyte", prefix);
  set->labels = set->pixels ? idx_read(folder, name, 8, 1, &labels) : NULL;
  int good = set->labels && labels == set->n;
  for (size_t i = 0; good && i < set->n; i++) good = set->labels[i] < CLASSES;
  return good;
}

/* Finds and reads MNIST; 0 when it is nowhere. The test images are read by worker 0 alone. */
static int mnist_find(struct task *task, int rank) {
  const char *data = getenv("MLFAB_DATA"), *home = getenv("HOME");
  char folder[900];
  if (data && *data) {
    snprintf(folder, sizeof folder, "%s/mnist", data);
  } else {
    snprintf(folder, sizeof folder, "%s/.cache/mlfab/mnist", home ? home : "");
  }
  if (!images_read(&task->train, folder, "train")) return 0;
  return rank != 0 || images_read(&task->test, folder, "t10k");
}

/* ---------------------------------------------------------------------------------------------
 * The network: tensors W1 (784 x 128, one row an input), b1, W2 (128 x 10, one row a unit), b2
 */

/* Computes the hidden units and the logits of an image. Most pixels are black, and are skipped. */
static void network_forward(const unsigned char *pixels, float *const *w, float *hidden,
                            float *logits) {
  memcpy(hidden, w[1], HIDDEN * sizeof *hidden);
  memcpy(logits, w[3], CLASSES * sizeof *logits);
  for (size_t i = 0; i < INPUTS; i++) {
    if (pixels[i]) add_scaled(hidden, (float)pixels[i] / 255.0f, w[0] + i * HIDDEN, HIDDEN);
  }
  for (size_t j = 0; j < HIDDEN; j++) {
    if (hidden[j] < 0) hidden[j] = 0;
    add_scaled(logits, hidden[j], w[2] + j * CLASSES, CLASSES);
  }
}

/* Turns logits into probabilities minus the one-hot label, which is the gradient of the cross
 * entropy in them; returns the cross entropy. */
static double softmax_loss(float *logits, unsigned label) {
  float largest = logits[0], sum = 0;
  for (size_t k = 1; k < CLASSES; k++) largest = logits[k] > largest ? logits[k] : largest;
  for (size_t k = 0; k < CLASSES; k++) sum += logits[k] = expf(logits[k] - largest);
  for (size_t k = 0; k < CLASSES; k++) logits[k] /= sum;
  double loss = -log((double)logits[label] + 1e-30);
  logits[label] -= 1.0f;
  return loss;
}

static double network_gradient(const struct task *task, size_t sample, float *const *w,
                               float *const *g, float weight) {
  const unsigned char *pixels = task->train.pixels + sample * INPUTS;
  float hidden[HIDDEN], out[CLASSES], back[HIDDEN];
  network_forward(pixels, w, hidden, out);
  double loss = softmax_loss(out, task->train.labels[sample]);
  for (size_t k = 0; k < CLASSES; k++) out[k] *= weight;
  for (size_t j = 0; j < HIDDEN; j++) {
    back[j] = hidden[j] > 0 ? dot(w[2] + j * CLASSES, out, CLASSES) : 0.0f;
    add_scaled(g[2] + j * CLASSES, hidden[j], out, CLASSES);
  }
  add_scaled(g[3], 1.0f, out, CLASSES);
  add_scaled(g[1], 1.0f, back, HIDDEN);
  for (size_t i = 0; i < INPUTS; i++) {
    if (pixels[i]) add_scaled(g[0] + i * HIDDEN, (float)pixels[i] / 255.0f, back, HIDDEN);
  }
  return loss;
}

#if MNIST_WITH_CBLAS
/* c (m x n) = a b + beta c; a is m x k, b is k x n, or stored the other way round with `CblasTrans`. */
static void multiply(int transposed_a, int transposed_b, size_t m, size_t n, size_t k,
                     const float *a, const float *b, float beta, float *c) {
  cblas_sgemm(CblasRowMajor, transposed_a ? CblasTrans : CblasNoTrans,
              transposed_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, 1.0f, a,
              (int)(transposed_a ? m : k), b, (int)(transposed_b ? k : n), beta, c, (int)n);
}

/* Memory of a batch besides weights and gradients: a row a sample of each. */
struct batch {
  size_t room; /* samples */
  float *x, *hidden, *back, *out;
};

static void batch_make(struct batch *b, size_t n) {
  if (n <= b->room) return;
  free(b->x);
  b->room = n;
  b->x = allocate(n * (INPUTS + 2 * HIDDEN + CLASSES), sizeof(float));
  b->hidden = b->x + n * INPUTS;
  b->back = b->hidden + n * HIDDEN;
  b->out = b->back + n * HIDDEN;
}

/* g is zero before. */
static double network_batch(const struct task *task, const size_t *samples, size_t n,
                            float *const *w, float *const *g) {
  static struct batch b;
  double loss = 0;
  batch_make(&b, n);
  for (size_t s = 0; s < n; s++) {
    const unsigned char *pixels = task->train.pixels + samples[s] * INPUTS;
    for (size_t i = 0; i < INPUTS; i++) b.x[s * INPUTS + i] = (float)pixels[i] * (1.0f / 255.0f);
    memcpy(b.hidden + s * HIDDEN, w[1], HIDDEN * sizeof(float));
    memcpy(b.out + s * CLASSES, w[3], CLASSES * sizeof(float));
  }
  multiply(0, 0, n, HIDDEN, INPUTS, b.x, w[0], 1, b.hidden);
  for (size_t i = 0; i < n * HIDDEN; i++) b.hidden[i] = b.hidden[i] > 0 ? b.hidden[i] : 0;
  multiply(0, 0, n, CLASSES, HIDDEN, b.hidden, w[2], 1, b.out);
  for (size_t s = 0; s < n; s++) {
    loss += softmax_loss(b.out + s * CLASSES, task->train.labels[samples[s]]);
    for (size_t k = 0; k < CLASSES; k++) b.out[s * CLASSES + k] /= (float)n;
  }
  multiply(0, 1, n, HIDDEN, CLASSES, b.out, w[2], 0, b.back);
  for (size_t i = 0; i < n * HIDDEN; i++) b.back[i] = b.hidden[i] > 0 ? b.back[i] : 0;
  multiply(1, 0, INPUTS, HIDDEN, n, b.x, b.back, 0, g[0]);
  multiply(1, 0, HIDDEN, CLASSES, n, b.hidden, b.out, 0, g[2]);
  for (size_t s = 0; s < n; s++) {
    add_scaled(g[1], 1.0f, b.back + s * HIDDEN, HIDDEN);
    add_scaled(g[3], 1.0f, b.out + s * CLASSES, CLASSES);
  }
  return loss / (double)n;
}
#endif

/* The part of the test images that the network names rightly. */
static double network_accuracy(const struct task *task, float *const *w) {
  float hidden[HIDDEN], logits[CLASSES];
  size_t right = 0;
  for (size_t i = 0; i < task->test.n; i++) {
    network_forward(task->test.pixels + i * INPUTS, w, hidden, logits);
    unsigned best = 0;
    for (unsigned k = 1; k < CLASSES; k++) best = logits[k] > logits[best] ? k : best;
    right += best == task->test.labels[i];
  }
  return (double)right / (double)task->test.n;
}

/* ---------------------------------------------------------------------------------------------
 * The hyperplane: tensors a (8192) and the constant term (1); y = a . x + noise
 */

/* Point `sample`, always the same for a seed: x has mean 0 and variance 1 in each dimension, eight of
 * them from one random number; returns y. The points are never stored: they would be 1 GB. */
static float hyperplane_point(uint64_t seed, size_t sample, const float *truth, float *x) {
  uint64_t state = seed ^ (0x2545f4914f6cdd1du * (sample + 1));
  unsigned char bytes[DIMENSIONS];
  for (size_t i = 0; i < DIMENSIONS; i += sizeof state) {
    uint64_t bits = random_next(&state);
    memcpy(bytes + i, &bits, sizeof bits);
  }
  for (size_t i = 0; i < DIMENSIONS; i++) x[i] = ((float)bytes[i] - 127.5f) * (1.0f / 73.9f);
  return dot(truth, x, DIMENSIONS) + 0.1f * random_float(&state);
}

/* The coefficients that are to be found. */
static const float *hyperplane_truth(uint64_t seed) {
  static float truth[DIMENSIONS];
  static int made;
  uint64_t state = seed;
  for (size_t i = 0; !made && i < DIMENSIONS; i++) truth[i] = random_float(&state);
  made = 1;
  return truth;
}

static double hyperplane_gradient(const struct task *task, size_t sample, float *const *w,
                                  float *const *g, float weight) {
  float x[DIMENSIONS];
  float y = hyperplane_point(task->seed, sample, hyperplane_truth(task->seed), x);
  float error = dot(w[0], x, DIMENSIONS) + w[1][0] - y;
  add_scaled(g[0], weight * error, x, DIMENSIONS);
  g[1][0] += weight * error;
  return 0.5 * (double)error * (double)error;
}

/* Mean loss over points that nobody trained on, and that of knowing nothing (all weights zero). */
static double hyperplane_loss(const struct task *task, float *const *w, double *zero_loss_p) {
  enum { VALIDATION = 1024 };
  double loss = 0, zero = 0;
  for (size_t i = 0; i < VALIDATION; i++) {
    float x[DIMENSIONS];
    float y = hyperplane_point(task->seed, POINTS + i, hyperplane_truth(task->seed), x);
    double error = (double)(dot(w[0], x, DIMENSIONS) + w[1][0] - y);
    loss += 0.5 * error * error / VALIDATION;
    zero += 0.5 * (double)y * (double)y / VALIDATION;
  }
  *zero_loss_p = zero;
  return loss;
}

/* ---------------------------------------------------------------------------------------------
 * The worker
 */
struct worker {
  const struct options *options;
  const struct task *task;
  mlfab *fabric;
  int32_t rank;
  uint32_t workers;
  float *w[TENSORS_MAX], *g[TENSORS_MAX];
  mlfab_buf weights[TENSORS_MAX], update[TENSORS_MAX];
  size_t *order, part; /* this worker's samples, shuffled each epoch */
  size_t next;         /* of order */
  size_t *samples;     /* of a batch */
  uint64_t updates, version, delay_sum, delay_max, dropped;
};

/* Says what failed and why, and which rank is to blame. */
static int failed(struct worker *me, const char *what) {
  mlfab_error error;
  mlfab_last_error(me->fabric, &error);
  fprintf(stderr, "%s failed: %s\n", what, error.text);
  return 1;
}

/* First weights: worker 0's win, so it does not matter that all workers draw their own. */
static void weights_draw(struct worker *me) {
  uint64_t state = me->options->seed + 17;
  for (size_t t = 0; t < me->task->tensors; t++) {
    me->w[t] = allocate(me->task->count[t], sizeof(float));
    me->g[t] = allocate(me->task->count[t], sizeof(float));
    me->weights[t] = (mlfab_buf){(uint32_t)t, 0, me->w[t], me->task->count[t]};
    me->update[t] = (mlfab_buf){(uint32_t)t, 0, me->g[t], me->task->count[t]};
  }
  if (me->task->tensors < TENSORS_MAX) return; /* the hyperplane starts from zero */
  for (size_t i = 0; i < INPUTS * HIDDEN; i++) me->w[0][i] = 0.06f * random_float(&state);
  for (size_t i = 0; i < HIDDEN * CLASSES; i++) me->w[2][i] = 0.15f * random_float(&state);
}

static int model_agree(struct worker *me) {
  mlfab_model_options model = MLFAB_MODEL_OPTIONS_INIT;
  model.consistency = me->options->sync;
  model.optimizer = me->options->momentum ? MLFAB_OPTIMIZER_MOMENTUM : MLFAB_OPTIMIZER_SGD;
  weights_draw(me);
  for (size_t t = 0; t < me->task->tensors; t++) {
    if (mlfab_tensor_add(me->fabric, (uint32_t)t, MLFAB_F32, me->task->count[t])) {
      return failed(me, "adding a tensor");
    }
  }
  if (mlfab_model_start(me->fabric, &model, me->weights, (uint32_t)me->task->tensors)) {
    return failed(me, "agreeing on the model");
  }
  return 0;
}

/* Every n-th sample is this worker's. */
static void samples_deal(struct worker *me) {
  me->part = (me->task->samples + me->workers - 1 - (size_t)me->rank) / me->workers;
  if (me->part == 0) me->part = 1; /* more workers than samples: some share one */
  me->order = allocate(me->part, sizeof *me->order);
  for (size_t i = 0; i < me->part; i++) {
    me->order[i] = (i * me->workers + (size_t)me->rank) % me->task->samples;
  }
  me->next = me->part;
  me->samples = allocate(me->options->batch, sizeof *me->samples);
}

/* The next sample; at the end of the worker's part the order is drawn anew. */
static size_t sample_next(struct worker *me, uint64_t *random) {
  if (me->next == me->part) {
    for (size_t i = me->part; i > 1; i--) {
      size_t j = (size_t)(random_next(random) % i), swap = me->order[i - 1];
      me->order[i - 1] = me->order[j];
      me->order[j] = swap;
    }
    me->next = 0;
  }
  return me->order[me->next++];
}

/* Computes the mean gradient of a batch into g; returns the mean loss. */
static double gradient(struct worker *me, uint64_t *random) {
  double loss = 0, begin = now_s();
  size_t batch = me->options->batch;
  for (size_t t = 0; t < me->task->tensors; t++) {
    memset(me->g[t], 0, me->task->count[t] * sizeof(float));
  }
  for (size_t b = 0; b < batch; b++) me->samples[b] = sample_next(me, random);
  if (me->task->batch_gradient) {
    loss = me->task->batch_gradient(me->task, me->samples, batch, me->w, me->g);
  } else {
    for (size_t b = 0; b < batch; b++) {
      loss += me->task->gradient(me->task, me->samples[b], me->w, me->g, 1.0f / (float)batch);
    }
    loss /= (double)batch;
  }
  if (me->rank == me->options->slow_rank) {
    sleep_s((now_s() - begin) * (me->options->slow_factor - 1));
  }
  return loss;
}

static void progress_print(const struct worker *me, double loss, double images_per_s) {
  double seen = (double)me->version * (double)me->options->batch;
  printf("progress rank %d step %llu version %llu epoch %.2f loss %.4f images_per_s %.0f\n",
         (int)me->rank, (unsigned long long)me->updates, (unsigned long long)me->version,
         seen / (double)me->task->samples, loss, images_per_s);
}

/* How many updates the model has, by what the last push was told. */
static uint64_t updates_of_all(const struct worker *me, const mlfab_result *result) {
  if (me->options->sync.kind == MLFAB_SYNC_BSP) return me->updates * me->workers;
  /* Of a round the answer tells how many were complete before it. */
  if (me->options->sync.kind == MLFAB_SYNC_DROP) return result->version * me->options->sync.need;
  return result->version;
}

/* The whole training: until all workers together have made `total` updates. A slow worker makes fewer
 * of them, unless the rounds of BSP make everybody wait for it. */
static int train(struct worker *me) {
  double per_epoch = (double)me->task->samples / (double)me->options->batch;
  uint64_t total = (uint64_t)ceil(me->options->epochs * per_epoch);
  uint64_t random = me->options->seed * 1000003u + (uint64_t)me->rank, steps = 0;
  double told = now_s(), loss = 0;
  mlfab_push_options push = {.size = sizeof push, .scale = -me->options->lr};
  samples_deal(me);
  while (me->version < total) {
    mlfab_result result;
    if (mlfab_pull(me->fabric, me->weights, (uint32_t)me->task->tensors, NULL, NULL)) {
      return failed(me, "a pull");
    }
    double l = gradient(me, &random);
    loss = me->updates ? 0.98 * loss + 0.02 * l : l;
    int status = mlfab_push(me->fabric, me->update, (uint32_t)me->task->tensors, &push, &result);
    if (status == MLFAB_ERR_DROPPED)
      me->dropped++; /* too late for its round: go on with the next */
    if (status && status != MLFAB_ERR_DROPPED) return failed(me, "a push");
    if (me->options->barrier && mlfab_barrier(me->fabric, NULL)) return failed(me, "a barrier");
    me->updates++;
    steps++;
    uint64_t version = updates_of_all(me, &result);
    if (version > me->version) me->version = version;
    me->delay_sum += result.delay;
    if (result.delay > me->delay_max) me->delay_max = result.delay;
    double t = now_s();
    if (t - told >= 0.5) {
      progress_print(me, loss, (double)(steps * me->options->batch) / (t - told));
      told = t;
      steps = 0;
    }
  }
  return 0;
}

/* Worker 0 pulls the final model, says how good it is, and saves it. */
static int evaluate(struct worker *me) {
  if (mlfab_pull(me->fabric, me->weights, (uint32_t)me->task->tensors, NULL, NULL)) {
    return failed(me, "the last pull");
  }
  if (me->task->test.n) {
    printf("accuracy %.4f\n", network_accuracy(me->task, me->w));
  } else {
    double zero = 0, loss = hyperplane_loss(me->task, me->w, &zero);
    printf("loss %.4f zero_loss %.4f\n", loss, zero);
  }
  if (me->options->save && mlfab_save(me->fabric, me->options->save)) {
    return failed(me, "saving the model");
  }
  return 0;
}

static int work(struct worker *me) {
  if (mlfab_rank(me->fabric, &me->rank, &me->workers, NULL)) return failed(me, "asking the rank");
  if (model_agree(me)) return 1;
  if (mlfab_barrier(me->fabric, NULL)) return failed(me, "the first barrier");
  double begin = now_s();
  if (train(me)) return 1;
  /* If others may wait for this worker's next update, they have to hear that there is none. */
  int counts = me->options->sync.kind > MLFAB_SYNC_BSP;
  if (counts ? mlfab_finish(me->fabric, 0) : mlfab_barrier(me->fabric, NULL))
    return failed(me, "the end of the training");
  double seconds = now_s() - begin;
  mlfab_stats stats;
  if (mlfab_get_stats(me->fabric, &stats, sizeof stats)) return failed(me, "asking for counters");
  printf(
      "result rank %d updates %llu seconds %.3f delay_sum %llu delay_max %llu bytes_sent %llu "
      "bytes_received %llu dropped %llu\n",
      (int)me->rank, (unsigned long long)me->updates, seconds, (unsigned long long)me->delay_sum,
      (unsigned long long)me->delay_max, (unsigned long long)stats.bytes_sent,
      (unsigned long long)stats.bytes_received, (unsigned long long)me->dropped);
  if (me->rank == 0 && evaluate(me)) return 1;
  /* "No more data from here": nobody waits for this worker any more. */
  return !counts && mlfab_finish(me->fabric, 0) ? failed(me, "finishing") : 0;
}

static void work_end(struct worker *me, struct task *task) {
  mlfab_close(&me->fabric);
  for (size_t t = 0; t < TENSORS_MAX; t++) {
    free(me->w[t]);
    free(me->g[t]);
  }
  free(me->order);
  free(me->samples);
  free(task->train.pixels);
  free(task->train.labels);
  free(task->test.pixels);
  free(task->test.labels);
}

/* ---------------------------------------------------------------------------------------------
 * Options and main
 */
static void task_choose(struct task *task, struct options *options, int rank) {
  *task = (struct task){.seed = options->seed};
  if (!options->generated && mnist_find(task, rank)) {
    static const size_t count[] = {INPUTS * HIDDEN, HIDDEN, HIDDEN * CLASSES, CLASSES};
    task->tensors = 4;
    memcpy(task->count, count, sizeof count);
    task->samples = task->train.n;
    task->gradient = network_gradient;
#if MNIST_WITH_CBLAS
    if (!options->loops) task->batch_gradient = network_batch;
#endif
    if (options->batch == 0) options->batch = 32;
    if (options->lr == 0) options->lr = options->momentum ? 0.01 : 0.1;
    return;
  }
  if (!options->generated && rank == 0) {
    printf(
        "no MNIST in MLFAB_DATA or ~/.cache/mlfab (mlfab-fetch mnist gets it): training on a "
        "generated "
        "hyperplane\n");
  }
  task->tensors = 2;
  task->count[0] = DIMENSIONS;
  task->count[1] = 1;
  task->samples = POINTS;
  task->gradient = hyperplane_gradient;
  if (options->batch == 0) options->batch = 64;
  /* A batch of b samples in d dimensions is stable up to 2 / (1 + d/b); other workers' updates
   * arrive in between, so a quarter of that. */
  double limit = 2.0 / (1.0 + (double)DIMENSIONS / (double)options->batch);
  if (options->lr == 0) options->lr = limit * (options->momentum ? 0.025 : 0.25);
}

/* "ssp:3", "pssp:3:0.5"; 0 when it is no model. */
static int sync_take(mlfab_sync *sync, const char *value) {
  static const char *const names[] = {"async", "bsp", "ssp", "dsps", "drop", "pssp", "dynamic"};
  double number[2] = {0, 0};
  size_t n = strcspn(value, ":");
  *sync = (mlfab_sync){.size = sizeof *sync, .alpha = 1};
  for (uint32_t k = 0; k < 7; k++) {
    if (strlen(names[k]) != n || memcmp(names[k], value, n) != 0) continue;
    sync->kind = k;
    const char *at = value + n;
    for (int i = 0; i < 2 && *at == ':'; i++) {
      char *end;
      number[i] = strtod(at + 1, &end);
      if (end == at + 1 || number[i] < 0) return 0;
      at = end;
    }
    sync->staleness = (int64_t)number[0];
    sync->need = (uint32_t)number[0];
    sync->chance = number[1];
    return *at == 0;
  }
  return 0;
}

/* Takes one option with its value; 0 when it is not one. */
static int option_take(struct options *options, const char *name, const char *value) {
  char *end = NULL;
  if (!strcmp(name, "--sync")) return sync_take(&options->sync, value);
  if (!strcmp(name, "--save")) return (options->save = value) != NULL;
  double number = strtod(value, &end);
  if (end == value || number < 0) return 0;
  if (!strcmp(name, "--slow")) {
    options->slow_rank = (int)number;
    options->slow_factor = *end == ':' ? strtod(end + 1, &end) : 0;
    return *end == 0 && options->slow_factor >= 1;
  }
  if (!strcmp(name, "--epochs")) return (options->epochs = number) > 0 && *end == 0;
  if (!strcmp(name, "--lr")) return (options->lr = number) > 0 && *end == 0;
  if (!strcmp(name, "--batch")) return (options->batch = (size_t)number) > 0 && *end == 0;
  if (!strcmp(name, "--seed")) return (options->seed = (uint64_t)number) > 0 && *end == 0;
  return 0;
}

static int options_read(struct options *options, int argc, char **argv) {
  *options = (struct options){.epochs = 4, .slow_rank = -1, .seed = 1};
  options->sync.size = sizeof options->sync;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--momentum")) {
      options->momentum = 1;
    } else if (!strcmp(argv[i], "--barrier")) {
      options->barrier = 1;
    } else if (!strcmp(argv[i], "--generated")) {
      options->generated = 1;
    } else if (!strcmp(argv[i], "--loops")) {
      options->loops = 1;
    } else if (i + 1 < argc && option_take(options, argv[i], argv[i + 1])) {
      i++;
    } else {
      fprintf(stderr, "mnist: cannot take '%s'\n%s", argv[i], usage_text);
      return 1;
    }
  }
  return 0;
}

int main(int argc, char **argv) {
  struct options options;
  struct task task;
  mlfab_config config;
  mlfab_error error;
  struct worker me = {.options = &options, .task = &task};
  setvbuf(stdout, NULL, _IOLBF, 0);
#if MNIST_WITH_CBLAS && defined(OPENBLAS_VERSION)
  openblas_set_num_threads(1); /* the workers of a host share its cores */
#endif
  if (options_read(&options, argc, argv)) return 2;
  mlfab_config_init(&config);
  if (mlfab_config_from_env(&config, &error) || mlfab_open(&config, &me.fabric, &error)) {
    fprintf(stderr, "mnist: %s\n", error.text);
    return 1;
  }
  mlfab_rank(me.fabric, &me.rank, NULL, NULL);
  task_choose(&task, &options, (int)me.rank);
  int status = work(&me);
  work_end(&me, &task);
  return status;
}
