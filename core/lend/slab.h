/* slab.h - memory of the host for the blocks of a server's shards, in areas of many blocks.
 *
 * If processes of the host share memory (base/shm_memory.h), areas are shared: the transport then sends references to
 * blocks, and a view is a list of addresses in them. A block that moves to another store of the same server stays where
 * it is; an area is freed when none of its blocks is in use.
 *
 * Invariants: `used` counts the blocks of an area that were taken and not given back. The others are in `free`. Their
 * order yields ascending addresses until a block is given back. */
#ifndef MLFAB__SLAB_H
#define MLFAB__SLAB_H

#include "../base/shm_memory.h"
#include "../model/store.h"

typedef struct mlfab__slab_area {
  struct mlfab__slab_area *next;
  uint8_t *at;
  uint32_t *free; /* indices */
  uint32_t count, used;
  uint64_t stride; /* bytes of a block, a multiple of 64; of large blocks, of pages */
  int shared;
} mlfab__slab_area;

/* Empty: all zero but for the functions; areas are private. */
typedef struct mlfab__slab_areas {
  mlfab__slab slab;                  /* mlfab__slab_take and _give */
  const mlfab__shm_memory_table *on; /* NULL: areas are private */
  mlfab__shm_memory *memory;
  mlfab__slab_area *areas;
  int empties; /* areas freed now have no readers: see release in shm_memory.h */
} mlfab__slab_areas;

/* The functions of mlfab__slab for a mlfab__slab_areas. If a new area is needed, it holds the `more` blocks, too. */
MLFAB__INTERNAL uint8_t *mlfab__slab_take(mlfab__env *env, mlfab__slab *slab, uint32_t bytes,
                                          uint32_t more);
MLFAB__INTERNAL void mlfab__slab_give(mlfab__env *env, mlfab__slab *slab, uint8_t *at);

#endif
