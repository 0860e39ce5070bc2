/* scheduler.h - the scheduler role: decides in which order and by which hop large transfers go. Layer 4.
 *
 * It is a client of the servers: each announces what wants to travel, and gets plans. It holds no tensor
 * bytes and nothing that could not be told to it again: when it is restarted the servers say what waits
 * and what they have placed, and when it is away they grant first come, first served.
 *
 *    a transfer:  (ANNOUNCE by each of its `parts` servers) --> WAITING --plan--> PLACED --REPORT of all--> forgotten
 *                                   |                             +--dropped--> forgotten when reported
 *                                   +--its worker gone--> forgotten
 *
 * When a plan is made: something waits, and either the servers' in-links are booked for less than plan_ahead_ns
 * ahead (what is placed and has not come, over the capacity), or interval_ns has passed since the last one.
 * Pulls likewise, by the servers' out-links. How: the network is built anew from the capacities as reported last;
 * what is placed and not over is reserved again, in its order, with the bytes that are left; the end of that is where
 * t_max starts; then the batch is planned on what is left of the network and sent to all servers, the
 * same order for all. Where capacities are not known, all links are reckoned alike.
 *
 * Invariants. (1) An id is placed at most once for an incarnation of server and scheduler. (2) Every
 * server of a transfer gets the same fate and the same place. (3) With rounds nothing is ordered or
 * dropped. (4) An unreachable transfer stays WAITING: it is planned again. (5) Only workers that live, have a free
 * accumulator and are reachable are chosen as aggregators, from the seed.
 *
 * Source: MLfabric §4, §5, §6, §10.2, §10.3. Departs: plans by booking and not by the clock (its fixed
 * interval is an option); the server, not the scheduler, grants. */
#ifndef MLFAB__SCHEDULER_H
#define MLFAB__SCHEDULER_H

#include "env.h"
#include "port.h"
#include "prng.h"

typedef struct mlfab__scheduler mlfab__scheduler;

/* Errors: MEMORY. `port` speaks to servers by number. */
MLFAB__INTERNAL int mlfab__scheduler_create(mlfab__env *env, const mlfab_config *config,
                                            const mlfab__port *port, mlfab_stats *stats,
                                            mlfab__scheduler **scheduler_p);
MLFAB__INTERNAL void mlfab__scheduler_destroy(mlfab__scheduler **scheduler_p);
/* The link to a server stands: it will tell everything anew. It is lost. */
MLFAB__INTERNAL void mlfab__scheduler_hello(mlfab__scheduler *scheduler, uint32_t server,
                                            uint64_t now_ns);
MLFAB__INTERNAL void mlfab__scheduler_lost(mlfab__scheduler *scheduler, uint32_t server,
                                           uint64_t now_ns);
/* A frame of a server: SCHEDULE, STATION, CAPACITY (server 0's count of workers), ANNOUNCE, REPORT. */
MLFAB__INTERNAL void mlfab__scheduler_frame(mlfab__scheduler *scheduler, uint32_t server,
                                            const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__scheduler_tick(mlfab__scheduler *scheduler, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__scheduler_deadline(const mlfab__scheduler *scheduler);
/* The last plan as text; *bytes_p: its whole length. */
MLFAB__INTERNAL void mlfab__scheduler_explain(const mlfab__scheduler *scheduler, char *text,
                                              size_t room, size_t *bytes_p);

#endif
