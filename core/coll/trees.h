/* trees.h - server 0 has the scheduler plan the trees of allreduces, and tells the members.
 *
 * Members number their calls alike in each epoch (comm.h), so (epoch, number) means one allreduce
 * everywhere. A member that begins a planned one asks for its tree:
 *
 *    a member --TREE_ASK--> server 0 --TREE_ASK (the first time)--> scheduler
 *    a member <--TREE_PLAN-- server 0 <--TREE_PLAN-- scheduler
 *
 *    a tree at server 0:  (unknown) --a member asks--> PLANNING --TREE_PLAN--> KNOWN
 *                                                        |  no scheduler, it is lost, or it is silent
 *                                                        +--for a heartbeat: an empty tree--> KNOWN
 *
 * Members ask if the configuration has a scheduler. With an empty tree all members take the algorithm that AUTO
 * chooses. The scheduler's tree has ranks; server 0 checks it, and passes it on with the members' numbers.
 *
 * Invariants. (1) All members of an epoch are told the same tree for a call, also by a copy of server 0 that takes
 * over: it has all told trees, and members ask it again. (2) A member that asks again (on a new link) gets the answer
 * again. (3) Questions about an epoch that is over get no answer. (4) Memory: MLFAB__COMM_AHEAD trees. A later call
 * takes a tree's place only if it is so many calls later, and no member begins that call while the earlier one is open
 * anywhere: so all members had its tree. */
#ifndef MLFAB__TREES_H
#define MLFAB__TREES_H

#include "../base/rng.h"
#include "comm.h"
#include "membership.h"

typedef struct mlfab__trees_entry {
  uint64_t number; /* MLFAB__COMM_TREE; 0: none */
  uint64_t since_ns;
  uint8_t known;
  uint8_t asked[MLFAB__MEMBERSHIP_MEMBERS_MAX / 8]; /* bits: ranks that wait for it */
  mlfab__tree_node *nodes;                          /* n of them */
  uint32_t n, room;
} mlfab__trees_entry;

typedef struct mlfab__trees {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port; /* peers are workers; behind them the scheduler */
  const mlfab__membership *membership;
  int scheduler; /* 1: a scheduler is here */
  uint8_t *meta; /* buffer of a frame; allocated with the first tree */
  mlfab__trees_entry entries[MLFAB__COMM_AHEAD];
  mlfab__touch *touch; /* tells a replica of server 0, which has the known trees; or NULL */
} mlfab__trees;

/* Cannot fail. `membership` must outlive it. */
MLFAB__INTERNAL void mlfab__trees_init(mlfab__trees *trees, mlfab__env *env,
                                       const mlfab_config *config, const mlfab__port *port,
                                       const mlfab__membership *membership);
MLFAB__INTERNAL void mlfab__trees_free(void *self);
/* Takes a frame of a worker: returns 1 if it belonged to this role (TREE_ASK). */
MLFAB__INTERNAL int mlfab__trees_frame(mlfab__trees *trees, uint32_t worker,
                                       const mlfab__frame_in *frame, uint64_t now_ns);
/* scheduler: it is here, or lost. scheduler_frame: takes its frame, and returns 1 if of this role (TREE_PLAN). */
MLFAB__INTERNAL void mlfab__trees_scheduler(mlfab__trees *trees, int here);
MLFAB__INTERNAL int mlfab__trees_scheduler_frame(mlfab__trees *trees, const mlfab__frame_in *frame);
/* Call it four times a heartbeat. */
MLFAB__INTERNAL void mlfab__trees_tick(void *self, uint64_t now_ns);
/* Returns the known trees as records: one for each entry. */
MLFAB__INTERNAL mlfab__mirrored mlfab__trees_mirrored(mlfab__trees *trees);
/* Adds the role of trees, at server 0 (trees_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__trees_attach(struct mlfab_node *node,
                                        const mlfab__membership *membership);
/* Returns the root of a tree: one of n members. */
MLFAB__INTERNAL uint32_t mlfab__trees_root(uint64_t seed, uint64_t number, uint32_t n);

#endif
