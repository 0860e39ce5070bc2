/* client.c - the server role: its link to the scheduler, and the policy for large transfers. See client.h. */
#include "client.h"

static void client_schedule(mlfab__server *server) {
  uint8_t meta[128];
  mlfab__schedule schedule = server->sched->schedule;
  schedule.rounds = server->rounds != 0;
  schedule.host = server->sched->own.host;
  mlfab__report_tell(server, MLFAB__SCHEDULE, meta, mlfab__encode_schedule(meta, &schedule));
}

static void client_station(mlfab__server *server, uint32_t worker) {
  const mlfab__server_peer *peer = &server->peers[worker];
  mlfab__station station = {worker, peer->incarnation, peer->connected, peer->accumulators,
                            peer->host};
  uint8_t meta[64];
  mlfab__report_tell(server, MLFAB__STATION, meta, mlfab__encode_station(meta, &station));
}

static void client_capacity(mlfab__server *server, uint64_t host, double in, double out) {
  mlfab__capacity capacity = {host, in, out};
  uint8_t meta[32];
  mlfab__report_tell(server, MLFAB__CAPACITY, meta, mlfab__encode_capacity(meta, &capacity));
}

/* A copy or a new process may not know the capacity, but the scheduler may. */
static void client_capacity_known(mlfab__server *server, uint64_t host, double in, double out) {
  if (in >= 0.0 || out >= 0.0) client_capacity(server, host, in, out);
}

static void client_set(mlfab__server *server, const mlfab__schedule *schedule) {
  server->sched->schedule = *schedule;
  server->delay_bound = schedule->delay_bound;
}

MLFAB__INTERNAL void mlfab__server_scheduler_hello(mlfab__server *server, uint64_t now_ns) {
  server->now_ns = now_ns;
  server->sched->up = 1;
  server->sched->unplanned_ns = 0;
  client_schedule(server);
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    if (!peer->connected) continue;
    client_station(server, w);
    client_capacity_known(server, peer->host, peer->link_in, peer->link_out);
  }
  client_capacity_known(server, server->sched->own.host, server->sched->own.in,
                        server->sched->own.out);
  mlfab__report_over(server, MLFAB__TRANSFER_PUSH, MLFAB__NO_NODE, 0, 0);
  mlfab__route_announce_all(server);
  mlfab__spread_announce_all(server);
}

MLFAB__INTERNAL void mlfab__server_scheduler_lost(mlfab__server *server, uint64_t now_ns) {
  server->now_ns = now_ns;
  if (!server->sched || !server->sched->up) return;
  server->sched->up = 0;
  mlfab__route_unschedule(server);
  mlfab__spread_unschedule(server);
}

MLFAB__INTERNAL void mlfab__server_scheduler_frame(mlfab__server *server,
                                                   const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__plan plan;
  mlfab__schedule schedule;
  server->now_ns = now_ns;
  if (frame->type == MLFAB__SCHEDULE && server->number != 0 &&
      !mlfab__decode_schedule(frame->meta, frame->meta_bytes, &schedule) &&
      schedule.delay_bound > 0) {
    client_set(server, &schedule); /* server 0 decides */
    mlfab__server_advance(server);
    return;
  }
  if (frame->type != MLFAB__PLAN ||
      mlfab__decode_plan(frame->meta, frame->meta_bytes, &plan, server->sched->entries)) {
    mlfab__server_drop(server, server->workers, MLFAB_ERR_FRAME,
                       "a frame that is neither a PLAN nor a SCHEDULE, or does not parse");
    return;
  }
  server->sched->unplanned_ns = 0;
  if (plan.rate_in > 0.0)
    mlfab__meter_rate(&server->sched->meter, plan.rate_in, server->config->chunk_bytes);
  if (server->phase != MLFAB__MODEL_STANDS) return;
  for (uint32_t i = 0; i < plan.entries; i++) {
    uint32_t worker = server->sched->entries[i].worker, hop = server->sched->entries[i].aggregator;
    if (worker < server->workers && (hop < server->workers || hop == MLFAB__NO_NODE)) continue;
    mlfab__server_drop(server, server->workers, MLFAB_ERR_FRAME,
                       "a PLAN with a worker that does not exist");
    return;
  }
  mlfab__route_plan(server, server->sched->entries, plan.entries);
  mlfab__spread_plan(server, server->sched->entries, plan.entries);
}

static void client_take_schedule(mlfab__server *server, uint32_t worker,
                                 const mlfab__frame_in *frame) {
  mlfab__schedule schedule;
  if (mlfab__port_refuse(&server->port, worker, frame,
                         mlfab__decode_schedule(frame->meta, frame->meta_bytes, &schedule) ||
                             schedule.delay_bound == 0))
    return;
  client_set(server, &schedule);
  mlfab__touched(server->sched->touch, 0);
  client_schedule(server);
  mlfab__server_advance(server);
}

/* --- the schedule at the other copy of server 0 --- */

static uint32_t client_encode(const void *self, uint32_t record, uint8_t *bytes) {
  const mlfab__server *server = self;
  mlfab__schedule schedule = server->sched->schedule;
  (void)record;
  schedule.rounds = 0; /* the copy's own values */
  schedule.host = 0;
  return mlfab__encode_schedule(bytes, &schedule);
}

static int client_decode(void *self, uint32_t record, const uint8_t *bytes, uint32_t n, int apply) {
  mlfab__server *server = self;
  mlfab__schedule schedule;
  (void)record;
  if (mlfab__decode_schedule(bytes, n, &schedule) || schedule.delay_bound == 0)
    return MLFAB_ERR_FRAME;
  if (apply) client_set(server, &schedule);
  return 0;
}

static void client_begin(void *self) { client_schedule(self); }

MLFAB__INTERNAL mlfab__mirrored mlfab__client_mirrored(mlfab__server *server) {
  return (mlfab__mirrored){.name = "schedule",
                           .self = server,
                           .records = 1,
                           .encode = client_encode,
                           .decode = client_decode,
                           .begin = client_begin,
                           .touch = &server->sched->touch};
}

MLFAB__INTERNAL void mlfab__server_capacity(mlfab__server *server, const mlfab__capacity *capacity,
                                            uint64_t now_ns) {
  server->now_ns = now_ns;
  server->sched->own = *capacity;
  client_capacity(server, capacity->host, capacity->in, capacity->out);
}

/* Forwards a worker's link capacities to the scheduler; keeps them for a restarted one. */
static void client_take_capacity(mlfab__server *server, uint32_t worker,
                                 const mlfab__frame_in *frame) {
  mlfab__capacity capacity;
  if (mlfab__port_refuse(&server->port, worker, frame,
                         mlfab__decode_capacity(frame->meta, frame->meta_bytes, &capacity) ||
                             !mlfab__finite(capacity.in) || !mlfab__finite(capacity.out)))
    return;
  server->peers[worker].link_in = capacity.in;
  server->peers[worker].link_out = capacity.out;
  client_capacity(server, server->peers[worker].host, capacity.in, capacity.out);
}

static void client_watch(mlfab__server *server) {
  uint64_t passed = mlfab__min(server->now_ns - server->sched->looked_ns, server->heartbeat_ns);
  server->sched->looked_ns = server->now_ns;
  if (!server->sched->up) return;
  int waits = mlfab__route_waits(server) || mlfab__spread_waits(server);
  server->sched->unplanned_ns = waits ? server->sched->unplanned_ns + passed : 0;
  if (server->sched->unplanned_ns < MLFAB__SERVER_PLAN_BEATS * server->heartbeat_ns) return;
  server->sched->unplanned_ns = 0;
  mlfab__server_drop(server, server->workers, MLFAB_ERR_TIMEOUT,
                     "the scheduler has planned no announced transfer for 8 heartbeats");
}

/* --- the policy --- */

static int client_frame(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame) {
  switch (frame->type) {
    case MLFAB__CAPACITY:
      client_take_capacity(server, worker, frame);
      return 1;
    case MLFAB__SCHEDULE:
      client_take_schedule(server, worker, frame);
      return 1;
    default:
      return mlfab__route_frame(server, worker, frame) ||
             mlfab__spread_frame(server, worker, frame);
  }
}

static void client_tick(mlfab__server *server) {
  client_watch(server);
  mlfab__spread_tick(server);
}

static void client_came(mlfab__server *server, uint64_t bytes) {
  mlfab__meter_count(&server->sched->meter, bytes);
}

static int client_idle(mlfab__server *server) {
  return mlfab__meter_idle(&server->sched->meter, server->now_ns);
}

static uint64_t client_idle_at(const mlfab__server *server) {
  return mlfab__meter_due(&server->sched->meter);
}

static void client_let(mlfab__server *server) {
  mlfab__meter_begin(&server->sched->meter, server->now_ns);
}

static void client_free(mlfab__server *server) {
  mlfab__env *env = server->env;
  struct mlfab__server_sched *sched = server->sched;
  mlfab__free(env, sched->entries, MLFAB__PLAN_ENTRIES_MAX * sizeof *sched->entries);
  mlfab__free(env, sched->members, MLFAB__GROUP_MEMBERS_MAX * sizeof *sched->members);
  mlfab__free(env, sched->meta, MLFAB_META_MAX);
  mlfab__free(env, sched, sizeof *sched);
  server->sched = NULL;
}

static const mlfab__server_policy client_policy = {
    .free = client_free,
    .frame = client_frame,
    .tick = client_tick,
    .told = client_schedule,
    .station = client_station,
    .hold = mlfab__route_hold,
    .advance = mlfab__route_advance,
    .over = mlfab__route_over,
    .progress = mlfab__route_progress,
    .came = client_came,
    .idle = client_idle,
    .idle_at = client_idle_at,
    .let = client_let,
    .grant = mlfab__route_grant,
    .split = mlfab__route_split,
    .strays = mlfab__route_strays,
    .end = mlfab__route_end,
    .regroup = mlfab__route_regroup,
    .lost = mlfab__route_lost,
    .pull_hold = mlfab__spread_hold,
    .pull_goes = mlfab__spread_goes,
    .pull_left = mlfab__spread_left,
    .pull_out = mlfab__spread_out,
    .pull_over = mlfab__spread_over,
    .stopped = mlfab__spread_stopped,
    .turns = mlfab__spread_turns,
};

MLFAB__INTERNAL int mlfab__client_init(mlfab__server *server) {
  mlfab__env *env = server->env;
  struct mlfab__server_sched *sched = mlfab__alloc(env, sizeof *sched);
  if (!sched) return MLFAB_ERR_MEMORY;
  memset(sched, 0, sizeof *sched);
  server->sched = sched;
  server->policy = &client_policy;
  sched->own = (mlfab__capacity){server->config->host, -1.0, -1.0};
  const mlfab_schedule *given = &server->config->schedule;
  sched->schedule = (mlfab__schedule){.delay_bound = given->delay_bound,
                                      .plan_ahead_ns = given->plan_ahead_ns,
                                      .interval_ns = given->interval_ns,
                                      .best = given->best,
                                      .whole = given->whole,
                                      .no_aggregation = given->no_aggregation,
                                      .no_distribution = given->no_distribution};
  if (!server->scheduled) return 0;
  sched->entries = mlfab__alloc_array(env, MLFAB__PLAN_ENTRIES_MAX, sizeof *sched->entries);
  sched->members = mlfab__alloc_array(env, MLFAB__GROUP_MEMBERS_MAX, sizeof *sched->members);
  sched->meta = mlfab__alloc(env, MLFAB_META_MAX);
  return sched->entries && sched->members && sched->meta ? 0 : MLFAB_ERR_MEMORY;
}
