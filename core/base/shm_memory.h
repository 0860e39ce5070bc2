/* shm_memory.h - memory of this process that other processes of the host may map. Layer 1.
 *
 * Declarations only: the code, which makes system calls, is in transports/shm_memory.c. A context has one such object, and gives
 * it to what shares memory: collectives (shm_coll.h) and the shared-memory transport, which sends references into it.
 *
 * An area is what `alloc` returned: whole pages. Its pages belong to files (memfds of sealed size), at first to one. Others map a
 * file; they find bytes by the file's number and an offset in it. Where one of them may still read or write bytes that its owner
 * is about to use otherwise, and cannot be asked (it is stopped, or slow, or cut off), the owner renews their pages: the same
 * addresses get the pages of a new file, with the same contents, and the others keep the old ones to themselves.
 *
 * Invariants:
 *   (M1) Pieces (stretches of addresses that belong to one file in one row) do not overlap. A page in no piece is private.
 *   (M2) A file's number is never used again. `gone` is called before its descriptor is closed.
 *   (M3) Bytes are lent to others only if their pages hold nothing else of the caller's (`alone`), because renewing copies whole
 *        pages, and another thread may write to what else is in them meanwhile; or if the area is guarded.
 *
 * A map is a file of another process, mapped for reading. The function that maps it takes the first hold; the last drop unmaps it.
 * Invariant: (M4) maps do not overlap areas, nor each other. */
#ifndef MLFAB__SHM_MEMORY_H
#define MLFAB__SHM_MEMORY_H

#include "env.h"

typedef struct mlfab__shm_memory mlfab__shm_memory;

typedef struct mlfab__shm_memory_table {
  /* NULL: out of memory. */
  mlfab__shm_memory *(*create)(mlfab__env *env);
  /* Frees all areas, too. NULL: does nothing. */
  void (*destroy)(mlfab__shm_memory **memory_p);
  /* An area of at least `bytes`, zeroed. guarded: only this context writes to it, while it is locked, so all of its pages may be
   * renewed at any time. NULL: there are no descriptors or no memory; use ordinary memory. */
  void *(*alloc)(mlfab__shm_memory *memory, uint64_t bytes, int guarded);
  /* Frees `area`, which alloc returned. emptied: also frees its pages where other processes still map them; they then read zeros. */
  void (*release)(mlfab__shm_memory *memory, void *area, int emptied);
  /* The number of the file that contains the byte at `at`, and how many bytes from there on it contains in one row; 0: no file
   * does. The answer is valid until pages of this area are renewed. */
  uint64_t (*file)(mlfab__shm_memory *memory, const void *at, uint64_t *bytes_p);
  /* Renews the pages of these bytes, as far as they are in areas. Without descriptors they become private; without memory some
   * stay as they are, and 0 is returned, else 1. */
  int (*renew)(mlfab__shm_memory *memory, const void *at, uint64_t bytes);
  /* hold: are these bytes in a file with this number (file) of another process that is mapped here, or of this one? 1: they stay
   * readable until `drop`, and [*from_p, *from_p + *bytes_p), which contains them, with them; 0: they are not. drop: `from`. */
  int (*hold)(mlfab__shm_memory *memory, const void *at, uint64_t bytes, uint64_t file,
              const uint8_t **from_p, uint64_t *bytes_p);
  void (*drop)(mlfab__shm_memory *memory, const void *from);
} mlfab__shm_memory_table;

/* NULL when MLFAB_WITH_SHM is 0. */
MLFAB__INTERNAL const mlfab__shm_memory_table *mlfab__shm_memory_functions(void);

#endif
