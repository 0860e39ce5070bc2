/* test_guest.c - what the library does in somebody's process: signals, limits, forks, files. It uses
 * the public header only. What may end a process is tried in a child. */
#define _DEFAULT_SOURCE
#include "mlfab.h"

#include <dirent.h>
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

static uint32_t fabrics; /* that this process has opened */

static void nap(void) {
  struct timespec t = {0, 1000000};
  nanosleep(&t, NULL);
}

/* One of two workers of this process; worker 0 serves. Returns what opening begins with. */
static int begin(uint32_t rank, const char *scheme, mlfab **ctx_p, mlfab_error *error) {
  mlfab_config c;
  mlfab_config_init(&c);
  c.rank = (int32_t)rank;
  c.workers = 2;
  c.transports = strcmp(scheme, "shm") == 0 ? MLFAB_USE_SHM : MLFAB_USE_TCP;
  c.timeout_ns = UINT64_C(60000000000);
  snprintf(c.coordinator, sizeof c.coordinator, "%s:%sguest-%ld-%u", scheme,
           strcmp(scheme, "shm") == 0 ? "" : "@", (long)getpid(), (unsigned)fabrics);
  return mlfab_open_start(&c, ctx_p, error);
}

/* Two contexts with threads of their own; over "shm" or "unix". */
static void open_two(const char *scheme, mlfab *pair[2]) {
  mlfab_error error;
  fabrics++;
  for (uint32_t i = 0; i < 2; i++)
    if (begin(i, scheme, &pair[i], &error)) fail_msg("%s", error.text);
  for (uint32_t i = 0; i < 2; i++) {
    int ready = 0;
    while ((ready = mlfab_is_ready(pair[i], &error)) == 0) nap();
    if (ready != 1) fail_msg("%s", error.text);
  }
}

/* Worker 0 serves until the other has left, so it closes last. */
static void close_two(mlfab *pair[2]) {
  assert_int_equal(mlfab_close(&pair[1]), 0);
  assert_int_equal(mlfab_close(&pair[0]), 0);
}

/* --- signals --- */

/* A program that blocks a signal in its own threads and waits for it gets it: the library's thread
 * does not take it. */
static void test_signals(void **state) {
  (void)state;
  static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGALRM, SIGCHLD, SIGXFSZ};
  struct timespec long_enough = {60, 0};
  mlfab *pair[2];
  sigset_t set, before;
  open_two("shm", pair); /* with nothing blocked here */
  sigemptyset(&set);
  for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) sigaddset(&set, signals[i]);
  pthread_sigmask(SIG_BLOCK, &set, &before);
  for (size_t i = 0; i < sizeof signals / sizeof signals[0]; i++) {
    kill(getpid(), signals[i]);
    assert_int_equal(sigtimedwait(&set, NULL, &long_enough), signals[i]);
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  close_two(pair);
}

/* What a thread of this process blocks: a bit a signal, as Linux prints it. */
static uint64_t blocked_by(const char *task) {
  char path[300], line[256];
  unsigned long long mask = 0;
  snprintf(path, sizeof path, "/proc/self/task/%s/status", task);
  FILE *file = fopen(path, "re");
  if (!file) fail_msg("%s cannot be read", path);
  while (fgets(line, sizeof line, file))
    if (sscanf(line, "SigBlk: %llx", &mask) == 1) break;
  fclose(file);
  return mask;
}

/* Opening leaves this thread's mask as it was. The library's threads block all but what a fault raises,
 * which is for the handler that the program has for faults. */
static void test_masks(void **state) {
  (void)state;
  static const int faults[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP};
  uint64_t fault_bits = 0, others = 0;
  uint32_t threads = 0;
  mlfab *pair[2];
  for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
    fault_bits |= UINT64_C(1) << (faults[i] - 1);
  for (int i = 1; i < 32; i++)
    if (i != SIGKILL && i != SIGSTOP) others |= UINT64_C(1) << (i - 1);
  others &= ~fault_bits;
  char self[24];
  snprintf(self, sizeof self, "%ld", (long)getpid());
  uint64_t before = blocked_by(self);
  open_two("shm", pair);
  DIR *tasks = opendir("/proc/self/task");
  for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
    if (task->d_name[0] == '.') continue;
    uint64_t mask = blocked_by(task->d_name);
    if (strtol(task->d_name, NULL, 10) == (long)getpid()) {
      assert_true(mask == before);
      continue;
    }
    assert_true((mask & others) == others);
    assert_true((mask & fault_bits) == 0);
    threads++;
  }
  closedir(tasks);
  assert_int_equal(threads, 2);
  close_two(pair);
}

/* --- limits --- */

/* Runs a function in a child; it must return 0 there. */
static void in_child(int (*fn)(void)) {
  int status = 0;
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) _exit(fn());
  assert_true(waitpid(child, &status, 0) == child);
  if (WIFSIGNALED(status)) fail_msg("the child died of signal %d", WTERMSIG(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

/* 0 when it is this code with this in its text, else `line`, after having said so. */
static int expect(int line, int code, const mlfab_error *error, int wanted, const char *text) {
  if (code == wanted && strstr(error->text, text)) return 0;
  fprintf(stderr, "line %d: %s: %s\n", line, mlfab_error_name(code), error->text);
  return 1;
}

static void limit_files(uint64_t bytes) {
  struct rlimit limit = {(rlim_t)bytes, RLIM_INFINITY};
  if (setrlimit(RLIMIT_FSIZE, &limit)) _exit(2);
}

static int save_beyond_limit(void) {
  mlfab_config c;
  mlfab_error error = {0};
  mlfab *ctx;
  mlfab_config_init(&c);
  if (mlfab_open(&c, &ctx, &error) || mlfab_tensor_add(ctx, 0, MLFAB_F32, 10000) ||
      mlfab_model_start(ctx, NULL, NULL, 0))
    return 3;
  limit_files(10000);
  int code = mlfab_save(ctx, "/tmp/mlfab-guest-too-large");
  mlfab_last_error(ctx, &error);
  mlfab_close(&ctx);
  return expect(__LINE__, code, &error, MLFAB_ERR_IO, "File too large");
}

static int open_beyond_limit(void) {
  mlfab_error error = {0};
  mlfab *ctx = NULL;
  limit_files(4096);
  return expect(__LINE__, begin(0, "shm", &ctx, &error), &error, MLFAB_ERR_IO, "File too large");
}

/* The limit for files does not kill: the call returns an error that says so. */
static void test_file_limit(void **state) {
  (void)state;
  in_child(save_beyond_limit);
  in_child(open_beyond_limit);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_signals),
      cmocka_unit_test(test_masks),
      cmocka_unit_test(test_file_limit),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
