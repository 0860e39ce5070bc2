/* test_dag.c - task graphs against a literal executor that looks at every operation after every
 * event, over random graphs and several rounds; what seal refuses; memory. MLFAB_SEED=n one random
 * task graph alone, MLFAB_SCALE=100 a hundred times as many. */
#include "core/coll/dag.h"
#include "core/base/rng.h"

#include "budget.h"
#include "../testing.h"

enum { OPS = 24, EDGES = 96 };

static mlfab__env env;

static uint32_t below(mlfab__rng *prng, uint32_t bound) {
  return (uint32_t)mlfab__rng_below(prng, bound);
}

/* ---- the literal executor */

typedef struct literal {
  uint32_t nops, nedges;
  mlfab__dag_op ops[OPS];
  uint32_t op[EDGES], dependency[EDGES];
  uint8_t come[EDGES]; /* the edge's dependency is done */
  uint8_t done[OPS], triggered[OPS], started[OPS], enabled[OPS];
  uint32_t queue[OPS], queue_head, queue_end;
} literal;

static uint32_t degree(const literal *l, uint32_t id) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < l->nedges; i++) n += l->op[i] == id;
  return n;
}

static int may_start(const literal *l, uint32_t id) {
  uint32_t come = l->triggered[id], all = degree(l, id) + l->ops[id].outside;
  for (uint32_t i = 0; i < l->nedges; i++) come += l->op[i] == id && l->come[i];
  return come >= (l->ops[id].need ? l->ops[id].need : all);
}

static void look(literal *l, uint32_t id) {
  if (l->enabled[id] || !may_start(l, id)) return;
  l->enabled[id] = 1;
  l->queue[l->queue_end++] = id;
}

static int all_done(const literal *l) {
  for (uint32_t i = 0; i < l->nops; i++)
    if (!l->ops[i].optional && !l->done[i]) return 0;
  return 1;
}

/* An acyclic graph in a random order; need within what there is. */
static void draw(literal *l, mlfab__rng *prng) {
  uint32_t order[OPS];
  memset(l, 0, sizeof *l);
  l->nops = 1 + below(prng, OPS);
  for (uint32_t i = 0; i < l->nops; i++) {
    uint32_t j = below(prng, i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  uint32_t wanted = l->nops < 2 ? 0 : below(prng, EDGES < 4 * l->nops ? EDGES : 4 * l->nops);
  for (; l->nedges < wanted; l->nedges++) {
    uint32_t from = below(prng, l->nops - 1), to = from + 1 + below(prng, l->nops - 1 - from);
    l->op[l->nedges] = order[to];
    l->dependency[l->nedges] = order[from];
  }
  for (uint32_t i = 0; i < l->nops; i++) {
    mlfab__dag_op *op = &l->ops[i];
    op->kind = (uint8_t)below(prng, 5);
    op->outside = below(prng, 4) == 0;
    op->optional = below(prng, 5) == 0;
    op->peer = below(prng, 3);
    op->tag = i;
    if (below(prng, 2)) op->need = below(prng, degree(l, i) + op->outside + 1);
  }
}

static void build(mlfab__dag *dag, const literal *l) {
  uint32_t id, culprit;
  for (uint32_t i = 0; i < l->nops; i++) {
    assert_int_equal(mlfab__dag_add(dag, &l->ops[i], &id), 0);
    assert_int_equal(id, i);
  }
  for (uint32_t i = 0; i < l->nedges; i++)
    assert_int_equal(mlfab__dag_after(dag, l->op[i], l->dependency[i]), 0);
  assert_int_equal(mlfab__dag_seal(dag, &culprit), 0);
  assert_int_equal(culprit, MLFAB__DAG_NONE);
}

/* ---- rounds */

static void compare(const mlfab__dag *dag, const literal *l) {
  for (uint32_t i = 0; i < l->nops; i++) {
    int state = l->done[i]      ? MLFAB__DAG_DONE
                : l->started[i] ? MLFAB__DAG_RUNNING
                : l->enabled[i] ? MLFAB__DAG_READY
                                : MLFAB__DAG_WAITING;
    assert_int_equal(mlfab__dag_state(dag, i), state);
  }
  assert_int_equal(mlfab__dag_finished(dag), all_done(l));
}

static void run_next(mlfab__dag *dag, literal *l) {
  uint32_t id = 0;
  int some = mlfab__dag_next(dag, &id);
  assert_int_equal(some, l->queue_head < l->queue_end);
  if (!some) return;
  assert_int_equal(id, l->queue[l->queue_head++]);
  assert_false(l->started[id]);
  l->started[id] = 1;
}

static void end_one(mlfab__dag *dag, literal *l, uint32_t id) {
  if (!l->started[id] || l->done[id]) return;
  mlfab__dag_done(dag, id);
  l->done[id] = 1;
  for (uint32_t i = 0; i < l->nedges; i++) {
    if (l->dependency[i] != id) continue;
    l->come[i] = 1;
    look(l, l->op[i]);
  }
}

static void trigger_one(mlfab__dag *dag, literal *l, uint32_t id) {
  mlfab__dag_trigger(dag, id);
  if (l->ops[id].outside) l->triggered[id] = 1;
  look(l, id);
}

/* A round, sometimes given up in the middle; otherwise everything runs in the end. */
static void run(mlfab__dag *dag, literal *l, mlfab__rng *prng) {
  uint32_t events = below(prng, 4) ? 12 * OPS : below(prng, 2 * OPS);
  memset(l->come, 0, sizeof l->come);
  memset(l->done, 0, sizeof l->done);
  memset(l->triggered, 0, sizeof l->triggered);
  memset(l->started, 0, sizeof l->started);
  memset(l->enabled, 0, sizeof l->enabled);
  l->queue_head = l->queue_end = 0;
  mlfab__dag_start(dag);
  for (uint32_t i = 0; i < l->nops; i++) look(l, i);
  compare(dag, l);
  for (uint32_t e = 0; e < events; e++) {
    uint32_t what = below(prng, 5), id = below(prng, l->nops);
    if (what < 2) run_next(dag, l);
    if (what == 2 || what == 3) end_one(dag, l, id);
    if (what == 4) trigger_one(dag, l, id);
    compare(dag, l);
  }
  if (events < 12 * OPS) return;
  for (uint32_t again = 0; again <= l->nops; again++) {
    for (uint32_t i = 0; i < l->nops; i++) {
      trigger_one(dag, l, i);
      run_next(dag, l);
    }
    for (uint32_t i = 0; i < l->nops; i++) end_one(dag, l, i);
  }
  for (uint32_t i = 0; i < l->nops; i++)
    assert_int_equal(mlfab__dag_state(dag, i), MLFAB__DAG_DONE);
  assert_true(mlfab__dag_finished(dag));
}

static void check_recvs(const mlfab__dag *dag, const literal *l) {
  for (uint32_t peer = 0; peer < 4; peer++) {
    for (uint32_t tag = 0; tag < OPS + 2; tag++) {
      uint32_t found = MLFAB__DAG_NONE;
      for (uint32_t i = 0; i < l->nops; i++) {
        int recv = l->ops[i].kind == MLFAB__DAG_RECV || l->ops[i].kind == MLFAB__DAG_RECV_REDUCE;
        if (recv && l->ops[i].peer == peer && l->ops[i].tag == tag) found = i;
      }
      assert_int_equal(mlfab__dag_find_recv(dag, peer, tag), found);
    }
  }
}

TEST(test_rounds) {
  mlfab__dag dag;
  mlfab__dag_init(&dag, &env);
  for (SEEDS(seed, 3000)) {
    static literal l;
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    draw(&l, &prng);
    mlfab__dag_clear(&dag);
    build(&dag, &l);
    check_recvs(&dag, &l);
    assert_false(mlfab__dag_finished(&dag));
    uint64_t allocations = env.allocations;
    for (uint64_t round = 0; round < 3; round++) {
      assert_int_equal(dag.round, round);
      run(&dag, &l, &prng);
    }
    assert_int_equal(env.allocations, allocations);
    mlfab__dag_clear(&dag);
    build(&dag, &l);
    assert_int_equal(env.allocations, allocations);
    run(&dag, &l, &prng);
  }
  mlfab__dag_free(&dag);
  assert_int_equal(env.bytes, 0);
}

/* ---- refusals */

static void reach(const literal *l, uint8_t way[OPS][OPS]) {
  memset(way, 0, OPS * OPS);
  for (uint32_t i = 0; i < l->nedges; i++) way[l->dependency[i]][l->op[i]] = 1;
  for (uint32_t k = 0; k < l->nops; k++)
    for (uint32_t i = 0; i < l->nops; i++)
      for (uint32_t j = 0; j < l->nops; j++) way[i][j] |= way[i][k] & way[k][j];
}

TEST(test_cycles) {
  uint32_t cyclic = 0;
  for (SEEDS(seed, 3000)) {
    static literal l;
    static uint8_t way[OPS][OPS];
    mlfab__rng prng;
    mlfab__dag dag;
    uint32_t id, culprit;
    int wanted = 0;
    mlfab__rng_seed(&prng, seed);
    draw(&l, &prng);
    for (uint32_t i = below(&prng, 3); i > 0 && l.nedges < EDGES; i--, l.nedges++) {
      l.op[l.nedges] = below(&prng, l.nops);
      l.dependency[l.nedges] = below(&prng, l.nops);
    }
    reach(&l, way);
    for (uint32_t i = 0; i < l.nops; i++) wanted |= way[i][i];
    mlfab__dag_init(&dag, &env);
    for (uint32_t i = 0; i < l.nops; i++) assert_int_equal(mlfab__dag_add(&dag, &l.ops[i], &id), 0);
    for (uint32_t i = 0; i < l.nedges; i++)
      assert_int_equal(mlfab__dag_after(&dag, l.op[i], l.dependency[i]), 0);
    assert_int_equal(mlfab__dag_seal(&dag, &culprit), wanted ? MLFAB_ERR_ARGUMENT : 0);
    assert_int_equal(dag.flaw, wanted ? MLFAB__DAG_CYCLE : MLFAB__DAG_SOUND);
    if (wanted) assert_true(culprit < l.nops && way[culprit][culprit]);
    cyclic += (uint32_t)wanted;
    mlfab__dag_free(&dag);
  }
  if (testing_whole()) assert_true(cyclic > 500);
}

TEST(test_refusals) {
  mlfab__dag_op send = {.kind = MLFAB__DAG_SEND, .peer = 1, .tag = 7};
  mlfab__dag_op recv = {.kind = MLFAB__DAG_RECV, .peer = 1, .tag = 7};
  mlfab__dag_op reduce = {.kind = MLFAB__DAG_RECV_REDUCE, .peer = 1, .tag = 7};
  mlfab__dag_op need = {.kind = MLFAB__DAG_NOP, .need = 2, .outside = 1};
  mlfab__dag dag;
  uint32_t id, culprit;
  mlfab__dag_init(&dag, &env);
  assert_int_equal(mlfab__dag_after(&dag, 0, 0), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__dag_seal(&dag, &culprit), 0); /* nothing to do is over at once */
  mlfab__dag_start(&dag);
  assert_int_equal(mlfab__dag_next(&dag, &id), 0);
  assert_true(mlfab__dag_finished(&dag));
  /* A SEND and a RECV may have the same peer and tag, two of one may not. */
  assert_int_equal(mlfab__dag_add(&dag, &send, &id), 0);
  assert_int_equal(mlfab__dag_add(&dag, &recv, &id), 0);
  assert_int_equal(mlfab__dag_seal(&dag, &culprit), 0);
  assert_int_equal(mlfab__dag_after(&dag, 2, 0), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__dag_after(&dag, 0, 2), MLFAB_ERR_ARGUMENT);
  assert_int_equal(dag.sealed, 1);
  assert_int_equal(mlfab__dag_add(&dag, &reduce, &id), 0);
  assert_int_equal(dag.sealed, 0);
  assert_int_equal(mlfab__dag_seal(&dag, &culprit), MLFAB_ERR_ARGUMENT);
  assert_int_equal(culprit, 2);
  assert_int_equal(dag.flaw, MLFAB__DAG_TWICE);
  mlfab__dag_clear(&dag);
  assert_int_equal(mlfab__dag_add(&dag, &send, &id), 0);
  assert_int_equal(mlfab__dag_add(&dag, &send, &id), 0);
  assert_int_equal(mlfab__dag_seal(&dag, &culprit), MLFAB_ERR_ARGUMENT);
  assert_int_equal(culprit, 1);
  /* Two, where one dependency and the trigger make two; then where they do not. */
  mlfab__dag_clear(&dag);
  assert_int_equal(mlfab__dag_add(&dag, &send, &id), 0);
  assert_int_equal(mlfab__dag_add(&dag, &need, &id), 0);
  assert_int_equal(mlfab__dag_seal(&dag, &culprit), MLFAB_ERR_ARGUMENT);
  assert_int_equal(culprit, 1);
  assert_int_equal(dag.flaw, MLFAB__DAG_NEED);
  assert_int_equal(mlfab__dag_after(&dag, 1, 0), 0);
  assert_int_equal(mlfab__dag_seal(&dag, &culprit), 0);
  mlfab__dag_free(&dag);
  assert_int_equal(env.bytes, 0);
}

/* ---- memory */

static budget memory;

/* A chain long enough to grow everything, with the k-th allocation failing. 1 when none did. */
static int chain_with(mlfab__env *poor, uint64_t k) {
  mlfab__dag_op op = {.kind = MLFAB__DAG_SEND};
  mlfab__dag dag;
  uint32_t id, culprit;
  int rc = 0;
  memory.left = k;
  mlfab__dag_init(&dag, poor);
  for (op.tag = 0; rc == 0 && op.tag < 100; op.tag++) {
    rc = mlfab__dag_add(&dag, &op, &id);
    if (rc) assert_int_equal(dag.nops, op.tag);
    if (rc == 0 && op.tag) rc = mlfab__dag_after(&dag, op.tag, op.tag - 1);
  }
  if (rc == 0) rc = mlfab__dag_seal(&dag, &culprit);
  if (rc) assert_int_equal(rc, MLFAB_ERR_MEMORY);
  /* What there is can be used once there is memory. */
  memory.left = 1;
  assert_int_equal(mlfab__dag_seal(&dag, &culprit), 0);
  mlfab__dag_start(&dag);
  for (uint32_t i = 0; i < dag.nops && mlfab__dag_next(&dag, &id); i++) mlfab__dag_done(&dag, id);
  assert_true(mlfab__dag_finished(&dag));
  mlfab__dag_free(&dag);
  return rc == 0;
}

TEST(test_memory) {
  mlfab_env hooks = budget_env(&memory);
  mlfab__env poor;
  uint64_t k = 0;
  assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
  while (!chain_with(&poor, k)) {
    k++;
    assert_true(k < 100);
  }
  assert_true(k >= 5);
  assert_int_equal(poor.bytes, 0);
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
