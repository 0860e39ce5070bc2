/* test_replicate.c - tools/replicate.c against the rules as they are written, on random batches with one
 * to three replicas: what is kept is what the whole plan had, the network that is left is the one before the batch
 * minus each transfer that is reported, and the last transfer to the server is the earliest one in the network
 * with everything else. Then refusals, and running out of memory.
 *
 * MLFAB_SCALE=100 makes 300,000 batches, 1 (the default) a hundredth of them; MLFAB_SEED=n one alone. */
#include "literal.h"

#include "tools/replicate.c"
#include "budget.h"
#include "../testing.h"

#include <math.h>

enum { MOST = 12, REPLICAS = 3, PUNTED = 4, LIST = MOST + PUNTED, STEPS = 2048 };

static mlfab__env env;
static mlfab__planner planner;
static mlfab__replicator replicator;
static random_batch it;

static void close_to(double a, double b, const char *what) {
  if (a == b || fabs(a - b) <= 1e-12 * (1 + fabs(b))) return;
  fail_msg("seed %llu: %s is %.17g, not %.17g", (unsigned long long)batch_seed, what, a, b);
}

/* ---- a network, as the sum of what is reserved ---- */

/* Does the transfer use the profile? */
static int uses(const mlfab__network *net, const mlfab__transfer *t, uint32_t profile) {
  uint32_t at;
  if (t->n == 0) return 0;
  if (profile == t->from || profile == net->nodes + t->to) return 1;
  if (!mlfab__map_get(&net->paths, (uint64_t)t->from * net->nodes + t->to + 1, &at)) return 0;
  for (uint32_t i = 1; i <= net->path_links[at]; i++)
    if (2 * net->nodes + net->path_links[at + i] == profile) return 1;
  return 0;
}

static double rate_at(const mlfab__profile *p, double t) {
  uint32_t k = 0;
  while (k + 1 < p->n && p->steps[k + 1].at <= t) k++;
  return p->steps[k].rate;
}

static int by_time(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

/* `to`: `base` without the transfers of all lists. */
static void leave(mlfab__network *to, const mlfab__network *base, const records *const *lists,
                  uint32_t nlists) {
  static double at[STEPS], kept[STEPS], rate[STEPS];
  literal_copy(to, base);
  for (uint32_t i = 0; i < 2 * base->nodes + base->links; i++) {
    const mlfab__profile *p = &base->profiles[i];
    uint32_t n = 0, k = 0;
    for (uint32_t s = 0; s < p->n; s++) at[n++] = p->steps[s].at;
    for (uint32_t l = 0; l < nlists; l++) {
      for (uint32_t x = 0; x < lists[l]->n; x++) {
        const record *r = &lists[l]->of[x];
        for (uint32_t s = 0; uses(base, &r->transfer, i) && s < r->transfer.n; s++) {
          assert_true(n + 2 <= STEPS);
          at[n++] = r->pieces[s].from;
          at[n++] = r->pieces[s].to;
        }
      }
    }
    qsort(at, n, sizeof *at, by_time);
    for (uint32_t s = 0; s < n; s++) {
      if (k > 0 && at[s] == kept[k - 1]) continue;
      double left = rate_at(p, at[s]);
      for (uint32_t l = 0; l < nlists; l++) {
        for (uint32_t x = 0; x < lists[l]->n; x++) {
          const record *r = &lists[l]->of[x];
          if (!uses(base, &r->transfer, i)) continue;
          for (uint32_t y = 0; y < r->transfer.n; y++)
            if (at[s] >= r->pieces[y].from && at[s] < r->pieces[y].to) left -= r->pieces[y].rate;
        }
      }
      same(left >= 0 ? 1 : 0, 1, "a residual that is not negative");
      if (k > 0 && rate[k - 1] == left) continue;
      kept[k] = at[s];
      rate[k++] = left;
    }
    enum mlfab__capacity_kind kind = i < base->nodes       ? MLFAB__EGRESS
                                     : i < 2 * base->nodes ? MLFAB__INGRESS
                                                           : MLFAB__SHARED;
    uint32_t index = i - (kind == MLFAB__EGRESS    ? 0
                          : kind == MLFAB__INGRESS ? base->nodes
                                                   : 2 * base->nodes);
    assert_int_equal(mlfab__network_capacity(to, kind, index, k, kept, rate), 0);
  }
}

/* ---- random replicas ---- */

typedef struct world {
  mlfab__replication in;
  mlfab__replica replicas[REPLICAS];
  uint32_t nodes[REPLICAS][BATCH_SERVERS], aggregators[REPLICAS][3 * BATCH_SERVERS];
  mlfab__candidate punted[REPLICAS][PUNTED];
  double bytes[REPLICAS][PUNTED][BATCH_SERVERS];
  mlfab__grouped grouped[REPLICAS][LIST];
  mlfab__replica_plan plans[REPLICAS];
  mlfab__planned planned[MOST];
  mlfab__replicated all;
  uint32_t applied;
} world;

static world w;

static void make(uint64_t seed) {
  mlfab__rng rng;
  batch_make(&it, &env, seed, MOST);
  mlfab__rng_seed(&rng, seed + (1ull << 40));
  memset(&w, 0, sizeof w);
  it.b.cut = batch_below(&rng, 3) == 0;
  uint32_t m = it.b.servers, nodes = it.net.nodes;
  for (uint32_t i = 0; i < it.b.n; i++) it.updates[i].norm = batch_below(&rng, 6);
  w.in.replicas = w.replicas;
  w.in.n = batch_below(&rng, 3) ? 1 : 1 + batch_below(&rng, REPLICAS);
  w.in.gamma = batch_below(&rng, 3) ? batch_below(&rng, 101) / 100.0 : 0;
  w.in.div_max = batch_below(&rng, 10) ? batch_below(&rng, 100) : mlfab__network_never();
  for (uint32_t k = 0; k < w.in.n; k++) {
    mlfab__replica *r = &w.replicas[k];
    for (uint32_t j = 0; j < m; j++) w.nodes[k][j] = batch_below(&rng, nodes);
    r->k = batch_below(&rng, 4);
    for (uint32_t q = 0; q < r->k * m; q++) w.aggregators[k][q] = batch_below(&rng, nodes);
    r->npunted = batch_below(&rng, 3) == 0 ? 1 + batch_below(&rng, PUNTED) : 0;
    for (uint32_t i = 0; i < r->npunted; i++) {
      for (uint32_t j = 0; j < m; j++) w.bytes[k][i][j] = 10 * batch_below(&rng, 12);
      w.punted[k][i] = (mlfab__candidate){.id = 1000 + i,
                                          .node = batch_below(&rng, nodes),
                                          .norm = batch_below(&rng, 6),
                                          .bytes = w.bytes[k][i]};
    }
    r->history = batch_below(&rng, 10);
    r->start = batch_below(&rng, 5) == 0 ? batch_below(&rng, 10) : 0;
    if (batch_below(&rng, 2)) {
      r->part = 1 + batch_below(&rng, LIST);
      r->idle = batch_below(&rng, 4) ? batch_below(&rng, 60) : 0;
    }
    r->nodes = w.nodes[k];
    r->aggregators = w.aggregators[k];
    r->punted = w.punted[k];
    w.plans[k].grouped = w.grouped[k];
  }
}

static int replicate(void) {
  return mlfab__replicate_batch(&replicator, &planner, &it.net, &it.b, &w.in, w.planned, &w.applied,
                                NULL, w.plans, &w.all);
}

/* ---- the rules ---- */

typedef struct told { /* one replica, literally */
  mlfab__candidate list[LIST];
  double norms[LIST];
  uint32_t n, frozen, groups, status;
  double needed;
  records kept;
} told;

static told tells[REPLICAS];
static records server, heard, last_again;
static mlfab__network base, rest;
static uint64_t seen[3], seen_groups, seen_many, seen_parts;

static double bound(const told *t, const mlfab__replica *r, uint32_t s, uint32_t behind) {
  return mlfab__divergence_between(w.in.gamma, r->history, t->norms, s, behind);
}

/* What the replica gets, in `rest`. */
static void tell(told *t, const mlfab__replica *r, const mlfab__replica_plan *plan,
                 const mlfab__planned *planned, uint32_t applied, double t_last) {
  static records all;
  static mlfab__network net;
  mlfab__grouped wanted[BATCH_MOST], again[LIST];
  mlfab__group_choice choice;
  uint32_t order[LIST];
  memset(t, 0, sizeof *t);
  for (uint32_t i = 0; i < r->npunted; i++) t->list[t->n++] = r->punted[i];
  for (uint32_t i = 0; i < applied; i++) t->list[t->n++] = it.updates[planned[i].update];
  for (uint32_t i = 0; i < t->n; i++) {
    t->norms[i] = t->list[i].norm;
    order[i] = i;
  }
  /* In parts: the first of the list, as many as wanted or needed; none while the bound is small. */
  uint32_t listed = t->n;
  if (r->part > 0) {
    double all_lack = bound(t, r, t->n, 0);
    listed = r->part;
    while (listed < t->n && literal_less(w.in.div_max, bound(t, r, t->n, listed))) listed++;
    if (listed > t->n) listed = t->n;
    if (!literal_less(r->idle, all_lack) && !literal_less(w.in.div_max, all_lack)) listed = 0;
  }
  mlfab__group_input in = {.updates = t->list,
                           .order = order,
                           .n = listed,
                           .server = r->nodes,
                           .servers = it.b.servers,
                           .aggregators = r->aggregators,
                           .k = r->k,
                           .start = r->start,
                           .cut = it.b.cut};
  mlfab__group_choice c = literal_group(&rest, &in, it.b.best, wanted);
  same(plan->choice.n, c.n, "n*");
  same_bits(plan->choice.time, c.time, "T");
  literal_copy(&net, &rest);
  watch(&net, &all);
  same((uint64_t)mlfab__group_plan(&planner.grouper, &net, &in, it.b.best, again, &choice), 0,
       "the code");
  watch(&net, NULL);
  for (uint32_t i = listed; i < t->n; i++) wanted[i].number = 0;
  for (uint32_t i = 0; i < t->n; i++) {
    same(plan->grouped[i].number, wanted[i].number, "a group's number");
    if (wanted[i].number == 0) continue;
    same(plan->grouped[i].q, wanted[i].q, "an aggregator");
    same_bits(plan->grouped[i].commit, wanted[i].commit, "a commit");
  }
  /* By T_last; else up to the first that makes the bound hold. */
  uint32_t by_last = 0, upto[LIST + 1], groups = 0;
  for (uint32_t i = 0; i < t->n && wanted[i].number > 0; i++) {
    if (!literal_less(t_last, wanted[i].commit)) by_last = i + 1;
    groups = wanted[i].number;
    upto[groups] = i + 1;
  }
  same(plan->by_last, by_last, "what is there by T_last");
  close_to(plan->divergence_by_last, bound(t, r, t->n, by_last), "the bound then");
  t->frozen = by_last;
  t->needed = mlfab__network_never();
  if (literal_less(w.in.div_max, bound(t, r, t->n, by_last))) {
    t->status = 2;
    for (uint32_t g = 1; g <= groups && t->status == 2; g++) {
      if (upto[g] <= by_last) continue;
      if (literal_less(w.in.div_max, bound(t, r, t->n, upto[g]))) continue;
      t->status = 1;
      t->frozen = upto[g];
      t->needed = wanted[upto[g] - 1].commit;
    }
  }
  if (r->part > 0 && groups > 0) t->frozen = upto[groups];
  t->groups = t->frozen > 0 ? wanted[t->frozen - 1].number : 0;
  for (uint32_t x = 0; x < all.n; x++) {
    const mlfab__transfer *a = &all.of[x].transfer;
    int keep = a->index < t->frozen;
    if (a->purpose == MLFAB__AGGREGATE) {
      keep = 0;
      for (uint32_t i = 0; i < t->frozen; i++) keep |= wanted[i].q == a->index;
    }
    if (keep) t->kept.of[t->kept.n++] = all.of[x];
  }
}

/* Takes the records of the last group's transfer to the server out of `server`: their number. */
static uint32_t take_last(const mlfab__planned *last, records *out) {
  uint32_t n = 0;
  out->n = 0;
  for (uint32_t x = 0; x < server.n; x++) {
    const mlfab__transfer *t = &server.of[x].transfer;
    int is_last = last->group > 0 ? t->purpose == MLFAB__AGGREGATE && t->index == last->group
                                  : t->purpose == MLFAB__TO_SERVER && t->index == last->update;
    if (is_last)
      out->of[out->n++] = server.of[x];
    else
      server.of[n++] = server.of[x];
  }
  server.n = n;
  return out->n;
}

static uint32_t rest_of(const records **lists) {
  uint32_t n = 0;
  lists[n++] = &server;
  for (uint32_t k = 0; k < w.in.n; k++) lists[n++] = &tells[k].kept;
  return n;
}

/* The delayed last transfer: its end, or never; reserved in `rest`. */
static double send_last(const mlfab__planned *last, double needed, int may) {
  const records *lists[REPLICAS + 1];
  double bytes[BATCH_SERVERS], end = mlfab__network_never();
  take_last(last, &last_again);
  for (uint32_t x = 0; x < last_again.n; x++) bytes[x] = last_again.of[x].transfer.bytes;
  leave(&rest, &base, lists, rest_of(lists));
  if (!may) return end;
  double ready = last->group > 0 ? last->ready : it.updates[last->update].available;
  const uint32_t *from = last->group > 0 ? it.aggregators + (last->group - 1) * it.b.servers
                                         : &it.updates[last->update].node;
  return literal_send(&rest, from, last->group > 0, it.server, bytes, it.b.servers,
                      needed > ready ? needed : ready);
}

/* The bound at each commit, of server or replica. */
static double peak(const told *t, const mlfab__replica *r, const mlfab__replica_plan *plan,
                   uint32_t applied) {
  double most = bound(t, r, r->npunted, 0);
  for (uint32_t x = 0; x < applied + t->frozen; x++) {
    double at = x < applied ? w.planned[x].commit : plan->grouped[x - applied].commit;
    uint32_t s = r->npunted, behind = 0;
    for (uint32_t i = 0; i < applied; i++) s += !literal_less(at, w.planned[i].commit);
    for (uint32_t i = 0; i < t->frozen; i++) behind += !literal_less(at, plan->grouped[i].commit);
    double now_is = bound(t, r, s, behind);
    most = now_is > most ? now_is : most;
  }
  return most;
}

static void check(uint64_t seed) {
  static mlfab__network before;
  mlfab__planned planned[MOST];
  const records *lists[REPLICAS + 1];
  uint32_t applied, status = 0, first;
  make(seed);
  literal_copy(&base, &it.net);
  literal_copy(&before, &it.net);
  watch(&it.net, &server);
  same((uint64_t)mlfab__plan_batch(&planner, &it.net, &it.b, planned, &applied, NULL), 0,
       "the code");
  mlfab__network_undo(&it.net, 0);
  watch(&it.net, &heard);
  same((uint64_t)replicate(), 0, "the code");
  watch(&it.net, NULL);
  same(w.applied, applied, "the number of applied updates");
  double t_last = applied > 0 ? planned[applied - 1].commit : it.b.backlog, needed = 0;
  same_bits(w.all.last, t_last, "T_last");
  for (uint32_t k = 0; k < w.in.n; k++) tells[k].kept.n = 0;
  for (uint32_t k = 0; k < w.in.n; k++) {
    leave(&rest, &base, lists, rest_of(lists));
    tell(&tells[k], &w.replicas[k], &w.plans[k], planned, applied, t_last);
    same(w.plans[k].status, tells[k].status, "a status");
    same(w.plans[k].frozen, tells[k].frozen, "what is kept");
    same(w.plans[k].groups, tells[k].groups, "the groups kept");
    same_bits(w.plans[k].needed, tells[k].needed, "T_e");
    status = tells[k].status > status ? tells[k].status : status;
    if (literal_is_time(tells[k].needed)) needed = fmax(needed, tells[k].needed);
  }
  first = applied;
  while (first > 0 && planned[first - 1].group_number == planned[applied - 1].group_number) first--;
  leave(&rest, &base, lists, rest_of(lists));
  double time = t_last;
  if (status > 0 && applied > 0) {
    double end = send_last(&planned[first], needed, status == 1);
    if (!literal_is_time(end)) status = 2;
    time = fmax(end, first > 0 ? planned[first - 1].commit : it.b.backlog);
    for (uint32_t i = first; i < applied; i++) {
      planned[i].end = end;
      planned[i].commit = time;
    }
  }
  same(w.all.status, status, "the status");
  same_bits(w.all.time, time, "T_final");
  same_networks(&it.net, &rest);
  uint32_t there = status == 2 ? first : applied;
  for (uint32_t i = 0; i < applied; i++) {
    same(w.planned[i].update, planned[i].update, "an update");
    same_bits(w.planned[i].end, planned[i].end, "an end");
    same_bits(w.planned[i].commit, planned[i].commit, "a commit");
  }
  for (uint32_t k = 0; k < w.in.n; k++) {
    const mlfab__replica *r = &w.replicas[k];
    const told *t = &tells[k];
    double h = r->history;
    for (uint32_t i = 0; i < t->frozen; i++) h = w.in.gamma * h + t->norms[i];
    close_to(w.plans[k].history, h, "H");
    double at_end = bound(t, r, r->npunted + there, t->frozen);
    close_to(w.plans[k].divergence, at_end, "the bound at the end");
    close_to(w.plans[k].peak, peak(t, r, &w.plans[k], there), "the peak");
    if (status < 2) same((uint64_t)literal_less(w.in.div_max, at_end), 0, "a bound above Div_max");
  }
  /* What was told: the batch, each replica's part, and the last transfer again. */
  uint32_t x = heard.n;
  if (status == 1 && applied > 0) x -= it.b.servers;
  for (uint32_t k = w.in.n; k-- > 0;) {
    x -= tells[k].kept.n;
    for (uint32_t i = 0; i < tells[k].kept.n; i++) {
      const record *a = &heard.of[x + i], *b = &tells[k].kept.of[i];
      same(a->transfer.purpose, b->transfer.purpose, "a purpose");
      same(a->transfer.index, b->transfer.index, "an index");
      same(a->transfer.n, b->transfer.n, "the number of stretches");
      assert_memory_equal(a->pieces, b->pieces, b->transfer.n * sizeof *b->pieces);
    }
  }
  mlfab__network_undo(&it.net, 0);
  same_networks(&it.net, &before);
  mlfab__network_free(&it.net);
  seen[status]++;
  seen_groups += status == 1 && applied > 0 && planned[first].group > 0;
  seen_many += w.in.n > 1;
  seen_parts += w.replicas[0].part > 0 && tells[0].frozen > 0 && tells[0].frozen < tells[0].n;
}

TEST(test_random) {
  for (SEEDS(seed, 3000)) check(seed);
  print_message("status 0: %llu, 1: %llu (%llu of a sum), 2: %llu; several replicas: %llu\n",
                (unsigned long long)seen[0], (unsigned long long)seen[1],
                (unsigned long long)seen_groups, (unsigned long long)seen[2],
                (unsigned long long)seen_many);
  if (!testing_whole()) return;
  assert_true(seen[0] > 500 && seen[1] > 200 && seen_groups > 20 && seen[2] > 50 &&
              seen_many > 100 && seen_parts > 100);
}

/* ---- refusals ---- */

TEST(test_refusals) {
  static mlfab__network before;
  const double bad[] = {-1, nan(""), mlfab__network_never()};
  for (size_t i = 0; i < MLFAB__COUNT(bad); i++) {
    for (int what = 0; what < 7; what++) {
      uint64_t seed = 1;
      do {
        mlfab__network_free(&it.net);
        make(seed++);
      } while (it.b.n == 0 || w.replicas[0].npunted == 0);
      literal_copy(&before, &it.net);
      double *value[] = {&w.in.gamma,          &w.in.div_max,          &it.updates[it.b.n - 1].norm,
                         &w.punted[0][0].norm, &w.replicas[0].history, &w.replicas[0].start,
                         &w.replicas[0].idle};
      *value[what] = bad[i];
      int wanted = (what == 1 || what == 6) && i == 2 ? 0 : MLFAB_ERR_ARGUMENT;
      assert_int_equal(replicate(), wanted);
      if (wanted) same_networks(&it.net, &before);
      mlfab__network_undo(&it.net, 0);
    }
  }
  mlfab__network_free(&it.net);
  make(1);
  w.nodes[0][0] = it.net.nodes;
  assert_int_equal(replicate(), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__network_mark(&it.net), 0);
  mlfab__network_free(&it.net);
}

/* ---- out of memory ---- */

/* Fails each allocation of a run in turn: nothing stays reserved, and the next call does the whole. */
TEST(test_memory) {
  budget memory = {0, 0};
  mlfab_env hooks = budget_env(&memory);
  const mlfab__env kept = env;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    int code = MLFAB_ERR_MEMORY;
    for (uint64_t most = 0; code; most++) {
      mlfab__planner big = planner;
      mlfab__replicator whole = replicator;
      memset(&replicator, 0, sizeof replicator);
      memory.left = UINT64_MAX;
      assert_int_equal(mlfab__env_init(&env, &hooks), 0);
      mlfab__planner_init(&planner, &env);
      make(seed);
      memory.left = most;
      code = replicate();
      assert_true(code == 0 || code == MLFAB_ERR_MEMORY);
      memory.left = UINT64_MAX;
      if (code) {
        assert_int_equal(mlfab__network_mark(&it.net), 0);
        assert_int_equal(replicate(), 0);
      }
      mlfab__planner_free(&planner);
      mlfab__replicate_free(&replicator, &env);
      mlfab__network_free(&it.net);
      assert_int_equal(env.bytes, 0);
      planner = big;
      replicator = whole;
      assert_true(most < 1000);
    }
  }
  env = kept;
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  mlfab__planner_init(&planner, &env);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
