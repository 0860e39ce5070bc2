/* replica_worker.c - a worker of replica_test.py and soak_test.py: it counts what it was promised.
 *
 *   replica_worker FOLDER COUNT [collective] [versions] [expires=MS] [paced]
 *
 * The model is one F64 tensor of 2 * workers * COUNT elements. Element e counts updates: those of worker e / 2 % workers
 * that were to be DURABLE if e is even, APPLIED if it is odd. A worker has one durable push in flight at a time, and
 * beside it applied ones, one after the other. `collective`: with each of these it makes an allreduce, too. `versions`:
 * FOLDER/RANK.versions gets a line for each push that was answered: d or a, and the version of its commit. `expires`: a
 * durable push has so long, and one that had no answer by then is counted. `paced`: it pauses for a millisecond after
 * three of four applied pushes, so that the copies have the processors.
 *
 * Its counters are in the file FOLDER/RANK, which survives it (enum below). At the end it prints a line for each worker:
 *   final R <least and largest of the durable elements> <least and largest of the applied ones> */
#include "node.h"

#include <fcntl.h>
#include <sys/mman.h>

enum { RUN, STOP, READ }; /* of CONTROL, which the test writes */
enum {
  CONTROL,
  PID,
  LIVES,           /* processes that have begun to push */
  STARTED_DURABLE, /* pushes */
  DONE_DURABLE,
  STARTED_APPLIED,
  DONE_APPLIED,
  LOST,       /* stats.updates_lost */
  LAST_START, /* the last applied push that is done: CLOCK_MONOTONIC, in ns */
  LAST_DONE,
  STOPPED, /* it has finished, and waits for READ */
  SUMS,    /* collectives */
  EXPIRED, /* durable pushes without an answer at their own deadline */
  WORDS
};

static volatile uint64_t *at; /* the counters */
static uint64_t lost_before;  /* by former processes */
static uint64_t count;
static double *model, *durable, *applied;
static mlfab_request request;          /* of the durable push */
static uint64_t timeout_ns, opened_ns; /* the durable push has so long */
static int in_flight, collective, paced;
static uint64_t expires_ns; /* a durable push's own deadline; 0: the configuration's */
static FILE *versions;

static volatile uint64_t *counters(const char *path) {
  int fd = open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, WORDS * 8)) exit(failed(path));
  void *found = mmap(NULL, WORDS * 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (found == MAP_FAILED) exit(failed(path));
  return found;
}

static void count_losses(void) {
  mlfab_stats stats;
  if (!mlfab_get_stats(fabric, &stats, sizeof stats)) at[LOST] = lost_before + stats.updates_lost;
}

/* A push was answered. */
static void note_version(char kind, const mlfab_result *result) {
  if (!versions) return;
  fprintf(versions, "%c %llu\n", kind, (unsigned long long)result->version);
  fflush(versions);
}

static mlfab_buf all_of(double *values) { return (mlfab_buf){0, 0, values, 2 * workers * count}; }

/* Ends the durable push if it is done, or waits for that, and starts the next one unless all is to end. */
static void push_durable(int wait) {
  int done = 0, code = 0;
  mlfab_result result;
  if (in_flight && !wait) code = mlfab_test(fabric, request, &done, &result);
  if (!code && done) code = result.status;
  if (!code && !done && in_flight && now_ns() - opened_ns > timeout_ns) wait = 1;
  if (in_flight && wait) code = mlfab_wait(fabric, request, timeout_ns, &result);
  int expired = expires_ns && (code == MLFAB_ERR_TIMEOUT || code == MLFAB_ERR_IN_DOUBT);
  if (!expired) must("durable push", code);
  if (in_flight && !wait && !done) return;
  if (in_flight) at[expired ? EXPIRED : DONE_DURABLE]++;
  if (in_flight && !expired) note_version('d', &result);
  in_flight = 0;
  if (wait) return;
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  mlfab_buf update = all_of(durable);
  options.ack = MLFAB_ACK_DURABLE;
  options.timeout_ns = expires_ns;
  at[STARTED_DURABLE]++;
  code = mlfab_push_start(fabric, &update, 1, &options, &request);
  if (code == MLFAB_ERR_AGAIN) { /* too many are under way */
    at[STARTED_DURABLE]--;
    return;
  }
  must("durable push", code);
  in_flight = 1;
  opened_ns = now_ns();
}

static void push_applied(void) {
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  mlfab_buf update = all_of(applied);
  mlfab_result result;
  options.ack = MLFAB_ACK_APPLIED;
  uint64_t began = now_ns();
  at[STARTED_APPLIED]++;
  int code = mlfab_push(fabric, &update, 1, &options, &result);
  if (code == MLFAB_ERR_AGAIN) { /* the durable one waits for long */
    at[STARTED_APPLIED]--;
    nap(1);
    return;
  }
  must("applied push", code);
  note_version('a', &result);
  at[DONE_APPLIED]++;
  at[LAST_DONE] = now_ns();
  at[LAST_START] = began;
}

/* All stop after the same collective. */
static int stops(void) {
  double sum[2] = {at[CONTROL] != RUN, 1.0};
  if (!collective) return sum[0] > 0;
  must("allreduce", mlfab_allreduce(fabric, sum, 2, MLFAB_F64, NULL));
  at[SUMS]++;
  if (sum[1] == (double)workers) return sum[0] > 0;
  fprintf(stderr, "a sum over %g of %u workers\n", sum[1], workers);
  exit(1);
}

static void read_model(void) {
  mlfab_buf all = all_of(model);
  must("last pull", mlfab_pull(fabric, &all, 1, NULL, NULL));
  for (uint32_t r = 0; r < workers; r++) {
    double least[2], most[2];
    for (uint32_t k = 0; k < 2; k++) {
      least[k] = most[k] = model[2 * r + k];
      for (uint64_t i = 0; i < count; i++) {
        double v = model[2 * (i * workers + r) + k];
        if (v < least[k]) least[k] = v;
        if (v > most[k]) most[k] = v;
      }
    }
    printf("final %u %.17g %.17g %.17g %.17g\n", r, least[0], most[0], least[1], most[1]);
  }
}

static void work(void) {
  mlfab_buf first = all_of(model);
  for (uint64_t i = 0; i < count; i++) {
    uint64_t e = 2 * (i * workers + (uint64_t)rank);
    durable[e] = applied[e + 1] = 1.0;
  }
  must("tensor", mlfab_tensor_add(fabric, 0, MLFAB_F64, first.count));
  must("model", mlfab_model_start(fabric, NULL, &first, 1));
  at[LIVES]++;
  for (int end = 0; !end; end = stops()) {
    push_durable(0);
    push_applied();
    count_losses();
    if (paced && at[STARTED_APPLIED] % 4) nap(1);
  }
  push_durable(1);
  must("finish", mlfab_finish(fabric, 0));
  count_losses();
  at[STOPPED] = 1;
  while (at[CONTROL] != READ) nap(5);
  read_model();
}

static void prepare(const char *folder, char **words) {
  char name[32];
  for (; *words; words++) {
    snprintf(name, sizeof name, "%d.versions", rank);
    if (!strcmp(*words, "collective")) collective = 1;
    if (!strcmp(*words, "paced")) paced = 1;
    if (!strncmp(*words, "expires=", 8)) expires_ns = strtoull(*words + 8, NULL, 10) * MS;
    if (!strcmp(*words, "versions") && !(versions = fopen(path_of(folder, name), "a")))
      exit(failed(path_of(folder, name)));
  }
  snprintf(name, sizeof name, "%d", rank);
  at = counters(path_of(folder, name));
  model = zeros(2 * workers * count, sizeof *model);
  durable = zeros(2 * workers * count, sizeof *durable);
  applied = zeros(2 * workers * count, sizeof *applied);
  at[PID] = (uint64_t)getpid();
  at[STOPPED] = 0;
  lost_before = at[LOST];
}

int main(int argc, char **argv) {
  mlfab_config config;
  if (argc < 3) return 2;
  configure(&config);
  open_node(&config);
  count = strtoull(argv[2], NULL, 10);
  timeout_ns = config.timeout_ns;
  prepare(argv[1], argv + 3);
  work();
  return close_node(0);
}
