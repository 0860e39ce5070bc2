/* test_map.c - core/base/map.c against a plain array, with keys that collide and every kind of deletion. */
#include "core/base/map.h"
#include "core/base/rng.h"

#include "budget.h"
#include "../testing.h"

enum { KEYS = 96 };

static mlfab__env env;

/* The low bits of key * golden ratio's upper half choose the home: this finds keys that share one. */
static uint32_t home(uint64_t key, uint32_t capacity) {
  return (uint32_t)((key * 0x9e3779b97f4a7c15u) >> 32) & (capacity - 1);
}

static void compare(const mlfab__map *map, const uint64_t *keys, const int64_t *want) {
  uint32_t count = 0;
  for (int i = 0; i < KEYS; i++) {
    uint32_t value = 0;
    int found = mlfab__map_get(map, keys[i], &value);
    assert_int_equal(found, want[i] >= 0);
    if (!found) continue;
    assert_int_equal(value, want[i]);
    count++;
  }
  assert_int_equal(map->count, count);
}

static void random_walk(uint64_t seed, const uint64_t *keys, uint32_t present) {
  mlfab__rng prng;
  mlfab__map map = {NULL, 0, 0};
  int64_t want[KEYS];
  for (int i = 0; i < KEYS; i++) want[i] = -1;
  mlfab__rng_seed(&prng, seed);
  for (int turn = 0; turn < 3000; turn++) {
    uint32_t i = (uint32_t)mlfab__rng_below(&prng, KEYS);
    if (mlfab__rng_below(&prng, KEYS) < present) {
      want[i] = (int64_t)mlfab__rng_below(&prng, 1u << 31);
      assert_int_equal(mlfab__map_put(&env, &map, keys[i], (uint32_t)want[i]), 0);
    } else {
      mlfab__map_remove(&map, keys[i]);
      want[i] = -1;
    }
    if (turn % 7 == 0) compare(&map, keys, want);
  }
  for (int i = 0; i < KEYS; i++) {
    mlfab__map_remove(&map, keys[i]);
    want[i] = -1;
    compare(&map, keys, want);
  }
  mlfab__map_free(&env, &map);
  assert_int_equal(env.bytes, 0);
}

TEST(test_random_keys) {
  for (uint64_t seed = 1; seed <= 12; seed++) {
    uint64_t keys[KEYS];
    for (uint64_t i = 0; i < KEYS; i++) keys[i] = mlfab__mix(seed * KEYS + i) | 1;
    random_walk(seed, keys, (uint32_t)(10 + 7 * seed));
  }
}

/* All keys want the same few places at the end of the table, so that runs wrap round. */
TEST(test_colliding_keys) {
  uint64_t keys[KEYS], key = 1;
  for (int i = 0; i < KEYS; key++) {
    if (home(key, 256) >= 253) keys[i++] = key;
  }
  for (uint64_t seed = 1; seed <= 12; seed++) random_walk(seed, keys, (uint32_t)(10 + 7 * seed));
}

/* After removing any entry of a full run, the others are found. */
TEST(test_every_hole) {
  uint64_t keys[8], key = 1;
  uint32_t value = 0;
  for (int i = 0; i < 8; key++) {
    if (home(key, 16) >= 13) keys[i++] = key;
  }
  for (int hole = 0; hole < 8; hole++) {
    mlfab__map map = {NULL, 0, 0};
    for (uint32_t i = 0; i < 8; i++) assert_int_equal(mlfab__map_put(&env, &map, keys[i], i), 0);
    mlfab__map_remove(&map, keys[hole]);
    mlfab__map_remove(&map, 12345); /* not present */
    for (int i = 0; i < 8; i++) assert_int_equal(mlfab__map_get(&map, keys[i], &value), i != hole);
    mlfab__map_free(&env, &map);
  }
}

/* Without memory a put fails and the map is as before. */
TEST(test_memory) {
  budget memory = {1, 0};
  uint32_t value = 0;
  mlfab__env poor;
  mlfab_env hooks = budget_env(&memory);
  mlfab__map map = {NULL, 0, 0};
  assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
  for (uint64_t key = 1; key <= 8; key++)
    assert_int_equal(mlfab__map_put(&poor, &map, key, (uint32_t)key), 0);
  assert_int_equal(mlfab__map_put(&poor, &map, 9, 9), MLFAB_ERR_MEMORY);
  assert_false(mlfab__map_get(&map, 9, &value));
  for (uint64_t key = 1; key <= 8; key++) {
    assert_true(mlfab__map_get(&map, key, &value));
    assert_int_equal(value, key);
  }
  mlfab__map_free(&poor, &map);
  assert_int_equal(poor.bytes, 0);
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
