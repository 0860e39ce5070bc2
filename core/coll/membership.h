/* membership.h - server 0 keeps the membership of collectives: who takes part, in which epoch, and verdicts.
 *
 *    IDLE --MEMBERSHIP of a worker--> GATHERING --MEMBERSHIP of every live worker--> LISTED: MEMBERSHIP_LIST to all
 *      LISTED --MEMBERSHIP_READY of all--> RUNNING: MEMBERSHIP_GO to all
 *      LISTED, RUNNING --verdict: MEMBERSHIP_OVER to all--> GATHERING
 *
 * Verdicts. PEER_DEAD: a member dies, or a new process has its place before anybody has noticed. PEER_CLOSED: it closes
 * without a word. AGAIN: a worker that was declared dead calls, or a returning worker has called in vain.
 * MEMBERSHIP_FAIL of a member: its code and text; the first counts. MISMATCH: calls differ. A member that leaves in
 * good order (MEMBERSHIP_LEAVE, DONE) ends nothing: server 0 tells the others how many calls it has called
 * (MEMBERSHIP_LEFT), and they fail later calls themselves.
 *
 * Waiting. While an epoch forms, server 0 tells all waiting workers which rank is missing, whenever that changes:
 * MEMBERSHIP_MISSING of epoch 0. MEMBERSHIP or MEMBERSHIP_READY of this rank has not come.
 *
 * Stuck calls. A worker with a call that is open for longer than a heartbeat reports this (MEMBERSHIP_STUCK), once a
 * beat. Server 0 asks all members if they have called it (MEMBERSHIP_ASK): one call at a time, at most four a beat, and
 * each call at most once in a beat. If others get stuck meanwhile, it asks about the lowest number next. The members
 * answer (MEMBERSHIP_TELL); server 0 tells all who has not called (MEMBERSHIP_MISSING: the lowest rank; else a rank
 * that has not answered for two beats; else none). When all have called and signatures differ, the verdict is MISMATCH.
 * It names the lowest rank outside the majority (of two equal groups, that of the lowest rank is the majority), with
 * both calls in words.
 *
 * Lost before an epoch. If a worker dies, closes or is done while no epoch stands, and it is no joiner, the next epoch
 * misses it (for epoch 1: any worker). Such an epoch ends as it begins, with PEER_DEAD or PEER_CLOSED, naming the
 * lowest missing rank; joiners go on waiting. A worker is not missing if it is back by then, and has made the call with
 * which the epoch begins.
 *
 * Finishing. A worker that finishes (MEMBERSHIP_FINISH) fails no call. All members must agree on the first call without
 * it, and others may have begun calls that it has not called:
 *
 *    FINISH(calls) --FREEZE to all--> members begin no more calls --FROZEN(begun) of all--> SETTLE(limit) to all
 *
 * The limit is the largest number of calls that a member had begun, or that a worker had called when it finished. Calls
 * below it belong to this epoch. In those that it had not called, the worker takes part with the operation's identity:
 * a member that knows them describes them (MEMBERSHIP_OWED), and server 0 passes this on. SETTLE comes after all
 * FROZEN, so all members know that a worker gives an identity before it gives it (a mean is divided by the number of
 * the others). When a second worker finishes, all freeze again, and the limit stays. A member that has ended all calls
 * below the limit reports this (MEMBERSHIP of this epoch; FINISH without a rank). When all have, server 0 lists the
 * next epoch at once, without a verdict. Until then all keep their streams, so that every byte arrives. A worker that
 * finishes outside an epoch, or in a listed one, is not a member of the next. A worker that has called more than the
 * limit finishes in the next epoch.
 *
 * Joining. A joiner is a worker whose number was never used, or whose former process left in good order. It fails no
 * call when it comes, and is awaited only after it calls. MEMBERSHIP has the signature of its first call. It is in the
 * epoch that forms if all others have told the same signature. If an epoch runs, the exchange is that of a worker that
 * finishes, but the limit is sought:
 *
 *    FREEZE (calls UINT64_MAX), FROZEN(begun), SETTLE(limit, seek: signatures of joiners' first calls)
 *
 * From the limit on, members begin calls that are not sought. Each stops before the first sought call, and sends
 * MEMBERSHIP with its signature when it has ended the calls before it. All make the same calls, so all stop at the same
 * call; the next epoch begins with it and has the joiner. A joiner with another first call makes all freeze anew. At
 * most MLFAB__MEMBERSHIP_SEEK signatures are sought at once. A worker that finishes meanwhile ends the search: joiners
 * are sought in the next epoch. If nobody else makes the call, it ends at its deadline, which names it and a call of
 * the others (FROZEN, MISSING). Objects (partial and stochastic reductions, task graphs) stay with the members that
 * opened them. While a member has one open, SETTLE has no limit, the joiner keeps waiting, and server 0 tries again a
 * heartbeat later. For the same reason a forming epoch after a failure has no joiners while its members have objects.
 *
 * Returning. A process that takes the place of a dead one returns: it joins in the same way. Nobody waits for it before
 * its first call, and then the members seek that call. But two things may prevent this. After a failure a program may
 * have all agree anew, by calls outside its loop. And only members can close the objects that were opened with the dead
 * process. So the epoch ends with AGAIN if members have objects open, or if they do not make its first call within a
 * tenth of timeout_ns. The next epoch has it, whatever its call.
 *
 * Newcomers. A process that came to an existing fabric (a joiner, or a replacement of a dead worker) is a newcomer
 * until it has been in an epoch. Rounds, barriers and collectives admit it at one point: its first collective that
 * others make with it, or its first barrier if the loop has no collective.
 *
 *    TRIAL --first collective or barrier, all its updates are decided--> APART
 *      APART --all others have called: READY, with their progress and barriers--> RETURNS --all servers count it--> MEMBER
 *      APART --its call fails--> TRIAL
 *
 * TRIAL: rounds count it from the end of its model_start on (server/clock.c). No barrier or collective waits for it.
 * APART: it waits in a call. It tells all servers and the barrier, and nobody waits for it. So the others reach the
 * call, whatever the order of a loop. Two bits, MLFAB__APART_*, tell which kind of call waits. Rounds count it when
 * neither does, and a collective comes first. A collective of an epoch with newcomers begins when every member has
 * called it: each then sends READY, with its progress and barriers at its call. Server 0 tells newcomers the largest
 * progress. RETURNS: its number is this progress plus the updates that it has begun since its own call; undecided
 * updates get numbers from there. Rounds closed by then get no update: the next updates count for them. It asks all
 * servers to count it, then enters the barriers at the others' place, and sends READY. Newcomers alone follow the first
 * of them, which keeps its number. After the call all are at the same place of their loops, and all have the same
 * numbers. A newcomer that has pushed into a round before all others would be one round ahead: its number falls to
 * theirs. The round keeps that update, and takes the next update, too. A barrier does the same (barrier.h).
 *
 * Invariants. (a) If a process waits for another's call, others wait for it only after it was admitted. (b) GO of an
 * epoch comes after all servers count its newcomers. (c) A newcomer that dies on the way before LIST has failed
 * nobody's call; after LIST it is a member like others. If the epoch ends before GO, it is a newcomer again, except if
 * it has sent READY: then all count it, and its call has failed with theirs. (d) A loop needs a place that its first
 * collective marks: among equal collectives in a step the library can find a joiner's call only by tags.
 *
 * Leaving. A member that leaves counts as ready; server 0 does not wait for it or ask it, and tells of it on every new
 * link. If it dies before it says goodbye, the epoch still ends: others may wait for its last bytes.
 *
 * Invariants. (1) There is one epoch at a time; its number only grows. (2) GO of an epoch comes after READY of all its
 * members: so when a worker is IN, all others have left the epoch before. (3) Each member hears exactly one
 * MEMBERSHIP_OVER an epoch. Server 0 repeats it on a new link until the member's MEMBERSHIP confirms it
 * (membership_ask.epoch); until then the worker joins no other epoch. (4) Server 0 ignores frames of dead workers, and
 * frames of other epochs. (5) Memory: one entry for each worker, one inquiry.
 *
 * If server 0 has a replica, the other copy has all of it except inquiries and the rank named as missing: these begin
 * anew when that copy takes over.
 *
 * Members are ordered by host (the host of the lowest rank first), then by rank; with `order_by_rate` of the
 * configuration the hosts with the most bandwidth come first. go.round is the largest round that a member has told. An
 * epoch has at most MLFAB__MEMBERSHIP_MEMBERS_MAX members: with more it ends as it begins, with LIMIT; but joiners
 * enter only if there is room. A joiner of a full epoch hears MEMBERSHIP_OVER of it with LIMIT, once, and then waits
 * until a member leaves, finishes or dies. */
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
  uint8_t asked;                         /* it has asked for the forming epoch */
  uint8_t member, ready, arena;          /* state in the standing epoch */
  int32_t lost;   /* reason why the next epoch misses it, untold; 0: it does not */
  uint8_t left;   /* a member that takes no further part ... */
  uint64_t calls; /* ... after so many calls */
  uint8_t finished,
      frozen;         /* a member that has finished with `calls`; has answered the last FREEZE */
  uint8_t moved;      /* a member that has ended all calls below the limit */
  uint64_t begun;     /* number of calls begun, when it froze */
  uint8_t well;       /* its former (if gone: last) process left in good order, or there was none */
  uint8_t joins;      /* no member yet, and fails no call; if not `well`: it returns */
  uint64_t waited;    /* for a returning worker: time since it has asked, ns */
  uint8_t open;       /* it had objects when it froze */
  uint8_t fresh;      /* it has been in no epoch, and came to an existing fabric */
  uint32_t over_owed; /* epoch whose verdict it has not confirmed; 0: none */
  uint8_t over_well;  /* it was a member to the end, and has finished */
  uint32_t incarnation;
  int32_t missing; /* the missing rank that it was told, and if that rank waits in a barrier */
  uint8_t missing_waits;
  uint32_t place; /* for a member: its place in `order` */
  uint32_t lead;  /* the lowest rank among the members of its host */
  double rate;    /* rate of the host's link, bytes a second; 0: unknown */
  /* State in the inquiry. */
  uint8_t told, called;
  uint64_t signature;
  char words[MLFAB__TEXT_MAX];
  mlfab__membership_ask ask;
} mlfab__membership_entry;

/* The call under inquiry, and its start; pending: another inquiry is to follow. */
typedef struct mlfab__membership_inquiry {
  uint8_t open, pending;
  uint32_t channel, pending_channel;
  uint64_t number, pending_number;
  uint64_t asked_ns; /* 0: no question in this epoch yet */
} mlfab__membership_inquiry;

typedef struct mlfab__membership {
  mlfab__env *env;
  const mlfab_config *config;
  mlfab__port port; /* port to workers */
  struct mlfab__barrier_server
      *barrier; /* the node's barrier: for errors that say who waits where; or NULL */
  uint32_t workers;
  enum mlfab__membership_phase phase;
  uint32_t epoch; /* number of the standing epoch, or of the last */
  uint32_t members;
  mlfab__membership_entry *entries; /* by rank */
  uint32_t *order;                  /* members */
  uint8_t *list;                    /* MEMBERSHIP_LIST of the epoch */
  uint32_t list_bytes;
  mlfab__membership_member *table; /* the members in that list */
  mlfab__membership_go go;
  mlfab__membership_over verdict; /* the last one */
  mlfab__membership_inquiry inquiry;
  uint8_t freezing; /* some have not answered FREEZE */
  int32_t
      finisher; /* the last rank that has finished in this epoch, or joins the next; or NO_RANK */
  /* Joiners wait for this member's objects, for so many more looks at the clock; 0: they do not. */
  int32_t keeper;
  uint32_t kept;
  uint64_t limit; /* limit: calls of this epoch; UINT64_MAX: unknown */
  uint64_t seek
      [MLFAB__MEMBERSHIP_SEEK]; /* it ends before the first of these, from the limit on; 0: end */
  char others[MLFAB__TEXT_MAX]; /* the call of the keeper, in words, for joiners */
  mlfab__touch *touch;          /* tells a replica of server 0; or NULL */
} mlfab__membership;

/* Errors: MEMORY. Afterwards mlfab__membership_free works in any case. */
MLFAB__INTERNAL int mlfab__membership_init(mlfab__membership *membership, mlfab__env *env,
                                           const mlfab_config *config, const mlfab__port *port);
MLFAB__INTERNAL void mlfab__membership_free(void *self);
/* Adds the role of the membership, *membership_p, at server 0 (comm_role.c). Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__membership_attach(struct mlfab_node *node,
                                             struct mlfab__barrier_server *barrier,
                                             mlfab__membership **membership_p);
/* hello: a worker has a new link; the incarnation tells if it is a new process. gone: a worker is gone for good
 * (`left`: it said goodbye). */
MLFAB__INTERNAL void mlfab__membership_hello(mlfab__membership *membership, uint32_t worker,
                                             uint32_t incarnation, uint64_t now_ns);
MLFAB__INTERNAL void mlfab__membership_gone(mlfab__membership *membership, uint32_t worker,
                                            int left, uint64_t now_ns);
/* Takes a frame; returns 1 if it belonged to this role. */
MLFAB__INTERNAL int mlfab__membership_frame(mlfab__membership *membership, uint32_t worker,
                                            const mlfab__frame_in *frame, uint64_t now_ns);
/* Call it four times a heartbeat. */
MLFAB__INTERNAL void mlfab__membership_tick(void *self, uint64_t now_ns);
/* Continues as another copy: members, their asks and places are set, the rest follows from these. */
MLFAB__INTERNAL void mlfab__membership_resume(mlfab__membership *membership);
/* Returns the membership as records: record 0, and one for each worker (membership_records.c). */
MLFAB__INTERNAL mlfab__mirrored mlfab__membership_mirrored(mlfab__membership *membership);

#endif
