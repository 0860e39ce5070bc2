/* sched_role.h - scheduling as roles of a node. */
#ifndef MLFAB__SCHED_ROLE_H
#define MLFAB__SCHED_ROLE_H

#include "../node/node.h"
#include "../worker/worker.h"
#include "aggregator.h"
#include "client.h"
#include "monitor.h"
#include "scheduler.h"

/* The capacities of this host's links, measured or set. A worker tells server 0 each change, and on a new link its last
 * values: the present copy of server 0, or a scheduler that asks it, may not know them. */
typedef struct mlfab__capacity_role {
  mlfab__monitor monitor;
  mlfab_node *node;
  mlfab__server *server; /* of this node, or NULL */
  mlfab__port up;        /* to server 0, if this node has no server */
  int told;              /* it told something, perhaps without a link */
} mlfab__capacity_role;

/* Add the roles to the node, which owns the objects. The caller calls mlfab__hops_begin for aggregator->hops. `server`
 * (NULL if the node has none) must outlive its client. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__aggregator_attach(mlfab_node *node, mlfab__aggregator **aggregator_p);
MLFAB__INTERNAL int mlfab__scheduler_attach(mlfab_node *node, mlfab__scheduler **scheduler_p);
MLFAB__INTERNAL int mlfab__client_attach(mlfab_node *node, mlfab__server *server);
MLFAB__INTERNAL int mlfab__capacity_attach(mlfab_node *node, mlfab__server *server,
                                           mlfab__capacity_role **capacity_p);
/* See mlfab_set_link: both are finite. */
MLFAB__INTERNAL void mlfab__capacity_set(mlfab__capacity_role *role, double in, double out,
                                         uint64_t now_ns);
/* See mlfab_set_other_traffic: all are finite and not negative. */
MLFAB__INTERNAL void mlfab__capacity_other(mlfab__capacity_role *role, double in, double out,
                                           double speed, uint64_t now_ns);

#endif
