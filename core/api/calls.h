/* calls.h - a node: how a call is submitted. */
#ifndef MLFAB__CALLS_H
#define MLFAB__CALLS_H

#include "../node/node.h"

/* A collective as the communicator is asked for it. call.outside: it got a number, and its caller is to run
 * it in memory that processes of its host share, when mlfab__comm_outside says so. */
typedef struct mlfab__collective {
  mlfab_vec one; /* call.vecs, where there is one buffer that is no list's */
  mlfab__comm_call call;
} mlfab__collective;

/* As mlfab_node_submit. `shared`, unless NULL: the caller waits, and has such memory: what has a form there is
 * begun as an outside call, and *shared is filled. Else its call.outside is 0. */
MLFAB__INTERNAL int mlfab__node_submit(mlfab_node *node, const mlfab_call *call, uint64_t now_ns,
                                       mlfab_request *request_p, mlfab__collective *shared);

#endif
