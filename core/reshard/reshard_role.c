/* reshard_role.c - moving slices as a role of every server's node. RESHARD: its links to the other servers;
 * RESHARD_IN: theirs to it. reshard.c leads. */
#include "../node/node.h"
#include "../server/server.h"
#include "reshard.h"

static int reshard_server_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  int code;
  if (at.kind != MLFAB__LINK_RESHARD_IN) return 0;
  switch (frame->type) {
    case MLFAB__MOVE:
      code = at.peer == 0 ? mlfab__reshard_server_move(self, frame, at.now_ns) : MLFAB_ERR_FRAME;
      break;
    case MLFAB__ADOPT:
      code = at.peer == 0 ? mlfab__reshard_server_adopt(self, frame, at.now_ns) : MLFAB_ERR_FRAME;
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
  /* A server without a model is a new process, so it does not know the attempt. */
  if (!greeting->ack->model_stands) mlfab__reshard_server_dead(self, at.peer);
}

static void reshard_server_role_gone(void *self, mlfab__at at, int left) {
  (void)left;
  if (at.kind == MLFAB__LINK_RESHARD) mlfab__reshard_server_dead(self, at.peer);
}

static int reshard_server_role_wants(void *self, mlfab__at at, const char *why) {
  (void)why;
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
