/* test_aggregator.c - a worker's node as aggregator and distributor: the test plays the servers and the other workers.
 *
 * Oracles: a literal serial sum, member after member, of groups whose frames interleave at random, dense or as packets; a
 * model whose bytes encode offset and version, which members write as frames arrive. A bulk that is lent is compared
 * with its contents at the time when it was lent, until it comes back. MLFAB_SEED=n runs one random case alone. */
#include "core/base/env.h"
#define SCENE_ENDS stop()
#include "tests/seam/updates.h"
#include "tests/seam/working.h"
#include "tests/unit/changing.h"

enum { WORKERS = 7, MEMBERS = 6, SERVERS = 2, GROUPS = 4, SLICES = 6 };
enum { CHUNK = 2048, BIG = 16384 }; /* the latter is lent and not copied */
enum { RING = 4 << 20, RINGS = 2 };
#define BEAT 1000000ull

static const mlfab__tensor_info mixed[] = {{0, MLFAB_F64, 1700}, {1, MLFAB_F32, 3500},
                                           {2, MLFAB_I64, 833},  {3, MLFAB_F32, 77},
                                           {4, MLFAB_F64, 50},   {5, MLFAB_F32, 1901}};
static const mlfab__tensor_info plain[] = {{0, MLFAB_F32, 16384}};
static const mlfab__tensor_info wide_rings[] = {{0, MLFAB_F32, 2600000}};
static const mlfab__tensor_info large[] = {{0, MLFAB_F32, 5000000}, {1, MLFAB_F32, 900000}};

/* All that a server and its members know of a group. */
typedef struct group {
  int used, failed, packed, whole;
  uint32_t server, n;
  uint64_t number, released, forwarded, total;
  shape shape;
  uint32_t worker[MEMBERS];
  uint64_t seq[MEMBERS], granted[MEMBERS], sent[MEMBERS];
  double weight[MEMBERS];
  update update[MEMBERS];
  uint8_t *expected, *stream;
  uint32_t guilty, bad; /* bit k: member k may be blamed; its update is not finite */
} group;

/* All that they know of a spread. */
typedef struct spread {
  uint64_t request, bytes, begin, at, slice_at; /* of the model; where the server is; its slice */
  uint64_t version;                             /* of the slice that is being sent */
  uint64_t versions[SLICES + 1];                /* as sent last */
  uint32_t server, n;
  uint32_t worker[MEMBERS], attempt[MEMBERS];
  int begun[MEMBERS], done[MEMBERS], failed[MEMBERS], all_failed, whole, last_sent;
  uint8_t *model[MEMBERS];
} spread;

static struct fixture {
  mlfab__env env; /* of the layout */
  mlfab__layout layout;
  mlfab__rng prng;
  int ghost;
  uint64_t number, seq, stage,
      ring; /* how far a dense member, and one with packets, may be ahead */
  group groups[GROUPS];
  uint32_t fails, spread_fails, grants, finished, alive;
  mlfab__group_fail fail;
  mlfab__spread_fail spread_fail;
  spread *spread; /* the current one */
} f;
static seam w;

static uint64_t below(uint64_t n) { return mlfab__rng_below(&f.prng, n); }
static seam_peer *peer(uint32_t p) { return &w.peers[p]; }
static uint32_t at_server(uint32_t s) { return WORKERS + s; }

/* --- what the node says --- */

static group *group_of(uint32_t server, uint64_t number) {
  for (uint32_t i = 0; i < GROUPS; i++) {
    group *g = &f.groups[i];
    if (g->used && g->server == server && g->number == number) return g;
  }
  return NULL;
}

/* How much of members 0 .. k is added. */
static uint64_t added(const group *g, uint32_t k) {
  uint64_t least = g->shape.bytes;
  for (uint32_t i = 0; i <= k; i++) least = mlfab__min(least, g->sent[i]);
  return least;
}

/* The number of members, from the first on, whose bytes have all arrived. */
static uint32_t whole_members(const group *g) {
  uint32_t k = 0;
  while (k < g->n && g->sent[k] == g->update[k].bytes) k++;
  return k;
}

static void check_grant(const group *g, uint32_t k, uint64_t upto) {
  uint32_t whole = whole_members(g), early = 0;
  assert_true(upto > g->granted[k] && k >= whole);
  for (uint32_t i = whole + 1; i <= k; i++) early += g->granted[i] > 0;
  if (!g->packed) {
    assert_true(upto <= g->shape.bytes);
    if (k > whole) assert_true(upto <= added(g, k - 1) + f.stage);
  } else {
    assert_true(g->granted[k] < g->update[k].bytes || !g->sent[k]);
    /* Early: it may send a ring's worth. */
    assert_true(upto == (k > whole ? f.ring : UINT64_MAX));
  }
  if (k > whole && g->granted[k] == 0) assert_true(early < RINGS);
}

static void on_grant(uint32_t member, const mlfab__hop_grant *grant) {
  group *g = group_of(grant->server, grant->group);
  f.grants++;
  if (!g) return;
  assert_false(g->failed);
  for (uint32_t k = 0; k < g->n; k++) {
    if (g->worker[k] != member || g->seq[k] != grant->seq) continue;
    check_grant(g, k, grant->upto);
    g->granted[k] = grant->upto;
    return;
  }
  fail_msg("a grant for nobody");
}

static void on_fail(uint32_t server, const mlfab__group_fail *fail) {
  group *g = group_of(server, fail->group);
  f.fail = *fail;
  f.fails++;
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

static void on_forward(uint32_t server, const mlfab__forward *forward, const seam_heard *heard) {
  group *g = group_of(server, forward->group);
  uint32_t bytes = heard->bulk_bytes, packets = 0;
  assert_true(g && !g->failed);
  assert_int_equal(forward->offset, g->forwarded);
  assert_true(g->total == 0 || forward->total == g->total);
  g->total = forward->total;
  f.alive += bytes == 0;
  if (bytes == 0) return; /* a report of progress, with the offset of the next bytes */
  assert_true(g->total > 0 && g->forwarded + bytes <= g->released);
  assert_true(g->forwarded + bytes <= g->total);
  if (g->packed || g->whole) assert_int_equal(whole_members(g), g->n);
  if (g->packed) {
    for (uint32_t at = 0; at < bytes; packets++) {
      mlfab__packet packet;
      uint32_t n = mlfab__packet_open(heard->bulk + at, bytes - at, &packet);
      assert_true(n > 0); /* packets are whole */
      at += n;
    }
    assert_true(packets == 1 || bytes <= w.config.chunk_bytes);
  } else {
    assert_int_equal(g->total, g->shape.bytes);
    assert_true(g->forwarded + bytes <= added(g, g->n - 1));
    assert_true(bytes <= w.config.chunk_bytes);
  }
  if (!g->stream) g->stream = malloc(g->total);
  if (f.ghost)
    assert_null(heard->bulk);
  else
    memcpy(g->stream + g->forwarded, heard->bulk, bytes);
  g->forwarded += bytes;
}

static void on_spread_fail(const mlfab__spread_fail *fail) {
  spread *s = f.spread;
  f.spread_fail = *fail;
  f.spread_fails++;
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

static void on_model(uint32_t worker, const mlfab__hop_model *m, const seam_heard *heard);

static void hear(seam *of, const seam_heard *heard) {
  (void)of;
  uint32_t type = heard->type, server = heard->peer - WORKERS;
#define ON(...) ON_FRAME(type, heard->meta, heard->meta_bytes, __VA_ARGS__)
  ON(HOP_GRANT, hop_grant, on_grant(heard->peer, m));
  ON(GROUP_FAIL, group_fail, on_fail(server, m));
  ON(FORWARD, forward, on_forward(server, m, heard));
  ON(SPREAD_FAIL, spread_fail, on_spread_fail(m));
  ON(HOP_MODEL, hop_model, on_model(heard->peer, m, heard));
  static const uint8_t types[] = {MLFAB__HOP_GRANT,   MLFAB__GROUP_FAIL, MLFAB__FORWARD,
                                  MLFAB__SPREAD_FAIL, MLFAB__HOP_MODEL,  MLFAB__HEARTBEAT,
                                  MLFAB__HELLO,       MLFAB__DEFINE,     MLFAB__STOP};
  assert_non_null(memchr(types, (int)type, sizeof types));
}

/* --- begin and end --- */

static void measure(void) {
  uint64_t slice = 0, shard = 0, packet = 0;
  for (uint32_t s = 0; s < SERVERS; s++)
    shard = mlfab__max(shard, mlfab__layout_shard_bytes(&f.layout, s));
  for (uint32_t i = 0; i < f.layout.nslices; i++)
    slice = mlfab__max(slice, f.layout.slices[i].bytes);
  for (uint32_t i = 0; i < f.layout.ntensors; i++) {
    int dtype = (int)f.layout.tensors[i].dtype;
    uint64_t n = mlfab__min(slice / mlfab__dtype_bytes(dtype), MLFAB__PACKET_ELEMENTS);
    packet = mlfab__max(packet, mlfab__packet_bound((uint32_t)n, dtype));
  }
  f.stage = (mlfab__min(shard, RING) + 63) / 64 * 64;
  f.ring = f.stage + packet;
}

static void stop(void);

static void make(uint64_t seed) {
  stop();
  memset(&f, 0, sizeof f);
  mlfab__rng_seed(&f.prng, seed);
  work_init(&w, WORKERS, SERVERS);
  w.config.chunk_bytes = CHUNK;
  w.config.heartbeat_ns = BEAT;
  w.hear = hear;
}

static void start(const mlfab__tensor_info *tensors, uint32_t n, int meet) {
  mlfab_model_options options;
  mlfab_model_options_init(&options);
  options.slices = 16;
  options.ghost = (uint32_t)f.ghost;
  work_open(&w);
  work_model(&w, tensors, n, &options);
  assert_int_equal(mlfab__env_init(&f.env, NULL), 0);
  assert_int_equal(
      mlfab__layout_build(&f.env, tensors, n, 16, SERVERS, 0, 1 << 28, &f.layout, NULL), 0);
  measure();
  w.now += 333; /* between the times at which a node looks at its links */
  for (uint32_t m = 0; m < MEMBERS && meet; m++) work_meet(&w, m, 1);
}
#define START(tensors, meet) start(tensors, MLFAB__COUNT(tensors), meet)

static void free_group(group *g) {
  for (uint32_t k = 0; k < g->n; k++) free_update(&g->update[k]);
  free(g->expected);
  free(g->stream);
  memset(g, 0, sizeof *g);
}

static void stop(void) {
  if (!w.node) return;
  for (uint32_t i = 0; i < GROUPS; i++) free_group(&f.groups[i]);
  seam_close(&w);
  if (f.layout.slices) mlfab__layout_free(&f.env, &f.layout);
}

/* --- what servers and members say --- */

static void tell_group(const group *g, double rate) {
  mlfab__group_member members[MEMBERS];
  mlfab__group m = {g->number,           g->shape.bytes, rate,      (uint32_t)g->whole,
                    (uint32_t)g->packed, g->n,           g->shape.n};
  for (uint32_t k = 0; k < g->n; k++)
    members[k] = (mlfab__group_member){g->seq[k], g->weight[k], g->worker[k], 1};
  seam_say(&w, at_server(g->server), MLFAB__GROUP,
           mlfab__encode_group(w.meta, &m, members, g->shape.segments));
}

static void tell_release(group *g, uint64_t upto) {
  g->released = mlfab__max(g->released, upto);
  SAY(&w, at_server(g->server), RELEASE, release, g->number, upto);
}

static void end_group(group *g) {
  uint32_t server = g->server;
  uint64_t number = g->number;
  free_group(g);
  SAY(&w, at_server(server), GROUP_END, group_end, number);
}

/* The bulk is borrowed for the call only. */
static void say_chunk(const group *g, uint32_t k, uint64_t offset, uint64_t total, const void *from,
                      uint32_t bytes) {
  uint8_t *bulk = bytes && from && !f.ghost ? malloc(bytes) : NULL;
  if (bulk) memcpy(bulk, from, bytes);
  SAY_BULK(&w, g->worker[k], HOP_CHUNK, hop_chunk, bulk, bytes, g->number, g->seq[k], offset, total,
           g->server);
  free(bulk);
}

/* Sends a frame of member k within its grant: at most so many bytes, or whole packets; returns 0 when there is none. */
static int send_some(group *g, uint32_t k, uint64_t most) {
  const update *u = &g->update[k];
  uint64_t at = g->sent[k], end = at, granted = mlfab__min(g->granted[k], u->bytes), offset;
  uint32_t elements;
  if (peer(g->worker[k])->link == 0) return 0;
  if (!g->packed) {
    end = mlfab__min(granted, at + mlfab__min(most, w.config.chunk_bytes));
    if (end <= at) return 0;
    if (end < u->bytes &&
        mlfab__dtype_bytes(piece_at(&f.layout, &g->shape, end, &offset, &elements)) == 8)
      end -= end % 8;
    if (end <= at) end = at + 8;
  } else {
    while (end < granted) {
      uint32_t n = packet_bytes(u, end);
      if (n > granted - end) break;
      if (end > at && (end + n - at > w.config.chunk_bytes || end + n - at > most)) break;
      end += n;
    }
    if (end == at) return 0;
  }
  if (!g->failed) g->sent[k] = end; /* updated first, because the answer depends on it */
  say_chunk(g, k, at, u->bytes, u->data + at, (uint32_t)(end - at));
  return 1;
}

/* Sends all bytes of member k up to `upto`, as far as they are granted. */
static void send_upto(group *g, uint32_t k, uint64_t upto) {
  while (g->sent[k] < upto && send_some(g, k, upto - g->sent[k])) continue;
}
static void send_all(group *g, uint32_t k) { send_upto(g, k, UINT64_MAX); }

static int take(uint32_t server) { return (int)work_take(&w, at_server(server), 1); }
static void take_all(uint32_t server) { (void)work_take(&w, at_server(server), SEAM_ALL); }

static void give_all_back(void) {
  while (w.nlent > 0) work_give_back(&w, 0, 0);
}

/* --- sums --- */

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

/* The forwarded bytes are the sum, bit by bit, or in packets as large as possible. */
static void check_sum(group *g) {
  uint64_t next = 0;
  if (f.ghost) return;
  if (!g->packed) {
    assert_memory_equal(g->stream, g->expected, g->shape.bytes);
    return;
  }
  uint8_t *sum = calloc(1, g->shape.bytes);
  assert_non_null(sum);
  for (uint64_t at = 0, n; at < g->total; at += n) {
    mlfab__packet packet;
    n = mlfab__packet_open(g->stream + at, g->total - at, &packet);
    assert_true(n > 0 && packet.offset >= next);
    uint64_t place = place_of(&g->shape, packet.offset), offset;
    uint32_t elements;
    assert_int_equal(packet.dtype, piece_at(&f.layout, &g->shape, place, &offset, &elements));
    assert_true(packet.elements <= elements);
    next = packet.offset + (uint64_t)packet.elements * mlfab__dtype_bytes(packet.dtype);
    mlfab__unpack_dense(&packet, sum + place);
    if (g->total > 32) check_form(&packet, sum + place);
  }
  assert_true(same_values(&f.layout, &g->shape, sum, g->expected));
  free(sum);
}

static int complete(const group *g) {
  return !g->failed && g->total > 0 && g->forwarded == g->total;
}

static void finish_group(group *g) {
  if (complete(g)) {
    assert_int_equal(g->bad, 0);
    check_sum(g);
    f.finished++;
  }
  end_group(g);
}

static group *new_group(uint32_t server, uint32_t n, int packed) {
  group *g = f.groups;
  while (g->used) g++;
  g->used = 1;
  g->server = server;
  g->number = ++f.number;
  g->n = n;
  g->packed = packed;
  return g;
}

/* A group over random stretches of a server's shard. */
static group *random_group(uint32_t server, uint32_t n, int packed) {
  group *g = new_group(server, n, packed);
  random_segments(&f.prng, &f.layout, server, &g->shape);
  g->expected = calloc(1, g->shape.bytes);
  assert_non_null(g->expected);
  return g;
}

/* Draws the update of the next member, member k. */
static void add_member(group *g, uint32_t k, uint32_t worker, double weight, uint64_t most) {
  g->worker[k] = worker;
  g->seq[k] = ++f.seq;
  g->weight[k] = weight;
  random_update(&f.prng, &f.layout, &g->shape, g->packed, 0, most, &g->update[k]);
  literal_add(&f.layout, &g->shape, g->expected, g->update[k].dense, weight, k == 0);
}

static group *start_group(uint32_t server, uint32_t n, uint64_t most, uint64_t bad) {
  group *g = random_group(server, n, !f.ghost && below(2));
  g->whole = below(3) == 0;
  for (uint32_t k = 0; k < n; k++) {
    uint32_t worker = (uint32_t)below(MEMBERS);
    add_member(g, k, worker, below(2) ? 1.0 : (double)below(9) - 4.0, most);
    if (bad && g->weight[k] != 0.0 && below(bad) == 0)
      g->bad |= (uint32_t)spoil(&f.prng, &f.layout, &g->shape, &g->update[k]) << k;
  }
  tell_group(g, below(2) ? 1e9 : -1.0);
  return g;
}

static uint64_t random_upto(const group *g) {
  if (g->packed) return below(3) ? below(2 * g->shape.bytes) : UINT64_MAX;
  return below(3) ? below(g->shape.bytes + 1) / 8 * 8 : g->shape.bytes;
}

/* One thing that may happen to a group. */
static void step_group(group *g) {
  uint32_t k = (uint32_t)below(g->n);
  uint64_t what = below(5);
  if (what == 0 && !g->failed && below(2) == 0) tell_release(g, random_upto(g));
  if (what == 1) take(g->server);
  if (what > 1) send_some(g, k, 8 * (1 + below(below(2) ? 64 : 600)));
  if (w.nlent > 0 && below(2) == 0) work_give_back(&w, (uint32_t)below(w.nlent), below(4) == 0);
  if (g->failed ? below(4) == 0 : complete(g)) finish_group(g);
}

/* The sum is the literal one for every order of chunks, grants, releases and returned bulks, with several groups of two
 * servers at once, dense or of packets. No member is blamed, however long a ring is full. */
SCENE(test_sums) {
  seeds(60);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    make(seed);
    f.ghost = seed % 7 == 0;
    int wide = seed % 10 == 1; /* rings are shorter than updates */
    w.config.heartbeat_ns = 10000000000u;
    w.config.chunk_bytes = wide ? 1 << 18 : seed % 5 < 3 ? CHUNK / 8 : BIG;
    if (wide)
      START(wide_rings, 1);
    else if (seed % 4)
      START(mixed, seed % 3 != 0);
    else
      START(plain, seed % 3 != 0);
    uint32_t started = 0, refused = 0, wanted = wide ? 2 : 8;
    for (int step = 0; step < 400000 && f.finished + refused < wanted; step++) {
      group *g = &f.groups[below(2)];
      uint32_t m = (uint32_t)below(MEMBERS);
      w.now += below(20000); /* some windows of the meter pass */
      if (peer(m)->link == 0 && below(100) == 0) work_meet(&w, m, 1);
      if (g->used) {
        if (wide) {
          for (uint32_t k = 0; k < g->n; k++) send_some(g, k, 1 << 20);
        }
        step_group(g);
      } else if (started < wanted && below(10) == 0) {
        started++;
        const group *begun =
            start_group((uint32_t)below(SERVERS), 1 + (uint32_t)below(wide ? 3 : MEMBERS),
                        below(2) ? 99 : 30, 0);
        /* A group of more packets than the last one needs other memory, which was lent. */
        if (begun->failed) assert_true(begun->packed && w.nlent > 0);
        refused += (uint32_t)begun->failed;
      }
      if (below(20) == 0) seam_tick(&w);
    }
    if (f.finished + refused < wanted) fail_msg("seed %u: %u groups", (unsigned)seed, f.finished);
    assert_int_equal(f.fails, refused);
    assert_int_equal(w.drops, 0);
    assert_int_equal(seam_stats(&w).transfers_revoked, 0);
    assert_true(seam_stats(&w).members_added >= f.finished);
  }
}

static void blame(uint32_t worker) {
  for (uint32_t i = 0; i < GROUPS; i++) {
    for (uint32_t k = 0; k < f.groups[i].n; k++)
      if (worker == SEAM_NOBODY || f.groups[i].worker[k] == worker) f.groups[i].guilty |= 1u << k;
  }
}

static void lose_server(uint32_t server) {
  for (uint32_t i = 0; i < GROUPS; i++)
    if (f.groups[i].used && f.groups[i].server == server) free_group(&f.groups[i]);
  seam_lost(&w, at_server(server));
  work_back(&w, at_server(server));
}

static void trouble(group *g) {
  uint32_t m = (uint32_t)below(MEMBERS);
  uint64_t what = below(1200);
  if (what == 0) blame(m);
  if (what == 0) seam_lost(&w, m);
  if (what == 1 || what == 3) blame(SEAM_NOBODY); /* it takes time until the server is back */
  if (what == 1) w.now += 3 * BEAT;
  if (what == 1) seam_tick(&w);
  if (what == 2 && g->used) end_group(g);
  if (what == 3) lose_server(m % SERVERS);
  if (what > 3 && peer(m)->link == 0 && below(20) == 0) work_meet(&w, m, 1);
}

/* The same with members that die, reconnect, fall silent or send values that are not finite, and with servers that end groups
 * or vanish: only the guilty member is blamed, a sum that completes is right, and all resources are reused. */
SCENE(test_sums_with_failures) {
  uint64_t finished = 0, fails = 0;
  seeds(40);
  for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
    make(seed);
    w.config.chunk_bytes = seed % 2 ? CHUNK / 8 : BIG;
    START(mixed, 1);
    for (int step = 0; step < 12000; step++) {
      group *g = &f.groups[below(2)];
      w.now += below(100);
      if (!g->used) {
        start_group((uint32_t)below(SERVERS), 1 + (uint32_t)below(MEMBERS), 60, 15);
        for (uint32_t m = 0; m < MEMBERS; m++)
          if (peer(m)->link == 0) blame(m);
      } else {
        step_group(g);
      }
      if (below(20) == 0) seam_tick(&w);
      trouble(g);
    }
    assert_int_equal(w.drops, 0);
    finished += f.finished;
    fails += f.fails;
  }
  if (last_seed - first_seed >= 39) assert_true(finished > 250 && fails > 250);
}

/* --- spreads --- */

static uint8_t byte_of(uint64_t offset, uint64_t version) {
  return (uint8_t)(mlfab__mix(offset * 31 + version) >> 7);
}

static void tell_spread(spread *s) {
  mlfab__spread_member members[MEMBERS];
  mlfab__spread m = {s->request, s->bytes, 7, (uint32_t)s->whole, s->n};
  for (uint32_t i = 0; i < s->n; i++)
    members[i] = (mlfab__spread_member){100 + i, s->worker[i], 1, s->attempt[i]};
  f.spread = s;
  seam_say(&w, at_server(s->server), MLFAB__SPREAD, mlfab__encode_spread(w.meta, &m, members));
}

static void make_spread(spread *s, uint32_t server, uint32_t n) {
  uint64_t end;
  memset(s, 0, sizeof *s);
  mlfab__layout_run(&f.layout, server, 0, &s->begin, &end);
  s->bytes = end - s->begin;
  s->request = MLFAB__SPREAD_BIT | ++f.number;
  s->server = server;
  s->n = n;
  for (uint32_t i = 0; i < n; i++) {
    s->worker[i] = i;
    s->attempt[i] = 1 + (uint32_t)below(3);
    s->model[i] = calloc(1, s->bytes);
    assert_non_null(s->model[i]);
  }
}

static void free_spread(spread *s) {
  for (uint32_t i = 0; i < s->n; i++) free(s->model[i]);
  f.spread = NULL;
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

static uint8_t bulk_of[1 << 20] __attribute__((aligned(8)));

/* The server's next frame: a piece of a slice, at most `most` bytes. */
static void tell_model(spread *s, uint64_t most) {
  uint32_t slice = (uint32_t)mlfab__min(s->at / (s->bytes / SLICES), SLICES - 1);
  uint64_t n = mlfab__min(most, slice_end(s, slice) - s->at);
  if (s->at == s->slice_at) s->version++;
  s->versions[slice] = s->version;
  mlfab__model m = {s->request, s->begin + s->at,        n, s->version, s->version * 2, slice,
                    0,          (uint32_t)s->version + 7};
  s->last_sent = s->at + n == s->bytes;
  m.flags = s->last_sent ? MLFAB__MODEL_LAST : 0;
  uint32_t bulk_bytes = (uint32_t)n;
  for (uint64_t i = 0; i < n; i++) bulk_of[i] = byte_of(m.offset + i, s->version);
  if (!f.ghost && mlfab__mix(m.offset + s->version) % 3 == 0) {
    m.flags |= MLFAB__MODEL_PACKED;
    bulk_bytes = packets(m.offset, n, bulk_of);
  }
  s->at += n;
  if (s->at == slice_end(s, slice)) s->slice_at = s->at;
  seam_bulk(&w, at_server(s->server), MLFAB__MODEL, mlfab__encode_model(w.meta, &m),
            f.ghost ? NULL : bulk_of, bulk_bytes);
}

static int lends(uint32_t p) {
  for (uint32_t i = 0; i < w.nlent; i++)
    if (w.lents[i].peer == p) return 1;
  return 0;
}

/* Has this member all, with every bulk given back; or was it given up? */
static int served(const spread *s, uint32_t i) {
  return s->all_failed || s->failed[i] || (s->done[i] && !lends(s->worker[i]));
}

/* Writes a frame where a worker would. */
static void on_model(uint32_t worker, const mlfab__hop_model *m, const seam_heard *heard) {
  static uint8_t bulk[1 << 20];
  spread *s = f.spread;
  uint32_t i = 0, active = 0;
  assert_non_null(s);
  while (i < s->n && (s->worker[i] != worker || 100 + i != m->request)) i++;
  assert_true(i < s->n && m->server == s->server && m->attempt == s->attempt[i]);
  assert_true(!s->done[i] && !s->failed[i] && !s->all_failed);
  assert_true(!s->whole || s->last_sent);
  assert_int_equal(m->commit, 2 * m->version);
  assert_int_equal(m->epoch, m->version + 7);
  s->begun[i] = 1;
  for (uint32_t k = 0; k < s->n; k++) active += s->begun[k] && !served(s, k);
  assert_true(active <= 2);
  uint8_t *to = s->model[i] + (m->offset - s->begin);
  if (m->flags & MLFAB__MODEL_PACKED) {
    assert_int_equal(heard->bulk_bytes, packets(m->offset, m->bytes, bulk));
    if (heard->bulk_bytes > 0) assert_memory_equal(heard->bulk, bulk, heard->bulk_bytes);
    for (uint64_t b = 0; b < m->bytes; b++) to[b] = byte_of(m->offset + b, m->version);
  } else {
    assert_int_equal(heard->bulk_bytes, m->bytes);
    assert_true((heard->bulk == NULL) == (f.ghost || m->bytes == 0) || m->bytes == 0);
    if (heard->bulk) memcpy(to, heard->bulk, heard->bulk_bytes);
  }
  s->done[i] = (m->flags & MLFAB__MODEL_LAST) != 0;
}

/* Every slice must have the version that was sent last, whole. */
static void check_models(const spread *s) {
  for (uint32_t i = 0; i < s->n; i++) {
    if (!s->done[i]) assert_true(s->failed[i] || s->all_failed);
    if (s->failed[i] || !s->done[i] || f.ghost) continue;
    for (uint64_t at = 0, slice = 0; at < s->bytes; at++) {
      while (at >= slice_end(s, (uint32_t)slice)) slice++;
      if (s->model[i][at] != byte_of(s->begin + at, s->versions[slice]))
        fail_msg("member %u: byte %u is not of the last version", i, (unsigned)at);
    }
  }
}

/* Models are handed on in a random order of events: slices restart while their old bytes are lent; members join and leave. */
static void run_spread(int restarts, int losses, uint64_t most) {
  spread s;
  int open = 1;
  make_spread(&s, (uint32_t)below(SERVERS), 1 + (uint32_t)below(MEMBERS));
  s.whole = below(3) == 0;
  for (uint32_t m = 0; m < MEMBERS; m++)
    if (peer(m)->link == 0) work_meet(&w, m, 1);
  tell_spread(&s);
  for (int step = 0; step < 100000 && open; step++) {
    w.now += below(50);
    if (!s.last_sent && below(2)) {
      if (restarts && s.at > s.slice_at && below(25) == 0) s.at = s.slice_at;
      tell_model(&s, 8 + below(most));
    }
    for (uint32_t m = 0; m < s.n; m++)
      if (peer(m)->link && below(2)) work_take(&w, m, 1);
    if (w.nlent > 0 && below(2)) work_give_back(&w, (uint32_t)below(w.nlent), below(4) == 0);
    if (losses && below(60) == 0) seam_lost(&w, (uint32_t)below(s.n));
    if (losses && below(200) == 0) w.now += 3 * BEAT;
    if (below(8) == 0) seam_tick(&w);
    open = 0;
    for (uint32_t i = 0; i < s.n; i++) open |= !served(&s, i);
  }
  assert_false(open);
  check_models(&s);
  while (!s.last_sent) tell_model(&s, most); /* no recipient is left */
  give_all_back();
  f.finished += !s.all_failed;
  free_spread(&s);
}

SCENE(test_spreads) {
  const mlfab__tensor_info wide[] = {{0, MLFAB_F32, 150000}};
  for (int losses = 0; losses < 2; losses++) {
    uint32_t finished = 0, rounds = losses ? 6 : 4;
    seeds(30);
    for (uint64_t seed = first_seed; seed <= last_seed; seed++) {
      make(seed);
      f.ghost = !losses && seed % 11 == 0;
      if (seed % 3)
        START(mixed, 1);
      else
        START(wide, 1);
      for (uint32_t round = 0; round < rounds; round++)
        run_spread(losses || seed % 2 != 0, losses, seed % 3 ? 700 : BIG - 8);
      finished += f.finished;
      assert_int_equal(w.drops, 0);
      /* Nothing is left of them: both accumulators are free. */
      for (uint32_t m = 0; m < 2; m++) {
        spread s;
        make_spread(&s, 0, 1);
        f.spread_fails = 0;
        tell_spread(&s);
        assert_int_equal(f.spread_fails, 0);
        free_spread(&s);
      }
    }
    /* In the others the restarted slice found no room. */
    if (!losses && last_seed - first_seed >= 29) assert_true(finished > 90);
  }
}

/* --- one thing at a time --- */

/* A scene begins with all members and the model of one tensor. */
typedef struct scene {
  void (*run)(void);
  uint32_t chunk_bytes, accumulators;
} scene;

static void run_scene(void **state) {
  const scene *s = *state;
  make(1);
  w.config.chunk_bytes = s->chunk_bytes;
  w.config.accumulators = s->accumulators;
  START(plain, 1);
  s->run();
  stop();
}
#define WITH_ALL_AND(name, ...)                          \
  static void name(void);                                \
  static scene name##_begins = {name, __VA_ARGS__};      \
  SCENE_ADD(name, run_scene, NULL, NULL, &name##_begins) \
  static void name(void)
#define WITH_ALL(name) WITH_ALL_AND(name, CHUNK, 0)

/* A group over the whole shard of server 0, of updates of workers 0 ... Packets have `elements` values. `opposite`: members
 * cancel the first one. */
static group *make_plain(uint32_t n, int packed, uint32_t elements, int opposite) {
  group *g = new_group(0, n, packed);
  uint64_t begin, end;
  mlfab__layout_run(&f.layout, 0, 0, &begin, &end);
  g->shape.segments[0] = (mlfab__segment){begin, end - begin};
  g->shape.n = 1;
  g->shape.bytes = end - begin;
  g->expected = calloc(1, g->shape.bytes);
  for (uint32_t k = 0; k < n; k++) {
    update *u = &g->update[k];
    g->worker[k] = k;
    g->seq[k] = ++f.seq;
    g->weight[k] = opposite && k > 0 ? -1.0 : 1.0;
    u->dense = calloc(1, g->shape.bytes);
    u->packets = packed ? malloc(8 * g->shape.bytes) : NULL;
    for (uint64_t at = 0, offset; at < g->shape.bytes;) {
      mlfab__packet_shape piece = {begin + at, MLFAB_F32, MLFAB_HALF_NONE, 0, 0};
      (void)piece_at(&f.layout, &g->shape, at, &offset, &piece.elements);
      piece.elements = (uint32_t)mlfab__min(elements, piece.elements);
      float *values = (float *)(void *)(u->dense + at);
      for (uint32_t i = 0; i < piece.elements; i++) values[i] = opposite ? 3.0f : (float)(k + 1);
      if (packed) u->bytes += mlfab__packet_dense(u->packets + u->bytes, &piece, values);
      at += 4 * piece.elements;
    }
    if (!packed) u->bytes = g->shape.bytes;
    u->data = packed ? u->packets : u->dense;
    literal_add(&f.layout, &g->shape, g->expected, u->dense, g->weight[k], k == 0);
  }
  return g;
}

static group *plain_group(uint32_t n, int packed) {
  group *g = make_plain(n, packed, 200, 0);
  tell_group(g, packed ? 1e9 : -1.0);
  return g;
}

/* Its members send what they have, and the sum is released: it must be right. */
static void complete_group(group *g) {
  uint32_t finished = f.finished;
  tell_release(g, g->packed ? UINT64_MAX : g->shape.bytes);
  for (uint32_t turn = 0; turn < g->n; turn++)
    for (uint32_t k = 0; k < g->n; k++) send_all(g, k);
  for (int i = 0; i < 100 && !complete(g); i++) {
    seam_tick(&w);
    take_all(0);
    give_all_back();
  }
  finish_group(g);
  assert_int_equal(f.finished, finished + 1);
}

/* The last failure of a group names this worker, and is the n-th. */
static void failed(uint32_t n, uint32_t worker, int code) {
  assert_int_equal(f.fails, n);
  assert_int_equal(f.fail.worker, worker);
  assert_int_equal(f.fail.code, code);
}
static void spread_failed(uint32_t n, uint32_t i, uint32_t worker, int code) {
  assert_int_equal(f.spread_fails, n);
  assert_int_equal(f.spread_fail.member_request, worker == MLFAB__NO_NODE ? 0 : 100 + i);
  assert_int_equal(f.spread_fail.worker, worker);
  assert_int_equal(f.spread_fail.code, code);
}

/* Member k is silent for three heartbeats, and is named then. */
static void named(group *g, uint32_t k) {
  uint32_t fails = f.fails;
  work_wait(&w, 3 * BEAT - 1);
  assert_int_equal(f.fails, fails);
  g->guilty = 1u << k;
  work_wait(&w, 1);
  failed(fails + 1, g->worker[k], MLFAB_ERR_PEER_DEAD);
}

/* The next member is granted when the current one has two chunks left, if capacities are not known. */
WITH_ALL(test_grant_order) {
  group *g = plain_group(3, 0);
  uint64_t bytes = g->shape.bytes;
  assert_int_equal(g->granted[0], bytes);
  assert_int_equal(g->granted[1], 0);
  send_upto(g, 0, bytes - 2 * CHUNK - 4);
  work_wait(&w, 2 * BEAT);
  assert_int_equal(g->granted[1], 0);
  send_upto(g, 0, bytes - 2 * CHUNK);
  assert_true(g->granted[1] > 0);
  assert_int_equal(g->granted[2], 0);
  complete_group(g);
  assert_int_equal(seam_stats(&w).members_added, 3);
}

/* If the capacity is known and less than 85 % of it is used, the next member is granted earlier, up to the size of a ring. There
 * are two rings. The early grant stays valid when the current member ends. */
SCENE(test_idle_link) {
  static const mlfab__tensor_info wide[] = {{0, MLFAB_F32, 4200000}};
  uint64_t window = 4 * (uint64_t)(RING / 4) * 10, early = RING + RING / 2; /* of four chunks */
  make(1);
  w.config.heartbeat_ns = 1000000000u;
  w.config.chunk_bytes = RING / 4;
  START(wide, 1);
  group *g = make_plain(5, 0, 65536, 0);
  tell_group(g, 1e8);
  work_wait(&w, window - 1);
  assert_int_equal(g->granted[1], 0);
  work_wait(&w, 1);
  assert_int_equal(g->granted[1], RING);
  assert_int_equal(g->granted[2], 0);
  work_wait(&w, window);
  assert_int_equal(g->granted[2], RING);
  work_wait(&w, window);
  assert_int_equal(g->granted[3], 0); /* no ring is left */
  send_upto(g, 2, RING);
  send_upto(g, 1, RING - 4096);
  send_upto(g, 0, RING / 2);
  assert_int_equal(g->granted[1], early);
  assert_int_equal(g->granted[2], early);
  send_upto(g, 1, early); /* its next frame goes over the end of the ring */
  send_all(g, 0);
  assert_int_equal(g->granted[1], g->shape.bytes);
  send_all(g, 1);
  assert_int_equal(g->granted[2], g->shape.bytes);
  work_wait(&w, 4 * window); /* all that came counts for longer */
  assert_true(g->granted[3] > 0);
  complete_group(g);
}

/* A link of which 90 % is in use is not idle; one of which 80 % is in use is. */
SCENE(test_busy_link) {
  for (uint32_t percent = 80; percent <= 90; percent += 10) {
    make(1);
    w.config.heartbeat_ns = 1000000000u;
    w.config.chunk_bytes = 256;
    START(plain, 1);
    group *g = make_plain(2, 0, 65536, 0);
    tell_group(g, 1e6);
    for (uint64_t at = 256; at + 2 * 256 < g->shape.bytes; at += 256) {
      send_upto(g, 0, at);
      work_wait(&w, 256000 * 100 / percent);
    }
    assert_int_equal(g->granted[1] > 0, percent == 80);
  }
}

/* A member without a link is passed over until it is the only one left. */
WITH_ALL(test_absent_member) {
  seam_lost(&w, 0);
  group *g = plain_group(2, 0);
  assert_int_equal(g->granted[0], 0);
  assert_int_equal(g->granted[1], g->shape.bytes); /* all of it is staged */
  send_all(g, 1);
  work_wait(&w, BEAT);
  work_meet(&w, 0, 1);
  assert_int_equal(g->granted[0], g->shape.bytes);
  complete_group(g);
  seam_lost(&w, 0);
  g = plain_group(2, 0);
  named(g, 0);
}

/* A granted member that sends nothing for 3 heartbeats is named; a member that waits for a grant is not. */
WITH_ALL(test_silent_member) {
  group *g = plain_group(3, 0);
  send_all(g, 0);
  send_upto(g, 1, CHUNK);
  work_wait(&w, 2 * BEAT);
  send_upto(g, 1, 2 * CHUNK);
  work_wait(&w, 3 * BEAT - 1);
  assert_int_equal(f.fails, 0);
  g->guilty = 1u << 1;
  work_wait(&w, BEAT); /* first the transport is asked for bytes of a frame that is not complete */
  failed(1, 1, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(seam_stats(&w).transfers_revoked, 1);
  /* The group has failed: chunks that still arrive are ignored, and nothing is sent. */
  group late = *g;
  say_chunk(&late, 1, late.sent[1], 0, late.update[1].data, CHUNK);
  tell_release(g, g->shape.bytes);
  assert_false(take(0));
  SAY(&w, at_server(0), GROUP_END, group_end, g->number);
  say_chunk(&late, 1, late.sent[1], 0, late.update[1].data, CHUNK);
  work_wait(&w, 10 * BEAT);
  assert_int_equal(w.drops, 0);
  assert_int_equal(f.fails, 1);
}

/* Time in which the aggregator's process did not run does not count against a member, not even against one without a link. */
WITH_ALL(test_pause) {
  seam_lost(&w, 0);
  group *g = plain_group(2, 0);
  w.now += 20 * BEAT;
  work_wait(&w, 2 * BEAT);
  assert_int_equal(f.fails, 0);
  g->guilty = 1;
  work_wait(&w, 2 * BEAT);
  failed(1, 0, MLFAB_ERR_PEER_DEAD);
}

/* The loss of a member whose update is complete here does not matter. When a group fails with its member, another group that
 * waited for the in-link is granted, and its timeout starts then. */
WITH_ALL(test_member_lost) {
  group *g = plain_group(2, 0);
  send_all(g, 0);
  send_upto(g, 1, CHUNK);
  seam_lost(&w, 0);
  assert_int_equal(f.fails, 0);
  work_meet(&w, 0, 1);
  group *next = plain_group(1, 0);
  assert_int_equal(g->granted[1], g->shape.bytes);
  assert_int_equal(next->granted[0], 0);
  g->guilty = 1u << 1;
  work_wait(&w, BEAT);
  seam_lost(&w, 1);
  failed(1, 1, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(f.fail.seq, g->seq[1]);
  assert_int_equal(next->granted[0], next->shape.bytes);
  named(next, 0);
}

/* A member that reconnects as another process cannot have the update. One that is older than the manifest says is waited for. */
WITH_ALL(test_other_incarnation) {
  seam_lost(&w, 1);
  group *g = plain_group(2, 0);
  g->guilty = 1u << 1;
  work_meet(&w, 1, 2);
  failed(1, 1, MLFAB_ERR_PEER_DEAD);
  end_group(g);
  seam_lost(&w, 0);
  work_meet(&w, 0, 0);
  g = plain_group(1, 0);
  assert_int_equal(f.fails, 1);
  assert_int_equal(g->granted[0], 0);
  work_meet(&w, 0, 1); /* without a loss in between */
  complete_group(g);
}

/* Nothing is sent before the release, or with `whole` before it is complete. */
WITH_ALL(test_release) {
  group *g = plain_group(1, 0);
  uint64_t bytes = g->shape.bytes;
  send_upto(g, 0, 4 * CHUNK + 8);
  assert_false(take(0));
  tell_release(g, CHUNK + 4);
  assert_true(take(0));
  /* The end of a release is sent without waiting for a full chunk. */
  assert_true(take(0));
  assert_int_equal(g->forwarded, CHUNK + 4);
  assert_false(take(0));
  SAY(&w, at_server(0), RELEASE, release, g->number, CHUNK); /* an older one */
  tell_release(g, bytes);
  take_all(0);
  assert_int_equal(g->forwarded, 4 * CHUNK + 4);
  assert_false(take(1));
  complete_group(g);
  g = make_plain(1, 0, 200, 0);
  g->whole = 1;
  tell_group(g, -1.0);
  tell_release(g, bytes);
  send_upto(g, 0, bytes - 4);
  assert_false(take(0));
  send_all(g, 0);
  assert_true(take(0));
}

/* A group that starts while bulks of the last one are lent grants nothing until they are returned. */
WITH_ALL_AND(test_reuse_while_lent, BIG, 0) {
  seam_lost(&w, 0);
  group *other = plain_group(1, 0), *g; /* it keeps the other accumulator */
  work_meet(&w, 0, 1);
  send_all(other, 0);
  for (int round = 0; round < 2; round++) {
    g = plain_group(1, 0);
    if (round == 1) {
      assert_int_equal(g->granted[0], 0);
      work_wait(&w, BEAT);
      work_give_back(&w, 0, 0);
      assert_int_equal(g->granted[0], 0);
      work_give_back(&w, 0, 1);
    }
    assert_int_equal(g->granted[0], g->shape.bytes);
    tell_release(g, g->shape.bytes);
    send_all(g, 0);
    take_all(0);
    assert_int_equal(w.nlent, 2);
    finish_group(g);
  }
  /* They are not returned: the group fails with an error. */
  g = plain_group(1, 0);
  work_wait(&w, 10 * BEAT - 1);
  assert_int_equal(f.fails, 0);
  work_wait(&w, 1);
  failed(1, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
  assert_int_equal(f.fail.group, g->number);
  /* The loss of the link returns all of them. */
  lose_server(0);
  complete_group(plain_group(1, 0));
}

/* A third use finds no accumulator. When the server's link is lost, those of this server are free. */
WITH_ALL(test_no_room) {
  spread s, other;
  plain_group(1, 0);
  make_spread(&other, 0, 1);
  tell_spread(&other);
  assert_int_equal(f.fails + f.spread_fails, 0);
  for (uint32_t round = 0; round < 2; round++) {
    group *g = plain_group(1, 0);
    failed(round + 1, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
    assert_int_equal(f.fail.group, g->number);
    end_group(g);
    make_spread(&s, 0, 1);
    tell_spread(&s);
    spread_failed(round + 1, 0, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
    tell_model(&s, CHUNK); /* it was on its way */
    free_spread(&s);
    if (round == 0) { /* of another server: nothing changes */
      seam_lost(&w, at_server(1));
      work_back(&w, at_server(1));
    }
  }
  group late = f.groups[0];
  lose_server(0);
  free_spread(&other);
  assert_int_equal(f.fails + f.spread_fails, 4);
  say_chunk(&late, 0, 0, 0, bulk_of, CHUNK); /* the member does not know yet */
  f.number = 0;                              /* a server may restart its numbers on a new link */
  for (int i = 0; i < 2; i++) {
    group *g = plain_group(1, 0);
    assert_int_equal(g->number, i + 1);
    assert_int_equal(g->granted[0], i ? 0 : g->shape.bytes);
  }
  assert_int_equal(f.fails, 2);
  assert_int_equal(w.drops, 0);
}

/* Before the model is defined, every request is refused. */
SCENE(test_no_model) {
  spread s = {.request = MLFAB__SPREAD_BIT | 1, .bytes = 64, .n = 1, .attempt = {1}};
  make(1);
  work_open(&w);
  work_meet(&w, 0, 1);
  group *g = new_group(0, 1, 0);
  g->shape = (shape){{{0, 64}}, 1, 64};
  tell_group(g, -1.0);
  failed(1, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
  tell_spread(&s);
  spread_failed(1, 0, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
}

/* The layout changes: groups and spreads in progress end. */
WITH_ALL(test_model_again) {
  uint32_t owners[64] = {0};
  spread s;
  plain_group(1, 0);
  make_spread(&s, 0, 1);
  tell_spread(&s);
  for (uint32_t i = 0; i < f.layout.nslices; i++) owners[i] = f.layout.slices[i].server;
  mlfab__resume resume = {1, 2, f.layout.nslices};
  seam_say(&w, at_server(0), MLFAB__RESUME, mlfab__encode_resume(w.meta, &resume, owners));
  failed(1, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
  spread_failed(1, 0, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
  free_spread(&s);
  end_group(&f.groups[0]);
  complete_group(plain_group(1, 0));
}

/* The distributor finds one member silent: the spread gives that member up and serves the others. */
WITH_ALL(test_silent_recipient) {
  spread s;
  make_spread(&s, 0, 3);
  tell_spread(&s);
  while (!s.last_sent) tell_model(&s, CHUNK);
  for (int beat = 0; beat < 4; beat++) {
    if (beat < 3) assert_int_equal(f.spread_fails, 0);
    work_wait(&w, BEAT);
    work_take(&w, 1, 1);
    seam_tick(&w);
  }
  spread_failed(1, 0, 0, MLFAB_ERR_PEER_DEAD);
  assert_int_equal(work_take(&w, 0, SEAM_ALL), 0);
  for (uint32_t m = 1; m < 3; m++) work_take(&w, m, SEAM_ALL);
  check_models(&s);
  assert_int_equal(seam_stats(&w).members_served, 2);
  free_spread(&s);
}

/* A server that is slow, or has not decided anything yet, is not a member's fault. PULL_FAIL ends the spread. */
WITH_ALL(test_idle_recipient) {
  spread s;
  make_spread(&s, 0, 1);
  tell_spread(&s);
  for (int beat = 0; beat < 20; beat++) {
    work_wait(&w, BEAT);
    if (beat == 10) tell_model(&s, CHUNK);
    if (beat == 10) work_take(&w, 0, 1);
  }
  assert_int_equal(f.spread_fails, 0);
  SAY(&w, at_server(0), PULL_FAIL, pull_fail, .request = s.request, .code = MLFAB_ERR_CALLBACK);
  while (!s.last_sent) tell_model(&s, CHUNK);
  assert_int_equal(work_take(&w, 0, SEAM_ALL), 0);
  free_spread(&s);
  for (int i = 0; i < 2; i++) plain_group(1, 0); /* both accumulators are free */
  assert_int_equal(f.fails + w.drops, 0);
}

/* A member whose link breaks after its last frame was sent may not have received it. One that is another process now has not
 * asked for it. The server may serve a member itself that waits. */
WITH_ALL(test_done_and_lost) {
  spread s;
  make_spread(&s, 0, 2);
  tell_spread(&s);
  while (!s.last_sent) tell_model(&s, CHUNK);
  work_take(&w, 0, SEAM_ALL);
  assert_true(s.done[0]);
  seam_lost(&w, 0);
  spread_failed(1, 0, 0, MLFAB_ERR_PEER_DEAD);
  work_meet(&w, 0, 1);
  seam_lost(&w, 0);
  assert_int_equal(f.spread_fails, 1);
  work_meet(&w, 1, 2);
  spread_failed(2, 1, 1, MLFAB_ERR_PEER_DEAD);
  free_spread(&s);
  make_spread(&s, 0, 1); /* member 0 has no link, and comes as another process */
  tell_spread(&s);
  work_meet(&w, 0, 2);
  spread_failed(3, 0, 0, MLFAB_ERR_PEER_DEAD);
  free_spread(&s);
  make_spread(&s, 0, 3);
  for (uint32_t i = 0; i < 3; i++) s.worker[i] = i + 2;
  tell_spread(&s);
  SAY(&w, at_server(0), SPREAD_FAIL, spread_fail, s.request, 102, 4, 0);
  while (!s.last_sent) tell_model(&s, CHUNK);
  for (uint32_t m = 2; m < 5; m++) assert_int_equal(work_take(&w, m, SEAM_ALL) > 0, m < 4);
  assert_true(s.done[0] && s.done[1] && !s.done[2]);
  assert_int_equal(f.spread_fails, 3);
  free_spread(&s);
}

/* --- packets --- */

/* A sum that is packed in several ticks, in packets of the largest size. Reports of progress give no length before that is done. */
SCENE(test_large) {
  make(3);
  w.config.chunk_bytes = BIG;
  START(large, 1);
  for (uint32_t i = 0; i < 3; i++) {
    group *g = random_group(i % SERVERS, 3, 1);
    assert_true(g->shape.bytes > 8 << 20);
    for (uint32_t k = 0; k < 3; k++) add_member(g, k, k, 1.0 + k, i == 1 ? 99 : 4);
    tell_group(g, -1.0);
    tell_release(g, UINT64_MAX);
    w.now += BEAT;
    while (whole_members(g) < g->n)
      for (uint32_t k = 0; k < g->n; k++) send_some(g, k, 1 << 20);
    f.alive = 0;
    w.now += BEAT;
    for (int part = 0; mlfab_node_deadline(w.node) <= w.now; part++) {
      assert_true(part < 100);
      if (g->total == 0) assert_int_equal(take(g->server), 0);
      seam_tick(&w);
    }
    assert_int_equal(f.alive, 1);
    while (g->total == 0 || g->forwarded < g->total) {
      assert_int_equal(take(g->server), 1);
      give_all_back();
    }
    finish_group(g);
  }
  assert_int_equal(f.finished, 3);
}

/* The head sends little, so the link is judged idle and another member is granted. */
static void admit_early(group *g) {
  w.now += 2 * BEAT + 1;
  send_some(g, 0, 1);
  seam_tick(&w);
}

/* A member that is ahead of its turn with a full ring is not silent. One that could continue is, and so is one that has sent
 * nothing yet. */
WITH_ALL(test_silence) {
  group *g = make_plain(3, 1, 2, 0);
  tell_group(g, 1e9);
  admit_early(g);
  admit_early(g);
  for (uint32_t k = 1; k < 3; k++) {
    send_all(g, k);
    assert_true(g->sent[k] > 0 && g->sent[k] < g->update[k].bytes);
  }
  for (int i = 0; i < 20; i++) {
    work_wait(&w, BEAT);
    send_some(g, 0, 1);
    assert_int_equal(f.fails, 0);
  }
  send_all(g, 0);
  assert_true(g->granted[1] == UINT64_MAX);
  named(g, 1);
  end_group(g);
  named(plain_group(2, 1), 0);
}

/* A server that waits gets a report of progress once a heartbeat, with the length when it is known. */
WITH_ALL(test_signs_of_life) {
  group *g = plain_group(2, 1);
  tell_release(g, 1);
  for (int i = 0; i < 4; i++) {
    w.now += BEAT;
    send_some(g, 0, 1);
    seam_tick(&w);
    seam_tick(&w);
    assert_int_equal(f.alive, i + 1);
  }
  send_all(g, 0);
  send_all(g, 1);
  assert_int_equal(take(0), 0); /* no packet ends within the release */
  tell_release(g, 5000);
  take_all(0);
  assert_true(g->total > 0 && g->forwarded > 0 && g->forwarded < g->total);
  complete_group(g);
}

/* Updates that cancel: the sum exists, and is short. */
WITH_ALL(test_nothing_left) {
  group *g = make_plain(2, 1, 200, 1);
  tell_group(g, 1e9);
  tell_release(g, UINT64_MAX);
  send_all(g, 0);
  send_all(g, 1);
  assert_int_equal(take(0), 1);
  assert_int_equal(g->total, 32);
  assert_int_equal(take(0), 0);
  finish_group(g);
  assert_int_equal(f.finished, 1);
}

/* Until an update's length is known, the dense length is assumed: members with small updates are granted with the head. */
WITH_ALL_AND(test_expectations, 65536, 0) {
  group *g = plain_group(4, 1);
  assert_int_equal(f.grants, 3); /* the head and two early ones */
  send_all(g, 0);
  assert_int_equal(f.grants, 5); /* all of the next one, and one early */
}

/* The memory of packets is not freed while a link borrows some of it: a group of many more packets waits for it. */
WITH_ALL_AND(test_room_while_lent, 65536, 1) {
  group *g = plain_group(1, 1);
  tell_release(g, UINT64_MAX);
  send_all(g, 0);
  assert_int_equal(take(0), 1);
  finish_group(g);
  assert_int_equal(w.nlent, 1);
  g = plain_group(1, 1); /* of the same size: waits until its bytes are returned */
  assert_int_equal(f.fails, 0);
  assert_int_equal(g->granted[0], 0);
  end_group(g);
  for (uint32_t round = 0; round < 2; round++) {
    g = new_group(0, 1, 1);
    for (uint64_t at = 0; g->shape.n < MLFAB__COUNT(g->shape.segments); at += 128)
      g->shape.segments[g->shape.n++] = (mlfab__segment){at, 120};
    g->shape.bytes = 120 * g->shape.n;
    g->update[0].bytes = 1;
    tell_group(g, -1.0);
    failed(1, MLFAB__NO_NODE, MLFAB_ERR_AGAIN);
    if (round == 0) work_give_back(&w, 0, 0);
    end_group(g);
  }
}

/* A member whose update is complete, though it is not its turn yet, may be lost. */
WITH_ALL(test_complete_and_lost) {
  group *g = plain_group(2, 1);
  admit_early(g);
  send_all(g, 1); /* everything fits into a ring */
  assert_int_equal(g->sent[1], g->update[1].bytes);
  seam_lost(&w, 1);
  assert_int_equal(f.fails, 0);
  complete_group(g);
  g = plain_group(2, 1);
  send_some(g, 0, 300);
  g->guilty = 1;
  seam_lost(&w, 0);
  failed(1, 0, MLFAB_ERR_PEER_DEAD);
}

/* A member's bytes change while the aggregator reads them: the sum has the bytes that were checked, or none. */
SCENE(test_changing) {
  uint32_t taken = 0;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    make(seed);
    START(plain, 1);
    group *g = plain_group(2, 1);
    update *u = &g->update[0];
    assert_true(u->bytes > 3 * 4096 && g->granted[0] >= u->bytes);
    uint8_t *bytes = changing_make(u->packets, u->bytes, 4096);
    for (uint32_t i = 1 + (uint32_t)below(CHANGING_MOST); i > 0; i--) {
      uint64_t any = mlfab__rng_next(&f.prng);
      size_t count = (size_t)1 << below(4);
      changing_to(below(4000 / count) * count, &any, count);
    }
    changing_arm();
    g->sent[0] = u->bytes;
    g->guilty = 1;
    SAY_BULK(&w, 0, HOP_CHUNK, hop_chunk, bytes, (uint32_t)u->bytes, g->number, g->seq[0], 0,
             u->bytes, g->server);
    assert_int_equal(changing_end(), 1);
    assert_int_equal(f.fails, w.drops);
    taken += w.drops == 0;
    if (w.drops > 0) { /* it did not parse: nothing was used */
      end_group(g);
      work_meet(&w, 0, 1);
      g = plain_group(2, 1);
    }
    complete_group(g);
  }
  assert_true(taken > 0); /* all of them where copies are read forwards */
}

SCENE(test_ghosts) {
  make(1);
  f.ghost = 1;
  START(plain, 1);
  plain_group(2, 1);
  failed(1, MLFAB__NO_NODE, MLFAB_ERR_UNSUPPORTED);
}

/* --- protocol violations --- */

/* The node has given up this peer's link, for this reason; the peer comes back. */
static void gave_up(uint32_t p, const char *text) {
  assert_int_equal(w.drops, 1);
  assert_int_equal(w.dropped, p);
  if (!strstr(w.said, text)) fail_msg("\"%s\", not \"%s\"", w.said, text);
  w.drops = 0;
  if (p >= WORKERS)
    work_back(&w, p);
  else
    work_meet(&w, p, 1);
}

/* A group of four, of which member 0 has sent two frames. */
static group *begun_group(int packed) {
  group *g = plain_group(4, packed);
  g->guilty = 1;
  for (int i = 0; i < 2; i++) send_some(g, 0, packed ? 1 : CHUNK);
  return g;
}

/* A chunk breaks the sender's link, and if it is the granted member, the group; nothing of it is used. */
static void bad(group **g, uint32_t from, mlfab__hop_chunk chunk, const void *bulk, uint32_t bytes,
                const char *text) {
  uint32_t fails = f.fails;
  seam_bulk(&w, from, MLFAB__HOP_CHUNK, mlfab__encode_hop_chunk(w.meta, &chunk), bulk, bytes);
  int packed = (*g)->packed;
  gave_up(from, text);
  assert_int_equal(f.fails, fails + (from == 0));
  end_group(*g);
  *g = begun_group(packed);
}

WITH_ALL(test_bad_chunks) {
#define BAD(from, group, k, offset, total, server, ...) \
  bad(&g, from, (mlfab__hop_chunk){group, g->seq[k], offset, total, server}, __VA_ARGS__)
  group *g = begun_group(0);
  const uint8_t *data = bulk_of;
  const char *place = "out of place or not granted", *nobody = "without this member";
  SAY(&w, 0, CHUNK, chunk, 1, 0, 1);
  gave_up(0, "no role");
  end_group(g);
  g = begun_group(0);
  seam_say(&w, 0, MLFAB__HOP_CHUNK, 5);
  gave_up(0, "HOP_CHUNK that does not parse");
  end_group(g);
  g = begun_group(0);
  BAD(0, g->number, 0, 2 * CHUNK, 0, SERVERS, data, CHUNK, "HOP_CHUNK that does not parse");
  BAD(0, g->number + 1, 0, 2 * CHUNK, 0, 0, data, CHUNK, "does not exist");
  BAD(0, g->number, 0, 2 * CHUNK, 0, 1, data, CHUNK, "does not exist"); /* another server's */
  BAD(0, g->number, 1, 2 * CHUNK, 0, 0, data, CHUNK, nobody);
  BAD(4, g->number, 0, 2 * CHUNK, 0, 0, data, CHUNK, nobody);
  BAD(0, g->number, 0, 2 * CHUNK + 4, 0, 0, data, CHUNK, place);
  BAD(0, g->number, 0, UINT64_MAX - 3, 0, 0, data, CHUNK, place);
  BAD(0, g->number, 0, CHUNK, 0, 0, data, CHUNK, place); /* repeated */
  BAD(1, g->number, 1, 0, 0, 0, data, CHUNK, place);     /* not granted */
  BAD(0, g->number, 0, 2 * CHUNK, 0, 0, data, (uint32_t)g->shape.bytes - 2 * CHUNK + 4, place);
  BAD(0, g->number, 0, 2 * CHUNK, 0, 0, NULL, CHUNK, "without bytes"); /* a ghost */
  BAD(0, g->number, 0, 2 * CHUNK, 0, 0, data, 0, "without bytes");
  BAD(0, g->number, 0, 2 * CHUNK, 0, 0, data, 6, "cuts an element");
  tell_release(g, g->shape.bytes);
  for (uint32_t k = 0; k < 4; k++) send_all(g, k);
  take_all(0);
  assert_true(complete(g)); /* nothing of all that was added */
  check_sum(g);
  say_chunk(g, 1, g->shape.bytes, 0, data, CHUNK); /* beyond the end */
  gave_up(1, place);
}

WITH_ALL(test_bad_packets) {
  static uint8_t out[4096] __attribute__((aligned(8)));
  float values[64] = {0};
  group *g = begun_group(1);
  const char *place = "out of place or not granted", *cut = "cut by the end";
  uint64_t bytes = g->shape.bytes, total = g->update[0].bytes, slice = f.layout.slices[0].bytes;
  uint32_t n = packet_bytes(&g->update[0], 0), m = packet_bytes(&g->update[0], n), at = n + m;
  uint8_t *copy = malloc(total); /* all groups have the same updates */
  memcpy(copy, g->update[0].packets, total);
#define AT(offset, total, ...) BAD(0, g->number, 0, offset, total, 0, __VA_ARGS__)
  AT(at, 0, copy + at, n, "no packets");
  AT(at, 8 * bytes + 8, copy + at, n, "more than its elements");
  AT(at + 8, total, copy + at, n, place);
  AT(0, total, copy, n, place); /* repeated */
  AT(at, total, copy + at, n - 8, cut);
  AT(at, total, copy + at, n + 16, cut);
  AT(at, total, copy + at, 0, "without packets");
  AT(at, total, NULL, n, "without packets");
  AT(at, total + 8, copy + at, n, "length changes");
  AT(at, total, copy + n, m, "overlapping");
  BAD(3, g->number, 3, 0, g->update[3].bytes, 0, copy, n, place); /* not granted */
  const struct {
    uint64_t offset;
    int dtype;
    uint32_t elements;
    const char *text;
  } wrong[] = {{4000, MLFAB_F64, 8, "another type"},
               {slice - 128, MLFAB_F32, 64, "one slice"},
               {bytes - 4, MLFAB_F32, 64, "outside"},
               {bytes + 4096, MLFAB_F32, 64, "outside"}};
  for (size_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    mlfab__packet_shape s = {wrong[i].offset, wrong[i].dtype, 0, 0, wrong[i].elements};
    AT(at, total, out, mlfab__packet_dense(out, &s, values), wrong[i].text);
  }
  end_group(g);
  g = plain_group(4, 1);
  g->guilty = 1;
  AT(0, n - 8, copy, n, place); /* longer than it says itself */
  tell_release(g, UINT64_MAX);
  for (uint32_t k = 0; k < 4; k++) send_all(g, k);
  take_all(0);
  assert_true(complete(g));
  check_sum(g);
  say_chunk(g, 0, total, total, copy, n); /* beyond the end */
  gave_up(0, place);
  free(copy);
#undef AT
#undef BAD
}

static void tell(uint8_t type, uint32_t bytes, const char *text) {
  seam_say(&w, at_server(0), type, bytes);
  if (text) gave_up(at_server(0), text);
  if (!text) assert_int_equal(w.drops, 0);
}

WITH_ALL(test_bad_manifests) {
  static const mlfab__segment wrong[] = {{1 << 20, 64}, {0, 1 << 20}, {2, 64}, {0, 63}};
  mlfab__group_member members[2] = {{1, 1.0, 0, 1}, {1, 1.0, 1, 1}};
  mlfab__segment segments[2] = {{0, 64}, {128, 64}};
  mlfab__group m = {7, 128, -1.0, 0, 0, 2, 2};
  const char *text = "a GROUP that does not parse, or whose number went back";
#define ENCODED mlfab__encode_group(w.meta, &m, members, segments)
  for (uint32_t back = 0; back < 2; back++) { /* its number is not larger than the last one */
    m.group = 7;
    tell(MLFAB__GROUP, ENCODED, NULL);
    m.group -= back;
    tell(MLFAB__GROUP, ENCODED, text);
  }
  m.packed = 2;
  tell(MLFAB__GROUP, ENCODED, text);
  m.packed = 0;
  members[1].worker = WORKERS;
  tell(MLFAB__GROUP, ENCODED, text);
  members[1].worker = 0; /* the same update twice */
  tell(MLFAB__GROUP, ENCODED, text);
  members[1].worker = 1;
  uint32_t bytes = ENCODED;
  for (uint32_t cut = 0; cut < bytes; cut += 3) {
    (void)ENCODED;
    tell(MLFAB__GROUP, cut, text);
    (void)ENCODED;
    tell(MLFAB__SPREAD, cut, "a SPREAD that does not parse");
  }
#undef ENCODED
  /* Segments outside the server's shard, or that cut an element, are refused with a reason. */
  assert_int_equal(f.fails, 0);
  for (uint32_t i = 0; i < MLFAB__COUNT(wrong); i++) {
    m = (mlfab__group){9 + i, wrong[i].bytes, -1.0, 0, 0, 2, 1};
    tell(MLFAB__GROUP, mlfab__encode_group(w.meta, &m, members, &wrong[i]), NULL);
    failed(i + 1, MLFAB__NO_NODE, MLFAB_ERR_ARGUMENT);
  }
}

WITH_ALL(test_bad_releases) {
  SAY(&w, at_server(0), RELEASE, release, 99, 1); /* for an unknown group: it has ended */
  SAY(&w, at_server(0), GROUP_END, group_end, 99);
  assert_int_equal(w.drops, 0);
  for (int i = 0; i < 4; i++) {
    group *g = plain_group(1, 0);
    mlfab__release r = {g->number, i == 0 ? g->shape.bytes + 4 : i == 1 ? 6 : 8};
    uint32_t bytes = mlfab__encode_release(w.meta, &r);
    memset(w.meta + bytes, 0, 8);
    if (i == 3)
      tell(MLFAB__GROUP_END, 9, "GROUP_END");
    else
      tell(MLFAB__RELEASE, i == 2 ? 15 : bytes, "RELEASE");
    free_group(g);
  }
}

/* A MODEL that its SPREAD does not allow. */
static void bad_model(spread *s, uint64_t bytes, uint32_t flags, const void *bulk,
                      uint32_t bulk_bytes, const char *text) {
  mlfab__model m = {s->request, 0, bytes, 1, 1, 0, flags, 1};
  int whole = s->last_sent;
  if (!whole) tell_spread(s);
  seam_bulk(&w, at_server(0), MLFAB__MODEL, mlfab__encode_model(w.meta, &m), bulk, bulk_bytes);
  gave_up(at_server(0), text);
}

WITH_ALL(test_bad_spreads) {
  mlfab__spread m = {MLFAB__SPREAD_BIT | 1, 64, 7, 0, 1};
  mlfab__spread_member member = {.request = 100, .worker = 0, .incarnation = 1, .attempt = 1};
  const char *text = "a SPREAD that does not parse, or comes twice", *more = "more or less bytes";
  spread s;
  for (uint32_t i = 0; i < 4; i++) {
    mlfab__spread bad = m;
    mlfab__spread_member other = member;
    if (i == 0) bad.members = 0;
    if (i == 1) bad.request = 1; /* of a worker */
    if (i == 2) other.worker = WORKERS;
    tell(MLFAB__SPREAD, mlfab__encode_spread(w.meta, &bad, &other) - (i == 3), text);
  }
  m.bytes = 1 << 20; /* more than a shard */
  tell(MLFAB__SPREAD, mlfab__encode_spread(w.meta, &m, &member), NULL);
  spread_failed(1, 0, MLFAB__NO_NODE, MLFAB_ERR_ARGUMENT);
  m.bytes = 64;
  tell(MLFAB__SPREAD, mlfab__encode_spread(w.meta, &m, &member), NULL);
  tell(MLFAB__SPREAD, mlfab__encode_spread(w.meta, &m, &member), text); /* repeated */
  make_spread(&s, 0, 1);
  uint32_t packed = MLFAB__MODEL_PACKED, all = (uint32_t)s.bytes;
  bad_model(&s, CHUNK, 0, NULL, CHUNK, "ghosts for a model with bytes");
  bad_model(&s, 0, 0, NULL, 0, more); /* empty, but not the last */
  bad_model(&s, all + 1, 0, bulk_of, all + 1, more);
  bad_model(&s, CHUNK, MLFAB__MODEL_LAST, bulk_of, CHUNK, more);
  bad_model(&s, CHUNK, 0, bulk_of, CHUNK - 4, "not as long as the stretch");
  bad_model(&s, all + 4, packed, bulk_of, CHUNK, more);
  tell_spread(&s);
  while (!s.last_sent) tell_model(&s, CHUNK);
  bad_model(&s, 0, MLFAB__MODEL_LAST, NULL, 0, "behind the last one");
  assert_int_equal(f.spread_fails, 1);
  free_spread(&s);
}

/* --- memory --- */

/* The node had no memory for what a link needs, and gave the link up: all that depends on it ends. */
static void repair(void) {
  lose_server(0);
  for (uint32_t m = 0; m < 2; m++)
    if (peer(m)->link == 0) work_meet(&w, m, 1);
  w.drops = 0;
}

/* A group of two, of which one needs a ring. Returns 1 when its sum was right. */
static int try_group(int packed) {
  seam_lost(&w, 0); /* so that worker 1 needs a ring */
  group *g = random_group(0, 2, packed);
  g->guilty = 3;
  for (uint32_t k = 0; k < 2; k++) add_member(g, k, k, 1.0, 60);
  tell_group(g, -1.0);
  send_all(g, 1);
  work_meet(&w, 0, 1);
  for (int turn = 0; turn < 3 && peer(at_server(0))->link; turn++) {
    for (uint32_t k = 0; k < 2; k++) send_all(g, k);
    if (turn == 0) tell_release(g, packed ? UINT64_MAX : g->shape.bytes);
    seam_tick(&w);
    take_all(0);
  }
  int good = complete(g);
  if (good) check_sum(g);
  if (w.drops)
    repair();
  else
    end_group(g);
  return good;
}

static int try_spread(void) {
  spread s;
  make_spread(&s, 0, 2);
  tell_spread(&s);
  while (!s.last_sent && peer(at_server(0))->link) tell_model(&s, 64);
  for (uint32_t m = 0; m < 2; m++) work_take(&w, m, SEAM_ALL);
  int good = s.done[0] && s.done[1];
  if (good) check_models(&s);
  if (w.drops) repair();
  free_spread(&s);
  return good;
}

/* Groups and spreads; one allocation fails. The node says so, gives a link up, or goes on with fewer early grants; nothing
 * leaks, and the next attempt works. Returns 1 when the allocation was reached. */
static int short_of_memory(int packed, uint64_t at, uint32_t *said_p) {
  make(1);
  START(mixed, 1);
  w.fail_at = w.allocations + at;
  uint32_t bad = 0;
  for (int round = 0; round < 3; round++) {
    if (!try_group(packed)) bad++;
    if (!try_spread()) bad++;
  }
  assert_true(bad <= 1 && f.fails + f.spread_fails <= 1);
  if (f.fails > 0) assert_true(f.fail.code == MLFAB_ERR_AGAIN || f.fail.worker < 2);
  *said_p += f.fails + f.spread_fails;
  int reached = w.allocations >= w.fail_at;
  return reached;
}

SCENE(test_out_of_memory) {
  for (int packed = 0; packed < 2; packed++) {
    uint32_t said = 0;
    uint64_t at = 1;
    while (short_of_memory(packed, at, &said)) at++;
    assert_true(at > 8 && said >= 6);
  }
}
