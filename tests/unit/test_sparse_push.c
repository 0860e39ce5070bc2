/* test_sparse_push.c - filters and sparse updates at the worker: what is sent, what is held back, and that
 * each server gets whole packets of its own shard and all of them, whatever is granted, lost and retried. */
#include "core/sparse/sparse_push.h"

#include "core/sparse/filter.h"
#include "core/kernels/half.h"
#include "core/kernels/packet.h"
#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "scale.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum {
  RANK = 1,
  WORKERS = 3,
  SERVERS_MAX = 4,
  TENSORS = 5,
  ELEMENTS_MAX = 6000,
  FLAT_MAX = TENSORS * ELEMENTS_MAX * 8,
  PUSHES_MAX = 64
};

typedef struct expected { /* an update as its servers must see it */
  uint64_t seq;
  uint8_t touched[TENSORS];
  uint32_t left; /* servers that have not applied it */
  uint8_t image[FLAT_MAX];
} expected;

typedef struct fake { /* a server */
  int up;
  uint32_t generation;
  uint64_t seq; /* the one in progress, or 0 */
  int packed;
  uint64_t bytes, got, granted, next_offset;
  uint32_t nsegments;
  mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  mlfab__window window;
  uint8_t image[FLAT_MAX];
} fake;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__requests requests;
  mlfab__worker worker;
  mlfab__rng prng;
  uint64_t now;
  uint32_t drops;
  fake servers[SERVERS_MAX];
  expected updates[PUSHES_MAX];
  uint32_t nupdates;
  uint64_t allocations_left; /* before memory fails */
  uint8_t meta[MLFAB_META_MAX];
  /* The literal version: the residuals, and their filters; size 0: none. */
  mlfab_filter filters[TENSORS];
  int leaves[TENSORS];
  double residual[TENSORS][ELEMENTS_MAX]; /* a double holds every float */
  uint64_t offered, sent, saturated;
} fixture;

static fixture F;

static uint32_t below(uint32_t n) { return (uint32_t)mlfab__rng_below(&F.prng, n); }

/* --- the surroundings --- */

static void port_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self, (void)peer, (void)type, (void)meta, (void)bytes;
}
static void port_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void port_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)code, (void)text;
  F.drops++;
}
static void port_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void port_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static void *scarce(void *user, size_t bytes) {
  (void)user;
  if (F.allocations_left == 0) return NULL;
  F.allocations_left--;
  return calloc(1, bytes);
}
static void scarce_free(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes;
  free(memory);
}

static void from_server(uint32_t server, uint8_t type, const uint8_t *meta, uint32_t bytes) {
  mlfab__frame_in in = {type, bytes, 0, meta, NULL};
  mlfab__worker_frame(&F.worker, server, &in, F.now);
}

static void greet(uint32_t server) {
  fake *s = &F.servers[server];
  mlfab__hello_ack m;
  memset(&m, 0, sizeof m);
  m.server = server;
  m.eager_bytes = F.config.eager_bytes;
  m.generation = ++s->generation;
  m.model_stands = m.epoch = 1;
  m.top = s->window.top;
  memcpy(m.applied, s->window.applied, sizeof m.applied);
  memcpy(m.dropped, s->window.dropped, sizeof m.dropped);
  s->up = 1;
  s->seq = 0;
  mlfab__worker_hello(&F.worker, server, &m, F.now);
}

static const struct {
  int dtype;
  uint32_t count;
} shapes[TENSORS] = {
    {MLFAB_F32, 6000}, {MLFAB_F64, 1111}, {MLFAB_I64, 300}, {MLFAB_F32, 37}, {MLFAB_F32, 2500}};

static void begin(uint32_t servers, uint32_t chunk, uint32_t eager,
                  const mlfab_model_options *more) {
  mlfab__port port = {NULL, port_post, port_ready, port_drop, port_detach, port_event};
  mlfab_model_options options;
  mlfab_error error;
  mlfab_request request;
  mlfab_env env = {.size = sizeof env, .allocate = scarce, .release = scarce_free};
  mlfab__rng prng = F.prng;
  static uint8_t meta[1024];
  memset(&F, 0, sizeof F);
  F.prng = prng;
  F.now = 1;
  F.allocations_left = UINT64_MAX;
  assert_int_equal(mlfab__env_init(&F.env, &env), 0);
  mlfab_config_init(&F.config);
  F.config.workers = WORKERS;
  F.config.servers = servers;
  F.config.chunk_bytes = chunk;
  F.config.eager_bytes = eager;
  F.config.merge_max = 8;
  F.config.model_max_bytes = 1 << 30;
  F.config.timeout_ns = 1000000000;
  F.config.seed = 77;
  assert_int_equal(
      mlfab__worker_init(&F.worker, &F.env, &F.config, RANK, &port, &port, &F.stats, &F.requests),
      0);
  for (uint32_t i = 0; i < TENSORS; i++)
    assert_int_equal(
        mlfab__worker_tensor(&F.worker, 10 * i, shapes[i].dtype, shapes[i].count, &error), 0);
  memset(&options, 0, sizeof options);
  if (more) options = *more;
  options.size = sizeof options;
  options.slices = 12;
  assert_int_equal(mlfab__worker_model(&F.worker, &options, NULL, 0, F.now, &request, &error), 0);
  for (uint32_t s = 0; s < servers; s++) {
    mlfab__frame_out out = {.meta = F.meta};
    mlfab__define_ack m;
    greet(s);
    assert_int_equal(mlfab__worker_next(&F.worker, s, &out), 1);
    mlfab__worker_taken(&F.worker, s, &out);
    memset(&m, 0, sizeof m);
    m.server = s;
    m.packets = 1;
    m.ask = F.worker.define.ask, m.options = F.worker.define.options;
    from_server(s, MLFAB__DEFINE_ACK, meta, mlfab__encode_define_ack(meta, &m));
  }
  assert_int_equal(F.worker.stands, 1);
  mlfab__request_end(&F.requests, mlfab__request_find(&F.requests, request));
}

static void finish(void) {
  mlfab__worker_free(&F.worker);
  assert_int_equal(F.env.bytes, 0);
}

/* --- a server that checks what it receives --- */

static expected *find_expected(uint64_t seq) {
  for (uint32_t i = 0; i < F.nupdates; i++)
    if (F.updates[i].seq == seq) return &F.updates[i];
  fail();
  return NULL;
}

static void ack(uint32_t server, uint64_t seq, int code) {
  fake *s = &F.servers[server];
  mlfab__push_ack m = {seq, 1, s->generation, code, 1, 0, 0};
  uint8_t meta[128];
  mlfab__windows_decide(&s->window, seq, 1, code);
  from_server(server, MLFAB__PUSH_ACK, meta, mlfab__encode_push_ack(meta, &m));
}

/* An update is complete: it holds the values meant for this server, and nothing else. */
static void arrived(uint32_t server) {
  fake *s = &F.servers[server];
  const expected *e = find_expected(s->seq);
  const mlfab__layout *layout = &F.worker.layout;
  for (uint32_t i = 0; i < layout->nslices; i++) {
    const mlfab__slice *slice = &layout->slices[i];
    if (slice->server != server) continue;
    if (memcmp(s->image + slice->offset, e->image + slice->offset, slice->bytes) != 0)
      fail_msg("update %llu differs in slice %u", (unsigned long long)s->seq, i);
  }
}

static int in_segments(const fake *s, uint64_t offset, uint64_t bytes) {
  for (uint32_t i = 0; i < s->nsegments; i++) {
    const mlfab__segment *g = &s->segments[i];
    if (offset >= g->offset && offset + bytes <= g->offset + g->bytes) return 1;
  }
  return 0;
}

static void take_packets(uint32_t server, const uint8_t *bulk, uint32_t bytes) {
  fake *s = &F.servers[server];
  const mlfab__layout *layout = &F.worker.layout;
  for (uint32_t at = 0, n; at < bytes; at += n) {
    mlfab__packet p;
    n = mlfab__packet_open(bulk + at, bytes - at, &p);
    assert_true(n > 0); /* a cut packet */
    uint64_t length = (uint64_t)p.elements * mlfab__dtype_bytes(p.dtype);
    assert_true(p.kept > 0);
    assert_true(p.offset >= s->next_offset);
    s->next_offset = p.offset + length;
    assert_true(in_segments(s, p.offset, length));
    const mlfab__slice *slice = &layout->slices[mlfab__layout_slice_at(layout, p.offset)];
    const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, p.offset);
    assert_int_equal(slice->server, server);
    assert_true(p.offset + length <= slice->offset + slice->bytes);
    assert_true(p.offset + length <= tensor->offset + tensor->bytes);
    assert_int_equal(tensor->dtype, p.dtype);
    mlfab__unpack_dense(&p, s->image + p.offset);
  }
}

static void take_plain(fake *s, const uint8_t *bulk, uint32_t bytes) {
  uint64_t skip = s->got;
  for (uint32_t i = 0; i < s->nsegments && bytes > 0; i++) {
    const mlfab__segment *g = &s->segments[i];
    if (skip >= g->bytes) {
      skip -= g->bytes;
      continue;
    }
    uint32_t n = (uint32_t)mlfab__min(bytes, g->bytes - skip);
    memcpy(s->image + g->offset + skip, bulk, n);
    bulk += n;
    bytes -= n;
    skip = 0;
  }
}

/* Takes the next frame for a server: returns 1, or 0 when there is none. */
static int take(uint32_t server) {
  fake *s = &F.servers[server];
  mlfab__frame_out out = {.meta = F.meta};
  mlfab__push push;
  mlfab__chunk chunk;
  static uint64_t versions[MLFAB__SLICES_MAX];
  /* The fake server handles one update at a time; the next one waits. */
  if (!s->up || !mlfab__worker_next(&F.worker, server, &out)) return 0;
  if (out.type == MLFAB__PUSH && s->seq != 0) return 0;
  mlfab__worker_taken(&F.worker, server, &out);
  if (out.type == MLFAB__PUSH) {
    assert_int_equal(mlfab__decode_push(F.meta, out.meta_bytes, &push, s->segments, versions), 0);
    s->seq = push.seq;
    s->bytes = push.bytes;
    s->packed = (push.flags & MLFAB__PUSH_PACKED) != 0;
    s->nsegments = push.segments;
    s->got = s->next_offset = 0;
    s->granted = push.eager;
    assert_true(push.eager <= F.config.eager_bytes);
    memset(s->image, 0, sizeof s->image);
  } else {
    assert_int_equal(out.type, MLFAB__CHUNK);
    assert_int_equal(mlfab__decode_chunk(F.meta, out.meta_bytes, &chunk), 0);
    assert_int_equal(chunk.seq, s->seq);
    assert_int_equal(chunk.offset, s->got);
    assert_true(out.bulk_bytes > 0);
  }
  if (s->packed) {
    take_packets(server, out.bulk, out.bulk_bytes);
  } else {
    take_plain(s, out.bulk, out.bulk_bytes);
  }
  s->got += out.bulk_bytes;
  assert_true(s->got <= s->granted);
  /* Copies are free at once, borrowed bytes when the transport returns them. */
  if (out.token != 0) mlfab__worker_sent(&F.worker, server, out.token, F.now);
  return 1;
}

static void grant(uint32_t server, uint64_t upto) {
  fake *s = &F.servers[server];
  mlfab__grant m = {s->seq, upto, s->generation};
  uint8_t meta[64];
  s->granted = mlfab__min(s->bytes, mlfab__max(s->granted, upto));
  from_server(server, MLFAB__GRANT, meta, mlfab__encode_grant(meta, &m));
}

/* Runs one random event at a server. */
static void serve(uint32_t server, int may_break) {
  fake *s = &F.servers[server];
  if (!s->up) {
    greet(server);
    return;
  }
  if (may_break && below(1500) == 0) {
    s->up = 0;
    mlfab__worker_lost(&F.worker, server, F.now);
    return;
  }
  if (take(server) || s->seq == 0) return;
  if (s->got < s->bytes) {
    grant(server, s->got + below(3) * (1 + below(9000)) + (below(4) == 0 ? s->bytes : 0));
    return;
  }
  arrived(server);
  uint64_t seq = s->seq;
  find_expected(seq)->left &= ~(1u << server);
  s->seq = 0;
  ack(server, seq, 0);
}

static void serve_all(void) {
  for (uint32_t i = 0; mlfab__worker_unfinished(&F.worker, NULL) > 0; i++) {
    assert_true(i < 1000000);
    serve(below(F.config.servers), 1);
  }
}

/* --- the literal version --- */

static double half_of(int half, double a, int *saturated_p) {
  float x = mlfab__half_narrow(a);
  uint32_t bits;
  memcpy(&bits, &x, 4);
  *saturated_p = (bits & 0x7fffffffu) > mlfab__half_top(half);
  return (double)mlfab__half_back(half, mlfab__half_one(half, x));
}

static int by_magnitude(const void *a, const void *b) {
  double x = fabs(F.residual[TENSORS - 1][*(const uint32_t *)a]),
         y = fabs(F.residual[TENSORS - 1][*(const uint32_t *)b]);
  if (x > y) return -1;
  if (x < y) return 1;
  return *(const uint32_t *)a < *(const uint32_t *)b ? -1 : 1;
}

/* Marks the `top` share of the largest elements of the array, lower index first. */
static void literal_top(const double *a, uint32_t n, double top, uint8_t *among) {
  static uint32_t order[ELEMENTS_MAX];
  static double kept[ELEMENTS_MAX];
  uint32_t k = (uint32_t)(top * n);
  if (k == 0) k = 1;
  for (uint32_t i = 0; i < n; i++) order[i] = i;
  memcpy(kept, F.residual[TENSORS - 1], sizeof kept); /* where the comparison function looks */
  memcpy(F.residual[TENSORS - 1], a, n * sizeof *a);
  qsort(order, n, sizeof *order, by_magnitude);
  memcpy(F.residual[TENSORS - 1], kept, sizeof kept);
  memset(among, 0, n);
  for (uint32_t i = 0; i < k; i++) among[order[i]] = 1;
}

static void store(uint32_t tensor, uint32_t i, double x, uint8_t *image) {
  uint64_t at = mlfab__layout_find(&F.worker.layout, 10 * tensor)->offset;
  if (shapes[tensor].dtype == MLFAB_F32) {
    float f = (float)x;
    memcpy(image + at + 4 * (uint64_t)i, &f, 4);
  } else {
    memcpy(image + at + 8 * (uint64_t)i, &x, 8);
  }
}

/* A user's filter: elements whose number is divisible by 3 are not sent. It also sets bits beyond the end. */
static void divides(void *user, const mlfab_filter_info *info, const void *values,
                    const void *before, uint64_t *keep) {
  assert_ptr_equal(user, &F);
  assert_null(before);
  assert_non_null(values);
  for (uint64_t i = 0; i < info->count; i++) {
    keep[i / 64] |= (uint64_t)1 << (i % 64);
    if ((info->first + i) % 3 == 0) keep[i / 64] &= ~((uint64_t)1 << (i % 64));
  }
}

static void literal(uint32_t tensor, const void *g, uint64_t t, uint8_t *image) {
  const mlfab_filter *f = &F.filters[tensor];
  uint32_t n = shapes[tensor].count, names[2] = {RANK, 10 * tensor};
  uint64_t seed = mlfab__hash(F.config.seed, names, sizeof names);
  int is_float = shapes[tensor].dtype == MLFAB_F32, half = (int)f->half;
  double tau = f->threshold / (1.0 + f->decay * log((double)t)), p = f->drop > 0.0 ? f->drop : 1.0;
  static double a[ELEMENTS_MAX];
  static uint8_t among[ELEMENTS_MAX];
  for (uint32_t i = 0; i < n; i++) {
    double r = F.residual[tensor][i];
    a[i] = is_float ? (double)((float)r + ((const float *)g)[i]) : r + ((const double *)g)[i];
  }
  memset(among, 1, n);
  if (f->top > 0.0 && !F.leaves[tensor]) literal_top(a, n, f->top, among);
  for (uint32_t i = 0; i < n; i++) {
    int held = fabs(a[i]) < tau && mlfab__filter_draw(seed, t, i) < p, saturated = 0;
    double sent = a[i];
    if (!among[i] || (f->select && i % 3 == 0)) held = 1;
    if (F.leaves[tensor]) {
      held = 0;
    } else if (half) {
      sent = half_of(half, a[i], &saturated);
    }
    F.offered++;
    F.residual[tensor][i] = a[i];
    if (held || (!(sent > 0.0) && !(sent < 0.0))) continue;
    F.sent++;
    F.saturated += (uint64_t)saturated;
    F.residual[tensor][i] = !saturated ? 0.0
                            : is_float ? (double)((float)a[i] - (float)sent)
                                       : a[i] - sent;
    store(tensor, i, sent, image);
  }
}

static void check_residuals(void) {
  for (uint32_t i = 0; i < TENSORS; i++) {
    const mlfab__sieve *sieve = F.worker.sieves ? &F.worker.sieves[i] : NULL;
    if (F.filters[i].size == 0) {
      assert_true(!sieve || !sieve->residual);
      continue;
    }
    assert_non_null(sieve);
    assert_non_null(sieve->residual);
    for (uint32_t k = 0; k < shapes[i].count; k++) {
      double r = shapes[i].dtype == MLFAB_F32
                     ? (double)((const float *)(const void *)sieve->residual)[k]
                     : ((const double *)(const void *)sieve->residual)[k];
      if (!(r >= F.residual[i][k] && r <= F.residual[i][k]))
        fail_msg("tensor %u, element %u: %g is held back, not %g", i, k, r, F.residual[i][k]);
    }
  }
  assert_int_equal(F.stats.filter_offered, F.offered);
  assert_int_equal(F.stats.filter_sent, F.sent);
  assert_int_equal(F.stats.filter_saturated, F.saturated);
}

/* --- random updates --- */

static uint8_t data[TENSORS][ELEMENTS_MAX * 8];

static double some_value(void) {
  double x = (double)below(2001) / 1000.0 - 1.0;
  switch (below(12)) {
    case 0:
      return 0.0;
    case 1:
      return -0.0;
    case 2:
      return x * 1e5; /* beyond the range of f16, some of them */
    case 3:
      return x * 1e-8; /* zero in f16 */
    case 4:
      return x * 1e-40;
    case 5:
      return x * 1e36;
    default:
      return x;
  }
}

static void fill(uint32_t tensor) {
  for (uint32_t i = 0; i < shapes[tensor].count; i++) {
    double x = some_value();
    if (shapes[tensor].dtype == MLFAB_F32) {
      ((float *)(void *)data[tensor])[i] = (float)x;
    } else if (shapes[tensor].dtype == MLFAB_F64) {
      ((double *)(void *)data[tensor])[i] = below(50) == 0 ? x * 1e60 : x;
    } else {
      ((int64_t *)(void *)data[tensor])[i] = (int64_t)below(100) - 50;
    }
  }
}

static expected *new_expected(void) {
  expected *e = &F.updates[F.nupdates++ % PUSHES_MAX];
  assert_true(F.nupdates <= PUSHES_MAX);
  memset(e, 0, sizeof *e);
  e->seq = F.worker.next_seq;
  return e;
}

/* The lowest-numbered server that owns bytes of these tensors. */
static uint32_t first_server(uint32_t mask) {
  uint32_t first = UINT32_MAX;
  const mlfab__layout *layout = &F.worker.layout;
  for (uint32_t i = 0; i < TENSORS; i++) {
    const mlfab__tensor *t = mlfab__layout_find(layout, 10 * i);
    for (uint32_t k = 0; k < layout->nslices && (mask >> i & 1); k++) {
      const mlfab__slice *slice = &layout->slices[k];
      if (slice->offset < t->offset + t->bytes && t->offset < slice->offset + slice->bytes)
        first = (uint32_t)mlfab__min(first, slice->server);
    }
  }
  return first;
}

/* Pushes some tensors; computes the expected result first. */
static mlfab_request push_some(uint32_t mask, const mlfab_push_options *options) {
  mlfab_buf bufs[TENSORS];
  mlfab_request request = 0;
  mlfab_error error;
  uint32_t n = 0;
  expected *e = new_expected();
  uint32_t s = first_server(mask);
  uint64_t t = F.worker.streams[s].round + mlfab__worker_ahead(&F.worker, s, e->seq) + 1;
  for (uint32_t i = 0; i < TENSORS; i++) {
    const mlfab__tensor *tensor = mlfab__layout_find(&F.worker.layout, 10 * i);
    if (!(mask >> i & 1)) continue;
    e->touched[i] = 1;
    memset(&bufs[n], 0, sizeof bufs[n]);
    bufs[n].tensor = 10 * i;
    bufs[n].data = data[i];
    bufs[n++].count = shapes[i].count;
    if (F.filters[i].size > 0) {
      literal(i, data[i], t, e->image);
      if (F.leaves[i]) memset(&F.filters[i], 0, sizeof F.filters[i]);
      F.leaves[i] = 0;
    } else {
      memcpy(e->image + tensor->offset, data[i], tensor->bytes);
    }
  }
  uint64_t seq = e->seq;
  assert_int_equal(mlfab__worker_push(&F.worker, bufs, n, options, F.now, &request, &error), 0);
  assert_int_equal(mlfab__request_find(&F.requests, request)->result.seq, seq);
  return request;
}

static void end(mlfab_request request, int code) {
  mlfab__request *r = mlfab__request_find(&F.requests, request);
  assert_int_equal(r->done, 1);
  assert_int_equal(r->result.status, code);
  mlfab__request_end(&F.requests, r);
}

static void set_filter(uint32_t tensor, const mlfab_filter *filter) {
  mlfab_error error;
  assert_int_equal(mlfab__worker_set_filter(&F.worker, 10 * tensor, filter, &error), 0);
  if (!filter) {
    F.leaves[tensor] = F.filters[tensor].size > 0;
    return;
  }
  if (F.filters[tensor].size == 0) memset(F.residual[tensor], 0, sizeof F.residual[tensor]);
  F.filters[tensor] = *filter;
  F.leaves[tensor] = 0;
}

static mlfab_filter random_filter(void) {
  mlfab_filter f = {.size = sizeof f};
  f.half = below(3);
  if (below(3)) f.threshold = (double)(1 + below(1000)) / 500.0;
  if (below(2)) f.decay = (double)below(100) / 50.0;
  if (f.threshold > 0.0 && below(2)) f.drop = (double)below(101) / 100.0;
  if (f.drop > 0.0 && f.drop < 1.0 && below(2)) f.threshold = HUGE_VAL;
  if (below(3) == 0) f.top = (double)(1 + below(1000)) / 1000.0;
  if (below(4) == 0) {
    f.select = divides;
    f.user = &F;
  }
  return f;
}

static mlfab_request push_sparse(uint32_t tensor, uint32_t one_of) {
  static uint64_t indices[ELEMENTS_MAX];
  static uint8_t values[ELEMENTS_MAX * 8];
  uint32_t n = 0, width = mlfab__dtype_bytes(shapes[tensor].dtype);
  mlfab_request request = 0;
  mlfab_error error;
  expected *e = new_expected();
  uint64_t at = mlfab__layout_find(&F.worker.layout, 10 * tensor)->offset;
  for (uint32_t i = 0; i < shapes[tensor].count && one_of > 0; i++) {
    if (below(one_of) != 0) continue;
    memcpy(values + (size_t)n * width, data[tensor] + (size_t)i * width, width);
    memcpy(e->image + at + (size_t)i * width, data[tensor] + (size_t)i * width, width);
    indices[n++] = i;
  }
  assert_int_equal(mlfab__worker_push_sparse(&F.worker, 10 * tensor, indices, values, n, NULL,
                                             F.now, &request, &error),
                   0);
  memset(values, 0xee, sizeof values); /* the buffer is the caller's again */
  return request;
}

static void one_run(void) {
  static const uint32_t chunks[] = {64, 1024, 12288, 262144}, eagers[] = {0, 500, 8192, 65536};
  begin(1 + below(SERVERS_MAX), chunks[below(4)], eagers[below(4)], NULL);
  if (below(2)) { /* slices have moved to random servers */
    uint32_t owners[64];
    for (uint32_t i = 0; i < F.worker.layout.nslices; i++) owners[i] = below(F.config.servers);
    mlfab__layout_assign(&F.worker.layout, owners);
  }
  mlfab_request requests[16];
  for (uint32_t step = 0; step < 3; step++) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < 6; i++) {
      uint32_t tensor = below(TENSORS);
      mlfab_filter f = random_filter();
      for (uint32_t k = 0; k < TENSORS; k++) fill(k);
      switch (below(4)) {
        case 0:
          if (shapes[tensor].dtype != MLFAB_I64) set_filter(tensor, below(4) ? &f : NULL);
          break;
        case 1:
          requests[n++] = push_sparse(tensor, below(2) * (1 + below(300)));
          break;
        default:
          requests[n++] = push_some(1 + below((1 << TENSORS) - 1), NULL);
          memset(data, 0xee, sizeof data); /* filtered updates are copied; of the others ... */
          if (!F.worker.updates[F.worker.order[F.worker.norder - 1]].codec->flags) serve_all();
      }
      check_residuals();
      for (uint32_t k = below(10); k > 0; k--) serve(below(F.config.servers), 1);
    }
    serve_all();
    for (uint32_t i = 0; i < n; i++) end(requests[i], 0);
  }
  assert_int_equal(F.drops, 0);
  finish();
}

static uint64_t number_of(const char *name, uint64_t by_default) {
  const char *text = getenv(name);
  return text ? strtoull(text, NULL, 0) : by_default;
}

static void test_random(void **state) {
  (void)state;
  uint64_t seed = number_of("MLFAB_SEED", 1), runs = test_cases(150);
  for (uint64_t i = 0; i < runs; i++) {
    mlfab__rng_seed(&F.prng, seed + i);
    one_run();
  }
}

/* --- cases --- */

static void set_up(uint32_t servers) {
  mlfab__rng_seed(&F.prng, 5);
  begin(servers, 4096, 1 << 20, NULL);
  for (uint32_t k = 0; k < TENSORS; k++) fill(k);
}

/* A refused push changes nothing: no residual, number or counter. */
static void test_not_finite(void **state) {
  (void)state;
  mlfab_filter f = {.size = sizeof f, .threshold = 0.5, .half = MLFAB_HALF_F16};
  mlfab_buf bufs[2];
  mlfab_error error;
  set_up(2);
  memset(bufs, 0, sizeof bufs);
  bufs[0] = (mlfab_buf){.data = data[0], .count = shapes[0].count, .tensor = 0};
  bufs[1] = (mlfab_buf){.data = data[4], .count = shapes[4].count, .tensor = 40};
  set_filter(0, &f);
  push_some(1, NULL);
  for (uint32_t round = 0; round < 4; round++) {
    /* In the filtered tensor and in the other one, at its first and at its last element. */
    uint32_t which = round / 2 ? 4 : 0, at = round % 2 ? shapes[which].count - 1 : 0;
    char text[64];
    float *bad = (float *)(void *)data[which] + at, before = *bad;
    *bad = round == 1 ? -INFINITY : NAN;
    assert_int_equal(mlfab__worker_push(&F.worker, bufs, 2, NULL, F.now, NULL, &error),
                     MLFAB_ERR_NOT_FINITE);
    snprintf(text, sizeof text, "element %u of tensor %u is NaN", at, 10 * which);
    assert_non_null(strstr(error.text, text));
    assert_int_equal(error.rank, RANK);
    *bad = before;
    check_residuals();
    assert_int_equal(F.worker.next_seq, 2);
    assert_int_equal(F.worker.norder, 1);
  }
  /* Two finite numbers whose sum is infinite. */
  f.threshold = (double)FLT_MAX; /* so 3e38 is held back */
  set_filter(3, &f);
  for (uint32_t i = 0; i < shapes[3].count; i++) ((float *)(void *)data[3])[i] = i == 7 ? 3e38f : 0;
  push_some(8, NULL);
  bufs[0] = (mlfab_buf){.data = data[3], .count = shapes[3].count, .tensor = 30};
  assert_int_equal(mlfab__worker_push(&F.worker, bufs, 1, NULL, F.now, NULL, &error),
                   MLFAB_ERR_NOT_FINITE);
  assert_non_null(strstr(error.text, "element 7 of tensor 30"));
  check_residuals();
  serve_all();
  finish();
}

static void test_filters_are_checked(void **state) {
  (void)state;
  mlfab_error error;
  set_up(1);
  static const struct {
    mlfab_filter filter;
    const char *text;
  } wrong[] = {{{.half = 3}, "half is 3"},
               {{.threshold = -1.0}, "threshold is -1, not between 0 and inf"},
               {{.threshold = NAN}, "threshold"},
               {{.decay = -0.5}, "decay is -0.5"},
               {{.decay = INFINITY}, "decay is inf"},
               {{.drop = 1.5}, "drop is 1.5, not between 0 and 1"},
               {{.drop = NAN}, "drop"},
               {{.drop = 0.8}, "drop is 0.8, but the threshold is 0"},
               {{.threshold = HUGE_VAL}, "threshold inf holds every element of tensor 0 back"},
               {{.threshold = 1e300, .drop = 1.0}, "threshold 1e+300 holds every element"},
               {{.top = -0.1}, "top is -0.1"},
               {{.top = NAN}, "top"}};
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    mlfab_filter f = wrong[i].filter;
    f.size = sizeof f;
    assert_int_equal(mlfab__worker_set_filter(&F.worker, 0, &f, &error), MLFAB_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, wrong[i].text));
  }
  mlfab_filter f = {.size = 0};
  assert_int_equal(mlfab__worker_set_filter(&F.worker, 0, &f, &error), MLFAB_ERR_ARGUMENT);
  f.size = sizeof f;
  assert_int_equal(mlfab__worker_set_filter(&F.worker, 7, &f, &error), MLFAB_ERR_TENSOR);
  assert_int_equal(mlfab__worker_set_filter(&F.worker, 20, &f, &error), MLFAB_ERR_DTYPE);
  assert_int_equal(mlfab__worker_set_filter(&F.worker, MLFAB_ALL, &f, &error), MLFAB_ERR_DTYPE);
  assert_non_null(strstr(error.text, "tensor 20 is int64"));
  /* A server that was built without them is named. */
  const uint64_t index = 0;
  const float value = 1;
  F.worker.streams[0].packets = 0;
  assert_int_equal(mlfab__worker_set_filter(&F.worker, 0, &f, &error), MLFAB_ERR_UNSUPPORTED);
  assert_string_equal(error.text,
                      "not supported: filters, at server 0, which was built without "
                      "MLFAB_WITH_SPARSE");
  assert_int_equal(error.rank, 0);
  assert_int_equal(
      mlfab__worker_push_sparse(&F.worker, 0, &index, &value, 1, NULL, F.now, NULL, &error),
      MLFAB_ERR_UNSUPPORTED);
  F.worker.streams[0].packets = 1;
  assert_null(F.worker.sieves);
  finish();
}

/* With a threshold of 0 everything is sent, whatever the random policy selects. */
static void test_nothing_below(void **state) {
  (void)state;
  mlfab_filter f = {.size = sizeof f, .drop = 1.0};
  set_up(2);
  set_filter(0, &f);
  push_some(1, NULL);
  assert_int_not_equal(F.sent, 0);
  check_residuals();
  serve_all();
  for (uint32_t i = 0; i < shapes[0].count; i++)
    assert_true(((const float *)(const void *)F.residual[0])[i] == 0.0f);
  finish();
}

/* A removed filter leaves its residual to the next update, and nothing else behind. */
static void test_taken_away(void **state) {
  (void)state;
  mlfab_filter f = {.size = sizeof f, .threshold = (double)FLT_MAX};
  set_up(2);
  set_filter(0, &f); /* everything is held back */
  push_some(1, NULL);
  assert_int_equal(F.sent, 0);
  serve_all();
  set_filter(0, NULL);
  set_filter(0, NULL);
  fill(0);
  push_some(1, NULL); /* the servers receive both */
  assert_int_equal(F.worker.nsieves, 0);
  check_residuals();
  push_some(1, NULL); /* dense again */
  assert_int_equal(F.worker.updates[F.worker.order[F.worker.norder - 1]].codec->flags, 0);
  serve_all();
  /* Removed and set again: the residual stays. */
  set_filter(0, &f);
  push_some(1, NULL);
  set_filter(0, NULL);
  set_filter(0, &f);
  push_some(1, NULL);
  check_residuals();
  serve_all();
  finish();
}

/* An update that was applied nowhere is retried with the same bytes; no residual changes. */
static void test_retry(void **state) {
  (void)state;
  mlfab_filter f = {.size = sizeof f, .threshold = 0.7, .half = MLFAB_HALF_BF16};
  mlfab_push_options options = {.size = sizeof options, .scale = 1.0};
  set_up(2);
  set_filter(0, &f);
  set_filter(1, &f);
  mlfab_request request = push_some(3, NULL), other;
  static expected first;
  first = F.updates[0];
  while (take(0) || take(1)) continue;
  for (uint32_t s = 0; s < 2; s++) {
    F.servers[s].seq = 0;
    ack(s, 1, MLFAB_ERR_DROPPED);
  }
  end(request, MLFAB_ERR_DROPPED);
  /* Other updates in between take other slots. */
  for (uint32_t i = 0; i < 5; i++) {
    other = push_some(3, NULL);
    serve_all();
    end(other, 0);
  }
  mlfab_buf bufs[2] = {{.data = data[0], .count = shapes[0].count, .tensor = 0},
                       {.data = data[1], .count = shapes[1].count, .tensor = 10}};
  mlfab_error error;
  options.retry_seq = 1;
  assert_int_equal(mlfab__worker_push(&F.worker, bufs, 1, &options, F.now, NULL, &error),
                   MLFAB_ERR_ARGUMENT);
  assert_string_equal(error.text, "push: update 1 was of other tensors");
  expected *again = new_expected();
  memcpy(again->image, first.image, sizeof again->image);
  memset(data, 0xee, sizeof data); /* it is not even read */
  assert_int_equal(mlfab__worker_push(&F.worker, bufs, 2, &options, F.now, &request, &error), 0);
  check_residuals();
  serve_all();
  end(request, 0);
  finish();
}

static void test_sparse_is_checked(void **state) {
  (void)state;
  float values[3] = {1, 2, 3};
  mlfab_error error;
  static const struct {
    uint64_t indices[3];
    const char *text;
  } wrong[] = {
      {{0, 6000, 1}, "index 6000 at position 1: tensor 0 has 6000 elements"},
      {{5, 5, 9}, "index 5 at position 1 does not ascend: 5 is before it"},
      {{1, 7, 6}, "index 6 at position 2 does not ascend: 7 is before it"},
      {{UINT64_MAX, 0, 0}, "index 18446744073709551615 at position 0"},
  };
  set_up(2);
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    assert_int_equal(mlfab__worker_push_sparse(&F.worker, 0, wrong[i].indices, values, 3, NULL,
                                               F.now, NULL, &error),
                     MLFAB_ERR_ARGUMENT);
    assert_non_null(strstr(error.text, wrong[i].text));
  }
  const uint64_t good[3] = {0, 4000, 5999};
  assert_int_equal(
      mlfab__worker_push_sparse(&F.worker, 0, NULL, values, 1, NULL, F.now, NULL, &error),
      MLFAB_ERR_ARGUMENT);
  assert_int_equal(
      mlfab__worker_push_sparse(&F.worker, 0, good, NULL, 1, NULL, F.now, NULL, &error),
      MLFAB_ERR_ARGUMENT);
  assert_int_equal(
      mlfab__worker_push_sparse(&F.worker, 1, good, values, 3, NULL, F.now, NULL, &error),
      MLFAB_ERR_TENSOR);
  values[1] = INFINITY;
  assert_int_equal(
      mlfab__worker_push_sparse(&F.worker, 0, good, values, 3, NULL, F.now, NULL, &error),
      MLFAB_ERR_NOT_FINITE);
  assert_non_null(strstr(error.text, "position 1, of element 4000 of tensor 0"));
  assert_int_equal(F.worker.next_seq, 1);
  /* An update without elements is an update, too: every server of the tensor gets it. */
  mlfab_request request = push_sparse(0, 0);
  assert_int_equal(F.worker.updates[F.worker.order[0]].parts[1].state, MLFAB__PART_QUEUED);
  serve_all();
  end(request, 0);
  finish();
}

/* Small updates of a tensor with a filter are not merged, neither with each other nor with waiting ones. */
static void test_not_merged(void **state) {
  (void)state;
  mlfab_filter f = {.size = sizeof f, .threshold = 0.1};
  set_up(1);
  push_some(8, NULL);
  take(0);
  push_some(8, NULL); /* waits to be merged */
  set_filter(3, &f);
  push_some(8, NULL);
  set_filter(3, NULL);
  push_some(8, NULL); /* includes the residual */
  mlfab_request request = push_sparse(3, 3);
  assert_int_equal(F.worker.norder, 5);
  assert_int_equal(F.stats.pushes_merged, 0);
  serve_all();
  end(request, 0);
  check_residuals();
  finish();
}

/* Withdrawn while in progress: no more bytes are sent, and where rounds count it continues as an empty
 * update. */
static void test_withdrawn(void **state) {
  (void)state;
  mlfab_filter f = {.size = sizeof f, .half = MLFAB_HALF_F16};
  mlfab_model_options model = {.size = sizeof model, .sync = MLFAB_SYNC_BSP};
  mlfab__rng_seed(&F.prng, 9);
  begin(2, 1024, 0, &model);
  for (uint32_t k = 0; k < TENSORS; k++) fill(k);
  set_filter(0, &f);
  mlfab_request request = push_some(1, NULL);
  assert_int_equal(take(0), 1); /* announced at one of two servers */
  mlfab__worker_withdraw(&F.worker, mlfab__request_find(&F.requests, request), MLFAB_ERR_TIMEOUT,
                         F.now);
  end(request, MLFAB_ERR_IN_DOUBT);
  grant(0, UINT64_MAX);
  assert_int_equal(take(0), 0);
  assert_int_equal(take(1), 1);
  assert_int_equal(F.servers[1].packed, 0);
  assert_int_equal(F.servers[1].bytes, 0);
  ack(0, 1, MLFAB_ERR_WITHDRAWN);
  ack(1, 1, 0);
  int status = 0;
  assert_int_equal(mlfab__worker_status(&F.worker, 1, &status), 0);
  assert_int_equal(status, MLFAB_ERR_WITHDRAWN);
  assert_int_equal(F.worker.norder, 0);
  finish();
}

static int push_both(mlfab_error *error) {
  const mlfab_filter f = {.size = sizeof f, .threshold = 0.4};
  mlfab_buf bufs[2] = {{.data = data[0], .count = shapes[0].count, .tensor = 0},
                       {.data = data[4], .count = shapes[4].count, .tensor = 40}};
  const uint64_t indices[2] = {3, 2000};
  int code = mlfab__worker_set_filter(&F.worker, 0, &f, error);
  if (!code) code = mlfab__worker_set_filter(&F.worker, 40, &f, error);
  if (!code) code = mlfab__worker_push(&F.worker, bufs, 2, NULL, F.now, NULL, error);
  if (!code)
    code = mlfab__worker_push_sparse(&F.worker, 0, indices, data[0], 2, NULL, F.now, NULL, error);
  return code;
}

/* One allocation fails at any point: nothing unsent is held back, everything is released, and with memory
 * the same calls succeed. */
static void test_without_memory(void **state) {
  (void)state;
  mlfab_error error;
  for (uint64_t n = 0, done = 0; !done; n++) {
    set_up(2);
    F.allocations_left = n;
    int code = push_both(&error);
    done = code == 0;
    assert_true(code == 0 || code == MLFAB_ERR_MEMORY);
    assert_true(n < 100);
    for (uint32_t i = 0; i < F.worker.nsieves && F.worker.norder == 0; i++) {
      const float *r = (const float *)(const void *)F.worker.sieves[i ? 4 : 0].residual;
      for (uint32_t k = 0; k < 2500; k++) assert_true(!(r[k] > 0.0f) && !(r[k] < 0.0f));
    }
    F.allocations_left = UINT64_MAX;
    if (code) assert_int_equal(push_both(&error), 0);
    finish();
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_not_finite),     cmocka_unit_test(test_filters_are_checked),
      cmocka_unit_test(test_nothing_below),  cmocka_unit_test(test_taken_away),
      cmocka_unit_test(test_retry),          cmocka_unit_test(test_sparse_is_checked),
      cmocka_unit_test(test_not_merged),     cmocka_unit_test(test_withdrawn),
      cmocka_unit_test(test_without_memory), cmocka_unit_test(test_random),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
