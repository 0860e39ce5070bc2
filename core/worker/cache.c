/* cache.c - the worker role: a copy of the model, so that pulls transfer only changes. See worker.h, version.h.
 *
 * With version tags a pull asks for whole slices and names the commit of each that the copy has. The worker writes
 * the answer into the copy and into the caller's buffers, stretch by stretch: what a frame covers is of the new
 * commit then, changed or not. The copy takes over the commit of a slice when the whole slice has arrived: if a
 * transfer is cut off, the server sends all changes since the commit before again.
 *
 * One pull at a time asks a server, in the order of their requests. So the copy never goes back. The server's epoch
 * numbers its commits: in another epoch the copy is void, and pulls fetch everything.
 *
 * Kept buffers get what has changed. They lack what other pulls have fetched into the same slices since:
 * the worker copies such a slice to them in full (`brought`, `before`, `written` record this).
 *
 * Source: TDF §3. */
#include "worker.h"

#include "../kernels/kernels.h"

MLFAB__INTERNAL int mlfab__cache_open(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  const mlfab__layout *layout = &worker->layout;
  mlfab__cache *cache = &worker->cache;
  if (worker->define.options.tags == 0 || cache->bytes) return 0;
  cache->bytes = mlfab__alloc_aligned(env, layout->bytes);
  cache->commits = mlfab__alloc_array(env, layout->nslices, sizeof *cache->commits);
  cache->brought = mlfab__alloc_array(env, layout->nslices, sizeof *cache->brought);
  cache->before = mlfab__alloc_array(env, layout->nslices, sizeof *cache->before);
  cache->written = mlfab__alloc_array(env, layout->ntensors, sizeof *cache->written);
  if (!cache->bytes || !cache->commits || !cache->brought || !cache->before || !cache->written)
    return MLFAB_ERR_MEMORY;
  memset(cache->bytes, 0, layout->bytes);
  return 0;
}

MLFAB__INTERNAL void mlfab__cache_free(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  const mlfab__layout *layout = &worker->layout;
  mlfab__cache *cache = &worker->cache;
  mlfab__free_aligned(env, cache->bytes, layout->bytes);
  mlfab__free(env, cache->commits, layout->nslices * sizeof *cache->commits);
  mlfab__free(env, cache->brought, layout->nslices * sizeof *cache->brought);
  mlfab__free(env, cache->before, layout->nslices * sizeof *cache->before);
  mlfab__free(env, cache->written, layout->ntensors * sizeof *cache->written);
  memset(cache, 0, sizeof *cache);
}

MLFAB__INTERNAL void mlfab__cache_void(mlfab__worker *worker, uint32_t server) {
  for (uint32_t i = 0; worker->cache.commits && i < worker->layout.nslices; i++) {
    if (server == MLFAB_ALL || worker->layout.slices[i].server == server)
      worker->cache.commits[i] = 0;
  }
}

MLFAB__INTERNAL int mlfab__worker_cached(const mlfab__worker *worker, uint32_t tensor,
                                         const void **data_p, uint64_t *count_p,
                                         mlfab_error *error) {
  const mlfab__layout *layout = &worker->layout;
  if (!worker->stands || !worker->cache.bytes)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       worker->stands
                           ? "cached: the model has no version tags"
                           : "cached: there is no model yet: call mlfab_model_start first");
  const mlfab__tensor *found = mlfab__layout_find(layout, tensor);
  if (!found && (tensor != MLFAB_ALL || !layout->uniform_dtype))
    return MLFAB__FAIL(error, MLFAB_ERR_TENSOR,
                       tensor == MLFAB_ALL ? "cached: the tensors are not of one element type"
                                           : "cached: there is no tensor %u",
                       tensor);
  if (data_p) *data_p = worker->cache.bytes + (found ? found->offset : 0);
  if (count_p) {
    *count_p =
        found ? found->count : layout->bytes / mlfab__dtype_bytes((int)layout->uniform_dtype);
  }
  return 0;
}

/* --- requests --- */

MLFAB__INTERNAL void mlfab__cache_ask(mlfab__worker *worker, uint32_t server,
                                      const mlfab__fetch *fetch, mlfab__pull *pull) {
  const mlfab__layout *layout = &worker->layout;
  mlfab__segment *segments = worker->lists->segments;
  uint64_t *sinces = worker->lists->versions;
  uint32_t n = 0, count = 0, next = 0;
  int equal = 1;
  for (uint32_t k = 0; k < fetch->nsources; k++) {
    const mlfab__source *source = &fetch->sources[k];
    uint32_t i = mlfab__layout_slice_at(layout, source->offset);
    uint32_t last = mlfab__layout_slice_at(layout, source->offset + source->bytes - 1);
    for (i = i < next ? next : i; i <= last; i++) {
      const mlfab__slice *slice = &layout->slices[i];
      if (slice->server != server) continue;
      sinces[count++] = fetch->flags & MLFAB_PULL_FULL ? 0 : worker->cache.commits[i];
      equal &= sinces[count - 1] == sinces[0];
      if (n > 0 && segments[n - 1].offset + segments[n - 1].bytes == slice->offset) {
        segments[n - 1].bytes += slice->bytes;
      } else {
        segments[n].offset = slice->offset;
        segments[n++].bytes = slice->bytes;
      }
    }
    next = last + 1;
  }
  pull->segments = n;
  pull->sinces = equal ? 1 : count;
  pull->epoch = worker->streams[server].cache_epoch;
}

/* --- answers --- */

/* The copy of a slice is complete: copies it to the kept buffers that lack what other pulls have fetched. */
static void cache_hand_out(mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t number) {
  const mlfab__layout *layout = &worker->layout;
  const mlfab__slice *slice = &layout->slices[number];
  const mlfab__cache *cache = &worker->cache;
  uint64_t other =
      cache->brought[number] == fetch->request ? cache->before[number] : cache->brought[number];
  for (uint32_t k = 0; k < fetch->nsources; k++) {
    const mlfab__source *source = &fetch->sources[k];
    uint64_t at = mlfab__max(source->offset, slice->offset);
    uint64_t end = mlfab__min(source->offset + source->bytes, slice->offset + slice->bytes);
    while (at < end && source->data) {
      const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, at);
      uint64_t stop = mlfab__min(end, tensor->offset + tensor->bytes);
      if (other > cache->written[tensor - layout->tensors])
        memcpy(source->data + (at - source->offset), cache->bytes + at, stop - at);
      at = stop;
    }
  }
}

static void cache_complete(mlfab__worker *worker, const mlfab__fetch *fetch,
                           const mlfab__fetch_part *part) {
  mlfab__cache *cache = &worker->cache;
  cache->commits[part->slice] = part->commit;
  if (part->changed && cache->brought[part->slice] != fetch->request) {
    cache->before[part->slice] = cache->brought[part->slice];
    cache->brought[part->slice] = fetch->request;
  }
  if (fetch->flags & MLFAB_PULL_KEPT) cache_hand_out(worker, fetch, part->slice);
}

MLFAB__INTERNAL int mlfab__cache_begin(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                       const mlfab__model *model) {
  const mlfab__slice *slice = &worker->layout.slices[model->slice];
  mlfab__fetch_part *part = &fetch->parts[server];
  mlfab__stream *stream = &worker->streams[server];
  if (model->epoch != stream->cache_epoch) {
    stream->cache_epoch = model->epoch;
    mlfab__cache_void(worker, server);
  }
  if (model->offset != slice->offset) {
    return part->slice == model->slice && part->upto == model->offset &&
                   part->commit == model->commit
               ? 0
               : MLFAB_ERR_FRAME;
  }
  part->slice = model->slice;
  part->upto = model->offset;
  part->commit = model->commit;
  part->changed = 0;
  return 0;
}

MLFAB__INTERNAL void mlfab__cache_taken(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                        const mlfab__model *model, int changed) {
  const mlfab__slice *slice = &worker->layout.slices[model->slice];
  mlfab__fetch_part *part = &fetch->parts[server];
  part->upto += model->bytes;
  part->changed |= changed != 0;
  if (part->upto == slice->offset + slice->bytes) cache_complete(worker, fetch, part);
}

MLFAB__INTERNAL void mlfab__cache_done(mlfab__worker *worker, const mlfab__fetch *fetch) {
  const mlfab__layout *layout = &worker->layout;
  for (uint32_t k = 0; worker->cache.bytes && k < fetch->nsources; k++) {
    const mlfab__source *source = &fetch->sources[k];
    for (uint64_t at = source->offset; source->data && at < source->offset + source->bytes;) {
      const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, at);
      uint64_t *written = &worker->cache.written[tensor - layout->tensors];
      *written = mlfab__max(*written, fetch->request);
      at = tensor->offset + tensor->bytes;
    }
  }
}
