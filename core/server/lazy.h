/* lazy.h - the buffer of delayed pulls. Pure.
 *
 * A heap of tags, ordered by the V_train at which a pull is looked at next; tags with the same V_train come
 * out in the order in which they were added. The caller defines what a tag means.
 *
 * Source: FluentPS Alg. 1 (callbacks) and §III-C. Departs: lazy execution indexes by max(progress,
 * V_train), because a pull may arrive after its iteration was completed without its worker; pulls are
 * released after V_train has moved, not before, so that their condition is evaluated with the new value. */
#ifndef MLFAB__LAZY_H
#define MLFAB__LAZY_H

#include "../base/base.h"
#include "../base/heap.h"

/* All zero is an empty buffer. mlfab__heap_free frees the heap: an entry is looked at when V_train reaches its `time`, and its
 * `index` is the tag. */
typedef struct mlfab__lazy {
  mlfab__heap heap;
  uint64_t next_order;
} mlfab__lazy;

/* When to look again at a delayed pull of `progress` (a count: i + 1). Soft: when V_train moves. Lazy: when
 * its own iteration is complete. Always above v_train. */
MLFAB__INTERNAL uint64_t mlfab__lazy_at(int soft, uint64_t progress, uint64_t v_train);
/* O(log n). Errors: MEMORY, with nothing changed; never if an entry was taken out since the last add. */
MLFAB__INTERNAL int mlfab__lazy_add(mlfab__env *env, mlfab__lazy *lazy, uint64_t at, uint64_t tag);
/* Takes out the next entry whose `at` is at most v_train: 1, or 0 when there is none. O(log n). */
MLFAB__INTERNAL int mlfab__lazy_pop(mlfab__lazy *lazy, uint64_t v_train, uint64_t *tag_p);
/* Takes out the entry with this tag: 1, or 0 when there is none. O(n). */
MLFAB__INTERNAL int mlfab__lazy_remove(mlfab__lazy *lazy, uint64_t tag);
/* The conditions have changed: all entries become due, in the order of insertion. Pop them until none is
 * left; those that must still wait are added again above v_train, for which there is room. O(n log n). */
MLFAB__INTERNAL void mlfab__lazy_wake_all(mlfab__lazy *lazy);

#endif
