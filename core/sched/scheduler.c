/* scheduler.c - the scheduler role: frames of servers, and when to plan. See scheduler.h.
 *
 * Frames only update state. The tick plans, so that announcements that arrive together are planned
 * together. */
#include "scheduler.h"

enum {
  SCHEDULER_AHEAD_NS = 150000000,
  SCHEDULER_MARGIN_NS = 1000000,
  /* Limit of a worker's open transfers at a server; equal to the server's own limits. */
  SCHEDULER_PUSHES = 64,
  SCHEDULER_PULLS = 8,
  SCHEDULER_ACCUMULATORS = 1 << 16,
  /* With more items than this, a pause follows each computation: this long for each item. */
  SCHEDULER_MANY = 1024,
  SCHEDULER_ITEM_NS = 50
};
/* 10 Gbit/s: assumed while no capacity is known. */
#define SCHEDULER_RATE 1.25e9

/* --- creation --- */

static void scheduler_free_batch(mlfab__scheduler *s) {
  mlfab__env *env = s->env;
  uint32_t n = MLFAB__BATCH_MAX, k = MLFAB__BATCH_AGGREGATORS;
  mlfab__free(env, s->batch, n * sizeof *s->batch);
  mlfab__free(env, s->candidates, n * sizeof *s->candidates);
  mlfab__free(env, s->bytes, (size_t)n * s->servers * sizeof *s->bytes);
  mlfab__free(env, s->planned, n * sizeof *s->planned);
  mlfab__free(env, s->deliveries, n * sizeof *s->deliveries);
  mlfab__free(env, s->entries, n * sizeof *s->entries);
  mlfab__free(env, s->meta, MLFAB_META_MAX);
  mlfab__free(env, s->batch_servers, s->servers * sizeof *s->batch_servers);
  mlfab__free(env, s->server_nodes, s->servers * sizeof *s->server_nodes);
  mlfab__free(env, s->aggregators, (size_t)k * s->servers * sizeof *s->aggregators);
  mlfab__free(env, s->aggregator_nodes, (size_t)k * s->servers * sizeof *s->aggregator_nodes);
  mlfab__free(env, s->nodes, n * sizeof *s->nodes);
  mlfab__free(env, s->draw, s->workers * sizeof *s->draw);
  mlfab__free(env, s->marks, s->hosts_room * sizeof *s->marks);
  mlfab__free(env, s->counted, s->servers * sizeof *s->counted);
  mlfab__free(env, s->sums, (size_t)k * s->servers * sizeof *s->sums);
  mlfab__free(env, s->ready, s->servers * sizeof *s->ready);
  mlfab__free(env, s->latest, s->servers * sizeof *s->latest);
  for (uint32_t kind = 0; kind < 2; kind++)
    mlfab__free(env, s->stories[kind].told, n * sizeof *s->stories[kind].told);
}

static int scheduler_alloc_batch(mlfab__scheduler *s) {
  mlfab__env *env = s->env;
  uint32_t n = MLFAB__BATCH_MAX, k = MLFAB__BATCH_AGGREGATORS;
  s->batch = mlfab__alloc_array(env, n, sizeof *s->batch);
  s->candidates = mlfab__alloc_array(env, n, sizeof *s->candidates);
  s->bytes = mlfab__alloc_array(env, (size_t)n * s->servers, sizeof *s->bytes);
  s->planned = mlfab__alloc_array(env, n, sizeof *s->planned);
  s->deliveries = mlfab__alloc_array(env, n, sizeof *s->deliveries);
  s->entries = mlfab__alloc_array(env, n, sizeof *s->entries);
  s->meta = mlfab__alloc(env, MLFAB_META_MAX);
  s->batch_servers = mlfab__alloc_array(env, s->servers, sizeof *s->batch_servers);
  s->server_nodes = mlfab__alloc_array(env, s->servers, sizeof *s->server_nodes);
  s->aggregators = mlfab__alloc_array(env, (size_t)k * s->servers, sizeof *s->aggregators);
  s->aggregator_nodes =
      mlfab__alloc_array(env, (size_t)k * s->servers, sizeof *s->aggregator_nodes);
  s->nodes = mlfab__alloc_array(env, n, sizeof *s->nodes);
  s->draw = mlfab__alloc_array(env, s->workers, sizeof *s->draw);
  s->marks = mlfab__alloc_array(env, s->hosts_room, sizeof *s->marks);
  s->counted = mlfab__alloc_array(env, s->servers, sizeof *s->counted);
  s->sums = mlfab__alloc_array(env, (size_t)k * s->servers, sizeof *s->sums);
  s->ready = mlfab__alloc_array(env, s->servers, sizeof *s->ready);
  s->latest = mlfab__alloc_array(env, s->servers, sizeof *s->latest);
  for (uint32_t kind = 0; kind < 2; kind++)
    s->stories[kind].told = mlfab__alloc_array(env, n, sizeof *s->stories[kind].told);
  int all = s->batch && s->candidates && s->bytes && s->planned && s->deliveries && s->entries;
  all = all && s->meta && s->batch_servers && s->server_nodes && s->aggregators;
  all = all && s->aggregator_nodes && s->nodes && s->draw && s->marks && s->counted && s->sums &&
        s->ready;
  all = all && s->latest;
  return all && s->stories[0].told && s->stories[1].told ? 0 : MLFAB_ERR_MEMORY;
}

/* Returns the key of a host; a node with an unknown host is a host of its own. Real keys are hashes, and differ. */
static uint64_t scheduler_key(uint64_t host, uint64_t node) { return host ? host : ~node; }

static int scheduler_alloc(mlfab__scheduler *s) {
  mlfab__env *env = s->env;
  s->served = mlfab__alloc_array(env, s->servers, sizeof *s->served);
  s->stations = mlfab__alloc_array(env, s->workers, sizeof *s->stations);
  s->alive = mlfab__alloc_array(env, (size_t)s->servers * s->workers, 1);
  s->hosts = mlfab__alloc_array(env, s->hosts_room, sizeof *s->hosts);
  int code = scheduler_alloc_batch(s);
  if (!code) code = mlfab__network_init(&s->network, env, s->hosts_room, 0);
  if (!s->served || !s->stations || !s->alive || !s->hosts) return MLFAB_ERR_MEMORY;
  for (uint32_t w = 0; w < s->workers; w++) {
    s->stations[w].first = MLFAB__NO_ITEM;
    s->stations[w].host = s->hosts_room - 1;
  }
  for (uint32_t i = 0; i < s->servers; i++) s->served[i].host = s->hosts_room - 1;
  s->hosts[s->hosts_room - 1] = (mlfab__plan_host){0, -1.0, -1.0};
  return code;
}

MLFAB__INTERNAL int mlfab__scheduler_create(mlfab__env *env, const mlfab_config *config,
                                            const mlfab__port *port, mlfab_stats *stats,
                                            mlfab__scheduler **scheduler_p) {
  mlfab__scheduler *s = mlfab__alloc(env, sizeof *s);
  if (!s) return MLFAB_ERR_MEMORY;
  s->env = env;
  s->port = *port;
  s->stats = stats;
  s->workers = config->workers;
  s->servers = config->servers;
  s->heartbeat_ns = config->heartbeat_ns;
  mlfab__rng_seed(&s->prng, mlfab__mix(config->seed ^ 0x7363686564756c65u));
  s->schedule.delay_bound = MLFAB_UNBOUNDED;
  s->alike_in = s->alike_out = SCHEDULER_RATE;
  s->hosts_room = 2 * (s->workers + s->servers) + 1;
  s->free_item = MLFAB__NO_ITEM;
  s->waiting = s->placed = (mlfab__list){MLFAB__NO_ITEM, MLFAB__NO_ITEM};
  s->due_ns = MLFAB__NEVER;
  mlfab__planner_init(&s->planner, env);
  int code = scheduler_alloc(s);
  if (code) {
    mlfab__scheduler_destroy(&s);
    return code;
  }
  *scheduler_p = s;
  return 0;
}

MLFAB__INTERNAL void mlfab__scheduler_destroy(mlfab__scheduler **scheduler_p) {
  mlfab__scheduler *s = *scheduler_p;
  if (!s) return;
  *scheduler_p = NULL;
  mlfab__env *env = s->env;
  scheduler_free_batch(s);
  mlfab__planner_free(&s->planner);
  mlfab__group_free(&s->grouper, env);
  if (s->network.env) mlfab__network_free(&s->network);
  mlfab__map_free(env, &s->host_map);
  mlfab__free(env, s->items, s->items_room * sizeof *s->items);
  mlfab__free(env, s->parts, s->parts_room * sizeof *s->parts);
  mlfab__free(env, s->served, s->servers * sizeof *s->served);
  mlfab__free(env, s->stations, s->workers * sizeof *s->stations);
  mlfab__free(env, s->alive, (size_t)s->servers * s->workers);
  mlfab__free(env, s->hosts, s->hosts_room * sizeof *s->hosts);
  mlfab__free(env, s, sizeof *s);
}

/* --- hosts --- */

/* Assumes the mean of the known capacities for each unknown capacity; cut links do not count. */
static void scheduler_alike(mlfab__scheduler *s) {
  double sum[2] = {0.0, 0.0};
  uint32_t n[2] = {0, 0};
  for (uint32_t i = 0; i < s->nhosts; i++) {
    const mlfab__plan_host *h = &s->hosts[i];
    if (h->in > 0.0) sum[0] += h->in, n[0]++;
    if (h->out > 0.0) sum[1] += h->out, n[1]++;
  }
  s->alike_in = n[0] > 0 ? sum[0] / n[0] : SCHEDULER_RATE;
  s->alike_out = n[1] > 0 ? sum[1] / n[1] : SCHEDULER_RATE;
}

/* Removes hosts without nodes, and compacts the others. */
static void scheduler_sweep_hosts(mlfab__scheduler *s) {
  uint64_t *moved = s->marks; /* by old index: the new index plus one */
  uint32_t last = s->hosts_room - 1, kept = 0;
  memset(moved, 0, s->hosts_room * sizeof *moved);
  for (uint32_t w = 0; w < s->workers; w++) moved[s->stations[w].host] = 1;
  for (uint32_t i = 0; i < s->servers; i++) moved[s->served[i].host] = 1;
  mlfab__map_free(s->env, &s->host_map);
  for (uint32_t i = 0; i < s->nhosts; i++) {
    if (!moved[i]) continue;
    s->hosts[kept] = s->hosts[i];
    int lost = mlfab__map_put(s->env, &s->host_map, s->hosts[kept].key, kept) != 0;
    moved[i] = lost ? last + 1u : ++kept;
  }
  moved[last] = last + 1u;
  for (uint32_t w = 0; w < s->workers; w++)
    s->stations[w].host = (uint32_t)moved[s->stations[w].host] - 1;
  for (uint32_t i = 0; i < s->servers; i++)
    s->served[i].host = (uint32_t)moved[s->served[i].host] - 1;
  s->nhosts = kept;
  memset(moved, 0, s->hosts_room * sizeof *moved);
}

/* Returns the index of a host; without memory, the shared index with an unknown capacity. */
static uint32_t scheduler_host(mlfab__scheduler *s, uint64_t key) {
  uint32_t i, last = s->hosts_room - 1;
  if (mlfab__map_get(&s->host_map, key, &i)) return i;
  if (s->nhosts == last) scheduler_sweep_hosts(s);
  if (s->nhosts == last || mlfab__map_put(s->env, &s->host_map, key, s->nhosts)) return last;
  s->hosts[s->nhosts] = (mlfab__plan_host){key, -1.0, -1.0};
  return s->nhosts++;
}

/* --- items --- */

/* Makes a waiting item with no parts yet; NO_ITEM: out of memory. */
static uint32_t scheduler_new(mlfab__scheduler *s, const mlfab__announce *a) {
  uint32_t i = s->free_item;
  if (i != MLFAB__NO_ITEM) {
    s->free_item = s->items[i].next;
  } else {
    uint64_t need = (uint64_t)s->items_used + 1;
    void *items = mlfab__grow(s->env, s->items, &s->items_room, need, sizeof *s->items);
    if (items) s->items = items;
    void *parts =
        mlfab__grow(s->env, s->parts, &s->parts_room, need * s->servers, sizeof *s->parts);
    if (parts) s->parts = parts;
    if (!items || !parts) return MLFAB__NO_ITEM;
    i = s->items_used++;
  }
  mlfab__station_state *station = &s->stations[a->worker];
  memset(mlfab__scheduler_part(s, i, 0), 0, s->servers * sizeof *s->parts);
  s->items[i] = (mlfab__item){.id = a->id,
                              .kind = a->kind,
                              .worker = a->worker,
                              .incarnation = a->incarnation,
                              .members = a->members,
                              .sibling = station->first};
  station->first = i;
  station->items++;
  mlfab__scheduler_append(s, &s->waiting, i);
  return i;
}

/* Removes a part, and the item with its last part. */
static void scheduler_forget(mlfab__scheduler *s, uint32_t i, uint32_t server) {
  mlfab__item *item = &s->items[i];
  mlfab__scheduler_part(s, i, server)->state = MLFAB__ITEM_NONE;
  for (uint32_t k = 0; k < s->servers; k++) {
    if (mlfab__scheduler_part(s, i, k)->state != MLFAB__ITEM_NONE) return;
  }
  mlfab__station_state *station = &s->stations[item->worker];
  uint32_t *link = &station->first;
  while (*link != i) link = &s->items[*link].sibling;
  *link = item->sibling;
  station->items--;
  mlfab__scheduler_unlink(s, item->placed ? &s->placed : &s->waiting, i);
  item->members = 0;
  item->next = s->free_item;
  s->free_item = i;
}

/* Removes all parts of a worker at a server. */
static void scheduler_forget_worker(mlfab__scheduler *s, uint32_t worker, uint32_t server) {
  uint32_t next;
  for (uint32_t i = s->stations[worker].first; i != MLFAB__NO_ITEM; i = next) {
    next = s->items[i].sibling;
    if (mlfab__scheduler_part(s, i, server)->state != MLFAB__ITEM_NONE)
      scheduler_forget(s, i, server);
  }
}

static void scheduler_forget_server(mlfab__scheduler *s, uint32_t server) {
  mlfab__served *served = &s->served[server];
  for (uint32_t w = 0; w < s->workers; w++) {
    scheduler_forget_worker(s, w, server);
    s->alive[(size_t)server * s->workers + w] = 0;
  }
  served->placed = served->estimate = served->confirmed = served->unsure = 0;
  memset(&served->in, 0, sizeof served->in);
  memset(&served->out, 0, sizeof served->out);
  s->dirty = 1;
}

/* --- servers --- */

MLFAB__INTERNAL void mlfab__scheduler_hello(mlfab__scheduler *scheduler, uint32_t server,
                                            uint64_t now_ns) {
  scheduler->now_ns = now_ns;
  if (server >= scheduler->servers) return;
  scheduler_forget_server(scheduler, server);
  scheduler->served[server].live = scheduler->served[server].seen = 1;
}

MLFAB__INTERNAL void mlfab__scheduler_lost(mlfab__scheduler *scheduler, uint32_t server,
                                           uint64_t now_ns) {
  scheduler->now_ns = now_ns;
  if (server >= scheduler->servers) return;
  scheduler_forget_server(scheduler, server);
  scheduler->served[server].live = 0;
}

/* --- frames --- */

static void scheduler_drop(mlfab__scheduler *s, uint32_t server, const char *text) {
  s->port.drop(s->port.self, server, MLFAB_ERR_FRAME, text);
}

/* Server 0's schedule applies to the whole fabric, whatever another server was opened with or has missed. */
static void scheduler_pass_on(mlfab__scheduler *s, uint32_t server) {
  if (server == 0 || !s->told || !s->served[server].live) return;
  MLFAB__POST(&s->port, server, MLFAB__SCHEDULE, schedule, &s->schedule);
}

static void scheduler_schedule(mlfab__scheduler *s, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__schedule m;
  if (mlfab__port_refuse(
          &s->port, server, frame,
          mlfab__decode_schedule(frame->meta, frame->meta_bytes, &m) || m.delay_bound == 0))
    return;
  uint64_t node = (uint64_t)s->workers + server;
  s->served[server].host = scheduler_host(s, scheduler_key(m.host, node));
  scheduler_pass_on(s, server);
  if (server != 0) return;
  s->schedule = m;
  s->told = 1;
  for (uint32_t k = 1; k < s->servers; k++) scheduler_pass_on(s, k);
}

static void scheduler_station(mlfab__scheduler *s, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__station m;
  if (mlfab__port_refuse(
          &s->port, server, frame,
          mlfab__decode_station(frame->meta, frame->meta_bytes, &m) || m.worker >= s->workers))
    return;
  mlfab__station_state *station = &s->stations[m.worker];
  if (m.incarnation < station->incarnation) return; /* other servers know a newer process */
  if (m.incarnation > station->incarnation) {
    for (uint32_t k = 0; k < s->servers; k++) s->alive[(size_t)k * s->workers + m.worker] = 0;
    scheduler_forget_worker(s, m.worker, server);
    station->incarnation = m.incarnation;
  }
  s->alive[(size_t)server * s->workers + m.worker] = m.alive != 0;
  if (!m.alive) {
    scheduler_forget_worker(s, m.worker, server);
    return;
  }
  station->accumulators = (uint32_t)mlfab__min(m.accumulators, SCHEDULER_ACCUMULATORS);
  station->host = scheduler_host(s, scheduler_key(m.host, m.worker));
}

static void scheduler_capacity(mlfab__scheduler *s, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__capacity m;
  if (mlfab__port_refuse(&s->port, server, frame,
                         mlfab__decode_capacity(frame->meta, frame->meta_bytes, &m) ||
                             !mlfab__finite(m.in) || !mlfab__finite(m.out)))
    return;
  if (m.host == 0) return; /* of an unknown host */
  uint32_t i = scheduler_host(s, m.host);
  if (i == s->hosts_room - 1) return;
  s->hosts[i].in = m.in;
  s->hosts[i].out = m.out;
  scheduler_alike(s);
  /* Items that were unreachable may be reachable now. */
  for (i = s->waiting.first; i != MLFAB__NO_ITEM; i = s->items[i].next) s->items[i].held_ns = 0;
}

/* Gives an item, for which memory is missing, the next place at this server, unplanned. */
static void scheduler_tell_plain(mlfab__scheduler *s, uint32_t server, const mlfab__announce *a) {
  mlfab__plan plan = {.serial = ++s->serial, .rate_in = -1.0, .rate_out = -1.0, .entries = 1};
  s->entries[0] = (mlfab__plan_entry){.id = a->id,
                                      .rate = -1.0,
                                      .kind = a->kind,
                                      .worker = a->worker,
                                      .aggregator = MLFAB__NO_NODE,
                                      .delay = a->lag};
  if (a->kind == MLFAB__TRANSFER_PUSH) s->served[server].estimate += a->members;
  s->port.post(s->port.self, server, MLFAB__PLAN, s->meta,
               mlfab__encode_plan(s->meta, &plan, s->entries));
}

/* Returns the waiting item of which this announces a part, or NO_ITEM. If the part was placed, the server has forgotten
 * it, and so does this function. *elsewhere_p: its parts that other servers have placed. */
static uint32_t scheduler_announced(mlfab__scheduler *s, uint32_t server, const mlfab__announce *a,
                                    uint32_t *elsewhere_p) {
  uint32_t next, found = MLFAB__NO_ITEM;
  *elsewhere_p = 0;
  for (uint32_t i = s->stations[a->worker].first; i != MLFAB__NO_ITEM; i = next) {
    const mlfab__item *item = &s->items[i];
    next = item->sibling;
    if (item->id != a->id || item->kind != a->kind || item->incarnation != a->incarnation) continue;
    int here = mlfab__scheduler_part(s, i, server)->state != MLFAB__ITEM_NONE;
    if (a->kind == MLFAB__TRANSFER_PULL && !here) continue; /* of another server */
    if (!item->placed) {
      found = i;
      continue;
    }
    for (uint32_t k = 0; k < s->servers; k++) {
      if (k != server && mlfab__scheduler_part(s, i, k)->state == MLFAB__ITEM_PLACED)
        ++*elsewhere_p;
    }
    if (here) scheduler_forget(s, i, server);
  }
  return found;
}

static void scheduler_announce(mlfab__scheduler *s, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__announce a;
  if (mlfab__port_refuse(&s->port, server, frame,
                         mlfab__decode_announce(frame->meta, frame->meta_bytes, &a) ||
                             a.worker >= s->workers || a.kind > MLFAB__TRANSFER_PULL ||
                             a.members == 0 || a.parts == 0 || a.parts > s->servers))
    return;
  const mlfab__station_state *station = &s->stations[a.worker];
  if (!s->alive[(size_t)server * s->workers + a.worker] || a.incarnation != station->incarnation) {
    mlfab__log(s->env, MLFAB_LOG_DEBUG,
               "scheduler: server %u announces for worker %u, incarnation %u, which is not alive",
               server, a.worker, a.incarnation);
    return;
  }
  uint32_t elsewhere, i = scheduler_announced(s, server, &a, &elsewhere);
  if (i == MLFAB__NO_ITEM) {
    if (station->items >= (SCHEDULER_PUSHES + SCHEDULER_PULLS) * s->servers) {
      scheduler_drop(s, server, "more ANNOUNCEs of a worker than it may have under way");
      return;
    }
    i = scheduler_new(s, &a);
    if (i == MLFAB__NO_ITEM) {
      scheduler_tell_plain(s, server, &a);
      return;
    }
    if (a.kind == MLFAB__TRANSFER_PULL) a.parts = 1;
    s->items[i].parts = a.parts > elsewhere ? a.parts - elsewhere : 1;
  }
  s->items[i].heard_ns = s->now_ns;
  *mlfab__scheduler_part(s, i, server) = (mlfab__item_part){.state = MLFAB__ITEM_WAITING,
                                                            .aggregator = MLFAB__NO_NODE,
                                                            .bytes = a.bytes,
                                                            .shape = a.shape,
                                                            .placed = a.placed,
                                                            .lag = a.lag};
}

static void scheduler_report(mlfab__scheduler *s, uint32_t server, const mlfab__frame_in *frame) {
  mlfab__report m;
  if (mlfab__port_refuse(&s->port, server, frame,
                         mlfab__decode_report(frame->meta, frame->meta_bytes, &m) ||
                             (m.worker >= s->workers && m.worker != MLFAB__NO_NODE)))
    return;
  mlfab__served *served = &s->served[server];
  served->placed = m.placed;
  served->in.reported = m.backlog;
  served->out.reported = m.out_backlog;
  served->in.fresh = served->out.fresh = 1;
  if (m.worker == MLFAB__NO_NODE) return;
  /* A placed item is over before the same item is announced again. */
  uint32_t found = MLFAB__NO_ITEM;
  for (uint32_t i = s->stations[m.worker].first; i != MLFAB__NO_ITEM; i = s->items[i].sibling) {
    const mlfab__item *item = &s->items[i];
    if (item->id != m.id || item->kind != m.kind) continue;
    if (mlfab__scheduler_part(s, i, server)->state == MLFAB__ITEM_NONE) continue;
    if (found == MLFAB__NO_ITEM || item->placed) found = i;
  }
  if (found == MLFAB__NO_ITEM) return; /* granted first come, first served */
  served->confirmed = mlfab__max(served->confirmed, s->items[found].serial);
  scheduler_forget(s, found, server);
}

MLFAB__INTERNAL void mlfab__scheduler_frame(mlfab__scheduler *scheduler, uint32_t server,
                                            const mlfab__frame_in *frame, uint64_t now_ns) {
  scheduler->now_ns = now_ns;
  if (server >= scheduler->servers || !scheduler->served[server].live) return;
  scheduler->dirty = 1;
  switch (frame->type) {
    case MLFAB__SCHEDULE:
      scheduler_schedule(scheduler, server, frame);
      break;
    case MLFAB__STATION:
      scheduler_station(scheduler, server, frame);
      break;
    case MLFAB__CAPACITY:
      scheduler_capacity(scheduler, server, frame);
      break;
    case MLFAB__ANNOUNCE:
      scheduler_announce(scheduler, server, frame);
      break;
    case MLFAB__REPORT:
      scheduler_report(scheduler, server, frame);
      break;
    case MLFAB__TREE_ASK:
      mlfab__scheduler_arrange(scheduler, server, frame);
      break;
    default:
      scheduler_drop(scheduler, server, "a frame that no scheduler gets");
      break;
  }
}

/* --- bookings --- */

/* Sums the predicted bytes and members of all placed items. */
static void scheduler_reckon_placed(mlfab__scheduler *s) {
  for (uint32_t k = 0; k < s->servers; k++) {
    mlfab__served *v = &s->served[k];
    v->in.known = v->in.unsure = v->out.known = v->out.unsure = 0.0;
    v->unsure = 0;
  }
  memset(s->counted, 0, s->servers * sizeof *s->counted);
  for (uint32_t i = s->placed.first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    const mlfab__item *item = &s->items[i];
    for (uint32_t k = 0; k < s->servers; k++) {
      mlfab__served *served = &s->served[k];
      const mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
      mlfab__booking *b = item->kind == MLFAB__TRANSFER_PUSH ? &served->in : &served->out;
      if (part->state != MLFAB__ITEM_PLACED || item->dropped) continue;
      int unsure = item->serial > served->confirmed;
      if (unsure && item->kind == MLFAB__TRANSFER_PUSH) served->unsure += item->members;
      const mlfab__leg *leg = mlfab__scheduler_crossing(s, i, k);
      double left = leg ? mlfab__scheduler_left(leg, s->now_ns) : 0.0;
      b->known += left;
      if (unsure) b->unsure += left;
    }
  }
}

/* Combines the prediction with the last report. Between reports the excess, which comes first, drains at
 * the link's rate, and nothing drains faster. A report may be older than the newest plans. */
static void scheduler_reckon_booking(mlfab__booking *b, double rate, double seconds) {
  double could = rate * seconds, left;
  if (b->fresh) {
    double reported = (double)b->reported;
    double least = reported > b->known ? reported : b->known;
    left = reported + b->unsure < least ? reported + b->unsure : least;
    b->fresh = 0;
  } else {
    double excess = b->excess > could ? b->excess - could : b->excess > 0.0 ? 0.0 : b->excess;
    left = b->known + excess;
    if (left < b->left - could) left = b->left - could;
  }
  b->left = left > 0.0 ? left : 0.0;
  b->excess = b->left - b->known;
}

static uint64_t scheduler_until(const mlfab__scheduler *s, uint32_t host, int out) {
  double left = 0.0, rate = mlfab__scheduler_rate(s, host, out);
  for (uint32_t k = 0; k < s->servers; k++) {
    const mlfab__served *v = &s->served[k];
    if (v->live && v->host == host) left += out ? v->out.left : v->in.left;
  }
  if (left <= 0.0) return s->now_ns;
  return rate > 0.0 ? mlfab__add_sat(s->now_ns, mlfab__scheduler_ns(left / rate)) : MLFAB__NEVER;
}

/* --- when to plan --- */

/* Returns how far ahead a link may be booked when the next batch is planned: as configured, or by default the time that
 * this transfer takes on it, plus 6 %. With less, the link would be idle until the plan arrives. With more, batches are
 * smaller, and there is less to aggregate or distribute. */
static uint64_t scheduler_ahead(const mlfab__scheduler *s, uint64_t bytes, double rate) {
  if (s->schedule.plan_ahead_ns) return s->schedule.plan_ahead_ns;
  if (!(rate > 0.0)) return SCHEDULER_AHEAD_NS;
  return mlfab__scheduler_ns(1.06 * (double)bytes / rate) + SCHEDULER_MARGIN_NS;
}

/* Returns the first time at which it is booked for less than that. */
static uint64_t scheduler_free_at(uint64_t until_ns, uint64_t ahead) {
  if (until_ns == MLFAB__NEVER) return MLFAB__NEVER;
  return until_ns < ahead ? 0 : until_ns - ahead + 1;
}

/* Returns 0 if every server with a part has announced it or has lost its link; else the end of the wait for it. */
static uint64_t scheduler_complete_at(const mlfab__scheduler *s, uint32_t i) {
  uint32_t n = 0;
  for (uint32_t k = 0; k < s->servers; k++) {
    int told = mlfab__scheduler_part(s, i, k)->state != MLFAB__ITEM_NONE;
    if (told || (s->served[k].seen && !s->served[k].live)) n++;
  }
  if (n >= s->items[i].parts) return 0;
  return mlfab__add_sat(s->items[i].heard_ns, 3 * s->heartbeat_ns);
}

static int scheduler_oldest(const mlfab__scheduler *s, uint32_t i) {
  const mlfab__item *item = &s->items[i];
  uint32_t k = s->stations[item->worker].first;
  for (; k != MLFAB__NO_ITEM; k = s->items[k].sibling) {
    const mlfab__item *other = &s->items[k];
    if (other->kind == item->kind && !other->placed && other->id < item->id) return 0;
  }
  return 1;
}

static uint64_t scheduler_item_due(const mlfab__scheduler *s, uint32_t i) {
  const mlfab__item *item = &s->items[i];
  int pull = item->kind == MLFAB__TRANSFER_PULL;
  if (!pull && !scheduler_oldest(s, i)) return MLFAB__NEVER;
  uint64_t due = mlfab__max(item->held_ns, scheduler_complete_at(s, i));
  uint64_t interval = s->schedule.interval_ns;
  if (interval && !pull && s->planned_before)
    due = mlfab__max(due, mlfab__add_sat(s->last_ns, interval));
  for (uint32_t k = 0; k < s->servers; k++) {
    const mlfab__served *served = &s->served[k];
    if (mlfab__scheduler_part(s, i, k)->state == MLFAB__ITEM_NONE) continue;
    if (interval && pull && served->pulled)
      due = mlfab__max(due, mlfab__add_sat(served->last_pull_ns, interval));
    if (interval) continue;
    uint64_t ahead = scheduler_ahead(s, mlfab__scheduler_part(s, i, k)->bytes,
                                     mlfab__scheduler_rate(s, served->host, pull));
    due = mlfab__max(due,
                     scheduler_free_at(pull ? served->out_until_ns : served->in_until_ns, ahead));
  }
  return due;
}

static void scheduler_reckon(mlfab__scheduler *s) {
  double seconds = 1e-9 * (double)(s->now_ns - mlfab__min(s->reckoned_ns, s->now_ns));
  scheduler_reckon_placed(s);
  for (uint32_t k = 0; k < s->servers; k++) {
    mlfab__served *v = &s->served[k];
    scheduler_reckon_booking(&v->in, mlfab__scheduler_rate(s, v->host, 0), seconds);
    scheduler_reckon_booking(&v->out, mlfab__scheduler_rate(s, v->host, 1), seconds);
    /* Members in plans that are still under way count as placed. */
    v->estimate = mlfab__max(v->estimate, v->placed);
    v->estimate = mlfab__min(v->estimate, mlfab__add_sat(v->placed, v->unsure));
  }
  s->reckoned_ns = s->now_ns;
  for (uint32_t k = 0; k < s->servers; k++) {
    s->served[k].in_until_ns = scheduler_until(s, s->served[k].host, 0);
    s->served[k].out_until_ns = scheduler_until(s, s->served[k].host, 1);
  }
  uint64_t due = MLFAB__NEVER;
  for (uint32_t i = s->waiting.first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    s->items[i].due_ns = scheduler_item_due(s, i);
    due = mlfab__min(due, s->items[i].due_ns);
  }
  s->due_ns = due;
  s->dirty = 0;
}

/* Is a waiting item of this kind due; for a pull, an item with a part at `server`? */
static int scheduler_is_due(const mlfab__scheduler *s, uint32_t kind, uint32_t server) {
  if (s->due_ns > s->now_ns) return 0;
  for (uint32_t i = s->waiting.first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    if (s->items[i].kind != kind || s->items[i].due_ns > s->now_ns) continue;
    if (kind == MLFAB__TRANSFER_PUSH) return 1;
    if (mlfab__scheduler_part(s, i, server)->state == MLFAB__ITEM_WAITING) return 1;
  }
  return 0;
}

/* Sends an empty plan to servers with waiting items that had no plan for a heartbeat. */
static void scheduler_reassure(mlfab__scheduler *s) {
  if (s->now_ns < s->reassure_ns || s->waiting.first == MLFAB__NO_ITEM) return;
  s->reassure_ns = s->now_ns + s->heartbeat_ns;
  for (uint32_t k = 0; k < s->servers; k++) {
    mlfab__served *served = &s->served[k];
    uint32_t i = s->waiting.first;
    if (!served->live || s->now_ns - served->told_ns < s->heartbeat_ns) continue;
    while (i != MLFAB__NO_ITEM && mlfab__scheduler_part(s, i, k)->state != MLFAB__ITEM_WAITING)
      i = s->items[i].next;
    if (i == MLFAB__NO_ITEM) continue;
    mlfab__plan nothing = {.serial = s->serial, .rate_in = -1.0, .rate_out = -1.0};
    served->told_ns = s->now_ns;
    s->port.post(s->port.self, k, MLFAB__PLAN, s->meta,
                 mlfab__encode_plan(s->meta, &nothing, s->entries));
  }
}

/* Returns when to compute due times again. With many items, changes are collected, so that this takes a bounded share
 * of the time. */
static uint64_t scheduler_look_at(const mlfab__scheduler *s) {
  uint64_t pause_ns = s->listed > SCHEDULER_MANY ? s->listed * SCHEDULER_ITEM_NS : 0;
  if (!s->dirty) return s->due_ns;
  return mlfab__min(s->due_ns, mlfab__max(s->now_ns, mlfab__add_sat(s->reckoned_ns, pause_ns)));
}

static void scheduler_look(mlfab__scheduler *s) {
  uint64_t now_ns = s->now_ns;
  if (now_ns < scheduler_look_at(s)) return;
  int timer = !s->dirty;
  scheduler_reckon(s);
  /* With a link slower than predicted, the due time would be approached in ever smaller steps. */
  if (timer && s->due_ns > now_ns && s->due_ns != MLFAB__NEVER)
    s->due_ns = mlfab__max(s->due_ns, mlfab__add_sat(now_ns, SCHEDULER_MARGIN_NS));
  if (scheduler_is_due(s, MLFAB__TRANSFER_PUSH, 0)) {
    s->planned_before = 1;
    s->last_ns = now_ns;
    mlfab__scheduler_plan_pushes(s);
    scheduler_reckon(s);
  }
  for (uint32_t k = 0; k < s->servers; k++) {
    if (!scheduler_is_due(s, MLFAB__TRANSFER_PULL, k)) continue;
    s->served[k].pulled = 1;
    s->served[k].last_pull_ns = now_ns;
    mlfab__scheduler_plan_pulls(s, k);
    scheduler_reckon(s);
  }
}

MLFAB__INTERNAL void mlfab__scheduler_tick(mlfab__scheduler *scheduler, uint64_t now_ns) {
  scheduler->now_ns = now_ns;
  scheduler_look(scheduler);
  scheduler_reassure(scheduler);
}

MLFAB__INTERNAL uint64_t mlfab__scheduler_deadline(const mlfab__scheduler *scheduler) {
  uint64_t at = scheduler_look_at(scheduler);
  int waits = scheduler->waiting.first != MLFAB__NO_ITEM;
  return waits ? mlfab__min(at, scheduler->reassure_ns) : at;
}
