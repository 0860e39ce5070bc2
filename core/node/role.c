/* role.c - a node: the table of its roles, their ports, and the calls to them. See role.h. */
#include "node.h"

/* --- ports --- */

static void role_post(void *self, uint32_t peer, uint8_t type, const void *meta, uint32_t bytes) {
  const mlfab__outlet *to = self;
  mlfab__node_post(to->node, mlfab__node_link_to(to->node, to->kind, peer), type, meta, bytes);
}

/* Opens a missing link if its kind allows that. */
static void role_ready(void *self, uint32_t peer) {
  const mlfab__outlet *to = self;
  mlfab_node *node = to->node;
  uint32_t index = mlfab__node_link_to(node, to->kind, peer);
  if (index != MLFAB__NO_LINK) {
    mlfab__node_ready_link(node, index);
  } else if (node->rules[to->kind].want) {
    node->rules[to->kind].want(node, peer);
  }
}

static void role_drop(void *self, uint32_t peer, int code, const char *text) {
  const mlfab__outlet *to = self;
  mlfab__node_drop(to->node, mlfab__node_link_to(to->node, to->kind, peer), code, text);
}

static void role_detach(void *self, uint32_t peer, uint64_t token) {
  const mlfab__outlet *to = self;
  uint32_t index = mlfab__node_link_to(to->node, to->kind, peer);
  if (index == MLFAB__NO_LINK || to->node->links[index].self) return;
  mlfab__node_act(to->node, MLFAB_ACTION_DETACH, to->node->links[index].id,
                  token | (uint64_t)to->role << MLFAB__ROLE_SHIFT);
  mlfab__outbox_detached(to->node, index);
}

static void role_event(void *self, uint32_t kind, int32_t rank, int is_server, uint32_t incarnation,
                       int code, const char *text) {
  const mlfab__outlet *to = self;
  mlfab__node_emit(to->node, kind, rank, is_server, incarnation, code, text);
}

static uint64_t role_silent(const void *self, uint32_t peer, int heartbeats) {
  const mlfab__outlet *to = self;
  uint32_t index = mlfab__node_link_to(to->node, to->kind, peer);
  if (index == MLFAB__NO_LINK) return MLFAB__NEVER;
  mlfab__link *link = &to->node->links[index];
  if (link->self) return 0;
  uint64_t moved_ns = heartbeats ? link->heard_ns : link->moved_ns;
  /* This transport does not report incomplete frames. */
  if (!(link->caps & MLFAB_CAP_PROBE)) return to->node->now_ns - moved_ns;
  /* Heartbeats may come beside a large frame. So this asks the transport for bytes now, for the next look. Every answer
   * is a reason to look again, so it asks at most four times a beat. */
  uint64_t looked_ns = heartbeats ? mlfab__max(link->heard_ns, link->asked_ns) : link->asked_ns;
  uint64_t told_ns = mlfab__max(link->asked_ns, link->moved_ns);
  if (!heartbeats && !link->probing &&
      to->node->now_ns - told_ns >= to->node->config.heartbeat_ns / 4) {
    link->probing = 1;
    mlfab__node_act(to->node, MLFAB_ACTION_PROBE, link->id, 0);
  }
  return looked_ns < moved_ns ? 0 : looked_ns - moved_ns;
}

static uint32_t role_chunk(const void *self, uint32_t peer) {
  const mlfab__outlet *to = self;
  uint32_t index = mlfab__node_link_to(to->node, to->kind, peer);
  return index == MLFAB__NO_LINK ? UINT32_MAX
                                 : mlfab__outbox_chunk(to->node, &to->node->links[index]);
}

MLFAB__INTERNAL mlfab__port mlfab__roles_port(mlfab_node *node, const mlfab__role *role, int kind) {
  assert(node->noutlets < MLFAB__OUTLETS);
  mlfab__outlet *to = &node->outlets[node->noutlets++];
  *to = (mlfab__outlet){node, (uint32_t)(role - node->roles), kind};
  return (mlfab__port){to,          role_post,  role_ready,  role_drop,
                       role_detach, role_event, role_silent, role_chunk};
}

/* --- the table --- */

MLFAB__INTERNAL mlfab__role *mlfab__roles_add(mlfab_node *node, const mlfab__role *row,
                                              size_t bytes) {
  assert(node->nroles < MLFAB__ROLES_MAX);
  mlfab__role *role = &node->roles[node->nroles];
  void *self = bytes ? mlfab__alloc(&node->env, bytes) : NULL;
  if (bytes && !self) return NULL;
  *role = *row;
  role->self = self;
  role->bytes = bytes;
  node->nroles++;
  return role;
}

static int role_takes(const mlfab__role *role, unsigned type) {
  return role->frame && type >= role->from && type <= role->to;
}

/* Appends a role to the list of a kind of link. */
static void role_list(mlfab_node *node, int kind, uint32_t number) {
  uint8_t place = node->non[kind]++;
  node->on[kind][place] = (uint8_t)number;
  for (unsigned type = 0; type < MLFAB__FRAME_TYPES; type++) {
    if (node->first[kind][type] > place && role_takes(&node->roles[number], type))
      node->first[kind][type] = place;
  }
}

/* Urgent senders come before the others. */
static void role_list_sender(mlfab_node *node, int kind, uint32_t number) {
  uint8_t *senders = node->senders[kind];
  uint32_t at = node->nsenders[kind]++;
  if (node->roles[number].urgent & 1u << kind) {
    for (; at > node->nurgent[kind]; at--) senders[at] = senders[at - 1];
    node->nurgent[kind]++;
  }
  senders[at] = (uint8_t)number;
}

MLFAB__INTERNAL void mlfab__roles_list(mlfab_node *node) {
  for (uint32_t i = 0; i < node->nroles; i++) {
    if (node->roles[i].to == 0) node->roles[i].to = UINT8_MAX;
    if (node->roles[i].settle) node->settles[node->nsettles++] = (uint8_t)i;
    if (node->roles[i].idle) node->idles[node->nidles++] = (uint8_t)i;
  }
  memset(node->first, UINT8_MAX, sizeof node->first);
  for (int rest = 0; rest < 2; rest++) {
    for (uint32_t i = 0; i < node->nroles; i++) {
      const mlfab__role *role = &node->roles[i];
      if (role->rest != rest) continue;
      for (int kind = 0; kind < MLFAB__LINK_KINDS; kind++) {
        if (role->links & 1u << kind) role_list(node, kind, i);
        if (role->sends & 1u << kind) role_list_sender(node, kind, i);
      }
    }
  }
}

MLFAB__INTERNAL void mlfab__roles_free(mlfab_node *node) {
  for (uint32_t i = 0; i < node->nroles; i++) {
    mlfab__role *role = &node->roles[i];
    if (role->free && role->self) role->free(role->self);
    if (role->bytes) mlfab__free(&node->env, role->self, role->bytes);
  }
  node->nroles = 0;
}

/* Loops over the roles with this function on links of a kind: `role` takes each value in turn. */
#define ROLE_EACH(role, node, kind, function)                                               \
  for (uint32_t i_ = 0; i_ < (node)->non[kind]; i_++)                                       \
    for (const mlfab__role *role = &(node)->roles[(node)->on[kind][i_]]; role; role = NULL) \
      if (role->function)

MLFAB__INTERNAL void mlfab__roles_frame(mlfab_node *node, uint32_t link,
                                        const mlfab__frame_in *frame) {
  int kind = node->links[link].kind;
  uint32_t peer = node->links[link].peer;
  const uint32_t first = node->first[kind][frame->type];
  for (uint32_t i = first; i < node->non[kind]; i++) {
    const mlfab__role *role = &node->roles[node->on[kind][i]];
    if (i > first && !role_takes(role, frame->type)) continue;
    int took = role->frame(role->self, (mlfab__at){kind, peer, node->now_ns}, frame);
    if (took < 0)
      mlfab__node_drop(node, link, took, "a frame that does not parse, or is out of place");
    if (took) return;
  }
  mlfab__node_drop(node, link, MLFAB_ERR_FRAME, "a frame that no role of this node takes");
}

MLFAB__INTERNAL int mlfab__roles_hello(mlfab_node *node, int kind, uint32_t peer,
                                       mlfab__greeting *greeting) {
  int code = 0;
  ROLE_EACH(role, node, kind, hello) {
    if (!code) code = role->hello(role->self, (mlfab__at){kind, peer, node->now_ns}, greeting);
  }
  return code;
}

MLFAB__INTERNAL void mlfab__roles_up(mlfab_node *node, int kind, uint32_t peer,
                                     mlfab__greeting *greeting) {
  const mlfab__at at = {kind, peer, node->now_ns};
  ROLE_EACH(role, node, kind, up) role->up(role->self, at, greeting);
}

MLFAB__INTERNAL void mlfab__roles_lost(mlfab_node *node, int kind, uint32_t peer) {
  const mlfab__at at = {kind, peer, node->now_ns};
  ROLE_EACH(role, node, kind, lost) role->lost(role->self, at);
}

MLFAB__INTERNAL void mlfab__roles_gone(mlfab_node *node, int kind, uint32_t peer, int left) {
  const mlfab__at at = {kind, peer, node->now_ns};
  ROLE_EACH(role, node, kind, gone) role->gone(role->self, at, left);
}

MLFAB__INTERNAL int mlfab__roles_want(const mlfab_node *node, int kind, uint32_t peer,
                                      const char *why) {
  int wanted = 0;
  const mlfab__at at = {kind, peer, node->now_ns};
  ROLE_EACH(role, node, kind, wants) wanted |= role->wants(role->self, at, why);
  return wanted;
}

MLFAB__INTERNAL void mlfab__roles_returned(mlfab_node *node, int kind, uint32_t peer,
                                           uint64_t token) {
  uint64_t number = token >> MLFAB__ROLE_SHIFT;
  if (number >= node->nroles || !node->roles[number].returned) return;
  const mlfab__role *role = &node->roles[number];
  role->returned(role->self, (mlfab__at){kind, peer, node->now_ns},
                 token - (number << MLFAB__ROLE_SHIFT));
}

MLFAB__INTERNAL void mlfab__roles_withdraw(mlfab_node *node, mlfab__request *request, int code) {
  MLFAB__EACH_ROLE(role, node, requests & 1u << request->kind) {
    role->withdraw(role->self, request, code, node->now_ns);
    return;
  }
}

MLFAB__INTERNAL int mlfab__roles_serve(const mlfab_node *node) {
  int serves = 0;
  MLFAB__EACH_ROLE(role, node, serves) serves = serves || role->serves(role->self);
  return serves;
}
