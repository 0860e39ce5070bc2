/* replica_wire.c - encodes and decodes the frames of replica_wire.h. See codec.h. */
#include "replica_wire.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
#define R(record) N(record.epoch) N(record.serves) N(record.insync)

/* clang-format off */
WIRE_META(vote_frame,
  N(shard) N(message.kind) N(message.known) N(message.empty) N(message.floor) R(message.record)
  R(message.decided) R(message.bond) N(message.nonce) N(message.sent_ns) N(message.echo_nonce)
  N(message.echo_ns))
WIRE_META(moment_frame, N(number) N(term) N(type) N(index) N(since) N(history))
WIRE_META(moment_has, N(number) N(term) N(refused))
WIRE_META(mirror_frame, N(number) N(term) N(stream) N(part) N(record))
WIRE_META(mirror_has, N(number) N(term) N(stream))
WIRE_META(votes_head, N(fabric) N(shards))
/* clang-format on */

#undef N
#undef R

MLFAB__INTERNAL void mlfab__encode_vote_record(uint8_t at[MLFAB__VOTE_RECORD_BYTES],
                                               const mlfab__vote_record *record) {
  wire_put32(at, record->epoch);
  wire_put32(at + 4, record->serves);
  wire_put32(at + 8, record->insync);
}

MLFAB__INTERNAL void mlfab__decode_vote_record(const uint8_t at[MLFAB__VOTE_RECORD_BYTES],
                                               mlfab__vote_record *record) {
  record->epoch = wire_get32(at);
  record->serves = wire_get32(at + 4);
  record->insync = wire_get32(at + 8);
}
