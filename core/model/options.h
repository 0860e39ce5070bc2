/* options.h - names of the kinds of optimizers and of consistency. Layer 3. */
#ifndef MLFAB__OPTIONS_H
#define MLFAB__OPTIONS_H

#include "../base/base.h"

/* The name, for instance "adam" and "ssp"; "unknown" for an invalid kind. */
MLFAB__INTERNAL const char *mlfab__optimizer_name(uint32_t kind);
MLFAB__INTERNAL const char *mlfab__sync_name(uint32_t kind);

#endif
