/* order.h - in which order updates are sent to their servers, and which are not sent. Layer 2.
 *
 * Alg. 1 sends the update that arrives first, first. Alg. 2 does so too, but takes an update whose
 * last possible position has come, and gives that one up if the next would then be there earlier:
 * so every update that is applied is at most delay_bound versions behind, and nobody waits at the
 * server.
 *
 * Position i of the order is the i-th update that is applied; update g may have the positions up to
 * dl(g) = version + delay_bound - the model's version. A version from the future only makes dl
 * larger.
 *
 * Readings, where the text leaves a choice. The position counts applied updates only, since eq. 9
 * is about versions and a dropped update does not change one. An update whose dl is past is no
 * candidate (and so never sent); it is one again when a position is given back. Of several that are
 * due the fastest goes, and of equally fast ones the earliest in the list. Look-ahead compares an
 * update that was picked for its deadline with the pick behind it, again after that one was
 * discarded itself, and keeps it when they are equal; one that was picked as the shortest needs no
 * look-ahead. An update that never arrives is no candidate.
 *
 * Source: MLfabric §5.1, Alg. 1, Alg. 2, eq. 9; §10.2 (several servers). Departs: as read above;
 * the pick is found without looking at everybody (order.c). */
#ifndef MLFAB__ORDER_H
#define MLFAB__ORDER_H

#include "network.h"

enum mlfab__reason {
  MLFAB__DEADLINE = 1, /* applied: its last position had come */
  MLFAB__SHORTEST,     /* applied: it arrived first */
  MLFAB__LISTED,       /* applied: the batch is a list */
  MLFAB__LOOKAHEAD,    /* dropped: the next one would have waited for it */
  MLFAB__EXPIRED,      /* dropped: its positions are past */
  MLFAB__UNREACHABLE   /* dropped: it never arrives */
};

typedef struct mlfab__order_input {
  const mlfab__candidate *updates;
  uint32_t n;
  const uint32_t *server; /* node of each */
  uint32_t servers;
  int64_t delay_bound, version; /* INT64_MAX: no bound */
} mlfab__order_input;

typedef struct mlfab__ordered {
  uint32_t update; /* index in the list */
  uint8_t reason;
  double end; /* when it arrives if it is sent directly; dropped: never */
} mlfab__ordered;

/* Scratch memory, kept between calls; all zero at first. */
typedef struct mlfab__orderer {
  unsigned char *memory; /* of all arrays but the trail */
  size_t bytes;
  double *key;                       /* no transfer ends before this, in the present network */
  uint64_t *seen;                    /* the network in which `key` is when it ends */
  uint32_t *due;                     /* dl, cut to 0..n+1 */
  uint8_t *fate;                     /* 0 while neither accepted nor discarded, then reason */
  uint8_t *free;                     /* its end is when it is available */
  double *tree;                      /* least key of the candidates, of intervals of the list */
  uint32_t *by_size;                 /* free ones, then by (size, position) */
  uint32_t *rank;                    /* where in by_size */
  uint32_t *run;                     /* the rank where the next size begins */
  uint32_t *buckets;                 /* by dl, in list order */
  uint32_t *bucket;                  /* where a dl's begin */
  uint64_t *bits[3];                 /* by rank: is a candidate; and two levels that summarise */
  struct mlfab__bound_known *bounds; /* by server */
  struct mlfab__accepted *stack;
  struct mlfab__key_before *trail;
  uint32_t trail_room;
  uint64_t evaluations; /* of when a transfer ends, over all calls */
} mlfab__orderer;

/* Alg. 2. Fills `out` (n entries): the first *applied_p in order, then the others in list order.
 * What is applied is reserved in `net`, one transfer after the other in that order. Errors:
 * ARGUMENT (bytes or a time that is negative or NaN, a node that is not there), MEMORY; nothing is
 * reserved then. */
MLFAB__INTERNAL int mlfab__order_deadlines(mlfab__orderer *o, mlfab__network *net,
                                           const mlfab__order_input *in, mlfab__ordered *out,
                                           uint32_t *applied_p);
/* The same by Alg. 1: no deadlines, and only what is unreachable is dropped. */
MLFAB__INTERNAL int mlfab__order_shortest(mlfab__orderer *o, mlfab__network *net,
                                          const mlfab__order_input *in, mlfab__ordered *out,
                                          uint32_t *applied_p);
MLFAB__INTERNAL void mlfab__order_free(mlfab__orderer *o, mlfab__env *env);

/* dl(g), as it is; saturating. */
MLFAB__INTERNAL int64_t mlfab__order_deadline(int64_t version, int64_t delay_bound,
                                              int64_t model_version);

#endif
