/* mirror.h - server 0's other jobs at both of its copies: the other copy knows all that it has told workers.
 *
 * The weights of a shard go to the other copy in moments (copy.h). Members of collectives, barriers, trees and the
 * numbers of processes change with every word of a worker, and the copy that takes over may not contradict an earlier
 * answer. So the mirror sends the changed records (../node/mirrored.h), and keeps back the frames of the parts to
 * workers until the other copy has the records from which they follow.
 *
 * The stream, on the VOTER link of the copy that serves:
 *
 *    BEGINS, all records, MARK 1, records that changed, MARK 2, ...    MIRROR_HAS n back, when it has MARK n
 *
 *    sender:    NONE --link up--> BEGINS --all records sent, MARK--> FOLLOWS (a mark after each burst of records)
 *                ^--link lost--------/------------------------------/
 *                                   BEGINS again: when the other copy reports that it takes no stream (once a beat)
 *    receiver:  NONE (says so once a beat) --BEGINS--> TAKES: keeps records aside until their MARK, then has them
 *                ^--link lost, no memory, it may not take a stream now: drops the records aside, keeps the others
 *
 * A MARK is sent only if the present version of every record was sent: so a receiver's records are one instant of the
 * sender's state.
 *
 * Frames to workers. While the other copy may take over, a posted frame waits, in order, until that copy has the first
 * mark sent after it; or the last mark before, if nothing has changed since. Then, or when no copy can take over, it
 * leaves. This waiting starts when the other copy has the first mark of a stream: before, that copy may itself wait for
 * a frame of this one (WELCOME). A worker's waiting frames are lost with its link: it greets, and the parts repeat
 * them. Without a lease (vote.h) nothing leaves.
 *
 * When the other copy is lost, frames keep waiting until copy.h knows a decided record without that copy.
 *
 * Take over: mlfab__mirror_serve gives the parts the records of the last mark.
 *
 * Invariants. (1) While the other copy may serve (facts.named), or is about to be proposed (mlfab__mirror_in_sync), a
 * posted frame follows from a state that the other copy has. (2) A receiver's records are the sender's state at one
 * instant. (3) Memory: both ends keep one encoding of each record, a receiver two; waiting frames: MLFAB__MIRROR_ROOM.
 * Beyond that the mirror is `behind` (copy.h drops the other copy), and closes the links of the workers to whom it
 * cannot tell anything; they call again. It does the same without memory.
 *
 * Cost: without replicas none. With replicas, a frame of ~200 bytes for each change by a worker, and a round trip
 * between the copies before an answer.
 *
 * Source: primary-backup with output commit (Alsberg and Day 1976; Strom and Yemini 1985). */
#ifndef MLFAB__MIRROR_H
#define MLFAB__MIRROR_H

#include "../base/env.h"
#include "../node/mirrored.h"
#include "replica_wire.h"

#define MLFAB__MIRROR_ROOM (4u << 20) /* limit of the waiting bytes */

typedef struct mlfab__mirror_record {
  uint8_t *bytes;  /* sender: encoding as last sent; receiver: as at the last mark */
  uint8_t *staged; /* receiver: newer encoding since the last mark, or NULL */
  uint32_t n, nstaged;
  uint8_t due; /* sender: it has to be sent */
} mlfab__mirror_record;

typedef struct mlfab__mirror_words { /* a waiting frame's text, shared by equal frames in a row */
  uint32_t uses, bytes;
} mlfab__mirror_words; /* the bytes follow */

typedef struct mlfab__mirror_item { /* a waiting frame */
  uint64_t mark;                    /* mark that the other copy must have; 0: not known yet */
  mlfab__mirror_words *words;       /* NULL: void frame */
  uint32_t part, peer;
  uint8_t type;
} mlfab__mirror_item;

typedef struct mlfab__mirror_facts { /* facts that copy.h tells, after every event */
  int leased;                        /* serving: this copy may tell workers something */
  int named; /* serving: a record names the other copy as in sync, may name it, or is being asked for */
  int takes; /* standing by: the other copy serves, and this one does not ask to replace it */
} mlfab__mirror_facts;

typedef struct mlfab__mirror_part {
  struct mlfab__mirror *mirror;
  mlfab__mirrored mirrored;
  mlfab__port port; /* the part's real port */
  mlfab__touch touch;
  uint32_t first; /* number of its first record among all */
} mlfab__mirror_part;

typedef struct mlfab__mirror {
  mlfab__env *env;
  mlfab__port out; /* port to the other copy */
  uint32_t peer;   /* number of the other copy there */
  mlfab__mirror_part parts[MLFAB__MIRRORED_MAX];
  uint32_t nparts, nrecords;
  mlfab__mirror_record *records;
  uint32_t *list, nlist; /* sender: records that are due; receiver: records that are staged */
  uint8_t *scratch;      /* MLFAB__MIRRORED_BYTES */
  mlfab__mirror_facts facts;
  int serves, behind;
  uint32_t term;
  /* Sender. */
  int link_up;
  uint32_t stream, streams; /* number of the stream under way, or 0; of the last one */
  int begun;                /* BEGINS was sent for: */
  uint64_t begun_ns;
  int unmarked;         /* records were sent after the last mark */
  uint64_t number, has; /* last mark sent; last mark that the other copy has */
  uint64_t first;       /* first mark of this stream; 0: not sent yet */
  int follows;          /* the other copy has that mark: frames wait from now on */
  uint64_t told;        /* the largest mark that a told frame needs */
  mlfab__mirror_item *items;
  uint32_t begin, end, room; /* the waiting frames */
  uint32_t judged;           /* frames before this index have a mark */
  uint64_t bytes;            /* bytes of their words */
  /* Receiver. */
  uint32_t stream_in, term_in; /* stream that it takes, its term; 0: none */
  int whole;        /* a mark of this stream came: the first mark completes the records */
  uint64_t got;     /* its last mark, of this stream or an earlier one; 0: none */
  uint64_t said_ns; /* when it last said that it takes no stream */
} mlfab__mirror;

/* Starts, standing by. `out` leads to the other copy, which has the number `peer` there. Replaces the ports of the
 * parts. Errors: MEMORY. Afterwards mlfab__mirror_free works in any case. */
MLFAB__INTERNAL int mlfab__mirror_init(mlfab__mirror *mirror, mlfab__env *env,
                                       const mlfab__mirrored *parts, uint32_t nparts,
                                       const mlfab__port *out, uint32_t peer);
MLFAB__INTERNAL void mlfab__mirror_free(mlfab__mirror *mirror);

/* serve: this copy begins to serve; its parts continue from its last mark, if any. stand_by: it serves no longer, and
 * its records are void. Both do nothing if called again. */
MLFAB__INTERNAL void mlfab__mirror_serve(mlfab__mirror *mirror, uint32_t term);
MLFAB__INTERNAL void mlfab__mirror_stand_by(mlfab__mirror *mirror);
/* Takes copy.h's facts, after every event and before the mirror looks. NULL: there are no parts. */
static inline void mlfab__mirror_know(mlfab__mirror *mirror, const mlfab__mirror_facts *facts) {
  if (mirror) mirror->facts = *facts;
}
/* link: the link to the other copy is up, or lost. cut: the link from it is lost. */
MLFAB__INTERNAL void mlfab__mirror_link(mlfab__mirror *mirror, int up);
MLFAB__INTERNAL void mlfab__mirror_cut(mlfab__mirror *mirror);
/* Drops the frames that wait for a worker: it has a new link, or is about to be greeted on one. */
MLFAB__INTERNAL void mlfab__mirror_forget(mlfab__mirror *mirror, uint32_t worker);
/* Runs after every event: sends the changed records, and posts the frames that need not wait any more. */
MLFAB__INTERNAL void mlfab__mirror_look(mlfab__mirror *mirror, uint64_t now_ns, uint64_t beat_ns);
/* Returns when it has to look next. */
MLFAB__INTERNAL uint64_t mlfab__mirror_deadline(const mlfab__mirror *mirror, uint64_t beat_ns);
/* next: fills the next frame to the other copy and returns 1, or returns 0. taken: the frame was sent. */
MLFAB__INTERNAL int mlfab__mirror_next(mlfab__mirror *mirror, mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__mirror_taken(mlfab__mirror *mirror, const mlfab__frame_out *frame,
                                         uint64_t now_ns);
/* Takes MIRROR or MIRROR_HAS from the other copy. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__mirror_hear(mlfab__mirror *mirror, const mlfab__frame_in *frame,
                                       uint64_t now_ns, uint64_t beat_ns);
/* Has the other copy all that was told, and does it stay so? Then a record may name it. NULL: there are no parts. */
static inline int mlfab__mirror_in_sync(const mlfab__mirror *mirror) {
  return !mirror || (mirror->follows && mirror->has >= mirror->told);
}

/* Are there more waiting frames than fit? Then the other copy has to be dropped. */
static inline int mlfab__mirror_behind(const mlfab__mirror *mirror) {
  return mirror && mirror->behind;
}

/* Adds the role, after copy.h's, for the parts that the node has by then; *mirror_p NULL: no parts. Errors: MEMORY. */
struct mlfab_node;
MLFAB__INTERNAL int mlfab__mirror_attach(struct mlfab_node *node, uint32_t peer,
                                         mlfab__mirror **mirror_p);

#endif
