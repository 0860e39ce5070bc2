/* test_vote.c - core/replica/vote.c: three voters in virtual time, from seeds, with every fault: messages lost and
 * late, links cut, processes paused, killed and replaced, with and without what they had stored, slow disks.
 *
 * A copy's data is one number. The copy that serves raises it, and hands it to the other one when it reaches it.
 * Checks, after every event: one record is decided in an epoch; while a copy may acknowledge, no other one serves; a
 * copy that serves has everything that was acknowledged as durable. When the faults end: a copy serves within 20
 * beats, and both are in sync, unless a process was killed at the wrong moment (vote.h, invariant 5); how often is
 * counted. Without kills, always.
 *
 * MLFAB_SEED=n runs one seed, and prints. */
#include "../testing.h"

#include "../../core/base/rng.h"
#include "../../core/replica/vote.h"

enum { BEAT = 64, LETTERS = 512, EPOCHS = 4096, NOBODY = 9 };

typedef struct letter {
  int used;
  uint32_t from, to;
  uint64_t at_ns, nonce; /* of the receiver when it was sent: a link ends with its process */
  mlfab__vote_message message;
} letter;

typedef struct process {
  mlfab__vote vote;
  int up;
  uint64_t paused_until, nonce;
  mlfab__vote_record disk, storing;
  uint64_t stored_at;
  uint64_t data, clock;  /* clock: what its own clock is ahead */
  uint64_t caught_nonce; /* of the process of the other copy that has the image */
  uint64_t caught;       /* and what it has of it */
} process;

typedef struct world {
  mlfab__rng rng;
  process p[MLFAB__VOTERS];
  letter letters[LETTERS];
  uint64_t now, nonces, durable;
  int cut[MLFAB__VOTERS][MLFAB__VOTERS];
  double loss, slow_disk;
  mlfab__vote_record decided[EPOCHS];
  uint32_t decisions;
  int talks;
} world;

typedef struct door { /* the user of a voter */
  world *w;
  uint32_t self;
} door;

static door doors[MLFAB__VOTERS];

static uint64_t below(world *w, uint64_t n) { return mlfab__rng_next(&w->rng) % n; }
static int chance(world *w, double p) {
  return (double)(mlfab__rng_next(&w->rng) >> 11) * 0x1p-53 < p;
}
static uint64_t clock_of(const world *w, uint32_t i) { return w->now + w->p[i].clock; }

static void world_send(void *user, uint32_t to, const mlfab__vote_message *message) {
  door *d = user;
  world *w = d->w;
  if (!w->p[to].up || w->cut[d->self][to] || chance(w, w->loss)) return;
  for (int i = 0; i < LETTERS; i++) {
    if (w->letters[i].used) continue;
    uint64_t late = chance(w, 0.02) ? below(w, 3 * BEAT) : 1 + below(w, BEAT / 8);
    w->letters[i] = (letter){1, d->self, to, w->now + late, w->p[to].nonce, *message};
    return;
  }
}

static void world_store(void *user, const mlfab__vote_record *record) {
  door *d = user;
  process *p = &d->w->p[d->self];
  p->storing = *record;
  p->stored_at = d->w->now + 1 + below(d->w, chance(d->w, d->w->slow_disk) ? 6 * BEAT : BEAT / 4);
}

static void world_begin(world *w, uint32_t i, int remembers, int fresh) {
  process *p = &w->p[i];
  mlfab__vote_record disk = p->disk;
  memset(p, 0, sizeof *p);
  p->up = 1;
  p->nonce = ++w->nonces;
  p->clock = below(w, 1000000);
  if (remembers) p->disk = disk;
  p->vote.user = &doors[i];
  p->vote.send = world_send;
  p->vote.store = world_store;
  mlfab__vote_begin(&p->vote, i, BEAT, p->nonce, p->disk.epoch ? &p->disk : NULL, fresh,
                    clock_of(w, i));
}

/* ---- what the processes do ---- */

static int reaches(const world *w, uint32_t a, uint32_t b) {
  return w->p[a].up && w->p[b].up && !w->cut[a][b] && !w->cut[b][a] &&
         w->p[a].paused_until <= w->now && w->p[b].paused_until <= w->now;
}

/* A copy that serves takes updates, hands them on, and chooses who is to be in sync. */
static void world_serve(world *w, uint32_t i) {
  process *p = &w->p[i], *other = &w->p[!i];
  uint64_t now = clock_of(w, i);
  mlfab__vote *v = &p->vote;
  if (!mlfab__vote_serves(v)) return;
  if (mlfab__vote_may_ack(v, now) && chance(w, 0.3)) p->data++;
  if (reaches(w, i, !i) && chance(w, 0.2) && other->vote.bond.serves == i &&
      other->vote.bond.epoch <= v->decided.epoch && !mlfab__vote_serves(&other->vote)) {
    other->data = p->data; /* a whole image, and its acknowledgement */
    mlfab__vote_filled(&other->vote);
    p->caught_nonce = other->nonce;
    p->caught = p->data;
  }
  int there = p->caught_nonce == other->nonce && !mlfab__vote_silent(v, !i, now);
  mlfab__vote_want(v, 1u << i | (there ? 1u << !i : 0), now);
  if (v->decided.insync == 3 && mlfab__vote_serves(v) && p->caught > w->durable)
    w->durable = p->caught;
}

static void world_check(world *w) {
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
    const process *p = &w->p[i], *other = &w->p[!i];
    const mlfab__vote_record *d = &p->vote.decided;
    if (!p->up) continue;
    assert_true(d->epoch < EPOCHS);
    mlfab__vote_record *known = &w->decided[d->epoch];
    if (d->epoch > 0 && known->epoch == 0) {
      *known = *d;
      w->decisions++;
      if (w->talks)
        printf("%6llu: epoch %u: %c serves, in sync %u\n", (unsigned long long)w->now, d->epoch,
               "AB"[d->serves], d -> insync);
    }
    assert_int_equal(known->serves, d->serves);
    assert_int_equal(known->insync, d->insync);
    if (i == MLFAB__VOTER_WITNESS || !mlfab__vote_may_ack(&p->vote, clock_of(w, i))) continue;
    assert_true(p->data >= w->durable);
    assert_false(other->up && mlfab__vote_serves(&other->vote) &&
                 other->vote.decided.epoch > d->epoch);
  }
}

static void world_step(world *w) {
  w->now++;
  for (int k = 0; k < LETTERS; k++) {
    letter *l = &w->letters[k];
    if (!l->used || l->at_ns > w->now) continue;
    process *to = &w->p[l->to];
    if (to->up && to->paused_until > w->now) continue;
    l->used = 0;
    if (w->talks && to->up && l->message.kind != MLFAB__VOTE_BEAT)
      printf("%6llu: %c to %c: %s epoch %u %c %u\n", (unsigned long long)w->now, "ABW"[l->from],
             "ABW"[l->to],
             l -> message.kind == MLFAB__VOTE_ASK        ? "asks"
                  : l->message.kind == MLFAB__VOTE_GRANT ? "grants"
                                                         : "denies",
             l->message.record.epoch, "AB"[l->message.record.serves], l -> message.record.insync);
    if (to->up && to->nonce == l->nonce)
      mlfab__vote_take(&to->vote, l->from, &l->message, clock_of(w, l->to));
    world_check(w);
  }
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
    process *p = &w->p[i];
    if (!p->up || p->paused_until > w->now) continue;
    if (p->storing.epoch && w->now >= p->stored_at) {
      p->disk = p->storing;
      p->storing.epoch = 0;
      mlfab__vote_stored(&p->vote, clock_of(w, i));
    }
    /* A copy that may not replace the other has nothing to do before its next beat. */
    if (!((p->vote.bond.insync | p->vote.heard.insync) >> i & 1))
      assert_int_equal(mlfab__vote_deadline(&p->vote), p->vote.said_ns + p->vote.beat_ns);
    if (clock_of(w, i) >= mlfab__vote_deadline(&p->vote)) {
      mlfab__vote_tick(&p->vote, clock_of(w, i));
      /* Else its process looks at the clock all the time. */
      assert_true(mlfab__vote_deadline(&p->vote) > clock_of(w, i));
    }
    if (i != MLFAB__VOTER_WITNESS && w->now % 4 == i) world_serve(w, i);
    world_check(w);
  }
}

/* ---- a seed ---- */

typedef struct plan {
  double loss, pause, cut, kill, forget;
} plan;

static void world_fault(world *w, const plan *f) {
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
    process *p = &w->p[i];
    if (p->up && chance(w, f->pause)) p->paused_until = w->now + below(w, 15 * BEAT);
    uint32_t other = (i + 1) % MLFAB__VOTERS;
    if (chance(w, f->cut)) w->cut[i][other] = w->cut[other][i] = 1;
    if (chance(w, 10 * f->cut) || (chance(w, 0.02))) w->cut[i][other] = w->cut[other][i] = 0;
    if (chance(w, f->cut)) w->cut[i][other] = 1; /* in one direction */
    if (p->up && chance(w, f->kill)) {
      p->up = 0;
      if (w->talks) printf("%6llu: %c is killed\n", (unsigned long long)w->now, "ABW"[i]);
    }
    if (!p->up && chance(w, 0.1)) {
      int remembers = !chance(w, f->forget);
      if (w->talks)
        printf("%6llu: %c is back%s\n", (unsigned long long)w->now, "ABW"[i],
               remembers ? "" : ", and has forgotten");
      world_begin(w, i, remembers, 0);
    }
  }
}

/* 1 when a copy serves and both are in sync. */
static int world_ends_well(world *w) {
  for (uint32_t i = 0; i < 2; i++) {
    const mlfab__vote *v = &w->p[i].vote;
    if (mlfab__vote_may_ack(v, clock_of(w, i)) && v->decided.insync == 3) return 1;
  }
  return 0;
}

static int run(uint64_t seed, int talks, uint32_t *promotions, uint32_t *decisions) {
  static world w;
  memset(&w, 0, sizeof w);
  mlfab__rng_seed(&w.rng, seed);
  w.talks = talks;
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) doors[i] = (door){&w, i};
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) world_begin(&w, i, 0, 1);
  plan f = {0};
  uint64_t kind = below(&w, 4);
  int kills = kind >= 2;
  f.loss = chance(&w, 0.5) ? 0.2 : 0.0;
  f.pause = chance(&w, 0.7) ? 0.01 : 0.0;
  f.cut = chance(&w, 0.7) ? 0.01 : 0.0;
  f.kill = kills ? 0.005 : 0.0;
  f.forget = kind == 3 ? 0.5 : 0.0;
  w.loss = f.loss;
  w.slow_disk = chance(&w, 0.3) ? 0.5 : 0.05;
  for (int t = 0; t < 60 * BEAT; t++) {
    if (t % (BEAT / 4) == 0) world_fault(&w, &f);
    world_step(&w);
  }
  memset(w.cut, 0, sizeof w.cut);
  w.loss = w.slow_disk = 0.0;
  for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
    w.p[i].paused_until = 0;
    if (!w.p[i].up) world_begin(&w, i, 1, 0);
  }
  for (int t = 0; t < 20 * BEAT; t++) world_step(&w);
  for (uint32_t e = 2; e < EPOCHS; e++)
    if (w.decided[e].epoch && w.decided[e].serves != w.decided[e - 1].serves &&
        w.decided[e - 1].epoch)
      (*promotions)++;
  *decisions += w.decisions;
  int well = world_ends_well(&w);
  if (!kills && !well) {
    for (uint32_t i = 0; i < MLFAB__VOTERS; i++) {
      const mlfab__vote *v = &w.p[i].vote;
      print_message("%c: known %d empty %d floor %u asking %d decided %u %c %u bond %u %c %u\n",
                    "ABW"[i], v -> known, v -> empty, v -> floor, v -> asking, v -> decided.epoch,
                    "AB"[v->decided.serves], v -> decided.insync, v->bond.epoch,
                    "AB"[v->bond.serves], v -> bond.insync);
    }
    fail_msg("seed %llu: without kills, no copy serves in the end", (unsigned long long)seed);
  }
  return well;
}

static uint64_t present; /* the seed that runs */

static int say_seed(void **state) {
  (void)state;
  if (present) print_message("MLFAB_SEED=%llu\n", (unsigned long long)present);
  return 0;
}

TEST_WITH(test_votes, NULL, say_seed) {
  uint64_t seeds = test_cases(400), well = 0;
  uint32_t promotions = 0, decisions = 0;
  if (test_seed()) {
    run(test_seed(), 1, &promotions, &decisions);
    return;
  }
  for (uint64_t seed = 1; seed <= seeds; seed++) {
    present = seed;
    well += (uint64_t)run(seed, 0, &promotions, &decisions);
  }
  present = 0;
  print_message("%llu seeds: %u records, %u promotions; %llu ended with both copies in sync\n",
                (unsigned long long)seeds, decisions, promotions, (unsigned long long)well);
  if (test_scale() >= 1.0) {
    assert_true(promotions > seeds / 10);
    assert_true(well > seeds / 2);
  }
}

/* ---- one voter ---- */

/* It sends to a mailbox, and its disk only counts. */
static struct {
  mlfab__vote_message last;
  int sent, stores;
} box;
static mlfab__vote vote;

static void box_send(void *user, uint32_t to, const mlfab__vote_message *message) {
  (void)user, (void)to;
  box.last = *message;
  box.sent++;
}

static void box_store(void *user, const mlfab__vote_record *record) {
  (void)user, (void)record;
  box.stores++;
}

static void open_voter(uint32_t voter, int remembers) {
  memset(&box, 0, sizeof box);
  vote = (mlfab__vote){.send = box_send, .store = box_store};
  mlfab__vote_begin(&vote, voter, BEAT, 7, NULL, remembers, 100);
}

/* A message of one that knows that a record is decided. */
static mlfab__vote_message message_of(uint8_t kind, mlfab__vote_record decided) {
  return (mlfab__vote_message){.kind = kind,
                               .known = 1,
                               .floor = decided.epoch,
                               .decided = decided,
                               .bond = decided,
                               .nonce = 8,
                               .sent_ns = 50};
}

static void expect_answer(int stores, int sent, uint8_t kind) {
  assert_int_equal(box.stores, stores);
  assert_int_equal(box.sent, sent);
  if (sent > 0) assert_int_equal(box.last.kind, kind);
}

/* A grant is on disk before anybody hears of it; the same question gets the same answer again. */
TEST(test_stored_first) {
  mlfab__vote_message ask = message_of(MLFAB__VOTE_ASK, (mlfab__vote_record){1, MLFAB__VOTER_A, 1});
  ask.floor = 2;
  ask.record = (mlfab__vote_record){2, MLFAB__VOTER_A, 3};
  open_voter(MLFAB__VOTER_WITNESS, 1);
  for (uint64_t now = 101; now <= 102; now++) { /* asked again meanwhile */
    mlfab__vote_take(&vote, MLFAB__VOTER_A, &ask, now);
    expect_answer(1, 0, 0);
  }
  mlfab__vote_stored(&vote, 103);
  expect_answer(1, 1, MLFAB__VOTE_GRANT);
  assert_int_equal(box.last.record.epoch, 2);
  mlfab__vote_take(&vote, MLFAB__VOTER_A, &ask, 104);
  expect_answer(1, 2, MLFAB__VOTE_GRANT);
  /* Another record of that epoch, by B. */
  ask.record = (mlfab__vote_record){2, MLFAB__VOTER_B, 2};
  mlfab__vote_take(&vote, MLFAB__VOTER_B, &ask, 100 + 20 * BEAT);
  expect_answer(1, 3, MLFAB__VOTE_DENY);
}

/* A voter that has lost what it had stored grants and echoes nothing until both others have told what they know. */
TEST(test_forgotten) {
  const mlfab__vote_record second = {2, MLFAB__VOTER_A, 3};
  mlfab__vote_message beat = message_of(MLFAB__VOTE_BEAT, second),
                      ask = message_of(MLFAB__VOTE_ASK, second);
  ask.record = (mlfab__vote_record){3, MLFAB__VOTER_A, 1};
  open_voter(MLFAB__VOTER_WITNESS, 0);
  for (int told = 0; told < 2; told++) {
    mlfab__vote_take(&vote, MLFAB__VOTER_A, &ask, 101);
    assert_int_equal(box.stores, 0);
    assert_int_equal(box.last.kind, MLFAB__VOTE_DENY);
    assert_int_equal(box.last.echo_ns, 0);
    mlfab__vote_take(&vote, MLFAB__VOTER_A, &beat, 102);
  }
  mlfab__vote_take(&vote, MLFAB__VOTER_B, &beat, 103);
  mlfab__vote_take(&vote, MLFAB__VOTER_A, &ask, 104);
  assert_int_equal(box.stores, 1);
}

/* A copy has lost its store. It may have served by a record, and the witness alone remembers that record. Then the copy
 * grants the other copy nothing, whichever it hears first: the record or the other copy. */
TEST(test_forgotten_record) {
  for (int order = 0; order < 2; order++) {
    mlfab__vote_message other =
        message_of(MLFAB__VOTE_BEAT, (mlfab__vote_record){2, MLFAB__VOTER_B, 3});
    mlfab__vote_message witness = other;
    witness.floor = 3;
    witness.bond = (mlfab__vote_record){3, MLFAB__VOTER_A, 1};
    open_voter(MLFAB__VOTER_A, 0);
    if (order == 0) mlfab__vote_take(&vote, MLFAB__VOTER_B, &other, 101);
    mlfab__vote_take(&vote, MLFAB__VOTER_WITNESS, &witness, 102);
    if (order == 1) mlfab__vote_take(&vote, MLFAB__VOTER_B, &other, 103);
    other.kind = MLFAB__VOTE_ASK;
    other.record = (mlfab__vote_record){4, MLFAB__VOTER_B, 2};
    mlfab__vote_take(&vote, MLFAB__VOTER_B, &other, 104);
    assert_int_equal(box.stores, 0);
    assert_int_equal(box.last.kind, MLFAB__VOTE_DENY);
    assert_int_equal(box.last.echo_ns, 0);
    assert_int_equal(box.last.known, 1);
  }
}

/* What a copy wanted while it served is forgotten when the other one has served in between. */
TEST(test_wanted) {
  open_voter(MLFAB__VOTER_A, 1);
  mlfab__vote_want(&vote, 3, 101);
  assert_int_equal(box.stores, 1);
  mlfab__vote_stored(&vote, 102);
  mlfab__vote_message in = message_of(MLFAB__VOTE_BEAT, (mlfab__vote_record){5, MLFAB__VOTER_B, 3});
  mlfab__vote_take(&vote, MLFAB__VOTER_WITNESS, &in, 103);
  assert_false(mlfab__vote_serves(&vote));
  in = message_of(MLFAB__VOTE_BEAT, (mlfab__vote_record){6, MLFAB__VOTER_A, 1});
  mlfab__vote_take(&vote, MLFAB__VOTER_WITNESS, &in, 104);
  assert_true(mlfab__vote_serves(&vote));
  mlfab__vote_tick(&vote, 105);
  assert_int_equal(box.stores,
                   1); /* it asks for nothing: the other copy may lack everything by now */
}

/* A knows that the record is decided by which B is in sync, and dies before it can say so. The witness has granted it: so
 * B asks. */
TEST(test_heard_from_the_witness) {
  mlfab__vote_message beat =
      message_of(MLFAB__VOTE_BEAT, (mlfab__vote_record){1, MLFAB__VOTER_A, 1});
  open_voter(MLFAB__VOTER_B, 1);
  mlfab__vote_filled(&vote);
  mlfab__vote_take(&vote, MLFAB__VOTER_WITNESS, &beat, 101);
  mlfab__vote_tick(&vote, 100 + 6 * BEAT);
  assert_int_equal(box.stores, 0); /* it is not in sync as far as anybody knows */
  beat.bond = (mlfab__vote_record){2, MLFAB__VOTER_A, 3};
  beat.floor = 2;
  mlfab__vote_take(&vote, MLFAB__VOTER_WITNESS, &beat, 100 + 6 * BEAT);
  mlfab__vote_tick(&vote, 100 + 7 * BEAT);
  assert_int_equal(box.stores, 1);
  assert_int_equal(vote.own.epoch, 3);
  assert_int_equal(vote.own.serves, MLFAB__VOTER_B);
}

/* What no voter says changes nothing. */
TEST(test_nonsense) {
  const mlfab__vote_record first = {1, MLFAB__VOTER_A, 1};
  static const mlfab__vote_record wrong[] = {{0, 0, 0}, {2, 2, 7}, {2, 0, 2},
                                             {2, 1, 0}, {2, 0, 5}, {2, 0xffffffffu, 0xffffffffu}};
  open_voter(MLFAB__VOTER_WITNESS, 1);
  const mlfab__vote before = vote;
  for (uint32_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    mlfab__vote_message in = message_of(MLFAB__VOTE_ASK, first);
    in.floor = 0;
    in.record = wrong[i];
    mlfab__vote_take(&vote, MLFAB__VOTER_A, &in, 101);
    in.record = first;
    in.decided = wrong[i];
    if (i > 0) mlfab__vote_take(&vote, MLFAB__VOTER_A, &in, 101);
    in.decided = first;
    in.bond = wrong[i];
    if (i > 0) mlfab__vote_take(&vote, MLFAB__VOTER_A, &in, 101);
  }
  mlfab__vote_message in = {.kind = MLFAB__VOTE_BEAT, .decided = first, .bond = first};
  mlfab__vote_take(&vote, MLFAB__VOTER_WITNESS, &in, 101);
  mlfab__vote_take(&vote, MLFAB__VOTERS, &in, 101);
  assert_memory_equal(&vote, &before, sizeof vote);
  assert_int_equal(box.sent + box.stores, 0);
}

TESTS(NULL, NULL)
