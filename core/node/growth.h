/* growth.h - a node: processes that come while the fabric runs.
 *
 * Workers. There are config.workers_max numbers for workers. The fabric begins when the first config.workers of them
 * (the founders), the servers and the scheduler have joined. To the roles of a server, an unused number is that of a
 * worker that has left (`gone` with MLFAB__NEVER_HERE); the process that takes it comes back. There is no other state.
 * A process that does not know its number asks server 0 for one:
 *
 *    (config.join) --JOIN without a rank--> server 0 offers a number for 5 beats --JOIN with rank and world--> hangs up,
 *      opens a node with that configuration --JOIN--> as any other process
 *
 * An offer is no claim. If two processes take one number, the second is refused (below), and asks again.
 *
 * Servers. There are config.servers_max numbers for dedicated servers. The fabric begins with the first config.servers
 * of them. A number is at each node in one of these states (mlfab__place):
 *
 *    VACANT --JOIN; server 0 tells all (WELCOME, MEMBER)--> HERE, added --gone without slices; server 0 tells all--> VACANT
 *    HERE (a first server) --gone after its slices have moved away--------------------------------------------^
 *
 *  (1) Server 0 decides: on each link it announces a server before anything else about that server. MEMBER has an
 *      incarnation; an older MEMBER is void. So a node has a route to a server before slices move there.
 *  (2) The roles of a worker treat a VACANT number, and an added server without slices, alike: as absent (gone with
 *      MLFAB__NEVER_HERE). Only slices make it count (reshard.h). No node waits for it to become ready.
 *  (3) Server 0 keeps a link to each server that has no slices, to notice when it goes. `counts` tells whether the
 *      fabric would miss it. If not, a process that takes its number is an added server, and all nodes close their links
 *      to the former process.
 *  (4) After 20 beats, an added server counts founders that have never called it as workers that have left. */
#ifndef MLFAB__GROWTH_H
#define MLFAB__GROWTH_H

#include "node.h"

struct mlfab__growing {
  /* Server 0: would the fabric miss the state of this server? NULL: yes. */
  int (*counts)(void *self, uint32_t server);
  void *counts_self;
  int servers_left; /* server 0: some peer `leaves` */
  /* config.join: the answer of server 0. */
  struct mlfab__joining {
    int32_t rank;
    uint32_t workers, workers_max, servers, servers_max, dedicated, scheduler, replicas;
  } told;
};

/* Lets processes come. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__growth_attach(mlfab_node *node);

#endif
