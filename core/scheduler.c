/* scheduler.c - the scheduler role. See scheduler.h. */
#include "scheduler.h"
