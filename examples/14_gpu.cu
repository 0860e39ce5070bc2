/* 14_gpu.cu - a trainer whose weights, gradients and activations are in the memory of a GPU.
 *
 * Shows:  mlfab_gpu_attach; pulls into device memory and pushes from it, in the order of one stream; the
 *         gradient of one layer that travels while that of the other is computed.
 * Run:    build/mlfab-run -n 2 -s 1 build/gpu/14_gpu [--epochs N] [--images N] [--generated]
 *
 * The network is that of mnist.c, 784-128-10: rectified linear, softmax, cross entropy, plain stochastic
 * gradient descent. cuBLAS multiplies its matrices, and a few small kernels do the rest. MLFAB_CONSISTENCY
 * says who waits for whom (bsp, ssp, ...; asynchronous without it).
 *
 * The data are those of MNIST, in the folder `mnist` of MLFAB_DATA or of ~/.cache/mlfab. If there are none,
 * the program generates ten classes of images from a seed. Without a GPU it says so, and computes the same on
 * the host. Worker 0 evaluates the model on the test images after every epoch, and its exit status is 0 only if the
 * network has learned: an accuracy above 0.9, or for generated images a loss below a third of the first one.
 *
 * SPDX-License-Identifier: MIT
 */
#include "gpu/mlfab_gpu.h"

#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <string>
#include <vector>

constexpr size_t INPUTS = 784, HIDDEN = 128, CLASSES = 10, BATCH = 64;
constexpr uint32_t TENSORS = 4;

/* W1 (784 x 128, one row an input), b1, W2 (128 x 10, one row a unit), b2. A layer is two tensors. */
static const size_t counts[TENSORS] = {INPUTS * HIDDEN, HIDDEN, (HIDDEN * CLASSES), CLASSES};

/* Of every worker's updates. The server adds them all up, so that n workers take steps n times as large from
 * n times as many images: with very many of them it has to be smaller. */
static const double learning_rate = 0.1;

/* Images of one byte a pixel, and the order in which they are taken. */
struct images {
  unsigned char *pixels, *labels;
  uint32_t *order;
  size_t n;
};

/* All arrays are in the memory of the device, or of the host without one. */
struct trainer {
  mlfab *fabric;
  int32_t rank;
  uint32_t workers;
  images train, test;
  float *w[TENSORS], *g[TENSORS];              /* weights and gradients */
  mlfab_buf weights[TENSORS], update[TENSORS]; /* the same, for pulls and pushes */
  float *x, *hidden, *back, *out;              /* of a batch: a row an image */
  float *loss, *right; /* of each image: cross entropy; 1 where its class is recognized, else 0 */
};

/* The device of this process. Without one, `used` is false and the host computes. */
static struct {
  bool used;
  cudaStream_t stream;
  cublasHandle_t blas;
} gpu;

/* ---------------------------------------------------------------------------------------------
 * The device
 */

/* The process ends at the first error of CUDA, and the fabric tells the other workers that it has died. */
static void must(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "14_gpu: %s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}

static void must(cublasStatus_t status, const char *what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  fprintf(stderr, "14_gpu: %s: %s\n", what, cublasGetStatusString(status));
  exit(1);
}

/* Chooses a device, and lets the fabric use its memory. Workers of one host take its devices in turn; where a
 * launcher shows each of them only one (CUDA_VISIBLE_DEVICES), they take that. */
static void gpu_open(mlfab *fabric, int32_t rank) {
  int count = 0;
  mlfab_error failure;
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count == 0) error = cudaErrorNoDevice;
  if (error != cudaSuccess) {
    printf("no GPU (%s): computing on the host\n", cudaGetErrorString(error));
    return;
  }
  gpu.used = true;
  must(cudaSetDevice(rank % count), "choosing a device");
  must(cudaGetDeviceProperties(&properties, rank % count), "asking for the device's name");
  /* The default stream would wait for the streams of all libraries in this process, and they for it. */
  must(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking), "making a stream");
  must(cublasCreate(&gpu.blas), "starting cuBLAS");
  must(cublasSetStream(gpu.blas, gpu.stream), "giving cuBLAS the stream");
  /* From here on pushes and pulls take addresses of this device. They begin behind what is on the stream then. */
  if (mlfab_gpu_attach(fabric, MLFAB_GPU_CURRENT, gpu.stream, 0, &failure)) {
    fprintf(stderr, "14_gpu: %s\n", failure.text);
    exit(1);
  }
  printf("computing on device %d, %s\n", rank % count, properties.name);
}

static std::vector<void *> allocated; /* for release_all */

/* Memory of the device, or of the host without one. */
template <class T>
static T *allocate(size_t count) {
  void *memory = NULL;
  if (gpu.used) {
    must(cudaMalloc(&memory, count * sizeof(T)), "allocating device memory");
  } else if (!(memory = malloc(count * sizeof(T)))) {
    fprintf(stderr, "14_gpu: out of memory\n");
    exit(1);
  }
  allocated.push_back(memory);
  return static_cast<T *>(memory);
}

static void release_all() {
  for (void *memory : allocated) gpu.used ? (void)cudaFree(memory) : free(memory);
  if (!gpu.used) return;
  (void)cublasDestroy(gpu.blas);
  (void)cudaStreamDestroy(gpu.stream);
}

/* Copies between device and host, and waits for the copy: not for use inside of an epoch. */
template <class T>
static void copy(T *to, const T *from, size_t count) {
  if (gpu.used) {
    must(cudaMemcpyAsync(to, from, count * sizeof(T), cudaMemcpyDefault, gpu.stream), "copying");
    must(cudaStreamSynchronize(gpu.stream), "waiting for a copy");
  } else {
    memcpy(to, from, count * sizeof(T));
  }
}

/* ---------------------------------------------------------------------------------------------
 * The computation, an element at a time. Each struct is a kernel on the device, and a loop on the host.
 */
template <class F>
static __global__ void each_kernel(size_t n, F element) {
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) element(i);
}

/* Calls element(0), ..., element(n - 1), in any order. On the device it only queues them. */
template <class F>
static void each(size_t n, F element) {
  if (gpu.used) {
    each_kernel<<<(unsigned)((n + 255) / 256), 256, 0, gpu.stream>>>(n, element);
    must(cudaGetLastError(), "launching a kernel");
  } else {
    for (size_t i = 0; i < n; i++) element(i);
  }
}

/* A pixel of a batch, as a number from 0 to 1. */
struct load_pixel {
  const unsigned char *pixels;
  const uint32_t *order;
  float *x;
  __host__ __device__ void operator()(size_t i) const {
    x[i] = (float)pixels[order[i / INPUTS] * (size_t)INPUTS + i % INPUTS] * (1.0f / 255.0f);
  }
};

struct rectify {
  float *hidden;
  const float *bias;
  __host__ __device__ void operator()(size_t i) const {
    hidden[i] = fmaxf(hidden[i] + bias[i % HIDDEN], 0.0f);
  }
};

/* No gradient goes back through a unit that was cut off. */
struct rectify_back {
  float *back;
  const float *hidden;
  __host__ __device__ void operator()(size_t i) const {
    if (hidden[i] <= 0) back[i] = 0;
  }
};

/* Turns a row, the products of image s, into the gradient of the batch's mean cross entropy in them:
 * probabilities minus the one-hot label, times `weight`, which is 1 / the size of the batch. */
struct softmax {
  float *out;
  const float *bias;
  const unsigned char *labels;
  const uint32_t *order;
  float *loss, *right, weight;
  __host__ __device__ void operator()(size_t s) const {
    float *row = out + s * CLASSES, sum = 0;
    size_t label = labels[order[s]], best = 0;
    for (size_t k = 0; k < CLASSES; k++) row[k] += bias[k];
    for (size_t k = 1; k < CLASSES; k++) best = row[k] > row[best] ? k : best;
    float largest = row[best]; /* subtracted, so that expf does not overflow */
    for (size_t k = 0; k < CLASSES; k++) sum += row[k] = expf(row[k] - largest);
    loss[s] = -logf(row[label] / sum + 1e-30f);
    right[s] = best == label ? 1.0f : 0.0f;
    for (size_t k = 0; k < CLASSES; k++)
      row[k] = (row[k] / sum - (k == label ? 1.0f : 0.0f)) * weight;
  }
};

/* A bias is added to every row, so its gradient is the sum of a column. */
struct column_sum {
  const float *rows;
  float *sums;
  size_t n, columns;
  __host__ __device__ void operator()(size_t j) const {
    float sum = 0;
    for (size_t s = 0; s < n; s++) sum += rows[s * columns + j];
    sums[j] = sum;
  }
};

/* c (m x n) = a b. All are stored by rows; a is m x k, or k x m with a_t, and b is k x n, or n x k with b_t. */
static void multiply(bool a_t, bool b_t, size_t m, size_t n, size_t k, const float *a,
                     const float *b, float *c) {
  if (gpu.used) {
    /* cuBLAS stores matrices by columns. It takes ours for their transposes, and so computes c' = b' a'. */
    const float one = 1, zero = 0;
    must(cublasSgemm(gpu.blas, b_t ? CUBLAS_OP_T : CUBLAS_OP_N, a_t ? CUBLAS_OP_T : CUBLAS_OP_N,
                     (int)n, (int)m, (int)k, &one, b, (int)(b_t ? k : n), a, (int)(a_t ? m : k),
                     &zero, c, (int)n),
         "multiplying");
    return;
  }
  memset(c, 0, m * n * sizeof *c);
  for (size_t i = 0; i < m; i++) {
    for (size_t l = 0; l < k; l++) {
      float factor = a_t ? a[l * m + i] : a[i * k + l];
      if (factor == 0) continue; /* most pixels are black */
      for (size_t j = 0; j < n; j++) c[i * n + j] += factor * (b_t ? b[j * k + l] : b[l * n + j]);
    }
  }
}

/* ---------------------------------------------------------------------------------------------
 * Options, time, chance, data
 */
struct options {
  int epochs;
  size_t images; /* only the first so many; 0: all */
  bool generated;
};

static bool options_read(options *o, int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    const char *value = i + 1 < argc ? argv[i + 1] : "";
    if (!strcmp(argv[i], "--generated")) {
      o->generated = true;
    } else if (!strcmp(argv[i], "--epochs") && atoi(value) > 0) {
      o->epochs = atoi(argv[++i]);
    } else if (!strcmp(argv[i], "--images") && atoi(value) > 0) {
      o->images = (size_t)atoi(argv[++i]);
    } else {
      fprintf(stderr, "14_gpu: cannot take '%s'\n", argv[i]);
      fprintf(stderr, "usage: 14_gpu [--epochs N] [--images N] [--generated]\n");
      return false;
    }
  }
  return true;
}

static double now_s() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The next of a stream of random numbers (splitmix64). */
static uint64_t random_next(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

/* Images as they were read: 784 bytes each, and its class. */
struct host_images {
  std::vector<unsigned char> pixels, labels;
};

/* An idx file, gzipped or not: records of `record` bytes behind a header. Empty when it cannot be read. */
static std::vector<unsigned char> idx_read(const std::string &path, size_t header, size_t record) {
  std::vector<unsigned char> bytes;
  unsigned char head[16];
  FILE *file = fopen(path.c_str(), "rb");
  bool piped = !file && !access((path + ".gz").c_str(), R_OK) && path.find('\'') == path.npos;
  if (piped) file = popen(("gzip -dc '" + path + ".gz'").c_str(), "r");
  if (!file) return bytes;
  if (fread(head, 1, header, file) == header) {
    size_t items = (size_t)head[4] << 24 | (size_t)head[5] << 16 | (size_t)head[6] << 8 | head[7];
    bytes.resize(items <= 1000000 ? items * record : 0);
    if (fread(bytes.data(), 1, bytes.size(), file) != bytes.size()) bytes.clear();
  }
  piped ? pclose(file) : fclose(file);
  return bytes;
}

/* One set of MNIST's; empty without the files. */
static host_images mnist_read(const std::string &prefix) {
  host_images set = {idx_read(prefix + "-images-idx3-ubyte", 16, INPUTS),
                     idx_read(prefix + "-labels-idx1-ubyte", 8, 1)};
  bool good = set.pixels.size() == set.labels.size() * INPUTS;
  for (unsigned char label : set.labels) good = good && label < CLASSES;
  return good ? set : host_images();
}

/* n images. Each is one of ten prototypes, which are its classes, with noise in a quarter of its pixels. A quarter
 * of a prototype's pixels are white. */
static host_images images_generate(size_t n, uint64_t seed) {
  host_images set = {std::vector<unsigned char>(n * INPUTS), std::vector<unsigned char>(n)};
  std::vector<unsigned char> ten(CLASSES * INPUTS);
  uint64_t ten_seed = 1; /* the same for training and test */
  for (unsigned char &pixel : ten) pixel = random_next(&ten_seed) % 4 ? 0 : 255;
  for (size_t i = 0; i < n * INPUTS; i++) {
    uint64_t r = random_next(&seed);
    if (i % INPUTS == 0) set.labels[i / INPUTS] = (unsigned char)((r >> 32) % CLASSES);
    set.pixels[i] =
        r % 4 ? ten[set.labels[i / INPUTS] * (size_t)INPUTS + i % INPUTS] : (unsigned char)(r >> 8);
  }
  return set;
}

/* Copies the first n images to the memory of the device. Their order is that of the files. */
static images images_place(const host_images &from, size_t n) {
  images set = {allocate<unsigned char>(n * INPUTS), allocate<unsigned char>(n),
                allocate<uint32_t>(n), n};
  std::vector<uint32_t> order(n);
  for (size_t i = 0; i < n; i++) order[i] = (uint32_t)i;
  copy(set.pixels, from.pixels.data(), n * INPUTS);
  copy(set.labels, from.labels.data(), n);
  copy(set.order, order.data(), n);
  return set;
}

/* MNIST, or generated images. Returns whether it is MNIST. */
static bool data_load(trainer *t, const options *o) {
  const char *data = getenv("MLFAB_DATA"), *home = getenv("HOME");
  std::string folder = data && *data ? data : std::string(home ? home : "") + "/.cache/mlfab";
  host_images train, test;
  if (!o->generated) {
    train = mnist_read(folder + "/mnist/train");
    test = mnist_read(folder + "/mnist/t10k");
  }
  bool found = !train.labels.empty() && !test.labels.empty();
  if (!found) {
    train = images_generate(12000, 2);
    test = images_generate(2000, 3);
  }
  size_t n = train.labels.size();
  if (o->images && o->images < n) n = o->images;
  if (n < t->workers) {
    fprintf(stderr, "14_gpu: %zu images are too few for %u workers\n", n, t->workers);
    exit(2);
  }
  t->train = images_place(train, n);
  t->test = images_place(test, test.labels.size());
  if (t->rank == 0) {
    if (!found && !o->generated) printf("no MNIST in %s/mnist\n", folder.c_str());
    printf("%s: %zu images, and %zu for the test\n", found ? "MNIST" : "generated", t->train.n,
           t->test.n);
  }
  return found;
}

/* ---------------------------------------------------------------------------------------------
 * Training
 */

/* Computes loss and right of n images, and the gradient in `out`. They are images first, first + 1, ... of the
 * set's order. */
static void forward(const trainer *t, const images *set, size_t first, size_t n, float *loss,
                    float *right) {
  const uint32_t *order = set->order + first;
  each(n * INPUTS, load_pixel{set->pixels, order, t->x});
  multiply(false, false, n, HIDDEN, INPUTS, t->x, t->w[0], t->hidden);
  each(n * HIDDEN, rectify{t->hidden, t->w[1]});
  multiply(false, false, n, CLASSES, HIDDEN, t->hidden, t->w[2], t->out);
  each(n, softmax{t->out, t->w[3], set->labels, order, loss, right, 1.0f / (float)n});
}

/* One step: pull, gradient, push. The host only queues kernels. mlfab_pull returns when the weights are on the
 * device; mlfab_push copies the gradient when the kernels before it are done. So no line of this function waits for the
 * device, except inside of mlfab's calls. */
static int step(const trainer *t, size_t first, size_t n) {
  mlfab_request upper = 0;
  mlfab_push_options push = MLFAB_PUSH_OPTIONS_INIT;
  push.scale = -learning_rate;
  int status = mlfab_pull(t->fabric, t->weights, TENSORS, NULL, NULL);
  if (status) return status;
  forward(t, &t->train, first, n, t->loss, t->right);

  /* The upper layer's gradient is known first. It travels while the device computes the lower layer's, because a push
   * waits only for what was queued before it. Nothing may write to its buffers until mlfab_wait. MLFAB_PUSH_MORE: both
   * pushes together are one update. (Without it a round of BSP would count each.) */
  multiply(true, false, HIDDEN, CLASSES, n, t->hidden, t->out, t->g[2]);
  each(CLASSES, column_sum{t->out, t->g[3], n, CLASSES});
  push.flags = MLFAB_PUSH_MORE;
  status = mlfab_push_start(t->fabric, t->update + 2, 2, &push, &upper);
  if (status) return status;

  multiply(false, true, n, HIDDEN, CLASSES, t->out, t->w[2], t->back);
  each(n * HIDDEN, rectify_back{t->back, t->hidden});
  multiply(true, false, INPUTS, HIDDEN, n, t->x, t->back, t->g[0]);
  each(HIDDEN, column_sum{t->back, t->g[1], n, HIDDEN});
  push.flags = 0;
  /* DROPPED is not a failure: the update came too late for its round. Go on with the next one. */
  status = mlfab_push(t->fabric, t->update, 2, &push, NULL);
  if (status && status != MLFAB_ERR_DROPPED) return status;
  status = mlfab_wait(t->fabric, upper, 0, NULL);
  return status == MLFAB_ERR_DROPPED ? 0 : status;
}

/* The mean loss of the test images, and the share of them whose class is recognized. */
static void evaluate(const trainer *t, double *loss_p, double *accuracy_p) {
  size_t n = t->test.n;
  std::vector<float> loss(n), right(n);
  for (size_t i = 0; i < n; i += BATCH) {
    forward(t, &t->test, i, n - i < BATCH ? n - i : BATCH, t->loss + i, t->right + i);
  }
  copy(loss.data(), t->loss, n);
  copy(right.data(), t->right, n);
  *loss_p = *accuracy_p = 0;
  for (size_t i = 0; i < n; i++) {
    *loss_p += (double)loss[i] / (double)n;
    *accuracy_p += (double)right[i] / (double)n;
  }
}

/* Trains on this worker's part of the training images, n a step. All workers draw the same new order, and each
 * takes its own part of it. */
static int epoch_train(trainer *t, uint64_t *random, size_t part, size_t n, size_t steps) {
  std::vector<uint32_t> order(t->train.n);
  for (size_t i = 0; i < t->train.n; i++) { /* a shuffle, inside out */
    size_t j = (size_t)(random_next(random) % (i + 1));
    order[i] = order[j];
    order[j] = (uint32_t)i;
  }
  copy(t->train.order, order.data() + (size_t)t->rank * part, part);
  int status = 0;
  for (size_t s = 0; s < steps && !status; s++) status = step(t, s * n, n);
  return status;
}

/* All epochs. Every worker makes the same number of steps, so rounds need no worker that has ended. *learned_p:
 * whether the network has learned, as worker 0 sees it. */
static int train(trainer *t, const options *o, bool is_mnist, bool *learned_p) {
  uint64_t random = 1;
  double first_loss = 0, loss = 0, accuracy = 0;
  size_t part = t->train.n / t->workers, n = part < BATCH ? part : BATCH, steps = part / n;
  if (t->rank == 0) {
    evaluate(t, &first_loss, &accuracy);
    printf("at first: loss %.4f, accuracy %.4f\n", first_loss, accuracy);
  }
  for (int epoch = 1; epoch <= o->epochs; epoch++) {
    double begin = now_s();
    int status = epoch_train(t, &random, part, n, steps);
    double seconds = now_s() - begin; /* the stream is empty now: the last push has ended */
    /* mlfab_finish says that this worker has no more data. Worker 0's barrier returns when every other worker has
     * said so, or has died: then the model has all updates. */
    bool last = epoch == o->epochs;
    if (!status && last && t->rank != 0) return mlfab_finish(t->fabric, 0);
    if (!status && last) status = mlfab_barrier(t->fabric, NULL);
    if (!status && t->rank == 0) status = mlfab_pull(t->fabric, t->weights, TENSORS, NULL, NULL);
    if (status) return status;
    if (t->rank != 0) continue;
    evaluate(t, &loss, &accuracy);
    printf("epoch %d: loss %.4f, accuracy %.4f, %.0f images/s a worker\n", epoch, loss, accuracy,
           (double)(steps * n) / seconds);
  }
  *learned_p = is_mnist ? accuracy > 0.9 : loss < first_loss / 3;
  if (!*learned_p) fprintf(stderr, "14_gpu: it has not learned\n");
  return mlfab_finish(t->fabric, 0);
}

/* Agrees with the other workers on the model. All begin with the weights that worker 0 has drawn. */
static int model_start(trainer *t) {
  uint64_t random = 17;
  for (uint32_t k = 0; k < TENSORS; k++) {
    const float range[TENSORS] = {0.06f, 0, 0.15f, 0};
    std::vector<float> first(counts[k]);
    for (float &f : first) {
      f = range[k] * ((float)(random_next(&random) >> 40) / 8388608.0f - 1.0f);
    }
    t->w[k] = allocate<float>(counts[k]);
    t->g[k] = allocate<float>(counts[k]);
    copy(t->w[k], first.data(), counts[k]);
    t->weights[k] = {k, 0, t->w[k], counts[k]};
    t->update[k] = {k, 0, t->g[k], counts[k]};
    int status = mlfab_tensor_add(t->fabric, k, MLFAB_F32, counts[k]);
    if (status) return status;
  }
  return mlfab_model_start(t->fabric, NULL, t->weights, TENSORS);
}

static void batch_allocate(trainer *t) {
  size_t results = t->test.n > BATCH ? t->test.n : BATCH;
  t->x = allocate<float>(BATCH * INPUTS);
  t->hidden = allocate<float>(BATCH * HIDDEN);
  t->back = allocate<float>(BATCH * HIDDEN);
  t->out = allocate<float>(BATCH * CLASSES);
  t->loss = allocate<float>(results);
  t->right = allocate<float>(results);
}

int main(int argc, char **argv) {
  options o = {2, 0, false};
  mlfab_error error;
  trainer t = {};
  bool learned = true;
  setvbuf(stdout, NULL, _IOLBF, 0);
  if (!options_read(&o, argc, argv)) return 2;
  if (mlfab_open_env(&t.fabric, &error)) {
    fprintf(stderr, "14_gpu: %s\n", error.text);
    return 1;
  }
  mlfab_rank(t.fabric, &t.rank, &t.workers, NULL);
  gpu_open(t.fabric, t.rank);
  bool is_mnist = data_load(&t, &o);
  batch_allocate(&t);
  int status = model_start(&t);
  if (!status) status = train(&t, &o, is_mnist, &learned);
  if (status) {
    mlfab_last_error(t.fabric, &error); /* the rank, the awaited thing and the time */
    fprintf(stderr, "14_gpu: %s: %s\n", mlfab_error_name(status), error.text);
  }
  mlfab_close(&t.fabric); /* before the stream: the context uses it until here */
  release_all();
  return status || !learned ? 1 : 0;
}
