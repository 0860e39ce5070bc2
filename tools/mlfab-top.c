/* mlfab-top.c - shows the nodes of a run in the terminal, from their metrics files.
 *
 *    MLFAB_METRICS=/tmp/run/m.prom mlfab-run -n 4 ./trainer
 *    mlfab-top '/tmp/run/m.*.prom'
 *
 * Every refresh reads all files that match, so that nodes which join later appear. On a terminal it draws a table and
 * ends with q or Ctrl-C; otherwise it prints a line for each node at each refresh. It reads nothing but these files: a
 * process that has died is known by its pid if it ran on this host, else by the age of its file.
 *
 * The files may be damaged or foreign: unknown lines are skipped, control characters are replaced, and sizes are
 * bounded. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "options.h"

#include <ctype.h>
#include <glob.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define NODES_MAX 65536
#define FILE_MAX (1 << 20)
#define STALE_S 5.0

enum { STATE_JOINS, STATE_READY, STATE_FAILED, STATE_CLOSED, STATE_DEAD, STATE_STALE };

/* The content of one file. */
typedef struct sample {
  double opened, written; /* seconds of the wall clock */
  double state;
  double iterations, collectives, partial, rounds;
  double sent, received;
  double delay, delayed;           /* server: sum, and number of updates */
  double push_delay, push_applied; /* worker */
  double memory;
  double waits; /* negative: nothing is waited for */
  char waits_call[16], waits_for[16], waits_peer[12];
} sample;

typedef struct node {
  char *path;
  int seen; /* in the present refresh */
  char role[20], rank[12], server[12], job[64], host[64];
  long pid;
  sample now, before; /* before.written 0: there is none */
  double gap;         /* seconds between the two newest files */
} node;

static struct {
  uint64_t interval_ns, count; /* count: of refreshes; 0: until stopped */
  int plain, coloured;
  char **patterns;
  int npatterns;
} options = {.interval_ns = 1000000000};

static node *nodes;
static size_t nnodes, nodes_room;
static char own_host[64];
static volatile sig_atomic_t stopped;
static struct termios terminal_before;
static int terminal_is_raw;

static double wall_clock(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- reading a file ---- */

/* Copies a label's value without control characters. at: behind the opening quote. Returns what follows the closing
 * quote, or NULL. */
static const char *read_value(const char *at, char *to, size_t room) {
  size_t n = 0;
  for (; *at && *at != '"'; at++) {
    if (*at == '\\' && at[1]) at++;
    if (n + 1 < room) to[n++] = isprint((unsigned char)*at) ? *at : '?';
  }
  to[n] = 0;
  return *at == '"' ? at + 1 : NULL;
}

/* The labels of a line that are of use here. */
typedef struct labels {
  char role[20], rank[12], server[12], job[64], host[64], pid[16], call[16], waits_for[16],
      peer[12];
} labels;

static char *label_place(labels *l, const char *name, size_t n, size_t *room_p) {
  static const struct {
    const char *name;
    size_t at, room;
  } known[] = {{"role", offsetof(labels, role), sizeof l->role},
               {"rank", offsetof(labels, rank), sizeof l->rank},
               {"server", offsetof(labels, server), sizeof l->server},
               {"fabric", offsetof(labels, job), sizeof l->job},
               {"host", offsetof(labels, host), sizeof l->host},
               {"pid", offsetof(labels, pid), sizeof l->pid},
               {"call", offsetof(labels, call), sizeof l->call},
               {"for", offsetof(labels, waits_for), sizeof l->waits_for},
               {"peer", offsetof(labels, peer), sizeof l->peer}};
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (strlen(known[i].name) != n || strncmp(known[i].name, name, n) != 0) continue;
    *room_p = known[i].room;
    return (char *)l + known[i].at;
  }
  return NULL;
}

/* Reads {name="value",...}. Returns what follows, or NULL. */
static const char *read_labels(const char *at, labels *l) {
  char unused[16];
  memset(l, 0, sizeof *l);
  if (*at != '{') return at;
  at++;
  while (at && *at && *at != '}') {
    size_t n = strcspn(at, "=\n"), room = sizeof unused;
    char *to = label_place(l, at, n, &room);
    if (at[n] != '=' || at[n + 1] != '"') return NULL;
    at = read_value(at + n + 2, to ? to : unused, room);
    if (at && *at == ',') at++;
  }
  return at && *at == '}' ? at + 1 : NULL;
}

/* One line of a file. Returns 1 when it names the node. */
static int read_line(const char *line, node *n, sample *s) {
  static const struct {
    const char *name;
    size_t at;
  } known[] = {{"mlfab_opened_timestamp_seconds", offsetof(sample, opened)},
               {"mlfab_written_timestamp_seconds", offsetof(sample, written)},
               {"mlfab_state", offsetof(sample, state)},
               {"mlfab_iterations_total", offsetof(sample, iterations)},
               {"mlfab_collectives_total", offsetof(sample, collectives)},
               {"mlfab_rounds_partial_total", offsetof(sample, partial)},
               {"mlfab_rounds_total", offsetof(sample, rounds)},
               {"mlfab_sent_bytes_total", offsetof(sample, sent)},
               {"mlfab_received_bytes_total", offsetof(sample, received)},
               {"mlfab_delay_updates_total", offsetof(sample, delay)},
               {"mlfab_updates_applied_total", offsetof(sample, delayed)},
               {"mlfab_push_delay_updates_total", offsetof(sample, push_delay)},
               {"mlfab_pushes_applied_total", offsetof(sample, push_applied)},
               {"mlfab_memory_bytes", offsetof(sample, memory)},
               {"mlfab_waits_seconds", offsetof(sample, waits)}};
  labels l;
  size_t length = strcspn(line, "{ ");
  const char *value = read_labels(line + length, &l);
  if (line[0] == '#' || !value || *value != ' ') return 0;
  if (length == 15 && !strncmp(line, "mlfab_node_info", 15)) {
    memcpy(n->role, l.role, sizeof n->role);
    memcpy(n->rank, l.rank, sizeof n->rank);
    memcpy(n->server, l.server, sizeof n->server);
    memcpy(n->job, l.job, sizeof n->job);
    memcpy(n->host, l.host, sizeof n->host);
    n->pid = strtol(l.pid, NULL, 10);
    return 1;
  }
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (strlen(known[i].name) != length || strncmp(known[i].name, line, length) != 0) continue;
    double number = strtod(value, NULL);
    if (!(number >= 0.0 && number < 1e300)) return 0;
    *(double *)((char *)s + known[i].at) = number;
    if (known[i].at != offsetof(sample, waits)) return 0;
    memcpy(s->waits_call, l.call, sizeof s->waits_call);
    memcpy(s->waits_for, l.waits_for, sizeof s->waits_for);
    memcpy(s->waits_peer, l.peer, sizeof s->waits_peer);
  }
  return 0;
}

/* Reads a whole file. NULL: it cannot be read, is too large, or does not end as metrics end. The caller frees it. */
static char *read_file(const char *path) {
  FILE *file = fopen(path, "r");
  char *text = file ? malloc(FILE_MAX + 1) : NULL;
  size_t n = text ? fread(text, 1, FILE_MAX + 1, file) : 0;
  if (file) fclose(file);
  if (!text || n > FILE_MAX || n < 6 || memchr(text, 0, n)) {
    free(text);
    return NULL;
  }
  text[n] = 0;
  if (!strcmp(text + n - 6, "# EOF\n")) return text;
  free(text);
  return NULL;
}

static void read_node(node *n) {
  char *text = read_file(n->path), *line = text;
  sample s;
  int named = 0;
  memset(&s, 0, sizeof s);
  s.waits = -1.0;
  while (line && *line) {
    char *end = strchr(line, '\n');
    if (end) *end = 0;
    named |= read_line(line, n, &s);
    line = end ? end + 1 : NULL;
  }
  free(text);
  if (!named) return;
  n->seen = 1;
  if (s.written == n->now.written && s.opened == n->now.opened) return;
  /* A new process of this node counts from 0. */
  n->before = s.opened == n->now.opened ? n->now : (sample){0};
  n->gap = n->before.written > 0.0 ? s.written - n->before.written : 0.0;
  n->now = s;
}

/* ---- all files ---- */

static node *find_node(const char *path) {
  for (size_t i = 0; i < nnodes; i++)
    if (!strcmp(nodes[i].path, path)) return &nodes[i];
  if (nnodes == NODES_MAX) return NULL;
  if (nnodes == nodes_room) {
    size_t room = nodes_room ? 2 * nodes_room : 64;
    node *more = realloc(nodes, room * sizeof *more);
    if (!more) return NULL;
    nodes = more;
    nodes_room = room;
  }
  node *n = &nodes[nnodes];
  memset(n, 0, sizeof *n);
  n->path = strdup(path);
  if (!n->path) return NULL;
  nnodes++;
  return n;
}

/* Workers by rank, then servers, then the scheduler; files without a node last. */
static int compare_nodes(const void *one, const void *other) {
  const node *a = one, *b = other;
  int order_a = !a->seen ? 3 : a->rank[0] ? 0 : a->server[0] ? 1 : 2;
  int order_b = !b->seen ? 3 : b->rank[0] ? 0 : b->server[0] ? 1 : 2;
  if (order_a != order_b) return order_a - order_b;
  long x = strtol(order_a ? a->server : a->rank, NULL, 10);
  long y = strtol(order_b ? b->server : b->rank, NULL, 10);
  return x != y ? (x < y ? -1 : 1) : strcmp(a->path, b->path);
}

static size_t read_all(void) {
  size_t seen = 0;
  for (size_t i = 0; i < nnodes; i++) nodes[i].seen = 0;
  for (int p = 0; p < options.npatterns; p++) {
    glob_t found;
    if (glob(options.patterns[p], GLOB_NOSORT, NULL, &found)) continue;
    for (size_t i = 0; i < found.gl_pathc; i++) {
      node *n = find_node(found.gl_pathv[i]);
      if (n) read_node(n);
    }
    globfree(&found);
  }
  if (nnodes > 0) qsort(nodes, nnodes, sizeof *nodes, compare_nodes);
  while (seen < nnodes && nodes[seen].seen) seen++;
  return seen;
}

/* ---- what is shown ---- */

static int state_of(const node *n, double now) {
  int state = n->now.state < 0 || n->now.state > 3 ? STATE_JOINS : (int)n->now.state;
  if (state == STATE_CLOSED) return state;
  if (!strcmp(n->host, own_host) && n->pid > 0 && kill((pid_t)n->pid, 0) && errno == ESRCH)
    return STATE_DEAD;
  double limit = 3.0 * n->gap > STALE_S ? 3.0 * n->gap : STALE_S;
  return now - n->now.written > limit ? STATE_STALE : state;
}

/* The steps of a node so far: iterations of pushes, or else collectives; a server's rounds. */
static double steps_of(const sample *s) {
  if (s->iterations > 0.0) return s->iterations;
  return s->collectives + s->partial > 0.0 ? s->collectives + s->partial : s->rounds;
}

/* The change in a second, since the file before or, without one, since the node was opened. */
static double rate(const node *n, double now, double before) {
  double since = n->before.written > 0.0 ? n->before.written : n->now.opened;
  double seconds = n->now.written - since;
  return seconds > 0.0 && now > before ? (now - before) / seconds : 0.0;
}

static const char *in_bytes(double bytes, char text[16]) {
  static const char *const units[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (bytes >= 999.5 && unit < 4) bytes /= 1000.0, unit++;
  snprintf(text, 16, unit == 0 || bytes >= 99.95 ? "%.0f %s" : "%.1f %s", bytes, units[unit]);
  return text;
}

/* The mean delay of the updates since the file before. */
static double delay_of(const node *n) {
  int serves = n->now.delayed > 0.0;
  double sum = serves ? n->now.delay - n->before.delay : n->now.push_delay - n->before.push_delay;
  double count =
      serves ? n->now.delayed - n->before.delayed : n->now.push_applied - n->before.push_applied;
  return count > 0.0 ? sum / count : -1.0;
}

static void say_waits(const sample *s, char text[64]) {
  snprintf(text, 64, "-");
  if (s->waits < 0.0) return;
  int n = snprintf(text, 64, "%s %.1f s", s->waits_call, s->waits);
  if (s->waits_for[0] && n > 0 && n < 64)
    snprintf(text + n, 64 - (size_t)n, ", for %s %s", s->waits_for, s->waits_peer);
}

static void say_name(const node *n, char text[32]) {
  if (n->rank[0])
    snprintf(text, 32, "%s %s", n->server[0] ? "worker+server" : "worker", n->rank);
  else
    snprintf(text, 32, n->server[0] ? "%s %s" : "%s", n->role, n->server);
}

static const node *slowest; /* of the workers, or NULL: they are about as fast */

/* The worker that most nodes wait for. If none has waited for 0.5 s: the worker with the fewest steps a second, if the
 * fastest makes at least a tenth more. */
static void find_slowest(size_t n, double now) {
  static uint32_t waiting[NODES_MAX]; /* by rank: how many wait for it */
  double most = 0.0, least = 1e300;
  uint32_t longest = 0;
  slowest = NULL;
  memset(waiting, 0, sizeof waiting);
  for (size_t i = 0; i < n; i++) {
    const sample *s = &nodes[i].now;
    unsigned long peer = strtoul(s->waits_peer, NULL, 10);
    if (s->waits >= 0.5 && !strcmp(s->waits_for, "worker") && peer < NODES_MAX) waiting[peer]++;
  }
  for (size_t i = 0; i < n; i++) {
    const node *w = &nodes[i];
    unsigned long rank = strtoul(w->rank, NULL, 10);
    if (!w->rank[0] || rank >= NODES_MAX || state_of(w, now) != STATE_READY) continue;
    double steps = rate(w, steps_of(&w->now), steps_of(&w->before));
    if (steps > most) most = steps;
    if (waiting[rank] < longest || (waiting[rank] == longest && (longest || steps >= least)))
      continue;
    longest = waiting[rank];
    least = steps;
    slowest = w;
  }
  if (!longest && !(most >= 1.1 * least && most > 0.0)) slowest = NULL;
}

static void say_state(const node *n, double now, char text[24]) {
  static const char *const names[] = {"joins", "ready", "failed", "closed", "dead", ""};
  int state = state_of(n, now);
  snprintf(text, 24, "%s", n == slowest ? "slowest" : names[state]);
  if (state == STATE_STALE) snprintf(text, 24, "stale %.0f s", now - n->now.written);
}

static const char heading[] =
    "NODE              STATE           STEP   STEPS/S     OUT/S      IN/S   DELAY    MEMORY  WAITS";

/* For terminals of less than 60 columns: 40. */
static const char heading_narrow[] = "NODE         STATE        STEP   STEPS/S";
enum { NARROW = 60 };

static void say_node(const node *n, double now, int columns, char *text, size_t room) {
  char name[32], state[24], waits[64], out[16], in[16], memory[16], delay[16] = "-";
  const sample *s = &n->now, *b = &n->before;
  say_name(n, name);
  say_state(n, now, state);
  say_waits(s, waits);
  if (delay_of(n) >= 0.0) snprintf(delay, sizeof delay, "%.1f", delay_of(n));
  int still = state_of(n, now) >= STATE_CLOSED; /* it does nothing any more */
  double steps = still ? 0.0 : rate(n, steps_of(s), steps_of(b));
  if (columns < NARROW) {
    snprintf(text, room, "%-12.12s %-8.8s %8.0f %9.1f", name, state, steps_of(s), steps);
    return;
  }
  snprintf(text, room, "%-17s %-11s %8.0f %9.1f %9s %9s %7s %9s  %s", name, state, steps_of(s),
           steps, in_bytes(still ? 0.0 : rate(n, s->sent, b->sent), out),
           in_bytes(still ? 0.0 : rate(n, s->received, b->received), in), delay,
           in_bytes(s->memory, memory), still ? "-" : waits);
}

static void say_summary(size_t n, double now, char *text, size_t room) {
  size_t ready = 0, dead = 0;
  double sent = 0.0;
  char out[16], clock[16];
  time_t seconds = (time_t)now;
  struct tm day;
  for (size_t i = 0; i < n; i++) {
    int state = state_of(&nodes[i], now);
    ready += state == STATE_READY;
    dead += state == STATE_DEAD || state == STATE_STALE;
    if (state == STATE_READY) sent += rate(&nodes[i], nodes[i].now.sent, nodes[i].before.sent);
  }
  localtime_r(&seconds, &day);
  strftime(clock, sizeof clock, "%H:%M:%S", &day);
  snprintf(text, room, "%s  %.63s  %zu nodes: %zu ready, %zu dead or stale  %s/s", clock,
           n > 0 ? nodes[0].job : "no file yet", n, ready, dead, in_bytes(sent, out));
}

static const char columns_text[] =
    "STEP: a worker's iterations of pushes, or else its collectives; a server's rounds\n"
    "DELAY: mean delay of the updates since the last refresh\n"
    "WAITS: the oldest open call, for how long, and for whom\n"
    "STATE: dead: the process is gone; stale: its file is old; slowest: the worker that the others "
    "wait for, or else with the fewest steps a second";

static int explains; /* ? was typed */

/* A table of the terminal's size, in one write. */
static void draw(size_t n, double now) {
  struct winsize size = {.ws_row = 24, .ws_col = 80};
  ioctl(STDOUT_FILENO, TIOCGWINSZ, &size);
  size_t rows = size.ws_row > 7   ? size.ws_row - 4u
                : size.ws_row > 3 ? size.ws_row - 3u
                                  : 1,
         shown = n < rows ? n : rows;
  int columns = size.ws_col > 0 ? size.ws_col : 80;
  char line[320];
  say_summary(n, now, line, sizeof line);
  printf("\033[H%.*s\033[K\n%s%-*.*s\033[0m\033[K", columns, line,
         options.coloured ? "\033[7m" : "", columns, columns,
         columns < NARROW ? heading_narrow : heading);
  if (explains) {
    printf("\033[J\n");
    options_width = columns;
    options_wrap(columns_text, 0, 0);
  }
  for (size_t i = 0; i < shown && !explains; i++) {
    say_node(&nodes[i], now, columns, line, sizeof line);
    int state = state_of(&nodes[i], now);
    const char *colour = !options.coloured                              ? ""
                         : state == STATE_DEAD || state == STATE_FAILED ? "\033[31m"
                         : state == STATE_STALE || &nodes[i] == slowest ? "\033[33m"
                         : state == STATE_CLOSED                        ? "\033[90m"
                                                                        : "";
    printf("\n%s%.*s\033[0m\033[K", colour, columns, line);
  }
  if (shown < n && !explains) printf("\n... and %zu more\033[K", n - shown);
  if (size.ws_row > 7)
    printf("%s%.*s\033[K", explains ? "" : "\n", columns,
           explains ? "any key: back" : "q: quit  ?: the columns");
  printf("\033[J");
  fflush(stdout);
}

static void print_plain(size_t n, double now, int first) {
  char line[320];
  say_summary(n, now, line, sizeof line);
  printf("%s\n", line);
  if (first || n > 1) printf("%s\n", heading);
  for (size_t i = 0; i < n; i++) {
    say_node(&nodes[i], now, NARROW, line, sizeof line);
    printf("%s\n", line);
  }
  fflush(stdout);
}

/* ---- the terminal ---- */

static void on_stop(int number) {
  (void)number;
  stopped = 1;
}

static void on_resize(int number) { (void)number; }

static void leave_terminal(void) {
  if (!terminal_is_raw) return;
  printf("\033[?25h\033[?1049l");
  fflush(stdout);
  tcsetattr(STDIN_FILENO, TCSANOW, &terminal_before);
  terminal_is_raw = 0;
}

/* Keys come one at a time and are not shown. Without a terminal at the input only signals end the program. */
static void enter_terminal(void) {
  if (tcgetattr(STDIN_FILENO, &terminal_before)) return;
  struct termios raw = terminal_before;
  raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
  tcsetattr(STDIN_FILENO, TCSANOW, &raw);
  terminal_is_raw = 1;
  atexit(leave_terminal);
  printf("\033[?1049h\033[?25l");
}

/* Waits for the next refresh, a key or a signal. */
static void wait_a_while(double until) {
  for (;;) {
    double left = until - wall_clock();
    if (left <= 0.0 || stopped) return;
    struct pollfd input = {STDIN_FILENO, POLLIN, 0};
    int n = poll(&input, terminal_is_raw ? 1 : 0, (int)(left * 1000.0) + 1);
    if (n < 0) return; /* a signal: the terminal has another size, or the program ends */
    char key = 0;
    if (n == 0) continue;
    if (read(STDIN_FILENO, &key, 1) <= 0 || key == 'q' || key == 3) stopped = 1;
    explains = !explains && key == '?';
    return;
  }
}

/* ---- options ---- */

/* The pattern of the files that MLFAB_METRICS names: "{node}" is any text, or a text before the last dot. */
static char *pattern_of(const char *given) {
  static char pattern[1024];
  const char *mark = strstr(given, "{node}"), *slash = strrchr(given, '/');
  const char *base = slash ? slash + 1 : given, *dot = strrchr(base, '.');
  if (!dot || dot == base) dot = given + strlen(given);
  if (mark)
    snprintf(pattern, sizeof pattern, "%.*s*%s", (int)(mark - given), given, mark + 6);
  else
    snprintf(pattern, sizeof pattern, "%.*s.*%s", (int)(dot - given), given, dot);
  return pattern;
}

static void parse(int argc, char **argv) {
  static const option_row rows[] = {
      {"--interval", "TIME", OPTION_TIME, &options.interval_ns, 1e8, 86400e9, 1e9, NULL,
       "between two refreshes (1s); a bare number counts seconds"},
      {"--count", "N", OPTION_COUNT, &options.count, 1, 1e15, 1, NULL,
       "ends after so many refreshes"},
      {"--plain", NULL, OPTION_FLAG, &options.plain, 0, 0, 0, NULL,
       "lines instead of a table, as when the output is not a terminal"},
      {NULL, NULL, OPTION_FLAG, NULL, 0, 0, 0, NULL, NULL}};
  static char more[1024], *one[1];
  static options_tool tool = {
      "mlfab-top",
      "usage: mlfab-top [--interval TIME] [--count N] [--plain] [FILE or 'PATTERN']...",
      "Shows the nodes of a run from their metrics files (MLFAB_METRICS). A pattern in quotes also "
      "finds nodes that join later. "
      "Without a pattern: the files that MLFAB_METRICS names. q ends it, ? explains the columns.",
      more,
      rows,
      0,
      NULL};
  snprintf(more, sizeof more, "Columns:\n%s", columns_text);
  int first = options_read(&tool, argc, argv);
  options.patterns = argv + first;
  options.npatterns = argc - first;
  const char *metrics = getenv("MLFAB_METRICS"), *term = getenv("TERM"), *none = getenv("NO_COLOR");
  options.coloured = !(none && *none);
  options.plain |= !isatty(STDOUT_FILENO) || (term && !strcmp(term, "dumb"));
  for (int i = 0; i < options.npatterns; i++) {
    struct stat is;
    if (!stat(options.patterns[i], &is) && S_ISDIR(is.st_mode))
      options_refuse("'%s': it is a directory; its files are '%s/*'", options.patterns[i],
                     options.patterns[i]);
  }
  if (options.npatterns > 0) return;
  if (!metrics || !*metrics) options_refuse("no file is given, and MLFAB_METRICS is not set");
  one[0] = pattern_of(metrics);
  options.patterns = one;
  options.npatterns = 1;
}

int main(int argc, char **argv) {
  parse(argc, argv);
  if (gethostname(own_host, sizeof own_host)) own_host[0] = 0;
  own_host[sizeof own_host - 1] = 0;
  struct sigaction stop = {.sa_handler = on_stop}, resize = {.sa_handler = on_resize};
  sigaction(SIGINT, &stop, NULL);
  sigaction(SIGTERM, &stop, NULL);
  sigaction(SIGHUP, &stop, NULL);
  sigaction(SIGWINCH, &resize, NULL);
  if (!options.plain) enter_terminal();
  size_t n = 0;
  for (uint64_t i = 0; !stopped && (options.count == 0 || i < options.count); i++) {
    if (i > 0) wait_a_while(wall_clock() + (double)options.interval_ns * 1e-9);
    if (stopped) break;
    n = read_all();
    find_slowest(n, wall_clock());
    if (options.plain)
      print_plain(n, wall_clock(), i == 0);
    else
      draw(n, wall_clock());
  }
  leave_terminal();
  if (n == 0 && options.count > 0)
    fprintf(stderr, "mlfab-top: no metrics file matches '%s'\n", options.patterns[0]);
  return n == 0 && options.count > 0;
}
