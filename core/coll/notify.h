/* notify.h - tells when a node of a stochastic reduce may send, may average, and must acknowledge. stochastic.c calls
 * it. Pure: one node, its edges, numbers of iterations. Slots, bytes and messages belong to the runner.
 *
 * An edge leads from a sender to a receiver, who keeps one slot for it. A slot has the iteration as a stamp in front
 * (header, written before the first byte) and behind (footer, after the last).
 *
 * NOTIFY_ACK, iteration k = 1, 2, ...:
 *    compute k; begin(k)             the model of k is there
 *    wait_ack                        every receiver has acknowledged k - 1
 *    send, NOTIFY(k) behind it       to each receiver; nothing is waited for in between
 *    wait_notify                     NOTIFY(k) from every sender
 *    reduce                          each slot's stamps are k before and after it is copied
 *    ACK(k) to each sender           once its slot is consumed; end(k)
 * On each edge:
 *    I1 sent - consumed is 0 or 1    I3 no slot is written before it is consumed
 *    I2 the iterations that the two ends have sent last are at most one apart
 *    I4 what is averaged is all of one iteration
 * I5: in a strongly connected graph some node can always proceed. Forbidden frames of a peer give FRAME, forbidden
 * calls of the runner give STATE; neither changes anything. ACK may go as soon as its own slot is consumed.
 *
 * BSP: a node sends without waiting for ACKs, waits for a barrier of all nodes, and averages the slots. ASYNC: the same
 * without the barrier. Senders overwrite slots, so both modes read them as seqlocks. An input counts if it is whole
 * (all four stamps are equal) and fresh (later than the last one consumed on that edge); it may come from another
 * iteration. The mean is over these inputs and the node's own.
 *
 * Source: ASAP §4, §6.2. Departs: §6.2 waits for the ACK before the reduce, which deadlocks on any cycle; §4 is
 * followed. */
#ifndef MLFAB__NOTIFY_H
#define MLFAB__NOTIFY_H

#include "../base/env.h"
#include "../../mlfab_partial.h"

typedef struct mlfab__notify_out {
  uint64_t sent, acked; /* iterations; 0: none */
} mlfab__notify_out;

typedef struct mlfab__notify_in {
  uint64_t header, footer; /* the slot's stamps, as the peer has reported them; 0: never written */
  uint64_t consumed;       /* the last averaged iteration */
  uint64_t looked;         /* this node's last iteration in which it judged the slot */
} mlfab__notify_in;

/* An iteration's inputs; whole + torn + stale is the number of senders. */
typedef struct mlfab__notify_tally {
  uint32_t whole, torn, stale;
} mlfab__notify_tally;

typedef struct mlfab__notify {
  uint32_t mode;            /* MLFAB_STOCHASTIC_* */
  uint32_t outs, ins;       /* edges; an edge has the index of its peer in the list */
  const uint32_t *out_peer; /* borrowed: ranks, ascending */
  const uint32_t *in_peer;
  mlfab__notify_out *out;
  mlfab__notify_in *in;
  uint64_t iteration;        /* number of the begun iteration; 0: none */
  uint64_t ended;            /* iteration - 1 while one is under way */
  uint64_t barrier;          /* BSP: barrier passed */
  uint32_t unacked, unsent;  /* edges that still miss this iteration's step */
  uint32_t unheard, unknown; /* not notified; not read */
  mlfab__notify_tally tally;
} mlfab__notify;

/* The event for which the node waits. */
enum mlfab__notify_wait {
  MLFAB__NOTIFY_NOTHING, /* the runner has to act: compute and begin, send, or reduce */
  MLFAB__NOTIFY_FOR_ACK,
  MLFAB__NOTIFY_FOR_NOTIFY,
  MLFAB__NOTIFY_FOR_BARRIER
};

/* The state of a slot. */
enum mlfab__notify_input {
  MLFAB__NOTIFY_STALE, /* no new model since the last time */
  MLFAB__NOTIFY_TORN,  /* the sender is, or was, writing */
  MLFAB__NOTIFY_WHOLE
};

typedef struct mlfab__notify_stamps {
  uint64_t header, footer;
} mlfab__notify_stamps;

/* The lists (mlfab__graph_peers) are borrowed. Errors: ARGUMENT (mode), MEMORY. */
MLFAB__INTERNAL int mlfab__notify_init(mlfab__notify *notify, mlfab__env *env, uint32_t mode,
                                       const uint32_t *out_peer, uint32_t outs,
                                       const uint32_t *in_peer, uint32_t ins);
MLFAB__INTERNAL void mlfab__notify_free(mlfab__notify *notify, mlfab__env *env);
/* Returns the index of a peer's edge, or -1: no such edge. O(log edges). */
MLFAB__INTERNAL int32_t mlfab__notify_edge(const uint32_t *peers, uint32_t n, uint32_t peer);

/* --- this side; errors: STATE --- */

/* Begins iteration k, when its model is there; k - 1 has ended. */
MLFAB__INTERNAL int mlfab__notify_begin(mlfab__notify *notify, uint64_t k);
/* Returns 1 if the model of this iteration may go to this receiver, and has not yet. It is 1 for all remaining
 * receivers or for none, so that the runner sends to all at once. */
MLFAB__INTERNAL int mlfab__notify_may_send(const mlfab__notify *notify, uint32_t edge);
/* Notes that the transport has the model, and NOTIFY after it. */
MLFAB__INTERNAL int mlfab__notify_sent(mlfab__notify *notify, uint32_t edge);
/* BSP: notes that all nodes have sent k. */
MLFAB__INTERNAL int mlfab__notify_barrier(mlfab__notify *notify, uint64_t k);
/* Returns 1 if the runner may read the slots. */
MLFAB__INTERNAL int mlfab__notify_ready(const mlfab__notify *notify);
/* Judges a slot before it is copied. Only a WHOLE slot has something to copy; else `consumed` gets these stamps
 * twice. */
MLFAB__INTERNAL int mlfab__notify_look(const mlfab__notify *notify, uint32_t edge,
                                       mlfab__notify_stamps stamps);
/* Notes that a slot was read, with these stamps before and after; once per slot and iteration, in any order. Returns an
 * enum mlfab__notify_input, or a negative error. Only WHOLE copies may be averaged. *ack_p: the iteration to
 * acknowledge to this sender, or 0. Errors: STATE; FRAME (NOTIFY_ACK: the sender wrote before the acknowledgement). */
MLFAB__INTERNAL int mlfab__notify_consumed(mlfab__notify *notify, uint32_t edge,
                                           mlfab__notify_stamps before, mlfab__notify_stamps after,
                                           uint64_t *ack_p, mlfab_error *error);
/* Ends the iteration, after all slots were consumed. Divide by tally.whole + 1. */
MLFAB__INTERNAL int mlfab__notify_end(mlfab__notify *notify, mlfab__notify_tally *tally_p);

/* --- peers; errors: FRAME, naming the peer --- */

/* Notes the first byte of a model of iteration `header`: returns 0 if it may be written to the slot. If the peer writes
 * its slot itself, this call is unnecessary. */
MLFAB__INTERNAL int mlfab__notify_arrives(mlfab__notify *notify, uint32_t edge, uint64_t header,
                                          mlfab_error *error);
/* Takes NOTIFY: the whole model is in the slot, which has these stamps. */
MLFAB__INTERNAL int mlfab__notify_notified(mlfab__notify *notify, uint32_t edge, uint64_t header,
                                           uint64_t footer, mlfab_error *error);
/* Takes ACK(k). */
MLFAB__INTERNAL int mlfab__notify_acked(mlfab__notify *notify, uint32_t edge, uint64_t k,
                                        mlfab_error *error);

/* Returns an enum mlfab__notify_wait; *rank_p is the first awaited peer, or MLFAB_NO_RANK. */
MLFAB__INTERNAL int mlfab__notify_awaits(const mlfab__notify *notify, int32_t *rank_p);

#endif
