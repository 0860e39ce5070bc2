/* outbox.c - a node: the next frame of a link. Control frames come first, in the order in which they were
 * posted; then, on a link that stands, a role's frame with a bulk. See role.h, Order. */
#include "node.h"

/* Asks the roles on this link, the urgent ones first and the others in turns; takes the first frame. */
static int outbox_ask(mlfab_node *node, const mlfab__link *link) {
  mlfab__at at = {link->kind, link->peer, node->now_ns};
  uint32_t n = node->nsenders[link->kind], urgent = node->nurgent[link->kind];
  for (uint32_t i = 0; i < n; i++) {
    uint32_t place = i < urgent ? i : link->turn + i;
    if (place >= n) place -= n - urgent;
    const mlfab__role *role = &node->roles[node->senders[link->kind][place]];
    if (!role->next(role->self, at, &node->frame)) continue;
    if (node->crashes) return 0; /* in `next`: what the frame has is not what it says */
    node->out = MLFAB__OUT_ROLE;
    node->out_role = (uint32_t)(role - node->roles);
    node->out_turn =
        place < urgent ? link->turn : (uint8_t)(place + 1 < n ? place + 1 - urgent : 0);
    return 1;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__outbox_yield(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  mlfab__frame_out *frame = &node->frame;
  memset(frame, 0, sizeof *frame);
  frame->meta = node->head + MLFAB_HEADER_BYTES;
  node->out_link = index;
  if (link->queue_begin < link->queue_end) {
    uint32_t head[2];
    memcpy(head, link->queue + link->queue_begin, 8);
    frame->meta_bytes = head[0];
    frame->type = (uint8_t)head[1];
    memcpy(frame->meta, link->queue + link->queue_begin + 8, head[0]);
    node->out = MLFAB__OUT_CONTROL;
    return 1;
  }
  if (link->kind == MLFAB__LINK_JOIN_IN && link->welcome) {
    mlfab__welcome welcome = {node->peers[link->peer].incarnation, node->welcome_count,
                              link->welcome - 1u, node->peers[link->peer].fresh, node->fabric};
    frame->type = MLFAB__WELCOME;
    frame->meta_bytes = mlfab__encode_welcome(frame->meta, &welcome);
    frame->bulk = node->welcome;
    frame->bulk_bytes = node->welcome_bytes;
    node->out = MLFAB__OUT_WELCOME;
    return 1;
  }
  return link->greeted && !link->closing && outbox_ask(node, link);
}

MLFAB__INTERNAL void mlfab__outbox_taken(mlfab_node *node) {
  mlfab__link *link = &node->links[node->out_link];
  const mlfab__frame_out *frame = &node->frame;
  const mlfab__role *role = &node->roles[node->out_role];
  if (node->out == MLFAB__OUT_CONTROL) {
    link->queue_begin += (frame->meta_bytes + 7) / 8 * 8 + 8;
    if (link->queue_begin == link->queue_end) {
      link->queue_begin = link->queue_end = 0;
      if (link->kind == MLFAB__LINK_NEW) { /* a stranger keeps no memory for what it was told */
        mlfab__free(&node->env, link->queue, link->queue_room);
        link->queue = NULL;
        link->queue_room = 0;
      }
    }
  } else if (node->out == MLFAB__OUT_WELCOME) {
    link->welcome = 0;
  } else {
    link->turn = node->out_turn;
    role->taken(role->self, (mlfab__at){link->kind, link->peer, node->now_ns}, frame);
  }
  node->out = MLFAB__OUT_NONE;
}
