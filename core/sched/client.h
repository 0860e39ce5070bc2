/* client.h - the server role in a fabric with a scheduler: announces large transfers, and carries them out
 * in the order and by the routes of the plans. Attached to the server as its policy (server.h).
 *
 * The scheduler is peer number `workers` of the server's port. While its link stands (`up`), large updates
 * and pulls wait for a plan; when it is lost or dead, they go first come, first served.
 *
 * Server 0's schedule applies to all: the configured one, or the one set last (mlfab_set_schedule). Its other copy has
 * it by the mirror (../replica/mirror.h), and keeps it; the scheduler tells it to the other servers, also to copies of
 * them that take over.
 *
 * Files, lowest first: report.c (frames to the scheduler), route.c (updates: places and groups), spread.c
 * (pulls: places, turns, spreads), client.c (the link to the scheduler). */
#ifndef MLFAB__CLIENT_H
#define MLFAB__CLIENT_H

#include "../base/meter.h"
#include "../node/mirrored.h"
#include "../server/server.h"
#include "sched_wire.h"

/* A scheduler with something to plan must send a plan, even an empty one, within this many heartbeats. Else it counts
 * as lost: the server drops its link and grants first come, first served. */
enum { MLFAB__SERVER_PLAN_BEATS = 8 };

struct mlfab__server_sched {
  int up;                   /* the link to the scheduler stands */
  mlfab__schedule schedule; /* the last settings */
  mlfab__meter meter;       /* measures the in-link */
  /* Time that an announced transfer has waited since the last plan; time of the last tick. Time during which this
   * server itself stood still does not count. */
  uint64_t unplanned_ns, looked_ns;
  uint64_t place_walk;    /* number of the current scan of the unplaced updates */
  uint64_t groups;        /* the last number of a group */
  uint64_t places;        /* the last place of a pull */
  uint64_t spreads;       /* the last number of a spread, or of a route of a pull */
  uint64_t reported_left; /* bytes left of the head when last reported */
  mlfab__capacity own;    /* capacity of this node's host */
  mlfab__touch *touch;    /* mirror of the schedule; NULL: there is no other copy */
  /* Scratch. */
  mlfab__plan_entry *entries;
  mlfab__group_member *members;
  uint8_t *meta; /* MLFAB_META_MAX */
};

/* Attaches this policy to the server. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__client_init(mlfab__server *server);
/* Returns the schedule, for the other copy of server 0. */
MLFAB__INTERNAL mlfab__mirrored mlfab__client_mirrored(mlfab__server *server);

/* hello: the scheduler's link stands; reports everything to it. lost: the link is lost or the scheduler dead. frame:
 * takes PLAN or SCHEDULE. */
MLFAB__INTERNAL void mlfab__server_scheduler_hello(mlfab__server *server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__server_scheduler_lost(mlfab__server *server, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__server_scheduler_frame(mlfab__server *server,
                                                   const mlfab__frame_in *frame, uint64_t now_ns);
/* Reports the capacity of this node's host to the scheduler. */
MLFAB__INTERNAL void mlfab__server_capacity(mlfab__server *server, const mlfab__capacity *capacity,
                                            uint64_t now_ns);

/* --- report.c --- */

/* Is this large enough to be planned, and is there a scheduler? */
MLFAB__INTERNAL int mlfab__report_plans(const mlfab__server *server, uint64_t bytes);
/* Returns a hash of segments: only transfers of one shape can be grouped. */
MLFAB__INTERNAL uint64_t mlfab__report_shape(const mlfab__segment *segments, uint32_t n);
/* Sends a control frame to the scheduler. */
MLFAB__INTERNAL void mlfab__report_tell(mlfab__server *server, uint8_t type, const void *meta,
                                        uint32_t bytes);
/* Reports that a transfer is over (worker MLFAB__NO_NODE: only the state of the queues). */
MLFAB__INTERNAL void mlfab__report_over(mlfab__server *server, uint32_t kind, uint32_t worker,
                                        uint64_t id, int code);
/* Sends ANNOUNCE to the scheduler; fills `placed` and `incarnation`. */
MLFAB__INTERNAL void mlfab__report_announce(mlfab__server *server, mlfab__announce *announce);
/* Return placed bytes: still to be received; still to be sent; of one pull still to be sent. */
MLFAB__INTERNAL uint64_t mlfab__report_backlog(const mlfab__server *server);
MLFAB__INTERNAL uint64_t mlfab__report_out_backlog(const mlfab__server *server);
MLFAB__INTERNAL uint64_t mlfab__report_left(const mlfab__server_pull *pull);

/* --- route.c --- */

/* Places the updates of a plan, in order. */
MLFAB__INTERNAL void mlfab__route_plan(mlfab__server *server, const mlfab__plan_entry *entries,
                                       uint32_t n);
/* announce_all: announces all waiting updates. unschedule: places all of them, first come, first served. */
MLFAB__INTERNAL void mlfab__route_announce_all(mlfab__server *server);
MLFAB__INTERNAL void mlfab__route_unschedule(mlfab__server *server);
/* Is something announced that no plan has placed? */
MLFAB__INTERNAL int mlfab__route_waits(const mlfab__server *server);
/* Takes FORWARD and GROUP_FAIL of an aggregator's node: returns 1 if the frame was one of them. */
MLFAB__INTERNAL int mlfab__route_frame(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame);
/* See mlfab__server_policy. */
MLFAB__INTERNAL int mlfab__route_hold(mlfab__server *server, mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__route_advance(mlfab__server *server);
MLFAB__INTERNAL void mlfab__route_over(mlfab__server *server, const mlfab__incoming *update);
MLFAB__INTERNAL void mlfab__route_progress(mlfab__server *server, const mlfab__incoming *head);
MLFAB__INTERNAL void mlfab__route_grant(mlfab__server *server, mlfab__incoming *leader,
                                        uint64_t upto);
MLFAB__INTERNAL void mlfab__route_split(mlfab__server *server, mlfab__incoming *member,
                                        mlfab__incoming *culprit, int direct);
/* strays: see mlfab__server_policy. */
MLFAB__INTERNAL int mlfab__route_strays(struct mlfab__server *server,
                                        struct mlfab__incoming *member);
MLFAB__INTERNAL void mlfab__route_end(mlfab__server *server, const mlfab__incoming *leader,
                                      int applied);
MLFAB__INTERNAL void mlfab__route_regroup(mlfab__server *server);
MLFAB__INTERNAL void mlfab__route_lost(mlfab__server *server, uint32_t worker);

/* --- spread.c --- */

/* The same for pulls. Consecutive entries with one group number are one spread. */
MLFAB__INTERNAL void mlfab__spread_plan(mlfab__server *server, const mlfab__plan_entry *entries,
                                        uint32_t n);
MLFAB__INTERNAL void mlfab__spread_announce_all(mlfab__server *server);
MLFAB__INTERNAL void mlfab__spread_unschedule(mlfab__server *server);
MLFAB__INTERNAL int mlfab__spread_waits(const mlfab__server *server);
MLFAB__INTERNAL void mlfab__spread_tick(mlfab__server *server);
/* Takes PULL_DONE of a member, SPREAD_FAIL of an aggregator's node: returns 1 if the frame was one of them. */
MLFAB__INTERNAL int mlfab__spread_frame(mlfab__server *server, uint32_t worker,
                                        const mlfab__frame_in *frame);
/* See mlfab__server_policy. */
MLFAB__INTERNAL int mlfab__spread_hold(mlfab__server *server, mlfab__server_pull *pull);
MLFAB__INTERNAL void mlfab__spread_goes(mlfab__server *server, mlfab__server_pull *pull);
MLFAB__INTERNAL void mlfab__spread_left(mlfab__server *server, const mlfab__server_pull *pull,
                                        uint64_t taken);
MLFAB__INTERNAL void mlfab__spread_out(mlfab__server *server, mlfab__server_pull *own);
MLFAB__INTERNAL void mlfab__spread_over(mlfab__server *server, const mlfab__server_pull *was,
                                        int code);
MLFAB__INTERNAL void mlfab__spread_stopped(mlfab__server *server, uint32_t worker);
MLFAB__INTERNAL void mlfab__spread_turns(mlfab__server *server);

#endif
