/* collective.c - a worker of collective_test.py: collectives of real processes, one of which misbehaves.
 *
 *   collective SCENE VICTIM FOLDER
 *
 * Every worker makes a few reductions, plays the scene, and makes some more. Lines on stdout:
 *
 *   sum <workers that are in it>
 *   fail <code> <rank> <text>
 *
 * Scenes: what the victim does while the others reduce an array
 *   forget   no call until their deadline (2 s) has passed      size, kind, nan   a wrong call
 *   kill     is killed while it waits in the call               leave   closes in good order
 *   begin    calls the form that does not wait                  back    is killed, and restarts
 *   alone    likewise, and is the only one that has data; then only the next one gets data
 *   early    calls late, hand-driven, after the others' data have arrived; then does not drive the context
 *   refused  hand-driven, with NaN, which is refused; then does not drive the context
 *   polls    only reads its counters, for ten heartbeats
 *   busy     no victim: all call without pause for ten heartbeats
 *   threads  no victim: two threads of each worker call in turn; the victim calls late
 *   finish   no victim: worker r contributes to 20 + 15 r means, finishes, and is not waited for any more
 *   quick    sends the others data, and closes when its own call is done */
#include "node.h"
#include "mlfab_partial.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>

enum { LARGE = 1 << 20 };

static uint32_t me, victim;
static int by_hand; /* this worker drives its context */
static float *data;
static const char *scene, *folder;

static int is(const char *name) { return !strcmp(scene, name); }

/* A worker that does not reach another worker for 8 beats fails the calls of all. A busy machine may stop a process for several
 * short beats, so beats are long. Two scenes last for ten beats without a pause. */
static unsigned beat_ms(void) { return is("polls") || is("busy") ? 300 : 1000; }

static int tell_failure(int code) {
  mlfab_error error = {.text = ""};
  if (!code) return 0;
  mlfab_last_error(fabric, &error);
  tell("fail %s %d %s", mlfab_error_name(code), (int)error.rank, error.text);
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
  for (uint64_t i = 0; i < count; i++) at[i] = (float)(1u << me);
  int code = mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, options);
  if (!code && bits_p) *bits_p = bits(at, count);
  return tell_failure(code);
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

/* Waits until each worker has called it. One that is driven by hand serves the others meanwhile. */
static void all_are_here(const char *what) {
  char name[32];
  snprintf(name, sizeof name, "%s-%u", what, me);
  make_file(folder, name);
  for (uint32_t r = 0; r < workers; r++) {
    snprintf(name, sizeof name, "%s-%u", what, r);
    while (by_hand && !exists(folder, name)) mlfab_progress(fabric, 10 * MS);
    await_file(folder, name);
  }
}

/* --- scenes --- */

/* The victim calls when all others have given up, and server 0's verdict has had three seconds to arrive: before it the data of the
 * others may complete the call. */
static void forget(void) {
  const mlfab_collective options = {.size = sizeof options, .timeout_ns = 8000 * MS};
  char name[32];
  for (uint32_t r = 0; me == victim && r < workers; r++) {
    snprintf(name, sizeof name, "gave-up-%u", r);
    if (r != victim) await_file(folder, name);
  }
  if (me == victim) nap(3000);
  reduce(data, 2000, &options, NULL);
  snprintf(name, sizeof name, "gave-up-%u", me);
  make_file(folder, name);
}

static void call_wrongly(void) {
  mlfab_collective options = {.size = sizeof options, .refuse_nan = !strcmp(scene, "nan")};
  uint64_t counts[32] = {0};
  mlfab_vec vec = {data, 2000};
  for (uint32_t r = 0; r < workers; r++) counts[r] = vec.count / workers;
  for (uint64_t i = 0; i < vec.count; i++) data[i] = 1;
  if (me == victim && !strcmp(scene, "size")) vec.count++;
  if (me == victim && !strcmp(scene, "nan")) data[77] = NAN;
  int code = me == victim && !strcmp(scene, "kind")
                 ? mlfab_reduce_scatter(fabric, data, counts, MLFAB_F32, &options)
                 : mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, &options);
  tell_failure(code);
}

static void die(int number) {
  (void)number;
  kill(getpid(), SIGKILL);
}

/* The victim takes a lock, which another process can only take when the victim is dead. */
static void lock(void) {
  if (me != victim) await_file(folder, "locked");
  int fd = open(path_of(folder, "lock"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || flock(fd, LOCK_EX)) exit(4);
  if (me == victim) make_file(folder, "locked");
}

/* The victim is inside when it is killed, for the next one calls later. Of two workers that one has heard of the death. */
static void be_killed(void) {
  struct itimerspec when = {.it_value = {0, 300 * (long)MS}};
  struct sigevent how = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
  timer_t timer;
  if (me == victim) {
    signal(SIGALRM, die);
    if (timer_create(CLOCK_MONOTONIC, &how, &timer)) exit(4);
    lock();
    timer_settime(timer, 0, &when, NULL);
  } else if (me == (victim + 1) % workers) {
    lock();
    if (workers == 2) nap(10 * beat_ms());
  }
  reduce(data, LARGE, NULL, NULL);
}

static void begin(void) {
  mlfab_vec vec = {data, 3000};
  mlfab_request request;
  uint32_t in = 0;
  for (int k = 0; k < 20; k++) {
    if (me != victim) {
      if (reduce(data, vec.count, NULL, &in)) return;
      continue;
    }
    for (uint64_t i = 0; i < vec.count; i++) data[i] = (float)(1u << me);
    int code = mlfab_allreduce_start(fabric, &vec, 1, MLFAB_F32, NULL, &request);
    if (!code) code = mlfab_wait(fabric, request, 0, NULL);
    if (tell_failure(code)) return;
    in = bits(data, vec.count);
  }
  tell("sum %d", __builtin_popcount(in));
}

static void have_alone(void) {
  uint64_t counts[32] = {0};
  mlfab_request request;
  int code;
  for (uint64_t i = 0; i < LARGE; i++) data[i] = me == victim ? (float)workers : 0;
  counts[victim] = LARGE;
  if (me == victim) {
    code = mlfab_allgather_start(fabric, data, counts, MLFAB_F32, NULL, &request);
    if (!code) code = mlfab_wait(fabric, request, 0, NULL);
  } else {
    code = mlfab_allgather(fabric, data, counts, MLFAB_F32, NULL);
  }
  if (tell_failure(code)) return;
  tell("sum %u", bits(data, LARGE));
  counts[victim] = 0;
  counts[(victim + 1) % workers] = 2;
  data[0] = data[1] = 1;
  code = mlfab_reduce_scatter(fabric, data, counts, MLFAB_F32, NULL);
  if (!tell_failure(code)) tell("sum %u", me == (victim + 1) % workers ? bits(data, 2) : workers);
}

/* The victim makes no call until the others' calls have ended. */
static void keep_still(void) {
  if (me != victim) make_file(folder, "done");
  await_file(folder, "done");
}

/* Its data are sent although its call need not wait. */
static void be_early(void) {
  uint32_t in = 0;
  for (int i = 0; me == victim && i < 10; i++) mlfab_progress(fabric, 20 * MS);
  if (reduce(data, 3000, NULL, &in)) return;
  tell("sum %d", __builtin_popcount(in));
  keep_still();
}

/* Its messages are sent although its call failed at once. */
static void be_refused(void) {
  const mlfab_collective options = {.size = sizeof options, .refuse_nan = 1};
  float one = me == victim ? NAN : 1;
  const mlfab_vec vec = {&one, 1};
  tell_failure(mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, &options));
  keep_still();
}

/* Calls that move no data do not stop its thread from sending heartbeats. */
static void poll_only(void) {
  mlfab_stats stats;
  for (double end = seconds_now() + 0.01 * beat_ms(); seconds_now() < end;) {
    if (me == victim) {
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
  for (double end = seconds_now() + 0.01 * beat_ms(); !one[0];) {
    const mlfab_vec vec = {one, 2};
    one[0] = me == 0 && seconds_now() > end;
    if (tell_failure(mlfab_allreduce_list(fabric, &vec, 1, MLFAB_F32, NULL))) return;
  }
  if (!reduce(data, 1000, NULL, &in)) tell("sum %d", __builtin_popcount(in));
}

/* Nobody knows whose call comes first when a machine is busy, so the calls are alike. */
static void *second(void *unused) {
  uint32_t in = 0;
  (void)unused;
  nap(me == victim ? 600 : 200);
  if (!reduce(data + LARGE, 3000, NULL, &in)) tell("sum %d", __builtin_popcount(in));
  return NULL;
}

static void threads(void) {
  pthread_t thread;
  uint32_t in = 0;
  if (pthread_create(&thread, NULL, second, NULL)) exit(4);
  if (me == victim) nap(400);
  if (!reduce(data, 3000, NULL, &in)) tell("sum %d", __builtin_popcount(in));
  pthread_join(thread, NULL);
}

static void send_and_go(void) {
  for (int k = 0; k < 3; k++) {
    mlfab_request requests[3];
    for (int i = 0; i < 3; i++) {
      uint64_t bytes = i == 2 ? 20000 : 40 + (uint64_t)i;
      must("broadcast", mlfab_broadcast_start(fabric, (int32_t)victim, data + i * 8192, bytes, NULL,
                                              &requests[i]));
    }
    for (int i = 0; i < 3; i++) must("wait", mlfab_wait(fabric, requests[i], 0, NULL));
  }
}

/* All workers open a partial reduction for one round of all. */
static void share_round(void) {
  const mlfab_partial_options options = {
      .size = sizeof options, .mode = MLFAB_PARTIAL_QUORUM, .quorum = workers};
  int64_t sum = INT64_C(1) << me;
  uint32_t id = 0;
  int code = mlfab_partial_open(fabric, 1, MLFAB_I64, &options, &id);
  if (!code) code = mlfab_partial_reduce(fabric, id, &sum, 0, NULL);
  if (!code) code = mlfab_partial_close(fabric, id);
  if (!tell_failure(code)) tell("sum %d", __builtin_popcountll((unsigned long long)sum));
}

/* Until all workers are back. */
static void come_back(void) {
  uint32_t in = 0;
  int first = !exists(folder, "lived");
  if (me != victim || first) {
    share_round();
    all_are_here("shared");
  }
  if (me == victim && first) {
    make_file(folder, "lived");
    kill(getpid(), SIGKILL);
  }
  while (in != (1u << workers) - 1) {
    reduce(data, 3000, NULL, &in);
    if (me != victim) nap(20);
  }
  share_round();
}

static void leave(void) {
  if (me != victim) reduce(data, 2000, NULL, NULL);
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
  uint32_t n = last_call(me), open = me % 2 ? OPEN : 1;
  /* large ones are sent when all workers have called */
  uint64_t count = victim ? 100 : LARGE / OPEN;
  for (uint32_t k = 0; k < n + open; k++) {
    float *at = data + k % open * count;
    int code = k >= open ? mlfab_wait(fabric, requests[k % open], 0, NULL) : 0;
    if (!code && k >= open) check_mean(at[count - 1], k - open);
    if (!code && k < n) {
      const mlfab_vec vec = {at, count};
      for (uint64_t i = 0; i < count; i++) at[i] = (float)(me + 1);
      code = mlfab_allreduce_start(fabric, &vec, 1, MLFAB_F32, &mean, &requests[k % open]);
    } else if (!code && k == n) {
      code = open == 1 ? mlfab_finish(fabric, 0) : 0;
    }
    if (tell_failure(code)) exit(1);
  }
  int code = open == 1 ? 0 : mlfab_finish(fabric, 0);
  uint32_t left = 0;
  if (!code) code = mlfab_present(fabric, NULL, 0, &left);
  if (tell_failure(code)) exit(1);
  tell("sum %u", n);
}

static const struct {
  const char *name;
  void (*play)(void);
} scenes[] = {{"forget", forget},      {"size", call_wrongly}, {"kind", call_wrongly},
              {"nan", call_wrongly},   {"kill", be_killed},    {"leave", leave},
              {"begin", begin},        {"alone", have_alone},  {"early", be_early},
              {"refused", be_refused}, {"polls", poll_only},   {"busy", be_busy},
              {"threads", threads},    {"back", come_back},    {"quick", send_and_go},
              {"finish", finish_early}};

static int play(void) {
  int came_back = is("back") && me == victim && exists(folder, "lived");
  if (!came_back) {
    if (!add_up()) return 1;
    all_are_here("added"); /* a failure ends the others' open calls */
  }
  for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++)
    if (is(scenes[i].name)) scenes[i].play();
  while (is("kill") && me != victim && !add_up()) continue;
  int ends = is("quick") || is("kill") || is("finish") || (is("leave") && me == victim);
  return ends ? 0 : !add_up();
}

int main(int argc, char **argv) {
  mlfab_config config;
  void *memory = NULL;
  if (argc != 4) return 2;
  scene = argv[1];
  victim = (uint32_t)strtoul(argv[2], NULL, 10);
  folder = argv[3];
  configure(&config);
  config.heartbeat_ns = (uint64_t)beat_ms() * MS;
  config.timeout_ns = 60000 * MS;
  by_hand = (is("early") || is("refused")) && config.rank == (int32_t)victim;
  if (by_hand) config.progress = MLFAB_PROGRESS_HAND;
  open_node(&config);
  me = (uint32_t)rank;
  must("alloc", mlfab_alloc(fabric, 2 * LARGE * sizeof *data, &memory));
  data = memory;
  return close_node(play());
}
