/* votes.c - reads and writes the file of a voter. See votes.h. */
#include "votes.h"

#include <stdio.h>

static void votes_write(mlfab__voters *voters) {
  mlfab__votes *file = voters->votes;
  mlfab_file_op *op = &file->filer.op;
  if (file->filer.busy) return;
  uint8_t *meta = file->bytes + MLFAB__RECORD_BYTES;
  const mlfab__votes_head votes = {voters->node->fabric, voters->n};
  mlfab__file_record record = {
      .type = MLFAB__RECORD_VOTES,
      .meta_bytes = mlfab__encode_votes_head(meta, &votes),
      .bulk_bytes = voters->n * MLFAB__VOTE_RECORD_BYTES,
  };
  uint8_t *table = meta + record.meta_bytes;
  record.bulk = table;
  for (uint32_t i = 0; i < voters->n; i++) {
    mlfab__encode_vote_record(table + i * MLFAB__VOTE_RECORD_BYTES, &voters->shards[i].stored);
    voters->shards[i].written = voters->shards[i].pending ? voters->shards[i].stored.epoch : 0;
  }
  mlfab__record_seal(file->bytes, &record);
  op->kind = MLFAB_FILE_WRITE;
  op->flags = MLFAB_FILE_FIRST | MLFAB_FILE_LAST;
  op->path = file->path;
  op->head = file->bytes;
  op->head_bytes = MLFAB__RECORD_BYTES + record.meta_bytes + record.bulk_bytes;
  op->bulk = NULL;
  op->bulk_bytes = 0;
  mlfab__files_ask(&file->filer);
}

static void votes_read(mlfab__voters *voters) {
  mlfab__votes *file = voters->votes;
  file->filer.op.kind = MLFAB_FILE_READ;
  file->filer.op.path = file->path;
  file->filer.op.offset = 0;
  file->filer.op.bytes = file->file_bytes + 1;
  mlfab__files_ask(&file->filer);
}

/* Takes the votes of the file, if this fabric has written it. */
static void votes_take(mlfab__voters *voters, const mlfab_io_event *event) {
  mlfab__file_record record;
  mlfab__votes_head votes;
  const char *why = NULL;
  if (event->code) return;
  int64_t n = mlfab__record_open(event->bulk, event->bulk_bytes, &record, &why);
  int bad = n <= 0 || (uint64_t)n != event->bulk_bytes || record.type != MLFAB__RECORD_VOTES ||
            mlfab__decode_votes_head(record.meta, record.meta_bytes, &votes) ||
            votes.shards != voters->n || record.bulk_bytes != voters->n * MLFAB__VOTE_RECORD_BYTES;
  if (bad) {
    mlfab__log(&voters->node->env, MLFAB_LOG_WARN, "votes: '%s' is damaged: %s",
               voters->votes->path, why ? why : "not a voter's file");
    return;
  }
  if (votes.fabric != voters->node->fabric) return;
  for (uint32_t i = 0; i < voters->n; i++)
    mlfab__decode_vote_record(record.bulk + i * MLFAB__VOTE_RECORD_BYTES,
                              &voters->shards[i].stored);
}

static void votes_event(void *self, const mlfab_io_event *event) {
  mlfab__voters *voters = self;
  mlfab__votes *file = voters->votes;
  if (voters->phase == MLFAB__VOTERS_READ) {
    votes_take(voters, event);
    mlfab__voters_begin(voters);
    return;
  }
  if (file->filer.op.kind == MLFAB_FILE_ABORT) return; /* the abort itself may fail, too */
  if (event->code) {
    if (!voters->retry_ns)
      mlfab__log(&voters->node->env, MLFAB_LOG_WARN, "votes: cannot write '%s': %s", file->path,
                 event->text ? event->text : mlfab_error_text(event->code));
    voters->retry_ns = voters->node->now_ns + voters->node->config.heartbeat_ns;
    file->filer.op.kind = MLFAB_FILE_ABORT;
    file->filer.op.head_bytes = 0;
    mlfab__files_ask(&file->filer);
    return;
  }
  voters->retry_ns = 0;
  mlfab__voters_stored(voters);
}

static int votes_open(mlfab__voters *voters) {
  mlfab_node *node = voters->node;
  mlfab__votes *file = mlfab__alloc(&node->env, sizeof *file);
  voters->votes = file;
  if (!file) return MLFAB_ERR_MEMORY;
  file->file_bytes = MLFAB__RECORD_BYTES + 16 + voters->n * MLFAB__VOTE_RECORD_BYTES;
  file->bytes = mlfab__alloc(&node->env, file->file_bytes);
  if (!file->bytes) return MLFAB_ERR_MEMORY;
  (void)mlfab__files_open(&file->filer, node, voters, votes_event);
  snprintf(file->path, sizeof file->path, "%s/votes-%016llx-%u", node->config.vote_dir,
           (unsigned long long)node->job, node->id);
  return 0;
}

static void votes_free(mlfab__voters *voters) {
  mlfab__votes *file = voters->votes;
  if (file) mlfab__free(&voters->node->env, file->bytes, file->file_bytes);
  mlfab__free(&voters->node->env, file, sizeof *file);
  voters->votes = NULL;
}

MLFAB__INTERNAL const mlfab__voter_disk *mlfab__votes_disk(void) {
  static const mlfab__voter_disk disk = {votes_open, votes_read, votes_write, votes_free};
  return &disk;
}
