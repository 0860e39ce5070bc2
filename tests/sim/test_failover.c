/* test_failover.c - servers with replicas in whole simulated fabrics: copies and schedulers that crash, pause and lose
 * each other.
 *
 * Every worker adds 1 to its own elements of the model, so a pull tells how many of its updates are in each slice: never
 * more than it has pushed, all or nothing of each update in a slice, and of the updates that were answered DURABLE all.
 * In the end a shard's slices have the same.
 * What was answered APPLIED and is lost with a copy is at most div_max in the norm of the shard, and is what
 * the workers' statistics say.
 *
 * Succession: server 0 is killed again and again while workers make collectives and barriers, all the same ones: no call
 * fails, none hangs, and every sum is right. */
#include "../unit/on_device.h"
#include "job.h"

#include <math.h>

enum {
  COUNT = 4096,
  SUMMED = 200, /* in each collective */
  STEPS = 12,
  WORKERS = 3, /* at most, in random jobs */
  CALLERS = 4,
  SERVERS = 2,
  CUTS = 2,
  BEAT_MS = 50,
  EAGER_LEAST = 4096 /* of a server's credit: a shard is larger */
};                   /* CUTS: slices of a shard */

enum phase { COMPUTES, PUSHES, PULLS, LEAVES, AWAY, GONE, OPENS }; /* GONE: it has crashed */

typedef struct worker {
  struct job *job;
  uint32_t rank;
  enum phase phase;
  uint64_t step, durable; /* updates begun; of those, DURABLE ones */
  uint64_t dropped;       /* ... that came too late */
  uint64_t crashes, open; /* ... and those of which the process that crashed had no answer */
  uint64_t back_ns;       /* GONE: when it comes back */
  int asks_durable;       /* the present push */
  uint64_t then[CALLERS]; /* what was DURABLE of each when the present pull began */
  uint64_t asked_ns;
  mlfab_request request;
  float u[COUNT], w[COUNT];
} worker;

/* A worker that makes collectives. */
typedef struct caller {
  struct job *job;
  uint32_t rank;
  int busy, late; /* late: another process has its number */
  uint64_t calls, next_ns;
  mlfab_request request;
  int64_t data[SUMMED];
} caller;

/* What the events of a server's copies say. */
typedef struct shard {
  struct job *job;
  uint32_t serves; /* copy */
  int in_sync;
  uint64_t changed_ns;
  uint32_t takeovers;
} shard;

typedef struct teller {
  struct job *job;
  uint32_t host;
} teller;

typedef struct job {
  world w;
  shard shards[SERVERS];
  teller tellers[WORLD_NODES];
  uint32_t faults;           /* that are still to come */
  uint64_t next_ns, back_ns; /* the next fault; when the crashed host comes back, 0: none is away */
  uint32_t away;
  uint32_t crashes;
  uint64_t goal; /* steps of each worker, when the last fault is over; 0: not known */
  uint32_t worker_faults;
  uint64_t worker_next_ns;
  uint64_t random, more, seed; /* more: a second sequence */
  mlfab_sync sync;
  double div_max;
  int acks; /* 0: applied, 1: durable, 2: either */
  uint32_t tags;
  uint64_t bound; /* of delays; 0: none */
  uint32_t eager; /* larger transfers wait for a plan; 0: none of this model */
  worker of[CALLERS];
  uint64_t last_ns; /* when a request ended last */
  uint32_t spare;   /* more hosts, behind the others */
  uint32_t odd;     /* this node has another heartbeat; NOBODY: none */
  uint32_t optimizer;
  caller callers[CALLERS];
  int ends, barriers; /* callers make their last calls; all calls are barriers */
} job;

static const uint32_t NOBODY = UINT32_MAX;

static uint64_t below(job *j, uint64_t n) { return chance_below(&j->random, n); }

static uint64_t below_more(job *j, uint64_t n) { return chance_below(&j->more, n); }

/* Hosts: workers, servers, replicas, the scheduler. */
static uint32_t host_of_scheduler(const job *j) { return j->w.workers + 2 * j->w.servers; }

static void print_log(void *user, int level, const char *line) {
  (void)user;
  (void)level;
  fprintf(stderr, "# %s\n", line);
}

static uint32_t host_of_copy(const job *j, uint32_t server, uint32_t copy) {
  return j->w.workers + copy * j->w.servers + server;
}

static void hear(void *user, const mlfab_event_info *info) {
  const teller *t = user;
  job *j = t->job;
  if (t->host < j->w.workers || !info->is_server) return;
  shard *s = &j->shards[info->rank];
  uint32_t copy = (t->host - j->w.workers) / j->w.servers;
  if (info->kind == MLFAB_EVENT_SERVES && (copy != s->serves || info->code == 0)) {
    if (copy != s->serves) {
      s->in_sync = 0;
      s->takeovers++;
    }
    s->serves = copy;
  } else if (info->kind == MLFAB_EVENT_IN_SYNC && copy == s->serves) {
    if (info->code == 0 && s->in_sync)
      wrong("server %d: the other copy is in sync again, and was not lost", (int)info->rank);
    s->in_sync = info->code == 0;
  } else {
    return;
  }
  s->changed_ns = mlfab_sim_clock(j->w.sim);
}

static mlfab_env loud = {.size = sizeof loud, .log = print_log, .log_level = MLFAB_LOG_INFO};

static mlfab_config node_config(job *j, uint32_t i) {
  mlfab_config c = world_config(&j->w, i < j->w.workers ? i : j->w.workers);
  uint32_t copy = (i - j->w.workers) / j->w.servers;
  j->tellers[i] = (teller){j, i};
  c.on_event = hear;
  c.user = &j->tellers[i];
  c.replicas = 1;
  snprintf(c.coordinator, sizeof c.coordinator, "sim:%u,sim:%u", host_of_copy(j, 0, 0),
           host_of_copy(j, 0, 1));
  if (getenv("MLFAB_LOUD")) c.env = &loud;
  c.scheduler = MLFAB_SCHEDULER_OWN;
  c.heartbeat_ns = (i == j->odd ? 10u : 1u) * BEAT_MS * WORLD_MS;
  c.div_max = j->div_max;
  if (j->eager) c.eager_bytes = j->eager;
  if (j->bound) c.schedule.delay_bound = j->bound;
  if (i < j->w.workers) return c;
  c.rank = (int32_t)((i - j->w.workers) % j->w.servers);
  c.roles = copy == 0 ? MLFAB_ROLE_SERVER : copy == 1 ? MLFAB_ROLE_REPLICA : MLFAB_ROLE_SCHEDULER;
  if (i == host_of_scheduler(j)) c.rank = 0;
  return c;
}

static void open_node(job *j, uint32_t i) {
  mlfab_config c = node_config(j, i);
  sim_open(j->w.sim, i, &c, &j->w.node[i]);
}

/* --- one worker --- */

static void step_of(void *user);

static void compute(worker *me) {
  uint64_t ns = 1000000u * (1 + below(me->job, 40));
  me->phase = COMPUTES;
  me->asked_ns = mlfab_sim_clock(me->job->w.sim);
  assert_int_equal(mlfab_sim_at(me->job->w.sim, me->asked_ns + ns, step_of, me), 0);
}

/* How many updates of each worker are in each slice of a pulled model. */
static void count(const job *j, const float *w, uint64_t got[CALLERS][SERVERS * CUTS]) {
  const uint32_t slices = j->w.servers * CUTS, workers = j->w.workers;
  for (uint32_t s = 0, i = 0; s < slices; s++) {
    for (uint32_t k = 0; k < workers; k++) got[(i + k) % workers][s] = (uint64_t)w[i + k];
    for (uint32_t o = i % workers; i < COUNT / slices * (s + 1); i++) {
      uint64_t n = (uint64_t)w[i];
      if (n != got[o][s])
        wrong("element %u of slice %u has %llu updates of worker %u, others %llu", i, s,
              (unsigned long long)n, o, (unsigned long long)got[o][s]);
      if (n > j->of[o].step - j->of[o].dropped)
        wrong("element %u has %llu updates of %llu, of which %llu were dropped", i,
              (unsigned long long)n, (unsigned long long)j->of[o].step,
              (unsigned long long)j->of[o].dropped);
      if (++o == workers) o = 0;
    }
  }
}

static void judge(worker *me) {
  job *j = me->job;
  uint64_t got[CALLERS][SERVERS * CUTS] = {{0}};
  count(j, me->w, got);
  for (uint32_t o = 0; o < j->w.workers; o++) {
    for (uint32_t s = 0; s < j->w.servers * CUTS; s++) {
      if (got[o][s] < me->then[o] && j->sync.kind == MLFAB_SYNC_ASYNC)
        wrong("slice %u has %llu updates of worker %u, %llu were durable", s,
              (unsigned long long)got[o][s], o, (unsigned long long)me->then[o]);
    }
  }
}

static void step_of(void *user) {
  worker *me = user;
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_buf update = {0, 0, me->u, COUNT}, image = {0, 0, me->w, COUNT};
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  mlfab_result result;
  uint64_t now = mlfab_sim_clock(j->w.sim);
  int done = 0;
  if (!node) return;
  if ((me->phase == PUSHES || me->phase == PULLS) && now - me->asked_ns > 20000000000u) {
    mlfab_error error;
    int phase = me->phase;
    me->phase = AWAY;
    mlfab_cancel(node, me->request);
    mlfab_wait(node, me->request, 0, &result);
    mlfab_last_error(node, &error);
    wrong("worker %u waits for more than 20 s in step %llu, %s: %s", me->rank,
          (unsigned long long)me->step, phase == PUSHES ? "push" : "pull", error.text);
  }
  if (me->phase == COMPUTES && now > me->asked_ns) {
    for (uint32_t i = me->rank; i < COUNT; i += j->w.workers) me->u[i] = 1.0f;
    me->asks_durable = j->acks == 2 ? (int)below(j, 2) : j->acks;
    options.ack = me->asks_durable ? MLFAB_ACK_DURABLE : MLFAB_ACK_APPLIED;
    OK(node, mlfab_push_start(node, &update, 1, &options, &me->request));
    me->step++;
    me->phase = PUSHES;
    me->asked_ns = now;
  } else if (me->phase == PUSHES || me->phase == PULLS) {
    OK(node, mlfab_test(node, me->request, &done, &result));
    if (!done) return;
    j->last_ns = now;
    int dropped = me->phase == PUSHES && j->bound > 0 && result.status == MLFAB_ERR_DROPPED;
    if (result.status && !dropped) {
      mlfab_error error;
      mlfab_last_error(node, &error);
      wrong("worker %u, step %llu: %s", me->rank, (unsigned long long)me->step, error.text);
    }
    if (me->phase == PUSHES) {
      if (me->asks_durable && !dropped) me->durable++;
      me->dropped += (uint64_t)dropped;
      for (uint32_t o = 0; o < j->w.workers; o++) me->then[o] = j->of[o].durable;
      OK(node, mlfab_pull_start(node, &image, 1, NULL, &me->request));
      me->phase = PULLS;
      me->asked_ns = now;
      return;
    }
    judge(me);
    if (j->goal == 0 && j->faults == 0 && j->back_ns == 0) { /* the same for all */
      j->goal = STEPS;
      for (uint32_t o = 0; o < j->w.workers; o++)
        if (j->of[o].step + 2 > j->goal) j->goal = j->of[o].step + 2;
    }
    if (j->goal > 0 && me->step >= j->goal)
      me->phase = LEAVES;
    else
      compute(me);
  }
}

/* --- the fabric --- */

static void open_all(job *j, uint64_t seed, uint32_t workers, uint32_t servers) {
  world_init(&j->w, workers, servers, 1);
  j->w.nodes = workers + 2 * servers + 1;
  assert_true(j->w.nodes + j->spare <= WORLD_NODES);
  j->w.nodes += j->spare;
  world_network(&j->w, seed);
  j->w.nodes -= j->spare;
  for (uint32_t i = 0; i < j->w.nodes; i++) open_node(j, i);
}

/* Opens all nodes, and waits until the fabric stands. */
static void join_all(job *j, uint64_t seed, uint32_t workers, uint32_t servers) {
  open_all(j, seed, workers, servers);
  for (uint32_t i = 0; i < j->w.nodes; i++) world_await(&j->w, i);
  for (uint32_t k = 0; k < workers; k++) {
    worker *me = &j->of[k];
    me->job = j;
    me->phase = LEAVES;
    me->rank = k;
    OK(j->w.node[k], mlfab_tensor_add(j->w.node[k], 0, MLFAB_F32, COUNT));
  }
}

static void start_model(job *j, uint32_t k) {
  mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
  mlfab_buf image = {0, 0, j->of[k].w, COUNT};
  options.slices = CUTS * j->w.servers;
  options.consistency = j->sync;
  options.tags = j->tags;
  options.optimizer = j->optimizer;
  memset(j->of[k].w, 0, sizeof j->of[k].w);
  OK(j->w.node[k], mlfab_model_start(j->w.node[k], &options, &image, 1));
}

static void start_models(job *j) {
  for (uint32_t k = 0; k < j->w.workers; k++) start_model(j, k);
  for (uint32_t k = 0; k < j->w.workers; k++)
    assert_int_equal(mlfab_sim_watch(j->w.sim, k, step_of, &j->of[k]), 0);
}

static void begin(job *j, uint64_t seed, uint32_t workers, uint32_t servers) {
  join_all(j, seed, workers, servers);
  start_models(j);
}

/* All workers have done their steps. */
static void run(job *j) {
  for (uint32_t k = 0; k < j->w.workers;)
    if (j->of[k].phase == LEAVES)
      k++;
    else
      sim_step(j->w.sim);
  for (uint32_t k = 0; k < j->w.workers; k++) mlfab_sim_watch(j->w.sim, k, NULL, NULL);
}

/* In the end: what is missing of a worker is what it says is lost, and no more than div_max for each takeover. A process
 * that has crashed says nothing more: of what it was told is lost, and of its open pushes, nobody knows. Returns what
 * is missing. */
static uint64_t finish(job *j) {
  uint64_t all[CALLERS][SERVERS * CUTS] = {{0}}, lost[CALLERS] = {0}, sum = 0;
  mlfab_buf image = {0, 0, j->of[0].w, COUNT};
  OK(j->w.node[0], mlfab_pull(j->w.node[0], &image, 1, NULL, NULL));
  count(j, j->of[0].w, all);
  for (uint32_t s = 0; s < j->w.servers; s++) {
    double norm = 0.0, bound = j->div_max * (double)j->shards[s].takeovers;
    for (uint32_t o = 0; o < j->w.workers; o++) {
      const worker *of = &j->of[o];
      uint64_t got = all[o][CUTS * s], missing = of->step - of->dropped - got;
      for (uint32_t k = CUTS * s; k < CUTS * (s + 1); k++) assert_int_equal(all[o][k], got);
      if (got < of->durable)
        wrong("in the end shard %u has %llu updates of worker %u, %llu were durable", s,
              (unsigned long long)got, o, (unsigned long long)of->durable);
      lost[o] += missing;
      missing -= missing < of->open ? missing : of->open;
      norm += (double)missing * sqrt((double)(COUNT / j->w.servers / j->w.workers));
    }
    if (norm > 0.0 && norm > bound * 1.000001)
      wrong("shard %u has lost %g, div_max is %g, in %u takeovers", s, norm, j->div_max,
            j->shards[s].takeovers);
  }
  for (uint32_t k = 0; k < j->w.workers; k++) {
    mlfab_stats stats;
    OK(j->w.node[k], mlfab_get_stats(j->w.node[k], &stats, sizeof stats));
    if (j->of[k].crashes ? lost[k] < stats.updates_lost : lost[k] != stats.updates_lost)
      wrong(
          "%llu parts of updates of worker %u are missing, %llu were reported, it crashed %llu "
          "times",
          (unsigned long long)lost[k], k, (unsigned long long)stats.updates_lost,
          (unsigned long long)j->of[k].crashes);
    sum += lost[k];
  }
  return sum;
}

static void init(job *j, uint64_t seed) {
  memset(j, 0, sizeof *j);
  j->seed = j->random = seed;
  j->more = mix(seed);
  j->odd = NOBODY;
}

/* A second passes. Then the copies of server 0 are in sync. */
static void rest_in_sync(job *j) {
  mlfab_sim_run(j->w.sim, WORLD_S);
  assert_true(j->shards[0].in_sync);
}

static void begin_in_sync(job *j, uint64_t seed, uint32_t workers, uint32_t servers) {
  begin(j, seed, workers, servers);
  rest_in_sync(j);
}

static void end(job *j) {
  run(j);
  finish(j);
  world_close(&j->w);
}

/* A server is killed in the middle: its replica goes on. */
static void kill_one(uint32_t k, uint32_t eager) {
  static job j;
  init(&j, 1 + k);
  static const uint32_t kinds[] = {MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP};
  j.sync = (mlfab_sync){.size = sizeof j.sync, .kind = kinds[k % 3], .staleness = 1};
  j.acks = k < 3 ? 1 : 0;
  j.div_max = k < 3 ? 0.0 : 100.0;
  j.eager = eager;
  begin_in_sync(&j, 1, 2, 1);
  for (uint32_t i = 0; i < 2; i++) compute(&j.of[i]);
  mlfab_sim_run(j.w.sim, 100 * WORLD_MS);
  /* Or its device is lost, if it has one: it ends by itself, and its program somewhat later. */
  int lost = k % 2 && on_device_lose(host_of_copy(&j, 0, 0));
  if (!lost) mlfab_sim_crash(j.w.sim, host_of_copy(&j, 0, 0));
  if (k < 3) { /* nothing is durable before there are two copies again */
    mlfab_sim_run(j.w.sim, WORLD_S);
    if (lost) mlfab_sim_crash(j.w.sim, host_of_copy(&j, 0, 0));
    open_node(&j, host_of_copy(&j, 0, 0));
  }
  end(&j);
}

TEST(test_kill) {
  for (uint32_t k = 0; k < 6; k++) kill_one(k, 0);
}

/* Its transfers wait for plans: the scheduler plans for the replica with what it knows of the workers' links. */
TEST(test_kill_planned) {
  for (uint32_t k = 0; k < 6; k++) kill_one(k, EAGER_LEAST);
}

/* A copy or a scheduler that is new has not heard that a link is cut; the worker says it again. */
TEST(test_link_is_cut) {
  static job j;
  init(&j, 60);
  j.eager = EAGER_LEAST;
  j.div_max = HUGE_VAL;
  j.goal = MLFAB_UNBOUNDED;
  begin_in_sync(&j, 1, 2, 1);
  OK(j.w.node[1], mlfab_set_link(j.w.node[1], 0.0, 0.0));
  for (uint32_t i = 0; i < 2; i++) compute(&j.of[i]);
  const uint32_t lost[] = {host_of_copy(&j, 0, 0), host_of_scheduler(&j)};
  for (uint32_t i = 0; i < 2; i++) {
    rest_in_sync(&j);
    mlfab_sim_crash(j.w.sim, lost[i]);
    mlfab_sim_run(j.w.sim, WORLD_S);
    open_node(&j, lost[i]);
    mlfab_sim_run(j.w.sim, 2 * WORLD_S);
  }
  assert_true(j.shards[0].serves == 1);
  const uint64_t then[] = {j.of[0].step,
                           j.of[1].step}; /* it went on while there was no scheduler */
  mlfab_sim_run(j.w.sim, WORLD_S);
  assert_true(j.of[0].step > then[0]);
  assert_int_equal(j.of[1].step, then[1]);
  OK(j.w.node[1], mlfab_set_link(j.w.node[1], -1.0, -1.0));
  j.goal = j.of[0].step + 2;
  end(&j);
}

/* Pushes an update that was computed from the first version. */
static int push_late(job *j) {
  mlfab_buf update = {0, 0, j->of[0].u, COUNT};
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  options.version = 1;
  return mlfab_push(j->w.node[0], &update, 1, &options, NULL);
}

static void set_bound(job *j, uint64_t bound) {
  mlfab_schedule schedule;
  mlfab_schedule_init(&schedule);
  schedule.delay_bound = bound;
  OK(j->w.node[1], mlfab_set_schedule(j->w.node[1], &schedule));
  mlfab_sim_run(j->w.sim, WORLD_S);
}

/* A delay bound that was set while the fabric runs holds at every copy that takes over, of any server. */
TEST(test_bound_is_set) {
  static job j;
  init(&j, 70);
  j.div_max = HUGE_VAL;
  begin_in_sync(&j, 1, 2, 2);
  OK(j.w.node[0], push_late(&j));
  OK(j.w.node[0], push_late(&j));
  set_bound(&j, 1);
  assert_int_equal(push_late(&j), MLFAB_ERR_DROPPED);
  const uint32_t lost[] = {host_of_copy(&j, 0, 0), host_of_copy(&j, 1, 0), host_of_copy(&j, 0, 1)};
  for (uint32_t i = 0; i < 3; i++) {
    assert_true(j.shards[0].in_sync && j.shards[1].in_sync);
    mlfab_sim_crash(j.w.sim, lost[i]);
    mlfab_sim_run(j.w.sim, WORLD_S);
    assert_int_equal(push_late(&j), MLFAB_ERR_DROPPED);
    open_node(&j, lost[i]);
    mlfab_sim_run(j.w.sim, 3 * WORLD_S);
    assert_int_equal(push_late(&j), MLFAB_ERR_DROPPED);
  }
  set_bound(&j, MLFAB_UNBOUNDED);
  OK(j.w.node[0], push_late(&j));
  world_close(&j.w);
}

/* While no replica is in sync a DURABLE push ends at its deadline, and is not in the way of those that ask for less. */
TEST(test_durable_expires) {
  static job j;
  for (uint32_t k = 0; k < 2; k++) {
    int status = 1;
    mlfab_result result;
    mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
    mlfab_buf update = {0, 0, j.of[0].u, COUNT};
    init(&j, 80 + k);
    j.div_max = k ? HUGE_VAL : 0.0;
    begin_in_sync(&j, 1, 2, 1);
    mlfab_sim_crash(j.w.sim, host_of_copy(&j, 0, 1));
    mlfab_sim_run(j.w.sim, WORLD_S);
    options.ack = MLFAB_ACK_DURABLE;
    options.timeout_ns = WORLD_S;
    uint64_t began = mlfab_sim_clock(j.w.sim);
    EXPECT(j.w.node[0], mlfab_push(j.w.node[0], &update, 1, &options, &result), MLFAB_ERR_IN_DOUBT);
    assert_true(mlfab_sim_clock(j.w.sim) - began < 1100 * WORLD_MS);
    mlfab_sim_run(j.w.sim, 10 * WORLD_MS);
    OK(j.w.node[0], mlfab_push_status(j.w.node[0], result.seq, &status));
    assert_int_equal(status, 0);
    options.ack = MLFAB_ACK_APPLIED;
    for (uint32_t i = 0; i < 300; i++)
      OK(j.w.node[0], mlfab_push(j.w.node[0], &update, 1, &options, &result));
    world_close(&j.w);
  }
}

/* Copies without a model are in sync, and when there is one they are not, until the other copy has it: the events say so
 * (hear). */
TEST(test_in_sync_again) {
  static job j;
  init(&j, 50);
  join_all(&j, 1, 2, 1);
  rest_in_sync(&j);
  start_models(&j);
  rest_in_sync(&j);
  uint64_t since = j.shards[0].changed_ns;
  mlfab_sim_run(j.w.sim, 40ull * WORLD_S); /* longer than a copy may be behind */
  assert_true(j.shards[0].in_sync && j.shards[0].changed_ns == since);
  world_close(&j.w);
}

/* Server 0 is replaced at once: DURABLE updates do not wait much longer for the next copy than the others for the one
 * that takes over. */
TEST(test_replaced_at_once) {
  static job j;
  for (uint32_t k = 0; k < 4; k++) {
    init(&j, 40 + k);
    j.acks = 1;
    begin_in_sync(&j, 1 + k, 2, 1);
    for (uint32_t i = 0; i < 2; i++) compute(&j.of[i]);
    mlfab_sim_run(j.w.sim, 50 * WORLD_MS);
    mlfab_sim_crash(j.w.sim, host_of_copy(&j, 0, 0));
    open_node(&j, host_of_copy(&j, 0, 0));
    mlfab_sim_run(j.w.sim, 10 * BEAT_MS * WORLD_MS);
    assert_true(j.shards[0].serves == 1 && j.shards[0].in_sync);
    end(&j);
  }
}

/* A server dies before there is a model: its replica, which has none either, takes the definition. */
TEST(test_before_the_model) {
  static job j;
  init(&j, 1);
  j.sync = (mlfab_sync){.size = sizeof j.sync, .kind = MLFAB_SYNC_BSP};
  j.acks = 1;
  join_all(&j, 1, 2, 1);
  rest_in_sync(&j);
  mlfab_sim_crash(j.w.sim, host_of_copy(&j, 0, 0));
  mlfab_sim_run(j.w.sim, WORLD_S);
  open_node(&j, host_of_copy(&j, 0, 0));
  start_models(&j);
  for (uint32_t i = 0; i < 2; i++) compute(&j.of[i]);
  run(&j);
  assert_int_equal(finish(&j), 0);
  world_close(&j.w);
}

/* A worker is lost with the server: the replica waits for it for a while, and the rounds go on without it. */
static void worker_lost(uint64_t seed) {
  static job j;
  init(&j, seed);
  j.sync = (mlfab_sync){.size = sizeof j.sync, .kind = MLFAB_SYNC_BSP};
  j.div_max = 1000.0;
  begin_in_sync(&j, seed, 3, 1);
  for (uint32_t i = 0; i < 3; i++) compute(&j.of[i]);
  mlfab_sim_run(j.w.sim, 50 * WORLD_MS + below(&j, 100 * WORLD_MS));
  mlfab_sim_crash(j.w.sim, host_of_copy(&j, 0, 0));
  mlfab_sim_crash(j.w.sim, 2);
  j.of[2].phase = LEAVES;
  j.goal = STEPS + j.of[0].step;
  run(&j);
  world_close(&j.w);
}

TEST(test_worker_lost) { seeds_run("lost", test_cases_from(4, 4), worker_lost); }

/* A copy of server 0 is replaced by a process on another host, then the other copy, too: each is found where it is. */
TEST(test_other_hosts) {
  static job j;
  init(&j, 1);
  j.acks = 1;
  j.spare = 2;
  begin_in_sync(&j, 1, 2, 1);
  for (uint32_t i = 0; i < 2; i++) compute(&j.of[i]);
  for (uint32_t copy = 0; copy < 2; copy++) {
    uint32_t former = host_of_copy(&j, 0, copy), host = j.w.nodes + copy;
    mlfab_sim_run(j.w.sim, 100 * WORLD_MS);
    assert_true(j.shards[0].in_sync);
    mlfab_sim_crash(j.w.sim, former);
    mlfab_sim_run(j.w.sim, WORLD_S);
    assert_true(j.shards[0].serves != copy);
    mlfab_config c = node_config(&j, former);
    snprintf(c.coordinator, sizeof c.coordinator, "sim:%u,sim:%u", j.w.nodes,
             copy ? host : host_of_copy(&j, 0, 1));
    sim_open(j.w.sim, host, &c, &j.w.node[host]);
    mlfab_sim_run(j.w.sim, 2 * WORLD_S);
  }
  assert_true(j.shards[0].in_sync);
  run(&j);
  finish(&j);
  j.w.nodes += j.spare;
  world_close(&j.w);
}

/* --- pauses --- */

/* All processes stop, together or some of them earlier, and go on in any order. Nobody dies, a copy that went on late is
 * replaced, and no update that was DURABLE is lost. */
static void all_pause(uint64_t seed) {
  static job j;
  init(&j, seed);
  j.acks = (int)below(&j, 3);
  begin_in_sync(&j, seed, 1 + (uint32_t)below(&j, WORKERS), 1);
  for (uint32_t k = 0; k < j.w.workers; k++) compute(&j.of[k]);
  for (uint32_t i = 0; i < 3; i++) {
    uint64_t beat = BEAT_MS * WORLD_MS, skew = below(&j, 3) == 0 ? 12 * beat : beat;
    mlfab_sim_run(j.w.sim, WORLD_MS * below(&j, 30));
    uint64_t end = mlfab_sim_clock(j.w.sim) + 30 * beat + below(&j, 10 * (uint64_t)WORLD_S);
    uint32_t takeovers = j.shards[0].takeovers;
    for (uint32_t host = 0; host < j.w.nodes; host++)
      mlfab_sim_pause(j.w.sim, host, end - mlfab_sim_clock(j.w.sim) + below(&j, skew));
    mlfab_sim_run(j.w.sim, end - mlfab_sim_clock(j.w.sim) + 40 * beat);
    if (skew == beat && j.shards[0].takeovers != takeovers) wrong("a pause of all moves a shard");
  }
  end(&j);
}

TEST(test_all_pause) { seeds_run("pause", test_cases_from(4, 24), all_pause); }

/* --- faults at random --- */

static int calm(const job *j) {
  uint64_t now = mlfab_sim_clock(j->w.sim);
  for (uint32_t s = 0; s < j->w.servers; s++)
    if (!j->shards[s].in_sync || now - j->shards[s].changed_ns < 10 * BEAT_MS * WORLD_MS) return 0;
  return j->back_ns == 0;
}

static void crash(job *j, uint32_t host) {
  assert_int_equal(mlfab_sim_crash(j->w.sim, host), 0);
  j->away = host;
  j->back_ns = mlfab_sim_clock(j->w.sim) + WORLD_MS * (50 + below(j, 700));
  for (uint32_t s = 0; s < j->w.servers; s++) {
    if (host == host_of_scheduler(j) || host % j->w.servers == host_of_copy(j, s, 0) % j->w.servers)
      j->shards[s].in_sync &= host == host_of_scheduler(j);
    j->shards[s].changed_ns = mlfab_sim_clock(j->w.sim);
  }
  j->crashes++;
}

static void fault(job *j) {
  uint64_t now = mlfab_sim_clock(j->w.sim);
  uint32_t voters = 2 * j->w.servers + 1, host = j->w.workers + (uint32_t)below(j, voters);
  if (j->back_ns && now >= j->back_ns) {
    open_node(j, j->away);
    /* It has forgotten its votes, and has to hear both others first. */
    for (uint32_t s = 0; s < j->w.servers; s++) j->shards[s].changed_ns = now;
    j->back_ns = 0;
  }
  if (j->faults > 0 && now > j->next_ns + 60 * (uint64_t)WORLD_S)
    wrong("the copies are not all in sync after 60 s");
  if (j->faults == 0 || now < j->next_ns || !calm(j)) return;
  j->faults--;
  j->next_ns = now + WORLD_MS * (100 + below(j, 500));
  uint64_t what = below(j, 4);
  switch (what) {
    case 0:
      mlfab_sim_pause(j->w.sim, host, WORLD_MS * (20 + below(j, 380)));
      break;
    case 1:
      mlfab_sim_partition(j->w.sim, j->w.workers + (uint32_t)below(j, voters), host, 1);
      mlfab_sim_run(j->w.sim, WORLD_MS * (20 + below(j, 380)));
      for (uint32_t a = 0; a < j->w.nodes; a++)
        for (uint32_t b = 0; b < a; b++) mlfab_sim_partition(j->w.sim, a, b, 0);
      break;
    default:
      crash(j, host);
  }
}

static void worker_back(worker *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  uint64_t now = mlfab_sim_clock(j->w.sim);
  if (me->phase == GONE && now >= me->back_ns) {
    open_node(j, me->rank);
    me->phase = OPENS;
  } else if (me->phase == OPENS) {
    int ready = sim_ready(node);
    if (now - me->back_ns > 20 * (uint64_t)WORLD_S)
      wrong("worker %u is not back after 20 s", me->rank);
    if (ready == 0) return;
    OK(node, mlfab_tensor_add(node, 0, MLFAB_F32, COUNT));
    start_model(j, me->rank);
    assert_int_equal(mlfab_sim_watch(j->w.sim, me->rank, step_of, me), 0);
    compute(me);
  }
}

/* A worker crashes, whatever happens to servers: in a step, with a push or a pull that is open. */
static void worker_fault(job *j) {
  uint64_t now = mlfab_sim_clock(j->w.sim);
  for (uint32_t k = 0; k < j->w.workers; k++)
    if (j->of[k].phase >= GONE) worker_back(&j->of[k]);
  if (j->worker_faults == 0 || j->goal > 0 || now < j->worker_next_ns) return;
  worker *me = &j->of[below_more(j, j->w.workers)];
  if (me->phase > PULLS) return;
  j->worker_faults--;
  j->worker_next_ns = now + WORLD_MS * below_more(j, 800);
  assert_int_equal(mlfab_sim_crash(j->w.sim, me->rank), 0);
  me->crashes++;
  me->open += me->phase == PUSHES;
  me->phase = GONE;
  me->back_ns = now + WORLD_MS * below_more(j, 500);
}

/* What is drawn from the second sequence: what seeds draw from the first one stays. */
static void draw_more(job *j) {
  j->eager = below_more(j, 2) ? EAGER_LEAST : 0;
  uint32_t tags = (uint32_t)below_more(j, 14);
  const char *played_too = getenv("MLFAB_PLAYED");
  if (tags < 7 && !(played_too && played_too[0] == '1')) j->tags = 1u << tags;
  uint64_t bound = below_more(j, 10);
  if (bound < 5 && j->w.servers == 1 && j->sync.kind != MLFAB_SYNC_BSP) j->bound = 1 + bound;
  j->worker_faults = below_more(j, 2) ? (uint32_t)below_more(j, 4) : 0;
  j->worker_next_ns = WORLD_S / 2 + WORLD_MS * below_more(j, 500);
}

static void play(uint64_t seed) {
  static job j;
  init(&j, seed);
  static const uint32_t kinds[] = {MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP};
  uint32_t workers = 1 + (uint32_t)below(&j, WORKERS), servers = 1 + (uint32_t)below(&j, SERVERS);
  while (workers + 2 * servers + 1 > WORLD_NODES) workers--;
  j.sync = (mlfab_sync){.size = sizeof j.sync, .kind = kinds[below(&j, 3)], .staleness = 1};
  j.acks = (int)below(&j, 3);
  double norm = sqrt(COUNT / servers / workers);
  uint64_t bound = below(&j, 3);
  j.div_max = bound == 0 ? 0.0 : bound == 1 ? norm * (double)(1 + below(&j, 8)) : HUGE_VAL;
  j.w.servers = servers;
  seeds_about(", kind %u", j.sync.kind);
  draw_more(&j);
  begin(&j, seed, workers, servers);
  mlfab_sim_run(j.w.sim, WORLD_S / 2);
  j.faults = 1 + (uint32_t)below(&j, 5);
  j.next_ns = mlfab_sim_clock(j.w.sim) + 10000000 * below(&j, 30);
  mlfab_sim_options lossy = {.size = sizeof lossy, .loss = 0.002, .reorder = 0.05};
  if (below(&j, 3) == 0) mlfab_sim_set_faults(j.w.sim, &lossy);
  for (uint32_t k = 0; k < workers; k++) compute(&j.of[k]);
  for (uint32_t away = 0; away < workers;) {
    fault(&j);
    worker_fault(&j);
    sim_step(j.w.sim);
    for (uint32_t k = 0; k < workers; k++) {
      if (j.of[k].phase != LEAVES) continue;
      j.of[k].phase =
          AWAY; /* a worker that was taken for dead may have more steps to do than the others */
      OK(j.w.node[k], mlfab_finish(j.w.node[k], 0));
      away++;
    }
  }
  mlfab_sim_set_faults(j.w.sim, NULL);
  for (uint32_t k = 0; k < workers; k++) mlfab_sim_watch(j.w.sim, k, NULL, NULL);
  finish(&j);
  world_close(&j.w);
}

TEST(test_faults) { seeds_run("failover", test_cases(120), play); }

/* --- succession --- */

static void look_at_call(void *user);

static uint64_t kind_of(const job *j, uint64_t call) {
  return j->barriers ? 0 : mix(j->seed ^ call << 8) % 4;
}

static void begin_call(caller *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_collective how = {.size = sizeof how, .timeout_ns = 20 * (uint64_t)WORLD_S};
  uint64_t kind = kind_of(j, me->calls);
  mlfab_vec vec = {me->data, SUMMED};
  for (uint32_t i = 0; i < SUMMED; i++) me->data[i] = (int64_t)(me->calls * 10 + me->rank + i);
  if (kind == 0) {
    OK(node, mlfab_barrier_start(node, &how, &me->request));
  } else {
    if (kind == 1) how.algorithm = MLFAB_ALGORITHM_PLANNED;
    OK(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_I64, &how, &me->request));
  }
  me->busy = 1;
}

static void end_call(caller *me, const mlfab_result *result) {
  job *j = me->job;
  mlfab_error error;
  uint64_t kind = kind_of(j, me->calls);
  if (result->status) {
    mlfab_last_error(j->w.node[me->rank], &error);
    wrong("call %llu of worker %u: %s", (unsigned long long)me->calls, me->rank, error.text);
  }
  for (uint32_t i = 0; i < SUMMED && kind > 0; i++) {
    int64_t sum = CALLERS * (int64_t)(me->calls * 10 + i) + CALLERS * (CALLERS - 1) / 2;
    if (me->data[i] != sum)
      wrong("call %llu of worker %u: %lld instead of %lld", (unsigned long long)me->calls, me->rank,
            (long long)me->data[i], (long long)sum);
  }
  me->busy = 0;
  me->calls++;
  me->next_ns = mlfab_sim_clock(j->w.sim) + 1 + below(j, 30 * WORLD_MS);
  assert_int_equal(mlfab_sim_at(j->w.sim, me->next_ns, look_at_call, me), 0);
}

static void look_at_call(void *user) {
  caller *me = (caller *)user;
  job *j = me->job;
  mlfab_result result;
  int done = 0;
  uint64_t least = UINT64_MAX;
  if (!j->w.node[me->rank] || mlfab_is_ready(j->w.node[me->rank], NULL) != 1) return;
  if (me->busy) {
    OK(j->w.node[me->rank], mlfab_test(j->w.node[me->rank], me->request, &done, &result));
    if (done) end_call(me, &result);
    return;
  }
  for (uint32_t k = 0; k < CALLERS; k++)
    if (j->callers[k].calls < least) least = j->callers[k].calls;
  if (mlfab_sim_clock(j->w.sim) < me->next_ns || (j->ends && me->calls > least)) return;
  if (j->ends && me->calls == least) {
    /* All end with the same number of calls. */
    uint64_t most = 0;
    for (uint32_t k = 0; k < CALLERS; k++)
      if (j->callers[k].calls + (uint64_t)j->callers[k].busy > most)
        most = j->callers[k].calls + (uint64_t)j->callers[k].busy;
    if (me->calls >= most) return;
  }
  begin_call(me);
}

static void watch_calls(caller *me) {
  job *j = me->job;
  assert_int_equal(mlfab_sim_watch(j->w.sim, me->rank, look_at_call, me), 0);
  assert_int_equal(mlfab_sim_at(j->w.sim, mlfab_sim_clock(j->w.sim) + 1, look_at_call, me), 0);
}

static void begin_calls(job *j, uint64_t seed, int barriers) {
  init(j, seed);
  j->barriers = barriers;
  j->optimizer = seed % 2 ? MLFAB_OPTIMIZER_ADAM : MLFAB_OPTIMIZER_SGD; /* state is copied, too */
  join_all(j, seed, CALLERS, 1);
  for (uint32_t k = 0; k < CALLERS; k++) start_model(j, k);
  for (uint32_t k = 0; k < CALLERS; k++) {
    j->callers[k].job = j;
    j->callers[k].rank = k;
    watch_calls(&j->callers[k]);
  }
}

static void end_calls(job *j) {
  for (uint32_t i = 0; i < CALLERS; i++) mlfab_sim_watch(j->w.sim, i, NULL, NULL);
  world_close(&j->w);
}

static uint64_t calls_of(const job *j) {
  uint64_t n = 0;
  for (uint32_t k = 0; k < CALLERS; k++) n += j->callers[k].calls;
  return n;
}

static void run_until_in_sync(job *j) {
  for (int k = 0; !j->shards[0].in_sync; k++) {
    if (k > 400) wrong("the other copy is not in sync after 20 s");
    mlfab_sim_run(j->w.sim, BEAT_MS * WORLD_MS);
  }
}

/* Short faults, of which nobody dies. */
static void trouble(job *j) {
  uint32_t a = (uint32_t)below(j, CALLERS + 2), b = (uint32_t)below(j, CALLERS + 2);
  if (below(j, 2)) {
    mlfab_sim_pause(j->w.sim, a, 1 + below(j, BEAT_MS * WORLD_MS));
  } else if (a != b) {
    mlfab_sim_partition(j->w.sim, a, b, 1);
    mlfab_sim_run(j->w.sim, 1 + below(j, BEAT_MS * WORLD_MS));
    mlfab_sim_partition(j->w.sim, a, b, 0);
  }
}

static void succession(uint64_t seed) {
  static job j;
  begin_calls(&j, seed, 0);
  for (int k = 0; k < 3; k++) {
    run_until_in_sync(&j);
    if (seed % 2) trouble(&j);
    run_until_in_sync(&j);
    mlfab_sim_run(j.w.sim, below(&j, 200 * WORLD_MS));
    if (!j.shards[0].in_sync) run_until_in_sync(&j);
    uint64_t before = calls_of(&j);
    uint32_t host = host_of_copy(&j, 0, j.shards[0].serves);
    mlfab_sim_crash(j.w.sim, host);
    j.shards[0].in_sync = 0;
    mlfab_sim_run(j.w.sim, (2 + below(&j, 2)) * WORLD_S);
    if (calls_of(&j) < before + 4 * CALLERS)
      wrong("only %llu calls ended after kill %d", (unsigned long long)(calls_of(&j) - before), k);
    open_node(&j, host);
  }
  j.ends = 1;
  for (int k = 0, busy = 1; busy; k++) {
    if (k > 400) wrong("a call has not ended");
    mlfab_sim_run(j.w.sim, BEAT_MS * WORLD_MS);
    busy = 0;
    for (uint32_t i = 0; i < CALLERS; i++) busy |= j.callers[i].busy;
  }
  end_calls(&j);
}

/* A worker's process is replaced while server 0 is: both copies know which processes there are. Barriers go on without
 * the worker, and with it as soon as it is back. */
static void replacement(uint64_t seed) {
  static job j;
  const uint32_t one = CALLERS - 1;
  begin_calls(&j, seed, 1);
  run_until_in_sync(&j);
  mlfab_sim_run(j.w.sim, below(&j, 200 * WORLD_MS));
  const uint32_t server = host_of_copy(&j, 0, j.shards[0].serves);
  for (int k = 0; k < 3; k++) { /* in any order, at about the same time */
    if (k == (int)(seed % 3)) {
      mlfab_sim_crash(j.w.sim, server);
      /* Workers, too, may come to the next process before it knows that the fabric runs. */
      if (seed % 2) open_node(&j, server);
    } else if (!j.w.node[one] && !j.callers[one].late) {
      mlfab_sim_run(j.w.sim, below(&j, 60 * WORLD_MS));
      j.callers[one].late = 1;
      open_node(&j, one);
    } else if (j.w.node[one]) {
      mlfab_sim_watch(j.w.sim, one, NULL, NULL);
      mlfab_sim_crash(j.w.sim, one);
    }
    mlfab_sim_run(j.w.sim, below(&j, 20 * WORLD_MS));
  }
  for (int k = 0, ready = 0; !ready; k++) {
    if (k > 15) wrong("the new process of worker %u is not there after 15 heartbeats", one);
    mlfab_sim_run(j.w.sim, BEAT_MS * WORLD_MS);
    ready = sim_ready(j.w.node[one]);
  }
  for (uint32_t k = 0; k < CALLERS; k++) j.callers[k].calls = 0;
  j.callers[one].busy = 0;
  j.callers[one].next_ns = 0;
  watch_calls(&j.callers[one]);
  mlfab_sim_run(j.w.sim, 2 * (uint64_t)WORLD_S);
  for (uint32_t k = 0; k < CALLERS; k++)
    if (j.callers[k].calls < 10)
      wrong("worker %u has ended %llu barriers", k, (unsigned long long)j.callers[k].calls);
  end_calls(&j);
}

TEST(test_replacement) { seeds_run("replacement", test_cases_from(12, 100), replacement); }

TEST(test_succession) { seeds_run("succession", test_cases_from(5, 60), succession); }

/* A copy with another heartbeat would stop answering too late, or begin too early. */
TEST(test_other_heartbeat) {
  static const char *const names[] = {
      [0] = "worker 0", [CALLERS + 1] = "the replica of server 0", [CALLERS + 2] = "scheduler 0"};
  static job j;
  for (uint32_t odd = 0; odd < sizeof names / sizeof *names; odd++) {
    mlfab_error error;
    char text[160];
    int ready = 0;
    if (!names[odd]) continue;
    init(&j, 1);
    j.odd = odd;
    open_all(&j, 1, CALLERS, 1);
    while (!(ready = mlfab_is_ready(j.w.node[odd], &error))) assert_true(mlfab_sim_step(j.w.sim));
    snprintf(text, sizeof text,
             "heartbeat_ns (MLFAB_HEARTBEAT_MS) is 500 ms at %s, 50 ms at server 0", names[odd]);
    if (ready != MLFAB_ERR_WORLD || !strstr(error.text, text))
      fail_msg("%s \"%s\" instead of \"%s\"", mlfab_error_name(ready), error.text, text);
    world_close(&j.w);
  }
}

TESTS(NULL, NULL)
