/* test_stream.c - core/coll/stream.c over links that break: two to eight workers send each other
 * messages of all sizes, copied and lent, through epochs that come and go.
 *
 * The model of a link is literal: frames that it has taken, of which the bytes still lie with the
 * sender; frames on the wire; reports of what was sent, which come late; acknowledgements on their
 * way back. It breaks at any time, and loses what it has; what was on the wire may still come until
 * the next link has introduced itself. Sources are spoilt as soon as they may be: when the receiver
 * has all of them, and freed when they are given back.
 *
 * MLFAB_SEED=n one random case alone, MLFAB_SCALE=100 a hundred times as many. */
#include "core/base/rng.h"
#include "core/coll/stream.h"
#include "scale.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

enum { WORKERS = 8, PATTERN = 2 << 20, MESSAGE_MAX = 1 << 20, TAKEN = 4, BEAT = 1000 };

static uint8_t pattern[PATTERN]; /* every message is a stretch of it */

typedef struct frame {
  uint8_t type;
  uint8_t meta[96];
  uint32_t meta_bytes, bulk_bytes;
  const uint8_t *lent; /* where the bytes lie, or NULL */
  uint8_t *own;        /* or a copy of them */
  uint64_t token;
  struct frame *next;
} frame;

typedef struct queue {
  frame *first, **end;
  unsigned count;
} queue;

/* From one worker to another. */
typedef struct link {
  int stands, met, wanted, listed;
  queue taken, wire, old, acks, reports; /* old: on the wire of the link before */
} link;

/* A piece of a message, as it was sent. */
typedef struct piece {
  mlfab__coll head;
  uint64_t at, n; /* in the pattern */
  uint8_t *source;
  int borrowed, given, arrived;
} piece;

/* What one worker sends another in an epoch. */
typedef struct talk {
  piece *pieces;
  uint32_t count, room, current; /* current: that is arriving */
  uint64_t offset;               /* in it */
  uint64_t seen;                 /* frames that came */
  uint64_t pending;              /* eager bytes that were not consumed */
  uint64_t left, total;          /* of the message that is being sent */
  mlfab__coll head;
} talk;

typedef struct worker {
  mlfab__streams streams;
  uint32_t rank;
} worker;

static struct world {
  mlfab__env env;
  mlfab_config config;
  mlfab__rng prng;
  uint32_t n, failing; /* failing: one allocation in so many; 0: none */
  uint32_t breaking;   /* one in so many steps */
  int hungry;          /* much is eager, and little of it consumed */
  worker workers[WORKERS];
  link links[WORKERS][WORKERS];
  talk talks[WORKERS][WORKERS];
  uint32_t epoch, ranks[2][WORKERS], members[2]; /* lists: of even and odd epochs */
  int changing, calm;
  int lenient; /* links may be dropped for what this test made up */
  const char *text;
  uint32_t doomed[WORKERS * WORKERS], ndoomed;
  uint64_t frames, delivered, breaks, epochs, detached, drops, acks, now;
} w;

static uint64_t below(uint64_t n) { return mlfab__rng_below(&w.prng, n); }

/* --- queues --- */

static void put(queue *q, frame *f) {
  if (!q->first) q->end = &q->first;
  f->next = NULL;
  *q->end = f;
  q->end = &f->next;
  q->count++;
}

static frame *get(queue *q) {
  frame *f = q->first;
  if (!f) return NULL;
  q->first = f->next;
  if (!q->first) q->end = &q->first;
  q->count--;
  return f;
}

static void discard(frame *f) {
  free(f->own);
  free(f);
}

static void empty(queue *q) {
  for (frame *f = get(q); f; f = get(q)) discard(f);
}

static frame *make_frame(uint8_t type, const void *meta, uint32_t bytes) {
  frame *f = calloc(1, sizeof *f);
  f->type = type;
  f->meta_bytes = bytes;
  assert_true(bytes <= sizeof f->meta);
  if (bytes) memcpy(f->meta, meta, bytes);
  return f;
}

/* The link keeps the bytes itself from now on. */
static void take_over(frame *f) {
  if (!f->lent) return;
  f->own = malloc(f->bulk_bytes);
  memcpy(f->own, f->lent, f->bulk_bytes);
  f->lent = NULL;
}

/* --- what the streams ask for --- */

static void port_post_hop(void *self, uint32_t peer, uint8_t type, const void *meta,
                          uint32_t bytes) {
  link *l = &w.links[((worker *)self)->rank][peer];
  if (l->stands) put(&l->taken, make_frame(type, meta, bytes));
}

static void port_post_down(void *self, uint32_t peer, uint8_t type, const void *meta,
                           uint32_t bytes) {
  link *l = &w.links[peer][((worker *)self)->rank];
  w.acks++;
  if (l->stands && l->met) put(&l->acks, make_frame(type, meta, bytes));
}

static void port_ready(void *self, uint32_t peer) {
  link *l = &w.links[((worker *)self)->rank][peer];
  if (l->stands) {
    l->listed = 1;
  } else {
    l->wanted = 1;
  }
}

static void doom(uint32_t from, uint32_t to, int code, const char *text) {
  w.drops++;
  w.text = text;
  assert_true(w.ndoomed < WORKERS * WORKERS);
  if (!w.lenient && (code != MLFAB_ERR_MEMORY || !w.failing))
    fail_msg("the link from %u to %u is dropped: %s", from, to, text);
  w.doomed[w.ndoomed++] = from * WORKERS + to;
}

static void port_drop_hop(void *self, uint32_t peer, int code, const char *text) {
  doom(((worker *)self)->rank, peer, code, text);
}

static void port_drop_down(void *self, uint32_t peer, int code, const char *text) {
  doom(peer, ((worker *)self)->rank, code, text);
}

static void port_detach(void *self, uint32_t peer, uint64_t token) {
  link *l = &w.links[((worker *)self)->rank][peer];
  w.detached++;
  for (frame *f = l->taken.first; f; f = f->next) {
    if (f->token == token) {
      take_over(f);
      f->token = 0;
    }
  }
}

/* Nothing that a link has of this source is read again. */
static void check_free(uint32_t from, uint32_t to, const piece *p) {
  for (const frame *f = w.links[from][to].taken.first; f; f = f->next)
    assert_false(f->lent && f->lent >= p->source && f->lent < p->source + p->n);
}

static void free_source(uint32_t from, uint32_t to, piece *p) {
  check_free(from, to, p);
  if (p->source) memset(p->source, 0xee, p->n);
  free(p->source);
  p->source = NULL;
}

/* --- workers --- */

static int send_piece(uint32_t from, uint32_t to);
static void leave_epoch(uint32_t rank);

static void consume(uint32_t from, uint32_t to) {
  talk *t = &w.talks[from][to];
  mlfab__streams *s = &w.workers[to].streams;
  uint64_t n = below(2) ? t->pending : below(t->pending + 1);
  if (!n || s->epoch == 0 || s->member_of[from] == 0) return;
  if (w.changing == 2 && s->epoch == w.epoch) return;
  t->pending -= n;
  mlfab__stream_consumed(s, s->member_of[from] - 1, n);
}

/* Workers whom this one has in its epoch. */
static uint32_t some_peer(uint32_t rank) {
  const mlfab__streams *s = &w.workers[rank].streams;
  uint32_t peer = s->ranks[below(s->members)];
  return peer == rank ? s->ranks[s->member_of[rank] % s->members] : peer;
}

static void user_deliver(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                         uint32_t bytes) {
  worker *me = self;
  uint32_t from = me->streams.ranks[member];
  talk *t = &w.talks[from][me->rank];
  assert_int_equal(head->epoch, me->streams.epoch);
  assert_int_equal(head->seq, ++t->seen);
  assert_true(t->current < t->count);
  piece *p = &t->pieces[t->current];
  assert_int_equal(head->channel, p->head.channel);
  assert_int_equal(head->number, p->head.number);
  assert_int_equal(head->tag, p->head.tag);
  assert_int_equal(head->flags, p->head.flags);
  assert_int_equal(head->signature, p->head.signature);
  assert_int_equal(head->total, p->head.total);
  assert_int_equal(head->offset, p->head.offset + t->offset);
  assert_true(bytes <= p->n - t->offset);
  assert_true(bytes > 0 || p->n == 0);
  assert_true(bytes <= mlfab__max(w.config.chunk_bytes / 64 * 64, 64));
  if (bytes > 0) assert_memory_equal(bulk, pattern + (p->at + t->offset), bytes);
  t->offset += bytes;
  w.delivered++;
  if (head->flags & MLFAB__COLL_EAGER) t->pending += bytes;
  assert_true(t->pending <= MLFAB__STREAM_CREDIT);
  if (t->offset == p->n) {
    p->arrived = 1;
    t->current++;
    t->offset = 0;
    if (p->source && below(2)) memset(p->source, 0x55, p->n);
  }
  if (!w.calm && below(6) == 0) (void)send_piece(me->rank, from);
  if (!w.calm && below(8) == 0) (void)send_piece(me->rank, some_peer(me->rank));
  if (below(w.hungry ? 100 : 3) == 0) consume(from, me->rank);
  if (!w.calm && !w.changing && below(3000) == 0) leave_epoch(me->rank);
}

static void user_given_back(void *self, uint32_t member, uint64_t cookie) {
  worker *me = self;
  uint32_t to = me->streams.ranks[member];
  talk *t = &w.talks[me->rank][to];
  assert_true(cookie < t->count);
  piece *p = &t->pieces[cookie];
  assert_true(p->borrowed && !p->given && p->arrived);
  p->given = 1;
  free_source(me->rank, to, p);
  if (!w.calm && below(4) == 0) (void)send_piece(me->rank, to);
  if (!w.calm && !w.changing && below(1000) == 0) leave_epoch(me->rank);
}

static uint64_t some_size(void) {
  uint64_t most = mlfab__min(MESSAGE_MAX, 40 * mlfab__max(w.config.chunk_bytes, 256));
  if (w.hungry) return below(MESSAGE_MAX);
  switch (below(12)) {
    case 0:
      return 0;
    case 1:
      return below(most + 1);
    case 2:
    case 3:
      return below(mlfab__min(40000, most));
    case 4:
      return below(3 * mlfab__min(w.config.chunk_bytes, most / 3));
    default:
      return below(300);
  }
}

/* A message, or the next part of one. 0 when it was queued. */
static int send_piece(uint32_t from, uint32_t to) {
  mlfab__streams *s = &w.workers[from].streams;
  talk *t = &w.talks[from][to];
  if (from == to || s->epoch == 0 || s->member_of[to] == 0) return 1;
  if (w.changing == 2 && s->epoch == w.epoch) return 1; /* others are not there yet */
  if (!t->left) {
    t->total = t->left = some_size();
    t->head.channel = (uint32_t)below(20);
    t->head.number = below(1000);
    t->head.tag = (uint32_t)below(100);
    t->head.flags = below(w.hungry ? 8 : 2) ? MLFAB__COLL_EAGER : 0;
    t->head.signature = mlfab__rng_next(&w.prng);
    t->head.total = t->total;
  }
  if (t->count == t->room) {
    t->room = t->room ? 2 * t->room : 64;
    t->pieces = realloc(t->pieces, t->room * sizeof *t->pieces);
  }
  piece *p = &t->pieces[t->count];
  memset(p, 0, sizeof *p);
  p->head = t->head;
  p->head.offset = t->total - t->left;
  p->n = below(3) ? t->left : below(t->left + 1);
  p->at = below(PATTERN - p->n + 1);
  p->borrowed = below(2) != 0;
  uint8_t *source = p->n ? malloc(p->n) : NULL;
  if (source) memcpy(source, pattern + p->at, p->n);
  int status =
      mlfab__stream_send(s, s->member_of[to] - 1, &p->head, source, p->n, !p->borrowed, t->count);
  if (status) {
    assert_int_equal(status, MLFAB_ERR_MEMORY);
    assert_true(w.failing);
    free(source);
    return 1;
  }
  if (p->borrowed) {
    p->source = source;
  } else {
    if (source) memset(source, 0xdd, p->n);
    free(source);
  }
  t->count++;
  t->left -= p->n;
  return 0;
}

/* --- links --- */

static void break_link(uint32_t from, uint32_t to) {
  link *l = &w.links[from][to];
  if (!l->stands) return;
  w.breaks++;
  l->stands = l->met = l->listed = l->wanted = 0;
  empty(&l->taken);
  empty(&l->acks);
  empty(&l->reports);
  empty(&l->old);
  l->old = l->wire;
  if (!l->old.first) l->old.end = &l->old.first;
  memset(&l->wire, 0, sizeof l->wire);
  mlfab__stream_peer_lost(&w.workers[from].streams, to);
}

static void settle_doomed(void) {
  while (w.ndoomed > 0) {
    uint32_t one = w.doomed[--w.ndoomed];
    break_link(one / WORKERS, one % WORKERS);
    empty(&w.links[one / WORKERS][one % WORKERS].old);
  }
}

static void connect_link(uint32_t from, uint32_t to) {
  link *l = &w.links[from][to];
  if (l->stands || !l->wanted) return;
  l->stands = 1;
  put(&l->taken, make_frame(MLFAB__MEET, NULL, 0));
  mlfab__stream_peer_up(&w.workers[from].streams, to);
}

/* The link has room: asks for the next frame. */
static void fill_link(uint32_t from, uint32_t to) {
  link *l = &w.links[from][to];
  mlfab__streams *s = &w.workers[from].streams;
  uint8_t meta[MLFAB_META_MAX];
  mlfab__frame_out out;
  if (!l->stands || !l->listed || l->taken.count >= TAKEN) return;
  memset(&out, 0, sizeof out);
  out.meta = meta;
  if (!mlfab__stream_next(s, to, &out)) {
    l->listed = 0;
    return;
  }
  w.frames++;
  frame *f = make_frame(out.type, out.meta, out.meta_bytes);
  f->bulk_bytes = out.bulk_bytes;
  f->token = out.token;
  assert_true(out.token >> 60 == 0); /* the node's bits */
  assert_int_equal(out.token != 0, out.bulk_bytes > MLFAB__STREAM_COPY);
  f->lent = out.bulk_bytes ? out.bulk : NULL;
  if (!out.token) take_over(f);
  put(&l->taken, f);
  if (!w.calm && below(10) == 0) (void)send_piece(from, to);
  mlfab__stream_taken(s, to, &out);
}

static void transmit(uint32_t from, uint32_t to) {
  link *l = &w.links[from][to];
  frame *f = get(&l->taken);
  if (!f) return;
  take_over(f);
  if (f->token) {
    frame *report = make_frame(0, NULL, 0);
    report->token = f->token;
    put(&l->reports, report);
  }
  put(&l->wire, f);
}

static void report(uint32_t from, uint32_t to) {
  link *l = &w.links[from][to];
  frame *f = l->stands ? get(&l->reports) : NULL;
  if (!f) return;
  mlfab__stream_sent(&w.workers[from].streams, to, f->token);
  discard(f);
}

static void arrive(uint32_t from, uint32_t to) {
  link *l = &w.links[from][to];
  mlfab__streams *s = &w.workers[to].streams;
  frame *f = l->old.first && !below(3) ? get(&l->old) : get(&l->wire);
  if (!f) return;
  if (f->type == MLFAB__MEET) {
    empty(&l->old);
    l->met = 1;
  } else {
    mlfab__coll head;
    mlfab__frame_in in = {f->type, f->meta_bytes, f->bulk_bytes, f->meta, f->own};
    assert_int_equal(mlfab__decode_coll(f->meta, f->meta_bytes, &head), 0);
    /* What has come is not sent again. */
    if (head.epoch == s->epoch && head.seq > 0) assert_true(head.seq > w.talks[from][to].seen);
    assert_int_equal(mlfab__stream_member_frame(s, from, &in), 1);
  }
  discard(f);
  settle_doomed();
}

static void answer(uint32_t from, uint32_t to) {
  link *l = &w.links[from][to];
  frame *f = l->stands ? get(&l->acks) : NULL;
  if (!f) return;
  mlfab__frame_in in = {f->type, f->meta_bytes, 0, f->meta, NULL};
  assert_int_equal(mlfab__stream_peer_frame(&w.workers[from].streams, to, &in), 1);
  discard(f);
  settle_doomed();
}

/* The look at the clock. */
static void tick(uint32_t rank) {
  mlfab__streams *s = &w.workers[rank].streams;
  w.now += BEAT / 4;
  mlfab__streams_tick(s);
  for (uint32_t to = 0; to < w.n; to++) {
    link *l = &w.links[rank][to];
    if (l->stands) continue;
    uint64_t since = 0;
    if (mlfab__stream_peer_missing(s, to, w.now, &since)) l->wanted = 1;
    assert_true(since <= w.now);
  }
}

/* --- epochs --- */

static void leave_epoch(uint32_t rank) {
  mlfab__streams *s = &w.workers[rank].streams;
  w.changing |= s->epoch == w.epoch;
  mlfab__streams_end(s);
  assert_int_equal(s->bytes_waiting, 0);
  for (uint32_t to = 0; to < w.n; to++) {
    talk *t = &w.talks[rank][to];
    for (uint32_t i = 0; i < t->count; i++) {
      if (t->pieces[i].source) free_source(rank, to, &t->pieces[i]);
    }
  }
}

static void choose_members(uint32_t epoch) {
  uint32_t *ranks = w.ranks[epoch % 2];
  for (uint32_t i = 0; i < w.n; i++) ranks[i] = i;
  for (uint32_t i = 0; i < w.n; i++) {
    uint32_t j = i + (uint32_t)below(w.n - i), swap = ranks[i];
    ranks[i] = ranks[j];
    ranks[j] = swap;
  }
  w.members[epoch % 2] = 2 + (uint32_t)below(w.n - 1);
}

/* changing: 1 some have left the epoch; 2 all go to the next, which is w.epoch, one by one. */
static void step_epoch(uint32_t rank) {
  mlfab__streams *s = &w.workers[rank].streams;
  uint32_t left = 0;
  if (w.changing == 1) {
    w.changing = 2;
    choose_members(++w.epoch);
    w.epochs++;
  }
  if (!w.changing) return;
  const uint32_t *ranks = w.ranks[w.epoch % 2];
  for (uint32_t i = 0; i < w.members[w.epoch % 2]; i++) {
    if (ranks[i] == rank && s->epoch != w.epoch) {
      leave_epoch(rank);
      if (mlfab__streams_begin(s, w.epoch, ranks, w.members[w.epoch % 2])) assert_true(w.failing);
    }
    left += w.workers[ranks[i]].streams.epoch != w.epoch;
  }
  for (uint32_t i = 0; i < w.n && left == 0; i++)
    if (w.workers[i].streams.epoch != w.epoch) leave_epoch(i);
  if (left > 0) return;
  w.changing = 0;
  for (uint32_t i = 0; i < w.n * WORKERS; i++) {
    talk *t = &w.talks[i / WORKERS][i % WORKERS];
    for (uint32_t k = 0; k < t->count; k++) assert_null(t->pieces[k].source);
    t->count = t->current = 0;
    t->offset = t->seen = t->pending = t->left = 0;
  }
}

/* --- a case --- */

static void *failing_allocate(void *user, size_t bytes) {
  (void)user;
  if (w.failing && below(w.failing) == 0) return NULL;
  return malloc(bytes);
}

static void plain_release(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  free(memory);
}

static void open_world(uint64_t seed, uint32_t n, uint64_t chunk, uint32_t failing) {
  mlfab_env hooks;
  memset(&w, 0, sizeof w);
  mlfab__rng_seed(&w.prng, seed);
  memset(&hooks, 0, sizeof hooks);
  hooks.size = sizeof hooks;
  hooks.allocate = failing_allocate;
  hooks.release = plain_release;
  assert_int_equal(mlfab__env_init(&w.env, &hooks), 0);
  w.n = w.config.workers = n;
  w.config.chunk_bytes = (uint32_t)chunk;
  w.failing = failing;
  for (uint32_t i = 0; i < n; i++) {
    worker *me = &w.workers[i];
    mlfab__port hop = {me, port_post_hop, port_ready, port_drop_hop, port_detach, NULL};
    mlfab__port down = {me, port_post_down, NULL, port_drop_down, NULL, NULL};
    mlfab__stream_user user = {me, user_deliver, user_given_back};
    me->rank = i;
    mlfab__streams_init(&me->streams, &w.env, &w.config, &hop, &down, &user);
  }
  w.changing = 1;
  while (w.changing) step_epoch((uint32_t)below(n));
}

static void close_world(void) {
  for (uint32_t i = 0; i < w.n; i++) {
    leave_epoch(i);
    mlfab__streams_free(&w.workers[i].streams);
    for (uint32_t j = 0; j < w.n; j++) {
      link *l = &w.links[i][j];
      queue *queues[] = {&l->taken, &l->wire, &l->old, &l->acks, &l->reports};
      for (int q = 0; q < 5; q++) empty(queues[q]);
      free(w.talks[i][j].pieces);
    }
  }
  assert_int_equal(w.env.bytes, 0);
}

static void step(uint32_t from, uint32_t to) {
  switch (below(12)) {
    case 0:
      if (!w.calm) (void)send_piece(from, to);
      break;
    case 1:
    case 2:
      fill_link(from, to);
      break;
    case 3:
    case 4:
      transmit(from, to);
      break;
    case 5:
    case 6:
      arrive(from, to);
      break;
    case 7:
      report(from, to);
      break;
    case 8:
      answer(from, to);
      break;
    case 9:
      if (below(8) == 0) tick(from);
      break;
    case 10:
      connect_link(from, to);
      if (!w.hungry || below(40) == 0) consume(from, to);
      break;
    default:
      if (!w.calm && below(w.breaking) == 0) break_link(from, to);
      if (!w.calm && !w.changing && below(500) == 0) leave_epoch(from);
      if (w.changing) step_epoch(from);
      break;
  }
}

static int all_done(void) {
  if (w.changing) return 0;
  for (uint32_t i = 0; i < w.n * WORKERS; i++) {
    uint32_t from = i / WORKERS, to = i % WORKERS;
    const talk *t = &w.talks[from][to];
    if (t->current < t->count) return 0;
    if (!mlfab__streams_quiet(&w.workers[from].streams)) return 0;
  }
  return 1;
}

static void run_case(uint64_t seed) {
  static const uint32_t chunks[] = {1, 64, 1000, 4096, 10000, 65536, 262144};
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  uint32_t n = 2 + (uint32_t)mlfab__rng_below(&prng, mlfab__rng_below(&prng, 2) ? 2 : 7);
  open_world(seed, n, chunks[mlfab__rng_below(&prng, 7)], mlfab__rng_below(&prng, 4) == 0 ? 20 : 0);
  w.hungry = w.config.chunk_bytes >= 65536 && below(2);
  w.breaking = below(2) ? 10 : 100;
  for (uint64_t i = 0; i < 2000 * n; i++) {
    uint32_t from = (uint32_t)below(n), to = (uint32_t)below(n - 1);
    step(from, to + (to >= from));
  }
  /* No more faults: everything comes to its end. */
  w.calm = 1;
  w.failing = 0;
  for (uint64_t i = 0; !all_done(); i++) {
    uint32_t from = (uint32_t)below(n), to = (uint32_t)below(n - 1);
    step(from, to + (to >= from));
    if (i > 20000000) fail_msg("seed %llu hangs", (unsigned long long)seed);
  }
  for (uint32_t i = 0; i < w.n * WORKERS; i++) {
    const talk *t = &w.talks[i / WORKERS][i % WORKERS];
    for (uint32_t k = 0; k < t->count; k++)
      assert_true(!t->pieces[k].borrowed || t->pieces[k].given);
  }
  for (uint32_t i = 0; i < w.n; i++) assert_int_equal(w.workers[i].streams.bytes_waiting, 0);
  close_world();
}

static uint64_t number_of(const char *name, uint64_t usual) {
  const char *text = getenv(name);
  return text ? strtoull(text, NULL, 10) : usual;
}

static void test_random(void **state) {
  (void)state;
  uint64_t one = number_of("MLFAB_SEED", 0), seeds = test_cases(150);
  uint64_t delivered = 0, breaks = 0, epochs = 0, detached = 0, drops = 0;
  for (uint64_t seed = one ? one : 1; seed <= (one ? one : seeds); seed++) {
    run_case(seed);
    delivered += w.delivered;
    breaks += w.breaks;
    epochs += w.epochs;
    detached += w.detached;
    drops += w.drops;
  }
  print_message("%llu frames delivered, %llu breaks, %llu epochs, %llu detached, %llu dropped\n",
                (unsigned long long)delivered, (unsigned long long)breaks,
                (unsigned long long)epochs, (unsigned long long)detached,
                (unsigned long long)drops);
}

/* --- single cases: two workers, 0 sends to 1 --- */

static worker *const one = &w.workers[0], *const other = &w.workers[1];
static talk *const said = &w.talks[0][1];
static link *const way = &w.links[0][1];

static void open_two(uint32_t chunk) {
  open_world(1, 2, chunk, 0);
  w.calm = 1; /* nothing happens by itself */
  w.hungry = 1;
  w.lenient = 1;
}

static void say(uint64_t n, uint32_t flags, int copy) {
  said->left = 0;
  if (said->count == said->room) {
    said->room = said->room ? 2 * said->room : 64;
    said->pieces = realloc(said->pieces, said->room * sizeof *said->pieces);
  }
  piece *p = &said->pieces[said->count];
  memset(p, 0, sizeof *p);
  p->head.flags = flags;
  p->head.total = p->n = n;
  p->borrowed = !copy;
  p->source = n ? malloc(n) : NULL;
  if (n) memcpy(p->source, pattern, n);
  assert_int_equal(mlfab__stream_send(&one->streams, one->streams.member_of[1] - 1, &p->head,
                                      p->source, n, copy, said->count++),
                   0);
  if (copy) free_source(0, 1, p);
}

/* Until nothing moves any more. */
static void run_two(void) {
  uint64_t before;
  do {
    before = w.frames + w.delivered + w.acks;
    connect_link(0, 1);
    for (int i = 0; i < 20; i++) {
      fill_link(0, 1);
      while (way->taken.first) transmit(0, 1);
      while (way->reports.first) report(0, 1);
      while (way->wire.first) arrive(0, 1);
      while (way->acks.first) answer(0, 1);
    }
  } while (before != w.frames + w.delivered + w.acks);
}

static void test_acknowledges_seldom(void **state) {
  (void)state;
  open_two(65536);
  for (int i = 0; i < 15; i++) say(100, 0, 1);
  run_two();
  assert_int_equal(w.delivered, 15);
  assert_int_equal(w.acks, 0);
  assert_false(mlfab__streams_quiet(&one->streams));
  assert_int_equal(one->streams.bytes_waiting, 1500);
  say(100, 0, 1); /* so many frames */
  run_two();
  assert_int_equal(w.acks, 1);
  assert_true(mlfab__streams_quiet(&one->streams));
  say(MLFAB__STREAM_LEND, 0, 0);
  run_two();
  assert_int_equal(w.acks, 1);
  assert_false(said->pieces[16].given);
  tick(1);
  run_two();
  assert_int_equal(w.acks, 2);
  assert_true(said->pieces[16].given);
  say(MLFAB__STREAM_LEND + 1, 0, 0); /* somebody waits for its memory */
  run_two();
  assert_int_equal(w.acks, 3);
  assert_true(said->pieces[17].given);
  say(1 << 20, 0, 0); /* so many bytes, and the end */
  run_two();
  assert_int_equal(w.acks, 5);
  tick(1);
  assert_int_equal(w.acks, 5);
  assert_int_equal(w.detached, 0);
  close_world();
}

static void test_credit(void **state) {
  const uint32_t most = MLFAB__STREAM_CREDIT >> 19, all = most + most / 4;
  (void)state;
  open_two(65536);
  for (uint32_t i = 0; i < all; i++) say(1 << 19, MLFAB__COLL_EAGER, i % 2);
  say(100, 0, 1);
  run_two();
  assert_int_equal(said->current, most); /* also what needs no credit waits for what does */
  assert_int_equal(said->pending, MLFAB__STREAM_CREDIT);
  uint64_t acks = w.acks;
  said->pending -= MLFAB__STREAM_CREDIT / 4 - 1;
  mlfab__stream_consumed(&other->streams, other->streams.member_of[0] - 1,
                         MLFAB__STREAM_CREDIT / 4 - 1);
  assert_int_equal(w.acks, acks);
  said->pending--;
  mlfab__stream_consumed(&other->streams, other->streams.member_of[0] - 1, 1);
  assert_int_equal(w.acks, acks + 1);
  run_two();
  assert_int_equal(said->current, all + 1);
  /* The word of it is lost with the link: the next one asks. */
  for (int i = 0; i < 2; i++) say(1 << 19, MLFAB__COLL_EAGER, 1);
  run_two();
  assert_int_equal(said->current, all + 1);
  tick(1);
  answer(0, 1);
  break_link(0, 1);
  mlfab__stream_consumed(&other->streams, other->streams.member_of[0] - 1, said->pending);
  said->pending = 0;
  tick(0);
  assert_true(way->wanted);
  run_two();
  assert_int_equal(said->current, all + 3);
  /* Crumbs are told of now and then. */
  tick(1);
  acks = w.acks;
  said->pending--;
  mlfab__stream_consumed(&other->streams, other->streams.member_of[0] - 1, 1);
  assert_int_equal(w.acks, acks);
  tick(1);
  assert_int_equal(w.acks, acks + 1);
  close_world();
}

/* A frame of worker 0 as it may say, and what becomes of it. */
static const char *hear(const mlfab__coll *head, uint32_t bytes, int ghost) {
  uint8_t meta[96];
  uint64_t drops = w.drops;
  mlfab__frame_in in = {MLFAB__COLL, mlfab__encode_coll(meta, head), bytes, meta,
                        bytes && !ghost ? pattern : NULL};
  assert_int_equal(mlfab__stream_member_frame(&other->streams, 0, &in), 1);
  w.ndoomed = 0;
  return w.drops > drops ? w.text : NULL;
}

static void test_broken_peers(void **state) {
  (void)state;
  open_two(65536);
  mlfab__coll head = {.epoch = w.epoch, .seq = 2, .total = 10};
  assert_string_equal(hear(&head, 10, 0), "a collective's frame came before others");
  head.seq = 1;
  head.offset = 1;
  assert_string_equal(hear(&head, 10, 0), "a collective's bytes beyond its end");
  head.offset = 11;
  assert_string_equal(hear(&head, 0, 0), "a collective's bytes beyond its end");
  head.offset = UINT64_MAX;
  assert_string_equal(hear(&head, 2, 0), "a collective's bytes beyond its end");
  head.offset = 0;
  assert_string_equal(hear(&head, 10, 1), "a collective's frame without its bytes");
  head.flags = MLFAB__COLL_EAGER;
  head.total = (uint64_t)MLFAB__STREAM_CREDIT + 1;
  assert_string_equal(hear(&head, MLFAB__STREAM_CREDIT + 1, 1),
                      "a collective's frame without its bytes");
  /* More than the credit, in frames. */
  said->pieces = calloc(1, sizeof *said->pieces);
  said->room = said->count = 1;
  said->pieces[0].head = head;
  said->pieces[0].n = head.total;
  for (uint32_t i = 0; i < MLFAB__STREAM_CREDIT / 65536; i++) {
    head.seq = i + 1;
    head.offset = i * 65536ull;
    said->pieces[0].at = (uint64_t)0 - head.offset; /* every frame is the same */
    assert_null(hear(&head, 65536, 0));
  }
  head.seq++;
  head.offset = MLFAB__STREAM_CREDIT;
  assert_string_equal(hear(&head, 1, 0), "more eager bytes than there is credit for");
  /* Of other epochs: not a word. What came before: acknowledged again. */
  uint64_t acks = w.acks;
  head.epoch++;
  assert_null(hear(&head, 1, 0));
  head.epoch -= 2;
  assert_null(hear(&head, 1, 0));
  assert_int_equal(w.acks, acks);
  head.epoch++;
  head.seq = 5;
  assert_null(hear(&head, 1, 0));
  assert_int_equal(w.acks, acks + 1);
  /* Rubbish, and somebody who is no member. */
  mlfab__frame_in in = {MLFAB__COLL, 3, 0, (const uint8_t *)"abc", NULL};
  assert_int_equal(mlfab__stream_member_frame(&other->streams, 0, &in), 1);
  assert_string_equal(w.text, "a malformed COLL");
  w.ndoomed = 0;
  other->streams.member_of[0] = 0;
  assert_string_equal(hear(&head, 1, 0), "a collective's frame of a worker that is no member");
  other->streams.member_of[0] = 2 - (other->streams.ranks[0] == 0);
  in.type = MLFAB__HOP_CHUNK;
  assert_int_equal(mlfab__stream_member_frame(&other->streams, 0, &in), 0);
  assert_int_equal(mlfab__stream_peer_frame(&other->streams, 0, &in), 0);
  close_world();
}

static int acknowledged(uint64_t received, uint64_t consumed) {
  mlfab__coll_ack ack = {w.epoch, received, consumed};
  uint8_t meta[96];
  uint64_t drops = w.drops;
  mlfab__frame_in in = {MLFAB__COLL_ACK, mlfab__encode_coll_ack(meta, &ack), 0, meta, NULL};
  assert_int_equal(mlfab__stream_peer_frame(&one->streams, 1, &in), 1);
  w.ndoomed = 0;
  return w.drops == drops;
}

static void test_broken_acknowledgements(void **state) {
  (void)state;
  open_two(65536);
  assert_false(acknowledged(0, 0)); /* nothing was ever sent */
  for (int i = 0; i < 6; i++) say(1000, MLFAB__COLL_EAGER, 1);
  port_ready(one, 1);
  connect_link(0, 1);
  for (int i = 0; i < 5; i++) fill_link(0, 1); /* the link takes three beside its greeting */
  assert_false(acknowledged(4, 0));
  assert_false(acknowledged(1, 3001));
  assert_true(acknowledged(2, 1000));
  assert_false(acknowledged(1, 1000));
  assert_false(acknowledged(2, 999));
  assert_true(acknowledged(3, 3000));
  mlfab__frame_in in = {MLFAB__COLL_ACK, 3, 0, (const uint8_t *)"abc", NULL};
  assert_int_equal(mlfab__stream_peer_frame(&one->streams, 1, &in), 1);
  assert_string_equal(w.text, "a malformed COLL_ACK");
  w.ndoomed = 0;
  close_world();
}

/* What was yielded and forgotten before it was taken is taken back. */
static void test_forgotten_before_taken(void **state) {
  (void)state;
  uint8_t meta[96];
  mlfab__frame_out out = {.meta = meta};
  open_two(65536);
  connect_link(0, 1);
  say(10000, 0, 1);
  assert_int_equal(mlfab__stream_next(&one->streams, 1, &out), 1);
  assert_true(out.token > 0 && out.token >> 60 == 0); /* the node's bits */
  leave_epoch(0);
  uint64_t detached = w.detached;
  mlfab__stream_taken(&one->streams, 1, &out);
  assert_int_equal(w.detached, detached + 1);
  mlfab__stream_sent(&one->streams, 1, out.token);
  while (w.changing) step_epoch((uint32_t)below(2));
  say(10000, 0, 1);
  mlfab__stream_taken(&one->streams, 1, &out); /* the first of another epoch */
  assert_int_equal(w.detached, detached + 2);
  port_ready(one, 1);
  run_two();
  assert_int_equal(w.delivered, 1);
  close_world();
}

static void test_missing_link(void **state) {
  (void)state;
  uint64_t since = 0;
  open_two(65536);
  assert_int_equal(mlfab__stream_peer_missing(&one->streams, 1, 50, &since), 0);
  say(10, 0, 1);
  assert_int_equal(mlfab__stream_peer_missing(&one->streams, 1, 60, &since), 1);
  assert_int_equal(since, 60);
  assert_int_equal(mlfab__stream_peer_missing(&one->streams, 1, 70, NULL), 1);
  assert_int_equal(mlfab__stream_peer_missing(&one->streams, 1, 80, &since), 1);
  assert_int_equal(since, 60);
  run_two();
  break_link(0, 1);
  assert_int_equal(mlfab__stream_peer_missing(&one->streams, 1, 90, &since), 1);
  assert_int_equal(since, 90); /* not acknowledged yet */
  way->wanted = 1;
  run_two();
  assert_int_equal(mlfab__stream_peer_missing(&one->streams, 1, 95, &since), 0);
  assert_int_equal(mlfab__stream_peer_missing(&one->streams, 0, 95, NULL), 0);
  assert_int_equal(mlfab__stream_peer_missing(&one->streams, 7, 95, NULL), 0);
  /* What the lost link had is nothing to be taken back. */
  say(MLFAB__STREAM_LEND + 1, 0, 0);
  fill_link(0, 1);
  assert_int_equal(way->taken.count, 1);
  break_link(0, 1);
  way->wanted = 1;
  run_two();
  assert_true(said->pieces[1].given);
  assert_int_equal(w.detached, 0);
  close_world();
}

/* Calls that repeat allocate nothing; what was needed once is given back in the next epoch. */
static void test_memory(void **state) {
  (void)state;
  uint64_t before = 0;
  open_two(65536);
  for (int round = 0; round < 50; round++) {
    if (round == 1) before = w.env.allocations;
    for (int i = 0; i < 40; i++) say((uint64_t)i * 700, 0, 1);
    for (int i = 0; i < 5; i++) say(1 << 20, 0, i % 2);
    run_two();
    tick(1);
    run_two();
    assert_true(mlfab__streams_quiet(&one->streams));
  }
  assert_int_equal(w.env.allocations, before);
  for (int i = 0; i < 8; i++) say(1 << 20, 0, 1);
  run_two();
  assert_true(one->streams.pool.bytes > MLFAB__STREAM_POOL);
  w.changing = 1;
  while (w.changing) step_epoch((uint32_t)below(2));
  /* Links may still have to be told of what they had borrowed of it. */
  assert_true(one->streams.pool.bytes > MLFAB__STREAM_POOL);
  mlfab__streams_trim(&one->streams);
  assert_int_equal(one->streams.pool.bytes, 0);
  say(100, 0, 1);
  run_two();
  w.changing = 1;
  while (w.changing) step_epoch((uint32_t)below(2));
  assert_int_equal(one->streams.pool.bytes, 128);
  close_world();
}

int main(void) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, 7);
  for (size_t i = 0; i < PATTERN; i += 8) {
    uint64_t x = mlfab__rng_next(&prng);
    memcpy(pattern + i, &x, 8);
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_acknowledges_seldom),
      cmocka_unit_test(test_credit),
      cmocka_unit_test(test_broken_peers),
      cmocka_unit_test(test_broken_acknowledgements),
      cmocka_unit_test(test_forgotten_before_taken),
      cmocka_unit_test(test_missing_link),
      cmocka_unit_test(test_memory),
      cmocka_unit_test(test_random),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
