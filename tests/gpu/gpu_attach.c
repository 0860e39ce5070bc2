/* gpu_attach.c - mlfab_gpu_attach without a GPU: gpu/src/device.cu over a CUDA runtime that is played. The functions of that
 * runtime below are those that the file calls; behind them is the played device of ../unit/played.h.
 *
 * It needs CUDA's headers, and no library of CUDA's. What only a GPU can show is in gpu_kernels.cu. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "../unit/played_model.h"
#include "../unit/world.h"
#include "core/api/context.h"
#include "gpu/mlfab_gpu.h"
#include "../testing.h"

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
  int peers;   /* device 0 can read memory of device 1 */
  int pools;   /* device memory has no handle */
  int opened;  /* mappings */
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
  const played_op op = {.kind = PLAYED_COPIES, .to = to, .from = from, .bytes = bytes};
  assert_true(kind == cudaMemcpyDefault || kind == cudaMemcpyDeviceToHost);
  if (error == cudaSuccess) played_add(cuda.device, queue_of(stream), op);
  return error;
}

/* --- memory of other processes --- */

/* The GPU of a number; the other process of this runtime has the same, or another one. */
static void gpu_of(int device, unsigned char *uuid) { memset(uuid, 0x40 + device, 16); }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  memset(properties, 0, sizeof *properties);
  gpu_of(device, (unsigned char *)&properties->uuid);
  return called();
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  assert_int_equal(device, 0);
  *can = peer == 1 && cuda.peers;
  return called();
}

/* The driver's function: an allocation is a stretch of 4,096 bytes. */
enum { ALLOCATION = 4096 };
static int address_range(unsigned long long *base, size_t *bytes, unsigned long long at) {
  const unsigned long long from = (uintptr_t)cuda.device->at;
  if (at < from || at >= from + PLAYED_BYTES) return 1;
  *base = from + (at - from) / ALLOCATION * ALLOCATION;
  *bytes = ALLOCATION;
  return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *how) {
  cudaError_t error = called();
  assert_string_equal(symbol, "cuMemGetAddressRange");
  assert_true(version >= 3020 && flags == cudaEnableDefault);
  int (*found)(unsigned long long *, size_t *, unsigned long long) = address_range;
  memcpy(function, &found, sizeof found);
  *how = error == cudaSuccess ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return error;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *at) {
  cudaError_t error = called();
  assert_true(((uint8_t *)at - cuda.device->at) % ALLOCATION == 0);
  memset(handle, 0x11, sizeof *handle);
  memcpy(handle, &at, sizeof at);
  return error != cudaSuccess ? error : ended(cuda.pools ? cudaErrorInvalidValue : cudaSuccess);
}
cudaError_t cudaIpcOpenMemHandle(void **at, cudaIpcMemHandle_t handle, unsigned flags) {
  cudaError_t error = called();
  assert_int_equal(flags, cudaIpcMemLazyEnablePeerAccess);
  if (error == cudaSuccess) memcpy(at, &handle, sizeof *at);
  cuda.opened += error == cudaSuccess;
  return error;
}
cudaError_t cudaIpcCloseMemHandle(void *at) {
  (void)at;
  cuda.opened--;
  return called();
}
int mlfab_gpu_reduce(int op, int dtype, void *to, const void *const *in, uint32_t k, uint64_t n,
                     void *stream) {
  cudaError_t error = called();
  assert_int_equal(queue_of(stream), MLFAB_DEVICE_FROM_HOST);
  return error != cudaSuccess ? (int)error : played_reduce(cuda.device, op, dtype, to, in, k, n);
}

/* --- for a server's model --- */

cudaError_t cudaMalloc(void **memory, size_t bytes) {
  cudaError_t error = called();
  return error == cudaSuccess ? (cudaError_t)played_take(cuda.device, bytes, memory) : error;
}
cudaError_t cudaFree(void *memory) {
  played_give(cuda.device, memory);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  cudaError_t error = called();
  assert_int_equal(value, 0);
  assert_int_equal(queue_of(stream), MLFAB_DEVICE_FROM_HOST);
  return error == cudaSuccess ? (cudaError_t)played_zero(cuda.device, to, bytes) : error;
}

/* In the place of gpu/src/kernels.cu. */
int mlfab_gpu_add(int dtype, void *dst, const void *w, const void *u, double scale, uint64_t n,
                  mlfab_gpu_stats *stats, void *scratch, void *stream) {
  cudaError_t error = called();
  assert_true(!stats && !scratch);
  assert_int_equal(queue_of(stream), MLFAB_DEVICE_FROM_HOST);
  return error == cudaSuccess ? played_sum(cuda.device, dtype, dst, w, u, scale, n) : (int)error;
}
int mlfab_gpu_apply(const mlfab_gpu_rule *rule, int dtype, void *dst, const void *w, const void *u,
                    void *s0, void *s1, uint64_t n, uint64_t *tag, uint64_t version, void *stream) {
  cudaError_t error = called();
  assert_true(!tag && version == 0);
  assert_int_equal(queue_of(stream), MLFAB_DEVICE_FROM_HOST);
  return error == cudaSuccess ? played_rule(cuda.device, rule, dtype, dst, w, u, s0, s1, n)
                              : (int)error;
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
TEST(test_memories) {
  static int64_t made[COUNT], got[COUNT], host[COUNT];
  world w;
  void *pinned = NULL;
  mlfab_error error;
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

TEST(test_refused) {
  world w;
  mlfab_error error;
  mlfab_request request;
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
  REFUSED(2, caller(), MLFAB_ERR_ARGUMENT, "gpu: there is no such device");
  REFUSED(-2, caller(), MLFAB_ERR_ARGUMENT, "there is no such device");
  REFUSED(0, (void *)(uintptr_t)STRANGE, MLFAB_ERR_ARGUMENT, "cudaErrorInvalidResourceHandle");
  REFUSED(0, (void *)cudaStreamPerThread, MLFAB_ERR_ARGUMENT, "another stream in each thread");
  cuda.count_fails = cudaErrorNoDevice;
  REFUSED(0, caller(), MLFAB_ERR_DEVICE, "gpu: no GPU: cudaErrorNoDevice: as it was played");
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
TEST(test_failures) {
  int64_t made[4] = {1, 2, 3, 4}, got[4];
  uint32_t failures = 0;
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

/* What the table says of memory that other processes may read. */
TEST(test_sharing) {
  world w;
  mlfab_error error;
  unsigned char own[MLFAB_DEVICE_ID], again[MLFAB_DEVICE_ID], handle[MLFAB_DEVICE_HANDLE];
  uint64_t offset = 0;
  void *mapped = NULL;
  int shared = 0;
  uint64_t bytes = 0;
  begin(&w);
  OK(w.node[0], mlfab_gpu_attach(w.node[0], 0, caller(), 0, &error));
  void *self;
  const mlfab_device *table = w.node[0]->stager->device(w.node[0], &self);
  assert_int_equal(table->identify(self, own), 0);
  assert_int_equal(table->identify(self, again), 0);
  assert_memory_equal(own, again, sizeof own);
  assert_int_equal(table->reaches(self, own), 0); /* this process: CUDA does not map that */
  memset(own + 16, 1, sizeof own - 16);
  assert_int_equal(table->reaches(self, own), 1);
  gpu_of(1, own);
  assert_int_equal(table->reaches(self, own), 0);
  cuda.peers = 1;
  assert_int_equal(table->reaches(self, own), 1);
  gpu_of(2, own); /* this process does not see it */
  assert_int_equal(table->reaches(self, own), 0);
  uint8_t *at = cuda.device->at + 2 * ALLOCATION + 96;
  assert_int_equal(table->share(self, at, ALLOCATION - 96, handle, &offset), 0);
  assert_int_equal(offset, 96);
  assert_int_equal(table->share(self, at, ALLOCATION - 95, handle, &offset), cudaErrorInvalidValue);
  assert_int_equal(table->map(self, handle, &mapped, &bytes), 0);
  assert_int_equal(bytes, ALLOCATION);
  assert_ptr_equal((uint8_t *)mapped + offset, at);
  assert_int_equal(cuda.opened, 1);
  table->unmap(self, mapped);
  assert_int_equal(cuda.opened, 0);
  cuda.pools = 1;
  assert_int_equal(table->share(self, at, 8, handle, &offset), cudaErrorInvalidValue);
  assert_int_equal(cuda.last, cudaSuccess);
  cuda.pools = 0;
  /* A worker alone shares with nobody, and reduces on its device. */
  int64_t made[COUNT], got[COUNT], *data = played_alloc(cuda.device, sizeof made);
  for (int i = 0; i < COUNT; i++) made[i] = i * i;
  played_produce(cuda.device, data, made, sizeof made);
  OK(w.node[0], mlfab_device_share(w.node[0], 64, 0, &shared));
  assert_int_equal(shared, 1);
  OK(w.node[0], mlfab_allreduce(w.node[0], data, COUNT, MLFAB_I64, NULL));
  assert_int_equal(cuda.device->reduced, 1);
  played_read(cuda.device, got, data, sizeof got);
  assert_memory_equal(got, made, sizeof made);
  assert_int_equal(cuda.wrong_current, 0);
  end(&w);
}

/* Each of its calls of the runtime fails in turn: an error number, nothing is left behind, and the next call works. */
TEST(test_sharing_failures) {
  world w;
  mlfab_error error;
  unsigned char id[MLFAB_DEVICE_ID], handle[MLFAB_DEVICE_HANDLE];
  uint64_t offset = 0;
  uint32_t failures = 0;
  uint64_t bytes = 0;
  begin(&w);
  OK(w.node[0], mlfab_gpu_attach(w.node[0], 0, caller(), 0, &error));
  void *self;
  const mlfab_device *table = w.node[0]->stager->device(w.node[0], &self);
  uint8_t *at = cuda.device->at;
  for (uint32_t n = 1; n <= 8; n++) {
    void *mapped = NULL;
    cuda.fails = cudaErrorIllegalAddress;
#define FAILING(call) (cuda.calls = 0, cuda.fails_at = n, (call))
    int how = FAILING(table->identify(self, id));
    failures += how != 0;
    cuda.fails_at = 0;
    assert_int_equal(table->identify(self, id), 0);
    memset(id + 16, 1, sizeof id - 16);
    assert_true(FAILING(table->reaches(self, id)) >= 0);
    how = FAILING(table->share(self, at, 64, handle, &offset));
    failures += how != 0;
    cuda.fails_at = 0;
    assert_int_equal(table->share(self, at, 64, handle, &offset), 0);
    how = FAILING(table->map(self, handle, &mapped, &bytes));
    failures += how != 0;
    cuda.fails_at = 0;
    if (how) assert_int_equal(table->map(self, handle, &mapped, &bytes), 0);
    table->unmap(self, mapped);
    assert_int_equal(cuda.opened, 0);
    assert_int_equal(cuda.last, cudaSuccess);
  }
  assert_true(failures >= 5);
  end(&w);
}

/* A world of one whose model is on the GPU. Returns the code of the first call that failed. */
static int train(world *w, mlfab_config *config, float *got) {
  float u[COUNT];
  mlfab_error error;
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  const mlfab_buf all = {1, 0, got, COUNT};
  for (int i = 0; i < COUNT; i++) u[i] = got[i] = (float)(i % 7);
  options.optimizer = MLFAB_OPTIMIZER_ADAM;
  world_init(w, 1, 1, 0);
  world_network(w, 1);
  config->timeout_ns = 20ull * WORLD_S;
  snprintf(config->coordinator, sizeof config->coordinator, "sim:0");
  int code = mlfab_sim_open(w->sim, 0, config, &w->node[0], &error);
  if (code) {
    assert_non_null(strstr(error.text, "cudaErrorIllegalAddress"));
    return code;
  }
  code = mlfab_tensor_add(w->node[0], 1, MLFAB_F32, COUNT);
  if (!code) code = mlfab_model_start(w->node[0], &options, &all, 1);
  for (int step = 0; step < 3 && !code; step++) {
    const mlfab_buf update = {1, 0, u, COUNT};
    code = mlfab_push(w->node[0], &update, 1, NULL, NULL);
    if (!code) code = mlfab_pull(w->node[0], &all, 1, NULL, NULL);
  }
  return code;
}

/* A model on the GPU gets the bits of one on the host; each call of the runtime fails in turn, which ends the server. */
TEST(test_model) {
  float want[COUNT], got[COUNT];
  uint32_t failures = 0, poor = 0, n = 0;
  for (int over = 0; !over; n++) {
    world w = {.nodes = 0};
    mlfab_error error;
    mlfab_config config;
    mlfab_config_init(&config);
    memset(&cuda, 0, sizeof cuda);
    cuda.devices = 1;
    cuda.device = played_model_begin(1);
    cuda.fails_at = n;
    cuda.fails = cudaErrorIllegalAddress;
    int code = n > 0 ? mlfab_gpu_config_set(&config, 0, &error) : 0;
    if (!code) {
      code = train(&w, &config, got);
      poor += code == MLFAB_ERR_MEMORY; /* it was memory that was asked for */
      if (code && code != MLFAB_ERR_MEMORY && w.node[0])
        said(w.node[0], MLFAB_ERR_DEVICE, "cudaErrorIllegalAddress");
      over = n > 0 && cuda.calls < n;
      cuda.fails_at = 0;
      world_close(&w);
      mlfab_gpu_config_clear(&config);
    }
    if (n == 0) memcpy(want, got, sizeof want);
    if (!code) assert_memory_equal(want, got, sizeof want);
    failures += code != 0;
    assert_int_equal(cuda.streams, 0);
    assert_int_equal(cuda.events, 0);
    cuda.device->lost |=
        code != 0 &&
        code != MLFAB_ERR_MEMORY; /* memory of a device that has failed is not given back */
    played_model_end(cuda.device);
  }
  assert_true(failures > 20 && poor < failures / 2);
}

TESTS(NULL, NULL)
