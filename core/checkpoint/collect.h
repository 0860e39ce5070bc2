/* collect.h - a copy of a server takes over the moments of the server that it is a copy of. Layer 4.
 *
 * The records of a moment (moment.h, complete) come one after another, from a server of the same number in a fabric of
 * the same shape, which owns the same slices. They are collected beside the model, and installed in one step:
 *
 *    EMPTY --begin--> TAKES --END, all is there--> WHOLE --install--> EMPTY
 *      ^                |                            |
 *      +----------------+--a record is refused, void-+
 *
 * The first moment may find a server without a model. DEFINE then builds one, which stands with install, and is freed
 * when the stream is void. Later ones have only what has changed since the moment before.
 *
 * The server has no workers, pulls or updates. Weights and sums are collected in spare blocks of its store; optimizer
 * state in memory that changes places with the store's. So from the second moment on, little or nothing is allocated.
 *
 * Invariants. (1) Until install the server is as it was, but for spare blocks. (2) install cannot fail, and makes the
 * server what the other one was at one moment: weights, state, versions, sums of open rounds, clocks, windows of decided
 * updates, progress, epoch. */
#ifndef MLFAB__COLLECT_H
#define MLFAB__COLLECT_H

#include "../model/hold.h"
#include "../model/image.h"
#include "reader.h"

struct mlfab__server;

enum mlfab__collect_phase { MLFAB__COLLECT_EMPTY, MLFAB__COLLECT_TAKES, MLFAB__COLLECT_WHOLE };

typedef struct mlfab__collect_slice { /* by slice of the store */
  int comes;                          /* its SLICE has come */
  mlfab__checkpoint_slice is;
  mlfab__image_part part;
} mlfab__collect_slice;

/* Zeros: EMPTY, without memory. */
typedef struct mlfab__collect {
  mlfab__env *env;
  struct mlfab__server *server;
  enum mlfab__collect_phase phase;
  uint64_t at;      /* the moment that was installed last: HEAD's number; 0: none */
  uint64_t since;   /* the changes since then come; 0: all comes */
  uint64_t here;    /* store.changes after that */
  int built;        /* this stream has built the model */
  uint32_t history; /* of the model: the caller of begin sets it */
  mlfab__reader reader;
  mlfab__checkpoint_head head;
  /* Room, and for what store. */
  uint32_t positions, nslices, nworkers, nwords, block_bytes;
  mlfab__memory *memory;
  uint32_t *w, *sum;  /* by position, as in a store */
  uint8_t **s0, **s1; /* NULL where the store's are */
  mlfab__collect_slice *slices;
  mlfab__checkpoint_worker *workers;
  mlfab__checkpoint_peer *peers;
  mlfab__reshard_server_clock clocks[MLFAB__READER_CLOCKS];
  uint32_t *words;                /* nwords for each clock */
  uint32_t nclocks, came, npeers; /* came: WORKER records so far */
} mlfab__collect;

/* A stream begins, with what has changed since the sender's moment `since`, or with all (0). What was collected before
 * is void. The server applies nothing, and moves no slices. */
MLFAB__INTERNAL void mlfab__collect_begin(mlfab__collect *collect, mlfab__env *env,
                                          struct mlfab__server *server, uint64_t since);
/* Takes the next record; record->bulk NULL with bulk_bytes: ghosts. 0: more come; 1: WHOLE. Errors, with a text, after
 * which the stream is void: CHECKPOINT (a record is malformed or out of order, or something is missing), CONFIG (another
 * server, fabric, or options), MODEL (other tensors or slices), STATE (it does not build on the moment that is here, or
 * is older; no stream has begun), MEMORY, UNSUPPORTED (the model, here). */
MLFAB__INTERNAL int mlfab__collect_take(mlfab__collect *collect, const mlfab__file_record *record,
                                        mlfab_error *error);
/* Installs what is WHOLE. */
MLFAB__INTERNAL void mlfab__collect_install(mlfab__collect *collect);
/* What was collected is void; keeps the memory. Call it before the server's model is freed. */
MLFAB__INTERNAL void mlfab__collect_void(mlfab__collect *collect);
/* The same, and frees the memory. */
MLFAB__INTERNAL void mlfab__collect_free(mlfab__collect *collect);

#endif
