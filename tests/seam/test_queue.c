/* test_queue.c - a server in a fabric with a scheduler: random plans, groups and failures, of dense updates and of packets. The
 * test plays the workers, some of which add up what others push, and the scheduler that makes the groups.
 *
 * Workers, aggregators and scheduler are a few lines each, written from the protocol alone. The server's frames are
 * delivered later, in a random order, so that frames in opposite directions cross.
 *
 * Oracles: a dense group of the same values at another server; the sum of the updates that were said to be applied.
 * MLFAB_SEED=n runs one random case alone, MLFAB_SCALE=100 a hundred times as many. */
#include "core/base/env.h"
#define SCENE_ENDS close_world()
#include "tests/seam/serving.h"
#include "tests/seam/updates.h"

enum { PEERS = 5, PENDING = 6, INBOX = 1024, SUMS = 64, COUNT = 96, TOTAL = 1 << 16 };
#define BEAT 500000000ull

/* A frame of the server on its way. */
typedef struct message {
  uint8_t type;
  uint32_t bytes;
  uint8_t meta[1024];
} message;

/* A push that is not decided. */
typedef struct pending {
  uint64_t seq, group, sent, granted, base, progress;
  uint32_t aggregator;
  int announced, packed, bad;
  double scale;
  shape shape;
  update update;
} pending;

/* A group that a worker adds up. */
typedef struct sum {
  mlfab__group group;
  mlfab__group_member members[PEERS * PENDING];
  uint32_t have; /* members added */
  uint64_t released, sent, total;
  shape shape;
  uint8_t *values, *stream;
} sum;

typedef struct peer {
  uint32_t generation;
  int met[PEERS]; /* members whose links to this aggregator stand */
  uint64_t seq, applied, dropped;
  pending pushes[PENDING];
  sum sums[SUMS];
  message inbox[INBOX];
  uint32_t begin, end;
} peer;

/* A server, its model and its schedule. */
typedef struct setting {
  const mlfab__tensor_info *tensors;
  uint32_t ntensors, rule, sync, chunk, block, accumulators;
  double gamma;   /* 0: the usual one */
  uint64_t bound; /* of delays; 0: none */
  int drops;      /* plans drop some updates, and name some that do not exist */
  mlfab_update_fn on_update;
} setting;

static seam s;
static struct world {
  setting is;
  mlfab__env env; /* of the layout */
  mlfab__layout layout;
  mlfab__rng prng;
  peer peers[PEERS];
  mlfab__announce waiting[PEERS * PENDING];
  uint32_t nwaiting, most; /* most: pushes of a worker that are not decided */
  mlfab__report report;    /* the last one */
  int calm;
  int lowered;      /* the bound is set while bytes are on their way */
  uint32_t cut_off; /* a worker whose link breaks after a few more steps, plus one */
  shape all;        /* the whole model */
  uint8_t *expected, *model;
  uint64_t tokens[64]; /* of frames of the model, to be given back */
  uint32_t ntokens;
  int read;         /* the model is complete */
  uint64_t version; /* after the last commit */
  uint64_t applied, dropped, groups[2];
} w;

static uint64_t draw(uint64_t n) { return mlfab__rng_below(&w.prng, n); }
static int linked(const uint32_t p) { return s.peers[p].link != 0; }
static int scheduler_up(void) { return linked(PEERS); }

/* --- pushes --- */

static pending *push_find(peer *p, uint64_t seq) {
  for (int i = 0; i < PENDING; i++)
    if (p->pushes[i].seq == seq && seq) return &p->pushes[i];
  return NULL;
}

/* The update was applied: adds it to the expected model. */
static void push_applied(peer *p, const pending *q) {
  assert_false(q->bad);
  w.applied++;
  p->applied++;
  literal_apply(&w.layout, &q->shape, w.expected, q->update.dense, q->scale);
}

static void push_over(pending *q) {
  free_update(&q->update);
  q->seq = 0;
}

/* The server forgets what it has not decided; the worker learns what it has. */
static void resync(peer *p, uint32_t generation, uint64_t top, const uint64_t applied[4]) {
  p->generation = generation;
  for (int i = 0; i < PENDING; i++) {
    pending *q = &p->pushes[i];
    if (q->seq == 0) continue;
    q->announced = 0;
    q->sent = q->granted = 0;
    q->aggregator = MLFAB__NO_NODE;
    if (q->seq > top) continue;
    uint64_t back = top - q->seq;
    if (back < 256 && (applied[back / 64] >> (back % 64) & 1)) push_applied(p, q);
    push_over(q);
  }
}

/* Says PUSH. `bulk`: 32 of the bytes of a small update, which waits for no plan. */
static void say_push(uint32_t at, const pending *q, const void *bulk) {
  mlfab__push push =
      OF(mlfab__push, .seq = q->seq, .members = 1, .versions = 1, .parts = 1,
         .segments = q->shape.n, .generation = w.peers[at].generation, .progress = q->progress,
         .bytes = bulk ? q->shape.bytes : q->update.bytes, .scale = q->scale);
  if (bulk) push.eager = (uint32_t)push.bytes;
  if (!bulk) push.flags = MLFAB__PUSH_PLANNED | (q->packed ? MLFAB__PUSH_PACKED : 0u);
  seam_bulk(&s, at, MLFAB__PUSH, mlfab__encode_push(s.meta, &push, q->shape.segments, &q->base),
            bulk, bulk ? 32 : 0);
}

static void announce(uint32_t at) {
  pending *q = NULL;
  for (int i = 0; i < PENDING; i++) {
    pending *other = &w.peers[at].pushes[i];
    if (other->seq && !other->announced && (!q || other->seq < q->seq)) q = other;
  }
  if (!q || !linked(at)) return;
  q->announced = 1;
  say_push(at, q, NULL);
}

/* One more update of a worker, without delay and without bytes. NULL: too many are open. */
static pending *offer(uint32_t at, const shape *of, double scale) {
  peer *p = &w.peers[at];
  for (uint32_t i = 0; i < w.most; i++) {
    pending *q = &p->pushes[i];
    if (q->seq) continue;
    *q = (pending){.seq = ++p->seq,
                   .aggregator = MLFAB__NO_NODE,
                   .base = UINT64_MAX, /* no delay, whatever is still in flight */
                   .scale = scale,
                   .shape = *of};
    q->progress = q->seq - 1;
    return q;
  }
  return NULL;
}

static pending *push(uint32_t at, const shape *of, int packed, int whole, double scale) {
  pending *q = offer(at, of, scale);
  if (!q) return NULL;
  q->packed = packed;
  random_update(&w.prng, &w.layout, of, packed || w.calm, whole, draw(2) ? 99 : 20, &q->update);
  if (!packed) { /* the same values, dense */
    q->update.data = q->update.dense;
    q->update.bytes = of->bytes;
  }
  return q;
}

/* A worker adds to its own element of the model. */
static void push_as(uint32_t at, uint64_t progress, double scale) {
  pending *q = offer(at, &w.all, scale);
  float *data = calloc(1, w.all.bytes);
  assert_true(q && data);
  data[at] = 1.0f;
  q->update.dense = q->update.data = (uint8_t *)data;
  q->update.bytes = w.all.bytes;
  q->base = 0;
  q->progress = progress;
  announce(at);
}

/* How many of these bytes, up to `upto`, fit into one frame: whole packets, or any. */
static uint32_t piece_of(const uint8_t *data, uint64_t at, uint64_t upto, int packed) {
  uint32_t n = 0;
  if (!packed) return upto > at ? (uint32_t)mlfab__min(upto - at, s.config.chunk_bytes) : 0;
  while (at + n < upto) {
    mlfab__packet packet;
    uint32_t bytes = mlfab__packet_open(data + at + n, TOTAL * 8, &packet);
    assert_true(bytes > 0);
    if ((n > 0 && n + bytes > s.config.chunk_bytes) || bytes > upto - at - n) break;
    n += bytes;
  }
  return n;
}

/* A worker sends the next bytes of an update that goes directly. */
static void send_some(uint32_t at) {
  peer *p = &w.peers[at];
  for (int i = 0; i < PENDING && linked(at); i++) {
    pending *q = &p->pushes[i];
    if (!q->seq || !q->announced || q->aggregator != MLFAB__NO_NODE) continue;
    uint64_t upto = mlfab__min(q->granted, q->update.bytes);
    uint32_t n = piece_of(q->update.data, q->sent, upto, q->packed);
    if (n == 0) continue;
    uint64_t from = q->sent;
    q->sent += n;
    SAY_BULK(&s, at, CHUNK, chunk, q->update.data + from, n, q->seq, from, p->generation);
    return;
  }
}

/* --- sums --- */

static void free_sum(sum *one) {
  free(one->values);
  free(one->stream);
  memset(one, 0, sizeof *one);
}

static sum *sum_find(peer *p, uint64_t number) {
  for (int i = 0; i < SUMS; i++)
    if (p->sums[i].group.group == number) return &p->sums[i];
  return NULL;
}

static void sum_begin(uint32_t at, const message *m) {
  sum *one = sum_find(&w.peers[at], 0);
  if (!one) { /* it has no room */
    mlfab__group_end head;
    assert_int_equal(mlfab__decode_group_end(m->meta, 8, &head), 0);
    SAY(&s, at, GROUP_FAIL, group_fail, head.group, 0, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
    return;
  }
  assert_int_equal(
      mlfab__decode_group(m->meta, m->bytes, &one->group, one->members, one->shape.segments), 0);
  one->shape.n = one->group.segments;
  one->shape.bytes = one->group.bytes;
  assert_true(one->group.members >= 2);
  for (uint32_t k = 0; k < one->group.members; k++) {
    for (uint32_t i = 0; i < k; i++) /* a worker's updates are in order */
      assert_true(one->members[i].worker != one->members[k].worker ||
                  one->members[i].seq < one->members[k].seq);
    const pending *q = push_find(&w.peers[one->members[k].worker], one->members[k].seq);
    if (q) assert_int_equal(q->packed, one->group.packed);
  }
  w.groups[one->group.packed]++;
  one->values = calloc(1, one->shape.bytes);
  assert_non_null(one->values);
}

/* member NULL: because of the aggregator itself. */
static void sum_fail(uint32_t at, sum *one, const mlfab__group_member *member, int code) {
  mlfab__group_fail fail = {one->group.group, member ? member->seq : 0,
                            member ? member->worker : MLFAB__NO_NODE, code};
  free_sum(one);
  seam_say(&s, at, MLFAB__GROUP_FAIL, mlfab__encode_group_fail(s.meta, &fail));
}

/* Encodes a sum that is complete. */
static void sum_end(sum *one) {
  static uint64_t keep[MLFAB__PACKET_ELEMENTS / 64];
  static const uint8_t zero[8];
  one->stream = malloc(8 * TOTAL + one->shape.bytes);
  assert_non_null(one->stream);
  if (!one->group.packed) memcpy(one->stream, one->values, one->total = one->shape.bytes);
  for (uint64_t at = 0; one->group.packed && at < one->shape.bytes;) {
    mlfab__packet_shape piece = {0};
    const uint8_t *from = one->values + at;
    uint8_t *to = one->stream + one->total;
    piece.dtype = piece_at(&w.layout, &one->shape, at, &piece.offset, &piece.elements);
    uint32_t width = mlfab__dtype_bytes(piece.dtype);
    memset(keep, 0, sizeof keep);
    for (uint32_t i = 0; i < piece.elements; i++)
      if (memcmp(from + i * width, zero, width) != 0) keep[i / 64] |= 1ull << i % 64;
    at += (uint64_t)piece.elements * width;
    uint32_t n = draw(2) ? mlfab__packet_dense(to, &piece, from)
                         : mlfab__packet_marked(to, &piece, from, keep, 1);
    if (n == 0 && one->total == 0 && at == one->shape.bytes)
      n = mlfab__packet_dense(to, &piece, from);
    one->total += n;
  }
}

/* Any of a peer's groups; NULL: it has none. */
static sum *some_sum(peer *p) {
  uint64_t from = draw(SUMS);
  for (uint64_t i = 0; i < SUMS; i++) {
    sum *one = &p->sums[(from + i) % SUMS];
    if (one->group.group) return one;
  }
  return NULL;
}

/* An aggregator adds the next member's update, if this member was told to send it there; or forwards a frame of the sum; or
 * says that it is at work. */
static void sum_step(uint32_t at) {
  peer *p = &w.peers[at];
  sum *one = some_sum(p);
  if (!one || !linked(at)) return;
  if (one->have < one->group.members) {
    const mlfab__group_member *member = &one->members[one->have];
    const pending *q = push_find(&w.peers[member->worker], member->seq);
    int sends = q && q->group == one->group.group && q->aggregator == at && p->met[member->worker];
    if (!sends && draw(20) == 0)
      SAY(&s, at, FORWARD, forward, one->group.group, 0, one->group.packed ? 0 : one->shape.bytes);
    if (!sends) return;
    if (q->bad) {
      sum_fail(at, one, member, MLFAB_ERR_NOT_FINITE);
      return;
    }
    literal_add(&w.layout, &one->shape, one->values, q->update.dense, member->weight,
                one->have == 0);
    if (++one->have == one->group.members) sum_end(one);
    return;
  }
  uint64_t upto = mlfab__min(one->released, one->total);
  uint32_t n = piece_of(one->stream, one->sent, upto, (int)one->group.packed);
  if (n == 0) return;
  uint64_t from = one->sent;
  one->sent += n;
  /* Most faults occur earlier; this one occurs when part of a sum is at the server. */
  if (!w.calm && draw(40) == 0) w.cut_off = at + 1;
  SAY_BULK(&s, at, FORWARD, forward, one->stream + from, n, one->group.group, from, one->total);
}

/* --- what the server says --- */

static void clear(uint32_t at) {
  w.peers[at].begin = w.peers[at].end = 0;
  for (int i = 0; i < SUMS; i++) free_sum(&w.peers[at].sums[i]);
}

static void announced(const mlfab__announce *a) {
  for (uint32_t i = 0; i < w.nwaiting; i++)
    if (w.waiting[i].worker == a->worker && w.waiting[i].id == a->id)
      w.waiting[i] = w.waiting[--w.nwaiting];
  assert_true(w.nwaiting < PEERS * PENDING);
  w.waiting[w.nwaiting++] = *a;
}

static void shown(const mlfab__model *m, const seam_heard *heard) {
  if (heard->bulk) memcpy(w.model + m->offset, heard->bulk, heard->bulk_bytes);
  assert_true(w.ntokens < 64);
  if (heard->token) w.tokens[w.ntokens++] = heard->token;
  w.read = (m->flags & MLFAB__MODEL_LAST) != 0;
}

static void hear(seam *of, const seam_heard *heard) {
  (void)of;
#define ON_HEARD(...) ON_FRAME(heard->type, heard->meta, heard->meta_bytes, __VA_ARGS__)
  ON_HEARD(ANNOUNCE, announce, announced(m));
  ON_HEARD(REPORT, report, w.report = *m);
  ON_HEARD(MODEL, model, shown(m, heard));
  ON_HEARD(PUSH_ACK, push_ack, w.version = m->code ? w.version : m->version);
  if (heard->peer == PEERS || heard->type == MLFAB__MODEL || heard->type == MLFAB__HEARTBEAT)
    return;
  peer *p = &w.peers[heard->peer];
  message *to = &p->inbox[p->end++ % INBOX];
  assert_true(p->end - p->begin <= INBOX && heard->meta_bytes <= sizeof to->meta);
  to->type = heard->type;
  to->bytes = heard->meta_bytes;
  memcpy(to->meta, heard->meta, heard->meta_bytes);
}

static void acknowledged(peer *p, const mlfab__push_ack *ack) {
  pending *q = push_find(p, ack->seq);
  if (!q) return;
  for (int i = 0; i < PENDING && w.is.drops; i++) /* in the order of their numbers */
    assert_true(p->pushes[i].seq == 0 || p->pushes[i].seq >= ack->seq);
  if (ack->code == 0) {
    assert_true(ack->delay < w.is.bound);
    push_applied(p, q);
  } else if (ack->code == MLFAB_ERR_DROPPED) {
    /* The drop comes before any byte was sent, unless a group with this update was spoilt and the update
     * moved back. */
    if (seam_stats(&s).groups_failed == 0 && !w.lowered) assert_int_equal(q->sent, 0);
    p->dropped++;
    w.dropped++;
  } else {
    assert_true(ack->code == MLFAB_ERR_NOT_FINITE ? q->bad : ack->code == MLFAB_ERR_WITHDRAWN);
  }
  push_over(q);
}

static void granted(peer *p, const mlfab__grant *m) {
  pending *q = push_find(p, m->seq);
  if (q && m->generation == p->generation && q->aggregator == MLFAB__NO_NODE) q->granted = m->upto;
}

static void routed(peer *p, const mlfab__via *m) {
  pending *q = push_find(p, m->seq);
  if (!q || m->generation != p->generation) return;
  assert_true(m->group > q->group);
  q->group = m->group;
  q->aggregator = m->aggregator;
  q->sent = q->granted = 0;
}

static void released(sum *one, uint64_t upto) {
  if (one) one->released = mlfab__max(one->released, upto);
}
static void ended(sum *one) {
  if (one) free_sum(one);
}

/* The next frame of the server reaches the worker. */
static void deliver(uint32_t at) {
  peer *p = &w.peers[at];
  if (p->begin == p->end) return;
  const message it = p->inbox[p->begin++ % INBOX];
#define ON(...) ON_FRAME(it.type, it.meta, it.bytes, __VA_ARGS__)
  ON(GRANT, grant, granted(p, m));
  ON(VIA, via, routed(p, m));
  ON(PUSH_ACK, push_ack, acknowledged(p, m));
  ON(RESEND, resend, resync(p, m->generation, m->top, m->applied));
  ON(RELEASE, release, released(sum_find(p, m->group), m->upto));
  ON(GROUP_END, group_end, ended(sum_find(p, m->group)));
  if (it.type == MLFAB__GROUP) sum_begin(at, &it);
}

/* --- links --- */

static void greet(uint32_t at) {
  clear(at);
  seam_hello(&s, at);
  const mlfab__hello_ack *ack = &s.peers[at].ack;
  clear(at);
  resync(&w.peers[at], ack->generation, ack->top, ack->applied);
}

static void cut_off(uint32_t at) {
  if (!linked(at)) return;
  clear(at);
  seam_lost(&s, at);
}

/* The link from member b to aggregator a breaks: a names b where it waits for it. */
static void hop_lost(uint32_t a, uint32_t b) {
  peer *p = &w.peers[a];
  p->met[b] = 0;
  for (int i = 0; i < SUMS && linked(a); i++) {
    sum *one = &p->sums[i];
    if (one->group.group && one->have < one->group.members && one->members[one->have].worker == b)
      sum_fail(a, one, &one->members[one->have], MLFAB_ERR_PEER_DEAD);
  }
}

/* --- the scheduler --- */

/* Chooses the next waiting update, mostly one of the same shape as the last. */
static uint32_t plan_next(uint64_t last) {
  for (uint32_t tries = 0; tries < 6; tries++) {
    uint32_t i = (uint32_t)draw(w.nwaiting);
    if (w.waiting[i].shape == last) return i;
  }
  return (uint32_t)draw(w.nwaiting);
}

/* Places updates, in one group if the entries have one. */
static void place(const mlfab__plan_entry *entries, uint32_t n) {
  mlfab__plan frame = {1, 1e9, 1e9, n};
  seam_say(&s, PEERS, MLFAB__PLAN, mlfab__encode_plan(s.meta, &frame, entries));
}

/* Random groups, or all together. It may drop an update, and name one that does not exist. */
static void plan(int together) {
  mlfab__plan_entry entries[PEERS * PENDING];
  uint32_t n = 0, run = 0, left = 0, aggregator = 0;
  uint64_t last = 0;
  memset(entries, 0, sizeof entries);
  while (w.nwaiting > 0 && n < PEERS * PENDING && (together || n == 0 || draw(8))) {
    uint32_t i = together ? 0 : plan_next(last);
    mlfab__announce a = w.waiting[i];
    memmove(&w.waiting[i], &w.waiting[i + 1], (w.nwaiting - i - 1) * sizeof a);
    w.nwaiting--;
    if (left == 0) {
      left = together ? UINT32_MAX : (uint32_t)(1 + draw(5));
      run++;
      aggregator = together ? 0 : (uint32_t)draw(PEERS);
    }
    left--;
    mlfab__plan_entry *e = &entries[n++];
    *e = (mlfab__plan_entry){
        .id = a.id, .worker = a.worker, .group = run, .aggregator = aggregator, .rate = 1e9};
    last = a.shape;
    if (!w.is.drops) continue;
    e->delay = 99;
    if (draw(12) == 0) e->fate = MLFAB__FATE_LOOKAHEAD;
    if (draw(20) > 0) continue;
    e->id += 1000;
    w.waiting[w.nwaiting++] = a; /* it still waits */
  }
  if (n > 0) place(entries, n);
}

static void scheduler_turn(void) {
  w.nwaiting = 0;
  if (scheduler_up())
    seam_lost(&s, PEERS);
  else
    seam_hello(&s, PEERS);
}

/* --- everything together --- */

static const mlfab__tensor_info fabric[] = {
    {0, MLFAB_F64, 600}, {1, MLFAB_F32, 1500}, {2, MLFAB_I64, 333}, {3, MLFAB_F32, 900}};
static const mlfab__tensor_info floats[] = {{0, MLFAB_F64, 600}, {1, MLFAB_F32, 2500}};
static const mlfab__tensor_info few[] = {{0, MLFAB_F32, COUNT}};
static const mlfab__tensor_info integers[] = {{0, MLFAB_I64, COUNT / 2}};

static void close_world(void) {
  if (!s.node) return;
  seam_close(&s);
  for (uint32_t i = 0; i < PEERS; i++) {
    clear(i);
    for (int k = 0; k < PENDING; k++) free_update(&w.peers[i].pushes[k].update);
  }
  mlfab__layout_free(&w.env, &w.layout);
  free(w.expected);
  free(w.model);
}

static void open_world(uint64_t seed, setting is) {
  uint32_t n = is.ntensors;
  close_world();
  memset(&w, 0, sizeof w);
  if (is.bound == 0) is.bound = MLFAB_UNBOUNDED;
  w.is = is;
  w.most = is.bound > 8 ? PENDING : 1; /* an update that waits long is late */
  mlfab__rng_seed(&w.prng, seed);
  seam_init(&s, PEERS);
  s.config.block_bytes = is.block;
  s.config.chunk_bytes = s.config.eager_bytes = is.chunk;
  s.config.heartbeat_ns = BEAT;
  s.config.scheduler = MLFAB_SCHEDULER_OWN;
  mlfab_schedule_init(&s.config.schedule);
  s.config.schedule.delay_bound = is.bound;
  s.config.on_update = is.on_update;
  for (uint32_t p = 0; p < PEERS; p++) s.peers[p].accumulators = is.accumulators;
  assert_int_equal(mlfab__env_init(&w.env, NULL), 0);
  assert_int_equal(mlfab__layout_build(&w.env, is.tensors, n, 16, 1, 0, 1 << 28, &w.layout, NULL),
                   0);
  seam_open(&s);
  mlfab__define define = seam_model(is.sync, 16);
  define.tensors = n;
  define.options.optimizer = is.rule;
  if (is.gamma > 0.0) define.options.gamma = is.gamma;
  seam_define_all(&s, 0, &define, is.tensors);
  assert_int_equal(seam_defined(&s, 0), 0);
  w.all = (shape){{{0, w.layout.bytes}}, 1, w.layout.bytes};
  w.expected = calloc(1, w.layout.bytes);
  w.model = calloc(1, w.layout.bytes);
  assert_true(w.expected && w.model && w.layout.bytes < TOTAL);
  s.hear = hear;
  for (uint32_t p = 0; p < PEERS; p++) {
    for (uint32_t b = 0; b < PEERS; b++) w.peers[p].met[b] = 1;
    greet(p); /* the link has the model's credit */
  }
}
/* A model of several tensors, whose updates may be packets; and one of a few elements, in small blocks. */
#define OPEN(seed, of, ...)                                \
  open_world(seed, (setting){.tensors = of,                \
                             .ntensors = MLFAB__COUNT(of), \
                             .block = 1024,                \
                             .chunk = 2048,                \
                             .accumulators = 8,            \
                             __VA_ARGS__})
#define OPEN_FEW(seed, of, ...)                 \
  open_world(seed, (setting){.tensors = of,     \
                             .ntensors = 1,     \
                             .block = 128,      \
                             .chunk = 192,      \
                             .accumulators = 2, \
                             __VA_ARGS__})

/* Worker 0 pulls the model, which no scheduler plans. */
static const uint8_t *read_model(void) {
  if (scheduler_up()) scheduler_turn();
  if (!linked(0)) greet(0);
  s.peers[0].room = SEAM_ALL;
  seam_ask(&s, 0, 1, 0, w.all.bytes, 0);
  while (w.ntokens > 0) seam_sent(&s, 0, w.tokens[--w.ntokens]);
  assert_true(w.read);
  scheduler_turn();
  return w.model;
}

/* A dozen shapes, so that pushes sometimes have equal ones; or all of the model, from a version of late. */
static void push_random(uint32_t at) {
  mlfab__rng shapes;
  shape of = w.all;
  mlfab__rng_seed(&shapes, 1 + draw(2));
  if (!w.is.drops) random_segments(&shapes, &w.layout, 0, &of);
  double scale = w.is.drops ? 1.0 : (double)draw(5) - 2.0;
  pending *q = push(at, &of, !w.is.drops && draw(4) > 0, 1, scale);
  if (!q) return;
  if ((q->packed || w.is.drops) && draw(40) == 0)
    q->bad = spoil(&w.prng, &w.layout, &of, &q->update);
  if (!w.is.drops) return;
  uint64_t behind = draw(3); /* as if it had just pulled */
  q->base = w.version > behind ? w.version - behind : 0;
}

/* A sum fails because of any of its members, or of the aggregator itself. */
static void fail_some(uint32_t at) {
  sum *one = some_sum(&w.peers[at]);
  if (!one || !linked(at)) return;
  uint64_t k = draw(one->group.members + 1);
  int own = k == one->group.members;
  sum_fail(at, one, own ? NULL : &one->members[k], own ? MLFAB_ERR_AGAIN : MLFAB_ERR_PEER_DEAD);
}

static void world_trouble(void) {
  uint32_t a = (uint32_t)draw(PEERS), b = (uint32_t)draw(PEERS);
  if (w.cut_off && draw(60) == 0) {
    cut_off(w.cut_off - 1);
    w.cut_off = 0;
  }
  uint64_t what = draw(6000);
  if (what / 2 == 0) cut_off(a);
  if (what / 2 == 1) hop_lost(a, b);
  if (what == 4) scheduler_turn();
  if (what == 5) seam_pass(&s, (1 + draw(6)) * BEAT);
  if (what / 2 == 3) fail_some(a);
}

static void world_step(int quiet) {
  uint32_t at = (uint32_t)draw(PEERS);
  s.now += draw(1000);
  uint64_t what = draw(8);
  int many = what == 1 || what == 2 || what == 4 || what == 5;
  if (what == 0 && !quiet && draw(2) == 0) push_random(at);
  if (what == 0) announce(at);
  for (uint64_t n = many ? 1 + draw(6) : 0; n > 0; n--) (what < 3 ? deliver : sum_step)(at);
  if (what == 3) send_some(at);
  if (what == 6 && scheduler_up() && draw(w.nwaiting > 3 ? 8 : 60) == 0) plan(0);
  if (what == 6 && !linked(at)) greet(at);
  if (what == 6 && draw(4) == 0) w.peers[at].met[draw(PEERS)] = 1;
  if (what == 7) seam_tick(&s);
  if (!quiet) world_trouble();
  assert_int_equal(s.drops, 0);
}

static int world_busy(void) {
  for (uint32_t i = 0; i < PEERS * PENDING; i++)
    if (w.peers[i / PENDING].pushes[i % PENDING].seq) return 1;
  return 0;
}

/* Steps of any kind, then all is decided. */
static void play(uint64_t seed, int steps) {
  for (int i = 0; i < steps; i++) world_step(0);
  if (!scheduler_up()) scheduler_turn();
  for (int i = 0; world_busy(); i++) {
    world_step(1);
    if (i % 2000 == 1999) seam_pass(&s, 6 * BEAT); /* updates lost with a link are revoked */
    if (i == 400000) fail_msg("seed %u: something waits for ever", (unsigned)seed);
  }
  if (!same_values(&w.layout, &w.all, read_model(), w.expected))
    fail_msg("seed %u: not what was applied", (unsigned)seed);
  assert_int_equal(seam_stats(&s).updates_applied, w.applied);
  assert_int_equal(s.drops, 0);
}

/* Every update is applied once or refused, whatever dies, falls silent or is rerouted at any point. Values are small
 * integers, so that the order of additions does not matter. Packed and dense updates are mixed. */
SCENE(test_fabric) {
  uint64_t groups = 0, applied = 0, lost = 0;
  seeds(30);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    OPEN(seed, fabric, .rule = MLFAB_OPTIMIZER_SGD);
    play(seed, 24000);
    groups += w.groups[1];
    applied += seam_stats(&s).groups_applied;
    lost += seam_stats(&s).groups_failed;
  }
  if (last_seed - first_seed >= 29) assert_true(groups > 300 && applied > 200 && lost > 100);
}

/* Nothing is left in the queue: nothing is ahead of a new update, no small update waits, and a worker may
 * announce as many as ever. */
static void nothing_queued(void) {
  const shape small = {{{0, 32}}, 1, 32};
  for (uint32_t i = 0; i < PEERS; i++) {
    float zeros[COUNT] = {0};
    pending *q = offer(i, &small, 1.0);
    greet(i); /* which renews the credit */
    q->base = w.version;
    say_push(i, q, zeros);
    assert_int_equal(s.peers[i].ack.top + 1, q->seq);
    seam_hello(&s, i);
    assert_int_equal(s.peers[i].ack.top, q->seq);
    q->seq = 0;
    greet(i);
  }
  for (uint32_t i = 0; i < PEERS; i++) {
    pending *q = offer(i, &w.all, 1.0);
    q->base = w.version;
    q->update.bytes = w.all.bytes;
    w.nwaiting = 0;
    announce(i);
    assert_int_equal(w.nwaiting, 1);
    assert_true(w.waiting[0].worker == i && w.waiting[0].lag == 0);
    SAY(&s, i, WITHDRAW, withdraw, q->seq, 1, w.peers[i].generation);
    q->seq = 0;
  }
  assert_int_equal(s.drops, 0);
}

/* The same under bounds of delays, with plans that drop some updates. */
SCENE(test_random_plans) {
  static const uint64_t bounds[] = {MLFAB_UNBOUNDED, 3, 1, 8, 40};
  uint64_t groups = 0;
  seeds(30);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    uint64_t bound = bounds[seed % 5];
    OPEN_FEW(seed, few, .rule = seed % 3 ? MLFAB_OPTIMIZER_SGD : MLFAB_OPTIMIZER_MOMENTUM,
             .gamma = 1e-300 /* 0 would mean 0.9 */, .bound = bound, .drops = 1);
    play(seed, 20000);
    assert_true(seam_stats(&s).delay_max < bound);
    assert_true(w.applied > 20 && (bound > 3 || w.dropped > 0));
    groups += seam_stats(&s).groups_applied;
    nothing_queued();
  }
  assert_true(groups > 3 * (last_seed - first_seed + 1));
}

/* Delivers everything that can be delivered, in turn. */
static void settle(void) {
  for (int i = 0; i < 20000 && world_busy(); i++) {
    for (uint32_t k = 0; k < PEERS; k++) {
      announce(k);
      deliver(k);
      send_some(k);
      sum_step(k);
    }
    seam_pass(&s, 1000000);
    if (w.nwaiting == PEERS) plan(1);
  }
  assert_int_equal(s.drops, 0);
}

/* A packed group changes the model as a dense group of the same values does, with random scales, at rules with steps and in
 * rounds. */
SCENE(test_as_dense) {
  static const uint32_t rules[][2] = {{MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC},
                                      {MLFAB_OPTIMIZER_MOMENTUM, MLFAB_SYNC_ASYNC},
                                      {MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_BSP},
                                      {MLFAB_OPTIMIZER_ADAM, MLFAB_SYNC_BSP}};
  static uint8_t dense[TOTAL];
  seeds(40);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    for (uint32_t packed = 0; packed < 2; packed++) {
      mlfab__rng values; /* the same for both */
      mlfab__rng_seed(&values, seed);
      OPEN(seed, floats, .rule = rules[seed % 4][0], .sync = rules[seed % 4][1]);
      w.calm = 1;
      for (int round = 0; round < 3; round++) {
        shape of;
        mlfab__rng own = w.prng;
        w.prng = values;
        random_segments(&w.prng, &w.layout, 0, &of);
        for (uint32_t k = 0; k < PEERS; k++)
          push(k, &of, (int)packed, 0, mlfab__rng_unit(&w.prng) - 0.3);
        values = w.prng;
        w.prng = own;
        settle();
        assert_false(world_busy());
      }
      const mlfab_stats stats = seam_stats(&s);
      assert_int_equal(stats.groups_applied, 3);
      assert_int_equal(w.groups[packed], 3);
      assert_int_equal(stats.groups_failed, 0);
      (void)read_model();
      if (!packed) memcpy(dense, w.model, w.layout.bytes);
      if (packed && !same_values(&w.layout, &w.all, dense, w.model))
        fail_msg("seed %u: packed is not as dense", (unsigned)seed);
    }
  }
}

/* --- single cases --- */

/* The last RELEASE that aggregator 0 has not read. */
static mlfab__release last_release(void) {
  mlfab__release release = {0, 0};
  const peer *p = &w.peers[0];
  for (uint32_t i = p->begin; i < p->end; i++)
    if (p->inbox[i].type == MLFAB__RELEASE)
      assert_int_equal(mlfab__decode_release(p->inbox[i].meta, p->inbox[i].bytes, &release), 0);
  return release;
}

/* Two groups of two packed updates at aggregator 0. */
static void two_groups(void) {
  OPEN(3, floats, .rule = MLFAB_OPTIMIZER_SGD);
  for (int i = 0; i < 2; i++) {
    for (uint32_t k = 1; k < 3; k++) {
      assert_non_null(push(k, &w.all, 1, 0, 1.0));
      announce(k);
    }
    plan(1);
  }
}

static uint64_t lengths(void) {
  uint64_t bytes = 0;
  for (uint32_t k = 1; k < 3; k++)
    for (int i = 0; i < 2; i++) bytes += w.peers[k].pushes[i].update.bytes;
  return bytes;
}

/* How much an aggregator may send: all of the head, a stage's worth of the next sum. FORWARD frames that do not fit break its
 * link; then the groups end, and the members' own lengths count again. */
SCENE(test_bad_sums) {
  for (int i = 0; i < 8; i++) {
    two_groups();
    const update *u = &w.peers[1].pushes[0].update;
    mlfab__release head = last_release();
    uint32_t n = piece_of(u->data, 0, u->bytes, 1), first = packet_bytes(u, 0);
    uint64_t raw = w.all.bytes, number = head.group;
    assert_true(head.upto == UINT64_MAX && n > 0);
    seam_pass(&s, 200000000);
    const mlfab__release next = last_release();
    assert_true(next.group > number && next.upto > 0 && next.upto < UINT64_MAX);
    const struct {
      uint64_t offset, total;
      uint32_t bytes;
    } said[] = {{0, 0, first},                  /* its length is not known */
                {0, 8 * raw + 8, first},        /* longer than its elements need */
                {8, u->bytes, first},           /* out of place */
                {0, first - 8, first},          /* longer than it says itself */
                {0, u->bytes - 8, 0},           /* its length changes */
                {0, 0, 0},                      /* likewise */
                {0, u->bytes, first}};          /* a good one, and then the members' own lengths */
    SAY(&s, 0, FORWARD, forward, number, 0, 0); /* a report of progress */
    if (i >= 4) SAY(&s, 0, FORWARD, forward, number, 0, u->bytes);
    assert_int_equal(s.drops, 0);
    if (i < 7)
      SAY_BULK(&s, 0, FORWARD, forward, said[i].bytes ? u->data : NULL, said[i].bytes, number,
               said[i].offset, said[i].total);
    assert_int_equal(s.drops, i < 6);
    if (i >= 6) seam_lost(&s, 0);
    s.drops = 0;
    assert_int_equal(seam_stats(&s).groups_failed, 2);
    scheduler_turn();
    scheduler_turn(); /* the server tells it of all that waits */
    assert_int_equal(w.report.backlog, lengths());
  }
}

static mlfab__plan_entry entry(uint64_t id, uint32_t worker, uint32_t group, uint32_t aggregator) {
  return OF(mlfab__plan_entry, .id = id, .worker = worker, .group = group,
            .aggregator = group ? aggregator : MLFAB__NO_NODE);
}
static void place_one(uint64_t id, uint32_t worker) {
  mlfab__plan_entry e = entry(id, worker, 0, 0);
  place(&e, 1);
}

static void change(uint32_t kind) { SAY(&s, 4, SYNC, sync_ask, 1, {.kind = kind}); }

/* Is there a frame of this type on its way to worker `i`? Returns the last, or NULL. */
static const message *message_of(uint32_t i, uint8_t type) {
  const peer *p = &w.peers[i];
  for (uint32_t k = p->end; k-- > p->begin;)
    if (p->inbox[k % INBOX].type == type) return &p->inbox[k % INBOX];
  return NULL;
}

static void start(uint64_t bound) { OPEN_FEW(1, few, .rule = MLFAB_OPTIMIZER_SGD, .bound = bound); }

static void turns(uint32_t n) {
  while (n-- > 0) {
    for (uint32_t i = 0; i < PEERS; i++) {
      deliver(i);
      send_some(i);
      sum_step(i);
    }
    seam_tick(&s);
    assert_int_equal(s.drops, 0);
  }
}

static const float *weights(void) { return (const float *)(const void *)read_model(); }

/* Rounds are turned on while worker 1's second update is in a group with worker 0's first. Worker 0's update
 * belongs to the open round. Both updates of worker 1 have to wait, and the group does not take the second
 * before the first. */
SCENE(test_rounds_begin_under_a_group) {
  mlfab__plan_entry both[2] = {entry(1, 0, 1, 3), entry(2, 1, 1, 3)};
  start(0);
  push_as(2, 0, 1.0);
  place_one(1, 2);
  assert_non_null(message_of(2, MLFAB__GRANT)); /* none of its bytes arrives yet */
  push_as(1, 5, 1.0);
  place_one(1, 1);
  push_as(1, 6, 1.0);
  push_as(0, 0, 1.0);
  place(both, 2);
  change(MLFAB_SYNC_BSP);
  turns(50);
  assert_true(w.peers[2].applied == 1 && w.peers[0].applied == 1);
  assert_true(w.peers[1].pushes[0].seq == 1 && w.peers[1].pushes[1].seq == 2);
  for (uint32_t i = 0; i < PEERS; i++)
    if (i != 1) seam_bye(&s, i);
  turns(50);
  assert_int_equal(w.peers[1].applied, 2);
  const float *model = weights();
  assert_true(model[0] >= 1.0f && model[1] >= 2.0f && model[2] >= 1.0f);
}

/* A small update of two stretches travels in two frames. The plan drops it, because it is behind a placed
 * update of the same worker, while its second frame is on the way. */
SCENE(test_drop_with_bytes_on_their_way) {
  float data[COUNT] = {0};
  pending small = {.seq = 2, .scale = 1.0, .shape = {{{0, 32}, {64, 32}}, 2, 64}};
  start(1);
  greet(1); /* now the worker has credit */
  push_as(1, 0, 1.0);
  place_one(1, 1);
  assert_non_null(message_of(1, MLFAB__GRANT));
  say_push(1, &small, data);
  SAY_BULK(&s, 1, CHUNK, chunk, data, 32, 2, 32, w.peers[1].generation);
  turns(50);
  assert_int_equal(w.peers[1].applied, 1);
  assert_int_equal(seam_stats(&s).updates_dropped, 1);
}

/* An update callback for a group: w + scale * sum, with the arguments that it receives. */
static int add_as_told(void *user, const mlfab_update_info *info, uint32_t tensor, int dtype,
                       uint64_t first, uint64_t count, void *words, const void *u) {
  (void)user, (void)tensor, (void)dtype, (void)first;
  for (uint64_t i = 0; i < count; i++)
    ((float *)words)[i] += (float)(info->scale * (double)((const float *)u)[i]);
  return 0;
}

/* Two workers' updates with different scales under a callback, as a group or (aggregator PEERS) one by one. */
static void callback_case(uint32_t aggregator, uint32_t sync, uint32_t then, float *model) {
  int grouped = aggregator < PEERS, rounds = sync == MLFAB_SYNC_BSP || then == MLFAB_SYNC_BSP;
  mlfab__plan_entry entries[2];
  OPEN_FEW(1, few, .rule = MLFAB_OPTIMIZER_SGD, .sync = sync, .on_update = add_as_told);
  for (uint32_t i = 0; i < PEERS && rounds; i++)
    if (i < 1 || i > 2) SAY(&s, i, DONE, done, 0);
  push_as(3, 0, 1.0);
  place_one(1, 3); /* chunks that arrive wait until the update is complete */
  for (uint32_t i = 1; i <= 2; i++) {
    push_as(i, 0, i == 1 ? -0.5 : -2.0);
    entries[i - 1] = entry(1, i, (uint32_t)grouped, aggregator);
  }
  place(entries, 2);
  if (then != sync) change(then);
  turns(200);
  assert_int_equal(w.peers[1].applied + w.peers[2].applied, 2);
  assert_int_equal(seam_stats(&s).groups_applied, grouped);
  memcpy(model, weights(), w.all.bytes);
  close_world();
}

/* The models are equal. The callback receives the scale with one consistency model, and not with the other:
 * in the last two cases the model changes under the group. */
SCENE(test_callback_of_group) {
  static const struct {
    uint32_t aggregator, sync, then;
  } cases[] = {{0, MLFAB_SYNC_ASYNC, MLFAB_SYNC_ASYNC},
               {PEERS, MLFAB_SYNC_BSP, MLFAB_SYNC_BSP},
               {0, MLFAB_SYNC_BSP, MLFAB_SYNC_BSP},
               {0, MLFAB_SYNC_ASYNC, MLFAB_SYNC_BSP},
               {0, MLFAB_SYNC_BSP, MLFAB_SYNC_ASYNC}};
  float alone[COUNT], model[COUNT];
  callback_case(PEERS, MLFAB_SYNC_ASYNC, MLFAB_SYNC_ASYNC, alone);
  for (size_t i = 0; i < MLFAB__COUNT(cases); i++) {
    callback_case(cases[i].aggregator, cases[i].sync, cases[i].then, model);
    assert_memory_equal(alone, model, sizeof alone);
  }
  assert_float_equal(alone[1], -0.5f, 0.0f);
  assert_float_equal(alone[2], -2.0f, 0.0f);
}

/* Integers are multiplied with integers only; scales relative to the first member may be fractions. */
SCENE(test_weights_of_integers) {
  static const double seconds[] = {3.0, 4.0};
  mlfab__plan_entry entries[2] = {entry(1, 1, 1, 0), entry(1, 2, 1, 0)};
  for (uint32_t k = 0; k < 2; k++) {
    OPEN_FEW(1, integers, .rule = MLFAB_OPTIMIZER_SGD, .on_update = add_as_told);
    push_as(1, 0, 2.0);
    push_as(2, 0, seconds[k]);
    place(entries, 2);
    for (int i = 0; i < 16; i++) deliver(0);
    assert_int_equal(w.groups[0], k);
  }
}

/* A bound that is set when updates have their places holds at their turn. In a group, each member counts those before it. */
SCENE(test_bound_set_late) {
  for (uint32_t grouped = 0; grouped < 2; grouped++) {
    mlfab__plan_entry entries[2] = {entry(1, 1, grouped, 0), entry(1, 2, grouped, 0)};
    start(0);
    push_as(3, 0, 1.0);
    place_one(1, 3); /* the others wait for it */
    for (uint32_t i = 1; i <= 2; i++) push_as(i, 0, 1.0);
    place(entries, 2);
    SAY(&s, 0, SCHEDULE, schedule, .delay_bound = 1 + grouped);
    w.lowered = 1;
    turns(200);
    assert_int_equal(w.peers[1].applied, grouped);
    assert_int_equal(w.peers[1].dropped, 1 - grouped);
    assert_true(w.peers[2].applied == 0 && w.peers[2].dropped == 1);
  }
}

/* An unreachable aggregator: after two members that the server waited for in vain, the rest go directly. */
SCENE(test_silent_members) {
  mlfab__plan_entry entries[PEERS];
  start(0);
  for (uint32_t i = 0; i < PEERS; i++) {
    push_as(i, 0, 1.0);
    entries[i] = entry(1, i, 1, 0);
  }
  place(entries, PEERS);
  for (uint32_t fails = 0; fails <= 2; fails++) {
    uint32_t members = 0;
    s.now += 3 * BEAT;
    for (int i = 0; i < 100; i++) deliver(0);
    for (int i = 0; i < SUMS; i++) {
      sum *one = &w.peers[0].sums[i];
      if (one->group.group == 0) continue;
      members = one->group.members;
      sum_fail(0, one, &one->members[members - 1], MLFAB_ERR_PEER_DEAD);
    }
    assert_int_equal(members, fails < 2 ? PEERS - fails : 0);
  }
  seam_beat(&s);
  turns(300);
  for (uint32_t i = 0; i < PEERS; i++) assert_int_equal(w.peers[i].applied, 1);
}

/* An update that the plan drops is told so at once, with the delay that it would have had, and is never
 * granted. If the plan also names a worker that does not exist, it is refused as a whole. */
SCENE(test_dropped_by_plan) {
  for (int strange = 0; strange < 2; strange++) {
    mlfab__plan_entry entries[2] = {entry(1, 0, 0, 0), entry(1, PEERS, 0, 0)};
    mlfab__push_ack ack;
    start(0);
    push_as(0, 0, 1.0);
    assert_null(message_of(0, MLFAB__GRANT));
    entries[0].fate = MLFAB__FATE_LOOKAHEAD;
    entries[0].delay = 99;
    place(entries, 1 + (uint32_t)strange);
    assert_int_equal(s.drops, strange);
    assert_int_equal(seam_stats(&s).updates_dropped, !strange);
    assert_true((message_of(0, MLFAB__GRANT) != NULL) == strange);
    if (!strange) {
      const message *m = message_of(0, MLFAB__PUSH_ACK);
      assert_int_equal(mlfab__decode_push_ack(m->meta, m->bytes, &ack), 0);
      assert_true(ack.code == MLFAB_ERR_DROPPED && ack.delay == 99);
    }
  }
}

/* A scheduler that has an announced update and plans nothing counts as lost after eight heartbeats. A
 * scheduler that reports that it waits, or that has nothing to plan, does not. Time in which this server was
 * stopped does not count. */
SCENE(test_scheduler_that_plans_nothing) {
  start(0);
  for (int beats = 0; beats < 40; beats++) seam_pass(&s, BEAT);
  push_as(0, 0, 1.0);
  for (int beats = 0; beats < 40; beats++) {
    seam_pass(&s, BEAT);
    if (beats % 6 == 5) place(NULL, 0);
  }
  place(NULL, 0);
  seam_pass(&s, 100 * BEAT);
  for (int quarters = 0; quarters < 28; quarters++) {
    assert_true(s.drops == 0 && !message_of(0, MLFAB__GRANT));
    seam_pass(&s, BEAT / 4);
  }
  assert_true(s.drops == 1 && s.dropped == PEERS && message_of(0, MLFAB__GRANT));
}
