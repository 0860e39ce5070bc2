/* comm_object.h - the communicator: objects, which are partial reductions, stochastic reductions and task graphs of
 * the user's. Layer 4.
 *
 * An object has an id of this worker's own from when it is added. It gets its channel, which is the same on all
 * workers, when the plain call that opens it (comm_call.opens) begins: as many openings have then begun here as
 * elsewhere, and server 0 levels the count with every epoch. */
#ifndef MLFAB__COMM_OBJECT_H
#define MLFAB__COMM_OBJECT_H

#include "coll_wire.h"

enum { MLFAB__COMM_OBJECTS = 16 };

/* The cookie of what an object sends by the streams itself; those of runs are even. */
#define MLFAB__COMM_COOKIE(id) ((uint64_t)(id) << 1 | 1)

struct mlfab__comm;

typedef struct mlfab__comm_object {
  uint32_t id;        /* comm's own; 0: free */
  uint32_t channel;   /* likewise; 0: not yet */
  const char *what;   /* "a partial reduction", and ... */
  const char *counts; /* ... what it counts: "round"; static, for texts */
  uint8_t ahead; /* runs are armed before anybody calls them: a READY does not tell that, nor what
                       run 0 sends, which is armed by begin */
  void *self;
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
  /* The rank that its open request waits for, or MLFAB_NO_RANK, and why; and the number of what it
   * waits for. What server 0 says is known: mlfab__comm_missing. */
  int32_t (*awaited)(void *self, uint64_t *number_p, const char **why_p);
  /* Has this worker called `number`, as far as others wait for it? */
  int (*called)(void *self, uint64_t number);
  void (*free_self)(void *self);
  uint64_t waits_for; /* without runs: which number its open request is; the object keeps it */
  /* comm's own. */
  uint64_t upto;     /* above the numbers of all runs that were armed in this epoch */
  uint64_t stuck_ns; /* when it was last said that a request is open for long */
  int32_t missing;   /* who server 0 says has not called */
} mlfab__comm_object;

/* An object that this worker has closed. */
typedef struct mlfab__comm_closed {
  uint32_t channel;
  uint8_t ahead;
  uint64_t upto;
} mlfab__comm_closed;

/* Memory that was lent when its object was closed: links may read it until they have been told. */
typedef struct mlfab__comm_grave {
  struct mlfab__comm_grave *next;
  void (*free_self)(void *self);
  void *self;
} mlfab__comm_grave;

/* Where a copy of it lives until it is removed, or NULL: MLFAB__COMM_OBJECTS are open. It takes no part in anything
 * before the call that opens it (comm_call.opens). */
MLFAB__INTERNAL mlfab__comm_object *mlfab__comm_object_add(struct mlfab__comm *comm,
                                                           const mlfab__comm_object *object);
/* Adds a copy of *object, and begins the call that opens it: all workers open it, with the same salt, or nobody does.
 * Errors: LIMIT (MLFAB__COMM_OBJECTS are open), and of mlfab__comm_start; *object_p is
 * then NULL, and the object is still the caller's. `opening`: that call in words, static. */
MLFAB__INTERNAL int mlfab__comm_object_open(struct mlfab__comm *comm,
                                            const mlfab__comm_object *object, const char *opening,
                                            uint64_t salt, uint64_t timeout_ns, uint64_t now_ns,
                                            mlfab__comm_object **object_p, mlfab_request *request_p,
                                            mlfab_error *error);
/* A request of an object. Errors: AGAIN. */
MLFAB__INTERNAL int mlfab__comm_object_request(struct mlfab__comm *comm,
                                               const mlfab__comm_object *object,
                                               uint64_t timeout_ns, uint64_t now_ns,
                                               mlfab_request *request_p, mlfab_error *error);
/* `self` of the object with this number, if it is of the kind that `kind` frees, or NULL. */
MLFAB__INTERNAL void *mlfab__comm_object_self(struct mlfab__comm *comm, uint32_t id,
                                              void (*kind)(void *self));
/* Closes it here. Where a round of it has begun elsewhere, or begins later, that is a failure
 * (PEER_CLOSED). */
MLFAB__INTERNAL void mlfab__comm_object_remove(struct mlfab__comm *comm,
                                               mlfab__comm_object *object);
/* Has free_self called as soon as no link can hold memory of it any more. */
MLFAB__INTERNAL void mlfab__comm_bury(struct mlfab__comm *comm, mlfab__comm_grave *grave);
/* The rank that server 0 says has not called what this object waits for, or MLFAB_NO_RANK. */
MLFAB__INTERNAL int32_t mlfab__comm_missing(const struct mlfab__comm *comm,
                                            const mlfab__comm_object *object);

#endif
