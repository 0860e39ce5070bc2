/* calls.h - submitting a call to a node. */
#ifndef MLFAB__CALLS_H
#define MLFAB__CALLS_H

#include "../node/node.h"
#include "parts.h"

typedef struct mlfab__collective mlfab__collective; /* calls_coll.h */

/* A call that is being submitted at node->now_ns. */
typedef struct mlfab__call_in {
  mlfab_node *node;
  const mlfab_call *call;
  mlfab_request *request_p;
  mlfab_error *error;
  mlfab__collective *shared; /* as of mlfab__node_submit, or NULL */
} mlfab__call_in;

/* Carries out a call, or begins it: 0, or the code of *in->error. */
typedef int mlfab__call_begin(const mlfab__call_in *in);

/* The calls of optional groups. */
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_sched;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_sparse;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_reshard;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_coll;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_partial;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_stochastic;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_checkpoint;

/* As mlfab_node_submit. `shared`, for collectives, unless NULL: the caller waits and has an arena. A collective that
 * can run in the arena begins as an outside call, and *shared is filled. */
MLFAB__INTERNAL int mlfab__node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                       mlfab_request *request_p, mlfab__collective *shared);

#endif
