/* gpu_attach.c - mlfab_gpu_attach without a GPU: gpu/src/device.cu over a CUDA runtime that is played. The functions of that
 * runtime below are those that the file calls; behind them is the played device of ../unit/played.h.
 *
 * It needs CUDA's headers, and no library of CUDA's. What only a GPU can show is in gpu_kernels.cu. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "../unit/played.h"
#include "../unit/world.h"
#include "gpu/mlfab_gpu.h"

#include <cuda_runtime_api.h>

/* --- a CUDA runtime --- */

enum { CALLER = 0x10, FIRST_WAY = 0x20, SECOND_WAY = 0x30, STRANGE = 0x40 };

static struct {
  played *device;
  int devices, current, wrong_current; /* wrong_current: calls that found another device current */
  cudaError_t last, count_fails, fails;
  uint32_t calls, fails_at; /* the n-th call that can fail, fails */
  uint32_t streams, events, ways;
  int managed; /* device memory is managed */
  int other;   /* device memory is device 1's */
} cuda;

static cudaError_t ended(cudaError_t error) {
  if (error != cudaSuccess) cuda.last = error;
  return error;
}

/* What a call that can fail returns. */
static cudaError_t called(void) {
  cuda.wrong_current += cuda.current != 0;
  return ended(cuda.fails_at && ++cuda.calls == cuda.fails_at ? cuda.fails : cudaSuccess);
}

const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorNoDevice                ? "cudaErrorNoDevice"
         : error == cudaErrorIllegalAddress        ? "cudaErrorIllegalAddress"
         : error == cudaErrorMemoryAllocation      ? "cudaErrorMemoryAllocation"
         : error == cudaErrorInvalidDevice         ? "cudaErrorInvalidDevice"
         : error == cudaErrorInvalidResourceHandle ? "cudaErrorInvalidResourceHandle"
                                                   : "cudaErrorOther";
}
const char *cudaGetErrorString(cudaError_t error) {
  (void)error;
  return "as it was played";
}
cudaError_t cudaGetLastError(void) {
  cudaError_t last = cuda.last;
  cuda.last = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError(void) { return cuda.last; }
cudaError_t cudaGetDeviceCount(int *count) {
  *count = cuda.devices;
  return ended(cuda.count_fails);
}
cudaError_t cudaGetDevice(int *device) {
  *device = cuda.current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  cuda.current = device;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *at) {
  memset(a, 0, sizeof *a);
  if (cuda.device && played_is_here(cuda.device, at)) {
    a->type = cuda.managed ? cudaMemoryTypeManaged : cudaMemoryTypeDevice;
    a->device = cuda.other;
  } else if (cuda.device) {
    char text[64];
    int where = played_where(cuda.device, at, 1, text, sizeof text);
    a->type = where == MLFAB_MEMORY_PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  }
  return called();
}

cudaError_t cudaHostAlloc(void **memory, size_t bytes, unsigned flags) {
  cudaError_t error = called();
  assert_int_equal(flags, cudaHostAllocPortable);
  if (error == cudaSuccess) assert_int_equal(played_pin(cuda.device, bytes, memory), 0);
  return error;
}
cudaError_t cudaFreeHost(void *memory) {
  played_unpin(cuda.device, memory);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
  cudaError_t error = called();
  assert_int_equal(flags, cudaStreamNonBlocking);
  if (error != cudaSuccess) return error;
  *stream = (cudaStream_t)(uintptr_t)(cuda.ways++ % 2 ? SECOND_WAY : FIRST_WAY);
  cuda.streams++;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  (void)stream;
  cuda.streams--;
  return cudaSuccess;
}

static uint32_t queue_of(cudaStream_t stream) {
  uintptr_t at = (uintptr_t)stream;
  assert_true(at == CALLER || at == FIRST_WAY || at == SECOND_WAY);
  return at == CALLER ? PLAYED_STREAM : at == FIRST_WAY ? 0 : 1;
}

/* An event can be recorded again; who waits for what it marked before goes on waiting for that. */
struct CUevent_st {
  void *mark;
};

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  cudaError_t error = called();
  assert_int_equal(flags, cudaEventDisableTiming);
  if (error != cudaSuccess) return error;
  *event = calloc(1, sizeof **event);
  cuda.events++;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  cudaError_t error =
      (uintptr_t)stream == STRANGE ? ended(cudaErrorInvalidResourceHandle) : called();
  if (error != cudaSuccess) return error;
  if (event->mark) played_drop(cuda.device, event->mark);
  assert_int_equal(played_record(cuda.device, queue_of(stream), &event->mark), 0);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  cudaError_t error = called();
  if (error != cudaSuccess) return error;
  int reached = played_poll(cuda.device, event->mark);
  return ended(reached > 0   ? cudaSuccess
               : reached < 0 ? cudaErrorIllegalAddress
                             : cudaErrorNotReady);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  if (event->mark) played_drop(cuda.device, event->mark);
  free(event);
  cuda.events--;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  cudaError_t error = called();
  (void)flags;
  if (error == cudaSuccess) played_waits(cuda.device, queue_of(stream), event->mark);
  return error;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  cudaError_t error = called();
  const played_op op = {PLAYED_COPIES, 0, 0, to, from, bytes, 0};
  assert_int_equal(kind, cudaMemcpyDefault);
  if (error == cudaSuccess) played_add(cuda.device, queue_of(stream), op);
  return error;
}

/* --- the tests --- */

enum { COUNT = 500 };

static void begin(world *w) {
  memset(&cuda, 0, sizeof cuda);
  cuda.devices = 2;
  cuda.device = played_begin(1);
  world_init(w, 1, 1, 1);
  w->config.timeout_ns = 20ull * WORLD_S;
  world_open(w, 1);
}

static void end(world *w) {
  world_close(w);
  assert_int_equal(cuda.streams, 0);
  assert_int_equal(cuda.device->pinned_now, 0);
  played_end(cuda.device);
  cuda.device = NULL;
}

static void *caller(void) { return (void *)(uintptr_t)CALLER; }

static void said(mlfab *node, int code, const char *text) {
  mlfab_error error;
  assert_int_equal(mlfab_last_error(node, &error), 0);
  if (error.code != code || !strstr(error.text, text))
    fail_msg("last error is %s \"%s\", not \"%s\"", mlfab_error_name(error.code), error.text, text);
}

/* Sums of a worker that is alone come back as they were, through the device's memory of every kind; the caller's device and
 * last error stay what they are. */
static void test_memories(void **state) {
  static int64_t made[COUNT], got[COUNT], host[COUNT];
  world w;
  void *pinned = NULL;
  mlfab_error error;
  (void)state;
  begin(&w);
  OK(w.node[0], mlfab_gpu_attach(w.node[0], 0, caller(), 0, &error));
  assert_int_equal(played_pin(cuda.device, sizeof made, &pinned), 0);
  int64_t *at = played_alloc(cuda.device, sizeof made);
  for (int k = 0; k < 60; k++) {
    for (int i = 0; i < COUNT; i++) made[i] = i * (k + 1);
    cuda.managed = k % 5 == 0;
    cuda.current = k % 2;
    cuda.last = cudaSuccess;
    int64_t *data = k % 3 == 0 ? host : k % 3 == 1 ? (int64_t *)pinned : at;
    if (data == at)
      played_produce(cuda.device, at, made, sizeof made);
    else
      memcpy(data, made, sizeof made);
    OK(w.node[0], mlfab_allreduce(w.node[0], data, COUNT, MLFAB_I64, NULL));
    if (data == at)
      played_read(cuda.device, got, at, sizeof got);
    else
      memcpy(got, data, sizeof got);
    assert_memory_equal(got, made, sizeof made);
    assert_int_equal(cuda.current, k % 2);
    assert_int_equal(cuda.last, cudaSuccess);
  }
  assert_int_equal(cuda.wrong_current, 0);
  assert_true(cuda.events < 8); /* they are used again */
  played_unpin(cuda.device, pinned);
  end(&w);
  assert_int_equal(cuda.events, 0);
}

static void test_refused(void **state) {
  world w;
  mlfab_error error;
  mlfab_request request;
  (void)state;
  begin(&w);
  mlfab *node = w.node[0];
  mlfab_vec vec = {played_alloc(cuda.device, 64), 4};
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_I64, NULL, &request), MLFAB_ERR_ARGUMENT);
  said(node, MLFAB_ERR_ARGUMENT, "this context has no device: call mlfab_gpu_attach");
#define REFUSED(device, stream, wanted, words)                                               \
  do {                                                                                       \
    memset(&error, 0, sizeof error);                                                         \
    assert_int_equal(mlfab_gpu_attach(node, device, stream, 0, &error), wanted);             \
    assert_int_equal(error.code, wanted);                                                    \
    if (!strstr(error.text, words)) fail_msg("\"%s\" instead of \"%s\"", error.text, words); \
    assert_int_equal(mlfab_gpu_attach(node, device, stream, 0, NULL), wanted);               \
    assert_int_equal(cuda.streams, 0);                                                       \
    assert_int_equal(cuda.last, cudaSuccess);                                                \
  } while (0)
  REFUSED(2, caller(), MLFAB_ERR_ARGUMENT, "gpu_attach: there is no such device");
  REFUSED(-2, caller(), MLFAB_ERR_ARGUMENT, "there is no such device");
  REFUSED(0, (void *)(uintptr_t)STRANGE, MLFAB_ERR_ARGUMENT, "cudaErrorInvalidResourceHandle");
  REFUSED(0, (void *)cudaStreamPerThread, MLFAB_ERR_ARGUMENT, "another stream in each thread");
  cuda.count_fails = cudaErrorNoDevice;
  REFUSED(0, caller(), MLFAB_ERR_DEVICE, "gpu_attach: no GPU: cudaErrorNoDevice: as it was played");
  cuda.count_fails = cudaSuccess;
  OK(node, mlfab_gpu_attach(node, MLFAB_GPU_CURRENT, caller(), 0, &error));
  assert_int_equal(mlfab_gpu_attach(node, 0, caller(), 0, &error), MLFAB_ERR_STATE);
  assert_non_null(strstr(error.text, "CUDA is attached already"));
  assert_int_equal(cuda.streams, 2);
  cuda.other = 1;
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_I64, NULL, &request), MLFAB_ERR_ARGUMENT);
  said(node, MLFAB_ERR_ARGUMENT, "it is memory of device 1, and device 0 is attached");
  cuda.other = 0;
  vec.data = cuda.device->at + PLAYED_BYTES - 8;
  EXPECT(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_I64, NULL, &request), MLFAB_ERR_ARGUMENT);
  said(node, MLFAB_ERR_ARGUMENT, "it ends behind the memory in which it begins");
  end(&w);
}

/* Every call of the runtime fails in turn: the call of mlfab that it belongs to says so in CUDA's words, and the next one
 * is right. */
static void test_failures(void **state) {
  int64_t made[4] = {1, 2, 3, 4}, got[4];
  uint32_t failures = 0;
  (void)state;
  for (uint32_t n = 1; n <= 40; n++) {
    world w;
    mlfab_error error;
    begin(&w);
    mlfab *node = w.node[0];
    int64_t *at = played_alloc(cuda.device, sizeof made);
    cuda.fails_at = n;
    cuda.fails = cudaErrorIllegalAddress;
    int code = mlfab_gpu_attach(node, 0, caller(), 0, &error);
    if (code) {
      failures++;
      assert_non_null(strstr(error.text, "cudaErrorIllegalAddress"));
      assert_int_equal(cuda.streams, 0);
      OK(node, mlfab_gpu_attach(node, 0, caller(), 0, &error));
    }
    for (int k = 0; k < 3; k++) {
      played_produce(cuda.device, at, made, sizeof made);
      code = mlfab_allreduce(node, at, 4, MLFAB_I64, NULL);
      failures += code != 0;
      if (code) said(node, MLFAB_ERR_DEVICE, "cudaErrorIllegalAddress: as it was played");
      played_finish(cuda.device);
      played_read(cuda.device, got, at, sizeof got);
      assert_memory_equal(got, made, sizeof made);
    }
    played_finish(cuda.device);
    cuda.fails_at = 0;
    world_close(&w);
    played_end(cuda.device);
  }
  assert_true(failures > 12);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_memories),
                                     cmocka_unit_test(test_refused),
                                     cmocka_unit_test(test_failures)};
  return cmocka_run_group_tests_name("attaching a GPU", tests, NULL, NULL);
}
