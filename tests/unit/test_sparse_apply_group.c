/* test_sparse_apply_group.c - groups of packets. First the aggregator role between simulated servers and
 * members; then a server, real aggregators and workers of a few lines, over links with queues.
 *
 * Oracles: the members' dense values, added serially; a dense group of the same values at another server;
 * the count of applied updates. MLFAB_SEED=n runs one random case alone, MLFAB_SCALE=100 a hundred times as
 * many. */
#include "core/sched/aggregator.h"
#include "core/kernels/packet.h"
#include "core/base/rng.h"
#include "core/kernels/kernels.h"
#include "core/sched/client.h"
#include "core/sparse/sparse_apply.h"
#include "scale.h"

#include <math.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "changing.h"

#define BEAT 1000000ull

enum { WORKERS = 6, SERVERS = 2, GROUPS = 2, MEMBERS = 6, CHUNK = 2048, LENT = 256, SEGMENTS = 8 };

static uint64_t first_seed = 1, last_seed;

static void seeds(uint64_t n) {
  const char *one = getenv("MLFAB_SEED");
  first_seed = one ? strtoull(one, NULL, 10) : 1;
  last_seed = one ? first_seed : test_cases((double)n);
}

/* --- updates as packets --- */

/* Segments of the model, one after another. */
typedef struct shape {
  mlfab__segment segments[SEGMENTS];
  uint32_t n;
  uint64_t bytes;
} shape;

static void random_segments(mlfab__rng *prng, const mlfab__layout *layout, uint32_t server,
                            shape *s) {
  uint64_t begin, end;
  mlfab__layout_run(layout, server, 0, &begin, &end);
  memset(s, 0, sizeof *s);
  if (mlfab__rng_below(prng, 3) == 0 || end - begin > 1 << 20) {
    s->segments[s->n++] = (mlfab__segment){begin, end - begin};
  } else {
    for (uint64_t at = begin; at < end && s->n < SEGMENTS;) {
      uint64_t stop = mlfab__min(end, at + 8 + 8 * mlfab__rng_below(prng, 1200));
      mlfab__segment segment = {at, stop - at};
      if (mlfab__layout_valid(layout, server, &segment)) s->segments[s->n++] = segment;
      at = stop + 8 * (1 + mlfab__rng_below(prng, 20));
    }
  }
  for (uint32_t i = 0; i < s->n; i++) s->bytes += s->segments[i].bytes;
}

/* The position of a model byte in the shape. */
static uint64_t place_of(const shape *s, uint64_t offset) {
  uint64_t at = 0;
  for (uint32_t i = 0; i < s->n; i++) {
    if (offset - s->segments[i].offset < s->segments[i].bytes)
      return at + offset - s->segments[i].offset;
    at += s->segments[i].bytes;
  }
  fail_msg("an offset outside the shape");
  return 0;
}

/* The element type at a position, and how many elements follow it in one tensor, slice and segment. */
static int piece_at(const mlfab__layout *layout, const shape *s, uint64_t at, uint64_t *offset_p,
                    uint32_t *elements_p) {
  uint32_t i = 0;
  while (at >= s->segments[i].bytes) at -= s->segments[i++].bytes;
  uint64_t offset = s->segments[i].offset + at, end = offset + s->segments[i].bytes - at;
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, offset);
  const mlfab__slice *slice = &layout->slices[mlfab__layout_slice_at(layout, offset)];
  end = mlfab__min(end, tensor->offset + tensor->bytes);
  end = mlfab__min(end, slice->offset + slice->bytes);
  uint64_t elements = (end - offset) / mlfab__dtype_bytes((int)tensor->dtype);
  *offset_p = offset;
  *elements_p = (uint32_t)mlfab__min(elements, MLFAB__PACKET_ELEMENTS);
  return (int)tensor->dtype;
}

typedef struct update {
  uint8_t *dense, *packets;
  uint64_t bytes; /* of packets */
} update;

static void random_values(mlfab__rng *prng, int dtype, int whole, void *values, uint32_t n) {
  for (uint32_t i = 0; i < n; i++) {
    double x = whole ? (double)mlfab__rng_below(prng, 9) - 4.0 : mlfab__rng_unit(prng) - 0.5;
    if (mlfab__rng_below(prng, 20) == 0) x = mlfab__rng_below(prng, 2) ? 0.0 : -0.0;
    if (dtype == MLFAB_F32) ((float *)values)[i] = (float)x;
    if (dtype == MLFAB_F64) ((double *)values)[i] = x;
    if (dtype == MLFAB_I64) ((int64_t *)values)[i] = (int64_t)(x * 7.0);
  }
}

/* A packet of a random form. Returns its size, 0 when nothing is kept. */
static uint32_t random_packet(mlfab__rng *prng, uint8_t *out, mlfab__packet_shape *ps, int whole,
                              uint64_t most) {
  static double values[MLFAB__PACKET_ELEMENTS];
  static uint64_t keep[MLFAB__PACKET_ELEMENTS / 64];
  static uint32_t indices[MLFAB__PACKET_ELEMENTS];
  uint64_t rate = mlfab__rng_below(prng, most + 1);
  random_values(prng, ps->dtype, whole, values, ps->elements);
  ps->half = ps->dtype == MLFAB_I64 || mlfab__rng_below(prng, 2)
                 ? MLFAB_HALF_NONE
                 : 1 + (int)mlfab__rng_below(prng, 2);
  ps->grain_log2 = mlfab__rng_below(prng, 3) ? 0 : (uint32_t)mlfab__rng_below(prng, 7);
  if (rate >= 90) return mlfab__packet_dense(out, ps, values);
  memset(keep, 0, sizeof keep);
  uint32_t kept = 0, grains = ((ps->elements - 1) >> ps->grain_log2) + 1;
  for (uint32_t g = 0; g < grains; g++) {
    if (mlfab__rng_below(prng, 100) >= rate) continue;
    keep[g / 64] |= 1ull << g % 64;
    indices[kept++] = g;
  }
  if (ps->grain_log2 == 0 && mlfab__rng_below(prng, 2)) /* the first `kept` of the values */
    return mlfab__packet_sparse(out, ps, indices, values, kept);
  return mlfab__packet_marked(out, ps, values, keep, (int)mlfab__rng_below(prng, 2));
}

/* At least one random packet, and the dense values that it stands for. */
static void random_update(mlfab__rng *prng, const mlfab__layout *layout, const shape *s, int whole,
                          uint64_t most, update *u) {
  u->dense = calloc(1, s->bytes);
  u->packets = malloc(10 * s->bytes + (1 << 16));
  assert_true(u->dense && u->packets);
  u->bytes = 0;
  for (uint64_t at = 0; at < s->bytes;) {
    mlfab__packet_shape piece;
    mlfab__packet packet;
    memset(&piece, 0, sizeof piece);
    piece.dtype = piece_at(layout, s, at, &piece.offset, &piece.elements);
    if (mlfab__rng_below(prng, 2))
      piece.elements = 1 + (uint32_t)mlfab__rng_below(prng, piece.elements);
    uint64_t end = at + (uint64_t)piece.elements * mlfab__dtype_bytes(piece.dtype);
    if (mlfab__rng_below(prng, 5) > 0 || (end == s->bytes && u->bytes == 0)) {
      uint8_t *out = u->packets + u->bytes;
      uint32_t n = random_packet(prng, out, &piece, whole, most);
      if (n == 0 && end == s->bytes && u->bytes == 0) {
        double one = 0.0;
        piece.elements = 1;
        n = mlfab__packet_dense(out, &piece, &one);
      }
      if (n > 0) {
        assert_int_equal(mlfab__packet_open(out, n, &packet), n);
        mlfab__unpack_dense(&packet, u->dense + at);
      }
      u->bytes += n;
    }
    at = end;
  }
}

static void free_update(update *u) {
  free(u->dense);
  free(u->packets);
  memset(u, 0, sizeof *u);
}

/* The size of the packet at `at`. */
static uint32_t packet_bytes(const update *u, uint64_t at) {
  mlfab__packet packet;
  uint32_t n = mlfab__packet_open(u->packets + at, u->bytes - at, &packet);
  assert_true(n > 0);
  return n;
}

/* Adds w * u to the sum so far, element by element; storing each result keeps its rounding. */
static void literal_add(const mlfab__layout *layout, const shape *s, uint8_t *sum, const uint8_t *u,
                        double w, int first) {
  for (uint64_t at = 0, offset; at < s->bytes;) {
    uint32_t n;
    int dtype = piece_at(layout, s, at, &offset, &n);
    for (uint32_t i = 0; i < n; i++) {
      if (dtype == MLFAB_F32) {
        float *to = (float *)(void *)(sum + at);
        volatile float product = (float)w * *(const float *)(const void *)(u + at);
        *to = first ? product : *to + product;
      } else if (dtype == MLFAB_F64) {
        double *to = (double *)(void *)(sum + at);
        volatile double product = w * *(const double *)(const void *)(u + at);
        *to = first ? product : *to + product;
      } else {
        uint64_t *to = (uint64_t *)(void *)(sum + at);
        *to = (first ? 0 : *to) + (uint64_t)(int64_t)w * *(const uint64_t *)(const void *)(u + at);
      }
      at += mlfab__dtype_bytes(dtype);
    }
  }
}

/* Equal but for the sign of zeros. */
static int same_values(const mlfab__layout *layout, const shape *s, const uint8_t *a,
                       const uint8_t *b) {
  for (uint64_t at = 0, offset; at < s->bytes;) {
    uint32_t n, width;
    int dtype = piece_at(layout, s, at, &offset, &n);
    width = mlfab__dtype_bytes(dtype);
    for (uint32_t i = 0; i < n; i++, at += width) {
      int same = memcmp(a + at, b + at, width) == 0;
      if (dtype == MLFAB_F32)
        same |= *(const float *)(const void *)(a + at) == *(const float *)(const void *)(b + at);
      if (dtype == MLFAB_F64)
        same |= *(const double *)(const void *)(a + at) == *(const double *)(const void *)(b + at);
      if (!same) return 0;
    }
  }
  return 1;
}

/* --- the aggregator alone --- */

typedef struct group {
  int used, failed;
  uint32_t server, n;
  uint64_t number, released, forwarded, total;
  shape shape;
  uint32_t worker[MEMBERS];
  uint64_t seq[MEMBERS], granted[MEMBERS], sent[MEMBERS];
  double weight[MEMBERS];
  update update[MEMBERS];
  uint8_t *expected, *sum, *stream;
  uint32_t guilty, bad; /* bit k: member k may be blamed; its update is not finite */
} group;

typedef struct lent {
  uint64_t token;
  uint32_t peer, bytes;
  const uint8_t *bulk;
  uint8_t *was;
} lent;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__layout layout;
  mlfab__aggregator aggregator;
  mlfab__rng prng;
  uint64_t now, number, seq;
  group groups[GROUPS];
  lent lents[LENT];
  uint32_t nlent, ready;
  int connected[WORKERS];
  uint32_t up_drops, down_drops, fails, finished, grants, alive;
  mlfab__group_fail fail;
  char text[128];
  uint64_t calls, fail_at, memory;
} fixture;

static uint64_t below(fixture *f, uint64_t n) { return mlfab__rng_below(&f->prng, n); }

static group *group_of(fixture *f, uint32_t server, uint64_t number) {
  for (uint32_t i = 0; i < GROUPS; i++) {
    group *g = &f->groups[i];
    if (g->used && g->server == server && g->number == number) return g;
  }
  return NULL;
}

/* The number of members, from the first on, whose packets have all arrived. */
static uint32_t whole_members(const group *g) {
  uint32_t k = 0;
  while (k < g->n && g->sent[k] == g->update[k].bytes) k++;
  return k;
}

static void on_grant(fixture *f, uint32_t member, const mlfab__hop_grant *grant) {
  group *g = group_of(f, grant->server, grant->group);
  uint64_t ring = f->aggregator.stage_bytes + f->aggregator.packet_bytes;
  f->grants++;
  if (!g) return;
  assert_false(g->failed);
  for (uint32_t k = 0, early = 0; k < g->n; k++) {
    early += k > whole_members(g) && g->granted[k] > 0;
    if (g->worker[k] != member || g->seq[k] != grant->seq) continue;
    assert_true(grant->upto > g->granted[k] && (g->granted[k] < g->update[k].bytes || !g->sent[k]));
    assert_true(k >= whole_members(g));
    if (k > whole_members(g)) {
      /* Early: it may send a ring's worth, and rings are few. */
      assert_true(grant->upto == ring && early < MLFAB__AGGREGATOR_RINGS);
    } else {
      assert_true(grant->upto == UINT64_MAX);
    }
    g->granted[k] = grant->upto;
    return;
  }
  fail_msg("a grant for nobody");
}

static void on_fail(fixture *f, uint32_t server, const mlfab__group_fail *fail) {
  group *g = group_of(f, server, fail->group);
  f->fail = *fail;
  f->fails++;
  if (!g) return;
  assert_false(g->failed);
  g->failed = 1;
  for (uint32_t k = 0; k < g->n; k++) {
    if (g->worker[k] != fail->worker || g->seq[k] != fail->seq) continue;
    if (!((g->guilty | g->bad) >> k & 1)) fail_msg("member %u is blamed with %d", k, fail->code);
    if (fail->code == MLFAB_ERR_NOT_FINITE) assert_true(g->bad >> k & 1);
    return;
  }
  assert_int_equal(fail->worker, MLFAB__NO_NODE);
}

static void up_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  fixture *f = self;
  mlfab__group_fail fail;
  mlfab__forward alive;
  if (type == MLFAB__GROUP_FAIL) {
    assert_int_equal(mlfab__decode_group_fail(meta, bytes, &fail), 0);
    on_fail(f, peer, &fail);
    return;
  }
  assert_int_equal(type, MLFAB__FORWARD); /* a progress report without bytes */
  assert_int_equal(mlfab__decode_forward(meta, bytes, &alive), 0);
  group *g = group_of(f, peer, alive.group);
  assert_true(g && alive.offset == g->forwarded);
  assert_true(g->total == 0 || alive.total == g->total);
  g->total = alive.total;
  f->alive++;
}
static void down_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  mlfab__hop_grant grant;
  assert_int_equal(type, MLFAB__HOP_GRANT);
  assert_int_equal(mlfab__decode_hop_grant(meta, bytes, &grant), 0);
  on_grant(self, peer, &grant);
}
static void up_ready(void *self, uint32_t peer) { ((fixture *)self)->ready |= 1u << peer; }
static void port_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void up_drop(void *self, uint32_t peer, int code, const char *text) {
  fixture *f = self;
  (void)peer;
  assert_int_equal(code, MLFAB_ERR_FRAME);
  snprintf(f->text, sizeof f->text, "%s", text);
  f->up_drops++;
}
static void down_drop(void *self, uint32_t peer, int code, const char *text) {
  fixture *f = self;
  (void)peer;
  assert_int_equal(code, MLFAB_ERR_FRAME);
  snprintf(f->text, sizeof f->text, "%s", text);
  f->down_drops++;
}
static void port_detach(void *self, uint32_t peer, uint64_t token) {
  (void)self, (void)peer, (void)token;
}
static void port_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  (void)self, (void)kind, (void)rank, (void)is_server, (void)incarnation, (void)code, (void)text;
}

static void *allocate(void *user, size_t bytes) {
  fixture *f = user;
  if (++f->calls == f->fail_at) return NULL;
  f->memory += bytes;
  return malloc(bytes);
}
static void release(void *user, void *memory, size_t bytes) {
  ((fixture *)user)->memory -= bytes;
  free(memory);
}

static const mlfab__tensor_info mixed[] = {{0, MLFAB_F64, 1700}, {1, MLFAB_F32, 3500},
                                           {2, MLFAB_I64, 833},  {3, MLFAB_F32, 77},
                                           {4, MLFAB_F64, 50},   {5, MLFAB_F32, 1901}};
static const mlfab__tensor_info plain[] = {{0, MLFAB_F32, 16384}};
static const mlfab__tensor_info large[] = {{0, MLFAB_F32, 5000000}, {1, MLFAB_F32, 900000}};

static fixture *open_role(uint64_t seed, const mlfab__tensor_info *tensors, uint32_t n, int ghost) {
  fixture *f = calloc(1, sizeof *f);
  mlfab_env hooks;
  assert_non_null(f);
  memset(&hooks, 0, sizeof hooks);
  hooks.size = sizeof hooks;
  hooks.user = f;
  hooks.allocate = allocate;
  hooks.release = release;
  assert_int_equal(mlfab__env_init(&f->env, &hooks), 0);
  mlfab__rng_seed(&f->prng, seed);
  mlfab_config_init(&f->config);
  f->config.workers = WORKERS;
  f->config.servers = SERVERS;
  f->config.chunk_bytes = seed % 5 < 3 ? CHUNK : 8 * CHUNK; /* the latter is lent */
  f->config.heartbeat_ns = BEAT;
  f->now = 1000;
  mlfab__port up = {f, up_post, up_ready, up_drop, port_detach, port_event};
  mlfab__port down = {f, down_post, port_ready, down_drop, port_detach, port_event};
  assert_int_equal(
      mlfab__layout_build(&f->env, tensors, n, 16, SERVERS, 0, 1 << 28, &f->layout, NULL), 0);
  assert_int_equal(
      mlfab__aggregator_init(&f->aggregator, &f->env, &f->config, &up, &down, &f->stats), 0);
  mlfab__aggregator_model(&f->aggregator, &f->layout, ghost);
  return f;
}

static void free_group(group *g) {
  for (uint32_t k = 0; k < g->n; k++) free_update(&g->update[k]);
  free(g->expected);
  free(g->sum);
  free(g->stream);
  memset(g, 0, sizeof *g);
}

static void close_role(fixture *f) {
  for (uint32_t i = 0; i < GROUPS; i++) free_group(&f->groups[i]);
  for (uint32_t i = 0; i < f->nlent; i++) free(f->lents[i].was);
  mlfab__aggregator_free(&f->aggregator);
  mlfab__layout_free(&f->env, &f->layout);
  assert_int_equal(f->env.bytes, 0);
  assert_int_equal(f->memory, 0);
  free(f);
}

static void tell(fixture *f, uint32_t server, uint8_t type, const uint8_t *meta, uint32_t bytes) {
  mlfab__frame_in in = {type, bytes, 0, meta, NULL};
  assert_int_equal(mlfab__aggregator_server_frame(&f->aggregator, server, &in, f->now), 1);
}

static void meet(fixture *f, uint32_t worker) {
  f->connected[worker] = 1;
  mlfab__aggregator_met(&f->aggregator, worker, 1, f->now);
}

static void tell_release(fixture *f, group *g, uint64_t upto) {
  mlfab__release r = {g->number, upto};
  uint8_t meta[32];
  g->released = mlfab__max(g->released, upto);
  tell(f, g->server, MLFAB__RELEASE, meta, mlfab__encode_release(meta, &r));
}

static void end_group(fixture *f, group *g) {
  mlfab__group_end end = {g->number};
  uint8_t meta[32];
  uint32_t server = g->server;
  free_group(g);
  tell(f, server, MLFAB__GROUP_END, meta, mlfab__encode_group_end(meta, &end));
}

static void say(fixture *f, const group *g, uint32_t k, uint64_t offset, uint64_t total,
                const void *packets, uint32_t bytes) {
  mlfab__hop_chunk chunk = {g->number, g->seq[k], offset, total, g->server};
  uint8_t meta[64];
  /* The bulk is borrowed for the call only. */
  uint8_t *bulk = bytes && packets ? malloc(bytes) : NULL;
  if (bulk) memcpy(bulk, packets, bytes);
  mlfab__frame_in in = {MLFAB__HOP_CHUNK, 0, bytes, meta, bulk};
  in.meta_bytes = mlfab__encode_hop_chunk(meta, &chunk);
  mlfab__aggregator_member_frame(&f->aggregator, g->worker[k], &in, f->now);
  free(bulk);
}

/* Sends some whole packets of member k within its grant; returns 0 when there are none. */
static int send_some(fixture *f, group *g, uint32_t k, uint64_t packets) {
  uint64_t at = g->sent[k], end = at;
  const update *u = &g->update[k];
  for (; packets > 0 && end < u->bytes; packets--) {
    uint32_t n = packet_bytes(u, end);
    if (n > g->granted[k] || end > g->granted[k] - n) break;
    if (end > at && end + n - at > f->config.chunk_bytes) break;
    end += n;
  }
  if (end == at) return 0;
  if (!g->failed) g->sent[k] = end; /* updated first, because the answer depends on it */
  say(f, g, k, at, u->bytes, u->packets + at, (uint32_t)(end - at));
  return 1;
}

static void give_back(fixture *f, uint32_t i) {
  lent *l = &f->lents[i];
  uint64_t token = l->token;
  assert_memory_equal(l->bulk, l->was, l->bytes);
  free(l->was);
  *l = f->lents[--f->nlent];
  mlfab__aggregator_sent(&f->aggregator, token);
}

static void note_lent(fixture *f, uint32_t peer, const mlfab__frame_out *out) {
  if (out->token == 0) return;
  assert_true(f->nlent < LENT);
  lent *l = &f->lents[f->nlent++];
  *l = (lent){out->token, peer, out->bulk_bytes, out->bulk, malloc(out->bulk_bytes)};
  assert_non_null(l->was);
  memcpy(l->was, out->bulk, out->bulk_bytes);
}

/* A frame of the sum for a server. Returns 1 when there was one. */
static int take_forward(fixture *f, uint32_t server) {
  uint8_t meta[64];
  mlfab__frame_out out;
  mlfab__forward forward;
  memset(&out, 0, sizeof out);
  out.meta = meta;
  if (!mlfab__aggregator_next_up(&f->aggregator, server, &out)) return 0;
  assert_int_equal(out.type, MLFAB__FORWARD);
  assert_int_equal(mlfab__decode_forward(meta, out.meta_bytes, &forward), 0);
  group *g = group_of(f, server, forward.group);
  assert_true(g && !g->failed);
  assert_int_equal(whole_members(g), g->n); /* the sum is forwarded only when it is complete */
  assert_true(forward.total > 0 && (g->total == 0 || forward.total == g->total));
  assert_int_equal(forward.offset, g->forwarded);
  g->total = forward.total;
  assert_true(out.bulk_bytes > 0 && g->forwarded + out.bulk_bytes <= g->released);
  assert_true(g->forwarded + out.bulk_bytes <= g->total);
  uint32_t packets = 0;
  for (uint32_t at = 0; at < out.bulk_bytes; packets++) {
    mlfab__packet packet;
    uint32_t n = mlfab__packet_open((const uint8_t *)out.bulk + at, out.bulk_bytes - at, &packet);
    assert_true(n > 0); /* packets are whole */
    at += n;
  }
  assert_true(packets == 1 || out.bulk_bytes <= f->config.chunk_bytes);
  if (!g->stream) g->stream = malloc(g->total);
  memcpy(g->stream + g->forwarded, out.bulk, out.bulk_bytes);
  g->forwarded += out.bulk_bytes;
  note_lent(f, server, &out);
  mlfab__aggregator_taken_up(&f->aggregator, server, &out);
  return 1;
}

/* Checks that this packet has the form that its values call for. */
static void check_form(const mlfab__packet *packet, const uint8_t *values) {
  uint32_t width = mlfab__dtype_bytes(packet->dtype), filled = 0;
  static const uint8_t zero[8];
  for (uint32_t i = 0; i < packet->elements; i++) {
    uint8_t x[8] = {0};
    memcpy(x, values + (size_t)i * width, width);
    if (packet->dtype != MLFAB_I64) x[width - 1] &= 0x7f;
    filled += memcmp(x, zero, width) != 0;
  }
  assert_int_equal(packet->value, MLFAB_HALF_NONE);
  if (2 * filled > packet->elements) {
    assert_int_equal(packet->form, MLFAB__PACKET_DENSE);
  } else if (packet->form != MLFAB__PACKET_DENSE) {
    assert_int_equal(packet->kept, filled);
  } else {
    /* Only where it is not larger, which happens with few elements. */
    uint32_t bitmap = ((packet->elements + 7) / 8 + 7) / 8 * 8, indices = (2 * filled + 7) / 8 * 8;
    uint32_t marks = bitmap < indices ? bitmap : indices;
    assert_true(packet->body <= marks + (filled * width + 7) / 8 * 8);
  }
}

/* The forwarded bytes are the sum, in packets as large as possible. */
static void check_sum(fixture *f, group *g) {
  uint64_t next = 0;
  g->sum = calloc(1, g->shape.bytes);
  for (uint64_t at = 0, n; at < g->total; at += n) {
    mlfab__packet packet;
    n = mlfab__packet_open(g->stream + at, g->total - at, &packet);
    assert_true(n > 0 && packet.offset >= next);
    uint64_t place = place_of(&g->shape, packet.offset), offset;
    uint32_t elements;
    assert_int_equal(packet.dtype, piece_at(&f->layout, &g->shape, place, &offset, &elements));
    assert_true(packet.elements <= elements);
    next = packet.offset + (uint64_t)packet.elements * mlfab__dtype_bytes(packet.dtype);
    mlfab__unpack_dense(&packet, g->sum + place);
    if (g->total > 32) check_form(&packet, g->sum + place);
  }
  assert_true(same_values(&f->layout, &g->shape, g->sum, g->expected));
}

static void finish_group(fixture *f, group *g) {
  if (!g->failed && g->total > 0 && g->forwarded == g->total) {
    assert_int_equal(g->bad, 0);
    check_sum(f, g);
    f->finished++;
  }
  end_group(f, g);
}

static void tell_group(fixture *f, const group *g, double rate) {
  static uint8_t meta[MLFAB_META_MAX];
  mlfab__group_member members[MEMBERS];
  mlfab__group m = {g->number, g->shape.bytes, rate, (uint32_t)below(f, 2), 1, g->n, g->shape.n};
  for (uint32_t k = 0; k < g->n; k++)
    members[k] = (mlfab__group_member){g->seq[k], g->weight[k], g->worker[k], 1};
  tell(f, g->server, MLFAB__GROUP, meta, mlfab__encode_group(meta, &m, members, g->shape.segments));
}

/* Puts a NaN into the member's first packet, if that keeps a float. */
static void spoil(group *g, uint32_t k) {
  static const double nan = NAN;
  static const uint16_t half = 0xffff;
  mlfab__packet packet;
  float nan32 = (float)nan;
  mlfab__packet_open(g->update[k].packets, g->update[k].bytes, &packet);
  if (packet.count == 0 || packet.dtype == MLFAB_I64) return;
  uint8_t *at = (uint8_t *)(uintptr_t)packet.values;
  if (packet.value != MLFAB_HALF_NONE) {
    memcpy(at, &half, 2);
  } else if (packet.dtype == MLFAB_F32) {
    memcpy(at, &nan32, 4);
  } else {
    memcpy(at, &nan, 8);
  }
  g->bad |= 1u << k;
}

static group *start_group(fixture *f, uint32_t server, uint32_t n, uint64_t most, uint64_t bad) {
  group *g = f->groups;
  while (g->used) g++;
  g->used = 1;
  g->server = server;
  g->number = ++f->number;
  g->n = n;
  random_segments(&f->prng, &f->layout, server, &g->shape);
  g->expected = calloc(1, g->shape.bytes);
  assert_non_null(g->expected);
  for (uint32_t k = 0; k < n; k++) {
    g->worker[k] = (uint32_t)below(f, WORKERS);
    g->seq[k] = ++f->seq;
    g->weight[k] = below(f, 2) ? 1.0 : (double)below(f, 9) - 4.0;
    random_update(&f->prng, &f->layout, &g->shape, 0, most, &g->update[k]);
    literal_add(&f->layout, &g->shape, g->expected, g->update[k].dense, g->weight[k], k == 0);
    if (bad && below(f, bad) == 0) spoil(g, k);
  }
  tell_group(f, g, below(f, 2) ? 1e9 : -1.0);
  return g;
}

static void step_group(fixture *f, group *g) {
  uint32_t k = (uint32_t)below(f, g->n);
  switch (below(f, 5)) {
    case 0:
      if (!g->failed && below(f, 4) == 0) {
        uint64_t upto = below(f, 3) ? below(f, 2 * g->shape.bytes) : UINT64_MAX;
        tell_release(f, g, upto);
      }
      break;
    case 1:
      take_forward(f, g->server);
      break;
    default:
      if (f->connected[g->worker[k]]) send_some(f, g, k, 1 + below(f, 4));
      break;
  }
  if (g->failed ? below(f, 4) == 0 : g->total > 0 && g->forwarded == g->total) finish_group(f, g);
}

/* The sum is right for every order of packets, grants, releases and returned bulks, with several groups of
 * two servers at once. No member is blamed, however long a ring is full. */
static void test_sums(void **state) {
  (void)state;
  seeds(150);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    fixture *f = open_role(seed, seed % 4 ? mixed : plain, seed % 4 ? MLFAB__COUNT(mixed) : 1, 0);
    if (seed % 2) f->aggregator.stage_bytes = 64 * (1 + below(f, 20));
    f->config.heartbeat_ns = 10000000000u;
    for (uint32_t w = 0; w < WORKERS && seed % 3; w++) meet(f, w);
    uint32_t started = 0;
    int step = 0;
    for (; step < 400000 && f->finished < 6; step++) {
      group *g = &f->groups[below(f, GROUPS)];
      uint32_t w = (uint32_t)below(f, WORKERS);
      f->now += below(f, 20000);
      if (!f->connected[w] && below(f, 100) == 0) meet(f, w);
      if (g->used) {
        step_group(f, g);
      } else if (started < 6 && below(f, 10) == 0) {
        started++;
        start_group(f, (uint32_t)below(f, SERVERS), 1 + (uint32_t)below(f, MEMBERS),
                    below(f, 2) ? 99 : 30, 0);
      }
      if (f->nlent > 0 && below(f, 3) == 0) give_back(f, (uint32_t)below(f, f->nlent));
      if (below(f, 20) == 0) mlfab__aggregator_tick(&f->aggregator, f->now);
    }
    if (f->finished < 6) fail_msg("seed %u: %u groups", (unsigned)seed, f->finished);
    assert_int_equal(f->fails, 0);
    assert_int_equal(f->up_drops + f->down_drops, 0);
    assert_int_equal(f->stats.transfers_revoked, 0);
    close_role(f);
  }
}

static void blame(fixture *f, uint32_t worker) {
  for (uint32_t i = 0; i < GROUPS; i++) {
    for (uint32_t k = 0; k < f->groups[i].n; k++) {
      if (f->groups[i].worker[k] == worker) f->groups[i].guilty |= 1u << k;
    }
  }
}

static void lose_server(fixture *f, uint32_t server) {
  for (uint32_t i = f->nlent; i-- > 0;) {
    if (f->lents[i].peer != server) continue;
    free(f->lents[i].was);
    f->lents[i] = f->lents[--f->nlent];
  }
  mlfab__aggregator_server_lost(&f->aggregator, server);
  for (uint32_t i = 0; i < GROUPS; i++) {
    if (f->groups[i].used && f->groups[i].server == server) free_group(&f->groups[i]);
  }
}

static void trouble(fixture *f, group *g) {
  uint32_t w = (uint32_t)below(f, WORKERS);
  switch (below(f, 1200)) {
    case 0:
      blame(f, w);
      f->connected[w] = 0;
      mlfab__aggregator_lost(&f->aggregator, w, f->now);
      break;
    case 1:
      for (uint32_t i = 0; i < WORKERS; i++) blame(f, i);
      f->now += 3 * BEAT;
      mlfab__aggregator_tick(&f->aggregator, f->now);
      break;
    case 2:
      if (g->used) end_group(f, g);
      break;
    case 3:
      lose_server(f, w % SERVERS);
      break;
    default:
      if (!f->connected[w] && below(f, 20) == 0) meet(f, w);
      break;
  }
}

/* The same with members that die, reconnect, fall silent or send non-finite values, and with servers that
 * end groups or vanish: only the guilty member is blamed, a sum that completes is right, and all resources
 * are reused. */
static void test_sums_with_failures(void **state) {
  uint64_t finished = 0, fails = 0;
  (void)state;
  seeds(60);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    fixture *f = open_role(seed, mixed, MLFAB__COUNT(mixed), 0);
    f->aggregator.stage_bytes = 64 * (1 + below(f, 20));
    for (uint32_t w = 0; w < WORKERS; w++) meet(f, w);
    for (int step = 0; step < 10000; step++) {
      group *g = &f->groups[below(f, GROUPS)];
      f->now += below(f, 100);
      if (!g->used) {
        start_group(f, (uint32_t)below(f, SERVERS), 1 + (uint32_t)below(f, MEMBERS), 60, 15);
        for (uint32_t i = 0; i < WORKERS; i++) {
          if (!f->connected[i]) blame(f, i);
        }
      } else {
        step_group(f, g);
      }
      if (f->nlent > 0 && below(f, 2) == 0) give_back(f, (uint32_t)below(f, f->nlent));
      if (below(f, 20) == 0) mlfab__aggregator_tick(&f->aggregator, f->now);
      trouble(f, g);
    }
    assert_int_equal(f->up_drops + f->down_drops, 0);
    finished += f->finished;
    fails += f->fails;
    close_role(f);
  }
  if (last_seed - first_seed >= 59) assert_true(finished > 300 && fails > 300);
}

/* A sum that is packed in several ticks, in packets of the largest size. Progress reports give no length
 * before that is done. */
static void test_large(void **state) {
  (void)state;
  fixture *f = open_role(3, large, MLFAB__COUNT(large), 0);
  for (uint32_t w = 0; w < WORKERS; w++) meet(f, w);
  for (uint32_t i = 0; i < 3; i++) {
    group *g = start_group(f, i % SERVERS, 3, i == 1 ? 99 : 4, 0);
    tell_release(f, g, UINT64_MAX);
    f->now++;
    while (whole_members(g) < g->n) {
      for (uint32_t k = 0; k < g->n; k++) send_some(f, g, k, 8);
      assert_true(whole_members(g) == g->n || mlfab__aggregator_deadline(&f->aggregator) > 0);
    }
    f->alive = 0;
    f->now += BEAT;
    assert_true(g->shape.bytes > 8 << 20);
    while (mlfab__aggregator_deadline(&f->aggregator) == 0) {
      assert_int_equal(take_forward(f, g->server), 0);
      mlfab__aggregator_tick(&f->aggregator, f->now);
    }
    assert_int_equal(f->alive, 1);
    while (g->total == 0 || g->forwarded < g->total) {
      assert_int_equal(take_forward(f, g->server), 1);
      while (f->nlent > 0) give_back(f, 0);
    }
    finish_group(f, g);
  }
  assert_int_equal(f->finished, 3);
  close_role(f);
}

/* --- single cases --- */

static int open_plain(void **state) {
  fixture *f = open_role(1, plain, 1, 0);
  for (uint32_t w = 0; w < WORKERS; w++) meet(f, w);
  *state = f;
  return 0;
}

static int close_plain(void **state) {
  close_role(*state);
  return 0;
}

/* A group over the whole shard, of updates with about 40 packets each; `opposite`: two that cancel. */
static group *make_plain(fixture *f, uint32_t n, int opposite) {
  group *g = f->groups;
  uint64_t begin, end;
  while (g->used) g++;
  mlfab__layout_run(&f->layout, 0, 0, &begin, &end);
  g->used = 1;
  g->number = ++f->number;
  g->n = n;
  g->shape.segments[0] = (mlfab__segment){begin, end - begin};
  g->shape.n = 1;
  g->shape.bytes = end - begin;
  g->expected = calloc(1, g->shape.bytes);
  for (uint32_t k = 0; k < n; k++) {
    update *u = &g->update[k];
    g->worker[k] = k;
    g->seq[k] = ++f->seq;
    g->weight[k] = opposite && k > 0 ? -1.0 : 1.0;
    u->dense = calloc(1, g->shape.bytes);
    u->packets = malloc(2 * g->shape.bytes);
    for (uint64_t at = 0; at < g->shape.bytes; at += 800) {
      uint64_t n32 = mlfab__min(200, (g->shape.bytes - at) / 4);
      float values[200];
      mlfab__packet_shape piece = {begin + at, MLFAB_F32, MLFAB_HALF_NONE, 0, (uint32_t)n32};
      uint64_t slice = f->layout.slices[0].bytes;
      if (at / slice != (at + 4 * n32 - 1) / slice)
        piece.elements = (uint32_t)(slice - at % slice) / 4;
      for (uint32_t i = 0; i < piece.elements; i++) values[i] = opposite ? 3.0f : (float)(k + 1);
      u->bytes += mlfab__packet_dense(u->packets + u->bytes, &piece, values);
      memcpy(u->dense + at, values, 4 * piece.elements);
    }
    literal_add(&f->layout, &g->shape, g->expected, u->dense, g->weight[k], k == 0);
  }
  tell_group(f, g, 1e9);
  return g;
}

static group *plain_group(fixture *f, uint32_t n) { return make_plain(f, n, 0); }

/* The head sends little, so the link is judged idle and another member is granted. */
static void admit_early(fixture *f, group *g) {
  f->now += 2 * BEAT + 1;
  send_some(f, g, 0, 1);
  mlfab__aggregator_tick(&f->aggregator, f->now);
}

static void send_all(fixture *f, group *g, uint32_t k) {
  while (g->sent[k] < g->update[k].bytes && send_some(f, g, k, 100)) continue;
}

/* A member that is ahead of its turn with a full ring is not silent. One that could continue is, and so is
 * one that has sent nothing yet. */
static void test_silence(void **state) {
  fixture *f = *state;
  f->aggregator.stage_bytes = 64;
  group *g = plain_group(f, 3);
  admit_early(f, g);
  admit_early(f, g);
  send_all(f, g, 1);
  assert_true(g->sent[1] > 0 && g->sent[1] < g->update[1].bytes);
  send_all(f, g, 2);
  for (int i = 0; i < 20; i++) {
    f->now += BEAT;
    send_some(f, g, 0, 1);
    mlfab__aggregator_tick(&f->aggregator, f->now);
    assert_int_equal(f->fails, 0);
    assert_true(mlfab__aggregator_deadline(&f->aggregator) > f->now);
  }
  send_all(f, g, 0);
  assert_int_equal(g->granted[1], UINT64_MAX);
  g->guilty = 2;
  f->now += 3 * BEAT;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.code, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(f->fail.worker, 1);
  end_group(f, g);
  g = plain_group(f, 2);
  g->guilty = 1;
  f->now += 3 * BEAT;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(f->fails, 2);
  assert_int_equal(f->fail.worker, 0);
}

/* A server that waits gets a progress report once a heartbeat, with the length when it is known. */
static void test_signs_of_life(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 2);
  tell_release(f, g, 1);
  for (int i = 0; i < 4; i++) {
    f->now += BEAT;
    send_some(f, g, 0, 1);
    mlfab__aggregator_tick(&f->aggregator, f->now);
  }
  assert_int_equal(f->alive, 4);
  send_all(f, g, 0);
  send_all(f, g, 1);
  assert_int_equal(take_forward(f, 0), 0); /* no packet ends within the release */
  tell_release(f, g, 5000);
  assert_true(f->ready & 1);
  while (take_forward(f, 0)) continue;
  assert_true(g->total > 0 && g->forwarded < g->total);
  tell_release(f, g, UINT64_MAX);
  while (take_forward(f, 0)) continue;
  finish_group(f, g);
  assert_int_equal(f->finished, 1);
}

/* Updates that cancel: the sum exists, and is short. */
static void test_nothing_left(void **state) {
  fixture *f = *state;
  group *g = make_plain(f, 2, 1);
  tell_release(f, g, UINT64_MAX);
  send_all(f, g, 0);
  send_all(f, g, 1);
  assert_int_equal(take_forward(f, 0), 1);
  assert_int_equal(g->total, 32);
  assert_int_equal(take_forward(f, 0), 0);
  finish_group(f, g);
  assert_int_equal(f->finished, 1);
}

/* Until an update's length is known, the dense length is assumed: members with small updates are granted
 * together with the head. */
static void test_expectations(void **state) {
  fixture *f = *state;
  f->config.chunk_bytes = 65536;
  group *g = plain_group(f, 4);
  assert_int_equal(f->grants, 3); /* the head and two early ones */
  send_all(f, g, 0);
  assert_int_equal(f->grants, 5); /* all of the next one, and one early */
}

/* The memory of packets is not freed while a link borrows some of it. */
static void test_room_while_lent(void **state) {
  fixture *f = *state;
  f->config.chunk_bytes = 65536;
  f->aggregator.naccumulators = 1;
  group *g = plain_group(f, 1);
  tell_release(f, g, UINT64_MAX);
  send_all(f, g, 0);
  assert_int_equal(take_forward(f, 0), 1);
  finish_group(f, g);
  assert_int_equal(f->nlent, 1);
  g = plain_group(f, 1); /* of the same size: waits until its bytes are returned */
  assert_int_equal(f->fails, 0);
  assert_int_equal(g->granted[0], 0);
  end_group(f, g);
  uint64_t room = f->aggregator.accumulators[0].stream_room;
  f->aggregator.accumulators[0].stream_room = 64; /* as if it were too small */
  g = plain_group(f, 1);
  f->aggregator.accumulators[0].stream_room = room;
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.code, MLFAB_ERR_AGAIN);
  give_back(f, 0);
  end_group(f, g);
  plain_group(f, 1);
  assert_int_equal(f->fails, 1);
  f->aggregator.naccumulators = 2;
}

static void bad(fixture *f, const group *g, uint32_t k, uint64_t offset, uint64_t total,
                const void *packets, uint32_t bytes, const char *text) {
  uint32_t drops = f->down_drops;
  say(f, g, k, offset, total, packets, bytes);
  assert_int_equal(f->down_drops, drops + 1);
  if (!strstr(f->text, text)) fail_msg("\"%s\", not \"%s\"", f->text, text);
}

/* Each of these breaks the sender's link; nothing of it is used. */
static void test_bad_chunks(void **state) {
  fixture *f = *state;
  static uint8_t out[4096];
  float values[64] = {0};
  f->aggregator.stage_bytes = 64;
  group *g = plain_group(f, 4);
  const update *u = &g->update[0];
  uint32_t n = packet_bytes(u, 0), m = packet_bytes(u, n);
  bad(f, g, 0, 0, 0, u->packets, n, "no packets");
  bad(f, g, 0, 0, 8 * g->shape.bytes + 8, u->packets, n, "more than its elements");
  bad(f, g, 0, 8, u->bytes, u->packets, n, "out of place");
  bad(f, g, 0, 0, n - 8, u->packets, n, "out of place");
  bad(f, g, 0, 0, u->bytes, u->packets, n - 8, "cut by the end");
  bad(f, g, 0, 0, u->bytes, u->packets, n + 16, "cut by the end");
  bad(f, g, 0, 0, u->bytes, u->packets, 0, "without packets");
  bad(f, g, 0, 0, u->bytes, NULL, n, "without packets");
  bad(f, g, 3, 0, g->update[3].bytes, g->update[3].packets, n, "not granted");
  send_some(f, g, 0, 2);
  bad(f, g, 0, 0, u->bytes, u->packets, n, "out of place"); /* repeated */
  bad(f, g, 0, n + m, u->bytes + 8, u->packets + n + m, n, "length changes");
  bad(f, g, 0, n + m, u->bytes, u->packets + n, m, "overlapping");
  mlfab__packet_shape s = {4000, MLFAB_F64, MLFAB_HALF_NONE, 0, 8};
  bad(f, g, 0, n + m, u->bytes, out, mlfab__packet_dense(out, &s, values), "another type");
  s = (mlfab__packet_shape){f->layout.slices[0].bytes - 128, MLFAB_F32, MLFAB_HALF_NONE, 0, 64};
  bad(f, g, 0, n + m, u->bytes, out, mlfab__packet_dense(out, &s, values), "one slice");
  s.offset = g->shape.bytes - 4;
  bad(f, g, 0, n + m, u->bytes, out, mlfab__packet_dense(out, &s, values), "outside");
  s.offset = g->shape.bytes + 4096;
  bad(f, g, 0, n + m, u->bytes, out, mlfab__packet_dense(out, &s, values), "outside");
  assert_int_equal(f->fails, 0);
  tell_release(f, g, UINT64_MAX);
  for (uint32_t k = 0; k < 4; k++) send_all(f, g, k);
  while (take_forward(f, 0)) continue;
  bad(f, g, 0, u->bytes, u->bytes, u->packets, n, "out of place"); /* beyond the end */
  finish_group(f, g);
  assert_int_equal(f->finished, 1);
}

/* A member that sends the same bytes in other frames, early and in its turn: nothing is added twice. A
 * member whose update is complete may be lost. */
static void test_complete_and_lost(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 2);
  admit_early(f, g);
  send_all(f, g, 1); /* everything fits into a ring */
  assert_int_equal(g->sent[1], g->update[1].bytes);
  mlfab__aggregator_lost(&f->aggregator, 1, f->now);
  assert_int_equal(f->fails, 0);
  send_all(f, g, 0);
  tell_release(f, g, UINT64_MAX);
  while (take_forward(f, 0)) continue;
  finish_group(f, g);
  assert_int_equal(f->finished, 1);
  g = plain_group(f, 2);
  send_some(f, g, 0, 3);
  g->guilty = 1;
  mlfab__aggregator_lost(&f->aggregator, 0, f->now);
  assert_int_equal(f->fails, 1);
}

/* A member's bytes change while the aggregator reads them: the sum has the bytes that were checked, or
 * none. */
static void test_changing(void **state) {
  uint32_t taken = 0;
  (void)state;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    fixture *f = open_role(seed, plain, 1, 0);
    for (uint32_t w = 0; w < WORKERS; w++) meet(f, w);
    group *g = plain_group(f, 2);
    update *u = &g->update[0];
    assert_true(u->bytes > 3 * 4096 && g->granted[0] >= u->bytes);
    uint8_t *bytes = changing_make(u->packets, u->bytes, 4096);
    for (uint32_t i = 1 + (uint32_t)below(f, CHANGING_MOST); i > 0; i--) {
      uint64_t any = mlfab__rng_next(&f->prng);
      size_t count = (size_t)1 << below(f, 4);
      changing_to(below(f, 4000 / count) * count, &any, count);
    }
    changing_arm();
    mlfab__hop_chunk chunk = {g->number, g->seq[0], 0, u->bytes, g->server};
    uint8_t meta[64];
    mlfab__frame_in in = {MLFAB__HOP_CHUNK, 0, (uint32_t)u->bytes, meta, bytes};
    in.meta_bytes = mlfab__encode_hop_chunk(meta, &chunk);
    g->sent[0] = u->bytes;
    mlfab__aggregator_member_frame(&f->aggregator, g->worker[0], &in, f->now);
    assert_int_equal(changing_end(), 1);
    assert_int_equal(f->fails, 0);
    if (f->down_drops > 0) g->sent[0] = 0; /* it did not parse: nothing was used */
    for (uint32_t k = 0; k < g->n; k++) send_all(f, g, k);
    tell_release(f, g, UINT64_MAX);
    while (take_forward(f, 0)) continue;
    finish_group(f, g);
    assert_int_equal(f->finished, 1);
    taken += f->down_drops == 0;
    close_role(f);
  }
  assert_true(taken > 0); /* all of them where copies are read forwards */
}

static void test_ghosts(void **state) {
  fixture *f = open_role(1, plain, 1, 1);
  (void)state;
  plain_group(f, 2);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.code, MLFAB_ERR_UNSUPPORTED);
  assert_int_equal(f->fail.worker, MLFAB__NO_NODE);
  close_role(f);
}

/* One allocation fails at any point: a group fails, or goes on with fewer early grants; the next one
 * completes. */
static void test_out_of_memory(void **state) {
  (void)state;
  uint32_t fails = 0;
  for (uint64_t at = 1; at < 12; at++) {
    fixture *f = open_role(at, plain, 1, 0);
    for (uint32_t w = 0; w < WORKERS; w++) meet(f, w);
    f->fail_at = f->calls + at;
    for (int i = 0; i < 2; i++) {
      group *g = plain_group(f, 3);
      if (!g->failed) {
        tell_release(f, g, UINT64_MAX);
        for (int turn = 0; turn < 3; turn++) {
          for (uint32_t k = 0; k < g->n; k++) send_all(f, g, k);
        }
        while (take_forward(f, 0)) continue;
        assert_int_equal(g->forwarded, g->total);
      } else {
        assert_int_equal(f->fail.code, MLFAB_ERR_AGAIN);
      }
      finish_group(f, g);
    }
    assert_true(f->finished + f->fails == 2 && f->finished >= 1);
    fails += f->fails;
    close_role(f);
  }
  assert_true(fails >= 4);
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
  random_update(&w->prng, &w->layout, s, whole, draw(w, 2) ? 99 : 20, &q->update);
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
static void spoil_push(pending *q) {
  group g;
  memset(&g, 0, sizeof g);
  g.update[0] = q->update;
  if (!q->packed) return;
  spoil(&g, 0);
  q->bad = (int)g.bad;
}

/* A dozen shapes, so that pushes sometimes have equal ones. */
static void push_random(world *w, peer *p) {
  mlfab__rng shapes;
  shape s;
  mlfab__rng_seed(&shapes, 1 + draw(w, 2));
  random_segments(&shapes, &w->layout, 0, &s);
  uint64_t before = p->seq;
  worker_push(w, p, &s, draw(w, 4) > 0, 1, (double)draw(w, 5) - 2.0);
  if (p->seq > before && draw(w, 40) == 0) spoil_push(worker_find(p, p->seq));
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
  world *w = open_world(1, floats, MLFAB__COUNT(floats), MLFAB_OPTIMIZER_SGD, MLFAB_SYNC_ASYNC);
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
      cmocka_unit_test(test_sums),
      cmocka_unit_test(test_sums_with_failures),
      cmocka_unit_test(test_large),
      cmocka_unit_test_setup_teardown(test_silence, open_plain, close_plain),
      cmocka_unit_test_setup_teardown(test_signs_of_life, open_plain, close_plain),
      cmocka_unit_test_setup_teardown(test_nothing_left, open_plain, close_plain),
      cmocka_unit_test_setup_teardown(test_expectations, open_plain, close_plain),
      cmocka_unit_test_setup_teardown(test_room_while_lent, open_plain, close_plain),
      cmocka_unit_test_setup_teardown(test_bad_chunks, open_plain, close_plain),
      cmocka_unit_test_setup_teardown(test_complete_and_lost, open_plain, close_plain),
      cmocka_unit_test(test_changing),
      cmocka_unit_test(test_ghosts),
      cmocka_unit_test(test_out_of_memory),
      cmocka_unit_test(test_as_dense),
      cmocka_unit_test(test_bad_sums),
      cmocka_unit_test(test_fabric),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
