/* test_order.c - core/sched/order.c, group.c and plan.c against the algorithms as they are written
 * (literal.h), bit for bit on random batches.
 *
 * MLFAB_SCALE=100 makes 300,000 batches, 1 (the default) a hundredth of them; MLFAB_SEED=n one alone. */
#include "literal.h"
#include "../testing.h"

#include <math.h>

static mlfab__env env;
static mlfab__planner planner;
static random_batch it;

static mlfab__group_input input_of(const uint32_t *order, uint32_t n) {
  return (mlfab__group_input){.updates = it.updates,
                              .order = order,
                              .n = n,
                              .server = it.server,
                              .servers = it.b.servers,
                              .aggregators = it.aggregators,
                              .k = it.b.k,
                              .start = it.b.backlog,
                              .cut = it.b.cut};
}

/* ---- plans are those of the algorithms as they are written ---- */

/* Steps ascend, neighbours differ, and no rate is negative or above the base network's. */
static void check_profiles(const mlfab__network *net, const mlfab__network *base) {
  for (uint32_t i = 0; i < 2 * net->nodes + net->links; i++) {
    const mlfab__profile *p = &net->profiles[i], *whole = &base->profiles[i];
    uint32_t w = 0;
    for (uint32_t k = 0; k < p->n; k++) {
      const mlfab__step *s = &p->steps[k];
      while (w + 1 < whole->n && whole->steps[w + 1].at <= s->at) w++;
      int good = s->rate >= 0 && s->rate <= whole->steps[w].rate &&
                 (k == 0 ? s->at == 0 : s->at > s[-1].at && s->rate != s[-1].rate);
      same((uint64_t)good, 1, "a profile in order");
    }
  }
}

static void compare_orders(const mlfab__network *base, int deadlines, mlfab__ordered *wanted,
                           uint32_t *applied_p) {
  mlfab__ordered out[BATCH_MOST];
  mlfab__order_input in = {it.updates,   it.b.n,           it.server,
                           it.b.servers, it.b.delay_bound, it.b.version};
  uint32_t applied, mark = mlfab__network_mark(&it.net);
  uint32_t n = literal_order(base, &it.b, deadlines, wanted);
  int code = deadlines ? mlfab__order_deadlines(&planner.orderer, &it.net, &in, out, &applied)
                       : mlfab__order_shortest(&planner.orderer, &it.net, &in, out, &applied);
  same((uint64_t)code, 0, "the code");
  same(applied, n, "the number of applied updates");
  for (uint32_t i = 0; i < it.b.n; i++) {
    same(out[i].update, wanted[i].update, "the order");
    same(out[i].reason, wanted[i].reason, "a reason");
    same_bits(out[i].end, wanted[i].end, "an end");
    if (i >= n || it.b.servers > 1) continue;
    /* Updates arrive at the server in order, and no deadline is missed. */
    if (i > 0) same((uint64_t)literal_less(out[i].end, out[i - 1].end), 0, "the wait");
    int64_t dl = mlfab__order_deadline(it.updates[out[i].update].version,
                                       deadlines ? it.b.delay_bound : INT64_MAX, it.b.version);
    same((uint64_t)(dl >= (int64_t)i + 1), 1, "a deadline");
  }
  same_networks(&it.net, &literal_before[n]);
  mlfab__network_undo(&it.net, mark);
  same_networks(&it.net, base);
  *applied_p = n;
}

static void compare_grouped(const mlfab__grouped *a, const mlfab__grouped *b, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    same(a[i].number, b[i].number, "a group's number");
    if (a[i].number == 0) continue;
    same(a[i].q, b[i].q, "an aggregator");
    same_bits(a[i].arrive, b[i].arrive, "an arrival");
    same_bits(a[i].ready, b[i].ready, "when a group is ready");
    same_bits(a[i].end, b[i].end, "a group's end");
    same_bits(a[i].commit, b[i].commit, "a commit");
  }
}

/* ---- no byte is passed on before it has arrived ---- */

static records reserved;

/* The number of bytes that have left by t; a transfer of no duration counts only after its time. */
static double gone(const record *r, double t) {
  double sum = 0;
  if (r->transfer.n == 0) return r->transfer.end < t ? r->transfer.bytes : 0;
  for (uint32_t k = 0; k < r->transfer.n; k++) {
    double to = fmin(r->pieces[k].to, t);
    if (to > r->pieces[k].from) sum += r->pieces[k].rate * (to - r->pieces[k].from);
  }
  return sum;
}

/* The minimum over time of the bytes that `in` has delivered and `out` has not passed on. */
static double least_stock(const record *in, const record *out) {
  double least = HUGE_VAL;
  for (uint32_t k = 0; k < 2 * in->transfer.n + 2 * out->transfer.n + 1; k++) {
    uint32_t o = k - 2 * in->transfer.n;
    double t = in->transfer.end;
    if (k < 2 * in->transfer.n)
      t = k % 2 ? in->pieces[k / 2].to : in->pieces[k / 2].from;
    else if (o < 2 * out->transfer.n)
      t = o % 2 ? out->pieces[o / 2].to : out->pieces[o / 2].from;
    if (t <= in->transfer.end) least = fmin(least, gone(in, t) - gone(out, t));
  }
  return least;
}

/* `out` never runs ahead of `in` and starts no later than necessary, unless it starts at `early` or another
 * resource delays it. Returns 1 when `in` is what delays it. */
static int check_passed_on(const record *in, const record *out, double early) {
  const mlfab__transfer *t = &out->transfer;
  const double tolerance = 1e-5;
  if (in->transfer.end <= t->available || !(in->transfer.bytes > 0))
    return in->transfer.end >= t->available - 1e-6 || t->available <= early + 1e-6;
  if (t->from == t->to) fail_msg("seed %llu: passed on at once", (unsigned long long)batch_seed);
  double least = least_stock(in, out);
  if (least < -tolerance) {
    fail_msg("seed %llu: %g bytes are passed on before they come", (unsigned long long)batch_seed,
             -least);
  }
  return least <= tolerance || t->available <= early + 1e-6;
}

static uint64_t cut_sums; /* sums that start before their last member has arrived */

/* Commits are in order; a sum ends no earlier than its members, never runs ahead of them, and starts no
 * later than necessary. */
static void check_sums(const mlfab__grouped *out, const uint32_t *order, uint32_t n, double start) {
  double t_max = start;
  for (uint32_t i = 0, end; i < n && out[i].number > 0; i = end) {
    for (end = i + 1; end < n && out[end].number == out[i].number;) end++;
    same((uint64_t)(out[i].commit >= t_max), 1, "commits in order");
    for (uint32_t x = 0; out[i].q > 0 && x < reserved.n; x++) {
      const mlfab__transfer *sum = &reserved.of[x].transfer;
      if (sum->purpose != MLFAB__AGGREGATE || sum->index != out[i].q) continue;
      int held_up = 0;
      cut_sums += sum->available < out[i].ready;
      for (uint32_t y = 0; y < x; y++) {
        const mlfab__transfer *member = &reserved.of[y].transfer;
        uint32_t k = i;
        while (k < end && order[k] != member->index) k++;
        if (member->purpose != MLFAB__TO_AGGREGATOR || k == end) continue;
        same((uint64_t)literal_less(out[i].end, member->end), 0, "a sum behind its members");
        if (member->component != sum->component) continue;
        if (it.b.cut) held_up |= check_passed_on(&reserved.of[y], &reserved.of[x], t_max);
      }
      if (it.b.cut) same((uint64_t)held_up, 1, "a sum as early as it may be");
    }
    t_max = out[i].commit;
  }
}

static void compare_cases(const mlfab__network *base, const mlfab__group_input *in) {
  mlfab__grouped out[BATCH_MOST], wanted[BATCH_MOST];
  uint32_t variant = in->cut ? MLFAB__GROUP_PAPER | MLFAB__GROUP_LATE : MLFAB__GROUP_PAPER;
  for (uint32_t n = 0; n <= in->n; n++) {
    uint32_t mark = mlfab__network_mark(&it.net);
    double time;
    literal_copy(&literal_net, base);
    double t = literal_case(&literal_net, in, variant, n, in->n, wanted);
    same((uint64_t)mlfab__group_case(&planner.grouper, &it.net, in, variant, n, in->n, out, &time),
         0, "the code");
    same_bits(time, t, "T(n)");
    if (literal_is_time(t)) {
      compare_grouped(out, wanted, in->n);
      same_networks(&it.net, &literal_net);
    }
    mlfab__network_undo(&it.net, mark);
  }
}

/* Returns T. */
static double compare_groups(const mlfab__network *base, const mlfab__ordered *ordered,
                             uint32_t n) {
  mlfab__grouped out[BATCH_MOST], wanted[BATCH_MOST];
  mlfab__group_choice choice;
  uint32_t order[BATCH_MOST];
  for (uint32_t i = 0; i < n; i++) order[i] = ordered[i].update;
  mlfab__group_input in = input_of(order, n);
  mlfab__group_choice c = literal_group(base, &in, it.b.best, wanted);
  watch(&it.net, &reserved);
  same((uint64_t)mlfab__group_plan(&planner.grouper, &it.net, &in, it.b.best, out, &choice), 0,
       "the code");
  watch(&it.net, NULL);
  same(choice.variant, c.variant, "the variant");
  same(choice.n, c.n, "n*");
  same(choice.first_most, c.first_most, "the first group's most");
  same_bits(choice.time, c.time, "T");
  compare_grouped(out, wanted, n);
  same_networks(&it.net, &literal_net);
  check_profiles(&it.net, base);
  check_sums(out, order, n, in.start);
  mlfab__network_undo(&it.net, 0);
  same_networks(&it.net, base);
  /* The same in one call. */
  mlfab__planned planned[BATCH_MOST];
  uint32_t applied;
  same((uint64_t)mlfab__plan_batch(&planner, &it.net, &it.b, planned, &applied, &choice), 0,
       "the code");
  same_networks(&it.net, &literal_net);
  same(choice.n, c.n, "n* of the plan");
  for (uint32_t i = 0; i < applied; i++) {
    same(planned[i].update, order[i], "the plan's order");
    same_bits(planned[i].commit, wanted[i].commit, "a commit of the plan");
    if (!it.b.list && it.b.delay_bound != INT64_MAX)
      same(planned[i].delay < it.b.delay_bound, 1, "a delay bound");
  }
  mlfab__network_undo(&it.net, 0);
  if (batch_seed % 4 == 0) compare_cases(base, &in);
  return choice.time;
}

/* ---- distribution ---- */

/* No distributor passes on a byte that it has not received. */
static void check_spreads(const mlfab__distribution *d, const mlfab__delivery *out) {
  for (uint32_t x = 0; x < reserved.n; x++) {
    const mlfab__transfer *t = &reserved.of[x].transfer;
    if (t->purpose != MLFAB__TO_WORKER || out[t->index].q == 0) continue;
    for (uint32_t y = 0; y < reserved.n; y++) {
      const mlfab__transfer *to = &reserved.of[y].transfer;
      if (to->purpose != MLFAB__TO_DISTRIBUTOR || to->index != out[t->index].q) continue;
      same((uint64_t)literal_less(out[t->index].end, to->end), 0,
           "a worker behind its distributor");
      if (to->component != t->component) continue;
      if (d->cut) {
        same((uint64_t)check_passed_on(&reserved.of[y], &reserved.of[x], d->now), 1,
             "a worker as early as it may be");
      } else {
        same((uint64_t)literal_less(t->available, to->end), 0, "a model that is handed on whole");
      }
    }
  }
}

/* Treats the batch's updates as requests for a model. */
static void compare_distribution(const mlfab__network *base) {
  static mlfab__network mirrored;
  mlfab__candidate candidates[BATCH_MOST];
  mlfab__grouped grouped[BATCH_MOST];
  mlfab__delivery out[BATCH_MOST], wanted[BATCH_MOST];
  mlfab__group_choice choice;
  uint32_t requests[BATCH_MOST], order[BATCH_MOST];
  double hubs[BATCH_AGGREGATORS], makespan, bytes[BATCH_SERVERS] = {60, 30, 90};
  mlfab__distribution d = {.server = it.server,
                           .servers = it.b.servers,
                           .bytes = bytes,
                           .distributors = it.aggregators,
                           .k = it.b.k,
                           .requests = requests,
                           .n = it.b.n,
                           .now = it.b.backlog,
                           .cut = it.b.cut};
  for (uint32_t i = 0; i < d.n; i++) {
    order[i] = i;
    requests[i] = it.updates[i].node;
    candidates[i] = (mlfab__candidate){.node = requests[i], .available = d.now, .bytes = bytes};
  }
  mlfab__group_input in = input_of(order, d.n);
  in.updates = candidates;
  literal_copy(&mirrored, base);
  mirrored.mirror = 1;
  mlfab__group_choice c = literal_group(&mirrored, &in, 0, grouped);
  literal_copy(&literal_net, base);
  double last = mlfab__network_never();
  if (literal_is_time(c.time)) last = literal_distribute(&literal_net, &d, grouped, wanted);
  watch(&it.net, &reserved);
  same((uint64_t)mlfab__group_distribute(&planner.grouper, &it.net, &d, out, hubs, &choice,
                                         &makespan),
       0, "the code");
  watch(&it.net, NULL);
  same_bits(choice.time, c.time, "the mirrored T");
  same(choice.n, c.n, "the mirrored n*");
  same_bits(makespan, last, "the makespan");
  for (uint32_t i = 0; i < d.n && literal_is_time(last); i++) {
    same(out[i].q, wanted[i].q, "a distributor");
    same_bits(out[i].end, wanted[i].end, "a delivery");
  }
  if (literal_is_time(last)) {
    same_networks(&it.net, &literal_net);
    check_profiles(&it.net, base);
    check_spreads(&d, out);
  }
  mlfab__network_undo(&it.net, 0);
  same_networks(&it.net, base);
  mlfab__network_free(&mirrored);
}

static void compare_batch(uint64_t seed, uint32_t most) {
  static mlfab__network base;
  mlfab__ordered ordered[BATCH_MOST];
  uint32_t n;
  batch_make(&it, &env, seed, most);
  literal_copy(&base, &it.net);
  compare_orders(&base, 0, ordered, &n);
  compare_orders(&base, 1, ordered, &n);
  if (it.b.list)
    for (n = 0; n < it.b.n; n++) ordered[n] = (mlfab__ordered){n, MLFAB__LISTED, 0};
  double time[2];
  for (it.b.cut = 0; it.b.cut < 2; it.b.cut++) {
    time[it.b.cut] = compare_groups(&base, ordered, n);
    compare_distribution(&base);
  }
  if (!it.b.best) same((uint64_t)literal_less(time[0], time[1]), 0, "cutting through is later");
  mlfab__network_free(&it.net);
  mlfab__network_free(&base);
}

TEST(test_same_plans) {
  if (test_seed()) {
    compare_batch(test_seed(), BATCH_GROUPED);
    compare_batch(test_seed(), 20);
    return;
  }
  /* Mostly small ones, some larger. */
  uint64_t count = test_cases(1500);
  for (uint64_t seed = 1; seed <= count; seed++)
    compare_batch(seed, seed % 16 ? 20 : BATCH_GROUPED);
  print_message("%llu batches\n", (unsigned long long)count);
  print_message("%llu sums go before all of their members are there\n",
                (unsigned long long)cut_sums);
  assert_true(cut_sums > count / 10);
}

/* More updates than a word has bits. */
TEST(test_same_orders) {
  static mlfab__network base;
  static mlfab__ordered ordered[BATCH_MOST];
  uint32_t most = 0;
  for (SEEDS(seed, 10)) {
    uint32_t n;
    batch_make(&it, &env, seed, BATCH_MOST);
    literal_copy(&base, &it.net);
    compare_orders(&base, 0, ordered, &n);
    compare_orders(&base, 1, ordered, &n);
    most = it.b.n > most ? it.b.n : most;
    mlfab__network_free(&it.net);
    mlfab__network_free(&base);
  }
  if (testing_whole()) assert_true(most > 250);
}

/* With equal links, shortest first is by size: more updates than 64 words have bits. */
TEST(test_order_of_thousands) {
  enum { N = 9000, NODES = 4 };
  static mlfab__candidate updates[N];
  static mlfab__ordered out[N];
  static double bytes[N];
  mlfab__network net;
  uint32_t server = NODES, applied;
  double zero = 0.0, rate = 10.0, end = 0.0;
  mlfab__order_input in = {updates, N, &server, 1, INT64_MAX, 0};
  assert_int_equal(mlfab__network_init(&net, &env, NODES + 1, 0), 0);
  for (uint32_t i = 0; i <= NODES; i++) {
    assert_int_equal(mlfab__network_capacity(&net, MLFAB__EGRESS, i, 1, &zero, &rate), 0);
    assert_int_equal(mlfab__network_capacity(&net, MLFAB__INGRESS, i, 1, &zero, &rate), 0);
  }
  for (uint32_t i = 0; i < N; i++) { /* 7 and N are coprime: each size once */
    bytes[i] = 10.0 * (1 + i * 7 % N);
    updates[i] = (mlfab__candidate){.id = i, .node = i % NODES, .bytes = &bytes[i]};
  }
  assert_int_equal(mlfab__order_shortest(&planner.orderer, &net, &in, out, &applied), 0);
  assert_int_equal(applied, N);
  for (uint32_t i = 0; i < N; i++) {
    end += 1.0 + i;
    assert_true(bytes[out[i].update] >= 10.0 * (1 + i) && bytes[out[i].update] <= 10.0 * (1 + i));
    same_bits(out[i].end, end, "an end");
  }
  mlfab__network_free(&net);
}

/* Two servers receive from 2 on. Both aggregators have one node for both components of a sum, which therefore
 * takes 2: the second may receive until 4, which two updates need. All cases end at 6, so that the first of
 * them is chosen if no bound excludes it. */
TEST(test_sum_of_several_servers) {
  enum { N = 3, SERVERS = 2, K = 2, NODES = N + SERVERS + K };
  const uint32_t server[SERVERS] = {3, 4}, aggregators[K * SERVERS] = {5, 5, 6, 6};
  const double bytes[SERVERS] = {10, 10}, at[2] = {0, 2}, rate[2] = {0, 10};
  mlfab__candidate updates[N];
  mlfab__grouped out[N];
  mlfab__group_choice choice;
  mlfab__network net;
  assert_int_equal(mlfab__network_init(&net, &env, NODES, 0), 0);
  for (uint32_t i = 0; i < NODES; i++) {
    assert_int_equal(mlfab__network_constant(&net, MLFAB__EGRESS, i, 10), 0);
    assert_int_equal(mlfab__network_constant(&net, MLFAB__INGRESS, i, 10), 0);
  }
  for (uint32_t j = 0; j < SERVERS; j++)
    assert_int_equal(mlfab__network_capacity(&net, MLFAB__INGRESS, server[j], 2, at, rate), 0);
  for (uint32_t i = 0; i < N; i++) updates[i] = (mlfab__candidate){.node = i, .bytes = bytes};
  mlfab__group_input in = {.updates = updates,
                           .n = N,
                           .server = server,
                           .servers = SERVERS,
                           .aggregators = aggregators,
                           .k = K,
                           .start = 2};
  assert_int_equal(mlfab__group_plan(&planner.grouper, &net, &in, 0, out, &choice), 0);
  assert_int_equal(choice.n, 0);
  same_bits(choice.time, 6, "T");
  mlfab__network_free(&net);
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  mlfab__planner_init(&planner, &env);
  int failed = testing_run(argc - 1, argv + 1, NULL, NULL);
  for (uint32_t i = 0; i <= BATCH_MOST; i++) mlfab__network_free(&literal_before[i]);
  mlfab__network_free(&literal_net);
  mlfab__planner_free(&planner);
  return failed || env.bytes != 0;
}
