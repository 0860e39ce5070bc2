/* calls_coll.h - a collective on its way to the communicator. */
#ifndef MLFAB__CALLS_COLL_H
#define MLFAB__CALLS_COLL_H

#include "../coll/comm.h"
#include "context.h"

/* A collective as the communicator is asked for it. call.outside: it got a number, and its caller is to run
 * it in memory that processes of its host share, when mlfab__comm_outside says so. */
struct mlfab__collective {
  mlfab_vec one; /* call.vecs, where there is one buffer that is no list's */
  mlfab__comm_call call;
};

/* As mlfab__submit and mlfab__submit_call, of a collective, which may run in memory that is shared. */
MLFAB__INTERNAL int mlfab__coll_submit(mlfab *ctx, const mlfab_call *call, int waits,
                                       mlfab_request *request_p);
MLFAB__INTERNAL int mlfab__coll_call(mlfab *ctx, const mlfab_call *call, int waits,
                                     mlfab_request *request_p);
#define COLL_WAIT(call_kind, ...)           \
  CONTEXT_DESCRIBE(call_kind, __VA_ARGS__); \
  return mlfab__coll_call(ctx, &call, 1, NULL)
#define COLL_START(call_kind, request_p, ...) \
  CONTEXT_DESCRIBE(call_kind, __VA_ARGS__);   \
  return mlfab__coll_call(ctx, &call, 0, request_p)
#define COLL_AT_ONCE(call_kind, ...) COLL_START(call_kind, NULL, __VA_ARGS__)

/* --- shared.c --- */

/* Carries out a call that has a number and may go through the arena, or sees it go on with frames. Its request
 * is to be waited for in any case. */
MLFAB__INTERNAL void mlfab__shared_run(mlfab *ctx, mlfab_request request,
                                       const mlfab__comm_call *call);

/* What a context can do with that memory. */
MLFAB__INTERNAL const mlfab__context_sharing *mlfab__shared_memory(void);

#endif
