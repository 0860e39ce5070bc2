/* attend.h - tells who is here, in a build without pushes and pulls. compose.c attaches it.
 *
 * HELLO_ACK tells barriers and collectives if the worker was dead, and if it is a guest (membership.h). In a build with
 * pushes the server and the worker do that, and `finish`. In other builds two small roles do, one at each end of a
 * link, with the same frames:
 *
 *    HERE --BYE, or no link for too long--> GONE --HELLO of a new process--> HERE, a guest
 *    no process has had the number --HELLO--> HERE, a guest
 *    finish: OPEN --DONE to server 0--> TOLD --DONE_ACK, or server 0 is dead--> success
 *
 * Invariants. (1) The first process of a founder is no guest. (2) DONE is repeated on a new link until it is
 * acknowledged. (3) A worker of a build with pushes that defines a model hears which switch is missing here. */
#ifndef MLFAB__ATTEND_H
#define MLFAB__ATTEND_H

#include "../base/request.h"
#include "../node/role.h"

typedef struct mlfab__attend_entry { /* a worker, as a server sees it */
  uint32_t incarnation;
  uint8_t dead, absent, guest;
} mlfab__attend_entry;

typedef struct mlfab__attend_server {
  mlfab__env *env;
  mlfab__port port; /* peers are workers */
  uint32_t number, workers;
  mlfab__attend_entry *entries;
} mlfab__attend_server;

typedef struct mlfab__attend_worker {
  mlfab__port port; /* peer 0 is server 0 */
  mlfab__requests *requests;
  mlfab_request finish; /* 0: not yet called */
  int dead, acked;      /* server 0 is dead; server 0 has acknowledged */
} mlfab__attend_worker;

/* Add the roles, at a server and at a worker. The node owns the roles. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__attend_server_attach(struct mlfab_node *node);
MLFAB__INTERNAL int mlfab__attend_attach(struct mlfab_node *node, mlfab__attend_worker **worker_p);
/* Begins `finish`: self is the mlfab__attend_worker. timeout_ns 0: the config's. Errors: STATE, AGAIN (too many requests). */
MLFAB__INTERNAL int mlfab__attend_finish(void *self, uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error);

#endif
