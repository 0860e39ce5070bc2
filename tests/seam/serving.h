/* serving.h - one real server node, driven through mlfab_node.h. The test plays its workers and its scheduler, which is a
 * process of its own, frame by frame and in virtual time.
 *
 * A peer is a number: workers 0 .. W-1, the scheduler W. Frames that the server sends to a peer go into a log, or to the
 * test's own function. A peer's link takes every control frame; it takes as many MODEL and VIEW frames as the test allows
 * (`room`), and shows the test the next one that it was offered. */
#ifndef MLFAB_TEST_SERVING_H
#define MLFAB_TEST_SERVING_H

#include "core/base/request.h"
#include "core/base/rng.h"
#include "core/sched/sched_wire.h"
#include "mlfab_node.h"

#include "tests/seam/scene.h"

enum { SEAM_PEERS = 8, SEAM_LOG = 4096, SEAM_TENSORS = 8, SEAM_START_NS = 1000 };
#define SEAM_ALL UINT32_MAX /* room for any number of frames */

/* A frame that the server sent. */
typedef struct seam_heard {
  uint32_t peer;
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  uint64_t token;
  const uint8_t *meta, *bulk; /* bulk: valid in the test's function, or while it is lent */
} seam_heard;

typedef struct seam_peer {
  uint32_t link; /* 0: none */
  int blocked;
  uint32_t room;
  uint32_t incarnation, accumulators, caps;
  uint64_t nonce, host;
  mlfab__hello_ack ack; /* the last one */
  int acked;
  seam_heard offered; /* the frame that found no room; type 0: none */
  uint8_t offered_meta[MLFAB_META_MAX];
} seam_peer;

typedef struct seam {
  mlfab_node *node;
  mlfab_config config;
  mlfab_env env;
  int poor;        /* no memory */
  uint64_t memory; /* that the node has */
  uint64_t now, nonces;
  uint32_t links;
  seam_peer peers[SEAM_PEERS];
  uint32_t joining, welcomed; /* link of a JOIN; incarnation in its WELCOME */
  uint64_t called
      [8]; /* tokens of the calls that the node has asked for, and the test has not answered */
  uint32_t ncalled;
  seam_heard log[SEAM_LOG];
  uint32_t nlog, drops, dropped; /* links that the server gave up; the last one's peer */
  char said[256];                /* the last warning of the node */
  void (*hear)(struct seam *s, const seam_heard *heard); /* NULL: the log has it */
  uint8_t head[MLFAB_HEADER_BYTES + MLFAB_META_MAX];
  uint8_t *meta; /* of the next frame to be said */
} seam;

static inline uint32_t seam_scheduler(const seam *s) { return s->config.workers; }

static void *seam_allocate(void *user, size_t bytes) {
  seam *s = user;
  void *memory = s->poor ? NULL : malloc(bytes ? bytes : 1);
  if (memory) s->memory += bytes;
  return memory;
}

static void seam_release(void *user, void *memory, size_t bytes) {
  seam *s = user;
  s->memory -= bytes;
  free(memory);
}

static void seam_warn(void *user, int level, const char *text) {
  seam *s = user;
  (void)level;
  snprintf(s->said, sizeof s->said, "%s", text);
}

static inline mlfab_stats seam_stats(const seam *s) {
  mlfab_stats stats;
  assert_int_equal(mlfab_node_stats(s->node, &stats, sizeof stats), 0);
  return stats;
}

static void seam_forget(seam *s) {
  while (s->nlog > 0) free((void *)(uintptr_t)s->log[--s->nlog].meta);
}

/* --- the transport --- */

static uint32_t seam_peer_of(const seam *s, uint32_t link) {
  uint32_t p = 0;
  while (p < SEAM_PEERS && s->peers[p].link != link) p++;
  return p;
}

/* Returns the transport's answer to a send. */
static int seam_send(seam *s, const mlfab_action *a) {
  mlfab__header header;
  mlfab__wire_open(a->head, &header);
  seam_heard heard = {seam_peer_of(s, a->link),
                      header.type,
                      header.meta_bytes,
                      a->bulk_bytes,
                      a->token,
                      (const uint8_t *)a->head + MLFAB_HEADER_BYTES,
                      a->bulk};
  if (a->link == s->joining && header.type == MLFAB__WELCOME) {
    mlfab__welcome welcome;
    assert_int_equal(mlfab__decode_welcome(heard.meta, heard.meta_bytes, &welcome), 0);
    s->welcomed = welcome.incarnation;
  }
  if (heard.peer == SEAM_PEERS) return 0; /* a link that is closing */
  seam_peer *peer = &s->peers[heard.peer];
  if (header.type == MLFAB__MODEL || header.type == MLFAB__VIEW) {
    peer->offered.type = 0;
    if (peer->room == 0) {
      peer->blocked = 1;
      memcpy(peer->offered_meta, heard.meta, heard.meta_bytes);
      peer->offered = heard;
      peer->offered.meta = peer->offered_meta;
      return MLFAB_ERR_AGAIN;
    }
    if (peer->room != SEAM_ALL) peer->room--;
  } else if (header.type == MLFAB__HELLO_ACK) {
    assert_int_equal(mlfab__decode_hello_ack(heard.meta, heard.meta_bytes, &peer->ack), 0);
    peer->acked = 1;
  }
  if (s->hear) {
    s->hear(s, &heard);
    return 0;
  }
  if (header.type == MLFAB__HEARTBEAT) return 0;
  assert_true(s->nlog < SEAM_LOG);
  uint8_t *meta = malloc(heard.meta_bytes + 1);
  assert_non_null(meta);
  memcpy(meta, heard.meta, heard.meta_bytes);
  heard.meta = meta;
  s->log[s->nlog++] = heard;
  return 0;
}

static void seam_unlink(seam *s, uint32_t p) {
  s->peers[p].link = 0;
  s->peers[p].blocked = s->peers[p].offered.type = 0;
}

static void seam_pump(seam *s) {
  for (mlfab_action a; mlfab_node_next(s->node, s->now, &a);) {
    int status = a.kind == MLFAB_ACTION_SEND ? seam_send(s, &a) : 0;
    uint32_t p = seam_peer_of(s, a.link);
    if (a.kind == MLFAB_ACTION_CONNECT) {
      assert_true(s->ncalled < 8);
      s->called[s->ncalled++] = a.token;
    }
    if (a.kind == MLFAB_ACTION_DISCONNECT && p < SEAM_PEERS) {
      s->drops++;
      s->dropped = p;
      seam_unlink(s, p);
    }
    mlfab_node_done(s->node, &a, status, s->now);
  }
}

static void seam_event(seam *s, mlfab_io_event event) {
  mlfab_node_event(s->node, &event, s->now);
  seam_pump(s);
}

/* Asks the links again that were offered a frame: what is offered now? */
static void seam_look(seam *s) {
  for (uint32_t p = 0; p < SEAM_PEERS; p++) {
    seam_peer *peer = &s->peers[p];
    if (!peer->blocked) continue;
    peer->blocked = peer->offered.type = 0;
    seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_WRITABLE, .link = peer->link});
  }
}

static uint32_t seam_dial(seam *s, uint32_t caps) {
  uint32_t link = ++s->links;
  seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_UP, .link = link, .caps = caps});
  return link;
}

/* The node of a peer. */
static inline uint32_t seam_node(const seam *s, uint32_t p) {
  return p < s->config.workers ? p : s->config.workers + s->config.servers;
}

static void seam_say_on(seam *s, uint32_t link, uint32_t p, uint8_t type, uint32_t meta_bytes,
                        const void *bulk, uint32_t bulk_bytes) {
  mlfab__header header = OF(mlfab__header, .type = type, .meta_bytes = meta_bytes,
                            .bulk_bytes = bulk_bytes, .job = mlfab__hash(0, "mlfab", 5), .epoch = 1,
                            .sender = seam_node(s, p), .incarnation = s->peers[p].incarnation);
  if (bulk) header.flags = MLFAB__WIRE_BULK_CRC;
  mlfab__wire_seal(s->head, &header, bulk);
  seam_event(
      s, OF(mlfab_io_event, .kind = MLFAB_IO_FRAME, .link = link, .head = s->head,
            .head_bytes = MLFAB_HEADER_BYTES + meta_bytes, .bulk = bulk, .bulk_bytes = bulk_bytes));
  seam_look(s);
}

/* A peer sends a frame, whose meta the test has encoded into s->meta. */
static void seam_bulk(seam *s, uint32_t p, uint8_t type, uint32_t meta_bytes, const void *bulk,
                      uint32_t bulk_bytes) {
  assert_true(s->peers[p].link != 0);
  seam_say_on(s, s->peers[p].link, p, type, meta_bytes, bulk, bulk_bytes);
}

static void seam_say(seam *s, uint32_t p, uint8_t type, uint32_t meta_bytes) {
  seam_bulk(s, p, type, meta_bytes, NULL, 0);
}
/* SAY(s, 3, PULL_DONE, pull_done, {.request = 5}) */
#define SAY(s, p, TYPE, name, ...) \
  seam_say(s, p, MLFAB__##TYPE, mlfab__encode_##name((s)->meta, &(const mlfab__##name)__VA_ARGS__))

static inline void seam_sent(seam *s, uint32_t p, uint64_t token) {
  seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_SENT, .link = s->peers[p].link, .token = token});
  seam_look(s);
}

/* --- peers that come and go --- */

static inline void seam_lost(seam *s, uint32_t p) {
  uint32_t link = s->peers[p].link;
  seam_unlink(s, p);
  if (link) seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .link = link, .text = "lost"});
  seam_look(s);
}

/* The peer calls on a new link, in place of the one that it may have. */
static inline void seam_hello(seam *s, uint32_t p) {
  seam_peer *peer = &s->peers[p];
  uint32_t link = seam_dial(s, peer->caps);
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
  uint32_t link = seam_dial(s, 0);
  seam_join(s, p, link);
  assert_true(s->welcomed != 0);
  seam_hello(s, p);
  seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .link = link, .text = "joined"});
}

static inline void seam_bye(seam *s, uint32_t p) {
  uint32_t drops = s->drops;
  SAY(s, p, BYE, bye, {.code = 0});
  assert_true(s->peers[p].link == 0);
  s->drops = drops;
}

/* --- time --- */

static void seam_tick(seam *s) {
  mlfab_node_tick(s->node, s->now);
  seam_pump(s);
  seam_look(s);
}

/* All peers that have a link live. */
static void seam_beat(seam *s) {
  for (uint32_t p = 0; p < SEAM_PEERS; p++)
    if (s->peers[p].link) SAY(s, p, HEARTBEAT, heartbeat, {.sent_ns = s->now});
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

/* Fills in the configuration of all tests; the caller changes it before seam_open. */
static void seam_init(seam *s, uint32_t workers) {
  memset(s, 0, sizeof *s);
  s->now = SEAM_START_NS;
  s->meta = s->head + MLFAB_HEADER_BYTES;
  mlfab_config_init(&s->config);
  s->config.roles = MLFAB_ROLE_SERVER;
  s->config.dedicated = 1;
  s->config.workers = workers;
  s->config.servers = 1;
  s->config.heartbeat_ns = 500000000;
  s->config.silent_death_ns = 1000 * s->config.heartbeat_ns;
  s->config.model_max_bytes = 1 << 30;
  s->config.timeout_ns = 1000 * s->config.heartbeat_ns;
  strcpy(s->config.coordinator, "seam:0");
  for (uint32_t p = 0; p < SEAM_PEERS; p++) s->peers[p].host = p + 1;
}

/* Opens the node, which begins to join. */
static void seam_node_open(seam *s) {
  mlfab_error error;
  s->env = SIZED(mlfab_env, .user = s, .allocate = seam_allocate, .release = seam_release,
                 .log = seam_warn);
  s->config.env = &s->env;
  if (mlfab_node_open(&s->config, "seam:0", s->now, &s->node, &error)) fail_msg("%s", error.text);
  seam_pump(s);
}

/* The node is server 0. The fabric is formed, and all peers have said HELLO. */
static inline void seam_open(seam *s) {
  uint32_t links[SEAM_PEERS];
  uint32_t n = s->config.workers + (s->config.scheduler == MLFAB_SCHEDULER_OWN);
  assert_true(s->config.workers < SEAM_PEERS);
  seam_node_open(s);
  for (uint32_t p = 0; p < n; p++) {
    links[p] = seam_dial(s, 0);
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

static inline void seam_close(seam *s) {
  mlfab_node_close(&s->node);
  seam_forget(s);
  assert_int_equal(s->memory, 0);
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
