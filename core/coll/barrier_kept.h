/* barrier_kept.h - barriers at both copies of server 0 (../node/mirrored.h). */
#ifndef MLFAB__BARRIER_KEPT_H
#define MLFAB__BARRIER_KEPT_H

#include "../node/mirrored.h"
#include "../wire/wire.h"
#include "barrier.h"

typedef struct mlfab__barrier_state {
  uint64_t over;
} mlfab__barrier_state;

typedef struct mlfab__barrier_worker_state {
  uint32_t gone, done, left, guest, wants, late, among;
  uint64_t base, asked, progress;
} mlfab__barrier_worker_state;

MLFAB__WIRE_DECLARE(barrier_state)
MLFAB__WIRE_DECLARE(barrier_worker_state)

/* Adds the part, if servers have replicas. */
MLFAB__INTERNAL void mlfab__barrier_keep(struct mlfab_node *node, mlfab__barrier_server *server);

#endif
