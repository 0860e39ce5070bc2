/* shm_file.h - memfds that processes of one host share, for the transport and for collectives. */
#ifndef MLFAB__SHM_FILE_H
#define MLFAB__SHM_FILE_H

#include "../core/base/base.h"

/* From linux/futex.h, which is missing where the kernel's headers are not installed. */
enum { MLFAB__FUTEX_WAIT = 0, MLFAB__FUTEX_WAKE = 1 };

#if MLFAB_WITH_SHM /* otherwise unused */
/* A memfd of `bytes`, sealed against shrinking and growing, and with `seals`; -1 with errno. EFBIG if it
 * would raise SIGXFSZ (ulimit -f). */
MLFAB__INTERNAL int mlfab__shm_file(const char *name, uint64_t bytes, int seals);
#endif

#endif
