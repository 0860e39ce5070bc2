/* claim.c - a node: dispatch of every frame, heartbeats, and numbers that two processes claim. See node.h, Numbers. */
#include "node.h"

#include <stdio.h>

MLFAB__INTERNAL void mlfab__claim_heartbeat(mlfab_node *node, uint32_t index, uint32_t kind,
                                            uint64_t sent_ns) {
  mlfab__heartbeat beat = {sent_ns, kind};
  uint8_t meta[16];
  node->links[index].sent_ns = node->now_ns;
  mlfab__node_post(node, index, MLFAB__HEARTBEAT, meta, mlfab__encode_heartbeat(meta, &beat));
}

MLFAB__INTERNAL void mlfab__claim_probe(mlfab_node *node, uint32_t index) {
  if (node->links[index].probe_ns != 0) return;
  node->links[index].probe_ns = node->now_ns;
  mlfab__node_arm(node, MLFAB__TIMER_LINK, index, node->now_ns);
  mlfab__claim_heartbeat(node, index, MLFAB__BEAT_PROBE, node->now_ns);
}

MLFAB__INTERNAL int mlfab__claim_ask(mlfab_node *node, uint32_t index, uint32_t holder,
                                     uint64_t nonce, const mlfab__frame_in *frame) {
  if (holder == MLFAB__NO_LINK || holder == index || node->links[holder].nonce == nonce) return 0;
  mlfab__link *link = &node->links[index];
  uint8_t *claim = mlfab__alloc(&node->env, frame->meta_bytes);
  if (!claim)
    return mlfab__node_refuse(node, index, MLFAB_ERR_MEMORY, MLFAB_NO_RANK,
                              "out of memory for a claim");
  memcpy(claim, frame->meta, frame->meta_bytes);
  link->kind = MLFAB__LINK_CLAIM;
  link->claim = claim;
  link->claim_bytes = frame->meta_bytes;
  link->claim_type = frame->type;
  link->holder = holder;
  node->claims++;
  mlfab__claim_probe(node, holder);
  return MLFAB_ERR_AGAIN;
}

/* Refuses the claimants of a number: its holder lives, so they are other processes. */
static void claim_refuse(mlfab_node *node, uint32_t holder) {
  const mlfab__link *other = &node->links[holder];
  char name[32], text[96];
  int serves = other->kind == MLFAB__LINK_RESHARD_IN || other->kind == MLFAB__LINK_VOTER_IN;
  uint32_t id = serves ? mlfab__node_of_server(node, other->peer) : other->peer;
  snprintf(
      text, sizeof text, "%s is another process that is here already",
      other->kind == MLFAB__LINK_SCHEDULER ? "the scheduler" : mlfab__node_name(node, id, name));
  for (uint32_t i = 0; node->claims > 0 && i < node->nlinks; i++) {
    mlfab__link *link = &node->links[i];
    if (link->kind != MLFAB__LINK_CLAIM || link->holder != holder) continue;
    mlfab__node_unclaim(node, link);
    mlfab__node_refuse(node, i, MLFAB_ERR_RANK_TAKEN, (int32_t)other->peer, text);
  }
}

/* Answers a probe, or handles the answer to our probe: the holder of a number lives. */
static void claim_beat(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  mlfab__link *link = &node->links[index];
  mlfab__heartbeat beat;
  if (mlfab__decode_heartbeat(frame->meta, frame->meta_bytes, &beat)) return;
  if (beat.kind == MLFAB__BEAT_PROBE)
    mlfab__claim_heartbeat(node, index, MLFAB__BEAT_ANSWER, beat.sent_ns);
  if (beat.kind != MLFAB__BEAT_ANSWER || link->probe_ns == 0 || beat.sent_ns != link->probe_ns)
    return;
  link->probe_ns = 0;
  claim_refuse(node, index);
}

MLFAB__INTERNAL void mlfab__node_dispatch(mlfab_node *node, uint32_t index,
                                          const mlfab__frame_in *frame) {
  mlfab__link *link = &node->links[index];
  link->heard_ns = node->now_ns;
  if (frame->type != MLFAB__HEARTBEAT) link->moved_ns = node->now_ns;
  link->coming_ns = 0;
  link->suspect = 0;
  if (link->closing) { /* only the peer's BYE still matters */
    if (frame->type == MLFAB__BYE) mlfab__node_doom(node, index);
    return;
  }
  if (frame->type == MLFAB__HEARTBEAT && link->kind != MLFAB__LINK_NEW &&
      link->kind != MLFAB__LINK_CLAIM)
    claim_beat(node, index, frame);
  if (node->rules[link->kind].frame) node->rules[link->kind].frame(node, index, frame);
}

/* Handles the first frames of claims again if the holder has lost its link. */
MLFAB__INTERNAL void mlfab__claim_again(mlfab_node *node) {
  while (node->claim_due) {
    node->claim_due = 0;
    for (uint32_t i = 0; i < node->nlinks; i++) {
      mlfab__link *link = &node->links[i];
      if (link->kind != MLFAB__LINK_CLAIM || link->holder != MLFAB__NO_LINK) continue;
      uint8_t *claim = link->claim;
      uint32_t bytes = link->claim_bytes;
      mlfab__frame_in frame = {link->claim_type, bytes, 0, claim, NULL};
      link->claim = NULL;
      link->claim_bytes = 0;
      mlfab__node_unclaim(node, link);
      mlfab__node_dispatch(node, i, &frame);
      mlfab__free(&node->env, claim, bytes);
    }
  }
}

MLFAB__INTERNAL int mlfab__claim_is_hand(const mlfab_node *node, const mlfab__link *link) {
  switch (link->kind) {
    case MLFAB__LINK_WORKER:
      return node->callers[link->peer].hand;
    case MLFAB__LINK_JOIN_IN:
      return node->peers[link->peer].hand;
    case MLFAB__LINK_SERVER:
    case MLFAB__LINK_PLANNER:
    case MLFAB__LINK_RESHARD:
    case MLFAB__LINK_RESHARD_IN:
      return node->places[link->peer].info.hand != 0;
    default:
      return 0;
  }
}

/* Does another process want the number of this link's process? PEER_IN: yes, as MEET does not wait as a claim. */
static int claim_is_claimed(const mlfab_node *node, uint32_t index) {
  if (node->links[index].kind == MLFAB__LINK_PEER_IN) return 1;
  for (uint32_t i = 0; node->claims > 0 && i < node->nlinks; i++) {
    if (node->links[i].kind == MLFAB__LINK_CLAIM && node->links[i].holder == index) return 1;
  }
  return 0;
}

/* Acts on a probe without an answer. A hand-driven node is assumed to be computing. */
MLFAB__INTERNAL void mlfab__claim_scan(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  uint64_t beat = node->config.heartbeat_ns, waited_ns = node->now_ns - link->probe_ns;
  if (link->probe_ns == 0 || waited_ns < (link->kind == MLFAB__LINK_PEER_IN ? 2 : 5) * beat) return;
  int claimed = claim_is_claimed(node, index);
  if (!claimed && waited_ns < 7 * beat) return; /* the claimant hung up, and may be calling again */
  link->probe_ns = 0;
  if (mlfab__claim_is_hand(node, link)) {
    claim_refuse(node, index);
  } else if (claimed) {
    mlfab__node_hang_up(node, index, "did not answer, and another process wants its number");
  }
}
