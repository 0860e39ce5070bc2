/* shm_coll.h - collectives of the processes of one host, in shared memory. Layer 1.
 *
 * Declarations only: transports/shm_coll.c has the code, as it makes system calls; a context is given its table of
 * functions. Blocking, without
 * frames: what a member has to say to the others are words in memory that they map.
 *
 * Memories, all memfds of sealed size. Nothing has a name in a file system, and nothing is left behind.
 *
 *    segment     a member alone writes it, the others map it for reading only:
 *      step        how far it is in this call's rounds
 *      asleep      it sleeps on a word of another's
 *      door[2]     `word` and what it brings to a call: signature, flags, where the vector lies
 *      entries     its other memories: descriptor, size, generation
 *      mapped      the generations of others' memories that it maps
 *    slots       entry 0; the others write here too:
 *      small[2]    a small vector
 *      in[3]       a round's data for the owners of its parts, and their results
 *      out[4]      this member's part of a round, when nothing is added
 *    vectors     of mlfab__shm_coll_alloc; the others write here too, during a call on them
 *
 * A call is turn t of the epoch (t counts calls that went through the arena; `number` may skip). Every
 * member puts what the others need first, then publishes door[t mod 2].word = (epoch, number + 1) by a
 * release store, and waits for the doors of all others (acquire). So every call is a barrier too,
 * signatures of all are compared before a byte of anybody's data is changed, and the verdict is the same
 * everywhere: the signature that most have is right (of equally many, that of the lower member), and
 * the lowest member that has another is the culprit.
 *
 * Reductions. The vector has n parts, one owned by each member (the caller's counts, or about equal
 * ones), and goes in rounds, so small that they stay in a cache. In iteration i a member
 *    (1) puts the parts of round i that others own into its in[i mod 3],
 *    (2) adds its own part of round i - 1, from all in[] and its vector, in the order of members, and
 *        puts the result where each of the inputs was,
 *    (3) takes the results of round i - 2 from its in[] into its vector,
 * and publishes step = base + i; before, it waits for all steps of iteration i - 1. A line of in[] is
 * handed to the owner and back: on its way from cache to cache it is moved twice a round, which with
 * results elsewhere would be four times. A member whose vector is lent (known to all others, see (I5))
 * neither puts nor takes: they go to the vector itself. When all vectors are, or the vector is
 * small, there is but one round. When it is small and none is lent, everybody adds all of small[] for
 * himself, and the door is all that is waited for.
 * Allgather, broadcast: parts go through out[], or are read in the vector that is lent, in rounds; step =
 * base + i + 1 says that round i is there, and that all before i - 1 were taken.
 *
 * Invariants:
 *   (I1) A word is written by one member only, by release stores; what it speaks of was written before.
 *        `word` and `step` hold the epoch in their upper 24 bits: a word of another epoch is never
 *        taken for one of this. Within an epoch steps only grow.
 *   (I2) small[t mod 2] is written again in turn t + 2, hence after the doors of turn t + 1 of all
 *        others were seen: everybody had left turn t.
 *   (I3) What others write to in[] and vectors, they have written when their step of (2) says so, and who
 *        leaves a call in good order has seen these steps. in[i mod 3] is put again after (3) of
 *        round i. Rounds are counted over the whole epoch.
 *   (I4) out[i mod 4] is written for round i + 4 after the steps i + 3 of all others were seen: they
 *        had taken round i. A lent vector's owner does not leave before all last steps were seen.
 *   (I5) A vector is lent only when all others have said that they map it, begins with a page, and ends
 *        with one or with its memory: nothing else lies in its pages.
 *   (I6) Who leaves a call early takes back its door, then gets new pages for its slots and its lent
 *        vector (with what was in it): whoever still writes, because it is slow or was stopped in
 *        the middle of a copy, has the old ones for itself. Who joins takes back both doors and step.
 *   (I7) Before it believes what the doors said, and again before it succeeds, a member looks whether the
 *        doors that it began with stand. If so, nothing that it read was overwritten. If not, it waits
 *        for pause to say why. So no torn read is used. A verdict over the doors takes nothing back: it
 *        is the same for those who come later, and nobody writes after it. Closing neither.
 * What is read from another's segment is not trusted: descriptors, sizes and places are checked, and
 * mappings are of sealed size, so that a broken member can spoil slots and vectors, but nothing else.
 *
 * Waiting: a hundred looks, some hundred pauses, then sched_yield, then a futex on the word that is waited
 * for, in slices. The sleeper sets its `asleep` first, fences and looks again; who publishes fences and
 * then looks at the others' `asleep` before it waits or returns. One of the two sees the other.
 *
 * Source: reduce-scatter and allgather in place. */
#ifndef MLFAB__SHM_COLL_H
#define MLFAB__SHM_COLL_H

#include "env.h"

#define MLFAB__SHM_COLL_MOST 64u /* members */

/* As the numbers of schedules: MLFAB__COLLECTIVE_ALLREDUCE ... */
enum {
  MLFAB__SHM_COLL_ALLREDUCE = 1,
  MLFAB__SHM_COLL_REDUCE_SCATTER,
  MLFAB__SHM_COLL_ALLGATHER,
  MLFAB__SHM_COLL_BROADCAST,
  MLFAB__SHM_COLL_BARRIER
};

typedef struct mlfab__shm_coll mlfab__shm_coll;

/* How others of this host find a member's segment. */
typedef struct mlfab__shm_coll_name {
  uint32_t pid;
  int32_t fd;
  uint64_t nonce, bytes;
} mlfab__shm_coll_name;

/* Called while a call waits: after about 50 us, then every 0.2 to 1 ms. Not 0 ends the wait, and
 * is what the call returns. */
typedef int (*mlfab__shm_coll_pause_fn)(void *user);

typedef struct mlfab__shm_coll_call {
  uint64_t number;    /* ascending within an epoch, below 2^40 - 1 */
  uint64_t signature; /* whatever must be the same for all members */
  int kind;           /* MLFAB__SHM_COLL_* */
  int dtype, op; /* of combine.h; MLFAB_OP_MEAN divides by the number of members. Not of BARRIER */
  int refuse;    /* 1: NaN and infinity in what this member brings are refused */
  uint32_t root; /* BROADCAST */
  const mlfab_vec *bufs; /* one vector of `count` elements, in place; they do not overlap */
  uint32_t nbufs;
  uint64_t count;
  const uint64_t *counts; /* REDUCE_SCATTER, ALLGATHER: elements of each member's block, in order */
  mlfab__shm_coll_pause_fn pause; /* not NULL */
  void *user;                     /* of pause */
} mlfab__shm_coll_call;

/* The functions, which a transport's entry in the list gives to a context. */
typedef struct mlfab__shm_coll_table {
  /* Makes this process's segment and slots, 2 MB of which pages count when they are first used. Errors:
   * UNSUPPORTED (no such files in memory here), MEMORY, IO. */
  int (*create)(mlfab__env *env, mlfab__shm_coll **arena_p, mlfab__shm_coll_name *name_p);
  /* Shared memory that was not released goes too. NULL does nothing. */
  void (*destroy)(mlfab__shm_coll **arena_p);
  /* A new epoch (only its lower 24 bits count, and 0 is none) among names[0..n), of which `me` is this
   * one. No call may be under way. Segments that are mapped already are kept, others unmapped. A call
   * may be run when all members have joined. Errors: UNSUPPORTED (more than 64; a segment that cannot be
   * mapped: another user's, gone, not what its name says), MEMORY; the arena is then in no epoch. */
  int (*join)(mlfab__shm_coll *arena, const mlfab__shm_coll_name *names, uint32_t n, uint32_t me,
              uint32_t epoch);
  /* Runs a collective; all members call it with the same number, signature and sizes. REDUCE_SCATTER
   * leaves blocks of others as they were. The order of adding is that of members, for every element.
   * 0; MISMATCH with the member whose signature differs, NOT_FINITE with the one whose data was refused
   * (for all members alike, and nothing was changed); FRAME with a member that says what cannot be; STATE
   * in no epoch; or what pause said. After an error the arena is in no epoch; but for the first two,
   * what the buffers hold is of no use.
   * Cost: no allocation, and no system call while all are awake. A copy of what others need, and one of
   * what they made; none for vectors that are lent. */
  int (*run)(mlfab__shm_coll *arena, const mlfab__shm_coll_call *call, uint32_t *culprit_p);
  /* Zeroed memory, at a page, that other members go to in place from the third call on it on; ordinary
   * memory where there are no descriptors left. NULL when there is none. When a call on it fails, its
   * pages are replaced by others with the same bytes. A second thread must not run a call meanwhile. */
  void *(*alloc)(mlfab__shm_coll *arena, uint64_t bytes);
  /* Others unmap it in their next large call. Errors: ARGUMENT (it is not of this arena). */
  int (*release)(mlfab__shm_coll *arena, void *memory);
} mlfab__shm_coll_table;

/* NULL when MLFAB_WITH_SHM is 0. */
MLFAB__INTERNAL const mlfab__shm_coll_table *mlfab__shm_coll_functions(void);

#endif
