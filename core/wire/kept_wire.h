/* kept_wire.h - records of server 0 that the other copy of server 0 has, too (../node/mirrored.h). */
#ifndef MLFAB__KEPT_WIRE_H
#define MLFAB__KEPT_WIRE_H

#include "wire.h"

typedef struct mlfab__peer_state { /* a node (mlfab__peer), and as a worker (mlfab__caller) */
  uint32_t joined, fresh, hand, incarnation;
  uint64_t nonce;
  uint32_t seen, hand_seen, dead, left; /* seen: its incarnation in HELLO */
} mlfab__peer_state;

typedef struct mlfab__barrier_state {
  uint64_t over;
} mlfab__barrier_state;

typedef struct mlfab__barrier_worker_state {
  uint32_t gone, done, left, guest, wants, half, among;
  uint64_t base, asked, progress;
} mlfab__barrier_worker_state;

MLFAB__WIRE_DECLARE(peer_state)
MLFAB__WIRE_DECLARE(barrier_state)
MLFAB__WIRE_DECLARE(barrier_worker_state)

#endif
