/* complete.c - fills in a configuration's defaults and refuses contradictions. See complete.h. */
#include "complete.h"

#include "../node/node.h"

static int complete_config_error(mlfab_error *error, const char *text) {
  return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "configuration: %s", text);
}

static void complete_default32(uint32_t *value, uint32_t standard) {
  if (*value == 0) *value = standard;
}
static void complete_default64(uint64_t *value, uint64_t standard) {
  if (*value == 0) *value = standard;
}

/* Returns 1 if every text is terminated. */
static int complete_texts_end(const mlfab_config *c) {
  return memchr(c->coordinator, 0, sizeof c->coordinator) && memchr(c->job, 0, sizeof c->job) &&
         memchr(c->listen, 0, sizeof c->listen) && memchr(c->ifname, 0, sizeof c->ifname) &&
         memchr(c->key, 0, sizeof c->key) && memchr(c->key_file, 0, sizeof c->key_file) &&
         memchr(c->checkpoint_dir, 0, sizeof c->checkpoint_dir) &&
         memchr(c->resume, 0, sizeof c->resume) && memchr(c->log, 0, sizeof c->log) &&
         memchr(c->metrics, 0, sizeof c->metrics) && memchr(c->trace, 0, sizeof c->trace);
}

/* Checks the members about the scheduler. */
static int complete_check_scheduler(mlfab_config *c, mlfab_error *error) {
  int own = (c->roles & MLFAB_ROLE_SCHEDULER) != 0;
  if (c->scheduler > MLFAB_SCHEDULER_OWN) return complete_config_error(error, "unknown scheduler");
  if (own && c->roles != MLFAB_ROLE_SCHEDULER)
    return complete_config_error(error, "a process with MLFAB_ROLE_SCHEDULER has no other role");
  if (own && c->scheduler != MLFAB_SCHEDULER_OWN)
    return complete_config_error(error,
                                 "MLFAB_ROLE_SCHEDULER needs scheduler = MLFAB_SCHEDULER_OWN");
  if (own && c->rank != 0)
    return complete_config_error(error, "the rank of the scheduler process must be 0");
  /* Without a scheduler the default counts; else compose.c calls the check. */
  if (c->schedule.size == 0) mlfab_schedule_init(&c->schedule);
  /* A worker that is driven by hand computes for long. Meanwhile it would not move data for others. */
  if (c->accumulators == 0 && c->progress != MLFAB_PROGRESS_HAND) c->accumulators = 2;
  if (c->accumulators == UINT32_MAX || c->scheduler == MLFAB_SCHEDULER_NONE) c->accumulators = 0;
  if (c->accumulators > 64) return complete_config_error(error, "the limit is 64 accumulators");
  return 0;
}

/* A process that joins as one more worker or server knows only the address of server 0, not the world. */
static int complete_check_joiner(mlfab_config *c, mlfab_error *error) {
  if (c->join > 1) return complete_config_error(error, "join is 0 or 1");
  complete_default32(&c->roles, MLFAB_ROLE_WORKER);
  if (c->roles != MLFAB_ROLE_WORKER && c->roles != MLFAB_ROLE_SERVER)
    return complete_config_error(error, "a process that joins (join) is a worker, or a server");
  if (c->coordinator[0] == 0)
    return complete_config_error(error,
                                 "joining (join) needs server 0's address (MLFAB_COORDINATOR)");
  c->rank = 0;
  c->workers = c->workers_max = c->servers = c->servers_max = 1;
  c->dedicated = 0;
  c->scheduler = MLFAB_SCHEDULER_NONE;
  c->accumulators = 0;
  mlfab_schedule_init(&c->schedule);
  return 0;
}

/* Tests bits, because -ffast-math lets a compiler assume that infinity and NaN never occur. */
static int complete_is_distance(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits <= 0x7ff0000000000000u || bits == 1ull << 63;
}

static int complete_check_replicas(const mlfab_config *c, mlfab_error *error) {
  const char *wrong = NULL;
  if (c->replicas > 1) wrong = "replicas is 0 or 1";
  if (c->roles == MLFAB_ROLE_REPLICA && !c->replicas)
    wrong = "the role of a replica needs replicas = 1";
  if (c->replicas && !c->dedicated) wrong = "replicas need dedicated servers";
  if (c->replicas && c->scheduler != MLFAB_SCHEDULER_OWN)
    wrong =
        "replicas need a scheduler in a process of its own (scheduler own), which has the third "
        "vote";
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
  return wrong ? complete_config_error(error, wrong) : 0;
}

static int complete_check_world(mlfab_config *c, mlfab_error *error) {
  if (c->join) return complete_check_joiner(c, error);
  complete_default32(&c->workers_max, c->workers);
  complete_default32(&c->servers_max, c->servers);
  if (c->workers_max > 65536 || c->workers > 65536 || c->servers > 4096 || c->servers_max > 4096)
    return complete_config_error(error, "the limits are 65536 workers and 4096 servers");
  if (c->workers_max < c->workers)
    return complete_config_error(error,
                                 "workers_max is below workers, which the fabric begins with");
  if (c->servers_max < c->servers)
    return complete_config_error(error,
                                 "servers_max is below servers, which the fabric begins with");
  if (!c->dedicated && c->servers_max > c->servers)
    return complete_config_error(
        error, "servers_max is above servers, and only dedicated servers can join");
  if (!c->dedicated && c->servers > c->workers)
    return complete_config_error(
        error, "there are more servers than workers, and servers are not dedicated");
  if (c->roles & ~(uint32_t)(MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER | MLFAB_ROLE_SCHEDULER |
                             MLFAB_ROLE_REPLICA))
    return complete_config_error(error, "unknown roles");
  int code = complete_check_scheduler(c, error);
  if (!code) code = complete_check_replicas(c, error);
  if (code) return code;
  if (c->dedicated && c->roles == (MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER))
    return complete_config_error(error, "roles say worker and server, but servers are dedicated");
  int serves = c->roles == MLFAB_ROLE_SERVER || c->roles == MLFAB_ROLE_REPLICA;
  uint32_t limit = c->dedicated && serves ? c->servers_max : c->workers_max;
  if (c->rank < 0 || (uint32_t)c->rank >= limit) {
    return mlfab__error(error, MLFAB_ERR_RANK_RANGE, c->rank, serves, 0,
                        "configuration: rank %d is not in 0..%u", (int)c->rank, limit - 1);
  }
  uint32_t usual = c->roles == MLFAB_ROLE_SCHEDULER ? MLFAB_ROLE_SCHEDULER : MLFAB_ROLE_WORKER;
  if (!c->dedicated && usual == MLFAB_ROLE_WORKER && (uint32_t)c->rank < c->servers)
    usual |= MLFAB_ROLE_SERVER;
  complete_default32(&c->roles, usual);
  if (!c->dedicated && c->roles != usual)
    return complete_config_error(
        error,
        "roles do not fit rank and servers (if servers are not dedicated, the first ranks serve)");
  uint32_t nodes = c->workers_max + (c->dedicated ? (1 + c->replicas) * c->servers_max : 0) +
                   (c->scheduler == MLFAB_SCHEDULER_OWN);
  if (c->coordinator[0] == 0 && nodes > 1) {
    return complete_config_error(error,
                                 "a world of several nodes needs a coordinator address "
                                 "(MLFAB_COORDINATOR, or MASTER_ADDR and MASTER_PORT)");
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__config_complete(const mlfab_config *given, mlfab_config *config,
                                           mlfab_error *error) {
  memset(config, 0, sizeof *config);
  if (!given) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "config is NULL");
  if (given->size == 0 || given->size > 1 << 20)
    return complete_config_error(error, "config.size is not set (call mlfab_config_init)");
  if (!MLFAB__HAS(given, mlfab_config, entropy))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "config.size is %u, that of another mlfab.h; this library's is %zu: "
                       "compile the program with its mlfab.h",
                       (unsigned)given->size, sizeof *config);
  memcpy(config, given, mlfab__min(given->size, sizeof *config));
  config->size = sizeof *config;
  if (!complete_texts_end(config))
    return complete_config_error(error, "a text of the configuration has no terminating zero byte");
  complete_default32(&config->workers, 1);
  complete_default32(&config->servers, 1);
  if (config->job[0] == 0) memcpy(config->job, "mlfab", 6);
  complete_default64(&config->timeout_ns, 300000000000u);
  complete_default64(&config->heartbeat_ns, 500000000u);
  complete_default64(&config->silent_death_ns, 30000000000u);
  complete_default64(&config->spin_ns, 20000);
  complete_default64(&config->seed, 1);
  complete_default32(&config->chunk_bytes, 262144);
  complete_default32(&config->eager_bytes, 262144);
  complete_default32(&config->block_bytes, 1048576);
  complete_default32(&config->merge_max, 128);
  complete_default64(&config->model_max_bytes, (uint64_t)64 << 30);
  complete_default64(&config->metrics_ns, 1000000000u);
  if (config->heartbeat_ns < 1000000)
    return complete_config_error(error, "heartbeat_ns is below 1 ms");
  if (config->chunk_bytes % 64 || config->chunk_bytes > MLFAB_BULK_MAX)
    return complete_config_error(error, "chunk_bytes must be a multiple of 64, at most 1 MiB");
  if (config->block_bytes % 64 || config->block_bytes > (1u << 30))
    return complete_config_error(error, "block_bytes must be a multiple of 64, at most 1 GiB");
  if (config->eager_bytes % 64 || config->eager_bytes > (1u << 30))
    return complete_config_error(error, "eager_bytes must be a multiple of 64, at most 1 GiB");
  if (config->merge_max > 128) return complete_config_error(error, "merge_max is at most 128");
  if (config->order_by_rate > 1) return complete_config_error(error, "order_by_rate is 0 or 1");
  if ((config->checkpoint_dir[0] == 0 && config->checkpoint_commits > 0) ||
      config->checkpoint_keep > 1000000)
    return complete_config_error(error,
                                 "checkpoint_commits needs checkpoint_dir, and "
                                 "checkpoint_keep is at most 1000000");
  if (mlfab__url_tells(config->checkpoint_dir) || mlfab__url_tells(config->resume))
    return complete_config_error(
        error,
        "checkpoint_dir and resume may have no user or password in them: "
        "they are sent and logged (mlfab_store.h says where to give them)");
  if (config->metrics_ns < 10000000)
    return complete_config_error(error, "metrics_ns is below 10 ms");
  if (config->kernels > MLFAB_KERNELS_CBLAS)
    return complete_config_error(error, "unknown kernels (MLFAB_KERNELS): not own or cblas");
  if (config->progress > MLFAB_PROGRESS_HAND)
    return complete_config_error(error, "unknown progress mode");
  return complete_check_world(config, error);
}
