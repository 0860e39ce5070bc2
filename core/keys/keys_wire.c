/* keys_wire.c - the fields of these frames. See keys_wire.h and codec.h. */
#include "keys_wire.h"

#include "../wire/codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);
#define P(member) N(member[0]) N(member[1])

/* clang-format off */
WIRE_META(challenge, N(node) N(roles) N(epoch) N(first) N(to) N(of) N(vouched) P(nonce) P(keys) N(job))
WIRE_META(answer, N(number) N(roles) N(epoch) N(key) N(vouched) P(nonce) P(proof))
WIRE_META(proof, wire_challenge(c, decode, &m->challenge); P(proof))
/* clang-format on */

#undef N
#undef P
