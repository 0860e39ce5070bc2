/* sched_role.c - scheduling as roles of a node: the aggregator on a worker's node, the scheduler, and the server's link
 * to the scheduler. Links: SERVER to servers, PEER_IN from members, PEER from the worker to other aggregators; PLANNER
 * of the scheduler; SCHEDULER to it. */
#include "sched_role.h"

/* --- the aggregator --- */

static int aggregator_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__aggregator *aggregator = self;
  if (at.kind == MLFAB__LINK_SERVER)
    return mlfab__aggregator_server_frame(self, at.peer, frame, at.now_ns);
  if (at.kind == MLFAB__LINK_PEER)
    mlfab__hops_frame(&aggregator->hops, at, frame);
  else
    mlfab__aggregator_member_frame(self, at.peer, frame, at.now_ns);
  return 1;
}

static int aggregator_role_next(void *self, mlfab__at at, mlfab__frame_out *frame) {
  mlfab__aggregator *aggregator = self;
  if (at.kind == MLFAB__LINK_PEER) return mlfab__hops_next(&aggregator->hops, at, frame);
  return at.kind == MLFAB__LINK_SERVER ? mlfab__aggregator_next_up(self, at.peer, frame)
                                       : mlfab__aggregator_next_down(self, at.peer, frame);
}

static void aggregator_role_taken(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  if (at.kind == MLFAB__LINK_SERVER) {
    mlfab__aggregator_taken_up(self, at.peer, frame);
  } else if (at.kind == MLFAB__LINK_PEER) {
    mlfab__hops_taken(&((mlfab__aggregator *)self)->hops, at, frame);
  } else {
    mlfab__aggregator_taken_down(self, at.peer, frame);
  }
}

static void aggregator_role_returned(void *self, mlfab__at at, uint64_t token) {
  if (at.kind == MLFAB__LINK_PEER)
    mlfab__hops_returned(&((mlfab__aggregator *)self)->hops, at, token);
  else
    mlfab__aggregator_sent(self, token);
}

static void aggregator_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  if (at.kind == MLFAB__LINK_PEER_IN)
    mlfab__aggregator_met(self, at.peer, greeting->incarnation, at.now_ns);
}

static void aggregator_role_lost(void *self, mlfab__at at) {
  if (at.kind == MLFAB__LINK_SERVER) {
    mlfab__aggregator_server_lost(self, at.peer);
  } else if (at.kind == MLFAB__LINK_PEER) {
    mlfab__hops_lost(&((mlfab__aggregator *)self)->hops, at);
  } else {
    mlfab__aggregator_lost(self, at.peer, at.now_ns);
  }
}

static void aggregator_role_gone(void *self, mlfab__at at, int left) {
  (void)left;
  if (at.kind == MLFAB__LINK_SERVER) mlfab__aggregator_server_lost(self, at.peer);
}

static int aggregator_role_wants(void *self, mlfab__at at, const char *why) {
  (void)why;
  return at.kind == MLFAB__LINK_PEER &&
         mlfab__hops_wants(&((mlfab__aggregator *)self)->hops, at.peer);
}

static void aggregator_role_tick(void *self, uint64_t now_ns) {
  mlfab__aggregator_tick(self, now_ns);
}

static void aggregator_role_awake(void *self, uint64_t late_ns, uint64_t now_ns) {
  mlfab__aggregator_awake(self, late_ns, now_ns);
}

static uint64_t aggregator_role_deadline(const void *self) {
  return mlfab__aggregator_deadline(self);
}

/* Follows a change of the worker's layout. */
static void aggregator_role_settle(void *self) {
  mlfab__aggregator *aggregator = self;
  const mlfab__worker *worker = aggregator->hops.worker;
  if (aggregator->epoch == worker->epoch || !worker->stands) return;
  aggregator->epoch = worker->epoch;
  mlfab__aggregator_model(aggregator, &worker->layout, worker->define.options.ghost != 0);
}

static void aggregator_role_free(void *self) {
  mlfab__hops_free(&((mlfab__aggregator *)self)->hops);
  mlfab__aggregator_free(self);
}

static const mlfab__role aggregator_row = {
    .from = MLFAB__MODEL,
    .to = MLFAB__HOP_MODEL,
    .name = "aggregator",
    .rest = 1,
    .sends = MLFAB__ON(SERVER) | MLFAB__ON(PEER_IN) | MLFAB__ON(PEER),
    .urgent = MLFAB__ON(SERVER), /* others wait for the forwarded bytes */
    .links = MLFAB__ON(SERVER) | MLFAB__ON(PEER_IN) | MLFAB__ON(PEER),
    .frame = aggregator_role_frame,
    .next = aggregator_role_next,
    .taken = aggregator_role_taken,
    .returned = aggregator_role_returned,
    .up = aggregator_role_up,
    .lost = aggregator_role_lost,
    .gone = aggregator_role_gone,
    .wants = aggregator_role_wants,
    .tick = aggregator_role_tick,
    .awake = aggregator_role_awake,
    .deadline = aggregator_role_deadline,
    .settle = aggregator_role_settle,
    .free = aggregator_role_free,
};

MLFAB__INTERNAL int mlfab__aggregator_attach(mlfab_node *node, mlfab__aggregator **aggregator_p) {
  mlfab__role *role = mlfab__roles_add(node, &aggregator_row, sizeof **aggregator_p);
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port up = mlfab__roles_port(node, role, MLFAB__LINK_SERVER);
  mlfab__port down = mlfab__roles_port(node, role, MLFAB__LINK_PEER_IN);
  *aggregator_p = role->self;
  int code =
      mlfab__aggregator_init(*aggregator_p, &node->env, &node->config, &up, &down, &node->stats);
  (*aggregator_p)->hops.port = mlfab__roles_port(node, role, MLFAB__LINK_PEER);
  return code;
}

/* --- the scheduler --- */

static int scheduler_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__scheduler_frame(self, at.peer, frame, at.now_ns);
  return 1;
}

static void scheduler_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  (void)greeting;
  mlfab__scheduler_hello(self, at.peer, at.now_ns);
}

static void scheduler_role_lost(void *self, mlfab__at at) {
  mlfab__scheduler_lost(self, at.peer, at.now_ns);
}

static void scheduler_role_gone(void *self, mlfab__at at, int left) {
  (void)left;
  mlfab__scheduler_lost(self, at.peer, at.now_ns);
}

static int scheduler_role_wants(void *self, mlfab__at at, const char *why) {
  (void)at;
  (void)why;
  (void)self;
  return 1;
}

static void scheduler_role_tick(void *self, uint64_t now_ns) {
  mlfab__scheduler_tick(self, now_ns);
}

static uint64_t scheduler_role_deadline(const void *self) {
  return mlfab__scheduler_deadline(self);
}

static void scheduler_role_free(void *self) {
  mlfab__scheduler *scheduler = self;
  mlfab__scheduler_destroy(&scheduler);
}

static const mlfab__role scheduler_row = {
    .name = "scheduler",
    .rest = 1,
    .links = MLFAB__ON(PLANNER),
    .frame = scheduler_role_frame,
    .up = scheduler_role_up,
    .lost = scheduler_role_lost,
    .gone = scheduler_role_gone,
    .wants = scheduler_role_wants,
    .tick = scheduler_role_tick,
    .deadline = scheduler_role_deadline,
    .free = scheduler_role_free,
};

MLFAB__INTERNAL int mlfab__scheduler_attach(mlfab_node *node, mlfab__scheduler **scheduler_p) {
  mlfab__role *role = mlfab__roles_add(node, &scheduler_row, 0);
  mlfab__port plan = mlfab__roles_port(node, role, MLFAB__LINK_PLANNER);
  int code = mlfab__scheduler_create(&node->env, &node->config, &plan, &node->stats, scheduler_p);
  role->self = *scheduler_p;
  if (!code) (*scheduler_p)->tap = &node->tap;
  return code;
}

/* --- the server's link to the scheduler --- */

static int client_role_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__server_scheduler_frame(self, frame, at.now_ns);
  return 1;
}

static void client_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  (void)greeting;
  mlfab__server_scheduler_hello(self, at.now_ns);
}

static void client_role_lost(void *self, mlfab__at at) {
  mlfab__server_scheduler_lost(self, at.now_ns);
}

static const mlfab__role client_row = {
    .name = "client",
    .rest = 1,
    .links = MLFAB__ON(SCHEDULER),
    .frame = client_role_frame,
    .up = client_role_up,
    .lost = client_role_lost,
};

MLFAB__INTERNAL int mlfab__client_attach(mlfab_node *node, mlfab__server *server) {
  mlfab__roles_add(node, &client_row, 0)->self = server;
  int code = mlfab__client_init(server);
  if (code || !node->is_coordinator) return code;
  const mlfab__mirrored part = mlfab__client_mirrored(server);
  mlfab__mirrored_add(node, &part);
  return 0;
}

/* --- the capacities of this host's links --- */

/* Updates the statistics, and reports changes to the scheduler; `anew`: reports in any case. */
static void capacity_tell(mlfab__capacity_role *role, int anew, uint64_t now_ns) {
  mlfab_node *node = role->node;
  mlfab__capacity capacity = {node->config.host, -1.0, -1.0};
  if (node->phase != MLFAB__BOOTSTRAP_READY) return;
  int changed = mlfab__monitor_take(&role->monitor, now_ns, &capacity.in, &capacity.out);
  double in = capacity.in > 0.0 ? capacity.in : 0.0, out = capacity.out > 0.0 ? capacity.out : 0.0;
  node->stats.link_in = (uint64_t)in;
  node->stats.link_out = (uint64_t)out;
  MLFAB__EACH_ROLE(other, node, capacity) other->capacity(other->self, in, out);
  if (node->config.scheduler == MLFAB_SCHEDULER_NONE || (!changed && !anew)) return;
  if (role->server) {
    mlfab__server_capacity(role->server, &capacity, now_ns);
  } else if (node->is_worker) {
    role->told = 1;
    MLFAB__POST(&role->up, 0, MLFAB__CAPACITY, capacity, &capacity);
  }
}

static void capacity_measured(void *self, const mlfab_measure *measure, uint64_t now_ns) {
  mlfab__capacity_role *role = self;
  mlfab__monitor_sample(&role->monitor, measure, now_ns);
  capacity_tell(role, 0, now_ns);
}

MLFAB__INTERNAL void mlfab__capacity_set(mlfab__capacity_role *role, double in, double out,
                                         uint64_t now_ns) {
  mlfab__monitor_set(&role->monitor, in, out);
  capacity_tell(role, 1, now_ns);
}

MLFAB__INTERNAL void mlfab__capacity_other(mlfab__capacity_role *role, double in, double out,
                                           double speed, uint64_t now_ns) {
  mlfab__monitor_other(&role->monitor, in, out, speed);
  capacity_tell(role, 0, now_ns);
}

static void capacity_role_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__capacity_role *role = self;
  (void)greeting;
  if (at.peer == 0 && role->told) capacity_tell(role, 1, at.now_ns);
}

static const mlfab__role capacity_row = {
    .name = "capacity",
    .rest = 1,
    .links = MLFAB__ON(SERVER),
    .up = capacity_role_up,
    .measured = capacity_measured,
};

MLFAB__INTERNAL int mlfab__capacity_attach(mlfab_node *node, mlfab__server *server,
                                           mlfab__capacity_role **capacity_p) {
  mlfab__role *role = mlfab__roles_add(node, &capacity_row, sizeof **capacity_p);
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__capacity_role *self = *capacity_p = role->self;
  self->node = node;
  self->server = server;
  self->up = mlfab__roles_port(node, role, MLFAB__LINK_SERVER);
  mlfab__monitor_init(&self->monitor, node->config.heartbeat_ns);
  return 0;
}
