/* reshard_wire.c - encodes and decodes the frames of reshard_wire.h. See codec.h. */
#include "reshard_wire.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
#define T(member) wire_codec_text(c, decode, m->member, sizeof m->member);

/* clang-format off */
WIRE_META(reshard_done, N(ask) N(code) N(rank) N(is_server) T(text))
WIRE_META(frozen, N(attempt) N(unreached))
WIRE_META(stop, N(attempt) N(kind))
WIRE_META(reshard_server_bytes,
  N(attempt) N(slice) N(kind) N(offset) N(version) N(commit) N(last))
WIRE_LIST(reshard_ask, servers, server, uint32_t, 2, MLFAB__SLICES_MAX, N(ask) N(timeout_ns))
WIRE_LIST(freeze, servers, server, uint32_t, 2, MLFAB__SLICES_MAX, N(attempt))
WIRE_LIST(move, slices, server, uint32_t, 2, MLFAB__SLICES_MAX, N(attempt) N(step) N(flush))
WIRE_LIST(resume, slices, server, uint32_t, 2, MLFAB__SLICES_MAX, N(attempt) N(epoch))
/* clang-format on */

#undef N
#undef T
