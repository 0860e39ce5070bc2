/* test_cache.c - pulls at the worker with version tags and with halves: after losses, cuts, restarts and
 * concurrent requests, buffers and cache hold for every slice what its server answered last. */
#include "core/kernels/packet.h"
#include "core/sparse/sparse_push.h"
#include "core/worker/worker.h"

#include "core/kernels/half.h"
#include "core/kernels/packet.h"
#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "scale.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "changing.h"

enum { SERVERS_MAX = 3, TENSORS = 5, FLAT_MAX = 40000, SLICES = 10, WORDS = 8192 / 4 / 64 };

typedef struct fake { /* a server, and the pull that it answers */
  int up;
  uint32_t generation, epoch;
  uint64_t request; /* 0: none */
  uint32_t nsegments, nsinces, asked_epoch;
  mlfab__segment segments[64];
  uint64_t sinces[SLICES];
  uint32_t slice; /* UINT32_MAX: between slices */
  uint32_t next;  /* slices below this one are done */
  uint64_t at, label;
} fake;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__requests requests;
  mlfab__worker worker;
  mlfab__rng prng;
  uint64_t now, allocations_left;
  uint32_t drops, asks, cancels;
  char dropped[96];
  fake servers[SERVERS_MAX];
  uint8_t meta[MLFAB_META_MAX];
  /* The literal store: each value with the commit (plus one) that changed it last. */
  uint8_t flat[FLAT_MAX], pinned[FLAT_MAX];
  uint64_t tags[FLAT_MAX / 4];
  uint64_t labels[SLICES];
  /* The expected contents of the cache and of the caller's buffers. */
  uint8_t cache[FLAT_MAX], want[FLAT_MAX], buffers[FLAT_MAX];
  int torn[SLICES];    /* slices of which only a part of the last answer has arrived */
  int in_use[TENSORS]; /* by a pull in progress */
  uint64_t model_bytes;
} fixture;

static fixture F;

static uint32_t below(uint32_t n) { return (uint32_t)mlfab__rng_below(&F.prng, n); }

static void greet(uint32_t server);

/* --- the literal store --- */

static const struct {
  int dtype;
  uint32_t count;
} shapes[TENSORS] = {
    {MLFAB_F32, 3000}, {MLFAB_F64, 700}, {MLFAB_F32, 41}, {MLFAB_F32, 2500}, {MLFAB_F32, 300}};

/* The values in the form that travels. */
static void as_sent(uint64_t offset, uint64_t bytes, const uint8_t *from, uint8_t *to) {
  int half = (int)F.worker.define.options.pull_half;
  for (uint64_t at = offset, width; at < offset + bytes; at += width) {
    const mlfab__tensor *t = mlfab__layout_tensor_at(&F.worker.layout, at);
    width = mlfab__dtype_bytes((int)t->dtype);
    if (!half) {
      memcpy(to + at, from + at, width);
    } else if (t->dtype == MLFAB_F32) {
      float x;
      memcpy(&x, from + at, 4);
      x = mlfab__half_back(half, mlfab__half_one(half, x));
      memcpy(to + at, &x, 4);
    } else {
      double x;
      memcpy(&x, from + at, 8);
      x = (double)mlfab__half_back(half, mlfab__half_one(half, mlfab__half_narrow(x)));
      memcpy(to + at, &x, 8);
    }
  }
}

static void set_value(uint64_t offset, uint32_t width) {
  double x = (double)below(100000) / 777.0 - 50.0;
  float f = (float)x;
  if (width == 4) {
    memcpy(F.flat + offset, &f, 4);
  } else {
    memcpy(F.flat + offset, &x, 8);
  }
}

/* A commit into a slice. */
static void commit(uint32_t number) {
  const mlfab__slice *slice = &F.worker.layout.slices[number];
  uint32_t one_of = below(3) ? 100 : 1 + below(3);
  F.labels[number]++;
  for (uint64_t at = slice->offset, width; at < slice->offset + slice->bytes; at += width) {
    width = mlfab__dtype_bytes((int)mlfab__layout_tensor_at(&F.worker.layout, at)->dtype);
    if (below(one_of)) continue;
    set_value(at, (uint32_t)width);
    F.tags[at / 4] = F.labels[number];
  }
}

/* The server receives its slices from another one and restarts their commit numbers. */
static void move_slices(uint32_t server) {
  const mlfab__layout *layout = &F.worker.layout;
  F.servers[server].epoch++;
  for (uint32_t i = 0; i < layout->nslices; i++) {
    const mlfab__slice *slice = &layout->slices[i];
    if (slice->server != server) continue;
    commit(i);
    F.labels[i] = 1 + below(20);
    for (uint64_t at = slice->offset; at < slice->offset + slice->bytes; at += 4)
      F.tags[at / 4] = 1;
  }
}

/* --- the surroundings --- */

static void port_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  fake *s = &F.servers[peer];
  mlfab__pull pull;
  mlfab__pull_cancel cancel;
  (void)self;
  if (!s->up) return;
  if (type == MLFAB__PULL_CANCEL) {
    assert_int_equal(mlfab__decode_pull_cancel(meta, bytes, &cancel), 0);
    F.cancels++;
    if (s->request == cancel.request) s->request = 0;
  }
  if (type != MLFAB__PULL) return;
  static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  static uint64_t sinces[MLFAB__SLICES_MAX];
  assert_int_equal(mlfab__decode_pull(meta, bytes, &pull, segments, sinces), 0);
  F.asks++;
  if (F.worker.cache.bytes) assert_int_equal(s->request, 0); /* one pull at a time */
  assert_true(pull.segments <= 64 && pull.sinces <= SLICES);
  s->request = pull.request;
  s->nsegments = pull.segments;
  s->nsinces = pull.sinces;
  s->asked_epoch = pull.epoch;
  memcpy(s->segments, segments, pull.segments * sizeof *segments);
  memcpy(s->sinces, sinces, pull.sinces * sizeof *sinces);
  s->slice = UINT32_MAX;
  s->next = 0;
}
static void port_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void port_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)code;
  F.drops++;
  snprintf(F.dropped, sizeof F.dropped, "%s", text);
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

static void from_server(uint32_t server, uint8_t type, const uint8_t *meta, uint32_t bytes,
                        const void *bulk, uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, meta, bulk};
  mlfab__worker_frame(&F.worker, server, &in, F.now);
}

static void greet(uint32_t server) {
  mlfab__hello_ack m;
  memset(&m, 0, sizeof m);
  m.server = server;
  m.generation = ++F.servers[server].generation;
  m.model_stands = m.epoch = 1;
  F.servers[server].up = 1;
  F.servers[server].request = 0;
  mlfab__worker_hello(&F.worker, server, &m, F.now);
}

static int open_model(const mlfab_model_options *given, mlfab_request *request_p) {
  mlfab_model_options options = *given;
  mlfab_error error;
  options.size = sizeof options;
  options.slices = SLICES;
  return mlfab__worker_model(&F.worker, &options, NULL, 0, F.now, request_p, &error);
}

static void define_all(void) {
  static uint8_t meta[1024];
  for (uint32_t s = 0; s < F.config.servers; s++) {
    mlfab__frame_out out = {.meta = F.meta};
    mlfab__define_ack m;
    greet(s);
    assert_int_equal(mlfab__worker_next(&F.worker, s, &out), 1);
    mlfab__worker_taken(&F.worker, s, &out);
    memset(&m, 0, sizeof m);
    m.server = s;
    m.packets = 1;
    m.ask = F.worker.define.ask, m.options = F.worker.define.options;
    from_server(s, MLFAB__DEFINE_ACK, meta, mlfab__encode_define_ack(meta, &m), NULL, 0);
  }
}

static void seed(uint64_t from) { mlfab__rng_seed(&F.prng, from); }

static void prepare(uint32_t servers) {
  mlfab__port port = {NULL, port_post, port_ready, port_drop, port_detach, port_event};
  mlfab_env env = {.size = sizeof env, .allocate = scarce, .release = scarce_free};
  mlfab__rng prng = F.prng;
  mlfab_error error;
  memset(&F, 0, sizeof F);
  F.prng = prng;
  F.now = 1;
  F.allocations_left = UINT64_MAX;
  assert_int_equal(mlfab__env_init(&F.env, &env), 0);
  mlfab_config_init(&F.config);
  F.config.workers = 2;
  F.config.servers = servers;
  F.config.chunk_bytes = 4096;
  F.config.model_max_bytes = 1 << 30;
  F.config.timeout_ns = 1000000000;
  assert_int_equal(
      mlfab__worker_init(&F.worker, &F.env, &F.config, 1, &port, &port, &F.stats, &F.requests), 0);
  mlfab__sparse_worker_attach(&F.worker);
  for (uint32_t i = 0; i < TENSORS; i++)
    assert_int_equal(mlfab__worker_tensor(&F.worker, i, shapes[i].dtype, shapes[i].count, &error),
                     0);
}

static void begin(uint32_t servers, const mlfab_model_options *options) {
  mlfab_request request;
  prepare(servers);
  assert_int_equal(open_model(options, &request), 0);
  define_all();
  assert_int_equal(F.worker.stands, 1);
  mlfab__request_end(&F.requests, mlfab__request_find(&F.requests, request));
  assert_true(F.worker.layout.nslices <= SLICES);
  F.model_bytes = F.worker.layout.bytes;
  assert_true(F.model_bytes <= FLAT_MAX);
  for (uint32_t i = 0; i < F.worker.layout.nslices; i++) commit(i);
  for (uint64_t i = 0; i < FLAT_MAX / 4; i++) F.tags[i] = 1; /* first weights */
  for (uint32_t s = 0; s < servers; s++) F.servers[s].epoch = 1;
}

static void finish(void) {
  if (F.drops > 0) fail_msg("dropped: %s", F.dropped);
  mlfab__worker_free(&F.worker);
  assert_int_equal(F.env.bytes, 0);
}

/* --- answers --- */

/* The next slice that the pull touches, and its reader's version; UINT32_MAX: none. */
static uint32_t touched(const fake *s, uint64_t *since_p) {
  uint32_t seen = 0;
  for (uint32_t i = 0; i < F.worker.layout.nslices; i++) {
    const mlfab__slice *slice = &F.worker.layout.slices[i];
    int hit = 0;
    for (uint32_t k = 0; k < s->nsegments; k++) {
      const mlfab__segment *g = &s->segments[k];
      hit |= g->offset < slice->offset + slice->bytes && slice->offset < g->offset + g->bytes;
    }
    if (!hit) continue;
    assert_int_equal(slice->server, s - F.servers);
    if (i >= s->next) {
      *since_p = s->nsinces == 0 ? 0 : s->nsinces == 1 ? s->sinces[0] : s->sinces[seen];
      return i;
    }
    seen++;
  }
  return UINT32_MAX;
}

static void pin(fake *s, uint32_t number) {
  const mlfab__slice *slice = &F.worker.layout.slices[number];
  F.torn[number] = 1;
  s->slice = number;
  s->at = slice->offset;
  for (uint32_t k = 0; k < s->nsegments; k++) { /* without tags only what was asked for */
    if (s->segments[k].offset + s->segments[k].bytes <= s->at) continue;
    s->at = mlfab__max(s->at, s->segments[k].offset);
    break;
  }
  s->label = F.labels[number];
  memcpy(F.pinned + slice->offset, F.flat + slice->offset, slice->bytes);
}

/* Packets of a stretch of the pinned slice that hold the changed grains, of any grain size. */
static uint32_t pack(uint8_t *out, uint64_t at, uint64_t end, uint64_t since) {
  uint32_t used = 0;
  while (at < end) {
    const mlfab__tensor *t = mlfab__layout_tensor_at(&F.worker.layout, at);
    uint32_t width = mlfab__dtype_bytes((int)t->dtype), log2 = below(9);
    uint64_t stop = mlfab__min(end, t->offset + t->bytes), keep[WORDS] = {0};
    mlfab__packet_shape shape = {at, (int)t->dtype, (int)F.worker.define.options.pull_half, log2,
                                 (uint32_t)((stop - at) / width)};
    for (uint32_t i = 0; i < shape.elements; i++) {
      if (F.tags[(at + (uint64_t)i * width) / 4] > since)
        keep[(i >> log2) / 64] |= (uint64_t)1 << ((i >> log2) % 64);
    }
    used += mlfab__packet_marked(out + used, &shape, F.pinned + at, keep, (int)below(2));
    at = stop;
  }
  return used;
}

/* The end of the requested part of the slice. */
static uint64_t asked_end(const fake *s) {
  const mlfab__slice *slice = &F.worker.layout.slices[s->slice];
  for (uint32_t k = 0; k < s->nsegments; k++) {
    if (s->segments[k].offset + s->segments[k].bytes > s->at)
      return mlfab__min(slice->offset + slice->bytes, s->segments[k].offset + s->segments[k].bytes);
  }
  fail();
  return 0;
}

/* The whole slice was sent: the cache must hold it from now on. */
static void slice_sent(fake *s) {
  const mlfab__slice *slice = &F.worker.layout.slices[s->slice];
  as_sent(slice->offset, slice->bytes, F.pinned, F.cache);
  F.torn[s->slice] = 0;
  s->next = s->slice + 1;
  s->slice = UINT32_MAX;
}

static void answer(uint32_t server) {
  static uint8_t bulk[8192 * 2];
  fake *s = &F.servers[server];
  uint8_t meta[128];
  uint64_t since = 0;
  uint32_t number = touched(s, &since);
  if (s->slice == UINT32_MAX || below(30) == 0) pin(s, number);
  uint64_t end = asked_end(s);
  const mlfab__slice *slice = &F.worker.layout.slices[number];
  mlfab__model m = {.request = s->request,
                    .offset = s->at,
                    .version = s->label,
                    .commit = s->label,
                    .slice = number,
                    .epoch = s->epoch};
  m.bytes = below(3) ? mlfab__min(end - s->at, 8 * (uint64_t)(1 + below(300))) : end - s->at;
  int fresh = s->nsinces > 0 && s->asked_epoch == s->epoch;
  if (!fresh) since = 0;
  assert_true(since <= F.labels[number]); /* no cache has a version from the future */
  uint32_t n = (uint32_t)m.bytes;
  if (F.worker.define.options.pull_half || (since > 0 && below(4))) {
    n = pack(bulk, s->at, s->at + m.bytes, since);
    m.flags = MLFAB__MODEL_PACKED;
  } else {
    memcpy(bulk, F.pinned + s->at, n);
  }
  s->at += m.bytes;
  uint64_t rest;
  if (s->at == end) {
    for (uint32_t k = 0; k < s->nsegments; k++) {
      if (s->segments[k].offset >= s->at && s->segments[k].offset < slice->offset + slice->bytes) {
        s->at = s->segments[k].offset;
        break;
      }
    }
    if (s->at == end) slice_sent(s);
  }
  if (s->slice == UINT32_MAX && touched(s, &rest) == UINT32_MAX) {
    m.flags |= MLFAB__MODEL_LAST;
    s->request = 0;
  }
  from_server(server, MLFAB__MODEL, meta, mlfab__encode_model(meta, &m), n ? bulk : NULL, n);
}

static void happen(uint32_t server) {
  fake *s = &F.servers[server];
  if (below(4) == 0) commit(below(F.worker.layout.nslices));
  if (!s->up) {
    greet(server);
  } else if (below(150) == 0) {
    s->up = 0;
    s->request = 0;
    mlfab__worker_lost(&F.worker, server, F.now);
  } else if (s->request != 0) {
    answer(server);
  }
}

/* --- pulls --- */

typedef struct pulling {
  mlfab_request request;
  uint32_t mask, bare; /* tensors; tensors without a buffer */
  uint32_t flags;
} pulling;

static uint8_t *buffer_of(uint32_t tensor) {
  return F.buffers + mlfab__layout_find(&F.worker.layout, tensor)->offset;
}

static pulling pull(uint32_t mask, uint32_t bare, uint32_t flags) {
  pulling p = {0, mask, bare, flags};
  mlfab_pull_options options = {.size = sizeof options, .flags = flags};
  mlfab_buf bufs[TENSORS];
  mlfab_error error;
  uint32_t n = 0;
  memset(bufs, 0, sizeof bufs);
  for (uint32_t i = TENSORS; i-- > 0;) {
    if (!(mask >> i & 1)) continue;
    bufs[n].tensor = i;
    bufs[n].count = shapes[i].count;
    bufs[n++].data = bare >> i & 1 ? NULL : buffer_of(i);
    F.in_use[i] = 1;
  }
  assert_int_equal(mlfab__worker_pull(&F.worker, bufs, n, &options, F.now, &p.request, &error), 0);
  return p;
}

static int pull_is_done(const pulling *p) {
  return mlfab__request_find(&F.requests, p->request)->done;
}

/* The buffers hold what arrived. Compared only if the pull was `alone`: other pulls that share slices
 * advance the cache. */
static void check_pull(const pulling *p, int alone) {
  for (uint32_t i = 0; i < TENSORS; i++) {
    const mlfab__tensor *t = mlfab__layout_find(&F.worker.layout, i);
    if (!(p->mask >> i & 1)) continue;
    F.in_use[i] = 0;
    if (p->bare >> i & 1 || !alone) continue;
    if (memcmp(F.buffers + t->offset, F.cache + t->offset, t->bytes) != 0)
      fail_msg("tensor %u is not what was pulled (flags %u)", i, p->flags);
  }
}

static void check_cache(void) {
  const mlfab__layout *layout = &F.worker.layout;
  const void *data;
  uint64_t count;
  mlfab_error error;
  for (uint32_t i = 0; i < layout->nslices; i++) {
    const mlfab__slice *slice = &layout->slices[i];
    if (F.worker.cache.commits[i] == 0 || F.torn[i]) continue;
    if (memcmp(F.worker.cache.bytes + slice->offset, F.cache + slice->offset, slice->bytes) != 0)
      fail_msg("the cache of slice %u is wrong", i);
  }
  for (uint32_t i = 0; i < TENSORS; i++) {
    assert_int_equal(mlfab__worker_cached(&F.worker, i, &data, &count, &error), 0);
    assert_int_equal(count, shapes[i].count);
    assert_ptr_equal(data, F.worker.cache.bytes + mlfab__layout_find(layout, i)->offset);
  }
}

static void end_pull(pulling *p, int code) {
  mlfab__request *r = mlfab__request_find(&F.requests, p->request);
  assert_int_equal(r->done, 1);
  assert_int_equal(r->result.status, code);
  mlfab__request_end(&F.requests, r);
  p->request = 0;
}

static void finish_pull(const pulling *p) {
  for (uint32_t i = 0; !pull_is_done(p); i++) {
    assert_true(i < 100000);
    happen(below(F.config.servers));
  }
}

static void run_cached(void) {
  mlfab_model_options options = {.tags = 1u << below(17), .pull_half = below(2) * below(3)};
  uint32_t most = 1 + below(4), flags_of[] = {0, MLFAB_PULL_KEPT, MLFAB_PULL_KEPT, MLFAB_PULL_FULL,
                                              MLFAB_PULL_KEPT | MLFAB_PULL_FULL};
  pulling pulls[4] = {{0}};
  uint32_t written = 0; /* tensors whose buffers were ever written completely */
  begin(1 + below(SERVERS_MAX), &options);
  for (uint32_t step = 0; step < 1500; step++) {
    uint32_t k = below(most), open = 0;
    if (pulls[k].request == 0 && below(3) == 0) {
      uint32_t mask = 0, flags = flags_of[below(5)];
      for (uint32_t i = 0; i < TENSORS; i++)
        if (!F.in_use[i] && below(2)) mask |= 1u << i;
      if ((mask & written) != mask) flags &= ~(uint32_t)MLFAB_PULL_KEPT;
      if (mask) pulls[k] = pull(mask, below(4) ? 0 : mask & below(32), flags);
    }
    happen(below(F.config.servers));
    if (below(300) == 0 && most == 1) { /* slices have moved */
      uint32_t s = below(F.config.servers);
      if (F.servers[s].request == 0) move_slices(s);
    }
    for (k = 0; k < most; k++) {
      if (pulls[k].request == 0) continue;
      if (!pull_is_done(&pulls[k]) && below(500) == 0) {
        mlfab__worker_withdraw(&F.worker, mlfab__request_find(&F.requests, pulls[k].request),
                               MLFAB_ERR_CANCELLED, F.now);
        end_pull(&pulls[k], MLFAB_ERR_CANCELLED);
        for (uint32_t i = 0; i < TENSORS; i++)
          if (pulls[k].mask >> i & 1) F.in_use[i] = 0;
        continue;
      }
      open += !pull_is_done(&pulls[k]);
      if (!pull_is_done(&pulls[k])) continue;
      /* Other pulls may have advanced slices that they share. */
      check_pull(&pulls[k], most == 1);
      written |= pulls[k].mask & ~pulls[k].bare;
      end_pull(&pulls[k], 0);
    }
    check_cache();
  }
  /* When all pulls are done, a pull that keeps the buffers' contents makes all of them equal to the store. */
  for (uint32_t k = 0; k < most; k++) {
    if (pulls[k].request == 0) continue;
    finish_pull(&pulls[k]);
    end_pull(&pulls[k], 0);
  }
  uint32_t all = (1u << TENSORS) - 1;
  pulling last = pull(all, 0, written == all ? MLFAB_PULL_KEPT : 0);
  finish_pull(&last);
  check_pull(&last, 1);
  end_pull(&last, 0);
  check_cache();
  finish();
}

static uint64_t number_of(const char *name, uint64_t by_default) {
  const char *text = getenv(name);
  return text ? strtoull(text, NULL, 0) : by_default;
}

static void test_random(void **state) {
  (void)state;
  uint64_t from = number_of("MLFAB_SEED", 1), runs = test_cases(100);
  for (uint64_t i = 0; i < runs; i++) {
    seed(from + i);
    run_cached();
  }
}

/* Without tags, halves go directly into the buffers. */
static void test_halves(void **state) {
  (void)state;
  for (uint32_t i = 0; i < 50; i++) {
    mlfab_model_options options = {.pull_half = 1 + i % 2};
    seed(i);
    begin(1 + below(SERVERS_MAX), &options);
    uint32_t mask = 1 + below((1 << TENSORS) - 1);
    uint8_t untouched[FLAT_MAX];
    memcpy(untouched, F.buffers, sizeof untouched);
    pulling p = pull(mask, 0, 0);
    finish_pull(&p);
    check_pull(&p, 1);
    for (uint32_t k = 0; k < TENSORS; k++) {
      const mlfab__tensor *t = mlfab__layout_find(&F.worker.layout, k);
      if (!(mask >> k & 1))
        assert_memory_equal(F.buffers + t->offset, untouched + t->offset, t->bytes);
    }
    end_pull(&p, 0);
    finish();
  }
}

/* --- cases --- */

static void serve(const pulling *p) {
  for (uint32_t i = 0; !pull_is_done(p); i++) {
    assert_true(i < 100000);
    for (uint32_t s = 0; s < F.config.servers; s++)
      if (F.servers[s].request != 0) answer(s);
  }
}

static void test_what_is_asked(void **state) {
  (void)state;
  mlfab_model_options options = {.tags = 4};
  seed(3);
  begin(2, &options);
  uint32_t n = F.worker.layout.nslices;
  pulling p = pull(1u << 2, 0, 0); /* 164 bytes inside one slice */
  const mlfab__tensor *t = mlfab__layout_find(&F.worker.layout, 2);
  uint32_t slice = mlfab__layout_slice_at(&F.worker.layout, t->offset);
  fake *s = &F.servers[F.worker.layout.slices[slice].server];
  assert_int_equal(F.asks, 1);
  assert_int_equal(s->nsegments, 1);
  assert_int_equal(s->segments[0].offset, F.worker.layout.slices[slice].offset);
  assert_int_equal(s->segments[0].bytes, F.worker.layout.slices[slice].bytes);
  assert_int_equal(s->nsinces, 1);
  assert_int_equal(s->sinces[0], 0);
  assert_int_equal(s->asked_epoch, 0);
  serve(&p);
  end_pull(&p, 0);
  /* All: one commit a slice, since they differ; adjacent slices form one stretch. */
  p = pull((1u << TENSORS) - 1, (1u << TENSORS) - 1, 0);
  assert_int_equal(s->nsegments, 1);
  assert_int_equal(s->asked_epoch, 1);
  uint32_t own = 0;
  for (uint32_t i = 0; i < n; i++) own += F.worker.layout.slices[i].server == s - F.servers;
  assert_int_equal(s->nsinces, own);
  serve(&p);
  end_pull(&p, 0);
  /* Now they are equal. */
  p = pull((1u << TENSORS) - 1, 0, 0);
  assert_int_equal(s->nsinces, 1);
  assert_int_equal(s->sinces[0], 1);
  serve(&p);
  check_pull(&p, 1);
  end_pull(&p, 0);
  p = pull((1u << TENSORS) - 1, 0, MLFAB_PULL_FULL);
  assert_int_equal(s->nsinces, 1);
  assert_int_equal(s->sinces[0], 0);
  serve(&p);
  end_pull(&p, 0);
  finish();
}

/* A buffer keeps what it holds of a slice that has not changed, even when another slice has changed and
 * this one was requested. */
static void test_kept(void **state) {
  (void)state;
  mlfab_model_options options = {.tags = 1,
                                 .pull_half = 1}; /* packets: unchanged elements are not sent */
  const uint32_t all = (1u << TENSORS) - 1;
  seed(3);
  begin(1, &options);
  pulling p = pull(all, 0, 0);
  serve(&p);
  end_pull(&p, 0);
  uint32_t first =
      mlfab__layout_slice_at(&F.worker.layout, mlfab__layout_find(&F.worker.layout, 0)->offset);
  uint64_t label = F.labels[first];
  const mlfab__tensor *other = mlfab__layout_find(&F.worker.layout, 3);
  assert_true(mlfab__layout_slice_at(&F.worker.layout, other->offset) > first);
  for (uint32_t i = 0; i < 10; i++) commit(first);
  assert_int_equal(F.labels[first], label + 10);
  p = pull(all, all & ~1u, 0); /* into the buffer of tensor 0 only */
  serve(&p);
  end_pull(&p, 0);
  memset(buffer_of(0), 0xEE, 100);
  memset(buffer_of(3), 0xEE, other->bytes);
  p = pull(all, 0, MLFAB_PULL_KEPT);
  serve(&p);
  end_pull(&p, 0);
  for (uint64_t i = 0; i < 100; i++) assert_int_equal(buffer_of(0)[i], 0xEE);
  for (uint64_t i = 0; i < other->bytes; i++) assert_int_equal(buffer_of(3)[i], 0xEE);
  p = pull(all, 0, 0);
  serve(&p);
  check_pull(&p, 1);
  end_pull(&p, 0);
  finish();
}

/* One pull is sent at a time; the next one is sent when it ends, however it ends. */
static void test_turns(void **state) {
  (void)state;
  mlfab_model_options options = {.tags = 1};
  seed(3);
  begin(1, &options);
  pulling p[4];
  for (uint32_t i = 0; i < 4; i++) p[i] = pull(1u << i, 0, 0);
  assert_int_equal(F.asks, 1);
  mlfab__worker_withdraw(&F.worker, mlfab__request_find(&F.requests, p[1].request),
                         MLFAB_ERR_CANCELLED, F.now);
  assert_int_equal(F.asks, 1);
  assert_int_equal(F.servers[0].request, p[0].request);
  answer(0);
  mlfab__worker_withdraw(&F.worker, mlfab__request_find(&F.requests, p[0].request),
                         MLFAB_ERR_TIMEOUT, F.now);
  assert_int_equal(F.asks, 2);
  assert_int_equal(F.servers[0].request, p[2].request);
  F.servers[0].up = 0;
  mlfab__worker_lost(&F.worker, 0, F.now);
  greet(0);
  assert_int_equal(F.asks, 3);
  assert_int_equal(F.servers[0].request, p[2].request);
  serve(&p[2]);
  assert_int_equal(F.servers[0].request, p[3].request);
  mlfab__pull_fail m = {.request = p[3].request, .code = MLFAB_ERR_CALLBACK};
  uint8_t meta[512];
  pulling late = pull(1u << 4, 0, 0);
  F.servers[0].request = 0;
  from_server(0, MLFAB__PULL_FAIL, meta, mlfab__encode_pull_fail(meta, &m), NULL, 0);
  assert_int_equal(F.servers[0].request, late.request);
  mlfab__worker_dead(&F.worker, 0, F.now);
  end_pull(&late, MLFAB_ERR_PEER_DEAD);
  end_pull(&p[0], MLFAB_ERR_TIMEOUT);
  end_pull(&p[1], MLFAB_ERR_CANCELLED);
  end_pull(&p[2], 0);
  end_pull(&p[3], MLFAB_ERR_CALLBACK);
  finish();
}

static void refuse(const mlfab_model_options *options, int code, const char *text) {
  mlfab_model_options all = *options;
  mlfab_request request;
  mlfab_error error;
  all.size = sizeof all;
  assert_int_equal(mlfab__worker_model(&F.worker, &all, NULL, 0, F.now, &request, &error), code);
  assert_non_null(strstr(error.text, text));
}

static void test_options_are_checked(void **state) {
  (void)state;
  double infinite = 1e308 * 10.0;
  mlfab_error error;
  prepare(1);
  refuse(&(mlfab_model_options){.tags = 3}, MLFAB_ERR_ARGUMENT, "tags is 3");
  refuse(&(mlfab_model_options){.tags = 131072}, MLFAB_ERR_ARGUMENT, "tags is 131072");
  refuse(&(mlfab_model_options){.pull_half = 3}, MLFAB_ERR_ARGUMENT, "pull_half is 3");
  refuse(&(mlfab_model_options){.change_threshold = -1}, MLFAB_ERR_ARGUMENT,
         "change_threshold is -1");
  refuse(&(mlfab_model_options){.change_threshold = infinite}, MLFAB_ERR_ARGUMENT,
         "change_threshold");
  refuse(&(mlfab_model_options){.change_decay = infinite - infinite}, MLFAB_ERR_ARGUMENT,
         "change_decay");
  refuse(&(mlfab_model_options){.tags = 1, .ghost = 1}, MLFAB_ERR_UNSUPPORTED, "ghost");
  assert_int_equal(mlfab__worker_tensor(&F.worker, 77, MLFAB_I64, 8, &error), 0);
  refuse(&(mlfab_model_options){.pull_half = 1}, MLFAB_ERR_UNSUPPORTED,
         "not supported: filters on int64 (pull_half, tensor 77)");
  refuse(&(mlfab_model_options){.change_threshold = 0.5}, MLFAB_ERR_UNSUPPORTED,
         "not supported: filters on int64 (change_threshold, tensor 77)");
  assert_int_equal(F.requests.open, 0);
  finish();
}

static void test_pulls_are_checked(void **state) {
  (void)state;
  mlfab_model_options options = {.tags = 0};
  mlfab_pull_options wanted = {.size = sizeof wanted};
  mlfab_buf buf = {.tensor = 0, .count = shapes[0].count, .data = F.buffers};
  mlfab_request request;
  mlfab_error error;
  const void *data;
  uint64_t count;
  prepare(1);
  assert_int_equal(mlfab__worker_cached(&F.worker, 0, &data, &count, &error), MLFAB_ERR_STATE);
  finish();
  begin(1, &options);
  assert_int_equal(mlfab__worker_cached(&F.worker, 0, &data, &count, &error), MLFAB_ERR_STATE);
  for (wanted.flags = 1; wanted.flags <= 4; wanted.flags++)
    assert_int_equal(mlfab__worker_pull(&F.worker, &buf, 1, &wanted, F.now, &request, &error),
                     MLFAB_ERR_ARGUMENT);
  wanted.flags = wanted.size = 0;
  assert_int_equal(mlfab__worker_pull(&F.worker, &buf, 1, &wanted, F.now, &request, &error),
                   MLFAB_ERR_ARGUMENT);
  buf.data = NULL;
  assert_int_equal(mlfab__worker_pull(&F.worker, &buf, 1, NULL, F.now, &request, &error),
                   MLFAB_ERR_ARGUMENT);
  finish();
  options.tags = 1;
  begin(1, &options);
  assert_int_equal(mlfab__worker_cached(&F.worker, 9, &data, &count, &error), MLFAB_ERR_TENSOR);
  wanted.size = sizeof wanted;
  wanted.flags = 4;
  assert_int_equal(mlfab__worker_pull(&F.worker, &buf, 1, &wanted, F.now, &request, &error),
                   MLFAB_ERR_ARGUMENT);
  finish();
}

/* Frames that do not fit are refused, and nothing outside the slice is written. */
static void test_frames_that_do_not_fit(void **state) {
  (void)state;
  for (uint32_t i = 0; i < 9; i++) {
    static uint8_t bulk[65536];
    uint8_t meta[128];
    mlfab_model_options options = {.tags = 1};
    begin(2, &options);
    const mlfab__slice *slices = F.worker.layout.slices;
    pulling p = pull(1, 0, 0);
    uint32_t first =
        mlfab__layout_slice_at(&F.worker.layout, mlfab__layout_find(&F.worker.layout, 0)->offset);
    uint32_t server = slices[first].server;
    mlfab__model m = {.request = p.request,
                      .offset = slices[first].offset,
                      .bytes = 64,
                      .commit = 1,
                      .version = 1,
                      .slice = first,
                      .epoch = 1};
    uint32_t n = 64;
    float values[16] = {1};
    mlfab__packet_shape shape = {m.offset, MLFAB_F32, MLFAB_HALF_NONE, 0, 16};
    switch (i) {
      case 0:
        m.offset += 64;
        break; /* does not start at the beginning */
      case 1:
        m.bytes = 128;
        break; /* a frame without packets must be complete */
      case 2:
        m.bytes = n = (uint32_t)slices[first].bytes + 64;
        break;
      case 3:
        m.slice = first + 1;
        break;
      case 4:
        shape.offset += 64;
        break; /* beyond the stretch */
      case 5:
        shape.dtype = MLFAB_I64;
        shape.elements = 8;
        break;
      case 6:
        shape.elements = 15;
        break; /* in order so far ... */
      case 7:
        n = 4;
        break; /* not a packet */
      default:
        m.slice = UINT32_MAX;
        break;
    }
    memset(bulk, 0, sizeof bulk);
    if (i >= 4 && i < 8) {
      m.flags = MLFAB__MODEL_PACKED;
      uint32_t bytes = mlfab__packet_dense(bulk, &shape, values);
      if (i != 7) n = bytes;
      if (i == 6) { /* ... but the second one overlaps it */
        shape.offset += 56;
        shape.elements = 2;
        n += mlfab__packet_dense(bulk + n, &shape, values);
      }
    }
    from_server(server, MLFAB__MODEL, meta, mlfab__encode_model(meta, &m), bulk, n);
    if (F.drops != 1) fail_msg("frame %u was taken", i);
    F.drops = 0;
    assert_int_equal(F.worker.cache.commits[first], 0);
    finish();
  }
}

/* A packet whose indices change while its values are read: the model holds the checked values, or is
 * unchanged. */
static void test_changing(void **state) {
  static uint8_t bulk[16384], before[FLAT_MAX], sent[FLAT_MAX];
  (void)state;
  for (uint32_t i = 0; i < 24; i++) {
    uint8_t meta[128];
    mlfab_model_options options = {.tags = 1};
    begin(2, &options);
    uint32_t first =
        mlfab__layout_slice_at(&F.worker.layout, mlfab__layout_find(&F.worker.layout, 1)->offset);
    const mlfab__slice *slice = &F.worker.layout.slices[first];
    pulling p = pull(1u << 1, 0, 0);
    uint32_t indices[8];
    double values[8];
    for (uint32_t k = 0; k < 8; k++) {
      indices[k] = 50 * k;
      values[k] = (double)(k + 1);
    }
    assert_true(slice->bytes >= 3200);
    mlfab__packet_shape shape = {slice->offset, MLFAB_F64, MLFAB_HALF_NONE, 0, 400};
    uint32_t n = mlfab__packet_sparse(bulk, &shape, indices, values, 8);
    size_t head = MLFAB__PACKET_HEADER + 16;
    mlfab__packet packet;
    assert_int_equal(mlfab__packet_open(bulk, n, &packet), n);
    assert_ptr_equal(packet.values, bulk + head); /* 8 indices, then the values */
    memcpy(before, F.worker.cache.bytes, F.model_bytes);
    memcpy(sent, before, F.model_bytes);
    mlfab__unpack_store(&packet, sent + slice->offset);
    /* Outside the slice, or out of order. */
    uint16_t other = (uint16_t)(i % 3 == 0 ? 60000 : 50 * ((i + 3) % 8) + 1);
    uint8_t *bytes = changing_make(bulk, n, head);
    if (i > 0) changing_to(MLFAB__PACKET_HEADER + 2 * (i % 8), &other, 2);
    changing_arm();
    mlfab__model m = {.request = p.request,
                      .offset = slice->offset,
                      .bytes = 3200,
                      .commit = 1,
                      .version = 1,
                      .slice = first,
                      .flags = MLFAB__MODEL_PACKED,
                      .epoch = 1};
    from_server(slice->server, MLFAB__MODEL, meta, mlfab__encode_model(meta, &m), bytes, n);
    assert_int_equal(changing_end(), 1);
    if (i == 0) assert_int_equal(F.drops, 0); /* nothing changes */
    assert_memory_equal(F.worker.cache.bytes, F.drops ? before : sent, F.model_bytes);
    F.drops = 0;
    finish();
  }
}

static void test_without_memory(void **state) {
  (void)state;
  mlfab_model_options options = {.tags = 1};
  int failed_late = 0;
  for (uint64_t n = 0, done = 0; !done; n++) {
    mlfab_request request;
    prepare(1);
    F.allocations_left = n;
    int code = open_model(&options, &request);
    assert_true(n < 200);
    if (!code) {
      define_all();
      const mlfab__request *r = mlfab__request_find(&F.requests, request);
      assert_int_equal(r->done, 1);
      code = r->result.status;
      failed_late |= code != 0;
      if (code) assert_non_null(strstr(F.requests.last.text, "memory for the cache"));
    }
    assert_true(code == 0 || code == MLFAB_ERR_MEMORY);
    done = code == 0;
    finish();
  }
  assert_true(failed_late);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_what_is_asked),
      cmocka_unit_test(test_kept),
      cmocka_unit_test(test_turns),
      cmocka_unit_test(test_options_are_checked),
      cmocka_unit_test(test_pulls_are_checked),
      cmocka_unit_test(test_frames_that_do_not_fit),
      cmocka_unit_test(test_changing),
      cmocka_unit_test(test_without_memory),
      cmocka_unit_test(test_halves),
      cmocka_unit_test(test_random),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
