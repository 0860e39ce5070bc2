/* system.h - threads and the clock of the system, for `api` and the transports only. */
#ifndef MLFAB__SYSTEM_H
#define MLFAB__SYSTEM_H

#include "base.h"

#include <pthread.h>

/* Starts a thread that blocks all signals except faults, so signals go to the program's own threads. (A blocked fault
 * would kill the process without a call of the program's handler.) attributes may be NULL. Errors: IO. */
MLFAB__INTERNAL int mlfab__thread_start(pthread_t *thread, const pthread_attr_t *attributes,
                                        void *(*run)(void *argument), void *argument);
/* The monotonic clock, in the form of mlfab_env.clock; `user` is not used. */
MLFAB__INTERNAL uint64_t mlfab__monotonic(void *user);

#endif
