/* request.h - requests: what a caller waits for. Layer 1.
 *
 * A request is open until it is finished by what it waits for, by its deadline or by cancel; it
 * keeps its entry until the caller ends it with test or wait. Handles are never reused. */
#ifndef MLFAB__REQUEST_H
#define MLFAB__REQUEST_H

#include "env.h"

enum mlfab__request_kind {
  MLFAB__REQUEST_FREE,
  MLFAB__REQUEST_PUSH,
  MLFAB__REQUEST_PULL,
  MLFAB__REQUEST_MODEL,
  MLFAB__REQUEST_BARRIER,
  MLFAB__REQUEST_BROADCAST,
  MLFAB__REQUEST_JOIN,
  MLFAB__REQUEST_ALLREDUCE,
  MLFAB__REQUEST_SYNC,
  MLFAB__REQUEST_RESLICE,
  MLFAB__REQUEST_COLLECTIVE
};

enum { MLFAB__REQUESTS = 64 }; /* open at once */

typedef struct mlfab__request {
  mlfab_request id;
  uint8_t kind; /* enum mlfab__request_kind */
  uint8_t done;
  uint32_t slot; /* of the role that serves it */
  uint64_t started_ns, deadline_ns;
  mlfab_result result;
} mlfab__request;

typedef struct mlfab__requests {
  mlfab__request entries[MLFAB__REQUESTS];
  uint64_t count;     /* handles given out */
  uint64_t used;      /* bit i: entry i is in use */
  uint32_t open;      /* entries in use */
  uint64_t earliest;  /* no open request has an earlier deadline; MLFAB__NEVER when none can have */
  mlfab_error last;   /* the last error, in full */
  int abandoned_code; /* first failure of a push that nobody waits for */
} mlfab__requests;

/* An entry, or NULL when all are in use. timeout_ns 0 is no deadline. */
MLFAB__INTERNAL mlfab__request *mlfab__request_open(mlfab__requests *table, int kind, uint32_t slot,
                                                    uint64_t now_ns, uint64_t timeout_ns);
/* The entry of a handle, or NULL. */
MLFAB__INTERNAL mlfab__request *mlfab__request_find(mlfab__requests *table, mlfab_request id);
/* Finishes it with a status; with an error, `format` tells it in full. */
MLFAB__INTERNAL void mlfab__request_finish(mlfab__requests *table, mlfab__request *request,
                                           int status, int32_t rank, int is_server, uint64_t now_ns,
                                           const char *format, ...) MLFAB__PRINTF(7, 8);
MLFAB__INTERNAL void mlfab__request_end(mlfab__requests *table, mlfab__request *request);
/* Walks the entries in use: the first at `from` or behind it, or NULL. */
MLFAB__INTERNAL mlfab__request *mlfab__request_next(mlfab__requests *table, uint32_t from);
/* Sets `earliest` to the earliest deadline of a request that is not done. */
MLFAB__INTERNAL void mlfab__request_schedule(mlfab__requests *table);

#endif
