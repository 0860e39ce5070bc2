/* link.c - a node: its links, their queues and timers, and its actions. The lowest file of the node. See node.h. */
#include "node.h"

#include <stdio.h>

enum {
  LINK_QUEUE_MAX = 4 << 20,
  LINK_JOIN_BEAT_NS = 500000000,
  LINK_VAIN_MAX = 5, /* doublings of the time between two calls */
  LINK_UPDATES = 64  /* in flight, per role */
};

/* Actions that updates in flight can cause: one detach per update and server, and one connect per server. */
#define LINK_ACTIONS(node) (64 + MLFAB__FILERS + 2 * (LINK_UPDATES + 1) * (node)->config.servers)

/* --- names --- */

MLFAB__INTERNAL uint32_t mlfab__node_route_of(const mlfab_node *node, int kind, uint32_t server) {
  uint32_t servers = node->config.servers;
  if (kind == MLFAB__LINK_VOTER)
    return 3 * servers + (!node->is_server ? server : server == MLFAB__COPIES * servers);
  return server + (kind == MLFAB__LINK_PLANNER   ? servers
                   : kind == MLFAB__LINK_RESHARD ? 2 * servers
                                                 : 0);
}

MLFAB__INTERNAL uint32_t mlfab__node_server_of(const mlfab_node *node, uint32_t route) {
  uint32_t servers = node->config.servers;
  if (route >= 3 * servers) return node->copies->voter(node, route - 3 * servers);
  return route < servers ? route : route - (route < 2 * servers ? servers : 2 * servers);
}

MLFAB__INTERNAL int mlfab__node_has_other(const mlfab_node *node, int kind) {
  return node->copies &&
         (kind == MLFAB__LINK_SERVER || kind == MLFAB__LINK_PLANNER || kind == MLFAB__LINK_RESHARD);
}

MLFAB__INTERNAL mlfab__place *mlfab__node_place(const mlfab_node *node, uint32_t route) {
  return &node->places[mlfab__node_server_of(node, route) +
                       node->routes[route].copy * node->config.servers];
}

MLFAB__INTERNAL uint64_t mlfab__node_beat(const mlfab_node *node) {
  uint64_t beat = node->config.heartbeat_ns;
  return node->phase < MLFAB__BOOTSTRAP_READY ? mlfab__min(beat, LINK_JOIN_BEAT_NS) : beat;
}

MLFAB__INTERNAL uint64_t mlfab__node_retry(const mlfab_node *node, uint32_t vain) {
  return node->now_ns + ((mlfab__node_beat(node) / 5) << mlfab__min(vain, LINK_VAIN_MAX));
}

MLFAB__INTERNAL uint32_t mlfab__node_of_server(const mlfab_node *node, uint32_t server) {
  return node->config.dedicated ? node->config.workers + server : server;
}

MLFAB__INTERNAL const char *mlfab__node_name(const mlfab_node *node, uint32_t id, char buffer[32]) {
  uint32_t servers = node->config.dedicated ? node->config.servers : 0;
  uint32_t others = node->config.workers + servers;
  if (id >= others + servers * node->config.replicas) {
    snprintf(buffer, 32, "the scheduler");
  } else if (id >= others) {
    snprintf(buffer, 32, "the replica of server %u", id - others);
  } else if (node->config.dedicated && id >= node->config.workers) {
    snprintf(buffer, 32, "server %u", id - node->config.workers);
  } else {
    snprintf(buffer, 32, "worker %u", id);
  }
  return buffer;
}

MLFAB__INTERNAL void mlfab__node_fail(mlfab_node *node, int code, int32_t rank, int is_server,
                                      const char *text) {
  if (node->phase >= MLFAB__BOOTSTRAP_READY) return;
  node->phase = MLFAB__BOOTSTRAP_FAILED;
  mlfab__error(&node->failure, code, rank, is_server, node->now_ns - node->opened_ns, "%s", text);
}

MLFAB__INTERNAL void mlfab__node_crash(mlfab_node *node, int code, const char *text) {
  if (node->crashes) return;
  node->crashes = MLFAB__CRASH_ASKED;
  node->phase = MLFAB__BOOTSTRAP_FAILED;
  mlfab__error(&node->failure, code, node->is_server ? (int32_t)node->server_number : MLFAB_NO_RANK,
               node->is_server, node->now_ns - node->opened_ns, "%s", text);
  mlfab__log(&node->env, MLFAB_LOG_ERROR, "this node ends: %s", text);
}

MLFAB__INTERNAL void mlfab__node_emit(mlfab_node *node, uint32_t kind, int32_t rank, int is_server,
                                      uint32_t incarnation, int code, const char *text) {
  mlfab_event_info info = {kind, rank, (uint32_t)is_server, incarnation, code, text};
  mlfab__log(&node->env, kind == MLFAB_EVENT_DEAD ? MLFAB_LOG_WARN : MLFAB_LOG_INFO, "%s %d: %s",
             is_server ? "server" : "worker", (int)rank, text);
  if (node->config.on_event) node->config.on_event(node->config.user, &info);
}

MLFAB__INTERNAL void mlfab__node_add_address(char list[MLFAB__ADDRESSES_MAX], const char *address) {
  size_t n = strlen(address), used = strlen(list), scheme = strcspn(address, ":") + 1;
  const char *port = strrchr(address, ':');
  for (char *at = list; *at;) {
    size_t bytes = strcspn(at, " "), digits = port ? strlen(port) : 0;
    if (bytes == n && !memcmp(at, address, n)) return;
    /* The same listener, as far as its port tells. */
    if (port && bytes > digits && !strncmp(at, address, scheme) &&
        !memcmp(at + bytes - digits, port, digits)) {
      if (used + n + 2 > MLFAB__ADDRESSES_MAX) return;
      memmove(at + n + 1, at, used + 1 - (size_t)(at - list));
      memcpy(at, address, n + 1);
      at[n] = ' ';
      return;
    }
    at += bytes + (at[bytes] == ' ');
  }
}

/* --- timers --- */

/* The index of a timer in the heap. */
MLFAB__INTERNAL uint32_t mlfab__node_timer(const mlfab_node *node, enum mlfab__timer kind,
                                           uint32_t index) {
  uint32_t workers = node->is_server ? node->config.workers : 0;
  const uint32_t first[] = {[MLFAB__TIMER_JOIN] = 0,
                            [MLFAB__TIMER_SCAN] = 1,
                            [MLFAB__TIMER_ROUTE] = 2,
                            [MLFAB__TIMER_WORKER] = 2 + node->nroutes,
                            [MLFAB__TIMER_LINK] = 2 + node->nroutes + workers};
  return first[kind] + index;
}

MLFAB__INTERNAL uint64_t mlfab__node_round(const mlfab_node *node, uint64_t at_ns) {
  uint64_t quarter = mlfab__node_beat(node) / 4;
  uint64_t since = mlfab__max(at_ns, node->opened_ns) - node->opened_ns;
  return mlfab__add_sat(at_ns, (quarter - since % quarter) % quarter);
}

MLFAB__INTERNAL void mlfab__node_arm_at(mlfab_node *node, enum mlfab__timer kind, uint32_t index,
                                        uint64_t at_ns) {
  mlfab__heap_put(&node->timers, mlfab__node_timer(node, kind, index), at_ns, (uint64_t)kind);
}

MLFAB__INTERNAL void mlfab__node_arm(mlfab_node *node, enum mlfab__timer kind, uint32_t index,
                                     uint64_t at_ns) {
  mlfab__node_arm_at(node, kind, index,
                     mlfab__node_round(node, mlfab__max(at_ns, node->now_ns + 1)));
}

/* --- actions --- */

/* Makes room for this many actions: a later lack of memory then loses none. */
static int link_reserve_actions(mlfab_node *node, uint32_t room) {
  if (room <= node->actions_room) return 0;
  mlfab__queued_action *actions = mlfab__alloc_array(&node->env, room, sizeof *actions);
  if (!actions) return MLFAB_ERR_MEMORY;
  for (uint32_t i = 0; i < node->actions_count; i++) {
    actions[i] = node->actions[(node->actions_begin + i) % node->actions_room];
  }
  mlfab__free(&node->env, node->actions, node->actions_room * sizeof *actions);
  node->actions = actions;
  node->actions_begin = 0;
  node->actions_room = room;
  return 0;
}

MLFAB__INTERNAL void mlfab__node_act(mlfab_node *node, uint32_t kind, uint32_t link,
                                     uint64_t token) {
  if (node->actions_count == node->actions_room &&
      link_reserve_actions(node, 2 * node->actions_room)) {
    /* More than all updates and links can request at once: only repeated connects are lost. */
    mlfab__log(&node->env, MLFAB_LOG_ERROR, "out of memory for an action");
    return;
  }
  mlfab__queued_action *action =
      &node->actions[(node->actions_begin + node->actions_count++) % node->actions_room];
  action->kind = kind;
  action->link = link;
  action->token = token;
}

/* --- links --- */

MLFAB__INTERNAL mlfab__link *mlfab__node_link(mlfab_node *node, uint32_t id, uint32_t *index_p) {
  uint32_t index;
  if (!mlfab__map_get(&node->by_id, id, &index)) return NULL;
  *index_p = index;
  return &node->links[index];
}

MLFAB__INTERNAL uint32_t mlfab__node_new_link(mlfab_node *node) {
  for (uint32_t i = node->first_free; i < node->nlinks; i++) {
    if (node->links[i].kind != MLFAB__LINK_FREE || node->links[i].listed) continue;
    node->first_free = i;
    return i;
  }
  uint32_t n = node->nlinks, more = n ? 2 * n : 8;
  mlfab__link *links = mlfab__alloc_array(&node->env, more, sizeof *links);
  uint32_t *ready = mlfab__alloc_array(&node->env, more, sizeof *ready);
  /* In addition to the actions of updates, four for each link: take its loans back, close, dial again, probe. */
  int reserved = !link_reserve_actions(node, LINK_ACTIONS(node) + 4 * more);
  int timed = !mlfab__heap_reserve(&node->timers, &node->env,
                                   mlfab__node_timer(node, MLFAB__TIMER_LINK, more));
  if (!links || !ready || !reserved || !timed) {
    mlfab__free(&node->env, links, more * sizeof *links);
    mlfab__free(&node->env, ready, more * sizeof *ready);
    return MLFAB__NO_LINK;
  }
  if (n) memcpy(links, node->links, n * sizeof *links);
  for (uint32_t i = 0; n && i < node->ready_count; i++)
    ready[i] = node->ready[(node->ready_begin + i) % n];
  mlfab__free(&node->env, node->links, n * sizeof *links);
  mlfab__free(&node->env, node->ready, n * sizeof *ready);
  node->links = links;
  node->ready = ready;
  node->ready_begin = 0;
  node->nlinks = more;
  node->first_free = n;
  return n;
}

MLFAB__INTERNAL int mlfab__node_reserve(mlfab_node *node) {
  if (link_reserve_actions(node, LINK_ACTIONS(node))) return MLFAB_ERR_MEMORY;
  return mlfab__heap_reserve(&node->timers, &node->env,
                             mlfab__node_timer(node, MLFAB__TIMER_LINK, 0));
}

MLFAB__INTERNAL void mlfab__node_free_links(mlfab_node *node) {
  for (uint32_t i = 0; i < node->nlinks; i++) {
    mlfab__free(&node->env, node->links[i].queue, node->links[i].queue_room);
    mlfab__free(&node->env, node->links[i].claim, node->links[i].claim_bytes);
    mlfab__free(&node->env, node->links[i].pace, sizeof *node->links[i].pace);
    if (node->links[i].session) node->guard->end(node, &node->links[i]);
  }
  mlfab__map_free(&node->env, &node->by_id);
  mlfab__heap_free(&node->timers, &node->env);
  mlfab__free(&node->env, node->links, node->nlinks * sizeof *node->links);
  mlfab__free(&node->env, node->ready, node->nlinks * sizeof *node->ready);
  mlfab__free(&node->env, node->actions, node->actions_room * sizeof *node->actions);
}

MLFAB__INTERNAL uint32_t mlfab__node_link_to(const mlfab_node *node, int kind, uint32_t peer) {
  switch (kind) {
    case MLFAB__LINK_SERVER:
    case MLFAB__LINK_PLANNER:
    case MLFAB__LINK_RESHARD:
      return node->routes[mlfab__node_route_of(node, kind, peer)].link;
    case MLFAB__LINK_WORKER:
    case MLFAB__LINK_SCHEDULER:
      return node->callers[peer].link;
    case MLFAB__LINK_PEER:
    case MLFAB__LINK_PEER_IN:
      return node->between ? node->between->link_to(node, kind, peer) : MLFAB__NO_LINK;
    case MLFAB__LINK_VOTER:
      return node->routes[mlfab__node_route_of(node, kind, peer)].link;
    case MLFAB__LINK_VOTER_IN:
      return node->voter_links[peer];
    default:
      return node->reshard_links[peer];
  }
}

MLFAB__INTERNAL void mlfab__node_ready_link(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  if (link->self) { /* inner.c handles those */
    node->self_due |= 1u << (link->self - 1);
    return;
  }
  if (link->listed || link->blocked || link->kind == MLFAB__LINK_FREE) return;
  link->listed = 1;
  node->ready[(node->ready_begin + node->ready_count++) % node->nlinks] = index;
}

MLFAB__INTERNAL void mlfab__node_doom(mlfab_node *node, uint32_t index) {
  node->links[index].doomed = 1;
  node->doomed = 1;
}

MLFAB__INTERNAL void mlfab__node_drop(mlfab_node *node, uint32_t index, int code,
                                      const char *text) {
  if (index == MLFAB__NO_LINK) return;
  mlfab__log(&node->env, MLFAB_LOG_WARN, "link given up: %s (%s)", text, mlfab_error_name(code));
  node->stats.frames_refused++;
  mlfab__node_doom(node, index);
}

MLFAB__INTERNAL void mlfab__node_post(mlfab_node *node, uint32_t index, uint8_t type,
                                      const void *meta, uint32_t bytes) {
  if (index == MLFAB__NO_LINK || node->crashes) return;
  mlfab__link *link = &node->links[index];
  uint32_t padded = (bytes + 7) / 8 * 8 + 8;
  if (link->kind == MLFAB__LINK_FREE || link->closing) return;
  if (link->queue_room - link->queue_end < padded) {
    uint32_t used = link->queue_end - link->queue_begin;
    if (link->queue_begin > 0 && link->queue_room - used >= padded && link->queue_begin >= used) {
      memcpy(link->queue, link->queue + link->queue_begin, used);
    } else {
      uint32_t room = link->queue_room ? link->queue_room : 1024;
      while (room < used + padded) room *= 2;
      uint8_t *queue = room <= LINK_QUEUE_MAX ? mlfab__alloc(&node->env, room) : NULL;
      if (!queue) {
        /* The peer does not read, or memory is short: close the link. Important state is sent again on the next
         * link. */
        mlfab__node_doom(node, index);
        return;
      }
      if (used > 0) memcpy(queue, link->queue + link->queue_begin, used);
      mlfab__free(&node->env, link->queue, link->queue_room);
      link->queue = queue;
      link->queue_room = room;
    }
    link->queue_begin = 0;
    link->queue_end = used;
  }
  uint32_t head[2] = {bytes, type};
  memcpy(link->queue + link->queue_end, head, 8);
  if (bytes > 0) memcpy(link->queue + link->queue_end + 8, meta, bytes);
  link->queue_end += padded;
  mlfab__node_ready_link(node, index);
}

MLFAB__INTERNAL int mlfab__node_refuse(mlfab_node *node, uint32_t index, int code, int32_t rank,
                                       const char *text) {
  return mlfab__node_refuse_as(node, index, MLFAB__CAUSE_OTHER, code, rank, text);
}

MLFAB__INTERNAL int mlfab__node_refuse_as(mlfab_node *node, uint32_t index, enum mlfab__cause cause,
                                          int code, int32_t rank, const char *text) {
  mlfab__refuse refuse = {.code = code, .rank = rank, .cause = cause};
  uint8_t meta[MLFAB__TEXT_MAX + 64];
  snprintf(refuse.text, sizeof refuse.text, "%s", text);
  mlfab__node_post(node, index, MLFAB__REFUSE, meta, mlfab__encode_refuse(meta, &refuse));
  node->links[index].closing = 1;
  mlfab__log(&node->env, MLFAB_LOG_INFO, "refused a connection: %s", text);
  return code;
}

MLFAB__INTERNAL void mlfab__node_unclaim(mlfab_node *node, mlfab__link *link) {
  if (link->kind != MLFAB__LINK_CLAIM) return;
  mlfab__free(&node->env, link->claim, link->claim_bytes);
  link->claim = NULL;
  link->claim_bytes = 0;
  link->kind = MLFAB__LINK_NEW;
  node->claims--;
}

MLFAB__INTERNAL void mlfab__node_free_link(mlfab_node *node, uint32_t index) {
  mlfab__link *link = &node->links[index];
  mlfab__node_unclaim(node, link);
  if (link->id) mlfab__map_remove(&node->by_id, link->id);
  mlfab__free(&node->env, link->queue, link->queue_room);
  mlfab__free(&node->env, link->pace, sizeof *link->pace);
  if (link->session) node->guard->end(node, link);
  uint8_t listed = link->listed;
  memset(link, 0, sizeof *link);
  link->listed = listed; /* it leaves the ring when its turn comes */
  if (index < node->first_free) node->first_free = index;
  mlfab__heap_remove(&node->timers, mlfab__node_timer(node, MLFAB__TIMER_LINK, index));
}

MLFAB__INTERNAL void mlfab__node_link_down(mlfab_node *node, uint32_t index, const char *why) {
  mlfab__link link = node->links[index];
  if (node->out != MLFAB__OUT_NONE && node->out != MLFAB__OUT_ACTION && node->out_link == index)
    node->out = MLFAB__OUT_NONE;
  mlfab__node_free_link(node, index);
  for (uint32_t i = 0; node->claims > 0 && i < node->nlinks; i++) {
    mlfab__link *claim = &node->links[i];
    if (claim->kind != MLFAB__LINK_CLAIM || claim->holder != index) continue;
    claim->holder = MLFAB__NO_LINK;
    node->claim_due = 1;
  }
  if (node->rules[link.kind].down) node->rules[link.kind].down(node, &link, index, why);
}

MLFAB__INTERNAL void mlfab__node_hang_up(mlfab_node *node, uint32_t index, const char *why) {
  uint32_t id = node->links[index].id;
  assert(!node->links[index].self);
  mlfab__node_link_down(node, index, why);
  if (id) mlfab__node_act(node, MLFAB_ACTION_DISCONNECT, id, 0);
}
