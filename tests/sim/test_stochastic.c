/* test_stochastic.c - stochastic reduce among simulated nodes: which inputs the three ways of waiting
 * average and how fast they are (ASAP fig. 8 and §6.2), what graphs cost in bytes and in iterations
 * (§6.1, fig. 7), and what faults do to it.
 *
 * A worker computes for a time that is its own (uniform within `spread` of the mean, the same in
 * every iteration) and for the iteration's (`jitter`), then calls. Everything is drawn from seeds.
 */
#include "driven.h"
#include "../../mlfab_partial.h"
#include "job.h"

#include <math.h>

enum { NODES = 64, INPUTS = 64 };

typedef struct rank {
  mlfab_node *node;
  void *link; /* its transport */
  mlfab_request request;
  uint32_t id;
  int opening, opened;
  double *data, *before;
  uint64_t until, started_ns; /* it computes; it called */
  double pace;
  uint32_t iterations, failures;
  uint64_t sent_bytes;
  mlfab_stochastic_info info;
} rank;

typedef struct crowd {
  mlfab_sim *sim;
  rank ranks[NODES];
  mlfab_config config;
  mlfab_sim_options network;
  mlfab_stochastic_options options;
  uint32_t n;
  uint64_t count, compute_ns, slice_ns, timeout_ns, seed, dice;
  double spread, jitter;
  void (*compute)(struct crowd *w, uint32_t i); /* what it does to the data; may be NULL */
  void *user;
  uint32_t enough; /* iterations of a worker; 0: no bound */
  int endures;     /* failures are part of it */
  uint64_t total, torn, stale, whole;
  uint64_t inputs[INPUTS]; /* reduces by how many inputs were whole */
} crowd;

static double uniform(uint64_t x) { return (double)(mix(x) >> 11) * 0x1p-53; }
static uint64_t below(crowd *w, uint64_t n) { return dice_below(&w->dice, n); }
static uint64_t now(const crowd *w) { return mlfab_sim_clock(w->sim); }

/* --- nodes on the simulator's transport --- */

static void open_node(crowd *w, uint32_t i) {
  rank *r = &w->ranks[i];
  mlfab_config c = w->config;
  mlfab_error error;
  c.workers = w->n;
  c.rank = (int32_t)i;
  snprintf(c.coordinator, sizeof c.coordinator, "sim:0");
  if (driven_open(w->sim, i, &c, &r->node, &r->link, &error)) fail_msg("%s", error.text);
}

static void kill_node(crowd *w, uint32_t i) {
  rank *r = &w->ranks[i];
  (void)w;
  if (!r->node) return;
  driven_kill(&r->node, r->link);
  r->request = 0;
}

static void init_world(crowd *w, uint32_t n, uint32_t graph, uint32_t mode, uint64_t count) {
  memset(w, 0, sizeof *w);
  mlfab_config_init(&w->config);
  w->config.heartbeat_ns = 100 * MS;
  w->network = (mlfab_sim_options){.size = sizeof w->network, .hosts = n};
  w->options = (mlfab_stochastic_options){
      .size = sizeof w->options, .graph = graph, .mode = mode, .degree = 2};
  w->n = n;
  w->count = count;
  w->compute_ns = 10 * MS;
  w->slice_ns = 20000;
  w->timeout_ns = 100 * SECOND;
  w->seed = 1;
}

static void turn(crowd *w) {
  mlfab_sim_run(w->sim, w->slice_ns);
  for (uint32_t i = 0; i < w->n; i++)
    if (w->ranks[i].node) driven_pump(w->ranks[i].node, w->ranks[i].link, now(w));
}

static void open_world(crowd *w) {
  w->network.seed = w->seed;
  w->dice = mix(w->seed) << 1;
  assert_int_equal(mlfab_sim_create(&w->network, &w->sim), 0);
  for (uint32_t i = 0; i < w->n; i++) {
    w->ranks[i].pace = 1 + w->spread * (2 * uniform(w->seed * 1000 + i) - 1);
    w->ranks[i].data = calloc(w->count, sizeof(double));
    w->ranks[i].before = calloc(w->count, sizeof(double));
    open_node(w, i);
  }
  for (uint32_t i = 0; i < w->n;) {
    mlfab_error error;
    int ready = mlfab_node_ready(w->ranks[i].node, &error);
    if (ready < 0) fail_msg("node %u: %s", (unsigned)i, error.text);
    if (ready == 0) turn(w);
    i += ready == 1;
  }
}

static void close_world(crowd *w) {
  for (uint32_t i = 0; i < w->n; i++) {
    kill_node(w, i);
    free(w->ranks[i].data);
    free(w->ranks[i].before);
  }
  mlfab_sim_destroy(&w->sim);
}

/* --- what a worker does --- */

static void compute(crowd *w, uint32_t i) {
  rank *r = &w->ranks[i];
  double jitter = 1 + w->jitter * (2 * uniform(mix(w->seed * 77 + i) + r->iterations) - 1);
  if (w->compute) w->compute(w, i);
  r->until = now(w) + (uint64_t)((double)w->compute_ns * r->pace * jitter);
}

static void failed(const crowd *w, rank *r) {
  mlfab_error error;
  assert_int_equal(mlfab_node_last_error(r->node, &error), 0);
  if (!w->endures) fail_msg("%s", error.text);
  assert_memory_equal(r->data, r->before, w->count * sizeof(double));
  r->failures++;
}

static void note(crowd *w, rank *r) {
  const mlfab_stochastic_info *info = &r->info;
  assert_int_equal(info->whole + info->torn + info->stale, info->senders);
  assert_int_equal(info->iteration, ++r->iterations);
  r->sent_bytes += info->sent_bytes;
  w->total++;
  w->whole += info->whole;
  w->torn += info->torn;
  w->stale += info->stale;
  w->inputs[info->whole < INPUTS ? info->whole : INPUTS - 1]++;
}

/* Starts what is next for this worker. */
static void begin(crowd *w, uint32_t i) {
  rank *r = &w->ranks[i];
  if (now(w) < r->until || (r->opened && w->enough && r->iterations >= w->enough)) return;
  memcpy(r->before, r->data, w->count * sizeof(double));
  r->opening = !r->opened;
  r->started_ns = now(w);
  r->info.size = sizeof r->info;
  int code = r->opened ? SUBMIT(r->node, now(w), &r->request, STOCHASTIC_REDUCE, .id = r->id,
                                .data = r->data, .timeout_ns = w->timeout_ns, .info_p = &r->info)
                       : SUBMIT(r->node, now(w), &r->request, STOCHASTIC_OPEN, .count = w->count,
                                .dtype = MLFAB_F64, .options = &w->options,
                                .timeout_ns = w->timeout_ns, .id_p = &r->id);
  if (code) failed(w, r);
  if (code) r->until = now(w) + MS;
}

static void look(crowd *w, uint32_t i) {
  rank *r = &w->ranks[i];
  mlfab_result result;
  int done = 0;
  assert_int_equal(mlfab_node_test(r->node, r->request, &done, &result), 0);
  if (!done && now(w) - r->started_ns > w->timeout_ns + 2 * SECOND)
    fail_msg("worker %u hangs", (unsigned)i);
  if (!done) return;
  r->request = 0;
  if (result.status) {
    failed(w, r);
    r->until = now(w) + MS;
    return;
  }
  if (r->opening)
    r->opened = 1;
  else
    note(w, r);
  compute(w, i);
}

static void go_on(crowd *w) {
  turn(w);
  for (uint32_t i = 0; i < w->n; i++) {
    if (!w->ranks[i].node) continue;
    if (w->ranks[i].request) look(w, i);
    if (!w->ranks[i].request) begin(w, i);
  }
}

static int all_enough(const crowd *w) {
  for (uint32_t i = 0; i < w->n; i++)
    if (w->ranks[i].node && w->ranks[i].iterations < w->enough) return 0;
  return 1;
}

/* Virtual seconds until so many iterations of all together are done, beyond those of the opening. */
static double run_total(crowd *w, uint64_t total) {
  uint64_t start = 0;
  while (w->total < total) {
    go_on(w);
    if (!start && w->total > 0) start = now(w);
  }
  return (double)(now(w) - start) * 1e-9;
}

/* --- figures --- */

static double share_from(const crowd *w, uint32_t least) {
  uint64_t sum = 0;
  for (uint32_t i = least; i < INPUTS; i++) sum += w->inputs[i];
  return 100.0 * (double)sum / (double)w->total;
}

/* Fig. 8: eight workers, all to all, speeds that differ by +-50 %. */
TEST(inputs_that_are_whole) {
  double from5[4] = {0}, full[4] = {0};
  uint64_t torn[4] = {0};
  for (uint32_t mode = MLFAB_STOCHASTIC_NOTIFY_ACK; mode <= MLFAB_STOCHASTIC_ASYNC; mode++) {
    static crowd w;
    init_world(&w, 8, MLFAB_GRAPH_ALL, mode, 25000); /* 7 * 200 kB: 1.1 ms of the link */
    w.config.chunk_bytes = 16384;
    w.spread = 0.5;
    w.jitter = 0.1;
    open_world(&w);
    (void)run_total(&w, 1600);
    from5[mode] = share_from(&w, 5);
    full[mode] = share_from(&w, 7);
    torn[mode] = w.torn;
    print_message("mode %u, W %.2f: all 7 in %.1f %%, 5 and more in %.1f %%, torn %u of %u\n", mode,
                  7 * 8.0 * 25000 / 1.25e9 / 10e-3, full[mode], from5[mode], (unsigned)w.torn,
                  (unsigned)(7 * w.total));
    close_world(&w);
  }
  assert_true(full[MLFAB_STOCHASTIC_NOTIFY_ACK] == 100);
  assert_true(torn[MLFAB_STOCHASTIC_NOTIFY_ACK] == 0);
  assert_true(full[MLFAB_STOCHASTIC_BSP] < 100);
  assert_true(torn[MLFAB_STOCHASTIC_BSP] > 0 && torn[MLFAB_STOCHASTIC_ASYNC] > 0);
  assert_true(from5[MLFAB_STOCHASTIC_BSP] >= 60);
  assert_true(from5[MLFAB_STOCHASTIC_ASYNC] >= 35 && from5[MLFAB_STOCHASTIC_ASYNC] <= 85);
  assert_true(from5[MLFAB_STOCHASTIC_ASYNC] < from5[MLFAB_STOCHASTIC_BSP]);
}

/* §6.2: who waits less is faster; on a sparse graph waiting for neighbours is less than for all. */
TEST(throughput) {
  static const uint32_t nodes[] = {8, 25};
  for (uint32_t k = 0; k < 2; k++) {
    double seconds[4];
    for (uint32_t mode = MLFAB_STOCHASTIC_NOTIFY_ACK; mode <= MLFAB_STOCHASTIC_ASYNC; mode++) {
      static crowd w;
      init_world(&w, nodes[k], MLFAB_GRAPH_EXPANDER, mode, 2500);
      w.jitter = 0.5;
      w.slice_ns = 100000;
      open_world(&w);
      seconds[mode] = run_total(&w, 100 * nodes[k]);
      close_world(&w);
    }
    print_message("%u workers: BSP / NOTIFY_ACK %.3f, NOTIFY_ACK / ASYNC %.3f\n", nodes[k],
                  seconds[MLFAB_STOCHASTIC_BSP] / seconds[MLFAB_STOCHASTIC_NOTIFY_ACK],
                  seconds[MLFAB_STOCHASTIC_NOTIFY_ACK] / seconds[MLFAB_STOCHASTIC_ASYNC]);
    assert_true(seconds[MLFAB_STOCHASTIC_BSP] >= 1.03 * seconds[MLFAB_STOCHASTIC_NOTIFY_ACK]);
    assert_true(seconds[MLFAB_STOCHASTIC_NOTIFY_ACK] > seconds[MLFAB_STOCHASTIC_ASYNC]);
  }
}

/* 2 / (N - 1) of the bytes of all to all: as told, and as sent. */
TEST(bytes) {
  static const uint32_t nodes[] = {4, 8, 25, 64};
  for (uint32_t k = 0; k < 4; k++) {
    static const uint32_t graphs[] = {MLFAB_GRAPH_ALL, MLFAB_GRAPH_EXPANDER};
    uint64_t told[2], payload[2];
    for (uint32_t g = 0; g < 2; g++) {
      static crowd w;
      mlfab_stats stats;
      init_world(&w, nodes[k], graphs[g], MLFAB_STOCHASTIC_NOTIFY_ACK, 500);
      w.enough = 2;
      w.compute_ns = MS;
      w.slice_ns = 200000;
      open_world(&w);
      while (!all_enough(&w)) go_on(&w);
      told[g] = w.ranks[1].sent_bytes;
      assert_int_equal(mlfab_node_stats(w.ranks[1].node, &stats, sizeof stats), 0);
      payload[g] = stats.payload_sent;
      close_world(&w);
    }
    assert_int_equal(told[0], 2 * 4000 * (nodes[k] - 1));
    assert_int_equal(told[1] * (nodes[k] - 1), told[0] * 2);
    assert_int_equal(payload[0], told[0]);
    assert_int_equal(payload[1], told[1]);
  }
}

/* --- learning: a linear SVM, data split among the workers --- */

enum { FEATURES = 50, SAMPLES = 40 };

typedef struct task {
  float x[NODES][SAMPLES][FEATURES];
  float y[NODES][SAMPLES];
  double rate;
} task;

/* A worker's samples show two of the features, and nearly nothing of the others: so all must hear of
 * all. With data that are alike everywhere, graphs would differ by nothing. */
static void draw_task(task *t, uint32_t n, uint64_t seed) {
  double truth[FEATURES];
  for (uint32_t f = 0; f < FEATURES; f++) truth[f] = uniform(seed * 31 + f) - 0.5;
  for (uint32_t i = 0; i < n; i++) {
    for (uint32_t s = 0; s < SAMPLES; s++) {
      double sum = 0;
      for (uint32_t f = 0; f < FEATURES; f++) {
        double v = (uniform(mix(seed + i * 1000003 + s * 1009) + f) - 0.5) * (f % n == i ? 2 : 0.1);
        t->x[i][s][f] = (float)v;
        sum += v * truth[f];
      }
      t->y[i][s] = sum > 0 ? 1 : -1;
    }
  }
}

/* The whole objective: hinge loss of all samples, and a little of the weights' norm. */
static double objective(const task *t, uint32_t n, const double *w) {
  double loss = 0, norm = 0;
  for (uint32_t i = 0; i < n; i++) {
    for (uint32_t s = 0; s < SAMPLES; s++) {
      double sum = 0;
      for (uint32_t f = 0; f < FEATURES; f++) sum += (double)t->x[i][s][f] * w[f];
      if (sum * (double)t->y[i][s] < 1) loss += 1 - sum * (double)t->y[i][s];
    }
  }
  for (uint32_t f = 0; f < FEATURES; f++) norm += w[f] * w[f];
  return loss / (n * SAMPLES) + 0.005 * norm;
}

/* A full subgradient step over the worker's own samples. */
static void learn(crowd *w, uint32_t i) {
  const task *t = w->user;
  double *v = w->ranks[i].data, g[FEATURES];
  for (uint32_t f = 0; f < FEATURES; f++) g[f] = 0.01 * v[f];
  for (uint32_t s = 0; s < SAMPLES; s++) {
    double sum = 0;
    for (uint32_t f = 0; f < FEATURES; f++) sum += (double)t->x[i][s][f] * v[f];
    if (sum * (double)t->y[i][s] >= 1) continue;
    for (uint32_t f = 0; f < FEATURES; f++)
      g[f] -= (double)t->y[i][s] * (double)t->x[i][s][f] / SAMPLES;
  }
  double rate = t->rate / (1 + w->ranks[i].iterations / 20.0);
  for (uint32_t f = 0; f < FEATURES; f++) v[f] -= rate * g[f];
}

/* Iterations until the worst worker's model is at the target, at most `most`. */
static uint32_t iterations_to(task *t, uint32_t n, uint32_t graph, double target, uint32_t most,
                              double *reached_p) {
  static crowd w;
  uint32_t k = 0;
  double worst = 0;
  init_world(&w, n, graph, MLFAB_STOCHASTIC_NOTIFY_ACK, FEATURES);
  w.compute = learn;
  w.user = t;
  w.compute_ns = 100000;
  w.slice_ns = 200000;
  open_world(&w);
  for (k = 1; k <= most; k++) {
    w.enough = k;
    while (!all_enough(&w)) go_on(&w);
    worst = 0;
    for (uint32_t i = 0; i < n; i++) {
      /* `before` is what it called with; the mean of iteration k is what it called on with. */
      double loss = objective(t, n, w.ranks[i].before);
      if (loss > worst) worst = loss;
    }
    if (worst <= target) break;
  }
  close_world(&w);
  *reached_p = worst;
  return k;
}

/* Fig. 7 and the same optimum: 25 workers. */
TEST(convergence) {
  static task t;
  double best, reached;
  uint32_t n = 25;
  draw_task(&t, n, 3);
  t.rate = 8;
  (void)iterations_to(&t, n, MLFAB_GRAPH_ALL, 0, 400, &best);
  double target = best * 1.05;
  uint32_t all = iterations_to(&t, n, MLFAB_GRAPH_ALL, target, 2000, &reached);
  uint32_t expander = iterations_to(&t, n, MLFAB_GRAPH_EXPANDER, target, 2000, &reached);
  uint32_t chain = iterations_to(&t, n, MLFAB_GRAPH_CHAIN, target, 4000, &reached);
  print_message("objective %.4f: all %u, expander %u, chain %u iterations\n", target, all, expander,
                chain);
  assert_true(all <= expander && expander < chain);
  assert_true(chain >= 1.3 * expander && chain <= 4 * expander);
  uint32_t same = iterations_to(&t, n, MLFAB_GRAPH_EXPANDER, best * 1.01, 600, &reached);
  print_message("all's objective after 400 within 1 %%: expander after %u\n", same);
  assert_true(same <= 600);
}

/* --- faults --- */

static uint64_t one_seed(uint64_t seed) {
  static crowd w;
  uint64_t trace;
  static const uint32_t graphs[] = {MLFAB_GRAPH_ALL, MLFAB_GRAPH_EXPANDER, MLFAB_GRAPH_CHAIN,
                                    MLFAB_GRAPH_RING};
  mlfab_sim_options faults = {.size = sizeof faults};
  init_world(&w, 2 + (uint32_t)(mix(seed) % 9), graphs[mix(seed + 1) % 4],
             1 + (uint32_t)(mix(seed + 2) % 3), 1 + mix(seed + 3) % 20000);
  w.seed = seed;
  w.endures = 1;
  w.slice_ns = 100000;
  w.compute_ns = 2 * MS;
  w.jitter = 0.9;
  w.timeout_ns = 5 * SECOND;
  open_world(&w);
  while (w.total < w.n) go_on(&w);
  faults.loss = 0.001 * (double)below(&w, 4);
  faults.duplicate = 0.001 * (double)below(&w, 4);
  faults.reorder = 0.01 * (double)below(&w, 3);
  faults.partition = 0.2 * (double)below(&w, 2);
  faults.pause = 0.2 * (double)below(&w, 2);
  faults.partition_ns = faults.pause_ns = 150 * MS;
  mlfab_sim_set_faults(w.sim, &faults);
  uint64_t end = now(&w) + 2 * SECOND, dies = below(&w, 2) ? now(&w) + below(&w, 2 * SECOND) : 0;
  uint32_t victim = 1 + (uint32_t)below(&w, w.n - 1); /* not server 0 */
  while (now(&w) < end) {
    if (dies && now(&w) >= dies) kill_node(&w, victim);
    go_on(&w);
  }
  mlfab_sim_set_faults(w.sim, NULL);
  end = now(&w) + 20 * SECOND;
  uint32_t least[NODES];
  for (uint32_t i = 0; i < w.n; i++) least[i] = w.ranks[i].iterations + 3;
  for (int all = 0; !all;) {
    all = 1;
    go_on(&w);
    for (uint32_t i = 0; i < w.n; i++) all &= !w.ranks[i].node || w.ranks[i].iterations >= least[i];
    if (now(&w) > end) wrong("no iterations after the faults");
  }
  assert_int_equal(mlfab_sim_trace_hash(w.sim, &trace), 0);
  close_world(&w);
  return trace;
}

static void try_seed(uint64_t seed) { seeds_same(seed, one_seed); }

TEST(faults) { seeds_run("stochastic", test_cases(20), try_seed); }

TESTS(NULL, NULL)
