/* test_plan.c - core/sched/order.c, group.c, distribute.c and plan.c, and tools/replicate.c against
 * tests/vectors: discrete results exactly, times to 1e-7; then refusals and extreme inputs. The vectors of
 * transfers alone are in test_network.c, those of divergence and momentum in test_divergence.c. */
#include "vector.h"

#include "tools/replicate.c"
#include "budget.h"
#include "../testing.h"

static mlfab__env env;
static mlfab__planner planner;
static mlfab__replicator replicator;

/* ---- a batch ---- */

typedef struct batch {
  mlfab__network net;
  mlfab__batch b;
  mlfab__candidate updates[VECTOR_MOST];
  double bytes[VECTOR_MOST][8];
  uint32_t server[8], aggregators[VECTOR_MOST];
  mlfab__replication replication;
  mlfab__replica replica;
  mlfab__candidate punted[VECTOR_MOST];
  double punted_bytes[VECTOR_MOST][8];
  uint32_t replica_nodes[8], replica_aggregators[VECTOR_MOST];
  /* The reservations, as the plan reported them. */
  mlfab__transfer transfer[VECTOR_MOST];
  mlfab__stretch stretch[VECTOR_MOST][16];
  uint32_t transfers;
} batch;

static batch it;       /* the batch under test */
static uint32_t roots; /* allreduces checked */

static void read_updates(vector *v, const char *keyword, uint32_t n, mlfab__candidate *updates,
                         double (*bytes)[8]) {
  for (uint32_t i = 0; i < n; i++) {
    vector_next(v);
    vector_expect(v, keyword, 7 + it.b.servers);
    for (uint32_t j = 0; j < it.b.servers; j++) bytes[i][j] = vector_number(v, 7 + j);
    updates[i] = (mlfab__candidate){.id = vector_count(v, 1),
                                    .node = vector_count(v, 2),
                                    .available = vector_number(v, 3),
                                    .version = (int64_t)vector_number(v, 4),
                                    .norm = vector_number(v, 5),
                                    .bytes = bytes[i]};
  }
  vector_next(v);
}

/* `server` and `aggregators`, or those of the replica. Returns the number of aggregators. */
static uint32_t read_nodes(vector *v, const char *keyword, uint32_t *nodes, uint32_t *aggregators) {
  vector_expect(v, keyword, 3);
  it.b.servers = vector_count(v, 1);
  vector_list(v, 2, it.b.servers, nodes);
  vector_next(v);
  uint32_t k = vector_count(v, 1);
  for (uint32_t q = 0; q < k; q++) {
    vector_next(v);
    vector_list(v, 2, it.b.servers, aggregators + q * it.b.servers);
  }
  vector_next(v);
  return k;
}

static void read_batch(vector *v) {
  mlfab__batch *b = &it.b;
  memset(&it, 0, sizeof it);
  vector_network(v, &env, &it.net);
  vector_expect(v, "mode", 2);
  b->list = strcmp(v->token[1], "list") == 0;
  vector_next(v);
  b->k = read_nodes(v, "server", it.server, it.aggregators);
  it.replica.k = read_nodes(v, "replica", it.replica_nodes, it.replica_aggregators);
  vector_expect(v, "tau_max", 2);
  b->delay_bound = (int64_t)vector_number(v, 1);
  vector_next(v);
  b->version = (int64_t)vector_number(v, 1);
  vector_next(v);
  vector_expect(v, "gamma", 3);
  it.replication.gamma = vector_number(v, 2);
  vector_next(v);
  it.replica.history = vector_number(v, 1);
  vector_next(v);
  it.replication.div_max = vector_number(v, 1);
  vector_next(v);
  vector_expect(v, "updates", 2);
  b->n = vector_count(v, 1);
  read_updates(v, "update", b->n, it.updates, it.bytes);
  vector_expect(v, "punted", 2);
  it.replica.npunted = vector_count(v, 1);
  read_updates(v, "pupdate", it.replica.npunted, it.punted, it.punted_bytes);
  b->updates = it.updates;
  b->server = it.server;
  b->aggregators = it.aggregators;
  it.replica.nodes = it.replica_nodes;
  it.replica.aggregators = it.replica_aggregators;
  it.replica.punted = it.punted;
  it.replication.replicas = &it.replica;
  it.replication.n = 1;
  vector_expect(v, "expect", 1);
  vector_next(v);
}

static const char *reason_name(uint8_t reason) {
  switch (reason) {
    case MLFAB__DEADLINE:
      return "D";
    case MLFAB__SHORTEST:
      return "S";
    case MLFAB__LOOKAHEAD:
      return "lookahead";
    case MLFAB__EXPIRED:
      return "expired";
    default:
      return "unreachable";
  }
}

/* `sjf` or `order`, and their lines, which list dropped updates by id. */
static void check_order(vector *v, const char *keyword, const char *line, int deadlines,
                        mlfab__ordered *out, uint32_t *applied_p) {
  mlfab__order_input in = {it.updates,   it.b.n,           it.server,
                           it.b.servers, it.b.delay_bound, it.b.version};
  uint32_t mark = mlfab__network_mark(&it.net), applied;
  int code = deadlines ? mlfab__order_deadlines(&planner.orderer, &it.net, &in, out, &applied)
                       : mlfab__order_shortest(&planner.orderer, &it.net, &in, out, &applied);
  assert_int_equal(code, 0);
  mlfab__network_undo(&it.net, mark);
  vector_expect(v, keyword, 3);
  vector_same(v, 1, applied);
  vector_same(v, 2, it.b.n - applied);
  for (uint32_t i = 0; i < applied; i++) {
    vector_next(v);
    vector_expect(v, line, 5);
    vector_same(v, 1, i + 1);
    vector_same(v, 2, it.updates[out[i].update].id);
    if (deadlines) assert_string_equal(v->token[3], reason_name(out[i].reason));
    vector_time(v, deadlines ? 4 : 3, out[i].end);
  }
  for (uint32_t d = applied; d < it.b.n; d++) {
    uint32_t i = applied;
    vector_next(v);
    vector_expect(v, "d", 3);
    while (it.updates[out[i].update].id != vector_count(v, 1)) assert_true(++i < it.b.n);
    assert_string_equal(v->token[2], reason_name(out[i].reason));
  }
  vector_next(v);
  while (vector_is(v, "alt")) vector_next(v);
  *applied_p = applied;
}

/* `groups`: the aggregator of each update, and its times of arrival. */
static void check_groups(vector *v, const char *keyword, const mlfab__grouped *grouped,
                         const uint64_t *ids) {
  uint32_t at = 0;
  vector_expect(v, keyword, 2);
  for (uint32_t number = 1, groups = vector_count(v, 1); number <= groups; number++) {
    vector_next(v);
    vector_expect(v, "g", 10);
    uint32_t members = vector_count(v, 3);
    const mlfab__grouped *first = &grouped[at];
    vector_same(v, 2, first->q);
    vector_time(v, 4 + members, first->ready);
    vector_time(v, 6 + members, first->end);
    vector_time(v, 8 + members, first->commit);
    for (uint32_t m = 0; m < members; m++) {
      assert_int_equal(first[m].number, number);
      assert_int_equal(first[m].q, first->q);
      vector_same(v, 4 + m, ids[at + m]);
    }
    for (uint32_t m = 0; m < members && first->q > 0; m++) {
      vector_next(v);
      vector_expect(v, "m", 4);
      vector_same(v, 1, ids[at + m]);
      vector_time(v, 2, first[m].arrive);
    }
    at += members;
  }
  vector_next(v);
}

static void on_reserve(void *user, const mlfab__transfer *t) {
  (void)user;
  assert_true(it.transfers < VECTOR_MOST && t->n <= 16);
  if (t->n > 0) memcpy(it.stretch[it.transfers], t->pieces, t->n * sizeof *t->pieces);
  it.transfer[it.transfers] = *t;
  it.transfer[it.transfers].pieces = it.stretch[it.transfers];
  it.transfers++;
}

/* `server_rates` or `replica_rates`: reserved transfers with their rates over time. Ids are those of the list
 * that is sent. */
static void check_rates(vector *v, const char *keyword, const mlfab__transfer *transfers,
                        uint32_t n, const mlfab__candidate *list) {
  vector_expect(v, keyword, 2);
  vector_same(v, 1, n);
  for (uint32_t x = 0; x < n; x++) {
    const mlfab__transfer *t = &transfers[x];
    const char *start = keyword[0] == 'r' ? "ragg" : "agg";
    char name[64];
    if (t->purpose == MLFAB__AGGREGATE) {
      snprintf(name, sizeof name, "%s%u", start, t->index);
    } else {
      snprintf(name, sizeof name, "%s%c%llu", start, t->purpose == MLFAB__TO_SERVER ? 'd' : 'm',
               (unsigned long long)list[t->index].id);
    }
    vector_next(v);
    vector_expect(v, "x", 10);
    assert_string_equal(v->token[1], name);
    vector_same(v, 2, t->from);
    vector_same(v, 3, t->to);
    assert_true(vector_number(v, 4) == t->bytes);
    vector_time(v, 5, t->available);
    vector_time(v, 7, t->end);
    vector_same(v, 9, t->n);
    for (uint32_t k = 0; k < t->n; k++) {
      vector_next(v);
      vector_time(v, 1, t->pieces[k].from);
      vector_time(v, 3, t->pieces[k].to);
      assert_true(vector_number(v, 5) == t->pieces[k].rate);
    }
  }
  vector_next(v);
}

/* T of another reading of the paper: the best over all n, against the variants that best = 1 tries. */
static void check_alternative(const vector *v, const mlfab__group_input *in) {
  uint32_t variant =
      strcmp(v->token[2], "first_free") == 0 ? MLFAB__GROUP_FIRST_FREE : MLFAB__GROUP_TAIL_DIRECT;
  uint32_t mark = mlfab__network_mark(&it.net);
  double time;
  assert_int_equal(mlfab__group_case(&planner.grouper, &it.net, in, variant, vector_count(v, 3),
                                     in->n, NULL, &time),
                   0);
  mlfab__network_undo(&it.net, mark);
  vector_time(v, 4, time);
}

static void check_times(vector *v, const mlfab__group_input *in) {
  vector_expect(v, "detagg", 2);
  vector_same(v, 1, (uint64_t)in->n + 1);
  for (uint32_t n = 0; n <= in->n; n++) {
    double time;
    uint32_t mark = mlfab__network_mark(&it.net);
    assert_int_equal(
        mlfab__group_case(&planner.grouper, &it.net, in, MLFAB__GROUP_PAPER, n, in->n, NULL, &time),
        0);
    mlfab__network_undo(&it.net, mark);
    vector_next(v);
    vector_same(v, 1, n);
    vector_time(v, 2, time);
  }
  vector_next(v);
}

/* The same in one call, and its further results. */
static void check_whole(const mlfab__ordered *ordered, uint32_t applied,
                        const mlfab__grouped *grouped, const mlfab__group_choice *choice) {
  mlfab__planned planned[VECTOR_MOST];
  mlfab__group_choice again;
  uint32_t n;
  assert_int_equal(mlfab__plan_batch(&planner, &it.net, &it.b, planned, &n, &again), 0);
  assert_int_equal(n, applied);
  assert_int_equal(again.n, choice->n);
  assert_true(again.time == choice->time);
  for (uint32_t i = 0; i < it.b.n; i++) {
    const mlfab__planned *p = &planned[i];
    assert_int_equal(p->update, ordered[i].update);
    assert_int_equal(p->reason, ordered[i].reason);
    assert_int_equal(p->fate, i < applied ? MLFAB__PLAN_APPLIED : MLFAB__PLAN_DROPPED);
    int64_t position = i < applied ? i + 1 : applied + 1;
    assert_true(p->delay == it.b.version + position - 1 - it.updates[p->update].version);
    if (i >= applied) continue;
    if (!it.b.list) assert_true(p->delay < it.b.delay_bound);
    assert_int_equal(p->group, grouped[i].q);
    assert_int_equal(p->group_number, grouped[i].number);
    assert_true(p->commit == grouped[i].commit && p->arrive == grouped[i].arrive);
  }
}

/* Compares the value of the line `keyword`, and goes to the next. */
static void check_value(vector *v, const char *keyword, double is) {
  vector_expect(v, keyword, 3);
  if (strcmp(v->token[1], "none") == 0) {
    assert_false(mlfab__finite(is));
  } else {
    vector_time(v, 1, is);
  }
  vector_next(v);
}

static void check_count(vector *v, const char *keyword, uint64_t is) {
  vector_expect(v, keyword, 2);
  vector_same(v, 1, is);
  vector_next(v);
}

/* `replicate` and the records behind it. */
static void check_outcome(vector *v, const mlfab__replicated *all, const mlfab__replica_plan *plan,
                          const uint64_t *ids, uint32_t n) {
  check_count(v, "replicate", all->status);
  assert_int_equal(plan->status, all->status);
  check_value(v, "T_last", all->last);
  check_count(v, "r_last", plan->by_last);
  check_value(v, "div_last", plan->divergence_by_last);
  check_value(v, "T_e", plan->needed);
  check_value(v, "T_final", all->time);
  check_count(v, "r_final", plan->frozen);
  check_value(v, "div_final", plan->divergence);
  check_value(v, "div_peak", plan->peak);
  check_value(v, "h_next", plan->history);
  check_count(v, "frozen_groups", plan->groups);
  vector_expect(v, "punted_out", 2);
  vector_same(v, 1, n - plan->frozen);
  for (uint32_t i = plan->frozen; i < n; i++) vector_same(v, 2 + i - plan->frozen, ids[i]);
  vector_next(v);
}

/* The replica's part; the batch alone had `sent` transfers. */
static void check_replica(vector *v, uint32_t sent) {
  mlfab__planned planned[VECTOR_MOST];
  mlfab__grouped grouped[VECTOR_MOST];
  mlfab__candidate list[VECTOR_MOST];
  mlfab__replica_plan plan = {.grouped = grouped};
  mlfab__replicated all;
  uint64_t ids[VECTOR_MOST];
  uint32_t applied, n = it.replica.npunted;
  it.transfers = 0;
  it.net.watch = on_reserve;
  assert_int_equal(mlfab__replicate_batch(&replicator, &planner, &it.net, &it.b, &it.replication,
                                          planned, &applied, NULL, &plan, &all),
                   0);
  it.net.watch = NULL;
  memcpy(list, it.punted, n * sizeof *list);
  for (uint32_t i = 0; i < applied; i++) list[n++] = it.updates[planned[i].update];
  for (uint32_t i = 0; i < n; i++) ids[i] = list[i].id;
  vector_expect(v, "rplan", 4);
  vector_same(v, 1, plan.choice.n);
  vector_time(v, 2, plan.choice.time);
  vector_next(v);
  check_groups(v, "rgroups", grouped, ids);
  check_outcome(v, &all, &plan, ids, n);
  if (applied > 0) assert_true(planned[applied - 1].commit == all.time);
  if (vector_is(v, "server_rates")) {
    uint32_t again = all.status == 1 ? it.b.servers : 0, last = it.transfers - again;
    /* The newer report of the last transfer counts. */
    memcpy(&it.transfer[sent - again], &it.transfer[last], again * sizeof *it.transfer);
    check_rates(v, "server_rates", it.transfer, sent, it.updates);
    check_rates(v, "replica_rates", it.transfer + sent, last - sent, list);
  }
  if (vector_is(v, "residual")) vector_residual(v, &it.net);
  vector_expect(v, "end", 1);
  mlfab__network_undo(&it.net, 0);
}

static void check_batch(vector *v) {
  mlfab__ordered ordered[VECTOR_MOST];
  mlfab__grouped grouped[VECTOR_MOST];
  mlfab__group_choice choice;
  uint64_t ids[VECTOR_MOST];
  uint32_t order[VECTOR_MOST], applied = 0;
  read_batch(v);
  if (it.b.list) {
    for (applied = 0; applied < it.b.n; applied++)
      ordered[applied] = (mlfab__ordered){applied, MLFAB__LISTED, 0};
  } else {
    check_order(v, "sjf", "s", 0, ordered, &applied);
    check_order(v, "order", "a", 1, ordered, &applied);
  }
  for (uint32_t i = 0; i < applied; i++) ids[i] = it.updates[order[i] = ordered[i].update].id;
  mlfab__group_input in = {.updates = it.updates,
                           .order = order,
                           .n = applied,
                           .server = it.server,
                           .servers = it.b.servers,
                           .aggregators = it.aggregators,
                           .k = it.b.k};
  vector_expect(v, "partition", 4);
  it.net.watch = on_reserve;
  assert_int_equal(mlfab__group_plan(&planner.grouper, &it.net, &in, 0, grouped, &choice), 0);
  it.net.watch = NULL;
  vector_same(v, 1, choice.n);
  vector_time(v, 2, choice.time);
  uint32_t sent = it.transfers;
  mlfab__network_undo(&it.net, 0);
  vector_next(v);
  check_times(v, &in);
  check_groups(v, "groups", grouped, ids);
  for (; vector_is(v, "alt"); vector_next(v)) check_alternative(v, &in);
  check_whole(ordered, applied, grouped, &choice);
  mlfab__network_undo(&it.net, 0);
  check_replica(v, sent);
  mlfab__network_free(&it.net);
}

/* ---- the other kinds ---- */

static void check_deliveries(vector *v, uint32_t n, const uint32_t *id, const uint32_t *from,
                             const mlfab__delivery *out) {
  for (uint32_t i = 0; i < n; i++) {
    uint32_t at = from ? from[i] : i;
    vector_next(v);
    vector_expect(v, "w", 5);
    vector_same(v, 1, id[at]);
    vector_same(v, 2, out[at].q);
    vector_time(v, 3, out[at].end);
  }
  vector_next(v);
}

static void check_dist(vector *v) {
  uint32_t server[8], distributors[VECTOR_MOST], node[VECTOR_MOST], id[VECTOR_MOST];
  double bytes[8], hubs[VECTOR_MOST], makespan;
  mlfab__distribution d = {
      .server = server, .bytes = bytes, .distributors = distributors, .requests = node};
  mlfab__delivery out[VECTOR_MOST];
  mlfab__group_choice choice;
  memset(&it, 0, sizeof it);
  vector_network(v, &env, &it.net);
  d.servers = vector_count(v, 1);
  vector_list(v, 2, d.servers, server);
  vector_next(v);
  for (uint32_t j = 0; j < d.servers; j++) bytes[j] = vector_number(v, 1 + j);
  vector_next(v);
  d.k = vector_count(v, 1);
  for (uint32_t q = 0; q < d.k; q++) {
    vector_next(v);
    vector_list(v, 2, d.servers, distributors + q * d.servers);
  }
  vector_next(v);
  d.n = vector_count(v, 1);
  for (uint32_t i = 0; i < d.n; i++) {
    vector_next(v);
    id[i] = vector_count(v, 1);
    node[i] = vector_count(v, 2);
  }
  assert_int_equal(
      mlfab__group_distribute(&planner.grouper, &it.net, &d, out, hubs, &choice, &makespan), 0);
  vector_go(v, "partition");
  vector_same(v, 1, choice.n);
  vector_time(v, 2, choice.time);
  vector_go(v, "assign");
  check_deliveries(v, d.n, id, NULL, out);
  vector_expect(v, "hubs", 2);
  uint32_t used = 0;
  for (uint32_t q = 0; q < d.k; q++) used += mlfab__finite(hubs[q]) ? 1 : 0;
  vector_same(v, 1, used);
  for (uint32_t h = 0; h < used; h++) {
    vector_next(v);
    assert_in_range(vector_count(v, 1), 1, d.k);
    vector_time(v, 2, hubs[vector_count(v, 1) - 1]);
  }
  vector_next(v);
  vector_time(v, 1, makespan);
  mlfab__network_free(&it.net);
}

/* The root has its own part from the start, and the sum when the last of the others' parts has arrived. */
static void check_root(const mlfab__allreduce *a, const mlfab__grouped *push,
                       const mlfab__delivery *get, double up) {
  uint32_t i = 0;
  while (i < a->n && a->nodes[i] != a->root) i++;
  if (i == a->n) return;
  roots++;
  double mine = a->available[i], sum = mine > up ? mine : up;
  assert_memory_equal(&push[i].ready, &mine, sizeof mine);
  assert_memory_equal(&push[i].commit, &mine, sizeof mine);
  assert_memory_equal(&get[i].end, &sum, sizeof sum);
}

static void check_allreduce(vector *v) {
  uint32_t aggregators[VECTOR_MOST], distributors[VECTOR_MOST], node[VECTOR_MOST];
  uint32_t id[VECTOR_MOST], others[VECTOR_MOST];
  uint64_t ids[VECTOR_MOST];
  double available[VECTOR_MOST], makespan;
  mlfab__allreduce a = {.aggregators = aggregators, .distributors = distributors, .nodes = node};
  mlfab__grouped push[VECTOR_MOST], grouped[VECTOR_MOST];
  mlfab__delivery get[VECTOR_MOST];
  mlfab__group_choice up, down;
  memset(&it, 0, sizeof it);
  memset(push, 0, sizeof push);
  memset(get, 0, sizeof get);
  vector_network(v, &env, &it.net);
  a.root = vector_count(v, 1);
  vector_next(v);
  a.bytes = vector_number(v, 1);
  vector_next(v);
  a.k = vector_count(v, 1);
  vector_list(v, 2, a.k, aggregators);
  vector_next(v);
  a.distributors_k = vector_count(v, 1);
  vector_list(v, 2, a.distributors_k, distributors);
  vector_next(v);
  a.n = vector_count(v, 1);
  uint32_t n = 0;
  for (uint32_t i = 0; i < a.n; i++) {
    vector_next(v);
    id[i] = vector_count(v, 1);
    node[i] = vector_count(v, 2);
    available[i] = vector_number(v, 3);
    if (node[i] != a.root) others[n++] = i;
  }
  a.available = available;
  assert_int_equal(
      mlfab__group_allreduce(&planner.grouper, &it.net, &a, push, get, &up, &down, &makespan), 0);
  vector_go(v, "push");
  vector_same(v, 1, up.n);
  vector_time(v, 2, up.time);
  vector_next(v);
  for (uint32_t i = 0; i < n; i++) grouped[i] = push[others[i]];
  for (uint32_t i = 0; i < n; i++) ids[i] = id[others[i]];
  check_groups(v, "groups", grouped, ids);
  vector_expect(v, "get", 3);
  vector_same(v, 1, down.n);
  vector_same(v, 2, n);
  check_deliveries(v, n, id, others, get);
  vector_time(v, 1, makespan);
  check_root(&a, push, get, up.time);
  mlfab__network_free(&it.net);
}

static void check_ssp(vector *v) {
  for (uint32_t rows = vector_count(v, 1); rows > 0; rows--) {
    uint64_t finished[VECTOR_MOST];
    vector_next(v);
    vector_expect(v, "row", 3);
    uint32_t n = vector_count(v, 2);
    for (uint32_t i = 0; i < n; i++) finished[i] = vector_count(v, 3 + i);
    for (uint32_t i = 0; i < n; i++) {
      int may = mlfab__group_may_start(finished, n, finished[i], vector_count(v, 1));
      vector_same(v, 3 + n + i, (uint64_t)may);
    }
  }
}

static uint32_t checked;

static void check_vector(vector *v, const char *kind) {
  checked++;
  if (strcmp(kind, "batch") == 0) {
    check_batch(v);
  } else if (strcmp(kind, "dist") == 0) {
    check_dist(v);
  } else if (strcmp(kind, "allreduce") == 0) {
    check_allreduce(v);
  } else if (strcmp(kind, "ssp") == 0) {
    check_ssp(v);
  } else {
    checked--;
  }
}

TEST(test_vectors) {
  vector_each(check_vector);
  assert_true(checked >= 30 && roots > 0);
}

/* ---- refusals and extremes ---- */

/* Two workers, a server and an aggregator, all rates 10. */
static void small_batch(void) {
  memset(&it, 0, sizeof it);
  assert_int_equal(mlfab__network_init(&it.net, &env, 4, 0), 0);
  for (uint32_t i = 0; i < 4; i++) {
    assert_int_equal(mlfab__network_constant(&it.net, MLFAB__EGRESS, i, 10), 0);
    assert_int_equal(mlfab__network_constant(&it.net, MLFAB__INGRESS, i, 10), 0);
  }
  for (uint32_t i = 0; i < 2; i++) {
    it.bytes[i][0] = 10;
    it.updates[i] = (mlfab__candidate){.id = i, .node = i, .bytes = it.bytes[i]};
  }
  it.server[0] = 2;
  it.aggregators[0] = 3;
  it.b = (mlfab__batch){.updates = it.updates,
                        .n = 2,
                        .server = it.server,
                        .servers = 1,
                        .aggregators = it.aggregators,
                        .k = 1,
                        .delay_bound = INT64_MAX};
}

/* Grouping alone, of the first n updates. */
static mlfab__group_input small_group(uint32_t n) {
  return (mlfab__group_input){.updates = it.updates,
                              .n = n,
                              .server = it.server,
                              .servers = 1,
                              .aggregators = it.aggregators,
                              .k = 1};
}

static int plan_small(mlfab__planned planned[2], uint32_t *applied_p, double *time_p) {
  mlfab__group_choice choice = {0};
  int code = mlfab__plan_batch(&planner, &it.net, &it.b, planned, applied_p, &choice);
  *time_p = choice.time;
  if (code) assert_int_equal(mlfab__network_mark(&it.net), 0);
  mlfab__network_free(&it.net);
  return code;
}

TEST(test_refusals) {
  for (int what = 0; what < 10; what++) {
    mlfab__planned planned[2];
    uint32_t applied;
    double time;
    small_batch();
    if (what == 0) it.server[0] = 4;
    if (what == 1) it.aggregators[0] = UINT32_MAX;
    if (what == 2) it.updates[1].node = 4;
    if (what == 3) it.updates[1].available = -1;
    if (what == 4) it.updates[1].available = (double)NAN;
    if (what == 5) it.bytes[0][0] = -1;
    if (what == 6) it.bytes[0][0] = (double)INFINITY;
    if (what == 7) it.bytes[0][0] = (double)NAN;
    if (what == 8) it.b.backlog = (double)NAN;
    if (what == 9) it.b.servers = 0;
    assert_int_equal(plan_small(planned, &applied, &time), MLFAB_ERR_ARGUMENT);
  }
}

/* Grouping alone: an invalid size is refused, an empty batch is valid; a failure leaves nothing reserved. */
TEST(test_group_refusals) {
  const double sizes[] = {-1, (double)INFINITY, -(double)INFINITY, (double)NAN, 0};
  for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
    mlfab__grouped out[2];
    mlfab__group_choice choice;
    small_batch();
    mlfab__group_input in = small_group(2);
    it.bytes[1][0] = sizes[k];
    int code = mlfab__group_plan(&planner.grouper, &it.net, &in, 0, out, &choice);
    assert_int_equal(code, k == 4 ? 0 : MLFAB_ERR_ARGUMENT);
    if (code) assert_int_equal(mlfab__network_mark(&it.net), 0);
    mlfab__network_free(&it.net);
  }
}

TEST(test_extremes) {
  mlfab__planned p[2];
  uint32_t applied;
  double time;
  small_batch(); /* an empty batch */
  it.b.n = 0;
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 0 && time == 0);
  small_batch(); /* one update, which can never start */
  it.b.n = 1;
  it.updates[0].available = mlfab__network_never();
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 0 && p[0].fate == MLFAB__PLAN_DROPPED &&
              p[0].reason == MLFAB__UNREACHABLE);
  small_batch(); /* a bound of 0 admits none; a bound of 1 admits one with delay 0 */
  it.b.delay_bound = 0;
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 0 && p[0].reason == MLFAB__EXPIRED && p[1].reason == MLFAB__EXPIRED);
  small_batch();
  it.b.delay_bound = 1;
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 1 && p[0].reason == MLFAB__DEADLINE && p[0].delay == 0 &&
              p[1].reason == MLFAB__EXPIRED && p[1].delay == 1);
  small_batch(); /* versions at the ends of their range */
  it.b.version = INT64_MIN;
  it.updates[0].version = INT64_MAX;
  it.updates[1].version = INT64_MIN;
  it.b.delay_bound = INT64_MAX - 1;
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 2 && p[0].delay == INT64_MIN && p[1].delay == 1);
  small_batch(); /* a cut server, in a list */
  it.b.list = 1;
  assert_int_equal(mlfab__network_constant(&it.net, MLFAB__INGRESS, 2, 0), 0);
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 0 && !mlfab__finite(time) && p[0].fate == MLFAB__PLAN_DROPPED);
  small_batch(); /* a backlog lets the first group be aggregated */
  it.b.backlog = 2;
  assert_int_equal(mlfab__network_constant(&it.net, MLFAB__INGRESS, 3, 20), 0);
  mlfab__stretch booked = {0, 2, 10};
  assert_int_equal(
      mlfab__network_capacity(&it.net, MLFAB__INGRESS, 2, 2, (double[]){booked.from, booked.to},
                              (double[]){0, booked.rate}),
      0);
  assert_int_equal(plan_small(p, &applied, &time), 0);
  assert_true(applied == 2 && p[0].group == 1 && p[1].group == 1 && time == 3);
}

/* A member that arrives late at twice the rate of the server's link, and one that arrives before it: the
 * sum's first byte leaves with the late member's first byte, though t_max is 0. */
TEST(test_cut_through) {
  mlfab__grouped out[2];
  for (int late = 0; late < 2; late++) {
    double time;
    small_batch();
    it.updates[1].available = 0.5;
    for (uint32_t i = 0; i < 2; i++) {
      assert_int_equal(mlfab__network_constant(&it.net, MLFAB__EGRESS, i, 20), 0);
    }
    assert_int_equal(mlfab__network_constant(&it.net, MLFAB__INGRESS, 3, 20), 0);
    mlfab__group_input in = small_group(2);
    in.cut = 1;
    uint32_t variant = late ? MLFAB__GROUP_PAPER | MLFAB__GROUP_LATE : MLFAB__GROUP_PAPER;
    assert_int_equal(mlfab__group_case(&planner.grouper, &it.net, &in, variant, 0, 2, out, &time),
                     0);
    if (!late) {
      assert_false(mlfab__finite(time));
    } else {
      assert_true(time == 1.5 && out[0].arrive == 0.5 && out[1].arrive == 1);
      assert_true(out[1].number == 1 && out[1].ready == 1 && out[1].end == 1.5);
      /* Before 0.5 the server's link is still free. */
      const mlfab__profile *left = mlfab__network_residual(&it.net, MLFAB__INGRESS, 2);
      assert_true(left->n == 3 && left->steps[0].rate == 10);
      assert_true(left->steps[1].at == 0.5 && left->steps[1].rate == 0);
    }
    mlfab__network_free(&it.net);
  }
}

/* ---- out of memory ---- */

/* As many updates as a vector has, of which update i is there at `apart` times i. */
static void full_batch(double apart) {
  small_batch();
  for (uint32_t i = 0; i < VECTOR_MOST; i++) {
    it.bytes[i][0] = 10;
    it.updates[i] =
        (mlfab__candidate){.id = i, .node = i % 2, .available = apart * i, .bytes = it.bytes[i]};
  }
  it.b.n = VECTOR_MOST;
}

/* A run after which the batch is planned, or nothing is reserved. */
static int plan_and_reduce(mlfab__planner *small, budget *memory, uint64_t most) {
  mlfab__planned planned[VECTOR_MOST];
  mlfab__delivery get[VECTOR_MOST];
  mlfab__grouped push[VECTOR_MOST];
  mlfab__group_choice up, down;
  uint32_t applied, nodes[VECTOR_MOST];
  double makespan, available[VECTOR_MOST] = {0};
  full_batch(0);
  it.b.cut = 1;
  for (uint32_t i = 0; i < VECTOR_MOST; i++) nodes[i] = i % 4;
  mlfab__allreduce a = {.root = 1,
                        .bytes = 10,
                        .aggregators = it.aggregators,
                        .distributors = it.aggregators,
                        .k = 1,
                        .distributors_k = 1,
                        .nodes = nodes,
                        .available = available,
                        .n = VECTOR_MOST};
  memory->left = most;
  int code = mlfab__plan_batch(small, &it.net, &it.b, planned, &applied, NULL);
  if (code) return code;
  mlfab__network_undo(&it.net, 0);
  return mlfab__group_allreduce(&small->grouper, &it.net, &a, push, get, &up, &down, &makespan);
}

/* Grouping alone, in a network without spare room. */
static int group(mlfab__planner *small, budget *memory, uint64_t most) {
  mlfab__grouped out[VECTOR_MOST];
  mlfab__group_choice choice;
  full_batch(3.0);
  mlfab__group_input in = small_group(VECTOR_MOST);
  in.k = most % 2;
  /* One that never arrives: the others go directly, as many as precede it. */
  if (most / 2 % 2) it.updates[VECTOR_MOST - 1].available = mlfab__network_never();
  memory->left = most / 4;
  return mlfab__group_plan(&small->grouper, &it.net, &in, 0, out, &choice);
}

/* Fails one allocation of each run in turn: the failure is reported, and nothing stays reserved. */
TEST(test_memory) {
  static int (*const runs[])(mlfab__planner *, budget *, uint64_t) = {plan_and_reduce, group};
  budget memory = {0, 0};
  mlfab_env hooks = budget_env(&memory);
  const mlfab__env before = env;
  for (size_t k = 0; k < MLFAB__COUNT(runs); k++) {
    int code = MLFAB_ERR_MEMORY;
    for (uint64_t most = 0; code; most++) {
      mlfab__planner small;
      assert_int_equal(mlfab__env_init(&env, &hooks), 0);
      mlfab__planner_init(&small, &env);
      memory.left = 1000;
      code = runs[k](&small, &memory, most);
      assert_true(code == 0 || code == MLFAB_ERR_MEMORY);
      if (code) assert_int_equal(mlfab__network_mark(&it.net), 0);
      mlfab__planner_free(&small);
      mlfab__network_free(&it.net);
      assert_int_equal(env.bytes, 0);
      assert_true(most < 1000);
    }
  }
  env = before;
}

int main(int argc, char **argv) {
  mlfab__env_init(&env, NULL);
  mlfab__planner_init(&planner, &env);
  int failed = testing_run(argc - 1, argv + 1, NULL, NULL);
  mlfab__planner_free(&planner);
  mlfab__replicate_free(&replicator, &env);
  return failed || env.bytes != 0;
}
