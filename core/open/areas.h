/* areas.h - memory of a context that other processes of the host may map. */
#ifndef MLFAB__AREAS_H
#define MLFAB__AREAS_H

#include "../api/context.h"

/* NULL when MLFAB_WITH_SHM is 0. */
MLFAB__INTERNAL const mlfab__context_areas *mlfab__areas_functions(void);

#endif
