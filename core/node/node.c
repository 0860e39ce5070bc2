/* node.c - a node: events, actions, time, and leaving. See node.h and mlfab_node.h. */
#include "node.h"

#include <stdio.h>

enum { NODE_STRANGERS = 64, NODE_RESTARTS = 48 /* the bit of a job that counts its restarts */ };

/* Takes the time, which every call tells. */
static void node_look(mlfab_node *node, uint64_t now_ns) {
  if (MLFAB__UNLIKELY(now_ns > node->now_ns + MLFAB__PAUSE_BEATS * node->config.heartbeat_ns))
    mlfab__alive_look(node, mlfab_node_deadline(node), now_ns);
  node->now_ns = mlfab__max(node->now_ns, now_ns);
}

/* --- open and close --- */

/* Sets the identity of this node in the fabric. */
static void node_identify(mlfab_node *node) {
  const mlfab_config *c = &node->config;
  node->is_worker = (c->roles & MLFAB_ROLE_WORKER) != 0 && !c->join;
  node->is_server = (c->roles & MLFAB_ROLE_SERVER) != 0 && !c->join;
  node->is_replica = c->roles == MLFAB_ROLE_REPLICA;
  node->is_server |= node->is_replica;
  /* A copy serves only after it knows that the fabric is being formed, or has the votes. */
  node->standby = node->is_server && c->replicas;
  uint32_t others = c->workers + (c->dedicated ? (1 + c->replicas) * c->servers : 0);
  int own = c->roles == MLFAB_ROLE_SCHEDULER;
  node->nodes = others + (c->scheduler == MLFAB_SCHEDULER_OWN);
  node->id = own ? others : (uint32_t)c->rank + (c->dedicated && node->is_server ? c->workers : 0);
  if (node->is_replica) node->id += c->servers;
  int votes = c->replicas && (node->is_server || own);
  node->voter = votes ? node->id - c->workers : MLFAB__NO_NODE;
  node->server_number = node->is_server ? (uint32_t)c->rank : MLFAB__NO_NODE;
  node->is_coordinator = node->server_number == 0;
  node->nplaces = c->servers;
  node->nroutes = 3 * c->servers;
  node->meets = node->is_coordinator && !node->is_replica;
  if (c->join) node->id = MLFAB__NO_NODE;
  node->is_scheduler = own || (node->is_coordinator && c->scheduler == MLFAB_SCHEDULER_BESIDE);
  size_t run;
  node->restarts = mlfab__job_restarts(c->job, &run);
  node->job = mlfab__hash(0, c->job, run) + ((uint64_t)node->restarts << NODE_RESTARTS);
  node->epoch = 1;
  node->join_link = MLFAB__NO_LINK;
  for (uint32_t i = 0; i < MLFAB__PAIRS; i++)
    node->pairs[i][0] = node->pairs[i][1] = MLFAB__NO_LINK;
}

/* A hash of the host: nodes that listen at one address share its links. Nodes that listen only inside their machine
 * count as one host. */
static uint64_t node_host(const char *addresses) {
  static const char local[] = "localhost";
  for (const char *at = addresses; *at;) {
    size_t n = strcspn(at, " ");
    size_t host = n;
    int has_port = !strncmp(at, "tcp:", 4) || !strncmp(at, "tls:", 4);
    while (has_port && host > 4 && at[host] != ':') host--;
    int inside = !strncmp(at, "shm:", 4) || !strncmp(at, "unix:", 5) ||
                 (has_port && (!strncmp(at + 4, "127.", 4) || !strncmp(at + 4, "[::1]", 5)));
    if (!inside && n > 0) return mlfab__hash(1, at, host) | 1;
    at += n;
    while (*at == ' ') at++;
  }
  return mlfab__hash(1, local, sizeof local - 1) | 1;
}

static int node_memory(mlfab_node *node) {
  const mlfab_config *c = &node->config;
  uint32_t routes = node->nroutes;
  node->head = mlfab__alloc_aligned(&node->env, MLFAB_HEADER_BYTES + MLFAB_META_MAX);
  node->routes = mlfab__alloc_array(&node->env, routes, sizeof *node->routes);
  node->places = mlfab__alloc_array(&node->env, node->nplaces, sizeof *node->places);
  if (!node->head || !node->routes || !node->places || mlfab__node_reserve(node))
    return MLFAB_ERR_MEMORY;
  for (uint32_t r = 0; r < routes; r++) node->routes[r].link = MLFAB__NO_LINK;
  for (uint32_t s = 0; s < node->nplaces; s++) {
    node->places[s].vacant = s < c->servers;
    node->places[s].info.node = mlfab__node_of_server(node, s);
    node->places[s].info.roles = MLFAB_ROLE_SERVER;
  }
  if (node->is_server && mlfab__caller_init(node)) return MLFAB_ERR_MEMORY;
  if (!node->is_coordinator) return 0;
  node->peers = mlfab__alloc_array(&node->env, node->nodes, sizeof *node->peers);
  if (!node->peers) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < node->nodes; i++) node->peers[i].link = MLFAB__NO_LINK;
  return 0;
}

/* --- rules by kind of link --- */

static void node_new_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  if (frame->type == MLFAB__MEET && node->between) {
    node->between->meet(node, index, frame);
  } else if (frame->type == MLFAB__HELLO) {
    mlfab__caller_hello(node, index, frame);
  } else if (frame->type == MLFAB__JOIN) {
    mlfab__bootstrap_frame(node, index, frame);
  } else {
    mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                       "neither JOIN, HELLO nor MEET came first");
  }
}

static void node_call_failed(mlfab_node *node, uint64_t token, const char *why);

/* Takes the failure of a call of this node that was not proven yet. */
static void node_new_down(mlfab_node *node, const mlfab__link *was, uint32_t index,
                          const char *why) {
  (void)index;
  if (!was->called && was->pending != 0) node_call_failed(node, was->pending, why);
}

static void node_claim_frame(mlfab_node *node, uint32_t index, const mlfab__frame_in *frame) {
  if (frame->type == MLFAB__HEARTBEAT) return;
  mlfab__node_unclaim(node, &node->links[index]);
  mlfab__node_refuse(node, index, MLFAB_ERR_FRAME, MLFAB_NO_RANK,
                     "a frame before its number was settled");
}

static const mlfab__link_rule node_rules[MLFAB__LINK_KINDS] = {
    [MLFAB__LINK_NEW] = {node_new_frame, node_new_down, NULL},
    [MLFAB__LINK_CLAIM] = {node_claim_frame, NULL, NULL},
    [MLFAB__LINK_JOIN_IN] = {mlfab__bootstrap_frame, mlfab__bootstrap_down, NULL},
    [MLFAB__LINK_JOIN_OUT] = {mlfab__bootstrap_frame, mlfab__bootstrap_down, NULL},
    [MLFAB__LINK_SERVER] = {mlfab__server_link_frame, mlfab__server_link_down, NULL},
    [MLFAB__LINK_RESHARD] = {mlfab__server_link_frame, mlfab__server_link_down,
                             mlfab__server_link_across},
    [MLFAB__LINK_WORKER] = {mlfab__caller_frame, mlfab__caller_down, NULL},
    [MLFAB__LINK_RESHARD_IN] = {mlfab__caller_frame, mlfab__caller_down, NULL},
};

/* Adds an address at which this node is reached, too: the local end of its call to server 0. */
static void node_reached_at(mlfab_node *node, const char *address) {
  int asked = node->config.host != node_host(node->addresses);
  mlfab__node_add_address(node->addresses, address);
  if (!asked) node->config.host = node_host(node->addresses);
}

MLFAB__INTERNAL int mlfab__node_make(const mlfab_config *complete, mlfab__env *env,
                                     const char *addresses, const mlfab__copies_table *copies,
                                     uint64_t now_ns, mlfab_node **node_p) {
  mlfab_node *node = mlfab__alloc(env, sizeof *node);
  if (!node) return MLFAB_ERR_MEMORY;
  node->env = *env;
  node->requests.env = &node->env;
  node->requests.timeout_ns = complete->timeout_ns;
  node->config = *complete;
  node->config.env = NULL;
  node->founders = complete->workers;
  node->config.workers = complete->workers_max;
  node->founding = complete->servers;
  node->config.servers = complete->servers_max;
  node_identify(node);
  node->opened_ns = node->now_ns = now_ns;
  node->nonce = mlfab__hash(complete->seed ^ node->id, &now_ns, sizeof now_ns);
  if (complete->progress == MLFAB_PROGRESS_AUTO) node->config.progress = MLFAB_PROGRESS_THREAD;
  snprintf(node->addresses, sizeof node->addresses, "%s", addresses ? addresses : "");
  if (node->config.host == 0) node->config.host = node_host(node->addresses);
  memcpy(node->rules, node_rules, sizeof node->rules);
  *node_p = node;
  int code = copies ? copies->open(node) : 0;
  return code ? code : node_memory(node);
}

MLFAB__INTERNAL void mlfab__node_begin(mlfab_node *node) {
  mlfab__roles_list(node);
  for (uint32_t w = node->founders; node->is_server && w < node->config.workers; w++) {
    node->callers[w].left = 1;
    mlfab__roles_gone(node, MLFAB__LINK_WORKER, w, MLFAB__NEVER_HERE);
  }
  mlfab__node_arm_at(node, MLFAB__TIMER_JOIN, 0, node->now_ns);
  mlfab__bootstrap_start(node);
}

MLFAB_API void mlfab_node_close(mlfab_node **node_p) {
  mlfab_node *node = node_p ? *node_p : NULL;
  if (!node) return;
  mlfab__env env = node->env;
  mlfab__roles_free(node);
  mlfab__free(&node->env, node->parts, node->parts_bytes);
  mlfab__requests_free(&node->requests);
  mlfab__node_free_links(node);
  if (node->guard) node->guard->free(node);
  if (node->growth) node->growth->free(node);
  for (uint32_t i = 0; node->peers && i < node->nodes; i++)
    mlfab__free(&node->env, node->peers[i].addresses, MLFAB__ADDRESSES_MAX);
  mlfab__free(&node->env, node->peers, node->nodes * sizeof *node->peers);
  mlfab__free(&node->env, node->routes, node->nroutes * sizeof *node->routes);
  mlfab__free(&node->env, node->places, node->nplaces * sizeof *node->places);
  if (node->copies) node->copies->free(node);
  uint32_t workers = node->config.workers;
  mlfab__free(&node->env, node->callers, (workers + 1) * sizeof *node->callers);
  mlfab__free(&node->env, node->reshard_links, node->config.servers * sizeof *node->reshard_links);
  uint32_t room = node->nplaces * (MLFAB__ADDRESSES_MAX + 32);
  mlfab__free(&node->env, node->welcome, room < MLFAB_BULK_MAX ? room : MLFAB_BULK_MAX);
  mlfab__free_aligned(&node->env, node->head, MLFAB_HEADER_BYTES + MLFAB_META_MAX);
  env.hooks = node->env.hooks;
  mlfab__free(&env, node, sizeof *node);
  *node_p = NULL;
}

/* --- after every event --- */

/* Closes the links that a role dropped, or whose queue is full. */
static void node_settle(mlfab_node *node) {
  while (node->doomed) {
    node->doomed = 0;
    for (uint32_t i = 0; i < node->nlinks; i++) {
      mlfab__link *link = &node->links[i];
      if (!link->doomed || link->kind == MLFAB__LINK_FREE) continue;
      link->doomed = 0;
      if (link->self) {
        mlfab__inner_lose(node);
      } else {
        mlfab__node_hang_up(node, i, "given up");
      }
    }
  }
}

static void node_part(mlfab_node *node);

/* Does a role wait for an event? Then the timer SCAN runs four times a beat. */
static int node_waits(const mlfab_node *node) {
  int waits = node->self_lost;
  MLFAB__EACH_ROLE(role, node, waits) waits = waits || role->waits(role->self);
  return waits;
}

/* Carries out mlfab__node_crash, which a role has called: to other nodes this process looks as if it had died. */
static void node_carry_out_crash(mlfab_node *node) {
  mlfab__requests *table = &node->requests;
  mlfab__request *request;
  uint32_t place = 0;
  node->crashes = MLFAB__CRASH_DONE;
  for (uint32_t i = 0; i < node->nlinks; i++)
    if (node->links[i].kind != MLFAB__LINK_FREE && !node->links[i].self)
      mlfab__node_hang_up(node, i, "this node ends");
  while ((request = mlfab__request_due(table, UINT64_MAX, &place)))
    mlfab__request_finish(table, request, node->failure.code, node->failure.rank,
                          (int)node->failure.is_server, node->now_ns, "%s", node->failure.text);
}

/* Runs after each event or call that may have changed state. */
static void node_epilogue(mlfab_node *node) {
  if (MLFAB__UNLIKELY(node->crashes)) {
    if (node->crashes == MLFAB__CRASH_ASKED) node_carry_out_crash(node);
    return;
  }
  for (uint32_t i = 0; i < node->nsettles; i++) {
    const mlfab__role *role = &node->roles[node->settles[i]];
    role->settle(role->self);
  }
  if (node->doomed) node_settle(node);
  if (node->growth) node->growth->settle(node);
  if (node->claim_due) mlfab__claim_again(node);
  if (node->self_due) mlfab__inner_run(node);
  if (node->parting) node_part(node);
  if (!mlfab__heap_has(&node->timers, mlfab__node_timer(node, MLFAB__TIMER_SCAN, 0)) &&
      node_waits(node))
    mlfab__node_arm(node, MLFAB__TIMER_SCAN, 0, node->now_ns);
  if (MLFAB__UNLIKELY(node->requests.last.code == MLFAB_ERR_PEER_DEAD))
    mlfab__server_link_say_why(node);
}

/* --- events --- */

/* The reason why the sender of a link's first frame is no member of this job; NULL if it is a member. */
static const char *node_strange(const mlfab_node *node, const mlfab__header *header,
                                enum mlfab__cause *cause_p) {
  *cause_p = MLFAB__CAUSE_ELSEWHERE;
  if (!node->guard && (header->type == MLFAB__CHALLENGE || header->flags & MLFAB__WIRE_TAGGED)) {
    *cause_p = MLFAB__CAUSE_KEYLESS;
    return "the caller has a key, and this job has none (MLFAB_KEY)";
  }
  return header->job != node->job ? "the jobs have different names (MLFAB_JOB)" : NULL;
}

/* Does the sender of a link's first frame belong to another start of this job? Then one of both is late, and 1. */
static int node_restarted(mlfab_node *node, uint32_t index, const mlfab__header *header) {
  const uint64_t own = node->restarts;
  const uint64_t apart = header->job - (node->job - (own << NODE_RESTARTS));
  const uint64_t theirs = apart >> NODE_RESTARTS;
  char text[200];
  size_t run;
  if (theirs == own || apart != theirs << NODE_RESTARTS) return 0;
  (void)mlfab__job_restarts(node->config.job, &run);
  snprintf(text, sizeof text,
           "job '%.*s' was started again: this process is of restart %u, and restart %u is here",
           (int)run, node->config.job, (unsigned)mlfab__min(own, theirs),
           (unsigned)mlfab__max(own, theirs));
  if (theirs > own) {
    mlfab__node_crash(node, MLFAB_ERR_FENCED, text);
  } else {
    node->stats.strangers_refused++;
    mlfab__node_refuse(node, index, MLFAB_ERR_FENCED, MLFAB_NO_RANK, text);
  }
  return 1;
}

MLFAB__INTERNAL void mlfab__node_turn_away(mlfab_node *node, uint32_t index,
                                           enum mlfab__cause cause, const char *why) {
  uint64_t n = ++node->stats.strangers_refused;
  node->strange = why;
  if ((n & (n - 1)) == 0)
    mlfab__log(&node->env, MLFAB_LOG_WARN, "a stranger was refused (%llu so far): %s",
               (unsigned long long)n, why);
  mlfab__node_refuse_as(node, index, cause, MLFAB_ERR_JOB, MLFAB_NO_RANK, why);
}

/* Checks a frame from outside, then dispatches it. */
static void node_frame(mlfab_node *node, uint32_t index, const mlfab_io_event *event) {
  mlfab__link *link = &node->links[index];
  uint32_t head_bytes = event->head_bytes, bulk_bytes = event->bulk_bytes;
  int code = 0;
  if (!(link->caps & MLFAB_CAP_CHECKED)) {
    code = head_bytes < MLFAB_HEADER_BYTES
               ? MLFAB_ERR_FRAME
               : mlfab_frame_check(event->head, &head_bytes, &bulk_bytes);
    if (!code && (head_bytes != event->head_bytes || bulk_bytes != event->bulk_bytes))
      code = MLFAB_ERR_FRAME;
    if (!code) code = mlfab_frame_verify(event->head, head_bytes, event->bulk, bulk_bytes);
  }
  if (code) {
    mlfab__node_drop(node, index, code, mlfab_error_text(code));
    return;
  }
  mlfab__header header;
  mlfab__wire_open(event->head, &header);
  if (node->guard && !node->guard->frame(node, index, event, &header)) return;
  node->stats.frames_received++;
  node->stats.bytes_received += (uint64_t)head_bytes + bulk_bytes;
  node->stats.payload_received += bulk_bytes;
  node->stats.trace_hash =
      mlfab__mix(node->stats.trace_hash ^ node->now_ns ^ ((uint64_t)header.type << 56) ^
                 ((uint64_t)header.sender << 32) ^ head_bytes ^ ((uint64_t)bulk_bytes << 20));
  /* A peer that refuses us does not name its job. */
  int last = header.type == MLFAB__REFUSE || header.type == MLFAB__BYE;
  enum mlfab__cause cause = MLFAB__CAUSE_ELSEWHERE;
  const char *strange = link->kind == MLFAB__LINK_NEW      ? node_strange(node, &header, &cause)
                        : header.job != node->job && !last ? "a frame of another job"
                                                           : NULL;
  if (strange && link->kind == MLFAB__LINK_NEW && node_restarted(node, index, &header)) return;
  if (strange) {
    mlfab__node_turn_away(node, index, cause, strange);
    return;
  }
  /* Frames of a copy are void when the other copy has replaced it. */
  int says = node->copies && mlfab__node_has_other(node, link->kind) &&
             header.type != MLFAB__HELLO_ACK && !last;
  if (says && header.epoch < link->term) {
    mlfab__node_drop(node, index, MLFAB_ERR_FENCED, "a frame of a copy that was replaced");
    return;
  }
  mlfab__frame_in frame = {header.type, header.meta_bytes, bulk_bytes,
                           (const uint8_t *)event->head + MLFAB_HEADER_BYTES, event->bulk};
  if (MLFAB__UNLIKELY(node->tap != NULL)) node->show(node, link, 0, header.incarnation, &frame);
  mlfab__node_dispatch(node, index, &frame);
}

/* Called when a node called: closes the oldest of the links that no role knows yet if there are too many. All members
 * may call at the same time. */
static void node_bound_strangers(mlfab_node *node) {
  uint32_t count = 0, oldest = MLFAB__NO_LINK, most = node->nodes + NODE_STRANGERS;
  for (uint32_t i = 0; node->by_id.count > most && i < node->nlinks; i++) {
    const mlfab__link *link = &node->links[i];
    if (!link->called || link->greeted || link->kind == MLFAB__LINK_JOIN_IN) continue;
    count++;
    if (oldest == MLFAB__NO_LINK || link->since_ns < node->links[oldest].since_ns) oldest = i;
  }
  if (count <= most) return;
  node->stats.strangers_refused++;
  mlfab__node_hang_up(node, oldest, "was no member yet, and went for a newer connection");
}

/* Takes the failure of a call to a server or to another worker. */
static void node_call_failed(mlfab_node *node, uint64_t token, const char *why) {
  uint64_t called = token - MLFAB__TOKEN_SERVER, routes = node->nroutes;
  if (token == MLFAB__TOKEN_JOIN) {
    mlfab__bootstrap_failed(node, why);
  } else if (called < routes) {
    mlfab__server_link_failed(node, (uint32_t)called, why);
  } else if (node->between) {
    node->between->failed(node, called - routes, why);
  }
}

MLFAB__INTERNAL void mlfab__node_call_up(mlfab_node *node, uint64_t token, uint32_t index) {
  uint64_t called = token - MLFAB__TOKEN_SERVER, routes = node->nroutes;
  if (token == MLFAB__TOKEN_JOIN && node->phase == MLFAB__BOOTSTRAP_JOINING) {
    mlfab__bootstrap_up(node, index);
  } else if (token >= MLFAB__TOKEN_SERVER && called < routes) {
    mlfab__server_link_up(node, (uint32_t)called, index);
  } else if (token < MLFAB__TOKEN_SERVER || !node->between ||
             !node->between->up(node, called - routes, index)) {
    mlfab__node_hang_up(node, index, "no longer wanted");
  }
}

static void node_up(mlfab_node *node, const mlfab_io_event *event) {
  uint32_t index = mlfab__node_new_link(node);
  if (index == MLFAB__NO_LINK || mlfab__map_put(&node->env, &node->by_id, event->link, index)) {
    mlfab__node_act(node, MLFAB_ACTION_DISCONNECT, event->link, 0);
    if (event->token != 0) node_call_failed(node, event->token, "out of memory");
    return;
  }
  mlfab__link *link = &node->links[index];
  link->kind = MLFAB__LINK_NEW;
  link->id = event->link;
  link->caps = event->caps;
  link->called = event->token == 0;
  link->heard_ns = link->sent_ns = link->since_ns = node->now_ns;
  mlfab__node_arm(node, MLFAB__TIMER_LINK, index, node->now_ns);
  if (event->token == MLFAB__TOKEN_JOIN && event->text) node_reached_at(node, event->text);
  if (link->called) node_bound_strangers(node);
  if (!link->called && node->guard) {
    node->guard->call(node, index, event->token);
  } else if (!link->called) {
    mlfab__node_call_up(node, event->token, index);
  }
}

static void node_cannot_dial(mlfab_node *node, int code) {
  char text[MLFAB__TEXT_MAX + 128];
  snprintf(text, sizeof text, "joining: cannot dial %s: %s", node->join_address,
           code == MLFAB_ERR_ADDRESS ? mlfab__address_fault(node->join_address)
                                     : mlfab_error_text(code));
  mlfab__node_fail(node, code, 0, 1, text);
}

/* Ends joining: server 0 has another key, protocol or transport, as the transport found: no later try would succeed. */
static void node_cannot_join(mlfab_node *node, int code, const char *why) {
  char text[MLFAB__TEXT_MAX];
  /* A layer (TLS) tells by its text that the key is wrong: another port is no remedy. */
  int keys = strstr(why, "not this job's (MLFAB_KEY)") != NULL;
  if (mlfab__bootstrap_elsewhere(node, keys ? MLFAB__CAUSE_KEY : MLFAB__CAUSE_ELSEWHERE, why))
    return;
  mlfab__format(text, sizeof text, "joining: %s", why);
  mlfab__node_fail(node, code, 0, 1, text);
}

static void node_down(mlfab_node *node, const mlfab_io_event *event) {
  uint32_t index;
  const char *why = event->text ? event->text : mlfab_error_text(event->code);
  char altered[128];
  int foreign = event->code == MLFAB_ERR_PROTOCOL_OLDER || event->code == MLFAB_ERR_PROTOCOL_NEWER;
  int damaged = foreign || event->code == MLFAB_ERR_FRAME || event->code == MLFAB_ERR_CRC ||
                event->code == MLFAB_ERR_LIMIT;
  if (damaged) node->stats.frames_refused++;
  if (event->link != 0) {
    if (!mlfab__node_link(node, event->link, &index)) return;
    const mlfab__link *link = &node->links[index];
    int joining =
        link->kind == MLFAB__LINK_JOIN_OUT || (!link->called && link->pending == MLFAB__TOKEN_JOIN);
    int vain = link->heard_ns == link->since_ns;
    if (damaged && link->tagged) {
      node->guard->altered(node, link, altered, sizeof altered);
      mlfab__log(&node->env, MLFAB_LOG_WARN, "link given up: %s (%s)", altered, why);
      why = altered;
      foreign = 0;
    }
    mlfab__node_link_down(node, index, why);
    if (joining && vain) mlfab__bootstrap_foreign(node);
    if (joining && (foreign || event->code == MLFAB_ERR_JOB))
      node_cannot_join(node, event->code, why);
    return;
  }
  if (event->token != 0) node_call_failed(node, event->token, why);
  if (event->token == MLFAB__TOKEN_JOIN && event->code == MLFAB_ERR_INSECURE)
    node_cannot_dial(node, event->code);
  if (event->token == MLFAB__TOKEN_JOIN && (foreign || event->code == MLFAB_ERR_JOB))
    node_cannot_join(node, event->code, why);
}

static void node_measured(mlfab_node *node, const mlfab_measure *measure) {
  if (!measure) return;
  node->stats.network_received += measure->own_in;
  node->stats.network_sent += measure->own_out;
  MLFAB__EACH_ROLE(role, node, measured) role->measured(role->self, measure, node->now_ns);
}

MLFAB_API void mlfab_node_event(mlfab_node *node, const mlfab_io_event *event, uint64_t now_ns) {
  uint32_t index;
  if (!node || !event) return;
  node_look(node, now_ns);
  if (node->crashes) {
    if (event->kind == MLFAB_IO_UP) mlfab__node_act(node, MLFAB_ACTION_DISCONNECT, event->link, 0);
    return;
  }
  switch (event->kind) {
    case MLFAB_IO_UP:
      node_up(node, event);
      break;
    case MLFAB_IO_DOWN:
      node_down(node, event);
      break;
    case MLFAB_IO_FRAME:
      if (mlfab__node_link(node, event->link, &index) &&
          (!node->links[index].closing || node->links[index].lingers))
        node_frame(node, index, event);
      break;
    case MLFAB_IO_HEAD:
      if (node->guard && mlfab__node_link(node, event->link, &index) && !node->links[index].closing)
        node->guard->head(node, index, event);
      break;
    case MLFAB_IO_SENT:
      if (!mlfab__node_link(node, event->link, &index)) break;
      mlfab__outbox_left(node, index);
      mlfab__roles_returned(node, node->links[index].kind, node->links[index].peer, event->token);
      break;
    case MLFAB_IO_MEASURED:
      node_measured(node, event->measure);
      break;
    case MLFAB_IO_FILE:
      if (node->files) node->files->event(node, event);
      break;
    case MLFAB_IO_WRITABLE:
      if (!mlfab__node_link(node, event->link, &index)) break;
      node->links[index].blocked = 0;
      mlfab__node_ready_link(node, index);
      break;
    case MLFAB_IO_REFUSED:
      node->stats.strangers_refused++;
      mlfab__log(&node->env, MLFAB_LOG_INFO, "a stranger was turned away: %s",
                 event->text ? event->text : mlfab_error_text(event->code));
      break;
    default:
      break;
  }
  node_epilogue(node);
}

/* --- actions --- */

/* The first action of the queue. */
static void node_next_action(mlfab_node *node, mlfab_action *action) {
  const mlfab__queued_action *queued = &node->actions[node->actions_begin];
  *action = (mlfab_action){.kind = queued->kind, .link = queued->link, .token = queued->token};
  uint64_t called = queued->token - MLFAB__TOKEN_SERVER, routes = node->nroutes;
  if (queued->kind == MLFAB_ACTION_CONNECT)
    action->address = queued->token == MLFAB__TOKEN_JOIN ? node->join_address
                      : called < routes ? mlfab__node_place(node, (uint32_t)called)->info.addresses
                                        : node->between->address(node, called - routes);
  if (queued->kind == MLFAB_ACTION_FILE) action->file = node->files->op(node, queued->token);
  node->out = MLFAB__OUT_ACTION;
}

static void node_seal(mlfab_node *node, const mlfab__link *link, mlfab_action *action) {
  const mlfab__frame_out *frame = &node->frame;
  mlfab__header header = {
      .type = frame->type, .meta_bytes = frame->meta_bytes, .bulk_bytes = frame->bulk_bytes};
  if (link->kind != MLFAB__LINK_NEW && link->kind != MLFAB__LINK_CLAIM &&
      frame->type != MLFAB__PROOF) {
    header.job = node->job;
    header.epoch = link->term ? link->term : node->epoch;
    header.sender = node->id;
    header.incarnation = node->incarnation;
  }
  int tagged = link->tagged && frame->type != MLFAB__PROOF;
  if (tagged)
    header.flags = MLFAB__WIRE_TAGGED;
  else if (frame->bulk && !(link->caps & MLFAB_CAP_RELIABLE) && !node->config.no_payload_crc)
    header.flags = MLFAB__WIRE_BULK_CRC;
  mlfab__wire_seal(node->head, &header, frame->bulk);
  if (tagged)
    node->guard->seal(link, node->head, MLFAB_HEADER_BYTES + frame->meta_bytes, frame->bulk,
                      frame->bulk_bytes);
  memset(action, 0, sizeof *action);
  action->kind = MLFAB_ACTION_SEND;
  action->link = link->id;
  action->head = node->head;
  action->head_bytes = MLFAB_HEADER_BYTES + frame->meta_bytes;
  action->bulk = frame->bulk;
  action->bulk_bytes = frame->bulk_bytes;
  action->token = frame->token;
  action->callers = frame->callers;
  if (frame->token) action->token |= (uint64_t)node->out_role << MLFAB__ROLE_SHIFT;
}

/* Removes the first link from the ring. */
static void node_unlist(mlfab_node *node, uint32_t index) {
  node->ready_begin = (node->ready_begin + 1) % node->nlinks;
  node->ready_count--;
  node->links[index].listed = 0;
  if (node->links[index].kind == MLFAB__LINK_FREE && index < node->first_free)
    node->first_free = index;
}

MLFAB_API int mlfab_node_next(mlfab_node *node, uint64_t now_ns, mlfab_action *action_p) {
  if (!node || !action_p) return 0;
  node_look(node, now_ns);
  if (node->out != MLFAB__OUT_NONE) {
    *action_p = node->action;
    return 1;
  }
  if (node->actions_count > 0) {
    node_next_action(node, &node->action);
    *action_p = node->action;
    return 1;
  }
  while (node->ready_count > 0) {
    uint32_t index = node->ready[node->ready_begin];
    mlfab__link *link = &node->links[index];
    if (link->kind != MLFAB__LINK_FREE && !link->self && !link->blocked &&
        mlfab__outbox_yield(node, index)) {
      node_seal(node, link, &node->action);
      *action_p = node->action;
      return 1;
    }
    node_unlist(node, index);
    if (link->kind != MLFAB__LINK_FREE && link->closing && !link->lingers && !link->blocked)
      mlfab__node_hang_up(node, index, "closed");
    if (node->actions_count > 0) return mlfab_node_next(node, now_ns, action_p);
  }
  for (uint32_t i = 0; i < node->nidles; i++) {
    const mlfab__role *role = &node->roles[node->idles[i]];
    role->idle(role->self);
  }
  return 0;
}

/* Moves the first link of the ring to its end. */
static void node_rotate(mlfab_node *node) {
  uint32_t index = node->ready[node->ready_begin];
  node->ready_begin = (node->ready_begin + 1) % node->nlinks;
  node->ready[(node->ready_begin + node->ready_count - 1) % node->nlinks] = index;
}

static void node_done_action(mlfab_node *node, int status) {
  mlfab__queued_action queued = node->actions[node->actions_begin];
  node->actions_begin = (node->actions_begin + 1) % node->actions_room;
  node->actions_count--;
  node->out = MLFAB__OUT_NONE;
  uint32_t index;
  if (queued.kind == MLFAB_ACTION_PROBE && mlfab__node_link(node, queued.link, &index))
    mlfab__alive_probed(node, index, status);
  if (status == 0) return;
  if (queued.kind == MLFAB_ACTION_FILE) {
    node->files->refused(node, queued.token, status);
  } else if (queued.kind == MLFAB_ACTION_CONNECT) {
    const mlfab_io_event event = {.token = queued.token, .code = status};
    node_down(node, &event);
    if (queued.token == MLFAB__TOKEN_JOIN && status == MLFAB_ERR_ADDRESS)
      node_cannot_dial(node, status);
  } else if (queued.kind == MLFAB_ACTION_DETACH && mlfab__node_link(node, queued.link, &index)) {
    /* No memory for a copy: closing the link returns the buffer. */
    mlfab__node_hang_up(node, index, "out of memory");
  }
}

MLFAB_API void mlfab_node_done(mlfab_node *node, const mlfab_action *action, int status,
                               uint64_t now_ns) {
  if (!node || !action || node->out == MLFAB__OUT_NONE) return;
  node_look(node, now_ns);
  if (node->out == MLFAB__OUT_ACTION) {
    node_done_action(node, status);
    node_epilogue(node);
    return;
  }
  uint32_t index = node->out_link;
  mlfab__link *link = &node->links[index];
  if (status == 0) {
    node->stats.frames_sent++;
    node->stats.bytes_sent += (uint64_t)action->head_bytes + action->bulk_bytes;
    node->stats.payload_sent += action->bulk_bytes;
    node->stats.trace_hash =
        mlfab__mix(node->stats.trace_hash ^ node->now_ns ^ ((uint64_t)node->frame.type << 48) ^
                   ((uint64_t)action->bulk_bytes << 8));
    link->sent_ns = node->now_ns;
    const mlfab__frame_in shown = {node->frame.type, node->frame.meta_bytes, action->bulk_bytes,
                                   node->frame.meta, NULL};
    if (MLFAB__UNLIKELY(node->tap != NULL)) node->show(node, link, 1, node->incarnation, &shown);
    if (link->tagged && node->frame.type != MLFAB__PROOF) node->guard->sent(link);
    mlfab__outbox_taken(node);
    node_rotate(node);
  } else if (status == MLFAB_ERR_AGAIN || status == MLFAB_ERR_PEER_CLOSED) {
    /* The peer may have said BYE before it went: the transport still delivers the frames that it sent, then
     * DOWN. Until then this link gets no frames, as if it were full. */
    node->out = MLFAB__OUT_NONE;
    link->blocked = 1;
    node_unlist(node, index);
  } else {
    node->out = MLFAB__OUT_NONE;
    mlfab__node_hang_up(node, index, mlfab_error_text(status));
  }
  node_epilogue(node);
}

/* --- time --- */

static void node_scan_requests(mlfab_node *node) {
  mlfab__request *request;
  uint32_t place = 0;
  while ((request = mlfab__request_due(&node->requests, node->now_ns, &place)))
    mlfab__roles_withdraw(node, request, MLFAB_ERR_TIMEOUT);
}

/* The epilogue arms this timer again. */
static void node_scan(mlfab_node *node, uint32_t index) {
  (void)index;
  MLFAB__EACH_ROLE(role, node, scan) role->scan(role->self, node->now_ns);
  if (node->self_lost) mlfab__inner_greet_again(node);
}

static void node_scan_joining(mlfab_node *node, uint32_t index) {
  uint64_t until_ns = mlfab__add_sat(node->opened_ns + node->asleep_ns, node->config.timeout_ns);
  mlfab__bootstrap_tick(node);
  if (node->phase < MLFAB__BOOTSTRAP_READY)
    mlfab__node_arm_at(node, MLFAB__TIMER_JOIN, index,
                       mlfab__min(mlfab__node_round(node, node->now_ns + 1), until_ns));
}

static void node_expire(mlfab_node *node, const mlfab__heap_entry *entry) {
  static void (*const scans[])(mlfab_node *, uint32_t) = {
      node_scan_joining, mlfab__alive_scan, mlfab__caller_scan, mlfab__server_link_scan, node_scan};
  enum mlfab__timer kind = (enum mlfab__timer)entry->order;
  uint32_t index = (uint32_t)entry->index - mlfab__node_timer(node, kind, 0);
  mlfab__heap_remove(&node->timers, entry->index);
  scans[kind](node, index);
}

MLFAB_API void mlfab_node_tick(mlfab_node *node, uint64_t now_ns) {
  const mlfab__heap_entry *entry;
  if (!node) return;
  node_look(node, now_ns);
  if (node->crashes) {
    node_epilogue(node);
    return;
  }
  MLFAB__EACH_ROLE(role, node, tick) role->tick(role->self, node->now_ns);
  node_scan_requests(node);
  while ((entry = mlfab__heap_top(&node->timers)) && entry->time <= node->now_ns)
    node_expire(node, entry);
  node_epilogue(node);
}

MLFAB_API uint64_t mlfab_node_deadline(const mlfab_node *node) {
  if (!node) return MLFAB__NEVER;
  if (node->crashes) return node->crashes == MLFAB__CRASH_ASKED ? 0 : MLFAB__NEVER;
  if (node->self_more) return 0;
  const mlfab__heap_entry *timer = mlfab__heap_top(&node->timers);
  uint64_t deadline = timer ? timer->time : MLFAB__NEVER;
  if (node->parting) deadline = mlfab__min(deadline, node->part_ns);
  if (node->requests.open > 0) deadline = mlfab__min(deadline, node->requests.earliest);
  MLFAB__EACH_ROLE(role, node, deadline) {
    deadline = mlfab__min(deadline, role->deadline(role->self));
  }
  return deadline;
}

MLFAB_API int mlfab_node_ready(const mlfab_node *node, mlfab_error *error_p) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  if (node->phase == MLFAB__BOOTSTRAP_READY) return 1;
  if (node->phase != MLFAB__BOOTSTRAP_FAILED) return 0;
  if (error_p) *error_p = node->failure;
  return node->failure.code;
}

/* --- the calls --- */

MLFAB__INTERNAL int mlfab__node_return(mlfab_node *node, int code, const mlfab_error *error) {
  if (code) node->requests.last = *error;
  node_epilogue(node);
  return code;
}

MLFAB__INTERNAL int mlfab__node_enter(mlfab_node *node, uint64_t now_ns, int worker,
                                      mlfab_error *error) {
  /* Clears only these members: the text is long, and every push comes this way. */
  error->code = error->is_server = error->reserved = 0;
  error->rank = MLFAB_NO_RANK;
  error->waited_ns = 0;
  error->text[0] = 0;
  node_look(node, now_ns);
  if (node->closed) return MLFAB__FAIL(error, MLFAB_ERR_CLOSED, "the context is being closed");
  if (worker && !node->is_worker)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "this node is not a worker");
  if (node->phase == MLFAB__BOOTSTRAP_FAILED) {
    *error = node->failure;
    return error->code;
  }
  if (node->phase != MLFAB__BOOTSTRAP_READY)
    return MLFAB__FAIL(error, MLFAB_ERR_STATE, "the fabric is not complete yet");
  if (node->leaving || node->parting)
    return MLFAB__FAIL(error, MLFAB_ERR_CLOSED, "the node is leaving");
  return 0;
}

/* Records a wrong argument as any other error. */
static int node_wrong(mlfab_node *node, int code, const char *text) {
  return MLFAB__FAIL(&node->requests.last, code, "%s", text);
}

/* --- leaving --- */

/* Would the peer take the end of this link for a death or a close? Between workers, server 0 reports the end. A
 * hand-driven peer may compute for long before it reads. */
static int node_heeds(const mlfab_node *node, const mlfab__link *link) {
  const uint32_t heeding = MLFAB__ON(SERVER) | MLFAB__ON(PLANNER) | MLFAB__ON(WORKER) |
                           MLFAB__ON(SCHEDULER) | MLFAB__ON(VOTER);
  return (heeding & 1u << link->kind) && !mlfab__claim_is_hand(node, link);
}

/* Says BYE on every link of a kind, or on all with MLFAB__LINK_FREE. */
static void node_goodbye(mlfab_node *node, int kind) {
  const mlfab__bye bye = {.text = "closing"};
  uint8_t meta[MLFAB__TEXT_MAX + 32];
  uint32_t n = mlfab__encode_bye(meta, &bye);
  for (uint32_t i = 0; i < node->nlinks; i++) {
    mlfab__link *link = &node->links[i];
    if (link->kind == MLFAB__LINK_FREE || link->self || link->closing) continue;
    if (kind != MLFAB__LINK_FREE && link->kind != kind) continue;
    mlfab__node_post(node, i, MLFAB__BYE, meta, n);
    link->closing = 1;
    link->lingers = (uint8_t)node_heeds(node, link);
    /* The time for the BYE to be sent starts now. */
    link->heard_ns = node->now_ns;
  }
}

/* Do other workers wait for this node, or does the inner link have frames to carry? */
static int node_awaited(const mlfab_node *node) {
  uint32_t inner = node->pairs[MLFAB__PAIR_SERVER][0];
  if (node->phase != MLFAB__BOOTSTRAP_READY || !node->is_worker) return 0;
  MLFAB__EACH_ROLE(role, node, quiet) if (!role->quiet(role->self)) return 1;
  return inner != MLFAB__NO_LINK && node->links[inner].queue_begin < node->links[inner].queue_end;
}

/* Says BYE as soon as nobody waits for this node, or a beat after the request to leave. */
static void node_part(mlfab_node *node) {
  if (node_awaited(node) && node->now_ns < node->part_ns) return;
  node->leaving = node->parting;
  node->parting = 0;
  MLFAB__EACH_ROLE(role, node, part) role->part(role->self);
  if (node->leaving == MLFAB__PARTS_WORKER) {
    if (node->pairs[MLFAB__PAIR_SERVER][0] != MLFAB__NO_LINK)
      mlfab__caller_gone(node, (uint32_t)node->config.rank, 1);
    node_goodbye(node, MLFAB__LINK_SERVER);
    node_goodbye(node, MLFAB__LINK_PEER);
    node_goodbye(node, MLFAB__LINK_PEER_IN);
  } else {
    node_goodbye(node, MLFAB__LINK_FREE);
  }
  node_epilogue(node);
}

/* how: a value of `parting`. */
static void node_begin_to_part(mlfab_node *node, int how, uint64_t now_ns) {
  node_look(node, now_ns);
  /* If the worker role has left before the server role, nobody waits for it any more. */
  if (!node->parting)
    node->part_ns = node->now_ns + (node->leaving ? 0 : node->config.heartbeat_ns);
  node->parting = how;
  MLFAB__EACH_ROLE(role, node, leave) role->leave(role->self);
  node_epilogue(node);
}

MLFAB__INTERNAL void mlfab__node_stop_working(mlfab_node *node, uint64_t now_ns) {
  node_begin_to_part(node, MLFAB__PARTS_WORKER, now_ns);
}

MLFAB_API int mlfab_node_leave(mlfab_node *node, uint64_t now_ns) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  node_begin_to_part(node, MLFAB__PARTS_ALL, now_ns);
  return 0;
}

MLFAB_API int mlfab_node_test(mlfab_node *node, mlfab_request id, int *done_p,
                              mlfab_result *result_p) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  if (!done_p) return node_wrong(node, MLFAB_ERR_ARGUMENT, "test: done_p is NULL");
  mlfab__request *request = mlfab__request_find(&node->requests, id);
  if (!request)
    return node_wrong(node, MLFAB_ERR_REQUEST,
                      "test, wait: the request is unknown, or was ended before");
  *done_p = request->done;
  if (!request->done) return 0;
  if (result_p) *result_p = request->result;
  if (request->result.status) {
    mlfab__request_recall(&node->requests, request);
    mlfab__server_link_say_why(node);
  }
  mlfab__request_end(&node->requests, request);
  return 0;
}

MLFAB_API int mlfab_node_cancel(mlfab_node *node, mlfab_request id, uint64_t now_ns) {
  if (!node) return MLFAB_ERR_ARGUMENT;
  node_look(node, now_ns);
  mlfab__request *request = mlfab__request_find(&node->requests, id);
  if (!request)
    return node_wrong(node, MLFAB_ERR_REQUEST,
                      "cancel: the request is unknown, or was ended before");
  if (!request->done) mlfab__roles_withdraw(node, request, MLFAB_ERR_CANCELLED);
  node_epilogue(node);
  return 0;
}

MLFAB_API int mlfab_node_last_error(const mlfab_node *node, mlfab_error *error_p) {
  if (!node || !error_p) return MLFAB_ERR_ARGUMENT;
  *error_p = node->requests.last;
  error_p->reserved = 0;
  return 0;
}

MLFAB_API int mlfab_node_stats(const mlfab_node *node, mlfab_stats *stats_p, size_t size) {
  if (!node || !stats_p) return MLFAB_ERR_ARGUMENT;
  mlfab_stats stats = node->stats;
  stats.allocations = node->env.allocations;
  stats.memory_bytes = node->env.bytes;
  MLFAB__EACH_ROLE(role, node, stats) role->stats(role->self, &stats);
  memcpy(stats_p, &stats, size < sizeof stats ? size : sizeof stats);
  return 0;
}
