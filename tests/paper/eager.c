/* eager.c - eagerSGD's microbenchmark in the simulator: the latency that a reduction saves by not waiting,
 * and the number of ranks that take part.
 *
 * 32 ranks call one after another, 1 ms apart, and wait for each other between rounds. Measured is a call's
 * latency in virtual time, mean over ranks and rounds, against that of a full allreduce on the same
 * network. A rank contributes 2^rank, in even rounds to the lower half of each int64, in odd ones to the
 * upper half: so every element of every sum shows the active ranks, and the late ones of the previous
 * round, each exactly once. Uses mlfab.h alone.
 *
 * Source: eagerSGD §6.1, fig. 8 and 9. Its QUORUM is not the paper's. */
#include "paper.h"
#include "../../mlfab_partial.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 32, SIZES = 5, KINDS = 5, NETWORKS = 3, STEP = MS };
#define NO_LIMIT 1e12
#define ALL 0xffffffffull /* a bit for every rank */

typedef struct eager_network {
  const char *name;
  uint64_t latency_ns, rate;
  double solo[SIZES]; /* ratios of the separate model; 0: none */
} eager_network;

typedef struct eager_kind {
  const char *name;
  uint32_t mode, quorum; /* 0: a full allreduce */
  uint32_t rounds[SIZES];
} eager_kind;

enum { FULL, SOLO, MAJORITY, QUORUM_8, QUORUM_16 };

static const eager_network networks[NETWORKS] = {
    {"2 us, 10 GB/s", 2000, 10000000000u, {5900, 0, 0, 580, 78}},
    {"40 us, 2 GB/s", 40000, 2000000000u, {295, 0, 0, 43, 4.6}},
    {"150 us, 1 GB/s", 150000, 1000000000u, {79, 0, 0, 12, 0}},
};
static const uint64_t sizes[SIZES] = {64, 4096, 65536, 1 << 20, 4 << 20};
static const char *const size_names[SIZES] = {"64 B", "4 KiB", "64 KiB", "1 MiB", "4 MiB"};
static const eager_kind kinds[KINDS] = {
    [FULL] = {"full", 0, 0, {4, 4, 4, 2, 2}},
    [SOLO] = {"solo", MLFAB_PARTIAL_SOLO, 0, {32, 16, 16, 8, 4}},
    [MAJORITY] = {"majority", MLFAB_PARTIAL_MAJORITY, 0, {1024, 256, 256, 64, 32}},
    [QUORUM_8] = {"quorum(8)", MLFAB_PARTIAL_QUORUM, 8, {32, 16, 16, 8, 4}},
    [QUORUM_16] = {"quorum(16)", MLFAB_PARTIAL_QUORUM, 16, {64, 32, 32, 8, 4}},
};

typedef struct eager_outcome {
  uint32_t rounds, least;
  double latency_ns;          /* mean over ranks and rounds */
  double first_ns;            /* of rank 0 */
  uint32_t active[RANKS + 1]; /* number of rounds with this many active ranks */
} eager_outcome;

typedef struct eager_rank {
  mlfab *node;
  int64_t *data;
  uint32_t number, id;
  enum { IDLE, CALLED, DONE } state;
  mlfab_request request;
  mlfab_partial_info info;
  uint64_t began_ns, waited_ns;
} eager_rank;

static struct {
  mlfab_sim *sim;
  eager_rank rank[RANKS];
  const eager_kind *kind;
  uint64_t count, seed;
  uint32_t turn;      /* of the object */
  uint64_t active[2]; /* bitmaps: of the last round, of the one before */
  double majority;    /* sum of its ratios */
  int failures;
} bench;

static void failed(const char *what, const eager_rank *r) {
  mlfab_error error = {0};
  if (r && r->node) mlfab_last_error(r->node, &error);
  fprintf(stderr, "paper: eager: %s: rank %d, round %u: %s %s\n",
          bench.kind ? bench.kind->name : "opening", r ? (int)r->number : -1, (unsigned)bench.turn,
          what, error.text);
  bench.failures++;
}

/* ---- a fabric ---- */

/* Returns 0, or 1 after reporting the failure. */
static int fabric_open(const eager_network *network) {
  mlfab_sim_options options = {.size = sizeof options, .hosts = RANKS};
  mlfab_config config;
  options.latency_ns = network->latency_ns;
  options.rate_bytes_per_s = network->rate;
  memset(&bench.rank, 0, sizeof bench.rank);
  bench.kind = NULL;
  mlfab_config_init(&config);
  config.workers = RANKS;
  if (mlfab_sim_create(&options, &bench.sim)) return failed("no simulator", NULL), 1;
  for (uint32_t i = 0; i < RANKS; i++) {
    eager_rank *r = &bench.rank[i];
    r->number = i;
    config.rank = (int32_t)i;
    r->data = malloc(sizes[SIZES - 1]);
    if (!r->data || mlfab_sim_open(bench.sim, i, &config, &r->node, NULL))
      return failed("it does not open", r), 1;
  }
  for (uint32_t i = 0; i < RANKS; i++)
    while (mlfab_is_ready(bench.rank[i].node, NULL) != 1)
      if (!mlfab_sim_step(bench.sim)) return failed("the fabric is not complete", NULL), 1;
  return 0;
}

static void fabric_close(void) {
  for (uint32_t i = 0; i < RANKS; i++) {
    if (bench.rank[i].node) mlfab_abandon(&bench.rank[i].node);
    free(bench.rank[i].data);
  }
  mlfab_sim_destroy(&bench.sim);
}

/* ---- a round ---- */

/* Opening waits for all ranks: each rank's call runs inside the previous one. */
static void rank_open(void *user) {
  eager_rank *r = user;
  mlfab_partial_options options = {.size = sizeof options};
  options.mode = bench.kind->mode;
  options.quorum = bench.kind->quorum;
  options.seed = bench.seed;
  if (mlfab_partial_open(r->node, bench.count, MLFAB_I64, &options, &r->id))
    failed("mlfab_partial_open", r);
  r->state = DONE;
}

static void rank_call(void *user) {
  eager_rank *r = user;
  mlfab_vec vec = {r->data, bench.count};
  int64_t mine = (int64_t)(1ull << (r->number + RANKS * (bench.turn & 1)));
  for (uint64_t i = 0; i < bench.count; i++) r->data[i] = mine;
  r->info = (mlfab_partial_info){.size = sizeof r->info};
  r->began_ns = mlfab_sim_clock(bench.sim);
  int code = bench.kind->mode
                 ? mlfab_partial_start(r->node, r->id, r->data, 0, &r->info, &r->request)
                 : mlfab_allreduce_start(r->node, &vec, 1, MLFAB_I64, NULL, &r->request);
  if (code) failed("the call", r);
  r->state = code ? DONE : CALLED;
}

/* Makes `call` for every rank, the first at `first_ns`, and waits until all are done; returns 0 if they
 * are. */
static int together(void (*call)(void *), uint64_t first_ns, uint64_t step_ns) {
  uint32_t left = RANKS;
  for (uint32_t i = 0; i < RANKS; i++) {
    bench.rank[i].state = IDLE;
    if (mlfab_sim_at(bench.sim, first_ns + i * step_ns, call, &bench.rank[i]))
      return failed("out of memory", NULL), 1;
  }
  while (left && !bench.failures) {
    if (!mlfab_sim_step(bench.sim)) return failed("nothing will ever happen", NULL), 1;
    left = 0;
    for (uint32_t i = 0; i < RANKS; i++) {
      eager_rank *r = &bench.rank[i];
      mlfab_result result;
      int done = 0;
      if (r->state == CALLED && mlfab_test(r->node, r->request, &done, &result))
        failed("mlfab_test", r);
      if (done) {
        if (result.status) failed("the request", r);
        r->waited_ns = mlfab_sim_clock(bench.sim) - r->began_ns;
        r->state = DONE;
      }
      left += r->state != DONE;
    }
  }
  return bench.failures != 0;
}

/* The expected value of every element of this round's sum. */
static int64_t sum_expected(void) {
  uint64_t shift = RANKS * (bench.turn & 1), late = bench.turn ? ALL & ~bench.active[1] : 0;
  return (int64_t)(bench.active[0] << shift | late << (RANKS - shift));
}

/* All ranks have the same sum, it shows the active ranks and the late ones of the previous round, and the
 * library's info agrees. */
static void round_check(void) {
  uint32_t active = 0;
  bench.active[1] = bench.kind->mode ? bench.active[0] : ALL;
  bench.active[0] = bench.kind->mode ? bench.rank[0].info.bitmap[0] : ALL;
  for (uint32_t i = 0; i < RANKS; i++) active += (bench.active[0] >> i & 1) != 0;
  int64_t expected = sum_expected();
  for (uint32_t i = 0; i < RANKS; i++) {
    const eager_rank *r = &bench.rank[i];
    uint64_t wrong = 0;
    for (uint64_t k = 0; k < bench.count; k++) wrong += r->data[k] != expected;
    if (wrong) failed("the sum does not name its members", r);
    if (!bench.kind->mode) continue;
    if (r->info.round != bench.turn || r->info.step != bench.turn) failed("another round", r);
    if (r->info.bitmap[0] != bench.active[0] || r->info.active != active)
      failed("another bitmap", r);
    if (r->info.included != (bench.active[0] >> i & 1)) failed("`included` is wrong", r);
  }
  if (active < bench.kind->quorum) failed("fewer than the quorum", NULL);
}

static void round_count(eager_outcome *o) {
  uint32_t active = bench.kind->mode ? bench.rank[0].info.active : RANKS;
  o->active[active]++;
  if (active < o->least) o->least = active;
  for (uint32_t i = 0; i < RANKS; i++)
    o->latency_ns += (double)bench.rank[i].waited_ns / (RANKS * (double)o->rounds);
  o->first_ns += (double)bench.rank[0].waited_ns / o->rounds;
}

static void rounds_run(const eager_kind *kind, uint32_t rounds, eager_outcome *o) {
  *o = (eager_outcome){.rounds = rounds, .least = RANKS};
  bench.kind = kind;
  bench.turn = 0;
  bench.active[0] = ALL;
  if (kind->mode && together(rank_open, mlfab_sim_clock(bench.sim) + 1, 1)) return;
  /* The first round, in which links are opened, does not count. */
  for (; bench.turn <= rounds && !bench.failures; bench.turn++) {
    mlfab_sim_run(bench.sim, 2 * STEP); /* frames in flight arrive */
    if (together(rank_call, mlfab_sim_clock(bench.sim) + STEP, STEP)) return;
    round_check();
    if (bench.turn > 0) round_count(o);
  }
  mlfab_sim_run(bench.sim, 2 * STEP);
  for (uint32_t i = 0; i < RANKS && kind->mode; i++)
    if (mlfab_partial_close(bench.rank[i].node, bench.rank[i].id))
      failed("mlfab_partial_close", &bench.rank[i]);
}

/* ---- figures ---- */

static double mean_active(const eager_outcome *o) {
  double sum = 0;
  for (uint32_t m = 0; m <= RANKS; m++) sum += (double)m * o->active[m] / o->rounds;
  return sum;
}

/* Mean latency when a reduction that m ranks start takes this long and waits for nothing else. */
static double latency_of(uint32_t m, double exchange_ns) {
  double sum = 0;
  for (uint32_t i = 0; i < RANKS; i++)
    sum += fmax(0, ((double)m - 1 - i) * STEP + exchange_ns) / RANKS;
  return sum;
}

static double latency_expected(const eager_outcome *o, double exchange_ns) {
  double sum = 0;
  for (uint32_t m = 0; m <= RANKS; m++)
    sum += latency_of(m, exchange_ns) * o->active[m] / o->rounds;
  return sum;
}

static double chi_square(const eager_outcome *o) {
  double sum = 0, each = (double)o->rounds / RANKS;
  for (uint32_t m = 1; m <= RANKS; m++) sum += (o->active[m] - each) * (o->active[m] - each) / each;
  return sum;
}

static void row_of_ratio(uint32_t n, uint32_t s, uint32_t k, const eager_outcome *o) {
  char claim[80], note[160];
  double ours = o[FULL].latency_ns / o[k].latency_ns, least = 0, most = 0;
  double expected = o[FULL].latency_ns / latency_expected(&o[k], o[SOLO].first_ns);
  snprintf(claim, sizeof claim, "%s, %s, %s: full / %s", networks[n].name, size_names[s],
           kinds[k].name, kinds[k].name);
  snprintf(note, sizeof note, "%.4g ms instead of %.4g ms; %u rounds", o[k].latency_ns / MS,
           o[FULL].latency_ns / MS, (unsigned)o[k].rounds);
  if (k == MAJORITY) bench.majority += ours;
  if (k == SOLO) {
    least = n == 0 && s < 4 ? 53 : networks[n].solo[s] / 2;
    most = least > 0 ? NO_LIMIT : 0;
  } else {
    snprintf(note + strlen(note), sizeof note - strlen(note),
             ". Expected: within 15 %% of %.3g, by the ranks that were active", expected);
    least = 0.85 * expected;
    most = 1.15 * expected;
  }
  add(claim, k == SOLO ? "53.32" : k == MAJORITY ? "2.46" : "-", ours, "x", least, most, note);
}

/* On the fast network: laws for an exchange of no duration. */
static void rows_of_laws(const eager_outcome *o, uint32_t s) {
  char claim[80];
  for (uint32_t k = QUORUM_8; k <= QUORUM_16 && s < 3; k++) {
    double q = kinds[k].quorum, law = RANKS * (RANKS - 1) / (q * (q - 1));
    snprintf(claim, sizeof claim, "%s, %s: full / %s, by the law", networks[0].name, size_names[s],
             kinds[k].name);
    add(claim, "-", o[FULL].latency_ns / o[k].latency_ns, "x", 0.8 * law, 1.2 * law,
        "P(P-1)/(q(q-1))");
  }
  if (s > 0) return;
  double law = 3.0 * RANKS / (RANKS + 1);
  add("solo: active ranks, mean", "1", mean_active(&o[SOLO]), "of 32", 1, 2, "");
  add("majority: active ranks, mean", "16", mean_active(&o[MAJORITY]), "of 32", 14.7, 18.3,
      "(P+1)/2 = 16.5 when the initiator is drawn from all alike");
  add("majority: chi square of active ranks, 31 degrees", "-", chi_square(&o[MAJORITY]), "", 0,
      61.1, "uniform on 1 to 32: beyond 61.1 in one of 1000");
  add("majority: full / majority, by the law", "2.46", o[FULL].latency_ns / o[MAJORITY].latency_ns,
      "x", 0.89 * law, 1.11 * law,
      "3P/(P+1); 11 % are three deviations of the mean of 1024 rounds");
  add("quorum(8): active ranks, least of all rounds", "-", o[QUORUM_8].least, "of 32", 8, RANKS,
      "");
  add("quorum(16): active ranks, least of all rounds", "-", o[QUORUM_16].least, "of 32", 16, RANKS,
      "");
}

static void rows_of_network(uint32_t n, int quick) {
  paper_text(networks[n].name);
  paper_table();
  for (uint32_t s = 0; s < SIZES; s++) {
    eager_outcome o[KINDS];
    bench.count = sizes[s] / sizeof(int64_t);
    bench.seed = n * SIZES + s + 1;
    for (uint32_t k = 0; k < KINDS && !bench.failures; k++) {
      uint32_t rounds = kinds[k].rounds[s] / (quick ? 4 : n ? 2 : 1);
      rounds_run(&kinds[k], rounds ? rounds : 1, &o[k]);
    }
    if (bench.failures) return;
    for (uint32_t k = SOLO; k < KINDS; k++) row_of_ratio(n, s, k, o);
    if (n == 0) rows_of_laws(o, s);
  }
}

int paper_eager(uint32_t seeds) {
  paper_text(
      "# eagerSGD's partial allreduce, in the simulator\n\n"
      "32 ranks call one after the other, 1 ms apart, and wait for each other between "
      "rounds (§6.1, fig. 8, 9). A figure is the mean latency of a call of a full "
      "allreduce, divided by that of a call that does not wait. The paper's figures "
      "are means over its sizes on a Cray Aries: 53.32 means that its solo took 0.29 "
      "ms. Each rank contributes 2^rank, so in every round and every element the sum "
      "tells which ranks were active, and which came in the round after.");
  for (uint32_t n = 0; n < NETWORKS && !bench.failures; n++) {
    if (!fabric_open(&networks[n])) rows_of_network(n, seeds == 1);
    fabric_close();
  }
  if (bench.failures) return bench.failures;
  paper_text("All networks and sizes");
  paper_table();
  add("majority: full / majority, mean", "2.46", bench.majority / (NETWORKS * SIZES), "x", 1.9,
      2.95,
      "falls from 3P/(P+1) = 2.91 where the exchange takes longer; a mean above 3.1 would be "
      "that of the wrong initiators");
  paper_picture("paper-eager",
                "Colours are kinds of partial allreduce, and marks are networks; higher is faster. "
                "The paper has one mean over its sizes for each kind, the dashed lines.");
  return bench.failures;
}
