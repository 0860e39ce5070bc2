/* shm_memory.h - memory of this process that other processes of the host may map.
 *
 * Declarations only: the code, which makes system calls, is in transports/shm_memory.c. A context has one such object.
 * Its users: collectives (shm_coll.h), and the shared-memory transport, which sends references into it.
 *
 * An area is the whole pages that a call of `alloc` returned. Its pages belong to files (memfds of sealed size), at
 * first to one. Other processes map a file, and find bytes by the file's number and an offset in it. A stopped, slow or
 * cut off process may still read or write bytes, and cannot be asked. So the owner renews their pages before it uses
 * them otherwise: the same addresses get a new file's pages, with equal contents. The others keep the old pages.
 *
 * Invariants:
 *   (M1) Pieces (stretches of addresses that belong to one file in one row) do not overlap. A page in no piece is private.
 *   (M2) A file's number is never used again. `gone` is called before its descriptor is closed.
 *   (M3) Bytes are lent to others only if their pages hold nothing else of the caller's (`alone`), or if the area is
 *        guarded. Reason: renewing copies whole pages, and another thread may write to the rest of a page meanwhile.
 *
 * A map is a file of another process, mapped for reading. The function that maps it takes the first hold; the last drop unmaps it.
 * Invariant: (M4) maps overlap neither areas nor each other. */
#ifndef MLFAB__SHM_MEMORY_H
#define MLFAB__SHM_MEMORY_H

#include "env.h"

typedef struct mlfab__shm_memory mlfab__shm_memory;

typedef struct mlfab__shm_memory_table {
  /* NULL: out of memory. */
  mlfab__shm_memory *(*create)(mlfab__env *env);
  /* Frees all areas, too. NULL: does nothing. */
  void (*destroy)(mlfab__shm_memory **memory_p);
  /* An area of at least `bytes`, zeroed. guarded: only this context writes to it, while the context is locked; so all
   * pages of the area may be renewed at any time. NULL: out of descriptors or memory; use ordinary memory. */
  void *(*alloc)(mlfab__shm_memory *memory, uint64_t bytes, int guarded);
  /* Frees `area`, which alloc returned. emptied: also frees pages that others still map; they then read zeros. */
  void (*release)(mlfab__shm_memory *memory, void *area, int emptied);
  /* The number of the file that contains the byte at `at`; 0: no file does. *bytes_p: the length of the row of bytes
   * from `at` on that the file contains. The answer is valid until pages of this area are renewed. */
  uint64_t (*file)(mlfab__shm_memory *memory, const void *at, uint64_t *bytes_p);
  /* Renews the pages of these bytes, as far as they are in areas. Without descriptors the pages become private. Returns
   * 1; 0 if memory was lacking and some pages stay as they are. */
  int (*renew)(mlfab__shm_memory *memory, const void *at, uint64_t bytes);
  /* hold: are these bytes in the file with this number (file), either mapped here or of this process? 1: [*from_p,
   * *from_p + *bytes_p), which contains them, stays readable until `drop`; 0: they are not. drop: `from`. */
  int (*hold)(mlfab__shm_memory *memory, const void *at, uint64_t bytes, uint64_t file,
              const uint8_t **from_p, uint64_t *bytes_p);
  void (*drop)(mlfab__shm_memory *memory, const void *from);
} mlfab__shm_memory_table;

/* NULL when MLFAB_WITH_SHM is 0. */
MLFAB__INTERNAL const mlfab__shm_memory_table *mlfab__shm_memory_functions(void);

#endif
