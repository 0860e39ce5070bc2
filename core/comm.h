/* comm.h - the communicator: a worker's collectives, their epochs, their execution. Layer 4.
 *
 * Server 0 keeps the roll of those who take part (roll.h). A worker:
 *
 *    OUT --first call: ROLL--> ASKED --ROLL_LIST--> LISTED (READY) --ROLL_GO--> IN
 *               ^                                                                |
 *               +------- ROLL again, by itself <------- ROLL_OVER, from any -----+
 *
 * A failure here (deadline, cancel, NaN refused, out of memory, a peer that cannot be reached for 8
 * heartbeats) is told to server 0 (ROLL_FAIL), which ends the epoch for all (ROLL_OVER); so there is
 * one verdict. A call whose own deadline has passed returns at once, and the verdict that follows does not fail
 * another one (`settled`). A verdict that finds no call open is kept for the next one (`owed`). Calls
 * begun before an epoch stands wait for it, with numbers of the epoch to come.
 *
 * A play is a schedule (dag.h) being executed: of a plain collective (channel 0, its number), of a round
 * of an object (channel, round). Operations:
 *    SEND      one message, when the peer may have it: at once if the play is eager, else when its READY
 *              came. Done when it is queued and copied, or (borrowed) queued.
 *    RECV      done when all its bytes are in place. What comes for it before it may run is staged: eager
 *              bytes in a pool; others in memory of the message's length.
 *    RECV_REDUCE  likewise, added as the bytes come.
 *    COMPUTE   the play's function.
 * A play is over when its schedule is finished and nothing borrowed is out: then the caller has its
 * buffers again.
 *
 * Invariants. (1) Plain calls are numbered in the order of calls, from 0 in each epoch; (channel, number) means
 * the same play on all workers, and its signature (kind, sizes, types, options) is in every message: one that
 * differs from ours is a failure with SHAPE, found by server 0, which asks everybody. (2) A message is
 * accepted once, for its RECV only, with the length that the RECV says. (3) Every failure is seen once by
 * every worker: its open calls and steps fail with it, or the next. (4) Nothing of an epoch that is over
 * touches a caller's memory. (5) Plays of one epoch are bounded: MLFAB__COMM_CALLS plain ones, 2 an object;
 * staged bytes by MLFAB__STREAM_CREDIT a peer and the lengths of RECVs. (6) A call ends: by finishing, by a
 * verdict, by its deadline, or by the death of server 0.
 *
 * A call that runs in shared memory (arena.h) takes a number here like any other (`outside`), so that
 * matching, deadlines and verdicts are the same; its bytes pass elsewhere.
 *
 * Source: eagerSGD §4 (schedules). Departs: sends are matched by the number of the round, not by
 * persistent connections; failures. */
#ifndef MLFAB__COMM_H
#define MLFAB__COMM_H

#include "combine.h"
#include "dag.h"
#include "ring.h"
#include "request.h"
#include "stream.h"

enum {
  MLFAB__COMM_CALLS = 16,       /* plain collectives that are open */
  MLFAB__COMM_OBJECTS = 16,     /* partial, stochastic, schedules */
  MLFAB__COMM_EAGER = 32 << 10, /* a call of up to so many bytes is sent without READY */
  MLFAB__COMM_SPACES = 4,
  MLFAB__COMM_BUFS = 256,
  MLFAB__COMM_PATIENCE = 8 /* heartbeats without a link */
};

enum mlfab__comm_phase { MLFAB__COMM_OUT, MLFAB__COMM_ASKED, MLFAB__COMM_LISTED, MLFAB__COMM_IN };

struct mlfab__comm;

/* Memory that a schedule works on: a list of stretches taken as one. */
typedef struct mlfab__comm_space {
  mlfab_vec *vecs; /* count in bytes here */
  uint32_t n;
} mlfab__comm_space;

typedef struct mlfab__play {
  /* Filled by whoever arms it, and left alone until it is over. */
  uint32_t channel;
  uint64_t number, signature;
  uint8_t eager;
  int dtype, op;
  uint32_t width;
  mlfab_reduce_fn reduce; /* instead of op */
  void *reduce_user;
  mlfab__comm_space spaces[MLFAB__COMM_SPACES];
  /* COMPUTE: 0, or a code that ends the epoch. NULL: only MLFAB__RING_DIVIDE occurs, which comm does. */
  int (*compute)(void *self, struct mlfab__play *play, const mlfab__dag_op *op);
  /* It is over: status 0, or the verdict that ended it (told once; the play is then not armed any more).
   * It may arm another, and this one again. */
  void (*over)(void *self, struct mlfab__play *play, int status, uint64_t now_ns);
  void *self;
  mlfab__dag dag; /* sealed; comm starts it */
  /* comm's own. */
  uint8_t armed, running;
  uint32_t lent;                  /* messages of which bytes are borrowed */
  uint8_t *ready;                 /* by member: READY came */
  struct mlfab__comm_recv *recvs; /* state of the RECVs that have begun */
  struct mlfab__play *next;       /* of the armed ones */
} mlfab__play;

/* Everything that another part of the communicator (eager.c, gossip.c, a user's schedule) is, towards
 * comm. */
typedef struct mlfab__comm_object {
  uint32_t channel; /* 0: free */
  void *self;
  /* A frame of this channel that is not a play's: NULL where there are only plays. */
  void (*frame)(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                uint32_t bytes, uint64_t now_ns);
  void (*given_back)(void *self, uint32_t member, uint64_t cookie);
  /* A new epoch has begun (members may be others; round: the first of it), or one is over (plays of it have been told). */
  void (*begin)(void *self, uint64_t round, uint64_t now_ns);
  void (*over)(void *self, int code, uint64_t now_ns);
  /* A request of it that is open is withdrawn: by its deadline or by the caller. */
  void (*withdraw)(void *self, mlfab__request *request, int code, uint64_t now_ns);
  /* Has this worker called `number`, as far as others wait for it; and who is awaited, or MLFAB_NO_RANK. */
  int (*called)(void *self, uint64_t number, int32_t *awaited_p);
  void (*free_self)(void *self);
} mlfab__comm_object;

/* A plain collective as it is called. */
typedef struct mlfab__comm_call {
  uint8_t kind;      /* MLFAB__RING_* */
  uint8_t algorithm; /* enum mlfab_algorithm */
  uint8_t ordered, refuse_nan, outside;
  int dtype, op; /* dtype 0: bytes */
  uint32_t width;
  mlfab_reduce_fn reduce;
  void *reduce_user;
  const mlfab_vec *vecs; /* counts in elements; copied */
  uint32_t n;
  const uint64_t *counts; /* by rank, `workers` of them: reduce-scatter, allgather; else NULL */
  int32_t root;           /* rank; broadcast */
  uint64_t salt;          /* what else must be the same everywhere: hashed into the signature */
  const char *words;      /* what it is, for texts: "an allreduce" */
} mlfab__comm_call;

typedef struct mlfab__comm_slot { /* an open plain collective */
  uint8_t state;
  mlfab__comm_call call;
  mlfab_vec vecs[MLFAB__COMM_BUFS];
  uint64_t number, signature, count;
  mlfab_request request;
  int32_t missing; /* who server 0 says has not called */
  mlfab__play play;
} mlfab__comm_slot;

typedef struct mlfab__comm {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__requests *requests;
  mlfab__port up; /* peer 0 is server 0 */
  mlfab__streams streams;
  uint32_t rank;
  int dead; /* server 0 is */
  enum mlfab__comm_phase phase;
  uint32_t epoch, over_epoch; /* that stands or is listed; the newest that is over */
  uint32_t members, me;
  uint32_t ranks[MLFAB__ROLL_MEMBERS_MAX]; /* members, in their order */
  mlfab__roll_member *list;                /* what ROLL_LIST said, `members` of them */
  mlfab__roll_go go;
  uint64_t calls;  /* numbers given out in this epoch */
  uint8_t owed;    /* a verdict that no call has seen */
  uint8_t settled; /* the failure that will come was ours, and its call has returned */
  mlfab_error verdict;
  int leaving;
  uint64_t round; /* the largest partial round that is over, plus one */
  uint64_t objects_opened;
  mlfab__comm_slot *slots[MLFAB__COMM_CALLS];
  mlfab__comm_object objects[MLFAB__COMM_OBJECTS];
  mlfab__play *armed;              /* list */
  struct mlfab__comm_stage *stage; /* messages that came early */
  /* Memory for others of the host, as drive says; nonce 0: none. Whether all could map it: asked of drive
   * between LISTED and READY. */
  uint32_t arena_pid;
  int32_t arena_fd;
  uint64_t arena_nonce, arena_bytes;
  int arena_asked; /* 1: drive shall map the list and call mlfab__comm_mapped */
} mlfab__comm;

MLFAB__INTERNAL int mlfab__comm_init(mlfab__comm *comm, mlfab__env *env, const mlfab_config *config,
                                     uint32_t rank, const mlfab__port *up, const mlfab__port *hop,
                                     const mlfab__port *down, mlfab__requests *requests);
MLFAB__INTERNAL void mlfab__comm_free(mlfab__comm *comm);

/* Begins a plain collective. vecs' memory is borrowed until the request is finished. timeout_ns as everywhere
 * in roles (0: none). Errors: as of mlfab_allreduce_start before anything is sent. `outside`: only a number is
 * taken; the caller runs it when mlfab__comm_outside says so, and ends it with mlfab__comm_finish. */
MLFAB__INTERNAL int mlfab__comm_start(mlfab__comm *comm, const mlfab__comm_call *call,
                                      uint64_t timeout_ns, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error);
/* An outside call: 1 and its number and signature when its epoch stands with the arena; 0 not yet; or what
 * ended it (its request is then finished). MLFAB_ERR_UNSUPPORTED: the epoch has no arena, and it has become a
 * plain call by itself: wait for the request. */
MLFAB__INTERNAL int mlfab__comm_outside(mlfab__comm *comm, mlfab_request request,
                                        uint64_t *number_p, uint64_t *signature_p);
/* It was carried out (0), or failed with this code and culprit (a member's rank, or MLFAB_NO_RANK). */
MLFAB__INTERNAL void mlfab__comm_finish(mlfab__comm *comm, mlfab_request request, int code,
                                        int32_t rank, uint64_t now_ns);
/* Drive has mapped (1) or could not map (0) the memory of `list`. */
MLFAB__INTERNAL void mlfab__comm_mapped(mlfab__comm *comm, int ok);
/* A request of ours (plain or an object's) is withdrawn: TIMEOUT or CANCELLED. */
MLFAB__INTERNAL void mlfab__comm_withdraw(mlfab__comm *comm, mlfab__request *request, int code,
                                          uint64_t now_ns);
/* The worker takes no further part (done, or closing): tells server 0. */
MLFAB__INTERNAL void mlfab__comm_leave(mlfab__comm *comm);
/* 1 when nothing is under way that others wait for: no play runs, all messages are acknowledged. */
MLFAB__INTERNAL int mlfab__comm_quiet(const mlfab__comm *comm);

/* The link to server 0 stands (again); server 0 is dead. */
MLFAB__INTERNAL void mlfab__comm_hello(mlfab__comm *comm);
MLFAB__INTERNAL void mlfab__comm_dead(mlfab__comm *comm, uint64_t now_ns);
/* Frames of server 0 (ROLL_*): 1 when they were of this role. COLL and COLL_ACK go to the streams by these
 * (they run what has become ready). */
MLFAB__INTERNAL int mlfab__comm_server_frame(mlfab__comm *comm, const mlfab__frame_in *frame,
                                             uint64_t now_ns);
MLFAB__INTERNAL int mlfab__comm_member_frame(mlfab__comm *comm, uint32_t rank,
                                             const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__comm_hop_frame(mlfab__comm *comm, uint32_t rank,
                                          const mlfab__frame_in *frame, uint64_t now_ns);
/* Four times a heartbeat. */
MLFAB__INTERNAL void mlfab__comm_tick(mlfab__comm *comm, uint64_t now_ns);

/* --- for objects: eager.c, gossip.c, schedules --- */

/* A channel: the lowest free entry; its number counts openings, which are the same on all workers. Errors:
 * LIMIT. */
MLFAB__INTERNAL int mlfab__comm_object_add(mlfab__comm *comm, const mlfab__comm_object *object,
                                           uint32_t *channel_p);
MLFAB__INTERNAL void mlfab__comm_object_remove(mlfab__comm *comm, uint32_t channel);
MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_find(mlfab__comm *comm, uint32_t channel);
/* Arms a play: its READYs go out, its schedule starts, what came early is delivered. Its dag is sealed. In
 * phase IN only. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__comm_arm(mlfab__comm *comm, mlfab__play *play, uint64_t now_ns);
/* Takes a play back without telling anybody: nothing of it is borrowed on return. */
MLFAB__INTERNAL void mlfab__comm_disarm(mlfab__comm *comm, mlfab__play *play);
/* Triggers an operation of an armed play. */
MLFAB__INTERNAL void mlfab__comm_trigger(mlfab__comm *comm, mlfab__play *play, uint32_t op,
                                         uint64_t now_ns);
/* Ends the epoch for all: posted to server 0. rank: to blame. */
MLFAB__INTERNAL void mlfab__comm_fail(mlfab__comm *comm, int code, int32_t rank, const char *text);
/* A verdict that nobody has seen: 1, and the call that asked returns it. */
MLFAB__INTERNAL int mlfab__comm_owed(mlfab__comm *comm, mlfab_error *error);
/* A request of an object ends with the verdict. */
MLFAB__INTERNAL void mlfab__comm_end_request(mlfab__comm *comm, mlfab_request request,
                                             uint64_t now_ns);

#endif
