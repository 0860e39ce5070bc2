/* world.c - one process of an MPI job that uses mlfab over MPI: mpirun -n N world [WORD=VALUE]... [-- [WORD=VALUE]...]...
 *
 * Words behind a `--` belong to one case, and words before the first `--` to all cases. A job runs its cases one after
 * the other, so one mpirun shows many of them. Without `--` there is one case, with number 0.
 *
 * For the whole job:
 *    init=none|single|funneled|serialized|multiple   how the program initialises MPI itself; none: mlfab does
 *    info=1             first prints mlfab_build_info()
 *
 * In a case:
 *    progress=thread|hand                            config.progress
 *    split=N            processes whose MPI rank has the same remainder modulo N are a fabric of their own
 *    new=1              the fabric is over a new communicator of all processes
 *    roles=3s,0c        MPI rank 3 has the role server, 0 scheduler; in a split, ranks of the part
 *    RANK:NAME=VALUE    mlfab_config_set in the process with this MPI rank; without `RANK:` in all
 *    absent=RANKS       these processes nap, and do not open a context
 *    late=RANKS         these processes nap before they open a context
 *    nap=MS             so long
 *    opens=N            opens and closes so many contexts one after the other (1), also after one that fails
 *    once=RANK          this process opens one context only
 *    idle=MS            the worker with rank 0 naps so long; the others wait for it in a barrier, and tell their
 *                       processor time
 *    spin=US            config.spin_ns, in microseconds
 *    large=N            elements of the large tensor (200000, at most 700000)
 *    cancels=N          every worker cancels N pushes at once, and overwrites their buffers with NaN
 *    open=1             MPI_Finalize comes before mlfab_close; the last case
 *    bare=1             exits without mlfab_close; the last case
 *
 * Every worker pushes its own updates, and the model counts them; then collectives of several sizes, whose sums are
 * known. A line begins with the number of its case: `0: ok rank R of W as WHAT` or `0: fail NAME RANK TEXT`; a process
 * that was not absent ends its case with `0: end CODE`. The exit status is 0 if all cases have run. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab.h"

#include <mpi.h>

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { SMALL = 1000, LARGEST = 700000, STEPS = 3 };

static mlfab *fabric;
static mlfab_config config;
static int mpi_rank = -1;
static long idle_ms;
static int large; /* elements of the second tensor */
static int cancels;
static int number;     /* of the case */
static MPI_Comm *comm; /* the communicator of the case */
static float *data, *model;

/* A line of the case, in one piece beside those of other processes. */
static void say(const char *format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  printf("%d: %s\n", number, text);
  fflush(stdout);
}

static int fail(int code, const mlfab_error *error) {
  say("fail %s %d %s", mlfab_error_name(code), (int)error->rank, error->text);
  return code;
}

static int failed(int code) {
  mlfab_error error = {.code = 0};
  if (!code) return 0;
  mlfab_last_error(fabric, &error);
  return fail(code, &error);
}

static int wrong(const char *what, double is, double should) {
  say("fail wrong %d %s is %g, not %g", mpi_rank, what, is, should);
  return MLFAB_ERR_INTERNAL;
}

/* ---- the work of a worker ---- */

/* Worker r adds r + 1 to every weight in each step. */
static int train(uint32_t rank, uint32_t workers) {
  mlfab_buf weights[] = {{0, 0, model, SMALL}, {1, 0, model + SMALL, (uint64_t)large}};
  mlfab_buf update[] = {{0, 0, data, SMALL}, {1, 0, data + SMALL, (uint64_t)large}};
  memset(model, 0, (size_t)(SMALL + large) * sizeof *model);
  int code = mlfab_tensor_add(fabric, 0, MLFAB_F32, SMALL);
  if (!code) code = mlfab_tensor_add(fabric, 1, MLFAB_F32, (uint64_t)large);
  if (!code) code = mlfab_model_start(fabric, NULL, weights, 2);
  for (int step = 0; step < STEPS && !code; step++) {
    for (int i = 0; i < SMALL + large; i++) data[i] = (float)(rank + 1);
    code = mlfab_push(fabric, update, 2, NULL, NULL);
  }
  if (!code) code = mlfab_barrier(fabric, NULL);
  if (!code) code = mlfab_pull(fabric, weights, 2, NULL, NULL);
  if (code) return failed(code);
  float should = (float)STEPS * (float)(workers * (workers + 1) / 2);
  for (int i = 0; i < SMALL + large; i++)
    if (model[i] != should) return wrong("a weight", (double)model[i], (double)should);
  return 0;
}

static int sum(uint32_t rank, uint32_t workers, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) data[i] = (float)(rank + i % 7);
  int code = mlfab_allreduce(fabric, data, count, MLFAB_F32, NULL);
  if (code) return failed(code);
  for (uint64_t i = 0; i < count; i++) {
    float should = (float)(workers * (workers - 1) / 2 + workers * (i % 7));
    if (data[i] != should) return wrong("a sum", (double)data[i], (double)should);
  }
  return 0;
}

/* None of the NaNs may come to the model. */
static int cancel(void) {
  mlfab_buf weights = {1, 0, model + SMALL, (uint64_t)large},
            update = {1, 0, data + SMALL, (uint64_t)large};
  mlfab_request push;
  int code = 0;
  for (int n = 0; n < cancels && !code; n++) {
    for (int i = 0; i < large; i++) data[SMALL + i] = 1;
    code = mlfab_push_start(fabric, &update, 1, NULL, &push);
    if (!code && n % 3) code = mlfab_progress(fabric, (uint64_t)(n % 3) * 300000) < 0;
    if (!code) code = mlfab_cancel(fabric, push);
    if (code) return failed(code);
    code = mlfab_wait(fabric, push, 0, NULL);
    if (code == MLFAB_ERR_CANCELLED || code == MLFAB_ERR_IN_DOUBT) code = 0;
    for (int i = 0; i < large; i++) data[SMALL + i] = NAN;
  }
  if (!code) code = mlfab_barrier(fabric, NULL);
  if (!code) code = mlfab_pull(fabric, &weights, 1, NULL, NULL);
  if (code) return failed(code);
  for (int i = 0; i < large; i++)
    if (!(model[SMALL + i] >= 0)) return wrong("a weight", (double)model[SMALL + i], 0);
  return 0;
}

static double processor_seconds(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static int idle(uint32_t rank) {
  struct timespec nap = {idle_ms / 1000, idle_ms % 1000 * 1000000};
  double before = processor_seconds();
  if (rank == 0) nanosleep(&nap, NULL);
  int code = mlfab_barrier(fabric, NULL);
  say("idle %u %.3f", rank, processor_seconds() - before);
  return failed(code);
}

static int work(void) {
  const uint64_t counts[] = {1, 10, 3000, 100000, (uint64_t)large};
  int32_t rank;
  uint32_t workers, servers;
  int code = mlfab_rank(fabric, &rank, &workers, &servers);
  if (code) return failed(code);
  if (rank < 0) {
    code = failed(mlfab_serve(fabric, 0));
    if (!code) say("ok rank %d of %u as server", mpi_rank, workers);
    return code;
  }
  code = train((uint32_t)rank, workers);
  for (size_t i = 0; i < sizeof counts / sizeof *counts && !code; i++)
    code = sum((uint32_t)rank, workers, counts[i]);
  if (!code && cancels) code = cancel();
  if (!code && idle_ms) code = idle((uint32_t)rank);
  if (!code) say("ok rank %d of %u as worker %d", mpi_rank, workers, (int)rank);
  return code;
}

static int open_and_work(int bare, int open) {
  mlfab_error error = {.code = 0};
  int code = mlfab_open(&config, &fabric, &error);
  if (code) return fail(code, &error);
  code = work();
  if (bare) exit(code ? 1 : 0);
  if (open) MPI_Finalize();
  int closed = mlfab_close(&fabric);
  return code ? code : closed;
}

/* ---- arguments ---- */

static struct {
  char **at;
  int count;
} words[2]; /* of the case, and of all cases */

static const char *value_of(const char *word, const char *standard) {
  size_t n = strlen(word);
  for (int k = 0; k < 2; k++) {
    for (int i = 0; i < words[k].count; i++)
      if (!strncmp(words[k].at[i], word, n) && words[k].at[i][n] == '=')
        return words[k].at[i] + n + 1;
  }
  return standard;
}

static int number_of(const char *word, int standard) {
  const char *value = value_of(word, NULL);
  return value ? atoi(value) : standard;
}

static int is_listed(const char *word, int rank) {
  const char *list = value_of(word, "");
  for (; *list; list += strcspn(list, ","), list += *list == ',')
    if (atoi(list) == rank) return 1;
  return 0;
}

static void set_roles(const char *roles, int rank) {
  for (; *roles; roles += strcspn(roles, ","), roles += *roles == ',') {
    char *end;
    if (strtol(roles, &end, 10) == rank)
      config.roles = *end == 's' ? MLFAB_ROLE_SERVER : MLFAB_ROLE_SCHEDULER;
  }
}

/* A setting that is mlfab's. */
static int set(char *word, int rank) {
  static const char *const own[] = {"init",    "split", "new",   "roles", "absent", "late",
                                    "nap",     "once",  "opens", "idle",  "open",   "bare",
                                    "cancels", "spin",  "info",  "large"};
  char name[64] = "";
  size_t n = strcspn(word, ":=");
  int mine = 1;
  if (word[n] == ':' && word[0] >= '0' && word[0] <= '9') {
    mine = atoi(word) == rank;
    word += n + 1;
    n = strcspn(word, "=");
  }
  for (size_t k = 0; k < sizeof own / sizeof *own; k++)
    mine &= strlen(own[k]) != n || strncmp(own[k], word, n) != 0;
  if (!mine || !word[n] || n >= sizeof name) return 0;
  memcpy(name, word, n);
  mlfab_error error = {.code = 0};
  int code = mlfab_config_set(&config, name, word + n + 1, &error);
  return code ? fail(code, &error) : 0;
}

static int set_config(int rank) {
  mlfab_config_init(&config);
  config.transports = MLFAB_USE_MPI;
  config.timeout_ns = 60000000000u;
  config.spin_ns = (uint64_t)number_of("spin", 0) * 1000;
  config.transport_user = comm;
  for (int k = 1; k >= 0; k--) {
    for (int i = 0; i < words[k].count; i++) {
      int code = set(words[k].at[i], rank);
      if (code) return code;
    }
  }
  set_roles(value_of("roles", ""), rank);
  return 0;
}

static int initialise(const char *how) {
  int level = !strcmp(how, "funneled")     ? MPI_THREAD_FUNNELED
              : !strcmp(how, "serialized") ? MPI_THREAD_SERIALIZED
              : !strcmp(how, "multiple")   ? MPI_THREAD_MULTIPLE
                                           : MPI_THREAD_SINGLE;
  int provided = 0;
  if (!strcmp(how, "none")) return 0;
  MPI_Init_thread(NULL, NULL, level, &provided);
  if (provided != level) printf("asked for level %d, got %d\n", level, provided);
  return 1;
}

/* ---- cases ---- */

static void nap(int ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
  nanosleep(&t, NULL);
}

/* Waits for the other processes. A blocking call of MPI would use a processor meanwhile. */
static void meet(void) {
  int begun = 0, ended = 0, done = 0;
  MPI_Request request;
  MPI_Initialized(&begun);
  MPI_Finalized(&ended);
  if (!begun || ended) return;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) nap(1);
}

/* The program's communicator carries no message of mlfab's. */
static int stray(void) {
  MPI_Status status;
  int found = 0;
  meet();
  for (int i = 0; i < 100 && !found; i++) {
    nap(1);
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm ? *comm : MPI_COMM_WORLD, &found, &status);
  }
  return found ? wrong("the source of a stray message", status.MPI_SOURCE, -1) : 0;
}

/* The communicator of the case, and this process's rank in it. */
static int choose_comm(void) {
  static MPI_Comm part;
  int split = number_of("split", 0), rank = mpi_rank;
  comm = NULL;
  if (!split && !number_of("new", 0)) return rank;
  comm = &part;
  MPI_Comm_split(MPI_COMM_WORLD, split ? mpi_rank % split : 0, 0, &part);
  MPI_Comm_rank(part, &rank);
  return rank;
}

static void run_case(void) {
  int opens = is_listed("once", mpi_rank) ? 1 : number_of("opens", 1);
  int absent = is_listed("absent", mpi_rank);
  large = number_of("large", 200000);
  cancels = number_of("cancels", 0);
  idle_ms = number_of("idle", 0);
  int code = set_config(choose_comm());
  if (absent || is_listed("late", mpi_rank)) nap(number_of("nap", 0));
  if (code) opens = 0;
  for (int i = 0; i < opens && !absent; i++) {
    int ended = open_and_work(number_of("bare", 0), number_of("open", 0));
    if (!code) code = ended;
  }
  int strays = value_of("late", NULL) ? stray() : 0;
  if (!code) code = strays;
  if (!absent) say("end %d", code);
  meet();
}

/* The rank that the launcher has told this process, before MPI is initialised. */
static int launched_rank(void) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK");
  if (!rank) rank = getenv("PMI_RANK");
  return rank ? atoi(rank) : 0;
}

/* Number of words before the next `--`. */
static int take_words(char **at) {
  int n = 0;
  while (at[n] && strcmp(at[n], "--") != 0) n++;
  return n;
}

int main(int argc, char **argv) {
  int ended = 0;
  (void)argc;
  char **at = argv + 1;
  words[1].at = at;
  words[1].count = take_words(at);
  at += words[1].count;
  if (number_of("info", 0)) printf("built %s\n", mlfab_build_info());
  int mine = initialise(value_of("init", "none"));
  data = calloc(SMALL + LARGEST, sizeof *data);
  model = calloc(SMALL + LARGEST, sizeof *model);
  mpi_rank = launched_rank();
  if (!data || !model) return 1;
  do {
    words[0].at = *at ? ++at : at;
    words[0].count = take_words(at);
    at += words[0].count;
    run_case();
    number++;
  } while (*at);
  MPI_Finalized(&ended);
  if (mine && !ended) MPI_Finalize();
  free(data);
  free(model);
  return 0;
}
