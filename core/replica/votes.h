/* votes.h - the file of a voter in the directory `vote_dir`: its granted records, of all its shards.
 *
 *    CLEAN --a record to store--> DIRTY --writes--> WRITING --durable--> told; CLEAN or DIRTY
 *                                                      \--error--> DIRTY, again after a beat
 *
 * The file is a record of ../checkpoint/record.h (VOTES) with the number of the fabric: the file of another fabric is
 * ignored. */
#ifndef MLFAB__VOTES_H
#define MLFAB__VOTES_H

#include "../checkpoint/record.h"
#include "../node/files.h"
#include "voter.h"

typedef struct mlfab__votes {
  mlfab__filer filer;
  uint8_t *bytes; /* the file */
  uint32_t file_bytes;
  char path[MLFAB__RECORD_PATH];
} mlfab__votes;

MLFAB__INTERNAL const mlfab__voter_disk *mlfab__votes_disk(void);

#endif
