/* test_arrange.c - the scheduler role: trees of allreduce over networks of random links.
 *
 * Not compared with another planner (test_group and the vectors do that). The tests check that the answer
 * is a tree over the ranks of the request with at most two steps, that the ranks that add for others have
 * the best links, and that the tree is not slower than sending everything to the root, measured by the time
 * of the most loaded link. */
#include "core/sched/scheduler.h"

#include <setjmp.h>
#include <stdlib.h>
#include <cmocka.h>

enum { WORKERS = 200 };

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__scheduler *s;
  mlfab__rng prng;
  mlfab__tree_plan plan;
  mlfab__tree_node nodes[MLFAB__TREE_NODES_MAX];
  uint32_t answers, drops;
  uint64_t host[WORKERS];
  double in[WORKERS], out[WORKERS]; /* of the worker's host */
} fixture;

static void port_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  fixture *f = self;
  assert_int_equal(peer, 0);
  assert_int_equal(type, MLFAB__TREE_PLAN);
  assert_int_equal(mlfab__decode_tree_plan(meta, bytes, &f->plan, f->nodes), 0);
  f->answers++;
}
static void port_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void port_drop(void *self, uint32_t peer, int code, const char *text) {
  fixture *f = self;
  (void)peer, (void)code, (void)text;
  f->drops++;
}
static void port_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void port_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static int open_scheduler(void **state) {
  static fixture f;
  mlfab__port port = {&f, port_post, port_ready, port_drop, port_detach, port_event, NULL, NULL};
  memset(&f, 0, sizeof f);
  assert_int_equal(mlfab__env_init(&f.env, NULL), 0);
  mlfab_config_init(&f.config);
  f.config.workers = WORKERS;
  f.config.servers = 1;
  f.config.heartbeat_ns = 500000000;
  f.config.seed = 5;
  mlfab__rng_seed(&f.prng, 5);
  assert_int_equal(mlfab__scheduler_create(&f.env, &f.config, &port, &f.stats, &f.s), 0);
  mlfab__scheduler_hello(f.s, 0, 0);
  *state = &f;
  return 0;
}

static int close_scheduler(void **state) {
  fixture *f = *state;
  mlfab__scheduler_destroy(&f->s);
  assert_int_equal(f->env.bytes, 0);
  return 0;
}

static void tell(fixture *f, uint8_t type, const uint8_t *meta, uint32_t bytes) {
  mlfab__frame_in in = {type, bytes, 0, meta, NULL};
  mlfab__scheduler_frame(f->s, 0, &in, 1000);
}

/* A worker on a host, with the capacities of its links. */
static void station(fixture *f, uint32_t worker, uint64_t host, double in, double out) {
  mlfab__station station = {worker, 1, 1, 2, host};
  mlfab__capacity capacity = {host, in, out};
  uint8_t meta[64];
  tell(f, MLFAB__STATION, meta, mlfab__encode_station(meta, &station));
  tell(f, MLFAB__CAPACITY, meta, mlfab__encode_capacity(meta, &capacity));
  for (uint32_t w = 0; w < WORKERS; w++) {
    if (f->host[w] == host || w == worker) f->host[w] = host, f->in[w] = in, f->out[w] = out;
  }
}

static void ask(fixture *f, uint32_t root, const uint32_t *ranks, uint32_t n) {
  uint8_t meta[8 * WORKERS];
  mlfab__tree_ask ask = {77, 1000000, root, n};
  f->answers = 0;
  tell(f, MLFAB__TREE_ASK, meta, mlfab__encode_tree_ask(meta, &ask, ranks));
  assert_int_equal(f->answers, 1);
  assert_int_equal(f->plan.number, 77);
}

static const mlfab__tree_node *find(const fixture *f, uint32_t rank) {
  for (uint32_t i = 0; i < f->plan.nodes; i++) {
    if (f->nodes[i].worker == rank) return &f->nodes[i];
  }
  return NULL;
}

/* Every rank appears once, and every path reaches the root in at most two steps. */
static void expect_tree(const fixture *f, uint32_t root, const uint32_t *ranks, uint32_t n) {
  assert_int_equal(f->plan.nodes, n);
  for (uint32_t i = 0; i < n; i++) {
    const mlfab__tree_node *node = find(f, ranks[i]);
    assert_non_null(node);
    if (ranks[i] == root) {
      assert_int_equal(node->parent, MLFAB__NO_NODE);
      assert_int_equal(node->giver, MLFAB__NO_NODE);
      continue;
    }
    const mlfab__tree_node *parent = find(f, node->parent), *giver = find(f, node->giver);
    assert_true(parent && giver && parent != node && giver != node);
    assert_true(node->parent == root || parent->parent == root);
    assert_true(node->giver == root || giver->giver == root);
  }
}

/* The longest time of a link: bytes over it, in sizes of the array, divided by its capacity. `down`: on the
 * way back. */
static double longest(const fixture *f, int down) {
  double worst = 0.0;
  for (uint32_t w = 0; w < WORKERS; w++) {
    double in = 0.0, out = 0.0;
    for (uint32_t i = 0; i < f->plan.nodes; i++) {
      uint32_t from = f->nodes[i].worker, to = down ? f->nodes[i].giver : f->nodes[i].parent;
      if (to == MLFAB__NO_NODE || f->host[from] == f->host[to]) continue;
      in += f->host[down ? from : to] == f->host[w];
      out += f->host[down ? to : from] == f->host[w];
    }
    if (in / f->in[w] > worst) worst = in / f->in[w];
    if (out / f->out[w] > worst) worst = out / f->out[w];
  }
  return worst;
}

static double star(const fixture *f, uint32_t root, const uint32_t *ranks, uint32_t n, int down) {
  double worst = 0.0, far = 0.0;
  for (uint32_t i = 0; i < n; i++) {
    double mine = 0.0, narrow = down ? f->in[ranks[i]] : f->out[ranks[i]];
    if (f->host[ranks[i]] == f->host[root]) continue;
    far += 1.0;
    for (uint32_t k = 0; k < n; k++) mine += f->host[ranks[k]] == f->host[ranks[i]];
    if (mine / narrow > worst) worst = mine / narrow;
  }
  far /= down ? f->out[root] : f->in[root];
  return far > worst ? far : worst;
}

/* Random networks, some hosts with several workers. */
static void test_trees(void **state) {
  fixture *f = *state;
  uint32_t ranks[WORKERS], deep = 0, faster = 0;
  for (int round = 0; round < 300; round++) {
    uint32_t n = 0, most = 3 + (uint32_t)mlfab__rng_below(&f->prng, round % 10 ? 30 : WORKERS - 3);
    uint64_t share = 1 + mlfab__rng_below(&f->prng, 3);
    for (uint32_t w = 0; w < most; w++)
      station(f, w, 1000 + w / share, 1e6 * (double)(1 + mlfab__rng_below(&f->prng, 10)),
              1e6 * (double)(1 + mlfab__rng_below(&f->prng, 10)));
    for (uint32_t w = 0; w < most; w++) {
      if (mlfab__rng_below(&f->prng, 5) > 0 || most - w <= 3 - (n < 3 ? n : 3)) ranks[n++] = w;
    }
    uint32_t root = ranks[mlfab__rng_below(&f->prng, n)];
    ask(f, root, ranks, n);
    expect_tree(f, root, ranks, n);
    for (int down = 0; down < 2; down++) {
      double ours = longest(f, down), theirs = star(f, root, ranks, n, down);
      assert_true(ours <= theirs * (1.0 + 1e-9));
      faster += ours < theirs * 0.9;
    }
    for (uint32_t i = 0; i < n; i++) deep += f->nodes[i].parent != root;
  }
  assert_true(deep > 500 && faster > 200);
}

/* One worker's link has a tenth of the others' capacity: no path goes through it. */
static void test_slow_worker(void **state) {
  fixture *f = *state;
  uint32_t ranks[16];
  for (uint32_t w = 0; w < 16; w++) {
    ranks[w] = w;
    station(f, w, 100 + w, w == 3 ? 1e7 : 1e8, w == 3 ? 1e7 : 1e8);
  }
  for (uint32_t root = 0; root < 16; root++) {
    ask(f, root, ranks, 16);
    expect_tree(f, root, ranks, 16);
    for (uint32_t i = 0; i < 16 && root != 3; i++)
      assert_true(f->nodes[i].parent != 3 && f->nodes[i].giver != 3);
  }
}

/* Without capacity, or for ranks that do not form a tree, the answer is an empty plan. */
static void test_no_way(void **state) {
  fixture *f = *state;
  uint32_t ranks[] = {0, 1, 2, 3}, twice[] = {0, 1, 9999};
  for (uint32_t w = 0; w < 4; w++) station(f, w, 100 + w, 1e8, 1e8);
  station(f, 2, 102, 1e8, 0.0);
  ask(f, 0, ranks, 4);
  assert_int_equal(f->plan.nodes, 0);
  station(f, 2, 102, 1e8, 1e8);
  ask(f, 0, ranks, 4);
  expect_tree(f, 0, ranks, 4);
  ask(f, 7, ranks, 4); /* the root is not among the ranks */
  assert_int_equal(f->plan.nodes, 0);
  ask(f, 0, twice, 3); /* no such rank */
  assert_int_equal(f->plan.nodes, 0);
  assert_int_equal(f->drops, 0);
  tell(f, MLFAB__TREE_ASK, (const uint8_t *)"?", 1);
  assert_int_equal(f->drops, 1);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_trees, open_scheduler, close_scheduler),
      cmocka_unit_test_setup_teardown(test_slow_worker, open_scheduler, close_scheduler),
      cmocka_unit_test_setup_teardown(test_no_way, open_scheduler, close_scheduler),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
