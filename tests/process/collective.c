/* collective.c - a worker of collective_test.py: collectives of real processes, one of which misbehaves.
 *
 *   collective SCENE VICTIM [FOLDER]
 *
 * Every worker makes a few reductions, plays the scene, and makes some more. Lines on stdout:
 *
 *   sum <workers that are in it>
 *   fail <code> <rank> <milliseconds since the call> <text>
 *
 * Scenes: what the victim does while the others reduce an array
 *   forget   no call until their deadline (1 s) has passed      size, kind, nan   a wrong call
 *   kill     is killed while it waits in the call               leave   closes in good order
 *   begin    calls the form that does not wait                  back    is killed, and restarts
 *   alone    likewise, and is the only one that has data; then only the next one gets data
 *   early    calls late, hand-driven, after the others' data have arrived; then does not drive the context
 *   refused  hand-driven, with NaN, which is refused; then does not drive the context
 *   polls    only reads its counters, for fifteen heartbeats
 *   busy     no victim: all call without pause for fifteen heartbeats
 *   threads  no victim: two threads of each worker call in turn; the victim calls late
 *   finish   no victim: worker r contributes to 20 + 15 r means, finishes, and is not waited for any more
 *   quick    sends the others data, and closes when its own call is done */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "mlfab.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000ull
enum { LARGE = 1 << 20 };

static mlfab *fabric;
static uint32_t rank, workers, victim;
static float *data;
static _Thread_local double called;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static void nap(uint64_t ms) {
  struct timespec t = {(time_t)(ms / 1000), (long)(ms % 1000 * MS)};
  nanosleep(&t, NULL);
}

__attribute__((__format__(__printf__, 1, 2))) static void tell(const char *format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  line[n++] = '\n';
  if (write(STDOUT_FILENO, line, (size_t)n) != n) exit(9);
}

static int tell_failure(int code) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  mlfab_last_error(fabric, &error);
  tell("fail %s %d %.0f %s", mlfab_error_name(code), (int)error.rank, now() - called, error.text);
  return code;
}

/* Each worker's array holds its bit, so that the result shows its contributors. Returns them, or 0 when
 * elements differ. */
static uint32_t bits(const float *at, uint64_t count) {
  for (uint64_t i = 1; i < count; i++) {
    if (at[i] != at[0]) {
      tell("wrong %.0f at %llu, not %.0f", (double)at[i], (unsigned long long)i, (double)at[0]);
      exit(3);
    }
  }
  return (uint32_t)at[0];
}

static int reduce(float *at, uint64_t count, const mlfab_collective *options, uint32_t *bits_p) {
  mlfab_vec vec = {at, count};
  for (uint64_t i = 0; i < count; i++) at[i] = (float)(1u << rank);
  called = now();
  int code = mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, options);
  if (!code && bits_p) *bits_p = bits(at, count);
  return code ? tell_failure(code) : 0;
}

/* A few sizes, blocking and not. Returns 1 when all succeeded. */
static int add_up(void) {
  static const uint64_t counts[] = {1, 1000, 30000, LARGE, 5};
  uint32_t in = 0;
  for (uint32_t k = 0; k < sizeof counts / sizeof *counts; k++) {
    if (reduce(data, counts[k], NULL, &in)) return 0;
  }
  tell("sum %d", __builtin_popcount(in));
  return 1;
}

/* --- scenes --- */

static void forget(void) {
  mlfab_collective options = {.size = sizeof options, .timeout_ns = 1000 * MS};
  if (rank == victim) nap(2000);
  reduce(data, 2000, &options, NULL);
}

static void call_wrongly(const char *how) {
  mlfab_collective options = {.size = sizeof options, .refuse_nan = !strcmp(how, "nan")};
  uint64_t counts[32] = {0};
  mlfab_vec vec = {data, 2000};
  for (uint32_t r = 0; r < workers; r++) counts[r] = vec.count / workers;
  for (uint64_t i = 0; i < vec.count; i++) data[i] = 1;
  if (rank == victim && !strcmp(how, "size")) vec.count++;
  if (rank == victim && !strcmp(how, "nan")) data[77] = NAN;
  called = now();
  int code = rank == victim && !strcmp(how, "kind")
                 ? mlfab_reduce_scatter(fabric, data, counts, MLFAB_F32, &options)
                 : mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, &options);
  if (code) tell_failure(code);
}

static void die(int number) {
  (void)number;
  kill(getpid(), SIGKILL);
}

/* The next one calls so late that the victim is inside when it is killed. */
static void be_killed(void) {
  struct itimerspec when = {.it_value = {0, 300 * (long)MS}};
  struct sigevent how = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
  timer_t timer;
  if (rank == victim) {
    signal(SIGALRM, die);
    if (timer_create(CLOCK_MONOTONIC, &how, &timer)) exit(4);
    timer_settime(timer, 0, &when, NULL);
  }
  if (rank == (victim + 1) % workers) nap(workers == 2 ? 3000 : 800);
  reduce(data, LARGE, NULL, NULL);
}

static void begin(void) {
  mlfab_vec vec = {data, 3000};
  mlfab_request request;
  uint32_t in = 0;
  for (int k = 0; k < 20; k++) {
    if (rank != victim) {
      if (reduce(data, vec.count, NULL, &in)) return;
      continue;
    }
    for (uint64_t i = 0; i < vec.count; i++) data[i] = (float)(1u << rank);
    called = now();
    int code = mlfab_allreduce_start(fabric, &vec, 1, MLFAB_F32, NULL, &request);
    if (!code) code = mlfab_wait(fabric, request, 0, NULL);
    if (code) {
      tell_failure(code);
      return;
    }
    in = bits(data, vec.count);
  }
  tell("sum %d", __builtin_popcount(in));
}

static void have_alone(void) {
  uint64_t counts[32] = {0};
  mlfab_request request;
  int code;
  for (uint64_t i = 0; i < LARGE; i++) data[i] = rank == victim ? (float)workers : 0;
  counts[victim] = LARGE;
  called = now();
  if (rank == victim) {
    code = mlfab_allgather_start(fabric, data, counts, MLFAB_F32, NULL, &request);
    if (!code) code = mlfab_wait(fabric, request, 0, NULL);
  } else {
    code = mlfab_allgather(fabric, data, counts, MLFAB_F32, NULL);
  }
  if (code) {
    tell_failure(code);
    return;
  }
  tell("sum %u", bits(data, LARGE));
  counts[victim] = 0;
  counts[(victim + 1) % workers] = 2;
  data[0] = data[1] = 1;
  code = mlfab_reduce_scatter(fabric, data, counts, MLFAB_F32, NULL);
  if (code) {
    tell_failure(code);
  } else {
    tell("sum %u", rank == (victim + 1) % workers ? bits(data, 2) : workers);
  }
}

/* The victim makes no call until the others' calls have ended. */
static void keep_still(const char *folder) {
  char path[512];
  snprintf(path, sizeof path, "%s/done", folder);
  if (rank != victim) {
    FILE *file = fopen(path, "w");
    if (!file) exit(4);
    fclose(file);
  }
  for (int i = 0; i < 800 && access(path, F_OK); i++) nap(10);
  if (access(path, F_OK)) exit(5);
}

/* Its data are sent although its call need not wait. */
static void be_early(const char *folder) {
  uint32_t in = 0;
  for (int i = 0; rank == victim && i < 10; i++) mlfab_progress(fabric, 20 * MS);
  if (reduce(data, 3000, NULL, &in)) return;
  tell("sum %d", __builtin_popcount(in));
  keep_still(folder);
}

/* Its messages are sent although its call failed at once. */
static void be_refused(const char *folder) {
  const mlfab_collective options = {.size = sizeof options, .refuse_nan = 1};
  float one = rank == victim ? NAN : 1;
  const mlfab_vec vec = {&one, 1};
  called = now();
  int code = mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, &options);
  if (code) tell_failure(code);
  keep_still(folder);
}

/* Calls that move no data do not stop its thread from sending heartbeats. */
static void poll_only(void) {
  mlfab_stats stats;
  for (double end = now() + 3000; now() < end;) {
    if (rank == victim) {
      mlfab_get_stats(fabric, &stats, sizeof stats);
    } else {
      nap(20);
    }
  }
}

/* Calls in shared memory are very short: nodes must send heartbeats all the same. */
static void be_busy(void) {
  float one[2] = {0};
  uint32_t in = 0;
  called = now();
  for (double end = now() + 3000; !one[0];) {
    const mlfab_vec vec = {one, 2};
    one[0] = rank == 0 && now() > end;
    int code = mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, NULL);
    if (code) {
      tell_failure(code);
      return;
    }
  }
  if (!reduce(data, 1000, NULL, &in)) tell("sum %d", __builtin_popcount(in));
}

static void *second(void *unused) {
  uint32_t in = 0;
  (void)unused;
  nap(rank == victim ? 600 : 200);
  if (!reduce(data + LARGE, 4000, NULL, &in)) tell("sum %d", __builtin_popcount(in));
  return NULL;
}

static void threads(void) {
  pthread_t thread;
  uint32_t in = 0;
  if (pthread_create(&thread, NULL, second, NULL)) exit(4);
  if (rank == victim) nap(400);
  if (!reduce(data, 3000, NULL, &in)) tell("sum %d", __builtin_popcount(in));
  pthread_join(thread, NULL);
}

static void send_and_go(void) {
  for (int k = 0; k < 3; k++) {
    mlfab_request requests[3];
    for (int i = 0; i < 3; i++) {
      int code = mlfab_broadcast_start(fabric, (int32_t)victim, data + i * 8192,
                                       i == 2 ? 20000 : 40 + (uint64_t)i, NULL, &requests[i]);
      if (code) exit(tell_failure(code) != 0);
    }
    for (int i = 0; i < 3; i++) {
      int code = mlfab_wait(fabric, requests[i], 0, NULL);
      if (code) exit(tell_failure(code) != 0);
    }
  }
}

/* Until all workers are back. */
/* All workers open a partial reduction for one round of all. */
static void share_round(void) {
  const mlfab_partial_options options = {
      .size = sizeof options, .mode = MLFAB_PARTIAL_QUORUM, .quorum = workers};
  int64_t sum = INT64_C(1) << rank;
  uint32_t id = 0;
  called = now();
  int code = mlfab_partial_open(fabric, 1, MLFAB_I64, &options, &id);
  if (!code) code = mlfab_partial_reduce(fabric, id, &sum, 0, NULL);
  if (!code) code = mlfab_partial_close(fabric, id);
  if (code) {
    tell_failure(code);
  } else {
    tell("sum %d", __builtin_popcountll((unsigned long long)sum));
  }
}

static void come_back(const char *folder) {
  char path[512];
  uint32_t in = 0;
  snprintf(path, sizeof path, "%s/lived", folder);
  int first = access(path, F_OK) != 0;
  if (rank != victim || first) share_round();
  if (rank == victim && first) {
    FILE *file = fopen(path, "w");
    if (!file) exit(4);
    fclose(file);
    kill(getpid(), SIGKILL);
  }
  for (int tries = 0; tries < 1000 && in != (1u << workers) - 1; tries++) {
    reduce(data, 3000, NULL, &in);
    if (rank != victim) nap(20);
  }
  share_round();
}

/* The k-th call gives the mean of the workers that have more than k calls. Half of the workers finish with
 * calls open, and close at once. */
static uint32_t last_call(uint32_t r) { return 20 + 15 * (victim == 0 ? workers - 1 - r : r); }

static void check_mean(float got, uint32_t k) {
  float sum = 0, n = 0;
  for (uint32_t r = 0; r < workers; r++) {
    if (last_call(r) > k) sum += (float)(r + 1), n++;
  }
  if (got < sum / n - 1e-4f || got > sum / n + 1e-4f)
    tell("wrong mean %.4f of call %u, not %.4f", (double)got, k, (double)(sum / n));
}

static void finish_early(void) {
  enum { OPEN = 8 };
  const mlfab_collective mean = {.size = sizeof mean, .op = MLFAB_OP_MEAN};
  mlfab_request requests[OPEN];
  uint32_t n = last_call(rank), open = rank % 2 ? OPEN : 1;
  /* large ones are sent when all workers have called */
  uint64_t count = victim ? 100 : LARGE / OPEN;
  for (uint32_t k = 0; k < n + open; k++) {
    float *at = data + k % open * count;
    called = now();
    int code = k >= open ? mlfab_wait(fabric, requests[k % open], 0, NULL) : 0;
    if (!code && k >= open) check_mean(at[count - 1], k - open);
    if (!code && k < n) {
      const mlfab_vec vec = {at, count};
      for (uint64_t i = 0; i < count; i++) at[i] = (float)(rank + 1);
      code = mlfab_allreduce_start(fabric, &vec, 1, MLFAB_F32, &mean, &requests[k % open]);
    } else if (!code && k == n) {
      called = now();
      code = open == 1 ? mlfab_finish(fabric, 0) : 0;
    }
    if (code) exit(tell_failure(code) != 0);
  }
  int code = open == 1 ? 0 : mlfab_finish(fabric, 0);
  uint32_t left = 0;
  if (!code) code = mlfab_present(fabric, NULL, 0, &left);
  if (code) exit(tell_failure(code) != 0);
  tell("sum %u", n);
}

static int play(const char *scene, const char *folder) {
  int again = 1;
  char path[512];
  snprintf(path, sizeof path, "%s/lived", folder);
  if (strcmp(scene, "back") || rank != victim || access(path, F_OK)) {
    if (!add_up()) return 1;
  }
  nap(100); /* a failure ends the others' open calls */
  if (!strcmp(scene, "forget")) forget();
  if (!strcmp(scene, "size") || !strcmp(scene, "kind") || !strcmp(scene, "nan"))
    call_wrongly(scene);
  if (!strcmp(scene, "kill")) be_killed();
  if (!strcmp(scene, "begin")) begin();
  if (!strcmp(scene, "alone")) have_alone();
  if (!strcmp(scene, "refused")) be_refused(folder);
  if (!strcmp(scene, "polls")) poll_only();
  if (!strcmp(scene, "busy")) be_busy();
  if (!strcmp(scene, "early")) be_early(folder);
  if (!strcmp(scene, "threads")) threads();
  if (!strcmp(scene, "back")) come_back(folder);
  if (!strcmp(scene, "quick")) send_and_go();
  if (!strcmp(scene, "finish")) finish_early();
  if (!strcmp(scene, "leave")) {
    again = rank != victim;
    if (again) reduce(data, 2000, NULL, NULL);
  }
  return again && strcmp(scene, "quick") && strcmp(scene, "finish") ? !add_up() : 0;
}

int main(int argc, char **argv) {
  mlfab_error error;
  mlfab_config config;
  int32_t own = 0;
  memset(&error, 0, sizeof error);
  if (argc < 3) return 2;
  victim = (uint32_t)strtoul(argv[2], NULL, 10);
  mlfab_config_init(&config);
  int code = mlfab_config_from_env(&config, &error);
  int by_hand = !strcmp(argv[1], "early") || !strcmp(argv[1], "refused");
  config.heartbeat_ns = by_hand ? 1000 * MS : 200 * MS;
  config.timeout_ns = 20000 * MS;
  if (by_hand && config.rank == (int32_t)victim) config.progress = MLFAB_PROGRESS_HAND;
  if (!code) code = mlfab_open(&config, &fabric, &error);
  if (code) {
    fprintf(stderr, "open: %s: %s\n", mlfab_error_name(code), error.text);
    return 1;
  }
  mlfab_rank(fabric, &own, &workers, NULL);
  rank = (uint32_t)own;
  void *memory = NULL;
  if (mlfab_alloc(fabric, 2 * LARGE * sizeof *data, &memory)) return 1;
  data = memory;
  code = play(argv[1], argc > 3 ? argv[3] : "");
  mlfab_close(&fabric);
  return code;
}
