/* writer.c - a server writes its shard to a file of a checkpoint. See writer.h. */
#include "writer.h"

#include "../server/server.h"

#include <stdio.h>

enum {
  WRITER_HEAD,
  WRITER_DEFINE,
  WRITER_CLOCKS,
  WRITER_WORKERS,
  WRITER_IMAGE,
  WRITER_END,
  WRITER_OVER
};

_Static_assert((int)MLFAB__CLOCKS == 8, "writer.h has room for eight clocks");
_Static_assert(256 + 4 * MLFAB__RESHARD_SERVER_WORDS_MAX <= MLFAB__WRITER_META,
               "a clock with its words is the largest meta");

MLFAB__INTERNAL void mlfab__writer_init(
    mlfab__writer *writer, mlfab__env *env, struct mlfab__server *server, mlfab__filer *filer,
    void *self, void (*done)(void *self, const mlfab__checkpoint_shard *answer)) {
  *writer =
      (mlfab__writer){.env = env, .server = server, .filer = filer, .self = self, .done = done};
}

/* --- the moment --- */

/* Gives back the blocks and states of the slices before `end`. */
static void writer_give(mlfab__writer *writer, uint32_t end) {
  mlfab__store *store = &writer->server->store, *view = &writer->view;
  for (; writer->given < end; writer->given++) {
    const mlfab__shard_slice *s = &view->slices[writer->given];
    for (uint32_t p = s->first; p < s->first + s->count; p++) {
      mlfab__store_unref(store, view->w[p]);
      if (view->sum[p] != MLFAB__NO_BLOCK) mlfab__store_unref(store, view->sum[p]);
      if (!store->held) continue;
      if (store->held[p] == MLFAB__HELD_GIVEN) {
        if (view->s0) mlfab__free_aligned(writer->env, view->s0[p], view->block_bytes);
        if (view->s1) mlfab__free_aligned(writer->env, view->s1[p], view->block_bytes);
      }
      store->held[p] = MLFAB__HELD_FREE;
    }
  }
}

static void writer_unpin(mlfab__writer *writer) {
  mlfab__env *env = writer->env;
  mlfab__store *view = &writer->view, *store = &writer->server->store;
  if (writer->pinned) {
    writer_give(writer, view->nslices);
    mlfab__free(env, store->held, store->positions);
    store->held = NULL;
  }
  writer->pinned = 0;
  mlfab__free(env, view->slices, view->nslices * sizeof *view->slices);
  mlfab__free(env, view->w, view->positions * sizeof *view->w);
  mlfab__free(env, view->sum, view->positions * sizeof *view->sum);
  mlfab__free(env, view->s0, view->positions * sizeof *view->s0);
  mlfab__free(env, view->s1, view->positions * sizeof *view->s1);
  memset(view, 0, sizeof *view);
  mlfab__free(env, writer->owners, writer->head.slices * sizeof *writer->owners);
  mlfab__free(env, writer->table, (size_t)writer->tensors * MLFAB__TENSOR_INFO_BYTES);
  mlfab__free(env, writer->workers, writer->head.workers * sizeof *writer->workers);
  mlfab__free(env, writer->words, MLFAB__CLOCKS * writer->nwords * sizeof *writer->words);
  writer->owners = writer->words = NULL;
  writer->table = NULL;
  writer->workers = NULL;
}

MLFAB__INTERNAL void mlfab__writer_free(mlfab__writer *writer) {
  if (!writer->env) return;
  mlfab__free(writer->env, writer->heads, MLFAB__WRITER_HEADS);
  writer->heads = NULL;
}

/* Everything is allocated before anything is held. A kind of bytes that the store does not have stays NULL. */
static int writer_room(mlfab__writer *writer) {
  const mlfab__server *server = writer->server;
  const mlfab__store *store = &server->store;
  mlfab__env *env = writer->env;
  mlfab__store *view = &writer->view;
  *view = *store;
  view->slices = NULL;
  view->w = view->sum = view->next = view->local = NULL;
  view->s0 = view->s1 = NULL;
  view->held = NULL;
  uint32_t n = store->positions;
  int code = 0;
#define WRITER_ALLOC(place, count, when)                       \
  if (!code && (count) > 0 && (when)) {                        \
    (place) = mlfab__alloc_array(env, count, sizeof *(place)); \
    if (!(place)) code = MLFAB_ERR_MEMORY;                     \
  }
  WRITER_ALLOC(writer->heads, MLFAB__WRITER_HEADS, !writer->heads)
  WRITER_ALLOC(view->slices, store->nslices, 1)
  WRITER_ALLOC(view->w, n, 1)
  WRITER_ALLOC(view->sum, n, 1)
  WRITER_ALLOC(view->s0, n, store->s0 != NULL)
  WRITER_ALLOC(view->s1, n, store->s1 != NULL)
  WRITER_ALLOC(writer->server->store.held, n, store->s0 != NULL)
  WRITER_ALLOC(writer->owners, writer->head.slices, 1)
  WRITER_ALLOC(writer->table, writer->tensors * MLFAB__TENSOR_INFO_BYTES, 1)
  WRITER_ALLOC(writer->workers, writer->head.workers, 1)
  WRITER_ALLOC(writer->words, MLFAB__CLOCKS * writer->nwords, 1)
#undef WRITER_ALLOC
  /* While blocks are held, updates need others: as many once more. */
  int rounds = mlfab__clock_rounds(server);
  uint64_t blocks =
      (uint64_t)n * (rounds ? 5 : 3) + mlfab__min(n, 2 * (uint64_t)store->positions_per_slice + 8);
  uint64_t more = blocks > store->nblocks ? blocks - store->nblocks : 0;
  if (!code && n > 0)
    code = mlfab__store_spare(env, &writer->server->store, store->free_count + more);
  return code;
}

static void writer_hold(mlfab__writer *writer) {
  mlfab__server *server = writer->server;
  mlfab__store *store = &server->store, *view = &writer->view;
  if (store->nslices > 0)
    memcpy(view->slices, store->slices, store->nslices * sizeof *view->slices);
  for (uint32_t p = 0; p < store->positions; p++) {
    view->w[p] = store->w[p];
    view->sum[p] = store->sum[p];
    mlfab__store_ref(store, view->w[p]);
    if (view->sum[p] != MLFAB__NO_BLOCK) mlfab__store_ref(store, view->sum[p]);
    if (view->s0) view->s0[p] = store->s0[p];
    if (view->s1) view->s1[p] = store->s1[p];
    if (store->held) store->held[p] = MLFAB__HELD_SHARED;
  }
  for (uint32_t i = 0; i < writer->head.slices; i++) writer->owners[i] = server->number;
  for (uint32_t i = 0; i < writer->tensors; i++)
    mlfab__encode_tensor_info(writer->table + (size_t)i * MLFAB__TENSOR_INFO_BYTES,
                              &server->definition[i]);
  for (uint32_t w = 0; w < writer->head.workers; w++) {
    const mlfab__window *window = &server->windows.windows[w];
    mlfab__checkpoint_worker *to = &writer->workers[w];
    *to = (mlfab__checkpoint_worker){.worker = w, .pushed = server->peers[w].pushed};
    if (MLFAB__PLANTED(108)) continue;
    to->incarnation = window->incarnation;
    to->top = window->top;
    memcpy(to->applied, window->applied, sizeof to->applied);
    memcpy(to->dropped, window->dropped, sizeof to->dropped);
  }
  writer->nclocks = 0;
  for (uint32_t g = 0; g < server->ngates; g++) {
    if (!server->clocks[g].used) continue;
    mlfab__clock_told(server, g, &writer->clocks[writer->nclocks],
                      writer->words + writer->nclocks * writer->nwords);
    writer->nclocks++;
  }
  writer->pinned = 1;
}

static uint64_t writer_version(const mlfab__store *view) {
  uint64_t version = 0;
  for (uint32_t i = 0; i < view->nslices; i++)
    version = mlfab__max(version, view->slices[i].version);
  return version;
}

/* --- records --- */

/* Appends a record without bulk, or the part of one before its bulk. */
static void writer_append(mlfab__writer *writer, uint16_t type, uint32_t meta_bytes,
                          const void *bulk, uint32_t bulk_bytes) {
  mlfab_file_op *op = &writer->filer->op;
  uint8_t *head = writer->heads + op->head_bytes;
  const mlfab__file_record record = {.type = type,
                                     .index = writer->index++,
                                     .set = writer->order.set,
                                     .meta_bytes = meta_bytes,
                                     .bulk_bytes = bulk_bytes,
                                     .bulk = bulk};
  mlfab__record_seal(head, &record);
  writer->answer.chain = mlfab__record_chain(writer->answer.chain, head);
  writer->answer.bytes += (uint64_t)MLFAB__RECORD_BYTES + meta_bytes + bulk_bytes;
  op->head_bytes += MLFAB__RECORD_BYTES + meta_bytes;
  op->bulk = bulk;
  op->bulk_bytes = bulk_bytes;
}

/* The next chunk of the image, after the SLICE record of its slice. Returns 0 behind the last. */
static int writer_image(mlfab__writer *writer) {
  mlfab__server *server = writer->server;
  mlfab__image_chunk chunk;
  writer->view.blocks = server->store.blocks; /* may have grown since */
  if (!mlfab__image_next(&writer->view, writer->owners, server->number, server->config->chunk_bytes,
                         &writer->cursor, &chunk))
    return 0;
  const mlfab__shard_slice *s = &writer->view.slices[chunk.slice];
  writer_give(writer, chunk.slice);
  if (writer->announced <= chunk.slice) {
    const mlfab__checkpoint_slice slice = {s->number, s->clock, s->version, s->commit};
    writer->announced = chunk.slice + 1;
    uint8_t *meta = writer->heads + writer->filer->op.head_bytes + MLFAB__RECORD_BYTES;
    writer_append(writer, MLFAB__RECORD_SLICE, mlfab__encode_checkpoint_slice(meta, &slice), NULL,
                  0);
  }
  const mlfab__checkpoint_bytes bytes = {s->number, chunk.kind, chunk.offset, (uint32_t)chunk.last};
  uint8_t *meta = writer->heads + writer->filer->op.head_bytes + MLFAB__RECORD_BYTES;
  writer_append(writer, MLFAB__RECORD_IMAGE, mlfab__encode_checkpoint_bytes(meta, &bytes),
                chunk.data, chunk.bytes);
  writer->cursor.offset += chunk.bytes;
  return 1;
}

static void writer_step(mlfab__writer *writer) {
  writer->step++;
  writer->item = 0;
}

/* Appends the next record. */
static void writer_record(mlfab__writer *writer) {
  uint8_t *meta = writer->heads + writer->filer->op.head_bytes + MLFAB__RECORD_BYTES;
  uint32_t i = writer->item++;
  mlfab__checkpoint_end end;
  switch (writer->step) {
    case WRITER_HEAD:
      writer_append(writer, MLFAB__RECORD_HEAD, mlfab__encode_checkpoint_head(meta, &writer->head),
                    NULL, 0);
      writer_step(writer);
      break;
    case WRITER_DEFINE:
      writer_append(writer, MLFAB__RECORD_DEFINE, mlfab__encode_define(meta, &writer->define),
                    writer->table, writer->tensors * MLFAB__TENSOR_INFO_BYTES);
      writer_step(writer);
      break;
    case WRITER_CLOCKS:
      if (i < writer->nclocks)
        writer_append(writer, MLFAB__RECORD_CLOCK,
                      mlfab__encode_reshard_server_clock(meta, &writer->clocks[i],
                                                         writer->words + i * writer->nwords),
                      NULL, 0);
      else
        writer_step(writer);
      break;
    case WRITER_WORKERS:
      if (i < writer->head.workers)
        writer_append(writer, MLFAB__RECORD_WORKER,
                      mlfab__encode_checkpoint_worker(meta, &writer->workers[i]), NULL, 0);
      else
        writer_step(writer);
      break;
    case WRITER_IMAGE:
      if (!writer_image(writer)) writer_step(writer);
      break;
    default:
      end.records = writer->index;
      writer_append(writer, MLFAB__RECORD_END, mlfab__encode_checkpoint_end(meta, &end), NULL, 0);
      writer_step(writer);
  }
}

/* Asks for the next operation: as many records as there is room for, up to the first with a bulk. */
static void writer_go_on(mlfab__writer *writer) {
  mlfab_file_op *op = &writer->filer->op;
  op->kind = MLFAB_FILE_WRITE;
  op->flags = writer->index == 0 ? MLFAB_FILE_FIRST : 0;
  op->path = writer->path;
  op->head = writer->heads;
  op->head_bytes = op->bulk_bytes = 0;
  op->bulk = NULL;
  while (writer->step != WRITER_OVER && !op->bulk &&
         MLFAB__WRITER_HEADS - op->head_bytes >= 2 * (MLFAB__RECORD_BYTES + MLFAB__WRITER_META))
    writer_record(writer);
  if (writer->step == WRITER_OVER) op->flags |= MLFAB_FILE_LAST;
  mlfab__files_ask(writer->filer);
}

/* --- the end --- */

static void writer_answer(mlfab__writer *writer) {
  writer->phase = MLFAB__WRITER_IDLE;
  writer_unpin(writer);
  writer->done(writer->self, &writer->answer);
}

static void writer_blame(mlfab__writer *writer, int code, const char *text) {
  writer->answer.code = code;
  snprintf(writer->answer.text, sizeof writer->answer.text, "%.255s", text);
}

/* Closes and removes the file. An operation that was asked for and not begun becomes this one; one that was begun ends
 * first. `flags` 1: it is not known which, so ABORT is asked for once more. */
static void writer_abort(mlfab__writer *writer, int code, const char *text) {
  mlfab_file_op *op = &writer->filer->op;
  writer_blame(writer, code, text);
  writer_unpin(writer);
  writer->phase = MLFAB__WRITER_ABORTS;
  op->kind = MLFAB_FILE_ABORT;
  op->flags = (uint32_t)writer->filer->busy;
  op->head = op->bulk = NULL;
  op->head_bytes = op->bulk_bytes = 0;
  mlfab__files_ask(writer->filer);
}

MLFAB__INTERNAL void mlfab__writer_stop(mlfab__writer *writer, int code, const char *text) {
  if (writer->phase == MLFAB__WRITER_PINS) {
    writer_blame(writer, code, text);
    writer_answer(writer);
  } else if (writer->phase == MLFAB__WRITER_WRITES) {
    writer_abort(writer, code, text);
  }
}

/* Has an update changed a state for which there was no memory to copy it? */
static int writer_lost(const mlfab__writer *writer) {
  const mlfab__store *store = &writer->server->store;
  const mlfab__store *view = &writer->view;
  if (!store->held || writer->given >= view->nslices) return 0;
  for (uint32_t p = view->slices[writer->given].first; p < store->positions; p++)
    if (store->held[p] == MLFAB__HELD_LOST) return 1;
  return 0;
}

MLFAB__INTERNAL void mlfab__writer_event(mlfab__writer *writer, const mlfab_io_event *event) {
  char text[MLFAB__TEXT_MAX];
  if (writer->phase == MLFAB__WRITER_ABORTS) {
    if (writer->filer->op.flags == 0) {
      writer_answer(writer);
    } else {
      writer->filer->op.flags = 0;
      mlfab__files_ask(writer->filer);
    }
    return;
  }
  if (writer->phase != MLFAB__WRITER_WRITES) return;
  if (event->code) {
    snprintf(text, sizeof text, "cannot write '%.160s': %.60s", writer->path,
             event->text ? event->text : mlfab_error_text(event->code));
    writer_abort(writer, event->code, text);
  } else if (writer_lost(writer)) {
    writer_abort(writer, MLFAB_ERR_MEMORY, "is out of memory for optimizer state");
  } else if (writer->step == WRITER_OVER) {
    writer_answer(writer);
  } else {
    writer_go_on(writer);
  }
}

/* --- the order --- */

MLFAB__INTERNAL void mlfab__writer_due(mlfab__writer *writer) {
  mlfab__server *server = writer->server;
  if (writer->phase != MLFAB__WRITER_PINS) return;
  writer->head = (mlfab__checkpoint_head){.number = writer->order.number,
                                          .server = server->number,
                                          .servers = server->servers,
                                          .workers = server->workers,
                                          .epoch = server->epoch,
                                          .slices = server->layout.nslices,
                                          .owned = server->store.nslices};
  writer->define = (mlfab__define){.tensors = server->ndefinition, .options = server->options};
  writer->tensors = server->ndefinition;
  writer->nwords = (server->workers + 31) / 32;
  if (writer_room(writer)) {
    /* Nothing is held yet. */
    mlfab__free(writer->env, server->store.held, server->store.positions);
    server->store.held = NULL;
    writer_blame(writer, MLFAB_ERR_MEMORY, "is out of memory for a checkpoint");
    writer_answer(writer);
    return;
  }
  writer_hold(writer);
  writer->phase = MLFAB__WRITER_WRITES;
  writer->step = WRITER_HEAD;
  writer->item = writer->index = writer->given = writer->announced = 0;
  writer->cursor = (mlfab__image_cursor){0, 0, 0};
  writer->answer.epoch = server->epoch;
  writer->answer.version = writer_version(&writer->view);
  mlfab__record_path(writer->path, writer->order.dir, writer->order.number, server->number,
                     server->servers);
  writer_go_on(writer);
}

static void writer_refuse(mlfab__writer *writer, const mlfab__checkpoint_order *order, int code,
                          const char *text) {
  mlfab__checkpoint_shard answer = {
      .number = order->number, .set = order->set, .server = writer->server->number, .code = code};
  snprintf(answer.text, sizeof answer.text, "%s", text);
  writer->done(writer->self, &answer);
}

MLFAB__INTERNAL void mlfab__writer_order(mlfab__writer *writer,
                                         const mlfab__checkpoint_order *order) {
  const mlfab__server *server = writer->server;
  int repeated = order->number == writer->answer.number && order->set == writer->answer.set;
  if (repeated && writer->phase != MLFAB__WRITER_IDLE) return;
  if (repeated) {
    writer->done(writer->self, &writer->answer);
  } else if (writer->phase != MLFAB__WRITER_IDLE || writer->filer->busy) {
    writer_refuse(writer, order, MLFAB_ERR_AGAIN, "is still writing another checkpoint");
  } else if (server->phase != MLFAB__MODEL_STANDS) {
    writer_refuse(writer, order, MLFAB_ERR_STATE, "has no model");
  } else if (server->move.held) {
    writer_refuse(writer, order, MLFAB_ERR_AGAIN, "moves slices");
  } else if (server->store.ghost) {
    writer_refuse(writer, order, MLFAB_ERR_UNSUPPORTED, "has ghost tensors, which have no bytes");
  } else {
    writer->order = *order;
    memset(&writer->answer, 0, sizeof writer->answer);
    writer->answer.number = order->number;
    writer->answer.set = order->set;
    writer->answer.server = server->number;
    writer->phase = MLFAB__WRITER_PINS;
    if (server->apply.applying == MLFAB__APPLY_NONE || MLFAB__PLANTED(112))
      mlfab__writer_due(writer);
  }
}
