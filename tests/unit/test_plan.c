/* test_plan.c - core/sched/order.c, group.c, distribute.c and plan.c: refusals, extreme inputs and allocations that fail.
 * process/plan_test.py has the vectors, test_order.c random batches. */
#include "core/sched/plan.h"

#include <math.h>
#include "budget.h"
#include "../testing.h"

enum { MOST = 64 };

static mlfab__env env;
static mlfab__planner planner;

static struct {
  mlfab__network net;
  mlfab__batch b;
  mlfab__candidate updates[MOST];
  double bytes[MOST][1];
  uint32_t server[1], aggregators[1];
} it; /* the batch under test */

/* Two workers, a server and an aggregator, all rates 10. */
static void small_batch(void) {
  memset(&it, 0, sizeof it);
  assert_int_equal(mlfab__network_init(&it.net, &env, 4, 0), 0);
  for (uint32_t i = 0; i < 4; i++) {
    assert_int_equal(mlfab__network_constant(&it.net, MLFAB__EGRESS, i, 10), 0);
    assert_int_equal(mlfab__network_constant(&it.net, MLFAB__INGRESS, i, 10), 0);
  }
  for (uint32_t i = 0; i < 2; i++) {
    it.bytes[i][0] = 10;
    it.updates[i] = (mlfab__candidate){.id = i, .node = i, .bytes = it.bytes[i]};
  }
  it.server[0] = 2;
  it.aggregators[0] = 3;
  it.b = (mlfab__batch){.updates = it.updates,
                        .n = 2,
                        .server = it.server,
                        .servers = 1,
                        .aggregators = it.aggregators,
                        .k = 1,
                        .delay_bound = INT64_MAX};
}

/* Grouping alone, of the first n updates. */
static mlfab__group_input small_group(uint32_t n) {
  return (mlfab__group_input){.updates = it.updates,
                              .n = n,
                              .server = it.server,
                              .servers = 1,
                              .aggregators = it.aggregators,
                              .k = 1};
}

static int plan_small(mlfab__planned planned[2], uint32_t *applied_p, double *time_p) {
  mlfab__group_choice choice = {0};
  int code = mlfab__plan_batch(&planner, &it.net, &it.b, planned, applied_p, &choice);
  *time_p = choice.time;
  if (code) assert_int_equal(mlfab__network_mark(&it.net), 0);
  mlfab__network_free(&it.net);
  return code;
}

TEST(test_refusals) {
  for (int what = 0; what < 10; what++) {
    mlfab__planned planned[2];
    uint32_t applied;
    double time;
    small_batch();
    if (what == 0) it.server[0] = 4;
    if (what == 1) it.aggregators[0] = UINT32_MAX;
    if (what == 2) it.updates[1].node = 4;
    if (what == 3) it.updates[1].available = -1;
    if (what == 4) it.updates[1].available = (double)NAN;
    if (what == 5) it.bytes[0][0] = -1;
    if (what == 6) it.bytes[0][0] = (double)INFINITY;
    if (what == 7) it.bytes[0][0] = (double)NAN;
    if (what == 8) it.b.backlog = (double)NAN;
    if (what == 9) it.b.servers = 0;
    assert_int_equal(plan_small(planned, &applied, &time), MLFAB_ERR_ARGUMENT);
  }
}

/* Grouping alone: an invalid size is refused, an empty batch is valid; a failure leaves nothing reserved. */
TEST(test_group_refusals) {
  const double sizes[] = {-1, (double)INFINITY, -(double)INFINITY, (double)NAN, 0};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    mlfab__grouped out[2];
    mlfab__group_choice choice;
    small_batch();
    mlfab__group_input in = small_group(2);
    it.bytes[1][0] = sizes[k];
    int code = mlfab__group_plan(&planner.grouper, &it.net, &in, 0, out, &choice);
    assert_int_equal(code, k == 4 ? 0 : MLFAB_ERR_ARGUMENT);
    if (code) assert_int_equal(mlfab__network_mark(&it.net), 0);
    mlfab__network_free(&it.net);
  }
}

TEST(test_extremes) {
  mlfab__planned p[2];
  uint32_t applied;
  double time;
  small_batch(); /* an empty batch */
  it.b.n = 0;
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 0 && time == 0);
  small_batch(); /* one update, which can never start */
  it.b.n = 1;
  it.updates[0].available = mlfab__network_never();
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 0 && p[0].fate == MLFAB__PLAN_DROPPED &&
              p[0].reason == MLFAB__UNREACHABLE);
  small_batch(); /* a bound of 0 admits none; a bound of 1 admits one with delay 0 */
  it.b.delay_bound = 0;
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 0 && p[0].reason == MLFAB__EXPIRED && p[1].reason == MLFAB__EXPIRED);
  small_batch();
  it.b.delay_bound = 1;
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 1 && p[0].reason == MLFAB__DEADLINE && p[0].delay == 0 &&
              p[1].reason == MLFAB__EXPIRED && p[1].delay == 1);
  small_batch(); /* versions at the ends of their range */
  it.b.version = INT64_MIN;
  it.updates[0].version = INT64_MAX;
  it.updates[1].version = INT64_MIN;
  it.b.delay_bound = INT64_MAX - 1;
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 2 && p[0].delay == INT64_MIN && p[1].delay == 1);
  small_batch(); /* a cut server, in a list */
  it.b.list = 1;
  assert_int_equal(mlfab__network_constant(&it.net, MLFAB__INGRESS, 2, 0), 0);
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 0 && !mlfab__finite(time) && p[0].fate == MLFAB__PLAN_DROPPED);
  small_batch(); /* a backlog lets the first group be aggregated */
  it.b.backlog = 2;
  assert_int_equal(mlfab__network_constant(&it.net, MLFAB__INGRESS, 3, 20), 0);
  mlfab__stretch booked = {0, 2, 10};
  assert_int_equal(
      mlfab__network_capacity(&it.net, MLFAB__INGRESS, 2, 2, (double[]){booked.from, booked.to},
                              (double[]){0, booked.rate}),
      0);
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 2 && p[0].group == 1 && p[1].group == 1 && time == 3);
}

/* A member that arrives late at twice the rate of the server's link, and one that arrives before it: the
 * sum's first byte leaves with the late member's first byte, though t_max is 0. */
TEST(test_cut_through) {
  mlfab__grouped out[2];
  for (int late = 0; late < 2; late++) {
    double time;
    small_batch();
    it.updates[1].available = 0.5;
    for (uint32_t i = 0; i < 2; i++) {
      assert_int_equal(mlfab__network_constant(&it.net, MLFAB__EGRESS, i, 20), 0);
    }
    assert_int_equal(mlfab__network_constant(&it.net, MLFAB__INGRESS, 3, 20), 0);
    mlfab__group_input in = small_group(2);
    in.cut = 1;
    uint32_t variant = late ? MLFAB__GROUP_PAPER | MLFAB__GROUP_LATE : MLFAB__GROUP_PAPER;
    assert_int_equal(mlfab__group_case(&planner.grouper, &it.net, &in, variant, 0, 2, out, &time),
                     0);
    if (!late) {
      assert_false(mlfab__finite(time));
    } else {
      assert_true(time == 1.5 && out[0].arrive == 0.5 && out[1].arrive == 1);
      assert_true(out[1].number == 1 && out[1].ready == 1 && out[1].end == 1.5);
      /* Before 0.5 the server's link is still free. */
      const mlfab__profile *left = mlfab__network_residual(&it.net, MLFAB__INGRESS, 2);
      assert_true(left->n == 3 && left->steps[0].rate == 10);
      assert_true(left->steps[1].at == 0.5 && left->steps[1].rate == 0);
    }
    mlfab__network_free(&it.net);
  }
}

/* ---- out of memory ---- */

/* Many updates, of which update i is there at `apart` times i. */
static void full_batch(double apart) {
  small_batch();
  for (uint32_t i = 0; i < MOST; i++) {
    it.bytes[i][0] = 10;
    it.updates[i] =
        (mlfab__candidate){.id = i, .node = i % 2, .available = apart * i, .bytes = it.bytes[i]};
  }
  it.b.n = MOST;
}

/* A run after which the batch is planned, or nothing is reserved. */
static int plan_and_reduce(mlfab__planner *small, budget *memory, uint64_t most) {
  mlfab__planned planned[MOST];
  mlfab__delivery get[MOST];
  mlfab__grouped push[MOST];
  mlfab__group_choice up, down;
  uint32_t applied, nodes[MOST];
  double makespan, available[MOST] = {0};
  full_batch(0);
  it.b.cut = 1;
  for (uint32_t i = 0; i < MOST; i++) nodes[i] = i % 4;
  mlfab__allreduce a = {.root = 1,
                        .bytes = 10,
                        .aggregators = it.aggregators,
                        .distributors = it.aggregators,
                        .k = 1,
                        .distributors_k = 1,
                        .nodes = nodes,
                        .available = available,
                        .n = MOST};
  memory->left = most;
  int code = mlfab__plan_batch(small, &it.net, &it.b, planned, &applied, NULL);
  if (code) return code;
  mlfab__network_undo(&it.net, 0);
  code = mlfab__group_allreduce(&small->grouper, &it.net, &a, push, get, &up, &down, &makespan);
  if (code) return code;
  /* The root has its own part from the start, and the sum when the last of the others' parts has arrived. */
  assert_int_equal(nodes[1], a.root);
  assert_true(push[1].ready == 0 && push[1].commit == 0 && get[1].end == up.time);
  return 0;
}

/* Grouping alone, in a network without spare room. */
static int group(mlfab__planner *small, budget *memory, uint64_t most) {
  mlfab__grouped out[MOST];
  mlfab__group_choice choice;
  full_batch(3.0);
  mlfab__group_input in = small_group(MOST);
  in.k = most % 2;
  /* One that never arrives: the others go directly, as many as precede it. */
  if (most / 2 % 2) it.updates[MOST - 1].available = mlfab__network_never();
  memory->left = most / 4;
  return mlfab__group_plan(&small->grouper, &it.net, &in, 0, out, &choice);
}

/* Fails one allocation of each run in turn: the failure is reported, and nothing stays reserved. */
TEST(test_memory) {
  static int (*const runs[])(mlfab__planner *, budget *, uint64_t) = {plan_and_reduce, group};
  budget memory = {0, 0};
  mlfab_env hooks = budget_env(&memory);
  const mlfab__env before = env;
  for (size_t k = 0; k < MLFAB__COUNT(runs); k++) {
    int code = MLFAB_ERR_MEMORY;
    for (uint64_t most = 0; code; most++) {
      mlfab__planner small;
      assert_int_equal(mlfab__env_init(&env, &hooks), 0);
      mlfab__planner_init(&small, &env);
      memory.left = 1000;
      code = runs[k](&small, &memory, most);
      assert_true(code == 0 || code == MLFAB_ERR_MEMORY);
      if (code) assert_int_equal(mlfab__network_mark(&it.net), 0);
      mlfab__planner_free(&small);
      mlfab__network_free(&it.net);
      assert_int_equal(env.bytes, 0);
      assert_true(most < 1000);
    }
  }
  env = before;
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  mlfab__planner_init(&planner, &env);
  int failed = testing_run(argc - 1, argv + 1, NULL, NULL);
  mlfab__planner_free(&planner);
  return failed || env.bytes != 0;
}
