/* kernels.cu - launches the kernels of elements.h: the functions of mlfab_gpu.h.
 *
 * All arithmetic that decides a bit of a result is in elements.h, because tests reach it there without a GPU.
 *
 * Invariants: the grid of a launch is the number of parts of an array, at most ELEMENTS_PARTS, and a block handles one
 * part. All arguments travel by value. Functions do not wait, allocate, or query the device. A sum over a whole array
 * ends in a second launch of one block, instead of in the last block of the first. The order of launches in a stream
 * replaces fences, and counters that must start at zero. */
#include "../mlfab_gpu.h"

#include "elements.h"

#include <cuda_runtime.h>

static_assert(ELEMENTS_INVALID == cudaErrorInvalidValue, "numbers of errors");
static_assert(ELEMENTS_MISALIGNED == cudaErrorMisalignedAddress, "numbers of errors");
static_assert(ELEMENTS_THREADS == ELEMENTS_WARP * ELEMENTS_WARPS, "geometry");
static_assert(ELEMENTS_SCAN_THREADS == ELEMENTS_WARP * ELEMENTS_WARP, "geometry");
static_assert(ELEMENTS_SCAN_THREADS * ELEMENTS_SCAN_EACH == ELEMENTS_PARTS, "geometry");
static_assert(ELEMENTS_COMPACT_WORDS == ELEMENTS_THREADS, "geometry");

/* Does nothing for a grid of 0 blocks. Reports this launch's error and no other. */
template <typename ARGS>
static int kernels_launch(void (*kernel)(ARGS), uint32_t blocks, uint32_t threads, const ARGS &args,
                          void *stream) {
  void *list[] = {const_cast<ARGS *>(&args)};
  if (blocks == 0) return 0;
  return (int)cudaLaunchKernel((const void *)kernel, dim3(blocks), dim3(threads), list, 0,
                               (cudaStream_t)stream);
}

/* ---- norms and finiteness ---- */

static __device__ __forceinline__ void kernels_tally(const elements_tally &tally, double *norm2_p,
                                                     uint32_t *bad_p) {
  __shared__ elements_tally_shared shared;
  elements_tally_warp(&shared, threadIdx.x / ELEMENTS_WARP, &tally);
  __syncthreads();
  if (threadIdx.x < ELEMENTS_WARP) elements_tally_block(&shared, norm2_p, bad_p);
}

struct kernels_parts {
  elements_sums sums;
  mlfab_gpu_stats *stats;
  uint32_t parts;
};

static __global__ void __launch_bounds__(ELEMENTS_THREADS)
    kernels_stats(const __grid_constant__ kernels_parts args) {
  double norm2 = 0.0;
  uint32_t bad = 0;
  kernels_tally(elements_tally_parts(args.sums, args.parts, threadIdx.x), &norm2, &bad);
  if (threadIdx.x == 0) elements_stats_set(args.stats, norm2, bad);
}

static int kernels_stats_end(elements_sums sums, uint32_t parts, mlfab_gpu_stats *stats,
                             void *stream) {
  kernels_parts args = {sums, stats, parts};
  return stats ? kernels_launch(kernels_stats, 1, ELEMENTS_THREADS, args, stream) : 0;
}

extern "C" uint64_t mlfab_gpu_stats_scratch(void) { return ELEMENTS_STATS_BYTES; }

/* ---- sums ---- */

/* As many blocks as the registers allow, given the inputs that are loading. */
template <int DTYPE, uint32_t K>
static __global__ void __launch_bounds__(ELEMENTS_THREADS, K > 8 ? 2 : 4)
    kernels_sum(const __grid_constant__ elements_sum sum) {
  elements_tally tally = elements_sum_thread(DTYPE, K, &sum, blockIdx.x, threadIdx.x);
  if (sum.sums.norm2) kernels_tally(tally, &sum.sums.norm2[blockIdx.x], &sum.sums.bad[blockIdx.x]);
}

typedef void (*kernels_sum_kernel)(elements_sum);

template <int DTYPE>
static kernels_sum_kernel kernels_sum_of(uint32_t k) {
  static const kernels_sum_kernel list[MLFAB_GPU_SUM_MOST] = {
      kernels_sum<DTYPE, 1>,  kernels_sum<DTYPE, 2>,  kernels_sum<DTYPE, 3>,
      kernels_sum<DTYPE, 4>,  kernels_sum<DTYPE, 5>,  kernels_sum<DTYPE, 6>,
      kernels_sum<DTYPE, 7>,  kernels_sum<DTYPE, 8>,  kernels_sum<DTYPE, 9>,
      kernels_sum<DTYPE, 10>, kernels_sum<DTYPE, 11>, kernels_sum<DTYPE, 12>,
      kernels_sum<DTYPE, 13>, kernels_sum<DTYPE, 14>, kernels_sum<DTYPE, 15>,
      kernels_sum<DTYPE, 16>};
  return list[k - 1];
}

extern "C" int mlfab_gpu_sum(int dtype, void *dst, const void *const *in, const double *weight,
                             uint32_t k, uint64_t n, mlfab_gpu_stats *stats, void *scratch,
                             void *stream) {
  elements_sum sum;
  int code = elements_sum_of(&sum, dtype, dst, in, weight, k, n, stats, scratch);
  if (code) return code;
  kernels_sum_kernel kernel = dtype == MLFAB_F32   ? kernels_sum_of<MLFAB_F32>(k)
                              : dtype == MLFAB_F64 ? kernels_sum_of<MLFAB_F64>(k)
                              : dtype == MLFAB_I64 ? kernels_sum_of<MLFAB_I64>(k)
                              : dtype == MLFAB_F16 ? kernels_sum_of<MLFAB_F16>(k)
                                                   : kernels_sum_of<MLFAB_BF16>(k);
  code = kernels_launch(kernel, sum.cut.parts, ELEMENTS_THREADS, sum, stream);
  return code ? code : kernels_stats_end(sum.sums, sum.cut.parts, stats, stream);
}

/* ---- reductions ---- */

template <int DTYPE>
static __global__ void __launch_bounds__(ELEMENTS_THREADS, 4)
    kernels_reduce(const __grid_constant__ elements_reduce reduce) {
  elements_reduce_thread(DTYPE, &reduce, blockIdx.x, threadIdx.x);
}

extern "C" int mlfab_gpu_reduce(int op, int dtype, void *dst, const void *const *in, uint32_t k,
                                uint64_t n, void *stream) {
  elements_reduce reduce;
  int code = elements_reduce_of(&reduce, op, dtype, dst, in, k, n);
  if (code) return code;
  if (op == MLFAB_OP_SUM) return mlfab_gpu_sum(dtype, dst, in, NULL, k, n, NULL, NULL, stream);
  return kernels_launch(dtype == MLFAB_F32   ? kernels_reduce<MLFAB_F32>
                        : dtype == MLFAB_F64 ? kernels_reduce<MLFAB_F64>
                        : dtype == MLFAB_I64 ? kernels_reduce<MLFAB_I64>
                        : dtype == MLFAB_F16 ? kernels_reduce<MLFAB_F16>
                                             : kernels_reduce<MLFAB_BF16>,
                        reduce.cut.parts, ELEMENTS_THREADS, reduce, stream);
}

/* ---- updates ---- */

template <int DTYPE>
static __global__ void __launch_bounds__(ELEMENTS_THREADS, 4)
    kernels_update(const __grid_constant__ elements_update update) {
  elements_tally tally = elements_update_thread(DTYPE, &update, blockIdx.x, threadIdx.x);
  if (update.sums.norm2)
    kernels_tally(tally, &update.sums.norm2[blockIdx.x], &update.sums.bad[blockIdx.x]);
}

extern "C" int mlfab_gpu_add(int dtype, void *dst, const void *w, const void *u, double scale,
                             uint64_t n, mlfab_gpu_stats *stats, void *scratch, void *stream) {
  elements_update update;
  int code = elements_update_of(&update, dtype, dst, w, u, scale, n, stats, scratch);
  if (code) return code;
  code = kernels_launch(dtype == MLFAB_F32   ? kernels_update<MLFAB_F32>
                        : dtype == MLFAB_F64 ? kernels_update<MLFAB_F64>
                                             : kernels_update<MLFAB_I64>,
                        update.cut.parts, ELEMENTS_THREADS, update, stream);
  return code ? code : kernels_stats_end(update.sums, update.cut.parts, stats, stream);
}

/* ---- update rules ---- */

template <int DTYPE, uint32_t RULE>
static __global__ void __launch_bounds__(ELEMENTS_THREADS, 4)
    kernels_step(const __grid_constant__ elements_step step) {
  elements_step_thread(DTYPE, RULE, &step, blockIdx.x, threadIdx.x);
}

struct kernels_tag_args {
  uint64_t *tag, version;
};

static __global__ void kernels_tag(const __grid_constant__ kernels_tag_args args) {
  *args.tag = args.version;
}

typedef void (*kernels_step_kernel)(elements_step);

template <int DTYPE>
static kernels_step_kernel kernels_step_of(uint32_t rule) {
  return rule == ELEMENTS_PLAIN      ? kernels_step<DTYPE, ELEMENTS_PLAIN>
         : rule == ELEMENTS_MOMENTUM ? kernels_step<DTYPE, ELEMENTS_MOMENTUM>
         : rule == ELEMENTS_NESTEROV ? kernels_step<DTYPE, ELEMENTS_NESTEROV>
         : rule == ELEMENTS_LION     ? kernels_step<DTYPE, ELEMENTS_LION>
         : rule == ELEMENTS_ROOT     ? kernels_step<DTYPE, ELEMENTS_ROOT>
                                     : kernels_step<DTYPE, ELEMENTS_ADAM>;
}

/* Is it a rule without its own kernel? Only SGD works on int64. */
static int kernels_adds(const mlfab_gpu_rule *rule, int dtype) {
  return dtype == MLFAB_I64 && rule && rule->kind == MLFAB_OPTIMIZER_SGD &&
         !(rule->weight_decay > 0.0) && rule->t >= 1;
}

extern "C" int mlfab_gpu_apply(const mlfab_gpu_rule *rule, int dtype, void *dst, const void *w,
                               const void *u, void *s0, void *s1, uint64_t n, uint64_t *tag,
                               uint64_t version, void *stream) {
  kernels_tag_args args = {tag, version};
  elements_step step;
  int code;
  if ((uintptr_t)tag % sizeof *tag != 0) return ELEMENTS_MISALIGNED;
  if (kernels_adds(rule, dtype)) {
    if (n > 0 && (!dst || !w)) return ELEMENTS_INVALID;
    code = n > 0 ? mlfab_gpu_add(dtype, dst, w, u, rule->scale, n, NULL, NULL, stream) : 0;
  } else {
    code = elements_step_of(&step, rule, dtype, dst, w, u, s0, s1, n);
    if (code) return code;
    code = kernels_launch(dtype == MLFAB_F32 ? kernels_step_of<MLFAB_F32>(step.rule)
                                             : kernels_step_of<MLFAB_F64>(step.rule),
                          step.cut.parts, ELEMENTS_THREADS, step, stream);
  }
  if (code || tag == NULL) return code;
  return kernels_launch(kernels_tag, 1, 1, args, stream);
}

/* ---- conversions ---- */

template <int TO, int FROM, int SATURATE>
static __global__ void __launch_bounds__(ELEMENTS_THREADS, 4)
    kernels_convert(const __grid_constant__ elements_convert convert) {
  elements_convert_thread(TO, FROM, SATURATE, &convert, blockIdx.x, threadIdx.x);
}

extern "C" int mlfab_gpu_convert(int to_dtype, void *to, int from_dtype, const void *from,
                                 int saturate, uint64_t n, void *stream) {
  elements_convert convert;
  void (*kernel)(elements_convert);
  int code = elements_convert_of(&convert, to_dtype, to, from_dtype, from, n);
  if (code) return code;
  if (to_dtype == MLFAB_F16)
    kernel = saturate ? kernels_convert<MLFAB_F16, MLFAB_F32, 1>
                      : kernels_convert<MLFAB_F16, MLFAB_F32, 0>;
  else if (to_dtype == MLFAB_BF16)
    kernel = saturate ? kernels_convert<MLFAB_BF16, MLFAB_F32, 1>
                      : kernels_convert<MLFAB_BF16, MLFAB_F32, 0>;
  else if (from_dtype == MLFAB_F16)
    kernel = kernels_convert<MLFAB_F32, MLFAB_F16, 0>;
  else
    kernel = kernels_convert<MLFAB_F32, MLFAB_BF16, 0>;
  return kernels_launch(kernel, convert.cut.parts, ELEMENTS_THREADS, convert, stream);
}

/* ---- compaction ---- */

template <int DTYPE>
static __global__ void __launch_bounds__(ELEMENTS_THREADS, 4)
    kernels_mark(const __grid_constant__ elements_compact c) {
  __shared__ elements_marks_shared shared;
  elements_marks seen;
  elements_mark_warp(DTYPE, &c, blockIdx.x, threadIdx.x / ELEMENTS_WARP, &seen);
  elements_marks_warp(&shared, threadIdx.x / ELEMENTS_WARP, &seen);
  __syncthreads();
  if (threadIdx.x < ELEMENTS_WARP) elements_marks_block(&shared, &c, blockIdx.x);
}

static __global__ void __launch_bounds__(ELEMENTS_SCAN_THREADS)
    kernels_scan(const __grid_constant__ elements_compact c) {
  __shared__ elements_scan_shared shared;
  elements_scan scan;
  elements_scan_warp(&c, &shared, threadIdx.x / ELEMENTS_WARP, &scan);
  __syncthreads();
  if (threadIdx.x < ELEMENTS_WARP) elements_scan_block(&c, &shared);
  __syncthreads();
  elements_scan_end(&c, &shared, threadIdx.x / ELEMENTS_WARP, &scan);
}

/* Two barriers per tile are enough: between the last reads of a tile and the next writes to the same shared memory lies
 * the first barrier of the next tile. */
template <int DTYPE, int SPARSE>
static __device__ __forceinline__ void kernels_emit_part(const elements_compact &c,
                                                         elements_emit_shared &shared) {
  const uint32_t warp = threadIdx.x / ELEMENTS_WARP;
  uint64_t k = c.before[blockIdx.x];
  for (uint64_t tile = elements_first(&c.cut, blockIdx.x); tile < elements_end(&c.cut, blockIdx.x);
       tile++) {
    elements_emit emit;
    elements_emit_scan(&c, &shared, tile, warp, &emit);
    __syncthreads();
    uint32_t all = elements_emit_places(SPARSE, &shared, warp, &emit);
    __syncthreads();
    if (SPARSE)
      elements_emit_sparse(DTYPE, &c, &shared, tile, threadIdx.x, all, k);
    else
      elements_emit_dense(DTYPE, &c, &shared, tile, threadIdx.x, k);
    k += all;
  }
}

template <int DTYPE>
static __global__ void __launch_bounds__(ELEMENTS_THREADS, 4)
    kernels_emit(const __grid_constant__ elements_compact c) {
  __shared__ elements_emit_shared shared;
  if (!*c.verdict) return;
  if (elements_sparse(&c, blockIdx.x))
    kernels_emit_part<DTYPE, 1>(c, shared);
  else
    kernels_emit_part<DTYPE, 0>(c, shared);
}

extern "C" uint64_t mlfab_gpu_compact_scratch(uint64_t n) { return elements_compact_bytes(n); }

extern "C" int mlfab_gpu_compact(int dtype, const void *g, const void *residual, void *to,
                                 uint64_t n, double tau, int half, uint32_t *indices, void *values,
                                 uint64_t room, mlfab_gpu_compacted *result, void *scratch,
                                 void *stream) {
  elements_compact c;
  int code = elements_compact_of(&c, dtype, g, residual, to, n, tau, half, indices, values, room,
                                 result, scratch);
  if (code) return code;
  code = kernels_launch(dtype == MLFAB_F32 ? kernels_mark<MLFAB_F32> : kernels_mark<MLFAB_F64>,
                        c.cut.parts, ELEMENTS_THREADS, c, stream);
  if (!code) code = kernels_launch(kernels_scan, 1, ELEMENTS_SCAN_THREADS, c, stream);
  if (code) return code;
  return kernels_launch(dtype == MLFAB_F32 ? kernels_emit<MLFAB_F32> : kernels_emit<MLFAB_F64>,
                        c.cut.parts, ELEMENTS_THREADS, c, stream);
}

/* ---- scatter ---- */

template <int DTYPE>
static __global__ void __launch_bounds__(ELEMENTS_THREADS)
    kernels_scatter(const __grid_constant__ elements_scatter scatter) {
  elements_scatter_thread(DTYPE, &scatter, blockIdx.x, threadIdx.x);
}

extern "C" int mlfab_gpu_scatter_add(int dtype, void *dst, const uint32_t *indices,
                                     const void *values, int value_half, uint64_t n, double scale,
                                     void *stream) {
  elements_scatter scatter;
  int code = elements_scatter_of(&scatter, dtype, dst, indices, values, value_half, n, scale);
  if (code) return code;
  return kernels_launch(dtype == MLFAB_F32   ? kernels_scatter<MLFAB_F32>
                        : dtype == MLFAB_F64 ? kernels_scatter<MLFAB_F64>
                                             : kernels_scatter<MLFAB_I64>,
                        scatter.cut.parts, ELEMENTS_THREADS, scatter, stream);
}
