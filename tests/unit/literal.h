/* literal.h - Alg. 1, 2 and 3 of MLfabric as they are written, for comparison: every iteration looks at
 * every update, every case is computed to its end, and networks are copied instead of undone. */
#ifndef MLFAB_TEST_LITERAL_H
#define MLFAB_TEST_LITERAL_H

#include "batches.h"

enum { LITERAL_STRETCHES = 512 };

static inline int literal_less(double a, double b) { return mlfab__network_less(a, b); }
static inline int literal_is_time(double t) { return mlfab__finite(t) && t < 1e300; }

static inline void literal_copy(mlfab__network *to, const mlfab__network *from) {
  batch_copy_network(to, from);
}

/* Reserves the components of a bundle one after another, permanently, and returns when it ends. Returns
 * "never" and reserves nothing if it cannot. */
static inline double literal_send(mlfab__network *net, const uint32_t *from, uint32_t from_step,
                                  const uint32_t *to, const double *bytes, uint32_t n,
                                  double available) {
  uint32_t mark = mlfab__network_mark(net);
  double latest = available;
  for (uint32_t j = 0; j < n; j++) {
    double end;
    assert_int_equal(
        mlfab__network_reserve(net, from[from_step * j], to[j], bytes[j], available, &end), 0);
    if (!literal_is_time(end)) {
      mlfab__network_undo(net, mark);
      return mlfab__network_never();
    }
    latest = end > latest ? end : latest;
  }
  return latest;
}

static inline double literal_end(mlfab__network *net, const mlfab__candidate *c, const uint32_t *to,
                                 uint32_t n) {
  if (n == 1) return mlfab__network_end(net, c->node, to[0], c->bytes[0], c->available);
  uint32_t mark = mlfab__network_mark(net);
  double end = literal_send(net, &c->node, 0, to, c->bytes, n, c->available);
  mlfab__network_undo(net, mark);
  return end;
}

/* The argmin of t_en over those with member[g]; BATCH_MOST when none of them arrives. */
static inline uint32_t literal_argmin(mlfab__network *net, const mlfab__batch *b, const int *member,
                                      double *end_p) {
  double end[BATCH_MOST], least = mlfab__network_never();
  for (uint32_t g = 0; g < b->n; g++) {
    if (!member[g]) continue;
    end[g] = literal_end(net, &b->updates[g], b->server, b->servers);
    if (end[g] < least) least = end[g];
  }
  for (uint32_t g = 0; g < b->n && literal_is_time(least); g++) {
    if (!member[g] || literal_less(least, end[g])) continue;
    *end_p = end[g];
    return g;
  }
  return BATCH_MOST;
}

static mlfab__network literal_before[BATCH_MOST + 1]; /* acceptance i */

/* Alg. 2, or Alg. 1 with deadlines = 0. Leaves the updates that are applied reserved in `net`. */
static inline uint32_t literal_order(const mlfab__network *base, const mlfab__batch *b,
                                     int deadlines, mlfab__ordered *out) {
  int fate[BATCH_MOST] = {0}, member[BATCH_MOST];
  uint32_t n = 0;
  literal_copy(&literal_before[0], base);
  for (;;) {
    mlfab__network *net = &literal_before[n];
    int64_t p = n + 1;
    uint8_t reason = MLFAB__DEADLINE;
    double end;
#define LITERAL_DL(g)                        \
  (!deadlines || b->delay_bound == INT64_MAX \
       ? INT64_MAX                           \
       : b->updates[g].version + b->delay_bound - b->version)
    for (uint32_t g = 0; g < b->n; g++) member[g] = !fate[g] && LITERAL_DL(g) == p;
    uint32_t g = literal_argmin(net, b, member, &end);
    if (g == BATCH_MOST) {
      reason = MLFAB__SHORTEST;
      for (g = 0; g < b->n; g++) member[g] = !fate[g] && LITERAL_DL(g) >= p;
      g = literal_argmin(net, b, member, &end);
    }
    if (g == BATCH_MOST) break;
    if (n > 0 && out[n - 1].reason == MLFAB__DEADLINE && literal_less(end, out[n - 1].end)) {
      fate[out[--n].update] = MLFAB__LOOKAHEAD;
      continue;
    }
    fate[g] = reason;
    literal_copy(&literal_before[n + 1], net);
    literal_send(&literal_before[n + 1], &b->updates[g].node, 0, b->server, b->updates[g].bytes,
                 b->servers, b->updates[g].available);
    out[n++] = (mlfab__ordered){g, reason, end};
  }
  uint32_t at = n;
  for (uint32_t g = 0; g < b->n; g++) {
    if (fate[g] == MLFAB__DEADLINE || fate[g] == MLFAB__SHORTEST) continue;
    uint8_t why = fate[g]                          ? (uint8_t)fate[g]
                  : LITERAL_DL(g) < (int64_t)n + 1 ? MLFAB__EXPIRED
                                                   : MLFAB__UNREACHABLE;
    out[at++] = (mlfab__ordered){g, why, mlfab__network_never()};
  }
  return n;
}

/* How each component reaches the group that is being filled: [component][member]. */
typedef struct literal_arrival {
  mlfab__course course;
  mlfab__stretch pieces[LITERAL_STRETCHES];
} literal_arrival;

static literal_arrival literal_came[BATCH_SERVERS][BATCH_MOST];
static uint32_t literal_component, literal_member;

static inline void literal_watch(void *user, const mlfab__transfer *t) {
  literal_arrival *a = &literal_came[literal_component++][literal_member];
  (void)user;
  assert_true(t->n <= LITERAL_STRETCHES);
  if (t->n > 0) memcpy(a->pieces, t->pieces, t->n * sizeof *a->pieces);
  a->course = (mlfab__course){.pieces = a->pieces, .n = t->n, .bytes = t->bytes, .at = t->end};
}

/* Sends a member to its aggregator and records how. */
static inline void literal_enter(mlfab__network *net, const mlfab__candidate *c, const uint32_t *a,
                                 uint32_t m, uint32_t member) {
  literal_component = 0;
  literal_member = member;
  net->watch = literal_watch;
  literal_send(net, &c->node, 0, a, c->bytes, m, c->available);
  net->watch = NULL;
}

/* Sends the sum, forwarded while its inputs arrive: each component starts at t_max, or when all inputs have
 * arrived if that is earlier, and is delayed so that it never runs ahead of a member's bytes. */
static inline double literal_forward(mlfab__network *net, const mlfab__group_input *in,
                                     const uint32_t *a, const double *size, uint32_t members,
                                     double t_max, double ready) {
  double latest = ready;
  for (uint32_t j = 0; j < in->servers; j++) {
    double from = ready < t_max ? ready : t_max, end;
    for (uint32_t k = 0; k < members; k++) {
      assert_int_equal(mlfab__network_cut_through(net, a[j], in->server[j], from,
                                                  &literal_came[j][k].course, &from),
                       0);
    }
    assert_int_equal(mlfab__network_reserve(net, a[j], in->server[j], size[j], from, &end), 0);
    if (!literal_is_time(end)) return mlfab__network_never();
    latest = end > latest ? end : latest;
  }
  return latest;
}

/* When a sum of this size that starts at t_max would arrive at the servers. */
static inline double literal_would_end(mlfab__network *net, const mlfab__group_input *in,
                                       const uint32_t *a, const double *size, double t_max) {
  uint32_t mark = mlfab__network_mark(net);
  double end = literal_send(net, a, 1, in->server, size, in->servers, t_max);
  mlfab__network_undo(net, mark);
  return end;
}

/* DetAgg(n), into `net`, which holds the reservations made before the batch. */
static inline double literal_case(mlfab__network *net, const mlfab__group_input *in,
                                  uint32_t variant, uint32_t n, uint32_t most,
                                  mlfab__grouped *out) {
  double t_max = in->start, ready = 0, size[BATCH_SERVERS], never = mlfab__network_never();
  uint32_t q = 1, i = 0, first = 0, members = 0, number = 0, m = in->servers;
  int late = in->cut && variant & MLFAB__GROUP_LATE;
  variant &= 3;
  for (;;) {
    const mlfab__candidate *c = i < in->n ? &in->updates[in->order[i]] : NULL;
    if (c && (i < n || (q > in->k && variant == MLFAB__GROUP_TAIL_DIRECT))) {
      double t = literal_send(net, &c->node, 0, in->server, c->bytes, m, c->available);
      if (!literal_is_time(t)) return never;
      t_max = t > t_max ? t : t_max;
      out[i++] = (mlfab__grouped){0, ++number, t, c->available, t, t_max};
      continue;
    }
    if (c && q > in->k) return never;
    const uint32_t *a = in->aggregators + (q - 1) * m;
    int free_one = variant == MLFAB__GROUP_FIRST_FREE && q == 1;
    double t = c ? literal_end(net, c, a, m) : never, limit = t_max;
    if (c && late) limit = literal_would_end(net, in, a, members > 0 ? size : c->bytes, t_max);
    if (c && literal_is_time(t) && !(free_one ? members == most : literal_less(limit, t))) {
      literal_enter(net, c, a, m, members);
      if (members++ == 0) {
        first = i;
        ready = 0;
        memset(size, 0, sizeof size);
      }
      ready = t > ready ? t : ready;
      for (uint32_t j = 0; j < m; j++) size[j] = c->bytes[j] > size[j] ? c->bytes[j] : size[j];
      out[i++].arrive = t;
      continue;
    }
    if (members > 0) {
      double end = in->cut ? literal_forward(net, in, a, size, members, t_max, ready)
                           : literal_send(net, a, 1, in->server, size, m, ready);
      if (!literal_is_time(end)) return never;
      t_max = end > t_max ? end : t_max;
      number++;
      for (uint32_t k = first; k < first + members; k++)
        out[k] = (mlfab__grouped){q, number, out[k].arrive, ready, end, t_max};
      members = 0;
    }
    if (!c) return t_max;
    q++;
  }
}

static mlfab__network literal_net;

/* The best n of a variant; stored in *best when it is better than *best. */
static inline void literal_variant(const mlfab__network *base, const mlfab__group_input *in,
                                   uint32_t variant, mlfab__group_choice *best) {
  mlfab__grouped out[BATCH_MOST];
  double time[BATCH_MOST + 1], least = mlfab__network_never();
  uint32_t most = in->n;
  for (uint32_t n = 0; n <= in->n; n++) {
    int is_free = (variant & 3) == MLFAB__GROUP_FIRST_FREE && n == 0 && in->n > 0;
    uint32_t cases = is_free ? in->n : 1;
    time[n] = mlfab__network_never();
    for (uint32_t c = 1; c <= cases; c++) {
      uint32_t first = cases > 1 ? c : in->n;
      literal_copy(&literal_net, base);
      double t = literal_case(&literal_net, in, variant, n, first, out);
      if (!literal_less(t, time[n])) continue;
      time[n] = t;
      if (n == 0) most = first;
    }
    if (time[n] < least) least = time[n];
  }
  if (!literal_less(least, best->time)) return;
  uint32_t n = 0;
  while (literal_less(least, time[n])) n++;
  *best = (mlfab__group_choice){variant, n, n == 0 ? most : in->n, time[n]};
}

/* The whole of Alg. 3. Leaves the plan reserved in literal_net. */
static inline mlfab__group_choice literal_group(const mlfab__network *base,
                                                const mlfab__group_input *in, int best,
                                                mlfab__grouped *out) {
  mlfab__group_choice choice = {.first_most = in->n, .time = mlfab__network_never()};
  for (uint32_t v = MLFAB__GROUP_PAPER; v <= (best ? MLFAB__GROUP_TAIL_DIRECT : 0); v++) {
    literal_variant(base, in, v, &choice);
    if (in->cut) literal_variant(base, in, v | MLFAB__GROUP_LATE, &choice);
  }
  literal_copy(&literal_net, base);
  if (literal_is_time(choice.time)) {
    literal_case(&literal_net, in, choice.variant, choice.n, choice.first_most, out);
  } else {
    /* Direct updates up to the first that does not arrive. */
    mlfab__group_input some = *in;
    for (some.n = 0; some.n < in->n; some.n++) {
      const mlfab__candidate *c = &in->updates[in->order[some.n]];
      if (!literal_is_time(literal_end(&literal_net, c, in->server, in->servers))) break;
      literal_send(&literal_net, &c->node, 0, in->server, c->bytes, in->servers, c->available);
    }
    literal_copy(&literal_net, base);
    literal_case(&literal_net, &some, MLFAB__GROUP_PAPER, some.n, 0, out);
    choice.n = some.n;
    for (uint32_t i = some.n; i < in->n; i++) out[i].number = 0;
  }
  return choice;
}

/* ---- distribution ---- */

/* Sends a component from `from` to `to` and returns when it has arrived. `how` (or NULL) receives its path. */
static inline double literal_part(mlfab__network *net, uint32_t from, uint32_t to, double bytes,
                                  double available, literal_arrival *how) {
  double end;
  literal_component = literal_member = 0;
  net->watch = literal_watch;
  assert_int_equal(mlfab__network_reserve(net, from, to, bytes, available, &end), 0);
  net->watch = NULL;
  if (how && literal_is_time(end)) {
    *how = literal_came[0][0];
    how->course.pieces = how->pieces;
  }
  return end;
}

/* Distributor q, whose data arrive as `hub` says, serves one request. */
static inline double literal_serve(mlfab__network *net, const mlfab__distribution *d, uint32_t q,
                                   uint32_t to, const literal_arrival *hub, double has) {
  double latest = d->now;
  for (uint32_t j = 0; j < d->servers; j++) {
    uint32_t from = d->distributors[(q - 1) * d->servers + j];
    double available = has;
    if (d->cut) {
      assert_int_equal(
          mlfab__network_cut_through(net, from, to, d->now, &hub[j].course, &available), 0);
    }
    double end = literal_part(net, from, to, d->bytes[j], available, NULL);
    if (!literal_is_time(end)) return mlfab__network_never();
    if (d->cut && end < hub[j].course.at) end = hub[j].course.at;
    latest = end > latest ? end : latest;
  }
  return latest;
}

/* [I3], [I4]: leaves every transfer reserved in `net`; returns "never" when a requester cannot be reached. */
static inline double literal_distribute(mlfab__network *net, const mlfab__distribution *d,
                                        const mlfab__grouped *grouped, mlfab__delivery *out) {
  static literal_arrival hub[BATCH_AGGREGATORS][BATCH_SERVERS];
  double has[BATCH_AGGREGATORS], makespan = d->now, never = mlfab__network_never();
  for (uint32_t q = 0; q < d->k; q++) has[q] = never;
  for (uint32_t i = d->n; i-- > 0;) {
    uint32_t q = grouped[i].q;
    if (q == 0 || literal_is_time(has[q - 1])) continue;
    has[q - 1] = d->now;
    for (uint32_t j = 0; j < d->servers; j++) {
      double end = literal_part(net, d->server[j], d->distributors[(q - 1) * d->servers + j],
                                d->bytes[j], d->now, &hub[q - 1][j]);
      if (!literal_is_time(end)) return never;
      has[q - 1] = end > has[q - 1] ? end : has[q - 1];
    }
  }
  for (uint32_t i = 0; i < d->n; i++) {
    if (grouped[i].q != 0) continue;
    double end = d->now;
    for (uint32_t j = 0; j < d->servers; j++) {
      double t = literal_part(net, d->server[j], d->requests[i], d->bytes[j], d->now, NULL);
      end = t > end ? t : end;
    }
    if (!literal_is_time(end)) return never;
    out[i] = (mlfab__delivery){0, end};
  }
  for (uint32_t end = d->n; end > 0;) {
    uint32_t q = grouped[end - 1].q, first = end;
    while (first > 0 && grouped[first - 1].q == q) first--;
    for (uint32_t i = first; q != 0 && i < end; i++) {
      double t = literal_serve(net, d, q, d->requests[i], hub[q - 1], has[q - 1]);
      if (!literal_is_time(t)) return never;
      out[i] = (mlfab__delivery){q, t};
    }
    end = first;
  }
  for (uint32_t i = 0; i < d->n; i++) makespan = out[i].end > makespan ? out[i].end : makespan;
  return makespan;
}

/* ---- comparing with what is written ---- */

static inline void same(uint64_t a, uint64_t b, const char *what) {
  if (a == b) return;
  fail_msg("seed %llu: %s is %llu, not %llu", (unsigned long long)batch_seed, what,
           (unsigned long long)a, (unsigned long long)b);
}

static inline void same_bits(double a, double b, const char *what) {
  if (memcmp(&a, &b, sizeof a) == 0) return;
  fail_msg("seed %llu: %s is %.17g, not %.17g", (unsigned long long)batch_seed, what, a, b);
}

static inline void same_networks(const mlfab__network *a, const mlfab__network *b) {
  for (uint32_t i = 0; i < 2 * a->nodes + a->links; i++) {
    const mlfab__profile *p = &a->profiles[i], *q = &b->profiles[i];
    same(p->n, q->n, "a number of steps");
    for (uint32_t k = 0; k < p->n; k++) {
      same_bits(p->steps[k].at, q->steps[k].at, "a step's time");
      same_bits(p->steps[k].rate, q->steps[k].rate, "a step's rate");
    }
  }
}

/* The transfers that a network has reserved while it was watched. */
enum { RECORDS = 512 };

typedef struct record {
  mlfab__transfer transfer;
  mlfab__stretch pieces[LITERAL_STRETCHES];
} record;

typedef struct records {
  record of[RECORDS];
  uint32_t n;
} records;

static inline void on_reserve(void *user, const mlfab__transfer *t) {
  records *r = user;
  assert_true(r->n < RECORDS && t->n <= LITERAL_STRETCHES);
  r->of[r->n].transfer = *t;
  if (t->n > 0) memcpy(r->of[r->n].pieces, t->pieces, t->n * sizeof *t->pieces);
  r->n++;
}

/* NULL: it is watched no more. */
static inline void watch(mlfab__network *net, records *r) {
  if (r) r->n = 0;
  net->watch = r ? on_reserve : NULL;
  net->user = r;
}

#endif
