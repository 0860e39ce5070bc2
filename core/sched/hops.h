/* hops.h - a worker in a fabric with a scheduler: its routes through other workers' nodes.
 *
 * The server names the route of a large part (VIA). The part goes directly, granted by the server. Or it goes through
 * another worker's node, the hop, as a member of a group; then the aggregator there grants it. Routes have numbers. A
 * new route voids the former route, and the part begins anew. If the aggregator's grant arrives before VIA, the worker
 * adopts the route from the grant. The same holds for pulls: a part comes from the server or through a distributor, on
 * each route whole and in order. Only the newest route counts. PULL_VIA names it. The first frame from the hop names
 * it, too, and may arrive earlier.
 *
 * Within a generation of the stream a part first waits, then is a member of groups, one after another, and may finally
 * be sent directly; never in another order.
 *
 * Invariants. (1) A part has bulks lent to two links at most: to its server and to its aggregator. When the aggregator
 * changes, the worker takes its bulks back. (2) The worker sends an aggregator only bytes that it granted for the
 * current route.
 *
 * Source: MLfabric §3.2 (aggregation, distribution). */
#ifndef MLFAB__HOPS_H
#define MLFAB__HOPS_H

#include "../worker/worker.h"
#include "sched_wire.h"

typedef struct mlfab__hop_part { /* a part of an update */
  uint32_t serial;               /* of its update, plus one; another number: this entry is void */
  uint32_t aggregator;           /* worker whose node forwards it, or MLFAB__NO_NODE */
  uint32_t lent;                 /* bulks lent to that aggregator's link */
  uint32_t way;                  /* part of the token: tells apart bulks that were taken back */
  uint64_t group;                /* number of the newest route; 0: none */
  uint8_t adopted; /* the route is from the aggregator's grant: VIA has not arrived yet */
} mlfab__hop_part;

typedef struct mlfab__hop_pull { /* a server's part of a pull */
  uint64_t request;              /* of its pull; another number: this entry is void */
  uint32_t hop;                  /* worker that forwards it, or MLFAB__NO_NODE */
  uint32_t attempt;              /* number of the newest route; older frames are void */
  uint8_t begun;                 /* the hop has sent some of it */
} mlfab__hop_pull;

typedef struct mlfab__hops {
  mlfab__worker_routes routes; /* all that the worker knows of this object */
  mlfab__worker *worker;
  mlfab__port port;       /* to hops, by the rank of their worker: `ready` opens a missing link */
  mlfab__hop_part *parts; /* by update and server */
  mlfab__hop_pull *pulls; /* by pull and server */
} mlfab__hops;

/* The caller has set `port`. Errors: MEMORY. free: while the worker still exists, or before begin. */
MLFAB__INTERNAL int mlfab__hops_begin(mlfab__hops *hops, mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__hops_free(mlfab__hops *hops);
/* The functions of role.h, for links to hops. lost: bulks lent to the link are the caller's again, and only a
 * new grant sends more there. */
MLFAB__INTERNAL void mlfab__hops_frame(mlfab__hops *hops, mlfab__at at,
                                       const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__hops_next(mlfab__hops *hops, mlfab__at at, mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__hops_taken(mlfab__hops *hops, mlfab__at at,
                                       const mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__hops_returned(mlfab__hops *hops, mlfab__at at, uint64_t token);
MLFAB__INTERNAL void mlfab__hops_lost(mlfab__hops *hops, mlfab__at at);
MLFAB__INTERNAL int mlfab__hops_wants(const mlfab__hops *hops, uint32_t aggregator);

#endif
