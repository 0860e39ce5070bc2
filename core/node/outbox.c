/* outbox.c - a node: chooses the next frame of a link. Control frames come first, in the order in which they were
 * posted. Then comes a role's frame with a bulk, if the link stands. See role.h, Order. */
#include "node.h"

/* --- pacing: see node.h --- */

enum {
  OUTBOX_PARTS = 4,    /* parts of a beat: a chunk takes one part */
  OUTBOX_LEAST = 4096, /* the smallest bound of a chunk */
  /* bytes a second, until there is a measurement: the first chunk takes a beat */
  OUTBOX_SLOWEST = 131072
};

/* Is the link paced? Only a transport that can be probed reports early that a frame has left. */
static int outbox_paces(const mlfab__link *link) {
  return !link->self && link->caps & MLFAB_CAP_PROBE && !(link->caps & MLFAB_CAP_LOCAL);
}

MLFAB__INTERNAL uint32_t mlfab__outbox_chunk(const mlfab_node *node, const mlfab__link *link) {
  uint64_t most = node->config.chunk_bytes, chunk = most;
  if (!outbox_paces(link)) return (uint32_t)most;
  if (link->pace && link->pace->blind) return (uint32_t)most;
  if (!link->pace || link->pace->per_beat == 0)
    chunk = (uint64_t)((double)OUTBOX_SLOWEST * (double)node->config.heartbeat_ns / 1e9);
  else
    chunk = link->pace->per_beat / OUTBOX_PARTS;
  chunk = mlfab__max(chunk, OUTBOX_LEAST) / 64 * 64;
  return (uint32_t)mlfab__min(chunk, most);
}

/* Notes that a bulk was handed over. If memory is short, the link has no pacing. */
static void outbox_handed(mlfab_node *node, mlfab__link *link, const mlfab__frame_out *frame) {
  if (!outbox_paces(link)) return;
  if (!link->pace) link->pace = mlfab__alloc(&node->env, sizeof *link->pace);
  mlfab__pace *pace = link->pace;
  if (!pace) return;
  pace->blind |= frame->token == 0 && pace->per_beat == 0 && pace->handed == 0 &&
                 frame->bulk_bytes >= mlfab__outbox_chunk(node, link) / 2;
  if (pace->timed == 0 && frame->token == 0) return;
  if (pace->timed == 0 && pace->left == pace->handed) pace->behind = 0;
  pace->behind += frame->bulk_bytes;
  if (frame->token == 0) return;
  pace->handed++;
  if (pace->timed != 0) return;
  pace->timed = pace->handed;
  pace->since_ns = node->now_ns;
  pace->upto = pace->behind;
  pace->behind = 0;
}

MLFAB__INTERNAL void mlfab__outbox_left(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  mlfab__pace *pace = link->pace;
  if (!pace || pace->left == pace->handed) return;
  pace->left++;
  if (pace->timed == 0 || pace->left < pace->timed) return;
  double took_ns = (double)mlfab__max(node->now_ns - pace->since_ns, 1);
  double per_beat = (double)pace->upto * (double)node->config.heartbeat_ns / took_ns;
  if (pace->per_beat > 0 && per_beat > 2.0 * (double)pace->per_beat)
    per_beat = 2.0 * (double)pace->per_beat;
  pace->per_beat = per_beat < 1e15 ? mlfab__max((uint64_t)per_beat, 1) : (uint64_t)1e15;
  pace->timed = pace->blind = 0;
  if (pace->left == pace->handed) pace->left = pace->handed = 0;
  mlfab__node_ready_link(node, index);
}

MLFAB__INTERNAL void mlfab__outbox_detached(mlfab_node *node, uint32_t index) {
  mlfab__pace *pace = node->links[index].pace;
  if (!pace || pace->left == pace->handed) return;
  pace->handed = pace->left = pace->timed = 0;
  mlfab__node_ready_link(node, index);
}

/* --- the next frame --- */

/* Asks the roles on this link, urgent roles first and the others in turns; takes the first frame. */
static int outbox_ask(mlfab_node *node, const mlfab__link *link) {
  mlfab__at at = {link->kind, link->peer, node->now_ns};
  uint32_t n = node->nsenders[link->kind], urgent = node->nurgent[link->kind];
  for (uint32_t i = 0; i < n; i++) {
    uint32_t place = i < urgent ? i : link->turn + i;
    if (place >= n) place -= n - urgent;
    const mlfab__role *role = &node->roles[node->senders[link->kind][place]];
    if (!role->next(role->self, at, &node->frame)) continue;
    if (node->crashes) return 0; /* in `next`: the frame's contents may be wrong */
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
                              link->welcome == MLFAB__WELCOME_AGAIN, node->peers[link->peer].fresh,
                              node->fabric};
    frame->type = MLFAB__WELCOME;
    frame->meta_bytes = mlfab__encode_welcome(frame->meta, &welcome);
    frame->bulk = node->welcome;
    frame->bulk_bytes = node->welcome_bytes;
    node->out = MLFAB__OUT_WELCOME;
    return 1;
  }
  if (!link->greeted || link->closing) return 0;
  const mlfab__pace *pace = link->pace;
  if (pace && pace->timed != 0 &&
      pace->behind >= mlfab__max(pace->per_beat / OUTBOX_PARTS, mlfab__outbox_chunk(node, link)))
    return 0;
  return outbox_ask(node, link);
}

MLFAB__INTERNAL void mlfab__outbox_taken(mlfab_node *node) {
  mlfab__link *link = &node->links[node->out_link];
  const mlfab__frame_out *frame = &node->frame;
  const mlfab__role *role = &node->roles[node->out_role];
  if (node->out == MLFAB__OUT_CONTROL) {
    link->queue_begin += (frame->meta_bytes + 7) / 8 * 8 + 8;
    if (link->queue_begin == link->queue_end) {
      link->queue_begin = link->queue_end = 0;
      if (link->kind == MLFAB__LINK_NEW) { /* a stranger's link frees the memory of its queue */
        mlfab__free(&node->env, link->queue, link->queue_room);
        link->queue = NULL;
        link->queue_room = 0;
      }
    }
  } else if (node->out == MLFAB__OUT_WELCOME) {
    link->welcome = 0;
  } else {
    link->turn = node->out_turn;
    if (frame->bulk_bytes > 0) outbox_handed(node, link, frame);
    role->taken(role->self, (mlfab__at){link->kind, link->peer, node->now_ns}, frame);
  }
  node->out = MLFAB__OUT_NONE;
}
