/* calls.h - submitting a call to a node. */
#ifndef MLFAB__CALLS_H
#define MLFAB__CALLS_H

#include "../node/node.h"
#include "parts.h"

typedef struct mlfab__collective mlfab__collective; /* calls_coll.h */

/* Flags of a kind of call. */
enum {
  CALLS_AT_ONCE = 1,  /* has no request */
  CALLS_UNASKED = 2,  /* request_p may be NULL */
  CALLS_EARLY = 4,    /* allowed before the fabric is complete */
  CALLS_OPENS = 8,    /* needs id_p */
  CALLS_BUFFERS = 16, /* borrows buffers */
  CALLS_MEETS = 32    /* other workers wait for it */
};

/* A call that is being submitted at node->now_ns. */
typedef struct mlfab__call_in {
  mlfab_node *node;
  const mlfab_call *call;
  mlfab_request *request_p;
  mlfab_error *error;
  mlfab__collective *shared; /* as of mlfab__node_submit, or NULL */
  /* If set, the call does not begin: it shows its buffers as far as they fit (extent.h). */
  const struct mlfab__call_visit *visit;
  /* If set, the call will never begin, for this reason. Workers that wait for it are told. */
  const mlfab_error *forgone;
} mlfab__call_in;

/* Carries out a call, or begins it. Returns 0, or the code of *in->error. */
typedef int mlfab__call_begin(const mlfab__call_in *in);

/* Checks the call; the role checks the members of its kind. *begin_p carries it out. Errors: ARGUMENT. */
MLFAB__INTERNAL int mlfab__calls_check(const mlfab__call_in *in, mlfab__call_begin **begin_p,
                                       uint32_t *flags_p);

/* The calls of optional groups. */
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_push;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_sched;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_sparse;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_reshard;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_coll;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_partial;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_stochastic;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_checkpoint;
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_lend;

/* As mlfab_node_submit. shared: for collectives, or NULL; if set, the caller waits and has an arena. A collective that
 * can run in the arena begins as an outside call, and fills *shared. */
MLFAB__INTERNAL int mlfab__node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                       mlfab_request *request_p, mlfab__collective *shared);

#endif
