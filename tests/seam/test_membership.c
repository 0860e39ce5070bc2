/* test_membership.c - server 0's membership of collectives, among workers that the test plays: who takes part, who is
 * missing, and how an epoch ends. unit/test_mirror.c has the random interleavings. */
#define TALK_CROWD 1025 /* more than collectives are for */
#include "core/base/rng.h"
#include "core/coll/coll_wire.h"
#include "../unit/scale.h"
#include "talk.h"

enum { WORKERS = 12, UNTOLD = -2, ALL = TALK_CROWD };
#define BEAT 500000000ull
#define CALLED 7 /* the signature of everybody's first call */
/* A worker is in this epoch, of so many. */
#define IN(i, epoch, n) (w[i].in == (epoch) && w[i].members == (n))

/* A worker that does what it is told: it gets ready when listed, and calls again after a verdict. */
typedef struct worker {
  int calls, mute; /* it wants to take part; it does not get ready */
  int newcomer;    /* it gets ready when the others are */
  uint32_t listed, in, over, overs;
  uint64_t host, signature;
  double rate;
  mlfab__membership_over verdict;
  mlfab__membership_go go;
  int32_t awaited, missing;
  uint32_t left, members, questions, numbers, freezes; /* left, numbers: a bit each */
  mlfab__membership_finish settle;
} worker;

static worker w[ALL];
static mlfab__membership_member list[MLFAB__MEMBERSHIP_MEMBERS_MAX]; /* the last one */
static mlfab__rng prng;

static uint32_t chance(uint32_t n) { return (uint32_t)mlfab__rng_below(&prng, n); }

static void open_with(uint32_t workers, uint32_t most, int by_rate) {
  TALK(.roles = MLFAB_ROLE_SERVER, .workers = workers, .workers_max = most,
       .order_by_rate = (uint32_t)by_rate, .dedicated = 1);
  memset(w, 0, sizeof w);
  for (uint32_t i = 0; i < most; i++)
    w[i] = (worker){.host = 1, .awaited = UNTOLD, .missing = UNTOLD};
}
static void open_all(uint32_t workers) { open_with(workers, workers, 0); }

static void say_ready(uint32_t i) {
  SAY(WORKER(i), MEMBERSHIP_READY, membership_ready, .epoch = w[i].listed, .arena = 1);
}

static void call(uint32_t i) {
  w[i].calls = 1;
  SAY(WORKER(i), MEMBERSHIP, membership_ask, .epoch = w[i].over, .host = w[i].host, .in = w[i].rate,
      .out = 2 * w[i].rate, .signature = w[i].signature ? w[i].signature : CALLED,
      .newcomer = (uint32_t)w[i].newcomer);
}

static void hear_over(uint32_t i, const mlfab__membership_over *over) {
  worker *me = &w[i];
  assert_true(over->code < 0 ? over->text[0] : !over->text[0]);
  if (over->epoch <= me->over) return;
  me->over = over->epoch;
  me->overs++;
  me->verdict = *over;
  me->listed = me->in = me->left = 0;
  if (me->calls) call(i);
}

/* Takes the next frame to a worker. Returns 0 if there is none. */
static int hear(uint32_t i) {
  worker *me = &w[i];
  const talk_frame *f = talk_peer_of(WORKER(i))->first;
  if (!f) return 0;
#define FRAME(TYPE, name, ...)                                          \
  case MLFAB__MEMBERSHIP_##TYPE:                                        \
    HEAR(WORKER(i), MEMBERSHIP_##TYPE, membership_##name, __VA_ARGS__); \
    break;
  switch (f->header.type) {
    case MLFAB__MEMBERSHIP_LIST:
      HEAR_LIST(WORKER(i), MEMBERSHIP_LIST, membership_list, list,
                (me->listed = m->epoch, me->members = m->members) > 0 && m->epoch > me->over);
      if (!me->mute && !me->newcomer) say_ready(i);
      break;
      FRAME(READY, ready, (say_ready(i), me->newcomer && m->epoch == me->listed))
      FRAME(GO, go,
            (me->newcomer = 0, me->in = m->epoch == me->listed ? m->epoch : 0, me->go = *m, 1))
      FRAME(OVER, over, (hear_over(i, m), 1))
      FRAME(MISSING, missing, (*(m->epoch ? &me->missing : &me->awaited) = m->rank, 1))
      FRAME(LEFT, leave, (me->left |= 1u << m->rank) != 0)
      FRAME(ASK, call, (me->questions++, me->numbers |= 1u << m->number) != 0)
      FRAME(FREEZE, finish, (me->freezes++, 1))
      FRAME(SETTLE, finish, (me->settle = *m, 1))
    default:
      talk_drop_frame(talk_peer_of(WORKER(i)));
  }
  return 1;
}

static void settle(void) {
  for (int more = 1; more;) {
    more = 0;
    for (uint32_t i = 0; i < t->config.workers_max; i++)
      while (hear(i)) more = 1;
  }
}

static void pass(uint64_t ns) {
  talk_wait(ns);
  settle();
}

static void call_all(uint32_t n) {
  for (uint32_t i = 0; i < n; i++) call(i);
  settle();
}

static void all_in(uint32_t n) {
  open_all(n);
  call_all(n);
  for (uint32_t i = 0; i < n; i++) assert_int_equal(w[i].in, 1);
}

static void die(uint32_t i) {
  talk_dies(WORKER(i));
  w[i].calls = 0;
  settle();
}

/* It comes as a new process. */
static void come(uint32_t i) {
  w[i] = (worker){.newcomer = 1, .host = 1, .awaited = UNTOLD, .missing = UNTOLD};
  talk_enter(i);
  settle();
}

/* It has ended the calls of its epoch. */
static void say_moved(uint32_t i) {
  SAY(WORKER(i), MEMBERSHIP, membership_ask, .epoch = w[i].in, .host = 1, .signature = CALLED,
      .newcomer = MLFAB__MEMBERSHIP_MOVED);
}

/* The other members make the first call of the one that has come. */
static void meet(uint32_t who, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (i != who)
      SAY(WORKER(i), MEMBERSHIP_FROZEN, membership_finish, .epoch = w[i].in, .rank = (int32_t)who);
  settle();
  for (uint32_t i = 0; i < n; i++)
    if (i != who) say_moved(i);
  settle();
}

static void leave(uint32_t i, uint64_t calls) {
  w[i].calls = 0;
  SAY(WORKER(i), MEMBERSHIP_LEAVE, membership_leave, .epoch = w[i].listed ? w[i].listed : w[i].over,
      .rank = (int32_t)i, .calls = calls);
  settle();
}

static void part(uint32_t i) {
  w[i].calls = 0;
  SAY(WORKER(i), BYE, bye, .code = 0);
  settle();
}

/* --- the order of members --- */

/* Host after host: the one of the lowest rank first, or the fastest. Written out, member by member. */
static void expect_order(uint32_t n, int by_rate) {
  int placed[WORKERS] = {0};
  for (uint32_t at = 0; at < n;) {
    double best = -1.0;
    uint64_t host = 0;
    for (uint32_t i = 0; i < n; i++) {
      double rate = 0.0;
      for (uint32_t k = 0; k < n && by_rate; k++)
        if (w[k].host == w[i].host && w[k].rate > rate) rate = w[k].rate;
      if (placed[i] || !(rate > best)) continue;
      best = rate;
      host = w[i].host;
    }
    for (uint32_t i = 0; i < n; i++) {
      if (w[i].host != host) continue;
      placed[i] = 1;
      assert_true(list[at].rank == i && list[at].host == host);
      at++;
    }
  }
}

SCENE(test_order) {
  uint32_t n = (uint32_t)test_cases(200);
  mlfab__rng_seed(&prng, 1);
  for (uint32_t round = 0; round < n; round++) {
    uint32_t workers = 1 + round % WORKERS, by_rate = round / WORKERS % 2;
    open_with(workers, workers, (int)by_rate);
    for (uint32_t i = 0; i < workers; i++) {
      w[i].host = 1 + chance(4);
      w[i].rate = chance(3) ? 1e6 * (double)(1 + w[i].host * 7 % 4) : 0.0;
      call(i);
    }
    settle();
    for (uint32_t i = 0; i < workers; i++)
      assert_true(IN(i, 1, workers) && w[i].go.arena == 1 && w[i].go.rate > 0.0 &&
                  w[i].go.latency_ns > 0);
    expect_order(workers, (int)by_rate);
  }
}

/* --- who is missing --- */

/* While an epoch forms, those who wait know who is missing. */
SCENE(test_missing) {
  open_all(4);
  call(3);
  call(0);
  pass(BEAT);
  assert_true(w[3].awaited == 1 && w[0].awaited == 1 && w[2].awaited == UNTOLD);
  call(1);
  pass(2 * BEAT);
  assert_true(w[0].awaited == 2 && w[1].awaited == 2);
  w[0].awaited = UNTOLD;
  pass(2 * BEAT);
  assert_int_equal(w[0].awaited, UNTOLD); /* once */
  /* All have asked, one is slow to be ready. */
  w[1].mute = 1;
  call(2);
  settle();
  pass(2 * BEAT);
  assert_true(w[3].awaited == 1 && w[0].in == 0);
  say_ready(1);
  settle();
  for (uint32_t i = 0; i < 4; i++) assert_int_equal(w[i].in, 1);
}

static void stuck(uint32_t i, uint64_t number) {
  SAY(WORKER(i), MEMBERSHIP_STUCK, membership_call, .epoch = w[i].in, .number = number);
  settle();
}

static void answer(uint32_t i, int called, uint64_t signature) {
  mlfab__membership_tell tell = {
      .epoch = w[i].in, .number = 7, .called = (uint32_t)called, .signature = signature};
  snprintf(tell.text, sizeof tell.text, "a call %d", (int)signature);
  talk_say(WORKER(i), MLFAB__MEMBERSHIP_TELL, mlfab__encode_membership_tell(t->meta, &tell), NULL,
           0);
  settle();
}

/* Each worker's answer: the signature of its call, 0: it has not called; '-': none. */
static void answers(const char *of) {
  for (uint32_t i = 0; of[i]; i++)
    if (of[i] != '-') answer(i, of[i] != '0', (uint64_t)(of[i] - '0'));
}

/* Worker 0 is stuck in call 7: all are asked. */
static void ask(uint32_t n) {
  all_in(n);
  stuck(0, 7);
  for (uint32_t i = 0; i < n; i++) assert_int_equal(w[i].questions, 1);
}

SCENE(test_stuck) {
  ask(4);
  answers("50-0");
  assert_int_equal(w[0].missing, UNTOLD);
  answers("--5-");
  for (uint32_t i = 0; i < 4; i++) assert_int_equal(w[i].missing, 1);
  /* The same call is not asked about again within a beat. */
  pass(BEAT / 2);
  stuck(2, 7);
  assert_int_equal(w[0].questions, 1);
  pass(BEAT);
  stuck(2, 7);
  assert_int_equal(w[0].questions, 2);
  answers("5555");
  for (uint32_t i = 0; i < 4; i++) assert_true(w[i].missing == MLFAB_NO_RANK && w[i].in == 1);

  /* One that does not answer for two beats; one that has left is not waited for. */
  ask(4);
  answers("5--5");
  leave(1, 0);
  pass(2 * BEAT - 1);
  assert_int_equal(w[0].missing, UNTOLD);
  pass(BEAT);
  assert_int_equal(w[0].missing, 2);

  /* A question that was lost with a link is asked again. */
  ask(3);
  answers("5-5");
  talk_break(WORKER(1));
  talk_back(WORKER(1));
  settle();
  assert_int_equal(w[1].questions, 2);
  answers("-0-");
  assert_int_equal(w[0].missing, 1);
}

static void say_finish(uint32_t i, uint8_t type, int32_t rank) {
  const mlfab__membership_finish m = {.epoch = w[i].in, .rank = rank};
  talk_say(WORKER(i), type, mlfab__encode_membership_finish(t->meta, &m), NULL, 0);
  settle();
}

/* While a worker finishes, the others wait for the workers that have not answered FREEZE. A worker that answered is not missing,
 * and the worker that finishes is not. */
SCENE(test_stuck_while_one_finishes) {
  for (int late = 1; late >= 0; late--) {
    all_in(4);
    say_finish(3, MLFAB__MEMBERSHIP_FINISH, 3);
    for (uint32_t i = 0; i < 4; i++) {
      assert_int_equal(w[i].freezes, 1);
      if (!late || i != 1) say_finish(i, MLFAB__MEMBERSHIP_FROZEN, 3);
    }
    assert_int_equal(w[0].settle.epoch, late ? 0 : 1);
    stuck(0, 7);
    answers(late ? "5-00" : "5550");
    pass(2 * BEAT);
    assert_int_equal(w[0].missing, late ? 1 : MLFAB_NO_RANK);
  }
}

/* Many that are stuck: at most four questions a beat, the lowest number first. */
SCENE(test_asking_rate) {
  all_in(6);
  mlfab__rng_seed(&prng, 1);
  for (int k = 0; k < 400; k++) {
    pass(BEAT / 40);
    stuck(chance(6), chance(4));
    for (uint32_t i = 0; i < 6; i++)
      for (uint64_t n = 0; n < 4; n++) {
        if (!(w[i].numbers >> n & 1)) continue;
        w[0].left |= i == 0 ? 1u << n : 0; /* here: numbers that it was asked about */
        w[i].numbers &= ~(1u << n);
        SAY(WORKER(i), MEMBERSHIP_TELL, membership_tell, .epoch = 1, .number = n, .called = 1,
            .signature = 5);
      }
    settle();
  }
  assert_in_range(w[0].questions, 10, 41); /* 10 beats */
  assert_true((w[0].left & 3) == 3);
}

/* --- verdicts --- */

/* One verdict, told to all alike: its code, its rank, its text. */
static void expect_verdict(uint32_t except, uint32_t epoch, int code, int32_t rank,
                           const char *words) {
  for (uint32_t i = 0; i < t->config.workers_max; i++) {
    if (i == except) continue;
    assert_int_equal(w[i].overs, epoch);
    assert_int_equal(w[i].over, epoch);
    assert_int_equal(w[i].verdict.code, code);
    assert_int_equal(w[i].verdict.rank, rank);
    assert_string_equal(w[i].verdict.text, words);
  }
}

static void fail_epoch(uint32_t i, uint32_t epoch, int32_t code, int32_t rank, const char *words) {
  mlfab__membership_over m = {.epoch = epoch, .code = code, .rank = rank};
  snprintf(m.text, sizeof m.text, "%s", words);
  talk_say(WORKER(i), MLFAB__MEMBERSHIP_FAIL, mlfab__encode_membership_over(t->meta, &m), NULL, 0);
}

static void fail_with(uint32_t i, int32_t code, int32_t rank, const char *words) {
  fail_epoch(i, 1, code, rank, words);
}

SCENE(test_verdicts) {
  all_in(4);
  die(2);
  expect_verdict(2, 1, MLFAB_ERR_PEER_DEAD, 2,
                 "worker 2 is dead: it exited without mlfab_close, was killed, or is cut off");
  assert_true(IN(0, 2, 3)); /* the others went on by themselves */
  come(2);                  /* it is not waited for before it calls */
  assert_int_equal(w[0].in, 2);
  call(2);
  pass(BEAT);
  meet(2, 4); /* the call is not theirs alone any more, and nobody sees a failure */
  for (uint32_t i = 0; i < 4; i++) assert_true(IN(i, 3, 4) && w[i].overs == (i != 2));

  all_in(3);
  part(1);
  expect_verdict(1, 1, MLFAB_ERR_PEER_CLOSED, 1, "worker 1 has closed");

  all_in(3);
  come(0);
  expect_verdict(0, 1, MLFAB_ERR_PEER_DEAD, 0,
                 "worker 0 is dead: a new process has taken its place");

  /* The first failure counts; nothing of the epoch that is over is heard. */
  all_in(3);
  fail_with(0, MLFAB_ERR_NOT_FINITE, 0, "worker 0 brings a NaN");
  fail_with(2, MLFAB_ERR_TIMEOUT, 1, "a deadline passed");
  settle();
  expect_verdict(3, 1, MLFAB_ERR_NOT_FINITE, 0, "worker 0 brings a NaN");
  fail_with(0, MLFAB_ERR_NOT_FINITE, 0, "worker 0 brings a NaN");
  settle();
  for (uint32_t i = 0; i < 3; i++) assert_int_equal(w[i].in, 2);

  /* A code that is none, a rank that there is not. */
  all_in(3);
  fail_with(1, 5, 77, "odd");
  settle();
  expect_verdict(3, 1, MLFAB_ERR_REFUSED, 1, "odd");

  /* A verdict that is lost with a link is told again. */
  all_in(3);
  talk_break(WORKER(1));
  fail_with(0, MLFAB_ERR_NOT_FINITE, 0, "worker 0 brings a NaN");
  settle();
  talk_back(WORKER(1));
  settle();
  expect_verdict(3, 1, MLFAB_ERR_NOT_FINITE, 0, "worker 0 brings a NaN");
}

/* --- a process that takes the place of one that died --- */

/* Two have lost the third, and its process is back, and has made its first call. */
static void one_returns(uint64_t signature) {
  all_in(3);
  die(2);
  come(2);
  w[2].signature = signature;
  call(2);
  settle();
  assert_true(IN(0, 2, 2) && w[0].overs == 1);
}

static void freeze(uint32_t n, uint32_t open) {
  for (uint32_t i = 0; i < n; i++)
    SAY(WORKER(i), MEMBERSHIP_FROZEN, membership_finish, .epoch = w[i].in, .rank = 2, .open = open);
  settle();
}

/* The others would never make its first call: it may take part all the same, and they hear it. */
SCENE(test_called_in_vain) {
  one_returns(9);
  freeze(2, 0);
  assert_int_equal(w[0].settle.seek[0], 9);
  pass(58 * BEAT);
  assert_true(IN(0, 2, 2) && w[0].overs == 1);
  pass(4 * BEAT);
  for (uint32_t i = 0; i < 3; i++) assert_int_equal(w[i].in, 3);
  assert_int_equal(w[2].overs, 0);
  assert_true(w[0].verdict.code == MLFAB_ERR_AGAIN && w[0].verdict.rank == 2);
  assert_string_equal(w[0].verdict.text, "worker 2 has come in: collectives begin anew");
  /* Its time begins anew with another call. */
  one_returns(9);
  freeze(2, 0);
  pass(58 * BEAT);
  w[2].signature = 8;
  call(2);
  freeze(2, 0);
  pass(58 * BEAT);
  assert_true(IN(0, 2, 2) && w[0].settle.seek[0] == 8);
}

/* Nobody but their members can close objects: they hear at once that it is back, and all begin anew. */
SCENE(test_objects_of_the_dead) {
  one_returns(CALLED);
  freeze(2, 1);
  pass(BEAT);
  for (uint32_t i = 0; i < 3; i++) assert_int_equal(w[i].in, 3);
  assert_true(w[1].overs == 2 && w[1].verdict.code == MLFAB_ERR_AGAIN);
}

/* It is to be in the next epoch, which a death refuses: nobody waits for its next call. */
SCENE(test_refused_beside_a_death) {
  one_returns(9);
  freeze(2, 0);
  w[1].calls = 0;
  pass(62 * BEAT);
  assert_true(w[0].verdict.code == MLFAB_ERR_AGAIN && w[0].in == 0 && w[2].overs == 0);
  w[2].calls = 0;
  die(1);
  assert_int_equal(w[2].verdict.code, MLFAB_ERR_PEER_DEAD);
  assert_true(w[0].in > 2 && w[0].members == 1);
}

/* The epoch that has it ends before it begins: nobody waits for its next call. If its call has ended, too, it is not in the
 * next one. */
SCENE(test_ends_before_it_begins) {
  one_returns(CALLED);
  w[1].mute = 1;
  meet(2, 3);
  assert_true(w[2].listed == 3 && w[2].in == 0);
  w[2].calls = w[1].mute = 0;
  fail_epoch(0, 3, MLFAB_ERR_TIMEOUT, 0, "late");
  settle();
  assert_true(IN(0, 4, 2) && w[2].over == 3);
}

/* A member says that it has ended its calls, while server 0 tells it that its epoch is over: this is no call of the next one. */
SCENE(test_moved_too_late) {
  one_returns(CALLED);
  freeze(2, 0);
  w[1].calls = 0;
  fail_epoch(0, 2, MLFAB_ERR_TIMEOUT, 0, "late");
  say_moved(1);
  settle();
  assert_true(w[0].overs == 2 && w[0].listed == 0);
  call(1);
  settle();
  assert_true(w[0].in == 3 && w[1].in == 3);
}

/* Calls that differ: the most frequent one is right, or that of the lowest rank. The first other worker is named. */
SCENE(test_differ) {
  uint32_t n = 2 + (uint32_t)test_cases_from(10, 500);
  mlfab__rng_seed(&prng, 3);
  for (uint32_t round = 0; round < n; round++) {
    static const uint64_t first[][4] = {{9, 5, 5, 5}, {5, 9, 9, 5}};
    uint64_t signature[WORKERS];
    uint32_t workers = round < 2 ? 4 : 2 + round % (WORKERS - 1), best = 0, most = 0, odd = 0;
    char words[80];
    ask(workers);
    for (uint32_t i = 0; i < workers; i++)
      signature[i] = round < 2 ? first[round][i] : 1 + chance(3);
    for (uint32_t i = 0; i < workers; i++) {
      uint32_t same = 0;
      for (uint32_t k = 0; k < workers; k++) same += signature[k] == signature[i];
      if (same > most) most = same, best = i;
    }
    for (uint32_t i = workers; i-- > 0;) answer(i, 1, signature[i]);
    while (odd < workers && signature[odd] == signature[best]) odd++;
    snprintf(words, sizeof words,
             "calls differ: worker %u has called a call %d, worker %u a call %d", odd,
             odd < workers ? (int)signature[odd] : 0, best, (int)signature[best]);
    if (odd < workers)
      expect_verdict(WORKERS, 1, MLFAB_ERR_MISMATCH, (int32_t)odd, words);
    else
      assert_true(w[0].in == 1 && w[0].missing == MLFAB_NO_RANK);
  }
}

/* --- leaving --- */

/* It ends nothing; whoever greets anew hears of it; the next epoch is without it. */
SCENE(test_leaving) {
  all_in(4);
  talk_break(WORKER(1));
  leave(3, 2);
  talk_back(WORKER(1));
  settle();
  for (uint32_t i = 0; i < 3; i++) assert_true(w[i].in == 1 && w[i].left == 8);
  part(3);
  assert_int_equal(w[0].in, 1);
  fail_with(0, MLFAB_ERR_TIMEOUT, 1, "a deadline passed");
  settle();
  assert_true(IN(0, 2, 3));
  /* One that says that it leaves, and dies before it is gone, may owe bytes. */
  leave(1, 0);
  assert_int_equal(w[0].in, 2);
  die(1);
  assert_int_equal(w[0].verdict.code, MLFAB_ERR_PEER_DEAD);
  assert_true(IN(0, 3, 2));
  /* All others have finished: the last one is alone, without a verdict. */
  say_finish(2, MLFAB__MEMBERSHIP_FINISH, 2);
  for (uint32_t i = 0; i < 3; i += 2) say_finish(i, MLFAB__MEMBERSHIP_FROZEN, 2);
  assert_int_equal(w[0].settle.epoch, 3);
  say_finish(2, MLFAB__MEMBERSHIP_FINISH, MLFAB_NO_RANK);
  w[0].over = 3;
  call(0);
  settle();
  assert_true(IN(0, 4, 1) && w[0].overs == 2);

  /* While the list is under way: it is not waited for, and has called nothing. */
  open_all(3);
  w[1].mute = 1;
  call_all(3);
  assert_int_equal(w[0].in, 0);
  w[1].listed = 0; /* it has not heard */
  leave(1, 1);
  assert_true(w[0].in == 1 && w[0].left == 2 && w[0].go.arena == 0);
}

/* Lost while no epoch stands: the others are told when one would begin, once, and then go on. */
SCENE(test_lost_before) {
  for (int left = 0; left < 3; left++) {
    open_all(3);
    if (left) leave(2, 0);
    if (left == 1) part(2);
    if (left == 0) die(2);
    call(0);
    settle();
    call(1);
    settle();
    expect_verdict(2, 1, left ? MLFAB_ERR_PEER_CLOSED : MLFAB_ERR_PEER_DEAD, 2,
                   left ? "worker 2 has left" : "worker 2 is dead");
    for (uint32_t i = 0; i < 2; i++) assert_true(IN(i, 2, 2));
  }
  /* A worker that is back by then takes part, as a new process or the same. */
  for (int same = 0; same < 2; same++) {
    open_all(3);
    call(0);
    settle();
    die(2);
    if (same)
      talk_back(WORKER(2));
    else
      come(2);
    for (uint32_t i = 3; i-- > 1;) call(i);
    pass(BEAT);
    for (uint32_t i = 0; i < 3; i++) assert_true(w[i].in > 0 && w[i].in == w[0].in);
    assert_true(IN(0, 1, 3));
  }
  /* One that is back and has not called, or calls something else, does not hide the death; its call does not fail. */
  for (int calls = 0; calls < 2; calls++) {
    open_all(3);
    come(2);
    call(0);
    w[2].signature = 9;
    if (calls) call(2);
    settle();
    call(1);
    settle();
    expect_verdict(2, 1, MLFAB_ERR_PEER_DEAD, 2, "worker 2 is dead");
    assert_true(IN(0, 2, 2) && w[2].overs == 0);
  }
  /* Between two epochs. */
  all_in(4);
  talk_break(WORKER(2));
  talk_break(WORKER(3));
  w[2].calls = w[3].calls = 0;
  pass(6 * BEAT);
  for (uint32_t i = 0; i < 2; i++) {
    assert_true(w[i].verdict.code == MLFAB_ERR_PEER_DEAD && w[i].verdict.rank >= 2);
    assert_true(w[i].in > 1 && w[i].members == 2);
  }
}

/* --- what is said again --- */

/* A new link, on which nothing of the former one arrives. Server 0 repeats itself. */
static void relink(uint32_t i) {
  talk_break(WORKER(i));
  talk_skip(WORKER(i));
  w[i].listed = w[i].in = w[i].left = w[i].freezes = 0;
  w[i].settle = (mlfab__membership_finish){.epoch = 0};
  talk_back(WORKER(i));
}

static void ready_again(uint32_t i) {
  relink(i);
  w[i].listed = w[1].listed;
  say_ready(i);
  settle();
}

/* A worker that asks on a new link hears the list, or all that was said in the epoch that stands. */
SCENE(test_said_again) {
  open_all(4);
  w[1].mute = 1;
  call_all(4);
  relink(0);
  call(0);
  settle();
  assert_true(w[0].listed == 1 && w[0].members == 4 && w[0].in == 0);
  say_ready(1);
  w[1].mute = 0;
  settle();
  ready_again(0);
  assert_true(w[0].in == 1 && w[0].left == 0 && w[0].freezes == 0 && w[0].settle.epoch == 0);
  for (uint32_t i = 2; i < 4; i++) { /* two finish */
    say_finish(i, MLFAB__MEMBERSHIP_FINISH, (int32_t)i);
    ready_again(0);
    assert_true(w[0].in == 1 && w[0].freezes == 2 * (i - 1) && w[0].settle.epoch == 0);
  }
  for (uint32_t i = 0; i < 4; i++) say_finish(i, MLFAB__MEMBERSHIP_FROZEN, 3);
  assert_int_equal(w[0].settle.epoch, 1);
  ready_again(0);
  assert_true(w[0].in == 1 && w[0].freezes == 0 && w[0].settle.epoch == 1);
  w[2].settle.epoch = w[0].settle.epoch = 0;
  say_finish(2, MLFAB__MEMBERSHIP_FINISH, 2); /* told again, as is the one that tells it of calls */
  assert_true(w[2].settle.epoch == 1 && w[0].settle.epoch + w[1].settle.epoch > 1);
  /* It has missed how its epoch ended, and so has one that was taken for dead, whatever came later. */
  say_finish(2, MLFAB__MEMBERSHIP_FINISH, MLFAB_NO_RANK);
  say_finish(3, MLFAB__MEMBERSHIP_FINISH, MLFAB_NO_RANK);
  talk_break(WORKER(2));
  w[0].over = w[1].over = 1;
  call_all(2);
  assert_true(IN(0, 2, 2));
  die(1);
  assert_true(w[0].in == 3 && w[0].verdict.code == MLFAB_ERR_PEER_DEAD);
  w[0].calls = 0;
  fail_epoch(0, 3, MLFAB_ERR_TIMEOUT, 0, "late");
  settle();
  for (uint32_t i = 1; i < 3; i++) {
    talk_skip(WORKER(i));
    talk_back(WORKER(i));
    call(i);
    w[i].calls = 0;
    settle();
  }
  assert_true(w[2].over == 1 && w[2].verdict.code == 0);
  assert_true(w[1].over == 2 && w[1].verdict.code == MLFAB_ERR_PEER_DEAD);
  assert_string_equal(w[1].verdict.text, "worker 1 was taken for dead");
}

/* A worker finishes outside of an epoch, or before it hears the list: nothing fails, and the others go on without it. */
SCENE(test_finishing_outside) {
  for (uint32_t listed = 0; listed < 2; listed++) {
    open_all(3);
    w[0].mute = w[2].mute = (int)listed;
    call_all(2 + listed);
    w[2].in = 0;
    w[2].calls = w[0].mute = 0;
    say_finish(2, MLFAB__MEMBERSHIP_FINISH, 2);
    for (uint32_t i = 0; i < 2; i++) assert_true(IN(i, 1 + listed, 2) && w[i].verdict.code == 0);
  }
}

/* A joiner waits while a member has an object open, and is told whose. */
SCENE(test_objects_are_kept) {
  open_with(2, 3, 0);
  call_all(2);
  come(2);
  call(2);
  settle();
  for (uint32_t open = 2; open-- > 0;) {
    for (uint32_t i = 0; i < 2; i++) {
      assert_int_equal(w[i].freezes, 2 - open);
      SAY(WORKER(i), MEMBERSHIP_FROZEN, membership_finish, .epoch = 1, .rank = 2, .calls = i,
          .open = i == 1 && open);
    }
    settle();
    assert_true(w[0].settle.epoch == 1 && (w[0].settle.calls == 1) == (open == 0));
    assert_int_equal(w[0].settle.seek[0], open ? 0 : CALLED);
    if (open) pass(20 * BEAT);
  }
  assert_int_equal(w[2].awaited, 1);
  w[0].over = w[1].over = 1;
  call_all(2);
  for (uint32_t i = 0; i < 3; i++) assert_true(IN(i, 2, 3));
}

/* --- limits --- */

/* More than an epoch can have: over as it begins. */
SCENE(test_too_many) {
  open_all(ALL);
  for (uint32_t i = 0; i < ALL; i++) {
    assert_int_equal(w[0].over, 0);
    call(i);
    w[i].calls = 0;
    hear(i);
  }
  settle();
  expect_verdict(ALL, 1, MLFAB_ERR_LIMIT, MLFAB_NO_RANK,
                 "1025 workers call collectives, which are for 1024 at most");
}

/* A full epoch goes on when one more worker joins, who learns why it may not: until a member leaves. */
SCENE(test_one_too_many_joins) {
  const uint32_t joiner = ALL - 1;
  open_with(joiner, ALL, 0);
  call_all(joiner);
  assert_int_equal(w[5].in, 1);
  come(joiner);
  for (int again = 0; again < 2; again++) { /* before it has heard, and after */
    call(joiner);
    w[joiner].calls = 0;
    settle();
    assert_int_equal(w[joiner].overs, 1);
  }
  assert_int_equal(w[joiner].verdict.code, MLFAB_ERR_LIMIT);
  assert_string_equal(w[joiner].verdict.text,
                      "collectives are for 1024 workers at most, which take part");
  pass(20 * BEAT);
  for (uint32_t i = 0; i < joiner; i++) assert_true(w[i].freezes == 0 && w[i].in == 1);
  /* A member leaves: the next epoch is for the joiner. */
  leave(5, 0);
  pass(10 * BEAT);
  for (uint32_t i = 0; i < joiner; i++) assert_int_equal(w[i].freezes, i != 5);
}

/* Frames that do not parse: the link is given up, nothing else happens. */
SCENE(test_hostile) {
  static const uint8_t types[] = {MLFAB__MEMBERSHIP,      MLFAB__MEMBERSHIP_READY,
                                  MLFAB__MEMBERSHIP_FAIL, MLFAB__MEMBERSHIP_STUCK,
                                  MLFAB__MEMBERSHIP_TELL, MLFAB__MEMBERSHIP_LEAVE};
  uint64_t n = (uint64_t)test_cases_from(10, 2000);
  mlfab__rng_seed(&prng, 1);
  all_in(3);
  for (uint64_t k = 0; k < n; k++) {
    uint32_t i = chance(3), closed = talk_peer_of(WORKER(i))->closed;
    for (int at = 0; at < 64; at++) t->meta[at] = (uint8_t)chance(256);
    talk_say(WORKER(i), types[chance(6)], chance(64), NULL, 0);
    settle();
    assert_in_range(talk_peer_of(WORKER(i))->closed, closed, closed + 1);
    if (!talk_linked(WORKER(i))) talk_back(WORKER(i));
    settle();
    for (i = 0; i < 3; i++) assert_true(w[i].in == 1 && w[i].overs == 0);
  }
  fail_with(0, MLFAB_ERR_TIMEOUT, 1, "a deadline passed");
  settle();
  expect_verdict(3, 1, MLFAB_ERR_TIMEOUT, 1, "a deadline passed");
}
