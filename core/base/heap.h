/* heap.h - a priority queue of timers. Layer 0.
 *
 * A binary heap of (time, order, index), smallest first. Entries with equal times come out by `order`, so
 * that a caller that numbers its entries gets the same order on every machine. An index is in the heap at
 * most once; putting it again moves it, so a changed timer leaves no old entry. Room is reserved
 * beforehand, so that put cannot fail.
 *
 * Invariants: where[entries[i].index] == i + 1; no entry is smaller than its parent. */
#ifndef MLFAB__HEAP_H
#define MLFAB__HEAP_H

#include "base.h"
#include "env.h"

typedef struct mlfab__heap_entry {
  uint64_t time, order;
  uint32_t index; /* chosen by the caller */
} mlfab__heap_entry;

/* All zero is an empty heap without room. */
typedef struct mlfab__heap {
  mlfab__heap_entry *entries;
  uint32_t *where; /* by index: position + 1, or 0 if not in the heap */
  uint32_t count, room;
} mlfab__heap;

/* Makes room for the indices 0..room-1; never shrinks. Errors: MEMORY, with nothing changed. */
MLFAB__INTERNAL int mlfab__heap_reserve(mlfab__heap *heap, mlfab__env *env, uint32_t room);
MLFAB__INTERNAL void mlfab__heap_free(mlfab__heap *heap, mlfab__env *env);
/* Puts an index (below room), or moves it if present. O(log n). */
MLFAB__INTERNAL void mlfab__heap_put(mlfab__heap *heap, uint32_t index, uint64_t time,
                                     uint64_t order);
/* Removes an index, if present. O(log n). */
MLFAB__INTERNAL void mlfab__heap_remove(mlfab__heap *heap, uint32_t index);
/* The smallest entry, or NULL. Valid until the heap changes. */
MLFAB__INTERNAL const mlfab__heap_entry *mlfab__heap_top(const mlfab__heap *heap);
/* 1 when the index is in the heap. */
MLFAB__INTERNAL int mlfab__heap_has(const mlfab__heap *heap, uint32_t index);

#endif
