/* test_sparse_apply_group.c - groups of packets: a server, real aggregators and workers of a few lines, over links with queues.
 *
 * Oracles: a dense group of the same values at another server; the count of applied updates. MLFAB_SEED=n runs one random case alone, MLFAB_SCALE=100 a hundred times as
 * many. */
#include "core/sched/aggregator.h"
#include "core/sched/client.h"
#include "core/sparse/sparse_apply.h"
#include "scale.h"
#include "tests/seam/updates.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { CHUNK = 2048 };

static uint64_t first_seed = 1, last_seed;

static void seeds(uint64_t n) {
  const char *one = getenv("MLFAB_SEED");
  first_seed = one ? strtoull(one, NULL, 10) : 1;
  last_seed = one ? first_seed : test_cases((double)n);
}

static void port_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void port_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void port_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

/* --- a server, aggregators and workers --- */

enum { PEERS = 5, PENDING = 3, INBOX = 1024 };

typedef struct message {
  uint8_t type;
  uint32_t bytes, bulk_bytes;
  uint8_t *meta, *bulk;
} message;

/* One direction of a link. */
typedef struct inbox {
  message items[INBOX];
  uint32_t begin, end;
} inbox;

typedef struct pending {
  uint64_t seq, group, sent, granted, base;
  uint32_t aggregator;
  int announced, packed, bad;
  double scale;
  shape shape;
  update update;
} pending;

struct world;

typedef struct peer {
  struct world *world;
  uint32_t rank, generation;
  int connected;
  int met[PEERS]; /* links of this node as an aggregator */
  uint64_t seq;
  pending pushes[PENDING];
  mlfab__aggregator aggregator;
  mlfab_stats stats;
} peer;

typedef struct world {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__server server;
  mlfab__layout layout;
  mlfab__rng prng;
  peer peers[PEERS];
  inbox from_server[PEERS], to_server[PEERS];
  inbox grants[PEERS][PEERS], chunks[PEERS][PEERS]; /* [aggregator][member] */
  mlfab__announce waiting[PEERS * PENDING];
  uint32_t nwaiting;
  int scheduler_up, calm;
  uint32_t cut_off;  /* a worker whose link breaks after a few more steps, plus one */
  const char *wrong; /* the text with which the server is expected to drop a peer */
  uint64_t now, heartbeat;
  shape all; /* the whole model */
  uint8_t *expected, *model;
  uint64_t applied, refused, packed_groups, dense_groups;
} world;

static uint64_t draw(world *w, uint64_t n) { return mlfab__rng_below(&w->prng, n); }

static void put(inbox *in, uint8_t type, const void *meta, uint32_t bytes, const void *bulk,
                uint32_t bulk_bytes) {
  message *m = &in->items[in->end++ % INBOX];
  assert_true(in->end - in->begin <= INBOX);
  *m = (message){type, bytes, bulk_bytes, malloc(bytes + 1), NULL};
  memcpy(m->meta, meta, bytes);
  if (bulk_bytes == 0) return;
  m->bulk = malloc(bulk_bytes);
  memcpy(m->bulk, bulk, bulk_bytes);
}

static void free_message(message *m) {
  free(m->meta);
  free(m->bulk);
}

static void clear(inbox *in) {
  while (in->begin < in->end) free_message(&in->items[in->begin++ % INBOX]);
}

static int take(inbox *in, message *m) {
  if (in->begin == in->end) return 0;
  *m = in->items[in->begin++ % INBOX];
  return 1;
}

static void server_post(void *self, uint32_t rank, uint8_t type, const void *meta, uint32_t bytes) {
  world *w = self;
  mlfab__announce a;
  if (rank < PEERS) {
    if (w->peers[rank].connected) put(&w->from_server[rank], type, meta, bytes, NULL, 0);
    return;
  }
  if (type != MLFAB__ANNOUNCE || !w->scheduler_up) return;
  assert_int_equal(mlfab__decode_announce(meta, bytes, &a), 0);
  for (uint32_t i = 0; i < w->nwaiting; i++) {
    if (w->waiting[i].worker == a.worker && w->waiting[i].id == a.id)
      w->waiting[i] = w->waiting[--w->nwaiting];
  }
  w->waiting[w->nwaiting++] = a;
}
static void server_drop(void *self, uint32_t rank, int code, const char *text) {
  world *w = self;
  int expected = w->wrong && strstr(text, w->wrong) && code == MLFAB_ERR_FRAME;
  w->wrong = NULL;
  if (!expected) fail_msg("the server drops %u: %d %s", rank, code, text);
}
static void aggregator_up(void *self, uint32_t server, uint8_t type, const void *meta,
                          uint32_t bytes) {
  peer *p = self;
  (void)server;
  if (p->connected) put(&p->world->to_server[p->rank], type, meta, bytes, NULL, 0);
}
static void aggregator_down(void *self, uint32_t member, uint8_t type, const void *meta,
                            uint32_t bytes) {
  peer *p = self;
  if (p->met[member]) put(&p->world->grants[p->rank][member], type, meta, bytes, NULL, 0);
}
static void aggregator_drop(void *self, uint32_t rank, int code, const char *text) {
  fail_msg("aggregator %u drops %u: %d %s", ((peer *)self)->rank, rank, code, text);
}

/* --- a worker --- */

/* Adds the update to the expected model. */
static void worker_applied(world *w, const pending *q) {
  uint64_t from = 0;
  w->applied++;
  for (uint32_t k = 0; k < q->shape.n; k++) {
    shape one = {{q->shape.segments[k]}, 1, q->shape.segments[k].bytes};
    literal_add(&w->layout, &one, w->expected + one.segments[0].offset, q->update.dense + from,
                q->scale, 0);
    from += one.bytes;
  }
}

static void worker_resync(world *w, peer *p, uint32_t generation, uint64_t top,
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
    if (back < 256 && (applied[back / 64] >> (back % 64) & 1)) {
      worker_applied(w, q);
    }
    free_update(&q->update);
    q->seq = 0;
  }
}

static void worker_greet(world *w, peer *p) {
  mlfab__hello hello = {p->rank, 1, MLFAB_ROLE_WORKER, 0, 2, p->rank + 1, 0, 0};
  mlfab__hello_ack ack;
  p->connected = 1;
  assert_int_equal(mlfab__server_hello(&w->server, p->rank, &hello, &ack, w->now), 0);
  worker_resync(w, p, ack.generation, ack.top, ack.applied);
}

static void worker_cut_off(world *w, peer *p) {
  if (!p->connected) return;
  p->connected = 0;
  clear(&w->from_server[p->rank]);
  clear(&w->to_server[p->rank]);
  mlfab__aggregator_server_lost(&p->aggregator, 0);
  mlfab__server_lost(&w->server, p->rank, w->now);
}

static pending *worker_find(peer *p, uint64_t seq) {
  for (int i = 0; i < PENDING; i++) {
    if (p->pushes[i].seq == seq && seq) return &p->pushes[i];
  }
  return NULL;
}

static void worker_announce(world *w, peer *p) {
  uint8_t meta[512];
  mlfab__push push;
  pending *q = NULL;
  for (int i = 0; i < PENDING; i++) {
    pending *other = &p->pushes[i];
    if (other->seq && !other->announced && (!q || other->seq < q->seq)) q = other;
  }
  if (!q || !p->connected) return;
  memset(&push, 0, sizeof push);
  push.seq = q->seq;
  push.members = push.versions = push.parts = 1;
  push.segments = q->shape.n;
  push.generation = p->generation;
  push.progress = q->seq - 1;
  push.flags = MLFAB__PUSH_PLANNED | (q->packed ? MLFAB__PUSH_PACKED : 0u);
  push.bytes = q->packed ? q->update.bytes : q->shape.bytes;
  push.scale = q->scale;
  q->announced = 1;
  uint32_t bytes = mlfab__encode_push(meta, &push, q->shape.segments, &q->base);
  put(&w->to_server[p->rank], MLFAB__PUSH, meta, bytes, NULL, 0);
}

static void worker_push(world *w, peer *p, const shape *s, int packed, int whole, double scale) {
  pending *q = p->pushes;
  while (q < p->pushes + PENDING && q->seq) q++;
  if (q == p->pushes + PENDING) return;
  memset(q, 0, sizeof *q);
  q->seq = ++p->seq;
  q->aggregator = MLFAB__NO_NODE;
  q->shape = *s;
  q->packed = packed;
  q->scale = scale;
  q->base = w->server.store.slices[0].version;
  random_update(&w->prng, &w->layout, s, 1, whole, draw(w, 2) ? 99 : 20, &q->update);
  worker_announce(w, p);
}

/* The number of granted bytes of an update that fit into one frame. */
static uint32_t worker_piece(const pending *q) {
  if (!q->packed) {
    uint64_t upto = mlfab__min(q->granted, q->shape.bytes);
    return upto > q->sent ? (uint32_t)mlfab__min(upto - q->sent, CHUNK) : 0;
  }
  uint32_t n = 0;
  while (q->sent + n < q->update.bytes) {
    uint32_t bytes = packet_bytes(&q->update, q->sent + n);
    if ((n > 0 && n + bytes > CHUNK) || q->sent + n + bytes > q->granted) break;
    n += bytes;
  }
  return n;
}

static void worker_send(world *w, peer *p) {
  uint8_t meta[64];
  for (int i = 0; i < PENDING; i++) {
    pending *q = &p->pushes[i];
    if (!q->seq || !q->announced) continue;
    uint32_t n = worker_piece(q);
    const uint8_t *from = (q->packed ? q->update.packets : q->update.dense) + q->sent;
    if (n == 0) continue;
    if (q->aggregator == MLFAB__NO_NODE) {
      mlfab__chunk chunk = {q->seq, q->sent, p->generation};
      if (!p->connected) continue;
      put(&w->to_server[p->rank], MLFAB__CHUNK, meta, mlfab__encode_chunk(meta, &chunk), from, n);
    } else {
      uint64_t total = q->packed ? q->update.bytes : q->shape.bytes;
      mlfab__hop_chunk chunk = {q->group, q->seq, q->sent, total, 0};
      if (!w->peers[q->aggregator].met[p->rank]) continue;
      put(&w->chunks[q->aggregator][p->rank], MLFAB__HOP_CHUNK, meta,
          mlfab__encode_hop_chunk(meta, &chunk), from, n);
    }
    q->sent += n;
    return;
  }
}

static void worker_granted(peer *p, uint32_t aggregator, const message *m) {
  mlfab__hop_grant grant;
  assert_int_equal(mlfab__decode_hop_grant(m->meta, m->bytes, &grant), 0);
  pending *q = worker_find(p, grant.seq);
  if (!q || !p->connected || !q->announced || grant.group < q->group) return;
  if (grant.group > q->group) { /* arrived before the server's VIA */
    q->group = grant.group;
    q->aggregator = aggregator;
    q->sent = q->granted = 0;
  }
  if (q->aggregator == aggregator) q->granted = mlfab__max(q->granted, grant.upto);
}

static void worker_frame(world *w, peer *p, const message *m) {
  mlfab__grant grant;
  mlfab__via via;
  mlfab__push_ack ack;
  mlfab__resend resend;
  pending *q;
  switch (m->type) {
    case MLFAB__GRANT:
      assert_int_equal(mlfab__decode_grant(m->meta, m->bytes, &grant), 0);
      q = worker_find(p, grant.seq);
      if (q && grant.generation == p->generation && q->aggregator == MLFAB__NO_NODE)
        q->granted = grant.upto;
      break;
    case MLFAB__VIA:
      assert_int_equal(mlfab__decode_via(m->meta, m->bytes, &via), 0);
      q = worker_find(p, via.seq);
      if (!q || via.generation != p->generation) break;
      if (via.group <= q->group) break; /* a grant arrived before it */
      q->group = via.group;
      q->aggregator = via.aggregator;
      q->sent = q->granted = 0;
      break;
    case MLFAB__PUSH_ACK:
      assert_int_equal(mlfab__decode_push_ack(m->meta, m->bytes, &ack), 0);
      q = worker_find(p, ack.seq);
      if (!q) break;
      if (ack.code == 0) {
        assert_false(q->bad);
        worker_applied(w, q);
      } else {
        assert_true(ack.code == MLFAB_ERR_NOT_FINITE ? q->bad : ack.code == MLFAB_ERR_WITHDRAWN);
        w->refused++;
      }
      free_update(&q->update);
      q->seq = 0;
      break;
    case MLFAB__RESEND:
      assert_int_equal(mlfab__decode_resend(m->meta, m->bytes, &resend), 0);
      worker_resync(w, p, resend.generation, resend.top, resend.applied);
      break;
    default:
      break;
  }
}

/* --- frames on links --- */

static void note_group(world *w, const message *m) {
  static mlfab__group_member members[MLFAB__GROUP_MEMBERS_MAX];
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  mlfab__group g;
  assert_int_equal(mlfab__decode_group(m->meta, m->bytes, &g, members, segments), 0);
  for (uint32_t k = 0; k < g.members; k++) {
    const pending *q = worker_find(&w->peers[members[k].worker], members[k].seq);
    if (q) assert_int_equal(q->packed, g.packed);
  }
  *(g.packed ? &w->packed_groups : &w->dense_groups) += 1;
}

static void deliver_from_server(world *w, peer *p) {
  message m;
  if (!take(&w->from_server[p->rank], &m)) return;
  mlfab__frame_in in = {m.type, m.bytes, 0, m.meta, NULL};
  if (m.type == MLFAB__GROUP) note_group(w, &m);
  if (!mlfab__aggregator_server_frame(&p->aggregator, 0, &in, w->now)) worker_frame(w, p, &m);
  free_message(&m);
}

static void deliver_to_server(world *w, peer *p) {
  message m;
  if (!take(&w->to_server[p->rank], &m)) return;
  mlfab__frame_in in = {m.type, m.bytes, m.bulk_bytes, m.meta, m.bulk};
  mlfab__server_frame(&w->server, p->rank, &in, w->now);
  free_message(&m);
}

static void deliver_hop(world *w, uint32_t a, uint32_t b) {
  message m;
  if (take(&w->grants[a][b], &m)) {
    worker_granted(&w->peers[b], a, &m);
    free_message(&m);
  }
  if (take(&w->chunks[a][b], &m)) {
    mlfab__frame_in in = {m.type, m.bytes, m.bulk_bytes, m.meta, m.bulk};
    mlfab__aggregator_member_frame(&w->peers[a].aggregator, b, &in, w->now);
    free_message(&m);
  }
}

static void forward_some(world *w, peer *p) {
  uint8_t meta[64];
  mlfab__frame_out out;
  memset(&out, 0, sizeof out);
  out.meta = meta;
  if (!p->connected || !mlfab__aggregator_next_up(&p->aggregator, 0, &out)) return;
  put(&w->to_server[p->rank], out.type, meta, out.meta_bytes, out.bulk, out.bulk_bytes);
  mlfab__aggregator_taken_up(&p->aggregator, 0, &out);
  if (out.token) mlfab__aggregator_sent(&p->aggregator, out.token);
  /* Most faults occur earlier; this one occurs when part of a sum is at the server. */
  if (!w->calm && draw(w, 40) == 0) w->cut_off = p->rank + 1;
}

static void hop_lost(world *w, uint32_t a, uint32_t b) {
  if (!w->peers[a].met[b]) return;
  w->peers[a].met[b] = 0;
  clear(&w->grants[a][b]);
  clear(&w->chunks[a][b]);
  mlfab__aggregator_lost(&w->peers[a].aggregator, b, w->now);
}

static void hop_met(world *w, uint32_t a, uint32_t b) {
  if (w->peers[a].met[b]) return;
  w->peers[a].met[b] = 1;
  mlfab__aggregator_met(&w->peers[a].aggregator, b, 1, w->now);
}

/* --- a scheduler --- */

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
  static uint8_t meta[MLFAB_META_MAX];
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
    entries[n].id = a.id;
    entries[n].worker = a.worker;
    entries[n].group = run;
    entries[n].aggregator = aggregator;
    entries[n].rate = 1e9;
    last = a.shape;
    n++;
  }
  mlfab__plan frame = {1, 1e9, 1e9, n};
  mlfab__frame_in in = {MLFAB__PLAN, mlfab__encode_plan(meta, &frame, entries), 0, meta, NULL};
  if (n > 0) mlfab__server_scheduler_frame(&w->server, &in, w->now);
}

static void scheduler_turn(world *w) {
  w->scheduler_up = !w->scheduler_up;
  w->nwaiting = 0;
  if (w->scheduler_up) {
    mlfab__server_scheduler_hello(&w->server, w->now);
  } else {
    mlfab__server_scheduler_lost(&w->server, w->now);
  }
}

/* --- everything together --- */

static const mlfab__tensor_info fabric[] = {
    {0, MLFAB_F64, 600}, {1, MLFAB_F32, 1500}, {2, MLFAB_I64, 333}, {3, MLFAB_F32, 900}};
static const mlfab__tensor_info floats[] = {{0, MLFAB_F64, 600}, {1, MLFAB_F32, 2500}};

static void open_peer(world *w, uint32_t rank) {
  peer *p = &w->peers[rank];
  p->world = w;
  p->rank = rank;
  mlfab__port up = {p, aggregator_up, port_ready, aggregator_drop, port_detach, port_event};
  mlfab__port down = {p, aggregator_down, port_ready, aggregator_drop, port_detach, port_event};
  assert_int_equal(
      mlfab__aggregator_init(&p->aggregator, &w->env, &w->config, &up, &down, &p->stats), 0);
  mlfab__aggregator_model(&p->aggregator, &w->layout, 0);
  worker_greet(w, p);
}

static world *open_world(uint64_t seed, const mlfab__tensor_info *tensors, uint32_t n,
                         uint32_t rule, uint32_t sync) {
  uint8_t meta[512], table[8 * MLFAB__TENSOR_INFO_BYTES];
  world *w = calloc(1, sizeof *w);
  mlfab__define define;
  assert_non_null(w);
  mlfab__rng_seed(&w->prng, seed);
  w->now = 1000;
  assert_int_equal(mlfab__env_init(&w->env, NULL), 0);
  mlfab_config_init(&w->config);
  w->config.workers = PEERS;
  w->config.servers = 1;
  w->config.block_bytes = 1024;
  w->config.chunk_bytes = CHUNK;
  w->config.eager_bytes = CHUNK;
  w->config.heartbeat_ns = w->heartbeat = 500000000;
  w->config.model_max_bytes = 1 << 30;
  w->config.scheduler = MLFAB_SCHEDULER_BESIDE;
  w->config.schedule.delay_bound = MLFAB_UNBOUNDED;
  mlfab__port port = {w, server_post, port_ready, server_drop, port_detach, port_event};
  assert_int_equal(mlfab__server_init(&w->server, &w->env, &w->config, 0, &port, &w->stats), 0);
  assert_int_equal(mlfab__client_init(&w->server), 0);
  mlfab__sparse_attach(&w->server);
  assert_int_equal(mlfab__layout_build(&w->env, tensors, n, 16, 1, 0, 1 << 28, &w->layout, NULL),
                   0);
  for (uint32_t i = 0; i < PEERS; i++) open_peer(w, i);
  for (uint32_t i = 0; i < PEERS * PEERS; i++) hop_met(w, i / PEERS, i % PEERS);
  memset(&define, 0, sizeof define);
  define.tensors = n;
  define.options.optimizer = rule;
  define.options.gamma = 0.9, define.options.adadelay_c = 1.0, define.options.beta1 = 0.9,
  define.options.beta2 = 0.999, define.options.epsilon = 1e-8;
  define.options.slices = 16;
  define.options.gamma = 0.5;
  define.options.consistency.kind = sync;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__encode_tensor_info(table + i * MLFAB__TENSOR_INFO_BYTES, &tensors[i]);
  }
  mlfab__frame_in in = {MLFAB__DEFINE, mlfab__encode_define(meta, &define),
                        n * MLFAB__TENSOR_INFO_BYTES, meta, table};
  mlfab__server_frame(&w->server, 0, &in, w->now);
  assert_int_equal(w->server.phase, MLFAB__MODEL_STANDS);
  for (uint32_t i = 0; i < PEERS; i++) clear(&w->from_server[i]);
  for (uint32_t i = 0; i < PEERS; i++) worker_greet(w, &w->peers[i]); /* renews the credit */
  w->all = (shape){{{0, w->layout.bytes}}, 1, w->layout.bytes};
  w->expected = calloc(1, w->layout.bytes);
  w->model = calloc(1, w->layout.bytes);
  scheduler_turn(w);
  return w;
}

static void close_world(world *w) {
  for (uint32_t i = 0; i < PEERS; i++) {
    clear(&w->from_server[i]);
    clear(&w->to_server[i]);
    for (uint32_t k = 0; k < PEERS; k++) {
      clear(&w->grants[i][k]);
      clear(&w->chunks[i][k]);
    }
    for (int k = 0; k < PENDING; k++) free_update(&w->peers[i].pushes[k].update);
    mlfab__aggregator_free(&w->peers[i].aggregator);
  }
  mlfab__server_free(&w->server);
  mlfab__layout_free(&w->env, &w->layout);
  assert_int_equal(w->env.bytes, 0);
  free(w->expected);
  free(w->model);
  free(w);
}

static const uint8_t *read_model(world *w) {
  const mlfab__store *store = &w->server.store;
  for (uint64_t at = 0; at < w->layout.bytes;) {
    mlfab__piece piece;
    mlfab__store_piece(store, at, w->layout.bytes - at, &piece);
    memcpy(w->model + at, store->blocks[store->w[piece.position]].data + piece.at, piece.bytes);
    at += piece.bytes;
  }
  return w->model;
}

/* Puts a NaN into the packets of an update, unless its length has been announced. */
static void spoil_push(world *w, pending *q) {
  if (q->packed) q->bad = spoil(&w->prng, &w->layout, &q->shape, &q->update);
}

/* A dozen shapes, so that pushes sometimes have equal ones. */
static void push_random(world *w, peer *p) {
  mlfab__rng shapes;
  shape s;
  mlfab__rng_seed(&shapes, 1 + draw(w, 2));
  random_segments(&shapes, &w->layout, 0, &s);
  uint64_t before = p->seq;
  worker_push(w, p, &s, draw(w, 4) > 0, 1, (double)draw(w, 5) - 2.0);
  if (p->seq > before && draw(w, 40) == 0) spoil_push(w, worker_find(p, p->seq));
}

static void world_trouble(world *w) {
  uint32_t a = (uint32_t)draw(w, PEERS), b = (uint32_t)draw(w, PEERS);
  if (w->cut_off && draw(w, 60) == 0) {
    worker_cut_off(w, &w->peers[w->cut_off - 1]);
    w->cut_off = 0;
  }
  switch (draw(w, 9000)) {
    case 0:
    case 1:
      worker_cut_off(w, &w->peers[a]);
      break;
    case 2:
    case 3:
      hop_lost(w, a, b);
      break;
    case 4:
      scheduler_turn(w);
      break;
    case 5:
      w->now += (1 + draw(w, 6)) * w->heartbeat;
      break;
    default:
      break;
  }
}

static void world_step(world *w, int quiet) {
  peer *p = &w->peers[draw(w, PEERS)];
  uint32_t other = (uint32_t)draw(w, PEERS);
  w->now += draw(w, 1000);
  switch (draw(w, 10)) {
    case 0:
      if (!quiet && draw(w, 2) == 0) push_random(w, p);
      worker_announce(w, p);
      break;
    case 1:
    case 2:
      for (uint64_t n = 1 + draw(w, 6); n > 0; n--) deliver_from_server(w, p);
      break;
    case 3:
    case 4:
      for (uint64_t n = 1 + draw(w, 6); n > 0; n--) deliver_to_server(w, p);
      break;
    case 5:
      worker_send(w, p);
      break;
    case 6:
      for (uint64_t n = 1 + draw(w, 6); n > 0; n--) deliver_hop(w, p->rank, other);
      break;
    case 7:
      forward_some(w, p);
      break;
    case 8:
      if (w->scheduler_up && draw(w, w->nwaiting > 3 ? 8 : 60) == 0) plan(w, 0);
      if (!p->connected) worker_greet(w, p);
      if (draw(w, 4) == 0) hop_met(w, p->rank, other);
      break;
    default:
      mlfab__aggregator_tick(&p->aggregator, w->now);
      mlfab__server_tick(&w->server, w->now);
      break;
  }
  if (!quiet) world_trouble(w);
}

static int world_busy(const world *w) {
  for (uint32_t i = 0; i < PEERS * PENDING; i++) {
    if (w->peers[i / PENDING].pushes[i % PENDING].seq) return 1;
  }
  return 0;
}

/* Every update is applied once or refused, whatever dies, falls silent or is rerouted at any point. Values
 * are small integers, so that the order of additions does not matter. Packed and dense updates are mixed. */
static void test_fabric(void **state) {
  uint64_t groups = 0, applied = 0, failed = 0;
  (void)state;
  seeds(40);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    world *w =
        open_world(seed, fabric, MLFAB__COUNT(fabric), MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
    for (int i = 0; i < 30000; i++) world_step(w, 0);
    if (!w->scheduler_up) scheduler_turn(w);
    for (int i = 0; world_busy(w); i++) {
      world_step(w, 1);
      if (i % 2000 == 1999) w->now += 6 * w->heartbeat;
      if (i == 400000) fail_msg("seed %u: something waits for ever", (unsigned)seed);
    }
    if (!same_values(&w->layout, &w->all, read_model(w), w->expected))
      fail_msg("seed %u: not what was applied", (unsigned)seed);
    assert_int_equal(w->stats.updates_applied, w->applied);
    groups += w->packed_groups;
    applied += w->stats.groups_applied;
    failed += w->stats.groups_failed;
    if (getenv("SHOW"))
      fprintf(
          stderr,
          "seed %u: %u packed, %u dense groups, %u applied, %u failed; %u updates, %u refused\n",
          (unsigned)seed, (unsigned)w->packed_groups, (unsigned)w->dense_groups,
          (unsigned)w->stats.groups_applied, (unsigned)w->stats.groups_failed, (unsigned)w->applied,
          (unsigned)w->refused);
    close_world(w);
  }
  if (last_seed - first_seed >= 39) assert_true(groups > 300 && applied > 200 && failed > 100);
}

/* Delivers everything that can be delivered, in turn. */
static void settle(world *w) {
  for (int i = 0; i < 3000 && world_busy(w); i++) {
    for (uint32_t k = 0; k < PEERS; k++) {
      peer *p = &w->peers[k];
      deliver_from_server(w, p);
      deliver_to_server(w, p);
      worker_send(w, p);
      forward_some(w, p);
      mlfab__aggregator_tick(&p->aggregator, w->now);
      for (uint32_t b = 0; b < PEERS; b++) deliver_hop(w, k, b);
    }
    w->now += 1000000;
    mlfab__server_tick(&w->server, w->now);
    if (w->nwaiting == PEERS) plan(w, 1);
  }
}

/* A packed group changes the model as a dense group of the same values does, with random scales, at rules
 * with steps and in rounds. */
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
      w[packed] =
          open_world(seed, floats, MLFAB__COUNT(floats), rules[seed % 4][0], rules[seed % 4][1]);
      w[packed]->calm = 1;
      for (int round = 0; round < 3; round++) {
        shape s;
        random_segments(&w[packed]->prng, &w[packed]->layout, 0, &s);
        for (uint32_t k = 0; k < PEERS; k++)
          worker_push(w[packed], &w[packed]->peers[k], &s, packed, 0,
                      mlfab__rng_unit(&w[packed]->prng) - 0.3);
        settle(w[packed]);
        assert_false(world_busy(w[packed]));
      }
      assert_int_equal(w[packed]->stats.groups_applied, 3);
      assert_int_equal(packed ? w[1]->packed_groups : w[0]->dense_groups, 3);
      assert_int_equal(w[packed]->stats.groups_failed, 0);
    }
    if (!same_values(&w[0]->layout, &w[0]->all, read_model(w[0]), read_model(w[1])))
      fail_msg("seed %u: packed is not as dense", (unsigned)seed);
    close_world(w[0]);
    close_world(w[1]);
  }
}

static void say_sum(world *w, uint64_t number, uint64_t offset, uint64_t total, const void *packets,
                    uint32_t bytes, const char *wrong) {
  uint8_t meta[64];
  mlfab__forward forward = {number, offset, total};
  mlfab__frame_in in = {MLFAB__FORWARD, 0, bytes, meta, packets};
  in.meta_bytes = mlfab__encode_forward(meta, &forward);
  w->wrong = wrong;
  mlfab__server_frame(&w->server, 0, &in, w->now);
  assert_null(w->wrong);
}

/* Wrong FORWARD frames of an aggregator, and the amount that it may send: all of the head, a stage's worth
 * of the next one. */
static void test_bad_sums(void **state) {
  (void)state;
  world *w = open_world(3, floats, MLFAB__COUNT(floats), MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
  for (int i = 0; i < 2; i++) {
    worker_push(w, &w->peers[1], &w->all, 1, 0, 1.0);
    worker_push(w, &w->peers[2], &w->all, 1, 0, 1.0);
    while (w->to_server[1].begin < w->to_server[1].end) deliver_to_server(w, &w->peers[1]);
    while (w->to_server[2].begin < w->to_server[2].end) deliver_to_server(w, &w->peers[2]);
    plan(w, 1);
  }
  const mlfab__incoming *head = w->server.apply.head, *next = head;
  while (next && next->group == head->group) next = next->next;
  assert_true(head && next && next->group);
  uint64_t own = head->push.bytes, raw = w->all.bytes, number = head->group;
  assert_int_equal(mlfab__report_backlog(&w->server), own + next->push.bytes);
  assert_int_equal(head->all_released, 1);
  assert_int_equal(next->granted, 0);
  mlfab__meter_begin(&w->server.apply.meter, w->now);
  w->now += w->server.apply.meter.window_ns;
  mlfab__server_tick(&w->server, w->now);
  assert_int_equal(next->granted, w->server.apply.stage_bytes);
  const update *u = &w->peers[1].pushes[0].update;
  uint32_t n = packet_bytes(u, 0);
  say_sum(w, number, 0, 0, u->packets, n, "whose length is not known");
  say_sum(w, number, 0, 8 * raw + 8, u->packets, n, "longer than its elements need");
  say_sum(w, number, 0, 0, NULL, 0, NULL); /* a progress report */
  assert_int_equal(head->push.bytes, own);
  say_sum(w, number, 0, n - 8, u->packets, n, "out of place or not granted");
  assert_int_equal(head->push.bytes, n - 8);
  say_sum(w, number, 0, u->bytes, u->packets, n, "whose length changes");
  say_sum(w, number, 0, 0, NULL, 0, "whose length changes");
  assert_int_equal(head->push.bytes, n - 8);
  /* The group ends: the members' own lengths count again. */
  worker_cut_off(w, &w->peers[0]);
  assert_int_equal(w->stats.groups_failed, 2);
  for (const mlfab__incoming *i = w->server.queue.first; i; i = i->next) {
    const pending *q = worker_find(&w->peers[i->worker], i->push.seq);
    assert_int_equal(i->push.bytes, q->update.bytes);
    assert_int_equal(i->all_released, 0);
  }
  close_world(w);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_as_dense),
      cmocka_unit_test(test_bad_sums),
      cmocka_unit_test(test_fabric),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
