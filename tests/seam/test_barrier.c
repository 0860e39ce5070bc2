/* test_barrier.c - the barrier: server 0 among three workers that the test plays, and a worker whose server it plays. */
#include "core/base/request.h"
#include "talk.h"

enum { WORKERS = 3 };
#define NOBODY MLFAB_NO_RANK

/* --- server 0 --- */

static uint64_t done[WORKERS];   /* the last barrier that each worker knows to be over */
static int met[WORKERS];         /* others have come to a barrier that a guest asks for */
static int32_t awaited[WORKERS]; /* the worker that each was told to wait for */

static void serve(uint32_t workers) {
  TALK(.roles = MLFAB_ROLE_SERVER, .workers = workers, .workers_max = WORKERS, .dedicated = 1);
  for (uint32_t w = 0; w < WORKERS; w++) {
    done[w] = 0;
    met[w] = 0;
    awaited[w] = NOBODY;
    talk_skip(WORKER(w));
  }
}

static void hear_all(void) {
  for (uint32_t w = 0; w < WORKERS; w++) {
    for (const talk_frame *f; (f = talk_peer_of(WORKER(w))->first);) {
      if (f->header.type == MLFAB__BARRIER_DONE)
        HEAR(WORKER(w), BARRIER_DONE, barrier, m->what ? met[w]++ == 0 : (done[w] = m->number) > 0);
      else if (f->header.type == MLFAB__WAITING)
        HEAR(WORKER(w), WAITING, waiting, (awaited[w] = m->rank, m->request == 0));
      else
        talk_drop_frame(talk_peer_of(WORKER(w)));
    }
  }
}

#define ASK(w, number_) SAY(WORKER(w), BARRIER, barrier, .number = number_)
#define HERE(w, number_) \
  SAY(WORKER(w), BARRIER, barrier, .number = number_, .what = MLFAB__BARRIER_HERE, .of = NOBODY)
#define DONE(first, second, third)                                                \
  do {                                                                            \
    hear_all();                                                                   \
    assert_true(done[0] == (first) && done[1] == (second) && done[2] == (third)); \
  } while (0)

/* It is over when all have called, but for workers that are gone or have no more data. Who waits knows who is missing. */
SCENE(test_in_turn) {
  serve(WORKERS);
  for (uint64_t round = 1; round <= 3; round++) {
    ASK(1, round);
    DONE(round - 1, round - 1, round - 1);
    assert_int_equal(awaited[1], 0);
    ASK(2, round);
    DONE(round - 1, round - 1, round - 1);
    ASK(0, round);
    DONE(round, round, round);
  }
  ASK(0, 4);
  ASK(2, 4);
  DONE(3, 3, 3);
  assert_true(awaited[0] == 1 && awaited[2] == 1);
  talk_dies(WORKER(1));
  DONE(4, 3, 4);
  ASK(0, 5);
  DONE(4, 3, 4);
  assert_int_equal(awaited[0], 2);
  talk_say(WORKER(2), MLFAB__DONE, 0, NULL, 0);
  DONE(5, 3, 4);
}

/* Several are open at a time: they end in the order of the calls, each when all have called as often. */
SCENE(test_several) {
  serve(WORKERS);
  for (uint64_t k = 1; k <= 4; k++)
    for (uint32_t w = 0; w < 2; w++) ASK(w, k);
  for (uint64_t k = 1; k <= 4; k++) {
    DONE(k - 1, k - 1, k - 1);
    ASK(2, k);
    DONE(k, k, k);
  }
}

/* On a new link the worker asks again, also if the answer was lost. A new process counts from the last barrier that is over. */
SCENE(test_asked_again) {
  for (uint32_t victim = 0; victim < WORKERS; victim++) {
    serve(WORKERS);
    for (uint32_t w = 0; w < WORKERS; w++) {
      ASK(w, 1);
      ASK(w, 2);
      if (w != victim) continue;
      talk_break(WORKER(w)); /* before and after it is over */
      talk_skip(WORKER(w));
      talk_back(WORKER(w));
      ASK(w, 2);
      ASK(w, 2);
    }
    DONE(2, 2, 2);
    talk_break(WORKER(victim));
    talk_back(WORKER(victim));
    ASK(victim, 2); /* late */
    HEAR(WORKER(victim), BARRIER_DONE, barrier, m->number == 2);
    ASK(victim, 1);
    HEAR(WORKER(victim), BARRIER_DONE, barrier, m->number == 1);
    talk_enter(victim);
    met[victim] = 0;
    for (uint64_t k = 1; k <= 2; k++) { /* first as a guest, which the others meet */
      ASK(victim, k);
      for (uint32_t w = 0; w < WORKERS; w++)
        if (w != victim) ASK(w, k + 2);
      hear_all();
      assert_int_equal(met[victim], 1);
      if (k == 1) HERE(victim, 1);
      DONE(victim == 0 ? k : k + 2, victim == 1 ? k : k + 2, victim == 2 ? k : k + 2);
    }
  }
}

/* One that joins is a guest. Others that call wait until it counts, and then it is the same barrier for all. Others have called several barriers before it calls its first. It waits for none of them, and none of them ends its call. */
SCENE(test_joins_behind_several) {
  for (uint32_t way = 0; way < 3; way++) {
    serve(2);
    for (uint64_t k = 1; k <= 3; k++) ASK(0, k);
    talk_enter(2);
    if (way == 2) HERE(2, 0);
    ASK(2, 1);
    DONE(0, 0, 0);
    ASK(1, 1);
    hear_all();
    assert_int_equal(met[2], way < 2);
    DONE(way == 2, way == 2, 0);
    if (way == 0) HERE(2, 1);
    if (way == 1) SAY(WORKER(2), BARRIER, barrier, .what = MLFAB__BARRIER_APART);
    DONE(1, 1, way == 0);
    for (uint64_t k = 2; k <= 3; k++) {
      ASK(1, k);
      if (way == 0) DONE(k - 1, k - 1, k - 1);
      if (way == 0) ASK(2, k);
      DONE(k, k, way == 0 ? k : 0);
    }
    for (uint32_t w = 0; w < 2; w++) ASK(w, 4);
    DONE(way ? 4 : 3, way ? 4 : 3, way == 0 ? 3 : way == 2);
  }
}

/* A newcomer that leads a collective of newcomers counts at once. It has no part in a barrier that others have called. */
SCENE(test_leads) {
  serve(2);
  for (uint32_t w = 0; w < 2; w++) ASK(w, 1);
  ASK(0, 2);
  talk_enter(2);
  SAY(WORKER(2), BARRIER, barrier, .what = MLFAB__BARRIER_HERE, .of = 2);
  ASK(1, 2);
  DONE(2, 2, 0);
  for (uint32_t w = 0; w < 2; w++) ASK(w, 3);
  DONE(2, 2, 0);
  ASK(2, 1);
  DONE(3, 3, 1);
}

/* A wrong frame costs its sender the link, and changes nothing. */
SCENE(test_bad_frames) {
  static const struct {
    uint64_t number;
    uint32_t what, cut;
  } bad[] = {{0, 0, 0},
             {(uint64_t)1 << 63, 0, 0},
             {UINT64_MAX, 0, 0},
             {1, MLFAB__BARRIER_COLLECTS + 1, 0},
             {1, 0, 1}};
  serve(WORKERS);
  ASK(0, 1);
  for (uint32_t i = 0; i < MLFAB__COUNT(bad); i++) {
    const mlfab__barrier m = {.number = bad[i].number, .what = bad[i].what};
    talk_say(WORKER(1), MLFAB__BARRIER, mlfab__encode_barrier(t->meta, &m) - bad[i].cut, NULL, 0);
    assert_int_equal(talk_peer_of(WORKER(1))->closed, i + 1);
    talk_back(WORKER(1));
  }
  ASK(2, 1);
  DONE(0, 0, 0);
  ASK(1, 1);
  DONE(1, 1, 1);
}

/* --- a worker --- */

static void work_as(uint32_t guest) {
  talk_init();
  t->ack.guest = guest;
  talk_open(
      &SIZED(mlfab_config, .roles = MLFAB_ROLE_WORKER, .workers = 2, .rank = 1, .dedicated = 1));
}
static void work(void) { work_as(0); }
#define ASKS(number_) HEAR(SERVER(0), BARRIER, barrier, m->number == (number_) && m->what == 0)

/* Calls end in their order. On a new link the worker asks again, for the newest. */
SCENE(test_calls) {
  mlfab_request calls[4];
  work();
  for (uint32_t k = 0; k < 4; k++) {
    calls[k] = CALL(BARRIER, .options = NULL);
    ASKS(k + 1);
  }
  for (uint32_t k = 0; k < 4; k += 2) {
    PENDING(calls[k]);
    talk_break(SERVER(0));
    talk_back(SERVER(0));
    ASKS(4);
    SAY(SERVER(0), BARRIER_DONE, barrier, .number = k + 2);
    SAY(SERVER(0), BARRIER_DONE, barrier, .number = k + 1); /* late */
    for (uint32_t i = k; i < k + 2; i++) ENDS(calls[i], 0);
  }
  SAY(SERVER(0), BARRIER_DONE, barrier, .number = 9); /* of no call */
  HUSH(SERVER(0));
  mlfab_request call = CALL(BARRIER, .options = NULL);
  ASKS(5);
  PENDING(call);
}

/* A guest that meets others at a barrier says that it is here, as often as it is told. */
SCENE(test_guest_meets) {
  work_as(1);
  mlfab_request call = CALL(BARRIER, .options = NULL);
  ASKS(1);
  for (int i = 0; i < 2; i++) {
    SAY(SERVER(0), BARRIER_DONE, barrier, .what = 1, .progress = 7);
    HEAR(SERVER(0), BARRIER, barrier, m->number == 1 && m->what == MLFAB__BARRIER_HERE);
  }
  PENDING(call);
  SAY(SERVER(0), BARRIER_DONE, barrier, .number = 1);
  ENDS(call, 0);
}

/* A call that is withdrawn and made again is for the same barrier. */
SCENE(test_withdrawn) {
  const mlfab_collective soon = {.size = sizeof soon, .timeout_ns = 1000000};
  work();
  mlfab_request call = CALL(BARRIER, .options = &soon);
  ASKS(1);
  SAY(SERVER(0), WAITING, waiting, .kind = MLFAB__REQUEST_BARRIER, .rank = 0);
  talk_wait(2000000);
  mlfab_result result = ENDS(call, MLFAB_ERR_TIMEOUT);
  assert_int_equal(result.rank, 0);
  assert_non_null(strstr(talk_error(), "barrier: the deadline passed"));
  assert_non_null(strstr(talk_error(), "awaiting worker 0"));
  call = CALL(BARRIER, .options = NULL);
  ASKS(1);
  SAY(SERVER(0), BARRIER_DONE, barrier, .number = 1);
  ENDS(call, 0);
  call = CALL(BARRIER, .options = NULL);
  ASKS(2);
  PENDING(call);
}

SCENE(test_dead) {
  mlfab_request calls[2];
  work();
  for (uint32_t k = 0; k < 2; k++) calls[k] = CALL(BARRIER, .options = NULL);
  talk_dies(SERVER(0));
  for (uint32_t k = 0; k < 2; k++) assert_int_equal(ENDS(calls[k], MLFAB_ERR_PEER_DEAD).rank, 0);
  FAILS(MLFAB_ERR_PEER_DEAD, BARRIER, .options = NULL);
  assert_non_null(strstr(talk_error(), "barrier: server 0 is dead"));
}

SCENE(test_bad_answer) {
  work();
  mlfab_request call = CALL(BARRIER, .options = NULL);
  const mlfab__barrier m = {.number = 1};
  talk_say(SERVER(0), MLFAB__BARRIER_DONE, mlfab__encode_barrier(t->meta, &m) - 1, NULL, 0);
  assert_int_equal(talk_peer_of(SERVER(0))->closed, 1);
  PENDING(call);
}
