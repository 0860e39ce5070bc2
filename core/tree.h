/* tree.h - allreduce: the sum of all workers' arrays, up one tree and down another. Layer 4.
 *
 * Two roles. Server 0 (`muster`, muster.c) counts who is there, arranges the tree and says when it
 * is over; workers (`tree`: tree.c, and carry.c for the bytes) call each other over links of their
 * own:
 *
 *    muster:  IDLE --all live workers ASK--> [PLANNING, while a scheduler arranges] --TREE to all--> RUNNING
 *               ^                                                                          |
 *               +-- REDUCE_DONE to all: everybody HAS it, or somebody died or gave up -----+
 *
 *    a worker's call:  ASKED --TREE--> RUNNING --all of the sum is here: HAVE--> --REDUCE_DONE--> over
 *
 *    a link:  child --JOIN--> parent --GRANT--> child --UP, under its credit--> parent
 *             taker --JOIN--> giver --DOWN--> taker
 *
 * A call has a number of its own (`ask`), which is repeated on a new link and never counted twice;
 * what server 0 forms of the calls is numbered (`number`), and frames of another number are of what
 * is over: dropped. A call that is withdrawn before the tree stands is as if it never had been;
 * once it stands, whoever gives up, dies or comes back as a new process ends it for all, with one
 * code and one rank. So calls stay in step.
 *
 * The sum is formed in the callers' own arrays. A parent adds its children in the order in which
 * server 0 lists them: byte x of child k when byte x of child k - 1 was added, so that the result
 * does not depend on arrival; its own bytes come first. What comes early is staged in a ring, a
 * fixed part of MLFAB__TREE_STAGE a child. Bytes that all children have added go on to the parent
 * at once, while later ones still come in, and the root's go down in the same way. Nobody else adds
 * to them, so all ranks get the root's bits.
 *
 * Invariants. (1) Bytes of the sum are written over a caller's share only where it was sent up
 * before: the sum cannot have them earlier. (2) A child sends what it was granted and no more: ring
 * and window bound the parent's memory, and how far the first child may be ahead of the last. (3) A
 * link that breaks loses nothing: the parent says from where, the taker how much it has. (4) Server
 * 0 says that it is over when every participant has all, and not before: it succeeds on all or on
 * none, but for deadlines and deaths after that.
 * (5) What is lent to a link is taken back before the caller has its array again. (6) A call ends:
 * by server 0's word, by its death, or by its own deadline. A parent or giver that cannot be
 * reached for 8 heartbeats is reported to server 0, which ends it.
 *
 * Source: MLfabric §6 (AllReduce: push to a random root, get from it). Departs: cuts through;
 * children of one parent take turns in steps of the window and not one after the other. */
#ifndef MLFAB__TREE_H
#define MLFAB__TREE_H

#include "env.h"
#include "port.h"
#include "reduce.h"
#include "request.h"

/* Tokens of bulks that this role lends, on links that it shares with others: no other role's has
 * both bits. */
#define MLFAB__TREE_TOKEN ((uint64_t)3 << 60)

enum {
  MLFAB__TREE_STAGE = 4 << 20,      /* all rings of a node */
  MLFAB__TREE_RING_MAX = 256 << 10, /* one of them */
  MLFAB__TREE_WINDOW = 4 << 20,     /* a child ahead of the last one */
  MLFAB__TREE_COPY = 8192,          /* bulks up to this are copied by the transport */
  MLFAB__TREE_PATIENCE = 8          /* heartbeats without a link */
};

/* --- server 0 --- */

enum mlfab__caller_state {
  MLFAB__CALLER_IDLE,    /* its newest call is not known, or forgotten */
  MLFAB__CALLER_WAITING, /* for the others */
  MLFAB__CALLER_INSIDE,  /* the tree has it */
  MLFAB__CALLER_OVER     /* code and rank are the outcome */
};

typedef struct mlfab__caller { /* a worker, as server 0 sees it */
  uint8_t state, gone, done, have;
  uint32_t dtype;
  uint64_t ask, count;  /* of its newest call */
  int32_t code, rank;   /* of its last call, when that is over, and ... */
  uint32_t other_dtype; /* ... SHAPE: what the call is compared with in the error's text */
  uint64_t other_count;
  int32_t told; /* who it was told is missing */
  /* Its place. */
  uint32_t parent, giver; /* MLFAB__NO_NODE: it is the root */
  uint32_t children, takers;
} mlfab__caller;

typedef struct mlfab__muster_scratch mlfab__muster_scratch; /* muster.c */

enum mlfab__muster_phase { MLFAB__MUSTER_IDLE, MLFAB__MUSTER_PLANNING, MLFAB__MUSTER_RUNNING };

typedef struct mlfab__muster {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port; /* peers are workers; behind them the scheduler */
  uint32_t workers;
  int scheduler; /* one is here */
  enum mlfab__muster_phase phase;
  mlfab__caller *callers;
  uint64_t number;         /* of the newest allreduce */
  uint32_t *order;         /* those inside, in the order in which children are added */
  uint32_t inside, having; /* how many are; how many of them have all of the sum */
  uint32_t root;
  uint64_t planning_ns;           /* since */
  mlfab__muster_scratch *scratch; /* with the first */
} mlfab__muster;

/* Errors: MEMORY. Afterwards free works in any case. */
MLFAB__INTERNAL int mlfab__muster_init(mlfab__muster *muster, mlfab__env *env,
                                       const mlfab_config *config, const mlfab__port *port);
MLFAB__INTERNAL void mlfab__muster_free(mlfab__muster *muster);
/* A worker is here on a new link; `fresh`: a process that was not here before. It is gone; it has
 * said DONE. */
MLFAB__INTERNAL void mlfab__muster_hello(mlfab__muster *muster, uint32_t worker, int fresh,
                                         uint64_t now_ns);
MLFAB__INTERNAL void mlfab__muster_gone(mlfab__muster *muster, uint32_t worker, int left,
                                        uint64_t now_ns);
MLFAB__INTERNAL void mlfab__muster_done(mlfab__muster *muster, uint32_t worker, uint64_t now_ns);
/* 1 when the frame was of this role (REDUCE). */
MLFAB__INTERNAL int mlfab__muster_frame(mlfab__muster *muster, uint32_t worker,
                                        const mlfab__frame_in *frame, uint64_t now_ns);
/* The scheduler is here, or lost; 1 when its frame was of this role (TREE_PLAN). */
MLFAB__INTERNAL void mlfab__muster_scheduler(mlfab__muster *muster, int here);
MLFAB__INTERNAL int mlfab__muster_scheduler_frame(mlfab__muster *muster,
                                                  const mlfab__frame_in *frame);
/* Four times a heartbeat. */
MLFAB__INTERNAL void mlfab__muster_tick(mlfab__muster *muster, uint64_t now_ns);
/* The root of an allreduce: one of n. */
MLFAB__INTERNAL uint32_t mlfab__muster_draw(uint64_t seed, uint64_t number, uint32_t n);

/* --- a worker --- */

typedef struct mlfab__tree_child {
  uint32_t rank;
  uint64_t granted, received, added; /* added <= received <= granted */
} mlfab__tree_child;

typedef struct mlfab__tree_taker {
  uint32_t rank;
  uint32_t lent; /* bulks that its link has */
  uint64_t given;
} mlfab__tree_taker;

/* What another worker's link to this one has said, and where it stands in the two lists, plus
 * one. */
typedef struct mlfab__tree_peer {
  uint64_t joined, have;
  uint32_t child, taker;
} mlfab__tree_peer;

typedef struct mlfab__tree {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__requests *requests;
  mlfab__port up;   /* peer 0 is server 0 */
  mlfab__port hop;  /* parent and giver, by rank: `ready` opens the link when there is none */
  mlfab__port down; /* children and takers, by rank */
  uint32_t rank;
  int dead;                /* server 0 is */
  mlfab__tree_peer *peers; /* by rank; with the first call */
  /* The call that is open, or was the last. */
  uint64_t asks, request;
  uint8_t *data;
  uint64_t bytes;
  uint32_t dtype, width;
  int32_t missing;         /* says server 0 */
  int32_t gave_up, blamed; /* code and rank: to be said until server 0 has answered */
  /* Its tree. */
  uint64_t number; /* 0: not yet */
  uint32_t parent, giver;
  uint64_t parent_since_ns, giver_since_ns; /* their link is missing; 0: not known to be */
  int resumes;                              /* the next grant says from where */
  uint64_t granted, sent, sent_most;        /* to the parent */
  uint32_t lent;                            /* bulks that its link has */
  uint64_t complete;                        /* bytes that all children have added */
  uint64_t have;                            /* bytes of the sum */
  mlfab__tree_child *children;
  mlfab__tree_taker *takers;
  uint32_t nchildren, ntakers, child_room, taker_room;
  uint8_t *stage; /* a ring for every child but the first */
  uint64_t stage_room, ring;
} mlfab__tree;

MLFAB__INTERNAL void mlfab__tree_init(mlfab__tree *tree, mlfab__env *env,
                                      const mlfab_config *config, uint32_t rank,
                                      const mlfab__port *up, const mlfab__port *hop,
                                      const mlfab__port *down, mlfab__requests *requests);
MLFAB__INTERNAL void mlfab__tree_free(mlfab__tree *tree);
/* Begins a call. data is borrowed until the request is finished. Errors: as of mlfab_allreduce. */
MLFAB__INTERNAL int mlfab__tree_start(mlfab__tree *tree, void *data, uint64_t count, int dtype,
                                      uint64_t timeout_ns, uint64_t now_ns,
                                      mlfab_request *request_p, mlfab_error *error);
MLFAB__INTERNAL void mlfab__tree_withdraw(mlfab__tree *tree, mlfab__request *request, int code,
                                          uint64_t now_ns);
/* The link to server 0 stands; server 0 is dead. A lost link changes nothing. */
MLFAB__INTERNAL void mlfab__tree_hello(mlfab__tree *tree);
MLFAB__INTERNAL void mlfab__tree_dead(mlfab__tree *tree, uint64_t now_ns);
/* Frames of server 0, of a parent or giver, of a child or taker: 1 when they were of this role. */
MLFAB__INTERNAL int mlfab__tree_server_frame(mlfab__tree *tree, const mlfab__frame_in *frame,
                                             uint64_t now_ns);
MLFAB__INTERNAL int mlfab__tree_hop_frame(mlfab__tree *tree, uint32_t peer,
                                          const mlfab__frame_in *frame);
MLFAB__INTERNAL int mlfab__tree_member_frame(mlfab__tree *tree, uint32_t peer,
                                             const mlfab__frame_in *frame);
/* Our link to another worker stands, is lost; there is none: 1 when it is wanted. */
MLFAB__INTERNAL void mlfab__tree_hop_up(mlfab__tree *tree, uint32_t peer);
MLFAB__INTERNAL void mlfab__tree_hop_lost(mlfab__tree *tree, uint32_t peer);
MLFAB__INTERNAL int mlfab__tree_hop_missing(mlfab__tree *tree, uint32_t peer, uint64_t now_ns);
/* Another worker's link to us is lost, or there is a new one. */
MLFAB__INTERNAL void mlfab__tree_member_lost(mlfab__tree *tree, uint32_t peer);
/* The next frame with a bulk for the parent, for a taker: 1, or 0; it was taken; its bulk is
 * free. */
MLFAB__INTERNAL int mlfab__tree_next_up(mlfab__tree *tree, uint32_t peer, mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__tree_taken_up(mlfab__tree *tree, const mlfab__frame_out *frame);
MLFAB__INTERNAL int mlfab__tree_next_down(mlfab__tree *tree, uint32_t peer,
                                          mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__tree_taken_down(mlfab__tree *tree, uint32_t peer,
                                            const mlfab__frame_out *frame);
/* 1 when the token was of this role. `peer` is a child or taker, or (hop) the parent. */
MLFAB__INTERNAL int mlfab__tree_sent(mlfab__tree *tree, uint32_t peer, int hop, uint64_t token);

/* --- between tree.c and carry.c --- */

static inline int mlfab__tree_is_root(const mlfab__tree *tree) {
  return tree->parent == MLFAB__NO_NODE;
}
/* Is it a worker that this one calls in the present tree? */
static inline int mlfab__tree_calls(const mlfab__tree *tree, uint32_t peer) {
  return tree->number && !mlfab__tree_is_root(tree) &&
         (peer == tree->parent || peer == tree->giver);
}
/* One that calls this one: NULL when it is not. */
static inline mlfab__tree_child *mlfab__tree_child_of(const mlfab__tree *tree, uint32_t peer) {
  uint32_t place = tree->number && tree->peers ? tree->peers[peer].child : 0;
  return place ? &tree->children[place - 1] : NULL;
}
static inline mlfab__tree_taker *mlfab__tree_taker_of(const mlfab__tree *tree, uint32_t peer) {
  uint32_t place = tree->number && tree->peers ? tree->peers[peer].taker : 0;
  return place ? &tree->takers[place - 1] : NULL;
}
/* Bulks that are lent in this allreduce, on any link. */
static inline uint64_t mlfab__tree_token(const mlfab__tree *tree) {
  return MLFAB__TREE_TOKEN | (tree->number & 0xffffffffu);
}
/* Tells server 0 how the call stands; said again on a new link. */
MLFAB__INTERNAL void mlfab__tree_tell(mlfab__tree *tree);
/* Raises the k-th child's credit, if it is worth it; `resume`: in any case, it is on a new link. */
MLFAB__INTERNAL void mlfab__tree_credit(mlfab__tree *tree, uint32_t k, int resume);
/* More may be complete here than was said. */
MLFAB__INTERNAL void mlfab__tree_progress(mlfab__tree *tree);
/* TREE_UP of a child, TREE_GRANT of the parent, TREE_DOWN of the giver. */
MLFAB__INTERNAL void mlfab__tree_from_child(mlfab__tree *tree, uint32_t peer,
                                            const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__tree_granted(mlfab__tree *tree, uint32_t peer,
                                         const mlfab__frame_in *frame);
MLFAB__INTERNAL void mlfab__tree_from_giver(mlfab__tree *tree, uint32_t peer,
                                            const mlfab__frame_in *frame);

#endif
