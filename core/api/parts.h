/* parts.h - the roles of a node, for its calls. A role that this node does not have, or that is not compiled in, is
 * NULL. core/open/compose.c makes and fills it; the node keeps the pointer and does not use it. */
#ifndef MLFAB__PARTS_H
#define MLFAB__PARTS_H

typedef struct mlfab__parts {
  struct mlfab__worker *worker;
  struct mlfab__server *server;
  struct mlfab__barrier_worker *barrier;
  struct mlfab__comm *comm;
  struct mlfab__scheduler *scheduler;
  struct mlfab__capacity_role *capacity;
  struct mlfab__checkpoint_role *checkpoint;
} mlfab__parts;

#endif
