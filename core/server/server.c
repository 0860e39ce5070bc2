/* server.c - the server role: start and end, its workers, the model's definition. See server.h. */
#include "server.h"

#include "../kernels/kernels.h"

#include <stdio.h>

enum {
  SERVER_STAGE_BYTES = 4 << 20,
  SERVER_STAGE_PLANNED = 64 << 20,
  SERVER_EAGER_LEAST = 4096,
  SERVER_TICK_BYTES = 4 << 20, /* bytes applied at a time */
  SERVER_COPY_NS = 20000       /* between two looks at copies from a device */
};

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
  server->save.at = MLFAB__NEVER;
  server->peers = mlfab__alloc_array(env, server->workers, sizeof *server->peers);
  server->lists = mlfab__alloc_aligned(env, sizeof *server->lists);
  if (!server->peers || !server->lists ||
      !(server->serve.orphans = mlfab__grow(env, NULL, &server->serve.orphan_room,
                                            (uint64_t)server->workers * MLFAB__SERVER_SENDS,
                                            sizeof *server->serve.orphans)) ||
      mlfab__windows_init(env, &server->windows, server->workers)) {
    mlfab__server_free(server);
    return MLFAB_ERR_MEMORY;
  }
  for (uint32_t w = 0; w < server->workers; w++) {
    for (uint32_t k = 0; k < MLFAB__SERVER_PULLS + MLFAB__SERVER_SPREADS; k++)
      server->peers[w].pulls[k].slice = MLFAB__NO_BLOCK;
    server->peers[w].link_in = server->peers[w].link_out = -1.0;
  }
  server->scheduled = config->scheduler != MLFAB_SCHEDULER_NONE;
  server->delay_bound = config->schedule.delay_bound;
  return 0;
}

MLFAB__INTERNAL void mlfab__server_empty(mlfab__server *server) {
  mlfab__env *env = server->env;
  for (uint32_t w = 0; server->peers && w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    mlfab__free(env, peer->arena, peer->arena_bytes);
    peer->arena = NULL;
    peer->arena_bytes = peer->arena_head = peer->arena_tail = 0;
  }
  for (uint32_t i = 0; i < MLFAB__SERVER_STAGES; i++) {
    mlfab__free(env, server->apply.stages[i],
                server->apply.stages[i] ? server->apply.stage_bytes : 0);
    server->apply.stages[i] = NULL;
  }
  server->apply.stage_bytes = 0;
  mlfab__free_aligned(env, server->apply.scratch, server->store.block_bytes);
  server->apply.scratch = NULL;
  mlfab__free(env, server->queue.ahead, server->store.nslices * sizeof *server->queue.ahead);
  server->queue.ahead = NULL;
  mlfab__blocks_retire(server);
  mlfab__layout_free(env, &server->layout);
}

MLFAB__INTERNAL void mlfab__server_unbuild(mlfab__server *server) {
  if (server->save.hooks) server->save.hooks->stop(server);
  if (server->keeper) server->keeper->stop(server);
  server->save.cut = 0;
  server->save.restored = server->save.restored_version = 0;
  if (server->sparse) server->sparse->free(server);
  mlfab__clock_free(server);
  mlfab__server_empty(server);
  mlfab__free(server->env, server->definition, server->ndefinition * sizeof *server->definition);
  server->definition = NULL;
  server->ndefinition = 0;
  server->phase = MLFAB__NO_MODEL;
}

MLFAB__INTERNAL void mlfab__server_free(mlfab__server *server) {
  mlfab__env *env = server->env;
  if (!env) return;
  server->closing = 1;
  if (server->move.hooks) server->move.hooks->free(server);
  if (server->keeper) server->keeper->stop(server);
  if (server->keeper) server->keeper->free(server);
  if (server->peers) {
    mlfab__apply_free(server);
    mlfab__serve_free(server);
    for (uint32_t w = 0; w < server->workers; w++) {
      mlfab__free(env, server->peers[w].definition, server->peers[w].definition_bytes);
    }
  }
  mlfab__server_unbuild(server);
  mlfab__windows_free(env, &server->windows);
  mlfab__free(env, server->peers, server->workers * sizeof *server->peers);
  mlfab__free_aligned(env, server->lists, sizeof *server->lists);
  if (server->policy) server->policy->free(server);
  if (server->memory) server->memory->on->free(server->memory);
  if (server->lender) server->lender->free(server);
  memset(server, 0, sizeof *server);
}

MLFAB__INTERNAL void mlfab__server_disown(mlfab__server *server) {
  if (server->memory) server->memory->on->disown(server->memory);
}

static void server_forget_definition(mlfab__server *server, mlfab__server_peer *peer) {
  mlfab__free(server->env, peer->definition, peer->definition_bytes);
  peer->definition = NULL;
  peer->definition_bytes = 0;
}

/* --- workers that come and go --- */

/* Allocates the worker's arena once the model, and so its size, is known. Without memory the worker has no
 * credit and waits for grants. */
static uint32_t server_make_credit(mlfab__server *server, uint32_t worker) {
  mlfab__server_peer *peer = &server->peers[worker];
  if (server->phase != MLFAB__MODEL_STANDS) return 0;
  if (server->store.ghost || peer->arena) return (uint32_t)server->eager_bytes;
  uint64_t bytes = 2 * server->eager_bytes + 16 * MLFAB__SERVER_QUEUED;
  peer->arena = mlfab__alloc(server->env, bytes);
  if (!peer->arena) return 0;
  peer->arena_bytes = bytes;
  return (uint32_t)server->eager_bytes;
}

MLFAB__INTERNAL void mlfab__server_hello_ack(mlfab__server *server, uint32_t worker, uint32_t kind,
                                             mlfab__hello_ack *ack) {
  uint64_t pushed = server->peers[worker].pushed;
  const mlfab__window *window = kind == MLFAB__ACK_CREDIT ? &server->windows.windows[worker]
                                                          : mlfab__server_window(server, worker);
  /* It will hear of decisions that it may not rely on yet from their answers, which also move its progress on. */
  if (window != &server->windows.windows[worker] && kind == MLFAB__ACK_ALIVE) pushed = 0;
  memset(ack, 0, sizeof *ack);
  ack->server = server->number;
  ack->epoch = server->move.held ? 0 : server->epoch;
  server->peers[worker].put_off = server->move.held;
  ack->stopped = server->peers[worker].stopped;
  ack->eager_bytes = server_make_credit(server, worker);
  ack->generation = server->peers[worker].generation;
  ack->model_stands = server->phase == MLFAB__MODEL_STANDS;
  ack->kind = kind;
  ack->v_train = pushed;
  ack->term = server->term;
  ack->guest = server->peers[worker].guest;
  ack->top = window->top;
  memcpy(ack->applied, window->applied, sizeof ack->applied);
  memcpy(ack->dropped, window->dropped, sizeof ack->dropped);
  ack->taken = server->windows.windows[worker].taken;
}

MLFAB__INTERNAL int mlfab__server_hello(mlfab__server *server, uint32_t worker,
                                        const mlfab__hello *hello, mlfab__hello_ack *ack,
                                        uint64_t now_ns) {
  mlfab__server_peer *peer = &server->peers[worker];
  server->now_ns = now_ns;
  /* The answer reports which updates are decided, and the window may belong to a new process from here on.
   * So an update that is being applied is decided first, in one long step. */
  mlfab__apply_finish(server, worker);
  int code = mlfab__windows_admit(&server->windows, worker, hello->incarnation);
  if (code) return code;
  int fresh = hello->incarnation != peer->incarnation;
  int was_dead = fresh || peer->dead;
  /* The fabric begins with the founders, so nobody is ahead of their first processes. */
  if (fresh) peer->guest = peer->incarnation != 0 || peer->absent;
  peer->absent = 0;
  if (server->policy) server->policy->lost(server, worker);
  mlfab__apply_reset(server, worker);
  mlfab__serve_reset(server, worker);
  if (peer->dead)
    server->port.event(server->port.self, MLFAB_EVENT_REJOINED, (int32_t)worker, 0,
                       hello->incarnation, 0, "joined again");
  if (fresh) {
    /* The old process may have said "no more data"; the new process has data. The old share stays in the open
     * round; rounds wait for the new process from the next round on. */
    peer->done = 0;
    peer->incarnation = hello->incarnation;
    server_forget_definition(server, peer);
  }
  peer->connected = 1;
  peer->dead = peer->left = 0;
  peer->stopped = 0;
  peer->drained = 0;
  uint64_t join = mlfab__clock_join(server, worker);
  peer->pushed = was_dead ? join : mlfab__max(peer->pushed, join);
  peer->decided = mlfab__min(peer->decided, peer->pushed);
  if (fresh) peer->changed = peer->change.ask = 0;
  mlfab__clock_members(server);
  if (fresh) peer->link_in = peer->link_out = -1.0;
  peer->accumulators = hello->accumulators;
  peer->host = hello->host;
  if (server->policy) server->policy->station(server, worker);
  mlfab__server_hello_ack(server, worker, was_dead ? MLFAB__ACK_DEAD : MLFAB__ACK_ALIVE, ack);
  if (server->phase == MLFAB__MODEL_STANDS) mlfab__clock_tell(server, worker);
  mlfab__server_advance(server);
  return 0;
}

MLFAB__INTERNAL void mlfab__server_lost(mlfab__server *server, uint32_t worker, uint64_t now_ns) {
  server->now_ns = now_ns;
  server->peers[worker].connected = 0;
  if (server->policy) server->policy->lost(server, worker);
  mlfab__apply_reset(server, worker);
  mlfab__serve_reset(server, worker);
  if (server->policy) server->policy->station(server, worker);
  mlfab__server_advance(server);
}

MLFAB__INTERNAL void mlfab__server_gone(mlfab__server *server, uint32_t worker, int left,
                                        uint64_t now_ns) {
  if (left && server->lender) server->lender->left(server, worker);
  mlfab__server_lost(server, worker, now_ns);
  *(left ? &server->peers[worker].left : &server->peers[worker].dead) = 1;
  server->peers[worker].absent = 1;
  mlfab__clock_members(server);
  mlfab__server_advance(server);
}

/* --- the definition --- */

static void server_define_ack(mlfab__server *server, uint32_t worker, int code, const char *text) {
  mlfab__define_ack ack;
  memset(&ack, 0, sizeof ack);
  ack.code = code;
  ack.server = server->number;
  ack.v_train = server->peers[worker].pushed;
  ack.options = server->options;
  ack.ask = server->peers[worker].define.ask;
  ack.packets = server->sparse != NULL;
  ack.cut = server->save.cut;
  ack.restored = server->save.restored;
  ack.restored_version = server->save.restored_version;
  ack.first_weights = worker == 0 && server->first_weights_incarnation != 0 &&
                      server->first_weights_incarnation == server->peers[0].incarnation;
  snprintf(ack.text, sizeof ack.text, "%s", text);
  MLFAB__POST(&server->port, worker, MLFAB__DEFINE_ACK, define_ack, &ack);
}

MLFAB__INTERNAL uint64_t mlfab__server_credit(const mlfab__server *server, uint64_t shard) {
  return mlfab__min(server->config->eager_bytes, mlfab__max(SERVER_EAGER_LEAST, 16 * shard));
}

MLFAB__INTERNAL uint64_t mlfab__server_stage(const mlfab__server *server, uint64_t shard,
                                             int ghost) {
  uint64_t stage = server->scheduled ? SERVER_STAGE_PLANNED : SERVER_STAGE_BYTES;
  /* Ghosts take no memory: the stage is as large as needed. */
  return ghost && server->scheduled ? shard : mlfab__min(stage, shard);
}

/* Refuses what this server, as configured and built, cannot do. */
static int server_unsupported(const mlfab__server *server, const mlfab_model_options *options,
                              mlfab_error *error) {
  const mlfab_config *config = server->config;
  uint32_t kind = options->consistency.kind;
  int packets = options->tags > 0 || options->pull_half || !(options->change_threshold <= 0.0) ||
                config->change_filter;
  const char *what = NULL, *why = "";
  if (packets && (server->memory || !server->sparse)) {
    what = "tags, pull_half or a change filter";
    why = server->sparse ? ", whose model is on a device"
                         : ", which was built without MLFAB_WITH_SPARSE";
  } else if (server->memory && config->on_update) {
    what = "on_update", why = ", whose model is on a device";
  } else if (mlfab__sync_rounds(kind) && server->delay_bound != MLFAB_UNBOUNDED) {
    what = "a delay bound (schedule.delay_bound) with rounds, which drop nothing,";
  } else if (server->keeper) {
    what = server->keeper->refuses(server, options);
  }
  if (!what) return 0;
  return mlfab__error(error, MLFAB_ERR_UNSUPPORTED, (int32_t)server->number, 1, 0,
                      "not supported: %s at server %u%s", what, server->number, why);
}

/* Allocates the store, and the memory for updates that are being received. Errors: MEMORY. */
static int server_memory(mlfab__server *server, const mlfab_model_options *options) {
  mlfab__env *env = server->env;
  uint32_t states = server->config->on_update ? 0 : mlfab__optimizer_states(options->optimizer);
  int code =
      mlfab__store_init(env, &server->store, server->memory, server->slab, &server->layout,
                        server->number, server->config->block_bytes,
                        mlfab__sync_rounds(options->consistency.kind), states, options->ghost != 0);
  uint64_t shard = server->store.bytes;
  if (code || shard == 0) return code;
  server->queue.ahead = mlfab__alloc_array(env, server->store.nslices, sizeof *server->queue.ahead);
  if (!server->queue.ahead) return MLFAB_ERR_MEMORY;
  server->apply.stage_bytes = mlfab__server_stage(server, shard, options->ghost != 0);
  if (options->ghost) return 0;
  server->apply.stages[0] = mlfab__alloc(env, server->apply.stage_bytes);
  if (!server->apply.stages[0]) return MLFAB_ERR_MEMORY;
  if (!server->config->on_update) return 0;
  server->apply.scratch = mlfab__alloc_aligned(env, server->store.block_bytes);
  return server->apply.scratch ? 0 : MLFAB_ERR_MEMORY;
}

static int server_no_memory(const mlfab__server *server, int code, mlfab_error *error) {
  return mlfab__error(error, code, (int32_t)server->number, 1, 0,
                      "server %u is out of memory for the model", server->number);
}

/* The model's number of slices as asked for: 0: the usual one. */
static int server_layout(mlfab__server *server, const mlfab_model_options *options, uint32_t cut,
                         mlfab_error *error) {
  return mlfab__layout_build(server->env, server->definition, server->ndefinition,
                             cut ? cut : options->slices, server->servers, options->active,
                             server->config->model_max_bytes, &server->layout, error);
}

MLFAB__INTERNAL int mlfab__server_build_owned(mlfab__server *server, const mlfab__define *define,
                                              const uint8_t *table, uint32_t cut,
                                              const uint32_t *owners, uint32_t nowners,
                                              mlfab_error *error) {
  const mlfab_model_options *options = &define->options;
  int code = server_unsupported(server, options, error);
  if (code) return code;
  server->definition = mlfab__alloc_array(server->env, define->tensors, sizeof *server->definition);
  if (!server->definition) return server_no_memory(server, MLFAB_ERR_MEMORY, error);
  server->ndefinition = define->tensors;
  for (uint32_t i = 0; i < define->tensors; i++) {
    mlfab__decode_tensor_info(table + (size_t)i * MLFAB__TENSOR_INFO_BYTES, &server->definition[i]);
  }
  code = server_layout(server, options, cut, error);
  if (!code && owners && nowners != server->layout.nslices)
    code = MLFAB__FAIL(error, MLFAB_ERR_FRAME, "server %u: not the owners of its slices",
                       server->number);
  if (!code && owners) mlfab__layout_assign(&server->layout, owners);
  if (!code) code = mlfab__store_check(options, &server->layout, &server->optimizer, error);
  if (!code && server->sparse) code = server->sparse->check(options, &server->layout, error);
  if (!code) code = mlfab__sync_check(&options->consistency, server->workers, error);
  if (!code) code = mlfab__clock_follows(server, options->consistency.kind, error);
  if (code) return code;
  code = server_memory(server, options);
  server->eager_bytes = mlfab__server_credit(server, server->store.bytes);
  server->options = *options;
  server->epoch = 1;
  if (!code && server->sparse) code = server->sparse->open(server, options->ghost != 0);
  if (code) return server_no_memory(server, code, error);
  if (server->keeper) server->keeper->model(server);
  mlfab__clock_start(server, &options->consistency);
  server->save.cut = cut;
  return 0;
}

MLFAB__INTERNAL int mlfab__server_build(mlfab__server *server, const mlfab__define *define,
                                        const uint8_t *table, uint32_t cut, mlfab_error *error) {
  return mlfab__server_build_owned(server, define, table, cut, NULL, 0, error);
}

/* The model of worker 0's definition, with its first weights if it has said that they follow, else with zeros. */
static int server_begin(mlfab__server *server, mlfab_error *error) {
  const mlfab__server_peer *first = &server->peers[0];
  int code = mlfab__server_build(server, &first->define, first->definition, 0, error);
  if (code) return code;
  if (server->policy) server->policy->told(server);
  server->phase =
      server->peers[0].define.first_weights ? MLFAB__MODEL_DEFINED : MLFAB__MODEL_STANDS;
  return 0;
}

MLFAB__INTERNAL int mlfab__server_compare(const mlfab__tensor_info *definition, uint32_t n,
                                          const char *whose, const uint8_t *table, uint32_t tensors,
                                          mlfab_error *error) {
  if (tensors != n) {
    return MLFAB__FAIL(error, MLFAB_ERR_MODEL, "the model has %u tensors, %s has %u", tensors,
                       whose, n);
  }
  for (uint32_t i = 0; i < n; i++) {
    mlfab__tensor_info info;
    const mlfab__tensor_info *first = &definition[i];
    mlfab__decode_tensor_info(table + (size_t)i * MLFAB__TENSOR_INFO_BYTES, &info);
    if (info.id == first->id && info.dtype == first->dtype && info.count == first->count) continue;
    return MLFAB__FAIL(
        error, MLFAB_ERR_MODEL, "tensor number %u is id %u, %llu x %s; %s is id %u, %llu x %s", i,
        info.id, (unsigned long long)info.count, mlfab__dtype_name((int)info.dtype), whose,
        first->id, (unsigned long long)first->count, mlfab__dtype_name((int)first->dtype));
  }
  return 0;
}

static void server_stands(mlfab__server *server) {
  for (uint32_t w = 0; w < server->workers; w++) {
    mlfab__server_peer *peer = &server->peers[w];
    if (!peer->definition || !peer->connected) continue;
    mlfab_error error;
    error.text[0] = 0;
    int code = mlfab__server_compare(server->definition, server->ndefinition, "worker 0's",
                                     peer->definition, peer->define.tensors, &error);
    server_forget_definition(server, peer);
    if (!code) {
      /* The credit comes with the model. */
      mlfab__hello_ack ack;
      mlfab__server_hello_ack(server, w, MLFAB__ACK_CREDIT,
                              &ack); /* the worker sends nothing again */
      MLFAB__POST(&server->port, w, MLFAB__HELLO_ACK, hello_ack, &ack);
    }
    server_define_ack(server, w, code, code ? error.text : "");
    /* The consistency may have changed since the definition. */
    if (!code) mlfab__clock_tell(server, w);
  }
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

/* They may try again. */
MLFAB__INTERNAL void mlfab__server_refuse(mlfab__server *server, const mlfab_error *error) {
  mlfab__server_unbuild(server);
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
  if (mlfab__port_refuse(
          &server->port, worker, frame,
          mlfab__decode_define(frame->meta, frame->meta_bytes, &define) ||
              frame->bulk_bytes != (uint64_t)define.tensors * MLFAB__TENSOR_INFO_BYTES ||
              !frame->bulk))
    return;
  define.options.size = sizeof define.options;
  define.options.sync = define.options.consistency.kind;
  peer->define.ask = define.ask;
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
  peer->define = define;
  if (worker == 0 && server->phase == MLFAB__MODEL_DEFINED) {
    /* Its first weights never came: it tries again, perhaps with another model. */
    mlfab__apply_free(server);
    mlfab__server_unbuild(server);
  }
  int restores = worker == 0 && server->phase == MLFAB__NO_MODEL && server->save.hooks &&
                 server->save.hooks->restores(server);
  if (worker == 0 && server->phase == MLFAB__NO_MODEL && !restores) {
    mlfab_error error;
    if (server_begin(server, &error)) {
      mlfab__server_refuse(server, &error);
      return;
    }
  }
  if (server->phase == MLFAB__MODEL_STANDS) server_stands(server);
  if (server->phase != MLFAB__NO_MODEL) return;
  if (peer->refusals != server->refusals && !restores) {
    server_tell_refusal(server, worker);
  } else if (!restores) {
    /* Not the answer: tells the worker that it waits for worker 0, so that a deadline can name it. */
    mlfab__waiting wait = {.kind = MLFAB__REQUEST_MODEL};
    snprintf(wait.text, sizeof wait.text, ", which has not defined the model at server %u",
             server->number);
    MLFAB__POST(&server->port, worker, MLFAB__WAITING, waiting, &wait);
  }
}

/* --- what is due --- */

/* Reacts to the last commit or change of consistency. */
static void server_look(mlfab__server *server) {
  if (server->greets) server_stands(server);
  server->greets = 0;
  if (server->policy && server->regroups) server->policy->regroup(server);
  server->regroups = 0;
  if (server->policy && server->retold) server->policy->told(server);
  server->retold = 0;
  if (server->serve.changed || server->serve.due) mlfab__serve_look(server);
}

MLFAB__INTERNAL void mlfab__server_advance(mlfab__server *server) {
  uint64_t budget = SERVER_TICK_BYTES;
  server->due = 0;
  if (server->asleep) return;
  server_look(server);
  if (!server->move.held) {
    if (server->policy) server->policy->advance(server);
    mlfab__apply_tell_dropped(server);
  }
  for (;;) {
    if (server->apply.applying == MLFAB__APPLY_HELD) mlfab__apply_held(server);
    if (server->apply.applying == MLFAB__APPLY_UPDATE && !mlfab__apply_go_on(server, budget))
      return;
    if (server->apply.applying == MLFAB__APPLY_ROUND && !mlfab__round_apply(server, budget)) return;
    server_look(server);
    if (server->stats->commits >= server->save.at) server->save.hooks->due(server);
    if (server->move.held) return;
    if (server->apply.head) break;
    if (mlfab__clock_change(server) || mlfab__clock_advance(server)) continue;
    server_look(server);
    mlfab__incoming *update = mlfab__apply_eligible_from(server, server->queue.first);
    if (!update) break;
    mlfab__apply_begin(server, update, NULL);
  }
  server->due = 0;
  if (server->apply.head) mlfab__apply_release(server);
}

/* --- frames and time --- */

static void server_done(mlfab__server *server, uint32_t worker, const mlfab__frame_in *frame) {
  mlfab__done done;
  if (MLFAB__MALFORMED(&server->port, worker, frame, done, &done)) return;
  server->peers[worker].done = 1;
  mlfab__clock_members(server);
  MLFAB__POST(&server->port, worker, MLFAB__DONE_ACK, done, &done);
  mlfab__server_advance(server);
}

MLFAB__INTERNAL int mlfab__server_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__server *server = self;
  const uint32_t worker = at.peer;
  server->now_ns = at.now_ns;
  int asks = frame->type == MLFAB__PUSH || frame->type == MLFAB__CHUNK ||
             frame->type == MLFAB__PULL || frame->type == MLFAB__SYNC ||
             frame->type == MLFAB__PROGRESS;
  if (server->move.held && asks) return 1; /* it repeats the frame when the slices have moved */
  switch (frame->type) {
    case MLFAB__DEFINE:
      server_define(server, worker, frame);
      break;
    case MLFAB__SYNC:
      mlfab__clock_ask(server, worker, frame);
      break;
    case MLFAB__PROGRESS:
      mlfab__clock_progress(server, worker, frame);
      break;
    case MLFAB__PUSH:
      /* It may need a round to be closed: see mlfab__server_mover. */
      if (server->peers[worker].stopped) mlfab__clock_members(server);
      mlfab__apply_push(server, worker, frame);
      break;
    case MLFAB__CHUNK:
      mlfab__apply_chunk(server, worker, frame);
      break;
    case MLFAB__WITHDRAW:
      mlfab__apply_withdraw(server, worker, frame);
      break;
    case MLFAB__PULL:
      mlfab__serve_pull(server, worker, frame);
      break;
    case MLFAB__PULL_CANCEL:
      mlfab__serve_cancel(server, worker, frame);
      break;
    case MLFAB__DONE:
      server_done(server, worker, frame);
      break;
    default:
      if (server->move.hooks && frame->type == MLFAB__STOP)
        server->move.hooks->stop(server, worker, frame);
      else if (!server->policy || !server->policy->frame(server, worker, frame))
        mlfab__server_drop(server, worker, MLFAB_ERR_FRAME, "a frame that no worker sends");
      break;
  }
  if (server->due) mlfab__server_advance(server);
  return 1;
}

MLFAB__INTERNAL void mlfab__server_tick(void *self, uint64_t now_ns) {
  mlfab__server *server = self;
  server->now_ns = now_ns;
  if (server->asleep) return;
  mlfab__apply_tick(server);
  mlfab__server_advance(server);
  mlfab__serve_tick(server);
  if (server->policy) server->policy->tick(server);
  if (server->move.hooks) server->move.hooks->tick(server);
}

MLFAB__INTERNAL uint64_t mlfab__server_deadline(const void *self) {
  const mlfab__server *server = self;
  if (server->asleep) return MLFAB__NEVER;
  uint64_t look = server->serve.copies ? server->now_ns + SERVER_COPY_NS : MLFAB__NEVER;
  return mlfab__min(look, mlfab__apply_deadline(server));
}
