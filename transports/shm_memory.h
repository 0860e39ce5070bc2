/* shm_memory.h - memory for other processes of the host, used by transport and collectives: core/base/shm_memory.h. */
#ifndef MLFAB__SHM_MEMORY_FILE_H
#define MLFAB__SHM_MEMORY_FILE_H

#include "../core/base/shm_memory.h"
#include "shm_file.h"

enum {
  MLFAB__SHM_LINE = 64,  /* a rest of a page shorter than this belongs to the bytes before it */
  MLFAB__SHM_FILES = 256 /* maximum files of a memory */
};

/* The place of bytes that others may map. */
typedef struct mlfab__shm_span {
  uint64_t number; /* of the file, from 1 */
  uint64_t offset; /* of the bytes, in the file */
  uint64_t file_bytes;
  int fd;
  int alone; /* 1: their pages hold nothing else of the caller's (M3) */
} mlfab__shm_span;

/* Called before the file with this number is closed, with the lock. */
typedef void (*mlfab__shm_gone_fn)(void *user, uint64_t number);

#if MLFAB_WITH_SHM /* otherwise unused */
/* Finds the place of `bytes` at `at`. Returns 1, or 0: not in one file. The span stays valid while the bytes are lent,
 * or while the caller has the lock. From any thread. look: with the lock. */
MLFAB__INTERNAL int mlfab__shm_memory_find(mlfab__shm_memory *memory, const void *at,
                                           uint64_t bytes, mlfab__shm_span *span_p);
MLFAB__INTERNAL int mlfab__shm_memory_look(const mlfab__shm_memory *memory, const void *at,
                                           uint64_t bytes, mlfab__shm_span *span_p);
MLFAB__INTERNAL void mlfab__shm_memory_lock(mlfab__shm_memory *memory);
MLFAB__INTERNAL void mlfab__shm_memory_unlock(mlfab__shm_memory *memory);
/* As in the table. From any thread. */
MLFAB__INTERNAL int mlfab__shm_memory_renew(mlfab__shm_memory *memory, const void *at,
                                            uint64_t bytes);
/* Is there a file with this number? */
MLFAB__INTERNAL int mlfab__shm_memory_has(mlfab__shm_memory *memory, uint64_t number);
/* Sets the function that is told of closed files: one at a time; NULL: none. */
MLFAB__INTERNAL void mlfab__shm_memory_watch(mlfab__shm_memory *memory, mlfab__shm_gone_fn gone,
                                             void *user);
/* map: maps another process's file, sealed against shrinking, with this number there; or NULL. unmap: ends that hold.
 * memory may be NULL. */
MLFAB__INTERNAL const uint8_t *mlfab__shm_memory_map(mlfab__shm_memory *memory, int fd,
                                                     uint64_t bytes, uint64_t number);
MLFAB__INTERNAL void mlfab__shm_memory_unmap(mlfab__shm_memory *memory, const uint8_t *at,
                                             uint64_t bytes);
#endif

#endif
