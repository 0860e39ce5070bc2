/* growth.c - a node: what server 0 knows and tells of servers that come and go. See node.h, Growth. */
#include "node.h"

MLFAB__INTERNAL int mlfab__growth_counts(const mlfab_node *node, uint32_t server) {
  return !node->counts || node->counts(node->counts_self, server);
}

MLFAB__INTERNAL void mlfab__growth_member(const mlfab_node *node, uint32_t server, uint32_t kind,
                                          mlfab__member *member) {
  uint32_t id = mlfab__node_of_server(node, server);
  const mlfab__peer *peer = &node->peers[id];
  memset(member, 0, sizeof *member);
  member->node = id;
  member->incarnation = peer->incarnation;
  member->kind = kind;
  member->hand = peer->hand;
  member->nonce = peer->nonce;
  if (peer->addresses) memcpy(member->addresses, peer->addresses, MLFAB__ADDRESSES_MAX);
}

MLFAB__INTERNAL void mlfab__growth_post(mlfab_node *node, uint32_t link,
                                        const mlfab__member *member) {
  uint8_t meta[MLFAB__ADDRESSES_MAX + 64];
  mlfab__node_post(node, link, MLFAB__MEMBER, meta, mlfab__encode_member(meta, member));
}

MLFAB__INTERNAL void mlfab__growth_tell(mlfab_node *node, uint32_t link) {
  uint32_t first = mlfab__node_of_server(node, 0);
  for (uint32_t s = 1; node->config.dedicated && s < node->config.servers; s++) {
    const mlfab__peer *peer = &node->peers[first + s];
    mlfab__member member;
    int gone = !peer->joined && peer->incarnation;
    if ((!gone && !(peer->joined && peer->late)) || node->links[link].self) continue;
    mlfab__growth_member(node, s, gone ? MLFAB_EVENT_LEFT : MLFAB_EVENT_JOINED, &member);
    mlfab__growth_post(node, link, &member);
  }
}

MLFAB__INTERNAL int mlfab__growth_holds(const mlfab_node *node, uint32_t server) {
  const mlfab__peer *peer = &node->peers[mlfab__node_of_server(node, server)];
  if (!node->config.dedicated) return 1;
  return peer->joined && (!peer->late || mlfab__growth_counts(node, server));
}

MLFAB__INTERNAL void mlfab__growth_left(mlfab_node *node, uint32_t server, uint32_t incarnation) {
  mlfab__peer *peer = &node->peers[mlfab__node_of_server(node, server)];
  if (!node->config.dedicated || !peer->joined) return;
  peer->leaves = incarnation;
  node->servers_left = 1;
}
