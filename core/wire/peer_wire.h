/* peer_wire.h - frames of links between workers, and of the trees of allreduces. See wire.h. */
#ifndef MLFAB__PEER_WIRE_H
#define MLFAB__PEER_WIRE_H

#include "wire.h"

typedef struct mlfab__meet { /* worker -> aggregator, first frame of a link between workers */
  uint32_t node, incarnation;
  uint64_t nonce; /* of this process */
} mlfab__meet;

/* worker -> server 0: asks for this worker's addresses. THERE is a mlfab__member */
typedef struct mlfab__where {
  uint32_t node;
} mlfab__where;

#define MLFAB__TREE_NODES_MAX 1024u

/* A tree for an allreduce (coll/trees.h). Worker -> server 0: the worker begins call `number` and needs its tree; no
 * ranks. Server 0 -> scheduler: asks for a tree over these workers; their ranks follow. */
typedef struct mlfab__tree_ask {
  uint64_t number; /* MLFAB__COMM_TREE (comm.h) */
  uint64_t bytes;
  uint32_t root, nodes;
} mlfab__tree_ask;

typedef struct mlfab__tree_node {
  uint32_t worker, parent, giver;
} mlfab__tree_node;

/* Scheduler -> server 0: all these workers, by rank, in the order of adding; an empty list: there is no tree.
 * Server 0 -> worker: the same, by member number. */
typedef struct mlfab__tree_plan {
  uint64_t number;
  uint32_t nodes;
} mlfab__tree_plan;

/* Declared as in wire.h. */
/* clang-format off */
#define MLFAB__PEER_PAIRS(X) X(meet) X(where)
#define MLFAB__PEER_LISTS(X) X(tree_ask, uint32_t) X(tree_plan, mlfab__tree_node)
/* clang-format on */
MLFAB__PEER_PAIRS(MLFAB__WIRE_DECLARE)
MLFAB__PEER_LISTS(MLFAB__WIRE_DECLARE_LIST)

#endif
