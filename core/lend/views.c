/* views.c - the server role: views, that is pulls which the worker reads in the server's memory. See server.h, and view.c for the worker.
 *
 * A pull that asks for a view waits for its condition as any other. Then the server pins all requested blocks, and
 * sends their places, in one frame for each file. A block with a reference is never written, so the view stays as it
 * is. If the blocks are not in shared memory, the server refuses with UNSUPPORTED, and the worker pulls a copy.
 *
 *    free --PULL--> ASKED --pinned--> OUT --the worker's PULL_CANCEL, or it has left--> free
 *                      '--the pull has ended--> free  '--its link is lost--> LOST --all pages are renewed--> free
 *
 * A worker whose link is lost may go on reading, and cannot be asked. So the server renews the pages of its views
 * (base/shm_memory.h), and the worker keeps the old pages. Ticks do that, VIEW_RENEWS bytes at a time.
 *
 * Invariants. A view that is OUT or LOST has one reference to a block for each listing of the block. `store` is the
 * server's store, or a retired store, which has only blocks of views. A worker has at most MLFAB_VIEWS_MAX views, so
 * its views keep the memory of at most so many models. */
#include "views.h"

#include "lend_wire.h"

#include <stdlib.h>

enum { VIEW_RENEWS = 64 << 20, VIEW_RUNS = 65536 };

/* A store that the server has replaced. */
struct mlfab__server_retired {
  struct mlfab__server_retired *next;
  mlfab__store store;
};

/* The worker's view that is OUT; a lost view may have the same number. */
static mlfab__server_view *views_find(const mlfab__server *server, uint32_t worker,
                                      uint64_t request) {
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    mlfab__server_view *view = &server->lending->places[worker * MLFAB_VIEWS_MAX + i];
    if (request != 0 && view->request == request && view->pinned && !view->lost) return view;
  }
  return NULL;
}

static int views_has(const mlfab__server *server, uint32_t worker, uint64_t request) {
  return views_find(server, worker, request) != NULL;
}

/* Is there a view of this store? */
static int views_of(const mlfab__server *server, const mlfab__store *store) {
  for (uint32_t i = 0; i < server->lending->nplaces; i++) {
    const mlfab__server_view *view = &server->lending->places[i];
    if (view->request != 0 && view->store == store) return 1;
  }
  return 0;
}

static void views_drop(mlfab__server *server, mlfab__server_view *view) {
  mlfab__store *store = view->store;
  for (uint32_t i = 0; i < view->nblocks; i++) mlfab__store_unref(store, view->blocks[i]);
  view->request = 0;
  view->store = NULL;
  view->pinned = 0;
  view->nblocks = view->nruns = 0;
  server->lending->views--;
  server->lending->lost -= view->lost != 0;
  view->lost = 0;
  if (store == &server->store || views_of(server, store)) return;
  struct mlfab__server_retired **at = &server->lending->retired;
  while (&(*at)->store != store) at = &(*at)->next;
  struct mlfab__server_retired *gone = *at;
  *at = gone->next;
  mlfab__store_free(server->env, &gone->store);
  mlfab__free(server->env, gone, sizeof *gone);
}

/* --- the blocks of a view --- */

/* Makes room for one more block and run. Errors: MEMORY. */
static int views_grow(mlfab__env *env, mlfab__server_view *view) {
  uint32_t *blocks = mlfab__grow(env, view->blocks, &view->block_room, (uint64_t)view->nblocks + 1,
                                 sizeof *blocks);
  if (!blocks) return MLFAB_ERR_MEMORY;
  view->blocks = blocks;
  mlfab__server_run *runs =
      mlfab__grow(env, view->runs, &view->run_room, (uint64_t)view->nruns + 1, sizeof *runs);
  if (!runs) return MLFAB_ERR_MEMORY;
  view->runs = runs;
  return 0;
}

/* Appends bytes of a block. Errors: MEMORY. */
static int views_append(mlfab__server *server, mlfab__server_view *view,
                        const mlfab__server_run *piece) {
  if ((view->nblocks == view->block_room || view->nruns == view->run_room) &&
      views_grow(server->env, view))
    return MLFAB_ERR_MEMORY;
  mlfab__store_ref(&server->store, piece->block);
  view->blocks[view->nblocks++] = piece->block;
  mlfab__server_run *last = view->nruns > 0 ? &view->runs[view->nruns - 1] : NULL;
  if (last && last->file == piece->file && last->at + last->bytes == piece->at &&
      last->offset + last->bytes == piece->offset)
    last->bytes += piece->bytes;
  else
    view->runs[view->nruns++] = *piece;
  return 0;
}

/* Returns the number of bytes from `at` on in one file, whose number is in row->file; 0: they are in no file. *row: the
 * last answer of the memory, all zero at first. */
static uint64_t views_row(const mlfab__slab_areas *slab, mlfab__server_run *row,
                          const uint8_t *at) {
  uint64_t in_row = (uint64_t)(uintptr_t)at - (uint64_t)(uintptr_t)row->at;
  if (in_row < row->bytes) return row->bytes - in_row;
  *row = (mlfab__server_run){.at = at};
  row->file = slab->on->file(slab->memory, at, &row->bytes);
  return row->bytes;
}

/* Lists the bytes [offset, end) of one slice. The pages of one block may belong to two files: when a link is lost, the transport
 * renews the pages that were lent to it. Errors: MEMORY; UNSUPPORTED: they are not in shared memory. */
static int views_list_slice(mlfab__server *server, mlfab__server_view *view, mlfab__server_run *row,
                            const mlfab__shard_slice *s, uint64_t offset, uint64_t end) {
  const mlfab__store *store = &server->store;
  uint64_t in_block = (offset - s->offset) % store->block_bytes;
  const uint32_t *block = &store->w[s->first + (offset - s->offset) / store->block_bytes];
  while (offset < end) {
    const uint8_t *at = store->blocks[*block].data + in_block;
    uint64_t row_bytes = views_row(&server->lending->slab, row, at);
    if (row_bytes == 0) return MLFAB_ERR_UNSUPPORTED;
    uint64_t bytes = mlfab__min(mlfab__min(end - offset, store->block_bytes - in_block), row_bytes);
    mlfab__server_run piece = {at, offset, bytes, row->file, *block};
    if (views_append(server, view, &piece)) return MLFAB_ERR_MEMORY;
    offset += bytes;
    in_block += bytes;
    if (in_block == store->block_bytes) block++, in_block = 0;
  }
  view->version = mlfab__max(view->version, s->version);
  view->oldest = mlfab__min(view->oldest, s->version);
  return 0;
}

/* Lists the bytes that a pull asks for. Errors as views_list_slice. */
static int views_list(mlfab__server *server, const mlfab__server_pull *pull,
                      mlfab__server_view *view) {
  const mlfab__store *store = &server->store;
  mlfab__server_run row = {0};
  if (store->ghost || store->memory || !server->lending->slab.on) return MLFAB_ERR_UNSUPPORTED;
  for (uint32_t i = 0; i < pull->segments_used; i++) {
    uint64_t offset = pull->segments[i].offset, end = offset + pull->segments[i].bytes, until;
    const mlfab__shard_slice *s =
        &store->slices[store->local[mlfab__layout_slice_at(&server->layout, offset)]];
    for (; offset < end; offset = until, s++) {
      until = mlfab__min(end, s->offset + s->bytes);
      int code = views_list_slice(server, view, &row, s, offset, until);
      if (code) return code;
    }
  }
  return 0;
}

static int views_before(const void *one, const void *two) {
  const mlfab__server_run *a = one, *b = two;
  if (a->file != b->file) return a->file < b->file ? -1 : 1;
  return a->at < b->at ? -1 : a->at > b->at;
}

/* The largest run in the same file as this one. */
static const mlfab__server_run *views_largest(const mlfab__server_view *view, uint32_t run) {
  uint64_t file = view->runs[run].file;
  const mlfab__server_run *largest = &view->runs[run];
  while (run > 0 && view->runs[run - 1].file == file) run--;
  for (; run < view->nruns && view->runs[run].file == file; run++)
    if (view->runs[run].bytes > largest->bytes) largest = &view->runs[run];
  return largest;
}

/* Can each frame have a bulk that a transport refers to? */
static int views_tells(const mlfab__server_view *view) {
  for (uint32_t i = 0; i < view->nruns; i++) {
    if ((i == 0 || view->runs[i].file != view->runs[i - 1].file) &&
        views_largest(view, i)->bytes < MLFAB__VIEW_LEAST + 8)
      return 0;
  }
  return view->nruns > 0 && view->nruns <= VIEW_RUNS;
}

/* Finds a free place. Errors: LIMIT; UNSUPPORTED: there will be a place when the pages of lost views are renewed. */
static int views_place(mlfab__server *server, uint32_t worker, mlfab__server_view **view_p) {
  mlfab__server_view *views = &server->lending->places[worker * MLFAB_VIEWS_MAX];
  int code = MLFAB_ERR_LIMIT;
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    *view_p = &views[i];
    if (views[i].request == 0) return 0;
    if (views[i].lost) code = MLFAB_ERR_UNSUPPORTED;
  }
  return code;
}

static int views_ask(mlfab__server *server, mlfab__server_pull *pull, uint32_t ask) {
  mlfab__server_view *view;
  int code = views_place(server, pull->worker, &view);
  if (code) return code;
  view->request = pull->request;
  view->ask = ask;
  pull->view = view;
  return 0;
}

static void views_over(mlfab__server *server, mlfab__server_pull *pull) {
  (void)server;
  if (pull->view->request == pull->request && !pull->view->pinned) pull->view->request = 0;
  pull->view = NULL;
}

static int views_pinned(const mlfab__server_pull *pull) { return pull->view->pinned; }

static int views_pin(mlfab__server *server, mlfab__server_pull *pull) {
  struct mlfab__server_lending *lending = server->lending;
  mlfab__server_view *view = pull->view;
  if (!lending->spare) lending->spare = mlfab__alloc(server->env, sizeof *lending->spare);
  if (!lending->spare) return MLFAB_ERR_MEMORY;
  view->store = &server->store;
  view->version = 0;
  view->oldest = UINT64_MAX;
  view->next = 0;
  view->pinned = 1;
  lending->views++;
  int code = views_list(server, pull, view);
  if (!code && view->nruns > 1) qsort(view->runs, view->nruns, sizeof *view->runs, views_before);
  if (!code && !views_tells(view)) code = MLFAB_ERR_UNSUPPORTED;
  if (code) views_drop(server, view);
  return code;
}

/* --- frames --- */

static int views_next(const mlfab__server_pull *pull, mlfab__frame_out *frame) {
  const mlfab__server_view *view = pull->view;
  const mlfab__server_run *first = &view->runs[view->next];
  const mlfab__server_run *largest = views_largest(view, view->next);
  const uint8_t *bulk = largest->at + (8 - (uintptr_t)largest->at % 8) % 8;
  mlfab__view out = {view->request, view->version, first->file, view->ask, 0, 0, view->oldest};
  mlfab__view_run runs[MLFAB__VIEW_RUNS_MAX];
  for (; out.runs < MLFAB__VIEW_RUNS_MAX && view->next + out.runs < view->nruns; out.runs++) {
    const mlfab__server_run *run = first + out.runs;
    if (run->file != first->file) break;
    runs[out.runs] = (mlfab__view_run){run->offset, run->bytes,
                                       (uint64_t)(uintptr_t)run->at - (uint64_t)(uintptr_t)bulk};
  }
  if (view->next + out.runs == view->nruns) out.flags = MLFAB__MODEL_LAST;
  frame->type = MLFAB__VIEW;
  frame->bulk = bulk;
  frame->bulk_bytes = MLFAB__VIEW_LEAST;
  frame->token = (uint64_t)largest->block + 1;
  frame->note[0] = out.runs;
  frame->meta_bytes = mlfab__encode_view(frame->meta, &out, runs);
  return 1;
}

static int views_taken(mlfab__server *server, const mlfab__server_pull *pull,
                       const mlfab__frame_out *frame) {
  mlfab__server_view *view = pull->view;
  for (uint64_t i = 0; i < frame->note[0]; i++)
    server->stats->pull_raw_bytes += view->runs[view->next++].bytes;
  return view->next == view->nruns;
}

/* --- the end of views --- */

static void views_end(mlfab__server *server, uint32_t worker, uint64_t request) {
  mlfab__server_view *view = views_find(server, worker, request);
  if (view) views_drop(server, view);
}

static uint64_t views_whole(uint64_t bytes, uint64_t block) {
  return (bytes + block - 1) / block * block;
}

/* Renews pages of a lost view, VIEW_RENEWS bytes and at most a block more, and drops the view when all are renewed. It renews whole
 * blocks, so that a block of whole pages stays in one file. */
static void views_renew(mlfab__server *server, mlfab__server_view *view) {
  const mlfab__slab_areas *slab = &server->lending->slab;
  uint64_t block = view->store->block_bytes;
  for (uint64_t done = 0, n; view->next < view->nruns && done < VIEW_RENEWS; done += n) {
    const mlfab__server_run *run = &view->runs[view->next];
    const uint8_t *first = view->store->blocks[run->block].data;
    uint64_t all = views_whole((uint64_t)(run->at - first) + run->bytes, block);
    n = mlfab__min(all - view->renewed, views_whole(VIEW_RENEWS - done, block));
    /* If memory is short, the reader may see later commits. */
    (void)slab->on->renew(slab->memory, first + view->renewed, n);
    view->renewed += n;
    if (view->renewed < all) continue;
    view->renewed = 0;
    view->next++;
  }
  if (view->next == view->nruns) views_drop(server, view);
}

static void views_lost(mlfab__server *server, uint32_t worker) {
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    mlfab__server_view *view = &server->lending->places[worker * MLFAB_VIEWS_MAX + i];
    if (view->request == 0 || !view->pinned || view->lost) continue;
    view->lost = 1;
    view->next = 0;
    view->renewed = 0;
    server->lending->lost++;
  }
}

static void views_left(mlfab__server *server, uint32_t worker) {
  for (uint32_t i = 0; i < MLFAB_VIEWS_MAX; i++) {
    mlfab__server_view *view = &server->lending->places[worker * MLFAB_VIEWS_MAX + i];
    if (view->request != 0 && view->pinned && !view->lost) views_drop(server, view);
  }
}

static void views_tick(mlfab__server *server) {
  for (uint32_t i = 0; i < server->lending->nplaces && server->lending->lost > 0; i++) {
    mlfab__server_view *view = &server->lending->places[i];
    if (!view->lost) continue;
    views_renew(server, view);
    return;
  }
}

MLFAB__INTERNAL void mlfab__views_keep(mlfab__env *env, mlfab__store *store) {
  uint32_t *places[] = {store->w, store->next, store->sum};
  for (uint32_t k = 0; k < MLFAB__COUNT(places); k++) {
    for (uint32_t p = 0; p < store->positions; p++)
      mlfab__store_put(store, &places[k][p], MLFAB__NO_BLOCK);
  }
  mlfab__store_free_places(env, store);
  for (uint32_t i = 0; i < store->nblocks; i++) {
    if (store->blocks[i].refs == 0) mlfab__store_free_block(env, store, &store->blocks[i]);
  }
  const mlfab__store left = {.memory = store->memory,
                             .slab = store->slab,
                             .block_bytes = store->block_bytes,
                             .blocks = store->blocks,
                             .nblocks = store->nblocks,
                             .free_head = MLFAB__NO_BLOCK,
                             .ghost = store->ghost};
  *store = left;
}

static void views_retire(mlfab__server *server, int blocks_read) {
  mlfab__env *env = server->env;
  int read = server->closing || server->lending->views > 0 || blocks_read;
  if (server->lending->views == 0 || !views_of(server, &server->store)) {
    /* Workers map areas until another file takes their place; nobody reads them now. */
    server->lending->slab.empties = !read;
    mlfab__store_free(env, &server->store);
    server->lending->slab.empties = 0;
    return;
  }
  struct mlfab__server_retired *retired = server->lending->spare;
  server->lending->spare = NULL;
  mlfab__views_keep(env, &server->store);
  retired->store = server->store;
  retired->next = server->lending->retired;
  server->lending->retired = retired;
  for (uint32_t i = 0; i < server->lending->nplaces; i++) {
    mlfab__server_view *view = &server->lending->places[i];
    if (view->request != 0 && view->store == &server->store) view->store = &retired->store;
  }
  memset(&server->store, 0, sizeof server->store);
}

/* A transport of this host refers to blocks in shared memory,
 * so the server does not copy. But it copies small bulks. And with one worker, and a model that fits no cache, the pull
 * is faster through the ring, because the server and the worker share the work. */
static int views_copies(const mlfab__server *server, uint32_t worker, uint64_t bytes) {
  if (!server->lending->slab.on || !server->peers[worker].local) return 0;
  return bytes < MLFAB__VIEW_LEAST ||
         (server->workers == 1 && server->layout.bytes >= MLFAB__STREAM_BYTES);
}

static void views_free(mlfab__server *server) {
  struct mlfab__server_lending *lending = server->lending;
  mlfab__env *env = server->env;
  for (uint32_t i = 0; i < lending->nplaces; i++) {
    mlfab__server_view *view = &lending->places[i];
    if (view->pinned) views_drop(server, view);
    mlfab__free(env, view->blocks, view->block_room * sizeof *view->blocks);
    mlfab__free(env, view->runs, view->run_room * sizeof *view->runs);
  }
  assert(!lending->slab.areas);
  if (lending->spare) mlfab__free(env, lending->spare, sizeof *lending->spare);
  mlfab__free(env, lending->places, lending->nplaces * sizeof *lending->places);
  mlfab__free(env, lending, sizeof *lending);
}

MLFAB__INTERNAL int mlfab__views_attach(mlfab__server *server) {
  static const mlfab__server_lender lender = {
      views_ask, views_over, views_pinned, views_pin,  views_next,   views_taken,  views_has,
      views_end, views_lost, views_left,   views_tick, views_copies, views_retire, views_free};
  struct mlfab__server_lending *lending = mlfab__alloc(server->env, sizeof *lending);
  if (!lending) return MLFAB_ERR_MEMORY;
  lending->nplaces = server->workers * MLFAB_VIEWS_MAX;
  lending->places = mlfab__alloc_array(server->env, lending->nplaces, sizeof *lending->places);
  if (!lending->places) {
    mlfab__free(server->env, lending, sizeof *lending);
    return MLFAB_ERR_MEMORY;
  }
  lending->slab.slab = (mlfab__slab){mlfab__slab_take, mlfab__slab_give};
  server->lending = lending;
  server->lender = &lender;
  server->slab = &lending->slab.slab;
  return 0;
}

MLFAB__INTERNAL void mlfab__views_share(mlfab__server *server, const mlfab__shm_memory_table *on,
                                        mlfab__shm_memory *memory) {
  server->lending->slab.on = on;
  server->lending->slab.memory = memory;
}
