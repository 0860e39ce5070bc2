/* role.h - the role table: the only knowledge that a node has of its roles.
 *
 * A role is a part of a node that speaks to peers: the worker, the server, the communicator, an aggregator, ... It
 * names the kinds of links that it uses, and fills in the functions that it needs; the others are NULL. The node
 * owns links, queues, timers, admission and liveness, and knows its roles only by this table. The kind of the link
 * and a number identify a peer (node.h): the rank of a worker, the number of a server.
 *
 * Order. If several roles use one kind of link, the node offers them a frame in the order of the table, those with
 * `rest` last, until one takes it. For a frame to send it asks the urgent roles first. The others take turns: the last
 * sender on this link is asked last.
 *
 * Loans. A bulk that a role lends to a link has a token of the role, below 2^60. The loan ends exactly once: the node
 * calls `returned`, or the role takes it back with the port's detach, or the link is lost. The last two cause no call.
 * Tokens of several roles on one link cannot collide: the node adds the role.
 *
 * The node calls these functions in a consistent state, one at a time, and never from inside a function of another
 * role. It carries out a role's requests to links (drop, detach) after the function has returned. */
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
  MLFAB__LINK_SERVER, /* from here on the node calls roles */
  MLFAB__LINK_WORKER,
  MLFAB__LINK_PLANNER,
  MLFAB__LINK_SCHEDULER,
  MLFAB__LINK_PEER,
  MLFAB__LINK_PEER_IN,
  MLFAB__LINK_RESHARD,
  MLFAB__LINK_RESHARD_IN,
  MLFAB__LINK_VOTER,
  MLFAB__LINK_VOTER_IN,
  MLFAB__LINK_KINDS
};

#define MLFAB__ON(kind) (1u << MLFAB__LINK_##kind)
#define MLFAB__SERVES(kind) (1u << MLFAB__REQUEST_##kind)

/* The data exchanged when a link comes up. */
typedef struct mlfab__greeting {
  const mlfab__hello *hello; /* the HELLO of a calling worker; else NULL */
  mlfab__hello_ack *ack;     /* the answer: the called side fills it, the caller reads it */
  uint32_t incarnation;      /* of the caller; 0 if this node called */
  int fresh;                 /* the caller is a process that was not here before */
  int local;                 /* the link's transport reaches this host only */
  const char *why;           /* hello: the reason for a refusal. Static */
  const char *died;          /* up: the cause of death if the peer were dead now. Static */
} mlfab__greeting;

/* The link and the time of a call. */
typedef struct mlfab__at {
  int kind;
  uint32_t peer;
  uint64_t now_ns;
} mlfab__at;

enum { MLFAB__NEVER_HERE = 2 }; /* value of `left` for a number that was never used */

typedef struct mlfab__role {
  const char *name;
  void *self;
  size_t bytes;      /* of self, which the node frees after `free`; 0: not the node's memory */
  uint32_t links;    /* MLFAB__ON(kind) | ... */
  uint32_t sends;    /* of `links`: kinds on which the node calls `next` */
  uint32_t urgent;   /* of `sends`: kinds on which `next` of this role is called first, each time */
  uint32_t requests; /* MLFAB__SERVES(kind) | ... of `withdraw` */
  uint8_t from, to;  /* frame types that it takes; 0 and 0: all */
  /* 1: it refuses unknown frames, so the node asks it after the others */
  uint8_t rest;

  /* A frame: 1 if this role takes it, 0 if the frame belongs to another role; an error drops the link. */
  int (*frame)(void *self, mlfab__at at, const mlfab__frame_in *frame);
  /* next: gives the next frame with a bulk for this peer: 1; or 0. taken: it was sent. returned: its bulk is free. */
  int (*next)(void *self, mlfab__at at, mlfab__frame_out *frame);
  void (*taken)(void *self, mlfab__at at, const mlfab__frame_out *frame);
  void (*returned)(void *self, mlfab__at at, uint64_t token);

  /* A link is coming up: judge it, and fill the answer if the peer called. Nonzero: an error, with `why`; the node
   * refuses a peer that called, and declares dead a server that answered. */
  int (*hello)(void *self, mlfab__at at, mlfab__greeting *greeting);
  /* The link is up: the answer was sent or received. A server may answer again; that means no loss. */
  void (*up)(void *self, mlfab__at at, mlfab__greeting *greeting);
  /* The link broke: the peer may call again. */
  void (*lost)(void *self, mlfab__at at);
  /* The peer is dead, or has said goodbye (`left`), or there was none, but may come (MLFAB__NEVER_HERE). For a server
   * also: another process has come, which has no state. */
  void (*gone)(void *self, mlfab__at at, int left);
  /* Does the role want a link to this peer? The node asks if there is none. why: of the last failed call, or "". */
  int (*wants)(void *self, mlfab__at at, const char *why);

  /* tick: at every look at the clock. deadline: time of the next required tick. */
  void (*tick)(void *self, uint64_t now_ns);
  uint64_t (*deadline)(const void *self);
  /* This process did not run for a time: node.h, Pauses. Stamps of the last sign of a peer move by late_ns, at most to
   * now. */
  void (*awake)(void *self, uint64_t late_ns, uint64_t now_ns);
  /* Four times a beat, while `waits` of any role returns 1. */
  void (*scan)(void *self, uint64_t now_ns);
  int (*waits)(const void *self);
  /* settle: after everything that may have changed state. idle: the driver has carried out all actions, so the
   * only loans left are those of open operations. */
  void (*settle)(void *self);
  void (*idle)(void *self);

  /* Ends a request of this role: its deadline passed, or it was cancelled. */
  void (*withdraw)(void *self, mlfab__request *request, int code, uint64_t now_ns);
  /* The worker that an open request of this role waits for, as far as known, or MLFAB_NO_RANK. For display. */
  int32_t (*awaits)(void *self, const mlfab__request *request);
  /* May other nodes need this role at any time, without a call on this node? */
  int (*serves)(const void *self);
  /* finish: this node's worker has no more data. finished: have all stopped waiting for this role? */
  void (*finish)(void *self);
  int (*finished)(const void *self);
  /* leave: this node's worker will leave. quiet: have all stopped waiting for this role? part: it says BYE now. */
  void (*leave)(void *self);
  int (*quiet)(const void *self);
  void (*part)(void *self);
  /* measured: a transport measured a link. capacity: rate of this host's links, bytes per second; 0: unknown. */
  void (*measured)(void *self, const mlfab_measure *measure, uint64_t now_ns);
  void (*capacity)(void *self, double in, double out);
  void (*stats)(const void *self, mlfab_stats *stats);
  void (*free)(void *self);
} mlfab__role;

#endif
