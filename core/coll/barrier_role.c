/* barrier_role.c - the barrier as two roles: at server 0 (links WORKER), and at a worker (its link to server 0). */
#include "barrier.h"

#include "../node/node.h"

static int barrier_server_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  if (frame->type != MLFAB__DONE) return mlfab__barrier_server_frame(self, at.peer, frame);
  mlfab__barrier_server_done(self, at.peer);
  return 0; /* others want it, too */
}

static void barrier_server_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__barrier_server_hello(self, at.peer, greeting->fresh);
}

static void barrier_server_role_gone(void *self, mlfab__at at, int left) {
  (void)left;
  mlfab__barrier_server_gone(self, at.peer);
}

static void barrier_server_role_free(void *self) { mlfab__barrier_server_free(self); }

static const mlfab__role barrier_server_row = {
    .from = MLFAB__BARRIER,
    .to = MLFAB__DONE,
    .name = "barrier server",
    .links = MLFAB__ON(WORKER),
    .frame = barrier_server_role_frame,
    .up = barrier_server_role_up,
    .gone = barrier_server_role_gone,
    .free = barrier_server_role_free,
};

MLFAB__INTERNAL int mlfab__barrier_server_attach(mlfab_node *node) {
  mlfab__role *role = mlfab__roles_add(node, &barrier_server_row, sizeof(mlfab__barrier_server));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port down = mlfab__roles_port(node, role, MLFAB__LINK_WORKER);
  return mlfab__barrier_server_init(role->self, &node->env, &node->config, &down);
}

static int barrier_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  return at.peer == 0 && mlfab__barrier_worker_frame(self, frame, at.now_ns);
}

static void barrier_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  if (at.peer == 0 && greeting->ack->was_dead < 2) mlfab__barrier_worker_hello(self);
}

static void barrier_role_gone(void *self, mlfab__at at, int left) {
  (void)left;
  if (at.peer == 0) mlfab__barrier_worker_dead(self, at.now_ns);
}

static void barrier_role_withdraw(void *self, mlfab__request *request, int code, uint64_t now_ns) {
  mlfab__barrier_withdraw(self, request, code, now_ns);
}

static void barrier_role_leave(void *self) {
  mlfab__barrier_worker *worker = self;
  worker->leaving = 1;
}

static const mlfab__role barrier_row = {
    .from = MLFAB__BARRIER,
    .to = MLFAB__BARRIER_DONE,
    .name = "barrier",
    .links = MLFAB__ON(SERVER),
    .requests = MLFAB__SERVES(BARRIER),
    .frame = barrier_role_frame,
    .up = barrier_role_up,
    .gone = barrier_role_gone,
    .withdraw = barrier_role_withdraw,
    .leave = barrier_role_leave,
    .finish = barrier_role_leave,
};

MLFAB__INTERNAL int mlfab__barrier_attach(mlfab_node *node, mlfab__barrier_worker **barrier_p) {
  mlfab__role *role = mlfab__roles_add(node, &barrier_row, sizeof **barrier_p);
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port up = mlfab__roles_port(node, role, MLFAB__LINK_SERVER);
  *barrier_p = role->self;
  mlfab__barrier_worker_init(*barrier_p, &up, &node->requests);
  return 0;
}
