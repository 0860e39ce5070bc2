/* reshard_role.c - moving slices as roles of a node: who leads it at server 0 (WORKER, and RESHARD to the
 * servers), and what every server does (RESHARD: its links to the others, RESHARD_IN: theirs to it). */
#include "../node/node.h"
#include "../server/server.h"
#include "reshard.h"

/* --- who leads it --- */

static int reshard_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  const mlfab__reshard *reshard = self;
  if (at.kind == MLFAB__LINK_WORKER)
    return mlfab__reshard_frame(self, at.peer, frame, reshard->server->phase == MLFAB__MODEL_STANDS,
                                at.now_ns);
  if (at.kind != MLFAB__LINK_RESHARD_IN || frame->type != MLFAB__MOVED) return 0;
  int code = mlfab__reshard_moved(self, at.peer, frame);
  return code ? code : 1;
}

static void reshard_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  if (at.kind == MLFAB__LINK_WORKER) mlfab__reshard_hello(self, at.peer, greeting->fresh);
  if (at.kind == MLFAB__LINK_RESHARD) mlfab__reshard_up(self, at.peer);
}

static void reshard_role_lost(void *self, mlfab__at at) {
  if (at.kind == MLFAB__LINK_WORKER) mlfab__reshard_lost(self, at.peer);
}

static void reshard_role_gone(void *self, mlfab__at at, int left) {
  (void)left;
  if (at.kind == MLFAB__LINK_WORKER) mlfab__reshard_gone(self, at.peer);
  if (at.kind == MLFAB__LINK_RESHARD) mlfab__reshard_dead(self, at.peer);
}

static int reshard_role_wants(void *self, mlfab__at at) {
  return at.kind == MLFAB__LINK_RESHARD && mlfab__reshard_busy(self);
}

static void reshard_role_tick(void *self, uint64_t now_ns) { mlfab__reshard_tick(self, now_ns); }

static uint64_t reshard_role_deadline(const void *self) { return mlfab__reshard_deadline(self); }

static void reshard_role_free(void *self) { mlfab__reshard_free(self); }

static const mlfab__role reshard_row = {
    .from = MLFAB__RESHARD,
    .to = MLFAB__MOVED,
    .name = "reshard",
    .links = MLFAB__ON(WORKER) | MLFAB__ON(RESHARD) | MLFAB__ON(RESHARD_IN),
    .frame = reshard_role_frame,
    .up = reshard_role_up,
    .lost = reshard_role_lost,
    .gone = reshard_role_gone,
    .wants = reshard_role_wants,
    .tick = reshard_role_tick,
    .deadline = reshard_role_deadline,
    .free = reshard_role_free,
};

MLFAB__INTERNAL int mlfab__reshard_attach(mlfab_node *node, mlfab__server *server) {
  mlfab__role *role = mlfab__roles_add(node, &reshard_row, sizeof(mlfab__reshard));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port down = mlfab__roles_port(node, role, MLFAB__LINK_WORKER);
  mlfab__port across = mlfab__roles_port(node, role, MLFAB__LINK_RESHARD);
  mlfab__reshard *reshard = role->self;
  int code =
      mlfab__reshard_init(reshard, &node->env, &node->config, &server->layout, &down, &across);
  reshard->server = server;
  return code;
}

/* --- at a server --- */

static int reshard_server_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  int code;
  if (at.kind != MLFAB__LINK_RESHARD_IN) return 0;
  switch (frame->type) {
    case MLFAB__MOVE:
      code = at.peer == 0 ? mlfab__reshard_server_move(self, frame, at.now_ns) : MLFAB_ERR_FRAME;
      break;
    case MLFAB__MOVED:
      code = mlfab__reshard_server_told(self, at.peer, frame);
      break;
    default:
      code = mlfab__reshard_server_frame(self, at.peer, frame);
  }
  return code ? code : 1;
}

static int reshard_server_role_next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  return mlfab__reshard_server_next(self, at.peer, frame);
}

static void reshard_server_role_taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  mlfab__reshard_server_taken(self, at.peer, frame);
}

static int reshard_server_role_hello(void *self, mlfab__at at, mlfab__greeting *greeting) {
  const mlfab__server *server = self;
  if (at.kind == MLFAB__LINK_RESHARD_IN)
    greeting->ack->model_stands = server->phase == MLFAB__MODEL_STANDS;
  return 0;
}

static void reshard_server_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  if (at.kind != MLFAB__LINK_RESHARD) return;
  mlfab__reshard_server_up(self, at.peer);
  /* It has no model: a new process, which knows nothing of slices that move. */
  if (!greeting->ack->model_stands) mlfab__reshard_server_dead(self, at.peer);
}

static void reshard_server_role_gone(void *self, mlfab__at at, int left) {
  (void)left;
  if (at.kind == MLFAB__LINK_RESHARD) mlfab__reshard_server_dead(self, at.peer);
}

static int reshard_server_role_wants(void *self, mlfab__at at) {
  return at.kind == MLFAB__LINK_RESHARD && mlfab__reshard_server_wants(self, at.peer);
}

static void reshard_server_role_settle(void *self) { mlfab__reshard_server_check(self); }

static const mlfab__role reshard_server_row = {
    .name = "reshard server",
    .rest = 1,
    .sends = MLFAB__ON(RESHARD),
    .links = MLFAB__ON(RESHARD) | MLFAB__ON(RESHARD_IN),
    .frame = reshard_server_role_frame,
    .next = reshard_server_role_next,
    .taken = reshard_server_role_taken,
    .hello = reshard_server_role_hello,
    .up = reshard_server_role_up,
    .gone = reshard_server_role_gone,
    .wants = reshard_server_role_wants,
    .settle = reshard_server_role_settle,
};

MLFAB__INTERNAL void mlfab__reshard_server_attach(mlfab_node *node, mlfab__server *server) {
  mlfab__role *role = mlfab__roles_add(node, &reshard_server_row, 0);
  role->self = server;
  mlfab__reshard_server_init(server);
  server->move.across = mlfab__roles_port(node, role, MLFAB__LINK_RESHARD);
}
