/* test_lazy.c - core/server/lazy.c against a scan; then the whole server side of consistency, made of lazy.c
 * and sync.c, against FluentPS's Algorithm 1 as it is written, on random traces.
 *
 * MLFAB_SCALE=100 makes 300,000 traces, 1 (the default) a hundredth of them; MLFAB_SEED=n one
 * alone. */
#include "core/server/lazy.h"
#include "core/base/rng.h"
#include "core/model/sync.h"

#include <math.h>
#include "budget.h"
#include "../testing.h"

static mlfab__env env;

/* ---- the buffer against a scan ---- */

enum { ROOM = 200 };

static struct {
  struct delayed {
    uint64_t at, order, tag;
  } all[ROOM];
  uint32_t count;
  uint64_t order;
} scan;

static void scan_add(uint64_t at, uint64_t tag) {
  scan.all[scan.count++] = (struct delayed){at, scan.order++, tag};
}

static void scan_take(uint32_t i, uint64_t *tag_p) {
  *tag_p = scan.all[i].tag;
  memmove(&scan.all[i], &scan.all[i + 1], (--scan.count - i) * sizeof scan.all[0]);
}

/* The array is in order of arrival, so the first minimum is the right one. */
static int scan_pop(uint64_t v, uint64_t *tag_p) {
  uint32_t best = scan.count;
  for (uint32_t i = 0; i < scan.count; i++)
    if (best == scan.count || scan.all[i].at < scan.all[best].at) best = i;
  if (best == scan.count || scan.all[best].at > v) return 0;
  scan_take(best, tag_p);
  return 1;
}

static int scan_remove(uint64_t tag) {
  for (uint32_t i = 0; i < scan.count; i++)
    if (scan.all[i].tag == tag) {
      scan_take(i, &tag);
      return 1;
    }
  return 0;
}

TEST(test_buffer) {
  mlfab__lazy lazy = {0};
  mlfab__rng prng;
  uint64_t tag = 0, ours = 0, theirs = 0;
  mlfab__rng_seed(&prng, 11);
  memset(&scan, 0, sizeof scan);
  for (uint32_t i = 0; i < 200000; i++) {
    uint64_t what = mlfab__rng_below(&prng, 100), v = mlfab__rng_below(&prng, 20);
    if (what < 50 && scan.count < ROOM) {
      assert_int_equal(mlfab__lazy_add(&env, &lazy, v, tag), 0);
      scan_add(v, tag++);
    } else if (what < 90) {
      int got = mlfab__lazy_pop(&lazy, v, &ours);
      assert_int_equal(got, scan_pop(v, &theirs));
      assert_int_equal(ours, theirs);
    } else if (what < 99) {
      uint64_t some = tag - mlfab__min(tag, mlfab__rng_below(&prng, 60));
      assert_int_equal(mlfab__lazy_remove(&lazy, some), scan_remove(some));
    } else {
      mlfab__lazy_wake_all(&lazy);
      for (uint32_t k = 0; k < scan.count; k++) scan.all[k].at = 0;
    }
    assert_int_equal(lazy.heap.count, scan.count);
  }
  mlfab__heap_free(&lazy.heap, &env);
  assert_int_equal(lazy.heap.count + lazy.heap.room, 0);
  assert_int_equal(env.bytes, 0);
}

/* A change of model allocates nothing and keeps the order of the pulls. */
TEST(test_wake_all) {
  mlfab__lazy lazy = {0};
  uint64_t tag;
  for (uint64_t i = 0; i < 64; i++) assert_int_equal(mlfab__lazy_add(&env, &lazy, 100 - i, i), 0);
  uint64_t allocations = env.allocations;
  mlfab__lazy_wake_all(&lazy);
  assert_int_equal(env.allocations, allocations);
  for (uint64_t i = 0; i < 64; i++) {
    assert_true(mlfab__lazy_pop(&lazy, 0, &tag));
    assert_int_equal(tag, i);
  }
  mlfab__heap_free(&lazy.heap, &env);
}

TEST(test_at) {
  for (uint64_t progress = 0; progress < 9; progress++)
    for (uint64_t v = 0; v < 9; v++) {
      /* Alg. 1's index: i = progress - 1, or V when i is behind; k is freed by V = k + 1. */
      uint64_t index = progress > v + 1 ? progress - 1 : v;
      assert_int_equal(mlfab__lazy_at(0, progress, v), index + 1);
      assert_int_equal(mlfab__lazy_at(1, progress, v), v + 1);
    }
}

TEST(test_no_memory_changes_nothing) {
  budget memory = {1, 0};
  mlfab_env hooks = budget_env(&memory);
  mlfab__env poor;
  mlfab__lazy lazy = {0};
  uint64_t tag, n = 0;
  assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
  while (mlfab__lazy_add(&poor, &lazy, 5, n) == 0) n++;
  assert_int_equal(n, lazy.heap.count);
  assert_int_equal(mlfab__lazy_add(&poor, &lazy, 5, n), MLFAB_ERR_MEMORY);
  assert_int_equal(lazy.heap.count, n);
  for (uint64_t i = 0; i < n; i++) {
    assert_true(mlfab__lazy_pop(&lazy, 5, &tag));
    assert_int_equal(tag, i);
  }
  mlfab__heap_free(&lazy.heap, &poor);
}

/* ---- a server's clock, made of sync.c and lazy.c, and Algorithm 1 beside it ---- */

enum { WORKERS = 6, LONGEST = 400, PULLS = 4096 };

typedef struct pull {
  uint32_t worker;
  uint64_t progress;
  double draw;
} pull;

/* Shared by both: who is alive, what was pushed, and the fate of each pull. */
typedef struct side {
  mlfab_sync sync;
  uint64_t v, threshold;
  uint32_t members;
  int dead[WORKERS];
  int dropped; /* drop-stragglers was in force: V_train may stay ahead of the slowest worker */
  uint64_t pushed[WORKERS];
  uint32_t answered[PULLS]; /* how often */
} side;

typedef struct clock {
  side s;
  mlfab__sync_tuner tuner;
  mlfab__lazy lazy;
  uint64_t delayed;
} clock;

/* Alg. 1: Count as a matrix of who pushed what; callbacks as one list a V_train. */
typedef struct literal {
  side s;
  int has[WORKERS][LONGEST];
  uint32_t callbacks[LONGEST + 1][PULLS / 8], ncallbacks[LONGEST + 1];
  uint64_t delayed, quiet;
} literal;

static pull pulls[PULLS];
static uint32_t npulls;
static clock ours;
static literal theirs;

static mlfab_sync_state look(const side *s, uint32_t worker, uint64_t progress) {
  mlfab_sync_state state = {.worker = worker,
                            .iteration = progress,
                            .slowest = UINT64_MAX,
                            .v_train = s->v,
                            .significance = 0.25 * worker};
  for (uint32_t w = 0; w < WORKERS; w++) {
    if (s->dead[w]) continue;
    state.members++;
    state.arrived += s->pushed[w] > s->v;
    state.fastest = mlfab__max(state.fastest, s->pushed[w]);
    state.slowest = mlfab__min(state.slowest, s->pushed[w]);
  }
  return state;
}

/* Holds for every answer: at most s of the slowest worker's updates are missing. */
static void answer(side *s, uint32_t id) {
  mlfab_sync_state state = look(s, pulls[id].worker, pulls[id].progress);
  s->answered[id]++;
  if (s->dropped) return;
  if (s->sync.kind == MLFAB_SYNC_BSP) assert_true(state.iteration <= state.slowest);
  if (s->sync.kind == MLFAB_SYNC_SSP || s->sync.kind == MLFAB_SYNC_DSPS)
    assert_true(state.iteration <= state.slowest + s->threshold);
}

static void clock_delay(clock *g, uint32_t id) {
  uint64_t at = mlfab__lazy_at((int)g->s.sync.soft, pulls[id].progress, g->s.v);
  assert_true(at > g->s.v);
  assert_int_equal(mlfab__lazy_add(&env, &g->lazy, at, id), 0);
}

/* Answers or delays the due pulls again; `all`: the model has changed, and each answer must still be
 * justified. */
static void clock_release(clock *g, int all) {
  uint64_t id;
  while (mlfab__lazy_pop(&g->lazy, g->s.v, &id)) {
    mlfab_sync_state state = look(&g->s, pulls[id].worker, pulls[id].progress);
    int asked = all || mlfab__sync_rechecks(&g->s.sync);
    if (!asked || mlfab__sync_may_pull_again(&g->s.sync, g->s.threshold, &state))
      answer(&g->s, (uint32_t)id);
    else
      clock_delay(g, (uint32_t)id);
  }
}

/* Completes as many iterations as it can: a lower `need` and a death may complete several at once. */
static void clock_advance(clock *g) {
  for (;;) {
    mlfab_sync_state state = look(&g->s, 0, 0);
    if (!mlfab__sync_complete_round(&g->s.sync, &state)) return;
    g->s.v++;
    if (g->s.sync.kind == MLFAB_SYNC_DSPS) {
      mlfab__sync_tune(&g->s.sync, &g->tuner, g->delayed, state.fastest - state.slowest);
      g->s.threshold = g->tuner.threshold;
    }
    g->delayed = 0;
    clock_release(g, 0);
  }
}

static void clock_pull(clock *g, uint32_t id) {
  mlfab_sync_state state = look(&g->s, pulls[id].worker, pulls[id].progress);
  if (mlfab__sync_may_pull(&g->s.sync, g->s.threshold, &state, pulls[id].draw)) {
    answer(&g->s, id);
    return;
  }
  g->delayed++;
  clock_delay(g, id);
}

static void clock_push(clock *g, uint32_t worker) {
  uint64_t *progress = &g->s.pushed[worker];
  if (!mlfab__sync_may_push(&g->s.sync, *progress, g->s.v)) return;
  *progress = mlfab__sync_late(&g->s.sync, *progress, g->s.v) ? g->s.v : *progress + 1;
  clock_advance(g);
}

static void clock_die(clock *g, uint32_t worker) {
  g->s.dead[worker] = 1;
  for (uint32_t id = 0; id < npulls; id++)
    if (pulls[id].worker == worker) mlfab__lazy_remove(&g->lazy, id);
  clock_advance(g);
}

static void clock_switch(clock *g, const mlfab_sync *sync) {
  g->s.sync = *sync;
  g->s.dropped |= sync->kind == MLFAB_SYNC_DROP;
  g->tuner = (mlfab__sync_tuner){(uint64_t)sync->staleness, 0};
  g->s.threshold = g->tuner.threshold;
  g->delayed = 0;
  clock_advance(g);
  mlfab__lazy_wake_all(&g->lazy);
  clock_release(g, 1);
}

/* Table III, with i = progress - 1: signed, so that it reads as printed. */
static int literal_within(const literal *l, uint64_t progress) {
  int64_t i = (int64_t)progress - 1, v = (int64_t)l->s.v, s = (int64_t)l->s.threshold;
  int rounds = l->s.sync.kind == MLFAB_SYNC_BSP || l->s.sync.kind == MLFAB_SYNC_DROP;
  return l->s.sync.kind == MLFAB_SYNC_ASYNC || i < (rounds ? v : v + s);
}

static int literal_passes(const literal *l, const pull *p) {
  const mlfab_sync *sync = &l->s.sync;
  if (literal_within(l, p->progress)) return 1;
  if (sync->kind != MLFAB_SYNC_PSSP && sync->kind != MLFAB_SYNC_PSSP_DYNAMIC) return 0;
  if (sync->only_fastest)
    for (uint32_t w = 0; w < WORKERS; w++)
      if (!l->s.dead[w] && l->s.pushed[w] > p->progress) return 1;
  double k = (double)p->progress - 1 - (double)l->s.v, chance = sync->chance;
  if (sync->kind == MLFAB_SYNC_PSSP_DYNAMIC) {
    chance = sync->alpha > 0 ? sync->alpha : 0.25 * p->worker;
    chance = fmin(1, chance / (1 + exp((double)l->s.threshold - k)));
  }
  return !(p->draw < chance);
}

static void literal_delay(literal *l, uint32_t id) {
  int64_t i = (int64_t)pulls[id].progress - 1, v = (int64_t)l->s.v;
  int64_t index = l->s.sync.soft || i < v ? v : i;
  l->callbacks[index][l->ncallbacks[index]++] = id;
}

/* Answers a delayed pull, or delays it again. */
static void literal_settle(literal *l, uint32_t id, int passes) {
  if (passes || literal_within(l, pulls[id].progress))
    answer(&l->s, id);
  else
    literal_delay(l, id);
}

static void literal_tune(literal *l, uint64_t spread) {
  l->quiet = l->delayed == 0 && spread <= l->s.threshold ? l->quiet + 1 : 0;
  if (l->delayed && l->s.threshold < (uint64_t)l->s.sync.staleness_max) l->s.threshold++;
  if (l->quiet < 8) return;
  l->quiet = 0;
  if (l->s.threshold > (uint64_t)l->s.sync.staleness) l->s.threshold--;
}

static void literal_advance(literal *l) {
  for (;;) {
    uint32_t count = 0, members = 0, ids[PULLS / 8], n;
    uint64_t most = 0, least = UINT64_MAX;
    for (uint32_t w = 0; w < WORKERS; w++) {
      if (l->s.dead[w]) continue;
      members++;
      count += (uint32_t)l->has[w][l->s.v];
      if (l->s.pushed[w] > most) most = l->s.pushed[w];
      if (l->s.pushed[w] < least) least = l->s.pushed[w];
    }
    uint32_t need =
        l->s.sync.kind == MLFAB_SYNC_DROP && l->s.sync.need < members ? l->s.sync.need : members;
    if (members == 0 || count < need) return;
    n = l->ncallbacks[l->s.v];
    memcpy(ids, l->callbacks[l->s.v], n * sizeof ids[0]);
    l->ncallbacks[l->s.v] = 0;
    l->s.v++;
    if (l->s.sync.kind == MLFAB_SYNC_DSPS) literal_tune(l, most - least);
    l->delayed = 0;
    for (uint32_t k = 0; k < n; k++) {
      int chance = l->s.sync.kind == MLFAB_SYNC_PSSP || l->s.sync.kind == MLFAB_SYNC_PSSP_DYNAMIC;
      literal_settle(l, ids[k], chance);
    }
  }
}

static void literal_pull(literal *l, uint32_t id) {
  if (literal_passes(l, &pulls[id])) {
    answer(&l->s, id);
    return;
  }
  l->delayed++;
  literal_delay(l, id);
}

static void literal_push(literal *l, uint32_t w) {
  uint64_t i = l->s.pushed[w];
  int rounds = l->s.sync.kind == MLFAB_SYNC_BSP || l->s.sync.kind == MLFAB_SYNC_DROP;
  if (rounds && i > l->s.v) return;
  if (l->s.sync.kind == MLFAB_SYNC_DROP && !l->s.sync.keep_late && i < l->s.v) {
    l->s.pushed[w] = l->s.v;
  } else {
    l->has[w][i] = 1;
    l->s.pushed[w] = i + 1;
  }
  literal_advance(l);
}

/* Takes all buffered pulls that satisfy a predicate, in order of arrival. */
static uint32_t literal_take(literal *l, int worker, uint32_t *ids) {
  uint32_t n = 0;
  for (uint32_t id = 0; id < npulls; id++)
    for (uint32_t v = 0; v <= LONGEST; v++)
      for (uint32_t k = 0; k < l->ncallbacks[v]; k++) {
        if (l->callbacks[v][k] != id || (worker >= 0 && pulls[id].worker != (uint32_t)worker))
          continue;
        ids[n++] = id;
        memmove(&l->callbacks[v][k], &l->callbacks[v][k + 1],
                (--l->ncallbacks[v] - k) * sizeof(uint32_t));
        k--;
      }
  return n;
}

static void literal_switch(literal *l, const mlfab_sync *sync) {
  uint32_t ids[PULLS], n;
  l->s.sync = *sync;
  l->s.dropped |= sync->kind == MLFAB_SYNC_DROP;
  l->s.threshold = (uint64_t)sync->staleness;
  l->delayed = l->quiet = 0;
  literal_advance(l);
  n = literal_take(l, -1, ids);
  for (uint32_t k = 0; k < n; k++) literal_settle(l, ids[k], 0);
}

/* ---- traces ---- */

static mlfab_sync some_model(mlfab__rng *prng) {
  static const double chances[] = {0, 0.1, 0.3, 0.5, 1};
  mlfab_sync sync = {.kind = (uint32_t)mlfab__rng_below(prng, MLFAB_SYNC_COUNT - 1),
                     .staleness = (int64_t)mlfab__rng_below(prng, 5),
                     .need = 1 + (uint32_t)mlfab__rng_below(prng, WORKERS),
                     .soft = (uint32_t)mlfab__rng_below(prng, 2),
                     .only_fastest = (uint32_t)mlfab__rng_below(prng, 2),
                     .keep_late = (uint32_t)mlfab__rng_below(prng, 2),
                     .chance = chances[mlfab__rng_below(prng, 5)],
                     .alpha = 0.7 * (double)mlfab__rng_below(prng, 4)};
  mlfab_error error;
  sync.kind += sync.kind >= MLFAB_SYNC_USER; /* it has no conditions here */
  assert_int_equal(mlfab__sync_check(&sync, WORKERS, &error), 0);
  mlfab__sync_complete(&sync);
  return sync;
}

static void both_push(uint32_t worker) {
  clock_push(&ours, worker);
  literal_push(&theirs, worker);
}

static void both_switch(const mlfab_sync *sync) {
  clock_switch(&ours, sync);
  literal_switch(&theirs, sync);
}

static void begin(const mlfab_sync *sync) {
  mlfab__heap_free(&ours.lazy.heap, &env);
  memset(&ours, 0, sizeof ours);
  memset(&theirs, 0, sizeof theirs);
  npulls = 0;
  both_switch(sync);
}

static void add_pull(uint32_t worker, double draw) {
  assert_true(npulls < PULLS);
  pulls[npulls] = (pull){worker, ours.s.pushed[worker], draw};
  clock_pull(&ours, npulls++);
  literal_pull(&theirs, npulls - 1);
}

static void compare(uint64_t seed, uint32_t event) {
  int same = ours.s.v == theirs.s.v && ours.s.threshold == theirs.s.threshold &&
             !memcmp(ours.s.answered, theirs.s.answered, npulls * sizeof(uint32_t)) &&
             !memcmp(ours.s.pushed, theirs.s.pushed, sizeof ours.s.pushed);
  if (!same)
    fail_msg("MLFAB_SEED=%llu: event %u: not as Algorithm 1 has it (%s)", (unsigned long long)seed,
             (unsigned)event, mlfab__sync_name(ours.s.sync.kind));
}

/* All workers advance to where the first one is: then no pull may wait any more. */
static void end(uint64_t seed) {
  uint64_t most = look(&ours.s, 0, 0).fastest;
  for (uint64_t i = 0; i <= most; i++)
    for (uint32_t w = 0; w < WORKERS; w++)
      if (!ours.s.dead[w] && ours.s.pushed[w] < most) both_push(w);
  compare(seed, UINT32_MAX);
  if (ours.lazy.heap.count > 0)
    fail_msg("MLFAB_SEED=%llu: a pull waits for ever", (unsigned long long)seed);
  for (uint32_t id = 0; id < npulls; id++)
    if (ours.s.answered[id] != 1 && !(ours.s.dead[pulls[id].worker] && ours.s.answered[id] == 0))
      fail_msg("MLFAB_SEED=%llu: a pull was answered %u times", (unsigned long long)seed,
               (unsigned)ours.s.answered[id]);
}

/* Workers push and pull at random without waiting for answers; models change, workers die. */
static void trace(uint64_t seed) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  mlfab_sync sync = some_model(&prng);
  uint32_t events = 20 + (uint32_t)mlfab__rng_below(&prng, 200);
  uint32_t changes = (uint32_t)mlfab__rng_below(&prng, 2) * 6;
  uint32_t deaths = (uint32_t)mlfab__rng_below(&prng, 2),
           slow = (uint32_t)mlfab__rng_below(&prng, 9);
  begin(&sync);
  for (uint32_t event = 0; event < events; event++) {
    uint64_t what = mlfab__rng_below(&prng, 100);
    uint32_t w = (uint32_t)mlfab__rng_below(&prng, WORKERS);
    double draw = mlfab__rng_unit(&prng);
    if (what < changes) {
      sync = some_model(&prng);
      both_switch(&sync);
    } else if (ours.s.dead[w] || (w == slow && draw < 0.7)) {
      continue;
    } else if (what < 50) {
      add_pull(w, draw);
    } else if (what < 98 || !deaths) {
      both_push(w);
    } else {
      uint32_t ids[PULLS];
      clock_die(&ours, w);
      literal_take(&theirs, (int)w, ids);
      theirs.s.dead[w] = 1;
      literal_advance(&theirs);
    }
    compare(seed, event);
  }
  end(seed);
}

TEST(test_traces) {
  for (SEEDS(seed, 3000)) trace(seed);
}

/* ---- the paper's special cases, when workers wait for their pulls ---- */

/* Worker w is at rest while all its pulls are answered; it pushes and pulls with probability 1/2 + w/12.
 * Returns a hash of when each pull was answered. */
static uint64_t closed(mlfab_sync sync, uint64_t seed, uint64_t *delayed_p) {
  mlfab__rng prng;
  uint32_t last[WORKERS];
  uint64_t hash = 0;
  *delayed_p = 0;
  mlfab__sync_complete(&sync);
  mlfab__rng_seed(&prng, seed);
  memset(last, 0xff, sizeof last);
  begin(&sync);
  for (uint32_t event = 0; event < 600; event++) {
    uint32_t w = (uint32_t)mlfab__rng_below(&prng, WORKERS);
    double draw = mlfab__rng_unit(&prng);
    if (mlfab__rng_below(&prng, 12) > 5 + w) continue;
    if (last[w] != UINT32_MAX && !ours.s.answered[last[w]]) continue;
    both_push(w);
    last[w] = npulls;
    add_pull(w, draw);
    compare(seed, event);
    *delayed_p += !ours.s.answered[last[w]];
    for (uint32_t id = 0; id < npulls; id++) hash = mlfab__mix(hash ^ ours.s.answered[id]);
  }
  end(seed);
  return hash;
}

TEST(test_special_cases) {
  uint64_t delayed, none, ssp_delayed, soft_all = 0, lazy_all = 0;
  for (uint64_t seed = 1; seed <= 60; seed++) {
    mlfab_sync ssp = {.kind = MLFAB_SYNC_SSP, .staleness = (int64_t)(seed % 4), .soft = seed & 1};
    mlfab_sync pssp = ssp, bsp = ssp, asp = {.kind = MLFAB_SYNC_ASYNC};
    uint64_t of_ssp = closed(ssp, seed, &ssp_delayed), of_asp = closed(asp, seed, &none);
    assert_int_equal(none, 0);
    pssp.kind = MLFAB_SYNC_PSSP;
    pssp.chance = 1;
    assert_int_equal(closed(pssp, seed, &delayed), of_ssp);
    pssp.chance = 0;
    assert_int_equal(closed(pssp, seed, &delayed), of_asp);
    bsp.kind = MLFAB_SYNC_BSP;
    ssp.staleness = 0;
    assert_int_equal(closed(ssp, seed, &delayed), closed(bsp, seed, &none));
    ssp.staleness = 1000000;
    assert_int_equal(closed(ssp, seed, &delayed), of_asp);
    *(seed & 1 ? &soft_all : &lazy_all) += ssp_delayed;
  }
  assert_true(soft_all > lazy_all);
}

/* Fig. 3 as Table III has it: with s = 3 and V = 1, i = 3 passes and i = 4 is delayed; soft until
 * V = 2, lazy until iteration 4 is complete. */
TEST(test_figure_3) {
  for (uint32_t soft = 0; soft < 2; soft++) {
    mlfab_sync sync = {.kind = MLFAB_SYNC_SSP, .staleness = 3, .soft = soft};
    begin(&sync);
    for (uint32_t k = 0; k < WORKERS; k++)
      for (uint32_t w = k ? WORKERS - k : 0, i = 0; i < (w ? 5 : 1); i++) {
        both_push(w);
        if (w == 1) add_pull(w, 0);
      }
    assert_int_equal(ours.s.v, 1);
    assert_int_equal(ours.s.answered[3] + ours.s.answered[4], 1);
    assert_int_equal(ours.s.answered[4], 0);
    for (uint64_t v = 2; v <= 5; v++) {
      clock_push(&ours, 0);
      assert_int_equal(ours.s.v, v);
      assert_int_equal(ours.s.answered[4], soft || v == 5);
    }
  }
}

static int set_up(void **state) {
  (void)state;
  return mlfab__env_init(&env, NULL);
}

static int tear_down(void **state) {
  (void)state;
  mlfab__heap_free(&ours.lazy.heap, &env);
  return env.bytes != 0;
}

TESTS(set_up, tear_down)
