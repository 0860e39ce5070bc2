/* pool.h - free blocks of memory by size class: repeated work then allocates nothing.
 *
 * The sizes of blocks are the powers of two from 64 bytes to 2 GiB. Larger blocks are allocated and freed each time.
 * The link of the free list stands in front of the block. The pool never writes into the block: a transport may still
 * read its bytes after it was given back. */
#ifndef MLFAB__POOL_H
#define MLFAB__POOL_H

#include "env.h"

enum { MLFAB__POOL_CLASSES = 26 };

typedef struct mlfab__pool {
  mlfab__env *env;
  uint64_t most;  /* bytes of free blocks that `give` keeps; beyond them it frees */
  uint64_t bytes; /* of free blocks now */
  void *free[MLFAB__POOL_CLASSES];
} mlfab__pool;

MLFAB__INTERNAL void mlfab__pool_init(mlfab__pool *pool, mlfab__env *env, uint64_t most);
/* A block of `bytes`, aligned to 64; its contents are undefined. NULL: out of memory. */
MLFAB__INTERNAL void *mlfab__pool_take(mlfab__pool *pool, uint64_t bytes);
/* Gives a block back; `bytes` as when it was taken. NULL is accepted. */
MLFAB__INTERNAL void mlfab__pool_give(mlfab__pool *pool, void *block, uint64_t bytes);
/* Frees all free blocks. */
MLFAB__INTERNAL void mlfab__pool_drain(mlfab__pool *pool);

#endif
