/* view.h - the worker role: views, that is pulls which are read in the servers' memory. See view.c. */
#ifndef MLFAB__VIEW_H
#define MLFAB__VIEW_H

#include "../base/shm_memory.h"
#include "../worker/worker.h"

/* Bytes of a view. */
typedef struct mlfab__worker_run {
  uint64_t offset, bytes; /* in the model */
  const uint8_t *at;
  const uint8_t *held; /* at a frame's first run: the held memory of the frame; else NULL */
  uint32_t server;     /* server that has told it */
} mlfab__worker_run;

typedef struct mlfab__worker_view {
  uint8_t used, all;
  uint8_t copied;   /* 1: it is pulled into memory of its own */
  uint64_t request; /* once it is out */
  mlfab_view *out;  /* until then */
  uint32_t *asks;   /* by server: number of questions; answers to earlier questions are void */
  mlfab__worker_run *runs;
  uint32_t nruns, run_room, nparts, part_room;
  mlfab_view_part *parts;
  uint8_t *memory;
  uint64_t memory_bytes;
} mlfab__worker_view;

struct mlfab__worker_views {
  const mlfab__shm_memory_table *shared; /* memory that processes of the host share, or NULL */
  mlfab__shm_memory *memory;
  mlfab__worker_view view[MLFAB_VIEWS_MAX];
};

/* Attaches the group. Errors: MEMORY. share: gives the memory for views; without it they are copies. */
MLFAB__INTERNAL int mlfab__view_attach(mlfab__worker *worker);
MLFAB__INTERNAL void mlfab__view_share(mlfab__worker *worker, const mlfab__shm_memory_table *on,
                                       mlfab__shm_memory *memory);
/* mlfab_pull_view: *out describes the view when the request has ended. */
MLFAB__INTERNAL int mlfab__worker_pull_view(mlfab__worker *worker, const mlfab_buf *bufs,
                                            uint32_t n, const mlfab_pull_options *options,
                                            mlfab_view *out, uint64_t now_ns,
                                            mlfab_request *request_p, mlfab_error *error);
/* mlfab_view_release. Errors: ARGUMENT. */
MLFAB__INTERNAL int mlfab__worker_view_release(mlfab__worker *worker, uint64_t id,
                                               const void *parts, mlfab_error *error);

#endif
