/* calls_coll.h - passes a collective to the communicator. */
#ifndef MLFAB__CALLS_COLL_H
#define MLFAB__CALLS_COLL_H

#include "../coll/comm.h"
#include "context.h"

/* A collective in the communicator's form. call.outside: it has a number, and its caller runs it in the arena if
 * mlfab__comm_outside tells so. */
struct mlfab__collective {
  mlfab_vec one; /* call.vecs of a call without a list */
  mlfab__comm_call call;
};

/* As mlfab__submit and mlfab__submit_call, for a collective, which may run in the arena. */
MLFAB__INTERNAL int mlfab__coll_submit(mlfab *ctx, const mlfab_call *call, int waits,
                                       mlfab_request *request_p);
MLFAB__INTERNAL int mlfab__coll_call(mlfab *ctx, const mlfab_call *call, int waits,
                                     mlfab_request *request_p);
/* Opens an object, and then calls `next` with its id: only if opening succeeds, or only if it fails. */
MLFAB__INTERNAL int mlfab__coll_open(mlfab *ctx, const mlfab_call *call, uint32_t next,
                                     int if_open);
#define COLL_WAIT(call_kind, ...)           \
  CONTEXT_DESCRIBE(call_kind, __VA_ARGS__); \
  return mlfab__coll_call(ctx, &call, 1, NULL)
#define COLL_START(call_kind, request_p, ...) \
  CONTEXT_DESCRIBE(call_kind, __VA_ARGS__);   \
  return mlfab__coll_call(ctx, &call, 0, request_p)
#define COLL_AT_ONCE(call_kind, ...) COLL_START(call_kind, NULL, __VA_ARGS__)

/* --- shared.c --- */

/* Runs a call that has a number in the arena, or leaves it to frames. Its caller waits for its request anyway. */
MLFAB__INTERNAL void mlfab__shared_run(mlfab *ctx, mlfab_request request,
                                       const mlfab__comm_call *call);

/* The functions for a context. */
MLFAB__INTERNAL const mlfab__context_sharing *mlfab__shared_memory(void);

#endif
