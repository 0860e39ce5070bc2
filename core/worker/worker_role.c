/* worker_role.c - the worker as a role of its node, with its links to servers. */
#include "../node/node.h"
#include "worker.h"

static int worker_role_hello(void *self, mlfab__at at, mlfab__greeting *greeting) {
  if (!mlfab__worker_usurped(self, at.peer, greeting->ack->top)) return 0;
  greeting->why = "it has updates of this worker that it never sent: another process uses its rank";
  return MLFAB_ERR_RANK_TAKEN;
}

static void worker_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  const mlfab__worker *worker = self;
  if (worker->stands && !greeting->ack->model_stands && !worker->streams[at.peer].absent)
    greeting->died = "it has restarted without the model";
  mlfab__worker_hello(self, at.peer, greeting->ack, at.now_ns);
}

static void worker_role_gone(void *self, mlfab__at at, int left) {
  const mlfab__worker *worker = self;
  if (left == MLFAB__NEVER_HERE && worker->mover)
    worker->mover->vacant(self, at.peer, at.now_ns);
  else
    mlfab__worker_dead(self, at.peer, at.now_ns);
}

static int worker_role_wants(void *self, mlfab__at at, const char *why) {
  (void)self, (void)at, (void)why;
  return 1;
}

static const mlfab__role worker_row = {
    .name = "worker",
    .rest = 1,
    .sends = MLFAB__ON(SERVER),
    .links = MLFAB__ON(SERVER),
    .requests = MLFAB__SERVES(PUSH) | MLFAB__SERVES(PULL) | MLFAB__SERVES(MODEL) |
                MLFAB__SERVES(JOIN) | MLFAB__SERVES(SYNC) | MLFAB__SERVES(RESLICE),
    .frame = mlfab__worker_frame,
    .next = mlfab__worker_next,
    .taken = mlfab__worker_taken,
    .returned = mlfab__worker_sent,
    .hello = worker_role_hello,
    .up = worker_role_up,
    .lost = mlfab__worker_lost,
    .gone = worker_role_gone,
    .wants = worker_role_wants,
    .withdraw = mlfab__worker_withdraw,
    .free = mlfab__worker_free,
};

MLFAB__INTERNAL int mlfab__worker_attach(mlfab_node *node, mlfab__worker **worker_p) {
  mlfab__role *role = mlfab__roles_add(node, &worker_row, sizeof **worker_p);
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port up = mlfab__roles_port(node, role, MLFAB__LINK_SERVER);
  *worker_p = role->self;
  int code = mlfab__worker_init(*worker_p, &node->env, &node->config, (uint32_t)node->config.rank,
                                &up, &node->stats, &node->requests);
  (*worker_p)->founding = node->founding;
  return code;
}
