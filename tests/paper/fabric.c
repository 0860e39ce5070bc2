/* fabric.c - one run of the library itself: real workers, server and scheduler on simulated hosts.
 *
 * A worker computes, pushes an update of the whole model, pulls it, and repeats; tensors are ghosts. With
 * the early pull it starts both at once, starts the next computation when the model has arrived, and waits
 * with the next push for the previous one. Every half millisecond the harness checks which requests have
 * ended; their durations are exact all the same, because results contain them.
 *
 * Links change every PERIOD_NS, and the workers' contexts are told (mlfab_set_link) `lag_ns` later. */
#include "paper.h"
#include "../../mlfab_transport.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LOOK_NS = 500000, SERVER = WORKERS, NODES = WORKERS + 1 };

struct fabric;

typedef struct worker {
  struct fabric *fabric;
  mlfab *ctx;
  uint32_t rank;
  int computed; /* an update is ready, and waits for the previous push */
  uint64_t steps, pulls;
  mlfab_request push, pull; /* 0: none */
  uint64_t push_began_ns, pull_began_ns;
  mlfab_stats before; /* at the start of the current period */
} worker;

typedef struct fabric {
  const paper_case *run;
  paper_outcome *sum;
  mlfab_sim *sim;
  mlfab *server;
  worker worker[WORKERS];
  uint64_t start_ns, from_ns, end_ns; /* start of training; start and end of the measurement */
  /* current period of the links, and the one that was announced */
  uint64_t period, told;
  /* first and last, and the times of their ends */
  uint64_t round_seen[2], round_at[2], round_left, round;
  mlfab_stats server_before;
  int failed;
} fabric;

static void complain(fabric *f, const char *what, mlfab *ctx, int code) {
  mlfab_error error = {0};
  if (ctx) mlfab_last_error(ctx, &error);
  if (!f->failed)
    fprintf(stderr, "paper: %s-%s, seed %u: %s: %s (%s)\n", f->run->compute->name,
            f->run->network->name, (unsigned)f->run->seed, what, mlfab_error_name(code),
            error.text);
  f->failed = 1;
}

static void at(fabric *f, uint64_t ns, void (*fn)(void *user), void *user) {
  if (mlfab_sim_at(f->sim, ns, fn, user)) complain(f, "mlfab_sim_at", NULL, MLFAB_ERR_MEMORY);
}

/* ---- the network ---- */

static void tell_links(fabric *f, uint64_t period) {
  const paper_case *run = f->run;
  if (!run->schedule.size) return;
  for (uint32_t i = 0; i < WORKERS; i++) {
    double in = (double)paper_rate(run->network, run->seed, i / 2, 0, period);
    double out = (double)paper_rate(run->network, run->seed, i / 2, 1, period);
    int code = mlfab_set_link(f->worker[i].ctx, in, out);
    if (code) complain(f, "mlfab_set_link", f->worker[i].ctx, code);
  }
}

static void lag_over(void *user) {
  fabric *f = user;
  tell_links(f, f->told++);
}

/* Counts the links' work in the period that ends now. */
static void count_period(fabric *f) {
  const paper_case *run = f->run;
  for (uint32_t i = 0; i < WORKERS; i++) {
    worker *w = &f->worker[i];
    mlfab_stats now;
    mlfab_get_stats(w->ctx, &now, sizeof now);
    if (mlfab_sim_clock(f->sim) > f->from_ns) {
      uint64_t added = now.members_added - w->before.members_added;
      uint64_t served = now.members_served - w->before.members_served;
      f->sum->added += added;
      f->sum->served += served;
      f->sum->added_at[paper_level(run->network, run->seed, i / 2, 0, f->period)] += added;
      f->sum->served_at[paper_level(run->network, run->seed, i / 2, 1, f->period)] += served;
    }
    w->before = now;
  }
}

static void set_rates(fabric *f, uint64_t period) {
  const paper_case *run = f->run;
  f->period = period;
  for (uint32_t i = 0; i < WORKERS; i++)
    mlfab_sim_set_rate(f->sim, i, paper_rate(run->network, run->seed, i / 2, 0, period),
                       paper_rate(run->network, run->seed, i / 2, 1, period));
}

static void new_period(void *user) {
  fabric *f = user;
  uint64_t now = mlfab_sim_clock(f->sim);
  count_period(f);
  set_rates(f, f->period + 1);
  at(f, now + f->run->lag_ns, lag_over, f);
  at(f, now + PERIOD_NS, new_period, f);
  if (now == f->from_ns) mlfab_get_stats(f->server, &f->server_before, sizeof f->server_before);
}

/* ---- the workers ---- */

static void ask(worker *w, int pulling) {
  fabric *f = w->fabric;
  mlfab_buf model = {MLFAB_ALL, 0, NULL, f->run->bytes / 4};
  uint64_t now = mlfab_sim_clock(f->sim);
  int code = pulling ? mlfab_pull_start(w->ctx, &model, 1, NULL, &w->pull)
                     : mlfab_push_start(w->ctx, &model, 1, NULL, &w->push);
  if (code) complain(f, pulling ? "pull" : "push", w->ctx, code);
  *(pulling ? &w->pull_began_ns : &w->push_began_ns) = now;
}

static void computed(void *user) {
  worker *w = user;
  w->computed = 1;
  if (w->push) return;
  w->computed = 0;
  ask(w, 0);
  if (w->fabric->run->early_pull) ask(w, 1);
}

static void compute(worker *w, uint64_t from_ns) {
  const paper_case *run = w->fabric->run;
  at(w->fabric, from_ns + paper_compute_ns(run->compute, run->seed, w->rank, w->steps++), computed,
     w);
}

static void push_ended(worker *w, const mlfab_result *result) {
  fabric *f = w->fabric;
  uint64_t when = w->push_began_ns + result->waited_ns;
  int measured = when > f->from_ns && when <= f->end_ns;
  w->push = 0;
  if (result->status == 0) {
    uint64_t delay = result->delay,
             bound = f->run->schedule.size ? f->run->schedule.delay_bound : 0;
    if (bound && delay >= bound) f->sum->late++; /* also while warming up */
    if (measured) {
      f->sum->applied++;
      f->sum->delay_sum += delay;
      f->sum->histogram[delay < DELAYS ? delay : DELAYS - 1]++;
      if (delay > f->sum->delay_max) f->sum->delay_max = delay;
    }
  } else if (result->status == MLFAB_ERR_DROPPED) {
    f->sum->dropped += (uint64_t)measured;
  } else {
    complain(f, "a push ended", w->ctx, result->status);
  }
  if (!f->run->early_pull) {
    ask(w, 1);
  } else if (w->computed) {
    computed(w);
  }
}

/* The last worker that gets a round's model ends the round. */
static void round_ended(fabric *f, uint64_t when) {
  if (++f->round_left < WORKERS) return;
  f->round_left = 0;
  f->round++;
  if (when <= f->from_ns || when > f->end_ns) return;
  if (!f->round_seen[0]) {
    f->round_seen[0] = f->round;
    f->round_at[0] = when;
  } else { /* its computation was step `round` - 1 of every worker */
    f->sum->slowest_ns += (double)paper_slowest_ns(f->run->compute, f->run->seed, f->round - 1);
  }
  f->round_seen[1] = f->round;
  f->round_at[1] = when;
}

static void pull_ended(worker *w, const mlfab_result *result) {
  uint64_t when = w->pull_began_ns + result->waited_ns;
  w->pull = 0;
  w->pulls++;
  if (result->status) complain(w->fabric, "a pull ended", w->ctx, result->status);
  if (w->fabric->run->rounds) round_ended(w->fabric, when);
  compute(w, when);
}

static void look(void *user) {
  fabric *f = user;
  for (uint32_t i = 0; i < WORKERS; i++) {
    worker *w = &f->worker[i];
    mlfab_result result;
    int done = 0, code = 0;
    if (w->push && !(code = mlfab_test(w->ctx, w->push, &done, &result)) && done)
      push_ended(w, &result);
    if (code) complain(f, "mlfab_test", w->ctx, code);
    code = done = 0;
    if (w->pull && !(code = mlfab_test(w->ctx, w->pull, &done, &result)) && done)
      pull_ended(w, &result);
    if (code) complain(f, "mlfab_test", w->ctx, code);
  }
  at(f, mlfab_sim_clock(f->sim) + LOOK_NS, look, f);
}

/* ---- the run ---- */

/* Two workers per host share its links; after them the server, with the scheduler beside it. */
static void open_node(fabric *f, uint32_t i, mlfab **ctx_p) {
  const paper_case *run = f->run;
  mlfab_config config;
  mlfab_error error = {0};
  mlfab_config_init(&config);
  config.roles = i == SERVER ? MLFAB_ROLE_SERVER : MLFAB_ROLE_WORKER;
  config.rank = i == SERVER ? 0 : (int32_t)i;
  config.workers = WORKERS;
  config.servers = 1;
  config.dedicated = 1;
  config.host = i / 2 + 1;
  config.seed = run->seed;
  config.timeout_ns = 3600ull * SECOND;
  config.chunk_bytes = MLFAB_BULK_MAX;
  config.scheduler = run->schedule.size ? MLFAB_SCHEDULER_BESIDE : MLFAB_SCHEDULER_NONE;
  if (run->schedule.size) config.schedule = run->schedule;
  snprintf(config.coordinator, sizeof config.coordinator, "sim:%d", SERVER);
  int code = mlfab_sim_open(f->sim, i, &config, ctx_p, &error);
  if (code) {
    fprintf(stderr, "paper: node %u: %s\n", (unsigned)i, error.text);
    f->failed = 1;
  }
}

static mlfab *node(fabric *f, uint32_t i) { return i == SERVER ? f->server : f->worker[i].ctx; }

static void open_all(fabric *f) {
  mlfab_error error = {0};
  for (uint32_t i = 1; i < WORKERS; i += 2)
    if (mlfab_sim_share(f->sim, i, i - 1)) complain(f, "share", NULL, MLFAB_ERR_ARGUMENT);
  open_node(f, SERVER, &f->server);
  for (uint32_t i = 0; i < WORKERS && !f->failed; i++) {
    f->worker[i].fabric = f;
    f->worker[i].rank = i;
    open_node(f, i, &f->worker[i].ctx);
  }
  for (uint32_t i = 0; i < NODES && !f->failed;) {
    int ready = mlfab_is_ready(node(f, i), &error);
    if (ready < 0 || (!ready && !mlfab_sim_step(f->sim))) complain(f, "join", node(f, i), ready);
    i += ready == 1;
  }
  mlfab_model_options options = {.size = sizeof options,
                                 .sync = f->run->rounds ? MLFAB_SYNC_BSP : MLFAB_SYNC_ASYNC,
                                 .ghost = 1};
  for (uint32_t i = 0; i < WORKERS && !f->failed; i++) {
    mlfab *ctx = f->worker[i].ctx;
    int code = mlfab_tensor_add(ctx, 0, MLFAB_F32, f->run->bytes / 4);
    if (!code) code = mlfab_model_start(ctx, &options, NULL, 0);
    if (code) complain(f, "model", ctx, code);
  }
}

static void train(fabric *f) {
  f->start_ns = mlfab_sim_clock(f->sim);
  f->from_ns = f->start_ns + PERIOD_NS;
  f->end_ns = f->from_ns + f->run->measure_ns;
  if (f->run->schedule.size) {
    int code = mlfab_set_link(f->server, FULL_RATE, FULL_RATE);
    if (code) complain(f, "mlfab_set_link", f->server, code);
  }
  set_rates(f, 0);
  tell_links(f, f->told++);
  at(f, f->from_ns, new_period, f);
  for (uint32_t i = 0; i < WORKERS; i++) compute(&f->worker[i], f->start_ns);
  look(f);
  while (!f->failed && mlfab_sim_clock(f->sim) < f->end_ns && mlfab_sim_step(f->sim)) continue;
}

static void sum_up(fabric *f) {
  paper_outcome *sum = f->sum;
  mlfab_stats now, *before = &f->server_before;
  count_period(f);
  mlfab_get_stats(f->server, &now, sizeof now);
  sum->measured_ns += (double)f->run->measure_ns;
  sum->server_in += now.bytes_received - before->bytes_received;
  sum->server_out += now.bytes_sent - before->bytes_sent;
  sum->groups += now.groups_applied - before->groups_applied;
  sum->failed += now.groups_failed + now.spreads_failed;
  sum->spreads += now.spreads_answered - before->spreads_answered;
  sum->plans += now.plans_made - before->plans_made;
  if (f->round_seen[1] > f->round_seen[0]) {
    sum->rounds += f->round_seen[1] - f->round_seen[0];
    sum->rounds_ns += (double)(f->round_at[1] - f->round_at[0]);
  }
}

int paper_fabric(const paper_case *run, paper_outcome *sum) {
  fabric *f = calloc(1, sizeof *f);
  mlfab_sim_options options = {.size = sizeof options, .hosts = NODES, .seed = run->seed};
  if (!f || mlfab_sim_create(&options, &f->sim)) {
    fprintf(stderr, "paper: out of memory\n");
    free(f);
    return 1;
  }
  f->run = run;
  f->sum = sum;
  open_all(f);
  if (!f->failed) train(f);
  if (!f->failed) sum_up(f);
  for (uint32_t i = 0; i < WORKERS; i++)
    if (f->worker[i].ctx) mlfab_abandon(&f->worker[i].ctx);
  if (f->server) mlfab_abandon(&f->server);
  mlfab_sim_destroy(&f->sim);
  int failed = f->failed;
  free(f);
  return failed;
}
