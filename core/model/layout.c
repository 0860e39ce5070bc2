/* layout.c - the flat model and its slices. See layout.h. */
#include "layout.h"

#include "../kernels/kernels.h"

enum { LAYOUT_ALIGN = 64, LAYOUT_MIN_BYTES = 4096, LAYOUT_USUAL_BYTES = 32768 };

/* Assigns offsets to the tensors; 8-byte types first. */
static int layout_place(const mlfab__tensor_info *infos, uint32_t n, uint64_t max_bytes,
                        mlfab__layout *layout, mlfab_error *error) {
  uint32_t placed = 0;
  for (uint32_t width = 8; width >= 4; width -= 4) {
    for (uint32_t i = 0; i < n; i++) {
      if (mlfab__dtype_bytes((int)infos[i].dtype) != width) continue;
      mlfab__tensor *tensor = &layout->tensors[i];
      if (infos[i].count == 0) {
        return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "tensor %u has no elements", infos[i].id);
      }
      if (infos[i].count > (max_bytes - layout->bytes) / width) {
        return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
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
  return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "a tensor has an unknown element type");
}

MLFAB__INTERNAL void mlfab__layout_sort(uint32_t *a, uint32_t n, mlfab__layout_before_fn *before,
                                        const void *of) {
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
      if (child + 1 < end && before(of, a[child], a[child + 1])) child++;
      if (!before(of, value, a[child])) break;
      a[root] = a[child];
      root = child;
    }
    a[root] = value;
  }
}

static int layout_before_id(const void *of, uint32_t i, uint32_t k) {
  const mlfab__tensor *t = of;
  return t[i].id < t[k].id;
}

/* Sorts the indexes by id, and finds duplicate ids. */
static int layout_index(mlfab__layout *layout, mlfab_error *error) {
  uint32_t n = layout->ntensors, *a = layout->by_id;
  const mlfab__tensor *t = layout->tensors;
  for (uint32_t i = 0; i < n; i++) a[i] = i;
  mlfab__layout_sort(a, n, layout_before_id, t);
  for (uint32_t i = 0; i < n; i++) {
    if (t[a[i]].id == MLFAB_ALL || (i + 1 < n && t[a[i]].id == t[a[i + 1]].id)) {
      return MLFAB__FAIL(error, MLFAB_ERR_TENSOR, "tensor id %u is used twice or reserved",
                         t[a[i]].id);
    }
  }
  return 0;
}

/* Rebuilds the lists of slices by server, and the runs. */
static void layout_sort_out(mlfab__layout *layout) {
  uint32_t n = layout->nslices, *at = layout->owned_at;
  memset(at, 0, (layout->servers + 1) * sizeof *at);
  for (uint32_t i = 0; i < n; i++) at[layout->slices[i].server + 1]++;
  for (uint32_t s = 0; s < layout->servers; s++) at[s + 1] += at[s];
  /* Filling moves each server's start to the next one's; then all are moved back. */
  for (uint32_t i = 0; i < n; i++) layout->owned[at[layout->slices[i].server]++] = i;
  memmove(at + 1, at, layout->servers * sizeof *at);
  at[0] = 0;
  for (uint32_t i = n; i-- > 0;) {
    int goes_on = i + 1 < n && layout->slices[i + 1].server == layout->slices[i].server;
    layout->run_end[i] = goes_on ? layout->run_end[i + 1] : i + 1;
  }
}

static int layout_cut(mlfab__env *env, uint32_t want, uint32_t active, mlfab__layout *layout) {
  /* Each slice costs a frame in a pull: by default slices are not smaller than is efficient. */
  uint64_t least = layout->bytes / LAYOUT_MIN_BYTES;
  uint64_t most =
      mlfab__max(layout->bytes / LAYOUT_USUAL_BYTES, mlfab__min(least, layout->servers));
  if (want) most = least;
  uint64_t n = want ? want : 16 * (uint64_t)layout->servers;
  n = mlfab__max(1, mlfab__min(mlfab__min(n, most), MLFAB__SLICES_MAX));
  layout->nslices = (uint32_t)n;
  layout->slices = mlfab__alloc_array(env, n, sizeof *layout->slices);
  if (!layout->slices) return MLFAB_ERR_MEMORY;
  uint64_t lines = (layout->bytes + LAYOUT_ALIGN - 1) / LAYOUT_ALIGN;
  for (uint64_t i = 0; i < n; i++) {
    mlfab__slice *slice = &layout->slices[i];
    uint64_t end = mlfab__min((lines * (i + 1) / n) * LAYOUT_ALIGN, layout->bytes);
    slice->offset = (lines * i / n) * LAYOUT_ALIGN;
    slice->bytes = end - slice->offset;
    slice->server = (uint32_t)(i * active / n);
  }
  layout->owned = mlfab__alloc_array(env, n, sizeof *layout->owned);
  layout->owned_at = mlfab__alloc_array(env, layout->servers + 1, sizeof *layout->owned_at);
  layout->run_end = mlfab__alloc_array(env, n, sizeof *layout->run_end);
  if (!layout->owned || !layout->owned_at || !layout->run_end) return MLFAB_ERR_MEMORY;
  layout_sort_out(layout);
  return 0;
}

MLFAB__INTERNAL int mlfab__layout_build(mlfab__env *env, const mlfab__tensor_info *tensors,
                                        uint32_t n, uint32_t want_slices, uint32_t servers,
                                        uint32_t active, uint64_t max_bytes, mlfab__layout *layout,
                                        mlfab_error *error) {
  memset(layout, 0, sizeof *layout);
  if (n == 0 || servers == 0) {
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "the model has no tensors: call mlfab_tensor_add first");
  }
  if (active > servers) {
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "active: %u servers shall hold slices, there are %u", active, servers);
  }
  layout->ntensors = n;
  layout->servers = servers;
  layout->tensors = mlfab__alloc_array(env, n, sizeof *layout->tensors);
  layout->by_id = mlfab__alloc_array(env, n, sizeof *layout->by_id);
  layout->by_offset = mlfab__alloc_array(env, n, sizeof *layout->by_offset);
  int code = MLFAB_ERR_MEMORY;
  if (layout->tensors && layout->by_id && layout->by_offset) {
    code = layout_place(tensors, n, max_bytes, layout, error);
    if (!code) code = layout_index(layout, error);
    if (!code) code = layout_cut(env, want_slices, active ? active : servers, layout);
  }
  if (code == MLFAB_ERR_MEMORY) {
    MLFAB__FAIL(error, code, "out of memory for the layout of the model");
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
  mlfab__free(env, layout->owned, layout->nslices * sizeof *layout->owned);
  mlfab__free(env, layout->owned_at, (layout->servers + 1) * sizeof *layout->owned_at);
  mlfab__free(env, layout->run_end, layout->nslices * sizeof *layout->run_end);
  memset(layout, 0, sizeof *layout);
}

MLFAB__INTERNAL void mlfab__layout_assign(mlfab__layout *layout, const uint32_t *owner) {
  for (uint32_t i = 0; i < layout->nslices; i++) {
    assert(owner[i] < layout->servers);
    layout->slices[i].server = owner[i];
  }
  layout_sort_out(layout);
}

MLFAB__INTERNAL const mlfab__tensor *mlfab__layout_find(const mlfab__layout *layout, uint32_t id) {
  uint32_t low = 0, high = layout->ntensors;
  MLFAB__SEARCH(low, high, at, layout->tensors[layout->by_id[at]].id < id)
  if (low == layout->ntensors) return NULL;
  const mlfab__tensor *tensor = &layout->tensors[layout->by_id[low]];
  return tensor->id == id ? tensor : NULL;
}

MLFAB__INTERNAL const mlfab__tensor *mlfab__layout_tensor_at(const mlfab__layout *layout,
                                                             uint64_t offset) {
  uint32_t low = 1, high = layout->ntensors;
  MLFAB__SEARCH(low, high, at, layout->tensors[layout->by_offset[at]].offset <= offset)
  return &layout->tensors[layout->by_offset[low - 1]];
}

MLFAB__INTERNAL uint32_t mlfab__layout_slice_at(const mlfab__layout *layout, uint64_t offset) {
  uint32_t low = 1, high = layout->nslices;
  MLFAB__SEARCH(low, high, at, layout->slices[at].offset <= offset)
  return low - 1;
}

static uint64_t layout_end(const mlfab__layout *layout, uint32_t slice) {
  return layout->slices[slice].offset + layout->slices[slice].bytes;
}

MLFAB__INTERNAL uint64_t mlfab__layout_shard_bytes(const mlfab__layout *layout, uint32_t server) {
  uint64_t bytes = 0;
  for (uint32_t k = layout->owned_at[server]; k < layout->owned_at[server + 1]; k++)
    bytes += layout->slices[layout->owned[k]].bytes;
  return bytes;
}

MLFAB__INTERNAL void mlfab__layout_run(const mlfab__layout *layout, uint32_t server, uint64_t from,
                                       uint64_t *begin_p, uint64_t *end_p) {
  uint32_t low = layout->owned_at[server], high = layout->owned_at[server + 1], end = high;
  MLFAB__SEARCH(low, high, at, layout_end(layout, layout->owned[at]) <= from)
  *begin_p = *end_p = layout->bytes;
  if (low == end) return;
  uint32_t slice = layout->owned[low];
  *begin_p = mlfab__max(from, layout->slices[slice].offset);
  *end_p = layout_end(layout, layout->run_end[slice] - 1);
}

static int layout_between_elements(const mlfab__layout *layout, uint64_t offset) {
  if (offset >= layout->bytes) return offset == layout->bytes;
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, offset);
  return (offset - tensor->offset) % mlfab__dtype_bytes((int)tensor->dtype) == 0;
}

MLFAB__INTERNAL int mlfab__layout_valid(const mlfab__layout *layout, uint32_t server,
                                        const mlfab__segment *segment) {
  uint64_t begin, end;
  mlfab__layout_run(layout, server, segment->offset, &begin, &end);
  return segment->offset == begin && begin < end && segment->bytes <= end - begin &&
         layout_between_elements(layout, segment->offset) &&
         layout_between_elements(layout, segment->offset + segment->bytes);
}
