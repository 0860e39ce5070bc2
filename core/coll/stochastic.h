/* stochastic.h - stochastic reductions over the communicator. The protocol: stochastic.c. */
#ifndef MLFAB__STOCHASTIC_H
#define MLFAB__STOCHASTIC_H

#include "comm.h"
#include "../../mlfab_partial.h"

typedef struct mlfab__stochastic mlfab__stochastic; /* stochastic.c */

/* Opens a stochastic reduction. It is open on all workers when the request ends with 0, and on none after an error.
 * Errors: those of mlfab_stochastic_open; mlfab__stochastic_state returns errors of the graph afterwards. */
MLFAB__INTERNAL int mlfab__stochastic_open(mlfab__comm *comm, uint64_t count, int dtype,
                                           const mlfab_stochastic_options *options,
                                           uint64_t timeout_ns, uint64_t now_ns, uint32_t *id_p,
                                           mlfab_request *request_p, mlfab_error *error);
/* Returns 0, or the reason why the workers of this epoch have no graph. */
MLFAB__INTERNAL int mlfab__stochastic_state(mlfab__comm *comm, uint32_t id, mlfab_error *error);
/* Returns the bytes of the object's buffer, 0 if none with this number is open; and those of an element. */
MLFAB__INTERNAL uint64_t mlfab__stochastic_bytes(mlfab__comm *comm, uint32_t id, uint32_t *width_p);
/* Begins an iteration. data and info_p (or NULL) are borrowed until the request has ended; after an error, data is as
 * before. */
MLFAB__INTERNAL int mlfab__stochastic_start(mlfab__comm *comm, uint32_t id, void *data,
                                            uint64_t timeout_ns, uint64_t now_ns,
                                            mlfab_stochastic_info *info_p, mlfab_request *request_p,
                                            mlfab_error *error);
/* Closes it. Errors: STATE (an iteration is under way). */
MLFAB__INTERNAL int mlfab__stochastic_close(mlfab__comm *comm, uint32_t id, mlfab_error *error);

#endif
