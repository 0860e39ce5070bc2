/* stream.h - reliable messages between the workers of one epoch. engine.c and the objects send by it.
 *
 * A message is bytes with a name: (channel, number, tag), see mlfab__coll. It goes over the sender's own link to the
 * receiver as frames of at most chunk_bytes, numbered from 1 for each pair and epoch; acknowledgements return on the
 * same link. Messages for one peer leave whole, in the order of mlfab__stream_send.
 *
 *    a message:  QUEUED --its first frame taken by the link--> UNDER WAY --all acknowledged--> gone
 *
 *    a link:     OPEN --breaks--> (none) --a new one stands--> ASKING --acknowledged--> OPEN
 *
 * A new link begins with a question, a bare frame with the number 0, and goes on from the answer. So only frames that
 * the peer lacks are sent again. Number 0 is always a duplicate, and a receiver acknowledges duplicates at once. A
 * worker that leaves asks the same way after its last frame, so that it need not wait for the next timed
 * acknowledgement.
 *
 * Invariants. (1) The sender can make a frame again until its acknowledgement has come: after a link breaks, it sends
 * all frames that the peer lacks over the next link. (2) The receiver delivers frame n + 1 only after n, and each once;
 * it ignores known frames, and drops the link of a peer that leaves a gap. (3) Copied bytes belong to the stream.
 * Borrowed bytes belong to it until `given_back`; by then no link holds them. Their contents may change once the peer
 * must have them (algorithm.h): the stream does not read them again. (4) The peer has at most MLFAB__STREAM_CREDIT
 * eager bytes that it has not consumed; further bytes wait here. The receiver drops a peer that sends more. The bound
 * exceeds the bytes that 16 collectives and 32 rounds of objects can have (comm.h), so a message that may not be sent
 * yet delays no awaited message. (5) `begin` and `end` forget every message; the receiver ignores frames of another
 * epoch.
 *
 * Memory: a message that waits costs its description, and its bytes if they are copied. Copies come from a pool, which
 * keeps all its blocks until the next epoch has begun, and then keeps MLFAB__STREAM_POOL bytes. So repeated calls
 * allocate nothing. Every function is O(1) per frame. */
#ifndef MLFAB__STREAM_H
#define MLFAB__STREAM_H

#include "../base/pool.h"
#include "../node/role.h"
#include "coll_wire.h"

enum {
  MLFAB__STREAM_CREDIT = 8 << 20, /* limit of eager bytes at a peer */
  MLFAB__STREAM_COPY = 8192,      /* bulks up to this are copied by the transport (token 0) */
  MLFAB__STREAM_LEND = 32 << 10,  /* a message up to this size is better copied than waited for */
  /* Acknowledge at least this often, or for so many bytes; else at the end of a message of more than MLFAB__STREAM_LEND
   * bytes, whose sender waits for them, and four times a heartbeat. */
  MLFAB__STREAM_ACK_FRAMES = 16,
  MLFAB__STREAM_ACK_BYTES = 512 << 10,
  MLFAB__STREAM_BORROW = 0, /* ways to keep a message's bytes */
  MLFAB__STREAM_KEEP_COPY = 1,
  MLFAB__STREAM_CALLERS = 2,
  MLFAB__STREAM_QUEUE_MAX = 1 << 20, /* limit of the messages for one peer */
  MLFAB__STREAM_POOL = 4 << 20       /* bytes of the pool that outlive an epoch */
};

/* The user of the streams. */
typedef struct mlfab__stream_user {
  void *self;
  /* Called for each frame from this member, in order, once. bulk is borrowed for the length of the call. Both functions
   * may call everything below except `free`. */
  void (*deliver)(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                  uint32_t bytes);
  /* Called when the borrowed bytes of a message are free. */
  void (*given_back)(void *self, uint32_t member, uint64_t cookie);
} mlfab__stream_user;

typedef struct mlfab__lane mlfab__lane; /* one peer: stream.c */

typedef struct mlfab__streams {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port links; /* our links to others, by rank: `ready` opens a missing link */
  mlfab__port down;  /* others' links to us, by rank: acknowledgements are posted there */
  mlfab__stream_user user;
  uint32_t epoch; /* 0: none */
  uint32_t members;
  const uint32_t *ranks;  /* ranks of members; the user owns them until end */
  uint32_t *member_of;    /* by rank, plus one; 0: not a member */
  mlfab__lane **streams;  /* by member, NULL until it is first used */
  uint64_t bytes_waiting; /* bytes of all messages that are not acknowledged */
  uint64_t serial;        /* above all serials of earlier epochs */
  /* Copied messages. The transport may read a lent block until it has heard of the detach: so blocks are freed in
   * `trim`, when all due actions were carried out. */
  mlfab__pool pool;
  uint8_t much;    /* it had too many bytes when the epoch began */
  uint8_t leaving; /* acknowledgements are asked for */
} mlfab__streams;

MLFAB__INTERNAL void mlfab__streams_init(mlfab__streams *streams, mlfab__env *env,
                                         const mlfab_config *config, const mlfab__port *links,
                                         const mlfab__port *down, const mlfab__stream_user *user);
MLFAB__INTERNAL void mlfab__streams_free(mlfab__streams *streams);
/* Begins a new epoch, with its own number; ends the former one. Errors: MEMORY: then there is none. */
MLFAB__INTERNAL int mlfab__streams_begin(mlfab__streams *streams, uint32_t epoch,
                                         const uint32_t *ranks, uint32_t members);
/* Lets the pool free blocks: links borrow no bytes of forgotten messages any more. */
MLFAB__INTERNAL void mlfab__streams_trim(mlfab__streams *streams);
/* Forgets all messages. On return all borrowed bytes are free, without given_back. */
MLFAB__INTERNAL void mlfab__streams_end(mlfab__streams *streams);

/* Queues `n` bytes (any number, 0 too) that are a contiguous part of a message: head has channel, number, tag, flags,
 * signature, offset and total; epoch and seq are filled in. KEEP_COPY copies the bytes now. BORROW borrows them until
 * given_back(cookie), which for a message of up to MLFAB__STREAM_LEND bytes may take a quarter of a heartbeat. CALLERS
 * also borrows; the bytes belong to a caller, who gets them back only with a finished request. Queue the parts of one
 * message in the order of their offsets. Eager messages have at most MLFAB__STREAM_CREDIT bytes. Errors: MEMORY
 * (nothing has changed), also beyond MLFAB__STREAM_QUEUE_MAX. */
MLFAB__INTERNAL int mlfab__stream_send(mlfab__streams *streams, uint32_t member,
                                       const mlfab__coll *head, const void *bytes, uint64_t n,
                                       int how, uint64_t cookie);
/* Notes that delivered eager bytes of this member are consumed. */
MLFAB__INTERNAL void mlfab__stream_consumed(mlfab__streams *streams, uint32_t member,
                                            uint64_t bytes);

/* Take frames: COLL on others' links to us, COLL_ACK on ours. Return 1 if the frame had this type. A frame that breaks
 * the protocol drops the link. */
MLFAB__INTERNAL int mlfab__stream_member_frame(mlfab__streams *streams, uint32_t rank,
                                               const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__stream_peer_frame(mlfab__streams *streams, uint32_t rank,
                                             const mlfab__frame_in *frame);
/* up: our link to a worker stands. lost: it is lost. */
MLFAB__INTERNAL void mlfab__stream_peer_up(mlfab__streams *streams, uint32_t rank);
MLFAB__INTERNAL void mlfab__stream_peer_lost(mlfab__streams *streams, uint32_t rank);
/* mlfab__role.awake */
MLFAB__INTERNAL void mlfab__streams_awake(mlfab__streams *streams, uint64_t late_ns,
                                          uint64_t now_ns);
/* Returns 1 if messages wait for a link to this worker. since_p: start of the wait (now_ns at the first call); NULL is
 * accepted. */
MLFAB__INTERNAL int mlfab__stream_peer_missing(mlfab__streams *streams, uint32_t rank,
                                               uint64_t now_ns, uint64_t *since_p);
/* next: returns 1 and the next frame for this worker, or 0. taken: the link has taken it. sent: the link has released
 * the bulk of a token. A token is the message's serial plus one, which no other message for this peer ever has: a late
 * report finds nothing. */
MLFAB__INTERNAL int mlfab__stream_next(mlfab__streams *streams, uint32_t rank,
                                       mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__stream_taken(mlfab__streams *streams, uint32_t rank,
                                         const mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__stream_sent(mlfab__streams *streams, uint32_t rank, uint64_t token);
/* Four times a heartbeat: acknowledges all remaining frames. */
MLFAB__INTERNAL void mlfab__streams_tick(mlfab__streams *streams);
/* Leaves: from now on this worker asks for acknowledgements as soon as all is sent. */
MLFAB__INTERNAL void mlfab__streams_leave(mlfab__streams *streams);
/* Notes that this peer has said goodbye: it waits for no message of ours. */
MLFAB__INTERNAL void mlfab__stream_parted(mlfab__streams *streams, uint32_t rank);
/* Returns 1 if the remaining peers have acknowledged every message. */
MLFAB__INTERNAL int mlfab__streams_quiet(const mlfab__streams *streams);

#endif
