/* checkpoint.h - checkpoints of the model: roles of a server (checkpoint.c) and of a worker (checkpoint_worker.c).
 *
 * A server writes its shard (writer.h), server 0 leads (lead.h), and a new fabric begins as the newest whole checkpoint
 * (restore.h). record.h has the format of the files. Orders and their answers travel over the links between servers
 * (RESHARD); workers ask server 0. The driver does the file I/O (mlfab_node.h). */
#ifndef MLFAB__CHECKPOINT_H
#define MLFAB__CHECKPOINT_H

#include "../base/request.h"
#include "../node/role.h"
#include "checkpoint_wire.h"

struct mlfab__server;
struct mlfab__worker;

typedef struct mlfab__checkpoint_role { /* the role of a worker */
  mlfab__port port;                     /* peers are servers */
  const mlfab_config *config;
  struct mlfab__worker *worker;
  mlfab__requests *requests;
  mlfab__checkpoint_ask ask; /* the last request */
  mlfab_request request;     /* the caller's handle of that request, or 0 */
  mlfab_checkpoint_info *info;
  char resume[MLFAB__TEXT_MAX]; /* worker 0: the directory to restore from, or "" */
} mlfab__checkpoint_role;

/* Add the roles. A worker's is added before the worker's own, so that its frames come before DEFINE; `worker`, and `began` of the
 * worker, are set afterwards. Errors: MEMORY. */
MLFAB__INTERNAL int mlfab__checkpoint_attach(struct mlfab_node *node, struct mlfab__server *server);
MLFAB__INTERNAL int mlfab__checkpoint_worker_attach(struct mlfab_node *node,
                                                    mlfab__checkpoint_role **role_p);
MLFAB__INTERNAL int mlfab__checkpoint_began(struct mlfab__worker *worker, uint32_t server,
                                            const mlfab__define_ack *ack, char *text, size_t room);
/* start: begins a checkpoint. from: sets the directory to restore from. loaded: returns the restored checkpoint. */
MLFAB__INTERNAL int mlfab__checkpoint_start(mlfab__checkpoint_role *role,
                                            const mlfab_checkpoint_options *options,
                                            mlfab_checkpoint_info *info, uint64_t now_ns,
                                            mlfab_request *request_p, mlfab_error *error);
MLFAB__INTERNAL int mlfab__checkpoint_from(mlfab__checkpoint_role *role, const char *dir,
                                           mlfab_error *error);
MLFAB__INTERNAL int mlfab__checkpoint_loaded(const mlfab__checkpoint_role *role,
                                             mlfab_checkpoint_info *info_p, mlfab_error *error);

#endif
