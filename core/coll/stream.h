/* stream.h - reliable messages between the workers of one epoch. Layer 3.
 *
 * A message is bytes with a name: (channel, number, tag), see mlfab__coll. It goes over the
 * sender's own HOP link to the receiver as frames of at most chunk_bytes, numbered from 1 for each
 * pair and epoch; acknowledgements come back on the same link. Messages for one peer leave in the
 * order in which they were given, whole.
 *
 *    a message:  QUEUED --its first frame taken by the link--> UNDER WAY --all acknowledged--> gone
 *
 *    a link:     OPEN --breaks--> (none) --a new one stands--> ASKING --acknowledged--> OPEN
 *
 * A new link begins with a question, a bare frame with the number 0, and goes on from the answer:
 * so no frame that the peer has is sent again. Number 0 is a duplicate in any case, and duplicates
 * are acknowledged at once. Whoever leaves asks likewise, behind its last frame: it need not wait
 * for the next acknowledgement by the clock.
 *
 * Invariants. (1) A frame is kept, or can be made again, until its acknowledgement has come: a
 * link that breaks is followed by a new one, and everything that the peer has not got is sent
 * again. (2) The receiver hands on frame n + 1 only after n, and each once; what it has seen is
 * dropped, what leaves a gap drops the link. (3) Bytes that are copied belong to the stream; bytes
 * that are borrowed are not touched by anybody else until `given_back`, and by then no link holds
 * them: what a link still has is detached. Their contents may change once the peer can only have
 * them (algorithm.h): they are not read again. (4) Eager bytes that the peer has not consumed are
 * bounded by MLFAB__STREAM_CREDIT: more wait here. A peer that sends more is dropped. The bound is
 * above what 16 collectives and 32 rounds of objects can have (comm.h), so nothing that the peer
 * waits for ever stands behind what it may not send. (5) An epoch ends all: `begin` and `end`
 * forget every message, and frames of another epoch are dropped.
 *
 * Memory: a message that waits costs its description, and its bytes when they are copied: from a
 * pool that keeps what was ever in use at once until the next epoch has begun, and MLFAB__STREAM_POOL
 * then. So nothing is allocated while calls repeat. All costs are O(1) a frame. */
#ifndef MLFAB__STREAM_H
#define MLFAB__STREAM_H

#include "../base/pool.h"
#include "../node/role.h"
#include "coll_wire.h"

enum {
  MLFAB__STREAM_CREDIT = 8 << 20, /* eager bytes at a peer */
  MLFAB__STREAM_COPY = 8192,      /* bulks up to this are copied by the transport (token 0) */
  MLFAB__STREAM_LEND = 32 << 10,  /* messages up to this are better copied than waited for */
  /* Acknowledge at least so often, or for so many bytes; else at the end of a message of more than
   * MLFAB__STREAM_LEND bytes, whose sender waits for them, and four times a heartbeat. */
  MLFAB__STREAM_ACK_FRAMES = 16,
  MLFAB__STREAM_ACK_BYTES = 512 << 10,
  MLFAB__STREAM_QUEUE_MAX = 1 << 20, /* messages for one peer */
  MLFAB__STREAM_POOL = 4 << 20       /* bytes of the pool that outlive an epoch */
};

/* Who uses it. */
typedef struct mlfab__stream_user {
  void *self;
  /* A frame from this member came, in order, once. bulk is borrowed for the length of the call.
   * Both functions may call everything below but `free`. */
  void (*deliver)(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                  uint32_t bytes);
  /* The borrowed bytes of a message are free. */
  void (*given_back)(void *self, uint32_t member, uint64_t cookie);
} mlfab__stream_user;

typedef struct mlfab__lane mlfab__lane; /* one peer: stream.c */

typedef struct mlfab__streams {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port links; /* our links to others, by rank: `ready` opens the link when there is none */
  mlfab__port down;  /* others' links to us, by rank: acknowledgements are posted there */
  mlfab__stream_user user;
  uint32_t epoch; /* 0: none */
  uint32_t members;
  const uint32_t *ranks;  /* of members; the user's, until end */
  uint32_t *member_of;    /* by rank, plus one; 0: not a member */
  mlfab__lane **streams;  /* by member, NULL until it is first used */
  uint64_t bytes_waiting; /* of all messages that are not acknowledged */
  uint32_t chunk;         /* most bytes of a frame */
  uint64_t serial;        /* above all serials of earlier epochs */
  /* Copied messages. A block that was lent may be read by the transport until it has heard of the detach: so no
   * block is freed before `trim`, when all actions that are due have been carried out. */
  mlfab__pool pool;
  uint8_t much;    /* too many, when the epoch began */
  uint8_t leaving; /* acknowledgements are asked for */
} mlfab__streams;

MLFAB__INTERNAL void mlfab__streams_init(mlfab__streams *streams, mlfab__env *env,
                                         const mlfab_config *config, const mlfab__port *links,
                                         const mlfab__port *down, const mlfab__stream_user *user);
MLFAB__INTERNAL void mlfab__streams_free(mlfab__streams *streams);
/* A new epoch, with a number of its own; ends the one before. Errors: MEMORY: there is none
 * then. */
MLFAB__INTERNAL int mlfab__streams_begin(mlfab__streams *streams, uint32_t epoch,
                                         const uint32_t *ranks, uint32_t members);
/* No link borrows anything that was forgotten: the pool may let go of what is too much. */
MLFAB__INTERNAL void mlfab__streams_trim(mlfab__streams *streams);
/* Forgets all messages: everything borrowed is free on return, without given_back. */
MLFAB__INTERNAL void mlfab__streams_end(mlfab__streams *streams);

/* Queues `n` bytes (any number, 0 too) that are a contiguous part of a message: head tells
 * channel, number, tag, flags, signature, offset and total; epoch and seq are filled in. copy:
 * they are copied now; else borrowed until given_back(cookie), which for a message of up to
 * MLFAB__STREAM_LEND bytes may take a quarter of a heartbeat. Parts of one message in the order
 * of their offsets. Eager ones are of MLFAB__STREAM_CREDIT at most. Errors: MEMORY (nothing has
 * changed), also beyond MLFAB__STREAM_QUEUE_MAX. */
MLFAB__INTERNAL int mlfab__stream_send(mlfab__streams *streams, uint32_t member,
                                       const mlfab__coll *head, const void *bytes, uint64_t n,
                                       int copy, uint64_t cookie);
/* Eager bytes of this member, which were delivered, wait no longer. */
MLFAB__INTERNAL void mlfab__stream_consumed(mlfab__streams *streams, uint32_t member,
                                            uint64_t bytes);

/* Frames: COLL on others' links to us, COLL_ACK on ours. 1 when they were of this kind. What
 * breaks the protocol drops the link. */
MLFAB__INTERNAL int mlfab__stream_member_frame(mlfab__streams *streams, uint32_t rank,
                                               const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__stream_peer_frame(mlfab__streams *streams, uint32_t rank,
                                             const mlfab__frame_in *frame);
/* Our link to a worker stands; is lost. Another's to us is lost (nothing is forgotten). */
MLFAB__INTERNAL void mlfab__stream_peer_up(mlfab__streams *streams, uint32_t rank);
MLFAB__INTERNAL void mlfab__stream_peer_lost(mlfab__streams *streams, uint32_t rank);
/* 1 when something waits for a link to this worker. since_p: since when it has been missing
 * while it was wanted (now, when it is not yet counted); NULL is accepted. */
MLFAB__INTERNAL int mlfab__stream_peer_missing(mlfab__streams *streams, uint32_t rank,
                                               uint64_t now_ns, uint64_t *since_p);
/* The next frame for this worker: 1, or 0; it was taken; the bulk of a token is free. A token
 * is one more than the message's serial, which no other message for this peer ever has: a late report finds
 * nothing. */
MLFAB__INTERNAL int mlfab__stream_next(mlfab__streams *streams, uint32_t rank,
                                       mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__stream_taken(mlfab__streams *streams, uint32_t rank,
                                         const mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__stream_sent(mlfab__streams *streams, uint32_t rank, uint64_t token);
/* Four times a heartbeat: acknowledges what was not. */
MLFAB__INTERNAL void mlfab__streams_tick(mlfab__streams *streams);
/* This worker will leave: from now on it asks for acknowledgements as soon as all is sent. */
MLFAB__INTERNAL void mlfab__streams_leave(mlfab__streams *streams);
/* This worker has said goodbye: it waits for nothing of ours any more. */
MLFAB__INTERNAL void mlfab__stream_parted(mlfab__streams *streams, uint32_t rank);
/* 1 when every message that was queued for somebody who is still here has been acknowledged. */
MLFAB__INTERNAL int mlfab__streams_quiet(const mlfab__streams *streams);

#endif
