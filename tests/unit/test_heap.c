/* test_heap.c - core/base/heap.c against a sorted scan: random puts, moves and removals. */
#include "budget.h"
#include "../testing.h"

#include "../../core/base/heap.h"
#include "../../core/base/rng.h"

enum { INDICES = 97 };

/* What the heap should hold: the literal implementation scans for the smallest. */
typedef struct model {
  int in[INDICES];
  uint64_t time[INDICES], order[INDICES];
} model;

static int model_top(const model *m) {
  int best = -1;
  for (int i = 0; i < INDICES; i++) {
    if (!m->in[i]) continue;
    if (best < 0 || m->time[i] < m->time[best] ||
        (m->time[i] == m->time[best] && m->order[i] < m->order[best]))
      best = i;
  }
  return best;
}

TEST(test_random_against_scan) {
  mlfab__env env;
  mlfab__heap heap = {0};
  mlfab__rng prng;
  model m = {0};
  uint64_t order = 0;
  assert_int_equal(mlfab__env_init(&env, NULL), 0);
  mlfab__rng_seed(&prng, 5);
  assert_int_equal(mlfab__heap_reserve(&heap, &env, 3), 0);
  for (uint32_t room = 3; room <= INDICES; room += 47) {
    assert_int_equal(mlfab__heap_reserve(&heap, &env, room), 0);
    for (int i = 0; i < 20000; i++) {
      uint32_t index = (uint32_t)mlfab__rng_below(&prng, room);
      if (mlfab__rng_below(&prng, 3)) {
        m.in[index] = 1;
        m.time[index] = mlfab__rng_below(&prng, 16);
        m.order[index] = order;
        mlfab__heap_put(&heap, index, m.time[index], order++);
      } else {
        m.in[index] = 0;
        mlfab__heap_remove(&heap, index);
      }
      assert_int_equal(mlfab__heap_has(&heap, index), m.in[index]);
      const mlfab__heap_entry *top = mlfab__heap_top(&heap);
      int best = model_top(&m);
      assert_int_equal(top ? (int)top->index : -1, best);
      if (top) assert_int_equal(top->time, m.time[best]);
    }
  }
  mlfab__heap_free(&heap, &env);
  assert_int_equal(env.bytes, 0);
}

TEST(test_equal_times_keep_their_order) {
  mlfab__env env;
  mlfab__heap heap = {0};
  assert_int_equal(mlfab__env_init(&env, NULL), 0);
  assert_int_equal(mlfab__heap_reserve(&heap, &env, INDICES), 0);
  for (uint32_t i = 0; i < INDICES; i++) mlfab__heap_put(&heap, (i * 31) % INDICES, 7, i);
  for (uint32_t i = 0; i < INDICES; i++) {
    const mlfab__heap_entry *top = mlfab__heap_top(&heap);
    assert_non_null(top);
    assert_int_equal(top->order, i);
    mlfab__heap_remove(&heap, top->index);
  }
  assert_null(mlfab__heap_top(&heap));
  mlfab__heap_remove(&heap, 0);
  mlfab__heap_remove(&heap, INDICES + 1);
  mlfab__heap_free(&heap, &env);
}

TEST(test_no_memory_changes_nothing) {
  budget memory = {0, 0};
  mlfab_env hooks = budget_env(&memory);
  mlfab__env env;
  mlfab__heap heap = {0};
  assert_int_equal(mlfab__env_init(&env, &hooks), 0);
  assert_int_equal(mlfab__heap_reserve(&heap, &env, 8), MLFAB_ERR_MEMORY);
  assert_int_equal(heap.room, 0);
  assert_null(mlfab__heap_top(&heap));
}

TESTS(NULL, NULL)
