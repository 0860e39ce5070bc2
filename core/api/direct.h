/* direct.h - collectives of device memory from device to device (mlfab_device.h). */
#ifndef MLFAB__DIRECT_H
#define MLFAB__DIRECT_H

#include "context.h"
#include "direct_table.h"

struct mlfab__direct_host;

/* mlfab_device_share in steps: begin, poll until it returns 1, then end, which gives the result. All need the lock. */
typedef struct mlfab__direct_share {
  enum { MLFAB__SHARE_LISTS, MLFAB__SHARE_LOOKS, MLFAB__SHARE_COUNTS, MLFAB__SHARE_OVER } state;
  int code;
  uint64_t timeout_ns;
  struct mlfab__direct_host *list; /* by rank: words of the first meeting */
  int64_t agree;                   /* word of the second meeting */
  mlfab_request request;           /* of a meeting under way */
  uint64_t serial;                 /* of the first meeting's call */
  int32_t busy;                    /* the worker with a device that may still use others' memory */
  uint32_t epoch;
} mlfab__direct_share;

MLFAB__INTERNAL int mlfab__direct_share_begin(mlfab *ctx, mlfab__direct_share *a, uint64_t least,
                                              uint64_t timeout_ns);
MLFAB__INTERNAL int mlfab__direct_share_poll(mlfab *ctx, void *share);
MLFAB__INTERNAL int mlfab__direct_share_end(mlfab *ctx, mlfab__direct_share *a, int *shared_p);

#endif
