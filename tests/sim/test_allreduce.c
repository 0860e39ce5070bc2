/* test_allreduce.c - the planned tree among simulated nodes, driven by hand so that all of them can wait at
 * once: from 1 to 64 ranks, and from seeds with faults.
 *
 * Every rank contributes a mask with its own bit, and numbers of its own. So the sum tells whose data it
 * contains and how often, and the rest must be the sum of exactly these. Checks: every call ends by its
 * deadline; every successful sum is correct to the bit, and all results of one allreduce are equal;
 * allreduces of all live ranks succeed again when the faults are off.
 *
 * MLFAB_SCALE=100 runs 10,000 seeds, 1 (the default) a hundredth of them. MLFAB_SEED=n runs one alone. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "driven.h"
#include "../unit/chance.h"
#include "../unit/scale.h"
#include "seeds.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NODES = 66, BATCH = 64 };
#define MS 1000000ull
#define SECOND 1000000000ull

typedef struct rank {
  mlfab_node *node;
  void *link; /* its transport */
  mlfab_request request;
  int64_t *data;
  uint64_t started_ns, next_ns;
  uint32_t calls, successes;
  int32_t code, blamed;
} rank;

typedef struct world {
  mlfab_sim *sim;
  rank ranks[NODES]; /* workers, then dedicated servers */
  mlfab_config config;
  uint32_t workers, nodes;
  uint64_t count, timeout_ns, dice, slice_ns;
  int harsh; /* faults last longer than heartbeats tolerate */
  char failure[256];
} world;

static uint64_t below(world *w, uint64_t n) { return mix(w->dice++) % n; }
static uint64_t now(const world *w) { return mlfab_sim_clock(w->sim); }

static void broken(world *w, const char *format, ...) {
  va_list arguments;
  if (w->failure[0]) return;
  va_start(arguments, format);
  vsnprintf(w->failure, sizeof w->failure, format, arguments);
  va_end(arguments);
}

/* --- nodes on the simulator's transport --- */

static void open_node(world *w, uint32_t i) {
  rank *r = &w->ranks[i];
  mlfab_config c = w->config;
  mlfab_error error;
  c.workers = w->workers;
  c.rank = (int32_t)(i < w->workers ? i : i - w->workers);
  if (c.dedicated) c.roles = i < w->workers ? MLFAB_ROLE_WORKER : MLFAB_ROLE_SERVER;
  snprintf(c.coordinator, sizeof c.coordinator, "sim:%u", c.dedicated ? w->workers : 0);
  if (driven_open(w->sim, i, &c, &r->node, &r->link, &error)) fail_msg("%s", error.text);
}

/* Removes the node without a goodbye. */
static void kill_node(world *w, uint32_t i) {
  rank *r = &w->ranks[i];
  if (!r->node) return;
  driven_kill(&r->node, r->link);
  r->request = 0;
}

static void turn(world *w) {
  mlfab_sim_run(w->sim, w->slice_ns);
  for (uint32_t i = 0; i < w->nodes; i++) {
    if (w->ranks[i].node) driven_pump(w->ranks[i].node, w->ranks[i].link, now(w));
  }
}

static void open_world(world *w, const mlfab_sim_options *sim) {
  assert_int_equal(mlfab_sim_create(sim, &w->sim), 0);
  for (uint32_t i = 0; i < w->nodes; i++) open_node(w, i);
  for (uint32_t i = 0; i < w->workers; i++) {
    w->ranks[i].data = malloc(w->count * 8);
    assert_non_null(w->ranks[i].data);
  }
  for (uint32_t i = 0; i < w->nodes;) {
    mlfab_error error;
    int ready = mlfab_node_ready(w->ranks[i].node, &error);
    if (ready < 0) fail_msg("node %u: %s", (unsigned)i, error.text);
    if (ready == 0) turn(w);
    i += ready == 1;
  }
}

static void close_world(world *w) {
  for (uint32_t i = 0; i < w->nodes; i++) {
    kill_node(w, i);
    free(w->ranks[i].data);
  }
  mlfab_sim_destroy(&w->sim);
}

static void init_world(world *w, uint32_t workers, uint32_t servers, int dedicated, int scheduled) {
  memset(w, 0, sizeof *w);
  mlfab_config_init(&w->config);
  w->workers = workers;
  w->config.servers = servers;
  w->config.dedicated = (uint32_t)dedicated;
  w->config.scheduler = scheduled ? MLFAB_SCHEDULER_BESIDE : MLFAB_SCHEDULER_NONE;
  w->config.heartbeat_ns = 100 * MS;
  w->nodes = workers + (dedicated ? servers : 0);
  w->slice_ns = 50000;
  w->timeout_ns = 10 * SECOND;
}

/* --- calls --- */

/* Element 0 is the rank's bit; a rank is in a sum with one call only. */
static int64_t number(uint32_t who, uint64_t i) {
  return i == 0 ? (int64_t)((uint64_t)1 << who) : (int64_t)mix(who * 1000003ull + i);
}

static void begin(world *w, uint32_t i) {
  rank *r = &w->ranks[i];
  for (uint64_t k = 0; k < w->count; k++) r->data[k] = number(i, k);
  mlfab_vec vec = {r->data, w->count};
  mlfab_collective options = {
      .size = sizeof options, .algorithm = MLFAB_ALGORITHM_PLANNED, .timeout_ns = w->timeout_ns};
  int code = SUBMIT(r->node, now(w), &r->request, ALLREDUCE, .vecs = &vec, .n = 1,
                    .dtype = MLFAB_I64, .options = &options);
  /* A failure outside a call is reported once, by the next call. */
  if (code)
    code = SUBMIT(r->node, now(w), &r->request, ALLREDUCE, .vecs = &vec, .n = 1, .dtype = MLFAB_I64,
                  .options = &options);
  if (code == MLFAB_ERR_PEER_DEAD && w->harsh) {
    kill_node(w, i); /* server 0 counts as dead for good: the process ends */
    return;
  }
  if (code) broken(w, "rank %u: %s", i, mlfab_error_name(code));
  r->started_ns = now(w);
  r->calls++;
}

/* Returns whose data is in the sum; checks that the rest is theirs. */
static uint64_t check_sum(world *w, uint32_t i) {
  const int64_t *data = w->ranks[i].data;
  uint64_t mask = (uint64_t)data[0];
  for (uint64_t k = 1; k < w->count; k++) {
    uint64_t sum = 0;
    for (uint32_t r = 0; r < w->workers; r++) {
      if (mask >> r & 1) sum += (uint64_t)number(r, k);
    }
    if ((uint64_t)data[k] != sum) {
      broken(w, "rank %u: element %llu is wrong in a sum of %llx", i, (unsigned long long)k,
             (unsigned long long)mask);
      return mask;
    }
  }
  if (!(mask >> i & 1)) broken(w, "rank %u is not in its own sum", i);
  return mask;
}

/* 1 when a call has ended; it must end by its deadline. */
static int finish(world *w, uint32_t i, uint64_t *mask_p) {
  rank *r = &w->ranks[i];
  mlfab_result result;
  int done = 0;
  *mask_p = 0;
  if (mlfab_node_test(r->node, r->request, &done, &result)) broken(w, "rank %u: no request", i);
  if (!done && now(w) - r->started_ns > w->timeout_ns + 2 * SECOND) broken(w, "rank %u hangs", i);
  if (!done) return 0;
  r->request = 0;
  r->code = result.status;
  r->blamed = result.rank;
  if (result.status == 0) *mask_p = check_sum(w, i);
  return 1;
}

/* All live ranks call, and all calls end. */
static void one_of_all(world *w, uint64_t except) {
  uint64_t mask, live = 0, open = 0;
  for (uint32_t i = 0; i < w->workers; i++) {
    if (!w->ranks[i].node || except >> i & 1) continue;
    begin(w, i);
    live |= (uint64_t)1 << i;
  }
  for (open = live; open && !w->failure[0];) {
    turn(w);
    for (uint32_t i = 0; i < w->workers; i++) {
      if (!(open >> i & 1) || !finish(w, i, &mask)) continue;
      open &= ~((uint64_t)1 << i);
      if (w->ranks[i].code == 0 && mask != live) broken(w, "rank %u: somebody is missing", i);
    }
  }
  if (w->failure[0]) fail_msg("%s", w->failure);
}

static void expect(const world *w, int32_t code, int32_t blamed) {
  for (uint32_t i = 0; i < w->workers; i++) {
    const rank *r = &w->ranks[i];
    if (!r->node || (int32_t)i == blamed) continue;
    if (r->code != code || (code && r->blamed != blamed))
      fail_msg("rank %u ends with %s, rank %d", (unsigned)i, mlfab_error_name(r->code),
               (int)r->blamed);
  }
}

/* --- tests --- */

static void test_sizes(void **state) {
  static const uint32_t sizes[] = {1, 2, 3, 5, 8, 13, 33, 64};
  static world w;
  (void)state;
  for (uint32_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    for (int scheduled = 0; scheduled < 2; scheduled++) {
      uint32_t servers = 1 + (k + (uint32_t)scheduled) % 3, dedicated = k % 2;
      if (servers > sizes[k]) servers = sizes[k];
      if (sizes[k] == 64) servers = 2;
      init_world(&w, sizes[k], servers, (int)dedicated, scheduled);
      w.config.eager_bytes = 4096;
      w.count = scheduled ? 20011 : 611;
      mlfab_sim_options sim = {.size = sizeof sim, .hosts = w.nodes, .seed = k + 1};
      open_world(&w, &sim);
      for (int call = 0; call < 3; call++) {
        one_of_all(&w, 0);
        expect(&w, 0, MLFAB_NO_RANK);
      }
      close_world(&w);
    }
  }
}

/* When a rank does not call, the others' deadline names it, and its next call reports the failure; then all
 * continue together. */
static void test_missing(void **state) {
  static world w;
  (void)state;
  init_world(&w, 5, 1, 0, 0);
  w.count = 100;
  w.timeout_ns = SECOND;
  mlfab_sim_options sim = {.size = sizeof sim, .hosts = w.nodes, .seed = 3};
  open_world(&w, &sim);
  one_of_all(&w, 1u << 3);
  expect(&w, MLFAB_ERR_TIMEOUT, 3);
  one_of_all(&w, ~(uint64_t)(1u << 3));
  assert_int_equal(w.ranks[3].code, MLFAB_ERR_TIMEOUT);
  one_of_all(&w, 0);
  expect(&w, 0, MLFAB_NO_RANK);
  close_world(&w);
}

/* A rank crashes before it calls, or in the middle; the others learn of it, and continue without it. */
static void test_crash(void **state) {
  static world w;
  (void)state;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    uint64_t mask, open = 0;
    init_world(&w, 3 + (uint32_t)seed % 6, 1 + (uint32_t)seed % 2, 1, seed % 4 == 0);
    w.count = 20000;
    w.dice = seed;
    mlfab_sim_options sim = {
        .size = sizeof sim, .hosts = w.nodes, .seed = seed, .rate_bytes_per_s = 50000000};
    open_world(&w, &sim);
    uint32_t victim = (uint32_t)below(&w, w.workers);
    for (uint32_t i = 0; i < w.workers; i++) begin(&w, i);
    for (uint64_t t = below(&w, 250); t > 0; t--) turn(&w);
    for (uint32_t i = 0; i < w.workers; i++) {
      if (!finish(&w, i, &mask)) open |= (uint64_t)1 << i;
    }
    if (!(open >> victim & 1)) victim = w.workers;
    if (victim < w.workers) kill_node(&w, victim);
    uint64_t since = now(&w);
    for (open &= ~((uint64_t)1 << victim % 64); open && !w.failure[0];) {
      turn(&w);
      for (uint32_t i = 0; i < w.workers; i++) {
        if (!(open >> i & 1) || !finish(&w, i, &mask)) continue;
        open &= ~((uint64_t)1 << i);
        /* It may have had the whole sum when it died, or have died before there was a tree. */
        if (w.ranks[i].code != 0 &&
            (w.ranks[i].code != MLFAB_ERR_PEER_DEAD || w.ranks[i].blamed != (int32_t)victim))
          broken(&w, "rank %u ends with %s, rank %d", i, mlfab_error_name(w.ranks[i].code),
                 (int)w.ranks[i].blamed);
      }
    }
    if (w.failure[0]) fail_msg("seed %d: %s", (int)seed, w.failure);
    assert_true(now(&w) - since < 5 * 100 * MS + SECOND);
    for (since = now(&w); now(&w) - since < 6 * 100 * MS;) turn(&w); /* all know of it */
    one_of_all(&w, 0);
    expect(&w, 0, MLFAB_NO_RANK);
    close_world(&w);
  }
}

/* --- seeds --- */

/* Every rank calls whenever it may. Sums of all live ranks count; an earlier sum may contain a dead rank's
 * data. */
static void live_on(world *w) {
  uint64_t mask, alive = 0;
  turn(w);
  for (uint32_t i = 0; i < w->workers; i++) alive |= (uint64_t)(w->ranks[i].node != NULL) << i;
  for (uint32_t i = 0; i < w->workers && !w->failure[0]; i++) {
    rank *r = &w->ranks[i];
    if (!r->node) continue;
    if (!r->request) {
      if (now(w) >= r->next_ns) begin(w, i);
    } else if (finish(w, i, &mask)) {
      r->next_ns = now(w) + below(w, 20 * MS);
      r->successes += r->code == 0 && mask == alive;
      if (r->code == MLFAB_ERR_INTERNAL || r->code == MLFAB_ERR_FRAME ||
          r->code == MLFAB_ERR_MISMATCH)
        broken(w, "rank %u: %s", i, mlfab_error_name(r->code));
    } else if (below(w, 20000) == 0) {
      mlfab_node_cancel(r->node, r->request, now(w));
    }
  }
}

static void run_seed(uint64_t seed) {
  static world w;
  uint64_t dice = mix(seed);
  uint32_t workers = 2 + (uint32_t)(dice % 7);
  init_world(&w, workers, 1 + (uint32_t)(dice >> 8) % 2, 1, (dice >> 16) % 2);
  w.dice = dice;
  w.count = 2 + below(&w, below(&w, 2) ? 20000 : 50);
  w.timeout_ns = 500 * MS << below(&w, 4);
  w.config.seed = 1 + below(&w, 1000);
  w.config.chunk_bytes = 1024u << below(&w, 8);
  w.config.eager_bytes = 4096;
  w.slice_ns = 200000;
  double frames = 4.0 + 8.0 * (double)w.count / w.config.chunk_bytes;
  mlfab_sim_options sim = {.size = sizeof sim,
                           .hosts = w.nodes,
                           .seed = seed,
                           .latency_ns = 20000 + below(&w, MS),
                           .latency_jitter = 0.5,
                           .rate_bytes_per_s = 10000000ull << below(&w, 6)};
  open_world(&w, &sim);
  mlfab_sim_options faults = sim;
  faults.loss = faults.duplicate = 0.05 / frames;
  faults.reorder = 0.05;
  faults.partition = 0.5;
  w.harsh = below(&w, 3) == 0;
  faults.partition_ns = (w.harsh ? 1500 : 200) * MS;
  faults.slow = 0.5;
  faults.pause = 0.3;
  faults.pause_ns = 200 * MS;
  mlfab_sim_set_faults(w.sim, &faults);
  uint64_t crash_ns = below(&w, 3) == 0 ? now(&w) + below(&w, 5 * SECOND) : UINT64_MAX;
  uint32_t victim = (uint32_t)below(&w, workers);
  for (uint64_t end = now(&w) + 6 * SECOND; now(&w) < end && !w.failure[0];) {
    if (now(&w) >= crash_ns && w.ranks[victim].node && workers > 2) kill_node(&w, victim);
    live_on(&w);
  }
  mlfab_sim_set_faults(w.sim, NULL);
  for (uint32_t i = 0; i < workers; i++) w.ranks[i].successes = 0;
  for (uint64_t end = now(&w) + 30 * SECOND; !w.failure[0];) {
    uint32_t behind = 0;
    for (uint32_t i = 0; i < workers; i++) behind += w.ranks[i].node && w.ranks[i].successes < 3;
    if (behind == 0) break;
    if (now(&w) > end) broken(&w, "%u ranks do not succeed any more", behind);
    live_on(&w);
  }
  close_world(&w);
  if (w.failure[0]) fail_msg("MLFAB_SEED=%llu: %s", (unsigned long long)seed, w.failure);
}

static void test_seeds(void **state) {
  (void)state;
  seeds_run("allreduce", test_cases_from(5, 100), run_seed);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_sizes),
      cmocka_unit_test(test_missing),
      cmocka_unit_test(test_crash),
      cmocka_unit_test(test_seeds),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
