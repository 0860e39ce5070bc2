/* bootstrap.c - a node: joining the fabric. See node.h.
 *
 * Server 0 is the meeting point. Every node sends JOIN to it. Server 0 refuses the node (with the reason) or gives it
 * an incarnation. When all nodes are there, it sends WELCOME with the addresses of the servers to each of them. If a
 * rank has lost its process, a later process of that rank is welcomed at once, with a larger incarnation, which fences
 * the old process. A joiner calls again until its deadline. Workers and servers beyond the founders are not awaited,
 * and welcomed at once, too (growth.h). */
#include "node.h"

#include <stdio.h>

/* --- server 0: the nodes that have joined --- */

/* Is this node a dedicated server or a replica? Those need no link. */
static int bootstrap_is_dedicated(const mlfab_node *node, uint32_t id) {
  const mlfab_config *c = &node->config;
  return c->dedicated && id >= c->workers && id - c->workers < (1 + c->replicas) * c->servers;
}

MLFAB__INTERNAL int mlfab__bootstrap_may_be_absent(const mlfab_node *node, uint32_t id) {
  const mlfab_config *c = &node->config;
  if (bootstrap_is_dedicated(node, id)) return (id - c->workers) % c->servers >= node->founding;
  return id >= node->founders && id < c->workers;
}

static int bootstrap_all_here(const mlfab_node *node) {
  uint32_t later = node->config.workers - node->founders + node->config.servers - node->founding;
  return node->joined == node->nodes - later;
}

/* Encodes the list of servers, their replicas and the scheduler that votes, with their addresses, for WELCOME. */
static int bootstrap_make_welcome(mlfab_node *node) {
  uint32_t places = node->nplaces;
  uint32_t room = places * (MLFAB__ADDRESSES_MAX + 32);
  if (room > MLFAB_BULK_MAX) room = MLFAB_BULK_MAX;
  if (!node->welcome) node->welcome = mlfab__alloc(&node->env, room);
  if (!node->welcome) return MLFAB_ERR_MEMORY;
  node->welcome_bytes = node->welcome_count = 0;
  for (uint32_t s = 0; s < places; s++) {
    mlfab__member_info info = node->places[s].info;
    if (node->places[s].vacant) continue;
    /* The process has not told its place yet, so any PLACE is newer. */
    if (node->places[s].moved) info.incarnation = 0;
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
    if (node->peers[id].joined || mlfab__bootstrap_may_be_absent(node, id)) continue;
    int n = snprintf(node->missing + at, sizeof node->missing - at, "%s%s", at ? ", " : "",
                     mlfab__node_name(node, id, name));
    at += (size_t)n;
  }
}

/* Stores the place of a process that has joined as a server, or as a voter. */
static void bootstrap_place(mlfab_node *node, uint32_t id) {
  const mlfab__peer *peer = &node->peers[id];
  mlfab__place *place = &node->places[id - mlfab__node_of_server(node, 0)];
  if (!peer->joined) return;
  place->vacant = 0;
  place->info.added = peer->added;
  memcpy(place->info.addresses, peer->addresses ? peer->addresses : node->addresses,
         MLFAB__ADDRESSES_MAX);
  place->info.hand = peer->hand;
  place->info.incarnation = peer->incarnation;
  place->info.nonce = peer->nonce;
}

/* Called when all nodes have joined. */
static void bootstrap_complete(mlfab_node *node) {
  if (node->join_link != MLFAB__NO_LINK)
    mlfab__node_hang_up(node, node->join_link, "the fabric has been formed");
  for (uint32_t s = 0; s < node->nplaces; s++)
    bootstrap_place(node, mlfab__node_of_server(node, s));
  for (uint32_t id = 0; id < node->nodes; id++) node->peers[id].fresh = 1;
  node->fresh = 1;
  node->standby = 0;
  node->fabric = node->nonce;
  int code = bootstrap_make_welcome(node);
  if (code) {
    mlfab__node_fail(node, code, MLFAB_NO_RANK, 0, "server 0: no room for the list of servers");
    return;
  }
  for (uint32_t i = 0; i < node->nlinks; i++) {
    if (node->links[i].kind != MLFAB__LINK_JOIN_IN) continue;
    node->links[i].welcome = MLFAB__WELCOME_FIRST;
    node->links[i].since_ns = node->now_ns;
    mlfab__node_ready_link(node, i);
  }
  node->phase = MLFAB__BOOTSTRAP_GREETING;
  mlfab__caller_await(node);
  if (node->growth) node->growth->known(node);
  mlfab__server_link_begin(node);
  mlfab__server_link_check(node);
}

/* A setting that is the same at all nodes: name, place where users set it, values at the caller and here. */
typedef struct bootstrap_setting {
  const char *name, *variable;
  uint64_t there, here;
  const char *const *words; /* or NULL: numbers */
  uint64_t count;           /* of words */
} bootstrap_setting;

static const char *bootstrap_value(char text[24], const bootstrap_setting *s, uint64_t value) {
  if (s->words && value < s->count) return s->words[value];
  snprintf(text, 24, s->words ? "unknown (%llu)" : "%llu", (unsigned long long)value);
  return text;
}

/* Compares settings that each node has; `world`: also those that describe the world, which a process without a number
 * learns. Returns 0; or WORLD, and a text with the first different setting, both values and both ranks. Kernels: with
 * cblas, norms, by which updates are clipped and judged, have other bits. */
static int bootstrap_compare(const mlfab_node *node, const mlfab__join *join, int world, char *text,
                             size_t room) {
  static const char *const kernels[] = {"own", "cblas"};
  static const char *const schedulers[] = {"none", "beside", "own"};
  const mlfab_config *c = &node->config;
  const bootstrap_setting settings[] = {
      {"kernels", "MLFAB_KERNELS", join->kernels, c->kernels, kernels, MLFAB__COUNT(kernels)},
      {"scheduler", "MLFAB_SCHEDULER", join->scheduler, c->scheduler, schedulers,
       MLFAB__COUNT(schedulers)},
      {"workers", "MLFAB_WORKERS, or the launcher's number of processes", join->founders,
       node->founders, NULL, 0},
      {"workers_max", "MLFAB_WORKERS_MAX", join->workers, c->workers, NULL, 0},
      {"replicas", "MLFAB_REPLICAS", join->replicas, c->replicas, NULL, 0},
      {"dedicated", "MLFAB_DEDICATED", join->dedicated, c->dedicated, NULL, 0},
      {"servers", "MLFAB_SERVERS", join->founding, node->founding, NULL, 0},
      {"servers_max", "MLFAB_SERVERS_MAX", join->servers, c->servers, NULL, 0}};
  char who[40] = "a process that joins", there[24], here[24];
  if (join->rank != MLFAB_NO_RANK)
    snprintf(who, sizeof who, "%s %d",
             join->roles & MLFAB_ROLE_WORKER    ? "worker"
             : join->roles & MLFAB_ROLE_SERVER  ? "server"
             : join->roles & MLFAB_ROLE_REPLICA ? "the replica of server"
                                                : "scheduler",
             (int)join->rank);
  for (size_t i = 0; i < (world ? MLFAB__COUNT(settings) : 1); i++) {
    const bootstrap_setting *s = &settings[i];
    if (s->there == s->here) continue;
    snprintf(text, room, "the configurations differ: %s (%s) is %s at %s, %s at server 0%s",
             s->name, s->variable, bootstrap_value(there, s, s->there), who,
             bootstrap_value(here, s, s->here),
             node->config.dedicated ? "" : " (worker 0's process)");
    return MLFAB_ERR_WORLD;
  }
  return node->copies ? node->copies->judge(node, join, who, text, room) : 0;
}

/* Judges a JOIN. Returns 0, or a code and a text with the reason to refuse it. */
static int bootstrap_judge(mlfab_node *node, const mlfab__join *join, uint32_t *id_p, char *text,
                           size_t room) {
  const mlfab_config *c = &node->config;
  if (node->phase == MLFAB__BOOTSTRAP_FAILED) {
    snprintf(text, room, "server 0 has given up: %.120s", node->failure.text);
    return MLFAB_ERR_REFUSED;
  }
  if (bootstrap_compare(node, join, 1, text, room)) return MLFAB_ERR_WORLD;
  int own = join->roles == MLFAB_ROLE_SCHEDULER;
  int server_only = !own && c->dedicated && !(join->roles & MLFAB_ROLE_WORKER);
  uint32_t ranks = own ? 1 : server_only ? c->servers : c->workers;
  if (join->rank < 0 || (uint32_t)join->rank >= ranks ||
      (own && c->scheduler != MLFAB_SCHEDULER_OWN) ||
      (join->roles == MLFAB_ROLE_REPLICA && !c->replicas)) {
    snprintf(
        text, room,
        "rank %d (MLFAB_RANK, or the launcher's) is not in the world of %u workers, %u servers",
        (int)join->rank, c->workers, c->servers);
    return MLFAB_ERR_RANK_RANGE;
  }
  *id_p = server_only ? c->workers + (uint32_t)join->rank : (uint32_t)join->rank;
  if (join->roles == MLFAB_ROLE_REPLICA) *id_p += c->servers;
  if (own) *id_p = node->nodes - 1;
  if (*id_p == node->id) {
    snprintf(text, room, "worker 0 is this process of server 0 already: two have MLFAB_RANK 0");
    return MLFAB_ERR_RANK_TAKEN;
  }
  return 0;
}

/* Another link than `link`, of the process that has this number; MLFAB__NO_LINK if there is none. */
static uint32_t bootstrap_holder(const mlfab_node *node, uint32_t id, uint32_t link) {
  const mlfab__peer *peer = &node->peers[id];
  if (!peer->joined) return MLFAB__NO_LINK;
  if (peer->link != MLFAB__NO_LINK && peer->link != link) return peer->link;
  if (id < node->config.workers) return node->callers[id].link;
  return bootstrap_is_dedicated(node, id) ? MLFAB__NO_LINK
                                          : node->callers[node->config.workers].link;
}

/* Does the server with this number still answer? 1: yes; 0: no, or another process answers; -1: it is being called. */
static int bootstrap_answers(mlfab_node *node, mlfab__peer *peer, uint32_t server) {
  mlfab__route *route = &node->routes[mlfab__node_route_of(node, MLFAB__LINK_RESHARD, server)];
  uint64_t beat = node->config.heartbeat_ns;
  if (peer->awaited_ns == 0 || node->now_ns - peer->awaited_ns >= 10 * beat) {
    peer->awaited_ns = mlfab__max(node->now_ns, 1);
    mlfab__server_link_across(node, server);
  }
  const mlfab__link *link = route->link != MLFAB__NO_LINK ? &node->links[route->link] : NULL;
  if (link && link->greeted && link->heard_ns >= peer->awaited_ns)
    return link->nonce == peer->nonce;
  if (node->now_ns - peer->awaited_ns >= 5 * beat || (!link && !route->connecting)) return 0;
  return -1;
}

/* May this process have a number whose holder has no link here? Server 0 first calls a holder that is a dedicated
 * server; other holders have 5 beats from WELCOME to say HELLO. Returns 0; or an error if the process was refused, or
 * has to call again. */
static int bootstrap_vacant(mlfab_node *node, uint32_t link, uint32_t id, const mlfab__join *join) {
  mlfab__peer *peer = &node->peers[id];
  if (node->phase == MLFAB__BOOTSTRAP_JOINING || !peer->joined || peer->nonce == join->nonce)
    return 0;
  /* The other voters of its server judge whether the former process lives (copies.c). */
  if (node->copies && bootstrap_is_dedicated(node, id)) return 0;
  int answers = 0;
  if (bootstrap_is_dedicated(node, id)) {
    answers = bootstrap_answers(node, peer, id - node->config.workers);
  } else if (peer->awaited_ns != 0) {
    answers = node->now_ns - peer->awaited_ns < 5 * node->config.heartbeat_ns ? -1 : 0;
  }
  if (answers < 0) {
    node->links[link].closing = 1;
    mlfab__node_ready_link(node, link);
    return MLFAB_ERR_AGAIN;
  }
  peer->awaited_ns = 0;
  if (!answers) return 0;
  char name[32], text[96];
  snprintf(text, sizeof text, "%s is another process that is here already",
           mlfab__node_name(node, id, name));
  return mlfab__node_refuse(node, link, MLFAB_ERR_RANK_TAKEN, join->rank, text);
}

/* Refuses a process with settings other than this node's: the log, and an error of this node, name the process. */
static int bootstrap_refuse(mlfab_node *node, uint32_t link, int code, int32_t rank,
                            const char *text) {
  enum mlfab__cause cause = !node->is_coordinator                    ? MLFAB__CAUSE_ELSEWHERE
                            : node->phase == MLFAB__BOOTSTRAP_FAILED ? MLFAB__CAUSE_GIVEN_UP
                                                                     : MLFAB__CAUSE_OTHER;
  uint64_t n = ++node->misfits;
  snprintf(node->misfit, sizeof node->misfit, "%s", text);
  node->strange = node->misfit;
  if ((n & (n - 1)) == 0)
    mlfab__log(&node->env, MLFAB_LOG_WARN, "a process was refused (%llu so far): %s",
               (unsigned long long)n, text);
  return mlfab__node_refuse_as(node, link, cause, code, rank, text);
}

static int bootstrap_join(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame) {
  mlfab__join join;
  char text[232];
  uint32_t id = 0;
  if (mlfab__decode_join(frame->meta, frame->meta_bytes, &join))
    return mlfab__node_refuse(node, link, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                              "a JOIN that does not parse");
  int asks = node->is_coordinator && join.rank == MLFAB_NO_RANK &&
             node->phase != MLFAB__BOOTSTRAP_FAILED && node->links[link].kind == MLFAB__LINK_NEW;
  if (asks && (!node->growth || bootstrap_compare(node, &join, 0, text, sizeof text))) {
    if (!node->growth)
      snprintf(text, sizeof text,
               "no process can join: server 0 was built without MLFAB_WITH_GROWTH");
    return bootstrap_refuse(node, link, node->growth ? MLFAB_ERR_WORLD : MLFAB_ERR_UNSUPPORTED,
                            MLFAB_NO_RANK, text);
  }
  if (asks) {
    node->growth->asks(node, link, &join);
    return 0;
  }
  int code = node->is_coordinator ? bootstrap_judge(node, &join, &id, text, sizeof text)
                                  : MLFAB_ERR_REFUSED;
  if (!node->is_coordinator)
    snprintf(text, sizeof text, "this node is not server 0: wrong coordinator address");
  if (code) return bootstrap_refuse(node, link, code, join.rank, text);
  if (node->copies && node->copies->rejects(node, link, id)) return MLFAB_ERR_AGAIN;
  const mlfab__link *before = &node->links[link];
  if (before->kind == MLFAB__LINK_JOIN_IN && (before->peer != id || before->nonce != join.nonce))
    return mlfab__node_refuse(node, link, MLFAB_ERR_FRAME, join.rank,
                              "two processes on one connection");
  mlfab__peer *peer = &node->peers[id];
  uint32_t holder = bootstrap_holder(node, id, link);
  code = mlfab__claim_ask(node, link, holder, join.nonce, frame);
  if (!code) code = bootstrap_vacant(node, link, id, &join);
  if (code) return code;
  if (!peer->addresses) peer->addresses = mlfab__alloc(&node->env, MLFAB__ADDRESSES_MAX);
  if (!peer->addresses)
    return mlfab__node_refuse(node, link, MLFAB_ERR_MEMORY, 0, "server 0 is out of memory");
  int again = peer->joined && peer->nonce == join.nonce;
  uint32_t server = bootstrap_is_dedicated(node, id) ? id - node->config.workers : MLFAB__NO_NODE;
  if (server != MLFAB__NO_NODE) server %= node->config.servers;
  int begins = node->phase == MLFAB__BOOTSTRAP_JOINING && server < node->founding;
  int comes = server != MLFAB__NO_NODE && !node->copies && !again && !begins && node->growth &&
              node->growth->spares(node, server);
  if (comes && peer->joined) mlfab__roles_gone(node, MLFAB__LINK_RESHARD, server, 0);
  if (peer->link != MLFAB__NO_LINK && peer->link != link)
    mlfab__node_hang_up(node, peer->link, "replaced by a newer connection");
  if (!peer->joined && !mlfab__bootstrap_may_be_absent(node, id)) node->joined++;
  if (!again) {
    peer->incarnation = ++node->incarnations;
    peer->fresh = 0;
  }
  peer->joined = 1;
  peer->offered_ns = 0;
  peer->hand = join.hand != 0;
  peer->nonce = join.nonce;
  peer->link = link;
  memcpy(peer->addresses, join.addresses, MLFAB__ADDRESSES_MAX);
  node->links[link].kind = MLFAB__LINK_JOIN_IN;
  node->links[link].peer = id;
  node->links[link].nonce = join.nonce;
  node->links[link].since_ns = node->now_ns;
  if (comes) node->growth->came(node, server);
  if (node->copies) node->copies->changed(node, id);
  if (node->phase != MLFAB__BOOTSTRAP_JOINING) {
    if (bootstrap_make_welcome(node))
      return mlfab__node_refuse(node, link, MLFAB_ERR_LIMIT, 0,
                                "server 0: no room for the list of servers");
    if (node->copies) {
      node->copies->welcome(node, id);
    } else {
      node->links[link].welcome = MLFAB__WELCOME_AGAIN;
      mlfab__node_ready_link(node, link);
    }
  } else if (bootstrap_all_here(node)) {
    bootstrap_complete(node);
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__bootstrap_overdue(const mlfab_node *node, const mlfab__link *link) {
  return node->phase != MLFAB__BOOTSTRAP_JOINING &&
         node->now_ns - link->since_ns >= 20 * node->config.heartbeat_ns;
}

/* Called when a joining node hung up or died, perhaps before WELCOME. */
static void bootstrap_lost(mlfab_node *node, uint32_t id, uint32_t link) {
  mlfab__peer *peer = &node->peers[id];
  if (peer->link != link) return;
  peer->link = MLFAB__NO_LINK;
  if (node->phase != MLFAB__BOOTSTRAP_JOINING) {
    if (!bootstrap_is_dedicated(node, id) && bootstrap_holder(node, id, link) == MLFAB__NO_LINK)
      peer->awaited_ns = mlfab__max(node->now_ns, 1);
    return;
  }
  /* It died while other nodes were still missing, so it counts as missing again. */
  peer->joined = 0;
  if (!mlfab__bootstrap_may_be_absent(node, id)) node->joined--;
}

MLFAB__INTERNAL void mlfab__bootstrap_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                           const char *why) {
  if (was->kind == MLFAB__LINK_JOIN_IN) {
    bootstrap_lost(node, was->peer, link);
  } else if (node->join_link == link) {
    mlfab__bootstrap_failed(node, why);
  }
}

/* --- a joining node --- */

/* Calls server 0, in turns with its replica if the configuration has the replica's address. Server 0 itself calls its
 * replica only. */
static void bootstrap_call(mlfab_node *node) {
  const char *address = node->config.coordinator, *other = strchr(address, ',');
  size_t bytes = other ? (size_t)(other - address) : strlen(address);
  if (node->meets && !other) return;
  int second = other && (node->join_other || node->meets);
  if (second) {
    address = other + 1;
    bytes = strlen(address);
  }
  node->join_ports = mlfab__address_ports(address, bytes);
  mlfab__address_port(address, bytes, node->join_turns[second]++ % node->join_ports,
                      node->join_address, sizeof node->join_address);
  node->join_other ^= 1;
  node->join_connecting = 1;
  mlfab__node_act(node, MLFAB_ACTION_CONNECT, 0, MLFAB__TOKEN_JOIN);
}

MLFAB__INTERNAL const char *mlfab__bootstrap_callee(const mlfab_node *node,
                                                    char name[MLFAB__CALLEE]) {
  if (node->meets)
    snprintf(name, MLFAB__CALLEE, "the process at %.100s (the address of its replica)",
             node->join_address);
  else
    snprintf(name, MLFAB__CALLEE, "server 0");
  return name;
}

MLFAB__INTERNAL void mlfab__bootstrap_start(mlfab_node *node) {
  node->phase = MLFAB__BOOTSTRAP_JOINING;
  if (!node->meets) {
    bootstrap_call(node);
    return;
  }
  mlfab__peer *self = &node->peers[node->id];
  self->joined = 1;
  self->incarnation = node->incarnation = ++node->incarnations;
  self->hand = node->config.progress == MLFAB_PROGRESS_HAND;
  self->nonce = node->nonce;
  node->joined = 1;
  if (bootstrap_all_here(node))
    bootstrap_complete(node);
  else if (node->copies)
    bootstrap_call(node);
}

MLFAB__INTERNAL mlfab__join mlfab__bootstrap_world(const mlfab_node *node) {
  const mlfab_config *c = &node->config;
  return (mlfab__join){.workers = c->workers,
                       .founders = node->founders,
                       .servers = c->servers,
                       .founding = node->founding,
                       .dedicated = c->dedicated,
                       .replicas = c->replicas,
                       .scheduler = c->scheduler,
                       .kernels = c->kernels};
}

MLFAB__INTERNAL void mlfab__bootstrap_up(mlfab_node *node, uint32_t link) {
  mlfab__join join = mlfab__bootstrap_world(node);
  join.rank = node->config.join ? MLFAB_NO_RANK : node->config.rank;
  join.roles = node->config.roles;
  join.hand = node->config.progress == MLFAB_PROGRESS_HAND;
  join.nonce = node->nonce;
  join.heartbeat_ns = node->config.heartbeat_ns;
  memcpy(join.addresses, node->addresses, sizeof join.addresses);
  node->links[link].kind = MLFAB__LINK_JOIN_OUT;
  node->join_link = link;
  node->join_connecting = 0;
  uint8_t meta[MLFAB__ADDRESSES_MAX + 128];
  mlfab__node_post(node, link, MLFAB__JOIN, meta, mlfab__encode_join(meta, &join));
}

MLFAB__INTERNAL int mlfab__bootstrap_elsewhere(mlfab_node *node, enum mlfab__cause cause,
                                               const char *why) {
  if (node->join_ports < 2 || cause < MLFAB__CAUSE_ELSEWHERE ||
      node->phase != MLFAB__BOOTSTRAP_JOINING)
    return 0;
  snprintf(node->join_why, sizeof node->join_why, "%.60s: %.90s", node->join_address, why);
  node->join_said = 1;
  return 1;
}

/* Gives up a silent port: another program may have it. */
static void bootstrap_tire(mlfab_node *node) {
  uint32_t index = node->join_link;
  if (node->join_ports < 2 || index == MLFAB__NO_LINK) return;
  const mlfab__link *link = &node->links[index];
  if (link->heard_ns == link->since_ns &&
      node->now_ns - link->since_ns >= 5 * mlfab__node_beat(node))
    mlfab__node_hang_up(node, index, "the program at this port says nothing");
}

MLFAB__INTERNAL void mlfab__bootstrap_failed(mlfab_node *node, const char *why) {
  node->join_link = MLFAB__NO_LINK;
  node->join_connecting = 0;
  node->join_retry_ns = node->now_ns + mlfab__node_beat(node) / 5;
  if (why && !node->join_said) snprintf(node->join_why, sizeof node->join_why, "%s", why);
}

MLFAB__INTERNAL void mlfab__bootstrap_foreign(mlfab_node *node) {
  /* All ports of a range are called before the pace slows down. */
  node->join_retry_ns = mlfab__node_retry(node, ++node->join_vain / node->join_ports);
}

static void bootstrap_welcome(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame) {
  mlfab__welcome welcome;
  const uint8_t *at = frame->bulk;
  uint32_t left = frame->bulk_bytes;
  if (mlfab__decode_welcome(frame->meta, frame->meta_bytes, &welcome) || (left > 0 && !at)) {
    mlfab__node_fail(node, MLFAB_ERR_FRAME, 0, 1, "joining: a WELCOME that does not parse");
    return;
  }
  for (uint32_t i = 0; i < welcome.nodes; i++) {
    mlfab__member_info info;
    uint32_t n = mlfab__decode_member_info(at, left, &info);
    uint32_t first = mlfab__node_of_server(node, 0);
    uint32_t places = node->nplaces;
    if (n == 0 || info.node < first || info.node - first >= places) {
      mlfab__node_fail(node, MLFAB_ERR_FRAME, 0, 1, "joining: a WELCOME that does not parse");
      return;
    }
    at += n;
    left -= n;
    node->places[info.node - first].vacant = 0;
    node->places[info.node - first].info = info;
  }
  /* The called address is that of server 0. With copies it may be that of the other copy. */
  if (!node->copies) mlfab__node_add_address(node->places[0].info.addresses, node->join_address);
  node->incarnation = welcome.incarnation;
  node->running = welcome.running != 0;
  node->fresh = welcome.fresh != 0;
  node->fabric = welcome.fabric;
  if (node->copies) node->copies->welcomed(node);
  node->phase = MLFAB__BOOTSTRAP_GREETING;
  node->links[link].closing = 1;
  node->join_link = MLFAB__NO_LINK;
  mlfab__node_ready_link(node, link);
  const mlfab__place *own = node->is_server ? &node->places[node->server_number] : NULL;
  node->added = own && (own->info.added || own->vacant);
  if (node->is_server) mlfab__caller_await(node);
  if (node->growth) node->growth->known(node);
  mlfab__server_link_begin(node);
  mlfab__server_link_check(node);
}

MLFAB__INTERNAL void mlfab__bootstrap_frame(mlfab_node *node, uint32_t link,
                                            const mlfab__frame_in *frame) {
  mlfab__refuse refuse;
  mlfab__member member;
  mlfab__bye bye;
  if (node->links[link].kind == MLFAB__LINK_JOIN_OUT) node->join_vain = 0;
  if (frame->type == MLFAB__BYE && node->links[link].kind == MLFAB__LINK_JOIN_OUT &&
      !mlfab__decode_bye(frame->meta, frame->meta_bytes, &bye) && bye.code == MLFAB_ERR_AGAIN)
    mlfab__node_hang_up(node, link, bye.text); /* a copy that does not serve tells the reason */
  if (frame->type == MLFAB__HEARTBEAT || frame->type == MLFAB__BYE) return;
  if (frame->type == MLFAB__JOIN && node->config.join) {
    if (node->links[link].kind == MLFAB__LINK_JOIN_OUT) node->growth->told(node, link, frame);
  } else if (frame->type == MLFAB__JOIN) {
    if (!node->copies || !node->copies->rejects(node, link, MLFAB__NO_NODE))
      bootstrap_join(node, link, frame);
  } else if (node->links[link].kind != MLFAB__LINK_JOIN_OUT) {
    mlfab__node_refuse(node, link, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                       "a frame that a joining node never sends");
  } else if (frame->type == MLFAB__WELCOME && node->phase == MLFAB__BOOTSTRAP_JOINING) {
    bootstrap_welcome(node, link, frame);
  } else if (frame->type == MLFAB__REFUSE &&
             !mlfab__decode_refuse(frame->meta, frame->meta_bytes, &refuse)) {
    char text[MLFAB__TEXT_MAX + 320], callee[MLFAB__CALLEE];
    if (mlfab__bootstrap_elsewhere(node, (enum mlfab__cause)refuse.cause, refuse.text)) {
      mlfab__node_hang_up(node, link, refuse.text);
      return;
    }
    mlfab__bootstrap_callee(node, callee);
    snprintf(text, sizeof text, "joining: refused by %s: %s", callee, refuse.text);
    if (refuse.code == MLFAB_ERR_JOB)
      snprintf(text, sizeof text, "joining as job '%s': refused by %s: %s", node->config.job,
               callee, refuse.text);
    mlfab__node_fail(node, refuse.code, refuse.rank, 0, text);
  } else if (frame->type == MLFAB__MEMBER &&
             !mlfab__decode_member(frame->meta, frame->meta_bytes, &member)) {
    snprintf(node->missing, sizeof node->missing, "%.*s", (int)sizeof node->missing - 1,
             member.addresses);
  }
}

/* Tells the nodes that have joined which nodes are missing, so that their errors can name these. */
static void bootstrap_tell_missing(mlfab_node *node) {
  mlfab__member member = {.node = 0};
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
  char text[296], waited[24];
  mlfab__duration(waited, node->now_ns - node->opened_ns);
  int32_t rank = 0;
  int is_server = 1;
  if (node->meets && node->phase == MLFAB__BOOTSTRAP_JOINING) {
    uint32_t id = 0;
    bootstrap_list_missing(node);
    while (id + 1 < node->nodes &&
           (node->peers[id].joined || mlfab__bootstrap_may_be_absent(node, id)))
      id++;
    is_server = bootstrap_is_dedicated(node, id); /* or the replica of a server */
    rank = (int32_t)(is_server ? (id - node->config.workers) % node->config.servers : id);
    int n =
        snprintf(text, sizeof text, "joining: after %s still missing: %s", waited, node->missing);
    uint32_t replica = node->config.workers + node->config.servers;
    if (node->strange)
      snprintf(text + n, sizeof text - (size_t)n, "; a caller was refused: %s", node->strange);
    else if (node->join_why[0] && !node->peers[replica].joined)
      snprintf(text + n, sizeof text - (size_t)n, "; the replica at %.80s: %.80s",
               node->join_address, node->join_why);
  } else if (node->phase == MLFAB__BOOTSTRAP_GREETING) {
    const mlfab__route *routes = node->routes;
    if (node->config.roles == MLFAB_ROLE_SCHEDULER) routes += node->config.servers;
    while ((uint32_t)rank + 1 < node->config.servers &&
           (routes[rank].greeted || node->places[rank].vacant || node->places[rank].info.added))
      rank++;
    const char *at = node->places[rank].info.addresses;
    /* The reason names the addresses that were tried. */
    int none = routes[rank].why[0] == 0, foreign = routes[rank].vain > 1;
    snprintf(text, sizeof text, "joining: after %s server %d does not answer%s%.*s%s%.190s", waited,
             (int)rank,
             none      ? " at "
             : foreign ? ": another program answers at "
                       : ": ",
             foreign ? (int)strcspn(at, " ") : 0, at, foreign ? ": " : "",
             none ? at : routes[rank].why);
  } else if (node->missing[0]) {
    snprintf(text, sizeof text, "joining: after %s server 0 still misses: %s", waited,
             node->missing);
  } else {
    int foreign = node->join_vain > 1 && !node->join_said;
    snprintf(text, sizeof text, "joining: after %s %s at %.64s (%.140s)", waited,
             foreign ? "another program answers" : "no answer from server 0",
             foreign ? node->join_address : node->config.coordinator,
             node->join_why[0] ? node->join_why : "no connection");
  }
  mlfab__node_fail(node, MLFAB_ERR_TIMEOUT, rank, is_server, text);
}

MLFAB__INTERNAL void mlfab__bootstrap_tick(mlfab_node *node) {
  if (node->phase >= MLFAB__BOOTSTRAP_READY) return;
  /* Only the time in which this process ran counts (node.h, Pauses). */
  if (node->now_ns - node->opened_ns >= mlfab__add_sat(node->config.timeout_ns, node->asleep_ns)) {
    bootstrap_timeout(node);
    return;
  }
  if (node->phase != MLFAB__BOOTSTRAP_JOINING) return;
  if (node->meets && node->now_ns >= node->missing_ns) {
    node->missing_ns = node->now_ns + mlfab__node_beat(node);
    bootstrap_tell_missing(node);
  }
  if (node->meets && !node->copies) return;
  bootstrap_tire(node);
  if (node->join_link == MLFAB__NO_LINK && !node->join_connecting &&
      node->now_ns >= node->join_retry_ns) {
    bootstrap_call(node);
  }
}
