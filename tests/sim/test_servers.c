/* test_servers.c - workers and servers that join a running fabric, leave it and die, in whole simulated fabrics, while the
 * others train.
 *
 * Every worker adds 1 to its own elements of the model, so a pull tells which updates it contains at which server. With
 * BSP all elements of a worker count the same number of updates in every pull, whatever server has them. In the end
 * every update is in the model once.
 *
 * Growth: workers join, leave, and die before their first update. Worker 0 is there from the first round to the last: with
 * BSP its updates count the rounds. Each other worker is in no round before its first round, and in all later rounds. All
 * servers agree on that round.
 *
 * Changes: servers come and go, too, and get slices and give them away. A server dies only while it has no slices, or while
 * a move is to give it its first ones. */
#include "../unit/on_device.h"
#include "job.h"

enum { COUNT = 6144, MOST = 5, WORKERS = 3, SERVERS = 4, UNKNOWN = -1 };

enum phase { ABSENT, OPENS, IDLES, COMPUTES, PUSHES, PULLS, LEAVES, AWAY, DEAD };
enum place { NOWHERE, COMES, HERE }; /* of a server */

struct job;
typedef struct worker {
  struct job *job;
  uint32_t rank;
  enum phase phase;
  int busy;          /* inside a blocking call */
  uint64_t comes_ns; /* a joiner: when it opens; 0: never */
  int dies;          /* it crashes: 1 before it has a model, 2 before its first update */
  uint64_t step;     /* updates pushed */
  int64_t first;     /* BSP: its first round, once it is known */
  uint64_t asked_ns;
  mlfab_request request;
  float u[COUNT], w[COUNT];
} worker;

static struct { uint32_t moves, refused, came, gone, died, lost; } seen;

typedef struct job {
  world w;
  uint64_t random, seed;
  int changes; /* of servers; else workers die */
  uint32_t founders, most, founding;
  uint64_t steps;
  mlfab_sync sync;
  worker of[MOST];
  enum place place[SERVERS];
  uint8_t holds[SERVERS], dies[SERVERS]; /* has slices; dies during the next move */
  uint32_t moves, moved, gone, came, died, refused;
  int moving, lost;
} job;

static uint64_t below(job *j, uint64_t n) { return chance_below(&j->random, n); }

static uint64_t now(const job *j) { return mlfab_sim_clock(j->w.sim); }

/* --- nodes: workers, then servers --- */

static uint32_t host_of(const job *j, uint32_t server) { return j->most + server; }

static void open_node(job *j, uint32_t i) {
  mlfab_config c = world_config(&j->w, i);
  c.workers = j->founders;
  c.workers_max = j->most;
  c.servers = j->founding;
  c.servers_max = j->w.servers;
  sim_open(j->w.sim, i, &c, &j->w.node[i]);
}

/* --- workers --- */

static void step_of(void *user);

static void compute(worker *me) {
  uint64_t ns = 1000000u * (1 + below(me->job, 12));
  me->phase = COMPUTES;
  me->asked_ns = now(me->job);
  assert_int_equal(mlfab_sim_at(me->job->w.sim, me->asked_ns + ns, step_of, me), 0);
}

static void judge_round(worker *me, const uint64_t *got) {
  job *j = me->job;
  uint64_t round = got[0];
  if (me->first == UNKNOWN) me->first = (int64_t)(round - me->step);
  if (me->first != (int64_t)(round - me->step))
    wrong("worker %u is at %llu in round %llu, and began in round %lld", me->rank,
          (unsigned long long)me->step, (unsigned long long)round, (long long)me->first);
  for (uint32_t o = 1; o < j->most; o++) {
    worker *other = &j->of[o];
    if (other->phase == DEAD) continue;
    if (other->first == UNKNOWN && got[o] > 0 && other->phase < LEAVES)
      other->first = (int64_t)(round - got[o]);
    uint64_t want = other->first == UNKNOWN || round < (uint64_t)other->first
                        ? 0
                        : round - (uint64_t)other->first;
    if (other->phase >= LEAVES && want > other->step) want = other->step;
    if (other->first != UNKNOWN && got[o] != want)
      wrong("round %llu has %llu updates of worker %u, which began in round %lld, not %llu",
            (unsigned long long)round, (unsigned long long)got[o], o, (long long)other->first,
            (unsigned long long)want);
  }
}

static void judge(worker *me) {
  job *j = me->job;
  uint64_t got[MOST] = {0};
  for (uint32_t i = 0; i < COUNT; i++) {
    uint32_t o = i % j->most;
    uint64_t n = (uint64_t)me->w[i];
    if (i < j->most) got[o] = n;
    if (n > j->of[o].step)
      wrong("element %u has %llu updates, of %llu", i, (unsigned long long)n,
            (unsigned long long)j->of[o].step);
    if (o == me->rank && n != me->step)
      wrong("worker %u has %llu of its own %llu updates, element %u", o, (unsigned long long)n,
            (unsigned long long)me->step, i);
    if (j->sync.kind == MLFAB_SYNC_BSP && n != got[o] && j->of[o].phase != DEAD)
      wrong("worker %u got %llu updates of worker %u in one place, %llu in another", me->rank,
            (unsigned long long)got[o], o, (unsigned long long)n);
  }
  if (j->sync.kind == MLFAB_SYNC_BSP) judge_round(me, got);
}

/* 0 when a server goes while this worker joins, before server 0 has told: it can be called again. */
static int start_model(worker *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_model_options options = {.size = sizeof options, .slices = 6};
  mlfab_buf image = {0, 0, me->w, COUNT};
  options.consistency = j->sync;
  memset(me->w, 0, sizeof me->w);
  me->busy = 1;
  int code = mlfab_tensor_add(node, 0, MLFAB_F32, COUNT);
  if (code != MLFAB_ERR_TENSOR) world_expect(node, code, 0, "tensor_add");
  code = mlfab_model_start(node, &options, &image, 1);
  me->busy = 0;
  if (code == MLFAB_ERR_PEER_DEAD && me->rank >= j->founders && j->gone + j->died > 0) return 0;
  world_expect(node, code, 0, "model_start");
  return 1;
}

static int others_are_over(const job *j) {
  for (uint32_t k = 1; k < j->most; k++)
    if (j->of[k].phase < AWAY) return 0;
  return 1;
}

static void die(worker *me) {
  assert_int_equal(mlfab_sim_crash(me->job->w.sim, me->rank), 0);
  me->phase = DEAD;
}

/* A worker that joins. */
static void join(worker *me) {
  job *j = me->job;
  uint64_t idles_ns = j->changes ? 0 : 20000000u; /* it has joined, and has no model */
  if (me->phase == ABSENT && me->comes_ns && now(j) >= me->comes_ns) {
    open_node(j, me->rank);
    me->phase = OPENS;
    me->asked_ns = now(j);
  } else if (me->phase == OPENS && now(j) > me->asked_ns) {
    me->asked_ns = now(j); /* once at a time: a host that is paused has a deadline in the past */
    if (sim_ready(j->w.node[me->rank])) me->phase = IDLES;
  }
  if (me->phase != IDLES || now(j) < me->asked_ns + idles_ns) return;
  if (me->dies == 1)
    die(me);
  else if (!start_model(me))
    me->asked_ns = now(j) + 1;
  else if (me->dies == 2)
    die(me);
  else
    compute(me);
}

/* Goes on with whatever has ended. Called after every event of the host, and when a computation ends. */
static void step_of(void *user) {
  worker *me = user;
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_buf update = {0, 0, me->u, COUNT}, image = {0, 0, me->w, COUNT};
  mlfab_result result;
  uint64_t patience_s = j->changes ? 60 : 30;
  int done = 0, code = 0;
  if (me->busy || !node || j->lost) return;
  /* Also while another joiner waits: some get their model at the same time. */
  if (!j->changes && me->phase < COMPUTES && me->dies == 0) join(me);
  if ((me->phase == PUSHES || me->phase == PULLS) && now(j) - me->asked_ns > patience_s * WORLD_S)
    wrong("worker %u waits for ever in step %llu", me->rank, (unsigned long long)me->step);
  if (me->phase == COMPUTES && now(j) > me->asked_ns) {
    for (uint32_t i = 0; i < COUNT; i++) me->u[i] = i % j->most == me->rank ? 1.0f : 0.0f;
    code = mlfab_push_start(node, &update, 1, NULL, &me->request);
    j->lost |= code == MLFAB_ERR_PEER_DEAD && j->died; /* it died when all had their slices */
    if (j->lost) return;
    world_expect(node, code, 0, "push_start");
    me->step++;
    me->phase = PUSHES;
    me->asked_ns = now(j);
  } else if (me->phase == PUSHES || me->phase == PULLS) {
    OK(node, mlfab_test(node, me->request, &done, &result));
    if (!done) return;
    if (result.status == MLFAB_ERR_PEER_DEAD && j->died) {
      j->lost = 1;
      return;
    }
    world_expect(node, result.status, 0, me->phase == PUSHES ? "push" : "pull");
    if (me->phase == PUSHES) {
      me->phase = PULLS;
      code = mlfab_pull_start(node, &image, 1, NULL, &me->request);
      j->lost |= code == MLFAB_ERR_PEER_DEAD && j->died;
      if (!j->lost) world_expect(node, code, 0, "pull_start");
      return;
    }
    judge(me);
    if (me->step < j->steps || (me->rank == 0 && !others_are_over(j)))
      compute(me);
    else
      me->phase = LEAVES;
  }
}

static void leave(worker *me) {
  mlfab **node = &me->job->w.node[me->rank];
  me->busy = 1;
  OK(*node, mlfab_finish(*node, 0));
  if (!me->job->changes && below(me->job, 2)) mlfab_close(node);
  me->busy = 0;
  me->phase = AWAY;
}

/* --- servers --- */

static void kill(void *user) {
  job *j = user;
  for (uint32_t s = 1; s < SERVERS; s++) {
    if (!j->dies[s]) continue;
    j->dies[s] = 0;
    assert_int_equal(mlfab_sim_crash(j->w.sim, host_of(j, s)), 0);
    j->w.node[host_of(j, s)] = NULL;
    j->place[s] = NOWHERE;
    j->died++;
    say(j->w.sim, "server %u dies", s);
  }
}

/* Moves slices to some of the servers that are here. One that has none yet may die on the way. */
static void move_slices(job *j) {
  uint32_t list[SERVERS], n = 0;
  int dies = 0;
  for (uint32_t s = 0; s < SERVERS; s++)
    if (j->place[s] == HERE && (below(j, 2) || (s == 0 && below(j, 2)))) list[n++] = s;
  if (n == 0) list[n++] = 0;
  for (uint32_t i = 0; i < n; i++) {
    if (!j->changes || list[i] == 0 || j->holds[list[i]] || below(j, 8) != 0 || dies) continue;
    j->dies[list[i]] = 1;
    dies = 1;
    assert_int_equal(mlfab_sim_at(j->w.sim, now(j) + 100000 * below(j, 300), kill, j), 0);
  }
  j->of[0].busy = 1;
  j->moving = 1;
  say(j->w.sim, "moves to %u servers (%u %u %u %u)", n, list[0], n > 1 ? list[1] : 0,
      n > 2 ? list[2] : 0, n > 3 ? list[3] : 0);
  int code = mlfab_set_servers(j->w.node[0], list, n, 0);
  j->moving = 0;
  j->of[0].busy = 0;
  say(j->w.sim, "moved to %u servers (%u ...): %s %s", n, list[0], mlfab_error_name(code),
      code ? last_text(j->w.node[0]) : "");
  j->moves++;
  if (code == 0 && dies && j->died) /* it may have died later */
    for (uint32_t i = 0; i < n; i++) j->lost |= j->place[list[i]] == NOWHERE;
  if (code == 0) {
    memset(j->holds, 0, sizeof j->holds);
    for (uint32_t i = 0; i < n; i++) j->holds[list[i]] = 1;
    j->moved++;
  } else if (code != MLFAB_ERR_PEER_DEAD || !dies) {
    wrong("set_servers: %s (%s)", mlfab_error_name(code), last_text(j->w.node[0]));
  } else {
    j->refused++;
  }
  for (uint32_t s = 0; s < SERVERS; s++) j->dies[s] = 0;
}

static void change_servers(job *j) {
  uint32_t s = 1 + (uint32_t)below(j, SERVERS - 1), i = host_of(j, s);
  if (j->place[s] == NOWHERE) {
    open_node(j, i);
    j->place[s] = COMES;
    j->came++;
    say(j->w.sim, "server %u comes", s);
  } else if (j->place[s] == HERE && !j->holds[s] && !j->moving && j->moves > 0 && below(j, 2)) {
    if (below(j, 2)) {
      mlfab_close(&j->w.node[i]);
    } else {
      assert_int_equal(mlfab_sim_crash(j->w.sim, i), 0);
      j->w.node[i] = NULL;
    }
    j->place[s] = NOWHERE;
    j->gone++;
    say(j->w.sim, "server %u has gone", s);
  }
}

static void look(job *j) {
  for (uint32_t s = 1; s < SERVERS; s++) {
    mlfab_error error;
    if (j->place[s] != COMES) continue;
    mlfab *node = j->w.node[host_of(j, s)];
    int ready = mlfab_is_ready(node, &error);
    /* The number is given to another process only when the former is known to be dead. */
    if (ready < 0 && error.code == MLFAB_ERR_RANK_TAKEN) {
      mlfab_abandon(&j->w.node[host_of(j, s)]);
      j->place[s] = NOWHERE;
    } else if (ready < 0) {
      wrong("server %u: %s", s, error.text);
    } else if (ready) {
      j->place[s] = HERE;
      say(j->w.sim, "server %u is here", s);
    }
  }
}

/* --- the fabric --- */

/* How many nodes there are, and what is drawn of them. */
static void draw(job *j) {
  static const uint32_t kinds[] = {MLFAB_SYNC_BSP, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP, MLFAB_SYNC_ASYNC,
                                   MLFAB_SYNC_DSPS};
  j->founders = 1 + (uint32_t)below(j, 3);
  j->most = j->changes ? WORKERS : j->founders + 1 + (uint32_t)below(j, MOST - j->founders);
  j->founding = 1 + (uint32_t)below(j, 3);
  j->steps = j->changes ? 25 : 10;
  world_init(&j->w, j->most, j->changes ? SERVERS : j->founding, 1);
  if (j->changes) j->w.config.heartbeat_ns = 100000000;
  if (j->changes && WORLD_COMPLETE && below(j, 4) == 0)
    j->w.config.scheduler = MLFAB_SCHEDULER_BESIDE;
  j->sync = (mlfab_sync){
      .size = sizeof j->sync, .kind = kinds[below(j, j->changes ? 4 : 5)], .staleness = 2};
  seeds_about(", kind %u", j->sync.kind);
  world_network(&j->w, j->seed);
  /* Slow servers: rounds end at different times at different servers. */
  for (uint32_t s = 0; s < j->w.servers; s++) {
    uint64_t rate = below(j, 2) ? 1250000000 : 2000000 + 1000000 * below(j, 20);
    assert_int_equal(mlfab_sim_set_rate(j->w.sim, host_of(j, s), rate, rate), 0);
  }
}

/* When a worker that is no founder comes: some at the same time. */
static void draw_joiner(worker *me) {
  job *j = me->job;
  me->first = UNKNOWN;
  if (!j->changes) {
    me->dies = below(j, 5) == 0 ? 1 + (int)below(j, 2) : 0;
    me->comes_ns = now(j) + 30000000u * below(j, 4);
  } else if (below(j, 2)) {
    me->comes_ns = now(j) + 1 + 30000000u * below(j, 8);
  } else {
    me->phase = AWAY;
  }
}

static void begin(job *j, uint64_t seed, int changes) {
  memset(j, 0, sizeof *j);
  j->seed = j->random = seed;
  j->changes = changes;
  draw(j);
  uint32_t early = j->founding;
  if (changes) early += below(j, 4) == 0 && j->founding < SERVERS;
  for (uint32_t i = 0; i < j->most + early; i++)
    if (i < j->founders || i >= j->most) open_node(j, i);
  for (uint32_t s = 0; s < early; s++) {
    j->place[s] = s < j->founding ? HERE : COMES;
    j->holds[s] = s < j->founding;
  }
  for (uint32_t i = 0; i < j->most + j->founding; i++)
    if (i < j->founders || i >= j->most) world_await(&j->w, i);
  for (uint32_t k = 0; k < j->most; k++) {
    worker *me = &j->of[k];
    me->job = j;
    me->rank = k;
    me->busy = k < j->founders;
    if (k >= j->founders) draw_joiner(me);
    assert_int_equal(mlfab_sim_watch(j->w.sim, k, step_of, me), 0);
  }
  for (uint32_t k = 0; k < j->founders; k++) start_model(&j->of[k]);
  for (uint32_t k = 0; k < j->founders; k++) compute(&j->of[k]);
}

/* In the end every update is in the model. */
static void check_model(job *j) {
  mlfab_buf image = {0, 0, j->of[0].w, COUNT};
  int code = j->lost ? 0 : mlfab_pull(j->w.node[0], &image, 1, NULL, NULL);
  j->lost |= code == MLFAB_ERR_PEER_DEAD && j->died; /* it died when all had their slices */
  if (!j->lost) world_expect(j->w.node[0], code, 0, "pull");
  for (uint32_t i = 0; i < COUNT && !j->lost; i++) {
    const worker *o = &j->of[i % j->most];
    if ((uint64_t)j->of[0].w[i] != o->step)
      wrong("in the end element %u is %g, of %llu updates", i, (double)j->of[0].w[i],
            (unsigned long long)o->step);
  }
}

static void play(uint64_t seed, int changes) {
  static job j;
  begin(&j, seed, changes);
  mlfab_sim_options faults = {
      .size = sizeof faults, .loss = 0.002, .reorder = 0.05, .pause = 0.3, .pause_ns = 50000000};
  /* Slices move in one step of so many; 0: never. */
  uint64_t moves = changes ? 1500 : below(&j, 3) == 0 && WORLD_COMPLETE ? 4000 : 0;
  if (below(&j, 3) == 0) assert_int_equal(mlfab_sim_set_faults(j.w.sim, &faults), 0);
  while (j.of[0].phase != LEAVES && !j.lost) {
    sim_step(j.w.sim);
    look(&j);
    for (uint32_t k = 1; k < j.most; k++) {
      if (j.of[k].phase < COMPUTES && k >= j.founders) join(&j.of[k]);
      if (j.of[k].phase == LEAVES) leave(&j.of[k]);
    }
    if (changes && below(&j, 500) == 0) change_servers(&j);
    if (moves && below(&j, moves) == 0 && !j.of[0].busy) move_slices(&j);
  }
  mlfab_sim_set_faults(j.w.sim, NULL);
  check_model(&j);
  for (uint32_t k = 0; k < j.most && !changes; k++)
    if (j.of[k].dies == 0 && world_saw(&j.w, MLFAB_EVENT_DEAD, (int32_t)k, 0))
      wrong("worker %u was taken for dead", k);
  say(j.w.sim, "%u moves (%u refused), %u came, %u went, %u died; lost %d", j.moved, j.refused,
      j.came, j.gone, j.died, j.lost);
  seen.moves += j.moved;
  seen.refused += j.refused;
  seen.came += j.came;
  seen.gone += j.gone;
  seen.died += j.died;
  seen.lost += j.lost != 0;
  world_close(&j.w);
}

static void play_growth(uint64_t seed) { play(seed, 0); }
static void play_changes(uint64_t seed) { play(seed, 1); }

TEST(test_growth) { seeds_run("growth", test_cases(400), play_growth); }

TEST(test_come_and_go) {
  seeds_run("servers", test_cases(400), play_changes);
  printf(
      "%u moves, %u refused; %u servers came, %u left without slices, %u died in a move, %u of "
      "them with slices\n",
      seen.moves, seen.refused, seen.came, seen.gone, seen.died, seen.lost);
}

/* --- by hand: two workers, servers 0 and 1, of up to three workers and four servers --- */

static void run_for(job *j, uint64_t ns) {
  uint64_t until = now(j) + ns;
  while (now(j) < until) sim_step(j->w.sim);
}

static void found(job *j, uint32_t kind) {
  memset(j, 0, sizeof *j);
  j->seed = j->random = 1;
  j->founders = j->founding = 2;
  j->most = WORKERS;
  world_init(&j->w, WORKERS, SERVERS, 1);
  j->w.config.heartbeat_ns = 100 * WORLD_MS;
  j->sync = (mlfab_sync){.size = sizeof j->sync, .kind = kind};
  world_network(&j->w, 1);
  for (uint32_t i = 0; i < WORKERS; i++) {
    j->of[i].job = j;
    j->of[i].rank = i;
    j->of[i].busy = 1;
    for (uint32_t e = 0; e < COUNT; e++) j->of[i].u[e] = 1.0f;
  }
  for (uint32_t i = 0; i < 2; i++) open_node(j, i), open_node(j, WORKERS + i);
  for (uint32_t i = 0; i < 2; i++) world_await(&j->w, i), world_await(&j->w, WORKERS + i);
  for (uint32_t i = 0; i < 2; i++) start_model(&j->of[i]);
}

/* A node comes, and has joined. */
static void come(job *j, uint32_t i) {
  open_node(j, i);
  world_await(&j->w, i);
}

static void push_one(job *j, uint32_t k) {
  const mlfab_buf one = {0, 0, j->of[k].u, COUNT};
  OK(j->w.node[k], mlfab_push(j->w.node[k], &one, 1, NULL, NULL));
}

static void pull_one(job *j, uint32_t k) {
  const mlfab_buf image = {0, 0, j->of[k].w, COUNT};
  OK(j->w.node[k], mlfab_pull(j->w.node[k], &image, 1, NULL, NULL));
}

/* One update of each of these workers, and what worker 0 has then. */
static float train(job *j, uint32_t workers) {
  for (uint32_t k = 0; k < workers; k++) push_one(j, k);
  pull_one(j, 0);
  for (uint32_t e = 1; e < COUNT; e++)
    if (j->of[0].w[e] < j->of[0].w[0] || j->of[0].w[e] > j->of[0].w[0])
      wrong("element %u is %g, and the first %g", e, (double)j->of[0].w[e], (double)j->of[0].w[0]);
  return j->of[0].w[0];
}

static void here(job *j, uint32_t node, const char *want) {
  uint32_t list[SERVERS], n = 0;
  char got[16] = "";
  OK(j->w.node[node], mlfab_servers(j->w.node[node], list, SERVERS, &n));
  for (uint32_t i = 0; i < n; i++) snprintf(got + i, sizeof got - i, "%u", list[i]);
  assert_string_equal(got, want);
}

/* Worker 0 pushes and pulls, and the pull waits for an update of this worker. */
static void pull_waits_for(job *j, uint32_t rank) {
  const mlfab_buf image = {0, 0, j->of[0].w, COUNT};
  mlfab_request pull;
  int done = 0;
  push_one(j, 0);
  OK(j->w.node[0], mlfab_pull_start(j->w.node[0], &image, 1, NULL, &pull));
  run_for(j, WORLD_S);
  OK(j->w.node[0], mlfab_test(j->w.node[0], pull, &done, NULL));
  assert_int_equal(done, 0);
  push_one(j, rank);
  OK(j->w.node[0], mlfab_wait(j->w.node[0], pull, 0, NULL));
}

/* The known servers of each node, and what is refused: a server that is not here, one that a worker cannot reach. */
TEST(test_refusals) {
  static job j;
  mlfab_error error;
  uint32_t both[] = {0, 2}, away[] = {0, 3}, one[] = {0};
  if (!WORLD_COMPLETE) skip();
  found(&j, MLFAB_SYNC_BSP);
  here(&j, 0, "01");
  assert_true(train(&j, 2) < 2.5f);
  EXPECT(j.w.node[0], mlfab_set_servers(j.w.node[0], away, 2, 0), MLFAB_ERR_STATE);
  OK(j.w.node[0], mlfab_last_error(j.w.node[0], &error));
  assert_non_null(strstr(error.text, "server 3 is not here: it has not joined, or has gone"));
  assert_true(error.rank == 3 && error.is_server);
  /* Worker 1 cannot reach server 2: the move is refused, and training goes on. */
  assert_int_equal(mlfab_sim_partition(j.w.sim, 1, WORKERS + 2, 1), 0);
  come(&j, WORKERS + 2);
  run_for(&j, 50 * WORLD_MS);
  here(&j, 0, "012");
  assert_true(world_saw(&j.w, MLFAB_EVENT_JOINED, 2, 1));
  EXPECT(j.w.node[0], mlfab_set_servers(j.w.node[0], both, 2, 0), MLFAB_ERR_PEER_DEAD);
  OK(j.w.node[0], mlfab_last_error(j.w.node[0], &error));
  if (!strstr(error.text, "worker 1 cannot reach server 2")) wrong("%s", error.text);
  assert_true(train(&j, 2) > 3.5f);
  /* Another process takes the number, and can be reached: the first one is closed before. */
  mlfab_close(&j.w.node[WORKERS + 2]);
  assert_int_equal(mlfab_sim_partition(j.w.sim, 1, WORKERS + 2, 0), 0);
  run_for(&j, WORLD_S);
  here(&j, 0, "01");
  assert_true(world_saw(&j.w, MLFAB_EVENT_LEFT, 2, 1));
  come(&j, WORKERS + 2);
  OK(j.w.node[0], mlfab_set_servers(j.w.node[0], both, 2, 0));
  assert_true(train(&j, 2) > 5.5f);
  /* Server 1 has no slices now. It dies, and nobody misses it: not the workers, not the next move. */
  assert_int_equal(mlfab_sim_crash(j.w.sim, WORKERS + 1), 0);
  j.w.node[WORKERS + 1] = NULL;
  uint64_t begun = now(&j);
  assert_true(train(&j, 2) > 7.5f);
  OK(j.w.node[0], mlfab_set_servers(j.w.node[0], one, 1, 0));
  assert_true(train(&j, 2) > 9.5f);
  assert_true(now(&j) - begun < 2 * (uint64_t)WORLD_S);
  here(&j, 1, "02");
  /* The same number again, while server 2 has nothing to do. */
  come(&j, WORKERS + 1);
  uint32_t all[] = {0, 1, 2};
  OK(j.w.node[1], mlfab_set_servers(j.w.node[1], all, 3, 0));
  assert_true(train(&j, 2) > 11.5f && j.of[0].w[0] < 12.5f);
  world_close(&j.w);
}

/* A worker that has joined and has no model does not count at a new server either; nor does one that has finished. */
TEST(test_guests) {
  static job j;
  uint32_t to[] = {2, 3};
  if (!WORLD_COMPLETE) skip();
  found(&j, MLFAB_SYNC_BSP);
  come(&j, 2);
  for (uint32_t s = 2; s < 4; s++) come(&j, WORKERS + s);
  assert_true(train(&j, 2) < 2.5f);
  OK(j.w.node[1], mlfab_finish(j.w.node[1], 0));
  OK(j.w.node[0], mlfab_set_servers(j.w.node[0], to, 2, 0));
  uint64_t begun = now(&j);
  assert_true(train(&j, 1) < 3.5f);
  assert_true(now(&j) - begun < WORLD_S);
  start_model(&j.of[2]);
  assert_true(j.of[2].w[0] > 2.5f && j.of[2].w[0] < 3.5f);
  /* It counts from here on. */
  pull_waits_for(&j, 2);
  assert_true(j.of[0].w[0] > 4.5f && j.of[0].w[0] < 5.5f);
  world_close(&j.w);
}

/* SSP at a new server goes on where the others are: a worker that is ahead waits there as everywhere. */
TEST(test_iterations_go_on) {
  static job j;
  uint32_t to[] = {2};
  if (!WORLD_COMPLETE) skip();
  found(&j, MLFAB_SYNC_SSP);
  for (int i = 0; i < 10; i++) train(&j, 2);
  come(&j, WORKERS + 2);
  OK(j.w.node[0], mlfab_set_servers(j.w.node[0], to, 1, 0));
  assert_true(train(&j, 2) > 21.5f);
  pull_waits_for(&j, 1); /* which is one iteration behind */
  world_close(&j.w);
}

/* At its servers, too, rounds do not wait for a process that has joined and has no model. It then begins in the round that is
 * open. */
TEST(test_guest) {
  static job j;
  found(&j, MLFAB_SYNC_BSP);
  come(&j, 2);
  uint64_t begun = now(&j);
  for (int k = 0; k < 5; k++) train(&j, 2);
  assert_true(now(&j) - begun < WORLD_S);
  start_model(&j.of[2]);
  assert_true(j.of[2].w[0] > 9.5f && j.of[2].w[0] < 10.5f);
  /* From here on a round waits for it. */
  push_one(&j, 1);
  pull_waits_for(&j, 2);
  pull_one(&j, 2);
  assert_true(j.of[0].w[0] > 12.5f && j.of[0].w[0] < 13.5f);
  assert_memory_equal(j.of[0].w, j.of[2].w, sizeof j.of[0].w);
  world_close(&j.w);
}

/* A new process of worker 0 comes with first weights, which the standing model does not take, and counts again. */
TEST(test_first_worker_again) {
  static job j;
  found(&j, MLFAB_SYNC_BSP);
  assert_int_equal(mlfab_sim_crash(j.w.sim, 0), 0);
  for (int k = 0; k < 3; k++) push_one(&j, 1), pull_one(&j, 1);
  uint64_t begun = now(&j);
  come(&j, 0);
  start_model(&j.of[0]);
  assert_true(now(&j) - begun < WORLD_S);
  assert_true(j.of[0].w[0] > 2.5f && j.of[0].w[0] < 3.5f);
  float all = train(&j, 2);
  assert_true(all > 4.5f && all < 5.5f);
  pull_one(&j, 1);
  assert_memory_equal(j.of[0].w, j.of[1].w, sizeof j.of[0].w);
  world_close(&j.w);
}

TESTS(NULL, NULL)
