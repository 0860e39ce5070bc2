/* test_monitor.c - core/sched/monitor.c: what is learned from which sample, when it is news; and that a context
 * measures its transports twice a heartbeat, in a fabric with a scheduler only. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "../testing.h"

#include "../../core/base/base.h"
#include "../../core/sched/monitor.h"
#include "../../core/base/rng.h"

#include <math.h>
#include <time.h>

#define BEAT 500000000ull
#define HALF (BEAT / 2)
#define MB 1e6
#define PROBED 1.25

typedef struct rig {
  mlfab__monitor monitor;
  uint64_t now;
} rig;

static rig begin(void) {
  rig r;
  mlfab__monitor_init(&r.monitor, BEAT);
  r.now = 7 * BEAT;
  return r;
}

/* The capacities now; of a copy, so that what was told stays as it is. */
static double capacity(const rig *r, int outward) {
  mlfab__monitor copy = r->monitor;
  double at[2];
  (void)mlfab__monitor_take(&copy, r->now, &at[0], &at[1]);
  return at[outward];
}

static double in(const rig *r) { return capacity(r, 0); }
static double out(const rig *r) { return capacity(r, 1); }

/* Half a heartbeat in which `rate` came in, and nobody knows what went out. */
static void sample(rig *r, double rate, int limited, double delivery, double nominal) {
  mlfab_measure m = {.elapsed_ns = HALF, .limited_in = limited != 0, .limited_out = 1};
  r->now += HALF;
  m.bytes_in = (uint64_t)(rate * (double)HALF * 1e-9 + 0.5);
  m.delivery_in = delivery;
  m.nominal = nominal;
  mlfab__monitor_sample(&r->monitor, &m, r->now);
}

static void full(rig *r, double rate) { sample(r, rate, 0, 0, 0); }
static void idle(rig *r, double rate) { sample(r, rate, 1, 0, 0); }
static void part(rig *r, double rate) { sample(r, rate / 10, 1, rate, 0); }

static void about(double is, double wanted, double tolerance) {
  if (!(is >= wanted * (1 - tolerance) && is <= wanted * (1 + tolerance)))
    fail_msg("%g is not %g", is, wanted);
}

/* --- learning --- */

TEST(test_unknown_at_first) {
  rig r = begin();
  assert_true(in(&r) < 0 && out(&r) < 0);
  for (int i = 0; i < 20; i++) idle(&r, 5 * MB); /* what an application sends is no capacity */
  assert_true(in(&r) < 0);
  full(&r, 20 * MB);
  about(in(&r), 20 * MB, 1e-6); /* the first counts as it is */
  assert_true(out(&r) < 0);     /* each direction for itself */
  r = begin();
  part(&r, 30 * MB);
  about(in(&r), 30 * MB, 1e-6);
}

TEST(test_both_directions) {
  rig r = begin();
  mlfab_measure m = {.elapsed_ns = 1000000000, .bytes_in = 3000000, .bytes_out = 500000};
  m.limited_out = 1;
  m.delivery_out = 7 * MB;
  mlfab__monitor_sample(&r.monitor, &m, r.now);
  about(in(&r), 7 * MB, 1e-9); /* what is sent could come in */
  about(out(&r), 7 * MB, 1e-9);
  r = begin();
  m = (mlfab_measure){.elapsed_ns = 1000000000, .bytes_in = 7000000, .bytes_out = 3000000};
  mlfab__monitor_sample(&r.monitor, &m, r.now);
  about(in(&r), 7 * MB, 1e-9);
  about(out(&r), 3 * MB, 1e-9); /* not the other way round: a receiver sees the limits of others */
  mlfab__monitor_set(&r.monitor, -1, 50 * MB);
  about(in(&r), 7 * MB, 1e-9); /* what was set was not sent */
  mlfab__monitor_set(&r.monitor, 2 * MB, -1);
  about(in(&r), 2 * MB, 1e-9);
}

TEST(test_more_raises_fast) {
  rig r = begin();
  full(&r, 10 * MB);
  full(&r, 40 * MB);
  assert_true(in(&r) > 30 * MB);
  full(&r, 40 * MB);
  about(in(&r), 40 * MB, 0.1);
  idle(&r, 80 * MB); /* also when there might have been still more */
  assert_true(in(&r) > 65 * MB && in(&r) <= 80 * MB);
  r = begin();
  full(&r, 10 * MB);
  for (int i = 0; i < 2; i++) part(&r, 40 * MB);
  about(in(&r), 40 * MB, 0.1);
}

TEST(test_less_is_believed_late) {
  rig r = begin();
  full(&r, 40 * MB);
  for (int i = 0; i < 5; i++) {
    full(&r, (double)(6 + i % 3) * MB);
    about(in(&r), 40 * MB, 1e-6);
  }
  full(&r, 6 * MB); /* three heartbeats: the largest of what came */
  about(in(&r), 8 * MB, 1e-6);
  for (int i = 0; i < 30; i++) { /* and no probe for a while */
    full(&r, 8 * MB);
    about(in(&r), 8 * MB, 1e-6);
  }
  /* One transfer at full speed now and then is enough to know better than the slow ones between. */
  r = begin();
  full(&r, 40 * MB);
  for (int i = 0; i < 200; i++) {
    full(&r, i % 5 ? 6 * MB : 39 * MB);
    about(in(&r) > 45 * MB ? in(&r) / 1.25 : in(&r), 39.5 * MB, 0.03);
  }
}

TEST(test_lower_bounds_do_not_lower) {
  rig r = begin();
  full(&r, 40 * MB);
  for (int i = 0; i < 100; i++) idle(&r, (double)(i % 38) * MB);
  about(in(&r), 40 * MB, 1e-6);
  /* One sample after a long silence may be a slow peer's. */
  full(&r, 5 * MB);
  about(in(&r), 40 * MB, 1e-6);
  idle(&r, 39 * MB); /* a lower bound about the estimate confirms it, and does not lower it */
  full(&r, 5 * MB);
  full(&r, 5 * MB);
  about(in(&r), 40 * MB, 1e-6);
}

TEST(test_a_cut_link) {
  rig r = begin();
  full(&r, 40 * MB);
  for (int i = 0; i < 7; i++) full(&r, 0);
  assert_true(in(&r) == 0);
  for (int i = 0; i < 100; i++) full(&r, 0);
  assert_true(in(&r) == 0);
  for (int i = 0; i < 4; i++) full(&r, 20 * MB);
  about(in(&r), 20 * MB, 0.01);
}

TEST(test_noise_is_smoothed) {
  rig r = begin();
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 5);
  full(&r, 20 * MB);
  for (int i = 0; i < 1000; i++) {
    double rate = (19.6 + 0.8 * mlfab__rng_unit(&prng)) * MB;
    full(&r, rate);
    about(in(&r) > 22 * MB ? in(&r) / PROBED : in(&r), 20 * MB, 0.03);
  }
}

/* --- probing --- */

/* A receiver that releases no more than the link is said to carry: what it sees is what it asked for. */
TEST(test_probes_find_what_nobody_asked_for) {
  rig r = begin();
  full(&r, 10 * MB);
  for (int i = 0; i < 400; i++) full(&r, in(&r) < 60 * MB ? in(&r) : 60 * MB);
  assert_true(in(&r) > 59 * MB);
}

TEST(test_probes_are_rare_and_short) {
  rig r = begin();
  int more = 0, spells = 0, before = 0;
  full(&r, 10 * MB);
  for (int i = 0; i < 1000; i++) {
    full(&r, 10 * MB);
    int now = in(&r) > 11 * MB;
    if (!now) about(in(&r), 10 * MB, 1e-6);
    if (now) about(in(&r), 12.5 * MB, 1e-6);
    more += now;
    spells += now && !before;
    before = now;
  }
  assert_true(spells >= 25 && spells <= 32); /* 500 heartbeats, one in 16 or a little more */
  assert_true(more <= 2 * spells);
  /* A link that is not full is not asked for more; and a probe does not outlast the load. */
  for (int i = 0; i < 200; i++) idle(&r, 9 * MB);
  about(in(&r), 10 * MB, 1e-6);
  for (int i = 0; i < 200; i++) part(&r, 10 * MB);
  about(in(&r), 10 * MB, 1e-6);
}

/* --- nominal speed, nonsense --- */

TEST(test_nominal_speed) {
  rig r = begin();
  sample(&r, 0, 1, 0, 125 * MB);
  about(in(&r), 125 * MB, 1e-9); /* better than nothing */
  sample(&r, 1 * MB, 1, 0, 125 * MB);
  about(in(&r), 125 * MB, 1e-9);
  sample(&r, 20 * MB, 0, 0, 125 * MB);
  about(in(&r), 20 * MB, 1e-6); /* not half way: what was measured is worth more */
  for (int i = 0; i < 10; i++) sample(&r, 900 * MB, 0, 2000 * MB, 125 * MB);
  about(in(&r), 125 * MB, 0.01); /* and never more than that */
  for (int i = 0; i < 200; i++) {
    sample(&r, 125 * MB, 0, 0, 125 * MB);
    assert_true(in(&r) <= 125 * MB);
  }
  sample(&r, 1 * MB, 1, 0, 60 * MB); /* it was negotiated anew */
  assert_true(in(&r) <= 60 * MB);
  r = begin();
  sample(&r, 0, 1, 0, -1);
  assert_true(in(&r) < 0);
}

TEST(test_nonsense_is_passed_over) {
  static const double odd[] = {-1, -1e300, (double)NAN, (double)INFINITY, -(double)INFINITY, 0};
  rig r = begin();
  mlfab_measure m = {.bytes_in = 1000000};
  mlfab__monitor_sample(&r.monitor, &m, r.now); /* no time has passed */
  assert_true(in(&r) < 0);
  for (size_t i = 0; i < MLFAB__COUNT(odd); i++) {
    sample(&r, 5 * MB, 1, odd[i], odd[i]);
    assert_true(in(&r) < 0);
  }
  full(&r, 20 * MB);
  for (size_t i = 0; i < MLFAB__COUNT(odd); i++) sample(&r, 20 * MB, 0, odd[i], odd[i]);
  about(in(&r), 20 * MB, 1e-6);
  m.elapsed_ns = 1;
  m.bytes_in = UINT64_MAX;
  mlfab__monitor_sample(&r.monitor, &m, r.now);
  assert_true(in(&r) - in(&r) == 0);
}

/* Whatever comes in whatever order: finite, and within what was ever seen, a probe more at most. */
TEST(test_random_samples) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 11);
  for (int round = 0; round < 300; round++) {
    rig r = begin();
    double largest = 0;
    for (int i = 0; i < 300; i++) {
      double rate = mlfab__rng_unit(&prng) * 100 * MB;
      double delivery = mlfab__rng_below(&prng, 2) ? mlfab__rng_unit(&prng) * 100 * MB : 0;
      int limited = mlfab__rng_below(&prng, 2) != 0;
      if (rate > largest) largest = rate;
      if (delivery > largest) largest = delivery;
      sample(&r, rate, limited, delivery, 0);
      assert_true(in(&r) - in(&r) == 0);
      assert_true(in(&r) <= largest * PROBED * 1.001);
      assert_true(in(&r) >= 0 || (limited && delivery <= 0));
    }
  }
}

/* --- by hand --- */

TEST(test_set) {
  rig r = begin();
  full(&r, 20 * MB);
  mlfab__monitor_set(&r.monitor, 5 * MB, 0);
  assert_true(in(&r) == 5 * MB && out(&r) == 0);
  for (int i = 0; i < 3; i++) full(&r, 40 * MB);
  assert_true(in(&r) == 5 * MB);
  mlfab__monitor_set(&r.monitor, -1, 9 * MB);
  about(in(&r), 40 * MB, 0.02); /* measured meanwhile */
  assert_true(out(&r) == 9 * MB);
  mlfab__monitor_set(&r.monitor, -1, -1);
  assert_true(out(&r) < 0);
}

/* --- traffic of others --- */

/* What is told: the link's estimate without the others' traffic, and at least an eighth of it. */
static double told(double link, double other) {
  return link - other > link / 8 ? link - other : link / 8;
}

/* A link of 100 MB/s; its interface counts all bytes, or this node sees only its own. */
TEST(test_others) {
  for (int counts = 0; counts < 2; counts++) {
    for (double other = 0; other <= 100 * MB; other += 20 * MB) {
      rig r = begin();
      mlfab__monitor_other(&r.monitor, other, 0, 0);
      assert_true(in(&r) < 0);
      for (int i = 0; i < 40; i++) {
        double own = 100 * MB - other;
        mlfab_measure m = {.elapsed_ns = HALF, .limited_out = 1};
        r.now += HALF;
        m.own_in = (uint64_t)(own * (double)HALF * 1e-9 + 0.5);
        m.bytes_in = counts ? (uint64_t)(100 * MB * (double)HALF * 1e-9) : m.own_in;
        mlfab__monitor_sample(&r.monitor, &m, r.now);
        double is = in(&r), link = told(100 * MB, other), probed = told(125 * MB, other);
        if (is < link * 0.999 || is > probed * 1.001)
          fail_msg("%g, not %g (others: %g, counts %d, sample %d)", is, link, other, counts, i);
      }
    }
  }
}

TEST(test_others_and_the_rest) {
  rig r = begin();
  mlfab__monitor_other(&r.monitor, 30 * MB, 10 * MB, 100 * MB);
  assert_true(in(&r) == 70 * MB && out(&r) == 90 * MB); /* the speed until something is measured */
  part(&r, 30 * MB);                                    /* the flow of 30 MB/s was not alone */
  about(in(&r), 30 * MB, 1e-6);
  for (int i = 0; i < 10; i++) full(&r, 300 * MB);
  about(in(&r), 70 * MB, 1e-6); /* no faster than the speed */
  sample(&r, 300 * MB, 0, 0, 80 * MB);
  about(in(&r), 50 * MB, 1e-6); /* the transport's own knowledge counts first */
  mlfab__monitor_set(&r.monitor, 5 * MB, 0);
  assert_true(in(&r) == 5 * MB && out(&r) == 0); /* by hand is by hand */
  mlfab__monitor_set(&r.monitor, -1, -1);
  mlfab__monitor_other(&r.monitor, 0, 0, 0);
  about(in(&r), 80 * MB, 1e-6);
}

/* --- news --- */

static int take(rig *r, double *in_p, double *out_p) {
  return mlfab__monitor_take(&r->monitor, r->now, in_p, out_p);
}

TEST(test_what_is_news) {
  rig r = begin();
  double a, b;
  assert_int_equal(take(&r, &a, &b), 0); /* nothing is known */
  mlfab__monitor_set(&r.monitor, 10 * MB, -1);
  assert_int_equal(take(&r, &a, &b), 1);
  assert_true(a == 10 * MB && b < 0);
  assert_int_equal(take(&r, &a, &b), 0);
  r.now += 100 * BEAT;
  assert_int_equal(take(&r, &a, &b), 0);
  static const struct {
    double in, out;
    int news;
  } cases[] = {{10.9 * MB, -1, 0}, {9.1 * MB, -1, 0},  {11.1 * MB, -1, 1}, {11.1 * MB, 0, 1},
               {11.1 * MB, 0, 0},  {11.1 * MB, 1, 1},  {11.1 * MB, -1, 1}, {12.1 * MB, -1, 0},
               {9.9 * MB, -1, 1},  {9.9 * MB, 2e9, 1}, {0, 2e9, 1},        {0, 2.1e9, 0},
               {-1, 2.1e9, 1},     {-1, 2.1e9, 0}};
  for (size_t i = 0; i < MLFAB__COUNT(cases); i++) {
    r.now += BEAT;
    mlfab__monitor_set(&r.monitor, cases[i].in, cases[i].out);
    if (take(&r, &a, &b) != cases[i].news) fail_msg("case %zu", i);
    assert_true(a == cases[i].in && b == cases[i].out); /* as they are, news or not */
  }
}

TEST(test_news_come_once_a_heartbeat) {
  rig r = begin();
  double a, b;
  int told = 0;
  for (int i = 0; i < 100; i++) {
    r.now += BEAT / 10;
    mlfab__monitor_set(&r.monitor, (double)(1 + i % 2) * MB, -1);
    told += take(&r, &a, &b);
  }
  assert_int_equal(told, 10);
  r.now += BEAT; /* what was not told in time is told later, if it is still so */
  mlfab__monitor_set(&r.monitor, 5 * MB, -1);
  assert_int_equal(take(&r, &a, &b), 1);
  mlfab__monitor_set(&r.monitor, 7 * MB, -1);
  r.now += BEAT - 1;
  assert_int_equal(take(&r, &a, &b), 0);
  r.now += 1;
  assert_int_equal(take(&r, &a, &b), 1);
  assert_true(a == 7 * MB);
}

/* --- a context measures --- */

static int measures;

static uint64_t monotonic_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int fake_measure(void *self, uint64_t now_ns, mlfab_measure *measure_p) {
  (void)self, (void)now_ns;
  measures++;
  *measure_p = (mlfab_measure){.elapsed_ns = 1000000, .bytes_in = 20000, .bytes_out = 30000};
  return 1;
}

static int no_measure(void *self, uint64_t now_ns, mlfab_measure *measure_p) {
  (void)self, (void)now_ns, (void)measure_p;
  measures++;
  return 0;
}

/* Drives a node for ten heartbeats over this transport, longer where a busy machine has not measured `least` times
 * by then, and counts its measures. Returns how long that was. */
static uint64_t measured(const mlfab_transport *table, uint32_t scheduler, int least,
                         mlfab_stats *stats_p) {
  mlfab_config config;
  mlfab *ctx = NULL;
  mlfab_error error;
  mlfab_config_init(&config);
  config.transport = table;
  config.progress = MLFAB_PROGRESS_HAND;
  config.heartbeat_ns = 20000000;
  config.scheduler = scheduler;
  measures = 0;
  uint64_t since = monotonic_ns();
  if (mlfab_open(&config, &ctx, &error)) fail_msg("%s", error.text);
  for (int i = 0; i < 100 || (measures < least && i < 30000); i++)
    assert_true(mlfab_progress(ctx, 2000000) >= 0);
  assert_int_equal(mlfab_get_stats(ctx, stats_p, sizeof *stats_p), 0);
  assert_int_equal(mlfab_close(&ctx), 0);
  return monotonic_ns() - since;
}

TEST(test_a_context_measures) {
  mlfab_transport table = *mlfab_transport_tcp();
  mlfab_stats stats;
  table.measure = fake_measure;
  uint64_t took_ns = measured(&table, MLFAB_SCHEDULER_BESIDE, 5, &stats);
  assert_true(measures >= 5 && (uint64_t)measures <= took_ns / 10000000 + 2); /* a half heartbeat */
  about((double)stats.link_in, 30 * MB, 0.3);  /* what is sent could come in, at least; */
  about((double)stats.link_out, 30 * MB, 0.3); /* ... 1.25 times that while it probes */
  measured(&table, MLFAB_SCHEDULER_NONE, 0, &stats);
  assert_int_equal(measures, 0);
  table.measure = no_measure;
  measured(&table, MLFAB_SCHEDULER_BESIDE, 1, &stats);
  assert_true(measures > 0);
  assert_int_equal(stats.link_in, 0);
  table.measure = NULL;
  measured(&table, MLFAB_SCHEDULER_BESIDE, 0, &stats);
  assert_int_equal(measures, 0);
  table.measure = fake_measure; /* what stays within the host takes nothing of its links */
  table.caps |= MLFAB_CAP_LOCAL;
  measured(&table, MLFAB_SCHEDULER_BESIDE, 0, &stats);
  assert_int_equal(measures, 0);
}

TEST(test_abi) {
  mlfab_transport table = *mlfab_transport_tcp();
  mlfab_config config;
  mlfab *ctx = NULL;
  mlfab_error error;
  assert_int_equal(table.abi, MLFAB_TRANSPORT_ABI);
  assert_int_equal(table.size, sizeof table);
  mlfab_config_init(&config);
  config.transport = &table;
  table.abi = MLFAB_TRANSPORT_ABI - 1;
  assert_int_equal(mlfab_open(&config, &ctx, &error), MLFAB_ERR_CONFIG);
  table.abi = MLFAB_TRANSPORT_ABI;
  table.size = offsetof(mlfab_transport, measure);
  assert_int_equal(mlfab_open(&config, &ctx, &error), MLFAB_ERR_CONFIG);
}

TESTS(NULL, NULL)
