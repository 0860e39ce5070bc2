/* test_packed_groups.c - a server's node takes the sums of groups of packets. The test plays the workers, some of which add up
 * what others push, and the scheduler that makes the groups. Its frames are delivered later, in a random order.
 *
 * Oracles: a dense group of the same values at another server; the sum of the updates that were said to be applied.
 * MLFAB_SEED=n runs one random case alone, MLFAB_SCALE=100 a hundred times as many. */
#include "core/base/env.h"
#include "tests/seam/serving.h"
#include "tests/seam/updates.h"
#include "tests/unit/scale.h"

enum { PEERS = 5, PENDING = 3, INBOX = 1024, SUMS = 8, CHUNK = 2048, TOTAL = 1 << 16 };
#define BEAT 500000000ull

/* A frame of the server on its way. */
typedef struct message {
  uint8_t type;
  uint32_t bytes;
  uint8_t meta[1024];
} message;

/* A push that is not decided. */
typedef struct pending {
  uint64_t seq, group, sent, granted;
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
  uint64_t seq;
  pending pushes[PENDING];
  sum sums[SUMS];
  message inbox[INBOX];
  uint32_t begin, end;
} peer;

typedef struct world {
  seam s;
  mlfab__env env; /* of the layout */
  mlfab__layout layout;
  mlfab__rng prng;
  peer peers[PEERS];
  mlfab__announce waiting[PEERS * PENDING];
  uint32_t nwaiting;
  mlfab__report report; /* the last one */
  int calm;
  uint32_t cut_off; /* a worker whose link breaks after a few more steps, plus one */
  shape all;        /* the whole model */
  uint8_t *expected, *model;
  uint64_t tokens[64]; /* of frames of the model, to be given back */
  uint32_t ntokens;
  int read; /* the model is complete */
  uint64_t applied, refused, groups[2];
} world;

static uint64_t first_seed, last_seed;

static void seeds(double n) {
  first_seed = test_number("MLFAB_SEED", 1);
  last_seed = test_seed() ? first_seed : test_cases(n);
}

static uint64_t draw(world *w, uint64_t n) { return mlfab__rng_below(&w->prng, n); }
static int linked(const world *w, uint32_t p) { return w->s.peers[p].link != 0; }
static int scheduler_up(const world *w) { return linked(w, PEERS); }

/* --- pushes --- */

static pending *push_find(peer *p, uint64_t seq) {
  for (int i = 0; i < PENDING; i++) {
    if (p->pushes[i].seq == seq && seq) return &p->pushes[i];
  }
  return NULL;
}

/* The update was applied: adds it to the expected model. */
static void push_applied(world *w, const pending *q) {
  uint64_t from = 0;
  assert_false(q->bad);
  w->applied++;
  for (uint32_t k = 0; k < q->shape.n; k++) {
    shape one = {{q->shape.segments[k]}, 1, q->shape.segments[k].bytes};
    literal_add(&w->layout, &one, w->expected + one.segments[0].offset, q->update.dense + from,
                q->scale, 0);
    from += one.bytes;
  }
}

static void push_over(pending *q) {
  free_update(&q->update);
  q->seq = 0;
}

/* The server forgets what it has not decided; the worker learns what it has. */
static void resync(world *w, peer *p, uint32_t generation, uint64_t top,
                   const uint64_t applied[4]) {
  p->generation = generation;
  for (int i = 0; i < PENDING; i++) {
    pending *q = &p->pushes[i];
    if (q->seq == 0) continue;
    q->announced = 0;
    q->sent = q->granted = 0;
    q->aggregator = MLFAB__NO_NODE;
    if (q->seq > top) continue;
    uint64_t back = top - q->seq;
    if (back < 256 && (applied[back / 64] >> (back % 64) & 1)) push_applied(w, q);
    push_over(q);
  }
}

static void announce(world *w, uint32_t at) {
  peer *p = &w->peers[at];
  pending *q = NULL;
  uint64_t version = UINT64_MAX; /* no delay, whatever is still in flight */
  for (int i = 0; i < PENDING; i++) {
    pending *other = &p->pushes[i];
    if (other->seq && !other->announced && (!q || other->seq < q->seq)) q = other;
  }
  if (!q || !linked(w, at)) return;
  mlfab__push push = {.seq = q->seq,
                      .members = 1,
                      .versions = 1,
                      .parts = 1,
                      .segments = q->shape.n,
                      .generation = p->generation,
                      .progress = q->seq - 1,
                      .flags = MLFAB__PUSH_PLANNED | (q->packed ? MLFAB__PUSH_PACKED : 0u),
                      .bytes = q->update.bytes,
                      .scale = q->scale};
  q->announced = 1;
  seam_say(&w->s, at, MLFAB__PUSH,
           mlfab__encode_push(w->s.meta, &push, q->shape.segments, &version));
}

static pending *push(world *w, uint32_t at, const shape *s, int packed, int whole, double scale) {
  peer *p = &w->peers[at];
  pending *q = p->pushes;
  while (q < p->pushes + PENDING && q->seq) q++;
  if (q == p->pushes + PENDING) return NULL;
  memset(q, 0, sizeof *q);
  q->seq = ++p->seq;
  q->aggregator = MLFAB__NO_NODE;
  q->shape = *s;
  q->packed = packed;
  q->scale = scale;
  random_update(&w->prng, &w->layout, s, 1, whole, draw(w, 2) ? 99 : 20, &q->update);
  if (!packed) { /* the same values, dense */
    q->update.data = q->update.dense;
    q->update.bytes = s->bytes;
  }
  return q;
}

/* How many of these bytes, up to `upto`, fit into one frame: whole packets, or any. */
static uint32_t piece_of(const uint8_t *data, uint64_t at, uint64_t upto, int packed) {
  uint32_t n = 0;
  if (!packed) return upto > at ? (uint32_t)mlfab__min(upto - at, CHUNK) : 0;
  while (at + n < upto) {
    mlfab__packet packet;
    uint32_t bytes = mlfab__packet_open(data + at + n, TOTAL * 8, &packet);
    assert_true(bytes > 0);
    if ((n > 0 && n + bytes > CHUNK) || bytes > upto - at - n) break;
    n += bytes;
  }
  return n;
}

/* A worker sends the next bytes of an update that goes directly. */
static void send_some(world *w, uint32_t at) {
  peer *p = &w->peers[at];
  for (int i = 0; i < PENDING && linked(w, at); i++) {
    pending *q = &p->pushes[i];
    if (!q->seq || !q->announced || q->aggregator != MLFAB__NO_NODE) continue;
    uint64_t upto = mlfab__min(q->granted, q->update.bytes);
    uint32_t n = piece_of(q->update.data, q->sent, upto, q->packed);
    if (n == 0) continue;
    mlfab__chunk chunk = {q->seq, q->sent, p->generation};
    const uint8_t *from = q->update.data + q->sent;
    q->sent += n;
    seam_bulk(&w->s, at, MLFAB__CHUNK, mlfab__encode_chunk(w->s.meta, &chunk), from, n);
    return;
  }
}

/* --- sums --- */

static void free_sum(sum *s) {
  free(s->values);
  free(s->stream);
  memset(s, 0, sizeof *s);
}

static sum *sum_find(peer *p, uint64_t number) {
  for (int i = 0; i < SUMS; i++)
    if (p->sums[i].group.group == number) return &p->sums[i];
  return NULL;
}

static void sum_begin(world *w, uint32_t at, const message *m) {
  sum *s = sum_find(&w->peers[at], 0);
  if (!s) { /* it has no room */
    mlfab__group_end head;
    assert_int_equal(mlfab__decode_group_end(m->meta, 8, &head), 0);
    SAY(&w->s, at, GROUP_FAIL, group_fail, {head.group, 0, MLFAB__NO_NODE, MLFAB_ERR_AGAIN});
    return;
  }
  assert_int_equal(mlfab__decode_group(m->meta, m->bytes, &s->group, s->members, s->shape.segments),
                   0);
  s->shape.n = s->group.segments;
  s->shape.bytes = s->group.bytes;
  for (uint32_t k = 0; k < s->group.members; k++) {
    const pending *q = push_find(&w->peers[s->members[k].worker], s->members[k].seq);
    if (q) assert_int_equal(q->packed, s->group.packed);
  }
  w->groups[s->group.packed]++;
  s->values = calloc(1, s->shape.bytes);
  assert_non_null(s->values);
}

static void sum_fail(world *w, uint32_t at, sum *s, int code) {
  const mlfab__group_member *member = &s->members[s->have];
  mlfab__group_fail fail = {s->group.group, member->seq, member->worker, code};
  free_sum(s);
  seam_say(&w->s, at, MLFAB__GROUP_FAIL, mlfab__encode_group_fail(w->s.meta, &fail));
}

/* Encodes a sum that is complete. */
static void sum_end(world *w, sum *s) {
  static uint64_t keep[MLFAB__PACKET_ELEMENTS / 64];
  static const uint8_t zero[8];
  s->stream = malloc(8 * TOTAL + s->shape.bytes);
  assert_non_null(s->stream);
  if (!s->group.packed) memcpy(s->stream, s->values, s->total = s->shape.bytes);
  for (uint64_t at = 0; s->group.packed && at < s->shape.bytes;) {
    mlfab__packet_shape piece = {0};
    const uint8_t *from = s->values + at;
    uint8_t *to = s->stream + s->total;
    piece.dtype = piece_at(&w->layout, &s->shape, at, &piece.offset, &piece.elements);
    uint32_t width = mlfab__dtype_bytes(piece.dtype);
    memset(keep, 0, sizeof keep);
    for (uint32_t i = 0; i < piece.elements; i++)
      if (memcmp(from + i * width, zero, width) != 0) keep[i / 64] |= 1ull << i % 64;
    at += (uint64_t)piece.elements * width;
    uint32_t n = draw(w, 2) ? mlfab__packet_dense(to, &piece, from)
                            : mlfab__packet_marked(to, &piece, from, keep, 1);
    if (n == 0 && s->total == 0 && at == s->shape.bytes) n = mlfab__packet_dense(to, &piece, from);
    s->total += n;
  }
}

/* An aggregator adds the next member's update, if this member was told to send it there; or forwards a frame of the sum; or
 * says that it is at work. */
static void sum_step(world *w, uint32_t at) {
  peer *p = &w->peers[at];
  sum *s = &p->sums[draw(w, SUMS)];
  if (s->group.group == 0 || !linked(w, at)) return;
  if (s->have < s->group.members) {
    const mlfab__group_member *member = &s->members[s->have];
    const pending *q = push_find(&w->peers[member->worker], member->seq);
    int sends = q && q->group == s->group.group && q->aggregator == at && p->met[member->worker];
    if (!sends && draw(w, 20) == 0)
      SAY(&w->s, at, FORWARD, forward, {s->group.group, 0, s->group.packed ? 0 : s->shape.bytes});
    if (!sends) return;
    if (q->bad) {
      sum_fail(w, at, s, MLFAB_ERR_NOT_FINITE);
      return;
    }
    literal_add(&w->layout, &s->shape, s->values, q->update.dense, member->weight, s->have == 0);
    if (++s->have == s->group.members) sum_end(w, s);
    return;
  }
  uint64_t upto = mlfab__min(s->released, s->total);
  uint32_t n = piece_of(s->stream, s->sent, upto, (int)s->group.packed);
  if (n == 0) return;
  mlfab__forward forward = {s->group.group, s->sent, s->total};
  const uint8_t *from = s->stream + s->sent;
  s->sent += n;
  /* Most faults occur earlier; this one occurs when part of a sum is at the server. */
  if (!w->calm && draw(w, 40) == 0) w->cut_off = at + 1;
  seam_bulk(&w->s, at, MLFAB__FORWARD, mlfab__encode_forward(w->s.meta, &forward), from, n);
}

/* --- what the server says --- */

static void clear(world *w, uint32_t at) {
  w->peers[at].begin = w->peers[at].end = 0;
  for (int i = 0; i < SUMS; i++) free_sum(&w->peers[at].sums[i]);
}

static void hear(seam *s, const seam_heard *heard) {
  world *w = (world *)s;
  mlfab__announce a;
  mlfab__model m;
  if (heard->type == MLFAB__ANNOUNCE) {
    assert_int_equal(mlfab__decode_announce(heard->meta, heard->meta_bytes, &a), 0);
    for (uint32_t i = 0; i < w->nwaiting; i++) {
      if (w->waiting[i].worker == a.worker && w->waiting[i].id == a.id)
        w->waiting[i] = w->waiting[--w->nwaiting];
    }
    assert_true(w->nwaiting < PEERS * PENDING);
    w->waiting[w->nwaiting++] = a;
  } else if (heard->type == MLFAB__REPORT) {
    assert_int_equal(mlfab__decode_report(heard->meta, heard->meta_bytes, &w->report), 0);
  } else if (heard->type == MLFAB__MODEL) {
    assert_int_equal(mlfab__decode_model(heard->meta, heard->meta_bytes, &m), 0);
    if (heard->bulk) memcpy(w->model + m.offset, heard->bulk, heard->bulk_bytes);
    assert_true(w->ntokens < 64);
    if (heard->token) w->tokens[w->ntokens++] = heard->token;
    w->read = (m.flags & MLFAB__MODEL_LAST) != 0;
  } else if (heard->peer < PEERS && heard->type != MLFAB__HEARTBEAT) {
    peer *p = &w->peers[heard->peer];
    message *to = &p->inbox[p->end++ % INBOX];
    assert_true(p->end - p->begin <= INBOX && heard->meta_bytes <= sizeof to->meta);
    to->type = heard->type;
    to->bytes = heard->meta_bytes;
    memcpy(to->meta, heard->meta, heard->meta_bytes);
  }
}

/* The next frame of the server reaches the worker. */
static void deliver(world *w, uint32_t at) {
  peer *p = &w->peers[at];
  mlfab__grant grant;
  mlfab__via via;
  mlfab__push_ack ack;
  mlfab__resend resend;
  mlfab__release release;
  mlfab__group_end end;
  pending *q;
  sum *s;
  if (p->begin == p->end) return;
  const message m = p->inbox[p->begin++ % INBOX];
  switch (m.type) {
    case MLFAB__GRANT:
      assert_int_equal(mlfab__decode_grant(m.meta, m.bytes, &grant), 0);
      q = push_find(p, grant.seq);
      if (q && grant.generation == p->generation && q->aggregator == MLFAB__NO_NODE)
        q->granted = grant.upto;
      break;
    case MLFAB__VIA:
      assert_int_equal(mlfab__decode_via(m.meta, m.bytes, &via), 0);
      q = push_find(p, via.seq);
      if (!q || via.generation != p->generation || via.group <= q->group) break;
      q->group = via.group;
      q->aggregator = via.aggregator;
      q->sent = q->granted = 0;
      break;
    case MLFAB__PUSH_ACK:
      assert_int_equal(mlfab__decode_push_ack(m.meta, m.bytes, &ack), 0);
      q = push_find(p, ack.seq);
      if (!q) break;
      if (ack.code == 0) {
        push_applied(w, q);
      } else {
        assert_true(ack.code == MLFAB_ERR_NOT_FINITE ? q->bad : ack.code == MLFAB_ERR_WITHDRAWN);
        w->refused++;
      }
      push_over(q);
      break;
    case MLFAB__RESEND:
      assert_int_equal(mlfab__decode_resend(m.meta, m.bytes, &resend), 0);
      resync(w, p, resend.generation, resend.top, resend.applied);
      break;
    case MLFAB__GROUP:
      sum_begin(w, at, &m);
      break;
    case MLFAB__RELEASE:
      assert_int_equal(mlfab__decode_release(m.meta, m.bytes, &release), 0);
      if ((s = sum_find(p, release.group)) != NULL)
        s->released = mlfab__max(s->released, release.upto);
      break;
    case MLFAB__GROUP_END:
      assert_int_equal(mlfab__decode_group_end(m.meta, m.bytes, &end), 0);
      if ((s = sum_find(p, end.group)) != NULL) free_sum(s);
      break;
    default:
      break;
  }
}

/* --- links --- */

static void greet(world *w, uint32_t at) {
  clear(w, at);
  seam_hello(&w->s, at);
  const mlfab__hello_ack *ack = &w->s.peers[at].ack;
  clear(w, at);
  resync(w, &w->peers[at], ack->generation, ack->top, ack->applied);
}

static void cut_off(world *w, uint32_t at) {
  if (!linked(w, at)) return;
  clear(w, at);
  seam_lost(&w->s, at);
}

/* The link from member b to aggregator a breaks: a names b where it waits for it. */
static void hop_lost(world *w, uint32_t a, uint32_t b) {
  peer *p = &w->peers[a];
  p->met[b] = 0;
  for (int i = 0; i < SUMS && linked(w, a); i++) {
    sum *s = &p->sums[i];
    if (s->group.group && s->have < s->group.members && s->members[s->have].worker == b)
      sum_fail(w, a, s, MLFAB_ERR_PEER_DEAD);
  }
}

/* --- the scheduler --- */

/* Chooses the next waiting update, mostly one of the same shape as the last. */
static uint32_t plan_next(world *w, uint64_t last) {
  for (uint32_t tries = 0; tries < 6; tries++) {
    uint32_t i = (uint32_t)draw(w, w->nwaiting);
    if (w->waiting[i].shape == last) return i;
  }
  return (uint32_t)draw(w, w->nwaiting);
}

static void plan(world *w, int together) {
  mlfab__plan_entry entries[PEERS * PENDING];
  uint32_t n = 0, run = 0, left = 0, aggregator = 0;
  uint64_t last = 0;
  memset(entries, 0, sizeof entries);
  while (w->nwaiting > 0 && (together || n == 0 || draw(w, 8))) {
    uint32_t i = together ? 0 : plan_next(w, last);
    mlfab__announce a = w->waiting[i];
    memmove(&w->waiting[i], &w->waiting[i + 1], (w->nwaiting - i - 1) * sizeof a);
    w->nwaiting--;
    if (left == 0) {
      left = together ? UINT32_MAX : (uint32_t)(1 + draw(w, 5));
      run++;
      aggregator = together ? 0 : (uint32_t)draw(w, PEERS);
    }
    left--;
    entries[n++] = (mlfab__plan_entry){
        .id = a.id, .worker = a.worker, .group = run, .aggregator = aggregator, .rate = 1e9};
    last = a.shape;
  }
  mlfab__plan frame = {1, 1e9, 1e9, n};
  if (n > 0) seam_say(&w->s, PEERS, MLFAB__PLAN, mlfab__encode_plan(w->s.meta, &frame, entries));
}

static void scheduler_turn(world *w) {
  w->nwaiting = 0;
  if (scheduler_up(w)) {
    seam_lost(&w->s, PEERS);
  } else {
    seam_hello(&w->s, PEERS);
  }
}

/* --- everything together --- */

static const mlfab__tensor_info fabric[] = {
    {0, MLFAB_F64, 600}, {1, MLFAB_F32, 1500}, {2, MLFAB_I64, 333}, {3, MLFAB_F32, 900}};
static const mlfab__tensor_info floats[] = {{0, MLFAB_F64, 600}, {1, MLFAB_F32, 2500}};

static world *open_world(uint64_t seed, const mlfab__tensor_info *tensors, uint32_t n,
                         uint32_t rule, uint32_t sync) {
  uint8_t table[8 * MLFAB__TENSOR_INFO_BYTES] __attribute__((aligned(8)));
  world *w = calloc(1, sizeof *w);
  assert_non_null(w);
  seam *s = &w->s;
  seam_init(s, PEERS);
  mlfab__rng_seed(&w->prng, seed);
  s->config.block_bytes = 1024;
  s->config.chunk_bytes = s->config.eager_bytes = CHUNK;
  s->config.heartbeat_ns = BEAT;
  s->config.scheduler = MLFAB_SCHEDULER_OWN;
  mlfab_schedule_init(&s->config.schedule);
  s->config.schedule.delay_bound = MLFAB_UNBOUNDED;
  for (uint32_t p = 0; p < PEERS; p++) s->peers[p].accumulators = SUMS;
  assert_int_equal(mlfab__env_init(&w->env, NULL), 0);
  assert_int_equal(mlfab__layout_build(&w->env, tensors, n, 16, 1, 0, 1 << 28, &w->layout, NULL),
                   0);
  (void)seam_define; /* for models of one tensor */
  seam_open(s);
  mlfab__define define = seam_model(sync, 16);
  define.tensors = n;
  define.options.optimizer = rule;
  for (uint32_t i = 0; i < n; i++)
    mlfab__encode_tensor_info(table + i * MLFAB__TENSOR_INFO_BYTES, &tensors[i]);
  seam_bulk(s, 0, MLFAB__DEFINE, mlfab__encode_define(s->meta, &define), table,
            n * MLFAB__TENSOR_INFO_BYTES);
  assert_int_equal(seam_defined(s, 0), 0);
  w->all = (shape){{{0, w->layout.bytes}}, 1, w->layout.bytes};
  w->expected = calloc(1, w->layout.bytes);
  w->model = calloc(1, w->layout.bytes);
  assert_true(w->expected && w->model && w->layout.bytes < TOTAL);
  s->hear = hear;
  for (uint32_t p = 0; p < PEERS; p++) {
    for (uint32_t b = 0; b < PEERS; b++) w->peers[p].met[b] = 1;
    greet(w, p); /* the link has the model's credit */
  }
  return w;
}
#define OPEN(seed, tensors, rule, sync) \
  open_world(seed, tensors, MLFAB__COUNT(tensors), MLFAB_OPTIMIZER_##rule, MLFAB_SYNC_##sync)

static void close_world(world *w) {
  assert_int_equal(w->s.drops, 0);
  seam_close(&w->s);
  for (uint32_t i = 0; i < PEERS; i++) {
    clear(w, i);
    for (int k = 0; k < PENDING; k++) free_update(&w->peers[i].pushes[k].update);
  }
  mlfab__layout_free(&w->env, &w->layout);
  free(w->expected);
  free(w->model);
  free(w);
}

/* Worker 0 pulls the model, which no scheduler plans. */
static const uint8_t *read_model(world *w) {
  mlfab__pull pull = {.request = 1, .segments = 1};
  if (scheduler_up(w)) scheduler_turn(w);
  w->s.peers[0].room = SEAM_ALL;
  seam_say(&w->s, 0, MLFAB__PULL, mlfab__encode_pull(w->s.meta, &pull, w->all.segments, NULL));
  while (w->ntokens > 0) seam_sent(&w->s, 0, w->tokens[--w->ntokens]);
  assert_true(w->read);
  scheduler_turn(w);
  return w->model;
}

/* A dozen shapes, so that pushes sometimes have equal ones. */
static void push_random(world *w, uint32_t at) {
  mlfab__rng shapes;
  shape s;
  mlfab__rng_seed(&shapes, 1 + draw(w, 2));
  random_segments(&shapes, &w->layout, 0, &s);
  pending *q = push(w, at, &s, draw(w, 4) > 0, 1, (double)draw(w, 5) - 2.0);
  if (q && q->packed && draw(w, 40) == 0) q->bad = spoil(&w->prng, &w->layout, &s, &q->update);
}

static void world_trouble(world *w) {
  uint32_t a = (uint32_t)draw(w, PEERS), b = (uint32_t)draw(w, PEERS);
  if (w->cut_off && draw(w, 60) == 0) {
    cut_off(w, w->cut_off - 1);
    w->cut_off = 0;
  }
  switch (draw(w, 6000)) {
    case 0:
    case 1:
      cut_off(w, a);
      break;
    case 2:
    case 3:
      hop_lost(w, a, b);
      break;
    case 4:
      scheduler_turn(w);
      break;
    case 5:
      seam_pass(&w->s, (1 + draw(w, 6)) * BEAT);
      break;
    default:
      break;
  }
}

static void world_step(world *w, int quiet) {
  uint32_t at = (uint32_t)draw(w, PEERS);
  w->s.now += draw(w, 1000);
  switch (draw(w, 8)) {
    case 0:
      if (!quiet && draw(w, 2) == 0) push_random(w, at);
      announce(w, at);
      break;
    case 1:
    case 2:
      for (uint64_t n = 1 + draw(w, 6); n > 0; n--) deliver(w, at);
      break;
    case 3:
      send_some(w, at);
      break;
    case 4:
    case 5:
      for (uint64_t n = 1 + draw(w, 6); n > 0; n--) sum_step(w, at);
      break;
    case 6:
      if (scheduler_up(w) && draw(w, w->nwaiting > 3 ? 8 : 60) == 0) plan(w, 0);
      if (!linked(w, at)) greet(w, at);
      if (draw(w, 4) == 0) w->peers[at].met[draw(w, PEERS)] = 1;
      break;
    default:
      seam_tick(&w->s);
      break;
  }
  if (!quiet) world_trouble(w);
}

static int world_busy(const world *w) {
  for (uint32_t i = 0; i < PEERS * PENDING; i++)
    if (w->peers[i / PENDING].pushes[i % PENDING].seq) return 1;
  return 0;
}

/* Every update is applied once or refused, whatever dies, falls silent or is rerouted at any point. Values are small
 * integers, so that the order of additions does not matter. Packed and dense updates are mixed. */
static void test_fabric(void **state) {
  uint64_t groups = 0, applied = 0, lost = 0;
  (void)state;
  seeds(30);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    world *w = OPEN(seed, fabric, SGD, ASYNC);
    for (int i = 0; i < 24000; i++) world_step(w, 0);
    if (!scheduler_up(w)) scheduler_turn(w);
    for (int i = 0; world_busy(w); i++) {
      world_step(w, 1);
      if (i % 2000 == 1999) seam_pass(&w->s, 6 * BEAT);
      if (i == 400000) fail_msg("seed %u: something waits for ever", (unsigned)seed);
    }
    if (!same_values(&w->layout, &w->all, read_model(w), w->expected))
      fail_msg("seed %u: not what was applied", (unsigned)seed);
    assert_int_equal(seam_stats(&w->s).updates_applied, w->applied);
    groups += w->groups[1];
    applied += seam_stats(&w->s).groups_applied;
    lost += seam_stats(&w->s).groups_failed;
    close_world(w);
  }
  if (last_seed - first_seed >= 29) assert_true(groups > 300 && applied > 200 && lost > 100);
}

/* Delivers everything that can be delivered, in turn. */
static void settle(world *w) {
  for (int i = 0; i < 20000 && world_busy(w); i++) {
    for (uint32_t k = 0; k < PEERS; k++) {
      announce(w, k);
      deliver(w, k);
      send_some(w, k);
      sum_step(w, k);
    }
    seam_pass(&w->s, 1000000);
    if (w->nwaiting == PEERS) plan(w, 1);
  }
}

/* A packed group changes the model as a dense group of the same values does, with random scales, at rules with steps and in
 * rounds. */
static void test_as_dense(void **state) {
  static const uint32_t rules[][2] = {{MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC},
                                      {MLFAB_OPTIMIZER_MOMENTUM, MLFAB_SYNC_ASYNC},
                                      {MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_BSP},
                                      {MLFAB_OPTIMIZER_ADAM, MLFAB_SYNC_BSP}};
  (void)state;
  seeds(40);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    world *w[2];
    for (int packed = 0; packed < 2; packed++) {
      mlfab__rng values; /* the same for both */
      mlfab__rng_seed(&values, seed);
      w[packed] = open_world(seed, floats, 2, rules[seed % 4][0], rules[seed % 4][1]);
      w[packed]->calm = 1;
      for (int round = 0; round < 3; round++) {
        shape s;
        mlfab__rng own = w[packed]->prng;
        w[packed]->prng = values;
        random_segments(&w[packed]->prng, &w[packed]->layout, 0, &s);
        for (uint32_t k = 0; k < PEERS; k++)
          push(w[packed], k, &s, packed, 0, mlfab__rng_unit(&w[packed]->prng) - 0.3);
        values = w[packed]->prng;
        w[packed]->prng = own;
        settle(w[packed]);
        assert_false(world_busy(w[packed]));
      }
      const mlfab_stats stats = seam_stats(&w[packed]->s);
      assert_int_equal(stats.groups_applied, 3);
      assert_int_equal(w[packed]->groups[packed], 3);
      assert_int_equal(stats.groups_failed, 0);
      (void)read_model(w[packed]);
    }
    if (!same_values(&w[0]->layout, &w[0]->all, w[0]->model, w[1]->model))
      fail_msg("seed %u: packed is not as dense", (unsigned)seed);
    close_world(w[0]);
    close_world(w[1]);
  }
}

/* The last RELEASE that aggregator 0 has not read. */
static mlfab__release last_release(world *w) {
  mlfab__release release = {0, 0};
  const peer *p = &w->peers[0];
  for (uint32_t i = p->begin; i < p->end; i++) {
    if (p->inbox[i].type == MLFAB__RELEASE)
      assert_int_equal(mlfab__decode_release(p->inbox[i].meta, p->inbox[i].bytes, &release), 0);
  }
  return release;
}

/* Two groups of two packed updates at aggregator 0. */
static world *two_groups(void) {
  world *w = OPEN(3, floats, SGD, ASYNC);
  for (int i = 0; i < 2; i++) {
    for (uint32_t k = 1; k < 3; k++) {
      assert_non_null(push(w, k, &w->all, 1, 0, 1.0));
      announce(w, k);
    }
    plan(w, 1);
  }
  return w;
}

static uint64_t lengths(const world *w) {
  uint64_t bytes = 0;
  for (uint32_t k = 1; k < 3; k++)
    for (int i = 0; i < 2; i++) bytes += w->peers[k].pushes[i].update.bytes;
  return bytes;
}

/* How much an aggregator may send: all of the head, a stage's worth of the next sum. FORWARD frames that do not fit break its
 * link; then the groups end, and the members' own lengths count again. */
static void test_bad_sums(void **state) {
  (void)state;
  for (int i = 0; i < 8; i++) {
    world *w = two_groups();
    const update *u = &w->peers[1].pushes[0].update;
    mlfab__release head = last_release(w);
    uint32_t n = piece_of(u->data, 0, u->bytes, 1), first = packet_bytes(u, 0);
    uint64_t raw = w->all.bytes, number = head.group;
    assert_true(head.upto == UINT64_MAX && n > 0);
    seam_pass(&w->s, 200000000);
    const mlfab__release next = last_release(w);
    assert_true(next.group > number && next.upto > 0 && next.upto < UINT64_MAX);
    const struct {
      uint64_t offset, total;
      uint32_t bytes;
    } said[] = {{0, 0, first},           /* its length is not known */
                {0, 8 * raw + 8, first}, /* longer than its elements need */
                {8, u->bytes, first},    /* out of place */
                {0, first - 8, first},   /* longer than it says itself */
                {0, u->bytes - 8, 0},    /* its length changes */
                {0, 0, 0},               /* likewise */
                {0, u->bytes, first}};   /* a good one, and then the members' own lengths */
    SAY(&w->s, 0, FORWARD, forward, {number, 0, 0}); /* a report of progress */
    if (i >= 4) SAY(&w->s, 0, FORWARD, forward, {number, 0, u->bytes});
    assert_int_equal(w->s.drops, 0);
    if (i < 7) {
      mlfab__forward forward = {number, said[i].offset, said[i].total};
      seam_bulk(&w->s, 0, MLFAB__FORWARD, mlfab__encode_forward(w->s.meta, &forward),
                said[i].bytes ? u->data : NULL, said[i].bytes);
    }
    assert_int_equal(w->s.drops, i < 6);
    if (i >= 6) seam_lost(&w->s, 0);
    w->s.drops = 0;
    assert_int_equal(seam_stats(&w->s).groups_failed, 2);
    scheduler_turn(w);
    scheduler_turn(w); /* the server tells it of all that waits */
    assert_int_equal(w->report.backlog, lengths(w));
    close_world(w);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_as_dense),
      cmocka_unit_test(test_bad_sums),
      cmocka_unit_test(test_fabric),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
