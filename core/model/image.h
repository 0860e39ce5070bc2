/* image.h - the bytes of slices as one stream of chunks.
 *
 * An image holds some slices of a store in ascending order; for each slice its kinds of bytes in order
 * (weights, optimizer states, sum of the open round); for each kind the bytes from first to last. A chunk
 * is (slice, kind, offset, bytes) and lies within one block; `last` marks the last chunk of a slice. Kinds
 * that the store does not have are omitted, as are missing blocks of a sum, which are zero. The sender adds
 * the other state of a slice (version, commit, clock).
 *
 * Writer: a cursor, which may be reset to the start when a link is lost. A chunk's data is valid until the
 * store changes. Reader: one part for each slice. EMPTY (kind 0, offset 0) -> received up to (kind, offset) -> DONE
 * with the last chunk. The first chunk of a slice resets its part to EMPTY. A part that is DONE ignores chunks.
 *
 * Invariants. (1) A part is DONE only if every byte of every kind that the store has arrived, in order. (2)
 * A chunk that does not continue the part is refused; the part stays as it is. (3) Between the first chunk and DONE,
 * nothing else may use the slice's bytes. */
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
  uint8_t *data; /* in the store's memory; NULL: ghosts */
  uint32_t bytes;
  int last; /* of its slice */
} mlfab__image_chunk;

/* Sets *chunk to the next chunk, of at most `limit` bytes, of the slices that owners (by slice number)
 * assigns to `owner`: 1, or 0 behind the last. The caller adds the chunk's bytes to the cursor's offset
 * once it has used them. */
MLFAB__INTERNAL int mlfab__image_next(const mlfab__store *store, const uint32_t *owners,
                                      uint32_t owner, uint64_t limit, mlfab__image_cursor *cursor,
                                      mlfab__image_chunk *chunk);

typedef struct mlfab__image_part { /* zeros: EMPTY */
  uint8_t done;
  uint32_t kind;
  uint64_t offset;
} mlfab__image_part;

/* Writes a chunk's bytes (data NULL: ghosts) into the blocks of the store. The chunk's members are checked:
 * they may come from the network. Errors: FRAME (out of range, or not the next bytes), MEMORY. */
MLFAB__INTERNAL int mlfab__image_take(mlfab__env *env, mlfab__store *store, mlfab__image_part *part,
                                      const mlfab__image_chunk *chunk, const uint8_t *data);

#endif
