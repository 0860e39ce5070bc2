/* gpu_fabric.cu - a fabric of real processes whose buffers, and one server's model, are in the memory of a GPU.
 *
 *     mlfab-run -n 3 -s 2 --server gpu_fabric gpu_fabric      cases, as TAP by worker 0; with
 *               --on-failure=continue ... gpu_fabric --kill     one more, in which the last worker is killed: status 137
 *     mlfab-run -n 2 -s 1 gpu_fabric --time MB                times of arrays of so many million bytes
 *
 * Inputs are written by kernels that nobody waits for, behind one that takes a while, and outputs are poisoned in the same way, so
 * that a call which does not keep to the order of the stream is found out. Results are compared with sums in float64. The model's
 * two tensors get the same updates; tensor 0 is at server 0, whose model is on the device, and tensor 1 at server 1, whose model is
 * not: they must have the same bits. MLFAB_OPTIMIZER chooses the rule; only SGD is compared with float64, too.
 *
 * Without a GPU each process says so, and does the same with memory of the host, as far as it can. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "gpu/mlfab_gpu.h"

#include <cuda_runtime.h>

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <thread>
#include <vector>

constexpr uint64_t COUNT = 1 << 19; /* elements of a tensor */
constexpr size_t GUARD = 256, ROOM = (COUNT + 64) * sizeof(double) + 2 * GUARD;
constexpr int POISON = 0xff; /* floats and doubles of such bytes are NaN */

enum memory { DEVICE, PINNED, MANAGED, HOST, MEMORIES };
enum { SLOTS = 2 }; /* arrays of each kind of memory */

static mlfab *fabric;
static int32_t rank;
static uint32_t workers; /* they live; when the last one has died, one less */
static uint64_t calls;   /* makes the inputs of each step new */
static int failures;     /* of this case, at this worker */

/* The device of this process. Without one, `used` is false and all memory is of the host. */
static struct {
  bool used;
  int devices;
  cudaStream_t stream;
} gpu;

static void must(cudaError_t error, const char *what) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "gpu_fabric: %s: %s\n", what, cudaGetErrorString(error));
  exit(1);
}

/* Ends the process, which the other workers see, where a call fails that must not. */
static void well(int code, const char *what) {
  mlfab_error error = {};
  if (!code) return;
  mlfab_last_error(fabric, &error);
  fprintf(stderr, "gpu_fabric: %s: %s: %s\n", what, mlfab_error_name(code), error.text);
  exit(1);
}

__attribute__((format(printf, 1, 2))) static void wrong(const char *format, ...) {
  va_list list;
  if (++failures > 5) return;
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
}

/* Whether there is a device; else says why not, once. */
static bool gpu_found(const char *then) {
  cudaError_t error = cudaGetDeviceCount(&gpu.devices);
  if (error == cudaSuccess && gpu.devices == 0) error = cudaErrorNoDevice;
  if (error != cudaSuccess) printf("no GPU (%s): %s\n", cudaGetErrorString(error), then);
  return error == cudaSuccess;
}

/* ---- arrays */

/* A number from -1 to 1, the same on host and device. */
template <class T>
static __host__ __device__ T value(uint64_t seed, uint64_t i) {
  uint64_t x = (i + seed * 0x100000001u) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return (T)(int32_t)(x >> 32) * (T)0x1p-31;
}

template <class T>
static __global__ void fill_kernel(T *to, uint64_t n, uint64_t seed) {
  uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) to[i] = value<T>(seed, i);
}

/* Takes two milliseconds or more: what is behind it on the stream has certainly not begun when a call is made. */
static __global__ void hold_kernel() {
  for (int i = 0; i < 2000; i++) __nanosleep(1000);
}

/* An array with guard bytes around it, in memory that is used again by the next case. */
struct array {
  memory kind;
  char *base;
  void *at() const { return base + GUARD; }
  bool on_stream() const { return gpu.used && kind != HOST; }
};

static array arrays[MEMORIES][SLOTS];

static void *allocate(memory kind, size_t bytes) {
  void *memory = NULL;
  if (!gpu.used || kind == HOST)
    memory = malloc(bytes);
  else if (kind == DEVICE)
    must(cudaMalloc(&memory, bytes), "allocating device memory");
  else if (kind == PINNED)
    must(cudaMallocHost(&memory, bytes), "allocating pinned memory");
  else
    must(cudaMallocManaged(&memory, bytes), "allocating managed memory");
  if (!memory) abort();
  return memory;
}

/* An array of one of the kinds of memory, which differ from worker to worker; poisoned, in the order of the stream. */
static array poisoned(uint64_t kind, int slot) {
  array a = {(memory)(kind % MEMORIES), NULL};
  if (!arrays[a.kind][slot].base) arrays[a.kind][slot] = {a.kind, (char *)allocate(a.kind, ROOM)};
  a = arrays[a.kind][slot];
  if (a.on_stream()) {
    hold_kernel<<<1, 1, 0, gpu.stream>>>();
    must(cudaMemsetAsync(a.base, POISON, ROOM, gpu.stream), "poisoning");
  } else {
    memset(a.base, POISON, ROOM);
  }
  return a;
}

template <class T>
static void fill(const array &a, uint64_t n, uint64_t seed) {
  T *to = (T *)a.at();
  if (a.on_stream()) {
    fill_kernel<<<(unsigned)((n + 255) / 256), 256, 0, gpu.stream>>>(to, n, seed);
    must(cudaGetLastError(), "launching a kernel");
  } else {
    for (uint64_t i = 0; i < n; i++) to[i] = value<T>(seed, i);
  }
}

/* The n elements of an array; nothing around them has changed. */
template <class T>
static std::vector<T> taken(const array &a, uint64_t n, const char *what) {
  std::vector<char> all(ROOM);
  std::vector<T> elements(n);
  if (a.on_stream()) {
    must(cudaMemcpyAsync(all.data(), a.base, ROOM, cudaMemcpyDefault, gpu.stream), "copying");
    must(cudaStreamSynchronize(gpu.stream), "waiting for a copy");
  } else {
    memcpy(all.data(), a.base, ROOM);
  }
  for (size_t i = 0; i < ROOM; i++)
    if ((i < GUARD || i >= GUARD + n * sizeof(T)) && (unsigned char)all[i] != POISON) {
      wrong("%s: byte %lld of %llu has changed\n", what, (long long)i - (long long)GUARD,
            (unsigned long long)(n * sizeof(T)));
      break;
    }
  memcpy(elements.data(), all.data() + GUARD, n * sizeof(T));
  return elements;
}

static uint64_t seed_of(uint32_t worker) { return calls * 1000 + worker + 1; }

/* to += factor * the sum of all workers' inputs, in float64. */
template <class T>
static void add_inputs(std::vector<double> *to, double factor) {
  for (uint32_t w = 0; w < workers; w++)
    for (uint64_t i = 0; i < to->size(); i++) (*to)[i] += factor * (double)value<T>(seed_of(w), i);
}

template <class T>
static void compare(const char *what, const std::vector<T> &got, const std::vector<double> &want,
                    double bound) {
  for (size_t i = 0; i < got.size(); i++)
    if (!(fabs((double)got[i] - want[i]) <= bound)) {
      wrong("%s: element %zu of %zu is %.17g, and not %.17g\n", what, i, got.size(), (double)got[i],
            want[i]);
      return;
    }
}

/* Of inputs up to 1. */
template <class T>
static double sum_bound() {
  return workers * workers * (sizeof(T) == sizeof(float) ? 0x1p-24 : 0x1p-53);
}

/* ---- cases */

static std::vector<double> model(COUNT); /* with SGD: what each tensor must be */
static double model_bound;
static bool sgd;

/* Both tensors get the same update, from memory of two kinds, and are pulled into memory of two kinds. */
static void pushes_and_pulls() {
  mlfab_push_options push = MLFAB_PUSH_OPTIONS_INIT;
  push.scale = -0.5;
  for (uint64_t m = 0; m < MEMORIES; m++) {
    const uint64_t kinds[2] = {m + (uint64_t)rank, m + (uint64_t)rank + 1};
    std::vector<float> got[2];
    mlfab_buf bufs[2];
    calls++;
    for (uint32_t t = 0; t < 2; t++) {
      array u = poisoned(kinds[t], (int)t);
      fill<float>(u, COUNT, seed_of((uint32_t)rank));
      bufs[t] = {t, 0, u.at(), COUNT};
    }
    well(mlfab_push(fabric, bufs, 2, &push, NULL), "push");
    array to[2] = {poisoned(kinds[1], 0), poisoned(kinds[0], 1)};
    for (uint32_t t = 0; t < 2; t++) bufs[t].data = to[t].at();
    well(mlfab_pull(fabric, bufs, 2, NULL, NULL), "pull");
    for (int t = 0; t < 2; t++) got[t] = taken<float>(to[t], COUNT, "pull");
    if (memcmp(got[0].data(), got[1].data(), COUNT * sizeof(float)) != 0)
      wrong("the tensors at server 0 and 1 differ\n");
    add_inputs<float>(&model, push.scale);
    model_bound += 4 * workers * 0x1p-24 * (double)(workers * calls); /* the largest weight */
    if (sgd) compare("pull", got[0], model, model_bound);
  }
}

template <class T>
static void allreduce(int dtype, uint64_t n) {
  for (uint64_t m = 0; m < MEMORIES; m++) {
    std::vector<double> want(n);
    calls++;
    array from = poisoned(m + (uint64_t)rank, 0), to = poisoned(m + 2 * (uint64_t)rank + 1, 1);
    const void *inputs[] = {from.at()};
    mlfab_collective how = {};
    how.size = sizeof how;
    how.inputs = inputs;
    fill<T>(from, n, seed_of((uint32_t)rank));
    well(mlfab_allreduce(fabric, to.at(), n, dtype, &how), "allreduce");
    add_inputs<T>(&want, 1);
    compare("allreduce", taken<T>(to, n, "allreduce"), want, sum_bound<T>());
  }
}

static void allreduces() {
  for (uint64_t n : {(uint64_t)1000, COUNT + 3}) {
    allreduce<float>(MLFAB_F32, n);
    allreduce<double>(MLFAB_F64, n);
  }
}

static bool share() {
  int shared = 0;
  well(mlfab_device_share(fabric, 0, 0, &shared), "device_share");
  if (rank == 0) printf("device memory is %sshared\n", shared ? "" : "not ");
  if (gpu.devices == 1 && !shared) wrong("one device, and its memory is not shared\n");
  return shared;
}

/* From device to device: added in the order of ranks, as by blocking calls in shared memory of the host. */
template <class T>
static void share_allreduce(int dtype, bool same_bits) {
  const uint64_t n = COUNT + 3;
  std::vector<double> want(n);
  std::vector<T> bits(n);
  calls++;
  array a = poisoned(DEVICE, 0);
  fill<T>(a, n, seed_of((uint32_t)rank));
  well(mlfab_allreduce(fabric, a.at(), n, dtype, NULL), "allreduce, shared");
  const std::vector<T> got = taken<T>(a, n, "allreduce, shared");
  add_inputs<T>(&want, 1);
  compare("allreduce, shared", got, want, sum_bound<T>());
  for (uint64_t i = 0; i < n; i++) {
    bits[i] = value<T>(seed_of(0), i);
    for (uint32_t w = 1; w < workers; w++) bits[i] += value<T>(seed_of(w), i);
  }
  if (same_bits && memcmp(got.data(), bits.data(), n * sizeof(T)) != 0)
    wrong("the sum has other bits than one in the order of ranks\n");
}

static void shared_allreduces() {
  const bool same_bits = share() || !gpu.used;
  share_allreduce<float>(MLFAB_F32, same_bits);
  share_allreduce<double>(MLFAB_F64, same_bits);
  allreduces(); /* also mixed memory, which is staged */
}

/* The last worker is killed somewhere in these calls. Each other one sees it once, and all go on. */
static void one_is_killed() {
  const int32_t victim = (int32_t)workers - 1;
  mlfab_error error = {};
  int code = 0;
  calls++;
  if (rank == victim) std::thread([] { usleep(300000), kill(getpid(), SIGKILL); }).detach();
  while (!code) {
    array a = poisoned(DEVICE, 0);
    fill<float>(a, COUNT, seed_of((uint32_t)rank));
    code = mlfab_allreduce(fabric, a.at(), COUNT, MLFAB_F32, NULL);
    if (code || rank == victim) continue;
    std::vector<double> want(COUNT);
    add_inputs<float>(&want, 1);
    compare("allreduce before the death", taken<float>(a, COUNT, "allreduce"), want,
            sum_bound<float>());
  }
  mlfab_last_error(fabric, &error);
  if (code != MLFAB_ERR_PEER_DEAD || error.rank != victim)
    wrong("a worker was killed: %s: %s\n", mlfab_error_name(code), error.text);
  workers--;
  shared_allreduces();
  pushes_and_pulls();
}

/* ---- times */

static double now_s() {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double seconds_of(const std::function<void()> &call) {
  std::vector<double> runs;
  call(), call(); /* pins what it needs, and maps it */
  for (int i = 0; i < 9; i++) {
    double began = now_s();
    call();
    runs.push_back(now_s() - began);
  }
  std::sort(runs.begin(), runs.end());
  return runs[4];
}

/* Twenty copies in a row, so that launching them does not count. */
static double copy_seconds(void *to, const void *from, size_t bytes) {
  return seconds_of([&] {
           for (int i = 0; i < 20; i++) {
             if (gpu.used)
               must(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, gpu.stream), "copying");
             else
               memcpy(to, from, bytes);
           }
           if (gpu.used) must(cudaStreamSynchronize(gpu.stream), "waiting for copies");
         }) /
         20;
}

/* share: of what it may reach; 0: it is not compared. There are goals for devices only. */
static void row(const char *name, double seconds, double bytes, double share, double goal) {
  if (rank != 0) return;
  printf("%-44s %10.3f ms %8.2f GB/s", name, seconds * 1e3, bytes / seconds * 1e-9);
  if (share > 0) printf("   share %6.3f", share);
  if (share > 0 && gpu.used) printf("   goal %.1f   %s", goal, share >= goal ? "ok" : "MISSED");
  printf("\n");
}

/* Worker 0 pushes and copies, while the others wait; then all reduce. A push is compared with the slower of the same push from memory
 * of the host (the link, and the server) and the copy to pinned memory (PCIe). An allreduce moves, over all devices, what
 * mlfab.h says: each of P workers reads (2P - 1) / P arrays and writes one; its rate is compared with that of the copy. */
static void times(uint64_t bytes) {
  const uint64_t n = bytes / sizeof(float);
  const double size = (double)bytes;
  float *at[3] = {(float *)allocate(DEVICE, bytes), (float *)allocate(DEVICE, bytes),
                  (float *)allocate(PINNED, bytes)};
  std::vector<float> host(n);
  mlfab_buf bufs[2] = {{0, 0, host.data(), n}, {0, 0, at[0], n}};
  for (int i = 0; i < 3; i++) {
    if (gpu.used)
      must(cudaMemsetAsync(at[i], 0, bytes, gpu.stream), "clearing");
    else
      memset(at[i], 0, bytes);
  }
  well(mlfab_tensor_add(fabric, 0, MLFAB_F32, n), "tensor_add");
  well(mlfab_model_start(fabric, NULL, NULL, 0), "model_start");
  double copy = 0;
  if (rank == 0) {
    copy = copy_seconds(at[1], at[0], bytes);
    double down = copy_seconds(at[2], at[0], bytes), pushes[2];
    for (int i = 0; i < 2; i++)
      pushes[i] = seconds_of([&] { well(mlfab_push(fabric, &bufs[i], 1, NULL, NULL), "push"); });
    row("copy, device to device", copy, 2 * size, 0, 0);
    row("copy, device to pinned memory", down, size, 0, 0);
    row("push from memory of the host", pushes[0], size, 0, 0);
    row("push from device memory, staged", pushes[1], size, std::max(down, pushes[0]) / pushes[1],
        0.9);
  }
  well(mlfab_barrier(fabric, NULL), "barrier");
  double reduce =
      seconds_of([&] { well(mlfab_allreduce(fabric, at[0], n, MLFAB_F32, NULL), "allreduce"); });
  row("allreduce of device memory, staged", reduce, size, 0, 0);
  const bool shared = share();
  reduce = seconds_of(
      [&] { well(mlfab_allreduce(fabric, at[0], n, MLFAB_F32, NULL), "allreduce, shared"); });
  double moved = (3 * workers - 1) * size;
  if (gpu.used && shared)
    row("allreduce from device to device: bytes moved", reduce, moved,
        moved / reduce / (2 * size / copy), 0.8);
  well(mlfab_finish(fabric, 0), "finish");
}

/* ---- processes */

/* Worker 0 tells how the case ended at all workers. */
static int play(int number, const char *name, void (*run)()) {
  failures = 0;
  run();
  double all = failures;
  well(mlfab_allreduce(fabric, &all, 1, MLFAB_F64, NULL), "the end of a case");
  if (rank == 0) printf("%sok %d - %s\n", all > 0 ? "not " : "", number, name);
  return failures > 0;
}

static int work(bool killing, uint64_t bytes) {
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_error error = {};
  int failed = 0;
  mlfab_rank(fabric, &rank, &workers, NULL);
  const uint64_t staging = bytes ? 0 : 64 << 20; /* overlaps copies of a 64th, and of more */
  gpu.used = gpu_found("memory of the host only");
  if (gpu.used) {
    must(cudaSetDevice(rank % gpu.devices), "choosing a device");
    must(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking), "making a stream");
    if (mlfab_gpu_attach(fabric, MLFAB_GPU_CURRENT, gpu.stream, staging, &error)) {
      fprintf(stderr, "gpu_fabric: %s\n", error.text);
      exit(1);
    }
    printf("memory of device %d\n", rank % gpu.devices);
  }
  if (bytes) return times(bytes), 0;
  well(mlfab_model_options_from_env(&options, &error), "options");
  sgd = options.optimizer == MLFAB_OPTIMIZER_SGD;
  options.consistency.size = sizeof options.consistency;
  options.consistency.kind = MLFAB_SYNC_BSP;
  options.deterministic = 1;
  options.slices = 2; /* one for each tensor */
  for (uint32_t t = 0; t < 2; t++)
    well(mlfab_tensor_add(fabric, t, MLFAB_F32, COUNT), "tensor_add");
  well(mlfab_model_start(fabric, &options, NULL, 0), "model_start");
  if (rank == 0) printf("1..%d\n", killing ? 4 : 3);
  failed += play(1, "pushes and pulls of every kind of memory", pushes_and_pulls);
  failed += play(2, "allreduces of every kind of memory", allreduces);
  failed += play(3, "allreduces from device to device", shared_allreduces);
  if (killing) failed += play(4, "one worker is killed, and the others go on", one_is_killed);
  well(mlfab_finish(fabric, 0), "finish");
  return failed > 0;
}

/* Server 0 has its model on the device. */
static int serve(mlfab_config *config) {
  mlfab_error error = {};
  if (config->rank == 0 && gpu_found("the model is on the host")) {
    if (mlfab_gpu_config_set(config, MLFAB_GPU_CURRENT, &error)) {
      fprintf(stderr, "gpu_fabric: %s\n", error.text);
      return 1;
    }
    printf("the model is on the device\n");
  }
  if (mlfab_open(config, &fabric, &error)) {
    fprintf(stderr, "gpu_fabric: %s\n", error.text);
    return 1;
  }
  well(mlfab_serve(fabric, 0), "serve");
  mlfab_close(&fabric);
  mlfab_gpu_config_clear(config);
  return 0;
}

int main(int argc, char **argv) {
  mlfab_config config;
  mlfab_error error = {};
  const bool killing = argc == 2 && !strcmp(argv[1], "--kill");
  const uint64_t megabytes =
      argc == 3 && !strcmp(argv[1], "--time") ? strtoull(argv[2], NULL, 10) : 0;
  if (argc > 1 && !killing && (megabytes == 0 || megabytes > 200)) {
    fprintf(stderr, "usage: gpu_fabric [--kill | --time MB]\n");
    return 2;
  }
  setvbuf(stdout, NULL, _IOLBF, 0);
  mlfab_config_init(&config);
  int code = mlfab_config_from_env(&config, &error);
  if (!code && config.roles == MLFAB_ROLE_SERVER) return serve(&config);
  if (!code) code = mlfab_open(&config, &fabric, &error);
  if (code) {
    fprintf(stderr, "gpu_fabric: %s\n", error.text);
    return 1;
  }
  code = work(killing, megabytes * 1000000);
  mlfab_close(&fabric); /* before the memory goes, which other workers' devices may have mapped */
  return code;
}
