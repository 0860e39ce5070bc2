/* test_stochastic.c - stochastic reduce between up to 80 communicators and the membership of server 0, over
 * links that are slow, break, and end with their worker.
 *
 * Oracles. CODED: element e of what worker j sends in iteration k is k where e % n = j, else 0; so a
 * mean tells of whom it is made, of which iteration each is, and, as all stretches of n elements
 * must be alike, whether one was torn. RANDOM: the bits of a literal mean in the order of members,
 * of what the senders of a graph, built by its definition here, had when they called.
 * Failed calls must leave their data as it was; each worker sees each failure once, and iterations
 * match again afterwards.
 *
 * MLFAB_SEED=n one random case alone, MLFAB_SCALE=100 a hundred times as many. */
#include "core/coll/stochastic.h"
#include "links.h"
#include "../testing.h"

#include <math.h>
enum { WORKERS = 80, HISTORY = 64, FAILURES = 8 };

enum state { OPENING, THINKING, CALLING, PARTING, CLOSED };

typedef struct worker {
  MEMBER_FIELDS;
  enum state state;
  uint32_t id;
  mlfab_request request;
  uint64_t until, pace; /* of THINKING */
  uint32_t generation;  /* failures that it has seen */
  uint32_t k, last;     /* iteration; the one after which it parts */
  uint64_t finished;
  uint8_t *data, *before; /* before: at the call */
  uint8_t *sent[FAILURES][HISTORY];
  uint32_t used[WORKERS];   /* iterations of others that it has averaged */
  uint32_t generations[64]; /* plus one, by epoch that it has called in */
  mlfab_stochastic_info info;
  int32_t code, rank; /* of the last failure */
  char text[320];
} worker;

typedef struct world {
  WORLD_FIELDS(WORKERS);
  uint32_t iterations;
  uint64_t count;
  mlfab_stochastic_options options;
  mlfab_edge edges[64];
  int dtype, coded, may_fail;
  int hold;          /* nobody calls on by itself */
  int abrupt;        /* they close without a barrier */
  uint32_t breaking; /* one in so many steps breaks a link; 0: none */
  uint64_t finished, failed;
} world;

#include "members.h"

static void dropped(const void *self, uint32_t peer, const char *text) {
  (void)self, (void)peer;
  if (!w->fails) fail_msg("dropped: %s", text);
  w->drops++;
}

/* --- the world --- */

static uint64_t bytes_of_model(void) { return w->count * mlfab__element_bytes(w->dtype); }

static void open_world(uint32_t n, uint64_t seed, uint32_t graph, uint32_t mode, uint64_t count) {
  open_links(n, seed);
  w->config.timeout_ns = 1000000ull * BEAT;
  w->iterations = 20;
  w->coded = 1;
  w->dtype = MLFAB_F64;
  w->count = count;
  w->options = (mlfab_stochastic_options){
      .size = sizeof w->options, .graph = graph, .degree = 2, .mode = mode, .refuse_nan = 1};
  for (uint32_t i = 0; i < n; i++) {
    open_member(i);
    w->workers[i].last = w->iterations;
  }
}

static void free_worker(worker *me) {
  for (uint32_t g = 0; g < FAILURES; g++)
    for (uint32_t k = 0; k < HISTORY; k++) free(me->sent[g][k]);
  free(me->data);
  free(me->before);
}

static void kill_worker(uint32_t rank, int gone) {
  if (kill_member(rank) && gone) mlfab__membership_gone(&w->membership, rank, 0, w->now);
}

static void close_world(void) {
  w->fails = 0;
  for (uint32_t i = 0; i < w->n; i++) kill_worker(i, 0);
  for (uint32_t i = 0; i < w->n; i++) free_worker(&w->workers[i]);
  close_links();
}

/* --- the graph by its definition --- */

/* Does node `from` of n send to node `to`? */
static int sends(uint32_t from, uint32_t to, uint32_t n) {
  uint32_t step = (to + n - from) % n, root = (uint32_t)(sqrt((double)n) + 0.5);
  if (from == to) return 0;
  switch (w->options.graph) {
    case MLFAB_GRAPH_ALL:
      return 1;
    case MLFAB_GRAPH_CHAIN:
      return step == 1;
    case MLFAB_GRAPH_RING:
      return step == 1 || step == n - 1;
    case MLFAB_GRAPH_EXPANDER:
      return step == 1 || step == root % n;
    case MLFAB_GRAPH_HYPERCUBE:
      return ((from ^ to) & ((from ^ to) - 1)) == 0;
    default:
      return -1;
  }
}

/* Is it a sender of this worker's in its epoch? -1: not known here. */
static int is_sender(const worker *me, uint32_t from) {
  const mlfab__comm *comm = &me->comm;
  if (w->options.graph == MLFAB_GRAPH_USER) {
    for (uint32_t e = 0; e < w->options.nedges; e++)
      if (w->edges[e].from == from && w->edges[e].to == comm->rank && from != comm->rank) return 1;
    return 0;
  }
  for (uint32_t m = 0; m < comm->members; m++)
    if (comm->ranks[m] == from) return sends(m, comm->me, comm->members);
  return 0;
}

/* --- what a worker does --- */

static double value(const uint8_t *data, uint64_t e) {
  float f;
  double d;
  if (w->dtype == MLFAB_F32) {
    memcpy(&f, data + 4 * e, 4);
    return (double)f;
  }
  memcpy(&d, data + 8 * e, 8);
  return d;
}

static void set_value(uint8_t *data, uint64_t e, double v) {
  float f = (float)v;
  memcpy(data + (w->dtype == MLFAB_F32 ? 4 : 8) * e,
         w->dtype == MLFAB_F32 ? (void *)&f : (void *)&v, w->dtype == MLFAB_F32 ? 4 : 8);
}

static void fill(worker *me) {
  uint32_t rank = rank_of(me);
  for (uint64_t e = 0; e < w->count; e++) {
    double v = e % w->n == rank ? me->k : 0;
    if (!w->coded)
      v = (double)(mlfab__mix(rank * 7919 + me->k * 104729 + e * 31) >> 11) * 0x1p-50 - 1.5;
    set_value(me->data, e, v);
  }
}

static void saw_failure(worker *me, int code, int32_t rank, const char *text) {
  assert_true(w->may_fail);
  me->code = code;
  me->rank = rank;
  snprintf(me->text, sizeof me->text, "%s", text);
  me->generation++;
  assert_true(me->generation < FAILURES);
  me->k = 0;
  memset(me->used, 0, sizeof me->used);
  w->failed++;
}

static void think(worker *me) {
  me->state = THINKING;
  me->until = w->hold ? MLFAB__NEVER : w->now + 1 + (me->pace ? chance(2 * me->pace) : 0);
}

/* Two failures between two calls are seen as one, so how many a worker has seen is its own. */
static void note_epoch(worker *me) {
  if (me->state == CALLING && me->comm.phase == MLFAB__COMM_IN)
    me->generations[me->comm.epoch % 64] = me->generation + 1;
}

static void open_object(worker *me) {
  mlfab_error error = {0};
  uint32_t id = 0;
  int code = mlfab__stochastic_open(&me->comm, w->count, w->dtype, &w->options, 0, w->now, &id,
                                    &me->request, &error);
  if (code) {
    saw_failure(me, code, error.rank, error.text);
    me->state = CLOSED;
    return;
  }
  me->id = id;
  me->state = OPENING;
  me->data = malloc(bytes_of_model());
  me->before = malloc(bytes_of_model());
}

/* The next iteration. */
static void call(worker *me) {
  mlfab_error error = {0};
  mlfab_request other;
  me->k++;
  fill(me);
  memcpy(me->before, me->data, bytes_of_model());
  assert_true(me->k < HISTORY);
  uint8_t **sent = &me->sent[me->generation][me->k];
  free(*sent);
  *sent = copy(me->data, (uint32_t)bytes_of_model());
  me->info.size = sizeof me->info;
  int code = mlfab__stochastic_start(&me->comm, me->id, me->data, 0, w->now, &me->info,
                                     &me->request, &error);
  if (code) {
    saw_failure(me, code, error.rank, error.text);
    assert_memory_equal(me->data, me->before, bytes_of_model());
    think(me);
    return;
  }
  me->state = CALLING;
  note_epoch(me);
  const mlfab__request *request = mlfab__request_find(&me->requests, me->request);
  if (!request->done)
    assert_int_equal(
        mlfab__stochastic_start(&me->comm, me->id, me->data, 0, w->now, NULL, &other, &error),
        MLFAB_ERR_AGAIN);
}

/* All that part call a barrier, so that nobody closes under another. */
static void part(worker *me) {
  const mlfab__comm_call barrier = {.kind = MLFAB__COLLECTIVE_BARRIER, .words = "a barrier"};
  mlfab_error error = {0};
  int code = mlfab__comm_start(&me->comm, &barrier, 0, w->now, &me->request, &error);
  if (code) {
    saw_failure(me, code, error.rank, error.text);
    think(me);
  } else {
    me->state = PARTING;
  }
}

static void act_worker(worker *me) {
  if (me->state != THINKING || w->now < me->until) return;
  if (me->k >= me->last && w->abrupt) {
    mlfab_error error;
    assert_int_equal(mlfab__stochastic_close(&me->comm, me->id, &error), 0);
    me->state = CLOSED;
  } else if (me->k >= me->last) {
    part(me);
  } else {
    call(me);
  }
}

/* --- what must be --- */

/* What worker j sent in iteration k of this one's epoch, or NULL. */
static const uint8_t *sent_by(uint32_t j, const worker *me, uint32_t k) {
  uint32_t generation = w->workers[j].generations[me->comm.epoch % 64];
  return generation ? w->workers[j].sent[generation - 1][k] : NULL;
}

static void expect_coded(worker *me) {
  uint32_t n = w->n, rank = rank_of(me), whole = 0, senders = 0;
  for (uint64_t e = n; e < w->count; e++)
    assert_true(value(me->data, e) == value(me->data, e % n)); /* else torn */
  for (uint32_t j = 0; j < n && j < w->count; j++) {
    double sum = value(me->data, j) * (me->info.whole + 1);
    uint32_t of = (uint32_t)(sum + 0.5);
    assert_true(fabs(sum - of) < 1e-6);
    if (j == rank) {
      assert_int_equal(of, me->k);
      continue;
    }
    int sender = is_sender(me, j);
    senders += sender == 1;
    if (of == 0) continue;
    assert_true(sender);
    whole++;
    assert_true(of > me->used[j]);
    assert_non_null(sent_by(j, me, of));
    if (w->options.mode == MLFAB_STOCHASTIC_NOTIFY_ACK) assert_int_equal(of, me->k);
    me->used[j] = of;
  }
  if (w->count < n) return;
  assert_int_equal(whole, me->info.whole);
  if (is_sender(me, rank ? 0 : 1) >= 0) assert_int_equal(senders, me->info.senders);
}

static void expect_bits(const worker *me) {
  const mlfab__comm *comm = &me->comm;
  const uint8_t *sent[WORKERS];
  uint32_t inputs = 0;
  for (uint32_t m = 0; m < comm->members; m++) {
    uint32_t j = comm->ranks[m];
    if (j != comm->rank && is_sender(me, j) != 1) continue;
    sent[inputs] = sent_by(j, me, me->k);
    assert_non_null(sent[inputs++]);
  }
  for (uint64_t e = 0; e < w->count; e++) {
    double sum = value(sent[0], e);
    float fsum = (float)sum;
    for (uint32_t i = 1; i < inputs; i++) {
      sum += value(sent[i], e);
      fsum += (float)value(sent[i], e);
    }
    if (w->dtype == MLFAB_F32)
      assert_true((float)value(me->data, e) == fsum / (float)inputs);
    else
      assert_true(value(me->data, e) == sum / inputs);
  }
}

static void expect_result(worker *me) {
  const mlfab_stochastic_info *info = &me->info;
  assert_int_equal(info->size, sizeof *info);
  assert_int_equal(info->whole + info->torn + info->stale, info->senders);
  assert_int_equal(info->iteration, ++me->finished);
  assert_int_equal(info->sent_bytes % bytes_of_model(), 0);
  if (w->options.mode == MLFAB_STOCHASTIC_NOTIFY_ACK) assert_int_equal(info->whole, info->senders);
  for (uint32_t m = 0; w->options.mode == MLFAB_STOCHASTIC_BSP && m < me->comm.members; m++)
    assert_non_null(sent_by(me->comm.ranks[m], me, me->k)); /* the barrier */
  w->finished++;
  if (w->coded)
    expect_coded(me);
  else
    expect_bits(me);
}

static void look(worker *me) {
  mlfab__request *request = me->request ? mlfab__request_find(&me->requests, me->request) : NULL;
  mlfab_error error;
  note_epoch(me);
  if (!request || !request->done) return;
  int status = request->result.status;
  int32_t rank = request->result.rank;
  mlfab__request_end(&me->requests, request);
  me->request = 0;
  if (status) {
    if (me->state == CALLING) assert_memory_equal(me->data, me->before, bytes_of_model());
    saw_failure(me, status, rank, me->requests.last.text);
    if (me->state == OPENING) {
      assert_int_equal(mlfab__stochastic_close(&me->comm, me->id, &error), MLFAB_ERR_ARGUMENT);
      me->state = CLOSED;
    } else {
      think(me);
    }
  } else if (me->state == CALLING) {
    expect_result(me);
    think(me);
  } else if (me->state == PARTING) {
    assert_int_equal(mlfab__stochastic_close(&me->comm, me->id, &error), 0);
    assert_int_equal(mlfab__stochastic_close(&me->comm, me->id, &error), MLFAB_ERR_ARGUMENT);
    me->state = CLOSED;
  } else {
    think(me);
  }
}

/* --- what happens --- */

/* One thing that can happen; 0: only time passes. */
static int act(void) {
  w->now++;
  if (w->now >= w->tick_ns) tick();
  if (w->breaking && chance(w->breaking) == 0) break_hop(chance(w->n), chance(w->n));
  for (uint32_t tried = 0, from = chance(w->n); tried < w->n; tried++, from = (from + 1) % w->n) {
    worker *me = &w->workers[from];
    if (!me->alive) continue;
    act_worker(me);
    if (act_member(from)) return 1;
  }
  return 0;
}

static int all_closed(void) {
  for (uint32_t i = 0; i < w->n; i++)
    if (w->workers[i].alive && w->workers[i].state != CLOSED) return 0;
  return 1;
}

static void say_who_waits(void) {
  for (uint32_t i = 0; i < w->n; i++) {
    const worker *me = &w->workers[i];
    print_message("worker %u: alive %d state %d iteration %u generation %u phase %d request %u\n",
                  i, me->alive, me->state, me->k, me->generation, me->comm.phase, me->request != 0);
  }
}

static void run(uint64_t steps) {
  while (!all_closed()) {
    if (!act()) w->now += 10;
    if (steps-- == 0) {
      say_who_waits();
      fail_msg("it does not end");
    }
  }
}

static void open_all(void) {
  for (uint32_t i = 0; i < w->n; i++) open_object(&w->workers[i]);
}

/* --- cases --- */

/* Everything at random; with kills, members die. */
static void random_case(uint64_t seed, int kills) {
  static const uint32_t graphs[] = {
      MLFAB_GRAPH_ALL,     MLFAB_GRAPH_EXPANDER, MLFAB_GRAPH_CHAIN,     MLFAB_GRAPH_RING,
      MLFAB_GRAPH_REGULAR, MLFAB_GRAPH_EXPANDER, MLFAB_GRAPH_HYPERCUBE, MLFAB_GRAPH_USER};
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  uint32_t graph = graphs[mlfab__rng_below(&prng, kills ? 4 : 8)];
  uint32_t n = 1 + (uint32_t)mlfab__rng_below(&prng, 9);
  uint32_t mode = (uint32_t)mlfab__rng_below(&prng, 4);
  if (graph == MLFAB_GRAPH_HYPERCUBE) n = 1u << mlfab__rng_below(&prng, 4);
  if (graph == MLFAB_GRAPH_REGULAR) n += 3;
  if (graph == MLFAB_GRAPH_USER) n += 1;
  uint64_t count = 1 + mlfab__rng_below(&prng, mlfab__rng_below(&prng, 3) ? 40 : 3000);
  open_world(n, seed, graph, mode, count);
  if (mode == 0) w->options.mode = MLFAB_STOCHASTIC_NOTIFY_ACK;
  w->dtype = chance(2) ? MLFAB_F64 : MLFAB_F32;
  w->coded =
      w->options.mode != MLFAB_STOCHASTIC_NOTIFY_ACK || graph == MLFAB_GRAPH_REGULAR || chance(2);
  w->breaking = chance(3) ? 0 : 300;
  w->may_fail = kills;
  if (graph == MLFAB_GRAPH_USER) { /* a ring against the ranks, and what does not count */
    for (uint32_t i = 0; i < n; i++) w->edges[w->options.nedges++] = (mlfab_edge){(i + 1) % n, i};
    w->edges[w->options.nedges++] = (mlfab_edge){0, 0};
    w->edges[w->options.nedges++] = w->edges[0];
    w->options.edges = w->edges;
  }
  for (uint32_t i = 0; i < n; i++) w->workers[i].pace = chance(2) ? 0 : 1u << chance(12);
  open_all();
  for (uint32_t left = (uint32_t)kills < n ? (uint32_t)kills : n - 1; left > 0; left--) {
    for (uint64_t steps = chance(6000); steps > 0 && !all_closed(); steps--) (void)act();
    uint32_t victim = chance(n);
    int opening = 0;
    for (uint32_t i = 0; i < n; i++)
      opening |= w->workers[i].alive && w->workers[i].state == OPENING;
    /* One that parts may have let others close. */
    if (!opening && w->workers[victim].state < PARTING) kill_worker(victim, 1);
  }
  run(3000000);
  for (uint32_t i = 0; i < n && !kills; i++)
    assert_int_equal(w->workers[i].finished, w->iterations);
  close_world();
}

TEST(random_cases) {
  for (SEEDS(seed, 300)) random_case(seed, 0);
}

TEST(deaths) {
  for (SEEDS(seed, 300)) random_case(seed, 1 + (int)(seed % 3));
}

/* More senders than one pass of the kernels takes. */
TEST(many_senders) {
  open_world(WORKERS, 3, MLFAB_GRAPH_ALL, MLFAB_STOCHASTIC_NOTIFY_ACK, 5000);
  w->iterations = 2;
  w->coded = 0;
  w->dtype = MLFAB_F32;
  w->config.chunk_bytes = 1 << 16;
  for (uint32_t i = 0; i < w->n; i++) w->workers[i].last = 2;
  open_all();
  run(3000000);
  assert_int_equal(w->finished, 2 * WORKERS);
  close_world();
}

static void until_all(enum state state) {
  for (uint64_t steps = 0;; steps++) {
    uint32_t there = 0, alive = 0;
    for (uint32_t i = 0; i < w->n; i++) {
      alive += (uint32_t)w->workers[i].alive;
      there += w->workers[i].alive && w->workers[i].state == state;
    }
    if (there == alive) return;
    if (!act()) w->now += 10;
    assert_true(steps < 3000000);
  }
}

/* One that does not call: the deadline of the others names it, also those who do not hear of it. */
TEST(one_does_not_call) {
  for (uint32_t mode = MLFAB_STOCHASTIC_NOTIFY_ACK; mode <= MLFAB_STOCHASTIC_BSP; mode++) {
    open_world(7, 9, MLFAB_GRAPH_CHAIN, mode, 100);
    set_timeout(20 * BEAT);
    w->may_fail = 1;
    w->hold = 1;
    open_all();
    until_all(THINKING);
    w->hold = 0;
    for (uint32_t i = 0; i < 7; i++)
      if (i != 4) w->workers[i].until = w->now;
    uint64_t start = w->now;
    while (w->workers[0].generation == 0)
      if (!act()) w->now += 10;
    assert_true(w->now - start < 40 * BEAT);
    for (uint32_t i = 0; i < 7; i++) w->workers[i].last = 0; /* enough */
    w->workers[4].until = w->now;
    run(3000000);
    for (uint32_t i = 0; i < 7; i++) {
      assert_int_equal(w->workers[i].code, MLFAB_ERR_TIMEOUT);
      assert_int_equal(w->workers[i].rank, 4);
      assert_int_equal(w->workers[i].generation, 1);
      assert_non_null(strstr(w->workers[i].text, "worker 4 has not called it"));
    }
    close_world();
  }
}

/* One that closes before the others are done: they hear of it, but with ASYNC. One that closes last
 * disturbs nobody, though others' messages are still under way. */
TEST(one_closes) {
  for (uint32_t mode = MLFAB_STOCHASTIC_NOTIFY_ACK; mode <= MLFAB_STOCHASTIC_ASYNC; mode++) {
    for (int which = 0; which < 4; which++) {
      int large = which % 2;
      open_world(5, 23 + mode, which < 2 ? MLFAB_GRAPH_EXPANDER : MLFAB_GRAPH_CHAIN, mode,
                 large ? 3000 : 30);
      if (which >= 2) w->workers[2].pace = 20000; /* the others have begun the next */
      w->may_fail = mode != MLFAB_STOCHASTIC_ASYNC;
      w->abrupt = 1;
      w->workers[2].last = 3;
      open_all();
      for (uint64_t steps = 0; steps < 200000 && !all_closed(); steps++) {
        if (!act()) w->now += 10;
        for (uint32_t i = 0; i < 5; i++)
          if (w->workers[i].generation) w->workers[i].state = CLOSED;
      }
      for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(w->workers[i].generation, w->may_fail && i != 2);
        if (w->workers[i].generation == 0) continue;
        assert_int_equal(w->workers[i].code, MLFAB_ERR_PEER_CLOSED);
        assert_int_equal(w->workers[i].rank, 2);
      }
      close_world();
      open_world(5, 29 + mode, MLFAB_GRAPH_EXPANDER, mode, large ? 3000 : 30);
      w->abrupt = 1;
      open_all();
      run(3000000);
      close_world();
    }
  }
}

/* Options that differ fail the opening, and name the one. */
TEST(other_options) {
  for (int which = 0; which < 4; which++) {
    open_world(5, 11, MLFAB_GRAPH_EXPANDER, MLFAB_STOCHASTIC_NOTIFY_ACK, 100);
    w->may_fail = 1;
    for (uint32_t i = 0; i < 5; i++) {
      mlfab_stochastic_options usual = w->options;
      if (i == 3 && which == 0) w->options.graph = MLFAB_GRAPH_RING;
      if (i == 3 && which == 1) w->options.mode = MLFAB_STOCHASTIC_ASYNC;
      if (i == 3 && which == 2) w->count++;
      if (i == 3 && which == 3) w->dtype = MLFAB_F32;
      open_object(&w->workers[i]);
      w->options = usual;
      w->count = 100;
      w->dtype = MLFAB_F64;
    }
    run(1000000);
    for (uint32_t i = 0; i < 5; i++) {
      assert_int_equal(w->workers[i].code, MLFAB_ERR_MISMATCH);
      assert_int_equal(w->workers[i].rank, 3);
    }
    close_world();
  }
}

/* A graph that the survivors cannot have: calls say so, on all, until it is closed; others go on. */
TEST(no_graph_left) {
  const mlfab__comm_call barrier = {.kind = MLFAB__COLLECTIVE_BARRIER, .words = "a barrier"};
  mlfab_error error;
  open_world(4, 13, MLFAB_GRAPH_HYPERCUBE, MLFAB_STOCHASTIC_NOTIFY_ACK, 100);
  w->may_fail = w->hold = 1;
  open_all();
  until_all(THINKING);
  kill_worker(2, 1);
  for (uint32_t i = 0; i < 2000; i++) (void)act();
  for (uint32_t i = 0; i < 4; i++) {
    worker *me = &w->workers[i];
    mlfab_request request;
    if (i == 2) continue;
    int code =
        mlfab__stochastic_start(&me->comm, me->id, me->data, 0, w->now, NULL, &request, &error);
    assert_int_equal(code, MLFAB_ERR_PEER_DEAD);
    assert_int_equal(error.rank, 2);
    code = mlfab__stochastic_start(&me->comm, me->id, me->data, 0, w->now, NULL, &request, &error);
    assert_int_equal(code, MLFAB_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "no graph"));
    assert_int_equal(mlfab__stochastic_state(&me->comm, me->id, &error), MLFAB_ERR_ARGUMENT);
    assert_int_equal(mlfab__comm_start(&me->comm, &barrier, 0, w->now, &me->request, &error), 0);
    me->state = PARTING;
  }
  run(100000);
  close_world();
}

/* A call that waits for its epoch, which has no graph. */
TEST(no_graph_at_all) {
  open_world(6, 17, MLFAB_GRAPH_HYPERCUBE, MLFAB_STOCHASTIC_NOTIFY_ACK, 100);
  w->may_fail = w->hold = 1;
  open_all();
  for (uint32_t i = 0; i < 6; i++) w->workers[i].last = 1;
  until_all(THINKING);
  for (uint32_t i = 0; i < 6; i++) {
    mlfab_error error;
    assert_int_equal(mlfab__stochastic_state(&w->workers[i].comm, w->workers[i].id, &error),
                     MLFAB_ERR_ARGUMENT);
  }
  close_world();
}

/* Edges of the user's: what is wrong is told by rank. */
TEST(users_edges) {
  mlfab_error error;
  open_world(4, 19, MLFAB_GRAPH_USER, MLFAB_STOCHASTIC_NOTIFY_ACK, 10);
  w->edges[0] = (mlfab_edge){0, 1};
  w->edges[1] = (mlfab_edge){1, 2};
  w->edges[2] = (mlfab_edge){2, 0};
  w->edges[3] = (mlfab_edge){0, 3};
  w->options.edges = w->edges;
  w->options.nedges = 4; /* 3 is heard by nobody */
  w->may_fail = w->hold = 1;
  open_all();
  until_all(THINKING);
  for (uint32_t i = 0; i < 4; i++) {
    assert_int_equal(mlfab__stochastic_state(&w->workers[i].comm, w->workers[i].id, &error),
                     MLFAB_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "3"));
  }
  close_world();
}

/* What is refused before anything happens. */
TEST(refused) {
  mlfab_error error;
  mlfab_request request;
  uint32_t id = 77;
  double data[4] = {1, 2, NAN, 4};
  open_world(1, 21, MLFAB_GRAPH_ALL, 0, 4);
  mlfab__comm *comm = &w->workers[0].comm;
  mlfab_stochastic_options o = w->options, bad;
#define REFUSED(code, count, dtype, options) \
  assert_int_equal(                          \
      mlfab__stochastic_open(comm, count, dtype, options, 0, 1, &id, &request, &error), code)
  REFUSED(MLFAB_ERR_ARGUMENT, 4, MLFAB_F64, NULL);
  bad = o, bad.size = 4;
  REFUSED(MLFAB_ERR_ARGUMENT, 4, MLFAB_F64, &bad);
  REFUSED(MLFAB_ERR_ARGUMENT, 0, MLFAB_F64, &o);
  REFUSED(MLFAB_ERR_DTYPE, 4, MLFAB_I64, &o);
  REFUSED(MLFAB_ERR_DTYPE, 4, MLFAB_F16, &o);
  REFUSED(MLFAB_ERR_LIMIT, 1ull << 62, MLFAB_F64, &o);
  bad = o, bad.graph = MLFAB_GRAPH_STAR;
  REFUSED(MLFAB_ERR_ARGUMENT, 4, MLFAB_F64, &bad);
  bad.graph = 9;
  REFUSED(MLFAB_ERR_ARGUMENT, 4, MLFAB_F64, &bad);
  bad = o, bad.mode = 4;
  REFUSED(MLFAB_ERR_ARGUMENT, 4, MLFAB_F64, &bad);
  bad = o, bad.graph = MLFAB_GRAPH_USER;
  REFUSED(MLFAB_ERR_ARGUMENT, 4, MLFAB_F64, &bad);
  w->edges[0] = (mlfab_edge){0, 1};
  bad.edges = w->edges, bad.nedges = 1;
  REFUSED(MLFAB_ERR_ARGUMENT, 4, MLFAB_F64, &bad);
  assert_int_equal(id, 77);
#undef REFUSED
  assert_int_equal(mlfab__stochastic_open(comm, 4, MLFAB_F64, &o, 0, 1, &id, &request, &error), 0);
  mlfab_stochastic_info info = {.size = 0};
#define REFUSED(code, id, data) \
  assert_int_equal(mlfab__stochastic_start(comm, id, data, 0, 1, &info, &request, &error), code)
  data[2] = 3;
  REFUSED(MLFAB_ERR_ARGUMENT, id, data); /* info's size */
  info.size = sizeof info;
  data[2] = NAN;
  REFUSED(MLFAB_ERR_ARGUMENT, id + 1, data);
  REFUSED(MLFAB_ERR_ARGUMENT, 0, data);
  REFUSED(MLFAB_ERR_ARGUMENT, id, NULL);
  REFUSED(MLFAB_ERR_ARGUMENT, id, (uint8_t *)data + 4);
  REFUSED(MLFAB_ERR_NOT_FINITE, id, data);
  data[2] = 3;
  REFUSED(0, id, data); /* alone: its own mean */
#undef REFUSED
  assert_true(data[0] == 1 && data[2] == 3);
  assert_int_equal(info.iteration, 1);
  assert_int_equal(info.whole, 0);
  assert_int_equal(mlfab__stochastic_close(comm, id + 1, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab__stochastic_close(comm, id, &error), 0);
  close_world();
}

/* Without memory an opening or an iteration fails, as any other failure; nothing leaks or hangs. */
TEST(no_memory) {
  uint64_t failed = 0;
  for (SEEDS(seed, 1000)) {
    open_world(2 + (uint32_t)seed % 5, seed, MLFAB_GRAPH_EXPANDER, 1 + (uint32_t)seed % 3,
               1 + seed % 3 * 2000);
    w->may_fail = 1;
    set_timeout(60 * BEAT);
    w->fails = 5 + chance(60);
    open_all();
    for (uint64_t steps = 0; steps < 6000; steps++) {
      int most = 0;
      for (uint32_t i = 0; i < w->n; i++)
        if ((int)w->workers[i].generation > most) most = (int)w->workers[i].generation;
      if (most > FAILURES - 4) break;
      (void)act();
    }
    failed += w->failed;
    close_world();
  }
  if (testing_whole()) assert_true(failed > 0);
}

TESTS(NULL, NULL)
