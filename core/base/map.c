/* map.c - a hash map from 64-bit keys to 32-bit values. See map.h. */
#include "map.h"

static uint32_t map_slot(const mlfab__map *map, uint64_t key) {
  return (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & (map->capacity - 1);
}

/* The entry of key, or the empty entry to put it in. There is always an empty entry. */
static uint32_t map_find(const mlfab__map *map, uint64_t key) {
  uint32_t i = map_slot(map, key);
  while (map->entries[i].key != 0 && map->entries[i].key != key) i = (i + 1) & (map->capacity - 1);
  return i;
}

static int map_grow(mlfab__env *env, mlfab__map *map) {
  mlfab__map bigger = {NULL, map->capacity ? map->capacity * 2 : 16, map->count};
  bigger.entries = mlfab__alloc_array(env, bigger.capacity, sizeof *bigger.entries);
  if (!bigger.entries) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < map->capacity; i++) {
    if (map->entries[i].key != 0)
      bigger.entries[map_find(&bigger, map->entries[i].key)] = map->entries[i];
  }
  mlfab__map_free(env, map);
  *map = bigger;
  return 0;
}

MLFAB__INTERNAL int mlfab__map_put(mlfab__env *env, mlfab__map *map, uint64_t key, uint32_t value) {
  assert(key != 0);
  if (map->count * 2 >= map->capacity && map_grow(env, map)) return MLFAB_ERR_MEMORY;
  mlfab__map_entry *entry = &map->entries[map_find(map, key)];
  if (entry->key == 0) map->count++;
  entry->key = key;
  entry->value = value;
  return 0;
}

MLFAB__INTERNAL int mlfab__map_get(const mlfab__map *map, uint64_t key, uint32_t *value_p) {
  if (map->count == 0) return 0;
  const mlfab__map_entry *entry = &map->entries[map_find(map, key)];
  if (entry->key == 0) return 0;
  *value_p = entry->value;
  return 1;
}

MLFAB__INTERNAL void mlfab__map_remove(mlfab__map *map, uint64_t key) {
  if (map->count == 0) return;
  uint32_t hole = map_find(map, key);
  if (map->entries[hole].key == 0) return;
  map->count--;
  uint32_t mask = map->capacity - 1;
  for (uint32_t i = (hole + 1) & mask; map->entries[i].key != 0; i = (i + 1) & mask) {
    uint32_t home = map_slot(map, map->entries[i].key);
    /* An entry may move into the hole if its home is not behind the hole. */
    if (((i - home) & mask) >= ((i - hole) & mask)) {
      map->entries[hole] = map->entries[i];
      hole = i;
    }
  }
  map->entries[hole].key = 0;
}

MLFAB__INTERNAL void mlfab__map_free(mlfab__env *env, mlfab__map *map) {
  mlfab__free(env, map->entries, (size_t)map->capacity * sizeof *map->entries);
  memset(map, 0, sizeof *map);
}
