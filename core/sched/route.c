/* route.c - the server role: routes, order and groups of large updates. See client.h and queue.c.
 *
 * A small update gets a place when it comes. If an update needs a plan, it waits, and the worker's later updates behind
 * it, until a plan names it or the scheduler is lost.
 *
 * A group's members are consecutive in the queue. Its number ends whenever anything in the group changes.
 * The server tells every member with VIA, before any other frame on that link; bytes under an old number
 * are ignored.
 *
 * When the group was made, all members could be taken in. Since then the consistency or a worker's progress may have
 * changed. A member that would have to wait leaves the group at its turn, because its worker's earlier updates may have
 * to wait, too.
 *
 * Either all members of a group are packed, or none. The length of a packed sum is unknown before its first bytes come;
 * until then the length of the first member's packets counts.
 *
 * Source: MLfabric §3.2 and §5.2 (aggregates). */
#include "client.h"

#include "../base/rng.h"
#include "../kernels/kernels.h"

enum {
  ROUTE_WAITS = 2, /* members that a group may lose to silence */
  ROUTE_MOST = 8   /* maximum size of packets, as a multiple of their elements' size */
};

static int route_packed(const mlfab__incoming *update) {
  return (update->push.flags & MLFAB__PUSH_PACKED) != 0;
}

static int route_planned(const mlfab__incoming *update) {
  return (update->push.flags & MLFAB__PUSH_PLANNED) && !update->withdrawn;
}

/* --- places --- */

/* Removes it from the updates that wait for a plan. */
static void route_take(mlfab__server *server, mlfab__incoming *update) {
  mlfab__queue_unlink(server, update);
  server->peers[update->worker].unplaced--;
  server->queue.place_due = 1;
  update->unplaced = 0;
}

MLFAB__INTERNAL void mlfab__route_over(mlfab__server *server, const mlfab__incoming *update) {
  mlfab__report_over(server, MLFAB__TRANSFER_PUSH, update->worker, update->push.seq, 0);
}

/* Is it its worker's oldest update that waits for a plan? Call once for each update, in the order of the list. */
static int route_oldest(mlfab__server *server, const mlfab__incoming *update) {
  mlfab__server_peer *peer = &server->peers[update->worker];
  if (peer->walked == server->sched->place_walk) return 0;
  peer->walked = server->sched->place_walk;
  return 1;
}

static void route_announce(mlfab__server *server, mlfab__incoming *update) {
  mlfab__announce announce;
  memset(&announce, 0, sizeof announce);
  announce.kind = MLFAB__TRANSFER_PUSH;
  announce.worker = update->worker;
  announce.id = update->push.seq;
  announce.bytes = update->push.bytes;
  announce.shape = update->shape;
  announce.lag = server->rounds != 0 ? 0 : mlfab__queue_lag(server, update, 0);
  announce.norm = update->push.norm;
  announce.members = update->push.members;
  announce.parts = update->push.parts;
  update->announced = 1;
  mlfab__report_announce(server, &announce);
}

MLFAB__INTERNAL int mlfab__route_hold(mlfab__server *server, mlfab__incoming *update) {
  mlfab__server_peer *peer = &server->peers[update->worker];
  if (!server->sched->up || (!route_planned(update) && peer->unplaced == 0)) return 0;
  mlfab__queue_append(server, update, 1);
  update->shape = mlfab__report_shape(update->segments, update->push.segments);
  /* Packets and dense updates have different shapes. */
  if (route_packed(update)) update->shape = mlfab__mix(update->shape);
  /* A later update of the worker waits for the earlier one. */
  if (peer->unplaced++ == 0 && mlfab__queue_eligible(server, update))
    route_announce(server, update);
  return 1;
}

MLFAB__INTERNAL void mlfab__route_advance(mlfab__server *server) {
  mlfab__incoming *next;
  if (server->queue.place_due) server->sched->place_walk++;
  for (mlfab__incoming *update = server->queue.place_due ? server->queue.unplaced_first : NULL;
       update; update = next) {
    next = update->next;
    if (server->sched->up && !route_oldest(server, update)) continue;
    if (!server->sched->up || !route_planned(update)) {
      /* The next update of this worker may be the oldest now. */
      server->peers[update->worker].walked = 0;
      route_take(server, update);
      mlfab__queue_now(server, update);
    } else if (!update->announced && mlfab__queue_eligible(server, update)) {
      route_announce(server, update);
    }
  }
  server->queue.place_due = 0;
}

MLFAB__INTERNAL int mlfab__route_waits(const mlfab__server *server) {
  const mlfab__incoming *update = server->queue.unplaced_first;
  while (update && !(update->announced && route_planned(update))) update = update->next;
  return update != NULL;
}

/* --- groups --- */

static mlfab__incoming *route_find(const mlfab__server *server, uint32_t aggregator,
                                   uint64_t group) {
  for (mlfab__incoming *update = server->queue.first; update && group; update = update->next) {
    if (update->group == group) return update->aggregator == aggregator ? update : NULL;
  }
  return NULL;
}

/* Discards all received bytes. */
static void route_rewind(mlfab__server *server, mlfab__incoming *update) {
  mlfab__queue_leave_stage(server, update);
  if (update->own_bytes) update->push.bytes = update->own_bytes;
  update->own_bytes = 0;
  update->all_released = 0;
  update->received = update->consumed = update->granted = 0;
  update->segment = 0;
  update->in_segment = 0;
  update->last_byte_ns = server->now_ns;
}

static void route_via(mlfab__server *server, const mlfab__incoming *update, uint64_t number,
                      uint32_t aggregator) {
  mlfab__via via = {update->push.seq, number, server->peers[update->worker].generation, aggregator};
  MLFAB__POST(&server->port, update->worker, MLFAB__VIA, via, &via);
}

static void route_direct(mlfab__server *server, mlfab__incoming *update) {
  route_rewind(server, update);
  update->group = 0;
  if (update->refused || update->withdrawn) {
    update->received = update->granted = update->push.bytes;
  } else {
    route_via(server, update, ++server->sched->groups, MLFAB__NO_NODE);
  }
}

static void route_end_group(mlfab__server *server, uint32_t aggregator, uint64_t group) {
  mlfab__group_end end = {group};
  MLFAB__POST(&server->port, aggregator, MLFAB__GROUP_END, group_end, &end);
}

/* Integers can be multiplied with integers only. */
static int route_multiplies(const mlfab__server *server, double weight) {
  const mlfab__layout *layout = &server->layout;
  if (weight > -9e15 && weight < 9e15 && (double)(int64_t)weight - weight == 0.0) return 1;
  for (uint32_t i = 0; i < layout->ntensors; i++) {
    if (layout->tensors[i].dtype == MLFAB_I64) return 0;
  }
  return 1;
}

/* Computes the factor of each member. For a non-linear optimizer, or a callback that gets the scale, factors are
 * relative to the first member, whose scale then counts for all. Returns 0 if that is impossible. */
static int route_weights(const mlfab__server *server, const mlfab__incoming *leader,
                         mlfab__group_member *members, uint32_t *n_p) {
  int absolute = mlfab__clock_absolute(server);
  uint32_t n = 0;
  for (const mlfab__incoming *u = leader; u; u = mlfab__queue_member(u)) {
    if (n == MLFAB__GROUP_MEMBERS_MAX) return 0;
    double weight = absolute ? u->push.scale : u->push.scale / leader->push.scale;
    if (!mlfab__finite(weight) || !route_multiplies(server, weight)) return 0;
    members[n++] =
        (mlfab__group_member){u->push.seq, weight, u->worker, server->peers[u->worker].incarnation};
  }
  *n_p = n;
  return n >= 2;
}

/* Returns the bytes of the model that the update covers. */
static uint64_t route_raw(const mlfab__incoming *update) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < update->push.segments; i++) bytes += update->segments[i].bytes;
  return bytes;
}

/* Starts a group again under a new number: through its aggregator, or directly if that is impossible. */
static void route_begin(mlfab__server *server, mlfab__incoming *leader, int direct) {
  uint32_t aggregator = leader->aggregator;
  const mlfab__server_peer *peer = &server->peers[aggregator];
  mlfab__group group;
  memset(&group, 0, sizeof group);
  group.group = ++server->sched->groups;
  group.bytes = route_raw(leader);
  group.packed = (uint32_t)route_packed(leader);
  group.rate_in = leader->aggregator_rate;
  group.whole = server->sched->schedule.whole;
  group.segments = leader->push.segments;
  mlfab__group_member *members = server->sched->members;
  uint32_t bytes = 0;
  if (!direct && peer->connected && !peer->dead &&
      route_weights(server, leader, members, &group.members)) {
    bytes = mlfab__encode_group(server->sched->meta, &group, members, leader->segments);
  }
  mlfab__incoming *next;
  for (mlfab__incoming *u = leader; u; u = next) {
    next = mlfab__queue_member(u);
    if (bytes > 0) {
      route_rewind(server, u);
      route_via(server, u, group.group, aggregator);
    } else {
      route_direct(server, u);
    }
  }
  if (bytes == 0) return;
  uint64_t old = leader->group;
  for (mlfab__incoming *u = leader; u && u->group == old; u = u->next) u->group = group.group;
  server->port.post(server->port.self, aggregator, MLFAB__GROUP, server->sched->meta, bytes);
}

static mlfab__incoming *route_leader(mlfab__incoming *update) {
  while (update->previous && update->previous->group == update->group) update = update->previous;
  return update;
}

MLFAB__INTERNAL void mlfab__route_split(mlfab__server *server, mlfab__incoming *member,
                                        mlfab__incoming *culprit, int direct) {
  mlfab__incoming *leader = route_leader(member), *last = leader;
  route_end_group(server, leader->aggregator, leader->group);
  server->stats->groups_failed++;
  if (server->apply.head == leader) mlfab__apply_abort(server);
  mlfab__queue_leave_stage(server, leader);
  while (mlfab__queue_member(last)) last = mlfab__queue_member(last);
  if (culprit) {
    if (culprit == leader) leader = mlfab__queue_member(leader);
    mlfab__queue_unlink(server, culprit);
    if (culprit == last) last = culprit->previous;
    /* Goes behind the others, so that their delays do not grow; its own is checked again at its turn. */
    culprit->previous = last;
    culprit->next = last ? last->next : server->queue.first;
    *(culprit->next ? &culprit->next->previous : &server->queue.last) = culprit;
    *(last ? &last->next : &server->queue.first) = culprit;
    route_direct(server, culprit);
  }
  if (leader) route_begin(server, leader, direct);
}

MLFAB__INTERNAL int mlfab__route_strays(mlfab__server *server, mlfab__incoming *member) {
  mlfab__incoming *stray = route_leader(member);
  while (stray && mlfab__queue_eligible(server, stray)) stray = mlfab__queue_member(stray);
  if (stray) mlfab__route_split(server, member, stray, 0);
  return stray != NULL;
}

MLFAB__INTERNAL void mlfab__route_regroup(mlfab__server *server) {
  for (mlfab__incoming *update = server->queue.first; update; update = update->next) {
    if (update->group && !mlfab__queue_follows(update)) mlfab__route_split(server, update, NULL, 0);
  }
}

MLFAB__INTERNAL void mlfab__route_end(mlfab__server *server, const mlfab__incoming *leader,
                                      int applied) {
  server->stats->groups_applied += (uint64_t)(applied != 0);
  route_end_group(server, leader->aggregator, leader->group);
}

MLFAB__INTERNAL void mlfab__route_lost(mlfab__server *server, uint32_t aggregator) {
  mlfab__incoming *update = server->queue.first;
  while (update) {
    if (!update->group || update->aggregator != aggregator ||
        mlfab__queue_applying(server, update)) {
      update = update->next;
      continue;
    }
    mlfab__route_split(server, update, NULL, 1);
    update = server->queue.first;
  }
}

static void route_group_fail(mlfab__server *server, uint32_t aggregator,
                             const mlfab__frame_in *frame) {
  mlfab__group_fail fail;
  if (MLFAB__MALFORMED(&server->port, aggregator, frame, group_fail, &fail)) return;
  mlfab__incoming *leader = route_find(server, aggregator, fail.group);
  if (!leader || mlfab__queue_applying(server, leader)) return; /* ended meanwhile */
  mlfab__incoming *culprit = fail.worker == MLFAB__NO_NODE ? NULL : leader;
  while (culprit && (culprit->worker != fail.worker || culprit->push.seq != fail.seq))
    culprit = mlfab__queue_member(culprit);
  if (culprit && fail.code == MLFAB_ERR_NOT_FINITE) culprit->refused = MLFAB_ERR_NOT_FINITE;
  /* Waiting for a silent member costs three heartbeats. After the second one the group goes directly: perhaps the
   * aggregator is unreachable for all. */
  int direct = culprit == NULL;
  for (mlfab__incoming *u = leader; culprit && u; u = mlfab__queue_member(u)) {
    if (fail.code == MLFAB_ERR_PEER_DEAD && ++u->waits >= ROUTE_WAITS) direct = 1;
  }
  mlfab__route_split(server, leader, culprit, direct);
  mlfab__server_advance(server);
}

/* --- packed sums --- */

MLFAB__INTERNAL void mlfab__route_grant(mlfab__server *server, mlfab__incoming *leader,
                                        uint64_t upto) {
  if (!route_packed(leader)) {
    if (upto <= leader->granted) return;
    leader->granted = upto;
  } else if (leader == server->apply.head) {
    if (leader->all_released) return;
    leader->all_released = 1;
    leader->granted =
        leader->own_bytes ? leader->push.bytes : mlfab__max(leader->granted, leader->push.bytes);
    upto = UINT64_MAX;
  } else {
    if (leader->granted > 0) return;
    upto = server->apply.stage_bytes;
    leader->granted = leader->own_bytes ? mlfab__min(upto, leader->push.bytes) : upto;
  }
  mlfab__release release = {leader->group, upto};
  MLFAB__POST(&server->port, leader->aggregator, MLFAB__RELEASE, release, &release);
}

static const char *route_sum(mlfab__incoming *leader, const mlfab__forward *forward,
                             uint32_t bulk_bytes) {
  if (!route_packed(leader)) return NULL;
  if (forward->total == 0 && !leader->own_bytes)
    return bulk_bytes > 0 ? "packets of a sum whose length is not known" : NULL;
  if (leader->own_bytes)
    return forward->total != leader->push.bytes ? "a packed sum whose length changes" : NULL;
  if (forward->total > ROUTE_MOST * route_raw(leader))
    return "a packed sum that is longer than its elements need";
  leader->own_bytes = leader->push.bytes;
  leader->push.bytes = forward->total;
  leader->granted =
      leader->all_released ? forward->total : mlfab__min(leader->granted, forward->total);
  return NULL;
}

/* --- plans --- */

static mlfab__incoming *route_waiting(const mlfab__server *server, const mlfab__plan_entry *entry) {
  mlfab__incoming *update = server->queue.unplaced_first;
  while (update && (update->worker != entry->worker || update->push.seq != entry->id ||
                    !update->announced || !route_planned(update)))
    update = update->next;
  return update;
}

/* Can the two be summed? An update without bytes would be complete before its sum arrives. */
static int route_alike(const mlfab__incoming *a, const mlfab__incoming *b) {
  return a->shape == b->shape && b->push.bytes > 0 &&
         (route_packed(a) || a->push.bytes == b->push.bytes);
}

/* Gives places to the entries of one group, or to a single entry. */
static void route_run(mlfab__server *server, const mlfab__plan_entry *entries, uint32_t n) {
  mlfab__incoming *leader = NULL;
  uint32_t aggregator = entries[0].group ? entries[0].aggregator : MLFAB__NO_NODE;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__incoming *update = route_waiting(server, &entries[i]);
    if (!update) continue; /* withdrawn, or its worker died, since it was announced */
    route_take(server, update);
    if (entries[i].fate != MLFAB__FATE_GO && !server->rounds) {
      mlfab__queue_append(server, update, 0);
      update->delay = entries[i].delay;
      mlfab__queue_drop(server, update);
      continue;
    }
    mlfab__queue_now(server, update);
    if (update->refused || aggregator >= server->workers) continue;
    if (!route_alike(leader ? leader : update, update)) continue;
    update->aggregator = aggregator;
    update->aggregator_rate = entries[i].rate;
    update->group = leader ? leader->group : ++server->sched->groups;
    if (!leader) leader = update;
  }
  if (!leader) return;
  /* Dropped updates and those of another shape may be in between: moves the members together. */
  uint64_t group = leader->group;
  mlfab__incoming *first = leader, *next;
  for (mlfab__incoming *u = leader, *end = server->queue.last; u; u = next) {
    next = u == end ? NULL : u->next;
    if (u->group != group) continue;
    mlfab__queue_unlink(server, u);
    mlfab__queue_append(server, u, 0);
  }
  route_begin(server, first, mlfab__queue_member(first) == NULL);
}

MLFAB__INTERNAL void mlfab__route_plan(mlfab__server *server, const mlfab__plan_entry *entries,
                                       uint32_t n) {
  for (uint32_t i = 0, end; i < n; i = end) {
    end = i + 1;
    while (entries[i].group && end < n && entries[end].group == entries[i].group &&
           entries[end].kind == entries[i].kind)
      end++;
    if (entries[i].kind == MLFAB__TRANSFER_PUSH) route_run(server, &entries[i], end - i);
  }
  mlfab__server_advance(server);
}

MLFAB__INTERNAL void mlfab__route_announce_all(mlfab__server *server) {
  for (mlfab__incoming *u = server->queue.unplaced_first; u; u = u->next) u->announced = 0;
  server->queue.place_due = 1;
  mlfab__server_advance(server);
}

MLFAB__INTERNAL void mlfab__route_unschedule(mlfab__server *server) {
  server->queue.place_due = 1;
  mlfab__server_advance(server);
}

MLFAB__INTERNAL void mlfab__route_progress(mlfab__server *server, const mlfab__incoming *head) {
  uint64_t left = head->push.bytes - head->received, told = server->sched->reported_left;
  if (!server->sched->up || (left <= told && told - left < head->push.bytes / 4)) return;
  server->sched->reported_left = left;
  mlfab__report_over(server, MLFAB__TRANSFER_PUSH, MLFAB__NO_NODE, 0, 0);
}

/* --- frames of aggregators --- */

static void route_forward(mlfab__server *server, uint32_t aggregator,
                          const mlfab__frame_in *frame) {
  mlfab__forward forward;
  if (MLFAB__MALFORMED(&server->port, aggregator, frame, forward, &forward)) return;
  mlfab__incoming *update = route_find(server, aggregator, forward.group);
  if (!update) return;
  const char *wrong = route_sum(update, &forward, frame->bulk_bytes);
  if (wrong) {
    mlfab__server_drop(server, aggregator, MLFAB_ERR_FRAME, wrong);
    return;
  }
  mlfab__apply_bytes(server, aggregator, update, forward.offset, frame);
}

MLFAB__INTERNAL int mlfab__route_frame(mlfab__server *server, uint32_t worker,
                                       const mlfab__frame_in *frame) {
  if (frame->type == MLFAB__FORWARD) {
    route_forward(server, worker, frame);
  } else if (frame->type == MLFAB__GROUP_FAIL) {
    route_group_fail(server, worker, frame);
  } else {
    return 0;
  }
  return 1;
}
