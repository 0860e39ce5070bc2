/* slice.c - the flat model and its slices. See slice.h. */
#include "slice.h"

#include "reduce.h"

enum { SLICE_ALIGN = 64, SLICE_MIN_BYTES = 4096, SLICE_USUAL_BYTES = 32768 };

/* Fills tensors with their places; 8-byte types first. */
static int slice_place(const mlfab__tensor_info *infos, uint32_t n, uint64_t max_bytes,
                       mlfab__layout *layout, mlfab_error *error) {
  uint32_t placed = 0;
  for (uint32_t width = 8; width >= 4; width -= 4) {
    for (uint32_t i = 0; i < n; i++) {
      if (mlfab__dtype_bytes((int)infos[i].dtype) != width) continue;
      mlfab__tensor *tensor = &layout->tensors[i];
      if (infos[i].count == 0) {
        return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0,
                            "tensor %u has no elements", infos[i].id);
      }
      if (infos[i].count > (max_bytes - layout->bytes) / width) {
        return mlfab__error(error, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0, 0,
                            "the model is larger than model_max_bytes (%llu) with tensor %u",
                            (unsigned long long)max_bytes, infos[i].id);
      }
      tensor->id = infos[i].id;
      tensor->dtype = infos[i].dtype;
      tensor->count = infos[i].count;
      tensor->offset = layout->bytes;
      tensor->bytes = infos[i].count * width;
      layout->bytes += tensor->bytes;
      layout->by_offset[placed++] = i;
    }
  }
  if (placed == n) return 0;
  return mlfab__error(error, MLFAB_ERR_DTYPE, MLFAB_NO_RANK, 0, 0,
                      "a tensor has an unknown element type");
}

/* Sorts the indexes by id (heapsort: no recursion, no libc order), and finds ids used twice. */
static int slice_index(mlfab__layout *layout, mlfab_error *error) {
  uint32_t n = layout->ntensors, *a = layout->by_id;
  const mlfab__tensor *t = layout->tensors;
  for (uint32_t i = 0; i < n; i++) a[i] = i;
  for (uint32_t end = n, start = n / 2; end > 1;) {
    uint32_t value;
    if (start > 0) {
      value = a[--start];
    } else {
      value = a[--end];
      a[end] = a[0];
    }
    uint32_t root = start;
    for (uint32_t child = 2 * root + 1; child < end; child = 2 * root + 1) {
      if (child + 1 < end && t[a[child]].id < t[a[child + 1]].id) child++;
      if (t[value].id >= t[a[child]].id) break;
      a[root] = a[child];
      root = child;
    }
    a[root] = value;
  }
  for (uint32_t i = 0; i < n; i++) {
    if (t[a[i]].id == MLFAB_ALL || (i + 1 < n && t[a[i]].id == t[a[i + 1]].id)) {
      return mlfab__error(error, MLFAB_ERR_TENSOR, MLFAB_NO_RANK, 0, 0,
                          "tensor id %u is used twice or reserved", t[a[i]].id);
    }
  }
  return 0;
}

static int slice_cut(mlfab__env *env, uint32_t want, mlfab__layout *layout) {
  /* A slice is a frame of a pull: not smaller than pays, unless they are asked for. */
  uint64_t least = layout->bytes / SLICE_MIN_BYTES;
  uint64_t most = mlfab__max(layout->bytes / SLICE_USUAL_BYTES, mlfab__min(least, layout->servers));
  if (want) most = least;
  uint64_t n = want ? want : 16 * (uint64_t)layout->servers;
  n = mlfab__max(1, mlfab__min(mlfab__min(n, most), MLFAB__SLICES_MAX));
  layout->nslices = (uint32_t)n;
  layout->slices = mlfab__alloc_array(env, n, sizeof *layout->slices);
  if (!layout->slices) return MLFAB_ERR_MEMORY;
  uint64_t lines = (layout->bytes + SLICE_ALIGN - 1) / SLICE_ALIGN;
  for (uint64_t i = 0; i < n; i++) {
    mlfab__slice *slice = &layout->slices[i];
    uint64_t end = mlfab__min((lines * (i + 1) / n) * SLICE_ALIGN, layout->bytes);
    slice->offset = (lines * i / n) * SLICE_ALIGN;
    slice->bytes = end - slice->offset;
    slice->server = (uint32_t)(i * layout->servers / n);
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__layout_build(mlfab__env *env, const mlfab__tensor_info *tensors,
                                        uint32_t n, uint32_t want_slices, uint32_t servers,
                                        uint64_t max_bytes, mlfab__layout *layout,
                                        mlfab_error *error) {
  memset(layout, 0, sizeof *layout);
  if (n == 0 || servers == 0) {
    return mlfab__error(error, MLFAB_ERR_ARGUMENT, MLFAB_NO_RANK, 0, 0, "a model without tensors");
  }
  layout->ntensors = n;
  layout->servers = servers;
  layout->tensors = mlfab__alloc_array(env, n, sizeof *layout->tensors);
  layout->by_id = mlfab__alloc_array(env, n, sizeof *layout->by_id);
  layout->by_offset = mlfab__alloc_array(env, n, sizeof *layout->by_offset);
  int code = MLFAB_ERR_MEMORY;
  if (layout->tensors && layout->by_id && layout->by_offset) {
    code = slice_place(tensors, n, max_bytes, layout, error);
    if (!code) code = slice_index(layout, error);
    if (!code) code = slice_cut(env, want_slices, layout);
  }
  if (code == MLFAB_ERR_MEMORY) {
    mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, "out of memory for the layout of the model");
  }
  if (code) {
    mlfab__layout_free(env, layout);
    return code;
  }
  layout->uniform_dtype = layout->tensors[0].dtype;
  for (uint32_t i = 1; i < n; i++) {
    if (layout->tensors[i].dtype != layout->uniform_dtype) layout->uniform_dtype = 0;
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__layout_free(mlfab__env *env, mlfab__layout *layout) {
  mlfab__free(env, layout->tensors, layout->ntensors * sizeof *layout->tensors);
  mlfab__free(env, layout->by_id, layout->ntensors * sizeof *layout->by_id);
  mlfab__free(env, layout->by_offset, layout->ntensors * sizeof *layout->by_offset);
  mlfab__free(env, layout->slices, layout->nslices * sizeof *layout->slices);
  memset(layout, 0, sizeof *layout);
}

MLFAB__INTERNAL const mlfab__tensor *mlfab__layout_find(const mlfab__layout *layout, uint32_t id) {
  uint32_t low = 0, high = layout->ntensors;
  while (low < high) {
    uint32_t middle = low + (high - low) / 2;
    const mlfab__tensor *tensor = &layout->tensors[layout->by_id[middle]];
    if (tensor->id == id) return tensor;
    if (tensor->id < id) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return NULL;
}

MLFAB__INTERNAL const mlfab__tensor *mlfab__layout_tensor_at(const mlfab__layout *layout,
                                                             uint64_t offset) {
  uint32_t low = 0, high = layout->ntensors;
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    if (layout->tensors[layout->by_offset[middle]].offset <= offset) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return &layout->tensors[layout->by_offset[low]];
}

MLFAB__INTERNAL uint32_t mlfab__layout_slice_at(const mlfab__layout *layout, uint64_t offset) {
  uint32_t low = 0, high = layout->nslices;
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    if (layout->slices[middle].offset <= offset) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

MLFAB__INTERNAL void mlfab__layout_shard(const mlfab__layout *layout, uint32_t server,
                                         uint64_t *begin_p, uint64_t *end_p) {
  *begin_p = *end_p = 0;
  for (uint32_t i = 0; i < layout->nslices; i++) {
    if (layout->slices[i].server != server) continue;
    if (*end_p == 0) *begin_p = layout->slices[i].offset;
    *end_p = layout->slices[i].offset + layout->slices[i].bytes;
  }
}

static int slice_between_elements(const mlfab__layout *layout, uint64_t offset) {
  if (offset >= layout->bytes) return offset == layout->bytes;
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, offset);
  return (offset - tensor->offset) % mlfab__dtype_bytes((int)tensor->dtype) == 0;
}

MLFAB__INTERNAL int mlfab__layout_valid(const mlfab__layout *layout, uint32_t server,
                                        const mlfab__segment *segment) {
  uint64_t begin, end;
  mlfab__layout_shard(layout, server, &begin, &end);
  return segment->offset >= begin && segment->offset < end &&
         segment->bytes <= end - segment->offset &&
         slice_between_elements(layout, segment->offset) &&
         slice_between_elements(layout, segment->offset + segment->bytes);
}
