/* moment.c - pins a server's state of one moment, and makes its records. See moment.h. */
#include "moment.h"

#include "../server/clock_copy.h"

enum {
  MOMENT_HEAD,
  MOMENT_DEFINE,
  MOMENT_CLOCK,
  MOMENT_WORKERS,
  MOMENT_PEERS,
  MOMENT_IMAGE,
  MOMENT_END,
  MOMENT_OVER
};

_Static_assert(256 + 4 * MLFAB__RESHARD_SERVER_WORDS_MAX <= MLFAB__MOMENT_META,
               "a clock with its words is the largest meta");

/* --- memory --- */

static void moment_drop(mlfab__moment *moment) {
  mlfab__env *env = moment->env;
  mlfab__holder *holder = &moment->holder;
  const mlfab__moment_room *room = &moment->room;
  mlfab__free(env, moment->view.slices, room->owned * sizeof *moment->view.slices);
  mlfab__free(env, holder->w, room->positions * sizeof *holder->w);
  mlfab__free(env, holder->sum, room->positions * sizeof *holder->sum);
  mlfab__free(env, holder->s0, room->positions * sizeof *holder->s0);
  mlfab__free(env, holder->s1, room->positions * sizeof *holder->s1);
  mlfab__free(env, moment->owners, room->slices * sizeof *moment->owners);
  mlfab__free(env, moment->table, (size_t)room->tensors * MLFAB__TENSOR_INFO_BYTES);
  mlfab__free(env, moment->workers, room->workers * sizeof *moment->workers);
  mlfab__free(env, moment->peers, room->peers * sizeof *moment->peers);
  mlfab__free(env, moment->words, moment->nwords * sizeof *moment->words);
  mlfab__free_aligned(env, moment->window, MLFAB_BULK_MAX);
  int complete = moment->complete;
  memset(moment, 0, sizeof *moment);
  moment->env = env;
  moment->complete = complete;
}

/* Allocates room for the state of the server. The model may differ from the last moment's. */
static int moment_room(mlfab__moment *moment) {
  mlfab__server *server = moment->server;
  const mlfab__store *store = &server->store;
  mlfab__env *env = moment->env;
  mlfab__holder *holder = &moment->holder;
  const mlfab__moment_room wanted = {store->positions,
                                     server->layout.nslices,
                                     store->nslices,
                                     (store->s0 != NULL) + (uint32_t)(store->s1 != NULL),
                                     server->ndefinition,
                                     server->workers,
                                     moment->complete ? server->workers : 0};
  if (memcmp(&moment->room, &wanted, sizeof wanted) == 0) return 0;
  moment_drop(moment);
  moment->server = server;
  moment->room = wanted;
  moment->nwords = (server->workers + 31) / 32;
  uint32_t n = store->positions;
  int code = 0;
#define MOMENT_ALLOC(place, count, when)                       \
  if (!code && (count) > 0 && (when)) {                        \
    (place) = mlfab__alloc_array(env, count, sizeof *(place)); \
    if (!(place)) code = MLFAB_ERR_MEMORY;                     \
  }
  MOMENT_ALLOC(moment->view.slices, store->nslices, 1)
  MOMENT_ALLOC(holder->w, n, 1)
  MOMENT_ALLOC(holder->sum, n, 1)
  MOMENT_ALLOC(holder->s0, n, store->s0 != NULL)
  MOMENT_ALLOC(holder->s1, n, store->s1 != NULL)
  MOMENT_ALLOC(moment->owners, wanted.slices, 1)
  MOMENT_ALLOC(moment->table, wanted.tensors * MLFAB__TENSOR_INFO_BYTES, 1)
  MOMENT_ALLOC(moment->workers, wanted.workers, 1)
  MOMENT_ALLOC(moment->peers, wanted.peers, 1)
  MOMENT_ALLOC(moment->words, moment->nwords, 1)
#undef MOMENT_ALLOC
  if (!code && store->memory) {
    moment->window = mlfab__alloc_aligned(env, MLFAB_BULK_MAX);
    if (!moment->window) code = MLFAB_ERR_MEMORY;
  }
  if (code) {
    moment_drop(moment);
    return code;
  }
  if (n > 0) memset(holder->w, 0xff, n * sizeof *holder->w);
  if (n > 0) memset(holder->sum, 0xff, n * sizeof *holder->sum);
  return 0;
}

MLFAB__INTERNAL void mlfab__moment_free(mlfab__moment *moment) {
  if (!moment->env) return;
  mlfab__moment_unpin(moment);
  moment_drop(moment);
}

/* --- holding --- */

MLFAB__INTERNAL void mlfab__moment_give(mlfab__moment *moment, uint32_t end) {
  for (; moment->given < end; moment->given++)
    mlfab__store_give_slice(moment->env, &moment->server->store, &moment->holder, moment->given);
}

MLFAB__INTERNAL void mlfab__moment_unpin(mlfab__moment *moment) {
  if (!moment->pinned) return;
  mlfab__moment_give(moment, moment->view.nslices);
  mlfab__store_release(&moment->server->store, &moment->holder);
  moment->pinned = 0;
}

static int moment_has(const mlfab__shard_slice *slice, uint64_t since) {
  return slice->changed > since;
}

static void moment_hold_slices(mlfab__moment *moment, uint64_t since) {
  mlfab__server *server = moment->server;
  mlfab__store *store = &server->store, *view = &moment->view;
  mlfab__shard_slice *slices = view->slices;
  const mlfab__holder *holder = &moment->holder;
  if (store->nslices > 0) memcpy(slices, store->slices, store->nslices * sizeof *slices);
  *view = *store;
  view->slices = slices;
  view->w = holder->w;
  view->sum = holder->sum;
  view->s0 = holder->s0;
  view->s1 = holder->s1;
  view->next = view->local = NULL;
  view->holders = NULL;
  memset(moment->owners, 0xff, moment->head.slices * sizeof *moment->owners);
  for (uint32_t i = 0; i < store->nslices; i++) {
    if (!moment_has(&slices[i], since)) continue;
    moment->owners[slices[i].number] = server->number;
    mlfab__store_hold_slice(store, &moment->holder, i);
  }
}

static void moment_hold_peers(mlfab__moment *moment) {
  const mlfab__server *server = moment->server;
  for (uint32_t w = 0; w < moment->room.peers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    moment->peers[w] = (mlfab__checkpoint_peer){
        .worker = w,
        .flags = (peer->dead ? MLFAB__PEER_DEAD : 0u) | (peer->left ? MLFAB__PEER_LEFT : 0u) |
                 (peer->done ? MLFAB__PEER_DONE : 0u) | (peer->absent ? MLFAB__PEER_ABSENT : 0u) |
                 (peer->guest ? MLFAB__PEER_GUEST : 0u),
        .decided = peer->decided,
        .changed = peer->changed,
        .taken = server->windows.windows[w].taken,
        .significance = peer->significance};
  }
}

static void moment_hold_workers(mlfab__moment *moment) {
  const mlfab__server *server = moment->server;
  for (uint32_t w = 0; w < moment->head.workers; w++) {
    const mlfab__window *window = &server->windows.windows[w];
    mlfab__checkpoint_worker *to = &moment->workers[w];
    *to = (mlfab__checkpoint_worker){.worker = w, .pushed = server->peers[w].pushed};
    to->incarnation = window->incarnation;
    to->top = window->top;
    memcpy(to->applied, window->applied, sizeof to->applied);
    memcpy(to->dropped, window->dropped, sizeof to->dropped);
  }
  mlfab__clock_told(server, &moment->clock, moment->words);
}

MLFAB__INTERNAL int mlfab__moment_pin(mlfab__moment *moment, mlfab__env *env,
                                      struct mlfab__server *server, uint64_t since) {
  mlfab__store *store = &server->store;
  uint32_t owned = 0, positions = 0;
  assert(!moment->pinned);
  moment->env = env;
  moment->server = server;
  for (uint32_t i = 0; i < store->nslices; i++) {
    if (!moment_has(&store->slices[i], since)) continue;
    owned++;
    positions += store->slices[i].count;
  }
  if (moment_room(moment) ||
      mlfab__store_hold(env, store, &moment->holder, positions, server->rounds))
    return MLFAB_ERR_MEMORY;
  moment->at = store->changes;
  moment->head = (mlfab__checkpoint_head){.number = moment->at,
                                          .server = server->number,
                                          .servers = server->servers,
                                          .workers = server->workers,
                                          .epoch = server->epoch,
                                          .slices = server->layout.nslices,
                                          .owned = owned};
  moment->define = (mlfab__define){.tensors = server->ndefinition, .options = server->options};
  for (uint32_t i = 0; i < server->ndefinition; i++)
    mlfab__encode_tensor_info(moment->table + (size_t)i * MLFAB__TENSOR_INFO_BYTES,
                              &server->definition[i]);
  moment_hold_slices(moment, since);
  moment_hold_workers(moment);
  moment_hold_peers(moment);
  moment->pinned = 1;
  moment->given = 0;
  return mlfab__moment_restart(moment);
}

MLFAB__INTERNAL int mlfab__moment_restart(mlfab__moment *moment) {
  if (moment->given > 0) return MLFAB_ERR_STATE;
  moment->step = MOMENT_HEAD;
  moment->item = moment->index = moment->announced = 0;
  moment->cursor = (mlfab__image_cursor){0, 0, 0};
  return 0;
}

/* --- records: the meta's length --- */

/* Makes the next SLICE, or IMAGE with its bulk; returns 0 after the last. */
static uint32_t moment_image(mlfab__moment *moment, uint8_t *meta, mlfab__file_record *record) {
  mlfab__server *server = moment->server;
  mlfab__store *view = &moment->view;
  mlfab__image_chunk chunk;
  view->blocks = server->store.blocks; /* may have grown meanwhile */
  if (!mlfab__image_next(view, moment->owners, server->number,
                         moment->chunk ? moment->chunk : server->config->chunk_bytes,
                         &moment->cursor, &chunk))
    return 0;
  const mlfab__shard_slice *s = &view->slices[chunk.slice];
  if (moment->announced <= chunk.slice) {
    const mlfab__checkpoint_slice slice = {s->number, s->version, s->commit};
    moment->announced = chunk.slice + 1;
    record->type = MLFAB__RECORD_SLICE;
    return mlfab__encode_checkpoint_slice(meta, &slice);
  }
  const mlfab__checkpoint_bytes bytes = {s->number, chunk.kind, chunk.offset, (uint32_t)chunk.last};
  moment->cursor.offset += chunk.bytes;
  record->type = MLFAB__RECORD_IMAGE;
  record->bulk = mlfab__memory_see(view->memory, chunk.data, chunk.bytes, moment->window);
  record->bulk_bytes = chunk.bytes;
  return mlfab__encode_checkpoint_bytes(meta, &bytes);
}

/* Makes the next record of the present step; returns 0 if there is none. */
static uint32_t moment_record(mlfab__moment *moment, uint8_t *meta, mlfab__file_record *record) {
  uint32_t i = moment->item++;
  const mlfab__checkpoint_end end = {moment->index};
  switch (moment->step) {
    case MOMENT_HEAD:
      record->type = MLFAB__RECORD_HEAD;
      return i == 0 ? mlfab__encode_checkpoint_head(meta, &moment->head) : 0;
    case MOMENT_DEFINE:
      record->type = MLFAB__RECORD_DEFINE;
      record->bulk = moment->table;
      record->bulk_bytes = moment->define.tensors * MLFAB__TENSOR_INFO_BYTES;
      return i == 0 ? mlfab__encode_define(meta, &moment->define) : 0;
    case MOMENT_CLOCK:
      record->type = MLFAB__RECORD_CLOCK;
      return i == 0 ? mlfab__encode_clock_record(meta, &moment->clock, moment->words) : 0;
    case MOMENT_WORKERS:
      record->type = MLFAB__RECORD_WORKER;
      if (i >= moment->head.workers) return 0;
      return mlfab__encode_checkpoint_worker(meta, &moment->workers[i]);
    case MOMENT_PEERS:
      record->type = MLFAB__RECORD_PEER;
      if (i >= moment->room.peers) return 0;
      return mlfab__encode_checkpoint_peer(meta, &moment->peers[i]);
    case MOMENT_IMAGE:
      return moment_image(moment, meta, record);
    default:
      record->type = MLFAB__RECORD_END;
      return i == 0 ? mlfab__encode_checkpoint_end(meta, &end) : 0;
  }
}

MLFAB__INTERNAL int mlfab__moment_next(mlfab__moment *moment, uint8_t *meta,
                                       mlfab__file_record *record) {
  assert(moment->pinned);
  for (; moment->step != MOMENT_OVER; moment->step++, moment->item = 0) {
    *record = (mlfab__file_record){.meta = meta, .index = moment->index};
    record->meta_bytes = moment_record(moment, meta, record);
    if (record->meta_bytes == 0) continue;
    moment->index++;
    return 1;
  }
  return 0;
}
