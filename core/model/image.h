/* image.h - the bytes of slices as one stream of chunks. Layer 3.
 *
 * An image holds some slices of a store: one after the other, ascending; of each its kinds of bytes in order
 * (weights, states of the optimizer, sum of the open round); of each kind the bytes from the first to the
 * last. Chunks are (slice, kind, offset, bytes), lie within one block, and `last` marks the last one of a
 * slice. Kinds that the store does not have are left out; so are blocks of a sum that nothing was added to,
 * which are zero. Whoever sends chunks adds what else belongs to a slice (version, commit, clock).
 *
 * Writer: a cursor, which may be set back to the start whenever a link breaks. Nothing of the store is lent
 * longer than a chunk is used.
 * Reader: a part for each slice. EMPTY (kind 0, offset 0) -> bytes up to (kind, offset) -> DONE with the last
 * chunk. The first chunk of a slice leads back to EMPTY, unless it is DONE: then chunks are passed over.
 *
 * Invariants. (1) A part is DONE only if every byte of every kind that the store has came, in order. (2) What
 * does not follow what came before is refused, and changes nothing. (3) Between the first chunk and DONE the
 * slice's bytes are nobody else's. */
#ifndef MLFAB__IMAGE_H
#define MLFAB__IMAGE_H

#include "store.h"

enum mlfab__image_kind {
  MLFAB__IMAGE_WEIGHTS,
  MLFAB__IMAGE_STATE0,
  MLFAB__IMAGE_STATE1,
  MLFAB__IMAGE_SUM,
  MLFAB__IMAGE_KINDS
};

typedef struct mlfab__image_cursor { /* zeros: the start */
  uint32_t slice, kind;              /* slice: index into store.slices */
  uint64_t offset;                   /* in the slice */
} mlfab__image_cursor;

typedef struct mlfab__image_chunk {
  uint32_t slice, kind; /* as in a cursor */
  uint64_t offset;
  uint8_t *data; /* in the store; NULL: ghosts */
  uint32_t bytes;
  int last; /* of its slice */
} mlfab__image_chunk;

/* Moves the cursor to the next chunk, at most `limit` bytes, of the slices that owners (by number of the slice)
 * gives to `owner`: 1, or 0 behind the last. The caller adds the chunk's bytes to the cursor's offset once
 * it has them. */
MLFAB__INTERNAL int mlfab__image_next(const mlfab__store *store, const uint32_t *owners,
                                      uint32_t owner, uint64_t limit, mlfab__image_cursor *cursor,
                                      mlfab__image_chunk *chunk);

typedef struct mlfab__image_part { /* zeros: EMPTY */
  uint8_t done;
  uint32_t kind;
  uint64_t offset;
} mlfab__image_part;

/* Writes a chunk's bytes (data NULL: ghosts) into the store, whose block takes over those that are there.
 * chunk->slice and the rest may be a stranger's words. Errors: FRAME (out of range, or does not follow),
 * MEMORY. */
MLFAB__INTERNAL int mlfab__image_take(mlfab__env *env, mlfab__store *store, mlfab__image_part *part,
                                      const mlfab__image_chunk *chunk, const uint8_t *data);

#endif
