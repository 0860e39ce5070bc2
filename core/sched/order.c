/* order.c - Alg. 1 and Alg. 2: picks the updates one by one. See order.h.
 *
 * One loop does both. It finds the pick of position p; the pick of p + 1 is the "next" that the look-ahead
 * of Alg. 2 compares with the pick of p. So each pick is computed once.
 *
 * With one server the pick is found without examining all updates. A reservation only takes bandwidth away, so an end
 * computed earlier remains a lower bound (the key). A discarded update gives bandwidth back: then the keys written
 * since its acceptance are restored from a trail. A second lower bound depends on the size only: no transfer ends
 * before the server's ingress alone could have carried it, from the fastest node. The search alternates between two
 * walks, one in the order of (key, position), one of (size, position). It ends when either walk has no update left that
 * can win. Unexamined updates end later than the pick by more than rounding, or at the same time and are behind it in
 * the list.
 *
 * With several servers, less bandwidth can let a later component end earlier, so keys are no bounds. Then only the walk
 * by size is made. A bundle ends no earlier than the servers' ingresses together could have carried all its components,
 * and each server's ingress its component. The transfer is followed no further than the best end so far. Two updates
 * are twins if their components have the same sizes and the egress of their nodes is finally the same. While all
 * servers are closed to bytes, reservations of nodes have no effect. If their egress is constant from then on, bundles
 * of twins end at the same time, and only one of them is followed.
 *
 * Invariants: in the tree the leaf of a candidate is its key, and every other leaf is never; bits[] of its rank is set;
 * candidates are the updates without a fate whose dl is at least the position. */
#include "order.h"

#define ORDER_NO_TWIN UINT32_MAX

/* Data for undoing an acceptance. */
struct mlfab__accepted {
  double end;
  uint64_t before; /* number of the network in which it was accepted */
  uint32_t update, mark, trail;
  uint8_t reason;
};

/* The last computed size bound, and its inputs. */
struct mlfab__bound_known {
  double bound, bytes;
  uint64_t network;
};

/* The last computed end of a twin, or a lower bound of it, and the network's number. */
struct mlfab__twin_known {
  double end;
  uint64_t network;
};

struct mlfab__key_before {
  double key;
  uint64_t seen;
  uint32_t update;
};

/* The state of the loop, besides the scratch memory. */
typedef struct order_run {
  mlfab__orderer *o;
  mlfab__network *net;
  const mlfab__order_input *in;
  uint32_t n, leaves;         /* leaves: a power of two, at least n */
  uint32_t accepted, trail;   /* lengths */
  uint32_t position;          /* accepted + 1 */
  uint64_t network, networks; /* number of the current network; numbers used so far */
  double earliest;            /* the earliest available time */
  double most;                /* the highest rate at which any node sends */
  double idle;                /* until then no server can receive, in network `idle_network` */
  uint64_t idle_network;
} order_run;

/* The best pick so far: its end, and the first in the list of those with equal ends. */
typedef struct order_best {
  double end;
  uint32_t update;
  int some;
} order_best;

/* ---- memory ---- */

static uint32_t order_leaves(uint32_t n) {
  uint32_t leaves = 1;
  while (leaves < n) leaves *= 2;
  return leaves;
}

static uint32_t order_words(uint32_t n) { return n / 64 + 1; }

/* Allocates `count` elements from the block at *at_p; block NULL: only computes sizes. */
static void *order_cut(unsigned char *block, size_t *at_p, size_t count, size_t size) {
  size_t at = *at_p;
  *at_p += (count * size + 15) / 16 * 16;
  return block ? block + at : NULL;
}

/* Assigns the arrays for n updates; returns the bytes needed. */
static size_t order_lay(mlfab__orderer *o, unsigned char *block, uint32_t n, uint32_t servers) {
  size_t at = 0, words = order_words(n);
  o->key = order_cut(block, &at, n, sizeof *o->key);
  o->seen = order_cut(block, &at, n, sizeof *o->seen);
  o->due = order_cut(block, &at, n, sizeof *o->due);
  o->fate = order_cut(block, &at, n, sizeof *o->fate);
  o->size = order_cut(block, &at, n, sizeof *o->size);
  o->tree = order_cut(block, &at, 2 * (size_t)order_leaves(n), sizeof *o->tree);
  o->by_size = order_cut(block, &at, n, sizeof *o->by_size);
  o->rank = order_cut(block, &at, n, sizeof *o->rank);
  o->run = order_cut(block, &at, n, sizeof *o->run);
  o->buckets = order_cut(block, &at, n, sizeof *o->buckets);
  o->bucket = order_cut(block, &at, (size_t)n + 3, sizeof *o->bucket);
  o->bits[0] = order_cut(block, &at, words, sizeof *o->bits[0]);
  o->bits[1] = order_cut(block, &at, words / 64 + 1, sizeof *o->bits[1]);
  o->bits[2] = order_cut(block, &at, words / 4096 + 1, sizeof *o->bits[2]);
  o->bounds = order_cut(block, &at, (size_t)servers + 1, sizeof *o->bounds);
  o->twin = order_cut(block, &at, n, sizeof *o->twin);
  o->twins = order_cut(block, &at, n, sizeof *o->twins);
  o->stack = order_cut(block, &at, n, sizeof *o->stack);
  return at;
}

static int order_reserve(mlfab__orderer *o, mlfab__env *env, uint32_t n, uint32_t servers) {
  size_t need = order_lay(o, NULL, n, servers);
  if (need > o->bytes) {
    if (o->memory) mlfab__free(env, o->memory, o->bytes);
    o->bytes = 0;
    need = need / 2 * 3;
    o->memory = mlfab__alloc(env, need);
    if (o->memory == NULL) return MLFAB_ERR_MEMORY;
    o->bytes = need;
  }
  order_lay(o, o->memory, n, servers);
  return 0;
}

MLFAB__INTERNAL void mlfab__order_free(mlfab__orderer *o, mlfab__env *env) {
  if (o->memory) mlfab__free(env, o->memory, o->bytes);
  if (o->trail) mlfab__free(env, o->trail, o->trail_room * sizeof *o->trail);
  memset(o, 0, sizeof *o);
}

/* ---- the set of candidates by rank: bits, and two levels that mark the non-zero words ---- */

static void order_bit_set(mlfab__orderer *o, uint32_t at) {
  for (int level = 0; level < 3; level++, at /= 64) {
    o->bits[level][at / 64] |= (uint64_t)1 << at % 64;
  }
}

static void order_bit_clear(mlfab__orderer *o, uint32_t at) {
  for (int level = 0; level < 3; level++, at /= 64) {
    o->bits[level][at / 64] &= ~((uint64_t)1 << at % 64);
    if (o->bits[level][at / 64]) return;
  }
}

/* Returns the first member at or behind `at`; n: none. */
static uint32_t order_bit_next(const order_run *r, uint32_t at) {
  const mlfab__orderer *o = r->o;
  uint32_t words = order_words(r->n), level = 0;
  uint32_t counts[3] = {words, words / 64 + 1, words / 4096 + 1};
  if (at >= r->n) return r->n;
  for (;;) {
    uint32_t word = at / 64;
    uint64_t rest = word < counts[level] ? o->bits[level][word] & (UINT64_MAX << at % 64) : 0;
    if (rest) {
      at = word * 64 + mlfab__lowest(rest);
      if (level == 0) return at;
      level--;
      at *= 64;
      continue;
    }
    at = word + 1; /* a bit of the level above stands for a word */
    if (level == 2) {
      while (at < counts[2] && o->bits[2][at] == 0) at++;
      if (at >= counts[2]) return r->n;
      at *= 64;
      continue;
    }
    if (at >= counts[level]) return r->n;
    level++;
  }
}

/* ---- the tree of keys ---- */

static void order_tree_set(order_run *r, uint32_t update, double key) {
  double *tree = r->o->tree;
  uint32_t at = r->leaves + update;
  tree[at] = key;
  while (at > 1) {
    at /= 2;
    double least = tree[2 * at] < tree[2 * at + 1] ? tree[2 * at] : tree[2 * at + 1];
    if (tree[at] == least) return;
    tree[at] = least;
  }
}

/* Returns the first update in the list whose key is not later than `time`; one must exist. */
static uint32_t order_tree_first(const order_run *r, double time) {
  const double *tree = r->o->tree;
  uint32_t at = 1;
  while (at < r->leaves) at = 2 * at + (mlfab__network_less(time, tree[2 * at]) ? 1 : 0);
  return at - r->leaves;
}

/* Returns the first update with the smallest key. */
static uint32_t order_tree_least(const order_run *r) {
  const double *tree = r->o->tree;
  uint32_t at = 1;
  while (at < r->leaves) at = 2 * at + (tree[2 * at + 1] < tree[2 * at] ? 1 : 0);
  return at - r->leaves;
}

/* ---- candidates ---- */

static int order_is_candidate(const order_run *r, uint32_t update) {
  return !r->o->fate[update] && r->o->due[update] >= r->position;
}

static void order_enable(order_run *r, uint32_t update) {
  order_bit_set(r->o, r->o->rank[update]);
  order_tree_set(r, update, r->o->key[update]);
}

static void order_disable(order_run *r, uint32_t update) {
  order_bit_clear(r->o, r->o->rank[update]);
  order_tree_set(r, update, mlfab__network_never());
}

static mlfab__bundle order_bundle(const order_run *r, uint32_t update) {
  const mlfab__candidate *c = &r->in->updates[update];
  return (mlfab__bundle){.from = &c->node,
                         .to = r->in->server,
                         .to_step = 1,
                         .bytes = c->bytes,
                         .n = r->in->servers,
                         .available = c->available};
}

/* Logs a key, so that undoing an acceptance can restore it. */
static int order_trail_push(order_run *r, uint32_t update) {
  mlfab__orderer *o = r->o;
  if (r->trail >= o->trail_room) {
    void *trail = mlfab__grow(r->net->env, o->trail, &o->trail_room, (uint64_t)r->trail + 1,
                              sizeof *o->trail);
    if (trail == NULL) return MLFAB_ERR_MEMORY;
    o->trail = trail;
  }
  o->trail[r->trail++] = (struct mlfab__key_before){o->key[update], o->seen[update], update};
  return 0;
}

/* Returns the entry of its twins in the present network; NULL: it has an end of its own. */
static struct mlfab__twin_known *order_twin(order_run *r, uint32_t update) {
  const mlfab__candidate *c = &r->in->updates[update];
  if (r->o->twin[update] == ORDER_NO_TWIN) return NULL;
  if (r->idle_network != r->network) {
    r->idle_network = r->network;
    r->idle = mlfab__network_idle(r->net, r->in->server, r->in->servers, r->earliest);
  }
  const mlfab__profile *p = mlfab__network_residual(r->net, MLFAB__EGRESS, c->node);
  double steady = p->steps[p->n - 1].at;
  if (c->available > r->idle || steady > r->idle) return NULL;
  return &r->o->twins[r->o->twin[update]];
}

/* Is its key its end in the present network? */
static int order_is_seen(const order_run *r, uint32_t update) {
  return r->o->seen[update] == r->network || !(r->o->size[update] > 0);
}

/* Computes the end of a candidate, unless it is later than the best, and updates the best. */
static int order_look(order_run *r, uint32_t update, order_best *best) {
  mlfab__orderer *o = r->o;
  if (!order_is_seen(r, update)) {
    mlfab__bundle bundle = order_bundle(r, update);
    double end;
    o->evaluations++;
    int walked =
        mlfab__bundle_end(r->net, &bundle, best->some ? best->end : mlfab__network_never(), &end);
    if (walked < 0 || order_trail_push(r, update)) return MLFAB_ERR_MEMORY;
    struct mlfab__twin_known *twin = order_twin(r, update);
    if (twin) *twin = (struct mlfab__twin_known){end, r->network};
    if (walked == MLFAB__ENDS || !mlfab__finite(end)) {
      o->key[update] = end;
      o->seen[update] = r->network;
    } else if (r->in->servers > 1 || end > o->key[update]) {
      o->key[update] = end;
    }
    order_tree_set(r, update, o->key[update]);
    if (o->seen[update] != r->network) return 0;
  }
  double end = o->key[update];
  if (!mlfab__finite(end)) return 0;
  if (!best->some || mlfab__network_less(end, best->end)) {
    *best = (order_best){end, update, 1};
  } else if (!mlfab__network_less(best->end, end)) {
    if (end < best->end) best->end = end;
    if (update < best->update) best->update = update;
  }
  return 0;
}

/* Picks among the candidates whose dl is the current position. */
static int order_pick_due(order_run *r, order_best *best) {
  const mlfab__orderer *o = r->o;
  if (r->position > r->n) return 0;
  for (uint32_t at = o->bucket[r->position]; at < o->bucket[r->position + 1]; at++) {
    uint32_t update = o->buckets[at];
    if (o->fate[update]) continue;
    if (best->some && r->in->servers == 1 && mlfab__network_less(best->end, o->key[update]))
      continue;
    int code = order_look(r, update, best);
    if (code) return code;
  }
  return 0;
}

/* ---- the two walks ---- */

/* Takes one step in the order of keys: returns 1 if no other update can win. */
static int order_step_key(order_run *r, order_best *best) {
  const mlfab__orderer *o = r->o;
  uint32_t least = order_tree_least(r);
  double key = o->tree[1];
  if (!mlfab__finite(key) || (best->some && mlfab__network_less(best->end, key))) return 1;
  if (order_is_seen(r, least)) {
    /* It ends first; updates with an equal end but an earlier position go first. */
    uint32_t first = order_tree_first(r, key);
    if (order_is_seen(r, first)) {
      *best = (order_best){o->key[first], first, 1};
      return 1;
    }
    least = first;
  }
  return order_look(r, least, best);
}

/* Returns the bound of these bytes to `n` servers, from `first` on, in the current network. */
static int order_bound(order_run *r, uint32_t first, uint32_t n, double bytes,
                       const order_best *best, double *bound_p) {
  struct mlfab__bound_known *known = &r->o->bounds[n > 1 ? r->in->servers : first];
  if (known->network != r->network || known->bytes != bytes) {
    int walked =
        mlfab__network_carries(r->net, r->in->server + first, n, r->most, bytes, r->earliest,
                               best->some ? best->end : mlfab__network_never(), &known->bound);
    if (walked < 0) return walked;
    known->network = r->network;
    known->bytes = bytes;
  }
  *bound_p = known->bound;
  return 0;
}

/* Returns 1 if an update that ends no earlier than `bound` cannot win. */
static int order_is_beaten(const order_best *best, uint32_t update, double bound) {
  if (!best->some) return 0;
  return mlfab__network_less(best->end, bound) ||
         (update > best->update && !mlfab__network_less(bound, best->end));
}

/* Returns 1 if a bundle cannot win because of its twins, or of one of its components. */
static int order_bundle_loses(order_run *r, uint32_t update, const order_best *best) {
  const mlfab__candidate *c = &r->in->updates[update];
  const struct mlfab__twin_known *twin = order_twin(r, update);
  if (twin && twin->network == r->network && order_is_beaten(best, update, twin->end)) return 1;
  for (uint32_t j = 0; best->some && j < r->in->servers; j++) {
    double bound;
    if (c->node == r->in->server[j] || !(c->bytes[j] > 0)) continue;
    int code = order_bound(r, j, 1, c->bytes[j], best, &bound);
    if (code) return code;
    if (order_is_beaten(best, update, bound)) return 1;
  }
  return 0;
}

/* Takes one step in the order of sizes, from *rank_p: returns 1 if no other update can win. */
static int order_step_size(order_run *r, uint32_t *rank_p, order_best *best) {
  const mlfab__orderer *o = r->o;
  uint32_t rank = *rank_p, servers = r->in->servers;
  if (rank >= r->n) return 1;
  uint32_t update = o->by_size[rank];
  *rank_p = order_bit_next(r, rank + 1);
  if (o->size[update] > 0) {
    double bound;
    int code = order_bound(r, 0, servers, o->size[update], best, &bound);
    if (code) return code;
    if (best->some && mlfab__network_less(best->end, bound)) return 1;
    if (order_is_beaten(best, update, bound)) {
      /* The later updates of the same size in the list cannot win either. */
      *rank_p = order_bit_next(r, o->run[rank]);
      return 0;
    }
  }
  if (servers == 1) {
    if (best->some && mlfab__network_less(best->end, o->key[update])) return 0;
  } else {
    int loses = order_bundle_loses(r, update, best);
    if (loses) return loses < 0 ? loses : 0;
  }
  return order_look(r, update, best);
}

/* Picks among all candidates. */
static int order_pick_shortest(order_run *r, order_best *best) {
  uint32_t rank = order_bit_next(r, 0);
  int done = 0;
  while (done == 0) {
    if (r->in->servers == 1) done = order_step_key(r, best);
    if (done == 0) done = order_step_size(r, &rank, best);
  }
  return done < 0 ? done : 0;
}

/* ---- accepting and undoing ---- */

static int order_accept(order_run *r, uint32_t update, uint8_t reason) {
  mlfab__orderer *o = r->o;
  struct mlfab__accepted *a = &o->stack[r->accepted];
  mlfab__bundle bundle = order_bundle(r, update);
  *a = (struct mlfab__accepted){.before = r->network,
                                .update = update,
                                .mark = mlfab__network_mark(r->net),
                                .trail = r->trail,
                                .reason = reason};
  int walked = mlfab__bundle_reserve(r->net, &bundle, mlfab__network_never(), &a->end);
  if (walked < 0) return walked;
  order_disable(r, update);
  o->fate[update] = reason;
  r->accepted++;
  r->network = ++r->networks;
  /* Acceptances before a shortest pick are never undone. */
  if (reason == MLFAB__SHORTEST) r->trail = 0;
  for (uint32_t at = o->bucket[r->position]; at < o->bucket[r->position + 1]; at++) {
    if (!o->fate[o->buckets[at]]) order_disable(r, o->buckets[at]);
  }
  r->position++;
  return 0;
}

/* Undoes the last acceptance, and drops the update. */
static void order_discard(order_run *r) {
  mlfab__orderer *o = r->o;
  const struct mlfab__accepted *a = &o->stack[--r->accepted];
  mlfab__network_undo(r->net, a->mark);
  o->fate[a->update] = MLFAB__LOOKAHEAD;
  r->network = a->before;
  r->position--;
  while (r->trail > a->trail) {
    const struct mlfab__key_before *k = &o->trail[--r->trail];
    o->key[k->update] = k->key;
    o->seen[k->update] = k->seen;
    if (order_is_candidate(r, k->update)) order_tree_set(r, k->update, k->key);
  }
  for (uint32_t at = o->bucket[r->position]; at < o->bucket[r->position + 1]; at++) {
    if (!o->fate[o->buckets[at]]) order_enable(r, o->buckets[at]);
  }
}

/* Returns 1 if an update that ends at `end` would wait for the last accepted one. */
static int order_looks_ahead(const order_run *r, double end) {
  if (r->accepted == 0) return 0;
  const struct mlfab__accepted *last = &r->o->stack[r->accepted - 1];
  if (last->reason != MLFAB__DEADLINE) return 0;
  return mlfab__network_less(end, last->end);
}

static int order_loop(order_run *r) {
  for (;;) {
    order_best best = {0};
    uint8_t reason = MLFAB__DEADLINE;
    int code = order_pick_due(r, &best);
    if (!code && !best.some) {
      reason = MLFAB__SHORTEST;
      code = order_pick_shortest(r, &best);
    }
    if (code || !best.some) return code;
    if (order_looks_ahead(r, r->o->key[best.update])) {
      order_discard(r);
      continue;
    }
    code = order_accept(r, best.update, reason);
    if (code) return code;
  }
}

/* ---- input and output ---- */

MLFAB__INTERNAL int64_t mlfab__order_deadline(int64_t version, int64_t delay_bound,
                                              int64_t model_version) {
  if (delay_bound == INT64_MAX) return INT64_MAX;
  /* Computes version - model_version first; each step saturates. */
  int64_t lead = version;
  if (model_version < 0 && version > INT64_MAX + model_version) {
    lead = INT64_MAX;
  } else if (model_version > 0 && version < INT64_MIN + model_version) {
    lead = INT64_MIN;
  } else {
    lead = version - model_version;
  }
  if (delay_bound > 0 && lead > INT64_MAX - delay_bound) return INT64_MAX;
  if (delay_bound < 0 && lead < INT64_MIN - delay_bound) return INT64_MIN;
  return lead + delay_bound;
}

static int order_is_amount(double x) { return mlfab__finite(x) && x >= 0; }

static int order_check(const mlfab__network *net, const mlfab__order_input *in) {
  if (in->servers == 0) return MLFAB_ERR_ARGUMENT;
  for (uint32_t j = 0; j < in->servers; j++) {
    if (in->server[j] >= net->nodes) return MLFAB_ERR_ARGUMENT;
  }
  for (uint32_t i = 0; i < in->n; i++) {
    const mlfab__candidate *c = &in->updates[i];
    /* An infinite time is allowed: the update is never available. */
    if (c->node >= net->nodes || !(c->available >= 0)) return MLFAB_ERR_ARGUMENT;
    for (uint32_t j = 0; j < in->servers; j++) {
      if (!order_is_amount(c->bytes[j])) return MLFAB_ERR_ARGUMENT;
    }
  }
  return 0;
}

/* Clamps dl to 0..n+1, and sorts the updates by dl. */
static void order_fill_buckets(order_run *r, int deadlines) {
  mlfab__orderer *o = r->o;
  const mlfab__order_input *in = r->in;
  memset(o->bucket, 0, ((size_t)r->n + 3) * sizeof *o->bucket);
  for (uint32_t i = 0; i < r->n; i++) {
    int64_t dl = mlfab__order_deadline(in->updates[i].version,
                                       deadlines ? in->delay_bound : INT64_MAX, in->version);
    o->due[i] = dl <= 0 ? 0 : dl > (int64_t)r->n ? r->n + 1 : (uint32_t)dl;
    o->bucket[o->due[i] + 1]++;
  }
  for (uint32_t d = 1; d <= r->n + 2; d++) o->bucket[d] += o->bucket[d - 1];
  for (uint32_t i = 0; i < r->n; i++) o->buckets[o->bucket[o->due[i]]++] = i;
  for (uint32_t d = r->n + 2; d > 0; d--) o->bucket[d] = o->bucket[d - 1];
  o->bucket[0] = 0;
}

/* Returns the bytes of an update that go over the network. Each component of a bundle may end when all but 1e-9 of it
 * has been sent, so its size is smaller by that. */
static double order_size(const order_run *r, uint32_t update) {
  const mlfab__candidate *c = &r->in->updates[update];
  double size = 0;
  for (uint32_t j = 0; j < r->in->servers; j++) {
    int local = c->node == r->in->server[j];
    if (!local) size = mlfab__network_exact(size + c->bytes[j]);
  }
  return r->in->servers > 1 ? mlfab__network_exact(size * (1 - 2e-9)) : size;
}

static int order_before(const order_run *r, uint32_t a, uint32_t b) {
  const double *size = r->o->size;
  return size[a] < size[b] || (!(size[b] < size[a]) && a < b);
}

/* Compares the sizes of the components of two updates, then the rates at which their nodes send in the end. */
static int order_compare(const order_run *r, uint32_t a, uint32_t b) {
  const mlfab__candidate *u = r->in->updates;
  for (uint32_t j = 0; j < r->in->servers; j++) {
    if (u[a].bytes[j] < u[b].bytes[j]) return -1;
    if (u[b].bytes[j] < u[a].bytes[j]) return 1;
  }
  const mlfab__profile *p = mlfab__network_residual(r->net, MLFAB__EGRESS, u[a].node);
  const mlfab__profile *q = mlfab__network_residual(r->net, MLFAB__EGRESS, u[b].node);
  double mine = p->steps[p->n - 1].rate, other = q->steps[q->n - 1].rate;
  return mine < other ? -1 : other < mine;
}

static int order_twin_before(const order_run *r, uint32_t a, uint32_t b) {
  int compared = order_compare(r, a, b);
  return compared < 0 || (compared == 0 && a < b);
}

/* Sorts all updates into by_size by merging runs of doubling length; `run` is the second buffer. */
static void order_sort(order_run *r, int (*before)(const order_run *r, uint32_t a, uint32_t b)) {
  uint32_t *from = r->o->by_size, *to = r->o->run, n = r->n;
  for (uint32_t i = 0; i < n; i++) from[i] = i;
  for (uint32_t width = 1; width < n; width *= 2) {
    for (uint32_t start = 0; start < n; start += 2 * width) {
      uint32_t middle = n - start > width ? start + width : n;
      uint32_t end = n - middle > width ? middle + width : n;
      uint32_t a = start, b = middle;
      for (uint32_t at = start; at < end; at++) {
        int second = a == middle || (b < end && before(r, from[b], from[a]));
        to[at] = second ? from[b++] : from[a++];
      }
    }
    uint32_t *swap = from;
    from = to;
    to = swap;
  }
  if (from != r->o->by_size) memcpy(r->o->by_size, from, n * sizeof *from);
}

/* Finds the twins. Updates of one server need none. The same holds for updates on a server's node, or with paths over
 * shared links. */
static void order_pair(order_run *r) {
  mlfab__orderer *o = r->o;
  for (uint32_t i = 0; i < r->n; i++) o->twin[i] = ORDER_NO_TWIN;
  if (r->in->servers == 1 || r->net->path_count > 0 || r->net->mirror) return;
  order_sort(r, order_twin_before);
  for (uint32_t at = 0, first = 0; at < r->n; at++) {
    uint32_t update = o->by_size[at], local = 0;
    if (at == 0 || order_compare(r, first, update) != 0) first = update;
    o->twins[update].network = 0;
    for (uint32_t j = 0; j < r->in->servers; j++) {
      local |= r->in->updates[update].node == r->in->server[j];
    }
    if (!local) o->twin[update] = first;
  }
}

static void order_rank(order_run *r) {
  mlfab__orderer *o = r->o;
  order_sort(r, order_before);
  for (uint32_t rank = r->n; rank > 0; rank--) {
    uint32_t at = rank - 1, update = o->by_size[at];
    int last = rank == r->n || o->size[update] < o->size[o->by_size[rank]];
    o->run[at] = last ? rank : o->run[rank];
    o->rank[update] = at;
  }
}

static void order_begin(order_run *r, int deadlines) {
  mlfab__orderer *o = r->o;
  uint32_t words = order_words(r->n);
  memset(o->bits[0], 0, words * sizeof *o->bits[0]);
  memset(o->bits[1], 0, (words / 64 + 1) * sizeof *o->bits[1]);
  memset(o->bits[2], 0, (words / 4096 + 1) * sizeof *o->bits[2]);
  for (uint32_t i = 0; i < 2 * r->leaves; i++) o->tree[i] = mlfab__network_never();
  memset(o->bounds, 0, ((size_t)r->in->servers + 1) * sizeof *o->bounds);
  r->earliest = mlfab__network_never();
  for (uint32_t i = 0; i < r->n; i++) {
    const mlfab__candidate *c = &r->in->updates[i];
    o->key[i] = c->available;
    o->seen[i] = 0;
    o->fate[i] = 0;
    o->size[i] = order_size(r, i);
    if (c->available < r->earliest) r->earliest = c->available;
    double most = mlfab__network_most(r->net, c->node);
    if (most > r->most) r->most = most;
  }
  order_fill_buckets(r, deadlines);
  order_pair(r);
  order_rank(r);
  for (uint32_t i = 0; i < r->n; i++) {
    if (o->due[i] > 0) order_enable(r, i);
  }
}

/* Writes the accepted updates in order, then the others in list order. */
static void order_write(const order_run *r, mlfab__ordered *out) {
  const mlfab__orderer *o = r->o;
  uint32_t at = r->accepted;
  for (uint32_t i = 0; i < r->accepted; i++) {
    const struct mlfab__accepted *a = &o->stack[i];
    out[i] = (mlfab__ordered){.update = a->update, .reason = a->reason, .end = a->end};
  }
  for (uint32_t i = 0; i < r->n; i++) {
    uint8_t fate = o->fate[i];
    if (fate == MLFAB__DEADLINE || fate == MLFAB__SHORTEST) continue;
    if (!fate) fate = o->due[i] < r->position ? MLFAB__EXPIRED : MLFAB__UNREACHABLE;
    out[at++] = (mlfab__ordered){.update = i, .reason = fate, .end = mlfab__network_never()};
  }
}

static int order_run_all(mlfab__orderer *o, mlfab__network *net, const mlfab__order_input *in,
                         int deadlines, mlfab__ordered *out, uint32_t *applied_p) {
  int code = order_check(net, in);
  if (code) return code;
  /* Positions and leaves fit in 32 bits. */
  if (in->n > 1u << 28) return MLFAB_ERR_LIMIT;
  code = order_reserve(o, net->env, in->n, in->servers);
  if (code) return code;
  order_run r = {.o = o, .net = net, .in = in, .n = in->n, .leaves = order_leaves(in->n)};
  uint32_t mark = mlfab__network_mark(net);
  r.position = 1;
  r.network = r.networks = 1;
  order_begin(&r, deadlines);
  net->searching++;
  code = order_loop(&r);
  net->searching--;
  if (code) {
    mlfab__network_undo(net, mark);
    return code;
  }
  order_write(&r, out);
  *applied_p = r.accepted;
  return 0;
}

MLFAB__INTERNAL int mlfab__order_deadlines(mlfab__orderer *o, mlfab__network *net,
                                           const mlfab__order_input *in, mlfab__ordered *out,
                                           uint32_t *applied_p) {
  return order_run_all(o, net, in, 1, out, applied_p);
}

MLFAB__INTERNAL int mlfab__order_shortest(mlfab__orderer *o, mlfab__network *net,
                                          const mlfab__order_input *in, mlfab__ordered *out,
                                          uint32_t *applied_p) {
  return order_run_all(o, net, in, 0, out, applied_p);
}
