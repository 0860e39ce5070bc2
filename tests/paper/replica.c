/* replica.c - what a replica costs: the library's planner in virtual time, without its processes.
 *
 * 30 asynchronous workers on 15 hosts compute, push and pull models of 100 MB; all cards have 10 Gbps. The
 * server has a host of its own. When its link is booked for no more than one transfer, the updates (or pulls)
 * that wait are planned: order, groups, and the replica's part, as the scheduler plans them. A transfer takes as
 * long as planned. The server applies an update no earlier than the bound allows (the ledger's rule); norms are
 * 1 and gamma is 0, so that Div_max counts updates. In parts: the replica gets nothing while it lacks at most
 * half of Div_max, then as many updates as there are workers, or as the bound needs (replicate.h).
 *
 * A checkpoint stops the server, as in the paper, for as long as the disk takes. In chain replication the
 * server sends what it has applied to a replica on another host, and an update counts when it is there.
 *
 * Source: MLfabric §7.3, fig. 9. Departs: models stand for processes; the paper does not give its disk, which
 * follows from its 76 minutes for 8000 checkpoints, nor how its chain groups updates. */
#include "paper.h"

#include "core/base/rng.h"
#include "tools/replicate.c"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REPLICA_NODE = HOSTS + 1, NODES = HOSTS + 2, HALF = 8, LIST_MOST = 4096, COMMITS = 65536 };
enum { STEPS_MOST = 4096, WARM_UP_S = 40 };
/* 6 epochs of 1.28 million images, 32 to an update, in units of 30 updates. */
#define ROUNDS 8000.0
#define MODEL 1e8
#define TRANSFER_S (MODEL / FULL_RATE)
#define CHECKPOINT_S (76 * 60 / ROUNDS)

enum replica_mode { NONE, AS_WRITTEN, IN_PARTS, CHECKPOINT, CHAIN_SUMS, CHAIN_UPDATES };

typedef struct replica_case {
  enum replica_mode mode;
  uint32_t every; /* Div_max, or how many updates lie between two checkpoints */
  int apart;      /* the replica has a host of its own, and not the server's */
  uint64_t seed;
  double seconds;
} replica_case;

typedef struct replica_outcome {
  double measured_s, commits;
  double copies, sent;   /* updates that reached the replica, and transfers into it */
  double worst;          /* most updates that it was behind, after any commit */
  double plans, delayed; /* plans; those that delayed the last transfer */
} replica_outcome;

enum trainer_state { COMPUTING, WAITING, PUSHING, ASKING };

typedef struct trainer {
  enum trainer_state state;
  double until; /* the end of the computation, or of the push; when the wait began */
  uint64_t steps;
  int64_t version;
} trainer;

static struct {
  replica_case run;
  replica_outcome *out;
  int failed;
  mlfab__env env;
  mlfab__rng rng;
  mlfab__network net;
  mlfab__planner planner;
  mlfab__replicator replicator;
  double origin; /* time 0 of `net` */
  double last;   /* when all planned updates are at the server, and at the replica */
  double replica_last, chain_last;
  double commit[COMMITS];
  uint32_t commits, checkpoints; /* planned so far */
  uint32_t copied;               /* updates planned for the replica */
  double copied_at[COMMITS];     /* when each is there */
  double history;
  trainer trainer[WORKERS];
  mlfab__candidate punted[LIST_MOST];
  uint32_t npunted;
} it;

static const double model_bytes[1] = {MODEL};
static const uint32_t server_node[1] = {HOSTS};

static void must(int code, const char *what) {
  if (!code || it.failed) return;
  fprintf(stderr, "paper: replica: %s: %s\n", what, mlfab_error_name(code));
  it.failed = 1;
}

/* ---- the network ---- */

/* Makes `now` time 0 of the network, with what is reserved after it; `closed_s`: from `closed` on, the server's
 * card is closed for so long. */
static void shift(double now, double closed, double closed_s) {
  static double at[STEPS_MOST], rate[STEPS_MOST];
  mlfab__network_keep(&it.net);
  for (uint32_t i = 0; i < 2 * NODES && !it.failed; i++) {
    const mlfab__profile *p = &it.net.profiles[i];
    double from = closed - now, to = from + closed_s;
    int is_closed = closed_s > 0 && i % NODES == HOSTS;
    uint32_t n = 0;
    if (p->n + 3 > STEPS_MOST) must(MLFAB_ERR_LIMIT, "a link's steps");
    for (uint32_t k = 0; k < p->n && !it.failed; k++) {
      double begins = p->steps[k].at + it.origin - now;
      double ends = k + 1 < p->n ? p->steps[k + 1].at + it.origin - now : HUGE_VAL;
      if (ends <= 0) continue;
      if (begins < 0) begins = 0;
      double r = p->steps[k].rate;
      /* The parts before, in and behind the time in which it is closed. */
      double cuts[4] = {begins, is_closed ? from : ends, is_closed ? to : ends, ends};
      for (uint32_t c = 0; c < 3; c++) {
        double a = cuts[c] > begins ? cuts[c] : begins, b = cuts[c + 1] < ends ? cuts[c + 1] : ends;
        if (!(b > a)) continue;
        double now_rate = is_closed && c == 1 ? 0 : r;
        if (n > 0 && (rate[n - 1] == now_rate || !(a > at[n - 1]))) continue;
        at[n] = a;
        rate[n++] = now_rate;
      }
    }
    int kind = i < NODES ? MLFAB__EGRESS : MLFAB__INGRESS;
    if (n > 0) at[0] = 0;
    must(mlfab__network_capacity(&it.net, (enum mlfab__capacity_kind)kind, i % NODES, n, at, rate),
         "capacity");
  }
  it.origin = now;
}

/* When what is booked of the server's card ends. */
static double booked(enum mlfab__capacity_kind kind) {
  const mlfab__profile *p = mlfab__network_residual(&it.net, kind, HOSTS);
  return it.origin + p->steps[p->n - 1].at;
}

/* The hosts in random order: the first are for updates, the others for the replica. */
static void draw_hosts(uint32_t *hosts) {
  for (uint32_t i = 0; i < HOSTS; i++) hosts[i] = i;
  for (uint32_t i = HOSTS - 1; i > 0; i--) {
    uint32_t k = (uint32_t)mlfab__rng_below(&it.rng, i + 1), host = hosts[i];
    hosts[i] = hosts[k];
    hosts[k] = host;
  }
}

static int is_bounded(void) { return it.run.mode == AS_WRITTEN || it.run.mode == IN_PARTS; }
static uint32_t replica_node(void) { return it.run.apart ? REPLICA_NODE : HOSTS; }

/* ---- updates ---- */

/* What the plan sends to the replica. */
static void follow_replica(double now, const mlfab__planned *planned, uint32_t applied,
                           const mlfab__candidate *updates, const mlfab__replica_plan *p,
                           const mlfab__replicated *all) {
  static mlfab__candidate list[LIST_MOST];
  uint32_t n = it.npunted;
  memcpy(list, it.punted, n * sizeof *list);
  for (uint32_t i = 0; i < applied; i++) list[n++] = updates[planned[i].update];
  for (uint32_t i = 0; i < p->frozen; i++) {
    it.replica_last = it.copied_at[it.copied++] = now + p->grouped[i].commit;
  }
  it.npunted = n - p->frozen;
  memcpy(it.punted, list + p->frozen, it.npunted * sizeof *list);
  it.history = p->history;
  it.out->copies += p->frozen;
  it.out->sent += p->groups;
  it.out->delayed += all->status == 1;
  if (all->status == 2) must(MLFAB_ERR_STATE, "a bound that cannot be kept");
}

/* The ledger's rule: a group of updates up to number `s` is applied when the replica lacks at most Div_max. */
static double admit(double commit, uint32_t s) {
  if (!is_bounded()) return commit;
  if (s > it.run.every) {
    uint32_t needed = s - it.run.every;
    if (needed > it.copied) must(MLFAB_ERR_STATE, "a plan without what the bound needs");
    if (!it.failed && it.copied_at[needed - 1] > commit) commit = it.copied_at[needed - 1];
  }
  uint32_t there = 0;
  for (there = it.copied; there > 0 && it.copied_at[there - 1] > commit;) there--;
  if ((double)s - there > it.out->worst) it.out->worst = (double)s - there;
  return commit;
}

/* The server forwards a group to the replica: when it is there. */
static double forward(double now, double commit, uint32_t members) {
  uint32_t copies = it.run.mode == CHAIN_SUMS ? 1 : members;
  for (uint32_t i = 0; i < copies; i++) {
    double end = 0, from = commit > it.chain_last ? commit : it.chain_last;
    must(mlfab__network_reserve(&it.net, HOSTS, REPLICA_NODE, MODEL, from - now, &end), "forward");
    it.chain_last = now + end;
    it.out->sent++;
  }
  it.out->copies += members;
  return it.chain_last;
}

/* Applies the planned groups in order: when each worker's push ends. */
static void commit_all(double now, const mlfab__planned *planned, uint32_t applied,
                       const uint32_t *worker) {
  double before = it.commits > 0 ? it.commit[it.commits - 1] : 0;
  for (uint32_t at = 0, end; at < applied; at = end) {
    for (end = at + 1; end < applied && planned[end].group_number == planned[at].group_number;) {
      end++;
    }
    if (it.commits + (end - at) > COMMITS) must(MLFAB_ERR_LIMIT, "the number of updates");
    if (it.failed) return;
    double commit = admit(now + planned[at].commit, it.commits + (end - at));
    if (commit < before) commit = before;
    before = commit;
    double done = it.run.mode >= CHAIN_SUMS ? forward(now, commit, end - at) : commit;
    for (uint32_t i = at; i < end; i++) {
      it.commit[it.commits++] = commit;
      it.trainer[worker[planned[i].update]].until = done;
    }
  }
}

static void plan_updates(double now) {
  static mlfab__grouped grouped[LIST_MOST];
  mlfab__candidate updates[WORKERS];
  mlfab__planned planned[WORKERS];
  mlfab__replica_plan plan = {.grouped = grouped};
  mlfab__replicated all;
  uint32_t hosts[HOSTS], worker[WORKERS], n = 0, applied, nodes[1] = {replica_node()};
  shift(now, 0, 0);
  draw_hosts(hosts);
  for (uint32_t i = 0; i < WORKERS; i++) {
    trainer *w = &it.trainer[i];
    if (w->state != WAITING) continue;
    worker[n] = i;
    updates[n++] = (mlfab__candidate){
        .id = i, .node = i / 2, .version = w->version, .norm = 1, .bytes = model_bytes};
  }
  mlfab__batch batch = {.updates = updates,
                        .n = n,
                        .server = server_node,
                        .servers = 1,
                        .aggregators = hosts,
                        .k = HALF,
                        .delay_bound = WORKERS,
                        .version = it.commits,
                        .backlog = it.last > now ? it.last - now : 0,
                        .cut = 1};
  mlfab__replica replica = {.nodes = nodes,
                            .aggregators = hosts + HALF,
                            .k = HOSTS - HALF,
                            .punted = it.punted,
                            .npunted = it.npunted,
                            .history = it.history,
                            .start = it.replica_last > now ? it.replica_last - now : 0,
                            .part = it.run.mode == IN_PARTS ? WORKERS : 0,
                            .idle = it.run.every / 2.0};
  mlfab__replication replication = {&replica, (uint32_t)is_bounded(), 0, it.run.every};
  if (it.npunted + n > LIST_MOST) must(MLFAB_ERR_LIMIT, "what the replica lacks");
  if (it.failed) return;
  must(mlfab__replicate_batch(&it.replicator, &it.planner, &it.net, &batch, &replication, planned,
                              &applied, NULL, &plan, &all),
       "plan");
  if (it.failed) return;
  it.out->plans++;
  it.last = now + all.time;
  for (uint32_t i = 0; i < n; i++) {
    trainer *w = &it.trainer[worker[i]];
    w->state = PUSHING;
    w->until = now; /* unless it is applied */
  }
  if (is_bounded()) follow_replica(now, planned, applied, updates, &plan, &all);
  commit_all(now, planned, applied, worker);
  if (it.run.mode == CHECKPOINT && it.commits / it.run.every > it.checkpoints) {
    it.checkpoints = it.commits / it.run.every;
    shift(now, it.last, CHECKPOINT_S);
    it.last += CHECKPOINT_S;
  }
}

/* ---- pulls ---- */

static void plan_pulls(double now) {
  mlfab__delivery out[WORKERS];
  mlfab__group_choice choice;
  double hubs[HOSTS], makespan;
  uint32_t hosts[HOSTS], worker[WORKERS], nodes[WORKERS], n = 0, version = it.commits;
  shift(now, 0, 0);
  draw_hosts(hosts);
  while (version > 0 && it.commit[version - 1] > now) version--;
  for (uint32_t i = 0; i < WORKERS; i++) {
    if (it.trainer[i].state != ASKING) continue;
    worker[n] = i;
    nodes[n++] = i / 2;
  }
  mlfab__distribution d = {.server = server_node,
                           .servers = 1,
                           .bytes = model_bytes,
                           .distributors = hosts,
                           .k = HOSTS,
                           .requests = nodes,
                           .n = n,
                           .cut = 1};
  must(mlfab__group_distribute(&it.planner.grouper, &it.net, &d, out, hubs, &choice, &makespan),
       "distribution");
  for (uint32_t i = 0; i < n && !it.failed; i++) {
    trainer *w = &it.trainer[worker[i]];
    uint64_t ns = paper_compute_ns(&paper_c1, it.run.seed, worker[i], w->steps++);
    w->state = COMPUTING;
    w->version = version;
    w->until = now + out[i].end + (double)ns * 1e-9;
  }
}

/* ---- time ---- */

/* The next time at which something can be done. */
static double next_time(double now) {
  double next = HUGE_VAL;
  int updates = 0, pulls = 0;
  for (uint32_t i = 0; i < WORKERS; i++) {
    const trainer *w = &it.trainer[i];
    if (w->state == WAITING) updates = 1;
    if (w->state == ASKING) pulls = 1;
    if ((w->state == COMPUTING || w->state == PUSHING) && w->until < next) next = w->until;
  }
  if (updates && it.last - TRANSFER_S < next) next = it.last - TRANSFER_S;
  double egress = booked(MLFAB__EGRESS) - TRANSFER_S;
  if (pulls && egress < next) next = egress;
  return next > now ? next : now;
}

static void advance(double now) {
  int updates = 0, pulls = 0;
  for (uint32_t i = 0; i < WORKERS; i++) {
    trainer *w = &it.trainer[i];
    if (w->state == COMPUTING && w->until <= now) w->state = WAITING;
    if (w->state == PUSHING && w->until <= now) w->state = ASKING;
    updates |= w->state == WAITING;
    pulls |= w->state == ASKING;
  }
  if (updates && it.last - TRANSFER_S <= now) plan_updates(now);
  if (pulls && booked(MLFAB__EGRESS) - TRANSFER_S <= now) plan_pulls(now);
}

static void run_one(const replica_case *run, replica_outcome *out) {
  const double zero[1] = {0}, rate[1] = {FULL_RATE};
  memset(&it, 0, sizeof it);
  it.run = *run;
  it.out = out;
  mlfab__env_init(&it.env, NULL);
  mlfab__rng_seed(&it.rng, run->seed);
  mlfab__planner_init(&it.planner, &it.env);
  must(mlfab__network_init(&it.net, &it.env, NODES, 0), "network");
  for (uint32_t i = 0; i < NODES && !it.failed; i++) {
    must(mlfab__network_capacity(&it.net, MLFAB__EGRESS, i, 1, zero, rate), "capacity");
    must(mlfab__network_capacity(&it.net, MLFAB__INGRESS, i, 1, zero, rate), "capacity");
  }
  for (uint32_t i = 0; i < WORKERS; i++) {
    trainer *w = &it.trainer[i];
    w->until = (double)paper_compute_ns(&paper_c1, run->seed, i, w->steps++) * 1e-9;
  }
  double now = 0, from = WARM_UP_S, to = from + run->seconds;
  while (now < to && !it.failed) {
    now = next_time(now);
    advance(now);
  }
  out->measured_s += run->seconds;
  for (uint32_t i = 0; i < it.commits; i++)
    out->commits += it.commit[i] > from && it.commit[i] <= to;
  mlfab__replicate_free(&it.replicator, &it.env);
  mlfab__planner_free(&it.planner);
  mlfab__network_free(&it.net);
}

/* ---- the table ---- */

static uint32_t run_seeds;
static int failures;

static replica_outcome run(enum replica_mode mode, uint32_t every, int apart) {
  replica_outcome sum = {0};
  for (uint64_t seed = 1; seed <= run_seeds; seed++) {
    replica_case c = {mode, every, apart, seed, run_seeds > 1 ? 60 : 20};
    run_one(&c, &sum);
    failures += it.failed;
  }
  if (is_bounded() && sum.worst > every) {
    fprintf(stderr, "paper: a replica lacked %g updates, beyond Div_max\n", sum.worst);
    failures++;
  }
  return sum;
}

static double per_30_ms(const replica_outcome *o) {
  return o->commits > 0 ? o->measured_s * 1e3 * WORKERS / o->commits : 0;
}

/* Minutes more than without, over 6 epochs. */
static double overhead(const replica_outcome *with, const replica_outcome *without) {
  return (per_30_ms(with) - per_30_ms(without)) * ROUNDS / 60e3;
}

/* Updates in a transfer to the replica. */
static double saving(const replica_outcome *o) { return o->sent > 0 ? o->copies / o->sent : 0; }

enum { BOUNDS = 5 };
static const uint32_t bounds[BOUNDS] = {30, 60, 120, 300, 600};

typedef struct replica_table {
  replica_outcome none;
  replica_outcome written[BOUNDS], beside[BOUNDS], apart[BOUNDS]; /* in parts: on which host */
  replica_outcome checkpoint[2], chain[2];
} replica_table;

static void run_all(replica_table *t) {
  t->none = run(NONE, 1, 0);
  for (uint32_t i = 0; i < BOUNDS; i++) {
    t->written[i] = run(AS_WRITTEN, bounds[i], 0);
    t->beside[i] = run(IN_PARTS, bounds[i], 0);
    t->apart[i] = run(IN_PARTS, bounds[i], 1);
  }
  t->checkpoint[0] = run(CHECKPOINT, bounds[0], 0);
  t->checkpoint[1] = run(CHECKPOINT, bounds[BOUNDS - 1], 0);
  t->chain[0] = run(CHAIN_SUMS, 1, 1);
  t->chain[1] = run(CHAIN_UPDATES, 1, 1);
}

static void put_bounds(const replica_table *t) {
  paper_line(
      "| Div_max | as written: saving | overhead, min | in parts: saving | overhead, min | most "
      "lacking | own host: saving | overhead, min |\n|---|---|---|---|---|---|---|---|");
  for (uint32_t i = 0; i < BOUNDS; i++) {
    char line[256];
    snprintf(line, sizeof line, "| %u | %.1f | %.0f | %.1f | %.0f | %.0f | %.1f | %.0f |",
             bounds[i], saving(&t->written[i]), overhead(&t->written[i], &t->none),
             saving(&t->beside[i]), overhead(&t->beside[i], &t->none), t->beside[i].worst,
             saving(&t->apart[i]), overhead(&t->apart[i], &t->none));
    paper_line(line);
  }
  paper_line("");
}

static void put_savings(const replica_table *t) {
  char claim[80];
  for (uint32_t i = 0; i < BOUNDS; i++) {
    snprintf(claim, sizeof claim, "Fig. 9: updates in a transfer to the replica, Div_max %u",
             bounds[i]);
    add(claim, bounds[i] == 600 ? "5.6" : "-", saving(&t->beside[i]), "", 0, 0,
        bounds[i] == 600 ? "in parts: more than the paper's plateau" : "in parts");
  }
  add("... Div_max 600, the replica on a host of its own", "5.6", saving(&t->apart[BOUNDS - 1]), "",
      0, 0,
      "in parts: less than the paper's; a free link carries small groups sooner than it would wait "
      "for large ones");
  add("... Div_max 600, as written", "5.6", saving(&t->written[BOUNDS - 1]), "", 0, 0,
      "does not reproduce: the list has 600 updates, the first of which Alg. 3 sends directly, and "
      "only these are kept");
  add("most updates lacking, Div_max 30, in parts", "-", t->beside[0].worst, "", 0, 30,
      "the bound");
  add("most updates lacking, Div_max 600, in parts", "-", t->beside[BOUNDS - 1].worst, "", 0, 600,
      "the bound");
}

static void put_overheads(const replica_table *t) {
  const uint32_t last = BOUNDS - 1;
  double tight = overhead(&t->beside[0], &t->none), loose = overhead(&t->beside[last], &t->none);
  double tight_apart = overhead(&t->apart[0], &t->none);
  double loose_apart = overhead(&t->apart[last], &t->none);
  double checkpoint[2] = {overhead(&t->checkpoint[0], &t->none),
                          overhead(&t->checkpoint[1], &t->none)};
  double chain[2] = {overhead(&t->chain[0], &t->none), overhead(&t->chain[1], &t->none)};
  add("without a replica: 30 updates", "-", per_30_ms(&t->none), "ms", 800, 1400,
      "as MLfabric-A-30, C1-N1, above");
  add("replica, Div_max 30: overhead", "16", tight, "min", 0, 0,
      "missed: the server's link, which replica and server share, is busy without a replica too");
  add("replica, Div_max 600: overhead", "10", loose, "min", 0, 0,
      "missed, for the same reason: a larger Div_max does not make the sums fewer");
  add("replica on a host of its own, Div_max 30: overhead", "16", tight_apart, "min", 0, 0, "");
  add("replica on a host of its own, Div_max 600: overhead", "10", loose_apart, "min", 0, 0,
      "the workers' links are the rest: they send everything twice");
  add("checkpoint every 30 updates: overhead", "96", checkpoint[0], "min", 0, 77,
      "0.57 s each: 76 min in all, were nothing lost but the pauses");
  add("checkpoint every 600 updates: overhead", "6", checkpoint[1], "min", 0, 5,
      "4 min in all, as above");
  add("MPI, checkpoint every 20 iterations: overhead", "4", 400 * CHECKPOINT_S / 60, "min", 0, 0,
      "arithmetic: 400 of 0.57 s");
  add("checkpoint / replica, 30 updates", "6", checkpoint[0] / tight, "x", 0, 0,
      "the replica beside the server");
  add("checkpoint / replica on its own host, 30 updates", "6", checkpoint[0] / tight_apart, "x", 0,
      0, "");
  add("checkpoint / replica on its own host, 600 updates", "0.6", checkpoint[1] / loose_apart, "x",
      0, 0, "");
  add("chain of sums: overhead", "-", chain[0], "min", 0, 0,
      "the server forwards each sum that it has applied");
  add("chain of updates: overhead", "-", chain[1], "min", 0, 0,
      "it forwards each update: 30 models a round through its link out");
  add("chain of updates / replica on its own host, Div_max 30", "up to 30", chain[1] / tight_apart,
      "x", 0, 0, "the paper does not say at which Div_max");
  add("chain of updates / replica, Div_max 600: bytes to the replica", "up to 30",
      saving(&t->beside[last]) / saving(&t->chain[1]), "x", 0, 0,
      "the paper's \"overhead\" may be this or time");
  paper_picture("paper-replica",
                "A row is a way to keep a second copy, with its Div_max or updates between "
                "checkpoints; further left costs less time. The axis is logarithmic.");
  paper_picture(
      "paper-sums",
      "Fig. 9 at a Div_max of 600: further right, a transfer to the replica carries more updates.");
}

int paper_replica(uint32_t seeds) {
  static replica_table t;
  run_seeds = seeds;
  run_all(&t);
  paper_text(
      "## A replica, §7.3\n\n"
      "This section runs the planner in virtual time, without processes. The "
      "library's own replicas get states of the shard instead of updates "
      "([decisions](decisions.md#replicas)), so these figures do not describe `mlfab-"
      "run --replicas`. Transfers take as long as planned. All links have 10 Gbps, "
      "computations follow C1, and the delay bound is 30. Div_max counts updates: the "
      "server applies an update if the replica lacks at most so many, and each run "
      "checks it. Overhead: additional minutes over 6 epochs of 8000 times 30 updates "
      "(1.28 million images, 32 to an update). Eight hosts aggregate for the server, "
      "seven for the replica, drawn anew for each plan. The replica is on the "
      "server's host, as in the paper, or on a host of its own.\n\n"
      "As written: §5.3. In parts: the replica gets nothing while it lacks at most "
      "half of Div_max, then 30 updates at a time, one a worker. Checkpoints: each "
      "stops the server for 0.57 s (76 minutes divided by 8000). Chain replication: "
      "the replica has a host of its own, and a push ends when the replica has the "
      "update. All ranges were written after the first run of the program. That run "
      "also gave the rule of parts: parts of 16, 32 and 48 updates were tried, from "
      "0, 0.5 and 0.8 of Div_max on. Beginning at 0 saved 4.5, the others saved 4.9 "
      "to 7.8, and larger parts saved more.");
  put_bounds(&t);
  paper_table();
  put_savings(&t);
  put_overheads(&t);
  return failures;
}
