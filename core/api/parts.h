/* parts.h - the roles of a node, for its calls. A role is NULL if this node does not have it, or if it is not compiled
 * in. core/open/compose.c makes and fills the struct. The node only keeps the pointer. */
#ifndef MLFAB__PARTS_H
#define MLFAB__PARTS_H

#include "../base/base.h"

struct mlfab__parts;

/* The functions of pushes and pulls that a context calls (calls_push.c). */
typedef struct mlfab__parts_push {
  /* Returns the number of updates that have not ended. If there are any: *server_p awaits the oldest. */
  uint32_t (*unfinished)(const struct mlfab__parts *parts, uint32_t *server_p);
  void (*disown)(const struct mlfab__parts *parts); /* in a forked child */
} mlfab__parts_push;

typedef struct mlfab__parts {
  struct mlfab__worker *worker;
  struct mlfab__server *server;
  struct mlfab__barrier_worker *barrier;
  struct mlfab__comm *comm;
  struct mlfab__scheduler *scheduler;
  struct mlfab__capacity_role *capacity;
  struct mlfab__checkpoint_role *checkpoint;
  const mlfab__parts_push *push; /* NULL: not compiled in */
  void (*measure)(mlfab *ctx,
                  uint64_t now_ns); /* reports the traffic of transports (calls_sched.c) */
  /* Begins mlfab_finish: this worker has no more data. `finisher`: the worker, or the role that replaces it. */
  void *finisher;
  int (*finish)(void *finisher, uint64_t timeout_ns, uint64_t now_ns, mlfab_request *request_p,
                mlfab_error *error);
} mlfab__parts;

#endif
