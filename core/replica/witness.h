/* witness.h - the scheduler's third vote on every shard (vote.h): it decides which of two copies serves when they do not
 * hear each other. Layer 4. */
#ifndef MLFAB__WITNESS_H
#define MLFAB__WITNESS_H

#include "voter.h"

/* Adds the role to a node that is only a scheduler. disk: of votes, or NULL. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__witness_attach(mlfab_node *node, const mlfab__voter_disk *disk);

#endif
