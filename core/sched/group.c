/* group.c - Alg. 3, case by case: selects direct updates and groups. See group.h.
 *
 * The cases n = 0, 1, ... share their direct transfers: case n + 1 has one more than case n. All other reservations of
 * a case are undone before the next. A case is abandoned as soon as its t_max, which never decreases, reaches the best
 * T so far. If the direct transfers alone reach it, no larger n can win; and among equal cases the smallest n is
 * wanted. T(n) is not monotone in n; feasibility is not, either. So every n up to there is tried, except those that a
 * bound excludes (it does not hold with a free first group, or with late members that may delay a sum).
 *
 * The bound. When t_max is t, everything reserved so far has ended by t. So the next aggregate reaches the servers no
 * later than the largest aggregate would, sent at t on the network from before the case. A component that shares a node
 * with an earlier one leaves behind it at the latest. By induction, t_max of the q-th group is at most some U(q), with
 * U(1) known. Its members arrive through its aggregator's ingress by then, all nodes of the aggregator counted
 * together; late members arrive up to one transfer later, and their sum is at the server one more transfer later. If
 * the updates do not fit into all groups together, n is infeasible; with TAIL_DIRECT, the rest goes directly, and the
 * servers' ingress must carry it, too. */
#include "group.h"

/* One case being evaluated. */
typedef struct group_run {
  mlfab__grouper *g;
  mlfab__network *net;
  const mlfab__group_input *in;
  uint32_t variant, first_most;
  int late;            /* members may arrive after t_max */
  int crossed;         /* a late member may delay the sum of its own group */
  mlfab__grouped *out; /* NULL: only the time is wanted */
  double limit;        /* a case that does not end before this time may be abandoned */
  double t_max;
  uint32_t number; /* groups so far */
  int over;        /* even alone, the free first group reaches the limit */
  /* The group being filled. */
  uint32_t first, members;
  double ready;
  int known;      /* with cut-through: `forward` is valid */
  double forward; /* with its sum sent from t_max on: when it is at the servers */
} group_run;

static const mlfab__candidate *group_update(const group_run *r, uint32_t i) {
  return &r->in->updates[r->in->order ? r->in->order[i] : i];
}

static mlfab__bundle group_bundle(const group_run *r, uint32_t i, const uint32_t *to) {
  const mlfab__candidate *c = group_update(r, i);
  return (mlfab__bundle){.from = &c->node,
                         .to = to,
                         .to_step = 1,
                         .bytes = c->bytes,
                         .n = r->in->servers,
                         .available = c->available};
}

static const uint32_t *group_aggregator(const group_run *r, uint32_t q) {
  return r->in->aggregators + (size_t)(q - 1) * r->in->servers;
}

/* Is T(n) certainly at or above the limit? */
static int group_is_over(const group_run *r) {
  return r->over || !mlfab__network_less(r->t_max, r->limit);
}

/* Sends the i-th update directly: returns 1; or 0: it never arrives. */
static int group_direct(group_run *r, uint32_t i) {
  mlfab__bundle bundle = group_bundle(r, i, r->in->server);
  double end;
  r->net->purpose = MLFAB__TO_SERVER;
  r->net->index = r->in->order ? r->in->order[i] : i;
  r->g->evaluations++;
  int walked = mlfab__bundle_reserve(r->net, &bundle, mlfab__network_never(), &end);
  if (walked != MLFAB__ENDS) return walked;
  if (end > r->t_max) r->t_max = end;
  r->number++;
  if (r->out) {
    r->out[i] = (mlfab__grouped){.number = r->number,
                                 .arrive = end,
                                 .ready = bundle.available,
                                 .end = end,
                                 .commit = r->t_max};
  }
  return 1;
}

/* ---- cut-through ---- */

/* Computes when the sum at aggregator q, of this size and sent from t_max on, would be at the servers. */
static int group_forward(group_run *r, uint32_t q, const double *bytes) {
  mlfab__bundle bundle = {.from = group_aggregator(r, q),
                          .from_step = 1,
                          .to = r->in->server,
                          .to_step = 1,
                          .bytes = bytes,
                          .n = r->in->servers,
                          .available = r->t_max};
  r->g->evaluations++;
  int walked = mlfab__bundle_end(r->net, &bundle, mlfab__network_never(), &r->forward);
  if (walked == MLFAB__LATE) r->forward = mlfab__network_never();
  return walked < 0 ? walked : 0;
}

MLFAB__INTERNAL int mlfab__group_keep(mlfab__grouper *g, const mlfab__network *net,
                                      uint32_t component, double bytes, double end) {
  uint32_t n = net->npieces;
  uint64_t need = (uint64_t)g->nstretches + n;
  void *late =
      mlfab__grow(net->env, g->late, &g->late_room, (uint64_t)g->nlate + 1, sizeof *g->late);
  if (late == NULL) return MLFAB_ERR_MEMORY;
  g->late = late;
  void *stretches =
      mlfab__grow(net->env, g->stretches, &g->stretches_room, need, sizeof *g->stretches);
  if (stretches == NULL) return MLFAB_ERR_MEMORY;
  g->stretches = stretches;
  if (n > 0) memcpy(g->stretches + g->nstretches, net->pieces, n * sizeof *g->stretches);
  g->late[g->nlate++] = (mlfab__course){.n = n, .component = component, .bytes = bytes, .at = end};
  g->nstretches += n;
  return 0;
}

/* Reserves a member's transfer to its aggregator, like mlfab__bundle_reserve. */
static int group_enter(group_run *r, const mlfab__bundle *whole, double limit, double *end_p) {
  uint32_t mark = mlfab__network_mark(r->net), nlate = r->g->nlate, nstretches = r->g->nstretches;
  int walked = MLFAB__ENDS;
  *end_p = whole->available;
  if (whole->n > 1 && r->net->watch && !r->net->searching) {
    walked = mlfab__bundle_end(r->net, whole, limit, end_p);
  }
  for (uint32_t j = 0; walked == MLFAB__ENDS && j < whole->n; j++) {
    mlfab__bundle bundle = *whole;
    double end;
    bundle.to += (size_t)j * bundle.to_step;
    bundle.bytes += j;
    bundle.n = 1;
    bundle.component = j;
    walked = mlfab__bundle_reserve(r->net, &bundle, limit, &end);
    if (walked != MLFAB__ENDS) break;
    if (end > r->t_max && mlfab__group_keep(r->g, r->net, j, whole->bytes[j], end)) {
      walked = MLFAB_ERR_MEMORY;
    }
    if (end > *end_p) *end_p = end;
  }
  if (walked == MLFAB__ENDS) return walked;
  mlfab__network_undo(r->net, mark);
  r->g->nlate = nlate;
  r->g->nstretches = nstretches;
  return walked;
}

/* Reserves the sum's transfer to the servers: each component from t_max on, or so much later that it never waits for
 * its members. */
static int group_leave(group_run *r, const mlfab__bundle *whole, double *end_p) {
  int walked = MLFAB__ENDS;
  *end_p = r->ready;
  for (uint32_t j = 0; walked == MLFAB__ENDS && j < whole->n; j++) {
    mlfab__bundle bundle = *whole;
    const mlfab__stretch *pieces = r->g->stretches;
    double end;
    bundle.from += j;
    bundle.to += j;
    bundle.bytes += j;
    bundle.n = 1;
    bundle.component = j;
    if (bundle.available > r->t_max) bundle.available = r->t_max;
    for (uint32_t k = 0; k < r->g->nlate; k++) {
      mlfab__course in = r->g->late[k];
      in.pieces = pieces;
      pieces += in.n;
      if (in.component != j) continue;
      int code = mlfab__network_cut_through(r->net, *bundle.from, *bundle.to, bundle.available, &in,
                                            &bundle.available);
      if (code) return code;
    }
    walked = mlfab__bundle_reserve(r->net, &bundle, mlfab__network_never(), &end);
    if (walked == MLFAB__ENDS && end > *end_p) *end_p = end;
  }
  r->g->nlate = r->g->nstretches = 0;
  return walked;
}

/* ---- groups ---- */

/* Sends the sum of the group at aggregator q: returns 1; or 0: it never arrives. */
static int group_flush(group_run *r, uint32_t q) {
  mlfab__bundle bundle = {.from = group_aggregator(r, q),
                          .from_step = 1,
                          .to = r->in->server,
                          .to_step = 1,
                          .bytes = r->g->sizes,
                          .n = r->in->servers,
                          .available = r->ready};
  double end;
  r->net->purpose = MLFAB__AGGREGATE;
  r->net->index = q;
  r->g->evaluations++;
  int walked = r->in->cut ? group_leave(r, &bundle, &end)
                          : mlfab__bundle_reserve(r->net, &bundle, mlfab__network_never(), &end);
  if (walked != MLFAB__ENDS) return walked;
  if (end > r->t_max) r->t_max = end;
  r->number++;
  for (uint32_t i = r->first; r->out && i < r->first + r->members; i++) {
    r->out[i].q = q;
    r->out[i].number = r->number;
    r->out[i].ready = r->ready;
    r->out[i].end = end;
    r->out[i].commit = r->t_max;
  }
  r->members = 0;
  return 1;
}

/* Is it a first group that may be late? */
static int group_is_free(const group_run *r, uint32_t q) {
  return r->variant == MLFAB__GROUP_FIRST_FREE && q == 1;
}

/* Computes the latest time at which the i-th update may arrive at aggregator q: returns 1; or 0: there is none. */
static int group_limit(group_run *r, uint32_t i, uint32_t q, double *limit_p) {
  const double *bytes = r->members > 0 ? r->g->sizes : group_update(r, i)->bytes;
  *limit_p = r->t_max;
  if (group_is_free(r, q)) {
    *limit_p = mlfab__network_never();
    return r->members < r->first_most;
  }
  if (!r->late) return 1;
  int code = r->known ? 0 : group_forward(r, q, bytes);
  r->known = !r->crossed; /* members use other links than the sum */
  *limit_p = r->forward;
  return code ? code : 1;
}

/* Adds the i-th update to the group at aggregator q: returns 1; or 0: it is too late. */
static int group_join(group_run *r, uint32_t i, uint32_t q) {
  double limit, end;
  if (r->members == 0) r->known = 0;
  int walked = group_limit(r, i, q, &limit);
  if (walked != 1) return walked;
  mlfab__bundle bundle = group_bundle(r, i, group_aggregator(r, q));
  r->net->purpose = MLFAB__TO_AGGREGATOR;
  r->net->index = r->in->order ? r->in->order[i] : i;
  r->g->evaluations++;
  walked = r->in->cut ? group_enter(r, &bundle, limit, &end)
                      : mlfab__bundle_reserve(r->net, &bundle, limit, &end);
  if (walked != MLFAB__ENDS) return walked;
  if (group_is_free(r, q) && !mlfab__network_less(end, r->limit)) r->over = 1;
  if (r->members == 0) {
    r->first = i;
    r->ready = 0;
    for (uint32_t j = 0; j < bundle.n; j++) r->g->sizes[j] = 0;
  }
  r->members++;
  if (end > r->ready) r->ready = end;
  for (uint32_t j = 0; j < bundle.n; j++) {
    if (!(bundle.bytes[j] > r->g->sizes[j])) continue;
    r->g->sizes[j] = bundle.bytes[j];
    if (r->members > 1) r->known = 0;
  }
  if (r->out) r->out[i].arrive = end;
  return 1;
}

/* Groups the updates from the n-th on: returns 1 if all are sent, and t_max is T(n); or 0: infeasible, or not below the
 * limit. */
static int group_fill(group_run *r, uint32_t n) {
  uint32_t q = 1, i = n;
  int walked = 1;
  r->members = 0;
  r->g->nlate = r->g->nstretches = 0;
  r->over = 0;
  while (i < r->in->n && walked == 1) {
    if (group_is_over(r)) return 0;
    if (q > r->in->k) {
      if (r->variant != MLFAB__GROUP_TAIL_DIRECT) return 0;
      walked = group_direct(r, i++);
      continue;
    }
    int joined = group_join(r, i, q);
    if (joined < 0) return joined;
    if (joined) {
      i++;
    } else {
      if (r->members > 0) walked = group_flush(r, q);
      q++;
    }
  }
  if (walked == 1 && r->members > 0) walked = group_flush(r, q);
  return walked;
}

static void group_vary(group_run *r, uint32_t variant) {
  r->variant = variant & ~(uint32_t)MLFAB__GROUP_LATE;
  r->late = r->in->cut && (variant & MLFAB__GROUP_LATE) != 0;
}

static int group_run_case(group_run *r, uint32_t n) {
  int walked = 1;
  for (uint32_t i = 0; i < n && walked == 1; i++) walked = group_direct(r, i);
  return walked == 1 ? group_fill(r, n) : walked;
}

/* ---- the search ---- */

/* Is the node on the host of an aggregator of component j, so that its component does not pass that
 * aggregator's ingress? */
static int group_is_beside(const group_run *r, uint32_t node, uint32_t j) {
  for (uint32_t q = 1; q <= r->in->k; q++) {
    if (group_aggregator(r, q)[j] == node) return 1;
  }
  return 0;
}

/* Sums from the end: the bytes through aggregators' ingress, and the largest components. */
static void group_sum(group_run *r) {
  mlfab__group_tail *tail = r->g->tail;
  uint32_t n = r->in->n, servers = r->in->servers;
  tail[n] = (mlfab__group_tail){0, 0};
  for (uint32_t j = 0; j < servers; j++) r->g->largest[(size_t)n * servers + j] = 0;
  for (uint32_t i = n; i > 0; i--) {
    const mlfab__candidate *c = group_update(r, i - 1);
    double *largest = r->g->largest + (size_t)(i - 1) * servers;
    tail[i - 1] = tail[i];
    for (uint32_t j = 0; j < servers; j++) {
      double bytes = c->bytes[j];
      largest[j] = bytes > largest[servers + j] ? bytes : largest[servers + j];
      if (group_is_beside(r, c->node, j)) continue;
      tail[i - 1].bytes = mlfab__network_exact(tail[i - 1].bytes + bytes);
      if (c->node == r->in->server[j]) continue;
      tail[i - 1].to_server = mlfab__network_exact(tail[i - 1].to_server + bytes);
    }
  }
}

/* Adds the tolerance of the comparisons of times and of the ends of transfers. */
static double group_tolerate(double t) { return mlfab__network_exact(t + 4e-9 * (t > 1 ? t : 1)); }

/* Does the node of component j's aggregator, or its server, serve an earlier component, too? */
static int group_is_shared(const group_run *r, const uint32_t *aggregator, uint32_t j) {
  for (uint32_t i = 0; i < j; i++) {
    if (aggregator[i] == aggregator[j] || r->in->server[i] == r->in->server[j]) return 1;
  }
  return j > 0 && r->net->path_count > 0;
}

/* Returns when a sum of these components at aggregator q reaches the servers at the latest, if everything reserved
 * before has ended by t. A component waits at most for those before it. */
static double group_latest(const group_run *r, uint32_t q, const double *bytes, double t) {
  const uint32_t *aggregator = group_aggregator(r, q);
  double latest = t;
  for (uint32_t j = 0; j < r->in->servers && mlfab__finite(latest); j++) {
    double from = group_is_shared(r, aggregator, j) ? latest : t;
    double end = mlfab__network_end(r->net, aggregator[j], r->in->server[j], bytes[j], from);
    if (end > latest) latest = end;
  }
  return latest;
}

/* Returns the bytes that the nodes of aggregator q can receive until then. */
static double group_room(const group_run *r, uint32_t q, double until) {
  const uint32_t *aggregator = group_aggregator(r, q);
  double room = 0;
  for (uint32_t j = 0; j < r->in->servers; j++) {
    int again = 0;
    for (uint32_t i = 0; i < j; i++) again |= aggregator[i] == aggregator[j];
    if (again) continue;
    room = mlfab__network_exact(room + mlfab__network_room(r->net, aggregator[j], until));
  }
  return room;
}

/* Returns 1 if case n is certainly infeasible, or not below the limit. Its direct transfers are reserved, and t_max is
 * theirs. */
static int group_is_vain(const group_run *r, uint32_t n) {
  if (r->variant == MLFAB__GROUP_FIRST_FREE || n == r->in->n) return 0;
  if (r->late && r->crossed) return 0;
  const mlfab__group_tail *tail = &r->g->tail[n];
  const double *largest = r->g->largest + (size_t)n * r->in->servers;
  double t = r->t_max, room = 0, end;
  /* Smaller bytes, as times are longer. */
  double need = mlfab__network_exact(tail->bytes * (1 - 4e-9));
  for (uint32_t q = 1; q <= r->in->k && room < need; q++) {
    /* A late member arrives before its sum would, and the sum at most one transfer later. */
    if (r->late) t = group_latest(r, q, largest, t);
    if (!mlfab__finite(t)) return 0;
    t = group_tolerate(t);
    room = mlfab__network_exact(room + group_room(r, q, t));
    t = group_latest(r, q, largest, t);
    if (!mlfab__finite(t)) return 0;
  }
  if (r->variant == MLFAB__GROUP_PAPER || room >= need) return room < need;
  /* The updates that do not fit into groups go directly. */
  double rest = mlfab__network_exact(tail->to_server * (1 - 4e-9)) - room;
  int walked = mlfab__network_carries(r->net, r->in->server, r->in->servers, mlfab__network_never(),
                                      rest, 0, r->limit, &end);
  if (walked < 0) return walked;
  return walked == MLFAB__LATE || !mlfab__network_less(end, r->limit);
}

/* Tries the cases of a variant, and improves *choice. [E8] Among equal times the smallest n wins: the first time that
 * is not later than the smallest, found after all are known. */
static int group_search(group_run *r, uint32_t variant, mlfab__group_choice *choice) {
  double *times = r->g->times, least = choice->time;
  uint32_t tried = 0, n = r->in->n, most = n;
  group_vary(r, variant);
  r->t_max = r->in->start;
  r->number = 0;
  group_sum(r);
  for (uint32_t i = 0; i <= n; i++) {
    r->limit = least;
    if (mlfab__finite(least) && group_is_over(r)) break;
    double t_max = r->t_max;
    uint32_t mark = mlfab__network_mark(r->net);
    times[tried] = mlfab__network_never();
    /* With n = 0, a free first group may end after any number of members. */
    uint32_t cases = r->variant == MLFAB__GROUP_FIRST_FREE && i == 0 && n > 0 ? n : 1;
    int vain = group_is_vain(r, i);
    if (vain < 0) return vain;
    if (vain) cases = 0;
    for (uint32_t c = 1; c <= cases; c++) {
      r->first_most = cases > 1 ? c : n;
      r->t_max = t_max;
      int walked = group_fill(r, i);
      mlfab__network_undo(r->net, mark);
      if (walked < 0) return walked;
      if (r->over) break; /* also with more members */
      if (walked == 0 || !mlfab__network_less(r->t_max, times[tried])) continue;
      times[tried] = r->t_max;
      if (i == 0) most = r->first_most;
      if (r->t_max < least) r->limit = least = r->t_max;
    }
    r->over = 0;
    tried++;
    r->t_max = t_max;
    int walked = i < n ? group_direct(r, i) : 0;
    if (walked < 0) return walked;
    if (walked == 0) break;
  }
  if (!mlfab__network_less(least, choice->time)) return 0;
  for (uint32_t i = tried; i > 0; i--) {
    if (mlfab__network_less(least, times[i - 1])) continue;
    *choice = (mlfab__group_choice){variant, i - 1, i == 1 ? most : n, times[i - 1]};
  }
  return 0;
}

/* [E9] Nothing is feasible: the updates that can arrive go directly. */
static int group_give_up(group_run *r, mlfab__group_choice *choice) {
  uint32_t i = 0;
  for (; i < r->in->n; i++) {
    int walked = group_direct(r, i);
    if (walked < 0) return walked;
    if (walked == 0) break;
  }
  choice->n = i;
  for (; r->out && i < r->in->n; i++) {
    double never = mlfab__network_never();
    r->out[i] = (mlfab__grouped){.arrive = never, .ready = never, .end = never, .commit = never};
  }
  return 0;
}

static int group_check(const mlfab__network *net, const mlfab__group_input *in) {
  if (in->servers == 0 || !mlfab__finite(in->start) || !(in->start >= 0)) {
    return MLFAB_ERR_ARGUMENT;
  }
  if (in->n > 1u << 28 || in->k > 1u << 28) return MLFAB_ERR_LIMIT;
  for (size_t j = 0; j < in->servers; j++) {
    if (in->server[j] >= net->nodes) return MLFAB_ERR_ARGUMENT;
  }
  for (size_t j = 0; j < (size_t)in->k * in->servers; j++) {
    if (in->aggregators[j] >= net->nodes) return MLFAB_ERR_ARGUMENT;
  }
  for (uint32_t i = 0; i < in->n; i++) {
    const mlfab__candidate *c = &in->updates[in->order ? in->order[i] : i];
    if (c->node >= net->nodes || !(c->available >= 0)) return MLFAB_ERR_ARGUMENT;
    for (uint32_t j = 0; j < in->servers; j++) {
      if (!mlfab__finite(c->bytes[j]) || !(c->bytes[j] >= 0)) return MLFAB_ERR_ARGUMENT;
    }
  }
  return 0;
}

static int group_reserve(mlfab__grouper *g, mlfab__env *env, const mlfab__group_input *in) {
  void *times = mlfab__grow(env, g->times, &g->times_room, (uint64_t)in->n + 1, sizeof *g->times);
  if (times == NULL) return MLFAB_ERR_MEMORY;
  g->times = times;
  void *tail = mlfab__grow(env, g->tail, &g->tail_room, (uint64_t)in->n + 1, sizeof *g->tail);
  if (tail == NULL) return MLFAB_ERR_MEMORY;
  g->tail = tail;
  void *largest = mlfab__grow(env, g->largest, &g->largest_room,
                              ((uint64_t)in->n + 1) * in->servers, sizeof *g->largest);
  if (largest == NULL) return MLFAB_ERR_MEMORY;
  g->largest = largest;
  void *sizes = mlfab__grow(env, g->sizes, &g->sizes_room, in->servers, sizeof *g->sizes);
  if (sizes == NULL) return MLFAB_ERR_MEMORY;
  g->sizes = sizes;
  return 0;
}

MLFAB__INTERNAL void mlfab__group_free(mlfab__grouper *g, mlfab__env *env) {
  mlfab__free(env, g->times, g->times_room * sizeof *g->times);
  mlfab__free(env, g->tail, g->tail_room * sizeof *g->tail);
  mlfab__free(env, g->largest, g->largest_room * sizeof *g->largest);
  mlfab__free(env, g->sizes, g->sizes_room * sizeof *g->sizes);
  mlfab__free(env, g->late, g->late_room * sizeof *g->late);
  mlfab__free(env, g->stretches, g->stretches_room * sizeof *g->stretches);
  mlfab__free(env, g->hubs, g->hubs_room * sizeof *g->hubs);
  mlfab__free(env, g->candidates, g->candidates_room * sizeof *g->candidates);
  mlfab__free(env, g->grouped, g->grouped_room * sizeof *g->grouped);
  mlfab__free(env, g->members, g->members_room * sizeof *g->members);
  memset(g, 0, sizeof *g);
}

/* May a late member delay the sum of its own group? If one node serves all components of an aggregator, it cannot: a
 * member on that node takes no time, and so does a component to a server on it. */
static int group_is_crossed(const group_run *r) {
  const mlfab__group_input *in = r->in;
  for (uint32_t q = 1; q <= in->k; q++) {
    const uint32_t *aggregator = group_aggregator(r, q);
    int same = 1;
    for (uint32_t j = 1; j < in->servers; j++) same &= aggregator[j] == aggregator[0];
    for (uint32_t j = 0; !same && j < in->servers; j++) {
      for (uint32_t i = 0; i < in->servers; i++) {
        if (in->server[i] == aggregator[j]) return 1;
      }
      for (uint32_t i = 0; i < in->n; i++) {
        if (group_update(r, i)->node == aggregator[j]) return 1;
      }
    }
  }
  return r->net->path_count > 0;
}

static int group_begin(group_run *r, mlfab__grouper *g, mlfab__network *net,
                       const mlfab__group_input *in) {
  int code = group_check(net, in);
  if (!code) code = group_reserve(g, net->env, in);
  *r = (group_run){.g = g, .net = net, .in = in, .t_max = in->start};
  r->limit = mlfab__network_never();
  if (!code) r->crossed = group_is_crossed(r);
  return code;
}

MLFAB__INTERNAL int mlfab__group_case(mlfab__grouper *g, mlfab__network *net,
                                      const mlfab__group_input *in, uint32_t variant, uint32_t n,
                                      uint32_t first_most, mlfab__grouped *out, double *time_p) {
  group_run r;
  int code = n > in->n ? MLFAB_ERR_ARGUMENT : group_begin(&r, g, net, in);
  if (code) return code;
  uint32_t mark = mlfab__network_mark(net);
  group_vary(&r, variant);
  r.first_most = first_most;
  r.out = out;
  int walked = group_run_case(&r, n);
  if (walked != 1) mlfab__network_undo(net, mark);
  if (walked < 0) return walked;
  *time_p = walked == 1 ? r.t_max : mlfab__network_never();
  return 0;
}

MLFAB__INTERNAL int mlfab__group_plan(mlfab__grouper *g, mlfab__network *net,
                                      const mlfab__group_input *in, int best, mlfab__grouped *out,
                                      mlfab__group_choice *choice_p) {
  group_run r;
  mlfab__group_choice choice = {.time = mlfab__network_never(), .first_most = in->n};
  int code = group_begin(&r, g, net, in);
  if (code) return code;
  uint32_t mark = mlfab__network_mark(net);
  net->searching++;
  for (uint32_t v = MLFAB__GROUP_PAPER; !code && v <= MLFAB__GROUP_TAIL_DIRECT; v++) {
    if (v != MLFAB__GROUP_PAPER && !best) break;
    code = group_search(&r, v, &choice);
    mlfab__network_undo(net, mark);
    if (!code && in->cut) code = group_search(&r, v | MLFAB__GROUP_LATE, &choice);
    mlfab__network_undo(net, mark);
  }
  net->searching--;
  if (code) return code;
  double time;
  if (mlfab__finite(choice.time)) {
    code = mlfab__group_case(g, net, in, choice.variant, choice.n, choice.first_most, out, &time);
  } else {
    r.t_max = in->start;
    r.number = 0;
    r.out = out;
    code = group_give_up(&r, &choice);
  }
  if (code) mlfab__network_undo(net, mark);
  if (!code) *choice_p = choice;
  return code;
}

MLFAB__INTERNAL int mlfab__group_may_start(const uint64_t *finished, uint32_t n, uint64_t mine,
                                           uint64_t staleness) {
  uint64_t least = mine;
  for (uint32_t i = 0; i < n; i++) least = mlfab__min(least, finished[i]);
  return mine - least <= staleness;
}
