/* queues.h - queues that join hand-driven nodes of a test, as in examples/04_event_loop.c. A further party, "the outside",
 * has its own links to the nodes; the test speaks for it. The test defines QUEUE and LINKS, carry() and turn(). */
#ifndef MLFAB_TEST_QUEUES_H
#define MLFAB_TEST_QUEUES_H

#include "core/node/node.h"

#include "../testing.h"

enum { NODES = 3, OUTSIDE = NODES };

static struct {
  mlfab_node *node[NODES];
  mlfab_io_event queue[NODES][QUEUE];
  uint64_t due[NODES][QUEUE]; /* time of arrival */
  unsigned taken[NODES], put[NODES];
  struct {
    int up, from, to; /* the ends: nodes, or OUTSIDE */
  } link[LINKS];
  uint32_t links;
  uint64_t now, slow_ns[NODES];
  uint32_t caps, called_caps; /* of links, at the calling and at the called end */
  /* Calls of this node go to another node, or the outside. Node 0 calls nobody: 0 turns nothing. */
  int turned, turned_to;
  uint32_t refuses; /* the link on which sends fail because the peer is gone */
  int refused;      /* such sends */
  int closed;       /* links of the outside, by their other end */
  /* Frames to the outside: how many, also of heartbeats and news of members; the last of the others. */
  int heard_all, heard;
  uint8_t heard_type, last[MLFAB_HEADER_BYTES + 256];
  uint32_t last_link;
  /* The last of each type. */
  mlfab__heartbeat heartbeat;
  mlfab__welcome welcome;
  mlfab__refuse refuse;
  mlfab__hello_ack hello_ack;
  mlfab__push_ack push_ack;
} q;

static void turn(void);
static void carry(int from, int to, mlfab_io_event frame); /* brings it there */

static void run(uint64_t ns) {
  for (uint64_t end = q.now + ns; q.now < end;) turn();
}

static void *copy(const void *bytes, uint32_t size) {
  void *p = size && bytes ? malloc(size) : NULL;
  if (p) memcpy(p, bytes, size);
  return p;
}

static void post(int to, mlfab_io_event event) {
  if (to == OUTSIDE) {
    q.closed += event.kind == MLFAB_IO_DOWN;
    return;
  }
  assert_true(q.put[to] - q.taken[to] < QUEUE);
  q.due[to][q.put[to] % QUEUE] = q.now + q.slow_ns[to];
  q.queue[to][q.put[to]++ % QUEUE] = event;
}

static mlfab_io_event frame_event(uint32_t link, const void *head, uint32_t head_bytes,
                                  const void *bulk, uint32_t bulk_bytes) {
  return (mlfab_io_event){.kind = MLFAB_IO_FRAME,
                          .link = link,
                          .head = copy(head, head_bytes),
                          .head_bytes = head_bytes,
                          .bulk = copy(bulk, bulk_bytes),
                          .bulk_bytes = bulk_bytes};
}

static void drop_event(mlfab_io_event *e) {
  if (e->kind != MLFAB_IO_FRAME && e->kind != MLFAB_IO_HEAD) return;
  free((void *)(uintptr_t)e->head);
  free((void *)(uintptr_t)e->bulk);
}

static void post_down(int to, uint32_t link) {
  post(to, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .link = link, .text = "closed"});
}

static uint32_t new_link(int from, int to) {
  assert_true(q.links + 1 < LINKS);
  q.link[++q.links].up = 1;
  q.link[q.links].from = from;
  q.link[q.links].to = to;
  return q.links;
}

static int far_end(uint32_t link, int me) {
  return q.link[link].from == me ? q.link[link].to : q.link[link].from;
}

/* Takes the events that wait for a node, and closes it. */
static void shut(int i) {
  while (q.taken[i] != q.put[i]) drop_event(&q.queue[i][q.taken[i]++ % QUEUE]);
  mlfab_node_close(&q.node[i]);
}

/* A frame to the outside. */
static void hear(const mlfab_action *a) {
  const uint8_t *meta = (const uint8_t *)a->head + MLFAB_HEADER_BYTES;
  mlfab__header header;
  mlfab__wire_open((const uint8_t *)a->head, &header);
  q.heard_all++;
#define HEAR(TYPE, frame)           \
  if (header.type == MLFAB__##TYPE) \
  assert_int_equal(mlfab__decode_##frame(meta, header.meta_bytes, &q.frame), 0)
  HEAR(HEARTBEAT, heartbeat);
  if (header.type == MLFAB__HEARTBEAT || header.type == MLFAB__MEMBER) return;
  HEAR(WELCOME, welcome);
  HEAR(REFUSE, refuse);
  HEAR(HELLO_ACK, hello_ack);
  HEAR(PUSH_ACK, push_ack);
#undef HEAR
  q.heard++;
  q.heard_type = header.type;
  q.last_link = a->link;
  memcpy(q.last, a->head, mlfab__min(a->head_bytes, sizeof q.last));
}

/* Plays the transport for one action. */
static int act(int me, const mlfab_action *a) {
  mlfab_io_event e = {.link = a->link, .token = a->token};
  if (a->kind == MLFAB_ACTION_CONNECT) {
    int to = me && me == q.turned ? q.turned_to : a->address[strlen(a->address) - 1] - '0';
    e.kind = MLFAB_IO_UP;
    e.link = new_link(me, to);
    e.caps = q.caps;
    post(me, e);
    e.token = 0;
    e.caps = q.called_caps;
    post(to, e);
  } else if (a->kind == MLFAB_ACTION_SEND) {
    int to = far_end(a->link, me);
    if (a->link == q.refuses) return q.refused++, MLFAB_ERR_PEER_CLOSED;
    if (!q.link[a->link].up) return 0;
    if (to == OUTSIDE)
      hear(a);
    else
      carry(me, to, frame_event(a->link, a->head, a->head_bytes, a->bulk, a->bulk_bytes));
    e.kind = MLFAB_IO_SENT;
    if (a->token) post(me, e);
  } else if (a->kind == MLFAB_ACTION_DISCONNECT) {
    q.link[a->link].up = 0;
    post_down(far_end(a->link, me), a->link);
  }
  return 0;
}

/* All that a node does now. */
static void acts(int i) {
  for (mlfab_action a; mlfab_node_next(q.node[i], q.now, &a);) {
    int status = act(i, &a);
    mlfab_node_done(q.node[i], &a, status, q.now);
  }
}

/* The outside calls a node. It has heard nothing yet. */
static uint32_t dial_with(int to, uint32_t caps) {
  uint32_t link = new_link(OUTSIDE, to);
  post(to, (mlfab_io_event){.kind = MLFAB_IO_UP, .link = link, .caps = caps});
  run(500000);
  q.closed = q.heard = q.heard_all = q.heard_type = 0;
  q.refuse.text[0] = 0;
  return link;
}

/* A call of node i begins. */
#define SUBMIT(i, request_p, name, ...)                                                         \
  mlfab_node_submit(                                                                            \
      q.node[i],                                                                                \
      &(mlfab_call){.size = sizeof(mlfab_call), .kind = MLFAB_CALL_##name, __VA_ARGS__}, q.now, \
      request_p)
#define BEGIN(i, request_p, name, ...) assert_int_equal(SUBMIT(i, request_p, name, __VA_ARGS__), 0)

/* It begins, and ends well. */
#define CALL(i, name, ...)              \
  do {                                  \
    mlfab_request r_;                   \
    BEGIN(i, &r_, name, __VA_ARGS__);   \
    assert_int_equal(finish(i, r_), 0); \
  } while (0)

static int finish(int i, mlfab_request request) {
  mlfab_result result = {0};
  for (int done = 0; !done; turn())
    if (mlfab_node_test(q.node[i], request, &done, &result)) return MLFAB_ERR_REQUEST;
  return result.status;
}

static mlfab_stats stats(int i) {
  mlfab_stats s;
  assert_int_equal(mlfab_node_stats(q.node[i], &s, sizeof s), 0);
  return s;
}

#endif
