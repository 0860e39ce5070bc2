/* growth.c - a node: processes that come while the fabric runs. See growth.h. */
#include "growth.h"

#include <stdio.h>

/* --- numbers for processes without a number --- */

/* Rates a number for a process that asks for one; less is better. 0: unsuitable; -1: perhaps soon (offered to another,
 * or its process may be dead). The number of a dead process is the last choice, because its launcher may start it
 * again. */
static int growth_suits(const mlfab_node *node, uint32_t id, uint64_t nonce) {
  const mlfab__peer *peer = &node->peers[id];
  const mlfab__caller *caller = &node->callers[id];
  int offered = peer->offered_ns && node->now_ns - peer->offered_ns < 5 * node->config.heartbeat_ns;
  int serves = !node->config.dedicated && id < node->config.servers;
  if (id == 0 || serves || peer->link != MLFAB__NO_LINK || caller->link != MLFAB__NO_LINK) return 0;
  if (offered && peer->offered_to == nonce) return 1;
  if (offered) return -1;
  if (node->phase == MLFAB__BOOTSTRAP_JOINING && peer->joined) return 0;
  if (!peer->joined) return mlfab__bootstrap_may_be_absent(node, id) ? 2 : 0;
  if (caller->left) return 3;
  return !mlfab__bootstrap_may_be_absent(node, id) ? 0 : caller->dead ? 4 : -1;
}

/* Likewise for the number of a dedicated server: it suits if it is free, or its process has gone and is not missed. */
static int growth_suits_server(const mlfab_node *node, uint32_t server, uint64_t nonce) {
  uint32_t id = mlfab__node_of_server(node, server);
  const mlfab__peer *peer = &node->peers[id];
  int offered = peer->offered_ns && node->now_ns - peer->offered_ns < 5 * node->config.heartbeat_ns;
  if (!node->config.dedicated || peer->joined || peer->link != MLFAB__NO_LINK) return 0;
  if (node->phase == MLFAB__BOOTSTRAP_JOINING && !mlfab__bootstrap_may_be_absent(node, id))
    return 0;
  if (offered) return peer->offered_to == nonce ? 1 : -1;
  return peer->incarnation ? 3 : 2;
}

static void growth_no_number(mlfab_node *node, uint32_t link, int serves) {
  const mlfab_config *c = &node->config;
  char text[160];
  if (serves && !c->dedicated)
    snprintf(text, sizeof text, "no server can join: in this fabric workers serve");
  else if (serves)
    snprintf(text, sizeof text,
             "there is no number for one more server: servers is %u, servers_max %u",
             node->founding, c->servers);
  else
    snprintf(text, sizeof text,
             "there is no number for one more worker: workers is %u, workers_max %u",
             node->founders, c->workers);
  mlfab__node_refuse(node, link, MLFAB_ERR_LIMIT, MLFAB_NO_RANK, text);
}

/* Answers a process that asks for a number: offers one, and tells the world. */
static void growth_asks(mlfab_node *node, uint32_t link, const mlfab__join *ask) {
  const mlfab_config *c = &node->config;
  int serves = ask->roles == MLFAB_ROLE_SERVER;
  uint32_t best = 0, numbers = serves ? c->servers : c->workers;
  int how = 5, soon = 0;
  for (uint32_t i = 0; i < numbers && how > 1; i++) {
    int suits =
        serves ? growth_suits_server(node, i, ask->nonce) : growth_suits(node, i, ask->nonce);
    soon |= suits < 0;
    if (suits <= 0 || suits >= how) continue;
    how = suits;
    best = i;
  }
  if (how == 5 && soon) { /* it calls again, until its deadline */
    node->links[link].closing = 1;
    mlfab__node_ready_link(node, link);
    return;
  }
  if (how == 5) {
    growth_no_number(node, link, serves);
    return;
  }
  uint32_t id = serves ? mlfab__node_of_server(node, best) : best;
  node->peers[id].offered_ns = mlfab__max(node->now_ns, 1);
  node->peers[id].offered_to = ask->nonce;
  mlfab__join told = mlfab__bootstrap_world(node);
  uint8_t meta[MLFAB__ADDRESSES_MAX + 128];
  told.rank = (int32_t)best;
  node->links[link].kind = MLFAB__LINK_JOIN_IN; /* no peer's link: it closes after reading this */
  node->links[link].peer = id;
  mlfab__node_post(node, link, MLFAB__JOIN, meta, mlfab__encode_join(meta, &told));
  node->links[link].closing = 1;
}

/* Takes server 0's offer of a number, which ends this node's work. */
static void growth_told(mlfab_node *node, uint32_t link, const mlfab__frame_in *frame) {
  mlfab__join in;
  int valid = !mlfab__decode_join(frame->meta, frame->meta_bytes, &in) && in.workers > 0 &&
              in.rank >= 0 && in.workers <= 65536 && in.founders <= in.workers && in.servers > 0 &&
              in.servers <= 4096 && in.founding > 0 && in.founding <= in.servers;
  uint32_t numbers = node->config.roles == MLFAB_ROLE_SERVER ? in.servers : in.workers;
  valid = valid && (uint32_t)in.rank < numbers;
  if (node->phase != MLFAB__BOOTSTRAP_JOINING) return;
  if (!valid) {
    mlfab__node_fail(node, MLFAB_ERR_FRAME, 0, 1, "joining: an offer that does not parse");
    return;
  }
  node->growing->told =
      (struct mlfab__joining){in.rank,    in.founders,  in.workers,   in.founding,
                              in.servers, in.dedicated, in.scheduler, in.replicas};
  node->phase = MLFAB__BOOTSTRAP_READY;
  node->links[link].closing = 1;
  node->join_link = MLFAB__NO_LINK;
  mlfab__node_ready_link(node, link);
}

/* --- servers that come, or have gone --- */

/* --- servers that come --- */

/* Opens the routes to a server that has joined. */
static void growth_here(mlfab_node *node, uint32_t server, const mlfab__member *member) {
  mlfab__place *place = &node->places[server];
  if (!place->vacant && place->info.incarnation >= member->incarnation) return; /* known */
  for (uint32_t r = server; r < node->nroutes; r += node->config.servers) {
    mlfab__route *route = &node->routes[r];
    if (route->link != MLFAB__NO_LINK)
      mlfab__node_hang_up(node, route->link, "another process has its number");
    route->dead = route->greeted = 0;
    route->heard_ns = node->now_ns;
    route->why[0] = route->died[0] = 0;
  }
  place->vacant = 0;
  place->info.added = 1;
  place->info.hand = member->hand != 0;
  place->info.incarnation = member->incarnation;
  place->info.nonce = member->nonce;
  memcpy(place->info.addresses, member->addresses, MLFAB__ADDRESSES_MAX);
  mlfab__roles_gone(node, MLFAB__LINK_SERVER, server, MLFAB__NEVER_HERE);
  mlfab__node_emit(node, MLFAB_EVENT_JOINED, (int32_t)server, 1, member->incarnation, 0,
                   "joined; it has no slices yet");
  for (uint32_t r = server; r < node->nroutes; r += node->config.servers) {
    if (mlfab__server_link_wanted(node, r) && !node->routes[r].connecting && !node->leaving)
      mlfab__server_link_call(node, r);
  }
}

/* Makes the number of a server vacant: the server has gone, and nobody misses it. */
static void growth_gone(mlfab_node *node, uint32_t server, uint32_t incarnation) {
  mlfab__place *place = &node->places[server];
  if (place->vacant || place->info.incarnation > incarnation) return;
  place->vacant = 1;
  for (uint32_t r = server; r < node->nroutes; r += node->config.servers) {
    mlfab__route *route = &node->routes[r];
    if (route->link != MLFAB__NO_LINK)
      mlfab__node_hang_up(node, route->link, "the server has gone");
    route->dead = route->greeted = 0;
  }
  mlfab__roles_gone(node, MLFAB__LINK_SERVER, server, MLFAB__NEVER_HERE);
  mlfab__node_emit(node, MLFAB_EVENT_LEFT, (int32_t)server, 1, incarnation, 0,
                   "has gone; it had no slices");
}

static void growth_member(mlfab_node *node, const mlfab__member *member) {
  uint32_t first = mlfab__node_of_server(node, 0), server = member->node - first;
  if (!node->config.dedicated || member->node < first || server >= node->config.servers ||
      server == node->server_number || server == 0)
    return;
  if (member->kind == MLFAB_EVENT_JOINED)
    growth_here(node, server, member);
  else
    growth_gone(node, server, member->incarnation);
}

static void growth_known(mlfab_node *node) {
  for (uint32_t s = 0; s < node->config.servers; s++) {
    if (node->places[s].vacant || node->places[s].info.added)
      mlfab__roles_gone(node, MLFAB__LINK_SERVER, s, MLFAB__NEVER_HERE);
  }
}

/* --- at server 0 --- */

static int growth_spares(const mlfab_node *node, uint32_t server) {
  const struct mlfab__growing *growing = node->growing;
  return growing->counts && !growing->counts(growing->counts_self, server);
}

static void growth_judge(mlfab_node *node, int (*counts)(void *self, uint32_t server), void *self) {
  node->growing->counts = counts;
  node->growing->counts_self = self;
}

/* MEMBER about a server; kind: MLFAB_EVENT_*. */
static void growth_describe(const mlfab_node *node, uint32_t server, uint32_t kind,
                            mlfab__member *member) {
  uint32_t id = mlfab__node_of_server(node, server);
  const mlfab__peer *peer = &node->peers[id];
  *member = (mlfab__member){.node = id,
                            .incarnation = peer->incarnation,
                            .kind = kind,
                            .hand = peer->hand,
                            .nonce = peer->nonce};
  if (peer->addresses) memcpy(member->addresses, peer->addresses, MLFAB__ADDRESSES_MAX);
}

static void growth_post(mlfab_node *node, uint32_t link, const mlfab__member *member) {
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  mlfab__node_post(node, link, MLFAB__MEMBER, meta, mlfab__encode_member(meta, member));
}

static void growth_tell(mlfab_node *node, uint32_t link) {
  if (!node->is_coordinator) return;
  uint32_t first = mlfab__node_of_server(node, 0);
  for (uint32_t s = 1; node->config.dedicated && s < node->config.servers; s++) {
    const mlfab__peer *peer = &node->peers[first + s];
    mlfab__member member;
    int gone = !peer->joined && peer->incarnation;
    if ((!gone && !(peer->joined && peer->added)) || node->links[link].self) continue;
    growth_describe(node, s, gone ? MLFAB_EVENT_LEFT : MLFAB_EVENT_JOINED, &member);
    growth_post(node, link, &member);
  }
}

static int growth_holds(const mlfab_node *node, uint32_t server) {
  const mlfab__peer *peer = &node->peers[mlfab__node_of_server(node, server)];
  if (!node->config.dedicated) return 1;
  return peer->joined && (!peer->added || !growth_spares(node, server));
}

static void growth_left(mlfab_node *node, uint32_t server, uint32_t incarnation) {
  mlfab__peer *peer = &node->peers[mlfab__node_of_server(node, server)];
  if (!node->config.dedicated || !peer->joined) return;
  peer->leaves = incarnation;
  node->growing->servers_left = 1;
}

/* Tells all nodes, including this node, that a server has come or gone. */
static void growth_tell_all(mlfab_node *node, uint32_t server, uint32_t kind) {
  mlfab__member member;
  growth_describe(node, server, kind, &member);
  growth_member(node, &member);
  for (uint32_t i = 0; i < node->nlinks; i++) {
    const mlfab__link *link = &node->links[i];
    int told = link->kind == MLFAB__LINK_WORKER || link->kind == MLFAB__LINK_SCHEDULER ||
               (link->kind == MLFAB__LINK_RESHARD && link->peer != server);
    if (told && link->greeted && !link->self && !link->closing) growth_post(node, i, &member);
  }
}

static void growth_settle(mlfab_node *node) {
  if (!node->growing->servers_left) return;
  node->growing->servers_left = 0;
  for (uint32_t s = 1; s < node->config.servers; s++) {
    mlfab__peer *peer = &node->peers[mlfab__node_of_server(node, s)];
    int left = peer->leaves != 0 && peer->leaves == peer->incarnation;
    peer->leaves = 0;
    if (!left) continue;
    peer->joined = peer->added = 0;
    growth_tell_all(node, s, MLFAB_EVENT_LEFT);
  }
}

/* Takes a process that has the number of a server whose state nobody misses: it is an added server, without slices. */
static void growth_came(mlfab_node *node, uint32_t server) {
  node->peers[mlfab__node_of_server(node, server)].added = 1;
  if (node->phase != MLFAB__BOOTSTRAP_JOINING) growth_tell_all(node, server, MLFAB_EVENT_JOINED);
}

static void growth_free(mlfab_node *node) {
  mlfab__free(&node->env, node->growing, sizeof *node->growing);
}

MLFAB__INTERNAL int mlfab__growth_attach(mlfab_node *node) {
  static const mlfab__growth growth = {.asks = growth_asks,
                                       .told = growth_told,
                                       .spares = growth_spares,
                                       .came = growth_came,
                                       .left = growth_left,
                                       .settle = growth_settle,
                                       .judge = growth_judge,
                                       .holds = growth_holds,
                                       .tell = growth_tell,
                                       .member = growth_member,
                                       .known = growth_known,
                                       .free = growth_free};
  node->growing = mlfab__alloc(&node->env, sizeof *node->growing);
  if (!node->growing) return MLFAB_ERR_MEMORY;
  node->growth = &growth;
  return 0;
}
