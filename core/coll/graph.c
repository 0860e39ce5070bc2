/* graph.c - builds communication graphs, checks them, and computes their gaps: see graph.h. */
#include "graph.h"

#include "../base/rng.h"

#include <math.h>

enum { GRAPH_WORDS = MLFAB__GRAPH_NODES_MAX / 64, GRAPH_REGULAR_ROUNDS = 16 };

/* Below this a gap is the rounding of 0. */
#define GRAPH_GAP_LEAST 1e-12

/* A row a node: the set of its neighbours, all out or all in. */
typedef struct graph_rows {
  uint64_t bits[GRAPH_WORDS];
} graph_rows;

static int graph_has(const graph_rows *rows, uint32_t row, uint32_t node) {
  return (int)(rows[row].bits[node / 64] >> node % 64 & 1);
}

static void graph_flip(graph_rows *rows, uint32_t row, uint32_t node) {
  rows[row].bits[node / 64] ^= (uint64_t)1 << node % 64;
}

static void graph_add(graph_rows *rows, uint32_t row, uint32_t node) {
  if (row != node && !graph_has(rows, row, node)) graph_flip(rows, row, node);
}

static void graph_turn(const graph_rows *rows, uint32_t nodes, graph_rows *turned) {
  memset(turned, 0, nodes * sizeof *turned);
  for (uint32_t i = 0; i < nodes; i++) {
    for (uint32_t j = 0; j < nodes; j++) {
      if (graph_has(rows, i, j)) graph_flip(turned, j, i);
    }
  }
}

static uint32_t graph_degree(const graph_rows *rows, uint32_t row) {
  uint32_t degree = 0;
  for (uint32_t w = 0; w < GRAPH_WORDS; w++) {
    for (uint64_t bits = rows[row].bits[w]; bits; bits &= bits - 1) degree++;
  }
  return degree;
}

/* Returns the first node that no path along the rows from node 0 reaches; `nodes` if there is none. */
static uint32_t graph_unreached(const graph_rows *rows, uint32_t nodes) {
  uint32_t todo[MLFAB__GRAPH_NODES_MAX] = {0}, n = 1;
  uint8_t seen[MLFAB__GRAPH_NODES_MAX] = {1};
  while (n > 0) {
    uint32_t node = todo[--n];
    for (uint32_t next = 0; next < nodes; next++) {
      if (seen[next] || !graph_has(rows, node, next)) continue;
      seen[next] = 1;
      todo[n++] = next;
    }
  }
  for (n = 0; n < nodes && seen[n];) n++;
  return n;
}

/* --- builders: rows are receivers of a node --- */

/* Returns sqrt(nodes), halves rounded up: the largest s with s - 1/2 <= sqrt(nodes). */
static uint32_t graph_root(uint32_t nodes) {
  uint32_t s = 1;
  while ((s + 1) * s < nodes) s++;
  return s;
}

static void graph_build_by_rule(uint32_t kind, uint32_t nodes, graph_rows *out) {
  uint32_t root = graph_root(nodes);
  for (uint32_t i = 0; i < nodes; i++) {
    if (kind == MLFAB_GRAPH_EXPANDER || kind == MLFAB_GRAPH_CHAIN || kind == MLFAB_GRAPH_RING)
      graph_add(out, i, (i + 1) % nodes);
    if (kind == MLFAB_GRAPH_EXPANDER) graph_add(out, i, (i + root) % nodes);
    if (kind == MLFAB_GRAPH_RING) graph_add(out, i, (i + nodes - 1) % nodes);
    for (uint32_t j = 0; kind == MLFAB_GRAPH_ALL && j < nodes; j++) graph_add(out, i, j);
    for (uint32_t b = 1; kind == MLFAB_GRAPH_HYPERCUBE && b < nodes; b *= 2)
      graph_add(out, i, i ^ b);
    if (kind == MLFAB_GRAPH_STAR) {
      graph_add(out, i, 0);
      graph_add(out, 0, i);
    }
  }
}

/* Builds the ring over the shuffled nodes, each to its next `degree`. */
static void graph_band(uint32_t nodes, uint32_t degree, const uint32_t *names, graph_rows *out,
                       mlfab_edge *edges) {
  memset(out, 0, nodes * sizeof *out);
  for (uint32_t i = 0; i < nodes; i++) {
    for (uint32_t k = 0; k < degree; k++) {
      mlfab_edge edge = {names[i], names[(i + 1 + k) % nodes]};
      edges[i * degree + k] = edge;
      graph_add(out, edge.from, edge.to);
    }
  }
}

/* Two random edges exchange receivers, if that makes no loop or duplicate: degrees stay. */
static void graph_switch(mlfab__rng *prng, uint32_t n, graph_rows *out, mlfab_edge *edges) {
  mlfab_edge *a = &edges[mlfab__rng_below(prng, n)], *b = &edges[mlfab__rng_below(prng, n)];
  uint32_t to = a->to;
  if (a->from == b->to || b->from == to) return;
  if (graph_has(out, a->from, b->to) || graph_has(out, b->from, to)) return;
  graph_flip(out, a->from, to);
  graph_flip(out, b->from, b->to);
  a->to = b->to;
  b->to = to;
  graph_flip(out, a->from, a->to);
  graph_flip(out, b->from, b->to);
}

/* A graph with equal degrees is a union of `degree` permutations (König). It is drawn by switching edges of the
 * shuffled band until it is connected; this finds a graph for every degree. One permutation is connected only as a
 * single cycle: the shuffled ring itself. */
static void graph_build_regular(uint32_t nodes, uint32_t degree, uint64_t seed, graph_rows *out,
                                graph_rows *turned, mlfab_edge *edges) {
  uint32_t names[MLFAB__GRAPH_NODES_MAX], n = nodes * degree;
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  for (uint32_t i = 0; i < nodes; i++) {
    uint32_t k = (uint32_t)mlfab__rng_below(&prng, i + 1);
    names[i] = names[k];
    names[k] = i;
  }
  graph_band(nodes, degree, names, out, edges);
  if (degree == 1 || degree == nodes - 1) return;
  for (uint32_t round = 0; round < GRAPH_REGULAR_ROUNDS; round++) {
    for (uint32_t i = 0; i < 8 * n; i++) graph_switch(&prng, n, out, edges);
    graph_turn(out, nodes, turned);
    if (graph_unreached(out, nodes) == nodes && graph_unreached(turned, nodes) == nodes) return;
  }
  graph_band(nodes, degree, names, out, edges);
}

static int graph_may_build(uint32_t kind, uint32_t nodes, uint32_t degree) {
  if (nodes == 0 || nodes > MLFAB__GRAPH_NODES_MAX) return 0;
  if (kind < MLFAB_GRAPH_ALL || kind > MLFAB_GRAPH_STAR) return 0;
  if (kind == MLFAB_GRAPH_HYPERCUBE) return (nodes & (nodes - 1)) == 0;
  return kind != MLFAB_GRAPH_REGULAR || (degree > 0 && degree < nodes);
}

static int graph_list(const graph_rows *out, uint32_t nodes, mlfab_edge *edges, uint32_t room,
                      uint32_t *edges_p) {
  uint32_t n = 0, at = 0;
  for (uint32_t i = 0; i < nodes; i++) n += graph_degree(out, i);
  *edges_p = n;
  if (n > room) return MLFAB_ERR_LIMIT;
  for (uint32_t i = 0; i < nodes; i++) {
    for (uint32_t j = 0; j < nodes; j++) {
      if (!graph_has(out, i, j)) continue;
      edges[at].from = i;
      edges[at++].to = j;
    }
  }
  return 0;
}

int mlfab_graph_build(uint32_t kind, uint32_t nodes, uint32_t degree, uint64_t seed,
                      mlfab_edge *edges, uint32_t room, uint32_t *edges_p) {
  mlfab__env env;
  int code = MLFAB_ERR_MEMORY, regular = kind == MLFAB_GRAPH_REGULAR;
  if (edges_p == NULL || (edges == NULL && room > 0) || !graph_may_build(kind, nodes, degree))
    return MLFAB_ERR_ARGUMENT;
  mlfab__env_init(&env, NULL);
  size_t drawn = regular ? (size_t)nodes * degree : 0;
  graph_rows *rows = mlfab__alloc_array(&env, (size_t)2 * nodes, sizeof *rows);
  mlfab_edge *draft = mlfab__alloc_array(&env, drawn, sizeof *draft);
  if (rows && (draft || !regular)) {
    if (regular) {
      graph_build_regular(nodes, degree, seed, rows, rows + nodes, draft);
    } else {
      graph_build_by_rule(kind, nodes, rows);
    }
    code = graph_list(rows, nodes, edges, room, edges_p);
  }
  mlfab__free(&env, draft, drawn * sizeof *draft);
  mlfab__free(&env, rows, (size_t)2 * nodes * sizeof *rows);
  return code;
}

/* --- the gap --- */

typedef struct graph_matrix {
  uint32_t n;
  double *a; /* n x n, symmetric: the lower triangle counts; destroyed by graph_tridiagonal */
  double *diagonal; /* n */
  double *beside;   /* n: beside[i] is between i - 1 and i */
  double *p;        /* n, scratch */
} graph_matrix;

/* Householder's reflections, from the last row up; all passes go along rows. */
static void graph_tridiagonal(graph_matrix *m) {
  uint32_t n = m->n;
  double *p = m->p;
  for (uint32_t i = n - 1; i > 0; i--) {
    double *u = m->a + (size_t)i * n, h = 0, k = 0;
    m->diagonal[i] = u[i];
    m->beside[i] = u[i - 1];
    for (uint32_t j = 0; j + 1 < i; j++) h += u[j] * u[j];
    if (h < 1e-280) continue; /* is tridiagonal here */
    h += u[i - 1] * u[i - 1];
    double g = u[i - 1] > 0 ? -sqrt(h) : sqrt(h);
    h -= u[i - 1] * g;
    m->beside[i] = g;
    u[i - 1] -= g;
    memset(p, 0, i * sizeof *p);
    for (uint32_t j = 0; j < i; j++) {
      const double *row = m->a + (size_t)j * n;
      double sum = row[j] * u[j];
      for (uint32_t l = 0; l < j; l++) {
        sum += row[l] * u[l];
        p[l] += row[l] * u[j];
      }
      p[j] += sum;
    }
    for (uint32_t j = 0; j < i; j++) k += u[j] * (p[j] /= h);
    for (uint32_t j = 0; j < i; j++) p[j] -= k / (2 * h) * u[j];
    for (uint32_t j = 0; j < i; j++) {
      double *row = m->a + (size_t)j * n;
      for (uint32_t l = 0; l <= j; l++) row[l] -= u[j] * p[l] + p[j] * u[l];
    }
  }
  m->diagonal[0] = m->a[0];
  m->beside[0] = 0;
}

/* Returns how many eigenvalues are below x (Sturm). */
static uint32_t graph_below(const graph_matrix *m, double x, double least) {
  uint32_t count = 0;
  double q = 1;
  for (uint32_t i = 0; i < m->n; i++) {
    q = m->diagonal[i] - x - m->beside[i] * m->beside[i] / q;
    if (q < least && q > -least) q = -least;
    count += q < 0;
  }
  return count;
}

/* Returns the eigenvalue that `larger` others equal or exceed. All are at least 0, apart from rounding. */
static double graph_eigenvalue(const graph_matrix *m, uint32_t larger) {
  double low = 0, high = 0;
  for (uint32_t i = 0; i < m->n; i++) {
    double bound = m->diagonal[i] + fabs(m->beside[i]);
    if (i + 1 < m->n) bound += fabs(m->beside[i + 1]);
    if (bound > high) high = bound;
  }
  double least = high * 1e-30 + 1e-300;
  for (double middle = high / 2; middle > low && middle < high; middle = low + (high - low) / 2) {
    if (graph_below(m, middle, least) + larger < m->n) {
      low = middle;
    } else {
      high = middle;
    }
    if (high < 1e-200) break;
  }
  return low;
}

/* Adds `weight` at all pairs of nodes that send to i, including i. */
static void graph_square(const graph_rows *in, uint32_t i, double weight, graph_matrix *m) {
  uint32_t senders[MLFAB__GRAPH_NODES_MAX], n = 0;
  for (uint32_t j = 0; j < m->n; j++) {
    if (j == i || graph_has(in, i, j)) senders[n++] = j;
  }
  for (uint32_t k = 0; k < n; k++) {
    for (uint32_t l = 0; l <= k; l++) m->a[(size_t)senders[k] * m->n + senders[l]] += weight;
  }
}

/* Returns sigma_2 of P; `degree`: that of all nodes, in and out, with themselves, or 0 if they differ. */
static double graph_sigma2(const graph_rows *in, uint32_t degree, graph_matrix *m) {
  double d = degree, n = m->n;
  for (uint32_t i = 0; i < m->n; i++) {
    double own = graph_degree(in, i) + 1;
    graph_square(in, i, degree ? n : 1 / (own * own), m);
  }
  for (size_t k = 0; degree && k < (size_t)m->n * m->n; k++) m->a[k] -= d * d;
  graph_tridiagonal(m);
  return degree ? sqrt(graph_eigenvalue(m, 0) / n) / d : sqrt(graph_eigenvalue(m, 1));
}

static int graph_gap(mlfab__env *env, const graph_rows *in, uint32_t nodes, uint32_t degree,
                     double *gap_p) {
  size_t n = nodes, bytes = (n * n + 3 * n) * sizeof(double);
  double *memory = mlfab__alloc(env, bytes);
  if (memory == NULL) return MLFAB_ERR_MEMORY;
  graph_matrix m = {nodes, memory, memory + n * n, memory + n * n + n, memory + n * n + 2 * n};
  double gap = nodes > 1 ? 1 - graph_sigma2(in, degree, &m) : 1;
  *gap_p = fabs(gap) < GRAPH_GAP_LEAST ? 0 : gap;
  mlfab__free(env, memory, bytes);
  return 0;
}

/* --- the check --- */

/* Returns the first node whose in-degree is not the most frequent one (among equals the smallest); `nodes` if all are
 * equal. */
static uint32_t graph_odd(const uint32_t *degree, uint32_t nodes, uint32_t *usual_p) {
  uint32_t times[MLFAB__GRAPH_NODES_MAX] = {0}, usual = 0, i = 0;
  for (uint32_t k = 0; k < nodes; k++) times[degree[k]]++;
  for (uint32_t d = 1; d < nodes; d++) {
    if (times[d] > times[usual]) usual = d;
  }
  while (i < nodes && degree[i] == usual) i++;
  *usual_p = usual;
  return i;
}

/* Checks everything except the gap; returns 0, or the error. */
static int graph_look(const graph_rows *out, const graph_rows *in, uint32_t nodes,
                      mlfab_graph_info *info, mlfab_error *error) {
  uint32_t degree[MLFAB__GRAPH_NODES_MAX], usual, balanced = 1;
  for (uint32_t i = 0; i < nodes; i++) {
    degree[i] = graph_degree(in, i);
    info->edges += degree[i];
  }
  uint32_t odd = graph_odd(degree, nodes, &usual);
  uint32_t deaf = graph_unreached(out, nodes), mute = graph_unreached(in, nodes);
  for (uint32_t i = 0; i < nodes; i++) balanced = balanced && graph_degree(out, i) == usual;
  info->in_degree = odd == nodes ? usual + 1 : 0;
  info->connected = deaf == nodes && mute == nodes;
  info->doubly_stochastic = odd == nodes && balanced;
  if (deaf < nodes) {
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, (int32_t)deaf, 0, 0,
                        "the graph is not connected: no way leads from node 0 to node %u", deaf);
  }
  if (mute < nodes) {
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, (int32_t)mute, 0, 0,
                        "the graph is not connected: no way leads from node %u to node 0", mute);
  }
  if (odd < nodes) {
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, (int32_t)odd, 0, 0,
                        "the graph's in-degrees differ: %u nodes send to node %u, to most %u",
                        degree[odd], odd, usual);
  }
  return 0;
}

static int graph_check(mlfab__env *env, const graph_rows *out, const graph_rows *in, uint32_t nodes,
                       mlfab_graph_info *info_p, mlfab_error *error) {
  mlfab_graph_info info;
  memset(&info, 0, sizeof info);
  int code = graph_look(out, in, nodes, &info, error);
  if (graph_gap(env, in, nodes, info.doubly_stochastic ? info.in_degree : 0, &info.gap)) {
    return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the gap of a graph of %u nodes",
                       nodes);
  }
  *info_p = info;
  if (code || info.gap > 0) return code;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                     "the graph's spectral gap is %.3g: it must be above 0", info.gap);
}

int mlfab_graph_check(const mlfab_edge *edges, uint32_t n, uint32_t nodes, mlfab_graph_info *info_p,
                      mlfab_error *error_p) {
  mlfab__env env;
  if (info_p == NULL || (edges == NULL && n > 0)) {
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "%s is NULL",
                       info_p == NULL ? "info_p" : "edges");
  }
  if (nodes == 0 || nodes > MLFAB__GRAPH_NODES_MAX) {
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT, "a graph of %u nodes: 1 to %d are possible",
                       nodes, MLFAB__GRAPH_NODES_MAX);
  }
  for (uint32_t k = 0; k < n; k++) {
    if (edges[k].from < nodes && edges[k].to < nodes) continue;
    return MLFAB__FAIL(error_p, MLFAB_ERR_ARGUMENT,
                       "edge %u leads from node %u to node %u: there are %u nodes, from 0", k,
                       edges[k].from, edges[k].to, nodes);
  }
  mlfab__env_init(&env, NULL);
  graph_rows *rows = mlfab__alloc_array(&env, (size_t)2 * nodes, sizeof *rows);
  if (rows == NULL) {
    return MLFAB__FAIL(error_p, MLFAB_ERR_MEMORY, "out of memory for a graph of %u nodes", nodes);
  }
  for (uint32_t k = 0; k < n; k++) {
    graph_add(rows, edges[k].from, edges[k].to);
    graph_add(rows + nodes, edges[k].to, edges[k].from);
  }
  int code = graph_check(&env, rows, rows + nodes, nodes, info_p, error_p);
  mlfab__free(&env, rows, (size_t)2 * nodes * sizeof *rows);
  return code;
}

MLFAB__INTERNAL uint32_t mlfab__graph_peers(const mlfab_edge *edges, uint32_t n, uint32_t node,
                                            int incoming, uint32_t *peers) {
  uint8_t is[MLFAB__GRAPH_NODES_MAX] = {0};
  uint32_t count = 0;
  for (uint32_t k = 0; k < n; k++) {
    uint32_t own = incoming ? edges[k].to : edges[k].from;
    if (own == node) is[incoming ? edges[k].from : edges[k].to] = 1;
  }
  is[node] = 0;
  for (uint32_t i = 0; i < MLFAB__GRAPH_NODES_MAX; i++) {
    if (is[i]) peers[count++] = i;
  }
  return count;
}
