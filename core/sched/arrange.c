/* arrange.c - the scheduler role: plans the tree of an allreduce. See scheduler.h, and trees.h for the tree.
 *
 * The workers are a list without an order: shares go to the root by Alg. 3, and the sum comes back by its mirror, on a
 * network with the last reported capacities. Updates under way are ignored, because workers that reduce in rounds send
 * none. A worker that aggregates adds its own share too, whatever group the plan chose for it, and sends to the root.
 * So a path has at most two hops.
 *
 * Aggregators are the workers with the best links (among equals chosen by the seed), at most one on each
 * host; they are listed where their group probably begins (see batch.c). If no plan is possible, the reply
 * is empty and the root is the only aggregator.
 *
 * Source: MLfabric §6 (AllReduce), §5.2, §10.3. */
#include "scheduler.h"

enum { ARRANGE_MAX = 1024 };

/* Scratch memory for one tree; allocated for each request, because trees are rare. */
typedef struct arrange_work {
  uint32_t ranks[ARRANGE_MAX]; /* the root first */
  uint32_t nodes[ARRANGE_MAX]; /* nodes of the network, in this order */
  uint32_t hubs[MLFAB__BATCH_AGGREGATORS], hub_nodes[MLFAB__BATCH_AGGREGATORS];
  uint8_t adds[MLFAB__BATCH_AGGREGATORS], gives[MLFAB__BATCH_AGGREGATORS];
  double available[ARRANGE_MAX], arrive[ARRANGE_MAX];
  mlfab__grouped push[ARRANGE_MAX];
  mlfab__delivery get[ARRANGE_MAX];
  mlfab__tree_node places[ARRANGE_MAX];
  uint32_t n, k;
} arrange_work;

/* Returns the rate of the slower of a worker's two links. */
static double arrange_rate(const mlfab__scheduler *s, uint32_t worker) {
  double in = mlfab__scheduler_rate(s, s->stations[worker].host, 0);
  double out = mlfab__scheduler_rate(s, s->stations[worker].host, 1);
  return in < out ? in : out;
}

/* Orders the ranks: the root first, then by rate. Returns 0 if one of them is no worker of this fabric. */
static int arrange_list(const mlfab__scheduler *s, arrange_work *work, const mlfab__tree_ask *ask) {
  uint32_t root = 0;
  while (root < ask->nodes && work->ranks[root] != ask->root) root++;
  if (root == ask->nodes) return 0;
  work->n = ask->nodes;
  work->ranks[root] = work->ranks[0];
  work->ranks[0] = ask->root;
  for (uint32_t i = 1; i < work->n; i++) {
    uint32_t rank = work->ranks[i], k = i;
    if (rank >= s->workers) return 0;
    double rate = arrange_rate(s, rank);
    for (; k > 1; k--) {
      uint32_t before = work->ranks[k - 1];
      double other = arrange_rate(s, before);
      if (other > rate || (!(rate > other) && before < rank)) break;
      work->ranks[k] = before;
    }
    work->ranks[k] = rank;
  }
  return 1;
}

/* Moves a rank forward in the list. */
static void arrange_move(arrange_work *work, uint32_t from, uint32_t to) {
  uint32_t rank = work->ranks[from];
  memmove(work->ranks + 1 + to, work->ranks + to, (from - to) * sizeof *work->ranks);
  work->ranks[to] = rank;
}

/* Chooses the aggregators: the fastest, among equals by the seed. Each has its own host, different from the root's:
 * there it would save nothing. */
static void arrange_hubs(mlfab__scheduler *s, arrange_work *work) {
  uint32_t most = (uint32_t)mlfab__min(MLFAB__BATCH_AGGREGATORS, (work->n - 1) / 2), at = 1;
  while (work->k < most && at < work->n) {
    double rate = arrange_rate(s, work->ranks[at]);
    uint32_t equals = at;
    if (!(rate > 0.0)) break;
    while (equals < work->n && !(arrange_rate(s, work->ranks[equals]) < rate)) equals++;
    uint32_t pick = at + (uint32_t)mlfab__rng_below(&s->prng, equals - at);
    uint32_t worker = work->ranks[pick], host = s->stations[worker].host;
    arrange_move(work, pick, at++);
    int taken = host == s->stations[work->ranks[0]].host;
    for (uint32_t q = 0; q < work->k; q++) taken |= work->hub_nodes[q] == host;
    if (taken) continue;
    work->hub_nodes[work->k] = host;
    work->hubs[work->k++] = worker;
  }
  /* The q-th group begins at item q (q + 1) / 2 of the list, counted from 0 behind the root. */
  for (uint32_t q = work->k; q > 0; q--) {
    uint32_t from = 1, to = 1 + q * (q + 1) / 2;
    while (work->ranks[from] != work->hubs[q - 1]) from++;
    if (to >= work->n) to = work->n - 1;
    for (; from < to; from++) work->ranks[from] = work->ranks[from + 1];
    if (from > to) arrange_move(work, from, to);
    work->ranks[to] = work->hubs[q - 1];
  }
}

/* Returns 1 if all workers can be reached. */
static int arrange_plan(mlfab__scheduler *s, arrange_work *work, double bytes) {
  mlfab__group_choice up, down;
  double makespan;
  for (uint32_t i = 0; i < work->n; i++) work->nodes[i] = s->stations[work->ranks[i]].host;
  mlfab__network_reset(&s->network);
  s->network.watch = NULL;
  for (uint32_t i = 0; i <= s->nhosts; i++) {
    uint32_t host = i < s->nhosts ? i : s->hosts_room - 1;
    mlfab__network_constant(&s->network, MLFAB__INGRESS, host, mlfab__scheduler_rate(s, host, 0));
    mlfab__network_constant(&s->network, MLFAB__EGRESS, host, mlfab__scheduler_rate(s, host, 1));
  }
  mlfab__allreduce reduce = {.root = work->nodes[0],
                             .bytes = bytes,
                             .aggregators = work->hub_nodes,
                             .distributors = work->hub_nodes,
                             .k = work->k,
                             .distributors_k = work->k,
                             .nodes = work->nodes,
                             .available = work->available,
                             .n = work->n};
  return !mlfab__group_allreduce(&s->grouper, &s->network, &reduce, work->push, work->get, &up,
                                 &down, &makespan) &&
         mlfab__finite(makespan);
}

/* Converts the plan to a tree, children in the order in which their shares arrive. */
static void arrange_places(arrange_work *work) {
  for (uint32_t i = 1; i < work->n; i++) {
    uint32_t up = work->push[i].q, down = work->get[i].q;
    if (up > 0 && work->hubs[up - 1] != work->ranks[i]) work->adds[up - 1] = 1;
    if (down > 0 && work->hubs[down - 1] != work->ranks[i]) work->gives[down - 1] = 1;
  }
  for (uint32_t i = 0; i < work->n; i++) {
    uint32_t rank = work->ranks[i], root = i == 0 ? MLFAB__NO_NODE : work->ranks[0], k = i;
    uint32_t up = work->push[i].q, down = work->get[i].q;
    mlfab__tree_node place = {rank, root, root};
    double arrive = i == 0 ? -1.0 : up > 0 ? work->push[i].arrive : work->push[i].end;
    if (i > 0 && up > 0) place.parent = work->hubs[up - 1];
    if (i > 0 && down > 0) place.giver = work->hubs[down - 1];
    for (uint32_t q = 0; q < work->k; q++) {
      if (work->hubs[q] != rank) continue;
      if (work->adds[q] || place.parent == rank) place.parent = root;
      if (work->gives[q] || place.giver == rank) place.giver = root;
      if (work->adds[q] && up > 0) arrive = work->push[i].end;
    }
    for (; k > 0 && work->arrive[k - 1] > arrive; k--) {
      work->arrive[k] = work->arrive[k - 1];
      work->places[k] = work->places[k - 1];
    }
    work->arrive[k] = arrive;
    work->places[k] = place;
  }
}

MLFAB__INTERNAL void mlfab__scheduler_arrange(mlfab__scheduler *s, uint32_t server,
                                              const mlfab__frame_in *frame) {
  mlfab__tree_ask ask;
  if (mlfab__port_refuse(&s->port, server, frame,
                         mlfab__decode_tree_ask(frame->meta, frame->meta_bytes, &ask, NULL)))
    return;
  mlfab__tree_plan plan = {ask.number, 0};
  arrange_work *work = NULL;
  if (ask.nodes <= ARRANGE_MAX) work = mlfab__alloc(s->env, sizeof *work);
  if (work) {
    (void)mlfab__decode_tree_ask(frame->meta, frame->meta_bytes, &ask, work->ranks);
    if (arrange_list(s, work, &ask)) {
      arrange_hubs(s, work);
      if (arrange_plan(s, work, (double)ask.bytes)) {
        arrange_places(work);
        plan.nodes = work->n;
      }
    }
  }
  s->port.post(s->port.self, server, MLFAB__TREE_PLAN, s->meta,
               mlfab__encode_tree_plan(s->meta, &plan, work ? work->places : NULL));
  mlfab__free(s->env, work, sizeof *work);
}
