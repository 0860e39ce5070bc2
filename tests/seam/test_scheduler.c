/* test_scheduler.c - a scheduler's process, among servers that the test plays: when it plans, and how. Its predictions come
 * true when its plans are carried out exactly. */
#include "core/base/rng.h"
#include "talk.h"
#include "../unit/scale.h"

enum { SERVERS = 3, WORKERS = 640, TEXT = 1 << 16 };
#define MS 1000000ull
#define SECOND 1000000000ull
#define MB 1000000ull
#define GIGA 1e9
#define PULL MLFAB__TRANSFER_PULL

static mlfab__plan plan; /* the last one that was heard */
static mlfab__plan_entry e[MLFAB__PLAN_ENTRIES_MAX];
static uint32_t assured; /* plans without entries */

static void tick(void) {
  mlfab_node_tick(t->node, t->now);
  talk_run();
}

static void pass(uint64_t ns) {
  talk_wait(ns);
  tick();
}

/* Takes a server's next plan; returns the number of its entries, or 0: there is none. */
static uint32_t next_plan(uint32_t server) {
  for (const talk_frame *f; (f = talk_peer_of(SERVER(server))->first);) {
    if (f->header.type == MLFAB__HELLO) break; /* on a new link: not answered yet */
    if (f->header.type == MLFAB__SCHEDULE) {   /* server 0's, for the others */
      HEAR(SERVER(server), SCHEDULE, schedule, server > 0 && m->delay_bound > 0);
      continue;
    }
    HEAR_LIST(SERVER(server), PLAN, plan, e, (plan = *m, 1));
    if (plan.entries > 0) return plan.entries;
    assured++;
  }
  return 0;
}
#define PLANS(server, n) assert_int_equal(next_plan(server), n)
/* Time passes; now the server has a plan of so many entries. */
#define LATER(ns, server, n) (pass(ns), PLANS(server, n))

#define STATION(server, ...) SAY(SERVER(server), STATION, station, __VA_ARGS__)
#define REPORT(server, ...) SAY(SERVER(server), REPORT, report, __VA_ARGS__)
#define CAPACITY(host_, in_, out_) \
  SAY(SERVER(0), CAPACITY, capacity, .host = host_, .in = in_, .out = out_)
/* An update, unless .kind is PULL. Zeros stand for the usual values. */
#define ANNOUNCE(server, ...) announce(server, (mlfab__announce){__VA_ARGS__})

static void announce(uint32_t server, mlfab__announce m) {
  if (m.id == 0) m.id = 1;
  if (m.shape == 0) m.shape = 1;
  if (m.incarnation == 0) m.incarnation = 1;
  if (m.members == 0) m.members = 1;
  if (m.parts == 0) m.parts = 1;
  talk_say(SERVER(server), MLFAB__ANNOUNCE, mlfab__encode_announce(t->meta, &m), NULL, 0);
}

/* All parts of an update, each of its own shape. */
static void announce_all(uint32_t worker, uint64_t id) {
  for (uint32_t k = 0; k < t->config.servers; k++)
    ANNOUNCE(k, .worker = worker, .id = id, .bytes = 10 * MB, .parts = t->config.servers,
             .shape = 1 + k);
}

static void introduce(uint32_t server, mlfab__schedule m) {
  if (m.delay_bound == 0) m.delay_bound = MLFAB_UNBOUNDED;
  m.plan_ahead_ns = 150 * MS;
  m.host = 1000 + server;
  talk_say(SERVER(server), MLFAB__SCHEDULE, mlfab__encode_schedule(t->meta, &m), NULL, 0);
  for (uint32_t w = 0; w < t->config.workers; w++)
    STATION(server, .worker = w, .incarnation = 1, .alive = 1, .accumulators = 2, .host = 1 + w);
}

static void join(uint32_t workers, uint32_t servers) {
  TALK(.roles = MLFAB_ROLE_SCHEDULER, .workers = workers, .servers = servers,
       .scheduler = MLFAB_SCHEDULER_OWN, .seed = 7);
  t->hold_tick = 1;
  assured = 0;
}

/* A fabric whose links all carry a gigabyte a second, every node on a host of its own. */
static void fabric(uint32_t workers, uint32_t servers, mlfab__schedule schedule) {
  join(workers, servers);
  for (uint32_t k = 0; k < servers; k++) introduce(k, schedule);
  for (uint32_t k = 0; k < servers; k++) REPORT(k, .worker = MLFAB__NO_NODE);
  for (uint32_t k = 0; k < servers; k++) CAPACITY(1000 + k, GIGA, GIGA);
  for (uint32_t w = 0; w < workers; w++) CAPACITY(1 + w, GIGA, GIGA);
  tick();
  for (uint32_t k = 0; k < servers; k++) PLANS(k, 0);
}
#define FABRIC(workers, servers, ...) fabric(workers, servers, (mlfab__schedule){__VA_ARGS__})

static uint64_t plans_made(void) { return talk_stats().plans_made; }

/* A scheduler process joins at server 0, and calls all servers. */
SCENE(test_joins) {
  talk_init();
  t->by_hand = 1;
  talk_open(&SIZED(mlfab_config, .roles = MLFAB_ROLE_SCHEDULER, .workers = 3, .servers = 2,
                   .scheduler = MLFAB_SCHEDULER_OWN));
  HEAR(GATE, JOIN, join, m->roles == MLFAB_ROLE_SCHEDULER && m->workers == 3);
  talk_say_welcome();
  for (uint32_t s = 0; s < 2; s++) {
    HEAR(SERVER(s), HELLO, hello, m->node == 3 && m->incarnation == t->welcome.incarnation);
    assert_int_equal(mlfab_node_ready(t->node, NULL), 0);
    talk_greet(SERVER(s));
  }
  assert_int_equal(mlfab_node_ready(t->node, NULL), 1);
}

/* --- when it plans --- */

/* A single update is planned at once, as direct; the same one is not planned again. */
SCENE(test_one) {
  FABRIC(4, 1, 0);
  ANNOUNCE(0, .worker = 2, .id = 5, .bytes = 100 * MB);
  assert_true(mlfab_node_deadline(t->node) <= t->now);
  LATER(0, 0, 1);
  assert_true(e->id == 5 && e->worker == 2 && e->kind == MLFAB__TRANSFER_PUSH && e->group == 0);
  assert_true(e->aggregator == MLFAB__NO_NODE && e->fate == MLFAB__FATE_GO && e->delay == 0);
  assert_true(plan.rate_in == GIGA);
  LATER(SECOND, 0, 0);
  assert_int_equal(plans_made(), 1);
}

/* While the in-link is booked for plan_ahead or more nothing is planned; then planning resumes at once. At
 * 100 ms an update the third waits until 200 ms of booking have fallen to 150. The updates that have
 * gathered by then are one batch, and some of them are aggregated. */
SCENE(test_booked_ahead) {
  uint32_t grouped = 0;
  FABRIC(12, 1, 0);
  for (uint32_t w = 0; w < 12; w++) {
    ANNOUNCE(0, .worker = w, .bytes = 100 * MB);
    LATER(0, 0, w < 2);
  }
  LATER(50 * MS - 1000, 0, 0);
  LATER(5 * MS, 0, 10);
  for (uint32_t i = 0; i < 10; i++) grouped += e[i].group != 0;
  assert_true(grouped >= 4);
  assert_int_equal(talk_stats().plans_grouped, grouped);
}

/* The link is slower than planned: the scheduler takes the progress from the server's report. */
SCENE(test_booked_by_report) {
  FABRIC(4, 1, 0);
  ANNOUNCE(0, .worker = 0, .bytes = 300 * MB);
  LATER(0, 0, 1);
  ANNOUNCE(0, .worker = 1, .bytes = MB);
  LATER(149 * MS, 0, 0);
  REPORT(0, .worker = MLFAB__NO_NODE, .placed = 1, .backlog = 290 * MB);
  LATER(10 * MS, 0, 0);
  /* And it does not wait for a transfer that ended early. */
  REPORT(0, .worker = 0, .id = 1, .placed = 1);
  LATER(0, 0, 1);
}

/* An update's delay: members that a server may have missed are counted at that server, and not at servers that have no
 * part of them. */
SCENE(test_unsure) {
  static const struct {
    uint32_t server, worker, members;
    uint64_t placed, delay;
  } cases[] = {{0, 2, 3, 0, 0}, {1, 3, 1, 0, 0}, {0, 1, 1, 0, 3}, {1, 1, 1, 0, 1}, {0, 0, 1, 3, 1}};
  FABRIC(4, 2, 0);
  for (uint32_t i = 0; i < MLFAB__COUNT(cases); i++) {
    if (cases[i].placed) REPORT(0, .worker = 2, .id = 1, .placed = cases[i].placed);
    ANNOUNCE(cases[i].server, .worker = cases[i].worker, .id = 1 + i, .bytes = 1000,
             .members = cases[i].members, .placed = cases[i].placed);
    LATER(0, cases[i].server, 1);
    assert_int_equal(e->delay, cases[i].delay);
  }
}

SCENE(test_interval) {
  FABRIC(9, 1, .interval_ns = 100 * MS);
  for (uint32_t w = 0; w < 3; w++) {
    ANNOUNCE(0, .worker = w, .bytes = 400 * MB);
    LATER(0, 0, w == 0);
    LATER(10 * MS, 0, 0);
  }
  LATER(70 * MS - 1, 0, 0);
  LATER(1, 0, 2);
  ANNOUNCE(0, .worker = 5, .bytes = 400 * MB);
  LATER(100 * MS - 1, 0, 0);
  LATER(1, 0, 1);
}

/* --- fates --- */

/* A batch of updates, and the fate and delay of each. */
SCENE(test_fates) {
  enum { GO = MLFAB__FATE_GO, EXPIRED = MLFAB__FATE_EXPIRED };
  static const struct {
    uint64_t bound, lag[5];
    uint32_t before, go; /* before: updates in a plan that the server has not heard of */
    uint32_t first, first_fate;
    uint64_t first_delay;
  } cases[] = {
      /* The delays 0, 1 and 2 pass. Of three updates with delay 2 in first place one fits. */
      {3, {3, 2, 2, 1, UINT64_MAX}, 0, 2, 0, EXPIRED, 3},
      /* Updates in plans on their way count as placed. */
      {3, {0, 1, 2, 3, 4}, 2, 1, 0, GO, 2},
  };
  for (uint32_t i = 0; i < MLFAB__COUNT(cases); i++) {
    uint32_t gone = 0;
    FABRIC(8, 1, .delay_bound = cases[i].bound);
    for (uint32_t w = 5; w < 5 + cases[i].before; w++) ANNOUNCE(0, .worker = w, .bytes = 200 * MB);
    LATER(0, 0, cases[i].before);
    for (uint32_t w = 0; w < 5; w++) ANNOUNCE(0, .worker = w, .bytes = MB, .lag = cases[i].lag[w]);
    LATER(cases[i].before * 150 * MS, 0, 5);
    for (uint32_t k = 0; k < 5; k++) {
      gone += e[k].fate != GO;
      assert_true(e[k].fate == GO ? gone == 0 && e[k].delay < 3 : e[k].delay >= 3);
      if (e[k].worker != cases[i].first) continue;
      assert_int_equal(e[k].fate, cases[i].first_fate);
      assert_true(e[k].delay >= cases[i].first_delay);
    }
    assert_int_equal(gone, 5 - cases[i].go);
    assert_int_equal(talk_stats().plans_dropped, gone);
  }
}

/* With rounds the order is that of arrival, whatever the bound and the sizes. */
SCENE(test_rounds) {
  FABRIC(9, 1, .delay_bound = 1, .rounds = 1);
  for (uint32_t w = 9; w-- > 0;) ANNOUNCE(0, .worker = w, .bytes = MB * (w + 1), .lag = 50);
  LATER(0, 0, 9);
  for (uint32_t k = 0; k < 9; k++) assert_true(e[k].worker == 8 - k && e[k].fate == MLFAB__FATE_GO);
  assert_int_equal(talk_stats().plans_dropped, 0);
}

/* Of one worker's updates the older goes first, even if the newer would arrive earlier. */
SCENE(test_numbers_of_a_worker) {
  FABRIC(2, 1, 0);
  ANNOUNCE(0, .worker = 0, .id = 8, .bytes = 1000);
  ANNOUNCE(0, .worker = 0, .id = 7, .bytes = 50 * MB);
  LATER(0, 0, 1);
  assert_int_equal(e->id, 7);
  LATER(0, 0, 1);
  assert_int_equal(e->id, 8);
}

/* --- aggregation --- */

/* The groups of the last plan: members are adjacent, at least two, and have one aggregator. `in_use` counts a worker's. */
static uint32_t groups_of(uint32_t *in_use) {
  uint32_t groups = 0;
  for (uint32_t i = 0; i < plan.entries; i++) {
    int first = e[i].group && (i == 0 || e[i - 1].group != e[i].group);
    assert_true((e[i].group != 0) == (e[i].aggregator != MLFAB__NO_NODE));
    if (e[i].group) assert_true(e[i].rate == GIGA);
    if (!first) continue;
    groups++;
    if (in_use) in_use[e[i].aggregator]++;
    assert_true(i + 1 < plan.entries && e[i + 1].group == e[i].group);
    for (uint32_t k = i + 1; k < plan.entries; k++)
      if (e[k].group == e[i].group)
        assert_true(e[k].aggregator == e[i].aggregator && e[k - 1].group == e[i].group);
  }
  return groups;
}

/* An aggregator never has more sums at a time than it offers, whatever is planned meanwhile. */
SCENE(test_accumulators) {
  uint32_t in_use[24] = {0}, groups = 0;
  FABRIC(24, 1, .interval_ns = 1);
  for (uint32_t w = 0; w < 24; w++)
    STATION(0, .worker = w, .incarnation = 1, .alive = 1, .accumulators = w < 3, .host = 1 + w);
  for (uint32_t round = 0; round < 4; round++) {
    for (uint32_t w = 6 * round; w < 6 * round + 6; w++) ANNOUNCE(0, .worker = w, .bytes = 10 * MB);
    LATER(round ? MS : 0, 0, 6);
    groups += groups_of(in_use);
  }
  assert_true(groups > 0 && groups <= 3);
  for (uint32_t w = 0; w < 24; w++) assert_true(in_use[w] <= (w < 3));
  /* When they have ended there is room again. */
  for (uint32_t w = 0; w < 24; w++) REPORT(0, .worker = w, .id = 1, .placed = 24);
  for (uint32_t w = 0; w < 12; w++) ANNOUNCE(0, .worker = w, .id = 2, .bytes = 10 * MB);
  LATER(MS, 0, 12);
  assert_true(groups_of(NULL) > 0);
}

/* Updates of different shapes are not aggregated, and none is when the schedule forbids it. */
SCENE(test_not_grouped) {
  for (uint32_t way = 0; way < 3; way++) {
    FABRIC(16, 1, .no_aggregation = way == 1);
    for (uint32_t w = 0; w < 16; w++)
      ANNOUNCE(0, .worker = w, .bytes = 10 * MB, .shape = way == 2 ? 2 + (w & 1) : 3);
    LATER(0, 0, 16);
    assert_int_equal(groups_of(NULL) > 0, way == 0);
  }
}

/* Workers on one host share its links: no worker on the server's host becomes an aggregator, and no host
 * has two aggregators. */
SCENE(test_shared_hosts) {
  uint32_t in_use[32] = {0};
  FABRIC(32, 1, 0);
  for (uint32_t w = 0; w < 32; w++)
    STATION(0, .worker = w, .incarnation = 1, .alive = 1, .accumulators = 2,
            .host = w < 8 ? 1000 : 1 + w / 2);
  for (uint32_t w = 0; w < 32; w++) ANNOUNCE(0, .worker = w, .bytes = 10 * MB);
  LATER(0, 0, 32);
  assert_true(groups_of(in_use) > 1);
  for (uint32_t w = 0; w < 32; w += 2) assert_true(in_use[w] + in_use[w + 1] <= (w >= 8));
}

/* However many updates wait, no group is too large for a frame. */
SCENE(test_large_batches) {
  uint32_t planned = 0;
  FABRIC(WORKERS, 1, .rounds = 1);
  for (uint32_t w = 0; w < WORKERS; w++) ANNOUNCE(0, .worker = w, .bytes = 100000);
  for (uint32_t turn = 0; turn < 100 && planned < WORKERS; turn++) {
    pass(turn ? 10 * MS : 0);
    for (uint32_t n; (n = next_plan(0)) > 0; planned += n) {
      assert_true(n <= MLFAB__GROUP_MEMBERS_MAX);
      groups_of(NULL);
    }
  }
  assert_int_equal(planned, WORKERS);
}

/* --- several servers --- */

SCENE(test_waits_for_parts) {
  FABRIC(4, 2, 0);
  ANNOUNCE(1, .worker = 0, .bytes = 10 * MB, .parts = 2);
  LATER(0, 1, 0);
  ANNOUNCE(0, .worker = 0, .bytes = 10 * MB, .parts = 2);
  LATER(0, 0, 1);
  PLANS(1, 1);
  /* The scheduler does not wait for a server whose link is lost ... */
  talk_break(SERVER(0));
  ANNOUNCE(1, .worker = 1, .bytes = 10 * MB, .parts = 2);
  LATER(0, 1, 1);
  /* ... and waits for a silent one only for a limited time. */
  talk_back(SERVER(0));
  ANNOUNCE(1, .worker = 2, .bytes = 10 * MB, .parts = 2);
  LATER(1500 * MS - 1, 1, 0);
  LATER(1, 1, 1);
  PLANS(0, 0);
}

/* A server with a waiting update gets a plan without entries once a heartbeat; the others, and a server
 * with nothing left to plan, do not. */
SCENE(test_reassures) {
  FABRIC(4, 2, 0);
  LATER(10 * SECOND, 0, 0);
  assert_int_equal(assured, 0);
  ANNOUNCE(0, .worker = 0, .bytes = 1000 * MB); /* takes a second */
  LATER(0, 0, 1);
  ANNOUNCE(0, .worker = 1, .bytes = MB);
  for (uint32_t beats = 1; beats <= 20; beats++) {
    /* The server reports that nothing has arrived yet: its in-link stays booked. */
    REPORT(0, .worker = MLFAB__NO_NODE, .placed = 1, .backlog = 1000 * MB);
    LATER(500 * MS, 0, 0);
    PLANS(1, 0);
    assert_int_equal(assured, beats);
  }
}

/* One fate and one order at all servers, with the largest lag of all servers. */
SCENE(test_same_everywhere) {
  mlfab__plan_entry first[12];
  FABRIC(12, 3, .delay_bound = 8);
  for (uint32_t i = 0; i < 36; i++) {
    uint32_t k = i / 12, w = i % 12;
    ANNOUNCE(k, .worker = w, .bytes = MB * (1 + (w * 5 + k) % 7), .parts = 3,
             .lag = k == w % 3 ? w : 0);
  }
  tick();
  for (uint32_t k = 0; k < 3; k++) {
    PLANS(k, 12);
    if (k == 0) memcpy(first, e, sizeof first);
    for (uint32_t i = 0; i < 12; i++) {
      assert_true(first[i].worker == e[i].worker && first[i].fate == e[i].fate);
      assert_true(first[i].group == e[i].group && first[i].delay == e[i].delay);
      if (e[i].worker >= 8) assert_int_not_equal(e[i].fate, MLFAB__FATE_GO);
    }
  }
}

/* --- what goes wrong --- */

/* A link without capacity: the update waits, is tried twice a second, and is planned when the link is back. */
SCENE(test_unreachable) {
  FABRIC(4, 1, 0);
  CAPACITY(1, GIGA, 0.0);
  for (uint32_t w = 0; w < 2; w++) ANNOUNCE(0, .worker = w, .bytes = 1000);
  LATER(0, 0, 1);
  assert_int_equal(e->worker, 1);
  assert_true(mlfab_node_deadline(t->node) > t->now);
  LATER(500 * MS, 0, 0);
  assert_int_equal(plans_made(), 1);
  CAPACITY(1, GIGA, GIGA);
  LATER(0, 0, 1);
  assert_int_equal(e->worker, 0);
  /* A server without capacity gets no plans. */
  CAPACITY(1000, 0.0, 0.0);
  ANNOUNCE(0, .worker = 2, .bytes = 1000);
  LATER(SECOND, 0, 0);
}

/* --- its words --- */

/* Its words about the last plan of a kind; seconds from the plan. */
static struct told {
  unsigned long long serial;
  double at, backlog;
  uint32_t server, n;
  struct told_item {
    unsigned long long id;
    uint32_t worker, group;
    double start, arrive, sum, end, commit; /* negative: not said */
  } items[32];
} told;
static char text[TEXT];

static const char *explain(void) {
  size_t bytes;
  assert_int_equal(mlfab_node_explain(t->node, text, sizeof text, &bytes), 0);
  assert_int_equal(bytes, strlen(text) + 1);
  return text;
}

static double number(const char *line, const char *name) {
  const char *at = strstr(line, name);
  return at ? strtod(at + strlen(name), NULL) : -1.0;
}

static void read_told(uint32_t kind) {
  int of_kind = 0;
  explain();
  told.n = 0;
  told.serial = 0;
  for (char *line = strtok(text, "\n"); line; line = strtok(NULL, "\n")) {
    if (!strncmp(line, "plan ", 5)) {
      of_kind = !strstr(line, " pushes, ") == (kind == PULL);
      if (!of_kind) continue;
      told.serial = strtoull(line + 5, NULL, 10);
      told.at = number(line, " at ");
      told.backlog = number(line, ", backlog ");
      told.server = (uint32_t)number(line, " pulls, server ");
    } else if (of_kind && line[0] == 'p') {
      struct told_item *item = &told.items[told.n++];
      assert_true(told.n <= MLFAB__COUNT(told.items));
      assert_int_equal(sscanf(line + 5, "%llu of worker %u", &item->id, &item->worker), 2);
      item->group = (uint32_t)(number(line, ", group ") + 1);
      item->start = number(line, ", start ");
      item->arrive = number(line, kind == PULL ? ", there " : ", arrive ");
      item->sum = number(line, ", sum from ");
      item->end = number(line, ", end ");
      item->commit = number(line, ", commit ");
    } else {
      of_kind = 0;
    }
  }
}

SCENE(test_explain) {
  char small[40];
  size_t bytes;
  FABRIC(9, 1, .delay_bound = 12, .whole = 1);
  assert_non_null(strstr(explain(), "nothing was planned yet"));
  for (uint32_t w = 0; w < 8; w++)
    ANNOUNCE(0, .worker = w, .id = 3, .bytes = 50 * MB, .lag = w == 5 ? 40 : 1);
  LATER(0, 0, 8);
  assert_non_null(strstr(explain(), "push 3 of worker 5, 50000000 bytes, dropped: too late"));
  assert_non_null(strstr(text, ", group "));
  assert_non_null(strstr(text, "server 0: in 1000000000 bytes/s"));
  for (size_t room = 0; room <= sizeof small; room += sizeof small) {
    assert_int_equal(mlfab_node_explain(t->node, room ? small : NULL, room, &bytes), 0);
    assert_int_equal(bytes, strlen(text) + 1);
  }
  assert_int_equal(strlen(small), sizeof small - 1);
  /* A single update is direct, behind those placed before. */
  for (uint32_t w = 0; w < 8; w++) REPORT(0, .worker = w, .id = 3, .placed = 8);
  ANNOUNCE(0, .worker = 8, .id = 3, .bytes = 50 * MB);
  LATER(0, 0, 1);
  assert_non_null(strstr(explain(),
                         "push 3 of worker 8, 50000000 bytes, direct, start 0.000000000, "
                         "end 0.050000000, commit 0.050000000"));
  /* Pulls too: the second is sent after the first. */
  for (uint32_t w = 0; w < 2; w++)
    ANNOUNCE(0, .kind = PULL, .worker = w, .id = 4, .bytes = 50 * MB, .shape = 1 + w);
  LATER(0, 0, 2);
  assert_non_null(
      strstr(explain(), "pull 4 of worker 0, 50000000 bytes, direct, start 0.000000000, "));
  assert_non_null(strstr(text,
                         "pull 4 of worker 1, 50000000 bytes, direct, start 0.050000000, "
                         "end 0.100000000"));
}

/* --- servers and workers that come back --- */

/* The link to the server breaks and comes back: everything is announced again, and placed updates count by
 * the reported backlog only. */
SCENE(test_restart) {
  FABRIC(8, 1, 0);
  for (uint32_t w = 0; w < 3; w++) ANNOUNCE(0, .worker = w, .bytes = 100 * MB);
  LATER(0, 0, 3);
  ANNOUNCE(0, .worker = 5, .bytes = 1000);
  LATER(0, 0, 0);
  talk_break(SERVER(0));
  LATER(SECOND, 0, 0);
  talk_back(SERVER(0));
  introduce(0, (mlfab__schedule){.host = 0});
  REPORT(0, .worker = MLFAB__NO_NODE, .placed = 3, .backlog = 250 * MB);
  ANNOUNCE(0, .worker = 6, .bytes = 1000);
  LATER(0, 0, 0);
  LATER(100 * MS - 10, 0, 0);
  LATER(20, 0, 1);
  assert_int_equal(e->worker, 6);
  read_told(0);
  assert_true(told.backlog > 0.149 && told.backlog < 0.151);
}

/* Strangers, past incarnations, dead workers and repeated announcements. */
SCENE(test_who_may_announce) {
  FABRIC(4, 1, 0);
  ANNOUNCE(0, .worker = 0, .bytes = 1000, .incarnation = 9);
  STATION(0, .worker = 1, .incarnation = 5, .alive = 1, .accumulators = 2, .host = 2);
  ANNOUNCE(0, .worker = 1, .bytes = 1000); /* incarnation 1: a past one */
  ANNOUNCE(0, .worker = 2, .bytes = 1000);
  for (int twice = 0; twice < 2; twice++) ANNOUNCE(0, .worker = 3, .bytes = 1000);
  STATION(0, .worker = 2, .incarnation = 1, .accumulators = 2, .host = 3);
  ANNOUNCE(0, .worker = 2, .id = 2, .bytes = 1000); /* dead */
  /* Its worker rejoined later, so the server has forgotten the placed update and announces it again. */
  for (int again = 0; again < 2; again++) {
    LATER(0, 0, 1);
    assert_int_equal(e->worker, 3);
    ANNOUNCE(0, .worker = 3, .bytes = 1000);
  }
  LATER(0, 0, 1);
  /* A report about an unknown transfer changes nothing. */
  REPORT(0, .worker = 2, .id = 77);
  LATER(0, 0, 0);
  assert_int_equal(talk_peer_of(SERVER(0))->closed, 0);
}

/* A wrong frame costs server 0 its link. It calls again. */
static void refused(uint32_t frames) {
  talk_peer *p = talk_peer_of(SERVER(0));
  assert_int_equal(p->closed, frames);
  for (int i = 0; i < 100 && !p->link; i++) talk_wait(100 * MS);
  assert_true(talk_linked(SERVER(0)));
}

SCENE(test_bad_frames) {
  static const uint64_t patterns[] = {0x7ff8000000000000u, 0x7ff0000000000000u,
                                      0xfff0000000000000u};
  /* Number of servers, kind, members, worker. */
  static const uint32_t wrong[][4] = {
      {3, 0, 1, 0}, {0, 0, 1, 0}, {1, 2, 1, 0}, {1, 0, 0, 0}, {1, 0, 1, 9}};
  uint32_t n = 0;
  mlfab__rng prng;
  FABRIC(4, 2, 0);
  for (uint32_t i = 0; i < 6; i++) {
    double x;
    memcpy(&x, &patterns[i / 2], sizeof x);
    CAPACITY(1, i % 2 ? GIGA : x, i % 2 ? x : GIGA);
    refused(++n);
  }
  SAY(SERVER(0), SCHEDULE, schedule, .plan_ahead_ns = MS);
  refused(++n);
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    SAY(SERVER(0), ANNOUNCE, announce, .id = 1, .incarnation = 1, .parts = wrong[i][0],
        .kind = wrong[i][1], .members = wrong[i][2], .worker = wrong[i][3]);
    refused(++n);
  }
  talk_say(SERVER(0), MLFAB__PLAN, 0, NULL, 0);
  refused(++n);
  mlfab__rng_seed(&prng, 3);
  for (uint32_t i = 0; i < 20000; i++) {
    if (i % 1000 == 0) FABRIC(4, 2, 0);
    static const uint8_t types[] = {MLFAB__SCHEDULE, MLFAB__STATION, MLFAB__CAPACITY,
                                    MLFAB__ANNOUNCE, MLFAB__REPORT};
    uint32_t server = (uint32_t)mlfab__rng_below(&prng, 2);
    for (uint32_t k = 0; k < 256; k++)
      t->meta[k] = mlfab__rng_below(&prng, 3) ? 0 : (uint8_t)mlfab__rng_below(&prng, 4);
    talk_say(SERVER(server), types[mlfab__rng_below(&prng, 5)],
             24 + 8 * (uint32_t)mlfab__rng_below(&prng, 8), NULL, 0);
    pass(1 + mlfab__rng_below(&prng, MS));
    talk_skip(SERVER(server));
    while (!talk_linked(SERVER(server))) talk_wait(100 * MS);
  }
}

/* When there are many hosts, those without nodes are forgotten; the others keep their capacities. */
SCENE(test_many_hosts) {
  FABRIC(4, 2, 0);
  CAPACITY(3, 5e8, 6e8);
  for (uint64_t i = 0; i < 1000; i++) {
    CAPACITY(100000 + i, 1.0, 1.0);
    if (i % 100 < 90) continue;
    explain();
    assert_non_null(strstr(text, "server 1: in 1000000000 bytes/s, out 1000000000 bytes/s\n"));
    assert_non_null(
        strstr(text, "worker 2, 2 accumulators: in 500000000 bytes/s, out 600000000 bytes/s\n"));
    assert_non_null(strstr(text, "worker 3, 2 accumulators: in 1000000000 bytes/s, out "));
  }
}

/* --- pulls --- */

SCENE(test_pulls) {
  for (uint32_t off = 0; off < 2; off++) {
    uint32_t spread = 0;
    FABRIC(16, 2, .no_distribution = off);
    for (uint32_t w = 0; w < 16; w++)
      ANNOUNCE(1, .kind = PULL, .worker = w, .id = 4, .bytes = 50 * MB);
    LATER(0, 1, 16);
    groups_of(NULL);
    for (uint32_t i = 0; i < 16; i++) {
      assert_true(e[i].kind == PULL && e[i].fate == MLFAB__FATE_GO);
      spread += e[i].group != 0;
    }
    assert_true(off ? spread == 0 : spread > 4);
    /* The out-link is booked now; the in-link is not, nor is the other server. */
    ANNOUNCE(1, .kind = PULL, .worker = 0, .id = 5, .bytes = 50 * MB);
    LATER(0, 1, 0);
    ANNOUNCE(0, .kind = PULL, .worker = 0, .id = 5, .bytes = 50 * MB);
    ANNOUNCE(1, .worker = 3, .bytes = MB);
    LATER(0, 1, 1);
    PLANS(0, 1);
    for (uint32_t w = 0; w < 16; w++) REPORT(1, .kind = PULL, .worker = w, .id = 4);
    LATER(0, 1, 1);
    assert_int_equal(e->id, 5);
  }
}

/* --- a small model of servers, aggregators and links that carries plans out --- */

enum { MINI_WORKERS = 12, MINI_HOSTS = MINI_WORKERS + SERVERS, MINI_FLOWS = 512 };

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
  mail mail[MINI_MAIL];
  uint32_t nmail;
  mlfab__rng prng;
  uint32_t workers, servers;
  uint64_t bytes[SERVERS], bound;
  int cut;   /* aggregators pass on what comes as it comes */
  int timed; /* but not before the planned time, if that is known */
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
  double worst;                 /* of predictions, if they are judged */
  int judged;
} mini;

static mini world;

/* Keeps `order` sorted by key; a new flow mostly goes to the end. */
static uint32_t mini_flow(mini *m, uint32_t from, uint32_t to, double bytes, uint64_t key) {
  uint32_t at = m->nflows;
  assert_true(m->nflows < MINI_FLOWS);
  m->flows[m->nflows] = (flow){.from = from, .to = to, .left = bytes, .done = -1.0, .key = key};
  for (; at > 0 && m->flows[m->order[at - 1]].key > key; at--) m->order[at] = m->order[at - 1];
  m->order[at] = m->nflows;
  return m->nflows++;
}

static uint64_t mini_key(const mlfab__plan *p, uint32_t place, uint32_t server) {
  return p->serial << 24 | place << 4 | server;
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
  REPORT(k, .kind = kind, .worker = p->worker, .id = p->id, .placed = v->counted,
         .backlog = mini_left(m, v->queue, v->n), .out_backlog = mini_left(m, v->pulls, v->npulls));
}

/* The planned start of the second hop of this entry; 0: unknown. The start of a sum is told for all servers together. */
static double mini_planned(const mini *m, const mlfab__plan *p, const mlfab__plan_entry *of) {
  if (!m->timed || told.serial != p->serial || (of->kind != PULL && m->servers > 1)) return 0.0;
  for (uint32_t i = 0; i < told.n; i++) {
    const struct told_item *item = &told.items[i];
    if (item->worker == of->worker) return told.at + (of->kind == PULL ? item->start : item->sum);
  }
  return 0.0;
}

/* Adds the flows of a group's members and, after them, of their sum. Returns the sum. */
static uint32_t mini_group(mini *m, uint32_t k, const mlfab__plan *p,
                           const mlfab__plan_entry *entries, uint32_t i) {
  uint32_t hop = m->host[entries[i].aggregator], n = 0;
  while (i + n < p->entries && entries[i + n].group == entries[i].group) n++;
  uint32_t sum = m->nflows + n;
  for (uint32_t q = 0; q < n; q++) {
    uint32_t own = mini_flow(m, m->host[entries[i + q].worker], hop, (double)m->bytes[k],
                             mini_key(p, 2 * (i + q), k));
    m->flows[own].feeds = sum + 1;
  }
  uint64_t key = mini_key(p, 2 * (i + n) - 1, k);
  assert_int_equal(mini_flow(m, hop, MINI_WORKERS + k, (double)m->bytes[k], key), sum);
  m->flows[sum].waits = n;
  m->flows[sum].begins = mini_planned(m, p, &entries[i]);
  return sum;
}

/* Places an update: the server checks the bound itself, and the plan's delay is right. */
static void mini_push(mini *m, uint32_t k, const mlfab__plan *p, const mlfab__plan_entry *entries,
                      uint32_t i) {
  mini_server *server = &m->server[k];
  const mlfab__plan_entry *of = &entries[i];
  mini_worker *w = &m->worker[of->worker];
  uint64_t delay = server->counted - w->base[k];
  assert_int_equal(of->id, w->id);
  assert_true(w->waiting >> k & 1);
  w->waiting &= ~(1u << k);
  m->last_order[k] = mlfab__mix(m->last_order[k] * 31 + of->worker * 2 + (of->fate != 0));
  assert_true(server->n < 255);
  placed *last = &server->queue[server->n++];
  *last = (placed){.worker = of->worker, .id = of->id, .dropped = of->fate != MLFAB__FATE_GO};
  if (last->dropped) {
    w->dropped = 1;
    return;
  }
  assert_true(of->delay < m->bound);
  assert_true(delay <= of->delay);
  if (m->servers == 1) assert_int_equal(of->delay, delay);
  server->counted++;
  last->leads = !of->group || i == 0 || entries[i - 1].group != of->group;
  m->grouped += of->group != 0;
  if (!of->group)
    last->flow = mini_flow(m, m->host[of->worker], MINI_WORKERS + k, (double)m->bytes[k],
                           mini_key(p, 2 * i, k));
  else
    last->flow = last->leads ? mini_group(m, k, p, entries, i) : last[-1].flow;
  last->link = last->flow;
}

/* A pull: a distributor passes the model on when it has all of it, after everything that the server sends. */
static void mini_pull(mini *m, uint32_t k, const mlfab__plan *p, const mlfab__plan_entry *entries,
                      uint32_t i) {
  mini_server *server = &m->server[k];
  const mlfab__plan_entry *of = &entries[i];
  assert_int_equal(of->id, m->worker[of->worker].id);
  assert_true(m->worker[of->worker].pulling >> k & 1);
  m->worker[of->worker].pulling &= ~(1u << k);
  assert_true(server->npulls < 64);
  placed *last = &server->pulls[server->npulls++];
  *last = (placed){.worker = of->worker, .id = of->id};
  last->leads = !of->group || i == 0 || entries[i - 1].group != of->group;
  uint32_t to = m->host[of->group ? of->aggregator : of->worker];
  last->link = last->leads
                   ? mini_flow(m, MINI_WORKERS + k, to, (double)m->bytes[k], mini_key(p, i, k))
                   : last[-1].link;
  last->flow = last->link;
  if (!of->group) return;
  m->spread++;
  last->flow = mini_flow(m, to, m->host[of->worker], (double)m->bytes[k], mini_key(p, 4096 + i, k));
  flow *f = &m->flows[last->link];
  m->flows[last->flow].after = last->link + 1;
  m->flows[last->flow].waits = f->done < 0.0;
  m->flows[last->flow].begins = mini_planned(m, p, of);
}

/* Records the predictions of the plan that was just heard. */
static void mini_foretold(mini *m, uint32_t kind, uint32_t k) {
  if (told.serial != plan.serial) read_told(kind);
  for (uint32_t i = 0; i < plan.entries; i++) {
    mini_worker *w = &m->worker[e[i].worker];
    *(kind == PULL ? &w->pull_predicted[k] : &w->predicted) = 0.0;
  }
  for (uint32_t i = 0; i < told.n && told.serial == plan.serial; i++) {
    mini_worker *w = &m->worker[told.items[i].worker];
    if (told.items[i].commit < 0.0) continue; /* dropped */
    *(kind == PULL ? &w->pull_predicted[k] : &w->predicted) = told.at + told.items[i].commit;
  }
}

static void mini_take(mini *m, uint32_t k, const mlfab__plan *p, const mlfab__plan_entry *entries) {
  for (uint32_t i = 0; i < p->entries; i++)
    (entries[i].kind == PULL ? mini_pull : mini_push)(m, k, p, entries, i);
}

/* Hears a server's plans. */
static void mini_hear(mini *m, uint32_t k) {
  while (next_plan(k)) {
    if (m->judged) mini_foretold(m, e[0].kind, k);
    if (m->late_ns <= 0.0) {
      mini_take(m, k, &plan, e);
      continue;
    }
    assert_true(m->nmail < MINI_MAIL);
    mail *letter = &m->mail[m->nmail++];
    *letter = (mail){.at = m->now + 1e-9 * m->late_ns, .server = k, .plan = plan};
    memcpy(letter->entries, e, plan.entries * sizeof *e);
  }
}

/* What has arrived by now. */
static void mini_deliver(mini *m) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < m->nmail; i++) {
    if (m->mail[i].at <= m->now)
      mini_take(m, m->mail[i].server, &m->mail[i].plan, m->mail[i].entries);
    else
      m->mail[kept++] = m->mail[i];
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
  if (f->begins > 0.0) return f->begins <= m->now;
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

static void mini_tick(mini *m) {
  uint64_t made = plans_made();
  tick();
  for (uint32_t k = 0; k < m->servers; k++) mini_hear(m, k);
  assert_true(plans_made() <= made + 1 + m->servers);
  for (uint32_t k = 1; k < m->servers && m->nmail == 0; k++)
    assert_true(m->last_order[k] == m->last_order[0]);
}

static void mini_compare(mini *m, double predicted) {
  double off = m->now > predicted ? m->now - predicted : predicted - m->now;
  if (predicted > 0.0 && off > m->worst) m->worst = off;
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
    if (i > 0)
      mini_tick(m); /* each server's pulls get a plan of their own, whose story can be read */
    ANNOUNCE(i, .kind = PULL, .worker = p->worker, .id = w->id, .bytes = m->bytes[i]);
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
    /* The worker has computed from an earlier model. */
    uint64_t behind = mlfab__rng_below(&m->prng, 6);
    w->base[k] = m->server[k].version - mlfab__min(behind, m->server[k].version);
    ANNOUNCE(k, .worker = worker, .id = w->id, .bytes = m->bytes[k], .parts = m->servers,
             .lag = m->server[k].counted - w->base[k], .placed = m->server[k].counted);
  }
  w->waiting = w->left = (1u << m->servers) - 1;
  w->begins = 1e30;
}

static void mini_step(mini *m, double rates[MINI_FLOWS]) {
  double next = m->now + mini_rates(m, rates);
  uint64_t deadline = mlfab_node_deadline(t->node);
  double timer = 1e-9 * (double)deadline;
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
  if (timer <= m->now && ns < deadline) ns = deadline;
  if (ns > t->now) talk_wait(ns - t->now);
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
  FABRIC(m->workers, servers, .delay_bound = bound, .whole = !cut);
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
    CAPACITY(1000 + k, m->in[MINI_WORKERS + k], m->out[MINI_WORKERS + k]);
  for (uint32_t w = 0; w < m->workers; w++) {
    for (uint32_t k = 0; k < servers; k++)
      STATION(k, .worker = w, .incarnation = 1, .alive = 1, .accumulators = 2,
              .host = 1 + m->host[w]);
    CAPACITY(1 + w, m->in[w], m->out[w]);
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
 * once, the bound holds though plans overlap, and each prediction made at placement is right to 2 us. If
 * the scheduler has no room for all stretches of a transfer, or its plan is not known in full, a prediction is wrong by one
 * transfer at most. */
SCENE(test_as_foretold) {
  mini *m = &world;
  const uint64_t seeds =
      6 * test_cases_few(2, 5, 10); /* each number of servers, with and without a bound */
  for (int cut = 0; cut < 2; cut++) {
    uint32_t grouped = 0, dropped = 0, spread = 0, exact = 0;
    for (uint64_t seed = 0; seed < seeds; seed++) {
      mini_begin(m, 1 + (uint32_t)(seed / 3 % SERVERS), seed, seed % 2 ? 12 : MLFAB_UNBOUNDED, cut,
                 cut);
      m->judged = 1;
      mini_run(m, 3000);
      assert_true(m->applied > 100 && m->pulled > 100 && m->starved <= 1e-6);
      if (m->bound == MLFAB_UNBOUNDED) assert_int_equal(m->dropped, 0);
      if (m->worst > 0.05) fail_msg("seed %u: off by %g s", (unsigned)seed, m->worst);
      exact += m->worst <= 2e-6;
      grouped += m->grouped;
      dropped += m->dropped;
      spread += m->spread;
    }
    assert_true(exact >= (cut ? seeds * 3 / 4 : seeds) && grouped > 16 * seeds &&
                dropped > 2 * seeds && spread > 16 * seeds);
  }
}

/* The same where links carry more or less than announced and plans arrive late: predictions are wrong, but
 * orders and bounds hold, and a server is hardly ever idle while an update waits for its plan. */
SCENE(test_otherwise) {
  mini *m = &world;
  for (uint64_t seed = 0, seeds = test_cases_from(20, 60); seed < seeds; seed++) {
    mini_begin(m, 1 + (uint32_t)(seed / 3 % SERVERS), seed, seed % 2 ? 12 : MLFAB_UNBOUNDED,
               seed % 5 != 0, 0);
    if (seed % 4 != 1) m->late_ns = (double)(5 * MS);
    for (uint32_t h = 0; h < MINI_HOSTS && seed % 4 != 0; h++) {
      m->in[h] *= 0.5 + mlfab__rng_unit(&m->prng);
      m->out[h] *= 0.5 + mlfab__rng_unit(&m->prng);
    }
    mini_run(m, 3000);
    assert_true(m->applied > 100 && m->pulled > 100);
    if (m->bound == MLFAB_UNBOUNDED) assert_int_equal(m->dropped, 0);
    if (m->starved > 0.1 * (m->now - 1.0))
      fail_msg("seed %llu: starved %g of %g s\n", (unsigned long long)seed, m->starved,
               m->now - 1.0);
  }
}

/* Plans 24 updates whose sums leave gaps in the server's link, then one more a moment later: then everything placed is
 * reserved again and stays at its time. `out`: bytes a second of a worker's host. Returns how many sums start before all
 * of their members have arrived. */
static uint32_t reserve_again(uint32_t whole, double out) {
  uint32_t grouped = 0, cut = 0;
  FABRIC(26, 1, .whole = whole, .interval_ns = 1);
  for (uint32_t w = 0; w < 26; w++) CAPACITY(1 + w, GIGA, out);
  for (uint32_t w = 0; w < 24; w++) ANNOUNCE(0, .worker = w, .bytes = 30 * MB);
  LATER(0, 0, 24);
  read_told(0);
  for (uint32_t i = 0; i < told.n; i++) {
    grouped += told.items[i].group != 0;
    cut += told.items[i].group && told.items[i].sum < told.items[i].arrive - 1e-6;
  }
  double last = told.at + told.items[told.n - 1].commit;
  assert_true(grouped > 8);
  ANNOUNCE(0, .worker = 24, .bytes = 1000);
  LATER(1, 0, 1);
  read_told(0);
  double off = told.at + told.backlog - last;
  assert_true(off < 1e-8 && off > -1e-8);
  return cut;
}

SCENE(test_reserved_again) {
  assert_int_equal(reserve_again(1, GIGA), 0);
  for (uint32_t tenths = 2; tenths <= 10; tenths++)
    assert_true(reserve_again(0, 0.1 * tenths * GIGA) > 0 || tenths < 10);
}

/* --- memory --- */

/* A session that covers every function. Counts the entries that each server was told. */
static void session(uint32_t *entries) {
  for (uint32_t k = 0; k < 2; k++) introduce(k, (mlfab__schedule){.delay_bound = 20});
  for (uint32_t w = 0; w < 12; w++) CAPACITY(1 + w, GIGA, GIGA);
  for (uint32_t turn = 1; turn < 4; turn++) {
    for (uint32_t w = 0; w < 12; w++) {
      announce_all(w, turn);
      ANNOUNCE(1, .kind = PULL, .worker = w, .id = turn, .bytes = 10 * MB);
    }
    /* Long enough for parts that were forgotten for lack of memory. */
    for (uint32_t i = 0; i < 16; i++) {
      tick();
      for (uint32_t k = 0; k < 2; k++)
        for (uint32_t n; (n = next_plan(k)) > 0;) entries[k] += n;
      talk_wait(200 * MS);
    }
    for (uint32_t w = 0; w < 12; w++) {
      for (uint32_t k = 0; k < 2; k++)
        REPORT(k, .worker = w, .id = turn, .placed = 12 * (uint64_t)turn);
      REPORT(1, .kind = PULL, .worker = w, .id = turn, .placed = 12 * (uint64_t)turn);
    }
  }
  pass(2 * SECOND);
}

/* Whichever allocation fails: every announced update is told to each server exactly once, unless its link is lost. */
SCENE(test_memory) {
  uint64_t calls = 1;
  uint32_t losses = 0;
  for (uint64_t fail_at = 0; fail_at <= calls; fail_at++) {
    uint32_t entries[2] = {0, 0}, lost = 0;
    join(12, 2);
    uint64_t before = t->calls;
    if (fail_at) t->fail_at = before + fail_at;
    session(entries);
    if (fail_at == 0) calls = t->calls - before;
    for (uint32_t k = 0; k < 2; k++) lost += talk_peer_of(SERVER(k))->closed > 0;
    losses += lost > 0;
    if (lost == 0) assert_true(entries[0] == 36 && entries[1] == 72);
  }
  assert_true(calls > 60 && losses < 5);
}
