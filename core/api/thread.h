/* thread.h - starts the threads of a context. */
#ifndef MLFAB__THREAD_H
#define MLFAB__THREAD_H

#include "../base/base.h"

#include <pthread.h>

/* Starts a thread that blocks all signals except faults, so signals go to the program's own threads. (A blocked fault
 * would kill the process without a call of the program's handler.) attributes may be NULL. Errors: IO. */
MLFAB__INTERNAL int mlfab__thread_start(pthread_t *thread, const pthread_attr_t *attributes,
                                        void *(*run)(void *argument), void *argument);

#endif
