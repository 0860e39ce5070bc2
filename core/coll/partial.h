/* partial.h - partial reductions: one member's round as a task graph, and what it keeps between
 * rounds. Layer 2. Messages, runs and requests are the runner's (partial_run.c).
 *
 * A round is activation, then exchange:
 *
 *    call -> INITIATE --+--> START --> TAKE --> allreduce of the data ----+--> DELIVER
 *    a notice ----------+       (room) --^ \--> allreduce of the bitmap --+
 *
 * Activation is the union of the binomial trees of all members: whoever is started by a call sends
 * a notice to member + 2^b for every level b, whoever is started by a notice of level b passes it
 * on to the levels above, once a level and round. The highest level would go round a circle that
 * is no power of two: a notice says whether its receiver, d members behind the initiator, is near:
 * whether d < P - 2^top. Only near ones use the highest level. So one initiator costs P - 1
 * notices, all of them P * levels. Everybody is reached by any set of initiators: the levels below
 * the highest are used always, so each reaches the 2^top members from itself on; and where a
 * member that is near for one initiator hears of another first, for which it is not, the member
 * that it leaves out is among those 2^top of the other.
 *
 *    SOLO      every call initiates.
 *    MAJORITY  the call of a member that is drawn for the round does.
 *    QUORUM    one that is drawn counts the calls, which are told to it (ARRIVE), and initiates.
 *
 * TAKE copies what this member has called with and no round has taken yet (`pending`) into the
 * round's array. Rounds are taken one after the other: that of r + 1 waits until r is over here
 * (and, with QUEUED, until there is room for its result). So what r + 2 sends comes after r is over
 * everywhere, and two arrays, by parity, are enough. What was taken stays in `kept` until the next
 * TAKE: if a failure comes before any call has got the round's result, that returns to pending.
 * (The next TAKE is late enough: it is set off by a call of somebody who has got the result.)
 *
 * A flush is a full reduction of what no round has taken: that moves from pending to `flushed`. Flushes
 * are counted by everybody, those that have succeeded: after one that failed here, and may have succeeded
 * elsewhere, the members' largest count tells whether `flushed` is in a sum that somebody has, or
 * returns to pending.
 *
 * Whoever was taken for dead missed epochs: what counts for what it gave is where the first one that
 * it missed began, since later rounds were without it. So an epoch begins with an exchange of what
 * members know of the last MLFAB__PARTIAL_EPOCHS beginnings, their own `given` and `flushes` among them. For
 * a member that was away for longer, what it had given last counts as used.
 *
 * Invariants. (1) A contribution is in exactly one of pending, kept with an open round, flushed with an
 * open flush, and results. (2) The bit of a member says whether its call of this round's number is in the result.
 * (3) Step and the rounds of a member's answers never fall, over only by one when a failure takes
 * a round back; step <= over + 1.
 *
 * Source: eagerSGD §4 and Lemma 5.1. Departs: partners are member + 2^b instead of exchanged bits,
 * which reach not everybody unless P is a power of two; contributions are taken by copying. */
#ifndef MLFAB__PARTIAL_H
#define MLFAB__PARTIAL_H

#include "algorithm.h"

enum {
  MLFAB__PARTIAL_LEVELS = 10, /* log2 of MLFAB__COLLECTIVE_MEMBERS_MAX */
  MLFAB__PARTIAL_EPOCHS = 32  /* beginnings that are remembered */
};

/* What COMPUTE operations do; from NOTICES on: a notice of level (code - NOTICES) / 2 came, near
 * when odd. */
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
  uint32_t width; /* bytes of an element */
  uint64_t count, seed;
} mlfab__partial_spec;

/* Operations of a member's task graph. */
typedef struct mlfab__partial_plan {
  uint32_t initiate, take;
  uint32_t arrive; /* SENDs of ARRIVE to members 0, 1, ...; none to itself */
  uint32_t send[MLFAB__PARTIAL_LEVELS][2]; /* of notices: to one that is not near; that is */
} mlfab__partial_plan;

/* Where an epoch began: the first round that no call had got, and flushes that had succeeded; both
 * plus one, 0: not known. */
typedef struct mlfab__partial_mark {
  uint64_t base, flushes;
} mlfab__partial_mark;

/* What members exchange: element by element, the largest counts. */
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
  uint32_t rank;
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
                                        const mlfab__partial_spec *spec, uint32_t rank);
MLFAB__INTERNAL void mlfab__partial_free(mlfab__partial *partial);

/* --- an epoch --- */

/* These are the members (1..MLFAB__COLLECTIVE_MEMBERS_MAX); ranks are borrowed. Task graphs are to be built
 * again; rounds go on after `settle`. */
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
/* partial->marks are now those of all members: the rounds below their base are results that calls have
 * got. What this member gave to a round counts as used when that is below the base of the first epoch
 * since its last, else it returns to pending; likewise what it gave to a flush. The next step, or the
 * one of the call that waits, is the base. Errors: FRAME (what cannot be; nothing has changed). */
MLFAB__INTERNAL int mlfab__partial_settle(mlfab__partial *partial, uint32_t epoch);
/* The epoch is over; the waiting call, if any, has failed. What it brought stays. */
MLFAB__INTERNAL void mlfab__partial_end(mlfab__partial *partial);

/* --- rounds --- */

/* The member that is drawn for a round, in 0..members-1. */
MLFAB__INTERNAL uint32_t mlfab__partial_draw(const mlfab__partial *partial, uint64_t round);
/* What a COMPUTE of round `number` does to member and task graph, but for MLFAB__COLLECTIVE_DIVIDE. 1: the
 * waiting call has been answered. Afterwards TAKE of a round may be due. */
MLFAB__INTERNAL int mlfab__partial_compute(mlfab__partial *partial, mlfab__dag *dag,
                                           uint64_t number, uint32_t code);
/* 1: TAKE of round `over` is to be triggered. */
MLFAB__INTERNAL int mlfab__partial_may_take(const mlfab__partial *partial);
/* The operation that the waiting call is to trigger in its round, or MLFAB__DAG_NONE. */
MLFAB__INTERNAL uint32_t mlfab__partial_trigger(const mlfab__partial *partial);
/* Who has to call before round `over` can start, as far as is known: a member, or
 * MLFAB__DAG_NONE. */
MLFAB__INTERNAL uint32_t mlfab__partial_awaits(const mlfab__partial *partial);

/* --- calls --- */

/* Adds `data` to pending: a step that has failed at once. */
MLFAB__INTERNAL void mlfab__partial_keep(mlfab__partial *partial, const void *data);
/* A step: adds `data` to pending. 1: answered at once, with a result in `data`; 0: it waits (data
 * is borrowed). None may be waiting. */
MLFAB__INTERNAL int mlfab__partial_call(mlfab__partial *partial, void *data);
/* Memory for flushes, one array that is kept. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__partial_flush_room(mlfab__partial *partial);
/* Settled, with room, and no call waits: writes what no round has taken into `data`, for a full reduction;
 * that is over: it was carried out, or it failed here, and `settle` will tell. */
MLFAB__INTERNAL void mlfab__partial_flush(mlfab__partial *partial, void *data);
MLFAB__INTERNAL void mlfab__partial_flushed(mlfab__partial *partial, int done);

#endif
