/* mirror_role.c - the mirror as a role of server 0's node, at both of its copies. See mirror.h. VOTER is its link to the
 * other copy, VOTER_IN the one from it. */
#include "../node/copies.h"
#include "mirror.h"

typedef struct mlfab__mirror_role {
  mlfab_node *node;
  mlfab__mirror mirror;
} mlfab__mirror_role;

static int mirror_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__mirror_role *role = self;
  if (at.kind != MLFAB__LINK_VOTER_IN || at.peer != role->mirror.peer) return MLFAB_ERR_FRAME;
  int code = mlfab__mirror_hear(&role->mirror, frame, at.now_ns, role->node->config.heartbeat_ns);
  return code ? code : 1;
}

static int mirror_role_next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  mlfab__mirror_role *role = self;
  return at.peer == role->mirror.peer && mlfab__mirror_next(&role->mirror, frame);
}

static void mirror_role_taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  mlfab__mirror_role *role = self;
  mlfab__mirror_taken(&role->mirror, frame, at.now_ns);
}

/* Frames that wait for a worker are lost with its former link: drops them before the parts greet it on this link. */
static int mirror_role_hello(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__mirror_role *role = self;
  (void)greeting;
  if (at.kind == MLFAB__LINK_WORKER || at.kind == MLFAB__LINK_SCHEDULER)
    mlfab__mirror_forget(&role->mirror, at.peer);
  return 0;
}

static void mirror_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__mirror_role *role = self;
  (void)greeting;
  if (at.kind == MLFAB__LINK_VOTER && at.peer == role->mirror.peer)
    mlfab__mirror_link(&role->mirror, 1);
}

static void mirror_role_lost(void *self, mlfab__at at) {
  mlfab__mirror_role *role = self;
  if (at.peer != role->mirror.peer) return;
  if (at.kind == MLFAB__LINK_VOTER) mlfab__mirror_link(&role->mirror, 0);
  if (at.kind == MLFAB__LINK_VOTER_IN) mlfab__mirror_cut(&role->mirror);
}

static uint64_t mirror_role_deadline(const void *self) {
  const mlfab__mirror_role *role = self;
  return mlfab__mirror_deadline(&role->mirror, role->node->config.heartbeat_ns);
}

static void mirror_role_settle(void *self) {
  mlfab__mirror_role *role = self;
  mlfab__mirror_look(&role->mirror, role->node->now_ns, role->node->config.heartbeat_ns);
}

static void mirror_role_free(void *self) {
  mlfab__mirror_role *role = self;
  mlfab__mirror_free(&role->mirror);
}

static const mlfab__role mirror_row = {
    .name = "mirror",
    .from = MLFAB__MIRROR,
    .to = MLFAB__MIRROR_HAS,
    .links = MLFAB__ON(VOTER) | MLFAB__ON(VOTER_IN) | MLFAB__ON(WORKER) | MLFAB__ON(SCHEDULER),
    .sends = MLFAB__ON(VOTER),
    .urgent = MLFAB__ON(VOTER),
    .frame = mirror_role_frame,
    .next = mirror_role_next,
    .taken = mirror_role_taken,
    .hello = mirror_role_hello,
    .up = mirror_role_up,
    .lost = mirror_role_lost,
    .deadline = mirror_role_deadline,
    .settle = mirror_role_settle,
    .free = mirror_role_free,
};

MLFAB__INTERNAL int mlfab__mirror_attach(mlfab_node *node, uint32_t peer,
                                         mlfab__mirror **mirror_p) {
  *mirror_p = NULL;
  const mlfab__copies *copies = node->replica;
  if (copies->nmirrored == 0) return 0;
  mlfab__role *row = mlfab__roles_add(node, &mirror_row, sizeof(mlfab__mirror_role));
  if (!row) return MLFAB_ERR_MEMORY;
  mlfab__mirror_role *role = row->self;
  role->node = node;
  *mirror_p = &role->mirror;
  const mlfab__port out = mlfab__roles_port(node, row, MLFAB__LINK_VOTER);
  return mlfab__mirror_init(&role->mirror, &node->env, copies->mirrored, copies->nmirrored, &out,
                            peer);
}
