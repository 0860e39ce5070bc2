/* shm_file.h - memory that processes of one host share: common part of the transport and collectives. */
#ifndef MLFAB__SHM_FILE_H
#define MLFAB__SHM_FILE_H

#include "../core/base/base.h"

/* From linux/futex.h, which is missing on systems without the kernel's headers. */
enum { MLFAB__FUTEX_WAIT = 0, MLFAB__FUTEX_WAKE = 1 };

#if MLFAB_WITH_SHM /* otherwise unused */
/* A memfd of `bytes`, sealed against shrinking and growing, and with `seals`; -1 with errno. EFBIG if it
 * would raise SIGXFSZ (ulimit -f). */
MLFAB__INTERNAL int mlfab__shm_file(const char *name, uint64_t bytes, int seals);
/* Is it a memfd of this size, sealed against shrinking and growing? Ask before mapping a peer's descriptor: an access behind the
 * end of its file would kill this process. */
MLFAB__INTERNAL int mlfab__shm_sealed(int fd, uint64_t bytes);
/* Maps a file from `from` on, at `at` (anywhere if NULL). NULL on failure. A forked child does not inherit the mapping:
 * its writes would reach the other processes. */
MLFAB__INTERNAL void *mlfab__shm_map(void *at, uint64_t bytes, int protection, int fd,
                                     uint64_t from);
#endif

#endif
