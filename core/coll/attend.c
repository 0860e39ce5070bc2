/* attend.c - tells who is here, in a build without pushes and pulls: roles at both ends. See attend.h. */
#include "attend.h"

#include "../node/node.h"

#include <stdio.h>

/* --- a server --- */

static int attend_server_hello(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__attend_server *server = self;
  mlfab__attend_entry *entry = &server->entries[at.peer];
  int fresh = greeting->hello->incarnation != entry->incarnation;
  if (fresh) entry->guest = entry->incarnation != 0 || entry->absent;
  if (entry->dead)
    server->port.event(server->port.self, MLFAB_EVENT_REJOINED, (int32_t)at.peer, 0,
                       greeting->hello->incarnation, 0, "joined again");
  greeting->ack->server = server->number;
  greeting->ack->kind = fresh || entry->dead ? MLFAB__ACK_DEAD : MLFAB__ACK_ALIVE;
  greeting->ack->guest = entry->guest;
  entry->incarnation = greeting->hello->incarnation;
  entry->dead = entry->absent = 0;
  return 0;
}

static void attend_server_gone(void *self, mlfab__at at, int left) {
  mlfab__attend_server *server = self;
  server->entries[at.peer].dead = !left;
  server->entries[at.peer].absent = 1;
}

/* The worker has a build with pushes. */
static void attend_refuse_model(mlfab__attend_server *server, uint32_t worker,
                                const mlfab__frame_in *frame) {
  mlfab__define define;
  mlfab__define_ack ack = {.code = MLFAB_ERR_UNSUPPORTED, .server = server->number};
  if (MLFAB__MALFORMED(&server->port, worker, frame, define, &define)) return;
  ack.ask = define.ask;
  snprintf(ack.text, sizeof ack.text,
           "not supported: a model at server %u, which was built without MLFAB_WITH_PUSH",
           server->number);
  MLFAB__POST(&server->port, worker, MLFAB__DEFINE_ACK, define_ack, &ack);
}

static int attend_server_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__attend_server *server = self;
  mlfab__done done;
  if (frame->type == MLFAB__DONE) {
    if (!MLFAB__MALFORMED(&server->port, at.peer, frame, done, &done))
      MLFAB__POST(&server->port, at.peer, MLFAB__DONE_ACK, done, &done);
  } else if (frame->type == MLFAB__DEFINE) {
    attend_refuse_model(server, at.peer, frame);
  } else {
    server->port.drop(server->port.self, at.peer, MLFAB_ERR_FRAME, "a frame that no worker sends");
  }
  return 1;
}

/* Workers may send at any time. */
static int attend_server_always(const void *self) {
  (void)self;
  return 1;
}

static void attend_server_free(void *self) {
  mlfab__attend_server *server = self;
  mlfab__free(server->env, server->entries, server->workers * sizeof *server->entries);
}

static const mlfab__role attend_server_row = {
    .name = "attendance",
    .rest = 1,
    .links = MLFAB__ON(WORKER),
    .frame = attend_server_frame,
    .hello = attend_server_hello,
    .gone = attend_server_gone,
    .waits = attend_server_always,
    .serves = attend_server_always,
    .free = attend_server_free,
};

MLFAB__INTERNAL int mlfab__attend_server_attach(mlfab_node *node) {
  mlfab__role *role = mlfab__roles_add(node, &attend_server_row, sizeof(mlfab__attend_server));
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__attend_server *server = role->self;
  *server = (mlfab__attend_server){.env = &node->env,
                                   .port = mlfab__roles_port(node, role, MLFAB__LINK_WORKER),
                                   .number = node->server_number,
                                   .workers = node->config.workers};
  server->entries = mlfab__alloc_array(server->env, server->workers, sizeof *server->entries);
  return server->entries ? 0 : MLFAB_ERR_MEMORY;
}

/* --- a worker --- */

static void attend_say_done(const mlfab__attend_worker *worker) {
  const mlfab__done done = {0};
  MLFAB__POST(&worker->port, 0, MLFAB__DONE, done, &done);
}

static void attend_finished(mlfab__attend_worker *worker, uint64_t now_ns) {
  if (worker->finish)
    mlfab__request_succeed(worker->requests, mlfab__request_find(worker->requests, worker->finish),
                           now_ns);
}

MLFAB__INTERNAL int mlfab__attend_finish(void *self, uint64_t timeout_ns, uint64_t now_ns,
                                         mlfab_request *request_p, mlfab_error *error) {
  mlfab__attend_worker *worker = self;
  if (worker->finish)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "finish: this worker has finished before");
  int code = mlfab__request_room(worker->requests, MLFAB__REQUEST_JOIN, error);
  if (code) return code;
  worker->finish =
      mlfab__request_open(worker->requests, MLFAB__REQUEST_JOIN, 0, now_ns, timeout_ns)->id;
  *request_p = worker->finish;
  attend_say_done(worker);
  if (worker->dead) attend_finished(worker, now_ns);
  return 0;
}

static void attend_up(void *self, mlfab__at at, mlfab__greeting *greeting) {
  const mlfab__attend_worker *worker = self;
  (void)greeting;
  if (at.peer == 0 && worker->finish && !worker->acked) attend_say_done(worker);
}

static void attend_gone(void *self, mlfab__at at, int left) {
  mlfab__attend_worker *worker = self;
  (void)left;
  if (at.peer != 0) return;
  worker->dead = 1;
  attend_finished(worker, at.now_ns);
}

static int attend_wants(void *self, mlfab__at at, const char *why) {
  (void)self;
  (void)at;
  (void)why;
  return 1;
}

/* A server with pushes may send frames of rounds, which this worker ignores. */
static int attend_frame(void *self, mlfab__at at, const mlfab__frame_in *frame) {
  mlfab__attend_worker *worker = self;
  if (at.peer != 0 || frame->type != MLFAB__DONE_ACK) return 1;
  worker->acked = 1;
  attend_finished(worker, at.now_ns);
  return 1;
}

static void attend_withdraw(void *self, mlfab__request *request, int code, uint64_t now_ns) {
  mlfab__attend_worker *worker = self;
  mlfab__request_blame(request, 0, 1, "%s", "");
  mlfab__request_expire(worker->requests, request, code, now_ns);
}

static const mlfab__role attend_row = {
    .name = "attendant",
    .rest = 1,
    .links = MLFAB__ON(SERVER),
    .requests = MLFAB__SERVES(JOIN),
    .frame = attend_frame,
    .up = attend_up,
    .gone = attend_gone,
    .wants = attend_wants,
    .withdraw = attend_withdraw,
};

MLFAB__INTERNAL int mlfab__attend_attach(mlfab_node *node, mlfab__attend_worker **worker_p) {
  mlfab__role *role = mlfab__roles_add(node, &attend_row, sizeof **worker_p);
  if (!role) return MLFAB_ERR_MEMORY;
  *worker_p = role->self;
  **worker_p = (mlfab__attend_worker){.port = mlfab__roles_port(node, role, MLFAB__LINK_SERVER),
                                      .requests = &node->requests};
  return 0;
}
