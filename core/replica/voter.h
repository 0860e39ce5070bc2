/* voter.h - the votes of a node: a copy votes in one shard, the scheduler in all. Layer 4.
 *
 * Votes travel over VOTER links. What a voter has granted is in one file of the directory `vote_dir`, which holds all
 * its shards. A record is granted when it is on disk; without a directory it is in memory only, and a process that starts
 * again has lost it (vote.h, UNKNOWN).
 *
 *    WAITS --WELCOME--> READS (only a process that replaces another, with a directory) --file read--> VOTES
 *      \--WELCOME, the fabric is being formed, or no directory--> VOTES
 *
 *    what is stored:  CLEAN --a record to store--> DIRTY --writes--> WRITING --durable--> told; CLEAN or DIRTY
 *                                                                       \--error--> DIRTY, again after a beat
 *
 * The file is a record of record.h (VOTES) with the number of the fabric: that of another fabric counts as none.
 *
 * Invariant: a record is granted only after a file that has it is durable. */
#ifndef MLFAB__VOTER_H
#define MLFAB__VOTER_H

#include "../checkpoint/record.h"
#include "../node/files.h"
#include "replica_wire.h"

struct mlfab__voters;

typedef struct mlfab__voter_shard {
  struct mlfab__voters *voters;
  uint32_t shard;
  mlfab__vote vote;
  mlfab__vote_record stored; /* what the file has, or will have */
  uint32_t written;          /* epoch of the record in the file that is being written */
  uint8_t pending;           /* `stored` waits to be durable */
} mlfab__voter_shard;

typedef struct mlfab__voters {
  mlfab_node *node;
  mlfab__port port;           /* peers are voters */
  mlfab__port in;             /* their links to us, on which their votes come */
  mlfab__filer files, *filer; /* filer NULL: without a directory */
  uint32_t n;                 /* shards */
  mlfab__voter_shard *shards;
  enum { MLFAB__VOTERS_WAIT, MLFAB__VOTERS_READ, MLFAB__VOTERS_VOTE } phase;
  uint64_t retry_ns; /* after an error of the file; 0: none */
  uint8_t *bytes;    /* the file */
  uint32_t file_bytes;
  char path[MLFAB__RECORD_PATH];
} mlfab__voters;

/* `n` shards from `first` on; `port` and `in` are copied. Errors: MEMORY. Afterwards free works in any case. */
MLFAB__INTERNAL int mlfab__voters_init(mlfab__voters *voters, mlfab_node *node,
                                       const mlfab__port *port, const mlfab__port *in,
                                       uint32_t first, uint32_t n);
MLFAB__INTERNAL void mlfab__voters_free(mlfab__voters *voters);
/* A VOTE from this voter. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__voters_frame(mlfab__voters *voters, uint32_t from,
                                        const mlfab__frame_in *frame);
/* mlfab__role.awake */
MLFAB__INTERNAL void mlfab__voters_awake(mlfab__voters *voters, uint64_t late_ns, uint64_t now_ns);
/* Every look at the clock. After every event: begins to write, and goes on with what is durable. */
MLFAB__INTERNAL void mlfab__voters_tick(mlfab__voters *voters);
MLFAB__INTERNAL void mlfab__voters_settle(mlfab__voters *voters);
MLFAB__INTERNAL uint64_t mlfab__voters_deadline(const mlfab__voters *voters);

#endif
