/* arena.h - collectives of the processes of one host, in shared memory. Layer 1.
 *
 * Declarations only: transports/arena.c has the code, as it makes system calls. Blocking, without
 * frames: what a member has to say to the others are words in memory that they map.
 *
 * Segments. Every member has one, a memfd of fixed and sealed size, which it alone writes and the
 * others map for reading only. Memory of mlfab__arena_alloc is one memfd each, mapped likewise. So
 * nobody ever writes to another's memory: whatever happened to a call, its buffers are the
 * caller's again when it has returned. Nothing has a name in a file system, and nothing is left behind.
 *
 *    head        magic, size, nonce; `step`; `asleep`; the shared memories (descriptor, bytes,
 *                generation); which memories of others this member has mapped (`mapped`)
 *    door[2]     a line each: `word`, signature, flags, and which shared memory the data lies in; and
 *                behind it room for a small call's data
 *    in[3]       a round's data for the owners of its parts
 *    out[3]      this member's part of a round, done
 *
 * A call is turn t of the epoch (t counts calls that went through the arena; `number` may skip). Every
 * member puts what the others need first, then publishes door[t mod 2].word = (epoch, number + 1) by a
 * release store, and waits for the doors of all others (acquire). So every call is a barrier too,
 * signatures of all are compared before a byte of anybody's data is changed, and the verdict is
 * the same everywhere: the signature that most have is right (of equally many, the one of the lower
 * member), and the lowest member that has another is the culprit.
 *
 * Small calls: the data lies behind the door, and everybody adds all members' data himself, in the
 * order of members. Large calls: the vector has n parts, one owned by each member (the caller's
 * counts, or about equal ones), and goes in rounds of up to P bytes of every part. In iteration i a member
 *    (1) copies the parts of round i that others own to in[i mod 3]; step = base + 2i + 1
 *    (2) adds its own part of round i - 1 from all in[] to its buffer and to out[(i - 1) mod 3]; step
 *        = base + 2i + 2
 *    (3) copies the others' parts of round i - 2 from their out[] to its buffer,
 * and waits before (2) and (3) for the steps of those that it reads. A member whose data lies in shared
 * memory copies nothing: the others read its buffer itself, and it does not return before all steps say
 * that they have.
 *
 * Invariants:
 *   (I1) A word is written by one member only, by release stores; what it speaks of was written before.
 *        `word` and `step` hold the epoch in their upper 24 bits: a word of another epoch is never
 *        taken for one of this. Within an epoch steps only grow.
 *   (I2) door[t mod 2] and its data are written again in turn t + 2, and so after the doors of turn
 *        t + 1 of all others were seen: everybody had left turn t.
 *   (I3) in[i mod 3] is written again for round i + 3, which is after (3) of round i, hence
 *        after everybody's (2) of round i, their last reading of it. out[i mod 3] is written
 *        again in (2) of round i + 3, after everybody's (1) of that round, hence after their (3)
 *        of round i. Rounds are counted over the whole epoch.
 *   (I4) In shared memory, a member overwrites another's part of a round in (3) only, when that one's
 *        step says that it has read it.
 *   (I5) Who leaves a call early, or joins a new epoch, takes back its doors and its step before
 *        anything else is written. Who is through with reading looks at the doors that it began with
 *        once more: if they all stand, nothing that it read was overwritten. If not, the call does
 *        not succeed: it waits for pause to say why. So no torn read is used. A verdict over the
 *        doors takes nothing back, since nobody reads data after it; neither does closing.
 *   (I6) A member reads in shared memory of another only what that one knows it has mapped.
 * What is read from another's segment is not trusted: descriptors, sizes and places are checked, and
 * mappings are of sealed size, so that a broken member can spoil results, but nothing else.
 *
 * Waiting: a few hundred pauses, then sched_yield, then a futex on the word that is waited for, in
 * slices. The sleeper sets its `asleep` first, fences and looks again; who publishes fences and then
 * looks at the others' `asleep` before it waits or returns. One of the two sees the other. */
#ifndef MLFAB__ARENA_H
#define MLFAB__ARENA_H

#include "env.h"

#define MLFAB__ARENA_MOST 64u /* members */

/* As the numbers of schedules: MLFAB__RING_ALLREDUCE ... */
enum {
  MLFAB__ARENA_ALLREDUCE = 1,
  MLFAB__ARENA_REDUCE_SCATTER,
  MLFAB__ARENA_ALLGATHER,
  MLFAB__ARENA_BROADCAST,
  MLFAB__ARENA_BARRIER
};

typedef struct mlfab__arena mlfab__arena;

/* How others of this host find a member's segment. */
typedef struct mlfab__arena_name {
  uint32_t pid;
  int32_t fd;
  uint64_t nonce, bytes;
} mlfab__arena_name;

/* Called while a call waits: after about 50 us, then every 0.2 to 1 ms. Not 0 ends the wait, and
 * is what the call returns. */
typedef int (*mlfab__arena_pause_fn)(void *user);

typedef struct mlfab__arena_call {
  uint64_t number;    /* ascending within an epoch, below 2^40 - 1 */
  uint64_t signature; /* whatever must be the same for all members */
  int kind;           /* MLFAB__ARENA_* */
  int dtype, op; /* of combine.h; MLFAB_MEAN divides by the number of members. Not of BARRIER */
  int refuse;    /* 1: NaN and infinity in what this member brings are refused */
  uint32_t root; /* BROADCAST */
  const mlfab_vec *bufs; /* one vector of `count` elements, in place; they do not overlap */
  uint32_t nbufs;
  uint64_t count;
  const uint64_t *counts; /* REDUCE_SCATTER, ALLGATHER: elements of each member's block, in order */
  mlfab__arena_pause_fn pause;
  void *user; /* of pause */
} mlfab__arena_call;

/* Makes this process's segment, some 4 MB of which pages count when they are first used. Errors:
 * UNSUPPORTED (not Linux, or left out by MLFAB_WITH_SHM), MEMORY, IO. */
MLFAB__INTERNAL int mlfab__arena_create(mlfab__env *env, mlfab__arena **arena_p,
                                        mlfab__arena_name *name_p);
/* Shared memory that was not released goes too. NULL does nothing. */
MLFAB__INTERNAL void mlfab__arena_destroy(mlfab__arena **arena_p);

/* A new epoch (only its lower 24 bits count, and 0 is none) among names[0..n), of which `me` is this
 * one. No call may be under way. Segments that are mapped already are kept, others unmapped. A call
 * may be run when all members have joined. Errors: UNSUPPORTED (more than 64; a segment that cannot be
 * mapped: another user's, gone, not what its name says), MEMORY; the arena is then in no epoch. */
MLFAB__INTERNAL int mlfab__arena_join(mlfab__arena *arena, const mlfab__arena_name *names,
                                      uint32_t n, uint32_t me, uint32_t epoch);

/* Runs a collective; all members call it with the same number, signature and sizes. REDUCE_SCATTER
 * leaves blocks of others as they were. The order of adding is that of members, for every element.
 * 0; SHAPE with the member whose signature differs, NOT_FINITE with the one whose data was refused
 * (for all members alike, and nothing was changed); STATE in no epoch; or what pause said. After an
 * error the arena is in no epoch, and what the buffers hold is of no use.
 * Cost: no allocation, and no system call while all are awake. Own buffers: a copy of what others
 * need, and one of what they made. */
MLFAB__INTERNAL int mlfab__arena_run(mlfab__arena *arena, const mlfab__arena_call *call,
                                     uint32_t *culprit_p);

/* Zeroed memory, at a page, that other members can read in place; ordinary memory where there are no
 * descriptors left. NULL when there is none. A second thread must not run a call meanwhile. */
MLFAB__INTERNAL void *mlfab__arena_alloc(mlfab__arena *arena, uint64_t bytes);
/* Others unmap it in their next large call. Errors: ARGUMENT (it is not of this arena). */
MLFAB__INTERNAL int mlfab__arena_release(mlfab__arena *arena, void *memory);

#endif
