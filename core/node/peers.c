/* peers.c - a node: server 0's records of nodes, at both of its copies (mirrored.h). See node.h, Numbers, and copies.h.
 *
 * The record of a node tells whether it has joined, its incarnation and nonce; for a worker also: greeted, dead or
 * left. Left out: addresses (a worker tells them with its HELLO), links and times.
 *
 * Invariants. (1) Server 0 tells a node its incarnation (WELCOME) only when the other copy knows it. So a copy of
 * server 0 that takes over admits every welcomed process, refuses replaced processes, and issues no incarnation twice.
 * (2) One mark covers both the news of a worker (greeted, gone) and the state that the roles derived from it. */
#include "copies.h"

#include "../wire/codec.h"

/* Sends WELCOME to the process that has this number now, if it still waits. */
static void peers_post(void *self, uint32_t id, uint8_t type, const void *meta, uint32_t bytes) {
  mlfab_node *node = self;
  const mlfab__peer *peer = &node->peers[id];
  (void)type;
  (void)bytes;
  if (peer->link == MLFAB__NO_LINK || wire_get32(meta) != peer->incarnation) return;
  node->links[peer->link].welcome = MLFAB__WELCOME_AGAIN;
  mlfab__node_ready_link(node, peer->link);
}

/* Called if waiting frames find no room: the process has to call again. */
static void peers_drop(void *self, uint32_t id, int code, const char *text) {
  mlfab_node *node = self;
  if (node->peers[id].link != MLFAB__NO_LINK)
    mlfab__node_drop(node, node->peers[id].link, code, text);
}

static uint32_t peers_encode(const void *self, uint32_t id, uint8_t *bytes) {
  const mlfab_node *node = self;
  const mlfab__peer *peer = &node->peers[id];
  mlfab__peer_state state = {.joined = peer->joined,
                             .fresh = peer->fresh,
                             .hand = peer->hand,
                             .incarnation = peer->incarnation,
                             .nonce = peer->nonce};
  if (id < node->config.workers) {
    const mlfab__caller *caller = &node->callers[id];
    state.seen = caller->incarnation;
    state.hand_seen = caller->hand;
    state.dead = caller->dead;
    state.left = caller->left;
  }
  return mlfab__encode_peer_state(bytes, &state);
}

static int peers_decode(void *self, uint32_t id, const uint8_t *bytes, uint32_t n, int apply) {
  mlfab_node *node = self;
  mlfab__peer *peer = &node->peers[id];
  mlfab__peer_state in;
  if (mlfab__decode_peer_state(bytes, n, &in)) return MLFAB_ERR_FRAME;
  if (!apply) return 0;
  node->replica->peers_known = 1;
  if (in.incarnation > node->incarnations) node->incarnations = in.incarnation;
  peer->joined = in.joined != 0;
  peer->fresh = in.fresh != 0;
  peer->hand = in.hand != 0;
  peer->incarnation = in.incarnation;
  peer->nonce = in.nonce;
  peer->offered_ns = 0;
  if (id >= node->config.workers) return 0;
  mlfab__caller *caller = &node->callers[id];
  caller->incarnation = in.seen;
  caller->hand = in.hand_seen != 0;
  caller->dead = in.dead != 0;
  caller->left = in.left != 0;
  caller->lost_ns = 0;
  return 0;
}

MLFAB__INTERNAL void mlfab__peers_attach(mlfab_node *node) {
  node->replica->joiners = (mlfab__port){.self = node, .post = peers_post, .drop = peers_drop};
  if (!node->is_coordinator) return;
  mlfab__mirrored_add(node, &(mlfab__mirrored){.name = "peers",
                                               .self = node,
                                               .records = node->nodes,
                                               .encode = peers_encode,
                                               .decode = peers_decode,
                                               .port = &node->replica->joiners,
                                               .touch = &node->replica->peers_touch});
}

MLFAB__INTERNAL void mlfab__peers_welcome(mlfab_node *node, uint32_t id) {
  uint8_t meta[4];
  wire_put32(meta, node->peers[id].incarnation);
  node->replica->joiners.post(node->replica->joiners.self, id, MLFAB__WELCOME, meta, sizeof meta);
}
