/* sched_wire.c - encodes and decodes the frames of sched_wire.h. See codec.h. */
#include "sched_wire.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);

/* clang-format off */
WIRE_META(capacity, N(host) N(in) N(out))
WIRE_META(station, N(worker) N(incarnation) N(alive) N(accumulators) N(host))
WIRE_META(announce,
  N(id) N(bytes) N(shape) N(placed) N(lag) N(norm) N(kind) N(worker) N(incarnation) N(members)
  N(parts))
WIRE_META(report, N(id) N(placed) N(backlog) N(out_backlog) N(version) N(kind) N(worker) N(code))
WIRE_META(group_end, N(group))
WIRE_META(release, N(group) N(upto))
WIRE_META(group_fail, N(group) N(seq) N(worker) N(code))
WIRE_META(forward, N(group) N(offset) N(total))
WIRE_META(spread_fail, N(request) N(member_request) N(worker) N(code))
WIRE_META(schedule,
  N(delay_bound) N(plan_ahead_ns) N(interval_ns) N(best) N(whole) N(no_aggregation)
  N(no_distribution) N(rounds) N(host))
WIRE_META(via, N(seq) N(group) N(generation) N(aggregator))
WIRE_META(hop_grant, N(group) N(seq) N(upto) N(server))
WIRE_META(hop_chunk, N(group) N(seq) N(offset) N(total) N(server))
WIRE_META(pull_via, N(request) N(attempt) N(aggregator))
WIRE_META(hop_model,
  N(request) N(offset) N(bytes) N(version) N(commit) N(slice) N(flags) N(epoch) N(server)
  N(attempt))
WIRE_META(pull_done, N(request))
WIRE_FIELDS(plan_entry, mlfab__plan_entry,
  N(id) N(delay) N(rate) N(kind) N(worker) N(aggregator) N(group) N(fate))
WIRE_FIELDS(group_member, mlfab__group_member, N(seq) N(weight) N(worker) N(incarnation))
WIRE_FIELDS(spread_member, mlfab__spread_member, N(request) N(worker) N(incarnation) N(attempt))
WIRE_LIST(plan, entries, plan_entry, mlfab__plan_entry, 44, MLFAB__PLAN_ENTRIES_MAX,
  N(serial) N(rate_in) N(rate_out))
WIRE_LIST(spread, members, spread_member, mlfab__spread_member, 20, MLFAB__GROUP_MEMBERS_MAX,
  N(request) N(bytes) N(frames) N(whole))
WIRE_FIELDS(group, mlfab__group, N(group) N(bytes) N(rate_in) N(whole) N(packed))
/* clang-format on */

MLFAB__INTERNAL uint32_t mlfab__encode_group(uint8_t *meta, const mlfab__group *m,
                                             const mlfab__group_member *members,
                                             const mlfab__segment *segments) {
  wire_codec c = wire_encode(meta);
  wire_group(&c, 0, (mlfab__group *)m);
  uint32_t count = wire_codec_count(&c, 0, m->members, MLFAB__GROUP_MEMBERS_MAX, 24);
  for (uint32_t i = 0; i < count; i++) wire_group_member(&c, 0, (mlfab__group_member *)&members[i]);
  wire_write_segments(&c, m->segments, segments);
  return wire_encoded(&c);
}

MLFAB__INTERNAL int mlfab__decode_group(const uint8_t *meta, uint32_t bytes, mlfab__group *m,
                                        mlfab__group_member *members, mlfab__segment *segments) {
  wire_codec c = wire_decode(meta, bytes);
  wire_group(&c, 1, m);
  m->members = wire_codec_count(&c, 1, 0, MLFAB__GROUP_MEMBERS_MAX, 24);
  for (uint32_t i = 0; i < m->members; i++) {
    wire_group_member(&c, 1, &members[i]);
    if (!mlfab__finite(members[i].weight)) c.bad = 1;
  }
  uint64_t sum = wire_read_segments(&c, &m->segments, segments);
  return wire_decoded(&c) || m->members == 0 || sum != m->bytes ? MLFAB_ERR_FRAME : 0;
}

#undef N
