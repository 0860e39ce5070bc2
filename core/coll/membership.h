/* membership.h - server 0 keeps the membership of collectives: who takes part, in which epoch, and verdicts. Layer 4.
 *
 *    IDLE --MEMBERSHIP of a worker--> GATHERING --MEMBERSHIP of every live worker--> LISTED: MEMBERSHIP_LIST to all
 *      LISTED --MEMBERSHIP_READY of all--> RUNNING: MEMBERSHIP_GO to all
 *      LISTED, RUNNING --verdict: MEMBERSHIP_OVER to all--> GATHERING
 *
 * Verdicts. A member dies, or a new process has its place before anybody has noticed that (PEER_DEAD); it closes without a word
 * (PEER_CLOSED); a worker that was taken for dead calls, or one that returns has called in vain (AGAIN);
 * a member says MEMBERSHIP_FAIL (its code and text; the first one counts);
 * calls differ (MISMATCH). A member that leaves in good order (MEMBERSHIP_LEAVE, DONE) ends nothing: server 0 tells
 * the others how many calls it has called (MEMBERSHIP_LEFT), and they fail later calls themselves.
 *
 * Waiting. While an epoch forms, server 0 tells all workers that wait which rank is missing, whenever that changes:
 * MEMBERSHIP_MISSING of epoch 0. The rank has not said MEMBERSHIP, or MEMBERSHIP_READY.
 *
 * Stuck calls. A worker whose call is open for longer than a heartbeat says so (MEMBERSHIP_STUCK), once a beat. Server 0
 * asks all members whether they have called it (MEMBERSHIP_ASK): one call at a time, at most four a beat, and not the
 * same one twice in a beat. If others get stuck meanwhile, it asks about the lowest number next. The members answer
 * (MEMBERSHIP_TELL); server 0 tells all who has not called (MEMBERSHIP_MISSING: the lowest rank; else a rank that has not
 * answered for two beats; else nobody). When all have called and signatures differ, the verdict is MISMATCH. It names
 * the lowest rank that is not with the majority (of two equal groups, that of the lowest rank is the majority), with
 * both calls in words.
 *
 * Lost before an epoch. A worker that dies, closes or is done while no epoch stands should have been in the next one
 * (in epoch 1: any worker), unless it joins. The next epoch then ends as it begins, with PEER_DEAD or PEER_CLOSED,
 * naming the lowest rank that is missing; joiners go on waiting. A worker that is back by then, and has made the call with which the
 * epoch begins, is not missing.
 *
 * Finishing. A worker that finishes (MEMBERSHIP_FINISH) fails nobody's call. All members must agree from which call on
 * it is absent, and others may have begun calls that it has not called:
 *
 *    FINISH(calls) --FREEZE to all--> members begin no more calls --FROZEN(begun) of all--> SETTLE(limit) to all
 *
 * The limit is the largest number of calls that a member had begun, or that a worker had called when it finished. Calls
 * below it belong to this epoch. The worker takes part in those that it had not called with the operation's identity:
 * a member that knows them describes them (MEMBERSHIP_OWED), and server 0 hands that on. SETTLE comes after all FROZEN, so
 * all members know that a worker gives an identity before it does (a mean is divided by the number of the others).
 * When a second worker finishes, all freeze again, and the limit stays. A member that has ended all calls below the
 * limit says so (MEMBERSHIP of this epoch; FINISH without a rank). When all have, server 0 lists the next epoch at once,
 * without a verdict. Until then all keep their streams, so that nobody misses a byte. A worker that finishes outside
 * an epoch, or in one that is listed, is not a member of the next. A worker that has called more than the limit finishes
 * in the next epoch.
 *
 * Joining. A worker whose number nobody has had, or whose former process left in good order, fails nobody's call when
 * it comes, and nobody waits for it before it calls. MEMBERSHIP has the signature of its first call. It is in the epoch that
 * forms if all others have told the same signature. When an epoch runs, the exchange is that of a worker that finishes, but
 * the limit is sought:
 *
 *    FREEZE (calls UINT64_MAX), FROZEN(begun), SETTLE(limit, seek: signatures of joiners' first calls)
 *
 * From the limit on, members begin calls that are not sought. Each stops before the first that is sought, and says
 * MEMBERSHIP with that signature when it has ended the calls before it. All make the same calls, so all stop at the same
 * one; the next epoch begins with it and has the joiner. A joiner with another first call has all freeze anew. At most
 * MLFAB__MEMBERSHIP_SEEK signatures are sought at once. A worker that finishes meanwhile ends the search: joiners are sought
 * in the next epoch. A call that nobody else makes ends at its deadline, which names it and a call of the others (FROZEN,
 * MISSING). Objects (partial and stochastic reductions, task graphs) stay with the members that opened them: as long as a
 * member has one open, SETTLE says no limit, the joiner goes on waiting, and server 0 tries again a heartbeat later. For
 * the same reason joiners are not in an epoch that forms after a failure while its members have objects.
 *
 * Returning. A process that takes the place of one that died returns: it joins in the same way. Nobody waits for it before its
 * first call, and then the members seek that call. But a program may have all agree anew after a failure, by calls that its loop does
 * not make; and nobody can close objects that were opened with the dead one, but their members. So the epoch ends with
 * AGAIN if members have objects open, or if they do not make its first call within a tenth of timeout_ns. The next epoch has it,
 * whatever it calls.
 *
 * Newcomers. A process that came to a fabric which was there (a joiner, or one that replaces a dead worker) is a newcomer
 * until it has been in an epoch. Rounds, barriers and collectives admit it at one point: its first collective that
 * others make with it, or its first barrier where the loop has no collective.
 *
 *    TRIAL --first collective or barrier, all its updates are decided--> APART
 *      APART --all others have called: READY, with their progress and barriers--> RETURNS --all servers count it--> MEMBER
 *      APART --its call fails--> TRIAL
 *
 * TRIAL: rounds count it from the end of its model_start on (server/clock.c). No barrier and no collective waits for it.
 * APART: it waits in a call. It tells all servers and the barrier, and nobody waits for it. So the others reach the call,
 * in whatever order a loop has its calls. Two bits, MLFAB__APART_*, tell which kind of call waits; rounds count it when
 * neither does, and a collective comes first. A collective of an epoch that has newcomers begins when every member has
 * called it: each says READY then, with its progress and its barriers when it called. Server 0 tells newcomers the largest
 * progress. RETURNS: its number is this one and the updates that it has begun since its own call; undecided ones get numbers
 * from there. Rounds that are closed by then get no update: those that follow count for them. It asks the servers to count
 * it, waits for all, then enters the barriers where the others were, and says READY. Newcomers alone follow the first of
 * them, which keeps its number. After the call all are at the same place of their loops, and all have the same numbers. A
 * newcomer that has pushed into a round that no other has reached would be one round ahead. Its number falls to theirs: that
 * update stays in the round, and its next one is in the same round. A barrier does the same (barrier.h).
 *
 * Invariants. (a) Nobody waits for a process that waits for somebody else's call without having been admitted. (b) GO of
 * an epoch comes after all servers count its newcomers. (c) A newcomer that dies on the way before LIST has failed
 * nobody's call; after LIST it is a member like others. If the epoch ends before GO, it is a newcomer again, unless it has
 * said READY: then all count it, and its call has failed where theirs have. (d) A loop needs a place that its first collective marks: of
 * equal collectives in a step the library cannot tell which one a joiner makes, unless they have tags.
 *
 * Leaving. A member that leaves counts as ready; server 0 neither waits for it nor asks it, and tells of it on every new
 * link. If it dies before it says goodbye, the epoch ends all the same: others may wait for its last bytes.
 *
 * Invariants. (1) There is one epoch at a time; its number only grows. (2) GO of an epoch comes after READY of all its
 * members: so when a worker is IN, all others have left the epoch before. (3) Each member hears exactly one
 * MEMBERSHIP_OVER an epoch. Server 0 repeats it on a new link until the member's MEMBERSHIP confirms it
 * (membership_ask.epoch); until then the worker is no member of another epoch. (4) Server 0 ignores what a dead worker
 * says, and frames of other epochs. (5) Memory: one entry a worker, one inquiry.
 *
 * At a server 0 with a replica the other copy has all of it but inquiries and who was named as missing: those begin anew
 * when that copy takes over.
 *
 * Members are ordered by host (the host of the lowest rank first), then by rank; with `order_by_rate` of
 * the configuration hosts with the most bandwidth first. go.round is the largest round that a member has told.
 * An epoch has at most MLFAB__MEMBERSHIP_MEMBERS_MAX members: one that would have more ends as it begins,
 * with LIMIT; but joiners only get in where there is room. One that comes to a full epoch hears MEMBERSHIP_OVER of it
 * with LIMIT, once, and then waits until a member leaves, finishes or dies. */
#ifndef MLFAB__MEMBERSHIP_H
#define MLFAB__MEMBERSHIP_H

#include "../base/env.h"
#include "../node/mirrored.h"
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
  uint8_t well;       /* its former (gone: last) process left in good order, or it has had none */
  uint8_t joins;      /* no member yet, and fails nobody's call; not `well`: it returns */
  uint64_t waited;    /* one that returns: for so many ns since it has asked */
  uint8_t open;       /* it had objects when it froze */
  uint8_t fresh;      /* it has been in no epoch, and came to a fabric that was there */
  uint32_t over_owed; /* epoch whose verdict it has not confirmed; 0: none */
  uint8_t over_well;  /* it was a member to the end, and has finished */
  uint32_t incarnation;
  int32_t missing; /* who it was told is missing, and whether that rank waits in a barrier */
  uint8_t missing_waits;
  uint32_t place; /* of a member: in `order` */
  uint32_t lead;  /* the lowest rank among the members of its host */
  double rate;    /* that the host's link carries, bytes a second; 0: not known */
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
  struct mlfab__barrier_server
      *barrier; /* of this node: for errors that say who waits where; or NULL */
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
  int32_t
      finisher; /* the last rank that has finished in this epoch, or joins the next; or NO_RANK */
  /* Joiners wait for this member's objects, for so many more looks at the clock; 0: they do not. */
  int32_t keeper;
  uint32_t kept;
  uint64_t limit; /* calls of this epoch; UINT64_MAX: not known */
  uint64_t seek
      [MLFAB__MEMBERSHIP_SEEK]; /* it ends before the first of these from the limit on; 0: no more */
  char others[MLFAB__TEXT_MAX]; /* the call of the keeper, in words, for joiners */
  mlfab__touch *touch;          /* a replica of server 0 has it, too; or NULL */
} mlfab__membership;

/* Errors: MEMORY. Afterwards free works in any case. */
MLFAB__INTERNAL int mlfab__membership_init(mlfab__membership *membership, mlfab__env *env,
                                           const mlfab_config *config, const mlfab__port *port);
MLFAB__INTERNAL void mlfab__membership_free(void *self);
/* Adds the row of the membership, *membership_p, at server 0 (comm_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__membership_attach(struct mlfab_node *node,
                                             struct mlfab__barrier_server *barrier,
                                             mlfab__membership **membership_p);
/* A worker has a new link; the incarnation tells whether it is a new process. A worker is gone for good (`left`: it said
 * goodbye). */
MLFAB__INTERNAL void mlfab__membership_hello(mlfab__membership *membership, uint32_t worker,
                                             uint32_t incarnation, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__membership_gone(mlfab__membership *membership, uint32_t worker,
                                            int left, uint64_t now_ns);
/* 1 when the frame was of this role. */
MLFAB__INTERNAL int mlfab__membership_frame(mlfab__membership *membership, uint32_t worker,
                                            const mlfab__frame_in *frame, uint64_t now_ns);
/* Four times a heartbeat. */
MLFAB__INTERNAL void mlfab__membership_tick(void *self, uint64_t now_ns);
/* Members, with their asks and places, are as another copy had them: makes what follows from that. */
MLFAB__INTERNAL void mlfab__membership_resume(mlfab__membership *membership);
/* The membership as records: record 0, and one for each worker (membership_records.c). */
MLFAB__INTERNAL mlfab__mirrored mlfab__membership_mirrored(mlfab__membership *membership);

#endif
