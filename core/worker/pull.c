/* pull.c - the worker role: pulls. See worker.h.
 *
 * A pull is one request to every server that has a part of it. The servers answer with MODEL frames, slice by
 * slice, which the worker copies into the caller's buffers. A server may send a slice again from its start at a
 * newer version: the worker then writes those bytes twice. The frame marked LAST ends a server's part.
 *
 * In a fabric with a scheduler another worker's node may forward a part (`routes`). On the server's own link nothing comes
 * then, except frames sent before. */
#include "worker.h"

#include "../kernels/kernels.h"

#include <stdio.h>

/* Is it a view that is not a copy? Then servers answer with VIEW frames. */
static int pull_maps(const mlfab__worker *worker, const mlfab__fetch *fetch) {
  return fetch->view && worker->viewer->maps(fetch);
}

static void pull_done(mlfab__worker *worker, mlfab__fetch *fetch, uint64_t now_ns) {
  mlfab__request *request = mlfab__request_find(worker->requests, fetch->request);
  if (fetch->view && worker->viewer->finish(worker, fetch)) {
    (void)mlfab__pull_stop(worker, fetch);
    mlfab__request_finish(worker->requests, request, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, now_ns,
                          "pull_view: out of memory");
    return;
  }
  if (fetch->cache) fetch->cache->done(worker, fetch);
  fetch->request = 0;
  fetch->view = NULL;
  worker->pull_count++;
  worker->stats->pulls_finished++;
  mlfab__request_succeed(worker->requests, request, now_ns);
  if (request) request->result.version = fetch->version;
  worker->due = 1;
}

MLFAB__INTERNAL mlfab__fetch *mlfab__pull_find(mlfab__worker *worker, uint64_t request) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    if (request != 0 && worker->fetches[i].request == request) return &worker->fetches[i];
  }
  return NULL;
}

/* The worker whose node forwards a part, or MLFAB__NO_NODE. */
static uint32_t pull_by(const mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t server) {
  return worker->routes ? worker->routes->pull_by(worker, fetch, server) : MLFAB__NO_NODE;
}

MLFAB__INTERNAL void mlfab__pull_ask(mlfab__worker *worker, uint32_t server, mlfab__fetch *fetch) {
  uint64_t bytes;
  fetch->parts[server].asked = 1;
  if (worker->routes) worker->routes->pull_leave(worker, fetch, server);
  mlfab__pull pull;
  memset(&pull, 0, sizeof pull);
  pull.request = fetch->request;
  if (fetch->cache) {
    fetch->cache->ask(worker, server, fetch, &pull);
  } else {
    if (pull_maps(worker, fetch)) worker->viewer->ask(fetch, server, &pull);
    pull.segments = mlfab__worker_clip(worker, server, fetch->sources, fetch->nsources, &bytes);
  }
  /* The first weights belong to no round: other workers may be waiting for this one. */
  if (worker->stands) {
    pull.progress =
        worker->streams[server].round + mlfab__worker_ahead(worker, server, fetch->after_seq);
  }
  uint8_t meta[MLFAB_META_MAX];
  uint32_t n = mlfab__encode_pull(meta, &pull, worker->lists->segments, worker->lists->versions);
  worker->port.post(worker->port.self, server, MLFAB__PULL, meta, n);
}

MLFAB__INTERNAL void mlfab__pull_begin(mlfab__worker *worker, uint32_t server,
                                       mlfab__fetch *fetch) {
  if (fetch->cache)
    fetch->cache->turn(worker, server);
  else
    mlfab__pull_ask(worker, server, fetch);
}

MLFAB__INTERNAL mlfab__request *mlfab__pull_stop(mlfab__worker *worker, mlfab__fetch *fetch) {
  mlfab__request *request = mlfab__request_find(worker->requests, fetch->request);
  mlfab__pull_cancel cancel = {fetch->request};
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (!fetch->parts[s].waiting && !(pull_maps(worker, fetch) && fetch->parts[s].asked)) continue;
    MLFAB__POST(&worker->port, s, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
  }
  if (fetch->view) worker->viewer->drop(worker, fetch);
  fetch->request = 0;
  for (uint32_t s = 0; worker->cache && s < worker->servers; s++) worker->cache->turn(worker, s);
  worker->due = 1;
  return request;
}

static int pull_check(const mlfab__worker *worker, uint32_t flags, mlfab_error *error) {
  if (flags & ~(uint32_t)(MLFAB_PULL_FULL | MLFAB_PULL_KEPT))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "pull: unknown flags");
  if (!worker->stands && !worker->model_request) {
    return MLFAB__FAIL(error, MLFAB_ERR_STATE,
                       "pull: there is no model yet: call mlfab_model_start first");
  }
  if (flags && !worker->cache)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "pull: flags that only a model with version tags has");
  return mlfab__worker_reaches(worker, MLFAB_ALL, "pull", error);
}

MLFAB__INTERNAL int mlfab__pull_open(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                     const mlfab_pull_options *given, mlfab_view *out,
                                     uint64_t now_ns, mlfab_request *request_p,
                                     mlfab_error *error) {
  mlfab_pull_options options;
  memset(&options, 0, sizeof options);
  if (given) memcpy(&options, given, mlfab__min(given->size, sizeof options));
  if (given && given->size < offsetof(mlfab_pull_options, flags))
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "pull: options.size is not set");
  int code = pull_check(worker, options.flags, error);
  if (code) return code;
  mlfab__fetch *fetch = NULL;
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS && !fetch; i++) {
    if (worker->fetches[i].request == 0) fetch = &worker->fetches[i];
  }
  if (!fetch)
    return MLFAB__FAIL(error, MLFAB_ERR_AGAIN, "pull: %d pulls are under way", MLFAB__WORKER_PULLS);
  code = mlfab__request_room(worker->requests, MLFAB__REQUEST_PULL, error);
  if (code) return code;
  if (!fetch->parts)
    fetch->parts = mlfab__alloc_array(worker->env, worker->servers, sizeof *fetch->parts);
  if (!fetch->parts) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "pull: out of memory");
  code = mlfab__worker_sources(worker, bufs, n, out != NULL || worker->cache, &fetch->sources,
                               &fetch->nsources, &fetch->source_room, error);
  if (code) return code;
  uint64_t bytes;
  fetch->nwaiting = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    uint32_t segments = mlfab__worker_clip(worker, s, fetch->sources, fetch->nsources, &bytes);
    if (segments == UINT32_MAX && (out || !worker->cache)) {
      return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
                         "pull: more than %d separate stretches of the model", MLFAB__SEGMENTS_MAX);
    }
    memset(&fetch->parts[s], 0, sizeof fetch->parts[s]);
    fetch->parts[s].waiting = segments > 0;
    fetch->nwaiting += segments > 0;
  }
  if (out)
    code = worker->viewer->begin(worker, fetch, out, options.flags, bufs ? bufs->tensor : 0, error);
  if (code) return code;
  fetch->cache = out ? NULL : worker->cache;
  mlfab__request *request =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_PULL,
                          (uint32_t)(fetch - worker->fetches), now_ns, options.timeout_ns);
  fetch->request = request->id;
  fetch->flags = options.flags;
  fetch->after_seq = worker->next_seq;
  fetch->version = 0;
  fetch->arrives = NULL;
  for (uint32_t s = 0; s < worker->servers; s++) {
    /* Before HELLO_ACK the worker would send the pull twice. */
    if (fetch->parts[s].waiting && worker->streams[s].up && mlfab__worker_sends(worker, s))
      mlfab__pull_begin(worker, s, fetch);
  }
  *request_p = request->id;
  return 0;
}

/* The source that contains this byte, or NULL. */
static const mlfab__source *pull_source(const mlfab__fetch *fetch, uint64_t offset) {
  uint32_t low = 0, high = fetch->nsources;
  while (high - low > 1) {
    uint32_t middle = low + (high - low) / 2;
    if (fetch->sources[middle].offset <= offset) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const mlfab__source *source = &fetch->sources[low];
  return offset >= source->offset && offset - source->offset < source->bytes ? source : NULL;
}

/* Did the pull ask for all of the stretch? */
static int pull_asked(const mlfab__fetch *fetch, const mlfab__model *model) {
  uint64_t at = model->offset, end = at + model->bytes;
  while (at < end) {
    const mlfab__source *source = pull_source(fetch, at);
    if (!source) return 0;
    at = source->offset + source->bytes;
  }
  return at >= end;
}

MLFAB__INTERNAL void mlfab__pull_write(const mlfab__worker *worker, const mlfab__fetch *fetch,
                                       uint64_t offset, const uint8_t *from, uint64_t bytes) {
  for (uint32_t i = 0; i < fetch->nsources; i++) {
    const mlfab__source *source = &fetch->sources[i];
    uint64_t at = mlfab__max(offset, source->offset);
    uint64_t end = mlfab__min(offset + bytes, source->offset + source->bytes);
    if (at < end && source->data)
      mlfab__kernel_copy(source->data + (at - source->offset), from + (at - offset), end - at,
                         worker->layout.bytes >= MLFAB__STREAM_BYTES);
  }
}

MLFAB__INTERNAL uint8_t *mlfab__pull_into(const mlfab__fetch *fetch, uint64_t offset) {
  const mlfab__source *source = pull_source(fetch, offset);
  return source && source->data ? source->data + (offset - source->offset) : NULL;
}

MLFAB__INTERNAL int mlfab__pull_take(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                                     const mlfab__model *model, const mlfab__frame_in *frame) {
  const mlfab__layout *layout = &worker->layout;
  int packed = (model->flags & MLFAB__MODEL_PACKED) != 0, ghost = worker->define.options.ghost != 0;
  if (model->slice >= layout->nslices || pull_maps(worker, fetch)) return MLFAB_ERR_FRAME;
  if (model->bytes == 0) return frame->bulk_bytes == 0 ? 0 : MLFAB_ERR_FRAME;
  const mlfab__slice *slice = &layout->slices[model->slice];
  if (slice->server != server || model->offset < slice->offset ||
      model->offset - slice->offset > slice->bytes ||
      model->bytes > slice->bytes - (model->offset - slice->offset) ||
      (frame->bulk_bytes > 0 && (frame->bulk == NULL) != ghost) ||
      (packed ? ghost || !worker->sparse : frame->bulk_bytes != model->bytes) ||
      (!fetch->cache && !pull_asked(fetch, model)))
    return MLFAB_ERR_FRAME;
  int code = 0;
  if (fetch->arrives) fetch->arrives(fetch, model->offset, model->bytes);
  if (packed || fetch->cache)
    code = worker->sparse->take(worker, fetch, server, model, frame);
  else if (!ghost)
    mlfab__pull_write(worker, fetch, model->offset, frame->bulk, model->bytes);
  if (code) return code;
  worker->pulled[model->slice] = mlfab__max(worker->pulled[model->slice], model->version);
  fetch->version = mlfab__max(fetch->version, model->version);
  return 0;
}

/* A server's part is complete. */
MLFAB__INTERNAL void mlfab__pull_part_done(mlfab__worker *worker, mlfab__fetch *fetch,
                                           uint32_t server, uint64_t now_ns) {
  fetch->parts[server].waiting = 0;
  if (--fetch->nwaiting == 0) pull_done(worker, fetch, now_ns);
  if (worker->cache) worker->cache->turn(worker, server);
}

MLFAB__INTERNAL void mlfab__pull_model(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__model model;
  int bad = mlfab__decode_model(frame->meta, frame->meta_bytes, &model);
  mlfab__fetch *fetch = bad ? NULL : mlfab__pull_find(worker, model.request);
  /* withdrawn, or already answered */
  if (!bad && (!fetch || !fetch->parts[server].waiting)) return;
  /* it comes by another route now */
  if (!bad && pull_by(worker, fetch, server) != MLFAB__NO_NODE) return;
  int code = bad ? MLFAB_ERR_FRAME : mlfab__pull_take(worker, fetch, server, &model, frame);
  if (code) {
    worker->port.drop(worker->port.self, server, code,
                      code == MLFAB_ERR_MEMORY ? "out of memory for packets"
                                               : "a MODEL frame that was not asked for");
    return;
  }
  if (model.flags & MLFAB__MODEL_LAST) mlfab__pull_part_done(worker, fetch, server, now_ns);
}

MLFAB__INTERNAL void mlfab__pull_failed(mlfab__worker *worker, uint32_t server,
                                        const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__pull_fail fail;
  if (MLFAB__MALFORMED(&worker->port, server, frame, pull_fail, &fail)) return;
  mlfab__fetch *fetch = mlfab__pull_find(worker, fail.request);
  if (!fetch) return;
  if (fetch->view &&
      fail.code == MLFAB_ERR_UNSUPPORTED) { /* of several servers the others say it, too */
    worker->viewer->refused(worker, fetch, now_ns);
    return;
  }
  fetch->parts[server].waiting = 0;
  mlfab__request_finish(worker->requests, mlfab__pull_stop(worker, fetch),
                        fail.code ? fail.code : MLFAB_ERR_REFUSED, (int32_t)server, 1, now_ns,
                        "pull: server %u refused: %s", server, fail.text);
}

MLFAB__INTERNAL void mlfab__pull_again(mlfab__worker *worker, uint32_t server, uint64_t seq) {
  if (!worker->streams[server].up) return;
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    mlfab__pull_cancel cancel = {fetch->request};
    /* A server's words about a view stay; the end of the view tells them. */
    if (fetch->request == 0 || !fetch->parts[server].asked || !fetch->parts[server].waiting ||
        fetch->after_seq <= seq)
      continue;
    /* The link may be the same: a HELLO_ACK also answers STOP, and the worker may have asked after an earlier one. */
    MLFAB__POST(&worker->port, server, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
    if (fetch->view) worker->viewer->forget(worker, fetch, server);
    fetch->parts[server].asked = 0;
  }
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS && mlfab__worker_sends(worker, server); i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    if (fetch->request != 0 && fetch->parts[server].waiting && !fetch->parts[server].asked)
      mlfab__pull_begin(worker, server, fetch);
  }
}

MLFAB__INTERNAL void mlfab__pull_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    if (fetch->request == 0 || !fetch->parts[server].waiting) continue;
    mlfab__request_dead(worker->requests, mlfab__pull_stop(worker, fetch), server, now_ns);
  }
}

MLFAB__INTERNAL void mlfab__pull_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                          uint64_t now_ns) {
  mlfab__fetch *fetch = mlfab__pull_find(worker, request->id);
  const mlfab__blame *blame = &request->blame;
  /* Without a fetch, its model was dropped meanwhile. */
  if (fetch && (blame->rank == MLFAB_NO_RANK || !fetch->parts[blame->by].waiting)) {
    uint32_t server = 0;
    while (server + 1 < worker->servers && !fetch->parts[server].waiting) server++;
    uint32_t hop = pull_by(worker, fetch, server);
    if (hop == MLFAB__NO_NODE)
      mlfab__request_blame(request, (int32_t)server, 1, "%s", "");
    else
      mlfab__request_blame(request, (int32_t)server, 1, " by way of worker %u", hop);
  }
  if (fetch) mlfab__pull_stop(worker, fetch);
  mlfab__request_expire(worker->requests, request, code, now_ns);
}

MLFAB__INTERNAL void mlfab__pull_forget(mlfab__worker *worker) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    if (fetch->view) worker->viewer->drop(worker, fetch);
    fetch->request = 0;
  }
}

MLFAB__INTERNAL void mlfab__pull_free(mlfab__worker *worker) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    mlfab__free(worker->env, fetch->sources, fetch->source_room * sizeof *fetch->sources);
    mlfab__free(worker->env, fetch->parts, worker->servers * sizeof *fetch->parts);
    memset(fetch, 0, sizeof *fetch);
  }
}
