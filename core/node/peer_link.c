/* peer_link.c - a node: links between workers, for aggregation, allreduce and collectives. See node.h.
 *
 *    (wanted) --WHERE to server 0--> asked --THERE--> connecting --UP, MEET--> link stands
 *        ^                             |                  |                        |
 *        +---- a fifth of a beat later, if still wanted --+----- DOWN -------------+
 *
 * After MEET come updates and messages up, the model down. A caller continues right after MEET, so it cannot wait for a
 * claim (node.h, Numbers). The node refuses the caller, probes the holder, and closes the holder's link after 2 beats
 * without an answer. Meanwhile the caller calls again for as long as it needs the link.
 *
 * If the link to server 0 breaks before the answer, the node asks again on the next one. The member calls;
 * the aggregator's node answers. A node that is its own aggregator has a pair of inner links. The node asks for
 * addresses before every call, because a restarted worker has new addresses. */
#include "peer_link.h"

#include "../wire/peer_wire.h"

#include <stdio.h>

/* Our worker role's path to another worker's node; created on first use. */
typedef struct peer_link {
  uint32_t link; /* index, or MLFAB__NO_LINK */
  uint8_t asked, connecting;
  uint32_t asked_by; /* asked: id of the link to server 0 that carried WHERE */
  uint64_t since_ns, retry_ns;
  char addresses[MLFAB__ADDRESSES_MAX];
  char why[96]; /* the last call that failed */
} peer_link;

typedef struct peer_links {
  mlfab_node *node;
  peer_link **out;                  /* by rank; worker role only */
  uint32_t *hops, nhops, hops_room; /* ranks that have an entry in `out` */
  uint32_t *in;                     /* by rank; aggregator role only */
  int hops_short;                   /* 1: memory was lacking for a link that a role wanted */
} peer_links;

static peer_links *peers_of(const mlfab_node *node) { return node->between_self; }

static peer_link *hop_of(mlfab_node *node, uint32_t rank) {
  peer_links *peers = peers_of(node);
  if (peers->out[rank]) return peers->out[rank];
  uint32_t *hops =
      mlfab__grow(&node->env, peers->hops, &peers->hops_room, peers->nhops + 1, sizeof *hops);
  peer_link *hop = hops ? mlfab__alloc(&node->env, sizeof *hop) : NULL;
  if (hops) peers->hops = hops;
  peers->hops_short |= !hop;
  if (!hop) return NULL;
  hop->link = MLFAB__NO_LINK;
  peers->hops[peers->nhops++] = rank;
  peers->out[rank] = hop;
  return hop;
}

/* Our path to this worker's node, or NULL. */
static peer_link *hop_to(const mlfab_node *node, uint64_t rank) {
  const peer_links *peers = peers_of(node);
  return peers->out && rank < node->config.workers ? peers->out[rank] : NULL;
}

static void hop_self(mlfab_node *node, peer_link *hop) {
  uint32_t rank = (uint32_t)node->config.rank;
  if (mlfab__inner_pair(node, MLFAB__PAIR_PEER, MLFAB__LINK_PEER, rank, MLFAB__LINK_PEER_IN, rank))
    return; /* try again at the next look at the clock */
  hop->link = node->pairs[MLFAB__PAIR_PEER][0];
  peers_of(node)->in[rank] = node->pairs[MLFAB__PAIR_PEER][1];
  mlfab__inner_greet(node, MLFAB__PAIR_PEER, 1);
}

/* Begins to make a link, which a role wants, to this worker's node. */
static void hop_want(mlfab_node *node, uint32_t rank) {
  mlfab__where where = {rank};
  uint8_t meta[16];
  peer_link *hop = rank < node->config.workers ? hop_of(node, rank) : NULL;
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

static int hop_where(mlfab_node *node, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__where where;
  if (mlfab__decode_where(frame->meta, frame->meta_bytes, &where) ||
      where.node >= node->config.workers)
    return MLFAB_ERR_FRAME;
  const mlfab__peer *peer = &node->peers[where.node];
  mlfab__member there = {.node = where.node, .incarnation = peer->incarnation};
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  if (where.node == node->id) {
    memcpy(there.addresses, node->addresses, MLFAB__ADDRESSES_MAX);
  } else if (peer->joined && peer->addresses) {
    memcpy(there.addresses, peer->addresses, MLFAB__ADDRESSES_MAX);
  }
  mlfab__node_post(node, mlfab__node_link_to(node, at.kind, at.peer), MLFAB__THERE, meta,
                   mlfab__encode_member(meta, &there));
  return 1;
}

/* Is the link to server 0 that carried WHERE gone? */
static int hop_unheard(const mlfab_node *node, const peer_link *hop) {
  uint32_t link = node->routes[0].link;
  return hop->asked && (link == MLFAB__NO_LINK || node->links[link].id != hop->asked_by);
}

/* Tries again a little later, if the link is still wanted then. */
static void hop_later(mlfab_node *node, peer_link *hop) {
  hop->asked = hop->connecting = 0;
  hop->retry_ns = node->now_ns + node->config.heartbeat_ns / 5;
}

static void hop_there(mlfab_node *node, const mlfab__member *there) {
  peer_link *hop = hop_to(node, there->node);
  if (!hop || !hop->asked || hop->link != MLFAB__NO_LINK) return;
  hop_later(node, hop);
  if (there->addresses[0] == 0) return;
  memcpy(hop->addresses, there->addresses, MLFAB__ADDRESSES_MAX);
  hop->connecting = 1;
  hop->since_ns = node->now_ns;
  mlfab__node_act(node, MLFAB_ACTION_CONNECT, 0, MLFAB__TOKEN_SERVER + node->nroutes + there->node);
}

/* Takes WHERE at server 0, or THERE from server 0. */
static int hop_told(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab_node *node = ((peer_links *)self)->node;
  mlfab__member there;
  if (at.kind == MLFAB__LINK_WORKER)
    return frame->type == MLFAB__WHERE && node->is_coordinator ? hop_where(node, at, frame)
                                                               : MLFAB_ERR_FRAME;
  if (frame->type != MLFAB__THERE || at.peer != 0 ||
      mlfab__decode_member(frame->meta, frame->meta_bytes, &there))
    return MLFAB_ERR_FRAME;
  hop_there(node, &there);
  return 1;
}

static int hop_up(mlfab_node *node, uint64_t rank, uint32_t index) {
  peer_link *hop = hop_to(node, rank);
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

static void hop_failed(mlfab_node *node, uint64_t rank, const char *why) {
  peer_link *hop = hop_to(node, rank);
  if (!hop || !hop->connecting) return;
  snprintf(hop->why, sizeof hop->why, "%s", why ? why : "");
  hop_later(node, hop);
}

static void hop_meet(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  mlfab__meet meet;
  if (mlfab__decode_meet(frame->meta, frame->meta_bytes, &meet) || !node->is_worker ||
      meet.node >= node->config.workers || meet.node == node->id) {
    mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                       "a MEET that does not fit this node");
    return;
  }
  uint32_t old = peers_of(node)->in[meet.node];
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
  peers_of(node)->in[meet.node] = index;
  mlfab__greeting greeting = {.incarnation = meet.incarnation};
  mlfab__roles_up(node, MLFAB__LINK_PEER_IN, meet.node, &greeting);
}

static void hop_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  const mlfab__link *link = &node->links[index];
  mlfab__bye bye;
  if (frame->type == MLFAB__BYE && !mlfab__decode_bye(frame->meta, frame->meta_bytes, &bye) &&
      bye.code == 0)
    mlfab__roles_gone(node, link->kind, link->peer, 1);
  if (frame->type == MLFAB__BYE || frame->type == MLFAB__REFUSE) mlfab__node_doom(node, index);
  if (frame->type != MLFAB__HEARTBEAT && !node->links[index].doomed)
    mlfab__roles_frame(node, index, frame);
}

static void hop_down(mlfab_node *node, const mlfab__link *was, uint32_t link, const char *why) {
  peer_link *hop = was->kind == MLFAB__LINK_PEER ? hop_to(node, was->peer) : NULL;
  uint32_t *in = peers_of(node)->in;
  (void)why;
  if (hop && hop->link == link) {
    hop->link = MLFAB__NO_LINK;
    hop_later(node, hop);
    mlfab__roles_lost(node, MLFAB__LINK_PEER, was->peer);
  }
  if (was->kind == MLFAB__LINK_PEER_IN && in[was->peer] == link) {
    in[was->peer] = MLFAB__NO_LINK;
    mlfab__roles_lost(node, MLFAB__LINK_PEER_IN, was->peer);
  }
}

static void hop_scan(void *self, uint64_t now_ns) {
  peer_links *peers = self;
  mlfab_node *node = peers->node;
  uint64_t beat = node->config.heartbeat_ns;
  int all = peers->hops_short;
  peers->hops_short = 0;
  for (uint32_t i = 0; i < (all ? node->config.workers : peers->nhops); i++) {
    uint32_t w = all ? i : peers->hops[i];
    peer_link *hop = peers->out[w];
    if (hop && hop->link != MLFAB__NO_LINK) continue;
    if (hop && hop_unheard(node, hop)) hop->asked = 0;
    if (hop && (hop->asked || hop->connecting) && now_ns - hop->since_ns >= 2 * beat)
      hop_later(node, hop);
    if (mlfab__roles_want(node, MLFAB__LINK_PEER, w, hop ? hop->why : "")) hop_want(node, w);
  }
}

static int hop_waits(const void *self) {
  const peer_links *peers = self;
  return peers->nhops > 0 || peers->hops_short;
}

static const char *hop_address(const mlfab_node *node, uint64_t rank) {
  return hop_to(node, rank)->addresses;
}

static uint32_t hop_link(const mlfab_node *node, int kind, uint32_t peer) {
  if (kind == MLFAB__LINK_PEER_IN) return peers_of(node)->in[peer];
  const peer_link *hop = hop_to(node, peer);
  return hop ? hop->link : MLFAB__NO_LINK;
}

static void hop_free(void *self) {
  peer_links *peers = self;
  mlfab_node *node = peers->node;
  uint32_t workers = node->config.workers;
  for (uint32_t w = 0; peers->out && w < workers; w++)
    mlfab__free(&node->env, peers->out[w], sizeof **peers->out);
  mlfab__free(&node->env, peers->out, workers * sizeof *peers->out);
  mlfab__free(&node->env, peers->hops, peers->hops_room * sizeof *peers->hops);
  mlfab__free(&node->env, peers->in, workers * sizeof *peers->in);
  node->between = NULL; /* roles that are freed later ask for links */
}

static const mlfab__role hop_row = {.name = "links between workers",
                                    .links = MLFAB__ON(SERVER) | MLFAB__ON(WORKER),
                                    .from = MLFAB__WHERE,
                                    .to = MLFAB__THERE,
                                    .frame = hop_told,
                                    .scan = hop_scan,
                                    .waits = hop_waits,
                                    .free = hop_free};

static const mlfab__between hop_table = {.meet = hop_meet,
                                         .address = hop_address,
                                         .up = hop_up,
                                         .failed = hop_failed,
                                         .link_to = hop_link};

MLFAB__INTERNAL int mlfab__peer_link_attach(mlfab_node *node) {
  uint32_t workers = node->config.workers;
  const mlfab__role *role = mlfab__roles_add(node, &hop_row, sizeof(peer_links));
  if (!role) return MLFAB_ERR_MEMORY;
  peer_links *peers = role->self;
  peers->node = node;
  node->between = &hop_table;
  node->between_self = peers;
  node->rules[MLFAB__LINK_PEER] = (mlfab__link_rule){hop_frame, hop_down, hop_want};
  node->rules[MLFAB__LINK_PEER_IN] = (mlfab__link_rule){hop_frame, hop_down, NULL};
  if (!node->is_worker) return 0;
  peers->out = mlfab__alloc_array(&node->env, workers, sizeof *peers->out);
  peers->in = mlfab__alloc_array(&node->env, workers, sizeof *peers->in);
  for (uint32_t w = 0; peers->in && w < workers; w++) peers->in[w] = MLFAB__NO_LINK;
  return peers->out && peers->in ? 0 : MLFAB_ERR_MEMORY;
}
