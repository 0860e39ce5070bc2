/* test_slab.c - core/lend/slab.c: blocks in areas, private ones and shared ones, against a literal list of what is taken. */
#include "core/base/rng.h"
#include "core/lend/slab.h"
#include "core/lend/views.h"
#include "core/model/store.h"
#include "core/sparse/sparse_apply.h"

#include "budget.h"
#include "../testing.h"

enum { BLOCKS = 512, AREAS = 600 };

static mlfab__env env;

/* --- shared memory, played --- */

static struct shared {
  void *at[AREAS];
  uint64_t bytes[AREAS];
  uint32_t n, out; /* number of areas ever made; not released */
  int fails;
} shared;

static void *shared_alloc(mlfab__shm_memory *memory, uint64_t bytes, int guarded) {
  (void)memory;
  assert_int_equal(guarded, 1);
  if (shared.fails) return NULL;
  assert_true(shared.n < AREAS);
  void *at = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  assert_non_null(at);
  shared.at[shared.n] = at;
  shared.bytes[shared.n++] = bytes;
  shared.out++;
  return at;
}

static void shared_release(mlfab__shm_memory *memory, void *area, int emptied) {
  (void)emptied;
  uint32_t i = 0;
  (void)memory;
  while (shared.at[i] != area) assert_true(++i < shared.n);
  shared.at[i] = NULL;
  shared.out--;
  free(area);
}

static const mlfab__shm_memory_table table = {.alloc = shared_alloc, .release = shared_release};

static int clean(void **state) {
  (void)state;
  memset(&shared, 0, sizeof shared);
  return 0;
}

/* --- single cases --- */

TEST_WITH(test_ascending, clean, NULL) {
  for (int shares = 0; shares < 2; shares++) {
    mlfab__slab_areas slab = {.slab = {mlfab__slab_take, mlfab__slab_give},
                              .on = shares ? &table : NULL};
    uint8_t *at[100];
    for (uint32_t i = 0; i < 100; i++) {
      at[i] = mlfab__slab_take(&env, &slab.slab, 1000, 99 - i);
      assert_non_null(at[i]);
      assert_int_equal((uintptr_t)at[i] % 64, 0);
      if (i > 0) assert_ptr_equal(at[i], at[i - 1] + 1024);
      memset(at[i], 1, 1000);
    }
    const mlfab__slab_area *area = slab.areas;
    assert_null(area->next);
    assert_int_equal(area->count, 100);
    assert_int_equal(area->shared, shares);
    assert_int_equal(area->stride, 1024);
    /* The block that was given back last is taken first. */
    mlfab__slab_give(&env, &slab.slab, at[3]);
    mlfab__slab_give(&env, &slab.slab, at[70]);
    assert_ptr_equal(mlfab__slab_take(&env, &slab.slab, 1024, 5), at[70]);
    assert_ptr_equal(mlfab__slab_take(&env, &slab.slab, 961, 5), at[3]);
    for (uint32_t i = 0; i < 99; i++) mlfab__slab_give(&env, &slab.slab, at[i]);
    assert_int_equal(shared.out, shares);
    mlfab__slab_give(&env, &slab.slab, NULL);
    mlfab__slab_give(&env, &slab.slab, at[99]);
    assert_null(slab.areas);
    assert_int_equal(shared.out, 0);
    assert_int_equal(env.bytes, 0);
  }
}

/* How large a new area is: shared ones have room for blocks that are asked for later. */
TEST_WITH(test_sizes, clean, NULL) {
  static const struct {
    uint32_t bytes, more, shared_count;
  } cases[] = {{1, 0, 64},
               {64, 0, 64},
               {64, 62, 64},
               {64, 63, 64},
               {64, 64, 65},
               {32768, 0, 64},
               {32769, 0, 64},
               {1 << 19, 0, 64},
               {1 << 21, 0, 16},
               {1 << 22, 0, 8},
               {(1 << 21) - 63, 1, 16},
               {1 << 20, 0, 32},
               {1 << 26, 0, 1}};
  for (size_t i = 0; i < MLFAB__COUNT(cases); i++) {
    for (int shares = 0; shares < 2; shares++) {
      mlfab__slab_areas slab = {.slab = {mlfab__slab_take, mlfab__slab_give},
                                .on = shares ? &table : NULL};
      uint8_t *at = mlfab__slab_take(&env, &slab.slab, cases[i].bytes, cases[i].more);
      assert_non_null(at);
      assert_int_equal(slab.areas->count, shares ? cases[i].shared_count : cases[i].more + 1);
      if (shares)
        assert_int_equal(shared.bytes[shared.n - 1], slab.areas->count * slab.areas->stride);
      mlfab__slab_give(&env, &slab.slab, at);
      assert_null(slab.areas);
      assert_int_equal(env.bytes, 0);
    }
  }
}

/* Without descriptors an area is private. */
TEST_WITH(test_no_descriptors, clean, NULL) {
  mlfab__slab_areas slab = {.slab = {mlfab__slab_take, mlfab__slab_give}, .on = &table};
  shared.fails = 1;
  uint8_t *a = mlfab__slab_take(&env, &slab.slab, 4096, 0);
  assert_int_equal(slab.areas->shared, 0);
  assert_int_equal(slab.areas->count, 64);
  shared.fails = 0;
  uint8_t *b = mlfab__slab_take(&env, &slab.slab, 8192, 0);
  assert_int_equal(slab.areas->shared, 1);
  mlfab__slab_give(&env, &slab.slab, a);
  mlfab__slab_give(&env, &slab.slab, b);
  assert_int_equal(shared.n, 1);
  assert_int_equal(shared.out, 0);
  assert_int_equal(env.bytes, 0);
}

/* --- random cases --- */

typedef struct block {
  uint8_t *at;
  uint32_t bytes;
  uint8_t fill;
} block;

static void check_areas(const mlfab__slab_areas *slab, const block *blocks, uint32_t n) {
  uint32_t used = 0, nshared = 0;
  for (const mlfab__slab_area *a = slab->areas; a; a = a->next) {
    uint32_t in = 0;
    for (uint32_t i = 0; i < n; i++) {
      if ((uintptr_t)blocks[i].at - (uintptr_t)a->at >= a->count * a->stride) continue;
      assert_int_equal((uint64_t)(blocks[i].at - a->at) % a->stride, 0);
      uint64_t unit = blocks[i].bytes > 32768 ? 4096 : 64; /* large blocks begin at pages */
      assert_int_equal(a->stride, (blocks[i].bytes + unit - 1) / unit * unit);
      in++;
    }
    assert_true(in > 0 && in <= a->count);
    assert_int_equal(a->used, in);
    used += in;
    nshared += a->shared != 0;
  }
  assert_int_equal(used, n);
  assert_int_equal(shared.out, nshared);
}

TEST_WITH(test_random, clean, NULL) {
  static const uint32_t sizes[] = {64, 100, 4096, 70000};
  for (uint64_t seed = 1; seed <= 30; seed++) {
    static block blocks[BLOCKS];
    uint32_t n = 0;
    mlfab__rng prng;
    mlfab__slab_areas slab = {.slab = {mlfab__slab_take, mlfab__slab_give},
                              .on = seed % 2 ? &table : NULL};
    memset(&shared, 0, sizeof shared);
    mlfab__rng_seed(&prng, seed);
    for (int i = 0; i < 1500; i++) {
      int grows = i / 250 % 2 == 0; /* at times more are taken, at times more are given */
      if (n > 0 && (n == BLOCKS || mlfab__rng_below(&prng, 5) >= (grows ? 4u : 1u))) {
        uint32_t k = (uint32_t)mlfab__rng_below(&prng, n);
        for (uint32_t b = 0; b < blocks[k].bytes; b += 61)
          assert_int_equal(blocks[k].at[b], blocks[k].fill);
        mlfab__slab_give(&env, &slab.slab, blocks[k].at);
        blocks[k] = blocks[--n];
      } else {
        block *one = &blocks[n++];
        one->bytes = sizes[mlfab__rng_below(&prng, MLFAB__COUNT(sizes))];
        one->fill = (uint8_t)i;
        shared.fails = mlfab__rng_below(&prng, 4) == 0;
        one->at =
            mlfab__slab_take(&env, &slab.slab, one->bytes, (uint32_t)mlfab__rng_below(&prng, 40));
        assert_non_null(one->at);
        memset(one->at, one->fill, one->bytes);
      }
      check_areas(&slab, blocks, n);
    }
    while (n > 0) mlfab__slab_give(&env, &slab.slab, blocks[--n].at);
    assert_null(slab.areas);
    assert_int_equal(shared.out, 0);
    assert_int_equal(env.bytes, 0);
  }
}

/* --- no memory --- */

/* The k-th allocation fails, for every k, and nothing is left. */
TEST_WITH(test_memory, clean, NULL) {
  for (int shares = 0; shares < 2; shares++) {
    budget memory = {0, 0};
    uint64_t k = 0;
    mlfab_env hooks = budget_env(&memory);
    mlfab__env poor;
    mlfab__slab_areas slab = {.slab = {mlfab__slab_take, mlfab__slab_give},
                              .on = shares ? &table : NULL};
    assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
    for (uint8_t *at = NULL; !at; k++) {
      memory.left = k;
      at = mlfab__slab_take(&poor, &slab.slab, 4096, 3);
      if (!at) assert_null(slab.areas);
      mlfab__slab_give(&poor, &slab.slab, at);
      assert_int_equal(poor.bytes, 0);
      assert_int_equal(shared.out, 0);
    }
    assert_int_equal(k, shares ? 3 : 4);
  }
}

/* The same for a store with its blocks in a slab, which has another block already. */
TEST_WITH(test_store_memory, clean, NULL) {
  for (int shares = 0; shares < 2; shares++) {
    const mlfab__tensor_info infos[] = {{0, MLFAB_F32, 5000}, {1, MLFAB_F64, 1200}};
    budget memory = {1000, 0};
    int code = MLFAB_ERR_MEMORY;
    mlfab_env hooks = budget_env(&memory);
    mlfab__env poor;
    mlfab__layout layout;
    mlfab__slab_areas slab = {.slab = {mlfab__slab_take, mlfab__slab_give},
                              .on = shares ? &table : NULL};
    assert_int_equal(mlfab__env_init(&poor, &hooks), 0);
    assert_int_equal(mlfab__layout_build(&env, infos, 2, 3, 1, 0, 1u << 30, &layout, NULL), 0);
    uint8_t *other = mlfab__slab_take(&poor, &slab.slab, 64, 0);
    uint64_t had = poor.bytes;
    for (uint64_t k = 0; code; k++) {
      mlfab__store s;
      memory.left = k;
      code = mlfab__store_init(&poor, &s, NULL, &slab.slab, &layout, 0, 4096, 1, 1, 0);
      assert_true(code == 0 || code == MLFAB_ERR_MEMORY);
      if (!code) {
        uint32_t blocks = s.nblocks, spare = s.free_count;
        for (uint64_t more = 0; code == 0; more++) {
          memory.left = more;
          code = mlfab__store_spare(&poor, &s, spare + 70) ? 0 : 1;
          if (code == 0) {
            assert_int_equal(s.nblocks, blocks);
            assert_int_equal(s.free_count, spare);
          }
        }
        assert_int_equal(s.free_count, spare + 70);
        code = 0;
        mlfab__store_free(&poor, &s);
      }
      assert_int_equal(poor.bytes, had);
      assert_ptr_equal(slab.areas->at, other);
      assert_null(slab.areas->next);
    }
    mlfab__slab_give(&poor, &slab.slab, other);
    assert_int_equal(poor.bytes, 0);
    assert_int_equal(shared.out, 0);
    mlfab__layout_free(&env, &layout);
  }
}

/* A store that is retired keeps the blocks that others refer to, with their bytes. */
TEST_WITH(test_retire, clean, NULL) {
  for (uint64_t seed = 1; seed <= 40; seed++) {
    const mlfab__tensor_info info = {0, MLFAB_F32, 20000};
    mlfab__rng prng;
    mlfab__layout layout;
    mlfab__slab_areas slab = {.slab = {mlfab__slab_take, mlfab__slab_give},
                              .on = seed % 2 ? &table : NULL};
    mlfab__store s;
    uint32_t pins[64], npins = 0;
    mlfab__rng_seed(&prng, seed);
    assert_int_equal(mlfab__layout_build(&env, &info, 1, 4, 1, 0, 1u << 30, &layout, NULL), 0);
    assert_int_equal(
        mlfab__store_init(&env, &s, NULL, &slab.slab, &layout, 0, 4096, 1, (uint32_t)(seed % 3), 0),
        0);
    assert_int_equal(mlfab__store_tag(&env, &s, 16), 0);
    for (uint32_t b = 0; b < s.nblocks; b++) memset(s.blocks[b].data, (int)b, s.block_bytes);
    for (int i = 0; i < 60; i++) {
      uint32_t p = (uint32_t)mlfab__rng_below(&prng, s.positions);
      uint32_t *at = mlfab__rng_below(&prng, 2) ? &s.next[p] : &s.sum[p];
      if (mlfab__rng_below(&prng, 3) == 0) {
        pins[npins++] = s.w[p];
        mlfab__store_ref(&s, s.w[p]);
      } else if (*at != MLFAB__NO_BLOCK) {
        mlfab__store_put(&s, &s.w[p], *at);
        *at = MLFAB__NO_BLOCK;
      } else if (s.free_count > 0) {
        *at = mlfab__store_take(&s);
      }
      if (npins == 20) break;
    }
    mlfab__views_keep(&env, &s);
    mlfab__layout_free(&env, &layout);
    for (uint32_t b = 0; b < s.nblocks; b++) {
      uint32_t refs = 0;
      for (uint32_t i = 0; i < npins; i++) refs += pins[i] == b;
      assert_int_equal(s.blocks[b].refs, refs);
      assert_int_equal(s.blocks[b].data != NULL, refs > 0);
    }
    while (npins > 0) {
      uint32_t k = (uint32_t)mlfab__rng_below(&prng, npins), b = pins[k];
      for (uint32_t i = 0; i < s.block_bytes; i += 97)
        assert_int_equal(s.blocks[b].data[i], (uint8_t)b);
      mlfab__store_unref(&s, b);
      pins[k] = pins[--npins];
    }
    mlfab__store_free(&env, &s);
    assert_null(slab.areas);
    assert_int_equal(shared.out, 0);
    assert_int_equal(env.bytes, 0);
  }
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
