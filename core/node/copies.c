/* copies.c - a node of a fabric whose servers have replicas. See copies.h. */
#include "copies.h"

#include <stdio.h>

/* Tells a caller to try the other copy, and closes its link. */
static void copies_turn_away(mlfab_node *node, uint32_t index, const char *why) {
  mlfab__bye bye = {.code = MLFAB_ERR_AGAIN, .nonce = node->nonce};
  uint8_t meta[MLFAB__TEXT_MAX + 32];
  snprintf(bye.text, sizeof bye.text, "%.*s", (int)sizeof bye.text - 1, why);
  mlfab__node_post(node, index, MLFAB__BYE, meta, mlfab__encode_bye(meta, &bye));
  node->links[index].closing = 1;
  node->links[index].heard_ns = node->now_ns;
}

/* --- the copy that serves --- */

MLFAB__INTERNAL void mlfab__copy_serve(mlfab_node *node, uint32_t term) {
  node->term = term;
  if (!node->standby) return;
  node->standby = 0;
  node->replica->standby_why[0] = 0;
  node->replica->served_ns = node->now_ns;
  /* The other copy may have issued numbers that this copy does not know. */
  if (term > 1 && node->incarnations < term << 16) node->incarnations = term << 16;
  mlfab__caller_await(node);
  /* Workers need time to notice that the other copy does not answer any more. */
  for (uint32_t w = 0; w < node->config.workers; w++)
    node->callers[w].heard_ns += 5 * node->config.heartbeat_ns;
}

MLFAB__INTERNAL void mlfab__copy_stand_by(mlfab_node *node, const char *why) {
  mlfab__copies *copies = node->replica;
  snprintf(copies->standby_why, sizeof copies->standby_why, "%s", why);
  if (node->standby) return;
  node->standby = 1;
  for (uint32_t i = 0; i < node->nlinks; i++) {
    mlfab__link *link = &node->links[i];
    if (link->kind == MLFAB__LINK_FREE || link->self || link->closing) continue;
    if (link->kind == MLFAB__LINK_WORKER || link->kind == MLFAB__LINK_SCHEDULER ||
        link->kind == MLFAB__LINK_RESHARD_IN || link->kind == MLFAB__LINK_JOIN_IN)
      copies_turn_away(node, i, why);
    else if (link->kind == MLFAB__LINK_RESHARD)
      mlfab__node_doom(node, i);
  }
}

/* --- the places of voters --- */

/* Tells a caller the places of the other voters of its shard: a voter may be a process that has replaced another. The
 * scheduler tells copies of server 0 the places for all shards, because they welcome the processes that join. */
static void copies_tell_places(mlfab_node *node, uint32_t index) {
  const mlfab__link *link = &node->links[index];
  for (uint32_t r = 3 * node->config.servers; r < node->nroutes; r++) {
    uint32_t voter = mlfab__node_server_of(node, r);
    const mlfab__place *place = &node->places[voter];
    int scheduler = voter + 1 == node->nplaces;
    uint32_t shard = link->peer % node->config.servers; /* a voter that calls */
    if (!node->is_server && shard != 0 && voter % node->config.servers != shard) continue;
    if ((scheduler && link->kind != MLFAB__LINK_VOTER_IN) || place->info.incarnation == 0) continue;
    if (place->moved) continue; /* its MEMBER is under way */
    uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
    mlfab__node_post(node, index, MLFAB__PLACE, meta,
                     mlfab__encode_member_info(meta, sizeof meta, &place->info));
  }
}

/* Called when another process has become a voter. */
static void copies_tell_all_places(mlfab_node *node) {
  for (uint32_t i = 0; i < node->nlinks; i++) {
    const mlfab__link *link = &node->links[i];
    if ((link->kind == MLFAB__LINK_WORKER || link->kind == MLFAB__LINK_RESHARD_IN ||
         link->kind == MLFAB__LINK_VOTER_IN || link->kind == MLFAB__LINK_SCHEDULER) &&
        link->greeted && !link->self)
      copies_tell_places(node, i);
  }
}

/* Takes the present place of a copy or of the scheduler from a server. Errors: FRAME. */
static int copies_place(mlfab_node *node, const mlfab__frame_in *frame) {
  mlfab__member_info info;
  uint32_t n = mlfab__decode_member_info(frame->meta, frame->meta_bytes, &info);
  uint32_t first = mlfab__node_of_server(node, 0);
  if (n == 0 || n != frame->meta_bytes || info.node < first || info.node - first >= node->nplaces)
    return MLFAB_ERR_FRAME;
  mlfab__place *place = &node->places[info.node - first];
  if (info.incarnation <= place->info.incarnation) return 0;
  place->info = info;
  place->moved = 0;
  /* A later call of the process itself is then no news. */
  if (node->voter != MLFAB__NO_NODE && node->is_server) copies_tell_all_places(node);
  return 0;
}

/* Takes a voter's listening address. Errors: FRAME. */
static int copies_voter_member(mlfab_node *node, uint32_t voter, const mlfab__frame_in *frame) {
  mlfab__member member;
  mlfab__place *place = &node->places[voter];
  if (mlfab__decode_member(frame->meta, frame->meta_bytes, &member) ||
      member.node != mlfab__node_of_server(node, voter))
    return MLFAB_ERR_FRAME;
  memcpy(place->info.addresses, member.addresses, MLFAB__ADDRESSES_MAX);
  int news = place->moved;
  place->moved = 0;
  if (news) copies_tell_all_places(node);
  return 0;
}

/* Takes a worker's listening address. */
static int copies_member(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  mlfab__member member;
  uint32_t worker = node->links[index].peer;
  if (node->links[index].kind != MLFAB__LINK_WORKER || !node->is_coordinator ||
      mlfab__decode_member(frame->meta, frame->meta_bytes, &member) || member.node != worker)
    return MLFAB_ERR_FRAME;
  mlfab__peer *peer = &node->peers[worker];
  if (!peer->addresses) peer->addresses = mlfab__alloc(&node->env, MLFAB__ADDRESSES_MAX);
  if (!peer->addresses) return MLFAB_ERR_MEMORY;
  memcpy(peer->addresses, member.addresses, MLFAB__ADDRESSES_MAX);
  return 0;
}

/* Tells the address of this node: a copy of server 0 that begins to serve does not know the workers' addresses, and a
 * voter's process may have replaced another. It waits for the answer to HELLO: until then a process with a claimed
 * number may send only HELLO (claim.c). */
static void copies_say_where(mlfab_node *node, uint32_t index) {
  const mlfab__link *link = &node->links[index];
  int votes = link->kind == MLFAB__LINK_VOTER;
  if (!votes && (link->kind != MLFAB__LINK_SERVER || link->peer != 0)) return;
  mlfab__member self = {.node = node->id, .incarnation = node->incarnation};
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  memcpy(self.addresses, node->addresses, sizeof self.addresses);
  mlfab__node_post(node, index, MLFAB__MEMBER, meta, mlfab__encode_member(meta, &self));
}

/* --- callers --- */

/* Does this voter speak with the node with this id? */
static int copies_votes_with(const mlfab_node *node, uint32_t voter) {
  uint32_t first = 3 * node->config.servers, n = node->nroutes;
  for (uint32_t r = first; r < n; r++) {
    if (mlfab__node_server_of(node, r) == voter) return 1;
  }
  return 0;
}

/* HELLO of another voter on a new link. */
static int copies_voter_hello(mlfab_node *node, uint32_t index, const mlfab__hello *hello,
                              const mlfab__frame_in *frame) {
  uint32_t first = node->config.workers, voter = hello->node - first;
  if (hello->node < first || !copies_votes_with(node, voter))
    return mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                              "a HELLO of a node that does not vote with this one");
  mlfab__place *place = &node->places[voter];
  int older = hello->incarnation < place->info.incarnation;
  if (older || (hello->incarnation == place->info.incarnation && hello->nonce != place->info.nonce))
    return mlfab__node_refuse(node, index, MLFAB_ERR_FENCED, (int32_t)voter,
                              "not the process that joined as this copy");
  uint32_t old = node->voter_links[voter];
  if (mlfab__claim_ask(node, index, old, hello->nonce, frame)) return MLFAB_ERR_AGAIN;
  if (old != MLFAB__NO_LINK && old != index)
    mlfab__node_hang_up(node, old, "replaced by a newer connection");
  int newer = hello->incarnation > place->info.incarnation;
  place->info.incarnation = hello->incarnation;
  place->info.nonce = hello->nonce;
  if (newer) place->moved = 1;
  node->voter_links[voter] = index;
  return mlfab__caller_greet(node, index, MLFAB__LINK_VOTER_IN, voter, hello);
}

static int copies_hello(mlfab_node *node, uint32_t index, const mlfab__hello *hello,
                        const mlfab__frame_in *frame) {
  int votes = hello->roles == MLFAB__ROLE_VOTER && node->voter != MLFAB__NO_NODE;
  if (votes) copies_voter_hello(node, index, hello, frame);
  if (votes || !node->is_server || !node->standby) return votes;
  copies_turn_away(node, index, node->replica->standby_why);
  return 1;
}

static int copies_newer(mlfab_node *node, uint32_t index, mlfab__route *route, uint32_t term) {
  if (term < route->term) {
    copies_turn_away(node, index, "another copy of this server serves");
    return -1;
  }
  int newer = term > route->term;
  route->term = term;
  return newer;
}

/* Completes a record: the former copy of server 0 may have issued incarnations that this copy does not know. */
static void copies_issued(const mlfab_node *node, mlfab__peer *peer, const mlfab__hello *hello) {
  if (peer->joined || node->meets || node->replica->peers_known) return;
  peer->joined = 1;
  peer->incarnation = hello->incarnation;
  peer->nonce = hello->nonce;
}

static void copies_answered(mlfab_node *node, uint32_t index) {
  if (node->voter != MLFAB__NO_NODE &&
      (node->is_server || node->links[index].kind == MLFAB__LINK_VOTER_IN))
    copies_tell_places(node, index);
}

static void copies_changed(mlfab_node *node, uint32_t id) {
  mlfab__touched(node->replica->peers_touch, id);
}

static int copies_judges(mlfab_node *node, mlfab__caller *caller) {
  const mlfab__copies *copies = node->replica;
  if (node->standby) return 0; /* it has no callers: see mlfab__copy_serve */
  if (copies->leased && !copies->leased(copies->leased_copy, node->now_ns))
    caller->heard_ns = node->now_ns;
  return 1;
}

/* --- routes --- */

/* The voters that this voter calls. A copy calls the other copy and the scheduler; the scheduler calls all copies. */
static uint32_t copies_route_voter(const mlfab_node *node, uint32_t index) {
  uint32_t servers = node->config.servers;
  if (!node->is_server) return index;
  return index == 0 ? (node->voter + servers) % (MLFAB__COPIES * servers) : MLFAB__COPIES * servers;
}

static void copies_toggle(mlfab_node *node, uint32_t index) {
  mlfab__route *route = &node->routes[index];
  if (index >= 3 * node->config.servers) return;
  char why[sizeof route->other];
  snprintf(why, sizeof why, "%.95s", route->why);
  snprintf(route->why, sizeof route->why, "%s", route->other);
  memcpy(route->other, why, sizeof why);
  route->copy ^= 1;
}

static int copies_greeted(mlfab_node *node, uint32_t index, mlfab__route *route,
                          const mlfab__hello_ack *ack) {
  mlfab__link *link = &node->links[index];
  int votes = link->kind == MLFAB__LINK_VOTER;
  if (ack->term < route->term && !votes) { /* it does not know yet that it was replaced */
    snprintf(route->why, sizeof route->why, "a copy that was replaced");
    link->ended = MLFAB__ENDED_TOLD;
    mlfab__node_doom(node, index);
    return 0;
  }
  if (!votes) route->term = link->term = ack->term;
  if (!link->greeted) copies_say_where(node, index);
  return 1;
}

static void copies_why(const mlfab__route *route, char text[128]) {
  const char *words[2] = {route->why[0] ? route->why : "silent",
                          route->other[0] ? route->other : "silent"};
  snprintf(text, 128, "itself: %.52s; replica: %.52s", words[route->copy], words[!route->copy]);
}

/* Has another voter admitted this process, which takes the place of a voter? */
static int copies_admitted(const mlfab_node *node) {
  int admitted = node->voter == MLFAB__NO_NODE || node->fresh;
  for (uint32_t r = 3 * node->config.servers; !admitted && r < node->nroutes; r++)
    admitted |= node->routes[r].greeted;
  return admitted;
}

/* --- links between voters --- */

static void copies_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  mlfab__refuse refuse;
  char text[MLFAB__TEXT_MAX];
  if (frame->type == MLFAB__REFUSE &&
      !mlfab__decode_refuse(frame->meta, frame->meta_bytes, &refuse)) {
    /* Another process has become this copy. */
    snprintf(text, sizeof text, "joining: %.200s", refuse.text);
    mlfab__node_fail(node, refuse.code, refuse.rank, 1, text);
  }
  mlfab__server_link_frame(node, index, frame);
}

static void copies_in_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  uint32_t voter = node->links[index].peer;
  switch (frame->type) {
    case MLFAB__HEARTBEAT:
      break;
    case MLFAB__BYE:
      mlfab__roles_gone(node, MLFAB__LINK_VOTER_IN, voter, 1);
      mlfab__node_doom(node, index);
      break;
    case MLFAB__MEMBER:
      if (copies_voter_member(node, voter, frame))
        mlfab__node_drop(node, index, MLFAB_ERR_FRAME, "a MEMBER that does not parse");
      break;
    default:
      mlfab__roles_frame(node, index, frame);
  }
}

static void copies_in_down(mlfab_node *node, const mlfab__link *was, uint32_t index,
                           const char *why) {
  (void)why;
  if (node->voter_links[was->peer] != index) return;
  node->voter_links[was->peer] = MLFAB__NO_LINK;
  mlfab__roles_lost(node, was->kind, was->peer);
}

/* --- joining --- */

/* A copy without the others stops answering after 4 of its heartbeats. The other copy begins after 5 of its own. */
static int copies_judge(const mlfab_node *node, const mlfab__join *join, const char *who,
                        char *text, size_t room) {
  uint64_t here = node->config.heartbeat_ns;
  if (join->heartbeat_ns == here) return 0;
  mlfab__format(
      text, room,
      "the configurations differ: heartbeat_ns (MLFAB_HEARTBEAT_MS) is %g ms at %s, %g ms at "
      "server 0",
      (double)join->heartbeat_ns / 1e6, who, (double)here / 1e6);
  return MLFAB_ERR_WORLD;
}

static int copies_rejects(mlfab_node *node, uint32_t index, uint32_t id) {
  const mlfab_config *c = &node->config;
  uint64_t served_ns = node->replica->served_ns;
  /* Present workers have this long to greet a copy of server 0 that has taken over. For a copy of a server the other
   * voters know whether it lives. */
  int early = served_ns && node->now_ns - served_ns < 5 * c->heartbeat_ns &&
              (id < c->workers || id - c->workers >= MLFAB__COPIES * c->servers);
  if (id == MLFAB__NO_NODE) {
    if (!node->standby || (node->meets && node->phase == MLFAB__BOOTSTRAP_JOINING)) return 0;
    copies_turn_away(node, index, node->replica->standby_why);
    return 1;
  }
  if (early) copies_turn_away(node, index, "this copy of server 0 has just begun to serve");
  return early;
}

/* Called if a copy of server 0 serves already: this node joins its fabric, instead of forming one. */
static void copies_meets_no_more(mlfab_node *node) {
  node->meets = 0;
  node->joined = node->incarnations = 0;
  for (uint32_t id = 0; id < node->nodes; id++) {
    mlfab__peer *peer = &node->peers[id];
    if (peer->link != MLFAB__NO_LINK) copies_turn_away(node, peer->link, "the fabric runs already");
    peer->joined = peer->hand = 0;
    peer->link = MLFAB__NO_LINK;
    peer->nonce = 0;
    peer->incarnation = 0;
  }
}

/* Stores this process as the place of its voter, which nodes learn by WELCOME or PLACE. */
static void copies_place_self(mlfab_node *node) {
  if (node->voter == MLFAB__NO_NODE) return;
  mlfab__place *place = &node->places[node->voter];
  place->info.incarnation = node->incarnation;
  place->info.nonce = node->nonce;
  memcpy(place->info.addresses, node->addresses, MLFAB__ADDRESSES_MAX);
}

static void copies_welcomed(mlfab_node *node) {
  if (node->meets) copies_meets_no_more(node);
  copies_place_self(node);
  if (node->fresh && !node->is_replica) node->standby = 0;
}

/* --- open and close --- */

static void copies_mirrored(mlfab_node *node, const mlfab__mirrored *part) {
  mlfab__copies *copies = node->replica;
  assert(copies->nmirrored < MLFAB__MIRRORED_MAX);
  copies->mirrored[copies->nmirrored++] = *part;
}

static int copies_open(mlfab_node *node) {
  uint32_t servers = node->config.servers, voters = MLFAB__COPIES * servers + 1;
  node->copies = mlfab__copies_of_servers();
  mlfab__copies *copies = node->replica = mlfab__alloc(&node->env, sizeof *copies);
  if (!copies) return MLFAB_ERR_MEMORY;
  node->nplaces = voters;
  node->rules[MLFAB__LINK_VOTER] = (mlfab__link_rule){copies_frame, mlfab__server_link_down, NULL};
  node->rules[MLFAB__LINK_VOTER_IN] = (mlfab__link_rule){copies_in_frame, copies_in_down, NULL};
  mlfab__peers_attach(node);
  if (node->voter == MLFAB__NO_NODE) return 0;
  node->nroutes += node->is_server ? MLFAB__COPIES : MLFAB__COPIES * servers;
  node->voter_links = mlfab__alloc_array(&node->env, voters, sizeof *node->voter_links);
  if (!node->voter_links) return MLFAB_ERR_MEMORY;
  for (uint32_t v = 0; v < voters; v++) node->voter_links[v] = MLFAB__NO_LINK;
  return 0;
}

static void copies_free(mlfab_node *node) {
  mlfab__free(&node->env, node->voter_links, node->nplaces * sizeof *node->voter_links);
  mlfab__free(&node->env, node->replica, sizeof *node->replica);
}

MLFAB__INTERNAL const mlfab__copies_table *mlfab__copies_of_servers(void) {
  static const mlfab__copies_table table = {
      copies_open,     copies_free,   copies_route_voter, copies_mirrored,      copies_hello,
      copies_newer,    copies_issued, copies_answered,    copies_member,        copies_changed,
      copies_judges,   copies_toggle, copies_greeted,     copies_place,         copies_why,
      copies_admitted, copies_judge,  copies_rejects,     mlfab__peers_welcome, copies_welcomed};
  return &table;
}
