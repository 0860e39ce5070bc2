/* place.c - the server role: updates get their places in the queue, alone or in groups. See
 * server.h.
 *
 * Small updates get a place when they come. Those to be planned wait, and the later ones of the
 * same worker behind them, until a plan names them or the scheduler is gone. A place is given only
 * where the delay is below the bound; since nothing is ever put before what has a place, it stays
 * below. An update without such a place is dropped: decided at once when it is the oldest of its
 * worker, else at its turn, because a worker's updates are decided in the order of their numbers.
 *
 * A group's members stand in the queue in a row. Its number ends whenever anything of it changes,
 * and every member is told by VIA before anything else follows on the same link; bytes under an old
 * number find nothing.
 *
 * When members were grouped each could be taken in. Since then the model of consistency may have changed,
 * or a worker's progress: who has to wait, then, leaves the group at its turn, for its worker's earlier
 * updates may have to wait as well.
 *
 * Members of a group are all packed, or none. The length of a packed sum is not known before its
 * first bytes come: until then it is reckoned with as that of the first member's packets.
 *
 * Source: MLfabric §3.1 (delay bound, drops), §3.2 and §5.2 (aggregates). */
#include "server.h"

#include "prng.h"
#include "reduce.h"

enum {
  PLACE_WAITS = 2, /* members that a group may lose because they were silent */
  PLACE_MOST = 8   /* times their elements: what packets may take */
};

static int place_rounds(const mlfab__server *server) { return mlfab__gate_rounds(server); }

static uint64_t place_bound(const mlfab__server *server) {
  return place_rounds(server) ? MLFAB_UNBOUNDED : server->schedule.delay_bound;
}

static int place_packed(const mlfab__incoming *update) {
  return (update->push.flags & MLFAB__PUSH_PACKED) != 0;
}

static int place_planned(const mlfab__incoming *update) {
  return (update->push.flags & MLFAB__PUSH_PLANNED) && !update->withdrawn;
}

/* --- delays --- */

/* The largest delay over the slices that the update touches, behind all that has a place; then adds
 * `members` to what stands before the next. */
static uint64_t place_walk(mlfab__server *server, const mlfab__incoming *update, int64_t members) {
  uint64_t delay = 0;
  uint32_t seen = 0, next = 0;
  for (uint32_t k = 0; k < update->push.segments; k++) {
    uint32_t last, i = mlfab__intake_touched(server, update, k, &last);
    for (i = i < next ? next : i; i <= last; i++, seen++) {
      uint32_t at = update->push.versions == 1 ? 0 : seen;
      uint64_t version = server->store.slices[i].version;
      uint64_t base = at < update->push.versions ? mlfab__min(update->versions[at], version) : 0;
      delay = mlfab__max(delay, version + server->ahead[i] - base);
      server->ahead[i] += (uint64_t)members;
    }
    next = last + 1;
  }
  return delay;
}

MLFAB__INTERNAL int mlfab__place_late(const mlfab__server *server, mlfab__incoming *update,
                                      uint64_t delay) {
  uint64_t bound = place_bound(server);
  update->delay = delay;
  if (bound == MLFAB_UNBOUNDED || (update->push.flags & MLFAB__PUSH_INIT)) return 0;
  return delay + update->push.members - 1 >= bound && !MLFAB__PLANTED(14) ? MLFAB_ERR_DROPPED : 0;
}

/* --- places --- */

static void place_drop(mlfab__server *server, mlfab__incoming *update) {
  update->refused = MLFAB_ERR_DROPPED;
  update->received = update->granted = update->push.bytes; /* nothing more will come */
  server->late++;
}

/* At the end of the queue. */
static void place_now(mlfab__server *server, mlfab__incoming *update) {
  mlfab__intake_append(server, update, 0);
  if (update->withdrawn || place_rounds(server) || server->phase != MLFAB__MODEL_STANDS) return;
  if (mlfab__place_late(server, update, place_walk(server, update, 0))) {
    place_drop(server, update);
    return;
  }
  update->counted = 1;
  server->placed += update->push.members;
  place_walk(server, update, (int64_t)update->push.members);
}

/* Takes it out of the list of those that wait for a plan. */
static void place_take(mlfab__server *server, mlfab__incoming *update) {
  mlfab__intake_unlink(server, update);
  server->peers[update->worker].unplaced--;
  server->place_due = 1;
  update->unplaced = 0;
}

MLFAB__INTERNAL void mlfab__place_new(mlfab__server *server, mlfab__incoming *update) {
  mlfab__server_peer *peer = &server->peers[update->worker];
  if (server->scheduler_up && (place_planned(update) || peer->unplaced > 0)) {
    mlfab__intake_append(server, update, 1);
    server->place_due = 1;
    update->shape = mlfab__server_shape(update->segments, update->push.segments);
    /* Not of one shape with what is dense. */
    if (place_packed(update)) update->shape = mlfab__mix(update->shape);
    peer->unplaced++;
  } else {
    place_now(server, update);
  }
}

MLFAB__INTERNAL void mlfab__place_forget(mlfab__server *server, mlfab__incoming *update,
                                         int unplaced) {
  if (unplaced) {
    server->peers[update->worker].unplaced--;
    server->place_due = 1;
  }
  if (update->refused == MLFAB_ERR_DROPPED && server->late > 0) server->late--;
  if (update->counted) place_walk(server, update, -(int64_t)update->push.members);
  update->counted = 0;
}

/* The oldest of its worker that waits for a plan? Asked once of each, in the order of the list. */
static int place_oldest(mlfab__server *server, const mlfab__incoming *update) {
  mlfab__server_peer *peer = &server->peers[update->worker];
  if (peer->walked == server->place_walk) return 0;
  peer->walked = server->place_walk;
  return 1;
}

static void place_announce(mlfab__server *server, mlfab__incoming *update) {
  mlfab__announce announce;
  memset(&announce, 0, sizeof announce);
  announce.kind = MLFAB__TRANSFER_PUSH;
  announce.worker = update->worker;
  announce.id = update->push.seq;
  announce.bytes = update->push.bytes;
  announce.shape = update->shape;
  announce.lag = place_rounds(server) ? 0 : place_walk(server, update, 0);
  announce.norm = update->push.norm;
  announce.members = update->push.members;
  announce.parts = update->push.parts;
  update->announced = 1;
  mlfab__server_announce(server, &announce);
}

/* Drops that are the oldest of their worker in the queue are told at once. */
static void place_tell_dropped(mlfab__server *server) {
  mlfab__incoming *next;
  for (mlfab__incoming *update = server->first; update && server->late > 0; update = next) {
    next = update->next;
    if (update->refused != MLFAB_ERR_DROPPED || update == server->head) continue;
    const mlfab__incoming *earlier = server->first;
    while (earlier->worker != update->worker) earlier = earlier->next;
    if (earlier == update)
      mlfab__intake_decide(server, update, MLFAB_ERR_DROPPED, 0, update->delay);
  }
}

MLFAB__INTERNAL void mlfab__place_advance(mlfab__server *server) {
  mlfab__incoming *next;
  if (server->place_due) server->place_walk++;
  for (mlfab__incoming *update = server->place_due ? server->unplaced_first : NULL; update;
       update = next) {
    next = update->next;
    if (server->scheduler_up && !place_oldest(server, update)) continue;
    if (!server->scheduler_up || !place_planned(update)) {
      /* What stands behind it may be the oldest now. */
      server->peers[update->worker].walked = 0;
      place_take(server, update);
      place_now(server, update);
    } else if (!update->announced && mlfab__intake_eligible(server, update)) {
      place_announce(server, update);
    }
  }
  server->place_due = 0;
  if (server->late > 0) place_tell_dropped(server);
}

MLFAB__INTERNAL int mlfab__place_waits(const mlfab__server *server) {
  const mlfab__incoming *update = server->unplaced_first;
  while (update && !(update->announced && place_planned(update))) update = update->next;
  return update != NULL;
}

/* --- groups --- */

static mlfab__incoming *place_next_member(const mlfab__incoming *update) {
  mlfab__incoming *next = update->next;
  return update->group && next && next->group == update->group ? next : NULL;
}

static mlfab__incoming *place_leader(mlfab__incoming *update) {
  while (update->previous && update->previous->group == update->group) update = update->previous;
  return update;
}

MLFAB__INTERNAL mlfab__incoming *mlfab__place_stray(const mlfab__server *server,
                                                    mlfab__incoming *member) {
  mlfab__incoming *update = place_leader(member);
  while (update && mlfab__intake_eligible(server, update)) update = place_next_member(update);
  return update;
}

MLFAB__INTERNAL int mlfab__place_follows(const mlfab__incoming *update) {
  return update->group && update->previous && update->previous->group == update->group;
}

MLFAB__INTERNAL mlfab__incoming *mlfab__place_find(const mlfab__server *server, uint32_t aggregator,
                                                   uint64_t group) {
  for (mlfab__incoming *update = server->first; update && group; update = update->next) {
    if (update->group == group) return update->aggregator == aggregator ? update : NULL;
  }
  return NULL;
}

MLFAB__INTERNAL int mlfab__place_applying(const mlfab__server *server,
                                          const mlfab__incoming *update) {
  const mlfab__incoming *head = server->head;
  if (server->applying != MLFAB__APPLY_UPDATE || update->unplaced) return 0;
  return update == head || (update->group && update->group == head->group);
}

/* Nothing of its bytes is here. */
static void place_rewind(mlfab__server *server, mlfab__incoming *update) {
  mlfab__intake_leave_stage(server, update);
  if (update->own_bytes) update->push.bytes = update->own_bytes;
  update->own_bytes = 0;
  update->all_released = 0;
  update->received = update->consumed = update->granted = 0;
  update->segment = 0;
  update->in_segment = 0;
  update->last_byte_ns = server->now_ns;
}

static void place_via(mlfab__server *server, const mlfab__incoming *update, uint64_t number,
                      uint32_t aggregator) {
  mlfab__via via = {update->push.seq, number, server->peers[update->worker].generation, aggregator};
  uint8_t meta[64];
  server->port.post(server->port.self, update->worker, MLFAB__VIA, meta,
                    mlfab__encode_via(meta, &via));
}

static void place_direct(mlfab__server *server, mlfab__incoming *update) {
  place_rewind(server, update);
  update->group = 0;
  if (update->refused || update->withdrawn) {
    update->received = update->granted = update->push.bytes;
  } else if (!MLFAB__PLANTED(17)) {
    place_via(server, update, ++server->groups, MLFAB__NO_NODE);
  }
}

static void place_end_group(mlfab__server *server, uint32_t aggregator, uint64_t group) {
  mlfab__group_end end = {group};
  uint8_t meta[32];
  server->port.post(server->port.self, aggregator, MLFAB__GROUP_END, meta,
                    mlfab__encode_group_end(meta, &end));
}

MLFAB__INTERNAL int mlfab__place_absolute(const mlfab__server *server) {
  int told = server->config->on_update && !place_rounds(server);
  return mlfab__rule_linear(server->rule.kind) && !told;
}

/* Whole numbers can be multiplied with whole numbers only. */
static int place_multiplies(const mlfab__server *server, double weight) {
  const mlfab__layout *layout = &server->layout;
  if (weight > -9e15 && weight < 9e15 && (double)(int64_t)weight - weight == 0.0) return 1;
  for (uint32_t i = 0; i < layout->ntensors; i++) {
    if (layout->tensors[i].dtype == MLFAB_I64) return 0;
  }
  return 1;
}

/* Weights of the members: what each is multiplied with. A rule that is not linear, or a callback
 * that is told the scale, gets them relative to the first, whose scale then counts for all. 0 when
 * that is not possible. */
static int place_weights(const mlfab__server *server, const mlfab__incoming *leader,
                         mlfab__group_member *members, uint32_t *n_p) {
  int absolute = mlfab__place_absolute(server);
  uint32_t n = 0;
  for (const mlfab__incoming *u = leader; u; u = place_next_member(u)) {
    if (n == MLFAB__GROUP_MEMBERS_MAX) return 0;
    double weight = absolute ? u->push.scale : u->push.scale / leader->push.scale;
    if (!(weight - weight == 0.0) || !place_multiplies(server, weight)) return 0;
    members[n++] =
        (mlfab__group_member){u->push.seq, weight, u->worker, server->peers[u->worker].incarnation};
  }
  *n_p = n;
  return n >= 2;
}

/* Bytes of the model that it touches. */
static uint64_t place_raw(const mlfab__incoming *update) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < update->push.segments; i++) bytes += update->segments[i].bytes;
  return bytes;
}

/* Begins a run of the queue that has one number, under a new one: at its aggregator, or directly
 * when that cannot be. */
static void place_begin(mlfab__server *server, mlfab__incoming *leader, int direct) {
  uint32_t aggregator = leader->aggregator;
  const mlfab__server_peer *peer = &server->peers[aggregator];
  mlfab__group group;
  memset(&group, 0, sizeof group);
  group.group = ++server->groups;
  group.bytes = place_raw(leader);
  group.packed = (uint32_t)place_packed(leader);
  group.rate_in = leader->aggregator_rate;
  group.whole = server->schedule.whole;
  group.segments = leader->push.segments;
  mlfab__group_member *members = server->group_scratch;
  uint32_t bytes = 0;
  if (!direct && peer->connected && !peer->dead &&
      place_weights(server, leader, members, &group.members)) {
    bytes = mlfab__encode_group(server->meta_scratch, &group, members, leader->segments);
  }
  mlfab__incoming *next;
  for (mlfab__incoming *u = leader; u; u = next) {
    next = place_next_member(u);
    if (bytes > 0) {
      place_rewind(server, u);
      place_via(server, u, group.group, aggregator);
    } else {
      place_direct(server, u);
    }
  }
  if (bytes == 0) return;
  uint64_t old = leader->group;
  for (mlfab__incoming *u = leader; u && u->group == old; u = u->next) u->group = group.group;
  server->port.post(server->port.self, aggregator, MLFAB__GROUP, server->meta_scratch, bytes);
}

MLFAB__INTERNAL void mlfab__place_ungroup(mlfab__server *server, mlfab__incoming *member,
                                          mlfab__incoming *culprit, int direct) {
  mlfab__incoming *leader = place_leader(member), *last = leader;
  place_end_group(server, leader->aggregator, leader->group);
  server->stats->groups_failed++;
  if (server->head == leader) mlfab__intake_abort(server);
  mlfab__intake_leave_stage(server, leader);
  while (place_next_member(last)) last = place_next_member(last);
  if (culprit) {
    if (culprit == leader) leader = place_next_member(leader);
    mlfab__intake_unlink(server, culprit);
    if (culprit == last) last = culprit->previous;
    /* Behind the rest: their delays do not grow, its own is looked at again at its turn. */
    culprit->previous = last;
    culprit->next = last ? last->next : server->first;
    *(culprit->next ? &culprit->next->previous : &server->last) = culprit;
    *(last ? &last->next : &server->first) = culprit;
    place_direct(server, culprit);
  }
  if (leader) place_begin(server, leader, direct);
}

MLFAB__INTERNAL void mlfab__place_regroup(mlfab__server *server) {
  for (mlfab__incoming *update = server->first; update; update = update->next) {
    if (update->group && !mlfab__place_follows(update))
      mlfab__place_ungroup(server, update, NULL, 0);
  }
}

MLFAB__INTERNAL void mlfab__place_applied(mlfab__server *server, const mlfab__incoming *leader) {
  server->stats->groups_applied++;
  place_end_group(server, leader->aggregator, leader->group);
}

MLFAB__INTERNAL void mlfab__place_refuse(mlfab__server *server, mlfab__incoming *update, int code) {
  if (update->group && code == MLFAB_ERR_NOT_FINITE) {
    /* A sum that overflows: each is judged for itself. */
    mlfab__place_ungroup(server, update, NULL, 1);
    return;
  }
  if (update->group) place_end_group(server, update->aggregator, update->group);
  mlfab__incoming *next;
  for (; update; update = next) {
    next = place_next_member(update);
    mlfab__intake_decide(server, update, code, 0, 0);
  }
}

MLFAB__INTERNAL int mlfab__place_recall(mlfab__server *server, mlfab__incoming *update) {
  if (mlfab__place_applying(server, update)) return 1;
  if (update->group) {
    update->withdrawn = 1;
    mlfab__place_ungroup(server, update, update, 0);
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__place_lost_aggregator(mlfab__server *server, uint32_t aggregator) {
  mlfab__incoming *update = server->first;
  while (update) {
    if (!update->group || update->aggregator != aggregator ||
        mlfab__place_applying(server, update)) {
      update = update->next;
      continue;
    }
    mlfab__place_ungroup(server, update, NULL, 1);
    update = server->first;
  }
}

MLFAB__INTERNAL void mlfab__intake_group_fail(mlfab__server *server, uint32_t aggregator,
                                              const mlfab__frame_in *frame) {
  mlfab__group_fail fail;
  if (mlfab__decode_group_fail(frame->meta, frame->meta_bytes, &fail)) {
    mlfab__server_drop(server, aggregator, MLFAB_ERR_FRAME, "a GROUP_FAIL that does not parse");
    return;
  }
  mlfab__incoming *leader = mlfab__place_find(server, aggregator, fail.group);
  if (!leader || mlfab__place_applying(server, leader)) return; /* over meanwhile */
  mlfab__incoming *culprit = fail.worker == MLFAB__NO_NODE ? NULL : leader;
  while (culprit && (culprit->worker != fail.worker || culprit->push.seq != fail.seq))
    culprit = place_next_member(culprit);
  if (culprit && fail.code == MLFAB_ERR_NOT_FINITE) culprit->refused = MLFAB_ERR_NOT_FINITE;
  /* Whoever is waited for costs three heartbeats. After the second nobody else is waited for:
   * perhaps the aggregator is out of everybody's reach. */
  int direct = culprit == NULL;
  for (mlfab__incoming *u = leader; culprit && u; u = place_next_member(u)) {
    if (fail.code == MLFAB_ERR_PEER_DEAD && ++u->waits >= PLACE_WAITS) direct = 1;
  }
  mlfab__place_ungroup(server, leader, culprit, direct);
  mlfab__intake_advance(server);
}

/* --- packed sums --- */

MLFAB__INTERNAL void mlfab__place_release(mlfab__server *server, mlfab__incoming *leader,
                                          uint64_t upto) {
  if (!place_packed(leader)) {
    if (upto <= leader->granted) return;
    leader->granted = upto;
  } else if (leader == server->head) {
    if (leader->all_released) return;
    leader->all_released = 1;
    leader->granted =
        leader->own_bytes ? leader->push.bytes : mlfab__max(leader->granted, leader->push.bytes);
    upto = UINT64_MAX;
  } else {
    if (leader->granted > 0) return;
    upto = server->stage_bytes;
    leader->granted = leader->own_bytes ? mlfab__min(upto, leader->push.bytes) : upto;
  }
  mlfab__release release = {leader->group, upto};
  uint8_t meta[32];
  server->port.post(server->port.self, leader->aggregator, MLFAB__RELEASE, meta,
                    mlfab__encode_release(meta, &release));
}

MLFAB__INTERNAL const char *mlfab__place_sum(mlfab__incoming *leader, const mlfab__forward *forward,
                                             uint32_t bulk_bytes) {
  if (!place_packed(leader)) return NULL;
  if (forward->total == 0 && !leader->own_bytes)
    return bulk_bytes > 0 ? "packets of a sum whose length is not known" : NULL;
  if (leader->own_bytes)
    return forward->total != leader->push.bytes ? "a packed sum whose length changes" : NULL;
  if (forward->total > PLACE_MOST * place_raw(leader))
    return "a packed sum that is longer than its elements need";
  leader->own_bytes = leader->push.bytes;
  leader->push.bytes = forward->total;
  leader->granted =
      leader->all_released ? forward->total : mlfab__min(leader->granted, forward->total);
  return NULL;
}

/* --- plans --- */

static mlfab__incoming *place_waiting(const mlfab__server *server, const mlfab__plan_entry *entry) {
  mlfab__incoming *update = server->unplaced_first;
  while (update && (update->worker != entry->worker || update->push.seq != entry->id ||
                    !update->announced || !place_planned(update)))
    update = update->next;
  return update;
}

/* May they be added up on their way? What has no bytes would be complete before it came. */
static int place_alike(const mlfab__incoming *a, const mlfab__incoming *b) {
  return a->shape == b->shape && b->push.bytes > 0 &&
         (place_packed(a) || a->push.bytes == b->push.bytes);
}

/* Entries with one group number, or one without: they get their places. */
static void place_run(mlfab__server *server, const mlfab__plan_entry *entries, uint32_t n) {
  mlfab__incoming *leader = NULL;
  uint32_t aggregator = entries[0].group ? entries[0].aggregator : MLFAB__NO_NODE;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__incoming *update = place_waiting(server, &entries[i]);
    if (!update) continue; /* withdrawn, or its worker died, since it was announced */
    place_take(server, update);
    if (entries[i].fate != MLFAB__FATE_GO && !place_rounds(server)) {
      mlfab__intake_append(server, update, 0);
      update->delay = entries[i].delay;
      place_drop(server, update);
      continue;
    }
    place_now(server, update);
    if (update->refused || aggregator >= server->workers) continue;
    if (!place_alike(leader ? leader : update, update)) continue;
    update->aggregator = aggregator;
    update->aggregator_rate = entries[i].rate;
    update->group = leader ? leader->group : ++server->groups;
    if (!leader) leader = update;
  }
  if (!leader) return;
  /* Dropped ones, and those of another shape, may stand between: the members move together. */
  uint64_t group = leader->group;
  mlfab__incoming *first = leader, *next;
  for (mlfab__incoming *u = leader, *end = server->last; u; u = next) {
    next = u == end ? NULL : u->next;
    if (u->group != group) continue;
    mlfab__intake_unlink(server, u);
    mlfab__intake_append(server, u, 0);
  }
  place_begin(server, first, place_next_member(first) == NULL);
}

MLFAB__INTERNAL void mlfab__intake_plan(mlfab__server *server, const mlfab__plan_entry *entries,
                                        uint32_t n) {
  for (uint32_t i = 0, end; i < n; i = end) {
    end = i + 1;
    while (entries[i].group && end < n && entries[end].group == entries[i].group &&
           entries[end].kind == entries[i].kind)
      end++;
    if (entries[i].kind == MLFAB__TRANSFER_PUSH) place_run(server, &entries[i], end - i);
  }
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL void mlfab__intake_announce_all(mlfab__server *server) {
  for (mlfab__incoming *u = server->unplaced_first; u; u = u->next) u->announced = 0;
  server->place_due = 1;
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL void mlfab__intake_unschedule(mlfab__server *server) {
  server->place_due = 1;
  mlfab__intake_advance(server);
}

MLFAB__INTERNAL uint64_t mlfab__intake_backlog(const mlfab__server *server) {
  uint64_t bytes = 0;
  for (const mlfab__incoming *u = server->first; u; u = u->next) {
    if (!mlfab__place_follows(u)) bytes += u->push.bytes - mlfab__min(u->received, u->push.bytes);
  }
  return bytes;
}

MLFAB__INTERNAL void mlfab__place_progress(mlfab__server *server, const mlfab__incoming *head) {
  uint64_t left = head->push.bytes - head->received, told = server->reported_left;
  if (!server->scheduler_up || (left <= told && told - left < head->push.bytes / 4)) return;
  server->reported_left = left;
  mlfab__server_report(server, MLFAB__TRANSFER_PUSH, MLFAB__NO_NODE, 0, 0);
}
