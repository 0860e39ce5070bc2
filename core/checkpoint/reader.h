/* reader.h - the records of a shard, one after another: their form and their order (state.h).
 *
 *    HEAD -> DEFINE -> CLOCK -> WORKER ... -> PEER ... -> (SLICE -> IMAGE ...) ... -> END
 *
 * The user checks and uses the content of the records (restore.c, collect.c).
 *
 * Invariants. (1) Each accepted record parses, and is the next record of its shard. (2) The clock comes
 * before the slices, and each slice's image follows it. (3) END counts the records and the slices that came. */
#ifndef MLFAB__READER_H
#define MLFAB__READER_H

#include "state.h"

/* Before HEAD: zeros, except `set` and `model`. */
typedef struct mlfab__reader {
  uint64_t set;    /* set of all records */
  uint32_t model;  /* number of slices of the model: above all slice numbers */
  uint32_t index;  /* index of the next record */
  uint16_t last;   /* type of the last record */
  uint32_t owned;  /* number of owned slices, from HEAD */
  uint32_t slices; /* SLICE records so far */
  uint32_t slice;  /* number of the last slice */
  int clocked;     /* the clock has come */
} mlfab__reader;

/* A record, decoded. */
typedef struct mlfab__reader_item {
  union {
    mlfab__checkpoint_head head;
    mlfab__define define;
    mlfab__clock_record clock;
    mlfab__checkpoint_worker worker;
    mlfab__checkpoint_peer peer;
    mlfab__checkpoint_slice slice;
    mlfab__checkpoint_bytes bytes;
    mlfab__checkpoint_end end;
  } is;
  uint32_t words[MLFAB__RESHARD_SERVER_WORDS_MAX]; /* of a clock; clock.words of them */
} mlfab__reader_item;

/* Takes the next record: returns NULL and the decoded record; or the fault as a text, and the shard is unusable. */
MLFAB__INTERNAL const char *mlfab__reader_take(mlfab__reader *reader,
                                               const mlfab__file_record *record,
                                               mlfab__reader_item *item);
/* Is the shard at its end? */
static inline int mlfab__reader_ended(const mlfab__reader *reader) {
  return reader->last == MLFAB__RECORD_END;
}

#endif
