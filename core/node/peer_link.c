/* peer_link.c - a node: links between workers, for aggregation, allreduce and collectives. See node.h.
 *
 *    (wanted) --WHERE to server 0--> asked --THERE--> connecting --UP, MEET--> link stands
 *        ^                             |                  |                        |
 *        +---- a fifth of a beat later, if still wanted --+----- DOWN -------------+
 *
 * If the link to server 0 breaks before the answer, the node asks again on the next one. The member calls;
 * the aggregator's node answers. A node that is its own aggregator has a pair of links inside. The node
 * asks for addresses before every call, because a restarted worker has others. */
#include "node.h"

#include <stdio.h>

static mlfab__peer_link *hop_of(mlfab_node *node, uint32_t rank) {
  if (node->peers_out[rank]) return node->peers_out[rank];
  uint32_t *hops =
      mlfab__grow(&node->env, node->hops, &node->hops_room, node->nhops + 1, sizeof *hops);
  mlfab__peer_link *hop = hops ? mlfab__alloc(&node->env, sizeof *hop) : NULL;
  if (hops) node->hops = hops;
  node->hops_short |= !hop;
  if (!hop) return NULL;
  hop->link = MLFAB__NO_LINK;
  node->hops[node->nhops++] = rank;
  node->peers_out[rank] = hop;
  return hop;
}

static void hop_self(mlfab_node *node, mlfab__peer_link *hop) {
  uint32_t rank = (uint32_t)node->config.rank;
  if (mlfab__inner_pair(node, MLFAB__PAIR_PEER, MLFAB__LINK_PEER, rank, MLFAB__LINK_PEER_IN, rank))
    return; /* try again at the next look at the clock */
  hop->link = node->pairs[MLFAB__PAIR_PEER][0];
  node->peer_in_links[rank] = node->pairs[MLFAB__PAIR_PEER][1];
  mlfab__inner_greet(node, MLFAB__PAIR_PEER, 1);
}

MLFAB__INTERNAL void mlfab__peer_link_want(mlfab_node *node, uint32_t rank) {
  mlfab__where where = {rank};
  uint8_t meta[16];
  mlfab__peer_link *hop = rank < node->config.workers ? hop_of(node, rank) : NULL;
  if (!hop || hop->link != MLFAB__NO_LINK || hop->asked || hop->connecting || node->leaving) return;
  if (rank == (uint32_t)node->config.rank) {
    hop_self(node, hop);
    return;
  }
  if (node->now_ns < hop->retry_ns || node->routes[0].link == MLFAB__NO_LINK) return;
  hop->asked = 1;
  hop->asked_by = node->links[node->routes[0].link].id;
  hop->since_ns = node->now_ns;
  mlfab__node_post(node, node->routes[0].link, MLFAB__WHERE, meta,
                   mlfab__encode_where(meta, &where));
}

MLFAB__INTERNAL int mlfab__peer_link_where(mlfab_node *node, uint32_t link,
                                           const mlfab__frame_in *frame) {
  mlfab__where where;
  if (mlfab__decode_where(frame->meta, frame->meta_bytes, &where) ||
      where.node >= node->config.workers)
    return MLFAB_ERR_FRAME;
  const mlfab__peer *peer = &node->peers[where.node];
  mlfab__member there;
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  memset(&there, 0, sizeof there);
  there.node = where.node;
  there.incarnation = peer->incarnation;
  if (where.node == node->id) {
    memcpy(there.addresses, node->addresses, MLFAB__ADDRESSES_MAX);
  } else if (peer->joined && peer->addresses) {
    memcpy(there.addresses, peer->addresses, MLFAB__ADDRESSES_MAX);
  }
  mlfab__node_post(node, link, MLFAB__THERE, meta, mlfab__encode_member(meta, &there));
  return 0;
}

/* The link to server 0 that carried WHERE is gone. */
static int hop_unheard(const mlfab_node *node, const mlfab__peer_link *hop) {
  uint32_t link = node->routes[0].link;
  return hop->asked && (link == MLFAB__NO_LINK || node->links[link].id != hop->asked_by);
}

/* Try again a little later, if it is still wanted then. */
static void hop_later(mlfab_node *node, mlfab__peer_link *hop) {
  hop->asked = hop->connecting = 0;
  hop->retry_ns = node->now_ns + node->config.heartbeat_ns / 5;
}

MLFAB__INTERNAL void mlfab__peer_link_there(mlfab_node *node, const mlfab__member *there) {
  mlfab__peer_link *hop =
      node->peers_out && there->node < node->config.workers ? node->peers_out[there->node] : NULL;
  if (!hop || !hop->asked || hop->link != MLFAB__NO_LINK) return;
  hop_later(node, hop);
  if (there->addresses[0] == 0) return;
  memcpy(hop->addresses, there->addresses, MLFAB__ADDRESSES_MAX);
  hop->connecting = 1;
  hop->since_ns = node->now_ns;
  mlfab__node_connect(node, MLFAB__TOKEN_SERVER + node->nroutes + there->node);
}

MLFAB__INTERNAL int mlfab__peer_link_up(mlfab_node *node, uint64_t rank, uint32_t index) {
  mlfab__peer_link *hop =
      rank < node->config.workers && node->peers_out ? node->peers_out[rank] : NULL;
  if (!hop || !hop->connecting || node->leaving) return 0;
  if (hop->link != MLFAB__NO_LINK)
    mlfab__node_hang_up(node, hop->link, "replaced by a newer connection");
  mlfab__link *link = &node->links[index];
  hop->connecting = 0;
  hop->link = index;
  link->kind = MLFAB__LINK_PEER;
  link->peer = (uint32_t)rank;
  link->greeted = 1;
  mlfab__meet meet = {node->id, node->incarnation, node->nonce};
  uint8_t meta[32];
  mlfab__node_post(node, index, MLFAB__MEET, meta, mlfab__encode_meet(meta, &meet));
  mlfab__greeting greeting = {0};
  mlfab__roles_up(node, MLFAB__LINK_PEER, (uint32_t)rank, &greeting);
  return 1;
}

MLFAB__INTERNAL void mlfab__peer_link_failed(mlfab_node *node, uint64_t rank, const char *why) {
  mlfab__peer_link *hop =
      rank < node->config.workers && node->peers_out ? node->peers_out[rank] : NULL;
  if (!hop || !hop->connecting) return;
  snprintf(hop->why, sizeof hop->why, "%s", why ? why : "");
  hop_later(node, hop);
}

MLFAB__INTERNAL void mlfab__peer_link_meet(mlfab_node *node, uint32_t index,
                                           const mlfab__frame_in *frame) {
  mlfab__meet meet;
  if (mlfab__decode_meet(frame->meta, frame->meta_bytes, &meet) || !node->is_worker ||
      meet.node >= node->config.workers || meet.node == node->id) {
    mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                       "a MEET that does not fit this node");
    return;
  }
  uint32_t old = node->peer_in_links[meet.node];
  if (old != MLFAB__NO_LINK && node->links[old].nonce != meet.nonce) {
    mlfab__claim_probe(node, old);
    mlfab__node_refuse(node, index, MLFAB_ERR_RANK_TAKEN, (int32_t)meet.node,
                       "another process is here as this worker");
    return;
  }
  if (old != MLFAB__NO_LINK) mlfab__node_hang_up(node, old, "replaced by a newer connection");
  mlfab__link *link = &node->links[index];
  link->kind = MLFAB__LINK_PEER_IN;
  link->peer = meet.node;
  link->nonce = meet.nonce;
  link->greeted = 1;
  node->peer_in_links[meet.node] = index;
  mlfab__greeting greeting = {.incarnation = meet.incarnation};
  mlfab__roles_up(node, MLFAB__LINK_PEER_IN, meet.node, &greeting);
}

MLFAB__INTERNAL void mlfab__peer_link_frame(mlfab_node *node, uint32_t index,
                                            const mlfab__frame_in *frame) {
  const mlfab__link *link = &node->links[index];
  mlfab__bye bye;
  if (frame->type == MLFAB__BYE && !mlfab__decode_bye(frame->meta, frame->meta_bytes, &bye) &&
      bye.code == 0)
    mlfab__roles_gone(node, link->kind, link->peer, 1);
  if (frame->type == MLFAB__BYE || frame->type == MLFAB__REFUSE) mlfab__node_doom(node, index);
  if (frame->type != MLFAB__HEARTBEAT && !node->links[index].doomed)
    mlfab__roles_frame(node, index, frame);
}

MLFAB__INTERNAL void mlfab__peer_link_down(mlfab_node *node, const mlfab__link *was, uint32_t link,
                                           const char *why) {
  mlfab__peer_link *hop = was->kind == MLFAB__LINK_PEER ? node->peers_out[was->peer] : NULL;
  (void)why;
  if (hop && hop->link == link) {
    hop->link = MLFAB__NO_LINK;
    hop_later(node, hop);
    mlfab__roles_lost(node, MLFAB__LINK_PEER, was->peer);
  }
  if (was->kind == MLFAB__LINK_PEER_IN && node->peer_in_links[was->peer] == link) {
    node->peer_in_links[was->peer] = MLFAB__NO_LINK;
    mlfab__roles_lost(node, MLFAB__LINK_PEER_IN, was->peer);
  }
}

MLFAB__INTERNAL void mlfab__peer_link_scan(mlfab_node *node) {
  uint64_t beat = node->config.heartbeat_ns;
  int all = node->hops_short;
  node->hops_short = 0;
  for (uint32_t i = 0; i < (all ? node->config.workers : node->nhops); i++) {
    uint32_t w = all ? i : node->hops[i];
    mlfab__peer_link *hop = node->peers_out[w];
    if (hop && hop->link != MLFAB__NO_LINK) continue;
    if (hop && hop_unheard(node, hop)) hop->asked = 0;
    if (hop && (hop->asked || hop->connecting) && node->now_ns - hop->since_ns >= 2 * beat)
      hop_later(node, hop);
    if (mlfab__roles_want(node, MLFAB__LINK_PEER, w, hop ? hop->why : ""))
      mlfab__peer_link_want(node, w);
  }
}
