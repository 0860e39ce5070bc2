/* mirror.h - server 0's other jobs at both of its copies: what it has told workers, the other copy knows. Layer 4.
 *
 * The weights of a shard go to the other copy in moments (copy.h). Who takes part in collectives, barriers, trees and the
 * numbers of processes change with every word of a worker, and an answer may not be contradicted by the copy that takes
 * over. So the mirror sends the records that have changed (../node/mirrored.h), and keeps what the parts tell workers
 * until the other copy has the records that it follows from.
 *
 * The stream, on the VOTER link of the copy that serves:
 *
 *    BEGINS, all records, MARK 1, records that changed, MARK 2, ...    MIRROR_HAS n back, when it has MARK n
 *
 *    sender:    NONE --link up--> BEGINS --all records sent, MARK--> FOLLOWS (a mark after each burst of records)
 *                ^--link lost--------/------------------------------/
 *                                   BEGINS again: the other copy says that it takes no stream (once a beat at most)
 *    receiver:  NONE (says so once a beat) --BEGINS--> TAKES: keeps records aside until their MARK, then has them
 *                ^--link lost, no memory, it may not take a stream now: what is aside is void; what it has stays
 *
 * A record is sent as it is when it is sent, and a MARK only when every record was sent as it is then: so what the
 * receiver has is one instant of the sender's state.
 *
 * What is told. While the other copy may take over, what the parts post waits, in order, until the other copy has the
 * first mark that was sent after it was posted; or the last one sent before, if nothing has changed since. Then, or when
 * no copy can take over, it is posted. It waits from the first mark of a stream on that the other copy has, and not
 * before: that copy may wait for this one to tell it something (WELCOME). What waits for a worker is lost with its link:
 * it greets, and the parts say it again. Without a lease (vote.h) nothing is told.
 *
 * When the other copy is lost, the mirror goes on keeping back until copy.h knows a decided record without that copy.
 *
 * Take over: mlfab__mirror_serve gives the parts the records of the last mark.
 *
 * Invariants. (1) While the other copy may serve (facts.named), or is about to be proposed (mlfab__mirror_in_sync), a
 * frame that is posted follows from a state that the other copy has. (2) What a receiver has is the sender's state at one
 * instant. (3) Memory: at both ends one encoding of each record, at a receiver two; what waits: MLFAB__MIRROR_ROOM. With
 * more than that the mirror is `behind` (copy.h drops the other copy), and closes the links of those to whom it cannot
 * tell anything; they call again. So it does without memory.
 *
 * Cost: without replicas none. With them, a frame of ~200 bytes for each worker's word that changes something, and a round
 * trip between the copies before an answer.
 *
 * Source: primary-backup with output commit (Alsberg and Day 1976; Strom and Yemini 1985). */
#ifndef MLFAB__MIRROR_H
#define MLFAB__MIRROR_H

#include "../base/env.h"
#include "../node/mirrored.h"
#include "replica_wire.h"

#define MLFAB__MIRROR_ROOM (4u << 20) /* bytes that wait */

typedef struct mlfab__mirror_record {
  uint8_t *bytes;  /* sender: as it was sent last; receiver: at the last mark */
  uint8_t *staged; /* receiver: since the last mark, or NULL */
  uint32_t n, nstaged;
  uint8_t due; /* sender: it is to be sent */
} mlfab__mirror_record;

typedef struct mlfab__mirror_words { /* what waits: one for equal frames that follow each other */
  uint32_t uses, bytes;
} mlfab__mirror_words; /* its bytes follow */

typedef struct mlfab__mirror_item { /* a frame that waits */
  uint64_t mark;                    /* that the other copy must have; 0: not known yet */
  mlfab__mirror_words *words;       /* NULL: void */
  uint32_t part, peer;
  uint8_t type;
} mlfab__mirror_item;

typedef struct mlfab__mirror_facts { /* what copy.h knows, after every event */
  int leased;                        /* serving: this copy may tell workers something */
  int named; /* serving: a record names the other copy as in sync, is being asked for, or may be */
  int takes; /* standing by: the other copy serves, and this one does not ask to replace it */
} mlfab__mirror_facts;

typedef struct mlfab__mirror_part {
  struct mlfab__mirror *mirror;
  mlfab__mirrored mirrored;
  mlfab__port port; /* the real one */
  mlfab__touch touch;
  uint32_t first; /* of its records among all */
} mlfab__mirror_part;

typedef struct mlfab__mirror {
  mlfab__env *env;
  mlfab__port out; /* to the other copy */
  uint32_t peer;   /* its number there */
  mlfab__mirror_part parts[MLFAB__MIRRORED_MAX];
  uint32_t nparts, nrecords;
  mlfab__mirror_record *records;
  uint32_t *list, nlist; /* sender: records that are due; receiver: that are staged */
  uint8_t *scratch;      /* MLFAB__MIRRORED_BYTES */
  mlfab__mirror_facts facts;
  int serves, behind;
  uint32_t term;
  /* Sender. */
  int link_up;
  uint32_t stream, streams; /* under way, or 0; the last one */
  int begun;                /* BEGINS was sent: */
  uint64_t begun_ns;
  int unmarked;         /* records were sent after the last mark */
  uint64_t number, has; /* last mark that was sent; that the other copy has */
  uint64_t first;       /* first mark of this stream; 0: not sent yet */
  int follows;          /* the other copy has that one: what is told waits from now on */
  uint64_t told;        /* the largest mark that something needs which was told */
  mlfab__mirror_item *items;
  uint32_t begin, end, room; /* of those that wait */
  uint32_t judged;           /* those before have a mark */
  uint64_t bytes;            /* of their words */
  /* Receiver. */
  uint32_t stream_in, term_in; /* that it takes; 0: none */
  int whole;                   /* a mark of this stream came: the first one has all records */
  uint64_t got;                /* the last mark that it has, of this stream or before; 0: nothing */
  uint64_t said_ns;            /* when it said that it takes none */
} mlfab__mirror;

/* Begins, standing by. `out` leads to the other copy, whose number there is `peer`. Replaces the ports of the parts.
 * Errors: MEMORY. Afterwards free works in any case. */
MLFAB__INTERNAL int mlfab__mirror_init(mlfab__mirror *mirror, mlfab__env *env,
                                       const mlfab__mirrored *parts, uint32_t nparts,
                                       const mlfab__port *out, uint32_t peer);
MLFAB__INTERNAL void mlfab__mirror_free(mlfab__mirror *mirror);

/* This copy begins to serve: its parts go on from the last mark that it has, if any. It does not serve any more: what it
 * has is void. Both do nothing when that is known. */
MLFAB__INTERNAL void mlfab__mirror_serve(mlfab__mirror *mirror, uint32_t term);
MLFAB__INTERNAL void mlfab__mirror_stand_by(mlfab__mirror *mirror);
/* What copy.h knows, after every event and before the mirror looks. NULL: there are no parts. */
static inline void mlfab__mirror_know(mlfab__mirror *mirror, const mlfab__mirror_facts *facts) {
  if (mirror) mirror->facts = *facts;
}
/* The link to the other copy is up, or lost. The link from it is lost. */
MLFAB__INTERNAL void mlfab__mirror_link(mlfab__mirror *mirror, int up);
MLFAB__INTERNAL void mlfab__mirror_cut(mlfab__mirror *mirror);
/* A worker has a new link, or is about to be greeted on one: what waits for it is lost. */
MLFAB__INTERNAL void mlfab__mirror_forget(mlfab__mirror *mirror, uint32_t worker);
/* After every event: sends what has changed, and posts what need not wait any more. */
MLFAB__INTERNAL void mlfab__mirror_look(mlfab__mirror *mirror, uint64_t now_ns, uint64_t beat_ns);
/* When it has to look next. */
MLFAB__INTERNAL uint64_t mlfab__mirror_deadline(const mlfab__mirror *mirror, uint64_t beat_ns);
/* The next frame to the other copy: 1, or 0. taken: it was sent. */
MLFAB__INTERNAL int mlfab__mirror_next(mlfab__mirror *mirror, mlfab__frame_out *frame);
MLFAB__INTERNAL void mlfab__mirror_taken(mlfab__mirror *mirror, const mlfab__frame_out *frame,
                                         uint64_t now_ns);
/* MIRROR or MIRROR_HAS from the other copy. Errors: FRAME. */
MLFAB__INTERNAL int mlfab__mirror_hear(mlfab__mirror *mirror, const mlfab__frame_in *frame,
                                       uint64_t now_ns, uint64_t beat_ns);
/* Does the other copy have all that was told, and will it, so that a record may name it? NULL: there are no parts. */
static inline int mlfab__mirror_in_sync(const mlfab__mirror *mirror) {
  return !mirror || (mirror->follows && mirror->has >= mirror->told);
}

/* Has too much to say that waits: the other copy is to be dropped. */
static inline int mlfab__mirror_behind(const mlfab__mirror *mirror) {
  return mirror && mirror->behind;
}

/* Adds the role, for the parts that the node has by then, after copy.h's; *mirror_p NULL: it has none. Errors: MEMORY. */
struct mlfab_node;
MLFAB__INTERNAL int mlfab__mirror_attach(struct mlfab_node *node, uint32_t peer,
                                         mlfab__mirror **mirror_p);

#endif
