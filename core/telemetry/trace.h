/* trace.h - a recorder of the frames on a node's links, and of its scheduler's plans.
 *
 * The recorder is the observer (tap) of a node. A lane is one direction of one link, or the plans for one worker. A
 * transfer is an update's part at one server, the answer to a pull, a message of a collective, or a slice that moves;
 * each end computes the same key for it. On a lane, a run is a row of frames with bulks of one transfer, with pauses of
 * at most MLFAB__TRACE_GAP_NS:
 *
 *    (a frame with a bulk) --> RUNS --another transfer's frame, a pause, stop--> a RUN in the ring
 *
 * One frame of a transfer carries its arrow: the frame with the first byte, or the last frame if the first is unknown
 * (pulls). The sender records FROM when a transport has taken that frame, the receiver TO when it has arrived.
 *
 * Invariants. (1) Runs of a lane do not overlap and are recorded in the order of time: a lane's times ascend by at least
 * 1 ns. (2) The bytes of all runs of out-lanes plus those that were dropped are the node's payload_sent, and those of
 * in-lanes its payload_received, once mlfab__trace_stop has ended the runs. (3) FROM of the sender and TO of the
 * receiver have the same key; each is inside a run of its lane. (4) The ring is bounded: a record that does not fit is
 * counted in `lost`. (5) The recorder leaves the node unchanged.
 *
 * Times are not those of the wire: a run begins when a transport takes the first frame, and ends when it takes the
 * last. Bytes in the system's buffers leave later. */
#ifndef MLFAB__TRACE_H
#define MLFAB__TRACE_H

#include "../base/map.h"
#include "../node/tap.h"

enum { MLFAB__TRACE_RECORDS = 32768, MLFAB__TRACE_GAP_NS = 1000000, MLFAB__TRACE_SLOTS = 4 };

/* Kinds of transfers, to which frames with a bulk belong. */
enum mlfab__trace_what {
  MLFAB__TRACE_OTHER,
  MLFAB__TRACE_PUSH,  /* number: of the update */
  MLFAB__TRACE_PULL,  /* number: of the pull */
  MLFAB__TRACE_GROUP, /* member -> aggregator; number: of the update */
  MLFAB__TRACE_SUM,   /* aggregator -> server; number: of the group */
  MLFAB__TRACE_COLL,  /* number: of the collective */
  MLFAB__TRACE_SLICE  /* number: of the slice */
};

enum mlfab__trace_kind {
  MLFAB__TRACE_LANE, /* a new lane */
  MLFAB__TRACE_RUN,
  MLFAB__TRACE_FROM,
  MLFAB__TRACE_TO,
  MLFAB__TRACE_PLAN,
  MLFAB__TRACE_DROP, /* a plan drops an update */
  MLFAB__TRACE_LOST  /* `bytes` records did not fit in the ring */
};

typedef struct mlfab__trace_record {
  uint64_t at_ns, end_ns;
  uint64_t key;    /* of the transfer; PLAN: serial of the plan */
  uint64_t number; /* see mlfab__trace_what */
  uint64_t bytes;
  uint64_t more; /* PLAN: its delay; RUN: number of frames */
  uint32_t lane; /* mlfab__trace_lane_of */
  uint32_t who;  /* PLAN: the aggregator */
  uint8_t kind, what;
} mlfab__trace_record;

typedef struct mlfab__trace_lane {
  int named;                            /* LANE is in the ring */
  uint64_t last_ns;                     /* end of the last run */
  uint64_t frames;                      /* of the present run; 0: there is none */
  uint64_t seen_ns;                     /* time of its last frame, unchanged */
  uint64_t ends_ns[MLFAB__TRACE_SLOTS]; /* plans: end of the last plan of each slot */
  mlfab__trace_record run;
} mlfab__trace_lane;

/* A frame's place in its transfer. */
typedef struct mlfab__trace_transfer {
  uint8_t what;
  uint8_t arrow; /* this frame carries the arrow */
  uint64_t number, key;
} mlfab__trace_transfer;

typedef struct mlfab__trace {
  mlfab__env *env;
  uint32_t rank, server; /* of this node, or MLFAB__NO_NODE */
  /* The present time on the node's clock; NULL: the node's own time, which is read once for many frames. */
  uint64_t (*clock)(void *user);
  void *user;
  mlfab__tap tap;
  mlfab__map places; /* lane + 1 -> index */
  mlfab__trace_lane *lanes;
  uint32_t nlanes, lanes_room;
  mlfab__trace_record *ring; /* MLFAB__TRACE_RECORDS */
  uint32_t begin, count;
  uint64_t lost, lost_bytes; /* since the last LOST; in all, bytes of runs */
} mlfab__trace;

/* A lane's number: below 2^32. Plans for a worker: kind MLFAB__LINK_KINDS, and a slot in `out`. */
static inline uint32_t mlfab__trace_lane_of(uint32_t kind, uint32_t out, uint32_t peer) {
  return (kind * MLFAB__TRACE_SLOTS + out) << 20 | (peer & 0xfffffu);
}

/* Makes the recorder the observer of the node. clock may be NULL. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__trace_open(mlfab__env *env, mlfab_node *node,
                                      uint64_t (*clock)(void *user), void *user,
                                      mlfab__trace **trace_p);
/* node NULL: the node is gone already. */
MLFAB__INTERNAL void mlfab__trace_close(mlfab__trace **trace_p, mlfab_node *node);
/* The transfer of a frame with a bulk, at the node with this rank and server number. */
MLFAB__INTERNAL void mlfab__trace_classify(const mlfab__tap_frame *frame, uint32_t rank,
                                           uint32_t server, mlfab__trace_transfer *transfer);
/* Takes up to `most` records, oldest first. Ends runs that have paused; with `now_ns` MLFAB__NEVER all. */
MLFAB__INTERNAL uint32_t mlfab__trace_take(mlfab__trace *trace, uint64_t now_ns,
                                           mlfab__trace_record *records, uint32_t most);

#endif
