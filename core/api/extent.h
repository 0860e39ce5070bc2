/* extent.h - the buffers of a call, for code that visits them. */
#ifndef MLFAB__EXTENT_H
#define MLFAB__EXTENT_H

#include "calls.h"

/* A buffer of a call: memory of the caller that the library borrows. The call reads the first of the two stretches;
 * after success it has written the second. */
typedef struct mlfab__extent {
  const void *at;
  uint64_t bytes;
  uint64_t in, in_bytes, out, out_bytes;
  uint32_t align; /* bytes of an element */
} mlfab__extent;
enum { MLFAB__EXTENT_IN = 1, MLFAB__EXTENT_OUT = 2 };

/* Visits the buffers of a call (visit.c). If a buffer gets another address, the visit writes it into the call and its lists. */
struct mlfab__call_visit {
  /* Returns the new address of a buffer that is read, written or both (MLFAB__EXTENT_*), as a whole. NULL stays. */
  void *(*extent)(const mlfab__call_in *in, const void *at, uint64_t bytes, uint32_t align,
                  int ways);
  /* The same for the member `data` of the call. */
  void (*data)(const mlfab__call_in *in, const mlfab__extent *extent);
  /* The bytes of an element of this tensor; 0: there is no such tensor. */
  uint32_t (*width)(const mlfab__call_in *in, uint32_t tensor);
  /* Gets a buffer, and returns its new address. */
  void *(*fn)(void *user, const mlfab__extent *extent);
  void *user;
};

#endif
