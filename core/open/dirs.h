/* dirs.h - directories that a configuration names, for votes and for checkpoints. */
#ifndef MLFAB__DIRS_H
#define MLFAB__DIRS_H

#include "../base/env.h"
#include "../base/text.h"
#include "../wire/wire.h"

/* Checks that they can be used. asks: the process asks for a number, and makes no checkpoint. *doubt_p: an errno to
 * log. Errors: IO, CONFIG. */
MLFAB__INTERNAL int mlfab__dirs_check(const mlfab_config *config, int asks, int *doubt_p,
                                      mlfab_error *error);

#endif
