/* pull.c - the worker role: pulls. See worker.h.
 *
 * A pull is one request to every server that has a part of it. The servers answer with MODEL frames, slice by
 * slice, which the worker copies into the caller's buffers. A server may send a slice again from its start at a
 * newer version: the worker then writes those bytes twice. The frame marked LAST ends a server's part.
 *
 * In a fabric with a scheduler a server may let another worker's node (the hop) forward its part, and may change
 * the route at any time. Routes have ascending numbers; on each one the whole part comes, in order. PULL_VIA names
 * the newest route. So does the first frame from the hop, which may arrive earlier. On the server's own link
 * nothing comes for a route through a hop, except frames sent before the change. */
#include "worker.h"

#include "../kernels/kernels.h"

#include <stdio.h>

static mlfab__request *pull_stop(mlfab__worker *worker, mlfab__fetch *fetch);

/* Is it a view that is not a copy? Then servers answer with VIEW frames. */
static int pull_maps(const mlfab__fetch *fetch) { return fetch->view && !fetch->view->copied; }

static void pull_done(mlfab__worker *worker, mlfab__fetch *fetch, uint64_t now_ns) {
  mlfab__request *request = mlfab__request_find(worker->requests, fetch->request);
  if (fetch->view && mlfab__view_finish(worker, fetch)) {
    (void)pull_stop(worker, fetch);
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

static mlfab__fetch *pull_find(mlfab__worker *worker, uint64_t request) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    if (request != 0 && worker->fetches[i].request == request) return &worker->fetches[i];
  }
  return NULL;
}

MLFAB__INTERNAL void mlfab__pull_ask(mlfab__worker *worker, uint32_t server, mlfab__fetch *fetch) {
  uint64_t bytes;
  fetch->parts[server].asked = 1;
  /* The number of the last route stays: the server's next ones are larger, and frames that the former hop
   * still sends are void. */
  fetch->parts[server].hop = MLFAB__NO_NODE;
  mlfab__pull pull;
  memset(&pull, 0, sizeof pull);
  pull.request = fetch->request;
  if (fetch->cache) {
    fetch->cache->ask(worker, server, fetch, &pull);
  } else {
    pull.flags = pull_maps(fetch) ? MLFAB__PULL_VIEW : 0;
    if (pull_maps(fetch)) pull.epoch = ++fetch->parts[server].ask;
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

static void pull_turn(mlfab__worker *worker, uint32_t server) {
  if (worker->cache) worker->cache->turn(worker, server);
}

static void pull_begin(mlfab__worker *worker, uint32_t server, mlfab__fetch *fetch) {
  if (fetch->cache) {
    pull_turn(worker, server);
  } else {
    mlfab__pull_ask(worker, server, fetch);
  }
}

/* Ends a pull, and cancels it at the servers that still have to answer. Returns its request, for the caller
 * to finish. */
static mlfab__request *pull_stop(mlfab__worker *worker, mlfab__fetch *fetch) {
  mlfab__request *request = mlfab__request_find(worker->requests, fetch->request);
  mlfab__pull_cancel cancel = {fetch->request};
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (!fetch->parts[s].waiting && !(pull_maps(fetch) && fetch->parts[s].asked)) continue;
    MLFAB__POST(&worker->port, s, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
  }
  if (fetch->view) mlfab__view_drop(worker, fetch->view);
  fetch->view = NULL;
  fetch->request = 0;
  for (uint32_t s = 0; s < worker->servers; s++) pull_turn(worker, s);
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

static int pull_open(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                     const mlfab_pull_options *given, mlfab_view *out, uint64_t now_ns,
                     mlfab_request *request_p, mlfab_error *error) {
  mlfab__worker_view *view = NULL;
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
  if (out && options.flags)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "pull_view: it takes no flags");
  if (out) code = mlfab__view_begin(worker, out, bufs ? bufs->tensor : 0, &view, error);
  if (code) return code;
  if (!fetch->parts)
    fetch->parts = mlfab__alloc_array(worker->env, worker->servers, sizeof *fetch->parts);
  if (!fetch->parts) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "pull: out of memory");
  code = mlfab__worker_sources(worker, bufs, n, view || worker->cache, &fetch->sources,
                               &fetch->nsources, &fetch->source_room, error);
  if (code) return code;
  uint64_t bytes;
  for (uint32_t s = 0; s < worker->servers; s++) {
    uint32_t segments = mlfab__worker_clip(worker, s, fetch->sources, fetch->nsources, &bytes);
    if (segments == UINT32_MAX && (view || !worker->cache)) {
      return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
                         "pull: more than %d separate stretches of the model", MLFAB__SEGMENTS_MAX);
    }
    memset(&fetch->parts[s], 0, sizeof fetch->parts[s]);
    fetch->parts[s].waiting = segments > 0;
    fetch->parts[s].hop = MLFAB__NO_NODE;
  }
  for (uint32_t i = 0; view && i < fetch->nsources; i++) fetch->sources[i].data = NULL;
  if (view) view->used = 1;
  fetch->view = view;
  fetch->cache = view ? NULL : worker->cache;
  mlfab__request *request =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_PULL,
                          (uint32_t)(fetch - worker->fetches), now_ns, options.timeout_ns);
  fetch->request = request->id;
  fetch->flags = options.flags;
  fetch->after_seq = worker->next_seq;
  fetch->version = 0;
  fetch->arrives = NULL;
  fetch->nwaiting = 0;
  for (uint32_t s = 0; s < worker->servers; s++) fetch->nwaiting += fetch->parts[s].waiting;
  for (uint32_t s = 0; s < worker->servers; s++) {
    /* Before HELLO_ACK the worker would send the pull twice. */
    if (fetch->parts[s].waiting && worker->streams[s].up && mlfab__worker_sends(worker, s))
      pull_begin(worker, s, fetch);
  }
  *request_p = request->id;
  return 0;
}

MLFAB__INTERNAL int mlfab__worker_pull(mlfab__worker *worker, const mlfab_buf *bufs, uint32_t n,
                                       const mlfab_pull_options *options, uint64_t now_ns,
                                       mlfab_request *request_p, mlfab_error *error) {
  return pull_open(worker, bufs, n, options, NULL, now_ns, request_p, error);
}

MLFAB__INTERNAL int mlfab__worker_pull_view(mlfab__worker *worker, const mlfab_buf *bufs,
                                            uint32_t n, const mlfab_pull_options *options,
                                            mlfab_view *out, uint64_t now_ns,
                                            mlfab_request *request_p, mlfab_error *error) {
  if (!out) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "pull_view: view_p is NULL");
  return pull_open(worker, bufs, n, options, out, now_ns, request_p, error);
}

MLFAB__INTERNAL int mlfab__pull_watch(mlfab__worker *worker, mlfab_request request,
                                      mlfab__arrives_fn *fn, void *user) {
  mlfab__fetch *fetch = pull_find(worker, request);
  if (!fetch || fetch->view || fetch->cache) return 0;
  fetch->arrives = fn;
  fetch->arrives_user = user;
  return 1;
}

/* Tells that a stretch is about to be written. */
static void pull_arrives(const mlfab__fetch *fetch, uint64_t offset, uint64_t bytes) {
  for (uint32_t i = 0; fetch->arrives && i < fetch->nsources; i++) {
    const mlfab__source *source = &fetch->sources[i];
    uint64_t at = mlfab__max(offset, source->offset);
    uint64_t end = mlfab__min(offset + bytes, source->offset + source->bytes);
    if (at < end && source->data)
      fetch->arrives(fetch->arrives_user, source->data + (at - source->offset), end - at);
  }
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

/* Takes in a MODEL frame from the server or a hop. Errors: FRAME if it does not match the pull; MEMORY. */
static int pull_take(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                     const mlfab__model *model, const mlfab__frame_in *frame) {
  const mlfab__layout *layout = &worker->layout;
  int packed = (model->flags & MLFAB__MODEL_PACKED) != 0, ghost = worker->define.options.ghost != 0;
  if (model->slice >= layout->nslices || pull_maps(fetch)) return MLFAB_ERR_FRAME;
  if (model->bytes == 0) return frame->bulk_bytes == 0 ? 0 : MLFAB_ERR_FRAME;
  const mlfab__slice *slice = &layout->slices[model->slice];
  if (slice->server != server || model->offset < slice->offset ||
      model->offset - slice->offset > slice->bytes ||
      model->bytes > slice->bytes - (model->offset - slice->offset) ||
      (frame->bulk_bytes > 0 && (frame->bulk == NULL) != ghost) ||
      (packed ? ghost || !worker->sparse : frame->bulk_bytes != model->bytes) ||
      (!fetch->cache && !pull_asked(fetch, model)))
    return MLFAB_ERR_FRAME;
  pull_arrives(fetch, model->offset, model->bytes);
  int code = 0;
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
static void pull_part_done(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server,
                           uint64_t now_ns) {
  fetch->parts[server].waiting = 0;
  fetch->parts[server].hop = MLFAB__NO_NODE;
  if (--fetch->nwaiting == 0) pull_done(worker, fetch, now_ns);
  pull_turn(worker, server);
}

MLFAB__INTERNAL void mlfab__pull_model(mlfab__worker *worker, uint32_t server,
                                       const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__model model;
  int bad = mlfab__decode_model(frame->meta, frame->meta_bytes, &model);
  mlfab__fetch *fetch = bad ? NULL : pull_find(worker, model.request);
  /* withdrawn, or already answered */
  if (!bad && (!fetch || !fetch->parts[server].waiting)) return;
  /* it comes by another route now */
  if (!bad && fetch->parts[server].hop != MLFAB__NO_NODE) return;
  int code = bad ? MLFAB_ERR_FRAME : pull_take(worker, fetch, server, &model, frame);
  if (code) {
    worker->port.drop(worker->port.self, server, code,
                      code == MLFAB_ERR_MEMORY ? "out of memory for packets"
                                               : "a MODEL frame that was not asked for");
    return;
  }
  if (model.flags & MLFAB__MODEL_LAST) pull_part_done(worker, fetch, server, now_ns);
}

/* --- views --- */

/* Asks all servers for the bytes of a view that cannot be read in place. */
static void pull_copy(mlfab__worker *worker, mlfab__fetch *fetch, uint64_t now_ns) {
  mlfab__pull_cancel cancel = {fetch->request};
  uint64_t bytes;
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (fetch->parts[s].asked)
      MLFAB__POST(&worker->port, s, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
    memset(&fetch->parts[s], 0, sizeof fetch->parts[s]);
  }
  if (mlfab__view_copy(worker, fetch)) {
    mlfab__request_finish(worker->requests, pull_stop(worker, fetch), MLFAB_ERR_MEMORY,
                          MLFAB_NO_RANK, 0, now_ns, "pull_view: out of memory for a copy");
    return;
  }
  fetch->cache = worker->cache;
  fetch->nwaiting = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    mlfab__fetch_part *part = &fetch->parts[s];
    part->hop = MLFAB__NO_NODE;
    part->waiting = mlfab__worker_clip(worker, s, fetch->sources, fetch->nsources, &bytes) > 0;
    fetch->nwaiting += part->waiting;
  }
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (fetch->parts[s].waiting && worker->streams[s].up && mlfab__worker_sends(worker, s))
      pull_begin(worker, s, fetch);
  }
}

MLFAB__INTERNAL void mlfab__pull_view(mlfab__worker *worker, uint32_t server,
                                      const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__view in;
  mlfab__view_run runs[MLFAB__VIEW_RUNS_MAX];
  if (mlfab__port_refuse(&worker->port, server, frame,
                         mlfab__decode_view(frame->meta, frame->meta_bytes, &in, runs) != 0))
    return;
  mlfab__fetch *fetch = pull_find(worker, in.request);
  /* Withdrawn, or asked for again, or it is a copy now; the server has been told. */
  if (!fetch || !pull_maps(fetch) || !fetch->parts[server].waiting ||
      in.ask != fetch->parts[server].ask)
    return;
  int code = mlfab__view_take(worker, fetch, server, &in, runs, frame);
  if (code == MLFAB_ERR_UNSUPPORTED) {
    pull_copy(worker, fetch, now_ns);
    return;
  }
  if (code) {
    worker->port.drop(worker->port.self, server, code,
                      code == MLFAB_ERR_MEMORY ? "out of memory for a view"
                                               : "a VIEW frame that does not fit the pull");
    return;
  }
  fetch->version = mlfab__max(fetch->version, in.version);
  for (uint32_t i = 0; i < in.runs; i++) {
    uint32_t last = mlfab__layout_slice_at(&worker->layout, runs[i].offset + runs[i].bytes - 1);
    for (uint32_t k = mlfab__layout_slice_at(&worker->layout, runs[i].offset); k <= last; k++)
      worker->pulled[k] = mlfab__max(worker->pulled[k], in.oldest);
  }
  if (in.flags & MLFAB__MODEL_LAST) pull_part_done(worker, fetch, server, now_ns);
}

/* --- routes --- */

static void pull_route(mlfab__worker *worker, mlfab__fetch_part *part, uint32_t attempt,
                       uint32_t hop) {
  part->attempt = attempt;
  part->hop = hop;
  part->begun = 0;
  if (hop != MLFAB__NO_NODE) worker->hop.ready(worker->hop.self, hop);
}

MLFAB__INTERNAL void mlfab__pull_rerouted(mlfab__worker *worker, uint32_t server,
                                          const mlfab__frame_in *frame) {
  mlfab__pull_via via;
  if (mlfab__port_refuse(
          &worker->port, server, frame,
          mlfab__decode_pull_via(frame->meta, frame->meta_bytes, &via) || via.attempt == 0 ||
              (via.aggregator >= worker->config->workers && via.aggregator != MLFAB__NO_NODE)))
    return;
  mlfab__fetch *fetch = pull_find(worker, via.request);
  mlfab__fetch_part *part = fetch ? &fetch->parts[server] : NULL;
  /* Not newer than the known route: the hop was faster. */
  if (!part || !part->waiting || via.attempt <= part->attempt) return;
  pull_route(worker, part, via.attempt, via.aggregator);
}

MLFAB__INTERNAL void mlfab__pull_hop_model(mlfab__worker *worker, uint32_t aggregator,
                                           const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__hop_model in;
  if (mlfab__port_refuse(&worker->hop, aggregator, frame,
                         mlfab__decode_hop_model(frame->meta, frame->meta_bytes, &in) ||
                             in.server >= worker->servers))
    return;
  mlfab__fetch *fetch = pull_find(worker, in.request);
  mlfab__fetch_part *part = fetch ? &fetch->parts[in.server] : NULL;
  if (!part || !part->waiting || in.attempt < part->attempt) return;
  if (in.attempt > part->attempt) pull_route(worker, part, in.attempt, aggregator);
  if (part->hop != aggregator) return;
  mlfab__model model = {in.request, in.offset, in.bytes, in.version,
                        in.commit,  in.slice,  in.flags, in.epoch};
  part->begun = 1;
  int code = pull_take(worker, fetch, in.server, &model, frame);
  if (code) {
    worker->hop.drop(worker->hop.self, aggregator, code,
                     code == MLFAB_ERR_MEMORY ? "out of memory for packets"
                                              : "a HOP_MODEL frame that was not asked for");
    return;
  }
  if (!(in.flags & MLFAB__MODEL_LAST)) return;
  mlfab__pull_done done = {in.request};
  MLFAB__POST(&worker->port, in.server, MLFAB__PULL_DONE, pull_done, &done);
  pull_part_done(worker, fetch, in.server, now_ns);
}

MLFAB__INTERNAL void mlfab__pull_hop_lost(mlfab__worker *worker, uint32_t aggregator) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    for (uint32_t s = 0; fetch->request != 0 && s < worker->servers; s++) {
      mlfab__fetch_part *part = &fetch->parts[s];
      /* Some of it may be lost: the worker ignores the rest of this route, and the server chooses another.
       * If nothing had come yet, the hop may still begin on a new link. */
      if (part->waiting && part->hop == aggregator && part->begun) part->hop = MLFAB__NO_NODE;
    }
  }
}

MLFAB__INTERNAL int mlfab__pull_hop_wanted(const mlfab__worker *worker, uint32_t aggregator) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    const mlfab__fetch *fetch = &worker->fetches[i];
    for (uint32_t s = 0; fetch->request != 0 && s < worker->servers; s++) {
      if (fetch->parts[s].waiting && fetch->parts[s].hop == aggregator) return 1;
    }
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__pull_failed(mlfab__worker *worker, uint32_t server,
                                        const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__pull_fail fail;
  if (MLFAB__MALFORMED(&worker->port, server, frame, pull_fail, &fail)) return;
  mlfab__fetch *fetch = pull_find(worker, fail.request);
  if (!fetch) return;
  if (fetch->view &&
      fail.code == MLFAB_ERR_UNSUPPORTED) { /* of several servers the others say it, too */
    if (pull_maps(fetch)) pull_copy(worker, fetch, now_ns);
    return;
  }
  fetch->parts[server].waiting = 0;
  mlfab__request_finish(worker->requests, pull_stop(worker, fetch),
                        fail.code ? fail.code : MLFAB_ERR_REFUSED, (int32_t)server, 1, now_ns,
                        "pull: server %u refused: %s", server, fail.text);
}

MLFAB__INTERNAL void mlfab__pull_again(mlfab__worker *worker, uint32_t server) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    mlfab__pull_cancel cancel = {fetch->request};
    /* What a server has told of a view stays, and it is told when the view ends. */
    if (fetch->request == 0 || !fetch->parts[server].asked || !fetch->parts[server].waiting)
      continue;
    /* The link may be the same: a HELLO_ACK also answers STOP, and the worker may have asked after an earlier one. */
    MLFAB__POST(&worker->port, server, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
    if (fetch->view) mlfab__view_forget(worker, fetch->view, server);
    fetch->parts[server].asked = 0;
  }
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS && mlfab__worker_sends(worker, server); i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    if (fetch->request != 0 && fetch->parts[server].waiting) pull_begin(worker, server, fetch);
  }
}

MLFAB__INTERNAL void mlfab__pull_recut(mlfab__worker *worker, uint64_t now_ns) {
  if (worker->cache) worker->cache->lost(worker, MLFAB_ALL);
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    mlfab__pull_cancel cancel = {fetch->request};
    uint64_t bytes;
    uint32_t segments = 0;
    if (fetch->request == 0) continue;
    if (fetch->view) mlfab__view_forget(worker, fetch->view, MLFAB_ALL);
    fetch->nwaiting = 0;
    for (uint32_t s = 0; s < worker->servers && segments != UINT32_MAX; s++) {
      mlfab__fetch_part *part = &fetch->parts[s];
      /* A server that has told has a view under this number. */
      if (pull_maps(fetch) && part->asked)
        MLFAB__POST(&worker->port, s, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
      segments = mlfab__worker_clip(worker, s, fetch->sources, fetch->nsources, &bytes);
      if (fetch->cache) segments = segments > 0; /* a pull asks for whole slices */
      part->waiting = segments > 0;
      part->begun = part->asked = 0;
      part->hop = MLFAB__NO_NODE;
      fetch->nwaiting += part->waiting;
    }
    if (segments == UINT32_MAX)
      mlfab__request_finish(
          worker->requests, pull_stop(worker, fetch), MLFAB_ERR_LIMIT, MLFAB_NO_RANK, 0, now_ns,
          "pull: too many separate stretches of the model, since slices have moved");
  }
}

MLFAB__INTERNAL void mlfab__pull_renumber(mlfab__worker *worker, uint32_t server, uint64_t seq) {
  int asks = worker->streams[server].up && mlfab__worker_sends(worker, server);
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS && asks; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    mlfab__pull_cancel cancel = {fetch->request};
    if (fetch->request == 0 || !fetch->parts[server].waiting || !fetch->parts[server].asked ||
        fetch->after_seq <= seq)
      continue;
    MLFAB__POST(&worker->port, server, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
    if (fetch->view) mlfab__view_forget(worker, fetch->view, server);
    mlfab__pull_ask(worker, server, fetch);
  }
}

MLFAB__INTERNAL void mlfab__pull_dead(mlfab__worker *worker, uint32_t server, uint64_t now_ns) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    if (fetch->request == 0 || !fetch->parts[server].waiting) continue;
    mlfab__request_dead(worker->requests, pull_stop(worker, fetch), server, now_ns);
  }
}

MLFAB__INTERNAL void mlfab__pull_withdraw(mlfab__worker *worker, mlfab__request *request, int code,
                                          uint64_t now_ns) {
  mlfab__fetch *fetch = pull_find(worker, request->id);
  const mlfab__blame *blame = &request->blame;
  /* Without a fetch, its model was dropped meanwhile. */
  if (fetch && (blame->rank == MLFAB_NO_RANK || !fetch->parts[blame->by].waiting)) {
    uint32_t server = 0;
    while (server + 1 < worker->servers && !fetch->parts[server].waiting) server++;
    uint32_t hop = fetch->parts[server].hop;
    if (hop == MLFAB__NO_NODE)
      mlfab__request_blame(request, (int32_t)server, 1, "%s", "");
    else
      mlfab__request_blame(request, (int32_t)server, 1, " by way of worker %u", hop);
  }
  if (fetch) pull_stop(worker, fetch);
  mlfab__request_expire(worker->requests, request, code, now_ns);
}

MLFAB__INTERNAL void mlfab__pull_forget(mlfab__worker *worker) {
  for (uint32_t i = 0; i < MLFAB__WORKER_PULLS; i++) {
    mlfab__fetch *fetch = &worker->fetches[i];
    if (fetch->view) mlfab__view_drop(worker, fetch->view);
    fetch->view = NULL;
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
