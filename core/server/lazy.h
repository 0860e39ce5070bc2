/* lazy.h - the buffer of delayed pulls. Layer 2, pure.
 *
 * A heap of tags by the V_train at which a pull is looked at next; equal ones come out in the order
 * in which they were added. What a tag means is the caller's.
 *
 * Source: FluentPS Alg. 1 (callbacks) and §III-C. Departs: lazy execution indexes by max(progress,
 * V_train), as a pull may come after its iteration was completed without its worker; pulls are
 * released after V_train has moved, not before, so that what is asked again sees the new one. */
#ifndef MLFAB__LAZY_H
#define MLFAB__LAZY_H

#include "../base/base.h"
#include "../base/env.h"

typedef struct mlfab__delayed {
  uint64_t at;    /* looked at when V_train reaches this */
  uint64_t order; /* of coming */
  uint64_t tag;
} mlfab__delayed;

/* All zero is an empty buffer. entries[0..count-1] is a heap: anybody may read the tags. */
typedef struct mlfab__lazy {
  mlfab__delayed *entries;
  uint32_t count, room;
  uint64_t next_order;
} mlfab__lazy;

/* When to look at a delayed pull of `progress` (a count: i + 1): soft: when V_train moves; lazy:
 * when its own iteration is complete. Always above v_train. */
MLFAB__INTERNAL uint64_t mlfab__lazy_at(int soft, uint64_t progress, uint64_t v_train);
/* O(log n). Errors: MEMORY, and nothing has changed; never if one was taken out since the last
 * add. */
MLFAB__INTERNAL int mlfab__lazy_add(mlfab__env *env, mlfab__lazy *lazy, uint64_t at, uint64_t tag);
/* Takes the next one out whose `at` is v_train or less: 1, or 0 when there is none. O(log n). */
MLFAB__INTERNAL int mlfab__lazy_pop(mlfab__lazy *lazy, uint64_t v_train, uint64_t *tag_p);
/* Takes out the one with this tag: 1, or 0 when there is none. O(n). */
MLFAB__INTERNAL int mlfab__lazy_remove(mlfab__lazy *lazy, uint64_t tag);
/* The conditions have changed: all are due, in the order of coming. Pop them until there is none;
 * those that still have to wait are added again above v_train, for which there is room. O(n). */
MLFAB__INTERNAL void mlfab__lazy_wake_all(mlfab__lazy *lazy);
MLFAB__INTERNAL void mlfab__lazy_free(mlfab__env *env, mlfab__lazy *lazy);

#endif
