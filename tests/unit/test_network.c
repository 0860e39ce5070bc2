/* test_network.c - core/sched/network.c: random reservations against a walk over every breakpoint of all profiles of a path.
 * Capacities are never exceeded, transfers use all residual capacity, and undo restores the same bits. process/plan_test.py has
 * the vectors of fig. 4. */
#include "batches.h"
#include "../testing.h"

#include <math.h>

static mlfab__env env;

static random_batch it;

/* The last reservation. */
static mlfab__stretch stretch[64];
static uint32_t stretches;

static void on_reserve(void *user, const mlfab__transfer *t) {
  (void)user;
  assert_true(t->n <= 64);
  if (t->n > 0) memcpy(stretch, t->pieces, t->n * sizeof *t->pieces);
  stretches = t->n;
}

/* The residual of a profile at a time, and the next breakpoint after it. */
static double residual_at(const mlfab__profile *p, double t, double *next_p) {
  double rate = 0;
  for (uint32_t k = 0; k < p->n; k++) {
    if (p->steps[k].at <= t) rate = p->steps[k].rate;
    if (p->steps[k].at > t && p->steps[k].at < *next_p) *next_p = p->steps[k].at;
  }
  return rate;
}

typedef struct resources {
  const mlfab__profile *profile[8];
  uint32_t n;
} resources;

static resources resources_of(const mlfab__network *net, uint32_t from, uint32_t to) {
  resources r = {{&net->profiles[from], &net->profiles[net->nodes + to]}, 2};
  uint32_t at;
  if (mlfab__map_get(&net->paths, (uint64_t)from * net->nodes + to + 1, &at)) {
    for (uint32_t i = 1; i <= net->path_links[at]; i++)
      r.profile[r.n++] = &net->profiles[2 * net->nodes + net->path_links[at + i]];
  }
  return r;
}

/* t_en by its definition. */
static double walk(const mlfab__network *net, uint32_t from, uint32_t to, double bytes, double t) {
  resources r = resources_of(net, from, to);
  double left = bytes;
  while (from != to && left > 0) {
    double next = (double)INFINITY, rate = (double)INFINITY;
    for (uint32_t i = 0; i < r.n; i++) rate = fmin(rate, residual_at(r.profile[i], t, &next));
    double need = rate > 0 ? left / rate : (double)INFINITY;
    if (need <= (next - t) * (1 + 1e-9)) return t + need;
    if (isinf(next)) return next;
    left -= rate * (next - t);
    t = next;
  }
  return t;
}

/* The reserved amount is the size, and in each of its stretches some resource is exhausted. */
static void check_taken(const mlfab__network *net, uint32_t from, uint32_t to, double bytes,
                        double available, double end) {
  double sum = 0;
  resources r = resources_of(net, from, to);
  for (uint32_t k = 0; k < stretches; k++) {
    const mlfab__stretch *s = &stretch[k];
    double next = (double)INFINITY, least = (double)INFINITY;
    assert_true(s->from >= available && s->to <= end && s->from < s->to && s->rate > 0);
    for (uint32_t i = 0; i < r.n; i++)
      least = fmin(least, residual_at(r.profile[i], (s->from + s->to) / 2, &next));
    assert_true(least == 0);
    sum += (s->to - s->from) * s->rate;
  }
  if (from != to && isfinite(end)) assert_true(fabs(sum - bytes) <= 1e-6 * (bytes + 1));
  if (isinf(end)) assert_int_equal(stretches, 0);
}

static void check_steps(const mlfab__network *net) {
  for (uint32_t i = 0; i < 2 * net->nodes + net->links; i++) {
    const mlfab__profile *p = &net->profiles[i];
    assert_true(p->n > 0 && p->n <= p->room && p->steps[0].at == 0);
    for (uint32_t k = 0; k < p->n; k++) {
      assert_true(p->steps[k].rate >= 0);
      if (k > 0) assert_true(p->steps[k].at > p->steps[k - 1].at);
      if (k > 0) assert_true(p->steps[k].rate != p->steps[k - 1].rate);
    }
  }
}

static int same_network(const mlfab__network *a, const mlfab__network *b) {
  for (uint32_t i = 0; i < 2 * a->nodes + a->links; i++) {
    const mlfab__profile *p = &a->profiles[i], *q = &b->profiles[i];
    if (p->n != q->n || memcmp(p->steps, q->steps, p->n * sizeof *p->steps) != 0) return 0;
  }
  return 1;
}

static void reserve_some(mlfab__rng *prng, mlfab__network copies[6], uint32_t marks[6]) {
  uint32_t nodes = it.net.nodes;
  for (uint32_t i = 0; i < 60; i++) {
    uint32_t from = batch_below(prng, nodes), to = batch_below(prng, nodes);
    double bytes = 10 * batch_below(prng, 40), available = batch_below(prng, 25), end;
    if (i % 10 == 0) {
      batch_copy_network(&copies[i / 10], &it.net);
      marks[i / 10] = mlfab__network_mark(&it.net);
    }
    double wanted = walk(&it.net, from, to, bytes, available);
    double alone = mlfab__network_end(&it.net, from, to, bytes, available);
    stretches = 0;
    assert_int_equal(mlfab__network_reserve(&it.net, from, to, bytes, available, &end), 0);
    assert_memory_equal(&end, &alone, sizeof end);
    assert_true(end == wanted || fabs(end - wanted) <= 1e-7 * wanted);
    check_taken(&it.net, from, to, bytes, available, end);
  }
}

TEST(test_random) {
  for (uint64_t seed = 1; seed <= 300; seed++) {
    mlfab__rng prng;
    mlfab__network copies[6], mirror;
    uint32_t marks[6];
    memset(copies, 0, sizeof copies);
    memset(&mirror, 0, sizeof mirror);
    mlfab__rng_seed(&prng, seed);
    batch_make(&it, &env, seed, 6);
    it.net.watch = on_reserve;
    /* A mirror charges the opposite direction. */
    batch_copy_network(&mirror, &it.net);
    mirror.mirror = 1;
    double there = mlfab__network_end(&it.net, 0, 1, 50, 1);
    double back = mlfab__network_end(&mirror, 1, 0, 50, 1);
    assert_memory_equal(&there, &back, sizeof there);
    mlfab__network_free(&mirror);
    reserve_some(&prng, copies, marks);
    check_steps(&it.net);
    for (uint32_t i = 6; i > 0; i--) {
      mlfab__network_undo(&it.net, marks[i - 1]);
      assert_true(same_network(&it.net, &copies[i - 1]));
      mlfab__network_free(&copies[i - 1]);
    }
    mlfab__network_free(&it.net);
    assert_int_equal(env.bytes, 0);
  }
}

/* The components of a bundle see the reservations of those before them; a bundle that does not fit leaves
 * no reservation. */
TEST(test_bundles) {
  mlfab__network net;
  const uint32_t from = 0, to[2] = {1, 2};
  const double bytes[2] = {10, 20};
  mlfab__bundle b = {.from = &from, .to = to, .to_step = 1, .bytes = bytes, .n = 2};
  double end;
  assert_int_equal(mlfab__network_init(&net, &env, 3, 0), 0);
  for (uint32_t i = 0; i < 3; i++) {
    mlfab__network_constant(&net, MLFAB__EGRESS, i, 10);
    mlfab__network_constant(&net, MLFAB__INGRESS, i, 10);
  }
  assert_int_equal(mlfab__bundle_end(&net, &b, mlfab__network_never(), &end), MLFAB__ENDS);
  assert_true(end == 3);
  assert_int_equal(mlfab__network_mark(&net), 0);
  assert_int_equal(mlfab__bundle_reserve(&net, &b, 2, &end), MLFAB__LATE);
  assert_int_equal(mlfab__network_mark(&net), 0);
  assert_int_equal(mlfab__bundle_reserve(&net, &b, 3, &end), MLFAB__ENDS);
  assert_true(end == 3 && net.profiles[0].n == 2 && net.profiles[0].steps[1].at == 3);
  assert_int_equal(mlfab__network_constant(&net, MLFAB__EGRESS, 0, 5), MLFAB_ERR_STATE);
  mlfab__network_reset(&net);
  assert_false(mlfab__finite(mlfab__network_end(&net, 0, 1, 1, 0)));
  mlfab__network_free(&net);
}

TEST(test_refusals) {
  mlfab__network net;
  const double at[3] = {0, 1, 1}, late[1] = {1}, down[2] = {0, -1};
  const double rate[3] = {1, 2, 3}, minus[1] = {-1}, infinite[1] = {(double)INFINITY},
               nan_[1] = {(double)NAN};
  const uint32_t links[3] = {0, 1, 0};
  assert_int_equal(mlfab__network_init(&net, &env, 0, 0), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__network_init(&net, &env, UINT32_MAX, 0), MLFAB_ERR_LIMIT);
  assert_int_equal(mlfab__network_init(&net, &env, 2, 2), 0);
#define CAPACITY(kind, index, n, at, rate) \
  mlfab__network_capacity(&net, MLFAB__##kind, index, n, at, rate)
  assert_int_equal(CAPACITY(EGRESS, 0, 2, at, rate), 0);
  assert_int_equal(CAPACITY(SHARED, 1, 2, at, rate), 0);
  assert_int_equal(CAPACITY(EGRESS, 2, 1, at, rate), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(SHARED, 2, 1, at, rate), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(EGRESS, 0, 0, at, rate), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(EGRESS, 0, 3, at, rate), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(EGRESS, 0, 1, late, rate), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(EGRESS, 0, 2, down, rate), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(EGRESS, 0, 1, at, minus), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(EGRESS, 0, 1, at, infinite), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(EGRESS, 0, 1, at, nan_), MLFAB_ERR_ARGUMENT);
  assert_int_equal(CAPACITY(EGRESS, 0, 1, nan_, rate), MLFAB_ERR_ARGUMENT);
  assert_int_equal(net.profiles[0].n, 2); /* as before */
  assert_int_equal(mlfab__network_path(&net, 0, 0, 1, links), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__network_path(&net, 0, 2, 1, links), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__network_path(&net, 0, 1, 3, links), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__network_path(&net, 0, 1, 2, links), 0);
  assert_int_equal(mlfab__network_path(&net, 0, 1, 1, links), MLFAB_ERR_ARGUMENT);
  mlfab__network_free(&net);
  assert_int_equal(env.bytes, 0);
}

TEST(test_less) {
  const double never = mlfab__network_never();
  assert_true(mlfab__network_less(1, 2) && !mlfab__network_less(2, 1) &&
              !mlfab__network_less(1, 1));
  assert_true(mlfab__network_less(1, never) && !mlfab__network_less(never, never));
  assert_true(!mlfab__network_less(never, 1) && !mlfab__network_less(1, 1 + 0.9e-9));
  assert_true(mlfab__network_less(1, 1 + 1.1e-9) && !mlfab__network_less(1e9, 1e9 + 0.9));
  assert_true(mlfab__network_less(-1, 0) && mlfab__network_less(-2, -1) &&
              !mlfab__network_less(0, 1e-10));
  assert_true(!mlfab__finite(never) && !mlfab__finite((double)NAN));
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
