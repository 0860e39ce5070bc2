/* test_joiners.c - workers that join loops of pushes, pulls, collectives of several kinds and barriers, in any order, and
 * processes that replace dead workers in them.
 *
 * All workers run one loop of random calls. In some loops calls are started, and waited for later in the step. Joiners come
 * at any time; workers die, close or finish at any time. No call fails because a worker joins or finishes. A collective fails
 * only after a death, or after a worker that closed: the loops do not match any more. Every call ends. Whoever sees a failure
 * withdraws its open collectives, and finishes: one of them may have ended well elsewhere, so nobody else makes it.
 *
 * Replacements: a worker dies, and a new process takes its place at any time, again and again. A death fails one call of each
 * other worker at most, the same one: a worker that the others have met dies when no collective is under way. One that they have
 * not met fails no call, and no call fails because a process comes back. All go on with their loops.
 *
 * Oracle: in the end each element of the model is the number of one worker's updates. Sums of collectives are in the range
 * that those who take part can give. */
#include "../unit/on_device.h"
#include "job.h"

enum { COUNT = 64, STEPS = 8, MOST = 5, CALLS = 9, LONG_S = 20, WIDE = 700 };

enum call { PUSH, PULL, BARRIER, ALLREDUCE, PAIR, WIDE_SUM, MAXIMUM, BROADCAST, KINDS };
static const char *const call_words[] = {"push", "pull",     "barrier", "allreduce",
                                         "pair", "wide sum", "maximum", "broadcast"};
/* Elements of the collectives. */
static const uint32_t counts[KINDS] = {0, 0, 0, 1, 2, WIDE, 1, 3};

enum phase { ABSENT, OPENS, IDLES, RUNS, LEAVES, AWAY, DEAD };
enum end { FINISHES, DIES, CLOSES, RETURNS };

typedef struct place { /* a call of the loop, as one worker makes it */
  mlfab_request request;
  int open;
  uint64_t asked_ns;
  float w[COUNT], x[WIDE];
} place;

typedef struct worker {
  struct job *job;
  uint32_t rank;
  enum phase phase;
  int busy;          /* inside a blocking call */
  int failed;        /* it has seen a failure */
  int met;           /* the others have met it in a collective */
  int mourns;        /* its next collective may tell of a death */
  uint64_t comes_ns; /* a joiner: when it opens */
  enum end end;
  uint64_t ends_ns;                              /* when it dies or closes; 0: never */
  uint64_t step, steps, pushes, pushed, next_ns; /* pushed: well */
  uint32_t at, last; /* its next call in the loop; with which it finishes */
  place of[CALLS];
  float u[COUNT];
} worker;

typedef struct job {
  world w;
  uint64_t random;
  uint32_t founders, most, calls;
  enum call loop[CALLS];
  uint32_t
      waits[CALLS]; /* before the call of this place, or the end of the step, it is waited for */
  mlfab_sync sync;
  int model, roots; /* the loop has a broadcast */
  int returns;      /* a new process takes the place of each that dies */
  int collects;     /* the loop has a collective */
  uint32_t deaths;
  int leaving; /* a worker finishes: the others go on meanwhile */
  int lost;    /* a worker has died, or closed without having finished */
  worker of[MOST];
} job;

static uint64_t below(job *j, uint64_t n) { return chance_below(&j->random, n); }
static uint64_t now_of(job *j) { return mlfab_sim_clock(j->w.sim); }

static void open_node(job *j, uint32_t i) {
  mlfab_config c = world_config(&j->w, i);
  c.workers = j->founders;
  c.workers_max = j->most;
  sim_open(j->w.sim, i, &c, &j->w.node[i]);
}

static void step_of(void *user);

static void think(worker *me) {
  job *j = me->job;
  me->next_ns = now_of(j) + 100000u * (1 + below(j, me->rank == 1 ? 200 : 40));
  assert_int_equal(mlfab_sim_at(j->w.sim, me->next_ns + 1, step_of, me), 0);
}

static int others_are_over(const job *j) {
  for (uint32_t k = 1; k < j->most; k++)
    if (j->of[k].phase < AWAY) return 0;
  return 1;
}

static int is_collective(enum call call) { return call >= ALLREDUCE; }

/* The call of this place has ended so. After a failure that may be, the worker finishes. */
static void expect(worker *me, uint32_t at, int code) {
  job *j = me->job;
  enum call call = j->loop[at];
  int rootless = j->roots && code == MLFAB_ERR_ARGUMENT; /* worker 0 is the root */
  if (is_collective(call) && me->mourns && code == MLFAB_ERR_PEER_DEAD) {
    me->mourns = 0;
    return;
  }
  if (is_collective(call) && j->lost &&
      (code == MLFAB_ERR_PEER_DEAD || code == MLFAB_ERR_PEER_CLOSED || code == MLFAB_ERR_MISMATCH ||
       code == MLFAB_ERR_CANCELLED || rootless)) {
    me->failed = 1;
    return;
  }
  world_expect(j->w.node[me->rank], code, 0, call_words[call]);
}

static void begin_call(worker *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  place *p = &me->of[me->at];
  enum call call = j->loop[me->at];
  mlfab_buf update = {0, 0, me->u, COUNT}, image = {0, 0, p->w, COUNT};
  mlfab_vec vec = {p->x, counts[call]};
  mlfab_collective options = {.size = sizeof options, .op = MLFAB_OP_MAX};
  int code = 0;
  p->open = 1;
  p->asked_ns = now_of(j);
  for (uint32_t i = 0; i < counts[call]; i++) p->x[i] = 1.0f;
  switch (call) {
    case PUSH:
      code = mlfab_push_start(node, &update, 1, NULL, &p->request);
      me->pushes++;
      break;
    case PULL:
      code = mlfab_pull_start(node, &image, 1, NULL, &p->request);
      break;
    case BARRIER:
      code = mlfab_barrier_start(node, NULL, &p->request);
      break;
    case BROADCAST:
      code = mlfab_broadcast_start(node, 0, p->x, 4 * counts[call], NULL, &p->request);
      break;
    default:
      code = mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, call == MAXIMUM ? &options : NULL,
                                   &p->request);
  }
  if (code) p->open = 0;
  expect(me, me->at, code);
}

/* 1 when the call of this place is over. */
static int is_over(worker *me, uint32_t at) {
  job *j = me->job;
  place *p = &me->of[at];
  mlfab *node = j->w.node[me->rank];
  enum call call = j->loop[at];
  mlfab_result result;
  int done = 0;
  if (!p->open) return 1;
  OK(node, mlfab_test(node, p->request, &done, &result));
  if (!done) {
    if (now_of(j) - p->asked_ns > LONG_S * SECOND)
      wrong("worker %u waits for ever in the %s of its step %llu", me->rank, call_words[call],
            (unsigned long long)me->step);
    return 0;
  }
  p->open = 0;
  say(j->w.sim, "worker %u: %s of step %llu: %d", me->rank, call_words[call],
      (unsigned long long)me->step, result.status);
  expect(me, at, result.status);
  if (is_collective(call)) me->mourns = 0;
  if (is_collective(call) && !result.status) me->met = 1;
  if (call == PUSH && !result.status) me->pushed++;
  float most = call == MAXIMUM || call == BROADCAST ? 1.0f : (float)j->most;
  for (uint32_t i = 0; i < counts[call] && !result.status; i++)
    if (p->x[i] < 1.0f || p->x[i] > most) wrong("the %s has %g", call_words[call], (double)p->x[i]);
  return 1;
}

/* 1 when all calls are over that are to be before the call of this place. */
static int are_over(worker *me, uint32_t before) {
  int over = 1;
  for (uint32_t k = 0; k < me->job->calls; k++)
    if (me->job->waits[k] <= before || before == me->job->calls) over &= is_over(me, k);
  return over;
}

static void withdraw_collectives(worker *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  for (uint32_t k = 0; k < j->calls; k++)
    if (me->of[k].open && is_collective(j->loop[k]))
      OK(node, mlfab_cancel(node, me->of[k].request));
}

/* Does its death fail calls of others? */
static int matters(const worker *me) {
  mlfab_stats stats = {.collective_epochs = 0};
  if (me->phase < RUNS || me->phase >= AWAY) return 0;
  mlfab_get_stats(me->job->w.node[me->rank], &stats, sizeof stats);
  return me->met || stats.collective_epochs > 0;
}

static int is_calling(const worker *me) {
  for (uint32_t k = 0; k < me->job->calls; k++)
    if (me->of[k].open && is_collective(me->job->loop[k])) return 1;
  return 0;
}

/* May it die now, so that all others that have met it fail the same call? */
static int may_die(const worker *me) {
  const job *j = me->job;
  if (is_calling(me)) return 0;
  if (!matters(me)) return 1;
  for (uint32_t k = 0; k < j->most; k++)
    if (matters(&j->of[k]) && (is_calling(&j->of[k]) || j->of[k].mourns)) return 0;
  return !j->leaving;
}

/* It dies, and a new process comes, perhaps before anybody has noticed. */
static void die(worker *me) {
  job *j = me->job;
  int known = matters(me);
  say(j->w.sim, "worker %u dies%s", me->rank, known ? "" : ", which nobody has met");
  assert_int_equal(mlfab_sim_crash(j->w.sim, me->rank), 0);
  me->phase = ABSENT;
  me->met = me->mourns = 0;
  me->step = me->at = 0;
  memset(me->of, 0, sizeof me->of);
  me->comes_ns = now_of(j) + MS * below(j, below(j, 2) ? 20 : 400);
  me->ends_ns = me->comes_ns + MS * below(j, 200);
  if (below(j, 3)) me->end = FINISHES;
  j->deaths++;
  for (uint32_t k = 0; k < j->most && known; k++)
    j->of[k].mourns = j->collects && matters(&j->of[k]);
}

/* It has no more steps. The root is last: others may need its broadcast. */
static int is_last_step(worker *me) {
  job *j = me->job;
  if (me->failed) return 1;
  if (me->rank == 0) return me->at == 0 && others_are_over(j);
  return me->step >= me->steps && me->at == me->last && me->end == FINISHES;
}

static void step_of(void *user) {
  worker *me = user;
  job *j = me->job;
  if (me->busy || !j->w.node[me->rank] || me->phase != RUNS) return;
  int ends = is_last_step(me);
  if (me->failed) withdraw_collectives(me);
  if (!are_over(me, ends ? j->calls : me->at)) return;
  ends = is_last_step(me);
  if (ends && me->failed && j->leaving) {
    think(me);
    return;
  }
  if (ends && !j->leaving) {
    me->phase = LEAVES;
    j->leaving = 1;
    say(j->w.sim, "worker %u finishes", me->rank);
    return;
  }
  if (now_of(j) <= me->next_ns) return;
  if (me->at == j->calls) {
    me->at = 0;
    me->step++;
  } else {
    begin_call(me);
    me->at++;
  }
  think(me);
}

static void start_model(worker *me) {
  job *j = me->job;
  mlfab *node = j->w.node[me->rank];
  mlfab_model_options options = {.size = sizeof options, .slices = 4};
  float w[COUNT];
  mlfab_buf image = {0, 0, w, COUNT};
  options.consistency = j->sync;
  memset(w, 0, sizeof w);
  for (uint32_t i = 0; i < COUNT; i++) me->u[i] = i % j->most == me->rank;
  me->busy = 1;
  OK(node, mlfab_tensor_add(node, 0, MLFAB_F32, COUNT));
  OK(node, mlfab_model_start(node, &options, &image, 1));
  me->busy = 0;
}

static void finish(worker *me) {
  mlfab **node = &me->job->w.node[me->rank];
  me->busy = 1;
  /* After a failure others may wait for calls of one that is about to finish, too. */
  int code = mlfab_finish(*node, me->job->lost ? SECOND : 0);
  if (code != MLFAB_ERR_TIMEOUT || !me->job->lost) OK(*node, code);
  me->busy = me->job->leaving = 0;
  me->phase = AWAY;
  say(me->job->w.sim, "worker %u has finished", me->rank);
}

/* A worker outside its loop: it comes, dies, leaves. */
static void look_at(worker *me) {
  job *j = me->job;
  mlfab **node = &j->w.node[me->rank];
  uint64_t now = now_of(j);
  int lives = me->phase > ABSENT && me->phase <= RUNS && !me->busy;
  if (me->end == RETURNS && lives && now >= me->ends_ns) {
    if (may_die(me)) die(me);
  } else if (me->end != FINISHES && lives && now >= me->ends_ns &&
             (me->end == DIES || me->phase == RUNS)) {
    say(j->w.sim, "worker %u %s", me->rank, me->end == DIES ? "dies" : "closes");
    j->lost = 1;
    me->phase = DEAD;
    me->busy = 1;
    if (me->end == DIES)
      assert_int_equal(mlfab_sim_crash(j->w.sim, me->rank), 0);
    else
      OK(NULL, mlfab_close(node));
    me->busy = 0;
  } else if (me->phase == ABSENT && now >= me->comes_ns) {
    open_node(j, me->rank);
    me->phase = OPENS;
  } else if (me->phase == OPENS && !me->busy && sim_ready(*node)) {
    say(j->w.sim, "worker %u has joined", me->rank);
    if (j->model) start_model(me);
    me->phase = RUNS;
    think(me);
  } else if (me->phase == LEAVES && !me->busy && (me->rank > 0 || !others_are_over(j))) {
    finish(me);
  }
}

/* Calls in a random order. A collective of each kind comes once at most: by that joiners find their place. Without one there
 * is one barrier. */
static void make_loop(job *j) {
  uint32_t collectives = 0, later = below(j, 3) == 0;
  for (uint32_t k = KINDS; k-- > 0;) {
    uint32_t times = (uint32_t)below(j, 3);
    if (is_collective(k)) times = below(j, 3) == 0;
    if (k <= PULL && !j->model) times = 0;
    if (k == BROADCAST && j->returns) times = 0; /* it may end well without one that has died */
    if (k == BARRIER && collectives == 0) times = times > 0;
    collectives += is_collective(k) && times;
    j->roots |= k == BROADCAST && times;
    for (uint32_t n = 0; n < times && j->calls < CALLS; n++) {
      uint32_t at = (uint32_t)below(j, j->calls + 1);
      for (uint32_t i = j->calls++; i > at; i--) j->loop[i] = j->loop[i - 1];
      j->loop[at] = (enum call)k;
    }
  }
  if (j->calls == 0) j->loop[j->calls++] = ALLREDUCE;
  j->collects = collectives > 0 || j->loop[0] == ALLREDUCE;
  for (uint32_t k = 0; k < j->calls; k++) {
    j->waits[k] = k + 1;
    if (later && !(j->returns && is_collective(j->loop[k])))
      j->waits[k] += (uint32_t)below(j, j->calls - k);
  }
}

static void choose_end(worker *me) {
  job *j = me->job;
  uint64_t how = below(j, 16);
  me->steps = 1 + below(j, STEPS);
  me->last = (uint32_t)below(j, j->calls + 1);
  me->end = how == 0 ? DIES : how == 1 ? CLOSES : FINISHES;
  if (me->rank == 0 && me->end == CLOSES) me->end = FINISHES;
  if (j->returns) me->end = me->rank > 0 && how < 10 ? RETURNS : FINISHES;
  me->ends_ns = me->comes_ns + MS * below(j, how == 0 && below(j, 2) ? 30 : 200);
}

static void begin(job *j, uint64_t seed, int returns) {
  static const uint32_t kinds[] = {MLFAB_SYNC_BSP, MLFAB_SYNC_BSP, MLFAB_SYNC_SSP,
                                   MLFAB_SYNC_ASYNC};
  memset(j, 0, sizeof *j);
  j->random = seed;
  j->returns = returns;
  j->founders = 1 + (uint32_t)below(j, 3);
  j->most = j->founders + 1 + (uint32_t)below(j, MOST - j->founders);
  uint32_t servers = 1 + (uint32_t)below(j, 2);
  world_init(&j->w, j->most, servers, 1);
  if (returns) j->w.config.heartbeat_ns = 20 * MS;
  j->sync = (mlfab_sync){.size = sizeof j->sync, .kind = kinds[below(j, 4)], .staleness = 1};
  j->model = below(j, 5) != 0;
  make_loop(j);
  char words[128] = "";
  for (uint32_t i = 0; i < j->calls; i++) {
    char word[24];
    snprintf(word, sizeof word, " %s(%u)", call_words[j->loop[i]], j->waits[i]);
    if (strlen(words) + strlen(word) < sizeof words) strcat(words, word);
  }
  seeds_about(", kind %u,%s", j->sync.kind, words);
  world_network(&j->w, seed);
  for (uint32_t i = 0; i < j->w.nodes; i++)
    if (i < j->founders || i >= j->most) open_node(j, i);
  for (uint32_t i = 0; i < j->w.nodes; i++)
    if (i < j->founders || i >= j->most) world_await(&j->w, i);
  for (uint32_t k = 0; k < j->most; k++) {
    worker *me = &j->of[k];
    me->job = j;
    me->rank = k;
    me->comes_ns = now_of(j) + MS * below(j, 120);
    choose_end(me);
    assert_int_equal(mlfab_sim_watch(j->w.sim, k, step_of, me), 0);
  }
  for (uint32_t k = 0; k < j->founders && j->model; k++) start_model(&j->of[k]);
  for (uint32_t k = 0; k < j->founders; k++) {
    j->of[k].phase = RUNS;
    j->of[k].met = 1;
    think(&j->of[k]);
  }
}

/* Who has not died has left all its updates in the model. The last worker finishes first: that closes the last round. */
static void check_model(job *j) {
  worker *first = &j->of[0];
  float w[COUNT];
  mlfab_buf image = {0, 0, w, COUNT};
  if (first->phase == LEAVES) finish(first);
  if (!j->model || first->phase == DEAD) return;
  OK(j->w.node[0], mlfab_pull(j->w.node[0], &image, 1, NULL, NULL));
  for (uint32_t i = 0; i < COUNT; i++) {
    const worker *o = &j->of[i % j->most];
    uint64_t least = o->phase == DEAD ? 0 : j->returns ? o->pushed : o->pushes;
    if ((uint64_t)w[i] > o->pushes || (uint64_t)w[i] < least)
      wrong("in the end element %u is %g, of %llu updates", i, (double)w[i],
            (unsigned long long)o->pushes);
  }
}

static uint32_t play_with(uint64_t seed, int returns) {
  static job j;
  begin(&j, seed, returns);
  worker *first = &j.of[0];
  while (!others_are_over(&j) || (first->phase != LEAVES && first->phase < AWAY)) {
    sim_step(j.w.sim);
    for (uint32_t k = 0; k < j.most; k++) look_at(&j.of[k]);
  }
  check_model(&j);
  world_close(&j.w);
  return j.deaths;
}

static void play(uint64_t seed) { play_with(seed, 0); }

static uint32_t deaths;
static void play_returns(uint64_t seed) { deaths += play_with(seed, 1); }

TEST(test_replacements) {
  seeds_run("replacements", test_cases(600), play_returns);
  assert_true(seeds_alone() || test_scale() < 1 || deaths > test_cases(600) / 2);
}

TEST(test_loops) { seeds_run("joiners", test_cases(600), play); }

/* One step of two workers: an allreduce of two elements. */
static void pair_step(job *j) {
  mlfab_request request[2];
  mlfab_result result;
  float x[2][2] = {{1, 1}, {1, 1}};
  for (uint32_t i = 0; i < 2; i++) {
    mlfab_vec vec = {x[i], 2};
    OK(j->w.node[i], mlfab_allreduce_start(j->w.node[i], &vec, 1, MLFAB_F32, NULL, &request[i]));
  }
  for (uint32_t i = 0; i < 2; i++)
    OK(j->w.node[i], mlfab_wait(j->w.node[i], request[i], 0, &result));
}

/* A joiner's first collective is none that others make: these go on, and it ends at its deadline, with both calls. The next
 * one, which they make, has it. */
TEST(test_stranger) {
  static job j;
  float x[4] = {1, 1, 1, 1};
  mlfab_collective soon = {.size = sizeof soon, .timeout_ns = 3 * SECOND};
  mlfab_vec vec = {x, 4};
  mlfab_request request;
  mlfab_result result;
  uint32_t present[MOST], n = 0, calls = 0;
  int done = 0;
  memset(&j, 0, sizeof j);
  j.founders = 2;
  j.most = 3;
  world_init(&j.w, j.most, 1, 1);
  world_network(&j.w, 7);
  for (uint32_t i = 0; i < 4; i++)
    if (i != 2) open_node(&j, i);
  for (uint32_t i = 0; i < 4; i++)
    if (i != 2) world_await(&j.w, i);
  open_node(&j, 2);
  world_await(&j.w, 2);
  mlfab *node = j.w.node[2];
  OK(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, &soon, &request));
  for (; !done; calls++) {
    pair_step(&j);
    OK(node, mlfab_test(node, request, &done, &result));
  }
  assert_true(calls > 100);
  assert_int_equal(result.status, MLFAB_ERR_TIMEOUT);
  assert_in_range(result.rank, 0, 1);
  const char *text = last_text(node);
  if (!strstr(text, "allreduce of 4 F32") || !strstr(text, "allreduce of 2 F32"))
    wrong("it does not name both calls: %s", text);
  vec.count = 2;
  OK(node, mlfab_allreduce_start(node, &vec, 1, MLFAB_F32, NULL, &request));
  for (done = 0; !done;) {
    pair_step(&j);
    OK(node, mlfab_test(node, request, &done, &result));
  }
  assert_int_equal(result.status, 0);
  assert_true(x[0] == 3.0f);
  OK(node, mlfab_present(node, present, MOST, &n));
  assert_int_equal(n, 3);
  world_close(&j.w);
}

/* --- single scenes --- */

static void do_nothing(void *user) { (void)user; }

static void scene_open(world *w, uint32_t node, uint32_t founders) {
  mlfab_config c = world_config(w, node);
  c.workers = founders;
  c.workers_max = w->workers;
  sim_open(w->sim, node, &c, &w->node[node]);
}

static void scene_model(world *w, uint32_t rank) {
  float x[4] = {0};
  const mlfab_buf first = {0, 0, x, 4};
  mlfab_model_options options = {.size = sizeof options, .slices = 4};
  options.consistency = (mlfab_sync){.size = sizeof options.consistency, .kind = MLFAB_SYNC_BSP};
  OK(w->node[rank], mlfab_tensor_add(w->node[rank], 0, MLFAB_F32, 4));
  OK(w->node[rank], mlfab_model_start(w->node[rank], &options, &first, 1));
}

static void scene_join(world *w, uint32_t rank, uint32_t founders) {
  scene_open(w, rank, founders);
  world_await(w, rank);
  scene_model(w, rank);
}

/* Founders and a server, with room for `workers`. */
static void scene_begin(world *w, uint32_t workers, uint32_t founders) {
  world_init(w, workers, 1, 1);
  world_network(w, workers + 1);
  for (uint32_t r = 0; r < founders; r++) scene_open(w, r, founders);
  scene_open(w, workers, founders);
  for (uint32_t r = 0; r < founders; r++) world_await(w, r);
  world_await(w, workers);
  for (uint32_t r = 0; r < founders; r++) scene_model(w, r);
}

static mlfab_request scene_call(world *w, uint32_t rank, float *data, uint64_t n) {
  mlfab_request request;
  OK(w->node[rank],
     mlfab_allreduce_start(w->node[rank], &(mlfab_vec){data, n}, 1, MLFAB_F32, NULL, &request));
  return request;
}

static void scene_rest(world *w, uint64_t ns) {
  uint64_t until = mlfab_sim_clock(w->sim) + ns;
  mlfab_sim_at(w->sim, until + 1, do_nothing, NULL);
  while (mlfab_sim_clock(w->sim) < until) sim_step(w->sim);
}

/* Waits until all requests have ended: 1, or 0 after 20 s. */
static int scene_end(world *w, uint32_t n, const mlfab_request *requests) {
  uint64_t until = mlfab_sim_clock(w->sim) + 20 * SECOND;
  for (uint32_t r = 0, done = 0; r < n; r += done != 0) {
    mlfab_result result;
    if (mlfab_sim_clock(w->sim) > until) return 0;
    OK(w->node[r], mlfab_test(w->node[r], requests[r], (int *)&done, &result));
    if (!done) sim_step(w->sim);
  }
  return 1;
}

/* The founders have left when a joiner first meets a barrier: its pushes count at once. */
TEST(test_alone) {
  static world w;
  float one[4] = {1, 1, 1, 1}, x[4] = {0};
  const mlfab_buf push = {0, 0, one, 4}, pull = {0, 0, x, 4};
  scene_begin(&w, 2, 1);
  for (int k = 0; k < 6; k++) OK(w.node[0], mlfab_push(w.node[0], &push, 1, NULL, NULL));
  scene_join(&w, 1, 1);
  OK(w.node[0], mlfab_finish(w.node[0], 0));
  OK(NULL, mlfab_close(&w.node[0]));
  OK(w.node[1], mlfab_barrier(w.node[1], NULL));
  OK(w.node[1], mlfab_pull(w.node[1], &pull, 1, NULL, NULL));
  for (int k = 0; k < 12; k++) {
    float before = x[0];
    OK(w.node[1], mlfab_push(w.node[1], &push, 1, NULL, NULL));
    OK(w.node[1], mlfab_pull(w.node[1], &pull, 1, NULL, NULL));
    assert_true(x[0] == before + 1);
  }
  world_close(&w);
}

/* A joiner and two founders meet in a call, and `who` gives it up at any moment of the way. The others' calls end, and then
 * all barriers. */
static void give_up(uint32_t who, uint64_t when) {
  static world w;
  float data[3] = {1, 1, 1};
  mlfab_request calls[3], barriers[3];
  scene_begin(&w, 3, 2);
  for (uint32_t r = 0; r < 2; r++) calls[r] = scene_call(&w, r, &data[r], 1);
  assert_true(scene_end(&w, 2, calls));
  scene_join(&w, 2, 2);
  calls[2] = scene_call(&w, 2, &data[2], 1);
  scene_rest(&w, 5 * MS);
  for (uint32_t r = 0; r < 2; r++) calls[r] = scene_call(&w, r, &data[r], 1);
  scene_rest(&w, when);
  mlfab_cancel(w.node[who], calls[who]);
  if (!scene_end(&w, who == 2 ? 2 : 3, calls))
    fail_msg("worker %u gave up after %u us: calls of the others wait", who,
             (unsigned)(when / 1000));
  if (who < 2) {
    for (uint32_t r = 0; r < 3; r++)
      OK(w.node[r], mlfab_barrier_start(w.node[r], NULL, &barriers[r]));
    for (int more = 0; more < 4 && !scene_end(&w, 3, barriers); more++) {
      /* It may be a guest whose barrier meets the next of the others. */
      assert_true(more < 3);
      for (uint32_t r = 0; r < 2; r++)
        OK(w.node[r], mlfab_barrier_start(w.node[r], NULL, &barriers[r]));
    }
  }
  world_close(&w);
}

TEST(test_given_up) {
  for (uint64_t when = 0; when < 600000; when += 10000) {
    give_up(1, when);
    give_up(2, when);
  }
}

/* The founders make their call again and again until the joiner's has ended. Returns its status. */
static int call_until(world *w, uint32_t joiner, mlfab_request request) {
  float data[2] = {0};
  mlfab_request calls[2];
  mlfab_result result;
  for (int done = 0; !done;) {
    for (uint32_t r = 0; r < 2; r++) calls[r] = scene_call(w, r, &data[r], 1);
    assert_true(scene_end(w, 2, calls));
    scene_rest(w, 20 * MS);
    OK(w->node[joiner], mlfab_test(w->node[joiner], request, &done, &result));
  }
  return result.status;
}

/* Joiners whose calls nobody makes take no place from one that calls what all call. */
TEST(test_calls_of_nobody) {
  static world w;
  const mlfab_collective soon = {.size = sizeof soon, .timeout_ns = SECOND};
  float data[8][16] = {{0}};
  mlfab_request calls[8];
  scene_begin(&w, 7, 2);
  for (uint32_t r = 2; r < 7; r++) scene_join(&w, r, 2);
  for (uint32_t r = 2; r < 6; r++)
    OK(w.node[r], mlfab_allreduce_start(w.node[r], &(mlfab_vec){data[r], r + 3}, 1, MLFAB_F32,
                                        &soon, &calls[r]));
  for (uint32_t r = 2; r < 6; r++) assert_int_equal(call_until(&w, r, calls[r]), MLFAB_ERR_TIMEOUT);
  OK(w.node[6],
     mlfab_allreduce_start(w.node[6], &(mlfab_vec){data[6], 1}, 1, MLFAB_F32, &soon, &calls[6]));
  assert_int_equal(call_until(&w, 6, calls[6]), 0);
  world_close(&w);
}

TESTS(NULL, NULL)
