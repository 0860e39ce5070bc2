/* shm_coll.h - collectives of the processes of one host, in shared memory.
 *
 * Declarations only: the code, which makes system calls, is in transports/shm_coll.c. A context gets a table of its
 * functions. They block and send no frames: members communicate through words in memory that the others map.
 *
 * All memory is memfds of sealed size. So no file system has a name of it, and all of it is gone when the processes
 * end.
 *
 *    segment     written by one member only, mapped read-only by the others:
 *      step        the member's progress in the rounds of this call
 *      asleep      it sleeps on a word of another member
 *      door[2]     `word`, and the member's input of a call: signature, flags, location of its vector
 *      entries     its other memories: descriptor, size, generation
 *      mapped      the generations of others' memories that it maps
 *    slots       entry 0; written by the others too:
 *      small[2]    a small vector
 *      in[3]       a round's data for the owners of its parts, and their results
 *      out[4]      this member's part of a round, when nothing is added
 *    vectors     in memory of shm_memory.h; written by the others too, during a call on them
 *
 * A call is turn t of the epoch (t counts calls that used the arena; `number` may skip). Every member first stores its
 * input for the others. Then it publishes door[t mod 2].word = (epoch, number + 1) by a release store, and waits for
 * the doors of all others (acquire). So every call is also a barrier, and all signatures are compared before any
 * member's data changes. All members reach the same verdict. The most frequent signature is right (on a tie, that of
 * the lower member). The culprit is the lowest member with a different signature.
 *
 * Reductions. The vector has n parts. Each member owns one part (of the caller's counts, or of about equal size). The
 * vector is processed in rounds that fit a cache. In iteration i a member
 *    (1) copies the parts of round i that others own into its in[i mod 3],
 *    (2) adds its own part of round i - 1, from all in[] and its vector, in the order of members, and
 *        stores the result in the place of each of the inputs,
 *    (3) copies the results of round i - 2 from its in[] into its vector,
 * and publishes step = base + i. Before that, it waits for all steps of iteration i - 1. A cache line of in[] moves to
 * the owner and back, twice a round; with separate results it would move four times. A member with a lent vector
 * (mapped by all others, see (I5)) does not copy: the others access its vector directly. There is one round if all
 * vectors are lent, or if the vector is small. If it is small and no vector is lent, every member adds all of small[]
 * itself, and waits for the doors only. Allgather and broadcast: in each round, parts pass through out[], or are read
 * from the lent vector. step = base + i + 1 means that round i is available, and that all rounds before i - 1 were
 * read.
 *
 * Invariants:
 *   (I1) A word is written by one member only, by release stores, after the data it refers to. `word` and
 *        `step` hold the epoch in their upper 24 bits: a word of another epoch is never accepted. Within
 *        an epoch steps only grow.
 *   (I2) small[t mod 2] is written again in turn t + 2, after the member has seen the doors of turn t + 1 of
 *        all others: all had left turn t.
 *   (I3) Others' writes to in[] and vectors are complete when their step of (2) is published. A member that leaves a
 *        call without error has seen these steps. in[i mod 3] is written again after (3) of round i. Rounds are counted
 *        over the whole epoch.
 *   (I4) out[i mod 4] is written for round i + 4 after the steps i + 3 of all others were seen: by then they have read
 *        round i. The owner of a lent vector does not leave before all last steps were seen.
 *   (I5) A vector is lent only when all others have confirmed that they map it, and its pages hold nothing else (M3 of
 *        shm_memory.h).
 *   (I6) A member that leaves a call early withdraws its door, then renews the pages of its slots and its lent vector.
 *        A slow or stopped member that still writes keeps the old pages to itself. A member that joins withdraws both
 *        doors and its step.
 *   (I7) Before a member uses the contents of the doors, and again before it succeeds, it checks that the doors of its
 *        beginning are unchanged. If so, all that it read is valid. If not, it waits for pause to return the reason. So
 *        a torn read is never used. A verdict from the doors withdraws no door: later members reach the same verdict,
 *        and nothing is written after it. Closing withdraws no door either.
 * Data read from another segment is not trusted: descriptors, sizes and positions are checked, and mappings have sealed
 * size. So a faulty member can corrupt slots and vectors only.
 *
 * Waiting: a hundred polls, some hundred pauses, then sched_yield, then a futex on the awaited word, in
 * slices. A sleeper first sets its `asleep`, then fences and polls again. A publisher fences and then reads the others'
 * `asleep` before it waits or returns. One of the two sees the other.
 *
 * Source: reduce-scatter and allgather in place. */
#ifndef MLFAB__SHM_COLL_H
#define MLFAB__SHM_COLL_H

#include "shm_memory.h"

#define MLFAB__SHM_COLL_MOST 64u /* maximum number of members */

/* The same numbers as MLFAB__COLLECTIVE_ALLREDUCE ... */
enum {
  MLFAB__SHM_COLL_ALLREDUCE = 1,
  MLFAB__SHM_COLL_REDUCE_SCATTER,
  MLFAB__SHM_COLL_ALLGATHER,
  MLFAB__SHM_COLL_BROADCAST,
  MLFAB__SHM_COLL_BARRIER
};

typedef struct mlfab__shm_coll mlfab__shm_coll;

/* The data by which other processes of this host find a member's segment. */
typedef struct mlfab__shm_coll_name {
  uint32_t pid;
  int32_t fd;
  uint64_t nonce, bytes;
} mlfab__shm_coll_name;

/* Called while a call waits: after about 50 us, then every 0.2 to 1 ms. A non-zero result ends the wait, and the call
 * returns it. */
typedef int (*mlfab__shm_coll_pause_fn)(void *user);

typedef struct mlfab__shm_coll_call {
  uint64_t number;    /* ascending within an epoch, below 2^40 - 1 */
  uint64_t signature; /* hash of all that must be equal on all members */
  int kind;           /* MLFAB__SHM_COLL_* */
  /* operation of kernels.h; MLFAB_OP_MEAN divides by the number of members. Unused for BARRIER */
  int dtype, op;
  uint32_t kernels;      /* config.kernels */
  int refuse;            /* 1: refuse NaN and infinity in this member's input */
  uint32_t root;         /* BROADCAST */
  const mlfab_vec *bufs; /* one vector of `count` elements, in place; buffers do not overlap */
  uint32_t nbufs;
  uint64_t count;
  const uint64_t *counts;         /* REDUCE_SCATTER, ALLGATHER: elements of each member's block */
  mlfab__shm_coll_pause_fn pause; /* not NULL */
  void *user;                     /* of pause */
} mlfab__shm_coll_call;

/* The functions; a transport's list entry gives them to a context. */
typedef struct mlfab__shm_coll_table {
  /* Creates this process's segment and, in `memory`, its slots: 2 MB of pages, allocated at first use. `memory` stays
   * until the arena is destroyed. Vectors in it are accessed in place from the third call on. Errors: MEMORY, IO (no
   * memfds here). */
  int (*create)(mlfab__env *env, mlfab__shm_memory *memory, mlfab__shm_coll **arena_p,
                mlfab__shm_coll_name *name_p);
  /* NULL: does nothing. */
  void (*destroy)(mlfab__shm_coll **arena_p);
  /* Begins a new epoch (its lower 24 bits count; 0 means none) among names[0..n); names[me] is this process. No call
   * may be under way. Keeps mapped segments that are still needed, and unmaps the others. Calls may be made when all
   * members have joined. Errors: UNSUPPORTED (more than 64; a segment that cannot be mapped: another user's, gone, or
   * different from its name), MEMORY; the arena then has no epoch. */
  int (*join)(mlfab__shm_coll *arena, const mlfab__shm_coll_name *names, uint32_t n, uint32_t me,
              uint32_t epoch);
  /* Runs a collective; all members call it with the same number, signature and sizes. REDUCE_SCATTER leaves
   * the blocks of others unchanged. Every element is added in the order of members. Returns 0; MISMATCH with the member
   * whose signature differs, or NOT_FINITE with the member whose data was refused (both on all members alike, with
   * nothing changed); FRAME with a member whose data is invalid; STATE without an epoch; or the result of pause. After
   * an error the arena has no epoch. After any error but MISMATCH and NOT_FINITE, the buffers' contents are undefined.
   * Cost: no allocation; system calls only if a member sleeps. One copy of the data that others need, and one copy of
   * their results; lent vectors are not copied. */
  int (*run)(mlfab__shm_coll *arena, const mlfab__shm_coll_call *call, uint32_t *culprit_p);
} mlfab__shm_coll_table;

/* NULL when MLFAB_WITH_SHM is 0. */
MLFAB__INTERNAL const mlfab__shm_coll_table *mlfab__shm_coll_functions(void);

#endif
