/* mirrored.h - a part of a server whose state the other copy of the server has, too: what the mirror
 * (../replica/mirror.h) knows of it. Layer 3.
 *
 * The state of a part is a list of records: record 0 has what is said once, each other one a worker, or whatever the part
 * counts. A part whose code runs marks the records that it may have changed (touched). What a part tells others goes
 * through its port, in front of which the mirror puts a queue. Without a mirror `*touch` stays NULL, and nothing costs.
 *
 * A copy that stands by keeps the records as bytes; its parts are as they began, and get the records when it begins to
 * serve. Then the workers greet it, and repeat what was not answered: for a part this is as if all links had broken,
 * and with them all frames since the last mark were lost. What is a courtesy only (who is missing) is no record. */
#ifndef MLFAB__MIRRORED_H
#define MLFAB__MIRRORED_H

#include "port.h"

enum {
  MLFAB__MIRRORED_MAX = 6 /* parts of a server */,
  MLFAB__MIRRORED_BYTES = 16384 /* a record */
};

typedef struct mlfab__touch { /* the records that may have changed */
  uint8_t *marked;            /* by record: it is in the list */
  uint32_t *list, n;
  int all; /* all may have */
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
  /* Takes a record; without `apply` only checks it. Errors: FRAME. What passes the check can be applied. */
  int (*decode)(void *self, uint32_t record, const uint8_t *bytes, uint32_t n, int apply);
  /* All records were applied, those of the parts before this one, too: makes what follows from them. Or NULL. */
  void (*begin)(void *self);
  mlfab__port *port; /* what it tells others; the mirror replaces its functions. NULL: nothing */
  int workers; /* the peers of the port are workers: what waits for one is lost with its link */
  mlfab__touch **touch;
} mlfab__mirrored;

struct mlfab_node;
/* Adds a part. Without replicas: does nothing. Both pointers of it stay valid as long as the node. */
MLFAB__INTERNAL void mlfab__mirrored_add(struct mlfab_node *node, const mlfab__mirrored *part);

#endif
