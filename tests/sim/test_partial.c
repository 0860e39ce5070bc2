/* test_partial.c - partial reductions among simulated workers, through mlfab.h: two objects at a
 * time on every rank, called when their computations end, some of which take ten times as long as
 * others; with links that break, and with a rank that dies.
 *
 * Element i of each block is of rank i. With every call it adds 1 to its element of the first
 * block, and a random number to those of the others: so a result tells how many calls of whom it
 * holds, and whether one was torn. Who got the same round got the same bits; the bitmap names
 * whose calls are in it, a quorum at least; and all rounds together with the flush at the end are
 * all that was called with, once. A round that only a rank that died had got may be run again
 * among the others: the step of their first result after the death tells from which round on. */
#include "job.h"
#include "../../mlfab_partial.h"

enum { RANKS = 14, OBJECTS = 2, STEPS = 40, BLOCKS = 3, ROUNDS = STEPS + 8 };
#define BEAT (100 * MS)

typedef struct past { /* a round, as it was first returned */
  int64_t *data;
  mlfab_partial_info info;
  uint32_t seen, by; /* by: a bit for each rank that got it */
} past;

typedef struct object { /* the same on all ranks */
  mlfab_partial_options options;
  uint64_t count;
  uint64_t base; /* after a death: the first round without the dead; UINT64_MAX before */
  past rounds[ROUNDS];
} object;

typedef struct rank rank;

typedef struct part { /* an object on a rank */
  rank *of;
  uint32_t which, id;
  int64_t *data, *flushed;
  int64_t calls, value;
  uint64_t steps, newest; /* made; above the rounds returned */
  uint64_t since;         /* of the call that waits, or the last */
  mlfab_request request;
  mlfab_partial_info info;
  int done;
} part;

struct rank {
  mlfab *ctx;
  uint32_t number;
  uint64_t slow; /* its computations take so many times as long */
  part parts[OBJECTS];
  uint32_t opened, flushed;
  int failures;
};

typedef struct job {
  mlfab_sim *sim;
  uint64_t seed, dice, steps;
  uint32_t ranks;
  rank rank[RANKS];
  object objects[OBJECTS];
  uint32_t have_opened, have_stepped, have_flushed;
  int32_t dead; /* a rank, or MLFAB_NO_RANK */
  uint64_t died_ns;
} job;

static job w;

static uint32_t below(uint32_t n) { return (uint32_t)dice_below(&w.dice, n); }

static void must(const rank *r, int code, const char *what) {
  if (code) wrong("rank %u: %s: %d: %s", r->number, what, code, last_text(r->ctx));
}

static uint32_t alive(void) { return w.ranks - (w.dead != MLFAB_NO_RANK); }

/* --- what a result must be --- */

static uint32_t ones(const uint64_t *bitmap) {
  uint32_t n = 0;
  for (uint32_t r = 0; r < 1024; r++) n += (uint32_t)(bitmap[r / 64] >> r % 64 & 1);
  return n;
}

static void check_first(const object *o, const past *p) {
  uint32_t quorum = o->options.mode == MLFAB_PARTIAL_QUORUM ? o->options.quorum : 1;
  if (p->info.active != ones(p->info.bitmap)) wrong("the bitmap is not of %u", p->info.active);
  if (p->info.active < (quorum < p->info.workers ? quorum : p->info.workers))
    wrong("%u active, and the quorum is %u", p->info.active, quorum);
  for (uint32_t r = 0; r < w.ranks; r++) {
    if ((p->info.bitmap[r / 64] >> r % 64 & 1) && p->data[r] < 1) wrong("rank %u is missing", r);
    for (uint32_t b = 2; b < BLOCKS; b++)
      if (p->data[b * w.ranks + r] != p->data[w.ranks + r]) wrong("torn");
  }
  for (uint64_t e = (uint64_t)BLOCKS * w.ranks; e < o->count; e++)
    if (p->data[e] != 0) wrong("element %u is not 0", (unsigned)e);
}

/* The first result without the dead: rounds from its step on begin anew. A rank that lives has got
 * none of them yet. */
static void begin_anew(object *o, uint64_t base) {
  o->base = base;
  for (uint64_t k = base; k < ROUNDS; k++) {
    past *p = &o->rounds[k];
    if (p->by & ~(1u << w.dead)) wrong("round %u is run again, and was returned", (unsigned)k);
    free(p->data);
    *p = (past){0};
  }
}

static void check_result(part *p) {
  const mlfab_partial_info *info = &p->info;
  object *o = &w.objects[p->which];
  uint32_t me = p->of->number;
  if (info->round >= ROUNDS || info->round < info->step)
    wrong("round %u for step %u", (unsigned)info->round, (unsigned)info->step);
  past *first = &o->rounds[info->round];
  if (w.dead != MLFAB_NO_RANK && info->workers == alive() && o->base == UINT64_MAX)
    begin_anew(o, info->step);
  if (info->round + 1 < p->newest) wrong("rank %u: a round that is older", me);
  if (o->options.results == MLFAB_PARTIAL_QUEUED && info->round != info->step)
    wrong("rank %u: round %u in step %u", me, (unsigned)info->round, (unsigned)info->step);
  int active = info->bitmap[me / 64] >> me % 64 & 1;
  if (info->included != (active && info->round == info->step)) wrong("included is wrong");
  p->newest = info->round + 1;
  if (!first->data) {
    first->data = malloc(o->count * 8);
    assert_non_null(first->data);
    memcpy(first->data, p->data, o->count * 8);
    first->info = *info;
    check_first(o, first);
  }
  first->seen++;
  first->by |= 1u << me;
  if (memcmp(first->data, p->data, o->count * 8) != 0) wrong("rank %u: other bits", me);
  if (memcmp(first->info.bitmap, info->bitmap, sizeof info->bitmap) != 0)
    wrong("rank %u: another bitmap", me);
}

/* --- the ranks --- */

static void call(void *user);

/* Calls that wait are one within the other here (no more than 16): the next is made when all have
 * returned. */
static void when_all_have(uint32_t *count, void (*fn)(void *)) {
  if (++*count < alive()) return;
  *count = 0;
  for (uint32_t i = 0; i < w.ranks; i++)
    if ((int32_t)i != w.dead) sim_later(w.sim, fn, &w.rank[i], MS);
}

/* Both objects' steps are made: what is left is flushed, in the same order everywhere. */
static void flush(void *user) {
  rank *r = user;
  part *p = &r->parts[r->flushed];
  must(r, mlfab_partial_flush(r->ctx, p->id, p->flushed, 60 * SECOND), "mlfab_partial_flush");
  if (++r->flushed < OBJECTS) when_all_have(&w.have_flushed, flush);
}

/* A step has failed, soon after the death: the others see it, too, and all go on. */
static void fail_step(part *p, int code) {
  mlfab_error error;
  uint64_t due = w.died_ns + 8 * BEAT, now = mlfab_sim_clock(w.sim);
  if (now > (p->since > due ? p->since : due) + MS)
    wrong("rank %u: %u ms after the death", p->of->number, (unsigned)((now - w.died_ns) / MS));
  mlfab_last_error(p->of->ctx, &error);
  if (code != MLFAB_ERR_PEER_DEAD || error.rank != w.dead)
    wrong("rank %u: %d: %s", p->of->number, code, error.text);
  p->of->failures++;
}

static void look(void *user) {
  part *p = user;
  rank *r = p->of;
  mlfab_result result = {0};
  int done = 0;
  if ((int32_t)r->number == w.dead) return;
  must(r, mlfab_test(r->ctx, p->request, &done, &result), "mlfab_test");
  if (!done) {
    sim_later(w.sim, look, p, 100000);
    return;
  }
  if (result.status) {
    fail_step(p, result.status);
  } else {
    check_result(p);
    p->steps = p->info.step + 1;
  }
  if (p->steps < w.steps) {
    sim_later(w.sim, call, p, 1000 + below(2 * MS) * r->slow);
    return;
  }
  p->done = 1;
  for (uint32_t i = 0; i < OBJECTS; i++)
    if (!r->parts[i].done) return;
  when_all_have(&w.have_stepped, flush);
}

static void call(void *user) {
  part *p = user;
  rank *r = p->of;
  const object *o = &w.objects[p->which];
  int64_t value = below(1u << 30);
  if ((int32_t)r->number == w.dead) return;
  memset(p->data, 0, o->count * 8);
  for (uint32_t b = 0; b < BLOCKS; b++) p->data[b * w.ranks + r->number] = b ? value : 1;
  p->info = (mlfab_partial_info){.size = sizeof p->info};
  p->since = mlfab_sim_clock(w.sim);
  int code = mlfab_partial_start(r->ctx, p->id, p->data, 60 * SECOND, &p->info, &p->request);
  p->calls++;
  p->value += value;
  if (code) {
    fail_step(p, code);
    sim_later(w.sim, call, p, 1000);
    return;
  }
  sim_later(w.sim, look, p, 1000);
}

static void open_part(void *user) {
  rank *r = user;
  part *p = &r->parts[r->opened];
  const object *o = &w.objects[r->opened];
  mlfab_partial_options options = o->options;
  options.timeout_ns = 60 * SECOND;
  must(r, mlfab_partial_open(r->ctx, o->count, MLFAB_I64, &options, &p->id), "mlfab_partial_open");
  if (++r->opened < OBJECTS)
    when_all_have(&w.have_opened, open_part);
  else
    for (uint32_t i = 0; i < OBJECTS; i++) sim_later(w.sim, call, &r->parts[i], 1000 + below(MS));
}

/* --- worlds --- */

static void draw_object(object *o) {
  o->options = (mlfab_partial_options){.size = sizeof o->options,
                                       .mode = 1 + below(3),
                                       .quorum = 1 + below(w.ranks),
                                       .results = below(2),
                                       .queue_max = 1 + below(5),
                                       .algorithm = below(5)};
  o->base = UINT64_MAX;
  o->count = (uint64_t)BLOCKS * w.ranks + (below(3) ? 0 : below(30000));
}

static void open_world(uint64_t seed, uint32_t ranks) {
  mlfab_config config;
  memset(&w, 0, sizeof w);
  w.seed = seed;
  w.dice = mix(seed);
  w.ranks = ranks ? ranks : 1 + below(below(4) ? 7 : RANKS);
  w.steps = 4 + below(STEPS - 4);
  w.dead = MLFAB_NO_RANK;
  const mlfab_sim_options sim = {.size = sizeof sim, .hosts = w.ranks, .seed = seed};
  assert_int_equal(mlfab_sim_create(&sim, &w.sim), 0);
  for (uint32_t i = 0; i < OBJECTS; i++) draw_object(&w.objects[i]);
  seeds_about(" (%u ranks, modes %u and %u, results %u and %u)", w.ranks, w.objects[0].options.mode,
              w.objects[1].options.mode, w.objects[0].options.results,
              w.objects[1].options.results);
  for (uint32_t i = 0; i < w.ranks; i++) {
    rank *r = &w.rank[i];
    mlfab_config_init(&config);
    config.workers = w.ranks;
    config.rank = (int32_t)i;
    config.heartbeat_ns = BEAT;
    r->number = i;
    r->slow = below(3) ? 1 : 10;
    sim_open(w.sim, i, &config, &r->ctx);
    for (uint32_t k = 0; k < OBJECTS; k++) {
      r->parts[k] = (part){.of = r, .which = k};
      r->parts[k].data = calloc(w.objects[k].count, 8);
      r->parts[k].flushed = calloc(w.objects[k].count, 8);
      assert_true(r->parts[k].data && r->parts[k].flushed);
    }
  }
  for (uint32_t i = 0; i < w.ranks; i++) sim_await(w.sim, w.rank[i].ctx);
  for (uint32_t i = 0; i < w.ranks; i++)
    sim_later(w.sim, open_part, &w.rank[i], 1 + below(1000000));
}

static int finished(void) {
  for (uint32_t i = 0; i < w.ranks; i++)
    if ((int32_t)i != w.dead && w.rank[i].flushed < OBJECTS) return 0;
  return 1;
}

static void run(uint64_t ns) {
  uint64_t until = mlfab_sim_clock(w.sim) + ns;
  while (!finished() && mlfab_sim_clock(w.sim) < until) sim_step(w.sim);
}

/* What was returned and flushed is what was called with; after a death that is so for those who
 * live. */
static void check_end(uint32_t which) {
  const object *o = &w.objects[which];
  const rank *first = &w.rank[w.dead == 0 ? 1 : 0];
  for (uint32_t r = 0; r < w.ranks; r++) {
    const part *p = &w.rank[r].parts[which];
    int64_t calls = p->flushed[r], value = p->flushed[w.ranks + r];
    if ((int32_t)r == w.dead) continue;
    for (uint32_t k = 0; k < ROUNDS; k++) {
      if (!o->rounds[k].data) continue;
      calls += o->rounds[k].data[r];
      value += o->rounds[k].data[w.ranks + r];
    }
    if (memcmp(p->flushed, first->parts[which].flushed, o->count * 8) != 0)
      wrong("rank %u was told another rest", r);
    if (calls != p->calls || value != p->value)
      wrong("rank %u has called %d times, and %d are there", r, (int)p->calls, (int)calls);
  }
  for (uint32_t k = 0; k < w.steps && w.dead == MLFAB_NO_RANK; k++) {
    if (!o->rounds[k].data) wrong("nobody got round %u", k);
    if (o->options.results == MLFAB_PARTIAL_QUEUED && o->rounds[k].seen != w.ranks)
      wrong("%u ranks got round %u", o->rounds[k].seen, k);
  }
}

static void close_world(void) {
  for (uint32_t k = 0; k < OBJECTS; k++) check_end(k);
  for (uint32_t i = 0; i < w.ranks; i++) {
    rank *r = &w.rank[i];
    for (uint32_t k = 0; k < OBJECTS; k++) {
      if (r->ctx) must(r, mlfab_partial_close(r->ctx, r->parts[k].id), "mlfab_partial_close");
      free(r->parts[k].data);
      free(r->parts[k].flushed);
    }
    mlfab_sim_run(w.sim, below(10) * MS);
  }
  for (uint32_t i = 0; i < w.ranks; i++) {
    mlfab_stats stats;
    rank *r = &w.rank[i];
    if (!r->ctx) continue;
    must(r, mlfab_get_stats(r->ctx, &stats, sizeof stats), "mlfab_get_stats");
    if (w.dead == MLFAB_NO_RANK && (stats.collective_epochs != 1 || stats.frames_refused))
      wrong("rank %u: a failure", i);
    mlfab_abandon(&r->ctx);
  }
  mlfab_sim_destroy(&w.sim);
  for (uint32_t k = 0; k < OBJECTS; k++)
    for (uint32_t i = 0; i < ROUNDS; i++) free(w.objects[k].rounds[i].data);
}

static void run_seed(uint64_t seed) {
  open_world(seed, 0);
  if (below(3)) {
    const mlfab_sim_options faults = {.size = sizeof faults,
                                      .loss = below(2) ? 0.01 : 0.0,
                                      .duplicate = below(2) ? 0.01 : 0.0,
                                      .reorder = below(2) ? 0.05 : 0.0};
    assert_int_equal(mlfab_sim_set_faults(w.sim, &faults), 0);
  }
  run(300 * SECOND);
  if (!finished()) wrong("it hangs");
  close_world();
}

/* A rank dies in the midst of it: everybody hears of it once, and the others go on. What it had
 * called with may be in results or not. */
static void run_death(uint64_t seed) {
  open_world(seed, 2 + (uint32_t)seed % 6);
  for (uint32_t k = 0; k < OBJECTS; k++) w.objects[k].options.quorum = 1;
  w.steps = STEPS;
  run((20 + below(10)) * MS);
  w.dead = 1 + (int32_t)below(w.ranks - 1);
  w.died_ns = mlfab_sim_clock(w.sim);
  assert_int_equal(mlfab_sim_crash(w.sim, (uint32_t)w.dead), 0);
  run(300 * SECOND);
  if (!finished()) wrong("it hangs");
  for (uint32_t i = 0; i < w.ranks; i++) {
    if ((int32_t)i == w.dead) continue;
    if (w.rank[i].failures < 1 || w.rank[i].failures > OBJECTS)
      wrong("rank %u has seen %d failures", i, w.rank[i].failures);
  }
  for (uint32_t k = 0; k < OBJECTS; k++)
    for (uint32_t i = 0; i < w.ranks; i++)
      if ((int32_t)i != w.dead && w.rank[i].parts[k].info.workers != alive())
        wrong("rank %u: %u workers", i, w.rank[i].parts[k].info.workers);
  close_world();
}

TEST(test_random) { seeds_run("partial", test_cases(60), run_seed); }

TEST(test_death) { seeds_run("death", test_cases(20), run_death); }

TESTS(NULL, NULL)
