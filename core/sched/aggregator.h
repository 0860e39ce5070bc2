/* aggregator.h - the aggregator role: adds updates up on their way, hands the model on. Layer 4.
 *
 * It lives on a worker's node. Servers tell it what to do over that worker's links to them; workers
 * (members) call it on links of their own, the node's own worker as any other. It has a fixed
 * number of accumulators, each as large as the largest shard, and uses one for each group and each
 * spread under way:
 *
 *   a group (up):   FREE --GROUP--> ADDING --RELEASE, last byte forwarded--> SENT --GROUP_END--> FREE
 *                                     |
 *                                     +--member dead, silent, not finite: GROUP_FAIL--> FAILED --GROUP_END--> FREE
 *   a spread (down): FREE --SPREAD--> HANDING --every member has all, or was given up--> FREE
 *
 *   a member of a spread: WAITING --(its link stands, fewer than two are active)--> ACTIVE --> DONE
 *                            +--(its link lost, it is silent: SPREAD_FAIL)---+--> GIVEN_UP
 *
 * Up (aggregator.c; packets: sum.c). Members are granted in the order of the manifest, all groups together in the
 * order of their coming: the next as soon as those before it leave capacity of the in-link unused
 * (mlfab__meter), or have two chunks to go. A member whose link does not stand is passed over until
 * it does. The sum is formed in the manifest's order too: byte x of member k is added when member k
 * - 1's byte x was, so that the result does not depend on arrival. A member may be ahead of the one
 * before it by no more than MLFAB__AGGREGATOR_STAGE; what comes early is staged raw in a ring, of
 * which an accumulator has a few. The sum is forwarded, as far as the server has released it, while
 * bytes of the last member still come in; with `whole`, when it is complete. The sum of packets is
 * forwarded as packets, when it is complete. How long a packed update is, its first chunk tells: until
 * then it is reckoned with as if it were not packed. It is granted all at once when it is the head, and
 * as much as a ring holds before; what then is left of the ring may be too little for a packet, and is
 * not waited for.
 * Down (distributor.c). MODEL frames of the server are kept with their slice and version and handed
 * to every member in that order, two members at a time at most, each by its attempt. When the
 * server begins a slice again, the old bytes are forgotten and members that have some of them get
 * the new ones after.
 *
 * Invariants. (1) A group's bytes are added exactly once: chunks out of place, of a group that
 * never was, of another incarnation or not granted break the member's link; chunks of a group that
 * is over or has failed were sent before the member could know, and are ignored. (2) Nothing is
 * forwarded that was not released. (3) A group that failed sends nothing more; whatever it sent is
 * void because the server forgot its number. (4) What is lent to a link is not written before it
 * has come back: a group that gets an accumulator of which bulks are still out grants nothing until
 * they are back. (5) Accumulators and rings are allocated at first use and kept; without memory or
 * a free accumulator a GROUP is answered with GROUP_FAIL AGAIN, a SPREAD with SPREAD_FAIL; without
 * a ring nobody is granted early.
 * (6) Whoever is waited for is named within 3 heartbeats (of a spread: within 4, because it is
 * looked whether a link moves once a heartbeat).
 *
 * Source: MLfabric §3.2, §5.2 (aggregation), §10.3 (distribution). Departs: cuts through. */
#ifndef MLFAB__AGGREGATOR_H
#define MLFAB__AGGREGATOR_H

#include "../base/meter.h"
#include "../kernels/packet.h"
#include "../node/port.h"
#include "../model/layout.h"
#include "sched_wire.h"

enum {
  MLFAB__AGGREGATOR_MAX = 64, /* accumulators of a node */
  MLFAB__AGGREGATOR_STAGE = 4 << 20,
  MLFAB__AGGREGATOR_RINGS = 2,
  MLFAB__AGGREGATOR_LINK_LOANS = 16, /* bulks that one link has of an accumulator */
  MLFAB__AGGREGATOR_LOANS = 2 * MLFAB__AGGREGATOR_LINK_LOANS,
  MLFAB__AGGREGATOR_COPY = 8192 /* bulks up to this are copied by the transport */
};

/* A member of a group. added <= received <= granted, all of the group's bytes, or of the member's own
 * packets. */
typedef struct mlfab__addend {
  uint64_t seq;
  double weight;
  uint32_t worker, incarnation;
  uint32_t run;  /* cursor of `added` */
  uint32_t ring; /* where what comes early is staged, plus one, or 0 */
  uint64_t granted, received, added;
  uint64_t total;    /* of packets; 0: not known yet */
  uint64_t next;     /* of packets: where in the model the next may begin */
  uint64_t since_ns; /* when something was heard of it, or it was first waited for */
} mlfab__addend;

/* Neighbouring bytes of one type, by where they end in the group's bytes. */
typedef struct mlfab__run {
  uint64_t end;
  int dtype;
} mlfab__run;

/* A segment of a group of packets, and where it is in the group's bytes. */
typedef struct mlfab__sum_stretch {
  mlfab__segment segment;
  uint64_t at;
} mlfab__sum_stretch;

/* How far a sum has become packets. */
typedef struct mlfab__sum_cursor {
  uint32_t stretch;
  uint64_t in;
} mlfab__sum_cursor;

enum { MLFAB__RECIPIENT_WAITING, MLFAB__RECIPIENT_ACTIVE, MLFAB__RECIPIENT_DONE, MLFAB__GIVEN_UP };

/* A member of a spread. */
typedef struct mlfab__recipient {
  uint64_t request;
  uint32_t worker, incarnation, attempt;
  uint32_t record; /* the next for it */
  uint32_t lent;   /* bulks of it that have not come back */
  uint8_t state;
  uint8_t moved; /* since the last look at the clock */
  uint64_t since_ns;
} mlfab__recipient;

/* A MODEL frame as it came. */
typedef struct mlfab__record {
  uint64_t offset, version, commit;
  uint32_t slice, flags, epoch;
  uint32_t bulk;    /* bytes of the frame */
  uint64_t stretch; /* bytes of the model that it answers for */
  uint64_t at;      /* where its bulk is kept */
  uint64_t before;  /* stretches of the frames before it */
} mlfab__record;

/* A bulk that a transport has. */
typedef struct mlfab__loan {
  uint32_t serial; /* 0: none */
  uint32_t peer;
  uint8_t up;
  uint32_t recipient; /* when not up */
  uint64_t age;       /* of what the accumulator was used for */
  uint64_t end;       /* of its bytes */
} mlfab__loan;

enum {
  MLFAB__ACCUMULATOR_FREE,
  MLFAB__ACCUMULATOR_ADDING,
  MLFAB__ACCUMULATOR_SENT,
  MLFAB__ACCUMULATOR_FAILED,
  MLFAB__ACCUMULATOR_HANDING
};

typedef struct mlfab__accumulator {
  uint8_t state;
  uint32_t server;
  uint64_t number; /* of the group, or the request of the spread */
  uint64_t age;    /* smaller ones came earlier */
  uint64_t bytes;
  int whole;
  uint8_t *data; /* `room` bytes; NULL for ghosts */
  uint64_t room;
  uint64_t since_ns; /* when the use began; of a spread: when it was looked whether links move */
  mlfab__loan loans[MLFAB__AGGREGATOR_LOANS];
  uint32_t lent;
  /* A group. */
  mlfab__addend *addends;
  uint32_t naddends, addend_room;
  uint32_t head; /* the first that is not complete */
  uint32_t top;  /* none from here on is granted */
  mlfab__run *runs;
  uint32_t nruns, run_room;
  uint64_t wide;        /* bytes of 8-byte elements; they come first */
  uint64_t outstanding; /* granted and expected, not received */
  uint64_t released, sent;
  uint64_t came_ns,
      told_ns; /* the last byte of a member; when the server was last told that they come */
  uint8_t *rings[MLFAB__AGGREGATOR_RINGS]; /* stage_bytes and packet_bytes each */
  uint8_t ring_used[MLFAB__AGGREGATOR_RINGS];
  /* A group of packets. */
  int packed;
  mlfab__sum_stretch *stretches;
  uint32_t nstretches, stretch_room;
  uint64_t cleared; /* bytes of the sum that are not rubbish */
  uint8_t *stream;  /* the sum's packets, `stream_room` bytes: at first use, and kept */
  uint64_t stream_room, length;
  mlfab__sum_cursor cursor;
  int encoded; /* all of the sum is in `stream`, `length` bytes */
  /* A spread. */
  mlfab__recipient *recipients;
  uint32_t nrecipients, recipient_room;
  mlfab__record *records;
  uint32_t nrecords, record_room;
  uint64_t filled, end; /* stretches of all records; where the next bulk goes */
  int complete;
  uint32_t open; /* recipients that are neither done nor given up */
} mlfab__accumulator;

typedef struct mlfab__aggregator_scratch mlfab__aggregator_scratch; /* aggregator.c */

/* What is known of a server's numbers of groups. */
typedef struct mlfab__aggregator_server {
  uint64_t newest; /* ever: members may still send for groups up to it */
  uint64_t last;   /* on its present link: they ascend */
} mlfab__aggregator_server;

typedef struct mlfab__aggregator {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port up;   /* servers by number */
  mlfab__port down; /* members by rank */
  mlfab_stats *stats;
  const struct mlfab__worker *worker; /* of this node ... */
  uint32_t epoch;                     /* ... and the layout of it that was told */
  uint32_t workers, servers;
  const mlfab__layout *layout; /* the worker's; NULL until the model stands */
  int ghost;
  uint64_t shard_bytes, data_bytes,
      stage_bytes;       /* largest shard; size of accumulators; how far a member may be ahead */
  uint64_t packet_bytes; /* of the largest packet */
  uint32_t naccumulators;
  mlfab__accumulator *accumulators;
  mlfab__aggregator_server *numbers; /* by server */
  uint8_t *connected;                /* members whose link stands, by rank */
  uint32_t *incarnations;            /* theirs */
  mlfab__meter meter;                /* of the in-link, all groups together */
  uint64_t ages;
  uint32_t serials;
  uint64_t now_ns;
  mlfab__aggregator_scratch *scratch; /* for decoding manifests; with the first */
  uint8_t *came; /* MLFAB__PACKET_ROOM: the packets of the frame that is being taken in */
} mlfab__aggregator;

/* Errors: MEMORY. Afterwards free works in any case. */
MLFAB__INTERNAL int mlfab__aggregator_init(mlfab__aggregator *aggregator, mlfab__env *env,
                                           const mlfab_config *config, const mlfab__port *up,
                                           const mlfab__port *down, mlfab_stats *stats);
MLFAB__INTERNAL void mlfab__aggregator_free(mlfab__aggregator *aggregator);
/* The model stands: what bytes are of what type. Before that every GROUP fails; what is under way
 * fails when it is called again. */
MLFAB__INTERNAL void mlfab__aggregator_model(mlfab__aggregator *aggregator,
                                             const mlfab__layout *layout, int ghost);
/* A frame of a server: 1 when it was for this role (GROUP, GROUP_END, RELEASE, SPREAD, and MODEL
 * and PULL_FAIL with MLFAB__SPREAD_BIT in the request), else 0. */
MLFAB__INTERNAL int mlfab__aggregator_server_frame(mlfab__aggregator *aggregator, uint32_t server,
                                                   const mlfab__frame_in *frame, uint64_t now_ns);
/* A server's link is lost, or it is dead: everything for it is over, without a word. */
MLFAB__INTERNAL void mlfab__aggregator_server_lost(mlfab__aggregator *aggregator, uint32_t server);
/* A member's link stands, after MEET; is lost. What was lent to a lost link has come back. */
MLFAB__INTERNAL void mlfab__aggregator_met(mlfab__aggregator *aggregator, uint32_t member,
                                           uint32_t incarnation, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__aggregator_lost(mlfab__aggregator *aggregator, uint32_t member,
                                            uint64_t now_ns);
/* A frame of a member (HOP_CHUNK). */
MLFAB__INTERNAL void mlfab__aggregator_member_frame(mlfab__aggregator *aggregator, uint32_t member,
                                                    const mlfab__frame_in *frame, uint64_t now_ns);
/* The next frame with a bulk for a server (FORWARD), for a member (HOP_MODEL): 1, or 0; it was
 * taken; its bulk is free. */
MLFAB__INTERNAL int mlfab__aggregator_next_up(mlfab__aggregator *aggregator, uint32_t server,
                                              mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__aggregator_taken_up(mlfab__aggregator *aggregator, uint32_t server,
                                                const mlfab__frame_out *frame);
MLFAB__INTERNAL int mlfab__aggregator_next_down(mlfab__aggregator *aggregator, uint32_t member,
                                                mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__aggregator_taken_down(mlfab__aggregator *aggregator, uint32_t member,
                                                  const mlfab__frame_out *frame);
/* Tokens come back on either kind of link. One that is not out any more is ignored. */
MLFAB__INTERNAL void mlfab__aggregator_sent(mlfab__aggregator *aggregator, uint64_t token);
MLFAB__INTERNAL void mlfab__aggregator_tick(mlfab__aggregator *aggregator, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__aggregator_deadline(const mlfab__aggregator *aggregator);

/* --- between the files of the role, lowest first: accumulator.c, sum.c, distributor.c, aggregator.c --- */

/* A free accumulator with its memory for a new use, or NULL. `clean`: nothing of it may be lent. */
MLFAB__INTERNAL mlfab__accumulator *mlfab__aggregator_take(mlfab__aggregator *aggregator,
                                                           uint32_t server, uint64_t number,
                                                           uint64_t bytes, int clean);
MLFAB__INTERNAL mlfab__accumulator *mlfab__aggregator_find(mlfab__aggregator *aggregator,
                                                           uint32_t server, uint64_t number);
/* May this link have more bulks of the accumulator? */
MLFAB__INTERNAL int mlfab__aggregator_lends(const mlfab__accumulator *accumulator, int up,
                                            uint32_t peer);
/* Fills bulk, token and slot of a frame whose bulk_bytes are set. */
MLFAB__INTERNAL void mlfab__aggregator_offer(mlfab__aggregator *aggregator,
                                             const mlfab__accumulator *accumulator, uint64_t at,
                                             mlfab__frame_out *frame);
/* It was taken, and ends at `end` in the accumulator: notes what was lent. 1 when a bulk was. */
MLFAB__INTERNAL int mlfab__aggregator_lend(mlfab__aggregator *aggregator, int up, uint32_t peer,
                                           uint32_t recipient, uint64_t end,
                                           const mlfab__frame_out *frame);
/* A link is lost, and has given everything back. */
MLFAB__INTERNAL void mlfab__aggregator_all_returned(mlfab__aggregator *aggregator, int up,
                                                    uint32_t peer);
/* sum.c: an accumulator for a group of packets. Errors: AGAIN (no room), UNSUPPORTED (ghosts). */
MLFAB__INTERNAL int mlfab__sum_begin(mlfab__aggregator *aggregator, mlfab__accumulator *group,
                                     const mlfab__segment *segments, uint32_t n);
/* A text when the chunk breaks the protocol; otherwise its packets may be taken in, and are in private
 * memory from then on. */
MLFAB__INTERNAL const char *mlfab__sum_check(mlfab__aggregator *aggregator,
                                             const mlfab__accumulator *group, mlfab__addend *addend,
                                             const mlfab__hop_chunk *chunk, mlfab__frame_in *frame);
/* Adds the packets of a chunk, which were counted as received, or stages them. Adds what a member has
 * staged. Errors: NOT_FINITE, FRAME. */
MLFAB__INTERNAL int mlfab__sum_take(mlfab__accumulator *group, mlfab__addend *addend,
                                    const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__sum_unstage(mlfab__accumulator *group, mlfab__addend *addend);
/* Makes packets of some more of a complete sum. 1 when that was the last of it. */
MLFAB__INTERNAL int mlfab__sum_encode(mlfab__aggregator *aggregator, mlfab__accumulator *group);
/* Bytes of the next FORWARD: whole packets. */
MLFAB__INTERNAL uint32_t mlfab__sum_forwardable(const mlfab__aggregator *aggregator,
                                                const mlfab__accumulator *group);

/* Does this member's link stand, under this incarnation? */
MLFAB__INTERNAL int mlfab__aggregator_stands(const mlfab__aggregator *aggregator, uint32_t worker,
                                             uint32_t incarnation);

MLFAB__INTERNAL void mlfab__distributor_spread(mlfab__aggregator *aggregator, uint32_t server,
                                               const mlfab__frame_in *frame,
                                               mlfab__spread_member *members);
/* 1 when they were of a spread. */
MLFAB__INTERNAL int mlfab__distributor_model(mlfab__aggregator *aggregator, uint32_t server,
                                             const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__distributor_skip(mlfab__aggregator *aggregator, uint32_t server,
                                            const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__distributor_pull_fail(mlfab__aggregator *aggregator, uint32_t server,
                                                 const mlfab__frame_in *frame);
/* Gives up all that is left of a spread. */
MLFAB__INTERNAL void mlfab__distributor_fail(mlfab__aggregator *aggregator,
                                             mlfab__accumulator *accumulator, int code);
MLFAB__INTERNAL void mlfab__distributor_met(mlfab__aggregator *aggregator);
MLFAB__INTERNAL void mlfab__distributor_lost(mlfab__aggregator *aggregator, uint32_t member);
/* A bulk of this recipient has come back. */
MLFAB__INTERNAL void mlfab__distributor_returned(mlfab__aggregator *aggregator,
                                                 mlfab__accumulator *accumulator,
                                                 uint32_t recipient);
MLFAB__INTERNAL void mlfab__distributor_tick(mlfab__aggregator *aggregator,
                                             mlfab__accumulator *accumulator);
MLFAB__INTERNAL uint64_t mlfab__distributor_deadline(const mlfab__aggregator *aggregator,
                                                     const mlfab__accumulator *accumulator);

#endif
