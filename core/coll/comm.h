/* comm.h - the communicator: a worker's collectives and their epochs. The API's calls and comm_role.c use it.
 *
 * Server 0 keeps the membership of the workers that take part (membership.h). Collectives belong to an epoch, which has
 * fixed members. A failure ends the epoch for all members, and with it all open calls.
 *
 *    OUT --first call: MEMBERSHIP--> ASKED --MEMBERSHIP_LIST--> LISTED --memory of the host mapped: READY--> READY
 *     ^                                ^                                      |
 *     |                                +-- MEMBERSHIP again, by itself --+    +--MEMBERSHIP_GO--> IN
 *     +--------- MEMBERSHIP_OVER, from any phase ------------------------+
 *
 *    what happens          OUT              ASKED            LISTED, READY, IN     FAILED
 *    a failure here        ASKED, untold    ASKED, untold    FAILED                FAILED, untold
 *    MEMBERSHIP_LIST       -                LISTED; FAILED   LISTED when all       FAILED: told for
 *                                           when untold      calls are over        the new epoch
 *    MEMBERSHIP_OVER       -                calls end;       calls end; OUT        OUT (they have
 *                                           OUT                                    ended before)
 *    server 0 is dead      all calls end; OUT for good
 *
 * From OUT a worker asks again at once, except if it leaves, has finished and nobody waits here, or could not begin the
 * last epoch: then at the next tick (`later`). So each attempt ends the waiting calls; the ticks bound attempts.
 *
 * A failure here (deadline, cancel, NaN refused, out of memory, a peer out of reach for 8 heartbeats) takes effect at
 * the end of the outermost frame or call (`depth`): then mlfab__comm_exit settles. All open calls of this worker end
 * with one error, and their memory is free. The worker tells server 0 (MEMBERSHIP_FAIL), at once or, if no epoch is
 * listed (`untold`), as soon as one is. Server 0 ends the epoch for all (MEMBERSHIP_OVER), which has no further effect
 * here. A failure without an open call is kept for the next call (`owed`; the last one, if there are several).
 *
 * A finished worker (mlfab__comm_finish_work) stays in the epoch for the calls that others have begun. Server 0
 * describes each to it, and it takes part with the operation's identity (slots that are `owed`, without a request).
 * Calls from the limit on wait for the next epoch.
 *
 * Files, each using only the earlier ones: comm_base (failures, reports to server 0), engine (runs), plain_check and
 * plain (plain collectives), comm_object (objects), comm_finish (workers that finish), epoch (phases), comm (frames,
 * time). A file asks a later file for work by `due`.
 *
 * Invariants. (1) Every worker sees each failure once: its open calls and rounds fail with it, or its next call does.
 * (2) After the end of an epoch nothing of it touches a caller's memory. (3) Limits of an
 * epoch: MLFAB__COMM_CALLS plain runs, and 2 for each object. Limits of staged bytes: MLFAB__STREAM_CREDIT for each
 * peer, the windows (engine.h), and lengths of unpaced RECVs. (4) Between events depth, failing and due are zero. */
#ifndef MLFAB__COMM_H
#define MLFAB__COMM_H

#include "../kernels/kernels_combine.h"
#include "barrier.h"
#include "comm_object.h"
#include "plain.h"
#include "stream.h"

enum {
  MLFAB__COMM_PATIENCE = 8,  /* heartbeats without a link until a failure */
  MLFAB__COMM_POOL = 8 << 20 /* limit of the free blocks that are kept, bytes */
};

/* request.slot of an object's requests; below it are those of plain calls. */
#define MLFAB__COMM_REQUEST(id) (MLFAB__COMM_CALLS + (id))

enum mlfab__comm_phase {
  MLFAB__COMM_OUT,
  MLFAB__COMM_ASKED, /* MEMBERSHIP was sent */
  MLFAB__COMM_LISTED, /* the members are known; the context is to map their memory (mlfab__comm_mapped) */
  MLFAB__COMM_READY,  /* READY was sent */
  MLFAB__COMM_IN,     /* the epoch stands */
  MLFAB__COMM_FAILED, /* server 0 was told of a failure; its verdict is still to come */
  MLFAB__COMM_ENDING  /* open calls and objects are being told of the end */
};

/* Work for the time when no frame or call is being handled. */
enum { MLFAB__COMM_BEGIN = 1, MLFAB__COMM_JOIN = 2 };

typedef struct mlfab__comm {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__requests *requests;
  mlfab__port up; /* port; peer 0 is server 0 */
  mlfab__streams streams;
  mlfab__engine engine;
  mlfab__pool pool; /* blocks of runs and calls */
  uint32_t rank;
  uint32_t founders; /* lower ranks belong to the first workers */
  /* Epochs. */
  enum mlfab__comm_phase phase;
  uint32_t epoch, over_epoch; /* of the standing, listed or failed epoch; newest that is over */
  uint32_t members, me;
  uint32_t ranks[MLFAB__MEMBERSHIP_MEMBERS_MAX]; /* members, in their order */
  mlfab__membership_member *list;                /* from MEMBERSHIP_LIST, `members` of them */
  mlfab__membership_go go;
  uint64_t in_ns;               /* start of the epoch */
  int32_t missing;              /* rank for which the next epoch waits, says server 0 */
  char others[MLFAB__TEXT_MAX]; /* for a joiner: the different call of that rank, in words */
  /* left 1: members have left; the first call that one of them has not called. */
  uint64_t left_calls, left_ns;
  uint32_t left;
  int32_t left_rank;
  /* Failures. */
  uint32_t depth;  /* nesting depth of the frames and calls being handled */
  uint8_t failing; /* a failure takes effect when depth is 0 */
  uint8_t due;     /* MLFAB__COMM_BEGIN, MLFAB__COMM_JOIN: likewise */
  uint8_t owed;    /* a verdict that no call has returned yet */
  uint8_t untold;  /* a failure waits for the next listed epoch, to be reported */
  uint8_t
      list_lost; /* memory for a list of members was missing: asks for it again at the next tick */
  uint8_t later; /* the last epoch could not begin here: takes part again at the next tick */
  uint8_t dead;  /* server 0 is dead */
  uint8_t leaving;
  uint8_t missing_waits; /* the rank `missing` waits in a barrier */
  uint8_t
      newcomer; /* it came to an existing fabric, and has been in no epoch: others know none of its calls */
  /* Newcomers (membership.h): state of this node, or NULL. This epoch has newcomers; READY was sent; this worker stands
   * apart; it knows the progress from which it counts. */
  mlfab__counting counting;
  mlfab__barrier_worker *barrier; /* of this worker */
  uint8_t meets, said, apart, told;
  mlfab__membership_ready met;              /* the progress that it was told */
  uint64_t asked_for;                       /* for a newcomer: the signature in its request */
  void (*settle)(struct mlfab__comm *comm); /* does the work in failing and due */
  uint64_t now_ns;
  mlfab_error verdict;
  mlfab__membership_over fail; /* the report to server 0 */
  /* Plain calls have serials that continue through all epochs; a call's number is its serial in the epoch, from `base`
   * on. All below `first` are over, all below `begun` have begun; `end` is the next serial. */
  uint64_t base, first, begun, end;
  mlfab__comm_slot **slots; /* MLFAB__COMM_CALLS, by serial; NULL before the first call */
  mlfab__comm_slot *spare;  /* list */
  mlfab__comm_past past[MLFAB__COMM_PAST]; /* by serial */
  /* Finishing: the number of calls of each member before it finished, UINT64_MAX for the others, by member (NULL:
   * nobody has); the number of calls of this epoch; no call begins until that is told; this worker has finished; the
   * epoch for which it told server 0 that its calls are over. */
  uint64_t *finished;
  uint64_t limit;
  /* Signatures of joiners' first calls: the epoch ends before the first call from `limit` on that has one of them; 0:
   * end of list. The first limit of this epoch, even if it is no longer valid. */
  uint64_t seek[MLFAB__MEMBERSHIP_SEEK];
  uint64_t settled;
  uint32_t moved;
  uint8_t frozen, finishing;
  uint32_t
      promised; /* calls that follow the last one, and that this epoch must still take (core/api/direct.c) */
  /* Objects. */
  mlfab__comm_object *objects[MLFAB__COMM_OBJECTS]; /* NULL: free */
  mlfab__comm_closed closed[MLFAB__COMM_OBJECTS];
  uint32_t closed_next;
  uint32_t objects_added;  /* the last id given */
  uint64_t objects_opened; /* the last channel given out, here or elsewhere */
  uint64_t round;          /* the largest partial round that is over, plus one */
  mlfab__comm_object
      *graves; /* list: removed objects, to be freed when links no longer read their memory */
  uint64_t collectives, collectives_failed, epochs, rounds; /* counters; rounds: partial */
  /* Content of MEMBERSHIP: memory for others of the host, from the context; nonce 0: none. The host, and its link's
   * bytes a second. */
  uint32_t arena_pid;
  int32_t arena_fd;
  uint64_t arena_nonce, arena_bytes, host;
  double link_in, link_out;
} mlfab__comm;

/* Functions that take `self` are the role's (comm_role.c); it is the mlfab__comm. */
MLFAB__INTERNAL int mlfab__comm_init(mlfab__comm *comm, mlfab__env *env, const mlfab_config *config,
                                     uint32_t rank, const mlfab__port *up, const mlfab__port *links,
                                     const mlfab__port *down, mlfab__requests *requests);
MLFAB__INTERNAL void mlfab__comm_free(void *self);
/* Adds the role of a communicator, *comm_p, which the node owns (comm_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__comm_attach(struct mlfab_node *node, mlfab__comm **comm_p);

/* Call it if this worker cannot make its next call, and the caller knows: all open collectives fail with this error, on
 * all workers, so that the next calls meet. AGAIN: an epoch is just ending; try again. */
MLFAB__INTERNAL int mlfab__comm_forgo(mlfab__comm *comm, const mlfab_error *why, uint64_t now_ns);
/* Begins a plain collective. vecs' memory is borrowed until the request is finished. timeout_ns 0: the configured one.
 * Errors: those of mlfab_allreduce_start, before anything is sent. `outside`: the call only takes a number; the caller
 * runs it when mlfab__comm_outside allows it, and ends it with mlfab__comm_finish. */
MLFAB__INTERNAL int mlfab__comm_start(mlfab__comm *comm, const mlfab__comm_call *call,
                                      uint64_t timeout_ns, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error);
/* Continues after an object stands: calls that wait for it may begin. */
MLFAB__INTERNAL void mlfab__comm_go_on(mlfab__comm *comm);
/* Asks for an outside call: returns 1, its number and signature, if it is its turn; 0: not yet; or the code that ended
 * it (its request is then finished). MLFAB_ERR_UNSUPPORTED: the epoch has no arena, or another worker makes this call
 * as a plain call. Then it has become a plain call: wait for the request. The rest of the epoch works without the
 * arena. Must not be called while the call runs. */
MLFAB__INTERNAL int mlfab__comm_outside(mlfab__comm *comm, mlfab_request request,
                                        uint64_t *number_p, uint64_t *signature_p);
/* Asks the same while it runs: returns 0, or the code that ends the waiting in the arena. The call's memory stays in
 * use: the arena uses it until the caller has left it and calls mlfab__comm_outside again. */
MLFAB__INTERNAL int mlfab__comm_outside_over(mlfab__comm *comm, mlfab_request request);
/* Ends the outside call: carried out (0), or failed with this code and culprit (a member's rank, or MLFAB_NO_RANK).
 * MISMATCH, which all members get alike, only makes server 0 compare the calls: its verdict ends the call. */
MLFAB__INTERNAL void mlfab__comm_finish(mlfab__comm *comm, mlfab_request request, int code,
                                        int32_t rank, uint64_t now_ns);
/* In phase LISTED: reports that the context has mapped (1) or could not map (0) the memory of `list`. */
MLFAB__INTERNAL void mlfab__comm_mapped(mlfab__comm *comm, int ok);
/* Returns the worker for which an open request of ours waits, or MLFAB_NO_RANK. */
MLFAB__INTERNAL int32_t mlfab__comm_awaited(void *self, const mlfab__request *request);
/* Withdraws a request of ours (plain or an object's): TIMEOUT or CANCELLED. */
MLFAB__INTERNAL void mlfab__comm_withdraw(void *self, mlfab__request *request, int code,
                                          uint64_t now_ns);
/* Finishes: this worker has no more data. Others go on without it, after their begun calls (membership.h). */
MLFAB__INTERNAL void mlfab__comm_finish_work(void *self);
/* Returns the number of ranks that take part in this worker's next call, as far as known; `ranks` has room for
 * `room`. */
MLFAB__INTERNAL uint32_t mlfab__comm_present(const mlfab__comm *comm, uint32_t *ranks,
                                             uint32_t room);
/* Returns 1 if this worker has finished and nobody waits for it any more. */
MLFAB__INTERNAL int mlfab__comm_finish_over(const void *self);
/* Tells server 0 that the worker closes without having finished. */
MLFAB__INTERNAL void mlfab__comm_leave(void *self);
/* Returns 1 if others wait for nothing here: no run runs, all messages are acknowledged. */
MLFAB__INTERNAL int mlfab__comm_quiet(const void *self);

/* hello: the link to server 0 stands (again). dead: server 0 is dead. */
MLFAB__INTERNAL void mlfab__comm_hello(mlfab__comm *comm);
MLFAB__INTERNAL void mlfab__comm_dead(mlfab__comm *comm, uint64_t now_ns);
/* Take frames of server 0 (MEMBERSHIP_*, TREE_PLAN), of members (COLL), of peers (COLL_ACK): return 1 if theirs. */
MLFAB__INTERNAL int mlfab__comm_server_frame(mlfab__comm *comm, const mlfab__frame_in *frame,
                                             uint64_t now_ns);
MLFAB__INTERNAL int mlfab__comm_member_frame(mlfab__comm *comm, uint32_t rank,
                                             const mlfab__frame_in *frame, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__comm_peer_frame(mlfab__comm *comm, uint32_t rank,
                                           const mlfab__frame_in *frame, uint64_t now_ns);
/* Called without a link to this worker: returns 1 if a link is wanted. After MLFAB__COMM_PATIENCE heartbeats the epoch
 * fails. */
MLFAB__INTERNAL int mlfab__comm_peer_missing(mlfab__comm *comm, uint32_t rank, const char *why,
                                             uint64_t now_ns);
/* Returns 1 if mlfab__comm_tick has to be called. */
MLFAB__INTERNAL int mlfab__comm_waits(const void *self);
/* Call it four times a heartbeat, while mlfab__comm_waits. */
MLFAB__INTERNAL void mlfab__comm_tick(void *self, uint64_t now_ns);
/* Call it after all actions were carried out: then only open messages are still lent. */
MLFAB__INTERNAL void mlfab__comm_sweep(void *self);

/* --- comm_base.c: for all parts of the communicator --- */

/* Put these around all code that may fail the epoch, or begin a call. now_ns 0: as before. */
MLFAB__INTERNAL void mlfab__comm_enter(mlfab__comm *comm, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__comm_exit(mlfab__comm *comm);
/* Ends the epoch for all, with this code, rank to blame and text, at the outermost exit. The first failure counts. */
MLFAB__INTERNAL void mlfab__comm_fail(mlfab__comm *comm, int code, int32_t rank, const char *format,
                                      ...) MLFAB__PRINTF(4, 5);
MLFAB__INTERNAL void mlfab__comm_fail_memory(mlfab__comm *comm); /* this worker has none left */
MLFAB__INTERNAL void mlfab__comm_set_verdict(mlfab__comm *comm, int code, int32_t rank,
                                             int is_server, const char *text);
/* Takes a verdict that no call has returned: 1, and the present call returns it. */
MLFAB__INTERNAL int mlfab__comm_owed(mlfab__comm *comm, mlfab_error *error);
/* End a request: with 0, with the verdict, or with 0 or an error of this worker alone. */
MLFAB__INTERNAL void mlfab__comm_succeed(mlfab__comm *comm, mlfab_request request);
MLFAB__INTERNAL void mlfab__comm_end_request(mlfab__comm *comm, mlfab_request request);
MLFAB__INTERNAL void mlfab__comm_end_alone(mlfab__comm *comm, mlfab_request request, int code,
                                           int32_t rank, const char *text);
/* Common checks of calls; `what` in words. `ready`: checks the state, and that no verdict is owed (the call then
 * returns it). Errors: PEER_DEAD (server 0), STATE (it leaves), LIMIT (too many workers); of elements ARGUMENT (none)
 * and LIMIT (model_max_bytes); of data ARGUMENT. */
MLFAB__INTERNAL int mlfab__comm_check_state(const mlfab__comm *comm, const char *what,
                                            mlfab_error *error);
MLFAB__INTERNAL int mlfab__comm_check_ready(mlfab__comm *comm, const char *what,
                                            mlfab_error *error);
MLFAB__INTERNAL int mlfab__comm_check_count(const mlfab__comm *comm, const char *what,
                                            uint64_t count, uint32_t width, mlfab_error *error);
MLFAB__INTERNAL int mlfab__comm_check_data(const char *what, const void *data, uint32_t width,
                                           mlfab_error *error);
/* Fails a call of this worker alone, because its data is not finite. */
MLFAB__INTERNAL int mlfab__comm_not_finite(const mlfab__comm *comm, const char *what,
                                           mlfab_error *error);

/* Returns 1 if this worker is alone: then there is no membership. */
static inline int mlfab__comm_alone(const mlfab__comm *comm) { return comm->config->workers == 1; }
/* Returns 1 if the members are known of an epoch that stands or is about to. */
static inline int mlfab__comm_stands(const mlfab__comm *comm) {
  return comm->phase >= MLFAB__COMM_LISTED && comm->phase <= MLFAB__COMM_IN;
}
/* May this worker make its next calls, so many, in this epoch? Returns 1: the first would begin at once; 0: not now,
 * ask again; -1: never. 1 and -1 never contradict each other at two workers after the same call. */
MLFAB__INTERNAL int mlfab__comm_room(const mlfab__comm *comm, uint32_t epoch, uint32_t calls);
/* Returns the number of calls that this worker has called in this epoch, or that wait for the next. */
static inline uint64_t mlfab__comm_called(const mlfab__comm *comm) {
  return comm->end - comm->base;
}
/* Returns 1 if server 0 knows that the calls of this epoch are over here. */
static inline int mlfab__comm_moved(const mlfab__comm *comm) {
  return comm->epoch && comm->moved == comm->epoch;
}
static inline uint64_t mlfab__comm_number(const mlfab__comm_slot *slot) {
  return slot->serial - slot->comm->base;
}
/* place: returns the address of a call's slot pointer. slot_of: returns the open call of this number, or NULL. */
static inline mlfab__comm_slot **mlfab__comm_place(const mlfab__comm *comm, uint64_t serial) {
  return &comm->slots[serial % MLFAB__COMM_CALLS];
}
MLFAB__INTERNAL mlfab__comm_slot *mlfab__comm_slot_of(const mlfab__comm *comm, uint64_t number);
/* Called for a frame of a plain call that is not armed: returns 1 if the frame must be kept. */
MLFAB__INTERNAL int mlfab__comm_awaits(mlfab__comm *comm, uint64_t number);
/* gives: does this member bring its own data to the plain call? givers: returns how many do. */
MLFAB__INTERNAL int mlfab__comm_gives(const mlfab__comm *comm, uint32_t member, uint64_t number);
MLFAB__INTERNAL uint32_t mlfab__comm_givers(const mlfab__comm *comm, uint64_t number);
/* Returns the algorithm of the task in this epoch. */
MLFAB__INTERNAL uint8_t mlfab__comm_choose(const mlfab__comm *comm,
                                           const mlfab__algorithm_task *task);
/* Returns the place of a call that is made now. */
MLFAB__INTERNAL mlfab__mark mlfab__comm_mark(const mlfab__comm *comm);
/* Return the object of this id, of this channel, or NULL. */
MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_find(mlfab__comm *comm, uint32_t id);
MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_channel_find(mlfab__comm *comm, uint32_t channel);

/* Returns the number of objects whose opening has begun, and that are not closed. */
MLFAB__INTERNAL uint32_t mlfab__comm_open_objects(const mlfab__comm *comm);
/* Reports to server 0. ask: this worker wants to be in the epoch after this one. say_finish: it has finished after so
 * many calls, or the calls of its last epoch are over. stuck: this call seems to be stuck. */
MLFAB__INTERNAL void mlfab__comm_ask(mlfab__comm *comm, uint32_t after_epoch);
MLFAB__INTERNAL void mlfab__comm_say_finish(mlfab__comm *comm, uint64_t calls);
MLFAB__INTERNAL void mlfab__comm_stuck(mlfab__comm *comm, uint32_t channel, uint64_t number);

/* --- comm_finish.c --- */

/* Tells server 0 if all calls below the limit are over here. */
MLFAB__INTERNAL void mlfab__comm_check_moved(mlfab__comm *comm);
/* Resets the limit after an epoch: in the next, nobody has finished. */
MLFAB__INTERNAL void mlfab__comm_no_limit(mlfab__comm *comm);
/* Take frames. For MEMBERSHIP_OWED: return 0, or FRAME. */
MLFAB__INTERNAL void mlfab__comm_on_freeze(mlfab__comm *comm, const mlfab__membership_finish *in);
MLFAB__INTERNAL void mlfab__comm_on_settle(mlfab__comm *comm, const mlfab__membership_finish *in);
MLFAB__INTERNAL int mlfab__comm_on_owed(mlfab__comm *comm, const mlfab__frame_in *frame);

/* --- epoch.c --- */

/* The value of comm.settle. */
MLFAB__INTERNAL void mlfab__epoch_settle(mlfab__comm *comm);
/* Takes part from now on, unless it does, leaves, or has no reason to. */
MLFAB__INTERNAL void mlfab__epoch_join(mlfab__comm *comm);
/* Repeats on a new link to server 0 all that the server may have missed. */
MLFAB__INTERNAL void mlfab__epoch_say_again(mlfab__comm *comm);
MLFAB__INTERNAL int mlfab__epoch_on_list(mlfab__comm *comm, const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__epoch_on_go(mlfab__comm *comm, const mlfab__membership_go *go);
MLFAB__INTERNAL void mlfab__epoch_on_meet(mlfab__comm *comm, const mlfab__membership_ready *in);
/* Sends READY when it is time. A newcomer waiting in a call only stands apart, and asks. */
MLFAB__INTERNAL void mlfab__epoch_look_ready(mlfab__comm *comm);
MLFAB__INTERNAL void mlfab__epoch_look_apart(mlfab__comm *comm);
MLFAB__INTERNAL void mlfab__epoch_on_over(mlfab__comm *comm, const mlfab__membership_over *over);
MLFAB__INTERNAL void mlfab__epoch_on_left(mlfab__comm *comm, const mlfab__membership_leave *in);

#endif
