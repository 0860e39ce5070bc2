/* comm_object.h - the communicator: objects, which are partial reductions, stochastic reductions and task graphs of
 * the user's.
 *
 *    added --mlfab__comm_object_open: a plain call that opens it begins--> has a channel --closed--> removed, freed
 *
 * An object lives in a struct of its owner, which is `self`. Its id is this worker's own. Its channel is the same on
 * all workers: all have begun equally many openings, and server 0 levels this number in each epoch. */
#ifndef MLFAB__COMM_OBJECT_H
#define MLFAB__COMM_OBJECT_H

#include "coll_wire.h"

enum { MLFAB__COMM_OBJECTS = 16 };

/* The cookie of messages that an object itself sends by the streams; cookies of runs are even. */
#define MLFAB__COMM_COOKIE(id) ((uint64_t)(id) << 1 | 1)

struct mlfab__comm;

/* The kind of an object: names and functions; static. Functions that are NULL do nothing. */
typedef struct mlfab__comm_kind {
  const char *what;    /* "a partial reduction" */
  const char *opening; /* "the opening of a partial reduction" */
  const char *counts;  /* the unit that it counts: "round" */
  const char *absent;  /* a rank's state if it is missing in a round: "has not called it" */
  uint8_t
      ahead; /* 1: it arms runs before anybody calls them: then neither a READY proves a call, nor do
                    frames of run 0, which `begin` arms */
  /* Takes a frame of this channel that belongs to no armed run, and consumes it (mlfab__stream_consumed). NULL if there
   * are only runs: early frames are then kept. */
  void (*frame)(void *self, uint32_t member, const mlfab__coll *head, const void *bulk,
                uint32_t bytes);
  void (*given_back)(void *self); /* called when a message of its cookie is acknowledged */
  /* begin: an epoch stands (perhaps with other members), or the object's opening has begun in a standing epoch. over:
   * an epoch is over, and its runs know. */
  void (*begin)(void *self);
  void (*over)(void *self);
  /* May its own plain calls (comm_call.of) begin? It may fill their buffers then. After no, it calls mlfab__comm_go_on
   * later. NULL: always. */
  int (*stands)(void *self);
  /* Returns the rank that the open request awaits, as far as this worker knows, or MLFAB_NO_RANK. *why_p: a reason other
   * than "is awaited". *number_p: number of the awaited round. */
  int32_t (*awaited)(void *self, uint64_t *number_p, const char **why_p);
  /* Has this worker called `number`, as far as others wait for it? NULL: yes. */
  int (*called)(void *self, uint64_t number);
  void (*free_self)(void *self);
} mlfab__comm_kind;

typedef struct mlfab__comm_object {
  const mlfab__comm_kind *kind;
  void *self;
  struct mlfab__comm_object *next; /* list of those to be freed */
  uint32_t id;                     /* 0: not added */
  uint32_t channel;                /* 0: not yet */
  mlfab_request opening;           /* the call that opens it */
  uint8_t
      closing; /* the user has closed it, but others still get bytes of it; the object keeps it */
  uint64_t waits_for; /* without runs: number that its request awaits; the object keeps it */
  uint64_t upto;      /* above the numbers of all runs that were armed in this epoch */
  uint64_t stuck_ns;  /* when this worker last told server 0 that a request is open for long */
  int32_t missing;    /* the rank that, as server 0 reports, has not called */
} mlfab__comm_object;

/* An object that this worker has closed. */
typedef struct mlfab__comm_closed {
  uint32_t channel;
  uint8_t ahead;
  uint64_t upto;
} mlfab__comm_closed;

/* Gives the object an id; it is inactive before the call that opens it (comm_call.opens). It stays where it is until it
 * is removed. Errors: LIMIT (MLFAB__COMM_OBJECTS are open). */
MLFAB__INTERNAL int mlfab__comm_object_add(struct mlfab__comm *comm, mlfab__comm_object *object,
                                           const mlfab__comm_kind *kind, void *self,
                                           mlfab_error *error);
/* Adds it, and begins the call that opens it: all workers open it, with the same salt, or none does. Errors: of
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
/* Returns `self` of the open object of this kind and number, or NULL with a text in `error`. */
MLFAB__INTERNAL void *mlfab__comm_object_get(struct mlfab__comm *comm, const mlfab__comm_kind *kind,
                                             uint32_t id, mlfab_error *error);
/* Closes it here. If a round of it has begun elsewhere, or begins later, that is a failure (PEER_CLOSED). bury: also
 * calls free_self as soon as links can no longer hold its memory. */
MLFAB__INTERNAL void mlfab__comm_object_remove(struct mlfab__comm *comm,
                                               mlfab__comm_object *object);
MLFAB__INTERNAL void mlfab__comm_object_bury(struct mlfab__comm *comm, mlfab__comm_object *object);

#endif
