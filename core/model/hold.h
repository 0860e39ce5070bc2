/* hold.h - a server's state of one moment, held while updates go on.
 *
 * A holder (a checkpoint, the copy for a replica) may need w, sum and optimizer state of one moment for longer. There
 * may be several holders. A holder has references to the blocks. Optimizer state has no references: it is shared while
 * a holder names it. Code that writes to state calls store.own first.
 *
 *    the store's alone --hold--> shared --written--> the holders' (the store has a copy) --the last one gives--> freed
 *                                  |  \--written, no memory--> the store's; the holders are lost
 *                                  \--the last one gives--> the store's alone */
#ifndef MLFAB__HOLD_H
#define MLFAB__HOLD_H

#include "store.h"

/* All zero: of no store. The user owns the arrays. By position; NO_BLOCK or NULL: not held. */
typedef struct mlfab__holder {
  struct mlfab__holder *next; /* of the same store */
  uint32_t *w, *sum;
  uint8_t **s0, **s1; /* NULL: the store's state counts */
  uint32_t held;      /* number of positions that it has held */
  int lost; /* state was written while there was no memory for a copy: the moment is lost */
} mlfab__holder;

/* Does a holder name the state that the store has at this position? */
MLFAB__INTERNAL int mlfab__store_held(const mlfab__store *store, uint32_t position);
/* hold: adds a holder, new or empty, to the store, for up to `positions`. Reserves blocks for updates meanwhile.
 * Errors: MEMORY, with nothing changed. hold_slice: holds a slice (an index) in its present state; cannot fail.
 * give_slice: ends that; it ignores other slices. release: removes the holder, after all slices were given. */
MLFAB__INTERNAL int mlfab__store_hold(mlfab__env *env, mlfab__store *store, mlfab__holder *holder,
                                      uint32_t positions, int sums);
MLFAB__INTERNAL void mlfab__store_hold_slice(mlfab__store *store, mlfab__holder *holder,
                                             uint32_t slice);
MLFAB__INTERNAL void mlfab__store_give_slice(mlfab__env *env, mlfab__store *store,
                                             mlfab__holder *holder, uint32_t slice);
MLFAB__INTERNAL void mlfab__store_release(mlfab__store *store, mlfab__holder *holder);

#endif
