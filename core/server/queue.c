/* queue.c - the server role: the announced updates, in the order in which they are taken in. See server.h.
 *
 * A new update gets its place at the end of the queue. A policy may hold it back (`unplaced`) and give it a
 * place later. A place is given only where the delay is below the bound; since no update is ever put before
 * one that has a place, the delay stays below. An update that cannot get such a place is dropped: decided
 * at once if it is the oldest of its worker, else at its turn, because a worker's updates are decided in
 * the order of their numbers.
 *
 * Members of a group are consecutive in the queue, share one number, and are taken in as one: the sum
 * arrives as the bytes of the first. The policy makes groups and ends them.
 *
 * Source: MLfabric §3.1 (delay bound, drops). */
#include "server.h"

/* --- updates and their lists --- */

MLFAB__INTERNAL void mlfab__queue_append(mlfab__server *server, mlfab__incoming *update,
                                         int unplaced) {
  mlfab__incoming **first = unplaced ? &server->queue.unplaced_first : &server->queue.first;
  mlfab__incoming **last = unplaced ? &server->queue.unplaced_last : &server->queue.last;
  update->unplaced = unplaced;
  update->previous = *last;
  update->next = NULL;
  *(*last ? &(*last)->next : first) = update;
  *last = update;
}

MLFAB__INTERNAL void mlfab__queue_unlink(mlfab__server *server, mlfab__incoming *update) {
  mlfab__incoming **first = update->unplaced ? &server->queue.unplaced_first : &server->queue.first;
  mlfab__incoming **last = update->unplaced ? &server->queue.unplaced_last : &server->queue.last;
  *(update->previous ? &update->previous->next : first) = update->next;
  *(update->next ? &update->next->previous : last) = update->previous;
}

MLFAB__INTERNAL void mlfab__queue_give_back(mlfab__server *server, mlfab__incoming *update) {
  update->next = server->queue.free_list;
  server->queue.free_list = update;
}

MLFAB__INTERNAL mlfab__incoming *mlfab__queue_take(mlfab__server *server, const mlfab__push *push) {
  mlfab__incoming *update = server->queue.free_list;
  if (update) {
    server->queue.free_list = update->next;
  } else {
    update = mlfab__alloc(server->env, sizeof *update);
    if (!update) return NULL;
  }
  mlfab__segment *segments = mlfab__grow(server->env, update->segments, &update->segment_room,
                                         push->segments, sizeof *segments);
  if (segments) update->segments = segments;
  uint64_t *versions = mlfab__grow(server->env, update->versions, &update->version_room,
                                   push->versions, sizeof *versions);
  if (versions) update->versions = versions;
  if (!segments || !versions) {
    mlfab__queue_give_back(server, update);
    return NULL;
  }
  mlfab__incoming kept = *update;
  memset(update, 0, sizeof *update);
  update->segments = kept.segments;
  update->versions = kept.versions;
  update->segment_room = kept.segment_room;
  update->version_room = kept.version_room;
  update->push = *push;
  if (push->segments > 0)
    memcpy(update->segments, server->lists->segments, push->segments * sizeof *update->segments);
  if (push->versions > 0)
    memcpy(update->versions, server->lists->versions, push->versions * sizeof *update->versions);
  return update;
}

MLFAB__INTERNAL void mlfab__queue_leave_stage(mlfab__server *server, mlfab__incoming *update) {
  if (update->stage) server->apply.stage_owner[update->stage - 1] = NULL;
  update->stage = 0;
}

MLFAB__INTERNAL uint32_t mlfab__queue_touched(const mlfab__server *server,
                                              const mlfab__incoming *update, uint32_t segment,
                                              uint32_t *last_p) {
  const mlfab__segment *s = &update->segments[segment];
  const uint32_t *local = server->store.local;
  *last_p = local[mlfab__layout_slice_at(&server->layout, s->offset + s->bytes - 1)];
  return local[mlfab__layout_slice_at(&server->layout, s->offset)];
}

MLFAB__INTERNAL int mlfab__queue_eligible(const mlfab__server *server,
                                          const mlfab__incoming *update) {
  if (update->push.flags & MLFAB__PUSH_INIT) return 1;
  return server->phase == MLFAB__MODEL_STANDS &&
         mlfab__clock_may_push(server, update->worker, update->push.progress);
}

MLFAB__INTERNAL mlfab__incoming *mlfab__queue_find(const mlfab__server *server, uint32_t worker,
                                                   uint64_t seq) {
  mlfab__incoming *update = server->apply.head;
  if (update && update->worker == worker && update->push.seq == seq) return update;
  for (update = server->queue.first; update; update = update->next) {
    if (update->worker == worker && update->push.seq == seq) return update;
  }
  for (update = server->queue.unplaced_first; update; update = update->next) {
    if (update->worker == worker && update->push.seq == seq) return update;
  }
  return NULL;
}

/* --- places --- */

MLFAB__INTERNAL uint64_t mlfab__queue_lag(mlfab__server *server, const mlfab__incoming *update,
                                          int64_t members) {
  uint64_t delay = 0;
  uint32_t seen = 0, next = 0;
  for (uint32_t k = 0; k < update->push.segments; k++) {
    uint32_t last, i = mlfab__queue_touched(server, update, k, &last);
    for (i = i < next ? next : i; i <= last; i++, seen++) {
      uint32_t at = update->push.versions == 1 ? 0 : seen;
      uint64_t version = server->store.slices[i].version;
      uint64_t base = at < update->push.versions ? mlfab__min(update->versions[at], version) : 0;
      delay = mlfab__max(delay, version + server->queue.ahead[i] - base);
      server->queue.ahead[i] += (uint64_t)members;
    }
    next = last + 1;
  }
  return delay;
}

MLFAB__INTERNAL int mlfab__queue_late(const mlfab__server *server, mlfab__incoming *update,
                                      uint64_t delay) {
  update->delay = delay;
  if (server->rounds || server->delay_bound == MLFAB_UNBOUNDED ||
      (update->push.flags & MLFAB__PUSH_INIT))
    return 0;
  return delay + update->push.members - 1 >= server->delay_bound ? MLFAB_ERR_DROPPED : 0;
}

MLFAB__INTERNAL void mlfab__queue_drop(mlfab__server *server, mlfab__incoming *update) {
  update->refused = MLFAB_ERR_DROPPED;
  update->received = update->granted = update->push.bytes; /* no more bytes will come */
  server->queue.ndropped++;
}

MLFAB__INTERNAL void mlfab__queue_now(mlfab__server *server, mlfab__incoming *update) {
  mlfab__queue_append(server, update, 0);
  /* Nobody asks for delays. */
  if (!server->policy && server->delay_bound == MLFAB_UNBOUNDED) return;
  if (update->withdrawn || server->rounds || server->phase != MLFAB__MODEL_STANDS) return;
  if (mlfab__queue_late(server, update, mlfab__queue_lag(server, update, 0))) {
    mlfab__queue_drop(server, update);
    return;
  }
  update->counted = 1;
  server->queue.placed += update->push.members;
  mlfab__queue_lag(server, update, (int64_t)update->push.members);
}

MLFAB__INTERNAL mlfab__incoming *mlfab__queue_member(const mlfab__incoming *update) {
  mlfab__incoming *next = update->next;
  return update->group && next && next->group == update->group ? next : NULL;
}

MLFAB__INTERNAL int mlfab__queue_follows(const mlfab__incoming *update) {
  return update->group && update->previous && update->previous->group == update->group;
}

MLFAB__INTERNAL int mlfab__queue_applying(const mlfab__server *server,
                                          const mlfab__incoming *update) {
  const mlfab__incoming *head = server->apply.head;
  if (server->apply.applying != MLFAB__APPLY_UPDATE || update->unplaced) return 0;
  return update == head || (update->group && update->group == head->group);
}

MLFAB__INTERNAL void mlfab__queue_new(mlfab__server *server, mlfab__incoming *update) {
  if (!server->policy || !server->policy->hold(server, update)) mlfab__queue_now(server, update);
}

MLFAB__INTERNAL void mlfab__queue_forget(mlfab__server *server, mlfab__incoming *update) {
  if (update->unplaced) {
    server->peers[update->worker].unplaced--;
    server->queue.place_due = 1;
  }
  if (update->refused == MLFAB_ERR_DROPPED && server->queue.ndropped > 0) server->queue.ndropped--;
  if (update->counted) mlfab__queue_lag(server, update, -(int64_t)update->push.members);
  update->counted = 0;
}
