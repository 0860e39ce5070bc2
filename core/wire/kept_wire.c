/* kept_wire.c - the fields of these records. See kept_wire.h and codec.h. */
#include "kept_wire.h"

#include "codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);

/* clang-format off */
WIRE_META(peer_state,
  N(joined) N(fresh) N(hand) N(incarnation) N(nonce) N(seen) N(hand_seen) N(dead) N(left))
WIRE_META(barrier_state, N(over))
WIRE_META(barrier_worker_state,
  N(gone) N(done) N(left) N(guest) N(wants) N(half) N(among) N(base) N(asked) N(progress))
/* clang-format on */

#undef N
