/* test_packets.c - packets at a server's node. Updates: the model after packets equals the model of another server after the same
 * values as dense updates. Pulls: caches are brought up to date while commits continue, and equal the model at the time when the
 * server began each slice. The parameter filter against a literal version. Malformed frames. The test plays the workers;
 * the last one reads the model. */
#include "core/base/env.h"
#include "core/kernels/half.h"
#include "core/model/optimizer.h"
#include "core/model/sync.h"
#include "tests/seam/serving.h"
#include "tests/seam/updates.h"
#include "tests/unit/changing.h"
#include "tests/unit/scale.h"

enum { W = 3, READER = W - 1, TENSORS = 5, FLIGHT = 4, STREAM = 1 << 22, MODEL = 1 << 18 };
enum { CHUNK = 65536, EAGER = 65536, ARRIVALS = 1024 };
#define READS (UINT64_C(1) << 40) /* requests of the reader have this bit */

static uint64_t base_seed(void) { return test_number("MLFAB_SEED", 1); }

/* An update in flight to one server. */
typedef struct sending {
  int used;
  uint32_t worker;
  uint64_t seq, bytes, sent, granted;
  uint8_t *data;                 /* as it travels */
  uint32_t ends[1 << 16], nends; /* ends of packets */
  int dense;
  uint32_t flags, eager, nsegments; /* to announce it again */
  mlfab__segment segments[8];
  double scale;
} sending;

typedef struct arrival { /* a frame on its way to a worker */
  mlfab__model model;
  uint64_t token;
  uint8_t *copy;
  uint32_t bytes;
} arrival;

typedef struct cache {
  uint8_t *data,
      *expected; /* expected: the slices as they were when the server began to send them */
  uint64_t commits[MLFAB__SLICES_MAX];
  uint32_t epoch;
  uint64_t request, seen;     /* in progress, or 0; for which `slice` and `commit` are expected */
  uint64_t commit, got, want; /* bytes answered; bytes requested */
  uint32_t slice, frames, begin, count;
  arrival queue[ARRIVALS];
  uint64_t bulk; /* bytes of the last pull */
} cache;

typedef struct node {
  seam s;
  mlfab__env env; /* of the layout */
  mlfab__layout layout;
  mlfab__define define;
  uint64_t seq[W], reads, read; /* requests of the reader; the last one that was answered */
  sending out[FLIGHT];
  uint32_t acks, fails, epoch;
  mlfab__push_ack ack;
  mlfab__pull_fail fail;
  uint8_t model[MODEL]; /* as read last */
  uint64_t versions[MLFAB__SLICES_MAX], commits[MLFAB__SLICES_MAX];
  uint64_t tokens[256];
  uint32_t ntokens;
  cache *caches[W];
} node;

typedef struct setting {
  mlfab__define define;
  mlfab__tensor_info tensors[TENSORS];
  uint32_t block_bytes, chunk_bytes, eager_bytes;
  mlfab_update_fn on_update;
  mlfab_filter_fn change_filter;
} setting;

/* --- a server with a model --- */

static void hear_model(node *n, const seam_heard *heard, const mlfab__model *m) {
  cache *c = n->caches[heard->peer];
  if (m->bytes > 0) n->epoch = m->epoch;
  if (!(m->request & READS)) {
    assert_true(c && c->count < ARRIVALS && m->request == c->request);
    assert_true(heard->bulk_bytes <= n->s.config.chunk_bytes);
    arrival *a = &c->queue[(c->begin + c->count++) % ARRIVALS];
    *a = (arrival){*m, heard->token, NULL, heard->bulk_bytes};
    if (heard->bulk_bytes == 0) return;
    a->copy = aligned_alloc(8, (heard->bulk_bytes + 7) / 8 * 8);
    assert_non_null(a->copy);
    memcpy(a->copy, heard->bulk, heard->bulk_bytes);
    return;
  }
  for (uint32_t at = 0, k; (m->flags & MLFAB__MODEL_PACKED) && at < heard->bulk_bytes; at += k) {
    mlfab__packet p;
    k = mlfab__packet_open(heard->bulk + at, heard->bulk_bytes - at, &p);
    assert_true(k > 0);
    mlfab__unpack_store(&p, n->model + p.offset);
  }
  if (!(m->flags & MLFAB__MODEL_PACKED))
    memcpy(n->model + m->offset, heard->bulk, heard->bulk_bytes);
  n->versions[m->slice] = m->version;
  n->commits[m->slice] = m->commit;
  if (m->flags & MLFAB__MODEL_LAST) n->read = m->request;
  assert_true(n->ntokens < 256);
  if (heard->token) n->tokens[n->ntokens++] = heard->token;
}

static void hear(seam *s, const seam_heard *heard) {
  node *n = (node *)s;
  mlfab__grant grant = {0};
#define ON(...) ON_FRAME(heard->type, heard->meta, heard->meta_bytes, __VA_ARGS__)
  ON(GRANT, grant, grant = *m);
  ON(PUSH_ACK, push_ack, (n->ack = *m, n->acks++));
  ON(PULL_FAIL, pull_fail, (n->fail = *m, n->fails++));
  ON(MODEL, model, hear_model(n, heard, m));
  for (uint32_t i = 0; i < FLIGHT; i++) {
    sending *out = &n->out[i];
    if (!out->used || out->worker != heard->peer) continue;
    if (heard->type == MLFAB__GRANT && out->seq == grant.seq) out->granted = grant.upto;
    if (heard->type == MLFAB__PUSH_ACK && out->seq == n->ack.seq) out->used = 0;
  }
}

/* Reads the model into n->model, with the versions of its slices. */
static const uint8_t *node_read(node *n) {
  uint64_t request = READS | ++n->reads;
  n->s.peers[READER].room = SEAM_ALL;
  seam_ask(&n->s, READER, request, 0, n->layout.bytes, 0);
  while (n->ntokens > 0) seam_sent(&n->s, READER, n->tokens[--n->ntokens]);
  assert_true(n->read == request);
  n->s.peers[READER].room = 0;
  return n->model;
}

/* Has the server begun to send a slice to a cache? Then the cache expects the present bytes of the slice. */
static void watch(node *n) {
  for (uint32_t w = 0; w < READER; w++) {
    const seam_heard *offered = &n->s.peers[w].offered;
    cache *c = n->caches[w];
    mlfab__model m;
    if (!c || c->want == 0 || offered->type != MLFAB__MODEL) continue;
    assert_int_equal(mlfab__decode_model(offered->meta, offered->meta_bytes, &m), 0);
    if (c->seen == m.request && c->slice == m.slice && c->commit == m.commit) continue;
    c->seen = m.request;
    c->slice = m.slice;
    c->commit = m.commit;
    const mlfab__slice *slice = &n->layout.slices[m.slice];
    memcpy(c->expected + slice->offset, node_read(n) + slice->offset, slice->bytes);
    assert_int_equal(m.commit, n->commits[m.slice]);
  }
}

static void tick(node *n) {
  seam_tick(&n->s);
  watch(n);
}

/* A worker sends a frame on a link whose transport is reliable: only the server's role reads the bulk. */
static void frame(node *n, uint32_t worker, uint8_t type, uint32_t bytes, const void *bulk,
                  uint32_t bulk_bytes) {
  assert_true(bytes > 0);
  mlfab__header header = OF(mlfab__header, .type = type, .meta_bytes = bytes,
                            .bulk_bytes = bulk_bytes, .job = mlfab__hash(0, "mlfab", 5), .epoch = 1,
                            .sender = worker, .incarnation = n->s.peers[worker].incarnation);
  mlfab__wire_seal(n->s.head, &header, bulk);
  seam_event(&n->s, OF(mlfab_io_event, .kind = MLFAB_IO_FRAME, .link = n->s.peers[worker].link,
                       .head = n->s.head, .head_bytes = MLFAB_HEADER_BYTES + bytes, .bulk = bulk,
                       .bulk_bytes = bulk_bytes));
  seam_look(&n->s);
  if (n->s.hear) watch(n);
}

static node *node_open(const setting *s) {
  node *n = calloc(1, sizeof *n);
  assert_non_null(n);
  seam_init(&n->s, W);
  n->s.config.block_bytes = s->block_bytes;
  n->s.config.chunk_bytes = s->chunk_bytes;
  n->s.config.eager_bytes = s->eager_bytes;
  n->s.config.on_update = s->on_update;
  n->s.config.change_filter = s->change_filter;
  n->define = s->define;
  for (uint32_t w = 0; w < W; w++) n->s.peers[w].caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_CHECKED;
  n->s.peers[1].caps |= MLFAB_CAP_LOCAL;
  seam_open(&n->s);
  seam_define_all(&n->s, 0, &s->define, s->tensors);
  assert_int_equal(seam_defined(&n->s, 0), 0);
  assert_int_equal(mlfab__env_init(&n->env, NULL), 0);
  assert_int_equal(mlfab__layout_build(&n->env, s->tensors, s->define.tensors,
                                       s->define.options.slices, 1, 0, 1 << 30, &n->layout, NULL),
                   0);
  assert_true(n->layout.bytes <= MODEL);
  n->s.hear = hear;
  for (uint32_t w = 0; w < W; w++) {
    seam_hello(&n->s, w); /* which renews the credit */
    n->seq[w] = 1;
  }
  for (uint32_t i = 0; i < FLIGHT; i++) {
    n->out[i].data = aligned_alloc(64, STREAM);
    assert_non_null(n->out[i].data);
  }
  (void)node_read(n); /* tells the epoch */
  return n;
}

static void node_close(node *n) {
  seam_close(&n->s);
  mlfab__layout_free(&n->env, &n->layout);
  for (uint32_t i = 0; i < FLIGHT; i++) free(n->out[i].data);
  free(n);
}

static shape whole_shape(const mlfab__layout *layout) {
  return (shape){{{0, layout->bytes}}, 1, layout->bytes};
}

/* The same bits, except for the sign of zeros. */
static void same(const mlfab__layout *layout, const uint8_t *x, const uint8_t *y) {
  shape all = whole_shape(layout);
  assert_true(same_values(layout, &all, x, y));
}

static void same_models(node *a, node *b) {
  same(&a->layout, node_read(a), node_read(b));
  for (uint32_t i = 0; i < a->layout.nslices; i++) {
    assert_int_equal(a->versions[i], b->versions[i]);
    assert_int_equal(a->commits[i], b->commits[i]);
  }
  const mlfab_stats x = seam_stats(&a->s), y = seam_stats(&b->s);
  assert_int_equal(x.updates_applied, y.updates_applied);
  assert_int_equal(x.updates_refused, y.updates_refused);
}

/* --- updates --- */

/* An update of some stretches, as packets and dense. No half rounds its values. */
typedef struct change {
  shape shape;
  double scale;
  update update;
} change;

static void set_value(uint8_t *at, uint32_t dtype, double x) {
  float f = (float)x;
  if (dtype == MLFAB_F32) memcpy(at, &f, 4);
}

static void change_make(const mlfab__layout *layout, mlfab__rng *prng, change *c, int whole) {
  free_update(&c->update);
  do {
    if (whole) c->shape = whole_shape(layout);
    if (!whole) random_segments(prng, layout, 0, &c->shape);
  } while (c->shape.bytes == 0);
  random_update(prng, layout, &c->shape, 1, 1, mlfab__rng_below(prng, 2) ? 99 : 10, &c->update);
  c->scale = mlfab__rng_below(prng, 3) == 0 ? -4.0 : mlfab__rng_below(prng, 2) ? -1.0 : 1.0;
}

static void announce_again(node *n, sending *s) {
  mlfab__push p;
  uint64_t version = UINT64_MAX; /* no delay, whatever is still in flight */
  memset(&p, 0, sizeof p);
  p.seq = s->seq;
  p.members = p.versions = 1;
  p.generation = n->s.peers[s->worker].ack.generation;
  p.flags = s->flags;
  p.eager = s->eager;
  p.progress = s->seq - 1;
  p.bytes = s->bytes;
  p.scale = s->scale;
  p.segments = s->nsegments;
  s->sent = s->granted = s->eager;
  frame(n, s->worker, MLFAB__PUSH, mlfab__encode_push(n->s.meta, &p, s->segments, &version),
        s->eager > 0 ? s->data : NULL, s->eager);
}

static void announce(node *n, sending *s, const change *u, uint32_t flags, uint32_t eager) {
  s->flags = flags;
  s->eager = eager;
  s->nsegments = u->shape.n;
  s->scale = u->scale;
  memcpy(s->segments, u->shape.segments, sizeof s->segments);
  announce_again(n, s);
}

static sending *begin(node *n, uint32_t worker) {
  for (uint32_t i = 0; i < FLIGHT; i++) {
    if (n->out[i].used) continue;
    n->out[i].used = 1;
    n->out[i].worker = worker;
    n->out[i].seq = n->seq[worker]++;
    n->out[i].bytes = n->out[i].nends = 0;
    n->out[i].dense = 0;
    return &n->out[i];
  }
  return NULL;
}

static void push_dense(node *n, uint32_t worker, const change *c, uint32_t eager) {
  sending *s = begin(n, worker);
  s->dense = 1;
  memcpy(s->data, c->update.dense, s->bytes = c->shape.bytes);
  announce(n, s, c, 0, (uint32_t)mlfab__min(eager / 8 * 8, s->bytes));
}

/* The bytes that travel, and the places at which they may be cut. */
static void encode(const change *c, sending *s) {
  assert_true(c->update.bytes <= STREAM);
  memcpy(s->data, c->update.packets, s->bytes = c->update.bytes);
  s->nends = 0;
  for (uint64_t at = 0; at < s->bytes;) {
    at += packet_bytes(&c->update, at);
    assert_true(s->nends < MLFAB__COUNT(s->ends));
    s->ends[s->nends++] = (uint32_t)at;
  }
}

/* The last packet end at or before `upto` and after the sent bytes. */
static uint64_t cut(const sending *s, uint64_t upto) {
  uint64_t end = s->sent;
  if (s->dense) return mlfab__max(upto == s->bytes ? upto : upto / 8 * 8, s->sent);
  for (uint32_t i = 0; i < s->nends && s->ends[i] <= upto; i++)
    if (s->ends[i] > end) end = s->ends[i];
  return end;
}

static void push_packed(node *n, uint32_t worker, const change *u, uint32_t eager) {
  sending *s = begin(n, worker);
  encode(u, s);
  s->sent = 0;
  announce(n, s, u, MLFAB__PUSH_PACKED, (uint32_t)cut(s, mlfab__min(eager, s->bytes)));
}

/* Bytes that come at once: a part of the worker's credit. */
static uint32_t some_eager(const node *n, uint32_t worker, mlfab__rng *prng, uint32_t part) {
  return (uint32_t)mlfab__rng_below(prng, n->s.peers[worker].ack.eager_bytes / part);
}

static void push_any(node *n, uint32_t worker, const change *u, mlfab__rng *prng, uint32_t part) {
  uint32_t eager = some_eager(n, worker, prng, part);
  (mlfab__rng_below(prng, 2) ? push_dense : push_packed)(n, worker, u, eager);
}

/* Sends one frame of granted bytes; returns 0 when there is none. */
static int send_some(node *n, mlfab__rng *prng) {
  uint32_t from = (uint32_t)mlfab__rng_below(prng, FLIGHT);
  for (uint32_t k = 0; k < FLIGHT; k++) {
    sending *s = &n->out[(from + k) % FLIGHT];
    if (!s->used || s->sent >= s->granted) continue;
    uint64_t most = mlfab__min(s->granted, s->sent + n->s.config.chunk_bytes);
    uint64_t end = cut(s, s->sent + 1 + mlfab__rng_below(prng, most - s->sent));
    if (end == s->sent) end = cut(s, most);
    for (uint32_t i = 0; end == s->sent && i < s->nends; i++) { /* a packet larger than a chunk */
      if (s->ends[i] > s->sent && s->ends[i] <= s->granted) {
        end = s->ends[i];
        break;
      }
    }
    if (end == s->sent) continue;
    mlfab__chunk chunk = {s->seq, s->sent, n->s.peers[s->worker].ack.generation};
    uint64_t at = s->sent;
    s->sent = end;
    frame(n, s->worker, MLFAB__CHUNK, mlfab__encode_chunk(n->s.meta, &chunk), s->data + at,
          (uint32_t)(end - at));
    return 1;
  }
  return 0;
}

static int in_flight(const node *n) {
  int count = 0;
  for (uint32_t i = 0; i < FLIGHT; i++) count += n->out[i].used;
  return count;
}

static void drain(node *n, mlfab__rng *prng) {
  for (int idle = 0; in_flight(n) > 0 && idle < 100;) {
    if (send_some(n, prng)) {
      idle = 0;
    } else {
      tick(n);
      idle++;
    }
  }
  if (n->s.drops > 0) fail_msg("dropped: %s", n->s.said);
  assert_int_equal(in_flight(n), 0);
}

/* The worker's link breaks; it announces undecided updates again, in the order of their numbers. */
static void break_link(node *n, uint32_t worker) {
  seam_lost(&n->s, worker);
  seam_hello(&n->s, worker);
  for (uint64_t seq = 0; seq < n->seq[worker]; seq++) {
    for (uint32_t i = 0; i < FLIGHT; i++) {
      sending *s = &n->out[i];
      if (s->used && s->worker == worker && s->seq == seq) announce_again(n, s);
    }
  }
}

static int adds_half(void *user, const mlfab_update_info *info, uint32_t tensor, int dtype,
                     uint64_t first, uint64_t count, void *weights, const void *sum) {
  (void)user, (void)tensor, (void)first;
  if (info->seq % 7 == 6) return 1;
  mlfab__kernel_add(dtype, weights, weights, sum, dtype == MLFAB_I64 ? 1.0 : 0.5, count, 0);
  return 0;
}

static void random_setting(mlfab__rng *prng, setting *s) {
  static const uint32_t blocks[] = {64, 448, 4096, 65536, 1 << 20};
  static const uint32_t rules[] = {MLFAB_OPTIMIZER_SGD, MLFAB_OPTIMIZER_SGD,
                                   MLFAB_OPTIMIZER_MOMENTUM, MLFAB_OPTIMIZER_ADAM,
                                   MLFAB_OPTIMIZER_ADADELAY};
  memset(s, 0, sizeof *s);
  s->define = seam_model(MLFAB_SYNC_ASYNC, 0);
  s->define.options.optimizer = rules[mlfab__rng_below(prng, 5)];
  s->define.options.slices = (uint32_t)mlfab__rng_below(prng, 6);
  if (mlfab__rng_below(prng, 3) == 0) s->define.options.consistency.kind = MLFAB_SYNC_BSP;
  s->define.tensors = 1 + (uint32_t)mlfab__rng_below(prng, TENSORS);
  int whole = s->define.options.optimizer == MLFAB_OPTIMIZER_SGD;
  for (uint32_t i = 0; i < s->define.tensors; i++) {
    uint32_t dtype = 1 + (uint32_t)mlfab__rng_below(prng, 3);
    if (dtype == MLFAB_I64 && !whole) dtype = MLFAB_F32;
    s->tensors[i] = (mlfab__tensor_info){
        i, dtype, 1 + mlfab__rng_below(prng, mlfab__rng_below(prng, 3) ? 4000 : 30)};
    if (mlfab__rng_below(prng, 4) == 0) s->tensors[i].count += mlfab__rng_below(prng, 2000);
  }
  s->block_bytes = blocks[mlfab__rng_below(prng, 5)];
  s->chunk_bytes = 4096 << mlfab__rng_below(prng, 5);
  s->eager_bytes = 1024 << mlfab__rng_below(prng, 9);
  if (mlfab__rng_below(prng, 5) == 0) s->on_update = adds_half;
}

static void fixed_setting(setting *s, uint32_t rule) {
  memset(s, 0, sizeof *s);
  s->define = seam_model(MLFAB_SYNC_ASYNC, 4);
  s->define.options.optimizer = rule;
  s->define.tensors = 2;
  s->define.options.tags = 4;
  s->tensors[0] = (mlfab__tensor_info){0, MLFAB_F32, 4000};
  s->tensors[1] = (mlfab__tensor_info){1, MLFAB_F32, 4000};
  s->block_bytes = 4096;
  s->chunk_bytes = 65536;
  s->eager_bytes = 65536;
}

/* Two servers get the same updates, one as packets and one dense. */
SCENE(test_updates) {
  static change u;
  for (uint32_t round = 0; round < test_cases(200); round++) {
    mlfab__rng prng, at_a, at_b;
    setting s;
    mlfab__rng_seed(&prng, base_seed() + round);
    mlfab__rng_seed(&at_a, round);
    mlfab__rng_seed(&at_b, round + 1);
    random_setting(&prng, &s);
    if (mlfab__rng_below(&prng, 4) == 0) /* uses |g| / |w| */
      s.define.options.consistency.kind = MLFAB_SYNC_PSSP_DYNAMIC;
    node *a = node_open(&s), *b = node_open(&s);
    uint32_t w = 0;
    for (uint32_t i = 0; i < 24; i++) {
      int rounds = s.define.options.consistency.kind == MLFAB_SYNC_BSP;
      w = rounds ? i % W : (uint32_t)mlfab__rng_below(&prng, W);
      change_make(&a->layout, &prng, &u, 0);
      if (rounds && !mlfab__rng_below(&prng, 4)) u.scale = 0.5;
      push_packed(a, w, &u, some_eager(a, w, &prng, 4));
      push_dense(b, w, &u, some_eager(a, w, &prng, 4));
      if ((rounds && w == W - 1) || in_flight(a) == FLIGHT || in_flight(b) == FLIGHT ||
          mlfab__rng_below(&prng, 3) == 0) {
        drain(a, &at_a);
        drain(b, &at_b);
        if (!rounds || w == W - 1) same_models(a, b);
      }
    }
    node_close(a);
    node_close(b);
  }
}

/* Links break at any time: the model is the sum of all updates, each once. The values are such that no
 * order of additions rounds. */
SCENE(test_broken_links) {
  static change u;
  static uint8_t sum[MODEL];
  for (uint32_t round = 0; round < test_cases(150); round++) {
    mlfab__rng prng;
    setting s;
    mlfab__rng_seed(&prng, base_seed() + 5000 + round);
    random_setting(&prng, &s);
    s.define.options.optimizer = MLFAB_OPTIMIZER_SGD;
    s.define.options.consistency.kind = MLFAB_SYNC_ASYNC;
    s.define.options.tags = mlfab__rng_below(&prng, 2) ? 4 : 0;
    s.on_update = NULL;
    node *n = node_open(&s);
    const mlfab__layout *layout = &n->layout;
    memset(sum, 0, sizeof sum);
    for (uint32_t pushed = 0; pushed < 16;) {
      uint32_t w = (uint32_t)mlfab__rng_below(&prng, W);
      uint64_t what = mlfab__rng_below(&prng, 8);
      if (what == 0) break_link(n, w);
      if (what > 0 && what < 6 && !send_some(n, &prng)) tick(n);
      if (what < 6 || in_flight(n) == FLIGHT) continue;
      change_make(layout, &prng, &u, 0);
      push_any(n, w, &u, &prng, FLIGHT);
      pushed++;
      literal_apply(layout, &u.shape, sum, u.update.dense, u.scale);
    }
    drain(n, &prng);
    same(layout, node_read(n), sum);
    assert_int_equal(seam_stats(&n->s).updates_applied, 16);
    node_close(n);
  }
}

/* --- caches --- */

static void cache_ask(node *n, uint32_t worker, cache *c, mlfab__rng *prng, int exact) {
  static uint64_t sinces[MLFAB__SLICES_MAX];
  static uint64_t requests = 0;
  const mlfab__layout *layout = &n->layout;
  mlfab__segment segments[MLFAB__SLICES_MAX];
  mlfab__pull p;
  memset(&p, 0, sizeof p);
  c->request = p.request = ++requests;
  p.epoch = n->epoch;
  c->got = c->want = c->bulk = c->frames = 0;
  /* Some of the slices, each complete. */
  for (uint32_t i = 0; i < layout->nslices; i++) {
    if (!exact && mlfab__rng_below(prng, 4) == 0) continue;
    const mlfab__slice *slice = &layout->slices[i];
    sinces[p.sinces++] = !exact && mlfab__rng_below(prng, 8) == 0 ? 0 : c->commits[i];
    c->want += slice->bytes;
    mlfab__segment *last = p.segments > 0 ? &segments[p.segments - 1] : NULL;
    if (last && last->offset + last->bytes == slice->offset)
      last->bytes += slice->bytes;
    else
      segments[p.segments++] = (mlfab__segment){slice->offset, slice->bytes};
  }
  if (!exact && mlfab__rng_below(prng, 8) == 0) p.sinces = 0;
  if (!exact && mlfab__rng_below(prng, 8) == 0) { /* of another epoch: void */
    p.epoch++;
    for (uint32_t i = 0; i < p.sinces; i++) sinces[i] = UINT64_MAX - i;
  }
  if (p.segments == 0) p.sinces = 0;
  frame(n, worker, MLFAB__PULL, mlfab__encode_pull(n->s.meta, &p, segments, sinces), NULL, 0);
  assert_int_equal(n->fails, 0);
}

/* Takes a frame that the server has for the worker, if there is one. */
static void cache_receive(node *n, uint32_t worker, cache *c) {
  if (c->count == ARRIVALS) return;
  n->s.peers[worker].room = 1;
  seam_look(&n->s);
  n->s.peers[worker].room = 0;
  watch(n);
}

/* The worker handles a frame. */
static void cache_take(node *n, uint32_t worker, cache *c) {
  arrival *a = &c->queue[c->begin];
  const mlfab__model *m = &a->model;
  const uint8_t *bulk = a->copy;
  c->begin = (c->begin + 1) % ARRIVALS;
  c->count--;
  c->frames++;
  c->bulk += a->bytes;
  if (c->want > 0) {
    const mlfab__slice *slice = &n->layout.slices[m->slice];
    uint64_t end = m->offset;
    assert_true(m->bytes > 0 && m->offset >= slice->offset &&
                m->offset - slice->offset + m->bytes <= slice->bytes);
    if (m->flags & MLFAB__MODEL_PACKED) {
      for (uint32_t at = 0, k; at < a->bytes; at += k) {
        mlfab__packet p;
        k = mlfab__packet_open(bulk + at, a->bytes - at, &p);
        assert_true(k > 0 && p.offset >= end);
        end = p.offset + (uint64_t)p.elements * mlfab__dtype_bytes(p.dtype);
        assert_true(end <= m->offset + m->bytes);
        mlfab__unpack_store(&p, c->data + p.offset);
      }
    } else {
      assert_int_equal(m->bytes, a->bytes);
      assert_int_equal(n->define.options.pull_half, 0);
      memcpy(c->data + m->offset, bulk, a->bytes);
    }
    c->commits[m->slice] = m->commit;
    if (m->flags & MLFAB__MODEL_LAST) c->request = 0;
    /* At the end of a slice it equals the slice at its commit. */
    if (m->offset + m->bytes == slice->offset + slice->bytes)
      assert_memory_equal(c->data + slice->offset, c->expected + slice->offset, slice->bytes);
  } else {
    assert_int_equal(m->flags, MLFAB__MODEL_LAST);
    c->request = 0;
  }
  free(a->copy);
  if (a->token != 0) seam_sent(&n->s, worker, a->token);
  watch(n);
}

/* A worker's cache, of which nothing is valid. */
static void cache_begin(node *n, uint32_t worker, cache *c) {
  memset(c, 0, sizeof *c);
  c->data = malloc(MODEL);
  c->expected = malloc(MODEL);
  assert_true(c->data && c->expected);
  memset(c->data, 0xee, MODEL);
  n->caches[worker] = c;
}

static void cache_end(cache *c) {
  free(c->data);
  free(c->expected);
}

static void cache_finish(node *n, uint32_t worker, cache *c) {
  while (c->request != 0 || c->count > 0) {
    cache_receive(n, worker, c);
    if (c->count > 0) cache_take(n, worker, c);
  }
}

static void keep_even(void *user, const mlfab_filter_info *info, const void *values,
                      const void *before, uint64_t *keep) {
  (void)user, (void)values, (void)before;
  for (uint64_t i = 0; i < info->count; i++)
    if ((info->first + i) % 2) keep[i / 64] &= ~((uint64_t)1 << i % 64);
}

/* Pushes and pulls of all kinds in all orders: every slice that a cache receives equals the server's slice
 * when it was pinned, whatever was left out; and when nothing has changed, nothing is sent. */
SCENE(test_caches) {
  static change u;
  static cache caches[READER];
  for (uint32_t round = 0; round < test_cases(100); round++) {
    mlfab__rng prng;
    setting s;
    mlfab__rng_seed(&prng, base_seed() + 7000 + round);
    random_setting(&prng, &s);
    int whole = 0;
    for (uint32_t i = 0; i < s.define.tensors; i++) whole |= s.tensors[i].dtype == MLFAB_I64;
    s.define.options.tags = 1u << mlfab__rng_below(&prng, mlfab__rng_below(&prng, 2) ? 4 : 17);
    if (!whole) s.define.options.pull_half = (uint32_t)mlfab__rng_below(&prng, 3);
    if (!whole && mlfab__rng_below(&prng, 3) == 0) s.define.options.change_threshold = 0.5;
    if (mlfab__rng_below(&prng, 6) == 0) s.change_filter = keep_even;
    if (mlfab__rng_below(&prng, 2)) s.chunk_bytes = 512 << mlfab__rng_below(&prng, 5);
    node *n = node_open(&s);
    for (uint32_t w = 0; w < READER; w++) cache_begin(n, w, &caches[w]);
    uint32_t pushes = 0;
    for (uint32_t step = 0; step < 400; step++) {
      uint32_t w = (uint32_t)mlfab__rng_below(&prng, READER);
      cache *c = &caches[w];
      uint64_t what = mlfab__rng_below(&prng, 8);
      if (what == 0 && in_flight(n) < FLIGHT) {
        change_make(&n->layout, &prng, &u, 0);
        push_any(n, pushes++ % W, &u, &prng, 4); /* to complete the open round */
      }
      if (what == 1 && c->request == 0 && c->count == 0) cache_ask(n, w, c, &prng, 0);
      if (what == 2 || what == 3) send_some(n, &prng);
      if (what == 4) tick(n);
      if (what == 5 || what == 6) cache_receive(n, w, c);
      if (what == 7 && c->count > 0) cache_take(n, w, c);
    }
    while (pushes % W != 0) { /* rounds wait for all workers */
      if (in_flight(n) == FLIGHT) drain(n, &prng);
      change_make(&n->layout, &prng, &u, 0);
      push_dense(n, pushes++ % W, &u, 0);
    }
    drain(n, &prng);
    for (uint32_t w = 0; w < READER; w++) {
      cache *c = &caches[w];
      cache_finish(n, w, c);
      cache_ask(n, w, c, &prng, 1);
      cache_finish(n, w, c);
      if (s.define.options.pull_half == 0)
        assert_memory_equal(c->data, node_read(n), n->layout.bytes);
      cache_ask(n, w, c, &prng, 1);
      cache_finish(n, w, c);
      assert_int_equal(c->bulk, 0);
      assert_int_equal(c->frames, n->layout.nslices);
      cache_end(c);
    }
    assert_int_equal(n->s.drops, 0);
    node_close(n);
  }
}

/* Every `every`-th element of 32,768 changes, and both caches pull; their frames' bytes. */
static void pull_after(node *n, cache *caches, mlfab__rng *prng, uint32_t every, uint64_t bulk[2]) {
  static change u;
  change_make(&n->layout, prng, &u, 1);
  memset(u.update.dense, 0, n->layout.bytes);
  for (uint32_t k = 0; k < 32768; k += every) set_value(u.update.dense + 4 * k, MLFAB_F32, 1.0);
  u.scale = 1.0;
  push_dense(n, 0, &u, 0);
  drain(n, prng);
  for (uint32_t w = 0; w < 2; w++) {
    cache_ask(n, w, &caches[w], prng, 1);
    cache_finish(n, w, &caches[w]);
    bulk[w] = caches[w].bulk;
  }
}

/* With a tag an element: packets are for few changes, and for a link that leaves the host also for many blocks with few. */
SCENE(test_sends_in_full) {
  mlfab__rng prng;
  setting s;
  static cache caches[2];
  uint64_t bulk[2], all = 4 * 32768;
  mlfab__rng_seed(&prng, 1);
  fixed_setting(&s, MLFAB_OPTIMIZER_SGD);
  s.define.options.slices = s.define.options.tags = s.define.tensors = 1;
  s.tensors[0].count = 32768;
  s.block_bytes = s.chunk_bytes = 1 << 18;
  node *n = node_open(&s);
  for (uint32_t w = 0; w < 2; w++) cache_begin(n, w, &caches[w]);
  pull_after(n, caches, &prng, 1, bulk);
  assert_true(bulk[0] == all && bulk[1] == all);
  pull_after(n, caches, &prng, 1, bulk); /* all has changed */
  assert_true(bulk[0] == all && bulk[1] == all);
  pull_after(n, caches, &prng, 256, bulk); /* one block in four */
  assert_true(bulk[0] < all / 16 && bulk[1] == bulk[0]);
  pull_after(n, caches, &prng, 128, bulk); /* every other one */
  assert_true(bulk[0] < all / 16 && bulk[1] == all);
  pull_after(n, caches, &prng, 2, bulk); /* half of all */
  assert_true(bulk[0] > all / 2 && bulk[0] < all && bulk[1] == all);
  for (uint32_t w = 0; w < 2; w++) cache_end(&caches[w]);
  node_close(n);
}

/* --- the parameter filter --- */

/* One element, as TDF 4.2 says it. */
static void filter_literal(const mlfab__tensor *t, double tau, int even_only, uint64_t k,
                           const uint8_t *before, uint8_t *after) {
  uint32_t width = mlfab__dtype_bytes((int)t->dtype);
  float f[2];
  double d[2] = {0.0, 0.0};
  memcpy(&f[0], before, 4), memcpy(&f[1], after, 4);
  if (t->dtype == MLFAB_F64) memcpy(&d[0], before, 8), memcpy(&d[1], after, 8);
  if (t->dtype == MLFAB_F32) d[0] = (double)f[0], d[1] = (double)f[1];
  int small = d[0] != d[1] && d[0] != 0.0 && fabs(d[1] - d[0]) / fabs(d[0]) < tau;
  if (small || (even_only && k % 2)) memcpy(after, before, width);
}

SCENE(test_filter) {
  static change u;
  static uint8_t before[MODEL], after[MODEL], s0[MODEL];
  for (uint32_t round = 0; round < test_cases(100); round++) {
    mlfab__rng prng;
    setting s;
    mlfab__optimizer rule;
    mlfab_model_options options = MLFAB_MODEL_OPTIONS_INIT;
    mlfab__rng_seed(&prng, base_seed() + 3000 + round);
    random_setting(&prng, &s);
    s.on_update = NULL;
    s.define.options.optimizer =
        mlfab__rng_below(&prng, 2) ? MLFAB_OPTIMIZER_SGD : MLFAB_OPTIMIZER_MOMENTUM;
    for (uint32_t i = 0; i < s.define.tensors; i++)
      s.tensors[i].dtype = mlfab__rng_below(&prng, 2) ? MLFAB_F32 : MLFAB_F64;
    s.define.options.change_threshold = mlfab__rng_below(&prng, 4) ? 0.2 : 0.0;
    s.define.options.change_decay = mlfab__rng_below(&prng, 2) ? 0.5 : 0.0;
    if (mlfab__rng_below(&prng, 2)) s.change_filter = keep_even;
    s.define.options.tags = mlfab__rng_below(&prng, 2) ? 16 : 0;
    node *n = node_open(&s);
    const mlfab__layout *layout = &n->layout;
    options.optimizer = s.define.options.optimizer;
    options.gamma = s.define.options.gamma;
    assert_int_equal(mlfab__optimizer_init(&rule, &options, NULL), 0);
    memset(s0, 0, sizeof s0);
    int rounds = mlfab__sync_rounds(s.define.options.consistency.kind);
    for (uint32_t i = 0; i < 12; i++) {
      uint64_t iteration = rounds ? i + 1 : 1; /* of the slowest worker */
      double tau = s.define.options.change_threshold;
      if (tau > 0.0) tau = tau / (1.0 + s.define.options.change_decay * log((double)iteration));
      memcpy(before, node_read(n), sizeof before);
      memcpy(after, before, sizeof after);
      change_make(layout, &prng, &u, 1);
      u.scale = 1.0;
      for (uint32_t w = 0; w < (rounds ? W : 1); w++) {
        if (w > 0)
          memset(u.update.dense, 0, layout->bytes); /* so the sum equals the first update */
        if (w > 0) push_dense(n, w, &u, some_eager(n, w, &prng, 1));
        if (w > 0) continue;
        push_any(n, w, &u, &prng, 1);
        mlfab__optimizer_step step = {1.0, 1, 0};
        for (uint32_t k = 0; k < layout->ntensors; k++) {
          const mlfab__tensor *t = &layout->tensors[k];
          mlfab__optimizer_apply(&rule, &step, (int)t->dtype, after + t->offset, after + t->offset,
                                 u.update.dense + t->offset, s0 + t->offset, NULL, t->count);
          for (uint64_t e = 0; e < t->count; e++) {
            uint64_t at = t->offset + e * mlfab__dtype_bytes((int)t->dtype);
            filter_literal(t, tau, s.change_filter != NULL, e, before + at, after + at);
          }
        }
      }
      drain(n, &prng);
      same(layout, node_read(n), after);
    }
    node_close(n);
  }
}

/* --- violations --- */

/* The node gave the link up for this reason; "": it did not. */
static void assert_refused(const char *said, const char *text) {
  if (text[0] ? !strstr(said, text) : said[0] != 0) fail_msg("\"%s\", not \"%s\"", said, text);
}

/* Two packets of 8 elements at `first` and `second` in the model, of an update of [from, to). The last `less`
 * bytes are missing; or what comes ahead ends `less_ahead` bytes before the end of the first packet. */
typedef struct two_packets {
  const char *text; /* of the refusal */
  uint64_t from, to, first, second;
  int dtype;
  uint32_t less, less_ahead;
} two_packets;

/* Sends them. Returns the text of the drop, or "". */
static const char *say_packets(node *n, const two_packets *two) {
  static change u;
  static double values[8];
  mlfab__packet_shape piece = {two->first, two->dtype, 0, 0, 8};
  memset(&u, 0, sizeof u);
  u.scale = 1.0;
  u.shape = (shape){{{two->from, two->to - two->from}}, 1, two->to - two->from};
  sending *s = begin(n, 0);
  uint32_t bytes = mlfab__packet_dense(s->data, &piece, values);
  piece.offset = two->second;
  bytes += mlfab__packet_dense(s->data + bytes, &piece, values);
  s->bytes = bytes;
  n->s.drops = 0;
  n->s.said[0] = 0;
  if (two->less_ahead > 0) {
    static uint8_t ahead[1024] __attribute__((aligned(8)));
    mlfab__chunk chunk = {s->seq, bytes / 2 - two->less_ahead, n->s.peers[0].ack.generation};
    memcpy(ahead, s->data, bytes);
    announce(n, s, &u, MLFAB__PUSH_PACKED, bytes / 2 - two->less_ahead);
    if (n->s.drops == 0)
      frame(n, 0, MLFAB__CHUNK, mlfab__encode_chunk(n->s.meta, &chunk), ahead + chunk.offset,
            bytes - (uint32_t)chunk.offset);
  } else {
    s->bytes -= two->less;
    announce(n, s, &u, MLFAB__PUSH_PACKED, bytes - two->less);
  }
  s->used = 0;
  seam_lost(&n->s, 0);
  seam_hello(&n->s, 0);
  return n->s.said;
}

SCENE(test_refused_packets) {
  setting s;
  static uint8_t before[MODEL];
  fixed_setting(&s, MLFAB_OPTIMIZER_SGD);
  node *n = node_open(&s);
  const uint64_t slice = n->layout.slices[0].bytes, tensor = 16000;
  const char *const disorder = "packets out of order, or overlapping";
  const char *const outside = "a packet outside the stretches that were announced";
  const char *const cut_off = "a packet that is malformed, or cut by the end of its frame";
  const two_packets rows[] = {
      {"", 0, 32000, 0, 32, MLFAB_F32, 0, 0},
      {disorder, 0, 32000, 32, 0, MLFAB_F32, 0, 0},
      {disorder, 0, 32000, 0, 28, MLFAB_F32, 0, 0},
      {outside, 64, 640, 64, 632, MLFAB_F32, 0, 0},
      {outside, 64, 640, 32, 128, MLFAB_F32, 0, 0},
      {"a packet of another type than its tensor", 0, 32000, 0, 64, MLFAB_F64, 0, 0},
      {"a packet that is not of one tensor", 0, 32000, 0, tensor - 16, MLFAB_F32, 0, 0},
      {"a packet that is not of one slice", 0, 32000, 0, slice - 16, MLFAB_F32, 0, 0},
      {cut_off, 0, 32000, 0, 32, MLFAB_F32, 8, 0},
      {cut_off, 0, 32000, 0, 32, MLFAB_F32, 0, 8},
  };
  memcpy(before, node_read(n), sizeof before);
  for (uint32_t i = 0; i < sizeof rows / sizeof *rows; i++)
    assert_refused(say_packets(n, &rows[i]), rows[i].text);
  assert_memory_equal(before, node_read(n), 32000);
  node_close(n);
}

/* An update with a NaN changes nothing, in whatever form it arrives; the next one is applied. */
SCENE(test_not_finite) {
  static change u;
  static uint8_t before[MODEL];
  for (uint32_t round = 0; round < 60; round++) {
    mlfab__rng prng;
    setting s;
    mlfab__rng_seed(&prng, base_seed() + round);
    fixed_setting(&s, round % 3 == 0 ? MLFAB_OPTIMIZER_ADAM : MLFAB_OPTIMIZER_SGD);
    if (round % 2) s.eager_bytes = 4096;
    node *n = node_open(&s);
    for (uint32_t i = 0; i < 4; i++) {
      change_make(&n->layout, &prng, &u, 1);
      if (i == 2) {
        float bad = mlfab__rng_below(&prng, 2) ? NAN : INFINITY;
        memcpy(u.update.dense + 4 * mlfab__rng_below(&prng, 8000), &bad, 4);
      }
      memcpy(before, node_read(n), sizeof before);
      if (i == 2) { /* halves saturate: send it as float32 */
        sending *out = begin(n, 0);
        for (uint32_t k = 0; k < n->layout.nslices; k++) {
          const mlfab__slice *slice = &n->layout.slices[k];
          for (uint64_t at = slice->offset, bytes; at < slice->offset + slice->bytes; at += bytes) {
            bytes = mlfab__min(slice->offset + slice->bytes, at < 16000 ? 16000 : 32000) - at;
            mlfab__packet_shape piece = {at, MLFAB_F32, 0, 0, (uint32_t)(bytes / 4)};
            out->bytes += mlfab__packet_dense(out->data + out->bytes, &piece, u.update.dense + at);
            out->ends[out->nends++] = (uint32_t)out->bytes;
          }
        }
        out->sent = 0;
        announce(n, out, &u, MLFAB__PUSH_PACKED,
                 (uint32_t)cut(out, mlfab__min(out->bytes, n->s.peers[0].ack.eager_bytes)));
      } else {
        push_packed(n, 0, &u, 0);
      }
      drain(n, &prng);
      assert_int_equal(n->ack.code, i == 2 ? MLFAB_ERR_NOT_FINITE : 0);
      if (i == 2) assert_memory_equal(before, node_read(n), n->layout.bytes);
    }
    assert_int_equal(seam_stats(&n->s).updates_applied, 3);
    node_close(n);
  }
}

/* Changes some bytes of the first page of the sent data: to random bytes, or one value to infinity or NaN.
 * Leaves the last bytes of the page alone, because a vector may read them together with the second page. */
static void change_some(mlfab__rng *prng, size_t head) {
  for (uint32_t i = 1 + (uint32_t)mlfab__rng_below(prng, CHANGING_MOST); i > 0; i--) {
    static const uint32_t infinite = 0x7f800000u;
    uint64_t any = mlfab__rng_next(prng);
    size_t count = (size_t)1 << mlfab__rng_below(prng, 4);
    int value = mlfab__rng_below(prng, 4) == 0;
    if (value) count = 4;
    size_t at = mlfab__rng_below(prng, (head - 64) / count) * count;
    changing_to(at, value ? (const void *)&infinite : (const void *)&any, count);
  }
}

/* Sends everything that was announced in one frame after the grant. */
static void send_at_once(node *n, sending *s) {
  for (int i = 0; i < 100 && s->used && n->s.drops == 0; i++) {
    mlfab__chunk chunk = {s->seq, s->sent, n->s.peers[s->worker].ack.generation};
    uint32_t left = (uint32_t)(s->bytes - s->sent);
    tick(n);
    if (!s->used || left == 0 || s->granted < s->bytes) continue;
    s->sent = s->bytes;
    frame(n, s->worker, MLFAB__CHUNK, mlfab__encode_chunk(n->s.meta, &chunk),
          s->data + chunk.offset, left);
  }
}

/* The bytes change while the server reads them: the server applies the bytes that it has checked, or
 * nothing. For packets and dense updates, eager and granted, added in place and stepped by a rule. */
SCENE(test_changing) {
  static change u;
  static uint8_t before[MODEL];
  uint32_t taken = 0;
  for (uint32_t round = 0; round < test_cases(200); round++) {
    mlfab__rng prng;
    setting s;
    mlfab__rng_seed(&prng, base_seed() + round);
    fixed_setting(&s, round % 3 == 0 ? MLFAB_OPTIMIZER_ADAM : MLFAB_OPTIMIZER_SGD);
    if (round % 4 == 1) s.define.options.consistency.kind = MLFAB_SYNC_PSSP_DYNAMIC;
    node *a = node_open(&s), *b = node_open(&s);
    sending *x = begin(a, 0), *y = begin(b, 0);
    x->dense = y->dense = round % 5 == 4;
    do {
      change_make(&a->layout, &prng, &u, 1);
      x->bytes = x->nends = 0;
      if (!x->dense) encode(&u, x);
    } while (!x->dense && x->bytes < 12000); /* three pages; the server reads the first one first */
    if (x->dense) memcpy(x->data, u.update.dense, x->bytes = a->layout.bytes);
    memcpy(y->data, x->data, y->bytes = x->bytes);
    uint32_t flags = x->dense ? 0 : MLFAB__PUSH_PACKED;
    uint32_t eager = round % 2 && x->bytes <= EAGER ? (uint32_t)x->bytes : 0;
    uint8_t *was = x->data;
    size_t head = mlfab__min(x->bytes / 4 / 8 * 8, 4096);
    memcpy(before, node_read(a), sizeof before);
    announce(b, y, &u, flags, eager);
    send_at_once(b, y);
    assert_int_equal(b->ack.code, 0);
    x->data = changing_make(was, x->bytes, head);
    change_some(&prng, head);
    changing_arm();
    announce(a, x, &u, flags, eager);
    send_at_once(a, x);
    assert_int_equal(changing_end(), 1);
    x->data = was;
    x->used = 0;
    if (a->s.drops == 0 && a->acks == 1 && a->ack.code == 0) {
      same_models(a, b);
      taken++;
    } else {
      assert_memory_equal(before, node_read(a), a->layout.bytes);
    }
    node_close(a);
    node_close(b);
  }
  assert_true(taken > 0); /* all of them where copies are read forwards */
}

/* A cache with a version that the server never had. */
SCENE(test_future) {
  setting s;
  fixed_setting(&s, MLFAB_OPTIMIZER_SGD);
  node *n = node_open(&s);
  mlfab__segment all = {0, n->layout.bytes};
  uint64_t sinces[4] = {1, 1, 2, 1};
  mlfab__pull p = {1, 0, n->epoch, 0, 1, 4};
  frame(n, 0, MLFAB__PULL, mlfab__encode_pull(n->s.meta, &p, &all, sinces), NULL, 0);
  assert_int_equal(n->fails, 1);
  assert_int_equal(n->fail.code, MLFAB_ERR_ARGUMENT);
  assert_string_equal(n->fail.text,
                      "a cache from the future: slice 2 is at commit 1, the cache at 2");
  p.request = 2;
  p.epoch++;
  frame(n, 0, MLFAB__PULL, mlfab__encode_pull(n->s.meta, &p, &all, sinces), NULL, 0);
  assert_int_equal(n->fails, 1);
  p.request = 3;
  p.sinces = 3;
  frame(n, 0, MLFAB__PULL, mlfab__encode_pull(n->s.meta, &p, &all, sinces), NULL, 0);
  assert_int_equal(n->s.drops, 1);
  assert_refused(n->s.said, "a PULL with another number of commits than of slices");
  node_close(n);
}
