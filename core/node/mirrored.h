/* mirrored.h - a part of a server whose state the other copy of the server has, too: its table for the mirror
 * (../replica/mirror.h).
 *
 * The state of a part is a list of records. Record 0 has the general state; each other record is for a worker, or
 * whatever the part counts. The code of a part marks the records that it may have changed (touched). All messages of a
 * part go through its port, behind a queue of the mirror. `*touch` stays NULL, at no cost, if there is no mirror.
 *
 * A copy that stands by keeps the records as bytes; its parts are as they began, and get the records when it begins to
 * serve. Then the workers greet it, and repeat unanswered requests. To a part this looks as if all links had broken,
 * with the loss of all frames since the last mark. Mere courtesies (who is missing) are no records. */
#ifndef MLFAB__MIRRORED_H
#define MLFAB__MIRRORED_H

#include "port.h"

enum {
  MLFAB__MIRRORED_MAX = 6 /* parts of a server */,
  MLFAB__MIRRORED_BYTES = 16384 /* a record */
};

typedef struct mlfab__touch { /* the records that may have changed */
  uint8_t *marked;            /* by record: 1 if it is in the list */
  uint32_t *list, n;
  int all; /* all records may have changed */
} mlfab__touch;

static inline void mlfab__touched(mlfab__touch *touch, uint32_t record) {
  if (!touch || touch->all || touch->marked[record]) return;
  touch->marked[record] = 1;
  touch->list[touch->n++] = record;
}

#if MLFAB_WITH_COLL
static inline void mlfab__touched_all(mlfab__touch *touch) {
  if (touch) touch->all = 1;
}
#endif

typedef struct mlfab__mirrored {
  const char *name;
  void *self;
  uint32_t records;
  /* Writes a record, at most MLFAB__MIRRORED_BYTES, and returns its size. */
  uint32_t (*encode)(const void *self, uint32_t record, uint8_t *bytes);
  /* Takes a record; without `apply` only checks it. Errors: FRAME. A record that passes the check can be applied. */
  int (*decode)(void *self, uint32_t record, const uint8_t *bytes, uint32_t n, int apply);
  /* Derives the rest of the state, when all records of this part and of earlier parts were applied. Or NULL. */
  void (*begin)(void *self);
  mlfab__port *port; /* for its messages; the mirror replaces its functions. NULL: it sends none */
  int workers; /* the port's peers are workers: frames that wait for one are lost with its link */
  mlfab__touch **touch;
} mlfab__mirrored;

struct mlfab_node;
/* Adds a part, if there are replicas. Both pointers in it stay valid as long as the node. */
MLFAB__INTERNAL void mlfab__mirrored_add(struct mlfab_node *node, const mlfab__mirrored *part);

#endif
