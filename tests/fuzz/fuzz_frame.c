/* fuzz_frame.c - any bytes must give a frame or an error, and a meta that decodes must encode to the same
 * bytes.
 *
 * With libFuzzer (clang -fsanitize=fuzzer) this is its target. With -DFUZZ_MAIN it has a main that makes
 * valid frames from a seed and damages them, for machines that have a sanitizer only:
 *
 *   fuzz_frame [rounds [seed]]     without rounds: MLFAB_FUZZ_SECONDS, or else 200000 rounds
 *
 * Checksums reject nearly all mutations, so every input is also tried with correct checksums, and as the
 * bare meta of a type. Inputs are copied to memory of exactly their length, so that a sanitizer detects a
 * read beyond them. */
#include "core/base/rng.h"
#include "tests/unit/scale.h"
#include "core/wire/peer_wire.h"
#include "core/checkpoint/record.h"
#include "core/wire/kept_wire.h"
#include "core/coll/coll_wire.h"
#include "core/keys/keys_wire.h"
#include "core/lend/lend_wire.h"
#include "core/replica/replica_wire.h"
#include "core/reshard/reshard_wire.h"
#include "core/sched/sched_wire.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

static mlfab__segment segments[MLFAB__SEGMENTS_MAX];
static uint64_t versions[MLFAB__SLICES_MAX];
static mlfab__plan_entry entries[MLFAB__PLAN_ENTRIES_MAX];
static mlfab__group_member members[MLFAB__GROUP_MEMBERS_MAX];
static mlfab__spread_member readers[MLFAB__GROUP_MEMBERS_MAX];
static uint32_t ranks[MLFAB__TREE_NODES_MAX];
static mlfab__tree_node tree_nodes[MLFAB__TREE_NODES_MAX];
static uint32_t numbers[MLFAB__SLICES_MAX], words[MLFAB__ADOPT_WORDS_MAX];
static uint64_t blocks[MLFAB__MEMBERSHIP_MEMBERS_MAX];
static mlfab__view_run runs[MLFAB__VIEW_RUNS_MAX];
static mlfab__membership_member roll[MLFAB__MEMBERSHIP_MEMBERS_MAX];
static uint8_t again[MLFAB_META_MAX + 4096];

/* Not an assert, because it must hold in every build. */
static void require(int holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "fuzz_frame: broken: %s\n", what);
  abort();
}

static void *copy_of(const uint8_t *data, size_t bytes) {
  void *copy = malloc(bytes > 0 ? bytes : 1);
  require(copy != NULL, "memory");
  if (bytes > 0) memcpy(copy, data, bytes);
  return copy;
}

/* The records that a MIRROR may have. */
static void try_mirrored(const uint8_t *bytes, uint32_t n) {
#define TRY_RECORD(name)                                                          \
  do {                                                                            \
    mlfab__##name m;                                                              \
    if (mlfab__decode_##name(bytes, n, &m)) break;                                \
    require(mlfab__encode_##name(again, &m) == n && memcmp(again, bytes, n) == 0, \
            "a record encodes to itself");                                        \
  } while (0)
  TRY_RECORD(peer_state);
  TRY_RECORD(barrier_state);
  TRY_RECORD(barrier_worker_state);
  TRY_RECORD(membership_state);
  TRY_RECORD(membership_worker);
#undef TRY_RECORD
}

#define TRY(NAME, name)                                  \
  case MLFAB__##NAME: {                                  \
    mlfab__##name m;                                     \
    if (mlfab__decode_##name(meta, bytes, &m)) return 0; \
    taken = mlfab__encode_##name(again, &m);             \
    break;                                               \
  }

#define TRY_LIST(NAME, name, list)                             \
  case MLFAB__##NAME: {                                        \
    mlfab__##name m;                                           \
    if (mlfab__decode_##name(meta, bytes, &m, list)) return 0; \
    taken = mlfab__encode_##name(again, &m, list);             \
    break;                                                     \
  }

/* 1 when the meta decodes as this type. */
static int try_meta(unsigned type, const uint8_t *meta, uint32_t bytes) {
  uint32_t taken = 0;
  switch (type) {
    TRY(JOIN, join)
    TRY(WELCOME, welcome)
    TRY(REFUSE, refuse)
    TRY(HELLO, hello)
    TRY(HELLO_ACK, hello_ack)
    TRY(HEARTBEAT, heartbeat)
    TRY(BYE, bye)
    TRY(MEMBER, member)
    TRY(DEFINE, define)
    TRY(DEFINE_ACK, define_ack)
    TRY(CHUNK, chunk)
    TRY(GRANT, grant)
    TRY(PUSH_ACK, push_ack)
    TRY(RESEND, resend)
    TRY(WITHDRAW, withdraw)
    TRY(MODEL, model)
    TRY(PULL_FAIL, pull_fail)
    TRY(PULL_CANCEL, pull_cancel)
    TRY(WAITING, waiting)
    TRY(BARRIER, barrier)
    TRY(BARRIER_DONE, barrier)
    TRY(SYNC, sync_ask)
    TRY(SYNC_ACK, sync_ack)
    TRY(DONE, done)
    TRY(DONE_ACK, done)
    TRY(MEET, meet)
    TRY(WHERE, where)
    TRY(THERE, member)
    TRY(CAPACITY, capacity)
    TRY(STATION, station)
    TRY(SCHEDULE, schedule)
    TRY(ANNOUNCE, announce)
    TRY(REPORT, report)
    TRY(VIA, via)
    TRY(GROUP_END, group_end)
    TRY(RELEASE, release)
    TRY(GROUP_FAIL, group_fail)
    TRY(FORWARD, forward)
    TRY(HOP_GRANT, hop_grant)
    TRY(HOP_CHUNK, hop_chunk)
    TRY(SPREAD_FAIL, spread_fail)
    TRY(PULL_VIA, pull_via)
    TRY(HOP_MODEL, hop_model)
    TRY(PULL_DONE, pull_done)
    TRY(PROGRESS, progress)
    TRY(RESHARD_SERVER, reshard_server_bytes)
    TRY(RESHARD_DONE, reshard_done)
    TRY_LIST(FREEZE, freeze, numbers)
    TRY(FROZEN, frozen)
    TRY_LIST(ADOPT, adopt, words)
    TRY(STOP, stop)
    TRY(MOVED, moved)
    TRY(MEMBERSHIP, membership_ask)
    TRY(MEMBERSHIP_READY, membership_ready)
    TRY(MEMBERSHIP_GO, membership_go)
    TRY(MEMBERSHIP_FAIL, membership_over)
    TRY(MEMBERSHIP_OVER, membership_over)
    TRY(MEMBERSHIP_STUCK, membership_call)
    TRY(MEMBERSHIP_ASK, membership_call)
    TRY(MEMBERSHIP_TELL, membership_tell)
    TRY(MEMBERSHIP_MISSING, membership_missing)
    TRY(MEMBERSHIP_LEAVE, membership_leave)
    TRY(MEMBERSHIP_LEFT, membership_leave)
    TRY(MEMBERSHIP_FINISH, membership_finish)
    TRY(MEMBERSHIP_FREEZE, membership_finish)
    TRY(MEMBERSHIP_FROZEN, membership_finish)
    TRY(MEMBERSHIP_SETTLE, membership_finish)
    TRY_LIST(MEMBERSHIP_OWED, membership_owed, blocks)
    TRY_LIST(VIEW, view, runs)
    TRY(COLL, coll)
    TRY(COLL_ACK, coll_ack)
    TRY(CHALLENGE, challenge)
    TRY(ANSWER, answer)
    TRY(PROOF, proof)
    TRY_LIST(RESHARD, reshard_ask, numbers)
    TRY_LIST(MOVE, move, numbers)
    TRY_LIST(RESUME, resume, numbers)
    TRY_LIST(RESHARD_SERVER_CLOCK, clock_record, numbers)
    TRY(CHECKPOINT_ASK, checkpoint_ask)
    TRY(CHECKPOINT_DONE, checkpoint_done)
    TRY(CHECKPOINT_ORDER, checkpoint_order)
    TRY(CHECKPOINT_SHARD, checkpoint_shard)
    TRY(CHECKPOINT_RESUME, checkpoint_resume)
    TRY(VOTE, vote_frame)
    TRY(MOMENT_HAS, moment_has)
    TRY(MIRROR_HAS, mirror_has)
    case MLFAB__MOMENT: {
      mlfab__moment_frame m;
      if (bytes < MLFAB__MOMENT_FRAME_BYTES ||
          mlfab__decode_moment_frame(meta, MLFAB__MOMENT_FRAME_BYTES, &m))
        return 0;
      taken = mlfab__encode_moment_frame(again, &m);
      memcpy(again + taken, meta + taken, bytes - taken);
      taken = bytes;
      break;
    }
    case MLFAB__PLACE: {
      mlfab__member_info m;
      if (bytes == 0 || mlfab__decode_member_info(meta, bytes, &m) != bytes) return 0;
      taken = mlfab__encode_member_info(again, sizeof again, &m);
      break;
    }
    case MLFAB__MIRROR: {
      mlfab__mirror_frame m;
      if (bytes < MLFAB__MIRROR_FRAME_BYTES ||
          mlfab__decode_mirror_frame(meta, MLFAB__MIRROR_FRAME_BYTES, &m))
        return 0;
      try_mirrored(meta + MLFAB__MIRROR_FRAME_BYTES, bytes - MLFAB__MIRROR_FRAME_BYTES);
      taken = mlfab__encode_mirror_frame(again, &m);
      memcpy(again + taken, meta + taken, bytes - taken);
      taken = bytes;
      break;
    }
    case MLFAB__PUSH: {
      mlfab__push m;
      uint64_t sum = 0;
      if (mlfab__decode_push(meta, bytes, &m, segments, versions)) return 0;
      for (uint32_t i = 0; i < m.segments; i++) sum += segments[i].bytes;
      int packed = (m.flags & MLFAB__PUSH_PACKED) != 0;
      require(packed ? m.bytes <= 8 * sum || sum > UINT64_MAX / 8 : sum == m.bytes,
              "the sum of a push");
      require(m.eager <= m.bytes, "the eager bytes of a push");
      taken = mlfab__encode_push(again, &m, segments, versions);
      break;
    }
    case MLFAB__PULL: {
      mlfab__pull m;
      if (mlfab__decode_pull(meta, bytes, &m, segments, versions)) return 0;
      for (uint32_t i = 1; i < m.segments; i++) {
        require(segments[i].offset > segments[i - 1].offset + segments[i - 1].bytes, "order");
      }
      taken = mlfab__encode_pull(again, &m, segments, versions);
      break;
    }
    case MLFAB__PLAN: {
      mlfab__plan m;
      if (mlfab__decode_plan(meta, bytes, &m, entries)) return 0;
      taken = mlfab__encode_plan(again, &m, entries);
      break;
    }
    case MLFAB__GROUP: {
      mlfab__group m;
      uint64_t sum = 0;
      if (mlfab__decode_group(meta, bytes, &m, members, segments)) return 0;
      for (uint32_t i = 0; i < m.segments; i++) sum += segments[i].bytes;
      require(sum == m.bytes && m.members > 0, "the sum of a group");
      taken = mlfab__encode_group(again, &m, members, segments);
      break;
    }
    case MLFAB__SPREAD: {
      mlfab__spread m;
      if (mlfab__decode_spread(meta, bytes, &m, readers)) return 0;
      taken = mlfab__encode_spread(again, &m, readers);
      break;
    }
    case MLFAB__TREE_ASK: {
      mlfab__tree_ask m;
      if (mlfab__decode_tree_ask(meta, bytes, &m, ranks)) return 0;
      taken = mlfab__encode_tree_ask(again, &m, ranks);
      break;
    }
    case MLFAB__TREE_PLAN: {
      mlfab__tree_plan m;
      if (mlfab__decode_tree_plan(meta, bytes, &m, tree_nodes)) return 0;
      taken = mlfab__encode_tree_plan(again, &m, tree_nodes);
      break;
    }
    case MLFAB__MEMBERSHIP_LIST: {
      mlfab__membership_list m;
      if (mlfab__decode_membership_list(meta, bytes, &m, roll)) return 0;
      taken = mlfab__encode_membership_list(again, &m, roll);
      break;
    }
    default:
      return 0;
  }
  require(taken == bytes && memcmp(again, meta, bytes) == 0, "a meta encodes to itself");
  return 1;
}
#undef TRY
#undef TRY_LIST

static void try_bulk(const uint8_t *bulk, uint32_t bytes) {
  mlfab__member_info m;
  mlfab__tensor_info tensor;
  for (uint32_t at = 0; at < bytes;) {
    uint32_t taken = mlfab__decode_member_info(bulk + at, bytes - at, &m);
    if (taken == 0) break;
    require(mlfab__encode_member_info(again, sizeof again, &m) == taken &&
                memcmp(again, bulk + at, taken) == 0,
            "a member encodes to itself");
    at += taken;
  }
  for (uint32_t at = 0; at + MLFAB__TENSOR_INFO_BYTES <= bytes; at += MLFAB__TENSOR_INFO_BYTES) {
    mlfab__decode_tensor_info(bulk + at, &tensor);
    mlfab__encode_tensor_info(again, &tensor);
    require(memcmp(again, bulk + at, MLFAB__TENSOR_INFO_BYTES) == 0, "a tensor encodes to itself");
  }
}

/* The steps of a receiver; returns 1 when everything was accepted. */
static int try_frame(const uint8_t *data, size_t bytes) {
  uint32_t head_bytes, bulk_bytes;
  mlfab__header header;
  uint8_t *head, *bulk;
  int accepted = 0;
  if (bytes < MLFAB_HEADER_BYTES) return 0;
  if (mlfab_frame_check(data, &head_bytes, &bulk_bytes)) return 0;
  require(head_bytes >= MLFAB_HEADER_BYTES && head_bytes <= MLFAB_HEADER_BYTES + MLFAB_META_MAX &&
              bulk_bytes <= MLFAB_BULK_MAX,
          "limits");
  if (bytes < head_bytes || bytes - head_bytes < bulk_bytes) return 0;
  head = copy_of(data, head_bytes);
  bulk = copy_of(data + head_bytes, bulk_bytes);
  (void)mlfab_frame_verify(head, head_bytes, NULL, bulk_bytes);
  if (mlfab_frame_verify(head, head_bytes, bulk, bulk_bytes) == 0) {
    mlfab__wire_open(head, &header);
    require(strcmp(mlfab__frame_name(header.type), "UNKNOWN") != 0, "a type has a name");
    accepted = try_meta(header.type, head + MLFAB_HEADER_BYTES, header.meta_bytes);
    try_bulk(bulk, bulk_bytes);
  }
  free(bulk);
  free(head);
  return accepted;
}

/* The same bytes with the header's checksums, lengths and other fields corrected. */
static int try_resealed(const uint8_t *data, size_t bytes) {
  uint8_t *copy;
  mlfab__header header;
  uint32_t rest = (uint32_t)(bytes - MLFAB_HEADER_BYTES);
  int accepted;
  if (bytes < MLFAB_HEADER_BYTES || bytes > MLFAB_META_MAX) return 0;
  copy = copy_of(data, bytes);
  mlfab__wire_open(copy, &header);
  header.protocol = MLFAB_PROTOCOL;
  header.flags &= MLFAB__WIRE_BULK_CRC;
  if (header.meta_bytes > rest) header.meta_bytes = rest;
  header.bulk_bytes = rest - header.meta_bytes;
  mlfab__wire_seal(copy, &header, copy + MLFAB_HEADER_BYTES + header.meta_bytes);
  accepted = try_frame(copy, bytes);
  free(copy);
  return accepted;
}

/* Bytes of a checkpoint's file, also with the checksums corrected. */
static void try_record(const uint8_t *data, size_t bytes) {
  mlfab__file_record record;
  mlfab__record_name name;
  const char *why = NULL;
  (void)mlfab__record_parse((const char *)data, bytes, &name);
  if (bytes < MLFAB__RECORD_BYTES || bytes > MLFAB_META_MAX) return;
  uint8_t *copy = copy_of(data, bytes);
  int64_t n = mlfab__record_open(copy, bytes, &record, &why);
  require(n >= 0 ? n <= (int64_t)bytes : why != NULL, "a record within its bytes");
  record = (mlfab__file_record){.type = (uint16_t)(1 + data[0] % MLFAB__RECORD_END),
                                .meta_bytes = (uint32_t)(bytes - MLFAB__RECORD_BYTES)};
  mlfab__record_seal(copy, &record);
  n = mlfab__record_open(copy, bytes, &record, &why);
  require(n == (int64_t)bytes, "a sealed record opens");
  free(copy);
}

static uint64_t accepted_frames, accepted_repaired, accepted_metas;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
  accepted_frames += (uint64_t)try_frame(data, bytes);
  accepted_repaired += (uint64_t)try_resealed(data, bytes);
  try_record(data, bytes);
  if (bytes > 0 && bytes <= MLFAB_META_MAX) {
    uint8_t *meta = copy_of(data + 1, bytes - 1);
    accepted_metas += (uint64_t)try_meta(data[0] % MLFAB__FRAME_TYPES, meta, (uint32_t)(bytes - 1));
    try_bulk(meta, (uint32_t)(bytes - 1));
    free(meta);
  }
  return 0;
}

#ifdef FUZZ_MAIN
#include <time.h>

static uint32_t random_list(mlfab__rng *prng, mlfab__push *m) {
  uint64_t at = 0;
  m->bytes = 0;
  m->segments = (uint32_t)mlfab__rng_below(prng, 8);
  m->versions = m->segments == 0 ? 0 : 1 + (uint32_t)mlfab__rng_below(prng, 4);
  for (uint32_t i = 0; i < m->segments; i++) {
    at += 1 + mlfab__rng_below(prng, 9);
    segments[i].offset = at;
    segments[i].bytes = 1 + mlfab__rng_below(prng, 100);
    at += segments[i].bytes;
    m->bytes += segments[i].bytes;
  }
  for (uint32_t i = 0; i < m->versions; i++) versions[i] = mlfab__rng_below(prng, 1000);
  return m->segments;
}

/* A text of printable characters, whose length is at `at`. */
static uint32_t random_text(mlfab__rng *prng, uint8_t *at) {
  uint32_t bytes = (uint32_t)mlfab__rng_below(prng, 40);
  at[0] = (uint8_t)bytes;
  at[1] = 0;
  for (uint32_t i = 0; i < bytes; i++) at[2 + i] = (uint8_t)(33 + mlfab__rng_below(prng, 90));
  return 2 + bytes;
}

static uint32_t room_of[MLFAB__FRAME_TYPES];

/* Bytes of a meta that is no list, with an empty text: the least that its decoder takes. */
static uint32_t least_meta(unsigned type) {
  static const uint8_t zeros[512];
  while (room_of[type] < sizeof zeros && !try_meta(type, zeros, room_of[type])) room_of[type]++;
  require(room_of[type] < sizeof zeros, "a type has a decoder");
  return room_of[type];
}

/* The place of the text in such a meta, or NO_TEXT. With one character more there, its decoder takes the meta. */
enum { NO_TEXT = 512 };
static uint32_t text_at(unsigned type, uint32_t after) {
  uint8_t meta[512] = {0};
  uint32_t bytes = least_meta(type);
  if (bytes < after + 2) return NO_TEXT;
  meta[bytes - after - 2] = 1;
  meta[bytes - after] = 'a';
  return try_meta(type, meta, bytes + 1) ? bytes - after - 2 : NO_TEXT;
}

/* Random bytes, with dependent fields made consistent. */
static uint32_t random_entries(mlfab__rng *prng, unsigned type, uint8_t *meta) {
  uint32_t n = 1 + (uint32_t)mlfab__rng_below(prng, 6);
  mlfab__push list = {0};
  mlfab__group group = {mlfab__rng_next(prng), 0, -1.0, 1, 0, n, 0};
  mlfab__plan plan = {mlfab__rng_next(prng), 1.0, 2.0, n - 1};
  mlfab__spread spread = {mlfab__rng_next(prng), 1000, 5, 0, n};
  for (uint32_t i = 0; i < n; i++) {
    uint32_t word = (uint32_t)mlfab__rng_next(prng);
    entries[i] = (mlfab__plan_entry){word, i, 0.5, word & 1, word >> 3, word >> 5, i / 2, word % 3};
    members[i] = (mlfab__group_member){word, 0.25, word >> 7, i};
    readers[i] = (mlfab__spread_member){word, word >> 9, i, word & 3};
  }
  group.segments = random_list(prng, &list);
  group.bytes = list.bytes;
  mlfab__tree_ask ask = {1, 2, 3, n};
  mlfab__tree_plan tree = {1, n};
  for (uint32_t i = 0; i < 6; i++) ranks[i] = i;
  for (uint32_t i = 0; i < n; i++) tree_nodes[i] = (mlfab__tree_node){i, i / 2, i / 3};
  mlfab__reshard_ask ask_move = {1, 2, n};
  mlfab__move move = {1, MLFAB__MOVE_PREPARE, 0, n};
  mlfab__resume resume = {1, 2, n};
  mlfab__freeze freeze = {1, n};
  mlfab__adopt adopt = {.attempt = 1, .slices = n, .tensors = 2, .words = n};
  mlfab__clock_record clock = {1, 2, 3, 4, 5, 6, 7, 0.5, {0}, n};
  mlfab__membership_list list_roll = {1, n, 0};
  for (uint32_t i = 0; i < n; i++) {
    numbers[i] = words[i] = i * 7;
    blocks[i] = mlfab__rng_next(prng);
    roll[i] = (mlfab__membership_member){i, 1, 2, -3, 4, 5, mlfab__rng_next(prng)};
  }
  for (uint32_t i = 0; i < n; i++)
    runs[i] = (mlfab__view_run){i * 64, mlfab__rng_below(prng, 100), mlfab__rng_next(prng)};
  mlfab__view view = {mlfab__rng_next(prng), 2, 3, 4, MLFAB__MODEL_LAST, n, 5};
  mlfab__membership_owed owed = {1, 2, 3, 4, 5, 6, 0, 0, 7, 8, mlfab__rng_next(prng), 9, n};
  if (type == MLFAB__MEMBERSHIP_OWED) return mlfab__encode_membership_owed(meta, &owed, blocks);
  if (type == MLFAB__VIEW) return mlfab__encode_view(meta, &view, runs);
  if (type == MLFAB__MEMBERSHIP_LIST) return mlfab__encode_membership_list(meta, &list_roll, roll);
  if (type == MLFAB__RESHARD) return mlfab__encode_reshard_ask(meta, &ask_move, numbers);
  if (type == MLFAB__MOVE) return mlfab__encode_move(meta, &move, numbers);
  if (type == MLFAB__RESUME) return mlfab__encode_resume(meta, &resume, numbers);
  if (type == MLFAB__FREEZE) return mlfab__encode_freeze(meta, &freeze, numbers);
  if (type == MLFAB__ADOPT) return mlfab__encode_adopt(meta, &adopt, words);
  if (type == MLFAB__RESHARD_SERVER_CLOCK) return mlfab__encode_clock_record(meta, &clock, numbers);
  if (type == MLFAB__TREE_ASK) return mlfab__encode_tree_ask(meta, &ask, ranks);
  if (type == MLFAB__TREE_PLAN) return mlfab__encode_tree_plan(meta, &tree, tree_nodes);
  if (type == MLFAB__PLAN) return mlfab__encode_plan(meta, &plan, entries);
  if (type == MLFAB__GROUP) return mlfab__encode_group(meta, &group, members, segments);
  return mlfab__encode_spread(meta, &spread, readers);
}

static uint32_t random_meta(mlfab__rng *prng, unsigned type, uint8_t *meta) {
  uint32_t bytes = 0;
  if (type == MLFAB__PLAN || type == MLFAB__GROUP || type == MLFAB__SPREAD ||
      type == MLFAB__TREE_ASK || type == MLFAB__TREE_PLAN || type == MLFAB__RESHARD ||
      type == MLFAB__MOVE || type == MLFAB__RESUME || type == MLFAB__FREEZE ||
      type == MLFAB__ADOPT || type == MLFAB__RESHARD_SERVER_CLOCK ||
      type == MLFAB__MEMBERSHIP_LIST || type == MLFAB__MEMBERSHIP_OWED || type == MLFAB__VIEW)
    return random_entries(prng, type, meta);
  if (type == MLFAB__PUSH) {
    mlfab__push m = {0};
    m.members = 1 + (uint32_t)mlfab__rng_below(prng, 4);
    m.scale = 0.5;
    random_list(prng, &m);
    return mlfab__encode_push(meta, &m, segments, versions);
  }
  if (type == MLFAB__PULL) {
    mlfab__push list = {0};
    mlfab__pull m = {1, 2, 3, 0, random_list(prng, &list), (uint32_t)mlfab__rng_below(prng, 4)};
    m.flags = (uint32_t)mlfab__rng_below(prng, 3);
    return mlfab__encode_pull(meta, &m, segments, versions);
  }
  uint32_t after = type == MLFAB__DEFINE_ACK ? 180 : 0; /* the text */
  uint32_t text = text_at(type, after), before = text < NO_TEXT ? text : least_meta(type) - after;
  while (bytes < before) meta[bytes++] = (uint8_t)mlfab__rng_next(prng);
  if (text < NO_TEXT) bytes += random_text(prng, meta + bytes);
  for (uint32_t i = 0; i < after; i++) meta[bytes++] = (uint8_t)mlfab__rng_next(prng);
  return bytes;
}

/* A frame from a correct sender. */
static size_t random_frame(mlfab__rng *prng, uint8_t *frame) {
  static const uint8_t bulk_types[] = {MLFAB__WELCOME,   MLFAB__DEFINE,    MLFAB__PUSH,
                                       MLFAB__CHUNK,     MLFAB__MODEL,     MLFAB__FORWARD,
                                       MLFAB__HOP_CHUNK, MLFAB__HOP_MODEL, MLFAB__RESHARD_SERVER,
                                       MLFAB__COLL,      MLFAB__VIEW};
  mlfab__header h = {0};
  uint8_t *bulk;
  do h.type = (uint8_t)(1 + mlfab__rng_below(prng, MLFAB__FRAME_TYPES - 1));
  while (!strcmp(mlfab__frame_name(h.type), "UNKNOWN"));
  h.flags = (uint16_t)mlfab__rng_below(prng, 2);
  h.job = mlfab__rng_next(prng);
  h.meta_bytes = random_meta(prng, h.type, frame + MLFAB_HEADER_BYTES);
  bulk = frame + MLFAB_HEADER_BYTES + h.meta_bytes;
  if (h.type == MLFAB__WELCOME) {
    for (int nodes = 1 + (int)mlfab__rng_below(prng, 3); nodes > 0; nodes--) {
      for (int i = 0; i < 24; i++) bulk[h.bulk_bytes++] = (uint8_t)mlfab__rng_next(prng);
      h.bulk_bytes += random_text(prng, bulk + h.bulk_bytes);
    }
  } else if (memchr(bulk_types, h.type, sizeof bulk_types) != NULL) {
    h.bulk_bytes = (uint32_t)mlfab__rng_below(prng, 64);
    for (uint32_t i = 0; i < h.bulk_bytes; i++) bulk[i] = (uint8_t)mlfab__rng_next(prng);
  }
  mlfab__wire_seal(frame, &h, bulk);
  return MLFAB_HEADER_BYTES + (size_t)h.meta_bytes + h.bulk_bytes;
}

/* One random damage: a bit, a byte, an extreme number, a cut, a moved stretch. */
static size_t damage(mlfab__rng *prng, uint8_t *frame, size_t bytes) {
  static const uint32_t nasty[] = {0,           1,           0x7fffffffu, 0x80000000u, 0xffffffffu,
                                   0xffffffc0u, 0x10000000u, 0x00010000u, 0x7ff80000u, 0x00100001u};
  size_t at = (size_t)mlfab__rng_below(prng, bytes);
  uint32_t number = nasty[mlfab__rng_below(prng, MLFAB__COUNT(nasty))];
  switch (mlfab__rng_below(prng, 5)) {
    case 0:
      frame[at] ^= (uint8_t)(1u << mlfab__rng_below(prng, 8));
      break;
    case 1:
      frame[at] = (uint8_t)mlfab__rng_next(prng);
      break;
    case 2:
      at &= ~(size_t)3;
      for (size_t b = 0; b < 4 && at + b < bytes; b++) frame[at + b] = (uint8_t)(number >> 8 * b);
      break;
    case 3:
      return at > 0 ? at : 1;
    default:
      memmove(frame + at / 2, frame + at, bytes - at);
      break;
  }
  return bytes;
}

int main(int argc, char **argv) {
  static uint8_t frame[4096];
  uint64_t seconds = test_number("MLFAB_FUZZ_SECONDS", 0);
  uint64_t rounds = argc > 1 ? strtoull(argv[1], NULL, 10) : seconds ? 0 : 200000;
  uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1, done = 0;
  time_t end = time(NULL) + (time_t)seconds;
  mlfab__rng prng;
  while (rounds > 0 ? done < rounds : time(NULL) < end) {
    for (int k = 0; k < 1000 && (rounds == 0 || done < rounds); k++, done++) {
      size_t bytes;
      mlfab__rng_seed(&prng, mlfab__mix(seed) + done);
      bytes = random_frame(&prng, frame);
      require(try_frame(frame, bytes), "a valid frame is accepted");
      for (uint64_t n = 1 + mlfab__rng_below(&prng, 4); n > 0; n--) {
        bytes = damage(&prng, frame, bytes);
        LLVMFuzzerTestOneInput(frame, bytes);
      }
      frame[MLFAB_HEADER_BYTES - 1] = frame[5]; /* the type, so that the bare meta is tried too */
      if (bytes >= MLFAB_HEADER_BYTES) {
        LLVMFuzzerTestOneInput(frame + MLFAB_HEADER_BYTES - 1, bytes - (MLFAB_HEADER_BYTES - 1));
      }
    }
  }
  printf("fuzz_frame: %" PRIu64 " rounds from seed %" PRIu64 "; accepted %" PRIu64
         " damaged frames, %" PRIu64 " with their checksums made right, %" PRIu64 " bare metas\n",
         done, seed, accepted_frames, accepted_repaired, accepted_metas);
  return 0;
}
#endif
