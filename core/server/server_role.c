/* server_role.c - the server as a role of its node. Its links (WORKER) are those of the workers. */
#include "../node/node.h"
#include "server.h"

static int server_role_hello(void *self, mlfab__at at, mlfab__greeting *greeting) {
  mlfab__server *server = self;
  int code = mlfab__server_hello(server, at.peer, greeting->hello, greeting->ack, at.now_ns);
  if (!code) server->peers[at.peer].local = greeting->local != 0;
  return code;
}

static void server_role_lost(void *self, mlfab__at at) {
  mlfab__server_lost(self, at.peer, at.now_ns);
}

static void server_role_gone(void *self, mlfab__at at, int left) {
  mlfab__server_gone(self, at.peer, left, at.now_ns);
}

/* Transfers that a worker was granted, and pulls, are silent since this server runs again. */
static void server_role_awake(void *self, uint64_t late_ns, uint64_t now_ns) {
  mlfab__server *server = self;
  mlfab__serve_walk walk = {NULL, 0};
  if (server->apply.head) mlfab__later(&server->apply.head->last_byte_ns, late_ns, now_ns);
  for (mlfab__server_pull *pull; (pull = mlfab__serve_each(server, &walk)) != NULL;)
    mlfab__later(&pull->progress_ns, late_ns, now_ns);
}

/* Workers may send at any time, and `tick` looks after stalled pulls and moving slices. */
static int server_role_always(const void *self) {
  (void)self;
  return 1;
}

static void server_role_free(void *self) { mlfab__server_free(self); }

static const mlfab__role server_row = {
    .name = "server",
    .rest = 1,
    .sends = MLFAB__ON(WORKER),
    .links = MLFAB__ON(WORKER),
    .frame = mlfab__server_frame,
    .next = mlfab__server_next,
    .taken = mlfab__server_taken,
    .returned = mlfab__server_sent,
    .hello = server_role_hello,
    .lost = server_role_lost,
    .gone = server_role_gone,
    .tick = mlfab__server_tick,
    .awake = server_role_awake,
    .deadline = mlfab__server_deadline,
    .waits = server_role_always,
    .serves = server_role_always,
    .free = server_role_free,
};

MLFAB__INTERNAL int mlfab__server_attach(mlfab_node *node, mlfab__server **server_p) {
  mlfab__role *role = mlfab__roles_add(node, &server_row, sizeof **server_p);
  if (!role) return MLFAB_ERR_MEMORY;
  mlfab__port down = mlfab__roles_port(node, role, MLFAB__LINK_WORKER);
  *server_p = role->self;
  return mlfab__server_init(*server_p, &node->env, &node->config, node->server_number, &down,
                            &node->stats);
}
