/*
 * mlfab_partial.h - collectives that do not wait for all workers: partial reductions, stochastic reductions, task
 * graphs.
 *
 * The rules of mlfab.h and of its section 10 apply: return values, deadlines, failures, epochs. mlfab.c has the code.
 *
 * Limits: 16 objects (partial reductions, stochastic reductions and task graphs) together; 1,048,576 operations of a
 * task graph, and edges of a graph. Beyond them: MLFAB_ERR_LIMIT.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef MLFAB_PARTIAL_H
#define MLFAB_PARTIAL_H

#include "mlfab.h"

#ifdef __cplusplus
extern "C" {
#endif

/* --- partial reductions (eagerSGD) ---
 *
 * A partial reduction starts before all workers have called, and adds the contributions so far. SOLO starts when the
 * first worker calls; MAJORITY when a worker drawn from the seed calls (on average half of the workers have called
 * then); QUORUM when `quorum` workers have called. The progress threads of the other workers give what these had not
 * yet contributed, or zeros. A late contribution is carried into the next round: each is added once. A call of a worker
 * is a step; steps are counted from 0. Reductions are rounds, counted from 0 on all workers. Step s waits until round s
 * is over, so the call of a worker that lags returns at once. A worker with MLFAB_PROGRESS_HAND takes part only inside
 * calls, and the others' rounds wait for it.
 */
enum mlfab_partial_mode {
  MLFAB_PARTIAL_SOLO = 1,
  MLFAB_PARTIAL_MAJORITY = 2,
  MLFAB_PARTIAL_QUORUM = 3
};

enum mlfab_partial_results {
  /* A call returns the newest round's result; older results are overwritten. Workers that skip results have models
   * that drift apart: average the models now and then with mlfab_allreduce and MLFAB_OP_MEAN (eagerSGD §5). */
  MLFAB_PARTIAL_LATEST = 0,
  /* Every worker gets every round's result once, in order. A worker that has queue_max results waiting holds up the
   * next round. */
  MLFAB_PARTIAL_QUEUED = 1
};

typedef struct mlfab_partial_options {
  uint32_t size;
  uint32_t mode; /* MLFAB_PARTIAL_SOLO ... */
  /* QUORUM: 1..live workers when it opens; later capped at the number of live workers */
  uint32_t quorum;
  uint32_t results;   /* MLFAB_PARTIAL_LATEST, MLFAB_PARTIAL_QUEUED */
  uint32_t queue_max; /* 0: 8 */
  uint32_t op; /* MLFAB_OP_SUM or MLFAB_OP_MEAN (divided by the number of workers that take part) */
  uint32_t algorithm; /* of the exchange: MLFAB_ALGORITHM_*, but not PLANNED */
  /* 1: a contribution with NaN or infinity is refused (NOT_FINITE); nothing has changed */
  uint32_t refuse_nan;
  uint64_t seed;       /* draws the worker of MAJORITY, and who counts a QUORUM; 0: the config's */
  uint64_t timeout_ns; /* of mlfab_partial_open */
} mlfab_partial_options;

/* What a step got. */
typedef struct mlfab_partial_info {
  uint32_t size;
  uint32_t included;   /* 1: this call's data is in the result */
  uint64_t round;      /* of the result */
  uint64_t step;       /* this call's number */
  uint32_t active;     /* workers whose call of this round is in the result */
  uint32_t workers;    /* that took part */
  uint32_t stale;      /* calls of this worker that are in no result yet */
  uint64_t bitmap[16]; /* bit r: rank r was active; only ranks up to 1,023 */
} mlfab_partial_info;

/* Opens a partial reduction of `count` elements; a collective that waits for all workers. *id_p names it.
 * Errors: ARGUMENT (quorum 0 or above the number of workers, ...), DTYPE, UNSUPPORTED (mean of MLFAB_I64), LIMIT (16
 * objects are open), MEMORY, and failures (MISMATCH: the options differ). Memory: 4 arrays, with QUEUED queue_max more.
 */
MLFAB_API int mlfab_partial_open(mlfab *ctx, uint64_t count, int dtype,
                                 const mlfab_partial_options *options, uint32_t *id_p);
/* A step: contributes `data`, and overwrites it with a result. One at a time for an object. info_p may be NULL; else
 * set its size.
 * Errors: ARGUMENT, NOT_FINITE, AGAIN (a step or a flush is under way), STATE (after mlfab_finish), and failures.
 * After a failure the library keeps the contribution for the next round, unless it is in a result that some worker
 * has. Steps and rounds go on, at the first round that no worker has a result of; queued results are discarded. */
MLFAB_API int mlfab_partial_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                   mlfab_partial_info *info_p);
/* The same without waiting; info_p and data are borrowed until the request has ended. */
MLFAB_API int mlfab_partial_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                  mlfab_partial_info *info_p, mlfab_request *request_p);
/* The sum (or mean) of all workers' contributions that are in no result yet, into `data`: for the end of a training. A
 * full allreduce; every worker calls it. After a failure the library keeps this worker's contribution, unless it is in
 * a sum that some worker has. Workers agree on that before they repeat the flush, as after any failure. Errors: of a
 * step.
 * Memory: one array. */
MLFAB_API int mlfab_partial_flush(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns);
/* Closes it on this worker. Later rounds of others fail and name this worker, so call a flush or a barrier before.
 * Errors: ARGUMENT (no such id), STATE (a step or a flush is under way). */
MLFAB_API int mlfab_partial_close(mlfab *ctx, uint32_t id);

/* --- stochastic reductions (ASAP) ---
 *
 * A worker sends its array to the few workers that a graph names, and takes the mean of its own and of those that it
 * receives. With NOTIFY_ACK it waits for the array of every sender in the same iteration, and acknowledges those it
 * has used; nobody waits for the whole fabric. BSP and ASYNC are there for comparison: they take the arrays that are
 * complete when they look, BSP after a barrier (which does not wait for arrays), ASYNC at once.
 */
enum mlfab_graph_kind {
  MLFAB_GRAPH_ALL = 1,       /* all to all */
  MLFAB_GRAPH_EXPANDER = 2,  /* i to i + 1 and i + round(sqrt N): ASAP's root expander */
  MLFAB_GRAPH_CHAIN = 3,     /* i to i + 1 */
  MLFAB_GRAPH_RING = 4,      /* i to i + 1 and i - 1 */
  MLFAB_GRAPH_HYPERCUBE = 5, /* N a power of 2 */
  MLFAB_GRAPH_REGULAR = 6,   /* random, `degree` out and in, from the seed */
  MLFAB_GRAPH_STAR = 7,      /* all to 0 and back: only for mlfab_graph_check, not for reductions */
  MLFAB_GRAPH_USER = 8       /* the caller's edges */
};

typedef struct mlfab_edge {
  uint32_t from, to;
} mlfab_edge;

typedef struct mlfab_graph_info {
  uint32_t in_degree; /* counting the node itself; 0: not the same for all nodes */
  uint32_t connected; /* 1: strongly */
  uint32_t doubly_stochastic;
  uint32_t edges; /* without duplicates and loops */
  double gap;     /* 1 - sigma_2 of the averaging matrix */
} mlfab_graph_info;

/* Writes the edges of a graph: *edges_p of them, at most `room`. degree and seed: REGULAR. Errors: ARGUMENT (nodes 0 or
 * above 1,024, a hypercube of another size, degree), LIMIT (room is too small; *edges_p is the number needed), MEMORY.
 */
MLFAB_API int mlfab_graph_build(uint32_t kind, uint32_t nodes, uint32_t degree, uint64_t seed,
                                mlfab_edge *edges, uint32_t room, uint32_t *edges_p);
/* Examines a graph. *info_p is set whenever the edges are in range. error_p may be NULL. Errors: ARGUMENT with the
 * edge that is out of range, the node that cannot be reached, the node whose in-degree differs, or a gap of 0;
 * MEMORY. Cost: nodes^3. */
MLFAB_API int mlfab_graph_check(const mlfab_edge *edges, uint32_t n, uint32_t nodes,
                                mlfab_graph_info *info_p, mlfab_error *error_p);

enum mlfab_stochastic_mode {
  MLFAB_STOCHASTIC_NOTIFY_ACK = 1,
  MLFAB_STOCHASTIC_BSP = 2,
  MLFAB_STOCHASTIC_ASYNC = 3
};

typedef struct mlfab_stochastic_options {
  uint32_t size;
  uint32_t graph;          /* MLFAB_GRAPH_*, not STAR */
  uint32_t degree;         /* REGULAR */
  uint32_t mode;           /* MLFAB_STOCHASTIC_NOTIFY_ACK ...; 0: that */
  const mlfab_edge *edges; /* USER: between worker ranks; read during the call */
  uint32_t nedges;
  uint32_t refuse_nan; /* 1: the call refuses NaN and infinity (NOT_FINITE); nothing has changed */
  uint64_t seed;       /* REGULAR; 0: the config's */
  uint64_t timeout_ns; /* of mlfab_stochastic_open */
} mlfab_stochastic_options;

typedef struct mlfab_stochastic_info {
  uint32_t size;
  uint32_t senders; /* in-degree without the worker itself */
  uint32_t whole;   /* inputs averaged: complete, and not used before */
  uint32_t torn;    /* inputs that were being written (BSP, ASYNC) */
  uint32_t stale;   /* inputs that were used before or had not come */
  uint32_t reserved;
  uint64_t iteration;  /* that this worker has finished, from 1 */
  uint64_t sent_bytes; /* by this call */
} mlfab_stochastic_info;

/* Opens a stochastic reduction of `count` elements (F32 or F64); a collective, with the same options on all workers.
 * *id_p names it. The graph is over the workers that take part, in the order of members. After a failure it is built
 * again over those that are left; of USER's edges it keeps those between them. All in-degrees must be equal.
 * Out-degrees may differ, but then the mean of all models drifts towards workers that send to more (see
 * doubly_stochastic).
 * Errors: ARGUMENT (as mlfab_graph_check), DTYPE, LIMIT, MEMORY, UNSUPPORTED, and failures (MISMATCH: the options
 * differ).
 * Memory: one array for each sender, and one more. */
MLFAB_API int mlfab_stochastic_open(mlfab *ctx, uint64_t count, int dtype,
                                    const mlfab_stochastic_options *options, uint32_t *id_p);
/* One iteration: sends `data` to this worker's receivers, and replaces it by the mean of itself and the received
 * arrays. One at a time for an object. info_p may be NULL; else set its size. With any error `data` is unchanged.
 * Errors: ARGUMENT (also: the workers that are left have no valid graph), NOT_FINITE, AGAIN (one is under way), and
 * failures; TIMEOUT names a rank that has not called.
 * Cost: the array once to each receiver; with NOTIFY_ACK one small message back from each, with BSP one to every
 * worker. */
MLFAB_API int mlfab_stochastic_reduce(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                      mlfab_stochastic_info *info_p);
MLFAB_API int mlfab_stochastic_start(mlfab *ctx, uint32_t id, void *data, uint64_t timeout_ns,
                                     mlfab_stochastic_info *info_p, mlfab_request *request_p);
/* Closes it on this worker. Begun messages still go out. Iterations of others beyond this worker's last fail and name
 * it, except with ASYNC: make the same number of calls everywhere. Errors: ARGUMENT, STATE (one is under way). */
MLFAB_API int mlfab_stochastic_close(mlfab *ctx, uint32_t id);

/* --- task graphs ---
 *
 * A directed acyclic graph of the user's operations (eagerSGD §4). The thread that drives the context executes it. In
 * each round an operation runs once: when all operations that it comes after are done, or `need` of them (1: OR).
 * Every worker makes its own part; sends and receives match by (rank, tag).
 */
typedef struct mlfab_dag mlfab_dag;
/* Non-zero fails the task graph on all workers (MLFAB_ERR_CALLBACK). It may call mlfab_dag_trigger. */
typedef int (*mlfab_dag_compute_fn)(void *user, uint64_t round);

enum mlfab_dag_flags {
  MLFAB_DAG_OUTSIDE = 1, /* mlfab_dag_trigger counts as one more operation that it comes after */
  MLFAB_DAG_OPTIONAL = 2 /* a round may end without it */
};

/* Makes an empty task graph. Sends nothing. */
MLFAB_API int mlfab_dag_create(mlfab *ctx, mlfab_dag **dag_p);
/* Each adds an operation; *op_p is its number. The memory is the caller's, borrowed until the task graph is closed.
 * At most 1 GiB a message. mlfab_dag_nop only waits for other operations. Errors: ARGUMENT, RANK_RANGE, LIMIT, STATE
 * (it is open), MEMORY; of recv_reduce also DTYPE and UNSUPPORTED (mean). */
MLFAB_API int mlfab_dag_send(mlfab_dag *dag, int32_t rank, uint32_t tag, const void *data,
                             uint64_t bytes, uint32_t *op_p);
MLFAB_API int mlfab_dag_recv(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data, uint64_t bytes,
                             uint32_t *op_p);
MLFAB_API int mlfab_dag_recv_reduce(mlfab_dag *dag, int32_t rank, uint32_t tag, void *data,
                                    uint64_t count, int dtype, int op, uint32_t *op_p);
MLFAB_API int mlfab_dag_compute(mlfab_dag *dag, mlfab_dag_compute_fn fn, void *user,
                                uint32_t *op_p);
MLFAB_API int mlfab_dag_nop(mlfab_dag *dag, uint32_t *op_p);
/* `op` comes after `dependency`. */
MLFAB_API int mlfab_dag_after(mlfab_dag *dag, uint32_t op, uint32_t dependency);
/* need: how many dependencies must be done before it runs; 0: all. flags: MLFAB_DAG_*. */
MLFAB_API int mlfab_dag_set(mlfab_dag *dag, uint32_t op, uint32_t need, uint32_t flags);
/* Checks it and opens it; a collective. persistent 1: each round begins by itself after the last; it then needs an
 * operation that waits for a trigger or a message. Errors: ARGUMENT with the operation (a cycle, need above its
 * dependencies, a (rank, tag) twice), STATE, LIMIT, and failures. */
MLFAB_API int mlfab_dag_open(mlfab_dag *dag, int persistent, uint64_t timeout_ns);
/* Begins the next round (not of a persistent one); each worker counts rounds from 0. Errors: STATE (not open,
 * persistent), AGAIN (a round is under way), PEER_DEAD (a rank of the graph no longer takes part), and failures. */
MLFAB_API int mlfab_dag_start(mlfab_dag *dag, uint64_t timeout_ns, mlfab_request *request_p);
/* Waits until `round` is over. Errors: STATE (it was not begun, or a failure has ended it), and failures. */
MLFAB_API int mlfab_dag_wait(mlfab_dag *dag, uint64_t round, uint64_t timeout_ns);
/* Triggers an OUTSIDE operation in the present round; a second time in a round does nothing. Errors: ARGUMENT (no
 * such operation, or not OUTSIDE), STATE (no round is under way). */
MLFAB_API int mlfab_dag_trigger(mlfab_dag *dag, uint32_t op);
/* Closes it on this worker and frees it; *dag_p becomes NULL. A round under way fails everywhere (CANCELLED), and
 * others cannot go on with it (PEER_CLOSED). Call it before mlfab_close and mlfab_abandon: afterwards the task graph
 * must not be used, not even here, and its memory is lost. Errors: ARGUMENT (dag_p is NULL), CLOSED (*dag_p is NULL).
 */
MLFAB_API int mlfab_dag_close(mlfab_dag **dag_p);

#ifdef __cplusplus
}
#endif
#endif /* MLFAB_PARTIAL_H */
