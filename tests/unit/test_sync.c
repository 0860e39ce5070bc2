/* test_sync.c - core/model/sync.c: conditions over all small states against Table III of FluentPS, refusals
 * and their texts, the distribution of PSSP's gaps, draws, and the threshold of DSPS. Whole servers:
 * test_lazy.c.
 *
 * MLFAB_SCALE=100 makes 400,000 trials of each gap distribution, 1 (the default) a hundredth of them. */
#include "core/checkpoint/restore.h"
#include "core/model/sync.h"

#include <math.h>
#include "../testing.h"

/* RULED: kinds that have conditions of their own; those of USER are the caller's. */
enum { KINDS = MLFAB_SYNC_COUNT, RULED = KINDS - 1, WORKERS = 8 };

static uint32_t ruled(uint32_t n) { return n + (n >= MLFAB_SYNC_USER); }

static const double almost_one = 1.0 - 0x1p-53;

/* ---- conditions ---- */

/* Table III as it is printed, with i = progress - 1; 2: it depends. */
static int printed_pull(uint32_t kind, int64_t i, int64_t v, int64_t s) {
  switch (kind) {
    case MLFAB_SYNC_ASYNC:
      return 1;
    case MLFAB_SYNC_BSP:
    case MLFAB_SYNC_DROP:
      return i < v;
    case MLFAB_SYNC_SSP:
    case MLFAB_SYNC_DSPS:
      return i < v + s;
    default:
      return i < v + s ? 1 : 2;
  }
}

TEST(test_pull_conditions) {
  for (uint32_t n = 0; n < RULED * 6 * 6 * 4; n++) {
    uint32_t kind = ruled(n % RULED);
    uint64_t progress = n / RULED % 6, v = n / RULED / 6 % 6, s = n / RULED / 36;
    mlfab_sync sync = {.kind = kind, .staleness = 99, .chance = 0.25, .alpha = 0.5};
    mlfab_sync_state look = {.iteration = progress, .fastest = progress, .v_train = v};
    int printed = printed_pull(kind, (int64_t)progress - 1, (int64_t)v, (int64_t)s);
    double pause = mlfab__sync_pause(&sync, s, &look);
    assert_int_equal(mlfab__sync_may_pull_again(&sync, s, &look), printed == 1);
    if (printed < 2) {
      assert_true(pause == (printed ? 0.0 : 1.0));
      assert_int_equal(mlfab__sync_may_pull(&sync, s, &look, 0.0), printed);
      assert_int_equal(mlfab__sync_may_pull(&sync, s, &look, almost_one), printed);
      continue;
    }
    double k = (double)progress - 1 - (double)v;
    double p = kind == MLFAB_SYNC_PSSP ? 0.25 : 0.5 / (1 + exp((double)s - k));
    assert_true(fabs(pause - p) < 1e-15);
    assert_false(mlfab__sync_may_pull(&sync, s, &look, pause - 0x1p-30));
    assert_true(mlfab__sync_may_pull(&sync, s, &look, pause));
    /* a worker that is one ahead of it passes; one that shares the lead does not */
    sync.only_fastest = 1;
    assert_true(mlfab__sync_pause(&sync, s, &look) == pause);
    look.fastest++;
    assert_true(mlfab__sync_may_pull(&sync, s, &look, 0.0));
    assert_false(mlfab__sync_may_pull_again(&sync, s, &look));
  }
}

/* Numbers that would overflow, and probabilities 0 and 1. */
TEST(test_pull_extremes) {
  mlfab_sync sync = {.kind = MLFAB_SYNC_SSP, .staleness = INT64_MAX};
  mlfab_sync_state look = {
      .iteration = UINT64_MAX, .fastest = UINT64_MAX, .v_train = UINT64_MAX - 3};
  assert_true(mlfab__sync_may_pull(&sync, INT64_MAX, &look, 0.0));
  look.v_train = 0;
  assert_false(mlfab__sync_may_pull(&sync, INT64_MAX, &look, almost_one));
  sync.kind = MLFAB_SYNC_PSSP;
  sync.chance = 1;
  assert_false(mlfab__sync_may_pull(&sync, 3, &look, almost_one));
  sync.chance = 0;
  assert_true(mlfab__sync_may_pull(&sync, 3, &look, 0.0));
  look.iteration = 0; /* the first weights */
  for (uint32_t n = 0; n < RULED; n++) {
    sync.kind = ruled(n);
    assert_true(mlfab__sync_may_pull(&sync, 0, &look, 0.0));
  }
}

/* P of PSSP_DYNAMIC: e^x without libm, significance as alpha, always within [0, 1]. */
TEST(test_dynamic) {
  static const double alphas[] = {1e-9, 0.3, 1, 1.5, 2, 7, 1e300};
  mlfab_sync sync = {.kind = MLFAB_SYNC_PSSP_DYNAMIC};
  for (uint64_t beyond = 0; beyond < 2000; beyond++) {
    mlfab_sync_state look = {.iteration = beyond + 5, .fastest = beyond + 5, .v_train = 1};
    for (uint32_t i = 0; i < MLFAB__COUNT(alphas); i++) {
      double p = fmin(1, alphas[i] / (1 + exp(-(double)beyond)));
      sync.alpha = alphas[i];
      look.significance = 0.01;
      assert_true(fabs(mlfab__sync_pause(&sync, 3, &look) - p) <= 1e-14 * p);
      sync.alpha = 0;
      look.significance = alphas[i];
      assert_true(fabs(mlfab__sync_pause(&sync, 3, &look) - p) <= 1e-14 * p);
    }
    look.significance = 0;
    assert_true(mlfab__sync_pause(&sync, 3, &look) == 0.0);
    look.significance = HUGE_VAL;
    assert_true(mlfab__sync_pause(&sync, 3, &look) == 1.0);
    look.significance = -1; /* unknown: treated as 1 */
    assert_true(fabs(mlfab__sync_pause(&sync, 3, &look) - 1 / (1 + exp(-(double)beyond))) < 1e-14);
  }
}

TEST(test_push_conditions) {
  for (uint32_t n = 0; n < KINDS * 5 * 5; n++) {
    mlfab_sync sync = {.kind = n % KINDS};
    uint64_t i = n / KINDS % 5, v = n / KINDS / 5;
    int rounds = sync.kind == MLFAB_SYNC_BSP || sync.kind == MLFAB_SYNC_DROP;
    assert_int_equal(mlfab__sync_rounds(sync.kind), rounds);
    assert_int_equal(mlfab__sync_may_push(&sync, i, v), !rounds || i <= v);
    assert_int_equal(mlfab__sync_late(&sync, i, v), sync.kind == MLFAB_SYNC_DROP && i < v);
    sync.keep_late = 1;
    assert_false(mlfab__sync_late(&sync, i, v));
  }
  for (uint32_t n = 0; n < KINDS * 6 * 6 * 6; n++) {
    mlfab_sync sync = {.kind = n % KINDS, .need = 1 + n / KINDS % 6};
    mlfab_sync_state look = {.arrived = n / KINDS / 6 % 6, .members = n / KINDS / 36};
    uint32_t need =
        sync.kind == MLFAB_SYNC_DROP && sync.need < look.members ? sync.need : look.members;
    /* Count[V] >= N_t; with no worker left, the open iteration is complete. */
    int complete = look.members ? look.arrived >= need : look.arrived > 0;
    assert_int_equal(mlfab__sync_complete_round(&sync, &look), complete);
  }
}

/* ---- the distribution of PSSP's gaps ---- */

static uint32_t scaled(uint32_t n) { return (uint32_t)test_cases_from(n, n); }

/* The value that chi^2 with n degrees of freedom exceeds in 1 of 1000 cases (Wilson and Hilferty). */
static double chi_limit(double n) {
  return n * pow(1 - 2 / (9 * n) + 3.0902 * sqrt(2 / (9 * n)), 3);
}

/* One worker has stopped; another one continues until it is paused at a gap k = s + j: c (1 - c)^j. */
static void gap_law(double c, uint64_t s, uint32_t trials) {
  enum { BINS = 400 };
  uint32_t seen[BINS] = {0}, bins = 0;
  mlfab_sync sync = {.kind = MLFAB_SYNC_PSSP, .chance = c};
  double sum = 0, chi = 0, rest = 1, count = 0;
  for (uint32_t trial = 0; trial < trials; trial++) {
    mlfab_sync_state look = {.worker = 1, .iteration = 1, .fastest = 1};
    while (mlfab__sync_may_pull(&sync, s, &look,
                                mlfab__sync_draw(trial, 0, look.worker, look.iteration)))
      look.fastest = ++look.iteration;
    uint64_t gap = look.iteration - 1;
    assert_true(gap >= s);
    sum += (double)gap;
    seen[gap - s < BINS ? gap - s : BINS - 1]++;
  }
  assert_true(fabs(sum / trials - ((double)s + 1 / c - 1)) < 0.15);
  for (uint32_t j = 0; j < BINS; j++) {
    double expected = trials * c * pow(1 - c, j);
    if (expected < 10) break;
    chi += (seen[j] - expected) * (seen[j] - expected) / expected;
    rest -= c * pow(1 - c, j);
    count += seen[j];
    bins++;
  }
  if (rest * trials >= 1) chi += pow(trials - count - rest * trials, 2) / (rest * trials);
  print_message("c = %.1f, s = %u: mean gap %.3f, chi^2 %.1f of at most %.1f\n", c, (unsigned)s,
                sum / trials, chi, chi_limit(bins));
  assert_true(chi < chi_limit(bins));
}

TEST(test_gap_law) {
  gap_law(0.5, 3, scaled(4000));
  gap_law(0.3, 3, scaled(4000));
  gap_law(0.2, 0, scaled(16000));
  gap_law(0.1, 3, scaled(64000)); /* more trials, or the mean itself would be off by 0.15 */
}

TEST(test_draws) {
  uint32_t below[10] = {0};
  for (uint32_t i = 0; i < 40000; i++) {
    double u = mlfab__sync_draw(7, i % 4, i / 4 % 10, i / 40);
    assert_true(u >= 0.0 && u < 1.0);
    assert_true(u == mlfab__sync_draw(7, i % 4, i / 4 % 10, i / 40));
    below[(uint32_t)(u * 10)]++;
  }
  for (uint32_t i = 0; i < 10; i++) assert_in_range(below[i], 3800, 4200);
  double u = mlfab__sync_draw(7, 1, 2, 3);
  assert_true(u != mlfab__sync_draw(8, 1, 2, 3) && u != mlfab__sync_draw(7, 2, 1, 3));
  assert_true(u != mlfab__sync_draw(7, 0, 2, 3) && u != mlfab__sync_draw(7, 1, 2, 4));
  assert_true(u != mlfab__sync_draw(7, 1, 3, 2));
}

/* ---- DSPS ---- */

TEST(test_tuner) {
  mlfab_sync sync = {.kind = MLFAB_SYNC_DSPS, .staleness = 2};
  mlfab__sync_tuner tuner = {2, 0};
  mlfab__sync_complete(&sync);
  assert_int_equal(sync.staleness_max, 12);
  for (uint64_t i = 0; i < 15; i++) {
    mlfab__sync_tune(&sync, &tuner, 1 + i, 20);
    assert_int_equal(tuner.threshold, i < 10 ? 3 + i : 12);
  }
  for (uint64_t i = 1; i <= 100; i++) { /* no worker waits */
    mlfab__sync_tune(&sync, &tuner, 0, 2);
    assert_int_equal(tuner.threshold, i / 8 < 10 ? 12 - i / 8 : 2);
  }
  tuner.threshold = 5;
  /* never 8 quiet ones in a row: one has waited since before */
  for (uint64_t i = 0; i < 100; i++) {
    mlfab__sync_tune(&sync, &tuner, 0, i % 8 == 3 ? 6 : 5);
    assert_int_equal(tuner.threshold, 5);
  }
}

/* ---- the description ---- */

static void refused(const mlfab_sync *sync, const char *text) {
  mlfab_error error = {0};
  assert_int_equal(mlfab__sync_check(sync, WORKERS, &error), MLFAB_ERR_ARGUMENT);
  assert_string_equal(error.text, text);
  assert_int_equal(mlfab__sync_check(sync, WORKERS, NULL), MLFAB_ERR_ARGUMENT);
}

TEST(test_refused) {
  static volatile double zero; /* so that NaN and infinity are computed at run time */
  char last[80];
  snprintf(last, sizeof last, "kind of consistency is %d, must be 0 to %d (MLFAB_SYNC_*)", KINDS,
           KINDS - 1);
  refused(&(mlfab_sync){.kind = KINDS}, last);
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_SSP, .staleness = -1},
          "ssp: staleness is -1, must be 0 or more");
  for (uint32_t kind = 0; kind < KINDS; kind++) {
    mlfab_sync sync = {.kind = kind, .staleness = INT64_MIN, .need = 1};
    char text[80];
    mlfab__sync_complete(&sync);
    snprintf(text, sizeof text, "%s: staleness is -9223372036854775808, must be 0 or more",
             mlfab__sync_name(kind));
    refused(&sync, text);
  }
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_PSSP_DYNAMIC, .staleness = INT64_MIN},
          "pssp_dynamic: staleness is -9223372036854775808, must be 0 or more");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_DSPS, .staleness = 4, .staleness_max = 3},
          "dsps: staleness_max is 3, must be 0 or at least staleness, which is 4");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_DSPS, .staleness_max = -3},
          "dsps: staleness_max is -3, must be 0 or at least staleness, which is 0");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_DROP},
          "drop: need is 0, must be 1 to 8, the number of workers");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_DROP, .need = 9},
          "drop: need is 9, must be 1 to 8, the number of workers");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_PSSP, .chance = 1.5},
          "pssp: chance is 1.5, must be 0 to 1");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_PSSP, .chance = -0.1},
          "pssp: chance is -0.1, must be 0 to 1");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_PSSP, .chance = fabs(zero / zero)},
          "pssp: chance is nan, must be 0 to 1");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_PSSP_DYNAMIC, .alpha = -1},
          "pssp_dynamic: alpha is -1, must be 0 or more and finite");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_PSSP_DYNAMIC, .alpha = 1 / zero},
          "pssp_dynamic: alpha is inf, must be 0 or more and finite");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_BSP, .soft = 2}, "bsp: soft is 2, must be 0 or 1");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_USER, .soft = 2}, "user: soft is 2, must be 0 or 1");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_PSSP, .only_fastest = 3},
          "pssp: only_fastest is 3, must be 0 or 1");
  refused(&(mlfab_sync){.kind = MLFAB_SYNC_DROP, .need = 8, .keep_late = 2},
          "drop: keep_late is 2, must be 0 or 1");
}

/* A model in which every field that its kind does not use is out of range. */
static mlfab_sync careless(uint32_t kind) {
  mlfab_sync sync = {.kind = kind,
                     .staleness = 5,
                     .staleness_max = -9,
                     .need = 99,
                     .soft = 7,
                     .only_fastest = 7,
                     .keep_late = 7,
                     .chance = 7,
                     .alpha = -7};
  if (kind != MLFAB_SYNC_ASYNC) sync.soft = 1;
  if (kind == MLFAB_SYNC_DROP) sync.need = WORKERS, sync.keep_late = 1;
  if (kind == MLFAB_SYNC_SSP || kind == MLFAB_SYNC_DSPS) sync.staleness = 3;
  if (kind == MLFAB_SYNC_DSPS) sync.staleness_max = 3;
  if (kind == MLFAB_SYNC_PSSP || kind == MLFAB_SYNC_PSSP_DYNAMIC)
    sync.staleness = 3, sync.only_fastest = 1;
  if (kind == MLFAB_SYNC_PSSP) sync.chance = 1;
  if (kind == MLFAB_SYNC_PSSP_DYNAMIC) sync.alpha = 0;
  return sync;
}

/* Fields that a kind does not use are neither checked nor compared; the others are both. */
TEST(test_descriptions) {
  for (uint32_t kind = 0; kind < KINDS; kind++) {
    mlfab_sync all = careless(kind), other = all;
    int pssp = kind == MLFAB_SYNC_PSSP || kind == MLFAB_SYNC_PSSP_DYNAMIC;
    int stale = pssp || kind == MLFAB_SYNC_SSP || kind == MLFAB_SYNC_DSPS;
    assert_int_equal(mlfab__sync_check(&all, WORKERS, NULL), 0);
    mlfab__sync_complete(&all);
    assert_int_equal(all.size, sizeof all);
    other.size = 0;
    assert_true(mlfab__restore_equal(&all, &other));
    other.kind = (kind + 1) % KINDS;
    assert_false(mlfab__restore_equal(&all, &other));
#define CHANGED(member, used)                                      \
  do {                                                             \
    other = all;                                                   \
    other.member = 2;                                              \
    assert_int_equal(mlfab__restore_equal(&all, &other), !(used)); \
  } while (0)
    CHANGED(staleness, stale);
    CHANGED(staleness_max, kind == MLFAB_SYNC_DSPS);
    CHANGED(need, kind == MLFAB_SYNC_DROP);
    CHANGED(soft, kind != MLFAB_SYNC_ASYNC);
    CHANGED(only_fastest, pssp);
    CHANGED(keep_late, kind == MLFAB_SYNC_DROP);
    CHANGED(chance, kind == MLFAB_SYNC_PSSP);
    CHANGED(alpha, kind == MLFAB_SYNC_PSSP_DYNAMIC);
#undef CHANGED
    assert_int_equal(mlfab__sync_counts(kind), kind != MLFAB_SYNC_ASYNC);
    assert_int_equal(mlfab__sync_rechecks(&all), !pssp);
    assert_int_equal(mlfab__sync_watches(kind), kind == MLFAB_SYNC_USER);
    assert_int_equal(mlfab__sync_significant(&all),
                     kind == MLFAB_SYNC_PSSP_DYNAMIC || kind == MLFAB_SYNC_USER);
    all.alpha = 0.5;
    assert_int_equal(mlfab__sync_significant(&all), kind == MLFAB_SYNC_USER);
  }
  mlfab_sync huge = {.kind = MLFAB_SYNC_DSPS, .staleness = INT64_MAX};
  mlfab__sync_complete(&huge);
  assert_int_equal(huge.staleness_max, INT64_MAX);
  assert_int_equal(mlfab__sync_check(&huge, 1, NULL), 0);
  assert_string_equal(mlfab__sync_name(MLFAB_SYNC_DSPS), "dsps");
  assert_string_equal(mlfab__sync_name(KINDS), "unknown");
}

TESTS(NULL, NULL)
