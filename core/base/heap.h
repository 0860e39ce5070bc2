/* heap.h - a priority queue of timers.
 *
 * A binary heap of (time, order, index), smallest first. Entries with equal times come out by `order`: a caller that
 * numbers its entries gets the same order on every machine. An index is in the heap at most once; putting it again
 * moves it, so a changed timer leaves no old entry. Room is reserved beforehand, so put cannot fail. A heap that is
 * filled by push instead holds tags: they may have any value, and may be equal.
 *
 * Invariants: where[entries[i].index] == i + 1, unless where is NULL; no entry is smaller than its parent. */
#ifndef MLFAB__HEAP_H
#define MLFAB__HEAP_H

#include "base.h"
#include "env.h"

typedef struct mlfab__heap_entry {
  uint64_t time, order;
  uint64_t index; /* chosen by the caller: below 2^32, or a tag */
} mlfab__heap_entry;

/* All zero is an empty heap without room. */
typedef struct mlfab__heap {
  mlfab__heap_entry *entries;
  uint32_t *where; /* by index: position + 1, or 0 if not in the heap; NULL: tags */
  uint32_t count, room;
} mlfab__heap;

/* Makes room for the indices 0..room-1; never shrinks. Errors: MEMORY, with nothing changed. */
MLFAB__INTERNAL int mlfab__heap_reserve(mlfab__heap *heap, mlfab__env *env, uint32_t room);
MLFAB__INTERNAL void mlfab__heap_free(mlfab__heap *heap, mlfab__env *env);
/* Puts an index (below room), or moves it if present. O(log n). */
MLFAB__INTERNAL void mlfab__heap_put(mlfab__heap *heap, uint32_t index, uint64_t time,
                                     uint64_t order);
/* Removes an index, if present. O(log n). */
MLFAB__INTERNAL void mlfab__heap_remove(mlfab__heap *heap, uint64_t index);
/* The smallest entry, or NULL. Valid until the heap changes. */
MLFAB__INTERNAL const mlfab__heap_entry *mlfab__heap_top(const mlfab__heap *heap);
/* Adds a tag to a heap without reserved room. O(log n). Errors: MEMORY, with nothing changed. It succeeds always if an
 * entry was taken out since the last push. */
MLFAB__INTERNAL int mlfab__heap_push(mlfab__heap *heap, mlfab__env *env, uint64_t time,
                                     uint64_t order, uint64_t tag);
/* Takes out entries[at]. O(log n). */
MLFAB__INTERNAL void mlfab__heap_take(mlfab__heap *heap, uint32_t at);
/* 1 when the index is in the heap. */
MLFAB__INTERNAL int mlfab__heap_has(const mlfab__heap *heap, uint64_t index);

#endif
