/* sched_wire.h - frames of scheduling: between scheduler and servers, and of aggregators and distributors.
 * See wire.h. */
#ifndef MLFAB__SCHED_WIRE_H
#define MLFAB__SCHED_WIRE_H

#include "../wire/wire.h"

typedef struct mlfab__capacity { /* worker -> server 0 -> scheduler; server -> scheduler */
  uint64_t host;
  double in, out; /* of its network interface, bytes a second; negative: unknown */
} mlfab__capacity;

typedef struct mlfab__station { /* server -> scheduler: a worker came, or left */
  uint32_t worker, incarnation, alive, accumulators;
  uint64_t host;
} mlfab__station;

enum mlfab__transfer_kind { MLFAB__TRANSFER_PUSH = 0, MLFAB__TRANSFER_PULL = 1 };

typedef struct mlfab__announce { /* server -> scheduler: a large transfer waits */
  uint64_t id;                   /* number of the update, or of the pull request */
  uint64_t bytes;                /* of its part at this server */
  uint64_t shape;                /* hash of the segments: only transfers of one shape are grouped */
  uint64_t placed;               /* members ever placed in the server's queue ... */
  uint64_t lag;                  /* ... at whose end the update would now have this delay */
  double norm;
  uint32_t kind, worker, incarnation, members;
  uint32_t parts; /* servers that will announce it */
} mlfab__announce;

enum mlfab__fate { MLFAB__FATE_GO = 0, MLFAB__FATE_LOOKAHEAD = 1, MLFAB__FATE_EXPIRED = 2 };

typedef struct mlfab__plan_entry {
  uint64_t id;
  uint64_t delay; /* predicted; dropped: the delay without the drop */
  double rate;    /* in-link of the aggregator's host, bytes a second; 0 or less: unknown */
  uint32_t kind, worker;
  uint32_t aggregator; /* worker whose node aggregates, or MLFAB__NO_NODE */
  uint32_t group;      /* consecutive entries with the same number, not 0, are one group */
  uint32_t fate;
} mlfab__plan_entry;

typedef struct mlfab__plan { /* scheduler -> server: u32 count and entries follow, in order */
  uint64_t serial;
  double rate_in, rate_out; /* of the server's host, as known to the scheduler; negative: unknown */
  uint32_t entries;
} mlfab__plan;
#define MLFAB__PLAN_ENTRIES_MAX 1400u

typedef struct mlfab__report {   /* server -> scheduler: the state of its queues */
  uint64_t id;                   /* the push or pull that is over, if `worker` is set */
  uint64_t placed;               /* members ever placed */
  uint64_t backlog, out_backlog; /* placed bytes still to be received; still to be sent */
  uint64_t version;
  uint32_t kind, worker; /* worker: MLFAB__NO_NODE if no transfer is over */
  int32_t code;
} mlfab__report;

typedef struct mlfab__group_member {
  uint64_t seq;
  double weight;
  uint32_t worker, incarnation;
} mlfab__group_member;

typedef struct mlfab__group { /* server -> aggregator: u32 count, members in order; segments */
  uint64_t group, bytes;
  double rate_in;  /* of the aggregator's host; 0 or less: unknown */
  uint32_t whole;  /* 1: forward the complete sum, 0: cut through */
  uint32_t packed; /* 1: members and sum are packets; `bytes` is their unpacked size */
  uint32_t members, segments;
} mlfab__group;
#define MLFAB__GROUP_MEMBERS_MAX 512u

typedef struct mlfab__group_end { /* server -> aggregator: applied, or given up */
  uint64_t group;
} mlfab__group_end;

typedef struct mlfab__release { /* server -> aggregator: may forward the sum up to byte `upto` */
  uint64_t group, upto;
} mlfab__release;

/* aggregator -> server: the group fails because of this member */
typedef struct mlfab__group_fail {
  uint64_t group, seq;
  uint32_t worker; /* MLFAB__NO_NODE: because of the aggregator itself */
  int32_t code;
} mlfab__group_fail;

typedef struct mlfab__forward { /* aggregator -> server: the next bytes of the sum */
  uint64_t group, offset;
  uint64_t total; /* size of the sum, or of its packets: 0 until the sum is complete */
} mlfab__forward;

typedef struct mlfab__spread_member {
  uint64_t request;
  uint32_t worker, incarnation, attempt;
} mlfab__spread_member;

typedef struct mlfab__spread { /* server -> distributor: u32 count and members in order */
  uint64_t request, bytes;
  uint32_t frames; /* number of MODEL frames, unless a slice is begun again */
  uint32_t whole;  /* 1: forward the whole model, 0: cut through */
  uint32_t members;
} mlfab__spread;

/* Distributor -> server: serve this member directly. Server -> distributor: the server serves it. */
typedef struct mlfab__spread_fail {
  uint64_t request, member_request;
  uint32_t worker; /* MLFAB__NO_NODE: all remaining members */
  int32_t code;
} mlfab__spread_fail;

/* mlfab_schedule: worker -> servers, server -> scheduler; the scheduler sends server 0's to the others. */
typedef struct mlfab__schedule {
  uint64_t delay_bound; /* UINT64_MAX: none */
  uint64_t plan_ahead_ns, interval_ns;
  uint32_t best, whole, no_aggregation, no_distribution;
  /* Server -> scheduler only. */
  uint32_t rounds; /* 1: plans lists for rounds, without order or drops */
  uint64_t host;   /* of the server */
} mlfab__schedule;

typedef struct mlfab__via { /* server -> worker: the new route of this update */
  uint64_t seq;
  uint64_t group;      /* ascending at a server: frames with older numbers are ignored */
  uint32_t generation; /* of the stream */
  uint32_t aggregator; /* worker, or MLFAB__NO_NODE: directly, when granted */
} mlfab__via;

/* aggregator -> member: the update may be sent here up to `upto` */
typedef struct mlfab__hop_grant {
  uint64_t group, seq, upto;
  uint32_t server;
} mlfab__hop_grant;

typedef struct mlfab__hop_chunk { /* member -> aggregator: the next bytes of an update */
  uint64_t group, seq, offset;
  uint64_t total; /* of the update's bytes for that server, or of its packets */
  uint32_t server;
} mlfab__hop_chunk;

typedef struct mlfab__pull_via { /* server -> worker: ignore frames of earlier attempts */
  uint64_t request;
  uint32_t attempt;
  uint32_t aggregator; /* worker, or MLFAB__NO_NODE: the server itself, with MODEL frames */
} mlfab__pull_via;

typedef struct mlfab__hop_model { /* distributor -> member: a forwarded MODEL frame */
  uint64_t request, offset, bytes, version, commit;
  uint32_t slice, flags, epoch; /* as in mlfab__model */
  uint32_t server, attempt;
} mlfab__hop_model;

typedef struct mlfab__pull_done { /* worker -> server: all of it came through the distributor */
  uint64_t request;
} mlfab__pull_done;

/* Declared as in wire.h. */
/* clang-format off */
#define MLFAB__SCHED_PAIRS(X) \
  X(capacity) X(station) X(announce) X(report) X(group_end) X(release) X(group_fail) X(forward) \
  X(spread_fail) X(schedule) X(via) X(hop_grant) X(hop_chunk) X(pull_via) X(hop_model) X(pull_done)
#define MLFAB__SCHED_LISTS(X) \
  X(plan, mlfab__plan_entry) \
  X(spread, mlfab__spread_member)
/* clang-format on */
MLFAB__SCHED_PAIRS(MLFAB__WIRE_DECLARE)
MLFAB__SCHED_LISTS(MLFAB__WIRE_DECLARE_LIST)

/* When decoding, members has room for MLFAB__GROUP_MEMBERS_MAX. Checks: at least one member, finite
 * weights, segments as in a push. */
MLFAB__INTERNAL uint32_t mlfab__encode_group(uint8_t *meta, const mlfab__group *m,
                                             const mlfab__group_member *members,
                                             const mlfab__segment *segments);
MLFAB__INTERNAL int mlfab__decode_group(const uint8_t *meta, uint32_t bytes, mlfab__group *m,
                                        mlfab__group_member *members, mlfab__segment *segments);

#endif
