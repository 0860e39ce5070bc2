/* reader.c - checks and decodes the records of a shard. See reader.h. */
#include "reader.h"

#include "../model/sync.h"
#include "../server/server.h"

/* --- records: return NULL, or a text that names the fault --- */

static const char *reader_head(mlfab__reader *reader, const mlfab__file_record *record,
                               mlfab__checkpoint_head *head) {
  if (mlfab__decode_checkpoint_head(record->meta, record->meta_bytes, head))
    return "its first record does not parse";
  reader->owned = head->owned;
  return NULL;
}

static const char *reader_define(const mlfab__file_record *record, mlfab__define *define) {
  if (mlfab__decode_define(record->meta, record->meta_bytes, define) || define->tensors == 0 ||
      record->bulk_bytes != (uint64_t)define->tensors * MLFAB__TENSOR_INFO_BYTES)
    return "its definition of the model does not parse";
  return NULL;
}

static const char *reader_clock(mlfab__reader *reader, const mlfab__file_record *record,
                                mlfab__reader_item *item) {
  mlfab__clock_record *clock = &item->is.clock;
  if (mlfab__decode_clock_record(record->meta, record->meta_bytes, clock, item->words))
    return "a clock does not parse";
  clock->consistency.size = sizeof clock->consistency;
  if (mlfab__sync_check(&clock->consistency, UINT32_MAX, NULL)) return "a clock is impossible";
  reader->clocked = 1;
  return NULL;
}

static const char *reader_worker(const mlfab__file_record *record,
                                 mlfab__checkpoint_worker *worker) {
  if (mlfab__decode_checkpoint_worker(record->meta, record->meta_bytes, worker) ||
      worker->pushed > MLFAB__PROGRESS_MAX)
    return "a worker's record does not parse";
  return NULL;
}

static const char *reader_peer(const mlfab__file_record *record, mlfab__checkpoint_peer *peer) {
  if (mlfab__decode_checkpoint_peer(record->meta, record->meta_bytes, peer) ||
      peer->decided > MLFAB__PROGRESS_MAX)
    return "a worker's record does not parse";
  return NULL;
}

static const char *reader_slice(mlfab__reader *reader, const mlfab__file_record *record,
                                mlfab__checkpoint_slice *slice) {
  if (mlfab__decode_checkpoint_slice(record->meta, record->meta_bytes, slice) ||
      slice->slice >= reader->model || !reader->clocked)
    return "a slice's record is impossible";
  reader->slices++;
  reader->slice = slice->slice;
  return NULL;
}

static const char *reader_image(const mlfab__reader *reader, const mlfab__file_record *record,
                                mlfab__checkpoint_bytes *bytes) {
  if (mlfab__decode_checkpoint_bytes(record->meta, record->meta_bytes, bytes) ||
      bytes->slice != reader->slice)
    return "the record of a slice's bytes is impossible";
  return NULL;
}

static const char *reader_end(const mlfab__reader *reader, const mlfab__file_record *record,
                              mlfab__checkpoint_end *end) {
  if (mlfab__decode_checkpoint_end(record->meta, record->meta_bytes, end) ||
      end->records != reader->index || reader->slices != reader->owned)
    return "its last record does not fit";
  return NULL;
}

/* Types are numbered in their order, except PEER. */
static int reader_rank(uint16_t type) {
  return type == MLFAB__RECORD_PEER ? 2 * MLFAB__RECORD_WORKER + 1 : 2 * type;
}

/* May a record of this type follow? */
static const char *reader_order(const mlfab__reader *reader, uint16_t type) {
  uint16_t last = reader->last;
  int repeats = type == MLFAB__RECORD_WORKER || type == MLFAB__RECORD_PEER ||
                type == MLFAB__RECORD_SLICE || type == MLFAB__RECORD_IMAGE;
  if (type < MLFAB__RECORD_HEAD || type > MLFAB__RECORD_PEER)
    return "it has a record of an unknown kind";
  if (type == MLFAB__RECORD_DEFINE && last == type) return "it has two definitions of the model";
  int begins = last == 0 ? type == MLFAB__RECORD_HEAD
                         : last != MLFAB__RECORD_HEAD || type == MLFAB__RECORD_DEFINE;
  int follows = reader_rank(type) > reader_rank(last) || (type == last && repeats) ||
                (type == MLFAB__RECORD_SLICE && last == MLFAB__RECORD_IMAGE);
  int image = type != MLFAB__RECORD_IMAGE || reader->slices > 0;
  return begins && follows && image ? NULL : "its records are out of order";
}

MLFAB__INTERNAL const char *mlfab__reader_take(mlfab__reader *reader,
                                               const mlfab__file_record *record,
                                               mlfab__reader_item *item) {
  if (record->set != reader->set) return "it belongs to another checkpoint of this number";
  if (record->index != reader->index) return "its records are out of order";
  const char *why = reader_order(reader, record->type);
  if (why) return why;
  switch (record->type) {
    case MLFAB__RECORD_HEAD:
      why = reader_head(reader, record, &item->is.head);
      break;
    case MLFAB__RECORD_DEFINE:
      why = reader_define(record, &item->is.define);
      break;
    case MLFAB__RECORD_CLOCK:
      why = reader_clock(reader, record, item);
      break;
    case MLFAB__RECORD_WORKER:
      why = reader_worker(record, &item->is.worker);
      break;
    case MLFAB__RECORD_PEER:
      why = reader_peer(record, &item->is.peer);
      break;
    case MLFAB__RECORD_SLICE:
      why = reader_slice(reader, record, &item->is.slice);
      break;
    case MLFAB__RECORD_IMAGE:
      why = reader_image(reader, record, &item->is.bytes);
      break;
    default:
      why = reader_end(reader, record, &item->is.end);
  }
  if (why) return why;
  reader->last = record->type;
  reader->index++;
  return NULL;
}
