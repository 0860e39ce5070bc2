/* env.h - the hooks a node was given: memory, log, and error records. */
#ifndef MLFAB__ENV_H
#define MLFAB__ENV_H

#include "text.h"

/* A node's hooks, with counters of memory use. */
typedef struct mlfab__env {
  mlfab_env hooks;      /* complete: mlfab__env_init sets defaults (store may be NULL) */
  uint64_t allocations; /* number of calls of allocate */
  uint64_t bytes;       /* allocated now */
} mlfab__env;

/* `given` may be NULL, and may have an older size. allocate and release default to malloc and free; clock
 * and log stay NULL (the context sets the clock). Errors: CONFIG when only one of allocate and release is
 * set. */
MLFAB__INTERNAL int mlfab__env_init(mlfab__env *env, const mlfab_env *given);

/* Zeroed memory or NULL; 0 bytes give NULL. Pass the same size to free. */
MLFAB__INTERNAL void *mlfab__alloc(mlfab__env *env, size_t bytes);
/* count * size with the overflow checked. */
MLFAB__INTERNAL void *mlfab__alloc_array(mlfab__env *env, size_t count, size_t size);
MLFAB__INTERNAL void mlfab__free(mlfab__env *env, void *memory, size_t bytes);
/* Room for `need` elements: `old` if *room_p suffices; else new memory, at least twice as large, with the
 * old contents (old is freed); or NULL, with old unchanged. */
MLFAB__INTERNAL void *mlfab__grow(mlfab__env *env, void *old, uint32_t *room_p, uint64_t need,
                                  size_t size);
/* The same, aligned to 64 bytes and not zeroed: for tensor bytes. */
MLFAB__INTERNAL void *mlfab__alloc_aligned(mlfab__env *env, size_t bytes);
MLFAB__INTERNAL void mlfab__free_aligned(mlfab__env *env, void *memory, size_t bytes);

/* Fills *error and returns code. `error` may be NULL. */
MLFAB__INTERNAL int mlfab__error(mlfab_error *error, int code, int32_t rank, int is_server,
                                 uint64_t waited_ns, const char *format, ...) MLFAB__PRINTF(6, 7);
/* The same for an error that has neither a rank to blame nor a time of waiting. */
#define MLFAB__FAIL(error, code, ...) mlfab__error(error, code, MLFAB_NO_RANK, 0, 0, __VA_ARGS__)
MLFAB__INTERNAL void mlfab__log(const mlfab__env *env, int level, const char *format, ...)
    MLFAB__PRINTF(3, 4);
/* A readable duration: "350 ms", "2.5 s". Returns buffer. */
MLFAB__INTERNAL const char *mlfab__duration(char buffer[24], uint64_t ns);

#endif
