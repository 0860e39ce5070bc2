/* checkpoint_wire.c - the fields of these frames and records. See checkpoint_wire.h and codec.h. Layer 4. */
#include "checkpoint_wire.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
#define A(member) N(member[0]) N(member[1]) N(member[2]) N(member[3])
#define T(member) wire_codec_text(c, decode, m->member, sizeof m->member);

/* clang-format off */
WIRE_META(checkpoint_ask, N(ask) N(timeout_ns) N(keep) T(dir))
WIRE_META(checkpoint_done,
  N(ask) N(code) N(rank) N(is_server) N(servers) N(number) N(version) N(bytes) T(text))
WIRE_META(checkpoint_order, N(number) N(set) N(index) N(shards) T(dir))
WIRE_META(checkpoint_shard,
  N(number) N(set) N(bytes) N(version) N(server) N(chain) N(epoch) N(code) T(text))
WIRE_META(checkpoint_resume, T(dir))
WIRE_META(checkpoint_head,
  N(number) N(server) N(servers) N(workers) N(epoch) N(slices) N(owned))
WIRE_META(checkpoint_worker, N(worker) N(incarnation) N(top) A(applied) A(dropped) N(pushed))
WIRE_META(checkpoint_peer, N(worker) N(flags) N(decided) N(changed) N(taken) N(significance))
WIRE_META(checkpoint_slice, N(slice) N(clock) N(version) N(commit))
WIRE_META(checkpoint_bytes, N(slice) N(kind) N(offset) N(last))
WIRE_META(checkpoint_end, N(records))
WIRE_FIELDS(checkpoint_entry, mlfab__checkpoint_entry, N(bytes) N(chain))
WIRE_LIST(checkpoint_manifest, shards, checkpoint_entry, mlfab__checkpoint_entry, 12,
  MLFAB__CHECKPOINT_SHARDS_MAX, N(number) N(version) N(bytes) N(epoch) N(slices))
/* clang-format on */

#undef N
#undef A
#undef T
