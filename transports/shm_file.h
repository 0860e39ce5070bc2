/* shm_file.h - files in memory that processes of one host share: of the transport, and of collectives. */
#ifndef MLFAB__SHM_FILE_H
#define MLFAB__SHM_FILE_H

#include "../core/base/base.h"

/* Of linux/futex.h, which C libraries without the kernel's headers do not find. */
enum { MLFAB__FUTEX_WAIT = 0, MLFAB__FUTEX_WAKE = 1 };

#if MLFAB_WITH_SHM /* or nobody calls it */
/* A nameless file of `bytes` in memory, sealed against shrinking, growing, and `seals` besides; -1 with
 * errno. What would raise SIGXFSZ (ulimit -f) is EFBIG. */
MLFAB__INTERNAL int mlfab__shm_file(const char *name, uint64_t bytes, int seals);
#endif

#endif
