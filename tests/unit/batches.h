/* batches.h - random batches for the tests of planning: equal and unequal sizes, capacities that change
 * over time, slow workers, outages, shared links, late updates, aggregators on workers' nodes and
 * twice on one node, several servers, random deadlines. Rates and sizes are whole numbers. */
#ifndef MLFAB_TEST_BATCHES_H
#define MLFAB_TEST_BATCHES_H

#include "core/sched/plan.h"
#include "core/base/rng.h"
#include "scale.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum {
  BATCH_MOST = 300,
  BATCH_GROUPED = 48 /* the most where groups are planned */,
  BATCH_SERVERS = 3,
  BATCH_AGGREGATORS = 6
};

typedef struct random_batch {
  mlfab__network net;
  mlfab__batch b;
  mlfab__candidate updates[BATCH_MOST];
  double bytes[BATCH_MOST][BATCH_SERVERS];
  uint32_t server[BATCH_SERVERS], aggregators[BATCH_AGGREGATORS * BATCH_SERVERS];
} random_batch;

static inline uint32_t batch_below(mlfab__rng *prng, uint32_t n) {
  return (uint32_t)mlfab__rng_below(prng, n);
}

/* The traits of a batch; each is drawn independently. */
typedef struct batch_traits {
  int equal_sizes, varying, slow, outages, links, late, colocated, equal_rates;
} batch_traits;

static inline void batch_capacity(random_batch *x, mlfab__rng *prng, const batch_traits *t,
                                  enum mlfab__capacity_kind kind, uint32_t i) {
  double at[6], rate[6];
  uint32_t n = t->varying && batch_below(prng, 2) ? 1 + batch_below(prng, 5) : 1;
  double scale = t->slow && kind == MLFAB__EGRESS && batch_below(prng, 4) == 0 ? 1 : 10;
  for (uint32_t k = 0; k < n; k++) {
    at[k] = k == 0 ? 0 : at[k - 1] + 1 + batch_below(prng, 7);
    rate[k] = scale * (t->equal_rates ? 1 : 1 + batch_below(prng, 6));
    if (t->varying) rate[k] += batch_below(prng, 4);
    if (t->outages && batch_below(prng, 8) == 0) rate[k] = 0;
  }
  assert_int_equal(mlfab__network_capacity(&x->net, kind, i, n, at, rate), 0);
}

static inline void batch_network(random_batch *x, mlfab__rng *prng, const batch_traits *t,
                                 mlfab__env *env, uint32_t nodes) {
  uint32_t links = t->links ? 1 + batch_below(prng, 3) : 0;
  assert_int_equal(mlfab__network_init(&x->net, env, nodes, links), 0);
  for (uint32_t i = 0; i < nodes; i++) {
    batch_capacity(x, prng, t, MLFAB__EGRESS, i);
    batch_capacity(x, prng, t, MLFAB__INGRESS, i);
  }
  for (uint32_t i = 0; i < links; i++) batch_capacity(x, prng, t, MLFAB__SHARED, i);
  for (uint32_t p = 0; links > 0 && p < 2 * nodes; p++) {
    uint32_t from = batch_below(prng, nodes), to = batch_below(prng, nodes), list[3];
    uint32_t n = 1 + batch_below(prng, links);
    for (uint32_t i = 0; i < n; i++) list[i] = (from + i) % links;
    /* A duplicate pair and a self-loop are refused. */
    if (from != to) mlfab__network_path(&x->net, from, to, n, list);
  }
}

static uint64_t batch_seed; /* of the last batch, for messages */

/* At most `most` updates. */
static inline void batch_make(random_batch *x, mlfab__env *env, uint64_t seed, uint32_t most) {
  batch_seed = seed;
  mlfab__rng prng;
  batch_traits t;
  memset(x, 0, sizeof *x);
  mlfab__rng_seed(&prng, seed);
  int *trait = &t.equal_sizes;
  for (size_t i = 0; i < sizeof t / sizeof *trait; i++) trait[i] = batch_below(&prng, 2) == 0;
  mlfab__batch *b = &x->b;
  b->n = batch_below(&prng, most + 1);
  b->servers = batch_below(&prng, 5) == 0 ? 2 + batch_below(&prng, 2) : 1;
  b->k = batch_below(&prng, BATCH_AGGREGATORS);
  uint32_t workers = 1 + batch_below(&prng, most), nodes = workers + b->servers + 3;
  batch_network(x, &prng, &t, env, nodes);
  for (uint32_t j = 0; j < b->servers; j++)
    x->server[j] = batch_below(&prng, 4) == 0 ? batch_below(&prng, nodes) : workers + j;
  for (uint32_t q = 0; q < b->k; q++) {
    /* With several servers, every second aggregator has a node for each of them. */
    int apart = b->servers > 1 && batch_below(&prng, 2) == 0;
    uint32_t node = 0;
    for (uint32_t j = 0; j < b->servers; j++) {
      if (j == 0 || apart)
        node = t.colocated ? batch_below(&prng, nodes) : nodes - 1 - batch_below(&prng, 3);
      x->aggregators[q * b->servers + j] = node;
    }
  }
  uint32_t spread = 1 + batch_below(&prng, 2 * most);
  for (uint32_t i = 0; i < b->n; i++) {
    mlfab__candidate *c = &x->updates[i];
    for (uint32_t j = 0; j < b->servers; j++)
      x->bytes[i][j] = t.equal_sizes ? 60 : 10 * batch_below(&prng, 12);
    c->id = 100 + i;
    c->node = batch_below(&prng, t.colocated && batch_below(&prng, 3) == 0 ? nodes : workers);
    c->available = t.late && batch_below(&prng, 2) ? batch_below(&prng, 20) : 0;
    c->version = (int64_t)batch_below(&prng, spread) - spread / 4;
    c->bytes = x->bytes[i];
  }
  b->updates = x->updates;
  b->server = x->server;
  b->aggregators = x->aggregators;
  b->version = spread / 2;
  b->delay_bound = batch_below(&prng, 5) == 0 ? INT64_MAX : 1 + batch_below(&prng, spread);
  b->backlog = batch_below(&prng, 4) == 0 ? batch_below(&prng, 10) : 0;
  b->list = batch_below(&prng, 6) == 0;
  b->best = batch_below(&prng, 3) == 0;
}

/* Makes `to` (initialised, or all zero) a copy of the residuals and paths, without reservations. */
static inline void batch_copy_network(mlfab__network *to, const mlfab__network *from) {
  mlfab__network_free(to);
  assert_int_equal(mlfab__network_init(to, from->env, from->nodes, from->links), 0);
  for (uint32_t i = 0; i < from->paths.capacity; i++) {
    uint64_t key = from->paths.entries[i].key, pair = key - 1;
    const uint32_t *list = from->path_links + from->paths.entries[i].value;
    if (key == 0) continue;
    assert_int_equal(mlfab__network_path(to, (uint32_t)(pair / from->nodes),
                                         (uint32_t)(pair % from->nodes), list[0], list + 1),
                     0);
  }
  for (uint32_t i = 0; i < 2 * from->nodes + from->links; i++) {
    const mlfab__profile *profile = &from->profiles[i];
    int kind = i < from->nodes       ? MLFAB__EGRESS
               : i < 2 * from->nodes ? MLFAB__INGRESS
                                     : MLFAB__SHARED;
    uint32_t index = kind == MLFAB__EGRESS    ? i
                     : kind == MLFAB__INGRESS ? i - from->nodes
                                              : i - 2 * from->nodes;
    double *at = malloc(2 * profile->n * sizeof *at), *rate = at + profile->n;
    assert_non_null(at);
    for (uint32_t k = 0; k < profile->n;
         k++) { /* makes room: neighbours of equal rate would be merged */
      at[k] = profile->steps[k].at;
      rate[k] = k % 2;
    }
    assert_int_equal(
        mlfab__network_capacity(to, (enum mlfab__capacity_kind)kind, index, profile->n, at, rate),
        0);
    memcpy(to->profiles[i].steps, profile->steps, profile->n * sizeof *profile->steps);
    free(at);
  }
  to->mirror = from->mirror;
}

#endif
