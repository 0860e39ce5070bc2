/* wire.c - encodes, decodes and checks frames. Layer 1.
 *
 * The layout of the header is drawn in wire.h. The layout of each meta is one list of fields below,
 * from which its encoder and its decoder are both made, so that the two cannot disagree. What the
 * fields mean, and whether they fit the state of a node, is decided by the roles, not here.
 *
 * Invariants: decoding is total (any bytes give a struct or an error, nothing outside them is read)
 * and exact (a meta that decodes encodes to the same bytes again). Nothing is overlaid: fields are
 * copied one by one, at any alignment, little-endian on every machine.
 *
 * Source: RFC 3720 §12.1 (CRC32C); Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using
 * CRC32 Instruction", Intel 2011 (three interleaved streams); Fowler, Noll and Vo (FNV-1a). */
#include "wire.h"

/* ---- little-endian fields, any alignment ---- */

/* Copies a number of 2, 4 or 8 bytes between memory and wire, in either direction. */
static inline void wire_number(void *to, const void *from, size_t bytes) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  for (size_t i = 0; i < bytes; i++) {
    ((uint8_t *)to)[i] = ((const uint8_t *)from)[bytes - 1 - i];
  }
#else
  memcpy(to, from, bytes);
#endif
}

static inline void wire_put16(uint8_t *at, uint16_t x) { wire_number(at, &x, sizeof x); }
static inline void wire_put32(uint8_t *at, uint32_t x) { wire_number(at, &x, sizeof x); }
static inline void wire_put64(uint8_t *at, uint64_t x) { wire_number(at, &x, sizeof x); }

static inline uint16_t wire_get16(const uint8_t *at) {
  uint16_t x;
  wire_number(&x, at, sizeof x);
  return x;
}

static inline uint32_t wire_get32(const uint8_t *at) {
  uint32_t x;
  wire_number(&x, at, sizeof x);
  return x;
}

static inline uint64_t wire_get64(const uint8_t *at) {
  uint64_t x;
  wire_number(&x, at, sizeof x);
  return x;
}

/* What is left to decode. Once bad, a reader stays bad: one look at the end is enough. What could
 * not be read is zero. */
typedef struct wire_reader {
  const uint8_t *at, *end;
  int bad;
} wire_reader;

static inline void wire_read_number(wire_reader *r, void *member, size_t bytes) {
  if (MLFAB__UNLIKELY((size_t)(r->end - r->at) < bytes)) {
    r->bad = 1;
    memset(member, 0, bytes);
    return;
  }
  wire_number(member, r->at, bytes);
  r->at += bytes;
}

/* The rest of the array is zeroed, so that equal texts are equal structs. */
static void wire_read_text(wire_reader *r, char *text, size_t room) {
  uint16_t bytes = 0;
  wire_read_number(r, &bytes, sizeof bytes);
  if (r->bad || bytes >= room || (size_t)(r->end - r->at) < bytes ||
      memchr(r->at, 0, bytes) != NULL) {
    r->bad = 1;
    memset(text, 0, room);
    return;
  }
  memcpy(text, r->at, bytes);
  memset(text + bytes, 0, room - bytes);
  r->at += bytes;
}

static inline int wire_read_end(const wire_reader *r) {
  return r->bad || r->at != r->end ? MLFAB_ERR_FRAME : 0;
}

/* An array without a terminating zero is cut, so that its decoder accepts what is written. */
static uint16_t wire_text_bytes(const char *text, size_t room) {
  const char *end = memchr(text, 0, room - 1);
  return (uint16_t)(end != NULL ? (size_t)(end - text) : room - 1);
}

static uint8_t *wire_write_text(uint8_t *at, const char *text, size_t room) {
  uint16_t bytes = wire_text_bytes(text, room);
  wire_put16(at, bytes);
  memcpy(at + 2, text, bytes);
  return at + 2 + bytes;
}

/* ---- the metas: N a number (of its member's size), T a text, in wire order ---- */

/* clang-format off */
#define WIRE_JOIN(N, T) \
  N(rank) N(roles) N(workers) N(servers) N(dedicated) N(scheduler) N(hand) N(incarnation) N(nonce) T(addresses)
#define WIRE_WELCOME(N, T) N(incarnation) N(nodes)
#define WIRE_MEMBER_INFO(N, T) N(node) N(roles) N(incarnation) N(hand) N(nonce) T(addresses)
#define WIRE_REFUSE(N, T) N(code) N(rank) T(text)
#define WIRE_HELLO(N, T) N(node) N(incarnation) N(roles) N(hand) N(accumulators) N(host) N(nonce)
#define WIRE_BITMAP(N, bits) N(bits[0]) N(bits[1]) N(bits[2]) N(bits[3])
#define WIRE_WINDOW(N) N(top) WIRE_BITMAP(N, applied) WIRE_BITMAP(N, dropped)
#define WIRE_HELLO_ACK(N, T) \
  N(server) N(eager_bytes) N(generation) N(model_stands) N(was_dead) N(v_train) WIRE_WINDOW(N) \
  N(epoch) N(stopped) N(nonce)
#define WIRE_HEARTBEAT(N, T) N(sent_ns) N(kind)
#define WIRE_BYE(N, T) N(code) T(text)
#define WIRE_MEMBER(N, T) N(node) N(incarnation) N(kind) T(addresses)
#define WIRE_SYNC_IN(N, in)                                                                      \
  N(in kind) N(in staleness) N(in staleness_max) N(in need) N(in soft) N(in only_fastest)        \
  N(in keep_late) N(in chance) N(in alpha)
#define WIRE_OPTIONS(N)                                                                          \
  N(options.optimizer) N(options.mean) N(options.deterministic) N(options.slices)                \
  N(options.ghost) N(options.active) N(options.gamma) N(options.adadelay_c) N(options.beta1)     \
  N(options.beta2) N(options.epsilon) N(options.weight_decay)                                    \
  WIRE_SYNC_IN(N, options.consistency.) N(options.tags) N(options.pull_half)                     \
  N(options.change_threshold) N(options.change_decay)
#define WIRE_DEFINE(N, T) N(ask) N(tensors) N(first_weights) WIRE_OPTIONS(N)
#define WIRE_DEFINE_ACK(N, T) \
  N(code) N(server) N(v_train) T(text) N(ask) N(first_weights) WIRE_OPTIONS(N)
#define WIRE_PUSH(N, T) \
  N(seq) N(members) N(generation) N(flags) N(eager) N(progress) N(bytes) N(scale) N(norm) N(parts)
#define WIRE_CHUNK(N, T) N(seq) N(offset) N(generation)
#define WIRE_GRANT(N, T) N(seq) N(upto) N(generation)
#define WIRE_PUSH_ACK(N, T) N(seq) N(members) N(generation) N(code) N(version) N(delay) N(v_train)
#define WIRE_RESEND(N, T) N(generation) WIRE_WINDOW(N)
#define WIRE_WITHDRAW(N, T) N(seq) N(members) N(generation)
#define WIRE_PULL(N, T) N(request) N(progress) N(epoch)
#define WIRE_MODEL(N, T) \
  N(request) N(offset) N(bytes) N(version) N(commit) N(slice) N(flags) N(epoch)
#define WIRE_PULL_FAIL(N, T) N(request) N(code) N(rank) T(text)
#define WIRE_PULL_CANCEL(N, T) N(request)
#define WIRE_BARRIER(N, T) N(number)
#define WIRE_SYNC_ASK(N, T) N(ask) N(tensor) WIRE_SYNC_IN(N, consistency.)
#define WIRE_SYNC_ACK(N, T) N(ask) N(code) N(counts) T(text)
#define WIRE_PROGRESS(N, T) N(progress)
#define WIRE_DONE(N, T) N(last_seq)
#define WIRE_MEET(N, T) N(node) N(incarnation) N(nonce)
#define WIRE_WHERE(N, T) N(node)
#define WIRE_CAPACITY(N, T) N(host) N(in) N(out)
#define WIRE_STATION(N, T) N(worker) N(incarnation) N(alive) N(accumulators) N(host)
#define WIRE_SCHEDULE(N, T) \
  N(delay_bound) N(plan_ahead_ns) N(interval_ns) N(best) N(whole) N(no_aggregation) \
  N(no_distribution) N(rounds) N(host)
#define WIRE_ANNOUNCE(N, T) \
  N(id) N(bytes) N(shape) N(placed) N(lag) N(norm) N(kind) N(worker) N(incarnation) N(members) N(parts)
#define WIRE_PLAN(N, T) N(serial) N(rate_in) N(rate_out)
#define WIRE_PLAN_ENTRY(N, T) N(id) N(delay) N(rate) N(kind) N(worker) N(aggregator) N(group) N(fate)
#define WIRE_REPORT(N, T) \
  N(id) N(placed) N(backlog) N(out_backlog) N(version) N(kind) N(worker) N(code)
#define WIRE_VIA(N, T) N(seq) N(group) N(generation) N(aggregator)
#define WIRE_GROUP(N, T) N(group) N(bytes) N(rate_in) N(whole) N(packed)
#define WIRE_GROUP_MEMBER(N, T) N(seq) N(weight) N(worker) N(incarnation)
#define WIRE_GROUP_END(N, T) N(group)
#define WIRE_RELEASE(N, T) N(group) N(upto)
#define WIRE_GROUP_FAIL(N, T) N(group) N(seq) N(worker) N(code)
#define WIRE_FORWARD(N, T) N(group) N(offset) N(total)
#define WIRE_HOP_GRANT(N, T) N(group) N(seq) N(upto) N(server)
#define WIRE_HOP_CHUNK(N, T) N(group) N(seq) N(offset) N(total) N(server)
#define WIRE_SPREAD(N, T) N(request) N(bytes) N(frames) N(whole)
#define WIRE_SPREAD_MEMBER(N, T) N(request) N(worker) N(incarnation) N(attempt)
#define WIRE_SPREAD_FAIL(N, T) N(request) N(member_request) N(worker) N(code)
#define WIRE_PULL_VIA(N, T) N(request) N(attempt) N(aggregator)
#define WIRE_HOP_MODEL(N, T) \
  N(request) N(offset) N(bytes) N(version) N(commit) N(slice) N(flags) N(epoch) N(server) N(attempt)
#define WIRE_PULL_DONE(N, T) N(request)
#define WIRE_TREE_ASK(N, T) N(number) N(bytes) N(root)
#define WIRE_TREE_PLAN(N, T) N(number)
#define WIRE_TREE_NODE(N, T) N(worker) N(parent) N(giver)
#define WIRE_RESHARD_ASK(N, T) N(ask) N(timeout_ns)
#define WIRE_RESHARD_DONE(N, T) N(ask) N(code) N(rank) N(is_server) T(text)
#define WIRE_FREEZE(N, T) N(attempt)
#define WIRE_STOP(N, T) N(attempt) N(kind)
#define WIRE_MOVE(N, T) N(attempt) N(step)
#define WIRE_MOVED(N, T) N(attempt) N(step) N(server) N(code) T(text)
#define WIRE_RESHARD_SERVER_CLOCK(N, T) \
  N(attempt) N(clock) N(contributors) N(members) N(quiet) N(v_train) N(refused_round) N(threshold) \
  N(scale) WIRE_SYNC_IN(N, consistency.)
#define WIRE_RESHARD_SERVER_BYTES(N, T) \
  N(attempt) N(slice) N(clock) N(kind) N(offset) N(version) N(commit) N(last)
#define WIRE_THAW(N, T) N(attempt) N(epoch)
#define WIRE_MEMBERSHIP_ASK(N, T) \
  N(epoch) N(arena_pid) N(arena_fd) N(arena_nonce) N(arena_bytes) N(host) N(in) N(out) N(round) \
  N(objects)
#define WIRE_MEMBERSHIP_LIST(N, T) N(epoch)
#define WIRE_MEMBERSHIP_MEMBER(N, T) \
  N(rank) N(incarnation) N(arena_pid) N(arena_fd) N(arena_nonce) N(arena_bytes) N(host)
#define WIRE_MEMBERSHIP_MEMBER_BYTES 40
#define WIRE_MEMBERSHIP_READY(N, T) N(epoch) N(arena)
#define WIRE_MEMBERSHIP_GO(N, T) N(epoch) N(arena) N(latency_ns) N(rate) N(round) N(objects)
#define WIRE_MEMBERSHIP_OVER(N, T) N(epoch) N(code) N(rank) T(text)
#define WIRE_MEMBERSHIP_CALL(N, T) N(epoch) N(channel) N(number)
#define WIRE_MEMBERSHIP_TELL(N, T) N(epoch) N(channel) N(number) N(called) N(signature) T(text)
#define WIRE_MEMBERSHIP_MISSING(N, T) N(epoch) N(channel) N(number) N(rank)
#define WIRE_MEMBERSHIP_LEAVE(N, T) N(epoch) N(rank) N(calls)
#define WIRE_COLL(N, T) \
  N(epoch) N(channel) N(number) N(tag) N(flags) N(seq) N(signature) N(offset) N(total)
#define WIRE_COLL_ACK(N, T) N(epoch) N(received) N(consumed)
/* clang-format on */

#define WIRE_WRITE_N(member)                     \
  wire_number(at, &m->member, sizeof m->member); \
  at += sizeof m->member;
#define WIRE_WRITE_T(member) at = wire_write_text(at, m->member, sizeof m->member);
#define WIRE_READ_N(member) wire_read_number(r, &m->member, sizeof m->member);
#define WIRE_READ_T(member) wire_read_text(r, m->member, sizeof m->member);

/* The fields of a type, without the lists that may follow them. */
#define WIRE_FIELDS(name, FIELDS)                                          \
  static uint8_t *wire_write_##name(uint8_t *at, const mlfab__##name *m) { \
    FIELDS(WIRE_WRITE_N, WIRE_WRITE_T)                                     \
    return at;                                                             \
  }                                                                        \
  static void wire_read_##name(wire_reader *r, mlfab__##name *m) {         \
    FIELDS(WIRE_READ_N, WIRE_READ_T)                                       \
  }

/* A type that has no lists. */
#define WIRE_META(name, FIELDS)                                                          \
  WIRE_FIELDS(name, FIELDS)                                                              \
  MLFAB__INTERNAL uint32_t mlfab__encode_##name(uint8_t *meta, const mlfab__##name *m) { \
    return (uint32_t)(wire_write_##name(meta, m) - meta);                                \
  }                                                                                      \
  MLFAB__INTERNAL int mlfab__decode_##name(const uint8_t *meta, uint32_t bytes,          \
                                           mlfab__##name *m) {                           \
    wire_reader r = {meta, meta + bytes, 0};                                             \
    wire_read_##name(&r, m);                                                             \
    return wire_read_end(&r);                                                            \
  }

/* clang-format off */
WIRE_META(join, WIRE_JOIN)
WIRE_META(welcome, WIRE_WELCOME)
WIRE_META(refuse, WIRE_REFUSE)
WIRE_META(hello, WIRE_HELLO)
WIRE_META(hello_ack, WIRE_HELLO_ACK)
WIRE_META(heartbeat, WIRE_HEARTBEAT)
WIRE_META(bye, WIRE_BYE)
WIRE_META(member, WIRE_MEMBER)
WIRE_META(define, WIRE_DEFINE)
WIRE_META(define_ack, WIRE_DEFINE_ACK)
WIRE_META(chunk, WIRE_CHUNK)
WIRE_META(grant, WIRE_GRANT)
WIRE_META(push_ack, WIRE_PUSH_ACK)
WIRE_META(resend, WIRE_RESEND)
WIRE_META(withdraw, WIRE_WITHDRAW)
WIRE_META(model, WIRE_MODEL)
WIRE_META(pull_fail, WIRE_PULL_FAIL)
WIRE_META(pull_cancel, WIRE_PULL_CANCEL)
WIRE_META(barrier, WIRE_BARRIER)
WIRE_META(sync_ask, WIRE_SYNC_ASK)
WIRE_META(sync_ack, WIRE_SYNC_ACK)
WIRE_META(progress, WIRE_PROGRESS)
WIRE_META(done, WIRE_DONE)
WIRE_META(meet, WIRE_MEET)
WIRE_META(where, WIRE_WHERE)
WIRE_META(capacity, WIRE_CAPACITY)
WIRE_META(station, WIRE_STATION)
WIRE_META(schedule, WIRE_SCHEDULE)
WIRE_META(announce, WIRE_ANNOUNCE)
WIRE_META(report, WIRE_REPORT)
WIRE_META(via, WIRE_VIA)
WIRE_META(group_end, WIRE_GROUP_END)
WIRE_META(release, WIRE_RELEASE)
WIRE_META(group_fail, WIRE_GROUP_FAIL)
WIRE_META(forward, WIRE_FORWARD)
WIRE_META(hop_grant, WIRE_HOP_GRANT)
WIRE_META(hop_chunk, WIRE_HOP_CHUNK)
WIRE_META(spread_fail, WIRE_SPREAD_FAIL)
WIRE_META(pull_via, WIRE_PULL_VIA)
WIRE_META(hop_model, WIRE_HOP_MODEL)
WIRE_META(pull_done, WIRE_PULL_DONE)
WIRE_META(reshard_done, WIRE_RESHARD_DONE)
WIRE_META(freeze, WIRE_FREEZE)
WIRE_META(stop, WIRE_STOP)
WIRE_META(moved, WIRE_MOVED)
WIRE_META(reshard_server_bytes, WIRE_RESHARD_SERVER_BYTES)
WIRE_META(membership_ask, WIRE_MEMBERSHIP_ASK)
WIRE_META(membership_ready, WIRE_MEMBERSHIP_READY)
WIRE_META(membership_go, WIRE_MEMBERSHIP_GO)
WIRE_META(membership_over, WIRE_MEMBERSHIP_OVER)
WIRE_META(membership_call, WIRE_MEMBERSHIP_CALL)
WIRE_META(membership_tell, WIRE_MEMBERSHIP_TELL)
WIRE_META(membership_missing, WIRE_MEMBERSHIP_MISSING)
WIRE_META(membership_leave, WIRE_MEMBERSHIP_LEAVE)
WIRE_META(coll, WIRE_COLL)
WIRE_META(coll_ack, WIRE_COLL_ACK)
WIRE_FIELDS(membership_list, WIRE_MEMBERSHIP_LIST)
WIRE_FIELDS(membership_member, WIRE_MEMBERSHIP_MEMBER)
WIRE_FIELDS(reshard_ask, WIRE_RESHARD_ASK)
WIRE_FIELDS(move, WIRE_MOVE)
WIRE_FIELDS(thaw, WIRE_THAW)
WIRE_FIELDS(reshard_server_clock, WIRE_RESHARD_SERVER_CLOCK)
WIRE_FIELDS(tree_ask, WIRE_TREE_ASK)
WIRE_FIELDS(tree_plan, WIRE_TREE_PLAN)
WIRE_FIELDS(tree_node, WIRE_TREE_NODE)
WIRE_FIELDS(plan, WIRE_PLAN)
WIRE_FIELDS(plan_entry, WIRE_PLAN_ENTRY)
WIRE_FIELDS(group, WIRE_GROUP)
WIRE_FIELDS(group_member, WIRE_GROUP_MEMBER)
WIRE_FIELDS(spread, WIRE_SPREAD)
WIRE_FIELDS(spread_member, WIRE_SPREAD_MEMBER)
WIRE_FIELDS(push, WIRE_PUSH)
WIRE_FIELDS(pull, WIRE_PULL)
WIRE_FIELDS(member_info, WIRE_MEMBER_INFO)
/* clang-format on */

/* ---- metas with lists ---- */

/* A count that neither its limit nor the bytes that are left can hold is refused before it is
 * multiplied or trusted. */
static uint32_t wire_read_count(wire_reader *r, uint32_t limit, size_t each) {
  uint32_t count = 0;
  wire_read_number(r, &count, sizeof count);
  if (r->bad || count > limit || count > (size_t)(r->end - r->at) / each) {
    r->bad = 1;
    return 0;
  }
  return count;
}

/* Returns the sum of the segments' bytes. Being ascending, apart and inside 64 bits, they cannot
 * sum up to more than 2^64 - 1. */
static uint64_t wire_read_segments(wire_reader *r, uint32_t *count_p, mlfab__segment *segments) {
  uint64_t sum = 0, end = 0;
  uint32_t count = wire_read_count(r, MLFAB__SEGMENTS_MAX, 16);
  for (uint32_t i = 0; i < count; i++, r->at += 16) {
    mlfab__segment s = {wire_get64(r->at), wire_get64(r->at + 8)};
    if (s.bytes == 0 || s.bytes > UINT64_MAX - s.offset || (i > 0 && s.offset <= end)) r->bad = 1;
    end = s.offset + s.bytes;
    sum += s.bytes;
    segments[i] = s;
  }
  *count_p = count;
  return sum;
}

static uint8_t *wire_write_segments(uint8_t *at, uint32_t count, const mlfab__segment *segments) {
  wire_put32(at, count);
  at += 4;
  for (uint32_t i = 0; i < count; i++, at += 16) {
    wire_put64(at, segments[i].offset);
    wire_put64(at + 8, segments[i].bytes);
  }
  return at;
}

MLFAB__INTERNAL uint32_t mlfab__encode_push(uint8_t *meta, const mlfab__push *m,
                                            const mlfab__segment *segments,
                                            const uint64_t *versions) {
  uint8_t *at;
  if (m->segments > MLFAB__SEGMENTS_MAX || m->versions > MLFAB__SLICES_MAX) return 0;
  at = wire_write_push(meta, m);
  if ((uint32_t)(at - meta) + 4 + 16 * m->segments + 4 + 8 * m->versions > MLFAB_META_MAX) return 0;
  at = wire_write_segments(at, m->segments, segments);
  wire_put32(at, m->versions);
  at += 4;
  for (uint32_t i = 0; i < m->versions; i++, at += 8) wire_put64(at, versions[i]);
  return (uint32_t)(at - meta);
}

/* Finite, told from the exponent's bits, so that -ffast-math cannot lose a NaN. */
static int wire_finite(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits >> 52 & 0x7ff) != 0x7ff;
}

/* Packets of one element each are eight times what they hold. */
static uint64_t wire_packed_most(uint64_t sum) {
  return sum > UINT64_MAX / 8 ? UINT64_MAX : 8 * sum;
}

/* An update of no segments is an empty push; any other touches a slice and so has a version. */
MLFAB__INTERNAL int mlfab__decode_push(const uint8_t *meta, uint32_t bytes, mlfab__push *m,
                                       mlfab__segment *segments, uint64_t *versions) {
  wire_reader reader = {meta, meta + bytes, 0}, *r = &reader;
  uint64_t sum;
  wire_read_push(r, m);
  sum = wire_read_segments(r, &m->segments, segments);
  m->versions = wire_read_count(r, MLFAB__SLICES_MAX, 8);
  for (uint32_t i = 0; i < m->versions; i++) wire_read_number(r, &versions[i], 8);
  if (wire_read_end(r)) return MLFAB_ERR_FRAME;
  if (m->members < 1 || m->members > 4096 || m->seq > UINT64_MAX - m->members) {
    return MLFAB_ERR_FRAME;
  }
  int packed = (m->flags & MLFAB__PUSH_PACKED) != 0;
  if ((!packed && m->bytes != sum) || (packed && m->bytes > wire_packed_most(sum)))
    return MLFAB_ERR_FRAME;
  if (m->eager > m->bytes || !wire_finite(m->scale)) return MLFAB_ERR_FRAME;
  return m->segments > 0 && m->versions == 0 ? MLFAB_ERR_FRAME : 0;
}

MLFAB__INTERNAL uint32_t mlfab__encode_pull(uint8_t *meta, const mlfab__pull *m,
                                            const mlfab__segment *segments,
                                            const uint64_t *sinces) {
  if (m->segments > MLFAB__SEGMENTS_MAX || m->sinces > MLFAB__SLICES_MAX) return 0;
  uint8_t *at = wire_write_pull(meta, m);
  if ((uint32_t)(at - meta) + 4 + 16 * m->segments + 4 + 8 * m->sinces > MLFAB_META_MAX) return 0;
  at = wire_write_segments(at, m->segments, segments);
  wire_put32(at, m->sinces);
  at += 4;
  for (uint32_t i = 0; i < m->sinces; i++, at += 8) wire_put64(at, sinces[i]);
  return (uint32_t)(at - meta);
}

MLFAB__INTERNAL int mlfab__decode_pull(const uint8_t *meta, uint32_t bytes, mlfab__pull *m,
                                       mlfab__segment *segments, uint64_t *sinces) {
  wire_reader r = {meta, meta + bytes, 0};
  wire_read_pull(&r, m);
  wire_read_segments(&r, &m->segments, segments);
  m->sinces = wire_read_count(&r, MLFAB__SLICES_MAX, 8);
  for (uint32_t i = 0; i < m->sinces; i++) wire_read_number(&r, &sinces[i], 8);
  return wire_read_end(&r);
}

enum {
  WIRE_ENTRY_BYTES = 44,
  WIRE_MEMBER_BYTES = 24,
  WIRE_SPREAD_MEMBER_BYTES = 20,
  WIRE_TREE_NODE_BYTES = 12
};

MLFAB__INTERNAL uint32_t mlfab__encode_plan(uint8_t *meta, const mlfab__plan *m,
                                            const mlfab__plan_entry *entries) {
  if (m->entries > MLFAB__PLAN_ENTRIES_MAX) return 0;
  uint8_t *at = wire_write_plan(meta, m);
  wire_put32(at, m->entries);
  at += 4;
  for (uint32_t i = 0; i < m->entries; i++) at = wire_write_plan_entry(at, &entries[i]);
  return (uint32_t)(at - meta);
}

MLFAB__INTERNAL int mlfab__decode_plan(const uint8_t *meta, uint32_t bytes, mlfab__plan *m,
                                       mlfab__plan_entry *entries) {
  wire_reader r = {meta, meta + bytes, 0};
  wire_read_plan(&r, m);
  m->entries = wire_read_count(&r, MLFAB__PLAN_ENTRIES_MAX, WIRE_ENTRY_BYTES);
  for (uint32_t i = 0; i < m->entries; i++) wire_read_plan_entry(&r, &entries[i]);
  return wire_read_end(&r);
}

MLFAB__INTERNAL uint32_t mlfab__encode_group(uint8_t *meta, const mlfab__group *m,
                                             const mlfab__group_member *members,
                                             const mlfab__segment *segments) {
  if (m->members > MLFAB__GROUP_MEMBERS_MAX || m->segments > MLFAB__SEGMENTS_MAX) return 0;
  uint8_t *at = wire_write_group(meta, m);
  wire_put32(at, m->members);
  at += 4;
  for (uint32_t i = 0; i < m->members; i++) at = wire_write_group_member(at, &members[i]);
  return (uint32_t)(wire_write_segments(at, m->segments, segments) - meta);
}

MLFAB__INTERNAL int mlfab__decode_group(const uint8_t *meta, uint32_t bytes, mlfab__group *m,
                                        mlfab__group_member *members, mlfab__segment *segments) {
  wire_reader r = {meta, meta + bytes, 0};
  wire_read_group(&r, m);
  m->members = wire_read_count(&r, MLFAB__GROUP_MEMBERS_MAX, WIRE_MEMBER_BYTES);
  for (uint32_t i = 0; i < m->members; i++) {
    wire_read_group_member(&r, &members[i]);
    if (!wire_finite(members[i].weight)) r.bad = 1;
  }
  uint64_t sum = wire_read_segments(&r, &m->segments, segments);
  if (wire_read_end(&r) || m->members == 0 || sum != m->bytes) return MLFAB_ERR_FRAME;
  return 0;
}

MLFAB__INTERNAL uint32_t mlfab__encode_spread(uint8_t *meta, const mlfab__spread *m,
                                              const mlfab__spread_member *members) {
  if (m->members > MLFAB__GROUP_MEMBERS_MAX) return 0;
  uint8_t *at = wire_write_spread(meta, m);
  wire_put32(at, m->members);
  at += 4;
  for (uint32_t i = 0; i < m->members; i++) at = wire_write_spread_member(at, &members[i]);
  return (uint32_t)(at - meta);
}

MLFAB__INTERNAL int mlfab__decode_spread(const uint8_t *meta, uint32_t bytes, mlfab__spread *m,
                                         mlfab__spread_member *members) {
  wire_reader r = {meta, meta + bytes, 0};
  wire_read_spread(&r, m);
  m->members = wire_read_count(&r, MLFAB__GROUP_MEMBERS_MAX, WIRE_SPREAD_MEMBER_BYTES);
  for (uint32_t i = 0; i < m->members; i++) wire_read_spread_member(&r, &members[i]);
  return wire_read_end(&r) || m->members == 0 ? MLFAB_ERR_FRAME : 0;
}

static uint8_t *wire_write_ranks(uint8_t *at, uint32_t count, const uint32_t *ranks) {
  wire_put32(at, count);
  at += 4;
  for (uint32_t i = 0; i < count; i++, at += 4) wire_put32(at, ranks[i]);
  return at;
}

/* Into the array, when there is one. */
static uint32_t wire_read_ranks(wire_reader *r, uint32_t *ranks) {
  uint32_t count = wire_read_count(r, MLFAB__TREE_NODES_MAX, 4);
  for (uint32_t i = 0; i < count; i++, r->at += 4) {
    if (ranks) ranks[i] = wire_get32(r->at);
  }
  return count;
}

MLFAB__INTERNAL uint32_t mlfab__encode_tree_ask(uint8_t *meta, const mlfab__tree_ask *m,
                                                const uint32_t *ranks) {
  if (m->nodes > MLFAB__TREE_NODES_MAX) return 0;
  return (uint32_t)(wire_write_ranks(wire_write_tree_ask(meta, m), m->nodes, ranks) - meta);
}

MLFAB__INTERNAL int mlfab__decode_tree_ask(const uint8_t *meta, uint32_t bytes, mlfab__tree_ask *m,
                                           uint32_t *ranks) {
  wire_reader r = {meta, meta + bytes, 0};
  wire_read_tree_ask(&r, m);
  m->nodes = wire_read_ranks(&r, ranks);
  return wire_read_end(&r);
}

MLFAB__INTERNAL uint32_t mlfab__encode_tree_plan(uint8_t *meta, const mlfab__tree_plan *m,
                                                 const mlfab__tree_node *nodes) {
  if (m->nodes > MLFAB__TREE_NODES_MAX) return 0;
  uint8_t *at = wire_write_tree_plan(meta, m);
  wire_put32(at, m->nodes);
  at += 4;
  for (uint32_t i = 0; i < m->nodes; i++) at = wire_write_tree_node(at, &nodes[i]);
  return (uint32_t)(at - meta);
}

MLFAB__INTERNAL int mlfab__decode_tree_plan(const uint8_t *meta, uint32_t bytes,
                                            mlfab__tree_plan *m, mlfab__tree_node *nodes) {
  wire_reader r = {meta, meta + bytes, 0};
  wire_read_tree_plan(&r, m);
  m->nodes = wire_read_count(&r, MLFAB__TREE_NODES_MAX, WIRE_TREE_NODE_BYTES);
  for (uint32_t i = 0; i < m->nodes; i++) {
    mlfab__tree_node skipped;
    wire_read_tree_node(&r, nodes ? &nodes[i] : &skipped);
  }
  return wire_read_end(&r);
}

MLFAB__INTERNAL uint32_t mlfab__encode_membership_list(uint8_t *meta,
                                                       const mlfab__membership_list *m,
                                                       const mlfab__membership_member *members) {
  if (m->members > MLFAB__MEMBERSHIP_MEMBERS_MAX) return 0;
  uint8_t *at = wire_write_membership_list(meta, m);
  wire_put32(at, m->members);
  at += 4;
  for (uint32_t i = 0; i < m->members; i++) at = wire_write_membership_member(at, &members[i]);
  return (uint32_t)(at - meta);
}

MLFAB__INTERNAL int mlfab__decode_membership_list(const uint8_t *meta, uint32_t bytes,
                                                  mlfab__membership_list *m,
                                                  mlfab__membership_member *members) {
  wire_reader r = {meta, meta + bytes, 0};
  wire_read_membership_list(&r, m);
  m->members = wire_read_count(&r, MLFAB__MEMBERSHIP_MEMBERS_MAX, WIRE_MEMBERSHIP_MEMBER_BYTES);
  for (uint32_t i = 0; i < m->members; i++) wire_read_membership_member(&r, &members[i]);
  return wire_read_end(&r);
}

/* Numbers of servers: u16 each. */
static uint32_t wire_end_servers(uint8_t *meta, uint8_t *at, uint32_t n, const uint32_t *servers) {
  if (n > MLFAB__SLICES_MAX) return 0;
  wire_put32(at, n);
  at += 4;
  for (uint32_t i = 0; i < n; i++, at += 2) wire_put16(at, (uint16_t)servers[i]);
  return (uint32_t)(at - meta);
}

static uint32_t wire_read_servers(wire_reader *r, uint32_t *servers) {
  uint32_t n = wire_read_count(r, MLFAB__SLICES_MAX, 2);
  for (uint32_t i = 0; i < n; i++, r->at += 2) servers[i] = wire_get16(r->at);
  return n;
}

#define WIRE_META_SERVERS(name, count)                                                            \
  MLFAB__INTERNAL uint32_t mlfab__encode_##name(uint8_t *meta, const mlfab__##name *m,            \
                                                const uint32_t *servers) {                        \
    return wire_end_servers(meta, wire_write_##name(meta, m), m->count, servers);                 \
  }                                                                                               \
  MLFAB__INTERNAL int mlfab__decode_##name(const uint8_t *meta, uint32_t bytes, mlfab__##name *m, \
                                           uint32_t *servers) {                                   \
    wire_reader r = {meta, meta + bytes, 0};                                                      \
    wire_read_##name(&r, m);                                                                      \
    m->count = wire_read_servers(&r, servers);                                                    \
    return wire_read_end(&r);                                                                     \
  }
WIRE_META_SERVERS(reshard_ask, servers)
WIRE_META_SERVERS(move, slices)
WIRE_META_SERVERS(thaw, slices)
#undef WIRE_META_SERVERS

MLFAB__INTERNAL uint32_t mlfab__encode_reshard_server_clock(uint8_t *meta,
                                                            const mlfab__reshard_server_clock *m,
                                                            const uint32_t *words) {
  uint8_t *at = wire_write_reshard_server_clock(meta, m);
  if (m->words > MLFAB__RESHARD_SERVER_WORDS_MAX) return 0;
  wire_put32(at, m->words);
  at += 4;
  for (uint32_t i = 0; i < m->words; i++, at += 4) wire_put32(at, words[i]);
  return (uint32_t)(at - meta);
}

MLFAB__INTERNAL int mlfab__decode_reshard_server_clock(const uint8_t *meta, uint32_t bytes,
                                                       mlfab__reshard_server_clock *m,
                                                       uint32_t *words) {
  wire_reader r = {meta, meta + bytes, 0};
  wire_read_reshard_server_clock(&r, m);
  m->words = wire_read_count(&r, MLFAB__RESHARD_SERVER_WORDS_MAX, 4);
  for (uint32_t i = 0; i < m->words; i++, r.at += 4) words[i] = wire_get32(r.at);
  return wire_read_end(&r);
}

/* ---- lists inside bulks ---- */

MLFAB__INTERNAL uint32_t mlfab__encode_member_info(uint8_t *at, uint32_t room,
                                                   const mlfab__member_info *m) {
  if (room < 26u + wire_text_bytes(m->addresses, sizeof m->addresses)) return 0;
  return (uint32_t)(wire_write_member_info(at, m) - at);
}

MLFAB__INTERNAL uint32_t mlfab__decode_member_info(const uint8_t *at, uint32_t room,
                                                   mlfab__member_info *m) {
  wire_reader r = {at, at + room, 0};
  wire_read_member_info(&r, m);
  return r.bad ? 0 : (uint32_t)(r.at - at);
}

MLFAB__INTERNAL void mlfab__encode_tensor_info(uint8_t *at, const mlfab__tensor_info *m) {
  wire_put32(at, m->id);
  wire_put32(at + 4, m->dtype);
  wire_put64(at + 8, m->count);
}

MLFAB__INTERNAL void mlfab__decode_tensor_info(const uint8_t *at, mlfab__tensor_info *m) {
  m->id = wire_get32(at);
  m->dtype = wire_get32(at + 4);
  m->count = wire_get64(at + 8);
}

/* ---- the header ---- */

/* Offsets of the drawing in wire.h. Up to byte 12 they are promised for every protocol version, or
 * an older side could not be told from noise. */
enum {
  WIRE_PROTOCOL = 4,
  WIRE_TYPE = 5,
  WIRE_FLAGS = 6,
  WIRE_HEADER_CRC = 8,
  WIRE_PAYLOAD_CRC = 12,
  WIRE_META_BYTES = 16,
  WIRE_BULK_BYTES = 20,
  WIRE_JOB_HASH = 24,
  WIRE_EPOCH = 32,
  WIRE_SENDER = 36,
  WIRE_INCARNATION = 40,
  WIRE_RESERVED = 44,
  WIRE_TAG = 48
};

/* Copied in whole words, since a word that was written in parts is slow to read back. */
static uint32_t wire_header_crc(const uint8_t *head) {
  uint8_t copy[MLFAB_HEADER_BYTES];
  memcpy(copy, head, sizeof copy);
  wire_put64(copy + WIRE_HEADER_CRC, wire_get64(head + WIRE_HEADER_CRC) >> 32 << 32);
  return mlfab__crc32c(0, copy, sizeof copy);
}

/* A ghost has no bytes to cover. */
static uint32_t wire_payload_crc(const uint8_t *head, uint32_t meta_bytes, unsigned flags,
                                 const void *bulk, uint32_t bulk_bytes) {
  uint32_t crc = mlfab__crc32c(0, head + MLFAB_HEADER_BYTES, meta_bytes);
  int covered = (flags & MLFAB__WIRE_BULK_CRC) && bulk != NULL && bulk_bytes > 0;
  return covered ? mlfab__crc32c(crc, bulk, bulk_bytes) : crc;
}

/* The first frames of links prove that their sender belongs to the job. */
static int wire_has_tag(unsigned type) {
  return type == MLFAB__JOIN || type == MLFAB__HELLO || type == MLFAB__MEET;
}

MLFAB__INTERNAL void mlfab__wire_seal(uint8_t *head, const mlfab__header *header,
                                      const void *bulk) {
  uint64_t protocol = header->protocol != 0 ? header->protocol : MLFAB_PROTOCOL;
  uint64_t payload_crc =
      wire_payload_crc(head, header->meta_bytes, header->flags, bulk, header->bulk_bytes);
  wire_put64(head, MLFAB__MAGIC | protocol << 32 | (uint64_t)header->type << 40 |
                       (uint64_t)header->flags << 48);
  wire_put64(head + WIRE_HEADER_CRC, payload_crc << 32);
  wire_put64(head + WIRE_META_BYTES, header->meta_bytes | (uint64_t)header->bulk_bytes << 32);
  wire_put64(head + WIRE_JOB_HASH, header->job);
  wire_put64(head + WIRE_EPOCH, header->epoch | (uint64_t)header->sender << 32);
  wire_put64(head + WIRE_INCARNATION, header->incarnation);
  int tagged = wire_has_tag(header->type);
  wire_put64(head + WIRE_TAG, tagged ? header->tag[0] : 0);
  wire_put64(head + WIRE_TAG + 8, tagged ? header->tag[1] : 0);
  wire_put32(head + WIRE_HEADER_CRC, mlfab__crc32c(0, head, MLFAB_HEADER_BYTES));
}

MLFAB__INTERNAL void mlfab__wire_open(const uint8_t *head, mlfab__header *header) {
  header->protocol = head[WIRE_PROTOCOL];
  header->type = head[WIRE_TYPE];
  header->flags = wire_get16(head + WIRE_FLAGS);
  header->payload_crc = wire_get32(head + WIRE_PAYLOAD_CRC);
  header->meta_bytes = wire_get32(head + WIRE_META_BYTES);
  header->bulk_bytes = wire_get32(head + WIRE_BULK_BYTES);
  header->job = wire_get64(head + WIRE_JOB_HASH);
  header->epoch = wire_get32(head + WIRE_EPOCH);
  header->sender = wire_get32(head + WIRE_SENDER);
  header->incarnation = wire_get32(head + WIRE_INCARNATION);
  header->tag[0] = wire_get64(head + WIRE_TAG);
  header->tag[1] = wire_get64(head + WIRE_TAG + 8);
}

/* The types that carry tensor bytes or lists behind their meta, as bits. */
#define WIRE_BIT(type) ((uint64_t)1 << MLFAB__##type)
#define WIRE_BULK_TYPES /* below 64 */                                                         \
  (WIRE_BIT(WELCOME) | WIRE_BIT(DEFINE) | WIRE_BIT(PUSH) | WIRE_BIT(CHUNK) | WIRE_BIT(MODEL) | \
   WIRE_BIT(FORWARD) | WIRE_BIT(HOP_CHUNK) | WIRE_BIT(HOP_MODEL) | WIRE_BIT(RESHARD_SERVER))

static int wire_has_bulk(unsigned type) {
  return type < 64 ? (int)(WIRE_BULK_TYPES >> type & 1) : type == MLFAB__COLL;
}

/* Numbers of types that are gone are not used again, so there are gaps. */
static int wire_is_known(unsigned type) {
#define WIRE_KNOWN(name, number) [number] = 1,
  static const uint8_t known[MLFAB__FRAME_TYPES] = {MLFAB__FRAMES(WIRE_KNOWN)};
#undef WIRE_KNOWN
  return type < MLFAB__FRAME_TYPES && known[type];
}

/* The version comes before the checksum, so that another version's frame is called that and not
 * damaged; everything after the checksum is a mistake of the sender, not of the line. */
MLFAB_API int mlfab_frame_check(const void *header, uint32_t *head_bytes_p,
                                uint32_t *bulk_bytes_p) {
  const uint8_t *head = header;
  uint32_t meta_bytes, bulk_bytes;
  unsigned type;
  if (head == NULL || head_bytes_p == NULL || bulk_bytes_p == NULL) return MLFAB_ERR_ARGUMENT;
  if (wire_get32(head) != MLFAB__MAGIC) return MLFAB_ERR_FRAME;
  if (head[WIRE_PROTOCOL] < MLFAB_PROTOCOL) return MLFAB_ERR_PROTOCOL_OLDER;
  if (head[WIRE_PROTOCOL] > MLFAB_PROTOCOL) return MLFAB_ERR_PROTOCOL_NEWER;
  if (wire_get32(head + WIRE_HEADER_CRC) != wire_header_crc(head)) return MLFAB_ERR_CRC;

  type = head[WIRE_TYPE];
  if (!wire_is_known(type)) return MLFAB_ERR_FRAME;
  if (wire_get16(head + WIRE_FLAGS) & ~(unsigned)MLFAB__WIRE_BULK_CRC) return MLFAB_ERR_FRAME;
  uint64_t tag = wire_get64(head + WIRE_TAG) | wire_get64(head + WIRE_TAG + 8);
  if (wire_get32(head + WIRE_RESERVED) != 0 || (tag != 0 && !wire_has_tag(type)))
    return MLFAB_ERR_FRAME;
  meta_bytes = wire_get32(head + WIRE_META_BYTES);
  bulk_bytes = wire_get32(head + WIRE_BULK_BYTES);
  if (meta_bytes > MLFAB_META_MAX || bulk_bytes > MLFAB_BULK_MAX) return MLFAB_ERR_LIMIT;
  if (bulk_bytes > 0 && !wire_has_bulk(type)) return MLFAB_ERR_FRAME;
  *head_bytes_p = MLFAB_HEADER_BYTES + meta_bytes;
  *bulk_bytes_p = bulk_bytes;
  return 0;
}

/* A payload of another length than its header tells is not what the checksum was made of. */
MLFAB_API int mlfab_frame_verify(const void *head, uint32_t head_bytes, const void *bulk,
                                 uint32_t bulk_bytes) {
  mlfab__header header;
  if (head == NULL) return MLFAB_ERR_ARGUMENT;
  if (head_bytes < MLFAB_HEADER_BYTES) return MLFAB_ERR_CRC;
  mlfab__wire_open(head, &header);
  if (header.meta_bytes != head_bytes - MLFAB_HEADER_BYTES || header.bulk_bytes != bulk_bytes) {
    return MLFAB_ERR_CRC;
  }
  uint32_t crc = wire_payload_crc(head, header.meta_bytes, header.flags, bulk, bulk_bytes);
  return crc == header.payload_crc ? 0 : MLFAB_ERR_CRC;
}

MLFAB__INTERNAL const char *mlfab__frame_name(uint8_t type) {
  switch (type) {
#define WIRE_NAME(name, number) \
  case number:                  \
    return #name;
    MLFAB__FRAMES(WIRE_NAME)
#undef WIRE_NAME
    default:
      return "UNKNOWN";
  }
}

/* ---- CRC32C ---- */

/* wire_crc_table[k][i] is the remainder of byte i followed by k zero bytes. A remainder is linear
 * in its bits, so the tables follow from those of the 64 single bits, which are the first 64 states
 * of the shift register that starts at the polynomial; the preprocessor adds them up. */
#define WIRE_CRC_AT(i, a, b, c, d, e, f, g, h)                                              \
  (((i)&128 ? (a) : 0u) ^ ((i)&64 ? (b) : 0u) ^ ((i)&32 ? (c) : 0u) ^ ((i)&16 ? (d) : 0u) ^ \
   ((i)&8 ? (e) : 0u) ^ ((i)&4 ? (f) : 0u) ^ ((i)&2 ? (g) : 0u) ^ ((i)&1 ? (h) : 0u))
#define WIRE_CRC_4(i, ...)                                        \
  WIRE_CRC_AT(i, __VA_ARGS__), WIRE_CRC_AT((i) + 1, __VA_ARGS__), \
      WIRE_CRC_AT((i) + 2, __VA_ARGS__), WIRE_CRC_AT((i) + 3, __VA_ARGS__)
#define WIRE_CRC_16(i, ...)                                                                       \
  WIRE_CRC_4(i, __VA_ARGS__), WIRE_CRC_4((i) + 4, __VA_ARGS__), WIRE_CRC_4((i) + 8, __VA_ARGS__), \
      WIRE_CRC_4((i) + 12, __VA_ARGS__)
#define WIRE_CRC_64(i, ...)                                        \
  WIRE_CRC_16(i, __VA_ARGS__), WIRE_CRC_16((i) + 16, __VA_ARGS__), \
      WIRE_CRC_16((i) + 32, __VA_ARGS__), WIRE_CRC_16((i) + 48, __VA_ARGS__)
#define WIRE_CRC_256(...)                                                                     \
  {                                                                                           \
    WIRE_CRC_64(0, __VA_ARGS__), WIRE_CRC_64(64, __VA_ARGS__), WIRE_CRC_64(128, __VA_ARGS__), \
        WIRE_CRC_64(192, __VA_ARGS__)                                                         \
  }

/* clang-format off */
static const uint32_t wire_crc_table[8][256] = {
  WIRE_CRC_256(0x82f63b78u, 0x417b1dbcu, 0x20bd8edeu, 0x105ec76fu,
               0x8ad958cfu, 0xc79a971fu, 0xe13b70f7u, 0xf26b8303u),
  WIRE_CRC_256(0xfbc3faf9u, 0xff17c604u, 0x7f8be302u, 0x3fc5f181u,
               0x9d14c3b8u, 0x4e8a61dcu, 0x274530eeu, 0x13a29877u),
  WIRE_CRC_256(0x8b277743u, 0xc76580d9u, 0xe144fb14u, 0x70a27d8au,
               0x38513ec5u, 0x9edea41au, 0x4f6f520du, 0xa541927eu),
  WIRE_CRC_256(0x52a0c93fu, 0xaba65fe7u, 0xd725148bu, 0xe964b13du,
               0xf64463e6u, 0x7b2231f3u, 0xbf672381u, 0xdd45aab8u),
  WIRE_CRC_256(0x6ea2d55cu, 0x37516aaeu, 0x1ba8b557u, 0x8f2261d3u,
               0xc5670b91u, 0xe045beb0u, 0x7022df58u, 0x38116facu),
  WIRE_CRC_256(0x1c08b7d6u, 0x0e045bebu, 0x85f4168du, 0xc00c303eu,
               0x6006181fu, 0xb2f53777u, 0xdb8ca0c3u, 0xef306b19u),
  WIRE_CRC_256(0xf56e0ef4u, 0x7ab7077au, 0x3d5b83bdu, 0x9c5bfaa6u,
               0x4e2dfd53u, 0xa5e0c5d1u, 0xd0065990u, 0x68032cc8u),
  WIRE_CRC_256(0x34019664u, 0x1a00cb32u, 0x0d006599u, 0x847609b4u,
               0x423b04dau, 0x211d826du, 0x9278fa4eu, 0x493c7d27u)};
/* clang-format on */

#undef WIRE_CRC_AT
#undef WIRE_CRC_4
#undef WIRE_CRC_16
#undef WIRE_CRC_64
#undef WIRE_CRC_256

/* Eight bytes a step (slicing-by-8, Kounavis and Berry 2005). */
MLFAB__INTERNAL uint32_t mlfab__crc32c_portable(uint32_t crc, const void *data, size_t bytes) {
  const uint8_t *at = data;
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) {
    uint32_t x = wire_get32(at) ^ crc, y = wire_get32(at + 4);
    crc = wire_crc_table[7][x & 0xff] ^ wire_crc_table[6][x >> 8 & 0xff] ^
          wire_crc_table[5][x >> 16 & 0xff] ^ wire_crc_table[4][x >> 24] ^
          wire_crc_table[3][y & 0xff] ^ wire_crc_table[2][y >> 8 & 0xff] ^
          wire_crc_table[1][y >> 16 & 0xff] ^ wire_crc_table[0][y >> 24];
  }
  for (; bytes > 0; bytes--) crc = crc >> 8 ^ wire_crc_table[0][(crc ^ *at++) & 0xff];
  return ~crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
#include <wmmintrin.h>

/* The instruction answers after three cycles but starts every cycle, so three stretches of equal
 * length run side by side. The first two remainders are then moved over what follows them: a
 * product with x^(8 * distance - 33) without carries (the factor x^33 comes from the product's
 * place in its 64 bits and from the reduction, which the instruction itself does). */
typedef struct wire_crc_stride {
  size_t bytes;      /* of one stretch */
  uint32_t two, one; /* the factors for two stretches and for one */
} wire_crc_stride;

__attribute__((target("sse4.2,pclmul"))) static uint32_t wire_crc_x86(uint32_t crc,
                                                                      const uint8_t *at,
                                                                      size_t bytes) {
  static const wire_crc_stride strides[] = {{4096, 0x54a86326u, 0x82f89c77u},
                                            {512, 0x170076fau, 0xdd7e3b0cu},
                                            {64, 0x0d3b6092u, 0x9e4addf8u}};
  uint64_t a = ~crc;
  for (size_t i = bytes < 192 ? 3 : 0; i < 3; i++) {
    const wire_crc_stride *s = &strides[i];
    for (; bytes >= 3 * s->bytes; bytes -= 3 * s->bytes, at += 2 * s->bytes) {
      const uint8_t *end = at + s->bytes;
      uint64_t b = 0, c = 0;
      for (; at != end; at += 8) {
        a = _mm_crc32_u64(a, wire_get64(at));
        b = _mm_crc32_u64(b, wire_get64(at + s->bytes));
        c = _mm_crc32_u64(c, wire_get64(at + 2 * s->bytes));
      }
      __m128i moved_a = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)a),
                                             _mm_cvtsi64_si128((long long)s->two), 0);
      __m128i moved_b = _mm_clmulepi64_si128(_mm_cvtsi64_si128((long long)b),
                                             _mm_cvtsi64_si128((long long)s->one), 0);
      a = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(_mm_xor_si128(moved_a, moved_b))) ^ c;
    }
  }
  for (; bytes >= 8; bytes -= 8, at += 8) a = _mm_crc32_u64(a, wire_get64(at));
  for (; bytes > 0; bytes--) a = _mm_crc32_u8((uint32_t)a, *at++);
  return ~(uint32_t)a;
}

MLFAB__INTERNAL uint32_t mlfab__crc32c(uint32_t crc, const void *data, size_t bytes) {
  if (MLFAB__LIKELY(__builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"))) {
    return wire_crc_x86(crc, data, bytes);
  }
  return mlfab__crc32c_portable(crc, data, bytes);
}

#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>

MLFAB__INTERNAL uint32_t mlfab__crc32c(uint32_t crc, const void *data, size_t bytes) {
  const uint8_t *at = data;
  crc = ~crc;
  for (; bytes >= 8; bytes -= 8, at += 8) crc = __crc32cd(crc, wire_get64(at));
  return mlfab__crc32c_portable(~crc, at, bytes);
}

#else

MLFAB__INTERNAL uint32_t mlfab__crc32c(uint32_t crc, const void *data, size_t bytes) {
  return mlfab__crc32c_portable(crc, data, bytes);
}
#endif

#undef WIRE_JOIN
#undef WIRE_WELCOME
#undef WIRE_MEMBER_INFO
#undef WIRE_REFUSE
#undef WIRE_HELLO
#undef WIRE_WINDOW
#undef WIRE_HELLO_ACK
#undef WIRE_HEARTBEAT
#undef WIRE_BYE
#undef WIRE_MEMBER
#undef WIRE_OPTIONS
#undef WIRE_DEFINE
#undef WIRE_DEFINE_ACK
#undef WIRE_PUSH
#undef WIRE_CHUNK
#undef WIRE_GRANT
#undef WIRE_PUSH_ACK
#undef WIRE_RESEND
#undef WIRE_WITHDRAW
#undef WIRE_PULL
#undef WIRE_MODEL
#undef WIRE_PULL_FAIL
#undef WIRE_PULL_CANCEL
#undef WIRE_BARRIER
#undef WIRE_PROGRESS
#undef WIRE_DONE
#undef WIRE_WRITE_N
#undef WIRE_WRITE_T
#undef WIRE_READ_N
#undef WIRE_READ_T
#undef WIRE_FIELDS
#undef WIRE_META
#undef WIRE_BULK_TYPES
