/* layout.h - the flat model: its tensors, its slices, and the servers that own them.
 *
 * The flat model is the bytes of all tensors one after another: first the 8-byte types, then the 4-byte types, each in
 * the order of definition. So every element is aligned without padding. It is divided into slices at multiples of 64
 * bytes. A slice belongs to one server. A server's slices (its shard) are adjacent until servers come or go; afterwards
 * it may own any slices. A run is a sequence of adjacent slices of one server. All frames use offsets in the flat
 * model.
 *
 * Source: FluentPS §III-D (elastic parameter slicing). */
#ifndef MLFAB__LAYOUT_H
#define MLFAB__LAYOUT_H

#include "../wire/wire.h"

#include "../base/env.h"

/* A model of this size or more does not fit in a cache: pulls write its bytes past the caches. */
#define MLFAB__STREAM_BYTES (UINT64_C(64) << 20)

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
  uint32_t *owned;        /* slices by server, ascending for each */
  uint32_t *owned_at;     /* index of a server's first slice in `owned`; servers + 1 entries */
  uint32_t *run_end;      /* by slice: the first slice behind its run */
  uint32_t uniform_dtype; /* the type of all tensors, or 0 if they differ */
  uint64_t bytes;
} mlfab__layout;

/* Builds the layout. want_slices 0: 16 times the servers. Slices have at least 4 KiB (the last may be
 * shorter), so a small model has fewer. active: the number of servers that own slices, evenly; 0: all. Errors (all
 * memory is freed then): TENSOR (duplicate id, or MLFAB_ALL), DTYPE, LIMIT, ARGUMENT (no tensors, an empty tensor, more
 * active servers than exist), MEMORY. */
MLFAB__INTERNAL int mlfab__layout_build(mlfab__env *env, const mlfab__tensor_info *tensors,
                                        uint32_t n, uint32_t want_slices, uint32_t servers,
                                        uint32_t active, uint64_t max_bytes, mlfab__layout *layout,
                                        mlfab_error *error);
MLFAB__INTERNAL void mlfab__layout_free(mlfab__env *env, mlfab__layout *layout);
/* Assigns slice i to server owner[i] (below `servers`). */
MLFAB__INTERNAL void mlfab__layout_assign(mlfab__layout *layout, const uint32_t *owner);
/* The tensor with this id, or NULL. */
MLFAB__INTERNAL const mlfab__tensor *mlfab__layout_find(const mlfab__layout *layout, uint32_t id);
/* The tensor, and the slice, that contain the byte at this offset (offset < bytes). */
MLFAB__INTERNAL const mlfab__tensor *mlfab__layout_tensor_at(const mlfab__layout *layout,
                                                             uint64_t offset);
MLFAB__INTERNAL uint32_t mlfab__layout_slice_at(const mlfab__layout *layout, uint64_t offset);
/* Sum of the server's slices, in bytes. */
MLFAB__INTERNAL uint64_t mlfab__layout_shard_bytes(const mlfab__layout *layout, uint32_t server);
/* The server's next bytes at or behind `from`, up to the end of their run; if there are none, begin and end
 * are the end of the model. O(log slices). */
MLFAB__INTERNAL void mlfab__layout_run(const mlfab__layout *layout, uint32_t server, uint64_t from,
                                       uint64_t *begin_p, uint64_t *end_p);
/* 1 when the server owns every slice that the segment touches, and the segment cuts no element. It may span
 * slices. */
MLFAB__INTERNAL int mlfab__layout_valid(const mlfab__layout *layout, uint32_t server,
                                        const mlfab__segment *segment);

/* Sorts n indexes by heapsort: no recursion, and no libc-dependent order. before: does i come before k? */
typedef int mlfab__layout_before_fn(const void *of, uint32_t i, uint32_t k);
MLFAB__INTERNAL void mlfab__layout_sort(uint32_t *a, uint32_t n, mlfab__layout_before_fn *before,
                                        const void *of);

#endif
