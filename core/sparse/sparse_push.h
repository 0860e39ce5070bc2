/* sparse_push.h - the worker role: calls whose updates travel as packets. See sparse_push.c. */
#ifndef MLFAB__SPARSE_PUSH_H
#define MLFAB__SPARSE_PUSH_H

#include "../worker/worker.h"

/* A sparse update of one tensor: all of it is copied. */
MLFAB__INTERNAL int mlfab__worker_push_sparse(mlfab__worker *worker, uint32_t tensor,
                                              const uint64_t *indices, const void *values,
                                              uint64_t count, const mlfab_push_options *options,
                                              uint64_t now_ns, mlfab_request *request_p,
                                              mlfab_error *error);
/* The filter of a tensor, or of all; NULL: none from now on. */
MLFAB__INTERNAL int mlfab__worker_set_filter(mlfab__worker *worker, uint32_t tensor,
                                             const mlfab_filter *filter, mlfab_error *error);

/* From now on the worker reads packets. */
MLFAB__INTERNAL void mlfab__sparse_worker_attach(mlfab__worker *worker);

#endif
