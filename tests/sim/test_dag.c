/* test_dag.c - random task graphs over several ranks in the simulator, against an executor that does
 * one operation after the other; with links that break.
 *
 * A task graph is drawn as one list over all ranks, in which everything comes after what it waits
 * for. Every rank gets its part. Cells of 64-bit words are filled by operations that compute, by
 * messages, and by messages that are added; what they must hold in a round follows from the list
 * alone. An operation that computes looks whether it may run: once a round, when all it comes after
 * have been done, or as many as it needs. At the end of a round each rank compares all its cells.
 *
 * Half of the task graphs are persistent. Some operations wait for a trigger, which some ranks give
 * late; some are optional and often not triggered at all, so that messages come for rounds that are
 * over. */
#include "job.h"
#include "../../mlfab_partial.h"

enum { RANKS = 7, OPS = 160, DEPS = 6, ROUNDS = 9, NOBODY = -1 };
enum { COMPUTE, NOP, SEND, RECV, REDUCE, KINDS };

typedef struct op {
  int kind, outside, optional;
  uint32_t rank, number; /* whose, and what the library calls it */
  uint32_t need, ndeps, deps[DEPS];
  int cell;     /* the operation that owns the words it fills or sends, or NOBODY */
  int peer;     /* SEND: its RECV or REDUCE; those: their SEND */
  uint32_t tag; /* of messages */
  uint32_t len; /* words of its own cell */
  uint64_t *words;
  uint64_t *literal; /* what they must be at the end of a round */
  uint64_t runs;     /* rounds in which it computed, plus one of the last: 0 none yet */
} op;

typedef struct rank {
  mlfab *ctx;
  mlfab_dag *dag;
  uint32_t id, check;      /* check: the last operation */
  uint64_t round, checked; /* rounds that are over; that were compared */
  uint32_t at;             /* the next operation that may be triggered */
  mlfab_request request;
} rank;

typedef struct job {
  mlfab_sim *sim;
  uint64_t seed, dice;
  uint32_t ranks, nops;
  int persistent;
  rank rank[RANKS];
  op ops[OPS + RANKS];
} job;

static job w;

static uint32_t below(uint32_t n) { return (uint32_t)dice_below(&w.dice, n); }

/* A call that must succeed. */
static void must(rank *r, int code, const char *what) {
  if (code) wrong("rank %u: %s: %s (%s)", r->id, what, mlfab_error_name(code), last_text(r->ctx));
}
#define MUST(r, call) must(r, call, #call)

/* --- drawing a task graph --- */

static op *add(int kind, uint32_t owner) {
  op *o = &w.ops[w.nops++];
  memset(o, 0, sizeof *o);
  o->kind = kind;
  o->rank = owner;
  o->cell = o->peer = NOBODY;
  return o;
}

static void depend(op *o, uint32_t on) {
  for (uint32_t i = 0; i < o->ndeps; i++)
    if (o->deps[i] == on) return;
  if (o->ndeps < DEPS) o->deps[o->ndeps++] = on;
}

/* Who filled the cell last: the operation itself, or the last message that is added to it. */
static uint32_t filled_by(uint32_t cell) {
  uint32_t by = cell;
  for (uint32_t i = cell + 1; i < w.nops; i++)
    if (w.ops[i].kind == REDUCE && w.ops[i].cell == (int)cell) by = i;
  return by;
}

/* Up to n earlier operations of its rank that it can count on. What may be read is whole by
 * then. */
static void depend_on_some(op *o, uint32_t n, int only_computing) {
  uint32_t before = (uint32_t)(o - w.ops);
  for (uint32_t i = 0; i < 3 * n && o->ndeps < n && before > 0; i++) {
    const op *of = &w.ops[below(before)];
    if (of->rank != o->rank || of->optional || (only_computing && of->kind != COMPUTE)) continue;
    int reads = !only_computing && of->kind != SEND && of->cell != NOBODY;
    depend(o, reads ? filled_by((uint32_t)of->cell) : (uint32_t)(of - w.ops));
  }
}

static void own_cell(op *o, uint32_t len) {
  o->len = len;
  o->words = calloc(len, 8);
  o->literal = calloc(len, 8);
  assert_true(o->words && o->literal);
  o->cell = (int)(o - w.ops);
}

static uint32_t draw_len(void) {
  static const uint32_t most[] = {1, 4, 40, 1500, 30000};
  return 1 + below(most[below(below(4) ? 4 : 5)]);
}

static void draw_compute(uint32_t owner) {
  op *o = add(COMPUTE, owner);
  own_cell(o, draw_len());
  o->outside = below(5) == 0;
  if (!o->outside && below(3) == 0) {
    depend_on_some(o, 4, 1);
    o->need = o->ndeps ? 1 + below(o->ndeps) : 0;
  } else {
    depend_on_some(o, below(4), 0);
  }
  o->optional = o->outside && below(2);
}

/* Has somebody read it, who would see what is added later? */
static int was_read(uint32_t cell) {
  for (uint32_t i = 0; i < w.nops; i++) {
    const op *o = &w.ops[i];
    if (o->kind == SEND && o->cell == (int)cell) return 1;
    for (uint32_t k = 0; k < o->ndeps; k++) {
      const op *of = &w.ops[o->deps[k]];
      if (o->kind == COMPUTE && of->kind != SEND && of->cell == (int)cell) return 1;
    }
  }
  return 0;
}

static int draw_cell(uint32_t owner, int unread) {
  for (int i = 0; i < 12; i++) {
    uint32_t at = below(w.nops);
    const op *o = &w.ops[at];
    if (o->rank != owner || o->cell != (int)at || o->optional || (unread && was_read(at))) continue;
    if (unread && o->kind != COMPUTE) continue;
    return (int)at;
  }
  return NOBODY;
}

/* A message, of a cell of `from`; copied or added at `to`. */
static void draw_message(uint32_t from, uint32_t to) {
  int source = draw_cell(from, 0), target = below(3) ? NOBODY : draw_cell(to, 1);
  if (source == NOBODY || from == to) return;
  uint32_t after = filled_by((uint32_t)source), tag = below(1000) * OPS + w.nops;
  uint32_t len = w.ops[source].len;
  if (target != NOBODY && w.ops[target].len != len) target = NOBODY;
  op *s = add(SEND, from);
  s->cell = source;
  depend(s, after);
  depend_on_some(s, 1 + below(2), 0);
  op *r = add(target == NOBODY ? RECV : REDUCE, to);
  s->tag = r->tag = tag;
  s->peer = (int)(r - w.ops);
  r->peer = (int)(s - w.ops);
  if (target == NOBODY) {
    own_cell(r, len);
    depend_on_some(r, below(3), 0);
    s->optional = s->outside = r->optional = below(6) == 0;
  } else {
    depend(r, filled_by((uint32_t)target));
    r->cell = target;
  }
}

static void draw_nop(uint32_t owner) {
  op *o = add(NOP, owner);
  o->outside = below(3) == 0;
  depend_on_some(o, below(DEPS), 0);
  o->need = o->ndeps && !o->outside && below(2) ? 1 + below(o->ndeps) : 0;
}

static void draw(uint32_t n) {
  for (uint32_t r = 0; r < w.ranks; r++) { /* a clock each, so that persistent ones wait */
    op *o = add(COMPUTE, r);
    own_cell(o, draw_len());
    o->outside = 1;
  }
  while (w.nops + 2 < n) {
    uint32_t which = below(10), r = below(w.ranks);
    if (which < 4)
      draw_compute(r);
    else if (which < 9)
      draw_message(r, below(w.ranks));
    else
      draw_nop(r);
  }
  for (uint32_t r = 0; r < w.ranks; r++) {
    w.rank[r].check = w.nops;
    add(COMPUTE, r);
  }
}

/* --- the literal executor --- */

static uint64_t seed_word(uint32_t id, uint64_t round, uint32_t k) {
  return mix(w.seed * 7919 + mix(id * 1000003ull + round) + k);
}

/* What an operation that computes makes of what it comes after. */
static void compute_words(uint32_t id, uint64_t round, int literal) {
  const op *o = &w.ops[id];
  uint64_t *to = literal ? o->literal : o->words;
  for (uint32_t k = 0; k < o->len; k++) to[k] = seed_word(id, round, k);
  for (uint32_t d = 0; o->need == 0 && d < o->ndeps; d++) {
    const op *of = &w.ops[o->deps[d]];
    if (of->cell == NOBODY || of->kind == SEND) continue;
    const op *cell = &w.ops[of->cell];
    const uint64_t *words = literal ? cell->literal : cell->words;
    for (uint32_t k = 0; k < o->len; k++) to[k] += 3 * words[k % cell->len];
  }
}

static void execute(uint64_t round) {
  for (uint32_t id = 0; id < w.nops; id++) {
    const op *o = &w.ops[id];
    if (o->kind == COMPUTE) compute_words(id, round, 1);
    if (o->kind != RECV && o->kind != REDUCE) continue;
    const op *from = &w.ops[w.ops[o->peer].cell], *to = &w.ops[o->cell];
    for (uint32_t k = 0; k < to->len; k++)
      to->literal[k] = from->literal[k] + (o->kind == REDUCE ? to->literal[k] : 0);
  }
}

/* --- what runs inside --- */

static rank *of_rank(const op *o) { return &w.rank[o->rank]; }

static void compare(rank *r, uint64_t round) {
  execute(round);
  for (uint32_t id = 0; id < w.nops; id++) {
    const op *o = &w.ops[id];
    if (o->rank != r->id || o->cell != (int)id || o->optional) continue;
    for (uint32_t k = 0; k < o->len; k++) {
      if (o->words[k] != o->literal[k])
        wrong("rank %u, round %llu: word %u of operation %u is wrong", r->id,
              (unsigned long long)round, k, id);
    }
  }
  r->checked++;
}

static int run(void *user, uint64_t round) {
  op *o = user;
  rank *r = of_rank(o);
  uint32_t id = (uint32_t)(o - w.ops), before = 0, computing = 0;
  if (round != r->checked && !(o->optional && round + 1 == r->checked))
    wrong("rank %u: operation %u runs in a round that is not", r->id, id);
  if (o->runs == round + 1) wrong("rank %u: operation %u runs twice", r->id, id);
  o->runs = round + 1;
  for (uint32_t d = 0; d < o->ndeps; d++) {
    if (w.ops[o->deps[d]].kind != COMPUTE) continue;
    computing++;
    before += w.ops[o->deps[d]].runs == round + 1;
  }
  if (before < (o->need ? o->need : computing))
    wrong("rank %u, round %llu: operation %u runs too early", r->id, (unsigned long long)round, id);
  if (id == r->check)
    compare(r, round);
  else
    compute_words(id, round, 0);
  return 0;
}

/* --- the ranks --- */

static void add_op(rank *r, op *o) {
  const op *cell = o->cell == NOBODY ? NULL : &w.ops[o->cell];
  const op *peer = o->peer == NOBODY ? NULL : &w.ops[o->peer];
  uint32_t flags = (o->outside ? (uint32_t)MLFAB_DAG_OUTSIDE : 0) |
                   (o->optional ? (uint32_t)MLFAB_DAG_OPTIONAL : 0);
  switch (o->kind) {
    case COMPUTE:
      MUST(r, mlfab_dag_compute(r->dag, run, o, &o->number));
      break;
    case NOP:
      MUST(r, mlfab_dag_nop(r->dag, &o->number));
      break;
    case SEND:
      MUST(r, mlfab_dag_send(r->dag, (int32_t)peer->rank, o->tag, cell->words, cell->len * 8ull,
                             &o->number));
      break;
    case RECV:
      MUST(r, mlfab_dag_recv(r->dag, (int32_t)peer->rank, o->tag, cell->words, cell->len * 8ull,
                             &o->number));
      break;
    default:
      MUST(r, mlfab_dag_recv_reduce(r->dag, (int32_t)peer->rank, o->tag, cell->words, cell->len,
                                    MLFAB_I64, MLFAB_OP_SUM, &o->number));
  }
  MUST(r, mlfab_dag_set(r->dag, o->number, o->need, flags));
  for (uint32_t d = 0; d < o->ndeps; d++)
    MUST(r, mlfab_dag_after(r->dag, o->number, w.ops[o->deps[d]].number));
}

static void build(rank *r) {
  MUST(r, mlfab_dag_create(r->ctx, &r->dag));
  for (uint32_t id = 0; id < w.nops; id++) {
    op *o = &w.ops[id];
    if (o->rank != r->id) continue;
    add_op(r, o);
    /* Messages wait for the clock of their rank, or memory would be written while it is looked
     * at. */
    if (id >= w.ranks && o->kind != SEND && below(2) && o->need == 0)
      MUST(r, mlfab_dag_after(r->dag, o->number, w.ops[r->id].number));
    if (id == r->check) {
      for (uint32_t k = 0; k < id; k++)
        if (w.ops[k].rank == r->id && !w.ops[k].optional)
          MUST(r, mlfab_dag_after(r->dag, o->number, w.ops[k].number));
    }
  }
}

/* Triggers what is to be triggered, one after the other; looks whether the round is over. */
static void step(void *user) {
  rank *r = user;
  int done = 0;
  for (; r->at < w.nops; r->at++) {
    const op *o = &w.ops[r->at];
    if (o->rank != r->id || !o->outside || (o->optional && below(2))) continue;
    r->at++;
    int code = mlfab_dag_trigger(r->dag, o->number);
    if (code != MLFAB_ERR_STATE || !o->optional) must(r, code, "mlfab_dag_trigger");
    sim_later(w.sim, step, r, below(4) ? 1000 : below(1000000));
    return;
  }
  if (r->checked > r->round) done = w.persistent;
  if (!w.persistent) {
    mlfab_result result = {0};
    MUST(r, mlfab_test(r->ctx, r->request, &done, &result));
    if (done) must(r, result.status, "a round");
  }
  if (!done) {
    sim_later(w.sim, step, r, 50000);
    return;
  }
  MUST(r, mlfab_dag_wait(r->dag, r->round++, 20 * SECOND));
  r->at = 0;
  if (r->round == ROUNDS) return;
  if (!w.persistent) MUST(r, mlfab_dag_start(r->dag, 20 * SECOND, &r->request));
  sim_later(w.sim, step, r, below(2) ? 1000 : below(3000000));
}

static void open_rank(void *user) {
  rank *r = user;
  MUST(r, mlfab_dag_open(r->dag, w.persistent, 20 * SECOND));
  if (!w.persistent) MUST(r, mlfab_dag_start(r->dag, 20 * SECOND, &r->request));
  sim_later(w.sim, step, r, 1000 + below(1000000));
}

static void open_world(void) {
  mlfab_sim_options sim = {.size = sizeof sim, .hosts = w.ranks, .seed = w.seed};
  mlfab_config config;
  assert_int_equal(mlfab_sim_create(&sim, &w.sim), 0);
  for (uint32_t i = 0; i < w.ranks; i++) {
    mlfab_config_init(&config);
    config.workers = w.ranks;
    config.rank = (int32_t)i;
    config.heartbeat_ns = 100 * MS;
    w.rank[i].id = i;
    sim_open(w.sim, i, &config, &w.rank[i].ctx);
  }
  for (uint32_t i = 0; i < w.ranks; i++) sim_await(w.sim, w.rank[i].ctx);
}

static void close_world(void) {
  mlfab_stats stats;
  for (uint32_t i = 0; i < w.ranks; i++) {
    rank *r = &w.rank[(i + w.seed) % w.ranks];
    MUST(r, mlfab_dag_close(&r->dag));
    mlfab_sim_run(w.sim, below(10) * MS);
  }
  mlfab_sim_run(w.sim, SECOND);
  for (uint32_t i = 0; i < w.ranks; i++) {
    MUST(&w.rank[i], mlfab_get_stats(w.rank[i].ctx, &stats, sizeof stats));
    if (stats.collective_epochs != 1 || stats.frames_refused) wrong("rank %u: a failure", i);
    mlfab_abandon(&w.rank[i].ctx);
  }
  for (uint32_t id = 0; id < w.nops; id++) {
    free(w.ops[id].words);
    free(w.ops[id].literal);
  }
  mlfab_sim_destroy(&w.sim);
}

static int finished(void) {
  for (uint32_t i = 0; i < w.ranks; i++)
    if (w.rank[i].round < ROUNDS) return 0;
  return 1;
}

static void run_seed(uint64_t seed) {
  memset(&w, 0, sizeof w);
  w.seed = seed;
  w.dice = mix(seed);
  w.ranks = 1 + below(RANKS);
  w.persistent = (int)below(2);
  draw(w.ranks + 4 + below(below(2) ? 30 : OPS - RANKS));
  seeds_about(" (%u ranks, %u operations, %s)", w.ranks, w.nops,
              w.persistent ? "persistent" : "called");
  open_world();
  for (uint32_t i = 0; i < w.ranks; i++) build(&w.rank[i]);
  if (below(3)) {
    const mlfab_sim_options faults = {.size = sizeof faults,
                                      .loss = below(2) ? 0.02 : 0.0,
                                      .duplicate = below(2) ? 0.02 : 0.0,
                                      .reorder = below(2) ? 0.05 : 0.0};
    assert_int_equal(mlfab_sim_set_faults(w.sim, &faults), 0);
  }
  for (uint32_t i = 0; i < w.ranks; i++)
    sim_later(w.sim, open_rank, &w.rank[i], 1 + below(1000000));
  uint64_t until = mlfab_sim_clock(w.sim) + 60 * SECOND;
  while (!finished()) {
    sim_step(w.sim);
    if (mlfab_sim_clock(w.sim) > until) wrong("it hangs");
  }
  close_world();
}

TEST(test_random) { seeds_run("dag", test_cases(60), run_seed); }

TESTS(NULL, NULL)
