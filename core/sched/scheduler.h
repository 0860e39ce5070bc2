/* scheduler.h - the scheduler role: decides in which order and by which hop large transfers go.
 * Layer 4.
 *
 * It is a client of the servers: each announces what wants to travel, and gets plans. It holds no
 * tensor bytes and nothing that could not be told to it again: when it is restarted the servers say
 * what waits and what they have placed, and when it is away they grant first come, first served.
 *
 *    an item:  (ANNOUNCE by each of its `parts` servers) --> WAITING --plan--> PLACED --REPORT of all--> forgotten
 *                                   |                             +--dropped--> forgotten when reported
 *                                   +--its worker gone--> forgotten
 *
 * An item is an update, of which servers have parts, or a pull, of which each server answers its
 * own part when its own condition holds: that is an item a server. A part that a server does not
 * announce within three heartbeats is not waited for, nor is one of a server whose link is lost. A
 * server that announces again what is placed has forgotten it meanwhile (its worker came back):
 * that part is planned anew.
 *
 * When a plan is made: something waits, and either the servers' in-links are booked for less than
 * plan_ahead_ns ahead (what is placed and has not come, over the capacity; unless it is set: as
 * long as what waits takes on the link, and a little more), or interval_ns has passed since the
 * last one. Pulls likewise, by the server's out-link. Only the oldest waiting update of a worker is
 * taken, since a worker's updates are decided in the order of their numbers. How: the network is
 * built anew from the capacities as reported last; what is placed and not over is reserved again,
 * in its order, with the bytes that are left; the end of that is where t_max starts; then the batch
 * is planned on what is left of the network and sent to all servers, the same order for all. Where
 * capacities are not known, all links are reckoned alike: like the mean of those that are known, or
 * 10 Gbit/s.
 *
 * A server for which something waits gets a plan once a heartbeat, without entries when there is nothing
 * to place: it tells a scheduler that holds transfers back from one that is no scheduler, and takes the
 * latter for lost (server.h).
 *
 * Bytes left are what the plan predicts, corrected by the servers' reports: what a server still
 * expects beyond the prediction (late transfers, small updates, what was placed before this
 * scheduler came) keeps its in-link busy first; what it does not expect any more has come.
 *
 * Invariants. (1) An id is placed at most once for an incarnation of server and scheduler, unless
 * the server announces it again. (2) Every server of an item gets the same fate and the same place.
 * (3) With rounds nothing is ordered or dropped. (4) An unreachable item stays WAITING: it is
 * planned again. (5) Only workers that live, have a free accumulator and are reachable are chosen
 * as aggregators: of the batch first, then from the seed. (6) Items are bounded by what workers may
 * have under way.
 *
 * Files, lowest first: items.c (items and what is predicted of them), batch.c (planning), arrange.c
 * (trees of allreduce), scheduler.c (what was told, and when to plan), explain.c (for people).
 *
 * Source: MLfabric §4, §5, §6, §10.2, §10.3. Departs: plans by booking and not by the clock (its
 * fixed interval is an option); the server, not the scheduler, grants. */
#ifndef MLFAB__SCHEDULER_H
#define MLFAB__SCHEDULER_H

#include "../base/env.h"
#include "plan.h"
#include "../node/port.h"
#include "../base/rng.h"
#include "sched_wire.h"

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
/* A frame of a server: SCHEDULE, STATION, CAPACITY (server 0's count of workers), ANNOUNCE, REPORT,
 * TREE_ASK. */
MLFAB__INTERNAL void mlfab__scheduler_frame(mlfab__scheduler *scheduler, uint32_t server,
                                            const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__scheduler_tick(mlfab__scheduler *scheduler, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__scheduler_deadline(const mlfab__scheduler *scheduler);
/* The last plan as text; *bytes_p: its whole length. */
MLFAB__INTERNAL void mlfab__scheduler_explain(const mlfab__scheduler *scheduler, char *text,
                                              size_t room, size_t *bytes_p);

/* --- between the files of the role --- */

/* A batch is at most one group, so that no group can be too large; one PLAN frame holds it. */
#define MLFAB__BATCH_MAX MLFAB__GROUP_MEMBERS_MAX
/* Aggregators of a batch, at most: the paper's evaluation has k of this size, and with more of them
 * the groups behind the eighth are so large already that they save nothing. */
#define MLFAB__BATCH_AGGREGATORS 8u
#define MLFAB__NO_ITEM 0xffffffffu

enum { MLFAB__HOP_STRETCHES = 8 };

/* What is predicted of one transfer: bytes that are left at since_ns, and when they come. */
typedef struct mlfab__leg {
  double left;
  uint64_t since_ns;
  uint32_t n; /* stretches, in seconds since since_ns; more than there is room for are averaged */
  uint32_t lost; /* 1: it never comes as the network stands */
  mlfab__stretch stretches[MLFAB__HOP_STRETCHES];
} mlfab__leg;

enum mlfab__item_state { MLFAB__ITEM_NONE, MLFAB__ITEM_WAITING, MLFAB__ITEM_PLACED };

/* What a server has to do with an item. */
typedef struct mlfab__item_part {
  uint32_t state;
  uint32_t aggregator; /* a worker, or MLFAB__NO_NODE */
  uint64_t bytes, shape;
  uint64_t placed, lag; /* as announced */
  mlfab__leg own;       /* to its aggregator, or to the server; a pull: to its worker */
  mlfab__leg sum; /* of the group: aggregator to server; of the spread: server to distributor */
} mlfab__item_part;

/* Lists are by index, since the arrays grow. */
typedef struct mlfab__item {
  uint64_t id;
  uint64_t heard_ns; /* when it was announced last */
  uint64_t held_ns;  /* not planned before: it could not be reached */
  uint64_t due_ns;   /* when it may be planned, as far as is known */
  uint64_t group;    /* placed items with one number are one group; 0: alone */
  uint64_t delay;    /* that it will have, or would have had */
  uint64_t serial;   /* of the plan that placed it */
  uint32_t kind, worker, incarnation, members;
  uint32_t parts;   /* servers that will announce it, without those that have placed their part */
  uint32_t placed;  /* stands in the list of the placed */
  uint32_t dropped; /* by the plan that placed it */
  uint32_t previous, next; /* in its list, in order of announcement or of places; free ones: next */
  uint32_t sibling;        /* the next of the same worker */
} mlfab__item;

typedef struct mlfab__list {
  uint32_t first, last;
} mlfab__list;

typedef struct mlfab__plan_host {
  uint64_t key;   /* of the host, or of a node whose host is not known */
  double in, out; /* bytes a second; negative: not known */
} mlfab__plan_host;

typedef struct mlfab__station_state {
  uint32_t incarnation, accumulators, host; /* host: index */
  uint32_t first, items;                    /* of the worker */
  uint32_t in_use;                          /* accumulators, while a batch is planned */
} mlfab__station_state;

/* How full one of a server's links is. */
typedef struct mlfab__booking {
  double left;   /* bytes that are placed and have not gone through */
  double excess; /* of these, beyond what is predicted of placed items; negative: less */
  double known;  /* predicted to be left of placed items; */
  double unsure; /* ... of these, of plans that the server may not have had when it reported */
  uint64_t reported;
  int fresh; /* `reported` has not been looked at */
} mlfab__booking;

typedef struct mlfab__served {
  int live, seen;
  uint32_t host;      /* index */
  uint64_t placed;    /* members, as reported last */
  uint64_t estimate;  /* the same when all plans have arrived there */
  uint64_t confirmed; /* the newest plan of which something is over */
  uint64_t unsure;    /* members placed by newer plans */
  uint64_t last_pull_ns;
  int pulled; /* last_pull_ns is one */
  mlfab__booking in, out;
  uint64_t in_until_ns, out_until_ns; /* booked until then */
  uint64_t told_ns;                   /* when it got a plan last */
} mlfab__served;

/* What is kept of a plan for people. */
typedef struct mlfab__told {
  uint64_t id;
  uint32_t worker, aggregator, group;
  uint8_t reason; /* mlfab__reason; 0: not planned, in order of announcement */
  uint8_t dropped;
  double bytes, start, arrive, ready, end, commit; /* seconds from the plan */
  int64_t delay;
} mlfab__told;

typedef struct mlfab__story {
  mlfab__told *told;
  uint32_t n, kind, server, servers, candidates;
  uint64_t serial, now_ns;
  double backlog;
} mlfab__story;

struct mlfab__scheduler {
  mlfab__env *env;
  mlfab__port port;
  mlfab_stats *stats;
  uint32_t workers, servers;
  uint64_t heartbeat_ns, now_ns;
  uint64_t reassure_ns; /* when to look next for servers whose items wait for long */
  mlfab__rng prng;
  mlfab__schedule schedule; /* server 0's */
  int told;                 /* it is known */
  mlfab__served *served;
  mlfab__station_state *stations;
  uint8_t *alive; /* server * workers + worker */
  mlfab__plan_host *hosts;
  uint32_t nhosts, hosts_room; /* the last one of the room is for nodes that found none */
  double alike_in, alike_out;  /* of hosts that are not known */
  mlfab__map host_map;
  /* Items and, `servers` of them each, parts. */
  mlfab__item *items;
  mlfab__item_part *parts;
  uint32_t items_room, parts_room, items_used, free_item;
  mlfab__list waiting, placed;
  uint64_t listed; /* items in the two lists */
  uint64_t serial, groups;
  /* When to plan. */
  int dirty; /* bookings and due times are to be reckoned anew */
  uint64_t reckoned_ns;
  uint64_t due_ns;    /* the next plan */
  uint64_t last_ns;   /* the last one of pushes */
  int planned_before; /* last_ns is one */
  /* Scratch of a batch. */
  mlfab__network network;
  mlfab__planner planner;
  mlfab__grouper grouper;
  uint32_t *batch; /* items */
  uint32_t nbatch;
  mlfab__candidate *candidates;
  double *bytes; /* of candidates, one a server */
  mlfab__planned *planned;
  mlfab__delivery *deliveries;
  mlfab__plan_entry *entries;
  uint8_t *meta;
  uint32_t *batch_servers, *server_nodes, nbatch_servers;
  uint32_t *aggregators, *aggregator_nodes; /* k x servers of the batch */
  uint32_t k;
  uint32_t *nodes;    /* of requests */
  uint32_t *draw;     /* workers */
  uint64_t *marks;    /* by host: of the last batch that took an aggregator there */
  uint64_t *counted;  /* by server: the group that was looked at last */
  mlfab__leg *sums;   /* k x servers of the batch */
  double *ready;      /* by server: when the members of a group have arrived */
  double *latest;     /* by server: when all that is reserved again so far is in: t_max */
  mlfab__leg *target; /* the next reservation is told to it */
  int watching_batch;
  mlfab__story stories[2]; /* the last plan of updates, and of pulls */
};

static inline mlfab__item_part *mlfab__scheduler_part(const mlfab__scheduler *s, uint32_t item,
                                                      uint32_t server) {
  return &s->parts[(size_t)item * s->servers + server];
}
/* Bytes of a leg that are left, as predicted. */
MLFAB__INTERNAL double mlfab__scheduler_left(const mlfab__leg *leg, uint64_t now_ns);
/* The leg of an item over the server's own link, and NULL when that was another member's already: a
 * group goes over it once. `counted` is 0 for all servers when a walk through the placed items
 * begins. */
MLFAB__INTERNAL mlfab__leg *mlfab__scheduler_crossing(mlfab__scheduler *s, uint32_t item,
                                                      uint32_t server);
/* What a host's link carries: as reported, or like the others. */
MLFAB__INTERNAL double mlfab__scheduler_rate(const mlfab__scheduler *s, uint32_t host, int out);
/* Seconds as nanoseconds; never stays never. */
MLFAB__INTERNAL uint64_t mlfab__scheduler_ns(double seconds);
/* Appends an item to a list; takes it out. */
MLFAB__INTERNAL void mlfab__scheduler_append(mlfab__scheduler *s, mlfab__list *list, uint32_t i);
MLFAB__INTERNAL void mlfab__scheduler_unlink(mlfab__scheduler *s, mlfab__list *list, uint32_t i);
/* Moves an item from the waiting to the end of the placed, as this plan does. */
MLFAB__INTERNAL void mlfab__scheduler_place(mlfab__scheduler *s, uint32_t item);
/* TREE_ASK: arranges the tree of an allreduce, and tells it. */
MLFAB__INTERNAL void mlfab__scheduler_arrange(mlfab__scheduler *s, uint32_t server,
                                              const mlfab__frame_in *frame);
/* Plans what is due in one go: updates, or the pulls of a server. */
MLFAB__INTERNAL void mlfab__scheduler_plan_pushes(mlfab__scheduler *s);
MLFAB__INTERNAL void mlfab__scheduler_plan_pulls(mlfab__scheduler *s, uint32_t server);

#endif
