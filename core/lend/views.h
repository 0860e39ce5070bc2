/* views.h - the server role: views, that is pulls which the worker reads in the server's memory. See views.c. */
#ifndef MLFAB__VIEWS_H
#define MLFAB__VIEWS_H

#include "../server/server.h"
#include "slab.h"

/* Bytes of a view, contiguous in the model and in a file. */
typedef struct mlfab__server_run {
  const uint8_t *at;
  uint64_t offset, bytes; /* in the model */
  uint64_t file;
  uint32_t block; /* of the first byte */
} mlfab__server_run;

/* Blocks that a worker reads in place, or has asked for. */
typedef struct mlfab__server_view {
  uint64_t request;         /* 0: free */
  uint64_t version, oldest; /* of its slices */
  mlfab__store *store;
  uint32_t *blocks;
  mlfab__server_run *runs; /* by file and address */
  uint32_t nblocks, block_room, nruns, run_room;
  uint32_t next;    /* the next run to tell; of a lost view, to renew */
  uint32_t ask;     /* number of its pull in the worker's count */
  uint64_t renewed; /* bytes from the first block of the next run on */
  int pinned, lost;
} mlfab__server_view;

struct mlfab__server_lending {
  mlfab__slab_areas slab;     /* of the blocks */
  mlfab__server_view *places; /* MLFAB_VIEWS_MAX of each worker */
  uint32_t nplaces;
  uint32_t views, lost; /* numbers of views that are out or lost; that are lost */
  struct mlfab__server_retired *retired, *spare;
};

/* Attaches the group. Errors: MEMORY. share: call it before there is a model, whose blocks will then be in memory that
 * processes of the host share. */
MLFAB__INTERNAL int mlfab__views_attach(mlfab__server *server);
MLFAB__INTERNAL void mlfab__views_share(mlfab__server *server, const mlfab__shm_memory_table *on,
                                        mlfab__shm_memory *memory);
/* Frees a store, except blocks with references from outside: unref, then free them. There are no holders. */
MLFAB__INTERNAL void mlfab__views_keep(mlfab__env *env, mlfab__store *store);

#endif
