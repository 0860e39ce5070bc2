/* checkpoint_wire.c - encodes and decodes the frames of checkpoint_wire.h, and the manifest. See codec.h. */
#include "checkpoint_wire.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
#define T(member) wire_codec_text(c, decode, m->member, sizeof m->member);

/* clang-format off */
WIRE_META(checkpoint_ask, N(ask) N(timeout_ns) N(keep) T(dir))
WIRE_META(checkpoint_done,
  N(ask) N(code) N(rank) N(is_server) N(servers) N(number) N(version) N(bytes) T(text))
WIRE_META(checkpoint_order, N(number) N(set) N(index) N(shards) T(dir))
WIRE_META(checkpoint_shard,
  N(number) N(set) N(bytes) N(version) N(server) N(chain) N(epoch) N(code) T(text))
WIRE_META(checkpoint_resume, T(dir))
WIRE_FIELDS(checkpoint_entry, mlfab__checkpoint_entry, N(bytes) N(chain))
WIRE_LIST(checkpoint_manifest, shards, checkpoint_entry, mlfab__checkpoint_entry, 12,
  MLFAB__CHECKPOINT_SHARDS_MAX, N(number) N(version) N(bytes) N(epoch) N(slices))
/* clang-format on */

#undef N
#undef T
