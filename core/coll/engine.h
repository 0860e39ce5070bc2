/* engine.h - the communicator: runs, which are task graphs (dag.h) being executed, and their messages. plain.c and the
 * objects arm them.
 *
 * A run belongs to a plain collective (channel 0, the number of the call) or to a round of an object (its channel, the
 * number of the round). (channel, number) means the same run on all workers. Every message has the run's signature
 * (kind, sizes, types, options). Operations:
 *    SEND         one message. It goes at once if the run is eager, else when the receiver's READY has come. Done when
 *                 it is queued, copied or (large ones) borrowed.
 *    RECV         done when all its bytes are in place. Bytes that come before it may run are staged in memory of
 *                 the message's length.
 *    RECV_REDUCE  likewise; the bytes are added as they come.
 *    COMPUTE      calls the run's function.
 * A run is over when its task graph is finished and no message borrows its buffers: then the caller owns them again.
 *
 * Pacing. If several peers send parts of one sum (up a tree), READY carries a credit in its tag: paced SENDs of lower
 * tags may go. A peer may be `window` messages ahead of the messages that all of them have had added. The windows of
 * all runs share MLFAB__ENGINE_WINDOWS bytes, the oldest run first; the oldest always has a window of 1, even beyond
 * these bytes. The oldest call that is open anywhere is the oldest at every member that has it, so it proceeds whatever
 * the others hold, and windows cannot deadlock.
 *
 * Invariants. (1) A message is accepted once, for its RECV only, with the length in the RECV. A different signature is
 * reported to server 0, which compares the calls. (2) A message for a run that is not armed yet is kept; a message for
 * a run that is over is dropped. (3) After mlfab__engine_end_all nothing touches a caller's memory.
 *
 * Source: eagerSGD §4 (task graphs). Departs: sends are matched by the number of the round instead of by persistent
 * connections; failures. */
#ifndef MLFAB__ENGINE_H
#define MLFAB__ENGINE_H

#include "coll_wire.h"
#include "dag.h"

enum {
  MLFAB__ENGINE_SPACES = 4,
  MLFAB__ENGINE_BUCKETS = 64,
  MLFAB__ENGINE_GATHER = 32 << 10, /* limit up to which small stretches of one message are joined */
  MLFAB__ENGINE_WINDOW = 4,        /* messages: lead of a paced peer over the slowest */
  MLFAB__ENGINE_WINDOWS = 4 << 20  /* bytes that the windows of all runs may have staged */
};

/* dag_op.reduce for an operation of its own: 16 * (element type) + operation + 1. Type 0 is the
 * run's, or I64 for MLFAB__OP_OR. */
#define MLFAB__ENGINE_REDUCE(dtype, op) ((uint8_t)(16 * (dtype) + (op) + 1))

struct mlfab__comm;
struct mlfab__comm_object;

/* Memory of a task graph: a list of stretches, taken as one. */
typedef struct mlfab__engine_space {
  mlfab_vec *vecs; /* count in bytes here */
} mlfab__engine_space;

/* An operation of a run. RECVs: the received part. SENDs: the next SEND that waits for the same READY. */
typedef struct mlfab__engine_recv {
  uint64_t got, from; /* received bytes; the first staged byte */
  uint8_t *stage;     /* as long as the message; NULL: its bytes went to their place */
  uint32_t next;      /* plus one; 0: none */
  uint8_t whole, eager;
} mlfab__engine_recv;

typedef struct mlfab__engine_peer { /* a member, to a run */
  uint8_t ready, told;              /* its READY came; ours was sent */
  uint8_t paced;                    /* it sends paced messages */
  uint32_t credit, given; /* paced SENDs below this tag may go: to it; to us, as last reported */
  uint32_t added;         /* its paced messages that are in the sum */
  uint32_t first, last;   /* first and last SEND that wait for it, plus one; 0: none */
} mlfab__engine_peer;

typedef struct mlfab__engine_run {
  /* The arming code fills these, and leaves them alone until the run is over. */
  uint32_t channel;
  uint64_t number, signature;
  uint8_t eager;
  uint8_t
      callers; /* space 0 is memory of a caller, who gets it back when the request has finished */
  int dtype, op;
  uint32_t width;
  mlfab_reduce_fn reduce; /* instead of op */
  void *reduce_user;
  mlfab__engine_space spaces[MLFAB__ENGINE_SPACES];
  /* COMPUTE: returns 0, or a code that ends the epoch. NULL: only MLFAB__COLLECTIVE_DIVIDE occurs, which the engine
   * does. */
  int (*compute)(void *self, struct mlfab__engine_run *run, const mlfab__dag_op *op);
  /* Called when it is over and no longer armed: status 0, or the verdict that ended it. With 0 it may arm another run,
   * and this one again. */
  void (*over)(void *self, int status);
  void *self;
  mlfab__dag dag; /* sealed; the engine starts it */
  /* The engine's own. */
  uint32_t kernels; /* config.kernels */
  uint8_t armed;
  uint8_t running;           /* not finished: its operations run, its messages are accepted */
  uint8_t busy;              /* its operations are being run */
  uint8_t moved;             /* it has sent or received something */
  uint32_t lent;             /* number of parts of messages that are borrowed */
  uint32_t paced, behind;    /* paced peers; of them, those with `step` messages added */
  uint32_t step, window;     /* messages of each peer that are added; window: lead in messages */
  uint64_t step_bytes;       /* bytes that a window of 1 may have staged */
  uint32_t staged;           /* number of RECVs with a stage */
  mlfab__engine_recv *recvs; /* by operation */
  mlfab__engine_peer *peers; /* by member */
  struct mlfab__engine_run *next; /* list of the armed runs */
} mlfab__engine_run;

/* A frame of a run that is not armed yet; its bytes follow. */
typedef struct mlfab__engine_stage {
  struct mlfab__engine_stage *next;
  mlfab__coll head;
  uint32_t member, bytes;
} mlfab__engine_stage;

/* All zero at first. */
typedef struct mlfab__engine {
  mlfab__engine_run *armed; /* list of armed runs */
  /* Early messages, by channel and number; the last of each list. */
  mlfab__engine_stage *stages[MLFAB__ENGINE_BUCKETS], *stage_ends[MLFAB__ENGINE_BUCKETS];
  uint32_t stage_count;
  uint64_t window_bytes; /* bytes that all windows may have staged */
  uint8_t *gather;       /* buffer that joins small stretches for sending */
} mlfab__engine;

/* Arms a run: sends its READYs, starts its task graph, delivers its early messages. Its dag must be sealed. Errors:
 * STATE (no epoch stands), MEMORY. */
MLFAB__INTERNAL int mlfab__engine_arm(struct mlfab__comm *comm, mlfab__engine_run *run,
                                      uint64_t now_ns);
/* Takes a run back without notice: nothing of it is borrowed on return. If others still need bytes of it, that is a
 * failure (CANCELLED). */
MLFAB__INTERNAL void mlfab__engine_disarm(struct mlfab__comm *comm, mlfab__engine_run *run);
/* Triggers an operation of an armed run. */
MLFAB__INTERNAL void mlfab__engine_trigger(struct mlfab__comm *comm, mlfab__engine_run *run,
                                           uint32_t op, uint64_t now_ns);
/* The functions of mlfab__stream_user. */
MLFAB__INTERNAL void mlfab__engine_deliver(void *self, uint32_t member, const mlfab__coll *head,
                                           const void *bulk, uint32_t bytes);
MLFAB__INTERNAL void mlfab__engine_given_back(void *self, uint32_t member, uint64_t cookie);
/* Ends all runs with this code, and forgets early messages: the epoch is over, and the streams' memory is free. */
MLFAB__INTERNAL void mlfab__engine_end_all(struct mlfab__comm *comm, int code);
/* Frees its memory; forgets runs without notice. */
MLFAB__INTERNAL void mlfab__engine_free(struct mlfab__comm *comm);
/* Disarms the runs of a closed object; that is a failure if others have begun a round that needs them. */
MLFAB__INTERNAL void mlfab__engine_close(struct mlfab__comm *comm,
                                         const struct mlfab__comm_object *object);
/* Returns 1 if early frames of this plain call are here. */
MLFAB__INTERNAL int mlfab__engine_came(const struct mlfab__comm *comm, uint64_t number);
/* Returns the armed run of this channel and number, or NULL; the run with the lowest number. */
MLFAB__INTERNAL mlfab__engine_run *mlfab__engine_find(const struct mlfab__comm *comm,
                                                      uint32_t channel, uint64_t number);
MLFAB__INTERNAL const mlfab__engine_run *mlfab__engine_oldest(const struct mlfab__comm *comm,
                                                              uint32_t channel);
/* Returns 1 if an armed run has sent or received something. */
MLFAB__INTERNAL int mlfab__engine_moves(const struct mlfab__comm *comm);
/* Returns the rank whose message the run awaits, or that has to accept one, or MLFAB_NO_RANK. */
MLFAB__INTERNAL int32_t mlfab__engine_awaits(const struct mlfab__comm *comm,
                                             const mlfab__engine_run *run);

#endif
