/* test_aggregator.c - the aggregator role alone, between simulated servers and members.
 *
 * Oracles: a literal serial sum, member after member, of groups whose frames interleave at random; a model
 * whose bytes encode offset and version, which members write as frames arrive. A borrowed buffer is
 * compared with its contents at the time it was lent, until it is returned. */
#include "core/sched/aggregator.h"
#include "core/base/rng.h"
#include "core/kernels/kernels.h"

#include <math.h>
#include <setjmp.h>
#include <stdlib.h>
#include <cmocka.h>

enum { WORKERS = 6, SERVERS = 2, CHUNK = 256, BEAT = 1000000, LENT = 256, GROUPS = 4, MEMBERS = 6 };
enum { BIG = 16384 }; /* a chunk that is lent and not copied */

typedef struct lent {
  uint64_t token;
  int up;
  uint32_t peer, bytes;
  const uint8_t *bulk;
  uint8_t was[BIG];
} lent;

/* What a server and its members know about a group. */
typedef struct group {
  int used, failed, over;
  uint32_t server, n;
  uint64_t number, bytes, released, forwarded;
  uint32_t worker[MEMBERS];
  uint64_t seq[MEMBERS], granted[MEMBERS], sent[MEMBERS];
  double weight[MEMBERS];
  uint8_t *data[MEMBERS], *sum, *expected;
  int *dtype; /* by byte */
  int whole;
  uint32_t guilty; /* bit k: member k may be blamed for a failure */
} group;

enum { SLICES = 6 };

/* What they know about a spread. */
typedef struct spread {
  uint64_t request, bytes, begin, at, slice_at; /* of the model; where the server is; its slice */
  uint64_t version;                             /* of the slice that is being sent */
  uint64_t versions[SLICES + 1];                /* as sent last */
  uint32_t server, n;
  uint32_t worker[MEMBERS], attempt[MEMBERS];
  int done[MEMBERS], failed[MEMBERS], all_failed, whole, last_sent;
  uint8_t *model[MEMBERS];
} spread;

typedef struct fixture {
  mlfab__env env;
  mlfab_config config;
  mlfab_stats stats;
  mlfab__layout layout;
  mlfab__aggregator aggregator;
  mlfab__rng prng;
  uint64_t now, number, seq, stage;
  group groups[GROUPS];
  lent lents[LENT];
  uint32_t nlent;
  int connected[WORKERS];
  uint32_t incarnation[WORKERS];
  uint32_t up_drops, down_drops, fails, spread_fails, grants;
  mlfab__group_fail fail;
  mlfab__spread_fail spread_fail;
  mlfab__hop_grant grant;
  uint64_t calls, fail_at, memory; /* of the allocator */
  uint32_t finished;
  struct spread *spread; /* the current one */
} fixture;

static uint64_t below(fixture *f, uint64_t n) { return mlfab__rng_below(&f->prng, n); }

/* --- simulated neighbours --- */

static group *group_of(fixture *f, uint32_t server, uint64_t number) {
  for (uint32_t i = 0; i < GROUPS; i++) {
    group *g = &f->groups[i];
    if (g->used && g->server == server && g->number == number) return g;
  }
  return NULL;
}

static uint64_t added(const group *g, uint32_t k) {
  uint64_t least = g->bytes;
  for (uint32_t i = 0; i <= k; i++) least = mlfab__min(least, g->sent[i]);
  return least;
}

static void on_fail(fixture *f, uint32_t server, const mlfab__group_fail *fail) {
  group *g = group_of(f, server, fail->group);
  f->fail = *fail;
  f->fails++;
  if (!g) return;
  assert_false(g->failed || g->over);
  g->failed = 1;
  for (uint32_t k = 0; k < g->n; k++) {
    if (g->worker[k] != fail->worker || g->seq[k] != fail->seq) continue;
    if (!(g->guilty >> k & 1)) fail_msg("member %u is blamed with %d", k, (int)fail->code);
    return;
  }
  assert_int_equal(fail->worker, MLFAB__NO_NODE);
}

static void on_grant(fixture *f, uint32_t member, const mlfab__hop_grant *grant) {
  group *g = group_of(f, grant->server, grant->group);
  f->grant = *grant;
  f->grants++;
  if (!g) return;
  assert_false(g->failed || g->over);
  for (uint32_t k = 0; k < g->n; k++) {
    if (g->worker[k] != member || g->seq[k] != grant->seq) continue;
    assert_true(grant->upto > g->granted[k] && grant->upto <= g->bytes);
    int head = k == 0 || added(g, k - 1) == g->bytes;
    if (!head) assert_true(grant->upto <= added(g, k - 1) + f->stage);
    g->granted[k] = grant->upto;
    return;
  }
  fail_msg("a grant for nobody");
}

static void on_spread_fail(fixture *f, const mlfab__spread_fail *fail) {
  spread *s = f->spread;
  f->spread_fail = *fail;
  f->spread_fails++;
  if (!s || fail->request != s->request) return;
  assert_false(s->all_failed);
  if (fail->worker == MLFAB__NO_NODE) s->all_failed = 1;
  for (uint32_t i = 0; i < s->n; i++) {
    if (fail->member_request != 100 + i) continue;
    assert_int_equal(fail->worker, s->worker[i]);
    assert_false(s->failed[i]);
    s->failed[i] = 1;
  }
}

static void up_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  fixture *f = self;
  mlfab__group_fail fail;
  if (type == MLFAB__GROUP_FAIL) {
    assert_int_equal(mlfab__decode_group_fail(meta, bytes, &fail), 0);
    on_fail(f, peer, &fail);
    return;
  }
  if (type == MLFAB__FORWARD) { /* a progress report without bytes: where the next bytes will be */
    mlfab__forward alive;
    assert_int_equal(mlfab__decode_forward(meta, bytes, &alive), 0);
    return;
  }
  assert_int_equal(type, MLFAB__SPREAD_FAIL);
  mlfab__spread_fail spread_fail;
  assert_int_equal(mlfab__decode_spread_fail(meta, bytes, &spread_fail), 0);
  on_spread_fail(f, &spread_fail);
}
static void down_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  mlfab__hop_grant grant;
  assert_int_equal(type, MLFAB__HOP_GRANT);
  assert_int_equal(mlfab__decode_hop_grant(meta, bytes, &grant), 0);
  on_grant(self, peer, &grant);
}
static void port_ready(void *self, uint32_t peer) { (void)self, (void)peer; }
static void up_drop(void *self, uint32_t peer, int code, const char *text) {
  fixture *f = self;
  (void)peer, (void)text;
  assert_int_equal(code, MLFAB_ERR_FRAME);
  f->up_drops++;
}
static void down_drop(void *self, uint32_t peer, int code, const char *text) {
  fixture *f = self;
  (void)peer, (void)text;
  assert_int_equal(code, MLFAB_ERR_FRAME);
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

static const mlfab__tensor_info mixed[] = {{0, MLFAB_F64, 700}, {1, MLFAB_F32, 1500},
                                           {2, MLFAB_I64, 333}, {3, MLFAB_F32, 77},
                                           {4, MLFAB_F64, 50},  {5, MLFAB_F32, 901}};
static const mlfab__tensor_info plain[] = {{0, MLFAB_F32, 8192}};

static void open_role(fixture *f, uint64_t seed, const mlfab__tensor_info *tensors, uint32_t n,
                      int ghost) {
  mlfab_env hooks;
  memset(f, 0, sizeof *f);
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
  f->config.chunk_bytes = CHUNK;
  f->config.heartbeat_ns = BEAT;
  f->now = 1000;
  mlfab__port up = {f, up_post, port_ready, up_drop, port_detach, port_event};
  mlfab__port down = {f, down_post, port_ready, down_drop, port_detach, port_event};
  assert_int_equal(
      mlfab__layout_build(&f->env, tensors, n, 0, SERVERS, 0, 1 << 20, &f->layout, NULL), 0);
  assert_int_equal(
      mlfab__aggregator_init(&f->aggregator, &f->env, &f->config, &up, &down, &f->stats), 0);
  mlfab__aggregator_model(&f->aggregator, &f->layout, ghost);
  f->stage = f->aggregator.stage_bytes;
}

/* A ring smaller than an update, so that it wraps. */
static void small_rings(fixture *f, uint64_t bytes) {
  f->aggregator.stage_bytes = f->stage = bytes;
}

static void free_group(group *g) {
  for (uint32_t k = 0; k < g->n; k++) free(g->data[k]);
  free(g->sum);
  free(g->expected);
  free(g->dtype);
  memset(g, 0, sizeof *g);
}

static void close_role(fixture *f) {
  for (uint32_t i = 0; i < GROUPS; i++) free_group(&f->groups[i]);
  mlfab__aggregator_free(&f->aggregator);
  mlfab__layout_free(&f->env, &f->layout);
  assert_int_equal(f->env.bytes, 0);
  assert_int_equal(f->memory, 0);
}

static int tell(fixture *f, uint32_t server, uint8_t type, const uint8_t *meta, uint32_t bytes,
                const void *bulk, uint32_t bulk_bytes) {
  mlfab__frame_in in = {type, bytes, bulk_bytes, meta, bulk};
  return mlfab__aggregator_server_frame(&f->aggregator, server, &in, f->now);
}

static void meet(fixture *f, uint32_t worker, uint32_t incarnation) {
  f->connected[worker] = 1;
  f->incarnation[worker] = incarnation;
  mlfab__aggregator_met(&f->aggregator, worker, incarnation, f->now);
}

static void meet_all(fixture *f) {
  for (uint32_t w = 0; w < WORKERS; w++) meet(f, w, 1);
}

static void tell_release(fixture *f, uint32_t server, uint64_t number, uint64_t upto) {
  mlfab__release r = {number, upto};
  uint8_t meta[32];
  tell(f, server, MLFAB__RELEASE, meta, mlfab__encode_release(meta, &r), NULL, 0);
}

static void tell_end(fixture *f, uint32_t server, uint64_t number) {
  mlfab__group_end end = {number};
  uint8_t meta[32];
  tell(f, server, MLFAB__GROUP_END, meta, mlfab__encode_group_end(meta, &end), NULL, 0);
}

static void say_chunk(fixture *f, uint32_t worker, uint32_t server, uint64_t number, uint64_t seq,
                      uint64_t offset, const void *bulk, uint32_t bytes) {
  mlfab__hop_chunk chunk = {number, seq, offset, 0, server};
  uint8_t meta[64];
  mlfab__frame_in in = {MLFAB__HOP_CHUNK, 0, bytes, meta, bulk};
  in.meta_bytes = mlfab__encode_hop_chunk(meta, &chunk);
  mlfab__aggregator_member_frame(&f->aggregator, worker, &in, f->now);
}

/* --- lending --- */

static void note_lent(fixture *f, int up, uint32_t peer, const mlfab__frame_out *out) {
  if (out->token == 0) return;
  assert_true(f->nlent < LENT && out->bulk_bytes <= BIG);
  assert_true(out->token > 0 && out->token >> 60 == 0); /* the node's bits */
  assert_int_equal(out->token >> 62, 0);
  lent *l = &f->lents[f->nlent++];
  l->token = out->token;
  l->up = up;
  l->peer = peer;
  l->bytes = out->bulk_bytes;
  l->bulk = out->bulk;
  memcpy(l->was, out->bulk, out->bulk_bytes);
}

static void give_back(fixture *f, uint32_t i) {
  lent *l = &f->lents[i];
  assert_memory_equal(l->bulk, l->was, l->bytes);
  uint64_t token = l->token;
  *l = f->lents[--f->nlent];
  mlfab__aggregator_sent(&f->aggregator, token);
  /* A transport that returns it twice by mistake changes nothing. */
  if (below(f, 4) == 0) mlfab__aggregator_sent(&f->aggregator, token);
}

/* The link is gone, and with it the buffers that it borrowed. */
static void give_all_back(fixture *f, int up, uint32_t peer) {
  for (uint32_t i = f->nlent; i-- > 0;) {
    if (f->lents[i].up != up || f->lents[i].peer != peer) continue;
    assert_memory_equal(f->lents[i].bulk, f->lents[i].was, f->lents[i].bytes);
    f->lents[i] = f->lents[--f->nlent];
  }
}

static void lose(fixture *f, uint32_t worker) {
  f->connected[worker] = 0;
  give_all_back(f, 0, worker);
  mlfab__aggregator_lost(&f->aggregator, worker, f->now);
}

/* Takes one frame for a server, or only looks at it. Returns 1 when there was one. */
static int take_forward(fixture *f, uint32_t server, int take) {
  uint8_t meta[64];
  mlfab__frame_out out;
  mlfab__forward forward;
  memset(&out, 0, sizeof out);
  out.meta = meta;
  if (!mlfab__aggregator_next_up(&f->aggregator, server, &out)) return 0;
  assert_int_equal(out.type, MLFAB__FORWARD);
  assert_int_equal(mlfab__decode_forward(meta, out.meta_bytes, &forward), 0);
  group *g = group_of(f, server, forward.group);
  assert_true(g && !g->failed && !g->over);
  assert_int_equal(forward.offset, g->forwarded);
  assert_true(out.bulk_bytes > 0 && out.bulk_bytes <= g->released - g->forwarded);
  assert_true(g->forwarded + out.bulk_bytes <= added(g, g->n - 1));
  if (g->whole) assert_int_equal(added(g, g->n - 1), g->bytes);
  if (!take) return 1;
  if (f->aggregator.ghost) {
    assert_null(out.bulk);
  } else {
    memcpy(g->sum + g->forwarded, out.bulk, out.bulk_bytes);
  }
  g->forwarded += out.bulk_bytes;
  note_lent(f, 1, server, &out);
  mlfab__aggregator_taken_up(&f->aggregator, server, &out);
  return 1;
}

/* --- groups --- */

static uint32_t width_at(const group *g, uint64_t at) {
  return at < g->bytes ? mlfab__dtype_bytes(g->dtype[at]) : 4;
}

/* Random stretches of a server's shard, cut between elements. */
static uint32_t random_segments(fixture *f, uint32_t server, mlfab__segment *segments, group *g) {
  uint64_t begin, end, at, bytes = 0;
  uint32_t n = 0;
  mlfab__layout_run(&f->layout, server, 0, &begin, &end);
  g->dtype = malloc((end - begin) * sizeof *g->dtype);
  assert_non_null(g->dtype);
  for (at = begin; at < end && n < 8;) {
    uint64_t stop = mlfab__min(end, at + 8 + 8 * below(f, below(f, 3) ? 200 : 2000));
    mlfab__segment s = {at, stop - at};
    if (mlfab__layout_valid(&f->layout, server, &s)) {
      segments[n++] = s;
      for (uint64_t x = at; x < stop; x++) {
        g->dtype[bytes++] = (int)mlfab__layout_tensor_at(&f->layout, x)->dtype;
      }
    }
    at = stop + 8 * (1 + below(f, 20));
  }
  g->bytes = bytes;
  return n;
}

static void random_update(fixture *f, const group *g, uint8_t *data) {
  for (uint64_t at = 0; at < g->bytes; at += width_at(g, at)) {
    float x = (float)(mlfab__rng_unit(&f->prng) - 0.5);
    double y = mlfab__rng_unit(&f->prng) * 1e3 - 500.0;
    uint64_t z = mlfab__rng_next(&f->prng);
    if (g->dtype[at] == MLFAB_F32) memcpy(data + at, &x, 4);
    if (g->dtype[at] == MLFAB_F64) memcpy(data + at, &y, 8);
    if (g->dtype[at] == MLFAB_I64) memcpy(data + at, &z, 8);
  }
}

/* Member after member, element after element; storing each result keeps its rounding. */
static void literal_sum(group *g) {
  for (uint64_t at = 0; at < g->bytes; at += width_at(g, at)) {
    for (uint32_t k = 0; k < g->n; k++) {
      if (g->dtype[at] == MLFAB_F32) {
        float u, s;
        memcpy(&u, g->data[k] + at, 4);
        memcpy(&s, g->expected + at, 4);
        volatile float product = (float)g->weight[k] * u;
        volatile float sum = k ? s + product : product;
        s = sum;
        memcpy(g->expected + at, &s, 4);
      } else if (g->dtype[at] == MLFAB_F64) {
        double u, s;
        memcpy(&u, g->data[k] + at, 8);
        memcpy(&s, g->expected + at, 8);
        volatile double product = g->weight[k] * u;
        volatile double sum = k ? s + product : product;
        s = sum;
        memcpy(g->expected + at, &s, 8);
      } else {
        uint64_t u, s;
        memcpy(&u, g->data[k] + at, 8);
        memcpy(&s, g->expected + at, 8);
        s = (k ? s : 0) + (uint64_t)(int64_t)g->weight[k] * u;
        memcpy(g->expected + at, &s, 8);
      }
    }
  }
}

static uint8_t manifest[MLFAB_META_MAX];

static void tell_group(fixture *f, const group *g, double rate, const mlfab__segment *segments,
                       uint32_t n) {
  mlfab__group_member members[MEMBERS];
  mlfab__group m = {g->number, g->bytes, rate, (uint32_t)g->whole, 0, g->n, n};
  memset(members, 0, sizeof members);
  for (uint32_t k = 0; k < g->n; k++) {
    members[k].seq = g->seq[k];
    members[k].weight = g->weight[k];
    members[k].worker = g->worker[k];
    members[k].incarnation = 1;
  }
  uint32_t bytes = mlfab__encode_group(manifest, &m, members, segments);
  assert_int_equal(tell(f, g->server, MLFAB__GROUP, manifest, bytes, NULL, 0), 1);
}

/* Fills in the description of a group without sending it. */
static uint32_t make_group(fixture *f, group *g, uint32_t server, uint32_t n,
                           mlfab__segment *segments) {
  memset(g, 0, sizeof *g);
  uint32_t nsegments = random_segments(f, server, segments, g);
  g->used = 1;
  g->server = server;
  g->number = ++f->number;
  g->n = n;
  g->sum = calloc(1, g->bytes);
  g->expected = calloc(1, g->bytes);
  assert_non_null(g->expected);
  for (uint32_t k = 0; k < n; k++) {
    g->worker[k] = (uint32_t)below(f, WORKERS);
    g->seq[k] = ++f->seq;
    g->weight[k] = below(f, 2) ? 1.0 : (double)below(f, 9) - 4.0;
    g->data[k] = malloc(g->bytes);
    assert_non_null(g->data[k]);
    random_update(f, g, g->data[k]);
  }
  literal_sum(g);
  return nsegments;
}

static group *start_group(fixture *f, uint32_t server, uint32_t n) {
  mlfab__segment segments[8];
  group *g = f->groups;
  while (g->used) g++;
  uint32_t nsegments = make_group(f, g, server, n, segments);
  g->whole = below(f, 3) == 0;
  tell_group(f, g, below(f, 2) ? 1e9 : -1.0, segments, nsegments);
  return g;
}

/* A random piece of what member k may send. */
static void send_some(fixture *f, group *g, uint32_t k) {
  uint64_t left = g->granted[k] - g->sent[k];
  uint64_t n = mlfab__min(left, 8 * (1 + below(f, below(f, 2) ? 64 : 8)));
  uint64_t at = g->sent[k];
  if (width_at(g, at + n) == 8) n -= (at + n) % 8;
  if (n == 0) n = mlfab__min(left, 8);
  g->sent[k] += n; /* updated first, because the answer depends on it */
  if (g->failed || g->over) g->sent[k] -= n;
  /* The bulk is borrowed for the call only. */
  uint8_t *bulk = malloc(n);
  assert_non_null(bulk);
  memcpy(bulk, g->data[k] + at, n);
  say_chunk(f, g->worker[k], g->server, g->number, g->seq[k], at, f->aggregator.ghost ? NULL : bulk,
            (uint32_t)n);
  free(bulk);
}

static void finish_group(fixture *f, group *g) {
  uint64_t number = g->number;
  uint32_t server = g->server;
  if (!g->failed && g->forwarded == g->bytes && !f->aggregator.ghost)
    assert_memory_equal(g->sum, g->expected, g->bytes);
  f->finished += !g->failed && g->forwarded == g->bytes;
  g->over = 1;
  tell_end(f, server, number);
  free_group(g);
}

static uint64_t random_upto(fixture *f, const group *g) {
  uint64_t upto = below(f, g->bytes + 1) / 8 * 8;
  return below(f, 3) == 0 ? g->bytes : upto;
}

/* One thing that may happen to a group. */
static void step_group(fixture *f, group *g) {
  uint32_t k = (uint32_t)below(f, g->n);
  switch (below(f, 4)) {
    case 0:
      if (!g->failed) {
        uint64_t upto = random_upto(f, g);
        g->released = mlfab__max(g->released, upto);
        tell_release(f, g->server, g->number, upto);
      }
      break;
    case 1:
      take_forward(f, g->server, below(f, 3) > 0);
      break;
    default:
      if (f->connected[g->worker[k]] && g->sent[k] < g->granted[k]) send_some(f, g, k);
      break;
  }
  if (g->failed ? below(f, 4) == 0 : g->forwarded == g->bytes) finish_group(f, g);
}

/* The sum equals the literal one for every order of chunks, grants, releases and returned bulks, with
 * several groups of two servers at once. */
static void test_sums(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 60; seed++) {
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    open_role(f, seed, seed % 4 ? mixed : plain, seed % 4 ? MLFAB__COUNT(mixed) : 1, seed % 7 == 0);
    if (seed % 2) small_rings(f, 64 * (1 + below(f, 20)));
    f->config.heartbeat_ns = 10000000000u;
    if (seed % 3) meet_all(f); /* else they connect later, or while the group waits for them */
    uint32_t started = 0;
    for (int step = 0; step < 200000 && f->finished < 8; step++) {
      group *g = &f->groups[below(f, 2)];
      uint32_t w = (uint32_t)below(f, WORKERS);
      f->now += below(f, 20000); /* some windows of the meter pass */
      if (!f->connected[w] && below(f, 100) == 0) meet(f, w, 1);

      if (!g->used && started < 8 && below(f, 10) == 0) {
        started +=
            (uint32_t)(start_group(f, (uint32_t)below(f, SERVERS), 1 + (uint32_t)below(f, MEMBERS))
                           ->used);
      } else if (g->used) {
        step_group(f, g);
      }
      if (f->nlent > 0 && below(f, 3) == 0) give_back(f, (uint32_t)below(f, f->nlent));
      if (below(f, 20) == 0) mlfab__aggregator_tick(&f->aggregator, f->now);
    }
    assert_int_equal(f->finished, 8);
    assert_int_equal(f->fails, 0);
    assert_int_equal(f->up_drops + f->down_drops, 0);
    assert_true(f->stats.members_added >= 8);
    close_role(f);
    free(f);
  }
}

/* --- failures --- */

static void blame(fixture *f, uint32_t worker) {
  for (uint32_t i = 0; i < GROUPS; i++) {
    for (uint32_t k = 0; k < f->groups[i].n; k++) {
      if (f->groups[i].worker[k] == worker) f->groups[i].guilty |= 1u << k;
    }
  }
}

static void spoil(fixture *f, group *g) {
  uint32_t k = (uint32_t)below(f, g->n);
  uint64_t at = g->sent[k] / 8 * 8;
  double bad = below(f, 2) ? (double)NAN : (double)INFINITY;
  float bad32 = (float)bad;
  if (at >= g->bytes || f->aggregator.ghost || g->weight[k] == 0.0) return;
  if (g->dtype[at] == MLFAB_I64) return;
  if (g->dtype[at] == MLFAB_F64) memcpy(g->data[k] + at, &bad, 8);
  if (g->dtype[at] == MLFAB_F32) memcpy(g->data[k] + at, &bad32, 4);
  /* the first half of a pair was sent: the second half does not matter */
  if (at < g->sent[k]) return;
  g->guilty |= 1u << k;
}

/* The same with members that die, reconnect, fall silent or send non-finite values, and with servers that
 * end groups or vanish: only the guilty member is blamed, a sum that completes is right, and all resources
 * are reused. */
static void test_sums_with_failures(void **state) {
  uint64_t finished = 0, fails = 0;
  (void)state;
  for (uint64_t seed = 1; seed <= 60; seed++) {
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    open_role(f, seed, mixed, MLFAB__COUNT(mixed), 0);
    small_rings(f, 64 * (1 + below(f, 20)));
    meet_all(f);
    for (int step = 0; step < 20000; step++) {
      group *g = &f->groups[below(f, 2)];
      uint32_t w = (uint32_t)below(f, WORKERS);
      f->now += below(f, 100);
      if (!g->used) {
        start_group(f, (uint32_t)below(f, SERVERS), 1 + (uint32_t)below(f, MEMBERS));
        for (uint32_t i = 0; i < WORKERS; i++) {
          if (!f->connected[i]) blame(f, i);
        }
      } else {
        step_group(f, g);
      }
      if (f->nlent > 0 && below(f, 2) == 0) give_back(f, (uint32_t)below(f, f->nlent));
      switch (below(f, 1500)) {
        case 0:
          blame(f, w);
          lose(f, w);
          break;
        case 1:
          for (uint32_t i = 0; i < WORKERS; i++) blame(f, i);
          f->now += 3 * BEAT;
          mlfab__aggregator_tick(&f->aggregator, f->now);
          break;
        case 2:
          if (g->used) spoil(f, g);
          break;
        case 3:
          if (g->used) {
            g->failed = 1;
            finish_group(f, g);
          }
          break;
        case 4:
          give_all_back(f, 1, w % SERVERS);
          mlfab__aggregator_server_lost(&f->aggregator, w % SERVERS);
          for (uint32_t i = 0; i < GROUPS; i++) {
            if (f->groups[i].used && f->groups[i].server == w % SERVERS) free_group(&f->groups[i]);
          }
          break;
        default:
          if (!f->connected[w] && below(f, 20) == 0) meet(f, w, 1);
          break;
      }
    }
    assert_int_equal(f->up_drops + f->down_drops, 0);
    finished += f->finished;
    fails += f->fails;
    close_role(f);
    free(f);
  }
  assert_true(finished > 150 && fails > 300);
}

/* --- spreads --- */

static uint8_t byte_of(uint64_t offset, uint64_t version) {
  return (uint8_t)(mlfab__mix(offset * 31 + version) >> 7);
}

static void tell_spread(fixture *f, spread *s) {
  mlfab__spread_member members[MEMBERS];
  mlfab__spread m = {s->request, s->bytes, 7, (uint32_t)s->whole, s->n};
  memset(members, 0, sizeof members);
  for (uint32_t i = 0; i < s->n; i++) {
    members[i].request = 100 + i;
    members[i].worker = s->worker[i];
    members[i].incarnation = 1;
    members[i].attempt = s->attempt[i];
  }
  uint32_t bytes = mlfab__encode_spread(manifest, &m, members);
  assert_int_equal(tell(f, s->server, MLFAB__SPREAD, manifest, bytes, NULL, 0), 1);
}

static void make_spread(fixture *f, spread *s, uint32_t server, uint32_t n) {
  uint64_t end;
  memset(s, 0, sizeof *s);
  mlfab__layout_run(&f->layout, server, 0, &s->begin, &end);
  s->bytes = end - s->begin;
  s->request = MLFAB__SPREAD_BIT | ++f->number;
  s->server = server;
  s->n = n;
  s->whole = below(f, 3) == 0;
  for (uint32_t i = 0; i < n; i++) {
    s->worker[i] = i;
    s->attempt[i] = 1 + (uint32_t)below(f, 3);
    s->model[i] = calloc(1, s->bytes);
    assert_non_null(s->model[i]);
  }
}

static void free_spread(spread *s) {
  for (uint32_t i = 0; i < s->n; i++) free(s->model[i]);
}

static uint64_t slice_end(const spread *s, uint32_t slice) {
  return slice + 1 == SLICES ? s->bytes : s->bytes / SLICES * (slice + 1);
}

/* A piece of `n` bytes as packets, which a distributor does not interpret. */
static uint32_t packets(uint64_t offset, uint64_t n, uint8_t *bulk) {
  uint32_t bytes = (uint32_t)(mlfab__mix(offset) % 3 * (n / 16) * 8);
  for (uint32_t i = 0; i < bytes; i++) bulk[i] = byte_of(offset, i);
  return bytes;
}

/* The server's next frame: a piece of a slice, at most `most` bytes. */
static void tell_model(fixture *f, spread *s, uint64_t most) {
  static uint8_t bulk[1 << 20];
  uint8_t meta[64];
  uint32_t slice = (uint32_t)mlfab__min(s->at / (s->bytes / SLICES), SLICES - 1);
  uint64_t n = mlfab__min(most, slice_end(s, slice) - s->at);
  if (s->at == s->slice_at) s->version++;
  s->versions[slice] = s->version;
  mlfab__model m = {s->request, s->begin + s->at,        n, s->version, s->version * 2, slice,
                    0,          (uint32_t)s->version + 7};
  s->last_sent = s->at + n == s->bytes;
  m.flags = s->last_sent ? MLFAB__MODEL_LAST : 0;
  uint32_t bulk_bytes = (uint32_t)n;
  for (uint64_t i = 0; i < n; i++) bulk[i] = byte_of(m.offset + i, s->version);
  if (!f->aggregator.ghost && mlfab__mix(m.offset + s->version) % 3 == 0) {
    m.flags |= MLFAB__MODEL_PACKED;
    bulk_bytes = packets(m.offset, n, bulk);
  }
  s->at += n;
  if (s->at == slice_end(s, slice)) s->slice_at = s->at;
  assert_int_equal(tell(f, s->server, MLFAB__MODEL, meta, mlfab__encode_model(meta, &m),
                        f->aggregator.ghost ? NULL : bulk, bulk_bytes),
                   1);
}

/* Writes what a frame holds to a member's model. */
static void write_model(const spread *s, uint8_t *model, const mlfab__hop_model *m,
                        const mlfab__frame_out *out) {
  static uint8_t bulk[1 << 20];
  uint8_t *to = model + (m->offset - s->begin);
  if (!(m->flags & MLFAB__MODEL_PACKED)) {
    assert_int_equal(out->bulk_bytes, m->bytes);
    if (out->bulk) memcpy(to, out->bulk, out->bulk_bytes);
    return;
  }
  assert_int_equal(out->bulk_bytes, packets(m->offset, m->bytes, bulk));
  assert_memory_equal(out->bulk, bulk, out->bulk_bytes);
  for (uint64_t i = 0; i < m->bytes; i++) to[i] = byte_of(m->offset + i, m->version);
}

/* Takes a frame for a member and writes it where a worker would. */
static int take_model(fixture *f, spread *s, uint32_t worker) {
  uint8_t meta[64];
  mlfab__frame_out out;
  mlfab__hop_model m;
  memset(&out, 0, sizeof out);
  out.meta = meta;
  if (!mlfab__aggregator_next_down(&f->aggregator, worker, &out)) return 0;
  assert_int_equal(out.type, MLFAB__HOP_MODEL);
  assert_int_equal(mlfab__decode_hop_model(meta, out.meta_bytes, &m), 0);
  uint32_t i = 0, active = 0;
  while (i < s->n && (s->worker[i] != worker || 100 + i != m.request)) i++;
  assert_true(i < s->n && m.server == s->server && m.attempt == s->attempt[i]);
  assert_true(f->connected[worker] && !s->done[i] && !s->failed[i]);
  assert_true(!s->whole || s->last_sent);
  assert_int_equal(m.commit, 2 * m.version);
  assert_int_equal(m.epoch, m.version + 7);
  for (uint32_t k = 0; k < f->aggregator.naccumulators; k++) {
    const mlfab__accumulator *a = &f->aggregator.accumulators[k];
    for (uint32_t r = 0; a->state == MLFAB__ACCUMULATOR_HANDING && r < a->nrecipients; r++) {
      active += a->recipients[r].state == MLFAB__RECIPIENT_ACTIVE;
    }
  }
  assert_true(active >= 1 && active <= 2);
  write_model(s, s->model[i], &m, &out);
  s->done[i] = (m.flags & MLFAB__MODEL_LAST) != 0;
  note_lent(f, 0, worker, &out);
  mlfab__aggregator_taken_down(&f->aggregator, worker, &out);
  return 1;
}

/* Every slice must be of the version that was sent last, whole. */
static void check_models(const fixture *f, const spread *s) {
  for (uint32_t i = 0; i < s->n; i++) {
    if (!s->done[i]) assert_true(s->failed[i] || s->all_failed);
    if (s->failed[i] || !s->done[i] || f->aggregator.ghost) continue;
    for (uint64_t at = 0, slice = 0; at < s->bytes; at++) {
      while (at >= slice_end(s, (uint32_t)slice)) slice++;
      if (s->model[i][at] != byte_of(s->begin + at, s->versions[slice]))
        fail_msg("member %u: byte %u is not of the last version", i, (unsigned)at);
    }
  }
}

static uint32_t busy(const fixture *f) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < f->aggregator.naccumulators; i++) {
    n += f->aggregator.accumulators[i].state != MLFAB__ACCUMULATOR_FREE;
  }
  return n;
}

/* Models handed on in a random order of events: slices restart while their old bytes are lent; members join
 * and leave. */
static void run_spread(fixture *f, int restarts, int losses, uint64_t most) {
  spread s;
  make_spread(f, &s, (uint32_t)below(f, SERVERS), 1 + (uint32_t)below(f, MEMBERS));
  for (uint32_t w = 0; w < WORKERS; w++) {
    if (!f->connected[w]) meet(f, w, 1);
  }
  f->spread = &s;
  tell_spread(f, &s);
  for (int step = 0; step < 100000 && busy(f) > 0; step++) {
    f->now += below(f, 50);
    if (!s.last_sent && below(f, 2)) {
      if (restarts && s.at > s.slice_at && below(f, 25) == 0) s.at = s.slice_at;
      tell_model(f, &s, 8 + below(f, most));
    }
    for (uint32_t w = 0; w < s.n; w++) {
      if (f->connected[w] && below(f, 2)) take_model(f, &s, w);
    }
    if (f->nlent > 0 && below(f, 2)) give_back(f, (uint32_t)below(f, f->nlent));
    if (losses && below(f, 60) == 0) {
      uint32_t w = (uint32_t)below(f, s.n);
      if (f->connected[w]) lose(f, w);
    }
    if (losses && below(f, 200) == 0) f->now += 3 * BEAT;
    if (below(f, 8) == 0) mlfab__aggregator_tick(&f->aggregator, f->now);
  }
  f->spread = NULL;
  assert_int_equal(busy(f), 0);
  check_models(f, &s);
  while (!s.last_sent) tell_model(f, &s, most); /* no recipient is left */
  while (f->nlent > 0) give_back(f, 0);
  f->finished += !s.all_failed;
  free_spread(&s);
}

static void test_spreads(void **state) {
  (void)state;
  uint32_t finished = 0;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    fixture *f = calloc(1, sizeof *f);
    const mlfab__tensor_info large[] = {{0, MLFAB_F32, 150000}};
    assert_non_null(f);
    open_role(f, seed, seed % 3 ? mixed : large, seed % 3 ? MLFAB__COUNT(mixed) : 1,
              seed % 11 == 0);
    for (int round = 0; round < 4; round++) {
      run_spread(f, seed % 2 != 0, 0, seed % 3 ? 700 : BIG - 8);
    }
    finished += f->finished;
    assert_int_equal(f->up_drops, 0);
    close_role(f);
    free(f);
  }
  assert_true(finished > 120); /* in the others the restarted slice found no room */
}

static void test_spreads_with_losses(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    fixture *f = calloc(1, sizeof *f);
    const mlfab__tensor_info large[] = {{0, MLFAB_F32, 150000}};
    assert_non_null(f);
    open_role(f, seed, seed % 3 ? mixed : large, seed % 3 ? MLFAB__COUNT(mixed) : 1, 0);
    for (int round = 0; round < 6; round++) run_spread(f, 1, 1, seed % 3 ? 700 : BIG - 8);
    assert_int_equal(f->up_drops, 0);
    close_role(f);
    free(f);
  }
}

/* --- one thing at a time --- */

static int open_plain(void **state) {
  fixture *f = calloc(1, sizeof *f);
  assert_non_null(f);
  open_role(f, 1, plain, 1, 0);
  meet_all(f);
  *state = f;
  return 0;
}

static int close_plain(void **state) {
  fixture *f = *state;
  close_role(f);
  free(f);
  return 0;
}

/* A group of `n` updates of workers 0.. with all of server 0's shard; data are ones. */
static group *plain_group(fixture *f, uint32_t n, int whole, double rate) {
  uint64_t begin, end;
  group *g = f->groups;
  while (g->used) g++;
  mlfab__layout_run(&f->layout, 0, 0, &begin, &end);
  mlfab__segment segment = {begin, end - begin};
  memset(g, 0, sizeof *g);
  g->used = 1;
  g->number = ++f->number;
  g->n = n;
  g->bytes = end - begin;
  g->whole = whole;
  g->sum = calloc(1, g->bytes);
  g->dtype = malloc(g->bytes * sizeof *g->dtype);
  assert_true(g->sum && g->dtype);
  for (uint64_t i = 0; i < g->bytes; i++) g->dtype[i] = MLFAB_F32;
  for (uint32_t k = 0; k < n; k++) {
    float one = 1.0f;
    g->worker[k] = k;
    g->seq[k] = ++f->seq;
    g->weight[k] = 1.0;
    g->data[k] = malloc(g->bytes);
    assert_non_null(g->data[k]);
    for (uint64_t i = 0; i < g->bytes; i += 4) memcpy(g->data[k] + i, &one, 4);
  }
  tell_group(f, g, rate, &segment, 1);
  return g;
}

static void send_upto(fixture *f, group *g, uint32_t k, uint64_t upto) {
  while (g->sent[k] < upto) {
    uint64_t at = g->sent[k], n = mlfab__min(upto - at, CHUNK);
    g->sent[k] += n;
    say_chunk(f, g->worker[k], g->server, g->number, g->seq[k], at, g->data[k] + at, (uint32_t)n);
  }
}

/* The next member is granted when the current one has two chunks left, if capacities are not known. */
static void test_grant_order(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 3, 0, -1.0);
  assert_int_equal(g->granted[0], g->bytes);
  assert_int_equal(g->granted[1], 0);
  send_upto(f, g, 0, g->bytes - 2 * CHUNK - 4);
  assert_int_equal(g->granted[1], 0);
  send_upto(f, g, 0, g->bytes - 2 * CHUNK);
  assert_true(g->granted[1] > 0);
  assert_int_equal(g->granted[2], 0);
  assert_int_equal(mlfab__meter_due(&f->aggregator.meter), MLFAB__NEVER);
  send_upto(f, g, 0, g->bytes);
  send_upto(f, g, 1, g->bytes);
  send_upto(f, g, 2, g->bytes);
  g->released = g->bytes;
  tell_release(f, 0, g->number, g->bytes);
  while (take_forward(f, 0, 1)) continue;
  for (uint64_t i = 0; i < g->bytes; i += 4) {
    float sum;
    memcpy(&sum, g->sum + i, 4);
    assert_true(sum == 3.0f);
  }
  assert_int_equal(f->stats.members_added, 3);
}

/* If the capacity is known and less than 85 % of it is used, the next member is granted earlier, up to the
 * size of a ring. There are two rings. The early grant stays valid when the current member ends. */
static void test_idle_link(void **state) {
  fixture *f = *state;
  f->config.heartbeat_ns = 1000000000u;
  small_rings(f, 1024);
  group *g = plain_group(f, 5, 0, 1e8);
  uint64_t window = f->aggregator.meter.window_ns;
  assert_int_equal(mlfab__aggregator_deadline(&f->aggregator), f->now + window);
  f->now += window - 1;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(g->granted[1], 0);
  f->now += 1;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(g->granted[1], 1024);
  assert_int_equal(g->granted[2], 0);
  f->now += window;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(g->granted[2], 1024);
  f->now += window;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(g->granted[3], 0); /* no ring is left */
  send_upto(f, g, 2, 1024);
  send_upto(f, g, 1, 1024);
  send_upto(f, g, 0, 512);
  assert_int_equal(g->granted[1], 1024 + 512);
  assert_int_equal(g->granted[2], 1024 + 512);
  send_upto(f, g, 0, g->bytes);
  assert_int_equal(g->granted[1], g->bytes);
  send_upto(f, g, 1, g->bytes);
  assert_int_equal(g->granted[2], g->bytes);
  assert_true(g->granted[3] > 0);
}

/* A link in use is not judged idle. */
static void test_busy_link(void **state) {
  fixture *f = *state;
  f->config.heartbeat_ns = 1000000000u;
  group *g = plain_group(f, 2, 0, 1e6);
  uint64_t window = f->aggregator.meter.window_ns; /* 16 chunks */
  for (uint64_t at = CHUNK; at + 2 * CHUNK < g->bytes; at += CHUNK) {
    f->now += window / 16;
    send_upto(f, g, 0, at);
    mlfab__aggregator_tick(&f->aggregator, f->now);
    assert_int_equal(g->granted[1], 0);
  }
}

/* A member without a link is passed over until it is the only one left. */
static void test_absent_member(void **state) {
  fixture *f = *state;
  lose(f, 0);
  group *g = plain_group(f, 2, 0, -1.0);
  assert_int_equal(g->granted[0], 0);
  assert_int_equal(g->granted[1], g->bytes); /* all of it is staged */
  send_upto(f, g, 1, g->bytes);
  assert_int_equal(mlfab__aggregator_deadline(&f->aggregator), f->now + 3 * BEAT);
  f->now += BEAT;
  meet(f, 0, 1);
  assert_int_equal(g->granted[0], g->bytes);
  send_upto(f, g, 0, g->bytes);
  g->released = g->bytes;
  tell_release(f, 0, g->number, g->bytes);
  while (take_forward(f, 0, 1)) continue;
  assert_int_equal(g->forwarded, g->bytes);
  tell_end(f, 0, g->number);
  free_group(g);
  lose(f, 0);
  g = plain_group(f, 2, 0, -1.0);
  g->guilty = 1;
  f->now += 3 * BEAT;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(f->fail.worker, 0);
  assert_int_equal(f->fail.code, MLFAB_ERR_PEER_DEAD);
}

/* A granted member that sends nothing for 3 heartbeats is named; a member that waits for a grant is not. */
static void test_silent_member(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 3, 0, -1.0);
  send_upto(f, g, 0, g->bytes);
  send_upto(f, g, 1, CHUNK);
  assert_int_equal(mlfab__aggregator_deadline(&f->aggregator), f->now + 3 * BEAT);
  f->now += 2 * BEAT;
  send_upto(f, g, 1, 2 * CHUNK);
  f->now += 3 * BEAT - 1;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(f->fails, 0);
  f->now += 1;
  g->guilty = 1u << 1;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.worker, 1);
  assert_int_equal(f->fail.code, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(f->stats.transfers_revoked, 1);
  /* The group has failed: chunks that still arrive are ignored, and nothing is sent. */
  say_chunk(f, 1, 0, g->number, g->seq[1], g->sent[1], g->data[1], CHUNK);
  tell_release(f, 0, g->number, g->bytes);
  assert_false(take_forward(f, 0, 0));
  assert_int_equal(f->down_drops + f->up_drops, 0);
  assert_int_equal(mlfab__aggregator_deadline(&f->aggregator), MLFAB__NEVER);
  tell_end(f, 0, g->number);
  say_chunk(f, 1, 0, g->number, g->seq[1], g->sent[1], g->data[1], CHUNK);
  assert_int_equal(f->down_drops, 0);
}

static void test_member_lost(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 2, 0, -1.0);
  send_upto(f, g, 0, g->bytes);
  lose(f, 0); /* its update is complete here: the loss does not matter */
  assert_int_equal(f->fails, 0);
  g->guilty = 1u << 1;
  send_upto(f, g, 1, CHUNK);
  lose(f, 1);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.worker, 1);
  assert_int_equal(f->fail.seq, g->seq[1]);
}

/* A group fails with its member. Another group, which waited for the in-link, is granted, and its timeout
 * starts then. */
static void test_granted_after_a_loss(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 2, 0, -1.0);
  send_upto(f, g, 0, g->bytes);
  group *next = plain_group(f, 1, 0, -1.0);
  assert_int_equal(g->granted[1], g->bytes);
  assert_int_equal(next->granted[0], 0);
  g->guilty = 1u << 1;
  f->now += BEAT;
  lose(f, 1);
  assert_int_equal(f->fails, 1);
  assert_int_equal(next->granted[0], next->bytes);
  assert_int_equal(mlfab__aggregator_deadline(&f->aggregator), f->now + 3 * BEAT);
}

/* A member that reconnects as another process cannot have the update. One that is older than the manifest
 * says is waited for. */
static void test_other_incarnation(void **state) {
  fixture *f = *state;
  lose(f, 1);
  group *g = plain_group(f, 2, 0, -1.0);
  g->guilty = 1u << 1;
  meet(f, 1, 2);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.worker, 1);
  tell_end(f, 0, g->number);
  free_group(g);
  lose(f, 0);
  meet(f, 0, 0);
  g = plain_group(f, 1, 0, -1.0);
  assert_int_equal(f->fails, 1);
  assert_int_equal(g->granted[0], 0);
  meet(f, 0, 1); /* without a loss in between */
  assert_int_equal(g->granted[0], g->bytes);
}

static void test_not_finite(void **state) {
  fixture *f = *state;
  float bad = (float)NAN;
  group *g = plain_group(f, 2, 0, -1.0);
  memcpy(g->data[1] + 4000, &bad, 4);
  send_upto(f, g, 0, g->bytes);
  send_upto(f, g, 1, 4000);
  assert_int_equal(f->fails, 0);
  g->guilty = 1u << 1;
  send_upto(f, g, 1, 4096);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.code, MLFAB_ERR_NOT_FINITE);
  tell_end(f, 0, g->number);
  free_group(g);
  /* The same when the update was staged: the first member's chunk reveals it. */
  lose(f, 0);
  g = plain_group(f, 2, 0, -1.0);
  memcpy(g->data[1] + 4000, &bad, 4);
  send_upto(f, g, 1, g->bytes);
  meet(f, 0, 1);
  g->guilty = 1u << 1;
  send_upto(f, g, 0, 4000);
  assert_int_equal(f->fails, 1);
  send_upto(f, g, 0, 4096);
  assert_int_equal(f->fails, 2);
  assert_int_equal(f->fail.worker, 1);
}

/* Nothing is sent before the release, or with `whole` before it is complete. A frame that was yielded and
 * not taken is yielded again. */
static void test_release(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 1, 0, -1.0);
  send_upto(f, g, 0, 4 * CHUNK + 8);
  assert_false(take_forward(f, 0, 0));
  tell_release(f, 0, g->number, g->released = CHUNK + 4);
  assert_true(take_forward(f, 0, 0));
  assert_true(take_forward(f, 0, 1));
  /* the end of a release is sent without waiting for a full chunk */
  assert_true(take_forward(f, 0, 1));
  assert_int_equal(g->forwarded, CHUNK + 4);
  assert_false(take_forward(f, 0, 1));
  tell_release(f, 0, g->number, CHUNK); /* an older one */
  tell_release(f, 0, g->number, g->released = g->bytes);
  while (take_forward(f, 0, 1)) continue;
  assert_int_equal(g->forwarded, 3 * CHUNK + CHUNK + 4);
  assert_false(take_forward(f, 1, 0));
  send_upto(f, g, 0, g->bytes);
  while (take_forward(f, 0, 1)) continue;
  assert_int_equal(g->forwarded, g->bytes);
  tell_release(f, 0, g->number, g->bytes); /* repeated */
  tell_end(f, 0, g->number);
  free_group(g);
  g = plain_group(f, 1, 1, -1.0);
  tell_release(f, 0, g->number, g->released = g->bytes);
  send_upto(f, g, 0, g->bytes - 4);
  assert_false(take_forward(f, 0, 0));
  send_upto(f, g, 0, g->bytes);
  assert_true(take_forward(f, 0, 0));
  assert_int_equal(f->up_drops, 0);
}

/* A group that starts while bulks of the last one are lent grants nothing until they are returned. */
static void test_reuse_while_lent(void **state) {
  fixture *f = *state;
  f->config.chunk_bytes = BIG; /* so that bulks are lent */
  lose(f, 0);
  group *other = plain_group(f, 1, 0, -1.0); /* gets the second accumulator */
  other->guilty = 1;
  meet(f, 0, 1);
  group *g = plain_group(f, 1, 0, -1.0);
  tell_release(f, 0, g->number, g->released = g->bytes);
  send_upto(f, other, 0, other->bytes);
  send_upto(f, g, 0, g->bytes);
  while (take_forward(f, 0, 1)) continue;
  assert_int_equal(f->nlent, 1);
  tell_end(f, 0, g->number);
  free_group(g);
  g = plain_group(f, 1, 0, -1.0);
  assert_int_equal(g->granted[0], 0);
  assert_int_equal(mlfab__aggregator_deadline(&f->aggregator), f->now + 3 * BEAT);
  give_back(f, 0);
  assert_int_equal(g->granted[0], g->bytes);
  tell_release(f, 0, g->number, g->released = g->bytes);
  send_upto(f, g, 0, g->bytes);
  while (take_forward(f, 0, 1)) continue;
  tell_end(f, 0, g->number);
  free_group(g);
  /* They are not returned: the group fails with an error. */
  g = plain_group(f, 1, 0, -1.0);
  f->now += 3 * BEAT;
  mlfab__aggregator_tick(&f->aggregator, f->now);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.worker, MLFAB__NO_NODE);
  assert_int_equal(f->fail.code, MLFAB_ERR_AGAIN);
  assert_int_equal(f->fail.group, g->number);
  /* Losing the link returns all of them. */
  give_all_back(f, 1, 0);
  mlfab__aggregator_server_lost(&f->aggregator, 0);
  assert_int_equal(busy(f), 0);
  free_group(g);
  g = plain_group(f, 1, 0, -1.0);
  assert_int_equal(g->granted[0], g->bytes);
}

static void test_no_room(void **state) {
  fixture *f = *state;
  plain_group(f, 1, 0, -1.0);
  plain_group(f, 1, 0, -1.0);
  group *g = plain_group(f, 1, 0, -1.0);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->fail.worker, MLFAB__NO_NODE);
  assert_int_equal(f->fail.group, g->number);
  assert_int_equal(f->fail.code, MLFAB_ERR_AGAIN);
  spread s;
  make_spread(f, &s, 0, 1);
  tell_spread(f, &s);
  assert_int_equal(f->spread_fails, 1);
  assert_int_equal(f->spread_fail.worker, MLFAB__NO_NODE);
  assert_int_equal(f->spread_fail.code, MLFAB_ERR_AGAIN);
  tell_model(f, &s, CHUNK); /* already on its way */
  assert_int_equal(f->up_drops, 0);
  free_spread(&s);
}

/* Without accumulators, and before the model is defined, every request is refused with a text. */
static void test_refusals(void **state) {
  fixture *f = *state;
  mlfab__port none = f->aggregator.up;
  mlfab__port down = f->aggregator.down;
  for (int round = 0; round < 2; round++) {
    mlfab__aggregator_free(&f->aggregator);
    f->config.accumulators = round ? 1 : UINT32_MAX;
    assert_int_equal(
        mlfab__aggregator_init(&f->aggregator, &f->env, &f->config, &none, &down, &f->stats), 0);
    if (round == 0) mlfab__aggregator_model(&f->aggregator, &f->layout, 0);
    f->fails = f->spread_fails = 0;
    plain_group(f, 1, 0, -1.0);
    assert_int_equal(f->fails, 1);
    assert_int_equal(f->fail.code, MLFAB_ERR_AGAIN);
    spread s;
    make_spread(f, &s, 0, 1);
    tell_spread(f, &s);
    assert_int_equal(f->spread_fails, 1);
    free_spread(&s);
    assert_int_equal(mlfab__aggregator_deadline(&f->aggregator), MLFAB__NEVER);
  }
}

/* The model is redefined: groups and spreads in progress end. */
static void test_model_again(void **state) {
  fixture *f = *state;
  spread s;
  plain_group(f, 1, 0, -1.0);
  make_spread(f, &s, 0, 1);
  tell_spread(f, &s);
  mlfab__aggregator_model(&f->aggregator, &f->layout, 0);
  assert_int_equal(f->fails, 1);
  assert_int_equal(f->spread_fails, 1);
  free_spread(&s);
}

static void test_server_lost(void **state) {
  fixture *f = *state;
  spread s;
  group *g = plain_group(f, 1, 0, -1.0);
  make_spread(f, &s, 0, 1);
  tell_spread(f, &s);
  send_upto(f, g, 0, CHUNK);
  mlfab__aggregator_server_lost(&f->aggregator, 1);
  assert_int_equal(busy(f), 2);
  mlfab__aggregator_server_lost(&f->aggregator, 0);
  assert_int_equal(busy(f), 0);
  assert_int_equal(f->fails + f->spread_fails, 0);
  /* it does not know yet */
  say_chunk(f, 0, 0, g->number, g->seq[0], g->sent[0], g->data[0], CHUNK);
  assert_int_equal(f->down_drops, 0);
  f->number = 0; /* a server may restart its numbers on a new link */
  free_group(g);
  g = plain_group(f, 1, 0, -1.0);
  assert_int_equal(g->number, 1);
  assert_int_equal(g->granted[0], g->bytes);
  free_spread(&s);
}

/* The distributor's server finds one member silent: the spread gives that member up and serves the others. */
static void test_silent_recipient(void **state) {
  fixture *f = *state;
  spread s;
  make_spread(f, &s, 0, 3);
  s.whole = 0;
  tell_spread(f, &s);
  while (!s.last_sent) tell_model(f, &s, CHUNK);
  for (int beat = 0; beat < 4; beat++) {
    f->now += BEAT;
    take_model(f, &s, 1);
    mlfab__aggregator_tick(&f->aggregator, f->now);
  }
  assert_int_equal(f->spread_fails, 1);
  assert_int_equal(f->spread_fail.member_request, 100);
  assert_int_equal(f->spread_fail.worker, 0);
  assert_int_equal(f->spread_fail.code, MLFAB_ERR_PEER_DEAD);
  assert_false(take_model(f, &s, 0));
  while (take_model(f, &s, 1) || take_model(f, &s, 2)) continue;
  assert_true(s.done[1] && s.done[2]);
  assert_int_equal(busy(f), 0);
  assert_int_equal(f->stats.members_served, 2);
  free_spread(&s);
}

/* A SPREAD without members, or a truncated one, ends the link to the server. */
static void test_spread_refused(void **state) {
  fixture *f = *state;
  mlfab__spread m = {MLFAB__SPREAD_BIT | 1, 64, 7, 0, 0};
  mlfab__spread_member member = {.request = 100, .worker = 0, .incarnation = 1, .attempt = 1};
  tell(f, 0, MLFAB__SPREAD, manifest, mlfab__encode_spread(manifest, &m, &member), NULL, 0);
  assert_int_equal(f->up_drops, 1);
  m.members = 1;
  tell(f, 0, MLFAB__SPREAD, manifest, mlfab__encode_spread(manifest, &m, &member) - 1, NULL, 0);
  assert_int_equal(f->up_drops, 2);
  assert_int_equal(busy(f), 0);
}

/* A server that is slow, or has not decided anything yet, is not a member's fault. */
static void test_idle_recipient(void **state) {
  fixture *f = *state;
  spread s;
  make_spread(f, &s, 0, 1);
  s.whole = 0;
  tell_spread(f, &s);
  for (int beat = 0; beat < 20; beat++) {
    assert_true(mlfab__aggregator_deadline(&f->aggregator) <= f->now + BEAT);
    f->now += BEAT;
    mlfab__aggregator_tick(&f->aggregator, f->now);
    if (beat == 10) tell_model(f, &s, CHUNK);
    if (beat == 10) take_model(f, &s, 0);
  }
  assert_int_equal(f->spread_fails, 0);
  mlfab__pull_fail fail;
  uint8_t meta[512];
  memset(&fail, 0, sizeof fail);
  fail.request = s.request;
  fail.code = MLFAB_ERR_CALLBACK;
  uint32_t n = mlfab__encode_pull_fail(meta, &fail);
  assert_int_equal(tell(f, 0, MLFAB__PULL_FAIL, meta, n, NULL, 0), 1);
  assert_int_equal(busy(f), 0);
  fail.request = 5; /* the worker's own request */
  n = mlfab__encode_pull_fail(meta, &fail);
  assert_int_equal(tell(f, 0, MLFAB__PULL_FAIL, meta, n, NULL, 0), 0);
  free_spread(&s);
}

/* A member whose link breaks after its last frame was sent may not have received it. */
static void test_done_and_lost(void **state) {
  fixture *f = *state;
  spread s;
  make_spread(f, &s, 0, 2);
  s.whole = 0;
  tell_spread(f, &s);
  while (!s.last_sent) tell_model(f, &s, CHUNK);
  while (take_model(f, &s, 0)) continue;
  assert_true(s.done[0]);
  lose(f, 0);
  assert_int_equal(f->spread_fails, 1);
  assert_int_equal(f->spread_fail.member_request, 100);
  lose(f, 0);
  assert_int_equal(f->spread_fails, 1);
  meet(f, 1, 2); /* now another process */
  assert_int_equal(f->spread_fails, 2);
  assert_int_equal(f->spread_fail.member_request, 101);
  assert_int_equal(busy(f), 0);
  free_spread(&s);
}

/* --- protocol violations --- */

static void test_bad_chunks(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 2, 0, -1.0);
  uint8_t *data = g->data[0], meta[64] = {0};
  uint32_t drops = 0;
  mlfab__frame_in in = {MLFAB__HOP_CHUNK, 5, CHUNK, meta, data};
#define BAD(...)                              \
  do {                                        \
    say_chunk(f, __VA_ARGS__);                \
    assert_int_equal(f->down_drops, ++drops); \
  } while (0)
  mlfab__aggregator_member_frame(&f->aggregator, 0, &in, f->now); /* does not parse */
  assert_int_equal(f->down_drops, ++drops);
  in.type = MLFAB__CHUNK;
  mlfab__aggregator_member_frame(&f->aggregator, 0, &in, f->now);
  assert_int_equal(f->down_drops, ++drops);
  BAD(0, SERVERS, g->number, g->seq[0], 0, data, CHUNK);        /* no such server */
  BAD(0, 0, g->number + 1, g->seq[0], 0, data, CHUNK);          /* a group that never existed */
  BAD(0, 1, g->number, g->seq[0], 0, data, CHUNK);              /* another server's */
  BAD(0, 0, g->number, g->seq[1], 0, data, CHUNK);              /* another member's update */
  BAD(2, 0, g->number, g->seq[0], 0, data, CHUNK);              /* not a member of the group */
  BAD(0, 0, g->number, g->seq[0], 4, data, CHUNK);              /* wrong offset */
  BAD(0, 0, g->number, g->seq[0], UINT64_MAX - 3, data, CHUNK); /* wrong offset */
  BAD(1, 0, g->number, g->seq[1], 0, data, CHUNK);              /* not granted */
  BAD(0, 0, g->number, g->seq[0], 0, data, (uint32_t)g->bytes + 4);
  BAD(0, 0, g->number, g->seq[0], 0, NULL, CHUNK); /* no bytes (ghost) */
  BAD(0, 0, g->number, g->seq[0], 0, data, 0);
  BAD(0, 0, g->number, g->seq[0], 0, data, 6); /* cuts an element */
  send_upto(f, g, 0, CHUNK);
  BAD(0, 0, g->number, g->seq[0], 0, data, CHUNK); /* repeated */
#undef BAD
  assert_int_equal(f->fails, 0);
  send_upto(f, g, 0, g->bytes); /* nothing of it was accepted */
  send_upto(f, g, 1, g->bytes);
  tell_release(f, 0, g->number, g->released = g->bytes);
  while (take_forward(f, 0, 1)) continue;
  for (uint64_t i = 0; i < g->bytes; i += 4) {
    float sum;
    memcpy(&sum, g->sum + i, 4);
    assert_true(sum == 2.0f);
  }
  say_chunk(f, 1, 0, g->number, g->seq[1], g->bytes, data, CHUNK); /* beyond the end */
  assert_int_equal(f->down_drops, ++drops);
}

static void bad_group(fixture *f, const mlfab__group *m, const mlfab__group_member *members,
                      const mlfab__segment *segments) {
  uint32_t drops = f->up_drops;
  uint32_t bytes = mlfab__encode_group(manifest, m, members, segments);
  assert_int_equal(tell(f, 0, MLFAB__GROUP, manifest, bytes, NULL, 0), 1);
  assert_int_equal(f->up_drops, drops + 1);
}

static void test_bad_manifests(void **state) {
  fixture *f = *state;
  mlfab__group_member members[2] = {{1, 1.0, 0, 1}, {1, 1.0, 1, 1}};
  mlfab__segment segments[2] = {{0, 64}, {128, 64}};
  mlfab__group m = {7, 128, -1.0, 0, 0, 2, 2};
  uint32_t bytes = mlfab__encode_group(manifest, &m, members, segments);
  tell(f, 0, MLFAB__GROUP, manifest, bytes, NULL, 0);
  assert_int_equal(f->up_drops + f->fails, 0);
  bad_group(f, &m, members, segments); /* its number was used already */
  m.group = 6;
  bad_group(f, &m, members, segments); /* or decreases */
  m.group = 8;
  m.packed = 2;
  bad_group(f, &m, members, segments);
  m.packed = 0;
  members[1].worker = WORKERS;
  bad_group(f, &m, members, segments);
  members[1].worker = 0; /* the same update twice */
  bad_group(f, &m, members, segments);
  for (uint32_t cut = 0; cut < bytes; cut += 3) {
    uint32_t drops = f->up_drops;
    assert_int_equal(tell(f, 0, MLFAB__GROUP, manifest, cut, NULL, 0), 1);
    assert_int_equal(f->up_drops, drops + 1);
    assert_int_equal(tell(f, 0, MLFAB__SPREAD, manifest, cut, NULL, 0), 1);
    assert_int_equal(f->up_drops, drops + 2);
  }
  /* Segments outside the server's shard, or that cut an element, are refused with a text. */
  static const mlfab__segment wrong[] = {{1 << 20, 64}, {0, 1 << 20}, {2, 64}, {0, 63}};
  members[1].worker = 1;
  for (size_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    m = (mlfab__group){9 + i, wrong[i].bytes, -1.0, 0, 0, 2, 1};
    bytes = mlfab__encode_group(manifest, &m, members, &wrong[i]);
    uint32_t drops = f->up_drops, fails = f->fails;
    tell(f, 0, MLFAB__GROUP, manifest, bytes, NULL, 0);
    assert_int_equal(f->up_drops, drops);
    assert_int_equal(f->fails, fails + 1);
    assert_int_equal(f->fail.code, MLFAB_ERR_ARGUMENT);
    assert_int_equal(f->fail.worker, MLFAB__NO_NODE);
  }
}

static void test_bad_words_of_servers(void **state) {
  fixture *f = *state;
  group *g = plain_group(f, 1, 0, -1.0);
  uint8_t meta[64] = {0};
  tell_release(f, 0, 99, 1); /* for an unknown group: it has ended */
  tell_end(f, 0, 99);
  assert_int_equal(f->up_drops, 0);
  tell_release(f, 0, g->number, g->bytes + 4);
  assert_int_equal(f->up_drops, 1);
  tell_release(f, 0, g->number, 6);
  assert_int_equal(f->up_drops, 2);
  tell(f, 0, MLFAB__RELEASE, meta, 15, NULL, 0);
  assert_int_equal(f->up_drops, 3);
  tell(f, 0, MLFAB__GROUP_END, meta, 9, NULL, 0);
  assert_int_equal(f->up_drops, 4);
  assert_int_equal(tell(f, 0, MLFAB__GRANT, meta, 20, NULL, 0), 0);
  assert_int_equal(tell(f, 0, MLFAB__MODEL, meta, 5, NULL, 0), 0);
  assert_int_equal(tell(f, 0, MLFAB__PULL_FAIL, meta, 5, NULL, 0), 0);
  mlfab__model own = {5, 0, 8, 0, 0, 0, 0, 0};
  assert_int_equal(tell(f, 0, MLFAB__MODEL, meta, mlfab__encode_model(meta, &own), meta, 8), 0);
}

static void bad_model(fixture *f, spread *s, uint64_t offset, uint32_t slice, uint32_t flags,
                      const void *bulk, uint32_t bytes) {
  uint8_t meta[64];
  uint32_t drops = f->up_drops;
  mlfab__model m = {s->request, offset, bytes, 1, 1, slice, flags, 1};
  assert_int_equal(tell(f, 0, MLFAB__MODEL, meta, mlfab__encode_model(meta, &m), bulk, bytes), 1);
  assert_int_equal(f->up_drops, drops + 1);
}

static void test_bad_spreads(void **state) {
  static uint8_t bulk[1 << 16];
  fixture *f = *state;
  spread s;
  make_spread(f, &s, 0, 1);
  uint64_t bytes = s.bytes;
  s.request &= ~MLFAB__SPREAD_BIT;
  tell_spread(f, &s);
  assert_int_equal(f->up_drops, 1);
  s.request |= MLFAB__SPREAD_BIT;
  s.worker[0] = WORKERS;
  tell_spread(f, &s);
  assert_int_equal(f->up_drops, 2);
  s.worker[0] = 0;
  s.bytes = 1 << 20; /* more than a shard */
  tell_spread(f, &s);
  assert_int_equal(f->spread_fails, 1);
  assert_int_equal(f->spread_fail.code, MLFAB_ERR_ARGUMENT);
  s.bytes = bytes;
  tell_spread(f, &s);
  assert_int_equal(busy(f), 1);
  tell_spread(f, &s);
  assert_int_equal(f->up_drops, 3);                       /* repeated */
  bad_model(f, &s, 0, 0, 0, NULL, CHUNK);                 /* no bytes (ghosts) */
  bad_model(f, &s, 0, 0, 0, bulk, 0);                     /* empty, but not the last */
  bad_model(f, &s, 0, 0, 0, bulk, (uint32_t)bytes + 1);   /* too many bytes */
  bad_model(f, &s, 0, 0, MLFAB__MODEL_LAST, bulk, CHUNK); /* too few bytes */
  mlfab__model m = {s.request, 0, CHUNK, 1, 1, 0, 0, 1};
  uint8_t meta[64];
  uint32_t n = mlfab__encode_model(meta, &m);
  tell(f, 0, MLFAB__MODEL, meta, n, bulk, CHUNK - 4); /* another length than the meta says */
  assert_int_equal(f->up_drops, 8);
  m.flags = MLFAB__MODEL_PACKED;
  m.bytes = bytes + 4; /* too many bytes */
  n = mlfab__encode_model(meta, &m);
  tell(f, 0, MLFAB__MODEL, meta, n, bulk, CHUNK);
  assert_int_equal(f->up_drops, 9);
  while (!s.last_sent) tell_model(f, &s, CHUNK);
  bad_model(f, &s, 0, 0, MLFAB__MODEL_LAST, bulk, 0); /* after the last one */
  free_spread(&s);
}

/* --- memory --- */

/* A group of two, with a ring, and a spread of two; each allocation fails once. The failure is reported,
 * nothing leaks, and the next attempt works. */
static uint32_t short_of_memory(uint64_t fail_at) {
  fixture *f = calloc(1, sizeof *f);
  spread s;
  uint32_t said;
  assert_non_null(f);
  open_role(f, 1, mixed, MLFAB__COUNT(mixed), 0);
  meet_all(f);
  f->calls = 0;
  f->fail_at = fail_at;
  for (int round = 0; round < 3; round++) {
    if (f->connected[0]) lose(f, 0); /* so that worker 1 needs a ring */
    group *g = plain_group(f, 2, 0, -1.0);
    free(g->dtype);
    g->dtype = NULL;
    if (!g->failed) {
      if (g->granted[1] == 0) assert_int_equal(round, 0); /* no ring: not granted */
      while (g->sent[1] < g->granted[1]) send_upto(f, g, 1, g->sent[1] + 8);
      meet(f, 0, 1);
      send_upto(f, g, 0, g->bytes);
      send_upto(f, g, 1, g->bytes);
      tell_release(f, 0, g->number, g->released = g->bytes);
      while (take_forward(f, 0, 1)) continue;
      assert_int_equal(g->forwarded, g->bytes);
    } else {
      assert_int_equal(f->fail.code, MLFAB_ERR_AGAIN);
      assert_int_equal(round, 0);
      meet(f, 0, 1);
    }
    tell_end(f, 0, g->number);
    free_group(g);
    make_spread(f, &s, 0, 2);
    s.whole = 0;
    tell_spread(f, &s);
    while (!s.last_sent) tell_model(f, &s, 64);
    while (take_model(f, &s, 0) || take_model(f, &s, 1)) continue;
    if (f->spread_fail.worker == MLFAB__NO_NODE && f->spread_fails == 1 && round == 0) {
      assert_int_equal(f->spread_fail.code, MLFAB_ERR_AGAIN);
    } else {
      check_models(f, &s);
      assert_true(s.done[0] && s.done[1]);
    }
    assert_int_equal(busy(f), 0);
    free_spread(&s);
  }
  said = f->fails + f->spread_fails;
  assert_true(said <= 1);
  uint32_t fired = f->calls >= fail_at;
  close_role(f);
  free(f);
  return fired;
}

static void test_out_of_memory(void **state) {
  uint64_t k = 1;
  (void)state;
  while (short_of_memory(k)) k++;
  assert_true(k > 6);
  for (uint64_t at = 1; at < 10; at++) { /* allocations of the opening */
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    open_role(f, 1, plain, 1, 0);
    mlfab__port up = f->aggregator.up, down = f->aggregator.down;
    mlfab__aggregator_free(&f->aggregator);
    f->calls = 0;
    f->fail_at = at;
    int code = mlfab__aggregator_init(&f->aggregator, &f->env, &f->config, &up, &down, &f->stats);
    assert_int_equal(code, at <= 4 ? MLFAB_ERR_MEMORY : 0);
    mlfab__aggregator_free(&f->aggregator);
    mlfab__aggregator_free(&f->aggregator);
    close_role(f);
    free(f);
  }
}

int main(void) {
#define PLAIN(test) cmocka_unit_test_setup_teardown(test, open_plain, close_plain)
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_sums),
      cmocka_unit_test(test_sums_with_failures),
      cmocka_unit_test(test_spreads),
      cmocka_unit_test(test_spreads_with_losses),
      PLAIN(test_grant_order),
      PLAIN(test_idle_link),
      PLAIN(test_busy_link),
      PLAIN(test_absent_member),
      PLAIN(test_silent_member),
      PLAIN(test_member_lost),
      PLAIN(test_granted_after_a_loss),
      PLAIN(test_other_incarnation),
      PLAIN(test_not_finite),
      PLAIN(test_release),
      PLAIN(test_reuse_while_lent),
      PLAIN(test_no_room),
      PLAIN(test_refusals),
      PLAIN(test_model_again),
      PLAIN(test_server_lost),
      PLAIN(test_silent_recipient),
      PLAIN(test_spread_refused),
      PLAIN(test_idle_recipient),
      PLAIN(test_done_and_lost),
      PLAIN(test_bad_chunks),
      PLAIN(test_bad_manifests),
      PLAIN(test_bad_words_of_servers),
      PLAIN(test_bad_spreads),
      cmocka_unit_test(test_out_of_memory),
  };
#undef PLAIN
  return cmocka_run_group_tests(tests, NULL, NULL);
}
