/* dag.h - a task graph: operations of one member of a collective, and their dependencies. engine.c runs it.
 *
 * Pure bookkeeping: it tells which operation may run now. The runner runs them (messages, memory, sums). An operation
 * starts when all of its dependencies are done, or any of them (OR), or k of them (a quorum). It is consumable: it runs
 * at most once a round, and later dependencies have no effect. A task graph is built once and run for any number of
 * rounds.
 *
 *    init; add, after, ... ; seal; then for each round: start; while (next) run it; done; finished
 *
 * Invariants: in a round every operation goes WAITING, READY, RUNNING, DONE, each at most once;
 * operations become READY in an order that only depends on the order of done and trigger. After
 * seal nothing is allocated until the next add.
 *
 * Source: eagerSGD §III-B (task graphs of consumable operations, AND and OR dependencies). Departs:
 * k of n for quorums, and cycles are refused also where an OR would break them. */
#ifndef MLFAB__DAG_H
#define MLFAB__DAG_H

#include "../base/env.h"

enum mlfab__dag_kind {
  MLFAB__DAG_NOP,
  MLFAB__DAG_SEND,
  MLFAB__DAG_RECV,
  MLFAB__DAG_RECV_REDUCE,
  MLFAB__DAG_COMPUTE
};

enum mlfab__dag_state {
  MLFAB__DAG_WAITING,
  MLFAB__DAG_READY,   /* in the queue of mlfab__dag_next */
  MLFAB__DAG_RUNNING, /* handed out */
  MLFAB__DAG_DONE
};

/* Fault found by mlfab__dag_seal, in dag->flaw. */
enum mlfab__dag_flaw {
  MLFAB__DAG_SOUND,
  MLFAB__DAG_CYCLE, /* the operation waits for itself */
  MLFAB__DAG_NEED,  /* it needs more dependencies than it has */
  MLFAB__DAG_TWICE  /* another SEND, or another RECV, has its peer and tag */
};

#define MLFAB__DAG_NONE 0xffffffffu
#define MLFAB__DAG_OPS_MAX (1u << 20)
#define MLFAB__DAG_EDGES_MAX (1u << 24)

typedef struct mlfab__dag_op {
  uint8_t kind;     /* mlfab__dag_kind */
  uint8_t outside;  /* 1: mlfab__dag_trigger counts as one more dependency */
  uint8_t optional; /* 1: the round is over without it */
  uint8_t left;     /* RECV_REDUCE: the message is the left operand */
  /* SEND: 1: the bytes may change once it is done, so they are copied; 0: they stay unchanged until the peer has
   * them. */
  uint8_t copy;
  /* SEND: needs the peer's credit, which counts such messages by their tags, from 0. RECV_REDUCE: the runner bounds the
   * lead of each peer with such messages over the others. */
  uint8_t paced;
  uint8_t reduce; /* RECV_REDUCE: 0 the task graph's operation, else 1 + an operation's number */
  uint32_t need;  /* number of dependencies that start it; 0: all; 1: any (OR); q: a quorum of q */
  uint32_t peer;  /* SEND, RECV, RECV_REDUCE: index of the member */
  uint32_t tag;   /* (peer, tag) is unique among RECVs (of both kinds), and among SENDs */
  uint32_t space; /* memory of the runner: 0 the data, 1.. others */
  uint64_t at, bytes; /* a stretch of it; bytes may be 0 (a bare notice) */
  uint32_t code;      /* COMPUTE: the runner's own number of the computation */
} mlfab__dag_op;

typedef struct mlfab__dag_edge {
  uint32_t op, dependency;
} mlfab__dag_edge;

/* Read the fields freely, change them through the functions. */
typedef struct mlfab__dag {
  mlfab__env *env;
  mlfab__dag_op *ops;
  mlfab__dag_edge *edges; /* in the order of mlfab__dag_after */
  uint32_t nops, ops_room;
  uint32_t nedges, edges_room;
  uint8_t sealed;
  uint8_t flaw;
  /* All that seal computes lies in one block of memory. */
  uint32_t *block;
  size_t block_words;
  uint32_t *first;   /* start of an operation's dependents in `heads`; nops + 1 */
  uint32_t *heads;   /* dependents, by dependency */
  uint32_t *start;   /* number of dependencies and triggers that start it */
  uint32_t *table;   /* hash of SENDs and RECVs by (peer, tag): number + 1, or 0 */
  uint32_t mask;     /* entries of table - 1 */
  uint32_t required; /* operations that are not optional */
  /* The round. */
  uint32_t *missing; /* dependencies until it starts */
  uint32_t *queue;   /* READY tasks from queue_head on; each enters once a round */
  uint8_t *state;
  uint8_t *triggered;
  uint32_t queue_head, queue_end;
  uint32_t open;  /* number of required operations that are not done */
  uint64_t round; /* number of started rounds */
} mlfab__dag;

/* Makes an empty task graph; `env` must outlive it. Cannot fail. */
MLFAB__INTERNAL void mlfab__dag_init(mlfab__dag *dag, mlfab__env *env);
MLFAB__INTERNAL void mlfab__dag_free(mlfab__dag *dag);
/* Empties it for the next task graph, and keeps the memory. The count of rounds begins anew. */
MLFAB__INTERNAL void mlfab__dag_clear(mlfab__dag *dag);

/* Appends a copy of *op; *id_p is its number, counted from 0. Amortized O(1). Errors: MEMORY, LIMIT
 * (MLFAB__DAG_OPS_MAX); nothing has changed. */
MLFAB__INTERNAL int mlfab__dag_add(mlfab__dag *dag, const mlfab__dag_op *op, uint32_t *id_p);
/* Makes `op` wait for `dependency`; two calls count twice. Amortized O(1). Errors: ARGUMENT (no such operation), LIMIT
 * (MLFAB__DAG_EDGES_MAX), MEMORY; nothing has changed. */
MLFAB__INTERNAL int mlfab__dag_after(mlfab__dag *dag, uint32_t op, uint32_t dependency);
/* Checks the task graph and makes it ready to be started. O(ops + edges). Errors: ARGUMENT, with the
 * culprit and dag->flaw: a cycle (an operation on it), a need above the number of dependencies, a
 * (peer, tag) twice (the later one); MEMORY (culprit MLFAB__DAG_NONE). */
MLFAB__INTERNAL int mlfab__dag_seal(mlfab__dag *dag, uint32_t *culprit_p);

/* Begins a new round of a sealed task graph: all operations are WAITING, and those without dependencies READY. Forgets
 * operations of the former round that still run: mlfab__dag_done must not come for them. O(ops). */
MLFAB__INTERNAL void mlfab__dag_start(mlfab__dag *dag);
/* Returns 1 and the next operation that may run, first come first served, or 0. It is RUNNING until mlfab__dag_done,
 * which may come at once or later. O(1). */
MLFAB__INTERNAL int mlfab__dag_next(mlfab__dag *dag, uint32_t *id_p);
/* Ends a RUNNING operation. O(dependents). */
MLFAB__INTERNAL void mlfab__dag_done(mlfab__dag *dag, uint32_t id);
/* The outside starts operation `id`: counts once a round, and only if op.outside is set. O(1). */
MLFAB__INTERNAL void mlfab__dag_trigger(mlfab__dag *dag, uint32_t id);
/* Returns 1 if every operation that is not optional is done. O(1). */
MLFAB__INTERNAL int mlfab__dag_finished(const mlfab__dag *dag);
/* Returns an mlfab__dag_state. O(1). */
MLFAB__INTERNAL int mlfab__dag_state(const mlfab__dag *dag, uint32_t id);
/* Returns the RECV or RECV_REDUCE for the peer's message of this tag, or MLFAB__DAG_NONE. Sealed task graphs only.
 * O(1). */
MLFAB__INTERNAL uint32_t mlfab__dag_find_recv(const mlfab__dag *dag, uint32_t peer, uint32_t tag);

#endif
