/* models.c - models of plain asynchronous SGD and of ring and tree all-reduce, with which MLfabric is
 * compared.
 *
 * They are ideal: no latency, no cost of a message, adding takes no time, traffic within a host takes no
 * time. In ring and tree, all workers start together and wait for the slowest computation. The links are
 * those that the library had in the same setting and seed.
 *
 * Source: MLfabric §7 (RR-Sync, Tr-Sync), which specifies neither the order of ranks nor the tree; paper.h
 * and the comments below describe those chosen here. */
#include "paper.h"

#include <string.h>

enum {
  FLOWS = WORKERS,
  ALL_HOSTS = HOSTS + 1,
  SERVER = WORKERS
}; /* the server is on the last host */

typedef struct clockwork {
  const paper_case *run;
  double now_ns;
} clockwork;

static uint64_t period_of(double ns) { return (uint64_t)(ns / (double)PERIOD_NS); }

/* Current rate of a host's link, bytes per nanosecond. */
static double rate_now(const clockwork *c, uint32_t host, uint32_t out) {
  if (host == HOSTS) return FULL_RATE * 1e-9;
  return (double)paper_rate(c->run->network, c->run->seed, host, out, period_of(c->now_ns)) * 1e-9;
}

/* Time until the links change, never 0. */
static double until_change(const clockwork *c) {
  double left = (double)(period_of(c->now_ns) + 1) * (double)PERIOD_NS - c->now_ns;
  return left > 1 ? left : 1;
}

/* Moves `bytes` at a rate that is recomputed whenever the links change. */
static void move(clockwork *c, double bytes, double (*rate)(const clockwork *c, const void *user),
                 const void *user) {
  while (bytes > 1e-6) {
    double speed = rate(c, user), left = until_change(c), need = bytes / speed;
    double step = need < left ? need : left;
    bytes -= step * speed;
    c->now_ns += step;
  }
}

/* ---- ring ---- */

static double ring_rate(const clockwork *c, const void *user) {
  double flows = (double)*(const uint32_t *)user, slowest = 1e9;
  for (uint32_t h = 0; h < HOSTS; h++) {
    for (uint32_t out = 0; out < 2; out++) {
      double rate = rate_now(c, h, out) / flows;
      if (rate < slowest) slowest = rate;
    }
  }
  return slowest;
}

double paper_ring_ms(const paper_case *run, uint32_t flows, uint32_t rounds) {
  clockwork c = {run, 0};
  for (uint32_t r = 0; r < rounds; r++) {
    c.now_ns += (double)paper_slowest_ns(run->compute, run->seed, r);
    move(&c, 2.0 * (WORKERS - 1) / WORKERS * (double)run->bytes, ring_rate, &flows);
  }
  return c.now_ns / rounds / MS;
}

/* ---- flows that share links ---- */

static uint32_t host_of(uint32_t rank) { return rank / 2; }

/* A message from one rank to another. */
typedef struct flow {
  uint32_t from, to;
  double left, rate;
  int begun, ended;
} flow;

static int moving(const flow *f) { return f->begun && !f->ended; }

/* Max-min fair: the link that gives its flows the least determines their rates, then the next one. */
static void share_links(const clockwork *c, flow *flows) {
  double left[ALL_HOSTS][2];
  int settled[FLOWS] = {0};
  for (uint32_t h = 0; h < ALL_HOSTS; h++)
    for (uint32_t out = 0; out < 2; out++) left[h][out] = rate_now(c, h, out);
  for (;;) {
    uint32_t count[ALL_HOSTS][2] = {{0}}, host = 0, way = 0;
    double least = 1e9;
    for (uint32_t i = 0; i < WORKERS; i++) {
      if (!moving(&flows[i]) || settled[i]) continue;
      count[host_of(flows[i].from)][1]++;
      count[host_of(flows[i].to)][0]++;
    }
    for (uint32_t h = 0; h < ALL_HOSTS; h++) {
      for (uint32_t out = 0; out < 2; out++) {
        if (!count[h][out] || left[h][out] / count[h][out] >= least) continue;
        least = left[h][out] / count[h][out];
        host = h;
        way = out;
      }
    }
    if (!count[host][way]) return;
    for (uint32_t i = 0; i < WORKERS; i++) {
      if (!moving(&flows[i]) || settled[i]) continue;
      if (host_of(way ? flows[i].from : flows[i].to) != host) continue;
      settled[i] = 1;
      flows[i].rate = least;
      left[host_of(flows[i].from)][1] -= least;
      left[host_of(flows[i].to)][0] -= least;
    }
  }
}

/* Advances the time to the next change of links, the first end of a flow, or by `ns` at most. */
static void pass(clockwork *c, flow *flows, double ns) {
  double step = until_change(c);
  if (ns < step) step = ns;
  share_links(c, flows);
  for (uint32_t i = 0; i < FLOWS; i++)
    if (moving(&flows[i]) && flows[i].left / flows[i].rate < step)
      step = flows[i].left / flows[i].rate;
  c->now_ns += step;
  for (uint32_t i = 0; i < FLOWS; i++) {
    if (!moving(&flows[i])) continue;
    flows[i].left -= step * flows[i].rate;
    flows[i].ended = flows[i].left < 1e-3;
  }
}

/* ---- plain asynchronous SGD ---- */

double paper_async_ms(const paper_case *run) {
  clockwork c = {run, 0};
  flow flows[FLOWS] = {{0}}; /* a worker's push, or its pull */
  double ready_ns[WORKERS], end_ns = (double)(PERIOD_NS + run->measure_ns), rate = 0;
  double first_ns[WORKERS] = {0}, last_ns[WORKERS] = {0};
  uint64_t steps[WORKERS] = {0}, applied[WORKERS] = {0};
  for (uint32_t i = 0; i < WORKERS; i++)
    ready_ns[i] = (double)paper_compute_ns(run->compute, run->seed, i, steps[i]++);
  while (c.now_ns < end_ns) {
    double next = end_ns;
    for (uint32_t i = 0; i < WORKERS; i++) {
      flow *f = &flows[i];
      if (f->ended && f->to == SERVER) {
        if (!first_ns[i] && c.now_ns > (double)PERIOD_NS) first_ns[i] = c.now_ns;
        applied[i] += first_ns[i] > 0;
        last_ns[i] = c.now_ns;
        *f = (flow){SERVER, i, (double)run->bytes, 0, 1, 0};
      } else if (f->ended) {
        *f = (flow){0};
        ready_ns[i] = c.now_ns + (double)paper_compute_ns(run->compute, run->seed, i, steps[i]++);
      }
      if (!f->begun && ready_ns[i] <= c.now_ns) *f = (flow){i, SERVER, (double)run->bytes, 0, 1, 0};
      if (!f->begun && ready_ns[i] < next) next = ready_ns[i];
    }
    pass(&c, flows, next - c.now_ns > 1 ? next - c.now_ns : 1);
  }
  /* whole turns of a worker, because workers move in phase */
  for (uint32_t i = 0; i < WORKERS; i++)
    if (applied[i] > 1) rate += (double)(applied[i] - 1) / (last_ns[i] - first_ns[i]);
  return WORKERS / rate / MS;
}

/* ---- trees: ranks 2 h and 2 h + 1 are on host h ---- */

/* Of ranks: i's parent is (i - 1) / 2. Of hosts: an odd rank's parent is its neighbour, and the even ranks
 * form the same tree. */
static uint32_t parent_of(int hosts, uint32_t rank) {
  if (!hosts) return (rank - 1) / 2;
  return rank % 2 ? rank - 1 : (host_of(rank) - 1) / 2 * 2;
}

/* Counts the edges of the tree into (out 0) or out of a host on the way up; on the way down it is the
 * reverse. */
static void count_edges(int hosts, uint32_t count[HOSTS][2]) {
  memset(count, 0, sizeof(uint32_t[HOSTS][2]));
  for (uint32_t i = 1; i < WORKERS; i++) {
    uint32_t to = host_of(parent_of(hosts, i));
    if (host_of(i) == to) continue;
    count[host_of(i)][1]++;
    count[to][0]++;
  }
}

/* The edges that move at one rate: 1 those up, 2 those down, 3 both. */
typedef struct pipe {
  int hosts;
  uint32_t ways;
} pipe;

static double piped_rate(const clockwork *c, const void *user) {
  const pipe *p = user;
  uint32_t count[HOSTS][2], ways = p->ways;
  double slowest = 1e9;
  count_edges(p->hosts, count);
  for (uint32_t h = 0; h < HOSTS; h++) {
    for (uint32_t out = 0; out < 2; out++) {
      uint32_t n = (ways & 1 ? count[h][out] : 0) + (ways & 2 ? count[h][!out] : 0);
      if (n && rate_now(c, h, out) / n < slowest) slowest = rate_now(c, h, out) / n;
    }
  }
  return slowest;
}

/* Starts the flows whose inputs have arrived at the sender. */
static int begin_flows(const clockwork *c, flow *flows, paper_tree *tree) {
  int begun = 0;
  for (uint32_t i = 1; i < WORKERS; i++) {
    flow *f = &flows[i];
    int ready = !f->begun;
    for (uint32_t j = 1; j < WORKERS; j++) ready &= flows[j].to != f->from || flows[j].ended;
    if (!ready) continue;
    f->begun = begun = 1;
    f->ended = host_of(f->from) == host_of(f->to);
    if (f->ended) continue;
    tree->messages_at[paper_level(c->run->network, c->run->seed, host_of(f->to), 0,
                                  period_of(c->now_ns))]++;
  }
  return begun;
}

static void stored_way(clockwork *c, int hosts, int up, paper_tree *tree) {
  flow flows[FLOWS] = {{0}};
  int open = 1;
  for (uint32_t i = 1; i < WORKERS; i++) {
    uint32_t parent = parent_of(hosts, i);
    flows[i] = (flow){up ? i : parent, up ? parent : i, (double)c->run->bytes, 0, 0, 0};
  }
  while (open) {
    while (begin_flows(c, flows, tree)) continue;
    open = 0;
    for (uint32_t i = 1; i < WORKERS; i++) open |= moving(&flows[i]);
    if (open) pass(c, flows, (double)PERIOD_NS);
  }
}

void paper_tree_run(const paper_case *run, int hosts, int kind, uint32_t rounds,
                    paper_tree *tree_p) {
  pipe up = {hosts, 1}, down = {hosts, 2}, both = {hosts, 3};
  clockwork c = {run, 0};
  double computing = 0;
  memset(tree_p, 0, sizeof *tree_p);
  for (uint32_t r = 0; r < rounds; r++) {
    double slowest = (double)paper_slowest_ns(run->compute, run->seed, r);
    computing += slowest;
    c.now_ns += slowest;
    if (kind == TREE_STORED) {
      stored_way(&c, hosts, 1, tree_p);
      stored_way(&c, hosts, 0, tree_p);
    } else if (kind == TREE_BOTH_WAYS) {
      move(&c, (double)run->bytes, piped_rate, &both);
    } else {
      move(&c, (double)run->bytes, piped_rate, &up);
      move(&c, (double)run->bytes, piped_rate, &down);
    }
  }
  tree_p->round_ms = c.now_ns / rounds / MS;
  tree_p->communication_ms = (c.now_ns - computing) / rounds / MS;
}
