/* test_membership.c - server 0's membership of collectives in random interleavings: workers that come, die, leave,
 * come back, fail and get stuck, over links that break and lose what they hold.
 *
 * Oracle: membership_world.h. */
#include "membership_world.h"

/* The order that membership.h tells, picked literally: host after host. */
static void expect_order(const worker *me) {
  int placed[WORKERS] = {0};
  for (uint32_t at = 0; at < me->members;) {
    double best = -1.0;
    uint64_t host = 0;
    for (uint32_t i = 0; i < w->n; i++) { /* in the order of ranks: the lowest wins a tie */
      double rate = 0.0;
      if (placed[i] || !(w->members_of[me->epoch] >> i & 1)) continue;
      for (uint32_t k = 0; k < w->n && w->config.order_by_rate; k++) {
        if ((w->members_of[me->epoch] >> k & 1) && w->workers[k].host == w->workers[i].host &&
            w->workers[k].rate > rate)
          rate = w->workers[k].rate;
      }
      if (rate > best) {
        best = rate;
        host = w->workers[i].host;
      }
    }
    for (uint32_t i = 0; i < w->n; i++) {
      if (placed[i] || w->workers[i].host != host || !(w->members_of[me->epoch] >> i & 1)) continue;
      placed[i] = 1;
      assert_int_equal(me->list[at].rank, i);
      assert_int_equal(me->list[at].host, host);
      at++;
    }
  }
}

/* After any chaos: all live workers that call are in one epoch, and know it. */
static void test_chaos(void **state) {
  uint64_t stood = 0;
  (void)state;
  for (uint64_t seed = first_seed(), end = seed + rounds(1500); seed < end; seed++) {
    open_world(1 + (uint32_t)(seed % WORKERS), seed);
    for (uint32_t i = 0; i < w->n; i++) come(i);
    for (int k = 0; k < 1200 && w->server->epoch < EPOCHS - 64; k++) act(1);
    for (uint32_t i = 0; i < w->n; i++) {
      come(i);
      if (w->workers[i].finishes) leave(i);
      if (w->workers[i].alive && w->workers[i].done) { /* it goes, and comes again */
        if (!w->workers[i].up) greet(i);
        close_one(i);
        come(i);
      }
    }
    for (uint32_t i = 0; i < w->n; i++) w->workers[i].open = 0;
    settle();
    for (uint32_t i = 0; i < w->n; i++) call(&w->workers[i]);
    settle();
    for (int k = 0; k < 5; k++) mlfab__membership_tick(w->server, w->now); /* joiners waited */
    settle();
    for (uint32_t i = 0; i < w->n; i++) { /* the calls of an epoch that has a limit are made */
      worker *me = &w->workers[i];
      if (me->state != IN || me->limit == UINT64_MAX) continue;
      me->calls = me->limit;
      look_at_limit(me);
    }
    settle();
    assert_int_equal(w->server->phase, MLFAB__MEMBERSHIP_RUNNING);
    for (uint32_t i = 0; i < w->n; i++) {
      const worker *me = &w->workers[i];
      assert_int_equal(me->state, IN);
      assert_int_equal(me->epoch, w->server->epoch);
      assert_int_equal(me->members, w->n);
      assert_memory_equal(me->list, w->workers[0].list, w->n * sizeof me->list[0]);
      assert_int_equal(me->go.arena, 1);
      assert_true(me->go.rate > 0.0 && me->go.latency_ns > 0);
      expect_order(me);
    }
    stood += w->went;
    close_world();
  }
  assert_true(stood > 20);
}

static void all_in(uint32_t n, uint64_t seed) {
  open_world(n, seed);
  for (uint32_t i = 0; i < n; i++) come(i);
  for (uint32_t i = 0; i < n; i++) call(&w->workers[i]);
  settle();
  for (uint32_t i = 0; i < n; i++) assert_int_equal(w->workers[i].state, IN);
}

/* While an epoch forms, those who wait know who is missing. */
static void test_missing(void **state) {
  (void)state;
  open_world(4, 1);
  for (uint32_t i = 0; i < 4; i++) come(i);
  call(&w->workers[3]);
  call(&w->workers[0]);
  settle();
  mlfab__membership_tick(w->server, w->now);
  settle();
  assert_int_equal(w->workers[3].awaited, 1);
  assert_int_equal(w->workers[0].awaited, 1);
  assert_int_equal(w->workers[2].awaited, -2);
  call(&w->workers[1]);
  settle();
  mlfab__membership_tick(w->server, w->now);
  mlfab__membership_tick(w->server, w->now);
  assert_int_equal(w->workers[0].from.count, 1); /* once */
  settle();
  assert_int_equal(w->workers[0].awaited, 2);
  assert_int_equal(w->workers[1].awaited, 2);
  /* All have asked, one is slow to be ready. */
  call(&w->workers[2]);
  while (deliver(2, 1)) continue;
  for (uint32_t i = 0; i < 4; i++) deliver(i, 0);
  for (uint32_t i = 0; i < 4; i++) {
    if (i != 1) deliver(i, 1);
  }
  mlfab__membership_tick(w->server, w->now);
  for (uint32_t i = 2; i < 4; i++) deliver(i, 0);
  assert_int_equal(w->workers[3].awaited, 1);
  settle();
  assert_int_equal(w->workers[1].state, IN);
  close_world();
}

/* One verdict, told to all alike: its code, its rank, its text. */
static void expect_verdict(uint32_t except, int code, int32_t rank, const char *text) {
  for (uint32_t i = 0; i < w->n; i++) {
    const worker *me = &w->workers[i];
    if (i == except) continue;
    assert_int_equal(me->over, 1);
    assert_int_equal(me->verdict.code, code);
    assert_int_equal(me->verdict.rank, rank);
    assert_string_equal(me->verdict.text, text);
  }
}

static void test_verdicts(void **state) {
  (void)state;
  all_in(4, 1);
  die(2);
  settle();
  expect_verdict(2, MLFAB_ERR_PEER_DEAD, 2,
                 "worker 2 is dead: it exited without mlfab_close, was killed, or is cut off");
  assert_int_equal(w->workers[0].epoch, 2); /* the others went on by themselves */
  assert_int_equal(w->workers[0].members, 3);
  come(2); /* it is not waited for before it calls */
  settle();
  assert_int_equal(w->server->epoch, 2);
  call(&w->workers[2]);
  settle();
  assert_int_equal(w->workers[0].verdict.code, MLFAB_ERR_AGAIN);
  assert_int_equal(w->workers[0].verdict.rank, 2);
  assert_int_equal(w->workers[2].over, 0); /* it has seen no failure */
  assert_int_equal(w->workers[2].state, IN);
  close_world();

  all_in(3, 2);
  w->workers[1].here = 0;
  mlfab__membership_gone(w->server, 1, 1, w->now);
  die(1);
  settle();
  expect_verdict(1, MLFAB_ERR_PEER_CLOSED, 1, "worker 1 has closed");
  close_world();

  all_in(3, 3);
  die(0);
  come(0);
  settle();
  expect_verdict(0, MLFAB_ERR_AGAIN, 0, "worker 0 is back as a new process");
  close_world();

  /* The first failure counts; nothing of the epoch that is over is heard. */
  all_in(3, 4);
  say_fail(&w->workers[2]);
  mlfab__membership_over fail = {1, MLFAB_ERR_NOT_FINITE, 0, "worker 0 brings a NaN"};
  uint8_t meta[512];
  say(&w->workers[0], MLFAB__MEMBERSHIP_FAIL, meta, mlfab__encode_membership_over(meta, &fail));
  deliver(0, 1);
  settle();
  expect_verdict(3, MLFAB_ERR_NOT_FINITE, 0, "worker 0 brings a NaN");
  assert_int_equal(w->server->phase, MLFAB__MEMBERSHIP_RUNNING);
  assert_int_equal(w->server->epoch, 2);
  say(&w->workers[0], MLFAB__MEMBERSHIP_FAIL, meta, mlfab__encode_membership_over(meta, &fail));
  settle();
  assert_int_equal(w->server->epoch, 2);
  close_world();

  /* A code that is none, a rank that there is not. */
  all_in(3, 5);
  fail = (mlfab__membership_over){1, 5, 77, "odd"};
  say(&w->workers[1], MLFAB__MEMBERSHIP_FAIL, meta, mlfab__encode_membership_over(meta, &fail));
  settle();
  expect_verdict(3, MLFAB_ERR_REFUSED, 1, "odd");
  close_world();
}

/* It ends nothing; whoever greets anew hears of it; the next epoch is without it. */
static void test_leaving(void **state) {
  (void)state;
  all_in(4, 1);
  w->workers[3].calls = 2;
  cut(1);
  leave(3);
  deliver(3, 1);
  settle();
  assert_int_equal(w->server->phase, MLFAB__MEMBERSHIP_RUNNING);
  assert_int_equal(w->server->epoch, 1);
  for (uint32_t i = 0; i < 3; i++) assert_int_equal(w->workers[i].left_known, 8);
  assert_int_equal(w->server->entries[3].calls, 2);
  close_one(3);
  assert_int_equal(w->server->epoch, 1);
  say_fail(&w->workers[0]);
  settle();
  assert_int_equal(w->workers[0].members, 3);
  /* One that says that it leaves, and dies before it is gone, may owe bytes. */
  leave(1);
  settle();
  assert_int_equal(w->server->epoch, 2);
  die(1);
  settle();
  assert_int_equal(w->workers[0].verdict.code, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(w->workers[0].members, 2);
  /* All others have finished: the last one is alone, without a verdict. */
  finish(2);
  settle();
  assert_int_equal(w->workers[0].over, 3);
  assert_int_equal(w->workers[0].verdict.epoch, 2);
  assert_int_equal(w->workers[0].epoch, 4);
  assert_int_equal(w->workers[0].members, 1);
  close_world();

  /* While the list is under way: it is not waited for, and has called nothing. */
  open_world(3, 2);
  for (uint32_t i = 0; i < 3; i++) come(i);
  for (uint32_t i = 0; i < 3; i++) call(&w->workers[i]);
  for (uint32_t i = 0; i < 3; i++) deliver(i, 1);
  assert_int_equal(w->server->phase, MLFAB__MEMBERSHIP_LISTED);
  w->workers[1].calls = 1;
  leave(1);
  settle();
  assert_int_equal(w->workers[0].state, IN);
  assert_int_equal(w->workers[0].left_known, 2);
  assert_int_equal(w->workers[0].go.arena, 0);
  assert_int_equal(w->server->entries[1].calls, 0);
  close_world();
}

/* Lost while no epoch stands: the others are told when one would begin, once, and then go on. */
static void test_lost_before(void **state) {
  (void)state;
  for (int left = 0; left < 3; left++) {
    open_world(3, 1);
    for (uint32_t i = 0; i < 3; i++) come(i);
    if (left) leave(2);
    settle();
    if (left < 2) {
      if (left) {
        close_one(2);
      } else {
        die(2);
      }
    }
    call(&w->workers[0]);
    settle();
    call(&w->workers[1]);
    settle();
    expect_verdict(2, left ? MLFAB_ERR_PEER_CLOSED : MLFAB_ERR_PEER_DEAD, 2,
                   left ? "worker 2 has left" : "worker 2 is dead");
    for (uint32_t i = 0; i < 2; i++) {
      assert_int_equal(w->workers[i].state, IN);
      assert_int_equal(w->workers[i].members, 2);
    }
    assert_int_equal(w->server->epoch, 2);
    close_world();
  }
  /* Whoever is back by then is not missing, as a new process or the same. */
  for (int same = 0; same < 2; same++) {
    open_world(3, 1);
    for (uint32_t i = 0; i < 3; i++) come(i);
    call(&w->workers[0]);
    settle();
    if (same) {
      cut(2);
    } else {
      die(2);
    }
    give_up(2);
    come(2);
    greet(2);
    for (uint32_t i = 1; i < 3; i++) call(&w->workers[i]);
    settle();
    for (uint32_t i = 0; i < 3; i++) assert_int_equal(w->workers[i].state, IN);
    assert_int_equal(w->workers[0].members, 3);
    assert_int_equal(w->server->epoch, 1);
    close_world();
  }
  /* Between two epochs. */
  all_in(4, 1);
  die(2);
  give_up(2);
  die(3);
  settle();
  for (uint32_t i = 0; i < 2; i++) {
    assert_int_equal(w->workers[i].over, 2);
    assert_int_equal(w->workers[i].verdict.rank, 3);
    assert_int_equal(w->workers[i].members, 2);
  }
  close_world();
}

/* Who has not called; then calls that differ. `telling`: the others answer at once. */
static void answer(uint32_t i, int called, uint64_t signature) {
  mlfab__membership_tell tell = {w->server->epoch, 0, 7, (uint32_t)called, signature, ""};
  uint8_t meta[512];
  snprintf(tell.text, sizeof tell.text, "a call %d", (int)signature);
  say(&w->workers[i], MLFAB__MEMBERSHIP_TELL, meta, mlfab__encode_membership_tell(meta, &tell));
  deliver(i, 1);
}

static void ask(uint32_t n, uint64_t seed) {
  all_in(n, seed);
  stuck(0, 7);
  deliver(0, 1);
  for (uint32_t i = 0; i < n; i++) {
    assert_int_equal(w->workers[i].from.count, 1);
    w->workers[i].from.count = 0; /* nobody answers by itself */
  }
}

/* Three of five finish at random: each call below the limit is made by all, none above it, and nobody hears of a
 * failure. */
static void test_finishing(void **state) {
  (void)state;
  for (uint64_t seed = first_seed(), end = seed + rounds(2000); seed < end; seed++) {
    open_world(5, seed);
    for (uint32_t i = 0; i < 5; i++) come(i);
    for (uint32_t i = 0; i < 5; i++) call(&w->workers[i]);
    settle();
    for (int k = 0; k < 400; k++) {
      if (k % 100 == 7 && k < 300) finish(1 + chance(3));
      act(-1);
    }
    settle();
    for (int more = 1, turns = 0; more; turns++) {
      assert_true(turns < 20);
      more = 0;
      for (uint32_t i = 0; i < 5; i++) {
        worker *me = &w->workers[i];
        if (me->finishes || me->state != IN || me->limit == UINT64_MAX) continue;
        more |= me->moved != me->epoch;
        me->calls = me->limit;
        look_at_limit(me);
      }
      settle();
    }
    for (uint32_t i = 0; i < 5; i++) {
      worker *me = &w->workers[i];
      assert_int_equal(me->verdict.code, 0);
      assert_int_equal(me->state, me->finishes ? OUT : IN);
      if (!me->finishes) assert_int_equal(me->epoch, w->server->epoch);
      if (!me->finishes) assert_int_equal(w->members_of[me->epoch] & 1 << i, 1 << i);
    }
    close_world();
  }
}

static void test_stuck(void **state) {
  (void)state;
  ask(4, 1);
  answer(3, 0, 0);
  answer(0, 1, 5);
  answer(1, 0, 0);
  assert_int_equal(w->workers[0].from.count, 0);
  answer(2, 1, 5);
  settle();
  for (uint32_t i = 0; i < 4; i++) assert_int_equal(w->workers[i].missing, 1);
  /* The same call is not asked about again within a beat. */
  w->now += BEAT / 2;
  stuck(2, 7);
  deliver(2, 1);
  assert_int_equal(w->workers[0].from.count, 0);
  w->now += BEAT;
  stuck(2, 7);
  deliver(2, 1);
  for (uint32_t i = 0; i < 4; i++) w->workers[i].from.count = 0;
  for (uint32_t i = 0; i < 4; i++) answer(i, 1, 5);
  settle();
  for (uint32_t i = 0; i < 4; i++) assert_int_equal(w->workers[i].missing, MLFAB_NO_RANK);
  assert_int_equal(w->server->phase, MLFAB__MEMBERSHIP_RUNNING);
  close_world();

  /* One that does not answer for two beats; one that has left is not waited for. */
  ask(4, 2);
  answer(0, 1, 5);
  answer(3, 1, 5);
  leave(1);
  deliver(1, 1);
  w->now += 2 * BEAT - 1;
  mlfab__membership_tick(w->server, w->now);
  settle();
  assert_int_equal(w->workers[0].missing, -2);
  w->now++;
  mlfab__membership_tick(w->server, w->now);
  settle();
  assert_int_equal(w->workers[0].missing, 2);
  close_world();

  /* A question that was lost with a link is asked again. */
  ask(3, 3);
  answer(0, 1, 5);
  answer(2, 1, 5);
  greet(1);
  assert_int_equal(w->workers[1].from.count, 1);
  w->workers[1].from.count = 0;
  answer(1, 0, 0);
  settle();
  assert_int_equal(w->workers[0].missing, 1);
  close_world();
}

/* While a worker finishes, the others wait for whoever has not answered FREEZE: those who begin nothing for that
 * reason, and the one that has finished, are not missing. */
static void test_stuck_while_one_finishes(void **state) {
  (void)state;
  for (int late = 1; late >= 0; late--) {
    all_in(4, 1);
    finish(3);
    deliver(3, 1);
    for (uint32_t i = 0; i < 4; i++) {
      if (late && i == 1) {
        w->workers[i].from.count = 0; /* it does not answer */
      } else {
        deliver(i, 0);
        deliver(i, 1);
      }
    }
    for (uint32_t i = 0; i < 4 && !late; i++) w->workers[i].from.count = 0;
    stuck(0, 7);
    deliver(0, 1);
    answer(0, 1, 5);
    answer(2, !late, 5);
    answer(3, 0, 0);
    if (!late) answer(1, 1, 5);
    w->now += 2 * BEAT;
    mlfab__membership_tick(w->server, w->now);
    while (w->workers[0].from.count > 0) deliver(0, 0);
    assert_int_equal(w->workers[0].missing, late ? 1 : MLFAB_NO_RANK);
    close_world();
  }
}

static void test_differ(void **state) {
  (void)state;
  ask(4, 1);
  answer(0, 1, 9);
  answer(1, 1, 5);
  answer(2, 1, 5);
  answer(3, 1, 5);
  settle();
  expect_verdict(4, MLFAB_ERR_MISMATCH, 0,
                 "calls differ: worker 0 has called a call 9, worker 1 a call 5");
  close_world();
  ask(4, 2); /* two and two: the lowest rank's count */
  answer(3, 1, 5);
  answer(2, 1, 9);
  answer(1, 1, 9);
  answer(0, 1, 5);
  settle();
  expect_verdict(4, MLFAB_ERR_MISMATCH, 1,
                 "calls differ: worker 1 has called a call 9, worker 0 a call 5");
  close_world();
  /* Most of them, against a brute-force count. */
  for (uint64_t seed = 3, end = 3 + rounds(500); seed < end; seed++) {
    uint64_t signature[WORKERS];
    uint32_t n = 2 + (uint32_t)seed % (WORKERS - 1), best = 0, most = 0;
    ask(n, seed);
    for (uint32_t i = 0; i < n; i++) signature[i] = 1 + chance(3);
    for (uint32_t i = 0; i < n; i++) {
      uint32_t same = 0;
      for (uint32_t k = 0; k < n; k++) same += signature[k] == signature[i];
      if (same > most) {
        most = same;
        best = i;
      }
    }
    for (uint32_t i = 0; i < n; i++) answer(i, 1, signature[i]);
    settle();
    if (most == n) {
      assert_int_equal(w->server->epoch, 1);
      assert_int_equal(w->workers[0].missing, MLFAB_NO_RANK);
    } else {
      uint32_t odd = 0;
      while (signature[odd] == signature[best]) odd++;
      assert_int_equal(w->workers[0].verdict.code, MLFAB_ERR_MISMATCH);
      assert_int_equal(w->workers[0].verdict.rank, odd);
    }
    close_world();
  }
}

/* Many that are stuck: at most four questions a beat, the lowest number first. */
static void test_asking_rate(void **state) {
  uint64_t asked = 0, numbers = 0;
  (void)state;
  all_in(6, 1);
  for (uint32_t i = 0; i < 6; i++) w->workers[i].calls = 4;
  for (int k = 0; k < 400; k++) {
    uint64_t number = chance(4);
    w->now += BEAT / 40;
    stuck(chance(6), number);
    for (uint32_t i = 0; i < 6; i++) deliver(i, 1);
    if (k % 10 == 0) mlfab__membership_tick(w->server, w->now);
    for (uint32_t i = 0; i < 6; i++) {
      while (w->workers[i].from.count > 0) {
        const pipe *p = &w->workers[i].from;
        const message *m = &p->frames[p->begin % FRAMES];
        mlfab__membership_call in;
        if (i == 0 && m->type == MLFAB__MEMBERSHIP_ASK) {
          assert_int_equal(mlfab__decode_membership_call(m->meta, m->bytes, &in), 0);
          asked++;
          numbers |= 1u << in.number;
        }
        if (m->type == MLFAB__MEMBERSHIP_ASK) {
          mlfab__membership_tell tell = {0};
          uint8_t meta[512];
          assert_int_equal(mlfab__decode_membership_call(m->meta, m->bytes, &in), 0);
          tell = (mlfab__membership_tell){in.epoch, in.channel, in.number, 1, 5, ""};
          say(&w->workers[i], MLFAB__MEMBERSHIP_TELL, meta,
              mlfab__encode_membership_tell(meta, &tell));
        }
        w->workers[i].from.begin++;
        w->workers[i].from.count--;
      }
    }
    for (uint32_t i = 0; i < 6; i++) {
      while (deliver(i, 1)) continue;
    }
  }
  assert_in_range(asked, 10, 41); /* 10 beats */
  assert_true((numbers & 3) == 3);
  close_world();
}

/* More than an epoch can have: over as it begins. */
static void count_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  uint32_t *count = self;
  mlfab__membership_over over;
  (void)peer;
  assert_int_equal(type, MLFAB__MEMBERSHIP_OVER);
  assert_int_equal(mlfab__decode_membership_over(meta, bytes, &over), 0);
  assert_int_equal(over.epoch, 1);
  assert_int_equal(over.code, MLFAB_ERR_LIMIT);
  assert_string_equal(over.text, "1025 workers call collectives, which are for 1024 at most");
  ++*count;
}

static void test_too_many(void **state) {
  mlfab__env env;
  mlfab_config config;
  mlfab__membership membership;
  uint32_t count = 0;
  uint8_t meta[128];
  (void)state;
  assert_int_equal(mlfab__env_init(&env, NULL), 0);
  mlfab_config_init(&config);
  config.workers = MLFAB__MEMBERSHIP_MEMBERS_MAX + 1;
  mlfab__port port = {&count, count_post, no_ready, any_drop, no_detach, no_event, NULL, NULL};
  mlfab__membership_ask in = {.host = 1};
  mlfab__frame_in frame = {MLFAB__MEMBERSHIP, mlfab__encode_membership_ask(meta, &in), 0, meta,
                           NULL};
  assert_int_equal(mlfab__membership_init(&membership, &env, &config, &port), 0);
  for (uint32_t i = 0; i < config.workers; i++) {
    assert_int_equal(count, 0);
    mlfab__membership_frame(&membership, i, &frame, 1);
  }
  assert_int_equal(count, config.workers);
  assert_int_equal(membership.phase, MLFAB__MEMBERSHIP_GATHERING);
  mlfab__membership_free(&membership);
  assert_int_equal(env.bytes, 0);
}

/* A full epoch goes on when one more worker joins, who learns why it may not: until a member leaves. */
typedef struct crowd {
  mlfab__membership membership;
  uint32_t joiner, limits, freezes, go_epoch;
} crowd;

static void crowd_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  crowd *c = self;
  mlfab__membership_over over;
  mlfab__membership_go go;
  c->freezes += type == MLFAB__MEMBERSHIP_FREEZE;
  if (type == MLFAB__MEMBERSHIP_GO) {
    assert_int_equal(mlfab__decode_membership_go(meta, bytes, &go), 0);
    c->go_epoch = go.epoch;
  }
  if (type != MLFAB__MEMBERSHIP_OVER) return;
  assert_int_equal(peer, c->joiner);
  assert_int_equal(mlfab__decode_membership_over(meta, bytes, &over), 0);
  assert_int_equal(over.code, MLFAB_ERR_LIMIT);
  assert_string_equal(over.text, "collectives are for 1024 workers at most, which take part");
  c->limits++;
}

static void crowd_say(crowd *c, uint32_t rank, uint8_t type, const uint8_t *meta, uint32_t n) {
  mlfab__frame_in frame = {type, n, 0, meta, NULL};
  mlfab__membership_frame(&c->membership, rank, &frame, 1);
}

static void test_one_too_many_joins(void **state) {
  static crowd c;
  mlfab__env env;
  mlfab_config config;
  uint8_t meta[128];
  (void)state;
  assert_int_equal(mlfab__env_init(&env, NULL), 0);
  mlfab_config_init(&config);
  config.workers = MLFAB__MEMBERSHIP_MEMBERS_MAX + 1;
  config.heartbeat_ns = BEAT;
  memset(&c, 0, sizeof c);
  c.joiner = MLFAB__MEMBERSHIP_MEMBERS_MAX;
  mlfab__port port = {&c, crowd_post, no_ready, any_drop, no_detach, no_event, NULL, NULL};
  assert_int_equal(mlfab__membership_init(&c.membership, &env, &config, &port), 0);
  mlfab__membership_gone(&c.membership, c.joiner, MLFAB__NEVER_HERE, 1);
  mlfab__membership_ask ask = {.host = 1, .signature = 7};
  uint32_t n = mlfab__encode_membership_ask(meta, &ask);
  for (uint32_t i = 0; i < c.joiner; i++) crowd_say(&c, i, MLFAB__MEMBERSHIP, meta, n);
  mlfab__membership_ready ready = {.epoch = 1};
  n = mlfab__encode_membership_ready(meta, &ready);
  for (uint32_t i = 0; i < c.joiner; i++) crowd_say(&c, i, MLFAB__MEMBERSHIP_READY, meta, n);
  assert_int_equal(c.go_epoch, 1);
  mlfab__membership_hello(&c.membership, c.joiner, 7, 1);
  for (ask.epoch = 0; ask.epoch < 2; ask.epoch++) { /* before it has heard, and after */
    n = mlfab__encode_membership_ask(meta, &ask);
    crowd_say(&c, c.joiner, MLFAB__MEMBERSHIP, meta, n);
    assert_int_equal(c.limits, 1);
  }
  for (uint64_t now = 1; now < 20; now++) mlfab__membership_tick(&c.membership, now * BEAT);
  assert_int_equal(c.freezes, 0);
  assert_int_equal(c.membership.phase, MLFAB__MEMBERSHIP_RUNNING);
  /* A member leaves: the next epoch is for the joiner. */
  mlfab__membership_leave leave = {.epoch = 1, .rank = 5};
  crowd_say(&c, 5, MLFAB__MEMBERSHIP_LEAVE, meta, mlfab__encode_membership_leave(meta, &leave));
  mlfab__membership_tick(&c.membership, 30 * BEAT);
  assert_int_equal(c.freezes, c.joiner - 1);
  mlfab__membership_free(&c.membership);
  assert_int_equal(env.bytes, 0);
}

/* Frames that do not parse: the link is given up, nothing else happens. */
static void test_hostile(void **state) {
  static const uint8_t types[] = {MLFAB__MEMBERSHIP,      MLFAB__MEMBERSHIP_READY,
                                  MLFAB__MEMBERSHIP_FAIL, MLFAB__MEMBERSHIP_STUCK,
                                  MLFAB__MEMBERSHIP_TELL, MLFAB__MEMBERSHIP_LEAVE};
  (void)state;
  for (uint64_t seed = 1, end = 1 + rounds(2000); seed < end; seed++) {
    all_in(3, seed);
    uint8_t meta[64];
    for (int k = 0; k < 64; k++) meta[k] = (uint8_t)chance(256);
    mlfab__frame_in in = {types[chance(6)], chance(64), 0, meta, NULL};
    mlfab__membership before = *w->server;
    assert_int_equal(mlfab__membership_frame(w->server, chance(3), &in, w->now), 1);
    assert_int_equal(w->server->epoch, 1);
    if (w->drops > 0) assert_memory_equal(&before, w->server, sizeof before);
    assert_in_range(w->drops, 0, 1);
    w->drops = 0;
    close_world();
  }
  all_in(2, 1);
  mlfab__frame_in other = {MLFAB__PUSH, 0, 0, NULL, NULL};
  assert_int_equal(mlfab__membership_frame(w->server, 0, &other, w->now), 0);
  close_world();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_chaos),
      cmocka_unit_test(test_missing),
      cmocka_unit_test(test_verdicts),
      cmocka_unit_test(test_leaving),
      cmocka_unit_test(test_finishing),
      cmocka_unit_test(test_stuck),
      cmocka_unit_test(test_stuck_while_one_finishes),
      cmocka_unit_test(test_differ),
      cmocka_unit_test(test_asking_rate),
      cmocka_unit_test(test_too_many),
      cmocka_unit_test(test_one_too_many_joins),
      cmocka_unit_test(test_hostile),
      cmocka_unit_test(test_lost_before),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
