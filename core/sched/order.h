/* order.h - the order in which updates are sent to their servers, and which are dropped.
 *
 * Alg. 1 sends the update that arrives first. Alg. 2 does the same, except that it takes an update whose
 * last possible position has come, and discards it if the next update would otherwise arrive earlier. So
 * every applied update is at most delay_bound versions behind, and no update waits at the server.
 *
 * Position i of the order is the i-th applied update. Update g may have the positions up to dl(g) = version
 * + delay_bound - the model's version. A version from the future only makes dl larger.
 *
 * Interpretations, where the text leaves a choice. The position counts applied updates only, since eq. 9 is about
 * versions and a dropped update does not change one. An update whose dl has passed is no candidate, so it stays unsent.
 * It becomes a candidate again if a position is given back. Among several due updates the fastest goes, and among
 * equally fast updates the first in the list. Look-ahead compares an update picked for its deadline with the next pick,
 * and, if that one is discarded, again with the following pick; it keeps the update if they are equal. An update picked
 * as the shortest needs no look-ahead. An update that cannot arrive is no candidate, either.
 *
 * Source: MLfabric §5.1, Alg. 1, Alg. 2, eq. 9; §10.2 (several servers). Departs: as interpreted above; the
 * pick is found without examining all updates (order.c). */
#ifndef MLFAB__ORDER_H
#define MLFAB__ORDER_H

#include "network.h"

enum mlfab__reason {
  MLFAB__DEADLINE = 1, /* applied: its last position had come */
  MLFAB__SHORTEST,     /* applied: it arrived first */
  MLFAB__LISTED,       /* applied: the batch is a list */
  MLFAB__LOOKAHEAD,    /* dropped: the next one would have waited for it */
  MLFAB__EXPIRED,      /* dropped: all its positions have passed */
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
  double end; /* time when it arrives if sent directly; dropped: never */
} mlfab__ordered;

/* Scratch memory, kept between calls; initially all zero. */
typedef struct mlfab__orderer {
  unsigned char *memory; /* one block for all arrays except the trail */
  size_t bytes;
  double *key;    /* lower bound of its end in the present network */
  uint64_t *seen; /* number of the network in which `key` is its exact end */
  uint32_t *due;  /* dl, clamped to 0..n+1 */
  uint8_t *fate;  /* 0 while undecided, then its reason */
  double *size;   /* bytes that it sends over the network; 0: its transfer takes no time */
  /* segment tree over the list: smallest key of the candidates */
  double *tree;
  uint32_t *by_size;                 /* updates by (size, position) */
  uint32_t *rank;                    /* position of each update in by_size */
  uint32_t *run;                     /* the rank at which the next size begins */
  uint32_t *buckets;                 /* updates by dl, in list order */
  uint32_t *bucket;                  /* index of the first update of a dl */
  uint64_t *bits[3];                 /* by rank: is a candidate; and two summary levels */
  struct mlfab__bound_known *bounds; /* by server, and for all servers together */
  uint32_t *twin;                    /* the first update that is its twin (order.c), or none */
  struct mlfab__twin_known *twins;   /* by first update */
  struct mlfab__accepted *stack;
  struct mlfab__key_before *trail;
  uint32_t trail_room;
  uint64_t evaluations; /* number of computed transfer ends, over all calls */
} mlfab__orderer;

/* Alg. 2. Fills `out` (n entries): the first *applied_p in order, then the others in list order. Reserves
 * the applied transfers in `net`, one after another in that order. Errors: ARGUMENT (negative or NaN bytes
 * or time, a node that does not exist), MEMORY; nothing is reserved then. */
MLFAB__INTERNAL int mlfab__order_deadlines(mlfab__orderer *o, mlfab__network *net,
                                           const mlfab__order_input *in, mlfab__ordered *out,
                                           uint32_t *applied_p);
/* The same by Alg. 1: no deadlines; only unreachable updates are dropped. */
MLFAB__INTERNAL int mlfab__order_shortest(mlfab__orderer *o, mlfab__network *net,
                                          const mlfab__order_input *in, mlfab__ordered *out,
                                          uint32_t *applied_p);
MLFAB__INTERNAL void mlfab__order_free(mlfab__orderer *o, mlfab__env *env);

/* Returns dl(g), not clamped; saturating. */
MLFAB__INTERNAL int64_t mlfab__order_deadline(int64_t version, int64_t delay_bound,
                                              int64_t model_version);

#endif
