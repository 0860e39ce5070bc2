/* feed.c - the worker role: updates that begin before all bytes are there, and pulls that are watched. See feed.h. */
#include "feed.h"

#include "../kernels/kernels.h"

/* A tensor as it was added, or NULL. The layout finds it faster. */
static const mlfab__tensor_info *feed_added(const mlfab__worker *worker, uint32_t id) {
  for (uint32_t i = 0; i < worker->ntensors; i++)
    if (worker->tensors[i].id == id) return &worker->tensors[i];
  return NULL;
}

MLFAB__INTERNAL uint64_t mlfab__worker_buf_bytes(const mlfab__worker *worker, const mlfab_buf *buf,
                                                 uint32_t *align_p) {
  const mlfab__tensor *tensor = NULL;
  const mlfab__tensor_info *added = NULL;
  uint64_t count = 0;
  uint32_t width = 0;
  if (worker->stands && worker->define.options.ghost) return 0;
  if (buf->tensor == MLFAB_ALL) {
    for (uint32_t i = 0; i < worker->ntensors; i++) {
      count += worker->tensors[i].count;
      if (i > 0 && worker->tensors[i].dtype != worker->tensors[0].dtype) return 0;
    }
    if (worker->ntensors > 0) width = mlfab__dtype_bytes((int)worker->tensors[0].dtype);
  } else if (worker->stands) {
    tensor = mlfab__layout_find(&worker->layout, buf->tensor);
    if (tensor) count = tensor->count, width = mlfab__dtype_bytes((int)tensor->dtype);
  } else {
    added = feed_added(worker, buf->tensor);
    if (added) count = added->count, width = mlfab__dtype_bytes((int)added->dtype);
  }
  *align_p = width;
  return buf->count == count ? count * width : 0;
}

MLFAB__INTERNAL uint32_t mlfab__worker_element_bytes(const mlfab__worker *worker, uint32_t tensor) {
  const mlfab__tensor_info *added = feed_added(worker, tensor);
  return added ? mlfab__dtype_bytes((int)added->dtype) : 0;
}

/* clip_norm needs the norm of the whole update, a filter makes other bytes of all of them, and a retry may send packets that
 * are kept. A planned update that stops would keep the other members of its group, so none begins without its bytes. */
MLFAB__INTERNAL int mlfab__push_may_lack(const mlfab__worker *worker, const mlfab_buf *bufs,
                                         uint32_t n, const mlfab_push_options *given) {
  mlfab_push_options options = MLFAB_PUSH_OPTIONS_INIT;
  uint64_t bytes = 0;
  uint32_t align;
  if (given) memcpy(&options, given, mlfab__min(given->size, sizeof options));
  if (!worker->stands || !bufs || worker->config->scheduler != MLFAB_SCHEDULER_NONE ||
      options.clip_norm > 0.0 || options.retry_seq != 0)
    return 0;
  for (uint32_t i = 0; i < n; i++) {
    bytes = mlfab__add_sat(bytes, mlfab__worker_buf_bytes(worker, &bufs[i], &align));
    if (worker->sparse && worker->sparse->sifts(worker, &bufs[i])) return 0;
  }
  return bytes > MLFAB__WORKER_PACK;
}

/* Whole elements: the missing bytes begin at one. */
static uint64_t feed_has(const mlfab__outgoing *update, const mlfab__part *part,
                         const uint8_t *data, uint64_t bytes) {
  uintptr_t at = (uintptr_t)data, lacks = (uintptr_t)update->lacks;
  if (bytes == 0 || (update->stalled && part->state == MLFAB__PART_QUEUED)) return 0;
  if (at < (uintptr_t)update->lacks_end && at + bytes > lacks) bytes = at < lacks ? lacks - at : 0;
  return part->sent + bytes < part->bytes ? bytes : 0;
}

MLFAB__INTERNAL void mlfab__push_lacks(mlfab__worker *worker, mlfab_request id, const void *from,
                                       const void *to) {
  const mlfab__request *request = mlfab__request_find(worker->requests, id);
  worker->has = feed_has;
  if (id == 0) {
    worker->lacks = from;
    worker->lacks_end = to;
  }
  if (!request || request->done || request->slot >= MLFAB__WORKER_UPDATES) return;
  mlfab__outgoing *update = &worker->updates[request->slot];
  if (update->seq != request->result.seq || update->withdrawn) return;
  update->lacks = from;
  update->lacks_end = to;
  for (uint32_t s = 0; s < worker->servers; s++)
    if (update->parts[s].state >= MLFAB__PART_QUEUED) worker->port.ready(worker->port.self, s);
}

/* Tells that a stretch is about to be written. */
static void feed_arrives(const mlfab__fetch *fetch, uint64_t offset, uint64_t bytes) {
  for (uint32_t i = 0; i < fetch->nsources; i++) {
    const mlfab__source *source = &fetch->sources[i];
    uint64_t at = mlfab__max(offset, source->offset);
    uint64_t end = mlfab__min(offset + bytes, source->offset + source->bytes);
    if (at < end && source->data)
      fetch->arrives_fn(fetch->arrives_user, source->data + (at - source->offset), end - at);
  }
}

MLFAB__INTERNAL int mlfab__pull_watch(mlfab__worker *worker, mlfab_request request,
                                      mlfab__arrives_fn *fn, void *user) {
  mlfab__fetch *fetch = mlfab__pull_find(worker, request);
  if (!fetch || fetch->view || fetch->cache) return 0;
  fetch->arrives = feed_arrives;
  fetch->arrives_fn = fn;
  fetch->arrives_user = user;
  return 1;
}
