/* test_copy.c - the two copies of a server, each among voters and workers that the test plays. One serves, and sends its
 * state; the other takes it. The test carries the frames from copy to copy, or spoils them.
 *
 * Oracle: a copy that takes over sends its state again, which must be that of the former server, byte by byte. */
#include "core/base/rng.h"
#include "core/checkpoint/checkpoint_wire.h"
#include "core/checkpoint/record.h"
#include "core/model/image.h"
#include "core/node/node.h"
#include "core/replica/replica_wire.h"
#include "../unit/scale.h"
#define SCENE_ENDS both_end()
#include "talk.h"

#include <math.h>

enum { COUNT = 2048, FRAMES = 512, WORKERS = 2, SERVES = 0, STANDS_BY = 1, WITNESS = 2 };
#define BEAT 500000000ull

/* A frame of a moment, and all of them as they travel. */
typedef struct letter {
  mlfab__moment_frame head;
  uint8_t meta[512], bulk[1024]; /* meta: of the record */
  uint32_t meta_bytes, bulk_bytes;
} letter;

typedef struct stream {
  letter letters[FRAMES];
  uint32_t n;
} stream;

/* A copy, and what it has said. */
typedef struct copy {
  talk t;
  uint32_t self;
  int alone; /* the other copy does not beat */
  uint64_t got, sent, updates[WORKERS];
  mlfab__vote_message asks, knows; /* its last question, or a beat; its last message */
} copy;

/* What S defines. */
typedef struct setting {
  uint32_t dtype, block_bytes, count;
  mlfab_model_options options;
} setting;

static const char *vote_dir = ""; /* of the copy that is opened next */
static uint32_t died[WORKERS];    /* how often a copy has said so */
static copy copies[2], *me;       /* me: the one that is spoken to */
static stream moment;             /* the last that was sent */
static setting chosen;
static mlfab__rng prng;
static double weights[COUNT];
#define OTHER (1 - me->self)

BEFORE_MAIN prng_begins(void) { mlfab__rng_seed(&prng, 1); }
static void turn_to(copy *c) {
  me = c;
  t = &c->t;
}
static void both_end(void) {
  for (uint32_t v = 0; v < 2; v++) {
    turn_to(&copies[v]);
    talk_close();
  }
}
static uint32_t below(uint32_t n) { return (uint32_t)mlfab__rng_below(&prng, n); }

static void say_vote(uint32_t v, mlfab__vote_message m) {
  m.nonce = 100 + v;
  m.sent_ns = t->now;
  m.echo_nonce = me->knows.nonce;
  m.echo_ns = me->knows.sent_ns;
  const mlfab__vote_frame frame = {.message = m};
  talk_say(FROM_VOTER(v), MLFAB__VOTE, mlfab__encode_vote_frame(t->meta, &frame), NULL, 0);
}

static void say_beat(uint32_t v, mlfab__vote_record bond) {
  say_vote(v,
           (mlfab__vote_message){.known = 1, .floor = bond.epoch, .decided = bond, .bond = bond});
}

/* Hears all but moments. */
static void hear(void) {
  for (uint32_t v = 0; v < 3; v++) {
    for (const talk_frame *f; (f = talk_peer_of(VOTER(v))->first);) {
      if (f->header.type == MLFAB__MOMENT) break;
      if (f->header.type == MLFAB__VOTE)
        HEAR(VOTER(v), VOTE, vote_frame,
             (me->knows = m->message).kind != MLFAB__VOTE_ASK || (me->asks = m->message, 1));
      else if (f->header.type == MLFAB__MOMENT_HAS)
        HEAR(VOTER(v), MOMENT_HAS, moment_has, (me->got = m->number, 1));
      else
        talk_drop_frame(talk_peer_of(VOTER(v)));
    }
  }
}

static void pass(uint32_t halves) {
  for (; halves > 0; halves--) {
    talk_wait(BEAT / 2);
    hear();
    for (uint32_t v = 0; v < 3; v++)
      if (v == WITNESS || (v == OTHER && !me->alone)) say_beat(v, me->knows.bond);
    hear();
  }
}

static void on_event(void *user, const mlfab_event_info *info) {
  (void)user;
  if (info->kind == MLFAB_EVENT_DEAD && !info->is_server) died[info->rank]++;
}

static void open_copy(uint32_t voter, uint32_t block_bytes) {
  mlfab_config config = SIZED(mlfab_config, .roles = voter ? MLFAB_ROLE_REPLICA : MLFAB_ROLE_SERVER,
                              .workers = WORKERS, .servers = 1, .replicas = 1, .dedicated = 1,
                              .block_bytes = block_bytes, .chunk_bytes = 1024, .div_max = HUGE_VAL,
                              .scheduler = MLFAB_SCHEDULER_OWN, .on_event = on_event);
  turn_to(&copies[voter]);
  talk_init();
  *me = (copy){.t = *t, .self = voter};
  t->has_files = vote_dir[0] != 0;
  snprintf(config.vote_dir, sizeof config.vote_dir, "%s", vote_dir);
  talk_open(&config);
  for (uint32_t v = 0; v < 3; v++)
    if (v != voter) talk_call(FROM_VOTER(v));
  pass(2);
}

/* --- the copy that serves --- */

static uint32_t width(void) { return chosen.dtype == MLFAB_F64 ? 8 : 4; }

/* The next update of a worker, of some bytes. */
static void push_some(uint32_t w, uint64_t from, uint64_t bytes) {
  for (uint32_t i = 0; i < COUNT; i++) weights[i] = 1.0 + (double)below(1000) / 1000;
  uint64_t done = me->updates[w]++;
  SAY_PUSH(WORKER(w), weights, (uint32_t)bytes, SEGMENTS({from, bytes}), VERSIONS(UINT64_MAX),
           .progress = done, .seq = done + 1, .eager = (uint32_t)bytes);
}
static void push(void) { push_some(0, 0, (uint64_t)chosen.count * width()); }

static void define(uint32_t worker, uint32_t first_weights) {
  uint8_t table[MLFAB__TENSOR_INFO_BYTES] __attribute__((aligned(8)));
  const mlfab__tensor_info info = {1, chosen.dtype, chosen.count};
  mlfab__encode_tensor_info(table, &info);
  SAY_BULK(WORKER(worker), DEFINE, define, table, sizeof table, .ask = 1, .tensors = 1,
           .first_weights = first_weights, .options = chosen.options);
}

/* Takes the next frame of a moment: the type of its record, or 0. */
static uint32_t take(mlfab__moment_frame *head) {
  const talk_frame *f;
  hear();
  if (!(f = talk_peer_of(VOTER(OTHER))->first)) return 0;
  assert_true(f->header.type == MLFAB__MOMENT);
  assert_int_equal(mlfab__decode_moment_frame(f->meta, MLFAB__MOMENT_FRAME_BYTES, head), 0);
  if (head->index == 0) moment.n = 0;
  assert_true(moment.n < FRAMES);
  letter *l = &moment.letters[moment.n++];
  l->head = *head;
  l->meta_bytes = f->meta_bytes - MLFAB__MOMENT_FRAME_BYTES;
  l->bulk_bytes = f->bulk_bytes;
  assert_true(l->meta_bytes <= sizeof l->meta && l->bulk_bytes <= sizeof l->bulk);
  memcpy(l->meta, f->meta + MLFAB__MOMENT_FRAME_BYTES, l->meta_bytes);
  if (f->bulk) memcpy(l->bulk, f->bulk, l->bulk_bytes);
  talk_drop_frame(talk_peer_of(VOTER(OTHER)));
  return head->type;
}

/* The other copy has so much, and gets the next moment. 0: there is none. */
static int send_moment(uint64_t has) {
  mlfab__moment_frame head;
  uint32_t type;
  SAY(FROM_VOTER(OTHER), MOMENT_HAS, moment_has, .number = has, .term = has ? me->self + 1 : 0,
      .refused = has < me->sent ? me->sent : 0);
  pass(2);
  if (!(type = take(&head))) return 0;
  while (type != MLFAB__RECORD_END) assert_int_not_equal(type = take(&head), 0);
  me->sent = head.number;
  return 1;
}

static void serve(setting s) {
  chosen = s;
  open_copy(SERVES, s.block_bytes);
  for (uint32_t w = 0; w < WORKERS; w++) define(w, 0);
}

/* A model of one tensor. */
static setting simple(void) {
  return (setting){MLFAB_F32,
                   1024,
                   COUNT,
                   {.slices = 4,
                    .optimizer = MLFAB_OPTIMIZER_MOMENTUM,
                    .gamma = 0.5,
                    .adadelay_c = 1.0,
                    .epsilon = 1e-8,
                    .beta1 = 0.9,
                    .beta2 = 0.999}};
}

static void serve_simply(void) {
  serve(simple());
  for (int i = 0; i < 20; i++) push();
}

/* Without a model there is only an end. While a model does not stand yet, nothing is sent. */
SCENE(test_no_model) {
  chosen = simple();
  open_copy(SERVES, 1024);
  for (uint32_t w = 0; w < WORKERS; w++) define(w, w == 0);
  assert_int_equal(send_moment(0), 0);
  SAY_PUSH(WORKER(0), NULL, 0, SEGMENTS({0, 4 * COUNT}), VERSIONS(UINT64_MAX), .seq = 1,
           .flags = MLFAB__PUSH_INIT);
  for (uint64_t at = 0; at < 4 * COUNT; at += 1024)
    SAY_BULK(WORKER(0), CHUNK, chunk, weights, 1024, .seq = 1, .offset = at,
             .generation = talk_peer_of(WORKER(0))->generation);
  assert_true(send_moment(0) && moment.n > 8);
  open_copy(SERVES, 1024);
  assert_true(send_moment(0) && moment.n == 1);
}

/* END leaves when the transport has given back everything that was lent: until then it may have been spoilt. */
SCENE(test_end_waits) {
  mlfab__moment_frame head;
  uint32_t type = 0, most = 0;
  serve_simply();
  t->hold_sent = 1;
  SAY(FROM_VOTER(OTHER), MOMENT_HAS, moment_has, .number = 0);
  for (int turns = 0; type != MLFAB__RECORD_END && turns < 1000; turns++) {
    while ((type = take(&head)) > 0 && type != MLFAB__RECORD_END) continue;
    uint32_t lent = talk_lent(VOTER(OTHER)), i = 0;
    assert_true(type != MLFAB__RECORD_END || lent == 0);
    if (lent > most) most = lent;
    while (i < t->nloans && t->loans[i].state != LOAN_LIVE) i++;
    if (i < t->nloans) talk_sent(&t->loans[i]);
  }
  assert_true(type == MLFAB__RECORD_END && most > 2);
}

/* There is no memory to keep a state that an update changes while it is sent: that moment is not whole, and the next one
 * begins. */
SCENE(test_lost) {
  uint32_t anew = 0;
  for (uint32_t k = 1; k < 24; k++) {
    mlfab__moment_frame head;
    serve_simply();
    talk_room(VOTER(OTHER), 8);
    SAY(FROM_VOTER(OTHER), MOMENT_HAS, moment_has, .number = 0);
    while (take(&head)) continue;
    uint64_t number = head.number;
    t->fail_at = t->calls + k;
    push();
    t->fail_at = 0;
    talk_room(VOTER(OTHER), -1);
    pass(3);
    while (take(&head)) continue;
    assert_int_equal(head.type, MLFAB__RECORD_END);
    anew += head.number != number;
  }
  assert_true(anew > 4);
}

/* --- the copy that stands by --- */

static void say_letter(const letter *l) {
  mlfab__encode_moment_frame(t->meta, &l->head);
  memcpy(t->meta + MLFAB__MOMENT_FRAME_BYTES, l->meta, l->meta_bytes);
  if (!talk_linked(FROM_VOTER(OTHER))) return;
  talk_say(FROM_VOTER(OTHER), MLFAB__MOMENT, MLFAB__MOMENT_FRAME_BYTES + l->meta_bytes,
           l->bulk_bytes ? l->bulk : NULL, l->bulk_bytes);
  hear();
}

static void feed(const stream *s, uint32_t from, uint32_t to) {
  for (uint32_t i = from; i < to; i++) say_letter(&s->letters[i]);
}

/* The former server is silent: the copy, which is in sync, asks for its place. */
static void fall_silent(void) {
  const mlfab__vote_record both = {2, SERVES, 1u << SERVES | 1u << STANDS_BY};
  say_beat(SERVES, both);
  say_beat(WITNESS, both);
  pass(2);
  assert_int_equal(me->knows.bond.epoch, 2);
  me->alone = 1;
  for (int i = 0; i < 20 && me->asks.kind != MLFAB__VOTE_ASK; i++) pass(1);
  assert_true(me->asks.kind == MLFAB__VOTE_ASK && me->asks.record.serves == STANDS_BY);
}

/* It serves, because the witness grants that. */
static void take_over(void) {
  fall_silent();
  mlfab__vote_message grant = me->asks;
  grant.kind = MLFAB__VOTE_GRANT;
  grant.bond = grant.record;
  grant.floor = grant.record.epoch;
  say_vote(WITNESS, grant);
  me->alone = 0;
  pass(4);
}

/* A server that has sent two moments: all, and what an update has changed. A copy has the first one. */
static stream first, second;

static void stand_by(void) {
  serve_simply();
  assert_int_equal(send_moment(0), 1);
  first = moment;
  push_some(0, 0, 64);
  assert_int_equal(send_moment(1), 1);
  second = moment;
  open_copy(STANDS_BY, 1024);
  feed(&first, 0, first.n - 1);
  assert_int_equal(me->got, 0);
  feed(&first, first.n - 1, first.n);
  assert_int_equal(me->got, 1);
}

/* A copy that asks to serve takes nothing. If it does not get to serve, the rest of that moment is no error and counts for
 * nothing. Then it takes moments again. */
SCENE(test_asks) {
  stand_by();
  feed(&second, 0, 2);
  fall_silent();
  feed(&second, 2, 3);
  me->alone = 0;
  pass(4);
  feed(&second, 3, second.n);
  assert_true(me->got == 1 && talk_linked(FROM_VOTER(SERVES)));
  feed(&second, 0, second.n);
  assert_int_equal(me->got, 2);
}

/* The images of a state, by slice and kind. A copy cuts them into blocks of its own. */
typedef uint8_t images[8][4][8 * 2048];

/* Takes the images out of a stream: the other letters remain. */
static void lay_out(const stream *s, images to, stream *rest) {
  memset(to, 0, sizeof(images));
  rest->n = 0;
  for (uint32_t i = 0; i < s->n; i++) {
    const letter *l = &s->letters[i];
    mlfab__checkpoint_bytes at;
    if (l->head.type == MLFAB__RECORD_IMAGE) {
      assert_int_equal(mlfab__decode_checkpoint_bytes(l->meta, l->meta_bytes, &at), 0);
      memcpy(to[at.slice][at.kind] + at.offset, l->bulk, l->bulk_bytes);
    } else if (l->head.type != MLFAB__RECORD_END) {
      rest->letters[rest->n++] = *l;
    }
  }
}

/* Are these the same state? Terms and numbers of moments differ. */
static void same_state(const stream *a, const stream *b) {
  static images one, other;
  static stream x, y;
  lay_out(a, one, &x);
  lay_out(b, other, &y);
  assert_int_equal(a->letters[0].head.history, b->letters[0].head.history);
  assert_int_equal(x.n, y.n);
  for (uint32_t i = 0; i < x.n; i++) {
    const letter *l = &x.letters[i], *m = &y.letters[i];
    uint32_t skip = l->head.type == MLFAB__RECORD_HEAD ? 8 : 0;
    assert_true(l->head.type == m->head.type && l->meta_bytes == m->meta_bytes);
    assert_memory_equal(l->meta + skip, m->meta + skip, l->meta_bytes - skip);
    assert_memory_equal(l->bulk, m->bulk, l->bulk_bytes);
  }
  assert_memory_equal(one, other, sizeof one);
}

/* This copy knows who serves. It ignores all frames of another copy, and a whole state, too. */
SCENE(test_stale) {
  stand_by();
  take_over();
  feed(&second, 0, second.n);
  feed(&first, 0, first.n);
  assert_int_equal(me->got, 1);
  assert_int_equal(send_moment(0), 1);
  same_state(&moment, &first);
}

/* A worker calls, is turned away, and reads why. */
static void turned_away(const char *why) {
  const mlfab__hello hello = talk_hello(WORKER(0));
  talk_dial(WORKER(0));
  talk_say(WORKER(0), MLFAB__HELLO, mlfab__encode_hello(t->meta, &hello), NULL, 0);
  talk_skip(WORKER(0));
  assert_int_equal(talk_peer_of(WORKER(0))->code, MLFAB_ERR_AGAIN);
  assert_string_equal(talk_peer_of(WORKER(0))->why, why);
}

/* A copy that does not serve tells workers which process it misses, or that its own disk fails. */
SCENE(test_why) {
  const mlfab__vote_record both = {2, SERVES, 1u << SERVES | 1u << STANDS_BY};
  vote_dir = "talk";
  stand_by();
  vote_dir = "";
  turned_away("the server serves");
  me->alone = 1;
  pass(12);
  turned_away("the server is silent");
  talk_wait(6 * BEAT);
  hear();
  turned_away("the server and the scheduler are silent");
  pass(2);
  turned_away("the server is silent");
  me->alone = 0;
  pass(2);
  turned_away("the server serves");
  say_beat(SERVES, both);
  say_beat(WITNESS, both);
  t->file_code = MLFAB_ERR_IO;
  me->alone = 1;
  pass(12);
  turned_away("it cannot write its vote in vote_dir");
}

/* By its last moment a copy that takes over knows who is away: it awaits the others, and declares only them dead. */
SCENE(test_away) {
  for (uint32_t away = 0; away < 1u << WORKERS; away++) {
    serve_simply();
    if (away & 1) SAY(WORKER(0), BYE, bye, .code = 0);
    if (away & 2) talk_break(WORKER(1));
    pass(60);
    assert_int_equal(send_moment(0), 1);
    first = moment;
    open_copy(STANDS_BY, 1024);
    feed(&first, 0, first.n);
    take_over();
    memset(died, 0, sizeof died);
    pass(60);
    for (uint32_t w = 0; w < WORKERS; w++) assert_int_equal(died[w], !(away >> w & 1));
  }
}

/* A copy that stands by ends when the copy that serves says goodbye. No other goodbye ends a copy. */
SCENE(test_goodbyes) {
  for (uint32_t i = 0; i < 6; i++) {
    uint32_t serves = i % 3; /* 0: no; 1: yes; 2: it has taken over */
    if (serves == 1)
      serve_simply();
    else
      stand_by();
    if (serves == 2) take_over();
    SAY(FROM_VOTER(i < 3 ? OTHER : WITNESS), BYE, bye, .code = 0);
    assert_int_equal(t->node->ended, i == 0);
  }
}

/* --- any server --- */

static setting draw_setting(void) {
  static const uint32_t optimizers[] = {MLFAB_OPTIMIZER_SGD, MLFAB_OPTIMIZER_MOMENTUM,
                                        MLFAB_OPTIMIZER_ADAM};
  setting s = simple();
  s.dtype = below(2) ? MLFAB_F32 : MLFAB_F64;
  s.block_bytes = 64u << below(5);
  s.count = 16 * (1 + below(64));
  s.options.slices = 1 + below(8);
  s.options.optimizer = optimizers[below(3)];
  s.options.consistency.kind = below(2) ? MLFAB_SYNC_ASYNC : MLFAB_SYNC_BSP;
  return s;
}

/* A worker calls again, and goes on behind what was decided. */
static void call_again(uint32_t w) {
  mlfab__hello hello = talk_hello(WORKER(w));
  talk_dial(WORKER(w));
  talk_say(WORKER(w), MLFAB__HELLO, mlfab__encode_hello(t->meta, &hello), NULL, 0);
  while (talk_peer_of(WORKER(w))->first->header.type != MLFAB__HELLO_ACK)
    talk_drop_frame(talk_peer_of(WORKER(w)));
  HEAR(WORKER(w), HELLO_ACK, hello_ack,
       (me->updates[w] = m->top, talk_peer_of(WORKER(w))->generation = m->generation));
}

/* Something that changes the server's state. */
static void change(void) {
  uint32_t w = below(WORKERS);
  talk_skip(WORKER(w));
  uint64_t bytes = 16 * (1 + below(chosen.count / 16)) * (width() / 4);
  if (!talk_linked(WORKER(w))) {
    call_again(w);
  } else if (below(20) == 0) {
    talk_break(WORKER(w));
  } else if (chosen.options.consistency.kind == MLFAB_SYNC_ASYNC ||
             me->updates[w] <= me->updates[1 - w]) {
    push_some(w, 0, bytes);
  }
}

/* Spoils one frame so that no later one can mend it. 0: it cannot be spoilt like that. */
static int spoil(stream *s) {
  uint32_t i = 1 + below(s->n - 1); /* without its begin it may be the rest of one that was cut */
  letter *l = &s->letters[i];
  mlfab__checkpoint_bytes bytes = {.kind = 0};
  if (l->head.type == MLFAB__RECORD_IMAGE)
    assert_int_equal(mlfab__decode_checkpoint_bytes(l->meta, l->meta_bytes, &bytes), 0);
  uint32_t what = below(6);
  if (what == 3 && (l->bulk_bytes == 0 || bytes.kind == MLFAB__IMAGE_SUM)) return 0; /* has gaps */
  if (what == 5 && i + 1 == s->n) return 0;
  if (what == 0) l->head.index++;
  if (what == 1) l->head.type++;
  if (what == 2) l->meta_bytes--;
  if (what == 3) l->bulk_bytes--;
  if (what == 4) memmove(l, l + 1, (--s->n - i) * sizeof *l);
  if (what == 5) s->letters[i + 1] = *l;
  return i < s->n;
}

/* Feeds a stream, at which the copy may hang up. */
static void feed_again(const stream *s) {
  feed(s, 0, s->n);
  talk_skip(FROM_VOTER(SERVES));
  if (!talk_linked(FROM_VOTER(SERVES))) talk_back(FROM_VOTER(SERVES));
  hear();
}

static uint32_t spoilt, cuts, deltas;

/* Wrong streams are refused or not taken, and the link may be lost. */
static void feed_wrong(const stream *good) {
  static stream bad;
  uint64_t had = me->got, number = good->letters[0].head.number;
  bad = *good;
  if (good->letters[0].head.since > 0 || below(3) == 0) {
    bad.n = below(good->n);
    cuts++;
  } else if (below(4) == 0) {
    letter *l = &bad.letters[below(bad.n)];
    if (l->meta_bytes) l->meta[below(l->meta_bytes)] ^= (uint8_t)(1u << below(8));
    bad.n--; /* it never ends, because it may be right */
  } else if (spoil(&bad)) {
    spoilt++;
  } else {
    return;
  }
  feed_again(&bad);
  if (me->got != had && me->got >= number)
    fail_msg("a wrong stream is taken: %u of %u letters", bad.n, good->n);
}

/* Moments of any server, all of it and what has changed since, give the copy its whole state; streams that are cut or wrong
 * change nothing. */
static void run(uint64_t seed) {
  static stream kept;
  copy *server = &copies[SERVES], *replica = &copies[STANDS_BY];
  mlfab__rng_seed(&prng, seed + 1);
  serve(draw_setting());
  open_copy(STANDS_BY, below(4) ? chosen.block_bytes : 64u << below(5));
  for (uint32_t round = 0; round < 12; round++) {
    turn_to(server);
    for (uint32_t n = below(8); n > 0; n--) change();
    if (!send_moment(below(2) ? replica->got : 0)) continue;
    kept = moment;
    deltas += kept.letters[0].head.since > 0;
    turn_to(replica);
    for (int i = 0; i < 3; i++) feed_wrong(&kept);
    if (kept.letters[0].head.since > 0 && me->got == 0) continue; /* the next one is full */
    feed(&kept, 0, kept.n);
    assert_int_equal(me->got, kept.letters[0].head.number);
  }
  for (int whole = replica->got == 0; whole < 2; whole++) { /* the last is compared only */
    turn_to(server);
    int sent = send_moment(whole ? 0 : replica->got);
    assert_true(sent || !whole);
    kept = moment;
    turn_to(replica);
    if (sent && (!whole || me->got == 0)) {
      feed(&kept, 0, kept.n);
      assert_int_equal(me->got, kept.letters[0].head.number);
    }
  }
  take_over();
  assert_int_equal(send_moment(0), 1);
  same_state(&moment, &kept);
}

SCENE(test_any) {
  for (uint64_t seed = 0; seed < test_cases(300); seed++) run(seed);
  if (test_scale() >= 1.0) assert_true(spoilt > 1000 && cuts > 1000 && deltas > 1000);
}

/* The k-th allocation fails, for every k: nothing has changed. A stream then succeeds. */
SCENE(test_memory) {
  uint32_t fails = 0;
  serve_simply();
  assert_int_equal(send_moment(0), 1);
  first = moment;
  open_copy(STANDS_BY, 1024);
  for (uint64_t k = 1; me->got == 0; k++, fails++) {
    t->fail_at = t->calls + k;
    feed_again(&first);
    t->fail_at = 0;
  }
  assert_true(fails > 20);
  uint64_t calls = t->calls;
  feed_again(&first);
  assert_int_equal(t->calls, calls); /* the second time needs nothing */
  take_over();
  assert_int_equal(send_moment(0), 1);
  same_state(&moment, &first);
}

/* The state of another model, or of another server, is refused, and the log says why. */
SCENE(test_others) {
  static const char *const words[] = {"tensor number 0",
                                      "options of its model",
                                      "options of its model",
                                      "is missing",
                                      "epoch 0 of the layout; epoch 1 is here",
                                      "of server 0 of 2"};
  for (uint32_t kind = 0; kind < 6; kind++) {
    setting s = simple();
    stand_by();
    if (kind == 0) s.count = 1000;
    if (kind == 1) s.options.beta1 = 0.5;
    if (kind == 2) s.options.slices = 2;
    copy *replica = me;
    serve(s);
    assert_int_equal(send_moment(0), 1);
    turn_to(replica);
    if (kind == 3) moment = second; /* a part, as if it were all */
    if (kind >= 4) {
      mlfab__checkpoint_head head;
      letter *l = &moment.letters[0];
      assert_int_equal(mlfab__decode_checkpoint_head(l->meta, l->meta_bytes, &head), 0);
      *(kind == 4 ? &head.epoch : &head.servers) = kind == 4 ? 0 : 2;
      l->meta_bytes = mlfab__encode_checkpoint_head(l->meta, &head);
    }
    for (uint32_t i = 0; i < moment.n; i++) moment.letters[i].head.since = 0;
    feed_again(&moment);
    assert_int_equal(me->got, 0);
    if (!strstr(t->earlier, words[kind])) fail_msg("'%s' has no '%s'", t->earlier, words[kind]);
    feed_again(&second); /* it has what it had */
    assert_int_equal(me->got, 2);
  }
}
