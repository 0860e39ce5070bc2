/* node.c - a node: links, dispatch, actions, liveness. See node.h and mlfab.h section 11. */
#include "node.h"

#include "../sched/client.h"
#include "../sparse/sparse_apply.h"
#include "../sparse/sparse_push.h"

#include <stdio.h>

enum { NODE_QUEUE_MAX = 4 << 20, NODE_STRANGERS = 64, NODE_JOIN_BEAT_NS = 500000000 };

/* Actions that updates in flight can ask for: a detach an update and server, and a connect a
 * server. */
#define NODE_ACTIONS(node) (64 + 2 * (MLFAB__WORKER_UPDATES + 1) * (node)->config.servers)

/* --- links --- */

static mlfab__link *node_link(mlfab_node *node, uint32_t id, uint32_t *index_p) {
  uint32_t index;
  if (!mlfab__map_get(&node->by_id, id, &index)) return NULL;
  *index_p = index;
  return &node->links[index];
}

/* Room for this many actions at least, so that none is ever lost for want of memory. */
static int node_reserve_actions(mlfab_node *node, uint32_t room) {
  if (room <= node->actions_room) return 0;
  mlfab__queued_action *actions = mlfab__alloc_array(&node->env, room, sizeof *actions);
  if (!actions) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < node->actions_count; i++) {
    actions[i] = node->actions[(node->actions_begin + i) % node->actions_room];
  }
  mlfab__free(&node->env, node->actions, node->actions_room * sizeof *actions);
  node->actions = actions;
  node->actions_begin = 0;
  node->actions_room = room;
  return 0;
}

/* --- timers --- */

/* The heap's number of a timer. */
static uint32_t node_timer(const mlfab_node *node, enum mlfab__timer kind, uint32_t index) {
  uint32_t routes = mlfab__node_routes(node);
  uint32_t workers = node->is_server ? node->config.workers : 0;
  switch (kind) {
    case MLFAB__TIMER_JOIN:
      return 0;
    case MLFAB__TIMER_SCAN:
      return 1;
    case MLFAB__TIMER_ROUTE:
      return 2 + index;
    case MLFAB__TIMER_WORKER:
      return 2 + routes + index;
    default:
      return 2 + routes + workers + index;
  }
}

/* The next time at which timers expire, from this one on. */
static uint64_t node_round(const mlfab_node *node, uint64_t at_ns) {
  uint64_t quarter = mlfab__node_beat(node) / 4;
  uint64_t since = mlfab__max(at_ns, node->opened_ns) - node->opened_ns;
  return mlfab__add_sat(at_ns, (quarter - since % quarter) % quarter);
}

static void node_arm_at(mlfab_node *node, enum mlfab__timer kind, uint32_t index, uint64_t at_ns) {
  mlfab__heap_put(&node->timers, node_timer(node, kind, index), at_ns, (uint64_t)kind);
}

/* Expires at this time, rounded up, but not at once. */
static void node_arm(mlfab_node *node, enum mlfab__timer kind, uint32_t index, uint64_t at_ns) {
  node_arm_at(node, kind, index, node_round(node, mlfab__max(at_ns, node->now_ns + 1)));
}

/* A free entry; links and ready ring grow together. MLFAB__NO_LINK when out of memory. */
static uint32_t node_new_link(mlfab_node *node) {
  for (uint32_t i = node->first_free; i < node->nlinks; i++) {
    if (node->links[i].kind != MLFAB__LINK_FREE || node->links[i].listed) continue;
    node->first_free = i;
    return i;
  }
  uint32_t n = node->nlinks, more = n ? 2 * n : 8;
  mlfab__link *links = mlfab__alloc_array(&node->env, more, sizeof *links);
  uint32_t *ready = mlfab__alloc_array(&node->env, more, sizeof *ready);
  /* Beside what updates may ask for: each link's loans taken back, closed, dialled again, probed. */
  int reserved = !node_reserve_actions(node, NODE_ACTIONS(node) + 4 * more);
  int timed =
      !mlfab__heap_reserve(&node->timers, &node->env, node_timer(node, MLFAB__TIMER_LINK, more));
  if (!links || !ready || !reserved || !timed) {
    mlfab__free(&node->env, links, more * sizeof *links);
    mlfab__free(&node->env, ready, more * sizeof *ready);
    return MLFAB__NO_LINK;
  }
  if (n) memcpy(links, node->links, n * sizeof *links);
  for (uint32_t i = 0; n && i < node->ready_count; i++)
    ready[i] = node->ready[(node->ready_begin + i) % n];
  mlfab__free(&node->env, node->links, n * sizeof *links);
  mlfab__free(&node->env, node->ready, n * sizeof *ready);
  node->links = links;
  node->ready = ready;
  node->ready_begin = 0;
  node->nlinks = more;
  node->first_free = n;
  return n;
}

MLFAB__INTERNAL void mlfab__node_ready_link(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  if (link->listed || link->blocked || link->kind == MLFAB__LINK_FREE) return;
  link->listed = 1;
  node->ready[(node->ready_begin + node->ready_count++) % node->nlinks] = index;
}

static void node_act(mlfab_node *node, uint32_t kind, uint32_t link, uint64_t token) {
  if (node->actions_count == node->actions_room &&
      node_reserve_actions(node, 2 * node->actions_room)) {
    /* More than all updates and links can ask for at once: only repeated connects are left over. */
    mlfab__log(&node->env, MLFAB_LOG_ERROR, "out of memory for an action");
    return;
  }
  mlfab__queued_action *action =
      &node->actions[(node->actions_begin + node->actions_count++) % node->actions_room];
  action->kind = kind;
  action->link = link;
  action->token = token;
}

MLFAB__INTERNAL void mlfab__node_connect(mlfab_node *node, uint64_t token) {
  node_act(node, MLFAB_ACTION_CONNECT, 0, token);
}

static void node_doom(mlfab_node *node, uint32_t index) {
  node->links[index].doomed = 1;
  node->doomed = 1;
}

MLFAB__INTERNAL void mlfab__node_post(mlfab_node *node, uint32_t index, uint8_t type,
                                      const void *meta, uint32_t bytes) {
  if (index == MLFAB__NO_LINK) return;
  mlfab__link *link = &node->links[index];
  uint32_t padded = (bytes + 7) / 8 * 8 + 8;
  if (link->kind == MLFAB__LINK_FREE || link->closing) return;
  if (link->queue_room - link->queue_end < padded) {
    uint32_t used = link->queue_end - link->queue_begin;
    if (link->queue_begin > 0 && link->queue_room - used >= padded && link->queue_begin >= used) {
      memcpy(link->queue, link->queue + link->queue_begin, used);
    } else {
      uint32_t room = link->queue_room ? link->queue_room : 1024;
      while (room < used + padded) room *= 2;
      uint8_t *queue = room <= NODE_QUEUE_MAX ? mlfab__alloc(&node->env, room) : NULL;
      if (!queue) {
        /* A peer that does not read, or no memory: the link goes, and what matters is said again on
         * the next. */
        node_doom(node, index);
        return;
      }
      if (used > 0) memcpy(queue, link->queue + link->queue_begin, used);
      mlfab__free(&node->env, link->queue, link->queue_room);
      link->queue = queue;
      link->queue_room = room;
    }
    link->queue_begin = 0;
    link->queue_end = used;
  }
  uint32_t head[2] = {bytes, type};
  memcpy(link->queue + link->queue_end, head, 8);
  if (bytes > 0) memcpy(link->queue + link->queue_end + 8, meta, bytes);
  link->queue_end += padded;
  mlfab__node_ready_link(node, index);
}

/* It claims nothing any more. */
static void node_unclaim(mlfab_node *node, mlfab__link *link) {
  if (link->kind != MLFAB__LINK_CLAIM) return;
  mlfab__free(&node->env, link->claim, link->claim_bytes);
  link->claim = NULL;
  link->claim_bytes = 0;
  link->kind = MLFAB__LINK_NEW;
  node->claims--;
}

static void node_free_link(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  node_unclaim(node, link);
  if (link->id) mlfab__map_remove(&node->by_id, link->id);
  mlfab__free(&node->env, link->queue, link->queue_room);
  uint8_t listed = link->listed;
  memset(link, 0, sizeof *link);
  link->listed = listed; /* the ring lets go of it when it comes round */
  if (index < node->first_free) node->first_free = index;
  mlfab__heap_remove(&node->timers, node_timer(node, MLFAB__TIMER_LINK, index));
}

MLFAB__INTERNAL void mlfab__node_refuse(mlfab_node *node, uint32_t index, int code, int32_t rank,
                                        const char *text) {
  mlfab__refuse refuse;
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  memset(&refuse, 0, sizeof refuse);
  refuse.code = code;
  refuse.rank = rank;
  snprintf(refuse.text, sizeof refuse.text, "%s", text);
  mlfab__node_post(node, index, MLFAB__REFUSE, meta, mlfab__encode_refuse(meta, &refuse));
  node->links[index].closing = 1;
  mlfab__log(&node->env, MLFAB_LOG_INFO, "refused a connection: %s", text);
}

MLFAB__INTERNAL void mlfab__node_emit(mlfab_node *node, uint32_t kind, int32_t rank, int is_server,
                                      uint32_t incarnation, int code, const char *text) {
  mlfab_event_info info = {kind, rank, (uint32_t)is_server, incarnation, code, text};
  mlfab__log(&node->env, kind == MLFAB_EVENT_DEAD ? MLFAB_LOG_WARN : MLFAB_LOG_INFO, "%s %d: %s",
             is_server ? "server" : "worker", (int)rank, text);
  if (node->config.on_event) node->config.on_event(node->config.user, &info);
}

/* --- what the roles ask for --- */

static uint32_t node_route(const mlfab_node *node, uint32_t server) {
  return node->routes[server].link;
}
static uint32_t node_worker(const mlfab_node *node, uint32_t rank) {
  return node->worker_links[rank];
}
static uint32_t node_planner(const mlfab_node *node, uint32_t server) {
  return node->routes[node->config.servers + server].link;
}
static uint32_t node_across(const mlfab_node *node, uint32_t server) {
  return node->routes[2 * node->config.servers + server].link;
}
static uint32_t node_member_link(const mlfab_node *node, uint32_t rank) {
  return node->peer_in_links[rank];
}
static uint32_t node_hop(const mlfab_node *node, uint32_t rank) {
  return node->peers_out[rank] ? node->peers_out[rank]->link : MLFAB__NO_LINK;
}

static void node_port_drop(mlfab_node *node, uint32_t index, int code, const char *text) {
  if (index == MLFAB__NO_LINK) return;
  mlfab__log(&node->env, MLFAB_LOG_WARN, "link given up: %s (%s)", text, mlfab_error_name(code));
  node->stats.frames_refused++;
  node_doom(node, index);
}

/* One set of functions for each direction: the peer's number means another table. */
#define NODE_PORT(side, table)                                                                \
  static void node_##side##_post(void *self, uint32_t peer, uint8_t type, const void *meta,   \
                                 uint32_t bytes) {                                            \
    mlfab_node *node = self;                                                                  \
    mlfab__node_post(node, table(node, peer), type, meta, bytes);                             \
  }                                                                                           \
  static void node_##side##_ready(void *self, uint32_t peer) {                                \
    mlfab_node *node = self;                                                                  \
    if (table(node, peer) != MLFAB__NO_LINK) mlfab__node_ready_link(node, table(node, peer)); \
  }                                                                                           \
  static void node_##side##_drop(void *self, uint32_t peer, int code, const char *text) {     \
    mlfab_node *node = self;                                                                  \
    node_port_drop(node, table(node, peer), code, text);                                      \
  }                                                                                           \
  static void node_##side##_detach(void *self, uint32_t peer, uint64_t token) {               \
    mlfab_node *node = self;                                                                  \
    uint32_t index = table(node, peer);                                                       \
    if (index != MLFAB__NO_LINK && !node->links[index].self) {                                \
      node_act(node, MLFAB_ACTION_DETACH, node->links[index].id, token);                      \
    }                                                                                         \
  }
NODE_PORT(up, node_route)
NODE_PORT(down, node_worker)
NODE_PORT(plan, node_planner)
NODE_PORT(across, node_across)
NODE_PORT(member, node_member_link)
NODE_PORT(hop, node_hop)
#undef NODE_PORT

/* A hop that is wanted opens its link. */
static void node_want_hop(void *self, uint32_t rank) {
  mlfab_node *node = self;
  if (node_hop(node, rank) != MLFAB__NO_LINK) {
    node_hop_ready(self, rank);
  } else {
    mlfab__peer_link_want(node, rank);
  }
}

static void node_call(mlfab_node *node, uint32_t index);

/* A link to another server, or to our own. */
static void node_want_across(void *self, uint32_t server) {
  mlfab_node *node = self;
  uint32_t index = 2 * node->config.servers + server;
  mlfab__route *route = &node->routes[index];
  if (route->link != MLFAB__NO_LINK) {
    node_across_ready(self, server);
  } else if (server == node->server_number) {
    /* Without memory for it: tried again at the next look at the clock. */
    if (mlfab__node_pair(node, MLFAB__PAIR_RESHARD, MLFAB__LINK_RESHARD, server,
                         MLFAB__LINK_RESHARD_IN, server))
      return;
    route->link = node->pairs[MLFAB__PAIR_RESHARD][0];
    node->reshard_links[server] = node->pairs[MLFAB__PAIR_RESHARD][1];
  } else if (!node->leaving) {
    route->dead = 0;
    route->heard_ns = node->now_ns;
    if (!route->connecting) node_call(node, index);
    node_arm(node, MLFAB__TIMER_ROUTE, index, node->now_ns);
  }
}

MLFAB__INTERNAL void mlfab__node_across(mlfab_node *node, uint32_t server) {
  node_want_across(node, server);
}

static void node_port_event(void *self, uint32_t kind, int32_t rank, int is_server,
                            uint32_t incarnation, int code, const char *text) {
  mlfab__node_emit(self, kind, rank, is_server, incarnation, code, text);
}

/* --- open and close --- */

/* One link index for each peer, none of which stands. */
static uint32_t *node_no_links(mlfab_node *node, uint32_t n) {
  uint32_t *links = mlfab__alloc_array(&node->env, n, sizeof *links);
  for (uint32_t i = 0; links && i < n; i++) links[i] = MLFAB__NO_LINK;
  return links;
}

#define NODE_PORT_OF(side)                                                                   \
  {                                                                                          \
    node, node_##side##_post, node_##side##_ready, node_##side##_drop, node_##side##_detach, \
        node_port_event                                                                      \
  }

static int node_init_worker(mlfab_node *node) {
  const mlfab_config *c = &node->config;
  mlfab__port up = NODE_PORT_OF(up), hop = NODE_PORT_OF(hop), member = NODE_PORT_OF(member);
  hop.ready = node_want_hop;
  if (mlfab__worker_init(&node->worker, &node->env, c, (uint32_t)c->rank, &up, &hop, &node->stats,
                         &node->requests))
    return MLFAB_ERR_MEMORY;
  mlfab__reshard_worker_attach(&node->worker);
  mlfab__barrier_worker_init(&node->barrier, c, &up, &node->requests);
  if (mlfab__comm_init(&node->comm, &node->env, c, (uint32_t)c->rank, &up, &hop, &member,
                       &node->requests))
    return MLFAB_ERR_MEMORY;
  node->comm.host = c->host;
  node->peers_out = mlfab__alloc_array(&node->env, c->workers, sizeof *node->peers_out);
  node->peer_in_links = node_no_links(node, c->workers);
  if (!node->peers_out || !node->peer_in_links) return MLFAB_ERR_MEMORY;
  if (c->scheduler == MLFAB_SCHEDULER_NONE) return 0;
  return mlfab__aggregator_init(&node->aggregator, &node->env, c, &up, &member, &node->stats);
}

static int node_init_server(mlfab_node *node) {
  const mlfab_config *c = &node->config;
  mlfab__port down = NODE_PORT_OF(down), across = NODE_PORT_OF(across);
  uint32_t peers = c->workers + 1;
  across.ready = node_want_across;
  node->reshard_links = node_no_links(node, c->servers);
  node->worker_links = node_no_links(node, peers);
  node->worker_heard = mlfab__alloc_array(&node->env, peers, sizeof *node->worker_heard);
  node->worker_lost = mlfab__alloc_array(&node->env, peers, sizeof *node->worker_lost);
  if (!node->worker_links || !node->worker_heard || !node->worker_lost || !node->reshard_links)
    return MLFAB_ERR_MEMORY;
  if (mlfab__server_init(&node->server, &node->env, c, node->server_number, &down, &node->stats) ||
      mlfab__client_attach(&node->server))
    return MLFAB_ERR_MEMORY;
  mlfab__sparse_attach(&node->server);
  mlfab__reshard_server_attach(&node->server);
  node->server.move.across = across;
  if (!node->is_coordinator) return 0;
  if (mlfab__reshard_init(&node->reslice, &node->env, c, &node->server.layout, &down, &across))
    return MLFAB_ERR_MEMORY;
  node->peers = mlfab__alloc_array(&node->env, node->nodes, sizeof *node->peers);
  if (!node->peers) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < node->nodes; i++) node->peers[i].link = MLFAB__NO_LINK;
  if (mlfab__barrier_server_init(&node->barriers, &node->env, c, &down) ||
      mlfab__membership_init(&node->roll, &node->env, c, &down))
    return MLFAB_ERR_MEMORY;
  mlfab__trees_init(&node->trees, &node->env, c, &down, &node->roll);
  return 0;
}

static int node_init_roles(mlfab_node *node) {
  mlfab__port plan = NODE_PORT_OF(plan);
  uint32_t routes = mlfab__node_routes(node);
  node->routes = mlfab__alloc_array(&node->env, routes, sizeof *node->routes);
  if (!node->routes) return MLFAB_ERR_MEMORY;
  for (uint32_t r = 0; r < routes; r++) node->routes[r].link = MLFAB__NO_LINK;
  int code = node->is_worker ? node_init_worker(node) : 0;
  if (!code && node->is_server) code = node_init_server(node);
  if (!code && node->is_scheduler)
    code =
        mlfab__scheduler_create(&node->env, &node->config, &plan, &node->stats, &node->scheduler);
  mlfab__monitor_init(&node->monitor, node->config.heartbeat_ns);
  return code;
}

MLFAB__INTERNAL uint32_t mlfab__node_server_of(const mlfab_node *node, uint32_t route) {
  uint32_t servers = node->config.servers;
  return route < servers ? route : route - (route < 2 * servers ? servers : 2 * servers);
}

MLFAB__INTERNAL uint32_t mlfab__node_routes(const mlfab_node *node) {
  return 3 * node->config.servers;
}

MLFAB__INTERNAL uint64_t mlfab__node_beat(const mlfab_node *node) {
  uint64_t beat = node->config.heartbeat_ns;
  return node->phase < MLFAB__BOOTSTRAP_READY ? mlfab__min(beat, NODE_JOIN_BEAT_NS) : beat;
}

/* Who this node is in the fabric. */
static void node_identify(mlfab_node *node) {
  const mlfab_config *c = &node->config;
  node->is_worker = (c->roles & MLFAB_ROLE_WORKER) != 0;
  node->is_server = (c->roles & MLFAB_ROLE_SERVER) != 0;
  uint32_t others = c->workers + (c->dedicated ? c->servers : 0);
  int own = c->roles == MLFAB_ROLE_SCHEDULER;
  node->nodes = others + (c->scheduler == MLFAB_SCHEDULER_OWN);
  node->id = own ? others : (uint32_t)c->rank + (c->dedicated && node->is_server ? c->workers : 0);
  node->server_number = node->is_server ? (uint32_t)c->rank : MLFAB__NO_NODE;
  node->is_coordinator = node->server_number == 0;
  node->is_scheduler = own || (node->is_coordinator && c->scheduler == MLFAB_SCHEDULER_BESIDE);
  node->job = mlfab__hash(0, c->job, strlen(c->job));
  (void)mlfab__secret_parse(c->secret, node->secret); /* it was judged with the configuration */
  node->epoch = 1;
  node->join_link = MLFAB__NO_LINK;
  for (uint32_t i = 0; i < MLFAB__PAIRS; i++)
    node->pairs[i][0] = node->pairs[i][1] = MLFAB__NO_LINK;
}

/* Nodes that listen at one address share its links; those that only listen inside their machine are
 * one host. */
static uint64_t node_host(const char *addresses) {
  static const char local[] = "localhost";
  for (const char *at = addresses; *at;) {
    size_t n = strcspn(at, " ");
    size_t host = n;
    int has_port = !strncmp(at, "tcp:", 4);
    while (has_port && host > 4 && at[host] != ':') host--;
    int inside = !strncmp(at, "shm:", 4) || !strncmp(at, "unix:", 5) ||
                 !strncmp(at, "tcp:127.", 8) || !strncmp(at, "tcp:[::1]", 9);
    if (!inside && n > 0) return mlfab__hash(1, at, host) | 1;
    at += n;
    while (*at == ' ') at++;
  }
  return mlfab__hash(1, local, sizeof local - 1) | 1;
}

MLFAB_API int mlfab_node_open(const mlfab_config *config, const char *addresses, uint64_t now_ns,
                              mlfab_node **node_p, mlfab_error *error) {
  mlfab_config complete;
  mlfab__env env;
  if (error) memset(error, 0, sizeof *error);
  if (!node_p) return MLFAB__FAIL(error, MLFAB_ERR_ARGUMENT, "node_p is NULL");
  int code = mlfab__config_complete(config, &complete, error);
  if (!code) code = mlfab__env_init(&env, complete.env);
  if (code) return code;
  mlfab_node *node = mlfab__alloc(&env, sizeof *node);
  if (!node) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the node");
  node->env = env;
  node->requests.env = &node->env;
  node->config = complete;
  node->config.env = NULL;
  node_identify(node);
  node->opened_ns = node->now_ns = now_ns;
  node->nonce = mlfab__hash(complete.seed ^ node->id, &now_ns, sizeof now_ns);
  node->nonce = mlfab__hash(node->nonce, node->secret, sizeof node->secret);
  if (complete.progress == MLFAB_PROGRESS_AUTO) node->config.progress = MLFAB_PROGRESS_THREAD;
  snprintf(node->addresses, sizeof node->addresses, "%s", addresses ? addresses : "");
  if (node->config.host == 0) node->config.host = node_host(node->addresses);
  node->head = mlfab__alloc(&node->env, MLFAB_HEADER_BYTES + MLFAB_META_MAX);
  int reserved = !node_reserve_actions(node, NODE_ACTIONS(node));
  int timed =
      !mlfab__heap_reserve(&node->timers, &node->env, node_timer(node, MLFAB__TIMER_LINK, 0));
  if (!node->head || !reserved || !timed || node_init_roles(node)) {
    mlfab_node_close(&node);
    return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the node");
  }
  node_arm_at(node, MLFAB__TIMER_JOIN, 0, now_ns);
  mlfab__bootstrap_start(node);
  *node_p = node;
  return 0;
}

MLFAB_API void mlfab_node_close(mlfab_node **node_p) {
  mlfab_node *node = node_p ? *node_p : NULL;
  if (!node) return;
  mlfab__env env = node->env;
  mlfab__worker_free(&node->worker);
  mlfab__server_free(&node->server);
  mlfab__aggregator_free(&node->aggregator);
  mlfab__scheduler_destroy(&node->scheduler);
  mlfab__barrier_server_free(&node->barriers);
  mlfab__trees_free(&node->trees);
  mlfab__membership_free(&node->roll);
  mlfab__reshard_free(&node->reslice);
  mlfab__comm_free(&node->comm);
  mlfab__requests_free(&node->requests);
  for (uint32_t i = 0; i < node->nlinks; i++) {
    mlfab__free(&node->env, node->links[i].queue, node->links[i].queue_room);
    mlfab__free(&node->env, node->links[i].claim, node->links[i].claim_bytes);
  }
  for (uint32_t i = 0; node->peers && i < node->nodes; i++)
    mlfab__free(&node->env, node->peers[i].addresses, MLFAB__ADDRESSES_MAX);
  mlfab__free(&node->env, node->peers, node->nodes * sizeof *node->peers);
  mlfab__free(&node->env, node->routes, mlfab__node_routes(node) * sizeof *node->routes);
  uint32_t workers = node->config.workers;
  mlfab__free(&node->env, node->reshard_links, node->config.servers * sizeof *node->reshard_links);
  mlfab__free(&node->env, node->worker_links, (workers + 1) * sizeof *node->worker_links);
  mlfab__free(&node->env, node->worker_heard, (workers + 1) * sizeof *node->worker_heard);
  mlfab__free(&node->env, node->worker_lost, (workers + 1) * sizeof *node->worker_lost);
  for (uint32_t w = 0; node->peers_out && w < workers; w++)
    mlfab__free(&node->env, node->peers_out[w], sizeof **node->peers_out);
  mlfab__free(&node->env, node->peers_out, workers * sizeof *node->peers_out);
  mlfab__free(&node->env, node->hops, node->hops_room * sizeof *node->hops);
  mlfab__free(&node->env, node->peer_in_links, workers * sizeof *node->peer_in_links);
  uint32_t room = node->config.servers * (MLFAB__ADDRESSES_MAX + 32);
  mlfab__free(&node->env, node->welcome, room < MLFAB_BULK_MAX ? room : MLFAB_BULK_MAX);
  mlfab__map_free(&node->env, &node->by_id);
  mlfab__heap_free(&node->timers, &node->env);
  mlfab__free(&node->env, node->links, node->nlinks * sizeof *node->links);
  mlfab__free(&node->env, node->ready, node->nlinks * sizeof *node->ready);
  mlfab__free(&node->env, node->actions, node->actions_room * sizeof *node->actions);
  mlfab__free(&node->env, node->head, MLFAB_HEADER_BYTES + MLFAB_META_MAX);
  env.hooks = node->env.hooks;
  mlfab__free(&env, node, sizeof *node);
  *node_p = NULL;
}

/* --- workers and servers, up and down --- */

static void node_member(mlfab_node *node, uint32_t worker, uint32_t kind) {
  if (!node->is_coordinator) return;
  mlfab__member member;
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  memset(&member, 0, sizeof member);
  member.node = worker;
  member.incarnation = node->peers[worker].incarnation;
  member.kind = kind;
  uint32_t n = mlfab__encode_member(meta, &member);
  for (uint32_t w = 0; w < node->config.workers; w++) {
    uint32_t link = node->worker_links[w];
    if (w != worker && link != MLFAB__NO_LINK && !node->links[link].self)
      mlfab__node_post(node, link, MLFAB__MEMBER, meta, n);
  }
}

/* A worker is gone for good, or until it calls again. */
static void node_worker_gone(mlfab_node *node, uint32_t worker, int left) {
  const mlfab__server_peer *peer = &node->server.peers[worker];
  if (peer->dead || peer->left) return;
  char text[64], silent[24];
  if (left) {
    snprintf(text, sizeof text, "left");
  } else {
    node->stats.peers_died++;
    uint64_t lost = node->worker_lost[worker];
    snprintf(text, sizeof text, lost ? "dead, its connection broke %s ago" : "dead, silent for %s",
             mlfab__duration(silent, node->now_ns - (lost ? lost : node->worker_heard[worker])));
  }
  uint32_t kind = left ? MLFAB_EVENT_LEFT : MLFAB_EVENT_DEAD;
  mlfab__server_gone(&node->server, worker, left, node->now_ns);
  if (node->is_coordinator) {
    mlfab__barrier_server_gone(&node->barriers, worker);
    mlfab__membership_gone(&node->roll, worker, left, node->now_ns);
    mlfab__reshard_gone(&node->reslice, worker);
  }
  mlfab__node_emit(node, kind, (int32_t)worker, 0, peer->incarnation,
                   left ? 0 : MLFAB_ERR_PEER_DEAD, text);
  node_member(node, worker, kind);
}

/* `index` is of the route: of the worker role; of the scheduler role, which only stops planning for
 * it; or of the server role, whose slices cannot go there. */
static void node_server_dead(mlfab_node *node, uint32_t index, const char *why) {
  uint32_t server = mlfab__node_server_of(node, index);
  mlfab__route *route = &node->routes[index];
  char text[180];
  if (route->dead) return;
  route->dead = 1;
  snprintf(route->died, sizeof route->died, "%.127s", why);
  if (index >= 2 * node->config.servers) {
    if (node->is_coordinator) mlfab__reshard_dead(&node->reslice, server);
    mlfab__reshard_server_dead(&node->server, server);
    return;
  }
  if (index >= node->config.servers) {
    mlfab__scheduler_lost(node->scheduler, server, node->now_ns);
    if (!node->is_worker && !node->is_server) {
      snprintf(text, sizeof text, "joining: server %u is dead: %s", server, why);
      mlfab__bootstrap_fail(node, MLFAB_ERR_PEER_DEAD, (int32_t)server, 1, text);
    }
    return;
  }
  node->stats.peers_died++;
  if (node->aggregator.env) mlfab__aggregator_server_lost(&node->aggregator, server);
  mlfab__worker_dead(&node->worker, server, node->now_ns);
  if (server == 0) {
    mlfab__barrier_worker_dead(&node->barrier, node->now_ns);
    mlfab__comm_dead(&node->comm, node->now_ns);
  }
  snprintf(text, sizeof text, "dead: %s", why);
  mlfab__node_emit(node, MLFAB_EVENT_DEAD, (int32_t)server, 1, 0, MLFAB_ERR_PEER_DEAD, text);
  snprintf(text, sizeof text, "joining: server %u is dead: %s", server, why);
  mlfab__bootstrap_fail(node, MLFAB_ERR_PEER_DEAD, (int32_t)server, 1, text);
}

/* The scheduler is out of reach: its servers grant by themselves until it is back. */
static void node_scheduler_gone(mlfab_node *node) {
  mlfab__server_scheduler_lost(&node->server, node->now_ns);
  if (node->is_coordinator) mlfab__trees_scheduler(&node->trees, 0);
  mlfab__node_emit(node, MLFAB_EVENT_SCHEDULER_LOST, 0, 0, node->scheduler_incarnation,
                   MLFAB_ERR_PEER_DEAD, "scheduler lost: first come, first served");
}

/* A server has five beats from a break, in which it is called again, and none after a silence. Nor has
 * one that broke links before it answered HELLO, or it would be called for ever. */
static void node_route_down(mlfab_node *node, uint32_t index, const mlfab__link *link,
                            const char *why) {
  uint32_t server = mlfab__node_server_of(node, index);
  mlfab__route *route = &node->routes[index];
  if (link->greeted && !link->silent) route->heard_ns = node->now_ns;
  node_arm_at(node, MLFAB__TIMER_ROUTE, index,
              link->silent ? node->now_ns : node_round(node, node->now_ns + 1));
  route->link = MLFAB__NO_LINK;
  route->retry_ns = node->now_ns + mlfab__node_beat(node) / 5;
  snprintf(route->why, sizeof route->why, "%s", why);
  if (index >= 2 * node->config.servers) return; /* it all begins anew on the next link */
  if (index >= node->config.servers) {
    mlfab__scheduler_lost(node->scheduler, server, node->now_ns);
    return;
  }
  if (node->aggregator.env) mlfab__aggregator_server_lost(&node->aggregator, server);
  mlfab__worker_lost(&node->worker, server, node->now_ns);
}

/* The link is gone: whoever used it hears of it. */
static void node_link_down(mlfab_node *node, uint32_t index, const char *why) {
  mlfab__link link = node->links[index];
  if (node->out != MLFAB__OUT_NONE && node->out != MLFAB__OUT_ACTION && node->out_link == index)
    node->out = MLFAB__OUT_NONE;
  if (link.kind == MLFAB__LINK_JOIN_IN) mlfab__bootstrap_lost(node, index);
  node_free_link(node, index);
  for (uint32_t i = 0; node->claims > 0 && i < node->nlinks; i++) {
    mlfab__link *claim = &node->links[i];
    if (claim->kind != MLFAB__LINK_CLAIM || claim->holder != index) continue;
    claim->holder = MLFAB__NO_LINK;
    node->claim_due = 1;
  }
  if (link.kind == MLFAB__LINK_JOIN_OUT && node->join_link == index)
    mlfab__bootstrap_down(node, why);
  if (link.kind == MLFAB__LINK_SERVER && node->routes[link.peer].link == index)
    node_route_down(node, link.peer, &link, why);
  if (link.kind == MLFAB__LINK_PLANNER && node_planner(node, link.peer) == index)
    node_route_down(node, node->config.servers + link.peer, &link, why);
  if (link.kind == MLFAB__LINK_RESHARD && node_across(node, link.peer) == index)
    node_route_down(node, 2 * node->config.servers + link.peer, &link, why);
  if (link.kind == MLFAB__LINK_RESHARD_IN && node->reshard_links[link.peer] == index)
    node->reshard_links[link.peer] = MLFAB__NO_LINK;
  if (link.kind == MLFAB__LINK_PEER || link.kind == MLFAB__LINK_PEER_IN)
    mlfab__peer_link_down(node, &link, index);
  if (link.kind == MLFAB__LINK_SCHEDULER && node->worker_links[link.peer] == index) {
    node->worker_links[link.peer] = MLFAB__NO_LINK;
    if (node->leaving < 2) node_scheduler_gone(node);
  }
  if (link.kind == MLFAB__LINK_WORKER && node->worker_links[link.peer] == index) {
    node->worker_links[link.peer] = MLFAB__NO_LINK;
    if (!link.silent) node->worker_lost[link.peer] = node->worker_heard[link.peer] = node->now_ns;
    node_arm_at(node, MLFAB__TIMER_WORKER, link.peer,
                link.silent ? node->now_ns : node_round(node, node->now_ns + 1));
    if (node->is_coordinator) mlfab__reshard_lost(&node->reslice, link.peer);
    mlfab__server_lost(&node->server, link.peer, node->now_ns);
  }
}

/* Closes a link of ours: nobody reports it down. Not one inside the node: `pairs` names those. */
MLFAB__INTERNAL void mlfab__node_hang_up(mlfab_node *node, uint32_t index, const char *why) {
  uint32_t id = node->links[index].id;
  assert(!node->links[index].self);
  node_link_down(node, index, why);
  if (id) node_act(node, MLFAB_ACTION_DISCONNECT, id, 0);
}

/* --- numbers that two processes want --- */

static void node_heartbeat(mlfab_node *node, uint32_t index, uint32_t kind, uint64_t sent_ns) {
  mlfab__heartbeat beat = {sent_ns, kind};
  uint8_t meta[16];
  node->links[index].sent_ns = node->now_ns;
  mlfab__node_post(node, index, MLFAB__HEARTBEAT, meta, mlfab__encode_heartbeat(meta, &beat));
}

MLFAB__INTERNAL void mlfab__node_probe(mlfab_node *node, uint32_t index) {
  if (node->links[index].probe_ns != 0) return;
  node->links[index].probe_ns = node->now_ns;
  node_arm(node, MLFAB__TIMER_LINK, index, node->now_ns);
  node_heartbeat(node, index, MLFAB__BEAT_PROBE, node->now_ns);
}

MLFAB__INTERNAL int mlfab__node_claim(mlfab_node *node, uint32_t index, uint32_t holder,
                                      uint64_t nonce, const mlfab__frame_in *frame) {
  if (holder == MLFAB__NO_LINK || holder == index || node->links[holder].nonce == nonce ||
      MLFAB__PLANTED(84))
    return 1;
  mlfab__link *link = &node->links[index];
  uint8_t *claim = mlfab__alloc(&node->env, frame->meta_bytes);
  if (!claim) {
    mlfab__node_refuse(node, index, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, "out of memory for a claim");
    return 0;
  }
  memcpy(claim, frame->meta, frame->meta_bytes);
  link->kind = MLFAB__LINK_CLAIM;
  link->claim = claim;
  link->claim_bytes = frame->meta_bytes;
  link->claim_type = frame->type;
  link->holder = holder;
  node->claims++;
  mlfab__node_probe(node, holder);
  return 0;
}

/* The holder lives: whoever claims its number is another process. */
static void node_claims_refuse(mlfab_node *node, uint32_t holder) {
  const mlfab__link *other = &node->links[holder];
  char name[32], text[96];
  uint32_t id = other->kind == MLFAB__LINK_RESHARD_IN ? mlfab__node_of_server(node, other->peer)
                                                      : other->peer;
  snprintf(text, sizeof text, "%s is another process that is here already",
           other->kind == MLFAB__LINK_SCHEDULER ? "the scheduler"
                                                : mlfab__bootstrap_name(node, id, name));
  for (uint32_t i = 0; node->claims > 0 && i < node->nlinks; i++) {
    mlfab__link *link = &node->links[i];
    if (link->kind != MLFAB__LINK_CLAIM || link->holder != holder) continue;
    node_unclaim(node, link);
    mlfab__node_refuse(node, i, MLFAB_ERR_RANK_TAKEN, (int32_t)other->peer, text);
  }
}

static void node_dispatch(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame);

/* The number that they claim is free, or another's by now: they are heard anew. */
static void node_claims_again(mlfab_node *node) {
  while (node->claim_due) {
    node->claim_due = 0;
    for (uint32_t i = 0; i < node->nlinks; i++) {
      mlfab__link *link = &node->links[i];
      if (link->kind != MLFAB__LINK_CLAIM || link->holder != MLFAB__NO_LINK) continue;
      uint8_t *claim = link->claim;
      uint32_t bytes = link->claim_bytes;
      mlfab__frame_in frame = {link->claim_type, bytes, 0, claim, NULL};
      link->claim = NULL;
      link->claim_bytes = 0;
      node_unclaim(node, link);
      node_dispatch(node, i, &frame);
      mlfab__free(&node->env, claim, bytes);
    }
  }
}

/* Asked whether we live, or told that the holder of a number does. */
static void node_beat(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  mlfab__link *link = &node->links[index];
  mlfab__heartbeat beat;
  if (mlfab__decode_heartbeat(frame->meta, frame->meta_bytes, &beat)) return;
  if (beat.kind == MLFAB__BEAT_PROBE) node_heartbeat(node, index, MLFAB__BEAT_ANSWER, beat.sent_ns);
  if (beat.kind != MLFAB__BEAT_ANSWER || link->probe_ns == 0 || beat.sent_ns != link->probe_ns)
    return;
  link->probe_ns = 0;
  node_claims_refuse(node, index);
}

static int node_is_hand(const mlfab_node *node, const mlfab__link *link) {
  const mlfab__route *across = node->routes + 2 * (size_t)node->config.servers;
  switch (link->kind) {
    case MLFAB__LINK_WORKER:
      return node->server.peers[link->peer].hand;
    case MLFAB__LINK_JOIN_IN:
      return node->peers[link->peer].hand;
    case MLFAB__LINK_SERVER:
    case MLFAB__LINK_PLANNER:
      return node->routes[link->peer].hand;
    case MLFAB__LINK_RESHARD:
    case MLFAB__LINK_RESHARD_IN:
      return across[link->peer].hand;
    default:
      return 0;
  }
}

/* Does somebody wait for the number of this link's process? A MEET does not wait, and is said again. */
static int node_is_claimed(const mlfab_node *node, uint32_t index) {
  if (node->links[index].kind == MLFAB__LINK_PEER_IN || MLFAB__PLANTED(96)) return 1;
  for (uint32_t i = 0; node->claims > 0 && i < node->nlinks; i++) {
    if (node->links[i].kind == MLFAB__LINK_CLAIM && node->links[i].holder == index) return 1;
  }
  return 0;
}

/* A probe that nobody answers. Who drives its node by hand computes, as far as anybody knows. */
static void node_scan_probe(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  uint64_t beat = node->config.heartbeat_ns, waited_ns = node->now_ns - link->probe_ns;
  if (link->probe_ns == 0 || waited_ns < (link->kind == MLFAB__LINK_PEER_IN ? 2 : 5) * beat) return;
  int claimed = node_is_claimed(node, index);
  if (!claimed && waited_ns < 7 * beat) return; /* who has hung up meanwhile may be calling again */
  link->probe_ns = 0;
  if (node_is_hand(node, link)) {
    node_claims_refuse(node, index);
  } else if (claimed) {
    mlfab__node_hang_up(node, index, "did not answer, and another process wants its number");
  }
}

/* The inner links broke too, for want of memory: the roles forget what was under way, and greet
 * each other again at the next look at the clock. */
static void node_lose_self(mlfab_node *node) {
  if (node->self_lost) return;
  node->self_lost = 1;
  for (int i = 0; i < 2 * MLFAB__PAIRS; i++) {
    uint32_t index = node->pairs[i / 2][i % 2];
    if (index == MLFAB__NO_LINK) continue;
    mlfab__link *link = &node->links[index];
    link->queue_begin = link->queue_end = 0;
  }
  uint32_t rank = (uint32_t)node->config.rank;
  if (node->pairs[MLFAB__PAIR_PEER][0] != MLFAB__NO_LINK) {
    mlfab__worker_hop_lost(&node->worker, rank, node->now_ns);
    mlfab__aggregator_lost(&node->aggregator, rank, node->now_ns);
  }
  if (node->pairs[MLFAB__PAIR_SERVER][0] != MLFAB__NO_LINK) {
    if (node->aggregator.env) mlfab__aggregator_server_lost(&node->aggregator, node->server_number);
    mlfab__worker_lost(&node->worker, node->server_number, node->now_ns);
    if (node->is_coordinator) mlfab__reshard_lost(&node->reslice, rank);
    mlfab__server_lost(&node->server, rank, node->now_ns);
  }
  if (node->pairs[MLFAB__PAIR_PLANNER][0] != MLFAB__NO_LINK) {
    mlfab__scheduler_lost(node->scheduler, node->server_number, node->now_ns);
    mlfab__server_scheduler_lost(&node->server, node->now_ns);
    mlfab__trees_scheduler(&node->trees, 0);
  }
}

/* Gives up the links that a role, or a full queue, asked to. */
static void node_settle(mlfab_node *node) {
  while (node->doomed) {
    node->doomed = 0;
    for (uint32_t i = 0; i < node->nlinks; i++) {
      mlfab__link *link = &node->links[i];
      if (!link->doomed || link->kind == MLFAB__LINK_FREE) continue;
      link->doomed = 0;
      if (link->self) {
        node_lose_self(node);
      } else {
        mlfab__node_hang_up(node, i, "given up");
      }
    }
  }
}

/* --- greeting --- */

static void node_coordinator_hello(mlfab_node *node, uint32_t worker, int fresh) {
  mlfab__barrier_server_hello(&node->barriers, worker, fresh);
  mlfab__membership_hello(&node->roll, worker, node->server.peers[worker].incarnation,
                          node->now_ns);
  mlfab__reshard_hello(&node->reslice, worker, fresh);
}

/* The link from our server role to another one, or to itself, stands. */
static void node_across_up(mlfab_node *node, uint32_t server) {
  mlfab__reshard_server_up(&node->server, server);
  if (node->is_coordinator) mlfab__reshard_up(&node->reslice, server);
}

/* The worker role's link to server 0 stands. */
static void node_coordinator_greeted(mlfab_node *node) {
  mlfab__barrier_worker_hello(&node->barrier);
  mlfab__comm_hello(&node->comm);
}

/* The roles of this node greet each other, where they have links inside. */
static void node_greet_self(mlfab_node *node, int fresh) {
  uint32_t worker = (uint32_t)node->config.rank, server = node->server_number;
  mlfab__hello hello = {node->id,   node->incarnation,         node->config.roles,
                        0,          node->config.accumulators, node->config.host,
                        node->nonce};
  mlfab__hello_ack ack;
  node->self_lost = 0;
  if (node->pairs[MLFAB__PAIR_PEER][0] != MLFAB__NO_LINK) mlfab__peer_link_met_self(node);
  if (node->pairs[MLFAB__PAIR_RESHARD][0] != MLFAB__NO_LINK) node_across_up(node, server);
  if (node->pairs[MLFAB__PAIR_PLANNER][0] != MLFAB__NO_LINK) {
    mlfab__scheduler_hello(node->scheduler, server, node->now_ns);
    mlfab__server_scheduler_hello(&node->server, node->now_ns);
    mlfab__trees_scheduler(&node->trees, 1);
  }
  if (node->pairs[MLFAB__PAIR_SERVER][0] == MLFAB__NO_LINK) return;
  if (mlfab__server_hello(&node->server, worker, &hello, &ack, node->now_ns)) return;
  if (node->is_coordinator) node_coordinator_hello(node, worker, fresh);
  ack.was_dead = 0;
  mlfab__worker_hello(&node->worker, server, &ack, node->now_ns);
  if (server == 0) node_coordinator_greeted(node);
}

MLFAB__INTERNAL int mlfab__node_pair(mlfab_node *node, uint32_t which, int asking,
                                     uint32_t asking_peer, int other, uint32_t other_peer) {
  uint32_t up = node_new_link(node);
  if (up != MLFAB__NO_LINK) node->links[up].kind = (uint8_t)asking;
  uint32_t down = up == MLFAB__NO_LINK ? up : node_new_link(node);
  if (down == MLFAB__NO_LINK) {
    if (up != MLFAB__NO_LINK) node_free_link(node, up);
    return MLFAB_ERR_MEMORY;
  }
  node->links[down].kind = (uint8_t)other;
  for (uint32_t i = 0; i < 2; i++) {
    mlfab__link *link = &node->links[i ? down : up];
    link->self = link->greeted = 1;
    link->peer = i ? other_peer : asking_peer;
    link->caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_GHOST | MLFAB_CAP_CHECKED;
  }
  node->pairs[which][0] = up;
  node->pairs[which][1] = down;
  return 0;
}

/* The links inside this node, to its own server role. */
static void node_hello_self(mlfab_node *node) {
  uint32_t server = node->server_number, servers = node->config.servers;
  uint32_t worker = (uint32_t)node->config.rank;
  int code = 0;
  if (node->is_worker)
    code = mlfab__node_pair(node, MLFAB__PAIR_SERVER, MLFAB__LINK_SERVER, server,
                            MLFAB__LINK_WORKER, worker);
  if (!code && node->is_scheduler)
    code = mlfab__node_pair(node, MLFAB__PAIR_PLANNER, MLFAB__LINK_PLANNER, server,
                            MLFAB__LINK_SCHEDULER, node->config.workers);
  if (code) {
    mlfab__bootstrap_fail(node, code, MLFAB_NO_RANK, 0, "out of memory for the inner links");
    return;
  }
  for (uint32_t i = 0; i < 2; i++) {
    mlfab__route *route = &node->routes[i * servers + server];
    const uint32_t *pair = node->pairs[i ? MLFAB__PAIR_PLANNER : MLFAB__PAIR_SERVER];
    if (pair[0] == MLFAB__NO_LINK) continue;
    route->link = pair[0];
    route->greeted = 1;
    node->worker_links[i ? node->config.workers : worker] = pair[1];
  }
  node_greet_self(node, 1);
}

/* Does a role of this node use the route? */
static int node_uses(const mlfab_node *node, uint32_t route) {
  uint32_t servers = node->config.servers, server = mlfab__node_server_of(node, route);
  if (route < 2 * servers) return route < servers ? node->is_worker : node->is_scheduler;
  if (!node->is_server || server == node->server_number) return 0;
  return (node->is_coordinator && mlfab__reshard_busy(&node->reslice)) ||
         mlfab__reshard_server_wants(&node->server, server);
}

static void node_call(mlfab_node *node, uint32_t index) {
  mlfab__route *route = &node->routes[index];
  route->connecting = 1;
  route->connect_ns = node->now_ns;
  node_arm(node, MLFAB__TIMER_ROUTE, index, node->now_ns);
  mlfab__node_connect(node, MLFAB__TOKEN_SERVER + index);
}

MLFAB__INTERNAL void mlfab__node_greet(mlfab_node *node) {
  if (node->is_server) node_hello_self(node);
  for (uint32_t r = 0; r < mlfab__node_routes(node); r++) {
    if (!node_uses(node, r)) continue;
    node->routes[r].heard_ns = node->now_ns;
    if (mlfab__node_server_of(node, r) != node->server_number) node_call(node, r);
  }
}

/* Can this be the process of that node, by what this server was told? `server`: which one it is, or
 * MLFAB__NO_NODE. */
static int node_issued(const mlfab_node *node, const mlfab__hello *hello, uint32_t server) {
  if (node->is_coordinator) {
    const mlfab__peer *peer = &node->peers[hello->node];
    return peer->joined && hello->incarnation == peer->incarnation && hello->nonce == peer->nonce;
  }
  if (server == MLFAB__NO_NODE) return 1;
  const mlfab__route *route = &node->routes[server];
  if (route->incarnation == 0) return 1;
  /* Server 0 is never restarted; the others may have been since. */
  return hello->incarnation == route->incarnation
             ? hello->nonce == route->nonce
             : server > 0 && hello->incarnation > route->incarnation;
}

/* The scheduler says who it is on a new link to our server role. */
static void node_scheduler_hello(mlfab_node *node, uint32_t index, const mlfab__hello *hello,
                                 const mlfab__frame_in *frame) {
  uint32_t self = node->config.workers, old = node->worker_links[self];
  if (node->is_scheduler && !MLFAB__PLANTED(82)) {
    mlfab__node_refuse(node, index, MLFAB_ERR_RANK_TAKEN, 0, "the scheduler is beside server 0");
    return;
  }
  int own = node->config.scheduler == MLFAB_SCHEDULER_OWN;
  if (hello->node != (own ? node->nodes - 1 : mlfab__node_of_server(node, 0))) {
    mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                       "a HELLO of a node that is no scheduler");
    return;
  }
  if (hello->incarnation < node->scheduler_incarnation ||
      !node_issued(node, hello, own ? MLFAB__NO_NODE : 0)) {
    mlfab__node_refuse(node, index, MLFAB_ERR_FENCED, MLFAB_NO_RANK, "a newer scheduler is here");
    return;
  }
  if (!mlfab__node_claim(node, index, old, hello->nonce, frame)) return;
  if (old != MLFAB__NO_LINK && old != index)
    mlfab__node_hang_up(node, old, "replaced by a newer link");
  mlfab__link *link = &node->links[index];
  link->kind = MLFAB__LINK_SCHEDULER;
  link->peer = self;
  link->nonce = hello->nonce;
  link->greeted = 1;
  node->worker_links[self] = index;
  node->worker_heard[self] = node->now_ns;
  node->scheduler_incarnation = hello->incarnation;
  if (node->is_coordinator) node->peers[hello->node].awaited_ns = 0;
  mlfab__hello_ack ack;
  memset(&ack, 0, sizeof ack);
  ack.server = node->server_number;
  uint8_t meta[160];
  mlfab__node_post(node, index, MLFAB__HELLO_ACK, meta, mlfab__encode_hello_ack(meta, &ack));
  mlfab__server_scheduler_hello(&node->server, node->now_ns);
  if (node->is_coordinator) mlfab__trees_scheduler(&node->trees, 1);
  mlfab__node_emit(node, MLFAB_EVENT_SCHEDULER_BACK, 0, 0, hello->incarnation, 0,
                   "scheduler here: it plans from now on");
}

/* Another server says who it is on a new link to our server role. */
static void node_peer_hello(mlfab_node *node, uint32_t index, const mlfab__hello *hello,
                            const mlfab__frame_in *frame) {
  uint32_t first = mlfab__node_of_server(node, 0), server = hello->node - first;
  if (hello->node < first || server >= node->config.servers || server == node->server_number) {
    mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                       "a HELLO of a server that there is not");
    return;
  }
  if (!node_issued(node, hello, server)) {
    mlfab__node_refuse(node, index, MLFAB_ERR_FENCED, (int32_t)server,
                       "not the process that joined as this server");
    return;
  }
  uint32_t old = node->reshard_links[server];
  if (!mlfab__node_claim(node, index, old, hello->nonce, frame)) return;
  if (old != MLFAB__NO_LINK && old != index)
    mlfab__node_hang_up(node, old, "replaced by a newer link");
  mlfab__link *link = &node->links[index];
  link->kind = MLFAB__LINK_RESHARD_IN;
  link->peer = server;
  link->nonce = hello->nonce;
  link->greeted = 1;
  node->reshard_links[server] = index;
  mlfab__hello_ack ack;
  memset(&ack, 0, sizeof ack);
  ack.server = node->server_number;
  ack.model_stands = node->server.phase == MLFAB__MODEL_STANDS;
  ack.nonce = node->nonce;
  uint8_t meta[160];
  mlfab__node_post(node, index, MLFAB__HELLO_ACK, meta, mlfab__encode_hello_ack(meta, &ack));
}

/* A worker says who it is on a new link to our server role. */
static void node_hello(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  mlfab__hello hello;
  mlfab__hello_ack ack;
  int parsed = !mlfab__decode_hello(frame->meta, frame->meta_bytes, &hello) && node->is_server;
  if (parsed && hello.roles == MLFAB_ROLE_SCHEDULER && node->server.scheduled) {
    node_scheduler_hello(node, index, &hello, frame);
    return;
  }
  if (parsed && hello.roles == MLFAB_ROLE_SERVER) {
    node_peer_hello(node, index, &hello, frame);
    return;
  }
  if (!parsed || hello.node >= node->config.workers || hello.incarnation == 0) {
    mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                       "a HELLO that does not fit this node");
    return;
  }
  uint32_t worker = hello.node;
  if (node->is_worker && worker == (uint32_t)node->config.rank) {
    mlfab__node_refuse(node, index, MLFAB_ERR_RANK_TAKEN, (int32_t)worker,
                       "this worker is beside the server");
    return;
  }
  int fresh = hello.incarnation != node->server.peers[worker].incarnation;
  int fenced = hello.incarnation < node->server.peers[worker].incarnation ||
               !node_issued(node, &hello, MLFAB__NO_NODE);
  if (fenced) {
    mlfab__node_refuse(node, index, MLFAB_ERR_FENCED, (int32_t)worker,
                       "a newer process has this rank");
    return;
  }
  uint32_t old = node->worker_links[worker];
  if (!mlfab__node_claim(node, index, old, hello.nonce, frame)) return;
  if (old != MLFAB__NO_LINK && old != index) {
    mlfab__node_hang_up(node, old, "replaced by a newer link");
    node->stats.reconnects++;
  }
  mlfab__link *link = &node->links[index];
  link->kind = MLFAB__LINK_WORKER;
  link->peer = worker;
  link->nonce = hello.nonce;
  link->greeted = 1;
  node->worker_links[worker] = index;
  node->worker_heard[worker] = node->now_ns;
  node->worker_lost[worker] = 0;
  if (node->is_coordinator) node->peers[worker].awaited_ns = 0;
  int code = mlfab__server_hello(&node->server, worker, &hello, &ack, node->now_ns);
  if (code) {
    mlfab__node_refuse(node, index, code, (int32_t)worker, "refused");
    return;
  }
  uint8_t meta[160];
  mlfab__node_post(node, index, MLFAB__HELLO_ACK, meta, mlfab__encode_hello_ack(meta, &ack));
  if (node->is_coordinator) node_coordinator_hello(node, worker, fresh);
  if (fresh)
    mlfab__node_emit(node, MLFAB_EVENT_JOINED, (int32_t)worker, 0, hello.incarnation, 0, "joined");
}

/* --- frames --- */

/* Frames on our scheduler role's link to a server. */
static void node_planner_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  uint32_t server = node->links[index].peer, route = node->config.servers + server;
  mlfab__refuse refuse;
  mlfab__bye bye;
  char text[MLFAB__TEXT_MAX + 16];
  if (frame->type == MLFAB__HEARTBEAT) return;
  if (frame->type == MLFAB__HELLO_ACK) {
    node->links[index].greeted = node->routes[route].greeted = 1;
    mlfab__scheduler_hello(node->scheduler, server, node->now_ns);
    mlfab__bootstrap_check(node);
  } else if (frame->type == MLFAB__REFUSE &&
             !mlfab__decode_refuse(frame->meta, frame->meta_bytes, &refuse)) {
    snprintf(text, sizeof text, "refused: %s", refuse.text);
    node_server_dead(node, route, text);
    node_doom(node, index);
  } else if (frame->type == MLFAB__BYE &&
             !mlfab__decode_bye(frame->meta, frame->meta_bytes, &bye)) {
    if (bye.code == 0) node_server_dead(node, route, "it has closed");
    node_doom(node, index);
  } else {
    mlfab__scheduler_frame(node->scheduler, server, frame, node->now_ns);
  }
}

static void node_scheduler_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  node->worker_heard[node->config.workers] = node->now_ns;
  if (frame->type == MLFAB__HEARTBEAT) return;
  if (frame->type == MLFAB__BYE) {
    node_doom(node, index);
    return;
  }
  if (node->is_coordinator && mlfab__trees_scheduler_frame(&node->trees, frame)) return;
  mlfab__server_scheduler_frame(&node->server, frame, node->now_ns);
}

/* Frames on our server role's link to another server. */
static void node_across_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  uint32_t server = node->links[index].peer, route = 2 * node->config.servers + server;
  mlfab__hello_ack ack;
  mlfab__bye bye;
  if (frame->type == MLFAB__HEARTBEAT) return;
  if (frame->type == MLFAB__HELLO_ACK &&
      !mlfab__decode_hello_ack(frame->meta, frame->meta_bytes, &ack)) {
    node->links[index].greeted = node->routes[route].greeted = 1;
    node->links[index].nonce = ack.nonce;
    node_across_up(node, server);
    /* It has no model: a new process, which knows nothing of slices that move. */
    if (!ack.model_stands) mlfab__reshard_server_dead(&node->server, server);
  } else if (frame->type == MLFAB__REFUSE) {
    node_server_dead(node, route, "refused");
    node_doom(node, index);
  } else if (frame->type == MLFAB__BYE &&
             !mlfab__decode_bye(frame->meta, frame->meta_bytes, &bye)) {
    if (bye.code == 0) node_server_dead(node, route, "it has closed");
    node_doom(node, index);
  } else {
    node_port_drop(node, index, MLFAB_ERR_FRAME, "a frame that no server sends back");
  }
}

/* Frames of another server, or of our own, to our server role. */
static void node_peer_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  uint32_t from = node->links[index].peer;
  int code = 0;
  switch (frame->type) {
    case MLFAB__HEARTBEAT:
      break;
    case MLFAB__BYE:
      node_doom(node, index);
      break;
    case MLFAB__MOVE:
      code = from == 0 ? mlfab__reshard_server_move(&node->server, frame, node->now_ns)
                       : MLFAB_ERR_FRAME;
      break;
    case MLFAB__MOVED:
      code = node->is_coordinator ? mlfab__reshard_moved(&node->reslice, from, frame)
                                  : mlfab__reshard_server_told(&node->server, from, frame);
      break;
    default:
      code = mlfab__reshard_server_frame(&node->server, from, frame);
  }
  if (code) node_port_drop(node, index, code, "a frame that no server sends, or out of place");
}

static void node_server_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  uint32_t server = node->links[index].peer;
  mlfab__hello_ack ack;
  mlfab__refuse refuse;
  mlfab__bye bye;
  mlfab__member member;
  char text[MLFAB__TEXT_MAX + 64];
  switch (frame->type) {
    case MLFAB__HEARTBEAT:
      return;
    case MLFAB__HELLO_ACK:
      if (mlfab__decode_hello_ack(frame->meta, frame->meta_bytes, &ack)) break;
      if (mlfab__worker_usurped(&node->worker, server, ack.top)) {
        node_server_dead(node, server,
                         "it has updates of this worker that it never sent: another "
                         "process uses its rank");
        node_doom(node, index);
        return;
      }
      node->links[index].greeted = 1;
      node->routes[server].greeted = 1;
      if (node->worker.stands && !ack.model_stands)
        snprintf(node->routes[server].died, sizeof node->routes[server].died,
                 "it has restarted without the model");
      mlfab__worker_hello(&node->worker, server, &ack, node->now_ns);
      if (server == 0 && ack.was_dead < 2) node_coordinator_greeted(node);
      mlfab__bootstrap_check(node);
      return;
    case MLFAB__REFUSE:
      if (mlfab__decode_refuse(frame->meta, frame->meta_bytes, &refuse)) break;
      snprintf(text, sizeof text, "refused: %s", refuse.text);
      node_server_dead(node, server, text);
      node_doom(node, index);
      return;
    case MLFAB__BYE:
      if (mlfab__decode_bye(frame->meta, frame->meta_bytes, &bye)) break;
      /* Closing for good ends the server for us; being given up for an error does not: we call
       * again. */
      if (bye.code == 0) node_server_dead(node, server, "it has closed");
      snprintf(node->routes[server].why, sizeof node->routes[server].why, "%.127s", bye.text);
      node_doom(node, index);
      return;
    case MLFAB__MEMBER:
      if (mlfab__decode_member(frame->meta, frame->meta_bytes, &member)) break;
      if (node->is_server) return; /* we see it ourselves */
      mlfab__node_emit(
          node, member.kind, (int32_t)member.node, 0, member.incarnation,
          member.kind == MLFAB_EVENT_DEAD ? MLFAB_ERR_PEER_DEAD : 0,
          member.kind == MLFAB_EVENT_DEAD ? "dead, says server 0" : "left or came, says server 0");
      return;
    case MLFAB__THERE:
      if (mlfab__decode_member(frame->meta, frame->meta_bytes, &member)) break;
      mlfab__peer_link_there(node, &member);
      return;
    default:
      if (node->aggregator.env &&
          mlfab__aggregator_server_frame(&node->aggregator, server, frame, node->now_ns))
        return;
      if (server == 0 && (mlfab__barrier_worker_frame(&node->barrier, frame, node->now_ns) ||
                          mlfab__comm_server_frame(&node->comm, frame, node->now_ns)))
        return;
      mlfab__worker_frame(&node->worker, server, frame, node->now_ns);
      return;
  }
  node_port_drop(node, index, MLFAB_ERR_FRAME, "a frame that does not parse");
}

static void node_worker_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  uint32_t worker = node->links[index].peer;
  node->worker_heard[worker] = node->now_ns;
  if (frame->type == MLFAB__HEARTBEAT) return;
  if (frame->type == MLFAB__BYE) {
    node_worker_gone(node, worker, 1);
    node_doom(node, index);
    return;
  }
  if (node->is_coordinator && frame->type == MLFAB__WHERE) {
    if (mlfab__peer_link_where(node, index, frame))
      node_port_drop(node, index, MLFAB_ERR_FRAME, "a WHERE that does not parse");
    return;
  }
  if (node->is_coordinator && (mlfab__barrier_server_frame(&node->barriers, worker, frame) ||
                               mlfab__trees_frame(&node->trees, worker, frame, node->now_ns) ||
                               mlfab__membership_frame(&node->roll, worker, frame, node->now_ns)))
    return;
  int stands = node->server.phase == MLFAB__MODEL_STANDS;
  if (node->is_coordinator &&
      mlfab__reshard_frame(&node->reslice, worker, frame, stands, node->now_ns))
    return;
  mlfab__server_frame(&node->server, worker, frame, node->now_ns);
  if (frame->type == MLFAB__DONE && node->is_coordinator) {
    mlfab__barrier_server_done(&node->barriers, worker);
    mlfab__membership_done(&node->roll, worker, node->now_ns);
  }
}

/* Frames between workers. */
static void node_hop_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  const mlfab__link *link = &node->links[index];
  mlfab__bye bye;
  if (frame->type == MLFAB__BYE && !mlfab__decode_bye(frame->meta, frame->meta_bytes, &bye) &&
      bye.code == 0)
    mlfab__stream_parted(&node->comm.streams, link->peer);
  if (frame->type == MLFAB__BYE || frame->type == MLFAB__REFUSE) node_doom(node, index);
  if (frame->type == MLFAB__HEARTBEAT || link->doomed) return;
  if (link->kind == MLFAB__LINK_PEER) {
    if (mlfab__comm_hop_frame(&node->comm, link->peer, frame, node->now_ns)) return;
    mlfab__worker_hop_frame(&node->worker, link->peer, frame, node->now_ns);
  } else if (!mlfab__comm_member_frame(&node->comm, link->peer, frame, node->now_ns)) {
    if (node->aggregator.env) {
      mlfab__aggregator_member_frame(&node->aggregator, link->peer, frame, node->now_ns);
    } else {
      node_port_drop(node, index, MLFAB_ERR_FRAME, "a frame for an aggregator");
    }
  }
}

static void node_dispatch(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  mlfab__link *link = &node->links[index];
  link->heard_ns = node->now_ns;
  link->suspect = 0;
  if (link->closing) { /* nothing counts any more but that the peer leaves too */
    if (frame->type == MLFAB__BYE) node_doom(node, index);
    return;
  }
  if (frame->type == MLFAB__HEARTBEAT && link->kind != MLFAB__LINK_NEW &&
      link->kind != MLFAB__LINK_CLAIM)
    node_beat(node, index, frame);
  switch (link->kind) {
    case MLFAB__LINK_SERVER:
      node->routes[link->peer].heard_ns = node->now_ns;
      node_server_frame(node, index, frame);
      break;
    case MLFAB__LINK_WORKER:
      node_worker_frame(node, index, frame);
      break;
    case MLFAB__LINK_PLANNER:
      node->routes[node->config.servers + link->peer].heard_ns = node->now_ns;
      node_planner_frame(node, index, frame);
      break;
    case MLFAB__LINK_SCHEDULER:
      node_scheduler_frame(node, index, frame);
      break;
    case MLFAB__LINK_PEER:
    case MLFAB__LINK_PEER_IN:
      node_hop_frame(node, index, frame);
      break;
    case MLFAB__LINK_RESHARD:
      node->routes[2 * node->config.servers + link->peer].heard_ns = node->now_ns;
      node_across_frame(node, index, frame);
      break;
    case MLFAB__LINK_RESHARD_IN:
      node_peer_frame(node, index, frame);
      break;
    case MLFAB__LINK_NEW:
      if (frame->type == MLFAB__MEET) {
        mlfab__peer_link_meet(node, index, frame);
      } else if (frame->type == MLFAB__HELLO) {
        node_hello(node, index, frame);
      } else if (frame->type == MLFAB__JOIN) {
        mlfab__bootstrap_frame(node, index, frame);
      } else {
        mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                           "neither JOIN, HELLO nor MEET came first");
      }
      break;
    case MLFAB__LINK_CLAIM:
      if (frame->type == MLFAB__HEARTBEAT) break;
      node_unclaim(node, link);
      mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                         "a frame before its number was settled");
      break;
    case MLFAB__LINK_JOIN_IN:
    case MLFAB__LINK_JOIN_OUT:
      if (frame->type != MLFAB__HEARTBEAT && frame->type != MLFAB__BYE)
        mlfab__bootstrap_frame(node, index, frame);
      break;
    default:
      break;
  }
}

/* Why the sender of a link's first frame is no member of this job; NULL when it is one. How long it
 * takes does not depend on how much of the secret is right. */
static const char *node_strange(const mlfab_node *node, const mlfab__header *header) {
  uint64_t differ = (header->tag[0] ^ node->secret[0]) | (header->tag[1] ^ node->secret[1]);
  if (differ && !(node->secret[0] | node->secret[1]))
    return "the caller has a secret, and this job has none (MLFAB_JOB_SECRET)";
  if (differ && !(header->tag[0] | header->tag[1]))
    return "this job has a secret, and the caller has none (MLFAB_JOB_SECRET)";
  if (differ && !MLFAB__PLANTED(83))
    return "the caller's secret is not this job's (MLFAB_JOB_SECRET)";
  return header->job != node->job ? "the jobs have different names (MLFAB_JOB)" : NULL;
}

/* Refuses it; the first ones, and ever fewer of the later ones, are worth a warning. */
static void node_turn_away(mlfab_node *node, uint32_t index, const char *why) {
  uint64_t n = ++node->stats.strangers_refused;
  node->strange = why;
  if ((n & (n - 1)) == 0)
    mlfab__log(&node->env, MLFAB_LOG_WARN, "a stranger was refused (%llu so far): %s",
               (unsigned long long)n, why);
  mlfab__node_refuse(node, index, MLFAB_ERR_JOB, MLFAB_NO_RANK, why);
}

/* A frame from outside: checked, then handed on. */
static void node_frame(mlfab_node *node, uint32_t index, const mlfab_io_event *event) {
  mlfab__link *link = &node->links[index];
  uint32_t head_bytes = event->head_bytes, bulk_bytes = event->bulk_bytes;
  int code = 0;
  if (!(link->caps & MLFAB_CAP_CHECKED)) {
    code = head_bytes < MLFAB_HEADER_BYTES
               ? MLFAB_ERR_FRAME
               : mlfab_frame_check(event->head, &head_bytes, &bulk_bytes);
    if (!code && (head_bytes != event->head_bytes || bulk_bytes != event->bulk_bytes))
      code = MLFAB_ERR_FRAME;
    if (!code) code = mlfab_frame_verify(event->head, head_bytes, event->bulk, bulk_bytes);
  }
  if (code) {
    node_port_drop(node, index, code, mlfab_error_text(code));
    return;
  }
  mlfab__header header;
  mlfab__wire_open(event->head, &header);
  node->stats.frames_received++;
  node->stats.bytes_received += (uint64_t)head_bytes + bulk_bytes;
  node->stats.payload_received += bulk_bytes;
  node->stats.trace_hash =
      mlfab__mix(node->stats.trace_hash ^ node->now_ns ^ ((uint64_t)header.type << 56) ^
                 ((uint64_t)header.sender << 32) ^ head_bytes ^ ((uint64_t)bulk_bytes << 20));
  /* Whoever turns us away does not say which job it is of. */
  int last = header.type == MLFAB__REFUSE || header.type == MLFAB__BYE;
  const char *strange = link->kind == MLFAB__LINK_NEW      ? node_strange(node, &header)
                        : header.job != node->job && !last ? "a frame of another job"
                                                           : NULL;
  if (strange) {
    node_turn_away(node, index, strange);
    return;
  }
  mlfab__frame_in frame = {header.type, header.meta_bytes, bulk_bytes,
                           (const uint8_t *)event->head + MLFAB_HEADER_BYTES, event->bulk};
  node_dispatch(node, index, &frame);
}

/* --- the inner link --- */

static int node_yield(mlfab_node *node, uint32_t index);
static void node_taken(mlfab_node *node);

/* A bulk that was lent inside the node is free at once. */
static void node_sent_self(mlfab_node *node, int role, uint64_t token) {
  uint32_t rank = (uint32_t)node->config.rank;
  if (role == MLFAB__OUT_WORKER)
    mlfab__worker_sent(&node->worker, node->server_number, token, node->now_ns);
  if (role == MLFAB__OUT_SERVER) mlfab__server_sent(&node->server, rank, token);
  if (role == MLFAB__OUT_HOP) mlfab__worker_hop_sent(&node->worker, rank, token, node->now_ns);
  if (role == MLFAB__OUT_FORWARD || role == MLFAB__OUT_HAND_ON)
    mlfab__aggregator_sent(&node->aggregator, token);
}

/* Moves one frame over a link inside the node. 1 when there was one. */
static int node_carry(mlfab_node *node, uint32_t from, uint32_t to) {
  if (!node_yield(node, from)) return 0;
  /* The sender's state moves first: what the receiver answers may depend on it. The frame's
   * meta stays in node->head, which nothing overwrites before the next yield. */
  mlfab__frame_in frame = {node->frame.type, node->frame.meta_bytes, node->frame.bulk_bytes,
                           node->head + MLFAB_HEADER_BYTES, node->frame.bulk};
  uint64_t token = node->frame.token;
  int role = (int)node->out;
  node_taken(node);
  node_dispatch(node, to, &frame);
  if (token != 0) node_sent_self(node, role, token);
  return 1;
}

/* Carries what the roles of this node have for each other. */
static void node_run_self(mlfab_node *node) {
  if (node->out != MLFAB__OUT_NONE) return;
  int budget = 256;
  for (int moved = 1; moved && budget > 0;) {
    moved = 0;
    for (int i = 0; i < 2 * MLFAB__PAIRS; i++) {
      const uint32_t *pair = node->pairs[i / 2];
      while (pair[0] != MLFAB__NO_LINK && budget-- > 0 &&
             node_carry(node, pair[i % 2], pair[1 - i % 2]))
        moved = 1;
    }
  }
  /* No event tells of what is left: the next tick is due at once. */
  node->self_more = budget <= 0;
}

static void node_part(mlfab_node *node);
static int node_waits(const mlfab_node *node);

/* The last error names a server that "is dead": says what it died of, too. */
static void node_say_why(mlfab_node *node) {
  static const char dead[] = "is dead";
  mlfab_error *last = &node->requests.last;
  if (MLFAB__LIKELY(last->code != MLFAB_ERR_PEER_DEAD)) return;
  size_t n = strlen(last->text), end = sizeof dead - 1;
  if (!last->is_server || n < end || last->rank < 0 ||
      (uint32_t)last->rank >= node->config.servers || strcmp(last->text + n - end, dead) != 0)
    return;
  const char *why = node->routes[last->rank].died;
  if (why[0]) snprintf(last->text + n, sizeof last->text - n, ": %s", why);
}

/* After everything that may have changed something. */
static void node_epilogue(mlfab_node *node) {
  if (node->aggregator.env && node->layout_epoch != node->worker.epoch && node->worker.stands) {
    node->layout_epoch = node->worker.epoch;
    mlfab__aggregator_model(&node->aggregator, &node->worker.layout,
                            node->worker.define.options.ghost != 0);
  }
  if (node->is_server) mlfab__reshard_server_check(&node->server);
  node_settle(node);
  node_claims_again(node);
  node_run_self(node);
  if (node->parting) node_part(node);
  if (!mlfab__heap_has(&node->timers, node_timer(node, MLFAB__TIMER_SCAN, 0)) && node_waits(node))
    node_arm(node, MLFAB__TIMER_SCAN, 0, node->now_ns);
  node_say_why(node);
}

/* --- events --- */

/* A call to a server, or to an aggregator, came to nothing. */
static void node_call_failed(mlfab_node *node, uint64_t index, const char *why) {
  if (index >= mlfab__node_routes(node)) {
    mlfab__peer_link_failed(node, index - mlfab__node_routes(node));
    return;
  }
  mlfab__route *route = &node->routes[index];
  route->connecting = 0;
  route->retry_ns = node->now_ns + mlfab__node_beat(node) / 5;
  snprintf(route->why, sizeof route->why, "%s", why);
}

/* A server answers our call: says who we are. */
static void node_route_up(mlfab_node *node, uint32_t number, uint32_t index) {
  mlfab__route *route = &node->routes[number];
  uint32_t role = number / node->config.servers;
  static const uint8_t kinds[] = {MLFAB__LINK_SERVER, MLFAB__LINK_PLANNER, MLFAB__LINK_RESHARD};
  const uint32_t roles[] = {node->config.roles, MLFAB_ROLE_SCHEDULER, MLFAB_ROLE_SERVER};
  if (route->link != MLFAB__NO_LINK)
    mlfab__node_hang_up(node, route->link, "replaced by a newer link");
  route->connecting = 0;
  route->link = index;
  if (route->greeted) node->stats.reconnects++;
  mlfab__link *link = &node->links[index];
  link->kind = kinds[role];
  link->peer = mlfab__node_server_of(node, number);
  mlfab__hello hello = {node->id,
                        node->incarnation,
                        roles[role],
                        node->config.progress == MLFAB_PROGRESS_HAND,
                        node->config.accumulators,
                        node->config.host,
                        node->nonce};
  uint8_t meta[64];
  mlfab__node_post(node, index, MLFAB__HELLO, meta, mlfab__encode_hello(meta, &hello));
}

/* Somebody called: of those whom no role knows yet the oldest goes when there are too many. All members may
 * call at the same time. */
static void node_bound_strangers(mlfab_node *node) {
  uint32_t count = 0, oldest = MLFAB__NO_LINK, most = node->nodes + NODE_STRANGERS;
  for (uint32_t i = 0; node->by_id.count > most && i < node->nlinks; i++) {
    const mlfab__link *link = &node->links[i];
    if (!link->called || link->greeted || link->kind == MLFAB__LINK_JOIN_IN) continue;
    count++;
    if (oldest == MLFAB__NO_LINK || link->since_ns < node->links[oldest].since_ns) oldest = i;
  }
  if (count <= most || MLFAB__PLANTED(87)) return;
  node->stats.strangers_refused++;
  mlfab__node_hang_up(node, oldest, "was no member yet, and went for a newer connection");
}

static void node_up(mlfab_node *node, const mlfab_io_event *event) {
  uint32_t index = node_new_link(node);
  if (index == MLFAB__NO_LINK || mlfab__map_put(&node->env, &node->by_id, event->link, index)) {
    node_act(node, MLFAB_ACTION_DISCONNECT, event->link, 0);
    if (event->token == MLFAB__TOKEN_JOIN) mlfab__bootstrap_down(node, "out of memory");
    if (event->token >= MLFAB__TOKEN_SERVER)
      node_call_failed(node, event->token - MLFAB__TOKEN_SERVER, "out of memory");
    return;
  }
  mlfab__link *link = &node->links[index];
  link->kind = MLFAB__LINK_NEW;
  link->id = event->link;
  link->caps = event->caps;
  link->called = event->token == 0;
  link->heard_ns = link->sent_ns = link->since_ns = node->now_ns;
  node_arm(node, MLFAB__TIMER_LINK, index, node->now_ns);
  if (link->called) node_bound_strangers(node);
  if (event->token == MLFAB__TOKEN_JOIN && node->phase == MLFAB__BOOTSTRAP_JOINING) {
    mlfab__bootstrap_up(node, index);
  } else if (event->token >= MLFAB__TOKEN_SERVER &&
             event->token - MLFAB__TOKEN_SERVER < mlfab__node_routes(node)) {
    node_route_up(node, (uint32_t)(event->token - MLFAB__TOKEN_SERVER), index);
  } else if (event->token >= MLFAB__TOKEN_SERVER &&
             mlfab__peer_link_up(
                 node, event->token - MLFAB__TOKEN_SERVER - mlfab__node_routes(node), index)) {
    return;
  } else if (event->token != 0) {
    mlfab__node_hang_up(node, index, "no longer wanted");
  }
}

static void node_cannot_dial(mlfab_node *node, int code) {
  char text[MLFAB__TEXT_MAX + 128];
  snprintf(text, sizeof text, "joining: cannot dial server 0 at %s: %s", node->config.coordinator,
           mlfab_error_text(code));
  mlfab__bootstrap_fail(node, code, 0, 1, text);
}

static void node_down(mlfab_node *node, const mlfab_io_event *event) {
  uint32_t index;
  const char *why = event->text ? event->text : mlfab_error_text(event->code);
  if (event->code == MLFAB_ERR_FRAME || event->code == MLFAB_ERR_CRC ||
      event->code == MLFAB_ERR_LIMIT || event->code == MLFAB_ERR_PROTOCOL_OLDER ||
      event->code == MLFAB_ERR_PROTOCOL_NEWER) {
    node->stats.frames_refused++;
  }
  if (event->link != 0) {
    if (!node_link(node, event->link, &index)) return;
    int joining = node->links[index].kind == MLFAB__LINK_JOIN_OUT;
    node_link_down(node, index, why);
    if (joining &&
        (event->code == MLFAB_ERR_PROTOCOL_OLDER || event->code == MLFAB_ERR_PROTOCOL_NEWER)) {
      mlfab__bootstrap_fail(node, event->code, 0, 1, why);
    }
    return;
  }
  if (event->token == MLFAB__TOKEN_JOIN) {
    mlfab__bootstrap_down(node, why);
    if (event->code == MLFAB_ERR_INSECURE) node_cannot_dial(node, event->code);
  }
  if (event->token >= MLFAB__TOKEN_SERVER)
    node_call_failed(node, event->token - MLFAB__TOKEN_SERVER, why);
}

/* The bulk lent with this token came back from a transport. */
static void node_sent(mlfab_node *node, const mlfab__link *link, uint64_t token) {
  int forward = (token & MLFAB__AGGREGATOR_TOKEN) != 0, hop = link->kind == MLFAB__LINK_PEER;
  if (hop && mlfab__stream_sent(&node->comm.streams, link->peer, token)) return;
  if (link->kind == MLFAB__LINK_PEER_IN || (link->kind == MLFAB__LINK_SERVER && forward))
    mlfab__aggregator_sent(&node->aggregator, token);
  if (link->kind == MLFAB__LINK_SERVER && !forward)
    mlfab__worker_sent(&node->worker, link->peer, token, node->now_ns);
  if (hop) mlfab__worker_hop_sent(&node->worker, link->peer, token, node->now_ns);
  if (link->kind == MLFAB__LINK_WORKER) mlfab__server_sent(&node->server, link->peer, token);
}

/* Notes what this host's links carry, and tells the scheduler when it has changed; `anew`: in any
 * case. */
static void node_tell_capacity(mlfab_node *node, int anew) {
  mlfab__capacity capacity = {node->config.host, -1.0, -1.0};
  uint8_t meta[32];
  if (node->phase != MLFAB__BOOTSTRAP_READY) return;
  int changed = mlfab__monitor_take(&node->monitor, node->now_ns, &capacity.in, &capacity.out);
  node->stats.link_in = capacity.in > 0.0 ? (uint64_t)capacity.in : 0;
  node->stats.link_out = capacity.out > 0.0 ? (uint64_t)capacity.out : 0;
  node->comm.link_in = capacity.in > 0.0 ? capacity.in : 0.0;
  node->comm.link_out = capacity.out > 0.0 ? capacity.out : 0.0;
  if (node->config.scheduler == MLFAB_SCHEDULER_NONE || (!changed && !anew)) return;
  uint32_t bytes = mlfab__encode_capacity(meta, &capacity);
  if (node->is_server) {
    mlfab__server_capacity(&node->server, &capacity, node->now_ns);
  } else if (node->is_worker) {
    mlfab__node_post(node, node->routes[0].link, MLFAB__CAPACITY, meta, bytes);
  }
}

MLFAB_API void mlfab_node_event(mlfab_node *node, const mlfab_io_event *event, uint64_t now_ns) {
  uint32_t index;
  if (!node || !event) return;
  node->now_ns = mlfab__max(node->now_ns, now_ns);
  switch (event->kind) {
    case MLFAB_IO_UP:
      node_up(node, event);
      break;
    case MLFAB_IO_DOWN:
      node_down(node, event);
      break;
    case MLFAB_IO_FRAME:
      if (node_link(node, event->link, &index) &&
          (!node->links[index].closing || node->links[index].lingers))
        node_frame(node, index, event);
      break;
    case MLFAB_IO_SENT:
      if (!node_link(node, event->link, &index)) break;
      node_sent(node, &node->links[index], event->token);
      break;
    case MLFAB_IO_MEASURED:
      if (event->measure) mlfab__monitor_sample(&node->monitor, event->measure, node->now_ns);
      node_tell_capacity(node, 0);
      break;
    case MLFAB_IO_WRITABLE:
      if (!node_link(node, event->link, &index)) break;
      node->links[index].blocked = 0;
      mlfab__node_ready_link(node, index);
      break;
    case MLFAB_IO_REFUSED:
      node->stats.strangers_refused++;
      mlfab__log(&node->env, MLFAB_LOG_INFO, "a stranger was turned away: %s",
                 event->text ? event->text : mlfab_error_text(event->code));
      break;
    default:
      break;
  }
  node_epilogue(node);
}

/* --- actions --- */

/* What a link between workers carries: the communicator takes turns with the others. */
static int node_yield_hop(mlfab_node *node, const mlfab__link *link) {
  mlfab__frame_out *frame = &node->frame;
  int out = MLFAB__OUT_NONE;
  if (link->kind == MLFAB__LINK_PEER) {
    mlfab__streams *streams = &node->comm.streams;
    if (!link->collective && mlfab__stream_next(streams, link->peer, frame)) {
      out = MLFAB__OUT_COLLECTIVE;
    } else if (mlfab__worker_hop_next(&node->worker, link->peer, frame)) {
      out = MLFAB__OUT_HOP;
    } else if (link->collective && mlfab__stream_next(streams, link->peer, frame)) {
      out = MLFAB__OUT_COLLECTIVE;
    }
  } else if (node->aggregator.env &&
             mlfab__aggregator_next_down(&node->aggregator, link->peer, frame)) {
    out = MLFAB__OUT_HAND_ON;
  }
  if (out == MLFAB__OUT_NONE) return 0;
  node->out = out;
  return 1;
}

/* Fills node->frame with what this link is to send next; the meta lies in node->head. 1, or 0. */
static int node_yield(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  mlfab__frame_out *frame = &node->frame;
  memset(frame, 0, sizeof *frame);
  frame->meta = node->head + MLFAB_HEADER_BYTES;
  node->out_link = index;
  if (link->queue_begin < link->queue_end) {
    uint32_t head[2];
    memcpy(head, link->queue + link->queue_begin, 8);
    frame->meta_bytes = head[0];
    frame->type = (uint8_t)head[1];
    memcpy(frame->meta, link->queue + link->queue_begin + 8, head[0]);
    node->out = MLFAB__OUT_CONTROL;
    return 1;
  }
  if (link->kind == MLFAB__LINK_JOIN_IN && link->welcome) {
    mlfab__welcome welcome = {node->peers[link->peer].incarnation, node->welcome_count};
    frame->type = MLFAB__WELCOME;
    frame->meta_bytes = mlfab__encode_welcome(frame->meta, &welcome);
    frame->bulk = node->welcome;
    frame->bulk_bytes = node->welcome_bytes;
    node->out = MLFAB__OUT_WELCOME;
    return 1;
  }
  if (!link->greeted || link->closing) return 0;
  if (link->kind == MLFAB__LINK_SERVER) {
    if (node->aggregator.env && mlfab__aggregator_next_up(&node->aggregator, link->peer, frame)) {
      node->out = MLFAB__OUT_FORWARD;
      return 1;
    }
    if (mlfab__worker_next(&node->worker, link->peer, frame)) {
      node->out = MLFAB__OUT_WORKER;
      return 1;
    }
  }
  if (link->kind == MLFAB__LINK_PEER || link->kind == MLFAB__LINK_PEER_IN)
    return node_yield_hop(node, link);
  if (link->kind == MLFAB__LINK_RESHARD &&
      mlfab__reshard_server_next(&node->server, link->peer, frame)) {
    node->out = MLFAB__OUT_SHIFT;
    return 1;
  }
  if (link->kind == MLFAB__LINK_WORKER) {
    if (mlfab__server_next(&node->server, link->peer, frame, node->now_ns)) {
      node->out = MLFAB__OUT_SERVER;
      return 1;
    }
  }
  return 0;
}

/* The yielded frame was taken: the state of whoever yielded it moves on. */
static void node_taken(mlfab_node *node) {
  mlfab__link *link = &node->links[node->out_link];
  const mlfab__frame_out *frame = &node->frame;
  if (node->out != MLFAB__OUT_CONTROL) link->collective = node->out == MLFAB__OUT_COLLECTIVE;
  switch (node->out) {
    case MLFAB__OUT_CONTROL:
      link->queue_begin += (frame->meta_bytes + 7) / 8 * 8 + 8;
      if (link->queue_begin == link->queue_end) link->queue_begin = link->queue_end = 0;
      break;
    case MLFAB__OUT_WELCOME:
      link->welcome = 0;
      break;
    case MLFAB__OUT_WORKER:
      mlfab__worker_taken(&node->worker, link->peer, frame);
      break;
    case MLFAB__OUT_SERVER:
      mlfab__server_taken(&node->server, link->peer, frame, node->now_ns);
      break;
    case MLFAB__OUT_HOP:
      mlfab__worker_hop_taken(&node->worker, link->peer, frame);
      break;
    case MLFAB__OUT_FORWARD:
      mlfab__aggregator_taken_up(&node->aggregator, link->peer, frame);
      break;
    case MLFAB__OUT_HAND_ON:
      mlfab__aggregator_taken_down(&node->aggregator, link->peer, frame);
      break;
    case MLFAB__OUT_SHIFT:
      mlfab__reshard_server_taken(&node->server, link->peer, frame);
      break;
    case MLFAB__OUT_COLLECTIVE:
      mlfab__stream_taken(&node->comm.streams, link->peer, frame);
      break;
    default:
      break;
  }
  node->out = MLFAB__OUT_NONE;
}

/* The action that is first in the queue. */
static void node_next_action(mlfab_node *node, mlfab_action *action) {
  const mlfab__queued_action *queued = &node->actions[node->actions_begin];
  memset(action, 0, sizeof *action);
  action->kind = queued->kind;
  action->link = queued->link;
  action->token = queued->token;
  if (queued->kind == MLFAB_ACTION_CONNECT) {
    uint64_t called = queued->token - MLFAB__TOKEN_SERVER, routes = mlfab__node_routes(node);
    if (queued->token == MLFAB__TOKEN_JOIN) {
      action->address = node->config.coordinator;
    } else {
      action->address = called < routes ? node->routes[called].addresses
                                        : node->peers_out[called - routes]->addresses;
    }
  }
  node->out = MLFAB__OUT_ACTION;
}

static void node_seal(mlfab_node *node, const mlfab__link *link, mlfab_action *action) {
  const mlfab__frame_out *frame = &node->frame;
  mlfab__header header;
  memset(&header, 0, sizeof header);
  header.type = frame->type;
  header.meta_bytes = frame->meta_bytes;
  header.bulk_bytes = frame->bulk_bytes;
  if (link->kind != MLFAB__LINK_NEW && link->kind != MLFAB__LINK_CLAIM) {
    header.job = node->job;
    header.epoch = node->epoch;
    header.sender = node->id;
    header.incarnation = node->incarnation;
    memcpy(header.tag, node->secret, sizeof header.tag);
  }
  if (frame->bulk && !(link->caps & MLFAB_CAP_RELIABLE) && !node->config.no_payload_crc)
    header.flags = MLFAB__WIRE_BULK_CRC;
  mlfab__wire_seal(node->head, &header, frame->bulk);
  memset(action, 0, sizeof *action);
  action->kind = MLFAB_ACTION_SEND;
  action->link = link->id;
  action->head = node->head;
  action->head_bytes = MLFAB_HEADER_BYTES + frame->meta_bytes;
  action->bulk = frame->bulk;
  action->bulk_bytes = frame->bulk_bytes;
  action->token = frame->token;
}

/* The first link of the ring leaves it. */
static void node_unlist(mlfab_node *node, uint32_t index) {
  node->ready_begin = (node->ready_begin + 1) % node->nlinks;
  node->ready_count--;
  node->links[index].listed = 0;
  if (node->links[index].kind == MLFAB__LINK_FREE && index < node->first_free)
    node->first_free = index;
}

MLFAB_API int mlfab_node_next(mlfab_node *node, uint64_t now_ns, mlfab_action *action_p) {
  if (!node || !action_p) return 0;
  node->now_ns = mlfab__max(node->now_ns, now_ns);
  if (node->out != MLFAB__OUT_NONE) {
    *action_p = node->action;
    return 1;
  }
  if (node->actions_count > 0) {
    node_next_action(node, &node->action);
    *action_p = node->action;
    return 1;
  }
  while (node->ready_count > 0) {
    uint32_t index = node->ready[node->ready_begin];
    mlfab__link *link = &node->links[index];
    if (link->kind != MLFAB__LINK_FREE && !link->self && !link->blocked &&
        node_yield(node, index)) {
      node_seal(node, link, &node->action);
      *action_p = node->action;
      return 1;
    }
    node_unlist(node, index);
    if (link->kind != MLFAB__LINK_FREE && link->closing && !link->lingers && !link->blocked)
      mlfab__node_hang_up(node, index, "closed");
    if (node->actions_count > 0) return mlfab_node_next(node, now_ns, action_p);
  }
  if (node->is_worker) mlfab__comm_sweep(&node->comm);
  return 0;
}

/* The first link of the ring goes to its end. */
static void node_rotate(mlfab_node *node) {
  uint32_t index = node->ready[node->ready_begin];
  node->ready_begin = (node->ready_begin + 1) % node->nlinks;
  node->ready[(node->ready_begin + node->ready_count - 1) % node->nlinks] = index;
}

static void node_probed(mlfab_node *node, uint32_t index, int status);

static void node_done_action(mlfab_node *node, int status) {
  mlfab__queued_action queued = node->actions[node->actions_begin];
  node->actions_begin = (node->actions_begin + 1) % node->actions_room;
  node->actions_count--;
  node->out = MLFAB__OUT_NONE;
  uint32_t index;
  if (queued.kind == MLFAB_ACTION_PROBE && node_link(node, queued.link, &index))
    node_probed(node, index, status);
  if (status == 0) return;
  if (queued.kind == MLFAB_ACTION_CONNECT) {
    mlfab_io_event event;
    memset(&event, 0, sizeof event);
    event.token = queued.token;
    event.code = status;
    node_down(node, &event);
    if (queued.token == MLFAB__TOKEN_JOIN && status == MLFAB_ERR_ADDRESS)
      node_cannot_dial(node, status);
  } else if (queued.kind == MLFAB_ACTION_DETACH && node_link(node, queued.link, &index)) {
    /* No memory to copy to: giving up the link gives the buffer back. */
    mlfab__node_hang_up(node, index, "out of memory");
  }
}

MLFAB_API void mlfab_node_done(mlfab_node *node, const mlfab_action *action, int status,
                               uint64_t now_ns) {
  if (!node || !action || node->out == MLFAB__OUT_NONE) return;
  node->now_ns = mlfab__max(node->now_ns, now_ns);
  if (node->out == MLFAB__OUT_ACTION) {
    node_done_action(node, status);
    node_epilogue(node);
    return;
  }
  uint32_t index = node->out_link;
  mlfab__link *link = &node->links[index];
  if (status == 0) {
    node->stats.frames_sent++;
    node->stats.bytes_sent += (uint64_t)action->head_bytes + action->bulk_bytes;
    node->stats.payload_sent += action->bulk_bytes;
    node->stats.trace_hash =
        mlfab__mix(node->stats.trace_hash ^ node->now_ns ^ ((uint64_t)node->frame.type << 48) ^
                   ((uint64_t)action->bulk_bytes << 8));
    link->sent_ns = node->now_ns;
    node_taken(node);
    node_rotate(node);
  } else if (status == MLFAB_ERR_AGAIN ||
             (status == MLFAB_ERR_PEER_CLOSED && !MLFAB__PLANTED(71))) {
    /* A peer that is gone may have said goodbye before: what it has sent is still delivered, then
     * DOWN. Until then nothing more is offered to the link, as to one without room. */
    node->out = MLFAB__OUT_NONE;
    link->blocked = 1;
    node_unlist(node, index);
  } else {
    node->out = MLFAB__OUT_NONE;
    mlfab__node_hang_up(node, index, mlfab_error_text(status));
  }
  node_epilogue(node);
}

/* --- time --- */

/* Hangs up, and whoever has no other link is dead at the next look, which is due now. */
static void node_hang_up_silent(mlfab_node *node, uint32_t index, const char *what) {
  mlfab__link *link = &node->links[index];
  char why[96], silent[24];
  snprintf(why, sizeof why, "silent for %s%s",
           mlfab__duration(silent, node->now_ns - link->heard_ns), what);
  link->silent = 1;
  mlfab__node_hang_up(node, index, why);
}

/* What the transport knows of a link that is suspect: states and limits are in node.h. */
static void node_probed(mlfab_node *node, uint32_t index, int status) {
  mlfab__link *link = &node->links[index];
  uint64_t limit = 5 * node->config.heartbeat_ns, silent_ns = node->now_ns - link->heard_ns;
  int hand = node_is_hand(node, link), told = status != MLFAB_ERR_UNSUPPORTED;
  link->probing = 0;
  if (!link->suspect) return;
  if (status == 0 && !MLFAB__PLANTED(74)) link->up_ns = node->now_ns;
  if (node->now_ns - mlfab__max(link->heard_ns, link->up_ns) >= limit && (told || !hand)) {
    node_hang_up_silent(node, index, told ? ", and its system does not answer" : "");
  } else if (silent_ns >= mlfab__max(limit, node->config.silent_death_ns) && !hand &&
             !MLFAB__PLANTED(75)) {
    node_hang_up_silent(node, index, "");
  }
}

static void node_suspect(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  int server = link->kind == MLFAB__LINK_SERVER;
  char text[64], silent[24];
  if (!link->suspect && (server || link->kind == MLFAB__LINK_WORKER) && !node_is_hand(node, link)) {
    snprintf(text, sizeof text, "suspect, silent for %s",
             mlfab__duration(silent, node->now_ns - link->heard_ns));
    mlfab__node_emit(node, MLFAB_EVENT_SUSPECT, (int32_t)link->peer, server,
                     server ? 0 : node->server.peers[link->peer].incarnation, 0, text);
  }
  link->suspect = 1;
  if (!(link->caps & MLFAB_CAP_PROBE)) {
    node_probed(node, index, MLFAB_ERR_UNSUPPORTED);
  } else if (!link->probing) {
    link->probing = 1;
    node_act(node, MLFAB_ACTION_PROBE, link->id, 0);
  }
}

/* When there can next be something to do for a link. */
static uint64_t node_look_ns(const mlfab_node *node, const mlfab__link *link) {
  uint64_t beat = node->config.heartbeat_ns;
  if (link->suspect || link->probe_ns != 0) return node->now_ns;
  uint64_t silent_ns = link->heard_ns + 3 * beat;
  if (link->kind == MLFAB__LINK_CLAIM) return node->now_ns + beat;
  if (link->kind != MLFAB__LINK_NEW) return mlfab__min(silent_ns, link->sent_ns + beat);
  return mlfab__min(silent_ns + 2 * beat, node->now_ns + beat); /* until then it may be known */
}

static void node_scan_link(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  uint64_t beat = node->config.heartbeat_ns;
  int known = link->kind != MLFAB__LINK_NEW && link->kind != MLFAB__LINK_CLAIM;
  if (known && node->now_ns - link->sent_ns >= beat && link->queue_begin == link->queue_end)
    node_heartbeat(node, index, MLFAB__BEAT, node->now_ns);
  node_scan_probe(node, index);
  /* How long a claim waits depends on the holder. */
  if (link->kind == MLFAB__LINK_FREE || link->kind == MLFAB__LINK_CLAIM) return;
  uint64_t silent = node->now_ns - link->heard_ns;
  if (link->kind == MLFAB__LINK_NEW || link->kind == MLFAB__LINK_SCHEDULER || link->closing) {
    if (silent < 5 * beat) return;
    mlfab__node_hang_up(node, index,
                        link->closing                   ? "closed"
                        : link->kind == MLFAB__LINK_NEW ? "said nothing"
                                                        : "silent");
  } else if (link->kind == MLFAB__LINK_JOIN_IN && mlfab__bootstrap_overdue(node, link)) {
    mlfab__node_hang_up(node, index, "welcomed, and did not hang up");
  } else if (silent >= 3 * beat) {
    node_suspect(node, index);
  }
}

MLFAB__INTERNAL void mlfab__node_await_workers(mlfab_node *node) {
  for (uint32_t w = 0; w < node->config.workers; w++) {
    node->worker_heard[w] = node->now_ns;
    node_arm(node, MLFAB__TIMER_WORKER, w, node->now_ns + 5 * node->config.heartbeat_ns);
  }
}

/* A worker without a link is dead after five intervals; its first link may take longer. */
static void node_scan_worker(mlfab_node *node, uint32_t w) {
  uint64_t beat = node->config.heartbeat_ns;
  const mlfab__server_peer *peer = &node->server.peers[w];
  if (node->worker_links[w] != MLFAB__NO_LINK || peer->dead || peer->left || node->leaving == 2)
    return;
  uint64_t due_ns = node->worker_heard[w] + (peer->incarnation ? 5 : 20) * beat;
  /* A connection that broke shortens the wait: a live worker calls again within a fifth of a beat. */
  uint64_t lost = peer->hand ? 0 : node->worker_lost[w];
  if (lost) due_ns = mlfab__min(due_ns, lost + 2 * beat);
  int early = node->phase == MLFAB__BOOTSTRAP_JOINING || node->phase == MLFAB__BOOTSTRAP_FAILED;
  if (early || node->now_ns < due_ns) {
    node_arm(node, MLFAB__TIMER_WORKER, w, due_ns);
  } else {
    node_worker_gone(node, w, 0);
  }
}

/* A server without a link is called again, and is dead after five intervals. Who has heard this node's goodbye
 * and hung up is not dead. */
static void node_scan_route(mlfab_node *node, uint32_t r) {
  uint64_t beat = node->config.heartbeat_ns;
  mlfab__route *route = &node->routes[r];
  /* The scheduler role stays as long as the server role beside it. */
  int left = node->leaving > (r < node->config.servers ? 0 : 1);
  if (!node_uses(node, r) || route->link != MLFAB__NO_LINK || route->dead || left) return;
  node_arm(node, MLFAB__TIMER_ROUTE, r, node->now_ns);
  if (node->phase == MLFAB__BOOTSTRAP_JOINING) return;
  /* Nothing waits for a scheduler: it tries for as long as a call would. */
  int across = r >= 2 * node->config.servers;
  uint64_t patience = r < node->config.servers || across ? 5 * beat : node->config.timeout_ns;
  if ((route->greeted || across) &&
      node->now_ns - route->heard_ns >= mlfab__max(patience, 5 * beat)) {
    node_server_dead(node, r, route->why[0] ? route->why : "silent");
  } else if (route->connecting ? node->now_ns - route->connect_ns >= 4 * beat
                               : node->now_ns >= route->retry_ns) {
    node_call(node, r);
  }
}

MLFAB__INTERNAL int mlfab__node_finished(const mlfab_node *node) {
  uint32_t servers = node->config.servers;
  for (uint32_t s = 0; s < servers; s++) {
    if (!node->routes[servers + s].dead) return 0;
  }
  return 1;
}

static void node_withdraw(mlfab_node *node, mlfab__request *request, int code) {
  if (request->kind == MLFAB__REQUEST_BARRIER) {
    mlfab__barrier_withdraw(&node->barrier, request, code, node->now_ns);
  } else if (request->kind == MLFAB__REQUEST_COLLECTIVE) {
    mlfab__comm_withdraw(&node->comm, request, code, node->now_ns);
  } else {
    mlfab__worker_withdraw(&node->worker, request, code, node->now_ns);
  }
}

static void node_scan_requests(mlfab_node *node) {
  mlfab__request *request;
  uint32_t place = 0;
  while ((request = mlfab__request_due(&node->requests, node->now_ns, &place)))
    node_withdraw(node, request, MLFAB_ERR_TIMEOUT);
}

/* Roles and links between workers that have something to wait for are looked at four times a beat. */
static int node_waits(const mlfab_node *node) {
  return node->is_server || node->self_lost || node->nhops > 0 || node->hops_short ||
         (node->is_worker && mlfab__comm_waits(&node->comm));
}

static void node_scan(mlfab_node *node) {
  mlfab__peer_link_scan(node);
  if (node->is_coordinator) {
    mlfab__trees_tick(&node->trees, node->now_ns);
    mlfab__membership_tick(&node->roll, node->now_ns);
  }
  if (node->is_worker) mlfab__comm_tick(&node->comm, node->now_ns);
  if (node->self_lost) node_greet_self(node, 0);
}

static void node_scan_joining(mlfab_node *node) {
  uint64_t until_ns = mlfab__add_sat(node->opened_ns, node->config.timeout_ns);
  mlfab__bootstrap_tick(node);
  if (node->phase < MLFAB__BOOTSTRAP_READY)
    node_arm_at(node, MLFAB__TIMER_JOIN, 0,
                mlfab__min(node_round(node, node->now_ns + 1), until_ns));
}

static void node_expire(mlfab_node *node, const mlfab__heap_entry *entry) {
  enum mlfab__timer kind = (enum mlfab__timer)entry->order;
  uint32_t index = entry->index - node_timer(node, kind, 0);
  mlfab__heap_remove(&node->timers, entry->index);
  switch (kind) {
    case MLFAB__TIMER_JOIN:
      node_scan_joining(node);
      break;
    case MLFAB__TIMER_LINK:
      node_scan_link(node, index);
      if (node->links[index].kind != MLFAB__LINK_FREE)
        node_arm(node, kind, index, node_look_ns(node, &node->links[index]));
      break;
    case MLFAB__TIMER_WORKER:
      node_scan_worker(node, index);
      break;
    case MLFAB__TIMER_ROUTE:
      node_scan_route(node, index);
      break;
    default:
      node_scan(node); /* armed again in the epilogue */
  }
}

MLFAB_API void mlfab_node_tick(mlfab_node *node, uint64_t now_ns) {
  const mlfab__heap_entry *entry;
  if (!node) return;
  node->now_ns = mlfab__max(node->now_ns, now_ns);
  if (node->is_server) mlfab__server_tick(&node->server, node->now_ns);
  if (node->is_coordinator) mlfab__reshard_tick(&node->reslice, node->now_ns);
  if (node->is_scheduler) mlfab__scheduler_tick(node->scheduler, node->now_ns);
  if (node->aggregator.env) mlfab__aggregator_tick(&node->aggregator, node->now_ns);
  node_scan_requests(node);
  while ((entry = mlfab__heap_top(&node->timers)) && entry->time <= node->now_ns)
    node_expire(node, entry);
  node_epilogue(node);
}

MLFAB_API uint64_t mlfab_node_deadline(const mlfab_node *node) {
  if (!node) return MLFAB__NEVER;
  if (node->self_more) return 0;
  const mlfab__heap_entry *timer = mlfab__heap_top(&node->timers);
  uint64_t deadline = timer ? timer->time : MLFAB__NEVER;
  if (node->parting) deadline = mlfab__min(deadline, node->part_ns);
  if (node->requests.open > 0) deadline = mlfab__min(deadline, node->requests.earliest);
  if (node->is_server) deadline = mlfab__min(deadline, mlfab__server_deadline(&node->server));
  if (node->is_coordinator)
    deadline = mlfab__min(deadline, mlfab__reshard_deadline(&node->reslice));
  if (node->is_scheduler)
    deadline = mlfab__min(deadline, mlfab__scheduler_deadline(node->scheduler));
  if (node->aggregator.env)
    deadline = mlfab__min(deadline, mlfab__aggregator_deadline(&node->aggregator));
  return deadline;
}

MLFAB_API int mlfab_node_ready(const mlfab_node *node, mlfab_error *error_p) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  if (node->phase == MLFAB__BOOTSTRAP_READY) return 1;
  if (node->phase != MLFAB__BOOTSTRAP_FAILED) return 0;
  if (error_p) *error_p = node->failure;
  return node->failure.code;
}

/* --- the calls --- */

MLFAB__INTERNAL int mlfab__node_return(mlfab_node *node, int code, const mlfab_error *error) {
  if (code) node->requests.last = *error;
  node_epilogue(node);
  return code;
}

MLFAB__INTERNAL int mlfab__node_enter(mlfab_node *node, uint64_t now_ns, int worker,
                                      mlfab_error *error) {
  /* Not the whole of it: the text is long, and this is on the way of every push. */
  error->code = error->is_server = error->reserved = 0;
  error->rank = MLFAB_NO_RANK;
  error->waited_ns = 0;
  error->text[0] = 0;
  node->now_ns = mlfab__max(node->now_ns, now_ns);
  if (node->closed) return MLFAB__FAIL(error, MLFAB_ERR_CLOSED, "the context is being closed");
  if (worker && !node->is_worker)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "this node is not a worker");
  if (node->phase == MLFAB__BOOTSTRAP_FAILED) {
    *error = node->failure;
    return error->code;
  }
  if (node->phase != MLFAB__BOOTSTRAP_READY)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "the fabric is not complete yet");
  if (node->leaving || node->parting)
    return MLFAB__FAIL(error, MLFAB_ERR_CLOSED, "the node is leaving");
  return 0;
}

/* A wrong call at the border: told like any other error. */
static int node_wrong(mlfab_node *node, int code, const char *text) {
  return MLFAB__FAIL(&node->requests.last, code, "%s", text);
}

MLFAB_API int mlfab_node_set_link(mlfab_node *node, double in, double out, uint64_t now_ns) {
  mlfab_error error;
  if (!node) return MLFAB_ERR_ARGUMENT;
  int code = mlfab__node_enter(node, now_ns, 0, &error);
  if (!code && !(mlfab__finite(in) && mlfab__finite(out)))
    code = MLFAB__FAIL(&error, MLFAB_ERR_ARGUMENT, "set_link: a capacity is not a finite number");
  if (!code && node->config.scheduler == MLFAB_SCHEDULER_NONE && !node->is_worker)
    code = MLFAB__FAIL(&error, MLFAB_ERR_STATE,
                       "set_link: this fabric has no scheduler, and this node is no worker");
  if (code) return mlfab__node_return(node, code, &error);
  mlfab__monitor_set(&node->monitor, in, out);
  node_tell_capacity(node, 1);
  return mlfab__node_return(node, 0, &error);
}

/* Would this end count as dead, or as closed, to the peer? Between workers server 0 tells. A peer that is
 * driven by hand may compute for long before it looks. */
static int node_heeds(const mlfab_node *node, const mlfab__link *link) {
  switch (link->kind) {
    case MLFAB__LINK_SERVER:
    case MLFAB__LINK_PLANNER:
      return !node->routes[link->peer].hand;
    case MLFAB__LINK_WORKER:
      return !node->server.peers[link->peer].hand;
    default:
      return link->kind == MLFAB__LINK_SCHEDULER;
  }
}

/* Says goodbye on every link of a kind, or on all with MLFAB__LINK_FREE. */
static void node_goodbye(mlfab_node *node, int kind) {
  mlfab__bye bye;
  uint8_t meta[MLFAB__TEXT_MAX + 32];
  memset(&bye, 0, sizeof bye);
  snprintf(bye.text, sizeof bye.text, "closing");
  uint32_t n = mlfab__encode_bye(meta, &bye);
  for (uint32_t i = 0; i < node->nlinks; i++) {
    mlfab__link *link = &node->links[i];
    if (link->kind == MLFAB__LINK_FREE || link->self || link->closing) continue;
    if (kind != MLFAB__LINK_FREE && link->kind != kind) continue;
    mlfab__node_post(node, i, MLFAB__BYE, meta, n);
    link->closing = 1;
    link->lingers = (uint8_t)node_heeds(node, link);
    /* It has its time to go out from now on. */
    if (!MLFAB__PLANTED(97)) link->heard_ns = node->now_ns;
  }
}

/* Do other workers wait for something of ours, or is a last word still on its way inside? */
static int node_awaited(const mlfab_node *node) {
  uint32_t inner = node->pairs[MLFAB__PAIR_SERVER][0];
  if (node->phase != MLFAB__BOOTSTRAP_READY || !node->is_worker) return 0;
  if (!mlfab__comm_quiet(&node->comm)) return 1;
  return inner != MLFAB__NO_LINK && node->links[inner].queue_begin < node->links[inner].queue_end;
}

/* Says goodbye as soon as nobody waits for us, or a heartbeat after it was wanted. */
static void node_part(mlfab_node *node) {
  if (node_awaited(node) && node->now_ns < node->part_ns) return;
  node->leaving = node->parting;
  node->parting = 0;
  if (node->is_worker) mlfab__streams_tick(&node->comm.streams); /* nobody waits for these either */
  if (node->leaving == 1) {
    if (node->pairs[MLFAB__PAIR_SERVER][0] != MLFAB__NO_LINK)
      node_worker_gone(node, (uint32_t)node->config.rank, 1);
    node_goodbye(node, MLFAB__LINK_SERVER);
    node_goodbye(node, MLFAB__LINK_PEER);
    node_goodbye(node, MLFAB__LINK_PEER_IN);
  } else {
    node_goodbye(node, MLFAB__LINK_FREE);
  }
  node_epilogue(node);
}

/* how: as `parting`. */
static void node_begin_to_part(mlfab_node *node, int how, uint64_t now_ns) {
  node->now_ns = mlfab__max(node->now_ns, now_ns);
  /* Where the worker role has left before the server role, nobody waits for it any more. */
  if (!node->parting)
    node->part_ns = node->now_ns + (node->leaving ? 0 : node->config.heartbeat_ns);
  node->parting = how;
  if (node->is_worker) mlfab__comm_leave(&node->comm);
  node_epilogue(node);
}

MLFAB__INTERNAL void mlfab__node_stop_working(mlfab_node *node, uint64_t now_ns) {
  node_begin_to_part(node, 1, now_ns);
}

MLFAB_API int mlfab_node_leave(mlfab_node *node, uint64_t now_ns) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  node_begin_to_part(node, 2, now_ns);
  return 0;
}

MLFAB_API int mlfab_node_test(mlfab_node *node, mlfab_request id, int *done_p,
                              mlfab_result *result_p) {
  if (!node || !done_p) return MLFAB_ERR_ARGUMENT;
  mlfab__request *request = mlfab__request_find(&node->requests, id);
  if (!request)
    return node_wrong(node, MLFAB_ERR_REQUEST,
                      "the request is unknown, or was ended by test or wait before");
  *done_p = request->done;
  if (!request->done) return 0;
  if (result_p) *result_p = request->result;
  mlfab__request_end(&node->requests, request);
  return 0;
}

MLFAB_API int mlfab_node_cancel(mlfab_node *node, mlfab_request id, uint64_t now_ns) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  node->now_ns = mlfab__max(node->now_ns, now_ns);
  mlfab__request *request = mlfab__request_find(&node->requests, id);
  if (!request)
    return node_wrong(node, MLFAB_ERR_REQUEST,
                      "cancel: the request is unknown, or was ended before");
  if (!request->done) node_withdraw(node, request, MLFAB_ERR_CANCELLED);
  node_epilogue(node);
  return 0;
}

MLFAB_API int mlfab_node_push_status(mlfab_node *node, uint64_t seq, int *status_p) {
  if (!node || !status_p || !node->is_worker) return MLFAB_ERR_ARGUMENT;
  return mlfab__worker_status(&node->worker, seq, status_p);
}

MLFAB_API int mlfab_node_last_error(const mlfab_node *node, mlfab_error *error_p) {
  if (!node || !error_p) return MLFAB_ERR_ARGUMENT;
  *error_p = node->requests.last;
  return 0;
}

MLFAB_API int mlfab_node_stats(const mlfab_node *node, mlfab_stats *stats_p, size_t size) {
  if (!node || !stats_p) return MLFAB_ERR_ARGUMENT;
  mlfab_stats stats = node->stats;
  stats.allocations = node->env.allocations;
  stats.memory_bytes = node->env.bytes;
  stats.collectives = node->comm.collectives;
  stats.collectives_failed = node->comm.collectives_failed;
  stats.collective_epochs = node->comm.epochs;
  stats.rounds_partial = node->comm.rounds;
  memcpy(stats_p, &stats, size < sizeof stats ? size : sizeof stats);
  return 0;
}
