/* test_lent.c - pushes and collectives from memory of mlfab_alloc, which other processes of the host read in place: over shared
 * memory, between real processes.
 *
 * A worker whose call ends before the server has read its bytes (the server is stopped) has the memory back at once, and what it
 * writes there is in no model. A worker that writes while the server adds spoils its own update only, and brings no NaN into the
 * model. */
#include "child.h"
#include "../../mlfab_transport.h"
#include "../unit/scale.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>

enum { COUNT = 3 << 20, ROUNDS = 6, WORKERS = 2 };

static mlfab *fabric_open(const char *address, uint32_t role, int32_t rank, uint32_t workers) {
  mlfab_config config;
  mlfab_config_init(&config);
  config.roles = role;
  config.rank = rank;
  config.workers = workers;
  config.dedicated = 1;
  config.transports = MLFAB_USE_SHM;
  config.timeout_ns = 20000000000u;
  snprintf(config.coordinator, sizeof config.coordinator, "%s", address);
  return child_open(&config);
}

static pid_t server_start(const char *address, uint32_t workers) {
  pid_t pid = fork();
  if (pid != 0) return pid;
  mlfab *fabric = fabric_open(address, MLFAB_ROLE_SERVER, 0, workers);
  CHECK(mlfab_serve(fabric, 0) == 0);
  CHECK(mlfab_close(&fabric) == 0);
  _exit(0);
}

static float *model_start(mlfab *fabric, float **pulled_p) {
  void *memory = NULL;
  CHECK(mlfab_tensor_add(fabric, 0, MLFAB_F32, COUNT) == 0);
  CHECK(mlfab_model_start(fabric, NULL, NULL, 0) == 0);
  CHECK(mlfab_alloc(fabric, COUNT * sizeof(float), &memory) == 0);
  *pulled_p = malloc(COUNT * sizeof(float));
  CHECK(*pulled_p != NULL);
  return memory;
}

static void fill(float *at, float value) {
  for (uint32_t i = 0; i < COUNT; i++) at[i] = value;
}

typedef void (*body_fn)(const char *address, int32_t rank, pid_t server);

/* Runs a server, and `workers` processes in `body`. */
static void play(const char *name, uint32_t workers, body_fn body) {
  char address[64];
  pid_t pids[WORKERS + 1];
  snprintf(address, sizeof address, "shm:mlfab-lent-%s-%ld", name, (long)getpid());
  pids[WORKERS] = server_start(address, workers);
  for (uint32_t i = 0; i < workers; i++) {
    pids[i] = fork();
    if (pids[i] != 0) continue;
    alarm(100);
    body(address, (int32_t)i, pids[WORKERS]);
    _exit(0);
  }
  for (uint32_t i = 0; i <= workers; i++) {
    int status = 0;
    pid_t pid = i < workers ? pids[i] : pids[WORKERS];
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (status != 0 && i < workers) kill(pids[WORKERS], SIGKILL);
    assert_int_equal(status, 0);
  }
}

/* --- a call that ends while the server is stopped --- */

static void stop(pid_t pid) {
  char path[40];
  snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
  kill(pid, SIGSTOP);
  await_state(path, 'T');
}

static void takes_back(const char *address, int32_t rank, pid_t server) {
  mlfab *fabric = fabric_open(address, MLFAB_ROLE_WORKER, rank, 1);
  float *w, *u = model_start(fabric, &w), sum = 0;
  mlfab_buf update = {0, 0, u, COUNT}, weights = {0, 0, w, COUNT};
  for (int round = 0; round < ROUNDS; round++) {
    mlfab_request request = 0;
    int done = 0;
    fill(u, 1);
    /* The server has granted some of it, and stops anywhere. */
    CHECK(mlfab_push_start(fabric, &update, 1, NULL, &request) == 0);
    if (round % 3 == 0) nap(1);
    stop(server);
    for (int i = 0; i < 20 && round % 2; i++) mlfab_progress(fabric, 100000);
    if (mlfab_test(fabric, request, &done, NULL) || !done) mlfab_cancel(fabric, request);
    fill(u, 1000); /* the memory is this worker's again */
    kill(server, SIGCONT);
    CHECK(mlfab_pull(fabric, &weights, 1, NULL, NULL) == 0);
    /* The server may answer that pull before it applies the update: pull again behind another update. */
    fill(u, 0);
    CHECK(mlfab_push(fabric, &update, 1, NULL, NULL) == 0);
    CHECK(mlfab_pull(fabric, &weights, 1, NULL, NULL) == 0);
    float now = w[0];
    CHECK(now == sum || now == sum + 1);
    for (uint32_t i = 0; i < COUNT; i++) CHECK(w[i] == now);
    sum = now;
  }
  free(w);
  CHECK(mlfab_close(&fabric) == 0);
}

static void test_takes_back(void **state) {
  (void)state;
  play("back", 1, takes_back);
}

/* --- a worker that writes to what it has lent --- */

static atomic_int scribbles;

static void *scribble(void *argument) {
  float *u = argument;
  uint32_t x = 1;
  while (scribbles) {
    x = x * 1664525u + 1013904223u;
    ((volatile float *)u)[x % COUNT] = x >> 28 == 0 ? NAN : x >> 28 == 1 ? INFINITY : 5.0f;
    if (x % 4096 == 0) fill(u, 1);
  }
  return NULL;
}

/* Worker 1 scribbles; worker 0's updates are whole, and no weight is ever NaN. */
static void scribbler(const char *address, int32_t rank, pid_t server) {
  (void)server;
  mlfab *fabric = fabric_open(address, MLFAB_ROLE_WORKER, rank, WORKERS);
  float *w, *u = model_start(fabric, &w);
  mlfab_buf update = {0, 0, u, COUNT}, weights = {0, 0, w, COUNT};
  pthread_t thread;
  fill(u, 1);
  scribbles = rank == 1;
  if (rank == 1) CHECK(pthread_create(&thread, NULL, scribble, u) == 0);
  for (uint64_t round = 0; round < test_cases_from(5, 20); round++) {
    int code = mlfab_push(fabric, &update, 1, NULL, NULL);
    CHECK(code == 0 || (rank == 1 && code == MLFAB_ERR_NOT_FINITE));
    CHECK(mlfab_pull(fabric, &weights, 1, NULL, NULL) == 0);
    for (uint32_t i = 0; i < COUNT; i++) CHECK(w[i] - w[i] == 0.0f);
  }
  scribbles = 0;
  if (rank == 1) pthread_join(thread, NULL);
  free(w);
  CHECK(mlfab_close(&fabric) == 0);
}

static void test_scribbler(void **state) {
  (void)state;
  play("scribbler", WORKERS, scribbler);
}

/* --- _start forms of collectives --- */

/* Two allreduces at a time, over halves of one area that is then written again at once. */
static void collects(const char *address, int32_t rank, pid_t server) {
  (void)server;
  mlfab *fabric = fabric_open(address, MLFAB_ROLE_WORKER, rank, WORKERS);
  float *w, *u = model_start(fabric, &w);
  for (uint64_t round = 0; round < test_cases_from(5, 20); round++) {
    mlfab_vec halves[2] = {{u, COUNT / 2}, {u + COUNT / 2, COUNT / 2}};
    mlfab_request requests[2];
    for (uint32_t i = 0; i < COUNT; i++)
      u[i] = (float)(i % 1000 + (uint32_t)rank + (uint32_t)round);
    for (int k = 0; k < 2; k++)
      CHECK(mlfab_allreduce_start(fabric, &halves[k], 1, MLFAB_F32, NULL, &requests[k]) == 0);
    for (int k = 0; k < 2; k++) CHECK(mlfab_wait(fabric, requests[k], 0, NULL) == 0);
    for (uint32_t i = 0; i < COUNT; i++)
      CHECK(u[i] == (float)(2 * (i % 1000) + 2 * (uint32_t)round + 1));
  }
  free(w);
  CHECK(mlfab_close(&fabric) == 0);
}

static void test_collects(void **state) {
  (void)state;
  play("collects", WORKERS, collects);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_takes_back),
                                     cmocka_unit_test(test_scribbler),
                                     cmocka_unit_test(test_collects)};
  if (!mlfab_transport_shm()) {
    puts("SKIP: shared memory is not compiled in");
    return 77;
  }
  return cmocka_run_group_tests(tests, NULL, NULL);
}
