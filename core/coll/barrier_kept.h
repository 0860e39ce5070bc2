/* barrier_kept.h - barriers at both copies of server 0 (../node/mirrored.h). */
#ifndef MLFAB__BARRIER_KEPT_H
#define MLFAB__BARRIER_KEPT_H

#include "../node/mirrored.h"
#include "../wire/kept_wire.h"
#include "barrier.h"

/* Adds the part, if servers have replicas. */
MLFAB__INTERNAL void mlfab__barrier_keep(struct mlfab_node *node, mlfab__barrier_server *server);

#endif
