/* coll_wire.c - encodes and decodes the frames of coll_wire.h. See codec.h. */
#include "coll_wire.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
#define A(member) N(member[0]) N(member[1]) N(member[2]) N(member[3])
#define T(member) wire_codec_text(c, decode, m->member, sizeof m->member);

/* clang-format off */
WIRE_META(membership_ask,
  N(epoch) N(arena_pid) N(arena_fd) N(arena_nonce) N(arena_bytes) N(host) N(in) N(out) N(round)
  N(objects) N(signature) N(progress) N(barriers) N(open) N(newcomer))
WIRE_META(membership_ready, N(epoch) N(arena) N(progress) N(barriers) N(rank))
WIRE_META(membership_go, N(epoch) N(arena) N(latency_ns) N(rate) N(round) N(objects))
WIRE_META(membership_over, N(epoch) N(code) N(rank) T(text))
WIRE_META(membership_call, N(epoch) N(channel) N(number))
WIRE_META(membership_tell, N(epoch) N(channel) N(number) N(called) N(signature) T(text))
WIRE_META(membership_missing, N(epoch) N(channel) N(number) N(rank) N(waits) T(text))
WIRE_META(membership_leave, N(epoch) N(rank) N(calls))
WIRE_META(membership_finish, N(epoch) N(rank) N(calls) N(open) A(seek) T(text))
WIRE_META(coll,
  N(epoch) N(channel) N(number) N(tag) N(flags) N(seq) N(signature) N(offset) N(total))
WIRE_META(coll_ack, N(epoch) N(received) N(consumed))
WIRE_META(membership_state,
  N(phase) N(epoch) N(freezing) N(kept) N(finisher) N(keeper) N(limit) A(seek)
  N(go.epoch) N(go.arena) N(go.latency_ns) N(go.rate) N(go.round) N(go.objects)
  N(verdict.epoch) N(verdict.code) N(verdict.rank) T(verdict.text))
WIRE_META(membership_worker,
  N(flags) N(lost) N(over_owed) N(incarnation) N(place) N(calls) N(begun)
  N(ask.epoch) N(ask.arena_pid) N(ask.arena_fd) N(ask.arena_nonce) N(ask.arena_bytes) N(ask.host)
  N(ask.in) N(ask.out) N(ask.round) N(ask.objects) N(ask.signature) N(ask.progress) N(ask.barriers)
  N(ask.open)
  N(ask.newcomer))
WIRE_FIELDS(membership_member, mlfab__membership_member,
  N(rank) N(incarnation) N(arena_pid) N(arena_fd) N(arena_nonce) N(arena_bytes) N(host))
WIRE_LIST(membership_list, members, membership_member, mlfab__membership_member, 40, MLFAB__MEMBERSHIP_MEMBERS_MAX,
  N(epoch) N(newcomers))
WIRE_LIST(membership_owed, counts, u64, uint64_t, 8, MLFAB__MEMBERSHIP_MEMBERS_MAX,
  N(epoch) N(kind) N(algorithm) N(dtype) N(op) N(width) N(user) N(opens) N(root) N(number)
  N(signature) N(elements))
/* clang-format on */

#undef N
#undef A
#undef T
