/* scheduler.h - the scheduler role: decides order and routes of large transfers.
 *
 * It is a client of the servers: each announces the transfers that wait, and gets plans. It holds no bytes of tensors,
 * and can get all its state again. After a restart the servers report their waiting and placed transfers; without a
 * scheduler they grant first come, first served.
 *
 *    an item:  (ANNOUNCE by each of its `parts` servers) --> WAITING --plan--> PLACED --REPORT of all--> forgotten
 *                                   |                             +--dropped--> forgotten when reported
 *                                   +--its worker gone--> forgotten
 *
 * An item is an update, of which several servers have parts, or a pull. Each server answers its own part of a pull when
 * its own condition holds, so each server has an item for it. The scheduler waits three heartbeats for a server to
 * announce its part; it skips a server that has lost its link. If a server announces a placed part again, it has
 * forgotten it meanwhile (its worker reconnected): that part is planned again.
 *
 * When to plan: an item waits, and one of two conditions holds. The servers' in-links are booked for less than
 * plan_ahead_ns (placed bytes that have not arrived, over the capacity; by default, the time that the waiting item
 * takes on the link, plus 6 %). Or interval_ns has passed since the last plan. For pulls the same with the server's
 * out-link. Only the oldest waiting update of a worker is planned, because a worker's updates are decided in the order
 * of their numbers. How: the network is rebuilt from the last reported capacities. Transfers that are placed and not
 * over are reserved again, in their order, with their remaining bytes; t_max starts at their end. Then the batch is
 * planned on the rest of the network, and sent to all servers in the same order. An unknown capacity counts as the mean
 * of the known capacities, or 10 Gbit/s.
 *
 * A server with waiting items gets a plan once a heartbeat, possibly without entries. So it can tell a scheduler that
 * holds transfers back from a scheduler that has stopped, which it treats as lost (client.h).
 *
 * The plan predicts the remaining bytes, and the servers' reports correct them. Bytes that a server expects beyond the
 * prediction (late transfers, small updates, transfers placed before this scheduler started) occupy its in-link first.
 * Bytes that it no longer expects have arrived.
 *
 * Invariants. (1) An id is placed at most once for an incarnation of server and scheduler, unless the server announces
 * it again. (2) Every server of an item gets the same fate and the same place. (3) With rounds nothing is ordered or
 * dropped. (4) An unreachable item stays WAITING and is planned again. (5) Only live, reachable workers with a free
 * accumulator become aggregators: first those of the batch, then by the seed. (6) The limits of workers' open transfers
 * bound the number of items.
 *
 * Files, lowest first: items.c (items and their predictions), batch.c (planning), arrange.c (trees of
 * allreduce), scheduler.c (frames, and when to plan), explain.c (plans as text).
 *
 * Source: MLfabric §4, §5, §6, §10.2, §10.3. Departs: plans by booking and not at fixed intervals
 * (interval_ns is an option); the server, not the scheduler, grants. */
#ifndef MLFAB__SCHEDULER_H
#define MLFAB__SCHEDULER_H

#include "../base/env.h"
#include "plan.h"
#include "../node/tap.h"
#include "../base/rng.h"
#include "../wire/peer_wire.h"
#include "sched_wire.h"

typedef struct mlfab__scheduler mlfab__scheduler;

/* Errors: MEMORY. `port` addresses servers by number. */
MLFAB__INTERNAL int mlfab__scheduler_create(mlfab__env *env, const mlfab_config *config,
                                            const mlfab__port *port, mlfab_stats *stats,
                                            mlfab__scheduler **scheduler_p);
MLFAB__INTERNAL void mlfab__scheduler_destroy(mlfab__scheduler **scheduler_p);
/* hello: the link to a server stands; it will report everything again. lost: it is lost. */
MLFAB__INTERNAL void mlfab__scheduler_hello(mlfab__scheduler *scheduler, uint32_t server,
                                            uint64_t now_ns);
MLFAB__INTERNAL void mlfab__scheduler_lost(mlfab__scheduler *scheduler, uint32_t server,
                                           uint64_t now_ns);
/* Takes a frame of a server: SCHEDULE, STATION, CAPACITY (workers' capacities come from server 0), ANNOUNCE, REPORT,
 * TREE_ASK. */
MLFAB__INTERNAL void mlfab__scheduler_frame(mlfab__scheduler *scheduler, uint32_t server,
                                            const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__scheduler_tick(mlfab__scheduler *scheduler, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__scheduler_deadline(const mlfab__scheduler *scheduler);
/* Writes the last plans as text; *bytes_p: the full length. */
MLFAB__INTERNAL void mlfab__scheduler_explain(const mlfab__scheduler *scheduler, char *text,
                                              size_t room, size_t *bytes_p);

/* --- between the files of the role --- */

/* A batch is at most one group, so that no group can be too large, and fits one PLAN frame. */
#define MLFAB__BATCH_MAX MLFAB__GROUP_MEMBERS_MAX
/* Maximum number of aggregators of a batch, as in the paper's evaluation; further groups would be so large
 * that they save nothing. */
#define MLFAB__BATCH_AGGREGATORS 8u
#define MLFAB__NO_ITEM 0xffffffffu

enum { MLFAB__HOP_STRETCHES = 8 };

/* The prediction for one transfer: the remaining bytes at since_ns, and when they arrive. */
typedef struct mlfab__leg {
  double left;
  uint64_t since_ns;
  uint32_t n;    /* stretches, in seconds since since_ns; those beyond the array are averaged */
  uint32_t lost; /* 1: never arrives on the present network */
  mlfab__stretch stretches[MLFAB__HOP_STRETCHES];
} mlfab__leg;

enum mlfab__item_state { MLFAB__ITEM_NONE, MLFAB__ITEM_WAITING, MLFAB__ITEM_PLACED };

/* A server's part of an item. */
typedef struct mlfab__item_part {
  uint32_t state;
  uint32_t aggregator; /* a worker, or MLFAB__NO_NODE */
  uint64_t bytes, shape;
  uint64_t placed, lag; /* as announced */
  mlfab__leg own;       /* to its aggregator, or to the server; a pull: to its worker */
  mlfab__leg sum; /* of the group: aggregator to server; of the spread: server to distributor */
} mlfab__item_part;

/* Lists link by index, because the arrays may move. */
typedef struct mlfab__item {
  uint64_t id;
  uint64_t heard_ns; /* last announcement */
  uint64_t held_ns;  /* not planned before this time: it was unreachable */
  uint64_t due_ns;   /* earliest time at which it may be planned, as far as known */
  uint64_t group;    /* placed items with the same number are one group; 0: alone */
  uint64_t delay;    /* predicted; dropped: the delay without the drop */
  uint64_t serial;   /* of the plan that placed it */
  uint32_t kind, worker, incarnation, members;
  uint32_t parts;   /* servers expected to announce it, without those that have placed their part */
  uint32_t placed;  /* is in the list of placed items */
  uint32_t dropped; /* by the plan that placed it */
  /* in its list: in order of announcement, or of places; in the free list: next */
  uint32_t previous, next;
  uint32_t sibling; /* next item of the same worker */
} mlfab__item;

typedef struct mlfab__list {
  uint32_t first, last;
} mlfab__list;

typedef struct mlfab__plan_host {
  uint64_t key;   /* of the host, or of a node whose host is unknown */
  double in, out; /* bytes a second; negative: unknown */
} mlfab__plan_host;

typedef struct mlfab__station_state {
  uint32_t incarnation, accumulators, host; /* host: index */
  uint32_t first, items;                    /* items of the worker */
  /* accumulators in use, valid while a batch is planned */
  uint32_t in_use;
} mlfab__station_state;

/* The load of one of a server's links. */
typedef struct mlfab__booking {
  double left;   /* placed bytes that have not passed */
  double excess; /* of these, bytes beyond the prediction for placed items; negative: fewer */
  double known;  /* predicted bytes left of placed items */
  double unsure; /* ... of these, bytes in plans newer than the last confirmed one */
  uint64_t reported;
  int fresh; /* `reported` has not been evaluated */
} mlfab__booking;

typedef struct mlfab__served {
  int live, seen;
  uint32_t host;      /* index */
  uint64_t placed;    /* members, from the last report */
  uint64_t estimate;  /* the same, once all plans have reached the server */
  uint64_t confirmed; /* newest plan with an item that is over */
  uint64_t unsure;    /* members that newer plans have placed */
  uint64_t last_pull_ns;
  int pulled; /* last_pull_ns is valid */
  mlfab__booking in, out;
  uint64_t in_until_ns, out_until_ns; /* ends of the bookings */
  uint64_t told_ns;                   /* last plan sent to it */
} mlfab__served;

/* One line of mlfab__scheduler_explain. */
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
  const mlfab__tap *const *tap; /* the node's; NULL: no node */
  uint32_t workers, servers;
  uint64_t heartbeat_ns, now_ns;
  uint64_t reassure_ns; /* when to send the next empty plans */
  mlfab__rng prng;
  mlfab__schedule schedule; /* server 0's */
  int told;                 /* it has been received */
  mlfab__served *served;
  mlfab__station_state *stations;
  uint8_t *alive; /* server * workers + worker */
  mlfab__plan_host *hosts;
  uint32_t nhosts, hosts_room; /* the last index is for nodes without an entry */
  double alike_in, alike_out;  /* assumed for unknown capacities */
  mlfab__map host_map;
  /* Items, and for each of them `servers` parts. */
  mlfab__item *items;
  mlfab__item_part *parts;
  uint32_t items_room, parts_room, items_used, free_item;
  mlfab__list waiting, placed;
  uint64_t listed; /* items in the two lists */
  uint64_t serial, groups;
  /* When to plan. */
  int dirty; /* bookings and due times must be computed again */
  uint64_t reckoned_ns;
  uint64_t due_ns;    /* of the next plan */
  uint64_t last_ns;   /* of the last plan of pushes */
  int planned_before; /* last_ns is valid */
  /* Scratch of a batch. */
  mlfab__network network;
  mlfab__planner planner;
  mlfab__grouper grouper;
  uint32_t *batch; /* items */
  uint32_t nbatch;
  mlfab__candidate *candidates;
  double *bytes; /* of candidates, one for each server */
  mlfab__planned *planned;
  mlfab__delivery *deliveries;
  mlfab__plan_entry *entries;
  uint8_t *meta;
  uint32_t *batch_servers, *server_nodes, nbatch_servers;
  uint32_t *aggregators, *aggregator_nodes; /* k x servers of the batch */
  uint32_t k;
  uint32_t *nodes;    /* of requests */
  uint32_t *draw;     /* workers */
  uint64_t *marks;    /* by host: the last batch that took an aggregator there */
  uint64_t *counted;  /* by server: the last group counted */
  mlfab__leg *sums;   /* k x servers of the batch */
  double *ready;      /* by server: when a group's members have arrived */
  double *latest;     /* by server: when all transfers reserved again so far have arrived: t_max */
  mlfab__leg *target; /* receives the next reservation */
  int watching_batch;
  mlfab__story stories[2]; /* the last plan of updates, and of pulls */
};

static inline mlfab__item_part *mlfab__scheduler_part(const mlfab__scheduler *s, uint32_t item,
                                                      uint32_t server) {
  return &s->parts[(size_t)item * s->servers + server];
}
/* Returns the predicted remaining bytes of a leg. */
MLFAB__INTERNAL double mlfab__scheduler_left(const mlfab__leg *leg, uint64_t now_ns);
/* Returns the leg of an item over the server's own link. NULL if another member of the group was counted there: a group
 * crosses the link once. Set `counted` to 0 for all servers before a walk over the placed items. */
MLFAB__INTERNAL mlfab__leg *mlfab__scheduler_crossing(mlfab__scheduler *s, uint32_t item,
                                                      uint32_t server);
/* Returns the capacity of a host's link: as reported, or as assumed. */
MLFAB__INTERNAL double mlfab__scheduler_rate(const mlfab__scheduler *s, uint32_t host, int out);
/* Converts seconds to nanoseconds; `never` keeps its meaning. */
MLFAB__INTERNAL uint64_t mlfab__scheduler_ns(double seconds);
/* Appends an item to a list; takes it out. */
MLFAB__INTERNAL void mlfab__scheduler_append(mlfab__scheduler *s, mlfab__list *list, uint32_t i);
MLFAB__INTERNAL void mlfab__scheduler_unlink(mlfab__scheduler *s, mlfab__list *list, uint32_t i);
/* Moves an item from the waiting list to the end of the placed list. */
MLFAB__INTERNAL void mlfab__scheduler_place(mlfab__scheduler *s, uint32_t item);
/* Takes TREE_ASK: plans the tree of an allreduce and sends it. */
MLFAB__INTERNAL void mlfab__scheduler_arrange(mlfab__scheduler *s, uint32_t server,
                                              const mlfab__frame_in *frame);
/* Plans all due updates, or all due pulls of a server. */
MLFAB__INTERNAL void mlfab__scheduler_plan_pushes(mlfab__scheduler *s);
MLFAB__INTERNAL void mlfab__scheduler_plan_pulls(mlfab__scheduler *s, uint32_t server);

#endif
