/* device.cu - implements a CUDA device for mlfab_device.h: memory, copies and their order, and a server's model.
 *
 * It tells kinds of memory apart. It has pinned memory, copies on two own streams, one for each direction, and events
 * between them and the caller's stream. It maps memory of other processes (CUDA IPC), and reduces it. For a server it
 * runs kernels on the stream of copies from the host. Its callers decide about copies: core/api/staging.c and direct.c,
 * and core/device/resident.c.
 *
 * Invariants. (1) Functions here do not wait for a stream. Exceptions: mlfab_gpu_attach and close, and for a server
 * `stage` and `fetch`, at most DEVICE_WAIT_NS. (2) The caller's thread keeps its current device and its last error: a
 * function that changes the device sets it back. If there was no error before, it clears the error that a query leaves
 * behind. (3) All events have one kind, without timing, and are used again. (4) CUDA cannot map memory into the process
 * that owns it, so workers of one process do not reach each other.
 *
 * Source: CUDA C++ Programming Guide, asynchronous concurrent execution (streams, events), interprocess communication. */
#include "../mlfab_gpu.h"

#include <cuda_runtime.h>

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

namespace {

struct device_event {
  device_event *next;
  cudaEvent_t event;
};

enum { DEVICE_STAGES = 4 };
const long long DEVICE_WAIT_NS = 10000000000ll;

struct device_self {
  int device;
  cudaStream_t stream;  /* the caller's; a server has none */
  cudaStream_t ways[2]; /* by mlfab_device_way */
  device_event *unused;
  void *stages
      [DEVICE_STAGES]; /* for a server: pinned, on first use; event to await before refilling */
  void *staged[DEVICE_STAGES];
  unsigned stage; /* index of the next buffer */
  char text[160];
};

/* Makes a device current for a scope. */
class device_scope {
 public:
  explicit device_scope(int device) : before_(-1) {
    int now = -1;
    clean_ = cudaPeekAtLastError() == cudaSuccess;
    if (cudaGetDevice(&now) == cudaSuccess && now != device && cudaSetDevice(device) == cudaSuccess)
      before_ = now;
  }
  ~device_scope() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
    if (clean_) (void)cudaGetLastError();
  }
  device_scope(const device_scope &) = delete;
  device_scope &operator=(const device_scope &) = delete;

 private:
  int before_;
  bool clean_;
};

device_self *device_of(void *self) { return static_cast<device_self *>(self); }

const char *device_text(void *self, int number) {
  cudaError_t error = static_cast<cudaError_t>(number);
  device_self *d = device_of(self);
  snprintf(d->text, sizeof d->text, "%s: %s", cudaGetErrorName(error), cudaGetErrorString(error));
  return d->text;
}

/* Classifies one address: returns a value of enum mlfab_memory, or an error with its text. */
int device_where_one(device_self *d, const void *memory, char *text, size_t room) {
  cudaPointerAttributes a;
  cudaError_t error = cudaPointerGetAttributes(&a, memory);
  if (error == cudaErrorInvalidValue) return MLFAB_MEMORY_HOST; /* older drivers report this */
  if (error != cudaSuccess) {
    snprintf(text, room, "%s", device_text(d, error));
    return MLFAB_ERR_DEVICE;
  }
  switch (a.type) {
    case cudaMemoryTypeDevice:
      if (a.device == d->device) return MLFAB_MEMORY_DEVICE;
      snprintf(text, room, "it is memory of device %d, and device %d is attached", a.device,
               d->device);
      return MLFAB_ERR_ARGUMENT;
    case cudaMemoryTypeManaged:
      return MLFAB_MEMORY_DEVICE;
    case cudaMemoryTypeHost:
      return MLFAB_MEMORY_PINNED;
    default:
      return MLFAB_MEMORY_HOST;
  }
}

/* The last byte must have the same kind as the first. The bytes in between are not checked. */
int device_where(void *self, const void *memory, uint64_t bytes, char *text, size_t room) {
  device_self *d = device_of(self);
  device_scope scope(d->device);
  int first = device_where_one(d, memory, text, room);
  if (first <= MLFAB_MEMORY_HOST || bytes < 2) return first;
  int last = device_where_one(d, static_cast<const char *>(memory) + bytes - 1, text, room);
  if (last < 0 || last == first) return last;
  snprintf(text, room, "it ends behind the memory in which it begins");
  return MLFAB_ERR_ARGUMENT;
}

int device_pin(void *self, uint64_t bytes, void **memory_p) {
  device_scope scope(device_of(self)->device);
  return cudaHostAlloc(memory_p, bytes, cudaHostAllocPortable);
}

void device_unpin(void *self, void *memory) {
  device_scope scope(device_of(self)->device);
  (void)cudaFreeHost(memory);
}

int device_record(device_self *d, cudaStream_t stream, void **mark_p) {
  device_event *e = d->unused;
  cudaError_t error = cudaSuccess;
  if (e) {
    d->unused = e->next;
  } else {
    e = static_cast<device_event *>(malloc(sizeof *e));
    if (!e) return cudaErrorMemoryAllocation;
    error = cudaEventCreateWithFlags(&e->event, cudaEventDisableTiming);
    if (error != cudaSuccess) {
      free(e);
      return error;
    }
  }
  error = cudaEventRecord(e->event, stream);
  if (error != cudaSuccess) {
    e->next = d->unused;
    d->unused = e;
    return error;
  }
  *mark_p = e;
  return 0;
}

int device_fence(void *self, void **fence_p) {
  device_scope scope(device_of(self)->device);
  return device_record(device_of(self), device_of(self)->stream, fence_p);
}

int device_after(void *self, int way, void *fence) {
  device_scope scope(device_of(self)->device);
  return cudaStreamWaitEvent(device_of(self)->ways[way], static_cast<device_event *>(fence)->event,
                             0);
}

int device_copy(void *self, int way, void *to, const void *from, uint64_t bytes) {
  device_scope scope(device_of(self)->device);
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, device_of(self)->ways[way]);
}

int device_mark(void *self, int way, void **mark_p) {
  device_scope scope(device_of(self)->device);
  return device_record(device_of(self), device_of(self)->ways[way], mark_p);
}

int device_order(void *self, void *mark) {
  device_scope scope(device_of(self)->device);
  return cudaStreamWaitEvent(device_of(self)->stream, static_cast<device_event *>(mark)->event, 0);
}

int device_poll(void *self, void *mark) {
  device_scope scope(device_of(self)->device);
  cudaError_t error = cudaEventQuery(static_cast<device_event *>(mark)->event);
  if (error == cudaErrorNotReady) return 0;
  return error == cudaSuccess ? 1 : -static_cast<int>(error);
}

/* If a stream waits for the event, it waits for the work before the record, even if the event is recorded again. */
void device_drop(void *self, void *mark) {
  device_self *d = device_of(self);
  device_event *e = static_cast<device_event *>(mark);
  e->next = d->unused;
  d->unused = e;
}

/* --- a server's model --- */

int device_take(void *self, uint64_t bytes, void **memory_p) {
  device_scope scope(device_of(self)->device);
  return cudaMalloc(memory_p, bytes);
}

/* Waits for a mark, and drops it. */
int device_await(device_self *d, void **mark) {
  timespec began, now;
  cudaEvent_t event = static_cast<device_event *>(*mark)->event;
  cudaError_t error = cudaEventQuery(event);
  clock_gettime(CLOCK_MONOTONIC, &began);
  while (error == cudaErrorNotReady) {
    sched_yield();
    clock_gettime(CLOCK_MONOTONIC, &now);
    if ((now.tv_sec - began.tv_sec) * 1000000000ll + now.tv_nsec - began.tv_nsec > DEVICE_WAIT_NS)
      return cudaErrorTimeout;
    error = cudaEventQuery(event);
  }
  device_drop(d, *mark);
  *mark = nullptr;
  return error;
}

int device_stage(void *self, void **pinned_p) {
  device_self *d = device_of(self);
  device_scope scope(d->device);
  const unsigned next = d->stage, last = (next + DEVICE_STAGES - 1) % DEVICE_STAGES;
  int error = 0;
  if (d->stages[last] && !d->staged[last])
    error = device_record(d, d->ways[MLFAB_DEVICE_FROM_HOST], &d->staged[last]);
  if (!error && d->staged[next]) error = device_await(d, &d->staged[next]);
  if (!error && !d->stages[next])
    error = cudaHostAlloc(&d->stages[next], MLFAB_DEVICE_STAGE, cudaHostAllocPortable);
  if (error) return error;
  d->stage = (next + 1) % DEVICE_STAGES;
  *pinned_p = d->stages[next];
  return 0;
}

/* Waits for all work of the direction. */
int device_drain(device_self *d, int way) {
  void *mark = nullptr;
  int error = device_record(d, d->ways[way], &mark);
  if (!error) error = device_await(d, &mark);
  if (mark) device_drop(d, mark);
  return error;
}

/* Copies by way of pinned memory: a copy to other memory could itself wait, without a limit. */
int device_fetch(void *self, void *to, const void *from, uint64_t bytes) {
  device_self *d = device_of(self);
  device_scope scope(d->device);
  void *stage = nullptr;
  for (uint64_t at = 0, n; at < bytes; at += n) {
    n = bytes - at;
    if (n > MLFAB_DEVICE_STAGE) n = MLFAB_DEVICE_STAGE;
    int error = device_stage(self, &stage);
    if (!error)
      error = cudaMemcpyAsync(stage, static_cast<const char *>(from) + at, n,
                              cudaMemcpyDeviceToHost, d->ways[MLFAB_DEVICE_FROM_HOST]);
    if (!error) error = device_drain(d, MLFAB_DEVICE_FROM_HOST);
    if (error) return error;
    memcpy(static_cast<char *>(to) + at, stage, n);
  }
  return 0;
}

/* cudaFree waits for the whole device, without a limit. So memory that the device still uses is not freed. */
void device_give(void *self, void *memory) {
  device_self *d = device_of(self);
  device_scope scope(d->device);
  for (int way = 0; way < 2; way++)
    if (device_drain(d, way)) return;
  (void)cudaFree(memory);
}

int device_zero(void *self, void *to, uint64_t bytes) {
  device_self *d = device_of(self);
  device_scope scope(d->device);
  return cudaMemsetAsync(to, 0, bytes, d->ways[MLFAB_DEVICE_FROM_HOST]);
}

int device_add(void *self, int dtype, void *dst, const void *w, const void *u, double scale,
               uint64_t n) {
  device_self *d = device_of(self);
  device_scope scope(d->device);
  return mlfab_gpu_add(dtype, dst, w, u, scale, n, nullptr, nullptr,
                       d->ways[MLFAB_DEVICE_FROM_HOST]);
}

int device_step(void *self, const mlfab_device_rule *rule, int dtype, void *dst, const void *w,
                const void *u, void *s0, void *s1, uint64_t n) {
  device_self *d = device_of(self);
  device_scope scope(d->device);
  return mlfab_gpu_apply(rule, dtype, dst, w, u, s0, s1, n, nullptr, 0,
                         d->ways[MLFAB_DEVICE_FROM_HOST]);
}

/* Memory that a copy may still read stays pinned. */
void device_unstage(device_self *d) {
  for (unsigned i = 0; i < DEVICE_STAGES && d->stages[i]; i++) {
    int error = 0;
    if (!d->staged[i]) error = device_record(d, d->ways[MLFAB_DEVICE_FROM_HOST], &d->staged[i]);
    if (!error) error = device_await(d, &d->staged[i]);
    if (d->staged[i]) device_drop(d, d->staged[i]);
    if (!error) (void)cudaFreeHost(d->stages[i]);
  }
}

void device_close(void *self) {
  device_self *d = device_of(self);
  {
    device_scope scope(d->device);
    device_unstage(d);
    for (int way = 0; way < 2; way++)
      if (d->ways[way]) (void)cudaStreamDestroy(d->ways[way]);
    while (d->unused) {
      device_event *e = d->unused;
      d->unused = e->next;
      (void)cudaEventDestroy(e->event);
      free(e);
    }
  }
  free(d);
}

/* ---- memory of other processes ---- */

/* The name of a device: its number among all in the world, and this process. */
struct device_name {
  unsigned char gpu[16];
  unsigned char process[MLFAB_DEVICE_ID - 16];
};
static_assert(sizeof(device_name) == MLFAB_DEVICE_ID, "no holes");
static_assert(sizeof(cudaIpcMemHandle_t) <= MLFAB_DEVICE_HANDLE, "a handle has room");

/* The driver's function that finds the start of an allocation; the runtime can look it up from 11.3 on. */
typedef int (*device_range_fn)(unsigned long long *base_p, size_t *bytes_p, unsigned long long at);

device_range_fn device_range() {
  void *found = nullptr;
#if CUDART_VERSION >= 12050
  cudaDriverEntryPointQueryResult how;
  if (cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &found, 11030, cudaEnableDefault,
                                       &how) != cudaSuccess ||
      how != cudaDriverEntryPointSuccess)
    return nullptr;
#elif CUDART_VERSION >= 12000
  cudaDriverEntryPointQueryResult how;
  if (cudaGetDriverEntryPoint("cuMemGetAddressRange", &found, cudaEnableDefault, &how) !=
          cudaSuccess ||
      how != cudaDriverEntryPointSuccess)
    return nullptr;
#elif CUDART_VERSION >= 11030
  if (cudaGetDriverEntryPoint("cuMemGetAddressRange", &found, cudaEnableDefault) != cudaSuccess)
    return nullptr;
#endif
  return reinterpret_cast<device_range_fn>(found);
}

int device_gpu(int device, unsigned char *gpu) {
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, device);
  if (error == cudaSuccess) memcpy(gpu, &properties.uuid, 16);
  return error;
}

/* Makes bytes that no other process has; they are the same in all contexts of this process. */
int device_process(unsigned char *bytes, size_t n) {
  static unsigned char own[MLFAB_DEVICE_ID - 16];
  static const bool known = getentropy(own, sizeof own) == 0;
  memcpy(bytes, own, n);
  return known ? 0 : cudaErrorNotSupported;
}

int device_identify(void *self, void *id) {
  device_scope scope(device_of(self)->device);
  device_name name;
  int error = device_gpu(device_of(self)->device, name.gpu);
  if (!error) error = device_process(name.process, sizeof name.process);
  if (!error && !device_range()) error = cudaErrorNotSupported;
  if (!error) memcpy(id, &name, sizeof name);
  return error;
}

/* Is it the same GPU, or a GPU that this process sees, too? Other hosts have other numbers. */
int device_reaches(void *self, const void *id) {
  device_self *d = device_of(self);
  device_scope scope(d->device);
  device_name own, other;
  int count = 0, can = 0;
  memcpy(&other, id, sizeof other);
  if (device_identify(self, &own) || memcmp(own.process, other.process, sizeof own.process) == 0)
    return 0;
  if (memcmp(own.gpu, other.gpu, sizeof own.gpu) == 0) return 1;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return 0;
  for (int i = 0; i < count; i++) {
    unsigned char gpu[16];
    if (device_gpu(i, gpu) == cudaSuccess && memcmp(gpu, other.gpu, sizeof gpu) == 0)
      return cudaDeviceCanAccessPeer(&can, d->device, i) == cudaSuccess && can;
  }
  return 0;
}

/* Refuses memory outside one allocation. Memory of pools, managed and virtual memory have no handle. */
int device_share(void *self, const void *memory, uint64_t bytes, void *handle, uint64_t *offset_p) {
  device_scope scope(device_of(self)->device);
  device_range_fn range = device_range();
  unsigned long long base = 0, at = reinterpret_cast<uintptr_t>(memory);
  size_t size = 0;
  cudaIpcMemHandle_t own;
  if (!range) return cudaErrorNotSupported;
  if (range(&base, &size, at) != 0 || at < base || at - base > size || bytes > size - (at - base))
    return cudaErrorInvalidValue;
  cudaError_t error =
      cudaIpcGetMemHandle(&own, reinterpret_cast<void *>(static_cast<uintptr_t>(base)));
  if (error != cudaSuccess) return error;
  memset(handle, 0, MLFAB_DEVICE_HANDLE);
  memcpy(handle, &own, sizeof own);
  *offset_p = at - base;
  return 0;
}

int device_map(void *self, const void *handle, void **memory_p, uint64_t *bytes_p) {
  device_scope scope(device_of(self)->device);
  device_range_fn range = device_range();
  unsigned long long base = 0;
  size_t size = 0;
  cudaIpcMemHandle_t other;
  memcpy(&other, handle, sizeof other);
  if (!range) return cudaErrorNotSupported;
  cudaError_t error = cudaIpcOpenMemHandle(memory_p, other, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) return error;
  if (range(&base, &size, reinterpret_cast<uintptr_t>(*memory_p)) != 0 ||
      base != reinterpret_cast<uintptr_t>(*memory_p)) {
    (void)cudaIpcCloseMemHandle(*memory_p);
    return cudaErrorInvalidValue;
  }
  *bytes_p = size;
  return 0;
}

void device_unmap(void *self, void *memory) {
  device_scope scope(device_of(self)->device);
  (void)cudaIpcCloseMemHandle(memory);
}

int device_reduce(void *self, int op, int dtype, void *to, const void *const *from, uint32_t k,
                  uint64_t n) {
  device_scope scope(device_of(self)->device);
  return mlfab_gpu_reduce(op, dtype, to, from, k, n, device_of(self)->ways[MLFAB_DEVICE_FROM_HOST]);
}

const mlfab_device device_table = {
    sizeof(mlfab_device), "CUDA",       device_where, device_pin,   device_unpin,
    device_fence,         device_after, device_copy,  device_mark,  device_order,
    device_poll,          device_drop,  device_text,  device_close, device_identify,
    device_reaches,       device_share, device_map,   device_unmap, device_reduce,
    device_take,          device_give,  device_stage, device_fetch, device_zero,
    device_add,           device_step,
};

int device_fail(mlfab_error *error_p, int code, const char *text, cudaError_t error) {
  if (!error_p) return code;
  memset(error_p, 0, sizeof *error_p);
  error_p->code = code;
  error_p->rank = MLFAB_NO_RANK;
  if (error == cudaSuccess)
    snprintf(error_p->text, sizeof error_p->text, "gpu: %s", text);
  else
    snprintf(error_p->text, sizeof error_p->text, "gpu: %s: %s: %s", text, cudaGetErrorName(error),
             cudaGetErrorString(error));
  return code;
}

/* Makes the streams for copies; checks the caller's stream: an event on it fails if it belongs to another device. */
int device_open(device_self *d, int checks, mlfab_error *error_p) {
  device_scope scope(d->device);
  void *mark = nullptr;
  cudaError_t error = cudaSuccess;
  for (int way = 0; way < 2 && error == cudaSuccess; way++)
    error = cudaStreamCreateWithFlags(&d->ways[way], cudaStreamNonBlocking);
  if (error != cudaSuccess)
    return device_fail(error_p, MLFAB_ERR_DEVICE, "streams for copies", error);
  if (!checks) return 0;
  error = static_cast<cudaError_t>(device_record(d, d->stream, &mark));
  if (error != cudaSuccess)
    return device_fail(error_p, MLFAB_ERR_ARGUMENT, "the stream cannot be used on this device",
                       error);
  device_drop(d, mark);
  return 0;
}

int device_make(int device, cudaStream_t stream, int checks, device_self **self_p,
                mlfab_error *error_p) {
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && device == MLFAB_GPU_CURRENT) error = cudaGetDevice(&device);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    return device_fail(error_p, MLFAB_ERR_DEVICE, "no GPU", error);
  }
  if (device < 0 || device >= count)
    return device_fail(error_p, MLFAB_ERR_ARGUMENT, "there is no such device",
                       cudaErrorInvalidDevice);
  device_self *d = static_cast<device_self *>(calloc(1, sizeof *d));
  if (!d) return device_fail(error_p, MLFAB_ERR_MEMORY, "out of memory", cudaSuccess);
  d->device = device;
  d->stream = stream ? stream : cudaStreamLegacy; /* a flag of nvcc can give NULL another meaning */
  int code = device_open(d, checks, error_p);
  if (code)
    device_close(d);
  else
    *self_p = d;
  return code;
}

}  // namespace

extern "C" int mlfab_gpu_attach(mlfab *ctx, int device, void *stream, uint64_t staging_bytes,
                                mlfab_error *error_p) {
  device_self *d = nullptr;
  if (stream == cudaStreamPerThread)
    return device_fail(error_p, MLFAB_ERR_ARGUMENT,
                       "cudaStreamPerThread is another stream in each thread: create one",
                       cudaSuccess);
  int code = device_make(device, static_cast<cudaStream_t>(stream), 1, &d, error_p);
  if (code) return code;
  code = mlfab_device_attach(ctx, &device_table, d, staging_bytes);
  if (code && error_p && mlfab_last_error(ctx, error_p))
    (void)device_fail(error_p, code, "the context", cudaSuccess);
  if (code) device_close(d);
  return code;
}

extern "C" int mlfab_gpu_config_set(mlfab_config *config, int device, mlfab_error *error_p) {
  device_self *d = nullptr;
  if (!config || config->size < offsetof(mlfab_config, device_self) + sizeof config->device_self)
    return device_fail(error_p, MLFAB_ERR_CONFIG, "config.size is not set (call mlfab_config_init)",
                       cudaSuccess);
  if (config->device)
    return device_fail(error_p, MLFAB_ERR_STATE, "config.device is set already", cudaSuccess);
  int code = device_make(device, nullptr, 0, &d, error_p);
  if (code) return code;
  config->device = &device_table;
  config->device_self = d;
  return 0;
}

extern "C" void mlfab_gpu_config_clear(mlfab_config *config) {
  if (!config || config->device != &device_table) return;
  device_close(config->device_self);
  config->device = nullptr;
  config->device_self = nullptr;
}

/* mlfab.c calls this while no device is attached. */
extern "C" int mlfab_device_owns(const void *memory) {
  cudaPointerAttributes a;
  bool clean = cudaPeekAtLastError() == cudaSuccess;
  cudaError_t error = cudaPointerGetAttributes(&a, memory);
  if (clean) (void)cudaGetLastError();
  return error == cudaSuccess && a.type == cudaMemoryTypeDevice;
}
