/* direct_table.h - the functions of direct.c for staging.c, if both are compiled in. */
#ifndef MLFAB__DIRECT_TABLE_H
#define MLFAB__DIRECT_TABLE_H

#include "context.h"
#include "../../mlfab_device.h"

/* The state of a collective that may go from device to device. */
enum mlfab__direct_told {
  MLFAB__DIRECT_WAITS, /* nothing has moved */
  MLFAB__DIRECT_MOVED,
  MLFAB__DIRECT_STAGED, /* it goes by the host, on all workers; no memory was written */
  MLFAB__DIRECT_OVER,   /* it has succeeded */
  MLFAB__DIRECT_FAILED  /* it has failed, and the other workers know */
};
typedef struct mlfab__direct_call mlfab__direct_call;

/* Collectives from device to device: direct.c, from mlfab_device_share on. The stager calls them; all need the lock. */
typedef struct mlfab__context_direct {
  /* Returns 1 for a call that the members have agreed on: all begin it by `begin`, whatever their memory. */
  int (*wants)(const mlfab *ctx, const mlfab_call *call);
  /* `call` is borrowed until `free`, and is made at its turn. NULL: out of memory. */
  mlfab__direct_call *(*begin)(mlfab *ctx, const mlfab_call *call, uint64_t deadline_ns);
  /* A value of enum mlfab__direct_told. turn: earlier calls have begun. *inner_p: the request of a meeting under way,
   * which ends by itself, or 0. */
  int (*step)(mlfab *ctx, mlfab__direct_call *c, int turn, mlfab_request *inner_p,
              mlfab_error *error);
  /* Returns 1 if the stream has come to it, and it does not go by the host. Then only calls with a number in the
   * communicator wait behind it. */
  int (*fenced)(const mlfab__direct_call *c);
  const char *(*why)(const mlfab__direct_call *c); /* the reason of its wait outside of meetings */
  /* Gives the call up. New work of the stream follows the work that this worker's device still does. */
  void (*leave)(mlfab *ctx, mlfab__direct_call *c);
  int (*quiet)(mlfab *ctx,
               mlfab__direct_call *c);   /* 1: this worker's device does no more work for it */
  void *(*fence)(mlfab__direct_call *c); /* hands over the fence before it, or NULL */
  void (*free)(mlfab *ctx, mlfab__direct_call *c, int child);
  /* Closes the context's shares, while the device is still there. */
  void (*close)(mlfab *ctx, int child);
} mlfab__context_direct;

#endif
