/* test_partial.c - partial reductions of all members in one process: calls, messages and task graphs
 * in a random order, messages as late as they like, failures in the middle; compared with a ledger
 * that keeps every contribution by itself. MLFAB_SEED=n one random world alone, MLFAB_SCALE=10 ten
 * times as many. */
#include "core/kernels/kernels_combine.h"
#include "core/coll/partial.h"
#include "core/base/rng.h"

#include "budget.h"
#include "../testing.h"

enum { MEMBERS = 33, BLOCKS = 3, ROUNDS = 512 };

static mlfab__env env;
static uint64_t rounds_total;

static uint32_t below(mlfab__rng *prng, uint32_t bound) {
  return (uint32_t)mlfab__rng_below(prng, bound);
}

/* ---- a world of members and messages */

typedef struct message {
  uint32_t from, to, tag;
  uint64_t round, bytes;
  const uint8_t *source; /* read on delivery */
  uint8_t *copy;         /* or what was copied at once */
} message;

typedef struct run {
  mlfab__dag dag;
  uint8_t **staged; /* by operation */
  uint64_t number;
  uint32_t lent, notices;
  int armed;
} run;

/* The ledger of one member: how often it has called, and what of it is in which round. Element i
 * of a block is of rank i; a call adds 1 to that of the first block, and its own value to the
 * others. */
typedef struct ledger {
  int64_t calls, value;             /* in nothing yet */
  int64_t given_calls, given_value; /* to the open round */
  int given;
  uint64_t last_step; /* that it has called, plus one */
} ledger;

typedef struct member {
  mlfab__partial partial;
  uint32_t rank;
  run runs[2];
  uint64_t armed_upto;
  message *early;
  uint32_t nearly, early_room;
  ledger book;
  int64_t *data;
  int calling;
  uint32_t slowness; /* it calls when one of so many is drawn */
  uint64_t calls_left;
  uint64_t seen; /* the newest round that it got, plus one */
} member;

/* A round, as the ledger knows it. */
typedef struct past {
  int64_t calls[MEMBERS], value[MEMBERS]; /* by rank */
  uint8_t took[MEMBERS], bit[MEMBERS];
  uint32_t members, bits, notices, initiators;
  int delivered;
} past;

typedef struct world {
  mlfab__rng prng;
  mlfab__partial_spec spec;
  uint32_t ranks; /* at first */
  uint32_t epoch;
  uint32_t members;
  uint32_t list[MEMBERS]; /* ranks of members */
  member *of[MEMBERS];    /* by member */
  message *events;
  uint32_t nevents, room, hurry;
  past *rounds;                                   /* by number */
  int64_t got_calls[MEMBERS], got_value[MEMBERS]; /* in results, by rank */
} world;

static void put(message **list, uint32_t *n, uint32_t *room, message m) {
  if (*n == *room) {
    *room = *room ? 2 * *room : 64;
    *list = realloc(*list, *room * sizeof m);
    assert_non_null(*list);
  }
  (*list)[(*n)++] = m;
}

static uint8_t *duplicate(const uint8_t *bytes, uint64_t n) {
  uint8_t *copy = malloc(n + 1);
  assert_non_null(copy);
  if (n) memcpy(copy, bytes, n);
  return copy;
}

static uint8_t *memory_of(member *m, uint64_t round, const mlfab__dag_op *op) {
  uint8_t *space = op->space == MLFAB__PARTIAL_DATA ? m->partial.data[round & 1]
                                                    : (uint8_t *)m->partial.bitmap[round & 1];
  uint64_t bytes =
      op->space == MLFAB__PARTIAL_DATA ? m->partial.bytes : 8 * ((m->partial.members + 63) / 64);
  assert_true(op->at + op->bytes <= bytes);
  return space + op->at;
}

/* ---- the ledger */

static void took(world *w, member *m, uint64_t round) {
  past *p = &w->rounds[round];
  ledger *book = &m->book;
  assert_false(p->delivered);
  assert_false(p->took[m->rank]);
  assert_false(book->given);
  p->took[m->rank] = 1;
  book->given = 1;
  p->calls[m->rank] = book->given_calls = book->calls;
  p->value[m->rank] = book->given_value = book->value;
  book->calls = book->value = 0;
  p->bit[m->rank] = book->last_step == round + 1;
  p->bits += p->bit[m->rank];
}

static uint32_t quorum_of(const world *w) {
  if (w->spec.mode != MLFAB_PARTIAL_QUORUM) return 1;
  return w->spec.quorum < w->members ? w->spec.quorum : w->members;
}

/* A round's result stands: all have given, and enough of them in time. */
static void delivered(world *w, member *m, uint64_t round) {
  past *p = &w->rounds[round];
  m->book.given = 0;
  if (p->delivered++) return;
  for (uint32_t i = 0; i < w->members; i++) assert_true(p->took[w->list[i]]);
  assert_true(p->bits >= quorum_of(w));
  p->members = w->members;
  if (w->spec.mode == MLFAB_PARTIAL_MAJORITY)
    assert_true(p->bit[w->list[mlfab__partial_draw(&m->partial, round)]]);
  for (uint32_t r = 0; r < w->ranks; r++) {
    w->got_calls[r] += p->calls[r];
    w->got_value[r] += p->value[r];
  }
}

/* What a call got. */
static void check_answer(world *w, member *m) {
  const mlfab_partial_info *info = &m->partial.answer;
  const past *p = &w->rounds[info->round];
  assert_true(p->delivered);
  assert_int_equal(info->step + 1, m->book.last_step);
  assert_true(info->round >= info->step);
  assert_true(info->round + 1 >= m->seen);
  if (w->spec.results == MLFAB_PARTIAL_QUEUED) assert_int_equal(info->round, info->step);
  m->seen = info->round + 1;
  assert_int_equal(info->active, p->bits);
  assert_int_equal(info->workers, p->members);
  assert_int_equal(info->included, info->round == info->step && p->bit[m->rank]);
  assert_int_equal(info->stale, m->book.calls + (m->book.given ? m->book.given_calls : 0));
  for (uint32_t r = 0; r < w->ranks; r++) {
    assert_int_equal(info->bitmap[0] >> r & 1, p->bit[r]);
    for (uint32_t b = 0; b < BLOCKS; b++)
      assert_int_equal(m->data[b * w->ranks + r], b ? p->value[r] : p->calls[r]);
  }
  m->calling = 0;
}

/* ---- task graphs */

static void go_on(world *w, member *m);

static void apply(member *m, run *p, uint32_t id, const uint8_t *bytes) {
  const mlfab__dag_op *op = &p->dag.ops[id];
  uint8_t *to = memory_of(m, p->number, op);
  for (uint64_t i = 0; i < op->bytes / 8; i++) {
    uint64_t own, in;
    memcpy(&own, to + 8 * i, 8);
    memcpy(&in, bytes + 8 * i, 8);
    own = op->kind == MLFAB__DAG_RECV ? in : op->reduce ? own | in : own + in;
    memcpy(to + 8 * i, &own, 8);
  }
  mlfab__dag_done(&p->dag, id);
}

static void send(world *w, member *m, run *p, uint32_t id) {
  const mlfab__dag_op *op = &p->dag.ops[id];
  message f = {.from = m->partial.me, .to = op->peer, .tag = op->tag, .round = p->number};
  f.bytes = op->bytes;
  f.source = op->bytes ? memory_of(m, p->number, op) : NULL;
  if (op->bytes == 0 && op->tag < 2) p->notices++;
  if (op->copy || op->bytes == 0) {
    f.copy = duplicate(f.source, f.bytes);
  } else {
    p->lent++;
  }
  put(&w->events, &w->nevents, &w->room, f);
  mlfab__dag_done(&p->dag, id);
}

static void compute(world *w, member *m, run *p, uint32_t id) {
  uint32_t code = p->dag.ops[id].code;
  if (code == MLFAB__PARTIAL_INITIATE) w->rounds[p->number].initiators++;
  if (code == MLFAB__PARTIAL_TAKE) took(w, m, p->number);
  if (code == MLFAB__PARTIAL_DELIVER) delivered(w, m, p->number);
  if (mlfab__partial_compute(&m->partial, &p->dag, p->number, code)) {
    check_answer(w, m);
  } else {
    assert_true(code != MLFAB__PARTIAL_DELIVER || !m->calling || m->book.last_step > p->number + 1);
  }
  mlfab__dag_done(&p->dag, id);
}

/* One operation of one run: 1 when there was any. */
static int run_one(world *w, member *m, run *p) {
  uint32_t id;
  if (!p->armed || !mlfab__dag_next(&p->dag, &id)) return 0;
  switch (p->dag.ops[id].kind) {
    case MLFAB__DAG_SEND:
      send(w, m, p, id);
      break;
    case MLFAB__DAG_COMPUTE:
      compute(w, m, p, id);
      break;
    case MLFAB__DAG_NOP:
      mlfab__dag_done(&p->dag, id);
      break;
    default:
      if (!p->staged[id]) break;
      apply(m, p, id, p->staged[id]);
      free(p->staged[id]);
      p->staged[id] = NULL;
  }
  go_on(w, m);
  return 1;
}

static void arrive(world *w, member *m, message f) {
  run *p = &m->runs[f.round & 1];
  if (f.round >= m->armed_upto) {
    put(&m->early, &m->nearly, &m->early_room, f);
    return;
  }
  if (!f.copy) f.copy = duplicate(f.source, f.bytes);
  if (p->armed && p->number == f.round && !mlfab__dag_finished(&p->dag)) {
    uint32_t id = mlfab__dag_find_recv(&p->dag, f.from, f.tag);
    assert_int_not_equal(id, MLFAB__DAG_NONE);
    assert_int_equal(p->dag.ops[id].bytes, f.bytes);
    assert_int_not_equal(mlfab__dag_state(&p->dag, id), MLFAB__DAG_DONE);
    if (mlfab__dag_state(&p->dag, id) == MLFAB__DAG_RUNNING) {
      apply(m, p, id, f.copy);
    } else {
      p->staged[id] = f.copy;
      f.copy = NULL;
    }
  } else {
    assert_int_equal(f.bytes, 0); /* only what activates may come too late */
  }
  free(f.copy);
  if (f.source) {
    run *sender = &w->of[f.from]->runs[f.round & 1];
    if (sender->armed && sender->number == f.round && sender->lent) {
      sender->lent--;
      go_on(w, w->of[f.from]);
    }
  }
  go_on(w, m);
}

static void arm_next(world *w, member *m) {
  run *p = &m->runs[m->armed_upto & 1];
  uint32_t n = m->nearly;
  p->armed = 1;
  p->number = m->armed_upto++;
  assert_true(p->number < ROUNDS);
  p->lent = p->notices = 0;
  mlfab__dag_start(&p->dag);
  for (uint32_t i = 0; i < n; i++) {
    message f = m->early[0];
    memmove(m->early, m->early + 1, --m->nearly * sizeof f);
    arrive(w, m, f);
  }
}

/* What the runner owes a member after every event. */
static void go_on(world *w, member *m) {
  for (uint32_t i = 0; i < 2; i++) {
    run *p = &m->runs[i];
    if (!p->armed || p->lent || !mlfab__dag_finished(&p->dag)) continue;
    for (uint32_t id = 0; id < p->dag.nops; id++) {
      const mlfab__dag_op *op = &p->dag.ops[id];
      int state = mlfab__dag_state(&p->dag, id);
      if (state == MLFAB__DAG_READY) return; /* a notice that is still to go */
      if (!op->optional) assert_int_equal(state, MLFAB__DAG_DONE);
      assert_null(p->staged[id]);
    }
    w->rounds[p->number].notices += p->notices;
    p->armed = 0;
  }
  while (m->partial.settled && !m->runs[m->armed_upto & 1].armed) arm_next(w, m);
  run *open = &m->runs[m->partial.over & 1];
  if (!open->armed || open->number != m->partial.over) return;
  uint32_t op = mlfab__partial_trigger(&m->partial);
  if (op != MLFAB__DAG_NONE) mlfab__dag_trigger(&open->dag, op);
  if (mlfab__partial_may_take(&m->partial)) mlfab__dag_trigger(&open->dag, m->partial.plan.take);
}

/* ---- calls, epochs */

static void call(world *w, member *m) {
  int64_t value = (int64_t)mlfab__rng_below(&w->prng, 1u << 30);
  memset(m->data, 0, w->spec.count * 8);
  for (uint32_t b = 0; b < BLOCKS; b++) m->data[b * w->ranks + m->rank] = b ? value : 1;
  m->book.calls++;
  m->book.value += value;
  m->calls_left--;
  m->calling = 1;
  int at_once = mlfab__partial_call(&m->partial, m->data);
  m->book.last_step = m->partial.step;
  if (at_once) check_answer(w, m);
  go_on(w, m);
}

static void begin(world *w, int fresh) {
  uint64_t base = 0;
  uint32_t at = 0;
  w->epoch++;
  for (uint32_t i = 0; i < w->members; i++) base = mlfab__max(base, w->of[i]->partial.given);
  uint8_t algorithm = (uint8_t)(1 + below(&w->prng, MLFAB_ALGORITHM_COUNT - 2));
  algorithm = (uint8_t)(algorithm + (algorithm >= MLFAB_ALGORITHM_PLANNED));
  for (; at < w->members; at++) {
    member *m = w->of[at];
    mlfab__partial_begin(&m->partial, w->members, at, w->list);
    for (uint32_t p = 0; p < 2; p++) {
      assert_int_equal(mlfab__partial_build(&m->partial, &m->runs[p].dag, algorithm), 0);
      m->runs[p].staged = calloc(m->runs[p].dag.nops, sizeof(uint8_t *));
      m->runs[p].armed = 0;
    }
    if (!fresh && below(&w->prng, 3) == 0 && m->calls_left) call(w, m); /* between epochs */
    if ((m->book.given && base == m->partial.over) || m->partial.over > base) {
      m->book.calls += m->book.given_calls;
      m->book.value += m->book.given_value;
    }
    m->book.given = 0;
    mlfab__partial_mark_epoch(&m->partial, w->epoch);
    if (m->partial.over > 0) { /* what a peer cannot have said changes nothing */
      m->partial.marks.now.base = m->partial.over - 1;
      assert_int_equal(mlfab__partial_settle(&m->partial, w->epoch), MLFAB_ERR_FRAME);
      assert_false(m->partial.settled);
    }
    m->partial.marks.now.base = base + 1;
    assert_int_equal(mlfab__partial_settle(&m->partial, w->epoch), 0);
    m->book.last_step = m->partial.step;
    m->armed_upto = base;
  }
  /* A round that no call got, or only of those who are dead, has not been. */
  for (uint32_t r = 0; w->rounds[base].delivered && r < w->ranks; r++) {
    w->got_calls[r] -= w->rounds[base].calls[r];
    w->got_value[r] -= w->rounds[base].value[r];
  }
  memset(&w->rounds[base], 0, 2 * sizeof w->rounds[base]);
  for (uint32_t i = 0; i < w->members; i++) go_on(w, w->of[i]);
}

static void end_plays(member *m) {
  for (uint32_t p = 0; p < 2; p++) {
    for (uint32_t id = 0; id < m->runs[p].dag.nops; id++) free(m->runs[p].staged[id]);
    free(m->runs[p].staged);
    m->runs[p].staged = NULL;
    mlfab__dag_clear(&m->runs[p].dag);
  }
  for (uint32_t i = 0; i < m->nearly; i++) free(m->early[i].copy);
  m->nearly = 0;
}

static void end_epoch(world *w) {
  for (uint32_t i = 0; i < w->nevents; i++) free(w->events[i].copy);
  w->nevents = 0;
  for (uint32_t i = 0; i < w->members; i++) {
    end_plays(w->of[i]);
    mlfab__partial_end(&w->of[i]->partial);
    w->of[i]->calling = 0;
  }
}

static void free_member(member *m) {
  for (uint32_t p = 0; p < 2; p++) mlfab__dag_free(&m->runs[p].dag);
  mlfab__partial_free(&m->partial);
  free(m->early);
  free(m->data);
  free(m);
}

/* An epoch fails; now and then somebody does not live to see the next. */
static void fail_epoch(world *w) {
  end_epoch(w);
  if (w->members > 1 && below(&w->prng, 2) == 0) {
    uint32_t who = below(&w->prng, w->members);
    free_member(w->of[who]);
    w->members--;
    memmove(w->of + who, w->of + who + 1, (w->members - who) * sizeof w->of[0]);
    memmove(w->list + who, w->list + who + 1, (w->members - who) * sizeof w->list[0]);
  }
  begin(w, 0);
}

/* Members in the order of their ranks, who call whenever they may. */
static void make_members(world *w) {
  w->rounds = calloc(ROUNDS + 2, sizeof *w->rounds);
  for (uint32_t i = 0; i < w->members; i++) {
    member *m = w->of[i] = calloc(1, sizeof *m);
    w->list[i] = m->rank = i;
    assert_int_equal(mlfab__partial_init(&m->partial, &env, &w->spec), 0);
    for (uint32_t p = 0; p < 2; p++) mlfab__dag_init(&m->runs[p].dag, &env);
    m->data = calloc(w->spec.count, 8);
    m->slowness = 1;
  }
}

/* Some members, of whom one alone makes a round. */
static world *make_solo(uint32_t members, uint64_t seed, mlfab__partial_spec spec) {
  world *w = calloc(1, sizeof *w);
  mlfab__rng_seed(&w->prng, seed);
  w->members = w->ranks = members;
  w->hurry = 1 + below(&w->prng, 15);
  w->spec = spec;
  w->spec.mode = MLFAB_PARTIAL_SOLO;
  w->spec.reduce_or = 6;
  w->spec.dtype = MLFAB_I64;
  w->spec.width = 8;
  w->spec.count = BLOCKS * members;
  make_members(w);
  begin(w, 1);
  return w;
}

static world *make_world(uint64_t seed) {
  world *w = calloc(1, sizeof *w);
  mlfab__rng *prng = &w->prng;
  mlfab__rng_seed(prng, seed);
  w->members = w->ranks = 1 + below(prng, below(prng, 8) ? 9 : MEMBERS);
  w->spec = (mlfab__partial_spec){.mode = 1 + below(prng, 3),
                                  .quorum = 1 + below(prng, w->members),
                                  .results = below(prng, 2),
                                  .queue_max = 1 + below(prng, 4),
                                  .segment = 8 << below(prng, 8),
                                  .reduce_or = 1 + MLFAB__OP_OR,
                                  .dtype = MLFAB_I64,
                                  .width = 8,
                                  .count = BLOCKS * w->ranks,
                                  .seed = mlfab__rng_next(prng)};
  w->hurry = 1 + below(prng, 15);
  make_members(w);
  for (uint32_t i = 0; i < w->members; i++) w->of[i]->slowness = 1u << below(prng, 9);
  /* The order of members is not that of ranks. */
  for (uint32_t i = 0; i < w->members; i++) {
    uint32_t j = below(prng, i + 1), rank = w->list[i];
    member *m = w->of[i];
    w->of[i] = w->of[j];
    w->of[j] = m;
    w->list[i] = w->list[j];
    w->list[j] = rank;
  }
  begin(w, 1);
  return w;
}

static int event_one(world *w) {
  if (w->nevents == 0) return 0;
  uint32_t i = below(&w->prng, w->nevents);
  message f = w->events[i];
  w->events[i] = w->events[--w->nevents];
  arrive(w, w->of[f.to], f);
  return 1;
}

static int run_any(world *w, int one) {
  if (one) {
    member *m = w->of[below(&w->prng, w->members)];
    return run_one(w, m, &m->runs[below(&w->prng, 2)]);
  }
  for (uint32_t i = 0; i < w->members; i++)
    for (uint32_t p = 0; p < 2; p++)
      if (run_one(w, w->of[i], &w->of[i]->runs[p])) return 1;
  return 0;
}

/* A member that may call does, with its own slowness. */
static int call_any(world *w, int must) {
  uint32_t at = below(&w->prng, w->members);
  for (uint32_t i = 0; i < (must ? w->members : 1); i++) {
    member *m = w->of[(at + i) % w->members];
    if (m->calling || !m->calls_left) continue;
    if (!must && below(&w->prng, m->slowness)) continue;
    call(w, m);
    return 1;
  }
  return 0;
}

/* Until all have made their calls and everything is quiet. */
static void run_world(world *w, uint32_t failures) {
  uint32_t until_failure = failures ? 1 + below(&w->prng, 2000) : 0;
  for (;;) {
    if (until_failure && --until_failure == 0) {
      fail_epoch(w);
      if (--failures) until_failure = 1 + below(&w->prng, 2000);
    }
    int moved = call_any(w, 0);
    moved |= below(&w->prng, 16) < w->hurry ? run_any(w, 1) : event_one(w);
    if (!moved && !run_any(w, 0) && !event_one(w) && !call_any(w, 1)) break;
  }
}

/* What is pending in the end, and that with it nothing is lost and nothing doubled. Of the dead
 * nothing is asked. */
static void check_end(world *w, const uint64_t *calls) {
  uint32_t depth = 0;
  while ((1u << depth) < w->members) depth++;
  for (uint32_t i = 0; i < w->members; i++) {
    member *m = w->of[i];
    int64_t *left = calloc(w->spec.count, 8);
    assert_false(m->calling);
    assert_int_equal(m->calls_left, 0);
    assert_int_equal(mlfab__partial_flush_room(&m->partial), 0);
    mlfab__partial_flush(&m->partial, left);
    mlfab__partial_flushed(&m->partial, 1);
    assert_int_equal(w->got_calls[m->rank] + left[m->rank], calls[m->rank]);
    assert_int_equal(m->book.calls, left[m->rank]);
    for (uint32_t b = 1; b < BLOCKS; b++)
      assert_int_equal(left[b * w->ranks + m->rank], m->book.value);
    for (uint64_t e = 0; e < w->spec.count; e++)
      if (e % w->ranks != m->rank) assert_int_equal(left[e], 0);
    mlfab__partial_flush(&m->partial, left);
    for (uint64_t e = 0; e < w->spec.count; e++) assert_int_equal(left[e], 0);
    mlfab__partial_flushed(&m->partial, 0);
    free(left);
  }
}

static uint64_t count_rounds(const world *w) {
  uint64_t n = 0;
  while (n < ROUNDS && w->rounds[n].delivered) n++;
  return n;
}

static void free_world(world *w) {
  end_epoch(w);
  for (uint32_t i = 0; i < w->members; i++) free_member(w->of[i]);
  free(w->events);
  free(w->rounds);
  free(w);
}

/* ---- cases */

/* A world in which all make as many calls, so that every call returns whatever the mode; with
 * failures, after which steps are others, only solo ones are certain to. */
static void one_world(uint64_t seed) {
  world *w = make_world(seed);
  uint64_t steps = 1 + below(&w->prng, below(&w->prng, 8) ? 60 : 400), calls[MEMBERS];
  for (uint32_t i = 0; i < w->members; i++) {
    w->of[i]->calls_left = steps;
    calls[w->of[i]->rank] = steps;
  }
  run_world(w, 0);
  for (uint64_t r = 0; r < steps; r++) {
    const past *p = &w->rounds[r];
    assert_int_equal(p->delivered, w->members);
    assert_true(p->initiators >= 1);
    if (w->spec.mode != MLFAB_PARTIAL_SOLO) assert_int_equal(p->initiators, 1);
    if (p->initiators == 1) assert_int_equal(p->notices, w->members - 1);
    assert_true(p->notices <= w->members * w->of[0]->partial.levels);
  }
  assert_false(w->rounds[steps].delivered);
  rounds_total += steps;
  check_end(w, calls);
  free_world(w);
}

TEST(test_random) {
  for (SEEDS(seed, 100)) one_world(seed);
  assert_int_equal(env.bytes, 0);
}

/* Epochs end in the middle. Those who call less than the others would be waited for: whoever is
 * left calls until the others have come through. */
static void one_failing_world(uint64_t seed) {
  world *w = make_world(seed);
  uint64_t steps = 10 + below(&w->prng, 60), calls[MEMBERS];
  for (uint32_t i = 0; i < w->members; i++) {
    w->of[i]->calls_left = steps;
    calls[w->of[i]->rank] = steps;
  }
  run_world(w, 1 + below(&w->prng, 5));
  for (int calling = 1; calling;) {
    calling = 0;
    for (uint32_t i = 0; i < w->members; i++) calling |= w->of[i]->calling;
    for (uint32_t i = 0; calling && i < w->members; i++) {
      member *m = w->of[i];
      if (m->calling) continue;
      m->calls_left++;
      calls[m->rank]++;
    }
    run_world(w, 0);
  }
  rounds_total += count_rounds(w);
  check_end(w, calls);
  free_world(w);
}

TEST(test_failures) {
  for (SEEDS(seed, 100)) one_failing_world(seed);
  assert_int_equal(env.bytes, 0);
}

/* Every initiator alone, every pair, and all, for every number of members. */
static void activate(uint32_t members, uint32_t first, uint32_t second, int all) {
  world *w = make_solo(members, members * 1000003 + first * 1009 + second,
                       (mlfab__partial_spec){.segment = 4096});
  for (uint32_t i = 0; i < members; i++) w->of[i]->calls_left = all || i == first || i == second;
  for (uint32_t i = 0; i < members; i++)
    if (w->of[i]->calls_left) call(w, w->of[i]);
  run_world(w, 0);
  const past *p = &w->rounds[0];
  assert_int_equal(p->delivered, members);
  if (!all && first == second) assert_int_equal(p->notices, members - 1);
  assert_true(p->notices <= members * w->of[0]->partial.levels);
  free_world(w);
}

TEST(test_activation) {
  for (uint32_t members = 1; members <= MEMBERS; members++) {
    for (uint32_t a = 0; a < members; a++) activate(members, a, a, 0);
    for (uint32_t b = 1; b < members; b++)
      activate(members, b * 7 % members, (b * 7 + b) % members, 0);
    activate(members, 0, 0, 1);
  }
  assert_int_equal(env.bytes, 0);
}

/* Draws are uniform, chi squared at p = 0.001, and not the same from round to round. */
TEST(test_draws) {
  enum { DRAWS = 32 * 1024 };
  mlfab__partial partial = {0};
  uint32_t seen[32] = {0}, again = 0, last = 32;
  double chi = 0;
  partial.members = 32;
  partial.spec.seed = 7;
  for (uint32_t r = 0; r < DRAWS; r++) {
    uint32_t drawn = mlfab__partial_draw(&partial, r);
    assert_in_range(drawn, 0, 31);
    seen[drawn]++;
    again += drawn == last;
    last = drawn;
  }
  for (uint32_t i = 0; i < 32; i++) {
    double off = (double)seen[i] - DRAWS / 32;
    chi += off * off / (DRAWS / 32);
  }
  assert_true(chi < 61.1); /* 31 degrees of freedom */
  assert_in_range(again, DRAWS / 32 - 100, DRAWS / 32 + 100);
}

/* A queue that is full holds the next round up, until a call takes a result; a lagging worker with
 * LATEST is answered with the newest round, and its calls come together with the next. */
static void lag(uint32_t results, uint32_t queue_max) {
  world *w = make_solo(2, 5, (mlfab__partial_spec){.results = results, .queue_max = queue_max});
  w->of[0]->calls_left = 6;
  run_world(w, 0);
  if (results == MLFAB_PARTIAL_QUEUED) {
    assert_int_equal(w->of[0]->partial.over, queue_max);
    assert_true(w->of[0]->calling);
    w->of[1]->calls_left = 1;
    run_world(w, 0);
    assert_int_equal(w->of[0]->partial.over, queue_max + 1);
    assert_int_equal(w->of[1]->partial.answer.round, 0);
    assert_int_equal(w->of[1]->partial.answer.stale,
                     1); /* the round that had waited took it then */
    assert_int_equal(w->rounds[queue_max].calls[1], 1);
  } else {
    assert_int_equal(w->of[0]->partial.over, 6);
    w->of[1]->calls_left = 3;
    run_world(w, 0);
    assert_int_equal(w->of[1]->partial.answer.round, 5);
    assert_int_equal(w->of[1]->partial.answer.step, 2);
    assert_int_equal(w->of[1]->partial.answer.stale, 3);
    w->of[0]->calls_left = 1;
    run_world(w, 0);
    assert_int_equal(w->rounds[6].calls[1], 3);
    assert_int_equal(w->rounds[6].bits, 1);
  }
  w->of[1]->calls_left += 5;
  run_world(w, 0);
  free_world(w);
}

TEST(test_lag) {
  lag(MLFAB_PARTIAL_LATEST, 1);
  for (uint32_t q = 1; q < 4; q++) lag(MLFAB_PARTIAL_QUEUED, q);
  assert_int_equal(env.bytes, 0);
}

/* ---- memory */

TEST(test_memory) {
  mlfab__env poor;
  budget b = {0, 0};
  mlfab_env hooks = budget_env(&b);
  const uint32_t ranks[] = {0, 1, 2};
  mlfab__partial_spec spec = {.mode = MLFAB_PARTIAL_QUORUM,
                              .quorum = 2,
                              .results = MLFAB_PARTIAL_QUEUED,
                              .queue_max = 2,
                              .reduce_or = 6,
                              .dtype = MLFAB_F32,
                              .width = 4,
                              .count = 1000};
  int rc = MLFAB_ERR_MEMORY;
  assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
  for (uint64_t k = 0; rc; k++) {
    mlfab__partial partial;
    mlfab__dag dag;
    b.left = k;
    mlfab__dag_init(&dag, &poor);
    rc = mlfab__partial_init(&partial, &poor, &spec);
    if (rc == 0) {
      mlfab__partial_begin(&partial, 3, 1, ranks);
      rc = mlfab__partial_build(&partial, &dag, MLFAB_ALGORITHM_RING);
      mlfab__partial_free(&partial);
    }
    assert_true(rc == 0 || rc == MLFAB_ERR_MEMORY);
    mlfab__dag_free(&dag);
    assert_int_equal(poor.bytes, 0);
    assert_int_equal(b.bytes, 0);
  }
  spec.count = UINT64_MAX / 8;
  mlfab__partial partial;
  assert_int_equal(mlfab__partial_init(&partial, &env, &spec), MLFAB_ERR_MEMORY);
}

TEST(test_enough_rounds) {
  print_message("%llu rounds\n", (unsigned long long)rounds_total);
  if (testing_whole()) assert_true(rounds_total > 8000);
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
