/* view.c - the worker role: views, that is pulls which are read in the servers' memory. See views.c for the server.
 *
 * A worker asks for a view by an ordinary pull with a flag. A server answers with VIEW frames, which give the addresses
 * of the bytes in its blocks, counted from the frame's bulk. If the bulk came by reference, the worker holds the memory
 * around it, and checks the runs against it. Otherwise, or if the server answers UNSUPPORTED, the worker repeats all of
 * it as an ordinary pull into memory of the view: it is a copy then. So a view is never half a copy.
 *
 *    free --pull_view--> MAPPED --all servers have told--> OUT --release--> free
 *                           '--no reference--> COPIED --pulled--> OUT
 *
 * Invariants: a server's answer is kept with its number, and forgotten when it is asked again. The runs of a view that
 * is OUT cover the requested bytes exactly once. Its holds keep the memory of the runs. */
#include "view.h"

#include "../kernels/kernels.h"
#include "lend_wire.h"

#include <stdlib.h>

enum { VIEW_RUNS_MOST = 1 << 20 }; /* of a view */

static int view_begin(mlfab__worker *worker, mlfab__fetch *fetch, mlfab_view *out, uint32_t flags,
                      uint32_t tensor, mlfab_error *error) {
  mlfab__worker_view *view = NULL;
  if (flags) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "pull_view: it takes no flags");
  if (out->size < sizeof *out)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "pull_view: view_p->size is not set");
  if (worker->define.options.ghost)
    return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED, "not supported: a view of ghost tensors");
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX && !view; i++) {
    if (!worker->views->view[i].used) view = &worker->views->view[i];
  }
  if (!view)
    return MLFAB__FAIL(error, MLFAB_ERR_LIMIT,
                       "pull_view: %d views are out; mlfab_view_release ends one", MLFAB_VIEWS_MAX);
  if (!view->asks)
    view->asks = mlfab__alloc_array(worker->env, worker->servers, sizeof *view->asks);
  if (!view->asks) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "pull_view: out of memory");
  memset(view->asks, 0, worker->servers * sizeof *view->asks);
  for (uint32_t i = 0; i < fetch->nsources; i++) fetch->sources[i].data = NULL;
  view->out = out;
  view->all = tensor == MLFAB_ALL;
  view->used = 1;
  fetch->view = view;
  return 0;
}

static int view_maps(const mlfab__fetch *fetch) { return !fetch->view->copied; }

static void view_ask(const mlfab__fetch *fetch, uint32_t server, mlfab__pull *pull) {
  pull->flags = MLFAB__PULL_VIEW;
  pull->epoch = ++fetch->view->asks[server];
}

/* --- the answers of servers --- */

static void view_forget(mlfab__worker *worker, mlfab__worker_view *view, uint32_t server) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < view->nruns; i++) {
    if (view->runs[i].server != server && server != MLFAB_ALL) {
      view->runs[kept++] = view->runs[i];
    } else if (view->runs[i].held) {
      worker->views->shared->drop(worker->views->memory, view->runs[i].held);
    }
  }
  view->nruns = kept;
}

static int view_before(const void *one, const void *two) {
  const mlfab__worker_run *a = one, *b = two;
  return a->offset < b->offset ? -1 : a->offset > b->offset;
}

/* Do the runs of a server cover its segments, exactly once? Sorts all runs by their offsets. */
static int view_whole(mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t server) {
  mlfab__worker_view *view = fetch->view;
  const mlfab__segment *segment = worker->lists->segments;
  uint64_t bytes, done = 0;
  uint32_t n = mlfab__worker_clip(worker, server, fetch->sources, fetch->nsources, &bytes), at = 0;
  if (view->nruns > 1) qsort(view->runs, view->nruns, sizeof *view->runs, view_before);
  for (uint32_t i = 0; i < view->nruns; i++) {
    const mlfab__worker_run *run = &view->runs[i];
    if (run->server != server) continue;
    if (at < n && done == segment[at].bytes) at++, done = 0;
    if (at == n || run->offset != segment[at].offset + done ||
        run->bytes > segment[at].bytes - done)
      return 0;
    done += run->bytes;
  }
  return n > 0 && at == n - 1 && done == segment[at].bytes;
}

/* Is this place of the model, at this address, between two elements, and aligned to those of the tensor of byte `in`? */
static int view_between(const mlfab__layout *layout, uint64_t offset, uint64_t in,
                        uint64_t address) {
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, in);
  uint64_t width = mlfab__dtype_bytes((int)tensor->dtype);
  return (offset - tensor->offset) % width == 0 && address % width == 0;
}

/* Does a run lie in memory [from, from + bytes), with whole, aligned elements? Types do not widen within the model. */
static int view_fits(const mlfab__worker *worker, const mlfab__view_run *run, const uint8_t *from,
                     uint64_t at, uint64_t bytes) {
  const mlfab__layout *layout = &worker->layout;
  uint64_t address = (uint64_t)(uintptr_t)from + at, end = run->offset + run->bytes;
  if (at >= bytes || run->bytes == 0 || run->bytes > bytes - at || run->offset >= layout->bytes ||
      run->bytes > layout->bytes - run->offset)
    return 0;
  return view_between(layout, run->offset, run->offset, address) &&
         view_between(layout, end, end - 1, address + run->bytes);
}

/* Adds the runs of a frame in memory [from, from + bytes), which is held. Errors: MEMORY, FRAME. */
static int view_add(mlfab__worker *worker, mlfab__worker_view *view, uint32_t server,
                    const mlfab__view *in, const mlfab__view_run *told, const uint8_t *bulk,
                    const uint8_t *from, uint64_t bytes) {
  if (view->nruns > VIEW_RUNS_MOST - in->runs) return MLFAB_ERR_FRAME;
  mlfab__worker_run *runs = mlfab__grow(worker->env, view->runs, &view->run_room,
                                        (uint64_t)view->nruns + in->runs, sizeof *runs);
  if (!runs) return MLFAB_ERR_MEMORY;
  view->runs = runs;
  for (uint32_t i = 0; i < in->runs; i++) {
    uint64_t at = (uint64_t)(uintptr_t)bulk - (uint64_t)(uintptr_t)from + told[i].at;
    if (!view_fits(worker, &told[i], from, at, bytes)) return MLFAB_ERR_FRAME;
    runs[view->nruns + i] =
        (mlfab__worker_run){told[i].offset, told[i].bytes, from + at, NULL, server};
  }
  runs[view->nruns].held = from;
  view->nruns += in->runs;
  return 0;
}

static int view_take(mlfab__worker *worker, const mlfab__fetch *fetch, uint32_t server,
                     const mlfab__view *in, const mlfab__view_run *told,
                     const mlfab__frame_in *frame) {
  const uint8_t *from = NULL;
  uint64_t bytes = 0;
  if (in->runs == 0 || !frame->bulk || frame->bulk_bytes == 0) return MLFAB_ERR_FRAME;
  const struct mlfab__worker_views *views = worker->views;
  if (!views->shared ||
      !views->shared->hold(views->memory, frame->bulk, frame->bulk_bytes, in->file, &from, &bytes))
    return MLFAB_ERR_UNSUPPORTED;
  int code = view_add(worker, fetch->view, server, in, told, frame->bulk, from, bytes);
  if (code) {
    views->shared->drop(views->memory, from);
    return code;
  }
  if (!(in->flags & MLFAB__MODEL_LAST)) return 0;
  return view_whole(worker, fetch, server) ? 0 : MLFAB_ERR_FRAME;
}

/* --- copies --- */

static int view_copy(mlfab__worker *worker, mlfab__fetch *fetch) {
  mlfab__worker_view *view = fetch->view;
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < fetch->nsources; i++) bytes += (fetch->sources[i].bytes + 63) / 64 * 64;
  view_forget(worker, view, MLFAB_ALL);
  view->copied = 1;
  view->memory = mlfab__alloc_aligned(worker->env, bytes);
  if (!view->memory) return MLFAB_ERR_MEMORY;
  view->memory_bytes = bytes;
  uint8_t *at = view->memory;
  for (uint32_t i = 0; i < fetch->nsources; i++) {
    fetch->sources[i].data = at;
    at += (fetch->sources[i].bytes + 63) / 64 * 64;
  }
  return 0;
}

/* --- parts --- */

/* Appends bytes of a source, as elements. Errors: MEMORY. */
static int view_part(mlfab__worker *worker, mlfab__worker_view *view, const mlfab__source *source,
                     uint64_t in_source, uint64_t bytes, const uint8_t *at) {
  const mlfab__tensor *tensor = mlfab__layout_tensor_at(&worker->layout, source->offset);
  uint32_t width = mlfab__dtype_bytes((int)tensor->dtype);
  mlfab_view_part *parts = mlfab__grow(worker->env, view->parts, &view->part_room,
                                       (uint64_t)view->nparts + 1, sizeof *parts);
  if (!parts) return MLFAB_ERR_MEMORY;
  view->parts = parts;
  mlfab_view_part *last = view->nparts > 0 ? &parts[view->nparts - 1] : NULL;
  uint32_t id = view->all ? MLFAB_ALL : tensor->id;
  if (last && in_source > 0 && (const uint8_t *)last->data + last->count * width == at) {
    last->count += bytes / width;
    return 0;
  }
  parts[view->nparts++] =
      (mlfab_view_part){at, in_source / width, bytes / width, id, tensor->dtype};
  return 0;
}

static int view_finish(mlfab__worker *worker, mlfab__fetch *fetch) {
  mlfab__worker_view *view = fetch->view;
  int code = 0;
  uint32_t r = 0;
  if (view->nruns > 1) qsort(view->runs, view->nruns, sizeof *view->runs, view_before);
  for (uint32_t i = 0; i < fetch->nsources && !code; i++) {
    const mlfab__source *source = &fetch->sources[i];
    if (view->copied) code = view_part(worker, view, source, 0, source->bytes, source->data);
    for (uint64_t at = 0; at < source->bytes && !view->copied && !code;) {
      const mlfab__worker_run *run = &view->runs[r];
      uint64_t in_run = source->offset + at - run->offset;
      uint64_t bytes = mlfab__min(source->bytes - at, run->bytes - in_run);
      code = view_part(worker, view, source, at, bytes, run->at + in_run);
      at += bytes;
      if (in_run + bytes == run->bytes) r++;
    }
  }
  if (code) return code;
  view->request = fetch->request;
  mlfab_view *out = view->out;
  out->copied = view->copied != 0;
  out->id = view->request;
  out->version = fetch->version;
  out->parts = view->parts;
  out->nparts = view->nparts;
  view->out = NULL;
  return 0;
}

/* --- the end --- */

/* The place keeps its lists: the next view allocates nothing. */
static void view_drop(mlfab__worker *worker, mlfab__worker_view *view) {
  view_forget(worker, view, MLFAB_ALL);
  mlfab__free_aligned(worker->env, view->memory, view->memory_bytes);
  const mlfab__worker_view kept = {.runs = view->runs,
                                   .run_room = view->run_room,
                                   .parts = view->parts,
                                   .part_room = view->part_room,
                                   .asks = view->asks};
  *view = kept;
}

static void view_ends(mlfab__worker *worker, mlfab__fetch *fetch) {
  view_drop(worker, fetch->view);
  fetch->view = NULL;
}

static void view_forgets(mlfab__worker *worker, mlfab__fetch *fetch, uint32_t server) {
  view_forget(worker, fetch->view, server);
}

MLFAB__INTERNAL int mlfab__worker_view_release(mlfab__worker *worker, uint64_t id,
                                               const void *parts, mlfab_error *error) {
  mlfab__worker_view *view = NULL;
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    mlfab__worker_view *one = &worker->views->view[i];
    if (id != 0 && one->request == id && one->parts == parts) view = one;
  }
  if (!view)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "view_release: this is no view of this context, or it was released before");
  mlfab__pull_cancel cancel = {id};
  for (uint32_t s = 0; s < worker->servers && !view->copied; s++)
    MLFAB__POST(&worker->port, s, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
  view_drop(worker, view);
  return 0;
}

/* --- pulls --- */

/* Asks all servers for the bytes of a view that cannot be read in place. */
static void view_instead(mlfab__worker *worker, mlfab__fetch *fetch, uint64_t now_ns) {
  mlfab__pull_cancel cancel = {fetch->request};
  uint64_t bytes;
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (fetch->parts[s].asked)
      MLFAB__POST(&worker->port, s, MLFAB__PULL_CANCEL, pull_cancel, &cancel);
    memset(&fetch->parts[s], 0, sizeof fetch->parts[s]);
  }
  if (view_copy(worker, fetch)) {
    mlfab__request_finish(worker->requests, mlfab__pull_stop(worker, fetch), MLFAB_ERR_MEMORY,
                          MLFAB_NO_RANK, 0, now_ns, "pull_view: out of memory for a copy");
    return;
  }
  fetch->cache = worker->cache;
  fetch->nwaiting = 0;
  for (uint32_t s = 0; s < worker->servers; s++) {
    mlfab__fetch_part *part = &fetch->parts[s];
    part->waiting = mlfab__worker_clip(worker, s, fetch->sources, fetch->nsources, &bytes) > 0;
    fetch->nwaiting += part->waiting;
  }
  for (uint32_t s = 0; s < worker->servers; s++) {
    if (fetch->parts[s].waiting && worker->streams[s].up && mlfab__worker_sends(worker, s))
      mlfab__pull_begin(worker, s, fetch);
  }
}

static void view_refused(mlfab__worker *worker, mlfab__fetch *fetch, uint64_t now_ns) {
  if (view_maps(fetch)) view_instead(worker, fetch, now_ns);
}

static void view_told(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame,
                      uint64_t now_ns) {
  mlfab__view in;
  mlfab__view_run runs[MLFAB__VIEW_RUNS_MAX];
  if (mlfab__port_refuse(&worker->port, server, frame,
                         mlfab__decode_view(frame->meta, frame->meta_bytes, &in, runs) != 0))
    return;
  mlfab__fetch *fetch = mlfab__pull_find(worker, in.request);
  /* Withdrawn, or asked for again, or it is a copy now; the server has been told. */
  if (!fetch || !fetch->view || !view_maps(fetch) || !fetch->parts[server].waiting ||
      in.ask != fetch->view->asks[server])
    return;
  int code = view_take(worker, fetch, server, &in, runs, frame);
  if (code == MLFAB_ERR_UNSUPPORTED) {
    view_instead(worker, fetch, now_ns);
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
  if (in.flags & MLFAB__MODEL_LAST) mlfab__pull_part_done(worker, fetch, server, now_ns);
}

static int view_frame(mlfab__worker *worker, uint32_t server, const mlfab__frame_in *frame,
                      uint64_t now_ns) {
  if (frame->type != MLFAB__VIEW) return 0;
  view_told(worker, server, frame, now_ns);
  return 1;
}

MLFAB__INTERNAL int mlfab__worker_pull_view(mlfab__worker *worker, const mlfab_buf *bufs,
                                            uint32_t n, const mlfab_pull_options *options,
                                            mlfab_view *out, uint64_t now_ns,
                                            mlfab_request *request_p, mlfab_error *error) {
  if (!out) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "pull_view: view_p is NULL");
  return mlfab__pull_open(worker, bufs, n, options, out, now_ns, request_p, error);
}

/* --- the group --- */

static void view_free(mlfab__worker *worker) {
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    mlfab__worker_view *view = &worker->views->view[i];
    view_drop(worker, view);
    mlfab__free(worker->env, view->runs, view->run_room * sizeof *view->runs);
    mlfab__free(worker->env, view->parts, view->part_room * sizeof *view->parts);
    mlfab__free(worker->env, view->asks, worker->servers * sizeof *view->asks);
  }
  mlfab__free(worker->env, worker->views, sizeof *worker->views);
  worker->viewer = NULL;
}

MLFAB__INTERNAL int mlfab__view_attach(mlfab__worker *worker) {
  static const mlfab__worker_viewer viewer = {view_begin,  view_ends,    view_maps,
                                              view_ask,    view_forgets, view_refused,
                                              view_finish, view_frame,   view_free};
  worker->views = mlfab__alloc(worker->env, sizeof *worker->views);
  if (!worker->views) return MLFAB_ERR_MEMORY;
  worker->viewer = &viewer;
  return 0;
}

MLFAB__INTERNAL void mlfab__view_share(mlfab__worker *worker, const mlfab__shm_memory_table *on,
                                       mlfab__shm_memory *memory) {
  worker->views->shared = on;
  worker->views->memory = memory;
}
