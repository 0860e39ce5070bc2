/* wire.c - encodes, decodes and checks frames.
 *
 * wire.h shows the layout of the header. The layout of each meta is one list of fields (codec.h). Frames of other
 * groups are in <group>_wire.c. The roles, not this file, interpret the fields and check them against the state of a
 * node. */
#include "codec.h"

/* ---- the metas, in wire order: N a number (of its member's size), A an array of four numbers, T a
 * text, F the fields of a struct ---- */

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
#define A(member) N(member[0]) N(member[1]) N(member[2]) N(member[3])
#define T(member) wire_codec_text(c, decode, m->member, sizeof m->member);
#define F(fields, member) wire_##fields(c, decode, &m->member);

/* clang-format off */
WIRE_FIELDS(options, mlfab_model_options,
  N(optimizer) N(mean) N(deterministic) N(slices) N(ghost) N(active) N(gamma) N(adadelay_c)
  N(beta1) N(beta2) N(epsilon) N(weight_decay) F(sync, consistency) N(tags)
  N(pull_half) N(change_threshold) N(change_decay))
WIRE_META(join,
  N(rank) N(roles) N(workers) N(servers) N(dedicated) N(replicas) N(founders) N(founding) N(scheduler) N(kernels)
  N(hand) N(incarnation) N(nonce) N(heartbeat_ns) T(addresses))
WIRE_META(welcome, N(incarnation) N(nodes) N(running) N(fresh) N(fabric))
WIRE_META(refuse, N(code) N(rank) N(cause) T(text))
WIRE_META(hello, N(node) N(incarnation) N(roles) N(hand) N(accumulators) N(host) N(nonce) N(term))
WIRE_META(hello_ack,
  N(server) N(eager_bytes) N(generation) N(model_stands) N(kind) N(v_train) N(top)
  A(applied) A(dropped) N(epoch) N(stopped) N(nonce) N(guest) N(term) N(taken))
WIRE_META(heartbeat, N(sent_ns) N(kind))
WIRE_META(bye, N(code) N(nonce) T(text))
WIRE_META(member, N(node) N(incarnation) N(kind) N(hand) N(nonce) T(addresses))
WIRE_META(define, N(ask) N(tensors) N(first_weights) F(options, options))
WIRE_META(define_ack,
  N(code) N(server) N(v_train) T(text) N(ask) N(first_weights) N(packets) F(options, options)
  N(cut) N(restored) N(restored_version))
WIRE_META(chunk, N(seq) N(offset) N(generation))
WIRE_META(grant, N(seq) N(upto) N(generation))
WIRE_META(push_ack, N(seq) N(members) N(generation) N(code) N(version) N(delay) N(v_train))
WIRE_META(resend, N(generation) N(top) A(applied) A(dropped))
WIRE_META(withdraw, N(seq) N(members) N(generation))
WIRE_META(model, N(request) N(offset) N(bytes) N(version) N(commit) N(slice) N(flags) N(epoch))
WIRE_META(pull_fail, N(request) N(code) T(text))
WIRE_META(pull_cancel, N(request))
WIRE_META(waiting, N(request) N(kind) N(rank) T(text))
WIRE_META(barrier, N(number) N(what) N(progress) N(of) N(theirs) N(mine))
WIRE_META(sync_ask, N(ask) F(sync, consistency))
WIRE_META(sync_ack, N(ask) N(code) N(counts) T(text))
WIRE_META(progress, N(progress) N(apart) N(entry))
WIRE_META(done, N(last_seq))
WIRE_FIELDS(member_info, mlfab__member_info,
  N(node) N(roles) N(incarnation) N(hand) N(added) N(nonce) T(addresses))
#if MLFAB_WITH_RESHARD || MLFAB_WITH_CHECKPOINT || MLFAB_WITH_REPLICA
WIRE_META(moved, N(attempt) N(step) N(server) N(code) N(round) N(scale) T(text))
WIRE_LIST(adopt, words, u32, uint32_t, 4, MLFAB__ADOPT_WORDS_MAX,
  N(attempt) N(slices) N(packets) N(cut) N(restored) N(restored_version) N(tensors)
  F(options, options))
WIRE_LIST(clock_record, words, u32, uint32_t, 4, MLFAB__RESHARD_SERVER_WORDS_MAX,
  N(attempt) N(contributors) N(members) N(quiet) N(v_train) N(refused_round)
  N(threshold) N(scale) F(sync, consistency))
#endif
/* clang-format on */

/* ---- metas with two lists, and those with more to check ---- */

WIRE_FIELDS(push, mlfab__push,
            N(seq) N(members) N(generation) N(flags) N(eager) N(progress) N(bytes) N(scale) N(norm)
                N(parts))
WIRE_FIELDS(pull, mlfab__pull, N(request) N(progress) N(epoch) N(flags))

/* The versions or commits of slices. */
static void wire_slices(wire_codec *c, int decode, uint32_t *count, uint64_t *list) {
  uint32_t n = wire_codec_count(c, decode, *count, MLFAB__SLICES_MAX, 8);
  for (uint32_t i = 0; i < n; i++) wire_u64(c, decode, &list[i]);
  if (decode) *count = n;
}

MLFAB__INTERNAL uint32_t mlfab__encode_push(uint8_t *meta, const mlfab__push *m,
                                            const mlfab__segment *segments,
                                            const uint64_t *versions) {
  wire_codec c = wire_encode(meta);
  uint32_t count = m->versions;
  wire_push(&c, 0, (mlfab__push *)m);
  wire_write_segments(&c, m->segments, segments);
  wire_slices(&c, 0, &count, (uint64_t *)versions);
  return wire_encoded(&c);
}

/* An update without segments is an empty push. Any other update touches a slice and needs a version. */
MLFAB__INTERNAL int mlfab__decode_push(const uint8_t *meta, uint32_t bytes, mlfab__push *m,
                                       mlfab__segment *segments, uint64_t *versions) {
  wire_codec c = wire_decode(meta, bytes);
  wire_push(&c, 1, m);
  uint64_t sum = wire_read_segments(&c, &m->segments, segments);
  wire_slices(&c, 1, &m->versions, versions);
  if (wire_decoded(&c)) return MLFAB_ERR_FRAME;
  if (m->members < 1 || m->members > 4096 || m->seq > UINT64_MAX - m->members)
    return MLFAB_ERR_FRAME;
  /* In the worst case (packets of one element) packets are eight times as large as their values. */
  if (m->flags & MLFAB__PUSH_PACKED ? m->bytes > mlfab__mul_sat(8, sum) : m->bytes != sum)
    return MLFAB_ERR_FRAME;
  if (m->eager > m->bytes || !mlfab__finite(m->scale)) return MLFAB_ERR_FRAME;
  return m->segments > 0 && m->versions == 0 ? MLFAB_ERR_FRAME : 0;
}

MLFAB__INTERNAL uint32_t mlfab__encode_pull(uint8_t *meta, const mlfab__pull *m,
                                            const mlfab__segment *segments,
                                            const uint64_t *sinces) {
  wire_codec c = wire_encode(meta);
  uint32_t count = m->sinces;
  wire_pull(&c, 0, (mlfab__pull *)m);
  wire_write_segments(&c, m->segments, segments);
  wire_slices(&c, 0, &count, (uint64_t *)sinces);
  return wire_encoded(&c);
}

MLFAB__INTERNAL int mlfab__decode_pull(const uint8_t *meta, uint32_t bytes, mlfab__pull *m,
                                       mlfab__segment *segments, uint64_t *sinces) {
  wire_codec c = wire_decode(meta, bytes);
  wire_pull(&c, 1, m);
  wire_read_segments(&c, &m->segments, segments);
  wire_slices(&c, 1, &m->sinces, sinces);
  return wire_decoded(&c);
}

/* ---- lists inside bulks ---- */

MLFAB__INTERNAL uint32_t mlfab__encode_member_info(uint8_t *at, uint32_t room,
                                                   const mlfab__member_info *m) {
  wire_codec c = wire_encode(at);
  if (room < 30u + wire_text_bytes(m->addresses, sizeof m->addresses)) return 0;
  wire_member_info(&c, 0, (mlfab__member_info *)m);
  return (uint32_t)(c.at - at);
}

MLFAB__INTERNAL uint32_t mlfab__decode_member_info(const uint8_t *at, uint32_t room,
                                                   mlfab__member_info *m) {
  wire_codec c = wire_decode(at, room);
  wire_member_info(&c, 1, m);
  return c.bad ? 0 : (uint32_t)(c.at - at);
}

#undef N
#undef A
#undef T
#undef F

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

/* Offsets in the header (wire.h). The offsets up to byte 12 are the same in every protocol version, so that an older
 * side can be recognised. */
enum {
  WIRE_HEADER_CRC = 8,
  WIRE_META_BYTES = 16,
  WIRE_JOB_HASH = 24,
  WIRE_EPOCH = 32,
  WIRE_INCARNATION = 40
};
_Static_assert(sizeof(mlfab__header) == MLFAB_HEADER_BYTES &&
                   offsetof(mlfab__header, job) == WIRE_JOB_HASH &&
                   offsetof(mlfab__header, code) == MLFAB__CODE_AT &&
                   offsetof(mlfab__header, tag) == MLFAB__TAG_AT,
               "the header has a frame's layout");

/* Copies the header in whole words: a word written in parts is slow to read back. */
static uint32_t wire_header_crc(const uint8_t *head) {
  uint8_t copy[MLFAB_HEADER_BYTES];
  memcpy(copy, head, sizeof copy);
  wire_put64(copy + WIRE_HEADER_CRC, wire_get64(head + WIRE_HEADER_CRC) >> 32 << 32);
  return mlfab__crc32c(0, copy, sizeof copy);
}

/* A ghost's bulk has no bytes to cover. */
static uint32_t wire_payload_crc(const uint8_t *head, uint32_t meta_bytes, unsigned flags,
                                 const void *bulk, uint32_t bulk_bytes) {
  uint32_t crc = mlfab__crc32c(0, head + MLFAB_HEADER_BYTES, meta_bytes);
  int covered = (flags & MLFAB__WIRE_BULK_CRC) && bulk != NULL && bulk_bytes > 0;
  return covered ? mlfab__crc32c(crc, bulk, bulk_bytes) : crc;
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
  memset(head + MLFAB__TAG_AT, 0, MLFAB__TAG_BYTES);
  wire_put32(head + WIRE_HEADER_CRC, mlfab__crc32c(0, head, MLFAB_HEADER_BYTES));
}

MLFAB__INTERNAL void mlfab__wire_untag(uint8_t *head) {
  wire_put32(head + WIRE_HEADER_CRC, 0);
  memset(head + MLFAB__TAG_AT, 0, MLFAB__TAG_BYTES);
}

MLFAB__INTERNAL void mlfab__wire_code(uint8_t *head, uint32_t code) {
  wire_put32(head + MLFAB__CODE_AT, code);
}

MLFAB__INTERNAL void mlfab__wire_tag(uint8_t *head, const uint8_t tag[MLFAB__TAG_BYTES]) {
  memcpy(head + MLFAB__TAG_AT, tag, MLFAB__TAG_BYTES);
  wire_put32(head + WIRE_HEADER_CRC, wire_header_crc(head));
}

MLFAB__INTERNAL void mlfab__wire_open(const uint8_t *head, mlfab__header *header) {
  memcpy(header, head, sizeof *header);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  mlfab__header *h = header;
  uint32_t *words[] = {&h->magic, &h->header_crc, &h->payload_crc, &h->meta_bytes, &h->bulk_bytes,
                       &h->epoch, &h->sender,     &h->incarnation, &h->code};
  for (size_t i = 0; i < MLFAB__COUNT(words); i++)
    *words[i] = wire_get32(head + ((uint8_t *)words[i] - (uint8_t *)h));
  h->flags = wire_get16(head + offsetof(mlfab__header, flags));
  h->job = wire_get64(head + WIRE_JOB_HASH);
#endif
}

/* The types of frames. Numbers of removed types are not reused, so there are gaps: 0. */
enum { WIRE_PLAIN = 1, WIRE_BULK = 2 /* it may have a bulk */ };
#define WIRE_MAY(name, number, bulk) [number] = (bulk) ? WIRE_BULK : WIRE_PLAIN,
static const uint8_t wire_types[MLFAB__FRAME_TYPES] = {MLFAB__FRAMES(WIRE_MAY)};
#undef WIRE_MAY

/* Checks the version before the checksum, so that a frame of another version is reported as such and not as
 * damaged. Errors found after the checksum are mistakes of the sender, not of the line. */
MLFAB_API int mlfab_frame_check(const void *header, uint32_t *head_bytes_p,
                                uint32_t *bulk_bytes_p) {
  mlfab__header h;
  if (header == NULL || head_bytes_p == NULL || bulk_bytes_p == NULL) return MLFAB_ERR_ARGUMENT;
  mlfab__wire_open(header, &h);
  if (h.magic != MLFAB__MAGIC) return MLFAB_ERR_FRAME;
  if (h.protocol < MLFAB_PROTOCOL) return MLFAB_ERR_PROTOCOL_OLDER;
  if (h.protocol > MLFAB_PROTOCOL) return MLFAB_ERR_PROTOCOL_NEWER;
  if (h.header_crc != wire_header_crc(header)) return MLFAB_ERR_CRC;
  if (h.type >= MLFAB__FRAME_TYPES || !wire_types[h.type]) return MLFAB_ERR_FRAME;
  if (h.flags & ~(unsigned)(MLFAB__WIRE_BULK_CRC | MLFAB__WIRE_TAGGED)) return MLFAB_ERR_FRAME;
  if ((h.tag[0] | h.tag[1] | h.code) != 0 && !(h.flags & MLFAB__WIRE_TAGGED))
    return MLFAB_ERR_FRAME;
  if (h.meta_bytes > MLFAB_META_MAX || h.bulk_bytes > MLFAB_BULK_MAX) return MLFAB_ERR_LIMIT;
  if (h.bulk_bytes > 0 && wire_types[h.type] != WIRE_BULK) return MLFAB_ERR_FRAME;
  *head_bytes_p = MLFAB_HEADER_BYTES + h.meta_bytes;
  *bulk_bytes_p = h.bulk_bytes;
  return 0;
}

/* A payload whose length differs from the header's cannot match the checksum. */
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
#define WIRE_NAME(name, number, bulk) \
  case number:                        \
    return #name;
    MLFAB__FRAMES(WIRE_NAME)
#undef WIRE_NAME
    default:
      return "UNKNOWN";
  }
}
