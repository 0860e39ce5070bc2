/* test_wire.c - frames: every type is encoded and decoded, and every kind of damage is refused.
 *
 * Oracles: the drawing of the header in wire.h and one golden frame, written here by hand; a CRC32C that
 * works one bit at a time; published CRC32C values (RFC 3720 §B.4). */
#include "core/base/rng.h"
#include "core/wire/wire.h"
#include "core/wire/peer_wire.h"
#include "core/wire/kept_wire.h"
#include "core/coll/coll_wire.h"
#include "core/reshard/reshard_wire.h"
#include "core/sched/sched_wire.h"

#include <math.h>
#include "../testing.h"

/* --- the types without segments, in a uniform table --- */

typedef struct codec {
  const char *name;
  size_t size;            /* of the struct */
  size_t text, text_room; /* offset and size of its text; 0 when there is none */
  uint32_t fixed; /* bytes of the meta without the text's characters and the entries of its list */
  uint32_t (*encode)(uint8_t *meta, const void *m);
  int (*decode)(const uint8_t *meta, uint32_t bytes, void *m);
  size_t count,
      entry; /* the list: offset of its number of entries, bytes of an entry in memory; 0 when there is none */
  uint32_t each, most; /* bytes of an entry in the meta; most entries */
} codec;

/* The list that is encoded, and the decoded one. */
static _Alignas(8) uint8_t entries[1 << 17], got_entries[sizeof entries];

#define CODEC_FUNCTIONS(name)                                              \
  static uint32_t encode_##name(uint8_t *meta, const void *m) {            \
    return mlfab__encode_##name(meta, m);                                  \
  }                                                                        \
  static int decode_##name(const uint8_t *meta, uint32_t bytes, void *m) { \
    return mlfab__decode_##name(meta, bytes, m);                           \
  }
MLFAB__WIRE_PAIRS(CODEC_FUNCTIONS)
MLFAB__PEER_PAIRS(CODEC_FUNCTIONS)
MLFAB__SCHED_PAIRS(CODEC_FUNCTIONS)
MLFAB__COLL_PAIRS(CODEC_FUNCTIONS)
MLFAB__RESHARD_PAIRS(CODEC_FUNCTIONS)
#define LIST_FUNCTIONS(name, type)                                             \
  static uint32_t encode_##name(uint8_t *meta, const void *m) {                \
    return mlfab__encode_##name(meta, m, (const type *)(const void *)entries); \
  }                                                                            \
  static int decode_##name(const uint8_t *meta, uint32_t bytes, void *m) {     \
    return mlfab__decode_##name(meta, bytes, m, (type *)(void *)got_entries);  \
  }
MLFAB__PEER_LISTS(LIST_FUNCTIONS)
MLFAB__SCHED_LISTS(LIST_FUNCTIONS)
MLFAB__COLL_LISTS(LIST_FUNCTIONS)
MLFAB__RESHARD_LISTS(LIST_FUNCTIONS)
LIST_FUNCTIONS(adopt, uint32_t)
LIST_FUNCTIONS(clock_record, uint32_t)
CODEC_FUNCTIONS(moved)
CODEC_FUNCTIONS(peer_state)
CODEC_FUNCTIONS(barrier_state)
CODEC_FUNCTIONS(barrier_worker_state)

#define CODEC(name, fixed) \
  { #name, sizeof(mlfab__##name), 0, 0, fixed, encode_##name, decode_##name, 0, 0, 0, 0 }
#define CODEC_LIST(name, fixed, n, type, each, most)                         \
  {                                                                          \
#name, sizeof(mlfab__##name), 0, 0, fixed, encode_##name, decode_##name, \
        offsetof(mlfab__##name, n), sizeof(type), each, most                 \
  }
#define CODEC_TEXT(name, text, fixed)                                                       \
  {                                                                                         \
#name, sizeof(mlfab__##name), offsetof(mlfab__##name, text),                            \
        sizeof(((mlfab__##name *)0)->text), fixed, encode_##name, decode_##name, 0, 0, 0, 0 \
  }

/* The lengths are counted from the members in wire.h: they pin the layout. */
static const codec codecs[] = {
    CODEC_TEXT(join, addresses, 12 * 4 + 2 * 8 + 2),
    CODEC(welcome, 4 * 4 + 8),
    CODEC_TEXT(refuse, text, 12 + 2),
    CODEC(hello, 6 * 4 + 2 * 8),
    CODEC(hello_ack, 9 * 4 + 12 * 8),
    CODEC(heartbeat, 8 + 4),
    CODEC_TEXT(bye, text, 4 + 8 + 2),
    CODEC_TEXT(member, addresses, 4 * 4 + 8 + 2),
    CODEC(define, 3 * 4 + 8 * 4 + 8 * 8 + 52),
    CODEC_TEXT(define_ack, text, 4 + 4 + 8 + 2 + 3 * 4 + 8 * 4 + 8 * 8 + 52 + 4 + 2 * 8),
    CODEC(chunk, 20),
    CODEC(grant, 20),
    CODEC(push_ack, 8 + 3 * 4 + 3 * 8),
    CODEC(resend, 4 + 9 * 8),
    CODEC(withdraw, 16),
    CODEC(model, 5 * 8 + 3 * 4),
    CODEC_TEXT(pull_fail, text, 8 + 4 + 2),
    CODEC_TEXT(waiting, text, 8 + 2 * 4 + 2),
    CODEC(pull_cancel, 8),
    CODEC(barrier, 2 * 4 + 4 * 8),
    CODEC(sync_ask, 8 + 52),
    CODEC_TEXT(sync_ack, text, 8 + 2 * 4 + 2),
    CODEC(done, 8),
    CODEC(meet, 2 * 4 + 8),
    CODEC(where, 4),
    CODEC(capacity, 3 * 8),
    CODEC(station, 4 * 4 + 8),
    CODEC(schedule, 3 * 8 + 5 * 4 + 8),
    CODEC(announce, 6 * 8 + 5 * 4),
    CODEC(report, 5 * 8 + 3 * 4),
    CODEC(via, 2 * 8 + 2 * 4),
    CODEC(group_end, 8),
    CODEC(release, 2 * 8),
    CODEC(group_fail, 2 * 8 + 2 * 4),
    CODEC(forward, 3 * 8),
    CODEC(hop_grant, 3 * 8 + 4),
    CODEC(hop_chunk, 4 * 8 + 4),
    CODEC(spread_fail, 2 * 8 + 2 * 4),
    CODEC(pull_via, 8 + 2 * 4),
    CODEC(hop_model, 5 * 8 + 5 * 4),
    CODEC(pull_done, 8),
    CODEC(progress, 8 + 2 * 4),
    CODEC_TEXT(reshard_done, text, 8 + 3 * 4 + 2),
    CODEC(frozen, 8),
    CODEC(stop, 8),
    CODEC_TEXT(moved, text, 4 * 4 + 2 * 8 + 2),
    CODEC(reshard_server_bytes, 4 * 4 + 3 * 8),
    CODEC(membership_ask, 5 * 4 + 10 * 8),
    CODEC(membership_ready, 3 * 4 + 2 * 8),
    CODEC(membership_go, 2 * 4 + 4 * 8),
    CODEC_TEXT(membership_over, text, 3 * 4 + 2),
    CODEC(membership_call, 2 * 4 + 8),
    CODEC_TEXT(membership_tell, text, 3 * 4 + 2 * 8 + 2),
    CODEC_TEXT(membership_missing, text, 4 * 4 + 8 + 2),
    CODEC(membership_leave, 2 * 4 + 8),
    CODEC_TEXT(membership_finish, text, 3 * 4 + 5 * 8 + 2),
    CODEC(coll, 4 * 4 + 5 * 8),
    CODEC(coll_ack, 4 + 2 * 8),
    CODEC_TEXT(membership_state, verdict.text, 11 * 4 + 9 * 8 + 2),
    CODEC(membership_worker, 10 * 4 + 12 * 8),
    CODEC(barrier_state, 8),
    CODEC(barrier_worker_state, 7 * 4 + 3 * 8),
    CODEC(peer_state, 8 * 4 + 8),
    CODEC_LIST(plan, 3 * 8 + 4, entries, mlfab__plan_entry, 44, MLFAB__PLAN_ENTRIES_MAX),
    CODEC_LIST(spread, 2 * 8 + 3 * 4, members, mlfab__spread_member, 20, MLFAB__GROUP_MEMBERS_MAX),
    CODEC_LIST(tree_ask, 2 * 8 + 2 * 4, nodes, uint32_t, 4, MLFAB__TREE_NODES_MAX),
    CODEC_LIST(tree_plan, 8 + 4, nodes, mlfab__tree_node, 12, MLFAB__TREE_NODES_MAX),
    CODEC_LIST(reshard_ask, 2 * 8 + 4, servers, uint32_t, 2, MLFAB__SLICES_MAX),
    CODEC_LIST(freeze, 2 * 4, servers, uint32_t, 2, MLFAB__SLICES_MAX),
    CODEC_LIST(move, 4 * 4, slices, uint32_t, 2, MLFAB__SLICES_MAX),
    CODEC_LIST(resume, 3 * 4, slices, uint32_t, 2, MLFAB__SLICES_MAX),
    CODEC_LIST(adopt, 188, words, uint32_t, 4, MLFAB__ADOPT_WORDS_MAX),
    CODEC_LIST(clock_record, 104, words, uint32_t, 4, MLFAB__RESHARD_SERVER_WORDS_MAX),
    CODEC_LIST(membership_list, 3 * 4, members, mlfab__membership_member, 40,
               MLFAB__MEMBERSHIP_MEMBERS_MAX),
    CODEC_LIST(membership_owed, 9 * 4 + 3 * 8 + 4, counts, uint64_t, 8,
               MLFAB__MEMBERSHIP_MEMBERS_MAX),
};
static const double not_finite[4] = {(double)NAN, -(double)NAN, (double)INFINITY,
                                     -(double)INFINITY};

static mlfab__rng seeded(uint64_t seed) {
  mlfab__rng prng;
  mlfab__rng_seed(&prng, seed);
  return prng;
}

static void random_bytes(mlfab__rng *prng, void *to, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) ((uint8_t *)to)[i] = (uint8_t)(mlfab__rng_next(prng) >> 56);
}

static void random_text(mlfab__rng *prng, char *text, size_t room) {
  size_t bytes = (size_t)mlfab__rng_below(prng, room);
  if (mlfab__rng_below(prng, 8) == 0) bytes = room - 1;
  memset(text, 0, room);
  for (size_t i = 0; i < bytes; i++) text[i] = (char)(1 + mlfab__rng_below(prng, 255));
}

/* The number of entries; 0: the type has no list. */
static uint32_t count_of(const codec *c, const uint8_t *m) {
  uint32_t n = 0;
  if (c->entry > 0) memcpy(&n, m + c->count, sizeof n);
  return n;
}

/* Of an entry in memory the first bytes travel: those of a u16 with values up to 65535, all but padding. */
static void random_list(mlfab__rng *prng, const codec *c, uint8_t *m, uint32_t n) {
  if (c->entry == 0) return;
  assert_true((n + 1) * c->entry <= sizeof entries);
  memcpy(m + c->count, &n, sizeof n);
  memset(entries, 0, sizeof entries);
  memset(got_entries, 0, sizeof got_entries);
  for (uint32_t i = 0; i < n; i++) random_bytes(prng, entries + i * c->entry, c->each);
}

static void random_struct(mlfab__rng *prng, const codec *c, uint8_t *m) {
  random_bytes(prng, m, c->size);
  if (c->text_room > 0) random_text(prng, (char *)m + c->text, c->text_room);
  random_list(prng, c, m, (uint32_t)mlfab__rng_below(prng, 30));
}

/* A copy that ends with the bytes, so that a sanitizer sees a read of one byte too many. */
static uint8_t *exact(const uint8_t *meta, uint32_t bytes) {
  uint8_t *copy = malloc(bytes + (size_t)(bytes == 0));
  assert_non_null(copy);
  return memcpy(copy, meta, bytes);
}

static int decode_exact(const codec *c, const uint8_t *meta, uint32_t bytes, void *m) {
  uint8_t *copy = exact(meta, bytes);
  int status = c->decode(copy, bytes, m);
  free(copy);
  return status;
}

static void put_u32(uint8_t *at, uint32_t value) {
  for (int b = 0; b < 4; b++) at[b] = (uint8_t)(value >> (8 * b));
}

/* Finds the bytes of the struct that travel by changing each one: all but padding. */
static void carried_bytes(const codec *c, uint8_t *mask) {
  static uint8_t zero[4096], poked[4096], plain[4096], meta[4096];
  size_t padding = 0;
  memset(zero, 0, sizeof zero);
  uint32_t bytes = c->encode(plain, zero);
  assert_int_equal(bytes, c->fixed);
  for (size_t i = 0; i < c->size; i++) {
    int in_text = i >= c->text && i < c->text + c->text_room;
    int in_count = c->entry > 0 && i >= c->count && i < c->count + sizeof(uint32_t);
    memset(poked, 0, sizeof poked);
    poked[i] = 1;
    mask[i] =
        in_text || in_count || c->encode(meta, poked) != bytes || memcmp(meta, plain, bytes) != 0;
    padding += !mask[i];
  }
  assert_int_equal(padding, c->size - c->text_room - (c->fixed - (c->text_room > 0 ? 2 : 0)));
  assert_true(padding < 32); /* the sizes and `sync` of options do not travel either */
}

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define LITTLE_ENDIAN_HOST 1
#else
#define LITTLE_ENDIAN_HOST 0
#endif

/* The meta by the description in wire.h: the members in their order, without padding. On a little-endian
 * host that is the struct's own memory, so this oracle needs no list of fields. */
static uint32_t expected_meta(const codec *c, const uint8_t *m, const uint8_t *mask,
                              uint8_t *meta) {
  uint32_t bytes = 0;
  for (size_t i = 0; i < c->size; i++) {
    if (c->text_room > 0 && i == c->text) {
      size_t length = strlen((const char *)m + i);
      meta[bytes++] = (uint8_t)length;
      meta[bytes++] = (uint8_t)(length >> 8);
      memcpy(meta + bytes, m + i, length);
      bytes += (uint32_t)length;
      i += c->text_room - 1;
    } else if (c->entry > 0 && i == c->count) {
      i += sizeof(uint32_t) - 1; /* it travels just before its entries */
    } else if (mask[i]) {
      meta[bytes++] = m[i];
    }
  }
  if (c->entry == 0) return bytes;
  memcpy(meta + bytes, m + c->count, sizeof(uint32_t));
  bytes += sizeof(uint32_t);
  for (uint32_t i = 0; i < count_of(c, m); i++, bytes += c->each)
    memcpy(meta + bytes, entries + i * c->entry, c->each);
  return bytes;
}

static uint8_t meta_a[MLFAB_META_MAX + 64], meta_b[MLFAB_META_MAX + 64];

/* One struct and its list: encoded as described, and decoded as the same. Returns the bytes of the meta. */
static uint32_t round_trip(const codec *c, const uint8_t *m, const uint8_t *mask) {
  static uint8_t back[4096];
  uint32_t bytes = c->encode(meta_a, m);
  assert_true(bytes > 0 && bytes <= MLFAB_META_MAX);
  if (LITTLE_ENDIAN_HOST) {
    assert_int_equal(expected_meta(c, m, mask, meta_b), bytes);
    assert_memory_equal(meta_a, meta_b, bytes);
  }
  memset(back, 0x5a, sizeof back);
  assert_int_equal(decode_exact(c, meta_a, bytes, back), 0);
  for (size_t i = 0; i < c->size; i++)
    if (mask[i] && m[i] != back[i]) fail_msg("%s: byte %zu differs", c->name, i);
  assert_memory_equal(entries, got_entries, count_of(c, m) * c->entry);
  assert_int_equal(c->encode(meta_b, back), bytes);
  assert_memory_equal(meta_a, meta_b, bytes);
  return bytes;
}

TEST(test_round_trip) {
  static uint8_t m[4096], mask[4096];
  mlfab__rng prng = seeded(1);
  for (size_t k = 0; k < MLFAB__COUNT(codecs); k++) {
    carried_bytes(&codecs[k], mask);
    for (int round = 0; round < 200; round++) {
      random_struct(&prng, &codecs[k], m);
      round_trip(&codecs[k], m, mask);
    }
  }
}

TEST(test_every_cut) {
  static uint8_t m[4096], back[4096];
  mlfab__rng prng = seeded(2);
  for (size_t k = 0; k < MLFAB__COUNT(codecs); k++) {
    for (int round = 0; round < 5; round++) {
      random_struct(&prng, &codecs[k], m);
      uint32_t bytes = codecs[k].encode(meta_a, m);
      memset(meta_a + bytes, 0, 16);
      for (uint32_t cut = 0; cut < bytes + 9; cut++) {
        int expected = cut == bytes ? 0 : MLFAB_ERR_FRAME;
        assert_int_equal(decode_exact(&codecs[k], meta_a, cut, back), expected);
      }
    }
  }
}

/* The longest lists fit into a meta; longer ones are not encoded, and a count that lies is refused. */
TEST(test_list_limits) {
  static const uint32_t counts[] = {2u,          4u,          512u,        513u,
                                    1025u,       1400u,       1401u,       4097u,
                                    0x0aaaaaabu, 0x10000000u, 0x80000000u, UINT32_MAX};
  static uint8_t m[4096], mask[4096], back[4096];
  mlfab__rng prng = seeded(21);
  for (size_t k = 0; k < MLFAB__COUNT(codecs); k++) {
    const codec *c = &codecs[k];
    if (c->entry == 0) continue;
    carried_bytes(c, mask);
    random_struct(&prng, c, m);
    random_list(&prng, c, m, c->most);
    round_trip(c, m, mask);
    random_list(&prng, c, m, c->most + 1);
    assert_int_equal(c->encode(meta_a, m), 0);
    random_list(&prng, c, m, 3);
    uint32_t bytes = round_trip(c, m, mask);
    for (size_t i = 0; i < MLFAB__COUNT(counts); i++) {
      put_u32(meta_a + c->fixed - 4, counts[i]);
      assert_int_equal(decode_exact(c, meta_a, bytes, back), MLFAB_ERR_FRAME);
    }
  }
}

/* Who decodes without room for the list gets its length. */
TEST(test_list_without_room) {
  mlfab__tree_ask ask = {11, 22, 33, 44}, got_ask;
  mlfab__tree_plan plan = {11, 44}, got_plan;
  uint32_t bytes = mlfab__encode_tree_ask(meta_a, &ask, (uint32_t *)(void *)entries);
  assert_int_equal(mlfab__decode_tree_ask(meta_a, bytes, &got_ask, NULL), 0);
  assert_memory_equal(&got_ask, &ask, sizeof ask);
  bytes = mlfab__encode_tree_plan(meta_a, &plan, (mlfab__tree_node *)(void *)entries);
  assert_int_equal(mlfab__decode_tree_plan(meta_a, bytes, &got_plan, NULL), 0);
  assert_true(got_plan.number == 11 && got_plan.nodes == 44);
}

TEST(test_texts) {
  mlfab__bye bye = {0}, back;
  uint8_t meta[4096];
  memset(bye.text, 'a', sizeof bye.text - 1);
  uint32_t bytes = mlfab__encode_bye(meta, &bye);
  assert_int_equal(bytes, 4 + 8 + 2 + 255);
  assert_int_equal(mlfab__decode_bye(meta, bytes, &back), 0);
  assert_memory_equal(back.text, bye.text, sizeof bye.text);

  /* Wrong lengths; with the first there would be no room for the terminating zero. */
  static const uint32_t lengths[] = {256, 254, 65535};
  meta[bytes] = 'a';
  for (uint32_t i = 0; i < 3; i++) {
    meta[12] = (uint8_t)lengths[i];
    meta[13] = (uint8_t)(lengths[i] >> 8);
    assert_int_equal(mlfab__decode_bye(meta, bytes + (i == 0), &back), MLFAB_ERR_FRAME);
  }
  /* A zero inside a text. */
  mlfab__encode_bye(meta, &bye);
  meta[100] = 0;
  assert_int_equal(mlfab__decode_bye(meta, bytes, &back), MLFAB_ERR_FRAME);
  /* An array without a terminating zero is cut. */
  bye.text[sizeof bye.text - 1] = 'a';
  bytes = mlfab__encode_bye(meta, &bye);
  assert_int_equal(mlfab__decode_bye(meta, bytes, &back), 0);
  assert_int_equal(strlen(back.text), sizeof bye.text - 1);
}

/* --- pushes and pulls --- */

static mlfab__segment segments[MLFAB__SEGMENTS_MAX], got_segments[MLFAB__SEGMENTS_MAX];
static uint64_t versions[MLFAB__SLICES_MAX], got_versions[MLFAB__SLICES_MAX];

static uint64_t random_segments(mlfab__rng *prng, uint32_t count) {
  uint64_t sum = 0, at = mlfab__rng_below(prng, 1000);
  for (uint32_t i = 0; i < count; i++) {
    segments[i].offset = at;
    segments[i].bytes = 1 + mlfab__rng_below(prng, 100000);
    sum += segments[i].bytes;
    at += segments[i].bytes + 1 + mlfab__rng_below(prng, 3);
  }
  return sum;
}

static mlfab__push random_push(mlfab__rng *prng, uint32_t segment_count, uint32_t version_count) {
  mlfab__push m = {0};
  m.seq = mlfab__rng_next(prng) >> 1;
  m.members = 1 + (uint32_t)mlfab__rng_below(prng, 4096);
  m.generation = (uint32_t)mlfab__rng_next(prng);
  m.flags = (uint32_t)mlfab__rng_below(prng, 8);
  m.progress = mlfab__rng_next(prng);
  m.scale = mlfab__rng_unit(prng) - 0.5;
  m.norm = mlfab__rng_unit(prng);
  m.parts = (uint32_t)mlfab__rng_next(prng);
  m.segments = segment_count;
  m.versions = version_count;
  m.bytes = random_segments(prng, segment_count);
  m.eager = (uint32_t)mlfab__rng_below(prng, m.bytes + 1);
  for (uint32_t i = 0; i < version_count; i++) versions[i] = mlfab__rng_next(prng);
  return m;
}

static int decode_push_exact(const uint8_t *meta, uint32_t bytes, mlfab__push *m) {
  uint8_t *copy = exact(meta, bytes);
  int status = mlfab__decode_push(copy, bytes, m, got_segments, got_versions);
  free(copy);
  return status;
}

TEST(test_push_round_trip) {
  mlfab__rng prng = seeded(3);
  for (int round = 0; round < 500; round++) {
    uint32_t segment_count = (uint32_t)mlfab__rng_below(&prng, round % 10 == 0 ? 2049 : 20);
    uint32_t version_count =
        segment_count == 0 ? 0 : 1 + (uint32_t)mlfab__rng_below(&prng, round % 7 ? 10 : 4000);
    mlfab__push m = random_push(&prng, segment_count, version_count), back;
    uint32_t bytes = mlfab__encode_push(meta_a, &m, segments, versions);
    memset(&back, 0, sizeof back);
    assert_int_equal(bytes, 68 + 16 * segment_count + 8 * version_count);
    if (LITTLE_ENDIAN_HOST) assert_memory_equal(meta_a, &m, offsetof(mlfab__push, segments));
    assert_int_equal(decode_push_exact(meta_a, bytes, &back), 0);
    assert_memory_equal(&m, &back, offsetof(mlfab__push, versions) + sizeof m.versions);
    assert_memory_equal(segments, got_segments, segment_count * sizeof segments[0]);
    assert_memory_equal(versions, got_versions, version_count * sizeof versions[0]);
    assert_int_equal(mlfab__encode_push(meta_b, &back, got_segments, got_versions), bytes);
    assert_memory_equal(meta_a, meta_b, bytes);
    if (bytes > 400) continue;
    memset(meta_a + bytes, 0, 16);
    for (uint32_t cut = 0; cut < bytes + 9; cut++)
      if (cut != bytes) assert_int_equal(decode_push_exact(meta_a, cut, &back), MLFAB_ERR_FRAME);
  }
}

TEST(test_push_limits) {
  static const uint32_t beyond[][2] = {
      {MLFAB__SEGMENTS_MAX, MLFAB__SLICES_MAX - 8}, /* no meta has so much */
      {MLFAB__SEGMENTS_MAX + 1, 1},
      {1, MLFAB__SLICES_MAX + 1}};
  mlfab__rng prng = seeded(4);
  mlfab__push m = random_push(&prng, MLFAB__SEGMENTS_MAX, MLFAB__SLICES_MAX - 9);
  assert_int_equal(mlfab__encode_push(meta_a, &m, segments, versions), MLFAB_META_MAX - 4);
  for (size_t i = 0; i < MLFAB__COUNT(beyond); i++) {
    m.segments = beyond[i][0];
    m.versions = beyond[i][1];
    assert_int_equal(mlfab__encode_push(meta_a, &m, segments, versions), 0);
  }
}

/* Encodes an invalid frame, and expects a refusal. */
static void refuse_push(const mlfab__push *m) {
  mlfab__push back;
  uint32_t bytes = mlfab__encode_push(meta_a, m, segments, versions);
  assert_true(bytes > 0);
  assert_int_equal(decode_push_exact(meta_a, bytes, &back), MLFAB_ERR_FRAME);
}

TEST(test_push_refused) {
  mlfab__rng prng = seeded(5);
  mlfab__push good = random_push(&prng, 4, 2), m;
  mlfab__segment keep[4];
  memcpy(keep, segments, sizeof keep);
  assert_int_equal(
      decode_push_exact(meta_a, mlfab__encode_push(meta_a, &good, segments, versions), &m), 0);

  for (int i = 0; i < 4; i++) m = good, m.scale = not_finite[i], refuse_push(&m);
  m = good, m.members = 0, refuse_push(&m);
  m = good, m.members = 4097, refuse_push(&m);
  m = good, m.members = UINT32_MAX, refuse_push(&m);
  m = good, m.seq = UINT64_MAX - m.members + 1, refuse_push(&m);
  m = good, m.bytes++, refuse_push(&m);
  m = good, m.bytes--, refuse_push(&m);
  m = good, m.eager = (uint32_t)m.bytes + 1, refuse_push(&m);
  m = good, m.versions = 0, refuse_push(&m);

  segments[2].offset = segments[1].offset + segments[1].bytes; /* touching */
  refuse_push(&good);
  segments[2].offset--; /* overlapping */
  refuse_push(&good);
  segments[2].offset = segments[0].offset; /* backwards */
  refuse_push(&good);
  memcpy(segments, keep, sizeof keep);
  m = good, m.bytes -= segments[1].bytes, segments[1].bytes = 0; /* empty */
  m.eager = 0;
  refuse_push(&m);
  memcpy(segments, keep, sizeof keep);
  m = good, m.bytes -= segments[3].bytes;
  segments[3].bytes = UINT64_MAX - segments[3].offset + 1; /* ends beyond 2^64 */
  m.bytes += segments[3].bytes;
  refuse_push(&m);
  segments[3].bytes--; /* ends at 2^64 - 1: allowed */
  m.bytes--;
  m.eager = 0;
  assert_int_equal(
      decode_push_exact(meta_a, mlfab__encode_push(meta_a, &m, segments, versions), &m), 0);
}

/* Counts that overflow 32 bits when multiplied by the size of an entry, and wrong counts. */
TEST(test_counts_that_lie) {
  static const uint32_t counts[] = {5u,          4096u,       4097u,       0x10000000u, 0x10000004u,
                                    0x20000002u, 0x80000000u, 0xfffffffcu, 0xffffffffu};
  mlfab__rng prng = seeded(6);
  mlfab__push push = random_push(&prng, 4, 2), back;
  mlfab__pull pull = {1, 2, 3, 1, 4, 2}, pull_back;
  uint32_t bytes;
  for (size_t i = 0; i < MLFAB__COUNT(counts); i++) {
    for (int place = 0; place < 2; place++) {
      bytes = mlfab__encode_push(meta_a, &push, segments, versions);
      put_u32(meta_a + (place == 0 ? 60 : 64 + 64), counts[i]);
      assert_int_equal(decode_push_exact(meta_a, bytes, &back), MLFAB_ERR_FRAME);
    }
    for (int place = 0; place < 2; place++) {
      bytes = mlfab__encode_pull(meta_a, &pull, segments, versions);
      put_u32(meta_a + (place == 0 ? 24 : 28 + 64), counts[i]);
      assert_int_equal(mlfab__decode_pull(meta_a, bytes, &pull_back, got_segments, got_versions),
                       MLFAB_ERR_FRAME);
    }
  }
  /* All entries are present, but more than allowed. */
  memset(meta_a, 0, sizeof meta_a);
  for (uint32_t i = 0; i < MLFAB__SEGMENTS_MAX + 1; i++) {
    meta_a[28 + 16 * i] = (uint8_t)(2 * i);
    meta_a[29 + 16 * i] = (uint8_t)(2 * i >> 8);
    meta_a[36 + 16 * i] = 1;
  }
  meta_a[25] = MLFAB__SEGMENTS_MAX >> 8;
  bytes = 32 + 16 * MLFAB__SEGMENTS_MAX;
  memset(meta_a + bytes - 4, 0, 4);
  assert_int_equal(mlfab__decode_pull(meta_a, bytes, &pull_back, got_segments, got_versions), 0);
  meta_a[24] = 1;
  assert_int_equal(mlfab__decode_pull(meta_a, bytes + 16, &pull_back, got_segments, got_versions),
                   MLFAB_ERR_FRAME);
}

TEST(test_pull) {
  mlfab__rng prng = seeded(7);
  for (int round = 0; round < 200; round++) {
    mlfab__pull m = {mlfab__rng_next(&prng),
                     mlfab__rng_next(&prng),
                     (uint32_t)mlfab__rng_next(&prng),
                     (uint32_t)mlfab__rng_next(&prng),
                     (uint32_t)mlfab__rng_below(&prng, round % 10 ? 20 : 2049),
                     (uint32_t)mlfab__rng_below(&prng, round % 10 ? 9 : 4000)};
    mlfab__pull back = {0};
    random_segments(&prng, m.segments);
    for (uint32_t i = 0; i < m.sinces; i++) versions[i] = mlfab__rng_next(&prng);
    uint32_t bytes = mlfab__encode_pull(meta_a, &m, segments, versions);
    assert_int_equal(bytes, 32 + 16 * m.segments + 8 * m.sinces);
    if (LITTLE_ENDIAN_HOST) assert_memory_equal(meta_a, &m, 24);
    assert_int_equal(mlfab__decode_pull(meta_a, bytes, &back, got_segments, got_versions), 0);
    assert_memory_equal(&m, &back, offsetof(mlfab__pull, sinces) + sizeof m.sinces);
    assert_memory_equal(segments, got_segments, m.segments * sizeof segments[0]);
    assert_memory_equal(versions, got_versions, m.sinces * sizeof versions[0]);
    for (uint32_t cut = 0; cut < bytes && bytes < 400; cut++)
      assert_int_equal(mlfab__decode_pull(meta_a, cut, &back, got_segments, got_versions),
                       MLFAB_ERR_FRAME);
    if (m.segments < 2) continue;
    segments[1].offset = segments[0].offset;
    bytes = mlfab__encode_pull(meta_a, &m, segments, versions);
    assert_int_equal(mlfab__decode_pull(meta_a, bytes, &back, got_segments, got_versions),
                     MLFAB_ERR_FRAME);
  }
  /* More than allowed, and more than a meta holds. */
  mlfab__pull m = {1, 2, 3, 0, MLFAB__SEGMENTS_MAX + 1, 0};
  assert_int_equal(mlfab__encode_pull(meta_a, &m, segments, versions), 0);
  m.segments = MLFAB__SEGMENTS_MAX;
  m.sinces = MLFAB__SLICES_MAX;
  assert_int_equal(mlfab__encode_pull(meta_a, &m, segments, versions), 0);
}

/* --- groups: members, then segments --- */

static mlfab__group_member members[MLFAB__GROUP_MEMBERS_MAX + 1],
    got_members[MLFAB__GROUP_MEMBERS_MAX];

static mlfab__group random_group(mlfab__rng *prng, uint32_t n, uint32_t segment_count) {
  mlfab__group m = {0};
  random_bytes(prng, &m, sizeof m);
  random_bytes(prng, members, n * sizeof *members);
  for (uint32_t i = 0; i < n; i++) members[i].weight = mlfab__rng_unit(prng) - 0.5;
  m.members = n;
  m.segments = segment_count;
  m.bytes = random_segments(prng, segment_count);
  return m;
}

static int decode_group_exact(uint32_t bytes, mlfab__group *m) {
  uint8_t *copy = exact(meta_a, bytes);
  int status = mlfab__decode_group(copy, bytes, m, got_members, got_segments);
  free(copy);
  return status;
}

TEST(test_groups) {
  mlfab__rng prng = seeded(20);
  mlfab__group back;
  for (int round = 0; round < 100; round++) {
    uint32_t n = 1 + (uint32_t)mlfab__rng_below(&prng, 8), segment_count = (uint32_t)round % 5;
    if (round % 10 == 0) n = MLFAB__GROUP_MEMBERS_MAX, segment_count = MLFAB__SEGMENTS_MAX;
    mlfab__group m = random_group(&prng, n, segment_count);
    uint32_t bytes = mlfab__encode_group(meta_a, &m, members, segments);
    assert_int_equal(bytes, 36 + 24 * n + 4 + 16 * segment_count);
    if (LITTLE_ENDIAN_HOST) {
      assert_memory_equal(meta_a, &m, 36);
      assert_memory_equal(meta_a + 36, members, 24 * n);
    }
    assert_int_equal(decode_group_exact(bytes, &back), 0);
    assert_memory_equal(&m, &back, offsetof(mlfab__group, segments) + sizeof m.segments);
    assert_memory_equal(members, got_members, n * sizeof *members);
    assert_memory_equal(segments, got_segments, segment_count * sizeof *segments);
    memset(meta_a + bytes, 0, 16);
    for (uint32_t cut = 0; cut < bytes + 9 && bytes <= 400; cut++)
      if (cut != bytes) assert_int_equal(decode_group_exact(cut, &back), MLFAB_ERR_FRAME);
    m.members = MLFAB__GROUP_MEMBERS_MAX + 1;
    assert_int_equal(mlfab__encode_group(meta_a, &m, members, segments), 0);
    m.members = 1;
    m.segments = MLFAB__SEGMENTS_MAX + 1;
    assert_int_equal(mlfab__encode_group(meta_a, &m, members, segments), 0);
  }
}

static void refuse_group(const mlfab__group *m) {
  mlfab__group back;
  uint32_t bytes = mlfab__encode_group(meta_a, m, members, segments);
  assert_true(bytes > 0);
  assert_int_equal(decode_group_exact(bytes, &back), MLFAB_ERR_FRAME);
}

TEST(test_groups_refused) {
  static const uint32_t counts[] = {4u, 512u, 513u, 0x0aaaaaabu, 0x10000000u, 0x80000000u, ~0u};
  mlfab__rng prng = seeded(22);
  mlfab__group m = random_group(&prng, 0, 2), back;
  refuse_group(&m); /* without members */
  m = random_group(&prng, 3, 3);
  for (int i = 0; i < 4; i++) members[2].weight = not_finite[i], refuse_group(&m);
  members[2].weight = 1e300;
  m.bytes++;
  refuse_group(&m); /* not the sum of its segments */
  m.bytes--;
  uint32_t bytes = mlfab__encode_group(meta_a, &m, members, segments);
  assert_int_equal(decode_group_exact(bytes, &back), 0);
  for (size_t i = 0; i < MLFAB__COUNT(counts); i++) {
    put_u32(meta_a + 32, counts[i]);
    assert_int_equal(decode_group_exact(bytes, &back), MLFAB_ERR_FRAME);
  }
  segments[2].offset = segments[1].offset + segments[1].bytes;
  refuse_group(&m); /* segments that touch */
}

/* --- lists in bulks --- */

TEST(test_bulk_lists) {
  mlfab__rng prng = seeded(8);
  mlfab__member_info m, back;
  mlfab__tensor_info tensor = {0x01020304u, 3, 0x05060708090a0b0cu}, tensor_back;
  static const uint8_t tensor_wire[16] = {4, 3, 2, 1, 3, 0, 0, 0, 12, 11, 10, 9, 8, 7, 6, 5};
  uint8_t at[MLFAB__TENSOR_INFO_BYTES];
  for (int round = 0; round < 300; round++) {
    random_bytes(&prng, &m, sizeof m);
    random_text(&prng, m.addresses, sizeof m.addresses);
    uint32_t bytes = 30 + (uint32_t)strlen(m.addresses);
    assert_int_equal(mlfab__encode_member_info(meta_a, bytes - 1, &m), 0);
    assert_int_equal(mlfab__encode_member_info(meta_a, bytes, &m), bytes);
    if (LITTLE_ENDIAN_HOST) assert_memory_equal(meta_a, &m, 20);
    assert_int_equal(mlfab__decode_member_info(meta_a, bytes + 100, &back), bytes);
    assert_memory_equal(&m, &back, 20);
    assert_true(m.nonce == back.nonce && !strcmp(m.addresses, back.addresses));
    for (uint32_t cut = 0; cut < bytes; cut++)
      assert_int_equal(mlfab__decode_member_info(meta_a, cut, &back), 0);
  }
  mlfab__encode_tensor_info(at, &tensor);
  assert_memory_equal(at, tensor_wire, sizeof at);
  mlfab__decode_tensor_info(at, &tensor_back);
  assert_memory_equal(&tensor, &tensor_back, sizeof tensor);
}

/* --- the header --- */

/* A frame of a random type with random bytes: sealing does not read the meta. */
typedef struct frame {
  uint8_t head[64 + 300];
  uint8_t bulk[64];
  mlfab__header header;
} frame;

static const uint8_t bulk_types[] = {
    MLFAB__MOMENT, MLFAB__WELCOME, MLFAB__DEFINE,    MLFAB__PUSH,      MLFAB__CHUNK,
    MLFAB__MODEL,  MLFAB__FORWARD, MLFAB__HOP_CHUNK, MLFAB__HOP_MODEL, MLFAB__RESHARD_SERVER,
    MLFAB__COLL,   MLFAB__ADOPT,   MLFAB__VIEW};

static void random_frame(mlfab__rng *prng, frame *f, int with_bulk) {
  mlfab__header *h = &f->header;
  random_bytes(prng, f, sizeof *f);
  h->protocol = MLFAB_PROTOCOL;
  do h->type = (uint8_t)(1 + mlfab__rng_below(prng, MLFAB__FRAME_TYPES - 1));
  while (!strcmp(mlfab__frame_name(h->type), "UNKNOWN"));
  h->meta_bytes = (uint32_t)mlfab__rng_below(prng, 100);
  h->flags = MLFAB__WIRE_BULK_CRC;
  h->bulk_bytes = 0;
  if (with_bulk) {
    h->type = bulk_types[mlfab__rng_below(prng, sizeof bulk_types)];
    h->bulk_bytes = 1 + (uint32_t)mlfab__rng_below(prng, sizeof f->bulk);
  }
  mlfab__wire_seal(f->head, h, f->bulk);
}

/* The steps of a receiver. */
static int receive(const frame *f) {
  uint32_t head_bytes, bulk_bytes;
  int status = mlfab_frame_check(f->head, &head_bytes, &bulk_bytes);
  if (status) return status;
  if (head_bytes != 64 + f->header.meta_bytes || bulk_bytes != f->header.bulk_bytes) return -1000;
  return mlfab_frame_verify(f->head, head_bytes, f->bulk, bulk_bytes);
}

TEST(test_golden_frame) {
  static const uint8_t golden[76] = {
      0x4d, 0x4c, 0x46, 0x42, 11,   6,    0,    0,    0,    0,    0,    0,    0,
      0,    0,    0,    12,   0,    0,    0,    0,    0,    0,    0,    0x18, 0x17,
      0x16, 0x15, 0x14, 0x13, 0x12, 0x11, 0x24, 0x23, 0x22, 0x21, 0x34, 0x33, 0x32,
      0x31, 0x44, 0x43, 0x42, 0x41, 0,    0,    0,    0,    0,    0,    0,    0,
      0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0,    0x58,
      0x57, 0x56, 0x55, 0x54, 0x53, 0x52, 0x51, 2,    0,    0,    0};
  mlfab__heartbeat m = {0x5152535455565758u, MLFAB__BEAT_ANSWER};
  uint8_t head[76], expected[76];
  uint32_t head_bytes, bulk_bytes;
  mlfab__header h = {.type = MLFAB__HEARTBEAT,
                     .meta_bytes = mlfab__encode_heartbeat(head + 64, &m),
                     .job = 0x1112131415161718u,
                     .epoch = 0x21222324u,
                     .sender = 0x31323334u,
                     .incarnation = 0x41424344u},
                back;
  mlfab__wire_seal(head, &h, NULL);

  memcpy(expected, golden, sizeof golden);
  put_u32(expected + 12, mlfab__crc32c_with(0, 0, golden + 64, 12));
  put_u32(expected + 8, mlfab__crc32c_with(0, 0, expected, 64));
  assert_memory_equal(head, expected, sizeof head);

  assert_int_equal(mlfab_frame_check(head, &head_bytes, &bulk_bytes), 0);
  assert_int_equal(head_bytes, 76);
  assert_int_equal(bulk_bytes, 0);
  assert_int_equal(mlfab_frame_verify(head, 76, NULL, 0), 0);
  mlfab__wire_open(head, &back);
  assert_int_equal(back.protocol, MLFAB_PROTOCOL);
  assert_true(back.type == h.type && back.flags == 0 && back.job == h.job);
  assert_true(back.epoch == h.epoch && back.sender == h.sender);
  assert_true(back.incarnation == h.incarnation && back.meta_bytes == 12 && back.bulk_bytes == 0);
}

/* Frames of every type may have a tag, but none without the flag; the header's checksum covers it. */
TEST(test_tags) {
  static const uint8_t tag[MLFAB__TAG_BYTES] = {0x18, 1, 2,  3,  4,  5,  6,  7,
                                                8,    9, 10, 11, 12, 13, 14, 0x21};
  static const uint8_t none[MLFAB__TAG_BYTES] = {0};
  mlfab__rng prng = seeded(12);
  frame f;
  random_frame(&prng, &f, 0);
  for (uint32_t type = 1; type < MLFAB__FRAME_TYPES; type++) {
    uint8_t sealed[MLFAB_HEADER_BYTES], bare[MLFAB_HEADER_BYTES];
    if (!strcmp(mlfab__frame_name((uint8_t)type), "UNKNOWN")) continue;
    f.header.type = (uint8_t)type;
    f.header.flags = 0;
    mlfab__wire_seal(f.head, &f.header, NULL);
    mlfab__wire_tag(f.head, tag);
    assert_int_equal(receive(&f), MLFAB_ERR_FRAME);
    mlfab__wire_seal(f.head, &f.header, NULL);
    mlfab__wire_code(f.head, 1u << 31);
    mlfab__wire_tag(f.head, none);
    assert_int_equal(receive(&f), MLFAB_ERR_FRAME);
    f.header.flags = MLFAB__WIRE_TAGGED;
    mlfab__wire_seal(f.head, &f.header, NULL);
    assert_int_equal(receive(&f), 0);
    mlfab__wire_code(f.head, 0x12345678);
    memcpy(sealed, f.head, sizeof sealed);
    mlfab__wire_tag(f.head, tag);
    assert_int_equal(receive(&f), 0);
    assert_memory_equal(f.head + MLFAB__TAG_AT, tag, sizeof tag);
    mlfab__header back;
    mlfab__wire_open(f.head, &back);
    assert_int_equal(back.code, 0x12345678);
    memcpy(bare, f.head, sizeof bare);
    mlfab__wire_untag(sealed);
    mlfab__wire_untag(bare);
    assert_memory_equal(bare, sealed, sizeof bare);
    f.head[MLFAB__TAG_AT] ^= 1;
    assert_int_equal(receive(&f), MLFAB_ERR_CRC);
  }
}

TEST(test_every_bit) {
  mlfab__rng prng = seeded(9);
  frame f;
  for (int round = 0; round < 60; round++) {
    random_frame(&prng, &f, round % 2);
    assert_int_equal(receive(&f), 0);
    for (uint32_t bit = 0; bit < 8 * (64 + f.header.meta_bytes); bit++) {
      f.head[bit / 8] ^= (uint8_t)(1u << bit % 8);
      assert_int_not_equal(receive(&f), 0);
      f.head[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    for (uint32_t bit = 0; bit < 8 * f.header.bulk_bytes; bit++) {
      f.bulk[bit / 8] ^= (uint8_t)(1u << bit % 8);
      assert_int_equal(receive(&f), MLFAB_ERR_CRC);
      f.bulk[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_int_equal(receive(&f), 0);
  }
}

TEST(test_coverage_of_bulk) {
  mlfab__rng prng = seeded(10);
  frame f;
  random_frame(&prng, &f, 1);
  uint32_t head_bytes = 64 + f.header.meta_bytes;
  /* Without the flag the bulk is not checked. */
  f.header.flags = 0;
  mlfab__wire_seal(f.head, &f.header, f.bulk);
  f.bulk[0] ^= 1;
  assert_int_equal(receive(&f), 0);
  /* A ghost is recognised by its pointer; nothing of it is checked, with or without the flag. */
  f.header.flags = MLFAB__WIRE_BULK_CRC;
  f.header.bulk_bytes = MLFAB_BULK_MAX;
  mlfab__wire_seal(f.head, &f.header, NULL);
  assert_int_equal(mlfab_frame_verify(f.head, head_bytes, NULL, MLFAB_BULK_MAX), 0);
  /* Lengths that differ from the header's. */
  assert_int_equal(mlfab_frame_verify(f.head, head_bytes, NULL, 1), MLFAB_ERR_CRC);
  assert_int_equal(mlfab_frame_verify(f.head, head_bytes + 1, NULL, MLFAB_BULK_MAX), MLFAB_ERR_CRC);
  assert_int_equal(mlfab_frame_verify(f.head, 63, NULL, MLFAB_BULK_MAX), MLFAB_ERR_CRC);
  assert_int_equal(mlfab_frame_verify(f.head, 0, NULL, MLFAB_BULK_MAX), MLFAB_ERR_CRC);
  uint8_t *head =
      exact((const uint8_t[10]){0}, 10); /* shorter than a header: it is not read as one */
  assert_int_equal(mlfab_frame_verify(head, 10, NULL, 0), MLFAB_ERR_CRC);
  free(head);
  assert_int_equal(mlfab_frame_verify(NULL, 64, NULL, 0), MLFAB_ERR_ARGUMENT);
}

/* Writes a number into the header and updates its checksum, as a faulty sender would, not a noisy line. */
static int check_with(const frame *f, size_t at, size_t bytes, uint64_t value) {
  uint8_t head[64];
  uint32_t head_bytes = 7, bulk_bytes = 7;
  memcpy(head, f->head, sizeof head);
  for (size_t b = 0; b < bytes; b++) head[at + b] = (uint8_t)(value >> (8 * b));
  memset(head + 8, 0, 4);
  put_u32(head + 8, mlfab__crc32c(0, head, sizeof head));
  int status = mlfab_frame_check(head, &head_bytes, &bulk_bytes);
  if (status != 0) assert_true(head_bytes == 7 && bulk_bytes == 7); /* set on success only */
  return status;
}

TEST(test_wrong_headers) {
  mlfab__rng prng = seeded(11);
  frame f;
  uint32_t x;
  random_frame(&prng, &f, 1);
  assert_int_equal(check_with(&f, 0, 4, MLFAB__MAGIC), 0);
  assert_int_equal(check_with(&f, 0, 4, MLFAB__MAGIC + 1), MLFAB_ERR_FRAME);
  assert_int_equal(check_with(&f, 4, 1, MLFAB_PROTOCOL - 1), MLFAB_ERR_PROTOCOL_OLDER);
  assert_int_equal(check_with(&f, 4, 1, MLFAB_PROTOCOL + 1), MLFAB_ERR_PROTOCOL_NEWER);
  assert_int_equal(check_with(&f, 4, 1, 255), MLFAB_ERR_PROTOCOL_NEWER);
  for (unsigned type = 0; type < 256; type++) {
    int with_bulk = memchr(bulk_types, (int)type, sizeof bulk_types) != NULL;
    assert_int_equal(check_with(&f, 5, 1, type), with_bulk ? 0 : MLFAB_ERR_FRAME);
    if (type < 1 || type >= MLFAB__FRAME_TYPES)
      assert_string_equal(mlfab__frame_name((uint8_t)type), "UNKNOWN");
  }
  /* Without a bulk and a tag every known type passes, and no other. */
  random_frame(&prng, &f, 0);
  mlfab__wire_seal(f.head, &f.header, NULL);
  for (unsigned type = 0; type < 256; type++) {
    int known = strcmp(mlfab__frame_name((uint8_t)type), "UNKNOWN") != 0;
    assert_int_equal(check_with(&f, 5, 1, type), known ? 0 : MLFAB_ERR_FRAME);
  }
  random_frame(&prng, &f, 1);
  for (unsigned flags = 4; flags < 65536; flags += 1 + flags % 7)
    assert_int_equal(check_with(&f, 6, 2, flags), MLFAB_ERR_FRAME);
  for (size_t at = 44; at < 64; at++) assert_int_equal(check_with(&f, at, 1, 1), MLFAB_ERR_FRAME);
  assert_int_equal(check_with(&f, 16, 4, MLFAB_META_MAX), 0);
  assert_int_equal(check_with(&f, 16, 4, MLFAB_META_MAX + 1), MLFAB_ERR_LIMIT);
  assert_int_equal(check_with(&f, 16, 4, 0xffffffc0u), MLFAB_ERR_LIMIT); /* + 64 wraps to 0 */
  assert_int_equal(check_with(&f, 20, 4, MLFAB_BULK_MAX), 0);
  assert_int_equal(check_with(&f, 20, 4, MLFAB_BULK_MAX + 1), MLFAB_ERR_LIMIT);
  assert_int_equal(check_with(&f, 20, 4, 0xffffffffu), MLFAB_ERR_LIMIT);

  /* Another protocol version is reported even if the rest of its header is different. */
  f.head[4] = MLFAB_PROTOCOL + 1;
  f.head[40] ^= 1;
  assert_int_equal(receive(&f), MLFAB_ERR_PROTOCOL_NEWER);
  f.head[4] = MLFAB_PROTOCOL;
  assert_int_equal(receive(&f), MLFAB_ERR_CRC);
  assert_int_equal(mlfab_frame_check(NULL, &x, &x), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_frame_check(f.head, NULL, &x), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_frame_check(f.head, &x, NULL), MLFAB_ERR_ARGUMENT);
  assert_string_equal(mlfab__frame_name(MLFAB__PUSH_ACK), "PUSH_ACK");
}

/* --- checksum and hash --- */

static uint32_t crc_bit_by_bit(uint32_t crc, const uint8_t *at, size_t bytes) {
  crc = ~crc;
  for (size_t i = 0; i < bytes; i++) {
    crc ^= at[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  return ~crc;
}

TEST(test_crc_known) {
  uint8_t buffer[32];
  static const uint32_t known[4] = {0x8a9136aau, 0x62a8ab43u, 0x46dd794eu, 0x113fdb5cu};
  for (int level = 0; level <= mlfab__crc32c_level(); level++) {
    for (int k = 0; k < 4; k++) { /* zeros, ones, up, down */
      for (int i = 0; i < 32; i++)
        buffer[i] = (uint8_t)(k == 0 ? 0 : k == 1 ? 255 : k == 2 ? i : 31 - i);
      assert_int_equal(mlfab__crc32c_with(level, 0, buffer, 32), known[k]);
    }
    assert_int_equal(mlfab__crc32c_with(level, 0, "123456789", 9), 0xe3069283u);
    assert_int_equal(mlfab__crc32c_with(level, 0, NULL, 0), 0);
    assert_int_equal(mlfab__crc32c_with(level, 0x12345678u, buffer, 0), 0x12345678u);
  }
}

TEST(test_crc_agrees) {
  static uint8_t buffer[65536];
  mlfab__rng prng = seeded(12);
  random_bytes(&prng, buffer, sizeof buffer);
  for (size_t bytes = 0; bytes <= 5000; bytes++) {
    const uint8_t *at = buffer + mlfab__rng_below(&prng, 64);
    uint32_t begin = bytes % 2 ? (uint32_t)mlfab__rng_next(&prng) : 0;
    uint32_t tables = mlfab__crc32c_with(0, begin, at, bytes);
    for (int level = 1; level <= mlfab__crc32c_level(); level++)
      assert_int_equal(mlfab__crc32c_with(level, begin, at, bytes), tables);
    if (bytes % 16 == 0 || bytes < 100) assert_int_equal(tables, crc_bit_by_bit(begin, at, bytes));
  }
  for (int round = 0; round < 300; round++) { /* lengths that use the widest stride, and splits */
    size_t bytes = (size_t)mlfab__rng_below(&prng, sizeof buffer - 8);
    size_t split = (size_t)mlfab__rng_below(&prng, bytes + 1);
    const uint8_t *at = buffer + mlfab__rng_below(&prng, 8);
    uint32_t whole = mlfab__crc32c(0, at, bytes);
    for (int level = 0; level <= mlfab__crc32c_level(); level++) {
      uint32_t first = mlfab__crc32c_with(level, 0, at, split);
      assert_int_equal(whole, mlfab__crc32c_with(level, 0, at, bytes));
      assert_int_equal(whole, mlfab__crc32c_with(level, first, at + split, bytes - split));
    }
  }
}

TESTS(NULL, NULL)
