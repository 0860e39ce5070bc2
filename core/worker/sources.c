/* sources.c - the worker role: maps a call's buffers to the flat model, and clips them to a server's shard;
 * decides what may go to a server now. See worker.h. */
#include "worker.h"

#include "../kernels/kernels.h"

#include <stdio.h>

/* Names what a buffer belongs to, for error texts. */
static const char *sources_of(const mlfab_buf *buf, char text[32]) {
  if (buf->tensor == MLFAB_ALL) return "the model (MLFAB_ALL)";
  snprintf(text, 32, "tensor %u", buf->tensor);
  return text;
}

/* One buffer's place in the flat model. */
static int sources_one(const mlfab__worker *worker, const mlfab_buf *buf, int bare,
                       mlfab__source *source, mlfab_error *error) {
  const mlfab__layout *layout = &worker->layout;
  uint64_t count;
  char of[32];
  if (!buf->data && !bare && !worker->define.options.ghost)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "the buffer of %s is NULL", sources_of(buf, of));
  source->data = worker->define.options.ghost ? NULL : buf->data;
  if (buf->tensor == MLFAB_ALL) {
    if (!layout->uniform_dtype)
      return MLFAB__FAIL(error, MLFAB_ERR_DTYPE, "MLFAB_ALL needs tensors of one element type");
    source->offset = 0;
    source->bytes = layout->bytes;
    count = layout->bytes / mlfab__dtype_bytes((int)layout->uniform_dtype);
  } else {
    const mlfab__tensor *tensor = mlfab__layout_find(layout, buf->tensor);
    if (!tensor) return MLFAB__FAIL(error, MLFAB_ERR_TENSOR, "there is no tensor %u", buf->tensor);
    source->offset = tensor->offset;
    source->bytes = tensor->bytes;
    count = tensor->count;
  }
  if (buf->count != count)
    return MLFAB__FAIL(error, MLFAB_ERR_SHAPE, "%s has %llu elements, the buffer has %llu",
                       sources_of(buf, of), (unsigned long long)count,
                       (unsigned long long)buf->count);
  if (count > 0 && (uintptr_t)source->data % (source->bytes / count) != 0)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "the buffer of %s is not aligned to its elements",
                       sources_of(buf, of));
  return 0;
}

MLFAB__INTERNAL int mlfab__worker_sources(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                          int bare, mlfab__source **sources, uint32_t *nsources,
                                          uint32_t *room, mlfab_error *error) {
  if (!bufs || n == 0) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "no buffers");
  if (n > *room) {
    mlfab__free(worker->env, *sources, *room * sizeof **sources);
    *sources = mlfab__alloc_array(worker->env, n, sizeof **sources);
    *room = *sources ? n : 0;
    if (!*sources) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for %u buffers", n);
  }
  mlfab__source *list = *sources;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__source source = {0, 0, NULL};
    int code = sources_one(worker, &bufs[i], bare, &source, error);
    if (code) return code;
    /* Insertion: callers list tensors in order, so this is one comparison each. */
    uint32_t at = i;
    for (; at > 0 && list[at - 1].offset > source.offset; at--) list[at] = list[at - 1];
    list[at] = source;
  }
  for (uint32_t i = 1; i < n; i++) {
    if (list[i - 1].offset + list[i - 1].bytes <= list[i].offset) continue;
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "a tensor is named twice in the list of buffers");
  }
  *nsources = n;
  return 0;
}

MLFAB__INTERNAL uint32_t mlfab__worker_clip(mlfab__worker *worker, uint32_t server,
                                            const mlfab__source *sources, uint32_t n,
                                            uint64_t *bytes_p) {
  uint64_t begin = 0, end = 0;
  mlfab__segment *out = worker->lists->segments;
  uint32_t count = 0;
  *bytes_p = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint64_t from = sources[i].offset, stop = from + sources[i].bytes;
    for (uint64_t to; from < stop; from = to) {
      if (from >= end) mlfab__layout_run(&worker->layout, server, from, &begin, &end);
      from = mlfab__max(from, begin);
      to = mlfab__min(stop, end);
      if (from >= to) break;
      *bytes_p += to - from;
      if (count > 0 && out[count - 1].offset + out[count - 1].bytes == from) {
        out[count - 1].bytes += to - from;
        continue;
      }
      if (count == MLFAB__SEGMENTS_MAX) return UINT32_MAX;
      out[count].offset = from;
      out[count++].bytes = to - from;
    }
  }
  return count;
}

MLFAB__INTERNAL int mlfab__worker_status(const mlfab__worker *worker, uint64_t seq, int *status_p) {
  if (seq == 0 || seq >= worker->next_seq || worker->next_seq - seq > MLFAB__WINDOW)
    return MLFAB_ERR_REQUEST;
  *status_p = worker->status[seq % MLFAB__WINDOW];
  return 0;
}

/* --- sending to a server --- */

MLFAB__INTERNAL uint64_t mlfab__worker_ahead(const mlfab__worker *worker, uint32_t server,
                                             uint64_t before) {
  uint64_t ahead = 0;
  for (uint32_t i = 0; i < worker->norder; i++) {
    const mlfab__outgoing *update = &worker->updates[worker->order[i]];
    if (update->seq >= before) break;
    if (update->parts[server].state >= MLFAB__PART_QUEUED && mlfab__worker_whole(update)) ahead++;
  }
  return ahead;
}

MLFAB__INTERNAL int mlfab__worker_sends(const mlfab__worker *worker, uint32_t server) {
  return worker->announces == MLFAB__NEVER && worker->streams[server].epoch == worker->epoch;
}

MLFAB__INTERNAL int mlfab__worker_announces(const mlfab__worker *worker, uint32_t server,
                                            uint64_t seq) {
  return seq <= worker->announces && worker->streams[server].epoch == worker->epoch;
}

MLFAB__INTERNAL int mlfab__worker_reaches(const mlfab__worker *worker, uint32_t server,
                                          const char *call, mlfab_error *error) {
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (worker->streams[s].dead && !worker->streams[s].absent &&
        (server == MLFAB_ALL || server == s))
      return mlfab__error(error, MLFAB_ERR_PEER_DEAD, (int32_t)s, 1, 0, "%s: server %u is dead",
                          call, s);
  }
  return 0;
}
