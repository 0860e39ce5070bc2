/* working.h - one real worker's node, driven through mlfab_node.h. The test plays the dedicated servers and the other workers,
 * frame by frame and in virtual time.
 *
 * A peer is the number of its node: workers 0 .. W-1, then servers. Each frame that the node sends to a peer goes to the test's
 * function. A peer's link takes every control frame; it takes as many frames with a bulk (FORWARD, HOP_MODEL) as the test allows
 * (`room`), and is offered the next one again after every event. A bulk that is lent must keep its bytes until the test
 * gives it back. */
#ifndef MLFAB_TEST_WORKING_H
#define MLFAB_TEST_WORKING_H

#include "core/base/request.h"
#include "core/base/rng.h"
#include "core/reshard/reshard_wire.h"
#include "core/sched/sched_wire.h"
#include "core/wire/peer_wire.h"
#include "mlfab_node.h"

#include "tests/seam/scene.h"

enum { WORK_PEERS = 16, WORK_LENT = 256, WORK_CALLS = 8 };
#define WORK_ALL UINT32_MAX /* room for any number of frames */
#define WORK_NOBODY UINT32_MAX

/* A frame that the node sent; valid in the test's function. */
typedef struct work_heard {
  uint32_t peer;
  uint8_t type;
  uint32_t meta_bytes, bulk_bytes;
  const uint8_t *meta, *bulk;
} work_heard;

typedef struct work_lent {
  uint64_t token;
  uint32_t peer, link, bytes;
  const uint8_t *bulk;
  uint8_t *was;
} work_lent;

typedef struct work_peer {
  uint32_t link; /* 0: none */
  uint32_t room;
  int blocked, greeted;
  uint32_t incarnation;
  mlfab__define define; /* of a server: what it was asked for last */
} work_peer;

typedef struct work {
  mlfab_node *node;
  mlfab_config config;
  mlfab_env env;
  uint64_t memory, allocations, fail_at; /* the allocation with this number fails; 0: none */
  uint64_t now;
  uint32_t links, asked_links[WORK_CALLS], asked, joining;
  uint64_t asked_tokens[WORK_CALLS];
  uint32_t asked_peers[WORK_CALLS];
  uint32_t owed_joins, owed_hellos, owed_defines,
      owed_stops; /* answers that are due: a bit a peer */
  uint32_t stop_attempt;
  work_peer peers[WORK_PEERS];
  work_lent lents[WORK_LENT];
  uint32_t nlent, taken;
  uint32_t drops, dropped,
      hung_up;   /* links that the node gave up; the last one's peer and number */
  char log[256]; /* the last warning */
  void (*hear)(struct work *w, const work_heard *heard);
  void *user;
  uint8_t head[MLFAB_HEADER_BYTES + MLFAB_META_MAX];
  uint8_t *meta; /* of the next frame to be said */
} work;

static inline uint32_t work_server(const work *w, uint32_t s) { return w->config.workers + s; }
static inline int work_is_server(const work *w, uint32_t p) {
  return p >= w->config.workers && p < w->config.workers + w->config.servers;
}

static void *work_allocate(void *user, size_t bytes) {
  work *w = user;
  if (++w->allocations == w->fail_at) return NULL;
  w->memory += bytes;
  return malloc(bytes ? bytes : 1);
}
static void work_release(void *user, void *memory, size_t bytes) {
  ((work *)user)->memory -= bytes;
  free(memory);
}
static void work_log(void *user, int level, const char *text) {
  work *w = user;
  (void)level;
  snprintf(w->log, sizeof w->log, "%s", text);
}

static inline mlfab_stats work_stats(const work *w) {
  mlfab_stats stats;
  assert_int_equal(mlfab_node_stats(w->node, &stats, sizeof stats), 0);
  return stats;
}

/* --- the transport --- */

static uint32_t work_peer_of(const work *w, uint32_t link) {
  for (uint32_t p = 0; p < WORK_PEERS; p++)
    if (link != 0 && w->peers[p].link == link) return p;
  return WORK_NOBODY;
}

static void work_lend(work *w, const mlfab_action *a, uint32_t peer) {
  if (a->token == 0 || a->bulk_bytes == 0) return;
  assert_true(w->nlent < WORK_LENT);
  work_lent *l = &w->lents[w->nlent++];
  *l = (work_lent){a->token, peer, a->link, a->bulk_bytes, a->bulk, malloc(a->bulk_bytes)};
  assert_non_null(l->was);
  memcpy(l->was, a->bulk, a->bulk_bytes);
}

/* The node may use the bulk again, whose bytes are what they were. Returns the token. */
static uint64_t work_check_lent(work *w, uint32_t i) {
  uint64_t token = w->lents[i].token;
  assert_memory_equal(w->lents[i].bulk, w->lents[i].was, w->lents[i].bytes);
  free(w->lents[i].was);
  w->lents[i] = w->lents[--w->nlent];
  return token;
}

/* The link has gone, and with it the bulks that it borrowed. */
static void work_unlink(work *w, uint32_t p) {
  for (uint32_t i = w->nlent; i-- > 0;)
    if (w->lents[i].link == w->peers[p].link) (void)work_check_lent(w, i);
  w->peers[p].link = 0;
  w->peers[p].blocked = w->peers[p].greeted = 0;
}

/* Returns what the transport answers to a send. */
static int work_send(work *w, const mlfab_action *a) {
  mlfab__header header;
  mlfab__stop stop;
  mlfab__wire_open(a->head, &header);
  const work_heard heard = {work_peer_of(w, a->link),
                            header.type,
                            header.meta_bytes,
                            a->bulk_bytes,
                            (const uint8_t *)a->head + MLFAB_HEADER_BYTES,
                            a->bulk};
  if (header.type == MLFAB__JOIN) w->owed_joins = 1;
  if (heard.peer == WORK_NOBODY) return 0; /* of joining, or a link that closes */
  work_peer *peer = &w->peers[heard.peer];
  uint32_t bit = 1u << heard.peer;
  if (header.type == MLFAB__HOP_MODEL || (header.type == MLFAB__FORWARD && a->bulk_bytes > 0)) {
    if (peer->room == 0) {
      peer->blocked = 1;
      return MLFAB_ERR_AGAIN;
    }
    if (peer->room != WORK_ALL) peer->room--;
    w->taken++;
  } else if (header.type == MLFAB__HELLO) {
    w->owed_hellos |= bit;
  } else if (header.type == MLFAB__DEFINE) {
    assert_int_equal(mlfab__decode_define(heard.meta, heard.meta_bytes, &peer->define), 0);
    w->owed_defines |= bit;
  } else if (header.type == MLFAB__STOP) {
    assert_int_equal(mlfab__decode_stop(heard.meta, heard.meta_bytes, &stop), 0);
    w->stop_attempt = stop.attempt;
    w->owed_stops |= bit;
  }
  if (w->hear) w->hear(w, &heard);
  work_lend(w, a, heard.peer);
  return 0;
}

static int work_call(work *w, const mlfab_action *a) {
  assert_true(w->asked < WORK_CALLS && strncmp(a->address, "seam:", 5) == 0);
  w->asked_tokens[w->asked] = a->token;
  w->asked_peers[w->asked++] = (uint32_t)strtoul(a->address + 5, NULL, 10);
  return 0;
}

static void work_actions(work *w) {
  for (mlfab_action a; mlfab_node_next(w->node, w->now, &a);) {
    uint32_t p = work_peer_of(w, a.link);
    int status = a.kind == MLFAB_ACTION_SEND      ? work_send(w, &a)
                 : a.kind == MLFAB_ACTION_CONNECT ? work_call(w, &a)
                                                  : 0;
    if (a.kind == MLFAB_ACTION_DISCONNECT) w->hung_up = a.link;
    if (a.kind == MLFAB_ACTION_DISCONNECT && p != WORK_NOBODY) {
      w->drops++;
      w->dropped = p;
      work_unlink(w, p);
    }
    mlfab_node_done(w->node, &a, status, w->now);
  }
}

static void work_feed(work *w, mlfab_io_event event) {
  mlfab_node_event(w->node, &event, w->now);
  work_actions(w);
}

static void work_say_on(work *w, uint32_t link, uint32_t p, uint8_t type, uint32_t meta_bytes,
                        const void *bulk, uint32_t bulk_bytes) {
  mlfab__header header = OF(mlfab__header, .type = type, .meta_bytes = meta_bytes,
                            .bulk_bytes = bulk_bytes, .job = mlfab__hash(0, "mlfab", 5), .epoch = 1,
                            .sender = p, .incarnation = w->peers[p].incarnation);
  mlfab__wire_seal(w->head, &header, bulk);
  work_feed(
      w, OF(mlfab_io_event, .kind = MLFAB_IO_FRAME, .link = link, .head = w->head,
            .head_bytes = MLFAB_HEADER_BYTES + meta_bytes, .bulk = bulk, .bulk_bytes = bulk_bytes));
}

/* --- what servers answer --- */

static uint32_t work_dial(work *w, uint64_t token) {
  uint32_t link = ++w->links;
  work_feed(w,
            OF(mlfab_io_event, .kind = MLFAB_IO_UP, .link = link, .token = token,
               .caps = MLFAB_CAP_RELIABLE | MLFAB_CAP_CHECKED | MLFAB_CAP_GHOST | MLFAB_CAP_PROBE));
  return link;
}

static void work_welcome(work *w) {
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
  work_say_on(w, w->joining, work_server(w, 0), MLFAB__WELCOME,
              mlfab__encode_welcome(w->meta, &welcome), infos, bytes);
}

static void work_greet(work *w, uint32_t p, uint32_t kind) {
  mlfab__hello_ack ack =
      OF(mlfab__hello_ack, .server = p - w->config.workers, .eager_bytes = 1 << 18, .generation = 1,
         .kind = kind, .model_stands = w->peers[p].define.ask != 0, .epoch = 1,
         .stopped = kind == MLFAB__ACK_STOP ? w->stop_attempt : 0,
         .nonce = 100 + p - w->config.workers);
  w->peers[p].greeted = 1;
  work_say_on(w, w->peers[p].link, p, MLFAB__HELLO_ACK, mlfab__encode_hello_ack(w->meta, &ack),
              NULL, 0);
}

static void work_answer(work *w, uint32_t p) {
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
    mlfab__define_ack ack = {.server = p - w->config.workers,
                             .ask = define->ask,
                             .packets = 1,
                             .options = define->options};
    work_say_on(w, w->peers[p].link, p, MLFAB__DEFINE_ACK, mlfab__encode_define_ack(w->meta, &ack),
                NULL, 0);
  }
}

/* Carries out what the node asks for, until it asks for nothing: calls succeed, and servers answer. */
static void work_settle(work *w) {
  work_actions(w);
  for (int i = 0; w->asked || w->owed_joins || w->owed_hellos || w->owed_defines || w->owed_stops;
       i++) {
    assert_true(i < 1000);
    if (w->asked) {
      uint32_t p = w->asked_peers[--w->asked];
      assert_true(work_is_server(w, p));
      if (!mlfab_node_ready(w->node, NULL) && w->joining == 0) {
        w->joining = w->links + 1;
      } else {
        w->peers[p].link = w->links + 1;
      }
      (void)work_dial(w, w->asked_tokens[w->asked]);
    } else if (w->owed_joins) {
      w->owed_joins = 0;
      work_welcome(w);
    } else {
      for (uint32_t p = 0; p < WORK_PEERS; p++) work_answer(w, p);
    }
  }
  for (uint32_t p = 0; p < WORK_PEERS; p++) {
    if (!w->peers[p].blocked) continue;
    w->peers[p].blocked = 0;
    work_feed(w, (mlfab_io_event){.kind = MLFAB_IO_WRITABLE, .link = w->peers[p].link});
  }
}

/* --- what the test says --- */

/* A peer sends a frame, whose meta the test has encoded into w->meta. */
static void work_bulk(work *w, uint32_t p, uint8_t type, uint32_t meta_bytes, const void *bulk,
                      uint32_t bulk_bytes) {
  assert_true(w->peers[p].link != 0);
  work_say_on(w, w->peers[p].link, p, type, meta_bytes, bulk, bulk_bytes);
  work_settle(w);
}
static void work_say(work *w, uint32_t p, uint8_t type, uint32_t meta_bytes) {
  work_bulk(w, p, type, meta_bytes, NULL, 0);
}
/* SAY(w, 7, RELEASE, release, {.group = 5}) */
#define SAY(w, p, TYPE, name, ...) \
  work_say(w, p, MLFAB__##TYPE, mlfab__encode_##name((w)->meta, &(const mlfab__##name)__VA_ARGS__))

/* Takes at most `n` frames with a bulk from the link to this peer; returns how many there were. */
static uint32_t work_take(work *w, uint32_t p, uint32_t n) {
  uint32_t taken = w->taken;
  w->peers[p].room = n;
  work_settle(w);
  w->peers[p].room = 0;
  return w->taken - taken;
}

/* Gives a bulk back; a transport that does so twice by mistake changes nothing. */
static void work_give_back(work *w, uint32_t i, int twice) {
  uint32_t link = w->lents[i].link;
  uint64_t token = work_check_lent(w, i);
  for (int k = 0; k <= twice; k++)
    work_feed(w, (mlfab_io_event){.kind = MLFAB_IO_SENT, .link = link, .token = token});
  work_settle(w);
}

/* A worker calls, as the process with this incarnation, in place of the link that it may have. 0: without memory the node hangs
 * up. */
static int work_meet(work *w, uint32_t p, uint32_t incarnation) {
  work_peer *peer = &w->peers[p];
  uint32_t link = work_dial(w, 0);
  mlfab__meet meet = {p, peer->incarnation = incarnation, 1000 + p};
  if (peer->link) work_unlink(w, p);
  peer->link = link;
  peer->greeted = 1;
  work_say(w, p, MLFAB__MEET, mlfab__encode_meet(w->meta, &meet));
  if (w->hung_up != link) return 1;
  if (peer->link == link) work_unlink(w, p);
  return 0;
}

/* The link to a peer breaks. */
static void work_lose(work *w, uint32_t p) {
  uint32_t link = w->peers[p].link;
  if (link == 0) return;
  work_unlink(w, p);
  work_feed(w, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .link = link, .text = "lost"});
  work_settle(w);
}

/* --- time --- */

static void work_tick(work *w) {
  mlfab_node_tick(w->node, w->now);
  work_settle(w);
}

/* Time passes, and the node is called when it wants to be. */
static void work_wait(work *w, uint64_t ns) {
  uint64_t until = w->now + ns;
  for (int i = 0; mlfab_node_deadline(w->node) <= until; i++) {
    assert_true(i < 10000);
    uint64_t due = mlfab_node_deadline(w->node);
    if (due > w->now) w->now = due;
    work_tick(w);
  }
  w->now = until;
}

/* The node calls a server again, whose link was lost. */
static void work_back(work *w, uint32_t p) {
  for (int i = 0; i < 20 && !w->peers[p].greeted; i++) work_wait(w, w->config.heartbeat_ns / 8);
  assert_true(w->peers[p].greeted);
}

/* --- begin and end --- */

/* Fills in what is the same in all tests; the caller changes it before work_open. */
static void work_init(work *w, uint32_t workers, uint32_t servers) {
  memset(w, 0, sizeof *w);
  w->now = 1000;
  w->meta = w->head + MLFAB_HEADER_BYTES;
  mlfab_config_init(&w->config);
  w->config.roles = MLFAB_ROLE_WORKER;
  w->config.rank = (int32_t)workers - 1;
  w->config.dedicated = 1;
  w->config.workers = workers;
  w->config.servers = servers;
  w->config.scheduler = MLFAB_SCHEDULER_BESIDE;
  w->config.model_max_bytes = 1 << 30;
  snprintf(w->config.coordinator, sizeof w->config.coordinator, "seam:%u", workers);
}

/* The node has joined. */
static void work_open(work *w) {
  mlfab_error error;
  w->config.silent_death_ns = w->config.timeout_ns = 1000000 * w->config.heartbeat_ns;
  w->env = SIZED(mlfab_env, .user = w, .allocate = work_allocate, .release = work_release,
                 .log = work_log);
  w->config.env = &w->env;
  if (mlfab_node_open(&w->config, "seam:99", w->now, &w->node, &error)) fail_msg("%s", error.text);
  for (uint32_t s = 0; s < w->config.servers; s++) w->peers[work_server(w, s)].incarnation = s + 1;
  work_settle(w);
  assert_int_equal(mlfab_node_ready(w->node, &error), 1);
  w->drops = 0;
}

/* The model begins, and stands. */
static void work_model(work *w, const mlfab__tensor_info *tensors, uint32_t n,
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
  work_settle(w);
  assert_int_equal(mlfab_node_test(w->node, request, &done, NULL), 0);
  assert_int_equal(done, 1);
}

static void work_close(work *w) {
  while (w->nlent > 0) (void)work_check_lent(w, 0);
  mlfab_node_close(&w->node);
  assert_int_equal(w->memory, 0);
}

#endif
