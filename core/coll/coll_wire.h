/* coll_wire.h - frames of collectives: of membership with server 0, and between workers. See wire.h. */
#ifndef MLFAB__COLL_WIRE_H
#define MLFAB__COLL_WIRE_H

#include "../wire/wire.h"

/* MEMBERSHIP: value of `newcomer` for a member that has ended all calls below the limit. */
#define MLFAB__MEMBERSHIP_MOVED 2u

typedef struct mlfab__membership_ask { /* MEMBERSHIP, worker -> server 0: it wants to take part */
  uint32_t epoch;                      /* newest epoch that it knows to be over, 0: none */
  uint32_t arena_pid; /* memory that it shares with its host's workers; nonce 0: none */
  int32_t arena_fd;
  uint64_t arena_nonce, arena_bytes;
  uint64_t host;      /* workers of one host share its links */
  double in, out;     /* rates of its link, bytes a second; 0: unknown */
  uint64_t round;     /* partial rounds that it has completed, the maximum over its objects */
  uint64_t objects;   /* number of the last object that it opened, or took part in opening */
  uint64_t signature; /* signature of its first waiting call; 0: no call waits */
  uint64_t progress, barriers; /* updates, and barriers, that it had begun before that call */
  uint32_t open;               /* number of its open objects */
  uint32_t
      newcomer; /* 1: it has been in no epoch, and the fabric existed before it (membership.h) */
} mlfab__membership_ask;

typedef struct mlfab__membership_member { /* in a list, in the order of members */
  uint32_t rank, incarnation, arena_pid;
  int32_t arena_fd;
  uint64_t arena_nonce, arena_bytes, host;
} mlfab__membership_member;
#define MLFAB__MEMBERSHIP_MEMBERS_MAX 1024u

typedef struct
    mlfab__membership_list { /* server 0 -> worker: the members of a new epoch; u32 count, then
                                     mlfab__membership_member follow */
  uint32_t epoch;
  uint32_t members;
  uint32_t newcomers; /* number of newcomers among the members */
} mlfab__membership_list;

/* Shared memory of an epoch. LEFT: this worker has left it; others may not know yet. */
enum { MLFAB__ARENA_NONE, MLFAB__ARENA_USED, MLFAB__ARENA_LEFT };

/* worker -> server 0: the sender knows the members. With newcomers among them the sender has also made its call.
 * server 0 -> newcomer: the others are ready. `progress` and `barriers`: those of `rank` at its call. */
typedef struct mlfab__membership_ready {
  uint32_t epoch;
  uint32_t arena; /* USED: it has mapped the memory of all members */
  uint64_t progress, barriers;
  int32_t rank;
} mlfab__membership_ready;

typedef struct mlfab__membership_go { /* server 0 -> worker: everybody knows the members */
  uint32_t epoch;
  uint32_t arena;      /* USED: all members have */
  uint64_t latency_ns; /* latency of a message between two members, for choosing algorithms */
  double rate;         /* rate of the slowest link, bytes a second */
  uint64_t round;      /* the first partial round of this epoch */
  uint64_t objects;    /* the most that a member had opened: numbers go on from there */
} mlfab__membership_go;

typedef struct
    mlfab__membership_over { /* MEMBERSHIP_FAIL up, MEMBERSHIP_OVER down: the epoch is over; reason */
  uint32_t epoch;
  int32_t code, rank;
  char text[MLFAB__TEXT_MAX];
} mlfab__membership_over;

typedef struct
    mlfab__membership_call { /* STUCK up: this call is open for long; ASK down: have you called it? */
  uint32_t epoch, channel;
  uint64_t number;
} mlfab__membership_call;

typedef struct mlfab__membership_tell { /* worker -> server 0 */
  uint32_t epoch, channel;
  uint64_t number;
  uint32_t called;
  uint64_t signature;         /* signature of the call, if called */
  char text[MLFAB__TEXT_MAX]; /* the call in words */
} mlfab__membership_tell;

typedef struct
    mlfab__membership_missing { /* server 0 -> worker: who has not called, or MLFAB_NO_RANK */
  uint32_t epoch, channel;
  uint64_t number;
  int32_t rank;
  uint32_t waits;             /* 1: that rank waits in a barrier */
  char text[MLFAB__TEXT_MAX]; /* epoch 0, to a joiner: the rank's different call */
} mlfab__membership_missing;

typedef struct mlfab__membership_leave { /* LEAVE up, LEFT down: a worker takes no further part */
  uint32_t epoch;
  int32_t rank;
  uint64_t calls; /* number of plain collectives of the epoch that it has called */
} mlfab__membership_leave;

enum { MLFAB__MEMBERSHIP_SEEK = 4 };

/* A worker finishes (membership.h). FINISH up: it has called so many collectives, or (rank MLFAB_NO_RANK) has ended all
 * below the limit. FREEZE down: this rank has finished with so many. FROZEN up, as the answer: so many have begun here.
 * SETTLE down: the epoch ends with so many, and this rank describes the calls that others owe. With signatures in
 * `seek`, the epoch ends before the first call from there on that has one of them. */
typedef struct mlfab__membership_finish {
  uint32_t epoch;
  int32_t rank;
  uint64_t calls;                        /* FREEZE: UINT64_MAX: the rank joins */
  uint32_t open;                         /* FROZEN: number of open objects here */
  uint64_t seek[MLFAB__MEMBERSHIP_SEEK]; /* SETTLE: first calls of joiners; 0: no more */
  char text[MLFAB__TEXT_MAX];            /* FROZEN: the last call that has begun, in words */
} mlfab__membership_finish;

/* A call in which a finished worker still takes part; to server 0, and on to the worker. If the call has blocks, u32
 * count and the elements of each rank's block follow. */
typedef struct mlfab__membership_owed {
  uint32_t epoch;
  uint32_t kind, algorithm, dtype, op, width, user, opens;
  int32_t root;
  uint64_t number, signature, elements;
  uint32_t counts;
} mlfab__membership_owed;

/* Records of the membership, for the other copy of server 0: common state, each worker's state. As in membership.h. */
typedef struct mlfab__membership_state {
  uint32_t phase, epoch, freezing, kept;
  int32_t finisher, keeper;
  uint64_t limit;
  uint64_t seek[MLFAB__MEMBERSHIP_SEEK];
  mlfab__membership_go go;
  mlfab__membership_over verdict;
} mlfab__membership_state;

typedef struct mlfab__membership_worker {
  uint32_t flags; /* bits: membership_records.c */
  int32_t lost;
  uint32_t over_owed, incarnation, place;
  uint64_t calls, begun;
  mlfab__membership_ask ask;
} mlfab__membership_worker;

/* flags. READY: no bytes; its sender has called it and takes its bytes. EAGER: part of a small call, sent without
 * waiting for READY. */
enum { MLFAB__COLL_READY = 1, MLFAB__COLL_EAGER = 2 };
typedef struct mlfab__coll { /* COLL, worker -> worker, bulk: the next bytes of a message */
  uint32_t epoch, channel;
  uint64_t number;
  uint32_t tag, flags;
  uint64_t seq;           /* number of the frame, from 1, for each sender, receiver and epoch */
  uint64_t signature;     /* of the call */
  uint64_t offset, total; /* position in the message; its length */
} mlfab__coll;

typedef struct mlfab__coll_ack { /* back on the link of COLL */
  uint32_t epoch;
  uint64_t received; /* every frame up to this number came */
  uint64_t consumed; /* bytes of eager messages that no longer wait */
} mlfab__coll_ack;

/* As declared in wire.h, for each type. */
/* clang-format off */
#define MLFAB__COLL_PAIRS(X) \
  X(membership_ask) X(membership_ready) X(membership_go) X(membership_over) X(membership_call) \
  X(membership_tell) X(membership_missing) X(membership_leave) X(membership_finish) X(coll) \
  X(coll_ack) X(membership_state) X(membership_worker)
#define MLFAB__COLL_LISTS(X) \
  X(membership_list, mlfab__membership_member) \
  X(membership_owed, uint64_t)
/* clang-format on */
MLFAB__COLL_PAIRS(MLFAB__WIRE_DECLARE)
MLFAB__COLL_LISTS(MLFAB__WIRE_DECLARE_LIST)

#endif
