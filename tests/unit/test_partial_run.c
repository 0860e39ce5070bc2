/* test_partial_run.c - partial reductions between up to 33 communicators and the membership of server 0, over
 * links that are slow and break; through what mlfab.h says of them alone.
 *
 * Oracles. Element i of each block is of rank i, which adds 1 to that of the first block with every
 * call, and a random number to those of the others: so a result tells how many calls of whom are in
 * it, and whether one was torn. Who got the same round got the same bits. All rounds that were
 * returned and the flush at the end are together all that was ever called with.
 *
 * MLFAB_SEED=n adds to the seeds, MLFAB_SCALE=10 ten times as many worlds. */
#include "core/coll/partial_run.h"
#include "links.h"

#include "../testing.h"

#include <math.h>

enum { WORKERS = 33, BLOCKS = 3, ROUNDS = 512, EPOCHS = 64 };

enum state { OPENING, THINKING, CALLING, FLUSHING, DONE };

typedef struct worker {
  MEMBER_FIELDS;
  enum state state;
  uint32_t id;
  mlfab_request request;
  uint32_t slowness; /* it calls when one of so many is drawn */
  uint64_t steps;    /* of its next call, and that it makes */
  int64_t *data, *flushed;
  mlfab_partial_info info;
  int64_t calls, value; /* that it has made, all its life */
  uint64_t failures, last_round;
  uint32_t flushed_in, failed_in; /* the epochs in which its flush last did */
  int32_t code, rank;             /* of the last failure */
  char text[320];
} worker;

typedef struct past { /* a round, as it was first returned */
  int64_t *data;
  mlfab_partial_info info;
  uint64_t seen; /* by how many workers */
} past;

typedef struct world {
  WORLD_FIELDS(WORKERS);
  uint64_t stop; /* the step after the last */
  mlfab_partial_options options;
  uint64_t count, elements; /* count: of the array; elements: of blocks that are looked at */
  past rounds[ROUNDS];
  int64_t *flushes[EPOCHS]; /* what was returned, by epoch */
  uint32_t flush_failures;  /* that are still to be brought about */
  uint64_t finished, rounds_done;
  int calm; /* nothing fails: there is one epoch */
} world;

#include "members.h"

static uint64_t seed_of(uint64_t base) { return base + test_seed(); }

static int scaled(int usual, int most) {
  uint64_t n = test_cases(usual);
  return n > (uint64_t)most ? most : (int)n;
}

static void dropped(const void *self, uint32_t peer, const char *text) {
  (void)self, (void)peer;
  print_message("dropped: %s\n", text);
  w->drops++;
}

/* --- the world --- */

static void open_world(uint32_t n, uint64_t seed) {
  open_links(n, seed);
  w->config.chunk_bytes = 4096u << chance(5);
  for (uint32_t i = 0; i < n; i++) {
    open_member(i);
    w->workers[i].slowness = 1u << chance(8);
  }
  w->options = (mlfab_partial_options){.size = sizeof w->options,
                                       .mode = 1 + chance(3),
                                       .quorum = 1 + chance(n),
                                       .results = chance(2),
                                       .queue_max = 1 + chance(5),
                                       .algorithm = chance(MLFAB_ALGORITHM_COUNT - 1),
                                       .seed = chance(2) ? seed : 0};
  w->options.algorithm += w->options.algorithm >= MLFAB_ALGORITHM_PLANNED;
  w->elements = BLOCKS * (uint64_t)n;
  w->count = w->elements + (chance(4) ? 0 : 5000 + chance(5000));
}

/* Its link to server 0 is gone, with all frames on it. */
static void cut_off(worker *me) {
  me->up = 0;
  pipe_cut(&me->to_server);
  pipe_cut(&me->from_server);
}

static void free_worker(uint32_t rank) {
  worker *me = &w->workers[rank];
  if (!kill_member(rank)) return;
  free(me->data);
  free(me->flushed);
}

static void close_world(void) {
  for (uint32_t i = 0; i < w->n; i++) free_worker(i);
  for (uint32_t r = 0; r < ROUNDS; r++) free(w->rounds[r].data);
  for (uint32_t e = 0; e < EPOCHS; e++) free(w->flushes[e]);
  assert_int_equal(w->drops, 0);
  close_links();
}

static void act_some(uint32_t times) {
  while (times-- > 0) (void)act_any();
}

/* Lets things happen until then, for no longer than this. */
#define AWAIT(ns, condition) \
  for (uint64_t until = w->now + (ns); !(condition); (void)act_any()) assert_true(w->now < until)

/* --- the program --- */

static void saw_failure(worker *me, int32_t code, int32_t rank, const char *text) {
  me->failures++;
  me->code = code;
  me->rank = rank;
  snprintf(me->text, sizeof me->text, "%s", text);
}

static int open_object(worker *me, const mlfab_partial_options *options) {
  mlfab_error error = {0};
  int code = mlfab__partial_run_open(&me->comm, w->count, MLFAB_I64, options, 0, w->now, &me->id,
                                     &me->request, &error);
  me->state = OPENING;
  if (!me->data) me->data = calloc(w->count, 8);
  if (!me->flushed) me->flushed = calloc(w->count, 8);
  if (code) saw_failure(me, code, error.rank, error.text);
  return code;
}

static void close_object(worker *me, int code) {
  mlfab_error error;
  assert_int_equal(mlfab__partial_run_close(&me->comm, me->id, &error), code);
}

/* Its next step; what it brings counts as soon as it was taken in. */
static int call(worker *me, uint64_t timeout_ns) {
  mlfab_error error = {0};
  int64_t value = (int64_t)mlfab__rng_below(&w->prng, 1u << 30);
  uint32_t rank = rank_of(me);
  memset(me->data, 0, w->count * 8);
  for (uint32_t b = 0; b < BLOCKS; b++) me->data[b * w->n + rank] = b ? value : 1;
  me->info = (mlfab_partial_info){.size = sizeof me->info};
  int code = mlfab__partial_run_start(&me->comm, me->id, me->data, timeout_ns, w->now, &me->info,
                                      &me->request, &error);
  me->calls++;
  me->value += value;
  if (code) {
    saw_failure(me, code, error.rank, error.text);
    return code;
  }
  me->state = CALLING;
  return 0;
}

static int flush(worker *me) {
  mlfab_error error = {0};
  int code =
      mlfab__partial_run_flush(&me->comm, me->id, me->flushed, 0, w->now, &me->request, &error);
  if (code) saw_failure(me, code, error.rank, error.text);
  if (!code) me->state = FLUSHING;
  return code;
}

/* A flush's result: the same for all to whom it is given, though others may see it fail. */
static void look_at_flush(worker *me) {
  uint32_t epoch = me->flushed_in = me->comm.epoch;
  assert_in_range(epoch, 1, EPOCHS - 1);
  if (!w->flushes[epoch]) w->flushes[epoch] = copy(me->flushed, (uint32_t)w->count * 8);
  assert_memory_equal(w->flushes[epoch], me->flushed, w->count * 8);
}

static uint32_t ones(const uint64_t *bitmap) {
  uint32_t n = 0;
  for (uint32_t r = 0; r < 1024; r++) n += (uint32_t)(bitmap[r / 64] >> r % 64 & 1);
  return n;
}

/* The rank that is drawn for a round, if all are members. */
static uint32_t drawn_for(const worker *me, uint64_t round) {
  uint64_t key = w->options.seed ? w->options.seed : w->config.seed;
  return me->comm.ranks[mlfab__mix(key ^ mlfab__mix(round)) % w->n];
}

/* A step's result. */
static void look_at_result(worker *me) {
  const mlfab_partial_info *info = &me->info;
  uint32_t rank = rank_of(me);
  assert_in_range(info->round, 0, ROUNDS - 1);
  past *p = &w->rounds[info->round];
  assert_int_equal(info->size, sizeof *info);
  assert_true(info->step >= me->steps);
  me->steps = info->step + 1;
  assert_true(info->round >= info->step);
  assert_true(info->round + 1 >= me->last_round);
  me->last_round = info->round + 1;
  if (w->options.results == MLFAB_PARTIAL_QUEUED) assert_int_equal(info->round, info->step);
  assert_int_equal(info->active, ones(info->bitmap));
  assert_int_equal(info->included,
                   info->round == info->step && (info->bitmap[rank / 64] >> rank % 64 & 1));
  if (w->calm && w->options.mode == MLFAB_PARTIAL_MAJORITY) {
    uint32_t drawn = drawn_for(me, info->round);
    assert_true(info->bitmap[drawn / 64] >> drawn % 64 & 1);
  }
  uint64_t quorum = w->options.mode == MLFAB_PARTIAL_QUORUM ? w->options.quorum : 1;
  assert_true(info->active >= mlfab__min(quorum, info->workers));
  if (!p->data) {
    p->data = malloc(w->count * 8);
    memcpy(p->data, me->data, w->count * 8);
    p->info = *info;
    for (uint64_t e = w->elements; e < w->count; e++) assert_int_equal(p->data[e], 0);
    for (uint32_t r = 0; r < w->n; r++) {
      if (info->bitmap[r / 64] >> r % 64 & 1) assert_true(p->data[r] >= 1);
      for (uint32_t b = 2; b < BLOCKS; b++)
        assert_int_equal(p->data[b * w->n + r], p->data[w->n + r]);
    }
  }
  p->seen++;
  assert_memory_equal(p->data, me->data, w->count * 8);
  assert_memory_equal(p->info.bitmap, info->bitmap, sizeof info->bitmap);
  assert_int_equal(p->info.workers, info->workers);
  w->finished++;
}

static void look(worker *me) {
  mlfab__request *request = mlfab__request_find(&me->requests, me->request);
  if (!me->alive || !request || !request->done) return;
  int code = request->result.status;
  int32_t rank = request->result.rank;
  mlfab__request_end(&me->requests, request);
  me->request = 0;
  if (code) {
    saw_failure(me, code, rank, me->requests.last.text);
    if (me->state == FLUSHING) me->failed_in = me->comm.epoch;
    if (me->state != OPENING) me->state = THINKING;
  } else if (me->state == FLUSHING) {
    look_at_flush(me);
    me->state = DONE;
  } else {
    if (me->state == CALLING) look_at_result(me);
    me->state = THINKING;
  }
}

/* --- runs --- */

/* What hangs. */
static void explain(void) {
  print_message("%u workers, mode %u, quorum %u, results %u\n", w->n, w->options.mode,
                w->options.quorum, w->options.results);
  for (uint32_t i = 0; i < w->n; i++) {
    const worker *me = &w->workers[i];
    print_message("worker %u: phase %d, epoch %u, state %d, step %u, %u failures, code %d %s\n", i,
                  me->comm.phase, me->comm.epoch, me->state, (unsigned)me->steps,
                  (unsigned)me->failures, me->code, me->text);
    for (const mlfab__engine_run *run = me->comm.engine.armed; me->alive && run; run = run->next)
      print_message("  run %u of %u: lent %u, running %u\n", (unsigned)run->number, run->channel,
                    run->lent, run->running);
  }
}

static int all_are(enum state state) {
  for (uint32_t i = 0; i < w->n; i++)
    if (w->workers[i].alive && w->workers[i].state != state) return 0;
  return 1;
}

static void break_something(void) {
  if (chance(600) == 0) break_hop(chance(w->n), chance(w->n));
  if (chance(3000) == 0) {
    uint32_t rank = chance(w->n);
    if (w->workers[rank].alive) break_up(rank);
  }
}

static void open_all(void) {
  uint64_t end = w->now + 2000000;
  for (uint32_t i = 0; i < w->n; i++) assert_int_equal(open_object(&w->workers[i], &w->options), 0);
  while (!all_are(THINKING)) {
    assert_true(w->now < end);
    (void)act_any();
  }
}

/* Has somebody seen this one's last flush fail? */
static int must_repeat(const worker *me) {
  for (uint32_t i = 0; i < w->n; i++)
    if (w->workers[i].failed_in >= me->flushed_in) return 1;
  return 0;
}

/* What a worker does next, when it is drawn. One that has made its steps flushes, until all have
 * succeeded. */
static void move(worker *me) {
  if (me->state == DONE && must_repeat(me)) me->state = THINKING;
  if (!me->alive || me->state != THINKING || chance(me->slowness)) return;
  if (me->steps < w->stop)
    (void)call(me, 0);
  else
    (void)flush(me);
}

/* Only then do all agree on what is next after a failure. */
static int all_are_there(uint32_t epoch) {
  for (uint32_t i = 0; i < w->n; i++)
    if (w->workers[i].steps < w->stop || w->workers[i].failed_in >= epoch) return 0;
  return 1;
}

static int others_have_it(const worker *me) {
  for (uint32_t i = 0; i < w->n; i++)
    if (w->workers[i].state == DONE && w->workers[i].flushed_in == me->comm.epoch) return 1;
  return 0;
}

/* At any time, or when others have its result. Then everybody tries again, at once or after one step
 * more. */
static void withdraw_flush(worker *me) {
  mlfab__request *request = mlfab__request_find(&me->requests, me->request);
  int late = w->flush_failures & 1;
  if (!all_are_there(me->comm.epoch)) return;
  if (!request || request->done || (late && !others_have_it(me)) || chance(late ? 4 : 100)) return;
  w->flush_failures--;
  w->stop += chance(2);
  mlfab__comm_withdraw(&me->comm, request, MLFAB_ERR_CANCELLED, w->now);
  look(me);
}

/* Everybody makes its steps, and flushes. `failures` times somebody withdraws its call. */
static void run(uint64_t steps, int breaks, uint32_t failures) {
  uint64_t end = w->now + 30000000;
  w->stop = steps;
  while (!all_are(DONE)) {
    if (w->now >= end) explain();
    assert_true(w->now < end);
    worker *me = &w->workers[chance(w->n)];
    move(me);
    if (breaks) break_something();
    if (failures && me->state == CALLING && chance(100) == 0) {
      uint64_t furthest = 0;
      for (uint32_t i = 0; i < w->n; i++) furthest = mlfab__max(furthest, w->workers[i].last_round);
      mlfab__request *request = mlfab__request_find(&me->requests, me->request);
      if (furthest + 3 < steps && request && !request->done) {
        failures--;
        mlfab__comm_withdraw(&me->comm, request, MLFAB_ERR_CANCELLED, w->now);
        look(me);
      }
    }
    if (w->flush_failures && me->state == FLUSHING) withdraw_flush(me);
    (void)act_any();
  }
}

/* All that was returned, and what was flushed, is all that was called with. */
static void check_conservation(void) {
  for (uint32_t r = 0; r < w->n; r++) {
    int64_t calls = 0, value = 0;
    for (uint32_t k = 0; k < ROUNDS; k++) {
      if (!w->rounds[k].data) continue;
      calls += w->rounds[k].data[r];
      value += w->rounds[k].data[w->n + r];
    }
    for (uint32_t e = 0; e < EPOCHS; e++) {
      if (!w->flushes[e]) continue;
      calls += w->flushes[e][r];
      value += w->flushes[e][w->n + r];
    }
    assert_int_equal(w->workers[r].flushed_in, w->workers[0].flushed_in);
    assert_int_equal(calls, w->workers[r].calls);
    assert_int_equal(value, w->workers[r].value);
  }
  for (uint32_t k = 0; k < ROUNDS; k++) {
    w->rounds_done += w->rounds[k].data != NULL;
    if (w->options.results == MLFAB_PARTIAL_QUEUED && w->rounds[k].data && !w->workers[0].failures)
      assert_int_equal(w->rounds[k].seen, w->n);
  }
}

static void close_all(void) {
  for (uint32_t i = 0; i < w->n; i++) {
    worker *me = &w->workers[i];
    close_object(me, 0);
    close_object(me, MLFAB_ERR_ARGUMENT);
  }
  act_some(2000);
  for (uint32_t i = 0; i < w->n; i++) {
    assert_null(w->workers[i].comm.engine.armed);
    assert_int_equal(w->workers[i].comm.phase, MLFAB__COMM_IN);
    assert_int_equal(w->workers[i].requests.open, 0);
  }
}

static uint32_t draw_workers(int round) {
  return round % 8 ? 1 + (uint32_t)round % 7 : 8 + (uint32_t)mlfab__mix((uint64_t)round) % 26;
}

TEST(test_calm) {
  int worlds = scaled(60, 20000);
  uint64_t finished = 0, rounds = 0;
  for (int round = 0; round < worlds; round++) {
    open_world(draw_workers(round), seed_of(1000 + (uint64_t)round));
    w->calm = 1;
    open_all();
    run(1 + chance(40), round % 2, 0);
    check_conservation();
    close_all();
    for (uint32_t i = 0; i < w->n; i++) assert_int_equal(w->workers[i].failures, 0);
    finished += w->finished;
    rounds += w->rounds_done;
    close_world();
  }
  print_message("%llu calls of %llu rounds\n", (unsigned long long)finished,
                (unsigned long long)rounds);
}

/* Nothing is lost or doubled by failures. Each is seen by each once; of two that come between two
 * calls, the later one. */
TEST(test_failures) {
  uint64_t failed = 0;
  int worlds = scaled(60, 20000);
  for (int round = 0; round < worlds; round++) {
    uint64_t failures = 1 + (uint64_t)round % 3, most = 0;
    open_world(1 + draw_workers(round) % 16, seed_of(5000 + (uint64_t)round));
    open_all();
    run(20 + chance(30), round % 2, (uint32_t)failures);
    check_conservation();
    for (uint32_t i = 0; i < w->n; i++) {
      most = mlfab__max(most, w->workers[i].failures);
      assert_int_equal(w->workers[i].failures > 0, w->workers[0].failures > 0);
      if (w->workers[i].failures) assert_int_equal(w->workers[i].code, MLFAB_ERR_CANCELLED);
    }
    assert_in_range(most, 0, failures);
    failed += most;
    close_all();
    close_world();
  }
  print_message("%llu failures\n", (unsigned long long)failed);
}

static void open_small(uint32_t mode, uint32_t quorum, uint32_t results, uint64_t seed) {
  open_world(4, seed);
  w->count = w->elements;
  w->options.mode = mode;
  w->options.quorum = quorum;
  w->options.results = results;
  w->options.queue_max = 2;
  open_all();
}

/* A flush that ends well for some and fails for others is flushed once. */
TEST(test_flush_failures) {
  uint32_t failed = 0, parted = 0;
  int worlds = scaled(120, 20000);
  for (int round = 0; round < worlds; round++) {
    open_world(2 + draw_workers(round) % 8, seed_of(7000 + (uint64_t)round));
    open_all();
    w->flush_failures = 1 + chance(4);
    failed += w->flush_failures;
    run(1 + chance(20), round % 2, 0);
    failed -= w->flush_failures;
    check_conservation();
    for (uint32_t e = 1; e < w->workers[0].flushed_in; e++) parted += w->flushes[e] != NULL;
    close_all();
    close_world();
  }
  print_message("%u failures, %u of them not of all\n", failed, parted);
  assert_true(parted > 0);
}

/* One that is taken for dead while what it brought is in a round, which the others then make without it. */
TEST(test_taken_for_dead) {
  uint32_t waited = 0;
  for (uint64_t seed = 1; seed <= 60; seed++) {
    open_small(MLFAB_PARTIAL_SOLO, 0, seed % 2 ? MLFAB_PARTIAL_LATEST : MLFAB_PARTIAL_QUEUED,
               seed_of(70 + seed));
    worker *me = &w->workers[1];
    assert_int_equal(call(me, 0), 0);
    for (uint64_t k = chance(60); k > 0; k--) (void)act_any();
    cut_off(me);
    mlfab__membership_gone(&w->membership, 1, 0, w->now);
    uint64_t end = w->now + 400 * BEAT, rounds = 1 + chance(4);
    while (!w->rounds[rounds].data && me->state == CALLING) {
      assert_true(w->now < end);
      for (uint32_t i = 0; i < w->n; i++)
        if (i != 1 && w->workers[i].state == THINKING) (void)call(&w->workers[i], 0);
      (void)act_any();
    }
    if (me->state != CALLING) { /* it has a result that others may not have, as the dead do */
      close_world();
      continue;
    }
    waited++;
    break_up(1);
    while (me->state == CALLING) {
      assert_true(w->now < end);
      (void)act_any();
    }
    run(12, 0, 0);
    check_conservation();
    close_all();
    close_world();
  }
  assert_true(waited > 20);
}

/* All have taken part in a round when one has its result: it ends by itself, whoever closes. */
TEST(test_closed_in_good_order) {
  for (uint64_t seed = 0; seed < 40; seed++) {
    mlfab_error error;
    open_world(4, seed_of(900 + seed));
    w->options.mode = MLFAB_PARTIAL_SOLO;
    w->options.results = MLFAB_PARTIAL_LATEST;
    w->options.algorithm = MLFAB_ALGORITHM_TREE;
    w->count = 100000;
    open_all();
    assert_int_equal(call(&w->workers[0], 0), 0);
    while (w->workers[0].state == CALLING) (void)act_any();
    assert_int_equal(w->workers[0].failures, 0);
    for (uint32_t k = 0; k < w->n; k++) close_object(&w->workers[k], 0);
    act_some(20000);
    for (uint32_t k = 0; k < w->n; k++) {
      assert_int_equal(mlfab__comm_owed(&w->workers[k].comm, &error), 0);
      assert_null(w->workers[k].comm.engine.armed);
    }
    close_world();
  }
}

/* A worker that leaves before an epoch forms, and whose word of it is lost with its link. */
TEST(test_leave_is_lost) {
  int tried = 0;
  for (uint64_t seed = 0; seed < 40; seed++) {
    open_small(MLFAB_PARTIAL_SOLO, 0, MLFAB_PARTIAL_LATEST, seed_of(300 + seed));
    worker *me = &w->workers[3];
    mlfab__comm *comm = &me->comm;
    mlfab__comm_fail(&w->workers[0].comm, MLFAB_ERR_CANCELLED, 0, "test");
    for (int k = 0; k < 5000; k++) {
      if (comm->phase == MLFAB__COMM_ASKED && w->membership.entries[3].asked) break;
      (void)act_any();
    }
    if (comm->phase == MLFAB__COMM_ASKED && w->membership.entries[3].asked) {
      tried++;
      mlfab__comm_leave(comm);
      cut_off(me);
      act_some(500);
      break_up(3);
      mlfab__membership_gone(&w->membership, 3, 1, w->now);
      AWAIT(100 * BEAT, w->workers[0].comm.phase == MLFAB__COMM_IN);
    }
    close_world();
  }
  assert_true(tried > 10);
}

/* --- what a member may not send --- */

static void forge(worker *from, uint32_t to, const mlfab__coll *head, const void *bulk,
                  uint64_t bytes) {
  mlfab__streams *streams = &from->comm.streams;
  assert_int_equal(mlfab__stream_send(streams, streams->member_of[to] - 1, head, bulk, bytes, 1, 0),
                   0);
}

static void expect_drops(void) {
  act_some(2000);
  assert_true(w->drops > 0);
  w->drops = 0;
  close_world();
}

/* A READY is kept without credit, so it has no bytes. */
TEST(test_ready_with_bytes) {
  static const uint8_t bulk[4096];
  open_small(MLFAB_PARTIAL_SOLO, 0, MLFAB_PARTIAL_LATEST, seed_of(5));
  const mlfab__coll head = {
      .number = 1000000, .flags = MLFAB__COLL_READY, .signature = 1, .total = sizeof bulk};
  forge(&w->workers[1], 0, &head, bulk, sizeof bulk);
  expect_drops();
}

/* A message that counts for credit does so from its first byte to its last. */
TEST(test_flags_that_change) {
  static const uint8_t bulk[4800];
  open_world(2, seed_of(6));
  w->options.mode = MLFAB_PARTIAL_SOLO;
  w->options.results = MLFAB_PARTIAL_LATEST;
  w->options.algorithm = MLFAB_ALGORITHM_DOUBLING;
  w->count = sizeof bulk / 8;
  open_all();
  const mlfab__engine_run *run = w->workers[1].comm.engine.armed;
  while (run && run->number != 1) run = run->next;
  assert_non_null(run);
  uint32_t tag = 0;
  for (uint32_t id = 0; id < run->dag.nops; id++)
    if (run->dag.ops[id].kind == MLFAB__DAG_RECV_REDUCE && run->dag.ops[id].bytes == sizeof bulk)
      tag = run->dag.ops[id].tag;
  mlfab__coll head = {.channel = run->channel,
                      .number = 1,
                      .tag = tag,
                      .signature = run->signature,
                      .total = sizeof bulk};
  forge(&w->workers[1], 0, &head, bulk, sizeof bulk - 8);
  head.offset = sizeof bulk - 8;
  head.flags = MLFAB__COLL_EAGER;
  forge(&w->workers[1], 0, &head, bulk, 8);
  expect_drops();
}

/* --- who is to blame --- */

/* Until each has seen a failure, or `beats` are over. */
static void run_until_failure(uint64_t beats) {
  uint64_t end = w->now + beats * BEAT;
  for (int seen = 0; !seen && w->now < end;) {
    seen = 1;
    for (uint32_t i = 0; i < w->n; i++) {
      worker *me = &w->workers[i];
      if (me->alive && me->state == CALLING) seen = 0;
    }
    (void)act_any();
  }
}

/* All but one call, with a deadline. */
static void call_without(uint32_t rank, uint64_t timeout_ns) {
  for (uint32_t i = 0; i < w->n; i++)
    if (i != rank) assert_int_equal(call(&w->workers[i], timeout_ns), 0);
}

static void expect_all(int32_t code, int32_t rank, const char *part) {
  act_some(2000); /* until the verdict is everywhere */
  for (uint32_t i = 0; i < w->n; i++) {
    worker *me = &w->workers[i];
    if (!me->alive || me->state == DONE) continue;
    if (!me->failures) {
      mlfab_error error = {0};
      assert_int_equal(mlfab__comm_owed(&me->comm, &error), 1);
      saw_failure(me, error.code, error.rank, error.text);
    }
    assert_int_equal(me->code, code);
    assert_int_equal(me->rank, rank);
    if (!strstr(me->text, part)) fail_msg("\"%s\" is not in \"%s\"", part, me->text);
  }
}

TEST(test_majority_waits_for_the_drawn) {
  for (uint64_t seed = 1; seed < 9; seed++) {
    open_small(MLFAB_PARTIAL_MAJORITY, 0, MLFAB_PARTIAL_LATEST, seed_of(seed));
    /* Who it is shows when it alone does not call. */
    uint32_t drawn = drawn_for(&w->workers[0], 0);
    call_without(drawn, 6 * BEAT);
    run_until_failure(40);
    expect_all(MLFAB_ERR_TIMEOUT, (int32_t)drawn, "has not called it");
    close_world();
  }
}

TEST(test_quorum_waits_for_all) {
  for (uint32_t rank = 0; rank < 4; rank++) {
    open_small(MLFAB_PARTIAL_QUORUM, 4, MLFAB_PARTIAL_LATEST, seed_of(20 + rank));
    call_without(rank, 8 * BEAT);
    run_until_failure(40);
    expect_all(MLFAB_ERR_TIMEOUT, (int32_t)rank, "has not called it");
    close_world();
  }
}

TEST(test_full_queue) {
  open_small(MLFAB_PARTIAL_SOLO, 0, MLFAB_PARTIAL_QUEUED, seed_of(30));
  for (int step = 0; step < 3; step++) {
    call_without(2, 8 * BEAT);
    run_until_failure(40);
  }
  expect_all(MLFAB_ERR_TIMEOUT, 2, "has not called it");
  close_world();
}

static void call_and_wait(uint32_t rank, int times) {
  worker *me = &w->workers[rank];
  for (int k = 0; k < times; k++) {
    assert_int_equal(call(me, 0), 0);
    AWAIT(40 * BEAT, me->state == THINKING);
  }
  act_some(2000); /* the round is over at all */
}

/* A worker that lags is answered with the newest round, and its calls come together with the next. A queue that is full holds the
 * next round up, until a call takes a result; then the round takes the calls made meanwhile. */
TEST(test_lag) {
  open_small(MLFAB_PARTIAL_SOLO, 0, MLFAB_PARTIAL_LATEST, seed_of(31));
  call_and_wait(0, 6);
  call_and_wait(1, 3);
  const mlfab_partial_info *info = &w->workers[1].info;
  assert_true(info->round == 5 && info->step == 2 && info->stale == 3);
  call_and_wait(0, 1);
  assert_int_equal(w->rounds[6].data[1], 3);
  assert_int_equal(w->rounds[6].info.active, 1);
  close_world();

  open_small(MLFAB_PARTIAL_SOLO, 0, MLFAB_PARTIAL_QUEUED, seed_of(32));
  call_and_wait(0, 2);
  assert_int_equal(call(&w->workers[0], 0), 0);
  act_some(2000);
  assert_int_equal(w->workers[0].state, CALLING);
  for (uint32_t rank = 1; rank < w->n; rank++) assert_int_equal(call(&w->workers[rank], 0), 0);
  AWAIT(40 * BEAT, all_are(THINKING));
  for (uint32_t rank = 1; rank < w->n; rank++) {
    assert_int_equal(w->workers[rank].info.round, 0);
    assert_int_equal(w->workers[rank].info.stale, 1);
    assert_int_equal(w->rounds[2].data[rank], 1);
  }
  close_world();
}

/* A worker that dies, one that leaves, one that has closed the object. */
TEST(test_gone) {
  open_small(MLFAB_PARTIAL_QUORUM, 4, MLFAB_PARTIAL_LATEST, seed_of(40));
  call_without(1, 0);
  act_some(200);
  free_worker(1);
  mlfab__membership_gone(&w->membership, 1, 0, w->now);
  run_until_failure(40);
  expect_all(MLFAB_ERR_PEER_DEAD, 1, "worker 1");
  for (uint32_t i = 0; i < w->n; i++) w->workers[i].slowness = 1;
  run(6, 0, 0);
  for (uint32_t i = 0; i < w->n; i++)
    if (i != 1) assert_int_equal(w->workers[i].info.workers, 3);
  close_world();

  open_small(MLFAB_PARTIAL_MAJORITY, 0, MLFAB_PARTIAL_LATEST, seed_of(41));
  close_object(&w->workers[3], 0);
  w->workers[3].state = DONE;
  call_without(3, 0);
  run_until_failure(200);
  expect_all(MLFAB_ERR_PEER_CLOSED, 3, "has closed object");
  close_world();
}

/* One that closes when an epoch is over, before the next begins: that one stands, and only a step fails. */
TEST(test_closed_between_epochs) {
  static const uint32_t closers[] = {0, 2, 3};
  for (uint64_t seed = 0; seed < 3; seed++) {
    mlfab_error error;
    uint32_t closer = closers[seed];
    open_small(MLFAB_PARTIAL_QUORUM, 2, MLFAB_PARTIAL_LATEST, seed_of(70 + seed));
    worker *me = &w->workers[closer], *other = &w->workers[closer == 2 ? 3 : 2];
    free_worker(1);
    mlfab__membership_gone(&w->membership, 1, 0, w->now);
    AWAIT(40 * BEAT, me->comm.phase != MLFAB__COMM_IN);
    close_object(me, 0);
    assert_int_equal(mlfab__comm_owed(&me->comm, &error), 1); /* the death */
    assert_int_equal(error.code, MLFAB_ERR_PEER_DEAD);
    me->state = DONE;
    act_some(4000);
    uint32_t epoch = w->membership.epoch;
    act_some(20000);
    assert_int_equal(w->membership.epoch, epoch);
    assert_int_equal(me->comm.phase, MLFAB__COMM_IN);
    assert_int_equal(mlfab__comm_owed(&me->comm, &error), 0);
    assert_int_equal(call(other, 8 * BEAT), MLFAB_ERR_PEER_DEAD); /* as it had owed */
    assert_int_equal(call(other, 8 * BEAT), 0);
    other->failures = 0;
    AWAIT(40 * BEAT, other->failures);
    assert_int_equal(other->code, MLFAB_ERR_TIMEOUT);
    assert_int_equal(other->rank, closer);
    close_world();
  }
}

/* One that closes while links hold bytes of the round: it waits for it, or for the end of the epoch, and
 * then its memory stays until all actions are out. */
TEST(test_closed_while_lent) {
  for (uint64_t seed = 0; seed < 12; seed++) {
    open_world(3, seed_of(50 + seed));
    w->count = w->elements + 40000;
    w->options.mode = MLFAB_PARTIAL_SOLO;
    open_all();
    assert_int_equal(call(&w->workers[0], 0), 0);
    worker *me = &w->workers[1];
    const mlfab__engine_run *run = NULL;
    for (uint64_t end = w->now + 100000; !run;) {
      assert_true(w->now < end);
      (void)act_any();
      run = me->comm.engine.armed;
      while (run && !run->lent) run = run->next;
    }
    close_object(me, 0);
    close_object(me, MLFAB_ERR_ARGUMENT);
    assert_null(me->comm.graves);
    if (seed % 2) {
      mlfab__comm_fail(&me->comm, MLFAB_ERR_CANCELLED, 1, "test");
    } else {
      AWAIT(1000000, me->comm.graves);
      assert_int_equal(me->failures + w->workers[0].failures, 0);
    }
    assert_non_null(me->comm.graves);
    uint64_t bytes = w->env.bytes;
    mlfab__comm_sweep(&me->comm);
    assert_true(w->env.bytes + 2 * w->count * 8 < bytes);
    if (seed % 2 == 0) { /* the next round is missed, by name */
      me->state = DONE;
      while (w->workers[0].state == CALLING) (void)act_any();
      assert_int_equal(call(&w->workers[0], 0), 0);
      run_until_failure(200);
      expect_all(MLFAB_ERR_PEER_CLOSED, 1, "has closed object");
    }
    close_world();
  }
}

/* A frame of a round that is called later came early: whoever closes the object then is missing from that
 * round, and says so, whichever round it is. */
TEST(test_closed_before_a_round) {
  static const uint8_t bulk[64];
  for (uint64_t number = 64; number < 128; number++) {
    open_small(MLFAB_PARTIAL_SOLO, 0, MLFAB_PARTIAL_LATEST, seed_of(number));
    worker *me = &w->workers[1];
    const mlfab__coll head = {
        .channel = 1, .number = number, .flags = MLFAB__COLL_EAGER, .total = sizeof bulk};
    forge(&w->workers[0], 1, &head, bulk, sizeof bulk);
    AWAIT(100 * BEAT, me->comm.engine.stage_count > 0);
    close_object(me, 0);
    me->state = DONE;
    expect_all(MLFAB_ERR_PEER_CLOSED, 1, "has closed object 1");
    close_world();
  }
}

TEST(test_other_options) {
  open_world(4, seed_of(50));
  for (uint32_t i = 0; i < w->n; i++) {
    mlfab_partial_options options = w->options;
    if (i == 2) options.seed = w->options.seed + 12345;
    assert_int_equal(open_object(&w->workers[i], &options), 0);
  }
  for (int failed = 0; !failed;) {
    assert_true(w->now < 100 * BEAT);
    failed = 1;
    for (uint32_t i = 0; i < w->n; i++) failed &= w->workers[i].failures > 0;
    (void)act_any();
  }
  expect_all(MLFAB_ERR_MISMATCH, 2, "worker 2");
  for (uint32_t i = 0; i < w->n; i++) close_object(&w->workers[i], 0);
  close_world();
}

static void expect_refused(uint64_t count, int dtype, const mlfab_partial_options *options,
                           int code, const char *part) {
  worker *me = &w->workers[0];
  mlfab_error error = {0};
  uint32_t id;
  mlfab_request request;
  assert_int_equal(
      mlfab__partial_run_open(&me->comm, count, dtype, options, 0, w->now, &id, &request, &error),
      code);
  if (!strstr(error.text, part)) fail_msg("\"%s\" is not in \"%s\"", part, error.text);
  assert_int_equal(me->comm.objects_opened, 0);
}

TEST(test_refusals) {
  open_world(3, seed_of(60));
  mlfab_partial_options good = {.size = sizeof good, .mode = MLFAB_PARTIAL_SOLO}, bad = good;
  expect_refused(4, MLFAB_F32, NULL, MLFAB_ERR_ARGUMENT, "no options");
  expect_refused(4, 99, &good, MLFAB_ERR_DTYPE, "99 is not an element type");
  expect_refused(0, MLFAB_F32, &good, MLFAB_ERR_ARGUMENT, "no elements");
  expect_refused(1 << 29, MLFAB_F32, &good, MLFAB_ERR_LIMIT, "model_max_bytes");
  bad.mode = 4;
  expect_refused(4, MLFAB_F32, &bad, MLFAB_ERR_ARGUMENT, "4 is not a mode");
  bad = good;
  bad.mode = MLFAB_PARTIAL_QUORUM;
  expect_refused(4, MLFAB_F32, &bad, MLFAB_ERR_ARGUMENT, "quorum is 0");
  bad.quorum = 4;
  expect_refused(4, MLFAB_F32, &bad, MLFAB_ERR_ARGUMENT, "must be 1..3");
  bad = good;
  bad.op = MLFAB_OP_MEAN;
  expect_refused(4, MLFAB_I64, &bad, MLFAB_ERR_UNSUPPORTED, "MLFAB_OP_MEAN cannot be used");
  bad.op = MLFAB_OP_MAX;
  expect_refused(4, MLFAB_F32, &bad, MLFAB_ERR_ARGUMENT, "op is 3");
  bad = good;
  bad.results = 2;
  expect_refused(4, MLFAB_F32, &bad, MLFAB_ERR_ARGUMENT, "results is 2");
  bad = good;
  bad.queue_max = 1 << 20;
  expect_refused(4, MLFAB_F32, &bad, MLFAB_ERR_LIMIT, "queue_max");
  bad = good;
  bad.algorithm = MLFAB_ALGORITHM_PLANNED;
  expect_refused(4, MLFAB_F32, &bad, MLFAB_ERR_ARGUMENT, "not an algorithm");
  close_world();
}

/* NaN is refused alone; means; what is called while something is under way; two at once. */
TEST(test_floats) {
  enum { N = 2 };
  mlfab_partial_options options = {.size = sizeof options,
                                   .mode = MLFAB_PARTIAL_QUORUM,
                                   .quorum = N,
                                   .op = MLFAB_OP_MEAN,
                                   .refuse_nan = 1};
  mlfab_error error = {0};
  mlfab_request request;
  uint32_t ids[N];
  float data[N][2], model[N][3];
  open_world(N, seed_of(70));
  w->options.mode = MLFAB_PARTIAL_SOLO;
  w->options.results = MLFAB_PARTIAL_LATEST;
  open_all();
  for (uint32_t i = 0; i < N; i++) {
    assert_int_equal(mlfab__partial_run_open(&w->workers[i].comm, 2, MLFAB_F32, &options, 0, w->now,
                                             &ids[i], &w->workers[i].request, &error),
                     0);
    w->workers[i].state = OPENING;
  }
  while (!all_are(THINKING)) (void)act_any();
  for (uint32_t i = 0; i < N; i++) {
    mlfab__comm *comm = &w->workers[i].comm;
    data[i][0] = NAN;
    data[i][1] = 1;
    assert_int_equal(
        mlfab__partial_run_start(comm, ids[i], data[i], 0, w->now, NULL, &request, &error),
        MLFAB_ERR_NOT_FINITE);
    assert_int_equal(error.rank, i);
    data[i][0] = (float)i + 1;
    assert_int_equal(mlfab__partial_run_start(comm, ids[i], (char *)data[i] + 1, 0, w->now, NULL,
                                              &request, &error),
                     MLFAB_ERR_ARGUMENT);
    assert_int_equal(mlfab__partial_run_start(comm, 77, data[i], 0, w->now, NULL, &request, &error),
                     MLFAB_ERR_ARGUMENT);
    assert_int_equal(mlfab__partial_run_start(comm, ids[i], data[i], 0, w->now, NULL,
                                              &w->workers[i].request, &error),
                     0);
    if (i == 0) {
      assert_int_equal(
          mlfab__partial_run_start(comm, ids[i], data[i], 0, w->now, NULL, &request, &error),
          MLFAB_ERR_AGAIN);
      assert_int_equal(mlfab__partial_run_flush(comm, ids[i], data[i], 0, w->now, &request, &error),
                       MLFAB_ERR_AGAIN);
      assert_int_equal(mlfab__partial_run_close(comm, ids[i], &error), MLFAB_ERR_STATE);
    }
    w->workers[i].state = OPENING;
  }
  while (!all_are(THINKING)) (void)act_any();
  for (uint32_t i = 0; i < N; i++) {
    assert_true(data[i][0] == 1.5f && data[i][1] == 1.0f);
    for (uint32_t k = 0; k < 3; k++) model[i][k] = (float)(i * 2 + k);
    const mlfab_vec vec = {model[i], 3};
    const mlfab__comm_call mean = {.kind = MLFAB__COLLECTIVE_ALLREDUCE,
                                   .dtype = MLFAB_F32,
                                   .op = MLFAB_OP_MEAN,
                                   .vecs = &vec,
                                   .n = 1,
                                   .words = "an allreduce"};
    assert_int_equal(
        mlfab__comm_start(&w->workers[i].comm, &mean, 0, w->now, &w->workers[i].request, &error),
        0);
    w->workers[i].state = OPENING;
  }
  while (!all_are(THINKING)) (void)act_any();
  for (uint32_t i = 0; i < N; i++)
    for (uint32_t k = 0; k < 3; k++) assert_true(model[i][k] == (float)(1 + k));
  for (uint32_t i = 0; i < N; i++) w->workers[i].slowness = 1;
  run(5, 0, 0);
  check_conservation();
  close_world();
}

TESTS(NULL, NULL)
