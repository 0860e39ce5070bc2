/* clock_copy.h - the server role: clocks as records, for slices that move, checkpoints and replicas. */
#ifndef MLFAB__CLOCK_COPY_H
#define MLFAB__CLOCK_COPY_H

#include "server.h"

/* Describes a clock for the server that gets some of its slices. `words` has room for
 * MLFAB__RESHARD_SERVER_WORDS_MAX; its bits are the workers in the open round. */
MLFAB__INTERNAL void mlfab__clock_told(const mlfab__server *server, uint32_t g,
                                       mlfab__clock_record *out, uint32_t *words);
/* Sets the bits of the workers that iterations wait for, and clears those of all others. */
MLFAB__INTERNAL void mlfab__clock_counted(const mlfab__server *server, uint32_t *words);
/* Does `in`, the clock of arriving slices, have the same state as `clock`, so that the two can be merged? */
MLFAB__INTERNAL int mlfab__clock_joins(const mlfab__server *server,
                                       const mlfab__clock_record *clock,
                                       const uint32_t *clock_words, const mlfab__clock_record *in,
                                       const uint32_t *words);
/* The clock here that arriving slices of clock `in` can use, or MLFAB__CLOCKS. */
MLFAB__INTERNAL uint32_t mlfab__clock_match(const mlfab__server *server,
                                            const mlfab__clock_record *in, const uint32_t *words);
/* The same, but creates a clock if there is none and there is room for one. */
MLFAB__INTERNAL uint32_t mlfab__clock_adopt(mlfab__server *server, const mlfab__clock_record *in,
                                            const uint32_t *words);

/* The same for a stored clock. The first one replaces the clock of a new model. */
MLFAB__INTERNAL uint32_t mlfab__clock_restore(mlfab__server *server, int first,
                                              const mlfab__clock_record *in, const uint32_t *words);

/* The clocks of the server that this one is a copy of, with its contributors (nwords of `words` each), replace all
 * that are here. There are no delayed pulls. */
MLFAB__INTERNAL void mlfab__clock_mirror(mlfab__server *server, const mlfab__clock_record *clocks,
                                         uint32_t n, const uint32_t *words);

#endif
