/* trace.c - a recorder of the frames on a node's links. See trace.h. */
#include "trace.h"

#include "../wire/codec.h"

/* --- the ring --- */

static int trace_put(mlfab__trace *t, const mlfab__trace_record *record) {
  /* The last place is reserved for LOST. */
  if (t->count + 1 >= MLFAB__TRACE_RECORDS) {
    t->lost++;
    if (record->kind == MLFAB__TRACE_RUN) t->lost_bytes += record->bytes;
    return 0;
  }
  t->ring[(t->begin + t->count++) % MLFAB__TRACE_RECORDS] = *record;
  return 1;
}

/* --- lanes --- */

/* The lane's entry; NULL: out of memory. */
static mlfab__trace_lane *trace_lane(mlfab__trace *t, uint32_t lane, uint64_t now_ns) {
  uint32_t place;
  if (!mlfab__map_get(&t->places, (uint64_t)lane + 1, &place)) {
    mlfab__trace_lane *lanes =
        mlfab__grow(t->env, t->lanes, &t->lanes_room, (uint64_t)t->nlanes + 1, sizeof *t->lanes);
    if (!lanes) return NULL;
    t->lanes = lanes;
    if (mlfab__map_put(t->env, &t->places, (uint64_t)lane + 1, t->nlanes)) return NULL;
    place = t->nlanes++;
    memset(&lanes[place], 0, sizeof *lanes);
  }
  mlfab__trace_lane *found = &t->lanes[place];
  const mlfab__trace_record name = {.at_ns = now_ns, .lane = lane, .kind = MLFAB__TRACE_LANE};
  if (!found->named) found->named = trace_put(t, &name);
  return found;
}

static void trace_end_run(mlfab__trace *t, mlfab__trace_lane *lane) {
  if (lane->frames == 0) return;
  lane->run.more = lane->frames;
  lane->last_ns = lane->run.end_ns;
  lane->frames = 0;
  trace_put(t, &lane->run);
}

/* --- transfers --- */

/* A number of 32 or 64 bits at this place of a meta; 0 if the meta is too short. */
static uint64_t trace_u64(const mlfab__tap_frame *f, uint32_t at) {
  return f->meta_bytes >= at + 8 ? wire_get64(f->meta + at) : 0;
}

static uint32_t trace_u32(const mlfab__tap_frame *f, uint32_t at) {
  return f->meta_bytes >= at + 4 ? wire_get32(f->meta + at) : 0;
}

/* The part of the key that stands for sender and receiver: both ends compute the same. */
static uint64_t trace_ends(const mlfab__tap_frame *f, uint32_t rank, uint32_t server) {
  int own_is_server = f->kind == MLFAB__LINK_WORKER || f->kind == MLFAB__LINK_RESHARD ||
                      f->kind == MLFAB__LINK_RESHARD_IN;
  int peer_is_server = f->kind == MLFAB__LINK_SERVER || f->kind == MLFAB__LINK_RESHARD ||
                       f->kind == MLFAB__LINK_RESHARD_IN;
  uint64_t own = (uint64_t)own_is_server << 32 | (own_is_server ? server : rank);
  uint64_t peer = (uint64_t)peer_is_server << 32 | f->peer;
  uint64_t from = f->out ? own : peer, to = f->out ? peer : own;
  return mlfab__mix(mlfab__mix(from + 1) ^ (to << 1)) + f->incarnation;
}

MLFAB__INTERNAL void mlfab__trace_classify(const mlfab__tap_frame *f, uint32_t rank,
                                           uint32_t server, mlfab__trace_transfer *transfer) {
  uint64_t extra = 0; /* other fields that tell the transfer apart */
  *transfer = (mlfab__trace_transfer){.what = MLFAB__TRACE_OTHER};
  switch (f->type) {
    case MLFAB__PUSH: /* its bulk is the beginning of the update */
      transfer->what = MLFAB__TRACE_PUSH;
      transfer->number = trace_u64(f, 0);
      transfer->arrow = 1;
      extra = trace_u32(f, 12); /* generation */
      break;
    case MLFAB__CHUNK:
      transfer->what = MLFAB__TRACE_PUSH;
      transfer->number = trace_u64(f, 0);
      transfer->arrow = trace_u64(f, 8) == 0;
      extra = trace_u32(f, 16);
      break;
    case MLFAB__MODEL:
      transfer->what = MLFAB__TRACE_PULL;
      transfer->number = trace_u64(f, 0);
      transfer->arrow = (trace_u32(f, 44) & MLFAB__MODEL_LAST) != 0;
      break;
#if MLFAB_WITH_SCHED
    case MLFAB__HOP_MODEL:
      transfer->what = MLFAB__TRACE_PULL;
      transfer->number = trace_u64(f, 0);
      transfer->arrow = (trace_u32(f, 44) & MLFAB__MODEL_LAST) != 0;
      extra = (uint64_t)trace_u32(f, 52) << 32 | trace_u32(f, 56); /* server, attempt */
      break;
    case MLFAB__HOP_CHUNK:
      transfer->what = MLFAB__TRACE_GROUP;
      transfer->number = trace_u64(f, 8);
      transfer->arrow = trace_u64(f, 16) == 0;
      extra = trace_u64(f, 0) ^ (uint64_t)trace_u32(f, 32) << 48; /* group, server */
      break;
    case MLFAB__FORWARD:
      transfer->what = MLFAB__TRACE_SUM;
      transfer->number = trace_u64(f, 0);
      transfer->arrow = trace_u64(f, 8) == 0;
      break;
#endif
#if MLFAB_WITH_COLL
    case MLFAB__COLL:
      transfer->what = MLFAB__TRACE_COLL;
      transfer->number = trace_u64(f, 8);
      transfer->arrow = trace_u64(f, 40) == 0; /* offset */
      /* epoch, channel, tag */
      extra = mlfab__mix(trace_u64(f, 0)) ^ trace_u32(f, 16);
      break;
#endif
#if MLFAB_WITH_RESHARD
    case MLFAB__RESHARD_SERVER:
      transfer->what = MLFAB__TRACE_SLICE;
      transfer->number = trace_u32(f, 4);
      transfer->arrow = trace_u64(f, 12) == 0;
      extra = (uint64_t)trace_u32(f, 0) << 32 | trace_u32(f, 8); /* attempt, kind */
      break;
#endif
    default:
      break;
  }
  transfer->key = mlfab__mix(mlfab__mix(trace_ends(f, rank, server) ^ transfer->number) ^
                             mlfab__mix(extra + transfer->what));
}

static void trace_frame(void *self, const mlfab__tap_frame *f) {
  mlfab__trace *t = self;
  mlfab__trace_transfer transfer;
  if (f->bulk_bytes == 0) return;
  uint64_t now_ns = t->clock ? t->clock(t->user) : f->now_ns;
  mlfab__trace_classify(f, t->rank, t->server, &transfer);
  uint32_t number = mlfab__trace_lane_of(f->kind, f->out, f->peer);
  mlfab__trace_lane *lane = trace_lane(t, number, now_ns);
  if (!lane) {
    t->lost++;
    t->lost_bytes += f->bulk_bytes;
    return;
  }
  mlfab__trace_record *run = &lane->run;
  if (lane->frames > 0 && (run->key != transfer.key || run->what != transfer.what ||
                           now_ns > lane->seen_ns + MLFAB__TRACE_GAP_NS))
    trace_end_run(t, lane);
  if (lane->frames == 0) {
    uint64_t at = mlfab__max(now_ns, lane->last_ns);
    *run = (mlfab__trace_record){.at_ns = at,
                                 .end_ns = at,
                                 .key = transfer.key,
                                 .number = transfer.number,
                                 .lane = number,
                                 .kind = MLFAB__TRACE_RUN,
                                 .what = transfer.what};
  }
  lane->seen_ns = now_ns;
  lane->frames++;
  run->bytes += f->bulk_bytes;
  run->end_ns = mlfab__max(run->end_ns + 1, now_ns);
  if (!transfer.arrow) return;
  mlfab__trace_record arrow = *run;
  arrow.kind = f->out ? MLFAB__TRACE_FROM : MLFAB__TRACE_TO;
  arrow.at_ns = run->end_ns - 1; /* inside the run */
  trace_put(t, &arrow);
}

/* The node shows a frame. */
static void trace_show(const mlfab_node *node, const mlfab__link *link, int out, uint32_t sender,
                       const mlfab__frame_in *f) {
  const mlfab__tap_frame frame = {node->now_ns,  (uint8_t)out,  f->type,
                                  link->kind,    link->peer,    sender,
                                  f->meta_bytes, f->bulk_bytes, f->meta};
  node->tap->frame(node->tap->self, &frame);
}

static void trace_plan(void *self, const mlfab__tap_plan *plan) {
  mlfab__trace *t = self;
  uint32_t slot = 0;
  uint32_t first = mlfab__trace_lane_of(MLFAB__LINK_KINDS, 0, plan->worker);
  mlfab__trace_lane *lane = trace_lane(t, first, plan->start_ns);
  if (!lane) {
    t->lost++;
    return;
  }
  /* The first slot whose plans have ended: slices of a lane do not overlap. */
  while (slot + 1 < MLFAB__TRACE_SLOTS && lane->ends_ns[slot] > plan->start_ns) slot++;
  mlfab__trace_record record = {.at_ns = mlfab__max(plan->start_ns, lane->ends_ns[slot]),
                                .key = plan->serial,
                                .number = plan->id,
                                .bytes = plan->bytes,
                                .more = plan->delay,
                                .who = plan->aggregator,
                                .kind = plan->dropped ? MLFAB__TRACE_DROP : MLFAB__TRACE_PLAN,
                                .what = plan->is_pull ? MLFAB__TRACE_PULL : MLFAB__TRACE_PUSH};
  record.end_ns = mlfab__max(plan->end_ns, mlfab__add_sat(record.at_ns, 1));
  if (!plan->dropped) lane->ends_ns[slot] = record.end_ns;
  record.lane = mlfab__trace_lane_of(MLFAB__LINK_KINDS, slot, plan->worker);
  if (slot > 0 && !trace_lane(t, record.lane, plan->start_ns))
    t->lost++;
  else
    trace_put(t, &record);
}

/* --- open, take, close --- */

MLFAB__INTERNAL int mlfab__trace_open(mlfab__env *env, mlfab_node *node,
                                      uint64_t (*clock)(void *user), void *user,
                                      mlfab__trace **trace_p) {
  mlfab__trace *t = mlfab__alloc(env, sizeof *t);
  if (!t) return MLFAB_ERR_MEMORY;
  t->env = env;
  t->clock = clock;
  t->user = user;
  t->ring = mlfab__alloc_array(env, MLFAB__TRACE_RECORDS, sizeof *t->ring);
  *trace_p = t;
  if (!t->ring) {
    mlfab__trace_close(trace_p, NULL);
    return MLFAB_ERR_MEMORY;
  }
  t->rank = node->is_worker ? (uint32_t)node->config.rank : MLFAB__NO_NODE;
  t->server = node->server_number;
  t->tap = (mlfab__tap){t, trace_frame, trace_plan};
  node->tap = &t->tap;
  node->show = trace_show;
  return 0;
}

MLFAB__INTERNAL void mlfab__trace_close(mlfab__trace **trace_p, mlfab_node *node) {
  mlfab__trace *t = *trace_p;
  if (!t) return;
  if (node && node->tap == &t->tap) node->tap = NULL;
  mlfab__map_free(t->env, &t->places);
  mlfab__free(t->env, t->lanes, t->lanes_room * sizeof *t->lanes);
  mlfab__free(t->env, t->ring, MLFAB__TRACE_RECORDS * sizeof *t->ring);
  mlfab__free(t->env, t, sizeof *t);
  *trace_p = NULL;
}

MLFAB__INTERNAL uint32_t mlfab__trace_take(mlfab__trace *t, uint64_t now_ns,
                                           mlfab__trace_record *records, uint32_t most) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < t->nlanes; i++) {
    mlfab__trace_lane *lane = &t->lanes[i];
    if (now_ns == MLFAB__NEVER || now_ns > mlfab__add_sat(lane->seen_ns, MLFAB__TRACE_GAP_NS))
      trace_end_run(t, lane);
  }
  if (t->lost > 0 && t->count < MLFAB__TRACE_RECORDS) {
    const mlfab__trace_record last =
        t->ring[(t->begin + t->count + MLFAB__TRACE_RECORDS - 1) % MLFAB__TRACE_RECORDS];
    const mlfab__trace_record lost = {
        .at_ns = t->count ? last.end_ns : now_ns, .bytes = t->lost, .kind = MLFAB__TRACE_LOST};
    t->ring[(t->begin + t->count++) % MLFAB__TRACE_RECORDS] = lost;
    t->lost = 0;
  }
  for (; n < most && t->count > 0; n++) {
    records[n] = t->ring[t->begin];
    t->begin = (t->begin + 1) % MLFAB__TRACE_RECORDS;
    t->count--;
  }
  return n;
}
