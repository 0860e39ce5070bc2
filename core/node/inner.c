/* inner.c - a node: the links between its own roles, which no transport sees. See node.h. */
#include "node.h"

MLFAB__INTERNAL int mlfab__inner_pair(mlfab_node *node, uint32_t which, int asking,
                                      uint32_t asking_peer, int other, uint32_t other_peer) {
  uint32_t up = mlfab__node_new_link(node);
  if (up != MLFAB__NO_LINK) node->links[up].kind = (uint8_t)asking;
  uint32_t down = up == MLFAB__NO_LINK ? up : mlfab__node_new_link(node);
  if (down == MLFAB__NO_LINK) {
    if (up != MLFAB__NO_LINK) mlfab__node_free_link(node, up);
    return MLFAB_ERR_MEMORY;
  }
  node->links[down].kind = (uint8_t)other;
  for (uint32_t i = 0; i < 2; i++) {
    mlfab__link *link = &node->links[i ? down : up];
    link->self = (uint8_t)(1 + 2 * which + i);
    link->greeted = 1;
    link->peer = i ? other_peer : asking_peer;
    link->caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_GHOST | MLFAB_CAP_CHECKED;
  }
  node->pairs[which][0] = up;
  node->pairs[which][1] = down;
  mlfab__node_ready_link(node, up);
  mlfab__node_ready_link(node, down);
  return 0;
}

MLFAB__INTERNAL void mlfab__inner_greet(mlfab_node *node, uint32_t which, int fresh) {
  mlfab__hello hello = {
      node->id,          node->incarnation, node->config.roles, 0, node->config.accumulators,
      node->config.host, node->nonce,       node->term};
  mlfab__hello_ack ack;
  memset(&ack, 0, sizeof ack);
  const mlfab__link *asks = &node->links[node->pairs[which][0]];
  const mlfab__link *answers = &node->links[node->pairs[which][1]];
  int kinds[2] = {asks->kind, answers->kind};
  uint32_t peers[2] = {asks->peer, answers->peer};
  mlfab__greeting greeting = {&hello, &ack, node->incarnation, fresh, 1, NULL, NULL};
  if (mlfab__roles_hello(node, kinds[1], peers[1], &greeting)) return;
  if (kinds[1] == MLFAB__LINK_WORKER) {
    mlfab__caller *self = &node->callers[peers[1]];
    self->incarnation = node->incarnation;
    self->dead = self->left = 0;
  }
  mlfab__roles_up(node, kinds[1], peers[1], &greeting);
  ack.kind = MLFAB__ACK_ALIVE;
  ack.server = peers[0];
  mlfab__greeting answer = {.ack = &ack};
  mlfab__roles_up(node, kinds[0], peers[0], &answer);
  for (uint32_t i = 0; i < 2; i++) mlfab__node_ready_link(node, node->pairs[which][i]);
}

MLFAB__INTERNAL void mlfab__inner_greet_again(mlfab_node *node) {
  node->self_lost = 0;
  for (uint32_t p = MLFAB__PAIRS; p-- > 0;) {
    if (node->pairs[p][0] != MLFAB__NO_LINK) mlfab__inner_greet(node, p, 0);
  }
}

MLFAB__INTERNAL void mlfab__inner_lose(mlfab_node *node) {
  if (node->self_lost) return;
  node->self_lost = 1;
  for (int i = 0; i < 2 * MLFAB__PAIRS; i++) {
    uint32_t index = node->pairs[i / 2][i % 2];
    if (index == MLFAB__NO_LINK) continue;
    mlfab__link *link = &node->links[index];
    link->queue_begin = link->queue_end = 0;
    mlfab__roles_lost(node, link->kind, link->peer);
  }
}

MLFAB__INTERNAL int mlfab__inner_begin(mlfab_node *node) {
  uint32_t server = node->server_number, worker = (uint32_t)node->config.rank;
  for (uint32_t planner = 0; planner < 2; planner++) {
    int asks = planner ? MLFAB__LINK_PLANNER : MLFAB__LINK_SERVER;
    uint32_t peer = planner ? node->config.workers : worker;
    uint32_t which = planner ? MLFAB__PAIR_PLANNER : MLFAB__PAIR_SERVER;
    mlfab__route *route = &node->routes[mlfab__node_route_of(node, asks, server)];
    if (!(planner ? node->is_scheduler : node->is_worker)) continue;
    if (mlfab__inner_pair(node, which, asks, server,
                          planner ? MLFAB__LINK_SCHEDULER : MLFAB__LINK_WORKER, peer))
      return MLFAB_ERR_MEMORY;
    route->link = node->pairs[which][0];
    route->greeted = 1;
    node->callers[peer].link = node->pairs[which][1];
  }
  for (uint32_t p = MLFAB__PAIRS; p-- > 0;) {
    if (node->pairs[p][0] != MLFAB__NO_LINK) mlfab__inner_greet(node, p, 1);
  }
  return 0;
}

/* Moves one frame over a link inside the node. Returns 1 if there was a frame. */
static int inner_carry(mlfab_node *node, uint32_t from, uint32_t to) {
  if (!mlfab__outbox_yield(node, from)) return 0;
  /* Advance the sender first: the receiver's answer may depend on its state. The frame's meta stays in
   * node->head, which nothing overwrites before the next yield. */
  mlfab__frame_in frame = {node->frame.type, node->frame.meta_bytes, node->frame.bulk_bytes,
                           node->head + MLFAB_HEADER_BYTES, node->frame.bulk};
  uint64_t token = node->frame.token | (uint64_t)node->out_role << MLFAB__ROLE_SHIFT;
  int lent = node->frame.token != 0, kind = node->links[from].kind;
  uint32_t peer = node->links[from].peer;
  mlfab__outbox_taken(node);
  mlfab__node_dispatch(node, to, &frame);
  if (lent) mlfab__roles_returned(node, kind, peer, token); /* the bulk is free at once */
  return 1;
}

/* Carries frames between the roles of this node. */
MLFAB__INTERNAL void mlfab__inner_run(mlfab_node *node) {
  if (node->out != MLFAB__OUT_NONE) return;
  int budget = 256;
  while (node->self_due && budget > 0) {
    for (int i = 0; node->self_due >> i; i++) {
      const uint32_t *pair = node->pairs[i / 2];
      while ((node->self_due >> i & 1) && budget-- > 0) {
        if (!inner_carry(node, pair[i % 2], pair[1 - i % 2])) node->self_due &= ~(1u << i);
      }
    }
  }
  node->self_more =
      node->self_due != 0; /* no event reports the rest: the next tick is due at once */
}
