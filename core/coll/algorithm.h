/* algorithm.h - builders of full collectives as task graphs: the messages and sums of one member. plain.c and partial.c
 * call them. Pure: it appends operations to a dag; equal questions give equal operations on all members.
 *
 * All algorithms work in place in one stretch of memory. They cut the data into a block for each member: as
 * `counts` says, or evenly, larger blocks first. They cut messages into segments: adding a segment overlaps with sending
 * its successor. A RECV has no dependency if its memory is free before its message can come.
 *
 * Algorithms, for P members, n bytes, log = log2 P rounded up; the bytes that a member sends, and the order in which
 * member i's x_i enter the result:
 *
 *   RING      allreduce, reduce-scatter, allgather: P-1 steps a half, (P-1)/P n a half. Block b
 *             goes from b+1 round to b: ((x_b+1 o x_b+2) o ...) o x_b, indices modulo P.
 *             `ordered`: a chain, ((x_0 o x_1) o ...) o x_P-1, and back along it (allreduce), or
 *             from the last member straight to the owners (reduce-scatter): 2 n at most.
 *             broadcast: a chain from the root, n.
 *   HALVING   allreduce, reduce-scatter, allgather: log steps a half, (P-1)/P n a half, for any P.
 *             In step k = log-1 .. 0 of the first half, the data for the members 2^k .. 2^(k+1)-1 further on goes to
 *             member me + 2^k, which adds it (the operand of the lower index is the left one). Not for `ordered`. The
 *             second half is the same backwards.
 *   DOUBLING  allreduce (and reduce-scatter, as an allreduce of which only the own block counts):
 *             log steps of n. Neighbouring ranges of members are added, the lower one left: a balanced tree over x_0 ..
 *             x_P-1 in their order. If P is no power of two, the first 2 (P - 2^floor) members are added in pairs
 *             before, and told the result after. allgather: as HALVING. barrier: dissemination, log bare notices.
 *   TREE      allreduce: binomial, to member 0 and back, log n at the root; ranges of neighbours,
 *             the lower one left. broadcast: binomial from the root.
 *   PLANNED   allreduce: up a tree that is given, and down another (`tree`). A parent adds its children
 *             in the order of the list, each on the right. Not for `ordered`.
 *
 * Every element is added at one member, or on all members in the same tree: so all members get the same bits, in every
 * run.
 *
 * Write after read. A SEND without `copy` reads its bytes until the peer has them. A later RECV into the same memory
 * need not wait for that SEND: its message depends on the bytes sent, so its arrival proves theirs. In the ring the
 * finished block b reaches only members whose part is in it. The same holds for HALVING, the chain and the tree (the
 * root's result has every member's part in it). DOUBLING is the exception: both partners add into the memory that they
 * send at that time; there `copy` is 1, and the sum waits for the SEND. If memory is only sent, the end of the task
 * waits for the SEND: after that operation the caller owns the memory, even if a SEND that the result proves complete
 * is not yet reported done.
 *
 * Source: Rabenseifner 2004; Thakur et al. 2005; Bruck et al. 1997, and Traeff 2024 for its reverse
 * (HALVING). */
#ifndef MLFAB__ALGORITHM_H
#define MLFAB__ALGORITHM_H

#include "../wire/peer_wire.h"
#include "dag.h"

enum {
  MLFAB__COLLECTIVE_ALLREDUCE = 1,
  MLFAB__COLLECTIVE_REDUCE_SCATTER,
  MLFAB__COLLECTIVE_ALLGATHER,
  MLFAB__COLLECTIVE_BROADCAST,
  MLFAB__COLLECTIVE_BARRIER
};

#define MLFAB__COLLECTIVE_MEMBERS_MAX 1024u
/* COMPUTE: divide the stretch by the number of members. */
#define MLFAB__COLLECTIVE_DIVIDE 0xfffffff0u

typedef struct mlfab__algorithm_task {
  uint8_t kind;      /* MLFAB__COLLECTIVE_* */
  uint8_t algorithm; /* enum mlfab_algorithm */
  uint8_t ordered;   /* 1: the operation does not commute: x_0 o x_1 o ... o x_P-1 */
  uint8_t mean;      /* 1: reductions are divided by the number of members */
  uint32_t members, me, root;
  uint32_t width; /* bytes of an element */
  uint64_t count; /* elements altogether */
  /* Reduce-scatter and allgather: elements of each member's block, with the sum `count`; NULL: even. Read while
   * building only. */
  const uint64_t *counts;
  /* Most bytes of a message; at least one element, and more if there would be 2^16 messages. */
  uint32_t segment;
  uint32_t tag;   /* the first tag to use */
  uint32_t space; /* of the data */
  uint64_t at;    /* its start in the space */
  uint32_t after; /* operation for which the whole task waits, or MLFAB__DAG_NONE */
  uint8_t reduce; /* as in mlfab__dag_op */
  /* PLANNED: all members, by their numbers. Read while building only. NULL: PLANNED is impossible. */
  const mlfab__tree_node *tree;
} mlfab__algorithm_task;

/* Is it a tree of all n members: each once, one of them the root (no parent, no giver), and every way up
 * and every way down leads to it? *most_p: the largest number of children. Errors: ARGUMENT. */
MLFAB__INTERNAL int mlfab__algorithm_check_tree(const mlfab__tree_node *tree, uint32_t n,
                                                uint32_t *most_p);

/* Appends the task. *end_p: an operation that is done when the whole task is; *next_tag_p: the first free tag behind
 * it, the same for all members. The algorithm must be one that mlfab__algorithm_choose returns for this task. With
 * `mean` a COMPUTE of MLFAB__COLLECTIVE_DIVIDE divides each part that this member finishes before it sends it on.
 * Reduce-scatter leaves block `me` reduced and the others unspecified. O(messages). Errors: ARGUMENT (numbers out of
 * range, an algorithm that cannot do the task), and of the dag: MEMORY, LIMIT; the dag then holds a part, and must be
 * cleared. */
MLFAB__INTERNAL int mlfab__algorithm_build(mlfab__dag *dag, const mlfab__algorithm_task *task,
                                           uint32_t *end_p, uint32_t *next_tag_p);
/* The name, for instance "RING"; NULL if no algorithm has this number. */
MLFAB__INTERNAL const char *mlfab__algorithm_name(uint32_t algorithm);
/* Returns the algorithm for the task: its own if possible, else the cheapest that is possible. `me` does not matter:
 * all members choose the same. */
MLFAB__INTERNAL uint8_t mlfab__algorithm_choose(const mlfab__algorithm_task *task,
                                                double latency_ns, double bytes_per_ns,
                                                double add_bytes_per_ns);
/* Returns the time of the task by an algorithm, in ns, from the costs of a message, a byte sent and a byte added;
 * negative if the algorithm cannot do it. */
MLFAB__INTERNAL double mlfab__algorithm_cost(const mlfab__algorithm_task *task, uint8_t algorithm,
                                             double latency_ns, double bytes_per_ns,
                                             double add_bytes_per_ns);

#endif
