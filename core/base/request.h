/* request.h - requests: the calls that a caller waits for.
 *
 * A request is open until its operation, its deadline or a cancel finishes it. It keeps its entry until the
 * caller ends it with test or wait. Handles are never reused.
 *
 * A failed request keeps its error in place of the awaited rank until it is ended: others may fail meanwhile.
 *
 * Entries are in blocks; the first block is in the table, and most programs need no other. An entry never
 * moves. `slot` tells which role serves the request. Buckets by slot avoid a scan of all requests.
 *
 * Blame. A request stores which rank it awaits. A server reports that rank while it cannot answer (frame WAITING). The
 * role that serves the request reports it when the request is withdrawn. request.c composes the texts of all deadlines
 * from that.
 *
 * Invariants. (1) An id is an ascending number times MLFAB__REQUESTS, plus the entry's place. (2) Places
 * from `room` on were never used; those below are in the free list, or in use and in the list of their
 * bucket. */
#ifndef MLFAB__REQUEST_H
#define MLFAB__REQUEST_H

#include "env.h"

enum mlfab__request_kind {
  MLFAB__REQUEST_FREE,
  MLFAB__REQUEST_PUSH,
  MLFAB__REQUEST_PULL,
  MLFAB__REQUEST_MODEL,
  MLFAB__REQUEST_BARRIER,
  MLFAB__REQUEST_JOIN,
  MLFAB__REQUEST_SYNC,
  MLFAB__REQUEST_RESLICE,
  MLFAB__REQUEST_COLLECTIVE,
  MLFAB__REQUEST_CHECKPOINT
};

enum {
  MLFAB__REQUESTS = 1024, /* open at once */
  MLFAB__REQUEST_BLOCK = 16,
  MLFAB__REQUEST_BLOCKS = MLFAB__REQUESTS / MLFAB__REQUEST_BLOCK,
  MLFAB__REQUEST_BUCKETS = 64
};

/* An open request: the rank that it awaits. A failed request: the rest of its error. */
typedef struct mlfab__blame {
  int32_t rank; /* MLFAB_NO_RANK: not known */
  uint8_t is_server;
  uint8_t in_doubt; /* if it is withdrawn, it ends with IN_DOUBT */
  uint32_t by;      /* the server that reported it (WAITING) */
  /* Open: follows the name, as in " to apply it", ", which has not defined the model". Failed: the error. */
  char text[sizeof((mlfab_error *)0)->text];
} mlfab__blame;

typedef struct mlfab__request {
  mlfab_request id;
  uint8_t kind; /* enum mlfab__request_kind */
  uint8_t done;
  uint8_t watched; /* a completion callback is due when it is done */
  uint32_t slot;   /* the role that serves it */
  uint32_t place;
  struct mlfab__request *next, *previous; /* of its bucket; if free: next is the next free entry */
  uint64_t started_ns, deadline_ns;
  mlfab_result result;
  mlfab__blame blame;
} mlfab__request;

/* All zeros is an empty table. */
typedef struct mlfab__requests {
  mlfab__env *env;     /* allocates further blocks; NULL: no further blocks */
  uint64_t timeout_ns; /* of calls without a timeout of their own; 0: no deadline */
  mlfab__request first[MLFAB__REQUEST_BLOCK];
  mlfab__request *blocks[MLFAB__REQUEST_BLOCKS]; /* [0] is `first`, once a request was open */
  mlfab__request *buckets[MLFAB__REQUEST_BUCKETS];
  mlfab__request *free;
  uint32_t room;
  uint64_t count;    /* handles issued */
  uint32_t open;     /* entries in use */
  uint32_t to_tell;  /* watched requests that are done */
  uint64_t earliest; /* lower bound of the open requests' deadlines; MLFAB__NEVER: none */
  /* The last error, in full. `reserved` 1: it came from a request, and no call has recalled it yet; or a thread has
   * taken it (context.c). */
  mlfab_error last;
  mlfab_error abandoned; /* first failure of a push without a waiter; code 0: none */
} mlfab__requests;

/* The name of the call of this kind (in use): "push". Static. */
MLFAB__INTERNAL const char *mlfab__request_call(int kind);
MLFAB__INTERNAL void mlfab__requests_free(mlfab__requests *table);
/* Makes room for one more request of this kind, so that open succeeds. Errors: AGAIN (all are in use), MEMORY. */
MLFAB__INTERNAL int mlfab__request_room(mlfab__requests *table, int kind, mlfab_error *error);
/* An entry, or NULL when there is no room. timeout_ns 0: the table's. */
MLFAB__INTERNAL mlfab__request *mlfab__request_open(mlfab__requests *table, int kind, uint32_t slot,
                                                    uint64_t now_ns, uint64_t timeout_ns);
/* The entry of a handle, or NULL. */
MLFAB__INTERNAL mlfab__request *mlfab__request_find(mlfab__requests *table, mlfab_request id);
/* Finishes a request with a status; `format` is the full text of an error, which becomes the last error. Does nothing
 * if the request is NULL or done. */
MLFAB__INTERNAL void mlfab__request_finish(mlfab__requests *table, mlfab__request *request,
                                           int status, int32_t rank, int is_server, uint64_t now_ns,
                                           const char *format, ...) MLFAB__PRINTF(7, 8);
/* Makes the error of a failed request the last error again. */
MLFAB__INTERNAL void mlfab__request_recall(mlfab__requests *table, const mlfab__request *request);
/* Finishes a request: with success (succeed), or because this server is dead (dead). */
MLFAB__INTERNAL void mlfab__request_succeed(mlfab__requests *table, mlfab__request *request,
                                            uint64_t now_ns);
MLFAB__INTERNAL void mlfab__request_dead(mlfab__requests *table, mlfab__request *request,
                                         uint32_t server, uint64_t now_ns);
/* Records the rank that it awaits; the text (format) tells the reason. */
MLFAB__INTERNAL void mlfab__request_blame(mlfab__request *request, int32_t rank, int is_server,
                                          const char *format, ...) MLFAB__PRINTF(4, 5);
/* Server `by` reports that request `id` awaits this worker; id 0: all open requests of this kind and slot 0. */
MLFAB__INTERNAL void mlfab__request_told(mlfab__requests *table, int kind, mlfab_request id,
                                         uint32_t by, int32_t rank, const char *text);
/* Finishes a request that is withdrawn: its deadline passed (code TIMEOUT), or it is cancelled (CANCELLED). The text
 * names the call and the rank that it awaits. */
MLFAB__INTERNAL void mlfab__request_expire(mlfab__requests *table, mlfab__request *request,
                                           int code, uint64_t now_ns);
/* Called when a wait ends before its request: makes that the last error, which names the rank that the request awaits.
 * Returns TIMEOUT, or REQUEST when the request is not open. */
MLFAB__INTERNAL int mlfab__request_pending(mlfab__requests *table, mlfab_request id,
                                           uint64_t now_ns);
MLFAB__INTERNAL void mlfab__request_end(mlfab__requests *table, mlfab__request *request);
/* Iterates over the requests of this kind and slot that are not done: the next one after `after` (NULL: the
 * first), or NULL. */
MLFAB__INTERNAL mlfab__request *mlfab__request_of(mlfab__requests *table, int kind, uint32_t slot,
                                                  const mlfab__request *after);
/* Iterates over the requests that are not done and past their deadline: the first at or behind *place_p
 * (initially 0), or NULL; advances *place_p. After the last one `earliest` is exact again. */
MLFAB__INTERNAL mlfab__request *mlfab__request_due(mlfab__requests *table, uint64_t now_ns,
                                                   uint32_t *place_p);

#endif
