/* layout.h - the flat model: tensors in it, slices cut out of it, servers that own them. Layer 2.
 *
 * The flat model is all tensors' bytes one after another: the 8-byte types first, then the 4-byte
 * types, each in the order of definition, so that every element is aligned and nothing is padded.
 * It is cut into slices at multiples of 64 bytes; a slice belongs to one server, and the slices of
 * a server (its shard) are neighbours until servers come or go: then it may own any of them. A run
 * is a stretch of neighbouring slices of one server. Everything on the wire is told in offsets of
 * the flat model.
 *
 * Source: FluentPS §III-D (elastic parameter slicing). */
#ifndef MLFAB__SLICE_H
#define MLFAB__SLICE_H

#include "../wire/wire.h"

#include "../base/env.h"

typedef struct mlfab__tensor {
  uint32_t id, dtype;
  uint64_t count;
  uint64_t offset, bytes; /* in the flat model */
} mlfab__tensor;

typedef struct mlfab__slice {
  uint64_t offset, bytes;
  uint32_t server;
} mlfab__slice;

typedef struct mlfab__layout {
  mlfab__tensor *tensors; /* in the order of definition */
  uint32_t *by_id;        /* indexes, ascending by id */
  uint32_t *by_offset;    /* indexes, ascending by offset */
  uint32_t ntensors;
  uint32_t nslices;
  mlfab__slice *slices; /* ascending by offset */
  uint32_t servers;
  uint32_t *owned;        /* slices by server, and ascending for each */
  uint32_t *owned_at;     /* where a server's begin in `owned`; one more than servers */
  uint32_t *run_end;      /* by slice: the first one behind its run */
  uint32_t uniform_dtype; /* the type of all tensors, or 0 */
  uint64_t bytes;
} mlfab__layout;

/* Builds the layout. want_slices 0: 16 times the servers. Slices are at least 4 KiB (the last may
 * be shorter), so a small model has fewer. active: the first so many servers own them, evenly; 0:
 * all. Errors: TENSOR (id twice, or MLFAB_ALL), DTYPE, LIMIT, ARGUMENT (no tensors, no elements,
 * more active servers than there are), MEMORY; nothing is left allocated. */
MLFAB__INTERNAL int mlfab__layout_build(mlfab__env *env, const mlfab__tensor_info *tensors,
                                        uint32_t n, uint32_t want_slices, uint32_t servers,
                                        uint32_t active, uint64_t max_bytes, mlfab__layout *layout,
                                        mlfab_error *error);
MLFAB__INTERNAL void mlfab__layout_free(mlfab__env *env, mlfab__layout *layout);
/* Slice i is owner[i]'s (below `servers`) from now on. */
MLFAB__INTERNAL void mlfab__layout_assign(mlfab__layout *layout, const uint32_t *owner);
/* The tensor with this id, or NULL. */
MLFAB__INTERNAL const mlfab__tensor *mlfab__layout_find(const mlfab__layout *layout, uint32_t id);
/* The tensor, and the slice, that holds the byte at this offset (offset < bytes). */
MLFAB__INTERNAL const mlfab__tensor *mlfab__layout_tensor_at(const mlfab__layout *layout,
                                                             uint64_t offset);
MLFAB__INTERNAL uint32_t mlfab__layout_slice_at(const mlfab__layout *layout, uint64_t offset);
/* Bytes of a server's slices. */
MLFAB__INTERNAL uint64_t mlfab__layout_shard_bytes(const mlfab__layout *layout, uint32_t server);
/* The next stretch at or behind `from` that the server owns, up to the end of its run; where there
 * is none, it begins and ends at the end of the model. O(log slices). */
MLFAB__INTERNAL void mlfab__layout_run(const mlfab__layout *layout, uint32_t server, uint64_t from,
                                       uint64_t *begin_p, uint64_t *end_p);
/* 1 when every slice that the stretch touches is the server's, and it begins and ends between
 * elements. It may span slices. */
MLFAB__INTERNAL int mlfab__layout_valid(const mlfab__layout *layout, uint32_t server,
                                        const mlfab__segment *segment);

/* New owners for slices, for servers that come and go (active[s] is not 0 for those that stay or come,
 * at least one): no server has more than 1.05 times the mean of the active ones, in bytes, and the
 * fewest bytes move. What slices of nearly equal size do not allow, since there are few, is evened
 * out as well as they do, give or take a 64th. Ties: the lower number. `load` has room for
 * `servers`, `order` for 2 n. Nothing else decides: all who ask get the same. O(n (log n + servers)). */
MLFAB__INTERNAL void mlfab__layout_balance(const mlfab__slice *slices, uint32_t n,
                                           const uint8_t *active, uint32_t servers, uint32_t *owner,
                                           uint64_t *load, uint32_t *order);

#endif
