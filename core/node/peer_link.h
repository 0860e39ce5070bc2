/* peer_link.h - links between workers, for aggregation, allreduce and collectives: see peer_link.c. */
#ifndef MLFAB__PEER_LINK_H
#define MLFAB__PEER_LINK_H

#include "node.h"

/* For a node whose roles use links between workers, and for server 0, which tells addresses. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__peer_link_attach(mlfab_node *node);

#endif
