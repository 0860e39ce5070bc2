/* test_scheduler.c - the scheduler role alone, against servers simulated by the test: when it plans, what
 * it tells the servers, and that its predictions come true when its plans are carried out exactly. */
#include "core/sched/scheduler.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { SERVERS = 3, WORKERS = 640, PLANS = 64 };
#define MS 1000000ull
#define SECOND 1000000000ull
#define GIGA 1e9

/* ---- a scheduler and its messages ---- */

typedef struct heard {
  uint32_t server;
  uint64_t at_ns;
  mlfab__plan plan;
  mlfab__plan_entry *entries;
} heard;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__scheduler *s;
  heard plans[PLANS]; /* since the last look */
  uint32_t nplans, drops;
  uint32_t reassured; /* heartbeats to waiting servers: plans without entries */
  uint64_t now_ns;
  /* of the allocator */
  uint64_t calls, fail_at;
  void (*on_plan)(void *world, uint32_t server, const mlfab__plan *plan,
                  const mlfab__plan_entry *entries);
  void *world;
} fixture;

static void forget_plans(fixture *f) {
  for (uint32_t i = 0; i < f->nplans; i++) free(f->plans[i].entries);
  f->nplans = 0;
}

static void port_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  fixture *f = self;
  if (type == MLFAB__SCHEDULE) { /* server 0's, for the others */
    mlfab__schedule schedule;
    assert_true(peer > 0 && peer < f->config.servers);
    assert_int_equal(mlfab__decode_schedule(meta, bytes, &schedule), 0);
    return;
  }
  mlfab__plan_entry *entries = malloc(MLFAB__PLAN_ENTRIES_MAX * sizeof *entries);
  mlfab__plan plan;
  assert_int_equal(type, MLFAB__PLAN);
  assert_true(peer < f->config.servers);
  assert_int_equal(mlfab__decode_plan(meta, bytes, &plan, entries), 0);
  if (plan.entries == 0) {
    f->reassured++;
    free(entries);
    return;
  }
  if (f->on_plan) {
    f->on_plan(f->world, peer, &plan, entries);
    free(entries);
    return;
  }
  assert_true(f->nplans < PLANS);
  f->plans[f->nplans++] = (heard){peer, f->now_ns, plan, entries};
}
static void port_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void port_drop(void *self, uint32_t peer, int code, const char *text) {
  fixture *f = self;
  (void)peer;
  assert_int_equal(code, MLFAB_ERR_FRAME);
  assert_non_null(text);
  f->drops++;
}
static void port_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void port_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static void *allocate(void *user, size_t bytes) {
  fixture *f = user;
  return ++f->calls == f->fail_at ? NULL : malloc(bytes);
}
static void release(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  free(memory);
}

static int begin(fixture *f, uint32_t workers, uint32_t servers) {
  mlfab__port port = {f, port_post, port_ready, port_drop, port_detach, port_event, NULL, NULL};
  mlfab_env env = {.size = sizeof env, .allocate = allocate, .release = release, .user = f};
  assert_int_equal(mlfab__env_init(&f->env, &env), 0);
  mlfab_config_init(&f->config);
  f->config.workers = workers;
  f->config.servers = servers;
  f->config.heartbeat_ns = 500 * MS;
  f->config.seed = 7;
  return mlfab__scheduler_create(&f->env, &f->config, &port, &f->stats, &f->s);
}

static void end(fixture *f) {
  mlfab__scheduler_destroy(&f->s);
  assert_null(f->s);
  forget_plans(f);
  assert_int_equal(f->env.bytes, 0);
}

static void frame(fixture *f, uint32_t server, uint8_t type, const uint8_t *meta, uint32_t bytes) {
  mlfab__frame_in in = {type, bytes, 0, meta, NULL};
  mlfab__scheduler_frame(f->s, server, &in, f->now_ns);
}

static void tick(fixture *f) { mlfab__scheduler_tick(f->s, f->now_ns); }

static mlfab__schedule schedule_of(uint64_t bound) {
  return (mlfab__schedule){.delay_bound = bound, .plan_ahead_ns = 150 * MS};
}

static void say_schedule(fixture *f, uint32_t server, mlfab__schedule m) {
  uint8_t meta[128];
  m.host = 1000 + server;
  frame(f, server, MLFAB__SCHEDULE, meta, mlfab__encode_schedule(meta, &m));
}

static void say_station(fixture *f, uint32_t server, uint32_t worker, uint32_t incarnation,
                        uint32_t alive, uint64_t host) {
  uint8_t meta[64];
  mlfab__station m = {worker, incarnation, alive, 2, host};
  frame(f, server, MLFAB__STATION, meta, mlfab__encode_station(meta, &m));
}

static void say_capacity(fixture *f, uint64_t host, double in, double out) {
  uint8_t meta[64];
  mlfab__capacity m = {host, in, out};
  frame(f, 0, MLFAB__CAPACITY, meta, mlfab__encode_capacity(meta, &m));
}

static mlfab__announce announce_of(uint32_t kind, uint32_t worker, uint64_t id, uint64_t bytes) {
  return (mlfab__announce){.id = id,
                           .bytes = bytes,
                           .shape = 1,
                           .kind = kind,
                           .worker = worker,
                           .incarnation = 1,
                           .members = 1,
                           .parts = 1};
}

static void say_announce(fixture *f, uint32_t server, const mlfab__announce *m) {
  uint8_t meta[128];
  frame(f, server, MLFAB__ANNOUNCE, meta, mlfab__encode_announce(meta, m));
}

static void say_push(fixture *f, uint32_t server, uint32_t worker, uint64_t id, uint64_t bytes,
                     uint64_t lag) {
  mlfab__announce m = announce_of(MLFAB__TRANSFER_PUSH, worker, id, bytes);
  m.lag = lag;
  say_announce(f, server, &m);
}

static void say_report(fixture *f, uint32_t server, uint32_t kind, uint32_t worker, uint64_t id,
                       uint64_t placed, uint64_t backlog, uint64_t out_backlog) {
  uint8_t meta[128];
  mlfab__report m = {.id = id,
                     .placed = placed,
                     .backlog = backlog,
                     .out_backlog = out_backlog,
                     .kind = kind,
                     .worker = worker};
  frame(f, server, MLFAB__REPORT, meta, mlfab__encode_report(meta, &m));
}

/* A fabric whose links all carry a gigabyte a second, every node on a host of its own. */
static void fabric(fixture *f, uint32_t workers, uint32_t servers, mlfab__schedule schedule) {
  assert_int_equal(begin(f, workers, servers), 0);
  f->now_ns = SECOND;
  for (uint32_t k = 0; k < servers; k++) {
    mlfab__scheduler_hello(f->s, k, f->now_ns);
    say_schedule(f, k, schedule);
    for (uint32_t w = 0; w < workers; w++) say_station(f, k, w, 1, 1, 1 + w);
    say_report(f, k, 0, MLFAB__NO_NODE, 0, 0, 0, 0);
  }
  for (uint32_t k = 0; k < servers; k++) say_capacity(f, 1000 + k, GIGA, GIGA);
  for (uint32_t w = 0; w < workers; w++) say_capacity(f, 1 + w, GIGA, GIGA);
  assert_int_equal(f->drops, 0);
  tick(f);
  assert_int_equal(f->nplans, 0);
}

/* ---- when it plans ---- */

/* A single update is planned at once, as direct; the same one is not planned again. */
static void test_one(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 4, 1, schedule_of(MLFAB_UNBOUNDED));
  assert_true(mlfab__scheduler_deadline(f.s) == MLFAB__NEVER);
  say_push(&f, 0, 2, 5, 100000000, 0);
  assert_true(mlfab__scheduler_deadline(f.s) <= f.now_ns);
  tick(&f);
  assert_int_equal(f.nplans, 1);
  assert_int_equal(f.plans[0].plan.entries, 1);
  const mlfab__plan_entry *e = &f.plans[0].entries[0];
  assert_int_equal(e->id, 5);
  assert_int_equal(e->worker, 2);
  assert_int_equal(e->kind, MLFAB__TRANSFER_PUSH);
  assert_int_equal(e->aggregator, MLFAB__NO_NODE);
  assert_int_equal(e->group, 0);
  assert_int_equal(e->fate, MLFAB__FATE_GO);
  assert_int_equal(e->delay, 0);
  assert_true(f.plans[0].plan.rate_in == GIGA);
  assert_true(mlfab__scheduler_deadline(f.s) == MLFAB__NEVER);
  f.now_ns += SECOND;
  tick(&f);
  assert_int_equal(f.nplans, 1);
  assert_int_equal(f.stats.plans_made, 1);
  end(&f);
}

/* While the in-link is booked for plan_ahead or more nothing is planned; then planning resumes at once. At
 * 100 ms an update the third waits until 200 ms of booking have fallen to 150. The updates that have
 * gathered by then are one batch, and some of them are aggregated. */
static void test_booked_ahead(void **state) {
  fixture f = {0};
  uint32_t grouped = 0;
  (void)state;
  fabric(&f, 12, 1, schedule_of(MLFAB_UNBOUNDED));
  for (uint32_t w = 0; w < 12; w++) {
    say_push(&f, 0, w, 1, 100000000, 0);
    tick(&f);
  }
  assert_int_equal(f.nplans, 2);
  uint64_t due = mlfab__scheduler_deadline(f.s);
  assert_true(due > SECOND + 50 * MS - 10 && due <= SECOND + 50 * MS + 10);
  f.now_ns = due - 1000;
  tick(&f);
  assert_int_equal(f.nplans, 2);
  f.now_ns = mlfab__scheduler_deadline(f.s);
  assert_true(f.now_ns <= due + 5 * MS);
  tick(&f);
  assert_int_equal(f.nplans, 3);
  assert_int_equal(f.plans[2].plan.entries, 10);
  for (uint32_t i = 0; i < 10; i++) grouped += f.plans[2].entries[i].group != 0;
  assert_true(grouped >= 4);
  assert_int_equal(f.stats.plans_grouped, grouped);
  end(&f);
}

/* The link is slower than planned: the scheduler takes the progress from the server's report. */
static void test_booked_by_report(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 4, 1, schedule_of(MLFAB_UNBOUNDED));
  say_push(&f, 0, 0, 1, 300000000, 0);
  tick(&f);
  say_push(&f, 0, 1, 1, 1000000, 0);
  f.now_ns += 149 * MS;
  tick(&f);
  assert_int_equal(f.nplans, 1);
  say_report(&f, 0, 0, MLFAB__NO_NODE, 0, 1, 290000000, 0);
  f.now_ns += 10 * MS;
  tick(&f);
  assert_int_equal(f.nplans, 1);
  /* And it does not wait for a transfer that ended early. */
  say_report(&f, 0, 0, 0, 1, 1, 0, 0);
  tick(&f);
  assert_int_equal(f.nplans, 2);
  end(&f);
}

/* Members that a server may have missed are counted at that server, and not at servers that have no part of
 * them. */
static void test_unsure(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 4, 2, schedule_of(MLFAB_UNBOUNDED));
  mlfab__announce m = announce_of(MLFAB__TRANSFER_PUSH, 2, 5, 100000000);
  m.members = 3;
  say_announce(&f, 0, &m);
  tick(&f);
  assert_int_equal(f.nplans, 1);
  say_push(&f, 1, 3, 5, 1000, 0); /* to make it plan again */
  tick(&f);
  assert_int_equal(f.nplans, 2);
  assert_int_equal(f.s->served[0].unsure, 3);
  assert_int_equal(f.s->served[1].unsure, 1);
  say_report(&f, 0, MLFAB__TRANSFER_PUSH, 2, 5, 3, 0, 0);
  say_push(&f, 1, 1, 5, 1000, 0);
  tick(&f);
  assert_int_equal(f.s->served[0].unsure, 0);
  assert_int_equal(f.s->served[1].unsure, 2);
  end(&f);
}

static void test_interval(void **state) {
  fixture f = {0};
  mlfab__schedule schedule = schedule_of(MLFAB_UNBOUNDED);
  (void)state;
  schedule.interval_ns = 100 * MS;
  fabric(&f, 9, 1, schedule);
  for (uint32_t w = 0; w < 3; w++) {
    say_push(&f, 0, w, 1, 400000000, 0);
    tick(&f);
    f.now_ns += 10 * MS;
  }
  assert_int_equal(f.nplans, 1);
  assert_true(mlfab__scheduler_deadline(f.s) == SECOND + 100 * MS);
  f.now_ns = SECOND + 100 * MS;
  tick(&f);
  assert_int_equal(f.nplans, 2);
  assert_int_equal(f.plans[1].plan.entries, 2);
  say_push(&f, 0, 5, 1, 400000000, 0);
  f.now_ns += 99 * MS;
  tick(&f);
  assert_int_equal(f.nplans, 2);
  f.now_ns += 1 * MS;
  tick(&f);
  assert_int_equal(f.nplans, 3);
  end(&f);
}

/* ---- fates ---- */

static uint32_t fate_of(const fixture *f, uint32_t worker) {
  for (uint32_t i = 0; i < f->nplans; i++) {
    for (uint32_t k = 0; k < f->plans[i].plan.entries; k++) {
      if (f->plans[i].entries[k].worker == worker) return f->plans[i].entries[k].fate;
    }
  }
  return 99;
}

/* With a bound of 3 the delays 0, 1 and 2 pass. Of three updates with delay 2 in first place one fits; the
 * others are dropped, and are told the delay that they would have had. */
static void test_bound(void **state) {
  fixture f = {0};
  uint32_t gone = 0;
  (void)state;
  fabric(&f, 6, 1, schedule_of(3));
  say_push(&f, 0, 0, 1, 1000000, 3);
  say_push(&f, 0, 1, 1, 1000000, 2);
  say_push(&f, 0, 2, 1, 1000000, 2);
  say_push(&f, 0, 3, 1, 1000000, 1);
  say_push(&f, 0, 4, 1, 1000000, UINT64_MAX);
  tick(&f);
  assert_int_equal(f.nplans, 1);
  assert_int_equal(f.plans[0].plan.entries, 5);
  for (uint32_t k = 0; k < 5; k++) {
    const mlfab__plan_entry *e = &f.plans[0].entries[k];
    if (e->fate == MLFAB__FATE_GO) {
      assert_true(e->delay < 3);
      assert_int_equal(gone, 0);
    } else {
      assert_true(e->delay >= 3);
      gone++;
    }
  }
  assert_int_equal(gone, 3);
  assert_int_equal(fate_of(&f, 0), MLFAB__FATE_EXPIRED);
  assert_int_equal(fate_of(&f, 3), MLFAB__FATE_GO);
  assert_int_equal(f.stats.plans_dropped, 3);
  end(&f);
}

/* Updates placed since an update was announced count into its delay, and so do those in plans on their way. */
static void test_ages_while_waiting(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 8, 1, schedule_of(3));
  for (uint32_t w = 0; w < 2; w++) say_push(&f, 0, w, 1, 200000000, 0);
  tick(&f);
  assert_int_equal(f.plans[0].plan.entries, 2);
  /* Announced before the server has that plan: two updates precede it that are not placed yet. */
  say_push(&f, 0, 2, 1, 1000000, 0);
  say_push(&f, 0, 3, 1, 1000000, 1);
  f.now_ns += 300 * MS;
  tick(&f);
  assert_int_equal(f.nplans, 2);
  assert_int_equal(fate_of(&f, 2), MLFAB__FATE_GO);
  assert_int_equal(fate_of(&f, 3), MLFAB__FATE_EXPIRED);
  assert_int_equal(f.plans[1].entries[0].delay, 2);
  end(&f);
}

/* With rounds the order is that of arrival, whatever the bound and the sizes. */
static void test_rounds(void **state) {
  fixture f = {0};
  mlfab__schedule schedule = schedule_of(1);
  (void)state;
  schedule.rounds = 1;
  fabric(&f, 9, 1, schedule);
  for (uint32_t w = 9; w-- > 0;) say_push(&f, 0, w, 1, 1000000 * (w + 1), 50);
  tick(&f);
  assert_int_equal(f.plans[0].plan.entries, 9);
  for (uint32_t k = 0; k < 9; k++) {
    assert_int_equal(f.plans[0].entries[k].worker, 8 - k);
    assert_int_equal(f.plans[0].entries[k].fate, MLFAB__FATE_GO);
  }
  assert_int_equal(f.stats.plans_dropped, 0);
  end(&f);
}

/* Of one worker's updates the older goes first, even if the newer would arrive earlier. */
static void test_numbers_of_a_worker(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 2, 1, schedule_of(MLFAB_UNBOUNDED));
  say_push(&f, 0, 0, 8, 1000, 0);
  say_push(&f, 0, 0, 7, 50000000, 0);
  tick(&f);
  tick(&f);
  assert_int_equal(f.nplans, 2);
  assert_int_equal(f.plans[0].plan.entries, 1);
  assert_int_equal(f.plans[0].entries[0].id, 7);
  assert_int_equal(f.plans[1].entries[0].id, 8);
  end(&f);
}

/* ---- aggregation ---- */

static void many(fixture *f, uint32_t from, uint32_t to, uint64_t bytes) {
  for (uint32_t w = from; w < to; w++) say_push(f, 0, w, 1, bytes, 0);
}

static uint32_t groups_of(const fixture *f, uint32_t plan) {
  const heard *h = &f->plans[plan];
  uint32_t groups = 0;
  for (uint32_t i = 0; i < h->plan.entries; i++) {
    const mlfab__plan_entry *e = &h->entries[i];
    int first = e->group && (i == 0 || h->entries[i - 1].group != e->group);
    groups += (uint32_t)first;
    if (e->group) {
      assert_int_not_equal(e->aggregator, MLFAB__NO_NODE);
      assert_true(e->rate == GIGA);
    } else {
      assert_int_equal(e->aggregator, MLFAB__NO_NODE);
    }
    if (!first) continue;
    /* Members of a group are adjacent, at least two, and have one aggregator. */
    assert_true(i + 1 < h->plan.entries && e[1].group == e->group);
    for (uint32_t k = i; k < h->plan.entries; k++) {
      if (h->entries[k].group == e->group) {
        assert_int_equal(h->entries[k].aggregator, e->aggregator);
        assert_true(k == i || h->entries[k - 1].group == e->group);
      }
    }
  }
  return groups;
}

/* An aggregator never has more sums at a time than it offers, whatever is planned meanwhile. */
static void test_accumulators(void **state) {
  fixture f = {0};
  uint32_t in_use[24] = {0}, groups = 0;
  mlfab__schedule schedule = schedule_of(MLFAB_UNBOUNDED);
  (void)state;
  schedule.interval_ns = 1;
  fabric(&f, 24, 1, schedule);
  for (uint32_t w = 0; w < 24; w++) {
    uint8_t meta[64];
    mlfab__station m = {w, 1, 1, w < 3 ? 1 : 0, 1 + w};
    frame(&f, 0, MLFAB__STATION, meta, mlfab__encode_station(meta, &m));
  }
  for (uint32_t round = 0; round < 4; round++) {
    for (uint32_t w = 6 * round; w < 6 * round + 6; w++) say_push(&f, 0, w, 1, 10000000, 0);
    tick(&f);
    f.now_ns += MS;
  }
  assert_int_equal(f.nplans, 4);
  for (uint32_t p = 0; p < 4; p++) {
    groups += groups_of(&f, p);
    for (uint32_t i = 0; i < f.plans[p].plan.entries; i++) {
      const mlfab__plan_entry *e = &f.plans[p].entries[i];
      if (e->group && (i == 0 || e[-1].group != e->group)) in_use[e->aggregator]++;
    }
  }
  assert_true(groups > 0 && groups <= 3);
  for (uint32_t w = 0; w < 24; w++) assert_true(in_use[w] <= (w < 3 ? 1 : 0));
  /* When they have ended there is room again. */
  for (uint32_t w = 0; w < 24; w++) say_report(&f, 0, 0, w, 1, 24, 0, 0);
  for (uint32_t w = 0; w < 12; w++) say_push(&f, 0, w, 2, 10000000, 0);
  tick(&f);
  assert_true(groups_of(&f, 4) > 0);
  end(&f);
}

/* Updates of different shapes are not aggregated, and none is when the schedule forbids it. */
static void test_not_grouped(void **state) {
  (void)state;
  for (int way = 0; way < 3; way++) {
    fixture f = {0};
    mlfab__schedule schedule = schedule_of(MLFAB_UNBOUNDED);
    schedule.no_aggregation = way == 1;
    fabric(&f, 16, 1, schedule);
    for (uint32_t w = 0; w < 16; w++) {
      mlfab__announce m = announce_of(MLFAB__TRANSFER_PUSH, w, 1, 10000000);
      m.shape = way == 2 ? w & 1 : 3;
      say_announce(&f, 0, &m);
    }
    tick(&f);
    assert_int_equal(f.plans[0].plan.entries, 16);
    if (way == 0) {
      assert_true(groups_of(&f, 0) > 0);
    } else {
      assert_int_equal(groups_of(&f, 0), 0);
    }
    end(&f);
  }
}

/* Workers on one host share its links: no worker on the server's host becomes an aggregator, and no host
 * has two aggregators. */
static void test_shared_hosts(void **state) {
  fixture f = {0};
  uint64_t hosts = 0;
  (void)state;
  fabric(&f, 32, 1, schedule_of(MLFAB_UNBOUNDED));
  for (uint32_t w = 0; w < 32; w++) say_station(&f, 0, w, 1, 1, w < 8 ? 1000 : 1 + w / 2);
  many(&f, 0, 32, 10000000);
  tick(&f);
  assert_true(groups_of(&f, 0) > 1);
  for (uint32_t i = 0; i < 32; i++) {
    const mlfab__plan_entry *e = &f.plans[0].entries[i];
    if (!e->group || (i > 0 && e[-1].group == e->group)) continue;
    assert_true(e->aggregator >= 8);
    assert_true((hosts >> e->aggregator / 2 & 1) == 0);
    hosts |= 1ull << e->aggregator / 2;
  }
  end(&f);
}

/* However many updates wait, no group is too large for a frame. */
static void test_large_batches(void **state) {
  fixture f = {0};
  mlfab__schedule schedule = schedule_of(MLFAB_UNBOUNDED);
  uint32_t planned = 0;
  (void)state;
  schedule.rounds = 1;
  fabric(&f, WORKERS, 1, schedule);
  many(&f, 0, WORKERS, 100000);
  for (uint32_t turn = 0; turn < 100 && planned < WORKERS; turn++) {
    tick(&f);
    f.now_ns += 10 * MS;
    planned = 0;
    for (uint32_t i = 0; i < f.nplans; i++) {
      assert_true(f.plans[i].plan.entries <= MLFAB__GROUP_MEMBERS_MAX);
      groups_of(&f, i);
      planned += f.plans[i].plan.entries;
    }
  }
  assert_int_equal(planned, WORKERS);
  end(&f);
}

/* ---- several servers ---- */

static void say_parts(fixture *f, uint32_t server, uint32_t worker, uint64_t id) {
  mlfab__announce m = announce_of(MLFAB__TRANSFER_PUSH, worker, id, 10000000);
  m.parts = f->config.servers;
  m.shape = server;
  say_announce(f, server, &m);
}

static void test_waits_for_parts(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 4, 2, schedule_of(MLFAB_UNBOUNDED));
  say_parts(&f, 1, 0, 1);
  tick(&f);
  assert_int_equal(f.nplans, 0);
  assert_true(f.s->due_ns == f.now_ns + 1500 * MS);
  say_parts(&f, 0, 0, 1);
  tick(&f);
  assert_int_equal(f.nplans, 2);
  assert_int_equal(f.plans[0].server, 0);
  assert_int_equal(f.plans[1].server, 1);
  /* The scheduler does not wait for a server whose link is lost ... */
  mlfab__scheduler_lost(f.s, 0, f.now_ns);
  say_parts(&f, 1, 1, 1);
  tick(&f);
  assert_int_equal(f.nplans, 3);
  assert_int_equal(f.plans[2].server, 1);
  /* ... and waits for a silent one only for a limited time. */
  mlfab__scheduler_hello(f.s, 0, f.now_ns);
  say_parts(&f, 1, 2, 1);
  tick(&f);
  assert_int_equal(f.nplans, 3);
  while (f.nplans == 3) {
    assert_true(mlfab__scheduler_deadline(f.s) > f.now_ns);
    f.now_ns = mlfab__scheduler_deadline(f.s);
    tick(&f);
  }
  assert_int_equal(f.now_ns, SECOND + 1500 * MS);
  assert_int_equal(f.nplans, 4);
  end(&f);
}

/* A server with a waiting update gets a plan without entries once a heartbeat; the others, and a server
 * with nothing left to plan, do not. */
static void test_reassures(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 4, 2, schedule_of(MLFAB_UNBOUNDED));
  f.now_ns += 10 * SECOND;
  tick(&f);
  assert_int_equal(f.reassured, 0);
  say_push(&f, 0, 0, 1, 1000000000, 0); /* takes a second */
  tick(&f);
  assert_int_equal(f.nplans, 1);
  say_push(&f, 0, 1, 1, 1000000, 0);
  f.reassured = 0;
  for (int beats = 1; beats <= 20; beats++) {
    /* The server reports that nothing has arrived yet: its in-link stays booked. */
    say_report(&f, 0, 0, MLFAB__NO_NODE, 0, 1, 1000000000, 0);
    f.now_ns += 500 * MS;
    tick(&f);
    assert_int_equal(f.reassured, beats);
    assert_true(mlfab__scheduler_deadline(f.s) <= f.now_ns + 500 * MS);
  }
  assert_int_equal(f.nplans, 1);
  end(&f);
}

/* One fate and one order at all servers, with the largest lag of all servers. */
static void test_same_everywhere(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 12, 3, schedule_of(8));
  for (uint32_t k = 0; k < 3; k++) {
    for (uint32_t w = 0; w < 12; w++) {
      mlfab__announce m = announce_of(MLFAB__TRANSFER_PUSH, w, 1, 1000000 * (1 + (w * 5 + k) % 7));
      m.parts = 3;
      m.lag = k == w % 3 ? w : 0;
      say_announce(&f, k, &m);
    }
  }
  tick(&f);
  assert_int_equal(f.nplans, 3);
  for (uint32_t i = 0; i < 12; i++) {
    const mlfab__plan_entry *e = &f.plans[0].entries[i];
    for (uint32_t k = 1; k < 3; k++) {
      const mlfab__plan_entry *o = &f.plans[k].entries[i];
      assert_int_equal(o->worker, e->worker);
      assert_int_equal(o->fate, e->fate);
      assert_int_equal(o->group, e->group);
      assert_int_equal(o->delay, e->delay);
    }
    if (e->worker >= 8) assert_int_not_equal(e->fate, MLFAB__FATE_GO);
  }
  end(&f);
}

/* ---- what goes wrong ---- */

/* A link without capacity: the update waits, is retried twice a second, and is planned when the link is
 * back. */
static void test_unreachable(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 4, 1, schedule_of(MLFAB_UNBOUNDED));
  say_capacity(&f, 1, GIGA, 0.0);
  say_push(&f, 0, 0, 1, 1000, 0);
  say_push(&f, 0, 1, 1, 1000, 0);
  tick(&f);
  assert_int_equal(f.nplans, 1);
  assert_int_equal(f.plans[0].plan.entries, 1);
  assert_int_equal(f.plans[0].entries[0].worker, 1);
  assert_true(mlfab__scheduler_deadline(f.s) == f.now_ns + 500 * MS);
  f.now_ns += 500 * MS;
  tick(&f);
  assert_int_equal(f.nplans, 1);
  assert_int_equal(f.stats.plans_made, 1);
  say_capacity(&f, 1, GIGA, GIGA);
  tick(&f);
  assert_int_equal(f.nplans, 2);
  assert_int_equal(f.plans[1].entries[0].worker, 0);
  /* A server without capacity gets no plans, and no rate of 0 is divided by. */
  say_capacity(&f, 1000, 0.0, 0.0);
  say_push(&f, 0, 2, 1, 1000, 0);
  f.now_ns += SECOND;
  tick(&f);
  assert_int_equal(f.nplans, 2);
  end(&f);
}

/* The link to the server breaks and comes back: everything is announced again, and placed updates count by
 * the reported backlog only. */
static void test_restart(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 8, 1, schedule_of(MLFAB_UNBOUNDED));
  for (uint32_t w = 0; w < 3; w++) say_push(&f, 0, w, 1, 100000000, 0);
  tick(&f);
  say_push(&f, 0, 5, 1, 1000, 0);
  tick(&f);
  assert_int_equal(f.nplans, 1);
  mlfab__scheduler_lost(f.s, 0, f.now_ns);
  f.now_ns += SECOND;
  tick(&f);
  assert_int_equal(f.nplans, 1);
  assert_true(mlfab__scheduler_deadline(f.s) == MLFAB__NEVER);
  mlfab__scheduler_hello(f.s, 0, f.now_ns);
  say_schedule(&f, 0, schedule_of(MLFAB_UNBOUNDED));
  for (uint32_t w = 0; w < 8; w++) say_station(&f, 0, w, 1, 1, 1 + w);
  say_report(&f, 0, 0, MLFAB__NO_NODE, 0, 3, 250000000, 0);
  say_push(&f, 0, 6, 1, 1000, 0);
  tick(&f);
  assert_int_equal(f.nplans, 1);
  uint64_t due = mlfab__scheduler_deadline(f.s);
  assert_true(due >= f.now_ns + 100 * MS && due <= f.now_ns + 100 * MS + 10);
  f.now_ns = due;
  tick(&f);
  assert_int_equal(f.nplans, 2);
  assert_int_equal(f.plans[1].plan.entries, 1);
  assert_int_equal(f.plans[1].entries[0].worker, 6);
  assert_true(f.s->stories[0].backlog > 0.149 && f.s->stories[0].backlog < 0.151);
  end(&f);
}

/* Strangers, past incarnations, dead workers and repeated announcements. */
static void test_who_may_announce(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 4, 1, schedule_of(MLFAB_UNBOUNDED));
  mlfab__announce m = announce_of(MLFAB__TRANSFER_PUSH, 0, 1, 1000);
  m.incarnation = 9;
  say_announce(&f, 0, &m);
  say_station(&f, 0, 1, 5, 1, 2);
  say_push(&f, 0, 1, 1, 1000, 0); /* incarnation 1: a past one */
  say_push(&f, 0, 2, 1, 1000, 0);
  say_push(&f, 0, 3, 1, 1000, 0);
  say_push(&f, 0, 3, 1, 1000, 0); /* twice */
  say_station(&f, 0, 2, 1, 0, 3);
  say_push(&f, 0, 2, 2, 1000, 0); /* dead */
  tick(&f);
  assert_int_equal(f.drops, 0);
  assert_int_equal(f.nplans, 1);
  assert_int_equal(f.plans[0].plan.entries, 1);
  assert_int_equal(f.plans[0].entries[0].worker, 3);
  /* Its worker rejoined, so the server has forgotten the placed update and announces it again. */
  say_push(&f, 0, 3, 1, 1000, 0);
  tick(&f);
  assert_int_equal(f.nplans, 2);
  assert_int_equal(f.plans[1].entries[0].worker, 3);
  /* A report about an unknown transfer changes nothing. */
  say_report(&f, 0, 0, 2, 77, 0, 0, 0);
  tick(&f);
  assert_int_equal(f.nplans, 2);
  m = announce_of(MLFAB__TRANSFER_PUSH, 9, 1, 1000);
  say_announce(&f, 0, &m);
  assert_int_equal(f.drops, 1);
  end(&f);
}

static void test_bad_frames(void **state) {
  fixture f = {0};
  uint8_t meta[256];
  mlfab__rng prng;
  (void)state;
  fabric(&f, 4, 2, schedule_of(MLFAB_UNBOUNDED));
  static const uint64_t patterns[] = {0x7ff8000000000000u, 0x7ff0000000000000u,
                                      0xfff0000000000000u};
  for (uint32_t i = 0; i < 3; i++) {
    double wrong;
    memcpy(&wrong, &patterns[i], sizeof wrong);
    say_capacity(&f, 1, wrong, GIGA);
    say_capacity(&f, 1, GIGA, wrong);
  }
  assert_int_equal(f.drops, 6);
  say_schedule(&f, 0, schedule_of(0));
  assert_int_equal(f.drops, 7);
  mlfab__announce m = announce_of(MLFAB__TRANSFER_PUSH, 0, 1, 1000);
  m.parts = 3;
  say_announce(&f, 0, &m);
  m.parts = 0;
  say_announce(&f, 0, &m);
  m.parts = 1;
  m.kind = 2;
  say_announce(&f, 0, &m);
  m.kind = 0;
  m.members = 0;
  say_announce(&f, 0, &m);
  assert_int_equal(f.drops, 11);
  frame(&f, 0, MLFAB__PLAN, meta, 0);
  assert_int_equal(f.drops, 12);
  mlfab__rng_seed(&prng, 3);
  for (uint32_t i = 0; i < 20000; i++) {
    static const uint8_t types[] = {MLFAB__SCHEDULE, MLFAB__STATION, MLFAB__CAPACITY,
                                    MLFAB__ANNOUNCE, MLFAB__REPORT};
    for (uint32_t k = 0; k < sizeof meta; k++)
      meta[k] = mlfab__rng_below(&prng, 3) ? 0 : (uint8_t)mlfab__rng_below(&prng, 4);
    frame(&f, (uint32_t)mlfab__rng_below(&prng, 3), types[mlfab__rng_below(&prng, 5)], meta,
          24 + 8 * (uint32_t)mlfab__rng_below(&prng, 8));
    f.now_ns += 1 + mlfab__rng_below(&prng, MS);
    tick(&f);
    forget_plans(&f);
  }
  end(&f);
}

/* When there are many hosts, those without nodes are forgotten; the others keep their capacities. */
static void test_many_hosts(void **state) {
  fixture f = {0};
  (void)state;
  fabric(&f, 4, 2, schedule_of(MLFAB_UNBOUNDED));
  say_capacity(&f, 3, 5e8, 6e8);
  for (uint64_t i = 0; i < 1000; i++) {
    say_capacity(&f, 100000 + i, 1.0, 1.0);
    assert_true(mlfab__scheduler_rate(f.s, f.s->stations[2].host, 0) == 5e8);
    assert_true(mlfab__scheduler_rate(f.s, f.s->stations[2].host, 1) == 6e8);
    assert_true(mlfab__scheduler_rate(f.s, f.s->stations[3].host, 0) == GIGA);
    assert_true(mlfab__scheduler_rate(f.s, f.s->served[1].host, 0) == GIGA);
  }
  assert_true(f.s->nhosts < f.s->hosts_room);
  end(&f);
}

/* ---- pulls ---- */

static void test_pulls(void **state) {
  (void)state;
  for (uint32_t off = 0; off < 2; off++) {
    fixture f = {0};
    uint32_t spread = 0;
    mlfab__schedule schedule = schedule_of(MLFAB_UNBOUNDED);
    schedule.no_distribution = off;
    fabric(&f, 16, 2, schedule);
    for (uint32_t w = 0; w < 16; w++) {
      mlfab__announce m = announce_of(MLFAB__TRANSFER_PULL, w, 4, 50000000);
      say_announce(&f, 1, &m);
    }
    tick(&f);
    assert_int_equal(f.nplans, 1);
    assert_int_equal(f.plans[0].server, 1);
    assert_int_equal(f.plans[0].plan.entries, 16);
    groups_of(&f, 0);
    for (uint32_t i = 0; i < 16; i++) {
      const mlfab__plan_entry *e = &f.plans[0].entries[i];
      assert_int_equal(e->kind, MLFAB__TRANSFER_PULL);
      assert_int_equal(e->fate, MLFAB__FATE_GO);
      spread += e->group != 0;
    }
    assert_true(off ? spread == 0 : spread > 4);
    /* The out-link is booked now; the in-link is not, nor is the other server. */
    mlfab__announce m = announce_of(MLFAB__TRANSFER_PULL, 0, 5, 50000000);
    say_announce(&f, 1, &m);
    tick(&f);
    assert_int_equal(f.nplans, 1);
    say_announce(&f, 0, &m);
    say_push(&f, 1, 3, 1, 1000000, 0);
    tick(&f);
    assert_int_equal(f.nplans, 3);
    for (uint32_t w = 0; w < 16; w++) say_report(&f, 1, 1, w, 4, 0, 0, 0);
    tick(&f);
    assert_int_equal(f.nplans, 4);
    assert_int_equal(f.plans[3].server, 1);
    assert_int_equal(f.plans[3].entries[0].id, 5);
    end(&f);
  }
}

/* ---- a small model of servers, aggregators and links that carries plans out ---- */

enum { MINI_WORKERS = 12, MINI_HOSTS = MINI_WORKERS + SERVERS, MINI_FLOWS = 4096 };

/* A transfer over one hop. Flows planned earlier have priority. */
typedef struct flow {
  uint32_t from, to; /* hosts */
  double left;
  uint32_t waits; /* number of flows that feed it */
  uint32_t feeds; /* the flow that it feeds, plus one */
  uint32_t after; /* the flow that feeds it, plus one */
  double inflow;  /* cutting through: the rate of its input while nothing is in stock */
  double begins;  /* earliest start, as planned */
  double done;    /* time of its end, or -1 */
  uint64_t key;   /* its place: plan, entry, server */
} flow;

typedef struct placed {
  uint32_t worker, flow; /* flow: into the server; of a pull: into its worker */
  uint32_t link;         /* flow over the server's own link */
  uint64_t id;
  int dropped, leads; /* leads: its group's bytes are counted here */
} placed;

typedef struct mini_server {
  placed queue[256], pulls[64];
  uint32_t n, npulls;
  uint64_t version, counted; /* commits; members ever placed */
} mini_server;

typedef struct mini_worker {
  uint64_t id, base[SERVERS];
  double begins;          /* when it has computed the next update, seconds */
  uint32_t waiting, left; /* bit masks of servers: part not placed; part not ended */
  uint32_t pulling, pulls_left;
  int dropped;
  double predicted, pull_predicted[SERVERS];
} mini_worker;

/* A plan on its way. */
enum { MINI_MAIL = 32 };
typedef struct mail {
  double at;
  uint32_t server;
  mlfab__plan plan;
  mlfab__plan_entry entries[MINI_WORKERS];
} mail;

typedef struct mini {
  fixture f;
  mail mail[MINI_MAIL];
  uint32_t nmail;
  mlfab__rng prng;
  uint32_t workers, servers;
  uint64_t bytes[SERVERS], bound;
  int cut;   /* aggregators pass on what comes as it comes */
  int timed; /* but not before the planned time */
  double in[MINI_HOSTS], out[MINI_HOSTS], now;
  uint32_t host[MINI_WORKERS];
  flow flows[MINI_FLOWS];
  uint32_t nflows, order[MINI_FLOWS]; /* order: by key */
  mini_server server[SERVERS];
  mini_worker worker[MINI_WORKERS];
  uint32_t applied, dropped, grouped, pulled, spread;
  /* late_ns: delay of plans; starved: time in which an update waited and nothing arrived */
  double late_ns, starved;
  uint64_t last_order[SERVERS]; /* hash of the order of places */
  double worst;
  int averaged; /* the scheduler had no room for all stretches of a transfer */
} mini;

/* Keeps `order` sorted by key; a new flow mostly goes to the end. */
static uint32_t mini_flow(mini *m, uint32_t from, uint32_t to, double bytes, uint64_t key) {
  uint32_t at = m->nflows;
  assert_true(m->nflows < MINI_FLOWS);
  m->flows[m->nflows] = (flow){.from = from, .to = to, .left = bytes, .done = -1.0, .key = key};
  for (; at > 0 && m->flows[m->order[at - 1]].key > key; at--) m->order[at] = m->order[at - 1];
  m->order[at] = m->nflows;
  return m->nflows++;
}

static uint64_t mini_key(const mlfab__plan *plan, uint32_t place, uint32_t server) {
  return plan->serial << 24 | place << 4 | server;
}

static uint64_t mini_left(const mini *m, const placed *queue, uint32_t n) {
  double left = 0.0;
  for (uint32_t i = 0; i < n; i++) {
    /* The first member of a group that is still queued counts its bytes. */
    int first = i == 0 || queue[i - 1].dropped || queue[i - 1].link != queue[i].link;
    if (!queue[i].dropped && first && m->flows[queue[i].link].done < 0.0)
      left += m->flows[queue[i].link].left;
  }
  return (uint64_t)(left + 0.5);
}

static void mini_report(mini *m, uint32_t k, uint32_t kind, const placed *p) {
  const mini_server *v = &m->server[k];
  say_report(&m->f, k, kind, p->worker, p->id, v->counted, mini_left(m, v->queue, v->n),
             mini_left(m, v->pulls, v->npulls));
}

/* The planned start of the second hop of this entry. */
static double mini_planned(const mini *m, uint32_t k, const mlfab__plan_entry *e) {
  const mlfab__scheduler *s = m->f.s;
  uint32_t i = s->stations[e->worker].first;
  if (!m->timed) return 0.0;
  while (s->items[i].kind != e->kind || s->items[i].id != e->id ||
         mlfab__scheduler_part(s, i, k)->state != MLFAB__ITEM_PLACED)
    i = s->items[i].sibling;
  const mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
  const mlfab__leg *leg = e->kind == MLFAB__TRANSFER_PULL ? &part->own : &part->sum;
  return leg->n > 0 ? 1e-9 * (double)leg->since_ns + leg->stretches[0].from : 0.0;
}

/* Adds the flows of a group's members and, after them, of their sum. Returns the sum. */
static uint32_t mini_group(mini *m, uint32_t k, const mlfab__plan *plan,
                           const mlfab__plan_entry *entries, uint32_t i) {
  uint32_t hop = m->host[entries[i].aggregator], n = 0;
  while (i + n < plan->entries && entries[i + n].group == entries[i].group) n++;
  uint32_t sum = m->nflows + n;
  for (uint32_t q = 0; q < n; q++) {
    uint32_t own = mini_flow(m, m->host[entries[i + q].worker], hop, (double)m->bytes[k],
                             mini_key(plan, 2 * (i + q), k));
    m->flows[own].feeds = sum + 1;
  }
  uint64_t key = mini_key(plan, 2 * (i + n) - 1, k);
  assert_int_equal(mini_flow(m, hop, MINI_WORKERS + k, (double)m->bytes[k], key), sum);
  m->flows[sum].waits = n;
  m->flows[sum].begins = mini_planned(m, k, &entries[i]);
  return sum;
}

/* Places an update: the server checks the bound itself, and the plan's delay is right. */
static void mini_push(mini *m, uint32_t k, const mlfab__plan *plan,
                      const mlfab__plan_entry *entries, uint32_t i) {
  mini_server *server = &m->server[k];
  const mlfab__plan_entry *e = &entries[i];
  mini_worker *w = &m->worker[e->worker];
  uint64_t delay = server->counted - w->base[k];
  assert_int_equal(e->id, w->id);
  assert_true(w->waiting >> k & 1);
  w->waiting &= ~(1u << k);
  m->last_order[k] = mlfab__mix(m->last_order[k] * 31 + e->worker * 2 + (e->fate != 0));
  assert_true(server->n < 255);
  placed *p = &server->queue[server->n++];
  *p = (placed){.worker = e->worker, .id = e->id, .dropped = e->fate != MLFAB__FATE_GO};
  if (p->dropped) {
    w->dropped = 1;
    return;
  }
  assert_true(e->delay < m->bound);
  assert_true(delay <= e->delay);
  if (m->servers == 1) assert_int_equal(e->delay, delay);
  server->counted++;
  p->leads = !e->group || i == 0 || entries[i - 1].group != e->group;
  m->grouped += e->group != 0;
  if (!e->group) {
    p->flow = mini_flow(m, m->host[e->worker], MINI_WORKERS + k, (double)m->bytes[k],
                        mini_key(plan, 2 * i, k));
  } else {
    p->flow = p->leads ? mini_group(m, k, plan, entries, i) : p[-1].flow;
  }
  p->link = p->flow;
}

/* A pull: a distributor passes the model on when it has all of it, after everything that the server sends. */
static void mini_pull(mini *m, uint32_t k, const mlfab__plan *plan,
                      const mlfab__plan_entry *entries, uint32_t i) {
  mini_server *server = &m->server[k];
  const mlfab__plan_entry *e = &entries[i];
  assert_int_equal(e->id, m->worker[e->worker].id);
  assert_true(m->worker[e->worker].pulling >> k & 1);
  m->worker[e->worker].pulling &= ~(1u << k);
  assert_true(server->npulls < 64);
  placed *p = &server->pulls[server->npulls++];
  *p = (placed){.worker = e->worker, .id = e->id};
  p->leads = !e->group || i == 0 || entries[i - 1].group != e->group;
  uint32_t to = m->host[e->group ? e->aggregator : e->worker];
  p->link = p->leads ? mini_flow(m, MINI_WORKERS + k, to, (double)m->bytes[k], mini_key(plan, i, k))
                     : p[-1].link;
  p->flow = p->link;
  if (!e->group) return;
  m->spread++;
  p->flow = mini_flow(m, to, m->host[e->worker], (double)m->bytes[k], mini_key(plan, 4096 + i, k));
  flow *f = &m->flows[p->link];
  m->flows[p->flow].after = p->link + 1;
  m->flows[p->flow].waits = f->done < 0.0;
  m->flows[p->flow].begins = mini_planned(m, k, e);
}

/* Records the predictions of the plan that was just made. */
static void mini_foretold(mini *m, uint32_t kind, uint32_t k) {
  const mlfab__story *story = &m->f.s->stories[kind];
  for (uint32_t i = 0; i < story->n; i++) {
    const mlfab__told *told = &story->told[i];
    double commit = 1e-9 * (double)story->now_ns + told->commit;
    if (told->dropped) continue;
    if (kind == MLFAB__TRANSFER_PUSH) m->worker[told->worker].predicted = commit;
    if (kind == MLFAB__TRANSFER_PULL) m->worker[told->worker].pull_predicted[k] = commit;
  }
}

static void mini_take(mini *m, uint32_t k, const mlfab__plan *plan,
                      const mlfab__plan_entry *entries) {
  for (uint32_t i = 0; i < plan->entries; i++) {
    if (entries[i].kind == MLFAB__TRANSFER_PUSH) mini_push(m, k, plan, entries, i);
    if (entries[i].kind == MLFAB__TRANSFER_PULL) mini_pull(m, k, plan, entries, i);
  }
}

static void mini_plan(void *world, uint32_t k, const mlfab__plan *plan,
                      const mlfab__plan_entry *entries) {
  mini *m = world;
  mini_foretold(m, entries[0].kind, k);
  if (m->late_ns <= 0.0) {
    mini_take(m, k, plan, entries);
    return;
  }
  assert_true(m->nmail < MINI_MAIL);
  mail *letter = &m->mail[m->nmail++];
  *letter = (mail){.at = m->now + 1e-9 * m->late_ns, .server = k, .plan = *plan};
  memcpy(letter->entries, entries, plan->entries * sizeof *entries);
}

/* What has arrived by now. */
static void mini_deliver(mini *m) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < m->nmail; i++) {
    if (m->mail[i].at <= m->now) {
      mini_take(m, m->mail[i].server, &m->mail[i].plan, m->mail[i].entries);
    } else {
      m->mail[kept++] = m->mail[i];
    }
  }
  m->nmail = kept;
}

static void mini_finish_flow(mini *m, flow *f) {
  f->left = 0.0;
  f->done = m->now;
  if (f->feeds) m->flows[f->feeds - 1].waits--;
  for (uint32_t i = 0; i < m->nflows; i++)
    if (m->flows[i].after && &m->flows[m->flows[i].after - 1] == f) m->flows[i].waits = 0;
}

/* May this flow run? A flow that passes on another one's bytes runs when these have arrived. Cutting
 * through, a sum also runs when all before it have arrived at its server, and a model as soon as some of it
 * has arrived. */
static int mini_may_go(const mini *m, uint32_t i) {
  const flow *f = &m->flows[i];
  if (f->done >= 0.0 || (f->waits > 0 && (!m->cut || f->from == f->to))) return 0;
  if (m->timed) return f->begins <= m->now;
  if (f->waits == 0 || f->after) return 1;
  return m->server[f->to - MINI_WORKERS].queue[0].flow == i;
}

/* No byte is passed on before it arrives: `onward` passes on the bytes of flow i, which arrive at this
 * rate. */
static void mini_feed(mini *m, uint32_t i, uint32_t onward, double rate) {
  flow *g = &m->flows[onward];
  if (m->flows[i].done < 0.0 && g->left - m->flows[i].left < 1e-3 && rate < g->inflow)
    g->inflow = rate;
}

/* Time until the stock between the two flows is used up. */
static double mini_stock(const mini *m, uint32_t i, uint32_t onward, const double *rates) {
  double stock = m->flows[onward].left - m->flows[i].left, falls = rates[onward] - rates[i];
  return m->flows[i].done < 0.0 && falls > 0.0 && stock >= 1e-3 ? stock / falls : 1e30;
}

/* Strict priority: each flow takes what those before it have left. A flow precedes the one that passes its
 * bytes on. Returns the time until rates change. */
static double mini_rates(mini *m, double *rates) {
  double in[MINI_HOSTS], out[MINI_HOSTS], next = 1e30;
  memcpy(in, m->in, sizeof in);
  memcpy(out, m->out, sizeof out);
  for (uint32_t i = 0; i < m->nflows; i++) m->flows[i].inflow = 1e30;
  for (uint32_t n = 0; n < m->nflows; n++) {
    uint32_t i = m->order[n];
    const flow *f = &m->flows[i];
    rates[i] = 0.0;
    if (m->cut && f->after) mini_feed(m, f->after - 1, i, rates[f->after - 1]);
    if (mini_may_go(m, i)) {
      if (f->from == f->to) return 0.0;
      double rate = out[f->from] < in[f->to] ? out[f->from] : in[f->to];
      if (rate > f->inflow) rate = f->inflow;
      out[f->from] -= rate;
      in[f->to] -= rate;
      rates[i] = rate;
      if (rate > 0.0 && f->left / rate < next) next = f->left / rate;
    } else if (f->done < 0.0 && f->begins > m->now && f->begins - m->now < next) {
      next = f->begins - m->now;
    }
    if (m->cut && f->feeds) mini_feed(m, i, f->feeds - 1, rates[i]);
  }
  for (uint32_t i = 0; m->cut && i < m->nflows; i++) {
    const flow *f = &m->flows[i];
    double first = f->feeds ? mini_stock(m, i, f->feeds - 1, rates) : 1e30;
    double second = f->after ? mini_stock(m, f->after - 1, i, rates) : 1e30;
    if (first < next) next = first;
    if (second < next) next = second;
  }
  return next;
}

static void mini_compare(mini *m, double predicted) {
  double off = m->now > predicted ? m->now - predicted : predicted - m->now;
  if (off > m->worst) m->worst = off;
}

/* An update is decided: its worker pulls when it is decided at all servers. */
static void mini_over(mini *m, uint32_t k, const placed *p) {
  mini_worker *w = &m->worker[p->worker];
  if (!p->dropped) m->server[k].version++;
  assert_true(w->left >> k & 1);
  w->left &= ~(1u << k);
  mini_report(m, k, MLFAB__TRANSFER_PUSH, p);
  if (w->left) return;
  if (!w->dropped) {
    m->applied++;
    mini_compare(m, w->predicted);
  } else {
    m->dropped++;
  }
  w->pulling = w->pulls_left = (1u << m->servers) - 1;
  for (uint32_t i = 0; i < m->servers; i++) {
    mlfab__announce a = announce_of(MLFAB__TRANSFER_PULL, p->worker, w->id, m->bytes[i]);
    say_announce(&m->f, i, &a);
  }
}

static void mini_pulled(mini *m, uint32_t k, const placed *p) {
  mini_worker *w = &m->worker[p->worker];
  mini_report(m, k, MLFAB__TRANSFER_PULL, p);
  mini_compare(m, w->pull_predicted[k]);
  m->pulled++;
  w->pulls_left &= ~(1u << k);
  if (w->pulls_left) return;
  w->id++;
  w->dropped = 0;
  w->begins = m->now + 0.001 + 0.12 * mlfab__rng_unit(&m->prng);
}

/* Commits the updates that have arrived, in order of place; ends the pulls that have arrived. */
static void mini_commit(mini *m) {
  for (uint32_t k = 0; k < m->servers; k++) {
    mini_server *server = &m->server[k];
    while (server->n > 0) {
      placed p = server->queue[0];
      if (!p.dropped && m->flows[p.flow].done < 0.0) break;
      memmove(server->queue, server->queue + 1, --server->n * sizeof *server->queue);
      mini_over(m, k, &p);
    }
    for (uint32_t i = 0; i < server->npulls;) {
      placed p = server->pulls[i];
      if (m->flows[p.flow].done < 0.0) {
        i++;
        continue;
      }
      memmove(&server->pulls[i], &server->pulls[i + 1],
              (--server->npulls - i) * sizeof *server->pulls);
      mini_pulled(m, k, &p);
    }
  }
}

static void mini_announce(mini *m, uint32_t worker) {
  mini_worker *w = &m->worker[worker];
  for (uint32_t k = 0; k < m->servers; k++) {
    mlfab__announce a = announce_of(MLFAB__TRANSFER_PUSH, worker, w->id, m->bytes[k]);
    /* The worker has computed from an earlier model. */
    uint64_t behind = mlfab__rng_below(&m->prng, 6);
    w->base[k] = m->server[k].version - mlfab__min(behind, m->server[k].version);
    a.lag = m->server[k].counted - w->base[k];
    a.placed = m->server[k].counted;
    a.parts = m->servers;
    say_announce(&m->f, k, &a);
  }
  w->waiting = w->left = (1u << m->servers) - 1;
  w->begins = 1e30;
}

static void mini_averaged(mini *m) {
  const mlfab__scheduler *s = m->f.s;
  for (uint32_t i = s->placed.first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    for (uint32_t k = 0; k < m->servers; k++) {
      const mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
      if (part->own.n == MLFAB__HOP_STRETCHES || part->sum.n == MLFAB__HOP_STRETCHES)
        m->averaged = 1;
    }
  }
}

static void mini_tick(mini *m) {
  uint64_t made = m->f.stats.plans_made;
  tick(&m->f);
  if (m->f.stats.plans_made > made) mini_averaged(m);
  assert_true(m->f.stats.plans_made <= made + 1 + m->servers);
  for (uint32_t k = 1; k < m->servers && m->nmail == 0; k++)
    assert_true(m->last_order[k] == m->last_order[0]);
}

static void mini_step(mini *m, double rates[MINI_FLOWS]) {
  double next = m->now + mini_rates(m, rates);
  uint64_t deadline = mlfab__scheduler_deadline(m->f.s);
  double timer = deadline == MLFAB__NEVER ? 1e30 : 1e-9 * (double)deadline;
  if (timer < next) next = timer;
  for (uint32_t w = 0; w < m->workers; w++)
    if (m->worker[w].begins < next) next = m->worker[w].begins;
  for (uint32_t i = 0; i < m->nmail; i++)
    if (m->mail[i].at < next) next = m->mail[i].at;
  if (next < m->now) next = m->now;
  uint32_t queued = 0, waiting = 0;
  for (uint32_t k = 0; k < m->servers; k++) queued += m->server[k].n;
  for (uint32_t w = 0; w < m->workers; w++) waiting += m->worker[w].waiting != 0;
  if (queued == 0 && waiting > 0) m->starved += next - m->now;
  for (uint32_t i = 0; i < m->nflows; i++) {
    flow *f = &m->flows[i];
    if (f->done >= 0.0) continue;
    f->left -= rates[i] * (next - m->now);
  }
  m->now = next;
  for (uint32_t i = 0; i < m->nflows; i++) {
    flow *f = &m->flows[i];
    if (f->done < 0.0 && !f->waits && (f->from == f->to || f->left < 1e-3)) mini_finish_flow(m, f);
  }
  uint64_t ns = (uint64_t)(m->now * 1e9 + 0.5);
  m->f.now_ns = ns > m->f.now_ns ? ns : m->f.now_ns;
  if (deadline != MLFAB__NEVER && timer <= m->now && m->f.now_ns < deadline) m->f.now_ns = deadline;
  mini_deliver(m);
  mini_commit(m);
  for (uint32_t w = 0; w < m->workers; w++)
    if (m->worker[w].begins <= m->now) mini_announce(m, w);
  mini_tick(m);
}

/* Drops flows that have ended and are no longer referenced, and renumbers the rest. */
static void mini_compact(mini *m) {
  static uint32_t moved[MINI_FLOWS];
  static uint8_t needed[MINI_FLOWS];
  uint32_t kept = 0;
  memset(needed, 0, sizeof needed);
  for (uint32_t i = 0; i < m->nflows; i++) needed[i] = m->flows[i].done < 0.0;
  for (uint32_t k = 0; k < m->servers; k++) {
    for (uint32_t i = 0; i < m->server[k].n; i++)
      if (!m->server[k].queue[i].dropped) needed[m->server[k].queue[i].flow] = 1;
    for (uint32_t i = 0; i < m->server[k].npulls; i++)
      needed[m->server[k].pulls[i].flow] = needed[m->server[k].pulls[i].link] = 1;
  }
  for (uint32_t i = 0; i < m->nflows; i++) {
    moved[i] = kept;
    if (needed[i]) m->flows[kept++] = m->flows[i];
  }
  for (uint32_t i = 0; i < kept; i++) {
    if (m->flows[i].feeds) m->flows[i].feeds = moved[m->flows[i].feeds - 1] + 1;
    if (m->flows[i].after)
      m->flows[i].after = m->flows[i].waits ? moved[m->flows[i].after - 1] + 1 : 0;
  }
  for (uint32_t k = 0; k < m->servers; k++) {
    mini_server *v = &m->server[k];
    for (uint32_t i = 0; i < v->n; i++)
      v->queue[i].flow = v->queue[i].link = moved[v->queue[i].flow];
    for (uint32_t i = 0; i < v->npulls; i++) {
      v->pulls[i].flow = moved[v->pulls[i].flow];
      v->pulls[i].link = moved[v->pulls[i].link];
    }
  }
  uint32_t ordered = 0;
  for (uint32_t n = 0; n < m->nflows; n++)
    if (needed[m->order[n]]) m->order[ordered++] = moved[m->order[n]];
  m->nflows = kept;
}

static void mini_begin(mini *m, uint32_t servers, uint64_t seed, uint64_t bound, int cut,
                       int timed) {
  memset(m, 0, sizeof *m);
  m->workers = MINI_WORKERS;
  m->servers = servers;
  m->bound = bound;
  m->cut = cut;
  m->timed = timed;
  mlfab__rng_seed(&m->prng, seed);
  mlfab__schedule schedule = schedule_of(bound);
  schedule.whole = !cut;
  fabric(&m->f, m->workers, servers, schedule);
  m->f.on_plan = mini_plan;
  m->f.world = m;
  m->now = 1.0;
  /* All hosts alike, or all slightly different, so that no two transfers end at the same time: with
   * cut-through and several workers on a host all would, and a byte of rounding would decide which ends
   * first. */
  double varies = seed % 3 == 2 ? 0.2 : seed % 3 == 1 && cut ? 0.001 : 0.0;
  for (uint32_t h = 0; h < MINI_HOSTS; h++) {
    m->in[h] = GIGA * (1.0 + varies * (mlfab__rng_unit(&m->prng) - 0.5));
    m->out[h] = GIGA * (1.0 + varies * (mlfab__rng_unit(&m->prng) - 0.5));
  }
  /* No round numbers: if a transfer ended exactly where a pause begins, a byte of rounding would decide. */
  for (uint32_t k = 0; k < servers; k++)
    m->bytes[k] = 20000000 + 10000000 * k + mlfab__rng_below(&m->prng, 1000000);
  for (uint32_t w = 0; w < m->workers; w++) {
    /* Some workers share a host, some have slow links. */
    m->host[w] = seed % 3 == 1 ? w / 2 : w;
    if (seed % 3 == 2 && w % 4 == 0) m->out[w] /= 4, m->in[w] /= 4;
    m->worker[w].id = 1;
    m->worker[w].begins = 1.0 + 0.1 * mlfab__rng_unit(&m->prng);
  }
  for (uint32_t k = 0; k < servers; k++)
    say_capacity(&m->f, 1000 + k, m->in[MINI_WORKERS + k], m->out[MINI_WORKERS + k]);
  for (uint32_t w = 0; w < m->workers; w++) {
    for (uint32_t k = 0; k < servers; k++) say_station(&m->f, k, w, 1, 1, 1 + m->host[w]);
    say_capacity(&m->f, 1 + w, m->in[w], m->out[w]);
  }
}

static void mini_run(mini *m, uint32_t steps) {
  static double rates[MINI_FLOWS];
  for (uint32_t step = 0; step < steps; step++) {
    mini_step(m, rates);
    if (m->nflows > MINI_FLOWS / 2) mini_compact(m);
  }
}

/* Random worlds that carry plans out exactly: the order is the same at all servers, each update is placed
 * once, the bound holds though plans overlap, and each prediction made at placement is right to 2 us. Where
 * the scheduler has no room for all stretches of a transfer and continues with averages, a prediction is
 * wrong by one transfer at most. */
static void as_foretold(mini *m, uint64_t seed, int cut, uint32_t *exact_p) {
  mini_begin(m, 1 + (uint32_t)(seed / 3 % SERVERS), seed, seed % 2 ? 12 : MLFAB_UNBOUNDED, cut,
             cut);
  mini_run(m, 3000);
  assert_true(m->applied > 100);
  assert_true(m->pulled > 100);
  if (m->bound == MLFAB_UNBOUNDED) assert_int_equal(m->dropped, 0);
  if (m->worst > (m->averaged ? 0.05 : 2e-6)) {
    print_message("seed %llu: applied %u, dropped %u, grouped %u, spread %u, off by %g s\n",
                  (unsigned long long)seed, m->applied, m->dropped, m->grouped, m->spread,
                  m->worst);
  }
  assert_true(m->worst <= (m->averaged ? 0.05 : 2e-6));
  assert_true(m->starved <= 1e-6);
  *exact_p += m->worst <= 2e-6;
  end(&m->f);
}

static void test_as_foretold(void **state) {
  static mini m;
  (void)state;
  for (int cut = 0; cut < 2; cut++) {
    uint32_t grouped = 0, dropped = 0, spread = 0, exact = 0;
    for (uint64_t seed = 0; seed < 60; seed++) {
      as_foretold(&m, seed, cut, &exact);
      grouped += m.grouped;
      dropped += m.dropped;
      spread += m.spread;
    }
    print_message("%s: %u of 60 worlds are as foretold\n", cut ? "cutting through" : "in wholes",
                  exact);
    assert_true(exact >= 55);
    assert_true(grouped > 1000);
    assert_true(dropped > 100);
    assert_true(spread > 1000);
  }
}

/* The same where links carry more or less than announced and plans arrive late: predictions are wrong, but
 * orders and bounds hold, and a server is hardly ever idle while an update waits for its plan. */
static void test_otherwise(void **state) {
  static mini m;
  (void)state;
  for (uint64_t seed = 0; seed < 60; seed++) {
    mini_begin(&m, 1 + (uint32_t)(seed / 3 % SERVERS), seed, seed % 2 ? 12 : MLFAB_UNBOUNDED,
               seed % 5 != 0, 0);
    if (seed % 4 != 1) m.late_ns = (double)(5 * MS);
    for (uint32_t h = 0; h < MINI_HOSTS && seed % 4 != 0; h++) {
      m.in[h] *= 0.5 + mlfab__rng_unit(&m.prng);
      m.out[h] *= 0.5 + mlfab__rng_unit(&m.prng);
    }
    mini_run(&m, 3000);
    assert_true(m.applied > 100);
    assert_true(m.pulled > 100);
    if (m.bound == MLFAB_UNBOUNDED) assert_int_equal(m.dropped, 0);
    if (m.starved > 0.1 * (m.now - 1.0))
      print_message("seed %llu: starved %g of %g s\n", (unsigned long long)seed, m.starved,
                    m.now - 1.0);
    assert_true(m.starved <= 0.1 * (m.now - 1.0));
    end(&m.f);
  }
}

/* Plans 24 transfers of a kind (2: both kinds in turn), then one more update a moment later: then
 * everything placed is reserved again and stays at its time. `out`: bytes a second of a worker's host, less
 * than the server's in-rate, so sums leave gaps that the transfers behind them cannot use. Returns how many
 * second hops start before the first one has ended. */
static uint32_t reserve_again(uint32_t kind, uint32_t whole, double out) {
  fixture f = {0};
  mlfab__schedule schedule = schedule_of(MLFAB_UNBOUNDED);
  mlfab__leg before[24][2];
  uint32_t grouped = 0, cut = 0;
  schedule.whole = whole;
  schedule.interval_ns = 1;
  fabric(&f, 26, 1, schedule);
  for (uint32_t w = 0; w < 26; w++) say_capacity(&f, 1 + w, GIGA, out);
  for (uint32_t w = 0; w < 24; w++) {
    mlfab__announce m = announce_of(kind == 2 ? w % 2 : kind, w, 1, 30000000);
    say_announce(&f, 0, &m);
  }
  tick(&f);
  for (uint32_t w = 0; w < 24; w++) {
    const mlfab__item *item = &f.s->items[f.s->stations[w].first];
    const mlfab__item_part *part = mlfab__scheduler_part(f.s, f.s->stations[w].first, 0);
    const mlfab__leg *first = item->kind ? &part->sum : &part->own;
    const mlfab__leg *second = item->kind ? &part->own : &part->sum;
    before[w][0] = part->own;
    before[w][1] = part->sum;
    grouped += item->group != 0;
    if (item->group && first->n > 0 && second->n > 0)
      cut += second->stretches[0].from < first->stretches[first->n - 1].to - 1e-6;
  }
  assert_true(grouped > 8);
  f.now_ns++;
  say_push(&f, 0, 24, 1, 1000, 0);
  tick(&f);
  for (uint32_t w = 0; w < 24; w++) {
    const mlfab__item_part *part = mlfab__scheduler_part(f.s, f.s->stations[w].first, 0);
    int group = f.s->items[f.s->stations[w].first].group != 0;
    for (int hop = 0; hop <= group; hop++) {
      const mlfab__leg *was = &before[w][hop], *is = hop ? &part->sum : &part->own;
      if (was->n == 0) continue;
      double off = was->stretches[was->n - 1].to - is->stretches[is->n - 1].to;
      assert_true(off < 1e-8 && off > -1e-8);
      off = was->stretches[0].from - is->stretches[0].from;
      assert_true(off < 1e-8 && off > -1e-8);
    }
  }
  end(&f);
  return cut;
}

static void test_reserved_again(void **state) {
  (void)state;
  for (uint32_t kind = 0; kind < 3; kind++) {
    assert_int_equal(reserve_again(kind, 1, GIGA), 0);
    assert_true(reserve_again(kind, 0, GIGA) > 0 || kind == 2);
  }
  for (uint32_t tenths = 2; tenths < 10; tenths++) {
    reserve_again(0, 0, 0.1 * tenths * GIGA);
  }
}

/* ---- memory ---- */

/* A session that covers every function; returns early when creating the scheduler failed. */
static void session(fixture *f) {
  mlfab__schedule schedule = schedule_of(20);
  if (begin(f, 12, 2)) {
    assert_null(f->s);
    return;
  }
  f->now_ns = SECOND;
  for (uint32_t k = 0; k < 2; k++) {
    mlfab__scheduler_hello(f->s, k, f->now_ns);
    say_schedule(f, k, schedule);
    for (uint32_t w = 0; w < 12; w++) say_station(f, k, w, 1, 1, 1 + w);
  }
  for (uint32_t w = 0; w < 12; w++) say_capacity(f, 1 + w, GIGA, GIGA);
  for (uint32_t turn = 1; turn < 4; turn++) {
    for (uint32_t w = 0; w < 12; w++) {
      for (uint32_t k = 0; k < 2; k++) say_parts(f, k, w, turn);
      mlfab__announce m = announce_of(MLFAB__TRANSFER_PULL, w, turn, 10000000);
      say_announce(f, 1, &m);
    }
    /* Long enough for parts that were forgotten for lack of memory. */
    for (uint32_t i = 0; i < 16; i++) {
      tick(f);
      f->now_ns += 200 * MS;
    }
    for (uint32_t w = 0; w < 12; w++) {
      for (uint32_t k = 0; k < 2; k++) say_report(f, k, 0, w, turn, 12 * turn, 0, 0);
      say_report(f, 1, 1, w, turn, 12 * turn, 0, 0);
    }
  }
  f->now_ns += 2 * SECOND;
  tick(f);
}

/* Whichever allocation fails: every announced update is told to each server exactly once. */
static void test_memory(void **state) {
  uint64_t calls = 1;
  (void)state;
  for (uint64_t fail_at = 0; fail_at <= calls; fail_at++) {
    fixture f = {0};
    uint32_t told[2] = {0, 0};
    f.fail_at = fail_at;
    session(&f);
    if (fail_at == 0) calls = f.calls;
    for (uint32_t i = 0; i < f.nplans; i++) told[f.plans[i].server] += f.plans[i].plan.entries;
    if (f.s) {
      assert_int_equal(told[0], 36);
      assert_int_equal(told[1], 72);
    }
    assert_int_equal(f.drops, 0);
    end(&f);
  }
  assert_true(calls > 30);
}

/* ---- text for users ---- */

static void test_explain(void **state) {
  fixture f = {0};
  char text[16384], small[40];
  size_t bytes, again;
  mlfab__schedule schedule = schedule_of(12);
  (void)state;
  schedule.whole = 1;
  fabric(&f, 9, 1, schedule);
  mlfab__scheduler_explain(f.s, text, sizeof text, &bytes);
  assert_non_null(strstr(text, "nothing was planned yet"));
  for (uint32_t w = 0; w < 8; w++) say_push(&f, 0, w, 3, 50000000, w == 5 ? 40 : 1);
  tick(&f);
  mlfab__scheduler_explain(f.s, text, sizeof text, &bytes);
  assert_int_equal(bytes, strlen(text) + 1);
  assert_non_null(strstr(text, "push 3 of worker 5, 50000000 bytes, dropped: too late"));
  assert_non_null(strstr(text, ", group "));
  assert_non_null(strstr(text, "server 0: in 1000000000 bytes/s"));
  mlfab__scheduler_explain(f.s, small, sizeof small, &again);
  assert_int_equal(again, bytes);
  assert_int_equal(strlen(small), sizeof small - 1);
  mlfab__scheduler_explain(f.s, NULL, 0, &again);
  assert_int_equal(again, bytes);
  /* A single update is direct, behind those placed before. */
  for (uint32_t w = 0; w < 8; w++) say_report(&f, 0, 0, w, 3, 8, 0, 0);
  say_push(&f, 0, 8, 3, 50000000, 0);
  tick(&f);
  mlfab__scheduler_explain(f.s, text, sizeof text, &bytes);
  assert_non_null(strstr(text,
                         "push 3 of worker 8, 50000000 bytes, direct, start 0.000000000, "
                         "end 0.050000000, commit 0.050000000"));
  /* Pulls too: the second is sent after the first. */
  for (uint32_t w = 0; w < 2; w++) {
    mlfab__announce m = announce_of(MLFAB__TRANSFER_PULL, w, 4, 50000000);
    m.shape = 1 + w;
    say_announce(&f, 0, &m);
  }
  tick(&f);
  mlfab__scheduler_explain(f.s, text, sizeof text, &bytes);
  assert_non_null(strstr(text, "pull 4 of worker 0, 50000000 bytes, direct, start 0.000000000, "));
  assert_non_null(strstr(
      text, "pull 4 of worker 1, 50000000 bytes, direct, start 0.050000000, end 0.100000000"));
  end(&f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_one),
      cmocka_unit_test(test_booked_ahead),
      cmocka_unit_test(test_booked_by_report),
      cmocka_unit_test(test_unsure),
      cmocka_unit_test(test_interval),
      cmocka_unit_test(test_bound),
      cmocka_unit_test(test_ages_while_waiting),
      cmocka_unit_test(test_rounds),
      cmocka_unit_test(test_numbers_of_a_worker),
      cmocka_unit_test(test_accumulators),
      cmocka_unit_test(test_not_grouped),
      cmocka_unit_test(test_shared_hosts),
      cmocka_unit_test(test_large_batches),
      cmocka_unit_test(test_waits_for_parts),
      cmocka_unit_test(test_reassures),
      cmocka_unit_test(test_same_everywhere),
      cmocka_unit_test(test_unreachable),
      cmocka_unit_test(test_restart),
      cmocka_unit_test(test_who_may_announce),
      cmocka_unit_test(test_bad_frames),
      cmocka_unit_test(test_many_hosts),
      cmocka_unit_test(test_pulls),
      cmocka_unit_test(test_as_foretold),
      cmocka_unit_test(test_otherwise),
      cmocka_unit_test(test_reserved_again),
      cmocka_unit_test(test_memory),
      cmocka_unit_test(test_explain),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
