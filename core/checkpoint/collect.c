/* collect.c - a copy of a server collects the server's moments, and installs them. See collect.h. */
#include "collect.h"

#include "../server/clock_copy.h"

#include <stdio.h>

static int collect_fail(const mlfab__collect *collect, int code, mlfab_error *error,
                        const char *text) {
  return mlfab__error(error, code, (int32_t)collect->server->number, 1, 0,
                      "the copy of server %u: %s", collect->server->number, text);
}

/* --- memory --- */

static void collect_drop(mlfab__collect *collect) {
  mlfab__env *env = collect->env;
  uint32_t n = collect->positions;
  uint8_t **states[2] = {collect->s0, collect->s1};
  for (int k = 0; k < 2; k++) {
    for (uint32_t p = 0; states[k] && p < n; p++)
      mlfab__memory_give(collect->memory, env, states[k][p], collect->block_bytes);
    mlfab__free(env, states[k], n * sizeof *states[k]);
  }
  mlfab__free(env, collect->w, n * sizeof *collect->w);
  mlfab__free(env, collect->sum, n * sizeof *collect->sum);
  mlfab__free(env, collect->slices, collect->nslices * sizeof *collect->slices);
  mlfab__free(env, collect->workers, collect->nworkers * sizeof *collect->workers);
  mlfab__free(env, collect->peers, collect->nworkers * sizeof *collect->peers);
  mlfab__free(env, collect->words, collect->nwords * sizeof *collect->words);
  collect->w = collect->sum = collect->words = NULL;
  collect->s0 = collect->s1 = NULL;
  collect->slices = NULL;
  collect->workers = NULL;
  collect->peers = NULL;
  collect->positions = collect->nslices = collect->nworkers = collect->nwords = 0;
}

/* Allocates room for a moment of this model; the last moment may have come from another model. */
static int collect_room(mlfab__collect *collect) {
  const mlfab__server *server = collect->server;
  const mlfab__store *store = &server->store;
  mlfab__env *env = collect->env;
  if (collect->words && collect->positions == store->positions &&
      collect->nslices == store->nslices && collect->block_bytes == store->block_bytes &&
      (collect->s0 != NULL) == (store->s0 != NULL) && (collect->s1 != NULL) == (store->s1 != NULL))
    return 0;
  collect_drop(collect);
  collect->positions = store->positions;
  collect->nslices = store->nslices;
  collect->nworkers = server->workers;
  collect->nwords = (server->workers + 31) / 32;
  collect->block_bytes = store->block_bytes;
  collect->memory = store->memory;
  uint32_t n = store->positions;
  int code = 0;
#define COLLECT_ALLOC(place, count, when)                      \
  if (!code && (count) > 0 && (when)) {                        \
    (place) = mlfab__alloc_array(env, count, sizeof *(place)); \
    if (!(place)) code = MLFAB_ERR_MEMORY;                     \
  }
  COLLECT_ALLOC(collect->w, n, 1)
  COLLECT_ALLOC(collect->sum, n, 1)
  COLLECT_ALLOC(collect->s0, n, store->s0 != NULL)
  COLLECT_ALLOC(collect->s1, n, store->s1 != NULL)
  COLLECT_ALLOC(collect->slices, store->nslices, 1)
  COLLECT_ALLOC(collect->workers, server->workers, 1)
  COLLECT_ALLOC(collect->peers, server->workers, 1)
  COLLECT_ALLOC(collect->words, collect->nwords, 1)
#undef COLLECT_ALLOC
  if (code) {
    collect_drop(collect);
    return code;
  }
  if (n > 0) memset(collect->w, 0xff, n * sizeof *collect->w);
  if (n > 0) memset(collect->sum, 0xff, n * sizeof *collect->sum);
  return 0;
}

MLFAB__INTERNAL void mlfab__collect_void(mlfab__collect *collect) {
  if (collect->phase == MLFAB__COLLECT_EMPTY) return;
  mlfab__store *store = &collect->server->store;
  for (uint32_t p = 0; p < collect->positions; p++) {
    mlfab__store_put(store, &collect->w[p], MLFAB__NO_BLOCK);
    mlfab__store_put(store, &collect->sum[p], MLFAB__NO_BLOCK);
  }
  if (collect->built) mlfab__server_unbuild(collect->server);
  collect->built = 0;
  collect->phase = MLFAB__COLLECT_EMPTY;
}

MLFAB__INTERNAL void mlfab__collect_free(mlfab__collect *collect) {
  if (!collect->env) return;
  mlfab__collect_void(collect);
  collect_drop(collect);
}

MLFAB__INTERNAL void mlfab__collect_begin(mlfab__collect *collect, mlfab__env *env,
                                          struct mlfab__server *server, uint64_t since) {
  collect->env = env;
  collect->server = server;
  mlfab__collect_void(collect);
  collect->phase = MLFAB__COLLECT_TAKES;
  collect->since = since;
  memset(&collect->reader, 0, sizeof collect->reader);
  collect->came = collect->npeers = 0;
}

/* --- records: 0, or an error --- */

static int collect_head(mlfab__collect *collect, const mlfab__checkpoint_head *head,
                        mlfab_error *error) {
  const mlfab__server *server = collect->server;
  collect->head = *head;
  collect->reader.model = head->slices;
  if (head->server != server->number || head->servers != server->servers ||
      head->workers != server->workers)
    return mlfab__error(error, MLFAB_ERR_CONFIG, (int32_t)server->number, 1, 0,
                        "the copy of server %u of %u, for %u workers, came to server %u of %u, "
                        "for %u workers",
                        head->server, head->servers, head->workers, server->number, server->servers,
                        server->workers);
  if (head->slices == 0 || head->slices > MLFAB__SLICES_MAX)
    return collect_fail(collect, MLFAB_ERR_CHECKPOINT, error, "a number of slices is impossible");
  int stands = server->phase == MLFAB__MODEL_STANDS;
  if (!stands && server->phase != MLFAB__NO_MODEL)
    return collect_fail(collect, MLFAB_ERR_STATE, error, "the first weights are under way here");
  int same = stands && collect->since == collect->at && server->store.changes == collect->here;
  if (collect->since > 0 && !same)
    return collect_fail(collect, MLFAB_ERR_STATE, error,
                        "it builds on another moment than the one that is here");
  if (stands && (collect->since > 0 ? head->epoch != server->epoch : head->epoch < server->epoch))
    return mlfab__error(error, MLFAB_ERR_STATE, (int32_t)server->number, 1, 0,
                        "the copy of server %u has epoch %u of the layout; epoch %u is here",
                        server->number, head->epoch, server->epoch);
  return 0;
}

/* Compares the definition with that of the current model. */
static int collect_compare(const mlfab__collect *collect, const mlfab__define *define,
                           const mlfab__file_record *record, mlfab_error *error) {
  uint8_t own[MLFAB_META_MAX];
  const mlfab__server *server = collect->server;
  const mlfab__define here = {.tensors = server->ndefinition, .options = server->options};
  int code = mlfab__server_compare(server->definition, server->ndefinition, "the model here",
                                   record->bulk, define->tensors, error);
  if (code) return code;
  if (mlfab__encode_define(own, &here) != record->meta_bytes ||
      memcmp(own, record->meta, record->meta_bytes) != 0)
    return collect_fail(collect, MLFAB_ERR_CONFIG, error,
                        "the options of its model differ from those of the model here");
  return 0;
}

static int collect_define(mlfab__collect *collect, mlfab__define *define,
                          const mlfab__file_record *record, mlfab_error *error) {
  mlfab__server *server = collect->server;
  int code;
  if (define->tensors == 0 || !record->bulk)
    return collect_fail(collect, MLFAB_ERR_CHECKPOINT, error, "it has no definition of a model");
  if (server->phase == MLFAB__MODEL_STANDS) {
    code = collect_compare(collect, define, record, error);
  } else {
    define->options.size = sizeof define->options;
    define->options.sync = define->options.consistency.kind;
    define->options.consistency.size = sizeof define->options.consistency;
    collect->built = 1;
    code = mlfab__server_build(server, define, record->bulk, collect->head.slices, error);
  }
  if (code) return code;
  if (server->layout.nslices != collect->head.slices)
    return mlfab__error(error, MLFAB_ERR_MODEL, (int32_t)server->number, 1, 0,
                        "the copy of server %u has %u slices, the model here %u", server->number,
                        collect->head.slices, server->layout.nslices);
  if (collect_room(collect))
    return collect_fail(collect, MLFAB_ERR_MEMORY, error, "out of memory for it");
  for (uint32_t i = 0; i < collect->nslices; i++) collect->slices[i].comes = 0;
  return 0;
}

static int collect_clock(mlfab__collect *collect, const mlfab__reader_item *item,
                         mlfab_error *error) {
  const mlfab__clock_record *clock = &item->is.clock;
  if (clock->words != collect->nwords)
    return collect_fail(collect, MLFAB_ERR_CHECKPOINT, error, "a clock is of other workers");
  int code = mlfab__sync_check(&clock->consistency, collect->server->workers, error);
  if (!code) code = mlfab__clock_follows(collect->server, clock->consistency.kind, error);
  if (code) return code;
  memcpy(collect->words, item->words, collect->nwords * sizeof *collect->words);
  collect->clock = *clock;
  return 0;
}

static int collect_worker(mlfab__collect *collect, const mlfab__checkpoint_worker *worker,
                          mlfab_error *error) {
  if (worker->worker != collect->came || worker->worker >= collect->nworkers)
    return collect_fail(collect, MLFAB_ERR_CHECKPOINT, error, "its workers are out of order");
  collect->workers[collect->came++] = *worker;
  return 0;
}

static int collect_peer(mlfab__collect *collect, const mlfab__checkpoint_peer *peer,
                        mlfab_error *error) {
  if (peer->worker != collect->npeers || peer->worker >= collect->nworkers)
    return collect_fail(collect, MLFAB_ERR_CHECKPOINT, error, "its workers are out of order");
  collect->peers[collect->npeers++] = *peer;
  return 0;
}

/* Allocates blocks and states for a slice; their content is undefined. Errors: MEMORY. */
static int collect_place(mlfab__collect *collect, const mlfab__shard_slice *s) {
  mlfab__store *store = &collect->server->store;
  uint8_t **states[2] = {collect->s0, collect->s1};
  if (mlfab__store_spare(collect->env, store, s->count)) return MLFAB_ERR_MEMORY;
  for (uint32_t p = s->first; p < s->first + s->count; p++) {
    if (collect->w[p] == MLFAB__NO_BLOCK) collect->w[p] = mlfab__store_take(store);
    for (int k = 0; k < 2; k++) {
      if (!states[k] || states[k][p]) continue;
      states[k][p] = mlfab__memory_take(collect->memory, collect->env, collect->block_bytes);
      if (!states[k][p]) return MLFAB_ERR_MEMORY;
    }
  }
  return 0;
}

static int collect_slice(mlfab__collect *collect, const mlfab__checkpoint_slice *slice,
                         mlfab_error *error) {
  const mlfab__store *store = &collect->server->store;
  uint32_t local = store->local[slice->slice];
  if (local == MLFAB__NO_SLICE)
    return mlfab__error(error, MLFAB_ERR_MODEL, (int32_t)collect->server->number, 1, 0,
                        "the copy of server %u has slice %u, which is not of this server",
                        collect->server->number, slice->slice);
  mlfab__collect_slice *to = &collect->slices[local];
  if (to->comes) return collect_fail(collect, MLFAB_ERR_CHECKPOINT, error, "a slice comes twice");
  if (collect_place(collect, &store->slices[local]))
    return collect_fail(collect, MLFAB_ERR_MEMORY, error, "out of memory for a slice");
  *to = (mlfab__collect_slice){.comes = 1, .is = *slice};
  return 0;
}

/* Exchanges the store's places with the collected places. */
static void collect_exchange(mlfab__collect *collect) {
  mlfab__store *store = &collect->server->store;
  uint32_t *w = store->w, *sum = store->sum;
  uint8_t **s0 = store->s0, **s1 = store->s1;
  store->w = collect->w;
  store->sum = collect->sum;
  store->s0 = collect->s0;
  store->s1 = collect->s1;
  collect->w = w;
  collect->sum = sum;
  collect->s0 = s0;
  collect->s1 = s1;
}

static int collect_image(mlfab__collect *collect, const mlfab__checkpoint_bytes *bytes,
                         const mlfab__file_record *record, mlfab_error *error) {
  mlfab__store *store = &collect->server->store;
  uint32_t local = store->local[bytes->slice];
  const mlfab__image_chunk chunk = {.slice = local,
                                    .kind = bytes->kind,
                                    .offset = bytes->offset,
                                    .bytes = record->bulk_bytes,
                                    .last = bytes->last != 0};
  collect_exchange(collect);
  int code =
      mlfab__image_take(collect->env, store, &collect->slices[local].part, &chunk, record->bulk);
  collect_exchange(collect);
  if (code == MLFAB_ERR_MEMORY)
    return collect_fail(collect, code, error, "out of memory for a slice");
  if (code)
    return collect_fail(collect, MLFAB_ERR_CHECKPOINT, error,
                        "the bytes of a slice are not those of this model");
  return 0;
}

/* Has everything arrived? */
static int collect_end(mlfab__collect *collect, mlfab_error *error) {
  const char *text = NULL;
  if (!collect->reader.clocked) text = "it has no clock";
  if (collect->came != collect->nworkers || collect->npeers != collect->nworkers)
    text = "some worker is missing";
  for (uint32_t i = 0; i < collect->nslices && !text; i++) {
    const mlfab__collect_slice *slice = &collect->slices[i];
    if (slice->comes && !slice->part.done) text = "the bytes of a slice are not all there";
    if (!slice->comes && collect->since == 0) text = "a slice is missing";
  }
  return text ? collect_fail(collect, MLFAB_ERR_CHECKPOINT, error, text) : 0;
}

static int collect_record(mlfab__collect *collect, mlfab__reader_item *item,
                          const mlfab__file_record *record, mlfab_error *error) {
  switch (record->type) {
    case MLFAB__RECORD_HEAD:
      return collect_head(collect, &item->is.head, error);
    case MLFAB__RECORD_DEFINE:
      return collect_define(collect, &item->is.define, record, error);
    case MLFAB__RECORD_CLOCK:
      return collect_clock(collect, item, error);
    case MLFAB__RECORD_WORKER:
      return collect_worker(collect, &item->is.worker, error);
    case MLFAB__RECORD_PEER:
      return collect_peer(collect, &item->is.peer, error);
    case MLFAB__RECORD_SLICE:
      return collect_slice(collect, &item->is.slice, error);
    case MLFAB__RECORD_IMAGE:
      return collect_image(collect, &item->is.bytes, record, error);
    default:
      return collect_end(collect, error);
  }
}

MLFAB__INTERNAL int mlfab__collect_take(mlfab__collect *collect, const mlfab__file_record *record,
                                        mlfab_error *error) {
  mlfab__reader_item item;
  if (collect->phase != MLFAB__COLLECT_TAKES)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "a record of a copy, but no stream has begun");
  if (collect->reader.index == 0) collect->reader.set = record->set;
  const char *why = record->set != collect->reader.set
                        ? "a record is of another stream"
                        : mlfab__reader_take(&collect->reader, record, &item);
  int code = why ? collect_fail(collect, MLFAB_ERR_CHECKPOINT, error, why)
                 : collect_record(collect, &item, record, error);
  if (code) {
    mlfab__collect_void(collect);
    return code;
  }
  if (!mlfab__reader_ended(&collect->reader)) return 0;
  collect->phase = MLFAB__COLLECT_WHOLE;
  return 1;
}

/* --- install --- */

/* The store's former state becomes room for the next moment, unless somebody holds it. */
static void collect_install_state(mlfab__collect *collect, uint32_t p) {
  mlfab__store *store = &collect->server->store;
  if (!store->s0) return;
  int held = mlfab__store_held(store, p);
  uint8_t *s0 = store->s0[p], *s1 = store->s1 ? store->s1[p] : NULL;
  store->s0[p] = collect->s0[p];
  collect->s0[p] = held ? NULL : s0;
  if (!store->s1) return;
  store->s1[p] = collect->s1[p];
  collect->s1[p] = held ? NULL : s1;
}

static void collect_install_slice(mlfab__collect *collect, uint32_t i) {
  mlfab__store *store = &collect->server->store;
  mlfab__shard_slice *s = &store->slices[i];
  const mlfab__checkpoint_slice *is = &collect->slices[i].is;
  for (uint32_t p = s->first; p < s->first + s->count; p++) {
    mlfab__store_put(store, &store->w[p], collect->w[p]);
    mlfab__store_put(store, &store->sum[p], collect->sum[p]);
    collect->w[p] = collect->sum[p] = MLFAB__NO_BLOCK;
    collect_install_state(collect, p);
  }
  s->version = is->version;
  s->commit = is->commit;
  mlfab__store_change(store, i);
  /* All bytes may have changed. */
  if (store->tags) store->tags->moved(store, i);
}

static void collect_install_workers(mlfab__collect *collect) {
  mlfab__server *server = collect->server;
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__checkpoint_worker *worker = &collect->workers[w];
    const mlfab__checkpoint_peer *is = &collect->peers[w];
    mlfab__window *window = &server->windows.windows[w];
    mlfab__server_peer *peer = &server->peers[w];
    window->top = worker->top;
    memcpy(window->applied, worker->applied, sizeof window->applied);
    memcpy(window->dropped, worker->dropped, sizeof window->dropped);
    window->incarnation = peer->incarnation = worker->incarnation;
    peer->pushed = worker->pushed;
    peer->decided = is->decided;
    peer->changed = is->changed;
    peer->significance = is->significance;
    window->taken = is->taken;
    peer->dead = (is->flags & MLFAB__PEER_DEAD) != 0;
    peer->left = (is->flags & MLFAB__PEER_LEFT) != 0;
    peer->done = (is->flags & MLFAB__PEER_DONE) != 0;
    peer->absent = (is->flags & MLFAB__PEER_ABSENT) != 0;
    peer->guest = (is->flags & MLFAB__PEER_GUEST) != 0;
  }
}

MLFAB__INTERNAL void mlfab__collect_install(mlfab__collect *collect) {
  mlfab__server *server = collect->server;
  assert(collect->phase == MLFAB__COLLECT_WHOLE);
  server->save.history = collect->history;
  for (uint32_t i = 0; i < collect->nslices; i++) {
    if (collect->slices[i].comes) collect_install_slice(collect, i);
  }
  collect_install_workers(collect);
  mlfab__clock_take(server, &collect->clock, collect->words);
  server->epoch = collect->head.epoch;
  server->norm_commits = 0;
  server->phase = MLFAB__MODEL_STANDS;
  collect->phase = MLFAB__COLLECT_EMPTY;
  collect->at = collect->head.number;
  collect->here = server->store.changes;
  if (collect->built && server->policy) server->policy->told(server);
  collect->built = 0;
}
