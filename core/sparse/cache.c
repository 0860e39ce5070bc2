/* cache.c - the worker role: keeps a copy of the model, so that pulls transfer only changes. See worker.h, version.h.
 *
 * With version tags a pull asks for whole slices, and names the commit that the copy has of each. The worker writes the
 * answer into the copy and into the caller's buffers, part by part: afterwards the bytes of a frame belong to the new
 * commit, changed or not. The copy takes over the commit of a slice when the whole slice has arrived: if a transfer is
 * cut off, the server sends all changes since the commit before again.
 *
 * One pull at a time asks a server, in the order of their requests. So the copy never gets older. The server's epoch
 * numbers its commits: in another epoch the copy is void, and pulls fetch everything.
 *
 * Kept buffers get only the changes of this pull. They lack the changes that other pulls have meanwhile fetched into
 * the same slices: the worker copies such a slice to them in full (`brought`, `before`, `written` record this).
 *
 * Source: TDF §3. */
#include "sparse_push.h"

#include "../kernels/kernels.h"
#include "../kernels/packet.h"

/* A server's part of a pull, with the slice that is arriving. */
typedef struct cache_part {
  uint8_t changed;       /* a part of the slice has changed */
  uint32_t slice;        /* UINT32_MAX: none yet */
  uint64_t upto, commit; /* end of the bytes that have arrived; their commit */
} cache_part;

/* A copy of the model. A request identifies a pull; requests ascend. */
struct mlfab__cache {
  uint8_t *bytes;
  uint64_t *commits; /* by slice: commit of the copy, 0: none */
  uint64_t *brought; /* by slice: the last pull that changed it ... */
  uint64_t *before;  /* ... and the last different pull */
  uint64_t *written; /* by tensor: the last pull that copied it to buffers */
  uint32_t *epochs;  /* by server: epoch of the commits; 0: none */
  cache_part *parts; /* by pull and server */
};

static const mlfab__worker_cache cache_pulls;

static cache_part *cache_part_of(const mlfab__worker *worker, const mlfab__fetch *fetch,
                                 uint32_t server) {
  return &worker->packets->cache->parts[(fetch - worker->fetches) * worker->servers + server];
}

MLFAB__INTERNAL int mlfab__cache_open(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  const mlfab__layout *layout = &worker->layout;
  if (worker->define.options.tags == 0 || worker->packets->cache) return 0;
  struct mlfab__cache *cache = mlfab__alloc(env, sizeof *cache);
  if (!cache) return MLFAB_ERR_MEMORY;
  worker->packets->cache = cache;
  cache->bytes = mlfab__alloc_aligned(env, layout->bytes);
  cache->commits = mlfab__alloc_array(env, layout->nslices, sizeof *cache->commits);
  cache->brought = mlfab__alloc_array(env, layout->nslices, sizeof *cache->brought);
  cache->before = mlfab__alloc_array(env, layout->nslices, sizeof *cache->before);
  cache->written = mlfab__alloc_array(env, layout->ntensors, sizeof *cache->written);
  cache->epochs = mlfab__alloc_array(env, worker->servers, sizeof *cache->epochs);
  cache->parts = mlfab__alloc_array(env, MLFAB__WORKER_PULLS * (uint64_t)worker->servers,
                                    sizeof *cache->parts);
  if (!cache->bytes || !cache->commits || !cache->brought || !cache->before || !cache->written ||
      !cache->epochs || !cache->parts)
    return MLFAB_ERR_MEMORY;
  memset(cache->bytes, 0, layout->bytes);
  worker->cache = &cache_pulls;
  return 0;
}

MLFAB__INTERNAL void mlfab__cache_free(mlfab__worker *worker) {
  mlfab__env *env = worker->env;
  const mlfab__layout *layout = &worker->layout;
  struct mlfab__cache *cache = worker->packets->cache;
  worker->cache = NULL;
  if (!cache) return;
  mlfab__free_aligned(env, cache->bytes, layout->bytes);
  mlfab__free(env, cache->commits, layout->nslices * sizeof *cache->commits);
  mlfab__free(env, cache->brought, layout->nslices * sizeof *cache->brought);
  mlfab__free(env, cache->before, layout->nslices * sizeof *cache->before);
  mlfab__free(env, cache->written, layout->ntensors * sizeof *cache->written);
  mlfab__free(env, cache->epochs, worker->servers * sizeof *cache->epochs);
  mlfab__free(env, cache->parts,
              MLFAB__WORKER_PULLS * (uint64_t)worker->servers * sizeof *cache->parts);
  mlfab__free(env, cache, sizeof *cache);
  worker->packets->cache = NULL;
}

/* Voids the commits of a server's slices; the copies keep their bytes. */
static void cache_void(mlfab__worker *worker, uint32_t server) {
  const mlfab__layout *layout = &worker->layout;
  for (uint32_t i = 0; i < layout->nslices; i++) {
    if (server == MLFAB_ALL || layout->slices[i].server == server)
      worker->packets->cache->commits[i] = 0;
  }
}

/* Voids the commits when their epoch is unknown: the server may have made others, or slices of all have moved. */
static void cache_lost(mlfab__worker *worker, uint32_t server) {
  if (server == MLFAB_ALL)
    cache_void(worker, server);
  else
    worker->packets->cache->epochs[server] = 0;
}

MLFAB__INTERNAL int mlfab__worker_cached(const mlfab__worker *worker, uint32_t tensor,
                                         const void **data_p, uint64_t *count_p,
                                         mlfab_error *error) {
  const mlfab__layout *layout = &worker->layout;
  const struct mlfab__cache *cache = worker->packets->cache;
  if (!worker->stands || !cache)
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
  if (data_p) *data_p = cache->bytes + (found ? found->offset : 0);
  if (count_p) {
    *count_p =
        found ? found->count : layout->bytes / mlfab__dtype_bytes((int)layout->uniform_dtype);
  }
  return 0;
}

/* --- requests --- */

static void cache_ask(mlfab__worker *worker, uint32_t server, const mlfab__fetch *fetch,
                      mlfab__pull *pull) {
  const struct mlfab__cache *cache = worker->packets->cache;
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
      sinces[count++] = fetch->flags & MLFAB_PULL_FULL ? 0 : cache->commits[i];
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
  pull->epoch = cache->epochs[server];
  cache_part_of(worker, fetch, server)->slice = UINT32_MAX;
}

static void cache_turn(mlfab__worker *worker, uint32_t server) {
  mlfab__fetch *next = NULL;
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    if (fetch->request == 0 || !fetch->parts[server].waiting || !fetch->cache) continue;
    if (fetch->parts[server].asked) return;
    if (!next || fetch->request < next->request) next = fetch;
  }
  if (next && worker->streams[server].up && mlfab__worker_sends(worker, server))
    mlfab__pull_ask(worker, server, next);
}

/* --- answers --- */

/* The copy of a slice is complete: copies it to the kept buffers that lack what other pulls have fetched. */
static void cache_hand_out(mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t number) {
  const mlfab__layout *layout = &worker->layout;
  const mlfab__slice *slice = &layout->slices[number];
  const struct mlfab__cache *cache = worker->packets->cache;
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
                           const cache_part *part) {
  struct mlfab__cache *cache = worker->packets->cache;
  cache->commits[part->slice] = part->commit;
  if (part->changed && cache->brought[part->slice] != fetch->request) {
    cache->before[part->slice] = cache->brought[part->slice];
    cache->brought[part->slice] = fetch->request;
  }
  if (fetch->flags & MLFAB_PULL_KEPT) cache_hand_out(worker, fetch, part->slice);
}

/* Did the pull ask for bytes of this slice? It asks for whole slices. */
static int cache_asked(const mlfab__fetch *fetch, const mlfab__slice *slice) {
  for (uint32_t i = 0; i < fetch->nsources; i++) {
    const mlfab__source *source = &fetch->sources[i];
    if (source->offset < slice->offset + slice->bytes &&
        slice->offset < source->offset + source->bytes)
      return 1;
  }
  return 0;
}

/* Called before the bytes of a frame are written. Errors: FRAME (it does not continue the frame before). */
static int cache_begin(mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t server,
                       const mlfab__model *model) {
  const mlfab__slice *slice = &worker->layout.slices[model->slice];
  cache_part *part = cache_part_of(worker, fetch, server);
  uint32_t *epoch = &worker->packets->cache->epochs[server];
  if (!cache_asked(fetch, slice)) return MLFAB_ERR_FRAME;
  if (model->epoch != *epoch) {
    *epoch = model->epoch;
    cache_void(worker, server);
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

/* Called after they are written; `changed`: the frame had bytes. */
static void cache_taken(mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t server,
                        const mlfab__model *model, int changed) {
  const mlfab__slice *slice = &worker->layout.slices[model->slice];
  cache_part *part = cache_part_of(worker, fetch, server);
  part->upto += model->bytes;
  part->changed |= changed != 0;
  if (part->upto == slice->offset + slice->bytes) cache_complete(worker, fetch, part);
}

/* Stores the packets of a MODEL frame: in `stretch`, the bytes that the frame covers, and in the buffers of the
 * pull; either may be NULL. Errors: FRAME if they are malformed or outside the requested bytes; MEMORY. */
static int cache_unpack(mlfab__worker *worker, const mlfab__model *model,
                        const mlfab__frame_in *frame, uint8_t *stretch, const mlfab__fetch *fetch) {
  uint64_t room = frame->bulk_bytes;
  uint8_t **came = &worker->packets->came;
  if (mlfab__packet_room(worker->env, came)) return MLFAB_ERR_MEMORY;
  const uint8_t *bulk = mlfab__packet_private(*came, frame->bulk, frame->bulk_bytes);
  uint64_t next = model->offset, end = model->offset + model->bytes;
  while (room > 0) {
    mlfab__packet packet;
    uint32_t bytes = mlfab__packet_open(bulk, room, &packet);
    if (bytes == 0 || packet.offset < next || packet.offset >= end) return MLFAB_ERR_FRAME;
    const mlfab__tensor *tensor = mlfab__layout_tensor_at(&worker->layout, packet.offset);
    uint64_t most = mlfab__min(end, tensor->offset + tensor->bytes) - packet.offset;
    uint64_t length = (uint64_t)packet.elements * mlfab__dtype_bytes(packet.dtype);
    if (packet.dtype != tensor->dtype || length > most) return MLFAB_ERR_FRAME;
    uint8_t *into = fetch ? mlfab__pull_into(fetch, packet.offset) : NULL;
    if (stretch) mlfab__unpack_store(&packet, stretch + (packet.offset - model->offset));
    if (into) mlfab__unpack_store(&packet, into);
    next = packet.offset + length;
    bulk += bytes;
    room -= bytes;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__cache_take(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                      const mlfab__model *model, const mlfab__frame_in *frame) {
  /* Without a cache, or if the buffers have the former values, the packets go to the buffers. */
  int packed = (model->flags & MLFAB__MODEL_PACKED) != 0, code = 0;
  int direct = !fetch->cache || (fetch->flags & MLFAB_PULL_KEPT);
  uint8_t *cache = fetch->cache ? worker->packets->cache->bytes + model->offset : NULL;
  if (cache && cache_begin(worker, fetch, server, model)) return MLFAB_ERR_FRAME;
  if (packed)
    code = cache_unpack(worker, model, frame, cache, direct ? fetch : NULL);
  else
    mlfab__kernel_copy(cache, frame->bulk, model->bytes,
                       worker->layout.bytes >= MLFAB__STREAM_BYTES);
  if (code || !cache) return code;
  if (!packed || !direct)
    mlfab__pull_write(worker, fetch, model->offset, packed ? cache : frame->bulk, model->bytes);
  cache_taken(worker, fetch, server, model, frame->bulk_bytes > 0);
  return 0;
}

static void cache_done(mlfab__worker *worker, const mlfab__fetch *fetch) {
  const mlfab__layout *layout = &worker->layout;
  for (uint32_t k = 0; k < fetch->nsources; k++) {
    const mlfab__source *source = &fetch->sources[k];
    for (uint64_t at = source->offset; source->data && at < source->offset + source->bytes;) {
      const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, at);
      uint64_t *written = &worker->packets->cache->written[tensor - layout->tensors];
      *written = mlfab__max(*written, fetch->request);
      at = tensor->offset + tensor->bytes;
    }
  }
}

static const mlfab__worker_cache cache_pulls = {cache_ask, cache_turn, cache_done, cache_lost};
