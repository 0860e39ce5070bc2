/* test_cache.c - the pulls of a worker with version tags and with halves: after losses, cuts, restarts and concurrent
 * requests, buffers and cache hold for every slice what its server answered last. */
#include "tests/seam/talk.h"

#include "core/base/rng.h"
#include "core/kernels/half.h"
#include "core/kernels/kernels.h"
#include "core/kernels/packet.h"
#include "core/model/layout.h"
#include "tests/unit/changing.h"
#include "tests/unit/scale.h"

enum { SERVERS_MAX = 3, TENSORS = 5, FLAT_MAX = 40000, SLICES = 10, WORDS = 8192 / 4 / 64 };
enum { ALL = (1 << TENSORS) - 1, BEAT_NS = 100000000 };

typedef struct source { /* a server, and the pull that it answers */
  uint32_t epoch;
  uint64_t request; /* 0: none */
  uint32_t nsegments, nsinces, asked_epoch;
  mlfab__segment segments[64];
  uint64_t sinces[SLICES];
  uint32_t slice; /* UINT32_MAX: between slices */
  uint32_t next;  /* slices below this one are done */
  uint64_t at, label;
} source;

static mlfab__rng prng;
static mlfab__env memory; /* of the layout */

static struct {
  mlfab__layout layout;
  int half; /* MLFAB_HALF_* */
  uint32_t asks, servers;
  source sources[SERVERS_MAX];
  /* The literal store: each value with the commit (plus one) that changed it last. */
  uint8_t flat[FLAT_MAX], pinned[FLAT_MAX];
  uint64_t tags[FLAT_MAX / 4];
  uint64_t labels[SLICES];
  /* The expected contents of the cache and of the caller's buffers. */
  uint8_t cache[FLAT_MAX], buffers[FLAT_MAX];
  int holds
      [SLICES]; /* slices that the cache has had whole, and of which no part of another answer has arrived */
  int in_use[TENSORS]; /* by a pull in progress */
} F;

static uint32_t below(uint32_t n) { return (uint32_t)mlfab__rng_below(&prng, n); }

/* --- the literal store --- */

static const struct {
  int dtype;
  uint32_t count;
} shapes[TENSORS] = {
    {MLFAB_F32, 3000}, {MLFAB_F64, 700}, {MLFAB_F32, 41}, {MLFAB_F32, 2500}, {MLFAB_F32, 300}};

/* The values in the form that travels. */
static void as_sent(uint64_t offset, uint64_t bytes, const uint8_t *from, uint8_t *to) {
  int half = F.half;
  for (uint64_t at = offset, width; at < offset + bytes; at += width) {
    const mlfab__tensor *x = mlfab__layout_tensor_at(&F.layout, at);
    width = mlfab__dtype_bytes((int)x->dtype);
    if (!half) {
      memcpy(to + at, from + at, width);
    } else if (x->dtype == MLFAB_F32) {
      float y;
      memcpy(&y, from + at, 4);
      y = mlfab__half_back(half, mlfab__half_one(half, y));
      memcpy(to + at, &y, 4);
    } else {
      double y;
      memcpy(&y, from + at, 8);
      y = (double)mlfab__half_back(half, mlfab__half_one(half, mlfab__half_narrow(y)));
      memcpy(to + at, &y, 8);
    }
  }
}

static void set_value(uint64_t offset, uint32_t width) {
  double x = (double)below(100000) / 777.0 - 50.0;
  float f = (float)x;
  if (width == 4)
    memcpy(F.flat + offset, &f, 4);
  else
    memcpy(F.flat + offset, &x, 8);
}

/* A commit into a slice. */
static void commit(uint32_t number) {
  const mlfab__slice *slice = &F.layout.slices[number];
  uint32_t one_of = below(3) ? 100 : 1 + below(3);
  F.labels[number]++;
  for (uint64_t at = slice->offset, width; at < slice->offset + slice->bytes; at += width) {
    width = mlfab__dtype_bytes((int)mlfab__layout_tensor_at(&F.layout, at)->dtype);
    if (below(one_of)) continue;
    set_value(at, (uint32_t)width);
    F.tags[at / 4] = F.labels[number];
  }
}

/* The server receives its slices from another one and restarts their commit numbers. */
static void move_slices(uint32_t server) {
  F.sources[server].epoch++;
  for (uint32_t i = 0; i < F.layout.nslices; i++) {
    const mlfab__slice *slice = &F.layout.slices[i];
    if (slice->server != server) continue;
    commit(i);
    F.labels[i] = 1 + below(20);
    F.holds[i] = 0;
    for (uint64_t at = slice->offset; at < slice->offset + slice->bytes; at += 4)
      F.tags[at / 4] = 1;
  }
}

/* --- servers --- */

/* The servers hear the worker's frames. One pull at a time is sent to a server. */
static void listen(void) {
  for (uint32_t k = 0; k < F.servers; k++) {
    source *s = &F.sources[k];
    for (const talk_frame *f; (f = talk_peer_of(SERVER(k))->first);) {
      if (f->header.type == MLFAB__PULL_CANCEL) {
        HEAR(SERVER(k), PULL_CANCEL, pull_cancel,
             (s->request = s->request == m->request ? 0 : s->request, 1));
        continue;
      }
      HEAR_PULL(SERVER(k), (s->request == 0 || F.half) && m->segments <= 64 &&
                               m->sinces <= SLICES && (s->request = m->request) > 0 &&
                               (s->asked_epoch = m->epoch, 1) &&
                               (s->nsegments = m->segments, s->nsinces = m->sinces, 1));
      memcpy(s->segments, t->segments, s->nsegments * sizeof *s->segments);
      memcpy(s->sinces, t->versions, s->nsinces * sizeof *s->sinces);
      s->slice = UINT32_MAX;
      s->next = 0;
      F.asks++;
    }
  }
}

static void seed(uint64_t from) { mlfab__rng_seed(&prng, from); }

static uint32_t replicas; /* of each server */

/* A worker whose tensors are defined. */
static void prepare(uint32_t servers) {
  memset(&F, 0, sizeof F);
  F.servers = servers;
  TALK(.roles = MLFAB_ROLE_WORKER, .rank = 1, .workers = 2, .servers = servers, .dedicated = 1,
       .replicas = replicas, .scheduler = replicas ? MLFAB_SCHEDULER_OWN : 0, .chunk_bytes = 4096,
       .heartbeat_ns = BEAT_NS);
  for (uint32_t i = 0; i < TENSORS; i++)
    CALL(TENSOR_ADD, .tensor = i, .dtype = shapes[i].dtype, .count = shapes[i].count);
}

static void begin(uint32_t servers, const mlfab_model_options *given) {
  mlfab_model_options options = *given;
  mlfab__tensor_info infos[TENSORS];
  mlfab_error error;
  options.size = sizeof options;
  options.slices = SLICES;
  prepare(servers);
  F.half = (int)options.pull_half;
  talk_stand(&options);
  for (uint32_t i = 0; i < TENSORS; i++)
    infos[i] = (mlfab__tensor_info){i, (uint32_t)shapes[i].dtype, shapes[i].count};
  assert_int_equal(mlfab__env_init(&memory, NULL), 0);
  assert_int_equal(
      mlfab__layout_build(&memory, infos, TENSORS, SLICES, servers, 0, 1 << 30, &F.layout, &error),
      0);
  assert_true(F.layout.nslices <= SLICES && F.layout.bytes <= FLAT_MAX);
  for (uint32_t i = 0; i < F.layout.nslices; i++) commit(i);
  for (uint64_t i = 0; i < FLAT_MAX / 4; i++) F.tags[i] = 1; /* first weights */
  for (uint32_t s = 0; s < servers; s++) F.sources[s].epoch = 1;
}

static void finish(void) {
  assert_int_equal(talk_stats().frames_refused, 0);
  if (F.layout.slices) mlfab__layout_free(&memory, &F.layout);
  talk_close();
}

/* --- answers --- */

/* The next slice that the pull touches, and its reader's version; UINT32_MAX: none. */
static uint32_t touched(const source *s, uint64_t *since_p) {
  uint32_t seen = 0;
  for (uint32_t i = 0; i < F.layout.nslices; i++) {
    const mlfab__slice *slice = &F.layout.slices[i];
    int hit = 0;
    for (uint32_t k = 0; k < s->nsegments; k++) {
      const mlfab__segment *g = &s->segments[k];
      hit |= g->offset < slice->offset + slice->bytes && slice->offset < g->offset + g->bytes;
    }
    if (!hit) continue;
    assert_int_equal(slice->server, s - F.sources);
    if (i >= s->next) {
      *since_p = s->nsinces == 0 ? 0 : s->nsinces == 1 ? s->sinces[0] : s->sinces[seen];
      return i;
    }
    seen++;
  }
  return UINT32_MAX;
}

static void pin(source *s, uint32_t number) {
  const mlfab__slice *slice = &F.layout.slices[number];
  F.holds[number] = 0;
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
    const mlfab__tensor *x = mlfab__layout_tensor_at(&F.layout, at);
    uint32_t width = mlfab__dtype_bytes((int)x->dtype), log2 = below(9);
    uint64_t stop = mlfab__min(end, x->offset + x->bytes), keep[WORDS] = {0};
    mlfab__packet_shape shape = {at, (int)x->dtype, F.half, log2, (uint32_t)((stop - at) / width)};
    for (uint32_t i = 0; i < shape.elements; i++)
      if (F.tags[(at + (uint64_t)i * width) / 4] > since)
        keep[(i >> log2) / 64] |= (uint64_t)1 << ((i >> log2) % 64);
    used += mlfab__packet_marked(out + used, &shape, F.pinned + at, keep, (int)below(2));
    at = stop;
  }
  return used;
}

/* The end of the requested part of the slice. */
static uint64_t asked_end(const source *s) {
  const mlfab__slice *slice = &F.layout.slices[s->slice];
  for (uint32_t k = 0; k < s->nsegments; k++)
    if (s->segments[k].offset + s->segments[k].bytes > s->at)
      return mlfab__min(slice->offset + slice->bytes, s->segments[k].offset + s->segments[k].bytes);
  fail();
  return 0;
}

/* The whole slice was sent: the cache must hold it from now on. */
static void slice_sent(source *s) {
  const mlfab__slice *slice = &F.layout.slices[s->slice];
  as_sent(slice->offset, slice->bytes, F.pinned, F.cache);
  F.holds[s->slice] = 1;
  s->next = s->slice + 1;
  s->slice = UINT32_MAX;
}

static void answer(uint32_t server) {
  static uint8_t bulk[8192 * 2];
  source *s = &F.sources[server];
  uint64_t since = 0;
  uint32_t number = touched(s, &since);
  if (s->slice == UINT32_MAX || below(30) == 0) pin(s, number);
  uint64_t end = asked_end(s);
  const mlfab__slice *slice = &F.layout.slices[number];
  mlfab__model m = OF(mlfab__model, .request = s->request, .offset = s->at, .version = s->label,
                      .commit = s->label, .slice = number, .epoch = s->epoch);
  m.bytes = below(3) ? mlfab__min(end - s->at, 8 * (uint64_t)(1 + below(300))) : end - s->at;
  int fresh = s->nsinces > 0 && s->asked_epoch == s->epoch;
  if (!fresh) since = 0;
  assert_true(since <= F.labels[number]); /* no cache has a version from the future */
  uint32_t n = (uint32_t)m.bytes;
  if (F.half || (since > 0 && below(4))) {
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
  talk_say(SERVER(server), MLFAB__MODEL, mlfab__encode_model(t->meta, &m), n ? bulk : NULL, n);
  listen();
}

static void happen(uint32_t server) {
  source *s = &F.sources[server];
  if (below(4) == 0) commit(below(F.layout.nslices));
  if (!talk_linked(SERVER(server))) {
    *talk_away(SERVER(server)) = 0;
    talk_wait(BEAT_NS / 2);
  } else if (below(150) == 0) {
    s->request = 0;
    talk_break(SERVER(server));
  } else if (s->request != 0) {
    answer(server);
  }
  listen();
}

/* --- pulls --- */

typedef struct pulling {
  mlfab_request request;
  uint32_t mask, bare; /* tensors; tensors without a buffer */
  uint32_t flags;
} pulling;

static const mlfab__tensor *tensor_of(uint32_t i) { return mlfab__layout_find(&F.layout, i); }
static uint8_t *buffer_of(uint32_t i) { return F.buffers + tensor_of(i)->offset; }
static uint32_t slice_of(uint32_t i) {
  return mlfab__layout_slice_at(&F.layout, tensor_of(i)->offset);
}

static pulling pull(uint32_t mask, uint32_t bare, uint32_t flags) {
  pulling p = {0, mask, bare, flags};
  const mlfab_pull_options options = {.size = sizeof options, .flags = flags};
  mlfab_buf bufs[TENSORS];
  uint32_t n = 0;
  for (uint32_t i = TENSORS; i-- > 0;) {
    if (!(mask >> i & 1)) continue;
    bufs[n++] = (mlfab_buf){i, 0, bare >> i & 1 ? NULL : buffer_of(i), shapes[i].count};
    F.in_use[i] = 1;
  }
  p.request = CALL(PULL, .bufs = bufs, .n = n, .options = &options);
  listen();
  return p;
}

/* Has it ended? Then it has succeeded. */
static int over(pulling *p) {
  int done = 0;
  mlfab_result result;
  assert_int_equal(mlfab_node_test(t->node, p->request, &done, &result), 0);
  if (!done) return 0;
  assert_int_equal(result.status, 0);
  p->request = 0;
  for (uint32_t i = 0; i < TENSORS; i++)
    if (p->mask >> i & 1) F.in_use[i] = 0;
  return 1;
}

/* The buffers hold what arrived, if no other pull that shares slices has advanced the cache. */
static void check_pull(const pulling *p) {
  for (uint32_t i = 0; i < TENSORS; i++) {
    if (!(p->mask >> i & 1) || p->bare >> i & 1) continue;
    if (memcmp(buffer_of(i), F.cache + tensor_of(i)->offset, tensor_of(i)->bytes) != 0)
      fail_msg("tensor %u is not what was pulled (flags %u)", i, p->flags);
  }
}

static void check_cache(void) {
  for (uint32_t i = 0; i < TENSORS; i++) {
    const mlfab__tensor *x = tensor_of(i);
    const void *data;
    uint64_t count;
    assert_int_equal(mlfab_node_cached(t->node, i, &data, &count), 0);
    assert_int_equal(count, shapes[i].count);
    for (uint32_t k = 0; k < F.layout.nslices; k++) {
      const mlfab__slice *slice = &F.layout.slices[k];
      uint64_t at = mlfab__max(slice->offset, x->offset);
      uint64_t end = mlfab__min(slice->offset + slice->bytes, x->offset + x->bytes);
      if (!F.holds[k] || at >= end) continue;
      if (memcmp((const uint8_t *)data + (at - x->offset), F.cache + at, end - at) != 0)
        fail_msg("the cache of slice %u is wrong", k);
    }
  }
}

static void finish_pull(pulling *p) {
  for (uint32_t i = 0; !over(p); i++) {
    assert_true(i < 100000);
    happen(below(F.servers));
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
    uint32_t k = below(most);
    if (pulls[k].request == 0 && below(3) == 0) {
      uint32_t mask = 0, flags = flags_of[below(5)];
      for (uint32_t i = 0; i < TENSORS; i++)
        if (!F.in_use[i] && below(2)) mask |= 1u << i;
      if ((mask & written) != mask) flags &= ~(uint32_t)MLFAB_PULL_KEPT;
      if (mask) pulls[k] = pull(mask, below(4) ? 0 : mask & below(32), flags);
    }
    happen(below(F.servers));
    if (below(300) == 0 && most == 1) { /* slices have moved */
      uint32_t s = below(F.servers);
      if (F.sources[s].request == 0) move_slices(s);
    }
    for (k = 0; k < most; k++) {
      if (pulls[k].request == 0) continue;
      if (over(&pulls[k])) {
        if (most == 1) check_pull(&pulls[k]);
        written |= pulls[k].mask & ~pulls[k].bare;
      } else if (below(500) == 0) {
        talk_cancel(pulls[k].request);
        ENDS(pulls[k].request, MLFAB_ERR_CANCELLED);
        listen();
        pulls[k].request = 0;
        for (uint32_t i = 0; i < TENSORS; i++)
          if (pulls[k].mask >> i & 1) F.in_use[i] = 0;
      }
    }
    check_cache();
  }
  /* When all pulls are done, a pull that keeps the buffers' contents makes all of them equal to the store. */
  for (uint32_t k = 0; k < most; k++)
    if (pulls[k].request != 0) finish_pull(&pulls[k]);
  pulling last = pull(ALL, 0, written == ALL ? MLFAB_PULL_KEPT : 0);
  finish_pull(&last);
  check_pull(&last);
  check_cache();
  finish();
}

SCENE(test_random) {
  uint64_t from = test_number("MLFAB_SEED", 1), runs = test_seed() ? 1 : test_cases(100);
  for (uint64_t i = 0; i < runs; i++) {
    seed(from + i);
    run_cached();
  }
}

/* Without tags, halves go directly into the buffers. */
SCENE(test_halves) {
  for (uint32_t i = 0; i < 50; i++) {
    mlfab_model_options options = {.pull_half = 1 + i % 2};
    static const uint8_t untouched[FLAT_MAX];
    seed(i);
    begin(1 + below(SERVERS_MAX), &options);
    pulling p = pull(1 + below(ALL), 0, 0);
    finish_pull(&p);
    check_pull(&p);
    for (uint32_t k = 0; k < TENSORS; k++)
      if (!(p.mask >> k & 1)) assert_memory_equal(buffer_of(k), untouched, tensor_of(k)->bytes);
    finish();
  }
}

/* --- cases --- */

static void serve(pulling *p) {
  for (uint32_t i = 0; !over(p); i++) {
    assert_true(i < 100000);
    for (uint32_t s = 0; s < F.servers; s++)
      if (F.sources[s].request != 0) answer(s);
  }
}

static void serve_new(uint32_t mask, uint32_t bare, uint32_t flags, int checks) {
  pulling p = pull(mask, bare, flags);
  serve(&p);
  if (checks) check_pull(&p);
}

SCENE(test_what_is_asked) {
  mlfab_model_options options = {.tags = 4};
  seed(3);
  begin(2, &options);
  const mlfab__slice *slice =
      &F.layout.slices[slice_of(2)]; /* it has all 164 bytes of the tensor */
  const source *s = &F.sources[slice->server];
  const struct {
    uint32_t mask, bare, flags, nsinces;
    uint64_t since;
    uint32_t epoch;
  } pulls[] = {{1u << 2, 0, 0, 1, 0, 0},
               {ALL, ALL, 0, UINT32_MAX, 0, 1}, /* one commit a slice, since they differ */
               {ALL, 0, 0, 1, 1, 1},            /* now they are equal */
               {ALL, 0, MLFAB_PULL_FULL, 1, 0, 1}};
  for (uint32_t i = 0; i < 4; i++) {
    pulling p = pull(pulls[i].mask, pulls[i].bare, pulls[i].flags);
    uint32_t own = 0;
    for (uint32_t k = 0; k < F.layout.nslices; k++)
      own += F.layout.slices[k].server == slice->server;
    if (i == 0) {
      assert_int_equal(F.asks, 1);
      assert_int_equal(s->segments[0].offset, slice->offset);
      assert_int_equal(s->segments[0].bytes, slice->bytes);
    }
    assert_int_equal(s->nsegments, 1); /* adjacent slices form one stretch */
    assert_int_equal(s->nsinces, mlfab__min(pulls[i].nsinces, own));
    if (s->nsinces == 1) assert_int_equal(s->sinces[0], pulls[i].since);
    assert_int_equal(s->asked_epoch, pulls[i].epoch);
    serve(&p);
    if (i == 2) check_pull(&p);
  }
  finish();
}

/* A buffer keeps what it holds of a slice that has not changed, even when another slice has changed and this one was
 * requested. */
SCENE(test_kept) {
  /* Packets: unchanged elements are not sent. */
  mlfab_model_options options = {.tags = 1, .pull_half = 1};
  seed(3);
  begin(1, &options);
  serve_new(ALL, 0, 0, 0);
  assert_true(slice_of(3) > slice_of(0));
  for (uint32_t i = 0; i < 10; i++) commit(slice_of(0));
  serve_new(ALL, ALL & ~1u, 0, 0); /* into the buffer of tensor 0 only */
  memset(buffer_of(0), 0xEE, 100);
  memset(buffer_of(3), 0xEE, tensor_of(3)->bytes);
  serve_new(ALL, 0, MLFAB_PULL_KEPT, 0);
  for (uint64_t i = 0; i < 100; i++) assert_int_equal(buffer_of(0)[i], 0xEE);
  for (uint64_t i = 0; i < tensor_of(3)->bytes; i++) assert_int_equal(buffer_of(3)[i], 0xEE);
  serve_new(ALL, 0, 0, 1);
  finish();
}

/* The pull under way is that of this request: the first asks, and the others wait. */
static void asks(uint32_t n, uint64_t request) {
  listen();
  assert_int_equal(F.asks, n);
  assert_int_equal(F.sources[0].request, request);
}

/* One pull is sent at a time; the next one is sent when the server refuses it. The random ones end in other ways. */
SCENE(test_turns) {
  mlfab_model_options options = {.tags = 1};
  seed(3);
  begin(1, &options);
  pulling p[3];
  for (uint32_t i = 0; i < 3; i++) p[i] = pull(1u << i, 0, 0);
  asks(1, p[0].request);
  F.sources[0].request = 0;
  SAY(SERVER(0), PULL_FAIL, pull_fail, .request = p[0].request, .code = MLFAB_ERR_CALLBACK);
  ENDS(p[0].request, MLFAB_ERR_CALLBACK);
  asks(2, p[1].request);
  talk_dies(SERVER(0));
  for (uint32_t i = 1; i < 3; i++) ENDS(p[i].request, MLFAB_ERR_PEER_DEAD);
  finish();
}

/* Another copy of a server may lack commits of the former one, so the cache of its slices is void. */
SCENE(test_another_copy) {
  static const uint32_t terms[] = {1, 1, 2, 2, 3}, epochs[] = {0, 1, 0, 1, 0};
  const mlfab_model_options options = {.tags = 1};
  seed(3);
  replicas = 1;
  begin(1, &options);
  serve_new(ALL, 0, 0, 1);
  for (uint32_t i = 0; i < 5; i++) {
    t->ack.term = terms[i];
    talk_break(SERVER(0));
    talk_back(SERVER(0));
    pulling p = pull(ALL, 0, 0);
    assert_int_equal(F.sources[0].asked_epoch, epochs[i]);
    serve(&p);
    check_pull(&p);
  }
  replicas = 0;
  finish();
}

SCENE(test_options_are_checked) {
#define NO_I64 "not supported: int64 tensors (tensor 77) with "
  const double infinite = 1e308 * 10.0;
  const struct {
    mlfab_model_options options;
    int code, with_i64;
    const char *text;
  } wrong[] = {{{.tags = 3}, MLFAB_ERR_ARGUMENT, 0, "tags is 3"},
               {{.tags = 131072}, MLFAB_ERR_ARGUMENT, 0, "tags is 131072"},
               {{.pull_half = 3}, MLFAB_ERR_ARGUMENT, 0, "pull_half is 3"},
               {{.change_threshold = -1}, MLFAB_ERR_ARGUMENT, 0, "change_threshold is -1"},
               {{.change_threshold = infinite}, MLFAB_ERR_ARGUMENT, 0, "change_threshold"},
               {{.change_decay = infinite - infinite}, MLFAB_ERR_ARGUMENT, 0, "change_decay"},
               {{.tags = 1, .ghost = 1}, MLFAB_ERR_UNSUPPORTED, 0, "ghost"},
               {{.pull_half = 1}, MLFAB_ERR_UNSUPPORTED, 1, NO_I64 "pull_half"},
               {{.change_threshold = 0.5}, MLFAB_ERR_UNSUPPORTED, 1, NO_I64 "change_threshold"}};
  prepare(1);
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    mlfab_model_options options = wrong[i].options;
    options.size = sizeof options;
    if (wrong[i].with_i64 && !wrong[i - 1].with_i64)
      CALL(TENSOR_ADD, .tensor = 77, .dtype = MLFAB_I64, .count = 8);
    FAILS(wrong[i].code, MODEL_START, .options = &options);
    assert_non_null(strstr(talk_error(), wrong[i].text));
  }
  HUSH(SERVER(0));
  finish();
}

SCENE(test_pulls_are_checked) {
  const void *data;
  uint64_t count;
  prepare(1);
  assert_int_equal(mlfab_node_cached(t->node, 0, &data, &count), MLFAB_ERR_STATE);
  finish();
  for (uint32_t tags = 0; tags < 2; tags++) {
    const mlfab_pull_options small = {.size = 0};
    begin(1, &(mlfab_model_options){.tags = tags});
    assert_int_equal(mlfab_node_cached(t->node, 9, &data, &count),
                     tags ? MLFAB_ERR_TENSOR : MLFAB_ERR_STATE);
    for (uint32_t flags = tags ? 4 : 1; flags <= 4; flags++) {
      const mlfab_pull_options options = {.size = sizeof options, .flags = flags};
      FAILS(MLFAB_ERR_ARGUMENT, PULL, BUFS({0, 0, F.buffers, shapes[0].count}),
            .options = &options);
    }
    FAILS(MLFAB_ERR_ARGUMENT, PULL, BUFS({0, 0, F.buffers, shapes[0].count}), .options = &small);
    if (!tags) FAILS(MLFAB_ERR_ARGUMENT, PULL, BUFS({0, 0, NULL, shapes[0].count}));
    finish();
  }
}

/* The node gives the link up. On the next one it asks for the whole slice. */
static void refused(uint32_t server) {
  assert_false(talk_linked(SERVER(server)));
  assert_non_null(strstr(t->log, "a MODEL frame"));
  talk_back(SERVER(server));
  F.sources[server].request = 0;
  listen();
  assert_int_equal(F.sources[server].sinces[0], 0);
}

/* Frames that do not fit are refused, and the slice counts as absent from the cache. */
SCENE(test_frames_that_do_not_fit) {
  for (uint32_t i = 0; i < 9; i++) {
    static uint8_t bulk[65536];
    begin(2, &(mlfab_model_options){.tags = 1});
    pulling p = pull(1, 0, 0);
    uint32_t first = slice_of(0), n = 64;
    const mlfab__slice *slice = &F.layout.slices[first];
    mlfab__model m = OF(mlfab__model, .request = p.request, .offset = slice->offset, .bytes = 64,
                        .commit = 1, .version = 1, .slice = first, .epoch = 1);
    float values[16] = {1};
    mlfab__packet_shape shape = {m.offset, MLFAB_F32, MLFAB_HALF_NONE, 0, 16};
    if (i == 0) m.offset += 64; /* does not start at the beginning */
    if (i == 1) m.bytes = 128;  /* a frame without packets must be complete */
    if (i == 2) m.bytes = n = (uint32_t)slice->bytes + 64;
    if (i == 3) m.slice = first + 1;
    if (i == 4) shape.offset += 64; /* beyond the stretch */
    if (i == 5) shape = (mlfab__packet_shape){m.offset, MLFAB_I64, MLFAB_HALF_NONE, 0, 8};
    if (i == 6) shape.elements = 15; /* in order so far ... */
    if (i == 7) n = 4;               /* not a packet */
    if (i == 8) m.slice = UINT32_MAX;
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
    talk_say(SERVER(slice->server), MLFAB__MODEL, mlfab__encode_model(t->meta, &m), bulk, n);
    refused(slice->server);
    serve(&p);
    check_pull(&p);
    mlfab__layout_free(&memory, &F.layout);
  }
}

/* A packet whose indices change while its values are read: the model holds the checked values, or is unchanged. */
SCENE(test_changing) {
  static uint8_t bulk[16384], sent[FLAT_MAX];
  for (uint32_t i = 0; i < 24; i++) {
    begin(2, &(mlfab_model_options){.tags = 1});
    pulling p = pull(1u << 1, 0, 0);
    const mlfab__slice *slice = &F.layout.slices[slice_of(1)];
    const mlfab__tensor *x = tensor_of(1);
    uint32_t indices[8];
    double values[8];
    for (uint32_t k = 0; k < 8; k++) {
      indices[k] = 50 * k;
      values[k] = (double)(k + 1);
    }
    assert_true(slice->bytes >= 3200 && slice->offset == x->offset);
    mlfab__packet_shape shape = {slice->offset, MLFAB_F64, MLFAB_HALF_NONE, 0, 400};
    uint32_t n = mlfab__packet_sparse(bulk, &shape, indices, values, 8);
    size_t head = MLFAB__PACKET_HEADER + 16;
    mlfab__packet packet;
    assert_int_equal(mlfab__packet_open(bulk, n, &packet), n);
    assert_ptr_equal(packet.values, bulk + head); /* 8 indices, then the values */
    memset(sent, 0, sizeof sent);
    mlfab__unpack_store(&packet, sent);
    /* Outside the slice, or out of order. */
    uint16_t other = (uint16_t)(i % 3 == 0 ? 60000 : 50 * ((i + 3) % 8) + 1);
    uint8_t *bytes = changing_make(bulk, n, head);
    if (i > 0) changing_to(MLFAB__PACKET_HEADER + 2 * (i % 8), &other, 2);
    changing_arm();
    mlfab__model m =
        OF(mlfab__model, .request = p.request, .offset = slice->offset, .bytes = 3200, .commit = 1,
           .version = 1, .slice = slice_of(1), .flags = MLFAB__MODEL_PACKED, .epoch = 1);
    t->as_is = 1;
    talk_say(SERVER(slice->server), MLFAB__MODEL, mlfab__encode_model(t->meta, &m), bytes, n);
    assert_int_equal(changing_end(), 1);
    int taken = talk_linked(SERVER(slice->server));
    const void *cached;
    uint64_t count;
    assert_true(taken || i > 0); /* at first nothing changes */
    assert_int_equal(mlfab_node_cached(t->node, 1, &cached, &count), 0);
    if (!taken) memset(sent, 0, sizeof sent);
    assert_memory_equal(cached, sent, x->bytes);
    mlfab__layout_free(&memory, &F.layout);
  }
}

/* Memory ends at any allocation of a worker that begins its model with a cache: the call fails, or its request. */
SCENE(test_without_memory) {
  int failed_late = 0;
  for (uint64_t n = 0, done = 0; !done; n++) {
    mlfab_request request = 0;
    const mlfab_model_options options = {.size = sizeof options, .tags = 1, .slices = SLICES};
    const mlfab_call call = {
        .size = sizeof call, .kind = MLFAB_CALL_MODEL_START, .options = &options};
    mlfab__define define = {.ask = 0};
    assert_true(n < 200);
    prepare(1);
    t->fail_from = t->calls + 1 + n;
    int code = mlfab_node_submit(t->node, &call, t->now, &request);
    talk_run();
    if (!code && talk_linked(SERVER(0))) {
      HEAR(SERVER(0), DEFINE, define, (define = *m, 1));
      SAY(SERVER(0), DEFINE_ACK, define_ack, .packets = 1, .ask = define.ask,
          .options = define.options);
      int ended = 0;
      mlfab_result result = {.status = 0};
      assert_int_equal(mlfab_node_test(t->node, request, &ended, &result), 0);
      assert_true(ended || !talk_linked(SERVER(0)));
      code = result.status;
      done = ended && !code;
      failed_late |= code != 0;
      if (code) assert_non_null(strstr(talk_error(), "memory for the cache"));
    }
    assert_true(code == 0 || code == MLFAB_ERR_MEMORY);
  }
  assert_true(failed_late);
}
