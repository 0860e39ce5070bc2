/* mlfab_gpu.h - buffers of a CUDA device in mlfab's calls, and arithmetic on device memory.
 *
 * Optional: copy the folder gpu/ beside mlfab.h, mlfab_device.h and mlfab.c, and compile mlfab_gpu.cu with nvcc (gpu/README.md):
 *
 *    nvcc -O3 -std=c++17 -arch=sm_80 -c gpu/mlfab_gpu.cu        and link with -lcudart
 *
 *    mlfab_gpu_attach(fabric, MLFAB_GPU_CURRENT, stream, 0, &error);    // once, after mlfab_open
 *    mlfab_push(fabric, &gradient_on_the_device, 1, &options, NULL);    // as from memory of the host
 *
 * After mlfab_gpu_attach, the calls that mlfab_device.h lists take memory of that device, pinned
 * and managed memory, and memory of the host. They tell these apart by the address (cudaPointerGetAttributes). The
 * header describes the order relative to the stream, the failures, and the costs. Before, they refuse device memory
 * with ARGUMENT. If all workers are processes of one host that attach a device, mlfab_device_share makes their
 * collectives go from device to device (CUDA IPC; CUDA 11.3 or newer).
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_GPU_H
#define MLFAB_GPU_H

#include "../mlfab_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The device that is current in the calling thread. */
#define MLFAB_GPU_CURRENT (-1)

/* Attaches a device to a context of a worker, once. stream: a cudaStream_t of this device, or NULL: the legacy default
 * stream; it must exist until the context is closed. staging_bytes: limit of the pinned memory at a time, 0: 256 MiB.
 * It makes two streams, for copies to and from the host. error_p may be NULL. Errors: DEVICE (GPU or driver missing;
 * with CUDA's text), ARGUMENT (no such device; a stream of another device; cudaStreamPerThread), and those of
 * mlfab_device_attach. */
MLFAB_API int mlfab_gpu_attach(mlfab *ctx, int device, void *stream, uint64_t staging_bytes,
                               mlfab_error *error_p);

/* Puts a server's model into device memory (mlfab_device.h): sets config->device and config->device_self, before
 * mlfab_open. It makes two streams, and pins up to 4 MiB. mlfab_gpu_config_clear frees them, after mlfab_close. For a
 * configuration without such a device it does nothing. A configuration that it has set serves one open context at a
 * time. Each server decides for itself; with a replica each of its two processes does. Errors: DEVICE, ARGUMENT (no
 * such device), CONFIG (config->size), STATE (config->device is set), MEMORY. */
MLFAB_API int mlfab_gpu_config_set(mlfab_config *config, int device, mlfab_error *error_p);
MLFAB_API void mlfab_gpu_config_clear(mlfab_config *config);

/* ------------------------------------------------------------------------------------------------
 * Arithmetic on arrays in device memory: sums, updates, update rules, conversions, and the selection of the gradient
 * filter, for trainers that add up or select before they push. They need no context.
 *
 * Every function queues its work on `stream` (a cudaStream_t; NULL: the default stream) and returns before it is done.
 * It returns 0 or the number of a CUDA error. cudaErrorInvalidValue: an argument is out of range.
 * cudaErrorMisalignedAddress: an array is not aligned to its element. Others: a launch failed. The first two leave
 * nothing queued. It launches at most three kernels, and neither allocates nor waits. All pointers except those said to
 * be host pointers are addresses that the device can use. With n = 0 arrays may be NULL; results (stats, a count, a
 * tag) are still written.
 *
 * Bits: the results equal those of the CPU's kernels, element by element, whatever the alignment and the compiler's
 * flags. Two exceptions: a NaN may have other bits, and norms differ by rounding, because they are added in another
 * order. The order depends on the type and n only. So equal arrays have equal norms, bit for bit, on every device and
 * in every run. Conversions (mlfab_gpu_convert) give the CPU's bits for NaN, too.
 *
 * Speed: if all arrays are aligned to 16 bytes, they are read and written 16 bytes at a time, otherwise element by
 * element.
 *
 * Scratch: device memory of the caller, aligned to 16 bytes, with any content. Two calls may use the same scratch only
 * if one follows the other in a stream. */

/* Arrays that one sum may read. */
#define MLFAB_GPU_SUM_MOST 16u

/* Results of a pass over an array; in device memory. */
typedef struct mlfab_gpu_stats {
  double norm2;    /* sum of squares, in double */
  uint32_t finite; /* 1: no element was infinite or NaN; I64: always */
  uint32_t spare;  /* 0 */
} mlfab_gpu_stats;

/* Returns the bytes of scratch of a call with stats: the same for every n. */
MLFAB_API uint64_t mlfab_gpu_stats_scratch(void);

/* dst = weight[0] * in[0] + weight[1] * in[1] + ..., from left to right, in one pass; each product and each sum is
 * rounded once. in and weight are host arrays of k; k is 1 to 16. weight NULL: a plain sum, which is
 * mlfab__kernel_combine_many with MLFAB_OP_SUM. F32, F16 and BF16 are computed in float32 with (float)weight; F16 and
 * BF16 are rounded once at the end, overflowing to infinity. F64 is computed in double. I64 is computed modulo 2^64,
 * with the integer part of a weight, which must fit int64. dst may be one of `in`; no other overlap. dst NULL: only
 * stats. stats, or NULL: of the stored result. scratch: only with stats. Two launches with stats, else one. */
MLFAB_API int mlfab_gpu_sum(int dtype, void *dst, const void *const *in, const double *weight,
                            uint32_t k, uint64_t n, mlfab_gpu_stats *stats, void *scratch,
                            void *stream);

/* dst = in[0] op in[1] op ..., from left to right: mlfab__kernel_combine_many, and with MLFAB_OP_MEAN then
 * mlfab__kernel_divide by k. in is a host array of k; k is 1 to 16. MEAN excludes I64. dst may be one of `in`; no other
 * overlap. One launch. */
MLFAB_API int mlfab_gpu_reduce(int op, int dtype, void *dst, const void *const *in, uint32_t k,
                               uint64_t n, void *stream);

/* dst = w + scale * u, like mlfab__kernel_add. w NULL: dst = scale * u. dst NULL: only stats. dst may be w or u; no
 * other overlap. stats, or NULL: norm2 of u, finite of scale * u. F32, F64, I64. */
MLFAB_API int mlfab_gpu_add(int dtype, void *dst, const void *w, const void *u, double scale,
                            uint64_t n, mlfab_gpu_stats *stats, void *scratch, void *stream);

/* An update rule and the parameters of one commit (mlfab.h). */
typedef mlfab_device_rule mlfab_gpu_rule;

/* dst = the step of the rule (a host pointer) applied to w: mlfab__optimizer_apply. The states s0 and s1, as many as
 * the rule has, are updated in place. dst may be w or u; the states must not overlap anything. F32 and F64; I64 only
 * with SGD without decay. tag, or NULL: it becomes `version` when the step is done, in the order of the stream. */
MLFAB_API int mlfab_gpu_apply(const mlfab_gpu_rule *rule, int dtype, void *dst, const void *w,
                              const void *u, void *s0, void *s1, uint64_t n, uint64_t *tag,
                              uint64_t version, void *stream);

/* Converts F32 to F16 or BF16, or one of these to F32. saturate 1: as values of packets are rounded
 * (mlfab__half_store): the largest number replaces infinity, NaN and every overflow. 0: as elements of collectives are
 * rounded: infinity and NaN stay, and numbers overflow to infinity. It has no effect on conversions to F32. No
 * overlap. */
MLFAB_API int mlfab_gpu_convert(int to_dtype, void *to, int from_dtype, const void *from,
                                int saturate, uint64_t n, void *stream);

/* Results of a selection; in device memory. */
typedef struct mlfab_gpu_compacted {
  uint64_t kept; /* number of elements to be sent; 0 if an element is not finite */
  uint64_t
      saturated; /* of these, elements beyond the largest value of `half`; 0 if an element is not finite */
  uint32_t finite; /* 0: an element of a is infinite or NaN */
  uint32_t done;   /* 1: carried out; 0: too little room, or an element is not finite */
} mlfab_gpu_compacted;

/* Returns the bytes of scratch of mlfab_gpu_compact for n elements: about n / 8, and 160 KiB. */
MLFAB_API uint64_t mlfab_gpu_compact_scratch(uint64_t n);

/* TDF's gradient filter without draws (mlfab__filter_mark and mlfab__filter_emit with p = 1), for a = g + residual. It
 * selects each element of a that is at least tau, and not zero, also after rounding by `half`. These go to indices and
 * values, in ascending order; the values have the type of a, or 16 bits as `half` says (MLFAB_HALF_*). The residual
 * becomes a, with 0 or the excess over the largest value at the places of sent elements. g NULL: residual holds a. F32
 * and F64; n is at most 2^32.
 *
 * result is always written. If more than `room` elements are kept, or an element of a is not finite, the residual,
 * indices and values stay as they were.
 *
 * to: place of the new residual: `residual` itself, or another array, whose contents are unspecified if nothing was
 * done; the caller exchanges the two. Traffic for an element of F32, at 1 % density. g NULL, in place: 4 bytes read and
 * about 1 more. With another array: 12 and about 1 (g, residual and `to` once each). In place with g: 20, because g and
 * residual are read again after it is known that there is room. Three launches. */
MLFAB_API int mlfab_gpu_compact(int dtype, const void *g, const void *residual, void *to,
                                uint64_t n, double tau, int half, uint32_t *indices, void *values,
                                uint64_t room, mlfab_gpu_compacted *result, void *scratch,
                                void *stream);

/* dst[indices[i]] += scale * values[i]; each product and each sum is rounded once. The n indices must be distinct; this
 * is not checked. value_half: MLFAB_HALF_NONE: values have the type of dst; else they have 16 bits, and dst is F32 or
 * F64. F32, F64, I64. */
MLFAB_API int mlfab_gpu_scatter_add(int dtype, void *dst, const uint32_t *indices,
                                    const void *values, int value_half, uint64_t n, double scale,
                                    void *stream);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_GPU_H */
