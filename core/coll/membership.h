/* membership.h - server 0 keeps the membership of collectives: who takes part, in which epoch, and verdicts. Layer 4.
 *
 *    IDLE --a worker's MEMBERSHIP--> GATHERING --MEMBERSHIP of every live worker that is not done--> LISTED: MEMBERSHIP_LIST to all
 *      LISTED --MEMBERSHIP_READY of all--> RUNNING: MEMBERSHIP_GO to all
 *      LISTED, RUNNING --verdict: MEMBERSHIP_OVER to all--> GATHERING
 *
 * Verdicts: a member died (PEER_DEAD, or PEER_CLOSED when it left without a word), is back as a new process or one that is no member
 * calls (AGAIN), a member says MEMBERSHIP_FAIL (its code and text; the first one counts), calls that differ (MISMATCH). A member that
 * leaves in good order (MEMBERSHIP_LEAVE, DONE) ends nothing: the others are told how far it came (MEMBERSHIP_LEFT), and fail what it
 * has not called by themselves.
 *
 * Waiting for others. While an epoch forms, everybody who waits is told who is missing, whenever that is
 * another: MEMBERSHIP_MISSING of epoch 0, where the rank has not said MEMBERSHIP, or MEMBERSHIP_READY.
 *
 * Stuck. A worker whose call is open for longer than a heartbeat says so (MEMBERSHIP_STUCK), once a beat. Server 0
 * asks all members whether they have called it (MEMBERSHIP_ASK): one call at a time, four a beat at most, and
 * not the same one twice in a beat; of those that come meanwhile the one with the lowest number is next.
 * From the answers (MEMBERSHIP_TELL) it finds who has not, and tells all (MEMBERSHIP_MISSING: the lowest rank, or else
 * one that did not answer for two beats, or nobody). When all have and signatures differ, the
 * verdict is MISMATCH: on the lowest rank that is not with the most (of two as many, those of the
 * lowest rank count), with both calls in words.
 *
 * Lost before. A worker that dies, closes or is done while no epoch stands was to be in the next one: the set that
 * has joined is that of epoch 1. Others are told when it would begin: it is over at once, with PEER_DEAD or PEER_CLOSED
 * naming the lowest rank of those who are missing. Whoever is back by then is not missing.
 *
 * Finishing. A worker that finishes (MEMBERSHIP_FINISH) fails nobody's call. Where it takes effect all must
 * agree on, and others may have begun calls that it has not called:
 *
 *    FINISH(calls) --FREEZE to all--> begins no more calls --FROZEN(begun) of all--> SETTLE(limit) to all
 *
 * The limit is the largest of what anybody had begun and of what those who finish had called: calls below it
 * are those of this epoch. One that a worker which has finished had not called it takes part in with the
 * operation's identity; a member that knows these calls describes them (MEMBERSHIP_OWED), and server 0 hands
 * that on. Nobody gives an identity before all know that it does (a mean is divided by the others' number), since
 * SETTLE comes after all FROZEN. A second worker that finishes has all freeze again, and the limit
 * stays. Who has ended all calls below the limit says so (MEMBERSHIP of this epoch; FINISH without a rank); when
 * all members have, the next epoch is listed at once, without a verdict. Until then all keep their
 * streams, so that nobody misses a byte. A worker that finishes while it is in no epoch, or in one that is
 * listed, is not a member of the next. Whoever has called more than the limit finishes in the next epoch.
 *
 * Leaving. Who leaves counts as ready; it is not waited for and not asked, and told of to whoever
 * greets anew. One that dies before it says goodbye ends the epoch all the same: others may wait for
 * its last bytes.
 *
 * Invariants. (1) One epoch at a time; numbers only grow, also over verdicts. (2) GO of an epoch comes
 * after READY of all its members: so whoever is IN knows that all others have left the epoch before.
 * (3) Each member hears exactly one MEMBERSHIP_OVER an epoch, said again on a new link until its MEMBERSHIP
 * tells that it knows (membership_ask.epoch); until then it is no member of another. (4) What a worker
 * that is dead says is ignored; frames of other epochs are ignored. (5) Memory: one entry a worker,
 * one call under inquiry a time.
 *
 * Members are ordered by host (the host of the lowest rank first), then by rank; with `order_by_rate` of
 * the configuration hosts with the most bandwidth first. go.round is the largest of the rolls' rounds.
 * An epoch has at most MLFAB__MEMBERSHIP_MEMBERS_MAX members: one that would have more is over at once,
 * with LIMIT. */
#ifndef MLFAB__MEMBERSHIP_H
#define MLFAB__MEMBERSHIP_H

#include "../base/env.h"
#include "../node/role.h"
#include "coll_wire.h"

enum mlfab__membership_phase {
  MLFAB__MEMBERSHIP_IDLE, /* nobody has ever asked */
  MLFAB__MEMBERSHIP_GATHERING,
  MLFAB__MEMBERSHIP_LISTED,
  MLFAB__MEMBERSHIP_RUNNING
};

typedef struct mlfab__membership_entry { /* a worker */
  uint8_t alive, done;                   /* alive: also while it is awaited at first */
  uint8_t asked;                         /* for the epoch that forms */
  uint8_t member, ready, arena;          /* of the epoch that stands */
  int32_t lost;   /* why it is missing from the epoch to come, untold; 0: it is not */
  uint8_t left;   /* a member that takes no further part ... */
  uint64_t calls; /* ... but for so many calls */
  uint8_t finished,
      frozen;         /* a member that has finished with `calls`; has answered the last FREEZE */
  uint8_t moved;      /* a member that has ended all calls below the limit */
  uint64_t begun;     /* calls, when it froze */
  uint32_t over_owed; /* epoch whose verdict it has not confirmed; 0: none */
  uint8_t over_well;  /* it was a member to the end, and has finished */
  uint32_t incarnation;
  int32_t missing; /* who it was told is missing */
  uint32_t lead;   /* the lowest rank among the members of its host */
  double rate;     /* that the host's link carries, bytes a second; 0: not known */
  /* The inquiry. */
  uint8_t told, called;
  uint64_t signature;
  char words[MLFAB__TEXT_MAX];
  mlfab__membership_ask ask;
} mlfab__membership_entry;

/* Which call is under inquiry, and since when; pending: another is to be. */
typedef struct mlfab__membership_inquiry {
  uint8_t open, pending;
  uint32_t channel, pending_channel;
  uint64_t number, pending_number;
  uint64_t asked_ns; /* 0: nothing was asked in this epoch */
} mlfab__membership_inquiry;

typedef struct mlfab__membership {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port; /* peers are workers */
  uint32_t workers;
  enum mlfab__membership_phase phase;
  uint32_t epoch; /* that stands, or was the last */
  uint32_t members;
  mlfab__membership_entry *entries; /* by rank */
  uint32_t *order;                  /* members */
  uint8_t *list;                    /* MEMBERSHIP_LIST of the epoch */
  uint32_t list_bytes;
  mlfab__membership_member *table; /* what it is made of */
  mlfab__membership_go go;
  mlfab__membership_over verdict; /* the last one */
  mlfab__membership_inquiry inquiry;
  uint8_t freezing; /* some have not answered FREEZE */
  int32_t finisher; /* the last rank that has finished in this epoch, or NO_RANK */
  uint64_t limit;   /* calls of this epoch; UINT64_MAX: not known */
} mlfab__membership;

/* Errors: MEMORY. Afterwards free works in any case. */
MLFAB__INTERNAL int mlfab__membership_init(mlfab__membership *membership, mlfab__env *env,
                                           const mlfab_config *config, const mlfab__port *port);
MLFAB__INTERNAL void mlfab__membership_free(mlfab__membership *membership);
/* Adds the rows of the membership, and of planned trees, at server 0 (comm_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__membership_attach(struct mlfab_node *node);
/* A worker is here on a new link; incarnation tells whether it is a new process. It is gone for good (`left`: said
 * goodbye). */
MLFAB__INTERNAL void mlfab__membership_hello(mlfab__membership *membership, uint32_t worker,
                                             uint32_t incarnation, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__membership_gone(mlfab__membership *membership, uint32_t worker,
                                            int left, uint64_t now_ns);
/* 1 when the frame was of this role. */
MLFAB__INTERNAL int mlfab__membership_frame(mlfab__membership *membership, uint32_t worker,
                                            const mlfab__frame_in *frame, uint64_t now_ns);
/* Four times a heartbeat. */
MLFAB__INTERNAL void mlfab__membership_tick(mlfab__membership *membership, uint64_t now_ns);

#endif
