/* complete.c - fills in a configuration's defaults and refuses contradictions. See complete.h. */
#include "complete.h"

#include "../node/node.h"

#define COMPLETE_DEFAULT(member, standard) ((member) = (member) ? (member) : (standard))

/* Checks the members about the scheduler. Returns the fault, or NULL. */
static const char *complete_check_scheduler(mlfab_config *c) {
  int own = (c->roles & MLFAB_ROLE_SCHEDULER) != 0;
  if (c->scheduler > MLFAB_SCHEDULER_OWN) return "unknown scheduler";
  if (own && c->roles != MLFAB_ROLE_SCHEDULER)
    return "a process with MLFAB_ROLE_SCHEDULER has no other role";
  if (own && c->scheduler != MLFAB_SCHEDULER_OWN)
    return "MLFAB_ROLE_SCHEDULER needs scheduler = MLFAB_SCHEDULER_OWN";
  if (own && c->rank != 0) return "the rank of the scheduler process must be 0";
  /* Without a scheduler the default counts; else compose.c calls the check. */
  if (c->schedule.size == 0) mlfab_schedule_init(&c->schedule);
  /* A worker that is driven by hand computes for long. Meanwhile it would not move data for others. */
  if (c->accumulators == 0 && c->progress != MLFAB_PROGRESS_HAND) c->accumulators = 2;
  if (c->accumulators == UINT32_MAX || c->scheduler == MLFAB_SCHEDULER_NONE) c->accumulators = 0;
  if (c->accumulators > 64) return "the limit is 64 accumulators";
  return NULL;
}

/* A process that joins as one more worker or server knows only the address of server 0, not the world. */
static const char *complete_check_joiner(mlfab_config *c) {
  if (c->join > 1) return "join is 0 or 1";
  COMPLETE_DEFAULT(c->roles, MLFAB_ROLE_WORKER);
  if (c->roles != MLFAB_ROLE_WORKER && c->roles != MLFAB_ROLE_SERVER)
    return "a process that joins (join) is a worker, or a server";
  if (c->coordinator[0] == 0) return "joining (join) needs server 0's address (MLFAB_COORDINATOR)";
  c->rank = 0;
  c->workers = c->workers_max = c->servers = c->servers_max = 1;
  c->dedicated = 0;
  c->scheduler = MLFAB_SCHEDULER_NONE;
  c->accumulators = 0;
  mlfab_schedule_init(&c->schedule);
  return NULL;
}

#if MLFAB_WITH_REPLICA
/* Tests bits, because -ffast-math lets a compiler assume that infinity and NaN never occur. */
static int complete_is_distance(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits <= 0x7ff0000000000000u || bits == 1ull << 63;
}

static const char *complete_check_replicas(const mlfab_config *c) {
  const char *wrong = NULL;
  if (c->replicas > 1) wrong = "replicas is 0 or 1";
  if (c->roles == MLFAB_ROLE_REPLICA && !c->replicas)
    wrong = "the role of a replica needs replicas = 1";
  if (c->replicas && !c->dedicated) wrong = "replicas need dedicated servers";
  if (c->replicas && c->scheduler != MLFAB_SCHEDULER_OWN)
    wrong =
        "replicas need a scheduler of its own process (scheduler own), which has the third vote";
  if (c->replicas && c->servers_max > c->servers)
    wrong = "servers with replicas do not come and go (servers_max)";
  if (c->ack > MLFAB_ACK_DURABLE) wrong = "ack is no MLFAB_ACK_*";
  if (c->div_max != 0.0 && !c->replicas) wrong = "div_max needs replicas";
  if (!complete_is_distance(c->div_max)) wrong = "div_max is negative or not a number";
  if (c->vote_dir[0] && !c->replicas) wrong = "vote_dir needs replicas";
  if (c->ack == MLFAB_ACK_DURABLE && !c->replicas) wrong = "ack = durable needs replicas";
  if (c->replicas && c->progress == MLFAB_PROGRESS_HAND && c->roles != MLFAB_ROLE_WORKER &&
      c->roles)
    wrong = "a server with a replica, its replica and their scheduler are not driven by hand";
  return wrong;
}
#else
#define complete_check_replicas(c) NULL /* compose.c refuses them */
#endif

static const char *complete_check_world(mlfab_config *c) {
  COMPLETE_DEFAULT(c->workers_max, c->workers);
  COMPLETE_DEFAULT(c->servers_max, c->servers);
  if (c->workers_max > 65536 || c->workers > 65536 || c->servers > 4096 || c->servers_max > 4096)
    return "the limits are 65536 workers and 4096 servers";
  if (c->workers_max < c->workers)
    return "workers_max is below workers, which the fabric begins with";
  if (c->servers_max < c->servers)
    return "servers_max is below servers, which the fabric begins with";
  if (!c->dedicated && c->servers_max > c->servers)
    return "servers_max is above servers, and only dedicated servers can join";
  if (!c->dedicated && c->servers > c->workers)
    return "there are more servers than workers, and servers are not dedicated";
  if (c->roles & ~(uint32_t)(MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER | MLFAB_ROLE_SCHEDULER |
                             MLFAB_ROLE_REPLICA))
    return "unknown roles";
  const char *wrong = complete_check_scheduler(c);
  if (!wrong) wrong = complete_check_replicas(c);
  if (!wrong && c->dedicated && c->roles == (MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER))
    wrong = "roles say worker and server, but servers are dedicated";
  return wrong;
}

/* The roles, once the rank is known to be in the world. */
static const char *complete_check_roles(mlfab_config *c) {
  uint32_t usual = c->roles == MLFAB_ROLE_SCHEDULER ? MLFAB_ROLE_SCHEDULER : MLFAB_ROLE_WORKER;
  if (!c->dedicated && usual == MLFAB_ROLE_WORKER && (uint32_t)c->rank < c->servers)
    usual |= MLFAB_ROLE_SERVER;
  COMPLETE_DEFAULT(c->roles, usual);
  if (!c->dedicated && c->roles != usual)
    return "roles do not fit rank and servers: the first ranks serve, if no server is dedicated";
  uint32_t nodes = c->workers_max + (c->dedicated ? (1 + c->replicas) * c->servers_max : 0) +
                   (c->scheduler == MLFAB_SCHEDULER_OWN);
  if (c->coordinator[0] == 0 && nodes > 1)
    return "a world of several nodes needs a coordinator address "
           "(MLFAB_COORDINATOR, or MASTER_ADDR and MASTER_PORT)";
  return NULL;
}

/* The members of every process, with the defaults of those that are no settings. */
static const char *complete_check_members(mlfab_config *config) {
  const char *wrong = mlfab__config_members(config);
  if (wrong) return wrong;
  COMPLETE_DEFAULT(config->spin_ns, 20000);
  COMPLETE_DEFAULT(config->chunk_bytes, 262144);
  COMPLETE_DEFAULT(config->eager_bytes, 262144);
  COMPLETE_DEFAULT(config->block_bytes, 1048576);
  COMPLETE_DEFAULT(config->merge_max, 128);
  COMPLETE_DEFAULT(config->model_max_bytes, (uint64_t)64 << 30);
  if (config->heartbeat_ns < 1000000) return "heartbeat_ns is below 1 ms";
  if (config->chunk_bytes % 64 || config->chunk_bytes > MLFAB_BULK_MAX)
    return "chunk_bytes must be a multiple of 64, at most 1 MiB";
  if (config->block_bytes % 64 || config->block_bytes > (1u << 30))
    return "block_bytes must be a multiple of 64, at most 1 GiB";
  if (config->eager_bytes % 64 || config->eager_bytes > (1u << 30))
    return "eager_bytes must be a multiple of 64, at most 1 GiB";
  if (config->merge_max > 128) return "merge_max is at most 128";
  if (config->order_by_rate > 1) return "order_by_rate is 0 or 1";
  if ((config->checkpoint_dir[0] == 0 && config->checkpoint_commits > 0) ||
      config->checkpoint_keep > 1000000)
    return "checkpoint_commits needs checkpoint_dir, and checkpoint_keep is at most 1000000";
  if (mlfab__url_tells(config->checkpoint_dir) || mlfab__url_tells(config->resume))
    return "checkpoint_dir and resume may have no user or password in them: "
           "they are sent and logged (mlfab_store.h says where to give them)";
  if (config->metrics_ns < 10000000) return "metrics_ns is below 10 ms";
  if (config->kernels > MLFAB_KERNELS_CBLAS)
    return "unknown kernels (MLFAB_KERNELS): not own or cblas";
  if (config->progress > MLFAB_PROGRESS_HAND) return "unknown progress mode";
  return config->join ? complete_check_joiner(config) : complete_check_world(config);
}

MLFAB__INTERNAL int mlfab__config_complete(const mlfab_config *given, mlfab_config *config,
                                           mlfab_error *error) {
  const char *wrong = "config.size is not set (call mlfab_config_init)";
  memset(config, 0, sizeof *config);
  if (!given) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "config is NULL");
  if (given->size > 0 && given->size <= 1 << 20) {
    if (!MLFAB__HAS(given, mlfab_config, entropy))
      return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                         "config.size is %u, that of another mlfab.h; this library's is %zu: "
                         "compile the program with its mlfab.h",
                         (unsigned)given->size, sizeof *config);
    memcpy(config, given, mlfab__min(given->size, sizeof *config));
    config->size = sizeof *config;
    wrong = complete_check_members(config);
  }
  int serves = config->roles == MLFAB_ROLE_SERVER || config->roles == MLFAB_ROLE_REPLICA;
  uint32_t limit = config->dedicated && serves ? config->servers_max : config->workers_max;
  if (!wrong && (config->rank < 0 || (uint32_t)config->rank >= limit))
    return mlfab__error(error, MLFAB_ERR_RANK_RANGE, config->rank, serves, 0,
                        "configuration: rank %d is not in 0..%u", (int)config->rank, limit - 1);
  if (!wrong && !config->join) wrong = complete_check_roles(config);
  return wrong ? MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "configuration: %s", wrong) : 0;
}
