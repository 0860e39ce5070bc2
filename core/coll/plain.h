/* plain.h - the communicator: plain collectives, from the call to the result.
 *
 * A call is checked (plain_check.c), gets the next number, and begins when its turn comes: calls begin in their order,
 * up to MLFAB__COMM_AHEAD above the first that is open. Calls made while no epoch stands wait for the next.
 *
 *    WAITING --its turn--> PLAIN (a run)
 *                          PLANNING --the tree that the scheduler plans--> PLAIN
 *                          OUTSIDE (in shared memory) --others do not use it--> PLAIN
 *
 * In a fabric with a scheduler, an allreduce of more than eager_bytes, or of MLFAB_ALGORITHM_PLANNED, goes by a tree
 * that the scheduler plans (trees.h): at its turn the worker asks server 0 for the tree. With an empty answer all
 * members take the algorithm that AUTO chooses. A call in shared memory (shm_coll.h) has a number like any other, so
 * matching, deadlines and verdicts are the same; only its bytes pass elsewhere.
 *
 * Invariants. (1) Calls are numbered in their order, from 0 in each epoch. (2) The call of a number is the same on all
 * workers, or the epoch ends with MISMATCH. (3) A call ends: by finishing, by a verdict, by its deadline, or by the
 * death of server 0. */
#ifndef MLFAB__PLAIN_H
#define MLFAB__PLAIN_H

#include "../base/request.h"
#include "../node/role.h"
#include "algorithm.h"
#include "engine.h"

enum {
  MLFAB__COMM_CALLS = 1024,     /* number of open plain collectives; a power of 2 */
  MLFAB__COMM_EAGER = 64 << 10, /* a call of at most so many bytes is sent without READY */
  /* A root may be ahead of workers that only receive: every so many calls it waits for them, and at most so many calls
   * begin above the first open one. */
  MLFAB__COMM_AHEAD = 32,
  MLFAB__COMM_SEGMENT = 256 << 10, /* most bytes of a message of a plain collective */
  MLFAB__COMM_BUFS = 4096,         /* limit of a list */
  MLFAB__COMM_PAST = 128           /* number of finished calls with known signatures */
};

/* The number of a call in requests for its tree: calls of later epochs have larger numbers. */
#define MLFAB__COMM_TREE(epoch, number) ((uint64_t)(epoch) << 40 | (number))

/* A plain collective as it is called. */
typedef struct mlfab__comm_call {
  uint8_t kind;      /* MLFAB__COLLECTIVE_* */
  uint8_t algorithm; /* enum mlfab_algorithm */
  uint8_t ordered, refuse_nan, outside;
  uint8_t callers; /* vecs are memory of a caller, who gets it back when the request has finished */
  int dtype, op;   /* dtype 0: bytes */
  uint32_t width;
  mlfab_reduce_fn reduce;
  void *reduce_user;
  const mlfab_vec *vecs; /* counts in elements; copied */
  uint32_t n;
  const uint64_t *counts;    /* by rank, `workers` of them: reduce-scatter, allgather; else NULL */
  int32_t root;              /* rank; broadcast */
  uint64_t tag;              /* the user's, or 0 */
  const void *const *inputs; /* copied into vecs when it begins; NULL: in place */
  uint64_t salt;             /* further options, equal everywhere: hashed into the signature */
  uint32_t opens;            /* the object that it opens, or 0 */
  uint32_t of;               /* the object that it belongs to, or 0: it begins when that stands */
  const char *words;         /* its name in texts: "an allreduce"; static */
} mlfab__comm_call;

/* A call as reported to other workers. */
typedef struct mlfab__comm_past {
  uint64_t signature, count, tag;
  const char *words;
  int dtype, op;
  uint32_t width;
  int32_t root;
  uint8_t kind, user; /* user: a reducer of the user's */
  uint8_t algorithm, opens;
  uint64_t *counts; /* by rank; the ring's memory, if the call has none */
  uint8_t has_counts;
} mlfab__comm_past;

enum {
  MLFAB__SLOT_FREE,
  MLFAB__SLOT_WAITING,  /* for the epoch, or for its turn: calls from comm.begun on */
  MLFAB__SLOT_PLANNING, /* for its tree (trees.h); later calls may begin */
  MLFAB__SLOT_PLAIN,    /* a run */
  MLFAB__SLOT_OUTSIDE
};

typedef struct mlfab__comm_slot { /* an open plain collective */
  struct mlfab__comm *comm;
  struct mlfab__comm_slot *next; /* spare */
  uint8_t state;
  uint8_t wanted; /* OUTSIDE: others make it as a plain call */
  uint8_t owed;   /* this worker has finished, did not make the call, and gives the identity */
  mlfab__comm_call call;
  mlfab_vec one, *vecs; /* in bytes; vecs: &one, or a block of call.n while it is open */
  uint64_t *counts;     /* a copy, by rank */
  mlfab_vec *blocks;    /* the members' blocks in their order; while it is armed */
  uint32_t blocks_room;
  uint64_t serial, signature, count;
  mlfab__mark mark;
  mlfab_request request;
  uint64_t stuck_ns;
  int32_t missing;       /* the rank that, as server 0 reports, has not called */
  uint8_t missing_waits; /* it waits in a barrier */
  mlfab__engine_run run;
} mlfab__comm_slot;

/* --- plain_check.c: requirements of a call --- */

/* Returns 0, and the number of elements in its buffers; or an error, with a text in `error`. */
MLFAB__INTERNAL int mlfab__plain_check(const struct mlfab__comm *comm, const mlfab__comm_call *call,
                                       uint64_t *count_p, mlfab_error *error);
/* Does the call reduce? */
MLFAB__INTERNAL int mlfab__plain_adds(const mlfab__comm_call *call);
/* Returns the bytes of an element, or 0 for an invalid element type. */
MLFAB__INTERNAL uint32_t mlfab__plain_width(const mlfab__comm_call *call);
/* Returns a rank that the call needs and that is no member of this epoch, or MLFAB_NO_RANK. */
MLFAB__INTERNAL int32_t mlfab__plain_stranger(const struct mlfab__comm *comm,
                                              const mlfab__comm_call *call);
MLFAB__INTERNAL mlfab__algorithm_task mlfab__plain_task(const mlfab__comm_call *call,
                                                        uint64_t count, uint32_t members);
/* Is this worker's data finite? The counts of the buffers are in units of so many bytes. */
MLFAB__INTERNAL int mlfab__plain_finite(const struct mlfab__comm *comm,
                                        const mlfab__comm_call *call, uint32_t unit);
/* Copies the inputs to the memory in which the collective works. */
MLFAB__INTERNAL void mlfab__plain_take_inputs(const struct mlfab__comm *comm,
                                              const mlfab__comm_call *call);
MLFAB__INTERNAL uint64_t mlfab__plain_signature(const struct mlfab__comm *comm,
                                                const mlfab__comm_call *call, uint64_t count);
MLFAB__INTERNAL mlfab__comm_past mlfab__plain_describe(const mlfab__comm_slot *slot);
/* Writes the call of so many ranks in words, of at most 120 bytes. Returns text. */
MLFAB__INTERNAL const char *mlfab__plain_words(char text[MLFAB__TEXT_MAX],
                                               const mlfab__comm_past *past, uint32_t ranks);

/* --- plain.c: its life --- */

/* Moves the limit past calls with which no joiner begins. */
MLFAB__INTERNAL void mlfab__comm_seek(struct mlfab__comm *comm);
/* Makes a slot for the next call. Errors: AGAIN (MLFAB__COMM_CALLS are open), MEMORY. */
MLFAB__INTERNAL int mlfab__plain_slot_new(struct mlfab__comm *comm, const mlfab__comm_call *call,
                                          mlfab__comm_slot **slot_p);
/* Makes the slot that of the next call. */
MLFAB__INTERNAL void mlfab__plain_slot_fill(struct mlfab__comm *comm, mlfab__comm_slot *slot,
                                            const mlfab__comm_call *call, uint64_t count,
                                            mlfab_request request);
/* Begins the calls whose turn has come. */
MLFAB__INTERNAL void mlfab__plain_begin_waiting(struct mlfab__comm *comm);
/* Finds a call of this epoch: returns 1, or 0 if it is unknown. */
MLFAB__INTERNAL int mlfab__plain_past(const struct mlfab__comm *comm, uint64_t number,
                                      mlfab__comm_past *past_p);
/* Ends the epoch with a text: this call, in words, worker `rank`, and `what` it did. */
MLFAB__INTERNAL void mlfab__plain_fail(struct mlfab__comm *comm, const mlfab__comm_slot *slot,
                                       int code, int32_t rank, const char *what);
/* Ends all open calls with the verdict. */
MLFAB__INTERNAL void mlfab__plain_end_all(struct mlfab__comm *comm);
/* Asks server 0 for the trees of calls that wait. */
MLFAB__INTERNAL void mlfab__plain_ask_trees(struct mlfab__comm *comm);
/* Takes TREE_PLAN: returns 0, or FRAME. */
MLFAB__INTERNAL int mlfab__plain_on_tree(struct mlfab__comm *comm, const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__plain_free(struct mlfab__comm *comm);

#endif
