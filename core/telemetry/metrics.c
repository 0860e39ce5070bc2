/* metrics.c - the state of a node as OpenMetrics text. See metrics.h. */
#include "metrics.h"

#include <stdio.h>

enum metrics_kind { METRICS_COUNTER, METRICS_GAUGE };

typedef struct metrics_row {
  uint16_t at; /* offset of the member in mlfab_stats */
  uint8_t kind;
  const char *name; /* without mlfab_ and _total */
  const char *unit; /* end of the name, or "" */
  const char *help;
} metrics_row;

#define METRICS_C(member, name, help) \
  { offsetof(mlfab_stats, member), METRICS_COUNTER, name, "", help }
#define METRICS_G(member, name, help) \
  { offsetof(mlfab_stats, member), METRICS_GAUGE, name, "", help }
#define METRICS_BYTES(member, name, help) \
  { offsetof(mlfab_stats, member), METRICS_COUNTER, name, "bytes", help }

static const metrics_row metrics_rows[] = {
    METRICS_C(frames_sent, "frames_sent", "Frames sent."),
    METRICS_C(frames_received, "frames_received", "Frames received."),
    METRICS_BYTES(bytes_sent, "sent_bytes", "Bytes sent, headers included."),
    METRICS_BYTES(bytes_received, "received_bytes", "Bytes received, headers included."),
    METRICS_BYTES(payload_sent, "payload_sent_bytes", "Tensor bytes sent."),
    METRICS_BYTES(payload_received, "payload_received_bytes", "Tensor bytes received."),
    METRICS_C(frames_refused, "frames_refused",
              "Frames refused: malformed, wrong checksum, wrong protocol."),
    METRICS_C(strangers_refused, "strangers_refused",
              "Refused connections of nodes outside this job."),
    METRICS_C(reconnects, "reconnects", "Links that were opened again."),
    METRICS_C(peers_died, "peers_died", "Peers that died."),
    METRICS_C(transfers_revoked, "transfers_revoked",
              "Transfers that were revoked because no byte came."),
    METRICS_C(pushes_started, "pushes_started", "Worker: pushes begun."),
    METRICS_C(pushes_applied, "pushes_applied", "Worker: pushes that the servers applied."),
    METRICS_C(pushes_refused, "pushes_refused", "Worker: pushes that a server did not apply."),
    METRICS_C(pushes_merged, "pushes_merged", "Worker: pushes merged into another push."),
    METRICS_C(pulls_finished, "pulls_finished", "Worker: pulls that ended."),
    METRICS_C(updates_applied, "updates_applied", "Server: updates applied."),
    METRICS_C(updates_refused, "updates_refused", "Server: updates refused."),
    METRICS_C(updates_repeated, "updates_repeated", "Server: updates that came a second time."),
    METRICS_C(commits, "commits", "Server: commits."),
    METRICS_C(pulls_answered, "pulls_answered", "Server: pulls answered."),
    METRICS_C(pulls_delayed, "pulls_delayed", "Server: pulls that had to wait."),
    METRICS_C(pulls_restarted, "pulls_restarted", "Server: pulls begun again."),
    METRICS_C(delay_sum, "delay_updates", "Server: sum of the delays of applied updates."),
    METRICS_G(delay_max, "delay_max_updates", "Server: largest delay of an applied update."),
    METRICS_C(allocations, "allocations", "Calls of the allocator."),
    {offsetof(mlfab_stats, memory_bytes), METRICS_GAUGE, "memory_bytes", "bytes",
     "Bytes allocated now."},
    METRICS_G(trace_hash, "trace_hash", "Hash of all events and actions, to compare runs."),
    METRICS_C(updates_dropped, "updates_dropped", "Updates dropped."),
    METRICS_C(groups_applied, "groups_applied", "Server: aggregates applied."),
    METRICS_C(groups_failed, "groups_failed", "Server: aggregates begun again."),
    METRICS_C(spreads_answered, "spreads_answered",
              "Server: pulls answered through a distributor."),
    METRICS_C(spreads_failed, "spreads_failed", "Server: distributions that failed."),
    METRICS_C(members_added, "members_added", "Aggregator: updates added."),
    METRICS_C(members_served, "members_served", "Distributor: pulls passed on."),
    METRICS_C(plans_made, "plans_made", "Scheduler: plans."),
    METRICS_C(plans_dropped, "plans_dropped", "Scheduler: updates that plans dropped."),
    METRICS_C(plans_grouped, "plans_grouped", "Scheduler: updates that plans grouped."),
    METRICS_G(link_in, "link_in_bytes_per_second",
              "Capacity of this host's incoming link; 0: unknown."),
    METRICS_G(link_out, "link_out_bytes_per_second",
              "Capacity of this host's outgoing link; 0: unknown."),
    METRICS_C(filter_offered, "filter_offered", "Worker: elements that filters were given."),
    METRICS_C(filter_sent, "filter_sent", "Worker: elements that filters let pass."),
    METRICS_C(filter_saturated, "filter_saturated",
              "Worker: elements beyond the range of half precision."),
    METRICS_BYTES(filter_raw_bytes, "filter_raw_bytes", "Worker: bytes before filters."),
    METRICS_BYTES(filter_bytes, "filter_sent_bytes", "Worker: bytes after filters."),
    METRICS_BYTES(pull_raw_bytes, "pull_raw_bytes", "Server: bytes that pulls asked for."),
    METRICS_BYTES(pull_bytes, "pull_sent_bytes", "Server: bytes sent for pulls."),
    METRICS_C(rounds, "rounds", "Server: iterations completed."),
    METRICS_C(slices_moved, "slices_moved", "Server: slices received of other servers."),
    METRICS_BYTES(bytes_moved, "moved_bytes", "Server: bytes received of other servers."),
    METRICS_C(collectives, "collectives", "Worker: collectives that succeeded."),
    METRICS_C(collectives_failed, "collectives_failed", "Worker: collectives that failed."),
    METRICS_C(collective_epochs, "collective_epochs", "Worker: epochs of collectives."),
    METRICS_C(rounds_partial, "rounds_partial", "Worker: rounds of partial reductions."),
    METRICS_C(updates_lost, "updates_lost",
              "Worker: applied updates that were lost with a server."),
    METRICS_C(replica_moments, "replica_moments", "Server: states that its replica has."),
    METRICS_C(replica_bytes, "replica_bytes", "Server: bytes sent to its replica."),
    METRICS_C(promotions, "promotions", "Server: times that it took over from the other copy."),
    METRICS_C(iterations, "iterations", "Worker: iterations whose pushes are decided."),
    METRICS_C(push_delay_sum, "push_delay_updates",
              "Worker: sum of the delays of its applied updates."),
    METRICS_BYTES(network_sent, "network_sent_bytes",
                  "Bytes sent on network links of the host, where links are measured."),
    METRICS_BYTES(network_received, "network_received_bytes",
                  "Bytes received on network links of the host, where links are measured."),
};

/* A text that may be longer than its room. */
typedef struct metrics_text {
  char *at;
  size_t room, used;
  int older; /* MLFAB_METRICS_PROMETHEUS: a counter's family has its samples' name, and there are no units */
} metrics_text;

static void metrics_put(metrics_text *t, const char *format, ...) MLFAB__PRINTF(2, 3);

static void metrics_put(metrics_text *t, const char *format, ...) {
  va_list arguments;
  size_t left = t->used < t->room ? t->room - t->used : 0;
  va_start(arguments, format);
  int n = mlfab__vformat(left ? t->at + t->used : NULL, left, format, arguments);
  va_end(arguments);
  if (n > 0) t->used += (size_t)n;
}

/* A label's value: backslash, quote and newline are escaped, and bytes that are not ASCII become '?'. */
static void metrics_value(metrics_text *t, const char *name, const char *value) {
  metrics_put(t, "%s=\"", name);
  for (const char *at = value; *at; at++) {
    unsigned char c = (unsigned char)*at;
    if (c == '\\' || c == '"')
      metrics_put(t, "\\%c", c);
    else if (c == '\n')
      metrics_put(t, "\\n");
    else
      metrics_put(t, "%c", c < 32 || c > 126 ? '?' : c);
  }
  metrics_put(t, "\"");
}

/* The labels of every sample of this node, without braces. */
static void metrics_labels(metrics_text *t, const mlfab__snapshot *s) {
  metrics_value(t, "fabric", s->job);
  metrics_put(t, ",role=\"%s\"", s->role);
  if (s->rank >= 0) metrics_put(t, ",rank=\"%d\"", (int)s->rank);
  if (s->server >= 0) metrics_put(t, ",server=\"%d\"", (int)s->server);
}

static void metrics_family(metrics_text *t, const char *name, const char *type, const char *unit,
                           const char *help) {
  const char *suffix = t->older && !strcmp(type, "counter") ? "_total" : "";
  metrics_put(t, "# TYPE mlfab_%s%s %s\n", name, suffix, type);
  if (*unit && !t->older) metrics_put(t, "# UNIT mlfab_%s %s\n", name, unit);
  metrics_put(t, "# HELP mlfab_%s%s %s\n", name, suffix, help);
}

static void metrics_number(metrics_text *t, const mlfab__snapshot *s, const metrics_row *row) {
  uint64_t value;
  memcpy(&value, (const char *)&s->stats + row->at, sizeof value);
  int counts = row->kind == METRICS_COUNTER;
  metrics_family(t, row->name, counts ? "counter" : "gauge", row->unit, row->help);
  metrics_put(t, "mlfab_%s%s{", row->name, counts ? "_total" : "");
  metrics_labels(t, s);
  metrics_put(t, "} %llu\n", (unsigned long long)value);
}

static void metrics_time(metrics_text *t, const mlfab__snapshot *s, const char *name,
                         const char *help, uint64_t ns) {
  metrics_family(t, name, "gauge", "seconds", help);
  metrics_put(t, "mlfab_%s{", name);
  metrics_labels(t, s);
  metrics_put(t, "} %llu.%03llu\n", (unsigned long long)(ns / 1000000000u),
              (unsigned long long)(ns / 1000000u % 1000));
}

static void metrics_gauge(metrics_text *t, const mlfab__snapshot *s, const char *name,
                          const char *help, uint64_t value) {
  metrics_family(t, name, "gauge", "", help);
  metrics_put(t, "mlfab_%s{", name);
  metrics_labels(t, s);
  metrics_put(t, "} %llu\n", (unsigned long long)value);
}

/* A gauge, because readers of the older text format do not know the type "info". */
static void metrics_build(metrics_text *t, const mlfab__snapshot *s) {
  metrics_family(t, "node_info", "gauge", "", "The process.");
  metrics_put(t, "mlfab_node_info{");
  metrics_labels(t, s);
  metrics_put(t, ",");
  metrics_value(t, "host", s->host);
  metrics_put(t, ",pid=\"%ld\",version=\"%s\",protocol=\"%d\"} 1\n", s->pid, MLFAB_VERSION,
              MLFAB_PROTOCOL);
}

/* The peer that the oldest open call awaits: labels "call", "for", "peer". There is a sample only if a call is open. */
static void metrics_waits(metrics_text *t, const mlfab__snapshot *s) {
  metrics_family(t, "waits_seconds", "gauge", "seconds",
                 "How long the oldest open call has waited, and for whom.");
  if (!s->call) return;
  metrics_put(t, "mlfab_waits_seconds{");
  metrics_labels(t, s);
  metrics_put(t, ",call=\"%s\"", s->call);
  if (s->waits_for != MLFAB_NO_RANK)
    metrics_put(t, ",for=\"%s\",peer=\"%d\"", s->waits_for_server ? "server" : "worker",
                (int)s->waits_for);
  metrics_put(t, "} %llu.%06llu\n", (unsigned long long)(s->waits_ns / 1000000000u),
              (unsigned long long)(s->waits_ns / 1000u % 1000000));
}

MLFAB__INTERNAL size_t mlfab__metrics_text(const mlfab__snapshot *s, int format, char *text,
                                           size_t room) {
  metrics_text t = {text, room, 0, format == MLFAB_METRICS_PROMETHEUS};
  if (room > 0) text[0] = 0;
  metrics_build(&t, s);
  metrics_time(&t, s, "opened_timestamp_seconds", "When the context was opened.",
               s->opened_unix_ns);
  metrics_time(&t, s, "written_timestamp_seconds", "When these metrics were taken.", s->unix_ns);
  metrics_gauge(&t, s, "state", "0 joins, 1 is ready, 2 has failed, 3 is closed.", s->state);
  metrics_gauge(&t, s, "open_requests", "Calls that have begun and are not done.", s->requests);
  metrics_waits(&t, s);
  for (size_t i = 0; i < MLFAB__COUNT(metrics_rows); i++) metrics_number(&t, s, &metrics_rows[i]);
  if (!t.older) metrics_put(&t, "# EOF\n");
  return t.used;
}

/* The rank that a request awaits: as it was told, or as its role knows. */
static int32_t metrics_whom(const mlfab_node *node, const mlfab__request *r, int *is_server_p) {
  int32_t rank = r->blame.rank;
  *is_server_p = rank != MLFAB_NO_RANK && r->blame.is_server;
  for (uint32_t i = 0; rank == MLFAB_NO_RANK && i < node->nroles; i++) {
    const mlfab__role *role = &node->roles[i];
    if (role->awaits && role->requests & 1u << r->kind) rank = role->awaits(role->self, r);
  }
  return rank;
}

static void metrics_take_waits(const mlfab_node *node, uint64_t now_ns, mlfab__snapshot *s) {
  const mlfab__request *first = NULL;
  s->waits_for = MLFAB_NO_RANK;
  for (uint32_t b = 0; node->requests.open > 0 && b < MLFAB__REQUEST_BUCKETS; b++) {
    for (const mlfab__request *r = node->requests.buckets[b]; r; r = r->next) {
      if (r->done) continue;
      s->requests++;
      int is_server, known = s->waits_for != MLFAB_NO_RANK;
      int32_t rank = metrics_whom(node, r, &is_server);
      /* Prefers a call that waits for a known rank, then the oldest. */
      if (first && ((rank != MLFAB_NO_RANK) != known ? known : r->started_ns >= first->started_ns))
        continue;
      first = r;
      s->waits_for = rank;
      s->waits_for_server = is_server;
    }
  }
  if (!first) return;
  s->call = mlfab__request_call(first->kind);
  s->waits_ns = now_ns > first->started_ns ? now_ns - first->started_ns : 0;
}

MLFAB__INTERNAL void mlfab__metrics_take(const mlfab_node *node, uint64_t now_ns,
                                         mlfab__snapshot *s) {
  memset(s, 0, sizeof *s);
  mlfab_node_stats(node, &s->stats, sizeof s->stats);
  s->state = node->phase == MLFAB__BOOTSTRAP_READY    ? 1
             : node->phase == MLFAB__BOOTSTRAP_FAILED ? 2
                                                      : 0;
  s->rank = node->is_worker ? node->config.rank : -1;
  s->server = node->is_server ? (int32_t)node->server_number : -1;
  s->role = node->is_worker && node->is_server ? "worker+server"
            : node->is_worker                  ? "worker"
            : node->is_replica                 ? "replica"
            : node->is_server                  ? "server"
                                               : "scheduler";
  s->job = node->config.job;
  metrics_take_waits(node, now_ns, s);
}
