/* aggregator.h - the aggregator role: sums updates on their way to a server, and distributes the model.
 *
 * It runs on a worker's node. Servers control it over that worker's links to them. Workers (members)
 * connect to it over separate links, its own worker too. It has a fixed number of accumulators, each as
 * large as the largest shard, and uses one for each group and each spread under way:
 *
 *   a group (up):   FREE --GROUP--> ADDING --RELEASE, last byte forwarded--> SENT --GROUP_END--> FREE
 *                                     |
 *                                     +--member dead, silent, not finite: GROUP_FAIL--> FAILED --GROUP_END--> FREE
 *   a spread (down): FREE --SPREAD--> HANDING --every member has all, or was given up--> FREE
 *
 *   a member of a spread: WAITING --(its link stands, fewer than two are active)--> ACTIVE --> DONE
 *                            +--(its link lost, it is silent: SPREAD_FAIL)---+--> GIVEN_UP
 *
 * Up (aggregator.c; packets: sum.c). The aggregator grants members in the order of the manifest, and groups in the
 * order in which they came. It grants the next member when the earlier ones leave the in-link partly idle
 * (mlfab__meter), or have at most two chunks to send. It skips a member until its link stands. The sum, too, is
 * computed in the manifest's order: byte x of member k is added after byte x of member k - 1, so the result does not
 * depend on arrival. A member may be ahead of its predecessor by at most MLFAB__AGGREGATOR_STAGE; early bytes are
 * staged in a ring, of which an accumulator has a few. The aggregator forwards the sum, as far as the server has
 * released it, while the last member's bytes still arrive; with `whole`, when the sum is complete. A sum of packets is
 * forwarded as packets, when it is complete. The first chunk of a packed update tells its length; until then it counts
 * with its unpacked length. The head gets a grant for all of its packets at once, other members for one ring. The end
 * of a ring may be too small for a packet, and then stays unused. Down (distributor.c). The distributor keeps MODEL
 * frames of the server with their slice and version, and sends them to every member in that order. It serves at most
 * two members at a time, and marks frames with the attempt number. When the server begins a slice again, the
 * distributor discards the old bytes; members that have some of them get the new bytes afterwards.
 *
 * Invariants. (1) A group's bytes are added exactly once. The aggregator drops the link of a member if its chunk is out
 * of place, was not granted, comes from another incarnation, or names a group that never existed. It ignores chunks for
 * groups that have ended or failed: the member sent them before it could know. (2) Only released bytes are forwarded.
 * (3) A failed group sends nothing more. Its former frames are void, because the server has forgotten its number. (4)
 * Bytes lent to a link are not overwritten before the link returns them: a group whose accumulator has bulks lent from
 * its former use grants nothing until they are back. (5) Accumulators and rings are allocated at first use and kept.
 * Without memory or a free accumulator, the answer to GROUP is GROUP_FAIL AGAIN, and to SPREAD it is SPREAD_FAIL;
 * without a ring, members are granted only as head. (6) A member that delays others is named within 3 heartbeats (in a
 * spread within 4, because links are examined once a heartbeat).
 *
 * Source: MLfabric §3.2, §5.2 (aggregation), §10.3 (distribution). Departs: cuts through. */
#ifndef MLFAB__AGGREGATOR_H
#define MLFAB__AGGREGATOR_H

#include "../base/meter.h"
#include "hops.h"
#include "../kernels/packet.h"
#include "../node/port.h"
#include "../model/layout.h"
#include "sched_wire.h"

enum {
  MLFAB__AGGREGATOR_MAX = 64, /* accumulators of a node */
  MLFAB__AGGREGATOR_STAGE = 4 << 20,
  MLFAB__AGGREGATOR_RINGS = 2,
  MLFAB__AGGREGATOR_LINK_LOANS = 16, /* bulks of an accumulator that one link may hold */
  MLFAB__AGGREGATOR_LOANS = 2 * MLFAB__AGGREGATOR_LINK_LOANS,
  MLFAB__AGGREGATOR_COPY = 8192 /* the transport copies bulks up to this size */
};

/* A member of a group. added <= received <= granted; they count bytes of the group or, with packets, bytes of the
 * member's own packets. */
typedef struct mlfab__addend {
  uint64_t seq;
  double weight;
  uint32_t worker, incarnation;
  uint32_t run;  /* cursor of `added` */
  uint32_t ring; /* index of the ring that stages its early bytes, plus one, or 0 */
  uint64_t granted, received, added;
  uint64_t total;    /* bytes of its packets; 0: unknown */
  uint64_t next;     /* with packets: the lowest offset in the model of the next packet */
  uint64_t since_ns; /* time when it last sent something, or was first awaited */
} mlfab__addend;

/* Adjacent bytes of one type; `end` is in the group's bytes. */
typedef struct mlfab__run {
  uint64_t end;
  int dtype;
} mlfab__run;

/* A segment of a group of packets, and its offset in the group's bytes. */
typedef struct mlfab__sum_stretch {
  mlfab__segment segment;
  uint64_t at;
} mlfab__sum_stretch;

/* The part of a sum that is encoded as packets so far. */
typedef struct mlfab__sum_cursor {
  uint32_t stretch;
  uint64_t in;
} mlfab__sum_cursor;

enum { MLFAB__RECIPIENT_WAITING, MLFAB__RECIPIENT_ACTIVE, MLFAB__RECIPIENT_DONE, MLFAB__GIVEN_UP };

/* A member of a spread. */
typedef struct mlfab__recipient {
  uint64_t request;
  uint32_t worker, incarnation, attempt;
  uint32_t record; /* index of the next record for it */
  uint32_t lent;   /* its bulks that are still lent */
  uint8_t state;
  uint8_t moved; /* it has made progress since the last tick */
  uint64_t since_ns;
} mlfab__recipient;

/* A received MODEL frame. */
typedef struct mlfab__record {
  uint64_t offset, version, commit;
  uint32_t slice, flags, epoch;
  uint32_t bulk;    /* bytes of the frame */
  uint64_t stretch; /* bytes of the model that it covers */
  uint64_t at;      /* offset of its bytes */
  uint64_t before;  /* sum of the stretches of the frames before it */
} mlfab__record;

/* A bulk that is lent to a transport. */
typedef struct mlfab__loan {
  uint32_t serial; /* 0: none */
  uint32_t peer;
  uint8_t up;
  uint32_t recipient; /* for down: index of the recipient */
  uint64_t age;       /* age of the accumulator when it was lent */
  uint64_t end;       /* offset behind its bytes in the accumulator */
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
  uint64_t number; /* number of the group, or request of the spread */
  uint64_t age;    /* order of arrival: smaller came earlier */
  uint64_t bytes;
  int whole;
  uint8_t *data; /* `room` bytes; NULL for ghosts */
  uint64_t room;
  uint64_t since_ns; /* start of this use; in a spread: the last tick that examined its links */
  mlfab__loan loans[MLFAB__AGGREGATOR_LOANS];
  uint32_t lent;
  /* A group. */
  mlfab__addend *addends;
  uint32_t naddends, addend_room;
  uint32_t head; /* the first member that is not complete */
  uint32_t top;  /* members from here on are not granted */
  mlfab__run *runs;
  uint32_t nruns, run_room;
  uint64_t wide;        /* number of bytes in 8-byte elements, which come first */
  uint64_t outstanding; /* granted and expected, but not received */
  uint64_t released, sent;
  /* last byte of a member; last notice to the server that bytes arrive */
  uint64_t came_ns, told_ns;
  uint8_t *rings[MLFAB__AGGREGATOR_RINGS]; /* stage_bytes + packet_bytes each */
  uint8_t ring_used[MLFAB__AGGREGATOR_RINGS];
  /* A group of packets. */
  int packed;
  mlfab__sum_stretch *stretches;
  uint32_t nstretches, stretch_room;
  uint64_t cleared; /* bytes of the sum that are initialised */
  uint8_t *stream;  /* the sum's packets, `stream_room` bytes; allocated at first use, and kept */
  uint64_t stream_room, length;
  mlfab__sum_cursor cursor;
  int encoded; /* the whole sum is in `stream`, `length` bytes */
  /* A spread. */
  mlfab__recipient *recipients;
  uint32_t nrecipients, recipient_room;
  mlfab__record *records;
  uint32_t nrecords, record_room;
  uint64_t filled, end; /* sum of all stretches; offset of the next bulk */
  int complete;
  uint32_t open; /* recipients neither done nor given up */
} mlfab__accumulator;

typedef struct mlfab__aggregator_scratch mlfab__aggregator_scratch; /* aggregator.c */

/* The group numbers of a server. */
typedef struct mlfab__aggregator_server {
  uint64_t newest; /* largest ever: up to it, members may still send */
  uint64_t last;   /* last on the present link: numbers must ascend */
} mlfab__aggregator_server;

typedef struct mlfab__aggregator {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port up;   /* port to servers, by number */
  mlfab__port down; /* port to members, by rank */
  mlfab_stats *stats;
  mlfab__hops hops; /* of this node's worker: its links to other aggregators */
  uint32_t epoch;   /* the last layout epoch of that worker */
  uint32_t workers, servers;
  const mlfab__layout *layout; /* the worker's; NULL until the model stands */
  int ghost;
  /* largest shard; size of accumulators; limit by which a member may be ahead */
  uint64_t shard_bytes, data_bytes, stage_bytes;
  uint64_t packet_bytes; /* of the largest packet */
  uint32_t naccumulators;
  mlfab__accumulator *accumulators;
  mlfab__aggregator_server *numbers; /* by server */
  uint8_t *connected;                /* by rank: the member's link stands */
  uint32_t *incarnations;            /* by rank */
  mlfab__meter meter;                /* measures the in-link, for all groups */
  uint64_t ages;
  uint32_t serials;
  uint64_t now_ns;
  mlfab__aggregator_scratch *scratch; /* for decoding manifests; allocated with the first */
  uint8_t *came; /* MLFAB__PACKET_ROOM bytes: packets of the frame being taken in */
} mlfab__aggregator;

/* Errors: MEMORY. mlfab__aggregator_free works in any case. */
MLFAB__INTERNAL int mlfab__aggregator_init(mlfab__aggregator *aggregator, mlfab__env *env,
                                           const mlfab_config *config, const mlfab__port *up,
                                           const mlfab__port *down, mlfab_stats *stats);
MLFAB__INTERNAL void mlfab__aggregator_free(mlfab__aggregator *aggregator);
/* Sets the layout of the defined model. Before the first call every GROUP fails; a further call fails everything under
 * way. */
MLFAB__INTERNAL void mlfab__aggregator_model(mlfab__aggregator *aggregator,
                                             const mlfab__layout *layout, int ghost);
/* Takes a frame of a server: returns 1 if it was for this role (GROUP, GROUP_END, RELEASE, SPREAD, and MODEL and
 * PULL_FAIL with MLFAB__SPREAD_BIT in the request), else 0. */
MLFAB__INTERNAL int mlfab__aggregator_server_frame(mlfab__aggregator *aggregator, uint32_t server,
                                                   const mlfab__frame_in *frame, uint64_t now_ns);
/* Ends everything for a server whose link is lost, or that is dead; sends nothing. */
MLFAB__INTERNAL void mlfab__aggregator_server_lost(mlfab__aggregator *aggregator, uint32_t server);
/* met: a member's link stands, after MEET. lost: it is lost, and has returned all loans. */
MLFAB__INTERNAL void mlfab__aggregator_met(mlfab__aggregator *aggregator, uint32_t member,
                                           uint32_t incarnation, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__aggregator_lost(mlfab__aggregator *aggregator, uint32_t member,
                                            uint64_t now_ns);
/* Takes a frame of a member (HOP_CHUNK). */
MLFAB__INTERNAL void mlfab__aggregator_member_frame(mlfab__aggregator *aggregator, uint32_t member,
                                                    const mlfab__frame_in *frame, uint64_t now_ns);
/* next: fills the next frame with a bulk for a server (FORWARD) or a member (HOP_MODEL): returns 1, or 0. taken: the
 * transport took it. */
MLFAB__INTERNAL int mlfab__aggregator_next_up(mlfab__aggregator *aggregator, uint32_t server,
                                              mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__aggregator_taken_up(mlfab__aggregator *aggregator, uint32_t server,
                                                const mlfab__frame_out *frame);
MLFAB__INTERNAL int mlfab__aggregator_next_down(mlfab__aggregator *aggregator, uint32_t member,
                                                mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__aggregator_taken_down(mlfab__aggregator *aggregator, uint32_t member,
                                                  const mlfab__frame_out *frame);
/* Takes a bulk back, on either kind of link. Ignores a token that is no longer lent. */
MLFAB__INTERNAL void mlfab__aggregator_sent(mlfab__aggregator *aggregator, uint64_t token);
/* mlfab__role.awake */
MLFAB__INTERNAL void mlfab__aggregator_awake(mlfab__aggregator *aggregator, uint64_t late_ns,
                                             uint64_t now_ns);
MLFAB__INTERNAL void mlfab__aggregator_tick(mlfab__aggregator *aggregator, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__aggregator_deadline(const mlfab__aggregator *aggregator);

/* --- between the files of the role, lowest first: accumulator.c, sum.c, distributor.c, aggregator.c --- */

/* Returns a free accumulator with memory for a new use, or NULL. `clean`: none of its bulks may be lent. */
MLFAB__INTERNAL mlfab__accumulator *mlfab__aggregator_take(mlfab__aggregator *aggregator,
                                                           uint32_t server, uint64_t number,
                                                           uint64_t bytes, int clean);
MLFAB__INTERNAL mlfab__accumulator *mlfab__aggregator_find(mlfab__aggregator *aggregator,
                                                           uint32_t server, uint64_t number);
/* May this link borrow another bulk of the accumulator? */
MLFAB__INTERNAL int mlfab__aggregator_lends(const mlfab__accumulator *accumulator, int up,
                                            uint32_t peer);
/* Fills bulk, token and slot of a frame whose bulk_bytes are set. */
MLFAB__INTERNAL void mlfab__aggregator_offer(mlfab__aggregator *aggregator,
                                             const mlfab__accumulator *accumulator, int up,
                                             uint32_t peer, uint64_t at, mlfab__frame_out *frame);
/* Records the loan of a frame that the transport took, and that ends at `end` in the accumulator. Returns 1 if it is a
 * loan. */
MLFAB__INTERNAL int mlfab__aggregator_lend(mlfab__aggregator *aggregator, int up, uint32_t peer,
                                           uint32_t recipient, uint64_t end,
                                           const mlfab__frame_out *frame);
/* Takes all loans of a lost link back. */
MLFAB__INTERNAL void mlfab__aggregator_all_returned(mlfab__aggregator *aggregator, int up,
                                                    uint32_t peer);
/* sum.c: prepares an accumulator for a group of packets. Errors: AGAIN (no room), UNSUPPORTED (ghosts). */
MLFAB__INTERNAL int mlfab__sum_begin(mlfab__aggregator *aggregator, mlfab__accumulator *group,
                                     const mlfab__segment *segments, uint32_t n);
/* Returns a text if the chunk breaks the protocol. Otherwise copies its packets to private memory and
 * returns NULL. */
MLFAB__INTERNAL const char *mlfab__sum_check(mlfab__aggregator *aggregator,
                                             const mlfab__accumulator *group, mlfab__addend *addend,
                                             const mlfab__hop_chunk *chunk, mlfab__frame_in *frame);
/* take: adds or stages the packets of a chunk that was counted as received. unstage: adds a member's staged
 * packets. Errors: NOT_FINITE, FRAME. */
MLFAB__INTERNAL int mlfab__sum_take(mlfab__accumulator *group, mlfab__addend *addend,
                                    const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__sum_unstage(mlfab__accumulator *group, mlfab__addend *addend);
/* Encodes another part of a complete sum as packets. Returns 1 if it was the last part. */
MLFAB__INTERNAL int mlfab__sum_encode(mlfab__aggregator *aggregator, mlfab__accumulator *group);
/* Returns the size of the next FORWARD: whole packets. */
MLFAB__INTERNAL uint32_t mlfab__sum_forwardable(const mlfab__aggregator *aggregator,
                                                const mlfab__accumulator *group);

/* Does this member's link stand, with this incarnation? */
MLFAB__INTERNAL int mlfab__aggregator_stands(const mlfab__aggregator *aggregator, uint32_t worker,
                                             uint32_t incarnation);

MLFAB__INTERNAL void mlfab__distributor_spread(mlfab__aggregator *aggregator, uint32_t server,
                                               const mlfab__frame_in *frame,
                                               mlfab__spread_member *members);
/* Takes a frame; returns 1 if it belonged to a spread. */
MLFAB__INTERNAL int mlfab__distributor_model(mlfab__aggregator *aggregator, uint32_t server,
                                             const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__distributor_skip(mlfab__aggregator *aggregator, uint32_t server,
                                            const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__distributor_pull_fail(mlfab__aggregator *aggregator, uint32_t server,
                                                 const mlfab__frame_in *frame);
/* Gives up all remaining members of a spread. */
MLFAB__INTERNAL void mlfab__distributor_fail(mlfab__aggregator *aggregator,
                                             mlfab__accumulator *accumulator, int code);
MLFAB__INTERNAL void mlfab__distributor_met(mlfab__aggregator *aggregator);
MLFAB__INTERNAL void mlfab__distributor_lost(mlfab__aggregator *aggregator, uint32_t member);
/* Takes a bulk of this recipient back. */
MLFAB__INTERNAL void mlfab__distributor_returned(mlfab__aggregator *aggregator,
                                                 mlfab__accumulator *accumulator,
                                                 uint32_t recipient);
MLFAB__INTERNAL void mlfab__distributor_tick(mlfab__aggregator *aggregator,
                                             mlfab__accumulator *accumulator);
MLFAB__INTERNAL uint64_t mlfab__distributor_deadline(const mlfab__aggregator *aggregator,
                                                     const mlfab__accumulator *accumulator);

#endif
