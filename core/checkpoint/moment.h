/* moment.h - a server's state of one moment, as the records of a shard (record.h). Layer 4.
 *
 * pin sets the state aside: references to the blocks of weights and of open rounds' sums, and to optimizer state
 * (store.h, holders); all else is small, and copied. It costs a few pointers for each block, and no bytes. Then
 * training goes on, and next() gives record after record. Several moments may be pinned at the same time.
 *
 *    FREE --pin--> PINNED --next ... next--> OVER --unpin--> FREE
 *
 * A moment has all slices of the server, or those that have changed since an earlier one: `at` of one moment is
 * `since` of the next. All clocks and workers are always in it.
 *
 * Invariants. (1) The state is of one moment between two commits: what it has of an update, it has of its window,
 * versions and optimizer state, too. (2) The bytes of a record stay valid, and as they are, until its slice is given
 * back, or the moment is unpinned; unless it is lost. */
#ifndef MLFAB__MOMENT_H
#define MLFAB__MOMENT_H

#include "../model/hold.h"
#include "../model/image.h"
#include "state.h"

struct mlfab__server;

enum { MLFAB__MOMENT_META = 16384, MLFAB__MOMENT_CLOCKS = 8 };

typedef struct mlfab__moment_room { /* numbers of elements that the arrays have room for */
  uint32_t positions, slices, owned, states, tensors, workers, peers;
} mlfab__moment_room;

/* Zeros: FREE, without memory. */
typedef struct mlfab__moment {
  mlfab__env *env;
  struct mlfab__server *server;
  int complete;   /* with PEER records, which files do not have; set it before pin */
  uint32_t chunk; /* the most bulk of a record; 0: that of the configuration */
  int pinned;
  uint64_t at; /* store.changes when it was pinned */
  mlfab__checkpoint_head head;
  mlfab__holder holder;
  /* A copy of the store with lists of its own, those of the holder; its blocks are those of the store. */
  mlfab__store view;
  uint32_t *owners; /* by slice number: this server, if it is in the moment */
  uint32_t given;   /* slices before this one are given back */
  uint8_t *table;   /* the definition, encoded */
  mlfab__define define;
  mlfab__checkpoint_worker *workers;
  mlfab__checkpoint_peer *peers; /* NULL unless complete */
  mlfab__reshard_server_clock clocks[MLFAB__MOMENT_CLOCKS];
  uint32_t *words, nclocks, nwords; /* words: nwords for each clock */
  mlfab__moment_room room;
  /* What comes next. */
  int step;
  uint32_t item, index;
  uint32_t announced;         /* slices before this one have their SLICE record */
  mlfab__image_cursor cursor; /* its slice (an index of the store) is that of the last record */
  uint8_t *window;            /* of a model on a device: the bulk of the last record */
} mlfab__moment;

/* Pins the slices that have changed since `since`; 0: all. The server has a model that stands, applies nothing, and
 * moves no slices. The moment is FREE; memory of an earlier one is used again. Errors: MEMORY; nothing is held. */
MLFAB__INTERNAL int mlfab__moment_pin(mlfab__moment *moment, mlfab__env *env,
                                      struct mlfab__server *server, uint64_t since);
/* The next record: 1; or 0 behind END. Its meta is written to `meta`, with MLFAB__MOMENT_META bytes of room; its bulk is
 * lent (NULL: none, or ghosts; of a model on a device only until the next call). record->set is 0. Bulks come in the order of slices. */
MLFAB__INTERNAL int mlfab__moment_next(mlfab__moment *moment, uint8_t *meta,
                                       mlfab__file_record *record);
/* Nobody uses the bytes of the slices before `end` (an index) any more: gives them back. */
MLFAB__INTERNAL void mlfab__moment_give(mlfab__moment *moment, uint32_t end);
/* Was there no memory to copy a state that an update changed, so that the records are of no moment? Ask when all of
 * them have been copied by whoever they were lent to. */
static inline int mlfab__moment_lost(const mlfab__moment *moment) { return moment->holder.lost; }
/* The first record comes next again. Errors: STATE, when a slice was given back: pin again. */
MLFAB__INTERNAL int mlfab__moment_restart(mlfab__moment *moment);
/* Gives back all that is held; keeps the memory. Of a FREE moment: does nothing. */
MLFAB__INTERNAL void mlfab__moment_unpin(mlfab__moment *moment);
/* The same, and frees the memory. */
MLFAB__INTERNAL void mlfab__moment_free(mlfab__moment *moment);

#endif
