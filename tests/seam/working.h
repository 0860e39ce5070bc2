/* working.h - played.h, where the node is a worker. The test plays the dedicated servers and the other workers.
 *
 * A peer is the number of its node: workers 0 .. W-1, then servers. A peer's link takes as many frames with a bulk (FORWARD,
 * HOP_MODEL) as the test allows, and is offered the next one again after every event. */
#ifndef MLFAB_TEST_WORKING_H
#define MLFAB_TEST_WORKING_H

#include "tests/seam/played.h"

#define WORK_CAPS (MLFAB_CAP_RELIABLE | MLFAB_CAP_CHECKED | MLFAB_CAP_GHOST | MLFAB_CAP_PROBE)

static inline uint32_t work_server(const seam *w, uint32_t s) { return w->config.workers + s; }
static inline int work_is_server(const seam *w, uint32_t p) {
  return p >= w->config.workers && p < w->config.workers + w->config.servers;
}
static uint32_t seam_node(const seam *w, uint32_t p) {
  (void)w;
  return p;
}

static void work_lend(seam *w, const mlfab_action *a, uint32_t peer) {
  if (a->token == 0 || a->bulk_bytes == 0) return;
  assert_true(w->nlent < SEAM_LENT);
  seam_lent *l = &w->lents[w->nlent++];
  *l = (seam_lent){a->token, peer, a->link, a->bulk_bytes, a->bulk, malloc(a->bulk_bytes)};
  assert_non_null(l->was);
  memcpy(l->was, a->bulk, a->bulk_bytes);
}

static int seam_send(seam *w, const mlfab_action *a, seam_heard heard) {
  mlfab__stop stop;
  if (heard.type == MLFAB__JOIN) w->owed_joins = 1;
  if (heard.peer == SEAM_NOBODY) return 0; /* of joining, or a link that closes */
  seam_peer *peer = &w->peers[heard.peer];
  uint32_t bit = 1u << heard.peer;
  if (heard.type == MLFAB__HOP_MODEL || (heard.type == MLFAB__FORWARD && a->bulk_bytes > 0)) {
    if (peer->room == 0) {
      peer->blocked = 1;
      return MLFAB_ERR_AGAIN;
    }
    if (peer->room != SEAM_ALL) peer->room--;
    w->taken++;
  } else if (heard.type == MLFAB__HELLO) {
    w->owed_hellos |= bit;
  } else if (heard.type == MLFAB__DEFINE) {
    assert_int_equal(mlfab__decode_define(heard.meta, heard.meta_bytes, &peer->define), 0);
    w->owed_defines |= bit;
  } else if (heard.type == MLFAB__STOP) {
    assert_int_equal(mlfab__decode_stop(heard.meta, heard.meta_bytes, &stop), 0);
    w->stop_attempt = stop.attempt;
    w->owed_stops |= bit;
  }
  if (w->hear) w->hear(w, &heard);
  work_lend(w, a, heard.peer);
  return 0;
}

/* --- what servers answer --- */

static void work_welcome(seam *w) {
  static uint8_t infos[4096] __attribute__((aligned(8)));
  uint32_t bytes = 0;
  for (uint32_t s = 0; s < w->config.servers; s++) {
    mlfab__member_info info =
        OF(mlfab__member_info, .node = work_server(w, s), .roles = MLFAB_ROLE_SERVER,
           .incarnation = s + 1, .nonce = 100 + s);
    snprintf(info.addresses, sizeof info.addresses, "seam:%u", work_server(w, s));
    bytes += mlfab__encode_member_info(infos + bytes, (uint32_t)sizeof infos - bytes, &info);
  }
  mlfab__welcome welcome = {.incarnation = 50, .nodes = w->config.servers, .fresh = 1, .fabric = 9};
  seam_say_on(w, w->joining, work_server(w, 0), MLFAB__WELCOME,
              mlfab__encode_welcome(w->meta, &welcome), infos, bytes);
}

static void work_greet(seam *w, uint32_t p, uint32_t kind) {
  mlfab__hello_ack ack =
      OF(mlfab__hello_ack, .server = p - w->config.workers, .eager_bytes = 1 << 18, .generation = 1,
         .kind = kind, .model_stands = w->peers[p].define.ask != 0, .epoch = 1,
         .stopped = kind == MLFAB__ACK_STOP ? w->stop_attempt : 0,
         .nonce = 100 + p - w->config.workers);
  w->peers[p].greeted = 1;
  seam_say(w, p, MLFAB__HELLO_ACK, mlfab__encode_hello_ack(w->meta, &ack));
}

static void work_answer(seam *w, uint32_t p) {
  uint32_t bit = 1u << p;
  const mlfab__define *define = &w->peers[p].define;
  if (w->owed_hellos & bit) {
    w->owed_hellos &= ~bit;
    work_greet(w, p, MLFAB__ACK_ALIVE);
  } else if (w->owed_stops & bit) {
    w->owed_stops &= ~bit;
    work_greet(w, p, MLFAB__ACK_STOP);
  } else if (w->owed_defines & bit) {
    w->owed_defines &= ~bit;
    SAY(w, p, DEFINE_ACK, define_ack, .server = p - w->config.workers, .ask = define->ask,
        .packets = 1, .options = define->options);
  }
}

/* Carries out what the node asks for, until it asks for nothing: calls succeed, and servers answer. */
static void seam_rest(seam *w) {
  if (w->answering) return;
  w->answering = 1;
  seam_pump(w);
  for (int i = 0; w->ncalled || w->owed_joins || w->owed_hellos || w->owed_defines || w->owed_stops;
       i++) {
    assert_true(i < 1000);
    if (w->ncalled) {
      uint32_t p = w->called[--w->ncalled].peer;
      assert_true(work_is_server(w, p));
      int joins = !mlfab_node_ready(w->node, NULL) && w->joining == 0;
      *(joins ? &w->joining : &w->peers[p].link) = w->links + 1;
      (void)seam_dial(w, WORK_CAPS, w->called[w->ncalled].token);
    } else if (w->owed_joins) {
      w->owed_joins = 0;
      work_welcome(w);
    } else {
      for (uint32_t p = 0; p < SEAM_PEERS; p++) work_answer(w, p);
    }
  }
  seam_look(w);
  w->answering = 0;
}

/* --- what the test says --- */

/* Takes at most `n` frames with a bulk from the link to this peer; returns how many there were. */
static uint32_t work_take(seam *w, uint32_t p, uint32_t n) {
  uint32_t taken = w->taken;
  w->peers[p].room = n;
  seam_rest(w);
  w->peers[p].room = 0;
  return w->taken - taken;
}

/* Gives a bulk back; a transport that does so twice by mistake changes nothing. */
static void work_give_back(seam *w, uint32_t i, int twice) {
  uint32_t link = w->lents[i].link;
  uint64_t token = seam_check_lent(w, i);
  for (int k = 0; k <= twice; k++)
    seam_event(w, (mlfab_io_event){.kind = MLFAB_IO_SENT, .link = link, .token = token});
  seam_rest(w);
}

/* A worker calls, as the process with this incarnation, in place of the link that it may have. 0: without memory the node hangs
 * up. */
static int work_meet(seam *w, uint32_t p, uint32_t incarnation) {
  seam_peer *peer = &w->peers[p];
  uint32_t link = seam_dial(w, WORK_CAPS, 0);
  mlfab__meet meet = {p, peer->incarnation = incarnation, 1000 + p};
  if (peer->link) seam_unlink(w, p);
  peer->link = link;
  peer->greeted = 1;
  seam_say(w, p, MLFAB__MEET, mlfab__encode_meet(w->meta, &meet));
  if (w->hung_up != link) return 1;
  if (peer->link == link) seam_unlink(w, p);
  return 0;
}
/* Time passes, and the node is called when it wants to be. */
static void work_wait(seam *w, uint64_t ns) {
  uint64_t until = w->now + ns;
  for (int i = 0; mlfab_node_deadline(w->node) <= until; i++) {
    assert_true(i < 10000);
    uint64_t due = mlfab_node_deadline(w->node);
    if (due > w->now) w->now = due;
    seam_tick(w);
  }
  w->now = until;
}

/* The node calls a server again, whose link was lost. */
static void work_back(seam *w, uint32_t p) {
  for (int i = 0; i < 20 && !w->peers[p].greeted; i++) work_wait(w, w->config.heartbeat_ns / 8);
  assert_true(w->peers[p].greeted);
}

/* --- begin and end --- */

static void work_init(seam *w, uint32_t workers, uint32_t servers) {
  seam_begin(w, MLFAB_ROLE_WORKER, workers, servers);
  w->config.rank = (int32_t)workers - 1;
  w->config.scheduler = MLFAB_SCHEDULER_BESIDE;
  snprintf(w->config.coordinator, sizeof w->config.coordinator, "seam:%u", workers);
}

/* The node has joined. */
static void work_open(seam *w) {
  w->config.silent_death_ns = w->config.timeout_ns = 1000000 * w->config.heartbeat_ns;
  for (uint32_t s = 0; s < w->config.servers; s++) w->peers[work_server(w, s)].incarnation = s + 1;
  seam_node_open(w);
  seam_rest(w);
  assert_int_equal(mlfab_node_ready(w->node, NULL), 1);
  w->drops = 0;
}

/* The model begins, and stands. */
static void work_model(seam *w, const mlfab__tensor_info *tensors, uint32_t n,
                       const mlfab_model_options *options) {
  mlfab_request request = 0;
  int done = 0;
  for (uint32_t i = 0; i <= n; i++) {
    mlfab_call call = {.size = sizeof call, .kind = MLFAB_CALL_MODEL_START, .options = options};
    if (i < n)
      call = SIZED(mlfab_call, .kind = MLFAB_CALL_TENSOR_ADD, .tensor = tensors[i].id,
                   .dtype = (int32_t)tensors[i].dtype, .count = tensors[i].count);
    assert_int_equal(mlfab_node_submit(w->node, &call, w->now, &request), 0);
  }
  seam_rest(w);
  assert_int_equal(mlfab_node_test(w->node, request, &done, NULL), 0);
  assert_int_equal(done, 1);
}

#endif
