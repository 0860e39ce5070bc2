/* vote.h - who serves a shard: its two copies and the scheduler decide it, two of three.
 *
 * A shard has two copies, A and B, and a witness W (the scheduler). A record says which copy serves, and which
 * copies have every durable update (are in sync). Records have ascending epochs:
 *
 *    (1, A, {A})  --B has the whole image-->  (e, A, {A,B})  --A is silent-->  (e, B, {B})  --A has the image--> ...
 *                                                 |--B lags or is silent-->  (e, A, {A})
 *
 * A record is decided when its proposer knows that two of the three voters, itself included, have granted it. A voter
 * stores a grant before it announces it, and grants one record per epoch. The states of a voter:
 *
 *    UNKNOWN   it has lost what it had stored; it grants and echoes nothing  --both others have told it what they know--> KNOWN
 *    KNOWN     it grants (below)
 *    ASKING    KNOWN, and it has granted itself a record: it asks the others every beat
 *                --one of them grants it--> decided, KNOWN
 *                --it hears the copy that it wants to replace, or of a later record--> gives up, KNOWN
 *
 * A voter is bound by the latest record that it knows to be decided, or has granted to another voter (its bond). Its
 * own proposals do not bind it: it alone counts their votes, and knows that it gave them up. (After a restart it does
 * not know: they bind it, too.) A voter grants P a record of a larger epoch than any that it has granted if, by the
 * later of its own bond and P's:
 *  - P serves, and goes on serving: it changes the copies that are in sync, or renews its record;
 *  - P is in sync and does not serve: the voter is not the serving copy, and has not heard that copy for 5 beats.
 *
 * Lease. A beat carries the sender's clock. A voter echoes it to the copy that serves by its bond, but not while it
 * asks to replace that copy. The copy that serves may acknowledge updates until 4 beats after it sent the last beat
 * that came back. A voter helps another copy to serve only 5 beats after it heard the serving copy, and from then on
 * echoes nothing to that copy. So the clocks may differ in speed by a fifth.
 *
 * A copy asks to replace the serving copy if its own bond, or a later bond of another voter, says that it is in sync:
 * the serving copy may have died between the decision of that record and its first word of it.
 *
 * A voter that did not run for a time, perhaps like the others, counts them as heard when it runs again (node.h,
 * Pauses): it helps later than it might. Its own lease has ended by its clock, and a new echo gives it back.
 *
 * A voter counts as heard while bytes arrive on its link, even bytes of an incomplete frame: on a slow link a vote
 * waits behind a state. Leases count votes only.
 *
 * An empty copy (a new process without the image) grants, but does not serve, and counts as silent. It has the number
 * and the stored record of a process that lost its data.
 *
 * Invariants. (1) At most one record of an epoch is decided. (2) A promoted copy is in sync in the latest record
 * decided before: two deciding pairs share a voter. The earlier record binds that voter, or that voter is the copy that
 * served by it. (3) While a copy has its lease, no other copy serves. (4) A voter that has lost its memory cannot help
 * by mistake: each record that it helped to decide binds one of the others, and it waits for both. (5) If two of three
 * voters are up, remember, reach each other, and one is a copy in sync, a copy serves; else the shard halts. Exception:
 * the witness granted a promotion and the copy that asked for it crashed. As it may have served, the other may not.
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
  mlfab__vote_record decided;   /* the latest decided record that the sender knows */
  mlfab__vote_record bond;      /* the record that binds the sender */
  uint64_t nonce, sent_ns;      /* nonce of the sender's process; its clock */
  uint64_t echo_nonce, echo_ns; /* same of the receiver's last message; 0: no lease */
} mlfab__vote_message;

typedef struct mlfab__vote_peer {
  uint64_t heard_ns;       /* when the last message came from a copy that is not empty */
  uint64_t nonce, sent_ns; /* nonce of its process; its clock in its last message */
  uint64_t lease_ns;       /* our clock, in our last message that this voter echoed; 0: none */
  uint32_t floor;          /* largest epoch it granted */
  uint8_t told;            /* UNKNOWN: this voter has reported its records */
  uint8_t empty;           /* its last message was that of an empty copy */
} mlfab__vote_peer;

typedef struct mlfab__vote {
  uint32_t self;
  uint64_t beat_ns, nonce;
  int known;
  int empty;      /* a copy without the image */
  uint32_t floor; /* the largest epoch that this voter has granted */
  mlfab__vote_record decided, bond;
  mlfab__vote_record heard;  /* the latest bond of another voter that names another serving copy */
  mlfab__vote_record own;    /* the last record that it granted itself */
  mlfab__vote_record stores; /* the record being stored; epoch 0: none. Its proposer: */
  uint32_t grantee;
  int asking; /* `own` is stored, and not decided yet */
  int outbid; /* a voter has denied `own`, because it has granted that epoch to another record */
  uint32_t wanted; /* copies that this copy, while it serves, wants in sync */
  uint64_t said_ns, looked_ns;
  mlfab__vote_peer peers[MLFAB__VOTERS];
  /* Output of the votes: `send` sends a message to another voter (lost without a link). `store` stores a record
   * durably; afterwards the caller calls mlfab__vote_stored, from outside `store`. */
  void *user;
  void (*send)(void *user, uint32_t to, const mlfab__vote_message *message);
  void (*store)(void *user, const mlfab__vote_record *record);
  /* Returns the time since the last byte on the link from another voter: its votes may wait behind a state. NULL: the
   * time since its last vote counts. */
  uint64_t (*quiet)(void *user, uint32_t from);
} mlfab__vote;

/* Starts the votes. stored: the record on this voter's disk, or NULL. fresh: the fabric is being formed, so there is
 * nothing to remember. The caller sets user, send and store before. */
MLFAB__INTERNAL void mlfab__vote_begin(mlfab__vote *vote, uint32_t self, uint64_t beat_ns,
                                       uint64_t nonce, const mlfab__vote_record *stored, int fresh,
                                       uint64_t now_ns);
/* Takes a message from another voter. Ignores a message that no voter can send. */
MLFAB__INTERNAL void mlfab__vote_take(mlfab__vote *vote, uint32_t from,
                                      const mlfab__vote_message *message, uint64_t now_ns);
/* Continues after the record of the last `store` is on disk. */
MLFAB__INTERNAL void mlfab__vote_stored(mlfab__vote *vote, uint64_t now_ns);
/* tick: call it at every look at the clock. deadline: returns when the next look is due. */
MLFAB__INTERNAL void mlfab__vote_tick(mlfab__vote *vote, uint64_t now_ns);
MLFAB__INTERNAL uint64_t mlfab__vote_deadline(const mlfab__vote *vote);
/* Tells that this process did not run for a time: the others' silence starts late_ns later, its lease as before. */
MLFAB__INTERNAL void mlfab__vote_awake(mlfab__vote *vote, uint64_t late_ns, uint64_t now_ns);
/* want: the copies to be in sync while this copy serves. filled: the image is complete, the copy no longer empty. */
MLFAB__INTERNAL void mlfab__vote_want(mlfab__vote *vote, uint32_t insync, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__vote_filled(mlfab__vote *vote);
/* serves: does this copy serve, as far as it knows? may_ack: may it acknowledge updates now? */
MLFAB__INTERNAL int mlfab__vote_serves(const mlfab__vote *vote);
MLFAB__INTERNAL int mlfab__vote_may_ack(const mlfab__vote *vote, uint64_t now_ns);
/* Returns 1 if for 5 beats neither a vote of the other voter came, nor a byte on its link. */
MLFAB__INTERNAL int mlfab__vote_silent(const mlfab__vote *vote, uint32_t other, uint64_t now_ns);

#endif
