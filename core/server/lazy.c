/* lazy.c - the buffer of delayed pulls: see lazy.h. A binary heap, smallest (at, order) first. */
#include "lazy.h"

enum { LAZY_ROOM = 16 }; /* initial */

static int lazy_less(const mlfab__delayed *a, const mlfab__delayed *b) {
  return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void lazy_rise(mlfab__lazy *lazy, uint32_t at) {
  mlfab__delayed entry = lazy->entries[at];
  while (at > 0 && lazy_less(&entry, &lazy->entries[(at - 1) / 2])) {
    lazy->entries[at] = lazy->entries[(at - 1) / 2];
    at = (at - 1) / 2;
  }
  lazy->entries[at] = entry;
}

static void lazy_sink(mlfab__lazy *lazy, uint32_t at) {
  mlfab__delayed entry = lazy->entries[at];
  for (;;) {
    uint32_t child = 2 * at + 1;
    if (child >= lazy->count) break;
    if (child + 1 < lazy->count && lazy_less(&lazy->entries[child + 1], &lazy->entries[child]))
      child++;
    if (!lazy_less(&lazy->entries[child], &entry)) break;
    lazy->entries[at] = lazy->entries[child];
    at = child;
  }
  lazy->entries[at] = entry;
}

static void lazy_take_out(mlfab__lazy *lazy, uint32_t at) {
  lazy->count--;
  if (at == lazy->count) return;
  lazy->entries[at] = lazy->entries[lazy->count];
  lazy_rise(lazy, at);
  lazy_sink(lazy, at);
}

static int lazy_grow(mlfab__env *env, mlfab__lazy *lazy) {
  /* 2^30 keeps the arithmetic on positions inside 32 bits. */
  if (lazy->room >= (1u << 30)) return MLFAB_ERR_MEMORY;
  uint32_t room = lazy->room ? 2 * lazy->room : LAZY_ROOM;
  mlfab__delayed *entries = mlfab__alloc_array(env, room, sizeof *entries);
  if (!entries) return MLFAB_ERR_MEMORY;
  if (lazy->count) memcpy(entries, lazy->entries, lazy->count * sizeof *entries);
  if (lazy->room) mlfab__free(env, lazy->entries, lazy->room * sizeof *lazy->entries);
  lazy->entries = entries;
  lazy->room = room;
  return 0;
}

MLFAB__INTERNAL uint64_t mlfab__lazy_at(int soft, uint64_t progress, uint64_t v_train) {
  return soft ? v_train + 1 : mlfab__max(progress, v_train + 1);
}

MLFAB__INTERNAL int mlfab__lazy_add(mlfab__env *env, mlfab__lazy *lazy, uint64_t at, uint64_t tag) {
  if (lazy->count == lazy->room) {
    int code = lazy_grow(env, lazy);
    if (code) return code;
  }
  mlfab__delayed entry = {at, lazy->next_order++, tag};
  lazy->entries[lazy->count++] = entry;
  lazy_rise(lazy, lazy->count - 1);
  return 0;
}

MLFAB__INTERNAL int mlfab__lazy_pop(mlfab__lazy *lazy, uint64_t v_train, uint64_t *tag_p) {
  if (lazy->count == 0 || lazy->entries[0].at > v_train) return 0;
  *tag_p = lazy->entries[0].tag;
  lazy_take_out(lazy, 0);
  return 1;
}

MLFAB__INTERNAL int mlfab__lazy_remove(mlfab__lazy *lazy, uint64_t tag) {
  for (uint32_t i = 0; i < lazy->count; i++) {
    if (lazy->entries[i].tag != tag) continue;
    lazy_take_out(lazy, i);
    return 1;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__lazy_wake_all(mlfab__lazy *lazy) {
  for (uint32_t i = 0; i < lazy->count; i++) lazy->entries[i].at = 0;
  for (uint32_t i = lazy->count / 2; i > 0; i--) lazy_sink(lazy, i - 1);
}

MLFAB__INTERNAL void mlfab__lazy_free(mlfab__env *env, mlfab__lazy *lazy) {
  if (lazy->room) mlfab__free(env, lazy->entries, lazy->room * sizeof *lazy->entries);
  memset(lazy, 0, sizeof *lazy);
}
