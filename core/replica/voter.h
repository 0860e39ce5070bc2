/* voter.h - the votes of a node: a copy votes in one shard, the scheduler in all.
 *
 * Votes travel over VOTER links. A grant counts once it is stored: in a file of the directory `vote_dir` (votes.h), or
 * else in memory only; then a restarted process has lost it (vote.h, UNKNOWN).
 *
 *    WAITS --WELCOME--> READS (only a process that replaces another, with a directory) --file read--> VOTES
 *      \--WELCOME, the fabric is being formed, or no directory--> VOTES
 *
 * Invariant: with a directory, a record is granted only after a file that has it is durable. */
#ifndef MLFAB__VOTER_H
#define MLFAB__VOTER_H

#include "../node/node.h"
#include "replica_wire.h"

struct mlfab__voters;

/* The storage of votes: votes.h implements it. */
typedef struct mlfab__voter_disk {
  int (*open)(struct mlfab__voters *voters);   /* creates voters->votes. Errors: MEMORY */
  void (*read)(struct mlfab__voters *voters);  /* fills `stored`, then calls mlfab__voters_begin */
  void (*write)(struct mlfab__voters *voters); /* `stored`; then calls mlfab__voters_stored */
  void (*free)(struct mlfab__voters *voters);
} mlfab__voter_disk;

typedef struct mlfab__voter_shard {
  struct mlfab__voters *voters;
  uint32_t shard;
  mlfab__vote vote;
  mlfab__vote_record stored; /* the record that the file has, or is about to have */
  uint32_t written;          /* epoch of the record that is being written */
  uint8_t pending;           /* `stored` waits to be durable */
} mlfab__voter_shard;

typedef struct mlfab__voters {
  mlfab_node *node;
  mlfab__port port;              /* port to the other voters */
  mlfab__port in;                /* port of their links to us, which carry their votes */
  const mlfab__voter_disk *disk; /* NULL: without a directory */
  struct mlfab__votes *votes;    /* the open file */
  uint32_t n;                    /* number of shards */
  mlfab__voter_shard *shards;
  enum { MLFAB__VOTERS_WAIT, MLFAB__VOTERS_READ, MLFAB__VOTERS_VOTE } phase;
  uint64_t retry_ns; /* next try after an error of the file; 0: none */
} mlfab__voters;

/* Starts the votes of `n` shards from `first` on; copies `port` and `in`. disk: with config.vote_dir. Errors: MEMORY.
 * Afterwards mlfab__voters_free works in any case. */
MLFAB__INTERNAL int mlfab__voters_init(mlfab__voters *voters, mlfab_node *node,
                                       const mlfab__port *port, const mlfab__port *in,
                                       uint32_t first, uint32_t n, const mlfab__voter_disk *disk);
MLFAB__INTERNAL void mlfab__voters_free(mlfab__voters *voters);
/* Takes a VOTE from this voter. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__voters_frame(mlfab__voters *voters, uint32_t from,
                                        const mlfab__frame_in *frame);
/* mlfab__role.awake */
MLFAB__INTERNAL void mlfab__voters_awake(mlfab__voters *voters, uint64_t late_ns, uint64_t now_ns);
/* tick: for every look at the clock. settle: for every event; begins to write, and takes up durable records. */
MLFAB__INTERNAL void mlfab__voters_tick(mlfab__voters *voters);
MLFAB__INTERNAL void mlfab__voters_settle(mlfab__voters *voters);
MLFAB__INTERNAL uint64_t mlfab__voters_deadline(const mlfab__voters *voters);
/* For the disk. begin: votes begin with `stored`. stored: the records `written` are durable. */
MLFAB__INTERNAL void mlfab__voters_begin(mlfab__voters *voters);
MLFAB__INTERNAL void mlfab__voters_stored(mlfab__voters *voters);

/* witness.c: the scheduler's third vote on every shard (vote.h). It decides which of two copies serves when they do not hear each
 * other. Adds the role to a node that is only a scheduler. disk: of votes, or NULL. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__witness_attach(mlfab_node *node, const mlfab__voter_disk *disk);

#endif
