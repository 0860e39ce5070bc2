/* calls_push.h - pushes and pulls of a context. */
#ifndef MLFAB__CALLS_PUSH_H
#define MLFAB__CALLS_PUSH_H

#include "calls.h"
#include "context.h"

MLFAB__INTERNAL const mlfab__parts_push *mlfab__push_functions(void);

#endif
