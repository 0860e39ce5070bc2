/* calls_sched.h - the check of a schedule, for code that composes nodes. */
#ifndef MLFAB__CALLS_SCHED_H
#define MLFAB__CALLS_SCHED_H

#include "calls.h"

/* The schedule with its defaults. Errors: ARGUMENT. */
MLFAB__INTERNAL int mlfab__schedule_complete(const mlfab_schedule *given, mlfab_schedule *schedule,
                                             mlfab_error *error);

#endif
