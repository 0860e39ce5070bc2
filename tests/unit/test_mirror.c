/* test_mirror.c - a server 0 with a replica, as its workers see it: the copy that serves is killed or replaced at any
 * moment, words between the copies are late or lost, and the copy that takes over contradicts nothing that a worker was
 * told.
 *
 * Oracle: membership_world.h sees only what was told, by whichever copy. And what a copy has at a mark is compared with
 * all that the other one was when it sent the mark. */
#include "core/replica/mirror.h"
#include "membership_world.h"

enum { ROOM = 2048, MARKS = 2048, BYTES = 512, RECORDS = 1 + WORKERS + WORKERS };

typedef struct line { /* from one copy to the other */
  struct {
    uint8_t type;
    uint32_t bytes;
    uint8_t meta[BYTES];
  } frames[ROOM];
  unsigned begin, count;
  int up;
} line;

typedef struct copy {
  mlfab__membership membership;
  mlfab__mirror mirror;
  mlfab__touch *known; /* who is here, as the node knows it */
  int ready;
  line to; /* the other copy */
} copy;

typedef struct fabric {
  copy copies[2];
  uint32_t s; /* serves */
  uint32_t term;
  int wanted; /* a record that names the other copy is asked for, or decided */
  int drops;  /* another one is asked for */
  uint64_t takeovers, held;
  /* What the serving copy was at its marks. */
  uint8_t was[MARKS][RECORDS][BYTES];
  uint32_t was_n[MARKS][RECORDS];
} fabric;

static fabric *f;

static copy *serving(void) { return &f->copies[f->s]; }
static copy *other(void) { return &f->copies[1 - f->s]; }

/* --- who is here: a part as the node has it --- */

static uint32_t known_encode(const void *self, uint32_t record, uint8_t *bytes) {
  (void)self;
  bytes[0] = (uint8_t)w->workers[record].here;
  return 1;
}

static int known_decode(void *self, uint32_t record, const uint8_t *bytes, uint32_t n, int apply) {
  (void)self;
  if (n != 1 || bytes[0] > 1) return MLFAB_ERR_FRAME;
  if (apply) w->workers[record].here = bytes[0];
  return 0;
}

/* --- the link between the copies --- */

static void line_put(line *l, uint8_t type, const void *meta, uint32_t bytes) {
  if (!l->up) return;
  assert_true(l->count < ROOM && bytes <= BYTES);
  unsigned at = (l->begin + l->count++) % ROOM;
  l->frames[at].type = type;
  l->frames[at].bytes = bytes;
  memcpy(l->frames[at].meta, meta, bytes);
}

static void out_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)peer;
  line_put(&((copy *)self)->to, type, meta, bytes);
}

static void out_ready(void *self, uint32_t peer) {
  (void)peer;
  ((copy *)self)->ready = 1;
}

static void line_up(copy *from) {
  from->to.up = 1;
  from->to.begin = from->to.count = 0;
  mlfab__mirror_link(&from->mirror, 1);
}

static void line_cut(copy *from) {
  from->to.up = 0;
  from->to.count = 0;
  mlfab__mirror_link(&from->mirror, 0);
  mlfab__mirror_cut(&f->copies[from == &f->copies[0]].mirror);
}

static void look_at(copy *c) {
  mlfab__mirror_facts facts = {.leased = 1, .named = f->wanted, .takes = c == other()};
  mlfab__mirror_know(&c->mirror, &facts);
  mlfab__mirror_look(&c->mirror, w->now, BEAT);
  f->held += c->mirror.end - c->mirror.begin;
}

/* The copy that serves gets a frame off. */
static int line_send(copy *c) {
  static uint8_t meta[MLFAB_META_MAX];
  mlfab__frame_out frame = {.meta = meta};
  mlfab__mirror *m = &c->mirror;
  if (!c->to.up || !mlfab__mirror_next(m, &frame)) {
    c->ready = 0;
    return 0;
  }
  uint64_t before = m->number;
  mlfab__mirror_taken(m, &frame, w->now);
  if (m->number > before) {
    uint32_t slot = (uint32_t)(m->number % MARKS);
    for (uint32_t r = 0; r < m->nrecords; r++) {
      const mlfab__mirror_part *part = &m->parts[r >= m->parts[1].first];
      f->was_n[slot][r] =
          part->mirrored.encode(part->mirrored.self, r - part->first, f->was[slot][r]);
    }
  }
  line_put(&c->to, frame.type, frame.meta, frame.meta_bytes);
  look_at(c);
  return 1;
}

/* A frame arrives. */
static int line_arrive(copy *from) {
  line *l = &from->to;
  copy *to = &f->copies[from == &f->copies[0]];
  if (l->count == 0) return 0;
  unsigned at = l->begin % ROOM;
  const mlfab__frame_in in = {l->frames[at].type, l->frames[at].bytes, 0, l->frames[at].meta, NULL};
  uint64_t before = to->mirror.got;
  l->begin++;
  l->count--;
  assert_int_equal(mlfab__mirror_hear(&to->mirror, &in, w->now, BEAT), 0);
  if (to->mirror.got != before) {
    const mlfab__mirror *m = &to->mirror;
    for (uint32_t r = 0; r < m->nrecords; r++) {
      assert_int_equal(m->records[r].n, f->was_n[m->got % MARKS][r]);
      assert_memory_equal(m->records[r].bytes, f->was[m->got % MARKS][r], m->records[r].n);
    }
  }
  look_at(to);
  return 1;
}

/* --- copies --- */

static void copy_open(copy *c) {
  c->ready = c->to.up = 0;
  c->to.count = 0;
  mlfab__port port = {w, host_post, no_ready, any_drop, no_detach, no_event, NULL, NULL};
  assert_int_equal(mlfab__membership_init(&c->membership, &w->env, &w->config, &port), 0);
  const mlfab__mirrored parts[2] = {mlfab__membership_mirrored(&c->membership),
                                    {.name = "known",
                                     .self = c,
                                     .records = w->n,
                                     .encode = known_encode,
                                     .decode = known_decode,
                                     .touch = &c->known}};
  const mlfab__port out = {c, out_post, out_ready, any_drop, no_detach, no_event, NULL, NULL};
  assert_int_equal(mlfab__mirror_init(&c->mirror, &w->env, parts, 2, &out, 0), 0);
}

static void copy_close(copy *c) {
  mlfab__mirror_free(&c->mirror);
  mlfab__membership_free(&c->membership);
}

static void greets(uint32_t i) { mlfab__mirror_forget(&serving()->mirror, i); }

/* After every event of the copy that serves. */
static void look_at_both(void) {
  mlfab__touched_all(serving()->known);
  look_at(serving());
  look_at(other());
  if (!f->wanted && mlfab__mirror_in_sync(&serving()->mirror) && chance(8) == 0) f->wanted = 1;
}

static int pump(void) {
  int moved = 0;
  look_at_both();
  for (int c = 0; c < 2; c++) {
    copy *from = &f->copies[c];
    if (!from->to.up) line_up(from);
    look_at(from);
    if (!f->drops) moved |= line_send(from) | line_arrive(from);
  }
  return moved;
}

static void mirrored_open(uint32_t n, uint64_t seed) {
  open_world(n, seed);
  if (!f) f = calloc(1, sizeof *f);
  assert_non_null(f);
  f->s = f->term = 0;
  f->wanted = f->drops = 0;
  f->takeovers = f->held = 0;
  for (int c = 0; c < 2; c++) copy_open(&f->copies[c]);
  w->server = &f->copies[0].membership;
  mlfab__mirror_serve(&f->copies[0].mirror, ++f->term);
  look_at_both();
  for (int c = 0; c < 2; c++) line_up(&f->copies[c]);
}

static void mirrored_close(void) {
  for (int c = 0; c < 2; c++) copy_close(&f->copies[c]);
  close_world();
}

/* The other copy serves from now on. The former one is dead, and another process takes its place; or it was away. */
static void take_over(int dead) {
  copy *was = serving(), *next = other();
  assert_true(f->wanted && next->mirror.got > 0);
  for (uint32_t i = 0; i < w->n; i++) cut(i);
  line_cut(was);
  line_cut(next);
  f->s = 1 - f->s;
  f->wanted = f->drops = 0;
  f->takeovers++;
  mlfab__mirror_serve(&next->mirror, ++f->term);
  w->server = &next->membership;
  if (dead) {
    copy_close(was);
    copy_open(was);
  } else {
    mlfab__mirror_stand_by(&was->mirror);
  }
  look_at_both();
}

/* What happens to the copies. */
static void act_on_copies(int violent) {
  uint32_t what = chance(violent ? 400 : 800), which = chance(2);
  copy *c = &f->copies[which];
  if (what == 0 && f->wanted) {
    take_over((int)chance(2));
  } else if (what < 3) {
    line_cut(c);
  } else if (what < 12) {
    if (!c->to.up) line_up(c);
  } else if (what < 14 && !serving()->to.up && f->wanted) {
    f->drops = 1; /* the other copy is to leave the record: until then nothing comes of it */
  } else if (what < 20 && f->drops) {
    f->drops = f->wanted = 0;
    line_cut(serving());
  } else if (what < 200) {
    for (uint32_t k = chance(20); k > 0; k--) line_send(serving());
  } else {
    for (uint32_t k = chance(20); k > 0; k--) line_arrive(c);
  }
}

static void act_mirrored(int violent) {
  act(violent);
  look_at_both();
  for (int k = 0; k < 2; k++) {
    act_on_copies(violent > 0);
    look_at_both();
  }
}

static void settle_mirrored(void) {
  if (f->drops) f->drops = f->wanted = 0;
  w->now += 2 * BEAT;
  settle();
  w->now += 2 * BEAT;
  settle();
}

/* After any chaos: all live workers that call are in one epoch, and know it. */
static void test_chaos(void **state) {
  uint64_t stood = 0, takeovers = 0, held = 0;
  (void)state;
  for (uint64_t seed = first_seed(), end = seed + rounds(1000); seed < end; seed++) {
    mirrored_open(1 + (uint32_t)(seed % WORKERS), seed);
    for (uint32_t i = 0; i < w->n; i++) come(i);
    for (int k = 0; k < 1200 && w->server->epoch < EPOCHS - 64; k++) act_mirrored(1);
    settle_mirrored();
    for (uint32_t i = 0; i < w->n; i++) {
      come(i);
      if (w->workers[i].finishes) leave(i);
      if (w->workers[i].alive && w->workers[i].done) { /* it goes, and comes again */
        if (!w->workers[i].up) greet(i);
        close_one(i);
        come(i);
      }
    }
    for (uint32_t i = 0; i < w->n; i++) w->workers[i].open = 0;
    settle_mirrored();
    for (uint32_t i = 0; i < w->n; i++) call(&w->workers[i]);
    settle_mirrored();
    for (int k = 0; k < 5; k++) mlfab__membership_tick(w->server, w->now);
    settle_mirrored();
    for (uint32_t i = 0; i < w->n; i++) {
      worker *me = &w->workers[i];
      if (me->state != IN || me->limit == UINT64_MAX) continue;
      me->calls = me->limit;
      look_at_limit(me);
    }
    settle_mirrored();
    assert_int_equal(w->server->phase, MLFAB__MEMBERSHIP_RUNNING);
    for (uint32_t i = 0; i < w->n; i++) {
      const worker *me = &w->workers[i];
      assert_int_equal(me->state, IN);
      assert_int_equal(me->epoch, w->server->epoch);
      assert_int_equal(me->members, w->n);
      assert_memory_equal(me->list, w->workers[0].list, w->n * sizeof me->list[0]);
    }
    stood += w->went;
    takeovers += f->takeovers;
    held += f->held;
    mirrored_close();
  }
  assert_true(stood > 20 && takeovers > 20 && held > 20);
}

/* Three of five finish at random, and server 0 is replaced again and again: nobody hears of a failure. */
static void test_finishing(void **state) {
  (void)state;
  for (uint64_t seed = first_seed(), end = seed + rounds(1000); seed < end; seed++) {
    mirrored_open(5, seed);
    for (uint32_t i = 0; i < 5; i++) come(i);
    for (uint32_t i = 0; i < 5; i++) call(&w->workers[i]);
    settle_mirrored();
    for (int k = 0; k < 400; k++) {
      if (k % 100 == 7 && k < 300) finish(1 + chance(3));
      act_mirrored(-1);
    }
    settle_mirrored();
    for (int more = 1, turns = 0; more; turns++) {
      assert_true(turns < 20);
      more = 0;
      for (uint32_t i = 0; i < 5; i++) {
        worker *me = &w->workers[i];
        if (me->finishes || me->state != IN || me->limit == UINT64_MAX) continue;
        more |= me->moved != me->epoch;
        me->calls = me->limit;
        look_at_limit(me);
      }
      settle_mirrored();
    }
    for (uint32_t i = 0; i < 5; i++) {
      worker *me = &w->workers[i];
      assert_int_equal(me->verdict.code, 0);
      assert_int_equal(me->state, me->finishes ? OUT : IN);
      if (!me->finishes) assert_int_equal(me->epoch, w->server->epoch);
    }
    mirrored_close();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_chaos),
      cmocka_unit_test(test_finishing),
  };
  int failed = cmocka_run_group_tests(tests, NULL, NULL);
  free(f);
  return failed;
}
