/* visit.h - the buffers of a call that does not begin: they are on a device. */
#ifndef MLFAB__VISIT_H
#define MLFAB__VISIT_H

#include "extent.h"

/* Gets a buffer, and returns the address that takes its place. */
typedef void *mlfab__extent_fn(void *user, const mlfab__extent *extent);

/* Shows the buffers of a call to `fn`, which may replace them. The lists of the call, and its options, must be the
 * caller's own when it does. Errors: a call that no node would begin. */
MLFAB__INTERNAL int mlfab__node_visit(mlfab_node *node, const mlfab_call *call,
                                      mlfab_request *request_p, mlfab__extent_fn *fn, void *user,
                                      mlfab_error *error);
/* The caller has been told that this call failed before it began. Errors: AGAIN (later). */
MLFAB__INTERNAL int mlfab__node_forgo(mlfab_node *node, const mlfab_call *call,
                                      const mlfab_error *why, uint64_t now_ns);

#endif
