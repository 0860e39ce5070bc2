/* lazy.c - the buffer of delayed pulls: see lazy.h. */
#include "lazy.h"

#include <stdlib.h>

MLFAB__INTERNAL uint64_t mlfab__lazy_at(int soft, uint64_t progress, uint64_t v_train) {
  return soft ? v_train + 1 : mlfab__max(progress, v_train + 1);
}

MLFAB__INTERNAL int mlfab__lazy_add(mlfab__env *env, mlfab__lazy *lazy, uint64_t at, uint64_t tag) {
  int code = mlfab__heap_push(&lazy->heap, env, at, lazy->next_order, tag);
  if (!code) lazy->next_order++;
  return code;
}

MLFAB__INTERNAL int mlfab__lazy_pop(mlfab__lazy *lazy, uint64_t v_train, uint64_t *tag_p) {
  const mlfab__heap_entry *first = mlfab__heap_top(&lazy->heap);
  if (!first || first->time > v_train) return 0;
  *tag_p = first->index;
  mlfab__heap_take(&lazy->heap, 0);
  return 1;
}

MLFAB__INTERNAL int mlfab__lazy_remove(mlfab__lazy *lazy, uint64_t tag) {
  for (uint32_t i = 0; i < lazy->heap.count; i++) {
    if (lazy->heap.entries[i].index != tag) continue;
    mlfab__heap_take(&lazy->heap, i);
    return 1;
  }
  return 0;
}

static int lazy_before(const void *a, const void *b) {
  const mlfab__heap_entry *x = a, *y = b;
  return (x->order > y->order) - (x->order < y->order);
}

/* An ascending list is a heap. */
MLFAB__INTERNAL void mlfab__lazy_wake_all(mlfab__lazy *lazy) {
  mlfab__heap *heap = &lazy->heap;
  for (uint32_t i = 0; i < heap->count; i++) heap->entries[i].time = 0;
  if (heap->count > 1) qsort(heap->entries, heap->count, sizeof *heap->entries, lazy_before);
}
