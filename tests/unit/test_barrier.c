/* test_barrier.c - the barrier: server 0's role and three workers' over links that break, several barriers open at a
 * time, and what is refused of the frames of either side. Frames travel in the order in which they were sent. */
#include "core/coll/barrier.h"
#include "core/node/node.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

enum { WORKERS = 3, FRAMES = 256, OPEN = 4 };

typedef struct message {
  int to_server;
  uint32_t worker, bytes;
  uint8_t type, meta[64];
} message;

typedef struct worker {
  mlfab_node node; /* with this role only */
  mlfab__barrier_worker *barrier;
  mlfab_request open[OPEN];
  int up;
} worker;

typedef struct fixture {
  mlfab_node node;
  mlfab__barrier_server *server;
  worker workers[WORKERS];
  message frames[FRAMES];
  uint32_t begin, count, server_drops, worker_drops;
} fixture;

static fixture F;

static void put(int to_server, uint32_t w, uint8_t type, const void *meta, uint32_t bytes) {
  if (!F.workers[w].up) return;
  assert_true(F.count < FRAMES && bytes <= sizeof F.frames[0].meta);
  message *m = &F.frames[(F.begin + F.count++) % FRAMES];
  *m = (message){.to_server = to_server, .worker = w, .bytes = bytes, .type = type};
  memcpy(m->meta, meta, bytes);
}

static void server_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  (void)self;
  put(0, peer, type, meta, bytes);
}
static void worker_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  assert_int_equal(peer, 0);
  put(1, (uint32_t)((worker *)self - F.workers), type, meta, bytes);
}
static void server_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)text;
  assert_int_equal(code, MLFAB_ERR_FRAME);
  F.server_drops++;
}
static void worker_drop(void *self, uint32_t peer, int code, const char *text) {
  (void)self, (void)peer, (void)text;
  assert_int_equal(code, MLFAB_ERR_FRAME);
  F.worker_drops++;
}

/* --- the roles, as a node calls them --- */

static void server_up(uint32_t w, int fresh) {
  mlfab__greeting greeting = {.fresh = fresh};
  F.node.roles[0].up(F.server, (mlfab__at){.peer = w}, &greeting);
}
static void worker_up(uint32_t w) {
  mlfab__hello_ack ack = {0};
  mlfab__greeting greeting = {.ack = &ack};
  F.workers[w].node.roles[0].up(F.workers[w].barrier, (mlfab__at){0}, &greeting);
}
static int server_frame(uint32_t w, const mlfab__frame_in *frame) {
  return F.node.roles[0].frame(F.server, (mlfab__at){.peer = w}, frame);
}
static int worker_frame(uint32_t w, const mlfab__frame_in *frame) {
  return F.workers[w].node.roles[0].frame(F.workers[w].barrier, (mlfab__at){.now_ns = 5}, frame);
}

static void open_node(mlfab_node *node) {
  memset(node, 0, sizeof *node);
  assert_int_equal(mlfab__env_init(&node->env, NULL), 0);
  mlfab_config_init(&node->config);
  node->config.workers = WORKERS;
  node->requests.timeout_ns = 1000;
}

static void close_node(mlfab_node *node) {
  mlfab__roles_free(node);
  assert_int_equal(node->env.bytes, 0);
}

static void open_worker(uint32_t w) {
  worker *me = &F.workers[w];
  if (me->barrier) close_node(&me->node);
  open_node(&me->node);
  assert_int_equal(mlfab__barrier_attach(&me->node, &me->barrier), 0);
  me->barrier->port = (mlfab__port){.self = me, .post = worker_post, .drop = worker_drop};
  me->up = 1;
  server_up(w, 1);
  worker_up(w);
}

static int open_all(void **state) {
  (void)state;
  memset(&F, 0, sizeof F);
  open_node(&F.node);
  mlfab__barrier_server *server;
  assert_int_equal(mlfab__barrier_server_attach(&F.node, &server), 0);
  F.server = F.node.roles[0].self;
  F.server->port = (mlfab__port){.post = server_post, .drop = server_drop};
  for (uint32_t w = 0; w < WORKERS; w++) open_worker(w);
  return 0;
}

static int close_all(void **state) {
  (void)state;
  close_node(&F.node);
  for (uint32_t w = 0; w < WORKERS; w++) close_node(&F.workers[w].node);
  return 0;
}

/* As the node does. */
static void waiting(uint32_t w, const mlfab__frame_in *frame) {
  mlfab__waiting in;
  assert_int_equal(mlfab__decode_waiting(frame->meta, frame->meta_bytes, &in), 0);
  mlfab__request_told(&F.workers[w].node.requests, (int)in.kind, in.request, 0, in.rank, in.text);
}

/* The worker that the open calls of w await. */
static int32_t awaited(uint32_t w) {
  int32_t rank = mlfab__request_find(&F.workers[w].node.requests, F.workers[w].open[0])->blame.rank;
  return rank;
}

/* Delivers at most so many frames. Returns how many. */
static uint32_t run(uint32_t most) {
  uint32_t n = 0;
  for (; F.count > 0 && n < most; n++) {
    const message m = F.frames[F.begin++ % FRAMES];
    mlfab__frame_in in = {m.type, m.bytes, 0, m.meta, NULL};
    F.count--;
    if (m.type == MLFAB__WAITING)
      waiting(m.worker, &in);
    else if (m.to_server)
      assert_int_equal(server_frame(m.worker, &in), 1);
    else
      assert_int_equal(worker_frame(m.worker, &in), 1);
  }
  return n;
}

static void settle(void) {
  run(10000);
  assert_int_equal(F.count, 0);
}

/* What is under way to and from it is lost. */
static void cut(uint32_t w) {
  F.workers[w].up = 0;
  for (uint32_t i = 0, n = F.count; i < n; i++) {
    message m = F.frames[F.begin++ % FRAMES];
    F.count--;
    if (m.worker == w) continue;
    F.frames[(F.begin + F.count++) % FRAMES] = m;
  }
}

static void meet(uint32_t w) {
  F.workers[w].up = 1;
  server_up(w, 0);
  worker_up(w);
}

static void call(uint32_t w, uint32_t k) {
  mlfab_error error;
  worker *me = &F.workers[w];
  assert_int_equal(mlfab__barrier_start(me->barrier, 0, 1, &me->open[k], &error), 0);
}

/* How call k of a worker ended, or 1: it has not. */
static int ended(uint32_t w, uint32_t k) {
  mlfab__requests *requests = &F.workers[w].node.requests;
  mlfab__request *request = mlfab__request_find(requests, F.workers[w].open[k]);
  assert_non_null(request);
  if (!request->done) return 1;
  int status = request->result.status;
  mlfab__request_end(requests, request);
  return status;
}

static void all_end(uint32_t k) {
  for (uint32_t w = 0; w < WORKERS; w++) assert_int_equal(ended(w, k), 0);
}

/* It is over when all have called, and who waits knows who has not. Who is gone or has no more data is not awaited. */
static void test_barrier(void **state) {
  (void)state;
  for (uint32_t round = 0; round < 3; round++) {
    for (uint32_t w = 0; w < WORKERS; w++) {
      for (uint32_t j = 0; j < w; j++) assert_int_equal(ended((j + 1) % WORKERS, 0), 1);
      call((w + 1) % WORKERS, 0);
      settle();
    }
    all_end(0);
  }
  call(0, 0), call(2, 0);
  settle();
  assert_int_equal(awaited(0), 1);
  assert_int_equal(awaited(2), 1);
  F.node.roles[0].gone(F.server, (mlfab__at){.peer = 1}, 0);
  settle();
  assert_int_equal(ended(0, 0), 0);
  assert_int_equal(ended(2, 0), 0);
  call(0, 0);
  settle();
  assert_int_equal(ended(0, 0), 1);
  assert_int_equal(awaited(0), 2);
  mlfab__frame_in done = {.type = MLFAB__DONE};
  assert_int_equal(server_frame(2, &done), 0); /* others take it, too */
  settle();
  assert_int_equal(ended(0, 0), 0);
}

/* Several are open at a time: they end in the order of the calls, each when all have called as often. */
static void test_several(void **state) {
  (void)state;
  for (uint32_t k = 0; k < OPEN; k++) call(0, k), call(1, k);
  settle();
  for (uint32_t k = 0; k < OPEN; k++) {
    assert_int_equal(ended(0, k), 1);
    call(2, k);
    settle();
    all_end(k);
  }
}

/* On a new link it is asked for again, also where it was over and the word of it is lost; a new process counts from
 * what is over. Whatever number of frames went before. */
static void test_links_break(void **state) {
  (void)state;
  for (uint32_t victim = 0; victim < WORKERS; victim++) {
    for (uint32_t after = 0; after < 12; after++) {
      for (uint32_t w = 0; w < WORKERS; w++) call(w, 0), call(w, 1);
      run(after);
      cut(victim);
      run(after % 3);
      meet(victim);
      settle();
      all_end(0);
      all_end(1);
    }
  }
  open_worker(2);
  for (uint32_t w = 0; w < WORKERS; w++) call(w, 0);
  settle();
  all_end(0);
  assert_int_equal(F.server_drops + F.worker_drops, 0);
}

/* What is withdrawn and called again is the same one. */
static void test_withdrawn(void **state) {
  (void)state;
  call(0, 0);
  settle();
  worker *me = &F.workers[0];
  me->node.roles[0].withdraw(me->barrier, mlfab__request_find(&me->node.requests, me->open[0]),
                             MLFAB_ERR_TIMEOUT, 5);
  assert_int_equal(ended(0, 0), MLFAB_ERR_TIMEOUT);
  assert_non_null(strstr(me->node.requests.last.text, "barrier: the deadline passed"));
  assert_non_null(strstr(me->node.requests.last.text, "awaiting worker 1"));
  assert_int_equal(me->node.requests.last.rank, 1);
  for (uint32_t w = 0; w < WORKERS; w++) call(w, 0);
  settle();
  all_end(0);
  call(0, 0);
  settle();
  assert_int_equal(ended(0, 0), 1);
}

/* One that joins has no part in barriers that others have called, also when these are several: it waits for none of
 * them, and none of them ends its call. */
static void test_joins_behind_several(void **state) {
  (void)state;
  F.node.roles[0].gone(F.server, (mlfab__at){.peer = 2}, MLFAB__NEVER_HERE);
  for (uint32_t k = 0; k < 3; k++) call(0, k);
  settle();
  open_worker(2);
  call(2, 0);
  settle();
  for (uint32_t k = 0; k < 3; k++) { /* the barriers of the two others */
    assert_int_equal(ended(2, 0), 1);
    assert_int_equal(ended(0, k), 1);
    call(1, 0);
    settle();
    assert_int_equal(ended(0, k), 0);
    assert_int_equal(ended(1, 0), 0);
  }
  call(0, 0);
  settle();
  assert_int_equal(ended(2, 0), 1);
  call(1, 0);
  settle();
  all_end(0);
}

static void test_dead(void **state) {
  mlfab_error error;
  (void)state;
  worker *me = &F.workers[2];
  call(2, 0), call(2, 1);
  me->node.roles[0].gone(me->barrier, (mlfab__at){.now_ns = 9}, 0);
  for (uint32_t k = 0; k < 2; k++) {
    assert_int_equal(ended(2, k), MLFAB_ERR_PEER_DEAD);
    assert_int_equal(me->node.requests.last.is_server, 1);
    assert_int_equal(me->node.requests.last.rank, 0);
  }
  assert_int_equal(mlfab__barrier_start(me->barrier, 0, 1, &me->open[0], &error),
                   MLFAB_ERR_PEER_DEAD);
  assert_non_null(strstr(error.text, "barrier: server 0 is dead"));
}

/* --- frames that nobody may send --- */

static void to_server(uint32_t w, const uint8_t *meta, uint32_t bytes) {
  mlfab__frame_in in = {MLFAB__BARRIER, bytes, 0, meta, NULL};
  assert_int_equal(server_frame(w, &in), 1);
}

static void to_worker(uint32_t w, const uint8_t *meta, uint32_t bytes) {
  mlfab__frame_in in = {MLFAB__BARRIER_DONE, bytes, 0, meta, NULL};
  assert_int_equal(worker_frame(w, &in), 1);
}

static void test_bad_frames(void **state) {
  static const uint64_t numbers[] = {0, (uint64_t)1 << 63, UINT64_MAX};
  uint8_t meta[64];
  (void)state;
  call(0, 0);
  settle();
  for (uint32_t i = 0; i < MLFAB__COUNT(numbers); i++) {
    mlfab__barrier bad = {.number = numbers[i]};
    to_server(1, meta, mlfab__encode_barrier(meta, &bad));
    assert_int_equal(F.server_drops, i + 1);
  }
  mlfab__barrier good = {.number = 1};
  uint32_t bytes = mlfab__encode_barrier(meta, &good);
  to_server(1, meta, bytes - 1);
  assert_int_equal(F.server_drops, 4);
  assert_int_equal(F.server->entries[1].asked, 0);
  to_worker(0, meta, bytes - 1);
  assert_int_equal(F.worker_drops, 1);
  assert_int_equal(ended(0, 0), 1);
  mlfab__frame_in in = {MLFAB__HEARTBEAT, bytes, 0, meta, NULL}; /* no frame of theirs */
  assert_int_equal(server_frame(0, &in), 0);
  assert_int_equal(worker_frame(0, &in), 0);
  call(1, 0), call(2, 0);
  settle();
  all_end(0);
}

/* Texts that are made of others begin with the same words once. */
static void test_words_once(void **state) {
  (void)state;
  mlfab_error error;
  assert_int_equal(MLFAB__FAIL(&error, MLFAB_ERR_STATE, "push: %s", "push: push: no model"),
                   MLFAB_ERR_STATE);
  assert_string_equal(error.text, "push: no model");
  (void)MLFAB__FAIL(&error, MLFAB_ERR_STATE, "push: %s", "a pull: a pull");
  assert_string_equal(error.text, "push: a pull: a pull");
  (void)MLFAB__FAIL(&error, MLFAB_ERR_STATE, "%s", ": : x");
  assert_string_equal(error.text, ": x");
}

int main(void) {
#define TEST(test) cmocka_unit_test_setup_teardown(test, open_all, close_all)
  const struct CMUnitTest tests[] = {TEST(test_barrier),
                                     TEST(test_several),
                                     TEST(test_links_break),
                                     TEST(test_withdrawn),
                                     TEST(test_joins_behind_several),
                                     TEST(test_dead),
                                     TEST(test_bad_frames),
                                     cmocka_unit_test(test_words_once)};
#undef TEST
  return cmocka_run_group_tests(tests, NULL, NULL);
}
