/* sparse_push.h - the worker role: updates that are sent as packets. See sparse_push.c. */
#ifndef MLFAB__SPARSE_PUSH_H
#define MLFAB__SPARSE_PUSH_H

#include "../worker/worker.h"

/* Pushes a sparse update of one tensor; copies it. */
MLFAB__INTERNAL int mlfab__worker_push_sparse(mlfab__worker *worker, uint32_t tensor,
                                              const uint64_t *indices, const void *values,
                                              uint64_t count, const mlfab_push_options *options,
                                              uint64_t now_ns, mlfab_request *request_p,
                                              mlfab_error *error);
/* Sets the filter of a tensor, or of all; NULL: removes it. */
MLFAB__INTERNAL int mlfab__worker_set_filter(mlfab__worker *worker, uint32_t tensor,
                                             const mlfab_filter *filter, mlfab_error *error);

/* Attaches the group: the worker then accepts packets. */
MLFAB__INTERNAL void mlfab__sparse_worker_attach(mlfab__worker *worker);

#endif
