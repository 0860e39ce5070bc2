/* comm_role.c - collectives as roles of their node. The communicator: PEER are this worker's links to others, PEER_IN
 * theirs to it, SERVER the one to server 0. At server 0, the membership: WORKER. */
#include "../node/node.h"
#include "comm.h"
#include "membership.h"

static int comm_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  switch (at.kind) {
    case MLFAB__LINK_PEER:
      return mlfab__comm_peer_frame(self, at.peer, frame, at.now_ns);
    case MLFAB__LINK_PEER_IN:
      return mlfab__comm_member_frame(self, at.peer, frame, at.now_ns);
    default:
      return at.peer == 0 && mlfab__comm_server_frame(self, frame, at.now_ns);
  }
}

static int comm_role_next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  mlfab__comm *comm = self;
  return mlfab__stream_next(&comm->streams, at.peer, frame);
}

static void comm_role_taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  mlfab__comm *comm = self;
  mlfab__stream_taken(&comm->streams, at.peer, frame);
}

static void comm_role_returned(void *self, mlfab__at at, uint64_t token) {
  mlfab__comm *comm = self;
  mlfab__stream_sent(&comm->streams, at.peer, token);
}

static void comm_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__comm *comm = self;
  if (at.kind == MLFAB__LINK_PEER) mlfab__stream_peer_up(&comm->streams, at.peer);
  if (at.kind == MLFAB__LINK_SERVER && at.peer == 0 && greeting->ack->kind < MLFAB__ACK_CREDIT) {
    if (greeting->ack->guest && comm->epochs == 0) comm->newcomer = 1;
    mlfab__comm_hello(comm);
  }
}

static void comm_role_lost(void *self, mlfab__at at) {
  mlfab__comm *comm = self;
  if (at.kind == MLFAB__LINK_PEER) mlfab__stream_peer_lost(&comm->streams, at.peer);
}

static void comm_role_gone(void *self, mlfab__at at, int left) {
  mlfab__comm *comm = self;
  (void)left;
  if (at.kind != MLFAB__LINK_SERVER) {
    mlfab__stream_parted(&comm->streams, at.peer);
  } else if (at.peer == 0) {
    mlfab__comm_dead(comm, at.now_ns);
  }
}

static int comm_role_wants(void *self, mlfab__at at, const char *why) {
  return at.kind == MLFAB__LINK_PEER && mlfab__comm_peer_missing(self, at.peer, why, at.now_ns);
}

static void comm_role_awake(void *self, uint64_t late_ns, uint64_t now_ns) {
  mlfab__comm *comm = self;
  mlfab__streams_awake(&comm->streams, late_ns, now_ns);
  mlfab__later(&comm->left_ns, late_ns, now_ns);
}

static void comm_role_settle(void *self) {
  mlfab__comm *comm = self;
  if (!comm->newcomer || comm->depth > 0) return;
  if (comm->told && !comm->said) mlfab__epoch_look_ready(comm);
  mlfab__epoch_look_apart(comm);
}

/* Rounds of an open object continue without this worker's call. */
static int comm_role_serves(const void *self) {
  const mlfab__comm *comm = self;
  for (uint32_t i = 0; i < MLFAB__COMM_OBJECTS; i++)
    if (comm->objects[i]) return 1;
  return 0;
}

/* Nobody waits for acknowledgements, either. */
static void comm_role_part(void *self) {
  mlfab__comm *comm = self;
  mlfab__streams_tick(&comm->streams);
}

static void comm_role_capacity(void *self, double in, double out) {
  mlfab__comm *comm = self;
  comm->link_in = in;
  comm->link_out = out;
}

static void comm_role_stats(const void *self, mlfab_stats *stats) {
  const mlfab__comm *comm = self;
  stats->collectives = comm->collectives;
  stats->collectives_failed = comm->collectives_failed;
  stats->collective_epochs = comm->epochs;
  stats->rounds_partial = comm->rounds;
}

static const mlfab__role comm_row = {
    .from = MLFAB__TREE_ASK,
    .to = MLFAB__MEMBERSHIP_OWED,
    .name = "comm",
    .sends = MLFAB__ON(PEER),
    .links = MLFAB__ON(SERVER) | MLFAB__ON(PEER) | MLFAB__ON(PEER_IN),
    .requests = MLFAB__SERVES(COLLECTIVE),
    .frame = comm_role_frame,
    .next = comm_role_next,
    .taken = comm_role_taken,
    .returned = comm_role_returned,
    .up = comm_role_up,
    .lost = comm_role_lost,
    .gone = comm_role_gone,
    .wants = comm_role_wants,
    .awake = comm_role_awake,
    .scan = mlfab__comm_tick,
    .waits = mlfab__comm_waits,
    .settle = comm_role_settle,
    .idle = mlfab__comm_sweep,
    .withdraw = mlfab__comm_withdraw,
    .awaits = mlfab__comm_awaited,
    .serves = comm_role_serves,
    .leave = mlfab__comm_leave,
    .finish = mlfab__comm_finish_work,
    .finished = mlfab__comm_finish_over,
    .quiet = mlfab__comm_quiet,
    .part = comm_role_part,
    .capacity = comm_role_capacity,
    .stats = comm_role_stats,
    .free = mlfab__comm_free,
};

MLFAB__INTERNAL int mlfab__comm_attach(mlfab_node *node, mlfab__comm **comm_p) {
  mlfab__role *role = mlfab__roles_add(node, &comm_row, sizeof **comm_p);
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port up = mlfab__roles_port(node, role, MLFAB__LINK_SERVER);
  mlfab__port links = mlfab__roles_port(node, role, MLFAB__LINK_PEER);
  mlfab__port down = mlfab__roles_port(node, role, MLFAB__LINK_PEER_IN);
  *comm_p = role->self;
  int code = mlfab__comm_init(*comm_p, &node->env, &node->config, (uint32_t)node->config.rank, &up,
                              &links, &down, &node->requests);
  (*comm_p)->host = node->config.host;
  (*comm_p)->founders = node->founders;
  return code;
}

/* --- the membership --- */

static int membership_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  return mlfab__membership_frame(self, at.peer, frame, at.now_ns);
}

static void membership_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__membership_hello(self, at.peer, greeting->incarnation, at.now_ns);
}

static void membership_role_gone(void *self, mlfab__at at, int left) {
  mlfab__membership_gone(self, at.peer, left, at.now_ns);
}

static void membership_role_awake(void *self, uint64_t late_ns, uint64_t now_ns) {
  mlfab__membership *membership = self;
  mlfab__later(&membership->inquiry.asked_ns, late_ns, now_ns);
}

static const mlfab__role membership_row = {
    .from = MLFAB__DONE,
    .to = MLFAB__MEMBERSHIP_OWED,
    .name = "membership",
    .links = MLFAB__ON(WORKER),
    .frame = membership_role_frame,
    .up = membership_role_up,
    .gone = membership_role_gone,
    .awake = membership_role_awake,
    .scan = mlfab__membership_tick,
    .free = mlfab__membership_free,
};

MLFAB__INTERNAL int mlfab__membership_attach(mlfab_node *node,
                                             struct mlfab__barrier_server *barrier,
                                             mlfab__membership **membership_p) {
  mlfab__role *role = mlfab__roles_add(node, &membership_row, sizeof **membership_p);
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port down = mlfab__roles_port(node, role, MLFAB__LINK_WORKER);
  *membership_p = role->self;
  if (mlfab__membership_init(*membership_p, &node->env, &node->config, &down))
    return MLFAB_ERR_MEMORY;
  (*membership_p)->barrier = barrier;
  const mlfab__mirrored part = mlfab__membership_mirrored(*membership_p);
  mlfab__mirrored_add(node, &part);
  return 0;
}
