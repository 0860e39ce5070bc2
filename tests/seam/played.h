/* played.h - one real node, driven through mlfab_node.h. The test plays its peers, frame by frame and in virtual time.
 *
 * A peer is a number. Frames that the node sends to a peer go into a log, or to the test's own function. A peer's link takes
 * every control frame; it takes as many frames with a bulk as the test allows (`room`). A bulk that is lent must keep its
 * bytes until the test gives it back. serving.h and working.h say which node it is, and answer for its peers. */
#ifndef MLFAB_TEST_PLAYED_H
#define MLFAB_TEST_PLAYED_H

#include "core/base/request.h"
#include "core/base/rng.h"
#include "core/reshard/reshard_wire.h"
#include "core/sched/sched_wire.h"
#include "core/wire/peer_wire.h"
#include "mlfab_node.h"

#include "tests/seam/scene.h"

enum {
  SEAM_PEERS = 16,
  SEAM_NOBODY = SEAM_PEERS,
  SEAM_LOG = 4096,
  SEAM_LENT = 256,
  SEAM_CALLS = 8
};
#define SEAM_ALL UINT32_MAX /* room for any number of frames */

/* A frame that the node sent. */
typedef struct seam_heard {
  uint32_t peer;
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  uint64_t token;
  const uint8_t *meta, *bulk; /* bulk: valid in the test's function, or while it is lent */
} seam_heard;

typedef struct seam_lent {
  uint64_t token;
  uint32_t peer, link, bytes;
  const uint8_t *bulk;
  uint8_t *was;
} seam_lent;

typedef struct seam_peer {
  uint32_t link, room; /* link 0: none */
  int blocked, greeted;
  uint32_t incarnation, accumulators, caps;
  uint64_t nonce, host;
  mlfab__define define; /* of a server: the last question to it */
  mlfab__hello_ack ack; /* the last one */
  int acked;
  seam_heard offered; /* the frame that found no room; type 0: none */
  uint8_t offered_meta[MLFAB_META_MAX];
} seam_peer;

typedef struct seam {
  mlfab_node *node;
  mlfab_config config;
  mlfab_env env;
  int poor, checks;                      /* no memory; bulks that are said have a checksum */
  uint64_t memory, allocations, fail_at; /* the allocation with this number fails; 0: none */
  uint64_t now, nonces;
  uint32_t links;
  seam_peer peers[SEAM_PEERS];
  uint32_t joining, welcomed; /* link of a JOIN; incarnation in its WELCOME */
  struct {
    uint64_t token;
    uint32_t peer;
  } called[SEAM_CALLS]; /* questions of the node without an answer */
  uint32_t ncalled;
  uint32_t owed_joins, owed_hellos, owed_defines,
      owed_stops; /* answers that are due: a bit a peer */
  uint32_t stop_attempt, answering;
  seam_heard log[SEAM_LOG];
  seam_lent lents[SEAM_LENT];
  uint32_t nlog, nlent, taken;
  uint32_t drops, dropped,
      hung_up;    /* links that the node gave up; the last one's peer and number */
  char said[256]; /* the last warning of the node */
  void (*hear)(struct seam *s, const seam_heard *heard); /* NULL: the log has it */
  uint8_t head[MLFAB_HEADER_BYTES + MLFAB_META_MAX];
  uint8_t *meta; /* of the next frame to be said */
} seam;

/* Of serving.h or working.h: the transport's answer to a send; the node of a peer; the acts of peers after an event. */
static int seam_send(seam *s, const mlfab_action *a, seam_heard heard);
static uint32_t seam_node(const seam *s, uint32_t p);
static void seam_rest(seam *s);

static void *seam_allocate(void *user, size_t bytes) {
  seam *s = user;
  if (++s->allocations == s->fail_at || s->poor) return NULL;
  s->memory += bytes;
  return malloc(bytes ? bytes : 1);
}

static void seam_release(void *user, void *memory, size_t bytes) {
  ((seam *)user)->memory -= bytes;
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

/* --- the transport --- */

static uint32_t seam_peer_of(const seam *s, uint32_t link) {
  uint32_t p = 0;
  while (p < SEAM_PEERS && (link == 0 || s->peers[p].link != link)) p++;
  return p;
}

/* The bytes of the bulk have not changed, and the node may use it again. Returns the token. */
static uint64_t seam_check_lent(seam *s, uint32_t i) {
  uint64_t token = s->lents[i].token;
  assert_memory_equal(s->lents[i].bulk, s->lents[i].was, s->lents[i].bytes);
  free(s->lents[i].was);
  s->lents[i] = s->lents[--s->nlent];
  return token;
}

/* The link has gone, and with it the bulks that it borrowed. */
static void seam_unlink(seam *s, uint32_t p) {
  for (uint32_t i = s->nlent; i-- > 0;)
    if (s->lents[i].link == s->peers[p].link) (void)seam_check_lent(s, i);
  s->peers[p].link = 0;
  s->peers[p].blocked = s->peers[p].greeted = s->peers[p].offered.type = 0;
}

static int seam_take(seam *s, const mlfab_action *a) {
  mlfab__header header;
  mlfab__wire_open(a->head, &header);
  return seam_send(
      s, a,
      (seam_heard){seam_peer_of(s, a->link), header.type, header.meta_bytes, a->bulk_bytes,
                   a->token, (const uint8_t *)a->head + MLFAB_HEADER_BYTES, a->bulk});
}

static void seam_pump(seam *s) {
  for (mlfab_action a; mlfab_node_next(s->node, s->now, &a);) {
    int status = a.kind == MLFAB_ACTION_SEND ? seam_take(s, &a) : 0;
    uint32_t p = seam_peer_of(s, a.link);
    if (a.kind == MLFAB_ACTION_CONNECT) {
      assert_true(s->ncalled < SEAM_CALLS && !strncmp(a.address, "seam:", 5));
      s->called[s->ncalled].peer = (uint32_t)strtoul(a.address + 5, NULL, 10);
      s->called[s->ncalled++].token = a.token;
    }
    if (a.kind == MLFAB_ACTION_DISCONNECT) s->hung_up = a.link;
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

static uint32_t seam_dial(seam *s, uint32_t caps, uint64_t token) {
  uint32_t link = ++s->links;
  seam_event(s,
             OF(mlfab_io_event, .kind = MLFAB_IO_UP, .link = link, .token = token, .caps = caps));
  return link;
}

/* A peer says a frame, whose meta the test has encoded into s->meta. */
static void seam_say_on(seam *s, uint32_t link, uint32_t p, uint8_t type, uint32_t meta_bytes,
                        const void *bulk, uint32_t bulk_bytes) {
  mlfab__header header = OF(mlfab__header, .type = type, .meta_bytes = meta_bytes,
                            .bulk_bytes = bulk_bytes, .job = mlfab__hash(0, "mlfab", 5), .epoch = 1,
                            .sender = seam_node(s, p), .incarnation = s->peers[p].incarnation);
  if (bulk && s->checks) header.flags = MLFAB__WIRE_BULK_CRC;
  mlfab__wire_seal(s->head, &header, bulk);
  seam_event(
      s, OF(mlfab_io_event, .kind = MLFAB_IO_FRAME, .link = link, .head = s->head,
            .head_bytes = MLFAB_HEADER_BYTES + meta_bytes, .bulk = bulk, .bulk_bytes = bulk_bytes));
  seam_rest(s);
}

static void seam_bulk(seam *s, uint32_t p, uint8_t type, uint32_t meta_bytes, const void *bulk,
                      uint32_t bulk_bytes) {
  assert_true(s->peers[p].link != 0);
  seam_say_on(s, s->peers[p].link, p, type, meta_bytes, bulk, bulk_bytes);
}

static void seam_say(seam *s, uint32_t p, uint8_t type, uint32_t meta_bytes) {
  seam_bulk(s, p, type, meta_bytes, NULL, 0);
}
/* SAY(s, 3, PULL_DONE, pull_done, .request = 5) */
#define SAY(s, p, TYPE, name, ...) SAY_BULK(s, p, TYPE, name, NULL, 0, __VA_ARGS__)
#define SAY_BULK(s, p, TYPE, name, bulk, bytes, ...) \
  seam_bulk(s, p, MLFAB__##TYPE,                     \
            mlfab__encode_##name((s)->meta, &(const mlfab__##name){__VA_ARGS__}), bulk, bytes)

/* The link to a peer breaks. */
static inline void seam_lost(seam *s, uint32_t p) {
  uint32_t link = s->peers[p].link;
  if (link == 0) return;
  seam_unlink(s, p);
  seam_event(s, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .link = link, .text = "lost"});
  seam_rest(s);
}

static void seam_tick(seam *s) {
  mlfab_node_tick(s->node, s->now);
  seam_pump(s);
  seam_rest(s);
}

/* --- begin and end --- */

/* Fills in the values that all tests have in common; the caller changes them before it opens the node. */
static void seam_begin(seam *s, uint32_t roles, uint32_t workers, uint32_t servers) {
  memset(s, 0, sizeof *s);
  s->now = 1000;
  s->meta = s->head + MLFAB_HEADER_BYTES;
  mlfab_config_init(&s->config);
  s->config.roles = roles;
  s->config.dedicated = 1;
  s->config.workers = workers;
  s->config.servers = servers;
  s->config.model_max_bytes = 1 << 30;
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

static inline void seam_forget(seam *s) {
  while (s->nlog > 0) free((void *)(uintptr_t)s->log[--s->nlog].meta);
}

static inline void seam_close(seam *s) {
  while (s->nlent > 0) (void)seam_check_lent(s, 0);
  mlfab_node_close(&s->node);
  seam_forget(s);
  assert_int_equal(s->memory, 0);
}

#endif
