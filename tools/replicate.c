/* replicate.c - what a batch sends to its replicas: see replicate.h.
 *
 * A case of Alg. 3 is computed from the front: its first groups are the same when the rest of the list is not
 * there. So the groups that are kept are planned again, alone, after all have been undone. */
#include "replicate.h"

#include <math.h>

/* ---- the formulas ---- */

MLFAB__INTERNAL void mlfab__divergence_coefficients(double gamma, uint32_t s, uint32_t r,
                                                    double *c) {
  uint32_t more = s > r ? s : r, less = s > r ? r : s;
  double sum = 0, power = 1;
  /* From the newest update on: an update that both have decays with each commit before the oldest update that a single
   * copy has. */
  for (uint32_t i = more + 1; i-- > 0;) {
    if (i > less) {
      sum += power;
      power *= gamma;
    } else {
      sum *= gamma;
    }
    c[i] = sum;
  }
}

MLFAB__INTERNAL double mlfab__divergence_between(double gamma, double h0, const double *norms,
                                                 uint32_t s, uint32_t r) {
  uint32_t more = s > r ? s : r, less = s > r ? r : s;
  double history = h0, bound = 0;
  for (uint32_t i = 0; i < more; i++) {
    history = mlfab__network_exact(gamma * history) + norms[i];
    if (i >= less) bound += history;
  }
  return bound;
}

/* The sum of gamma^e for `from` <= e < to. */
static double divergence_powers(double gamma, uint32_t from, uint32_t to) {
  double sum = 0, power = 1;
  for (uint32_t e = 0; e < to; e++) {
    if (e >= from) sum += power;
    power *= gamma;
  }
  return sum;
}

/* The difference of the sums below two exponents. */
static double divergence_between_sums(double gamma, uint32_t a, uint32_t b) {
  return a > b ? divergence_powers(gamma, b, a) : -divergence_powers(gamma, a, b);
}

/* How often h has been added to w since update i, its own step included: 0 when it was not applied. */
static uint32_t divergence_steps(const uint32_t *groups, uint32_t a, uint32_t i) {
  uint32_t group = 0;
  uint64_t end = 0;
  while (group < a && (end += groups[group]) <= i) group++;
  return a - group;
}

MLFAB__INTERNAL uint32_t mlfab__divergence_grouped(double gamma, const uint32_t *groups, uint32_t a,
                                                   const uint32_t *others, uint32_t b, double *c) {
  uint32_t n = 0, m = 0;
  for (uint32_t j = 0; j < a; j++) n += groups[j];
  for (uint32_t j = 0; j < b; j++) m += others[j];
  if (m > n) n = m;
  c[0] = divergence_between_sums(gamma, a + 1, b + 1);
  for (uint32_t i = 0; i < n; i++) {
    c[i + 1] = divergence_between_sums(gamma, divergence_steps(groups, a, i),
                                       divergence_steps(others, b, i));
  }
  return n;
}

MLFAB__INTERNAL double mlfab__divergence_weigh(const double *c, double h0, const double *norms,
                                               uint32_t n) {
  double bound = fabs(c[0]) * h0;
  for (uint32_t i = 0; i < n; i++) bound += mlfab__network_exact(fabs(c[i + 1]) * norms[i]);
  return bound;
}

MLFAB__INTERNAL void mlfab__divergence_weights(double gamma, uint32_t m, double *x, double *y,
                                               double *w_h_p, double *h_h_p) {
  double sum = 0, power = 1;
  for (uint32_t i = m; i-- > 0;) {
    sum += power;
    x[i] = sum;
    y[i] = power;
    power *= gamma;
  }
  *w_h_p = sum * gamma;
  *h_h_p = power;
}

/* ---- planning ---- */

/* One component of the newest transfer to the server. */
struct mlfab__sent {
  uint32_t from, to, first, n; /* first, n: its stretches */
  double bytes;
};

/* A call. */
typedef struct replicate_run {
  mlfab__replicator *r;
  mlfab__planner *planner;
  mlfab__network *net;
  const mlfab__batch *batch;
  const mlfab__replication *in;
  mlfab__planned *out;
  uint32_t applied, first; /* first: of the last group */
  mlfab__replicated *result;
} replicate_run;

static void replicate_watch(void *user, const mlfab__transfer *t) {
  mlfab__replicator *r = user;
  if (r->watch) r->watch(r->user, t);
  if (t->purpose == MLFAB__TO_AGGREGATOR || r->code) return;
  if (t->component == 0) r->nsent = r->npieces = 0;
  void *sent = mlfab__grow(r->env, r->sent, &r->sent_room, (uint64_t)r->nsent + 1, sizeof *r->sent);
  if (sent) r->sent = sent;
  void *pieces = mlfab__grow(r->env, r->pieces, &r->pieces_room, (uint64_t)r->npieces + t->n + 1,
                             sizeof *r->pieces);
  if (pieces) r->pieces = pieces;
  if (sent == NULL || pieces == NULL) {
    r->code = MLFAB_ERR_MEMORY;
    return;
  }
  r->sent[r->nsent++] = (struct mlfab__sent){t->from, t->to, r->npieces, t->n, t->bytes};
  if (t->n > 0) memcpy(r->pieces + r->npieces, t->pieces, t->n * sizeof *t->pieces);
  r->npieces += t->n;
}

/* ---- the list of a replica ---- */

static void replicate_free_list(mlfab__replicator *r, mlfab__env *env) {
  mlfab__free(env, r->list, r->room * sizeof *r->list);
  mlfab__free(env, r->history, r->room * sizeof *r->history);
  mlfab__free(env, r->lead, r->room * sizeof *r->lead);
  r->list = NULL;
  r->history = r->lead = NULL;
  r->room = 0;
}

static int replicate_reserve(mlfab__replicator *r, mlfab__env *env, uint64_t n) {
  if (n < r->room) return 0;
  if (n >= UINT32_MAX) return MLFAB_ERR_LIMIT;
  replicate_free_list(r, env);
  r->room = (uint32_t)n + 1;
  r->list = mlfab__alloc_array(env, r->room, sizeof *r->list);
  r->history = mlfab__alloc_array(env, r->room, sizeof *r->history);
  r->lead = mlfab__alloc_array(env, r->room, sizeof *r->lead);
  if (r->list && r->history && r->lead) return 0;
  replicate_free_list(r, env); /* so that the next call allocates again */
  return MLFAB_ERR_MEMORY;
}

MLFAB__INTERNAL void mlfab__replicate_free(mlfab__replicator *r, mlfab__env *env) {
  replicate_free_list(r, env);
  mlfab__free(env, r->sent, r->sent_room * sizeof *r->sent);
  mlfab__free(env, r->pieces, r->pieces_room * sizeof *r->pieces);
  memset(r, 0, sizeof *r);
}

/* Writes the list and its H, and returns its length. */
static int replicate_list(replicate_run *run, const mlfab__replica *replica, uint32_t *n_p) {
  mlfab__replicator *r = run->r;
  uint32_t n = replica->npunted + run->applied;
  int code = replicate_reserve(r, run->net->env, (uint64_t)replica->npunted + run->applied);
  if (code) return code;
  r->history[0] = replica->history;
  r->lead[0] = 0;
  for (uint32_t i = 0; i < n; i++) {
    r->list[i] = i < replica->npunted ? replica->punted[i]
                                      : run->batch->updates[run->out[i - replica->npunted].update];
    r->history[i + 1] = mlfab__network_exact(run->in->gamma * r->history[i]) + r->list[i].norm;
    r->lead[i + 1] = r->lead[i] + r->history[i + 1];
  }
  *n_p = n;
  return 0;
}

/* B(s, r) of the list. */
static double replicate_bound(const mlfab__replicator *r, uint32_t s, uint32_t behind) {
  double bound = 0;
  uint32_t from = behind < s ? behind : s, to = behind < s ? s : behind;
  for (uint32_t i = to; i > from; i--) bound += r->history[i];
  return bound;
}

static int replicate_holds(const replicate_run *run, double bound) {
  return !mlfab__network_less(run->in->div_max, bound);
}

/* ---- one replica ---- */

static mlfab__group_input replicate_input(const replicate_run *run, const mlfab__replica *replica,
                                          uint32_t n) {
  return (mlfab__group_input){.updates = run->r->list,
                              .n = n,
                              .server = replica->nodes,
                              .servers = run->batch->servers,
                              .aggregators = replica->aggregators,
                              .k = replica->k,
                              .start = replica->start,
                              .cut = run->batch->cut};
}

/* The end of the group that begins at `at`; `at` itself when nothing more is sent. */
static uint32_t replicate_group(const mlfab__grouped *grouped, uint32_t at, uint32_t n) {
  uint32_t end = at;
  while (end < n && grouped[end].number > 0 && grouped[end].number == grouped[at].number) end++;
  return end;
}

/* Decides which of the n updates are kept (frozen, groups, status), if `planned` of them are planned. */
static void replicate_decide(const replicate_run *run, mlfab__replica_plan *p, uint32_t n,
                             uint32_t planned, int all) {
  p->frozen = p->groups = 0;
  p->needed = mlfab__network_never();
  for (uint32_t at = 0, end; (end = replicate_group(p->grouped, at, planned)) > at; at = end) {
    if (mlfab__network_less(run->result->last, p->grouped[at].commit)) break;
    p->frozen = end;
    p->groups++;
  }
  p->by_last = p->frozen;
  p->divergence_by_last = replicate_bound(run->r, n, p->frozen);
  p->status = replicate_holds(run, p->divergence_by_last) ? 0 : 2;
  uint32_t groups = p->groups, at = p->frozen, end;
  for (; p->status == 2 && (end = replicate_group(p->grouped, at, planned)) > at; at = end) {
    groups++;
    if (!replicate_holds(run, replicate_bound(run->r, n, end))) continue;
    p->status = 1;
    p->needed = p->grouped[at].commit;
    p->frozen = end;
    p->groups = groups;
  }
  if (!all) return;
  while ((end = replicate_group(p->grouped, p->frozen, planned)) > p->frozen) {
    p->frozen = end;
    p->groups++;
  }
}

/* How many of the list of n are planned. */
static uint32_t replicate_part(const replicate_run *run, const mlfab__replica *replica,
                               uint32_t n) {
  uint32_t needed = n, part = replica->part;
  double bound = 0;
  if (part == 0) return n;
  for (; needed > 0 && replicate_holds(run, bound + run->r->history[needed]); needed--) {
    bound += run->r->history[needed];
  }
  if (needed == 0 && !mlfab__network_less(replica->idle, bound)) return 0;
  if (part < needed) part = needed;
  return part < n ? part : n;
}

/* Plans the list, and reserves the transfers that are kept. */
static int replicate_one(replicate_run *run, const mlfab__replica *replica,
                         mlfab__replica_plan *p) {
  mlfab__grouper *g = &run->planner->grouper;
  uint32_t n, mark = mlfab__network_mark(run->net);
  int code = replicate_list(run, replica, &n);
  if (code) return code;
  uint32_t planned = replicate_part(run, replica, n);
  mlfab__group_input in = replicate_input(run, replica, planned);
  run->net->searching++;
  code = mlfab__group_plan(g, run->net, &in, run->batch->best, p->grouped, &p->choice);
  run->net->searching--;
  mlfab__network_undo(run->net, mark);
  if (code) return code;
  for (uint32_t i = planned; i < n; i++) p->grouped[i].number = 0;
  replicate_decide(run, p, n, planned, replica->part > 0);
  if (p->frozen == 0) return 0;
  double time;
  in.n = p->frozen;
  int whole = mlfab__finite(p->choice.time); /* else all that is sent goes directly */
  uint32_t direct = whole && p->choice.n < in.n ? p->choice.n : in.n;
  return mlfab__group_case(g, run->net, &in, whole ? p->choice.variant : MLFAB__GROUP_PAPER, direct,
                           p->choice.first_most, NULL, &time);
}

/* ---- the last transfer to the server ---- */

/* Gives the last transfer back, and plans it again with status 1. */
static int replicate_delay(replicate_run *run) {
  mlfab__replicator *r = run->r;
  mlfab__planned *last = &run->out[run->first];
  double never = mlfab__network_never(), end = never, before = run->batch->backlog;
  int walked = MLFAB__LATE;
  for (uint32_t j = 0; j < r->nsent; j++) {
    const struct mlfab__sent *s = &r->sent[j];
    int code = mlfab__network_release(run->net, s->from, s->to, r->pieces + s->first, s->n);
    if (code) return code;
  }
  double available = last->group > 0 ? last->ready : last->start;
  double needed = run->result->needed;
  if (needed > available) available = needed;
  run->net->purpose = last->group > 0 ? MLFAB__AGGREGATE : MLFAB__TO_SERVER;
  run->net->index = last->group > 0 ? last->group : last->update;
  if (run->result->status == 1) {
    uint32_t servers = run->batch->servers;
    double *bytes = run->planner->grouper.sizes; /* of one group, one a server */
    const mlfab__candidate *c = &run->batch->updates[last->update];
    for (uint32_t j = 0; j < servers; j++) bytes[j] = r->sent[j].bytes;
    mlfab__bundle bundle = {
        .from = last->group > 0 ? run->batch->aggregators + (size_t)(last->group - 1) * servers
                                : &c->node,
        .from_step = last->group > 0,
        .to = run->batch->server,
        .to_step = 1,
        .bytes = bytes,
        .n = servers,
        .available = available};
    walked = mlfab__bundle_reserve(run->net, &bundle, never, &end);
    if (walked < 0) return walked;
  }
  if (walked == MLFAB__LATE) run->result->status = 2;
  if (walked == MLFAB__LATE) end = never;
  if (run->first > 0) before = run->out[run->first - 1].commit;
  run->result->time = end > before ? end : before;
  for (uint32_t i = run->first; i < run->applied; i++) {
    run->out[i].end = end;
    run->out[i].commit = run->result->time;
  }
  return 0;
}

/* ---- the whole ---- */

/* The largest bound over time, the one at the end, and H. */
static int replicate_measure(replicate_run *run, const mlfab__replica *replica,
                             mlfab__replica_plan *p) {
  uint32_t n, i = 0, at = 0;
  int code = replicate_list(run, replica, &n);
  if (code) return code;
  uint32_t applied = run->result->status == 2 ? run->first : run->applied;
  p->peak = replicate_bound(run->r, replica->npunted, 0);
  while (i < applied || at < p->frozen) {
    double t = i < applied ? run->out[i].commit : mlfab__network_never();
    if (at < p->frozen && p->grouped[at].commit < t) t = p->grouped[at].commit;
    while (i < applied && !mlfab__network_less(t, run->out[i].commit)) i++;
    while (at < p->frozen && !mlfab__network_less(t, p->grouped[at].commit)) at++;
    double bound = run->r->lead[replica->npunted + i] - run->r->lead[at];
    if (bound < 0) bound = -bound;
    if (bound > p->peak) p->peak = bound;
  }
  p->divergence = replicate_bound(run->r, replica->npunted + applied, p->frozen);
  p->history = run->r->history[p->frozen];
  return 0;
}

static int replicate_is_norm(double x) { return mlfab__finite(x) && x >= 0; }

static int replicate_check(const mlfab__batch *batch, const mlfab__replication *in) {
  int code = mlfab__divergence_check(in->gamma, in->div_max);
  for (uint32_t i = 0; !code && i < batch->n; i++) {
    if (!replicate_is_norm(batch->updates[i].norm)) code = MLFAB_ERR_ARGUMENT;
  }
  for (uint32_t k = 0; !code && k < in->n; k++) {
    const mlfab__replica *replica = &in->replicas[k];
    if (!replicate_is_norm(replica->history)) code = MLFAB_ERR_ARGUMENT;
    if (mlfab__divergence_check(0, replica->idle)) code = MLFAB_ERR_ARGUMENT;
    for (uint32_t i = 0; !code && i < replica->npunted; i++) {
      if (!replicate_is_norm(replica->punted[i].norm)) code = MLFAB_ERR_ARGUMENT;
    }
  }
  return code;
}

static int replicate_run_all(replicate_run *run, mlfab__replica_plan *plans) {
  double never = mlfab__network_never();
  int code = 0;
  run->first = run->applied;
  while (run->first > 0 &&
         run->out[run->first - 1].group_number == run->out[run->applied - 1].group_number) {
    run->first--;
  }
  run->result->last = run->applied > 0 ? run->out[run->applied - 1].commit : run->batch->backlog;
  run->result->time = run->result->last;
  run->result->needed = never;
  for (uint32_t k = 0; !code && k < run->in->n; k++) {
    code = replicate_one(run, &run->in->replicas[k], &plans[k]);
    if (code) return code;
    if (plans[k].status > run->result->status) run->result->status = plans[k].status;
    double needed = plans[k].needed;
    int is_later = !mlfab__finite(run->result->needed) || needed > run->result->needed;
    if (mlfab__finite(needed) && is_later) run->result->needed = needed;
  }
  if (run->result->status > 0 && run->applied > 0) code = replicate_delay(run);
  for (uint32_t k = 0; !code && k < run->in->n; k++) {
    code = replicate_measure(run, &run->in->replicas[k], &plans[k]);
  }
  return code;
}

MLFAB__INTERNAL int mlfab__replicate_batch(
    mlfab__replicator *r, mlfab__planner *planner, mlfab__network *net, const mlfab__batch *batch,
    const mlfab__replication *replication, mlfab__planned *out, uint32_t *applied_p,
    mlfab__group_choice *choice_p, mlfab__replica_plan *plans, mlfab__replicated *result_p) {
  mlfab__replicated result = {0};
  mlfab__group_choice choice;
  uint32_t mark = mlfab__network_mark(net), applied;
  int code = replicate_check(batch, replication);
  if (code) return code;
  r->env = net->env;
  r->watch = net->watch;
  r->user = net->user;
  r->code = 0;
  r->nsent = r->npieces = 0;
  net->watch = replicate_watch;
  net->user = r;
  code = mlfab__plan_batch(planner, net, batch, out, &applied, &choice);
  net->watch = r->watch;
  net->user = r->user;
  if (!code) code = r->code;
  if (!code) {
    replicate_run run = {.r = r,
                         .planner = planner,
                         .net = net,
                         .batch = batch,
                         .in = replication,
                         .out = out,
                         .applied = applied,
                         .result = &result};
    code = replicate_run_all(&run, plans);
  }
  if (code) {
    mlfab__network_undo(net, mark);
    return code;
  }
  *applied_p = applied;
  if (choice_p) *choice_p = choice;
  *result_p = result;
  return 0;
}
