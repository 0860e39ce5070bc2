/* mlfab-sim.c - a training run in the simulator: the cost of a policy on a given network.
 *
 *    mlfab-sim --workers 100 --servers 4 --model-bytes 100MB --rate 10Gbit --compute 80ms --sync bsp
 *
 *    mlfab-sim --workers 12 --model-bytes 5MB --rate 1Gbit --scheduler beside --delay-bound 13 --explain
 *
 * Every worker computes (for a time that is given or read from a trace), pushes an update of the whole
 * model and pulls it, --steps times. Tensors are ghosts, so a large model costs no memory. Only public
 * headers are used, besides the options: it is also an example of driving the simulator.
 *
 * A worker checks its request each time its context was driven. Printed times are those of the results. The
 * same arguments give the same output. */
#include "mlfab_sim.h"
#include "options.h"

#include <inttypes.h>

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

static void *room(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) options_refuse("out of memory");
  return memory;
}

/* ---- arguments and traces ---- */

static settings set = {.workers = 4,
                       .servers = 1,
                       .model_bytes = 100000000,
                       .rate = 1250000000,
                       .latency_ns = 50000,
                       .compute_ns = 100000000,
                       .steps = 10,
                       .seed = 1,
                       .timeout_ns = 3600000000000};

/* A number, or the name of a file with a trace. Text that begins as a number is a file only if there is one. */
static void take_rate(const char *name, const char *text);
static void take_compute(const char *name, const char *text);

#define COUNT(name, member, least, most, help) \
  { name, "N", OPTION_COUNT, &set.member, least, most, 1, NULL, help }
#define TIME(name, member, least, most, help) \
  { name, "TIME", OPTION_TIME, &set.member, least, most, 1, NULL, help }
#define PART(name, member, help) \
  { name, "P", OPTION_PART, &set.member, 0, 1, 1, NULL, help }
static const option_row rows[] = {
    COUNT("--workers", workers, 1, 100000, "hosts that train (4)"),
    COUNT("--servers", servers, 1, 1000,
          "hosts of their own, 0 .. N-1; workers come behind them (1)"),
    {"--model-bytes", "SIZE", OPTION_SIZE, &set.model_bytes, 4, 1e12, 1, NULL,
     "of the model (100MB)"},
    {"--rate", "RATE|FILE", OPTION_CALL, NULL, 1, 1e15, 1, take_rate,
     "of each host (10Gbit), or a trace with lines `time host in out`, time from the start of "
     "training; or both, one --rate "
     "each: the trace changes the rate that the number gives"},
    TIME("--latency", latency_ns, 1, 60e9, "one way (50us)"),
    {"--compute", "TIME|FILE", OPTION_CALL, NULL, 0, 9e15, 1, take_compute,
     "a step's computation (100ms), or a trace with lines `worker step time`; a step without a "
     "line takes as long as the one before it"},
    PART("--spread", spread, "computations vary by up to this part of them, 0 to 1 (0)"),
    {"--sync", "async|bsp", OPTION_WORD, &set.bsp, 0, 0, 0, NULL, "when a pull waits (async)"},
    {"--scheduler", "none|beside", OPTION_WORD, &set.scheduled, 0, 0, 0, NULL,
     "beside: server 0 plans how pushes and pulls go (none)"},
    COUNT("--delay-bound", delay_bound, 1, 9e15,
          "drops updates that would come N or more versions late (no bound)"),
    {"--explain", NULL, OPTION_FLAG, &set.explain, 0, 0, 0, NULL,
     "prints the scheduler's last plans at the end"},
    COUNT("--steps", steps, 1, 1e9, "of each worker (10)"),
    COUNT("--seed", seed, 1, 9e15, "of all random choices (1)"),
    TIME("--timeout", timeout_ns, 1, 9e18, "of a push or a pull, in virtual time (1h)"),
    PART("--loss", loss, "probability that a frame is lost (0)"),
    PART("--duplicate", duplicate, "probability that a frame comes twice (0)"),
    PART("--reorder", reorder, "probability that a frame is overtaken (0)"),
    PART("--partition", partition, "probability of a cut network, a second (0)"),
    PART("--pause", pause, "probability that a host stops, a second and host (0)"),
    PART("--slow", slow, "probability that a host is slow, a second and host (0)"),
    {"--csv", NULL, OPTION_FLAG, &set.csv, 0, 0, 0, NULL, "comma separated values"},
    {NULL, NULL, OPTION_FLAG, NULL, 0, 0, 0, NULL, NULL}};
#undef COUNT
#undef TIME
#undef PART

/* The number, or -1: the text names a file. */
static double number_or_file(const char *name, const char *text, enum option_kind kind) {
  const option_row *row = options_find(name, strlen(name));
  option_row number = *row;
  struct stat is;
  number.kind = kind;
  int is_file = *text && !stat(text, &is);
  if (options_number(text, kind, 1) < 0 && is_file) return -1;
  if (options_number(text, kind, 1) < 0)
    options_refuse("%s='%s': not %s, and no file", name, text, options_units(kind));
  return options_value(&number, name, text);
}

static void take_rate(const char *name, const char *text) {
  double value = number_or_file(name, text, OPTION_RATE);
  if (value < 0) set.rate_file = text;
  if (value >= 0) set.rate = (uint64_t)value;
}

static void take_compute(const char *name, const char *text) {
  double value = number_or_file(name, text, OPTION_TIME);
  if (value < 0) set.compute_file = text;
  if (value >= 0) set.compute_ns = (uint64_t)value;
}

static void take_arguments(int argc, char **argv) {
  static const options_tool tool = {
      "mlfab-sim",
      "usage: mlfab-sim [options]",
      "Simulates workers that compute, push and pull, and prints the steps and times of each.",
      "Times take a unit (ns, us, ms, s, min, h), sizes B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, "
      "and rates these with /s, or kbit, Mbit, Gbit or Tbit. Without a "
      "unit they count ns, bytes and bytes a second. Numbers may be written 1e9; without a unit "
      "they may end in k, m or g "
      "(1000, 1000000, 1000000000). The same holds for the traces.\n\nExit status: 0, 1 when a "
      "worker has failed, 2 for wrong usage.",
      rows,
      0,
      NULL};
  int first = options_read(&tool, argc, argv);
  if (first < argc) options_refuse("'%s' is no option; mlfab-sim --help lists all", argv[first]);
  if (!set.scheduled && (set.delay_bound || set.explain))
    options_refuse("--delay-bound and --explain need --scheduler beside");
  if (set.bsp && set.delay_bound) options_refuse("--delay-bound does not go with --sync bsp");
}

/* Calls `line` with the numbers of every line that is not empty or a # comment: whole numbers, and with units. */
static void read_trace(run *r, const char *path, const enum option_kind *kinds, int fields,
                       void (*line)(run *r, const char *path, unsigned number, const uint64_t *x)) {
  char text[256];
  unsigned number = 0;
  FILE *file = options_open(path, "r");
  if (!file) options_refuse("%s: %s", path, strerror(errno));
  while (fgets(text, sizeof text, file)) {
    uint64_t x[4] = {0};
    int n = 0;
    number++;
    for (char *at = strtok(text, " \t\r\n"); at; at = strtok(NULL, " \t\r\n"), n++) {
      if (n == 0 && *at == '#') break;
      double value = n < fields ? options_number(at, kinds[n], 1) : -1;
      if (value < 0 || value > 9e18 || value != floor(value))
        options_refuse("%s:%u: '%s' is not %s", path, number, at,
                       n < fields ? options_units(kinds[n]) : "wanted in this line");
      x[n] = (uint64_t)value;
    }
    if (n == 0) continue;
    if (n != fields) options_refuse("%s:%u: %d numbers, where %d belong", path, number, n, fields);
    line(r, path, number, x);
  }
  fclose(file);
}

static void rate_line(run *r, const char *path, unsigned number, const uint64_t *x) {
  if (x[1] >= r->set.servers + r->set.workers)
    options_refuse("%s:%u: there is no host %" PRIu64, path, number, x[1]);
  if ((r->change_count & (r->change_count - 1)) == 0) { /* at a power of two: doubles the room */
    size_t more = r->change_count ? r->change_count * 2 : 1;
    r->changes = realloc(r->changes, more * sizeof *r->changes);
    if (!r->changes) options_refuse("out of memory");
  }
  r->changes[r->change_count++] = (change){r, x[0], x[2], x[3], (uint32_t)x[1]};
}

static void compute_line(run *r, const char *path, unsigned number, const uint64_t *x) {
  if (x[0] >= r->set.workers)
    options_refuse("%s:%u: there is no worker %" PRIu64, path, number, x[0]);
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
  if (mlfab_sim_at(r->sim, at_ns + ns, computed, w)) options_refuse("out of memory");
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
  if (mlfab_sim_open(r->sim, host, &config, ctx_p, &error))
    options_refuse("host %u: %s", host, error.text);
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
      options_refuse("node %" PRIu64 " cannot join: %s", i, error.text);
    if (ready == 1) i++;
  }
  for (uint64_t i = 0; i < r->set.workers; i++) {
    mlfab_model_options options = {
        .size = sizeof options, .sync = r->set.bsp ? MLFAB_SYNC_BSP : MLFAB_SYNC_ASYNC, .ghost = 1};
    mlfab *ctx = r->workers[i].ctx;
    if (mlfab_tensor_add(ctx, 0, MLFAB_F32, r->set.model_bytes / 4) ||
        mlfab_model_start(ctx, &options, NULL, 0)) {
      mlfab_last_error(ctx, &error);
      options_refuse("worker %" PRIu64 ": %s", i, error.text);
    }
  }
}

static void train(run *r) {
  r->start_ns = mlfab_sim_clock(r->sim);
  r->running = r->set.workers;
  for (size_t i = 0; i < r->change_count; i++)
    if (mlfab_sim_at(r->sim, r->start_ns + r->changes[i].at_ns, change_rate, &r->changes[i]))
      options_refuse("out of memory");
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
  static const enum option_kind rates[] = {OPTION_TIME, OPTION_COUNT, OPTION_RATE, OPTION_RATE};
  static const enum option_kind steps[] = {OPTION_COUNT, OPTION_COUNT, OPTION_TIME};
  take_arguments(argc, argv);
  run r = {.set = set};
  if (r.set.compute_file && r.set.workers * r.set.steps > 100000000)
    options_refuse("--compute %s: more than 100 million steps", r.set.compute_file);
  if (r.set.compute_file) {
    r.compute_ns = room(r.set.workers * r.set.steps, sizeof *r.compute_ns);
    read_trace(&r, r.set.compute_file, steps, 3, compute_line);
  }
  if (r.set.rate_file) read_trace(&r, r.set.rate_file, rates, 4, rate_line);
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
  if (status) options_refuse("the simulator cannot be made: %s", mlfab_error_text(status));
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
