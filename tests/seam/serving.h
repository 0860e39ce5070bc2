/* serving.h - played.h, where the node is a server. The test plays its workers and its scheduler, which is a process of its own.
 *
 * Peers: workers 0 .. W-1, the scheduler W. A peer's link takes as many MODEL and VIEW frames as the test allows, and shows the
 * test the next one that it was offered. */
#ifndef MLFAB_TEST_SERVING_H
#define MLFAB_TEST_SERVING_H

#include "tests/seam/played.h"

enum { SEAM_TENSORS = 8 };

static inline uint32_t seam_scheduler(const seam *s) { return s->config.workers; }
static uint32_t seam_node(const seam *s, uint32_t p) {
  return p < s->config.workers ? p : s->config.workers + s->config.servers;
}
static void seam_rest(seam *s) { seam_look(s); }

static int seam_send(seam *s, const mlfab_action *a, seam_heard heard) {
  if (a->link == s->joining && heard.type == MLFAB__WELCOME) {
    mlfab__welcome welcome;
    assert_int_equal(mlfab__decode_welcome(heard.meta, heard.meta_bytes, &welcome), 0);
    s->welcomed = welcome.incarnation;
  }
  if (heard.peer == SEAM_PEERS) return 0; /* a link that is closing */
  seam_peer *peer = &s->peers[heard.peer];
  if (heard.type == MLFAB__MODEL || heard.type == MLFAB__VIEW) {
    peer->offered.type = 0;
    if (peer->room == 0) {
      peer->blocked = 1;
      memcpy(peer->offered_meta, heard.meta, heard.meta_bytes);
      peer->offered = heard;
      peer->offered.meta = peer->offered_meta;
      return MLFAB_ERR_AGAIN;
    }
    if (peer->room != SEAM_ALL) peer->room--;
  } else if (heard.type == MLFAB__HELLO_ACK) {
    assert_int_equal(mlfab__decode_hello_ack(heard.meta, heard.meta_bytes, &peer->ack), 0);
    peer->acked = 1;
  }
  if (s->hear) {
    s->hear(s, &heard);
    return 0;
  }
  if (heard.type == MLFAB__HEARTBEAT) return 0;
  assert_true(s->nlog < SEAM_LOG);
  uint8_t *meta = malloc(heard.meta_bytes + 1);
  assert_non_null(meta);
  memcpy(meta, heard.meta, heard.meta_bytes);
  heard.meta = meta;
  s->log[s->nlog++] = heard;
  return 0;
}

static inline void seam_sent(seam *s, uint32_t p, uint64_t token) {
  seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_SENT, .link = s->peers[p].link, .token = token});
  seam_look(s);
}

/* --- peers that come and go --- */

/* The peer calls on a new link, in place of the one that it may have. */
static inline void seam_hello(seam *s, uint32_t p) {
  seam_peer *peer = &s->peers[p];
  uint32_t link = seam_dial(s, peer->caps, 0);
  int worker = p != seam_scheduler(s);
  mlfab__hello hello =
      OF(mlfab__hello, .node = seam_node(s, p), .incarnation = peer->incarnation,
         .roles = worker ? MLFAB_ROLE_WORKER : MLFAB_ROLE_SCHEDULER,
         .accumulators = peer->accumulators, .host = peer->host, .nonce = peer->nonce);
  seam_unlink(s, p);
  peer->link = link;
  peer->acked = 0;
  seam_say_on(s, link, p, MLFAB__HELLO, mlfab__encode_hello(s->meta, &hello), NULL, 0);
  assert_true(peer->link == link && peer->acked);
}

static void seam_join(seam *s, uint32_t p, uint32_t link) {
  mlfab__join join =
      OF(mlfab__join, .rank = p == seam_scheduler(s) ? 0 : (int32_t)p,
         .roles = p == seam_scheduler(s) ? MLFAB_ROLE_SCHEDULER : MLFAB_ROLE_WORKER,
         .workers = s->config.workers, .founders = s->config.workers, .servers = s->config.servers,
         .founding = s->config.servers, .dedicated = 1, .scheduler = s->config.scheduler,
         .kernels = MLFAB_KERNELS_OWN, .nonce = s->peers[p].nonce = ++s->nonces,
         .heartbeat_ns = s->config.heartbeat_ns, .addresses = "seam:1");
  s->joining = link;
  s->welcomed = 0;
  seam_say_on(s, link, p, MLFAB__JOIN, mlfab__encode_join(s->meta, &join), NULL, 0);
  s->peers[p].incarnation = s->welcomed;
}

/* A new process takes the number of a peer, whose link is lost. */
static inline void seam_process(seam *s, uint32_t p) {
  seam_lost(s, p);
  uint32_t link = seam_dial(s, 0, 0);
  seam_join(s, p, link);
  assert_true(s->welcomed != 0);
  seam_hello(s, p);
  seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .link = link, .text = "joined"});
}

static inline void seam_bye(seam *s, uint32_t p) {
  uint32_t drops = s->drops;
  SAY(s, p, BYE, bye, .code = 0);
  assert_true(s->peers[p].link == 0);
  s->drops = drops;
}

/* --- time --- */

/* All peers that have a link live. */
static void seam_beat(seam *s) {
  for (uint32_t p = 0; p < SEAM_PEERS; p++)
    if (s->peers[p].link) SAY(s, p, HEARTBEAT, heartbeat, .sent_ns = s->now);
}

/* Time passes, in which all of them live. */
static inline void seam_pass(seam *s, uint64_t ns) {
  s->now += ns;
  seam_beat(s);
  seam_tick(s);
}

/* The server ends its work in the background. */
static inline void seam_settle(seam *s) {
  for (int i = 0; mlfab_node_deadline(s->node) <= s->now; i++) {
    assert_true(i < 1000);
    seam_tick(s);
  }
}

/* --- begin and end --- */

static void seam_init(seam *s, uint32_t workers) {
  seam_begin(s, MLFAB_ROLE_SERVER, workers, 1);
  s->checks = 1;
  s->config.heartbeat_ns = 500000000;
  s->config.silent_death_ns = s->config.timeout_ns = 1000 * s->config.heartbeat_ns;
  strcpy(s->config.coordinator, "seam:0");
  for (uint32_t p = 0; p < SEAM_PEERS; p++) s->peers[p].host = p + 1;
}

/* The node is server 0. The fabric is formed, and all peers have said HELLO. */
static inline void seam_open(seam *s) {
  uint32_t links[SEAM_PEERS];
  uint32_t n = s->config.workers + (s->config.scheduler == MLFAB_SCHEDULER_OWN);
  assert_true(s->config.workers < SEAM_PEERS);
  seam_node_open(s);
  for (uint32_t p = 0; p < n; p++) {
    links[p] = seam_dial(s, 0, 0);
    seam_join(s, p, links[p]);
  }
  for (uint32_t p = 0; p < n; p++) { /* server 0 has number 1 */
    s->peers[p].incarnation = p + 2;
    seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .link = links[p], .text = "joined"});
    seam_hello(s, p);
  }
  assert_int_equal(mlfab_node_ready(s->node, NULL), 1);
  s->drops = 0;
  seam_forget(s);
}

/* --- the log --- */

static inline uint32_t seam_count(const seam *s, uint8_t type, uint32_t p) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < s->nlog; i++) n += s->log[i].type == type && s->log[i].peer == p;
  return n;
}
#define COUNT_OF(s, TYPE, p) seam_count(s, MLFAB__##TYPE, p)

/* The last frame of this type to this peer; `at_p`, unless NULL: its place in the log. */
static inline const seam_heard *seam_last(const seam *s, uint8_t type, uint32_t p) {
  for (uint32_t i = s->nlog; i-- > 0;)
    if (s->log[i].type == type && s->log[i].peer == p) return &s->log[i];
  fail_msg("peer %u was not told %s", p, mlfab__frame_name(type));
  return NULL;
}
/* LAST(s, via, PULL_VIA, pull_via, 3): decodes it into `via`. */
#define LAST(s, to, TYPE, name, p)                                                              \
  do {                                                                                          \
    const seam_heard *last_heard = seam_last(s, MLFAB__##TYPE, p);                              \
    assert_int_equal(mlfab__decode_##name(last_heard->meta, last_heard->meta_bytes, &(to)), 0); \
  } while (0)

/* --- what most workers say --- */

/* Worker `p` pulls a stretch of the model. */
static inline void seam_ask(seam *s, uint32_t p, uint64_t request, uint64_t offset, uint64_t bytes,
                            uint64_t progress) {
  mlfab__segment segment = {offset, bytes};
  mlfab__pull pull = {request, progress, 0, 0, 1, 0};
  seam_say(s, p, MLFAB__PULL, mlfab__encode_pull(s->meta, &pull, &segment, NULL));
}

/* Worker `p` defines a model of these tensors, define->tensors of them. */
static inline void seam_define_all(seam *s, uint32_t p, const mlfab__define *define,
                                   const mlfab__tensor_info *tensors) {
  uint8_t table[SEAM_TENSORS * MLFAB__TENSOR_INFO_BYTES] __attribute__((aligned(8)));
  assert_true(define->tensors <= SEAM_TENSORS);
  for (uint32_t i = 0; i < define->tensors; i++)
    mlfab__encode_tensor_info(table + i * MLFAB__TENSOR_INFO_BYTES, &tensors[i]);
  seam_bulk(s, p, MLFAB__DEFINE, mlfab__encode_define(s->meta, define), table,
            define->tensors * MLFAB__TENSOR_INFO_BYTES);
}

/* Worker `p` defines a model of one tensor. */
static inline void seam_define(seam *s, uint32_t p, const mlfab__define *define, uint32_t id,
                               uint32_t dtype, uint64_t count) {
  const mlfab__tensor_info info = {id, dtype, count};
  seam_define_all(s, p, define, &info);
}

/* The answer to DEFINE: 0, or why the model was refused. */
static inline int seam_defined(const seam *s, uint32_t p) {
  mlfab__define_ack ack;
  LAST(s, ack, DEFINE_ACK, define_ack, p);
  return ack.code;
}

/* The options of a model with defaults, as a worker sends them. */
static inline mlfab__define seam_model(uint32_t sync, uint32_t slices) {
  mlfab__define define;
  memset(&define, 0, sizeof define);
  define.tensors = 1;
  define.options.consistency.kind = sync;
  define.options.slices = slices;
  define.options.gamma = 0.5, define.options.adadelay_c = 1.0, define.options.epsilon = 1e-8;
  define.options.beta1 = 0.9, define.options.beta2 = 0.999;
  return define;
}

#endif
