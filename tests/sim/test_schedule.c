/* test_schedule.c - fabrics with a scheduler, in virtual time: invariants after every event, and what
 * happens when the scheduler, an aggregator or a member is lost, when links are cut, and when the bound
 * changes.
 *
 * A bed is a fabric with a load: workers that push, think, and pull. Update m of M adds 1 to every element
 * e of the model with e % M == m, so every slice at every server tells which updates were applied, how
 * often, and whether in part. One update in a commit increases the version by one: with one server,
 * asynchronous, the version in its result is its place in the order of commits.
 *
 * After every event: no applied update has a delay at or above the bound; the scheduler's last plan
 * (mlfab_explain) is recorded, so that the order of commits can be compared with the plans; the longest
 * time without input at the server is measured.
 */
#include "../unit/on_device.h"
#include "job.h"

#include <math.h>

enum {
  WORKERS_MAX = 9,
  SERVERS_MAX = 3,
  UPDATES_MAX = 40,
  SLOTS = 2,
  MARKS_MAX = WORKERS_MAX * UPDATES_MAX,
  PLANNED_MAX = 4096
};
#define MB 1000000ull

/* ---- a bed ---- */

typedef struct setup {
  uint32_t workers, servers, updates; /* updates: of a worker */
  uint32_t together;                  /* servers are not dedicated */
  uint32_t scheduler, sync, deterministic, rule, slots, pulls, hand;
  uint32_t accumulators, eager, chunk;
  int dtype;
  uint64_t count; /* elements */
  mlfab_schedule schedule;
  uint64_t rate, latency_ns, heartbeat_ns, think_ns, seed;
  double jitter;
  mlfab_update_fn on_update;
} setup;

static setup standard(uint64_t seed) {
  setup s;
  memset(&s, 0, sizeof s);
  s.workers = 6;
  s.servers = 1;
  s.updates = 8;
  s.scheduler = MLFAB_SCHEDULER_OWN;
  s.slots = 1;
  s.dtype = MLFAB_I64;
  s.count = 12000;
  s.eager = 4096;
  s.chunk = 8192;
  s.rate = 10 * MB;
  s.latency_ns = MS / 10;
  s.heartbeat_ns = 100 * MS;
  s.think_ns = 10 * MS;
  s.seed = seed;
  mlfab_schedule_init(&s.schedule);
  return s;
}

typedef struct update {
  int started, known, code, nan;
  uint64_t version, delay, began_ns, ended_ns;
} update;

struct bed;
typedef struct job {
  struct bed *bed;
  mlfab *ctx;
  uint32_t rank, next, limit; /* it starts updates below the limit */
  int gone;
  mlfab_request push[SLOTS], pull;
  uint32_t of[SLOTS];
  uint64_t at_ns, armed_ns; /* thinking until; armed_ns: told to the simulator */
  double *data[SLOTS], *image;
} job;

typedef struct planned {
  uint64_t serial, id;
  uint32_t worker, group; /* group 0: direct */
  int dropped;
} planned;

typedef struct bed {
  setup s;
  mlfab_sim *sim;
  mlfab *server[SERVERS_MAX], *scheduler; /* dedicated ones; the scheduler of its own */
  job jobs[WORKERS_MAX];
  update updates[WORKERS_MAX][UPDATES_MAX];
  uint64_t bound; /* applies to all updates applied from bound_ns on */
  uint64_t bound_ns;
  mlfab_stats seen[SERVERS_MAX];
  /* Of plans. */
  planned planned[PLANNED_MAX];
  uint32_t nplanned;
  uint64_t serial; /* of the last recorded plan */
  uint64_t plans;
  char text[65536];
  /* Of the first server's in-link. */
  uint64_t last_byte_ns, longest_gap_ns, gap_at_ns, bytes_from, from_ns;
  int watch_gaps;
  /* Commits, as observed in the steps of the simulator. */
  struct {
    uint64_t at_ns;
    uint32_t commits, applied, groups;
  } steps[MARKS_MAX];
  uint32_t nsteps;
  uint64_t last_commit_ns, longest_wait_ns;
  int lost, back; /* events of the scheduler at servers */
  uint64_t lost_ns;
} bed;

static uint64_t now(const bed *b) { return mlfab_sim_clock(b->sim); }
static uint32_t marks(const bed *b) { return b->s.workers * b->s.updates; }

static mlfab *server_of(bed *b, uint32_t i) {
  return b->s.together ? b->jobs[i].ctx : b->server[i];
}

static mlfab *scheduler_of(bed *b) {
  if (b->s.scheduler == MLFAB_SCHEDULER_OWN) return b->scheduler;
  return b->s.scheduler == MLFAB_SCHEDULER_BESIDE ? server_of(b, 0) : NULL;
}

static uint32_t host_of_server(const bed *b, uint32_t i) {
  return b->s.together ? i : b->s.workers + i;
}

static uint32_t host_of_scheduler(const bed *b) {
  return b->s.workers + (b->s.together ? 0 : b->s.servers);
}

static mlfab_stats stats_of(mlfab *ctx) {
  mlfab_stats stats;
  memset(&stats, 0, sizeof stats);
  if (ctx) assert_int_equal(mlfab_get_stats(ctx, &stats, sizeof stats), 0);
  return stats;
}

static void on_event(void *user, const mlfab_event_info *info) {
  bed *b = user;
  if (info->kind == MLFAB_EVENT_SCHEDULER_LOST) {
    b->lost++;
    b->lost_ns = now(b);
  }
  if (info->kind == MLFAB_EVENT_SCHEDULER_BACK) b->back++;
}

static void configure(bed *b, mlfab_config *c) {
  mlfab_config_init(c);
  c->workers = b->s.workers;
  c->servers = b->s.servers;
  c->dedicated = !b->s.together;
  c->scheduler = b->s.scheduler;
  c->schedule = b->s.schedule;
  c->eager_bytes = b->s.eager;
  c->chunk_bytes = b->s.chunk;
  c->block_bytes = 16384;
  c->heartbeat_ns = b->s.heartbeat_ns;
  c->accumulators = b->s.accumulators;
  c->timeout_ns = 100 * SECOND;
  c->seed = b->s.seed;
  c->progress = b->s.hand ? MLFAB_PROGRESS_HAND : MLFAB_PROGRESS_AUTO;
  c->on_update = b->s.on_update;
  c->on_event = on_event;
  c->user = b;
  snprintf(c->coordinator, sizeof c->coordinator, "sim:%u", host_of_server(b, 0));
}

static void open_scheduler(bed *b) {
  mlfab_config c;
  configure(b, &c);
  c.roles = MLFAB_ROLE_SCHEDULER;
  sim_open(b->sim, host_of_scheduler(b), &c, &b->scheduler);
}

static void start_model(bed *b, job *j) {
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  options.optimizer = b->s.rule;
  options.sync = b->s.sync;
  options.deterministic = b->s.deterministic;
  options.slices = 4 * b->s.servers;
  int code = mlfab_tensor_add(j->ctx, 1, b->s.dtype, b->s.count);
  if (!code) code = mlfab_model_start(j->ctx, &options, NULL, 0);
  if (code) wrong("model_start: %s", last_text(j->ctx));
}

static bed *bed_open(const setup *s) {
  bed *b = calloc(1, sizeof *b);
  mlfab_config c;
  assert_non_null(b);
  b->s = *s;
  b->bound = s->schedule.delay_bound;
  assert_true(s->workers <= WORKERS_MAX && s->servers <= SERVERS_MAX && s->updates <= UPDATES_MAX);
  mlfab_sim_options options = {.size = sizeof options,
                               .hosts = host_of_scheduler(b) + 1,
                               .seed = s->seed,
                               .latency_ns = s->latency_ns,
                               .latency_jitter = s->jitter,
                               .rate_bytes_per_s = s->rate,
                               .buffer_bytes = 65536};
  assert_int_equal(mlfab_sim_create(&options, &b->sim), 0);
  for (uint32_t i = 0; !s->together && i < s->servers; i++) {
    configure(b, &c);
    c.roles = MLFAB_ROLE_SERVER;
    c.rank = (int32_t)i;
    sim_open(b->sim, host_of_server(b, i), &c, &b->server[i]);
  }
  if (s->scheduler == MLFAB_SCHEDULER_OWN) open_scheduler(b);
  for (uint32_t i = 0; i < s->workers; i++) {
    job *j = &b->jobs[i];
    *j = (job){.bed = b, .rank = i, .limit = s->updates};
    configure(b, &c);
    c.rank = (int32_t)i;
    if (!s->together) c.roles = MLFAB_ROLE_WORKER;
    sim_open(b->sim, i, &c, &j->ctx);
    for (int k = 0; k < SLOTS; k++) j->data[k] = calloc(s->count, sizeof *j->data[0]);
    j->image = calloc(s->count, sizeof *j->image);
  }
  for (uint32_t i = 0; i < s->workers; i++) sim_await(b->sim, b->jobs[i].ctx);
  if (scheduler_of(b)) sim_await(b->sim, scheduler_of(b));
  for (uint32_t i = 0; i < s->workers; i++) start_model(b, &b->jobs[i]);
  for (uint32_t i = 0; i < s->servers; i++) b->seen[i] = stats_of(server_of(b, i));
  b->last_commit_ns = now(b);
  return b;
}

static void bed_close(bed *b) {
  for (uint32_t i = 0; i < b->s.workers; i++) {
    if (b->jobs[i].ctx) mlfab_abandon(&b->jobs[i].ctx);
    for (int k = 0; k < SLOTS; k++) free(b->jobs[i].data[k]);
    free(b->jobs[i].image);
  }
  for (uint32_t i = 0; i < SERVERS_MAX; i++)
    if (b->server[i]) mlfab_abandon(&b->server[i]);
  if (b->scheduler) mlfab_abandon(&b->scheduler);
  mlfab_sim_destroy(&b->sim);
  free(b);
}

/* ---- after every event ---- */

/* Records the scheduler's plans for updates, in their order. */
static void watch_plans(bed *b) {
  mlfab *scheduler = scheduler_of(b);
  if (!scheduler) return;
  uint64_t plans = stats_of(scheduler).plans_made;
  if (plans == b->plans) return;
  b->plans = plans;
  assert_int_equal(mlfab_explain(scheduler, b->text, sizeof b->text, NULL), 0);
  unsigned long long serial = 0, id;
  uint32_t worker;
  int pushes = 0;
  for (char *line = b->text, *end; line; line = end ? end + 1 : NULL) {
    end = strchr(line, '\n');
    if (end) *end = 0;
    if (sscanf(line, "plan %llu at", &serial) == 1) {
      pushes = strstr(line, " pushes,") != NULL && serial > b->serial;
      if (pushes) b->serial = serial;
    } else if (pushes && sscanf(line, "push %llu of worker %u,", &id, &worker) == 2) {
      if (strstr(line, ": waits: no way there now") || strstr(line, ": not planned")) continue;
      assert_true(b->nplanned < PLANNED_MAX);
      planned *p = &b->planned[b->nplanned++];
      const char *group = strstr(line, ", group ");
      *p = (planned){serial, id, worker, 0, strstr(line, ", dropped:") != NULL};
      if (group) p->group = (uint32_t)strtoul(group + 8, NULL, 10);
    }
  }
}

/* Updates that servers have applied since the last event: all delays are below the bound. */
static void watch_server(bed *b, uint32_t i) {
  mlfab_stats is = stats_of(server_of(b, i)), *was = &b->seen[i];
  uint64_t applied = is.updates_applied - was->updates_applied;
  if (applied > 0 && now(b) >= b->bound_ns && b->bound != MLFAB_UNBOUNDED) {
    uint64_t sum = is.delay_sum - was->delay_sum;
    if (sum > applied * (b->bound - 1))
      wrong("at %.6f s server %u applied %u updates with delays of %u in all; the bound is %u",
            1e-9 * (double)now(b), i, (unsigned)applied, (unsigned)sum, (unsigned)b->bound);
    if (b->bound_ns == 0) assert_true(is.delay_max < b->bound);
  }
  if (i == 0 && is.commits != was->commits && b->nsteps < MARKS_MAX) {
    b->steps[b->nsteps].at_ns = now(b);
    b->steps[b->nsteps].commits = (uint32_t)(is.commits - was->commits);
    b->steps[b->nsteps].groups = (uint32_t)(is.groups_applied - was->groups_applied);
    b->steps[b->nsteps++].applied = (uint32_t)applied;
  }
  if (i == 0 && applied > 0) {
    uint64_t wait = now(b) - b->last_commit_ns;
    if (wait > b->longest_wait_ns) b->longest_wait_ns = wait;
    b->last_commit_ns = now(b);
  }
  if (i == 0 && is.bytes_received != was->bytes_received) {
    uint64_t gap = now(b) - b->last_byte_ns;
    if (b->watch_gaps && b->last_byte_ns > 0 && gap > b->longest_gap_ns) {
      b->longest_gap_ns = gap;
      b->gap_at_ns = now(b);
    }
    b->last_byte_ns = now(b);
  }
  *was = is;
}

/* ---- the load ---- */

/* With a rule that is not SGD: what update k of the worker has at element e. */
static double value_of(const bed *b, uint32_t rank, uint32_t k, uint64_t e) {
  uint32_t m = rank * b->s.updates + k;
  return (double)(mix(m * 1000003ull + e) % 2001) / 1000.0 - 1.0;
}

static double scale_of(const bed *b, uint32_t rank, uint32_t k) {
  return b->s.rule == MLFAB_OPTIMIZER_SGD ? 1.0 : -0.01 * (1.0 + (rank + k) % 3);
}

static void fill(const bed *b, job *j, uint32_t slot, uint32_t k) {
  double *data = j->data[slot];
  if (b->s.rule != MLFAB_OPTIMIZER_SGD) {
    for (uint64_t e = 0; e < b->s.count; e++) data[e] = value_of(b, j->rank, k, e);
  } else {
    int64_t *integers = (int64_t *)(void *)data;
    memset(data, 0, b->s.count * sizeof *data);
    for (uint64_t e = j->rank * b->s.updates + k; e < b->s.count; e += marks(b))
      if (b->s.dtype == MLFAB_I64)
        integers[e] = 1;
      else
        data[e] = 1.0;
  }
  if (b->updates[j->rank][k].nan) j->data[slot][b->s.count / 2] = (double)NAN;
}

static void start_push(bed *b, job *j, uint32_t slot) {
  uint32_t k = j->next;
  mlfab_buf buf = {MLFAB_ALL, 0, j->data[slot], b->s.count};
  mlfab_push_options options = {.size = sizeof options, .scale = scale_of(b, j->rank, k)};
  fill(b, j, slot, k);
  int code = mlfab_push_start(j->ctx, &buf, 1, &options, &j->push[slot]);
  if (code) wrong("push_start: %s", mlfab_error_name(code));
  j->of[slot] = k;
  j->next++;
  b->updates[j->rank][k].started = 1;
  b->updates[j->rank][k].began_ns = now(b);
}

static void look_push(bed *b, job *j, uint32_t slot) {
  mlfab_result result;
  int done = 0;
  if (!j->push[slot]) return;
  assert_int_equal(mlfab_test(j->ctx, j->push[slot], &done, &result), 0);
  if (!done) return;
  update *u = &b->updates[j->rank][j->of[slot]];
  assert_int_equal(result.seq, j->of[slot] + 1);
  u->known = 1;
  u->code = result.status;
  /* An update acknowledged now was applied within the last few milliseconds. */
  if (!u->code && b->bound_ns > 0 && now(b) >= b->bound_ns + 20 * MS && result.delay >= b->bound)
    wrong("a delay of %u, the bound is %u", (unsigned)result.delay, (unsigned)b->bound);
  u->version = result.version;
  u->delay = result.delay;
  u->ended_ns = now(b);
  j->push[slot] = 0;
  j->at_ns =
      now(b) + b->s.think_ns * (mix(b->s.seed ^ (j->rank * 64ull + j->of[slot])) % 200) / 100;
  if (b->s.pulls && !j->pull) {
    mlfab_buf buf = {MLFAB_ALL, 0, j->image, b->s.count};
    assert_int_equal(mlfab_pull_start(j->ctx, &buf, 1, NULL, &j->pull), 0);
  }
}

static void nothing(void *user) { (void)user; }

static int busy(const job *j) {
  int open = j->pull != 0;
  for (uint32_t i = 0; i < SLOTS; i++) open += j->push[i] != 0;
  return open;
}

static void look(bed *b, job *j) {
  mlfab_result result;
  int done = 0;
  if (!j->ctx) {
    j->gone = 1;
    return;
  }
  for (uint32_t i = 0; i < b->s.slots; i++) look_push(b, j, i);
  if (j->pull) {
    assert_int_equal(mlfab_test(j->ctx, j->pull, &done, &result), 0);
    if (done) {
      if (result.status) wrong("pull: %s", mlfab_error_name(result.status));
      j->pull = 0;
    }
  }
  for (uint32_t i = 0; i < b->s.slots && !j->pull && j->next < j->limit; i++) {
    if (j->push[i]) continue;
    if (now(b) < j->at_ns) {
      if (j->armed_ns != j->at_ns)
        assert_int_equal(mlfab_sim_at(b->sim, j->at_ns, nothing, NULL), 0);
      j->armed_ns = j->at_ns;
      return;
    }
    start_push(b, j, i);
  }
}

/* One event, and the checks after it. */
static void step(bed *b) {
  sim_step(b->sim);
  for (uint32_t i = 0; i < b->s.servers; i++) watch_server(b, i);
  watch_plans(b);
  for (uint32_t i = 0; i < b->s.workers; i++) look(b, &b->jobs[i]);
}

static int all_done(const bed *b) {
  for (uint32_t i = 0; i < b->s.workers; i++) {
    const job *j = &b->jobs[i];
    if (!j->gone && (busy(j) || j->next < j->limit)) return 0;
  }
  return 1;
}

static void run_for(bed *b, uint64_t ns) {
  uint64_t until = now(b) + ns;
  assert_int_equal(mlfab_sim_at(b->sim, until, nothing, NULL), 0);
  while (now(b) < until) step(b);
}

static void run_all(bed *b) {
  uint64_t until = now(b) + 60 * SECOND;
  while (!all_done(b)) {
    step(b);
    if (now(b) < until) continue;
    for (uint32_t i = 0; i < b->s.workers; i++)
      print_error("worker %u: %u of %u, %s\n", i, b->jobs[i].next, b->jobs[i].limit,
                  b->jobs[i].pull     ? "pulls"
                  : busy(&b->jobs[i]) ? "pushes"
                                      : "is done");
    wrong("after a minute it is not done");
  }
}

static uint32_t applied(const bed *b) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < b->s.workers; i++)
    for (uint32_t k = 0; k < b->s.updates; k++)
      n += b->updates[i][k].known && b->updates[i][k].code == 0;
  return n;
}

/* ---- at the end ---- */

/* The marks in the model agree with the results: applied 1, everywhere; refused 0; for a dead worker's
 * unknown ones either. */
static void check_marks(bed *b) {
  job *reader = &b->jobs[0];
  while (!reader->ctx) reader++;
  mlfab_buf buf = {MLFAB_ALL, 0, reader->image, b->s.count};
  assert_int_equal(mlfab_pull(reader->ctx, &buf, 1, NULL, NULL), 0);
  const int64_t *integers = (const int64_t *)(const void *)reader->image;
  uint32_t n = marks(b);
  for (uint64_t e = 0; e < b->s.count; e++) {
    uint32_t m = (uint32_t)(e % n), rank = m / b->s.updates, k = m % b->s.updates;
    const update *u = &b->updates[rank][k];
    double is = b->s.dtype == MLFAB_I64 ? (double)integers[e] : reader->image[e];
    double wanted = u->known ? u->code == 0 : 0.0;
    if (u->started && !u->known)
      wanted = b->s.dtype == MLFAB_I64 ? (double)integers[m] : reader->image[m];
    if (is != wanted || (wanted != 0.0 && wanted != 1.0))
      wrong("element %u: update %u of worker %u (%s) was applied %g times", (unsigned)e, k, rank,
            u->known     ? mlfab_error_name(u->code)
            : u->started ? "not known"
                         : "not pushed",
            is);
  }
}

/* The versions of the applied updates are 1, 2, 3 ..; `order` (if not NULL) gets the update at each place. */
static uint32_t check_versions(const bed *b, uint32_t *order) {
  uint32_t n = applied(b), at[MARKS_MAX + 1];
  memset(at, 0xff, sizeof at);
  for (uint32_t i = 0; i < b->s.workers; i++) {
    for (uint32_t k = 0; k < b->s.updates; k++) {
      const update *u = &b->updates[i][k];
      if (!u->known || u->code) continue;
      assert_true(u->version >= 1 && u->version <= n);
      assert_int_equal(at[u->version], 0xffffffffu);
      at[u->version] = i * b->s.updates + k;
      if (order) order[u->version - 1] = i * b->s.updates + k;
    }
  }
  return n;
}

/* Updates were committed in the planned order. All plans are known, unless the scheduler shares a node with
 * a worker: then one event may hold two plans, of which only the second is seen. */
static void check_order(const bed *b) {
  uint32_t order[MARKS_MAX], n = check_versions(b, order), noted = 0;
  uint64_t before = 0;
  for (uint32_t i = 0; i < b->nplanned; i++) {
    const planned *p = &b->planned[i];
    const update *u = &b->updates[p->worker][p->id - 1];
    if (p->dropped) assert_int_equal(u->code, MLFAB_ERR_DROPPED);
    if (u->code) continue;
    if (u->version <= before)
      wrong("update %u of worker %u was planned behind place %u, and committed as %u",
            (unsigned)p->id, p->worker, (unsigned)before, (unsigned)u->version);
    before = u->version;
    noted++;
  }
  if (!b->s.together || b->s.scheduler == MLFAB_SCHEDULER_OWN) assert_int_equal(noted, n);
  assert_true(noted > 0);
}

static uint32_t dropped(const bed *b) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < b->s.workers; i++)
    for (uint32_t k = 0; k < b->s.updates; k++)
      n += b->updates[i][k].known && b->updates[i][k].code == MLFAB_ERR_DROPPED;
  return n;
}

/* Every update was decided: applied, or dropped with the delay that it would have had. */
static void check_drops(const bed *b) {
  for (uint32_t i = 0; i < b->s.workers; i++) {
    for (uint32_t k = 0; k < b->s.updates; k++) {
      const update *u = &b->updates[i][k];
      if (!u->known) continue;
      if (u->code && u->code != MLFAB_ERR_DROPPED)
        wrong("update %u of worker %u: %s", k, i, mlfab_error_name(u->code));
      if (!u->code && b->bound_ns == 0) assert_true(u->delay < b->bound);
      if (u->code && b->bound == MLFAB_UNBOUNDED) wrong("dropped without a bound");
    }
  }
}

/* The sums over the seeds of a test. */
static struct { uint32_t applied, dropped, groups, plans, failed, compared; } seen;

/* Runs seeds of a test, whose sums are in `seen`. */
static void run_seeds(double usual, void (*one)(uint64_t seed)) {
  memset(&seen, 0, sizeof seen);
  seeds_run("schedule", test_cases(usual), one);
}

/* Did so many seeds run that something rare has happened? */
static int many(void) { return !seeds_alone() && test_scale() >= 1.0; }

/* ---- what must hold after every event ---- */

/* Random fabrics without faults: below the bound, in the planned order, nothing lost or applied twice. */
static void order_and_bound(uint64_t seed) {
  uint64_t r = mix(seed);
  setup s = standard(seed);
  s.workers = 2 + (uint32_t)(r % 7);
  s.scheduler = r >> 8 & 1 ? MLFAB_SCHEDULER_OWN : MLFAB_SCHEDULER_BESIDE;
  s.together = r >> 9 & 1;
  s.pulls = (r >> 10 & 3) > 0;
  s.slots = 1 + (r >> 12 & 1);
  s.jitter = r >> 13 & 1 ? 0.5 : 0.0;
  s.think_ns = (r >> 16 & 31) * MS;
  s.schedule.best = r >> 21 & 1;
  s.schedule.whole = r >> 22 & 1;
  s.schedule.plan_ahead_ns = r >> 23 & 1 ? 150 * MS : 0;
  if ((r >> 24 & 7) == 0) s.schedule.interval_ns = 30 * MS;
  if (s.pulls && (r >> 27 & 3) > 0)
    s.schedule.delay_bound = r >> 29 & 1 ? 1 + (r >> 30) % 4 : s.workers + (r >> 30) % 8;
  s.schedule.no_aggregation = (r >> 40 & 7) == 0;
  s.schedule.no_distribution = (r >> 43 & 3) == 0;
  bed *b = bed_open(&s);
  for (uint32_t i = 0; i < s.workers;
       i++) /* links of different speed; the server's is the fastest */
    mlfab_sim_set_rate(b->sim, i, s.rate >> (mix(r + i) % 3), s.rate >> (mix(r - i) % 3));
  run_all(b);
  check_marks(b);
  check_drops(b);
  check_order(b);
  for (uint32_t i = 0; i < s.servers; i++) assert_true(b->seen[i].delay_max < b->bound);
  assert_int_equal(b->seen[0].groups_failed, 0);
  if (!s.together) assert_int_equal(b->seen[0].updates_dropped, dropped(b));
  seen.applied += applied(b);
  seen.dropped += dropped(b);
  seen.groups += (uint32_t)b->seen[0].groups_applied;
  seen.plans += (uint32_t)b->plans;
  bed_close(b);
}

TEST(test_order_and_bound) {
  run_seeds(24, order_and_bound);
  print_message("%u applied, %u dropped, %u groups, %u plans\n", seen.applied, seen.dropped,
                seen.groups, seen.plans);
  assert_true(!many() || (seen.dropped > 10 && seen.groups > 0));
}

/* From bound_ns on nothing is applied at or above the new bound, including updates placed under the old
 * one. */
static void bound_lowered(uint64_t seed) {
  setup s = standard(seed);
  s.workers = 8;
  s.pulls = 1;
  s.slots = 2;
  s.updates = 16;
  s.think_ns = 2 * MS;
  if (seed % 2)
    s.schedule.plan_ahead_ns = 100 * MS; /* many placed updates are under way; else groups */
  bed *b = bed_open(&s);
  for (uint64_t bound = 12; bound >= 1; bound = bound > 6 ? bound - 6 : bound - bound / 2) {
    run_for(b, 120 * MS);
    mlfab_schedule schedule = s.schedule;
    schedule.delay_bound = bound;
    assert_int_equal(mlfab_set_schedule(b->jobs[seed % 8].ctx, &schedule), 0);
    b->bound = bound;
    b->bound_ns = now(b) + 30 * MS; /* after what its link has already taken */
    if (bound == 1) break;
  }
  run_all(b);
  check_marks(b);
  check_drops(b);
  check_versions(b, NULL);
  seen.dropped += dropped(b);
  bed_close(b);
}

TEST(test_bound_lowered) {
  run_seeds(8, bound_lowered);
  assert_true(!many() || seen.dropped > 10);
}

/* --- the server's in-link --- */

/* Workers that always have something to push, all links alike. Direct transfers can use the link whenever
 * they wait, so it may be idle only while grants travel: the next one is released two chunks before the end
 * of the previous one, which covers a round trip here. The rest is a frame (the simulator forwards whole
 * frames) and a round trip. Groups cannot arrive faster than their last member reaches the aggregator: with
 * everything in groups, the link waits for the first bytes of their sums, and the number of applied updates
 * counts. Returns the share of the link's capacity that was used. */
static double link_is_busy(const setup *s, uint64_t *gap_p, uint64_t *applied_p) {
  bed *b = bed_open(s);
  run_for(b, 300 * MS); /* the capacities are known, the queues are full */
  uint64_t from_ns = now(b), from = b->seen[0].bytes_received;
  uint64_t before = b->seen[0].updates_applied;
  b->watch_gaps = 1;
  run_for(b, 500 * MS);
  for (uint32_t i = 0; i < s->workers; i++) assert_true(b->jobs[i].next < s->updates);
  double bytes = (double)(b->seen[0].bytes_received - from);
  double share = bytes / ((double)s->rate * 1e-9 * (double)(now(b) - from_ns));
  *gap_p = b->longest_gap_ns;
  *applied_p = b->seen[0].updates_applied - before;
  print_message("%u workers, %s: %.1f %% busy, idle for %.2f ms at most, %u groups\n", s->workers,
                s->schedule.no_aggregation ? "ordered" : "grouped", 100.0 * share,
                1e-6 * (double)*gap_p, (unsigned)b->seen[0].groups_applied);
  bed_close(b);
  return share;
}

TEST(test_link_is_busy) {
  uint64_t gap, direct, grouped;
  for (int ahead = 0; ahead < 2; ahead++) {
    setup s = standard(7 + (uint64_t)ahead);
    uint64_t chunk_ns = 8192 * 1000ull / 10;
    s.workers = 8;
    s.slots = 2;
    s.updates = 40;
    s.think_ns = 0;
    s.schedule.no_aggregation = 1;
    s.schedule.plan_ahead_ns = ahead ? 150 * MS : 0;
    assert_true(link_is_busy(&s, &gap, &direct) > 0.98);
    assert_true(gap < 2 * chunk_ns + 2 * s.latency_ns);
    if (ahead) continue; /* each is planned as it comes: there are no groups */
    s.schedule.no_aggregation = 0;
    assert_true(link_is_busy(&s, &gap, &grouped) > 0.8);
    assert_true(gap < s.count * 8 * 1000 / 10); /* less than the duration of an update */
    assert_true((double)grouped > 1.5 * (double)direct);
  }
}

/* The setting of tests/process/network_test.py in virtual time: 8 workers pull and push 4 MB over links of
 * 200 Mbit/s, two pushes each at a time; two links have a quarter of the rate, different ones every two
 * seconds. Returns the number of updates applied in 20 seconds. */
static uint32_t shaped_network(uint32_t scheduler, uint64_t seed) {
  setup s = standard(seed);
  mlfab_config usual;
  mlfab_config_init(&usual);
  s.scheduler = scheduler;
  s.workers = 8;
  s.slots = 2;
  s.pulls = 1;
  s.think_ns = 0;
  s.updates = UPDATES_MAX;
  s.count = 500000;
  s.rate = 25 * MB;
  s.eager = (uint32_t)usual.eager_bytes;
  s.chunk = (uint32_t)usual.chunk_bytes;
  s.heartbeat_ns = usual.heartbeat_ns;
  if (scheduler) s.schedule.delay_bound = 30;
  bed *b = bed_open(&s);
  uint32_t slow[2] = {0, 0}, before = applied(b);
  for (uint64_t k = 0; k < 10; k++) {
    for (int i = 0; i < 2; i++) mlfab_sim_set_rate(b->sim, slow[i], s.rate, s.rate);
    slow[0] = (uint32_t)(mix(seed * 1000 + k) % 8);
    slow[1] = (slow[0] + 1 + (uint32_t)(mix(seed * 1000 + k) / 8 % 7)) % 8;
    for (int i = 0; i < 2; i++) mlfab_sim_set_rate(b->sim, slow[i], s.rate / 4, s.rate / 4);
    run_for(b, 2 * SECOND);
  }
  for (uint32_t i = 0; i < s.workers; i++) assert_true(b->jobs[i].next < s.updates);
  uint32_t n = applied(b) - before;
  bed_close(b);
  return n;
}

/* On a real network the gain is only reported, because it depends on the machine's load. */
static void scheduled_against_direct(uint64_t seed) {
  uint32_t direct = shaped_network(MLFAB_SCHEDULER_NONE, seed);
  uint32_t scheduled = shaped_network(MLFAB_SCHEDULER_OWN, seed);
  print_message("%u updates direct, %u scheduled: %.2f times\n", direct, scheduled,
                (double)scheduled / direct);
  assert_true(direct > 0 && scheduled >= 1.8 * direct);
}

TEST(test_scheduled_against_direct) { run_seeds(1, scheduled_against_direct); }

/* --- the scheduler is lost --- */

/* Nothing is lost or applied twice; without a bound everything is applied. */
static void check_all_applied(bed *b) {
  check_marks(b);
  for (uint32_t i = 0; i < b->s.workers; i++) {
    for (uint32_t k = 0; k < b->jobs[i].next && !b->jobs[i].gone; k++) {
      const update *u = &b->updates[i][k];
      if (!u->known || u->code)
        wrong("update %u of worker %u: %s", k, i,
              u->known ? mlfab_error_name(u->code) : "not known");
    }
  }
}

static setup lossy(uint64_t seed) {
  setup s = standard(seed);
  s.workers = 7 + (uint32_t)(mix(seed) % 2);
  s.updates = 40;
  s.slots = 2;
  s.think_ns = MS; /* many wait at a time, so that there are groups */
  s.jitter = 0.5;
  return s;
}

/* Runs until an update is applied that was announced after this moment. */
static uint64_t applied_after(bed *b) {
  uint64_t since = now(b);
  for (;;) {
    step(b);
    for (uint32_t i = 0; i < b->s.workers; i++) {
      for (uint32_t k = 0; k < b->s.updates; k++) {
        const update *u = &b->updates[i][k];
        if (u->known && !u->code && u->began_ns > since) return now(b) - since;
      }
    }
    assert_true(now(b) - since < 20 * SECOND);
  }
}

static void lose_scheduler(uint64_t seed, int cut) {
  setup s = lossy(seed);
  s.heartbeat_ns = 50 * MS;
  bed *b = bed_open(&s);
  run_for(b, (50 + mix(seed) % 100) * MS);
  assert_true(b->plans > 0);
  uint64_t lost_at = now(b), beats = 8 * s.heartbeat_ns;
  b->longest_wait_ns = 0;
  if (cut) {
    for (uint32_t i = 0; i < s.servers; i++)
      mlfab_sim_partition(b->sim, host_of_scheduler(b), host_of_server(b, i), 1);
  } else {
    assert_int_equal(mlfab_sim_crash(b->sim, host_of_scheduler(b)), 0);
    assert_null(b->scheduler);
  }
  uint64_t took = applied_after(b);
  assert_true(b->lost > 0 && b->lost_ns - lost_at < beats);
  /* 8 heartbeats to detect the loss; then first come, first served. */
  if (took > beats + 50 * MS || b->longest_wait_ns > beats + 50 * MS)
    wrong("after %u ms", (unsigned)(took / MS));
  run_for(b, 50 * MS);
  uint64_t groups = b->seen[0].groups_applied;
  assert_true(busy(&b->jobs[0]) || busy(&b->jobs[1]));
  if (cut) {
    /* It continues to connect, and takes over again. */
    for (uint32_t i = 0; i < s.servers; i++)
      mlfab_sim_partition(b->sim, host_of_scheduler(b), host_of_server(b, i), 0);
  } else {
    open_scheduler(b);
    b->serial = 0;
  }
  b->plans = 0;
  b->back = 0;
  run_all(b);
  if (!b->back || b->plans == 0 || b->seen[0].groups_applied <= groups)
    wrong("back %d times, %u plans and %u groups more", b->back, (unsigned)b->plans,
          (unsigned)(b->seen[0].groups_applied - groups));
  check_all_applied(b);
  check_versions(b, NULL);
  bed_close(b);
}

static void scheduler_crashes(uint64_t seed) { lose_scheduler(seed, 0); }
static void scheduler_is_cut_off(uint64_t seed) { lose_scheduler(seed, 1); }

TEST(test_scheduler_crashes) { run_seeds(6, scheduler_crashes); }
TEST(test_scheduler_is_cut_off) { run_seeds(6, scheduler_is_cut_off); }

/* --- members and aggregators --- */

/* Runs until a plan in progress names worker `aggregator`; returns its rank. */
static uint32_t run_until_grouped(bed *b, int member) {
  for (;;) {
    step(b);
    assert_false(all_done(b));
    const planned *p = b->nplanned ? &b->planned[b->nplanned - 1] : NULL;
    if (!p || !p->group || now(b) < b->last_commit_ns + (uint64_t)member) continue;
    for (uint32_t i = 0; i < b->s.workers; i++)
      if (member ? i == p->worker : stats_of(b->jobs[i].ctx).members_added > 2 && i != p->worker)
        return i;
  }
}

/* A worker's host crashes: as an aggregator, or as a member. */
static void lose_worker(uint64_t seed, int member) {
  setup s = lossy(seed);
  s.workers = 7;
  bed *b = bed_open(&s);
  run_for(b, 30 * MS);
  uint32_t victim = run_until_grouped(b, member);
  uint64_t failed = b->seen[0].groups_failed, groups = b->seen[0].groups_applied;
  assert_int_equal(mlfab_sim_crash(b->sim, victim), 0);
  run_all(b);
  assert_true(b->jobs[victim].gone);
  /* The groups that it summed at that moment, and those it was a member of. */
  if (b->seen[0].groups_failed - failed > 6)
    wrong("%u groups failed", (unsigned)(b->seen[0].groups_failed - failed));
  assert_true(b->seen[0].groups_applied > groups);
  check_all_applied(b);
  bed_close(b);
}

static void aggregator_dies(uint64_t seed) { lose_worker(seed, 0); }
static void member_dies(uint64_t seed) { lose_worker(seed, 1); }

TEST(test_aggregator_dies) { run_seeds(6, aggregator_dies); }
TEST(test_member_dies) { run_seeds(6, member_dies); }

static void not_finite_member(uint64_t seed) {
  setup s = lossy(seed);
  s.dtype = MLFAB_F64;
  s.workers = 6;
  bed *b = bed_open(&s);
  uint32_t bad = 0;
  for (uint32_t i = 0; i < s.workers; i++)
    for (uint32_t k = 0; k < s.updates; k++)
      bad += (uint32_t)(b->updates[i][k].nan = mix(seed ^ (i * 99ull + k)) % 12 == 0);
  run_all(b);
  for (uint32_t i = 0; i < s.workers; i++) {
    for (uint32_t k = 0; k < s.updates; k++) {
      const update *u = &b->updates[i][k];
      if (u->code != (u->nan ? MLFAB_ERR_NOT_FINITE : 0))
        wrong("update %u of worker %u: %s", k, i, mlfab_error_name(u->code));
    }
  }
  check_marks(b);
  check_versions(b, NULL);
  assert_true(b->seen[0].groups_failed <= bad);
  seen.failed += (uint32_t)b->seen[0].groups_failed;
  bed_close(b);
}

TEST(test_not_finite_member) {
  run_seeds(6, not_finite_member);
  assert_true(!many() || seen.failed > 0);
}

/* --- links that are cut, updates that cannot come in time --- */

static double known_rate(const bed *b) { return (double)b->s.rate; }

/* A worker with a cut link waits, and no other worker does; it continues when the link is back. */
static void cut_link(uint64_t seed) {
  setup s = standard(seed);
  s.schedule.delay_bound = seed % 2 ? MLFAB_UNBOUNDED : 100;
  s.pulls = s.schedule.delay_bound != MLFAB_UNBOUNDED;
  bed *b = bed_open(&s);
  uint32_t cut = (uint32_t)(seed % s.workers);
  double rate = known_rate(b);
  for (uint32_t i = 0; i < s.workers; i++)
    assert_int_equal(mlfab_set_link(b->jobs[i].ctx, i == cut ? 0 : rate, i == cut ? 0 : rate), 0);
  for (uint32_t i = 0; i < s.workers; i++) b->jobs[i].limit = 0;
  run_for(b, 20 * MS);
  for (uint32_t i = 0; i < s.workers; i++) b->jobs[i].limit = s.updates;
  run_for(b, 3 * SECOND);
  for (uint32_t i = 0; i < s.workers; i++) {
    if (i == cut) {
      assert_int_equal(b->jobs[i].next, 1);
      assert_false(b->updates[i][0].known);
    } else {
      assert_int_equal(b->jobs[i].next, s.updates);
      assert_false(busy(&b->jobs[i]));
    }
  }
  assert_int_equal(mlfab_set_link(b->jobs[cut].ctx, rate, rate), 0);
  run_all(b);
  check_all_applied(b);
  check_versions(b, NULL);
  bed_close(b);
}

TEST(test_cut_link) { run_seeds(4, cut_link); }

/* One worker's link is so slow that others commit before its update arrives: it is dropped before a byte
 * was sent, with the delay that it would have had. */
TEST(test_too_large) {
  setup s = standard(3);
  s.schedule.delay_bound = 3;
  s.schedule.interval_ns = 40 * MS;
  s.pulls = 1;
  s.think_ns = 2 * MS;
  s.updates = 30;
  s.schedule.no_aggregation = s.schedule.no_distribution = 1;
  bed *b = bed_open(&s);
  for (uint32_t i = 0; i < s.workers; i++)
    assert_int_equal(mlfab_set_link(b->jobs[i].ctx, known_rate(b), i ? known_rate(b) : 20000.0), 0);
  run_for(b, 30 * MS);
  mlfab_stats before = stats_of(b->jobs[0].ctx);
  uint32_t k = b->jobs[0].next, from = k;
  run_all(b);
  mlfab_stats after = stats_of(b->jobs[0].ctx);
  uint32_t late = 0;
  for (; k < s.updates; k++) {
    const update *u = &b->updates[0][k];
    late += u->code == MLFAB_ERR_DROPPED;
    if (u->code == MLFAB_ERR_DROPPED) assert_true(u->delay >= 1);
  }
  assert_true(late > 10);
  assert_int_equal(after.updates_dropped - before.updates_dropped, late);
  check_marks(b);
  check_drops(b);
  check_order(b);
  /* Dropped updates have cost no bytes. */
  uint64_t came = s.updates - from - late + 1; /* plus the one that was under way */
  assert_true(after.payload_sent - before.payload_sent <= came * s.count * 8);
  bed_close(b);
}

/* A bound of 1 admits only updates computed from the newest model. */
TEST(test_bound_of_one) {
  setup s = standard(5);
  s.schedule.delay_bound = 1;
  s.pulls = 1;
  bed *b = bed_open(&s);
  run_all(b);
  check_marks(b);
  check_drops(b);
  check_order(b);
  assert_int_equal(b->seen[0].delay_max, 0);
  assert_true(dropped(b) > 0 && applied(b) > 0);
  for (uint32_t i = 0; i < s.workers; i++)
    for (uint32_t k = 0; k < s.updates; k++)
      assert_true(!b->updates[i][k].code || b->updates[i][k].delay > 0);
  bed_close(b);
}

/* The worker dies while the scheduler lists its update, and while the plan for it is under way. */
static void died_since_announced(uint64_t seed) {
  setup s = lossy(seed);
  s.schedule.interval_ns = 40 * MS;
  s.workers = 5;
  s.updates = 20;
  bed *b = bed_open(&s);
  uint32_t victim = (uint32_t)(mix(seed) % 5);
  run_for(b, 90 * MS);
  while (!busy(&b->jobs[victim])) step(b);
  int named = seed % 2 == 0; /* else right after the plan that names it */
  while (!named) {
    uint32_t n = b->nplanned;
    step(b);
    assert_false(all_done(b));
    for (; n < b->nplanned; n++) named |= b->planned[n].worker == victim;
  }
  assert_int_equal(mlfab_sim_crash(b->sim, victim), 0);
  run_all(b);
  check_all_applied(b);
  bed_close(b);
}

TEST(test_died_since_announced) { run_seeds(6, died_since_announced); }

/* --- several servers, rounds, other ways to drive --- */

static void several_servers(uint64_t seed) {
  uint64_t r = mix(seed);
  setup s = standard(seed);
  s.servers = 2 + (uint32_t)(seed % 2);
  s.together = r >> 4 & 1;
  s.scheduler = r >> 5 & 1 ? MLFAB_SCHEDULER_OWN : MLFAB_SCHEDULER_BESIDE;
  s.workers = 6;
  s.slots = 2;
  s.pulls = r >> 6 & 1;
  s.think_ns = 2 * MS;
  s.count = 24000;
  if (s.pulls) s.schedule.delay_bound = 6 + r % 8;
  bed *b = bed_open(&s);
  run_all(b);
  for (uint32_t i = 0; i < s.workers; i++) {
    for (uint32_t k = 0; k < s.updates; k++) {
      update *u = &b->updates[i][k];
      assert_true(u->known);
      if (u->code && u->code != MLFAB_ERR_DROPPED && u->code != MLFAB_ERR_PARTIAL)
        wrong("%s", mlfab_error_name(u->code));
      seen.applied += u->code == 0;
      /* One server checked later than the other: all results are possible. */
      if (u->code == MLFAB_ERR_PARTIAL) u->nan = 2;
    }
  }
  uint32_t partial = 0;
  for (uint32_t i = 0; i < s.workers; i++)
    for (uint32_t k = 0; k < s.updates; k++) partial += b->updates[i][k].nan == 2;
  if (!partial) check_marks(b);
  for (uint32_t i = 0; i < s.servers; i++) {
    assert_true(b->seen[i].delay_max < b->bound);
    seen.groups += (uint32_t)b->seen[i].groups_applied;
  }
  bed_close(b);
}

TEST(test_several_servers) {
  run_seeds(8, several_servers);
  assert_true(!many() || (seen.groups > 0 && seen.applied > 100));
}

/* With a rule that sums, the integer model must be the same with any scheduler. */
static void rounds(uint64_t seed) {
  double *first = NULL;
  uint64_t groups = 0;
  for (uint32_t kind = MLFAB_SCHEDULER_NONE; kind <= MLFAB_SCHEDULER_OWN; kind++) {
    setup s = standard(seed);
    s.scheduler = kind;
    s.sync = MLFAB_SYNC_BSP;
    s.pulls = 1;
    s.think_ns = MS;
    s.servers = 1 + (uint32_t)(seed % 2);
    s.count = 24000;
    s.deterministic = seed >> 1 & 1;
    s.rule = seed >> 2 & 1 ? MLFAB_OPTIMIZER_MOMENTUM : MLFAB_OPTIMIZER_SGD;
    s.dtype = s.deterministic || s.rule ? MLFAB_F64 : MLFAB_I64;
    bed *b = bed_open(&s);
    run_all(b);
    if (!s.rule) check_all_applied(b);
    double *image = b->jobs[1].image;
    mlfab_buf buf = {MLFAB_ALL, 0, image, s.count};
    assert_int_equal(mlfab_pull(b->jobs[1].ctx, &buf, 1, NULL, NULL), 0);
    assert_int_equal(applied(b), s.workers * s.updates);
    groups += b->seen[0].groups_applied;
    if (!first) {
      first = malloc(s.count * sizeof *first);
      assert_non_null(first);
      memcpy(first, image, s.count * sizeof *first);
    } else if (s.dtype == MLFAB_I64 || s.deterministic) {
      assert_memory_equal(first, image, s.count * sizeof *first);
    } else {
      for (uint64_t e = 0; e < s.count; e++)
        if (!(fabs(first[e] - image[e]) <= 1e-12)) wrong("%.17g, not %.17g", image[e], first[e]);
    }
    bed_close(b);
  }
  if (!(seed >> 1 & 1)) assert_true(groups > 0);
  free(first);
}

TEST(test_rounds) { run_seeds(8, rounds); }

/* Contexts without a thread are no aggregators by default. */
TEST(test_driven_by_hand) {
  for (uint32_t accumulators = 0; accumulators < 2; accumulators++) {
    setup s = lossy(4);
    s.hand = 1;
    s.accumulators = accumulators;
    s.updates = 10;
    bed *b = bed_open(&s);
    run_all(b);
    check_all_applied(b);
    check_order(b);
    if (accumulators) assert_true(b->seen[0].groups_applied > 0);
    if (!accumulators) assert_int_equal(b->seen[0].groups_applied, 0);
    bed_close(b);
  }
}

TEST(test_world_of_one) {
  for (uint32_t bounded = 0; bounded < 2; bounded++) {
    setup s = standard(2);
    s.workers = 1;
    s.together = 1;
    s.pulls = 1;
    s.scheduler = MLFAB_SCHEDULER_BESIDE;
    if (bounded) s.schedule.delay_bound = 1;
    bed *b = bed_open(&s);
    run_all(b);
    check_all_applied(b);
    assert_true(b->plans > 0);
    bed_close(b);
  }
}

/* --- optimizers, over groups, against a literal application --- */

/* Which updates each commit contained, from versions and from the steps; 0 when a step holds several
 * commits that cannot be separated. */
static uint32_t commits_of(const bed *b, uint32_t sizes[MARKS_MAX]) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < b->nsteps; i++) {
    if (b->steps[i].applied == 0) continue;
    if (b->steps[i].commits != 1 && b->steps[i].groups > 0) return 0;
    for (uint32_t k = 0; k < b->steps[i].commits; k++)
      sizes[n++] = b->steps[i].commits == 1 ? b->steps[i].applied : 1;
  }
  return n;
}

/* Element e after all commits. */
static double literal(const bed *b, uint64_t e, const uint32_t *order, const uint32_t *sizes,
                      uint32_t n) {
  double w = 0.0, s0 = 0.0, s1 = 0.0;
  uint32_t at = 0, updates = b->s.updates;
  for (uint32_t c = 0; c < n; c++) {
    double sum = 0.0, t = c + 1.0;
    int linear = b->s.rule == MLFAB_OPTIMIZER_MOMENTUM;
    double first = scale_of(b, order[at] / updates, order[at] % updates);
    uint64_t delay = 0;
    for (uint32_t k = 0; k < sizes[c]; k++) {
      uint32_t rank = order[at + k] / updates, u = order[at + k] % updates;
      double scale = scale_of(b, rank, u);
      sum += (linear ? scale : scale / first) * value_of(b, rank, u, e);
      if (b->updates[rank][u].delay > delay) delay = b->updates[rank][u].delay;
    }
    at += sizes[c];
    if (linear) {
      s0 = 0.9 * s0 + sum;
      w += s0;
    } else if (b->s.rule == MLFAB_OPTIMIZER_ADADELAY) {
      w += 1.0 / sqrt(t + (double)delay) * first * sum;
    } else {
      s0 = 0.9 * s0 + 0.1 * sum;
      s1 = 0.999 * s1 + 0.001 * sum * sum;
      w += first * (s0 / (1.0 - pow(0.9, t))) / (sqrt(s1 / (1.0 - pow(0.999, t))) + 1e-8);
    }
  }
  return w;
}

static void rule(uint64_t seed, uint32_t number) {
  uint32_t order[MARKS_MAX], sizes[MARKS_MAX];
  setup s = lossy(seed);
  s.updates = 6;
  s.rule = number;
  s.dtype = MLFAB_F64;
  s.count = 3000;
  bed *b = bed_open(&s);
  run_all(b);
  assert_int_equal(applied(b), s.workers * s.updates);
  check_versions(b, order);
  uint32_t n = commits_of(b, sizes);
  mlfab_buf buf = {MLFAB_ALL, 0, b->jobs[0].image, s.count};
  assert_int_equal(mlfab_pull(b->jobs[0].ctx, &buf, 1, NULL, NULL), 0);
  for (uint64_t e = 0; e < s.count && n > 0; e++) {
    double wanted = literal(b, e, order, sizes, n), is = b->jobs[0].image[e];
    if (!(fabs(is - wanted) <= 1e-9 * (1e-3 + fabs(wanted))))
      wrong("rule %u: %.17g, not %.17g", s.rule, is, wanted);
  }
  seen.compared += n > 0;
  seen.groups += n > 0 ? (uint32_t)b->seen[0].groups_applied : 0;
  bed_close(b);
}

static void momentum(uint64_t seed) { rule(seed, MLFAB_OPTIMIZER_MOMENTUM); }
static void adadelay(uint64_t seed) { rule(seed, MLFAB_OPTIMIZER_ADADELAY); }
static void adam(uint64_t seed) { rule(seed, MLFAB_OPTIMIZER_ADAM); }

TEST(test_rules) {
  void (*const rules[])(uint64_t) = {momentum, adadelay, adam};
  for (int i = 0; i < 3; i++) {
    run_seeds(6, rules[i]);
    print_message("%u runs compared, %u groups in them\n", seen.compared, seen.groups);
    assert_true(!many() || (seen.compared > 0 && seen.groups > 0));
  }
}

TESTS(NULL, NULL)
