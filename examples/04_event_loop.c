/* 04_event_loop.c - your own event loop: two nodes, a network that is two queues, time by hand.
 *
 * Shows:  the node level (mlfab_node.h). A node does no I/O and reads no clock. The program feeds it events (a
 *         connection is up, a frame arrived, a send is complete) with the present time; the node yields actions
 *         (connect, send) and the time of its next timer. Your event loop takes the place of these queues.
 * Build:  cc -O2 -o 04_event_loop 04_event_loop.c mlfab.o -lpthread -lm
 * Run:    build/examples/04_event_loop
 * SPDX-License-Identifier: MIT
 */
#include "mlfab_node.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NODES = 2, COUNT = 4, QUEUE = 4096 };

static mlfab_node *node[NODES];
static mlfab_io_event queue[NODES][QUEUE]; /* events for each node */
static unsigned taken[NODES], put[NODES], links;
static uint64_t now_ns;

static void post(int to, mlfab_io_event event) { queue[to][put[to]++ % QUEUE] = event; }
static void *copy(const void *bytes, uint32_t n) { return n ? memcpy(malloc(n), bytes, n) : NULL; }

/* Carries out an action of node `me`. */
static void act(int me, const mlfab_action *a) {
  if (a->kind == MLFAB_ACTION_CONNECT) { /* a->address is "queue:0"; tell both ends */
    post(me, (mlfab_io_event){.kind = MLFAB_IO_UP, .link = ++links, .token = a->token});
    post(1 - me, (mlfab_io_event){.kind = MLFAB_IO_UP, .link = links});
  } else if (a->kind == MLFAB_ACTION_SEND) {
    mlfab_io_event e = {.kind = MLFAB_IO_FRAME, .link = a->link};
    e.head = copy(a->head, e.head_bytes = a->head_bytes);
    e.bulk = copy(a->bulk, e.bulk_bytes = a->bulk_bytes);
    post(1 - me, e);
    e = (mlfab_io_event){.kind = MLFAB_IO_SENT, .link = a->link, .token = a->token};
    if (a->token) post(me, e); /* the bulk was copied, so it is no longer borrowed */
  } else if (a->kind == MLFAB_ACTION_DISCONNECT) {
    post(1 - me, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .link = a->link, .text = "closed"});
  } /* MLFAB_ACTION_DETACH: stop borrowing; nothing is borrowed here. */
}

/* One turn of the loop: ten microseconds pass; for each node, an event, its timer, and its actions. */
static void turn(void) {
  now_ns += 10000;
  for (int i = 0; i < NODES; i++) {
    if (taken[i] != put[i]) {
      mlfab_io_event *e = &queue[i][taken[i]++ % QUEUE];
      mlfab_node_event(node[i], e, now_ns);
      free((void *)e->head);
      free((void *)e->bulk);
    }
    if (mlfab_node_deadline(node[i]) <= now_ns) mlfab_node_tick(node[i], now_ns);
    for (mlfab_action a; mlfab_node_next(node[i], now_ns, &a);) {
      act(i, &a);
      mlfab_node_done(node[i], &a, 0, now_ns);
    }
  }
}

/* Turns the loop until a request has finished, by its deadline at the latest. Returns its status. */
static int finish(int i, mlfab_request request) {
  mlfab_result result = {0};
  for (int done = 0; !done; turn())
    if (mlfab_node_test(node[i], request, &done, &result)) return MLFAB_ERR_REQUEST;
  return result.status;
}

/* Begins the call that a descriptor describes. */
static int submit(int i, mlfab_call call, mlfab_request *request_p) {
  call.size = sizeof call;
  return mlfab_node_submit(node[i], &call, now_ns, request_p);
}

/* Both nodes join and agree on a model of zeros; node 1 pushes ones to node 0, and pulls the result. */
static int run(float *w) {
  float ones[COUNT] = {1, 1, 1, 1};
  mlfab_buf weights = {0, 0, w, COUNT}, update = {0, 0, ones, COUNT};
  const mlfab_call tensor = {.kind = MLFAB_CALL_TENSOR_ADD, .dtype = MLFAB_F32, .count = COUNT};
  const mlfab_call start = {.kind = MLFAB_CALL_MODEL_START};
  const mlfab_call push = {.kind = MLFAB_CALL_PUSH, .bufs = &update, .n = 1};
  const mlfab_call pull = {.kind = MLFAB_CALL_PULL, .bufs = &weights, .n = 1};
  mlfab_request request[NODES];
  int status = 0;
  for (int i = 0; i < NODES && status >= 0; i += status == 1, turn())
    status = mlfab_node_ready(node[i], NULL);
  for (int i = 0; i < NODES && status >= 0; i++) {
    status = submit(i, tensor, NULL);
    if (!status) status = submit(i, start, &request[i]);
  }
  for (int i = 0; i < NODES && !status; i++) status = finish(i, request[i]);
  if (!status) status = submit(1, push, &request[1]);
  if (!status) status = finish(1, request[1]);
  if (!status) status = submit(1, pull, &request[1]);
  return status ? status : finish(1, request[1]);
}

int main(void) {
  float w[COUNT] = {0};
  for (int i = 0; i < NODES; i++) {
    mlfab_config config = {.size = sizeof config, .rank = i, .workers = NODES};
    strcpy(config.coordinator, "queue:0");
    if (mlfab_node_open(&config, i ? "queue:1" : "queue:0", 0, &node[i], NULL)) return 1;
  }
  int status = run(w);
  printf("%s: node 1 pulled %g after %.2f ms of virtual time\n", mlfab_error_text(status),
         (double)w[0], (double)now_ns * 1e-6);
  for (int i = NODES - 1; i >= 0; i--) mlfab_node_close(&node[i]);
  return status || w[0] != 1.0f;
}
