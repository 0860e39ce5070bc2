/* store.h - a server's shard: slices with versions, in reference-counted blocks.
 *
 * Each slice is stored in blocks of block_bytes (the last may be shorter). A position is a place for a
 * block in the shard. Each position has the present block `w`, and may have the block being written
 * (`next`) and the sum of the open round (`sum`). Pulls hold references to blocks; a block with more than
 * one reference is never written. All blocks are allocated with the model, so steady state allocates nothing. Spare
 * blocks run out only when pulls pin too many.
 *
 * Invariants: w[p] is always a block; refs = number of places (w, next, sum, pins, sends, holders) that name the
 * block; the free list holds exactly the blocks with refs 0. A state is freed when neither the store nor a holder
 * names it. A slice has a larger `changed` than `changes` had at some moment if its weights, state, sum, versions or
 * clock have changed since. */
#ifndef MLFAB__STORE_H
#define MLFAB__STORE_H

#include "layout.h"
#include "memory.h"

#define MLFAB__NO_BLOCK 0xffffffffu
#define MLFAB__NO_SLICE 0xffffffffu

/* Memory of the host for blocks, if they are not allocated one by one (core/lend/slab.h). take: returns a block with
 * any contents, aligned to 64; `more` requests will follow. NULL: no memory. give: accepts NULL. */
typedef struct mlfab__slab {
  uint8_t *(*take)(mlfab__env *env, struct mlfab__slab *slab, uint32_t bytes, uint32_t more);
  void (*give)(mlfab__env *env, struct mlfab__slab *slab, uint8_t *at);
} mlfab__slab;

struct mlfab__block {
  uint8_t *data; /* in the store's memory, or in its slab; NULL for ghosts */
  uint32_t refs;
  uint32_t next_free;
  void *shadow; /* the copy that the host can read (mlfab__store_lend), or NULL */
};

typedef struct mlfab__shard_slice {
  uint64_t offset, bytes; /* in the flat model */
  uint64_t version;       /* number of updates applied to it */
  uint64_t commit;        /* number of commits */
  uint64_t changed;       /* value of store.changes at its last change */
  uint32_t first, count;  /* positions */
  uint32_t number;        /* in the layout */
} mlfab__shard_slice;

typedef struct mlfab__store {
  const mlfab__layout *layout;
  mlfab__memory *memory; /* memory of blocks and states; NULL: the host's */
  mlfab__slab *slab;     /* of blocks in memory of the host; or NULL */
  uint64_t bytes;        /* sum over its slices */
  uint32_t nslices, nlocal;
  mlfab__shard_slice *slices; /* ascending by number, and so by offset */
  uint32_t *local;            /* by number: index into `slices`, or MLFAB__NO_SLICE */
  uint32_t block_bytes;
  uint32_t positions, positions_per_slice; /* the latter: maximum */
  uint32_t *w, *next, *sum;                /* block numbers by position */
  uint8_t **s0, **s1;                      /* optimizer state by position, or NULL */
  struct mlfab__holder *holders;           /* holders of a state of one moment (hold.h), or NULL */
  /* Called before optimizer state of a position is written, if there are holders. */
  void (*own)(mlfab__env *env, struct mlfab__store *store, uint32_t position);
  uint64_t changes; /* number of changes of slices, from 1 */
  mlfab__block *blocks;
  uint32_t nblocks, free_head, free_count;
  struct mlfab__store_tags *tags; /* of the sparse group, or NULL */
  int ghost;
} mlfab__store;

/* The head of the data that a group keeps beside the slices of a store. */
struct mlfab__store_tags {
  void (*free)(mlfab__env *env, mlfab__store *store);
  void (*moved)(mlfab__store *store, uint32_t slice); /* a slice has come with its history */
};

/* A stretch within one block and one tensor. */
typedef struct mlfab__piece {
  uint32_t slice; /* index into store.slices */
  uint32_t position;
  uint32_t at; /* byte offset in the block */
  uint32_t bytes;
  int dtype;
  uint64_t count; /* elements */
  const mlfab__tensor *tensor;
  uint64_t first; /* index of its first element in the tensor */
} mlfab__piece;

/* memory: holds blocks and states; NULL: they are in memory of the host, the blocks in `slab` if it is not NULL. sums:
 * 1 if rounds are summed. states: number of the optimizer's state arrays. Errors: MEMORY, with all memory freed. */
MLFAB__INTERNAL int mlfab__store_init(mlfab__env *env, mlfab__store *store, mlfab__memory *memory,
                                      mlfab__slab *slab, const mlfab__layout *layout,
                                      uint32_t server, uint32_t block_bytes, int sums,
                                      uint32_t states, int ghost);
MLFAB__INTERNAL void mlfab__store_free(mlfab__env *env, mlfab__store *store);
/* free_places: frees all except the blocks; there are no holders. free_block: frees the memory of a block. */
MLFAB__INTERNAL void mlfab__store_free_places(mlfab__env *env, mlfab__store *store);
MLFAB__INTERNAL void mlfab__store_free_block(mlfab__env *env, const mlfab__store *store,
                                             mlfab__block *block);
/* The longest piece from `offset` (in the flat model), at most `limit` bytes. */
MLFAB__INTERNAL void mlfab__store_piece(const mlfab__store *store, uint64_t offset, uint64_t limit,
                                        mlfab__piece *piece);
/* Size of the block at a position. */
MLFAB__INTERNAL uint32_t mlfab__store_block_bytes(const mlfab__store *store, uint32_t slice,
                                                  uint32_t position);
/* Number of blocks of a store; its holders have `held` positions. */
MLFAB__INTERNAL uint64_t mlfab__store_wanted(const mlfab__store *store, uint64_t held, int sums);
/* Adds a spare block. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__store_grow(mlfab__env *env, mlfab__store *store);
/* Adds spare blocks until there are `spare`. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__store_spare(mlfab__env *env, mlfab__store *store, uint64_t spare);
/* A spare block with one reference, or MLFAB__NO_BLOCK. */
MLFAB__INTERNAL uint32_t mlfab__store_take(mlfab__store *store);
MLFAB__INTERNAL void mlfab__store_ref(mlfab__store *store, uint32_t block);
MLFAB__INTERNAL void mlfab__store_unref(mlfab__store *store, uint32_t block);
/* Gives the bytes of a block in memory of the host. They are valid while the block has a reference and is not written.
 * Returns 1: they are at *at_p; 0: they are being copied, ask again. Errors: MEMORY. The block is no ghost. */
static inline int mlfab__store_lend(mlfab__store *store, uint32_t block, const uint8_t **at_p) {
  mlfab__block *b = &store->blocks[block];
  if (store->memory) return store->memory->on->lend(store->memory, b, store->block_bytes, at_p);
  *at_p = b->data;
  return 1;
}
/* Returns how many of these bytes mlfab__memory_see takes at a time. The limit counts for memory of the host, too:
 * norms are added piece by piece, and so have the same bits. */
static inline uint64_t mlfab__store_seen(uint64_t bytes) {
  return mlfab__min(bytes, MLFAB_BULK_MAX);
}
/* place[p] <- block; takes over the caller's reference, and gives up the old block's. */
MLFAB__INTERNAL void mlfab__store_put(mlfab__store *store, uint32_t *place, uint32_t block);

/* Checks these options against each other and the tensors. Errors: CONFIG, UNSUPPORTED; the text names both
 * sides of a conflict. */
MLFAB__INTERNAL int mlfab__store_check(const mlfab_model_options *options,
                                       const mlfab__layout *layout, mlfab__optimizer *optimizer,
                                       mlfab_error *error);

/* The slice (an index) has changed. */
static inline void mlfab__store_change(mlfab__store *store, uint32_t slice) {
  store->slices[slice].changed = ++store->changes;
}

/* The number by which frames refer to the slice's present commit. */
static inline uint64_t mlfab__store_label(const mlfab__shard_slice *slice) {
  return slice->commit + 1;
}

#endif
