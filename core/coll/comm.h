/* comm.h - the communicator: a worker's collectives, their epochs, their execution. Layer 4.
 *
 * Server 0 keeps the membership of those who take part (membership.h). A worker:
 *
 *    OUT --first call: MEMBERSHIP--> ASKED --MEMBERSHIP_LIST--> LISTED (READY) --MEMBERSHIP_GO--> IN
 *                                ^                     |                         |
 *                                |                     +--- a failure here ------+--> FAILED
 *                                +------- MEMBERSHIP again, by itself <------- MEMBERSHIP_OVER, from any
 *
 * A failure here (deadline, cancel, NaN refused, out of memory, a peer that cannot be reached
 * for 8 heartbeats) ends all open calls of this worker at once, with one error: their memory is
 * free then. It is told to server 0 (MEMBERSHIP_FAIL, when there is no epoch as soon as one is
 * listed), which ends the epoch for all (MEMBERSHIP_OVER); that fails nothing more here. A failure
 * that finds no call open is kept for the next one (`owed`; of several the last). Calls begun
 * while no epoch stands wait for it, with numbers of the epoch to come.
 *
 * An epoch that cannot begin here, for want of memory for the streams or for an object, fails like
 * any other. This worker then says MEMBERSHIP at the next tick and not at once (`later`); alone, it forms
 * the next epoch then. So each attempt ends the calls that wait, and attempts are bounded by time.
 *
 * A run is a task graph (dag.h) being executed: of a plain collective (channel 0, its number), of
 * a round of an object (channel, round). Operations:
 *    SEND      one message, when the peer may have it: at once if the run is eager, else when its
 *              READY came. Done when it is queued and copied, or (borrowed) queued.
 *    RECV      done when all its bytes are in place. What comes for it before it may run is
 *              staged in memory of the message's length.
 *    RECV_REDUCE  likewise, added as the bytes come.
 *    Where several peers send what one element's sum is made of (up a tree), their messages are paced:
 *              READY carries a credit in its tag, and paced SENDs of lower tags may go. A peer may be
 *              `window` messages ahead of what all of them have had added. Windows of all runs share
 *              MLFAB__COMM_WINDOWS bytes, the oldest run first; that one always has a window of 1, also
 *              beyond the bytes. The oldest call that is open anywhere is the oldest at every member
 *              that has it, so it goes on, and no window that is held by others can stop it.
 *    COMPUTE   the run's function.
 * A run is over when its task graph is finished and nothing borrowed is out: then the caller has
 * its buffers again.
 *
 * Invariants. (1) Plain calls are numbered in the order of calls, from 0 in each epoch;
 * (channel, number) means the same run on all workers, and its signature (kind, sizes, types,
 * options) is in every message: one that differs from ours is a failure with MISMATCH, found by
 * server 0, which asks everybody. (2) A message is accepted once, for its RECV only, with the
 * length that the RECV says. (3) Every failure is seen once by every worker: its open calls and
 * steps fail with it, or the next. (4) Nothing of an epoch that is over touches a caller's
 * memory. (5) Plays of one epoch are bounded: MLFAB__COMM_CALLS plain ones, 2 an object; staged
 * bytes by MLFAB__STREAM_CREDIT a peer, by the windows, and the lengths of RECVs that are not paced. (6) A call ends: by finishing,
 * by a verdict, by its deadline, or by the death of server 0.
 *
 * An allreduce of more than eager_bytes, in a fabric with a scheduler, or of MLFAB_ALGORITHM_PLANNED,
 * goes by a tree that the scheduler plans (trees.h): when its turn has come the worker asks server 0 for
 * the tree, and the run begins with the answer. Matching, failures and verdicts are the same. With an
 * empty answer all members take what AUTO chooses.
 *
 * A worker that has finished (mlfab__comm_finish_work) stays in the epoch for the calls that others have begun: each
 * is described to it, and it takes part with the operation's identity (`owed` slots, without a request).
 * Calls from the limit on wait for the next epoch.
 *
 * A call that runs in shared memory (shm_coll.h) takes a number here like any other (`outside`), so
 * that matching, deadlines and verdicts are the same; its bytes pass elsewhere.
 *
 * Source: eagerSGD §4 (task graphs). Departs: sends are matched by the number of the round, not by
 * persistent connections; failures. */
#ifndef MLFAB__COMM_H
#define MLFAB__COMM_H

#include "../kernels/kernels.h"
#include "dag.h"
#include "algorithm.h"
#include "../base/request.h"
#include "stream.h"

enum {
  MLFAB__COMM_CALLS = 1024,     /* plain collectives that are open; a power of 2 */
  MLFAB__COMM_OBJECTS = 16,     /* partial, stochastic, task graphs */
  MLFAB__COMM_EAGER = 64 << 10, /* a call of up to so many bytes is sent without READY */
  /* A root may be ahead of those who only receive: every so many calls it waits for them, and by
   * so many others may be ahead of the first that is open. */
  MLFAB__COMM_AHEAD = 32,
  MLFAB__COMM_SEGMENT = 256 << 10, /* most bytes of a message of a plain collective */
  MLFAB__COMM_SPACES = 4,
  MLFAB__COMM_BUFS = 4096,  /* of a list */
  MLFAB__COMM_PATIENCE = 8, /* heartbeats without a link */
  MLFAB__COMM_PAST = 128,   /* calls that are over, and of which the signature is known */
  MLFAB__COMM_BUCKETS = 64,
  MLFAB__COMM_GATHER = 32 << 10, /* small stretches of one message are joined up to this */
  MLFAB__COMM_POOL = 8 << 20,    /* bytes of free blocks that are kept */
  MLFAB__COMM_WINDOW = 4,        /* most messages that a paced peer is ahead of the last one */
  MLFAB__COMM_WINDOWS = 4 << 20  /* bytes that the windows of all runs may have staged */
};

/* dag_op.reduce for an operation of its own: 16 * (element type) + operation + 1. Type 0 is the
 * run's, or I64 for MLFAB__OP_OR. */
#define MLFAB__COMM_REDUCE(dtype, op) ((uint8_t)(16 * (dtype) + (op) + 1))
/* How the tree of a call is asked for: calls of later epochs have larger numbers. */
#define MLFAB__COMM_TREE(epoch, number) ((uint64_t)(epoch) << 40 | (number))
/* request.slot of an object's requests; below it are those of plain calls. */
#define MLFAB__COMM_REQUEST(id) (MLFAB__COMM_CALLS + (id))
/* Cookies of what an object sends by the streams itself: 32 bits are its own. */
#define MLFAB__COMM_COOKIE(id, own) (((uint64_t)(id) << 33) | ((uint64_t)(own) << 1) | 1)

/* FAILED: a failure of ours was told to server 0, whose verdict is still to come. */
enum mlfab__comm_phase {
  MLFAB__COMM_OUT,
  MLFAB__COMM_ASKED,
  MLFAB__COMM_LISTED,
  MLFAB__COMM_IN,
  MLFAB__COMM_FAILED
};

struct mlfab__comm;

/* Memory that a task graph works on: a list of stretches taken as one. */
typedef struct mlfab__comm_space {
  mlfab_vec *vecs; /* count in bytes here */
  uint32_t n;
} mlfab__comm_space;

/* An operation of a run. RECVs: what has come. SENDs: the next that waits for the same READY. */
typedef struct mlfab__comm_recv {
  uint64_t got, from; /* bytes; the first that is staged */
  uint8_t *stage;     /* as long as the message; NULL: its bytes went to their place */
  uint32_t next;      /* plus one; 0: none */
  uint8_t whole, eager;
} mlfab__comm_recv;

typedef struct mlfab__comm_peer { /* a member, to a run */
  uint8_t ready, told;            /* its READY came; ours went out */
  uint8_t paced;                  /* it sends messages that are paced */
  uint32_t credit, given; /* paced SENDs below this tag may go: to it; to us, as last told */
  uint32_t added;         /* paced messages of it that are in the sum */
  uint32_t first, last;   /* SENDs that wait for it, plus one; 0: none */
} mlfab__comm_peer;

typedef struct mlfab__engine_run {
  /* Filled by whoever arms it, and left alone until it is over. */
  uint32_t channel;
  uint64_t number, signature;
  uint8_t eager;
  int dtype, op;
  uint32_t width;
  mlfab_reduce_fn reduce; /* instead of op */
  void *reduce_user;
  mlfab__comm_space spaces[MLFAB__COMM_SPACES];
  /* COMPUTE: 0, or a code that ends the epoch. NULL: only MLFAB__COLLECTIVE_DIVIDE occurs, which comm
   * does. */
  int (*compute)(void *self, struct mlfab__engine_run *run, const mlfab__dag_op *op);
  /* It is over: status 0, or the verdict that ended it (told once; the run is then not armed any
   * more). With 0 it may arm another, and this one again. */
  void (*over)(void *self, struct mlfab__engine_run *run, int status, uint64_t now_ns);
  void *self;
  mlfab__dag dag; /* sealed; comm starts it */
  /* comm's own. */
  uint8_t armed;
  uint8_t running;         /* not finished: its operations run, its messages are taken */
  uint8_t busy;            /* its operations are being run */
  uint8_t moved;           /* it has sent or got something */
  uint32_t lent;           /* parts of messages that are borrowed */
  uint32_t paced, behind;  /* peers that are paced; of them, those with `step` messages added */
  uint32_t step, window;   /* what all of them have had added; messages that one may be ahead */
  uint64_t step_bytes;     /* what a window of 1 may have staged */
  uint32_t staged;         /* RECVs that have a stage */
  mlfab__comm_recv *recvs; /* by operation */
  mlfab__comm_peer *peers; /* by member */
  struct mlfab__engine_run *next; /* of the armed ones */
} mlfab__engine_run;

/* Everything that another part of the communicator (partial_run.c, stochastic.c, a user's task graph) is,
 * towards comm. It has a number of this worker's own from the beginning, and one that is the same
 * for all, its channel, from when the plain call that opens it (comm_call.opens) begins: so many
 * openings have then begun, here as elsewhere, and server 0 levels the count with every epoch. */
typedef struct mlfab__comm_object {
  uint32_t id;        /* comm's own; 0: free */
  uint32_t channel;   /* likewise; 0: not yet */
  const char *what;   /* "a partial reduction", and ... */
  const char *counts; /* ... what it counts: "round"; static, for texts */
  uint8_t ahead; /* runs are armed before anybody calls them: a READY does not tell that, nor what
                       run 0 sends, which is armed by begin */
  void *self;
  /* A frame of this channel that is not an armed run's, which consumes it
   * (mlfab__stream_consumed): NULL where there are only runs, of which what comes early is
   * kept. */
  void (*frame)(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                uint32_t bytes, uint64_t now_ns);
  void (*given_back)(void *self, uint32_t member, uint64_t cookie);
  /* A new epoch has begun (members may be others; round: the first of it), or its opening, in one
   * that stands; or an epoch is over (runs of it have been told). */
  void (*begin)(void *self, uint64_t round, uint64_t now_ns);
  void (*over)(void *self, int code, uint64_t now_ns);
  /* May plain calls that are its own (comm_call.of) begin? It may fill their buffers then. Whoever has
   * said no calls mlfab__comm_go_on later. NULL: always. */
  int (*stands)(void *self);
  /* Whom its open request waits for (a rank, or MLFAB_NO_RANK), and why; and its number. What server 0
   * says is known: mlfab__comm_missing. */
  int32_t (*awaited)(void *self, uint64_t *number_p, const char **why_p);
  /* Has this worker called `number`, as far as others wait for it? */
  int (*called)(void *self, uint64_t number);
  void (*free_self)(void *self);
  uint64_t waits_for; /* without runs: which number its open request is; the object keeps it */
  /* comm's own. */
  uint64_t upto;     /* above the numbers of all runs that were armed in this epoch */
  uint64_t stuck_ns; /* when it was last said that a request is open for long */
  int32_t missing;   /* who server 0 says has not called */
} mlfab__comm_object;

/* A plain collective as it is called. */
typedef struct mlfab__comm_call {
  uint8_t kind;      /* MLFAB__COLLECTIVE_* */
  uint8_t algorithm; /* enum mlfab_algorithm */
  uint8_t ordered, refuse_nan, outside;
  int dtype, op; /* dtype 0: bytes */
  uint32_t width;
  mlfab_reduce_fn reduce;
  void *reduce_user;
  const mlfab_vec *vecs; /* counts in elements; copied */
  uint32_t n;
  const uint64_t *counts;    /* by rank, `workers` of them: reduce-scatter, allgather; else NULL */
  int32_t root;              /* rank; broadcast */
  uint64_t tag;              /* the user's, or 0 */
  const void *const *inputs; /* copied into vecs when it begins; NULL: in place */
  uint64_t salt;             /* what else must be the same everywhere: hashed into the signature */
  uint32_t opens;            /* the object that it opens, or 0 */
  uint32_t of;               /* the object that it belongs to, or 0: begins when that stands */
  const char *words;         /* what it is, for texts: "an allreduce"; static */
} mlfab__comm_call;

/* A call as it is told of. */
typedef struct mlfab__comm_past {
  uint64_t signature, count, tag;
  const char *words;
  int dtype, op;
  uint32_t width;
  int32_t root;
  uint8_t kind, user; /* user: a reducer of the user's */
  uint8_t algorithm, opens;
  uint64_t *counts; /* by rank; memory of the ring's, where the call has none */
  uint8_t has_counts;
} mlfab__comm_past;

enum {
  MLFAB__SLOT_FREE,
  MLFAB__SLOT_WAITING,  /* for the epoch, for its turn: those from comm.begun on */
  MLFAB__SLOT_PLANNING, /* for its tree (trees.h); what follows may begin */
  MLFAB__SLOT_PLAIN,    /* a run */
  MLFAB__SLOT_OUTSIDE
};

typedef struct mlfab__comm_slot { /* an open plain collective */
  struct mlfab__comm *comm;
  struct mlfab__comm_slot *next; /* spare */
  uint8_t state;
  uint8_t wanted; /* OUTSIDE: others call it as a plain one */
  uint8_t owed;   /* nobody has called it: this worker has finished, and gives the identity */
  mlfab__comm_call call;
  mlfab_vec one, *vecs; /* in bytes; vecs: &one, or a block of call.n while it is open */
  uint64_t *counts;     /* a copy, by rank */
  mlfab_vec *blocks;    /* the members' blocks in their order; while it is armed */
  uint32_t blocks_room;
  uint64_t serial, signature, count;
  mlfab_request request;
  uint64_t stuck_ns;
  int32_t missing; /* who server 0 says has not called */
  mlfab__engine_run run;
} mlfab__comm_slot;

/* A frame of a run that is not armed yet; its bytes follow. */
typedef struct mlfab__comm_stage {
  struct mlfab__comm_stage *next;
  mlfab__coll head;
  uint32_t member, bytes;
} mlfab__comm_stage;

/* An object that this worker has closed. */
typedef struct mlfab__comm_closed {
  uint32_t channel;
  uint8_t ahead;
  uint64_t upto;
} mlfab__comm_closed;

/* Memory that was lent when its object was closed: links may read it until they have been told. */
typedef struct mlfab__comm_grave {
  struct mlfab__comm_grave *next;
  void (*free_self)(void *self);
  void *self;
} mlfab__comm_grave;

typedef struct mlfab__comm {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__requests *requests;
  mlfab__port up; /* peer 0 is server 0 */
  mlfab__streams streams;
  uint32_t rank;
  int dead; /* server 0 is */
  enum mlfab__comm_phase phase;
  uint32_t epoch, over_epoch; /* that stands, is listed, or failed; the newest that is over */
  uint32_t members, me;
  uint32_t ranks[MLFAB__MEMBERSHIP_MEMBERS_MAX]; /* members, in their order */
  mlfab__membership_member *list;                /* what MEMBERSHIP_LIST said, `members` of them */
  mlfab__membership_go go;
  int ready;       /* READY was said */
  uint64_t in_ns;  /* since when it stands */
  int32_t missing; /* whom the epoch to come waits for, says server 0 */
  uint32_t left;   /* how many members have left; the first call that one of them has not called */
  uint64_t left_calls, left_ns;
  int32_t left_rank;
  uint8_t owed;    /* a verdict that no call has seen */
  uint8_t failing; /* a failure is to be acted on, when no frame or call is being worked on */
  uint8_t untold;  /* a failure is to be told when an epoch is listed */
  uint8_t later;   /* the last epoch could not begin here: takes part again at the next tick */
  uint8_t ending, beginning; /* calls, now */
  uint32_t depth;            /* frames and calls that are being worked on, one within the other */
  void (*act)(struct mlfab__comm *comm); /* a failure takes effect */
  uint64_t now_ns;
  mlfab_error verdict;
  mlfab__membership_over fail; /* what server 0 is told */
  int leaving;
  uint64_t round;          /* the largest partial round that is over, plus one */
  uint64_t objects_opened; /* the last channel given out, here or elsewhere */
  uint32_t objects_added;  /* the last id */
  /* Calls have serials that go on for ever; a call's number is its serial in the epoch, from `base` on. All
   * below `first` are over, all below `begun` have begun; `end` is the next one. */
  uint64_t base, first, begun, end;
  /* A worker has finished (membership.h): how many calls each member has called before it did, UINT64_MAX for
   * others, by member (NULL: nobody has); the calls of this epoch; no more begin until that is told; the
   * server was told that they are over here; this worker has finished. */
  uint64_t *finished;
  uint64_t limit;
  uint8_t frozen, finishing;
  uint32_t moved;           /* the epoch of which that was said */
  mlfab__comm_slot **slots; /* MLFAB__COMM_CALLS, by serial; NULL before the first call */
  mlfab__comm_slot *spare;  /* list */
  mlfab__comm_object objects[MLFAB__COMM_OBJECTS];
  mlfab__comm_closed closed[MLFAB__COMM_OBJECTS];
  uint32_t closed_next;
  mlfab__comm_grave *graves;
  mlfab__comm_past past[MLFAB__COMM_PAST]; /* by serial */
  mlfab__engine_run *armed;                /* list */
  /* Messages that came early, by channel and number; the last of each list. */
  mlfab__comm_stage *stages[MLFAB__COMM_BUCKETS], *stage_ends[MLFAB__COMM_BUCKETS];
  uint32_t stage_count;
  uint64_t window_bytes; /* what all windows may have staged */
  uint8_t *gather;       /* small stretches on their way out as one */
  mlfab__pool pool;      /* blocks of runs and calls */
  uint64_t collectives, collectives_failed, epochs, rounds; /* counters; rounds: partial ones */
  /* Memory for others of the host, as drive says; nonce 0: none. Whether all could map it: asked
   * of drive between LISTED and READY. What else MEMBERSHIP says: the host, and its link's bytes a
   * second. */
  uint32_t arena_pid;
  int32_t arena_fd;
  uint64_t arena_nonce, arena_bytes;
  int arena_asked; /* 1: drive shall map the list and call mlfab__comm_mapped */
  uint64_t host;
  double link_in, link_out;
} mlfab__comm;

MLFAB__INTERNAL int mlfab__comm_init(mlfab__comm *comm, mlfab__env *env, const mlfab_config *config,
                                     uint32_t rank, const mlfab__port *up, const mlfab__port *links,
                                     const mlfab__port *down, mlfab__requests *requests);
MLFAB__INTERNAL void mlfab__comm_free(mlfab__comm *comm);
/* Adds the row of a communicator, *comm_p, which is the node's (comm_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__comm_attach(struct mlfab_node *node, mlfab__comm **comm_p);

/* Begins a plain collective. vecs' memory is borrowed until the request is finished. timeout_ns
 * as everywhere in roles (0: none). Errors: as of mlfab_allreduce_start before anything is sent.
 * `outside`: only a number is taken; the caller runs it when mlfab__comm_outside says so, and
 * ends it with mlfab__comm_finish. */
MLFAB__INTERNAL int mlfab__comm_start(mlfab__comm *comm, const mlfab__comm_call *call,
                                      uint64_t timeout_ns, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error);
/* An object stands: calls that wait for it begin. */
MLFAB__INTERNAL void mlfab__comm_go_on(mlfab__comm *comm);
/* An outside call: 1 and its number and signature when its epoch stands with the arena; 0 not
 * yet; or what ended it (its request is then finished). MLFAB_ERR_UNSUPPORTED: the epoch has no
 * arena, or another worker calls this one as a plain call: it has become one by itself, wait for
 * the request. After UNSUPPORTED the rest of the epoch goes without the arena. Not to be asked
 * while it runs. */
MLFAB__INTERNAL int mlfab__comm_outside(mlfab__comm *comm, mlfab_request request,
                                        uint64_t *number_p, uint64_t *signature_p);
/* The same while it runs: 0, or what ends the waiting in the arena. Of the call nothing changes:
 * its memory is the arena's until that has been left, and comm_outside is asked again. */
MLFAB__INTERNAL int mlfab__comm_outside_over(mlfab__comm *comm, mlfab_request request);
/* It was carried out (0), or failed with this code and culprit (a member's rank, or
 * MLFAB_NO_RANK). MISMATCH, which all members get alike, only asks server 0 to compare the calls: its
 * verdict ends the call. */
MLFAB__INTERNAL void mlfab__comm_finish(mlfab__comm *comm, mlfab_request request, int code,
                                        int32_t rank, uint64_t now_ns);
/* Drive has mapped (1) or could not map (0) the memory of `list`. */
MLFAB__INTERNAL void mlfab__comm_mapped(mlfab__comm *comm, int ok);
/* A request of ours (plain or an object's) is withdrawn: TIMEOUT or CANCELLED. */
MLFAB__INTERNAL void mlfab__comm_withdraw(mlfab__comm *comm, mlfab__request *request, int code,
                                          uint64_t now_ns);
/* The worker has no more data: others go on without it, after the calls that they have begun (membership.h). */
MLFAB__INTERNAL void mlfab__comm_finish_work(mlfab__comm *comm);
/* The ranks that take part in this worker's next call, as far as known: how many; `ranks` has room for
 * `room`. */
MLFAB__INTERNAL uint32_t mlfab__comm_present(const mlfab__comm *comm, uint32_t *ranks,
                                             uint32_t room);
/* 1 when nobody waits for this worker any more, which has finished. */
MLFAB__INTERNAL int mlfab__comm_finish_over(const mlfab__comm *comm);
/* By how many workers' data a mean of this plain call is divided. */
MLFAB__INTERNAL uint32_t mlfab__comm_givers(const mlfab__comm *comm, uint64_t number);
/* The worker closes without having finished: tells server 0. */
MLFAB__INTERNAL void mlfab__comm_leave(mlfab__comm *comm);
/* 1 when nothing is under way that others wait for: no run runs, all messages are acknowledged. */
MLFAB__INTERNAL int mlfab__comm_quiet(const mlfab__comm *comm);

/* The link to server 0 stands (again); server 0 is dead. */
MLFAB__INTERNAL void mlfab__comm_hello(mlfab__comm *comm);
MLFAB__INTERNAL void mlfab__comm_dead(mlfab__comm *comm, uint64_t now_ns);
/* Frames of server 0 (ROLL_*): 1 when they were of this role. COLL and COLL_ACK go to the
 * streams by these (they run what has become ready). */
MLFAB__INTERNAL int mlfab__comm_server_frame(mlfab__comm *comm, const mlfab__frame_in *frame,
                                             uint64_t now_ns);
MLFAB__INTERNAL int mlfab__comm_member_frame(mlfab__comm *comm, uint32_t rank,
                                             const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__comm_peer_frame(mlfab__comm *comm, uint32_t rank,
                                           const mlfab__frame_in *frame, uint64_t now_ns);
/* There is no link of ours to this worker: 1 when one is wanted. After 8 heartbeats that is a
 * failure. Only asked while there is none. Up and lost links are told to the streams. */
MLFAB__INTERNAL int mlfab__comm_peer_missing(mlfab__comm *comm, uint32_t rank, uint64_t now_ns);
/* Does it have anything that mlfab__comm_tick looks after? */
MLFAB__INTERNAL int mlfab__comm_waits(const mlfab__comm *comm);
/* Four times a heartbeat, while it has. */
MLFAB__INTERNAL void mlfab__comm_tick(mlfab__comm *comm, uint64_t now_ns);
/* All actions have been carried out: nothing is lent any more but what is open. */
MLFAB__INTERNAL void mlfab__comm_sweep(mlfab__comm *comm);

/* --- for objects: partial_run.c, stochastic.c, task graphs --- */

/* Where a copy of it lives until it is removed, or NULL: there are MLFAB__COMM_OBJECTS. Takes no part in
 * anything before the call that opens it (comm_call.opens). */
MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_add(mlfab__comm *comm,
                                                           const mlfab__comm_object *object);
/* Adds a copy of *object, and begins the call that opens it for all workers, or for nobody: all must call it, with the
 * same salt. Errors: LIMIT (MLFAB__COMM_OBJECTS are open), and of mlfab__comm_start; *object_p is
 * then NULL, and the object is still the caller's. `opening`: that call in words, static. */
MLFAB__INTERNAL int mlfab__comm_object_open(mlfab__comm *comm, const mlfab__comm_object *object,
                                            const char *opening, uint64_t salt, uint64_t timeout_ns,
                                            uint64_t now_ns, mlfab__comm_object **object_p,
                                            mlfab_request *request_p, mlfab_error *error);
/* A request of an object. Errors: AGAIN. */
MLFAB__INTERNAL int mlfab__comm_object_request(mlfab__comm *comm, const mlfab__comm_object *object,
                                               uint64_t timeout_ns, uint64_t now_ns,
                                               mlfab_request *request_p, mlfab_error *error);
/* What the object with this number is to itself, when it is of this kind, or NULL. */
MLFAB__INTERNAL void *mlfab__comm_object_self(mlfab__comm *comm, uint32_t id,
                                              void (*kind)(void *self));
/* Closes it here. Where a round of it has begun elsewhere, or begins later, that is a failure
 * (PEER_CLOSED). */
MLFAB__INTERNAL void mlfab__comm_object_remove(mlfab__comm *comm, mlfab__comm_object *object);
/* Has free_self called as soon as no link can hold memory of it any more. */
MLFAB__INTERNAL void mlfab__comm_bury(mlfab__comm *comm, mlfab__comm_grave *grave);
/* NULL: there is none. */
MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_find(mlfab__comm *comm, uint32_t id);
MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_channel_find(mlfab__comm *comm, uint32_t channel);
/* Arms a run: its READYs go out, its task graph starts, what came early is delivered. Its dag is
 * sealed. In phase IN only. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__comm_arm(mlfab__comm *comm, mlfab__engine_run *run, uint64_t now_ns);
/* Takes a run back without telling anybody: nothing of it is borrowed on return. Where others
 * are still to get bytes of it, that is a failure (CANCELLED). */
MLFAB__INTERNAL void mlfab__comm_disarm(mlfab__comm *comm, mlfab__engine_run *run);
/* Triggers an operation of an armed run. */
MLFAB__INTERNAL void mlfab__comm_trigger(mlfab__comm *comm, mlfab__engine_run *run, uint32_t op,
                                         uint64_t now_ns);
/* Ends the epoch for all, with this code, rank to blame and text. Within calls of comm it takes
 * effect at their end. */
MLFAB__INTERNAL void mlfab__comm_fail(mlfab__comm *comm, int code, int32_t rank, const char *text);
MLFAB__INTERNAL void mlfab__comm_fail_memory(mlfab__comm *comm); /* this worker has none left */
/* A verdict that nobody has seen: 1, and the call that asked returns it. */
MLFAB__INTERNAL int mlfab__comm_owed(mlfab__comm *comm, mlfab_error *error);
/* What calls have in common; `what` in words. Errors: PEER_DEAD (server 0), STATE (it leaves), LIMIT (too
 * many workers); of elements ARGUMENT (none) and LIMIT (model_max_bytes); of data ARGUMENT. */
MLFAB__INTERNAL int mlfab__comm_check_state(const mlfab__comm *comm, const char *what,
                                            mlfab_error *error);
MLFAB__INTERNAL int mlfab__comm_check_count(const mlfab__comm *comm, const char *what,
                                            uint64_t count, uint32_t width, mlfab_error *error);
MLFAB__INTERNAL int mlfab__comm_check_data(const char *what, const void *data, uint32_t width,
                                           mlfab_error *error);
/* That this worker's data is not finite, which fails its call alone. */
MLFAB__INTERNAL int mlfab__comm_not_finite(const mlfab__comm *comm, const char *what,
                                           mlfab_error *error);
/* Who server 0 says has not called what this object waits for, or MLFAB_NO_RANK. */
MLFAB__INTERNAL int32_t mlfab__comm_missing(const mlfab__comm *comm,
                                            const mlfab__comm_object *object);
/* A request of an object ends with the verdict. */
MLFAB__INTERNAL void mlfab__comm_end_request(mlfab__comm *comm, mlfab_request request,
                                             uint64_t now_ns);

/* --- between comm.c and engine.c --- */

/* Around whatever may end the epoch. now_ns 0: as before. */
MLFAB__INTERNAL void mlfab__comm_enter(mlfab__comm *comm, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__comm_exit(mlfab__comm *comm);
/* Says that this call seems to be stuck. */
MLFAB__INTERNAL void mlfab__comm_stuck(mlfab__comm *comm, uint32_t channel, uint64_t number);
MLFAB__INTERNAL void mlfab__comm_set_verdict(mlfab__comm *comm, int code, int32_t rank,
                                             int is_server, const char *text);
/* Where the slot of a call stands; the open call of this number, or NULL. */
MLFAB__INTERNAL mlfab__comm_slot **mlfab__comm_place(const mlfab__comm *comm, uint64_t serial);
MLFAB__INTERNAL mlfab__comm_slot *mlfab__comm_slot_of(const mlfab__comm *comm, uint64_t number);
/* Does this member bring its own data to the plain call? */
MLFAB__INTERNAL int mlfab__comm_gives(const mlfab__comm *comm, uint32_t member, uint64_t number);
/* A frame of a plain call that is not armed: 1 when it is to be kept. */
MLFAB__INTERNAL int mlfab__comm_awaits(mlfab__comm *comm, uint64_t number);
/* As mlfab__stream_user has them. */
MLFAB__INTERNAL void mlfab__engine_deliver(void *self, uint32_t member, const mlfab__coll *head,
                                           const void *bulk, uint32_t bytes);
MLFAB__INTERNAL void mlfab__engine_given_back(void *self, uint32_t member, uint64_t cookie);
/* The epoch is over, and the streams' memory is free: ends all runs with this code, and forgets
 * what came early. */
MLFAB__INTERNAL void mlfab__engine_end_all(mlfab__comm *comm, int code);
/* Disarms the runs of an object that is closed; a failure where others have begun what needs
 * it. */
MLFAB__INTERNAL void mlfab__engine_close(mlfab__comm *comm, const mlfab__comm_object *object);
/* 1 when there are frames of this plain call, which came early. */
MLFAB__INTERNAL int mlfab__engine_came(const mlfab__comm *comm, uint64_t number);
/* From whom a message is awaited, or that it takes one: a rank, or MLFAB_NO_RANK. */
MLFAB__INTERNAL int32_t mlfab__engine_awaits(const mlfab__comm *comm, const mlfab__engine_run *run);

#endif
