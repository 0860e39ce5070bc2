/* test_worker.c - the worker role alone, in a fabric with a scheduler: the routes of updates and models,
 * who holds which bytes, and when the caller gets its buffers back. */
#include "core/sparse/sparse_push.h"

#include "core/reshard/reshard.h"
#include "core/sched/aggregator.h"
#include "core/base/rng.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

/* Two servers with a shard of 64 KiB each. Tensor 0 is the first shard; 1, of 2 KiB, and 2 are the second. A
 * shard is five chunks that are lent to the transport and one of 4 KiB, which is copied. */
enum {
  RANK = 1,
  WORKERS = 5,
  SERVERS = 2,
  SHARD = 65536,
  BYTES = SHARD * SERVERS,
  CHUNK = 12288,
  LENT = 5,
  EAGER = 8192,
  LOANS = 4096
};

/* A bulk that a transport has or had. */
typedef struct loan {
  enum { LOAN_FREE, LOAN_LIVE, LOAN_DETACHED } state;
  int hop;
  uint32_t peer;
  uint64_t token;
  const uint8_t *data;
  uint32_t bytes;
} loan;

typedef struct side { /* calls for one kind of link */
  uint32_t posts, drops, detached;
  uint32_t ready[WORKERS];
  uint32_t post_peer, drop_peer;
  uint8_t post_type, post_meta[256];
  uint32_t post_bytes;
  char dropped[128];
} side;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__requests requests;
  mlfab__worker worker;
  side server, hop;
  loan loans[LOANS];
  uint32_t nloans; /* no slot is in use from here on */
  uint64_t now;
  uint8_t meta[MLFAB_META_MAX]; /* of the frame taken last */
  mlfab__frame_out out;
  /* For the random tests. */
  void (*posted)(struct fixture *f, uint32_t server, uint8_t type, const void *meta,
                 uint32_t bytes);
} fixture;

/* --- ports --- */

static void record_post(side *s, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  s->posts++;
  s->post_peer = peer;
  s->post_type = type;
  s->post_bytes = bytes < sizeof s->post_meta ? bytes : (uint32_t)sizeof s->post_meta;
  memcpy(s->post_meta, meta, s->post_bytes);
}

static void record_drop(side *s, uint32_t peer, int code, const char *text) {
  assert_int_equal(code, MLFAB_ERR_FRAME);
  s->drops++;
  s->drop_peer = peer;
  snprintf(s->dropped, sizeof s->dropped, "%s", text);
}

static void record_detach(fixture *f, int hop, uint32_t peer, uint64_t token) {
  uint32_t found = 0;
  for (uint32_t i = 0; i < f->nloans; i++) {
    loan *l = &f->loans[i];
    if (l->state != LOAN_LIVE || l->hop != hop || l->peer != peer || l->token != token) continue;
    l->state = LOAN_DETACHED;
    found++;
  }
  assert_true(found > 0); /* nothing unknown is taken back */
  (hop ? &f->hop : &f->server)->detached += found;
}

static void server_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  fixture *f = self;
  record_post(&f->server, peer, type, meta, bytes);
  if (f->posted) f->posted(f, peer, type, meta, bytes);
}
static void server_ready(void *self, uint32_t peer) { ((fixture *)self)->server.ready[peer]++; }
static void server_drop(void *self, uint32_t peer, int code, const char *text) {
  record_drop(&((fixture *)self)->server, peer, code, text);
}
static void server_detach(void *self, uint32_t peer, uint64_t token) {
  record_detach(self, 0, peer, token);
}
static void hop_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  record_post(&((fixture *)self)->hop, peer, type, meta, bytes);
}
static void hop_ready(void *self, uint32_t peer) {
  assert_true(peer < WORKERS);
  ((fixture *)self)->hop.ready[peer]++;
}
static void hop_drop(void *self, uint32_t peer, int code, const char *text) {
  record_drop(&((fixture *)self)->hop, peer, code, text);
}
static void hop_detach(void *self, uint32_t peer, uint64_t token) {
  record_detach(self, 1, peer, token);
}
static void no_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                     int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

/* --- frames in and out --- */

static void from_server(fixture *f, uint32_t server, uint8_t type, const uint8_t *meta,
                        uint32_t bytes, const void *bulk, uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, meta, bulk};
  mlfab__worker_frame(&f->worker, server, &in, f->now);
}

static void from_hop(fixture *f, uint32_t aggregator, uint8_t type, const uint8_t *meta,
                     uint32_t bytes, const void *bulk, uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, meta, bulk};
  mlfab__worker_hop_frame(&f->worker, aggregator, &in, f->now);
}

/* A transport takes the next frame: 1, or 0 when there is none. Its bulk is lent when it has a token. */
static int take(fixture *f, int hop, uint32_t peer) {
  memset(&f->out, 0, sizeof f->out);
  f->out.meta = f->meta;
  if (!(hop ? mlfab__worker_hop_next : mlfab__worker_next)(&f->worker, peer, &f->out)) return 0;
  (hop ? mlfab__worker_hop_taken : mlfab__worker_taken)(&f->worker, peer, &f->out);
  if (f->out.token == 0) return 1;
  assert_true(f->out.token >> 60 == 0); /* the node's bits */
  uint32_t i = 0;
  while (f->loans[i].state != LOAN_FREE) assert_true(++i < LOANS);
  if (i >= f->nloans) f->nloans = i + 1;
  f->loans[i] = (loan){LOAN_LIVE, hop, peer, f->out.token, f->out.bulk, f->out.bulk_bytes};
  return 1;
}

/* Takes all there is; returns how many. */
static uint32_t take_all(fixture *f, int hop, uint32_t peer) {
  uint32_t n = 0;
  while (take(f, hop, peer)) n++;
  return n;
}

static uint32_t live(const fixture *f, int hop, uint32_t peer) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < f->nloans; i++) {
    n += f->loans[i].state == LOAN_LIVE && f->loans[i].hop == hop && f->loans[i].peer == peer;
  }
  return n;
}

/* A transport returns a bulk. The worker may have forgotten it. */
static void report(fixture *f, loan *l) {
  loan back = *l;
  l->state = LOAN_FREE;
  if (back.hop) {
    mlfab__worker_hop_sent(&f->worker, back.peer, back.token, f->now);
  } else {
    mlfab__worker_sent(&f->worker, back.peer, back.token, f->now);
  }
}

/* Returns the bulks of a state that were sent over this link; returns how many. */
static uint32_t report_all(fixture *f, int state, int hop, uint32_t peer) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < f->nloans; i++) {
    loan *l = &f->loans[i];
    if ((int)l->state != state || l->hop != hop || l->peer != peer) continue;
    report(f, l);
    n++;
  }
  return n;
}

/* A link breaks: its bulks are free, and are never reported. */
static void forget_loans(fixture *f, int hop, uint32_t peer) {
  for (uint32_t i = 0; i < f->nloans; i++) {
    if (f->loans[i].hop == hop && f->loans[i].peer == peer) f->loans[i].state = LOAN_FREE;
  }
}

static void lose_hop(fixture *f, uint32_t aggregator) {
  forget_loans(f, 1, aggregator);
  mlfab__worker_hop_lost(&f->worker, aggregator, f->now);
}

static void lose_server(fixture *f, uint32_t server) {
  forget_loans(f, 0, server);
  mlfab__worker_lost(&f->worker, server, f->now);
}

static void via(fixture *f, uint32_t server, uint64_t seq, uint64_t group, uint32_t aggregator) {
  mlfab__via m = {seq, group, f->worker.streams[server].generation, aggregator};
  uint8_t meta[64];
  from_server(f, server, MLFAB__VIA, meta, mlfab__encode_via(meta, &m), NULL, 0);
}

static void grant(fixture *f, uint32_t server, uint64_t seq, uint64_t upto) {
  mlfab__grant m = {seq, upto, f->worker.streams[server].generation};
  uint8_t meta[64];
  from_server(f, server, MLFAB__GRANT, meta, mlfab__encode_grant(meta, &m), NULL, 0);
}

static void hop_grant(fixture *f, uint32_t aggregator, uint32_t server, uint64_t seq,
                      uint64_t group, uint64_t upto) {
  mlfab__hop_grant m = {group, seq, upto, server};
  uint8_t meta[64];
  from_hop(f, aggregator, MLFAB__HOP_GRANT, meta, mlfab__encode_hop_grant(meta, &m), NULL, 0);
}

static void ack(fixture *f, uint32_t server, uint64_t seq, int code, uint64_t version,
                uint64_t delay) {
  mlfab__push_ack m = {seq, 1, f->worker.streams[server].generation, code, version, delay, 0};
  uint8_t meta[128];
  from_server(f, server, MLFAB__PUSH_ACK, meta, mlfab__encode_push_ack(meta, &m), NULL, 0);
}

/* With the iteration from which the server continues to count. */
static void ack_reached(fixture *f, uint32_t server, uint64_t seq, int code, uint64_t v_train) {
  mlfab__push_ack m = {seq, 1, f->worker.streams[server].generation, code, 0, 0, v_train};
  uint8_t meta[128];
  from_server(f, server, MLFAB__PUSH_ACK, meta, mlfab__encode_push_ack(meta, &m), NULL, 0);
}

static void pull_via(fixture *f, uint32_t server, uint64_t request, uint32_t attempt,
                     uint32_t aggregator) {
  mlfab__pull_via m = {request, attempt, aggregator};
  uint8_t meta[64];
  from_server(f, server, MLFAB__PULL_VIA, meta, mlfab__encode_pull_via(meta, &m), NULL, 0);
}

/* Bytes `from` to `to` of the flat model, all of one slice of 4 KiB, as `fill`. */
static void model(fixture *f, uint32_t server, uint64_t request, uint64_t at, uint32_t bytes,
                  uint8_t fill, uint32_t flags) {
  static uint8_t bulk[4096];
  uint8_t meta[128];
  mlfab__model m = {request, at, bytes, fill, fill, (uint32_t)(at / 4096), flags, 1};
  memset(bulk, fill, bytes);
  from_server(f, server, MLFAB__MODEL, meta, mlfab__encode_model(meta, &m), bulk, bytes);
}

static void hop_model(fixture *f, uint32_t aggregator, uint32_t server, uint32_t attempt,
                      uint64_t request, uint64_t at, uint32_t bytes, uint8_t fill, uint32_t flags) {
  static uint8_t bulk[4096];
  uint8_t meta[128];
  mlfab__hop_model m = {request, at, bytes,  fill,   fill, (uint32_t)(at / 4096),
                        flags,   1,  server, attempt};
  memset(bulk, fill, bytes);
  from_hop(f, aggregator, MLFAB__HOP_MODEL, meta, mlfab__encode_hop_model(meta, &m), bulk, bytes);
}

static void greet(fixture *f, uint32_t server, uint32_t generation, const mlfab__window *window) {
  mlfab__hello_ack m;
  memset(&m, 0, sizeof m);
  m.epoch = 1;
  m.server = server;
  m.eager_bytes = EAGER;
  m.generation = generation;
  m.model_stands = 1;
  if (window) {
    m.top = window->top;
    memcpy(m.applied, window->applied, sizeof m.applied);
    memcpy(m.dropped, window->dropped, sizeof m.dropped);
  }
  mlfab__worker_hello(&f->worker, server, &m, f->now);
}

/* --- fixtures --- */

static void begin_without_tensors(fixture *f, uint32_t scheduler) {
  mlfab__port port = {f, server_post, server_ready, server_drop, server_detach, no_event};
  mlfab__port hop = {f, hop_post, hop_ready, hop_drop, hop_detach, no_event};
  memset(f, 0, sizeof *f);
  f->now = 1000000000;
  assert_int_equal(mlfab__env_init(&f->env, NULL), 0);
  mlfab_config_init(&f->config);
  f->config.workers = WORKERS;
  f->config.servers = SERVERS;
  f->config.scheduler = scheduler;
  f->config.chunk_bytes = CHUNK;
  f->config.eager_bytes = EAGER;
  f->config.merge_max = 128;
  f->config.model_max_bytes = 1 << 30;
  f->config.timeout_ns = 300000000000u;
  assert_int_equal(mlfab__worker_init(&f->worker, &f->env, &f->config, RANK, &port, &hop, &f->stats,
                                      &f->requests),
                   0);
  mlfab__reshard_worker_attach(&f->worker);
}

static void begin(fixture *f, uint32_t scheduler) {
  mlfab_error error;
  begin_without_tensors(f, scheduler);
  assert_int_equal(mlfab__worker_tensor(&f->worker, 0, MLFAB_F32, SHARD / 4, &error), 0);
  assert_int_equal(mlfab__worker_tensor(&f->worker, 1, MLFAB_F32, 512, &error), 0);
  assert_int_equal(mlfab__worker_tensor(&f->worker, 2, MLFAB_F32, SHARD / 4 - 512, &error), 0);
}

/* Sends the model to both servers, which accept it. */
static void define(fixture *f, const mlfab_model_options *options) {
  mlfab_model_options cut;
  memset(&cut, 0, sizeof cut);
  if (options) cut = *options;
  cut.size = sizeof cut;
  cut.slices = BYTES / 4096;
  mlfab_error error;
  mlfab_request request;
  mlfab__define_ack m;
  static uint8_t meta[1024];
  assert_int_equal(mlfab__worker_model(&f->worker, &cut, NULL, 0, f->now, &request, &error), 0);
  for (uint32_t s = 0; s < SERVERS; s++) {
    greet(f, s, 1, NULL);
    assert_int_equal(take(f, 0, s), 1);
    assert_int_equal(f->out.type, MLFAB__DEFINE);
    memset(&m, 0, sizeof m);
    m.server = s;
    m.packets = 1;
    m.ask = f->worker.define.ask, m.options = f->worker.define.options;
    from_server(f, s, MLFAB__DEFINE_ACK, meta, mlfab__encode_define_ack(meta, &m), NULL, 0);
  }
  assert_int_equal(f->worker.stands, 1);
  mlfab__request_end(&f->requests, mlfab__request_find(&f->requests, request));
  uint64_t from, to;
  mlfab__layout_run(&f->worker.layout, 1, 0, &from, &to);
  assert_int_equal(from, f->worker.layout.bytes / SERVERS);
  assert_int_equal(to, f->worker.layout.bytes);
}

static int open_worker(void **state) {
  static fixture f;
  begin(&f, MLFAB_SCHEDULER_BESIDE);
  define(&f, NULL);
  *state = &f;
  return 0;
}

static int close_worker(void **state) {
  fixture *f = *state;
  mlfab__worker_free(&f->worker);
  assert_int_equal(f->env.bytes, 0);
  return 0;
}

static uint8_t weights[BYTES];

static mlfab_buf buffer(uint32_t tensor, void *data) {
  mlfab_buf buf;
  memset(&buf, 0, sizeof buf);
  buf.tensor = tensor;
  buf.data = data;
  buf.count = tensor == MLFAB_ALL ? BYTES / 4
              : tensor == 0       ? SHARD / 4
              : tensor == 1       ? 512
                                  : SHARD / 4 - 512;
  return buf;
}

static mlfab__request *push_some(fixture *f, const uint32_t *tensors, uint32_t n,
                                 const mlfab_push_options *options) {
  mlfab_buf bufs[3];
  mlfab_request request;
  mlfab_error error;
  for (uint32_t i = 0; i < n; i++) bufs[i] = buffer(tensors[i], weights);
  assert_int_equal(mlfab__worker_push(&f->worker, bufs, n, options, f->now, &request, &error), 0);
  return mlfab__request_find(&f->requests, request);
}

static mlfab__request *push_one(fixture *f, uint32_t tensor) {
  return push_some(f, &tensor, 1, NULL);
}

static mlfab__request *pull_all(fixture *f, uint8_t *into) {
  mlfab_buf buf = buffer(MLFAB_ALL, into);
  mlfab_request request;
  mlfab_error error;
  assert_int_equal(mlfab__worker_pull(&f->worker, &buf, 1, 0, f->now, &request, &error), 0);
  return mlfab__request_find(&f->requests, request);
}

/* The next announcement to a server. */
static mlfab__push announced(fixture *f, uint32_t server) {
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  static uint64_t versions[MLFAB__SLICES_MAX];
  mlfab__push m;
  assert_int_equal(take(f, 0, server), 1);
  assert_int_equal(f->out.type, MLFAB__PUSH);
  assert_int_equal(mlfab__decode_push(f->meta, f->out.meta_bytes, &m, segments, versions), 0);
  return m;
}

static mlfab__hop_chunk chunk(fixture *f, uint32_t aggregator) {
  mlfab__hop_chunk m;
  assert_int_equal(take(f, 1, aggregator), 1);
  assert_int_equal(f->out.type, MLFAB__HOP_CHUNK);
  assert_int_equal(mlfab__decode_hop_chunk(f->meta, f->out.meta_bytes, &m), 0);
  return m;
}

/* Pushes an update of both shards and takes its announcements; the first update has number 1. */
static mlfab__request *push_announced(fixture *f) {
  mlfab__request *request = push_one(f, MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) {
    mlfab__push m = announced(f, s);
    assert_int_equal(m.seq, request->result.seq);
  }
  return request;
}

/* Pushes an update of the first shard only, announced to server 0. */
static mlfab__request *push_first_shard(fixture *f) {
  mlfab__request *request = push_one(f, 0);
  announced(f, 0);
  return request;
}

/* --- announcing --- */

static void test_announce(void **state) {
  fixture *f = *state;
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  options.norm = 2.5;
  uint32_t all = MLFAB_ALL, part[2] = {0, 1};
  push_some(f, &all, 1, &options);
  for (uint32_t s = 0; s < SERVERS; s++) {
    mlfab__push m = announced(f, s);
    assert_int_equal(m.flags, MLFAB__PUSH_PLANNED);
    assert_int_equal(m.eager, 0);
    assert_int_equal(f->out.bulk_bytes, 0);
    assert_int_equal(m.parts, 2);
    assert_true(m.norm >= 2.5 && m.norm <= 2.5);
    assert_int_equal(take(f, 0, s), 0); /* nothing follows before the grant */
  }
  /* Clipping measures the norm itself. The small part at server 1 is not planned: the scheduler gets one
   * part only. */
  memset(weights, 0, sizeof weights);
  ((float *)(void *)weights)[0] = 3.0f;
  options.clip_norm = 1e6;
  push_some(f, part, 2, &options);
  mlfab__push m = announced(f, 0);
  assert_int_equal(m.flags, MLFAB__PUSH_PLANNED);
  assert_int_equal(m.parts, 1);
  assert_true(m.norm > 4.2 && m.norm < 4.3); /* both tensors have the same bytes */
  m = announced(f, 1);
  assert_int_equal(m.flags, 0);
  assert_int_equal(m.eager, 2048);
  assert_int_equal(f->out.bulk_bytes, 2048);
}

/* The norm of a sparse update is that of its values. */
static void test_clip_sparse(void **state) {
  fixture *f = *state;
  const uint64_t indices[3] = {0, 5, 4000};
  const float values[3] = {2.0f, 3.0f, 6.0f};
  mlfab_push_options options = {.size = sizeof options, .scale = 1.0, .clip_norm = 3.5};
  mlfab_error error;
  assert_int_equal(
      mlfab__worker_push_sparse(&f->worker, 0, indices, values, 3, &options, f->now, NULL, &error),
      0);
  mlfab__push m = announced(f, 0);
  assert_int_equal(m.flags, MLFAB__PUSH_PACKED);
  assert_int_equal(m.bytes, 40 + 32); /* of two slices */
  assert_true(m.norm >= 7.0 && m.norm <= 7.0);
  assert_true(m.scale >= 0.5 && m.scale <= 0.5);
}

static void test_norm_is_checked(void **state) {
  fixture *f = *state;
  static const double wrong[] = {-1.0, 1e308 * 10.0, -(1e308 * 10.0)};
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  mlfab_buf buf = buffer(0, weights);
  mlfab_error error;
  for (uint32_t i = 0; i <= MLFAB__COUNT(wrong); i++) {
    options.norm = i < MLFAB__COUNT(wrong) ? wrong[i] : wrong[1] - wrong[1]; /* and NaN */
    assert_int_equal(mlfab__worker_push(&f->worker, &buf, 1, &options, f->now, NULL, &error),
                     MLFAB_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, "norm"));
  }
  assert_int_equal(f->worker.norder, 0);
}

/* The flags of a large update's announcement, and the bytes that come with it. */
static void announces(uint32_t scheduler, const mlfab_model_options *options, uint32_t flags,
                      uint32_t eager) {
  static fixture f;
  begin(&f, scheduler);
  define(&f, options);
  push_one(&f, MLFAB_ALL);
  for (uint32_t s = 0; s < SERVERS; s++) {
    mlfab__push m = announced(&f, s);
    assert_int_equal(m.flags, flags);
    assert_int_equal(m.eager, eager);
  }
  mlfab__worker_free(&f.worker);
  assert_int_equal(f.env.bytes, 0);
}

static void test_what_is_planned(void **state) {
  (void)state;
  mlfab_model_options options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.sync = MLFAB_SYNC_BSP;
  announces(MLFAB_SCHEDULER_NONE, NULL, 0, EAGER);
  announces(MLFAB_SCHEDULER_BESIDE, NULL, MLFAB__PUSH_PLANNED, 0);
  announces(MLFAB_SCHEDULER_OWN, &options, MLFAB__PUSH_PLANNED, 0);
  options.deterministic = 1;
  announces(MLFAB_SCHEDULER_OWN, &options, 0, EAGER);
}

/* Worker 0's first weights block no other update. */
static void test_first_weights(void **state) {
  static fixture f;
  (void)state;
  mlfab_buf buf = buffer(MLFAB_ALL, weights);
  mlfab_request request;
  mlfab_error error;
  begin(&f, MLFAB_SCHEDULER_BESIDE);
  f.worker.rank = 0;
  assert_int_equal(mlfab__worker_model(&f.worker, NULL, &buf, 1, f.now, &request, &error), 0);
  greet(&f, 0, 1, NULL);
  assert_int_equal(take(&f, 0, 0), 1);
  assert_int_equal(f.out.type, MLFAB__DEFINE);
  mlfab__push m = announced(&f, 0);
  assert_int_equal(m.flags, MLFAB__PUSH_INIT);
  assert_int_equal(m.eager, EAGER);
  mlfab__worker_free(&f.worker);
  assert_int_equal(f.env.bytes, 0);
}

/* A planned update uses no credit, so it does not wait for credit. */
static void test_planned_takes_no_credit(void **state) {
  fixture *f = *state;
  uint32_t parts[1] = {1};
  for (uint32_t i = 0; i < 4; i++) {
    push_some(f, parts, 1, NULL);
    for (uint32_t k = 0; k < f->worker.norder; k++)
      f->worker.updates[f->worker.order[k]].mergeable = 0;
    announced(f, 1);
  }
  assert_int_equal(f->worker.streams[1].eager_used, EAGER);
  push_one(f, 2);
  assert_int_equal(announced(f, 1).flags, MLFAB__PUSH_PLANNED);
  /* A server may give more credit than the worker's limit for small updates. */
  f->worker.streams[1].eager_bytes = f->worker.streams[1].eager_used = BYTES;
  push_one(f, 2);
  assert_int_equal(announced(f, 1).flags, MLFAB__PUSH_PLANNED);
}

/* Planned updates are not merged either, whatever the limit for small ones: each is placed by itself. */
static void test_planned_is_not_merged(void **state) {
  fixture *f = *state;
  for (uint32_t i = 1; i <= 3; i++) {
    assert_int_equal(push_one(f, 2)->result.seq, i);
    mlfab__push m = announced(f, 1);
    assert_int_equal(m.seq, i);
    assert_int_equal(m.members, 1);
  }
}

/* Members of a merged update have consecutive numbers: no merge skips a withdrawn one. */
static void test_no_merge_over_a_gap(void **state) {
  fixture *f = *state;
  mlfab_push_options twice = {.size = sizeof twice, .scale = 2};
  uint32_t small = 1;
  assert_int_equal(push_one(f, small)->result.seq, 1);
  push_one(f, small);
  assert_int_equal(f->worker.norder, 1);
  mlfab__worker_withdraw(&f->worker, push_some(f, &small, 1, &twice), MLFAB_ERR_CANCELLED, f->now);
  assert_int_equal(f->worker.norder, 1);
  assert_int_equal(push_one(f, small)->result.seq, 4);
  assert_int_equal(f->worker.norder, 2);
  assert_int_equal(f->worker.updates[f->worker.order[0]].members, 2);
}

/* An update of all tensors is merged with another one of all. The same count for one tensor is out of
 * range. */
static void test_merge_of_all(void **state) {
  enum { EACH = 1024 };
  static fixture f;
  mlfab_buf all = {.tensor = MLFAB_ALL, .data = weights, .count = 2 * EACH};
  mlfab_buf wrong = {.tensor = 0, .data = weights, .count = 2 * EACH};
  mlfab_error error;
  (void)state;
  begin_without_tensors(&f, MLFAB_SCHEDULER_NONE);
  for (uint32_t t = 0; t < 2; t++)
    assert_int_equal(mlfab__worker_tensor(&f.worker, t, MLFAB_F32, EACH, &error), 0);
  define(&f, NULL);
  for (uint32_t i = 1; i <= 3; i++) {
    assert_int_equal(mlfab__worker_push(&f.worker, &all, 1, NULL, f.now, NULL, &error), 0);
    assert_int_equal(f.worker.norder, 1);
    assert_int_equal(f.stats.pushes_merged, i - 1);
    assert_int_not_equal(mlfab__worker_push(&f.worker, &wrong, 1, NULL, f.now, NULL, &error), 0);
    assert_int_equal(f.stats.pushes_merged, i - 1);
  }
  mlfab__worker_free(&f.worker);
  assert_int_equal(f.env.bytes, 0);
}

/* --- the route of an update --- */

static void test_by_hop(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  for (uint32_t s = 0; s < SERVERS; s++) via(f, s, 1, 7 + s, 3);
  /* The link is wanted before any grant, because the grant arrives over it. */
  assert_int_equal(f->hop.ready[3], 2);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 1);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 2), 0);
  assert_int_equal(take(f, 1, 3), 0);
  hop_grant(f, 3, 0, 1, 7, 20000);
  assert_int_equal(f->hop.ready[3], 3);
  assert_int_equal(take(f, 1, 2), 0);
  mlfab__hop_chunk m = chunk(f, 3);
  assert_int_equal(m.group, 7);
  assert_int_equal(m.seq, 1);
  assert_int_equal(m.offset, 0);
  assert_int_equal(m.server, 0);
  assert_int_equal(f->out.bulk_bytes, CHUNK);
  assert_ptr_equal(f->out.bulk, weights);
  m = chunk(f, 3);
  assert_int_equal(m.offset, CHUNK);
  assert_int_equal(f->out.bulk_bytes, 20000 - CHUNK);
  assert_int_equal(take(f, 1, 3), 0);
  /* A grant beyond the end means all bytes, and a smaller one changes nothing. */
  hop_grant(f, 3, 1, 1, 8, SHARD + 1000);
  hop_grant(f, 3, 1, 1, 8, 10);
  m = chunk(f, 3);
  assert_int_equal(m.server, 1);
  assert_int_equal(m.group, 8);
  assert_ptr_equal(f->out.bulk, weights + SHARD);
  assert_int_equal(take_all(f, 1, 3), 5);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  take_all(f, 1, 3);
  /* The update ends only when it is decided and the lent bytes of both servers' parts are back. */
  assert_int_equal(f->worker.updates[0].parts[1].lent_hop, LENT);
  for (uint32_t s = 0; s < SERVERS; s++) ack(f, s, 1, 0, 4 + s, 3 - s);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  uint32_t left = live(f, 1, 3);
  assert_true(left > 2 * LENT - 2);
  for (uint32_t i = 0; i < f->nloans && left > 0; i++) {
    if (f->loans[i].state != LOAN_LIVE) continue;
    assert_int_equal(request->done, 0);
    report(f, &f->loans[i]);
    left--;
  }
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, 0);
  assert_int_equal(request->result.version, 5);
  assert_int_equal(request->result.delay, 3);
  assert_int_equal(f->stats.pushes_applied, 1);
  assert_int_equal(f->hop.detached, 0);
}

/* Updates routed to an aggregator are not sent over the server's link, and its grants have no effect. */
static void test_grant_of_the_server(void **state) {
  fixture *f = *state;
  push_first_shard(f);
  via(f, 0, 1, 7, 3);
  grant(f, 0, 1, SHARD);
  assert_int_equal(take(f, 0, 0), 0);
  assert_int_equal(take(f, 1, 3), 0);
  hop_grant(f, 3, 0, 1, 7, CHUNK);
  grant(f, 0, 1, SHARD);
  assert_int_equal(take_all(f, 1, 3), 1);
  assert_int_equal(take(f, 0, 0), 0);
  /* Direct: starts at the first byte after a grant. */
  via(f, 0, 1, 8, MLFAB__NO_NODE);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  assert_int_equal(f->hop.detached, 1);
  assert_int_equal(take(f, 0, 0), 0);
  grant(f, 0, 1, 30000);
  mlfab__chunk m;
  assert_int_equal(take(f, 0, 0), 1);
  assert_int_equal(mlfab__decode_chunk(f->meta, f->out.meta_bytes, &m), 0);
  assert_int_equal(m.offset, 0);
  assert_int_equal(take_all(f, 0, 0), 2);
  assert_int_equal(take(f, 1, 3), 0);
}

/* From one aggregator to another and back: the first one's bytes are taken back; if they are reported all
 * the same, the report does not count for the bytes that are lent now. */
static void test_hop_and_back(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_first_shard(f);
  via(f, 0, 1, 7, 3);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  chunk(f, 3);
  chunk(f, 3);
  via(f, 0, 1, 8, 2);
  assert_int_equal(f->hop.detached, 2);
  assert_int_equal(live(f, 1, 3), 0);
  assert_int_equal(take(f, 1, 3), 0);
  assert_int_equal(take(f, 1, 2), 0);
  hop_grant(f, 2, 0, 1, 8, SHARD);
  mlfab__hop_chunk m = chunk(f, 2);
  assert_int_equal(m.offset, 0);
  assert_int_equal(m.group, 8);
  via(f, 0, 1, 9, 3);
  hop_grant(f, 3, 0, 1, 9, SHARD);
  assert_int_equal(take_all(f, 1, 3), 6);
  ack(f, 0, 1, 0, 1, 0);
  assert_int_equal(report_all(f, LOAN_DETACHED, 1, 3), 2);
  assert_int_equal(report_all(f, LOAN_DETACHED, 1, 2), 1);
  assert_int_equal(f->worker.updates[0].parts[0].lent_hop, LENT);
  assert_int_equal(request->done, 0);
  assert_int_equal(report_all(f, LOAN_LIVE, 1, 3), LENT);
  assert_int_equal(request->done, 1);
}

/* The same aggregator with a new number: starts at the first byte, and the lent bytes stay lent. */
static void test_group_begins_anew(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_first_shard(f);
  via(f, 0, 1, 7, 3);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  assert_int_equal(take_all(f, 1, 3), 6);
  via(f, 0, 1, 8, 3);
  assert_int_equal(f->hop.detached, 0);
  assert_int_equal(take(f, 1, 3), 0);
  hop_grant(f, 3, 0, 1, 7, SHARD); /* the old number */
  assert_int_equal(take(f, 1, 3), 0);
  hop_grant(f, 3, 0, 1, 8, SHARD);
  mlfab__hop_chunk m = chunk(f, 3);
  assert_int_equal(m.offset, 0);
  assert_int_equal(m.group, 8);
  take_all(f, 1, 3);
  ack(f, 0, 1, 0, 1, 0);
  assert_int_equal(live(f, 1, 3), 2 * LENT);
  for (uint32_t i = 0; i < LENT; i++) {
    report(f, &f->loans[i]);
    assert_int_equal(request->done, 0);
  }
  assert_int_equal(report_all(f, LOAN_LIVE, 1, 3), LENT);
  assert_int_equal(request->done, 1);
}

/* The server's link holds some bytes, too: all must be returned. */
static void test_lent_to_both(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_first_shard(f);
  grant(f, 0, 1, 2 * CHUNK);
  assert_int_equal(take_all(f, 0, 0), 2);
  via(f, 0, 1, 7, 3);
  assert_int_equal(f->server.detached, 0);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  assert_int_equal(chunk(f, 3).offset, 0);
  take_all(f, 1, 3);
  ack(f, 0, 1, 0, 1, 0);
  assert_int_equal(report_all(f, LOAN_LIVE, 1, 3), LENT);
  assert_int_equal(request->done, 0);
  assert_int_equal(report_all(f, LOAN_LIVE, 0, 0), 2);
  assert_int_equal(request->done, 1);
}

/* The aggregator's grant arrives before the server's VIA: the worker adopts the route, and does not restart
 * when VIA arrives. */
static void test_adopted(void **state) {
  fixture *f = *state;
  push_first_shard(f);
  via(f, 0, 1, 5, 2);
  hop_grant(f, 2, 0, 1, 5, SHARD);
  chunk(f, 2);
  hop_grant(f, 3, 0, 1, 9, SHARD);
  assert_int_equal(f->hop.detached, 1);
  assert_int_equal(take(f, 1, 2), 0);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 2), 0);
  assert_int_equal(chunk(f, 3).offset, 0);
  /* A route in between, which the server announced earlier. */
  via(f, 0, 1, 6, 4);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 4), 0);
  hop_grant(f, 2, 0, 1, 5, SHARD);
  hop_grant(f, 4, 0, 1, 6, SHARD);
  hop_grant(f, 4, 0, 1, 9, SHARD); /* another update's */
  assert_int_equal(take(f, 1, 2) + take(f, 1, 4), 0);
  via(f, 0, 1, 9, 3);
  mlfab__hop_chunk m = chunk(f, 3);
  assert_int_equal(m.group, 9);
  assert_int_equal(m.offset, CHUNK);
  via(f, 0, 1, 10, MLFAB__NO_NODE);
  hop_grant(f, 3, 0, 1, 9, SHARD);
  hop_grant(f, 3, 0, 1, 10, SHARD);
  assert_int_equal(take(f, 1, 3), 0);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
}

/* A stream was reset between a grant and its arrival. A server that then grants directly, because it never
 * put the update into a group, is obeyed. */
static void test_adopted_too_late(void **state) {
  fixture *f = *state;
  push_first_shard(f);
  lose_server(f, 0);
  hop_grant(f, 3, 0, 1, 7, SHARD); /* nothing is sent while the stream is down */
  assert_int_equal(take(f, 1, 3), 0);
  greet(f, 0, 2, NULL);
  hop_grant(f, 3, 0, 1, 7, SHARD); /* not announced again yet */
  assert_int_equal(take(f, 1, 3), 0);
  assert_int_equal(announced(f, 0).generation, 2);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  chunk(f, 3);
  grant(f, 0, 1, SHARD);
  assert_int_equal(f->hop.detached, 1);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  assert_int_equal(take_all(f, 0, 0), 6);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  assert_int_equal(take(f, 1, 3), 0);
  grant(f, 0, 1, SHARD);
  assert_int_equal(take(f, 0, 0), 0);
}

/* VIA frames of a former stream, for decided updates, and for unknown ones. */
static void test_old_words(void **state) {
  fixture *f = *state;
  push_announced(f);
  mlfab__via old = {1, 7, 0, 3};
  uint8_t meta[64];
  from_server(f, 0, MLFAB__VIA, meta, mlfab__encode_via(meta, &old), NULL, 0);
  via(f, 0, 2, 7, 3);
  hop_grant(f, 3, 0, 2, 7, SHARD);
  ack(f, 0, 1, 0, 1, 0);
  via(f, 0, 1, 8, 3);
  hop_grant(f, 3, 0, 1, 8, SHARD);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  assert_int_equal(take(f, 1, 3), 0);
  assert_int_equal(f->hop.ready[3], 0);
  assert_int_equal(f->server.drops + f->hop.drops, 0);
}

static void test_hop_lost(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  via(f, 0, 1, 7, 3);
  via(f, 1, 1, 7, 2);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  hop_grant(f, 2, 1, 1, 7, SHARD);
  chunk(f, 3);
  assert_int_equal(take_all(f, 1, 2), 6);
  lose_hop(f, 3);
  /* The part waits for the server's VIA and for the link. */
  assert_int_equal(take(f, 1, 3), 0);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 1);
  assert_int_equal(f->worker.updates[0].parts[0].lent_hop, 0);
  assert_int_equal(f->worker.updates[0].parts[1].lent_hop, LENT);
  via(f, 0, 1, 8, MLFAB__NO_NODE);
  assert_int_equal(f->hop.detached, 0); /* the link held nothing any more */
  grant(f, 0, 1, SHARD);
  assert_int_equal(take_all(f, 0, 0), 6);
  ack(f, 0, 1, 0, 1, 0);
  ack(f, 1, 1, 0, 1, 0);
  assert_int_equal(report_all(f, LOAN_LIVE, 0, 0), LENT);
  assert_int_equal(request->done, 0);
  lose_hop(f, 2); /* after the verdict: the rest is returned */
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, 0);
}

/* A grant on a new link starts at the first byte. */
static void test_hop_lost_and_granted(void **state) {
  fixture *f = *state;
  push_first_shard(f);
  via(f, 0, 1, 7, 3);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  chunk(f, 3);
  chunk(f, 3);
  lose_hop(f, 3);
  hop_grant(f, 3, 0, 1, 7, CHUNK);
  mlfab__hop_chunk m = chunk(f, 3);
  assert_int_equal(m.offset, 0);
  assert_int_equal(take(f, 1, 3), 0);
}

static void test_server_lost(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  for (uint32_t s = 0; s < SERVERS; s++) {
    via(f, s, 1, 7, 3);
    hop_grant(f, 3, s, 1, 7, SHARD);
  }
  assert_int_equal(take_all(f, 1, 3), 12);
  lose_server(f, 0);
  assert_int_equal(f->hop.detached, LENT); /* the other server's part stays lent */
  assert_int_equal(live(f, 1, 3), LENT);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 1);
  greet(f, 0, 2, NULL);
  mlfab__push m = announced(f, 0);
  assert_int_equal(m.generation, 2);
  assert_int_equal(m.flags, MLFAB__PUSH_PLANNED);
  assert_int_equal(m.parts, 2);
  via(f, 0, 1, 9, 2);
  hop_grant(f, 2, 0, 1, 9, SHARD);
  assert_int_equal(take_all(f, 1, 2), 6);
  ack(f, 0, 1, 0, 1, 0);
  ack(f, 1, 1, 0, 1, 0);
  report_all(f, LOAN_LIVE, 1, 2);
  assert_int_equal(request->done, 0);
  report_all(f, LOAN_LIVE, 1, 3);
  assert_int_equal(request->done, 1);
}

/* RESEND: the link stays, the stream starts again. An update that the server has decided is not announced
 * again. */
static void test_resend(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  via(f, 0, 1, 7, 3);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  assert_int_equal(take_all(f, 1, 3), 6);
  ack(f, 1, 1, 0, 1, 0);
  mlfab__resend resend = {5, 0, {0, 0, 0, 0}, {0, 0, 0, 0}};
  uint8_t meta[96];
  from_server(f, 0, MLFAB__RESEND, meta, mlfab__encode_resend(meta, &resend), NULL, 0);
  assert_int_equal(f->hop.detached, LENT);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  assert_int_equal(take(f, 1, 3), 0);
  mlfab__push m = announced(f, 0);
  assert_int_equal(m.generation, 5);
  assert_int_equal(m.parts, 1);
  hop_grant(f, 3, 0, 1, 6, SHARD); /* the route's number still fences */
  assert_int_equal(take(f, 1, 3), 0);
  via(f, 0, 1, 8, MLFAB__NO_NODE);
  grant(f, 0, 1, SHARD);
  assert_int_equal(take_all(f, 0, 0), 6);
  ack(f, 0, 1, 0, 1, 0);
  assert_int_equal(report_all(f, LOAN_LIVE, 0, 0), LENT);
  assert_int_equal(request->done, 1);
}

static void test_server_dead(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  for (uint32_t s = 0; s < SERVERS; s++) {
    via(f, s, 1, 7, 3);
    hop_grant(f, 3, s, 1, 7, SHARD);
  }
  take_all(f, 1, 3);
  ack(f, 1, 1, 0, 1, 0);
  for (uint32_t i = 0; i < f->nloans; i++) {
    if (f->loans[i].state == LOAN_LIVE && f->loans[i].data >= weights + SHARD)
      report(f, &f->loans[i]);
  }
  assert_int_equal(request->done, 0);
  mlfab__worker_dead(&f->worker, 0, f->now);
  assert_int_equal(f->hop.detached, LENT);
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
}

/* Slices have moved, and this worker was not told in time: it stops at each server, which tells it the last
 * number that it knows. An update that one server has decided is not sent to another one. */
static void test_lost_in_a_move(void **state) {
  fixture *f = *state;
  static uint8_t meta[4096];
  for (uint32_t at = 0; at < SERVERS; at++) { /* the server that has decided it */
    uint32_t owners[MLFAB__SLICES_MAX];
    mlfab__resume m = {f->worker.pause.attempt + 1, f->worker.epoch + 1, f->worker.layout.nslices};
    mlfab__request *request = push_announced(f);
    uint64_t seq = request->result.seq;
    for (uint32_t i = 0; i < m.slices; i++) owners[i] = f->worker.layout.slices[i].server;
    ack(f, at, seq, 0, 1, 0);
    assert_int_equal(request->done, 0);
    from_server(f, 0, MLFAB__RESUME, meta, mlfab__encode_resume(meta, &m, owners), NULL, 0);
    for (uint32_t s = 0; s < SERVERS; s++) {
      mlfab__hello_ack hello = {.epoch = m.epoch, .server = s, .eager_bytes = EAGER};
      hello.generation = f->worker.streams[s].generation;
      hello.model_stands = 1;
      hello.stopped = m.attempt;
      hello.top = seq - 1;
      mlfab__worker_hello(&f->worker, s, &hello, f->now);
    }
    assert_int_equal(f->worker.epoch, m.epoch);
    assert_int_equal(f->worker.norder, 0);
    assert_int_equal(request->done, 1);
    assert_int_equal(request->result.status, MLFAB_ERR_PARTIAL);
    for (uint32_t s = 0; s < SERVERS; s++) { /* both continue */
      greet(f, s, f->worker.streams[s].generation, NULL);
      f->worker.streams[s].epoch = f->worker.epoch;
    }
    mlfab__request_end(&f->requests, request);
  }
}

/* The error of a DURABLE update says that it may have been applied already, and waits for the replica. */
static void test_withdraw_durable(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  f->worker.updates[f->worker.order[0]].flags |= MLFAB__PUSH_DURABLE;
  f->now += 1500000000;
  mlfab__worker_withdraw(&f->worker, request, MLFAB_ERR_TIMEOUT, f->now);
  assert_string_equal(
      f->requests.last.text,
      "update 1: the deadline passed after 1.5 s awaiting server 0 to apply it, and "
      "its replica to have it; it is not known yet whether it was");
}

/* Cancelled or timed out: every link returns its bytes at once. */
static void test_withdraw(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  via(f, 0, 1, 7, 3);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  take_all(f, 1, 3);
  grant(f, 1, 1, SHARD);
  take_all(f, 0, 1);
  f->now += 1500000000;
  mlfab__worker_withdraw(&f->worker, request, MLFAB_ERR_TIMEOUT, f->now);
  assert_int_equal(f->hop.detached, LENT);
  assert_int_equal(f->server.detached, LENT);
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, MLFAB_ERR_IN_DOUBT);
  assert_string_equal(f->requests.last.text,
                      "update 1: the deadline passed after 1.5 s awaiting server 0 to apply it by "
                      "way of worker 3; it is not known yet whether it was");
  assert_int_equal(f->server.posts, 2);
  assert_int_equal(f->server.post_type, MLFAB__WITHDRAW);
  /* Frames that cross it change nothing. */
  via(f, 0, 1, 8, 2);
  hop_grant(f, 2, 0, 1, 8, SHARD);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  grant(f, 1, 1, SHARD);
  assert_int_equal(take(f, 1, 2) + take(f, 1, 3) + take(f, 0, 0) + take(f, 0, 1), 0);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 2), 0);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  assert_int_equal(report_all(f, LOAN_DETACHED, 1, 3), LENT);
  int status = 1;
  ack(f, 0, 1, MLFAB_ERR_WITHDRAWN, 0, 0);
  ack(f, 1, 1, MLFAB_ERR_WITHDRAWN, 0, 0);
  assert_int_equal(mlfab__worker_status(&f->worker, 1, &status), 0);
  assert_int_equal(status, MLFAB_ERR_WITHDRAWN);
  assert_int_equal(f->worker.norder, 0);
}

static void test_close(void **state) {
  fixture *f = *state;
  push_announced(f);
  via(f, 0, 1, 7, 3);
  via(f, 1, 1, 7, 2);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  hop_grant(f, 2, 1, 1, 7, SHARD);
  take_all(f, 1, 3);
  take_all(f, 1, 2);
  mlfab__worker_free(&f->worker);
  assert_int_equal(f->hop.detached, 2 * LENT);
  assert_int_equal(live(f, 1, 3) + live(f, 1, 2), 0);
}

/* A reused slot tells its own bulks from those of the previous update. */
static void test_slot_used_again(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_first_shard(f);
  via(f, 0, 1, 7, 3);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  take_all(f, 1, 3);
  mlfab__worker_withdraw(&f->worker, request, MLFAB_ERR_CANCELLED, f->now);
  ack(f, 0, 1, MLFAB_ERR_WITHDRAWN, 0, 0);
  request = push_first_shard(f);
  via(f, 0, 2, 8, 3);
  hop_grant(f, 3, 0, 2, 8, SHARD);
  take_all(f, 1, 3);
  ack(f, 0, 2, 0, 1, 0);
  assert_int_equal(report_all(f, LOAN_DETACHED, 1, 3), LENT);
  assert_int_equal(request->done, 0);
  assert_int_equal(report_all(f, LOAN_LIVE, 1, 3), LENT);
  assert_int_equal(request->done, 1);
}

/* --- drops --- */

static void test_dropped(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  ack(f, 0, 1, MLFAB_ERR_DROPPED, 0, 31);
  assert_int_equal(request->done, 0);
  ack(f, 1, 1, MLFAB_ERR_DROPPED, 0, 40);
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, MLFAB_ERR_DROPPED);
  assert_int_equal(request->result.delay, 40);
  assert_int_equal(request->result.applied, 0);
  assert_int_equal(request->result.refused, 2);
  assert_string_equal(f->requests.last.text,
                      "update 1: dropped by the plan at server 0: its delay would be 31");
  assert_int_equal(f->stats.updates_dropped, 1);
  assert_int_equal(f->stats.pushes_refused, 1);
  int status = 0;
  assert_int_equal(mlfab__worker_status(&f->worker, 1, &status), 0);
  assert_int_equal(status, MLFAB_ERR_DROPPED);
  /* It was applied nowhere: it may be pushed again, under a new number. */
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  options.retry_seq = 1;
  uint32_t all = MLFAB_ALL;
  assert_int_equal(push_some(f, &all, 1, &options)->result.seq, 2);
}

/* One server dropped it, another one did not: pushing it again would apply a part twice. */
static void test_dropped_in_part(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_announced(f);
  ack(f, 0, 1, 0, 12, 3);
  ack(f, 1, 1, MLFAB_ERR_DROPPED, 0, 31);
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, MLFAB_ERR_PARTIAL);
  assert_int_equal(request->result.rank, 1);
  assert_int_equal(request->result.applied, 1);
  assert_int_equal(request->result.refused, 1);
  assert_int_equal(request->result.delay, 3);
  assert_int_equal(request->result.version, 12);
  assert_string_equal(f->requests.last.text,
                      "update 1: dropped by the plan at server 1: its delay would be 31; 1 of 2 "
                      "servers applied their parts: only what was dropped may be pushed again");
  assert_int_equal(f->stats.updates_dropped, 0);
  int status = 0;
  assert_int_equal(mlfab__worker_status(&f->worker, 1, &status), 0);
  assert_int_equal(status, MLFAB_ERR_PARTIAL);
}

/* Any other error outweighs the drop, whichever server reports first. */
static void test_dropped_and_worse(void **state) {
  fixture *f = *state;
  static const int worse[] = {MLFAB_ERR_NOT_FINITE, MLFAB_ERR_CALLBACK, MLFAB_ERR_PEER_DEAD};
  for (uint32_t i = 0; i < MLFAB__COUNT(worse); i++) {
    for (uint32_t s = 0; s < SERVERS; s++) {
      mlfab__request *request = push_announced(f);
      ack(f, s, request->result.seq, MLFAB_ERR_DROPPED, 0, 31);
      ack(f, 1 - s, request->result.seq, worse[i], 0, 0);
      assert_int_equal(request->result.status, worse[i]);
    }
  }
  assert_int_equal(f->stats.updates_dropped, 0);
}

/* No caller waits for it: flush reports it. */
static void test_dropped_and_abandoned(void **state) {
  fixture *f = *state;
  mlfab_buf buf = buffer(0, weights);
  mlfab_error error;
  assert_int_equal(mlfab__worker_push(&f->worker, &buf, 1, NULL, f->now, NULL, &error), 0);
  announced(f, 0);
  ack(f, 0, 1, MLFAB_ERR_DROPPED, 0, 9);
  assert_int_equal(f->requests.abandoned.code, MLFAB_ERR_DROPPED);
  assert_string_equal(f->requests.last.text,
                      "update 1: dropped by the plan at server 0: its delay would be 9");
  assert_int_equal(f->stats.updates_dropped, 1);
}

/* The last posted frame, which must be a PROGRESS for this server. */
static uint64_t told_progress(const fixture *f, uint32_t server) {
  mlfab__progress m;
  assert_int_equal(f->server.post_type, MLFAB__PROGRESS);
  assert_int_equal(f->server.post_peer, server);
  assert_int_equal(mlfab__decode_progress(f->server.post_meta, f->server.post_bytes, &m), 0);
  return m.progress;
}

static uint64_t kept_progress[SERVERS];

static void keep_progress(fixture *f, uint32_t server, uint8_t type, const void *meta,
                          uint32_t bytes) {
  mlfab__progress m;
  (void)f;
  if (type != MLFAB__PROGRESS) return;
  assert_int_equal(mlfab__decode_progress(meta, bytes, &m), 0);
  kept_progress[server] = m.progress;
}

static void news_of_counting(fixture *f, uint32_t server, uint32_t counts) {
  mlfab__sync_ack m;
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  memset(&m, 0, sizeof m);
  m.counts = counts;
  from_server(f, server, MLFAB__SYNC_ACK, meta, mlfab__encode_sync_ack(meta, &m), NULL, 0);
}

/* Updates without a part for a server count there too. The worker tells it when it begins to count, on a
 * new link, and when its answer shows that it does not know; while it does not count, never. */
static void test_progress_of_others(void **state) {
  fixture *f = *state;
  mlfab__window window = {4, {15}, {0}, 0, 0};
  for (uint64_t i = 1; i <= 3; i++) {
    push_first_shard(f);
    ack_reached(f, 0, i, 0, i);
    assert_int_equal(f->worker.streams[0].round, i);
    assert_int_equal(f->worker.streams[1].round, i);
  }
  assert_int_equal(f->server.posts, 0);
  push_announced(f);
  ack_reached(f, 0, 4, 0, 4);
  ack_reached(f, 1, 4, 0, 1); /* it knows of this one only */
  assert_int_equal(f->server.posts, 0);
  news_of_counting(f, 1, 1);
  assert_int_equal(told_progress(f, 1), 4);
  news_of_counting(f, 1, 1);
  assert_int_equal(f->server.posts, 1);
  push_one(f, 0);
  assert_int_equal(announced(f, 0).progress, 4);
  assert_int_equal(announced(f, 1).progress, 4); /* also for an update without bytes for it */
  ack_reached(f, 1, 5, 0, 2);
  assert_int_equal(told_progress(f, 1), 5);
  ack_reached(f, 0, 5, 0, 5);
  assert_int_equal(f->server.posts, 2);
  lose_server(f, 1);
  window.top = 5;
  greet(f, 1, 2, &window);
  assert_int_equal(told_progress(f, 1), 5);
}

/* Rounds went on without this worker: its next update belongs to the open round at all servers, and pulls
 * wait for that round. */
static void test_dropped_late(void **state) {
  (void)state;
  static fixture f;
  mlfab_model_options options;
  memset(&options, 0, sizeof options);
  options.sync = MLFAB_SYNC_DROP;
  options.consistency =
      (mlfab_sync){.size = sizeof(mlfab_sync), .kind = MLFAB_SYNC_DROP, .need = 2};
  begin(&f, MLFAB_SCHEDULER_NONE);
  define(&f, &options);
  mlfab__request *request = push_announced(&f);
  ack_reached(&f, 0, 1, MLFAB_ERR_DROPPED, 7);
  assert_int_equal(told_progress(&f, 1), 6);
  ack_reached(&f, 1, 1, MLFAB_ERR_DROPPED, 1); /* it does not know that yet */
  assert_int_equal(request->result.status, MLFAB_ERR_DROPPED);
  assert_string_equal(f.requests.last.text,
                      "update 1: too late at server 0: iteration 0 was complete");
  assert_int_equal(f.worker.streams[0].round, 7);
  assert_int_equal(f.worker.streams[1].round, 7);
  assert_int_equal(told_progress(&f, 1), 7);
  push_one(&f, MLFAB_ALL);
  assert_int_equal(announced(&f, 0).progress, 7);
  assert_int_equal(announced(&f, 1).progress, 7);
  pull_all(&f, weights);
  f.server.posts = 0;
  f.posted = keep_progress;
  ack_reached(&f, 0, 2, 0, 9); /* late, but kept */
  assert_int_equal(f.worker.streams[0].round, 9);
  assert_int_equal(kept_progress[1], 8); /* before the update in progress there */
  static mlfab__segment segments_here[MLFAB__SEGMENTS_MAX];
  static uint64_t versions_here[MLFAB__SLICES_MAX];
  mlfab__pull pull;
  assert_int_equal(f.server.post_type,
                   MLFAB__PULL); /* it must see that update, which has another number */
  assert_int_equal(mlfab__decode_pull(f.server.post_meta, f.server.post_bytes, &pull, segments_here,
                                      versions_here),
                   0);
  assert_int_equal(pull.progress, 9);
  ack_reached(&f, 1, 2, 0, 9);
  assert_int_equal(f.worker.streams[1].round, 9);
  assert_int_equal(f.server.posts, 3);
  mlfab__worker_free(&f.worker);
}

/* The answer to an update that was not applied is lost: the window in HELLO_ACK tells whether it was
 * dropped and may be retried, whatever the consistency model is now. */
static void test_lost_drop(void **state) {
  (void)state;
  static fixture f;
  for (uint32_t i = 0; i < 4; i++) {
    int dropped = i % 2;
    mlfab_model_options options;
    mlfab__window window = {1, {0}, {(uint64_t)dropped}, 0, 0};
    memset(&options, 0, sizeof options);
    options.consistency = (mlfab_sync){
        .size = sizeof(mlfab_sync), .kind = i < 2 ? MLFAB_SYNC_ASYNC : MLFAB_SYNC_DROP, .need = 1};
    begin(&f, MLFAB_SCHEDULER_NONE);
    define(&f, &options);
    mlfab__request *request = push_announced(&f);
    lose_server(&f, 0);
    lose_server(&f, 1);
    greet(&f, 0, 2, &window);
    greet(&f, 1, 2, &window);
    assert_int_equal(request->result.status, dropped ? MLFAB_ERR_DROPPED : MLFAB_ERR_REFUSED);
    if (dropped)
      assert_string_equal(f.requests.last.text,
                          "update 1: dropped by server 0, whose answer is lost");
    mlfab__worker_free(&f.worker);
  }
}

/* The caller's count is compared with the library's before anything is sent. */
static void test_progress_is_checked(void **state) {
  fixture *f = *state;
  mlfab_push_options options = {.size = sizeof options, .scale = 1.0, .iteration = 2};
  mlfab_buf buf = buffer(MLFAB_ALL, weights);
  mlfab_error error;
  assert_int_equal(mlfab__worker_push(&f->worker, &buf, 1, &options, f->now, NULL, &error),
                   MLFAB_ERR_ARGUMENT);
  assert_string_equal(error.text, "push: iteration is 2, this worker's next is 1");
  assert_int_equal(f->worker.norder, 0);
  for (options.iteration = 1; options.iteration < 4; options.iteration++)
    assert_int_equal(mlfab__worker_push(&f->worker, &buf, 1, &options, f->now, NULL, &error), 0);
  announced(f, 0);
  ack(f, 0, 1, 0, 1, 0);
  assert_int_equal(mlfab__worker_push(&f->worker, &buf, 1, &options, f->now, NULL, &error), 0);
  assert_int_equal(mlfab__worker_push(&f->worker, &buf, 1, &options, f->now, NULL, &error),
                   MLFAB_ERR_ARGUMENT);
  assert_string_equal(error.text, "push: iteration is 4, this worker's next is 5");
}

/* Dropped while an aggregator's link borrows some of it: the buffer waits for that. */
static void test_dropped_at_a_hop(void **state) {
  fixture *f = *state;
  mlfab__request *request = push_first_shard(f);
  via(f, 0, 1, 7, 3);
  hop_grant(f, 3, 0, 1, 7, SHARD);
  take_all(f, 1, 3);
  ack(f, 0, 1, MLFAB_ERR_DROPPED, 0, 9);
  assert_int_equal(request->done, 0);
  report_all(f, LOAN_LIVE, 1, 3);
  assert_int_equal(request->result.status, MLFAB_ERR_DROPPED);
}

/* --- pulls --- */

static uint8_t pulled[BYTES];

/* A whole shard from a distributor, all bytes equal. */
static void hop_shard(fixture *f, uint32_t aggregator, uint32_t server, uint32_t attempt,
                      uint64_t request, uint8_t fill) {
  for (uint64_t at = server * SHARD; at < (server + 1) * SHARD; at += 4096) {
    int last = at + 4096 == (server + 1) * SHARD;
    hop_model(f, aggregator, server, attempt, request, at, 4096, fill,
              last ? MLFAB__MODEL_LAST : 0);
  }
}

static void shard(fixture *f, uint32_t server, uint64_t request, uint8_t fill) {
  for (uint64_t at = server * SHARD; at < (server + 1) * SHARD; at += 4096) {
    int last = at + 4096 == (server + 1) * SHARD;
    model(f, server, request, at, 4096, fill, last ? MLFAB__MODEL_LAST : 0);
  }
}

static void assert_shard(uint32_t server, uint8_t fill) {
  for (uint32_t i = 0; i < SHARD; i++) assert_int_equal(pulled[server * SHARD + i], fill);
}

static void test_pull_by_hop(void **state) {
  fixture *f = *state;
  mlfab__request *request = pull_all(f, pulled);
  assert_int_equal(f->server.posts, 2);
  assert_int_equal(f->server.post_type, MLFAB__PULL);
  pull_via(f, 0, request->id, 4, 3);
  assert_int_equal(f->hop.ready[3], 1);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 1);
  hop_shard(f, 3, 0, 4, request->id, 9);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  assert_int_equal(f->server.posts, 3);
  assert_int_equal(f->server.post_type, MLFAB__PULL_DONE);
  assert_int_equal(f->server.post_peer, 0);
  mlfab__pull_done done;
  assert_int_equal(mlfab__decode_pull_done(f->server.post_meta, f->server.post_bytes, &done), 0);
  assert_int_equal(done.request, request->id);
  assert_int_equal(request->done, 0);
  shard(f, 1, request->id, 11);
  assert_int_equal(f->server.posts, 3); /* the server knows what it has sent */
  assert_int_equal(request->done, 1);
  assert_int_equal(request->result.status, 0);
  assert_int_equal(request->result.version, 11);
  assert_shard(0, 9);
  assert_shard(1, 11);
  assert_int_equal(f->worker.pulled[0], 9);
  assert_int_equal(f->stats.pulls_finished, 1);
  /* Late bytes belong to no request. */
  hop_shard(f, 3, 0, 5, request->id, 1);
  assert_shard(0, 9);
  assert_int_equal(f->hop.drops + f->server.drops, 0);
}

/* Only the newest route counts, whichever frame announces it first. */
static void test_pull_ways(void **state) {
  fixture *f = *state;
  mlfab__request *request = pull_all(f, pulled);
  memset(pulled, 0, sizeof pulled);
  pull_via(f, 0, request->id, 4, 3);
  hop_model(f, 2, 0, 4, request->id, 0, 4096, 1, 0); /* another one's */
  hop_model(f, 3, 0, 3, request->id, 0, 4096, 2, 0); /* an older attempt */
  model(f, 0, request->id, 0, 4096, 3, 0);           /* the server's own older attempt */
  assert_int_equal(pulled[0], 0);
  hop_model(f, 3, 0, 4, request->id, 0, 4096, 4, 0);
  assert_int_equal(pulled[4095], 4);
  /* The distributor's frame arrives before the server's PULL_VIA. */
  hop_model(f, 2, 0, 6, request->id, 0, 4096, 6, 0);
  assert_int_equal(pulled[0], 6);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 2), 1);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  pull_via(f, 0, request->id, 5, 4);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 4), 0);
  pull_via(f, 0, request->id, 6, 2);
  hop_model(f, 3, 0, 4, request->id, 0, 4096, 4, 0);
  model(f, 0, request->id, 0, 4096, 3, MLFAB__MODEL_LAST);
  assert_int_equal(pulled[0], 6);
  hop_model(f, 2, 0, 6, request->id, 4096, 4096, 6, 0);
  assert_int_equal(pulled[4096], 6);
  /* Direct in the end: frames of a distributor do not count. */
  pull_via(f, 0, request->id, 7, MLFAB__NO_NODE);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 2), 0);
  hop_model(f, 2, 0, 6, request->id, 8192, 4096, 6, 0);
  assert_int_equal(pulled[8192], 0);
  shard(f, 0, request->id, 7);
  assert_shard(0, 7);
  assert_int_equal(f->worker.fetches[0].nwaiting, 1);
  assert_int_equal(f->hop.drops + f->server.drops, 0);
}

/* The distributor's link breaks after part of the shard: frames may be lost, so the part is void. */
static void test_pull_hop_lost(void **state) {
  fixture *f = *state;
  mlfab__request *request = pull_all(f, pulled);
  pull_via(f, 0, request->id, 4, 3);
  lose_hop(f, 3); /* before any frame: they may arrive on another link */
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 1);
  hop_model(f, 3, 0, 4, request->id, 0, 4096, 4, 0);
  assert_int_equal(pulled[0], 4);
  lose_hop(f, 3);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  hop_shard(f, 3, 0, 4, request->id, 5);
  assert_int_equal(pulled[0], 4);
  assert_int_equal(f->worker.fetches[0].nwaiting, 2);
  pull_via(f, 0, request->id, 5, 3);
  lose_hop(f, 3); /* none of this attempt has arrived */
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 1);
  hop_shard(f, 3, 0, 5, request->id, 6);
  assert_shard(0, 6);
  assert_int_equal(f->worker.fetches[0].nwaiting, 1);
}

/* Requested again on a new link: a former distributor's older attempt does not count. */
static void test_pull_asked_again(void **state) {
  fixture *f = *state;
  mlfab__request *request = pull_all(f, pulled);
  pull_via(f, 0, request->id, 4, 3);
  hop_model(f, 3, 0, 4, request->id, 0, 4096, 4, 0);
  lose_server(f, 0);
  greet(f, 0, 2, NULL);
  assert_int_equal(f->server.post_type, MLFAB__PULL);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  hop_shard(f, 3, 0, 4, request->id, 5);
  assert_int_equal(pulled[0], 4);
  assert_int_equal(f->worker.fetches[0].nwaiting, 2);
  pull_via(f, 0, request->id, 6, MLFAB__NO_NODE);
  shard(f, 0, request->id, 8);
  assert_shard(0, 8);
}

/* The shard may become complete while the server's link is down: then it is not requested again. */
static void test_pull_without_server(void **state) {
  fixture *f = *state;
  mlfab__request *request = pull_all(f, pulled);
  pull_via(f, 0, request->id, 4, 3);
  lose_server(f, 0);
  hop_shard(f, 3, 0, 4, request->id, 5);
  assert_shard(0, 5);
  uint32_t posts = f->server.posts;
  greet(f, 0, 2, NULL);
  assert_int_equal(f->server.posts, posts);
  shard(f, 1, request->id, 6);
  assert_int_equal(request->done, 1);
}

static void test_pull_ends(void **state) {
  fixture *f = *state;
  /* Cancelled: both servers are told, and the distributor's link is not wanted any more. */
  mlfab__request *request = pull_all(f, pulled);
  pull_via(f, 0, request->id, 4, 3);
  hop_model(f, 3, 0, 4, request->id, 0, 4096, 4, 0);
  f->now += 2000000000;
  uint32_t posts = f->server.posts;
  mlfab__worker_withdraw(&f->worker, request, MLFAB_ERR_TIMEOUT, f->now);
  assert_int_equal(request->result.status, MLFAB_ERR_TIMEOUT);
  assert_string_equal(f->requests.last.text,
                      "pull: the deadline passed after 2 s awaiting server 0 by way of worker 3");
  assert_int_equal(f->server.posts, posts + 2);
  assert_int_equal(f->server.post_type, MLFAB__PULL_CANCEL);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  memset(pulled, 0, sizeof pulled);
  hop_shard(f, 3, 0, 4, request->id, 5);
  pull_via(f, 0, request->id, 5, 3);
  assert_int_equal(pulled[0], 0);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
  /* The next pull has the same slot, but its own routes. */
  uint64_t before = request->id;
  mlfab__request_end(&f->requests, request);
  request = pull_all(f, pulled);
  hop_shard(f, 3, 0, 4, before, 5);
  assert_int_equal(pulled[0], 0);
  pull_via(f, 0, request->id, 2, 3);
  hop_shard(f, 3, 0, 2, request->id, 6);
  assert_shard(0, 6);
  /* Its other server dies. */
  pull_via(f, 1, request->id, 2, 3);
  mlfab__worker_dead(&f->worker, 1, f->now);
  assert_int_equal(request->result.status, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(request->result.rank, 1);
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
}

static void test_close_with_pulls(void **state) {
  fixture *f = *state;
  mlfab__request *request = pull_all(f, pulled);
  pull_via(f, 0, request->id, 4, 3);
  hop_model(f, 3, 0, 4, request->id, 0, 4096, 4, 0);
  mlfab__worker_free(&f->worker);
  assert_int_equal(f->env.bytes, 0);
}

/* --- bad frames --- */

/* This side was dropped with this text, and no other. */
static void assert_dropped(fixture *f, int hop, uint32_t peer, const char *text) {
  side *s = hop ? &f->hop : &f->server, *other = hop ? &f->server : &f->hop;
  assert_int_equal(s->drops, 1);
  assert_int_equal(other->drops, 0);
  assert_int_equal(s->drop_peer, peer);
  assert_string_equal(s->dropped, text);
  s->drops = 0;
}

/* One of the four new frames, cut or with an extra byte, breaks its link. */
static void cut(fixture *f, int hop, uint8_t type, const uint8_t *meta, uint32_t bytes,
                const char *text) {
  for (uint32_t n = 0; n <= bytes + 1; n++) {
    if (n == bytes) continue;
    (hop ? from_hop : from_server)(f, hop ? 3 : 1, type, meta, n, NULL, 0);
    assert_dropped(f, hop, hop ? 3 : 1, text);
  }
}

static void test_frames_that_do_not_parse(void **state) {
  fixture *f = *state;
  uint8_t meta[256];
  memset(meta, 0, sizeof meta);
  mlfab__via v = {1, 7, 1, 3};
  cut(f, 0, MLFAB__VIA, meta, mlfab__encode_via(meta, &v), "a malformed VIA");
  mlfab__pull_via p = {1, 7, 3};
  cut(f, 0, MLFAB__PULL_VIA, meta, mlfab__encode_pull_via(meta, &p), "a malformed PULL_VIA");
  mlfab__hop_grant g = {7, 1, SHARD, 0};
  cut(f, 1, MLFAB__HOP_GRANT, meta, mlfab__encode_hop_grant(meta, &g), "a malformed HOP_GRANT");
  mlfab__hop_model m = {.request = 1, .version = 1, .commit = 1, .server = 4};
  cut(f, 1, MLFAB__HOP_MODEL, meta, mlfab__encode_hop_model(meta, &m), "a malformed HOP_MODEL");
  for (uint32_t type = 0; type < 256; type++) {
    if (type == MLFAB__HOP_GRANT || type == MLFAB__HOP_MODEL) continue;
    from_hop(f, 4, (uint8_t)type, meta, 0, NULL, 0);
    assert_dropped(f, 1, 4, "a frame that no aggregator sends");
  }
}

static void test_frames_that_do_not_fit(void **state) {
  fixture *f = *state;
  uint32_t part[2] = {0, 1};
  push_some(f, part, 2, NULL);
  announced(f, 0);
  announced(f, 1);
  via(f, 0, 1, 0, 3);
  assert_dropped(f, 0, 0, "a malformed VIA");
  via(f, 0, 1, 7, WORKERS);
  assert_dropped(f, 0, 0, "a malformed VIA");
  via(f, 1, 1, 7, 3);
  assert_dropped(f, 0, 1, "a VIA for an update that is not planned");
  hop_grant(f, 3, 1, 1, 7, 10);
  assert_dropped(f, 1, 3, "a HOP_GRANT for an update that is not planned");
  hop_grant(f, 3, 0, 1, 0, 10);
  assert_dropped(f, 1, 3, "a malformed HOP_GRANT");
  hop_grant(f, 3, SERVERS, 1, 7, 10);
  assert_dropped(f, 1, 3, "a malformed HOP_GRANT");
  pull_via(f, 0, 1, 0, 3);
  assert_dropped(f, 0, 0, "a malformed PULL_VIA");
  pull_via(f, 0, 1, 1, WORKERS);
  assert_dropped(f, 0, 0, "a malformed PULL_VIA");
  hop_model(f, 3, SERVERS, 1, 1, 0, 4, 1, 0);
  assert_dropped(f, 1, 3, "a malformed HOP_MODEL");
  assert_int_equal(mlfab__worker_hop_wanted(&f->worker, 3), 0);
}

/* Model bytes outside the shard, the slice or the request, or none at all. */
static void test_model_that_does_not_fit(void **state) {
  fixture *f = *state;
  static const char *const text = "a HOP_MODEL frame that was not asked for";
  mlfab_buf buf = buffer(0, pulled);
  mlfab_request handle;
  mlfab_error error;
  assert_int_equal(mlfab__worker_pull(&f->worker, &buf, 1, 0, f->now, &handle, &error), 0);
  memset(pulled, 0, sizeof pulled);
  hop_model(f, 3, 0, 1, handle, SHARD, 4096, 1, 0); /* not requested */
  assert_dropped(f, 1, 3, text);
  mlfab__request *both = pull_all(f, pulled);
  hop_model(f, 3, 0, 1, both->id, SHARD, 4096, 1, 0); /* another server's */
  assert_dropped(f, 1, 3, text);
  hop_model(f, 3, 0, 1, handle, 4000, 100, 1, 0); /* beyond the end of its slice */
  assert_dropped(f, 1, 3, text);
  uint8_t meta[128], bulk[64] = {1};
  mlfab__hop_model m = {
      .request = handle, .bytes = 64, .version = 1, .commit = 1, .slice = 1, .attempt = 1};
  /* of another slice */
  uint32_t n = mlfab__encode_hop_model(meta, &m);
  from_hop(f, 3, MLFAB__HOP_MODEL, meta, n, bulk, sizeof bulk);
  assert_dropped(f, 1, 3, text);
  m.slice = 1000;
  n = mlfab__encode_hop_model(meta, &m);
  from_hop(f, 3, MLFAB__HOP_MODEL, meta, n, bulk, sizeof bulk);
  assert_dropped(f, 1, 3, text);
  m.slice = 0;
  n = mlfab__encode_hop_model(meta, &m);
  from_hop(f, 3, MLFAB__HOP_MODEL, meta, n, NULL, 64); /* a ghost */
  assert_dropped(f, 1, 3, text);
  mlfab__model direct = {
      .request = handle, .bytes = 64, .version = 1, .commit = 1, .flags = MLFAB__MODEL_LAST};
  pull_via(f, 0, handle, 2, MLFAB__NO_NODE);
  n = mlfab__encode_model(meta, &direct);
  from_server(f, 0, MLFAB__MODEL, meta, n, NULL, 64);
  assert_dropped(f, 0, 0, "a MODEL frame that was not asked for");
  for (uint32_t i = 0; i < BYTES; i++) assert_int_equal(pulled[i], 0);
  assert_int_equal(mlfab__request_find(&f->requests, handle)->done, 0);
}

/* --- packets to an aggregator --- */

/* Packets are not cut, wherever a grant ends; a packet that is not granted whole waits. */
static void test_packets_by_hop(void **state) {
  fixture *f = *state;
  static uint64_t indices[SHARD / 4];
  static float values[SHARD / 4];
  mlfab_error error;
  for (uint32_t i = 0; i < SHARD / 4; i++) indices[i] = i, values[i] = 1.0f;
  assert_int_equal(mlfab__worker_push_sparse(&f->worker, 0, indices, values, SHARD / 4, NULL,
                                             f->now, NULL, &error),
                   0);
  memset(values, 0, sizeof values);
  mlfab__push m = announced(f, 0);
  /* Sixteen slices of 4 KiB, a packet each. */
  const uint32_t one = 24 + 4096, all = 16 * one;
  assert_int_equal(m.flags, MLFAB__PUSH_PACKED | MLFAB__PUSH_PLANNED);
  assert_int_equal(m.bytes, all);
  via(f, 0, 1, 7, 3);
  hop_grant(f, 3, 0, 1, 7, one - 1);
  assert_int_equal(take(f, 1, 3), 0);
  hop_grant(f, 3, 0, 1, 7, one);
  mlfab__hop_chunk c = chunk(f, 3);
  assert_int_equal(f->out.bulk_bytes, one);
  assert_int_equal(c.offset, 0);
  assert_int_equal(c.total, all);
  hop_grant(f, 3, 0, 1, 7, UINT64_MAX);
  uint64_t at = one;
  while (take(f, 1, 3)) {
    assert_int_equal(mlfab__decode_hop_chunk(f->meta, f->out.meta_bytes, &c), 0);
    assert_int_equal(c.offset, at);
    assert_int_equal(f->out.bulk_bytes % one, 0);
    assert_true(f->out.bulk_bytes <= CHUNK);
    at += f->out.bulk_bytes;
  }
  assert_int_equal(at, all);
  /* The group starts again without this update: it goes directly, from its first packet. */
  via(f, 0, 1, 8, MLFAB__NO_NODE);
  grant(f, 0, 1, 2 * one + 5);
  assert_int_equal(take(f, 0, 0), 1);
  assert_int_equal(f->out.bulk_bytes, 2 * one);
  float first;
  memcpy(&first, (const uint8_t *)f->out.bulk + 24, 4);
  assert_true(first >= 1.0f && first <= 1.0f);
  assert_int_equal(take(f, 0, 0), 0);
  grant(f, 0, 1, all);
  while (take(f, 0, 0)) continue;
  report_all(f, LOAN_LIVE, 0, 0);
  report_all(f, LOAN_LIVE, 1, 3);
  report_all(f, LOAN_DETACHED, 1, 3);
  ack(f, 0, 1, 0, 1, 0);
  assert_int_equal(f->worker.norder, 0);
}

/* --- the peer that a pull waits for --- */

static void test_pull_tells_the_state(void **state) {
  fixture *f = *state;
  static uint8_t into[BYTES];
  mlfab__request *request = pull_all(f, into);
  mlfab_request id = request->id;
  mlfab__request_told(&f->requests, MLFAB__REQUEST_PULL, id, 1, 2,
                      ", the slowest, at server 1: SSP: V_train is 3");
  f->now += 2000000000;
  mlfab__worker_withdraw(&f->worker, request, MLFAB_ERR_TIMEOUT, f->now);
  assert_int_equal(request->result.rank, 2);
  assert_string_equal(f->requests.last.text,
                      "pull: the deadline passed after 2 s awaiting worker 2, the slowest, at "
                      "server 1: SSP: V_train is 3");
  /* A server that has answered since is not named. */
  mlfab__request_end(&f->requests, request);
  request = pull_all(f, into);
  char text[MLFAB__TEXT_MAX];
  memset(text, 'x', sizeof text);
  text[sizeof text - 1] = 0;
  mlfab__request_told(&f->requests, MLFAB__REQUEST_PULL, request->id, 0, 2, text);
  model(f, 0, request->id, 0, 4096, 1, MLFAB__MODEL_LAST);
  mlfab__worker_withdraw(&f->worker, request, MLFAB_ERR_TIMEOUT, f->now);
  assert_string_equal(f->requests.last.text,
                      "pull: the deadline passed after 0 ns awaiting server 1");
}

/* --- a change of consistency --- */

static mlfab_request change(fixture *f, uint32_t server, uint32_t tensor) {
  mlfab_sync sync = {.size = sizeof sync, .kind = MLFAB_SYNC_SSP, .staleness = 3};
  mlfab_request request = 0;
  mlfab_error error;
  assert_int_equal(
      mlfab__worker_set_sync(&f->worker, &sync, server, tensor, 0, f->now, &request, &error), 0);
  return request;
}

static void changed(fixture *f, uint32_t server, uint64_t ask, int code, uint32_t counts) {
  mlfab__sync_ack m = {.ask = ask, .code = code, .counts = counts};
  uint8_t meta[512];
  snprintf(m.text, sizeof m.text, "%s", code ? "it does not like it" : "");
  from_server(f, server, MLFAB__SYNC_ACK, meta, mlfab__encode_sync_ack(meta, &m), NULL, 0);
}

static mlfab__sync_ask asked(const fixture *f) {
  mlfab__sync_ask m;
  assert_int_equal(f->server.post_type, MLFAB__SYNC);
  assert_int_equal(mlfab__decode_sync_ask(f->server.post_meta, f->server.post_bytes, &m), 0);
  return m;
}

static void end_change(fixture *f, mlfab_request request, int code, int32_t rank,
                       const char *text) {
  mlfab__request *r = mlfab__request_find(&f->requests, request);
  assert_int_equal(r->done, 1);
  assert_int_equal(r->result.status, code);
  assert_int_equal(r->result.rank, rank);
  if (code) assert_string_equal(f->requests.last.text, text);
  mlfab__request_end(&f->requests, r);
}

static void test_set_sync(void **state) {
  fixture *f = *state;
  uint32_t posts = f->server.posts;
  mlfab_request request = change(f, MLFAB_ALL, 1);
  assert_int_equal(f->server.posts, posts + 2);
  mlfab__sync_ask m = asked(f);
  assert_int_equal(m.ask, 1);
  assert_int_equal(m.tensor, 1);
  assert_int_equal(m.consistency.kind, MLFAB_SYNC_SSP);
  assert_int_equal(m.consistency.staleness, 3);
  changed(f, 0, 0, 0, 1); /* news only */
  changed(f, 1, 1, 0, 1);
  changed(f, 1, 1, 0, 1); /* repeated */
  assert_int_equal(mlfab__request_find(&f->requests, request)->done, 0);
  assert_int_equal(f->worker.streams[1].counts, 1);
  changed(f, 0, 1, 0, 1);
  end_change(f, request, 0, MLFAB_NO_RANK, NULL);
  /* One server only; its answer to another request does not count. */
  posts = f->server.posts;
  request = change(f, 1, MLFAB_ALL);
  assert_int_equal(f->server.posts, posts + 1);
  assert_int_equal(f->server.post_peer, 1);
  changed(f, 1, 1, 0, 1);
  changed(f, 0, 2, 0, 1);
  assert_int_equal(mlfab__request_find(&f->requests, request)->done, 0);
  changed(f, 1, 2, 0, 0);
  end_change(f, request, 0, MLFAB_NO_RANK, NULL);
  assert_int_equal(f->worker.streams[1].counts, 0);
}

static void test_set_sync_fails(void **state) {
  fixture *f = *state;
  mlfab_request request = change(f, MLFAB_ALL, MLFAB_ALL);
  changed(f, 1, 1, MLFAB_ERR_UNSUPPORTED, 0);
  changed(f, 0, 1, MLFAB_ERR_LIMIT, 0); /* the first error is reported */
  end_change(f, request, MLFAB_ERR_UNSUPPORTED, 1, "set_sync: server 1: it does not like it");
  request = change(f, MLFAB_ALL, MLFAB_ALL);
  changed(f, 0, 2, 0, 0);
  f->now += 3000000000;
  mlfab__worker_withdraw(&f->worker, mlfab__request_find(&f->requests, request), MLFAB_ERR_TIMEOUT,
                         f->now);
  end_change(f, request, MLFAB_ERR_TIMEOUT, 1,
             "set_sync: the deadline passed after 3 s awaiting server 1; it may still change "
             "there");
  changed(f, 1, 2, 0, 0);
  /* On a new link the request is repeated, but only to servers that have not answered. */
  request = change(f, MLFAB_ALL, MLFAB_ALL);
  changed(f, 0, 3, 0, 0);
  lose_server(f, 0);
  lose_server(f, 1);
  uint32_t posts = f->server.posts;
  greet(f, 0, 2, NULL);
  assert_int_equal(f->server.posts, posts);
  greet(f, 1, 2, NULL);
  assert_int_equal(f->server.posts, posts + 1);
  assert_int_equal(asked(f).ask, 3);
  changed(f, 1, 3, 0, 0);
  end_change(f, request, 0, MLFAB_NO_RANK, NULL);
  /* A server whose link is down gets the request when it is back; or never. */
  lose_server(f, 1);
  posts = f->server.posts;
  request = change(f, 1, MLFAB_ALL);
  assert_int_equal(f->server.posts, posts);
  mlfab__worker_dead(&f->worker, 1, f->now);
  end_change(f, request, MLFAB_ERR_PEER_DEAD, 1, "set_sync: server 1 is dead");
  request = change(f, 0, MLFAB_ALL); /* which does not need it */
  changed(f, 0, 5, 0, 0);
  end_change(f, request, 0, MLFAB_NO_RANK, NULL);
}

static void test_set_sync_is_checked(void **state) {
  fixture *f = *state;
  mlfab_sync sync = {.size = sizeof sync, .kind = MLFAB_SYNC_SSP, .staleness = -1};
  mlfab_request request = 0;
  mlfab_error error;
  const struct {
    const mlfab_sync *sync;
    uint32_t server, tensor;
    int code;
    const char *text;
  } wrong[] = {
      {NULL, 0, 0, MLFAB_ERR_ARGUMENT, "sync is NULL"},
      {&sync, 0, 0, MLFAB_ERR_ARGUMENT, "staleness"},
      {&sync, SERVERS, 0, MLFAB_ERR_ARGUMENT, "set_sync: there is no server 2, there are 2"},
      {&sync, 0, 7, MLFAB_ERR_TENSOR, "set_sync: there is no tensor 7"}};
  uint32_t posts = f->server.posts;
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    assert_int_equal(mlfab__worker_set_sync(&f->worker, wrong[i].sync, wrong[i].server,
                                            wrong[i].tensor, 0, f->now, &request, &error),
                     wrong[i].code);
    assert_non_null(strstr(error.text, wrong[i].text));
  }
  assert_int_equal(f->server.posts, posts);
  assert_int_equal(f->requests.open, 0);
  change(f, 0, MLFAB_ALL);
  sync.staleness = 0;
  assert_int_equal(mlfab__worker_set_sync(&f->worker, &sync, 1, 0, 0, f->now, &request, &error),
                   MLFAB_ERR_AGAIN);
  uint8_t meta[4] = {0};
  from_server(f, 0, MLFAB__SYNC_ACK, meta, 3, NULL, 0);
  assert_dropped(f, 0, 0, "a malformed SYNC_ACK");
}

/* --- updates in any order of events --- */

/* Servers, aggregators and links obey the protocol, with every possible event at random. Frames to the
 * worker wait in one queue per link, so that an aggregator's grant can arrive before the server's VIA, or
 * after the end. */
enum { PLAY_UPDATES = 48, PLAY_BUFFERS = 6, PLAY_GROUPS = 1024, PLAY_QUEUE = 256 };

typedef struct letter {
  uint8_t type, meta[96];
  uint32_t bytes;
  /* Its meaning, for the checks on arrival. */
  uint64_t seq, group, upto;
  uint32_t server, aggregator;
} letter;

typedef struct mailbox {
  letter letters[PLAY_QUEUE];
  uint32_t first, n;
} mailbox;

typedef struct play_part { /* of an update at a server, as the server sees it */
  enum { PLAY_ABSENT, PLAY_WAITS, PLAY_GROUPED, PLAY_DIRECT, PLAY_DECIDED } state;
  uint64_t group;             /* its current group */
  uint64_t granted, received; /* over the server's link */
  uint64_t told;              /* newest number that the worker knows */
} play_part;

typedef struct play_group { /* one number of a server, as its aggregator sees it */
  uint64_t seq;
  uint32_t aggregator;
  uint64_t granted, heard, received; /* heard: delivered grants */
  int over;
} play_group;

typedef struct play {
  fixture f;
  mlfab__rng prng;
  mlfab__window windows[SERVERS];
  uint32_t generations[SERVERS];
  uint64_t numbers[SERVERS];
  play_group groups[SERVERS][PLAY_GROUPS];
  play_part parts[PLAY_UPDATES + 1][SERVERS];
  uint8_t down[SERVERS];
  mailbox from_server[SERVERS], from_hop[WORKERS];
  uint8_t buffers[PLAY_BUFFERS][BYTES];
  uint64_t owner[PLAY_BUFFERS]; /* the update that uses it, or 0: the caller */
  uint32_t buffer_of[PLAY_UPDATES + 1];
  mlfab__request *requests[PLAY_UPDATES + 1];
  uint64_t pushed, finished;
  uint32_t hop_chunks, adopted, rerouted, hops_lost,
      servers_lost; /* so that the test can check that they occurred */
} play;

/* The contents of an update at each eighth byte. */
static uint64_t play_word(uint64_t seq, uint64_t at) { return seq << 32 | at; }

static uint32_t below(play *p, uint32_t n) { return (uint32_t)mlfab__rng_below(&p->prng, n); }

static letter *play_send(mailbox *box, uint8_t type) {
  assert_true(box->n < PLAY_QUEUE);
  letter *l = &box->letters[(box->first + box->n++) % PLAY_QUEUE];
  memset(l, 0, sizeof *l);
  l->type = type;
  return l;
}

/* A server decides its oldest undecided update; those before it that it never received are skipped. */
static void play_decide(play *p, uint32_t s, uint64_t seq, int code) {
  play_part *part = &p->parts[seq][s];
  for (uint64_t i = 1; i < seq; i++) {
    assert_true(p->parts[i][s].state == PLAY_DECIDED || p->parts[i][s].state == PLAY_ABSENT);
    p->parts[i][s].state = PLAY_DECIDED;
  }
  if (part->state == PLAY_GROUPED) p->groups[s][part->group].over = 1;
  part->state = PLAY_DECIDED;
  mlfab__windows_decide(&p->windows[s], seq, 1, code);
  letter *l = play_send(&p->from_server[s], MLFAB__PUSH_ACK);
  mlfab__push_ack m = {seq, 1, p->generations[s], code, seq, 3, 0};
  l->bytes = mlfab__encode_push_ack(l->meta, &m);
}

static uint64_t play_oldest(const play *p, uint32_t s) {
  for (uint64_t i = 1; i <= p->pushed; i++) {
    if (p->parts[i][s].state != PLAY_DECIDED && p->parts[i][s].state != PLAY_ABSENT) return i;
  }
  return 0;
}

/* The server withdraws what it can, in order, after the worker's WITHDRAW. */
static void play_posted(fixture *f, uint32_t server, uint8_t type, const void *meta,
                        uint32_t bytes) {
  play *p = (play *)(void *)f;
  if (type != MLFAB__WITHDRAW || p->down[server]) return;
  mlfab__withdraw m;
  assert_int_equal(mlfab__decode_withdraw(meta, bytes, &m), 0);
  play_part *part = &p->parts[m.seq][server];
  if (m.generation != p->generations[server] || part->state == PLAY_DECIDED) return;
  uint64_t received =
      part->state == PLAY_GROUPED ? p->groups[server][part->group].received : part->received;
  if (received == SHARD && m.seq == play_oldest(p, server)) {
    play_decide(p, server, m.seq, 0); /* too late */
    return;
  }
  if (part->state == PLAY_GROUPED) p->groups[server][part->group].over = 1;
  part->state = PLAY_WAITS;
  part->received = UINT64_MAX; /* to be decided as withdrawn in its turn */
}

/* Routes an update at a server: to a group at an aggregator, or (NO_NODE) directly. */
static void play_route(play *p, uint32_t s, uint64_t seq, uint32_t aggregator) {
  play_part *part = &p->parts[seq][s];
  uint64_t number = ++p->numbers[s];
  assert_true(number < PLAY_GROUPS);
  if (part->state == PLAY_GROUPED) p->groups[s][part->group].over = 1;
  part->state = aggregator == MLFAB__NO_NODE ? PLAY_DIRECT : PLAY_GROUPED;
  part->group = number;
  part->granted = part->received = 0;
  p->groups[s][number] = (play_group){seq, aggregator, 0, 0, 0, 0};
  letter *l = play_send(&p->from_server[s], MLFAB__VIA);
  mlfab__via m = {seq, number, p->generations[s], aggregator};
  l->bytes = mlfab__encode_via(l->meta, &m);
  l->seq = seq;
  l->group = number;
  l->upto = m.generation;
  l->server = s;
  l->aggregator = aggregator;
}

/* A random event for a random update that the server has not decided. */
static void play_server(play *p, uint32_t s) {
  uint64_t oldest = play_oldest(p, s), seq = oldest + below(p, 2) * below(p, PLAY_BUFFERS);
  if (oldest == 0 || seq > p->pushed) return;
  play_part *part = &p->parts[seq][s];
  if (part->state == PLAY_ABSENT || part->state == PLAY_DECIDED) return;
  if (part->received == UINT64_MAX) {
    if (seq == oldest) play_decide(p, s, seq, MLFAB_ERR_WITHDRAWN);
    return;
  }
  play_group *group = &p->groups[s][part->group];
  if (part->state == PLAY_WAITS && seq == oldest && below(p, 12) == 0) {
    play_decide(p, s, seq, MLFAB_ERR_DROPPED);
  } else if (part->state == PLAY_WAITS && below(p, 4) == 0) {
    /* Never in a group: granted without a VIA. */
    part->state = PLAY_DIRECT;
    part->group = 0;
    part->granted = part->received = 0;
  } else if (part->state == PLAY_WAITS || (part->state == PLAY_GROUPED && below(p, 8) == 0)) {
    p->rerouted += part->state == PLAY_GROUPED;
    int direct = below(p, 3) == 0 || p->numbers[s] > PLAY_GROUPS / 2;
    play_route(p, s, seq, direct ? MLFAB__NO_NODE : below(p, WORKERS));
  } else if (part->state == PLAY_DIRECT && part->received == SHARD && seq == oldest) {
    play_decide(p, s, seq, 0);
  } else if (part->state == PLAY_GROUPED && group->received == SHARD && seq == oldest) {
    play_decide(p, s, seq, below(p, 8) ? 0 : MLFAB_ERR_NOT_FINITE);
  } else if (part->state == PLAY_DIRECT && part->granted < SHARD) {
    part->granted = mlfab__min(SHARD, part->granted + 4096 * (1 + below(p, 16)));
    letter *l = play_send(&p->from_server[s], MLFAB__GRANT);
    mlfab__grant m = {seq, part->granted, p->generations[s]};
    l->bytes = mlfab__encode_grant(l->meta, &m);
  }
}

/* The aggregator grants more of a server's group. */
static void play_aggregator(play *p, uint32_t s) {
  uint64_t number = p->numbers[s];
  play_group *group = &p->groups[s][number];
  for (uint32_t skip = below(p, 3); number > 0; group = &p->groups[s][--number]) {
    int goes = !group->over && group->aggregator != MLFAB__NO_NODE && group->granted < SHARD;
    if (goes && skip-- == 0) break;
  }
  if (number == 0) return;
  group->granted = mlfab__min(SHARD, group->granted + 4096 * (1 + below(p, 16)));
  letter *l = play_send(&p->from_hop[group->aggregator], MLFAB__HOP_GRANT);
  mlfab__hop_grant m = {number, group->seq, group->granted, s};
  l->bytes = mlfab__encode_hop_grant(l->meta, &m);
  l->seq = group->seq;
  l->group = number;
  l->upto = group->granted;
  l->server = s;
  l->aggregator = group->aggregator;
}

/* Does the worker have an announced update of this stream that this frame is about? */
static int play_listens(const play *p, const letter *l) {
  const mlfab__worker *worker = &p->f.worker;
  if ((l->type != MLFAB__VIA && l->type != MLFAB__HOP_GRANT) || !worker->streams[l->server].up)
    return 0;
  if (l->type == MLFAB__VIA && l->upto != worker->streams[l->server].generation) return 0;
  for (uint32_t i = 0; i < worker->norder; i++) {
    const mlfab__outgoing *update = &worker->updates[worker->order[i]];
    if (update->seq == l->seq) return update->parts[l->server].state == MLFAB__PART_ANNOUNCED;
  }
  return 0;
}

/* Delivers a frame, and records what the worker now knows, to check what it sends. */
static void play_deliver(play *p, mailbox *box, int hop, uint32_t peer) {
  if (box->n == 0) return;
  letter l = box->letters[box->first];
  box->first = (box->first + 1) % PLAY_QUEUE;
  box->n--;
  play_part *part = &p->parts[l.seq][l.server];
  uint64_t before = part->told;
  if (play_listens(p, &l) && l.group > part->told) part->told = l.group;
  if (l.type == MLFAB__HOP_GRANT) {
    play_group *group = &p->groups[l.server][l.group];
    group->heard = mlfab__max(group->heard, l.upto);
    p->adopted += part->told > before;
  }
  (hop ? from_hop : from_server)(&p->f, peer, l.type, l.meta, l.bytes, NULL, 0);
}

/* Lent bytes have not changed. */
static void play_check_bytes(const play *p, uint64_t seq, uint32_t s, uint64_t offset) {
  const uint8_t *data = p->f.out.bulk;
  const uint8_t *pristine = p->buffers[p->buffer_of[seq]] + s * SHARD + offset;
  assert_int_equal(p->owner[p->buffer_of[seq]], seq); /* never after it was returned */
  assert_ptr_equal(data, pristine);
  for (uint32_t i = 0; i < p->f.out.bulk_bytes; i += 8) {
    uint64_t word;
    memcpy(&word, data + i, 8);
    if (word != play_word(seq, s * SHARD + offset + i)) fail();
  }
}

static void play_take_hop(play *p, uint32_t aggregator) {
  uint32_t ready = p->f.hop.ready[aggregator];
  if (!take(&p->f, 1, aggregator)) {
    p->f.hop.ready[aggregator] = 0;
    return;
  }
  assert_true(ready > 0); /* otherwise the node would not have called */
  mlfab__hop_chunk m;
  assert_int_equal(p->f.out.type, MLFAB__HOP_CHUNK);
  assert_int_equal(mlfab__decode_hop_chunk(p->f.meta, p->f.out.meta_bytes, &m), 0);
  play_group *group = &p->groups[m.server][m.group];
  play_part *part = &p->parts[m.seq][m.server];
  assert_int_equal(group->seq, m.seq);
  assert_int_equal(group->aggregator, aggregator);
  assert_true(m.group >= part->told);
  assert_int_equal(m.offset, group->received);
  assert_true(p->f.out.bulk_bytes > 0);
  assert_true(m.offset + p->f.out.bulk_bytes <= group->heard);
  play_check_bytes(p, m.seq, m.server, m.offset);
  group->received += p->f.out.bulk_bytes;
  p->hop_chunks++;
}

static void play_take_server(play *p, uint32_t s) {
  if (p->down[s] || !take(&p->f, 0, s)) return;
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  static uint64_t versions[MLFAB__SLICES_MAX];
  mlfab__push push;
  mlfab__chunk m;
  if (p->f.out.type == MLFAB__PUSH) {
    assert_int_equal(mlfab__decode_push(p->f.meta, p->f.out.meta_bytes, &push, segments, versions),
                     0);
    if (push.generation != p->generations[s]) return;
    play_part *part = &p->parts[push.seq][s];
    assert_int_equal(part->state, PLAY_ABSENT);
    part->state = PLAY_WAITS;
    return;
  }
  assert_int_equal(p->f.out.type, MLFAB__CHUNK);
  assert_int_equal(mlfab__decode_chunk(p->f.meta, p->f.out.meta_bytes, &m), 0);
  if (m.generation != p->generations[s]) return;
  play_part *part = &p->parts[m.seq][s];
  assert_int_equal(part->state, PLAY_DIRECT);
  assert_int_equal(m.offset, part->received);
  assert_true(m.offset + p->f.out.bulk_bytes <= part->granted);
  play_check_bytes(p, m.seq, s, m.offset);
  part->received += p->f.out.bulk_bytes;
}

static void play_lose_hop(play *p, uint32_t aggregator) {
  p->hops_lost++;
  p->from_hop[aggregator].n = 0;
  lose_hop(&p->f, aggregator);
  /* The aggregator gives up those numbers; the servers choose other routes later. */
  for (uint32_t s = 0; s < SERVERS; s++) {
    for (uint64_t i = 1; i <= p->numbers[s]; i++) {
      play_group *group = &p->groups[s][i];
      if (group->aggregator != aggregator || group->over) continue;
      group->over = 1;
      group->received = 0; /* never complete */
    }
  }
}

/* The state that a server forgets when the stream starts again. */
static void play_reset(play *p, uint32_t s) {
  p->generations[s]++;
  for (uint64_t i = 1; i <= p->pushed; i++) {
    play_part *part = &p->parts[i][s];
    if (part->state == PLAY_DECIDED || part->state == PLAY_ABSENT) continue;
    if (part->state == PLAY_GROUPED) p->groups[s][part->group].over = 1;
    uint64_t told = part->told;
    memset(part, 0, sizeof *part);
    part->told = told;
  }
}

static void play_resend(play *p, uint32_t s) {
  play_reset(p, s);
  letter *l = play_send(&p->from_server[s], MLFAB__RESEND);
  mlfab__resend m = {p->generations[s], p->windows[s].top, {0, 0, 0, 0}, {0, 0, 0, 0}};
  memcpy(m.applied, p->windows[s].applied, sizeof m.applied);
  memcpy(m.dropped, p->windows[s].dropped, sizeof m.dropped);
  l->bytes = mlfab__encode_resend(l->meta, &m);
}

static void play_link(play *p, uint32_t s) {
  if (p->down[s]) {
    p->down[s] = 0;
    greet(&p->f, s, p->generations[s], &p->windows[s]);
    return;
  }
  p->servers_lost++;
  p->down[s] = 1;
  p->from_server[s].n = 0;
  play_reset(p, s);
  lose_server(&p->f, s);
}

static void play_push(play *p) {
  uint32_t b = 0;
  while (b < PLAY_BUFFERS && p->owner[b] != 0) b++;
  if (b == PLAY_BUFFERS || p->pushed == PLAY_UPDATES) return;
  uint64_t seq = ++p->pushed;
  for (uint32_t i = 0; i < BYTES; i += 8) {
    uint64_t word = play_word(seq, i);
    memcpy(p->buffers[b] + i, &word, 8);
  }
  p->owner[b] = seq;
  p->buffer_of[seq] = b;
  mlfab_buf buf = buffer(MLFAB_ALL, p->buffers[b]);
  mlfab_request request;
  mlfab_error error;
  assert_int_equal(mlfab__worker_push(&p->f.worker, &buf, 1, NULL, p->f.now, &request, &error), 0);
  p->requests[seq] = mlfab__request_find(&p->f.requests, request);
  assert_int_equal(p->requests[seq]->result.seq, seq);
}

/* The caller gets each finished buffer back once, and overwrites it. */
static void play_collect(play *p) {
  for (uint64_t seq = 1; seq <= p->pushed; seq++) {
    mlfab__request *request = p->requests[seq];
    uint32_t b = p->buffer_of[seq];
    if (!request || !request->done) continue;
    for (uint32_t i = 0; i < p->f.nloans; i++) {
      const loan *l = &p->f.loans[i];
      assert_false(l->state == LOAN_LIVE && l->data >= p->buffers[b] &&
                   l->data < p->buffers[b] + BYTES);
    }
    assert_int_equal(p->owner[b], seq);
    p->owner[b] = 0;
    p->finished++;
    memset(p->buffers[b], 0xee, BYTES);
    mlfab__request_end(&p->f.requests, request);
    p->requests[seq] = NULL;
  }
}

/* An update that is decided everywhere and lent nowhere is finished. */
static void play_no_delay(const play *p) {
  for (uint32_t i = 0; i < p->f.worker.norder; i++) {
    const mlfab__outgoing *update = &p->f.worker.updates[p->f.worker.order[i]];
    const uint8_t *b = p->buffers[p->buffer_of[update->seq]];
    int open = 0;
    for (uint32_t s = 0; s < SERVERS; s++) open |= update->parts[s].state != MLFAB__PART_DECIDED;
    for (uint32_t k = 0; k < p->f.nloans; k++) {
      const loan *l = &p->f.loans[k];
      open |= l->state == LOAN_LIVE && l->data >= b && l->data < b + BYTES;
    }
    assert_true(open);
  }
}

static void play_report(play *p) {
  if (p->f.nloans == 0) return;
  uint32_t from = below(p, p->f.nloans);
  for (uint32_t i = 0; i < p->f.nloans; i++) {
    loan *l = &p->f.loans[(i + from) % p->f.nloans];
    if (l->state == LOAN_FREE) continue;
    if (l->state == LOAN_DETACHED && below(p, 2)) {
      l->state = LOAN_FREE; /* it may never be reported */
      return;
    }
    report(&p->f, l);
    return;
  }
}

static void play_cancel(play *p) {
  uint64_t seq = 1 + below(p, (uint32_t)p->pushed);
  mlfab__request *request = p->requests[seq];
  if (!request || request->done) return;
  mlfab__worker_withdraw(&p->f.worker, request, MLFAB_ERR_CANCELLED, p->f.now);
}

static void play_step(play *p, int calm) {
  uint32_t what = below(p, calm ? 953 : 1000), s = below(p, SERVERS), a = below(p, WORKERS);
  while (what >= 180 && what < 310 && a + 1 < WORKERS && p->from_hop[a].n == 0) a++;
  while (what >= 640 && what < 800 && a + 1 < WORKERS && p->f.hop.ready[a] == 0) a++;
  if (p->down[s] && below(p, 8) == 0) play_link(p, s);
  p->f.now += 1000;
  if (p->pushed == 0 || what < 50) {
    if (!calm) play_push(p);
  } else if (what < 180) {
    play_deliver(p, &p->from_server[s], 0, s);
  } else if (what < 310) {
    play_deliver(p, &p->from_hop[a], 1, a);
  } else if (what < 420) {
    if (!p->down[s]) play_server(p, s);
  } else if (what < 560) {
    play_aggregator(p, s);
  } else if (what < 640) {
    play_take_server(p, s);
  } else if (what < 800) {
    play_take_hop(p, a);
  } else if (what < 953) {
    play_report(p);
  } else if (what < 965) {
    play_lose_hop(p, a);
  } else if (what < 977) {
    if (!p->down[s] && below(p, 3) == 0) play_link(p, s);
  } else if (what < 985) {
    if (!p->down[s] && below(p, 3) == 0) play_resend(p, s);
  } else {
    play_cancel(p);
  }
  play_collect(p);
  play_no_delay(p);
}

/* Groups that a lost link has ended, which the server has not been told yet. */
static void play_heal(play *p) {
  for (uint32_t s = 0; s < SERVERS; s++) {
    if (p->down[s]) play_link(p, s);
    for (uint64_t i = 1; i <= p->pushed; i++) {
      play_part *part = &p->parts[i][s];
      if (part->state == PLAY_GROUPED && p->groups[s][part->group].over)
        play_route(p, s, i, MLFAB__NO_NODE);
    }
  }
}

static play the_play;

static void play_seed(uint64_t seed, uint64_t totals[5]) {
  play *p = &the_play;
  memset(p, 0, sizeof *p);
  begin(&p->f, MLFAB_SCHEDULER_BESIDE);
  define(&p->f, NULL);
  p->f.posted = play_posted;
  mlfab__rng_seed(&p->prng, seed);
  for (uint32_t s = 0; s < SERVERS; s++) p->generations[s] = 1;
  for (uint32_t i = 0; i < 2000; i++) {
    play_step(p, 0);
    if (i % 40 == 0) play_heal(p);
  }
  for (uint32_t i = 0; i < 20000 && p->f.worker.norder > 0; i++) {
    play_heal(p);
    play_step(p, 1);
  }
  if (p->f.worker.norder > 0) print_message("MLFAB_SEED=%llu\n", (unsigned long long)seed);
  assert_int_equal(p->f.worker.norder, 0);
  assert_int_equal(p->finished, p->pushed);
  assert_int_equal(p->f.server.drops + p->f.hop.drops, 0);
  for (uint32_t a = 0; a < WORKERS; a++)
    assert_int_equal(mlfab__worker_hop_wanted(&p->f.worker, a), 0);
  uint32_t seen[5] = {p->hop_chunks, p->adopted, p->rerouted, p->hops_lost, p->servers_lost};
  for (int i = 0; i < 5; i++) totals[i] += seen[i];
  mlfab__worker_free(&p->f.worker);
  assert_int_equal(p->f.env.bytes, 0);
}

static void test_updates_at_random(void **state) {
  (void)state;
  uint64_t totals[5] = {0, 0, 0, 0, 0};
  const char *first = getenv("MLFAB_SEED");
  uint64_t from = first ? strtoull(first, NULL, 10) : 1, to = first ? from + 1 : 1001;
  for (uint64_t seed = from; seed < to; seed++) play_seed(seed, totals);
  /* Every interesting event has occurred, and often. */
  for (int i = 0; i < 5 && !first; i++) assert_true(totals[i] > 1000);
}

/* --- pulls in any order of events --- */

/* Each route of a server brings its own bytes, so that the test can see that a shard came over one route.
 * Former distributors go on until their link is lost, because nobody tells them. */
enum { WALK_WAYS = 256 };

typedef struct walk_way {
  uint64_t request;
  uint32_t hop; /* distributor or NO_NODE */
  uint32_t at;  /* the next slice of the shard */
} walk_way;

typedef struct walk_server {
  enum { WALK_IDLE, WALK_HELD, WALK_SPREAD, WALK_DIRECT } state;
  uint64_t request;
  uint32_t way, ways; /* the newest route; the routes of all its pulls */
  walk_way list[WALK_WAYS];
} walk_server;

typedef struct walk {
  fixture f;
  mlfab__rng prng;
  walk_server servers[SERVERS];
  uint8_t down[SERVERS], wanted[WORKERS];
  mailbox from_server[SERVERS], from_hop[WORKERS];
  uint8_t buffers[2][BYTES];
  uint32_t turn, pulls, cancelled, done_by_hop, adopted, stale;
  mlfab__request *request;
} walk;

static uint32_t walk_below(walk *w, uint32_t n) { return (uint32_t)mlfab__rng_below(&w->prng, n); }

static void walk_posted(fixture *f, uint32_t server, uint8_t type, const void *meta,
                        uint32_t bytes) {
  walk *w = (walk *)(void *)f;
  walk_server *s = &w->servers[server];
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  static uint64_t sinces[MLFAB__SLICES_MAX];
  mlfab__pull pull;
  mlfab__pull_done done;
  mlfab__pull_cancel cancel;
  if (w->down[server]) return;
  if (type == MLFAB__PULL) {
    assert_int_equal(mlfab__decode_pull(meta, bytes, &pull, segments, sinces), 0);
    assert_int_equal(s->state, WALK_IDLE);
    s->state = WALK_HELD;
    s->request = pull.request;
  } else if (type == MLFAB__PULL_DONE) {
    assert_int_equal(mlfab__decode_pull_done(meta, bytes, &done), 0);
    assert_true(s->state != WALK_IDLE && s->request == done.request);
    s->state = WALK_IDLE;
    w->done_by_hop++;
  } else if (type == MLFAB__PULL_CANCEL) {
    assert_int_equal(mlfab__decode_pull_cancel(meta, bytes, &cancel), 0);
    s->state = WALK_IDLE;
  }
}

static void walk_route(walk *w, uint32_t server, uint32_t hop) {
  walk_server *s = &w->servers[server];
  int told = s->ways > 0 || hop != MLFAB__NO_NODE;
  assert_true(s->ways + 1 < WALK_WAYS);
  s->way = ++s->ways;
  s->list[s->way] = (walk_way){s->request, hop, 0};
  s->state = hop == MLFAB__NO_NODE ? WALK_DIRECT : WALK_SPREAD;
  if (!told) return; /* there never was a distributor, and the worker knows it */
  letter *l = play_send(&w->from_server[server], MLFAB__PULL_VIA);
  mlfab__pull_via m = {s->request, s->way, hop};
  l->bytes = mlfab__encode_pull_via(l->meta, &m);
}

/* Sends the next slice of a route. */
static void walk_model(walk *w, uint32_t server, uint32_t number) {
  walk_way *way = &w->servers[server].list[number];
  int direct = way->hop == MLFAB__NO_NODE;
  letter *l = play_send(direct ? &w->from_server[server] : &w->from_hop[way->hop],
                        direct ? MLFAB__MODEL : MLFAB__HOP_MODEL);
  l->seq = way->request;
  l->server = server;
  l->group = number;
  l->upto = way->at++;
  l->aggregator = way->hop;
}

static void walk_server_acts(walk *w, uint32_t server) {
  walk_server *s = &w->servers[server];
  walk_way *way = &s->list[s->way];
  int anew = s->state == WALK_HELD || (s->state == WALK_SPREAD && walk_below(w, 20) == 0) ||
             (s->state == WALK_SPREAD && way->hop == MLFAB__NO_NODE);
  if (w->down[server] || s->state == WALK_IDLE) return;
  if (anew) {
    int direct = walk_below(w, 4) == 0 || s->ways > WALK_WAYS / 2;
    walk_route(w, server, direct ? MLFAB__NO_NODE : walk_below(w, WORKERS));
  } else if (s->state == WALK_DIRECT && way->at < SHARD / 4096) {
    walk_model(w, server, s->way);
    if (way->at == SHARD / 4096) s->state = WALK_IDLE;
  }
}

/* A distributor sends: the newest routes, and sometimes former ones. */
static void walk_distributor(walk *w, uint32_t server) {
  walk_server *s = &w->servers[server];
  uint32_t back = walk_below(w, 3) ? 0 : walk_below(w, 3);
  if (s->way <= back) return;
  walk_way *way = &s->list[s->way - back];
  if (way->hop != MLFAB__NO_NODE && way->at < SHARD / 4096) walk_model(w, server, s->way - back);
}

static void walk_deliver(walk *w, mailbox *box, int hop, uint32_t peer) {
  if (box->n == 0) return;
  letter l = box->letters[box->first];
  box->first = (box->first + 1) % PLAY_QUEUE;
  box->n--;
  if (l.type == MLFAB__PULL_VIA) {
    from_server(&w->f, peer, l.type, l.meta, l.bytes, NULL, 0);
    return;
  }
  uint32_t flags = l.upto + 1 == SHARD / 4096 ? MLFAB__MODEL_LAST : 0;
  uint64_t at = l.server * SHARD + l.upto * 4096;
  const mlfab__fetch_part *part = &w->f.worker.fetches[0].parts[l.server];
  if (hop) {
    int open = w->f.worker.fetches[0].request == l.seq && part->waiting;
    w->adopted += open && l.group > part->attempt;
    w->stale += open && l.group < part->attempt;
    hop_model(&w->f, peer, l.server, (uint32_t)l.group, l.seq, at, 4096, (uint8_t)l.group, flags);
  } else {
    model(&w->f, l.server, l.seq, at, 4096, (uint8_t)l.group, flags);
  }
}

static void walk_lose_hop(walk *w, uint32_t hop) {
  w->from_hop[hop].n = 0;
  for (uint32_t s = 0; s < SERVERS; s++) {
    for (uint32_t i = 1; i <= w->servers[s].ways; i++) {
      if (w->servers[s].list[i].hop == hop) w->servers[s].list[i].hop = MLFAB__NO_NODE;
    }
  }
  lose_hop(&w->f, hop);
}

static void walk_link(walk *w, uint32_t s) {
  w->down[s] ^= 1;
  if (!w->down[s]) {
    greet(&w->f, s, 1, NULL);
    return;
  }
  w->from_server[s].n = 0;
  w->servers[s].state = WALK_IDLE;
  lose_server(&w->f, s);
}

static void walk_pull(walk *w) {
  mlfab_buf buf = buffer(MLFAB_ALL, w->buffers[w->turn]);
  mlfab_request request;
  mlfab_error error;
  memset(w->buffers[w->turn], 0, BYTES);
  memset(w->buffers[1 - w->turn], 0xee, BYTES); /* the caller's: it must not be written any more */
  assert_int_equal(mlfab__worker_pull(&w->f.worker, &buf, 1, 0, w->f.now, &request, &error), 0);
  w->request = mlfab__request_find(&w->f.requests, request);
  w->pulls++;
}

static void walk_collect(walk *w) {
  if (!w->request || !w->request->done) return;
  const uint8_t *data = w->buffers[w->turn];
  for (uint32_t i = 0; i < BYTES && w->request->result.status == 0; i++) {
    if (data[i] == 0 || data[i] != data[i / SHARD * SHARD]) fail();
  }
  for (uint32_t i = 0; i < BYTES; i++) {
    if (w->buffers[1 - w->turn][i] != 0xee) fail();
  }
  mlfab__request_end(&w->f.requests, w->request);
  w->request = NULL;
  w->turn = 1 - w->turn;
}

static void walk_step(walk *w, int calm) {
  uint32_t what = walk_below(w, calm ? 985 : 1000), s = walk_below(w, SERVERS),
           a = walk_below(w, WORKERS), ready[WORKERS];
  memcpy(ready, w->f.hop.ready, sizeof ready);
  while (what >= 250 && what < 500 && a + 1 < WORKERS && w->from_hop[a].n == 0) a++;
  if (w->down[s] && walk_below(w, 8) == 0) walk_link(w, s);
  if (!w->request) {
    if (!calm) walk_pull(w);
  } else if (what < 250) {
    walk_deliver(w, &w->from_server[s], 0, s);
  } else if (what < 500) {
    walk_deliver(w, &w->from_hop[a], 1, a);
  } else if (what < 700) {
    walk_server_acts(w, s);
  } else if (what < 985) {
    walk_distributor(w, s);
  } else if (what < 993) {
    walk_lose_hop(w, a);
  } else if (what < 997) {
    if (!w->down[s]) walk_link(w, s);
  } else if (walk_below(w, 3) == 0 && !w->request->done) {
    mlfab__worker_withdraw(&w->f.worker, w->request, MLFAB_ERR_CANCELLED, w->f.now);
    w->cancelled++;
  }
  for (a = 0; a < WORKERS; a++) {
    int wanted = mlfab__worker_hop_wanted(&w->f.worker, a);
    if (wanted && !w->wanted[a]) assert_true(w->f.hop.ready[a] > ready[a]);
    w->wanted[a] = (uint8_t)wanted;
  }
  walk_collect(w);
}

static void test_pulls_at_random(void **state) {
  static walk the_walk;
  walk *w = &the_walk;
  (void)state;
  uint64_t totals[5] = {0, 0, 0, 0, 0};
  const char *first = getenv("MLFAB_SEED");
  uint64_t from = first ? strtoull(first, NULL, 10) : 1, to = first ? from + 1 : 301;
  for (uint64_t seed = from; seed < to; seed++) {
    memset(w, 0, sizeof *w);
    begin(&w->f, MLFAB_SCHEDULER_BESIDE);
    define(&w->f, NULL);
    w->f.posted = walk_posted;
    mlfab__rng_seed(&w->prng, seed);
    for (uint32_t i = 0; i < 3000; i++) walk_step(w, 0);
    for (uint32_t i = 0; i < 50000 && w->request; i++) walk_step(w, 1);
    if (w->request) print_message("MLFAB_SEED=%llu\n", (unsigned long long)seed);
    assert_null(w->request);
    assert_int_equal(w->f.server.drops + w->f.hop.drops, 0);
    uint32_t seen[5] = {w->pulls - w->cancelled, w->cancelled, w->done_by_hop, w->adopted,
                        w->stale};
    for (int i = 0; i < 5; i++) totals[i] += seen[i];
    mlfab__worker_free(&w->f.worker);
    assert_int_equal(w->f.env.bytes, 0);
  }
  for (int i = 0; i < 5 && !first; i++) assert_true(totals[i] > 300);
}

/* --- slices that are not adjacent --- */

static const uint32_t tensor_at[4] = {0, SHARD, SHARD + 2048, BYTES};

/* The words that server `s` must get of an update of these tensors: its bytes and its segments. */
static uint64_t scan_part(const fixture *f, uint32_t tensors, uint32_t s, uint8_t *bytes,
                          mlfab__segment *segments, uint32_t *nsegments) {
  const mlfab__layout *l = &f->worker.layout;
  uint64_t n = 0, last = UINT64_MAX;
  *nsegments = 0;
  for (uint32_t t = 0; t < 3; t++) {
    for (uint64_t at = tensor_at[t]; (tensors & 1u << t) && at < tensor_at[t + 1]; at += 4) {
      if (l->slices[mlfab__layout_slice_at(l, at)].server != s) continue;
      memcpy(bytes + n, weights + at, 4);
      n += 4;
      if (last != at) segments[(*nsegments)++] = (mlfab__segment){at, 0};
      segments[*nsegments - 1].bytes += 4;
      last = at + 4;
    }
  }
  return n;
}

/* One part: announced, granted step by step, until all of it has arrived. */
static void check_part(fixture *f, mlfab__rng *prng, uint32_t tensors, uint32_t s) {
  static uint8_t wanted[BYTES], got[BYTES];
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX], told[MLFAB__SEGMENTS_MAX];
  static uint64_t versions[MLFAB__SLICES_MAX];
  mlfab__push m;
  uint32_t n;
  uint64_t bytes = scan_part(f, tensors, s, wanted, segments, &n), granted, at = 0;
  assert_int_equal(take(f, 0, s), bytes > 0);
  if (bytes == 0) return;
  assert_int_equal(f->out.type, MLFAB__PUSH);
  assert_int_equal(mlfab__decode_push(f->meta, f->out.meta_bytes, &m, told, versions), 0);
  assert_int_equal(m.bytes, bytes);
  assert_int_equal(m.segments, n);
  assert_memory_equal(told, segments, n * sizeof *told);
  for (granted = m.eager;;) {
    for (int more = 1; more; more = take(f, 0, s)) {
      assert_true(at + f->out.bulk_bytes <= granted);
      if (f->out.bulk_bytes > 0) memcpy(got + at, f->out.bulk, f->out.bulk_bytes);
      at += f->out.bulk_bytes;
    }
    assert_int_equal(at, granted);
    report_all(f, LOAN_LIVE, 0, s);
    if (at == bytes) break;
    granted = mlfab__min(bytes, granted + 4 + 4 * mlfab__rng_below(prng, SHARD / 4));
    grant(f, s, m.seq, granted);
    assert_int_equal(take(f, 0, s), 1);
  }
  assert_memory_equal(got, wanted, bytes);
  ack(f, s, m.seq, 0, m.seq, 0);
}

/* Servers have joined and left: a server's slices are scattered; it gets those and nothing else. */
static void test_scattered_slices(void **state) {
  fixture *f = *state;
  mlfab__rng prng;
  mlfab_error error;
  mlfab__rng_seed(&prng, 3);
  for (uint32_t i = 0; i < BYTES; i += 4) {
    float x = (float)(i + 1);
    memcpy(weights + i, &x, 4);
  }
  for (uint32_t round = 0; round < 1000; round++) {
    uint32_t owner[MLFAB__SLICES_MAX], server = 0, tensors = 1 + round % 7, n = 0;
    mlfab_buf bufs[3];
    mlfab_request request;
    for (uint32_t i = 0; i < f->worker.layout.nslices; i++) {
      if (mlfab__rng_below(&prng, 2)) server = (uint32_t)mlfab__rng_below(&prng, SERVERS);
      owner[i] = server;
    }
    mlfab__layout_assign(&f->worker.layout, owner);
    for (uint32_t t = 0; t < 3; t++) {
      if (tensors & 1u << t) bufs[n++] = buffer(t, weights + tensor_at[t]);
    }
    assert_int_equal(mlfab__worker_push(&f->worker, bufs, n, NULL, f->now, &request, &error), 0);
    for (uint32_t s = 0; s < SERVERS; s++) check_part(f, &prng, tensors, s);
    mlfab__request *done = mlfab__request_find(&f->requests, request);
    assert_int_equal(done->done, 1);
    assert_int_equal(done->result.status, 0);
    mlfab__request_end(&f->requests, done);
  }
}

/* Another copy of server 0 answers: what the former one had applied and this one has not is counted once, and what the
 * cache has of the server counts for nothing. */
static void test_another_copy(void **state) {
  fixture *f = *state;
  mlfab__stream *stream = &f->worker.streams[0];
  mlfab__hello_ack m;
  memset(&m, 0, sizeof m);
  m.epoch = 1;
  m.generation = 5;
  m.eager_bytes = EAGER;
  m.model_stands = 1;
  m.term = 1;
  mlfab__worker_hello(&f->worker, 0, &m, f->now);
  stream->taken = 5;
  stream->cache_epoch = 1;
  m.taken = 3;
  m.generation++;
  mlfab__worker_hello(&f->worker, 0, &m,
                      f->now); /* the same copy, which knows of more by now than it has said */
  assert_int_equal(f->stats.updates_lost, 0);
  assert_int_equal(stream->cache_epoch, 1);
  for (int again = 0; again < 2; again++) {
    m.term = 2;
    m.generation++;
    mlfab__worker_hello(&f->worker, 0, &m, f->now);
    assert_int_equal(f->stats.updates_lost, 2);
    assert_int_equal(stream->taken, 3);
    assert_int_equal(stream->cache_epoch, 0);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_scattered_slices, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_announce, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_clip_sparse, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_norm_is_checked, open_worker, close_worker),
      cmocka_unit_test(test_what_is_planned),
      cmocka_unit_test(test_first_weights),
      cmocka_unit_test_setup_teardown(test_planned_takes_no_credit, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_planned_is_not_merged, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_no_merge_over_a_gap, open_worker, close_worker),
      cmocka_unit_test(test_merge_of_all),
      cmocka_unit_test_setup_teardown(test_by_hop, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_grant_of_the_server, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_hop_and_back, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_group_begins_anew, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_lent_to_both, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_adopted, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_adopted_too_late, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_old_words, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_hop_lost, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_hop_lost_and_granted, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_server_lost, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_resend, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_server_dead, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_another_copy, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_lost_in_a_move, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_withdraw, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_withdraw_durable, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_close, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_slot_used_again, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_dropped, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_dropped_in_part, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_dropped_and_worse, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_dropped_and_abandoned, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_progress_of_others, open_worker, close_worker),
      cmocka_unit_test(test_dropped_late),
      cmocka_unit_test(test_lost_drop),
      cmocka_unit_test_setup_teardown(test_progress_is_checked, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_dropped_at_a_hop, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_pull_by_hop, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_pull_ways, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_pull_hop_lost, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_pull_asked_again, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_pull_without_server, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_pull_ends, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_close_with_pulls, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_frames_that_do_not_parse, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_frames_that_do_not_fit, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_model_that_does_not_fit, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_packets_by_hop, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_pull_tells_the_state, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_set_sync, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_set_sync_fails, open_worker, close_worker),
      cmocka_unit_test_setup_teardown(test_set_sync_is_checked, open_worker, close_worker),
      cmocka_unit_test(test_updates_at_random),
      cmocka_unit_test(test_pulls_at_random),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
