/* heap.c - a priority queue of timers: see heap.h. */
#include "heap.h"

static int heap_less(const mlfab__heap_entry *a, const mlfab__heap_entry *b) {
  if (a->time != b->time) return a->time < b->time;
  if (a->order != b->order) return a->order < b->order;
  return a->index < b->index;
}

static void heap_place(mlfab__heap *heap, uint32_t at, mlfab__heap_entry entry) {
  heap->entries[at] = entry;
  if (heap->where) heap->where[entry.index] = at + 1;
}

/* Moves the entry at `at` up or down to its place. */
static void heap_settle(mlfab__heap *heap, uint32_t at) {
  mlfab__heap_entry entry = heap->entries[at];
  while (at > 0 && heap_less(&entry, &heap->entries[(at - 1) / 2])) {
    heap_place(heap, at, heap->entries[(at - 1) / 2]);
    at = (at - 1) / 2;
  }
  for (;;) {
    uint32_t child = 2 * at + 1;
    if (child >= heap->count) break;
    if (child + 1 < heap->count && heap_less(&heap->entries[child + 1], &heap->entries[child]))
      child++;
    if (!heap_less(&heap->entries[child], &entry)) break;
    heap_place(heap, at, heap->entries[child]);
    at = child;
  }
  heap_place(heap, at, entry);
}

MLFAB__INTERNAL int mlfab__heap_reserve(mlfab__heap *heap, mlfab__env *env, uint32_t room) {
  if (room <= heap->room) return 0;
  /* 2^30 keeps the arithmetic on positions inside 32 bits. */
  if (room > (1u << 30)) return MLFAB_ERR_MEMORY;
  mlfab__heap_entry *entries = mlfab__alloc_array(env, room, sizeof *entries);
  uint32_t *where = mlfab__alloc_array(env, room, sizeof *where);
  if (!entries || !where) {
    if (entries) mlfab__free(env, entries, room * sizeof *entries);
    if (where) mlfab__free(env, where, room * sizeof *where);
    return MLFAB_ERR_MEMORY;
  }
  if (heap->room) {
    memcpy(entries, heap->entries, heap->count * sizeof *entries);
    memcpy(where, heap->where, heap->room * sizeof *where);
  }
  uint32_t count = heap->count;
  mlfab__heap_free(heap, env);
  heap->entries = entries;
  heap->where = where;
  heap->count = count;
  heap->room = room;
  return 0;
}

MLFAB__INTERNAL void mlfab__heap_free(mlfab__heap *heap, mlfab__env *env) {
  if (heap->room) {
    mlfab__free(env, heap->entries, heap->room * sizeof *heap->entries);
    mlfab__free(env, heap->where, heap->room * sizeof *heap->where);
  }
  memset(heap, 0, sizeof *heap);
}

MLFAB__INTERNAL void mlfab__heap_put(mlfab__heap *heap, uint32_t index, uint64_t time,
                                     uint64_t order) {
  assert(index < heap->room);
  uint32_t at = heap->where[index] ? heap->where[index] - 1 : heap->count++;
  mlfab__heap_entry entry = {time, order, index};
  heap_place(heap, at, entry);
  heap_settle(heap, at);
}

MLFAB__INTERNAL int mlfab__heap_push(mlfab__heap *heap, mlfab__env *env, uint64_t time,
                                     uint64_t order, uint64_t tag) {
  mlfab__heap_entry *entries =
      mlfab__grow(env, heap->entries, &heap->room, (uint64_t)heap->count + 1, sizeof *entries);
  if (!entries) return MLFAB_ERR_MEMORY;
  heap->entries = entries;
  entries[heap->count] = (mlfab__heap_entry){time, order, tag};
  heap_settle(heap, heap->count++);
  return 0;
}

MLFAB__INTERNAL void mlfab__heap_take(mlfab__heap *heap, uint32_t at) {
  if (heap->where) heap->where[heap->entries[at].index] = 0;
  heap->count--;
  if (at == heap->count) return;
  heap_place(heap, at, heap->entries[heap->count]);
  heap_settle(heap, at);
}

MLFAB__INTERNAL void mlfab__heap_remove(mlfab__heap *heap, uint64_t index) {
  if (mlfab__heap_has(heap, index)) mlfab__heap_take(heap, heap->where[index] - 1);
}

MLFAB__INTERNAL const mlfab__heap_entry *mlfab__heap_top(const mlfab__heap *heap) {
  return heap->count ? heap->entries : NULL;
}

MLFAB__INTERNAL int mlfab__heap_has(const mlfab__heap *heap, uint64_t index) {
  return index < heap->room && heap->where[index] != 0;
}
