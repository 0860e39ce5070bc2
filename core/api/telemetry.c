/* telemetry.c - a context writes its log, metrics and trace. See telemetry.h. */
#include "telemetry.h"

#include "../base/system.h"
#include "../telemetry/chrome.h"
#include "../telemetry/metrics.h"
#include "../telemetry/trace.h"
#include "disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
  TELEMETRY_LINES = 256,
  TELEMETRY_LINE_BYTES = 512,
  TELEMETRY_BATCH = 512,                                /* records that are copied under the lock */
  TELEMETRY_TEXT = TELEMETRY_BATCH * MLFAB__CHROME_MAX, /* bytes; also holds the metrics */
  TELEMETRY_TRACE_NS = 50000000,                        /* between two looks at the trace */
  TELEMETRY_TRACE_MOST = 256 << 20                      /* bytes of a trace */
};

enum telemetry_phase {
  TELEMETRY_WAITS, /* there is no thread yet, or it writes log lines only */
  TELEMETRY_RUNS,
  TELEMETRY_LAST, /* writes the last metrics and the end of the trace, then WAITS */
  TELEMETRY_QUITS /* writes the last log lines, then ends */
};

typedef struct telemetry_line {
  uint64_t unix_ns;
  int level;
  char text[TELEMETRY_LINE_BYTES];
} telemetry_line;

struct mlfab__telemetry {
  mlfab *ctx;
  mlfab_env given; /* the caller's hooks, which the context's hooks wrap */
  int has_log;     /* the caller has a log hook */
  pid_t pid;
  char node[32], host[64];
  uint64_t opened_unix_ns;
  pthread_t thread;
  int runs;
  pthread_mutex_t lock; /* of `phase` and the lines */
  pthread_cond_t changed;
  enum telemetry_phase phase;
  /* Log. */
  int log_level;                        /* 0: none */
  char log_path[MLFAB__TELEMETRY_PATH]; /* "": stderr */
  int log_file;                         /* or -1 */
  telemetry_line *lines;                /* TELEMETRY_LINES */
  uint32_t begin, count;
  uint64_t lost;
  /* Metrics and trace. */
  char metrics_path[MLFAB__TELEMETRY_PATH], trace_path[MLFAB__TELEMETRY_PATH];
  uint64_t metrics_ns, metrics_due_ns;
  int metrics_failed; /* the last write failed */
  mlfab__trace *trace;
  mlfab__trace_record *records; /* TELEMETRY_BATCH */
  mlfab__chrome chrome;
  int trace_file; /* or -1 */
  uint64_t trace_bytes;
  char *text; /* TELEMETRY_TEXT */
};

static uint64_t telemetry_clock(clockid_t which) {
  struct timespec t;
  clock_gettime(which, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- names --- */

MLFAB__INTERNAL void mlfab__telemetry_path(const char *given, const char *node,
                                           char path[MLFAB__TELEMETRY_PATH]) {
  static const char mark[] = "{node}";
  size_t at = 0, n = strlen(mark), room = MLFAB__TELEMETRY_PATH;
  const char *from = given, *found;
  if (!strstr(given, mark)) {
    const char *slash = strrchr(given, '/'), *base = slash ? slash + 1 : given;
    const char *dot = strrchr(base, '.');
    if (!dot || dot == base) dot = given + strlen(given);
    snprintf(path, room, "%.*s.%s%s", (int)(dot - given), given, node, dot);
    return;
  }
  path[0] = 0;
  while ((found = strstr(from, mark)) != NULL && at < room) {
    int length = snprintf(path + at, room - at, "%.*s%s", (int)(found - from), from, node);
    at += length > 0 ? (size_t)length : 0;
    from = found + n;
  }
  if (at < room) snprintf(path + at, room - at, "%s", from);
}

MLFAB__INTERNAL int mlfab__telemetry_log(const char *text, const char **file_p) {
  static const char *const levels[] = {"", "error", "warn", "info", "debug"};
  size_t n = strcspn(text, ":");
  *file_p = text[n] ? text + n + 1 : NULL;
  if (*file_p && !**file_p) return 0;
  for (int level = MLFAB_LOG_ERROR; level <= MLFAB_LOG_DEBUG; level++) {
    if (strlen(levels[level]) == n && !strncmp(levels[level], text, n)) return level;
  }
  return 0;
}

static void telemetry_name(const mlfab_config *c, char name[32]) {
  const char *role = c->roles == MLFAB_ROLE_REPLICA                  ? "replica"
                     : c->roles == MLFAB_ROLE_SERVER && c->dedicated ? "server"
                                                                     : "worker";
  if (c->roles == MLFAB_ROLE_SCHEDULER)
    snprintf(name, 32, "scheduler");
  else
    snprintf(name, 32, "%s-%d", role, (int)c->rank);
}

/* --- files: 0, or an errno ---
 *
 * Others may write in the directory. Their links have no effect: a new file replaces an older file, and the log is
 * appended only to a regular file with one name. */

/* Our own errors, beside the system's. */
enum { TELEMETRY_IS_LINK = -1, TELEMETRY_IS_OTHER = -2, TELEMETRY_HAS_NAMES = -3 };

static const char *telemetry_reason(int why) {
  switch (why) {
    case TELEMETRY_IS_LINK:
      return "it is a symbolic link, which is not followed: name the file itself";
    case TELEMETRY_IS_OTHER:
      return "it is not a regular file";
    case TELEMETRY_HAS_NAMES:
      return "the file has a second name (a hard link)";
    default:
      return mlfab__reason(why);
  }
}

/* May a file with this name be written, or replaced? */
static int telemetry_judge(const struct stat *info) {
  return S_ISLNK(info->st_mode)   ? TELEMETRY_IS_LINK
         : S_ISREG(info->st_mode) ? 0
                                  : TELEMETRY_IS_OTHER;
}

/* Opens a new file in the place of an older one. */
static int telemetry_create(const char *path, int *file_p) {
  struct stat info;
  int code = lstat(path, &info) ? 0 : telemetry_judge(&info);
  *file_p = code ? -1 : mlfab__disk_create(path);
  return *file_p >= 0 ? 0 : code ? code : -*file_p;
}

/* Opens a file, which may exist, to append to it. A FIFO would wait for a reader. */
static int telemetry_resume(const char *path, int *file_p) {
  struct stat info;
  int code = lstat(path, &info) ? 0 : telemetry_judge(&info);
  *file_p = -1;
  if (code) return code;
  int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
  if (file < 0) return errno;
  code = fstat(file, &info) ? errno : telemetry_judge(&info);
  if (!code && info.st_nlink > 1) code = TELEMETRY_HAS_NAMES;
  if (code)
    close(file);
  else
    *file_p = file;
  return code;
}

static int telemetry_write(int file, const char *text, size_t bytes) {
  while (bytes > 0) {
    ssize_t n = write(file, text, bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    text += n;
    bytes -= (size_t)n;
  }
  return 0;
}

/* Writes a whole file, or leaves the present file. */
static int telemetry_replace(const char *path, long pid, const char *text, size_t bytes) {
  char part[MLFAB__TELEMETRY_PATH + 32];
  snprintf(part, sizeof part, "%s.%ld.part", path, pid);
  int file = mlfab__disk_create(part);
  if (file < 0) return -file;
  int code = telemetry_write(file, text, bytes);
  if (close(file) && !code) code = errno;
  if (!code && rename(part, path)) code = errno;
  if (code) unlink(part);
  return code;
}

/* --- hooks: the caller's, and a log of our own --- */

static void *telemetry_hook_allocate(void *user, size_t bytes) {
  mlfab__telemetry *t = user;
  return t->given.allocate(t->given.user, bytes);
}

static void telemetry_hook_release(void *user, void *memory, size_t bytes) {
  mlfab__telemetry *t = user;
  t->given.release(t->given.user, memory, bytes);
}

static uint64_t telemetry_hook_clock(void *user) {
  mlfab__telemetry *t = user;
  return t->given.clock(t->given.user);
}

static int telemetry_hook_store(void *user, const char *path, const void *data, size_t bytes) {
  mlfab__telemetry *t = user;
  return t->given.store(t->given.user, path, data, bytes);
}

static void telemetry_hook_log(void *user, int level, const char *line) {
  mlfab__telemetry *t = user;
  if (t->has_log && level <= (int)t->given.log_level) t->given.log(t->given.user, level, line);
  /* In a forked child a thread of the parent may have held the lock at the fork. */
  if (level > t->log_level || t->pid != getpid()) return;
  pthread_mutex_lock(&t->lock);
  if (t->count < TELEMETRY_LINES) {
    telemetry_line *kept = &t->lines[(t->begin + t->count++) % TELEMETRY_LINES];
    kept->unix_ns = telemetry_clock(CLOCK_REALTIME);
    kept->level = level;
    snprintf(kept->text, sizeof kept->text, "%s", line);
  } else {
    t->lost++;
  }
  pthread_cond_broadcast(&t->changed);
  pthread_mutex_unlock(&t->lock);
}

static void telemetry_wrap(mlfab__telemetry *t) {
  mlfab_env *hooks = &t->ctx->hooks;
  t->given = *hooks;
  hooks->user = t;
  hooks->allocate = telemetry_hook_allocate;
  hooks->release = telemetry_hook_release;
  hooks->clock = telemetry_hook_clock;
  hooks->store = telemetry_hook_store;
  hooks->log = telemetry_hook_log;
  uint32_t asked = t->has_log ? t->given.log_level : 0;
  hooks->log_level = (uint32_t)mlfab__max(asked, (uint64_t)t->log_level);
  t->ctx->log_level = hooks->log_level;
}

/* --- the log --- */

static void telemetry_print(mlfab__telemetry *t, uint64_t unix_ns, int level, const char *text) {
  static const char *const words[] = {"", "ERROR", "WARN ", "INFO ", "DEBUG"};
  char line[TELEMETRY_LINE_BYTES + 96];
  struct tm day;
  time_t seconds = (time_t)(unix_ns / 1000000000u);
  gmtime_r(&seconds, &day);
  size_t n = strftime(line, sizeof line, "%Y-%m-%dT%H:%M:%S", &day);
  int length = snprintf(line + n, sizeof line - n, ".%06lluZ %s %s: %s\n",
                        (unsigned long long)(unix_ns / 1000 % 1000000),
                        words[level >= 1 && level <= 4 ? level : 4], t->node, text);
  n = mlfab__min(n + (size_t)(length > 0 ? length : 0), sizeof line - 1);
  int code = t->log_file >= 0 ? telemetry_write(t->log_file, line, n) : EBADF;
  if (code) (void)!write(STDERR_FILENO, line, n);
}

static void telemetry_open_log(mlfab__telemetry *t) {
  if (t->log_file >= 0 || !t->log_path[0]) return;
  int code = telemetry_resume(t->log_path, &t->log_file);
  if (!code) return;
  char text[MLFAB__TELEMETRY_PATH + 96];
  snprintf(text, sizeof text, "log: cannot write '%s': %s; its lines go to stderr", t->log_path,
           telemetry_reason(code));
  t->log_path[0] = 0;
  telemetry_print(t, telemetry_clock(CLOCK_REALTIME), MLFAB_LOG_WARN, text);
}

/* Writes the lines in the ring. With the lock, which it gives up while it writes. */
static void telemetry_write_log(mlfab__telemetry *t) {
  while (t->count > 0 || t->lost > 0) {
    telemetry_line line = {.unix_ns = telemetry_clock(CLOCK_REALTIME), .level = MLFAB_LOG_WARN};
    if (t->count > 0) {
      line = t->lines[t->begin];
      t->begin = (t->begin + 1) % TELEMETRY_LINES;
      t->count--;
    } else {
      snprintf(line.text, sizeof line.text, "log: %llu lines were dropped",
               (unsigned long long)t->lost);
      t->lost = 0;
    }
    pthread_mutex_unlock(&t->lock);
    telemetry_open_log(t);
    telemetry_print(t, line.unix_ns, line.level, line.text);
    pthread_mutex_lock(&t->lock);
  }
}

/* Reports that a file cannot be written: one line in the log; on stderr if no log takes warnings. */
static void telemetry_complain(mlfab__telemetry *t, const char *what, const char *path, int why,
                               const char *then) {
  mlfab *ctx = t->ctx;
  if (ctx->log_level >= MLFAB_LOG_WARN) {
    pthread_mutex_lock(&ctx->lock);
    mlfab__log(&ctx->node->env, MLFAB_LOG_WARN, "%s: cannot write '%s': %s; %s", what, path,
               telemetry_reason(why), then);
    pthread_mutex_unlock(&ctx->lock);
    return;
  }
  fprintf(stderr, "mlfab: %s: cannot write '%s': %s; %s\n", what, path, telemetry_reason(why),
          then);
}

/* --- metrics --- */

static void telemetry_write_metrics(mlfab__telemetry *t, int last) {
  mlfab *ctx = t->ctx;
  mlfab__snapshot snapshot;
  pthread_mutex_lock(&ctx->lock);
  mlfab__metrics_take(ctx->node, mlfab__context_now(ctx), &snapshot);
  pthread_mutex_unlock(&ctx->lock);
  if (last) snapshot.state = MLFAB__METRICS_CLOSED;
  snapshot.unix_ns = telemetry_clock(CLOCK_REALTIME);
  snapshot.opened_unix_ns = t->opened_unix_ns;
  snapshot.host = t->host;
  snapshot.pid = (long)t->pid;
  size_t bytes = mlfab__metrics_text(&snapshot, MLFAB_METRICS_OPENMETRICS, t->text, TELEMETRY_TEXT);
  if (bytes >= TELEMETRY_TEXT) return;
  int code = telemetry_replace(t->metrics_path, (long)t->pid, t->text, bytes);
  if (code && !t->metrics_failed)
    telemetry_complain(t, "metrics", t->metrics_path, code, "training goes on without them");
  t->metrics_failed = code != 0;
}

/* --- trace --- */

/* Ends the trace after an error, or when it is full. */
static void telemetry_end_trace(mlfab__telemetry *t) {
  pthread_mutex_lock(&t->ctx->lock);
  mlfab__trace_close(&t->trace, t->ctx->node);
  pthread_mutex_unlock(&t->ctx->lock);
  if (t->trace_file >= 0) close(t->trace_file);
  t->trace_file = -1;
}

/* Appends to the file, and begins it if it is new. */
static void telemetry_append(mlfab__telemetry *t, size_t bytes) {
  int code = 0;
  if (t->trace_file < 0) {
    char begin[MLFAB__CHROME_MAX];
    code = telemetry_create(t->trace_path, &t->trace_file);
    size_t n = mlfab__chrome_begin(&t->chrome, t->node, t->host, (long)t->pid, begin);
    if (!code) code = telemetry_write(t->trace_file, begin, n);
  }
  if (!code) code = telemetry_write(t->trace_file, t->text, bytes);
  t->trace_bytes += bytes;
  if (!code) return;
  telemetry_end_trace(t);
  telemetry_complain(t, "trace", t->trace_path, code, "training goes on without it");
}

static void telemetry_write_trace(mlfab__telemetry *t, int last) {
  uint32_t n = TELEMETRY_BATCH;
  while (t->trace && n == TELEMETRY_BATCH) {
    pthread_mutex_lock(&t->ctx->lock);
    n = mlfab__trace_take(t->trace, last ? MLFAB__NEVER : mlfab__context_now(t->ctx), t->records,
                          TELEMETRY_BATCH);
    pthread_mutex_unlock(&t->ctx->lock);
    size_t bytes = 0;
    for (uint32_t i = 0; i < n; i++)
      bytes += mlfab__chrome_event(&t->chrome, &t->records[i], t->text + bytes);
    if (bytes > 0 || t->trace_file < 0) telemetry_append(t, bytes);
    int full = t->trace_bytes > TELEMETRY_TRACE_MOST;
    if (!t->trace || (!full && !(last && n < TELEMETRY_BATCH))) continue;
    telemetry_append(t, mlfab__chrome_end(&t->chrome, full ? "full" : "closed", t->text));
    if (t->trace) telemetry_end_trace(t);
  }
}

/* --- the thread --- */

/* The time until which it may sleep. With the lock. */
static uint64_t telemetry_until(const mlfab__telemetry *t, uint64_t now) {
  uint64_t until = now + 10000000000u;
  if (t->phase != TELEMETRY_RUNS) return until;
  if (t->metrics_path[0]) until = mlfab__min(until, t->metrics_due_ns);
  if (t->trace) until = mlfab__min(until, now + TELEMETRY_TRACE_NS);
  return until;
}

static void telemetry_sleep(mlfab__telemetry *t) {
  uint64_t until = telemetry_until(t, telemetry_clock(CLOCK_MONOTONIC));
  struct timespec at = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
  pthread_cond_timedwait(&t->changed, &t->lock, &at);
}

static void telemetry_work(mlfab__telemetry *t, int last) {
  uint64_t now = telemetry_clock(CLOCK_MONOTONIC);
  if (t->trace) telemetry_write_trace(t, last);
  if (!t->metrics_path[0] || (now < t->metrics_due_ns && !last)) return;
  telemetry_write_metrics(t, last);
  t->metrics_due_ns = mlfab__add_sat(now, t->metrics_ns);
}

static void *telemetry_thread(void *argument) {
  mlfab__telemetry *t = argument;
  telemetry_open_log(t); /* reports at once if it cannot be written */
  pthread_mutex_lock(&t->lock);
  for (;;) {
    enum telemetry_phase phase = t->phase;
    telemetry_write_log(t);
    if (phase == TELEMETRY_RUNS || phase == TELEMETRY_LAST) {
      pthread_mutex_unlock(&t->lock);
      telemetry_work(t, phase == TELEMETRY_LAST);
      pthread_mutex_lock(&t->lock);
    }
    if (phase == TELEMETRY_LAST) {
      t->phase = TELEMETRY_WAITS;
      pthread_cond_broadcast(&t->changed);
    }
    if (t->phase != phase || t->count > 0 || t->lost > 0) continue;
    if (phase == TELEMETRY_QUITS) break;
    telemetry_sleep(t);
  }
  pthread_mutex_unlock(&t->lock);
  return NULL;
}

/* --- the table --- */

static void telemetry_free(mlfab *ctx, int child);

static int telemetry_memory(mlfab__telemetry *t, int records) {
  mlfab__env *env = &t->ctx->env;
  t->text = mlfab__alloc(env, TELEMETRY_TEXT);
  if (t->log_level > 0) t->lines = mlfab__alloc_array(env, TELEMETRY_LINES, sizeof *t->lines);
  if (records) t->records = mlfab__alloc_array(env, TELEMETRY_BATCH, sizeof *t->records);
  return t->text && (t->lines || t->log_level == 0) && (t->records || !records) ? 0
                                                                                : MLFAB_ERR_MEMORY;
}

static void telemetry_threads(mlfab__telemetry *t) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
#if !defined(__APPLE__)
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
#endif
  pthread_mutex_init(&t->lock, NULL);
  pthread_cond_init(&t->changed, &attributes);
  pthread_condattr_destroy(&attributes);
}

static int telemetry_open(mlfab *ctx, mlfab_config *c, mlfab_error *error) {
  const char *file = NULL;
  int level = 0;
  if (!c->log[0] && !c->metrics[0] && !c->trace[0]) return 0;
  if (c->log[0] && !(level = mlfab__telemetry_log(c->log, &file)))
    return MLFAB__FAIL(error, MLFAB_ERR_CONFIG,
                       "log='%.100s': not error, warn, info or debug, with :FILE or without",
                       c->log);
  mlfab__telemetry *t = mlfab__alloc(&ctx->env, sizeof *t);
  if (!t) return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for telemetry");
  t->ctx = ctx;
  t->pid = getpid();
  t->has_log = c->env && c->env->log;
  t->log_level = level;
  t->log_file = t->trace_file = -1;
  t->metrics_ns = c->metrics_ns;
  t->opened_unix_ns = telemetry_clock(CLOCK_REALTIME);
  telemetry_threads(t);
  telemetry_name(c, t->node);
  if (gethostname(t->host, sizeof t->host)) snprintf(t->host, sizeof t->host, "?");
  t->host[sizeof t->host - 1] = 0;
  if (file) mlfab__telemetry_path(file, t->node, t->log_path);
  if (c->metrics[0]) mlfab__telemetry_path(c->metrics, t->node, t->metrics_path);
  if (c->trace[0]) mlfab__telemetry_path(c->trace, t->node, t->trace_path);
  ctx->telemetry = t;
  int code = telemetry_memory(t, c->trace[0] != 0);
  if (code) {
    telemetry_free(ctx, 0);
    return MLFAB__FAIL(error, code, "out of memory for telemetry");
  }
  telemetry_wrap(t);
  /* Removes these settings, which are carried out here: the node would refuse them. */
  c->log[0] = c->metrics[0] = c->trace[0] = 0;
  return 0;
}

static int telemetry_attach(mlfab *ctx, mlfab_error *error) {
  mlfab__telemetry *t = ctx->telemetry;
  if (!t) return 0;
  if (ctx->simulated)
    return MLFAB__FAIL(error, MLFAB_ERR_UNSUPPORTED,
                       "log, metrics and trace: not with a transport of virtual time");
  t->chrome = (mlfab__chrome){.pid = ctx->node->id + 1,
                              .unix_ns = telemetry_clock(CLOCK_REALTIME),
                              .clock_ns = mlfab__context_now(ctx)};
  t->chrome.last_ns = t->chrome.clock_ns;
  if (!t->trace_path[0] ||
      !mlfab__trace_open(&ctx->node->env, ctx->node, ctx->hooks.clock, ctx->hooks.user, &t->trace))
    return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_MEMORY, "out of memory for the trace");
}

static int telemetry_start(mlfab *ctx, mlfab_error *error) {
  mlfab__telemetry *t = ctx->telemetry;
  if (!t) return 0;
  t->phase = TELEMETRY_RUNS;
  t->runs = !mlfab__thread_start(&t->thread, NULL, telemetry_thread, t);
  if (t->runs) return 0;
  return MLFAB__FAIL(error, MLFAB_ERR_IO, "the thread of telemetry cannot be started");
}

/* Called before the node is freed. */
static void telemetry_stop(mlfab *ctx, int child) {
  mlfab__telemetry *t = ctx->telemetry;
  if (!t) return;
  if (t->runs && !child) {
    pthread_mutex_lock(&t->lock);
    t->phase = TELEMETRY_LAST;
    pthread_cond_broadcast(&t->changed);
    while (t->phase == TELEMETRY_LAST) pthread_cond_wait(&t->changed, &t->lock);
    pthread_mutex_unlock(&t->lock);
  }
  if (ctx->node) mlfab__trace_close(&t->trace, ctx->node);
}

/* Called when node and transports are gone: no code calls the hooks any more. */
static void telemetry_free(mlfab *ctx, int child) {
  mlfab__telemetry *t = ctx->telemetry;
  if (!t) return;
  /* Opening has failed, and the log tells the reason. */
  if (!t->runs && !child && t->count > 0)
    t->runs = !mlfab__thread_start(&t->thread, NULL, telemetry_thread, t);
  if (t->runs && !child) {
    pthread_mutex_lock(&t->lock);
    t->phase = TELEMETRY_QUITS;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    pthread_join(t->thread, NULL);
  }
  if (t->log_file >= 0) close(t->log_file);
  if (t->trace_file >= 0) close(t->trace_file);
  /* In a child it would wait for a thread that waited there at the fork. */
  if (!child || !t->runs) pthread_cond_destroy(&t->changed);
  if (!child || !t->runs) pthread_mutex_destroy(&t->lock);
  mlfab__free(&ctx->env, t->text, TELEMETRY_TEXT);
  mlfab__free(&ctx->env, t->lines, TELEMETRY_LINES * sizeof *t->lines);
  mlfab__free(&ctx->env, t->records, TELEMETRY_BATCH * sizeof *t->records);
  mlfab__free(&ctx->env, t, sizeof *t);
  ctx->telemetry = NULL;
}

/* --- metrics as text, with or without a thread --- */

MLFAB_API int mlfab_metrics(mlfab *ctx, int format, char *text, size_t room, size_t *bytes_p) {
  mlfab__snapshot snapshot;
  char host[64];
  int code = 0;
  CONTEXT_CHECK(ctx);
  if (!text && room > 0) return mlfab__context_null(ctx, "metrics: text");
  uint64_t now = mlfab__context_enter(ctx);
  if (format != MLFAB_METRICS_OPENMETRICS && format != MLFAB_METRICS_PROMETHEUS)
    code = MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_ARGUMENT, "metrics: format %d", format);
  else if (ctx->simulated)
    code = MLFAB__FAIL(&ctx->node->requests.last, MLFAB_ERR_UNSUPPORTED,
                       "metrics: not with a transport of virtual time");
  if (!code) {
    mlfab__metrics_take(ctx->node, now, &snapshot);
    snapshot.unix_ns = telemetry_clock(CLOCK_REALTIME);
    snapshot.opened_unix_ns = snapshot.unix_ns - (now - ctx->opened_ns);
    if (gethostname(host, sizeof host)) snprintf(host, sizeof host, "?");
    host[sizeof host - 1] = 0;
    snapshot.host = host;
    snapshot.pid = (long)getpid();
    size_t bytes = mlfab__metrics_text(&snapshot, format, text, room);
    if (bytes_p) *bytes_p = bytes + 1;
  }
  return mlfab__context_leave(ctx, code);
}

MLFAB__INTERNAL const mlfab__context_observer *mlfab__telemetry_observer(void) {
  static const mlfab__context_observer table = {telemetry_open, telemetry_attach, telemetry_start,
                                                telemetry_stop, telemetry_free};
  return &table;
}
