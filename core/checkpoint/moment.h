/* moment.h - a server's state of one moment, as records of a shard (record.h). For writer.c and copy.c.
 *
 * pin sets the state aside: references to the blocks of weights and of open rounds' sums, and to optimizer state
 * (store.h, holders); all else is small, and copied. It costs a few pointers for each block, and no bytes. Then
 * training goes on, and next() gives record after record. Several moments may be pinned at the same time.
 *
 *    FREE --pin--> PINNED --next ... next--> OVER --unpin--> FREE
 *
 * A moment has all slices of the server, or the slices that changed since an earlier moment: `at` of one moment is
 * `since` of the next. It always has the clock and all workers.
 *
 * Invariants. (1) The state belongs to one moment between two commits: if it contains an update, its windows, versions
 * and optimizer state contain it, too. (2) The bytes of a record stay valid and unchanged until its slice is given
 * back, or the moment is unpinned; unless the moment is lost. */
#ifndef MLFAB__MOMENT_H
#define MLFAB__MOMENT_H

#include "../model/hold.h"
#include "../model/image.h"
#include "state.h"

struct mlfab__server;

enum { MLFAB__MOMENT_META = 16384 };

typedef struct mlfab__moment_room { /* numbers of elements that fit the arrays */
  uint32_t positions, slices, owned, states, tensors, workers, peers;
} mlfab__moment_room;

/* Zeros: FREE, without memory. */
typedef struct mlfab__moment {
  mlfab__env *env;
  struct mlfab__server *server;
  int complete;   /* with PEER records, which files lack; set it before pin */
  uint32_t chunk; /* the most bulk bytes of a record; 0: as configured */
  int pinned;
  uint64_t at; /* store.changes when it was pinned */
  mlfab__checkpoint_head head;
  mlfab__holder holder;
  /* A copy of the store with the holder's own lists; the blocks are the store's. */
  mlfab__store view;
  uint32_t *owners; /* by slice number: this server, if it is in the moment */
  uint32_t given;   /* slices before this one are given back */
  uint8_t *table;   /* the definition, encoded */
  mlfab__define define;
  mlfab__checkpoint_worker *workers;
  mlfab__checkpoint_peer *peers; /* NULL unless complete */
  mlfab__clock_record clock;
  uint32_t *words, nwords;
  mlfab__moment_room room;
  /* State of next(). */
  int step;
  uint32_t item, index;
  uint32_t announced;         /* slices before this one have their SLICE record */
  mlfab__image_cursor cursor; /* its slice (an index of the store) is the last record's */
  uint8_t *window;            /* bulk of the last record, for a model on a device */
} mlfab__moment;

/* Pins the slices that have changed since `since`; 0: all slices. The server's model must stand, and the server may
 * apply nothing and move no slices. The moment must be FREE; its memory is used again. Errors: MEMORY; nothing held. */
MLFAB__INTERNAL int mlfab__moment_pin(mlfab__moment *moment, mlfab__env *env,
                                      struct mlfab__server *server, uint64_t since);
/* Returns 1 and the next record, or 0 after END. `meta`: MLFAB__MOMENT_META bytes, for its meta. Lends its bulk (NULL:
 * none, or ghosts; for a device only until the next call). record->set is 0. Bulks come in the order of slices. */
MLFAB__INTERNAL int mlfab__moment_next(mlfab__moment *moment, uint8_t *meta,
                                       mlfab__file_record *record);
/* Gives back the slices before `end` (an index): nobody uses their bytes any more. */
MLFAB__INTERNAL void mlfab__moment_give(mlfab__moment *moment, uint32_t end);
/* Did memory run out for a copy of a state that an update changed? Then the records belong to no moment. Ask after all
 * borrowers have copied them. */
static inline int mlfab__moment_lost(const mlfab__moment *moment) { return moment->holder.lost; }
/* Starts again with the first record. Errors: STATE if a slice was given back: then pin again. */
MLFAB__INTERNAL int mlfab__moment_restart(mlfab__moment *moment);
/* Gives back everything that it holds; keeps the memory. Does nothing if the moment is FREE. */
MLFAB__INTERNAL void mlfab__moment_unpin(mlfab__moment *moment);
/* The same, and frees the memory. */
MLFAB__INTERNAL void mlfab__moment_free(mlfab__moment *moment);

#endif
