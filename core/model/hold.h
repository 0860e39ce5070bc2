/* hold.h - a server's state of one moment, held while updates go on. Layer 3.
 *
 * A holder (a checkpoint, the copy for a replica) may need w, sum and optimizer state of one moment for longer.
 * There may be several. A holder has references to the blocks. State has no references: it is shared while a holder
 * names it, and whoever writes to state calls store.own first.
 *
 *    the store's alone --hold--> shared --written--> the holders' (the store has a copy) --the last one gives--> freed
 *                                  |  \--written, no memory--> the store's; the holders are lost
 *                                  \--the last one gives--> the store's alone */
#ifndef MLFAB__HOLD_H
#define MLFAB__HOLD_H

#include "store.h"

/* All zero: of no store. The arrays belong to the user; by position: NO_BLOCK, NULL: not held. */
typedef struct mlfab__holder {
  struct mlfab__holder *next; /* of the same store */
  uint32_t *w, *sum;
  uint8_t **s0, **s1; /* NULL where the store's are */
  uint32_t held;      /* number of positions that it has had */
  int lost; /* without memory for a copy some state was written to: it holds no moment any more */
} mlfab__holder;

/* Does a holder name the state that the store has at this position? */
MLFAB__INTERNAL int mlfab__store_held(const mlfab__store *store, uint32_t position);
/* hold: the holder, new or empty, becomes one of the store, and will hold up to `positions` (reserves blocks for the
 * updates meanwhile. Errors: MEMORY, nothing changed). hold_slice: it holds a slice (an index) as it is now; cannot
 * fail. give_slice: no longer; a slice that it does not hold is ignored. release: the end, after all are given. */
MLFAB__INTERNAL int mlfab__store_hold(mlfab__env *env, mlfab__store *store, mlfab__holder *holder,
                                      uint32_t positions, int sums);
MLFAB__INTERNAL void mlfab__store_hold_slice(mlfab__store *store, mlfab__holder *holder,
                                             uint32_t slice);
MLFAB__INTERNAL void mlfab__store_give_slice(mlfab__env *env, mlfab__store *store,
                                             mlfab__holder *holder, uint32_t slice);
MLFAB__INTERNAL void mlfab__store_release(mlfab__store *store, mlfab__holder *holder);

#endif
