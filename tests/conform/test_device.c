/* test_device.c - buffers in device memory over real transports: two workers with the library's threads, each with a device that
 * is played (../unit/played.h), push, pull and reduce, while their own threads go on giving work to the stream; and workers whose
 * devices read each other's memory. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "../unit/played.h"
#include "../unit/scale.h"

/* With so little staging memory a push and a pull have eight chunks, which are copied while others are sent. */
enum { WORKERS = 2, COUNT = 30000, SLOTS = 3, MATES = 4, STAGING = 1 << 21 };

typedef struct worker {
  const char *coordinator;
  uint32_t rank, transports, workers;
  void (*work)(struct worker *w);
  mlfab *ctx;
  played *device;
  int line; /* of the failure, or 0 */
  char text[320];
  int64_t made[SLOTS][COUNT], got[COUNT];
} worker;

#define MUST(call)                                                \
  do {                                                            \
    int must_code = (call);                                       \
    if (must_code) {                                              \
      mlfab_error must_error;                                     \
      w->line = __LINE__;                                         \
      if (w->ctx && !mlfab_last_error(w->ctx, &must_error))       \
        snprintf(w->text, sizeof w->text, "%s", must_error.text); \
      return;                                                     \
    }                                                             \
  } while (0)
#define HOLDS(condition) MUST(!(condition))

/* Rounds of: an update that the stream still has to make is pushed and pulled; sums of all kinds of memory under way at a time. */
static void work(worker *w) {
  const uint64_t bytes = COUNT * sizeof(int64_t);
  int64_t *at[SLOTS], *model = played_alloc(w->device, bytes), *mine = malloc(bytes);
  mlfab_buf whole = {1, 0, model, COUNT}, update = {1, 0, NULL, COUNT};
  HOLDS(mine);
  for (int s = 0; s < SLOTS; s++) at[s] = played_alloc(w->device, bytes);
  MUST(mlfab_tensor_add(w->ctx, 1, MLFAB_I64, COUNT));
  played_kernel(w->device, model, 0, bytes);
  MUST(mlfab_model_start(w->ctx, NULL, &whole, 1));
  const int rounds = (int)test_cases_from(6, 300);
  for (int k = 0; k < rounds; k++) {
    mlfab_request requests[SLOTS];
    for (int s = 0; s < SLOTS; s++) {
      for (uint32_t i = 0; i < COUNT; i++)
        w->made[s][i] = (int64_t)i * (s + 1) + k * 7 + (int64_t)w->rank;
      mlfab_vec vec = {(k + s) % 3 ? (void *)at[s] : (void *)mine, s == 0 ? COUNT : 100};
      if (vec.data == mine)
        memcpy(mine, w->made[s], vec.count * sizeof(int64_t));
      else
        played_produce(w->device, vec.data, w->made[s], vec.count * sizeof(int64_t));
      MUST(mlfab_allreduce_start(w->ctx, &vec, 1, MLFAB_I64, NULL, &requests[s]));
    }
    for (int s = 0; s < SLOTS; s++) {
      const uint64_t n = s == 0 ? COUNT : 100;
      MUST(mlfab_wait(w->ctx, requests[s], 0, NULL));
      if ((k + s) % 3)
        played_read(w->device, w->got, at[s], n * sizeof(int64_t));
      else
        memcpy(w->got, mine, n * sizeof(int64_t));
      for (uint32_t i = 0; i < n; i++) HOLDS(w->got[i] == 2 * ((int64_t)i * (s + 1) + k * 7) + 1);
    }
    for (uint32_t i = 0; i < COUNT; i++) w->made[0][i] = (int64_t)i + 1;
    update.data = at[0];
    played_produce(w->device, at[0], w->made[0], bytes);
    MUST(mlfab_push(w->ctx, &update, 1, NULL, NULL));
    MUST(mlfab_barrier(w->ctx, NULL));
    played_kernel(w->device, model, 0x55, bytes);
    MUST(mlfab_pull(w->ctx, &whole, 1, NULL, NULL));
    played_read(w->device, w->got, model, bytes);
    for (uint32_t i = 0; i < COUNT; i++) HOLDS(w->got[i] == 2 * (k + 1) * ((int64_t)i + 1));
    MUST(mlfab_barrier(w->ctx, NULL));
  }
  free(mine);
}

/* What member i has at place k of round `round`. */
static float made_by(uint32_t i, uint32_t k, int round) {
  return (float)(1.0 / (double)(3 + k % 977 + 5 * i) + (double)round);
}

/* The sum in the order of the ranks that take part. */
static void sum_of(worker *w, float *want, uint32_t n, int round) {
  for (uint32_t k = 0; k < n; k++) {
    want[k] = made_by(0, k, round);
    for (uint32_t r = 1; r < w->workers; r++) want[k] += made_by(r, k, round);
  }
}

/* Sums on devices that read each other; now and then a worker brings memory of the host. In the end the last one goes away. */
static void mate(worker *w) {
  enum { N = COUNT };
  float *at = played_alloc(w->device, N * sizeof(float)), *made = (float *)(void *)w->made[0];
  float *want = (float *)(void *)w->made[1], *got = (float *)(void *)w->got;
  int shared = 0, code = 0;
  for (uint32_t k = 0; k < N; k++) made[k] = made_by(w->rank, k, 0);
  sum_of(w, want, N, 0);
  if (w->transports ==
      MLFAB_USE_SHM) { /* blocking calls in the host's shared memory have the same bits */
    MUST(mlfab_allreduce(w->ctx, made, N, MLFAB_F32, NULL));
    HOLDS(memcmp(made, want, N * sizeof(float)) == 0);
  }
  MUST(mlfab_device_share(w->ctx, 4096, 0, &shared));
  HOLDS(shared);
  const int rounds = (int)test_cases_from(8, 200);
  uint32_t direct = 0;
  for (int round = 0; round < rounds; round++) {
    const int host = round % 4 == 3 && w->rank == 1;
    const uint32_t n = N - (uint32_t)round % 100;
    mlfab_vec vec = {host ? got : at, n};
    mlfab_request request;
    for (uint32_t k = 0; k < n; k++) made[k] = made_by(w->rank, k, round);
    if (host)
      memcpy(got, made, n * sizeof(float));
    else
      played_produce(w->device, at, made, n * sizeof(float));
    const int scatters = round % 4 == 1;
    const uint64_t even = n / w->workers;
    uint64_t counts[MATES];
    for (uint32_t r = 0; r < w->workers; r++)
      counts[r] = r == 0 ? n - (w->workers - 1) * even : even;
    if (scatters)
      MUST(mlfab_reduce_scatter_start(w->ctx, vec.data, counts, MLFAB_F32, NULL, &request));
    else
      MUST(mlfab_allreduce_start(w->ctx, &vec, 1, MLFAB_F32, NULL, &request));
    MUST(mlfab_wait(w->ctx, request, 0, NULL));
    if (round % 4 == 3) continue; /* by the host, in another order */
    direct++;
    played_read(w->device, got, at, n * sizeof(float));
    sum_of(w, want, n, round);
    const uint64_t from = w->rank == 0 ? 0 : counts[0] + (w->rank - 1) * even;
    const uint64_t bytes = (scatters ? counts[w->rank] : n) * sizeof(float);
    HOLDS(memcmp(got + (scatters ? from : 0), want + (scatters ? from : 0), bytes) == 0);
  }
  HOLDS(w->device->reduced == direct);
  const mlfab_vec vec = {at, N};
  mlfab_request request;
  played_kernel(w->device, at, 0, N * sizeof(float));
  MUST(mlfab_allreduce_start(w->ctx, &vec, 1, MLFAB_F32, NULL, &request));
  if (w->rank == w->workers - 1) {
    MUST(mlfab_abandon(&w->ctx));
    return;
  }
  code = mlfab_wait(w->ctx, request, 0, NULL);
  HOLDS(code == 0 || code == MLFAB_ERR_PEER_DEAD || code == MLFAB_ERR_PEER_CLOSED);
  for (int turn = 0; turn < 6; turn++) {
    for (uint32_t k = 0; k < N; k++) made[k] = 1.0f;
    played_produce(w->device, at, made, N * sizeof(float));
    code = mlfab_allreduce(w->ctx, at, N, MLFAB_F32, NULL);
    if (code == 0) break;
  }
  MUST(code);
  played_read(w->device, got, at, N * sizeof(float));
  for (uint32_t k = 0; k < N; k++)
    HOLDS(got[k] >= (float)(w->workers - 1) && got[k] <= (float)(w->workers - 1));
}

static void *worker_main(void *argument) {
  worker *w = argument;
  mlfab_config c;
  mlfab_error error;
  mlfab_config_init(&c);
  c.workers = w->workers;
  c.servers = 2;
  c.rank = (int32_t)w->rank;
  c.transports = w->transports;
  c.timeout_ns = 60000000000ull;
  snprintf(c.job, sizeof c.job, "device");
  snprintf(c.coordinator, sizeof c.coordinator, "%s", w->coordinator);
  w->device = played_begin(w->rank);
  if (mlfab_open(&c, &w->ctx, &error)) {
    w->line = __LINE__;
    snprintf(w->text, sizeof w->text, "%s", error.text);
    return NULL;
  }
  if (mlfab_device_attach(w->ctx, &played_device, w->device, w->work == work ? STAGING : 0))
    w->line = __LINE__;
  if (!w->line) w->work(w);
  mlfab_close(&w->ctx);
  return NULL;
}

static void play(const char *name, uint32_t transports, uint32_t n, void (*job)(worker *w)) {
  static worker workers[MATES];
  pthread_t threads[MATES];
  char coordinator[64];
  snprintf(coordinator, sizeof coordinator, "%s-%d", name, (int)getpid());
  memset(workers, 0, sizeof workers);
  for (uint32_t r = 0; r < n; r++) {
    workers[r].coordinator = coordinator;
    workers[r].rank = r;
    workers[r].transports = transports;
    workers[r].workers = n;
    workers[r].work = job;
    assert_int_equal(pthread_create(&threads[r], NULL, worker_main, &workers[r]), 0);
  }
  for (uint32_t r = 0; r < n; r++) pthread_join(threads[r], NULL);
  for (uint32_t r = 0; r < n; r++) {
    if (workers[r].line) fail_msg("worker %u, line %d: %s", r, workers[r].line, workers[r].text);
    assert_int_equal(workers[r].device->closed, 1);
    if (job == work) assert_int_equal(workers[r].device->pinned_now, 0);
  }
  for (uint32_t r = 0; r < n; r++) played_end(workers[r].device);
}

static void test_unix(void **state) {
  (void)state;
  play("unix:@mlfab-device", MLFAB_USE_TCP, WORKERS, work);
}

static void test_shm(void **state) {
  (void)state;
#ifdef __linux__
  play("shm:mlfab-device", MLFAB_USE_SHM, WORKERS, work);
#endif
}

static void test_direct_unix(void **state) {
  (void)state;
  play("unix:@mlfab-direct", MLFAB_USE_TCP, MATES, mate);
}

static void test_direct_shm(void **state) {
  (void)state;
#ifdef __linux__
  play("shm:mlfab-direct", MLFAB_USE_SHM, MATES, mate);
#endif
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_unix), cmocka_unit_test(test_shm),
                                     cmocka_unit_test(test_direct_unix),
                                     cmocka_unit_test(test_direct_shm)};
  return cmocka_run_group_tests_name("device over transports", tests, NULL, NULL);
}
