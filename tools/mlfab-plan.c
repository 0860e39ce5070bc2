/* mlfab-plan.c - prints the plan that the library's scheduler would make for a batch in a file, and why.
 *
 *    mlfab-plan FILE [--human] [--svg [OUT]] [--cut] [--best] [--backlog TIME]
 *
 * It reads the input records of tests/vectors/FORMAT-mlfabric.md, up to `expect` or `end`. It prints the records that
 * the format expects of them. The kinds are batch, netup, dist, allreduce, ssp, divergence and momentum. It is linked with the library's own planner.
 *
 * A file is untrusted: every error in it is reported with its line, and the exit status is 2. Counts are
 * limited before memory is allocated, and lists end where their lines do. */
#include "options.h"
#include "replicate.h"

#include <inttypes.h>

enum {
  LINE_MOST = 65536,
  TOKENS_MOST = 8192,
  COUNT_MOST = 100000, /* nodes, links, paths, updates: each at most this many */
  SERVERS_MOST = 64,
  STEPS_MOST = TOKENS_MOST / 2,
  LANES_MOST = 60,
  COLUMNS = 72
};

/* ---- input ---- */

typedef struct path {
  uint32_t from, to, first, n; /* its links: path_links[first] and following */
} path;

typedef struct record { /* a reserved transfer */
  mlfab__transfer transfer;
  mlfab__stretch *pieces;
  int replica; /* it goes to the replica or its aggregators */
} record;

typedef struct input {
  const char *name;
  FILE *file;
  uint32_t line, n;
  char text[LINE_MOST];
  char *token[TOKENS_MOST];
  int human, svg, best, cut;
  const char *svg_path;
  /* The input. */
  char kind[16];
  mlfab__env env;
  mlfab__network net;
  uint8_t *has; /* by profile: its capacity is set */
  path *paths;
  uint32_t npaths, *path_links, npath_links;
  mlfab__batch batch;
  mlfab__candidate *updates;
  double *bytes;
  uint32_t server[SERVERS_MOST], *aggregators, *distributors;
  uint32_t distributors_k, seen; /* seen: bits of enum record_seen */
  uint32_t *requests;
  uint64_t *ids;
  uint32_t nrequests, root;
  double sizes[SERVERS_MOST], *available;
  mlfab__replica replica;
  mlfab__replication replication; /* n is 0 without a replica */
  mlfab__candidate *punted;
  double *punted_bytes;
  uint32_t replica_nodes[SERVERS_MOST], *replica_aggregators;
  /* The plan. */
  mlfab__planner planner;
  mlfab__replicator replicator;
  uint64_t *list_ids; /* of the replica's list */
  record *records;
  uint32_t nrecords, records_room;
} input;

enum record_seen {
  SEEN_NODES = 1,
  SEEN_LINKS = 2,
  SEEN_PATHS = 4,
  SEEN_SERVER = 8,
  SEEN_AGGREGATORS = 16,
  SEEN_UPDATES = 32,
  SEEN_TAU = 64,
  SEEN_MODE = 128,
  SEEN_SIZES = 256,
  SEEN_ROOT = 512,
  SEEN_DISTRIBUTORS = 1024,
  SEEN_VERSION = 2048,
  SEEN_REPLICA = 4096,
  SEEN_REPLICA_AGGREGATORS = 8192,
  SEEN_GAMMA = 16384,
  SEEN_HISTORY = 32768,
  SEEN_DIV_MAX = 65536,
  SEEN_PUNTED = 131072
};

static void fail(const input *in, const char *format, ...) MLFAB__PRINTF(2, 3);
static void fail(const input *in, const char *format, ...) {
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  /* Bytes of the file that are not printable are replaced. */
  for (char *c = text; *c; c++) {
    if (*c < ' ' || *c > '~') *c = '?';
  }
  fflush(stdout);
  fprintf(stderr, "mlfab-plan: ");
  if (in->name && in->line == 0) fprintf(stderr, "%s: ", in->name);
  if (in->name && in->line > 0) fprintf(stderr, "%s:%u: ", in->name, in->line);
  fprintf(stderr, "%s\n", text);
  exit(EXIT_USAGE);
}

static void *memory_for(const input *in, size_t count, size_t size) {
  void *memory = calloc(count > 0 ? count : 1, size);
  if (memory == NULL) fail(in, "out of memory");
  return memory;
}

static void must(const input *in, int code, const char *what) {
  if (code) fail(in, "%s: %s", what, mlfab_error_text(code));
}

/* Reads the next line that is not empty into tokens: 1, or 0 at the end of the file. */
static int next_line(input *in) {
  do {
    if (!fgets(in->text, sizeof in->text, in->file)) return 0;
    in->line++;
    size_t bytes = strlen(in->text);
    if (bytes + 1 == sizeof in->text && in->text[bytes - 1] != '\n') {
      fail(in, "the line is longer than %d characters", LINE_MOST - 2);
    }
    in->n = 0;
    for (char *t = strtok(in->text, " \t\r\n"); t; t = strtok(NULL, " \t\r\n")) {
      if (in->n == TOKENS_MOST) fail(in, "more than %d words in a line", TOKENS_MOST);
      in->token[in->n++] = t;
    }
  } while (in->n == 0);
  return 1;
}

static int is(const input *in, const char *keyword) { return strcmp(in->token[0], keyword) == 0; }

static void need_line(input *in, const char *keyword) {
  if (!next_line(in)) fail(in, "the file ends where a line `%s` belongs", keyword);
  if (!is(in, keyword)) fail(in, "`%.40s` where a line `%s` belongs", in->token[0], keyword);
}

static const char *token(const input *in, uint32_t at) {
  if (at >= in->n) fail(in, "`%s` has %u values, and more belong there", in->token[0], in->n - 1);
  return in->token[at];
}

static void need_tokens(const input *in, uint64_t n) {
  if (in->n == n) return;
  fail(in, "`%s` has %u values where %" PRIu64 " belong", in->token[0], in->n - 1, n - 1);
}

/* Any number that is not NaN; `inf` too. */
static double number(const input *in, uint32_t at, const char *what) {
  const char *text = token(in, at);
  char *end;
  double x = strtod(text, &end);
  if (end == text || *end != 0) fail(in, "%s: `%.40s` is not a number", what, text);
  if (x != x) fail(in, "%s is NaN", what);
  return x;
}

static int has_units; /* the file has them, so times are in seconds */

/* A size, a rate or a time: finite and not negative, perhaps with a unit. Times with a unit are in seconds. */
static double amount(const input *in, uint32_t at, enum option_kind kind, const char *what) {
  const char *text = token(in, at);
  double by = kind == OPTION_TIME ? 1e9 : 1, x = options_number(text, kind, by) / by;
  size_t digits = strspn(text, "0123456789.");
  if (x >= 0 && text[digits] && !strchr("eE", text[digits]))
    return has_units = 1, x; /* it has a unit */
  if (x < 0 && digits > 0 && text[digits] && !strchr("eE", text[digits]))
    fail(in, "%s: `%.40s` is not %s", what, text, options_units(kind));
  x = number(in, at, what);
  if (!mlfab__finite(x)) fail(in, "%s is infinite", what);
  if (x < 0) fail(in, "%s is negative: %s", what, text);
  return x;
}

static int64_t whole(const input *in, uint32_t at, int64_t least, int64_t most, const char *what) {
  const char *text = token(in, at);
  char *end;
  errno = 0;
  long long x = strtoll(text, &end, 10);
  if (end == text || *end != 0) fail(in, "%s: `%.40s` is not a whole number", what, text);
  if (errno == ERANGE || x < least || x > most) {
    fail(in, "%s: %.40s is not in %" PRId64 "..%" PRId64, what, text, least, most);
  }
  return x;
}

static uint32_t count(const input *in, uint32_t at, const char *what) {
  return (uint32_t)whole(in, at, 0, COUNT_MOST, what);
}

static uint32_t node(const input *in, uint32_t at) {
  if (!(in->seen & SEEN_NODES)) fail(in, "`nodes` belongs before it");
  return (uint32_t)whole(in, at, 0, (int64_t)in->net.nodes - 1, "node");
}

static void once(input *in, uint32_t what) {
  if (in->seen & what) fail(in, "a second line `%s`", in->token[0]);
  in->seen |= what;
}

/* ---- the network ---- */

static void read_nodes(input *in) {
  once(in, SEEN_NODES);
  need_tokens(in, 2);
  uint32_t nodes = count(in, 1, "nodes");
  if (nodes == 0) fail(in, "a network without nodes");
  in->net.nodes = nodes;
  /* `links` follows the nodes' lines: read_network completes both. */
}

static void read_profile(input *in, enum mlfab__capacity_kind kind, uint32_t index, uint32_t has) {
  static double at[STEPS_MOST], rate[STEPS_MOST];
  uint32_t n = (uint32_t)whole(in, 2, 1, STEPS_MOST, "the number of steps");
  need_tokens(in, 3 + 2 * (uint64_t)n);
  for (uint32_t k = 0; k < n; k++) {
    at[k] = amount(in, 3 + 2 * k, OPTION_TIME, "a time");
    rate[k] = amount(in, 4 + 2 * k, OPTION_RATE, "a rate");
    if (k == 0 && at[k] != 0) fail(in, "the first step begins at %s, not at 0", token(in, 3));
    if (k > 0 && at[k] <= at[k - 1]) fail(in, "the times of the steps do not ascend");
  }
  if (in->has[has]) fail(in, "a second line `%s %u`", in->token[0], index);
  in->has[has] = 1;
  must(in, mlfab__network_capacity(&in->net, kind, index, n, at, rate), "capacity");
}

static void read_path(input *in) {
  uint32_t from = node(in, 1), to = node(in, 2), n = count(in, 3, "the number of links");
  need_tokens(in, 4 + (uint64_t)n);
  if (from == to) fail(in, "a path from node %u to itself", from);
  path *p = &in->paths[in->npaths++];
  *p = (path){from, to, in->npath_links, n};
  uint32_t *links = realloc(in->path_links, ((size_t)in->npath_links + n + 1) * sizeof *links);
  if (links == NULL) fail(in, "out of memory");
  in->path_links = links;
  for (uint32_t i = 0; i < n; i++) {
    if (in->net.links == 0) fail(in, "a path over a link, and there are no links");
    uint32_t l = (uint32_t)whole(in, 4 + i, 0, (int64_t)in->net.links - 1, "link");
    for (uint32_t k = 0; k < i; k++) {
      if (links[p->first + k] == l) fail(in, "link %u is twice in the path", l);
    }
    links[in->npath_links++] = l;
  }
  for (uint32_t i = 0; i + 1 < in->npaths; i++) {
    if (in->paths[i].from == from && in->paths[i].to == to) {
      fail(in, "a second path from node %u to node %u", from, to);
    }
  }
  must(in, mlfab__network_path(&in->net, from, to, n, links + p->first), "path");
}

/* Finds the line `links` further down, and returns to the present line. */
static uint32_t find_links(input *in) {
  long place = ftell(in->file);
  uint32_t line = in->line, links = 0;
  if (place < 0) fail(in, "the file cannot be read twice (a pipe?)");
  while (next_line(in) && (is(in, "egress") || is(in, "ingress"))) continue;
  if (in->n > 0 && is(in, "links")) {
    need_tokens(in, 2);
    links = count(in, 1, "links");
  }
  if (fseek(in->file, place, SEEK_SET)) fail(in, "cannot go back in the file");
  clearerr(in->file);
  in->line = line;
  in->n = 0;
  return links;
}

static void read_capacities(input *in, const char *keyword, enum mlfab__capacity_kind kind,
                            uint32_t n, uint32_t first) {
  for (uint32_t i = 0; i < n; i++) {
    need_line(in, keyword);
    uint32_t index = (uint32_t)whole(in, 1, 0, (int64_t)n - 1, keyword);
    read_profile(in, kind, index, first + index);
  }
}

/* Reads the network from `nodes`, the present line, to the paths. */
static void read_network(input *in) {
  read_nodes(in);
  uint32_t nodes = in->net.nodes, links = find_links(in);
  in->net.nodes = 0;
  must(in, mlfab__network_init(&in->net, &in->env, nodes, links), "network");
  in->has = memory_for(in, 2 * (size_t)nodes + links, 1);
  read_capacities(in, "egress", MLFAB__EGRESS, nodes, 0);
  read_capacities(in, "ingress", MLFAB__INGRESS, nodes, nodes);
  need_line(in, "links");
  read_capacities(in, "link", MLFAB__SHARED, links, 2 * nodes);
  need_line(in, "paths");
  need_tokens(in, 2);
  uint32_t paths = count(in, 1, "paths");
  in->paths = memory_for(in, paths, sizeof *in->paths);
  for (uint32_t i = 0; i < paths; i++) {
    need_line(in, "path");
    read_path(in);
  }
}

/* ---- batch ---- */

static void read_servers(input *in) {
  once(in, SEEN_SERVER);
  uint32_t m = (uint32_t)whole(in, 1, 1, SERVERS_MOST, "the number of servers");
  need_tokens(in, 2 + (uint64_t)m);
  for (uint32_t j = 0; j < m; j++) in->server[j] = node(in, 2 + j);
  in->batch.servers = m;
}

/* Reads `aggregators k` and its lines, or another list of the same form. */
static uint32_t *read_hops(input *in, const char *keyword, uint32_t *k_p) {
  need_tokens(in, 2);
  uint32_t k = count(in, 1, "their number"), m = in->batch.servers;
  if (m == 0) fail(in, "`server` belongs before it");
  uint32_t *nodes = memory_for(in, (size_t)k * m, sizeof *nodes);
  for (uint32_t q = 0; q < k; q++) {
    need_line(in, keyword);
    need_tokens(in, 2 + (uint64_t)m);
    whole(in, 1, (int64_t)q + 1, (int64_t)q + 1, keyword);
    for (uint32_t j = 0; j < m; j++) nodes[(size_t)q * m + j] = node(in, 2 + j);
  }
  *k_p = k;
  return nodes;
}

static void read_tau(input *in) {
  once(in, SEEN_TAU);
  need_tokens(in, 2);
  if (strcmp(in->token[1], "inf") == 0) {
    in->batch.delay_bound = INT64_MAX;
    return;
  }
  in->batch.delay_bound = whole(in, 1, INT64_MIN, INT64_MAX - 1, "tau_max");
  if (in->batch.delay_bound <= 0) {
    fail(in,
         "tau_max %s admits nothing: an update may be applied when its delay is smaller than "
         "tau_max (eq. 9), and no delay is smaller than 0; 1 is the least, `inf` is no bound",
         in->token[1]);
  }
}

static void read_update(input *in, const char *keyword, mlfab__candidate *c, double *bytes) {
  uint32_t m = in->batch.servers;
  need_line(in, keyword);
  need_tokens(in, 7 + (uint64_t)m);
  c->id = (uint64_t)whole(in, 1, 0, INT64_MAX, "id");
  c->node = node(in, 2);
  c->available = amount(in, 3, OPTION_TIME, "the time it is available");
  c->version = whole(in, 4, INT64_MIN / 2, INT64_MAX / 2, "version");
  c->norm = amount(in, 5, OPTION_PART, "norm");
  if (whole(in, 6, 1, SERVERS_MOST, "the number of sizes") != (int64_t)m) {
    fail(in, "an update of %s parts for %u servers", in->token[6], m);
  }
  for (uint32_t j = 0; j < m; j++) bytes[j] = amount(in, 7 + j, OPTION_SIZE, "size");
  c->bytes = bytes;
}

static int by_id(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

/* Ids must be unique, because they identify updates in the output. */
static void check_ids(const input *in, const uint64_t *ids, uint32_t n) {
  uint64_t *sorted = memory_for(in, n, sizeof *sorted);
  memcpy(sorted, ids, n * sizeof *sorted);
  qsort(sorted, n, sizeof *sorted, by_id);
  for (uint32_t i = 1; i < n; i++) {
    if (sorted[i] == sorted[i - 1]) fail(in, "id %" PRIu64 " is used twice", sorted[i]);
  }
  free(sorted);
}

/* Reads `updates n` or `punted n` and its lines; returns n. */
static uint32_t read_updates(input *in, const char *keyword, mlfab__candidate **updates_p,
                             double **bytes_p) {
  need_tokens(in, 2);
  uint32_t n = count(in, 1, in->token[0]), m = in->batch.servers;
  if (m == 0) fail(in, "`server` belongs before it");
  *updates_p = memory_for(in, n, sizeof **updates_p);
  *bytes_p = memory_for(in, (size_t)n * m, sizeof **bytes_p);
  for (uint32_t i = 0; i < n; i++) {
    read_update(in, keyword, &(*updates_p)[i], *bytes_p + (size_t)i * m);
  }
  return n;
}

/* The ids of the updates, and that those of punted updates differ from them. */
static void read_ids(input *in) {
  uint32_t n = in->batch.n, punted = in->replica.npunted;
  in->ids = memory_for(in, (size_t)n + punted, sizeof *in->ids);
  for (uint32_t i = 0; i < n; i++) in->ids[i] = in->updates[i].id;
  for (uint32_t i = 0; i < punted; i++) in->ids[n + i] = in->punted[i].id;
  check_ids(in, in->ids, n + punted);
}

/* The last value of the line: a computed number has a fraction before it. */
static double last_amount(const input *in, const char *what) {
  if (in->n > 3) need_tokens(in, 3);
  return amount(in, in->n < 3 ? 1 : 2, OPTION_PART, what);
}

static double read_gamma(input *in) {
  double gamma = last_amount(in, "gamma");
  if (gamma > 1) fail(in, "gamma %s is above 1", in->token[in->n - 1]);
  return gamma;
}

static void read_div_max(input *in) {
  need_tokens(in, 2);
  in->replication.div_max = number(in, 1, "div_max");
  if (in->replication.div_max < 0) fail(in, "div_max is negative: %s", in->token[1]);
}

static void read_replica_nodes(input *in) {
  uint32_t m = in->batch.servers;
  if (m == 0) fail(in, "`server` belongs before it");
  if (whole(in, 1, 1, SERVERS_MOST, "the number of nodes") != (int64_t)m) {
    fail(in, "a replica of %s parts for %u servers", in->token[1], m);
  }
  need_tokens(in, 2 + (uint64_t)m);
  for (uint32_t j = 0; j < m; j++) in->replica_nodes[j] = node(in, 2 + j);
  in->replication.n = 1;
}

/* Reads a record about the replica: 1; 0: it is another one. */
static int read_replica(input *in) {
  if (is(in, "replica")) {
    once(in, SEEN_REPLICA);
    read_replica_nodes(in);
  } else if (is(in, "raggregators")) {
    once(in, SEEN_REPLICA_AGGREGATORS);
    in->replica_aggregators = read_hops(in, "raggregator", &in->replica.k);
  } else if (is(in, "gamma")) {
    once(in, SEEN_GAMMA);
    in->replication.gamma = read_gamma(in);
  } else if (is(in, "h0")) {
    once(in, SEEN_HISTORY);
    need_tokens(in, 2);
    in->replica.history = amount(in, 1, OPTION_PART, "h0");
  } else if (is(in, "div_max")) {
    once(in, SEEN_DIV_MAX);
    read_div_max(in);
  } else if (is(in, "punted")) {
    once(in, SEEN_PUNTED);
    in->replica.npunted = read_updates(in, "pupdate", &in->punted, &in->punted_bytes);
  } else {
    return 0;
  }
  return 1;
}

static void read_mode(input *in) {
  once(in, SEEN_MODE);
  need_tokens(in, 2);
  in->batch.list = strcmp(in->token[1], "list") == 0;
  if (!in->batch.list && strcmp(in->token[1], "order") != 0) {
    fail(in, "mode `%.40s` is neither order nor list", in->token[1]);
  }
}

static int at_end(const input *in) { return is(in, "expect") || is(in, "end"); }

static void read_batch(input *in) {
  in->replication.div_max = mlfab__network_never();
  for (;;) {
    if (!next_line(in)) fail(in, "the file ends before `expect` or `end`");
    if (at_end(in)) break;
    if (is(in, "nodes")) {
      read_network(in);
    } else if (is(in, "mode")) {
      read_mode(in);
    } else if (is(in, "server")) {
      read_servers(in);
    } else if (is(in, "aggregators")) {
      once(in, SEEN_AGGREGATORS);
      in->aggregators = read_hops(in, "aggregator", &in->batch.k);
    } else if (is(in, "tau_max")) {
      read_tau(in);
    } else if (is(in, "v_init")) {
      once(in, SEEN_VERSION);
      in->batch.version = whole(in, 1, INT64_MIN / 2, INT64_MAX / 2, "v_init");
    } else if (is(in, "updates")) {
      once(in, SEEN_UPDATES);
      in->batch.n = read_updates(in, "update", &in->updates, &in->bytes);
    } else if (!read_replica(in)) {
      fail(in, "unknown keyword `%.40s` in a batch", in->token[0]);
    }
  }
  if (!(in->seen & SEEN_UPDATES)) fail(in, "there are no `updates`");
  if (!(in->seen & SEEN_TAU) && !in->batch.list) fail(in, "there is no `tau_max`");
  if (!(in->seen & SEEN_REPLICA) && in->replica.npunted > 0) {
    fail(in, "updates are `punted`, and there is no `replica`");
  }
  read_ids(in);
  in->batch.updates = in->updates;
  in->batch.server = in->server;
  in->batch.aggregators = in->aggregators;
  in->batch.best = in->best;
  in->batch.cut = in->cut;
  in->replica.nodes = in->replica_nodes;
  in->replica.aggregators = in->replica_aggregators;
  in->replica.punted = in->punted;
  in->replication.replicas = &in->replica;
}

/* ---- reservations ---- */

static void on_reserve(void *user, const mlfab__transfer *t) {
  input *in = user;
  if (in->nrecords == in->records_room) {
    in->records_room = in->records_room ? 2 * in->records_room : 64;
    in->records = realloc(in->records, in->records_room * sizeof *in->records);
    if (in->records == NULL) fail(in, "out of memory");
  }
  record *r = &in->records[in->nrecords++];
  r->replica = 0;
  r->transfer = *t;
  r->pieces = memory_for(in, t->n, sizeof *r->pieces);
  if (t->n > 0) memcpy(r->pieces, t->pieces, t->n * sizeof *r->pieces);
}

static void watch(input *in, int on) {
  in->net.watch = on ? on_reserve : NULL;
  in->net.user = in;
}

/* ---- output ---- */

/* Prints a time in the format's two tokens. */
static void put_time(double t) {
  if (mlfab__finite(t)) {
    printf(" %.17g %.17g", t, t);
  } else {
    printf(" inf inf");
  }
}

static const char *reason_name(uint8_t reason) {
  return reason == MLFAB__LOOKAHEAD ? "lookahead"
         : reason == MLFAB__EXPIRED ? "expired"
                                    : "unreachable";
}

static int dropped_by_id(const void *a, const void *b, const mlfab__candidate *updates) {
  uint64_t x = updates[((const mlfab__ordered *)a)->update].id;
  uint64_t y = updates[((const mlfab__ordered *)b)->update].id;
  return x < y ? -1 : x > y;
}

/* Shell sort, because many updates may be dropped. */
static void sort_dropped(const input *in, mlfab__ordered *list, uint32_t n) {
  for (uint32_t gap = n / 2; gap > 0; gap /= 2) {
    for (uint32_t i = gap; i < n; i++) {
      mlfab__ordered x = list[i];
      uint32_t at = i;
      while (at >= gap && dropped_by_id(&x, &list[at - gap], in->updates) < 0) {
        list[at] = list[at - gap];
        at -= gap;
      }
      list[at] = x;
    }
  }
}

/* Prints `sjf` or `order` with their lines; the order is left in `out`. */
static uint32_t put_order(input *in, int deadlines, mlfab__ordered *out) {
  mlfab__order_input order = {in->updates,       in->batch.n,           in->server,
                              in->batch.servers, in->batch.delay_bound, in->batch.version};
  uint32_t mark = mlfab__network_mark(&in->net), applied;
  mlfab__orderer *o = &in->planner.orderer;
  must(in,
       deadlines ? mlfab__order_deadlines(o, &in->net, &order, out, &applied)
                 : mlfab__order_shortest(o, &in->net, &order, out, &applied),
       "order");
  mlfab__network_undo(&in->net, mark);
  if (in->human || in->svg) return applied;
  printf("%s %u %u\n", deadlines ? "order" : "sjf", applied, in->batch.n - applied);
  for (uint32_t i = 0; i < applied; i++) {
    printf("%s %u %" PRIu64, deadlines ? "a" : "s", i + 1, in->updates[out[i].update].id);
    if (deadlines) printf(" %s", out[i].reason == MLFAB__DEADLINE ? "D" : "S");
    put_time(out[i].end);
    printf("\n");
  }
  sort_dropped(in, out + applied, in->batch.n - applied);
  for (uint32_t i = applied; i < in->batch.n; i++) {
    printf("d %" PRIu64 " %s\n", in->updates[out[i].update].id, reason_name(out[i].reason));
  }
  return applied;
}

/* Prints `detagg` and T(n) of every case; `late`: MLFAB__GROUP_LATE, or 0. */
static void put_times(input *in, const mlfab__group_input *group, uint32_t late) {
  printf("detagg %u\n", group->n + 1);
  for (uint32_t n = 0; n <= group->n; n++) {
    uint32_t mark = mlfab__network_mark(&in->net);
    double time;
    must(in,
         mlfab__group_case(&in->planner.grouper, &in->net, group, MLFAB__GROUP_PAPER | late, n,
                           group->n, NULL, &time),
         "groups");
    mlfab__network_undo(&in->net, mark);
    printf("T %u", n);
    put_time(time);
    printf("\n");
  }
}

/* Prints `groups` or `rgroups` of the updates that are sent; ids are in their order. */
static void put_groups(const char *keyword, const uint64_t *ids, const mlfab__grouped *grouped,
                       uint32_t n) {
  uint32_t groups = 0;
  while (n > 0 && grouped[n - 1].number == 0) n--;
  if (n > 0) groups = grouped[n - 1].number;
  printf("%s %u\n", keyword, groups);
  for (uint32_t at = 0, end; at < n; at = end) {
    const mlfab__grouped *g = &grouped[at];
    for (end = at + 1; end < n && grouped[end].number == g->number;) end++;
    printf("g %u %u %u", g->number - 1, g->q, end - at);
    for (uint32_t i = at; i < end; i++) printf(" %" PRIu64, ids[i]);
    put_time(g->ready);
    put_time(g->end);
    put_time(g->commit);
    printf("\n");
    for (uint32_t i = at; g->q > 0 && i < end; i++) {
      printf("m %" PRIu64, ids[i]);
      put_time(grouped[i].arrive);
      printf("\n");
    }
  }
}

static void put_pieces(const record *r) {
  for (uint32_t k = 0; k < r->transfer.n; k++) {
    printf("r");
    put_time(r->pieces[k].from);
    put_time(r->pieces[k].to);
    printf(" %.17g\n", r->pieces[k].rate);
  }
}

/* Prints `server_rates` or `replica_rates`. */
static void put_rates(const input *in, int replica) {
  const uint64_t *ids = replica ? in->list_ids : in->ids;
  uint32_t n = 0;
  for (uint32_t i = 0; i < in->nrecords; i++) n += in->records[i].replica == replica;
  printf("%s_rates %u\n", replica ? "replica" : "server", n);
  for (uint32_t i = 0; i < in->nrecords; i++) {
    const mlfab__transfer *t = &in->records[i].transfer;
    if (in->records[i].replica != replica) continue;
    printf("x %sagg", replica ? "r" : "");
    if (t->purpose == MLFAB__AGGREGATE) {
      printf("%u", t->index);
    } else {
      printf("%c%" PRIu64, t->purpose == MLFAB__TO_SERVER ? 'd' : 'm', ids[t->index]);
    }
    printf(" %u %u %.17g", t->from, t->to, t->bytes);
    put_time(t->available);
    put_time(t->end);
    printf(" %u\n", t->n);
    put_pieces(&in->records[i]);
  }
}

static void put_residual(const input *in) {
  static const char *const names[] = {"egress", "ingress", "link"};
  printf("residual %u\n", 2 * in->net.nodes + in->net.links);
  for (int kind = MLFAB__EGRESS; kind <= MLFAB__SHARED; kind++) {
    uint32_t n = kind == MLFAB__SHARED ? in->net.links : in->net.nodes;
    for (uint32_t i = 0; i < n; i++) {
      const mlfab__profile *p =
          mlfab__network_residual(&in->net, (enum mlfab__capacity_kind)kind, i);
      printf("res %s %u %u\n", names[kind], i, p->n);
      for (uint32_t k = 0; k < p->n; k++) {
        printf("c");
        put_time(p->steps[k].at);
        printf(" %.17g\n", p->steps[k].rate);
      }
    }
  }
}

/* ---- output for people ---- */

/* When the first byte of a group's sum is sent, which may be before the last member arrives. */
static double sum_starts(const input *in, const mlfab__planned *p) {
  double starts = p->ready;
  for (uint32_t i = 0; i < in->nrecords; i++) {
    const record *r = &in->records[i];
    if (r->replica) continue;
    if (r->transfer.purpose != MLFAB__AGGREGATE || r->transfer.index != p->group) continue;
    if (r->transfer.n > 0 && r->pieces[0].from < starts) starts = r->pieces[0].from;
  }
  return starts;
}

static void tell_applied(const input *in, const mlfab__planned *p, uint32_t position) {
  const mlfab__candidate *c = &in->updates[p->update];
  printf("  %3u. update %" PRIu64 " of node %u, delay %" PRId64, position, c->id, c->node,
         p->delay);
  if (p->reason == MLFAB__DEADLINE) printf(", at its last position");
  if (p->group == 0) {
    printf(": directly, starts at %g, ends at %g", p->start, p->end);
  } else {
    printf(
        ": in group %u at aggregator %u, starts at %g, there at %g; the sum starts at %g, ends at "
        "%g",
        p->group_number, p->group, p->start, p->arrive, sum_starts(in, p), p->end);
  }
  printf(", applied at %g\n", p->commit);
}

static void tell_dropped(const input *in, const mlfab__planned *p) {
  const mlfab__candidate *c = &in->updates[p->update];
  printf("       update %" PRIu64 " of node %u: dropped, ", c->id, c->node);
  if (p->reason == MLFAB__LOOKAHEAD) {
    printf("the next one would have been there first, and would have waited for it\n");
  } else if (p->reason == MLFAB__EXPIRED) {
    printf("its last position was %" PRId64 " (version %" PRId64 "; its delay would be %" PRId64
           ", the bound is %" PRId64 ")\n",
           mlfab__order_deadline(c->version, in->batch.delay_bound, in->batch.version), c->version,
           p->delay, in->batch.delay_bound);
  } else {
    printf("it can never arrive\n");
  }
}

/* ---- the chart ---- */

/* A lane is a profile; `lane` numbers the used profiles in order, UINT32_MAX for the others. */
typedef struct lanes {
  uint32_t *lane, *profile, n;
  double end;
} lanes;

/* The nth profile that a transfer uses: 1, or 0 when there are no more. */
static int uses(const input *in, const mlfab__transfer *t, uint32_t nth, uint32_t *profile_p) {
  if (t->n == 0) return 0;
  if (nth < 2) {
    *profile_p = nth == 0 ? t->from : in->net.nodes + t->to;
    return 1;
  }
  for (uint32_t i = 0; i < in->npaths; i++) {
    const path *p = &in->paths[i];
    if (p->from != t->from || p->to != t->to) continue;
    if (nth - 2 >= p->n) return 0;
    *profile_p = 2 * in->net.nodes + in->path_links[p->first + nth - 2];
    return 1;
  }
  return 0;
}

static lanes make_lanes(const input *in) {
  uint32_t profiles = 2 * in->net.nodes + in->net.links, p;
  lanes l = {.lane = memory_for(in, profiles, sizeof *l.lane),
             .profile = memory_for(in, profiles, sizeof *l.profile)};
  for (uint32_t i = 0; i < in->nrecords; i++) {
    const record *r = &in->records[i];
    for (uint32_t nth = 0; uses(in, &r->transfer, nth, &p); nth++) l.lane[p] = 1;
    if (r->transfer.end > l.end) l.end = r->transfer.end;
  }
  for (uint32_t i = 0; i < profiles; i++) {
    int used = l.lane[i] == 1;
    l.lane[i] = used ? l.n : UINT32_MAX;
    if (used) l.profile[l.n++] = i;
  }
  return l;
}

static void lane_name(const input *in, uint32_t profile, char name[32]) {
  if (profile < in->net.nodes) {
    snprintf(name, 32, "node %u out", profile);
  } else if (profile < 2 * in->net.nodes) {
    snprintf(name, 32, "node %u in", profile - in->net.nodes);
  } else {
    snprintf(name, 32, "link %u", profile - 2 * in->net.nodes);
  }
}

static char symbol(const mlfab__transfer *t) {
  static const char symbols[] = "123456789abcdefghijklmnopqrstuvwxyz";
  int is_hop = t->purpose == MLFAB__AGGREGATE || t->purpose == MLFAB__TO_DISTRIBUTOR;
  if (is_hop) return (char)('A' + (t->index - 1) % 26);
  return symbols[t->index % (sizeof symbols - 1)];
}

static void transfer_name(const input *in, const record *r, char name[64]) {
  const mlfab__transfer *t = &r->transfer;
  static const char *const names[] = {
      "transfer", "update", "update", "sum of aggregator", "model for distributor", "model for"};
  int is_hop = t->purpose == MLFAB__AGGREGATE || t->purpose == MLFAB__TO_DISTRIBUTOR;
  const uint64_t *ids = r->replica ? in->list_ids : in->ids;
  uint64_t id = is_hop ? t->index : ids[t->index];
  snprintf(name, 64, "%s %" PRIu64 "%s", names[t->purpose < 6 ? t->purpose : 0], id,
           r->replica ? " for the replica" : "");
}

/* Prints which transfer each symbol stands for. */
static void draw_legend(const input *in) {
  char name[64];
  for (uint32_t i = 0; i < in->nrecords; i++) {
    const mlfab__transfer *t = &in->records[i].transfer;
    transfer_name(in, &in->records[i], name);
    if (t->component == 0) printf("  %c %s, node %u to %u\n", symbol(t), name, t->from, t->to);
  }
}

/* Marks the columns in which this stretch is the largest so far. */
static void fill_cells(char *cells, double *share, const mlfab__stretch *s, double end, char mark) {
  for (uint32_t c = 0; c < COLUMNS; c++) {
    double from = end * c / COLUMNS, to = end * (c + 1) / COLUMNS;
    double both = (s->to < to ? s->to : to) - (s->from > from ? s->from : from);
    if (!(both > 0) || both * s->rate <= share[c]) continue;
    share[c] = both * s->rate;
    cells[c] = mark;
  }
}

/* Prints one line for each lane: the transfer that uses it most in each column. */
static void draw_text(const input *in) {
  lanes l = make_lanes(in);
  uint32_t shown = l.n < LANES_MOST ? l.n : LANES_MOST, p;
  char *cells = memory_for(in, (size_t)shown * COLUMNS, 1), name[32];
  double *share = memory_for(in, (size_t)shown * COLUMNS, sizeof *share);
  memset(cells, '.', (size_t)shown * COLUMNS);
  for (uint32_t i = 0; i < in->nrecords; i++) {
    const record *r = &in->records[i];
    for (uint32_t nth = 0; uses(in, &r->transfer, nth, &p); nth++) {
      size_t at = (size_t)l.lane[p] * COLUMNS;
      for (uint32_t k = 0; k < r->transfer.n && l.lane[p] < shown; k++) {
        fill_cells(cells + at, share + at, &r->pieces[k], l.end, symbol(&r->transfer));
      }
    }
  }
  if (shown > 0) printf("\n");
  for (uint32_t i = 0; i < shown; i++) {
    lane_name(in, l.profile[i], name);
    printf("%14s %.*s\n", name, COLUMNS, cells + (size_t)i * COLUMNS);
  }
  if (shown < l.n) printf("%14s and %u more\n", "", l.n - shown);
  if (shown > 0) printf("%14s 0 to %g\n\n", "", l.end);
  draw_legend(in);
  free(cells);
  free(share);
  free(l.lane);
  free(l.profile);
}

enum { SVG_LANE = 24, SVG_LEFT = 110, SVG_WIDTH = 660, SVG_TOP = 52, SVG_KINDS = 7 };

/* The kinds of transfers, one colour each: those of mlfab__transfer.purpose, then the replica's. */
static const struct {
  const char *colour, *name;
} svg_kinds[SVG_KINDS] = {{"#aaaaaa", "transfer"},
                          {"#4878d0", "update to the server"},
                          {"#956cb4", "update to an aggregator"},
                          {"#d65f5f", "sum of an aggregator"},
                          {"#ee854a", "model to a distributor"},
                          {"#6acc64", "model to a worker"},
                          {"#8c613c", "to the replica"}};

static int svg_kind(const record *r) {
  return r->replica                            ? SVG_KINDS - 1
         : r->transfer.purpose < SVG_KINDS - 1 ? (int)r->transfer.purpose
                                               : 0;
}

/* The kinds that the chart has, in one or two rows below the lanes. */
static void svg_legend(const input *in, int y, FILE *out) {
  int used[SVG_KINDS] = {0}, x = SVG_LEFT;
  for (uint32_t i = 0; i < in->nrecords; i++)
    if (in->records[i].transfer.n > 0) used[svg_kind(&in->records[i])] = 1;
  for (int k = 0; k < SVG_KINDS; k++) {
    if (!used[k]) continue;
    int width = 40 + 6 * (int)strlen(svg_kinds[k].name);
    if (x + width > SVG_LEFT + SVG_WIDTH) x = SVG_LEFT, y += 18;
    fprintf(out,
            "<rect x=\"%d\" y=\"%d\" width=\"12\" height=\"12\" fill=\"%s\"/>\n<text x=\"%d\" "
            "y=\"%d\">%s</text>\n",
            x, y, svg_kinds[k].colour, x + 17, y + 10, svg_kinds[k].name);
    x += width;
  }
}

/* Draws a transfer in its lanes; the height is its rate, relative to the largest rate of the lane. */
static void svg_transfer(const input *in, const record *r, const lanes *l, const double *most,
                         double *filled, FILE *out) {
  char name[64];
  uint32_t p;
  transfer_name(in, r, name);
  for (uint32_t nth = 0; uses(in, &r->transfer, nth, &p); nth++) {
    uint32_t lane = l->lane[p];
    for (uint32_t k = 0; k < r->transfer.n; k++) {
      const mlfab__stretch *s = &r->pieces[k];
      double height = (SVG_LANE - 4) * s->rate / most[lane], x = s->from / l->end * SVG_WIDTH;
      /* Stacked on the transfers that use the lane at the same time. */
      double base = s->from < filled[2 * lane] ? filled[2 * lane + 1] : 0;
      if (base + height > SVG_LANE - 4) base = SVG_LANE - 4 - height;
      if (s->to > filled[2 * lane]) filled[2 * lane] = s->to;
      filled[2 * lane + 1] = base + height;
      fprintf(out,
              "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\" "
              "stroke=\"white\" stroke-width=\"0.5\"><title>%s: %g to %g at %g</title></rect>\n",
              SVG_LEFT + x, SVG_TOP + SVG_LANE * (lane + 1.0) - 2 - base - height,
              (s->to - s->from) / l->end * SVG_WIDTH, height, svg_kinds[svg_kind(r)].colour, name,
              s->from, s->to, s->rate);
      const char *number = strpbrk(name, "0123456789");
      if (number && height >= 10 &&
          (s->to - s->from) / l->end * SVG_WIDTH > 8 + 6 * (double)strcspn(number, " "))
        fprintf(out, "<text x=\"%.2f\" y=\"%.2f\" fill=\"white\">%.*s</text>\n", SVG_LEFT + x + 3,
                SVG_TOP + SVG_LANE * (lane + 1.0) - 2 - base - height / 2 + 4,
                (int)strcspn(number, " "), number);
    }
  }
}

static void draw_svg(const input *in) {
  FILE *out = in->svg_path ? fopen(in->svg_path, "w") : stdout;
  if (out == NULL) fail(in, "cannot write %s: %s", in->svg_path, strerror(errno));
  lanes l = make_lanes(in);
  double *most = memory_for(in, l.n, sizeof *most);
  double *filled = memory_for(in, 2 * (size_t)l.n, sizeof *filled);
  char name[32];
  uint32_t p;
  for (uint32_t i = 0; i < in->nrecords; i++) {
    const record *r = &in->records[i];
    for (uint32_t nth = 0; uses(in, &r->transfer, nth, &p); nth++) {
      for (uint32_t k = 0; k < r->transfer.n; k++) {
        if (r->pieces[k].rate > most[l.lane[p]]) most[l.lane[p]] = r->pieces[k].rate;
      }
    }
  }
  uint32_t height = SVG_TOP + SVG_LANE * (l.n + 2);
  fprintf(out,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%u\" "
          "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%%\" height=\"100%%\" "
          "fill=\"white\"/>\n",
          SVG_LEFT + SVG_WIDTH + 20, height);
  for (uint32_t i = 0; i < l.n; i++) {
    int y = SVG_TOP + SVG_LANE * (int)i;
    lane_name(in, l.profile[i], name);
    fprintf(out,
            "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n<line x1=\"%d\" y1=\"%d\" "
            "x2=\"%d\" y2=\"%d\" stroke=\"#ccc\"/>\n",
            SVG_LEFT - 8, y + 16, name, SVG_LEFT, y + SVG_LANE, SVG_LEFT + SVG_WIDTH, y + SVG_LANE);
  }
  for (uint32_t i = 0; i < in->nrecords; i++) {
    svg_transfer(in, &in->records[i], &l, most, filled, out);
  }
  for (int i = 0; i <= 10 && l.end > 0; i++) {
    fprintf(out, "<text x=\"%d\" y=\"42\" text-anchor=\"middle\">%.4g%s</text>\n",
            SVG_LEFT + SVG_WIDTH * i / 10, l.end * i / 10, has_units ? " s" : "");
  }
  fprintf(out,
          "<text x=\"8\" y=\"18\">Time from left to right, in %s. Height of a bar: its rate, "
          "beside the largest of its lane. Number: update, aggregator or worker.</text>\n",
          has_units ? "seconds" : "the unit of the file");
  svg_legend(in, SVG_TOP + SVG_LANE * (int)l.n + 12, out);
  fprintf(out, "</svg>\n");
  if (fflush(out) || ferror(out)) fail(in, "cannot write the chart");
  if (out != stdout) fclose(out);
  free(most);
  free(filled);
  free(l.lane);
  free(l.profile);
}

static void draw(const input *in) {
  if (in->human) draw_text(in);
  if (in->svg) draw_svg(in);
}

/* ---- the replica ---- */

typedef struct replica_result {
  mlfab__replica_plan plan;
  mlfab__replicated all;
  uint32_t n; /* of its list */
} replica_result;

static void forget_records(input *in) {
  for (uint32_t i = 0; i < in->nrecords; i++) free(in->records[i].pieces);
  in->nrecords = 0;
}

/* Plans the batch with its replica; records of the replica are marked, and the delayed last transfer is where
 * it would be without delay. Leaves all reserved. plan.grouped is the caller's to free. */
static replica_result plan_replica(input *in, mlfab__planned *planned, uint32_t *applied_p,
                                   mlfab__group_choice *choice_p) {
  replica_result result = {.n = in->replica.npunted};
  uint32_t most = result.n + in->batch.n, m = in->batch.servers;
  result.plan.grouped = memory_for(in, most, sizeof *result.plan.grouped);
  in->list_ids = memory_for(in, most, sizeof *in->list_ids);
  watch(in, 1);
  must(in, mlfab__plan_batch(&in->planner, &in->net, &in->batch, planned, applied_p, choice_p),
       "plan");
  uint32_t sent = in->nrecords;
  mlfab__network_undo(&in->net, 0);
  forget_records(in);
  must(in,
       mlfab__replicate_batch(&in->replicator, &in->planner, &in->net, &in->batch, &in->replication,
                              planned, applied_p, choice_p, &result.plan, &result.all),
       "replication");
  watch(in, 0);
  for (uint32_t i = 0; i < in->replica.npunted; i++) in->list_ids[i] = in->punted[i].id;
  for (uint32_t i = 0; i < *applied_p; i++) in->list_ids[result.n++] = in->ids[planned[i].update];
  if (result.all.status == 1 && *applied_p > 0) {
    for (uint32_t j = 0; j < m; j++) {
      free(in->records[sent - m + j].pieces);
      in->records[sent - m + j] = in->records[in->nrecords - m + j];
    }
    in->nrecords -= m;
  }
  for (uint32_t i = sent; i < in->nrecords; i++) in->records[i].replica = 1;
  return result;
}

static void put_value(const char *keyword, double x) {
  printf("%s", keyword);
  put_time(x);
  printf("\n");
}

static void put_replica(const input *in, const replica_result *r) {
  const mlfab__replica_plan *p = &r->plan;
  printf("rplan %u", p->choice.n);
  put_time(p->choice.time);
  printf("\n");
  put_groups("rgroups", in->list_ids, p->grouped, r->n);
  printf("replicate %u\n", r->all.status);
  put_value("T_last", r->all.last);
  printf("r_last %u\n", p->by_last);
  put_value("div_last", p->divergence_by_last);
  if (mlfab__finite(p->needed)) {
    put_value("T_e", p->needed);
  } else {
    printf("T_e none none\n");
  }
  put_value("T_final", r->all.time);
  printf("r_final %u\n", p->frozen);
  put_value("div_final", p->divergence);
  put_value("div_peak", p->peak);
  put_value("h_next", p->history);
  printf("frozen_groups %u\npunted_out %u", p->groups, r->n - p->frozen);
  for (uint32_t i = p->frozen; i < r->n; i++) printf(" %" PRIu64, in->list_ids[i]);
  printf("\n");
}

static void tell_replica(const input *in, const replica_result *r) {
  const mlfab__replica_plan *p = &r->plan;
  printf("  the replica gets %u of %u updates", p->frozen, r->n);
  if (p->frozen > 0) printf(", the last at %g", p->grouped[p->frozen - 1].commit);
  printf("; it may be %g apart then, at most %g before", p->divergence, p->peak);
  printf(" (div_max %g)\n", in->replication.div_max);
  if (r->all.status == 1) {
    printf("  the last update at the server waits for it until %g, and is applied at %g, not %g\n",
           r->all.needed, r->all.time, r->all.last);
  } else if (r->all.status == 2) {
    printf(
        "  the last update at the server must wait for another batch: the replica would be %g "
        "apart\n",
        p->divergence_by_last);
  }
  for (uint32_t i = p->frozen; i < r->n; i++) {
    printf("       update %" PRIu64 ": to the replica with the next batch\n", in->list_ids[i]);
  }
}

/* ---- the kinds ---- */

static void tell_batch(input *in) {
  static const char *const variants[] = {"", " (the first group may start late)",
                                         " (the rest goes directly)"};
  mlfab__planned *planned = memory_for(in, in->batch.n, sizeof *planned);
  mlfab__group_choice choice;
  replica_result replica = {0};
  uint32_t applied;
  if (in->replication.n > 0) {
    replica = plan_replica(in, planned, &applied, &choice);
  } else {
    watch(in, 1);
    must(in, mlfab__plan_batch(&in->planner, &in->net, &in->batch, planned, &applied, &choice),
         "plan");
    watch(in, 0);
  }
  if (in->human) {
    printf("%u of %u updates are applied, %u directly%s%s", applied, in->batch.n, choice.n,
           variants[choice.variant & ~(uint32_t)MLFAB__GROUP_LATE],
           choice.variant & MLFAB__GROUP_LATE ? " (members may be late)" : "");
    if (mlfab__finite(choice.time)) {
      printf("; all are there at %g\n", choice.time);
    } else {
      printf("; the list cannot be sent as a whole\n");
    }
    for (uint32_t i = 0; i < in->batch.n; i++) {
      if (i < applied) {
        tell_applied(in, &planned[i], i + 1);
      } else {
        tell_dropped(in, &planned[i]);
      }
    }
    if (in->replication.n > 0) tell_replica(in, &replica);
  }
  draw(in);
  free(replica.plan.grouped);
  free(planned);
}

static void put_batch(input *in) {
  uint32_t n = in->batch.n, applied = n;
  mlfab__ordered *ordered = memory_for(in, n, sizeof *ordered);
  mlfab__grouped *grouped = memory_for(in, n, sizeof *grouped);
  uint32_t *order = memory_for(in, n, sizeof *order);
  uint64_t *ids = memory_for(in, n, sizeof *ids);
  mlfab__group_choice choice;
  for (uint32_t i = 0; i < n; i++) ordered[i].update = i;
  if (!in->batch.list) {
    put_order(in, 0, ordered);
    applied = put_order(in, 1, ordered);
  }
  for (uint32_t i = 0; i < applied; i++) {
    order[i] = ordered[i].update;
    ids[i] = in->ids[order[i]];
  }
  mlfab__group_input group = {.updates = in->updates,
                              .order = order,
                              .n = applied,
                              .server = in->server,
                              .servers = in->batch.servers,
                              .aggregators = in->aggregators,
                              .k = in->batch.k,
                              .start = in->batch.backlog,
                              .cut = in->cut};
  watch(in, 1);
  must(in, mlfab__group_plan(&in->planner.grouper, &in->net, &group, in->best, grouped, &choice),
       "groups");
  watch(in, 0);
  mlfab__network_undo(&in->net, 0);
  printf("partition %u", choice.n);
  put_time(choice.time);
  printf("\n");
  put_times(in, &group, choice.variant & MLFAB__GROUP_LATE);
  put_groups("groups", ids, grouped, applied);
  if (in->replication.n > 0) {
    mlfab__planned *planned = memory_for(in, n, sizeof *planned);
    forget_records(in);
    replica_result replica = plan_replica(in, planned, &applied, &choice);
    put_replica(in, &replica);
    free(replica.plan.grouped);
    free(planned);
  }
  if (n <= 12) put_rates(in, 0);
  if (n <= 12 && in->replication.n > 0) {
    put_rates(in, 1);
    put_residual(in);
  }
  printf("end\n");
  free(ordered);
  free(grouped);
  free(order);
  free(ids);
}

static void do_batch(input *in) {
  read_batch(in);
  if (in->human || in->svg) {
    tell_batch(in);
  } else {
    put_batch(in);
  }
}

/* Reads `keyword n` and its lines of an id and a node, and a time if `timed`. */
static void read_requests(input *in, const char *keyword, int timed) {
  need_tokens(in, 2);
  uint32_t n = count(in, 1, "their number");
  in->requests = memory_for(in, n, sizeof *in->requests);
  in->available = memory_for(in, n, sizeof *in->available);
  in->ids = memory_for(in, n, sizeof *in->ids);
  for (uint32_t i = 0; i < n; i++) {
    need_line(in, keyword);
    need_tokens(in, timed ? 4 : 3);
    in->ids[i] = (uint64_t)whole(in, 1, 0, INT64_MAX, "id");
    in->requests[i] = node(in, 2);
    if (timed) in->available[i] = amount(in, 3, OPTION_TIME, "the time it is available");
  }
  check_ids(in, in->ids, n);
  in->nrequests = n;
}

static void read_dist(input *in) {
  need_line(in, "nodes");
  read_network(in);
  need_line(in, "server");
  read_servers(in);
  need_line(in, "sizes");
  need_tokens(in, 1 + (uint64_t)in->batch.servers);
  for (uint32_t j = 0; j < in->batch.servers; j++)
    in->sizes[j] = amount(in, 1 + j, OPTION_SIZE, "size");
  need_line(in, "distributors");
  in->distributors = read_hops(in, "distributor", &in->distributors_k);
  need_line(in, "requests");
  read_requests(in, "request", 0);
}

static void put_deliveries(const input *in, const mlfab__delivery *out, uint32_t but) {
  for (uint32_t i = 0; i < in->nrequests; i++) {
    if (i == but) continue;
    printf("w %" PRIu64 " %u", in->ids[i], out[i].q);
    put_time(out[i].end);
    printf("\n");
  }
}

static void tell_deliveries(const input *in, const mlfab__delivery *out) {
  for (uint32_t i = 0; i < in->nrequests; i++) {
    printf("  worker %" PRIu64 " on node %u has the model at %g, ", in->ids[i], in->requests[i],
           out[i].end);
    if (out[i].q == 0) {
      printf("from the server\n");
    } else {
      printf("from distributor %u\n", out[i].q);
    }
  }
}

/* Prints T(n) of the mirrored plan. */
static void put_mirrored(input *in, const mlfab__distribution *d, uint32_t late) {
  mlfab__candidate *c = memory_for(in, d->n, sizeof *c);
  for (uint32_t i = 0; i < d->n; i++) {
    c[i] = (mlfab__candidate){.node = d->requests[i], .bytes = d->bytes};
  }
  mlfab__group_input group = {.updates = c,
                              .n = d->n,
                              .server = d->server,
                              .servers = d->servers,
                              .aggregators = d->distributors,
                              .k = d->k,
                              .cut = d->cut};
  in->net.mirror = 1;
  put_times(in, &group, late);
  in->net.mirror = 0;
  free(c);
}

static void put_hubs(const double *hubs, uint32_t k) {
  uint32_t used = 0;
  for (uint32_t q = 0; q < k; q++) used += mlfab__finite(hubs[q]) ? 1 : 0;
  printf("hubs %u\n", used);
  for (uint32_t q = k; q > 0; q--) {
    if (!mlfab__finite(hubs[q - 1])) continue;
    printf("h %u", q);
    put_time(hubs[q - 1]);
    printf("\n");
  }
}

static void do_dist(input *in) {
  read_dist(in);
  mlfab__distribution d = {.server = in->server,
                           .servers = in->batch.servers,
                           .bytes = in->sizes,
                           .distributors = in->distributors,
                           .k = in->distributors_k,
                           .requests = in->requests,
                           .n = in->nrequests,
                           .cut = in->cut};
  mlfab__delivery *out = memory_for(in, d.n, sizeof *out);
  double *hubs = memory_for(in, d.k, sizeof *hubs), makespan;
  mlfab__group_choice choice;
  watch(in, 1);
  must(in,
       mlfab__group_distribute(&in->planner.grouper, &in->net, &d, out, hubs, &choice, &makespan),
       "distribution");
  watch(in, 0);
  mlfab__network_undo(&in->net, 0);
  if (in->human) tell_deliveries(in, out);
  if (in->human || in->svg) {
    draw(in);
  } else {
    printf("partition %u", choice.n);
    put_time(choice.time);
    printf("\n");
    put_mirrored(in, &d, choice.variant & MLFAB__GROUP_LATE);
    printf("assign %u\n", d.n);
    put_deliveries(in, out, UINT32_MAX);
    put_hubs(hubs, d.k);
    printf("makespan");
    put_time(makespan);
    printf("\nend\n");
  }
  free(out);
  free(hubs);
}

/* Reads `aggregators k n1 ... nk`, all in one line. */
static uint32_t *read_row(input *in, const char *keyword, uint32_t *k_p) {
  need_line(in, keyword);
  uint32_t k = count(in, 1, "their number");
  need_tokens(in, 2 + (uint64_t)k);
  uint32_t *nodes = memory_for(in, k, sizeof *nodes);
  for (uint32_t q = 0; q < k; q++) nodes[q] = node(in, 2 + q);
  *k_p = k;
  return nodes;
}

static void put_allreduce(const input *in, const mlfab__grouped *push, const mlfab__delivery *get,
                          const mlfab__group_choice *up, const mlfab__group_choice *down,
                          double makespan) {
  uint32_t root = 0, others = 0, n = in->nrequests;
  mlfab__grouped *grouped = memory_for(in, n, sizeof *grouped);
  uint64_t *ids = memory_for(in, n, sizeof *ids);
  while (root < n && in->requests[root] != in->root) root++;
  for (uint32_t i = 0; i < n; i++) {
    if (i == root) continue;
    grouped[others] = push[i];
    ids[others++] = in->ids[i];
  }
  printf("push %u", up->n);
  put_time(up->time);
  printf("\n");
  put_groups("groups", ids, grouped, others);
  printf("get %u %u\n", down->n, others);
  put_deliveries(in, get, root);
  printf("makespan");
  put_time(makespan);
  printf("\nend\n");
  free(grouped);
  free(ids);
}

static void do_allreduce(input *in) {
  need_line(in, "nodes");
  read_network(in);
  need_line(in, "root");
  need_tokens(in, 2);
  in->root = node(in, 1);
  need_line(in, "size");
  need_tokens(in, 2);
  in->sizes[0] = amount(in, 1, OPTION_SIZE, "size");
  in->batch.servers = 1;
  in->aggregators = read_row(in, "aggregators", &in->batch.k);
  in->distributors = read_row(in, "distributors", &in->distributors_k);
  need_line(in, "workers");
  read_requests(in, "worker", 1);
  mlfab__allreduce a = {.root = in->root,
                        .bytes = in->sizes[0],
                        .aggregators = in->aggregators,
                        .distributors = in->distributors,
                        .k = in->batch.k,
                        .distributors_k = in->distributors_k,
                        .nodes = in->requests,
                        .available = in->available,
                        .n = in->nrequests};
  mlfab__grouped *push = memory_for(in, a.n, sizeof *push);
  mlfab__delivery *get = memory_for(in, a.n, sizeof *get);
  mlfab__group_choice up, down;
  double makespan;
  watch(in, 1);
  must(in,
       mlfab__group_allreduce(&in->planner.grouper, &in->net, &a, push, get, &up, &down, &makespan),
       "allreduce");
  watch(in, 0);
  if (in->human) {
    printf("all updates are at node %u at %g\n", in->root, up.time);
    tell_deliveries(in, get);
  }
  if (in->human || in->svg) {
    draw(in);
  } else {
    put_allreduce(in, push, get, &up, &down, makespan);
  }
  free(push);
  free(get);
}

static void do_netup(input *in) {
  need_line(in, "nodes");
  read_network(in);
  need_line(in, "transfers");
  need_tokens(in, 2);
  uint32_t n = count(in, 1, "transfers");
  in->ids = memory_for(in, n, sizeof *in->ids);
  watch(in, 1);
  for (uint32_t i = 0; i < n; i++) {
    need_line(in, "transfer");
    need_tokens(in, 6);
    in->ids[i] = (uint64_t)whole(in, 1, 0, INT64_MAX, "id");
    in->net.index = i;
    uint32_t before = in->nrecords;
    double end;
    must(in,
         mlfab__network_reserve(&in->net, node(in, 2), node(in, 3),
                                amount(in, 4, OPTION_SIZE, "size"),
                                amount(in, 5, OPTION_TIME, "the time it is available"), &end),
         "transfer");
    if (in->svg && !in->human) continue;
    if (in->human) {
      printf("  transfer %" PRIu64 " ends at %g\n", in->ids[i], end);
      continue;
    }
    printf("t %" PRIu64, in->ids[i]);
    put_time(end);
    printf("\nrates %u\n", in->nrecords > before ? in->records[before].transfer.n : 0);
    if (in->nrecords > before) put_pieces(&in->records[before]);
  }
  watch(in, 0);
  if (in->human || in->svg) {
    draw(in);
    return;
  }
  put_residual(in);
  printf("end\n");
}

static void do_ssp(input *in) {
  need_line(in, "rows");
  need_tokens(in, 2);
  for (uint32_t rows = count(in, 1, "rows"); rows > 0; rows--) {
    need_line(in, "row");
    uint64_t staleness = (uint64_t)whole(in, 1, 0, INT64_MAX, "staleness");
    uint32_t n = (uint32_t)whole(in, 2, 0, TOKENS_MOST / 2, "the number of workers");
    uint64_t finished[TOKENS_MOST / 2];
    for (uint32_t i = 0; i < n; i++) {
      finished[i] = (uint64_t)whole(in, 3 + i, 0, INT64_MAX, "iterations");
    }
    printf("row %" PRIu64 " %u", staleness, n);
    for (uint32_t i = 0; i < n; i++) printf(" %" PRIu64, finished[i]);
    for (uint32_t i = 0; i < n; i++) {
      printf(" %d", mlfab__group_may_start(finished, n, finished[i], staleness));
    }
    printf("\n");
  }
  printf("end\n");
}

/* ---- divergence and momentum ---- */

/* Reads `n x1 ... xn` from token `at` on; *at_p: the token behind. */
static double *read_numbers(input *in, uint32_t *at_p, uint32_t n, const char *what) {
  double *x = memory_for(in, n, sizeof *x);
  for (uint32_t i = 0; i < n; i++) {
    x[i] = number(in, (*at_p)++, what);
    if (!mlfab__finite(x[i])) fail(in, "%s is infinite", what);
  }
  return x;
}

/* Reads `k m1 ... mk`, of which the sum may be at most `most`. */
static uint32_t *read_sizes(input *in, uint32_t *at_p, uint32_t *k_p, uint32_t most) {
  uint32_t k = (uint32_t)whole(in, (*at_p)++, 0, most, "the number of groups"), sum = 0;
  uint32_t *sizes = memory_for(in, k, sizeof *sizes);
  for (uint32_t i = 0; i < k; i++) {
    sizes[i] = (uint32_t)whole(in, (*at_p)++, 1, (int64_t)(most - sum), "the size of a group");
    sum += sizes[i];
  }
  *k_p = k;
  return sizes;
}

static void put_coefficients(const double *c, uint32_t n) {
  for (uint32_t i = 0; i <= n; i++) {
    printf("k %u", i);
    put_time(c[i]);
    printf("\n");
  }
}

typedef struct divergence_input {
  double gamma, h0, *norms, *c;
  uint32_t n, npoints, *points; /* points: s and r of each */
} divergence_input;

static void read_divergence(input *in, divergence_input *d) {
  uint32_t at = 2;
  need_line(in, "gamma");
  d->gamma = read_gamma(in);
  need_line(in, "h0");
  d->h0 = last_amount(in, "h0");
  need_line(in, "norms");
  d->n = (uint32_t)whole(in, 1, 0, TOKENS_MOST, "the number of norms");
  d->norms = read_numbers(in, &at, d->n, "norm");
  need_tokens(in, at);
  for (uint32_t i = 0; i < d->n; i++) {
    if (d->norms[i] < 0) fail(in, "norm %u is negative", i + 1);
  }
  d->c = memory_for(in, (size_t)d->n + 1, sizeof *d->c);
  need_line(in, "points");
  d->npoints = count(in, 1, "points");
  d->points = memory_for(in, 2 * (size_t)d->npoints, sizeof *d->points);
  for (uint32_t i = 0; i < d->npoints; i++) {
    need_line(in, "p");
    need_tokens(in, 3);
    d->points[2 * i] = (uint32_t)whole(in, 1, 0, d->n, "the server's updates");
    d->points[2 * i + 1] = (uint32_t)whole(in, 2, 0, d->n, "the replica's updates");
  }
}

static void put_points(const divergence_input *d) {
  for (uint32_t i = 0; i < d->npoints; i++) {
    uint32_t s = d->points[2 * i], r = d->points[2 * i + 1], most = s > r ? s : r;
    mlfab__divergence_coefficients(d->gamma, s, r, d->c);
    printf("coef %u %u %u\n", s, r, most + 1);
    put_coefficients(d->c, most);
    printf("bound %u %u", s, r);
    put_time(mlfab__divergence_between(d->gamma, d->h0, d->norms, s, r));
    printf("\n");
  }
  printf("history %u\n", d->n + 1);
  double history = d->h0;
  for (uint32_t t = 0; t <= d->n; t++) {
    if (t > 0) history = d->gamma * history + d->norms[t - 1];
    printf("H %u", t);
    put_time(history);
    printf("\n");
  }
}

static void do_divergence(input *in) {
  divergence_input d = {0};
  read_divergence(in, &d);
  put_points(&d);
  need_line(in, "groupings");
  for (uint32_t j = 0, k = count(in, 1, "groupings"); j < k; j++) {
    uint32_t at = 1, a, b;
    need_line(in, "gr");
    uint32_t *server = read_sizes(in, &at, &a, d.n), *replica = read_sizes(in, &at, &b, d.n);
    need_tokens(in, at);
    uint32_t n = mlfab__divergence_grouped(d.gamma, server, a, replica, b, d.c);
    while (n < d.n) d.c[++n] = 0;
    printf("gcoef %u %u\n", j, n + 1);
    put_coefficients(d.c, n);
    printf("gbound %u", j);
    put_time(mlfab__divergence_weigh(d.c, d.h0, d.norms, n));
    printf("\n");
    free(server);
    free(replica);
  }
  printf("end\n");
  free(d.norms);
  free(d.c);
  free(d.points);
}

typedef struct momentum_input {
  double gamma, *w0, *h0, **u, *w, *h; /* w and h: the state */
  uint32_t dim, n;
} momentum_input;

/* Eq. (2). */
static void momentum_step(momentum_input *m, const double *u) {
  for (uint32_t x = 0; x < m->dim; x++) {
    m->h[x] = m->gamma * m->h[x] + u[x];
    m->w[x] += m->h[x];
  }
}

static void momentum_begin(momentum_input *m) {
  memcpy(m->w, m->w0, m->dim * sizeof *m->w);
  memcpy(m->h, m->h0, m->dim * sizeof *m->h);
}

static void put_vector(const char *name, uint32_t t, const double *x, uint32_t dim) {
  printf("%s %u", name, t);
  for (uint32_t i = 0; i < dim; i++) put_time(x[i]);
  printf("\n");
}

static void put_state(const momentum_input *m, uint32_t t) {
  put_vector("w", t, m->w, m->dim);
  put_vector("h", t, m->h, m->dim);
}

/* The sum of weight[i] u[first + i]; NULL: weights of 1. */
static void momentum_sum(const momentum_input *m, uint32_t first, uint32_t n, const double *weight,
                         double *sum) {
  for (uint32_t x = 0; x < m->dim; x++) sum[x] = 0;
  for (uint32_t i = 0; i < n; i++) {
    for (uint32_t x = 0; x < m->dim; x++) {
      sum[x] += (weight ? weight[i] : 1) * m->u[first + i][x];
    }
  }
}

static void put_momentum(input *in, momentum_input *m, const uint32_t *groups, uint32_t k) {
  double *sum = memory_for(in, m->dim, sizeof *sum), w_h, h_h;
  double *x = memory_for(in, m->n, sizeof *x), *y = memory_for(in, m->n, sizeof *y);
  momentum_begin(m);
  printf("sequential %u\n", m->n);
  for (uint32_t i = 0; i < m->n; i++) {
    momentum_step(m, m->u[i]);
    put_state(m, i + 1);
  }
  momentum_begin(m);
  printf("onestep %u\n", k);
  for (uint32_t g = 0, first = 0; g < k; first += groups[g++]) {
    momentum_sum(m, first, groups[g], NULL, sum);
    momentum_step(m, sum);
    put_state(m, g + 1);
  }
  printf("pairs %u\n", k);
  for (uint32_t g = 0, first = 0; g < k; first += groups[g++]) {
    mlfab__divergence_weights(m->gamma, groups[g], x, y, &w_h, &h_h);
    momentum_sum(m, first, groups[g], x, sum);
    put_vector("X", g + 1, sum, m->dim);
    momentum_sum(m, first, groups[g], y, sum);
    put_vector("Y", g + 1, sum, m->dim);
  }
  printf("end\n");
  free(sum);
  free(x);
  free(y);
}

static double *read_vector(input *in, const char *keyword, uint32_t dim) {
  uint32_t at = 1;
  need_line(in, keyword);
  need_tokens(in, 1 + (uint64_t)dim);
  return read_numbers(in, &at, dim, keyword);
}

static void do_momentum(input *in) {
  momentum_input m = {0};
  uint32_t k, at = 1;
  need_line(in, "gamma");
  m.gamma = read_gamma(in);
  need_line(in, "dim");
  m.dim = (uint32_t)whole(in, 1, 1, TOKENS_MOST, "dim");
  m.w0 = read_vector(in, "w0", m.dim);
  m.h0 = read_vector(in, "h0", m.dim);
  need_line(in, "updates");
  m.n = count(in, 1, "updates");
  m.u = memory_for(in, m.n, sizeof *m.u);
  for (uint32_t i = 0; i < m.n; i++) m.u[i] = read_vector(in, "u", m.dim);
  need_line(in, "groups");
  uint32_t *groups = read_sizes(in, &at, &k, m.n);
  need_tokens(in, at);
  m.w = memory_for(in, m.dim, sizeof *m.w);
  m.h = memory_for(in, m.dim, sizeof *m.h);
  put_momentum(in, &m, groups, k);
  for (uint32_t i = 0; i < m.n; i++) free(m.u[i]);
  free(m.u);
  free(m.w0);
  free(m.h0);
  free(m.w);
  free(m.h);
  free(groups);
}

/* Reads the lines before the network, up to the kind of the file. */
static void read_header(input *in) {
  static const char *const names[] = {"mlfabric-vector", "name", "note", "ties", "margin"};
  for (;;) {
    long place = ftell(in->file);
    uint32_t line = in->line;
    size_t i = 0;
    if (!next_line(in)) break;
    if (is(in, "kind")) {
      need_tokens(in, 2);
      snprintf(in->kind, sizeof in->kind, "%.15s", in->token[1]);
      continue;
    }
    if (is(in, "mlfabric-vector")) whole(in, 1, 1, 1, "the version of the format");
    while (i < sizeof names / sizeof *names && !is(in, names[i])) i++;
    if (i < sizeof names / sizeof *names) continue;
    if (in->kind[0] == 0) fail(in, "`%.40s` where a line `kind` belongs", in->token[0]);
    if (place < 0 || fseek(in->file, place, SEEK_SET)) {
      fail(in, "the file cannot be read twice (a pipe?)");
    }
    in->line = line;
    return;
  }
  if (in->kind[0] == 0) fail(in, "there is no line `kind`");
}

static input in;

static void take_svg(const char *name, const char *value) {
  struct stat is;
  in.svg = 1;
  in.svg_path = *value ? value : NULL;
  if (in.svg_path && !stat(value, &is) && S_ISDIR(is.st_mode))
    options_refuse("%s='%s': it is a directory", name, value);
}

/* A time of the file: in seconds if the option has a unit. */
static void take_backlog(const char *name, const char *value) {
  in.batch.backlog = options_number(value, OPTION_TIME, 1e9) * 1e-9;
  if (in.batch.backlog < 0)
    options_refuse("%s='%s': not %s", name, value, options_units(OPTION_TIME));
}

static void read_arguments(int argc, char **argv) {
  static const option_row rows[] = {
      {"--human", NULL, OPTION_FLAG, &in.human, 0, 0, 0, NULL,
       "tells of every update where it goes and why, and draws the schedule"},
      {"--svg", "OUT", OPTION_MAYBE, NULL, 0, 0, 0, take_svg,
       "writes a chart with one lane a link, to OUT or to standard output"},
      {"--cut", NULL, OPTION_FLAG, &in.cut, 0, 0, 0, NULL,
       "aggregators and distributors pass on bytes while more still come, as the library's do "
       "unless its schedule says `whole`. "
       "The scheduler plans a batch and a dist like this. Without it they store and forward, as in "
       "the paper. A member may then be late "
       "for the sum of its group, if it is there before the sum without it is at the server. Of "
       "plans with and without late "
       "members the earlier is taken, and `T` is of its form"},
      {"--best", NULL, OPTION_FLAG, &in.best, 0, 0, 0, NULL,
       "also tries two variants of Alg. 3 in a batch, as the scheduler does when its schedule says "
       "`best`: the first group may start late, or "
       "the rest goes directly when the aggregators run out"},
      {"--backlog", "TIME", OPTION_CALL, NULL, 0, 0, 0, take_backlog,
       "when everything that was planned before is at the server (0)"},
      {NULL, NULL, OPTION_FLAG, NULL, 0, 0, 0, NULL, NULL}};
  static const options_tool tool = {
      "mlfab-plan",
      "usage: mlfab-plan FILE [--human] [--svg [OUT]] [--cut] [--best] [--backlog TIME]",
      "Prints the plan for a batch of updates and a network in FILE (-: standard input): in which "
      "order updates are applied, which go to an "
      "aggregator first, and which are dropped.",
      "Input: the format is that of tests/vectors/FORMAT-mlfabric.md; reading ends at `expect` or "
      "`end`. tau_max and div_max may be `inf`: no "
      "bound. A rate may be 0: a cut link. With a line `replica`, the transfers to the replica in "
      "this batch are planned too, and "
      "whether the last transfer to the server waits for it (`replicate` 1) or may not end at all "
      "(2). The kinds divergence "
      "and momentum are computed, not planned: the bound of the distance of a replica from its "
      "server, and the effect of updates "
      "and sums of updates on a model with momentum.\n\n"
      "Units: a number in the file has the unit of its writer. With a unit, times (ns, us, ms, s, "
      "min, h) count seconds, sizes (B, kB, MB, GB, TB, KiB, "
      "MiB, GiB, TiB) bytes, and rates (these with /s, or kbit, Mbit, Gbit, Tbit) bytes a "
      "second.\n\n"
      "Output: a computed time, which the format gives as a fraction and the nearest double, is "
      "printed as the double twice. An "
      "update of version v may be applied at the positions up to v + tau_max - v_init, so that its "
      "delay is below tau_max. A version "
      "from the future (above v_init) only makes that larger, and its delay may be negative.\n\n"
      "Exit status: 0, or 2 when the file or an argument is wrong.",
      rows,
      0,
      NULL};
  int first = options_read(&tool, argc, argv);
  if (first == argc)
    options_refuse("the FILE to plan is missing; mlfab-plan --help tells about it");
  if (first + 1 < argc) options_refuse("'%s': there is one FILE, %s", argv[first + 1], argv[first]);
  in.name = argv[first];
}

/* Copies the input to a file: reading goes back at times, which a pipe cannot. */
static FILE *whole_input(void) {
  FILE *copy = tmpfile();
  char buffer[65536];
  size_t n;
  if (copy == NULL) fail(&in, "cannot copy standard input: %s", strerror(errno));
  while ((n = fread(buffer, 1, sizeof buffer, stdin)) > 0) {
    if (fwrite(buffer, 1, n, copy) != n) fail(&in, "cannot copy standard input");
  }
  rewind(copy);
  return copy;
}

int main(int argc, char **argv) {
  static const struct {
    const char *kind;
    void (*act)(input *in);
  } kinds[] = {{"batch", do_batch},         {"netup", do_netup}, {"dist", do_dist},
               {"allreduce", do_allreduce}, {"ssp", do_ssp},     {"divergence", do_divergence},
               {"momentum", do_momentum}};
  read_arguments(argc, argv);
  mlfab__env_init(&in.env, NULL);
  mlfab__planner_init(&in.planner, &in.env);
  in.file = strcmp(in.name, "-") == 0 ? whole_input() : options_open(in.name, "rb");
  if (in.file == NULL) fail(&in, "%s", strerror(errno));
  read_header(&in);
  size_t i = 0;
  while (i < sizeof kinds / sizeof *kinds && strcmp(kinds[i].kind, in.kind) != 0) i++;
  if (i == sizeof kinds / sizeof *kinds) {
    fail(&in, "kind `%s` is not one of batch, netup, dist, allreduce, ssp, divergence, momentum",
         in.kind);
  }
  kinds[i].act(&in);
  if (fflush(stdout) || ferror(stdout)) fail(&in, "cannot write the plan");
  forget_records(&in);
  free(in.records);
  free(in.has);
  free(in.paths);
  free(in.path_links);
  free(in.updates);
  free(in.bytes);
  free(in.ids);
  free(in.aggregators);
  free(in.distributors);
  free(in.requests);
  free(in.available);
  free(in.punted);
  free(in.punted_bytes);
  free(in.replica_aggregators);
  free(in.list_ids);
  mlfab__replicate_free(&in.replicator, &in.env);
  mlfab__planner_free(&in.planner);
  if (in.net.env) mlfab__network_free(&in.net);
  fclose(in.file);
  return 0;
}
