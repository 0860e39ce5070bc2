/* test_partial.c - core/coll/partial.c by itself: the notices of a round, the draws of the worker that is waited for, what peers
 * cannot have said, and memory. test_partial_run.c has random rounds, against a ledger. */
#include "core/coll/partial.h"
#include "budget.h"
#include "chance.h"
#include "../testing.h"

enum { MEMBERS = 33 };

static mlfab__env env;
static uint32_t ranks[MEMBERS];

/* ---- notices */

static struct member {
  mlfab__partial partial;
  mlfab__dag dag;
} of[MEMBERS];
static struct { uint32_t from, to, tag; } notices[4 * MEMBERS * MEMBERS]; /* that are under way */
static uint32_t nnotices;

static void run(uint32_t me) {
  mlfab__dag *dag = &of[me].dag;
  for (uint32_t id; mlfab__dag_next(dag, &id);) {
    const mlfab__dag_op *op = &dag->ops[id];
    if (op->kind == MLFAB__DAG_RECV) continue; /* until its message is there */
    if (op->kind == MLFAB__DAG_COMPUTE)
      (void)mlfab__partial_compute(&of[me].partial, dag, 0, op->code);
    if (op->kind == MLFAB__DAG_SEND) {
      notices[nnotices].from = me;
      notices[nnotices].to = op->peer;
      notices[nnotices++].tag = op->tag;
    }
    mlfab__dag_done(dag, id);
  }
}

/* Two members begin a round, or all: everybody hears of it. Returns the number of notices. */
static uint32_t activate(uint32_t members, uint32_t first, uint32_t second, int all) {
  const mlfab__partial_spec spec = {.mode = MLFAB_PARTIAL_SOLO,
                                    .segment = 4096,
                                    .reduce_or = 6,
                                    .dtype = MLFAB_I64,
                                    .width = 8,
                                    .count = 3};
  uint64_t state = members * 1000003ull + first * 1009 + second;
  uint32_t sent = 0;
  for (uint32_t i = 0; i < members; i++) {
    mlfab__dag_init(&of[i].dag, &env);
    assert_int_equal(mlfab__partial_init(&of[i].partial, &env, &spec), 0);
    mlfab__partial_begin(&of[i].partial, members, i, ranks);
    assert_int_equal(mlfab__partial_build(&of[i].partial, &of[i].dag, MLFAB_ALGORITHM_RING), 0);
    mlfab__dag_start(&of[i].dag);
    run(i);
  }
  for (uint32_t i = 0; i < members; i++) {
    if (!all && i != first && i != second) continue;
    mlfab__dag_trigger(&of[i].dag, of[i].partial.plan.initiate);
    run(i);
  }
  for (; nnotices > 0; sent++) {
    const uint64_t k = chance_below(&state, nnotices);
    const uint32_t from = notices[k].from, to = notices[k].to;
    const uint32_t id = mlfab__dag_find_recv(&of[to].dag, from, notices[k].tag);
    notices[k] = notices[--nnotices];
    assert_int_not_equal(id, MLFAB__DAG_NONE);
    assert_int_equal(mlfab__dag_state(&of[to].dag, id), MLFAB__DAG_RUNNING);
    mlfab__dag_done(&of[to].dag, id);
    run(to);
  }
  assert_true(sent <= members * of[0].partial.levels);
  for (uint32_t i = 0; i < members; i++) {
    mlfab__dag_trigger(&of[i].dag, of[i].partial.plan.take); /* it waits for nothing else */
    assert_int_equal(mlfab__dag_state(&of[i].dag, of[i].partial.plan.take), MLFAB__DAG_READY);
    mlfab__dag_free(&of[i].dag);
    mlfab__partial_free(&of[i].partial);
  }
  return sent;
}

TEST(test_activation) {
  for (uint32_t members = 1; members <= MEMBERS; members++) {
    for (uint32_t a = 0; a < members; a++)
      assert_int_equal(activate(members, a, a, 0), members - 1);
    for (uint32_t b = 1; b < members; b++)
      (void)activate(members, b * 7 % members, (b * 7 + b) % members, 0);
    (void)activate(members, 0, 0, 1);
  }
  assert_int_equal(env.bytes, 0);
}

/* Draws are uniform, chi squared at p = 0.001, and not the same from round to round. */
TEST(test_draws) {
  enum { DRAWS = 32 * 1024 };
  mlfab__partial partial = {0};
  uint32_t seen[32] = {0}, again = 0, last = 32;
  double chi = 0;
  partial.members = 32;
  partial.spec.seed = 7;
  for (uint32_t r = 0; r < DRAWS; r++) {
    uint32_t drawn = mlfab__partial_draw(&partial, r);
    assert_in_range(drawn, 0, 31);
    seen[drawn]++;
    again += drawn == last;
    last = drawn;
  }
  for (uint32_t i = 0; i < 32; i++) {
    double off = (double)seen[i] - DRAWS / 32;
    chi += off * off / (DRAWS / 32);
  }
  assert_true(chi < 61.1); /* 31 degrees of freedom */
  assert_in_range(again, DRAWS / 32 - 100, DRAWS / 32 + 100);
}

/* A word of a peer that cannot be true about the beginning of an epoch changes nothing. */
TEST(test_settle) {
  static const mlfab__partial_mark wrong[] = {{3, 1}, {0, 1}, {4, 0}};
  const mlfab__partial_spec spec = {.dtype = MLFAB_I64, .width = 8, .count = 3};
  mlfab__partial partial;
  assert_int_equal(mlfab__partial_init(&partial, &env, &spec), 0);
  mlfab__partial_begin(&partial, 1, 0, ranks);
  partial.over = partial.given = 3;
  mlfab__partial_mark_epoch(&partial, 1);
  for (size_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    partial.marks.now = wrong[i];
    assert_int_equal(mlfab__partial_settle(&partial, 1), MLFAB_ERR_FRAME);
    assert_false(partial.settled);
  }
  mlfab__partial_mark_epoch(&partial, 1);
  assert_int_equal(mlfab__partial_settle(&partial, 1), 0);
  assert_true(partial.settled);
  mlfab__partial_free(&partial);
}

/* ---- memory */

TEST(test_memory) {
  mlfab__env poor;
  budget b = {0, 0};
  mlfab_env hooks = budget_env(&b);
  mlfab__partial_spec spec = {.mode = MLFAB_PARTIAL_QUORUM,
                              .quorum = 2,
                              .results = MLFAB_PARTIAL_QUEUED,
                              .queue_max = 2,
                              .reduce_or = 6,
                              .dtype = MLFAB_F32,
                              .width = 4,
                              .count = 1000};
  int rc = MLFAB_ERR_MEMORY;
  assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
  for (uint64_t k = 0; rc; k++) {
    mlfab__partial partial;
    mlfab__dag dag;
    b.left = k;
    mlfab__dag_init(&dag, &poor);
    rc = mlfab__partial_init(&partial, &poor, &spec);
    if (rc == 0) {
      mlfab__partial_begin(&partial, 3, 1, ranks);
      rc = mlfab__partial_build(&partial, &dag, MLFAB_ALGORITHM_RING);
      mlfab__partial_free(&partial);
    }
    assert_true(rc == 0 || rc == MLFAB_ERR_MEMORY);
    mlfab__dag_free(&dag);
    assert_int_equal(poor.bytes, 0);
    assert_int_equal(b.bytes, 0);
  }
  spec.count = UINT64_MAX / 8;
  mlfab__partial partial;
  assert_int_equal(mlfab__partial_init(&partial, &env, &spec), MLFAB_ERR_MEMORY);
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  for (uint32_t i = 0; i < MEMBERS; i++) ranks[i] = i;
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
