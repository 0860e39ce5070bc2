/* test_sparse_push.c - filters and sparse updates of a worker: what is sent, what is held back, and that each server gets
 * whole packets of its own shard and all of them, whatever is granted, lost and retried. */
#include "core/base/rng.h"
#include "core/kernels/half.h"
#include "core/kernels/kernels.h"
#include "core/kernels/packet.h"
#include "core/model/layout.h"
#include "core/model/windows.h"
#include "core/sparse/filter.h"
#include "tests/unit/draw.h"
#include "tests/unit/scale.h"
#include "tests/seam/talk.h"

#include <float.h>
#include <math.h>

enum { RANK = 1, WORKERS = 3, SERVERS_MAX = 4, TENSORS = 5, ELEMENTS_MAX = 6000, FLAT_MAX = 46000 };
enum { PUSHES_MAX = 64, SLICES = 12, SEED = 77, ALL = (1 << TENSORS) - 1, BEAT_NS = 100000000 };

typedef struct update { /* as its servers must see it */
  mlfab_request request;
  int status; /* 1: open */
  uint8_t image[FLAT_MAX];
} update;

typedef struct part { /* of an update, at a server */
  int open, packed;
  uint64_t bytes, got, granted, next_offset;
  uint32_t nsegments;
  mlfab__segment segments[32];
  uint8_t image[FLAT_MAX];
} part;

static mlfab__rng prng;
static mlfab__layout layout;
static mlfab__env memory; /* of the layout */
static part parts[SERVERS_MAX][PUSHES_MAX];
static update updates[PUSHES_MAX]; /* by number */

static struct {
  uint32_t servers, nupdates; /* the numbers are 1 to nupdates */
  uint32_t generations[SERVERS_MAX];
  mlfab__window windows[SERVERS_MAX];
  uint32_t eager;
  /* The literal version: the residuals, and their filters; size 0: none. A filter that leaves is gone with the next update. */
  mlfab_filter filters[TENSORS];
  int leaves[TENSORS];
  double residual[TENSORS][ELEMENTS_MAX]; /* a double holds every float */
  uint64_t offered, sent, saturated;
} F;

static uint32_t below(uint32_t n) { return (uint32_t)mlfab__rng_below(&prng, n); }

static const struct {
  int dtype;
  uint32_t count;
} shapes[TENSORS] = {
    {MLFAB_F32, 6000}, {MLFAB_F64, 1111}, {MLFAB_I64, 300}, {MLFAB_F32, 37}, {MLFAB_F32, 2500}};

static const mlfab__tensor *tensor_of(uint32_t i) { return mlfab__layout_find(&layout, 10 * i); }

static void greeting(uint32_t who, mlfab__hello_ack *ack) {
  uint32_t s = who & 0xffff;
  ack->generation = ++F.generations[s];
  ack->top = F.windows[s].top;
  memcpy(ack->applied, F.windows[s].applied, sizeof ack->applied);
  memcpy(ack->dropped, F.windows[s].dropped, sizeof ack->dropped);
}

/* A worker whose tensors are defined. */
static void prepare(uint32_t servers, uint32_t chunk, uint32_t eager) {
  memset(&F, 0, sizeof F);
  F.servers = servers;
  F.eager = eager;
  talk_init();
  t->ack.eager_bytes = eager;
  t->greeting = greeting;
  talk_open(&SIZED(mlfab_config, .roles = MLFAB_ROLE_WORKER, .rank = RANK, .workers = WORKERS,
                   .servers = servers, .dedicated = 1, .chunk_bytes = chunk, .merge_max = 8,
                   .heartbeat_ns = BEAT_NS, .seed = SEED));
  t->ack.eager_bytes = eager;
  for (uint32_t i = 0; i < TENSORS; i++)
    CALL(TENSOR_ADD, .tensor = 10 * i, .dtype = shapes[i].dtype, .count = shapes[i].count);
}

static void begin(uint32_t servers, uint32_t chunk, uint32_t eager, uint32_t sync) {
  const mlfab_model_options options = {.size = sizeof options, .slices = SLICES, .sync = sync};
  mlfab__tensor_info infos[TENSORS];
  mlfab_error error;
  prepare(servers, chunk, eager);
  talk_stand(&options);
  for (uint32_t s = 0; s < servers; s++) /* with this credit */
    SAY(SERVER(s), HELLO_ACK, hello_ack, .server = s, .epoch = 1, .kind = MLFAB__ACK_CREDIT,
        .eager_bytes = eager);
  for (uint32_t i = 0; i < TENSORS; i++)
    infos[i] = (mlfab__tensor_info){10 * i, (uint32_t)shapes[i].dtype, shapes[i].count};
  assert_int_equal(mlfab__env_init(&memory, NULL), 0);
  assert_int_equal(
      mlfab__layout_build(&memory, infos, TENSORS, SLICES, servers, 0, 1 << 30, &layout, &error),
      0);
  assert_true(layout.bytes <= FLAT_MAX);
  for (uint32_t s = 0; s < servers; s++)
    for (uint32_t i = 0; i < PUSHES_MAX; i++) parts[s][i].open = parts[s][i].packed = 0;
}

static void finish(void) {
  assert_int_equal(talk_stats().frames_refused, 0);
  mlfab__layout_free(&memory, &layout);
  talk_close();
}

/* --- servers that check what they receive --- */

static void ack(uint32_t server, uint64_t seq, int code) {
  parts[server][seq].open = 0;
  mlfab__windows_decide(&F.windows[server], seq, 1, code);
  SAY(SERVER(server), PUSH_ACK, push_ack, .seq = seq, .members = 1,
      .generation = F.generations[server], .code = code, .version = 1);
}

/* An update is complete: it holds the values meant for this server, and nothing else. */
static void arrived(uint32_t server, uint64_t seq) {
  for (uint32_t i = 0; i < layout.nslices; i++) {
    const mlfab__slice *slice = &layout.slices[i];
    if (slice->server != server) continue;
    if (memcmp(parts[server][seq].image + slice->offset, updates[seq].image + slice->offset,
               slice->bytes) != 0)
      fail_msg("update %llu differs in slice %u", (unsigned long long)seq, i);
  }
}

static int in_segments(const part *x, uint64_t offset, uint64_t bytes) {
  for (uint32_t i = 0; i < x->nsegments; i++) {
    const mlfab__segment *g = &x->segments[i];
    if (offset >= g->offset && offset + bytes <= g->offset + g->bytes) return 1;
  }
  return 0;
}

static void take_packets(uint32_t server, part *x, const uint8_t *bulk, uint32_t bytes) {
  for (uint32_t at = 0, n; at < bytes; at += n) {
    mlfab__packet p;
    n = mlfab__packet_open(bulk + at, bytes - at, &p);
    assert_true(n > 0); /* a cut packet */
    uint64_t length = (uint64_t)p.elements * mlfab__dtype_bytes(p.dtype);
    assert_true(p.kept > 0);
    assert_true(p.offset >= x->next_offset);
    x->next_offset = p.offset + length;
    assert_true(in_segments(x, p.offset, length));
    const mlfab__slice *slice = &layout.slices[mlfab__layout_slice_at(&layout, p.offset)];
    const mlfab__tensor *tensor = mlfab__layout_tensor_at(&layout, p.offset);
    assert_int_equal(slice->server, server);
    assert_true(p.offset + length <= slice->offset + slice->bytes);
    assert_true(p.offset + length <= tensor->offset + tensor->bytes);
    assert_int_equal(tensor->dtype, p.dtype);
    mlfab__unpack_dense(&p, x->image + p.offset);
  }
}

static void take_plain(part *x, const uint8_t *bulk, uint32_t bytes) {
  uint64_t skip = x->got;
  for (uint32_t i = 0; i < x->nsegments && bytes > 0; i++) {
    const mlfab__segment *g = &x->segments[i];
    if (skip >= g->bytes) {
      skip -= g->bytes;
      continue;
    }
    uint32_t n = (uint32_t)mlfab__min(bytes, g->bytes - skip);
    memcpy(x->image + g->offset + skip, bulk, n);
    bulk += n;
    bytes -= n;
    skip = 0;
  }
}

/* Takes the next frame for a server: returns 1, or 0 when there is none. */
static int take(uint32_t server) {
  const talk_frame *next = talk_peer_of(SERVER(server))->first;
  part *x = NULL;
  uint64_t seq = 0;
  if (!next) return 0;
  if (next->header.type == MLFAB__PUSH) {
    mlfab__push push = {.seq = 0};
    HEAR_PUSH(SERVER(server), m->generation == F.generations[server] && m->members == 1 &&
                                  m->segments <= 32 && m->eager <= F.eager && m->seq < PUSHES_MAX &&
                                  (push = *m, 1));
    x = &parts[server][push.seq];
    assert_int_equal(x->open, 0);
    *x = OF(part, .open = 1, .packed = (push.flags & MLFAB__PUSH_PACKED) != 0, .bytes = push.bytes,
            .granted = push.eager, .nsegments = push.segments);
    memcpy(x->segments, t->segments, push.segments * sizeof *x->segments);
  } else {
    HEAR(SERVER(server), CHUNK, chunk,
         (seq = m->seq) < PUSHES_MAX && m->offset == parts[server][seq].got && h->bulk_bytes > 0);
    x = &parts[server][seq];
    assert_int_equal(x->open, 1);
  }
  if (x->packed)
    take_packets(server, x, t->heard->bulk, t->heard->bulk_bytes);
  else
    take_plain(x, t->heard->bulk, t->heard->bulk_bytes);
  x->got += t->heard->bulk_bytes;
  assert_true(x->got <= x->granted);
  return 1;
}

static void grant(uint32_t server, uint64_t seq, uint64_t upto) {
  part *x = &parts[server][seq];
  x->granted = mlfab__min(x->bytes, mlfab__max(x->granted, upto));
  SAY(SERVER(server), GRANT, grant, .seq = seq, .upto = upto, .generation = F.generations[server]);
}

/* Runs one random event at a server. It decides in order. */
static void serve(uint32_t server) {
  uint64_t seq = 1;
  if (!talk_linked(SERVER(server))) {
    *talk_away(SERVER(server)) = 0;
    talk_wait(BEAT_NS / 2);
    return;
  }
  if (below(1500) == 0) {
    talk_skip(SERVER(server));
    for (uint32_t i = 0; i < PUSHES_MAX; i++) parts[server][i].open = 0;
    talk_break(SERVER(server));
    return;
  }
  if (take(server)) return;
  while (seq <= F.nupdates && !parts[server][seq].open) seq++;
  if (seq > F.nupdates) return;
  const part *x = &parts[server][seq];
  if (x->got < x->bytes) {
    grant(server, seq, x->got + below(3) * (1 + below(9000)) + (below(4) == 0 ? x->bytes : 0));
    return;
  }
  arrived(server, seq);
  ack(server, seq, 0);
}

/* Are all updates decided? */
static int rests(void) {
  int open = 0;
  for (uint32_t i = 1; i <= F.nupdates; i++) {
    mlfab_result result;
    int done = 0;
    if (updates[i].status != 1) continue;
    assert_int_equal(mlfab_node_test(t->node, updates[i].request, &done, &result), 0);
    if (done) {
      assert_int_equal(result.seq, i);
      updates[i].status = result.status;
    }
    open |= !done;
  }
  return !open;
}

static void serve_all(void) {
  for (uint32_t i = 0; !rests(); i++) {
    assert_true(i < 1000000);
    serve(below(F.servers));
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
  uint64_t at = tensor_of(tensor)->offset;
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

static void literal(uint32_t tensor, const void *g, uint64_t number, uint8_t *image) {
  const mlfab_filter *f = &F.filters[tensor];
  uint32_t n = shapes[tensor].count, names[2] = {RANK, 10 * tensor};
  uint64_t seed = mlfab__hash(SEED, names, sizeof names);
  int is_float = shapes[tensor].dtype == MLFAB_F32, half = (int)f->half;
  double tau = f->threshold / (1.0 + f->decay * log((double)number)),
         p = f->drop > 0.0 ? f->drop : 1.0;
  static double a[ELEMENTS_MAX];
  static uint8_t among[ELEMENTS_MAX];
  for (uint32_t i = 0; i < n; i++) {
    double r = F.residual[tensor][i];
    a[i] = is_float ? (double)((float)r + ((const float *)g)[i]) : r + ((const double *)g)[i];
  }
  memset(among, 1, n);
  if (f->top > 0.0 && !F.leaves[tensor]) literal_top(a, n, f->top, among);
  for (uint32_t i = 0; i < n; i++) {
    int held = fabs(a[i]) < tau && draw_of(seed, number, i) < p, saturated = 0;
    double sent = a[i];
    if (!among[i] || (f->select && i % 3 == 0)) held = 1;
    if (F.leaves[tensor])
      held = 0;
    else if (half)
      sent = half_of(half, a[i], &saturated);
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

static void check_counters(void) {
  mlfab_stats stats = talk_stats();
  assert_int_equal(stats.filter_offered, F.offered);
  assert_int_equal(stats.filter_sent, F.sent);
  assert_int_equal(stats.filter_saturated, F.saturated);
}

/* --- random updates --- */

static uint8_t data[TENSORS][ELEMENTS_MAX * 8];

static double some_value(void) {
  double x = (double)below(2001) / 1000.0 - 1.0;
  /* Some are beyond the range of f16, or zero in f16. */
  const double scales[12] = {0, -0.0, 1e5, 1e-8, 1e-40, 1e36, 1, 1, 1, 1, 1, 1};
  uint32_t what = below(12);
  return what < 2 ? scales[what] : x * scales[what];
}

static void fill(uint32_t tensor) {
  for (uint32_t i = 0; i < shapes[tensor].count; i++) {
    double x = some_value();
    if (shapes[tensor].dtype == MLFAB_F32)
      ((float *)(void *)data[tensor])[i] = (float)x;
    else if (shapes[tensor].dtype == MLFAB_F64)
      ((double *)(void *)data[tensor])[i] = below(50) == 0 ? x * 1e60 : x;
    else
      ((int64_t *)(void *)data[tensor])[i] = (int64_t)below(100) - 50;
  }
}

static uint32_t bufs_of(uint32_t mask, mlfab_buf bufs[TENSORS]) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < TENSORS; i++)
    if (mask >> i & 1) bufs[n++] = (mlfab_buf){10 * i, 0, data[i], shapes[i].count};
  return n;
}

static update *new_update(mlfab_request request) {
  assert_true(++F.nupdates < PUSHES_MAX);
  update *x = &updates[F.nupdates];
  memset(x, 0, sizeof *x);
  x->request = request;
  x->status = 1;
  return x;
}

/* Pushes some tensors, and computes what the servers must get. Errors: the call's; then nothing has changed. */
static int try_push(uint32_t mask) {
  mlfab_buf bufs[TENSORS];
  mlfab_request request = 0;
  const mlfab_call call = {
      .size = sizeof call, .kind = MLFAB_CALL_PUSH, .bufs = bufs, .n = bufs_of(mask, bufs)};
  int code = mlfab_node_submit(t->node, &call, t->now, &request);
  if (code) return code;
  update *x = new_update(request);
  for (uint32_t i = 0; i < TENSORS; i++) {
    if (!(mask >> i & 1)) continue;
    if (F.filters[i].size > 0) {
      literal(i, data[i], F.nupdates, x->image);
      if (F.leaves[i]) memset(&F.filters[i], 0, sizeof F.filters[i]);
      F.leaves[i] = 0;
    } else {
      memcpy(x->image + tensor_of(i)->offset, data[i], tensor_of(i)->bytes);
    }
  }
  return 0;
}

static void push_some(uint32_t mask) {
  assert_int_equal(try_push(mask), 0);
  talk_run();
}

static void set_filter(uint32_t tensor, const mlfab_filter *filter) {
  CALL(SET_FILTER, .tensor = 10 * tensor, .options = filter);
  if (!filter) {
    F.leaves[tensor] = F.filters[tensor].size > 0;
    return;
  }
  if (F.filters[tensor].size == 0) memset(F.residual[tensor], 0, sizeof F.residual[tensor]);
  F.filters[tensor] = *filter;
  F.leaves[tensor] = 0;
}

/* Everything that is held back leaves with a last update. The one after it is dense again. */
static void check_residuals(void) {
  for (uint32_t i = 0; i < TENSORS; i++) {
    fill(i);
    if (F.filters[i].size > 0) set_filter(i, NULL);
  }
  for (uint32_t i = 0; i < 2; i++) {
    push_some(ALL);
    check_counters();
    serve_all();
    for (uint32_t s = 0; s < F.servers && i == 1; s++)
      assert_int_equal(parts[s][F.nupdates].packed, 0);
  }
}

static mlfab_filter random_filter(void) {
  mlfab_filter f = {.size = sizeof f};
  f.half = below(3);
  if (below(3)) f.threshold = (double)(1 + below(1000)) / 500.0;
  if (below(2)) f.decay = (double)below(100) / 50.0;
  if (f.threshold > 0.0 && below(2)) f.drop = (double)below(101) / 100.0;
  if (f.threshold <= 0.0 && below(4) == 0) f.drop = 1.0; /* of nothing: all elements are sent */
  if (f.drop > 0.0 && f.drop < 1.0 && below(2)) f.threshold = HUGE_VAL;
  if (below(3) == 0) f.top = (double)(1 + below(1000)) / 1000.0;
  if (below(4) == 0) {
    f.select = divides;
    f.user = &F;
  }
  return f;
}

static void push_sparse(uint32_t tensor, uint32_t one_of) {
  static uint64_t indices[ELEMENTS_MAX];
  static uint8_t values[ELEMENTS_MAX * 8];
  uint32_t n = 0, width = mlfab__dtype_bytes(shapes[tensor].dtype);
  update *x = new_update(0);
  uint64_t at = tensor_of(tensor)->offset;
  for (uint32_t i = 0; i < shapes[tensor].count && one_of > 0; i++) {
    if (below(one_of) != 0) continue;
    memcpy(values + (size_t)n * width, data[tensor] + (size_t)i * width, width);
    memcpy(x->image + at + (size_t)i * width, data[tensor] + (size_t)i * width, width);
    indices[n++] = i;
  }
  x->request =
      CALL(PUSH_SPARSE, .tensor = 10 * tensor, .indices = indices, .data = values, .count = n);
  memset(values, 0xee, sizeof values); /* the buffer is the caller's again */
}

/* Has one of these tensors a filter? Else updates of them are merged, if they wait. */
static int filtered(uint32_t mask) {
  int any = 0;
  for (uint32_t i = 0; i < TENSORS; i++) any |= (mask >> i & 1) && F.filters[i].size > 0;
  return any;
}

static void one_run(void) {
  static const uint32_t chunks[] = {64, 1024, 12288, 262144}, eagers[] = {0, 500, 8192, 65536};
  begin(1 + below(SERVERS_MAX), chunks[below(4)], eagers[below(4)], MLFAB_SYNC_ASYNC);
  if (below(2)) { /* slices have moved to random servers */
    uint32_t owners[SLICES];
    const uint64_t tops[SERVERS_MAX] = {0};
    for (uint32_t i = 0; i < layout.nslices; i++) owners[i] = below(F.servers);
    t->ack.eager_bytes = F.eager;
    talk_resume(1, owners, layout.nslices, tops);
    t->ack.epoch = 2;
    mlfab__layout_assign(&layout, owners);
  }
  for (uint32_t i = 0; i < 18; i++) {
    uint32_t tensor = below(TENSORS), mask = 1 + below(ALL);
    mlfab_filter f = random_filter();
    for (uint32_t k = 0; k < TENSORS; k++) fill(k);
    uint32_t what = below(4);
    if (what == 0 && shapes[tensor].dtype != MLFAB_I64) set_filter(tensor, below(4) ? &f : NULL);
    if (what == 1) push_sparse(tensor, below(2) * (1 + below(300)));
    if (what > 1) {
      int alone = !filtered(mask);
      push_some(mask);
      memset(data, 0xee, sizeof data); /* it was copied */
      if (alone) serve_all();
    }
    check_counters();
    for (uint32_t k = below(10); k > 0; k--) serve(below(F.servers));
    if (i % 6 == 5) serve_all();
  }
  check_residuals();
  for (uint32_t i = 1; i <= F.nupdates; i++) assert_int_equal(updates[i].status, 0);
  finish();
}

SCENE(test_random) {
  uint64_t from = test_number("MLFAB_SEED", 1), runs = test_seed() ? 1 : test_cases(150);
  for (uint64_t i = 0; i < runs; i++) {
    mlfab__rng_seed(&prng, from + i);
    one_run();
  }
}

/* --- cases --- */

static void set_up(uint32_t servers) {
  mlfab__rng_seed(&prng, 5);
  begin(servers, 4096, 1 << 20, MLFAB_SYNC_ASYNC);
  for (uint32_t k = 0; k < TENSORS; k++) fill(k);
}

/* The push of these tensors is refused because of this element, and changes nothing: no residual, number or counter. */
static void infinite(uint32_t mask, const char *text) {
  mlfab_buf bufs[TENSORS];
  mlfab_error error;
  FAILS(MLFAB_ERR_NOT_FINITE, PUSH, .bufs = bufs, .n = bufs_of(mask, bufs));
  assert_non_null(strstr(talk_error(), text));
  assert_int_equal(mlfab_node_last_error(t->node, &error), 0);
  assert_int_equal(error.rank, RANK);
  check_counters();
}

SCENE(test_not_finite) {
  mlfab_filter f = {.size = sizeof f, .threshold = 0.5, .half = MLFAB_HALF_F16};
  set_up(2);
  set_filter(0, &f);
  push_some(1);
  for (uint32_t round = 0; round < 4; round++) {
    /* In the filtered tensor and in the other one, at its first and at its last element. */
    uint32_t which = round / 2 ? 4 : 0, at = round % 2 ? shapes[which].count - 1 : 0;
    char text[64];
    float *bad = (float *)(void *)data[which] + at, before = *bad;
    *bad = round == 1 ? -INFINITY : NAN;
    snprintf(text, sizeof text, "element %u of tensor %u is NaN", at, 10 * which);
    infinite(1 | 1 << 4, text);
    *bad = before;
  }
  /* Two finite numbers whose sum is infinite. */
  f.threshold = (double)FLT_MAX; /* so 3e38 is held back */
  set_filter(3, &f);
  for (uint32_t i = 0; i < shapes[3].count; i++) ((float *)(void *)data[3])[i] = i == 7 ? 3e38f : 0;
  push_some(8);
  infinite(8, "element 7 of tensor 30");
  serve_all();
  check_residuals();
  finish();
}

SCENE(test_filters_are_checked) {
  static const struct {
    mlfab_filter filter;
    uint32_t tensor;
    int code;
    const char *text;
  } wrong[] = {
      {{.half = 3}, 0, MLFAB_ERR_ARGUMENT, "half is 3"},
      {{.threshold = -1.0}, 0, MLFAB_ERR_ARGUMENT, "threshold is -1, not between 0 and inf"},
      {{.threshold = NAN}, 0, MLFAB_ERR_ARGUMENT, "threshold"},
      {{.decay = -0.5}, 0, MLFAB_ERR_ARGUMENT, "decay is -0.5"},
      {{.decay = INFINITY}, 0, MLFAB_ERR_ARGUMENT, "decay is inf"},
      {{.drop = 1.5}, 0, MLFAB_ERR_ARGUMENT, "drop is 1.5, not between 0 and 1"},
      {{.drop = NAN}, 0, MLFAB_ERR_ARGUMENT, "drop"},
      {{.drop = 0.8}, 0, MLFAB_ERR_ARGUMENT, "drop is 0.8, but the threshold is 0"},
      {{.threshold = HUGE_VAL},
       0,
       MLFAB_ERR_ARGUMENT,
       "threshold inf holds every element of tensor 0 back"},
      {{.threshold = 1e300, .drop = 1.0},
       0,
       MLFAB_ERR_ARGUMENT,
       "threshold 1e+300 holds every element"},
      {{.top = -0.1}, 0, MLFAB_ERR_ARGUMENT, "top is -0.1"},
      {{.top = NAN}, 0, MLFAB_ERR_ARGUMENT, "top"},
      {{.half = 0}, 7, MLFAB_ERR_TENSOR, ""},
      {{.half = 0}, 20, MLFAB_ERR_DTYPE, ""},
      {{.half = 0}, MLFAB_ALL, MLFAB_ERR_DTYPE, "tensor 20 is int64"}};
  mlfab_filter f = {.size = 0};
  set_up(1);
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    f = wrong[i].filter;
    f.size = sizeof f;
    FAILS(wrong[i].code, SET_FILTER, .tensor = wrong[i].tensor, .options = &f);
    assert_non_null(strstr(talk_error(), wrong[i].text));
  }
  f.size = 0;
  FAILS(MLFAB_ERR_ARGUMENT, SET_FILTER, .tensor = 0, .options = &f);
  finish();
  /* A server that was built without them is named. */
  uint64_t index = 0;
  float value = 1;
  mlfab__define define = {.ask = 0};
  mlfab_error error;
  f = (mlfab_filter){.size = sizeof f};
  prepare(1, 4096, 1 << 20);
  CALL(MODEL_START, .options = NULL);
  HEAR(SERVER(0), DEFINE, define, (define = *m, 1));
  SAY(SERVER(0), DEFINE_ACK, define_ack, .ask = define.ask, .options = define.options);
  FAILS(MLFAB_ERR_UNSUPPORTED, SET_FILTER, .tensor = 0, .options = &f);
  assert_string_equal(talk_error(),
                      "not supported: filters, at server 0, which was built without "
                      "MLFAB_WITH_SPARSE");
  assert_int_equal(mlfab_node_last_error(t->node, &error), 0);
  assert_int_equal(error.rank, 0);
  FAILS(MLFAB_ERR_UNSUPPORTED, PUSH_SPARSE, .tensor = 0, .indices = &index, .data = &value,
        .count = 1);
}

/* An update that was applied nowhere is retried with the same bytes; no residual changes. */
SCENE(test_retry) {
  mlfab_filter f = {.size = sizeof f, .threshold = 0.7, .half = MLFAB_HALF_BF16};
  mlfab_push_options options = {.size = sizeof options, .scale = 1.0, .retry_seq = 1};
  mlfab_buf bufs[TENSORS];
  set_up(2);
  set_filter(0, &f);
  set_filter(1, &f);
  push_some(3);
  while (take(0) || take(1)) continue;
  for (uint32_t s = 0; s < 2; s++) ack(s, 1, MLFAB_ERR_DROPPED);
  assert_true(rests());
  assert_int_equal(updates[1].status, MLFAB_ERR_DROPPED);
  for (uint32_t i = 0; i < 5; i++) { /* other updates in between take other slots */
    push_some(3);
    serve_all();
    assert_int_equal(updates[F.nupdates].status, 0);
  }
  FAILS(MLFAB_ERR_ARGUMENT, PUSH, .bufs = bufs, .n = bufs_of(1, bufs), .options = &options);
  assert_string_equal(talk_error(), "push: update 1 was of other tensors");
  memset(data, 0xee, sizeof data); /* it is not even read */
  update *again = new_update(CALL(PUSH, .bufs = bufs, .n = bufs_of(3, bufs), .options = &options));
  memcpy(again->image, updates[1].image, sizeof again->image);
  check_counters();
  serve_all();
  assert_int_equal(again->status, 0);
  check_residuals();
  finish();
}

SCENE(test_sparse_is_checked) {
  float values[3] = {1, 2, 3};
  static const struct {
    uint64_t indices[3];
    const char *text;
  } wrong[] = {
      {{0, 6000, 1}, "index 6000 at position 1: tensor 0 has 6000 elements"},
      {{5, 5, 9}, "index 5 at position 1 does not ascend: 5 is before it"},
      {{1, 7, 6}, "index 6 at position 2 does not ascend: 7 is before it"},
      {{UINT64_MAX, 0, 0}, "index 18446744073709551615 at position 0"},
  };
  const uint64_t good[3] = {0, 4000, 5999};
  set_up(2);
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    FAILS(MLFAB_ERR_ARGUMENT, PUSH_SPARSE, .tensor = 0, .indices = wrong[i].indices, .data = values,
          .count = 3);
    assert_non_null(strstr(talk_error(), wrong[i].text));
  }
  FAILS(MLFAB_ERR_ARGUMENT, PUSH_SPARSE, .tensor = 0, .data = values, .count = 1);
  FAILS(MLFAB_ERR_ARGUMENT, PUSH_SPARSE, .tensor = 0, .indices = good, .count = 1);
  FAILS(MLFAB_ERR_TENSOR, PUSH_SPARSE, .tensor = 1, .indices = good, .data = values, .count = 3);
  values[1] = INFINITY;
  FAILS(MLFAB_ERR_NOT_FINITE, PUSH_SPARSE, .tensor = 0, .indices = good, .data = values,
        .count = 3);
  assert_non_null(strstr(talk_error(), "position 1, of element 4000 of tensor 0"));
  /* An update without elements is an update, too: every server of the tensor gets it. */
  push_sparse(0, 0);
  for (uint32_t s = 0; s < 2; s++) {
    assert_true(take(s));
    assert_true(parts[s][1].open && parts[s][1].bytes == 0);
  }
  serve_all();
  finish();
}

/* Small updates of a tensor with a filter are not merged, neither with each other nor with waiting ones. */
SCENE(test_not_merged) {
  mlfab_filter f = {.size = sizeof f, .threshold = 0.1};
  set_up(1);
  push_some(8);
  push_some(8); /* waits to be merged */
  set_filter(3, &f);
  push_some(8);
  set_filter(3, NULL);
  push_some(8); /* includes the residual */
  push_sparse(3, 3);
  serve_all(); /* each has one member */
  assert_int_equal(talk_stats().pushes_merged, 0);
  check_residuals();
  finish();
}

/* Withdrawn while in progress: no more bytes are sent, and where rounds count it continues as an empty update. */
SCENE(test_withdrawn) {
  mlfab_filter f = {.size = sizeof f, .half = MLFAB_HALF_F16};
  int status = 0;
  mlfab__rng_seed(&prng, 9);
  begin(2, 1024, 0, MLFAB_SYNC_BSP);
  for (uint32_t k = 0; k < TENSORS; k++) fill(k);
  set_filter(0, &f);
  talk_room(SERVER(1), 0);
  push_some(1);
  HEAR_PUSH(SERVER(0), m->seq == 1 && m->flags == MLFAB__PUSH_PACKED);
  talk_cancel(updates[1].request);
  ENDS(updates[1].request, MLFAB_ERR_IN_DOUBT);
  HEAR(SERVER(0), WITHDRAW, withdraw, m->seq == 1);
  grant(0, 1, UINT64_MAX);
  HUSH(SERVER(0));
  talk_room(SERVER(1), -1);
  HEAR_PUSH(SERVER(1), m->seq == 1 && m->flags == 0 && m->bytes == 0);
  ack(0, 1, MLFAB_ERR_WITHDRAWN);
  ack(1, 1, 0);
  assert_int_equal(mlfab_node_push_status(t->node, 1, &status), 0);
  assert_int_equal(status, MLFAB_ERR_WITHDRAWN);
  finish();
}

/* Sets two filters, pushes both tensors, and some of one. Memory ends after so many allocations. */
static int push_both(uint64_t allocations) {
  const mlfab_filter f = {.size = sizeof f, .threshold = 0.4};
  const uint64_t indices[2] = {3, 2000};
  const mlfab_call filter = {.size = sizeof filter, .kind = MLFAB_CALL_SET_FILTER, .options = &f},
                   sparse = {.size = sizeof sparse,
                             .kind = MLFAB_CALL_PUSH_SPARSE,
                             .indices = indices,
                             .data = data[0],
                             .count = 2};
  int code = 0;
  t->fail_from = t->calls + 1 + allocations;
  for (uint32_t i = 0; i < 2 && !code; i++) {
    mlfab_call call = filter;
    call.tensor = i ? 40 : 0;
    code = mlfab_node_submit(t->node, &call, t->now, NULL);
    if (!code && F.filters[4 * i].size == 0) {
      memset(F.residual[4 * i], 0, sizeof F.residual[4 * i]);
      F.filters[4 * i] = f;
    }
  }
  if (!code) code = try_push(1 | 1 << 4);
  if (!code) {
    mlfab_request request = 0;
    code = mlfab_node_submit(t->node, &sparse, t->now, &request);
    update *x = code ? NULL : new_update(request);
    for (uint32_t i = 0; i < 2 && x; i++)
      memcpy(x->image + tensor_of(0)->offset + 4 * indices[i], data[0] + 4 * i, 4);
  }
  t->fail_from = 0;
  talk_run();
  return code;
}

/* One allocation fails at any point: nothing unsent is held back, everything is released, and with memory the same calls
 * succeed. */
SCENE(test_without_memory) {
  int failed = 0;
  for (uint64_t n = 0, done = 0; !done; n++) {
    set_up(2);
    int code = push_both(n);
    done = code == 0;
    failed += !done;
    assert_true(code == 0 || code == MLFAB_ERR_MEMORY);
    assert_true(n < 100);
    check_counters();
    if (code) assert_int_equal(push_both(UINT32_MAX), 0);
    serve_all();
    check_residuals();
    finish();
  }
  assert_true(failed > 3);
}
