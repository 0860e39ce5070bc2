/* server_link.c - a node: the routes of its worker, scheduler and server role to servers. On a route the node calls,
 * says HELLO, and calls again after a break. In the end it declares the server dead. See node.h. */
#include "node.h"

#include <stdio.h>

/* The kind of link on a route. */
static int server_link_kind(const mlfab_node *node, uint32_t route) {
  static const uint8_t kinds[] = {MLFAB__LINK_SERVER, MLFAB__LINK_PLANNER, MLFAB__LINK_RESHARD};
  uint32_t which = route / node->config.servers;
  return which < MLFAB__COUNT(kinds) ? kinds[which] : MLFAB__LINK_VOTER;
}

/* Declares a server dead for one role: the worker role; the scheduler role, which only stops planning for it; or the
 * server role, whose slices cannot go there. */
static void server_link_dead(mlfab_node *node, uint32_t index, const char *why, int left) {
  uint32_t server = mlfab__node_server_of(node, index);
  int kind = server_link_kind(node, index);
  mlfab__route *route = &node->routes[index];
  char text[180];
  if (route->dead || kind == MLFAB__LINK_VOTER) return;
  route->dead = 1;
  snprintf(route->died, sizeof route->died, "%.127s", why);
  node->stats.peers_died += kind == MLFAB__LINK_SERVER;
  mlfab__roles_gone(node, kind, server, left);
  if (kind == MLFAB__LINK_SERVER) {
    snprintf(text, sizeof text, "dead: %s", why);
    mlfab__node_emit(node, MLFAB_EVENT_DEAD, (int32_t)server, 1, 0, MLFAB_ERR_PEER_DEAD, text);
  } else if (kind == MLFAB__LINK_RESHARD || node->is_worker || node->is_server) {
    return;
  }
  /* The fabric is complete without it. A model may need it: server 0, or the call that begins a model, reports it. */
  if (node->places[server].info.added || (node->running && server != 0)) {
    mlfab__server_link_check(node);
    return;
  }
  snprintf(text, sizeof text, "joining: server %u is dead: %s", server, why);
  mlfab__node_fail(node, MLFAB_ERR_PEER_DEAD, (int32_t)server, 1, text);
}

/* After a break the node calls a server again for 5 beats; after a silence the server is dead at once, unless it has
 * replicas. A break before HELLO_ACK does not restart the 5 beats: else the node would call for ever. */
MLFAB__INTERNAL void mlfab__server_link_down(mlfab_node *node, const mlfab__link *was,
                                             uint32_t link, const char *why) {
  uint32_t index = mlfab__node_route_of(node, was->kind, was->peer);
  mlfab__route *route = &node->routes[index];
  if (route->link != link) return;
  int silent = was->ended == MLFAB__ENDED_SILENT, told = was->ended == MLFAB__ENDED_TOLD;
  if (was->greeted && !silent) route->heard_ns = node->now_ns;
  mlfab__node_arm_at(node, MLFAB__TIMER_ROUTE, index,
                     silent ? node->now_ns : mlfab__node_round(node, node->now_ns + 1));
  route->link = MLFAB__NO_LINK;
  int vain = !route->greeted && was->heard_ns == was->since_ns;
  route->vain = vain ? (uint8_t)mlfab__min(route->vain + 1, UINT8_MAX) : 0;
  /* If a patience of 5 beats runs, calls stay frequent. */
  int hurried = index >= 2 * node->config.servers || mlfab__node_place(node, index)->info.added;
  route->retry_ns = mlfab__node_retry(node, hurried ? 0 : route->vain);
  /* The reason that the peer has told is better than the end of the link. */
  if (!told) snprintf(route->why, sizeof route->why, "%s", why);
  /* Perhaps only the connection broke: then the same copy answers at once. */
  if (node->copies && (!was->greeted || silent || told)) node->copies->toggle(node, index);
  mlfab__roles_lost(node, was->kind, was->peer);
}

MLFAB__INTERNAL int mlfab__server_link_wanted(const mlfab_node *node, uint32_t route) {
  uint32_t server = mlfab__node_server_of(node, route);
  int kind = server_link_kind(node, route);
  if (kind == MLFAB__LINK_VOTER) return 1;
  if (node->places[server].vacant) return 0;
  if (kind == MLFAB__LINK_RESHARD && (server == node->server_number || node->standby)) return 0;
  /* By this link server 0 notices when the server goes. */
  if (kind == MLFAB__LINK_RESHARD && node->is_coordinator && node->places[server].info.added)
    return 1;
  return mlfab__roles_want(node, kind, server, "");
}

MLFAB__INTERNAL void mlfab__server_link_call(mlfab_node *node, uint32_t index) {
  mlfab__route *route = &node->routes[index];
  route->connecting = 1;
  route->connect_ns = node->now_ns;
  mlfab__node_arm(node, MLFAB__TIMER_ROUTE, index, node->now_ns);
  mlfab__node_act(node, MLFAB_ACTION_CONNECT, 0, MLFAB__TOKEN_SERVER + index);
}

MLFAB__INTERNAL void mlfab__server_link_failed(mlfab_node *node, uint32_t index, const char *why) {
  mlfab__route *route = &node->routes[index];
  route->connecting = 0;
  route->retry_ns = node->now_ns + mlfab__node_beat(node) / 5;
  snprintf(route->why, sizeof route->why, "%s", why);
  if (node->copies) node->copies->toggle(node, index);
}

MLFAB__INTERNAL void mlfab__server_link_up(mlfab_node *node, uint32_t number, uint32_t index) {
  mlfab__route *route = &node->routes[number];
  int kind = server_link_kind(node, number);
  uint32_t role = kind == MLFAB__LINK_SERVER    ? node->config.roles
                  : kind == MLFAB__LINK_PLANNER ? MLFAB_ROLE_SCHEDULER
                  : kind == MLFAB__LINK_VOTER   ? MLFAB__ROLE_VOTER
                                                : MLFAB_ROLE_SERVER;
  if (route->link != MLFAB__NO_LINK)
    mlfab__node_hang_up(node, route->link, "replaced by a newer connection");
  route->connecting = 0;
  route->link = index;
  if (route->greeted) node->stats.reconnects++;
  mlfab__link *link = &node->links[index];
  link->kind = (uint8_t)kind;
  link->peer = mlfab__node_server_of(node, number);
  mlfab__hello hello = {node->id,
                        node->incarnation,
                        role,
                        node->config.progress == MLFAB_PROGRESS_HAND,
                        node->config.accumulators,
                        node->config.host,
                        node->nonce,
                        node->term};
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  mlfab__node_post(node, index, MLFAB__HELLO, meta, mlfab__encode_hello(meta, &hello));
}

/* The server has answered HELLO, or repeats its answer. */
static void server_link_greeted(mlfab_node *node, uint32_t index, mlfab__hello_ack *ack) {
  mlfab__link *link = &node->links[index];
  int kind = link->kind;
  uint32_t server = link->peer, number = mlfab__node_route_of(node, kind, server);
  mlfab__greeting greeting = {.ack = ack};
  mlfab__route *route = &node->routes[number];
  if (node->copies && !node->copies->greeted(node, index, route, ack)) return;
  if (mlfab__roles_hello(node, kind, server, &greeting)) {
    server_link_dead(node, number, greeting.why, 0);
    mlfab__node_doom(node, index);
    return;
  }
  link->greeted = route->greeted = 1;
  if (kind == MLFAB__LINK_RESHARD || kind == MLFAB__LINK_VOTER) link->nonce = ack->nonce;
  if (kind == MLFAB__LINK_RESHARD && node->growth) node->growth->tell(node, index);
  mlfab__roles_up(node, kind, server, &greeting);
  if (greeting.died) snprintf(route->died, sizeof route->died, "%s", greeting.died);
  mlfab__server_link_check(node);
}

MLFAB__INTERNAL int mlfab__server_link_here(const mlfab_node *node, uint32_t server) {
  int vacant = node->places[server].vacant || node->routes[server].dead;
  return server == node->server_number || !vacant;
}

/* Takes server 0's report on another worker, or on a server that has joined. */
static void server_link_told(mlfab_node *node, const mlfab__member *member) {
  int dead = member->kind == MLFAB_EVENT_DEAD;
  if (member->node >= node->config.workers) {
    if (node->growth) node->growth->member(node, member);
    return;
  }
  if (node->is_server) return; /* a server sees it by itself */
  mlfab__node_emit(
      node, member->kind, (int32_t)member->node, 0, member->incarnation,
      dead ? MLFAB_ERR_PEER_DEAD : 0,
      dead ? "server 0 reports that it is dead" : "server 0 reports that it left or joined");
}

MLFAB__INTERNAL void mlfab__server_link_frame(mlfab_node *node, uint32_t index,
                                              const mlfab__frame_in *frame) {
  uint32_t number = mlfab__node_route_of(node, node->links[index].kind, node->links[index].peer);
  mlfab__route *route = &node->routes[number];
  mlfab__hello_ack ack;
  mlfab__refuse refuse;
  mlfab__bye bye;
  mlfab__member member;
  mlfab__waiting waiting;
  char text[MLFAB__TEXT_MAX + 64];
  /* A frame of a copy that stands by proves only that the copy lives. */
  if (node->links[index].greeted || !node->copies) route->heard_ns = node->now_ns;
  switch (frame->type) {
    case MLFAB__HEARTBEAT:
      return;
    case MLFAB__HELLO_ACK:
      if (mlfab__decode_hello_ack(frame->meta, frame->meta_bytes, &ack)) break;
      server_link_greeted(node, index, &ack);
      return;
    case MLFAB__REFUSE:
      if (mlfab__decode_refuse(frame->meta, frame->meta_bytes, &refuse)) break;
      snprintf(text, sizeof text, "refused: %s", refuse.text);
      server_link_dead(node, number, text, 0);
      mlfab__node_doom(node, index);
      return;
    case MLFAB__BYE:
      if (mlfab__decode_bye(frame->meta, frame->meta_bytes, &bye)) break;
      /* code 0: the server closes for good. An error: it gave up this link only, and we call again. */
      if (bye.code == 0 && (node->links[index].greeted || !node->copies))
        server_link_dead(node, number, "it has closed", 1);
      snprintf(route->why, sizeof route->why, "%.127s", bye.text);
      node->links[index].ended = MLFAB__ENDED_TOLD;
      mlfab__node_doom(node, index);
      return;
    case MLFAB__MEMBER:
      if (mlfab__decode_member(frame->meta, frame->meta_bytes, &member)) break;
      server_link_told(node, &member);
      return;
    case MLFAB__PLACE:
      if (!node->copies || node->copies->place(node, frame)) break;
      return;
    case MLFAB__WAITING:
      if (mlfab__decode_waiting(frame->meta, frame->meta_bytes, &waiting)) break;
      mlfab__request_told(&node->requests, (int)waiting.kind, waiting.request,
                          node->links[index].peer, waiting.rank, waiting.text);
      return;
    default:
      mlfab__roles_frame(node, index, frame);
      return;
  }
  mlfab__node_drop(node, index, MLFAB_ERR_FRAME, "a frame that does not parse");
}

MLFAB__INTERNAL void mlfab__server_link_across(mlfab_node *node, uint32_t server) {
  uint32_t index = mlfab__node_route_of(node, MLFAB__LINK_RESHARD, server);
  mlfab__route *route = &node->routes[index];
  if (route->link != MLFAB__NO_LINK) {
    mlfab__node_ready_link(node, route->link);
  } else if (server == node->server_number) {
    /* Out of memory: try again at the next look at the clock. */
    if (mlfab__inner_pair(node, MLFAB__PAIR_RESHARD, MLFAB__LINK_RESHARD, server,
                          MLFAB__LINK_RESHARD_IN, server))
      return;
    route->link = node->pairs[MLFAB__PAIR_RESHARD][0];
    node->reshard_links[server] = node->pairs[MLFAB__PAIR_RESHARD][1];
  } else if (!node->leaving) {
    route->dead = 0;
    route->heard_ns = node->now_ns;
    if (!route->connecting && !node->places[server].vacant) mlfab__server_link_call(node, index);
    mlfab__node_arm(node, MLFAB__TIMER_ROUTE, index, node->now_ns);
  }
}

/* Gives up a route: no process answers as this server. */
static void server_link_give_up(mlfab_node *node, uint32_t r) {
  const mlfab__route *route = &node->routes[r];
  const char *why = route->why[0] ? route->why : "silent";
  char text[128];
  if (node->copies) {
    node->copies->why(route, text);
    why = text;
  }
  server_link_dead(node, r, why, 0);
}

/* Calls a server without a link again, and declares it dead after 5 beats (20 if it has a replica), or at once if no
 * process has its number. A server that hung up because of our BYE is not dead. */
MLFAB__INTERNAL void mlfab__server_link_scan(mlfab_node *node, uint32_t r) {
  uint64_t beat = node->config.heartbeat_ns;
  mlfab__route *route = &node->routes[r];
  /* The scheduler role stays as long as the server role of this node. */
  int left = r < node->config.servers ? node->leaving : node->leaving == MLFAB__PARTS_ALL;
  int votes = r >= 3 * node->config.servers;
  const mlfab__place *place = mlfab__node_place(node, r);
  if (!votes && place->vacant && r >= 2 * node->config.servers &&
      mlfab__node_server_of(node, r) != node->server_number)
    server_link_dead(node, r, "no process has its number", 0);
  if (!mlfab__server_link_wanted(node, r) || route->link != MLFAB__NO_LINK || route->dead || left)
    return;
  mlfab__node_arm(node, MLFAB__TIMER_ROUTE, r, node->now_ns);
  if (node->phase == MLFAB__BOOTSTRAP_JOINING) return;
  /* No call waits for the link of a scheduler, so it may try for timeout_ns. */
  int across = r >= 2 * node->config.servers;
  uint64_t least = (node->copies ? MLFAB__HALT_BEATS : 5) * beat;
  uint64_t patience = r < node->config.servers || across ? least : node->config.timeout_ns;
  if (!votes && (route->greeted || across || place->info.added) &&
      node->now_ns - route->heard_ns >= mlfab__max(patience, least)) {
    server_link_give_up(node, r);
  } else if (route->connecting ? node->now_ns - route->connect_ns >= 4 * beat
                               : node->now_ns >= route->retry_ns) {
    if (route->connecting && node->copies) node->copies->toggle(node, r);
    mlfab__server_link_call(node, r);
  }
}

/* Does this node need the route to become ready? */
static int server_link_awaited(const mlfab_node *node, uint32_t index) {
  const mlfab__route *route = &node->routes[index];
  const mlfab__place *place = mlfab__node_place(node, index);
  return !route->greeted && !place->vacant && !place->info.added && !(node->running && route->dead);
}

MLFAB__INTERNAL void mlfab__server_link_check(mlfab_node *node) {
  if (node->phase != MLFAB__BOOTSTRAP_GREETING) return;
  for (uint32_t s = 0; node->is_worker && s < node->config.servers; s++) {
    if (server_link_awaited(node, s)) return;
  }
  /* On a server's node the scheduler may be late: until then updates are granted first come, first served. */
  int own = node->config.roles == MLFAB_ROLE_SCHEDULER;
  for (uint32_t s = 0; own && s < node->config.servers; s++) {
    if (server_link_awaited(node, node->config.servers + s)) return;
  }
  if (node->copies && !node->copies->admitted(node)) return;
  node->phase = MLFAB__BOOTSTRAP_READY;
}

MLFAB__INTERNAL void mlfab__server_link_begin(mlfab_node *node) {
  if (node->is_server && mlfab__inner_begin(node)) {
    mlfab__node_fail(node, MLFAB_ERR_MEMORY, MLFAB_NO_RANK, 0, "out of memory for the inner links");
  }
  for (uint32_t r = 0; r < node->nroutes; r++) {
    if (!mlfab__server_link_wanted(node, r)) continue;
    node->routes[r].heard_ns = node->now_ns;
    int votes = r >= 3 * node->config.servers;
    if (votes || mlfab__node_server_of(node, r) != node->server_number)
      mlfab__server_link_call(node, r);
  }
}

MLFAB__INTERNAL int mlfab__node_finished(const mlfab_node *node) {
  uint32_t servers = node->config.servers;
  for (uint32_t s = 0; s < servers; s++) {
    if (!node->routes[servers + s].dead && !node->places[s].vacant) return 0;
  }
  return 1;
}

MLFAB__INTERNAL void mlfab__server_link_say_why(mlfab_node *node) {
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
