/* vector.h - reads the test vectors of tests/vectors (FORMAT-mlfabric.md) for tests of internals. The
 * files are trusted to follow the format; where one does not, the test fails. */
#ifndef MLFAB_TEST_VECTOR_H
#define MLFAB_TEST_VECTOR_H

#include "core/sched/network.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>
#include <glob.h>

enum { VECTOR_LINE = 4096, VECTOR_TOKENS = 512, VECTOR_MOST = 64 };

typedef struct vector {
  FILE *file;
  const char *path;
  char text[VECTOR_LINE];
  char *token[VECTOR_TOKENS];
  uint32_t n, line;
} vector;

static inline int vector_next(vector *v) {
  if (!fgets(v->text, sizeof v->text, v->file)) return 0;
  v->n = 0;
  v->line++;
  for (char *t = strtok(v->text, " \n"); t; t = strtok(NULL, " \n")) {
    assert_true(v->n < VECTOR_TOKENS);
    v->token[v->n++] = t;
  }
  return v->n > 0;
}

static inline void vector_open(vector *v, const char *path) {
  memset(v, 0, sizeof *v);
  v->path = path;
  v->file = fopen(path, "r");
  assert_non_null(v->file);
  assert_true(vector_next(v));
}

static inline int vector_is(const vector *v, const char *keyword) {
  return strcmp(v->token[0], keyword) == 0;
}

/* The current line must be of this kind and have at least this many tokens. */
static inline void vector_expect(const vector *v, const char *keyword, uint32_t n) {
  if (!vector_is(v, keyword) || v->n < n) {
    fail_msg("%s:%u: '%s' where '%s' belongs", v->path, v->line, v->token[0], keyword);
  }
}

static inline void vector_go(vector *v, const char *keyword) {
  while (!vector_is(v, keyword)) assert_true(vector_next(v));
}

static inline double vector_number(const vector *v, uint32_t at) {
  assert_true(at < v->n);
  return strtod(v->token[at], NULL);
}

static inline uint32_t vector_count(const vector *v, uint32_t at) {
  double x = vector_number(v, at);
  assert_true(x >= 0 && x < 100000);
  return (uint32_t)x;
}

/* A computed time is a pair; its second token counts. */
static inline void vector_time(const vector *v, uint32_t at, double is) {
  double wanted = vector_number(v, at + 1);
  double off = fabs(is - wanted) / fmax(1e-300, fabs(wanted));
  if (is == wanted || off <= 1e-7) return;
  fail_msg("%s:%u: %s: %.17g is %s there", v->path, v->line, v->token[0], is, v->token[at + 1]);
}

static inline void vector_same(const vector *v, uint32_t at, uint64_t is) {
  if (vector_count(v, at) == is) return;
  fail_msg("%s:%u: %s: %llu is %s there", v->path, v->line, v->token[0], (unsigned long long)is,
           v->token[at]);
}

/* Reads a list of integers from `at` on; returns the position after it. */
static inline uint32_t vector_list(const vector *v, uint32_t at, uint32_t n, uint32_t *list) {
  assert_true(n <= VECTOR_MOST);
  for (uint32_t i = 0; i < n; i++) list[i] = vector_count(v, at + i);
  return at + n;
}

static inline void vector_profiles(vector *v, mlfab__network *net, const char *keyword,
                                   enum mlfab__capacity_kind kind, uint32_t n) {
  double at[VECTOR_MOST], rate[VECTOR_MOST];
  for (uint32_t i = 0; i < n; i++) {
    assert_true(vector_next(v));
    vector_expect(v, keyword, 5);
    uint32_t steps = vector_count(v, 2);
    assert_true(steps <= VECTOR_MOST);
    for (uint32_t k = 0; k < steps; k++) {
      at[k] = vector_number(v, 3 + 2 * k);
      rate[k] = vector_number(v, 4 + 2 * k);
    }
    vector_same(v, 1, i);
    assert_int_equal(mlfab__network_capacity(net, kind, i, steps, at, rate), 0);
  }
}

/* Reads from the line `nodes` to the line after the paths. */
static inline void vector_network(vector *v, mlfab__env *env, mlfab__network *net) {
  uint32_t links[VECTOR_MOST];
  vector_expect(v, "nodes", 2);
  uint32_t nodes = vector_count(v, 1);
  /* The number of links follows the nodes. */
  long start = ftell(v->file);
  vector line = *v;
  vector_go(&line, "links");
  uint32_t nlinks = vector_count(&line, 1);
  fseek(v->file, start, SEEK_SET);
  assert_int_equal(mlfab__network_init(net, env, nodes, nlinks), 0);
  vector_profiles(v, net, "egress", MLFAB__EGRESS, nodes);
  vector_profiles(v, net, "ingress", MLFAB__INGRESS, nodes);
  assert_true(vector_next(v));
  vector_profiles(v, net, "link", MLFAB__SHARED, nlinks);
  assert_true(vector_next(v));
  vector_expect(v, "paths", 2);
  for (uint32_t p = vector_count(v, 1); p > 0; p--) {
    assert_true(vector_next(v));
    vector_expect(v, "path", 4);
    uint32_t n = vector_count(v, 3);
    vector_list(v, 4, n, links);
    assert_int_equal(mlfab__network_path(net, vector_count(v, 1), vector_count(v, 2), n, links), 0);
  }
  assert_true(vector_next(v));
}

/* Compares `residual R` and its records with the current profiles. Ends after them. */
static inline void vector_residual(vector *v, const mlfab__network *net) {
  static const char *const names[] = {"egress", "ingress", "link"};
  vector_expect(v, "residual", 2);
  vector_same(v, 1, 2 * net->nodes + net->links);
  for (uint32_t r = vector_count(v, 1); r > 0; r--) {
    assert_true(vector_next(v));
    vector_expect(v, "res", 4);
    uint32_t kind = 0;
    while (strcmp(v->token[1], names[kind])) assert_true(++kind < 3);
    const mlfab__profile *p =
        mlfab__network_residual(net, (enum mlfab__capacity_kind)kind, vector_count(v, 2));
    vector_same(v, 3, p->n);
    for (uint32_t k = 0; k < p->n; k++) {
      assert_true(vector_next(v));
      vector_expect(v, "c", 4);
      vector_time(v, 1, p->steps[k].at);
      assert_true(vector_number(v, 3) == p->steps[k].rate);
    }
  }
  assert_true(vector_next(v));
}

/* Reads the kind of a vector, and goes to the line after the header. */
static inline void vector_header(vector *v, char kind[32]) {
  vector_expect(v, "mlfabric-vector", 2);
  vector_same(v, 1, 1);
  vector_go(v, "kind");
  assert_true(strlen(v->token[1]) < 32);
  strcpy(kind, v->token[1]);
  vector_go(v, "margin");
  assert_true(vector_next(v));
}

static inline void vector_each(void (*check)(vector *v, const char *kind)) {
  glob_t files;
  assert_int_equal(glob("tests/vectors/mlfabric_*.txt", 0, NULL, &files), 0);
  for (size_t i = 0; i < files.gl_pathc; i++) {
    vector v;
    char kind[32];
    vector_open(&v, files.gl_pathv[i]);
    vector_header(&v, kind);
    check(&v, kind);
    fclose(v.file);
  }
  globfree(&files);
}

#endif
