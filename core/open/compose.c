/* compose.c - composes a node of its roles. Top floor: only this file knows all roles. */
#include "../api/complete.h"
#include "../api/parts.h"
#include "../coll/barrier.h"
#include "../node/node.h"
#if MLFAB_WITH_CHECKPOINT
#include "../checkpoint/checkpoint.h"
#endif
#if MLFAB_WITH_COLL
#include "../coll/comm.h"
#include "../coll/membership.h"
#include "../coll/trees.h"
#endif
#if MLFAB_WITH_DEVICE
#include "../device/resident.h"
#endif
#if MLFAB_WITH_GROWTH
#include "../node/growth.h"
#endif
#if MLFAB_WITH_KEYS
#include "../keys/guard.h"
#endif
#if MLFAB_WITH_LEND
#include "../lend/view.h"
#include "../lend/views.h"
#endif
#if MLFAB_WITH_REPLICA
#include "../coll/barrier_kept.h"
#include "../node/copies.h"
#include "../replica/copy.h"
#if MLFAB_WITH_CHECKPOINT
#include "../replica/votes.h"
#define VOTES_DISK mlfab__votes_disk()
#else
#define VOTES_DISK NULL
#endif
#endif
#if MLFAB_WITH_PUSH
#include "../api/calls_push.h"
#include "../server/server.h"
#include "../worker/worker.h"
#else
#include "../coll/attend.h"
#endif
#if MLFAB_WITH_RESHARD
#include "../reshard/reshard.h"
#endif
#if MLFAB_WITH_SCHED
#include "../api/calls_sched.h"
#include "../node/scheduler_link.h"
#include "../sched/sched_role.h"
#endif
#if MLFAB_WITH_SCHED || MLFAB_WITH_COLL
#include "../node/peer_link.h"
#endif
#if MLFAB_WITH_SPARSE
#include "../sparse/sparse_apply.h"
#include "../sparse/sparse_push.h"
#endif

/* A group that may be left out, the condition under which a configuration needs it, and its text. */
#define COMPOSE_LACKS(name, condition, text) \
  { !MLFAB_WITH_##name && (condition), #name, text }

/* Returns UNSUPPORTED if the configuration needs a group that is not compiled in. */
static int compose_check(const mlfab_config *c, mlfab_error *error) {
  int observes = c->log[0] || c->metrics[0] || c->trace[0];
  int grows = c->workers_max > c->workers, servers_grow = c->servers_max > c->servers;
  const struct {
    int needed;
    const char *name, *text;
  } absent[] = {
      COMPOSE_LACKS(TELEMETRY, observes, "log, metrics and trace need telemetry, which was"),
      COMPOSE_LACKS(KEYS, c->key[0], "a key (MLFAB_KEY) needs the code of keys, which was"),
      COMPOSE_LACKS(GROWTH, c->join, "join (MLFAB_JOIN) needs growth, which was"),
      COMPOSE_LACKS(GROWTH, grows, "workers_max (MLFAB_WORKERS_MAX) needs growth, which was"),
      COMPOSE_LACKS(GROWTH, servers_grow,
                    "servers_max (MLFAB_SERVERS_MAX) needs growth, which was"),
      COMPOSE_LACKS(PUSH, c->servers > 1,
                    "servers (MLFAB_SERVERS) above 1 need pushes and pulls, which were"),
      COMPOSE_LACKS(SCHED, c->order_by_rate,
                    "order_by_rate (MLFAB_ORDER_BY_RATE) needs measured links, which were"),
      COMPOSE_LACKS(RESHARD, servers_grow,
                    "servers_max (MLFAB_SERVERS_MAX) needs moving slices, which was"),
      COMPOSE_LACKS(CHECKPOINT, c->checkpoint_dir[0] || c->resume[0],
                    "checkpoint_dir and resume need checkpoints, which were"),
      COMPOSE_LACKS(REPLICA, c->replicas || c->roles & MLFAB_ROLE_REPLICA,
                    "replicas (MLFAB_REPLICAS) need code that was"),
      COMPOSE_LACKS(REPLICA, c->ack || c->div_max != 0.0 || c->vote_dir[0],
                    "ack, div_max and vote_dir need replicas, whose code was"),
      COMPOSE_LACKS(CHECKPOINT, c->vote_dir[0],
                    "vote_dir (MLFAB_VOTE_DIR) needs checkpoints, which were"),
      COMPOSE_LACKS(CBLAS, c->kernels == MLFAB_KERNELS_CBLAS,
                    "kernels (MLFAB_KERNELS) is cblas, which was"),
      COMPOSE_LACKS(DEVICE, c->device, "device needs device memory, which was"),
      COMPOSE_LACKS(SCHED, c->scheduler != MLFAB_SCHEDULER_NONE,
                    "a scheduler (MLFAB_SCHEDULER) needs scheduling, which was")};
  if ((c->key_file[0] || c->key_from) && !c->key[0])
    return MLFAB__FAIL(
        error, MLFAB_ERR_CONFIG,
        "configuration: only mlfab_open asks key_file and key_from; give a node `key`");
  if (MLFAB_WITH_TELEMETRY && observes)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "configuration: only mlfab_open writes log, metrics and trace");
#if MLFAB_WITH_KEYS
  int code = mlfab__guard_check(c, error);
  if (code) return code;
#endif
  if (!MLFAB_WITH_SCHED && c->schedule.delay_bound == 0)
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "configuration: schedule.delay_bound is 0: all updates would be dropped");
  for (size_t i = 0; i < MLFAB__COUNT(absent); i++)
    if (absent[i].needed)
      return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                         "configuration: %s left out (MLFAB_WITH_%s is 0)", absent[i].text,
                         absent[i].name);
  return 0;
}

#if MLFAB_WITH_SCHED
static int compose_schedule(mlfab_config *config, mlfab_error *error) {
  const mlfab_schedule given = config->schedule;
  int code = mlfab__schedule_complete(&given, &config->schedule, error);
  if (code && error) error->code = MLFAB_ERR_CONFIG;
  return code ? MLFAB_ERR_CONFIG : 0;
}
#endif

static int compose_worker(mlfab_node *node) {
  mlfab__parts *parts = node->parts;
  int code = mlfab__barrier_attach(node, &parts->barrier);
#if MLFAB_WITH_SCHED
  mlfab__aggregator *aggregator = NULL;
  if (!code && node->config.scheduler != MLFAB_SCHEDULER_NONE)
    code = mlfab__aggregator_attach(node, &aggregator);
#endif
#if MLFAB_WITH_COLL
  if (!code) code = mlfab__comm_attach(node, &parts->comm);
#endif
#if MLFAB_WITH_CHECKPOINT
  if (!code) code = mlfab__checkpoint_worker_attach(node, &parts->checkpoint);
#endif
#if MLFAB_WITH_PUSH
  if (!code) code = mlfab__worker_attach(node, &parts->worker);
#if MLFAB_WITH_LEND
  if (!code) code = mlfab__view_attach(parts->worker);
#endif
  parts->finisher = parts->worker;
  parts->finish = mlfab__worker_finish;
#else
  mlfab__attend_worker *attendant = NULL;
  if (!code) code = mlfab__attend_attach(node, &attendant);
  parts->finisher = attendant;
  parts->finish = mlfab__attend_finish;
#endif
  if (code) return code;
#if MLFAB_WITH_PUSH
  parts->barrier->counting = (mlfab__counting){.worker = parts->worker,
                                               .idle = mlfab__worker_idle,
                                               .mark = mlfab__worker_mark,
                                               .apart = mlfab__worker_stand_apart,
                                               .back = mlfab__worker_return,
                                               .counted = mlfab__worker_counted};
#endif
#if MLFAB_WITH_COLL
  parts->comm->barrier = parts->barrier;
  parts->comm->counting = parts->barrier->counting;
#endif
#if MLFAB_WITH_CHECKPOINT
  parts->checkpoint->worker = parts->worker;
  parts->worker->restores = parts->checkpoint->resume[0] != 0;
  parts->worker->began = mlfab__checkpoint_began;
#endif
#if MLFAB_WITH_SCHED
  if (!code && aggregator) code = mlfab__hops_begin(&aggregator->hops, parts->worker);
#endif
#if MLFAB_WITH_SPARSE
  if (!code) code = mlfab__sparse_worker_attach(parts->worker);
#endif
#if MLFAB_WITH_REPLICA
  if (node->config.replicas) mlfab__losses_attach(parts->worker);
#endif
#if MLFAB_WITH_RESHARD
  if (!code) code = mlfab__reshard_worker_attach(parts->worker);
#endif
  return code;
}

static int compose_server(mlfab_node *node, mlfab_error *error) {
#if MLFAB_WITH_PUSH
  int code = mlfab__server_attach(node, &node->parts->server);
#if MLFAB_WITH_LEND
  if (!code) code = mlfab__views_attach(node->parts->server);
#endif
#else
  int code = mlfab__attend_server_attach(node);
#endif
#if MLFAB_WITH_DEVICE
  if (!code && node->config.device) code = mlfab__resident_attach(node, node->parts->server, error);
#else
  (void)error;
#endif
  mlfab__barrier_server *barrier = NULL;
  if (!code && node->is_coordinator) code = mlfab__barrier_server_attach(node, &barrier);
#if MLFAB_WITH_REPLICA
  if (!code && barrier) mlfab__barrier_keep(node, barrier);
#endif
#if MLFAB_WITH_SCHED
  if (!code) code = mlfab__client_attach(node, node->parts->server);
#endif
#if MLFAB_WITH_SPARSE
  if (!code) mlfab__sparse_attach(node->parts->server);
#endif
#if MLFAB_WITH_RESHARD
  if (!code) mlfab__reshard_server_attach(node, node->parts->server);
  if (!code && node->is_coordinator) code = mlfab__reshard_attach(node, node->parts->server);
#endif
#if MLFAB_WITH_CHECKPOINT
  if (!code) code = mlfab__checkpoint_attach(node, node->parts->server);
#endif
#if MLFAB_WITH_COLL
  mlfab__membership *membership = NULL;
  if (!code && node->is_coordinator) code = mlfab__membership_attach(node, barrier, &membership);
#if MLFAB_WITH_SCHED
  if (!code && membership && node->config.scheduler != MLFAB_SCHEDULER_NONE)
    code = mlfab__trees_attach(node, membership);
#endif
#endif
#if MLFAB_WITH_REPLICA
  if (!code && node->config.replicas)
    code = mlfab__copy_attach(node, node->parts->server, VOTES_DISK);
#endif
  return code;
}

/* *error keeps code 0 if the only fault is a lack of memory. */
static int compose(mlfab_node *node, mlfab_error *error) {
  node->parts_bytes = sizeof *node->parts;
  node->parts = mlfab__alloc(&node->env, node->parts_bytes);
  if (!node->parts) return MLFAB_ERR_MEMORY;
  int code = 0;
#if MLFAB_WITH_PUSH
  node->parts->push = mlfab__push_functions();
#endif
#if MLFAB_WITH_GROWTH
  if (!code) code = mlfab__growth_attach(node);
#endif
#if MLFAB_WITH_KEYS
  if (!code && node->config.key[0]) code = mlfab__guard_attach(node);
#endif
#if MLFAB_WITH_SCHED
  if (node->config.scheduler != MLFAB_SCHEDULER_NONE) mlfab__scheduler_link_attach(node);
#endif
#if MLFAB_WITH_SCHED || MLFAB_WITH_COLL
  if (!code && (node->is_worker || node->is_coordinator)) code = mlfab__peer_link_attach(node);
#endif
  if (!code && node->is_worker) code = compose_worker(node);
  if (!code && node->is_server) code = compose_server(node, error);
#if MLFAB_WITH_SCHED
  if (!code && node->is_scheduler) code = mlfab__scheduler_attach(node, &node->parts->scheduler);
#if MLFAB_WITH_REPLICA
  if (!code && !node->is_server && node->voter != MLFAB__NO_NODE)
    code = mlfab__witness_attach(node, VOTES_DISK);
#endif
  node->parts->measure = mlfab__calls_sched_measure;
  if (!code) code = mlfab__capacity_attach(node, node->parts->server, &node->parts->capacity);
#endif
  return code;
}

MLFAB_API int mlfab_node_open(const mlfab_config *config, const char *addresses, uint64_t now_ns,
                              mlfab_node **node_p, mlfab_error *error) {
  mlfab_config complete;
  mlfab__env env;
  mlfab_node *node = NULL;
  mlfab_error why = {.code = 0};
  if (error) memset(error, 0, sizeof *error);
  if (!node_p) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "node_p is NULL");
  int code = mlfab__config_complete(config, &complete, error);
#if MLFAB_WITH_SCHED
  if (!code) code = compose_schedule(&complete, error);
#endif
  if (!code) code = compose_check(&complete, error);
  if (!code) code = mlfab__env_init(&env, complete.env);
  if (code) return code;
  const mlfab__copies_table *copies = NULL;
#if MLFAB_WITH_REPLICA
  if (complete.replicas) copies = mlfab__copies_of_servers();
#endif
  code = mlfab__node_make(&complete, &env, addresses, copies, now_ns, &node);
  if (!code) code = compose(node, &why);
#if MLFAB_WITH_KEYS
  mlfab__wipe(complete.key, sizeof complete.key);
  mlfab__wipe(complete.entropy, sizeof complete.entropy);
#endif
  if (code) {
    mlfab_node_close(&node);
    if (!why.code) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the node");
    if (error) *error = why;
    return why.code;
  }
  mlfab__node_begin(node);
  *node_p = node;
  return 0;
}
