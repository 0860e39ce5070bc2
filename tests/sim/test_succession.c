/* test_succession.c - server 0 with a replica is killed again and again while workers make collectives and barriers: no
 * call fails, none hangs, and every sum is right.
 *
 * Every worker makes the same calls, the n-th a function of the seed and n. The copy that serves is killed a random time
 * after the other one is in sync, and replaced; links between hosts are cut and hosts pause for less than a death takes.
 */
#include "../unit/on_device.h"
#include "job.h"

enum { WORKERS = 4, COUNT = 200, BEAT_MS = 50, PATIENCE_S = 20, KILLS = 3 };

typedef struct worker {
  struct job *job;
  uint32_t rank;
  int busy, late; /* late: another process has its number */
  uint64_t calls, asked_ns, next_ns;
  mlfab_request request;
  int64_t data[COUNT];
} worker;

typedef struct job {
  world w;
  uint64_t random, seed;
  worker of[WORKERS];
  uint32_t serves; /* copy */
  int in_sync, ends;
  int barriers; /* all calls are barriers */
  uint32_t odd; /* this node has another heartbeat; the others come first */
} job;

static const uint32_t NOBODY = UINT32_MAX;

static uint64_t below(job *j, uint64_t n) { return dice_below(&j->random, n); }

/* Hosts: workers, server, replica, scheduler. */
static uint32_t host_of_copy(uint32_t copy) { return WORKERS + copy; }
static uint32_t host_of_scheduler(void) { return WORKERS + 2; }

static void on_event(void *user, const mlfab_event_info *info) {
  job *j = (job *)user;
  if (info->kind == MLFAB_EVENT_IN_SYNC) j->in_sync = info->code == 0;
}

static void print_log(void *user, int level, const char *line) {
  (void)user;
  (void)level;
  fprintf(stderr, "# %s\n", line);
}

static mlfab_env loud = {.size = sizeof loud, .log = print_log, .log_level = MLFAB_LOG_INFO};

static void open_node(job *j, uint32_t i) {
  mlfab_config c = world_config(&j->w, i < WORKERS ? i : WORKERS);
  c.replicas = 1;
  snprintf(c.coordinator, sizeof c.coordinator, "sim:%u,sim:%u", host_of_copy(0), host_of_copy(1));
  c.scheduler = MLFAB_SCHEDULER_OWN;
  c.heartbeat_ns = (i == j->odd ? 10u : 1u) * BEAT_MS * WORLD_MS;
  c.on_event = on_event;
  c.user = j;
  if (getenv("MLFAB_LOUD")) c.env = &loud;
  if (i >= WORKERS) {
    c.rank = 0;
    c.roles = i == host_of_scheduler() ? MLFAB_ROLE_SCHEDULER
              : i == host_of_copy(0)   ? MLFAB_ROLE_SERVER
                                       : MLFAB_ROLE_REPLICA;
  }
  sim_open(j->w.sim, i, &c, &j->w.node[i]);
}

/* --- one worker --- */

static void look(void *user);

static uint64_t kind_of(const job *j, uint64_t call) {
  return j->barriers ? 0 : mix(j->seed ^ call << 8) % 4;
}

static void begin_call(worker *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_collective how = {.size = sizeof how, .timeout_ns = (uint64_t)PATIENCE_S * WORLD_S};
  uint64_t kind = kind_of(j, me->calls);
  mlfab_vec vec = {me->data, COUNT};
  for (uint32_t i = 0; i < COUNT; i++) me->data[i] = (int64_t)(me->calls * 10 + me->rank + i);
  if (kind == 0) {
    OK(node, mlfab_barrier_start(node, &how, &me->request));
  } else {
    if (kind == 1) how.algorithm = MLFAB_ALGORITHM_PLANNED;
    OK(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_I64, &how, &me->request));
  }
  me->busy = 1;
}

static void end_call(worker *me, const mlfab_result *result) {
  job *j = me->job;
  mlfab_error error;
  uint64_t kind = kind_of(j, me->calls);
  if (result->status) {
    mlfab_last_error(j->w.node[me->rank], &error);
    wrong("call %llu of worker %u: %s", (unsigned long long)me->calls, me->rank, error.text);
  }
  for (uint32_t i = 0; i < COUNT && kind > 0; i++) {
    int64_t sum = WORKERS * (int64_t)(me->calls * 10 + i) + WORKERS * (WORKERS - 1) / 2;
    if (me->data[i] != sum)
      wrong("call %llu of worker %u: %lld instead of %lld", (unsigned long long)me->calls, me->rank,
            (long long)me->data[i], (long long)sum);
  }
  me->busy = 0;
  me->calls++;
  me->next_ns = mlfab_sim_clock(j->w.sim) + 1 + below(j, 30 * WORLD_MS);
  assert_int_equal(mlfab_sim_at(j->w.sim, me->next_ns, look, me), 0);
}

static void look(void *user) {
  worker *me = (worker *)user;
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
  for (uint32_t k = 0; k < WORKERS; k++)
    if (j->of[k].calls < least) least = j->of[k].calls;
  if (mlfab_sim_clock(j->w.sim) < me->next_ns || (j->ends && me->calls > least)) return;
  if (j->ends && me->calls == least) {
    /* All end with the same number of calls. */
    uint64_t most = 0;
    for (uint32_t k = 0; k < WORKERS; k++)
      if (j->of[k].calls + (uint64_t)j->of[k].busy > most)
        most = j->of[k].calls + (uint64_t)j->of[k].busy;
    if (me->calls >= most) return;
  }
  begin_call(me);
}

/* --- the fabric --- */

static void begin(job *j, uint64_t seed, int barriers) {
  memset(j, 0, sizeof *j);
  j->barriers = barriers;
  j->seed = j->random = seed;
  j->odd = NOBODY;
  world_init(&j->w, WORKERS, 1, 1);
  j->w.nodes = WORKERS + 3;
  world_network(&j->w, seed);
  for (uint32_t i = 0; i < j->w.nodes; i++) open_node(j, i);
  for (uint32_t i = 0; i < j->w.nodes; i++) world_await(&j->w, i);
  for (uint32_t k = 0; k < WORKERS; k++) {
    mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
    static float weights[COUNT];
    options.optimizer =
        seed % 2 ? MLFAB_OPTIMIZER_ADAM : MLFAB_OPTIMIZER_SGD; /* state is copied, too */
    mlfab_buf image = {0, 0, weights, COUNT};
    j->of[k].job = j;
    j->of[k].rank = k;
    OK(j->w.node[k], mlfab_tensor_add(j->w.node[k], 0, MLFAB_F32, COUNT));
    OK(j->w.node[k], mlfab_model_start(j->w.node[k], &options, &image, 1));
  }
  for (uint32_t k = 0; k < WORKERS; k++) {
    assert_int_equal(mlfab_sim_watch(j->w.sim, k, look, &j->of[k]), 0);
    assert_int_equal(mlfab_sim_at(j->w.sim, mlfab_sim_clock(j->w.sim) + 1, look, &j->of[k]), 0);
  }
}

static uint64_t calls_of(const job *j) {
  uint64_t n = 0;
  for (uint32_t k = 0; k < WORKERS; k++) n += j->of[k].calls;
  return n;
}

static void run_until_in_sync(job *j) {
  for (int k = 0; !j->in_sync; k++) {
    if (k > 400) wrong("the other copy is not in sync after 20 s");
    mlfab_sim_run(j->w.sim, BEAT_MS * WORLD_MS);
  }
}

/* Short faults, of which nobody dies. */
static void trouble(job *j) {
  uint32_t a = (uint32_t)below(j, WORKERS + 2), b = (uint32_t)below(j, WORKERS + 2);
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
  begin(&j, seed, 0);
  for (int k = 0; k < KILLS; k++) {
    run_until_in_sync(&j);
    if (seed % 2) trouble(&j);
    run_until_in_sync(&j);
    mlfab_sim_run(j.w.sim, below(&j, 200 * WORLD_MS));
    if (!j.in_sync) run_until_in_sync(&j);
    uint64_t before = calls_of(&j);
    mlfab_sim_crash(j.w.sim, host_of_copy(j.serves));
    j.in_sync = 0;
    mlfab_sim_run(j.w.sim, (2 + below(&j, 2)) * WORLD_S);
    if (calls_of(&j) < before + 4 * WORKERS)
      wrong("only %llu calls ended after kill %d", (unsigned long long)(calls_of(&j) - before), k);
    open_node(&j, host_of_copy(j.serves));
    j.serves = 1 - j.serves;
  }
  j.ends = 1;
  for (int k = 0, busy = 1; busy; k++) {
    if (k > 400) wrong("a call has not ended");
    mlfab_sim_run(j.w.sim, BEAT_MS * WORLD_MS);
    busy = 0;
    for (uint32_t i = 0; i < WORKERS; i++) busy |= j.of[i].busy;
  }
  for (uint32_t i = 0; i < WORKERS; i++) mlfab_sim_watch(j.w.sim, i, NULL, NULL);
  world_close(&j.w);
}

/* A worker's process is replaced while server 0 is: both copies know which processes there are. Barriers go on without
 * the worker, and with it as soon as it is back. */
static void replacement(uint64_t seed) {
  static job j;
  const uint32_t one = WORKERS - 1;
  begin(&j, seed, 1);
  run_until_in_sync(&j);
  mlfab_sim_run(j.w.sim, below(&j, 200 * WORLD_MS));
  for (int k = 0; k < 3; k++) { /* in any order, at about the same time */
    if (k == (int)(seed % 3)) {
      mlfab_sim_crash(j.w.sim, host_of_copy(j.serves));
      /* Workers, too, may come to the next process before it knows that the fabric runs. */
      if (seed % 2) open_node(&j, host_of_copy(j.serves));
    } else if (!j.w.node[one] && !j.of[one].late) {
      mlfab_sim_run(j.w.sim, below(&j, 60 * WORLD_MS));
      j.of[one].late = 1;
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
  for (uint32_t k = 0; k < WORKERS; k++) j.of[k].calls = 0;
  j.of[one].busy = 0;
  j.of[one].next_ns = 0;
  assert_int_equal(mlfab_sim_watch(j.w.sim, one, look, &j.of[one]), 0);
  assert_int_equal(mlfab_sim_at(j.w.sim, mlfab_sim_clock(j.w.sim) + 1, look, &j.of[one]), 0);
  mlfab_sim_run(j.w.sim, 2 * (uint64_t)WORLD_S);
  for (uint32_t k = 0; k < WORKERS; k++)
    if (j.of[k].calls < 10)
      wrong("worker %u has ended %llu barriers", k, (unsigned long long)j.of[k].calls);
  for (uint32_t i = 0; i < WORKERS; i++) mlfab_sim_watch(j.w.sim, i, NULL, NULL);
  world_close(&j.w);
}

static void test_replacement(void **state) {
  (void)state;
  seeds_run("replacement", test_cases_from(12, 100), replacement);
}

static void test_succession(void **state) {
  (void)state;
  seeds_run("succession", test_cases_from(5, 60), succession);
}

/* A copy with another heartbeat would stop answering too late, or begin too early. */
static void test_other_heartbeat(void **state) {
  static const char *const names[] = {
      [0] = "worker 0", [WORKERS + 1] = "the replica of server 0", [WORKERS + 2] = "scheduler 0"};
  static job j;
  (void)state;
  for (uint32_t odd = 0; odd < sizeof names / sizeof *names; odd++) {
    mlfab_error error;
    char text[160];
    int ready = 0;
    if (!names[odd]) continue;
    memset(&j, 0, sizeof j);
    world_init(&j.w, WORKERS, 1, 1);
    j.w.nodes = WORKERS + 3;
    world_network(&j.w, 1);
    j.odd = odd;
    for (uint32_t i = 0; i < j.w.nodes; i++) open_node(&j, i);
    while (!(ready = mlfab_is_ready(j.w.node[odd], &error))) assert_true(mlfab_sim_step(j.w.sim));
    snprintf(text, sizeof text,
             "heartbeat_ns (MLFAB_HEARTBEAT_MS) is 500 ms at %s, 50 ms at server 0", names[odd]);
    if (ready != MLFAB_ERR_WORLD || !strstr(error.text, text))
      fail_msg("%s \"%s\" instead of \"%s\"", mlfab_error_name(ready), error.text, text);
    world_close(&j.w);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_succession),
                                     cmocka_unit_test(test_other_heartbeat),
                                     cmocka_unit_test(test_replacement)};
  return cmocka_run_group_tests_name("succession", tests, NULL, NULL);
}
