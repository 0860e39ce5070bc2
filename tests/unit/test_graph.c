/* test_graph.c - core/coll/graph.c: gaps against a table and against Jacobi's singular values,
 * connectivity against Floyd and Warshall, degrees against counting, for random graphs; builders
 * against their definitions. MLFAB_SEED=n one random graph alone, MLFAB_SCALE=100 a hundred times as
 * many. */
#include "core/coll/graph.h"
#include "core/base/rng.h"

#include <math.h>
#include "json.h"

enum { MANY = 1024, FEW = 24 };

static mlfab_edge edges[MANY * MANY];
static mlfab_error error;

static uint32_t build(uint32_t kind, uint32_t nodes, uint32_t degree, uint64_t seed) {
  uint32_t n = 0;
  assert_int_equal(mlfab_graph_build(kind, nodes, degree, seed, edges, MANY * MANY, &n), 0);
  return n;
}

static mlfab_graph_info check(uint32_t n, uint32_t nodes, int wanted) {
  mlfab_graph_info info;
  memset(&info, 0xee, sizeof info);
  int code = mlfab_graph_check(edges, n, nodes, &info, &error);
  if (code != wanted)
    fail_msg("%s instead of %s", mlfab_error_name(code), mlfab_error_name(wanted));
  return info;
}

static double gap(uint32_t kind, uint32_t nodes) {
  uint32_t n = build(kind, nodes, 0, 0);
  return check(n, nodes, kind == MLFAB_GRAPH_STAR && nodes > 2 ? MLFAB_ERR_ARGUMENT : 0).gap;
}

static int is(double a, double b, double tolerance) { return fabs(a - b) <= tolerance; }

/* ---- the literal check ---- */

typedef struct literal {
  uint32_t nodes;
  int a[FEW][FEW]; /* a[i][j]: j sends to i, or i = j */
} literal;

static literal literal_of(uint32_t n, uint32_t nodes) {
  literal g;
  memset(&g, 0, sizeof g);
  g.nodes = nodes;
  for (uint32_t i = 0; i < nodes; i++) g.a[i][i] = 1;
  for (uint32_t k = 0; k < n; k++) g.a[edges[k].to][edges[k].from] = 1;
  return g;
}

static int literal_connected(const literal *g) {
  literal way = *g;
  for (uint32_t k = 0; k < g->nodes; k++) {
    for (uint32_t i = 0; i < g->nodes; i++)
      for (uint32_t j = 0; j < g->nodes; j++) way.a[i][j] |= way.a[i][k] && way.a[k][j];
  }
  for (uint32_t i = 0; i < g->nodes; i++) {
    for (uint32_t j = 0; j < g->nodes; j++)
      if (!way.a[i][j]) return 0;
  }
  return 1;
}

static int literal_degree(const literal *g, uint32_t node, int incoming) {
  int degree = 0;
  for (uint32_t j = 0; j < g->nodes; j++) degree += incoming ? g->a[node][j] : g->a[j][node];
  return degree;
}

/* Turns columns i and j of P until they are orthogonal; 1 when they were not. */
static int literal_turn(double p[FEW][FEW], uint32_t nodes, uint32_t i, uint32_t j) {
  double ii = 0, jj = 0, ij = 0;
  for (uint32_t k = 0; k < nodes; k++) {
    ii += p[k][i] * p[k][i];
    jj += p[k][j] * p[k][j];
    ij += p[k][i] * p[k][j];
  }
  if (fabs(ij) <= 1e-16 * sqrt(ii * jj) || fabs(ij) < 1e-40) return 0;
  double zeta = (jj - ii) / (2 * ij);
  double t = (zeta > 0 ? 1 : -1) / (fabs(zeta) + sqrt(1 + zeta * zeta));
  double c = 1 / sqrt(1 + t * t), s = c * t;
  for (uint32_t k = 0; k < nodes; k++) {
    double x = p[k][i], y = p[k][j];
    p[k][i] = c * x - s * y;
    p[k][j] = s * x + c * y;
  }
  return 1;
}

/* 1 - sigma_2 by one-sided Jacobi (Hestenes): all singular values, each to its last digits. */
static double literal_gap(const literal *g) {
  double p[FEW][FEW], first = 0, second = 0;
  int turned = 1;
  for (uint32_t i = 0; i < g->nodes; i++)
    for (uint32_t j = 0; j < g->nodes; j++) p[i][j] = g->a[i][j] / (double)literal_degree(g, i, 1);
  for (int sweep = 0; turned && sweep < 60; sweep++) {
    turned = 0;
    for (uint32_t i = 0; i < g->nodes; i++)
      for (uint32_t j = i + 1; j < g->nodes; j++) turned |= literal_turn(p, g->nodes, i, j);
  }
  for (uint32_t j = 0; j < g->nodes; j++) {
    double norm = 0;
    for (uint32_t k = 0; k < g->nodes; k++) norm += p[k][j] * p[k][j];
    norm = sqrt(norm);
    second = norm > first ? first : norm > second ? norm : second;
    first = norm > first ? norm : first;
  }
  return 1 - second;
}

static void compare(uint32_t n, uint32_t nodes, uint64_t seed) {
  literal g = literal_of(n, nodes);
  mlfab_graph_info info;
  int code = mlfab_graph_check(edges, n, nodes, &info, &error);
  int connected = literal_connected(&g), equal = 1, balanced = 1;
  int degree = literal_degree(&g, 0, 1);
  uint32_t count = 0;
  double wanted = literal_gap(&g);
  for (uint32_t i = 0; i < nodes; i++) {
    equal = equal && literal_degree(&g, i, 1) == degree;
    balanced = balanced && literal_degree(&g, i, 0) == degree;
    count += (uint32_t)literal_degree(&g, i, 1) - 1;
  }
  int good = connected && equal && wanted > 1e-10;
  if (code != (good ? 0 : MLFAB_ERR_ARGUMENT) || (int)info.connected != connected ||
      (int)info.doubly_stochastic != (equal && balanced) || info.edges != count ||
      (int)info.in_degree != (equal ? degree : 0) || !is(info.gap, wanted, 1e-9))
    fail_msg("seed %llu: %d, %u nodes, gap %.12f instead of %.12f", (unsigned long long)seed, code,
             nodes, info.gap, wanted);
}

/* A union of cycles, of permutations with loops, or any edges; with duplicates and loops. */
static uint32_t draw(mlfab__rng *prng, uint32_t nodes) {
  uint32_t n = 0, name[FEW], kind = (uint32_t)mlfab__rng_below(prng, 3);
  uint32_t times = 1 + (uint32_t)mlfab__rng_below(prng, 4);
  for (uint32_t t = 0; t < times && kind < 2; t++) {
    for (uint32_t i = 0; i < nodes; i++) {
      uint32_t k = (uint32_t)mlfab__rng_below(prng, i + 1);
      name[i] = name[k];
      name[k] = i;
    }
    for (uint32_t i = 0; i < nodes; i++, n++) {
      edges[n].from = kind ? i : name[i];
      edges[n].to = kind ? name[i] : name[(i + 1) % nodes];
    }
  }
  uint32_t more = (uint32_t)mlfab__rng_below(prng, kind == 2 ? 4 * nodes : 2);
  for (uint32_t i = 0; i < more; i++, n++) {
    edges[n].from = (uint32_t)mlfab__rng_below(prng, nodes);
    edges[n].to = (uint32_t)mlfab__rng_below(prng, nodes);
  }
  return n;
}

TEST(random_graphs_like_the_literal_check) {
  for (SEEDS(seed, 1500)) {
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    uint32_t most = seed % 20 ? 9 : FEW;
    uint32_t nodes = 1 + (uint32_t)mlfab__rng_below(&prng, most);
    compare(draw(&prng, nodes), nodes, seed);
  }
}

/* All but one edge of all to all, and fewer: sigma_2 is small or 0. */
TEST(small_sigma) {
  for (uint32_t nodes = 2; nodes <= FEW; nodes++) {
    uint32_t n = build(MLFAB_GRAPH_ALL, nodes, 0, 0);
    assert_true(check(n, nodes, 0).gap == 1.0);
    for (uint32_t k = 0; k < 3 && n > 1; k++) compare(--n, nodes, nodes);
  }
}

/* ---- tests/vectors/spectral.json ---- */

TEST(vector_spectral) {
  static const struct {
    const char *name;
    uint32_t kind;
  } graphs[] = {{"all_to_all", MLFAB_GRAPH_ALL},
                {"star", MLFAB_GRAPH_STAR},
                {"ring_chain", MLFAB_GRAPH_CHAIN},
                {"expander_round", MLFAB_GRAPH_EXPANDER}};
  json_read("tests/vectors/spectral.json");
  for (uint32_t nodes = 2; nodes <= 32; nodes++) {
    char key[8];
    snprintf(key, sizeof key, "%u", nodes);
    for (size_t k = 0; k < MLFAB__COUNT(graphs); k++) {
      const char *at = json_find(json_find(json, key), graphs[k].name);
      int ds = strncmp(json_find(at, "doubly_stochastic") + 1, "true", 4) == 0;
      int connected = strncmp(json_find(at, "strongly_connected") + 1, "true", 4) == 0;
      char *end;
      long degree = strtol(strchr(json_find(at, "in_degree_incl_self"), '[') + 1, &end, 10);
      uint32_t n = build(graphs[k].kind, nodes, 0, 0);
      mlfab_graph_info info = check(n, nodes, ds ? 0 : MLFAB_ERR_ARGUMENT);
      assert_true(is(info.gap, json_number(at, "gap"), 1e-6));
      assert_int_equal(info.doubly_stochastic, ds);
      assert_int_equal(info.connected, connected);
      assert_int_equal(info.in_degree, *end == ',' ? 0 : degree);
    }
  }
}

/* Closed forms up to 1024 nodes: circulants' singular values are |sums of roots of 1|. */
TEST(large_graphs) {
  const double pi = 3.14159265358979323846;
  static const uint32_t sizes[] = {64, 100, 257, 1024};
  for (size_t s = 0; s < MLFAB__COUNT(sizes); s++) {
    uint32_t n = sizes[s], root = (uint32_t)floor(sqrt(n) + 0.5);
    double second = 0;
    for (uint32_t k = 1; k < n; k++) {
      double x = 2 * pi * k / n, y = x * root;
      second = fmax(second, hypot(1 + cos(x) + cos(y), sin(x) + sin(y)) / 3);
    }
    assert_true(is(gap(MLFAB_GRAPH_EXPANDER, n), 1 - second, 1e-10));
    assert_true(is(gap(MLFAB_GRAPH_RING, n), (2 - 2 * cos(2 * pi / n)) / 3, 1e-10));
    if (n > 257) continue;
    assert_true(is(gap(MLFAB_GRAPH_CHAIN, n), 1 - cos(pi / n), 1e-10));
    assert_true(gap(MLFAB_GRAPH_ALL, n) == 1.0);
  }
}

/* ---- builders ---- */

TEST(builders_as_defined) {
  for (uint32_t nodes = 1; nodes <= FEW; nodes++) {
    for (uint32_t kind = MLFAB_GRAPH_ALL; kind <= MLFAB_GRAPH_STAR; kind++) {
      uint32_t root = (uint32_t)floor(sqrt(nodes) + 0.5);
      if (kind == MLFAB_GRAPH_REGULAR) continue;
      if (kind == MLFAB_GRAPH_HYPERCUBE && (nodes & (nodes - 1))) continue;
      uint32_t n = build(kind, nodes, 0, 0), at = 0;
      for (uint32_t i = 0; i < nodes; i++) {
        for (uint32_t j = 0; j < nodes; j++) {
          uint32_t step = (j + nodes - i) % nodes, flip = i ^ j, wanted = i != j;
          if (kind == MLFAB_GRAPH_EXPANDER) wanted = step == 1 || step == root;
          if (kind == MLFAB_GRAPH_CHAIN) wanted = step == 1;
          if (kind == MLFAB_GRAPH_RING) wanted = step == 1 || step + 1 == nodes;
          if (kind == MLFAB_GRAPH_HYPERCUBE) wanted = flip && (flip & (flip - 1)) == 0;
          if (kind == MLFAB_GRAPH_STAR) wanted = i == 0 || j == 0;
          if (i == j || !wanted) continue;
          assert_true(at < n && edges[at].from == i && edges[at].to == j);
          at++;
        }
      }
      assert_int_equal(at, n);
      int star = kind == MLFAB_GRAPH_STAR && nodes > 2;
      mlfab_graph_info info = check(n, nodes, star ? MLFAB_ERR_ARGUMENT : 0);
      assert_int_equal(info.doubly_stochastic, !star);
      assert_int_equal(info.connected, 1);
      assert_int_equal(info.edges, n);
      assert_true(info.gap > 0);
    }
  }
}

TEST(regular_graphs) {
  static mlfab_edge before[MANY * 4];
  uint32_t same = 0;
  for (uint64_t seed = 0; seed < 3000; seed++) {
    mlfab__rng prng;
    mlfab__rng_seed(&prng, seed);
    uint32_t nodes = 2 + (uint32_t)mlfab__rng_below(&prng, FEW - 1);
    uint32_t degree = 1 + (uint32_t)mlfab__rng_below(&prng, nodes - 1);
    uint32_t n = build(MLFAB_GRAPH_REGULAR, nodes, degree, seed);
    assert_int_equal(n, nodes * degree);
    mlfab_graph_info info = check(n, nodes, 0);
    assert_int_equal(info.edges, n);
    assert_int_equal(info.in_degree, degree + 1);
    assert_true(info.connected && info.doubly_stochastic && info.gap > 0);
    memcpy(before, edges, n * sizeof *edges);
    memset(edges, 0xee, n * sizeof *edges);
    build(MLFAB_GRAPH_REGULAR, nodes, degree, seed);
    assert_memory_equal(before, edges, n * sizeof *edges);
    build(MLFAB_GRAPH_REGULAR, nodes, degree, seed + 1000000);
    same += nodes > 8 && degree < nodes - 1 && !memcmp(before, edges, n * sizeof *edges);
  }
  assert_true(same < 3);
  /* Here it matters that connection is asked for: two triangles have the same degrees. */
  for (uint64_t seed = 0; seed < 20000; seed++) check(build(MLFAB_GRAPH_REGULAR, 6, 2, seed), 6, 0);
  /* Random graphs mix fast: 2 sqrt(d) / (d + 1) is about sigma_2 of large ones. */
  uint32_t n = build(MLFAB_GRAPH_REGULAR, 300, 8, 7);
  assert_true(check(n, 300, 0).gap > 0.3);
  n = build(MLFAB_GRAPH_REGULAR, MANY, MANY / 2, 7);
  assert_int_equal(n, MANY * MANY / 2);
}

/* Every receiver is drawn about equally often. */
TEST(regular_graphs_are_even) {
  enum { NODES = 10, DEGREE = 3, TIMES = 3000 };
  uint32_t seen[NODES][NODES] = {{0}};
  for (uint64_t seed = 0; seed < TIMES; seed++) {
    uint32_t n = build(MLFAB_GRAPH_REGULAR, NODES, DEGREE, seed);
    for (uint32_t k = 0; k < n; k++) seen[edges[k].from][edges[k].to]++;
  }
  for (uint32_t i = 0; i < NODES; i++) {
    for (uint32_t j = 0; j < NODES; j++)
      if (i != j) assert_in_range(seen[i][j], 875, 1125); /* 1000, and 26 a standard deviation */
  }
}

TEST(peers_of_a_node) {
  for (uint64_t seed = 1; seed <= 500; seed++) {
    mlfab__rng prng;
    uint32_t peers[FEW];
    mlfab__rng_seed(&prng, seed);
    uint32_t nodes = 1 + (uint32_t)mlfab__rng_below(&prng, FEW), n = draw(&prng, nodes);
    literal g = literal_of(n, nodes);
    for (uint32_t i = 0; i < 2 * nodes; i++) {
      uint32_t node = i / 2, count = mlfab__graph_peers(edges, n, node, i % 2, peers), at = 0;
      for (uint32_t j = 0; j < nodes; j++) {
        if (j == node || !(i % 2 ? g.a[node][j] : g.a[j][node])) continue;
        assert_true(at < count && peers[at] == j);
        at++;
      }
      assert_int_equal(at, count);
    }
  }
}

/* ---- refusals ---- */

static void refused(uint32_t n, uint32_t nodes, const char *text, int32_t rank) {
  mlfab_graph_info info;
  assert_int_equal(mlfab_graph_check(edges, n, nodes, &info, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(error.code, MLFAB_ERR_ARGUMENT);
  assert_int_equal(error.rank, rank);
  if (strstr(error.text, text) == NULL) fail_msg("no '%s' in '%s'", text, error.text);
  assert_int_equal(mlfab_graph_check(edges, n, nodes, &info, NULL), MLFAB_ERR_ARGUMENT);
}

TEST(refuses_bad_graphs) {
  static const mlfab_edge deaf[] = {{0, 1}, {1, 0}, {2, 0}}, mute[] = {{0, 1}, {1, 0}, {0, 2}};
  static const mlfab_edge uneven[] = {{0, 1}, {1, 2}, {2, 0}, {0, 2}, {0, 2}, {1, 1}};
  static const mlfab_edge two[] = {{0, 1}, {1, 0}, {2, 3}, {3, 2}};
  mlfab_graph_info info;
  memcpy(edges, deaf, sizeof deaf);
  refused(3, 3, "from node 0 to node 2", 2);
  memcpy(edges, mute, sizeof mute);
  refused(3, 3, "from node 2 to node 0", 2);
  memcpy(edges, uneven, sizeof uneven);
  refused(6, 3, "2 nodes send to node 2, to most 1", 2);
  memcpy(edges, two, sizeof two);
  refused(4, 4, "to node 2", 2);
  assert_true(check(4, 4, MLFAB_ERR_ARGUMENT).gap == 0);
  memset(&info, 0xee, sizeof info);
  mlfab_graph_info untouched = info;
  edges[2].to = 4;
  refused(4, 4, "edge 2 leads from node 2 to node 4: there are 4", MLFAB_NO_RANK);
  refused(4, 0, "0 nodes", MLFAB_NO_RANK);
  refused(4, MANY + 1, "1025 nodes", MLFAB_NO_RANK);
  assert_int_equal(mlfab_graph_check(NULL, 1, 2, &info, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_graph_check(edges, 1, 2, NULL, &error), MLFAB_ERR_ARGUMENT);
  assert_memory_equal(&info, &untouched, sizeof info);
  assert_true(check(0, 1, 0).gap == 1.0); /* a single node */
}

/* Two nodes send to half of the others each: equal in-degrees, a ring through all, sigma_2 > 1. */
TEST(refuses_a_gap_below_0) {
  enum { HALF = 20, NODES = 2 * HALF };
  for (uint32_t i = 0; i < NODES; i++) {
    uint32_t hub = i / HALF * HALF;
    mlfab_edge ring = {(i + NODES - 1) % NODES, i}, star = {i - hub < 2 ? HALF - hub : hub, i};
    edges[2 * i] = ring;
    edges[2 * i + 1] = star;
  }
  mlfab_graph_info info = check(2 * NODES, NODES, MLFAB_ERR_ARGUMENT);
  assert_int_equal(info.in_degree, 3);
  assert_true(info.connected == 1 && info.doubly_stochastic == 0 && info.gap < 0);
  refused(2 * NODES, NODES, "gap is -", MLFAB_NO_RANK);
}

TEST(refuses_bad_builds) {
  static const uint32_t bad[][3] = {/* kind, nodes, degree */
                                    {0, 4, 0},
                                    {MLFAB_GRAPH_USER, 4, 0},
                                    {MLFAB_GRAPH_ALL, 0, 0},
                                    {MLFAB_GRAPH_CHAIN, 1025, 0},
                                    {MLFAB_GRAPH_HYPERCUBE, 6, 0},
                                    {MLFAB_GRAPH_REGULAR, 4, 0},
                                    {MLFAB_GRAPH_REGULAR, 4, 4}};
  uint32_t n = 77;
  memset(edges, 0xee, sizeof *edges);
  for (size_t i = 0; i < MLFAB__COUNT(bad); i++)
    if (mlfab_graph_build(bad[i][0], bad[i][1], bad[i][2], 0, edges, 9999, &n) !=
        MLFAB_ERR_ARGUMENT)
      fail_msg("kind %u, %u nodes, degree %u", bad[i][0], bad[i][1], bad[i][2]);
  assert_int_equal(mlfab_graph_build(MLFAB_GRAPH_ALL, 4, 0, 0, NULL, 9, &n), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_graph_build(MLFAB_GRAPH_ALL, 4, 0, 0, edges, 9, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(n, 77);
  assert_int_equal(mlfab_graph_build(MLFAB_GRAPH_ALL, 4, 0, 0, edges, 11, &n), MLFAB_ERR_LIMIT);
  assert_int_equal(n, 12);
  assert_int_equal(mlfab_graph_build(MLFAB_GRAPH_ALL, 4, 0, 0, NULL, 0, &n), MLFAB_ERR_LIMIT);
  assert_int_equal(edges[0].from, 0xeeeeeeee);
}

TESTS(NULL, NULL)
