/* partial.h - partial reductions: one member's round as a task graph, and what it keeps between
 * rounds. Layer 2. Messages, runs and requests are the runner's (partial_run.c).
 *
 * A round is activation, then exchange:
 *
 *    call -> INITIATE --+--> START --> TAKE --> allreduce of the data ----+--> DELIVER
 *    a notice ----------+       (room) --^ \--> allreduce of the bitmap --+
 *
 * Activation is the union of the binomial trees of all members. A member that a call starts sends a notice to
 * member + 2^b for every level b; a member that a notice of level b starts passes it on to the levels above, once a
 * level and round. When P is no power of two, the highest level would pass some members twice. So a notice says
 * whether its receiver, d members after the initiator, is near: d < P - 2^top; only near members use the highest level.
 * One initiator costs P - 1 notices, P initiators cost P * levels. Any set of initiators reaches every member: all
 * use the levels below the highest, so each initiator reaches the 2^top members from itself on. A member that is near
 * to one initiator may hear first of another, to which it is not near; the member that it then leaves out is among the
 * 2^top members of that other.
 *
 *    SOLO      every call initiates.
 *    MAJORITY  the call of one member, drawn for the round, initiates.
 *    QUORUM    all members tell their calls (ARRIVE) to one member, drawn for the round, which counts them and initiates.
 *
 * TAKE copies the data of calls that no round has taken yet (`pending`) into the round's array. Rounds take one after
 * the other: round r + 1 waits until r is over here (and, with QUEUED, until there is room for its result). So messages
 * of r + 2 come after r is over everywhere, and two arrays, by parity, are enough. The data that TAKE took stays in
 * `kept` until the next TAKE: if a failure comes before any call has got the round's result, it returns to pending. (A
 * call of a member that has got the result starts the next TAKE, so that is late enough.)
 *
 * A flush is a full reduction of the data that no round has taken, which moves from pending to `flushed`. All members
 * count the flushes that have succeeded. A flush that failed here may have succeeded elsewhere: the members' largest
 * count then tells whether `flushed` is in a sum that a member has, or returns to pending.
 *
 * A member that was taken for dead missed epochs. Later rounds were without it, so the beginning of the first epoch
 * that it missed decides whether its last data was used. So an epoch begins with an exchange of what members know of
 * the last MLFAB__PARTIAL_EPOCHS beginnings, their own `given` and `flushes` among them. For a member that was
 * away for longer, its last data counts as used.
 *
 * Invariants. (1) A contribution is in exactly one of pending, kept with an open round, flushed with an open flush, and
 * results. (2) The bit of a member says whether its call of this round's number is in the result. (3) Step and the
 * rounds of a member's answers never fall; over falls only by one, when a failure takes a round back; step <= over + 1.
 *
 * Source: eagerSGD §4 and Lemma 5.1. Departs: partners are member + 2^b instead of exchanged bits,
 * which reach not everybody unless P is a power of two; contributions are taken by copying. */
#ifndef MLFAB__PARTIAL_H
#define MLFAB__PARTIAL_H

#include "algorithm.h"
#include "../../mlfab_partial.h"

enum {
  MLFAB__PARTIAL_LEVELS = 10, /* log2 of MLFAB__COLLECTIVE_MEMBERS_MAX */
  MLFAB__PARTIAL_EPOCHS = 32  /* beginnings that are remembered */
};

/* Codes of COMPUTE operations. From NOTICES on: a notice of level (code - NOTICES) / 2 came; odd: near. */
enum {
  MLFAB__PARTIAL_INITIATE = 1,
  MLFAB__PARTIAL_TAKE,
  MLFAB__PARTIAL_DELIVER,
  MLFAB__PARTIAL_NOTICES
};

/* The spaces of its task graphs: the round's array; the bitmap's words. */
enum { MLFAB__PARTIAL_DATA, MLFAB__PARTIAL_BITMAP };

/* The same on all members. */
typedef struct mlfab__partial_spec {
  uint32_t mode;    /* MLFAB_PARTIAL_SOLO ... */
  uint32_t quorum;  /* QUORUM: 1 or more; above the members it is all of them */
  uint32_t results; /* MLFAB_PARTIAL_LATEST, MLFAB_PARTIAL_QUEUED */
  uint32_t queue_max;
  uint32_t segment; /* as of mlfab__algorithm_task */
  uint8_t algorithm;
  uint8_t mean;
  uint8_t reduce_or; /* mlfab__dag_op.reduce that is OR of 64-bit words for the runner */
  int dtype;
  uint32_t width;   /* bytes of an element */
  uint32_t kernels; /* config.kernels */
  uint64_t count, seed;
} mlfab__partial_spec;

/* Operations of a member's task graph, by number. */
typedef struct mlfab__partial_plan {
  uint32_t initiate, take;
  uint32_t arrive; /* SENDs of ARRIVE to members 0, 1, ...; none to itself */
  uint32_t send[MLFAB__PARTIAL_LEVELS][2]; /* of notices: to one that is not near; that is */
} mlfab__partial_plan;

/* Where an epoch began: the first round whose result no call had got, and flushes that had succeeded; both plus
 * one, 0: not known. */
typedef struct mlfab__partial_mark {
  uint64_t base, flushes;
} mlfab__partial_mark;

/* Members exchange it; of each element the largest counts. */
typedef struct mlfab__partial_marks {
  mlfab__partial_mark now;                         /* of the epoch that begins */
  mlfab__partial_mark past[MLFAB__PARTIAL_EPOCHS]; /* by epoch modulo their number */
} mlfab__partial_marks;

/* A result that a call may still get. */
typedef struct mlfab__partial_note {
  uint32_t active, workers;
  uint8_t included;
  uint64_t bitmap[16]; /* by rank */
} mlfab__partial_note;

typedef struct mlfab__partial {
  mlfab__env *env;
  mlfab__partial_spec spec;
  uint64_t bytes; /* of an array */
  uint32_t members, me, levels;
  const uint32_t *ranks; /* of members; borrowed */
  mlfab__partial_plan plan;
  uint8_t *memory; /* all arrays */
  size_t memory_bytes;
  uint8_t *pending, *kept, *data[2]; /* data: by parity of the round */
  uint8_t *flushed;                  /* NULL until there is a flush */
  uint8_t *flush_memory;             /* what was allocated for it */
  uint8_t *queue;                    /* QUEUED: queue_max results, by round */
  mlfab__partial_note *notes;        /* 2, or queue_max */
  uint32_t nnotes;
  uint64_t bitmap[2][MLFAB__COLLECTIVE_MEMBERS_MAX / 64]; /* by member */
  uint64_t over;                                          /* rounds below it are over here */
  uint64_t given; /* rounds below it were the results of calls, as far as is known here */
  uint64_t step;  /* of the next call */
  uint64_t pending_calls, kept_calls, flushed_calls;
  uint64_t flushes; /* that have succeeded, as far as is known here */
  uint32_t epoch;   /* the last that was settled here; 0: none */
  mlfab__partial_marks marks;
  uint8_t some;  /* there is something in pending */
  uint8_t taken; /* round `over` has been; its contribution is in kept, if kept_some */
  uint8_t kept_some;
  uint8_t settled;           /* the members know where they are; 0 between epochs */
  uint8_t waiting;           /* a call is; for round step - 1 when settled */
  uint8_t flushing;          /* a flush is open, or has failed and is not settled */
  uint8_t flushed_some;      /* and this member has brought something to it */
  void *out;                 /* where the waiting call wants its result */
  mlfab_partial_info answer; /* of the last call that was answered */
} mlfab__partial;

/* Memory: 4 arrays, and queue_max with QUEUED. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__partial_init(mlfab__partial *partial, mlfab__env *env,
                                        const mlfab__partial_spec *spec);
MLFAB__INTERNAL void mlfab__partial_free(mlfab__partial *partial);

/* --- an epoch --- */

/* Sets the members (1..MLFAB__COLLECTIVE_MEMBERS_MAX); ranks are borrowed. The caller builds task graphs again; rounds
 * go on after `settle`. */
MLFAB__INTERNAL void mlfab__partial_begin(mlfab__partial *partial, uint32_t members, uint32_t me,
                                          const uint32_t *ranks);
/* The exchange of the data, for mlfab__algorithm_choose. */
MLFAB__INTERNAL mlfab__algorithm_task mlfab__partial_task(const mlfab__partial *partial);
/* Builds and seals the task graph of a round, the same for all rounds; `algorithm` as chosen. Errors:
 * MEMORY, LIMIT. O(members). */
MLFAB__INTERNAL int mlfab__partial_build(mlfab__partial *partial, mlfab__dag *dag,
                                         uint8_t algorithm);
/* Before `settle`: fills partial->marks, to be exchanged. Epochs only grow. */
MLFAB__INTERNAL void mlfab__partial_mark_epoch(mlfab__partial *partial, uint32_t epoch);
/* partial->marks are now those of all members: calls have got the results of rounds below their base. The data that this
 * member gave to a round counts as used when the round is below the base of the first epoch since its last; else it
 * returns to pending. The same holds for a flush. The next step, or that of the call that waits, is the base. Errors:
 * FRAME (marks that cannot be; nothing has changed). */
MLFAB__INTERNAL int mlfab__partial_settle(mlfab__partial *partial, uint32_t epoch);
/* The epoch is over; the waiting call, if any, has failed. Its data stays pending. */
MLFAB__INTERNAL void mlfab__partial_end(mlfab__partial *partial);

/* --- rounds --- */

/* The member that is drawn for a round, in 0..members-1. */
MLFAB__INTERNAL uint32_t mlfab__partial_draw(const mlfab__partial *partial, uint64_t round);
/* Carries out a COMPUTE of round `number`, but for MLFAB__COLLECTIVE_DIVIDE. 1: the waiting call has been
 * answered. Afterwards TAKE of a round may be due. */
MLFAB__INTERNAL int mlfab__partial_compute(mlfab__partial *partial, mlfab__dag *dag,
                                           uint64_t number, uint32_t code);
/* 1: the runner is to trigger TAKE of round `over`. */
MLFAB__INTERNAL int mlfab__partial_may_take(const mlfab__partial *partial);
/* The operation that the waiting call is to trigger in its round, or MLFAB__DAG_NONE. */
MLFAB__INTERNAL uint32_t mlfab__partial_trigger(const mlfab__partial *partial);
/* The member that has to call before round `over` can start, as far as is known, or MLFAB__DAG_NONE. */
MLFAB__INTERNAL uint32_t mlfab__partial_awaits(const mlfab__partial *partial);

/* --- calls --- */

/* Adds the data of a step that failed at once to pending. */
MLFAB__INTERNAL void mlfab__partial_keep(mlfab__partial *partial, const void *data);
/* A step: adds `data` to pending. 1: answered at once, with a result in `data`; 0: it waits (data
 * is borrowed). None may be waiting. */
MLFAB__INTERNAL int mlfab__partial_call(mlfab__partial *partial, void *data);
/* Memory for flushes, one array that is kept. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__partial_flush_room(mlfab__partial *partial);
/* flush, when settled, with room, and no call waits: writes the data that no round has taken into `data`, for a full
 * reduction. flushed: that is over; done 0: it failed here, and `settle` will tell whether others have it. */
MLFAB__INTERNAL void mlfab__partial_flush(mlfab__partial *partial, void *data);
MLFAB__INTERNAL void mlfab__partial_flushed(mlfab__partial *partial, int done);

#endif
