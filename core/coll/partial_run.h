/* partial_run.h - partial reductions over the communicator. The protocol: partial_run.c. */
#ifndef MLFAB__PARTIAL_RUN_H
#define MLFAB__PARTIAL_RUN_H

#include "comm.h"
#include "../../mlfab_partial.h"

enum { MLFAB__PARTIAL_RUN_QUEUE_MAX = 1 << 16 };

typedef struct mlfab__partial_run mlfab__partial_run; /* partial_run.c */

/* Opens a partial reduction; it is open for all when the request has ended with 0. After another end the caller must
 * close it. Errors: those of mlfab_partial_open. */
MLFAB__INTERNAL int mlfab__partial_run_open(mlfab__comm *comm, uint64_t count, int dtype,
                                            const mlfab_partial_options *options,
                                            uint64_t timeout_ns, uint64_t now_ns, uint32_t *id_p,
                                            mlfab_request *request_p, mlfab_error *error);
/* Begins a step. data and info_p (or NULL) are borrowed until the request has ended, which may be at once. */
MLFAB__INTERNAL int mlfab__partial_run_start(mlfab__comm *comm, uint32_t id, void *data,
                                             uint64_t timeout_ns, uint64_t now_ns,
                                             mlfab_partial_info *info_p, mlfab_request *request_p,
                                             mlfab_error *error);
/* Returns the bytes of the object's buffer, 0 if none with this number is open; and those of an element. */
MLFAB__INTERNAL uint64_t mlfab__partial_run_bytes(mlfab__comm *comm, uint32_t id,
                                                  uint32_t *width_p);
/* Like mlfab_partial_flush. */
MLFAB__INTERNAL int mlfab__partial_run_flush(mlfab__comm *comm, uint32_t id, void *data,
                                             uint64_t timeout_ns, uint64_t now_ns,
                                             mlfab_request *request_p, mlfab_error *error);
/* Closes it. Errors: STATE (a step or a flush is under way). */
MLFAB__INTERNAL int mlfab__partial_run_close(mlfab__comm *comm, uint32_t id, mlfab_error *error);

#endif
