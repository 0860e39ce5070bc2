/* gpu_bench.cu - times the kernels of gpu/src beside a copy in device memory and beside cuBLAS. Prints a table;
 * without a GPU it says so and exits with 77.
 *
 *     gpu_bench [MIB]      size of an array, by default 256: several times the cache of a GPU
 *
 * A row: bytes that have to be moved at least, counted once, but where a call has to read twice; the median time of a call over repeated batches in a
 * stream, without the host's part; bytes / time; the same as a share of the copy (or of a pass that only reads),
 * measured in this run; the goal for it, and whether it was reached; and the time of the same work done by a peer, with a goal for
 * the sum of 8. Without a goal: the copy and the read themselves, and the scattered additions, whose places are far apart.
 * Arrays are of float32 unless the name says otherwise. The last line counts the goals that were missed, which is no failure.
 *
 * A second table has registers, local and shared memory of every kernel, and how much of a multiprocessor's threads fit. The kernels
 * are known in one file only, so they are launched once more, on few elements, and noted on the way to CUDA's runtime: the
 * linker gives this file the calls of cudaLaunchKernel (--wrap). */
#include "gpu/mlfab_gpu.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <functional>
#include <vector>

#define CUDA(call)                                                                               \
  do {                                                                                           \
    cudaError_t error_ = (call);                                                                 \
    if (error_ != cudaSuccess) {                                                                 \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(error_)); \
      exit(1);                                                                                   \
    }                                                                                            \
  } while (0)

#define DONE(call)                                                                \
  do {                                                                            \
    int code_ = (int)(call);                                                      \
    if (code_ != 0) {                                                             \
      fprintf(stderr, "%s:%d: %s: error %d\n", __FILE__, __LINE__, #call, code_); \
      exit(1);                                                                    \
    }                                                                             \
  } while (0)

enum { ARRAYS = 17, BATCHES = 9 };

static cudaStream_t stream;
static cudaEvent_t from, to;

/* Median of the seconds of a call, in batches of about 20 ms. */
static double seconds_of(const std::function<void()> &call) {
  std::vector<float> batch;
  float ms = 0;
  int repeat = 4;
  for (int i = 0; i < 3; i++) call();
  for (;;) {
    CUDA(cudaEventRecord(from, stream));
    for (int i = 0; i < repeat; i++) call();
    CUDA(cudaEventRecord(to, stream));
    CUDA(cudaEventSynchronize(to));
    CUDA(cudaEventElapsedTime(&ms, from, to));
    if (ms > 10 || repeat > 10000) break;
    repeat *= 2;
  }
  for (int b = 0; b < BATCHES; b++) {
    CUDA(cudaEventRecord(from, stream));
    for (int i = 0; i < repeat; i++) call();
    CUDA(cudaEventRecord(to, stream));
    CUDA(cudaEventSynchronize(to));
    CUDA(cudaEventElapsedTime(&ms, from, to));
    batch.push_back(ms / (float)repeat);
  }
  std::sort(batch.begin(), batch.end());
  return (double)batch[BATCHES / 2] * 1e-3;
}

/* The sum of an array, so that nothing of the reads is left out: the most that a pass that only reads can have. */
static __global__ void __launch_bounds__(512)
    bench_read(const uint4 *data, uint64_t n, uint32_t *out) {
  uint32_t seen = 0;
  uint64_t stride = (uint64_t)gridDim.x * blockDim.x,
           i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    uint4 a = data[i], b = data[i + stride], c = data[i + 2 * stride], d = data[i + 3 * stride];
    seen ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^
            d.z ^ d.w;
  }
  for (; i < n; i += stride) {
    uint4 a = data[i];
    seen ^= a.x ^ a.y ^ a.z ^ a.w;
  }
  if (seen == 0x9e3779b9u) *out = seen;
}

static __global__ void bench_fill(float *data, uint64_t n, uint32_t seed) {
  uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
  for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride) {
    uint64_t x = (i + seed * UINT64_C(0x100000001)) * UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    data[i] = (float)(int32_t)(x >> 32) * 0x1p-31f;
  }
}

static double copy_rate, read_rate; /* bytes a second */
static int goals, missed;

/* Of memory-bound kernels, of the selection at 1 %, of the sum of 8 beside cuBLAS; none. */
static const double BOUND = 0.9, SELECTS = 0.8, FASTER = 3.0, NONE = 0.0;

static const char *reached(double is, double goal) {
  goals++;
  missed += !(is >= goal);
  return is >= goal ? "ok" : "MISSED";
}

/* share: of `of`. peer, or NULL: its name; its seconds; the goal for how much faster it is. */
static void row(const char *name, double bytes, double seconds, double of, double goal,
                const char *peer, double peer_seconds, double faster) {
  const double share = bytes / seconds / of;
  printf("%-34s %9.1f %8.0f %7.3f", name, seconds * 1e6, bytes / seconds * 1e-9, share);
  if (goal > 0)
    printf(" %5.2f %-6s", goal, reached(share, goal));
  else
    printf(" %5s %-6s", "", "");
  if (peer) printf("   %-22s %9.1f %6.2fx", peer, peer_seconds * 1e6, peer_seconds / seconds);
  if (faster > 0) printf(" %4.1fx %s", faster, reached(peer_seconds / seconds, faster));
  printf("\n");
  fflush(stdout);
}

/* ---- kernels ---- */

static struct { /* of the last call that was noted */
  const void *kernel[4];
  int threads[4], n;
} noted;

extern "C" cudaError_t __real_cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block,
                                               void **args, size_t shared, cudaStream_t on);
extern "C" cudaError_t __wrap_cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block,
                                               void **args, size_t shared, cudaStream_t on);
extern "C" cudaError_t __wrap_cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block,
                                               void **args, size_t shared, cudaStream_t on) {
  if (noted.n < 4) {
    noted.kernel[noted.n] = kernel;
    noted.threads[noted.n++] = (int)block.x;
  }
  return __real_cudaLaunchKernel(kernel, grid, block, args, shared, on);
}

/* A row for each kernel that a call launches. */
static void kernels_of(const char *name, const cudaDeviceProp &device,
                       const std::function<int()> &call) {
  noted.n = 0;
  DONE(call());
  for (int i = 0; i < noted.n; i++) {
    cudaFuncAttributes a;
    int blocks = 0;
    char step[64] = "";
    CUDA(cudaFuncGetAttributes(&a, noted.kernel[i]));
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, noted.kernel[i], noted.threads[i],
                                                       0));
    if (noted.n > 1) snprintf(step, sizeof step, ", launch %d", i + 1);
    printf("%-26s%-10s %9d %7zu %7zu %8d %7d %6.0f %%\n", name, step, a.numRegs, a.localSizeBytes,
           a.sharedSizeBytes, noted.threads[i], blocks,
           100.0 * blocks * noted.threads[i] / device.maxThreadsPerMultiProcessor);
  }
}

/* All kernels, on arrays that have room for a few elements of any type. */
static void kernels(const cudaDeviceProp &device, float *const *array, mlfab_gpu_stats *stats,
                    mlfab_gpu_compacted *found, uint64_t *tag, void *scratch) {
  const uint64_t n = 1024;
  const void *in[16];
  char name[64];
  static const char *const types[] = {"float32", "float64", "int64", "float16", "bfloat16"};
  static const int dtypes[] = {MLFAB_F32, MLFAB_F64, MLFAB_I64, MLFAB_F16, MLFAB_BF16};
  static const struct {
    uint32_t kind;
    const char *name;
  } rules[] = {{MLFAB_OPTIMIZER_SGD, "SGD"},
               {MLFAB_OPTIMIZER_MOMENTUM, "momentum"},
               {MLFAB_OPTIMIZER_RMSPROP, "RMSprop"},
               {MLFAB_OPTIMIZER_ADAM, "Adam"}};
  for (int i = 0; i < 16; i++) in[i] = array[i];
  printf("\n%-36s %9s %7s %7s %8s %7s %8s\n", "kernels", "registers", "local", "shared", "threads",
         "blocks", "occupied");
  for (int t = 0; t < 5; t++) {
    for (uint32_t k = 1; k <= MLFAB_GPU_SUM_MOST; k++) {
      snprintf(name, sizeof name, "sum of %u, %s", k, types[t]);
      kernels_of(name, device, [&] {
        return mlfab_gpu_sum(dtypes[t], array[16], in, NULL, k, n, NULL, NULL, stream);
      });
    }
    snprintf(name, sizeof name, "largest, %s", types[t]);
    kernels_of(name, device, [&] {
      return mlfab_gpu_reduce(MLFAB_OP_MAX, dtypes[t], array[16], in, 2, n, stream);
    });
  }
  for (int t = 0; t < 3; t++) {
    snprintf(name, sizeof name, "w + scale u, %s", types[t]);
    kernels_of(name, device, [&] {
      return mlfab_gpu_add(dtypes[t], array[16], array[0], array[1], 1, n, NULL, NULL, stream);
    });
    snprintf(name, sizeof name, "scatter-add, %s", types[t]);
    CUDA(cudaMemsetAsync(array[12], 0, sizeof(uint32_t), stream)); /* one index: 0 */
    kernels_of(name, device, [&] {
      return mlfab_gpu_scatter_add(dtypes[t], array[16], (const uint32_t *)(void *)array[12],
                                   array[0], MLFAB_HALF_NONE, 1, 1, stream);
    });
  }
  kernels_of("norm, float32", device, [&] {
    return mlfab_gpu_sum(MLFAB_F32, NULL, in, NULL, 1, n, stats, scratch, stream);
  });
  for (int t = 0; t < 2; t++) {
    for (const auto &rule : rules) {
      mlfab_gpu_rule how = {rule.kind, 0, 0.9, 1.0, 0.9, 0.999, 1e-8, 0.0, -1e-6, 10, 0};
      snprintf(name, sizeof name, "%s, %s", rule.name, types[t]);
      kernels_of(name, device, [&] {
        return mlfab_gpu_apply(&how, dtypes[t], array[16], array[16], array[0], array[14],
                               array[15], n, tag, 1, stream);
      });
    }
    snprintf(name, sizeof name, "compact, %s", types[t]);
    kernels_of(name, device, [&] {
      return mlfab_gpu_compact(dtypes[t], NULL, array[10], array[10], n, 0.99, 0,
                               (uint32_t *)(void *)array[12], array[13], n, found, scratch, stream);
    });
  }
  for (int t = 3; t < 5; t++) {
    for (int saturate = 0; saturate < 2; saturate++) {
      snprintf(name, sizeof name, "to %s%s", types[t], saturate ? ", saturating" : "");
      kernels_of(name, device, [&] {
        return mlfab_gpu_convert(dtypes[t], array[16], MLFAB_F32, array[0], saturate, n, stream);
      });
    }
    snprintf(name, sizeof name, "from %s", types[t]);
    kernels_of(name, device, [&] {
      return mlfab_gpu_convert(MLFAB_F32, array[16], dtypes[t], array[0], 0, n, stream);
    });
  }
  CUDA(cudaStreamSynchronize(stream));
}

int main(int argc, char **argv) {
  int devices = 0;
  cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    printf("no GPU: %s\n", error != cudaSuccess ? cudaGetErrorString(error) : "no device");
    return 77;
  }
  uint64_t mib = argc > 1 ? strtoull(argv[1], NULL, 10) : 256;
  if (mib < 1 || mib > 4096) {
    fprintf(stderr, "%s [MIB]: 1 to 4096\n", argv[0]);
    return 2;
  }
  const uint64_t bytes = mib << 20, n = bytes / 4;
  cudaDeviceProp device;
  cublasHandle_t blas;
  CUDA(cudaGetDeviceProperties(&device, 0));
  CUDA(cudaStreamCreate(&stream));
  CUDA(cudaEventCreate(&from));
  CUDA(cudaEventCreate(&to));
  DONE(cublasCreate(&blas));
  DONE(cublasSetStream(blas, stream));
  DONE(cublasSetPointerMode(blas, CUBLAS_POINTER_MODE_DEVICE));

  float *array[ARRAYS], *norm, *ones;
  void *scratch, *compact_scratch;
  mlfab_gpu_stats *stats;
  mlfab_gpu_compacted *found;
  uint64_t *tag;
  uint32_t *sink;
  for (int i = 0; i < ARRAYS; i++) {
    CUDA(cudaMalloc((void **)&array[i], bytes));
    bench_fill<<<1024, 256, 0, stream>>>(array[i], n, (uint32_t)i + 1);
  }
  CUDA(cudaMalloc(&scratch, mlfab_gpu_stats_scratch()));
  CUDA(cudaMalloc(&compact_scratch, mlfab_gpu_compact_scratch(n)));
  CUDA(cudaMalloc((void **)&stats, sizeof *stats));
  CUDA(cudaMalloc((void **)&found, sizeof *found));
  CUDA(cudaMalloc((void **)&tag, sizeof *tag));
  CUDA(cudaMalloc((void **)&sink, sizeof *sink));
  CUDA(cudaMalloc((void **)&norm, sizeof *norm));
  CUDA(cudaMalloc((void **)&ones, sizeof *ones));
  const float one = 1.0f;
  CUDA(cudaMemcpy(ones, &one, sizeof one, cudaMemcpyHostToDevice));
  CUDA(cudaDeviceSynchronize());

  const double size = (double)bytes;
  double t = seconds_of(
      [&] { CUDA(cudaMemcpyAsync(array[16], array[0], bytes, cudaMemcpyDeviceToDevice, stream)); });
  copy_rate = 2 * size / t;
  double read_seconds = seconds_of([&] {
    bench_read<<<(unsigned)device.multiProcessorCount * 4, 512, 0, stream>>>(
        (const uint4 *)array[0], n / 4, sink);
  });
  read_rate = size / read_seconds;
  printf("%s, %d multiprocessors, %llu MiB an array, float32\n\n", device.name,
         device.multiProcessorCount, (unsigned long long)mib);
  printf("%-34s %9s %8s %7s %5s %-6s   %-22s %9s %7s\n", "", "us", "GB/s", "share", "goal", "",
         "peer", "us", "faster");
  row("copy", 2 * size, t, copy_rate, NONE, NULL, 0, NONE);
  row("read (share: of copy)", size, read_seconds, copy_rate, NONE, NULL, 0, NONE);

  /* ---- sums; cuBLAS copies the first and adds one after the other */
  const void *in[16];
  double weight[16];
  char name[64];
  for (int i = 0; i < 16; i++) in[i] = array[i], weight[i] = 1.0 / 16;
  for (uint32_t k = 2; k <= 16; k *= 2) {
    double peer = seconds_of([&] {
      CUDA(cudaMemcpyAsync(array[16], array[0], bytes, cudaMemcpyDeviceToDevice, stream));
      for (uint32_t i = 1; i < k; i++)
        DONE(cublasSaxpy(blas, (int)n, ones, array[i], 1, array[16], 1));
    });
    t = seconds_of(
        [&] { DONE(mlfab_gpu_sum(MLFAB_F32, array[16], in, NULL, k, n, NULL, NULL, stream)); });
    snprintf(name, sizeof name, "sum of %u", k);
    row(name, (k + 1) * size, t, copy_rate, BOUND, "copy, cublasSaxpy", peer,
        k == 8 ? FASTER : NONE);
    t = seconds_of([&] {
      DONE(mlfab_gpu_sum(MLFAB_F32, array[16], in, weight, k, n, stats, scratch, stream));
    });
    snprintf(name, sizeof name, "sum of %u, weights, norm", k);
    row(name, (k + 1) * size, t, copy_rate, BOUND, NULL, 0, NONE);
  }
  static const struct {
    int dtype;
    uint32_t bytes;
    const char *name;
  } others[] = {{MLFAB_F16, 2, "float16"},
                {MLFAB_BF16, 2, "bfloat16"},
                {MLFAB_F64, 8, "float64"},
                {MLFAB_I64, 8, "int64"}};
  for (const auto &other : others)
    for (uint32_t k = 2; k <= 8; k *= 4) {
      t = seconds_of([&] {
        DONE(mlfab_gpu_sum(other.dtype, array[16], in, NULL, k, bytes / other.bytes, NULL, NULL,
                           stream));
      });
      snprintf(name, sizeof name, "sum of %u, %s", k, other.name);
      row(name, (k + 1) * size, t, copy_rate, BOUND, NULL, 0, NONE);
    }
  {
    const void *off[2] = {(const char *)array[0] + 4, array[1]};
    t = seconds_of([&] {
      DONE(mlfab_gpu_sum(MLFAB_F32, array[16], off, NULL, 2, n - 1, NULL, NULL, stream));
    });
    row("sum of 2, one not aligned", 3 * size, t, copy_rate, BOUND, NULL, 0, NONE);
  }

  /* ---- norm, update */
  double peer = seconds_of([&] { DONE(cublasSnrm2(blas, (int)n, array[0], 1, norm)); });
  t = seconds_of(
      [&] { DONE(mlfab_gpu_sum(MLFAB_F32, NULL, in, NULL, 1, n, stats, scratch, stream)); });
  row("norm, finite (share: of read)", size, t, read_rate, BOUND, "cublasSnrm2", peer, NONE);
  peer = seconds_of([&] { DONE(cublasSaxpy(blas, (int)n, ones, array[0], 1, array[16], 1)); });
  t = seconds_of([&] {
    DONE(mlfab_gpu_add(MLFAB_F32, array[16], array[16], array[0], 1e-9, n, NULL, NULL, stream));
  });
  row("w + scale u", 3 * size, t, copy_rate, BOUND, "cublasSaxpy", peer, NONE);
  t = seconds_of([&] {
    DONE(mlfab_gpu_add(MLFAB_F32, array[16], array[16], array[0], 1e-9, n, stats, scratch, stream));
  });
  row("w + scale u, norm, finite", 3 * size, t, copy_rate, BOUND, NULL, 0, NONE);

  /* ---- update rules, in place */
  static const struct {
    uint32_t kind;
    int arrays; /* read and written */
    double decay;
    const char *name;
  } kinds[] = {{MLFAB_OPTIMIZER_SGD, 3, 0.0, "SGD, tag"},
               {MLFAB_OPTIMIZER_MOMENTUM, 5, 0.0, "momentum, tag"},
               {MLFAB_OPTIMIZER_ADAM, 7, 0.0, "Adam, tag"},
               {MLFAB_OPTIMIZER_ADAM, 7, 0.01, "AdamW, tag"},
               {MLFAB_OPTIMIZER_RMSPROP, 5, 0.0, "RMSprop, tag"},
               {MLFAB_OPTIMIZER_ADAGRAD, 5, 0.0, "AdaGrad, tag"}};
  for (const auto &kind : kinds) {
    mlfab_gpu_rule rule = {kind.kind, 0, 0.9, 1.0, 0.9, 0.999, 1e-8, kind.decay, -1e-6, 10, 0};
    CUDA(cudaMemsetAsync(array[14], 0, bytes, stream));
    CUDA(cudaMemsetAsync(array[15], 0, bytes, stream));
    t = seconds_of([&] {
      DONE(mlfab_gpu_apply(&rule, MLFAB_F32, array[16], array[16], array[0], array[14], array[15],
                           n, tag, 1, stream));
    });
    row(kind.name, kind.arrays * size, t, copy_rate, BOUND, NULL, 0, NONE);
  }

  /* ---- conversions */
  for (int half = MLFAB_F16; half <= MLFAB_BF16; half++) {
    const char *type = half == MLFAB_F16 ? "float16" : "bfloat16";
    for (int saturate = 0; saturate < 2; saturate++) {
      t = seconds_of([&] {
        DONE(mlfab_gpu_convert(half, array[16], MLFAB_F32, array[0], saturate, n, stream));
      });
      snprintf(name, sizeof name, "to %s%s", type, saturate ? ", saturating" : "");
      row(name, 1.5 * size, t, copy_rate, BOUND, NULL, 0, NONE);
    }
    t = seconds_of(
        [&] { DONE(mlfab_gpu_convert(MLFAB_F32, array[16], half, array[0], 0, n, stream)); });
    snprintf(name, sizeof name, "from %s", type);
    row(name, 1.5 * size, t, copy_rate, BOUND, NULL, 0, NONE);
  }

  /* ---- compaction: 1 % of uniform numbers in (-1, 1) are at least 0.99. What is sent leaves zeros, so each run
   * begins with a copy, whose time is measured alone and taken off. */
  uint32_t *indices = (uint32_t *)(void *)array[12];
  float *values = array[13];
  double copy_seconds = seconds_of(
      [&] { CUDA(cudaMemcpyAsync(array[10], array[0], bytes, cudaMemcpyDeviceToDevice, stream)); });
  mlfab_gpu_compacted counted;
  double kept = 0;
  t = seconds_of([&] {
        CUDA(cudaMemcpyAsync(array[10], array[0], bytes, cudaMemcpyDeviceToDevice, stream));
        DONE(mlfab_gpu_compact(MLFAB_F32, NULL, array[10], array[10], n, 0.99, 0, indices, values,
                               n, found, compact_scratch, stream));
      }) -
      copy_seconds;
  CUDA(cudaMemcpyAsync(&counted, found, sizeof counted, cudaMemcpyDeviceToHost, stream));
  CUDA(cudaStreamSynchronize(stream));
  kept = (double)counted.kept;
  printf("\ncompaction: %.3f %% are sent, done %u; share: of the pass that only reads\n",
         100 * kept / (double)n, counted.done);
  row("compact, a in residual", size + 12 * kept, t, read_rate, SELECTS, NULL, 0, NONE);
  /* g is zero and what is in array 0 is the residual, which stays. */
  CUDA(cudaMemsetAsync(array[11], 0, bytes, stream));
  t = seconds_of([&] {
    DONE(mlfab_gpu_compact(MLFAB_F32, array[11], array[0], array[10], n, 0.99, 0, indices, values,
                           n, found, compact_scratch, stream));
  });
  row("compact, g, to another array", 3 * size + 8 * kept, t, read_rate, SELECTS, NULL, 0, NONE);
  t = seconds_of([&] {
        CUDA(cudaMemcpyAsync(array[10], array[0], bytes, cudaMemcpyDeviceToDevice, stream));
        DONE(mlfab_gpu_compact(MLFAB_F32, array[11], array[10], array[10], n, 0.99, 0, indices,
                               values, n, found, compact_scratch, stream));
      }) -
      copy_seconds;
  /* Until it is known that there is room nothing may be written, and a has no other place: g and the residual are read twice. */
  row("compact, g, in place (reads twice)", 5 * size + 8 * kept, t, read_rate, SELECTS, NULL, 0,
      NONE);
  t = seconds_of([&] {
    DONE(mlfab_gpu_compact(MLFAB_F32, array[11], array[0], array[10], n, 0.99, MLFAB_HALF_F16,
                           indices, values, n, found, compact_scratch, stream));
  });
  row("the same, values of float16", 3 * size + 6 * kept, t, read_rate, SELECTS, NULL, 0, NONE);
  t = seconds_of([&] {
    DONE(mlfab_gpu_scatter_add(MLFAB_F32, array[16], indices, values, 0, (uint64_t)kept, 1e-9,
                               stream));
  });
  row("scatter-add (share: of copy)", 16 * kept, t, copy_rate, NONE, NULL, 0, NONE);
  printf("\n%d of %d goals were missed\n", missed, goals);
  kernels(device, array, stats, found, tag, compact_scratch);
  DONE(cublasDestroy(blas));
  return 0;
}
