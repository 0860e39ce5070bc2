/* server.c - the server role: its life, its workers, the model's definition. See server.h. */
#include "server.h"

#include "reduce.h"

#include <stdio.h>

enum { SERVER_STAGE_BYTES = 4 << 20, SERVER_STAGE_PLANNED = 64 << 20, SERVER_EAGER_LEAST = 4096 };

static int server_init_schedule(mlfab__server *server) {
  const mlfab_schedule *given = &server->config->schedule;
  mlfab__env *env = server->env;
  server->scheduled = server->config->scheduler != MLFAB_SCHEDULER_NONE;
  server->own = (mlfab__capacity){server->config->host, -1.0, -1.0};
  server->schedule.delay_bound = given->delay_bound;
  server->schedule.plan_ahead_ns = given->plan_ahead_ns;
  server->schedule.interval_ns = given->interval_ns;
  server->schedule.best = given->best;
  server->schedule.whole = given->whole;
  server->schedule.no_aggregation = given->no_aggregation;
  server->schedule.no_distribution = given->no_distribution;
  if (!server->scheduled) return 0;
  server->plan_scratch =
      mlfab__alloc_array(env, MLFAB__PLAN_ENTRIES_MAX, sizeof *server->plan_scratch);
  server->group_scratch =
      mlfab__alloc_array(env, MLFAB__GROUP_MEMBERS_MAX, sizeof *server->group_scratch);
  server->meta_scratch = mlfab__alloc(env, MLFAB_META_MAX);
  if (server->plan_scratch && server->group_scratch && server->meta_scratch) return 0;
  mlfab__server_free(server);
  return MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL int mlfab__server_init(mlfab__server *server, mlfab__env *env,
                                       const mlfab_config *config, uint32_t number,
                                       const mlfab__port *port, mlfab_stats *stats) {
  memset(server, 0, sizeof *server);
  server->env = env;
  server->config = config;
  server->port = *port;
  server->stats = stats;
  server->number = number;
  server->workers = config->workers;
  server->servers = config->servers;
  server->heartbeat_ns = config->heartbeat_ns;
  server->epoch = 1;
  server->peers = mlfab__alloc_array(env, server->workers, sizeof *server->peers);
  server->segments_scratch =
      mlfab__alloc_array(env, MLFAB__SEGMENTS_MAX, sizeof *server->segments_scratch);
  server->versions_scratch =
      mlfab__alloc_array(env, MLFAB__SLICES_MAX, sizeof *server->versions_scratch);
  if (!server->peers || !server->segments_scratch || !server->versions_scratch ||
      mlfab__dedup_init(env, &server->dedup, server->workers)) {
    mlfab__server_free(server);
    return MLFAB_ERR_MEMORY;
  }
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS + MLFAB__SERVER_SPREADS; k++)
      server->peers[w].pulls[k].slice = MLFAB__NO_BLOCK;
  }
  return server_init_schedule(server);
}

static void server_free_model(mlfab__server *server) {
  mlfab__env *env = server->env;
  for (uint32_t w = 0; server->peers && w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    mlfab__free(env, peer->arena, peer->arena_bytes);
    peer->arena = NULL;
    peer->arena_bytes = 0;
  }
  for (uint32_t i = 0; i < MLFAB__SERVER_STAGES; i++) {
    mlfab__free(env, server->stages[i], server->stages[i] ? server->stage_bytes : 0);
    server->stages[i] = NULL;
  }
  mlfab__free_aligned(env, server->scratch, server->store.block_bytes);
  server->scratch = NULL;
  mlfab__packed_free(server);
  server->stage_bytes = 0;
  mlfab__free(env, server->ahead, server->store.nslices * sizeof *server->ahead);
  server->ahead = NULL;
  mlfab__gate_free(server);
  mlfab__store_free(env, &server->store);
  mlfab__layout_free(env, &server->layout);
  mlfab__free(env, server->definition, server->ndefinition * sizeof *server->definition);
  server->definition = NULL;
  server->ndefinition = 0;
  server->phase = MLFAB__NO_MODEL;
}

MLFAB__INTERNAL void mlfab__server_free(mlfab__server *server) {
  mlfab__env *env = server->env;
  if (!env) return;
  mlfab__shift_free(server);
  if (server->peers) {
    mlfab__intake_free(server);
    mlfab__answer_free(server);
    for (uint32_t w = 0; w < server->workers; w++) {
      mlfab__free(env, server->peers[w].definition, server->peers[w].definition_bytes);
    }
  }
  server_free_model(server);
  mlfab__dedup_free(env, &server->dedup);
  mlfab__free(env, server->peers, server->workers * sizeof *server->peers);
  mlfab__free(env, server->segments_scratch,
              MLFAB__SEGMENTS_MAX * sizeof *server->segments_scratch);
  mlfab__free(env, server->versions_scratch, MLFAB__SLICES_MAX * sizeof *server->versions_scratch);
  mlfab__free(env, server->plan_scratch, MLFAB__PLAN_ENTRIES_MAX * sizeof *server->plan_scratch);
  mlfab__free(env, server->group_scratch, MLFAB__GROUP_MEMBERS_MAX * sizeof *server->group_scratch);
  mlfab__free(env, server->meta_scratch, MLFAB_META_MAX);
  memset(server, 0, sizeof *server);
}

/* --- a fabric with a scheduler --- */

MLFAB__INTERNAL int mlfab__server_plans(const mlfab__server *server, uint64_t bytes) {
  return server->scheduler_up && bytes > server->config->eager_bytes;
}

MLFAB__INTERNAL uint64_t mlfab__server_shape(const mlfab__segment *segments, uint32_t n) {
  return mlfab__hash(n, segments, n * sizeof *segments);
}

static void server_tell_scheduler(mlfab__server *server, uint8_t type, const void *meta,
                                  uint32_t bytes) {
  if (server->scheduler_up)
    server->port.post(server->port.self, server->workers, type, meta, bytes);
}

MLFAB__INTERNAL void mlfab__server_report(mlfab__server *server, uint32_t kind, uint32_t worker,
                                          uint64_t id, int code) {
  uint8_t meta[128];
  mlfab__report report;
  if (!server->scheduler_up) return;
  memset(&report, 0, sizeof report);
  report.id = id;
  report.placed = server->placed;
  report.backlog = mlfab__intake_backlog(server);
  report.out_backlog = mlfab__answer_backlog(server);
  report.version = server->store.nslices > 0 ? server->store.slices[0].version : 0;
  report.kind = kind;
  report.worker = worker;
  report.code = code;
  server_tell_scheduler(server, MLFAB__REPORT, meta, mlfab__encode_report(meta, &report));
}

MLFAB__INTERNAL void mlfab__server_announce(mlfab__server *server, mlfab__announce *announce) {
  uint8_t meta[128];
  announce->placed = server->placed;
  announce->incarnation = server->peers[announce->worker].incarnation;
  server_tell_scheduler(server, MLFAB__ANNOUNCE, meta, mlfab__encode_announce(meta, announce));
}

static void server_tell_schedule(mlfab__server *server) {
  uint8_t meta[128];
  mlfab__schedule schedule = server->schedule;
  schedule.rounds = (uint32_t)mlfab__gate_rounds(server);
  schedule.host = server->own.host;
  server_tell_scheduler(server, MLFAB__SCHEDULE, meta, mlfab__encode_schedule(meta, &schedule));
}

MLFAB__INTERNAL void mlfab__server_retold(mlfab__server *server) { server_tell_schedule(server); }

static void server_tell_station(mlfab__server *server, uint32_t worker) {
  const mlfab__server_peer *peer = &server->peers[worker];
  mlfab__station station = {worker, peer->incarnation, peer->connected, peer->accumulators,
                            peer->host};
  uint8_t meta[64];
  server_tell_scheduler(server, MLFAB__STATION, meta, mlfab__encode_station(meta, &station));
}

static void server_tell_capacity(mlfab__server *server, uint64_t host, double in, double out) {
  mlfab__capacity capacity = {host, in, out};
  uint8_t meta[32];
  server_tell_scheduler(server, MLFAB__CAPACITY, meta, mlfab__encode_capacity(meta, &capacity));
}

MLFAB__INTERNAL void mlfab__server_scheduler_hello(mlfab__server *server, uint64_t now_ns) {
  server->now_ns = now_ns;
  server->scheduler_up = 1;
  server->unplanned_ns = 0;
  server_tell_schedule(server);
  for (uint32_t w = 0; w < server->workers; w++) {
    const mlfab__server_peer *peer = &server->peers[w];
    if (!peer->connected) continue;
    server_tell_station(server, w);
    server_tell_capacity(server, peer->host, peer->link_in, peer->link_out);
  }
  server_tell_capacity(server, server->own.host, server->own.in, server->own.out);
  mlfab__server_report(server, MLFAB__TRANSFER_PUSH, MLFAB__NO_NODE, 0, 0);
  mlfab__intake_announce_all(server);
  mlfab__answer_announce_all(server);
}

MLFAB__INTERNAL void mlfab__server_scheduler_lost(mlfab__server *server, uint64_t now_ns) {
  server->now_ns = now_ns;
  if (!server->scheduler_up) return;
  server->scheduler_up = 0;
  mlfab__intake_unschedule(server);
  mlfab__answer_unschedule(server);
}

MLFAB__INTERNAL void mlfab__server_scheduler_frame(mlfab__server *server,
                                                   const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__plan plan;
  mlfab__schedule schedule;
  server->now_ns = now_ns;
  if (frame->type == MLFAB__SCHEDULE && server->number != 0 &&
      !mlfab__decode_schedule(frame->meta, frame->meta_bytes, &schedule) &&
      schedule.delay_bound > 0) {
    server->schedule = schedule; /* server 0's */
    mlfab__intake_advance(server);
    return;
  }
  if (frame->type != MLFAB__PLAN ||
      mlfab__decode_plan(frame->meta, frame->meta_bytes, &plan, server->plan_scratch)) {
    mlfab__server_drop(server, server->workers, MLFAB_ERR_FRAME,
                       "neither PLAN nor SCHEDULE that parses");
    return;
  }
  server->unplanned_ns = 0;
  if (plan.rate_in > 0.0)
    mlfab__meter_rate(&server->meter, plan.rate_in, server->config->chunk_bytes);
  if (server->phase != MLFAB__MODEL_STANDS) return;
  for (uint32_t i = 0; i < plan.entries; i++) {
    uint32_t worker = server->plan_scratch[i].worker, hop = server->plan_scratch[i].aggregator;
    if (worker < server->workers && (hop < server->workers || hop == MLFAB__NO_NODE)) continue;
    mlfab__server_drop(server, server->workers, MLFAB_ERR_FRAME,
                       "a PLAN with a worker that there is not");
    return;
  }
  mlfab__intake_plan(server, server->plan_scratch, plan.entries);
  mlfab__answer_plan(server, server->plan_scratch, plan.entries);
}

static void server_schedule(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame) {
  mlfab__schedule schedule;
  if (mlfab__decode_schedule(frame->meta, frame->meta_bytes, &schedule) ||
      schedule.delay_bound == 0) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a SCHEDULE that does not parse");
    return;
  }
  server->schedule = schedule;
  server_tell_schedule(server);
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL void mlfab__server_capacity(mlfab__server *server, const mlfab__capacity *capacity,
                                            uint64_t now_ns) {
  server->now_ns = now_ns;
  server->own = *capacity;
  server_tell_capacity(server, capacity->host, capacity->in, capacity->out);
}

/* A worker's links, for the scheduler; remembered for one that is restarted. */
static void server_worker_capacity(mlfab__server *server, uint32_t worker,
                                   const mlfab__frame_in *frame) {
  mlfab__capacity capacity;
  if (mlfab__decode_capacity(frame->meta, frame->meta_bytes, &capacity) ||
      !(capacity.in - capacity.in == 0.0) || !(capacity.out - capacity.out == 0.0)) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a CAPACITY that is no number");
    return;
  }
  server->peers[worker].link_in = capacity.in;
  server->peers[worker].link_out = capacity.out;
  server_tell_capacity(server, server->peers[worker].host, capacity.in, capacity.out);
}

MLFAB__INTERNAL uint32_t mlfab__server_spare(mlfab__server *server) {
  mlfab__store *store = &server->store;
  if (store->free_count == 0) mlfab__answer_unpin(server);
  /* What is still held is lent to transports, a bounded number of chunks a worker. */
  if (store->free_count == 0 && mlfab__store_grow(server->env, store)) return MLFAB__NO_BLOCK;
  return mlfab__store_take(store);
}

MLFAB__INTERNAL void mlfab__server_drop(mlfab__server *server, uint32_t worker, int code,
                                        const char *text) {
  server->port.drop(server->port.self, worker, code, text);
}

/* --- workers that come and go --- */

/* The worker's arena, once the model tells how large it is worth to be. Without memory it has no
 * credit and waits for grants. */
static uint32_t server_credit(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  if (server->phase != MLFAB__MODEL_STANDS) return 0;
  if (server->store.ghost || peer->arena) return (uint32_t)server->eager_bytes;
  uint64_t bytes = 2 * server->eager_bytes + 16 * MLFAB__SERVER_QUEUED;
  peer->arena = mlfab__alloc(server->env, bytes);
  if (!peer->arena) return 0;
  peer->arena_bytes = bytes;
  return (uint32_t)server->eager_bytes;
}

static void server_hello_ack(mlfab__server *server, uint32_t worker, int was_dead,
                             mlfab__hello_ack *ack) {
  const mlfab__window *window = &server->dedup.windows[worker];
  memset(ack, 0, sizeof *ack);
  ack->server = server->number;
  ack->epoch = server->held ? 0 : server->epoch;
  server->peers[worker].put_off = server->held;
  ack->stopped = server->peers[worker].stopped;
  ack->eager_bytes = server_credit(server, worker);
  ack->generation = server->peers[worker].generation;
  ack->model_stands = server->phase == MLFAB__MODEL_STANDS;
  ack->was_dead = (uint32_t)was_dead;
  ack->v_train = server->peers[worker].pushed;
  ack->top = window->top;
  memcpy(ack->applied, window->applied, sizeof ack->applied);
  memcpy(ack->dropped, window->dropped, sizeof ack->dropped);
}

MLFAB__INTERNAL void mlfab__server_tell(mlfab__server *server, uint32_t worker) {
  mlfab__hello_ack ack;
  uint8_t meta[160];
  /* Slices with another model may have come. */
  if (server->phase == MLFAB__MODEL_STANDS && !server->held) mlfab__gate_tell(server, worker);
  server_hello_ack(server, worker, 3, &ack);
  server->port.post(server->port.self, worker, MLFAB__HELLO_ACK, meta,
                    mlfab__encode_hello_ack(meta, &ack));
}

MLFAB__INTERNAL int mlfab__server_hello(mlfab__server *server, uint32_t worker,
                                        const mlfab__hello *hello, mlfab__hello_ack *ack,
                                        uint64_t now_ns) {
  mlfab__server_peer *peer = &server->peers[worker];
  server->now_ns = now_ns;
  /* The answer tells what is decided, and the window may be a new process's from here on: what is
   * past recall is decided first, at the price of one long step. */
  mlfab__intake_finish(server, worker);
  int code = mlfab__dedup_admit(&server->dedup, worker, hello->incarnation);
  if (code) return code;
  int fresh = hello->incarnation != peer->incarnation;
  int was_dead = fresh || peer->dead;
  mlfab__place_lost_aggregator(server, worker);
  mlfab__intake_reset(server, worker);
  mlfab__answer_reset(server, worker);
  if (peer->dead)
    server->port.event(server->port.self, MLFAB_EVENT_REJOINED, (int32_t)worker, 0,
                       hello->incarnation, 0, "joined again");
  if (fresh) {
    /* A new process: it knows nothing of the old one's "no more data". What the old one has in the
     * open round stays in it, and the round waits for the new one only from the next on. */
    peer->done = 0;
    peer->incarnation = hello->incarnation;
    mlfab__free(server->env, peer->definition, peer->definition_bytes);
    peer->definition = NULL;
    peer->definition_bytes = 0;
  }
  peer->connected = 1;
  peer->dead = peer->left = 0;
  peer->stopped = 0;
  peer->drained = 0;
  uint64_t join = mlfab__gate_join(server, worker);
  peer->pushed = was_dead ? join : mlfab__max(peer->pushed, join);
  peer->decided = mlfab__min(peer->decided, peer->pushed);
  if (fresh) peer->changed = 0;
  mlfab__gate_members(server);
  peer->hand = hello->hand != 0;
  if (fresh) peer->link_in = peer->link_out = -1.0;
  peer->accumulators = hello->accumulators;
  peer->host = hello->host;
  server_tell_station(server, worker);
  server_hello_ack(server, worker, was_dead, ack);
  if (server->phase == MLFAB__MODEL_STANDS) mlfab__gate_tell(server, worker);
  mlfab__intake_advance(server);
  return 0;
}

MLFAB__INTERNAL void mlfab__server_lost(mlfab__server *server, uint32_t worker, uint64_t now_ns) {
  server->now_ns = now_ns;
  server->peers[worker].connected = 0;
  mlfab__place_lost_aggregator(server, worker);
  mlfab__intake_reset(server, worker);
  mlfab__answer_reset(server, worker);
  server_tell_station(server, worker);
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL void mlfab__server_gone(mlfab__server *server, uint32_t worker, int left,
                                        uint64_t now_ns) {
  mlfab__server_lost(server, worker, now_ns);
  *(left ? &server->peers[worker].left : &server->peers[worker].dead) = 1;
  mlfab__gate_members(server);
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL int mlfab__server_finished(const mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    if (!server->peers[w].left && !server->peers[w].dead) return 0;
  }
  return 1;
}

/* --- the definition --- */

static void server_define_ack(mlfab__server *server, uint32_t worker, int code, const char *text) {
  mlfab__define_ack ack;
  memset(&ack, 0, sizeof ack);
  ack.code = code;
  ack.server = server->number;
  ack.v_train = server->peers[worker].pushed;
  ack.options = server->options;
  ack.options.ask = server->peers[worker].definition_options.ask;
  /* Whether the receiver's own first weights are the model's. */
  ack.options.first_weights = worker == 0 && server->first_weights_incarnation != 0 &&
                              server->first_weights_incarnation == server->peers[0].incarnation;
  size_t n = strlen(text);
  memcpy(ack.text, text, n < sizeof ack.text ? n : sizeof ack.text - 1);
  uint8_t meta[MLFAB__TEXT_MAX + 256];
  server->port.post(server->port.self, worker, MLFAB__DEFINE_ACK, meta,
                    mlfab__encode_define_ack(meta, &ack));
}

/* A consistency model that this server cannot keep. */
static int server_check(const mlfab__server *server, const mlfab_sync *sync, mlfab_error *error) {
  int code = mlfab__sync_check(sync, server->workers, error);
  if (code || sync->kind != MLFAB_SYNC_USER ||
      (server->config->pull_condition && server->config->push_condition))
    return code;
  return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, (int32_t)server->number, 1, 0,
                      "not supported: MLFAB_SYNC_USER at server %u, which has no pull_condition or "
                      "no push_condition",
                      server->number);
}

MLFAB__INTERNAL uint64_t mlfab__server_credit(const mlfab__server *server, uint64_t shard) {
  return mlfab__min(server->config->eager_bytes, mlfab__max(SERVER_EAGER_LEAST, 16 * shard));
}

MLFAB__INTERNAL uint64_t mlfab__server_stage(const mlfab__server *server, uint64_t shard,
                                             int ghost) {
  uint64_t stage = server->scheduled ? SERVER_STAGE_PLANNED : SERVER_STAGE_BYTES;
  /* Ghosts take no memory: the stage is as large as it would have to be. */
  return ghost && server->scheduled ? shard : mlfab__min(stage, shard);
}

/* Builds the model from worker 0's definition. */
static int server_build(mlfab__server *server, const mlfab__define *define, const uint8_t *table,
                        mlfab_error *error) {
  mlfab_model_options options;
  memset(&options, 0, sizeof options);
  options.size = sizeof options;
  options.rule = define->rule;
  options.consistency = define->consistency;
  options.sync = define->consistency.kind;
  options.mean = define->mean;
  options.deterministic = define->deterministic;
  options.slices = define->slices;
  options.active = define->active;
  options.tags = define->tags;
  options.pull_half = define->pull_half;
  options.change_threshold = define->change_threshold;
  options.change_decay = define->change_decay;
  options.ghost = define->ghost;
  options.gamma = define->gamma;
  options.adadelay_c = define->adadelay_c;
  options.beta1 = define->beta1;
  options.beta2 = define->beta2;
  options.epsilon = define->epsilon;
  options.weight_decay = define->weight_decay;
  mlfab__env *env = server->env;
  int rounds = mlfab__sync_rounds(define->consistency.kind);
  if (rounds && server->schedule.delay_bound != MLFAB_UNBOUNDED)
    return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, (int32_t)server->number, 1, 0,
                        "not supported: a delay bound (schedule.delay_bound) with rounds, "
                        "which drop nothing");
  server->definition = mlfab__alloc_array(env, define->tensors, sizeof *server->definition);
  if (!server->definition)
    return mlfab__error(error, MLFAB_ERR_MEMORY, (int32_t)server->number, 1, 0,
                        "server %u is out of memory for the model", server->number);
  server->ndefinition = define->tensors;
  for (uint32_t i = 0; i < define->tensors; i++) {
    mlfab__decode_tensor_info(table + (size_t)i * MLFAB__TENSOR_INFO_BYTES, &server->definition[i]);
  }
  int code = mlfab__layout_build(env, server->definition, server->ndefinition, define->slices,
                                 server->servers, define->active, server->config->model_max_bytes,
                                 &server->layout, error);
  if (!code) code = mlfab__store_check(&options, &server->layout, &server->rule, error);
  if (!code) code = server_check(server, &define->consistency, error);
  if (code) return code;
  uint32_t states = server->config->on_update ? 0 : mlfab__rule_states(define->rule);
  code = mlfab__store_init(env, &server->store, &server->layout, server->number,
                           server->config->block_bytes, rounds, states, define->ghost != 0);
  if (!code) {
    server->ahead = mlfab__alloc_array(env, server->store.nslices, sizeof *server->ahead);
    if (!server->ahead && server->store.nslices > 0) code = MLFAB_ERR_MEMORY;
  }
  uint64_t shard = server->store.bytes;
  server->eager_bytes = mlfab__server_credit(server, shard);
  server->stage_bytes = mlfab__server_stage(server, shard, define->ghost != 0);
  if (!code && shard > 0 && !define->ghost) {
    server->stages[0] = mlfab__alloc(env, server->stage_bytes);
    if (!server->stages[0]) {
      server->stage_bytes = 0;
      code = MLFAB_ERR_MEMORY;
    }
    if (!code && server->config->on_update) {
      server->scratch = mlfab__alloc_aligned(env, server->store.block_bytes);
      if (!server->scratch) code = MLFAB_ERR_MEMORY;
    }
  }
  server->options = *define;
  server->epoch = 1;
  if (!code) code = mlfab__changed_open(server, define->ghost != 0);
  if (code)
    return mlfab__error(error, code, (int32_t)server->number, 1, 0,
                        "server %u is out of memory for the model", server->number);
  mlfab__gate_start(server, &define->consistency);
  server_tell_schedule(server);
  server->phase = define->first_weights ? MLFAB__MODEL_DEFINED : MLFAB__MODEL_STANDS;
  return 0;
}

/* Compares a worker's table with worker 0's: 0, or MODEL with the first difference in text. */
static int server_compare(const mlfab__server *server, const mlfab__define *define,
                          const uint8_t *table, mlfab_error *error) {
  if (define->tensors != server->ndefinition) {
    return mlfab__error(error, MLFAB_ERR_MODEL, MLFAB_NO_RANK, 0, 0,
                        "the model has %u tensors, worker 0's has %u", define->tensors,
                        server->ndefinition);
  }
  for (uint32_t i = 0; i < define->tensors; i++) {
    mlfab__tensor_info info;
    const mlfab__tensor_info *first = &server->definition[i];
    mlfab__decode_tensor_info(table + (size_t)i * MLFAB__TENSOR_INFO_BYTES, &info);
    if (info.id == first->id && info.dtype == first->dtype && info.count == first->count) continue;
    return mlfab__error(error, MLFAB_ERR_MODEL, MLFAB_NO_RANK, 0, 0,
                        "tensor number %u is id %u, %llu x %s; worker 0's is id %u, %llu x %s", i,
                        info.id, (unsigned long long)info.count, mlfab__dtype_name((int)info.dtype),
                        first->id, (unsigned long long)first->count,
                        mlfab__dtype_name((int)first->dtype));
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__server_stands(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    if (!peer->definition || !peer->connected) continue;
    mlfab_error error;
    error.text[0] = 0;
    int code = server_compare(server, &peer->definition_options, peer->definition, &error);
    mlfab__free(server->env, peer->definition, peer->definition_bytes);
    peer->definition = NULL;
    peer->definition_bytes = 0;
    if (!code) {
      /* With the model comes the credit. */
      mlfab__hello_ack ack;
      uint8_t meta[160];
      server_hello_ack(server, w, 0, &ack);
      ack.was_dead = 2; /* only the credit counts: nothing is sent again */
      server->port.post(server->port.self, w, MLFAB__HELLO_ACK, meta,
                        mlfab__encode_hello_ack(meta, &ack));
    }
    server_define_ack(server, w, code, code ? error.text : "");
    /* The model of consistency may be another than the definition's by now. */
    if (!code) mlfab__gate_tell(server, w);
  }
}

static void server_forget_definition(mlfab__server *server, mlfab__server_peer *peer) {
  mlfab__free(server->env, peer->definition, peer->definition_bytes);
  peer->definition = NULL;
  peer->definition_bytes = 0;
}

/* Tells a worker, once, that worker 0's definition was refused. */
static void server_tell_refusal(mlfab__server *server, uint32_t worker) {
  char text[MLFAB__TEXT_MAX];
  mlfab__server_peer *peer = &server->peers[worker];
  snprintf(text, sizeof text, "%s%.230s", worker ? "worker 0's model: " : "", server->refusal);
  peer->refusals = server->refusals;
  server_forget_definition(server, peer);
  server_define_ack(server, worker, server->refusal_code, text);
}

/* Worker 0 hears why, and so does whoever waits for its definition: they may all try again. */
static void server_refuse(mlfab__server *server, const mlfab_error *error) {
  server_free_model(server);
  server->refusals++;
  server->refusal_code = error->code;
  snprintf(server->refusal, sizeof server->refusal, "%.255s", error->text);
  for (uint32_t w = 0; w < server->workers; w++) {
    if (server->peers[w].definition && server->peers[w].connected) server_tell_refusal(server, w);
  }
}

static void server_define(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame) {
  mlfab__server_peer *peer = &server->peers[worker];
  mlfab__define define;
  if (mlfab__decode_define(frame->meta, frame->meta_bytes, &define) ||
      frame->bulk_bytes != (uint64_t)define.tensors * MLFAB__TENSOR_INFO_BYTES || !frame->bulk) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a DEFINE that does not parse");
    return;
  }
  peer->definition_options.ask = define.ask;
  uint8_t *copy = mlfab__alloc(server->env, frame->bulk_bytes);
  if (!copy) {
    server_define_ack(server, worker, MLFAB_ERR_MEMORY,
                      "the server is out of memory for the definition");
    return;
  }
  memcpy(copy, frame->bulk, frame->bulk_bytes);
  mlfab__free(server->env, peer->definition, peer->definition_bytes);
  peer->definition = copy;
  peer->definition_bytes = frame->bulk_bytes;
  peer->definition_options = define;
  if (worker == 0 && server->phase == MLFAB__MODEL_DEFINED) {
    /* Its first weights never came: it tries again, perhaps with another model. */
    mlfab__intake_free(server);
    server_free_model(server);
  }
  if (worker == 0 && server->phase == MLFAB__NO_MODEL) {
    mlfab_error error;
    if (server_build(server, &define, copy, &error)) {
      server_refuse(server, &error);
      return;
    }
  }
  if (server->phase == MLFAB__MODEL_STANDS) mlfab__server_stands(server);
  if (server->phase != MLFAB__NO_MODEL) return;
  if (peer->refusals != server->refusals) {
    server_tell_refusal(server, worker);
  } else {
    /* Not an answer yet, but whom it depends on, so that a deadline can name it. */
    server_define_ack(server, worker, MLFAB_ERR_AGAIN, "");
  }
}

/* --- frames and time --- */

static void server_done(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame) {
  mlfab__done done;
  uint8_t meta[32];
  if (mlfab__decode_done(frame->meta, frame->meta_bytes, &done)) {
    mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a DONE that does not parse");
    return;
  }
  server->peers[worker].done = 1;
  mlfab__gate_members(server);
  server->port.post(server->port.self, worker, MLFAB__DONE_ACK, meta,
                    mlfab__encode_done(meta, &done));
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL void mlfab__server_frame(mlfab__server *server, uint32_t worker,
                                         const mlfab__frame_in *frame, uint64_t now_ns) {
  server->now_ns = now_ns;
  int asks = frame->type == MLFAB__PUSH || frame->type == MLFAB__CHUNK ||
             frame->type == MLFAB__PULL || frame->type == MLFAB__SYNC ||
             frame->type == MLFAB__PROGRESS;
  if (server->held && asks) return; /* it says so again when the slices have moved */
  switch (frame->type) {
    case MLFAB__STOP:
      mlfab__shift_stop(server, worker, frame);
      break;
    case MLFAB__DEFINE:
      server_define(server, worker, frame);
      break;
    case MLFAB__SYNC:
      mlfab__gate_ask(server, worker, frame);
      break;
    case MLFAB__PROGRESS:
      mlfab__gate_progress(server, worker, frame);
      break;
    case MLFAB__PUSH:
      /* A round may have to be closed for it: see gate_forced. */
      if (server->peers[worker].stopped) mlfab__gate_members(server);
      mlfab__intake_push(server, worker, frame);
      break;
    case MLFAB__CHUNK:
      mlfab__intake_chunk(server, worker, frame);
      break;
    case MLFAB__WITHDRAW:
      mlfab__intake_withdraw(server, worker, frame);
      break;
    case MLFAB__PULL:
      mlfab__answer_pull(server, worker, frame);
      break;
    case MLFAB__PULL_CANCEL:
      mlfab__answer_cancel(server, worker, frame);
      break;
    case MLFAB__DONE:
      server_done(server, worker, frame);
      break;
    case MLFAB__FORWARD:
      mlfab__intake_forward(server, worker, frame);
      break;
    case MLFAB__GROUP_FAIL:
      mlfab__intake_group_fail(server, worker, frame);
      break;
    case MLFAB__PULL_DONE:
      mlfab__answer_done(server, worker, frame);
      break;
    case MLFAB__SPREAD_FAIL:
      mlfab__answer_spread_fail(server, worker, frame);
      break;
    case MLFAB__CAPACITY:
      server_worker_capacity(server, worker, frame);
      break;
    case MLFAB__SCHEDULE:
      server_schedule(server, worker, frame);
      break;
    default:
      mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a frame that no worker sends");
      break;
  }
}

static void server_watch_scheduler(mlfab__server *server) {
  uint64_t passed = mlfab__min(server->now_ns - server->looked_ns, server->heartbeat_ns);
  server->looked_ns = server->now_ns;
  if (!server->scheduler_up) return;
  int waits = mlfab__place_waits(server) || mlfab__answer_waits(server);
  server->unplanned_ns = waits ? server->unplanned_ns + passed : 0;
  if (server->unplanned_ns < MLFAB__SERVER_PLAN_BEATS * server->heartbeat_ns) return;
  server->unplanned_ns = 0;
  mlfab__server_drop(server, server->workers, MLFAB_ERR_TIMEOUT,
                     "the scheduler plans nothing of what it was told");
}

MLFAB__INTERNAL void mlfab__server_tick(mlfab__server *server, uint64_t now_ns) {
  server->now_ns = now_ns;
  server_watch_scheduler(server);
  mlfab__intake_tick(server);
  mlfab__answer_tick(server);
  mlfab__shift_tick(server);
}

MLFAB__INTERNAL uint64_t mlfab__server_deadline(const mlfab__server *server) {
  return mlfab__intake_deadline(server);
}
