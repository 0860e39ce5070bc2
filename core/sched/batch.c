/* batch.c - the scheduler role: plans a batch and sends the plan. See scheduler.h.
 *
 * Hosts are the nodes of the network, so workers on one host share its links. Time 0 is now. The network is rebuilt for
 * every plan: from the last reported capacities, then from the placed and open transfers, by place, each with its
 * remaining bytes. If a transfer is reserved at the same priority with the rest of its bytes, its schedule stays the
 * same. So predictions stay the same as long as nothing changes.
 *
 * Without memory for planning, a batch is sent in order of announcement, all updates directly. The servers keep the
 * delay bound in either case.
 *
 * Source: MLfabric §5, §10.2 (several servers), §10.3 (distribution). Departs: pulls are planned for each
 * server separately; a group of one goes directly. */
#include "scheduler.h"

/* --- the network --- */

static void batch_set_leg(mlfab__leg *leg, const mlfab__transfer *t, uint64_t now_ns) {
  uint32_t most = MLFAB__HOP_STRETCHES, n = t->n < most ? t->n : most;
  *leg = (mlfab__leg){.left = t->n > 0 ? t->bytes : 0.0, .since_ns = now_ns, .n = n};
  for (uint32_t k = 0; k < n; k++) leg->stretches[k] = t->pieces[k];
  if (t->n <= most) return;
  double bytes = 0.0;
  mlfab__stretch *last = &leg->stretches[most - 1];
  for (uint32_t k = most - 1; k < t->n; k++)
    bytes += t->pieces[k].rate * (t->pieces[k].to - t->pieces[k].from);
  last->to = t->pieces[t->n - 1].to;
  last->rate = bytes / (last->to - last->from);
}

/* Called for every reservation: of placed transfers one at a time (s->target), of a batch by purpose. */
static void batch_watch(void *self, const mlfab__transfer *t) {
  mlfab__scheduler *s = self;
  mlfab__leg *leg = s->target;
  if (!leg && s->watching_batch) {
    if (t->purpose == MLFAB__AGGREGATE || t->purpose == MLFAB__TO_DISTRIBUTOR) {
      leg = &s->sums[(size_t)(t->index - 1) * s->nbatch_servers + t->component];
    } else {
      leg = &mlfab__scheduler_part(s, s->batch[t->index], s->batch_servers[t->component])->own;
    }
  }
  if (leg) batch_set_leg(leg, t, s->now_ns);
}

/* Reserves the remaining bytes of a leg. *end_p: `never` if they do not arrive; `available` if all have left. */
static int batch_leg(mlfab__scheduler *s, mlfab__leg *leg, uint32_t from, uint32_t to,
                     double available, double *end_p) {
  double left = mlfab__scheduler_left(leg, s->now_ns);
  *leg = (mlfab__leg){.left = left, .since_ns = s->now_ns};
  *end_p = available;
  if (!(left > 0.0)) return 0;
  leg->lost = 1;
  *end_p = mlfab__network_never();
  if (!mlfab__finite(available)) return 0;
  s->target = leg;
  int code = mlfab__network_reserve(&s->network, from, to, left, available, end_p);
  s->target = NULL;
  return code;
}

static uint32_t batch_node(const mlfab__scheduler *s, uint32_t worker) {
  return s->stations[worker].host;
}

/* First occupies the link with the bytes that are in no plan. */
static int batch_busy(mlfab__scheduler *s, uint32_t server, int out) {
  uint32_t host = s->served[server].host;
  double excess = 0.0, rate = mlfab__scheduler_rate(s, host, out);
  for (uint32_t k = 0; k < s->servers; k++) {
    const mlfab__booking *b = out ? &s->served[k].out : &s->served[k].in;
    if (s->served[k].host == host && b->excess > 0.0) excess += b->excess;
  }
  if (!(excess > 0.0) || !(rate > 0.0)) return 0;
  double at[2] = {0.0, excess / rate}, rates[2] = {0.0, rate};
  if (!mlfab__finite(at[1]) || !(at[1] > 0.0)) return 0;
  return mlfab__network_capacity(&s->network, out ? MLFAB__EGRESS : MLFAB__INGRESS, host, 2, at,
                                 rates);
}

static int batch_capacities(mlfab__scheduler *s) {
  int code = 0;
  mlfab__network_reset(&s->network);
  for (uint32_t i = 0; i <= s->nhosts; i++) {
    uint32_t host = i < s->nhosts ? i : s->hosts_room - 1;
    mlfab__network_constant(&s->network, MLFAB__INGRESS, host, mlfab__scheduler_rate(s, host, 0));
    mlfab__network_constant(&s->network, MLFAB__EGRESS, host, mlfab__scheduler_rate(s, host, 1));
  }
  for (uint32_t k = 0; !code && k < s->servers; k++) {
    if (!s->served[k].live) continue;
    code = batch_busy(s, k, 0);
    if (!code) code = batch_busy(s, k, 1);
  }
  return code;
}

/* Bytes that a server no longer expects have arrived: subtracts them from the first placed items. */
static void batch_shorten(mlfab__scheduler *s) {
  memset(s->counted, 0, s->servers * sizeof *s->counted);
  for (uint32_t i = s->placed.first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    int pull = s->items[i].kind == MLFAB__TRANSFER_PULL;
    for (uint32_t k = 0; k < s->servers; k++) {
      mlfab__booking *b = pull ? &s->served[k].out : &s->served[k].in;
      mlfab__leg *leg = mlfab__scheduler_crossing(s, i, k);
      if (!leg || !(b->excess < 0.0)) continue;
      double left = mlfab__scheduler_left(leg, s->now_ns);
      double take = left < -b->excess ? left : -b->excess;
      if (!(take > 0.0)) continue;
      *leg = (mlfab__leg){.left = left - take, .since_ns = s->now_ns, .lost = 1};
      b->excess += take;
    }
  }
}

/* Notes that a transfer to a server ends at `end`: later transfers, in the order of places, arrive no earlier. */
static void batch_in(mlfab__scheduler *s, uint32_t server, double end) {
  if (mlfab__finite(end) && end > s->latest[server]) s->latest[server] = end;
}

/* Returns the course of a leg just reserved, as input of the transfer `onward`; *at: when all of it has arrived. */
static mlfab__course batch_course(const mlfab__leg *leg, double onward, double at) {
  return (mlfab__course){.pieces = leg->stretches,
                         .n = leg->n,
                         .have = onward - leg->left,
                         .bytes = leg->left,
                         .at = at};
}

/* Computes when the sum of a group starts: when its members have arrived, or with cut-through from s->latest on, or so
 * much later that it never waits. */
static int batch_sum_from(mlfab__scheduler *s, uint32_t k, uint32_t first, uint32_t end,
                          double *from_p) {
  const mlfab__item_part *leader = NULL;
  *from_p = s->ready[k];
  if (s->schedule.whole || !mlfab__finite(s->ready[k]) || !(s->ready[k] > s->latest[k])) return 0;
  *from_p = s->latest[k];
  for (uint32_t i = first; i != end; i = s->items[i].next) {
    const mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
    if (part->state != MLFAB__ITEM_PLACED) continue;
    if (!leader) leader = part;
    double at = part->own.n > 0 ? part->own.stretches[part->own.n - 1].to : 0.0;
    mlfab__course in = batch_course(&part->own, mlfab__scheduler_left(&leader->sum, s->now_ns), at);
    int code = mlfab__network_cut_through(&s->network, batch_node(s, part->aggregator),
                                          s->served[k].host, *from_p, &in, from_p);
    if (code) return code;
  }
  return 0;
}

/* Reserves the members of a group, then its sum, at every server. The items `first` to `end` are
 * consecutive. */
static int batch_group(mlfab__scheduler *s, uint32_t first, uint32_t end) {
  int code = 0;
  memset(s->ready, 0, s->servers * sizeof *s->ready);
  for (uint32_t i = first; i != end; i = s->items[i].next) {
    for (uint32_t k = 0; !code && k < s->servers; k++) {
      mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
      double arrive = 0.0;
      if (part->state != MLFAB__ITEM_PLACED) continue;
      code = batch_leg(s, &part->own, batch_node(s, s->items[i].worker),
                       batch_node(s, part->aggregator), 0.0, &arrive);
      if (arrive > s->ready[k]) s->ready[k] = arrive;
    }
  }
  for (uint32_t k = 0; !code && k < s->servers; k++) {
    const mlfab__leg *sum = NULL;
    double from;
    code = batch_sum_from(s, k, first, end, &from);
    for (uint32_t i = first; !code && i != end; i = s->items[i].next) {
      mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
      double arrive;
      if (part->state != MLFAB__ITEM_PLACED) continue;
      if (sum) {
        part->sum = *sum;
        continue;
      }
      /* The leg of the first member may have been shortened. */
      code = batch_leg(s, &part->sum, batch_node(s, part->aggregator), s->served[k].host, from,
                       &arrive);
      sum = &part->sum;
      batch_in(s, k, arrive);
    }
  }
  return code;
}

/* Reserves the server's transfer for a pull: to the worker, or once for each spread to its distributor. */
static int batch_pull(mlfab__scheduler *s, uint32_t i) {
  const mlfab__item *item = &s->items[i];
  int code = 0;
  for (uint32_t k = 0; !code && k < s->servers; k++) {
    mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
    mlfab__leg *leg = mlfab__scheduler_crossing(s, i, k);
    double end;
    /* Members of a spread are consecutive: the first one's leg is copied, in case it ends before them. */
    if (!leg && part->state == MLFAB__ITEM_PLACED)
      part->sum = mlfab__scheduler_part(s, item->previous, k)->sum;
    if (!leg) continue;
    uint32_t to = batch_node(s, item->group ? part->aggregator : item->worker);
    code = batch_leg(s, leg, s->served[k].host, to, 0.0, &end);
  }
  return code;
}

/* Returns when the last byte of a leg arrives, in seconds from now. */
static double batch_leg_end(const mlfab__scheduler *s, const mlfab__leg *leg) {
  if (leg->lost) return mlfab__network_never();
  if (leg->n == 0) return 0.0;
  double end = leg->stretches[leg->n - 1].to - 1e-9 * (double)(s->now_ns - leg->since_ns);
  return end > 0.0 ? end : 0.0;
}

/* Computes when a distributor starts to serve a member: with the whole model, or with cut-through while it arrives. */
static int batch_spread_from(mlfab__scheduler *s, uint32_t item, uint32_t k, double *from_p) {
  const mlfab__item_part *part = mlfab__scheduler_part(s, item, k);
  double at = batch_leg_end(s, &part->sum);
  *from_p = at;
  if (s->schedule.whole) return 0;
  mlfab__course in = batch_course(&part->sum, mlfab__scheduler_left(&part->own, s->now_ns), at);
  return mlfab__network_cut_through(&s->network, batch_node(s, part->aggregator),
                                    batch_node(s, s->items[item].worker), 0.0, &in, from_p);
}

/* Reserves the transfers from distributors to members, after all transfers of that plan from the servers. */
static int batch_spreads(mlfab__scheduler *s, uint32_t first, uint32_t end) {
  for (uint32_t i = first; i != end; i = s->items[i].next) {
    const mlfab__item *item = &s->items[i];
    if (item->kind != MLFAB__TRANSFER_PULL || item->group == 0) continue;
    for (uint32_t k = 0; k < s->servers; k++) {
      mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
      double from, arrive;
      if (part->state != MLFAB__ITEM_PLACED) continue;
      int code = batch_spread_from(s, i, k, &from);
      if (!code) {
        code = batch_leg(s, &part->own, batch_node(s, part->aggregator),
                         batch_node(s, item->worker), from, &arrive);
      }
      if (code) return code;
    }
  }
  return 0;
}

/* Reserves a direct update. */
static int batch_direct(mlfab__scheduler *s, uint32_t i) {
  int code = 0;
  for (uint32_t k = 0; !code && k < s->servers; k++) {
    mlfab__item_part *part = mlfab__scheduler_part(s, i, k);
    double arrive;
    if (part->state != MLFAB__ITEM_PLACED) continue;
    code = batch_leg(s, &part->own, batch_node(s, s->items[i].worker), s->served[k].host, 0.0,
                     &arrive);
    batch_in(s, k, arrive);
  }
  return code;
}

/* Rebuilds the network: reserves plan after plan, in the original order. */
static int batch_network(mlfab__scheduler *s) {
  uint32_t plan = s->placed.first; /* start of the current plan */
  s->network.watch = batch_watch;
  s->network.user = s;
  s->watching_batch = 0;
  batch_shorten(s);
  int code = batch_capacities(s);
  for (uint32_t k = 0; k < s->servers; k++) {
    double rate = mlfab__scheduler_rate(s, s->served[k].host, 0), excess = s->served[k].in.excess;
    s->latest[k] = 0.0;
    if (rate > 0.0 && excess > 0.0) batch_in(s, k, excess / rate);
  }
  memset(s->counted, 0, s->servers * sizeof *s->counted);
  for (uint32_t i = plan, end; !code && i != MLFAB__NO_ITEM; i = end) {
    const mlfab__item *item = &s->items[i];
    end = item->next;
    if (item->serial != s->items[plan].serial) {
      code = batch_spreads(s, plan, i);
      plan = i;
    }
    if (code || item->dropped) continue;
    if (item->kind == MLFAB__TRANSFER_PULL) {
      code = batch_pull(s, i);
    } else if (item->group) {
      while (end != MLFAB__NO_ITEM && s->items[end].group == item->group) end = s->items[end].next;
      code = batch_group(s, i, end);
    } else {
      code = batch_direct(s, i);
    }
  }
  if (!code) code = batch_spreads(s, plan, MLFAB__NO_ITEM);
  mlfab__network_keep(&s->network);
  return code;
}

/* Returns when all placed updates have arrived: t_max starts there. */
static double batch_backlog(mlfab__scheduler *s) {
  double latest = 0.0;
  memset(s->counted, 0, s->servers * sizeof *s->counted);
  for (uint32_t i = s->placed.first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    if (s->items[i].kind != MLFAB__TRANSFER_PUSH) continue;
    for (uint32_t j = 0; j < s->nbatch_servers; j++) {
      const mlfab__leg *leg = mlfab__scheduler_crossing(s, i, s->batch_servers[j]);
      double end = leg ? batch_leg_end(s, leg) : 0.0;
      if (mlfab__finite(end) && end > latest) latest = end;
    }
  }
  for (uint32_t j = 0; j < s->nbatch_servers; j++) {
    const mlfab__served *served = &s->served[s->batch_servers[j]];
    double rate = mlfab__scheduler_rate(s, served->host, 0);
    double end = rate > 0.0 && served->in.excess > 0.0 ? served->in.excess / rate : 0.0;
    if (mlfab__finite(end) && end > latest) latest = end;
  }
  return latest;
}

/* --- aggregators --- */

/* Counts the accumulators in use by groups and spreads under way. */
static void batch_in_use(mlfab__scheduler *s) {
  for (uint32_t w = 0; w < s->workers; w++) s->stations[w].in_use = 0;
  memset(s->counted, 0, s->servers * sizeof *s->counted);
  for (uint32_t i = s->placed.first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    for (uint32_t k = 0; s->items[i].group && k < s->servers; k++) {
      if (mlfab__scheduler_crossing(s, i, k))
        s->stations[mlfab__scheduler_part(s, i, k)->aggregator].in_use++;
    }
  }
}

/* Can the worker aggregate? It must be live for all servers of the batch, reachable, have a free accumulator, and not
 * share a host with a server: there it would save nothing. */
static int batch_may_aggregate(const mlfab__scheduler *s, uint32_t worker) {
  const mlfab__station_state *station = &s->stations[worker];
  if (station->accumulators <= station->in_use) return 0;
  if (!(mlfab__scheduler_rate(s, station->host, 0) > 0.0)) return 0;
  if (!(mlfab__scheduler_rate(s, station->host, 1) > 0.0)) return 0;
  for (uint32_t j = 0; j < s->nbatch_servers; j++) {
    uint32_t k = s->batch_servers[j];
    if (!s->alive[(size_t)k * s->workers + worker]) return 0;
    if (s->served[k].host == station->host) return 0;
  }
  return 1;
}

/* Draws the next candidate on a host without one, or NO_NODE. */
static uint32_t batch_draw(mlfab__scheduler *s, uint32_t *at, uint32_t n) {
  while (*at < n) {
    uint32_t pick = *at + (uint32_t)mlfab__rng_below(&s->prng, n - *at), worker = s->draw[pick];
    s->draw[pick] = s->draw[*at];
    s->draw[(*at)++] = worker;
    if (s->marks[s->stations[worker].host] == s->serial) continue;
    s->marks[s->stations[worker].host] = s->serial;
    return worker;
  }
  return MLFAB__NO_NODE;
}

/* Prefers workers of the batch, because a transfer between two roles of one host is free. With equal links each group
 * has one member more than the group before (a direct update, then 2, 3, 4 ...). So the q-th group probably begins at
 * item q (q + 1) / 2 of the list, counted from 0, and that item's worker is chosen. */
static uint32_t batch_hosts(mlfab__scheduler *s, uint32_t most) {
  uint32_t n = 0;
  for (uint32_t q = 1; q <= most && q * (q + 1) / 2 < s->nbatch; q++) {
    uint32_t worker = s->items[s->batch[q * (q + 1) / 2]].worker;
    uint32_t host = s->stations[worker].host;
    if (s->marks[host] == s->serial || !batch_may_aggregate(s, worker)) continue;
    s->marks[host] = s->serial;
    s->draw[n++] = worker;
  }
  return n;
}

/* Chooses k aggregators, each with one node for every server: the same node for all if it has enough
 * accumulators. */
static void batch_aggregators(mlfab__scheduler *s) {
  uint32_t m = s->nbatch_servers, n = 0, at = 0;
  uint32_t most = (uint32_t)mlfab__min(MLFAB__BATCH_AGGREGATORS, s->nbatch / 2);
  batch_in_use(s);
  uint32_t hosts = batch_hosts(s, most);
  n = hosts;
  for (uint32_t w = 0; w < s->workers; w++) {
    if (s->marks[s->stations[w].host] != s->serial && batch_may_aggregate(s, w)) s->draw[n++] = w;
  }
  for (s->k = 0; s->k < most; s->k++) {
    uint32_t worker = MLFAB__NO_NODE, room = 0;
    for (uint32_t j = 0; j < m; j++) {
      if (room == 0) {
        worker = at < hosts ? s->draw[at++] : batch_draw(s, &at, n);
        if (worker == MLFAB__NO_NODE) return;
        room = s->stations[worker].accumulators - s->stations[worker].in_use;
      }
      room--;
      s->aggregators[s->k * m + j] = worker;
      s->aggregator_nodes[s->k * m + j] = batch_node(s, worker);
    }
  }
}

/* Only items of one shape at every server can be aggregated or distributed. Packets of one shape may differ
 * in length. */
static int batch_uniform(const mlfab__scheduler *s) {
  for (uint32_t j = 0; j < s->nbatch_servers; j++) {
    const mlfab__item_part *first = mlfab__scheduler_part(s, s->batch[0], s->batch_servers[j]);
    for (uint32_t i = 0; i < s->nbatch; i++) {
      const mlfab__item_part *part = mlfab__scheduler_part(s, s->batch[i], s->batch_servers[j]);
      if (part->state != MLFAB__ITEM_WAITING || part->shape != first->shape) return 0;
    }
  }
  return 1;
}

/* --- sending the plan --- */

static double batch_known(double rate) { return rate > 0.0 ? rate : -1.0; }

/* Places a part; `q` from 0, or NO_NODE: directly. */
static void batch_place_part(mlfab__scheduler *s, uint32_t item, uint32_t j, uint32_t q) {
  mlfab__item_part *part = mlfab__scheduler_part(s, item, s->batch_servers[j]);
  if (part->state != MLFAB__ITEM_WAITING) return;
  part->state = MLFAB__ITEM_PLACED;
  part->aggregator = MLFAB__NO_NODE;
  if (q == MLFAB__NO_NODE) return;
  part->aggregator = s->aggregators[q * s->nbatch_servers + j];
  part->sum = s->sums[(size_t)q * s->nbatch_servers + j];
}

/* Sends the plan's entries for one server, in the order of places. */
static void batch_tell(mlfab__scheduler *s, uint32_t server, uint32_t first, uint64_t groups) {
  mlfab__served *served = &s->served[server];
  const mlfab__plan_host *host = &s->hosts[served->host];
  mlfab__plan plan = {
      .serial = s->serial, .rate_in = batch_known(host->in), .rate_out = batch_known(host->out)};
  for (uint32_t i = first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    const mlfab__item *item = &s->items[i];
    const mlfab__item_part *part = mlfab__scheduler_part(s, i, server);
    if (part->state != MLFAB__ITEM_PLACED || item->serial != s->serial) continue;
    mlfab__plan_entry *entry = &s->entries[plan.entries++];
    *entry = (mlfab__plan_entry){.id = item->id,
                                 .delay = item->delay,
                                 .rate = -1.0,
                                 .kind = item->kind,
                                 .worker = item->worker,
                                 .aggregator = part->aggregator,
                                 .fate = item->dropped};
    if (item->group) {
      entry->group = (uint32_t)(item->group - groups);
      entry->rate = batch_known(s->hosts[batch_node(s, part->aggregator)].in);
    }
    if (item->kind == MLFAB__TRANSFER_PUSH && !item->dropped) served->estimate += item->members;
  }
  if (plan.entries == 0) return;
  served->told_ns = s->now_ns;
  s->port.post(s->port.self, server, MLFAB__PLAN, s->meta,
               mlfab__encode_plan(s->meta, &plan, s->entries));
}

/* Shows the plan to the observer of this node. */
static void batch_show(const mlfab__scheduler *s, uint32_t kind) {
  const mlfab__tap *tap = s->tap ? *s->tap : NULL;
  const mlfab__story *story = &s->stories[kind];
  for (uint32_t i = 0; tap && i < story->n; i++) {
    const mlfab__told *told = &story->told[i];
    if (!told->dropped && !mlfab__finite(told->end)) continue; /* not planned */
    if (told->dropped && told->reason == MLFAB__UNREACHABLE) continue;
    mlfab__tap_plan plan = {.id = told->id,
                            .serial = story->serial,
                            .start_ns = story->now_ns,
                            .end_ns = story->now_ns,
                            .bytes = (uint64_t)told->bytes,
                            .delay = told->delay > 0 ? (uint64_t)told->delay : 0,
                            .worker = told->worker,
                            .aggregator = told->aggregator,
                            .is_pull = kind == MLFAB__TRANSFER_PULL,
                            .dropped = told->dropped};
    if (!told->dropped) {
      plan.start_ns = mlfab__add_sat(story->now_ns, mlfab__scheduler_ns(told->start));
      plan.end_ns = mlfab__add_sat(story->now_ns, mlfab__scheduler_ns(told->end));
    }
    tap->plan(tap->self, &plan);
  }
}

/* Sends the items placed after `before` to all servers of the batch. */
static void batch_tell_all(mlfab__scheduler *s, uint32_t before, uint64_t groups, uint32_t kind) {
  batch_show(s, kind);
  uint32_t first = before == MLFAB__NO_ITEM ? s->placed.first : s->items[before].next;
  if (first == MLFAB__NO_ITEM) return; /* no item can be reached */
  for (uint32_t j = 0; j < s->nbatch_servers; j++)
    batch_tell(s, s->batch_servers[j], first, groups);
  s->stats->plans_made++;
}

static void batch_story(mlfab__scheduler *s, uint32_t kind, double backlog) {
  mlfab__story *story = &s->stories[kind];
  story->kind = kind;
  story->n = 0;
  story->serial = s->serial;
  story->now_ns = s->now_ns;
  story->server = s->batch_servers[0];
  story->servers = s->nbatch_servers;
  story->candidates = s->k;
  story->backlog = backlog;
}

/* Returns when the first byte of an item leaves its worker, or is sent to it; or the first byte of its sum. Returns 0
 * if that takes no time. */
static double batch_start(const mlfab__scheduler *s, uint32_t item, int sum) {
  double start = mlfab__network_never();
  for (uint32_t j = 0; j < s->nbatch_servers; j++) {
    const mlfab__item_part *part = mlfab__scheduler_part(s, item, s->batch_servers[j]);
    const mlfab__leg *leg = sum ? &part->sum : &part->own;
    if (leg->n > 0 && leg->stretches[0].from < start) start = leg->stretches[0].from;
  }
  return mlfab__finite(start) ? start : 0.0;
}

static mlfab__told *batch_note(mlfab__scheduler *s, uint32_t item) {
  const mlfab__item *it = &s->items[item];
  mlfab__story *story = &s->stories[it->kind];
  mlfab__told *told = &story->told[story->n++];
  *told = (mlfab__told){.id = it->id, .worker = it->worker, .aggregator = MLFAB__NO_NODE};
  for (uint32_t j = 0; j < s->nbatch_servers; j++)
    told->bytes += (double)mlfab__scheduler_part(s, item, s->batch_servers[j])->bytes;
  return told;
}

/* The plan differs from its reservations in two cases. Groups of one go directly. And with several servers each sum
 * starts when its own members have arrived; the reservations wait for those of all servers. So everything is reserved
 * again in the same order, and the reported times come from these reservations. */
static void batch_retime(mlfab__scheduler *s, uint32_t kind, uint32_t before) {
  uint32_t i = before == MLFAB__NO_ITEM ? s->placed.first : s->items[before].next;
  mlfab__story *story = &s->stories[kind];
  double commit = story->backlog;
  if (batch_network(s)) return; /* the reported times stay slightly wrong */
  for (uint32_t n = 0; n < story->n && i != MLFAB__NO_ITEM; n++) {
    mlfab__told *told = &story->told[n];
    if (told->dropped || told->id != s->items[i].id || told->worker != s->items[i].worker) continue;
    told->arrive = told->end = 0.0;
    for (uint32_t j = 0; j < s->nbatch_servers; j++) {
      const mlfab__item_part *part = mlfab__scheduler_part(s, i, s->batch_servers[j]);
      double own = batch_leg_end(s, &part->own), sum = batch_leg_end(s, &part->sum);
      int push = kind == MLFAB__TRANSFER_PUSH, grouped = s->items[i].group != 0;
      double arrive = grouped && !push ? sum : own, end = own;
      if (grouped && sum > end) end = sum; /* the second hop may take no time */
      if (arrive > told->arrive) told->arrive = arrive;
      if (end > told->end) told->end = end;
    }
    told->ready = batch_start(s, i, 1);
    if (told->end > commit) commit = told->end;
    told->commit = kind == MLFAB__TRANSFER_PUSH ? commit : told->end;
    told->start = batch_start(s, i, 0);
    i = s->items[i].next;
  }
}

/* Without memory: places the items in order of announcement, one after another over the server's link. */
static void batch_plain(mlfab__scheduler *s, uint32_t kind) {
  uint32_t before = s->placed.last;
  mlfab__log(s->env, MLFAB_LOG_WARN, "scheduler: out of memory, %u transfers go in order",
             s->nbatch);
  s->k = 0;
  batch_story(s, kind, 0.0);
  for (uint32_t i = 0; i < s->nbatch; i++) {
    mlfab__told *told = batch_note(s, s->batch[i]);
    told->end = told->commit = told->arrive = mlfab__network_never();
    for (uint32_t j = 0; j < s->nbatch_servers; j++) {
      mlfab__item_part *part = mlfab__scheduler_part(s, s->batch[i], s->batch_servers[j]);
      part->own = (mlfab__leg){.left = (double)part->bytes, .since_ns = s->now_ns, .lost = 1};
      batch_place_part(s, s->batch[i], j, MLFAB__NO_NODE);
    }
    mlfab__scheduler_place(s, s->batch[i]);
  }
  batch_tell_all(s, before, s->groups, kind);
}

/* Collects the due items of this kind, and for pulls of this server, in order of announcement. */
static void batch_collect(mlfab__scheduler *s, uint32_t kind, uint32_t server) {
  memset(s->counted, 0, s->servers * sizeof *s->counted);
  s->nbatch = s->nbatch_servers = 0;
  for (uint32_t i = s->waiting.first; i != MLFAB__NO_ITEM; i = s->items[i].next) {
    const mlfab__item *item = &s->items[i];
    if (item->kind != kind || item->due_ns > s->now_ns || s->nbatch == MLFAB__BATCH_MAX) continue;
    if (kind == MLFAB__TRANSFER_PULL &&
        mlfab__scheduler_part(s, i, server)->state != MLFAB__ITEM_WAITING)
      continue;
    s->batch[s->nbatch++] = i;
    for (uint32_t k = 0; k < s->servers; k++)
      s->counted[k] |= mlfab__scheduler_part(s, i, k)->state == MLFAB__ITEM_WAITING;
  }
  for (uint32_t k = 0; k < s->servers; k++) {
    if (!s->counted[k]) continue;
    s->server_nodes[s->nbatch_servers] = s->served[k].host;
    s->batch_servers[s->nbatch_servers++] = k;
  }
  s->serial++;
}

/* Delays an unreachable item: tries again after a heartbeat, or when a capacity changes. */
static void batch_hold(mlfab__scheduler *s, uint32_t item) {
  s->items[item].held_ns = mlfab__add_sat(s->now_ns, mlfab__max(s->heartbeat_ns, 1000000u));
}

/* --- updates --- */

/* Returns the version of an update relative to the end of the queues, which is 0: that of its oldest part. */
static int64_t batch_version(const mlfab__scheduler *s, uint32_t item) {
  uint64_t most = 0;
  for (uint32_t j = 0; j < s->nbatch_servers; j++) {
    const mlfab__item_part *part = mlfab__scheduler_part(s, item, s->batch_servers[j]);
    if (part->state != MLFAB__ITEM_WAITING) continue;
    uint64_t now = s->served[s->batch_servers[j]].estimate;
    uint64_t since = now > part->placed ? now - part->placed : 0;
    most = mlfab__max(most, mlfab__add_sat(part->lag, since));
  }
  return -(int64_t)mlfab__min(most, INT64_MAX / 4);
}

static void batch_candidates(mlfab__scheduler *s) {
  uint32_t m = s->nbatch_servers;
  for (uint32_t i = 0; i < s->nbatch; i++) {
    const mlfab__item *item = &s->items[s->batch[i]];
    double *bytes = &s->bytes[(size_t)i * m];
    for (uint32_t j = 0; j < m; j++) {
      const mlfab__item_part *part = mlfab__scheduler_part(s, s->batch[i], s->batch_servers[j]);
      bytes[j] = part->state == MLFAB__ITEM_WAITING ? (double)part->bytes : 0.0;
    }
    s->candidates[i] = (mlfab__candidate){.id = item->id,
                                          .node = batch_node(s, item->worker),
                                          .version = batch_version(s, s->batch[i]),
                                          .bytes = bytes};
  }
}

static uint32_t batch_fate(uint8_t reason) {
  return reason == MLFAB__LOOKAHEAD ? MLFAB__FATE_LOOKAHEAD : MLFAB__FATE_EXPIRED;
}

/* Counts the members of each aggregator's group; one member alone is no group. */
static void batch_count_groups(const mlfab__scheduler *s, uint32_t applied, uint32_t *members) {
  memset(members, 0, (MLFAB__BATCH_AGGREGATORS + 1) * sizeof *members);
  for (uint32_t i = 0; i < applied; i++) members[s->planned[i].group]++;
}

/* Places one update, or drops it. */
static void batch_settle(mlfab__scheduler *s, const mlfab__planned *p, const uint32_t *members,
                         uint64_t groups) {
  uint32_t i = s->batch[p->update], m = s->nbatch_servers;
  int grouped = p->group > 0 && members[p->group] > 1;
  mlfab__item *item = &s->items[i];
  mlfab__told *told = batch_note(s, i);
  told->reason = p->reason;
  told->arrive = p->arrive, told->end = p->end, told->commit = p->commit;
  told->delay = p->delay;
  if (p->fate == MLFAB__PLAN_DROPPED) told->dropped = 1;
  if (p->reason == MLFAB__UNREACHABLE) {
    batch_hold(s, i);
    return;
  }
  for (uint32_t j = 0; j < m; j++) {
    if (p->group > 0 && !grouped)
      mlfab__scheduler_part(s, i, s->batch_servers[j])->own =
          s->sums[(size_t)(p->group - 1) * m + j];
    batch_place_part(s, i, j, grouped ? p->group - 1 : MLFAB__NO_NODE);
  }
  item->delay = p->delay > 0 ? (uint64_t)p->delay : 0;
  told->start = batch_start(s, i, 0);
  if (grouped) {
    told->ready = batch_start(s, i, 1);
    told->group = p->group_number;
    told->aggregator = s->aggregators[(p->group - 1) * m];
    item->group = groups + p->group_number;
    s->stats->plans_grouped++;
  }
  if (p->fate == MLFAB__PLAN_DROPPED) {
    item->dropped = batch_fate(p->reason);
    s->stats->plans_dropped++;
  }
  mlfab__scheduler_place(s, i);
}

MLFAB__INTERNAL void mlfab__scheduler_plan_pushes(mlfab__scheduler *s) {
  uint32_t applied, members[MLFAB__BATCH_AGGREGATORS + 1];
  batch_collect(s, MLFAB__TRANSFER_PUSH, 0);
  if (batch_network(s)) {
    batch_plain(s, MLFAB__TRANSFER_PUSH);
    return;
  }
  s->k = 0;
  if (!s->schedule.no_aggregation && batch_uniform(s)) batch_aggregators(s);
  batch_candidates(s);
  uint64_t bound = s->schedule.delay_bound;
  mlfab__batch batch = {.updates = s->candidates,
                        .n = s->nbatch,
                        .server = s->server_nodes,
                        .servers = s->nbatch_servers,
                        .aggregators = s->aggregator_nodes,
                        .k = s->k,
                        .delay_bound = bound > INT64_MAX / 2 ? INT64_MAX : (int64_t)bound,
                        .backlog = batch_backlog(s),
                        .list = s->schedule.rounds != 0,
                        .best = s->schedule.best != 0,
                        .cut = s->schedule.whole == 0};
  memset(s->sums, 0, (size_t)s->k * s->nbatch_servers * sizeof *s->sums);
  s->watching_batch = 1;
  int code = mlfab__plan_batch(&s->planner, &s->network, &batch, s->planned, &applied, NULL);
  s->watching_batch = 0;
  if (code) {
    batch_plain(s, MLFAB__TRANSFER_PUSH);
    return;
  }
  uint32_t before = s->placed.last;
  uint64_t groups = s->groups;
  batch_story(s, MLFAB__TRANSFER_PUSH, batch.backlog);
  batch_count_groups(s, applied, members);
  for (uint32_t i = 0; i < s->nbatch; i++) batch_settle(s, &s->planned[i], members, groups);
  s->groups += s->nbatch;
  int other = 0;
  for (uint32_t q = 1; q <= s->k; q++)
    other |= members[q] == 1 || (members[q] > 1 && s->nbatch_servers > 1);
  if (other) batch_retime(s, MLFAB__TRANSFER_PUSH, before);
  batch_tell_all(s, before, groups, MLFAB__TRANSFER_PUSH);
}

/* --- pulls --- */

/* Serves all pulls from the server, in order; unreachable pulls wait. */
static int batch_serve(mlfab__scheduler *s) {
  s->k = 0;
  for (uint32_t i = 0; i < s->nbatch; i++) {
    mlfab__item_part *part = mlfab__scheduler_part(s, s->batch[i], s->batch_servers[0]);
    double end;
    part->own = (mlfab__leg){.left = (double)part->bytes, .since_ns = s->now_ns, .lost = 1};
    int code = batch_leg(s, &part->own, s->server_nodes[0],
                         batch_node(s, s->items[s->batch[i]].worker), 0.0, &end);
    if (code) return code;
    s->deliveries[i] = (mlfab__delivery){0, end};
  }
  return 0;
}

/* Serves them through distributors; returns 1 if one of them cannot be reached that way, with nothing reserved. */
static int batch_distribute(mlfab__scheduler *s) {
  double hubs[MLFAB__BATCH_AGGREGATORS], makespan;
  mlfab__group_choice choice;
  for (uint32_t i = 0; i < s->nbatch; i++)
    s->nodes[i] = batch_node(s, s->items[s->batch[i]].worker);
  s->bytes[0] = (double)mlfab__scheduler_part(s, s->batch[0], s->batch_servers[0])->bytes;
  mlfab__distribution d = {.server = s->server_nodes,
                           .servers = 1,
                           .bytes = s->bytes,
                           .distributors = s->aggregator_nodes,
                           .k = s->k,
                           .requests = s->nodes,
                           .n = s->nbatch,
                           .cut = s->schedule.whole == 0};
  memset(s->sums, 0, (size_t)s->k * sizeof *s->sums);
  s->watching_batch = 1;
  int code = mlfab__group_distribute(&s->grouper, &s->network, &d, s->deliveries, hubs, &choice,
                                     &makespan);
  s->watching_batch = 0;
  return code ? code : !mlfab__finite(makespan);
}

static void batch_settle_pull(mlfab__scheduler *s, uint32_t i, uint32_t members) {
  mlfab__item *item = &s->items[s->batch[i]];
  const mlfab__delivery *d = &s->deliveries[i];
  mlfab__item_part *part = mlfab__scheduler_part(s, s->batch[i], s->batch_servers[0]);
  mlfab__told *told = batch_note(s, s->batch[i]);
  int grouped = d->q > 0 && members > 1;
  told->reason = MLFAB__LISTED;
  told->arrive = told->end = told->commit = d->end;
  if (!mlfab__finite(d->end)) {
    told->reason = MLFAB__UNREACHABLE;
    told->dropped = 1;
    batch_hold(s, s->batch[i]);
    return;
  }
  if (d->q > 0) told->arrive = batch_leg_end(s, &s->sums[d->q - 1]);
  if (d->q > 0 && !grouped) part->own = s->sums[d->q - 1];
  batch_place_part(s, s->batch[i], 0, grouped ? d->q - 1 : MLFAB__NO_NODE);
  if (grouped) {
    item->group = s->groups + d->q;
    told->group = d->q;
    told->aggregator = part->aggregator;
  }
  told->start = batch_start(s, s->batch[i], 0);
  mlfab__scheduler_place(s, s->batch[i]);
}

MLFAB__INTERNAL void mlfab__scheduler_plan_pulls(mlfab__scheduler *s, uint32_t server) {
  batch_collect(s, MLFAB__TRANSFER_PULL, server);
  int code = batch_network(s), direct = 1;
  s->k = 0;
  if (!code && !s->schedule.no_distribution && batch_uniform(s)) batch_aggregators(s);
  if (!code && s->k > 0) {
    code = batch_distribute(s);
    direct = code == 1;
    if (direct) code = 0;
  }
  if (!code && direct) code = batch_serve(s);
  if (code) {
    batch_plain(s, MLFAB__TRANSFER_PULL);
    return;
  }
  uint32_t before = s->placed.last;
  uint64_t groups = s->groups;
  batch_story(s, MLFAB__TRANSFER_PULL, 0.0);
  /* The server serves the last distributor first, because it has the most to send afterwards. */
  int other = 0;
  for (uint32_t q = s->k + 1; q-- > 0;) {
    uint32_t members = 0;
    for (uint32_t i = 0; i < s->nbatch; i++) members += s->deliveries[i].q == q;
    for (uint32_t i = 0; i < s->nbatch; i++) {
      if (s->deliveries[i].q == q) batch_settle_pull(s, i, members);
    }
    other |= q > 0 && members == 1;
  }
  s->groups += s->k;
  if (other) batch_retime(s, MLFAB__TRANSFER_PULL, before);
  batch_tell_all(s, before, groups, MLFAB__TRANSFER_PULL);
}
