/* bootstrap.c - a node: completing its configuration, and joining the fabric. See node.h.
 *
 * Server 0 is the meeting point. Every node says JOIN there; it is refused (with the reason) or
 * gets an incarnation, and when all nodes of the world are there, WELCOME with the addresses of the
 * servers. A process that comes later under a rank whose process is gone is welcomed at once, with
 * a larger incarnation, which fences the old one. A joiner calls again until its deadline. */
#include "node.h"

#include <stdio.h>

static int bootstrap_config_error(mlfab_error *error, const char *text) {
  return MLFAB__FAIL(error, MLFAB_ERR_CONFIG, "configuration: %s", text);
}

static void bootstrap_default32(uint32_t *value, uint32_t standard) {
  if (*value == 0) *value = standard;
}
static void bootstrap_default64(uint64_t *value, uint64_t standard) {
  if (*value == 0) *value = standard;
}

/* Is every text terminated? */
static int bootstrap_texts_end(const mlfab_config *c) {
  return memchr(c->coordinator, 0, sizeof c->coordinator) && memchr(c->job, 0, sizeof c->job) &&
         memchr(c->listen, 0, sizeof c->listen) && memchr(c->ifname, 0, sizeof c->ifname) &&
         memchr(c->secret, 0, sizeof c->secret);
}

MLFAB__INTERNAL int mlfab__secret_parse(const char *text, uint64_t secret[2]) {
  secret[0] = secret[1] = 0;
  if (text[0] == 0) return 0;
  if (strlen(text) != 32) return MLFAB_ERR_CONFIG;
  for (int i = 0; i < 32; i++) {
    static const char digits[] = "0123456789abcdef";
    char c = text[i] >= 'A' && text[i] <= 'F' ? (char)(text[i] - 'A' + 'a') : text[i];
    const char *at = strchr(digits, c);
    if (!at) return MLFAB_ERR_CONFIG;
    secret[i / 16] = secret[i / 16] << 4 | (uint64_t)(at - digits);
  }
  return secret[0] | secret[1] ? 0 : MLFAB_ERR_CONFIG; /* zeros mean none */
}

MLFAB__INTERNAL int mlfab__schedule_complete(const mlfab_schedule *given, mlfab_schedule *schedule,
                                             mlfab_error *error) {
  mlfab_schedule_init(schedule);
  if (given->size == 0) return 0;
  if (given->size < offsetof(mlfab_schedule, plan_ahead_ns) || given->size > 1 << 20)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "schedule.size is not set (call mlfab_schedule_init)");
  memcpy(schedule, given, mlfab__min(given->size, sizeof *schedule));
  schedule->size = sizeof *schedule;
  if ((schedule->best | schedule->whole | schedule->no_aggregation | schedule->no_distribution) >
          1 ||
      schedule->reserved != 0)
    return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                       "schedule: best, whole, no_aggregation and no_distribution are 0 or 1, and "
                       "reserved is 0");
  if (schedule->delay_bound > 0) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT,
                     "schedule.delay_bound is 0: no update has a delay below 0, all would be "
                     "dropped (MLFAB_UNBOUNDED: no bound)");
}

/* Who schedules, and who this node is to the scheduler. */
static int bootstrap_check_scheduler(mlfab_config *c, mlfab_error *error) {
  mlfab_schedule schedule;
  int own = (c->roles & MLFAB_ROLE_SCHEDULER) != 0;
  if (c->scheduler > MLFAB_SCHEDULER_OWN) return bootstrap_config_error(error, "unknown scheduler");
  if (own && c->roles != MLFAB_ROLE_SCHEDULER)
    return bootstrap_config_error(error, "a scheduler of its own has no other role");
  if (own && c->scheduler != MLFAB_SCHEDULER_OWN)
    return bootstrap_config_error(error, "the role of a scheduler needs scheduler = own");
  if (own && c->rank != 0)
    return bootstrap_config_error(error, "there is one scheduler, with rank 0");
  int code = mlfab__schedule_complete(&c->schedule, &schedule, error);
  if (code) {
    error->code = MLFAB_ERR_CONFIG;
    return MLFAB_ERR_CONFIG;
  }
  c->schedule = schedule;
  /* Whoever is driven by hand computes for long: nothing would move meanwhile. */
  if (c->accumulators == 0 && c->progress != MLFAB_PROGRESS_HAND) c->accumulators = 2;
  if (c->accumulators == UINT32_MAX || c->scheduler == MLFAB_SCHEDULER_NONE) c->accumulators = 0;
  if (c->accumulators > 64) return bootstrap_config_error(error, "more than 64 accumulators");
  return 0;
}

static int bootstrap_check_world(mlfab_config *c, mlfab_error *error) {
  if (c->workers > 65536 || c->servers > 4096)
    return bootstrap_config_error(error, "more than 65536 workers or 4096 servers");
  if (!c->dedicated && c->servers > c->workers)
    return bootstrap_config_error(error,
                                  "more servers than workers, and servers are not dedicated");
  if (c->roles & ~(uint32_t)(MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER | MLFAB_ROLE_SCHEDULER))
    return bootstrap_config_error(error, "unknown roles");
  int code = bootstrap_check_scheduler(c, error);
  if (code) return code;
  if (c->dedicated && c->roles == (MLFAB_ROLE_WORKER | MLFAB_ROLE_SERVER))
    return bootstrap_config_error(error, "a worker that serves, and dedicated servers");
  uint32_t limit = c->dedicated && c->roles == MLFAB_ROLE_SERVER ? c->servers : c->workers;
  if (c->rank < 0 || (uint32_t)c->rank >= limit) {
    return mlfab__error(error, MLFAB_ERR_RANK_RANGE, c->rank, c->roles == MLFAB_ROLE_SERVER, 0,
                        "configuration: rank %d is not in 0..%u", (int)c->rank, limit - 1);
  }
  uint32_t usual = c->roles == MLFAB_ROLE_SCHEDULER ? MLFAB_ROLE_SCHEDULER : MLFAB_ROLE_WORKER;
  if (!c->dedicated && usual == MLFAB_ROLE_WORKER && (uint32_t)c->rank < c->servers)
    usual |= MLFAB_ROLE_SERVER;
  bootstrap_default32(&c->roles, usual);
  if (!c->dedicated && c->roles != usual)
    return bootstrap_config_error(
        error,
        "roles do not fit rank and servers (the first ranks serve, unless servers are dedicated)");
  uint32_t nodes =
      c->workers + (c->dedicated ? c->servers : 0) + (c->scheduler == MLFAB_SCHEDULER_OWN);
  if (c->coordinator[0] == 0 && nodes > 1) {
    return bootstrap_config_error(error,
                                  "a world of several nodes needs a coordinator address "
                                  "(MLFAB_COORDINATOR, or MASTER_ADDR and MASTER_PORT)");
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__config_complete(const mlfab_config *given, mlfab_config *config,
                                           mlfab_error *error) {
  memset(config, 0, sizeof *config);
  if (!given) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "config is NULL");
  if (given->size < offsetof(mlfab_config, coordinator) || given->size > 1 << 20) {
    return bootstrap_config_error(error, "config.size is not set (call mlfab_config_init)");
  }
  memcpy(config, given, mlfab__min(given->size, sizeof *config));
  config->size = sizeof *config;
  uint64_t secret[2];
  if (!bootstrap_texts_end(config)) return bootstrap_config_error(error, "a text without its end");
  if (mlfab__secret_parse(config->secret, secret))
    return bootstrap_config_error(error, "secret (MLFAB_JOB_SECRET) is not 32 hexadecimal digits");
  bootstrap_default32(&config->workers, 1);
  bootstrap_default32(&config->servers, 1);
  if (config->job[0] == 0) memcpy(config->job, "mlfab", 6);
  bootstrap_default64(&config->timeout_ns, 300000000000u);
  bootstrap_default64(&config->heartbeat_ns, 500000000u);
  bootstrap_default64(&config->silent_death_ns, 30000000000u);
  bootstrap_default64(&config->spin_ns, 20000);
  bootstrap_default64(&config->seed, 1);
  bootstrap_default32(&config->chunk_bytes, 262144);
  bootstrap_default32(&config->eager_bytes, 262144);
  bootstrap_default32(&config->block_bytes, 1048576);
  bootstrap_default32(&config->merge_max, 128);
  bootstrap_default64(&config->model_max_bytes, (uint64_t)64 << 30);
  if (config->heartbeat_ns < 1000000)
    return bootstrap_config_error(error, "heartbeat_ns below 1 ms");
  if (config->chunk_bytes % 64 || config->chunk_bytes > MLFAB_BULK_MAX)
    return bootstrap_config_error(error, "chunk_bytes must be a multiple of 64, at most 1 MiB");
  if (config->block_bytes % 64 || config->block_bytes > (1u << 30))
    return bootstrap_config_error(error, "block_bytes must be a multiple of 64, at most 1 GiB");
  if (config->eager_bytes % 64 || config->eager_bytes > (1u << 30))
    return bootstrap_config_error(error, "eager_bytes must be a multiple of 64, at most 1 GiB");
  if (config->merge_max > 128) return bootstrap_config_error(error, "merge_max is at most 128");
  if (config->order_by_rate > 1) return bootstrap_config_error(error, "order_by_rate is 0 or 1");
  if (config->progress > MLFAB_PROGRESS_HAND)
    return bootstrap_config_error(error, "unknown progress mode");
  return bootstrap_check_world(config, error);
}

MLFAB__INTERNAL uint32_t mlfab__node_of_server(const mlfab_node *node, uint32_t server) {
  return node->config.dedicated ? node->config.workers + server : server;
}

MLFAB__INTERNAL const char *mlfab__bootstrap_name(const mlfab_node *node, uint32_t id,
                                                  char buffer[32]) {
  uint32_t others = node->config.workers + (node->config.dedicated ? node->config.servers : 0);
  if (id >= others) {
    snprintf(buffer, 32, "the scheduler");
  } else if (node->config.dedicated && id >= node->config.workers) {
    snprintf(buffer, 32, "server %u", id - node->config.workers);
  } else {
    snprintf(buffer, 32, "worker %u", id);
  }
  return buffer;
}

MLFAB__INTERNAL void mlfab__bootstrap_fail(mlfab_node *node, int code, int32_t rank, int is_server,
                                           const char *text) {
  if (node->phase >= MLFAB__BOOTSTRAP_READY) return;
  node->phase = MLFAB__BOOTSTRAP_FAILED;
  mlfab__error(&node->failure, code, rank, is_server, node->now_ns - node->opened_ns, "%s", text);
}

/* --- server 0: who is here --- */

/* The list of servers and where to meet them, once for all WELCOMEs. */
static int bootstrap_make_welcome(mlfab_node *node) {
  uint32_t room = node->config.servers * (MLFAB__ADDRESSES_MAX + 32);
  if (room > MLFAB_BULK_MAX) room = MLFAB_BULK_MAX;
  if (!node->welcome) node->welcome = mlfab__alloc(&node->env, room);
  if (!node->welcome) return MLFAB_ERR_MEMORY;
  node->welcome_bytes = node->welcome_count = 0;
  for (uint32_t s = 0; s < node->config.servers; s++) {
    uint32_t id = mlfab__node_of_server(node, s);
    const mlfab__peer *peer = &node->peers[id];
    mlfab__member_info info;
    memset(&info, 0, sizeof info);
    info.node = id;
    info.roles = MLFAB_ROLE_SERVER;
    info.incarnation = peer->incarnation;
    info.hand = peer->hand;
    info.nonce = peer->nonce;
    memcpy(info.addresses, peer->addresses ? peer->addresses : node->addresses,
           MLFAB__ADDRESSES_MAX);
    uint32_t n = mlfab__encode_member_info(node->welcome + node->welcome_bytes,
                                           room - node->welcome_bytes, &info);
    if (n == 0) return MLFAB_ERR_LIMIT;
    node->welcome_bytes += n;
    node->welcome_count++;
  }
  return 0;
}

static void bootstrap_list_missing(mlfab_node *node) {
  size_t at = 0;
  node->missing[0] = 0;
  for (uint32_t id = 0; id < node->nodes && at + 24 < sizeof node->missing; id++) {
    char name[32];
    if (node->peers[id].joined) continue;
    int n = snprintf(node->missing + at, sizeof node->missing - at, "%s%s", at ? ", " : "",
                     mlfab__bootstrap_name(node, id, name));
    at += (size_t)n;
  }
}

/* Everybody is here. */
static void bootstrap_complete(mlfab_node *node) {
  int code = bootstrap_make_welcome(node);
  if (code) {
    mlfab__bootstrap_fail(node, code, MLFAB_NO_RANK, 0,
                          "server 0: no room for the list of servers");
    return;
  }
  for (uint32_t i = 0; i < node->nlinks; i++) {
    if (node->links[i].kind != MLFAB__LINK_JOIN_IN) continue;
    node->links[i].welcome = 1;
    node->links[i].since_ns = node->now_ns;
    mlfab__node_ready_link(node, i);
  }
  node->phase = MLFAB__BOOTSTRAP_GREETING;
  mlfab__node_await_workers(node);
  for (uint32_t r = 0; r < mlfab__node_routes(node); r++) {
    const mlfab__peer *peer =
        &node->peers[mlfab__node_of_server(node, mlfab__node_server_of(node, r))];
    memcpy(node->routes[r].addresses, peer->addresses ? peer->addresses : node->addresses,
           MLFAB__ADDRESSES_MAX);
    node->routes[r].hand = peer->hand;
    node->routes[r].incarnation = peer->incarnation;
    node->routes[r].nonce = peer->nonce;
  }
  mlfab__node_greet(node);
  mlfab__bootstrap_check(node);
}

/* Why a JOIN cannot be granted: 0, or a code and a text. */
static int bootstrap_judge(mlfab_node *node, const mlfab__join *join, uint32_t *id_p, char *text,
                           size_t room) {
  const mlfab_config *c = &node->config;
  if (node->phase == MLFAB__BOOTSTRAP_FAILED) {
    snprintf(text, room, "server 0 has given up: %.120s", node->failure.text);
    return MLFAB_ERR_REFUSED;
  }
  if (join->scheduler != c->scheduler) {
    snprintf(text, room, "the worlds disagree: scheduler is %u at %d, %u at server 0",
             join->scheduler, (int)join->rank, c->scheduler);
    return MLFAB_ERR_WORLD;
  }
  if (join->workers != c->workers || join->servers != c->servers ||
      join->dedicated != c->dedicated) {
    snprintf(text, room,
             "the worlds disagree: %d has %u workers, %u %sservers; server 0 has %u, %u %s",
             (int)join->rank, join->workers, join->servers, join->dedicated ? "dedicated " : "",
             c->workers, c->servers, c->dedicated ? "dedicated" : "");
    return MLFAB_ERR_WORLD;
  }
  int own = join->roles == MLFAB_ROLE_SCHEDULER;
  int server_only = !own && c->dedicated && !(join->roles & MLFAB_ROLE_WORKER);
  uint32_t ranks = own ? 1 : server_only ? c->servers : c->workers;
  if (join->rank < 0 || (uint32_t)join->rank >= ranks ||
      (own && c->scheduler != MLFAB_SCHEDULER_OWN)) {
    snprintf(text, room, "rank %d is not in the world of %u workers, %u servers", (int)join->rank,
             c->workers, c->servers);
    return MLFAB_ERR_RANK_RANGE;
  }
  *id_p = server_only ? c->workers + (uint32_t)join->rank : (uint32_t)join->rank;
  if (own) *id_p = node->nodes - 1;
  if (*id_p == node->id) {
    snprintf(text, room, "this rank is server 0's own process");
    return MLFAB_ERR_RANK_TAKEN;
  }
  return 0;
}

/* Is this node a server of its own, to which no link need lead? */
static int bootstrap_is_dedicated(const mlfab_node *node, uint32_t id) {
  const mlfab_config *c = &node->config;
  return c->dedicated && id >= c->workers && id - c->workers < c->servers;
}

/* The link, other than this one, of the process that has a number; MLFAB__NO_LINK when none is here. */
static uint32_t bootstrap_holder(const mlfab_node *node, uint32_t id, uint32_t link) {
  const mlfab__peer *peer = &node->peers[id];
  if (!peer->joined) return MLFAB__NO_LINK;
  if (peer->link != MLFAB__NO_LINK && peer->link != link) return peer->link;
  if (id < node->config.workers) return node->worker_links[id];
  return bootstrap_is_dedicated(node, id) ? MLFAB__NO_LINK
                                          : node->worker_links[node->config.workers];
}

/* Does the server that has a number still answer? 1; 0: no, or another process does where it was; -1: it
 * is being called. */
static int bootstrap_answers(mlfab_node *node, mlfab__peer *peer, uint32_t server) {
  mlfab__route *route = &node->routes[2 * node->config.servers + server];
  uint64_t beat = node->config.heartbeat_ns;
  if (peer->awaited_ns == 0 || node->now_ns - peer->awaited_ns >= 10 * beat) {
    peer->awaited_ns = mlfab__max(node->now_ns, 1);
    mlfab__node_across(node, server);
  }
  const mlfab__link *link = route->link != MLFAB__NO_LINK ? &node->links[route->link] : NULL;
  if (link && link->greeted && link->heard_ns >= peer->awaited_ns)
    return link->nonce == peer->nonce;
  if (node->now_ns - peer->awaited_ns >= 5 * beat || (!link && !route->connecting)) return 0;
  return -1;
}

/* May this process have a number, which no link here holds? A server of its own is called first, and others
 * have 5 beats from WELCOME to say HELLO. 0 when it was refused, or is to call again. */
static int bootstrap_vacant(mlfab_node *node, uint32_t link, uint32_t id, const mlfab__join *join) {
  mlfab__peer *peer = &node->peers[id];
  if (node->phase == MLFAB__BOOTSTRAP_JOINING || !peer->joined || peer->nonce == join->nonce)
    return 1;
  int answers = 0;
  if (bootstrap_is_dedicated(node, id)) {
    answers = bootstrap_answers(node, peer, id - node->config.workers);
  } else if (peer->awaited_ns != 0 && !MLFAB__PLANTED(95)) {
    answers = node->now_ns - peer->awaited_ns < 5 * node->config.heartbeat_ns ? -1 : 0;
  }
  if (answers < 0) {
    node->links[link].closing = 1;
    mlfab__node_ready_link(node, link);
    return 0;
  }
  peer->awaited_ns = 0;
  if (!answers) return 1;
  char name[32], text[96];
  snprintf(text, sizeof text, "%s is another process that is here already",
           mlfab__bootstrap_name(node, id, name));
  mlfab__node_refuse(node, link, MLFAB_ERR_RANK_TAKEN, join->rank, text);
  return 0;
}

static void bootstrap_join(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame) {
  mlfab__join join;
  char text[160];
  uint32_t id = 0;
  if (mlfab__decode_join(frame->meta, frame->meta_bytes, &join)) {
    mlfab__node_refuse(node, link, MLFAB_ERR_FRAME, MLFAB_NO_RANK, "a JOIN that does not parse");
    return;
  }
  int code = node->is_coordinator ? bootstrap_judge(node, &join, &id, text, sizeof text)
                                  : MLFAB_ERR_REFUSED;
  if (!node->is_coordinator)
    snprintf(text, sizeof text, "this node is not server 0: wrong coordinator address");
  if (code) {
    mlfab__node_refuse(node, link, code, join.rank, text);
    return;
  }
  const mlfab__link *before = &node->links[link];
  if (before->kind == MLFAB__LINK_JOIN_IN && (before->peer != id || before->nonce != join.nonce)) {
    mlfab__node_refuse(node, link, MLFAB_ERR_FRAME, join.rank, "two processes on one connection");
    return;
  }
  mlfab__peer *peer = &node->peers[id];
  uint32_t holder = bootstrap_holder(node, id, link);
  if (!mlfab__node_claim(node, link, holder, join.nonce, frame)) return;
  if (!bootstrap_vacant(node, link, id, &join)) return;
  if (!peer->addresses) peer->addresses = mlfab__alloc(&node->env, MLFAB__ADDRESSES_MAX);
  if (!peer->addresses) {
    mlfab__node_refuse(node, link, MLFAB_ERR_MEMORY, 0, "server 0 is out of memory");
    return;
  }
  int again = peer->joined && peer->nonce == join.nonce;
  if (peer->link != MLFAB__NO_LINK && peer->link != link)
    mlfab__node_hang_up(node, peer->link, "replaced by a newer link");
  if (!peer->joined) node->joined++;
  if (!again) peer->incarnation = ++node->incarnations;
  peer->joined = 1;
  peer->hand = join.hand != 0;
  peer->nonce = join.nonce;
  peer->link = link;
  memcpy(peer->addresses, join.addresses, MLFAB__ADDRESSES_MAX);
  node->links[link].kind = MLFAB__LINK_JOIN_IN;
  node->links[link].peer = id;
  node->links[link].nonce = join.nonce;
  node->links[link].since_ns = node->now_ns;
  if (node->phase != MLFAB__BOOTSTRAP_JOINING) {
    node->links[link].welcome = 1;
    mlfab__node_ready_link(node, link);
  } else if (node->joined == node->nodes) {
    bootstrap_complete(node);
  }
}

MLFAB__INTERNAL int mlfab__bootstrap_overdue(const mlfab_node *node, const mlfab__link *link) {
  return node->phase != MLFAB__BOOTSTRAP_JOINING &&
         node->now_ns - link->since_ns >= 20 * node->config.heartbeat_ns;
}

MLFAB__INTERNAL void mlfab__bootstrap_lost(mlfab_node *node, uint32_t link) {
  mlfab__peer *peer = &node->peers[node->links[link].peer];
  if (peer->link != link) return;
  peer->link = MLFAB__NO_LINK;
  if (node->phase != MLFAB__BOOTSTRAP_JOINING) {
    uint32_t id = node->links[link].peer;
    if (!bootstrap_is_dedicated(node, id) && bootstrap_holder(node, id, link) == MLFAB__NO_LINK)
      peer->awaited_ns = mlfab__max(node->now_ns, 1);
    return;
  }
  /* It broke down while the others were awaited: it is not here any more. */
  peer->joined = 0;
  node->joined--;
}

/* --- a node that joins --- */

MLFAB__INTERNAL void mlfab__bootstrap_start(mlfab_node *node) {
  node->phase = MLFAB__BOOTSTRAP_JOINING;
  if (!node->is_coordinator) {
    node->join_connecting = 1;
    mlfab__node_connect(node, MLFAB__TOKEN_JOIN);
    return;
  }
  mlfab__peer *self = &node->peers[node->id];
  self->joined = 1;
  self->incarnation = node->incarnation = ++node->incarnations;
  self->hand = node->config.progress == MLFAB_PROGRESS_HAND;
  self->nonce = node->nonce;
  node->joined = 1;
  if (node->joined == node->nodes) bootstrap_complete(node);
}

MLFAB__INTERNAL void mlfab__bootstrap_up(mlfab_node *node, uint32_t link) {
  mlfab__join join;
  memset(&join, 0, sizeof join);
  join.rank = node->config.rank;
  join.roles = node->config.roles;
  join.workers = node->config.workers;
  join.servers = node->config.servers;
  join.dedicated = node->config.dedicated;
  join.scheduler = node->config.scheduler;
  join.hand = node->config.progress == MLFAB_PROGRESS_HAND;
  join.nonce = node->nonce;
  memcpy(join.addresses, node->addresses, sizeof join.addresses);
  node->links[link].kind = MLFAB__LINK_JOIN_OUT;
  node->join_link = link;
  node->join_connecting = 0;
  uint8_t meta[MLFAB__ADDRESSES_MAX + 128];
  mlfab__node_post(node, link, MLFAB__JOIN, meta, mlfab__encode_join(meta, &join));
}

MLFAB__INTERNAL void mlfab__bootstrap_down(mlfab_node *node, const char *why) {
  node->join_link = MLFAB__NO_LINK;
  node->join_connecting = 0;
  node->join_retry_ns = node->now_ns + mlfab__node_beat(node) / 5;
  if (why) snprintf(node->join_why, sizeof node->join_why, "%s", why);
}

static void bootstrap_welcome(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame) {
  mlfab__welcome welcome;
  const uint8_t *at = frame->bulk;
  uint32_t left = frame->bulk_bytes;
  if (mlfab__decode_welcome(frame->meta, frame->meta_bytes, &welcome) || (left > 0 && !at)) {
    mlfab__bootstrap_fail(node, MLFAB_ERR_FRAME, 0, 1, "joining: a WELCOME that does not parse");
    return;
  }
  for (uint32_t i = 0; i < welcome.nodes; i++) {
    mlfab__member_info info;
    uint32_t n = mlfab__decode_member_info(at, left, &info);
    uint32_t first = mlfab__node_of_server(node, 0);
    if (n == 0 || info.node < first || info.node - first >= node->config.servers) {
      mlfab__bootstrap_fail(node, MLFAB_ERR_FRAME, 0, 1, "joining: a WELCOME that does not parse");
      return;
    }
    at += n;
    left -= n;
    for (uint32_t r = info.node - first; r < mlfab__node_routes(node); r += node->config.servers) {
      memcpy(node->routes[r].addresses, info.addresses, MLFAB__ADDRESSES_MAX);
      node->routes[r].hand = info.hand != 0;
      node->routes[r].incarnation = info.incarnation;
      node->routes[r].nonce = info.nonce;
    }
  }
  node->incarnation = welcome.incarnation;
  node->phase = MLFAB__BOOTSTRAP_GREETING;
  node->links[link].closing = 1;
  node->join_link = MLFAB__NO_LINK;
  mlfab__node_ready_link(node, link);
  if (node->is_server) mlfab__node_await_workers(node);
  mlfab__node_greet(node);
  mlfab__bootstrap_check(node);
}

MLFAB__INTERNAL void mlfab__bootstrap_frame(mlfab_node *node, uint32_t link,
                                            const mlfab__frame_in *frame) {
  mlfab__refuse refuse;
  mlfab__member member;
  if (frame->type == MLFAB__JOIN) {
    bootstrap_join(node, link, frame);
  } else if (node->links[link].kind != MLFAB__LINK_JOIN_OUT) {
    mlfab__node_refuse(node, link, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                       "a frame that no node sends that joins");
  } else if (frame->type == MLFAB__WELCOME && node->phase == MLFAB__BOOTSTRAP_JOINING) {
    bootstrap_welcome(node, link, frame);
  } else if (frame->type == MLFAB__REFUSE &&
             !mlfab__decode_refuse(frame->meta, frame->meta_bytes, &refuse)) {
    char text[MLFAB__TEXT_MAX + 128];
    snprintf(text, sizeof text, "joining: refused by server 0: %s", refuse.text);
    if (refuse.code == MLFAB_ERR_JOB)
      snprintf(text, sizeof text, "joining as job '%s': refused by server 0: %s", node->config.job,
               refuse.text);
    mlfab__bootstrap_fail(node, refuse.code, refuse.rank, 0, text);
  } else if (frame->type == MLFAB__MEMBER &&
             !mlfab__decode_member(frame->meta, frame->meta_bytes, &member)) {
    snprintf(node->missing, sizeof node->missing, "%.*s", (int)sizeof node->missing - 1,
             member.addresses);
  }
}

MLFAB__INTERNAL void mlfab__bootstrap_check(mlfab_node *node) {
  if (node->phase != MLFAB__BOOTSTRAP_GREETING) return;
  for (uint32_t s = 0; node->is_worker && s < node->config.servers; s++) {
    if (!node->routes[s].greeted) return;
  }
  /* Beside a server the scheduler may come later: until then it is first come, first served. */
  int own = node->config.roles == MLFAB_ROLE_SCHEDULER;
  for (uint32_t s = 0; own && s < node->config.servers; s++) {
    if (!node->routes[node->config.servers + s].greeted) return;
  }
  node->phase = MLFAB__BOOTSTRAP_READY;
}

/* Tells those who have joined who is missing, so that their error can say it too. */
static void bootstrap_tell_missing(mlfab_node *node) {
  mlfab__member member;
  memset(&member, 0, sizeof member);
  bootstrap_list_missing(node);
  memcpy(member.addresses, node->missing, sizeof node->missing);
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  uint32_t n = mlfab__encode_member(meta, &member);
  for (uint32_t i = 0; i < node->nlinks; i++) {
    if (node->links[i].kind == MLFAB__LINK_JOIN_IN && !node->links[i].closing)
      mlfab__node_post(node, i, MLFAB__MEMBER, meta, n);
  }
}

static void bootstrap_timeout(mlfab_node *node) {
  char text[280], waited[24];
  mlfab__duration(waited, node->now_ns - node->opened_ns);
  int32_t rank = 0;
  int is_server = 1;
  if (node->is_coordinator && node->phase == MLFAB__BOOTSTRAP_JOINING) {
    uint32_t id = 0;
    bootstrap_list_missing(node);
    while (id + 1 < node->nodes && node->peers[id].joined) id++;
    is_server = node->config.dedicated && id >= node->config.workers &&
                id < node->config.workers + node->config.servers;
    rank = (int32_t)(is_server ? id - node->config.workers : id);
    int n =
        snprintf(text, sizeof text, "joining: after %s still missing: %s", waited, node->missing);
    if (node->strange)
      snprintf(text + n, sizeof text - (size_t)n, "; a caller was refused: %s", node->strange);
  } else if (node->phase == MLFAB__BOOTSTRAP_GREETING) {
    const mlfab__route *routes = node->routes;
    if (node->config.roles == MLFAB_ROLE_SCHEDULER) routes += node->config.servers;
    while ((uint32_t)rank + 1 < node->config.servers && routes[rank].greeted) rank++;
    snprintf(text, sizeof text, "joining: after %s server %d does not answer at %.80s (%.100s)",
             waited, (int)rank, routes[rank].addresses, routes[rank].why);
  } else if (node->missing[0]) {
    snprintf(text, sizeof text, "joining: after %s server 0 still misses: %s", waited,
             node->missing);
  } else {
    snprintf(text, sizeof text, "joining: after %s no answer from server 0 at %.80s (%.100s)",
             waited, node->config.coordinator,
             node->join_why[0] ? node->join_why : "no connection");
  }
  mlfab__bootstrap_fail(node, MLFAB_ERR_TIMEOUT, rank, is_server, text);
}

MLFAB__INTERNAL void mlfab__bootstrap_tick(mlfab_node *node) {
  if (node->phase >= MLFAB__BOOTSTRAP_READY) return;
  if (node->now_ns - node->opened_ns >= node->config.timeout_ns) {
    bootstrap_timeout(node);
    return;
  }
  if (node->phase != MLFAB__BOOTSTRAP_JOINING) return;
  if (node->is_coordinator) {
    if (node->now_ns < node->missing_ns) return;
    node->missing_ns = node->now_ns + mlfab__node_beat(node);
    bootstrap_tell_missing(node);
  } else if (node->join_link == MLFAB__NO_LINK && !node->join_connecting &&
             node->now_ns >= node->join_retry_ns) {
    node->join_connecting = 1;
    mlfab__node_connect(node, MLFAB__TOKEN_JOIN);
  }
}
