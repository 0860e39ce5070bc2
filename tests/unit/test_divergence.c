/* test_divergence.c - core/replica/divergence.c, and the bounds of tools/replicate.c: small models to which server and replica
 * apply their commits by eq. (2), while commits are admitted, merged, dropped and acknowledged at random, and servers fail over.
 * After every event the true difference is at most the ledger's bound, and that at most Div_max. process/plan_test.py has the
 * vectors. */
#include "core/base/rng.h"
#include "tools/replicate.c"
#include "../testing.h"

enum { DIM_MOST = 4, COMMITS = 400 };

/* ---- a server and its replica ---- */

typedef struct model {
  long double w[DIM_MOST], h[DIM_MOST];
} model;

typedef struct pair {
  mlfab__rng rng;
  uint32_t dim, lag; /* lag: most commits that the replica is behind */
  double gamma, div_max;
  double direction[DIM_MOST]; /* of all updates, if collinear */
  int collinear, measures;
  mlfab__divergence d;
  model server, replica;
  double u[COMMITS][DIM_MOST]; /* of commit i + 1 */
  uint64_t commits,
      applied; /* of the server; of the replica, including what it has not acknowledged */
  uint64_t acks[COMMITS]; /* on their way, in order */
  double norms[COMMITS];  /* |h| at each, as the replica has measured */
  uint32_t first, last;
} pair;

static double uniform(pair *p) { return mlfab__rng_unit(&p->rng); }
static uint32_t below(pair *p, uint32_t n) { return (uint32_t)(uniform(p) * n); }

static double length(const pair *p, const long double *x) {
  long double sum = 0;
  for (uint32_t i = 0; i < p->dim; i++) sum += x[i] * x[i];
  return (double)sqrtl(sum);
}

static double divergence(const pair *p) {
  long double x[DIM_MOST];
  for (uint32_t i = 0; i < p->dim; i++) x[i] = p->server.w[i] - p->replica.w[i];
  return length(p, x);
}

static void advance(const pair *p, model *m, const double *u) {
  for (uint32_t i = 0; i < p->dim; i++) {
    m->h[i] = (long double)p->gamma * m->h[i] + (long double)u[i];
    m->w[i] += m->h[i];
  }
}

/* What must hold after every event. */
static void check(const pair *p) {
  double is = divergence(p), slack = 1e-12 * (1 + length(p, p->server.w));
  if (is > p->d.bound + slack) fail_msg("the divergence is %.17g, its bound %.17g", is, p->d.bound);
  assert_true(p->d.bound <= p->div_max);
  assert_true(length(p, p->server.h) <= p->d.history * (1 + 1e-15));
  assert_true(p->d.n <= MLFAB__DIVERGENCE_ENTRIES);
}

/* A commit: the sum of 1 to 3 updates. */
static double draw(pair *p, double *u) {
  uint32_t members = 1 + below(p, 3);
  double size = uniform(p) < 0.1 ? 10 : 1;
  memset(u, 0, DIM_MOST * sizeof *u);
  for (uint32_t m = 0; m < members; m++) {
    double scale = size * uniform(p);
    for (uint32_t i = 0; i < p->dim; i++)
      u[i] += p->collinear ? scale * p->direction[i] : size * (2 * uniform(p) - 1);
  }
  double squares = 0;
  for (uint32_t i = 0; i < p->dim; i++) squares += u[i] * u[i];
  return mlfab__divergence_norm(squares, p->dim, 1);
}

/* The replica applies up to `most` commits, one by one or merged, and acknowledges them. */
static void replicate(pair *p, uint32_t most) {
  uint32_t m = (uint32_t)mlfab__min(p->commits - p->applied, most);
  if (m == 0) return;
  if (uniform(p) < 0.5) {
    for (uint32_t i = 0; i < m; i++) advance(p, &p->replica, p->u[p->applied + i]);
  } else {
    double x[COMMITS], y[COMMITS], w_h, h_h;
    mlfab__divergence_weights(p->gamma, m, x, y, &w_h, &h_h);
    for (uint32_t j = 0; j < p->dim; j++) {
      long double sum_x = 0, sum_y = 0;
      for (uint32_t i = 0; i < m; i++) sum_x += (long double)x[i] * p->u[p->applied + i][j];
      for (uint32_t i = 0; i < m; i++) sum_y += (long double)y[i] * p->u[p->applied + i][j];
      p->replica.w[j] += w_h * p->replica.h[j] + sum_x;
      p->replica.h[j] = h_h * p->replica.h[j] + sum_y;
    }
  }
  p->applied += m;
  p->norms[p->last] = length(p, p->replica.h) * (1 + 1e-12);
  p->acks[p->last++] = p->applied;
}

/* The oldest acknowledgement arrives. */
static void acknowledge(pair *p) {
  if (p->first == p->last) return;
  mlfab__divergence_acked(&p->d, p->acks[p->first]);
  if (p->measures) mlfab__divergence_measured(&p->d, p->acks[p->first], p->norms[p->first]);
  p->first++;
}

/* The replica becomes the server, and a new one begins where it is. */
static void fail_over(pair *p) {
  double history = p->measures ? length(p, p->replica.h) * (1 + 1e-12) : p->d.base;
  if (!p->measures && p->applied != p->d.start) {
    /* The replica computes H at its own state from the norms of the updates that it has applied. */
    mlfab__divergence own;
    assert_int_equal(mlfab__divergence_init(&own, p->gamma, mlfab__network_never(), 0, 1), 0);
    for (uint64_t i = 0; i < p->applied; i++) {
      double squares = 0;
      for (uint32_t j = 0; j < p->dim; j++) squares += p->u[i][j] * p->u[i][j];
      assert_int_equal(mlfab__divergence_append(&own, mlfab__divergence_norm(squares, p->dim, 1)),
                       0);
    }
    history = own.history;
  }
  p->server = p->replica;
  p->commits = p->applied;
  p->first = p->last = 0;
  assert_int_equal(mlfab__divergence_init(&p->d, p->gamma, p->div_max, p->commits, history), 0);
}

static void begin(pair *p, uint64_t seed) {
  static const double gammas[] = {0, 0.5, 0.9, 0.99, 1};
  memset(p, 0, sizeof *p);
  mlfab__rng_seed(&p->rng, seed);
  p->dim = 1 + below(p, DIM_MOST);
  p->gamma = below(p, 2) ? uniform(p) : gammas[below(p, 5)];
  p->div_max = uniform(p) < 0.2 ? 1e9 : exp(8 * uniform(p)) - 1;
  p->collinear = below(p, 2) == 0;
  p->measures = below(p, 2) == 0;
  p->lag = 1 + below(p, 200);
  for (uint32_t i = 0; i < p->dim; i++) p->direction[i] = uniform(p);
  /* h_0: one unit along the direction. */
  double squares = 0;
  for (uint32_t i = 0; i < p->dim; i++) squares += p->direction[i] * p->direction[i];
  for (uint32_t i = 0; i < p->dim; i++) p->direction[i] /= sqrt(squares);
  for (uint32_t i = 0; i < p->dim; i++) p->server.h[i] = p->direction[i];
  p->replica = p->server;
  long double h[DIM_MOST];
  memcpy(h, p->server.h, sizeof h);
  assert_int_equal(
      mlfab__divergence_init(&p->d, p->gamma, p->div_max, 0, length(p, h) > 1 ? length(p, h) : 1),
      0);
}

static uint64_t admitted, held, met, overs, merged;

static void run(uint64_t seed) {
  static pair p;
  double u[DIM_MOST];
  begin(&p, seed);
  double norm = draw(&p, u);
  for (uint32_t event = 0; event < 300 && p.commits < COMMITS && p.last < COMMITS; event++) {
    double what = uniform(&p);
    if (what < 0.6) {
      if (what < 0.05) norm = draw(&p, u); /* it was dropped: the next one */
      if (!mlfab__divergence_may(&p.d, norm)) {
        held++;
        replicate(&p, COMMITS);
      } else {
        assert_int_equal(mlfab__divergence_append(&p.d, norm), 0);
        memcpy(p.u[p.commits++], u, sizeof u);
        advance(&p, &p.server, u);
        norm = draw(&p, u);
        admitted++;
      }
    } else if (what < 0.75) {
      if (p.commits - p.applied >= p.lag || below(&p, 4) == 0) replicate(&p, 1 + below(&p, p.lag));
    } else if (what < 0.99) {
      if (p.first < p.last && below(&p, 8)) acknowledge(&p);
    } else {
      fail_over(&p);
      overs++;
    }
    check(&p);
    if (p.commits - p.d.acknowledged > MLFAB__DIVERGENCE_ENTRIES) merged++;
    /* In one direction the bound is the difference itself. */
    int is_exact = p.collinear && !p.measures && p.d.start == p.d.acknowledged &&
                   p.applied == p.d.acknowledged;
    if (is_exact) {
      assert_true(p.d.bound - divergence(&p) <= 1e-9 * (1 + p.d.bound));
      met += p.d.bound > 0;
    }
  }
  while (p.first < p.last) acknowledge(&p);
  replicate(&p, COMMITS);
  acknowledge(&p);
  assert_true(p.d.bound == 0 && p.d.n == 0 && p.d.acknowledged == p.commits);
}

TEST(test_models) {
  for (SEEDS(seed, 1000)) run(seed);
  if (testing_whole())
    assert_true(admitted > 1000 && held > 1000 && met > 1000 && overs > 100 && merged > 100);
}

/* ---- groups that are one step (G7) ---- */

static uint32_t cut(pair *p, uint32_t n, uint32_t *groups) {
  uint32_t k = 0;
  for (uint32_t left = n; left > 0; left -= groups[k++]) groups[k] = 1 + below(p, left);
  return k;
}

static void walk(const pair *p, model *m, const uint32_t *groups, uint32_t k) {
  for (uint32_t g = 0, i = 0; g < k; g++) {
    double sum[DIM_MOST] = {0};
    for (uint32_t j = 0; j < groups[g]; j++, i++)
      for (uint32_t x = 0; x < p->dim; x++) sum[x] += p->u[i][x];
    advance(p, m, sum);
  }
}

TEST(test_grouped) {
  static pair p;
  uint32_t apart = 0;
  for (uint64_t seed = 1, cases = test_cases(3000); seed <= cases; seed++) {
    uint32_t groups[16], others[16];
    double norms[16], c[17], plain[17];
    begin(&p, seed);
    uint32_t s = below(&p, 13), r = below(&p, 13), n = s > r ? s : r;
    uint32_t a = cut(&p, s, groups), b = cut(&p, r, others);
    assert_int_equal(mlfab__divergence_grouped(p.gamma, groups, a, others, b, c), n);
    for (uint32_t i = 0; i < n; i++) {
      double scale = uniform(&p), squares = 0;
      /* With the signs of the coefficients, all terms point into one direction. */
      if (p.collinear && (c[i + 1] < 0) != (c[0] < 0)) scale = -scale;
      for (uint32_t x = 0; x < p.dim; x++) {
        p.u[i][x] = p.collinear ? scale * p.direction[x] : 2 * uniform(&p) - 1;
        squares += p.u[i][x] * p.u[i][x];
      }
      norms[i] = sqrt(squares);
    }
    walk(&p, &p.server, groups, a);
    walk(&p, &p.replica, others, b);
    double is = divergence(&p), bound = mlfab__divergence_weigh(c, 1, norms, n);
    assert_true(is <= bound + 1e-9 * (1 + bound));
    if (p.collinear) assert_true(bound - is <= 1e-9 * (1 + bound));
    double other = mlfab__divergence_between(p.gamma, 1, norms, s, r);
    apart += is > other * (1 + 1e-9) + 1e-9;
    /* Groups of one: the coefficients of (a). */
    for (uint32_t i = 0; i < 16; i++) groups[i] = others[i] = 1;
    mlfab__divergence_grouped(p.gamma, groups, s, others, r, c);
    mlfab__divergence_coefficients(p.gamma, s, r, plain);
    for (uint32_t i = 0; i <= n; i++)
      assert_true(fabs(fabs(c[i]) - plain[i]) <= 1e-12 * (1 + plain[i]));
    assert_true(fabs(mlfab__divergence_weigh(plain, 1, norms, n) - other) <= 1e-12 * (1 + other));
  }
  /* The other bound does not hold for such groups. */
  if (test_scale() >= 1) assert_true(apart > 100);
}

/* ---- the edges ---- */

static double not_a_number(void) { return nan(""); }

TEST(test_refusals) {
  double never = mlfab__network_never();
  const double bad[] = {-1, -never, not_a_number()};
  mlfab__divergence d, before;
  for (size_t i = 0; i < MLFAB__COUNT(bad); i++) {
    assert_int_equal(mlfab__divergence_check(bad[i], 1), MLFAB_ERR_ARGUMENT);
    assert_int_equal(mlfab__divergence_check(0.9, bad[i]), MLFAB_ERR_ARGUMENT);
    assert_int_equal(mlfab__divergence_init(&d, 0.9, 1, 0, bad[i]), MLFAB_ERR_ARGUMENT);
  }
  assert_int_equal(mlfab__divergence_check(1.5, 1), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__divergence_check(never, 1), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__divergence_init(&d, 0.9, 1, 0, never), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__divergence_check(0, 0), 0);
  assert_int_equal(mlfab__divergence_check(1, never), 0);
  assert_int_equal(mlfab__divergence_init(&d, 0.5, never, 3, 1), 0);
  before = d;
  for (size_t i = 0; i < MLFAB__COUNT(bad); i++) {
    assert_int_equal(mlfab__divergence_append(&d, bad[i]), MLFAB_ERR_ARGUMENT);
    assert_int_equal(mlfab__divergence_may(&d, bad[i]), 0);
    mlfab__divergence_measured(&d, 3, bad[i]);
  }
  assert_int_equal(mlfab__divergence_append(&d, never), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__divergence_may(&d, never), 0);
  mlfab__divergence_measured(&d, 3, never);
  mlfab__divergence_measured(&d, 2, 0);
  mlfab__divergence_acked(&d, 2);
  assert_memory_equal(&d, &before, sizeof d);
}

TEST(test_edges) {
  double never = mlfab__network_never();
  mlfab__divergence d;
  /* Equality admits (fig. 3a), and the next larger number does not. */
  assert_int_equal(mlfab__divergence_init(&d, 0.5, 8, 0, 4), 0);
  assert_int_equal(mlfab__divergence_may(&d, 6), 1);
  assert_int_equal(mlfab__divergence_may(&d, nextafter(6, 7)), 0);
  assert_int_equal(mlfab__divergence_append(&d, 2), 0);
  assert_true(d.bound == 4 && d.history == 4);
  assert_int_equal(mlfab__divergence_may(&d, 2), 1);
  assert_int_equal(mlfab__divergence_append(&d, 2), 0);
  assert_true(d.bound == 8);
  assert_int_equal(mlfab__divergence_may(&d, 0), 0);
  /* A measured |h| at the acknowledged commit replaces a larger one. */
  mlfab__divergence_acked(&d, 1);
  assert_true(d.bound == 4 && d.start == 1);
  mlfab__divergence_measured(&d, 1, 5);
  assert_true(d.bound == 4);
  mlfab__divergence_measured(&d, 1, 1);
  assert_true(d.bound == 2.5 && d.history == 2.5);
  mlfab__divergence_acked(&d, 2);
  assert_true(d.bound == 0 && d.base == 2.5);
  mlfab__divergence_measured(&d, 2, 0);
  assert_true(d.history == 0);
  /* Lock step: what the replica has is admitted, and nothing else that moves the model. */
  assert_int_equal(mlfab__divergence_init(&d, 0.5, 0, 7, 0), 0);
  assert_int_equal(mlfab__divergence_may(&d, 0), 1);
  assert_int_equal(mlfab__divergence_may(&d, 5e-324), 0);
  mlfab__divergence_acked(&d, 8);
  assert_int_equal(mlfab__divergence_may(&d, 3), 1);
  assert_int_equal(mlfab__divergence_append(&d, 3), 0);
  assert_true(d.bound == 0 && d.history == 3 && d.n == 0 && d.start == 8);
  assert_int_equal(mlfab__divergence_may(&d, 3), 0);
  assert_int_equal(mlfab__divergence_may(&d, 0), 0); /* h still moves it */
  /* A part of the model: |h| of the rest does not decay. */
  assert_int_equal(mlfab__divergence_init(&d, 0.5, never, 0, 4), 0);
  assert_int_equal(mlfab__divergence_append_part(&d, 2), 0);
  assert_true(d.bound == 4 && d.history == 6);
  /* Sums that overflow, and numbers that underflow. */
  assert_int_equal(mlfab__divergence_init(&d, 1, 1, 0, 1e308), 0);
  assert_int_equal(mlfab__divergence_append(&d, 1e308), 0);
  assert_int_equal(mlfab__divergence_append(&d, 0), 0);
  assert_true(d.bound > 1e308 && !mlfab__divergence_may(&d, 0));
  mlfab__divergence_acked(&d, 2);
  assert_true(d.bound == 0);
  assert_int_equal(mlfab__divergence_init(&d, 0.5, 1, 0, 5e-324), 0);
  assert_int_equal(mlfab__divergence_append(&d, 0), 0);
  assert_true(d.history > 0);
  /* Norms are rounded up. */
  assert_true(mlfab__divergence_norm(4, 1, -3) >= 6);
  assert_true(mlfab__divergence_norm(4, 1, -3) <= 6 * (1 + 1e-14));
  assert_true(!mlfab__finite(mlfab__divergence_norm(not_a_number(), 1, 1)));
  assert_true(!mlfab__finite(mlfab__divergence_norm(never, 1, 1)));
  /* Nor does a sum that overflows by rounding become a number that counts as none. */
  assert_true(!mlfab__finite(mlfab__divergence_norm(1.7976931348623157e308, 1, 1)));
}

/* Sums of many commits in exact integer arithmetic: the bound is at least the sum, and hardly more. */
TEST(test_rounding) {
  mlfab__divergence d;
  mlfab__rng rng;
  mlfab__rng_seed(&rng, 3);
  for (int round = 0; round < 100; round++) {
    unsigned long long sum = 0, history = 0; /* units of 2^-60 */
    assert_int_equal(mlfab__divergence_init(&d, 1, 1, 0, 0), 0);
    for (uint32_t i = 0; i < 60; i++) {
      uint64_t n = mlfab__rng_next(&rng) >> 20;
      assert_int_equal(mlfab__divergence_append(&d, (double)n * 0x1p-60), 0);
      history += n;
      sum += history;
      assert_true((long double)d.bound >= (long double)sum * 0x1p-60L);
      assert_true(d.bound <= (double)sum * 0x1p-60 * (1 + 1e-13));
    }
  }
}

TESTS(NULL, NULL)
