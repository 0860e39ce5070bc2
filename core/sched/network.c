/* network.c - residual capacities, durations of transfers, and reservations: see network.h. */
#include "network.h"

enum {
  NETWORK_FIRST = 4, /* steps of a profile in the slab */
  NETWORK_MOST = 1 << 24
};

/* The end of a last step; later than any finite time in use. */
#define NETWORK_FOREVER 1.7976931348623157e308

struct mlfab__cursor {
  const mlfab__step *at, *last;
};

/* ---- memory ---- */

#define NETWORK_GROW(net, array, room, need)                                               \
  do {                                                                                     \
    if ((need) <= (net)->room && (net)->array != NULL) break;                              \
    void *grown_ =                                                                         \
        mlfab__grow((net)->env, (net)->array, &(net)->room, (need), sizeof *(net)->array); \
    if (grown_ == NULL) return MLFAB_ERR_MEMORY;                                           \
    (net)->array = grown_;                                                                 \
  } while (0)

static uint32_t network_profiles(const mlfab__network *net) { return 2 * net->nodes + net->links; }

/* Makes room for `need` steps in a profile. */
static inline int network_grow(mlfab__network *net, mlfab__profile *profile, uint64_t need) {
  if (need <= profile->room) return 0;
  uint32_t room = profile->room;
  void *old = room > NETWORK_FIRST ? profile->steps : NULL;
  mlfab__step *steps = mlfab__grow(net->env, old, &room, need, sizeof *steps);
  if (steps == NULL) return MLFAB_ERR_MEMORY;
  if (old == NULL && profile->steps != NULL)
    memcpy(steps, profile->steps, profile->n * sizeof *steps);
  profile->steps = steps;
  profile->room = room;
  return 0;
}

MLFAB__INTERNAL int mlfab__network_init(mlfab__network *net, mlfab__env *env, uint32_t nodes,
                                        uint32_t links) {
  memset(net, 0, sizeof *net);
  if (nodes == 0) return MLFAB_ERR_ARGUMENT;
  if (nodes > NETWORK_MOST || links > NETWORK_MOST) return MLFAB_ERR_LIMIT;
  net->env = env;
  net->nodes = nodes;
  net->links = links;
  uint32_t count = network_profiles(net);
  net->cursors_room = 2 + NETWORK_FIRST;
  net->profiles = mlfab__alloc_array(env, count, sizeof *net->profiles);
  net->slab = mlfab__alloc_array(env, (size_t)count * NETWORK_FIRST, sizeof *net->slab);
  net->cursors = mlfab__alloc_array(env, net->cursors_room, sizeof *net->cursors);
  if (!net->profiles || !net->slab || !net->cursors) {
    mlfab__network_free(net);
    return MLFAB_ERR_MEMORY;
  }
  for (uint32_t i = 0; i < count; i++) {
    net->profiles[i] = (mlfab__profile){
        .steps = net->slab + (size_t)i * NETWORK_FIRST, .n = 1, .room = NETWORK_FIRST};
  }
  return 0;
}

MLFAB__INTERNAL void mlfab__network_free(mlfab__network *net) {
  mlfab__env *env = net->env;
  if (env == NULL) return;
  uint32_t count = network_profiles(net);
  for (uint32_t i = 0; net->profiles && i < count; i++) {
    mlfab__profile *p = &net->profiles[i];
    if (p->room > NETWORK_FIRST) mlfab__free(env, p->steps, p->room * sizeof *p->steps);
  }
  mlfab__free(env, net->profiles, count * sizeof *net->profiles);
  mlfab__free(env, net->slab, (size_t)count * NETWORK_FIRST * sizeof *net->slab);
  mlfab__map_free(env, &net->paths);
  mlfab__free(env, net->path_links, net->path_room * sizeof *net->path_links);
  mlfab__free(env, net->changes, net->changes_room * sizeof *net->changes);
  mlfab__free(env, net->replaced, net->replaced_room * sizeof *net->replaced);
  mlfab__free(env, net->built, net->built_room * sizeof *net->built);
  mlfab__free(env, net->pieces, net->pieces_room * sizeof *net->pieces);
  mlfab__free(env, net->cursors, net->cursors_room * sizeof *net->cursors);
  memset(net, 0, sizeof *net);
}

/* ---- capacities and paths ---- */

static mlfab__profile *network_profile(const mlfab__network *net, enum mlfab__capacity_kind kind,
                                       uint32_t index) {
  if (index >= (kind == MLFAB__SHARED ? net->links : net->nodes)) return NULL;
  if (kind == MLFAB__EGRESS) return &net->profiles[index];
  if (kind == MLFAB__INGRESS) return &net->profiles[net->nodes + index];
  return &net->profiles[2 * net->nodes + index];
}

static int network_is_rate(double rate) { return mlfab__finite(rate) && rate >= 0; }

MLFAB__INTERNAL int mlfab__network_capacity(mlfab__network *net, enum mlfab__capacity_kind kind,
                                            uint32_t index, uint32_t n, const double *at,
                                            const double *rate) {
  mlfab__profile *profile = network_profile(net, kind, index);
  if (profile == NULL || n == 0) return MLFAB_ERR_ARGUMENT;
  for (uint32_t i = 0; i < n; i++) {
    if (!network_is_rate(at[i]) || !network_is_rate(rate[i])) return MLFAB_ERR_ARGUMENT;
    if (i == 0 ? at[i] > 0 : at[i] <= at[i - 1]) return MLFAB_ERR_ARGUMENT;
  }
  if (net->nchanges > 0) return MLFAB_ERR_STATE;
  int code = network_grow(net, profile, n);
  if (code) return code;
  profile->n = 0;
  for (uint32_t i = 0; i < n; i++) {
    /* Adding 0 turns a negative zero into a positive one. */
    mlfab__step step = {at[i] + 0.0, rate[i] + 0.0};
    if (i > 0 && profile->steps[profile->n - 1].rate == step.rate) continue;
    profile->steps[profile->n++] = step;
  }
  return 0;
}

MLFAB__INTERNAL int mlfab__network_constant(mlfab__network *net, enum mlfab__capacity_kind kind,
                                            uint32_t index, double rate) {
  const double zero = 0;
  return mlfab__network_capacity(net, kind, index, 1, &zero, &rate);
}

static uint64_t network_key(const mlfab__network *net, uint32_t from, uint32_t to) {
  return (uint64_t)from * net->nodes + to + 1;
}

MLFAB__INTERNAL int mlfab__network_path(mlfab__network *net, uint32_t from, uint32_t to, uint32_t n,
                                        const uint32_t *links) {
  uint32_t there;
  if (from >= net->nodes || to >= net->nodes || from == to) return MLFAB_ERR_ARGUMENT;
  for (uint32_t i = 0; i < n; i++) {
    if (links[i] >= net->links) return MLFAB_ERR_ARGUMENT;
    for (uint32_t j = 0; j < i; j++) {
      if (links[j] == links[i]) return MLFAB_ERR_ARGUMENT;
    }
  }
  if (mlfab__map_get(&net->paths, network_key(net, from, to), &there)) return MLFAB_ERR_ARGUMENT;
  if (n == 0) return 0;
  NETWORK_GROW(net, path_links, path_room, (uint64_t)net->path_count + n + 1);
  NETWORK_GROW(net, cursors, cursors_room, (uint64_t)n + 2);
  int code = mlfab__map_put(net->env, &net->paths, network_key(net, from, to), net->path_count);
  if (code) return code;
  net->path_links[net->path_count++] = n;
  memcpy(net->path_links + net->path_count, links, n * sizeof *links);
  net->path_count += n;
  if (n > net->path_longest) net->path_longest = n;
  return 0;
}

MLFAB__INTERNAL void mlfab__network_reset(mlfab__network *net) {
  for (uint32_t i = 0; i < network_profiles(net); i++) {
    net->profiles[i].n = 1;
    net->profiles[i].steps[0] = (mlfab__step){0, 0};
  }
  mlfab__network_keep(net);
}

MLFAB__INTERNAL const mlfab__profile *mlfab__network_residual(const mlfab__network *net,
                                                              enum mlfab__capacity_kind kind,
                                                              uint32_t index) {
  return network_profile(net, kind, index);
}

/* ---- walking ---- */

/* Returns the index of the step at time t. Callers ask most often for late times. */
static uint32_t network_seek(const mlfab__profile *profile, double t) {
  const mlfab__step *steps = profile->steps;
  uint32_t low = 1, high = profile->n;
  if (steps[high - 1].at <= t) return high - 1;
  MLFAB__SEARCH(low, high, at, steps[at].at <= t)
  return low - 1;
}

static struct mlfab__cursor network_cursor(const mlfab__profile *profile, double t) {
  struct mlfab__cursor c = {profile->steps + network_seek(profile, t),
                            profile->steps + profile->n - 1};
  return c;
}

/* Returns the links of the path, behind the two nodes; NULL: none. Swaps *from_p and *to_p in a mirrored network. */
static const uint32_t *network_route(const mlfab__network *net, uint32_t *from_p, uint32_t *to_p) {
  uint32_t at;
  if (net->mirror) {
    uint32_t from = *from_p;
    *from_p = *to_p;
    *to_p = from;
  }
  if (net->path_count == 0) return NULL;
  if (!mlfab__map_get(&net->paths, network_key(net, *from_p, *to_p), &at)) return NULL;
  return net->path_links + at;
}

/* Returns the profile of a path's nth resource, of 2 + links[0]. */
static uint32_t network_resource(const mlfab__network *net, uint32_t from, uint32_t to,
                                 const uint32_t *links, uint32_t nth) {
  if (nth == 0) return from;
  if (nth == 1) return net->nodes + to;
  return 2 * net->nodes + links[nth - 1];
}

/* Collects the stretches of a walk; the caller has made room. */
typedef struct network_record {
  mlfab__stretch *pieces;
  uint32_t n;
} network_record;

static inline void network_note(network_record *record, double from, double to, double rate) {
  mlfab__stretch *last = &record->pieces[record->n];
  if (!(to > from)) return;
  if (record->n > 0 && last[-1].to == from && last[-1].rate == rate) {
    last[-1].to = to;
    return;
  }
  *last = (mlfab__stretch){from, to, rate};
  record->n++;
}

static inline double network_until(const struct mlfab__cursor *c) {
  return c->at < c->last ? c->at[1].at : NETWORK_FOREVER;
}

/* Returns the smallest rate of `n` profiles; `together`: their sum, but at most `most`. *until_p: when the first of
 * them changes. */
static inline double network_rate(const struct mlfab__cursor *c, uint32_t n, int together,
                                  double most, double *until_p) {
  double rate = c[0].at->rate, until = network_until(&c[0]);
  for (uint32_t i = 1; i < n; i++) {
    double next = network_until(&c[i]), other = c[i].at->rate;
    if (next < until) until = next;
    if (together) {
      rate = mlfab__network_exact(rate + other);
    } else if (other < rate) {
      rate = other;
    }
  }
  *until_p = until;
  return together && most < rate ? most : rate;
}

/* Walks `n` profiles in parallel from t until `bytes` are sent (ENDS), or until it is past `stop` (LATE, *end_p: the
 * time reached). [N2] A transfer ends within a stretch if all but 1e-9 of it fits. */
static inline int network_walk(struct mlfab__cursor *c, uint32_t n, int together, double most,
                               double bytes, double t, double stop, network_record *record,
                               double *end_p) {
  const double slack = mlfab__network_exact(1e-9 * bytes);
  double left = bytes;
  while (t <= stop) {
    double until, rate = network_rate(c, n, together, most, &until);
    if (rate > 0) {
      double end = mlfab__network_exact(t + left / mlfab__network_exact(rate));
      double carried = until < NETWORK_FOREVER ? mlfab__network_exact((until - t) * rate) : left;
      if (carried >= mlfab__network_exact(left - slack)) {
        *end_p = end < until ? end : until;
        if (record) network_note(record, t, *end_p, rate);
        return MLFAB__ENDS;
      }
      if (record) network_note(record, t, until, rate);
      left = mlfab__network_exact(left - carried);
    }
    t = until;
    if (!(until < NETWORK_FOREVER)) break;
    for (uint32_t i = 0; i < n; i++) {
      if (c[i].at < c[i].last && c[i].at[1].at <= until) c[i].at++;
    }
  }
  *end_p = t < NETWORK_FOREVER ? t : mlfab__network_never();
  return MLFAB__LATE;
}

/* Returns a time after which every end is late by mlfab__network_less. */
static double network_stop(double limit) {
  if (!mlfab__finite(limit)) return NETWORK_FOREVER / 2;
  return mlfab__network_exact(limit + 2e-9 * (limit > 1 ? limit : 1));
}

/* Follows one transfer: ENDS with its end, which may be later than the limit by one step, or LATE. */
static int network_follow(const mlfab__network *net, uint32_t from, uint32_t to, double bytes,
                          double available, double limit, network_record *record, double *end_p) {
  *end_p = available;
  if (!mlfab__finite(available)) return MLFAB__LATE;
  if (from == to || !(bytes > 0)) return MLFAB__ENDS;
  const uint32_t *links = network_route(net, &from, &to);
  double stop = network_stop(limit);
  if (links == NULL) {
    struct mlfab__cursor two[2] = {network_cursor(&net->profiles[from], available),
                                   network_cursor(&net->profiles[net->nodes + to], available)};
    return network_walk(two, 2, 0, 0, bytes, available, stop, record, end_p);
  }
  uint32_t n = 2 + links[0];
  for (uint32_t i = 0; i < n; i++) {
    uint32_t resource = network_resource(net, from, to, links, i);
    net->cursors[i] = network_cursor(&net->profiles[resource], available);
  }
  return network_walk(net->cursors, n, 0, 0, bytes, available, stop, record, end_p);
}

MLFAB__INTERNAL double mlfab__network_end(const mlfab__network *net, uint32_t from, uint32_t to,
                                          double bytes, double available) {
  double end;
  int walked = network_follow(net, from, to, bytes, available, mlfab__network_never(), NULL, &end);
  return walked == MLFAB__ENDS ? end : mlfab__network_never();
}

/* Returns the profile that transfers to a node use there, and those from it. */
static const mlfab__profile *network_into(const mlfab__network *net, uint32_t node) {
  return &net->profiles[net->mirror ? node : net->nodes + node];
}

static const mlfab__profile *network_out_of(const mlfab__network *net, uint32_t node) {
  return &net->profiles[net->mirror ? net->nodes + node : node];
}

MLFAB__INTERNAL int mlfab__network_carries(mlfab__network *net, const uint32_t *to, uint32_t n,
                                           double most, double bytes, double available,
                                           double limit, double *end_p) {
  uint32_t count = 0;
  *end_p = available;
  if (!(bytes > 0)) return MLFAB__ENDS;
  NETWORK_GROW(net, cursors, cursors_room, n);
  for (uint32_t j = 0; j < n; j++) {
    struct mlfab__cursor c = network_cursor(network_into(net, to[j]), available);
    int again = 0; /* a node that is listed twice */
    for (uint32_t i = 0; i < count; i++) again |= net->cursors[i].last == c.last;
    if (!again) net->cursors[count++] = c;
  }
  return network_walk(net->cursors, count, 1, most, bytes, available, network_stop(limit), NULL,
                      end_p);
}

MLFAB__INTERNAL double mlfab__network_idle(const mlfab__network *net, const uint32_t *to,
                                           uint32_t n, double available) {
  double first = mlfab__network_never();
  for (uint32_t j = 0; j < n; j++) {
    struct mlfab__cursor c = network_cursor(network_into(net, to[j]), available);
    while (c.at < c.last && !(c.at->rate > 0)) c.at++;
    if (c.at->rate > 0 && c.at->at < first) first = c.at->at;
  }
  return first > available ? first : available;
}

MLFAB__INTERNAL double mlfab__network_most(const mlfab__network *net, uint32_t from) {
  const mlfab__profile *p = network_out_of(net, from);
  double most = 0;
  for (uint32_t k = 0; k < p->n; k++) {
    if (p->steps[k].rate > most) most = p->steps[k].rate;
  }
  return most;
}

MLFAB__INTERNAL double mlfab__network_room(const mlfab__network *net, uint32_t to, double until) {
  const mlfab__profile *p = network_into(net, to);
  double sum = 0;
  for (uint32_t k = 0; k < p->n && p->steps[k].at < until; k++) {
    double end = k + 1 < p->n && p->steps[k + 1].at < until ? p->steps[k + 1].at : until;
    sum =
        mlfab__network_exact(sum + mlfab__network_exact((end - p->steps[k].at) * p->steps[k].rate));
  }
  return sum;
}

/* ---- reserving ---- */

/* Appends a step, or extends the last one if the rate is the same. */
static inline uint32_t network_build(mlfab__step *built, uint32_t n, double at, double rate) {
  if (n > 0 && built[n - 1].rate == rate) return n;
  built[n] = (mlfab__step){at, rate};
  return n + 1;
}

/* Subtracts a piece from a profile, and logs the steps that it replaces. The caller has made room. */
static void network_subtract(mlfab__network *net, uint32_t resource, const mlfab__stretch *piece) {
  mlfab__profile *p = &net->profiles[resource];
  mlfab__step *steps = p->steps, *built = net->built;
  uint32_t first = network_seek(p, piece->from), end = first, n = 0;
  if (steps[first].at < piece->from) {
    n = network_build(built, n, steps[first].at, steps[first].rate);
  } else if (first > 0) {
    /* The step before may now have the same rate: then the two are merged. */
    first--;
    n = network_build(built, n, steps[first].at, steps[first].rate);
    end = first + 1;
  }
  while (end < p->n && steps[end].at < piece->to) {
    double at = steps[end].at > piece->from ? steps[end].at : piece->from;
    n = network_build(built, n, at, steps[end].rate - piece->rate);
    end++;
  }
  if (end == p->n || steps[end].at > piece->to) {
    n = network_build(built, n, piece->to, steps[end - 1].rate);
  } else if (steps[end].rate == built[n - 1].rate) {
    end++; /* the next step has the same rate now: merge it */
  }
  /* Keeps a first step that did not change. */
  uint32_t same = built[0].at == steps[first].at && built[0].rate == steps[first].rate;
  first += same;
  mlfab__change change = {resource, first, end - first, n - same};
  memcpy(net->replaced + net->nreplaced, steps + first, change.before * sizeof *steps);
  net->nreplaced += change.before;
  if (change.before != change.after) {
    memmove(steps + first + change.after, steps + end, (p->n - end) * sizeof *steps);
    p->n = p->n + change.after - change.before;
  }
  memcpy(steps + first, built + same, change.after * sizeof *steps);
  net->changes[net->nchanges++] = change;
}

/* Makes room for the stretches of one transfer along these resources. */
static int network_prepare(mlfab__network *net, uint32_t from, uint32_t to, const uint32_t *links) {
  uint32_t n = 2 + (links ? links[0] : 0);
  uint64_t steps = 0, most = 0;
  for (uint32_t i = 0; i < n; i++) {
    uint32_t have = net->profiles[network_resource(net, from, to, links, i)].n;
    steps += have;
    most = mlfab__max(most, have);
  }
  NETWORK_GROW(net, pieces, pieces_room, steps + 1);
  NETWORK_GROW(net, built, built_room, most + 2 * steps + 4);
  return 0;
}

/* Makes room for subtracting these pieces, so that nothing fails afterwards. */
static int network_room_for(mlfab__network *net, uint32_t from, uint32_t to, const uint32_t *links,
                            uint32_t npieces) {
  uint32_t n = 2 + (links ? links[0] : 0);
  uint64_t steps = 0;
  for (uint32_t i = 0; i < n; i++) {
    mlfab__profile *p = &net->profiles[network_resource(net, from, to, links, i)];
    int code = network_grow(net, p, p->n + 2 * (uint64_t)npieces);
    if (code) return code;
    /* Every piece replaces the steps that it covers, and their neighbours. */
    steps += p->n + 4 * (uint64_t)npieces;
  }
  NETWORK_GROW(net, changes, changes_room, net->nchanges + (uint64_t)n * npieces);
  NETWORK_GROW(net, replaced, replaced_room, net->nreplaced + steps);
  return 0;
}

static void network_tell(mlfab__network *net, uint32_t from, uint32_t to, double bytes,
                         double available, double end, uint32_t component, uint32_t npieces) {
  mlfab__transfer t = {.purpose = net->purpose,
                       .index = net->index,
                       .component = component,
                       .from = from,
                       .to = to,
                       .bytes = bytes,
                       .available = available,
                       .end = end,
                       .pieces = net->pieces,
                       .n = npieces};
  if (net->watch && !net->searching) net->watch(net->user, &t);
}

/* Reserves one transfer if it ends by `limit`. */
static int network_reserve_by(mlfab__network *net, uint32_t from, uint32_t to, double bytes,
                              double available, double limit, uint32_t component, double *end_p) {
  uint32_t charged_from = from, charged_to = to;
  if (from == to || !(bytes > 0)) {
    *end_p = available;
    net->npieces = 0;
    if (!mlfab__finite(available) || mlfab__network_less(limit, available)) return MLFAB__LATE;
    network_tell(net, from, to, bytes, available, available, component, 0);
    return MLFAB__ENDS;
  }
  const uint32_t *links = network_route(net, &charged_from, &charged_to);
  int code = network_prepare(net, charged_from, charged_to, links);
  if (code) return code;
  network_record record = {net->pieces, 0};
  int walked = network_follow(net, from, to, bytes, available, limit, &record, end_p);
  if (walked == MLFAB__LATE || mlfab__network_less(limit, *end_p)) return MLFAB__LATE;
  code = network_room_for(net, charged_from, charged_to, links, record.n);
  if (code) return code;
  uint32_t n = 2 + (links ? links[0] : 0);
  for (uint32_t i = 0; i < n; i++) {
    uint32_t resource = network_resource(net, charged_from, charged_to, links, i);
    for (uint32_t k = 0; k < record.n; k++) network_subtract(net, resource, &record.pieces[k]);
  }
  net->npieces = record.n;
  network_tell(net, from, to, bytes, available, *end_p, component, record.n);
  return MLFAB__ENDS;
}

MLFAB__INTERNAL int mlfab__network_reserve(mlfab__network *net, uint32_t from, uint32_t to,
                                           double bytes, double available, double *end_p) {
  double never = mlfab__network_never(), end = never;
  int walked = network_reserve_by(net, from, to, bytes, available, never, 0, &end);
  if (walked < 0) return walked;
  *end_p = walked == MLFAB__ENDS ? end : never;
  return 0;
}

MLFAB__INTERNAL int mlfab__network_release(mlfab__network *net, uint32_t from, uint32_t to,
                                           const mlfab__stretch *pieces, uint32_t n) {
  const uint32_t *links = network_route(net, &from, &to);
  if (n == 0) return 0;
  int code = network_prepare(net, from, to, links);
  if (!code) code = network_room_for(net, from, to, links, n);
  for (uint32_t i = 0; !code && i < 2 + (links ? links[0] : 0); i++) {
    for (uint32_t k = 0; k < n; k++) {
      mlfab__stretch back = {pieces[k].from, pieces[k].to, -pieces[k].rate};
      network_subtract(net, network_resource(net, from, to, links, i), &back);
    }
  }
  return code;
}

MLFAB__INTERNAL uint32_t mlfab__network_mark(const mlfab__network *net) { return net->nchanges; }

MLFAB__INTERNAL void mlfab__network_undo(mlfab__network *net, uint32_t mark) {
  while (net->nchanges > mark) {
    const mlfab__change *c = &net->changes[--net->nchanges];
    mlfab__profile *p = &net->profiles[c->profile];
    net->nreplaced -= c->before;
    if (c->before != c->after) {
      memmove(p->steps + c->first + c->before, p->steps + c->first + c->after,
              (p->n - c->first - c->after) * sizeof *p->steps);
      p->n = p->n + c->before - c->after;
    }
    memcpy(p->steps + c->first, net->replaced + net->nreplaced, c->before * sizeof *p->steps);
  }
}

MLFAB__INTERNAL void mlfab__network_keep(mlfab__network *net) {
  net->nchanges = 0;
  net->nreplaced = 0;
}

/* ---- bundles ---- */

MLFAB__INTERNAL int mlfab__bundle_reserve(mlfab__network *net, const mlfab__bundle *bundle,
                                          double limit, double *end_p) {
  uint32_t mark = mlfab__network_mark(net);
  double latest = bundle->available;
  if (bundle->n > 1 && net->watch && !net->searching) {
    /* The watcher hears only of bundles that fit in the end. */
    int walked = mlfab__bundle_end(net, bundle, limit, end_p);
    if (walked != MLFAB__ENDS) return walked;
  }
  for (uint32_t j = 0; j < bundle->n; j++) {
    double end = latest;
    int walked = network_reserve_by(net, bundle->from[bundle->from_step * j],
                                    bundle->to[bundle->to_step * j], bundle->bytes[j],
                                    bundle->available, limit, bundle->component + j, &end);
    if (walked != MLFAB__ENDS) {
      mlfab__network_undo(net, mark);
      if (walked == MLFAB__LATE) *end_p = end;
      return walked;
    }
    if (end > latest) latest = end;
  }
  *end_p = latest;
  return MLFAB__ENDS;
}

MLFAB__INTERNAL int mlfab__bundle_end(mlfab__network *net, const mlfab__bundle *bundle,
                                      double limit, double *end_p) {
  if (bundle->n == 1) {
    return network_follow(net, bundle->from[0], bundle->to[0], bundle->bytes[0], bundle->available,
                          limit, NULL, end_p);
  }
  /* Each component must see the reservations of the earlier components. */
  uint32_t mark = mlfab__network_mark(net);
  net->searching++;
  int walked = mlfab__bundle_reserve(net, bundle, limit, end_p);
  net->searching--;
  mlfab__network_undo(net, mark);
  return walked;
}

/* ---- cut-through ---- */

/* The bytes that a course has brought, or a path could have carried, by a time; the times must ascend. */
typedef struct network_carried {
  const mlfab__stretch *pieces;
  uint32_t n;
  double before; /* in stretches that are over */
} network_carried;

static double network_carried_by(network_carried *c, double t) {
  for (; c->n > 0 && c->pieces->to <= t; c->n--, c->pieces++) {
    double bytes = mlfab__network_exact((c->pieces->to - c->pieces->from) * c->pieces->rate);
    c->before = mlfab__network_exact(c->before + bytes);
  }
  if (c->n == 0 || c->pieces->from >= t) return c->before;
  return mlfab__network_exact(c->before +
                              mlfab__network_exact((t - c->pieces->from) * c->pieces->rate));
}

/* Returns the largest number of bytes by which the path could be ahead of the arriving bytes. The maximum is at a time
 * when the path slows down, or bytes arrive again, or at the end. A lead that the comparison of times allows counts as
 * none. */
static double network_lead(const mlfab__stretch *path, uint32_t n, const mlfab__course *in) {
  double most = 0, t = 0;
  uint32_t i = 0, k = 0;
  network_carried could = {path, n, 0}, come = {in->pieces, in->n, in->have};
  while (t < in->at) {
    double rate = i < n ? path[i].rate : 0;
    t = in->at;
    if (i < n && path[i].to < t) t = path[i].to;
    if (k < in->n && in->pieces[k].from < t) t = in->pieces[k].from;
    while (i < n && path[i].to <= t) i++;
    while (k < in->n && in->pieces[k].from <= t) k++;
    double ahead = network_carried_by(&could, t) - network_carried_by(&come, t);
    double explained = mlfab__network_exact(2e-9 * in->bytes) +
                       mlfab__network_exact(1e-9 * (t > 1 ? t : 1) * rate);
    if (ahead > explained && ahead > most) most = ahead;
  }
  return most;
}

MLFAB__INTERNAL int mlfab__network_cut_through(mlfab__network *net, uint32_t from, uint32_t to,
                                               double available, const mlfab__course *in,
                                               double *begin_p) {
  uint32_t charged_from = from, charged_to = to;
  double end;
  *begin_p = in->at > available ? in->at : available;
  if (!(in->at > available) || from == to || !mlfab__finite(in->at)) return 0;
  const uint32_t *links = network_route(net, &charged_from, &charged_to);
  int code = network_prepare(net, charged_from, charged_to, links);
  if (code) return code;
  network_record record = {net->pieces, 0};
  network_follow(net, from, to, NETWORK_FOREVER / 2, available, in->at, &record, &end);
  double lead = network_lead(net->pieces, record.n, in);
  *begin_p = mlfab__network_end(net, from, to, lead, available);
  return 0;
}
