/* peer_wire.c - the fields of these frames. See peer_wire.h and codec.h. */
#include "peer_wire.h"

#include "codec.h"

#define N(member) wire_codec_number(c, decode, &m->member, sizeof m->member);

/* clang-format off */
WIRE_META(meet, N(node) N(incarnation) N(nonce))
WIRE_META(where, N(node))
WIRE_FIELDS(tree_node, mlfab__tree_node, N(worker) N(parent) N(giver))
WIRE_LIST(tree_ask, nodes, u32, uint32_t, 4, MLFAB__TREE_NODES_MAX, N(number) N(bytes) N(root))
WIRE_LIST(tree_plan, nodes, tree_node, mlfab__tree_node, 12, MLFAB__TREE_NODES_MAX, N(number))
/* clang-format on */

#undef N
