/* map.h - a hash map from non-zero 64-bit keys to 32-bit values.
 *
 * Open addressing with linear probing; deletion shifts entries back, so there are no tombstones. */
#ifndef MLFAB__MAP_H
#define MLFAB__MAP_H

#include "env.h"

typedef struct mlfab__map_entry {
  uint64_t key; /* 0: empty */
  uint32_t value;
} mlfab__map_entry;

typedef struct mlfab__map {
  mlfab__map_entry *entries;
  uint32_t capacity; /* 0 or a power of two */
  uint32_t count;
} mlfab__map;

/* Sets key to value. Errors: MEMORY, with the map unchanged. */
MLFAB__INTERNAL int mlfab__map_put(mlfab__env *env, mlfab__map *map, uint64_t key, uint32_t value);
/* 1 and *value_p, or 0. */
MLFAB__INTERNAL int mlfab__map_get(const mlfab__map *map, uint64_t key, uint32_t *value_p);
MLFAB__INTERNAL void mlfab__map_remove(mlfab__map *map, uint64_t key);
MLFAB__INTERNAL void mlfab__map_free(mlfab__env *env, mlfab__map *map);

#endif
