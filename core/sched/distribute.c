/* distribute.c - plans the distribution of models, and AllReduce: see group.h.
 *
 * With time reversed, distribution is aggregation: in aggregation the server's ingress must never be idle, here its
 * egress. So Alg. 3 groups the requests in a mirrored network; then the transfers are reserved in the real network.
 * First come the transfers from the server, beginning with the last group's distributor, which has the most to send
 * afterwards. Then come the distributors' transfers: each starts when the distributor has the whole model or, with
 * `cut`, as early as it can without ever waiting for bytes of the model.
 *
 * Source: MLfabric §10.3, §6. Departs: all transfers from the server are reserved before those from the
 * distributors; t_max starts at the time of the requests. */
#include "group.h"

/* Makes the requests candidates of the model's size. */
static int distribute_requests(mlfab__grouper *g, mlfab__env *env, const mlfab__distribution *d) {
  void *candidates =
      mlfab__grow(env, g->candidates, &g->candidates_room, d->n, sizeof *g->candidates);
  if (candidates == NULL) return MLFAB_ERR_MEMORY;
  g->candidates = candidates;
  void *grouped = mlfab__grow(env, g->grouped, &g->grouped_room, d->n, sizeof *g->grouped);
  if (grouped == NULL) return MLFAB_ERR_MEMORY;
  g->grouped = grouped;
  for (uint32_t i = 0; i < d->n; i++) {
    g->candidates[i] =
        (mlfab__candidate){.id = i, .node = d->requests[i], .available = d->now, .bytes = d->bytes};
  }
  return 0;
}

/* Reserves one transfer of the whole model, one component for each server. */
static int distribute_send(mlfab__network *net, const mlfab__distribution *d, const uint32_t *from,
                           const uint32_t *to, uint32_t to_step, double available, double *end_p) {
  mlfab__bundle bundle = {.from = from,
                          .from_step = 1,
                          .to = to,
                          .to_step = to_step,
                          .bytes = d->bytes,
                          .n = d->servers,
                          .available = available};
  return mlfab__bundle_reserve(net, &bundle, mlfab__network_never(), end_p);
}

static const uint32_t *distribute_hub(const mlfab__distribution *d, uint32_t q) {
  return d->distributors + (size_t)(q - 1) * d->servers;
}

/* Reserves the transfers to distributor q, one component after another, and keeps their timing. */
static int distribute_to_hub(mlfab__grouper *g, mlfab__network *net, const mlfab__distribution *d,
                             uint32_t q, double *end_p) {
  *end_p = d->now;
  for (uint32_t j = 0; j < d->servers; j++) {
    mlfab__bundle bundle = {.from = &d->server[j],
                            .to = &distribute_hub(d, q)[j],
                            .bytes = &d->bytes[j],
                            .n = 1,
                            .component = j,
                            .available = d->now};
    double end;
    int sent = mlfab__bundle_reserve(net, &bundle, mlfab__network_never(), &end);
    if (sent != MLFAB__ENDS) return sent;
    int code = mlfab__group_keep(g, net, j, d->bytes[j], end);
    if (code) return code;
    if (end > *end_p) *end_p = end;
  }
  return MLFAB__ENDS;
}

/* Reserves the servers' transfers: returns 1; or 0 if one of them never ends. */
static int distribute_from_servers(mlfab__grouper *g, mlfab__network *net,
                                   const mlfab__distribution *d, mlfab__delivery *out,
                                   double *hubs) {
  uint32_t last = 0;
  g->nlate = g->nstretches = 0;
  net->purpose = MLFAB__TO_DISTRIBUTOR;
  for (uint32_t i = d->n; i > 0; i--) {
    uint32_t q = g->grouped[i - 1].q;
    if (q == 0 || q == last) continue;
    net->index = last = q;
    int sent = distribute_to_hub(g, net, d, q, &hubs[q - 1]);
    if (sent != MLFAB__ENDS) return sent;
  }
  net->purpose = MLFAB__TO_WORKER;
  for (uint32_t i = 0; i < d->n; i++) {
    out[i].q = g->grouped[i].q;
    if (out[i].q != 0) continue;
    net->index = d->names ? d->names[i] : i;
    int sent = distribute_send(net, d, d->server, &d->requests[i], 0, d->now, &out[i].end);
    if (sent != MLFAB__ENDS) return sent;
  }
  return 1;
}

/* Reserves the transfers of a distributor that cuts through to the i-th request; `in`: one course for each
 * component. */
static int distribute_cut_through(mlfab__network *net, const mlfab__distribution *d, uint32_t q,
                                  uint32_t i, const mlfab__course *in, double *end_p) {
  *end_p = d->now;
  for (uint32_t j = 0; j < d->servers; j++) {
    mlfab__bundle bundle = {.from = &distribute_hub(d, q)[j],
                            .to = &d->requests[i],
                            .bytes = &d->bytes[j],
                            .n = 1,
                            .component = j};
    double end;
    int code = mlfab__network_cut_through(net, *bundle.from, *bundle.to, d->now, &in[j],
                                          &bundle.available);
    if (code) return code;
    int sent = mlfab__bundle_reserve(net, &bundle, mlfab__network_never(), &end);
    if (sent != MLFAB__ENDS) return sent;
    if (end < in[j].at) end = in[j].at;
    if (end > *end_p) *end_p = end;
  }
  return MLFAB__ENDS;
}

/* Reserves the distributors' transfers, last group first, its members in list order. */
static int distribute_from_hubs(mlfab__grouper *g, mlfab__network *net,
                                const mlfab__distribution *d, mlfab__delivery *out,
                                const double *hubs) {
  const mlfab__course *in = g->late; /* courses of the servers' transfers, in the same order */
  const mlfab__stretch *pieces = g->stretches;
  for (uint32_t k = 0; k < g->nlate; k++) {
    g->late[k].pieces = pieces;
    pieces += g->late[k].n;
  }
  for (uint32_t end = d->n; end > 0;) {
    uint32_t q = g->grouped[end - 1].q, first = end;
    while (first > 0 && g->grouped[first - 1].q == q) first--;
    for (uint32_t i = first; q != 0 && i < end; i++) {
      net->index = d->names ? d->names[i] : i;
      int sent = d->cut ? distribute_cut_through(net, d, q, i, in, &out[i].end)
                        : distribute_send(net, d, distribute_hub(d, q), &d->requests[i], 0,
                                          hubs[q - 1], &out[i].end);
      if (sent != MLFAB__ENDS) return sent;
    }
    if (q != 0) in += d->servers;
    end = first;
  }
  return 1;
}

static int distribute_plan(mlfab__grouper *g, mlfab__network *net, const mlfab__distribution *d,
                           mlfab__group_choice *choice_p) {
  mlfab__group_input in = {.updates = g->candidates,
                           .n = d->n,
                           .server = d->server,
                           .servers = d->servers,
                           .aggregators = d->distributors,
                           .k = d->k,
                           .start = d->now,
                           .cut = d->cut};
  uint32_t mark = mlfab__network_mark(net);
  net->mirror = !net->mirror;
  net->searching++;
  int code = mlfab__group_plan(g, net, &in, 0, g->grouped, choice_p);
  net->searching--;
  mlfab__network_undo(net, mark);
  net->mirror = !net->mirror;
  return code;
}

MLFAB__INTERNAL int mlfab__group_distribute(mlfab__grouper *g, mlfab__network *net,
                                            const mlfab__distribution *d, mlfab__delivery *out,
                                            double *hubs, mlfab__group_choice *choice_p,
                                            double *makespan_p) {
  mlfab__group_choice choice;
  uint32_t mark = mlfab__network_mark(net);
  int code = distribute_requests(g, net->env, d);
  if (!code) code = distribute_plan(g, net, d, &choice);
  if (code) return code;
  double never = mlfab__network_never(), makespan = d->now;
  for (uint32_t q = 0; q < d->k; q++) hubs[q] = never;
  int sent = 0;
  if (mlfab__finite(choice.time)) sent = distribute_from_servers(g, net, d, out, hubs);
  if (sent == 1) sent = distribute_from_hubs(g, net, d, out, hubs);
  if (sent != 1) mlfab__network_undo(net, mark);
  if (sent < 0) return sent;
  for (uint32_t i = 0; i < d->n; i++) {
    if (sent == 0) out[i] = (mlfab__delivery){0, never};
    if (out[i].end > makespan) makespan = out[i].end;
  }
  for (uint32_t q = 0; q < d->k && sent == 0; q++) hubs[q] = never;
  *choice_p = choice;
  *makespan_p = makespan;
  return 0;
}

/* ---- allreduce ---- */

/* Lists all workers except the root. */
static int distribute_others(mlfab__grouper *g, mlfab__env *env, const mlfab__allreduce *a,
                             uint32_t *root_p, uint32_t *n_p) {
  void *members =
      mlfab__grow(env, g->members, &g->members_room, 2 * (uint64_t)a->n, sizeof *g->members);
  if (members == NULL) return MLFAB_ERR_MEMORY;
  g->members = members;
  *root_p = a->n;
  *n_p = 0;
  for (uint32_t i = 0; i < a->n; i++) {
    if (*root_p == a->n && a->nodes[i] == a->root) {
      *root_p = i;
      continue;
    }
    g->members[*n_p] = i;
    g->members[a->n + *n_p] = a->nodes[i];
    ++*n_p;
  }
  return 0;
}

/* Plans the transfers to the root. */
static int distribute_push(mlfab__grouper *g, mlfab__network *net, const mlfab__allreduce *a,
                           uint32_t n, mlfab__grouped *push, mlfab__group_choice *choice_p) {
  mlfab__distribution room = {.n = a->n, .requests = a->nodes, .bytes = &a->bytes};
  int code = distribute_requests(g, net->env, &room);
  if (code) return code;
  for (uint32_t i = 0; i < a->n; i++) g->candidates[i].available = a->available[i];
  mlfab__group_input in = {.updates = g->candidates,
                           .order = g->members,
                           .n = n,
                           .server = &a->root,
                           .servers = 1,
                           .aggregators = a->aggregators,
                           .k = a->k};
  code = mlfab__group_plan(g, net, &in, 0, g->grouped, choice_p);
  for (uint32_t i = 0; !code && i < n; i++) push[g->members[i]] = g->grouped[i];
  return code;
}

/* Plans the transfers back, at `now`. The first n deliveries are those of the other workers, in their
 * order. */
static int distribute_get(mlfab__grouper *g, mlfab__network *net, const mlfab__allreduce *a,
                          uint32_t n, double now, mlfab__delivery *get,
                          mlfab__group_choice *choice_p, double *makespan_p) {
  mlfab__distribution d = {.server = &a->root,
                           .servers = 1,
                           .bytes = &a->bytes,
                           .distributors = a->distributors,
                           .k = a->distributors_k,
                           .requests = g->members + a->n,
                           .names = g->members,
                           .n = n,
                           .now = now};
  void *hubs = mlfab__grow(net->env, g->hubs, &g->hubs_room, d.k, sizeof *g->hubs);
  if (hubs == NULL) return MLFAB_ERR_MEMORY;
  g->hubs = hubs;
  int code = mlfab__group_distribute(g, net, &d, get, g->hubs, choice_p, makespan_p);
  /* From the end, because each worker's index is at least its index among the others. */
  for (uint32_t i = n; !code && i > 0; i--) get[g->members[i - 1]] = get[i - 1];
  return code;
}

MLFAB__INTERNAL int mlfab__group_allreduce(mlfab__grouper *g, mlfab__network *net,
                                           const mlfab__allreduce *a, mlfab__grouped *push,
                                           mlfab__delivery *get, mlfab__group_choice *push_p,
                                           mlfab__group_choice *get_p, double *makespan_p) {
  uint32_t mark = mlfab__network_mark(net), root, n;
  if (a->root >= net->nodes) return MLFAB_ERR_ARGUMENT;
  int code = distribute_others(g, net->env, a, &root, &n);
  if (!code) code = distribute_push(g, net, a, n, push, push_p);
  if (code) {
    mlfab__network_undo(net, mark);
    return code;
  }
  double now = push_p->time, never = mlfab__network_never();
  if (root < a->n) {
    double mine = a->available[root];
    push[root] = (mlfab__grouped){.arrive = mine, .ready = mine, .end = mine, .commit = mine};
    if (mine > now) now = mine;
  }
  if (mlfab__finite(now)) {
    code = distribute_get(g, net, a, n, now, get, get_p, makespan_p);
  } else {
    *get_p = (mlfab__group_choice){.time = never};
    *makespan_p = never;
    for (uint32_t i = 0; i < a->n; i++) get[i] = (mlfab__delivery){0, never};
  }
  if (code || !mlfab__finite(*makespan_p)) mlfab__network_undo(net, mark);
  if (!code && root < a->n) get[root] = (mlfab__delivery){0, now};
  return code;
}
