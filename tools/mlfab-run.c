/* mlfab-run.c - starts a fabric on this host: worker processes, the built-in server, a scheduler.
 *
 *    mlfab-run -n 4 ./trainer arguments...
 *    mlfab-run --join unix:@trainer -n 2 ./trainer arguments...
 *    mlfab-run --join unix:@trainer --servers 1
 *
 * The second form starts workers that join a fabric which runs already, and no servers. Both then have the fabric's
 * address, job and key in their environment.
 *
 * Every rank gets its place through MLFAB_* variables, which mlfab_config_from_env reads. It also gets a key of this
 * run (MLFAB_KEY; if MLFAB_KEY_FILE is set, that file has the key). A peer without the key is refused at its first
 * frame. mlfab-run forwards output line by line, prefixed with the rank, and forwards signals. It reports a rank that
 * fails with its exit status or signal; then --on-failure decides about the others. A worker that ends with status 0
 * before mlfab_close is reported too. It has failed, but it is not started again, and the others go on.
 *
 * The helpers (servers, replicas, the scheduler) outlive the workers. A job manager sends SIGTERM to every process of a
 * job, and a worker may then want to save its model. So built-in helpers ignore the signals by which a job is ended. They
 * end by themselves when the workers have left; otherwise this program ends them, after the workers. Phases only advance:
 *
 *    RUN -> SERVERS      the last worker has ended; helpers have SERVERS_GRACE_NS to end by themselves
 *    RUN, SERVERS -> TERM   a rank failed, or the time is over: SIGTERM to the workers
 *    TERM -> END_SERVERS    no worker runs: helpers are ended
 *    TERM, END_SERVERS -> KILL   GRACE_NS are over: SIGKILL to all; likewise after a second SIGINT or SIGTERM
 *
 * With --on-failure=restart a process that fails is started again, and uses the model of the others. If a shard has
 * lost all copies, all are ended, as above, and all are started again (begins_again). The model begins as the
 * newest checkpoint of this run. Without one the run ends. A model begins only once with the first weights.
 *
 * A helper may lack its purpose (`lacks`). waitpid and the news of built-in helpers (news_pipe) tell it. At the beginning
 * only replicas lack it. A copy that ends lacks the model until the other copy reports that it is in sync. The scheduler lacks
 * its votes until it has joined. The model is lost when all copies of a shard lack it. It also counts as lost if a worker
 * fails, or a process that was started again, while two of the three voters of a shard lack something. Then nobody may
 * serve.
 *
 * SIGTSTP stops the workers first (STOP_NS at most), then the helpers, then this program. SIGCONT goes to helpers and
 * workers.
 *
 * If this program's output is a terminal, the workers' is one too, so that their C library writes line by
 * line. Worker 0 gets the standard input: the descriptor itself or, if that is a terminal, a pipe that this
 * program fills from it, because only this program may read there.
 *
 * One thread and one poll loop. Nothing outlives this program: ranks are in process groups of their own,
 * which end with it; on Linux the kernel ends them even when it is killed. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/prctl.h>
#include <sys/random.h>
#endif

#ifndef MLFAB_WITH_KEYS
#define MLFAB_WITH_KEYS 1
#endif

#define RANKS_MAX 4096
#define RESTARTS_MAX 10
#define LINE_MAX_BYTES 16384           /* a longer line is forwarded in pieces */
#define GRACE_NS 2000000000ull         /* from SIGTERM to SIGKILL */
#define SERVERS_GRACE_NS 5000000000ull /* until servers must have ended after the last worker */
#define LEFT_OVER_NS 500000000ull  /* from the end of the fabric to that of copies that were late */
#define DRAIN_NS 300000000ull      /* for the last output of ranks that have ended */
#define REPEAT_NS 200000000ull     /* one request to end may come as two signals */
#define STOP_NS 1000000000ull      /* from SIGTSTP to SIGSTOP */
#define UNFINISHED_NS 100000000ull /* until a terminal shows text without a newline */
#define OPENED_BYTES 8             /* of a message of a worker's library */
#define SERVER_ARGUMENT "--mlfab-run-server"

enum exit_status { EXIT_TIMEOUT = 124, EXIT_NOT_FOUND = 127 };
enum on_failure { ON_FAILURE_END, ON_FAILURE_CONTINUE, ON_FAILURE_RESTART };
enum phase {
  PHASE_RUN,         /* workers are running */
  PHASE_SERVERS,     /* all workers have ended, servers may finish */
  PHASE_TERM,        /* SIGTERM was sent to the workers */
  PHASE_END_SERVERS, /* the workers have ended, and servers were told to */
  PHASE_KILL         /* SIGKILL was sent to all */
};

/* One output of one rank: the bytes of an unfinished line, which are still to be shown. */
typedef struct stream {
  int fd; /* -1: closed */
  int to; /* STDOUT_FILENO or STDERR_FILENO */
  size_t fill;
  uint64_t since_ns; /* when the first of them came */
  char line[LINE_MAX_BYTES];
} stream;

typedef struct rank {
  int number;
  int is_server; /* or the scheduler: it ends after the workers */
  int is_scheduler, is_replica;
  int is_open;       /* a worker that has opened a fabric, and has not closed it since */
  pid_t left_open;   /* ended with status 0: its process group, until tell_left_open judges it */
  int lacks, serves; /* helpers: see above */
  pid_t pid;         /* 0: not running */
  int done;          /* ended, and not to be restarted */
  int restarts;
  stream out, err;
} rank;

static struct {
  int workers, servers;
  int replicas;     /* 1: of each server */
  int workers_max;  /* 0: workers */
  int servers_max;  /* 0: servers */
  const char *join; /* the address of server 0 of the fabric to join, or NULL */
  int dedicated;    /* 0 with -s 0: worker 0 serves too */
  int on_failure;   /* enum on_failure */
  int prefix, verbose;
  int scheduler;            /* a process of its own */
  const char *scheduled;    /* MLFAB_SCHEDULER, or NULL: from the environment */
  uint64_t delay_bound;     /* likewise; 0: from the environment */
  const char *resume;       /* MLFAB_RESUME, likewise */
  char newest[256];         /* instead of it: where the newest checkpoint of this run is, or "" */
  uint32_t history;         /* its history; 0: unknown */
  const char *settings[32]; /* name=value, for the environment */
  int nsettings;
  uint64_t timeout_ns;   /* 0: none */
  const char *transport; /* NULL: from the environment, or the library's default */
  const char *server_program;
  char **command;
  char coordinator[256]; /* with replicas two addresses, with a comma between */
  char job[64];
  int insecure;
  char key[65]; /* of this run; only in the ranks' environment */
} options;

static rank *ranks;
static int rank_count;
static enum phase phase;
static uint64_t phase_until;
static int exit_status; /* that of the first rank that failed */
static int interrupted; /* SIGINT or SIGTERM, which was forwarded: ranks are no longer restarted */
static uint64_t interrupted_ns;
static int hung_up; /* SIGHUP was forwarded: a rank that it ends is not restarted */
/* Signals whose handling this program changes, those of a job manager or terminal first; and which were ignored before. */
static const int changed[] = {SIGINT,  SIGTERM, SIGHUP,  SIGUSR1, SIGUSR2,
                              SIGTSTP, SIGCONT, SIGCHLD, SIGPIPE, SIGTTIN};
enum { JOB_SIGNALS = 6, CAUGHT_SIGNALS = 8 };
static int was_ignored[sizeof changed / sizeof changed[0]];
static uint64_t
    stop_until; /* SIGTSTP was forwarded: when all are stopped at the latest; 0: it was not */
static uint64_t run_until = UINT64_MAX; /* --timeout */
static uint64_t
    over_ns; /* when a copy of a server ended with 0: all workers had left; 0: not yet */
static int signal_pipe[2];
static int joined;       /* all ranks have */
static int generations;  /* how often all were started again */
static int begins_again; /* all are being ended for it ... */
static int lost_status;  /* ... since a rank failed with this status */
/* A worker's library writes there when the worker opens or closes a fabric: 'o' or 'c' and the index of `ranks`, in one
 * write of OPENED_BYTES. */
static int opened_pipe[2] = {-1, -1};
static int opened; /* at least one worker has opened a fabric */
/* News of a built-in helper for this program: one write each, which does not mix with others. */
static int news_pipe[2] = {-1, -1};
enum news_kind { NEWS_JOINED, NEWS_SERVES, NEWS_IN_SYNC, NEWS_APART, NEWS_CHECKPOINT };
typedef struct helper_news {
  enum news_kind kind;
  int rank; /* index of `ranks` */
  pid_t pid;
  uint32_t history; /* CHECKPOINT: a whole one, of this history ... */
  char dir[256];    /* ... in this directory */
} helper_news;

/* Input for worker 0, if the standard input is a terminal. */
static struct {
  int to; /* -1: no reader */
  size_t at, fill;
  char bytes[4096];
} input = {.to = -1};

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Writes all bytes. If the reader is gone, output is discarded and the ranks continue. */
static void write_all(int fd, const char *bytes, size_t count) {
  while (count > 0) {
    ssize_t n = write(fd, bytes, count);
    if (n < 0 && errno == EAGAIN) {
      struct pollfd wait = {fd, POLLOUT, 0};
      poll(&wait, 1, -1);
    } else if (n < 0 && errno != EINTR) {
      return;
    } else if (n > 0) {
      bytes += n;
      count -= (size_t)n;
    }
  }
}

/* The stream whose text is the last line on the terminal, without a newline yet. */
static const stream *unfinished;

/* Ends that line, unless it is `own`. */
static void end_line(const stream *own) {
  if (unfinished && unfinished != own) {
    write_all(unfinished->to, "\n", 1);
    unfinished = NULL;
  }
}

/* Prints one line on stderr, in one write, so that it does not mix with the ranks' output. */
__attribute__((__format__(__printf__, 1, 2))) static void say(const char *format, ...) {
  char text[1024];
  int n = snprintf(text, sizeof text, "mlfab-run: ");
  va_list arguments;
  va_start(arguments, format);
  n += vsnprintf(text + n, sizeof text - (size_t)n - 1, format, arguments);
  va_end(arguments);
  if (n > (int)sizeof text - 2) n = (int)sizeof text - 2;
  text[n++] = '\n';
  if (isatty(STDERR_FILENO)) end_line(NULL);
  write_all(STDERR_FILENO, text, (size_t)n);
}

static const char *kind(const rank *r) {
  if (options.join) return "joiner"; /* `number` is not its rank */
  return r->is_scheduler ? "scheduler"
         : r->is_replica ? "replica"
         : r->is_server  ? "server"
                         : "worker";
}

static const char *signal_name(int number) {
  static const struct {
    int number;
    const char *name;
  } names[] = {{SIGHUP, "SIGHUP"},   {SIGINT, "SIGINT"},   {SIGQUIT, "SIGQUIT"},
               {SIGILL, "SIGILL"},   {SIGTRAP, "SIGTRAP"}, {SIGABRT, "SIGABRT"},
               {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},   {SIGKILL, "SIGKILL"},
               {SIGSEGV, "SIGSEGV"}, {SIGPIPE, "SIGPIPE"}, {SIGALRM, "SIGALRM"},
               {SIGTERM, "SIGTERM"}, {SIGUSR1, "SIGUSR1"}, {SIGUSR2, "SIGUSR2"},
               {SIGSYS, "SIGSYS"},   {SIGXCPU, "SIGXCPU"}, {SIGXFSZ, "SIGXFSZ"}};
  static char other[32];
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
    if (names[i].number == number) return names[i].name;
  snprintf(other, sizeof other, "signal %d", number);
  return other;
}

/* ---- the built-in server: this program, started again with SERVER_ARGUMENT ---- */

static void server_log(void *user, int level, const char *line) {
  (void)user;
  fprintf(stderr, "%s%s\n", level <= MLFAB_LOG_WARN ? "" : "# ", line);
}

typedef struct server_news {
  int to, rank;                     /* a descriptor for helper_news, or -1; index of this process */
  const char *dir;                  /* checkpoint_dir */
  int known;                        /* how often it is no news that this copy serves */
  unsigned long long whole, failed; /* checkpoints */
  char why[400];                    /* the last that failed */
} server_news;

static void server_tell(const server_news *server, enum news_kind kind, const char *text) {
  helper_news told = {.kind = kind, .rank = server->rank, .pid = getpid()};
  const char *in = text ? strstr(text, " bytes in ") : NULL, *end = in ? strrchr(in, '(') : NULL;
  if (server->to < 0) return;
  if (kind == NEWS_CHECKPOINT) {
    if (!end || end - in < 11 || sscanf(end, "(history %" SCNu32 ")", &told.history) != 1) return;
    int bytes = (int)(end - in) - 11; /* without the last blank */
    snprintf(told.dir, sizeof told.dir, "%.*s", bytes, in + 10);
    /* The text has the beginning of a long one. */
    if (strlen(told.dir) >= 160 && !strncmp(server->dir, told.dir, strlen(told.dir)))
      snprintf(told.dir, sizeof told.dir, "%s", server->dir);
  }
  if (write(server->to, &told, sizeof told) < 0)
    fprintf(stderr, "cannot report: %s\n", strerror(errno));
}

/* Says which checkpoint a run goes on from, and which copy of a server has taken over. Counts checkpoints. */
static void server_event(void *user, const mlfab_event_info *info) {
  server_news *news = user;
  if (info->kind == MLFAB_EVENT_SERVES) server_tell(news, NEWS_SERVES, NULL);
  if (info->kind == MLFAB_EVENT_IN_SYNC)
    server_tell(news, info->code == 0 ? NEWS_IN_SYNC : NEWS_APART, NULL);
  if (info->kind == MLFAB_EVENT_CHECKPOINT && info->code == 0) {
    news->whole++;
    server_tell(news, NEWS_CHECKPOINT, info->text);
  }
  if (info->kind == MLFAB_EVENT_CHECKPOINT && info->code != 0) {
    news->failed++;
    snprintf(news->why, sizeof news->why, "%s", info->text);
  }
  if (info->kind == MLFAB_EVENT_SERVES && news->known > 0)
    news->known--;
  else if (info->kind == MLFAB_EVENT_RESTORED || info->kind == MLFAB_EVENT_SERVES)
    fprintf(stderr, "%s\n", info->text);
}

static int server_failed(const char *doing, const mlfab_error *error) {
  fprintf(stderr, "%s: %s\n", doing, error->text);
  return 1;
}

static volatile sig_atomic_t server_told; /* to leave */

static void server_signal(int number) {
  (void)number;
  server_told = 1;
}

/* A server that has joined leaves when it is told to (SIGTERM, SIGINT), too. */
static int server_serve(mlfab *fabric) {
  const char *joins = getenv("MLFAB_JOIN");
  int code = 0;
  if (!joins || strcmp(joins, "1") != 0) return mlfab_serve(fabric, 0);
  signal(SIGTERM, server_signal);
  signal(SIGINT, server_signal);
  do {
    code = mlfab_serve(fabric, 100000000);
  } while (code == MLFAB_ERR_TIMEOUT && !server_told);
  return server_told ? 0 : code;
}

/* Serves, or schedules, until every worker has left. `how`: verbose, quiet or again (quiet, and not the first process
 * with this number). `to`: a descriptor for helper_news, or -1; `index`: of this
 * process in `ranks`. */
static int server_main(const char *how, int to, int index) {
  int verbose = strcmp(how, "verbose") == 0;
  signal(SIGPIPE, SIG_IGN);
  mlfab_env env;
  memset(&env, 0, sizeof env);
  env.size = sizeof env;
  env.log = server_log;
  env.log_level = verbose ? MLFAB_LOG_INFO : MLFAB_LOG_WARN;
  mlfab_config config;
  mlfab_error error;
  memset(&error, 0, sizeof error);
  mlfab_config_init(&config);
  config.env = &env;
  config.on_event = server_event;
  mlfab *fabric = NULL;
  if (mlfab_config_from_env(&config, &error)) return server_failed("configuration", &error);
  server_news news = {.known = strcmp(how, "quiet") == 0 && config.roles == MLFAB_ROLE_SERVER,
                      .to = to,
                      .rank = index,
                      .dir = config.checkpoint_dir};
  config.user = &news;
  if (mlfab_open(&config, &fabric, &error)) return server_failed("cannot open", &error);
  server_tell(&news, NEWS_JOINED, NULL);
  int status = 0;
  if (server_serve(fabric)) {
    mlfab_last_error(fabric, &error);
    status = server_failed("cannot serve", &error);
  }
  if (news.failed > 0 && news.whole == 0)
    fprintf(stderr, "no checkpoint was made: all %llu failed. The last: %s\n", news.failed,
            news.why);
  mlfab_stats stats;
  if (verbose && mlfab_get_stats(fabric, &stats, sizeof stats) == 0 && stats.plans_made > 0)
    fprintf(stderr, "# %llu plans, %llu updates grouped, %llu dropped\n",
            (unsigned long long)stats.plans_made, (unsigned long long)stats.plans_grouped,
            (unsigned long long)stats.plans_dropped);
  if (verbose && mlfab_get_stats(fabric, &stats, sizeof stats) == 0 && stats.commits > 0)
    fprintf(stderr, "# %llu updates in %llu commits, %llu pulls, %llu refused\n",
            (unsigned long long)stats.updates_applied, (unsigned long long)stats.commits,
            (unsigned long long)stats.pulls_answered, (unsigned long long)stats.updates_refused);
  mlfab_close(&fabric);
  return status;
}

/* ---- forwarding ---- */

static int coloured(int fd) {
  const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");
  return isatty(fd) && !(no_color && *no_color) && !(term && strcmp(term, "dumb") == 0);
}

/* Shows a line, or a piece of one that a terminal shows before its end. Each line has the prefix once. */
static void emit(const rank *r, const stream *s, const char *line, size_t count, int whole) {
  char text[LINE_MAX_BYTES + 64];
  int colour = coloured(s->to), n = 0;
  /* Neighbouring ranks get different colours; servers are grey. */
  int shade = r->is_server ? 90 : 31 + r->number % 6;
  if (isatty(s->to)) end_line(s);
  if (unfinished != s)
    n = colour ? snprintf(text, 64, "\033[%dm[%s %d]\033[0m ", shade, kind(r), r->number)
               : snprintf(text, 64, "[%s %d] ", kind(r), r->number);
  memcpy(text + n, line, count);
  if (whole) text[(size_t)n + count] = '\n';
  write_all(s->to, text, (size_t)n + count + (size_t)whole);
  if (!whole)
    unfinished = s;
  else if (unfinished == s)
    unfinished = NULL;
}

static void close_stream(const rank *r, stream *s) {
  if (s->fill > 0 || unfinished == s) emit(r, s, s->line, s->fill, 1);
  s->fill = 0;
  close(s->fd);
  s->fd = -1;
}

/* Forwards complete lines of a rank's output. Returns 0 when there is no more for now. */
static int forward(const rank *r, stream *s) {
  if (s->fd < 0) return 0;
  ssize_t got = read(s->fd, s->line + s->fill, sizeof s->line - s->fill);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (got <= 0) {
    close_stream(r, s);
    return 0;
  }
  if (s->fill == 0) s->since_ns = now_ns();
  s->fill += (size_t)got;
  size_t start = 0;
  for (;;) {
    char *end = memchr(s->line + start, '\n', s->fill - start);
    if (!end) break;
    size_t length = (size_t)(end - (s->line + start));
    emit(r, s, s->line + start, length, 1);
    start += length + 1;
    s->since_ns = now_ns();
  }
  memmove(s->line, s->line + start, s->fill - start);
  s->fill -= start;
  if (s->fill == sizeof s->line) {
    emit(r, s, s->line, s->fill, 1);
    s->fill = 0;
  }
  return 1;
}

/* When a terminal is to show what the stream has of an unfinished line, such as a progress bar. A pipe or a file gets
 * whole lines. */
static uint64_t shown_at(const stream *s) {
  return s->fd >= 0 && s->fill > 0 && isatty(s->to) ? s->since_ns + UNFINISHED_NS : UINT64_MAX;
}

static void show_unfinished(const rank *r, stream *s, uint64_t now) {
  if (now < shown_at(s)) return;
  emit(r, s, s->line, s->fill, 0);
  s->fill = 0;
}

/* ---- starting ---- */

static void set_number(const char *name, int64_t value) {
  char text[24];
  snprintf(text, sizeof text, "%" PRId64, value);
  setenv(name, text, 1);
}

/* The variable of a setting, NAME or NAME=VALUE. */
static const char *variable_of(const char *setting) {
  static char name[80];
  int n = snprintf(name, sizeof name, "MLFAB_%.64s", setting);
  for (int i = 6; i < n && name[i] != '='; i++) name[i] = (char)toupper((unsigned char)name[i]);
  name[strcspn(name, "=")] = 0;
  return name;
}

/* Sets "name=value" as MLFAB_NAME. */
static void set_setting(const char *setting) {
  setenv(variable_of(setting), strchr(setting, '=') + 1, 1);
}

/* The place of a process that joins: server 0 tells all but its own address. */
static void set_joiner(const rank *r) {
  static const char *const told[] = {"MLFAB_RANK",      "MLFAB_WORKERS", "MLFAB_WORKERS_MAX",
                                     "MLFAB_SERVERS",   "MLFAB_ROLE",    "MLFAB_DEDICATED",
                                     "MLFAB_SCHEDULER", "MLFAB_LISTEN",  "MLFAB_SERVERS_MAX"};
  for (size_t i = 0; i < sizeof told / sizeof told[0]; i++) unsetenv(told[i]);
  set_number("MLFAB_JOIN", 1);
  if (r->is_server) setenv("MLFAB_ROLE", "server", 1);
  setenv("MLFAB_COORDINATOR", options.join, 1);
  for (int i = 0; i < options.nsettings; i++) set_setting(options.settings[i]);
  if (options.transport) setenv("MLFAB_TRANSPORT", options.transport, 1);
}

static int takes_input(const rank *r) { return !options.join && !r->is_server && r->number == 0; }

/* Does this program start the rank's own program, instead of itself as a built-in server? */
static int is_foreign(const rank *r) {
  return !r->is_server || (options.server_program && !r->is_scheduler);
}

/* A worker's library says there that it opens or closes a fabric. */
static void set_report(const rank *r, pid_t parent) {
  unsetenv("_MLFAB_OPENED");
#ifdef __linux__
  char path[64];
  snprintf(path, sizeof path, "/proc/%ld/fd/%d %0*d", (long)parent, opened_pipe[1],
           OPENED_BYTES - 1, (int)(r - ranks));
  if (!r->is_server) setenv("_MLFAB_OPENED", path, 1);
#else
  (void)r;
  (void)parent;
#endif
}

/* Workers and a server program of the user's have the signals as this program found them: a shell cannot trap a signal that
 * was ignored when it began. Only SIGINT and SIGTERM, which this program passes on, are never ignored. Built-in helpers
 * ignore all that may be sent to each process of a job; a joined server leaves at SIGTERM or SIGINT (server_serve). */
static void set_signals(const rank *r) {
  for (size_t i = 0; i < sizeof changed / sizeof changed[0]; i++) {
    int ends = changed[i] == SIGINT || changed[i] == SIGTERM;
    int ignored =
        is_foreign(r) ? !ends && was_ignored[i] : i < JOB_SIGNALS && !(ends && options.join);
    signal(changed[i], ignored ? SIG_IGN : SIG_DFL);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
}

static void set_environment(const rank *r) {
  if (options.join) {
    set_joiner(r);
    return;
  }
  unsetenv("MLFAB_JOIN");
  set_number("MLFAB_RANK", r->number);
  if (options.workers_max) set_number("MLFAB_WORKERS_MAX", options.workers_max);
  if (options.servers_max) set_number("MLFAB_SERVERS_MAX", options.servers_max);
  set_number("MLFAB_WORKERS", options.workers);
  set_number("MLFAB_SERVERS", options.dedicated ? options.servers : 1);
  set_number("MLFAB_DEDICATED", options.dedicated);
  set_number("MLFAB_REPLICAS", options.replicas);
  if (options.dedicated || r->is_scheduler)
    setenv("MLFAB_ROLE", kind(r), 1);
  else
    unsetenv("MLFAB_ROLE"); /* worker 0 has both roles */
  setenv("MLFAB_COORDINATOR", options.coordinator, 1);
  setenv("MLFAB_JOB", options.job, 1);
  if (options.insecure) {
    unsetenv("MLFAB_KEY");
    unsetenv("MLFAB_KEY_FILE");
    setenv("MLFAB_ALLOW_INSECURE", "1", 1);
  } else if (options.key[0]) {
    setenv("MLFAB_KEY", options.key, 1);
  }
  if (options.scheduled) setenv("MLFAB_SCHEDULER", options.scheduled, 1);
  if (options.delay_bound) set_number("MLFAB_DELAY_BOUND", (int64_t)options.delay_bound);
  if (options.resume) setenv("MLFAB_RESUME", options.resume, 1);
  for (int i = 0; i < options.nsettings; i++) set_setting(options.settings[i]);
  if (options.newest[0]) {
    char history[16];
    snprintf(history, sizeof history, "%" PRIu32, options.history);
    setenv("MLFAB_RESUME", options.newest, 1);
    setenv("MLFAB_HISTORY", history, 1);
  }
  /* Ranks cannot share one listening address. */
  unsetenv("MLFAB_LISTEN");
  if (options.insecure) setenv("MLFAB_LISTEN", "tcp:127.0.0.1:0", 1);
  if (options.transport) setenv("MLFAB_TRANSPORT", options.transport, 1);
}

/* Executes the rank's program in the child. Returns only if that fails, with errno set. */
static void become(const rank *r, pid_t parent) {
  setpgid(0, 0);
#ifdef __linux__
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1); /* the parent died before prctl */
#endif
  /* Only worker 0 gets the standard input. */
  int null = takes_input(r) ? -1 : open("/dev/null", O_RDONLY);
  if (null >= 0) dup2(null, STDIN_FILENO);
  set_signals(r);
  set_environment(r);
  set_report(r, parent);
  if (!r->is_server) {
    execvp(options.command[0], options.command);
    return;
  }
  if (is_foreign(r)) {
    char *server[] = {(char *)(uintptr_t)options.server_program, NULL};
    execvp(server[0], server);
    return;
  }
  char name[] = "mlfab-run", argument[] = SERVER_ARGUMENT, how[8], to[16], index[16];
  fcntl(news_pipe[1], F_SETFD, 0);
  snprintf(to, sizeof to, "%d", news_pipe[1]);
  snprintf(index, sizeof index, "%d", (int)(r - ranks));
  snprintf(how, sizeof how, "%s",
           options.verbose   ? "verbose"
           : r->restarts > 0 ? "again"
                             : "quiet");
  char *server[] = {name, argument, how, to, index, NULL};
#ifdef __linux__
  /* Executes this program again, so that the server is recognisable in a list of processes. */
  execv("/proc/self/exe", server);
#endif
  exit(server_main(how, news_pipe[1], (int)(r - ranks)));
}

/* Opens a terminal as large as ours, without output processing: the end to read from and the ranks' end. */
static int open_terminal(int like, int ends[2]) {
  struct termios mode;
  struct winsize size;
  const char *name = NULL;
  ends[0] = posix_openpt(O_RDWR | O_NOCTTY);
  if (ends[0] < 0) return -1;
  if (grantpt(ends[0]) == 0 && unlockpt(ends[0]) == 0) name = ptsname(ends[0]);
  ends[1] = name ? open(name, O_RDWR | O_NOCTTY) : -1;
  if (ends[1] < 0 || tcgetattr(ends[1], &mode) < 0) {
    if (ends[1] >= 0) close(ends[1]);
    close(ends[0]);
    return -1;
  }
  mode.c_oflag &= ~(tcflag_t)OPOST;
  mode.c_lflag &= ~(tcflag_t)(ECHO | ICANON | ISIG);
  tcsetattr(ends[1], TCSANOW, &mode);
  if (ioctl(like, TIOCGWINSZ, &size) == 0) ioctl(ends[1], TIOCSWINSZ, &size);
  return 0;
}

/* A worker's output is a terminal if ours is one. */
static int open_stream(const rank *r, stream *s, int to, int *write_end_p) {
  int ends[2];
  if (r->is_server || !isatty(to) || open_terminal(to, ends) < 0) {
    if (pipe(ends) < 0) return -1;
  }
  fcntl(ends[0], F_SETFD, FD_CLOEXEC);
  fcntl(ends[1], F_SETFD, FD_CLOEXEC);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  s->fd = ends[0];
  s->to = to;
  s->fill = 0;
  *write_end_p = ends[1];
  return 0;
}

/* Forwards the last bytes of the rank's previous process, which are in its pipes. */
static void finish_stream(const rank *r, stream *s) {
  while (forward(r, s)) continue;
  if (s->fd >= 0) close_stream(r, s);
}

/* Opens the pipe for worker 0's input, if ours is a terminal: its read end, else -1. */
static int open_input(const rank *r) {
  int ends[2];
  if (!takes_input(r) || !isatty(STDIN_FILENO) || pipe(ends) < 0) return -1;
  for (int i = 0; i < 2; i++) fcntl(ends[i], F_SETFD, FD_CLOEXEC);
  fcntl(ends[1], F_SETFL, O_NONBLOCK);
  if (input.to >= 0) close(input.to);
  input.to = ends[1];
  input.at = input.fill = 0;
  return ends[0];
}

/* Forwards input. Closes the pipe when worker 0 stops reading, or at the end of the input. */
static void pass_input(const struct pollfd *from, const struct pollfd *to) {
  ssize_t n = 0;
  if (from->revents) n = read(STDIN_FILENO, input.bytes, sizeof input.bytes);
  if (n < 0 && (errno == EINTR || errno == EAGAIN || tcgetpgrp(STDIN_FILENO) != getpgrp())) return;
  int over = from->revents && n <= 0;
  if (from->revents && n > 0) {
    input.at = 0;
    input.fill = (size_t)n;
  } else if (to->revents) {
    n = write(input.to, input.bytes + input.at, input.fill - input.at);
    if (n > 0) input.at += (size_t)n;
    over = n < 0 && errno != EAGAIN && errno != EINTR;
  }
  if (!over) return;
  close(input.to);
  input.to = -1;
}

/* Starts a rank: 0, or an exit status if that fails. */
static int start(rank *r) {
  int out = -1, err = -1, report[2];
  finish_stream(r, &r->out);
  finish_stream(r, &r->err);
  if (pipe(report) < 0 || (options.prefix && (open_stream(r, &r->out, STDOUT_FILENO, &out) < 0 ||
                                              open_stream(r, &r->err, STDERR_FILENO, &err) < 0))) {
    say("cannot make a pipe for %s %d: %s", kind(r), r->number, strerror(errno));
    return 1;
  }
  fcntl(report[0], F_SETFD, FD_CLOEXEC);
  fcntl(report[1], F_SETFD, FD_CLOEXEC);
  pid_t parent = getpid();
  int in = open_input(r);
  pid_t pid = fork();
  if (pid == 0) {
    if (in >= 0) dup2(in, STDIN_FILENO);
    if (out >= 0) dup2(out, STDOUT_FILENO);
    if (err >= 0) dup2(err, STDERR_FILENO);
    become(r, parent);
    int code = errno;
    if (write(report[1], &code, sizeof code) < 0) _exit(1);
    _exit(EXIT_NOT_FOUND);
  }
  if (in >= 0) close(in);
  if (out >= 0) close(out);
  if (err >= 0) close(err);
  close(report[1]);
  int code = 0;
  ssize_t got = 0;
  if (pid < 0)
    say("cannot start %s %d: %s", kind(r), r->number, strerror(errno));
  else
    do got = read(report[0], &code, sizeof code);
    while (got < 0 && errno == EINTR);
  close(report[0]);
  if (pid < 0) return 1;
  if (got == (ssize_t)sizeof code) {
    waitpid(pid, NULL, 0);
    const char *program = r->is_server ? options.server_program : options.command[0];
    say("cannot start %s: %s", program, strerror(code));
    return EXIT_NOT_FOUND;
  }
  setpgid(pid, pid); /* the child does the same; whichever is first */
  r->pid = pid;
  r->is_open = 0;
  r->left_open = 0;
  if (options.verbose) say("%s %d is process %ld", kind(r), r->number, (long)pid);
  return 0;
}

/* ---- ending ---- */

/* Signals whole process groups, because a trainer may be started by a shell script. */
static void signal_all(int number, int servers_too) {
  for (int i = 0; i < rank_count; i++)
    if (ranks[i].pid > 0 && (servers_too || !ranks[i].is_server)) kill(-ranks[i].pid, number);
}

/* The workers first: until they have ended, the servers serve them. */
static void end_all(void) {
  if (phase >= PHASE_TERM) return;
  phase = PHASE_TERM;
  phase_until = now_ns() + GRACE_NS;
  signal_all(SIGTERM, 0);
}

/* No worker runs. A built-in server ignores SIGTERM; but one that has joined another fabric leaves it first. */
static void end_servers(void) {
  phase = PHASE_END_SERVERS;
  phase_until = now_ns() + GRACE_NS;
  for (int i = 0; i < rank_count; i++)
    if (ranks[i].pid > 0)
      kill(-ranks[i].pid, options.join || is_foreign(&ranks[i]) ? SIGTERM : SIGKILL);
}

static int is_running(int servers) {
  for (int i = 0; i < rank_count; i++)
    if (ranks[i].pid > 0 && ranks[i].is_server == servers) return 1;
  return 0;
}

/* Does a built-in process report that all ranks have joined? */
static int reports_joined(void) {
  return options.dedicated && (!options.server_program || options.replicas);
}

/* The other copy of a server; NULL: there is none, or it is the scheduler. */
static rank *other_copy(const rank *r) {
  if (!options.replicas || !r->is_server || r->is_scheduler) return NULL;
  return &ranks[r - ranks + (r->is_replica ? -options.servers : options.servers)];
}

/* A helper tells something. News of a process that has ended count only if they report a checkpoint. */
static void take_news(const helper_news *told) {
  if (told->kind == NEWS_CHECKPOINT) {
    snprintf(options.newest, sizeof options.newest, "%s", told->dir);
    options.history = told->history;
  }
  if (told->rank < 0 || told->rank >= rank_count || ranks[told->rank].pid != told->pid) return;
  rank *r = &ranks[told->rank], *other = other_copy(r);
  if (told->kind == NEWS_JOINED) {
    if (r->is_scheduler) r->lacks = 0;
    if (!joined && options.verbose) say("all ranks have joined");
    joined = 1;
  }
  if (!other) return;
  if (told->kind == NEWS_SERVES) {
    r->serves = other->lacks = 1;
    r->lacks = other->serves = 0;
  }
  if (told->kind == NEWS_IN_SYNC) r->lacks = other->lacks = 0;
  if (told->kind == NEWS_APART) (r->serves ? other : r)->lacks = 1;
}

static void read_news(void) {
  helper_news told;
  while (read(news_pipe[0], &told, sizeof told) == (ssize_t)sizeof told) take_news(&told);
}

static int have_joined(void) {
  read_news();
  return joined;
}

/* Reads which workers have opened and closed. The last message of a rank counts: a program that executes itself again
 * opens twice and closes once. */
static void read_opened(void) {
  char bytes[OPENED_BYTES + 1] = "";
  while (read(opened_pipe[0], bytes, OPENED_BYTES) == OPENED_BYTES) {
    long at = strtol(bytes + 1, NULL, 10);
    if (at >= 0 && at < rank_count) ranks[at].is_open = bytes[0] == 'o';
    opened = 1;
  }
}

static int have_opened(void) {
  read_opened();
  return opened;
}

/* Workers that ended with status 0 before they closed have failed. A worker that left its fabric to a process of its group
 * has not, as long as that runs. Returns 1 if there is such a worker. */
static int tell_left_open(void) {
  int left = 0;
  read_opened();
  for (int i = 0; i < rank_count; i++) {
    rank *r = &ranks[i];
    if (!r->left_open) continue;
    if (r->is_open && (kill(-r->left_open, 0) == 0 || errno != ESRCH)) {
      left = 1;
      continue;
    }
    r->left_open = 0;
    if (!r->is_open) continue;
    say("%s %d ended with status 0 without mlfab_close; others that wait for it get an error",
        kind(r), r->number);
    if (exit_status == 0) exit_status = 1;
  }
  return left;
}

/* Has the model been lost with this rank, which has ended? NULL, or how. See above. */
static const char *model_lost(const rank *r, int by_itself) {
  static char text[128];
  if (!joined || over_ns || options.join || options.server_program) return NULL;
  const rank *other = other_copy(r);
  if (r->is_server && !r->is_scheduler && (!other || other->lacks)) {
    snprintf(text, sizeof text, "server %d%s", r->number, other ? " and its replica have" : " has");
    return text;
  }
  if (r->is_server && !by_itself) return NULL;
  for (int s = 0; s < options.servers; s++) {
    int lacking = ranks[s].lacks;
    if (options.replicas)
      lacking += other_copy(&ranks[s])->lacks + ranks[2 * options.servers].lacks - 1;
    if (lacking <= 0) continue;
    snprintf(
        text, sizeof text,
        options.replicas ? "two of server %d, its replica and the scheduler have" : "server %d has",
        s);
    return text;
  }
  return NULL;
}

/* Ends all, to start all again; 0: there is no checkpoint to go on from. */
static int begin_again(const char *who, int code) {
  const char *resume = getenv("MLFAB_RESUME");
  const char *from = options.newest[0] ? options.newest : options.resume ? options.resume : resume;
  if (!from || !*from) {
    say("the model is lost: %s ended. This run has made no whole checkpoint to go on from", who);
    return 0;
  }
  if (generations == RESTARTS_MAX) {
    say("the model is lost: %s ended. All were started again %d times already", who, RESTARTS_MAX);
    return 0;
  }
  generations++;
  begins_again = 1;
  lost_status = code;
  say("the model is lost: %s ended. All begin again from %s in %s (%d of at most %d times)", who,
      options.newest[0] ? "the newest checkpoint of this run"
                        : "where this run began, since it has made no whole checkpoint,",
      from, generations, RESTARTS_MAX);
  return 1;
}

/* May workers of other runs use the servers of this one? */
static int serves_others(void) { return options.workers_max > options.workers; }

/* Have all workers ended well, so that nobody needs a server any more? Workers that are not reaped yet count too. */
static int all_is_done(void) {
  if (options.workers == 0 || exit_status != 0 || serves_others()) return 0;
  for (int i = 0; i < rank_count; i++) {
    siginfo_t info;
    memset(&info, 0, sizeof info);
    if (ranks[i].is_server || ranks[i].pid <= 0) continue;
    if (waitid(P_PID, (id_t)ranks[i].pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 ||
        info.si_pid == 0 || info.si_code != CLD_EXITED || info.si_status != 0)
      return 0;
  }
  return 1;
}

/* A rank has ended; `status` is that of waitpid. */
static void ended(rank *r, int status) {
  int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  /* This rank alone serves the model. A scheduler can always be restarted. */
  int serves = !options.join && !r->is_scheduler && !options.replicas &&
               (r->is_server || (!options.dedicated && r->number == 0));
  /* The other copy of a server goes on, and this one begins as its copy. */
  int copy = options.replicas && r->is_server && !r->is_scheduler;
  int restart = options.on_failure == ON_FAILURE_RESTART || r->is_scheduler || copy;
  int done = r->is_server && all_is_done();
  int late = done || (over_ns && r->is_server); /* nobody needs it any more */
  int hangs_up = hung_up && code == 128 + SIGHUP;
  read_news();
  pid_t pid = r->pid;
  r->pid = 0;
  r->done = r->lacks = 1;
  r->serves = 0;
  if (phase >= PHASE_TERM) {
    if (options.verbose) say("%s %d has ended", kind(r), r->number);
    return;
  }
  if (code == 0) {
    if (options.verbose) say("%s %d has finished", kind(r), r->number);
    if (!interrupted && !hung_up) r->left_open = pid;
    (void)tell_left_open();
    if (copy && !over_ns) over_ns = now_ns();
    return;
  }
  if (interrupted && code == 128 + interrupted && !options.verbose) {
    /* Expected: nothing to report. */
  } else if (WIFSIGNALED(status))
    say("%s %d was killed by %s%s", kind(r), r->number, signal_name(WTERMSIG(status)),
        WCOREDUMP(status) ? " (core dumped)" : "");
  else
    say("%s %d exited with status %d", kind(r), r->number, code);
  int again = !interrupted && !hangs_up && !late;
  const char *lost = again && options.on_failure == ON_FAILURE_RESTART
                         ? model_lost(r, !WIFSIGNALED(status) && r->restarts > 0)
                         : NULL;
  if (lost && exit_status == 0 && begin_again(lost, code)) {
    end_all();
    return;
  }
  if (!lost && !serves && restart && again) {
    if (r->restarts < RESTARTS_MAX) {
      r->restarts++;
      say("starting %s %d again (%d of at most %d times)", kind(r), r->number, r->restarts,
          RESTARTS_MAX);
      int failure = start(r);
      if (failure == 0) {
        r->done = 0;
        return;
      }
      code = failure;
    } else {
      say("%s %d was started again %d times already", kind(r), r->number, RESTARTS_MAX);
    }
  }
  if (done || (late && r->restarts > 0)) return;
  if (exit_status == 0) exit_status = code;
  if (interrupted || (!serves && options.on_failure == ON_FAILURE_CONTINUE)) return;
  if (phase == PHASE_RUN) say("ending the others");
  end_all();
}

static void reap(void) {
  for (int i = 0; i < rank_count; i++) {
    rank *r = &ranks[i];
    siginfo_t info;
    memset(&info, 0, sizeof info);
    if (r->pid <= 0 || waitid(P_PID, (id_t)r->pid, &info, WEXITED | WNOHANG | WNOWAIT) < 0 ||
        info.si_pid == 0)
      continue;
    /* While the process is a zombie its number cannot be reused, so its group can be killed safely. A rank
     * that ended successfully may have left something running on purpose. */
    if (info.si_code != CLD_EXITED || info.si_status != 0) kill(-r->pid, SIGKILL);
    int status = 0;
    waitpid(r->pid, &status, 0);
    ended(r, status);
  }
}

static void on_signal(int number) {
  int saved = errno;
  unsigned char byte = (unsigned char)number;
  if (write(signal_pipe[1], &byte, 1) < 0) { /* full: the loop wakes up anyway */
  }
  errno = saved;
}

/* SIGINT or SIGTERM. Servers get none: they end after the workers, and until then a worker that handles the signal can
 * still push, pull and save. */
static void interrupt(int number) {
  uint64_t now = now_ns();
  if (!interrupted) {
    interrupted = number;
    interrupted_ns = now;
    if (phase >= PHASE_TERM) return; /* all are ending already */
    if (is_running(0)) {
      if (options.verbose) say("passing %s on to the workers", signal_name(number));
      signal_all(number, 0);
    } else if (options.join) {
      signal_all(SIGTERM, 1); /* leaving takes as long as it takes */
    } else if (serves_others()) {
      if (exit_status == 0) exit_status = 128 + number;
      end_all();
    }
    return;
  }
  if (now - interrupted_ns < REPEAT_NS) return;
  if (phase < PHASE_KILL) say("a second signal: killing what is left");
  phase = PHASE_KILL;
  phase_until = now + GRACE_NS;
  signal_all(SIGKILL, 1);
  if (exit_status == 0) exit_status = 128 + number;
}

/* Forwards a signal to the workers. */
static void pass_on(int number) {
  if (number == SIGINT || number == SIGTERM) {
    interrupt(number);
    return;
  }
  if (options.verbose && number != SIGCONT)
    say("passing %s on to the workers", signal_name(number));
  if (number == SIGHUP) hung_up = 1;
  if (number == SIGCONT) stop_until = 0;
  if (number == SIGTSTP && stop_until == 0) stop_until = now_ns() + STOP_NS;
  signal_all(number, number == SIGCONT);
}

static int all_workers_stand(void) {
  for (int i = 0; i < rank_count; i++) {
    siginfo_t info;
    memset(&info, 0, sizeof info);
    if (ranks[i].is_server || ranks[i].pid <= 0) continue;
    if (waitid(P_PID, (id_t)ranks[i].pid, &info, WSTOPPED | WNOHANG | WNOWAIT) < 0 ||
        info.si_pid == 0)
      return 0;
  }
  return 1;
}

/* After SIGTSTP: stops what still runs, the servers and this program. It goes on at SIGCONT, and its deadlines do, too.
 * SIGSTOP also stops a process whose group has no shell, which ignores SIGTSTP. */
static void stop_job(void) {
  uint64_t began = now_ns();
  if (stop_until == 0 || (began < stop_until && !all_workers_stand())) return;
  stop_until = 0;
  signal_all(SIGSTOP, 0);
  signal_all(SIGSTOP, 1);
  raise(SIGSTOP);
  uint64_t stood = now_ns() - began;
  if (phase_until < UINT64_MAX - stood) phase_until += stood;
  if (run_until < UINT64_MAX - stood) run_until += stood;
  if (over_ns) over_ns += stood;
}

static void read_signals(void) {
  unsigned char bytes[64];
  ssize_t n = read(signal_pipe[0], bytes, sizeof bytes);
  for (ssize_t i = 0; i < n; i++)
    if (bytes[i] != SIGCHLD) pass_on(bytes[i]);
}

/* ---- the loop ---- */

/* Until when the servers may go on without a worker of this run: workers that joined may still need them. */
static uint64_t servers_until(uint64_t now) {
  if (options.join && exit_status == 0) return UINT64_MAX; /* they serve workers of other runs */
  if (interrupted && exit_status != 0) return now;         /* there is no model to wait for */
  if (serves_others() && exit_status == 0 && !interrupted && (!reports_joined() || have_joined()))
    return UINT64_MAX;
  return now + SERVERS_GRACE_NS;
}

/* The workers have ended successfully without joining: says so, once, because that is seldom wanted. */
static void tell_unjoined(void) {
  static int told;
#ifdef __linux__
  const int known = 1;
#else
  const int known = reports_joined();
#endif
  if (!known || told || options.workers == 0 || exit_status != 0 || interrupted || have_opened() ||
      have_joined())
    return;
  told = 1;
  say("no rank joined: %d worker%s of %s ended with status 0%s. Does the program call mlfab_open, "
      "and "
      "was it built with mlfab?",
      options.workers, options.workers > 1 ? "s" : "", options.command[0],
      is_running(1) ? ", and the server still waits for them" : "");
}

/* Do only servers run that were started again? When the others have ended, they find nobody to join. */
static int left_over(void) {
  for (int i = 0; i < rank_count; i++)
    if (ranks[i].pid > 0 && (!ranks[i].is_server || ranks[i].restarts == 0)) return 0;
  return 1;
}

/* Servers are first in `ranks`, so that workers find them soon. */
static void start_all(void) {
  phase = PHASE_RUN;
  joined = 0;
  over_ns = 0;
  for (int i = 0; i < rank_count; i++) {
    ranks[i].done = ranks[i].serves = ranks[i].restarts = 0;
    ranks[i].lacks = ranks[i].is_replica;
  }
  for (int i = 0; i < rank_count && phase == PHASE_RUN; i++) {
    int failure = start(&ranks[i]);
    if (failure) {
      exit_status = failure;
      end_all();
    }
  }
}

/* Nothing runs. Returns 0 when all is over. */
static int go_on(void) {
  if (!begins_again) return 0;
  begins_again = 0;
  if (interrupted && exit_status == 0) exit_status = lost_status;
  if (exit_status != 0) return 0;
  read_news();
  start_all();
  return 1;
}

/* Advances to the next phase. Returns 0 when all is over. */
static int advance(uint64_t now) {
  if (!is_running(0) && !is_running(1)) return go_on();
  if (phase == PHASE_RUN && now >= run_until) {
    say("not finished after %g s: ending it", (double)options.timeout_ns * 1e-9);
    if (exit_status == 0) exit_status = EXIT_TIMEOUT;
    end_all();
  }
  if (phase == PHASE_RUN && !is_running(0)) {
    phase = PHASE_SERVERS;
    phase_until = servers_until(now);
  }
  if (phase == PHASE_SERVERS && over_ns && over_ns + LEFT_OVER_NS < phase_until && left_over())
    phase_until = over_ns + LEFT_OVER_NS;
  if (phase == PHASE_SERVERS && now >= phase_until) {
    tell_unjoined();
    if (options.verbose) say("the servers have not ended by themselves: ending them");
    end_all();
  }
  if (phase == PHASE_TERM && !is_running(0)) end_servers();
  if ((phase == PHASE_TERM || phase == PHASE_END_SERVERS) && now >= phase_until) {
    phase = PHASE_KILL;
    phase_until = now + GRACE_NS;
  }
  /* Repeatedly, because a rank may have been started just before. */
  if (phase == PHASE_KILL) signal_all(SIGKILL, 1);
  return 1;
}

/* Waits for output, signals, or the time `until`, and handles them. */
static void wait_and_forward(struct pollfd *fds, uint64_t until) {
  nfds_t n = 0;
  fds[n++] = (struct pollfd){signal_pipe[0], POLLIN, 0};
  /* A terminal can be read in the foreground only. */
  int typed = input.to >= 0 && input.at == input.fill && tcgetpgrp(STDIN_FILENO) == getpgrp();
  fds[n++] = (struct pollfd){typed ? STDIN_FILENO : -1, POLLIN, 0};
  fds[n++] = (struct pollfd){input.at < input.fill ? input.to : -1, POLLOUT, 0};
  for (int i = 0; i < rank_count; i++) {
    /* poll ignores negative descriptors. */
    fds[n++] = (struct pollfd){ranks[i].out.fd, POLLIN, 0};
    fds[n++] = (struct pollfd){ranks[i].err.fd, POLLIN, 0};
    uint64_t out = shown_at(&ranks[i].out), err = shown_at(&ranks[i].err);
    if (until > out) until = out;
    if (until > err) until = err;
  }
  if (stop_until && until > stop_until) until = stop_until;
  uint64_t now = now_ns(), left = until > now ? (until - now + 999999) / 1000000 : 0;
  int ready = poll(fds, n, left > 1000 ? 1000 : (int)left);
  if (ready > 0 && fds[0].revents) read_signals();
  if (ready > 0 && (fds[1].revents || fds[2].revents)) pass_input(&fds[1], &fds[2]);
  now = now_ns();
  for (int i = 0; i < rank_count; i++) {
    rank *r = &ranks[i];
    if (ready > 0 && fds[3 + 2 * i].revents) forward(r, &r->out);
    if (ready > 0 && fds[4 + 2 * i].revents) forward(r, &r->err);
    show_unfinished(r, &r->out, now);
    show_unfinished(r, &r->err, now);
  }
}

static int open_outputs(void) {
  for (int i = 0; i < rank_count; i++)
    if (ranks[i].out.fd >= 0 || ranks[i].err.fd >= 0) return 1;
  return 0;
}

static int run(void) {
  struct pollfd *fds = calloc((size_t)rank_count * 2 + 3, sizeof *fds);
  if (!fds) return 1;
  if (options.timeout_ns > 0) run_until = now_ns() + options.timeout_ns;
  start_all();
  for (;;) {
    read_news();
    (void)tell_left_open();
    reap();
    stop_job();
    if (!advance(now_ns())) break;
    uint64_t until = phase == PHASE_RUN ? run_until : phase_until;
    wait_and_forward(fds, until);
  }
  /* A process that a rank started may hold its output or its fabric open for ever: waits for a limited time. */
  uint64_t drained = now_ns() + DRAIN_NS;
  while ((tell_left_open() || open_outputs()) && now_ns() < drained) wait_and_forward(fds, drained);
  for (int i = 0; i < rank_count; i++) {
    finish_stream(&ranks[i], &ranks[i].out);
    finish_stream(&ranks[i], &ranks[i].err);
  }
  (void)tell_left_open();
  tell_unjoined();
  free(fds);
  return exit_status;
}

/* ---- arguments ---- */

static const char usage_text[] =
    "usage: mlfab-run -n WORKERS [options] PROGRAM [arguments...]\n"
    "       mlfab-run --join ADDRESS [-n WORKERS] [options] PROGRAM [arguments...]\n"
    "       mlfab-run --join ADDRESS --servers N [options]";

static const char about_text[] =
    "Starts a fabric on this host: WORKERS processes of PROGRAM, and parameter servers. With "
    "--join it "
    "starts workers (1) or servers that join the fabric whose server 0 is at ADDRESS. They leave "
    "it "
    "with its workers, or at SIGTERM.";

static const char more_text[] =
    "Times take a unit (ns, us, ms, s, min, h).\n"
    "\n"
    "Input and output: worker 0 has the standard input, the others have none. If the output is a "
    "terminal, the workers' output is one too, and lines are shown as they are printed. Text "
    "without a "
    "newline is shown after 0.1 s. When all workers end with 0 and none has joined, a line on "
    "stderr "
    "says so.\n"
    "\n"
    "Signals: SIGINT and SIGTERM go to the workers, which may save and end. A second one, at least "
    "0.2 s "
    "later, kills all. SIGHUP, SIGUSR1, SIGUSR2 and SIGCONT go to the workers, and the run goes "
    "on. "
    "SIGTSTP (Ctrl-Z) stops the workers, after at most a second those that handle it. Then it "
    "stops the "
    "helpers (servers, replicas, the scheduler) and mlfab-run. SIGCONT (fg) continues all. SIGTERM "
    "may be "
    "sent to all processes of a job: the built-in helpers ignore these signals, and mlfab-run "
    "sends it to "
    "the workers once more. A program of --server has all signals as usual: to serve workers that "
    "save, "
    "it ignores SIGTERM while they run. A server that has joined (--join) leaves at SIGTERM. "
    "SIGHUP, "
    "SIGUSR1, SIGUSR2 and SIGTSTP that are ignored when mlfab-run begins (nohup) stay so, for the "
    "ranks "
    "too.\n"
    "\n"
    "Order of ends: the workers end first. Helpers end by themselves when the workers have left, "
    "and have "
    "5 s for it; then mlfab-run ends them. When a rank fails or the time is over, the workers get "
    "SIGTERM, "
    "and SIGKILL 2 s later. When no worker runs, the helpers get SIGKILL; a program of --server "
    "gets "
    "SIGTERM, and 2 s later SIGKILL. If mlfab-run is killed, Linux kills all others.\n"
    "\n"
    "Exit status: 0 when all workers exited with 0, else that of the first rank that failed (128 + "
    "n for "
    "signal n; 1 for a worker that exited with 0 without mlfab_close). 124 after --timeout, 127 "
    "when "
    "PROGRAM cannot be started, 2 for wrong usage. A helper that fails after all workers exited "
    "with 0 is "
    "told on stderr and does not change the status. With --max-workers it does, because workers of "
    "other "
    "runs may need it.";

/* Ends with a line if `path` exists and is, or is not, a directory. */
static void check_path(const char *name, const char *path, int wants_directory) {
  struct stat is;
  if (*path && !stat(path, &is) && (S_ISDIR(is.st_mode) != 0) != wants_directory)
    options_refuse("%s='%s': it is %s directory", name, path, wants_directory ? "not a" : "a");
}

static void set_transport(const char *name, const char *value) {
  const char *transport = strcmp(name, "--tcp") ? "shm" : "tcp";
  (void)value;
  if (options.transport && strcmp(options.transport, transport) != 0)
    options_refuse("--tcp and --shm exclude each other");
  options.transport = transport;
}

static void set_scheduler(const char *name, const char *value) {
  (void)name;
  options.scheduled = value;
  options.scheduler = strcmp(value, "own") == 0;
}

static void set_resume(const char *name, const char *value) {
  if (strlen(value) > 255) options_refuse("%s='%s': the directory is too long", name, value);
  check_path(name, value, 1);
}

static void set_server(const char *name, const char *value) { check_path(name, value, 0); }

/* Checks a setting here, so that an error is reported once and not by every rank. from: where it is from. */
static void check_setting(const char *from, const char *name, const char *value) {
  static const char *const paths[] = {"checkpoint_dir", "resume", "vote_dir", "key_file",
                                      "metrics",        "trace",  "log"};
  mlfab_config config;
  mlfab_model_options model;
  mlfab_filter filter = {.size = sizeof filter};
  mlfab_error error;
  char shown[128];
  mlfab_config_init(&config);
  mlfab_model_options_init(&model);
  config.dedicated = 1; /* for a role */
  int code = strncmp(name, "filter_", 7) == 0 ? mlfab_filter_set(&filter, name, value, &error)
                                              : mlfab_config_set(&config, name, value, &error);
  if (code && strstr(error.text, "no such setting"))
    code = mlfab_model_options_set(&model, name, value, &error);
  if (code)
    options_refuse("%s %s%s", from, error.text,
                   strstr(error.text, "such setting") && !strstr(error.text, "nearest")
                       ? "; mlfab-run --settings lists all"
                       : "");
  for (size_t i = 0; i < sizeof paths / sizeof paths[0]; i++) {
    const char *file = i == 6 ? strchr(value, ':') : value; /* LEVEL:FILE */
    snprintf(shown, sizeof shown, "%s %s", from, name);
    if (!strcmp(name, paths[i]) && file) check_path(shown, file + (i == 6), i < 3);
  }
}

static void parse_setting(const char *option, const char *setting) {
  const char *value = strchr(setting, '=');
  char name[64];
  if (!value || value == setting || value - setting > 63)
    options_refuse("%s takes NAME=VALUE, not '%s'", option, setting);
  if (!strncmp(setting, "key=", 4))
    options_refuse("--set key: every user of the host can read command lines; use MLFAB_KEY_FILE");
  if (options.nsettings == (int)(sizeof options.settings / sizeof options.settings[0]))
    options_refuse("there are too many of --set");
  snprintf(name, sizeof name, "%.*s", (int)(value - setting), setting);
  check_setting(option, name, value + 1);
  options.settings[options.nsettings++] = setting;
}

/* Settings of the environment that mlfab-run does not replace. */
static void check_environment(void) {
  const char *name;
  for (uint32_t i = 0; (name = mlfab_setting_name(i)) != NULL; i++) {
    const char *value = getenv(variable_of(name));
    int own = !strcmp(name, "rank") || !strcmp(name, "role") || !strcmp(name, "workers") ||
              !strcmp(name, "servers");
    if (value && *value && !own) check_setting(variable_of(name), name, value);
  }
}

static void list_settings(const char *option, const char *unused) {
  char text[256];
  const char *name;
  (void)option;
  (void)unused;
  printf("%-19s %-9s %s\n", "SETTING", "DEFAULT", "MEANING; VALUES");
  for (uint32_t i = 0; (name = mlfab_setting_name(i)) != NULL; i++) {
    if (mlfab_setting_text(i, text, sizeof text)) continue;
    char *value = strchr(text, '\t'), *meaning = strchr(value + 1, '\t');
    *value++ = *meaning++ = 0;
    printf("%-19s %-9s %s; %s\n", name, value, meaning, text);
  }
  puts(
      "\nSet timeout_ms by --set timeout_ms=2s, or by the variable MLFAB_TIMEOUT_MS, and all "
      "others alike. - stands for no value.");
  exit(0);
}

/* Options of other launchers. -np would else be -n with the value p. */
static void hint(const char *word) {
  static const char count[] = "the number of worker processes is -n N";
  static const char hosts[] =
      "mlfab-run starts processes on this host only; docs/clusters.md is about several";
  static const char variables[] =
      "the workers have the whole environment of mlfab-run: set the variable before it, as "
      "NAME=VALUE mlfab-run ...";
  static const char *const hints[][2] = {{"-np", count},
                                         {"--np", count},
                                         {"-ppn", count},
                                         {"--nproc-per-node", count},
                                         {"--nproc_per_node", count},
                                         {"--nnodes", hosts},
                                         {"-H", hosts},
                                         {"-host", hosts},
                                         {"--host", hosts},
                                         {"-x", variables},
                                         {"-genv", variables}};
  for (size_t i = 0; i < sizeof hints / sizeof hints[0]; i++)
    if (!strncmp(word, hints[i][0], strlen(hints[i][0])))
      options_refuse("%s is no option of mlfab-run: %s", word, hints[i][1]);
}

static int no_prefix, scheduler_index;

#define INT(names, value, to, least, help) \
  { names, value, OPTION_INT, to, least, RANKS_MAX, 1, NULL, help }
#define FLAG(names, to, help) \
  { names, NULL, OPTION_FLAG, to, 0, 0, 0, NULL, help }
#define CALL(names, value, call, help) \
  { names, value, OPTION_CALL, NULL, 0, 0, 0, call, help }
static const option_row rows[] = {
    INT("-n", "N", &options.workers, 1, "worker processes"),
    INT("--max-workers", "N", &options.workers_max, 1,
        "more workers may join, up to N at a time. The fabric is at MLFAB_COORDINATOR, with "
        "MLFAB_JOB and "
        "MLFAB_KEY of this environment. Missing values are made for the run; processes that its "
        "workers start "
        "have them"),
    {"--join", "ADDRESS", OPTION_TEXT, &options.join, 0, 0, 0, NULL,
     "joins the fabric at ADDRESS, with MLFAB_JOB and MLFAB_KEY (or MLFAB_KEY_FILE)"},
    INT("-s, --servers", "N", &options.servers, 0, "server processes (1); 0: worker 0 serves too"),
    INT("--max-servers", "N", &options.servers_max, 1,
        "more servers may join, up to N at a time; otherwise as --max-workers"),
    {"--server", "PROGRAM", OPTION_TEXT, &options.server_program, 0, 0, 0, set_server,
     "runs this as the server, instead of the built-in one"},
    {"--scheduler", "beside|own", OPTION_WORD, &scheduler_index, 0, 0, 0, set_scheduler,
     "plans large pushes and pulls. beside: server 0 does it beside its own work. own: a process "
     "does it, which is "
     "started again when it dies"},
    {"--delay-bound", "N", OPTION_COUNT, &options.delay_bound, 1, 1e15, 1, NULL,
     "drops updates that would come N or more versions late"},
    FLAG("--replicas", &options.replicas,
         "each server has a replica, which goes on when the server is lost; with --scheduler=own. "
         "--set "
         "div_max=D: how far it may be behind; --set ack=durable: a push is done when the replica "
         "has it"),
    {"--resume", "DIR", OPTION_TEXT, &options.resume, 0, 0, 0, set_resume,
     "goes on from the newest whole checkpoint in DIR (--set checkpoint_dir=DIR and "
     "checkpoint_commits=N write them)"},
    CALL("--tcp", NULL, set_transport, "bytes travel over TCP (else the library chooses)"),
    CALL("--shm", NULL, set_transport, "bytes travel through shared memory"),
    CALL("--set", "NAME=VALUE", parse_setting,
         "a setting for programs that leave it to the environment, as optimizer=adam, "
         "consistency=ssp, staleness=3, timeout_ms=2s"),
    CALL("--settings", NULL, list_settings, "lists all settings with their defaults"),
    {"--on-failure", "end|continue|restart", OPTION_WORD, &options.on_failure, 0, 0, 0, NULL,
     "what happens to the others if a rank fails. end (the default): the run ends. continue: the "
     "others go on without it. "
     "restart: it is started again with its rank, at most 10 times; if no copy of the model is "
     "left, all ranks are, and go on "
     "from the newest checkpoint of this run, or the run ends without one"},
    FLAG("--insecure", &options.insecure,
         "no key: any user of this host may take part over TCP, which is then faster"),
    FLAG("--no-prefix", &no_prefix,
         "the ranks write to the output themselves, without [worker 2] in front"),
    {"--timeout", "TIME", OPTION_TIME, &options.timeout_ns, 1, 1e18, 1e9, NULL,
     "ends the run after this time; a bare number counts seconds"},
    FLAG("--verbose", &options.verbose, "tells of each process that starts or ends"),
    {NULL, NULL, OPTION_FLAG, NULL, 0, 0, 0, NULL, NULL}};
#undef INT
#undef FLAG
#undef CALL

static void parse(int argc, char **argv) {
  static const options_tool tool = {"mlfab-run", usage_text, about_text, more_text, rows, 1, hint};
  options.servers = -1; /* not said */
  int first = options_read(&tool, argc, argv);
  options.prefix = !no_prefix;
  check_environment();
  if (first < argc && strchr(argv[first], '/')) check_path("PROGRAM", argv[first], 0);
  if (options.join) {
    if (options.server_program || options.scheduled || options.delay_bound || options.workers_max ||
        options.servers_max || options.resume || options.replicas)
      options_refuse(
          "--join starts workers or servers only: not with --server, --scheduler, --delay-bound, "
          "--max-workers, --max-servers, --replicas, --resume");
    if (options.insecure)
      options_refuse(
          "--join without a key takes MLFAB_ALLOW_INSECURE=1 of the environment, not --insecure");
    if (options.servers > 0 && (options.workers > 0 || first < argc))
      options_refuse("--join takes --servers, or workers and their program");
    if (options.servers <= 0) options.servers = 0;
    if (options.servers == 0 && options.workers == 0) options.workers = 1;
    if (options.servers > 0) {
      options.dedicated = 1;
      return;
    }
  }
  if (options.servers < 0) options.servers = 1;
  if (options.workers == 0) options_refuse("-n, the number of workers, is missing");
  if (options.workers_max && options.workers_max < options.workers)
    options_refuse("--max-workers is below -n, the number of workers to begin with");
  if (options.servers_max && options.servers_max < options.servers)
    options_refuse("--max-servers is below -s, the number of servers to begin with");
  if (options.servers_max && options.servers == 0)
    options_refuse("--max-servers does not go with -s 0: only servers of their own can join");
  if (first >= argc) options_refuse("the program to run is missing");
  options.command = argv + first;
  options.dedicated = options.servers > 0;
  if (options.replicas && options.scheduled && !options.scheduler)
    options_refuse("--replicas needs --scheduler=own: the scheduler has the third vote");
  if (options.replicas) {
    options.scheduled = "own";
    options.scheduler = 1;
  }
  if (options.delay_bound && !options.scheduled && !getenv("MLFAB_SCHEDULER"))
    options_refuse("--delay-bound needs --scheduler");
  if (!options.dedicated && options.server_program)
    options_refuse("--server does not go with -s 0");
  if (!options.dedicated && options.replicas) options_refuse("--replicas does not go with -s 0");
  if (options.replicas && options.servers_max > options.servers)
    options_refuse(
        "--replicas does not go with --max-servers: servers with replicas do not come and go");
}

/* A TCP port that was free, or 0. This process keeps the port bound and does not listen. So a rank with SO_REUSEADDR
 * can listen there, also when it is started again. The system gives the port to nobody else. */
static int free_port(void) {
  struct sockaddr_in address;
  const int one = 1;
  socklen_t length = sizeof address;
  memset(&address, 0, sizeof address);
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM, 0), port = 0;
  if (fd >= 0 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 &&
      setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
      bind(fd, (struct sockaddr *)&address, sizeof address) == 0 &&
      getsockname(fd, (struct sockaddr *)&address, &length) == 0)
    port = ntohs(address.sin_port);
  if (fd >= 0 && port == 0) close(fd);
  return port;
}

/* May processes of other runs join? */
static int grows(void) { return options.workers_max || options.servers_max; }

/* 256 random bits. They alone keep strangers out of TCP, so a run needs them. */
static int make_key(void) {
  unsigned char bytes[32];
  size_t got = 0;
  const char *given = getenv("MLFAB_KEY");
  if (grows() && given && *given) return 0; /* joiners have it */
  if (!MLFAB_WITH_KEYS) return 0; /* then only Unix sockets and shared memory of this user */
#ifdef __linux__
  ssize_t n = getrandom(bytes, sizeof bytes, 0);
  got = n > 0 ? (size_t)n : 0;
#endif
  if (got < sizeof bytes) {
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
    ssize_t more = fd >= 0 ? read(fd, bytes, sizeof bytes) : -1;
    got = more > 0 ? (size_t)more : 0;
    if (fd >= 0) close(fd);
  }
  if (got < sizeof bytes) {
    say("no random bytes for the key of the run: %s", strerror(errno));
    return -1;
  }
  for (size_t i = 0; i < sizeof bytes; i++) snprintf(options.key + 2 * i, 3, "%02x", bytes[i]);
  return 0;
}

/* Chooses where the ranks meet: a name unique to this run, so that concurrent runs do not mix. */
static int choose_meeting_point(void) {
  uint32_t random = (uint32_t)now_ns();
  const char *address = getenv("MLFAB_COORDINATOR"), *job = getenv("MLFAB_JOB");
  int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC);
  if (fd >= 0) {
    if (read(fd, &random, sizeof random) < 0) random ^= (uint32_t)getpid();
    close(fd);
  }
  snprintf(options.job, sizeof options.job, "run-%ld-%08x", (long)getpid(), (unsigned)random);
  if (grows() && ((address && strlen(address) >= sizeof options.coordinator) ||
                  (job && strlen(job) >= sizeof options.job))) {
    say("MLFAB_COORDINATOR or MLFAB_JOB is too long");
    return -1;
  }
  if (grows() && job && *job) snprintf(options.job, sizeof options.job, "%s", job);
  if (grows() && address && *address && options.replicas && !strchr(address, ',')) {
    say("with --replicas MLFAB_COORDINATOR needs the replica's address, too: ADDRESS,ADDRESS");
    return -1;
  }
  if (grows() && address && *address) {
    snprintf(options.coordinator, sizeof options.coordinator, "%s", address);
    return 0;
  }
  int tcp = options.transport && strcmp(options.transport, "tcp") == 0;
#ifndef __linux__
  tcp = 1; /* abstract socket names exist on Linux only */
#endif
  for (int i = 0; i <= options.replicas; i++) {
    size_t at = strlen(options.coordinator);
    char *to = options.coordinator + at;
    size_t room = sizeof options.coordinator - at;
    int port = tcp ? free_port() : 0;
    if (tcp && port == 0) {
      say("no free TCP port on the loopback: %s", strerror(errno));
      return -1;
    }
    if (tcp)
      snprintf(to, room, "%stcp:127.0.0.1:%d", i ? "," : "", port);
    else
      snprintf(to, room, "%s%smlfab-%ld-%08x%s", i ? "," : "",
               options.transport ? "shm:" : "unix:@", (long)getpid(), (unsigned)random,
               i ? "-r" : "");
  }
  return 0;
}

static int catch_signals(void) {
  if (pipe(signal_pipe) < 0) return -1;
  for (int i = 0; i < 2; i++) {
    fcntl(signal_pipe[i], F_SETFD, FD_CLOEXEC);
    fcntl(signal_pipe[i], F_SETFL, O_NONBLOCK);
  }
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  /* As with nohup: a signal that was ignored stays so, but for SIGINT and SIGTERM, which a shell's `&` ignores. */
  for (int i = 0; i < (int)(sizeof changed / sizeof changed[0]); i++) {
    struct sigaction before;
    was_ignored[i] = sigaction(changed[i], NULL, &before) == 0 && before.sa_handler == SIG_IGN;
    int stays = was_ignored[i] && i >= 2 && i < JOB_SIGNALS;
    if (i < CAUGHT_SIGNALS && !stays && sigaction(changed[i], &action, NULL) < 0) return -1;
  }
  signal(SIGPIPE, SIG_IGN); /* a closed reader must not end the run */
  signal(SIGTTIN, SIG_IGN); /* nor must a terminal in another process's foreground stop it */
  if (pipe(opened_pipe) < 0 || pipe(news_pipe) < 0) return -1;
  for (int i = 0; i < 2; i++) {
    fcntl(opened_pipe[i], F_SETFD, FD_CLOEXEC);
    fcntl(news_pipe[i], F_SETFD, FD_CLOEXEC);
  }
  fcntl(opened_pipe[0], F_SETFL, O_NONBLOCK);
  fcntl(news_pipe[0], F_SETFL, O_NONBLOCK);
  return 0;
}

int main(int argc, char **argv) {
  if ((argc == 3 || argc == 5) && strcmp(argv[1], SERVER_ARGUMENT) == 0)
    return server_main(argv[2], argc == 5 ? atoi(argv[3]) : -1, argc == 5 ? atoi(argv[4]) : 0);
  parse(argc, argv);
  if (!options.join && (make_key() < 0 || choose_meeting_point() < 0)) return 1;
  int copies = options.servers * (1 + options.replicas), services = copies + options.scheduler;
  rank_count = services + options.workers;
  ranks = calloc((size_t)rank_count, sizeof *ranks);
  if (!ranks || catch_signals() < 0) {
    say("cannot start: %s", strerror(errno));
    return 1;
  }
  for (int i = 0; i < rank_count; i++) {
    ranks[i].is_server = i < services;
    ranks[i].is_scheduler = i == copies && options.scheduler;
    ranks[i].is_replica = i >= options.servers && i < copies;
    ranks[i].number = ranks[i].is_scheduler ? 0
                      : ranks[i].is_server  ? i % options.servers
                                            : i - services;
    ranks[i].out.fd = ranks[i].err.fd = -1;
  }
  int status = run();
  free(ranks);
  return status;
}
