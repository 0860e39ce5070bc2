/* lend_wire.h - the frames of views. See wire.h. */
#ifndef MLFAB__LEND_WIRE_H
#define MLFAB__LEND_WIRE_H

#include "../wire/wire.h"

/* server -> worker: the places of a view's bytes in the server's blocks. The blocks stay as they are until the worker's
 * PULL_CANCEL for this request. The bulk is some of these bytes, and `at` counts from its beginning, modulo 2^64. So
 * the worker can read a run only if the bulk came as a reference to the file of the run (base/shm_memory.h). */
typedef struct mlfab__view_run {
  uint64_t offset, bytes; /* in the flat model */
  uint64_t at;
} mlfab__view_run;
#define MLFAB__VIEW_RUNS_MAX 1024 /* of a frame */
#define MLFAB__VIEW_LEAST \
  32768u /* bytes of a bulk that a transport of one host refers to, if it can */

typedef struct mlfab__view {
  uint64_t request;
  uint64_t version; /* the largest of a slice */
  uint64_t file;    /* its number at the server */
  uint32_t ask;     /* epoch of the PULL: answers to earlier epochs are void */
  uint32_t flags;   /* MLFAB__MODEL_LAST */
  uint32_t runs;
  uint64_t oldest; /* the smallest version of a slice */
} mlfab__view;

/* When decoding, the list has room for VIEW_RUNS_MAX. */
MLFAB__WIRE_DECLARE_LIST(view, mlfab__view_run)

#endif
