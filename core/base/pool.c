/* pool.c - free blocks of memory by size class. See pool.h. */
#include "pool.h"

enum { POOL_LEAST = 64 }; /* bytes of the smallest block, and of the link in front of each */

static void **pool_link(void *block) { return (void **)(void *)((uint8_t *)block - POOL_LEAST); }

/* Returns the class of a block of so many bytes. *room_p: the bytes that fit in a block of this class. */
static uint32_t pool_class(uint64_t bytes, uint64_t *room_p) {
  uint32_t class = 0;
  while (class < MLFAB__POOL_CLASSES && (uint64_t)POOL_LEAST << class < bytes) class ++;
  *room_p = class < MLFAB__POOL_CLASSES ? (uint64_t)POOL_LEAST << class : bytes;
  return class;
}

static void pool_free(mlfab__pool *pool, void *block, uint64_t room) {
  mlfab__free_aligned(pool->env, (uint8_t *)block - POOL_LEAST, room + POOL_LEAST);
}

MLFAB__INTERNAL void mlfab__pool_init(mlfab__pool *pool, mlfab__env *env, uint64_t most) {
  memset(pool, 0, sizeof *pool);
  pool->env = env;
  pool->most = most;
}

MLFAB__INTERNAL void *mlfab__pool_take(mlfab__pool *pool, uint64_t bytes) {
  uint64_t room;
  uint32_t class = pool_class(bytes, &room);
  void *block = class < MLFAB__POOL_CLASSES ? pool->free[class] : NULL;
  if (block) {
    pool->free[class] = *pool_link(block);
    pool->bytes -= room;
    return block;
  }
  if (room > SIZE_MAX - POOL_LEAST) return NULL;
  uint8_t *memory = mlfab__alloc_aligned(pool->env, (size_t)room + POOL_LEAST);
  return memory ? memory + POOL_LEAST : NULL;
}

MLFAB__INTERNAL void mlfab__pool_give(mlfab__pool *pool, void *block, uint64_t bytes) {
  uint64_t room;
  uint32_t class = pool_class(bytes, &room);
  if (!block) return;
  if (class == MLFAB__POOL_CLASSES || room > pool->most - pool->bytes) {
    pool_free(pool, block, room);
    return;
  }
  *pool_link(block) = pool->free[class];
  pool->free[class] = block;
  pool->bytes += room;
}

MLFAB__INTERNAL void mlfab__pool_drain(mlfab__pool *pool) {
  for (uint32_t class = 0; class < MLFAB__POOL_CLASSES; class ++) {
    for (void *block; (block = pool->free[class]) != NULL;) {
      pool->free[class] = *pool_link(block);
      pool_free(pool, block, (uint64_t)POOL_LEAST << class);
    }
  }
  pool->bytes = 0;
}
