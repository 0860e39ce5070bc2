/* role.h - the role table: what a node asks of its roles, and nothing else of them.
 *
 * A role is a part of a node that speaks to peers: the worker, the server, the communicator, an aggregator, ...
 * It says on which kinds of links it is asked, and fills in the functions that it needs; NULL where it does not
 * care. The node owns links, queues, timers, admission and liveness, and knows its roles only by this table. A
 * peer is told by the kind of the link and its number there (node.h): the rank of a worker, the number of a
 * server.
 *
 * Order. Where several roles are on one kind of link, a frame is offered to them in the order of the table, those
 * of the `rest` last, until one takes it. Of those that have a frame to send, the role that sent last on this link is asked last, so that
 * they take turns.
 *
 * Loans. A bulk that is lent to a link has a token of its role, below 2^60. It comes back exactly once: by
 * `returned`, or, when the role took it back with the port's detach or the link is lost, without a word. Tokens
 * of several roles on one link do not meet: the node adds which role it was.
 *
 * Functions are called with the node in a consistent state, one at a time, and never from inside another
 * function of a role: what a role asks of links (drop, detach) is done when it has returned. */
#ifndef MLFAB__ROLE_H
#define MLFAB__ROLE_H

#include "../base/request.h"
#include "port.h"

struct mlfab_node; /* node.h */

enum mlfab__link_kind {
  MLFAB__LINK_FREE,
  MLFAB__LINK_NEW,
  MLFAB__LINK_CLAIM,
  MLFAB__LINK_JOIN_IN,
  MLFAB__LINK_JOIN_OUT,
  MLFAB__LINK_SERVER, /* from here on roles are asked */
  MLFAB__LINK_WORKER,
  MLFAB__LINK_PLANNER,
  MLFAB__LINK_SCHEDULER,
  MLFAB__LINK_PEER,
  MLFAB__LINK_PEER_IN,
  MLFAB__LINK_RESHARD,
  MLFAB__LINK_RESHARD_IN,
  MLFAB__LINK_KINDS
};

#define MLFAB__ON(kind) (1u << MLFAB__LINK_##kind)
#define MLFAB__SERVES(kind) (1u << MLFAB__REQUEST_##kind)

/* What was said when a link came to stand. */
typedef struct mlfab__greeting {
  const mlfab__hello *hello; /* what a worker said who called; else NULL */
  mlfab__hello_ack
      *ack; /* the answer: to be filled by who was called, and then what the caller reads */
  uint32_t incarnation; /* of who called; 0 where we did */
  int fresh;            /* ... which is a process that was not here before */
  const char *why;      /* hello: why not. Static */
  const char *died; /* up: what the peer would be said to have died of, were it dead now. Static */
} mlfab__greeting;

/* Of which link a role is asked, and when. */
typedef struct mlfab__at {
  int kind;
  uint32_t peer;
  uint64_t now_ns;
} mlfab__at;

typedef struct mlfab__role {
  const char *name;
  void *self;
  size_t bytes;      /* of self, which the node gives back after `free`; 0: not the node's */
  uint32_t links;    /* MLFAB__ON(kind) | ... */
  uint32_t sends;    /* of those: on which `next` is asked */
  uint32_t requests; /* MLFAB__SERVES(kind) | ... of `withdraw` */
  uint8_t from, to;  /* it takes no frame of a type outside of these; 0 and 0: of any */
  uint8_t rest;      /* refuses frames that it does not know: stands behind those that do not */

  /* A frame: 1 when this role takes it, 0 when it is not of this role, or an error: the link is given up. */
  int (*frame)(void *self, mlfab__at at, const mlfab__frame_in *frame);
  /* The next frame with a bulk for this peer: 1, or 0. It was taken. Its bulk is free. */
  int (*next)(void *self, mlfab__at at, mlfab__frame_out *frame);
  void (*taken)(void *self, mlfab__at at, const mlfab__frame_out *frame);
  void (*returned)(void *self, mlfab__at at, uint64_t token);

  /* A link is about to stand: to judge, and to fill the answer where the peer called. Not 0: an error, and
   * `why`; a peer that called is refused, a server that answered counts as dead. */
  int (*hello)(void *self, mlfab__at at, mlfab__greeting *greeting);
  /* It stands, and its answer was sent or came. A server may answer again: then nothing was lost. */
  void (*up)(void *self, mlfab__at at, mlfab__greeting *greeting);
  /* It broke: the peer may call again. */
  void (*lost)(void *self, mlfab__at at);
  /* The peer is dead, or has said goodbye (`left`). */
  void (*gone)(void *self, mlfab__at at, int left);
  /* Is a link to this peer wanted? Asked where there is none. */
  int (*wants)(void *self, mlfab__at at);

  /* Every look at the clock; when the next is due. */
  void (*tick)(void *self, uint64_t now_ns);
  uint64_t (*deadline)(const void *self);
  /* Four times a heartbeat, while `waits` of any role says so. */
  void (*scan)(void *self, uint64_t now_ns);
  int (*waits)(const void *self);
  /* After everything that may have changed something. All actions have been carried out: nothing is lent any
   * more but what is open. */
  void (*settle)(void *self);
  void (*idle)(void *self);

  /* A request of this role ends by its deadline, or as cancelled. */
  void (*withdraw)(void *self, mlfab__request *request, int code, uint64_t now_ns);
  /* May others want something of it at any time, without a call of this node's? */
  int (*serves)(const void *self);
  /* This node's worker has no more data. Does nobody wait for this role because of that any more? */
  void (*finish)(void *self);
  int (*finished)(const void *self);
  /* This node's worker will leave. Does nobody wait for this role any more? It says goodbye now. */
  void (*leave)(void *self);
  int (*quiet)(const void *self);
  void (*part)(void *self);
  /* A transport measured a link. What this host's links carry, bytes per second, 0: not known. */
  void (*measured)(void *self, const mlfab_measure *measure, uint64_t now_ns);
  void (*capacity)(void *self, double in, double out);
  void (*stats)(const void *self, mlfab_stats *stats);
  void (*free)(void *self);
} mlfab__role;

#endif
