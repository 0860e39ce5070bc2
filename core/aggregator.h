/* aggregator.h - the aggregator role: adds updates up on their way, hands the model on. Layer 4.
 *
 * It lives on a worker's node. Servers tell it what to do over that worker's links to them; other
 * workers (members) call it on links of their own. It has a fixed number of accumulators, each as large as
 * the largest shard, and uses one for each group and each spread under way:
 *
 *   a group (up):   FREE --GROUP--> ADDING --RELEASE, last byte forwarded--> SENT --GROUP_END--> FREE
 *                                     |                                        (bulks lent come back)
 *                                     +--member dead, silent, not finite: GROUP_FAIL--> waits for GROUP_END
 *   a spread (down): FREE --SPREAD--> HANDING --last member has all--> FREE
 *                                     +--member dead or silent: SPREAD_FAIL of that member, goes on
 *
 * Up. Members are granted in the order of the manifest: the next as soon as those before it leave capacity
 * of the in-link unused (mlfab__meter), or have two chunks to go. The sum is formed in that order too: byte x of
 * member k is added when member k - 1's byte x was, so that the result does not depend on arrival. What
 * comes too early is not granted: a member may be ahead of the one before it by no more than what is staged for it
 * (the second accumulator half: see AGGREGATOR_STAGE). The sum is forwarded, as far as the server has released it,
 * while bytes of the last member still come in; with `whole`, when it is complete.
 * Down. MODEL frames of the server are kept with their slice and version and handed to every member in that
 * order, two members at a time at most, each by its attempt.
 *
 * Invariants. (1) A group's bytes are added exactly once: chunks out of place, of another group, of another
 * incarnation or not granted break the member's link. (2) Nothing is forwarded that was not released.
 * (3) A group that failed sends nothing more; whatever it sent is void because the server forgot its number.
 * (4) Memory: accumulators are allocated at first use and kept; without memory or a free accumulator a
 * GROUP is answered with GROUP_FAIL AGAIN, a SPREAD with SPREAD_FAIL. (5) Whoever is waited for is named
 * within 3 heartbeats.
 *
 * Source: MLfabric §3.2, §5.2 (aggregation), §10.3 (distribution). Departs: cuts through. */
#ifndef MLFAB__AGGREGATOR_H
#define MLFAB__AGGREGATOR_H

#include "meter.h"
#include "env.h"
#include "port.h"
#include "slice.h"

/* Tokens of bulks that the aggregator lends on a link it shares with the worker role. */
#define MLFAB__AGGREGATOR_TOKEN ((uint64_t)1 << 61)

typedef struct mlfab__accumulator mlfab__accumulator; /* aggregator.c */

typedef struct mlfab__aggregator {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port up;   /* servers by number */
  mlfab__port down; /* members by rank */
  mlfab_stats *stats;
  uint32_t rank, workers, servers;
  const mlfab__layout *layout; /* the worker's; NULL until the model stands */
  int ghost;
  uint32_t naccumulators;
  mlfab__accumulator *accumulators;
  uint8_t *connected;     /* members whose link stands, by rank */
  uint32_t *incarnations; /* theirs */
  uint64_t now_ns;
  void *scratch; /* for decoding manifests */
} mlfab__aggregator;

/* Errors: MEMORY. Afterwards free works in any case. */
MLFAB__INTERNAL int mlfab__aggregator_init(mlfab__aggregator *aggregator, mlfab__env *env,
                                           const mlfab_config *config, const mlfab__port *up,
                                           const mlfab__port *down, mlfab_stats *stats);
MLFAB__INTERNAL void mlfab__aggregator_free(mlfab__aggregator *aggregator);
/* The model stands: what bytes are of what type. Before that every GROUP fails. */
MLFAB__INTERNAL void mlfab__aggregator_model(mlfab__aggregator *aggregator,
                                             const mlfab__layout *layout, int ghost);
/* A frame of a server: 1 when it was for this role (GROUP, GROUP_END, RELEASE, SPREAD, and MODEL and PULL_FAIL
 * with MLFAB__SPREAD_BIT in the request), else 0. */
MLFAB__INTERNAL int mlfab__aggregator_server_frame(mlfab__aggregator *aggregator, uint32_t server,
                                                   const mlfab__frame_in *frame, uint64_t now_ns);
/* A server's link is lost, or it is dead: everything for it is over, without a word. */
MLFAB__INTERNAL void mlfab__aggregator_server_lost(mlfab__aggregator *aggregator, uint32_t server);
/* A member's link stands, after MEET; is lost. */
MLFAB__INTERNAL void mlfab__aggregator_met(mlfab__aggregator *aggregator, uint32_t member,
                                           uint32_t incarnation, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__aggregator_lost(mlfab__aggregator *aggregator, uint32_t member,
                                            uint64_t now_ns);
/* A frame of a member (HOP_CHUNK). */
MLFAB__INTERNAL void mlfab__aggregator_member_frame(mlfab__aggregator *aggregator, uint32_t member,
                                                    const mlfab__frame_in *frame, uint64_t now_ns);
/* The next frame with a bulk for a server (FORWARD), for a member (HOP_MODEL): 1, or 0; it was taken; its bulk is
 * free. */
MLFAB__INTERNAL int mlfab__aggregator_next_up(mlfab__aggregator *aggregator, uint32_t server,
                                              mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__aggregator_taken_up(mlfab__aggregator *aggregator, uint32_t server,
                                                const mlfab__frame_out *frame);
MLFAB__INTERNAL int mlfab__aggregator_next_down(mlfab__aggregator *aggregator, uint32_t member,
                                                mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__aggregator_taken_down(mlfab__aggregator *aggregator, uint32_t member,
                                                  const mlfab__frame_out *frame);
/* Tokens come back on either kind of link. */
MLFAB__INTERNAL void mlfab__aggregator_sent(mlfab__aggregator *aggregator, uint64_t token);
MLFAB__INTERNAL void mlfab__aggregator_tick(mlfab__aggregator *aggregator, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__aggregator_deadline(const mlfab__aggregator *aggregator);

#endif
