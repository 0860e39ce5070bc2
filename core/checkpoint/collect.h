/* collect.h - a copy of a server takes over that server's moments. replica/copy.c calls it.
 *
 * The records of a moment (moment.h, complete) come one after another, from a server of the same number in a fabric of
 * the same shape, which owns the same slices. They are collected beside the model, and installed in one step:
 *
 *    EMPTY --begin--> TAKES --END, all is there--> WHOLE --install--> EMPTY
 *      ^                |                            |
 *      +----------------+--a record is refused, void-+
 *
 * The first moment may find a server without a model. DEFINE then builds a model, which stands after install, and is
 * freed when the stream is void. Later moments have only the changes since the moment before.
 *
 * The server has no workers, pulls or updates. Weights and sums are collected in spare blocks of its store; optimizer
 * state in memory that changes places with the store's. So after the first moment it allocates little or nothing.
 *
 * Invariants. (1) Until install the server stays as it was, except for spare blocks. (2) install cannot fail. It gives
 * the server the other server's state of one moment: weights, state, versions, sums of open rounds, clock, windows of
 * decided updates, progress, epoch. */
#ifndef MLFAB__COLLECT_H
#define MLFAB__COLLECT_H

#include "../model/hold.h"
#include "../model/image.h"
#include "reader.h"

struct mlfab__server;

enum mlfab__collect_phase { MLFAB__COLLECT_EMPTY, MLFAB__COLLECT_TAKES, MLFAB__COLLECT_WHOLE };

typedef struct mlfab__collect_slice { /* by slice of the store */
  int comes;                          /* its SLICE has arrived */
  mlfab__checkpoint_slice is;
  mlfab__image_part part;
} mlfab__collect_slice;

/* Zeros: EMPTY, without memory. */
typedef struct mlfab__collect {
  mlfab__env *env;
  struct mlfab__server *server;
  enum mlfab__collect_phase phase;
  uint64_t at;      /* HEAD's number of the last installed moment; 0: none */
  uint64_t since;   /* the stream has the changes since then; 0: everything */
  uint64_t here;    /* store.changes after that install */
  int built;        /* this stream has built the model */
  uint32_t history; /* history number of the model: the caller of begin sets it */
  mlfab__reader reader;
  mlfab__checkpoint_head head;
  /* Sizes of the allocated arrays. */
  uint32_t positions, nslices, nworkers, nwords, block_bytes;
  mlfab__memory *memory;
  uint32_t *w, *sum;  /* by position, as in a store */
  uint8_t **s0, **s1; /* NULL where the store's are */
  mlfab__collect_slice *slices;
  mlfab__checkpoint_worker *workers;
  mlfab__checkpoint_peer *peers;
  mlfab__clock_record clock;
  uint32_t *words;       /* nwords of the clock */
  uint32_t came, npeers; /* came: number of WORKER records so far */
} mlfab__collect;

/* Begins a stream with the changes since the sender's moment `since`, or with everything (0). Voids the records
 * collected before. The server must apply nothing and move no slices. */
MLFAB__INTERNAL void mlfab__collect_begin(mlfab__collect *collect, mlfab__env *env,
                                          struct mlfab__server *server, uint64_t since);
/* Takes the next record; record->bulk NULL with bulk_bytes: a ghost block (sizes only). Returns 0: more records follow;
 * 1: WHOLE. An error has a text, and makes the stream void. CHECKPOINT: a record is malformed, out of order or missing.
 * CONFIG: another server, fabric, or options. MODEL: other tensors or slices. STATE: not based on the present moment,
 * or older; or no stream has begun. MEMORY. UNSUPPORTED: the model, here. */
MLFAB__INTERNAL int mlfab__collect_take(mlfab__collect *collect, const mlfab__file_record *record,
                                        mlfab_error *error);
/* Installs the WHOLE moment. */
MLFAB__INTERNAL void mlfab__collect_install(mlfab__collect *collect);
/* Voids the collected records; keeps the memory. Call it before the server's model is freed. */
MLFAB__INTERNAL void mlfab__collect_void(mlfab__collect *collect);
/* The same, and frees the memory. */
MLFAB__INTERNAL void mlfab__collect_free(mlfab__collect *collect);

#endif
