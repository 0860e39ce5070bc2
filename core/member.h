/* member.h - barrier and broadcast: server 0 counts, the workers ask. Layer 4.
 *
 * Both are numbered by each worker from 1; a process that joined late counts from what is over
 * (`base`). Asking is repeated on a new link, so server 0 answers a number that is over at once.
 *
 * Barrier: number n is released when every live worker with more data is waiting for it. Broadcast:
 * the root announces, is told to go on when there is room, and sends; the others ask, are sent the
 * bytes when all are there, and say when they have them; the memory is freed when all have. One
 * broadcast at a time. A failure (sizes differ, the root is dead) ends it for everybody. */
#ifndef MLFAB__MEMBER_H
#define MLFAB__MEMBER_H

#include "port.h"
#include "request.h"

#define MLFAB__BARRIER_MISSING \
  ((uint64_t)1 << 63) /* in BARRIER_DONE: not over; low bits: who is missing */

typedef struct mlfab__attendee { /* a worker, as server 0 sees it */
  uint8_t gone, done, bcast_asked, bcast_acked;
  uint64_t barrier_base, barrier_waiting; /* the number waited for, as all count, or 0 */
  uint64_t bcast_base, bcast_given;       /* bytes sent */
  mlfab__bcast bcast_later; /* what it asked for while the one before is under way, or number 0 */
} mlfab__attendee;

typedef struct mlfab__host { /* server 0's side */
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port; /* peers are workers */
  uint32_t workers;
  mlfab__attendee *attendees;
  uint64_t barriers; /* that are over */
  int32_t missing;   /* told to those who wait */
  uint64_t bcasts;   /* that are over */
  int active;        /* a broadcast is under way */
  int32_t root;
  uint64_t bytes, received;
  uint8_t *data;
  int32_t failed_code, failed_rank; /* of the broadcast that ended last */
  int32_t failed_root;              /* SHAPE: of what failed_rank called it with */
  uint64_t failed_bytes;
} mlfab__host;

typedef struct mlfab__guest { /* a worker's side */
  mlfab__port port;           /* peer 0 is server 0 */
  mlfab__requests *requests;
  const mlfab_config *config;
  int32_t rank;
  uint64_t barriers, barrier_request;
  int32_t barrier_missing;
  uint64_t bcasts, bcast_request;
  int32_t root;
  uint8_t *data;
  uint64_t bytes, moved; /* moved: sent by the root, or received */
  int go;                /* the root may send */
  int up, dead;
} mlfab__guest;

MLFAB__INTERNAL int mlfab__host_init(mlfab__host *host, mlfab__env *env, const mlfab_config *config,
                                     const mlfab__port *port);
MLFAB__INTERNAL void mlfab__host_free(mlfab__host *host);
/* A worker is here on a new link; `fresh`: a process that was not here before. */
MLFAB__INTERNAL void mlfab__host_hello(mlfab__host *host, uint32_t worker, int fresh);
MLFAB__INTERNAL void mlfab__host_gone(mlfab__host *host, uint32_t worker);
MLFAB__INTERNAL void mlfab__host_done(mlfab__host *host, uint32_t worker);
/* 1 when the frame was of this kind. */
MLFAB__INTERNAL int mlfab__host_frame(mlfab__host *host, uint32_t worker,
                                      const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__host_next(mlfab__host *host, uint32_t worker, mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__host_taken(mlfab__host *host, uint32_t worker,
                                       const mlfab__frame_out *frame);

MLFAB__INTERNAL void mlfab__guest_init(mlfab__guest *guest, const mlfab_config *config,
                                       int32_t rank, const mlfab__port *port,
                                       mlfab__requests *requests);
MLFAB__INTERNAL int mlfab__guest_barrier(mlfab__guest *guest, uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error);
MLFAB__INTERNAL int mlfab__guest_broadcast(mlfab__guest *guest, int32_t root, void *data,
                                           uint64_t bytes, uint64_t timeout_ns, uint64_t now_ns,
                                           mlfab_request *request_p, mlfab_error *error);
MLFAB__INTERNAL void mlfab__guest_withdraw(mlfab__guest *guest, mlfab__request *request, int code,
                                           uint64_t now_ns);
MLFAB__INTERNAL void mlfab__guest_hello(mlfab__guest *guest);
MLFAB__INTERNAL void mlfab__guest_lost(mlfab__guest *guest);
MLFAB__INTERNAL void mlfab__guest_dead(mlfab__guest *guest, uint64_t now_ns);
MLFAB__INTERNAL int mlfab__guest_frame(mlfab__guest *guest, const mlfab__frame_in *frame,
                                       uint64_t now_ns);
MLFAB__INTERNAL int mlfab__guest_next(mlfab__guest *guest, mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__guest_taken(mlfab__guest *guest, const mlfab__frame_out *frame);

#endif
