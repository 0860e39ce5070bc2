/* visit.h - shows the buffers of a call that does not begin: they are on a device. */
#ifndef MLFAB__VISIT_H
#define MLFAB__VISIT_H

#include "extent.h"

/* Gets a buffer, and returns the address that takes its place. */
typedef void *mlfab__extent_fn(void *user, const mlfab__extent *extent);

/* Shows the buffers of a call to `fn`, which may replace them. If it replaces any, the lists and options of the call
 * must belong to the caller. Errors: those of a call that a node would refuse. */
MLFAB__INTERNAL int mlfab__node_visit(mlfab_node *node, const mlfab_call *call,
                                      mlfab_request *request_p, mlfab__extent_fn *fn, void *user,
                                      mlfab_error *error);
/* For a call that failed before it began, as its caller knows: tells the other workers. Errors: AGAIN (later). */
MLFAB__INTERNAL int mlfab__node_forgo(mlfab_node *node, const mlfab_call *call,
                                      const mlfab_error *why, uint64_t now_ns);

#endif
