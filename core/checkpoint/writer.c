/* writer.c - writes a server's shard to a file of a checkpoint, record by record. See writer.h. */
#include "writer.h"

#include "../server/server.h"

#include <stdio.h>

MLFAB__INTERNAL void mlfab__writer_init(
    mlfab__writer *writer, mlfab__env *env, struct mlfab__server *server, mlfab__filer *filer,
    void *self, void (*done)(void *self, const mlfab__checkpoint_shard *answer)) {
  *writer =
      (mlfab__writer){.env = env, .server = server, .filer = filer, .self = self, .done = done};
}

MLFAB__INTERNAL void mlfab__writer_free(mlfab__writer *writer) {
  if (!writer->env) return;
  mlfab__moment_free(&writer->moment);
  mlfab__free(writer->env, writer->heads, MLFAB__WRITER_HEADS);
  writer->heads = NULL;
}

static uint64_t writer_version(const mlfab__store *view) {
  uint64_t version = 0;
  for (uint32_t i = 0; i < view->nslices; i++)
    version = mlfab__max(version, view->slices[i].version);
  return version;
}

/* --- records --- */

/* Appends the next record, or its part before the bulk. Returns 0 after the last record. */
static int writer_append(mlfab__writer *writer) {
  mlfab_file_op *op = &writer->filer->op;
  uint8_t *head = writer->heads + op->head_bytes;
  mlfab__file_record record;
  if (!mlfab__moment_next(&writer->moment, head + MLFAB__RECORD_BYTES, &record)) return 0;
  record.set = writer->order.set;
  mlfab__record_seal(head, &record);
  writer->answer.chain = mlfab__record_chain(writer->answer.chain, head);
  writer->answer.bytes += (uint64_t)MLFAB__RECORD_BYTES + record.meta_bytes + record.bulk_bytes;
  op->head_bytes += MLFAB__RECORD_BYTES + record.meta_bytes;
  op->bulk = record.bulk;
  op->bulk_bytes = record.bulk_bytes;
  writer->over = record.type == MLFAB__RECORD_END;
  return 1;
}

/* Asks for the next operation: all records that fit, up to the first with a bulk. The previous operation has written
 * all its bytes. */
static void writer_go_on(mlfab__writer *writer) {
  mlfab_file_op *op = &writer->filer->op;
  op->kind = MLFAB_FILE_WRITE;
  op->flags = writer->answer.bytes == 0 ? MLFAB_FILE_FIRST : 0;
  op->path = writer->path;
  op->head = writer->heads;
  op->head_bytes = op->bulk_bytes = 0;
  op->bulk = NULL;
  while (!op->bulk &&
         MLFAB__WRITER_HEADS - op->head_bytes >= MLFAB__RECORD_BYTES + MLFAB__MOMENT_META) {
    if (!writer_append(writer)) break;
  }
  mlfab__moment_give(&writer->moment, writer->moment.cursor.slice);
  if (writer->over) op->flags |= MLFAB_FILE_LAST;
  mlfab__files_ask(writer->filer);
}

/* --- the end --- */

static void writer_answer(mlfab__writer *writer) {
  writer->phase = MLFAB__WRITER_IDLE;
  mlfab__moment_unpin(&writer->moment);
  writer->done(writer->self, &writer->answer);
}

static void writer_blame(mlfab__writer *writer, int code, const char *text) {
  writer->answer.code = code;
  snprintf(writer->answer.text, sizeof writer->answer.text, "%.255s", text);
}

/* Closes and removes the file. A requested operation that has not begun becomes this one; an operation that has begun
 * ends first. `flags` 1: its state is unknown, so ABORT is asked for once more. */
static void writer_abort(mlfab__writer *writer, int code, const char *text) {
  mlfab_file_op *op = &writer->filer->op;
  writer_blame(writer, code, text);
  mlfab__moment_unpin(&writer->moment);
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
    snprintf(text, sizeof text, "cannot write '%.120s': %.110s", writer->path,
             event->text ? event->text : mlfab_error_text(event->code));
    writer_abort(writer, event->code, text);
  } else if (mlfab__moment_lost(&writer->moment)) {
    writer_abort(writer, MLFAB_ERR_MEMORY, "is out of memory for optimizer state");
  } else if (writer->over) {
    writer_answer(writer);
  } else {
    writer_go_on(writer);
  }
}

/* --- the order --- */

MLFAB__INTERNAL void mlfab__writer_due(mlfab__writer *writer) {
  mlfab__server *server = writer->server;
  if (writer->phase != MLFAB__WRITER_PINS) return;
  if (!writer->heads) writer->heads = mlfab__alloc(writer->env, MLFAB__WRITER_HEADS);
  if (!writer->heads || mlfab__moment_pin(&writer->moment, writer->env, server, 0)) {
    writer_blame(writer, MLFAB_ERR_MEMORY, "is out of memory for a checkpoint");
    writer_answer(writer);
    return;
  }
  writer->moment.head.number = writer->order.number;
  writer->moment.head.server = writer->order.index;
  writer->moment.head.servers = writer->order.shards;
  writer->phase = MLFAB__WRITER_WRITES;
  writer->over = 0;
  writer->answer.epoch = server->epoch;
  writer->answer.version = writer_version(&writer->moment.view);
  mlfab__record_path(writer->path, writer->order.dir, writer->order.number, writer->order.index,
                     writer->order.shards);
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
  } else if (writer->phase != MLFAB__WRITER_IDLE) {
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
    if (server->apply.applying == MLFAB__APPLY_NONE) mlfab__writer_due(writer);
  }
}
