/* aggregator.c - the aggregator role: grants members of groups, adds and forwards their bytes (up). See aggregator.h.
 *
 * Bytes that arrive in order are added directly from the receive buffer: each byte of a member costs one
 * read of it and one read and write of the sum. Positions are in the group's bytes, which omit the gaps
 * between segments; `runs` gives their types. */
#include "aggregator.h"

#include "../kernels/kernels.h"

/* Scratch memory for decoding the largest manifests. */
struct mlfab__aggregator_scratch {
  mlfab__group_member members[MLFAB__GROUP_MEMBERS_MAX];
  mlfab__segment segments[MLFAB__SEGMENTS_MAX];
  mlfab__spread_member spread[MLFAB__GROUP_MEMBERS_MAX];
};

/* --- the role as a whole --- */

MLFAB__INTERNAL int mlfab__aggregator_init(mlfab__aggregator *aggregator, mlfab__env *env,
                                           const mlfab_config *config, const mlfab__port *up,
                                           const mlfab__port *down, mlfab_stats *stats) {
  memset(aggregator, 0, sizeof *aggregator);
  aggregator->env = env;
  aggregator->config = config;
  aggregator->up = *up;
  aggregator->down = *down;
  aggregator->stats = stats;
  aggregator->workers = config->workers;
  aggregator->servers = config->servers;
  uint32_t n = config->accumulators == UINT32_MAX ? 0
               : config->accumulators             ? config->accumulators
                                                  : 2;
  aggregator->naccumulators = (uint32_t)mlfab__min(n, MLFAB__AGGREGATOR_MAX);
  mlfab__meter_rate(&aggregator->meter, 0.0, config->chunk_bytes);
  aggregator->connected = mlfab__alloc(env, aggregator->workers);
  aggregator->incarnations =
      mlfab__alloc_array(env, aggregator->workers, sizeof *aggregator->incarnations);
  aggregator->numbers = mlfab__alloc_array(env, aggregator->servers, sizeof *aggregator->numbers);
  aggregator->accumulators =
      mlfab__alloc_array(env, aggregator->naccumulators, sizeof *aggregator->accumulators);
  if (!aggregator->connected || !aggregator->incarnations || !aggregator->numbers ||
      (aggregator->naccumulators > 0 && !aggregator->accumulators)) {
    mlfab__aggregator_free(aggregator);
    return MLFAB_ERR_MEMORY;
  }
  return 0;
}

static void aggregator_free_rings(mlfab__aggregator *aggregator, mlfab__accumulator *accumulator) {
  for (uint32_t i = 0; i < MLFAB__AGGREGATOR_RINGS; i++) {
    mlfab__free_aligned(aggregator->env, accumulator->rings[i],
                        aggregator->stage_bytes + aggregator->packet_bytes);
    accumulator->rings[i] = NULL;
  }
}

MLFAB__INTERNAL void mlfab__aggregator_free(mlfab__aggregator *aggregator) {
  mlfab__env *env = aggregator->env;
  if (!env) return;
  for (uint32_t i = 0; aggregator->accumulators && i < aggregator->naccumulators; i++) {
    mlfab__accumulator *a = &aggregator->accumulators[i];
    aggregator_free_rings(aggregator, a);
    mlfab__free_aligned(env, a->data, a->room);
    mlfab__free(env, a->addends, a->addend_room * sizeof *a->addends);
    mlfab__free(env, a->runs, a->run_room * sizeof *a->runs);
    mlfab__free(env, a->stretches, a->stretch_room * sizeof *a->stretches);
    mlfab__free_aligned(env, a->stream, a->stream_room);
    mlfab__free(env, a->recipients, a->recipient_room * sizeof *a->recipients);
    mlfab__free(env, a->records, a->record_room * sizeof *a->records);
  }
  mlfab__free(env, aggregator->accumulators,
              aggregator->naccumulators * sizeof *aggregator->accumulators);
  mlfab__free(env, aggregator->connected, aggregator->workers);
  mlfab__free(env, aggregator->incarnations,
              aggregator->workers * sizeof *aggregator->incarnations);
  mlfab__free(env, aggregator->numbers, aggregator->servers * sizeof *aggregator->numbers);
  mlfab__free_aligned(env, aggregator->scratch, sizeof *aggregator->scratch);
  mlfab__free_aligned(env, aggregator->came, MLFAB__PACKET_ROOM);
  memset(aggregator, 0, sizeof *aggregator);
}

/* --- granting --- */

static void aggregator_post_fail(mlfab__aggregator *aggregator, uint32_t server, uint64_t group,
                                 const mlfab__addend *culprit, int code) {
  mlfab__group_fail fail = {group, culprit ? culprit->seq : 0,
                            culprit ? culprit->worker : MLFAB__NO_NODE, code};
  MLFAB__POST(&aggregator->up, server, MLFAB__GROUP_FAIL, group_fail, &fail);
}

/* Ends a group that cannot be completed, because of a member or of this node; the server ends its number. */
static void aggregator_fail(mlfab__aggregator *aggregator, mlfab__accumulator *group,
                            const mlfab__addend *culprit, int code) {
  aggregator_post_fail(aggregator, group->server, group->number, culprit, code);
  group->state = MLFAB__ACCUMULATOR_FAILED;
  group->outstanding = 0;
}

/* Returns the bytes of a member's update; NEVER while unknown. */
static uint64_t aggregator_total(const mlfab__accumulator *group, const mlfab__addend *addend) {
  if (!group->packed) return group->bytes;
  return addend->total ? addend->total : MLFAB__NEVER;
}

/* Returns the bytes that a member was granted and is expected to send. */
static uint64_t aggregator_owed(const mlfab__aggregator *aggregator,
                                const mlfab__accumulator *group, const mlfab__addend *addend) {
  uint64_t total = aggregator_total(group, addend), left = addend->granted - addend->received;
  if (!group->packed) return left;
  /* Its next packet may be larger than the rest of the grant. */
  if (addend->granted < total && left < aggregator->packet_bytes) return 0;
  uint64_t expected = mlfab__min(addend->granted, total == MLFAB__NEVER ? group->bytes : total);
  return expected - addend->received;
}

static void aggregator_grant(mlfab__aggregator *aggregator, mlfab__accumulator *group,
                             mlfab__addend *addend, uint64_t upto) {
  mlfab__hop_grant grant = {group->number, addend->seq, upto, group->server};
  uint64_t owed = aggregator_owed(aggregator, group, addend);
  if (owed == 0) addend->since_ns = aggregator->now_ns;
  addend->granted = upto;
  group->outstanding += aggregator_owed(aggregator, group, addend) - owed;
  MLFAB__POST(&aggregator->down, addend->worker, MLFAB__HOP_GRANT, hop_grant, &grant);
}

/* Returns how far member k may send: ahead of its predecessor by at most a ring. */
static uint64_t aggregator_limit(const mlfab__aggregator *aggregator,
                                 const mlfab__accumulator *group, uint32_t k) {
  if (group->packed)
    return k == group->head ? MLFAB__NEVER : aggregator->stage_bytes + aggregator->packet_bytes;
  if (k == group->head) return group->bytes;
  return mlfab__min(group->bytes, group->addends[k - 1].added + aggregator->stage_bytes);
}

/* Returns the index of a free ring plus one, or 0. */
static uint32_t aggregator_ring(const mlfab__accumulator *group) {
  for (uint32_t i = 0; i < MLFAB__AGGREGATOR_RINGS; i++) {
    if (!group->ring_used[i]) return i + 1;
  }
  return 0;
}

/* Returns the first member of a group that could be granted next, or naddends. */
static uint32_t aggregator_waiting(const mlfab__aggregator *aggregator,
                                   const mlfab__accumulator *group) {
  if (group->top == 0 && group->lent > 0) return group->naddends; /* invariant (4) */
  uint32_t end = aggregator_ring(group) ? group->naddends : group->head + 1;
  for (uint32_t k = group->head; k < end; k++) {
    const mlfab__addend *addend = &group->addends[k];
    if (addend->granted == 0 &&
        mlfab__aggregator_stands(aggregator, addend->worker, addend->incarnation))
      return k;
  }
  return group->naddends;
}

/* Returns the oldest group with such a member, or NULL. */
static mlfab__accumulator *aggregator_next(const mlfab__aggregator *aggregator,
                                           uint32_t *member_p) {
  mlfab__accumulator *best = NULL;
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *group = &aggregator->accumulators[i];
    if (group->state != MLFAB__ACCUMULATOR_ADDING || (best && best->age < group->age)) continue;
    uint32_t k = aggregator_waiting(aggregator, group);
    if (k == group->naddends) continue;
    best = group;
    *member_p = k;
  }
  return best;
}

/* Have the granted members almost nothing left to send? */
static int aggregator_draws_near(const mlfab__aggregator *aggregator) {
  uint64_t outstanding = 0;
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    outstanding += aggregator->accumulators[i].outstanding;
  }
  return outstanding <= 2 * (uint64_t)aggregator->config->chunk_bytes;
}

/* Grants a member for the first time. Returns 0 without memory for its ring: then it is granted when it is the head. */
static int aggregator_admit(mlfab__aggregator *aggregator, mlfab__accumulator *group, uint32_t k) {
  mlfab__addend *addend = &group->addends[k];
  if (k > group->head) {
    uint32_t ring = aggregator_ring(group);
    if (!aggregator->ghost && !group->rings[ring - 1]) {
      group->rings[ring - 1] =
          mlfab__alloc_aligned(aggregator->env, aggregator->stage_bytes + aggregator->packet_bytes);
      if (!group->rings[ring - 1]) return 0;
    }
    group->ring_used[ring - 1] = 1;
    addend->ring = ring;
  }
  if (group->top < k + 1) group->top = k + 1;
  aggregator_grant(aggregator, group, addend, aggregator_limit(aggregator, group, k));
  return 1;
}

/* Grants all members that may be granted now. */
static void aggregator_pump(mlfab__aggregator *aggregator) {
  int looked = 0;
  uint32_t k;
  for (;;) {
    mlfab__accumulator *group = aggregator_next(aggregator, &k);
    if (!group) return;
    if (!aggregator_draws_near(aggregator)) {
      if (looked || !mlfab__meter_idle(&aggregator->meter, aggregator->now_ns)) return;
      looked = 1;
    }
    if (!aggregator_admit(aggregator, group, k)) return;
    mlfab__meter_begin(&aggregator->meter, aggregator->now_ns);
  }
}

/* --- adding --- */

/* Adds the next bytes of member k from `from` (not read for ghosts). Errors: NOT_FINITE. */
static int aggregator_add(mlfab__aggregator *aggregator, mlfab__accumulator *group, uint32_t k,
                          const uint8_t *from, uint64_t bytes) {
  mlfab__addend *addend = &group->addends[k];
  while (bytes > 0) {
    const mlfab__run *run = &group->runs[addend->run];
    uint64_t n = mlfab__min(bytes, run->end - addend->added);
    if (!aggregator->ghost) {
      uint8_t *sum = group->data + addend->added;
      uint64_t count = n / mlfab__dtype_bytes(run->dtype);
      if (!mlfab__kernel_add_by(aggregator->config->kernels, run->dtype, sum, k > 0 ? sum : NULL,
                                from, addend->weight, count, 0))
        return MLFAB_ERR_NOT_FINITE;
      from += n;
    }
    addend->added += n;
    addend->run += addend->added == run->end;
    bytes -= n;
  }
  return 0;
}

/* Stages early bytes: byte x of a member lies at x modulo the ring's size. A ghost has no bytes. */
static void aggregator_stage(mlfab__aggregator *aggregator, mlfab__accumulator *group, uint32_t k,
                             uint64_t at, const uint8_t *from, uint64_t bytes) {
  uint8_t *ring = group->rings[group->addends[k].ring - 1];
  while (bytes > 0 && from) {
    uint64_t place = at % aggregator->stage_bytes;
    uint64_t n = mlfab__min(bytes, aggregator->stage_bytes - place);
    memcpy(ring + place, from, n);
    from += n;
    at += n;
    bytes -= n;
  }
}

/* Adds the staged bytes of the members behind k, each as far as its predecessor has been added. */
static void aggregator_drain(mlfab__aggregator *aggregator, mlfab__accumulator *group, uint32_t k) {
  while (++k < group->top) {
    mlfab__addend *addend = &group->addends[k];
    uint64_t limit = mlfab__min(addend->received, group->addends[k - 1].added);
    if (addend->added >= limit) return;
    const uint8_t *ring = aggregator->ghost ? NULL : group->rings[addend->ring - 1];
    while (addend->added < limit) {
      uint64_t place = addend->added % aggregator->stage_bytes;
      uint64_t n = mlfab__min(limit - addend->added, aggregator->stage_bytes - place);
      if (aggregator_add(aggregator, group, k, ring ? ring + place : NULL, n)) {
        aggregator_fail(aggregator, group, addend, MLFAB_ERR_NOT_FINITE);
        return;
      }
    }
  }
}

/* Moves the head of a group of packets. */
static void aggregator_settle_packed(mlfab__aggregator *aggregator, mlfab__accumulator *group) {
  while (group->head < group->naddends) {
    mlfab__addend *addend = &group->addends[group->head];
    if (addend->ring) {
      int code = mlfab__sum_unstage(group, addend);
      if (code) {
        aggregator_fail(aggregator, group, addend, code);
        return;
      }
      group->ring_used[addend->ring - 1] = 0;
      addend->ring = 0;
    }
    if (addend->added < aggregator_total(group, addend)) {
      if (addend->granted > 0 && addend->granted < aggregator_total(group, addend))
        aggregator_grant(aggregator, group, addend, MLFAB__NEVER);
      return;
    }
    group->head++;
  }
  mlfab__sum_encode(aggregator, group);
}

/* After an addition: moves the head, and grants more to members. */
static void aggregator_settle(mlfab__aggregator *aggregator, mlfab__accumulator *group) {
  if (group->packed) {
    aggregator_settle_packed(aggregator, group);
    return;
  }
  while (group->head < group->naddends && group->addends[group->head].added == group->bytes) {
    mlfab__addend *next = &group->addends[++group->head];
    /* Its staged bytes were added: from now on its bytes come in order. */
    if (group->head < group->naddends && next->ring) {
      group->ring_used[next->ring - 1] = 0;
      next->ring = 0;
    }
  }
  for (uint32_t k = group->head; k < group->top; k++) {
    mlfab__addend *addend = &group->addends[k];
    uint64_t upto = aggregator_limit(aggregator, group, k);
    /* Each grant costs a frame, so not every chunk gets one. */
    if (addend->granted > 0 && upto > addend->granted &&
        (upto == group->bytes || addend->received == addend->granted ||
         upto - addend->granted >= aggregator->stage_bytes / 4))
      aggregator_grant(aggregator, group, addend, upto);
  }
}

/* Returns the length of the sum as it is forwarded; 0: unknown. */
static uint64_t aggregator_length(const mlfab__accumulator *group) {
  if (!group->packed) return group->bytes;
  return group->encoded ? group->length : 0;
}

/* Returns the size of the next FORWARD: a whole chunk, or less at the end of a release. */
static uint32_t aggregator_forwardable(const mlfab__aggregator *aggregator,
                                       const mlfab__accumulator *group) {
  if (group->packed) {
    return group->state == MLFAB__ACCUMULATOR_ADDING ? mlfab__sum_forwardable(aggregator, group)
                                                     : 0;
  }
  uint64_t added = group->addends[group->naddends - 1].added;
  uint64_t released = group->released;
  uint64_t upto = mlfab__min(released, added);
  uint64_t n = upto > group->sent ? upto - group->sent : 0;
  if (group->state != MLFAB__ACCUMULATOR_ADDING || (group->whole && added < group->bytes)) return 0;
  uint32_t chunk =
      mlfab__port_chunk(&aggregator->up, group->server, aggregator->config->chunk_bytes);
  if (n >= chunk) return chunk;
  return upto == released ? (uint32_t)n : 0;
}

/* --- frames of members --- */

/* Returns a text if the chunk breaks the protocol, else NULL. Copies packets to private memory. */
static const char *aggregator_check(mlfab__aggregator *aggregator, const mlfab__accumulator *group,
                                    mlfab__addend *addend, const mlfab__hop_chunk *chunk,
                                    mlfab__frame_in *frame) {
  uint64_t end = chunk->offset + frame->bulk_bytes;
  if (!addend) return "a chunk for a group without this member";
  if (group->packed) return mlfab__sum_check(aggregator, group, addend, chunk, frame);
  if (chunk->offset != addend->received || frame->bulk_bytes > addend->granted - addend->received)
    return "a chunk out of place or not granted";
  if (frame->bulk_bytes == 0 || (frame->bulk == NULL) != (aggregator->ghost != 0))
    return "a chunk without bytes, or with bytes for a model of ghosts";
  if (end % (end < group->wide ? 8 : 4) != 0) return "a chunk that cuts an element";
  return NULL;
}

/* Errors: NOT_FINITE. */
static int aggregator_take_dense(mlfab__aggregator *aggregator, mlfab__accumulator *group,
                                 mlfab__addend *addend, const mlfab__frame_in *frame) {
  uint32_t k = (uint32_t)(addend - group->addends);
  uint64_t at = addend->received - frame->bulk_bytes, direct = 0;
  uint64_t limit = k == 0 ? group->bytes : group->addends[k - 1].added;
  const uint8_t *bulk = frame->bulk;
  if (addend->added == at) {
    direct = mlfab__min(frame->bulk_bytes, limit - at);
    if (aggregator_add(aggregator, group, k, bulk, direct)) return MLFAB_ERR_NOT_FINITE;
  }
  if (direct < frame->bulk_bytes) {
    aggregator_stage(aggregator, group, k, at + direct, bulk ? bulk + direct : NULL,
                     frame->bulk_bytes - direct);
  }
  return 0;
}

/* Takes in a checked chunk. `owed`: aggregator_owed before it. */
static void aggregator_take_in(mlfab__aggregator *aggregator, mlfab__accumulator *group,
                               mlfab__addend *addend, uint64_t owed, const mlfab__frame_in *frame) {
  addend->received += frame->bulk_bytes;
  group->outstanding += aggregator_owed(aggregator, group, addend) - owed;
  group->came_ns = aggregator->now_ns;
  addend->since_ns = aggregator->now_ns;
  int code = group->packed ? mlfab__sum_take(group, addend, frame)
                           : aggregator_take_dense(aggregator, group, addend, frame);
  if (code) {
    aggregator_fail(aggregator, group, addend, code);
    return;
  }
  if (!group->packed) aggregator_drain(aggregator, group, (uint32_t)(addend - group->addends));
  if (group->state != MLFAB__ACCUMULATOR_ADDING) return;
  aggregator_settle(aggregator, group);
  if (aggregator_forwardable(aggregator, group) > 0)
    aggregator->up.ready(aggregator->up.self, group->server);
}

MLFAB__INTERNAL void mlfab__aggregator_member_frame(mlfab__aggregator *aggregator, uint32_t member,
                                                    const mlfab__frame_in *frame, uint64_t now_ns) {
  mlfab__hop_chunk chunk;
  const char *wrong = NULL;
  aggregator->now_ns = now_ns;
  if (frame->type != MLFAB__HOP_CHUNK ||
      mlfab__decode_hop_chunk(frame->meta, frame->meta_bytes, &chunk) ||
      chunk.server >= aggregator->servers) {
    wrong = "a HOP_CHUNK that does not parse";
    aggregator->down.drop(aggregator->down.self, member, MLFAB_ERR_FRAME, wrong);
    return;
  }
  mlfab__meter_count(&aggregator->meter, frame->bulk_bytes);
  mlfab__accumulator *group = mlfab__aggregator_find(aggregator, chunk.server, chunk.group);
  if (!group && chunk.group > aggregator->numbers[chunk.server].newest) {
    wrong = "a chunk for a group that does not exist";
  } else if (group && (group->state == MLFAB__ACCUMULATOR_ADDING ||
                       group->state == MLFAB__ACCUMULATOR_SENT)) {
    mlfab__addend *addend = NULL;
    for (uint32_t k = 0; k < group->naddends && !addend; k++) {
      if (group->addends[k].worker == member && group->addends[k].seq == chunk.seq)
        addend = &group->addends[k];
    }
    uint64_t owed = addend ? aggregator_owed(aggregator, group, addend) : 0;
    mlfab__frame_in own = *frame;
    wrong = aggregator_check(aggregator, group, addend, &chunk, &own);
    if (!wrong) aggregator_take_in(aggregator, group, addend, owed, &own);
  }
  if (wrong) aggregator->down.drop(aggregator->down.self, member, MLFAB_ERR_FRAME, wrong);
  aggregator_pump(aggregator);
}

/* --- frames of servers --- */

/* Appends bytes of one type to the runs. Errors: MEMORY. */
static int aggregator_run(mlfab__aggregator *aggregator, mlfab__accumulator *group, uint64_t end,
                          int dtype) {
  if (mlfab__dtype_bytes(dtype) == 8) group->wide = end;
  if (group->nruns > 0 && group->runs[group->nruns - 1].dtype == dtype) {
    group->runs[group->nruns - 1].end = end;
    return 0;
  }
  mlfab__run *runs = mlfab__grow(aggregator->env, group->runs, &group->run_room,
                                 (uint64_t)group->nruns + 1, sizeof *runs);
  if (!runs) return MLFAB_ERR_MEMORY;
  group->runs = runs;
  group->runs[group->nruns++] = (mlfab__run){end, dtype};
  return 0;
}

/* Builds the runs of a group's segments. Errors: ARGUMENT (not in this server's shard, or an element is
 * cut), MEMORY. */
static int aggregator_runs(mlfab__aggregator *aggregator, mlfab__accumulator *group,
                           const mlfab__segment *segments, uint32_t n) {
  const mlfab__layout *layout = aggregator->layout;
  uint64_t at = 0;
  group->nruns = 0;
  group->wide = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint64_t begin, end, offset = segments[i].offset, left = segments[i].bytes;
    mlfab__layout_run(layout, group->server, offset, &begin, &end);
    if (offset != begin || begin == end || left > end - begin) return MLFAB_ERR_ARGUMENT;
    while (left > 0) {
      const mlfab__tensor *tensor = mlfab__layout_tensor_at(layout, offset);
      uint32_t width = mlfab__dtype_bytes((int)tensor->dtype);
      uint64_t bytes = tensor->offset + tensor->bytes - offset;
      if (layout->uniform_dtype || bytes > left) bytes = left;
      if ((offset - tensor->offset) % width != 0 || bytes % width != 0) return MLFAB_ERR_ARGUMENT;
      int code = aggregator_run(aggregator, group, at + bytes, (int)tensor->dtype);
      if (code) return code;
      offset += bytes;
      at += bytes;
      left -= bytes;
    }
  }
  return at > 0 ? 0 : MLFAB_ERR_ARGUMENT;
}

/* Does the manifest name existing workers, and each update once? */
static int aggregator_sound(const mlfab__aggregator *aggregator, const mlfab__group_member *members,
                            uint32_t n) {
  for (uint32_t k = 0; k < n; k++) {
    if (members[k].worker >= aggregator->workers) return 0;
    for (uint32_t i = 0; i < k; i++) {
      if (members[i].worker == members[k].worker && members[i].seq == members[k].seq) return 0;
    }
  }
  return 1;
}

/* Prepares an accumulator for a group. Errors: AGAIN (no room), ARGUMENT. */
static int aggregator_begin(mlfab__aggregator *aggregator, uint32_t server,
                            const mlfab__group *group, const mlfab__aggregator_scratch *manifest) {
  if (!aggregator->layout) return MLFAB_ERR_AGAIN;
  mlfab__accumulator *a = mlfab__aggregator_take(aggregator, server, group->group, group->bytes, 0);
  if (!a) return MLFAB_ERR_AGAIN;
  int code = aggregator_runs(aggregator, a, manifest->segments, group->segments);
  if (code) return code == MLFAB_ERR_MEMORY ? MLFAB_ERR_AGAIN : code;
  a->packed = group->packed != 0;
  if (a->packed) code = mlfab__sum_begin(aggregator, a, manifest->segments, group->segments);
  if (code) return code;
  mlfab__addend *addends =
      mlfab__grow(aggregator->env, a->addends, &a->addend_room, group->members, sizeof *addends);
  if (!addends) return MLFAB_ERR_AGAIN;
  memset(addends, 0, group->members * sizeof *addends);
  for (uint32_t k = 0; k < group->members; k++) {
    addends[k].seq = manifest->members[k].seq;
    addends[k].weight = manifest->members[k].weight;
    addends[k].worker = manifest->members[k].worker;
    addends[k].incarnation = manifest->members[k].incarnation;
    addends[k].since_ns = aggregator->now_ns;
  }
  a->state = MLFAB__ACCUMULATOR_ADDING;
  a->whole = group->whole != 0;
  a->addends = addends;
  a->naddends = group->members;
  a->head = a->top = 0;
  a->outstanding = a->released = a->sent = 0;
  a->came_ns = a->told_ns = aggregator->now_ns;
  memset(a->ring_used, 0, sizeof a->ring_used);
  return 0;
}

/* Allocates memory for decoding manifests. Returns 0 without memory. */
static int aggregator_scratch(mlfab__aggregator *aggregator) {
  if (!aggregator->scratch)
    aggregator->scratch = mlfab__alloc_aligned(aggregator->env, sizeof *aggregator->scratch);
  return aggregator->scratch != NULL;
}

static void aggregator_group(mlfab__aggregator *aggregator, uint32_t server,
                             const mlfab__frame_in *frame) {
  mlfab__aggregator_server *numbers = &aggregator->numbers[server];
  mlfab__group_end head = {0}; /* only its number, which comes first */
  int code = MLFAB_ERR_AGAIN, wrong = frame->meta_bytes < 8;
  if (!wrong) wrong = mlfab__decode_group_end(frame->meta, 8, &head) || head.group <= numbers->last;
  if (!wrong && aggregator_scratch(aggregator)) {
    mlfab__aggregator_scratch *manifest = aggregator->scratch;
    mlfab__group group;
    wrong = mlfab__decode_group(frame->meta, frame->meta_bytes, &group, manifest->members,
                                manifest->segments) ||
            group.packed > 1 || !aggregator_sound(aggregator, manifest->members, group.members);
    if (!wrong) {
      numbers->last = head.group;
      numbers->newest = mlfab__max(numbers->newest, head.group);
      if (group.rate_in > 0.0)
        mlfab__meter_rate(&aggregator->meter, group.rate_in, aggregator->config->chunk_bytes);
      code = aggregator_begin(aggregator, server, &group, manifest);
    }
  }
  if (wrong) {
    aggregator->up.drop(aggregator->up.self, server, MLFAB_ERR_FRAME,
                        "a GROUP that does not parse, or whose number went back");
  } else if (code) {
    aggregator_post_fail(aggregator, server, head.group, NULL, code);
  } else {
    aggregator_pump(aggregator);
  }
}

static void aggregator_group_end(mlfab__aggregator *aggregator, uint32_t server,
                                 const mlfab__frame_in *frame) {
  mlfab__group_end end;
  if (MLFAB__MALFORMED(&aggregator->up, server, frame, group_end, &end)) return;
  mlfab__accumulator *group = mlfab__aggregator_find(aggregator, server, end.group);
  if (!group || group->state == MLFAB__ACCUMULATOR_HANDING) return;
  group->state = MLFAB__ACCUMULATOR_FREE;
  group->outstanding = 0;
  aggregator_pump(aggregator);
}

static void aggregator_release(mlfab__aggregator *aggregator, uint32_t server,
                               const mlfab__frame_in *frame) {
  mlfab__release release;
  int code = mlfab__decode_release(frame->meta, frame->meta_bytes, &release);
  mlfab__accumulator *group =
      code ? NULL : mlfab__aggregator_find(aggregator, server, release.group);
  if (!code && (!group || group->state != MLFAB__ACCUMULATOR_ADDING)) return;
  /* The server does not know the length of the sum's packets. */
  int packed = group && group->packed;
  if (mlfab__port_refuse(
          &aggregator->up, server, frame,
          code || (!packed && (release.upto > group->bytes ||
                               release.upto % (release.upto < group->wide ? 8 : 4) != 0))))
    return;
  group->released = mlfab__max(group->released, release.upto);
  if (aggregator_forwardable(aggregator, group) > 0)
    aggregator->up.ready(aggregator->up.self, server);
}

MLFAB__INTERNAL int mlfab__aggregator_server_frame(mlfab__aggregator *aggregator, uint32_t server,
                                                   const mlfab__frame_in *frame, uint64_t now_ns) {
  aggregator->now_ns = now_ns;
  switch (frame->type) {
    case MLFAB__GROUP:
      aggregator_group(aggregator, server, frame);
      return 1;
    case MLFAB__GROUP_END:
      aggregator_group_end(aggregator, server, frame);
      return 1;
    case MLFAB__RELEASE:
      aggregator_release(aggregator, server, frame);
      return 1;
    case MLFAB__SPREAD:
      mlfab__distributor_spread(
          aggregator, server, frame,
          aggregator_scratch(aggregator) ? aggregator->scratch->spread : NULL);
      return 1;
    case MLFAB__MODEL:
      return mlfab__distributor_model(aggregator, server, frame);
    case MLFAB__PULL_FAIL:
      return mlfab__distributor_pull_fail(aggregator, server, frame);
    case MLFAB__SPREAD_FAIL:
      return mlfab__distributor_skip(aggregator, server, frame);
    default:
      return 0;
  }
}

MLFAB__INTERNAL void mlfab__aggregator_model(mlfab__aggregator *aggregator,
                                             const mlfab__layout *layout, int ghost) {
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *a = &aggregator->accumulators[i];
    if (a->state == MLFAB__ACCUMULATOR_ADDING)
      aggregator_fail(aggregator, a, NULL, MLFAB_ERR_AGAIN);
    if (a->state == MLFAB__ACCUMULATOR_HANDING)
      mlfab__distributor_fail(aggregator, a, MLFAB_ERR_AGAIN);
    aggregator_free_rings(aggregator, a);
  }
  uint64_t slice = 0;
  aggregator->shard_bytes = aggregator->packet_bytes = 0;
  for (uint32_t s = 0; s < aggregator->servers; s++) {
    aggregator->shard_bytes =
        mlfab__max(aggregator->shard_bytes, mlfab__layout_shard_bytes(layout, s));
  }
  for (uint32_t i = 0; i < layout->nslices; i++) slice = mlfab__max(slice, layout->slices[i].bytes);
  for (uint32_t i = 0; i < layout->ntensors; i++) {
    int dtype = (int)layout->tensors[i].dtype;
    uint64_t elements = mlfab__min(slice / mlfab__dtype_bytes(dtype), MLFAB__PACKET_ELEMENTS);
    aggregator->packet_bytes =
        mlfab__max(aggregator->packet_bytes, mlfab__packet_bound((uint32_t)elements, dtype));
  }
  aggregator->layout = layout;
  aggregator->ghost = ghost;
  aggregator->stage_bytes =
      (mlfab__min(aggregator->shard_bytes, MLFAB__AGGREGATOR_STAGE) + 63) / 64 * 64;
  /* One slice larger than a shard: a slice that begins again has room while its old bytes are lent. */
  aggregator->data_bytes = ghost ? 0 : aggregator->shard_bytes + slice;
}

/* --- links --- */

MLFAB__INTERNAL void mlfab__aggregator_server_lost(mlfab__aggregator *aggregator, uint32_t server) {
  mlfab__aggregator_all_returned(aggregator, 1, server);
  aggregator->numbers[server].last = 0;
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *a = &aggregator->accumulators[i];
    if (a->state == MLFAB__ACCUMULATOR_FREE || a->server != server) continue;
    a->state = MLFAB__ACCUMULATOR_FREE;
    a->outstanding = 0;
  }
  aggregator_pump(aggregator);
}

MLFAB__INTERNAL void mlfab__aggregator_met(mlfab__aggregator *aggregator, uint32_t member,
                                           uint32_t incarnation, uint64_t now_ns) {
  if (aggregator->connected[member]) mlfab__aggregator_lost(aggregator, member, now_ns);
  aggregator->now_ns = now_ns;
  aggregator->connected[member] = 1;
  aggregator->incarnations[member] = incarnation;
  /* A newer process has none of the former process's updates and requests. */
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *group = &aggregator->accumulators[i];
    for (uint32_t k = group->head; k < group->naddends; k++) {
      const mlfab__addend *addend = &group->addends[k];
      if (group->state == MLFAB__ACCUMULATOR_ADDING && addend->worker == member &&
          addend->incarnation < incarnation && addend->received < aggregator_total(group, addend))
        aggregator_fail(aggregator, group, addend, MLFAB_ERR_PEER_DEAD);
    }
  }
  mlfab__distributor_met(aggregator);
  aggregator_pump(aggregator);
}

MLFAB__INTERNAL void mlfab__aggregator_lost(mlfab__aggregator *aggregator, uint32_t member,
                                            uint64_t now_ns) {
  aggregator->now_ns = now_ns;
  aggregator->connected[member] = 0;
  mlfab__aggregator_all_returned(aggregator, 0, member);
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *group = &aggregator->accumulators[i];
    for (uint32_t k = group->head; k < group->naddends; k++) {
      mlfab__addend *addend = &group->addends[k];
      if (group->state != MLFAB__ACCUMULATOR_ADDING || addend->worker != member ||
          addend->received == aggregator_total(group, addend))
        continue;
      addend->since_ns = now_ns;
      if (addend->granted > 0) aggregator_fail(aggregator, group, addend, MLFAB_ERR_PEER_DEAD);
    }
  }
  mlfab__distributor_lost(aggregator, member);
  aggregator_pump(aggregator);
}

/* --- frames to go --- */

MLFAB__INTERNAL int mlfab__aggregator_next_up(mlfab__aggregator *aggregator, uint32_t server,
                                              mlfab__frame_out *frame) {
  mlfab__accumulator *best = NULL;
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *group = &aggregator->accumulators[i];
    if (group->state == MLFAB__ACCUMULATOR_ADDING && group->server == server &&
        (!best || group->age < best->age) && aggregator_forwardable(aggregator, group) > 0 &&
        mlfab__aggregator_lends(group, 1, server))
      best = group;
  }
  if (!best) return 0;
  mlfab__forward forward = {best->number, best->sent, aggregator_length(best)};
  frame->type = MLFAB__FORWARD;
  frame->bulk_bytes = aggregator_forwardable(aggregator, best);
  frame->meta_bytes = mlfab__encode_forward(frame->meta, &forward);
  mlfab__aggregator_offer(aggregator, best, 1, server, best->sent, frame);
  if (best->packed) frame->bulk = best->stream + best->sent;
  return 1;
}

MLFAB__INTERNAL void mlfab__aggregator_taken_up(mlfab__aggregator *aggregator, uint32_t server,
                                                const mlfab__frame_out *frame) {
  mlfab__accumulator *group = &aggregator->accumulators[frame->slot];
  group->sent += frame->bulk_bytes;
  mlfab__aggregator_lend(aggregator, 1, server, 0, group->sent, frame);
  if (group->sent < aggregator_length(group)) return;
  group->state = MLFAB__ACCUMULATOR_SENT;
  aggregator->stats->members_added += group->naddends;
}

MLFAB__INTERNAL void mlfab__aggregator_sent(mlfab__aggregator *aggregator, uint64_t token) {
  uint64_t index = token >> 40, slot = token >> 32 & 0xff;
  if (index >= aggregator->naccumulators || slot >= MLFAB__AGGREGATOR_LOANS) return;
  mlfab__accumulator *accumulator = &aggregator->accumulators[index];
  mlfab__loan loan = accumulator->loans[slot];
  if (loan.serial == 0 || loan.serial != (uint32_t)token) return;
  accumulator->loans[slot].serial = 0;
  accumulator->lent--;
  if (accumulator->top == 0) accumulator->since_ns = aggregator->now_ns;
  if (loan.up) {
    aggregator->up.ready(aggregator->up.self, loan.peer);
  } else if (accumulator->state == MLFAB__ACCUMULATOR_HANDING && loan.age == accumulator->age) {
    mlfab__distributor_returned(aggregator, accumulator, loan.recipient);
  }
  if (accumulator->lent == 0) aggregator_pump(aggregator);
}

/* --- time --- */

/* Is this member awaited? */
static int aggregator_awaits(const mlfab__aggregator *aggregator, const mlfab__accumulator *group,
                             uint32_t k) {
  const mlfab__addend *addend = &group->addends[k];
  int absent = addend->granted == 0 && k == group->head &&
               !mlfab__aggregator_stands(aggregator, addend->worker, addend->incarnation);
  return absent || aggregator_owed(aggregator, group, addend) > 0;
}

/* Names an awaited member with a silent link. */
static void aggregator_look(mlfab__aggregator *aggregator, mlfab__accumulator *group) {
  uint64_t beat = aggregator->config->heartbeat_ns, now_ns = aggregator->now_ns;
  const mlfab__port *down = &aggregator->down;
  for (uint32_t k = group->head; k < group->naddends && (k <= group->head || k < group->top); k++) {
    mlfab__addend *addend = &group->addends[k];
    if (!aggregator_awaits(aggregator, group, k) ||
        !mlfab__port_stalled(down, addend->worker, 0, addend->since_ns, now_ns, 3 * beat,
                             aggregator->config->silent_death_ns))
      continue;
    aggregator->stats->transfers_revoked++;
    aggregator_fail(aggregator, group, addend, MLFAB_ERR_PEER_DEAD);
    return;
  }
  /* The bulks of the last use do not return: their link counts as dead. */
  if (group->top == 0 && group->lent > 0 &&
      now_ns - group->since_ns >= MLFAB__PORT_STANDS_BEATS * beat)
    aggregator_fail(aggregator, group, NULL, MLFAB_ERR_AGAIN);
}

/* Tells a server that waits for the sum, once a heartbeat, that bytes of its members arrive: an empty
 * FORWARD. */
static void aggregator_tell(mlfab__aggregator *aggregator, mlfab__accumulator *group) {
  uint64_t beat = aggregator->config->heartbeat_ns;
  if (group->released <= group->sent || group->came_ns <= group->told_ns ||
      aggregator->now_ns - group->told_ns < beat)
    return;
  mlfab__forward forward = {group->number, group->sent, aggregator_length(group)};
  group->told_ns = aggregator->now_ns;
  MLFAB__POST(&aggregator->up, group->server, MLFAB__FORWARD, forward, &forward);
}

MLFAB__INTERNAL void mlfab__aggregator_tick(mlfab__aggregator *aggregator, uint64_t now_ns) {
  aggregator->now_ns = now_ns;
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *accumulator = &aggregator->accumulators[i];
    if (accumulator->state == MLFAB__ACCUMULATOR_ADDING &&
        mlfab__sum_encode(aggregator, accumulator))
      aggregator->up.ready(aggregator->up.self, accumulator->server);
    if (accumulator->state == MLFAB__ACCUMULATOR_ADDING) aggregator_tell(aggregator, accumulator);
    if (accumulator->state == MLFAB__ACCUMULATOR_ADDING) aggregator_look(aggregator, accumulator);
    if (accumulator->state == MLFAB__ACCUMULATOR_HANDING)
      mlfab__distributor_tick(aggregator, accumulator);
  }
  aggregator_pump(aggregator);
}

MLFAB__INTERNAL uint64_t mlfab__aggregator_deadline(const mlfab__aggregator *aggregator) {
  uint64_t deadline = MLFAB__NEVER, beat = aggregator->config->heartbeat_ns;
  uint32_t k;
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    const mlfab__accumulator *a = &aggregator->accumulators[i];
    if (a->state == MLFAB__ACCUMULATOR_HANDING)
      deadline = mlfab__min(deadline, mlfab__distributor_deadline(aggregator, a));
    if (a->state != MLFAB__ACCUMULATOR_ADDING) continue;
    if (a->packed && a->head == a->naddends && !a->encoded) return 0;
    for (k = a->head; k < a->naddends && (k <= a->head || k < a->top); k++) {
      if (!aggregator_awaits(aggregator, a, k)) continue;
      uint64_t at_ns = mlfab__port_stalls_at(a->addends[k].since_ns, aggregator->now_ns, 3 * beat,
                                             aggregator->config->silent_death_ns);
      deadline = mlfab__min(deadline, at_ns);
    }
    if (a->top == 0 && a->lent > 0)
      deadline = mlfab__min(deadline, mlfab__add_sat(a->since_ns, MLFAB__PORT_STANDS_BEATS * beat));
  }
  /* A member waits for capacity of the in-link. */
  if (aggregator_next(aggregator, &k) && !aggregator_draws_near(aggregator))
    deadline = mlfab__min(deadline, mlfab__meter_due(&aggregator->meter));
  return deadline;
}

MLFAB__INTERNAL void mlfab__aggregator_awake(mlfab__aggregator *aggregator, uint64_t late_ns,
                                             uint64_t now_ns) {
  for (uint32_t i = 0; i < aggregator->naccumulators; i++) {
    mlfab__accumulator *a = &aggregator->accumulators[i];
    mlfab__later(&a->since_ns, late_ns, now_ns);
    for (uint32_t k = 0; a->state == MLFAB__ACCUMULATOR_ADDING && k < a->naddends; k++)
      mlfab__later(&a->addends[k].since_ns, late_ns, now_ns);
    for (uint32_t k = 0; a->state == MLFAB__ACCUMULATOR_HANDING && k < a->nrecipients; k++)
      mlfab__later(&a->recipients[k].since_ns, late_ns, now_ns);
  }
}
