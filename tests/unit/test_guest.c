/* test_guest.c - the library's effects on its host process: signals, limits, forks, files. Uses the public
 * header only. Tests that may end a process run in a child. */
#define _DEFAULT_SOURCE
#include "mlfab_partial.h"

#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../testing.h"

static uint32_t fabrics; /* that this process has opened */

static void nap(void) {
  struct timespec t = {0, 1000000};
  nanosleep(&t, NULL);
}

static atomic_uint troubles; /* events about a member that died, left or rejoined */

static void on_event(void *user, const mlfab_event_info *info) {
  (void)user;
  if (info->kind == MLFAB_EVENT_DEAD || info->kind == MLFAB_EVENT_LEFT ||
      info->kind == MLFAB_EVENT_REJOINED)
    atomic_fetch_add(&troubles, 1);
}

/* One of two workers of this process; worker 0 serves. Returns the status of mlfab_open_start. */
static int begin(uint32_t rank, const char *scheme, mlfab **ctx_p, mlfab_error *error) {
  mlfab_config c;
  mlfab_config_init(&c);
  c.on_event = on_event;
  c.rank = (int32_t)rank;
  c.workers = 2;
  c.transports = strcmp(scheme, "shm") == 0 ? MLFAB_USE_SHM : MLFAB_USE_TCP;
  c.timeout_ns = UINT64_C(60000000000);
  snprintf(c.coordinator, sizeof c.coordinator, "%s%s-%ld-%u", scheme,
           c.transports == MLFAB_USE_SHM ? ":guest" : ":/tmp/mlfab-guest", (long)getpid(),
           (unsigned)fabrics);
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

/* Worker 0 serves until the other one has left, so it closes last. */
static void close_two(mlfab *pair[2]) {
  assert_int_equal(mlfab_close(&pair[1]), 0);
  assert_int_equal(mlfab_close(&pair[0]), 0);
}

/* --- signals --- */

/* A program that blocks a signal in its own threads and waits for it receives it: the library's thread does
 * not take it. */
TEST(test_signals) {
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

/* The signals that a thread of this process blocks, one bit each, as Linux prints them. */
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

/* Opening leaves this thread's mask unchanged. The library's threads block all signals except those of
 * faults, which go to the program's handler. */
TEST(test_masks) {
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
  if (child == 0) {
    signal(SIGSEGV, SIG_DFL); /* cmocka's handler would continue with the tests */
    _exit(fn());
  }
  assert_true(waitpid(child, &status, 0) == child);
  if (WIFSIGNALED(status)) fail_msg("the child died of signal %d", WTERMSIG(status));
  assert_int_equal(WEXITSTATUS(status), 0);
}

/* Returns 0 when the code matches and the text contains this; otherwise prints both and returns `line`. */
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

/* The limit on file sizes does not kill the process: the call returns an error that names it. */
TEST(test_file_limit) {
  in_child(save_beyond_limit);
  in_child(open_beyond_limit);
}

/* --- forks --- */

enum { COUNT = 20000 };

typedef struct pair {
  mlfab *node[2];
  mlfab_dag *dag;
  double *shared; /* worker 1's, of mlfab_alloc */
  double *lent[2];
} pair;

static pair P; /* for children */

static void check(int line, mlfab *ctx, int code) {
  mlfab_error error = {0};
  if (code == 0) return;
  mlfab_last_error(ctx, &error);
  fail_msg("line %d: %s: %s", line, mlfab_error_name(code), error.text);
}
#define OK(ctx, call) check(__LINE__, ctx, call)

static void *reduce(void *node) {
  uint32_t i = node == P.node[1];
  for (int k = 0; k < 4; k++) /* from the third on in shared memory */
    OK(node, mlfab_allreduce(node, P.lent[i], COUNT, MLFAB_F64, NULL));
  return NULL;
}

static void reduce_both(void) {
  pthread_t other;
  for (uint32_t i = 0; i < COUNT; i++) P.lent[0][i] = P.lent[1][i] = 1;
  assert_int_equal(pthread_create(&other, NULL, reduce, P.node[1]), 0);
  reduce(P.node[0]);
  pthread_join(other, NULL);
  for (uint32_t i = 0; i < COUNT; i++) assert_true(P.lent[0][i] == 16 && P.lent[1][i] == 16);
}

static void push_both(double sum) {
  static double u[COUNT], w[COUNT];
  mlfab_buf update = {0, 0, u, COUNT}, weights = {0, 0, w, COUNT};
  for (uint32_t i = 0; i < COUNT; i++) u[i] = 1;
  for (uint32_t k = 0; k < 2; k++) OK(P.node[k], mlfab_push(P.node[k], &update, 1, NULL, NULL));
  for (uint32_t k = 0; k < 2; k++) {
    OK(P.node[k], mlfab_pull(P.node[k], &weights, 1, NULL, NULL));
    for (uint32_t i = 0; i < COUNT; i++) assert_true(w[i] == sum);
  }
}

static int calls_fail(void) {
  int wrong = 0, done, fd;
  uint32_t op;
  uint64_t ns, count;
  double data[2] = {0};
  const void *cached;
  void *memory;
  mlfab *ctx = P.node[1];
  mlfab_dag *dag;
  mlfab_buf buf = {0, 0, data, 1};
  mlfab_vec vec = {data, 2};
  mlfab_request request = 1;
  mlfab_result result;
  mlfab_stats stats;
  mlfab_filter filter = {.size = sizeof filter};
  mlfab_schedule schedule;
  mlfab_sync sync = {.size = sizeof sync};
  mlfab_error error = {0};
  mlfab_schedule_init(&schedule);
  const int codes[] = {mlfab_push(ctx, &buf, 1, NULL, NULL),
                       mlfab_push_start(ctx, &buf, 1, NULL, NULL),
                       mlfab_pull(ctx, &buf, 1, NULL, NULL),
                       mlfab_pull_start(ctx, &buf, 1, NULL, &request),
                       mlfab_wait(ctx, request, 0, &result),
                       mlfab_test(ctx, request, &done, &result),
                       mlfab_cancel(ctx, request),
                       mlfab_flush(ctx, 0),
                       mlfab_progress(ctx, 0),
                       mlfab_deadline(ctx, &ns),
                       mlfab_fd(ctx, &fd),
                       mlfab_is_ready(ctx, NULL),
                       mlfab_barrier(ctx, NULL),
                       mlfab_broadcast(ctx, 0, data, 8, NULL),
                       mlfab_finish(ctx, 0),
                       mlfab_serve(P.node[0], 1),
                       mlfab_save(ctx, "/tmp/mlfab-guest-child"),
                       mlfab_set_filter(ctx, 0, &filter),
                       mlfab_set_sync(ctx, &sync, MLFAB_ALL, 0),
                       mlfab_set_schedule(ctx, &schedule),
                       mlfab_set_link(ctx, 1, 1),
                       mlfab_explain(ctx, NULL, 0, NULL),
                       mlfab_set_other_traffic(ctx, 1, 1, 0),
                       mlfab_metrics(ctx, 0, NULL, 0, NULL),
                       mlfab_log(ctx, MLFAB_LOG_ERROR, "x"),
                       mlfab_cached(ctx, 0, &cached, &count),
                       mlfab_get_stats(ctx, &stats, sizeof stats),
                       mlfab_rank(ctx, NULL, NULL, NULL),
                       mlfab_alloc(ctx, 8, &memory),
                       mlfab_free(ctx, P.shared),
                       mlfab_allreduce(ctx, data, 2, MLFAB_F64, NULL),
                       mlfab_allreduce_start(ctx, &vec, 1, MLFAB_F64, NULL, &request),
                       mlfab_dag_create(ctx, &dag),
                       mlfab_dag_nop(P.dag, &op),
                       mlfab_dag_close(&P.dag)};
  for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++) {
    if (codes[i] == MLFAB_ERR_STATE) continue;
    fprintf(stderr, "call %zu in a child: %s\n", i, mlfab_error_name(codes[i]));
    wrong++;
  }
  wrong += expect(__LINE__, mlfab_last_error(ctx, &error) ? 0 : error.code, &error, MLFAB_ERR_STATE,
                  "is a fork");
  return wrong != 0;
}

static int touch(void) {
  *(volatile double *)P.shared = 666; /* is not copied back where the memory is shared */
  return 0;
}

/* In the child every call fails, the other members notice nothing, and the child can free what it
 * inherited. */
static int be_a_child(void) {
  pid_t child = fork();
  if (child == 0) _exit(touch());
  waitpid(child, NULL, 0);
  int wrong = calls_fail();
  wrong |= mlfab_close(&P.node[1]) != 0 || P.node[1] != NULL;
  wrong |= mlfab_abandon(&P.node[0]) != 0 || P.node[0] != NULL;
  return wrong;
}

static void fork_over(const char *scheme) {
  mlfab_stats stats;
  memset(&P, 0, sizeof P);
  open_two(scheme, P.node);
  for (uint32_t i = 0; i < 2; i++) {
    OK(P.node[i], mlfab_tensor_add(P.node[i], 0, MLFAB_F64, COUNT));
    OK(P.node[i], mlfab_model_start(P.node[i], NULL, NULL, 0));
    OK(P.node[i], mlfab_alloc(P.node[i], COUNT * 8, (void **)(void *)&P.lent[i]));
  }
  OK(P.node[1], mlfab_alloc(P.node[1], 4096, (void **)(void *)&P.shared));
  OK(P.node[1], mlfab_dag_create(P.node[1], &P.dag));
  push_both(2);
  reduce_both();
  atomic_store(&troubles, 0);
  for (int i = 0; i < 3; i++) in_child(be_a_child);
  assert_true(P.shared[0] == 0);
  push_both(4);
  reduce_both();
  for (uint32_t i = 0; i < 2; i++) {
    OK(P.node[i], mlfab_get_stats(P.node[i], &stats, sizeof stats));
    assert_int_equal(stats.reconnects, 0);
  }
  assert_int_equal(atomic_load(&troubles), 0);
  OK(P.node[1], mlfab_dag_close(&P.dag));
  close_two(P.node);
}

TEST(test_fork_shm) { fork_over("shm"); }

TEST(test_fork_unix) { fork_over("unix"); }

static int open_anew(void) {
  mlfab_config c;
  mlfab_error error = {0};
  mlfab *ctx;
  mlfab_config_init(&c);
  int code = mlfab_open(&c, &ctx, &error);
  if (!code) code = mlfab_tensor_add(ctx, 0, MLFAB_F32, 1);
  return code || mlfab_close(&ctx);
}

/* A child may open a context of its own. */
TEST(test_fork_open) { in_child(open_anew); }

/* --- files --- */

enum { SAVED = 200000, SAVES = 15 };

static mlfab *saver;
static char folder[64], saved[96];
static atomic_uint short_files;

/* A reader always finds a complete file. */
static void *save(void *unused) {
  for (int i = 0; i < SAVES; i++) {
    struct stat status;
    OK(saver, mlfab_save(saver, saved));
    if (stat(saved, &status) || status.st_size < SAVED * 4) atomic_fetch_add(&short_files, 1);
  }
  return unused;
}

static mode_t mode_of(const char *path) {
  struct stat status;
  assert_int_equal(stat(path, &status), 0);
  return status.st_mode & 0777;
}

/* Concurrent saves to one path do not mix: the file is complete and has the mode of the program's other
 * files, and no temporary file is left in its folder. */
TEST(test_save_together) {
  pthread_t thread[3];
  mlfab_config c;
  mlfab_error error;
  snprintf(folder, sizeof folder, "/tmp/mlfab-guest-%ld", (long)getpid());
  snprintf(saved, sizeof saved, "%s/model.safetensors", folder);
  assert_int_equal(mkdir(folder, 0700), 0);
  mlfab_config_init(&c);
  assert_int_equal(mlfab_open(&c, &saver, &error), 0);
  OK(saver, mlfab_tensor_add(saver, 0, MLFAB_F32, SAVED));
  OK(saver, mlfab_model_start(saver, NULL, NULL, 0));
  mode_t before = umask(027);
  for (int i = 0; i < 3; i++) assert_int_equal(pthread_create(&thread[i], NULL, save, NULL), 0);
  for (int i = 0; i < 3; i++) pthread_join(thread[i], NULL);
  umask(before);
  assert_int_equal(atomic_load(&short_files), 0);
  assert_int_equal(mode_of(saved), 0640);
  assert_int_equal(mlfab_save(saver, "/tmp"), MLFAB_ERR_IO); /* cannot replace a folder */
  mlfab_last_error(saver, &error);
  assert_non_null(strstr(error.text, "'/tmp' cannot be written: "));
  assert_int_equal(mlfab_close(&saver), 0);
  assert_int_equal(unlink(saved), 0);
  assert_int_equal(rmdir(folder), 0); /* it is empty */
}

TESTS(NULL, NULL)
