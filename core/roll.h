/* roll.h - server 0 keeps the roll of collectives: who takes part, in which epoch, and verdicts. Layer 4.
 *
 *    IDLE --a worker's ROLL--> GATHERING --ROLL of every live worker that is not done--> LISTED: ROLL_LIST to all
 *      LISTED --ROLL_READY of all--> RUNNING: ROLL_GO to all
 *      LISTED, RUNNING --verdict: ROLL_OVER to all--> GATHERING
 *
 * Verdicts: a member died (PEER_DEAD, or PEER_CLOSED when it left without a word), is back as a new process or one that is no member
 * calls (AGAIN), a member says ROLL_FAIL (its code and text; the first one counts), calls that differ (SHAPE). A member that
 * leaves in good order (ROLL_LEAVE, DONE) ends nothing: the others are told how far it came (ROLL_LEFT), and fail what it
 * has not called by themselves.
 *
 * Stuck. A worker whose call is open for longer than a heartbeat says so (ROLL_STUCK), once a beat. Server 0 asks all
 * members whether they have called it (ROLL_ASK, at most once a beat and call); from the answers (ROLL_TELL) it finds who has not, and tells all
 * (ROLL_MISSING: the lowest rank, or one that did not answer for two beats), or, when all have and signatures differ, the verdict SHAPE
 * on the rank that differs from most (the lowest signature of the lowest rank counts where none has more), with both calls in words.
 *
 * Invariants. (1) One epoch at a time; numbers only grow, also over verdicts. (2) GO of an epoch comes after READY of all its
 * members: so whoever is IN knows that all others have left the epoch before. (3) Each member hears exactly one ROLL_OVER an epoch, said again on a new link
 * until its ROLL tells that it knows (roll_ask.epoch). (4) What a member that is dead or unknown says is ignored; frames of other epochs are ignored. (5) Memory:
 * one entry a worker, one call under inquiry a time.
 *
 * Members are ordered by host (the host of the lowest rank first), then by rank; with `order_by_rate` of the configuration
 * hosts with the most bandwidth first. go.round is the largest of the rolls' rounds. */
#ifndef MLFAB__ROLL_H
#define MLFAB__ROLL_H

#include "env.h"
#include "port.h"

enum mlfab__roll_phase {
  MLFAB__ROLL_IDLE,
  MLFAB__ROLL_GATHERING,
  MLFAB__ROLL_LISTED,
  MLFAB__ROLL_RUNNING
};

typedef struct mlfab__roll_entry { /* a worker */
  uint8_t alive, done, asked, member, ready,
      over_owed;        /* over_owed: has not confirmed the last verdict */
  uint8_t told, called; /* of the inquiry */
  uint32_t incarnation;
  uint64_t signature;
  char words[MLFAB__TEXT_MAX];
  mlfab__roll_ask ask;
} mlfab__roll_entry;

typedef struct mlfab__roll {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port; /* peers are workers */
  uint32_t workers;
  enum mlfab__roll_phase phase;
  uint32_t epoch, members;
  mlfab__roll_entry *entries; /* by rank */
  uint32_t *order;            /* members */
  mlfab__roll_over verdict;   /* the last one */
  /* The inquiry. */
  uint32_t channel;
  uint64_t number, asked_ns; /* asked_ns 0: none */
} mlfab__roll;

/* Errors: MEMORY. Afterwards free works in any case. */
MLFAB__INTERNAL int mlfab__roll_init(mlfab__roll *roll, mlfab__env *env, const mlfab_config *config,
                                     const mlfab__port *port);
MLFAB__INTERNAL void mlfab__roll_free(mlfab__roll *roll);
/* A worker is here on a new link; incarnation tells whether it is a new process. It is gone for good (`left`: said
 * goodbye); it has said DONE. */
MLFAB__INTERNAL void mlfab__roll_hello(mlfab__roll *roll, uint32_t worker, uint32_t incarnation,
                                       uint64_t now_ns);
MLFAB__INTERNAL void mlfab__roll_gone(mlfab__roll *roll, uint32_t worker, int left,
                                      uint64_t now_ns);
MLFAB__INTERNAL void mlfab__roll_done(mlfab__roll *roll, uint32_t worker, uint64_t now_ns);
/* 1 when the frame was of this role. */
MLFAB__INTERNAL int mlfab__roll_frame(mlfab__roll *roll, uint32_t worker,
                                      const mlfab__frame_in *frame, uint64_t now_ns);
/* Four times a heartbeat. */
MLFAB__INTERNAL void mlfab__roll_tick(mlfab__roll *roll, uint64_t now_ns);

#endif
