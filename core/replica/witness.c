/* witness.c - the scheduler's vote: the role of a witness. See voter.h. */
#include "voter.h"

static int witness_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  if (at.kind != MLFAB__LINK_VOTER_IN || frame->type != MLFAB__VOTE) return MLFAB_ERR_FRAME;
  int code = mlfab__voters_frame(self, at.peer, frame);
  return code ? code : 1;
}

static void witness_tick(void *self, uint64_t now_ns) {
  (void)now_ns;
  mlfab__voters_tick(self);
}

static void witness_awake(void *self, uint64_t late_ns, uint64_t now_ns) {
  mlfab__voters_awake(self, late_ns, now_ns);
}

static void witness_settle(void *self) { mlfab__voters_settle(self); }

static uint64_t witness_deadline(const void *self) { return mlfab__voters_deadline(self); }

static void witness_free(void *self) { mlfab__voters_free(self); }

static const mlfab__role witness_row = {
    .name = "witness",
    .from = MLFAB__VOTE,
    .to = MLFAB__VOTE,
    .links = MLFAB__ON(VOTER) | MLFAB__ON(VOTER_IN),
    .frame = witness_frame,
    .tick = witness_tick,
    .awake = witness_awake,
    .settle = witness_settle,
    .deadline = witness_deadline,
    .free = witness_free,
};

MLFAB__INTERNAL int mlfab__witness_attach(mlfab_node *node, const mlfab__voter_disk *disk) {
  mlfab__role *role = mlfab__roles_add(node, &witness_row, sizeof(mlfab__voters));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port port = mlfab__roles_port(node, role, MLFAB__LINK_VOTER);
  mlfab__port in = mlfab__roles_port(node, role, MLFAB__LINK_VOTER_IN);
  return mlfab__voters_init(role->self, node, &port, &in, 0, node->config.servers, disk);
}
