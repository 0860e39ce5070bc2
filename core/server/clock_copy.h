/* clock_copy.h - the server role: its clock as a record, for slices that move, checkpoints and replicas. */
#ifndef MLFAB__CLOCK_COPY_H
#define MLFAB__CLOCK_COPY_H

#include "server.h"

/* Describes the clock. `words` has room for MLFAB__RESHARD_SERVER_WORDS_MAX; its bits are the workers in the open round. */
MLFAB__INTERNAL void mlfab__clock_told(const mlfab__server *server, mlfab__clock_record *out,
                                       uint32_t *words);
/* Takes over a clock whose model was checked (mlfab__clock_follows), and forgets changes that wait. There are no delayed pulls. */
MLFAB__INTERNAL void mlfab__clock_take(mlfab__server *server, const mlfab__clock_record *in,
                                       const uint32_t *words);
/* Sets the bits of the workers that iterations wait for, and clears those of all others. */
MLFAB__INTERNAL void mlfab__clock_counted(const mlfab__server *server, uint32_t *words);
/* Adds the workers of another server's open round, which is the same round of the same model. */
MLFAB__INTERNAL void mlfab__clock_unite(mlfab__server *server, const mlfab__clock_record *in,
                                        const uint32_t *words);
/* Sets the bits of the workers whose update of the open round was decided here, and is not in the sum: it was refused. */
MLFAB__INTERNAL void mlfab__clock_holes(const mlfab__server *server, uint32_t *words);
/* A number of the model, its round, and these bits of workers: servers with the same number can go on with sums of each other.
 * But if the optimizer steps with the scale of a sum, the scales of two sums must be the same. 0: no such sum. */
MLFAB__INTERNAL uint64_t mlfab__clock_round(const mlfab__clock_record *clock,
                                            const uint32_t *words);
MLFAB__INTERNAL double mlfab__clock_scale(const mlfab__server *server,
                                          const mlfab__clock_record *clock);
/* Applies the open round as it is, in one long step. V_train stays. Errors: MEMORY, CALLBACK; the round is refused then. */
MLFAB__INTERNAL int mlfab__clock_flush(mlfab__server *server);

#endif
