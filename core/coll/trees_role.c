/* trees_role.c - planned trees as a role of server 0. WORKER: links of workers; SCHEDULER: the link of the scheduler. */
#include "../node/node.h"
#include "trees.h"

static int trees_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  return at.kind == MLFAB__LINK_SCHEDULER ? mlfab__trees_scheduler_frame(self, frame)
                                          : mlfab__trees_frame(self, at.peer, frame, at.now_ns);
}

static void trees_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  (void)greeting;
  if (at.kind == MLFAB__LINK_SCHEDULER) mlfab__trees_scheduler(self, 1);
}

static void trees_role_lost(void *self, mlfab__at at) {
  if (at.kind == MLFAB__LINK_SCHEDULER) mlfab__trees_scheduler(self, 0);
}

static const mlfab__role trees_row = {
    .from = MLFAB__TREE_ASK,
    .to = MLFAB__TREE_PLAN,
    .name = "trees",
    .links = MLFAB__ON(WORKER) | MLFAB__ON(SCHEDULER),
    .frame = trees_role_frame,
    .up = trees_role_up,
    .lost = trees_role_lost,
    .scan = mlfab__trees_tick,
    .free = mlfab__trees_free,
};

MLFAB__INTERNAL int mlfab__trees_attach(mlfab_node *node, const mlfab__membership *membership) {
  mlfab__role *role = mlfab__roles_add(node, &trees_row, sizeof(mlfab__trees));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port down = mlfab__roles_port(node, role, MLFAB__LINK_WORKER);
  mlfab__trees_init(role->self, &node->env, &node->config, &down, membership);
  const mlfab__mirrored part = mlfab__trees_mirrored(role->self);
  mlfab__mirrored_add(node, &part);
  return 0;
}
