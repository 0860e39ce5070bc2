/* state.c - encodes and decodes the records of state.h. See codec.h. */
#include "state.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
#define A(member) N(member[0]) N(member[1]) N(member[2]) N(member[3])

/* clang-format off */
WIRE_META(checkpoint_head,
  N(number) N(server) N(servers) N(workers) N(epoch) N(slices) N(owned))
WIRE_META(checkpoint_worker, N(worker) N(incarnation) N(top) A(applied) A(dropped) N(pushed))
WIRE_META(checkpoint_peer, N(worker) N(flags) N(decided) N(changed) N(taken) N(significance))
WIRE_META(checkpoint_slice, N(slice) N(version) N(commit))
WIRE_META(checkpoint_bytes, N(slice) N(kind) N(offset) N(last))
WIRE_META(checkpoint_end, N(records))
/* clang-format on */

#undef N
#undef A
