/* bench.c - how fast mlfab is, beside what it is measured against, and beside what the machine can do.
 *
 *    build/bench [build/bench.tsv] [--quick] [--trials N] [--only PREFIX] [--limit SECONDS]
 *
 * In every cell (an operation, a transport, a size, a number of workers) mlfab and its peers stand
 * ready as real processes and run a trial each in turns, and so do the limits (adding and copying with
 * one core); the medians of the trials are reported. A table for people goes to standard output; the
 * file gets one row a figure and peer.
 *
 *    push, pull      payload bytes a second, a few messages under way, timed in the workers from the
 *                    first one's start to the last one's last answer; no checksum over payloads
 *    push-crc        the same with mlfab's checksum, its default over TCP
 *    push-keyed, pull-keyed   the same in a fabric with a key: a tag on every frame
 *    push-tls, pull-tls       the same with TLS instead of tags (extras/mlfab_tls.c)
 *    push-alloc, pull-alloc   over shared memory, where the worker's buffer is of mlfab_alloc
 *    pull-view       microseconds of a view of the model and its release, over shared memory
 *    messages        pushes of 4 KB a second that nobody asks after one by one
 *    roundtrip       a push of 64 bytes, blocking; -spin: hand-driven and polling, both sides
 *    server-cpu      CPU seconds of the server process for 1e9 bytes pushed
 *    allocations     of worker and server together, for 1,000 pushes
 *    idle            CPU seconds a second of an idle worker and server together
 *    memory          what each role allocates, as a multiple of the model
 *
 * Sizes are powers of two: 1 MB is 1,048,576 bytes; a GB/s is 1e9 bytes a second. With one worker it
 * and the server have a core each where there are two. */
#include "bench.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TRIALS_MAX = 101, PLAYERS = 4, VALUES = 4 };

typedef struct settings {
  int trials, quick;
  const char *only;
  FILE *tsv;
  int failures, rows;
  uint64_t end_ns; /* cells that would start later are left out, and counted as failed */
} settings;

/* A cell: the contestants, and the limit that the result is compared with. */
typedef struct cell {
  const char *what; /* of the figure's name */
  bench_job job;
  const bench_player *player[PLAYERS]; /* mlfab first */
} cell;

/* The medians of a cell. */
typedef struct outcome {
  int played[PLAYERS];
  bench_trial median[PLAYERS];
  double add, copy, line;
} outcome;

typedef struct figure {
  char name[64];
  const char *unit;
  int better_is_more;
  double value[PLAYERS];
  const char *limit;
  double limit_value;
} figure;

/* ---------------------------------------------------------------------------------------------
 * Names and numbers
 */
static const char *size_name(size_t bytes) {
  static char name[32];
  if (bytes >= MIB) {
    snprintf(name, sizeof name, "%zuMB", bytes / MIB);
  } else if (bytes >= 1024) {
    snprintf(name, sizeof name, "%zuKB", bytes / 1024);
  } else {
    snprintf(name, sizeof name, "%zuB", bytes);
  }
  return name;
}

static void figure_name(char name[64], const char *what, const bench_job *job) {
  snprintf(name, 64, "%s/%s%s/%s/%u", what, job->transport == BENCH_TCP ? "tcp" : "shm",
           job->spin ? "-spin" : "", size_name(job->bytes), job->workers);
}

static int wanted(const settings *s, const char *what, const bench_job *job) {
  char name[64];
  figure_name(name, what, job);
  return !s->only || !strncmp(name, s->only, strlen(s->only));
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double median(double *values, int n) {
  qsort(values, (size_t)n, sizeof *values, ascending);
  return n ? values[n / 2] : 0;
}

static bench_trial median_trial(const bench_trial *trials, int n) {
  double column[VALUES][TRIALS_MAX];
  for (int i = 0; i < n; i++) {
    column[0][i] = trials[i].seconds;
    column[1][i] = trials[i].server_cpu;
    column[2][i] = trials[i].worker_cpu;
    column[3][i] = trials[i].allocations;
  }
  return (bench_trial){median(column[0], n), median(column[1], n), median(column[2], n),
                       median(column[3], n)};
}

/* ---------------------------------------------------------------------------------------------
 * Output
 */

/* Three significant digits. */
static const char *number(char text[32], double value) {
  double size = fabs(value);
  int digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  if (size >= 1e5) {
    snprintf(text, 32, "%.3g", value);
  } else {
    snprintf(text, 32, "%.*f", digits, value);
  }
  return text;
}

static void figure_print(settings *s, const cell *c, const outcome *o, const figure *f) {
  char text[32];
  int peers = 0;
  printf("%-24s %9s %-9s", f->name, number(text, f->value[0]), f->unit);
  if (f->limit && f->limit_value > 0) {
    printf("  %s %s (%.2fx)", f->limit, number(text, f->limit_value), f->value[0] / f->limit_value);
  }
  for (int i = 1; i < PLAYERS; i++) {
    if (!c->player[i] || !o->played[i]) continue;
    printf("  %s %s", c->player[i]->name, number(text, f->value[i]));
    if (f->value[i] > 0) printf(" (%.2fx)", f->value[0] / f->value[i]);
  }
  printf("\n");
  fflush(stdout);
  for (int i = 1; i <= PLAYERS && s->tsv; i++) {
    int peer = i < PLAYERS && c->player[i] && o->played[i];
    if (!peer && (i < PLAYERS || peers)) continue;
    fprintf(s->tsv, "%s\t%.6g\t%s\t%s\t", f->name, f->value[0], f->unit,
            peer ? c->player[i]->name : "-");
    if (peer) fprintf(s->tsv, "%.6g", f->value[i]);
    if (!peer) fprintf(s->tsv, "-");
    if (f->limit && f->limit_value > 0) {
      fprintf(s->tsv, "\t%s\t%.6g\n", f->limit, f->limit_value);
    } else {
      fprintf(s->tsv, "\t-\t-\n");
    }
    peers += peer;
  }
  if (s->tsv) fflush(s->tsv);
  s->rows++;
}

/* The figure taken from a trial of a cell, for player i. */
enum reading { RATE, PER_SECOND, MICROSECONDS, SERVER_CPU, ALLOCATIONS };

static double read_off(enum reading reading, const bench_job *job, const bench_trial *t) {
  double messages = (double)job->messages * job->workers;
  switch (reading) {
    case RATE:
      return messages * (double)job->bytes / t->seconds / 1e9;
    case PER_SECOND:
      return messages / t->seconds;
    case MICROSECONDS:
      return t->seconds / messages * 1e6;
    case SERVER_CPU:
      return t->server_cpu / (messages * (double)job->bytes / 1e9);
    case ALLOCATIONS:
      return t->allocations / messages * 1000;
  }
  return 0;
}

static void report(settings *s, const cell *c, const outcome *o, const char *what,
                   enum reading reading, const char *unit, const char *limit, double limit_value) {
  figure f = {.unit = unit, .limit = limit, .limit_value = limit_value};
  cell shown = *c;
  if (!wanted(s, what, &c->job)) return;
  figure_name(f.name, what, &c->job);
  for (int i = 0; i < PLAYERS; i++) {
    if (!o->played[i]) continue;
    f.value[i] = read_off(reading, &c->job, &o->median[i]);
    if (i > 0 && reading == ALLOCATIONS) shown.player[i] = NULL;
  }
  if (o->played[0]) figure_print(s, &shown, o, &f);
}

/* ---------------------------------------------------------------------------------------------
 * Running a cell
 */

/* All contestants' trials in turns; the first one of each is a warm-up and is not counted. */
static void trials_run(const settings *s, const cell *c, bench_team **team, outcome *o) {
  static bench_trial trial[PLAYERS][TRIALS_MAX];
  static double add[TRIALS_MAX], copy[TRIALS_MAX], line[TRIALS_MAX];
  for (int t = -1; t < s->trials; t++) {
    int at = t < 0 ? 0 : t;
    add[at] = bench_limit_add(c->job.bytes);
    copy[at] = bench_limit_copy(c->job.bytes);
    line[at] = c->job.bytes == 64 ? bench_limit_line() : 0;
    for (int i = 0; i < PLAYERS; i++) {
      if (!team[i] || !bench_team_trial(team[i], &trial[i][at])) continue;
      bench_team_stop(team[i]);
      team[i] = NULL;
    }
  }
  o->add = median(add, s->trials) / 1e9;
  o->copy = median(copy, s->trials) / 1e9;
  o->line = median(line, s->trials) * 1e6;
  for (int i = 0; i < PLAYERS; i++) {
    if ((o->played[i] = team[i] != NULL)) o->median[i] = median_trial(trial[i], s->trials);
  }
}

static void cell_run(settings *s, const cell *c, outcome *o) {
  bench_team *team[PLAYERS] = {NULL};
  int late = bench_now_ns() > s->end_ns;
  *o = (outcome){.add = 0};
  for (int i = 0; i < PLAYERS && !late; i++) {
    if (c->player[i]) team[i] = bench_team_start(c->player[i], &c->job);
  }
  if (!late && team[0]) trials_run(s, c, team, o);
  for (int i = 0; i < PLAYERS; i++) {
    if (team[i]) bench_team_stop(team[i]);
  }
  if (!o->played[0]) {
    char name[64];
    figure_name(name, c->what, &c->job);
    printf("%-24s    %s\n", name, late ? "left out: the time is up" : "failed");
    s->failures++;
  }
}

/* ---------------------------------------------------------------------------------------------
 * The cells
 */

/* Enough messages for a trial of some tens of milliseconds, with the same total for any number of
 * workers. */
static void job_fill(bench_job *job, int quick) {
  static const struct {
    size_t bytes;
    uint32_t messages, window;
  } sizes[] = {{64, 4000, 1}, {4 << 10, 4096, 32}, {64 << 10, 1024, 32},
               {MIB, 128, 4}, {16 * MIB, 8, 2},    {100 * MIB, 2, 2}};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
    if (sizes[i].bytes != job->bytes) continue;
    uint32_t messages = sizes[i].messages / job->workers;
    if (quick && job->bytes > 64 && job->bytes < 16 * MIB) messages /= 4;
    job->messages = messages ? messages : 1;
    job->window = sizes[i].window;
    /* A worker may have eight pulls in progress. */
    if (job->what == BENCH_PULL && job->window > 8) job->window = 8;
  }
}

static void throughput(settings *s, int what, int transport, size_t bytes, uint32_t workers,
                       int code) {
  static const char *const names[2][5] = {
      {"push", "push-crc", "push-keyed", "push-tls", "push-alloc"},
      {"pull", "pull-crc", "pull-keyed", "pull-tls", "pull-alloc"}};
  const char *name = names[what == BENCH_PULL][code];
  cell c = {.what = name, .player = {&bench_mlfab, &bench_copy_loop, &bench_zeromq}};
  outcome o;
  c.job = (bench_job){
      .what = what, .transport = transport, .code = code, .bytes = bytes, .workers = workers};
  job_fill(&c.job, s->quick);
  if (what == BENCH_PUSH) c.player[3] = &bench_add_loop;
  int cpu = what == BENCH_PUSH && !code && bytes == 100 * MIB && workers == 1;
  int allocations = what == BENCH_PUSH && !code && (bytes == 4096 || bytes == MIB) && workers == 1;
  if (!wanted(s, name, &c.job) && !(cpu && wanted(s, "server-cpu", &c.job)) &&
      !(allocations && wanted(s, "allocations", &c.job))) {
    return;
  }
  cell_run(s, &c, &o);
  report(s, &c, &o, name, RATE, "GB/s", what == BENCH_PULL ? "memcpy" : "add",
         what == BENCH_PULL ? o.copy : o.add);
  if (cpu) report(s, &c, &o, "server-cpu", SERVER_CPU, "s/GB", "add", 1 / o.add);
  if (allocations) report(s, &c, &o, "allocations", ALLOCATIONS, "per 1000", NULL, 0);
}

static void round_trip(settings *s, int transport, int spin) {
  cell c = {.what = "roundtrip", .player = {&bench_mlfab}};
  outcome o;
  c.job = (bench_job){
      .what = BENCH_PUSH, .transport = transport, .spin = spin, .bytes = 64, .workers = 1};
  job_fill(&c.job, s->quick);
  if (!wanted(s, c.what, &c.job)) return;
  c.player[1] = transport == BENCH_TCP ? &bench_copy_loop : spin ? NULL : &bench_futex_loop;
  c.player[2] = spin ? NULL : &bench_zeromq;
  cell_run(s, &c, &o);
  report(s, &c, &o, c.what, MICROSECONDS, "us", "cache line", o.line);
}

/* What a view of the model takes: to read it is the caller's affair. */
static void view(settings *s, size_t bytes) {
  cell c = {.what = "pull-view", .player = {&bench_mlfab}};
  outcome o;
  c.job = (bench_job){.what = BENCH_VIEW, .transport = BENCH_SHM, .bytes = bytes, .workers = 1};
  c.job.messages = 2000;
  c.job.window = 1;
  if (!wanted(s, c.what, &c.job)) return;
  cell_run(s, &c, &o);
  report(s, &c, &o, c.what, MICROSECONDS, "us", NULL, 0);
}

static void messages(settings *s, int transport) {
  cell c = {.what = "messages",
            .player = {&bench_mlfab, &bench_copy_loop, &bench_zeromq, &bench_add_loop}};
  outcome o;
  c.job = (bench_job){.what = BENCH_STREAM, .transport = transport, .bytes = 4096, .workers = 1};
  job_fill(&c.job, s->quick);
  c.job.messages *= 16;
  if (!wanted(s, c.what, &c.job)) return;
  cell_run(s, &c, &o);
  report(s, &c, &o, c.what, PER_SECOND, "1/s", "add", o.add * 1e9 / 4096);
}

/* One worker and one server with their progress threads and nothing to do. */
static void idle(settings *s, int transport) {
  cell c = {.what = "idle", .player = {&bench_mlfab}};
  outcome o = {.played = {1}};
  figure f = {.unit = "cpu s/s"};
  bench_trial t;
  c.job = (bench_job){.what = BENCH_PUSH, .transport = transport, .bytes = MIB, .workers = 1};
  job_fill(&c.job, s->quick);
  if (!wanted(s, c.what, &c.job)) return;
  bench_team *team = bench_team_start(&bench_mlfab, &c.job);
  /* A trial first: a busy loop while idle is most likely after work. */
  if (!team || bench_team_trial(team, &t) || bench_team_idle(team, s->quick ? 0.5 : 2.0, &t)) {
    s->failures++;
  } else {
    figure_name(f.name, c.what, &c.job);
    f.value[0] = (t.server_cpu + t.worker_cpu) / t.seconds;
    figure_print(s, &c, &o, &f);
  }
  if (team) bench_team_stop(team);
}

/* Memory of both roles, by rule and consistency, as multiples of the model. */
static void memory(settings *s) {
  static const char *const names[] = {"plain", "momentum", "adadelay", "adam"};
  cell c = {.what = "memory", .player = {&bench_mlfab}};
  outcome o = {.played = {1}};
  for (uint32_t sync = 0; sync < 2; sync++) {
    for (uint32_t rule = 0; rule < 4; rule++) {
      double used[2];
      if (s->only && strncmp("memory", s->only, 6)) return;
      if (bench_memory_use(rule, sync, &used[0], &used[1])) {
        s->failures++;
        continue;
      }
      for (int role = 0; role < 2; role++) {
        figure f = {.unit = "x model", .value = {used[role]}};
        snprintf(f.name, sizeof f.name, "memory/%s/%s-%s", role ? "worker" : "server",
                 sync ? "bsp" : "async", names[rule]);
        figure_print(s, &c, &o, &f);
      }
    }
  }
}

static void all_cells(settings *s) {
  static const size_t sizes[] = {4 << 10, 64 << 10, MIB, 16 * MIB, 100 * MIB};
  memory(s);
  for (int transport = BENCH_TCP; transport <= BENCH_SHM; transport++) {
    round_trip(s, transport, 1);
    round_trip(s, transport, 0);
    messages(s, transport);
    idle(s, transport);
    for (uint32_t workers = 1; workers <= WORKERS_MAX; workers *= 2) {
      for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        /* --quick leaves out two workers, and the largest size with many workers. */
        if (s->quick && (workers == 2 || (workers > 1 && sizes[i] > 16 * MIB))) continue;
        throughput(s, BENCH_PUSH, transport, sizes[i], workers, 0);
        if (transport == BENCH_TCP && workers == 1 && sizes[i] >= MIB) {
          throughput(s, BENCH_PUSH, transport, sizes[i], workers, BENCH_CRC);
          throughput(s, BENCH_PUSH, transport, sizes[i], workers, BENCH_KEYED);
          throughput(s, BENCH_PULL, transport, sizes[i], workers, BENCH_KEYED);
          if (MLFAB_BENCH_TLS) throughput(s, BENCH_PUSH, transport, sizes[i], workers, BENCH_TLS);
          if (MLFAB_BENCH_TLS) throughput(s, BENCH_PULL, transport, sizes[i], workers, BENCH_TLS);
        }
        throughput(s, BENCH_PULL, transport, sizes[i], workers, 0);
        if (transport == BENCH_SHM && sizes[i] >= MIB)
          throughput(s, BENCH_PUSH, transport, sizes[i], workers, BENCH_ALLOC);
        if (transport == BENCH_SHM && sizes[i] >= MIB && workers == 1) view(s, sizes[i]);
      }
    }
  }
}

static int settings_read(settings *s, int argc, char **argv) {
  const char *path = NULL;
  double limit_s = 600;
  for (int i = 1; i < argc; i++) {
    if (!strcmp(argv[i], "--quick")) {
      s->quick = 1;
    } else if (!strcmp(argv[i], "--trials") && i + 1 < argc) {
      s->trials = atoi(argv[++i]);
    } else if (!strcmp(argv[i], "--only") && i + 1 < argc) {
      s->only = argv[++i];
    } else if (!strcmp(argv[i], "--limit") && i + 1 < argc) {
      limit_s = atof(argv[++i]);
    } else if (argv[i][0] != '-' && !path) {
      path = argv[i];
    } else {
      fprintf(stderr,
              "usage: bench [FILE.tsv] [--quick] [--trials N] [--only PREFIX] "
              "[--limit SECONDS]\n");
      return -1;
    }
  }
  s->end_ns = bench_now_ns() + (uint64_t)(limit_s * 1e9);
  if (s->trials == 0) s->trials = s->quick ? 3 : 5;
  if (s->trials < 1 || s->trials > TRIALS_MAX) s->trials = TRIALS_MAX;
  if (path && (s->tsv = fopen(path, "w")) == NULL) {
    perror(path);
    return -1;
  }
  if (s->tsv) fprintf(s->tsv, "name\tours\tunit\tpeer\tpeer_value\tlimit_name\tlimit_value\n");
  return 0;
}

int main(int argc, char **argv) {
  settings s = {.trials = 0};
  if (settings_read(&s, argc, argv)) return 2;
  signal(SIGPIPE, SIG_IGN);
  printf(
      "%-24s %9s %-9s  beside the limit and each peer (mlfab / peer); %d processors, %d trials\n",
      "figure", "mlfab", "unit", bench_cpus(), s.trials);
  all_cells(&s);
  if (s.tsv) fclose(s.tsv);
  printf("%d figures, %d failed\n", s.rows, s.failures);
  return s.failures ? 1 : 0;
}
