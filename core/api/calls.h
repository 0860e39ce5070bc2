/* calls.h - submitting a call to a node. */
#ifndef MLFAB__CALLS_H
#define MLFAB__CALLS_H

#include "../node/node.h"
#include "parts.h"

typedef struct mlfab__collective mlfab__collective; /* calls_coll.h */

/* A buffer of a call: memory of the caller that the library borrows. The call reads the first of the two stretches, and
 * has written the second when it has succeeded. */
typedef struct mlfab__extent {
  const void *at;
  uint64_t bytes;
  uint64_t in, in_bytes, out, out_bytes;
  uint32_t align; /* bytes of an element */
} mlfab__extent;
enum { MLFAB__EXTENT_IN = 1, MLFAB__EXTENT_OUT = 2 };

/* Gets a buffer, and returns the address that takes its place. */
typedef void *mlfab__extent_fn(void *user, const mlfab__extent *extent);

/* A call that is being submitted at node->now_ns. */
typedef struct mlfab__call_in {
  mlfab_node *node;
  const mlfab_call *call;
  mlfab_request *request_p;
  mlfab_error *error;
  mlfab__collective *shared; /* as of mlfab__node_submit, or NULL */
  /* Unless NULL: the call does not begin. `visit` gets its buffers, as far as they are what they should be; where it
   * returns another address, that is written into the call and its lists. */
  mlfab__extent_fn *visit;
  void *user;
  /* Unless NULL: the call does not begin, and never will, for this reason. Workers that wait for it are told. */
  const mlfab_error *forgone;
} mlfab__call_in;

/* Carries out a call, or begins it: 0, or the code of *in->error. */
typedef int mlfab__call_begin(const mlfab__call_in *in);

/* The calls of optional groups. */
MLFAB__INTERNAL mlfab__call_begin mlfab__calls_push;
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

/* Shows the buffers of a call to `fn`, which may replace them. The lists of the call, and its options, must be the
 * caller's own when it does. Errors: a call that no node would begin. */
MLFAB__INTERNAL int mlfab__node_visit(mlfab_node *node, const mlfab_call *call,
                                      mlfab_request *request_p, mlfab__extent_fn *fn, void *user,
                                      mlfab_error *error);
/* The caller has been told that this call failed before it began. Errors: AGAIN (later). */
MLFAB__INTERNAL int mlfab__node_forgo(mlfab_node *node, const mlfab_call *call,
                                      const mlfab_error *why, uint64_t now_ns);
/* What takes the place of a buffer that is read, written or both (MLFAB__EXTENT_*), as a whole. NULL stays. */
MLFAB__INTERNAL void *mlfab__call_extent(const mlfab__call_in *in, const void *at, uint64_t bytes,
                                         uint32_t align, int ways);
/* The same for the member `data` of the call. */
MLFAB__INTERNAL void mlfab__call_data(const mlfab__call_in *in, const mlfab__extent *extent);

/* The call's timeout_ns; 0: it does not say. *at_p is its place in the options, or 0: it is the descriptor's. */
MLFAB__INTERNAL uint64_t mlfab__call_timeout(const mlfab_call *call, size_t *at_p);

#endif
