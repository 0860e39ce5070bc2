/* comm_object.h - the communicator: objects, which are partial reductions, stochastic reductions and task graphs of
 * the user's. Layer 4.
 *
 *    added --mlfab__comm_object_open: a plain call that opens it begins--> has a channel --closed--> removed, freed
 *
 * An object stands in a struct of its user's, which is `self`. Its id is this worker's own. Its channel is the same on
 * all workers: as many openings have begun here as elsewhere, and server 0 levels the count with every epoch. */
#ifndef MLFAB__COMM_OBJECT_H
#define MLFAB__COMM_OBJECT_H

#include "coll_wire.h"

enum { MLFAB__COMM_OBJECTS = 16 };

/* The cookie of what an object sends by the streams itself; those of runs are even. */
#define MLFAB__COMM_COOKIE(id) ((uint64_t)(id) << 1 | 1)

struct mlfab__comm;

/* What an object is; static. Functions that are NULL do nothing. */
typedef struct mlfab__comm_kind {
  const char *what;    /* "a partial reduction" */
  const char *opening; /* "the opening of a partial reduction" */
  const char *counts;  /* what it counts: "round" */
  const char *absent;  /* what a rank has done that is not in a round: "has not called it" */
  uint8_t
      ahead; /* it arms runs before anybody calls them: a READY does not tell that somebody has, nor do
                    frames of run 0, which `begin` arms */
  /* A frame of this channel that is not an armed run's, which consumes it
   * (mlfab__stream_consumed). NULL where there are only runs: early frames are then kept. */
  void (*frame)(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                uint32_t bytes);
  void (*given_back)(void *self); /* a message of its cookie is acknowledged */
  /* begin: an epoch stands (members may be others), or the object's opening has begun in one that
   * stands. over: an epoch is over; its runs have been told. */
  void (*begin)(void *self);
  void (*over)(void *self);
  /* May plain calls that are its own (comm_call.of) begin? It may fill their buffers then. If it
   * says no, it calls mlfab__comm_go_on later. NULL: always. */
  int (*stands)(void *self);
  /* The rank that its open request waits for, as far as this worker knows, or MLFAB_NO_RANK; and why,
   * where that is not "is awaited". The number of what it waits for. */
  int32_t (*awaited)(void *self, uint64_t *number_p, const char **why_p);
  /* Has this worker called `number`, as far as others wait for it? NULL: yes. */
  int (*called)(void *self, uint64_t number);
  void (*free_self)(void *self);
} mlfab__comm_kind;

typedef struct mlfab__comm_object {
  const mlfab__comm_kind *kind;
  void *self;
  struct mlfab__comm_object *next; /* of those to be freed */
  uint32_t id;                     /* 0: it is not there */
  uint32_t channel;                /* 0: not yet */
  mlfab_request opening;           /* the call that opens it */
  uint8_t
      closing; /* the user has closed it, but others still get bytes of it; the object keeps it */
  uint64_t waits_for; /* without runs: which number its open request is; the object keeps it */
  uint64_t upto;      /* above the numbers of all runs that were armed in this epoch */
  uint64_t stuck_ns;  /* when this worker last told server 0 that a request is open for long */
  int32_t missing;    /* who server 0 says has not called */
} mlfab__comm_object;

/* An object that this worker has closed. */
typedef struct mlfab__comm_closed {
  uint32_t channel;
  uint8_t ahead;
  uint64_t upto;
} mlfab__comm_closed;

/* Gives the object an id; it takes no part in anything before the call that opens it (comm_call.opens). It stays where
 * it is until it is removed. Errors: LIMIT (MLFAB__COMM_OBJECTS are open). */
MLFAB__INTERNAL int mlfab__comm_object_add(struct mlfab__comm *comm, mlfab__comm_object *object,
                                           const mlfab__comm_kind *kind, void *self,
                                           mlfab_error *error);
/* Adds it, and begins the call that opens it: all workers open it, with the same salt, or nobody does. Errors: of
 * mlfab__comm_object_add and mlfab__comm_start; it is then not there. */
MLFAB__INTERNAL int mlfab__comm_object_open(struct mlfab__comm *comm, mlfab__comm_object *object,
                                            const mlfab__comm_kind *kind, void *self, uint64_t salt,
                                            uint64_t timeout_ns, uint64_t now_ns,
                                            mlfab_request *request_p, mlfab_error *error);
/* Opens a request of an object. Errors: AGAIN. */
MLFAB__INTERNAL int mlfab__comm_object_request(struct mlfab__comm *comm,
                                               const mlfab__comm_object *object,
                                               uint64_t timeout_ns, uint64_t now_ns,
                                               mlfab_request *request_p, mlfab_error *error);
/* `self` of the object of this kind and number that is not closed, or NULL, which `error` tells. */
MLFAB__INTERNAL void *mlfab__comm_object_get(struct mlfab__comm *comm, const mlfab__comm_kind *kind,
                                             uint32_t id, mlfab_error *error);
/* Closes it here. Where a round of it has begun elsewhere, or begins later, that is a failure
 * (PEER_CLOSED). bury: also has free_self called as soon as no link can hold memory of it. */
MLFAB__INTERNAL void mlfab__comm_object_remove(struct mlfab__comm *comm,
                                               mlfab__comm_object *object);
MLFAB__INTERNAL void mlfab__comm_object_bury(struct mlfab__comm *comm, mlfab__comm_object *object);

#endif
