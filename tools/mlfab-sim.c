/* mlfab-sim.c - a training run in the simulator: the cost of a policy on a given network.
 *
 *    mlfab-sim --workers 100 --servers 4 --model-bytes 100m --rate 1.25e9 --compute 80e6 --sync bsp
 *
 *    mlfab-sim --workers 12 --model-bytes 5m --rate 125m --scheduler beside --delay-bound 13 --explain
 *
 * Every worker computes (for a time that is given or read from a trace), pushes an update of the whole
 * model and pulls it, --steps times. Tensors are ghosts, so a large model costs no memory. Only public
 * headers are used: it is also an example of driving the simulator.
 *
 * A worker checks its request each time its context was driven. Printed times are those of the results. The
 * same arguments give the same output. */
#include "mlfab_sim.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { EXIT_USAGE = 2 };

typedef struct settings {
  uint64_t workers, servers, model_bytes, rate, latency_ns, compute_ns, steps, seed, timeout_ns;
  double spread, loss, duplicate, reorder, partition, pause, slow;
  const char *rate_file, *compute_file;
  int bsp, csv, scheduled, explain;
  uint64_t delay_bound; /* 0: no bound */
} settings;

struct run;

typedef struct worker {
  struct run *run;
  mlfab *ctx;
  uint64_t number, step;
  mlfab_request request;
  int asking, pulling, ended;
  uint64_t began_ns, ended_ns;
  uint64_t push_ns, pull_ns, compute_ns, delay_sum, delay_max, applied, dropped, failed;
  mlfab_error error;
} worker;

/* A line of the bandwidth trace. */
typedef struct change {
  struct run *run;
  uint64_t at_ns, in, out;
  uint32_t host;
} change;

typedef struct run {
  settings set;
  mlfab_sim *sim;
  mlfab **servers;
  worker *workers;
  change *changes;
  size_t change_count;
  uint64_t *compute_ns; /* workers x steps; NULL: no trace */
  uint64_t random, start_ns, running;
} run;

static _Noreturn void die(const char *format, ...) {
  va_list list;
  va_start(list, format);
  fputs("mlfab-sim: ", stderr);
  vfprintf(stderr, format, list);
  fputc('\n', stderr);
  va_end(list);
  exit(EXIT_USAGE);
}

static void *room(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) die("out of memory");
  return memory;
}

/* ---- arguments and traces ---- */

static const char usage[] =
    "usage: mlfab-sim [options]\n"
    "Simulates workers that compute, push and pull, and prints what each of them got.\n\n"
    "  --workers N           (4)\n"
    "  --servers N           hosts of their own, 0 .. N-1; workers come behind them (1)\n"
    "  --model-bytes B       (100m)\n"
    "  --rate R|FILE         of each host, bytes a second (1.25e9), or a trace with lines\n"
    "                        `time_ns host in out`, time from the start of training; or\n"
    "                        both, one --rate each: the trace changes what the number says\n"
    "  --latency NS          one way (50e3)\n"
    "  --compute NS|FILE     a step's computation (100e6), or a trace with lines `worker step "
    "ns`;\n"
    "                        a step without a line takes as long as the one before it\n"
    "  --spread F            computations vary by up to this part of them, 0..1 (0)\n"
    "  --sync async|bsp      (async)\n"
    "  --scheduler none|beside  beside: server 0 plans how pushes and pulls go (none)\n"
    "  --delay-bound N       drops updates that would come N or more versions late (no bound)\n"
    "  --explain             prints the scheduler's last plans at the end\n"
    "  --steps N             of each worker (10)\n"
    "  --seed N              (1)\n"
    "  --timeout NS          of a push or a pull, in virtual time (3600e9)\n"
    "  --loss, --duplicate, --reorder P     probability a frame (0)\n"
    "  --partition, --pause, --slow P       a second, a second and host (0)\n"
    "  --csv                 comma separated values\n"
    "  --help\n"
    "Numbers may be written 1e9, and end in k, m or g (1000, 1000000, 1000000000).\n";

/* A number with an optional suffix; 0 for any other text. */
static int number_of(const char *text, double *value_p) {
  char *end;
  double value = strtod(text, &end);
  if (end == text) return 0;
  if (*end == 'k') value *= 1e3;
  if (*end == 'm') value *= 1e6;
  if (*end == 'g') value *= 1e9;
  end += *end == 'k' || *end == 'm' || *end == 'g';
  *value_p = value;
  return !*end;
}

#define WHOLE(name, member, least, most) \
  { name, least, most, offsetof(settings, member), 0 }
#define PART(name, member) \
  { name, 0, 1, offsetof(settings, member), 1 }
static const struct numeric {
  const char *name;
  double least, most;
  size_t at;
  int is_part; /* a double, not a uint64_t */
} numerics[] = {WHOLE("--workers", workers, 1, 100000),
                WHOLE("--servers", servers, 1, 1000),
                WHOLE("--model-bytes", model_bytes, 4, 1e12),
                WHOLE("--rate", rate, 1, 1e15),
                WHOLE("--latency", latency_ns, 1, 60e9),
                WHOLE("--compute", compute_ns, 0, 9e15),
                WHOLE("--steps", steps, 1, 1e9),
                WHOLE("--seed", seed, 1, 9e15),
                WHOLE("--timeout", timeout_ns, 1, 9e18),
                WHOLE("--delay-bound", delay_bound, 1, 9e15),
                PART("--spread", spread),
                PART("--loss", loss),
                PART("--duplicate", duplicate),
                PART("--reorder", reorder),
                PART("--partition", partition),
                PART("--pause", pause),
                PART("--slow", slow)};
#undef WHOLE
#undef PART

static void take_number(settings *set, const char *name, const char *text) {
  for (size_t i = 0; i < sizeof numerics / sizeof numerics[0]; i++) {
    const struct numeric *n = &numerics[i];
    double value;
    if (strcmp(name, n->name) != 0) continue;
    if (!number_of(text, &value)) die("%s: \"%s\" is not a number", name, text);
    if (!(value >= n->least && value <= n->most))
      die("%s: %s is not between %.0f and %.0f", name, text, n->least, n->most);
    uint64_t whole = (uint64_t)value;
    memcpy((char *)set + n->at, n->is_part ? (const void *)&value : &whole, sizeof whole);
    return;
  }
  die("unknown option %s; try --help", name);
}

static void take_arguments(settings *set, int argc, char **argv) {
  double value;
  for (int i = 1; i < argc; i++) {
    const char *name = argv[i], *text = i + 1 < argc ? argv[i + 1] : NULL;
    if (!strcmp(name, "--help")) {
      fputs(usage, stdout);
      exit(0);
    }
    if (!strcmp(name, "--csv")) {
      set->csv = 1;
      continue;
    }
    if (!strcmp(name, "--explain")) {
      set->explain = 1;
      continue;
    }
    if (!text || strncmp(name, "--", 2) != 0)
      die("\"%s\": not an option, or without its value; try --help", name);
    i++;
    if (!strcmp(name, "--rate") && !number_of(text, &value)) {
      set->rate_file = text;
    } else if (!strcmp(name, "--compute") && !number_of(text, &value)) {
      set->compute_file = text;
    } else if (!strcmp(name, "--sync")) {
      set->bsp = !strcmp(text, "bsp");
      if (!set->bsp && strcmp(text, "async") != 0)
        die("--sync: \"%s\" is neither async nor bsp", text);
    } else if (!strcmp(name, "--scheduler")) {
      set->scheduled = !strcmp(text, "beside");
      if (!set->scheduled && strcmp(text, "none") != 0)
        die("--scheduler: \"%s\" is neither none nor beside", text);
    } else {
      take_number(set, name, text);
    }
  }
  if (!set->scheduled && (set->delay_bound || set->explain))
    die("--delay-bound and --explain need --scheduler beside");
  if (set->bsp && set->delay_bound) die("--delay-bound does not go with --sync bsp");
}

/* Calls `line` with the `fields` whole numbers of every line that is not empty or a # comment. */
static void read_trace(run *r, const char *path, int fields,
                       void (*line)(run *r, const char *path, unsigned number, const uint64_t *x)) {
  char text[256];
  unsigned number = 0;
  FILE *file = fopen(path, "r");
  if (!file) die("%s: cannot be opened (and is not a number)", path);
  while (fgets(text, sizeof text, file)) {
    uint64_t x[4] = {0};
    char *at = text + strspn(text, " \t\r\n");
    int n = 0;
    number++;
    if (!*at || *at == '#') continue;
    while (n < 4 && *at >= '0' && *at <= '9') {
      x[n++] = strtoull(at, &at, 10);
      at += strspn(at, " \t\r\n");
    }
    if (*at || n != fields) die("%s:%u: wants %d whole numbers", path, number, fields);
    line(r, path, number, x);
  }
  fclose(file);
}

static void rate_line(run *r, const char *path, unsigned number, const uint64_t *x) {
  if (x[1] >= r->set.servers + r->set.workers)
    die("%s:%u: there is no host %" PRIu64, path, number, x[1]);
  if ((r->change_count & (r->change_count - 1)) == 0) { /* at a power of two: doubles the room */
    size_t more = r->change_count ? r->change_count * 2 : 1;
    r->changes = realloc(r->changes, more * sizeof *r->changes);
    if (!r->changes) die("out of memory");
  }
  r->changes[r->change_count++] = (change){r, x[0], x[2], x[3], (uint32_t)x[1]};
}

static void compute_line(run *r, const char *path, unsigned number, const uint64_t *x) {
  if (x[0] >= r->set.workers) die("%s:%u: there is no worker %" PRIu64, path, number, x[0]);
  /* 0: not in the trace */
  if (x[1] < r->set.steps) r->compute_ns[x[0] * r->set.steps + x[1]] = x[2] + 1;
}

/* ---- a worker ---- */

static double unit(run *r) { /* splitmix64, in [0, 1) */
  uint64_t x = r->random += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return (double)((x ^ x >> 31) >> 11) / 9007199254740992.0;
}

static void look(void *user);

static void leave(worker *w, uint64_t at_ns) {
  w->ended = 1;
  w->ended_ns = at_ns;
  w->run->running--;
}

/* Starts the push or the pull of a step. */
static void ask(worker *w, int pulling) {
  mlfab_buf model = {MLFAB_ALL, 0, NULL, w->run->set.model_bytes / 4};
  w->pulling = pulling;
  w->began_ns = mlfab_sim_clock(w->run->sim);
  int status = pulling ? mlfab_pull_start(w->ctx, &model, 1, NULL, &w->request)
                       : mlfab_push_start(w->ctx, &model, 1, NULL, &w->request);
  if (status) {
    w->failed++;
    mlfab_last_error(w->ctx, &w->error);
    leave(w, w->began_ns);
    return;
  }
  w->asking = 1;
  look(w);
}

static void computed(void *user) { ask(user, 0); }

/* Computes the next step, which began at `at_ns`, perhaps shortly before now. */
static void compute(worker *w, uint64_t at_ns) {
  run *r = w->run;
  if (w->step == r->set.steps) {
    leave(w, at_ns);
    return;
  }
  uint64_t ns = r->set.compute_ns;
  if (r->compute_ns) {
    uint64_t *row = r->compute_ns + w->number * r->set.steps;
    if (!row[w->step]) row[w->step] = w->step ? row[w->step - 1] : 1;
    ns = row[w->step] - 1;
  }
  if (r->set.spread > 0) ns = (uint64_t)((double)ns * (1 + r->set.spread * (2 * unit(r) - 1)));
  w->step++;
  w->compute_ns += ns;
  if (mlfab_sim_at(r->sim, at_ns + ns, computed, w)) die("out of memory");
}

/* Checks whether the request is done, each time the worker's context was driven. */
static void look(void *user) {
  worker *w = user;
  run *r = w->run;
  mlfab_result result;
  int done = 0;
  if (!w->asking) return;
  int status = mlfab_test(w->ctx, w->request, &done, &result);
  if (!status && !done) return;
  w->asking = 0;
  if (!status && result.status == MLFAB_ERR_DROPPED) {
    w->dropped++;
  } else if (status || result.status) {
    if (!w->failed++) mlfab_last_error(w->ctx, &w->error);
    if (status) {
      leave(w, mlfab_sim_clock(r->sim));
      return;
    }
  }
  *(w->pulling ? &w->pull_ns : &w->push_ns) += result.waited_ns;
  if (!w->pulling) {
    if (!result.status) {
      w->applied++;
      w->delay_sum += result.delay;
      if (result.delay > w->delay_max) w->delay_max = result.delay;
    }
    ask(w, 1);
  } else {
    compute(w, w->began_ns + result.waited_ns);
  }
}

static void change_rate(void *user) {
  const change *c = user;
  mlfab_sim_set_rate(c->run->sim, c->host, c->in, c->out);
}

/* ---- the run ---- */

static void open_node(run *r, uint32_t host, int server, uint64_t rank, mlfab **ctx_p) {
  mlfab_config config;
  mlfab_error error = {0};
  mlfab_config_init(&config);
  config.roles = server ? MLFAB_ROLE_SERVER : MLFAB_ROLE_WORKER;
  config.rank = (int32_t)rank;
  config.workers = (uint32_t)r->set.workers;
  config.servers = (uint32_t)r->set.servers;
  config.dedicated = 1;
  config.timeout_ns = r->set.timeout_ns;
  config.seed = r->set.seed;
  if (r->set.scheduled) config.scheduler = MLFAB_SCHEDULER_BESIDE;
  if (r->set.delay_bound) config.schedule.delay_bound = r->set.delay_bound;
  config.model_max_bytes = r->set.model_bytes * 2 + (1u << 20);
  if (mlfab_sim_open(r->sim, host, &config, ctx_p, &error)) die("host %u: %s", host, error.text);
}

static void open_all(run *r) {
  uint64_t servers = r->set.servers, nodes = servers + r->set.workers;
  mlfab_error error = {0};
  for (uint64_t i = 0; i < nodes; i++) {
    worker *w = i < servers ? NULL : &r->workers[i - servers];
    if (w) *w = (worker){.run = r, .number = i - servers};
    open_node(r, (uint32_t)i, !w, w ? w->number : i, w ? &w->ctx : &r->servers[i]);
    if (w) mlfab_sim_watch(r->sim, (uint32_t)i, look, w);
  }
  for (uint64_t i = 0; i < nodes;) {
    int ready = mlfab_is_ready(i < servers ? r->servers[i] : r->workers[i - servers].ctx, &error);
    if (ready < 0 || (!ready && !mlfab_sim_step(r->sim)))
      die("node %" PRIu64 " cannot join: %s", i, error.text);
    if (ready == 1) i++;
  }
  for (uint64_t i = 0; i < r->set.workers; i++) {
    mlfab_model_options options = {
        .size = sizeof options, .sync = r->set.bsp ? MLFAB_SYNC_BSP : MLFAB_SYNC_ASYNC, .ghost = 1};
    mlfab *ctx = r->workers[i].ctx;
    if (mlfab_tensor_add(ctx, 0, MLFAB_F32, r->set.model_bytes / 4) ||
        mlfab_model_start(ctx, &options, NULL, 0)) {
      mlfab_last_error(ctx, &error);
      die("worker %" PRIu64 ": %s", i, error.text);
    }
  }
}

static void train(run *r) {
  r->start_ns = mlfab_sim_clock(r->sim);
  r->running = r->set.workers;
  for (size_t i = 0; i < r->change_count; i++)
    if (mlfab_sim_at(r->sim, r->start_ns + r->changes[i].at_ns, change_rate, &r->changes[i]))
      die("out of memory");
  for (uint64_t i = 0; i < r->set.workers; i++) compute(&r->workers[i], r->start_ns);
  while (r->running && mlfab_sim_step(r->sim)) continue;
}

static void explain(const run *r) {
  size_t bytes = 1;
  int status = mlfab_explain(r->servers[0], NULL, 0, &bytes);
  char *text = room(bytes, 1);
  if (!status) status = mlfab_explain(r->servers[0], text, bytes, &bytes);
  fputs(status ? mlfab_error_text(status) : text, stdout);
  free(text);
}

/* One line a worker; 1 when one of them failed. */
static int report(const run *r) {
  int failed = 0;
  uint64_t hash = 0;
  puts(r->set.csv
           ? "worker,steps,mean_delay,max_delay,compute_s,push_s,pull_s,total_s,"
             "bytes_sent,bytes_received,failed,dropped"
           : "worker  steps   mean delay  max   compute s      push s      pull s     total s"
             "        sent B    received B  failed dropped");
  for (uint64_t i = 0; i < r->set.workers; i++) {
    worker *w = &r->workers[i];
    mlfab_stats stats = {0};
    mlfab_get_stats(w->ctx, &stats, sizeof stats);
    uint64_t end_ns = w->ended ? w->ended_ns : mlfab_sim_clock(r->sim);
    printf(r->set.csv ? "%" PRIu64 ",%" PRIu64 ",%.3f,%" PRIu64 ",%.9f,%.9f,%.9f,%.9f,%" PRIu64
                        ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 "\n"
                      : "%6" PRIu64 " %6" PRIu64 " %12.3f %4" PRIu64
                        " %11.6f %11.6f %11.6f %11.6f"
                        " %13" PRIu64 " %13" PRIu64 " %7" PRIu64 " %7" PRIu64 "\n",
           i, w->step, w->applied ? (double)w->delay_sum / (double)w->applied : 0.0, w->delay_max,
           (double)w->compute_ns * 1e-9, (double)w->push_ns * 1e-9, (double)w->pull_ns * 1e-9,
           (double)(end_ns - r->start_ns) * 1e-9, stats.bytes_sent, stats.bytes_received, w->failed,
           w->dropped);
    if (w->failed) fprintf(stderr, "mlfab-sim: worker %" PRIu64 ": %s\n", i, w->error.text);
    failed |= w->failed || !w->ended;
  }
  mlfab_sim_trace_hash(r->sim, &hash);
  if (!r->set.csv) printf("seed %" PRIu64 ", trace %016" PRIx64 "\n", r->set.seed, hash);
  return failed;
}

int main(int argc, char **argv) {
  run r = {.set = {.workers = 4,
                   .servers = 1,
                   .model_bytes = 100000000,
                   .rate = 1250000000,
                   .latency_ns = 50000,
                   .compute_ns = 100000000,
                   .steps = 10,
                   .seed = 1,
                   .timeout_ns = 3600000000000}};
  take_arguments(&r.set, argc, argv);
  if (r.set.compute_file && r.set.workers * r.set.steps > 100000000)
    die("--compute %s: more than 100 million steps", r.set.compute_file);
  if (r.set.compute_file) {
    r.compute_ns = room(r.set.workers * r.set.steps, sizeof *r.compute_ns);
    read_trace(&r, r.set.compute_file, 3, compute_line);
  }
  if (r.set.rate_file) read_trace(&r, r.set.rate_file, 4, rate_line);
  r.random = r.set.seed;
  r.servers = room(r.set.servers, sizeof *r.servers);
  r.workers = room(r.set.workers, sizeof *r.workers);
  mlfab_sim_options options = {.size = sizeof options,
                               .hosts = (uint32_t)(r.set.workers + r.set.servers),
                               .seed = r.set.seed,
                               .latency_ns = r.set.latency_ns,
                               .rate_bytes_per_s = r.set.rate,
                               .loss = r.set.loss,
                               .duplicate = r.set.duplicate,
                               .reorder = r.set.reorder,
                               .partition = r.set.partition,
                               .pause = r.set.pause,
                               .slow = r.set.slow};
  int status = mlfab_sim_create(&options, &r.sim);
  if (status) die("the simulator cannot be made: %s", mlfab_error_text(status));
  open_all(&r);
  train(&r);
  status = report(&r);
  if (r.set.explain) explain(&r);
  for (uint64_t i = 0; i < r.set.workers; i++) mlfab_abandon(&r.workers[i].ctx);
  for (uint64_t i = 0; i < r.set.servers; i++) mlfab_abandon(&r.servers[i]);
  mlfab_sim_destroy(&r.sim);
  free(r.servers);
  free(r.workers);
  free(r.changes);
  free(r.compute_ns);
  return status;
}
