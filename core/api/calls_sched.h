/* calls_sched.h - the check of a schedule, and measurements of links, for code that composes nodes. */
#ifndef MLFAB__CALLS_SCHED_H
#define MLFAB__CALLS_SCHED_H

#include "calls.h"

/* The schedule with its defaults. Errors: ARGUMENT. */
MLFAB__INTERNAL int mlfab__schedule_complete(const mlfab_schedule *given, mlfab_schedule *schedule,
                                             mlfab_error *error);
/* Reports the network traffic since the last report to the node, at most twice a heartbeat. Traffic within the host
 * does not use a network link. */
MLFAB__INTERNAL void mlfab__calls_sched_measure(mlfab *ctx, uint64_t now);

#endif
