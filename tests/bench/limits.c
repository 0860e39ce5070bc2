/* limits.c - the limits of this machine: the bandwidth of adding and of copying with one core, and the
 * round trip of one cache line between two cores. */
#include "bench.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

/* As fast as the machine allows, whatever the build's flags. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
__attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default")))
#endif
void bench_add(float *restrict a, const float *restrict b, size_t n) {
  for (size_t i = 0; i < n; i++) a[i] += b[i];
}

/* The two arrays, kept between calls; as large as the largest size asked for. */
static float *array[2];
static size_t array_bytes;

static double pass_rate(size_t bytes, int add) {
  if (array_bytes < bytes) {
    for (int i = 0; i < 2; i++) array[i] = bench_memory(bytes);
    array_bytes = bytes;
  }
  size_t passes = (64u << 20) / bytes + 1;
  bench_pin(1);
  uint64_t begin = 0;
  for (size_t pass = 0; pass <= passes; pass++) {
    if (pass == 1) begin = bench_now_ns(); /* the first one warms up */
    if (add) {
      bench_add(array[0], array[1], bytes / sizeof(float));
    } else {
      memcpy(array[0], array[1], bytes);
    }
    atomic_signal_fence(memory_order_seq_cst);
  }
  double seconds = (double)(bench_now_ns() - begin) * 1e-9;
  bench_pin(-1);
  return (double)bytes * (double)passes / seconds;
}

double bench_limit_add(size_t bytes) { return pass_rate(bytes, 1); }
double bench_limit_copy(size_t bytes) { return pass_rate(bytes, 0); }

enum { TURNS = 20000, WARM_TURNS = 2000 };
static _Alignas(128) _Atomic uint32_t there;
static _Alignas(128) _Atomic uint32_t back;

static void *line_return(void *unused) {
  bench_pin(1);
  for (uint32_t i = 1; i <= TURNS; i++) {
    while (atomic_load_explicit(&there, memory_order_acquire) != i) continue;
    atomic_store_explicit(&back, i, memory_order_release);
  }
  return unused;
}

double bench_limit_line(void) {
  pthread_t thread;
  if (bench_cpus() < 2) return 0; /* no second core */
  atomic_store(&there, 0);
  atomic_store(&back, 0);
  if (pthread_create(&thread, NULL, line_return, NULL)) return 0;
  bench_pin(0);
  uint64_t begin = 0;
  for (uint32_t i = 1; i <= TURNS; i++) {
    if (i == WARM_TURNS) begin = bench_now_ns();
    atomic_store_explicit(&there, i, memory_order_release);
    while (atomic_load_explicit(&back, memory_order_acquire) != i) continue;
  }
  double seconds = (double)(bench_now_ns() - begin) * 1e-9;
  pthread_join(thread, NULL);
  bench_pin(-1);
  return seconds / (double)(TURNS - WARM_TURNS);
}
