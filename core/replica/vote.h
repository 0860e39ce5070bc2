/* vote.h - who serves a shard: its two copies and the scheduler decide it, two of three. Layer 4.
 *
 * A shard has two copies, A and B, and a witness W (the scheduler). A record says which copy serves, and which
 * copies have every durable update (are in sync). Records have ascending epochs:
 *
 *    (1, A, {A})  --B has the whole image-->  (e, A, {A,B})  --A is silent-->  (e, B, {B})  --A has the image--> ...
 *                                                 |--B lags or is silent-->  (e, A, {A})
 *
 * A record is decided when its proposer knows that two of the three voters, itself among them, have granted it. A
 * voter stores what it grants before it says so, and grants one record an epoch. The states of a voter:
 *
 *    UNKNOWN   it has lost what it had stored; it grants and echoes nothing  --both others have told it what they know--> KNOWN
 *    KNOWN     it grants (below)
 *    ASKING    KNOWN, and it has granted itself a record: it asks the others every beat
 *                --one of them grants it--> decided, KNOWN
 *                --it hears the copy that it wants to replace, or of a later record--> gives up, KNOWN
 *
 * What binds a voter is the latest record that it knows to be decided, or has granted to another voter. Its own
 * proposals do not: it alone counts their votes, and knows that it gave them up. (After a restart it does not know,
 * and its own bind it, too.) A voter grants a record to P if the epoch is larger than any that it has granted, and,
 * by the later of its own bond and P's:
 *  - P serves, and goes on serving: it changes the copies that are in sync, or renews its record;
 *  - P is in sync and does not serve: the voter is not the copy that serves, and has not heard that copy for 5 beats.
 *
 * Lease. A beat carries the sender's clock. A voter echoes it to the copy that serves by its bond, but not while it
 * asks to replace that copy. The copy that serves may acknowledge updates until 4 beats after it sent the last beat that
 * came back. A voter helps another copy to serve only 5 beats after it heard the present one, and echoes nothing to the
 * present one from then on. So clocks may differ in speed by a fifth.
 *
 * A copy asks to replace the one that serves when it is in sync by its own bond, or by a later one of another voter: the
 * copy that served may have died when it knew that a record was decided, and before it could say so.
 *
 * A voter that did not run for a time, with the others perhaps, counts them as heard when it runs again (node.h, Pauses):
 * it helps another copy later than it might. Its own lease has ended by its clock, and a new echo gives it back.
 *
 * A voter is heard as long as bytes of its link come, also those of a frame that is not complete: on a slow link a vote
 * waits behind a state. Leases count votes only.
 *
 * An empty copy (a new process, without the image) grants, but does not serve, and counts as silent: its number and
 * its stored record are those of a process whose data are gone.
 *
 * Invariants. (1) At most one record of an epoch is decided. (2) A copy that is promoted is in sync in the latest
 * record decided before: two deciding pairs have a voter in common, and the earlier record binds it, or it served by
 * that record itself. (3) While a copy has its lease, no other copy serves. (4) A voter that has lost its memory helps
 * nobody by what it has forgotten: each record that it helped to decide binds one of the others, and it waits for
 * both. (5) When two of three are up, remember, and reach each other, and a copy that is in sync is one of them, a
 * copy serves; else the shard halts. Exception: the witness granted a promotion, and the copy that asked for it
 * crashed: it may have served, so the other one may not.
 *
 * Source: MLfabric 3.3 has the replica, and is silent on failures. */
#ifndef MLFAB__VOTE_H
#define MLFAB__VOTE_H

#include "../base/env.h"

enum { MLFAB__VOTER_A, MLFAB__VOTER_B, MLFAB__VOTER_WITNESS, MLFAB__VOTERS };

enum { MLFAB__VOTE_LEASE_BEATS = 4, MLFAB__VOTE_SILENT_BEATS = 5 };

typedef struct mlfab__vote_record {
  uint32_t epoch;  /* from 1; 0: none */
  uint32_t serves; /* VOTER_A or VOTER_B */
  uint32_t insync; /* bits: copies that have every durable update */
} mlfab__vote_record;

enum mlfab__vote_kind {
  MLFAB__VOTE_BEAT,
  MLFAB__VOTE_ASK,   /* record: to be granted */
  MLFAB__VOTE_GRANT, /* record: granted and stored */
  MLFAB__VOTE_DENY
};

typedef struct mlfab__vote_message {
  uint32_t kind;
  uint32_t known, empty;        /* the sender's state */
  uint32_t floor;               /* the largest epoch that the sender has granted */
  mlfab__vote_record record;    /* ASK, GRANT */
  mlfab__vote_record decided;   /* the latest that the sender knows */
  mlfab__vote_record bond;      /* what binds the sender */
  uint64_t nonce, sent_ns;      /* of the sender's process; its clock */
  uint64_t echo_nonce, echo_ns; /* the last that came from the receiver; 0: no lease */
} mlfab__vote_message;

typedef struct mlfab__vote_peer {
  uint64_t heard_ns;       /* when the last message came that was not of an empty copy */
  uint64_t nonce, sent_ns; /* of its process; its clock in its last message */
  uint64_t lease_ns;       /* our clock, in our last message that it echoed; 0: none */
  uint32_t floor;          /* its largest epoch */
  uint8_t told;            /* UNKNOWN: it has told what it knows */
  uint8_t empty;           /* its last message was that of an empty copy */
} mlfab__vote_peer;

typedef struct mlfab__vote {
  uint32_t self;
  uint64_t beat_ns, nonce;
  int known;
  int empty;      /* a copy without the image */
  uint32_t floor; /* the largest epoch that this voter has granted */
  mlfab__vote_record decided, bond;
  mlfab__vote_record heard;  /* the latest bond of another voter, by which another copy serves */
  mlfab__vote_record own;    /* the last record that it granted itself */
  mlfab__vote_record stores; /* what is being stored; epoch 0: nothing. For whom: */
  uint32_t grantee;
  int asking; /* `own` is stored, and not decided yet */
  int outbid; /* a voter has denied `own`, because it has granted that epoch to another record */
  uint32_t wanted; /* the copies that this one, while it serves, wants in sync */
  uint64_t said_ns, looked_ns;
  mlfab__vote_peer peers[MLFAB__VOTERS];
  /* The way out: a message to another voter (lost without a link), and a record to store durably, after which the
   * caller calls mlfab__vote_stored, from outside this function. */
  void *user;
  void (*send)(void *user, uint32_t to, const mlfab__vote_message *message);
  void (*store)(void *user, const mlfab__vote_record *record);
  /* How long the link from another voter has been without a byte: its votes may wait behind a state. NULL: as long as
   * without a vote. */
  uint64_t (*quiet)(void *user, uint32_t from);
} mlfab__vote;

/* stored: what this voter's disk has, or NULL. fresh: the fabric is being formed, so there is nothing to remember.
 * Set user, send and store before. */
MLFAB__INTERNAL void mlfab__vote_begin(mlfab__vote *vote, uint32_t self, uint64_t beat_ns,
                                       uint64_t nonce, const mlfab__vote_record *stored, int fresh,
                                       uint64_t now_ns);
/* A message from another voter. Ignores what no voter sends. */
MLFAB__INTERNAL void mlfab__vote_take(mlfab__vote *vote, uint32_t from,
                                      const mlfab__vote_message *message, uint64_t now_ns);
/* The record of the last `store` is on disk. */
MLFAB__INTERNAL void mlfab__vote_stored(mlfab__vote *vote, uint64_t now_ns);
/* Every look at the clock; when the next one is due. */
MLFAB__INTERNAL void mlfab__vote_tick(mlfab__vote *vote, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__vote_deadline(const mlfab__vote *vote);
/* This process did not run for a time: the silence of the other voters starts late_ns later. Its lease does not. */
MLFAB__INTERNAL void mlfab__vote_awake(mlfab__vote *vote, uint64_t late_ns, uint64_t now_ns);
/* While this copy serves: these copies are to be in sync. The image is complete: the copy is not empty any more. */
MLFAB__INTERNAL void mlfab__vote_want(mlfab__vote *vote, uint32_t insync, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__vote_filled(mlfab__vote *vote);
/* Does this copy serve, as far as it knows? May it acknowledge updates now? */
MLFAB__INTERNAL int mlfab__vote_serves(const mlfab__vote *vote);
MLFAB__INTERNAL int mlfab__vote_may_ack(const mlfab__vote *vote, uint64_t now_ns);
/* Has this voter not heard the other one for 5 beats, nor a byte of its link? */
MLFAB__INTERNAL int mlfab__vote_silent(const mlfab__vote *vote, uint32_t other, uint64_t now_ns);

#endif
