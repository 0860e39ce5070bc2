/* scheduler_link.h - links of servers to the scheduler: see scheduler_link.c. */
#ifndef MLFAB__SCHEDULER_LINK_H
#define MLFAB__SCHEDULER_LINK_H

#include "node.h"

/* For a node of a fabric with a scheduler. */
MLFAB__INTERNAL void mlfab__scheduler_link_attach(mlfab_node *node);

#endif
