/* plan.c - how long planning takes: bench-plan [FILE.tsv] [--quick]
 *
 * The setting of MLfabric §7.4: batches of |U| updates from |U|/2 nodes, deadlines uniform in 1..2|U|, a
 * congestion-free core; here with 8 aggregators, order and groups together, one core. The peers are the
 * paper's own figures, and the algorithms as they are written (everybody is looked at in every
 * iteration, every case is run to its end) on the same network code in the same run, whose plan must be
 * the same. Two networks: all NICs equal and constant, and NICs of several rates that change. Beyond the
 * paper's setting: four servers with a part of the model each, and the variants of Alg. 3 tried too.
 *
 * It links the parts, since planning is not in the public header, and so is a program of its own;
 * rows are appended to FILE.tsv in the format of bench.c. */
#include "core/sched/plan.h"
#include "core/base/rng.h"
#include "single.h"

#include <math.h>

enum { AGGREGATORS = 8, TRIALS = 9, SERVERS = 4 };
enum { EQUAL, VARIED, SERVERS4, BEST, MODES };
static const char *const modes[] = {"equal", "varied", "servers4", "best"};

typedef struct setting {
  uint32_t n, nodes;
  mlfab__network net;
  mlfab__candidate *updates;
  double *bytes;
  uint32_t server[SERVERS], aggregators[AGGREGATORS * SERVERS];
  mlfab__batch batch;
} setting;

static mlfab__env env;

/* ---- the batch ---- */

/* A rate that changes every few transfers among those of fast, shared and slow NICs. */
static void set_varied(setting *s, mlfab__rng *prng, enum mlfab__capacity_kind kind, uint32_t i) {
  static const double rates[] = {10e9, 10e9, 5e9, 5e9, 2.5e9, 1e9};
  double at[16], rate[16];
  for (int k = 0; k < 16; k++) {
    at[k] = k == 0 ? 0 : at[k - 1] + 1 + (double)mlfab__rng_below(prng, 20);
    rate[k] = rates[mlfab__rng_below(prng, 6)];
  }
  require(mlfab__network_capacity(&s->net, kind, i, 16, at, rate) == 0, "a capacity");
}

static void make(setting *s, uint32_t n, int mode, uint64_t seed) {
  mlfab__rng prng;
  uint32_t servers = mode == SERVERS4 ? SERVERS : 1;
  memset(s, 0, sizeof *s);
  mlfab__rng_seed(&prng, seed);
  s->n = n;
  s->nodes = n / 2;
  s->updates = calloc(n, sizeof *s->updates);
  s->bytes = calloc((size_t)n * servers, sizeof *s->bytes);
  require(s->updates && s->bytes, "memory");
  require(mlfab__network_init(&s->net, &env, s->nodes, 0) == 0, "a network");
  for (uint32_t i = 0; i < s->nodes; i++) {
    for (int kind = MLFAB__EGRESS; kind <= MLFAB__INGRESS; kind++) {
      if (mode == VARIED) {
        set_varied(s, &prng, (enum mlfab__capacity_kind)kind, i);
      } else {
        mlfab__network_constant(&s->net, (enum mlfab__capacity_kind)kind, i, 10e9);
      }
    }
  }
  /* Servers and aggregators are on nodes that have workers too. */
  for (uint32_t j = 0; j < servers; j++) s->server[j] = j;
  for (uint32_t q = 0; q < AGGREGATORS * servers; q++) s->aggregators[q] = SERVERS + q / servers;
  s->batch = (mlfab__batch){.updates = s->updates,
                            .n = n,
                            .server = s->server,
                            .servers = servers,
                            .aggregators = s->aggregators,
                            .k = AGGREGATORS,
                            .delay_bound = 2 * (int64_t)n,
                            .version = 2 * (int64_t)n,
                            .best = mode == BEST};
  for (uint32_t i = 0; i < n; i++) {
    double *bytes = s->bytes + (size_t)i * servers;
    double size = mode == VARIED ? 8e8 * (double)(1 + mlfab__rng_below(&prng, 4)) : 8e8;
    for (uint32_t j = 0; j < servers; j++) bytes[j] = size / servers;
    s->updates[i] = (mlfab__candidate){.id = i,
                                       .node = (uint32_t)mlfab__rng_below(&prng, s->nodes),
                                       .version = 1 + (int64_t)mlfab__rng_below(&prng, 2 * n),
                                       .bytes = bytes};
  }
}

static void drop(setting *s) {
  mlfab__network_free(&s->net);
  free(s->updates);
  free(s->bytes);
}

/* ---- the algorithms as they are written, for one server ---- */

static uint32_t naive_argmin(const setting *s, const uint8_t *fate, int64_t dl, int only,
                             double *times) {
  double least = mlfab__network_never();
  uint32_t n = s->n;
  for (uint32_t g = 0; g < n; g++) {
    const mlfab__candidate *c = &s->updates[g];
    int64_t d = c->version + s->batch.delay_bound - s->batch.version;
    times[g] = mlfab__network_never();
    if (fate[g] || (only ? d != dl : d < dl)) continue;
    times[g] = mlfab__network_end(&s->net, c->node, s->server[0], c->bytes[0], c->available);
    if (times[g] < least) least = times[g];
  }
  for (uint32_t g = 0; g < n && mlfab__finite(least); g++) {
    if (!mlfab__network_less(least, times[g])) return g;
  }
  return n;
}

static uint32_t naive_order(setting *s, uint32_t *order) {
  uint8_t *fate = calloc(s->n, 1), *due = calloc(s->n, 1);
  double *times = calloc(s->n, sizeof *times), *end = calloc(s->n, sizeof *end);
  uint32_t *mark = calloc(s->n, sizeof *mark), n = 0;
  require(fate && due && times && end && mark, "memory");
  for (;;) {
    uint32_t g = naive_argmin(s, fate, n + 1, 1, times);
    int is_due = g < s->n;
    if (!is_due) g = naive_argmin(s, fate, n + 1, 0, times);
    if (g == s->n) break;
    double t = times[g];
    if (n > 0 && due[n - 1] && mlfab__network_less(t, end[n - 1])) {
      mlfab__network_undo(&s->net, mark[--n]);
      continue;
    }
    const mlfab__candidate *c = &s->updates[g];
    mark[n] = mlfab__network_mark(&s->net);
    require(mlfab__network_reserve(&s->net, c->node, s->server[0], c->bytes[0], c->available,
                                   &end[n]) == 0,
            "memory");
    fate[g] = 1;
    due[n] = (uint8_t)is_due;
    order[n++] = g;
  }
  mlfab__network_undo(&s->net, 0);
  free(fate);
  free(due);
  free(times);
  free(end);
  free(mark);
  return n;
}

/* T(n) with the network as before; undone afterwards. */
static double naive_case(setting *s, const uint32_t *order, uint32_t count, uint32_t n) {
  double t_max = 0, ready = 0, size = 0, t, never = mlfab__network_never();
  uint32_t q = 0, i = 0, members = 0;
  while (i < count || members > 0) {
    const mlfab__candidate *c = i < count ? &s->updates[order[i]] : NULL;
    if (i < n) {
      mlfab__network_reserve(&s->net, c->node, s->server[0], c->bytes[0], c->available, &t);
      t_max = fmax(t_max, t);
      i++;
      continue;
    }
    t = never;
    if (q == AGGREGATORS) break;
    uint32_t a = s->aggregators[q];
    if (c) t = mlfab__network_end(&s->net, c->node, a, c->bytes[0], c->available);
    if (!mlfab__network_less(t_max, t)) {
      mlfab__network_reserve(&s->net, c->node, a, c->bytes[0], c->available, &t);
      ready = members++ ? fmax(ready, t) : t;
      size = fmax(members == 1 ? 0 : size, c->bytes[0]);
      i++;
      continue;
    }
    if (members > 0) {
      mlfab__network_reserve(&s->net, a, s->server[0], size, ready, &t);
      t_max = fmax(t_max, t);
      members = 0;
    }
    q++;
  }
  mlfab__network_undo(&s->net, 0);
  return i < count ? never : t_max;
}

static uint32_t naive_group(setting *s, const uint32_t *order, uint32_t count, double *time_p) {
  double *times = calloc((size_t)count + 1, sizeof *times), least = mlfab__network_never();
  uint32_t n = 0;
  require(times != NULL, "memory");
  for (uint32_t i = 0; i <= count; i++) {
    times[i] = naive_case(s, order, count, i);
    if (times[i] < least) least = times[i];
  }
  while (mlfab__network_less(least, times[n])) n++;
  *time_p = times[n];
  free(times);
  return n;
}

/* ---- measuring ---- */

typedef struct figure {
  double ours, order, naive; /* milliseconds */
  double order_looks, group_looks;
} figure;

/* Checks that the plan is the naive one's. */
static void check(setting *s, const mlfab__planned *planned, uint32_t applied,
                  const mlfab__group_choice *choice, figure *f) {
  uint32_t *order = calloc(s->n, sizeof *order);
  double time;
  require(order != NULL, "memory");
  double begin = cpu_now();
  uint32_t n = naive_order(s, order), direct = naive_group(s, order, n, &time);
  f->naive = (cpu_now() - begin) * 1e3;
  require(n == applied && direct == choice->n, "the plan is not that of the paper");
  require(memcmp(&time, &choice->time, sizeof time) == 0, "the plan's time is not the paper's");
  for (uint32_t i = 0; i < n; i++) {
    require(planned[i].update == order[i], "the order is not the paper's");
  }
  free(order);
}

static figure measure(uint32_t n, int mode, int trials, int naive) {
  mlfab__planner planner;
  mlfab__planned *planned = calloc(n, sizeof *planned);
  mlfab__ordered *ordered = calloc(n, sizeof *ordered);
  double total[TRIALS], order[TRIALS];
  figure f = {0};
  require(planned && ordered, "memory");
  mlfab__planner_init(&planner, &env);
  for (int t = -1; t < trials; t++) {
    setting s;
    mlfab__group_choice choice;
    uint32_t applied;
    make(&s, n, mode, 1 + (uint64_t)(t < 0 ? 0 : t));
    mlfab__order_input in = {.updates = s.updates,
                             .n = n,
                             .server = s.server,
                             .servers = s.batch.servers,
                             .delay_bound = s.batch.delay_bound,
                             .version = s.batch.version};
    double begin = cpu_now();
    require(mlfab__order_deadlines(&planner.orderer, &s.net, &in, ordered, &applied) == 0, "order");
    mlfab__network_undo(&s.net, 0);
    order[t < 0 ? 0 : t] = (cpu_now() - begin) * 1e3;
    planner.orderer.evaluations = planner.grouper.evaluations = 0;
    begin = cpu_now();
    int code = mlfab__plan_batch(&planner, &s.net, &s.batch, planned, &applied, &choice);
    total[t < 0 ? 0 : t] = (cpu_now() - begin) * 1e3;
    require(code == 0, "plan");
    f.order_looks = (double)planner.orderer.evaluations;
    f.group_looks = (double)planner.grouper.evaluations;
    mlfab__network_undo(&s.net, 0);
    if (t == trials - 1 && naive) check(&s, planned, applied, &choice, &f);
    drop(&s);
  }
  f.ours = median(total, trials);
  f.order = median(order, trials);
  mlfab__planner_free(&planner);
  free(planned);
  free(ordered);
  return f;
}

static void report(uint32_t n, int mode) {
  double paper = n == 100 ? 30 : n == 500 ? 440 : n == 1000 ? 1460 : 0;
  int naive = mode <= VARIED && n <= (quick ? 500 : 1000);
  char name[64];
  figure f = measure(n, mode, n > 1000 ? 3 : TRIALS, naive);
  snprintf(name, sizeof name, "plan/%s/%u", modes[mode], n);
  printf("%-24s %9.3f ms         order %.3f ms; looks: order %.0f, groups %.0f", name, f.ours,
         f.order, f.order_looks, f.group_looks);
  if (naive) printf("; as written %.4g ms (%.1fx)", f.naive, f.naive / f.ours);
  if (paper > 0) printf("; paper %.0f ms (%.0fx)", paper, paper / f.ours);
  printf("\n");
  if (naive) row(name, f.ours, "ms", "literal", f.naive, NULL, 0);
  if (paper > 0) row(name, f.ours, "ms", "paper", paper, NULL, 0);
  if (!naive && !(paper > 0)) row(name, f.ours, "ms", NULL, 0, NULL, 0);
}

int main(int argc, char **argv) {
  static const uint32_t sizes[] = {100, 500, 1000, 10000};
  single_open(argc, argv);
  mlfab__env_init(&env, NULL);
  for (int mode = 0; mode < MODES; mode++) {
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
      if (sizes[i] > 1000 && (quick || mode > VARIED)) continue;
      report(sizes[i], mode);
    }
  }
  single_close();
  return 0;
}
