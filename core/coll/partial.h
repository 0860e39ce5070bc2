/* partial.h - partial reductions: one member's round as a task graph, and its state between rounds. partial_run.c calls
 * it. Messages, runs and requests belong to the runner (partial_run.c).
 *
 * A round is activation, then exchange:
 *
 *    call -> INITIATE --+--> START --> TAKE --> allreduce of the data ----+--> DELIVER
 *    a notice ----------+       (room) --^ \--> allreduce of the bitmap --+
 *
 * Activation is the union of the binomial trees of all members. A member that starts by a call sends a notice to member
 * + 2^b for every level b. A member that starts by a notice of level b passes it on to the levels above, once for each
 * level and round. If P is no power of two, the highest level would reach some members twice. So a notice says whether
 * its receiver, d members after the initiator, is near: d < P - 2^top; only near members use the highest level. One
 * initiator costs P - 1 notices, P initiators cost P * levels. Any set of initiators reaches every member: all use the
 * levels below the highest, so each initiator reaches the 2^top members from itself on. If a member is near to one
 * initiator and first hears of another, to which it is not near, it leaves a member out: that member is among the 2^top
 * members of the other initiator.
 *
 *    SOLO      every call initiates.
 *    MAJORITY  the call of one member, drawn for the round, initiates.
 *    QUORUM    all members tell their calls (ARRIVE) to one member, drawn for the round, which counts them and initiates.
 *
 * TAKE copies the data of calls that no round has taken yet (`pending`) into the round's array. Rounds take one after
 * another: round r + 1 waits until r is over here (and, with QUEUED, until there is room for its result). So messages
 * of r + 2 come after r is over everywhere, and two arrays, by parity, are enough. The data of TAKE stays in `kept`
 * until the next TAKE: if a failure comes before a call has got the round's result, it returns to pending. (A call of a
 * member that has the result starts the next TAKE, so this is late enough.)
 *
 * A flush is a full reduction of the data that no round has taken; the data moves from pending to `flushed`. All
 * members count the successful flushes. A flush that failed here may have succeeded elsewhere: the members' largest
 * count then tells whether `flushed` is in a sum that a member has, or returns to pending.
 *
 * A member that was declared dead has missed epochs. Later rounds were without it, so the beginning of the first missed
 * epoch decides whether its last data was used. So an epoch begins with an exchange: each member sends its knowledge of
 * the last MLFAB__PARTIAL_EPOCHS beginnings, including its own `given` and `flushes`. If a member was away for longer,
 * its last data counts as used.
 *
 * Invariants. (1) A contribution is in one place only: pending, kept with an open round, flushed with an open flush, or
 * results. (2) The bit of a member tells if its call of this round's number is in the result. (3) Step and the rounds
 * of a member's answers never fall; `over` falls only by one, when a failure takes a round back; step <= over + 1.
 *
 * Source: eagerSGD §4 and Lemma 5.1. Departs: partners are member + 2^b instead of exchanged bits, which reach
 * everybody only if P is a power of two; contributions are taken by copying. */
#ifndef MLFAB__PARTIAL_H
#define MLFAB__PARTIAL_H

#include "algorithm.h"
#include "../../mlfab_partial.h"

enum {
  MLFAB__PARTIAL_LEVELS = 10, /* log2 of MLFAB__COLLECTIVE_MEMBERS_MAX */
  MLFAB__PARTIAL_EPOCHS = 32  /* number of remembered beginnings */
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

/* Options; equal on all members. */
typedef struct mlfab__partial_spec {
  uint32_t mode;    /* MLFAB_PARTIAL_SOLO ... */
  uint32_t quorum;  /* QUORUM: 1 or more; above the number of members: all of them */
  uint32_t results; /* MLFAB_PARTIAL_LATEST, MLFAB_PARTIAL_QUEUED */
  uint32_t queue_max;
  uint32_t segment; /* as of mlfab__algorithm_task */
  uint8_t algorithm;
  uint8_t mean;
  uint8_t reduce_or; /* the runner's mlfab__dag_op.reduce for OR of 64-bit words */
  int dtype;
  uint32_t width;   /* bytes of an element */
  uint32_t kernels; /* config.kernels */
  uint64_t count, seed;
} mlfab__partial_spec;

/* Operations of a member's task graph, by number. */
typedef struct mlfab__partial_plan {
  uint32_t initiate, take;
  uint32_t arrive; /* SENDs of ARRIVE to members 0, 1, ...; none to itself */
  uint32_t send[MLFAB__PARTIAL_LEVELS][2]; /* of notices: to a member not near; to a near one */
} mlfab__partial_plan;

/* State at the beginning of an epoch: the first round whose result no call had got, and the number of successful
 * flushes; both plus one, 0: unknown. */
typedef struct mlfab__partial_mark {
  uint64_t base, flushes;
} mlfab__partial_mark;

/* Members exchange it; for each element the largest counts. */
typedef struct mlfab__partial_marks {
  mlfab__partial_mark now;                         /* mark of the epoch that begins */
  mlfab__partial_mark past[MLFAB__PARTIAL_EPOCHS]; /* by epoch modulo their number */
} mlfab__partial_marks;

/* A result that a later call may get. */
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
  uint8_t *flush_memory;             /* its allocated memory */
  uint8_t *queue;                    /* QUEUED: queue_max results, by round */
  mlfab__partial_note *notes;        /* 2, or queue_max */
  uint32_t nnotes;
  uint64_t bitmap[2][MLFAB__COLLECTIVE_MEMBERS_MAX / 64]; /* by member */
  uint64_t over;                                          /* rounds below it are over here */
  uint64_t given; /* rounds below it were results of calls, as far as known here */
  uint64_t step;  /* step of the next call */
  uint64_t pending_calls, kept_calls, flushed_calls;
  uint64_t flushes; /* number of successful flushes, as far as known here */
  uint32_t epoch;   /* the last epoch settled here; 0: none */
  mlfab__partial_marks marks;
  uint8_t some;  /* pending has something */
  uint8_t taken; /* round `over` has taken; its contribution is in kept, if kept_some */
  uint8_t kept_some;
  uint8_t settled;           /* the members agree on their places; 0 between epochs */
  uint8_t waiting;           /* a call waits; for round step - 1 if settled */
  uint8_t flushing;          /* a flush is open, or has failed and is not settled yet */
  uint8_t flushed_some;      /* this member has brought something to the flush */
  void *out;                 /* the result of the waiting call goes there */
  mlfab_partial_info answer; /* info of the last answered call */
} mlfab__partial;

/* Memory: 4 arrays, and queue_max with QUEUED. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__partial_init(mlfab__partial *partial, mlfab__env *env,
                                        const mlfab__partial_spec *spec);
MLFAB__INTERNAL void mlfab__partial_free(mlfab__partial *partial);

/* --- an epoch --- */

/* Sets the members (1..MLFAB__COLLECTIVE_MEMBERS_MAX); ranks are borrowed. The caller then builds task graphs again;
 * rounds go on after `settle`. */
MLFAB__INTERNAL void mlfab__partial_begin(mlfab__partial *partial, uint32_t members, uint32_t me,
                                          const uint32_t *ranks);
/* Returns the exchange of the data as a task, for mlfab__algorithm_choose. */
MLFAB__INTERNAL mlfab__algorithm_task mlfab__partial_task(const mlfab__partial *partial);
/* Builds and seals the task graph of a round, the same for all rounds; `algorithm` as chosen. Errors:
 * MEMORY, LIMIT. O(members). */
MLFAB__INTERNAL int mlfab__partial_build(mlfab__partial *partial, mlfab__dag *dag,
                                         uint8_t algorithm);
/* Before `settle`: fills partial->marks, to be exchanged. Epochs only grow. */
MLFAB__INTERNAL void mlfab__partial_mark_epoch(mlfab__partial *partial, uint32_t epoch);
/* Settles: partial->marks are now those of all members. Calls have got the results of rounds below their base. This
 * member's data in a round counts as used if the round is below the base of the first epoch since its last one; else it
 * returns to pending. The same holds for a flush. The base is the next step, or the step of the waiting call. Errors:
 * FRAME (impossible marks; nothing has changed). */
MLFAB__INTERNAL int mlfab__partial_settle(mlfab__partial *partial, uint32_t epoch);
/* Ends the epoch; the waiting call, if any, has failed. Its data stays pending. */
MLFAB__INTERNAL void mlfab__partial_end(mlfab__partial *partial);

/* --- rounds --- */

/* Returns the member that is drawn for a round, in 0..members-1. */
MLFAB__INTERNAL uint32_t mlfab__partial_draw(const mlfab__partial *partial, uint64_t round);
/* Carries out a COMPUTE of round `number`, except MLFAB__COLLECTIVE_DIVIDE. Returns 1 if the waiting call has been
 * answered. Afterwards TAKE of a round may be due. */
MLFAB__INTERNAL int mlfab__partial_compute(mlfab__partial *partial, mlfab__dag *dag,
                                           uint64_t number, uint32_t code);
/* Returns 1 if the runner must trigger TAKE of round `over`. */
MLFAB__INTERNAL int mlfab__partial_may_take(const mlfab__partial *partial);
/* Returns the operation that the waiting call must trigger in its round, or MLFAB__DAG_NONE. */
MLFAB__INTERNAL uint32_t mlfab__partial_trigger(const mlfab__partial *partial);
/* Returns the member that must call before round `over` can start, as far as known, or MLFAB__DAG_NONE. */
MLFAB__INTERNAL uint32_t mlfab__partial_awaits(const mlfab__partial *partial);

/* --- calls --- */

/* Adds the data of a step that failed at once to pending. */
MLFAB__INTERNAL void mlfab__partial_keep(mlfab__partial *partial, const void *data);
/* Makes a step: adds `data` to pending. Returns 1: answered at once, with a result in `data`; 0: it waits (data is
 * borrowed). No other call may be waiting. */
MLFAB__INTERNAL int mlfab__partial_call(mlfab__partial *partial, void *data);
/* Allocates memory for flushes, one array that is kept. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__partial_flush_room(mlfab__partial *partial);
/* flush (when settled, with room, and without a waiting call): writes the data that no round has taken into `data`, for
 * a full reduction. flushed: that is over; done 0: it failed here, and `settle` tells later if others have it. */
MLFAB__INTERNAL void mlfab__partial_flush(mlfab__partial *partial, void *data);
MLFAB__INTERNAL void mlfab__partial_flushed(mlfab__partial *partial, int done);

#endif
