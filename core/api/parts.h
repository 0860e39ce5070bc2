/* parts.h - what a node is composed of, for the calls: its roles. A part that this node has not, or that is not
 * compiled in, is NULL. core/open/compose.c makes and fills it; the node carries it, and does not look. */
#ifndef MLFAB__PARTS_H
#define MLFAB__PARTS_H

typedef struct mlfab__parts {
  struct mlfab__worker *worker;
  struct mlfab__server *server;
  struct mlfab__barrier_worker *barrier;
  struct mlfab__comm *comm;
  struct mlfab__scheduler *scheduler;
  struct mlfab__capacity_role *capacity;
} mlfab__parts;

#endif
