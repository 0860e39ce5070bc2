/* caller.c - a node: the callers of its server role: workers, the scheduler, other servers. It judges HELLO, and
 * declares workers dead if they do not call again. See node.h. */
#include "node.h"

#include <stdio.h>

MLFAB__INTERNAL int mlfab__caller_init(mlfab_node *node) {
  uint32_t n = node->config.workers + 1, servers = node->config.servers;
  node->callers = mlfab__alloc_array(&node->env, n, sizeof *node->callers);
  node->reshard_links = mlfab__alloc_array(&node->env, servers, sizeof *node->reshard_links);
  if (!node->callers || !node->reshard_links) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < n; i++) node->callers[i].link = MLFAB__NO_LINK;
  for (uint32_t i = 0; i < servers; i++) node->reshard_links[i] = MLFAB__NO_LINK;
  return 0;
}

/* --- gone --- */

static void caller_tell(mlfab_node *node, uint32_t worker, uint32_t kind) {
  if (!node->is_coordinator) return;
  const mlfab__member member = {
      .node = worker, .incarnation = node->peers[worker].incarnation, .kind = kind};
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  uint32_t n = mlfab__encode_member(meta, &member);
  for (uint32_t w = 0; w < node->config.workers; w++) {
    uint32_t link = node->callers[w].link;
    if (w != worker && link != MLFAB__NO_LINK && !node->links[link].self)
      mlfab__node_post(node, link, MLFAB__MEMBER, meta, n);
  }
}

/* Marks a worker as left or dead, until it calls again. */
MLFAB__INTERNAL void mlfab__caller_gone(mlfab_node *node, uint32_t worker, int left) {
  mlfab__caller *caller = &node->callers[worker];
  if (caller->dead || caller->left) return;
  if (node->added && caller->incarnation == 0) { /* it left before this server came */
    caller->left = 1;
    mlfab__roles_gone(node, MLFAB__LINK_WORKER, worker, MLFAB__NEVER_HERE);
    return;
  }
  char text[64], silent[24];
  if (left) {
    snprintf(text, sizeof text, "left");
  } else {
    node->stats.peers_died++;
    uint64_t lost = caller->lost_ns;
    snprintf(text, sizeof text, lost ? "dead, its connection broke %s ago" : "dead, silent for %s",
             mlfab__duration(silent, node->now_ns - (lost ? lost : caller->heard_ns)));
  }
  uint32_t kind = left ? MLFAB_EVENT_LEFT : MLFAB_EVENT_DEAD;
  *(left ? &caller->left : &caller->dead) = 1;
  if (node->copies) node->copies->changed(node, worker);
  mlfab__roles_gone(node, MLFAB__LINK_WORKER, worker, left);
  mlfab__node_emit(node, kind, (int32_t)worker, 0, caller->incarnation,
                   left ? 0 : MLFAB_ERR_PEER_DEAD, text);
  caller_tell(node, worker, kind);
}

MLFAB__INTERNAL uint32_t mlfab__caller_awaited(const mlfab_node *node) {
  for (uint32_t w = 0; w < node->config.workers; w++) {
    if (!node->callers[w].left && !node->callers[w].dead) return w;
  }
  return MLFAB__NO_NODE;
}

MLFAB__INTERNAL void mlfab__caller_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                        const char *why) {
  (void)why;
  if (was->kind == MLFAB__LINK_RESHARD_IN) {
    if (node->reshard_links[was->peer] == link) node->reshard_links[was->peer] = MLFAB__NO_LINK;
    return;
  }
  mlfab__caller *caller = &node->callers[was->peer];
  if (caller->link != link) return;
  caller->link = MLFAB__NO_LINK;
  int silent = was->ended == MLFAB__ENDED_SILENT;
  if (!silent) caller->lost_ns = caller->heard_ns = node->now_ns;
  mlfab__node_arm_at(node, MLFAB__TIMER_WORKER, was->peer,
                     silent ? node->now_ns : mlfab__node_round(node, node->now_ns + 1));
  mlfab__roles_lost(node, was->kind, was->peer);
}

MLFAB__INTERNAL void mlfab__caller_await(mlfab_node *node) {
  for (uint32_t w = 0; w < node->config.workers; w++) {
    node->callers[w].heard_ns = node->now_ns;
    node->callers[w].lost_ns = 0;
    mlfab__node_arm(node, MLFAB__TIMER_WORKER, w, node->now_ns + 5 * node->config.heartbeat_ns);
  }
}

/* Declares a worker dead after 5 beats without a link, or after 20 if there was never a call. */
MLFAB__INTERNAL void mlfab__caller_scan(mlfab_node *node, uint32_t w) {
  uint64_t beat = node->config.heartbeat_ns;
  mlfab__caller *caller = &node->callers[w];
  if (caller->link != MLFAB__NO_LINK || caller->dead || caller->left) return;
  if (node->leaving == MLFAB__PARTS_ALL) return;
  if (node->copies && !node->copies->judges(node, caller)) return;
  uint64_t due_ns = caller->heard_ns + (caller->incarnation ? 5 : 20) * beat;
  /* A connection that broke shortens the wait, because a live worker calls again within a fifth of a beat; with copies
   * it may call the other copy first. */
  uint64_t lost = caller->hand ? 0 : caller->lost_ns;
  if (lost && !node->copies) due_ns = mlfab__min(due_ns, lost + 2 * beat);
  int early = node->phase == MLFAB__BOOTSTRAP_JOINING || node->phase == MLFAB__BOOTSTRAP_FAILED;
  if (early || node->now_ns < due_ns) {
    mlfab__node_arm(node, MLFAB__TIMER_WORKER, w, due_ns);
  } else {
    mlfab__caller_gone(node, w, 0);
  }
}

/* --- HELLO --- */

MLFAB__INTERNAL int mlfab__caller_issued(const mlfab_node *node, const mlfab__hello *hello,
                                         uint32_t server) {
  if (node->is_coordinator && (server == MLFAB__NO_NODE || !node->copies)) {
    mlfab__peer *peer = &node->peers[hello->node];
    if (node->copies) node->copies->issued(node, peer, hello);
    return peer->joined && hello->incarnation == peer->incarnation && hello->nonce == peer->nonce;
  }
  if (server == MLFAB__NO_NODE) return 1;
  const mlfab__place *place = &node->places[server];
  if (place->info.incarnation == 0) return 1;
  /* Server 0 is never restarted; the other servers may have been. */
  return hello->incarnation == place->info.incarnation
             ? hello->nonce == place->info.nonce
             : (server > 0 || node->copies) && hello->incarnation > place->info.incarnation;
}

/* Collects the answer from the roles, and sends it. Nonzero: refused. */
static int caller_answer(mlfab_node *node, uint32_t index, mlfab__greeting *greeting) {
  const mlfab__link *link = &node->links[index];
  int kind = link->kind;
  uint32_t peer = link->peer;
  memset(greeting->ack, 0, sizeof *greeting->ack);
  greeting->local = (link->caps & MLFAB_CAP_LOCAL) != 0;
  greeting->ack->server = node->server_number;
  greeting->ack->nonce = node->nonce;
  if (kind != MLFAB__LINK_VOTER_IN) node->links[index].term = node->term;
  int code = mlfab__roles_hello(node, kind, peer, greeting);
  if (code) return mlfab__node_refuse(node, index, code, (int32_t)peer, "refused");
  greeting->ack->term = node->term;
  uint8_t meta[160];
  mlfab__node_post(node, index, MLFAB__HELLO_ACK, meta,
                   mlfab__encode_hello_ack(meta, greeting->ack));
  if (node->growth) node->growth->tell(node, index);
  if (node->copies) node->copies->answered(node, index);
  return 0;
}

static void caller_take(mlfab_node *node, uint32_t index, int kind, uint32_t peer, uint64_t nonce) {
  mlfab__link *link = &node->links[index];
  link->kind = (uint8_t)kind;
  link->peer = peer;
  link->nonce = nonce;
  link->greeted = 1;
}

MLFAB__INTERNAL int mlfab__caller_greet(mlfab_node *node, uint32_t index, int kind, uint32_t peer,
                                        const mlfab__hello *hello) {
  mlfab__hello_ack ack;
  mlfab__greeting greeting = {.ack = &ack, .incarnation = hello->incarnation};
  caller_take(node, index, kind, peer, hello->nonce);
  int code = caller_answer(node, index, &greeting);
  if (!code) mlfab__roles_up(node, kind, peer, &greeting);
  return code;
}

MLFAB__INTERNAL mlfab__caller *mlfab__caller_admit(mlfab_node *node, uint32_t index, int kind,
                                                   uint32_t number, const mlfab__hello *hello) {
  mlfab__caller *caller = &node->callers[number];
  if (caller->link != MLFAB__NO_LINK && caller->link != index) {
    node->stats.reconnects += kind == MLFAB__LINK_WORKER;
    mlfab__node_hang_up(node, caller->link, "replaced by a newer connection");
  }
  caller_take(node, index, kind, number, hello->nonce);
  caller->link = index;
  caller->heard_ns = node->now_ns;
  caller->lost_ns = 0;
  if (node->is_coordinator) node->peers[hello->node].awaited_ns = 0;
  return caller;
}

/* Takes HELLO of another server on a new link to our server role. */
static int caller_server(mlfab_node *node, uint32_t index, const mlfab__hello *hello,
                         const mlfab__frame_in *frame) {
  uint32_t first = mlfab__node_of_server(node, 0), copy = hello->node - first;
  uint32_t servers = node->config.servers, server = copy % servers;
  if (hello->node < first || copy >= servers * (1 + node->config.replicas) ||
      server == node->server_number)
    return mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                              "a HELLO of a server that does not exist");
  if (!mlfab__caller_issued(node, hello, copy))
    return mlfab__node_refuse(node, index, MLFAB_ERR_FENCED, (int32_t)server,
                              "not the process that joined as this server");
  uint32_t old = node->reshard_links[server];
  mlfab__route *route = &node->routes[mlfab__node_route_of(node, MLFAB__LINK_RESHARD, server)];
  int newer = node->copies ? node->copies->newer(node, index, route, hello->term) : 0;
  if (newer < 0 || (!newer && mlfab__claim_ask(node, index, old, hello->nonce, frame)))
    return MLFAB_ERR_AGAIN;
  if (old != MLFAB__NO_LINK && old != index)
    mlfab__node_hang_up(node, old, "replaced by a newer connection");
  node->reshard_links[server] = index;
  return mlfab__caller_greet(node, index, MLFAB__LINK_RESHARD_IN, server, hello);
}

/* Takes HELLO of any kind on a new link to our server role. */
MLFAB__INTERNAL int mlfab__caller_hello(mlfab_node *node, uint32_t index,
                                        const mlfab__frame_in *frame) {
  mlfab__hello hello;
  int parsed = !mlfab__decode_hello(frame->meta, frame->meta_bytes, &hello);
  if (parsed && node->copies && node->copies->hello(node, index, &hello, frame)) return 0;
  parsed = parsed && node->is_server;
  if (parsed && hello.roles == MLFAB_ROLE_SCHEDULER && node->scheduler_hello)
    return node->scheduler_hello(node, index, &hello, frame);
  if (parsed && hello.roles == MLFAB_ROLE_SERVER) return caller_server(node, index, &hello, frame);
  if (!parsed || hello.node >= node->config.workers || hello.incarnation == 0)
    return mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                              "a HELLO that does not fit this node");
  uint32_t worker = hello.node;
  if (node->is_worker && worker == (uint32_t)node->config.rank)
    return mlfab__node_refuse(node, index, MLFAB_ERR_RANK_TAKEN, (int32_t)worker,
                              "this worker is beside the server");
  int fresh = hello.incarnation != node->callers[worker].incarnation;
  int fenced = hello.incarnation < node->callers[worker].incarnation ||
               !mlfab__caller_issued(node, &hello, MLFAB__NO_NODE);
  if (fenced)
    return mlfab__node_refuse(node, index, MLFAB_ERR_FENCED, (int32_t)worker,
                              "a newer process has this rank");
  if (mlfab__claim_ask(node, index, node->callers[worker].link, hello.nonce, frame))
    return MLFAB_ERR_AGAIN;
  mlfab__caller *caller = mlfab__caller_admit(node, index, MLFAB__LINK_WORKER, worker, &hello);
  mlfab__hello_ack ack;
  mlfab__greeting greeting = {&hello, &ack, hello.incarnation, fresh, 0, NULL, NULL};
  int code = caller_answer(node, index, &greeting);
  if (code) return code;
  caller->incarnation = hello.incarnation;
  caller->hand = hello.hand != 0;
  caller->dead = caller->left = 0;
  if (node->copies) node->copies->changed(node, worker);
  mlfab__roles_up(node, MLFAB__LINK_WORKER, worker, &greeting);
  if (fresh)
    mlfab__node_emit(node, MLFAB_EVENT_JOINED, (int32_t)worker, 0, hello.incarnation, 0, "joined");
  return 0;
}

/* --- frames --- */

MLFAB__INTERNAL void mlfab__caller_frame(mlfab_node *node, uint32_t index,
                                         const mlfab__frame_in *frame) {
  int kind = node->links[index].kind;
  uint32_t peer = node->links[index].peer;
  mlfab__member member;
  if (kind != MLFAB__LINK_RESHARD_IN) node->callers[peer].heard_ns = node->now_ns;
  switch (frame->type) {
    case MLFAB__HEARTBEAT:
      break;
    case MLFAB__BYE:
      if (kind == MLFAB__LINK_WORKER) mlfab__caller_gone(node, peer, 1);
      mlfab__node_doom(node, index);
      break;
    case MLFAB__MEMBER:
      if (kind == MLFAB__LINK_RESHARD_IN && peer == 0 &&
          !mlfab__decode_member(frame->meta, frame->meta_bytes, &member)) {
        if (node->growth) node->growth->member(node, &member);
      } else if (!node->copies || node->copies->member(node, index, frame))
        mlfab__node_drop(node, index, MLFAB_ERR_FRAME, "a MEMBER that does not parse");
      break;
    default:
      mlfab__roles_frame(node, index, frame);
  }
}
