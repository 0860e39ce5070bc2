/* test_close.c - a context is closed while other threads are in its calls: each call ends with
 * MLFAB_ERR_CLOSED, its buffers belong to the caller again, and memory is freed after the last one. Over
 * UNIX sockets and shared memory; sanitizers detect use after free.
 *
 * Worker 0, which also serves, is in this process; worker 1 is closed. Its threads wait in vain, because
 * worker 0 makes no call. */
#include "child.h"

#include <pthread.h>
#include <stdatomic.h>

enum { THREADS = 8, COUNT = 50000 };

static mlfab *contexts[2];
static atomic_int waiting;
static atomic_long tids[THREADS]; /* of the threads that wait */

typedef struct opening {
  char address[128];
  int32_t rank;
  uint32_t transports;
} opening;

static void *open_one(void *argument) {
  const opening *o = argument;
  mlfab_config config;
  mlfab_error error;
  mlfab_config_init(&config);
  config.rank = o->rank;
  config.workers = 2;
  config.transports = o->transports;
  snprintf(config.coordinator, sizeof config.coordinator, "%s", o->address);
  return (void *)(intptr_t)mlfab_open(&config, &contexts[o->rank], &error);
}

static void open_both(uint32_t transports) {
  static int worlds;
  pthread_t threads[2];
  opening openings[2];
  worlds++;
  for (int32_t i = 0; i < 2; i++) {
    openings[i] = (opening){.rank = i, .transports = transports};
    snprintf(openings[i].address, sizeof openings[i].address, "%smlfab-close-%ld-%d",
             transports == MLFAB_USE_SHM ? "shm:" : "unix:@", (long)getpid(), worlds);
    assert_int_equal(pthread_create(&threads[i], NULL, open_one, &openings[i]), 0);
  }
  for (int i = 0; i < 2; i++) {
    void *code;
    pthread_join(threads[i], &code);
    assert_int_equal((intptr_t)code, 0);
  }
}

/* Makes a call that cannot complete, with memory that it frees as soon as the call returns. */
static int wait_in_vain(mlfab *ctx, int which) {
  float *data = calloc(COUNT, sizeof *data);
  mlfab_vec vec = {data, COUNT};
  mlfab_buf model = {0, 0, data, COUNT};
  mlfab_request request;
  int code;
  atomic_store(&tids[which], thread_number());
  atomic_fetch_add(&waiting, 1);
  switch (which) {
    case 0:
      code = mlfab_barrier(ctx, NULL);
      break;
    case 1:
    case 2:
      code = mlfab_allreduce_list(ctx, &vec, 1, MLFAB_F32, NULL);
      break;
    case 3:
      code = mlfab_allreduce_start(ctx, &vec, 1, MLFAB_F32, NULL, &request);
      if (!code) code = mlfab_wait(ctx, request, 0, NULL);
      break;
    case 4:
      code = mlfab_broadcast(ctx, 0, data, COUNT, NULL);
      break;
    case 5: /* worker 0's weights do not arrive */
      code = mlfab_tensor_add(ctx, 0, MLFAB_F32, COUNT);
      if (!code) code = mlfab_model_start(ctx, NULL, &model, 1);
      break;
    default: /* as a thread that drives: until it is told that the context is closed */
      do {
        code = mlfab_progress(ctx, 20000000000u);
      } while (code >= 0);
  }
  free(data);
  return code;
}

static void *call(void *argument) {
  return (void *)(intptr_t)wait_in_vain(contexts[1], (int)(intptr_t)argument);
}

static void close_under(uint32_t transports, int (*how)(mlfab **)) {
  pthread_t threads[THREADS];
  open_both(transports);
  mlfab *leaver = contexts[1];
  waiting = 0;
  for (intptr_t i = 0; i < THREADS; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, call, (void *)i), 0);
  while (waiting < THREADS) nap(1);
  for (int i = 0; i < THREADS; i++) { /* until each sleeps in its call */
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%ld/stat", atomic_load(&tids[i]));
    await_state(path, 'S');
  }
  nap(20);
  assert_int_equal(how(&leaver), 0);
  assert_null(leaver);
  for (int i = 0; i < THREADS; i++) {
    void *code;
    pthread_join(threads[i], &code);
    assert_int_equal((intptr_t)code, MLFAB_ERR_CLOSED);
  }
  assert_int_equal(how(&leaver), MLFAB_ERR_CLOSED);
  assert_int_equal(mlfab_close(&contexts[0]), 0);
}

static void test_close_over_sockets(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) close_under(MLFAB_USE_TCP, mlfab_close);
}

static void test_close_over_shared_memory(void **state) {
  (void)state;
  for (int i = 0; i < 3; i++) close_under(MLFAB_USE_SHM, mlfab_close);
}

static void test_abandon(void **state) {
  (void)state;
  close_under(MLFAB_USE_SHM, mlfab_abandon);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_close_over_sockets),
      cmocka_unit_test(test_close_over_shared_memory),
      cmocka_unit_test(test_abandon),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
