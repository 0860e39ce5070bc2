/* test_slow.c - links on which a chunk of the largest size takes longer than three heartbeats, and links of a wide area: work
 * ends, nobody seems dead, and nothing is sent again. Workers push, pull, and make collectives together; servers have replicas,
 * and a scheduler groups updates and spreads pulls. A loss is a delay of the frames behind it, as TCP makes of it.
 *
 * A table of cases, and random ones: 1 Mbit/s to 100 Gbit/s, 0.1 to 300 ms one way, up to 2 % of losses. */
#include "job.h"

enum { WORKERS = 3, STEPS = 2 };

typedef struct setup {
  uint64_t rate, latency_ns, beat_ns;
  double loss;
  uint32_t count, workers, servers;
  int replicas, schedules, whole, collectives;
  uint64_t seed;
} setup;

typedef struct worker {
  struct job *job;
  mlfab *ctx;
  mlfab_request request;
  uint32_t done; /* calls */
  float *data;
} worker;

typedef struct job {
  setup s;
  mlfab_sim *sim;
  worker of[WORKERS];
  mlfab *server[2], *replica[2], *scheduler;
  uint32_t dead, stands_by;
} job;

static void on_event(void *user, const mlfab_event_info *info) {
  job *j = user;
  j->dead += info->kind == MLFAB_EVENT_DEAD;
  j->stands_by += info->kind == MLFAB_EVENT_STANDS_BY;
}

static mlfab *open_one(job *j, uint32_t host, uint32_t roles, int32_t rank) {
  const setup *s = &j->s;
  mlfab *ctx = NULL;
  mlfab_error error;
  mlfab_config c;
  mlfab_config_init(&c);
  c.workers = s->workers;
  c.servers = s->servers;
  c.dedicated = 1;
  c.replicas = (uint32_t)s->replicas;
  c.scheduler = s->replicas || s->schedules ? MLFAB_SCHEDULER_OWN : 0;
  c.roles = roles;
  c.rank = rank;
  c.heartbeat_ns = s->beat_ns;
  c.timeout_ns = 600 * SECOND;
  c.on_event = on_event;
  c.user = j;
  (void)snprintf(c.coordinator, sizeof c.coordinator, s->replicas ? "sim:%u,sim:%u" : "sim:%u",
                 s->workers, s->workers + s->servers);
  if (mlfab_sim_open(j->sim, host, &c, &ctx, &error)) fail_msg("%s", error.text);
  return ctx;
}

/* Bytes that all have sent. */
static uint64_t sent_by(mlfab *ctx) {
  mlfab_stats stats;
  if (!ctx) return 0;
  assert_int_equal(mlfab_get_stats(ctx, &stats, sizeof stats), 0);
  return stats.bytes_sent;
}

static uint64_t again_by(mlfab *ctx) {
  mlfab_stats stats;
  assert_int_equal(mlfab_get_stats(ctx, &stats, sizeof stats), 0);
  return stats.transfers_revoked + stats.pulls_restarted;
}

static void await_all(job *j) {
  mlfab_error error;
  for (uint32_t w = 0; w < j->s.workers; w++) {
    int ready;
    while ((ready = mlfab_is_ready(j->of[w].ctx, &error)) == 0)
      assert_int_equal(mlfab_sim_step(j->sim), 1);
    if (ready < 0) fail_msg("seed %llu: %s", (unsigned long long)j->s.seed, error.text);
  }
}

/* The next call of a worker: push, pull and, if the case has them, a sum over all workers. */
static void call_next(worker *w) {
  const setup *s = &w->job->s;
  const uint32_t calls = s->collectives ? 3 : 2;
  const mlfab_buf buf = {MLFAB_ALL, 0, w->data, s->count};
  const mlfab_vec vec = {w->data, s->count};
  int code = w->done % calls == 0 ? mlfab_push_start(w->ctx, &buf, 1, NULL, &w->request)
             : w->done % calls == 1
                 ? mlfab_pull_start(w->ctx, &buf, 1, NULL, &w->request)
                 : mlfab_allreduce_start(w->ctx, &vec, 1, MLFAB_F32, NULL, &w->request);
  assert_int_equal(code, 0);
}

static int work_on(worker *w) {
  int done = 0;
  const uint32_t calls = STEPS * (w->job->s.collectives ? 3 : 2);
  if (w->done == calls) return 0;
  if (w->request == 0) call_next(w);
  int code = mlfab_test(w->ctx, w->request, &done, NULL);
  if (code)
    fail_msg("seed %llu, worker %d, call %u: %s", (unsigned long long)w->job->s.seed,
             (int)(w - w->job->of), w->done, last_text(w->ctx));
  if (!done) return 1;
  w->request = 0;
  w->done++;
  return 1;
}

static void run(const setup *s) {
  static job j;
  const uint32_t nodes = s->workers + s->servers * (s->replicas ? 2 : 1) + 1;
  memset(&j, 0, sizeof j);
  j.s = *s;
  const mlfab_sim_options options = {.size = sizeof options,
                                     .hosts = nodes,
                                     .seed = s->seed,
                                     .latency_ns = s->latency_ns,
                                     .latency_jitter = 0.5,
                                     .rate_bytes_per_s = s->rate,
                                     .reorder = s->loss};
  assert_int_equal(mlfab_sim_create(&options, &j.sim), 0);
  for (uint32_t k = 0; k < s->servers; k++)
    j.server[k] = open_one(&j, s->workers + k, MLFAB_ROLE_SERVER, (int32_t)k);
  for (uint32_t k = 0; s->replicas && k < s->servers; k++)
    j.replica[k] = open_one(&j, s->workers + s->servers + k, MLFAB_ROLE_REPLICA, (int32_t)k);
  if (s->replicas || s->schedules) j.scheduler = open_one(&j, nodes - 1, MLFAB_ROLE_SCHEDULER, 0);
  for (uint32_t w = 0; w < s->workers; w++) {
    j.of[w].job = &j;
    j.of[w].ctx = open_one(&j, w, MLFAB_ROLE_WORKER, (int32_t)w);
    j.of[w].data = calloc(s->count, sizeof(float));
  }
  await_all(&j);
  for (uint32_t w = 0; w < s->workers; w++) {
    assert_int_equal(mlfab_tensor_add(j.of[w].ctx, 0, MLFAB_F32, s->count), 0);
    if (s->schedules && w == 0) {
      mlfab_schedule schedule;
      mlfab_schedule_init(&schedule);
      schedule.whole = (uint32_t)s->whole;
      assert_int_equal(mlfab_set_schedule(j.of[w].ctx, &schedule), 0);
    }
  }
  for (uint32_t w = 0; w < s->workers; w++) {
    const mlfab_buf first = {MLFAB_ALL, 0, j.of[w].data, s->count};
    int code = mlfab_model_start(j.of[w].ctx, NULL, &first, 1);
    if (code) fail_msg("seed %llu: %s", (unsigned long long)s->seed, last_text(j.of[w].ctx));
  }
  for (int more = 1; more;) {
    more = 0;
    for (uint32_t w = 0; w < s->workers; w++) more |= work_on(&j.of[w]);
    if (more) assert_int_equal(mlfab_sim_step(j.sim), 1);
  }
  /* The payload: the model once, and for each step every update, every pull, and two copies of every sum. */
  uint64_t model = 4ull * s->count, steps = (uint64_t)STEPS * s->workers;
  uint64_t payload = model * (1 + 2 * steps + (s->collectives ? 2 * steps : 0)), sent = 0,
           again = 0;
  for (uint32_t w = 0; w < s->workers; w++) sent += sent_by(j.of[w].ctx);
  for (uint32_t k = 0; k < s->servers; k++) {
    mlfab_stats stats;
    assert_int_equal(mlfab_get_stats(j.server[k], &stats, sizeof stats), 0);
    sent += stats.bytes_sent - stats.replica_bytes;
    again += again_by(j.server[k]);
  }
  if (j.dead || j.stands_by || again)
    fail_msg("seed %llu: %u nodes seem dead, %u copies gave up, %llu transfers began again",
             (unsigned long long)s->seed, j.dead, j.stands_by, (unsigned long long)again);
  /* By way of an aggregator or a distributor, bytes go twice; votes and heartbeats go besides. */
  if (sent > payload * 3 / 2 + 400000)
    fail_msg("seed %llu: %llu bytes were sent for %llu", (unsigned long long)s->seed,
             (unsigned long long)sent, (unsigned long long)payload);
  for (uint32_t w = 0; w < s->workers; w++) {
    mlfab_abandon(&j.of[w].ctx);
    free(j.of[w].data);
  }
  for (uint32_t k = 0; k < s->servers; k++) {
    mlfab_abandon(&j.server[k]);
    if (j.replica[k]) mlfab_abandon(&j.replica[k]);
  }
  if (j.scheduler) mlfab_abandon(&j.scheduler);
  mlfab_sim_destroy(&j.sim);
}

#define MBIT 125000ull

TEST(test_table) {
  static const setup cases[] = {
      /* a worker and a server */
      {340000, MS / 10, 500 * MS, 0, 300000, 1, 1, 0, 0, 0, 0, 0},
      {300000, MS / 10, 50 * MS, 0, 300000, 1, 1, 0, 0, 0, 0, 0},
      {12 * MBIT, 100 * MS, 50 * MS, 0, 300000, 1, 1, 0, 0, 0, 0, 0},
      {MBIT, 40 * MS, 500 * MS, 0.02, 60000, 1, 1, 0, 0, 0, 0, 0},
      /* a replica, which gets states, and votes beside them */
      {300000, MS / 10, 50 * MS, 0, 300000, 1, 1, 1, 0, 0, 0, 0},
      {MBIT, MS / 10, 50 * MS, 0, 100000, 1, 1, 1, 0, 0, 0, 0},
      {MBIT, 300 * MS, 500 * MS, 0, 60000, 1, 1, 1, 0, 0, 0, 0},
      {12 * MBIT, MS, 50 * MS, 0.01, 300000, 2, 2, 1, 0, 0, 0, 0},
      /* collectives */
      {300000, MS / 10, 50 * MS, 0, 100000, 3, 1, 0, 0, 0, 1, 0},
      {2 * MBIT, 50 * MS, 500 * MS, 0.02, 60000, 3, 1, 0, 0, 0, 1, 0},
      /* aggregators and distributors */
      {300000, MS / 10, 50 * MS, 0, 100000, 3, 1, 0, 1, 0, 0, 0},
      {12 * MBIT, 10 * MS, 50 * MS, 0, 300000, 3, 2, 0, 1, 1, 1, 0},
      {2 * MBIT, 50 * MS, 500 * MS, 0.01, 60000, 3, 1, 0, 1, 1, 1, 0},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    setup s = cases[i];
    s.seed = i + 1;
    run(&s);
  }
}

static void wide(uint64_t seed) {
  uint64_t d = mix(seed);
  setup s = {.seed = seed, .workers = 1 + (uint32_t)dice_below(&d, WORKERS)};
  s.rate = MBIT << dice_below(&d, 17); /* to 131 Gbit/s */
  s.latency_ns = MS / 10 + dice_below(&d, dice_chance(&d, 0.5) ? 200 : 3000) * MS / 10;
  s.loss = 0.02 * (double)dice_below(&d, 3) / 2.0;

  s.servers = 1 + (uint32_t)dice_below(&d, 2);
  s.replicas = dice_chance(&d, 0.4);
  s.schedules = dice_chance(&d, 0.4);
  s.whole = dice_chance(&d, 0.5);
  s.collectives = s.workers > 1 && dice_chance(&d, 0.5);
  s.beat_ns = 500 * MS;
  /* A heartbeat has to be longer than a round trip, and than what all nodes say in one takes. */
  if (s.latency_ns < 20 * MS && s.rate >= 4 * MBIT && dice_chance(&d, 0.5)) s.beat_ns = 50 * MS;
  /* A loss delays by up to 20 latencies: here, by less than two heartbeats. */
  if (20 * s.latency_ns > 2 * s.beat_ns) s.loss = 0;
  s.count = s.rate < 10 * MBIT ? 20000 + (uint32_t)dice_below(&d, 40000)
                               : 20000 + (uint32_t)dice_below(&d, 400000);
  run(&s);
}

TEST(test_wide) { seeds_run("slow", test_cases(60), wide); }

TESTS(NULL, NULL)
