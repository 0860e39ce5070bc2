/* world.c - one process of an MPI job that uses mlfab over MPI: mpirun -n N world [WORD=VALUE]...
 *
 *    init=none|single|funneled|serialized|multiple   how the program initialises MPI itself; none: mlfab does
 *    progress=thread|hand                            config.progress
 *    split=N            processes whose MPI rank has the same remainder modulo N are a fabric of their own
 *    roles=3s,0c        MPI rank 3 has the role server, 0 scheduler; in a split, ranks of the part
 *    RANK:NAME=VALUE    mlfab_config_set in the process with this MPI rank; without `RANK:` in all
 *    absent=RANKS       these processes do not open a context; or, with late=MS, so much later than the others
 *    opens=N            opens and closes so many contexts one after the other (1), also after one that fails
 *    once=RANK          this process opens one context only
 *    idle=MS            the worker with rank 0 naps so long; the others wait for it in a barrier, and tell their
 *                       processor time
 *    spin=US            config.spin_ns, in microseconds
 *    info=1             says what was compiled in, before anything else
 *    cancels=N          every worker cancels N pushes at once, and overwrites their buffers with NaN
 *    open=1             MPI_Finalize comes before mlfab_close
 *    bare=1             exits without mlfab_close
 *
 * Every worker pushes its own updates, and the model counts them; then collectives of several sizes, whose sums are
 * known. Prints a line `ok rank R of W as WHAT` or `fail NAME RANK TEXT`. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab.h"

#include <mpi.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { SMALL = 1000, LARGE = 700000, STEPS = 5 };

static mlfab *fabric;
static mlfab_config config;
static int mpi_rank = -1;
static long idle_ms;
static int cancels;
static float *data, *model;

static int fail(int code, const mlfab_error *error) {
  printf("fail %s %d %s\n", mlfab_error_name(code), (int)error->rank, error->text);
  fflush(stdout);
  return code;
}

static int failed(int code) {
  mlfab_error error = {.code = 0};
  if (!code) return 0;
  mlfab_last_error(fabric, &error);
  return fail(code, &error);
}

static int wrong(const char *what, double is, double should) {
  printf("fail wrong %d %s is %g, not %g\n", mpi_rank, what, is, should);
  fflush(stdout);
  return MLFAB_ERR_INTERNAL;
}

/* ---- the work of a worker ---- */

/* Worker r adds r + 1 to every weight in each step. */
static int train(uint32_t rank, uint32_t workers) {
  mlfab_buf weights[] = {{0, 0, model, SMALL}, {1, 0, model + SMALL, LARGE}};
  mlfab_buf update[] = {{0, 0, data, SMALL}, {1, 0, data + SMALL, LARGE}};
  memset(model, 0, (SMALL + LARGE) * sizeof *model);
  int code = mlfab_tensor_add(fabric, 0, MLFAB_F32, SMALL);
  if (!code) code = mlfab_tensor_add(fabric, 1, MLFAB_F32, LARGE);
  if (!code) code = mlfab_model_start(fabric, NULL, weights, 2);
  for (int step = 0; step < STEPS && !code; step++) {
    for (int i = 0; i < SMALL + LARGE; i++) data[i] = (float)(rank + 1);
    code = mlfab_push(fabric, update, 2, NULL, NULL);
  }
  if (!code) code = mlfab_barrier(fabric, NULL);
  if (!code) code = mlfab_pull(fabric, weights, 2, NULL, NULL);
  if (code) return failed(code);
  float should = (float)STEPS * (float)(workers * (workers + 1) / 2);
  for (int i = 0; i < SMALL + LARGE; i++)
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
  mlfab_buf weights = {1, 0, model + SMALL, LARGE}, update = {1, 0, data + SMALL, LARGE};
  mlfab_request push;
  int code = 0;
  for (int n = 0; n < cancels && !code; n++) {
    for (int i = 0; i < LARGE; i++) data[SMALL + i] = 1;
    code = mlfab_push_start(fabric, &update, 1, NULL, &push);
    if (!code && n % 3) code = mlfab_progress(fabric, (uint64_t)(n % 3) * 300000) < 0;
    if (!code) code = mlfab_cancel(fabric, push);
    if (code) return failed(code);
    code = mlfab_wait(fabric, push, 0, NULL);
    if (code == MLFAB_ERR_CANCELLED || code == MLFAB_ERR_IN_DOUBT) code = 0;
    for (int i = 0; i < LARGE; i++) data[SMALL + i] = NAN;
  }
  if (!code) code = mlfab_barrier(fabric, NULL);
  if (!code) code = mlfab_pull(fabric, &weights, 1, NULL, NULL);
  if (code) return failed(code);
  for (int i = 0; i < LARGE; i++)
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
  printf("idle %u %.3f\n", rank, processor_seconds() - before);
  return failed(code);
}

static int work(void) {
  static const uint64_t counts[] = {1, 10, 3000, 100000, LARGE};
  int32_t rank;
  uint32_t workers, servers;
  int code = mlfab_rank(fabric, &rank, &workers, &servers);
  if (code) return failed(code);
  if (rank < 0) {
    code = failed(mlfab_serve(fabric, 0));
    if (!code) printf("ok rank %d of %u as server\n", mpi_rank, workers);
    return code;
  }
  code = train((uint32_t)rank, workers);
  for (size_t i = 0; i < sizeof counts / sizeof *counts && !code; i++)
    code = sum((uint32_t)rank, workers, counts[i]);
  if (!code && cancels) code = cancel();
  if (!code && idle_ms) code = idle((uint32_t)rank);
  if (!code) printf("ok rank %d of %u as worker %d\n", mpi_rank, workers, (int)rank);
  return code;
}

static int open_and_work(int bare, int open) {
  mlfab_error error = {.code = 0};
  int code = mlfab_open(&config, &fabric, &error);
  if (code) return fail(code, &error);
  code = work();
  fflush(stdout);
  if (bare) exit(code ? 1 : 0);
  if (open) MPI_Finalize();
  int closed = mlfab_close(&fabric);
  return code ? code : closed;
}

/* ---- arguments ---- */

static const char *value_of(int argc, char **argv, const char *word, const char *standard) {
  size_t n = strlen(word);
  for (int i = 1; i < argc; i++)
    if (!strncmp(argv[i], word, n) && argv[i][n] == '=') return argv[i] + n + 1;
  return standard;
}

static void set_roles(const char *roles, int rank) {
  for (; *roles; roles += strcspn(roles, ","), roles += *roles == ',') {
    char *end;
    if (strtol(roles, &end, 10) == rank)
      config.roles = *end == 's' ? MLFAB_ROLE_SERVER : MLFAB_ROLE_SCHEDULER;
  }
}

/* The settings that are mlfab's. */
static int set_config(int argc, char **argv, int rank) {
  static const char *const own[] = {"init", "split", "roles", "absent",  "late", "once", "opens",
                                    "idle", "open",  "bare",  "cancels", "spin", "info"};
  for (int i = 1; i < argc; i++) {
    char name[64] = "", *at = argv[i];
    size_t n = strcspn(at, ":=");
    int mine = 1;
    if (at[n] == ':' && at[0] >= '0' && at[0] <= '9') {
      mine = atoi(at) == rank;
      at += n + 1;
      n = strcspn(at, "=");
    }
    for (size_t k = 0; k < sizeof own / sizeof *own; k++)
      mine &= strlen(own[k]) != n || strncmp(own[k], at, n) != 0;
    if (!mine || !at[n] || n >= sizeof name) continue;
    memcpy(name, at, n);
    mlfab_error error = {.code = 0};
    int code = mlfab_config_set(&config, name, at + n + 1, &error);
    if (code) return fail(code, &error);
  }
  set_roles(value_of(argc, argv, "roles", ""), rank);
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

static int is_listed(const char *list, int rank) {
  for (; *list; list += strcspn(list, ","), list += *list == ',')
    if (atoi(list) == rank) return 1;
  return 0;
}

/* The program's communicator carries no message of mlfab's. */
static int stray(void) {
  MPI_Status status;
  int found = 0;
  MPI_Barrier(MPI_COMM_WORLD);
  for (int i = 0; i < 100 && !found; i++) {
    struct timespec nap = {0, 1000000};
    nanosleep(&nap, NULL);
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &found, &status);
  }
  return found ? wrong("the source of a stray message", status.MPI_SOURCE, -1) : 0;
}

/* The rank that the launcher has told this process, before MPI is initialised. */
static int launched_rank(void) {
  const char *rank = getenv("OMPI_COMM_WORLD_RANK");
  if (!rank) rank = getenv("PMI_RANK");
  return rank ? atoi(rank) : 0;
}

int main(int argc, char **argv) {
  static MPI_Comm part;
  int split = atoi(value_of(argc, argv, "split", "0")), code = 0, rank;
  int open = atoi(value_of(argc, argv, "open", "0")),
      bare = atoi(value_of(argc, argv, "bare", "0"));
  int opens = atoi(value_of(argc, argv, "opens", "1"));
  cancels = atoi(value_of(argc, argv, "cancels", "0"));
  idle_ms = atoi(value_of(argc, argv, "idle", "0"));
  if (atoi(value_of(argc, argv, "info", "0"))) printf("built %s\n", mlfab_build_info());
  int mine = initialise(value_of(argc, argv, "init", "none"));
  data = calloc(SMALL + LARGE, sizeof *data);
  model = calloc(SMALL + LARGE, sizeof *model);
  rank = mpi_rank = launched_rank();
  if (!data || !model) return 1;
  mlfab_config_init(&config);
  config.transports = MLFAB_USE_MPI;
  config.timeout_ns = 60000000000u;
  config.spin_ns = strtoull(value_of(argc, argv, "spin", "0"), NULL, 10) * 1000;
  if (split) {
    MPI_Comm_split(MPI_COMM_WORLD, mpi_rank % split, 0, &part);
    MPI_Comm_rank(part, &rank);
    config.transport_user = &part;
  }
  code = set_config(argc, argv, rank);
  if (code) return 1;
  int late_ms = atoi(value_of(argc, argv, "late", "0"));
  if (is_listed(value_of(argc, argv, "once", ""), mpi_rank)) opens = 1;
  int absent = !code && is_listed(value_of(argc, argv, "absent", ""), mpi_rank);
  if (absent) {
    long ms = late_ms ? late_ms : 4000;
    struct timespec nap = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&nap, NULL);
  }
  for (int i = 0; i < opens && !(absent && !late_ms); i++) {
    int ended = open_and_work(bare, open);
    if (!code) code = ended;
  }
  if (late_ms && !code && mine) code = stray();
  if (mine && !open) MPI_Finalize();
  free(data);
  free(model);
  return code ? 1 : 0;
}
