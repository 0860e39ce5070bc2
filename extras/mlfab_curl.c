/* mlfab_curl.c - reads the traffic of others from node_exporter, and pushes metrics to a Pushgateway. See mlfab_curl.h.
 *
 * Each is a worker: a thread that runs a step, sleeps until the next, and ends when told. Its session of mlfab_http.c
 * bounds each request.
 *
 * The monitor's arithmetic. node_exporter counts the bytes of the interface; mlfab_stats the bytes that this node has
 * moved on network links. Each node adds its bytes to a page of shared memory. All nodes of its fabric, user and
 * network namespace on this host map the page. So it has two sums, of the bytes that they have moved together, which
 * only grow, whoever dies. Over a window of the last WINDOW intervals
 *
 *    other = interface - own * (1 + headers) - own of the other direction * acknowledgements      (bytes a second)
 *
 * and 0 if that is less than a tenth of `own`: mlfab_stats counts twice a heartbeat, so the ends of the window are that
 * inexact.
 *
 * Invariants: a told rate is finite and at least 0. Counters that went backwards, or a change of the interface, give no
 * rate. After DEAD_AFTER failures the told rate is 0. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab_curl.h"
#include "mlfab_http.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
  URL_ROOM = 2048,
  BODY_MOST = 8 << 20, /* limit of an exporter's answer, bytes */
  LINE_ROOM = 1024,
  DEVICES = 64,
  DEVICE_ROOM = 64,
  WINDOW = 4,     /* number of intervals */
  DEAD_AFTER = 3, /* failures in a row after which the other traffic counts as 0 */
  TEXT_FIRST = 32768
};
static const uint64_t tick_ns = 250000000, interval_least_ns = 100000000;
/* Longer intervals are cut to this, so that a time plus an interval does not overflow. */
static const uint64_t interval_most_ns = UINT64_C(31536000000000000);
static const double headers = 0.05, acknowledgements = 0.03, noise = 0.1;

/* --- workers --- */

typedef struct curl_worker {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  int stopped; /* protected by the lock */
  pid_t pid;   /* a forked child has no thread */
  mlfab__http *http;
  mlfab *ctx;
  /* Does the work due at `now`, without the lock; returns when to call it again. */
  uint64_t (*step)(void *self, uint64_t now);
  void *self;
} curl_worker;

static uint64_t curl_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *curl_run(void *opaque) {
  curl_worker *w = opaque;
  pthread_mutex_lock(&w->lock);
  while (!w->stopped) {
    pthread_mutex_unlock(&w->lock);
    uint64_t until = w->step(w->self, curl_now());
    struct timespec t = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
    pthread_mutex_lock(&w->lock);
    while (!w->stopped && curl_now() < until) pthread_cond_timedwait(&w->wake, &w->lock, &t);
  }
  pthread_mutex_unlock(&w->lock);
  return NULL;
}

/* Errors: MEMORY, UNSUPPORTED, IO. After an error there is nothing to stop. */
static int curl_start(curl_worker *w, mlfab_error *error_p) {
  pthread_condattr_t monotonic;
  sigset_t all, before;
  int code = mlfab__http_open(&w->http);
  if (code) return mlfab__http_fail(error_p, code, "libcurl cannot be used");
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&w->lock, NULL);
  pthread_cond_init(&w->wake, &monotonic);
  pthread_condattr_destroy(&monotonic);
  w->pid = getpid();
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  int failed = pthread_create(&w->thread, NULL, curl_run, w);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!failed) return 0;
  pthread_cond_destroy(&w->wake);
  pthread_mutex_destroy(&w->lock);
  mlfab__http_close(w->http);
  return mlfab__http_fail(error_p, MLFAB_ERR_IO, "no thread: %s", mlfab__http_reason(failed));
}

/* Ends the thread. `cancels`: and a running request; else it ends by itself first. Returns 0 in a forked child: both
 * belong to the parent. */
static int curl_stop(curl_worker *w, int cancels) {
  if (w->pid != getpid()) return 0;
  pthread_mutex_lock(&w->lock);
  w->stopped = 1;
  pthread_cond_signal(&w->wake);
  pthread_mutex_unlock(&w->lock);
  if (cancels) mlfab__http_stop(w->http);
  pthread_join(w->thread, NULL);
  mlfab__http_close(w->http);
  pthread_cond_destroy(&w->wake);
  pthread_mutex_destroy(&w->lock);
  return 1;
}

/* --- small things --- */

static uint64_t curl_interval(uint64_t given, uint64_t otherwise) {
  if (given == 0) return otherwise;
  return given < interval_most_ns ? given : interval_most_ns;
}

/* Writes a line to the context's log, or to stderr. */
static void curl_tell(mlfab *ctx, const char *line) {
  if (mlfab_log(ctx, MLFAB_LOG_WARN, line) != 1) fprintf(stderr, "mlfab: %s\n", line);
}

/* Copies as much of the caller's struct as both know. */
static void curl_take(void *to, size_t room, const void *from, uint32_t size) {
  if (from) memcpy(to, from, size < room ? size : room);
}

/* Takes the last error of the context. */
static int curl_context_fail(mlfab *ctx, int code, mlfab_error *error_p) {
  mlfab_error error;
  memset(&error, 0, sizeof error);
  (void)mlfab_last_error(ctx, &error);
  return mlfab__http_fail(error_p, code, "%s",
                          error.code == code ? error.text : mlfab_error_text(code));
}

/* Finds the value, unescaped, of a label among `labels`, which end at the closing brace. 0: missing, or too long. */
static int curl_label(const char *labels, const char *name, char *value, size_t room) {
  size_t n = strlen(name);
  for (const char *at = labels; *at && *at != '}';) {
    size_t length = strcspn(at, "=\"},"), used = 0;
    int is_it = length == n && !memcmp(at, name, n);
    at += length;
    if (at[0] != '=' || at[1] != '"') return 0;
    for (at += 2; *at && *at != '"'; at++) {
      int escaped = *at == '\\' && at[1];
      at += escaped;
      if (is_it && used + 1 < room) value[used] = *at == 'n' && escaped ? '\n' : *at;
      used++;
    }
    if (*at != '"') return 0;
    if (is_it && used >= room) return 0;
    if (is_it) value[used] = 0;
    if (is_it) return 1;
    at++;
    if (*at == ',') at++;
  }
  return 0;
}

/* Returns the labels of a node's metrics: behind "mlfab_state{". NULL: there are none. */
static const char *curl_labels(const char *text) {
  const char *at = text ? strstr(text, "\nmlfab_state{") : NULL;
  return at ? at + strlen("\nmlfab_state{") : NULL;
}

/* Returns the metrics of the context in the older format; the caller frees them. Errors: as mlfab_metrics; MEMORY. */
static int curl_text(mlfab *ctx, char **text_p, size_t *bytes_p) {
  size_t room = TEXT_FIRST;
  for (int i = 0; i < 3; i++) {
    size_t bytes = 0;
    char *text = malloc(room);
    if (!text) return MLFAB_ERR_MEMORY;
    int code = mlfab_metrics(ctx, MLFAB_METRICS_PROMETHEUS, text, room, &bytes);
    if (!code && bytes <= room) {
      *text_p = text;
      *bytes_p = bytes - 1;
      return 0;
    }
    free(text);
    if (code) return code;
    room = bytes + 4096;
  }
  return MLFAB_ERR_AGAIN;
}

/* Reads a number of the text format in any locale: [+-]digits[.digits][e[+-]digits]. Refuses NaN and infinity. */
static int curl_number(const char *text, double *number_p) {
  uint64_t mantissa = 0;
  int negative = *text == '-', digits = 0, exponent = 0, more = 0, after = 0;
  if (*text == '-' || *text == '+') text++;
  for (;; text++) {
    if (*text == '.' && !after) {
      after = 1;
      continue;
    }
    if (*text < '0' || *text > '9') break;
    digits++;
    if (mantissa < UINT64_MAX / 10 - 1) {
      mantissa = mantissa * 10 + (uint64_t)(*text - '0');
      exponent -= after;
    } else {
      exponent += !after;
    }
  }
  if (!digits) return 0;
  if (*text == 'e' || *text == 'E') {
    int minus = text[1] == '-';
    text += text[1] == '-' || text[1] == '+' ? 2 : 1;
    if (*text < '0' || *text > '9') return 0;
    for (; *text >= '0' && *text <= '9'; text++)
      more = more < 1000 ? more * 10 + *text - '0' : more;
    exponent += minus ? -more : more;
  }
  if (*text && *text != ' ' && *text != '\t') return 0;
  double power = 1, number = (double)mantissa;
  int steps = exponent < 0 ? -exponent : exponent;
  if (steps > 300) return 0;
  for (int i = 0; i < steps; i++) power *= 10;
  number = exponent < 0 ? number / power : number * power;
  if (number > 1e300) return 0;
  *number_p = negative ? -number : number;
  return 1;
}

/* --- the exporter's answer --- */

typedef struct curl_device {
  char name[DEVICE_ROOM];
  double in, out, speed; /* bytes, bytes, bytes a second; negative: missing */
} curl_device;

typedef struct curl_scrape {
  const char *wanted; /* the only device; "": any */
  char line[LINE_ROOM];
  size_t used; /* of line; LINE_ROOM: the line is too long */
  uint32_t count;
  curl_device devices[DEVICES];
} curl_scrape;

/* Is it a software interface, whose bytes pass through another interface as well, or stay in the host? */
static int curl_is_virtual(const char *name) {
  static const char *const known[] = {"veth",   "docker", "br-", "virbr", "cni",   "flannel",
                                      "cali",   "cilium", "lxc", "vnet",  "tun",   "tap",
                                      "wg",     "dummy",  "ifb", "kube-", "vxlan", "nodelocal",
                                      "podman", "gre",    "sit", "ip6tnl"};
  if (!strcmp(name, "lo")) return 1;
  for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
    if (!strncmp(name, known[i], strlen(known[i]))) return 1;
  }
  return 0;
}

static curl_device *curl_find(curl_scrape *s, const char *name) {
  for (uint32_t i = 0; i < s->count; i++) {
    if (!strcmp(s->devices[i].name, name)) return &s->devices[i];
  }
  if (s->count == DEVICES) return NULL;
  curl_device *device = &s->devices[s->count++];
  memcpy(device->name, name, strlen(name) + 1);
  device->in = device->out = device->speed = -1;
  return device;
}

/* Takes one line of the text format, without its end. Ignores all except samples of the three families. */
static void curl_line(curl_scrape *s, const char *line) {
  static const char *const families[] = {"node_network_receive_bytes_total{",
                                         "node_network_transmit_bytes_total{",
                                         "node_network_speed_bytes{"};
  char name[DEVICE_ROOM];
  double value = 0;
  size_t which = 0;
  while (which < 3 && strncmp(line, families[which], strlen(families[which])) != 0) which++;
  const char *end = which < 3 ? strrchr(line, '}') : NULL;
  if (!end || !curl_label(line + strlen(families[which]), "device", name, sizeof name)) return;
  end++;
  if (!curl_number(end + strspn(end, " \t"), &value) || value < 0) return;
  if (s->wanted[0] ? strcmp(name, s->wanted) != 0 : curl_is_virtual(name)) return;
  curl_device *device = curl_find(s, name);
  if (device && which == 0) device->in = value;
  if (device && which == 1) device->out = value;
  if (device && which == 2) device->speed = value;
}

static int curl_on_bytes(void *user, const void *data, size_t bytes, uint64_t offset) {
  curl_scrape *s = user;
  const char *at = data;
  (void)offset;
  for (size_t i = 0; i < bytes; i++) {
    if (at[i] == '\n') {
      if (s->used < LINE_ROOM) {
        s->line[s->used] = 0;
        curl_line(s, s->line);
      }
      s->used = 0;
    } else if (s->used < LINE_ROOM - 1) {
      s->line[s->used++] = at[i];
    } else {
      s->used = LINE_ROOM;
    }
  }
  return 0;
}

/* Returns the wanted device, else the device with the most traffic. NULL: there is none. */
static const curl_device *curl_pick(const curl_scrape *s) {
  const curl_device *best = NULL;
  for (uint32_t i = 0; i < s->count; i++) {
    const curl_device *one = &s->devices[i];
    if (one->in < 0 || one->out < 0) continue;
    if (!best || one->in + one->out > best->in + best->out) best = one;
  }
  return best;
}

/* --- bytes moved by the nodes of a fabric on this host --- */

typedef struct curl_page {
  uint64_t in, out; /* atomic */
} curl_page;

typedef struct curl_shared {
  curl_page alone;
  curl_page *page; /* in shared memory, or &alone */
  int file;        /* with a shared lock while it is used; -1: none */
  char path[84];
} curl_shared;

/* Removes pages that nobody uses: their jobs were killed. */
static void curl_sweep(const char *prefix) {
  DIR *folder = opendir("/dev/shm");
  char path[96];
  struct dirent *entry;
  while (folder && (entry = readdir(folder)) != NULL) {
    if (strncmp(entry->d_name, prefix, strlen(prefix)) != 0 || strlen(entry->d_name) > 80) continue;
    snprintf(path, sizeof path, "/dev/shm/%.80s", entry->d_name);
    int file = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (file >= 0 && !flock(file, LOCK_EX | LOCK_NB)) unlink(path);
    if (file >= 0) close(file);
  }
  if (folder) closedir(folder);
}

/* Maps the page of this fabric, or a private page if that is impossible. */
static void curl_share(curl_shared *s, const char *fabric) {
  static const struct timespec pause = {0, 1000000};
  struct stat net, here, named;
  char prefix[48];
  uint64_t hash = UINT64_C(14695981039346656037);
  memset(s, 0, sizeof *s);
  s->page = &s->alone;
  s->file = -1;
  if (stat("/proc/self/ns/net", &net)) net.st_ino = 0;
  for (const char *at = fabric; *at; at++)
    hash = (hash ^ (unsigned char)*at) * UINT64_C(1099511628211);
  hash = (hash ^ (uint64_t)net.st_ino) * UINT64_C(1099511628211);
  snprintf(prefix, sizeof prefix, "mlfab-traffic-%u-", (unsigned)geteuid());
  curl_sweep(prefix);
  snprintf(s->path, sizeof s->path, "/dev/shm/%s%016llx", prefix, (unsigned long long)hash);
  for (int i = 0; i < 8; i++) {
    int file = open(s->path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) return;
    void *page = MAP_FAILED;
    int mine = !fstat(file, &here) && here.st_uid == geteuid() && S_ISREG(here.st_mode) &&
               !posix_fallocate(file, 0, (off_t)sizeof *s->page);
    /* The other lock is held only briefly; its last user may have removed the page before this lock was taken. */
    int locked = mine && !flock(file, LOCK_SH | LOCK_NB);
    int same = locked && !stat(s->path, &named) && named.st_ino == here.st_ino;
    if (same) page = mmap(NULL, sizeof *s->page, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) {
      s->page = page;
      s->file = file;
      return;
    }
    close(file);
    if (!mine || same) return;
    if (!locked) nanosleep(&pause, NULL);
  }
}

static void curl_unshare(curl_shared *s) {
  if (s->file < 0) return;
  munmap(s->page, sizeof *s->page);
  if (!flock(s->file, LOCK_EX | LOCK_NB)) unlink(s->path);
  close(s->file);
}

/* --- the monitor --- */

typedef struct curl_sample {
  uint64_t at_ns;
  double in, out, own_in, own_out;
} curl_sample;

struct mlfab_curl_monitor {
  curl_worker worker;
  char url[URL_ROOM], device[DEVICE_ROOM], ca_file[URL_ROOM];
  int has_device; /* the user has named it */
  uint64_t interval_ns, timeout_ns, due_ns;
  uint64_t told_in, told_out; /* this node's counters so far, added to the page */
  curl_shared shared;
  curl_scrape scrape;
  curl_sample samples[WINDOW + 1]; /* the last is the newest */
  uint32_t nsamples, bad;          /* bad: failures in a row */
  int spoken;                      /* the last line in the log reported a failure */
  mlfab_curl_monitor_state state;  /* under worker.lock */
};

/* Adds this node's bytes since the last call to the page. */
static void curl_monitor_add(mlfab_curl_monitor *m) {
  mlfab_stats stats;
  memset(&stats, 0, sizeof stats);
  if (mlfab_get_stats(m->worker.ctx, &stats, sizeof stats)) return;
  __atomic_fetch_add(&m->shared.page->in, stats.network_received - m->told_in, __ATOMIC_RELAXED);
  __atomic_fetch_add(&m->shared.page->out, stats.network_sent - m->told_out, __ATOMIC_RELAXED);
  m->told_in = stats.network_received;
  m->told_out = stats.network_sent;
}

/* Returns the bytes a second of others in one direction. */
static double curl_other(double interface, double own, double own_back) {
  double other = interface - own * (1 + headers) - own_back * acknowledgements;
  return other > own * noise && other > 0 ? other : 0;
}

/* Takes a sample of the device: reports the rates over the window, if there is one. */
static void curl_monitor_sample(mlfab_curl_monitor *m, const curl_device *device, uint64_t now) {
  curl_sample *last = &m->samples[m->nsamples ? m->nsamples - 1 : 0];
  curl_sample next = {now, device->in, device->out,
                      (double)__atomic_load_n(&m->shared.page->in, __ATOMIC_RELAXED),
                      (double)__atomic_load_n(&m->shared.page->out, __ATOMIC_RELAXED)};
  mlfab_curl_monitor_state s = m->state;
  if (m->nsamples && (next.in < last->in || next.out < last->out || next.own_in < last->own_in ||
                      next.own_out < last->own_out))
    m->nsamples = 0;
  if (m->nsamples > WINDOW)
    memmove(m->samples, m->samples + 1, --m->nsamples * sizeof m->samples[0]);
  m->samples[m->nsamples++] = next;
  s.alive = 1;
  s.speed = device->speed > 0 ? device->speed : 0;
  memcpy(s.device, device->name, sizeof s.device);
  if (m->nsamples > 1 && now > m->samples[0].at_ns) {
    const curl_sample *first = &m->samples[0];
    double seconds = (double)(now - first->at_ns) * 1e-9;
    double own_in = (next.own_in - first->own_in) / seconds;
    double own_out = (next.own_out - first->own_out) / seconds;
    s.in = (next.in - first->in) / seconds;
    s.out = (next.out - first->out) / seconds;
    s.other_in = curl_other(s.in, own_in, own_out);
    s.other_out = curl_other(s.out, own_out, own_in);
    (void)mlfab_set_other_traffic(m->worker.ctx, s.other_in, s.other_out, s.speed);
  }
  pthread_mutex_lock(&m->worker.lock);
  m->state = s;
  pthread_mutex_unlock(&m->worker.lock);
}

static void curl_monitor_failed(mlfab_curl_monitor *m, const mlfab_error *error) {
  char line[512];
  m->bad++;
  m->nsamples = 0;
  if (!m->has_device) m->device[0] = 0;
  if (!m->spoken) {
    snprintf(line, sizeof line, "monitor: %s; the scheduler does not know the traffic of others",
             error->text);
    curl_tell(m->worker.ctx, line);
    m->spoken = 1;
  }
  pthread_mutex_lock(&m->worker.lock);
  m->state.alive = 0;
  m->state.failures++;
  m->state.error = *error;
  if (m->bad >= DEAD_AFTER)
    m->state.in = m->state.out = m->state.other_in = m->state.other_out = m->state.speed = 0;
  pthread_mutex_unlock(&m->worker.lock);
  if (m->bad == DEAD_AFTER) (void)mlfab_set_other_traffic(m->worker.ctx, 0, 0, 0);
}

/* Asks the exporter. Errors: those of mlfab__http_run; FRAME if the answer lacks such an interface. */
static int curl_monitor_ask(mlfab_curl_monitor *m, const curl_device **device_p,
                            mlfab_error *error) {
  static const char *const accept[] = {"Accept: text/plain; version=0.0.4"};
  mlfab__http_answer answer;
  char name[128];
  mlfab__http_request r;
  memset(&r, 0, sizeof r);
  r.url = m->url;
  r.awaited = "the network traffic of this host";
  r.headers = accept;
  r.nheaders = 1;
  r.flags = MLFAB__HTTP_DIRECT;
  r.redirects = 3;
  r.write = curl_on_bytes;
  r.user = &m->scrape;
  r.body_most = BODY_MOST;
  r.timeout_ns = m->timeout_ns;
  r.stall_ns = m->timeout_ns;
  r.ca_file = m->ca_file[0] ? m->ca_file : NULL;
  memset(&m->scrape, 0, sizeof m->scrape);
  m->scrape.wanted = m->device;
  int code = mlfab__http_run(m->worker.http, &r, &answer, error);
  if (code) return code;
  *device_p = curl_pick(&m->scrape);
  if (*device_p) return 0;
  mlfab__http_name(m->url, name, sizeof name);
  return mlfab__http_fail(error, MLFAB_ERR_FRAME,
                          "GET %s: the answer has no node_network_*_bytes_total of %s%s", name,
                          m->device[0] ? "the interface " : "a network interface", m->device);
}

static uint64_t curl_monitor_step(void *self, uint64_t now) {
  mlfab_curl_monitor *m = self;
  const curl_device *device = NULL;
  mlfab_error error;
  if (now < m->due_ns) {
    curl_monitor_add(m);
    return now + tick_ns < m->due_ns ? now + tick_ns : m->due_ns;
  }
  m->due_ns = now + m->interval_ns;
  int code = curl_monitor_ask(m, &device, &error);
  if (code == MLFAB_ERR_CANCELLED) return m->due_ns;
  curl_monitor_add(m);
  pthread_mutex_lock(&m->worker.lock);
  m->state.scrapes++;
  pthread_mutex_unlock(&m->worker.lock);
  if (code || !device) {
    curl_monitor_failed(m, &error);
  } else {
    if (m->spoken) curl_tell(m->worker.ctx, "monitor: node_exporter answers again");
    m->spoken = 0;
    m->bad = 0;
    memcpy(m->device, device->name, sizeof m->device);
    curl_monitor_sample(m, device, curl_now());
  }
  return now + tick_ns < m->due_ns ? now + tick_ns : m->due_ns;
}

/* Copies the texts and times of the options. Errors: ARGUMENT. */
static int curl_monitor_take(mlfab_curl_monitor *m, const mlfab_curl_monitor_options *o,
                             mlfab_error *error_p) {
  const char *url = o->url ? o->url : "http://localhost:9100/metrics";
  if (strlen(url) >= sizeof m->url || (o->ca_file && strlen(o->ca_file) >= sizeof m->ca_file) ||
      (o->device && strlen(o->device) >= sizeof m->device))
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "monitor: a text is too long");
  if (strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0)
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT,
                            "monitor: the URL does not begin with http:// or https://");
  if (o->interval_ns > 0 && o->interval_ns < interval_least_ns)
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "monitor: an interval below 100 ms");
  snprintf(m->url, sizeof m->url, "%s", url);
  if (o->ca_file) snprintf(m->ca_file, sizeof m->ca_file, "%s", o->ca_file);
  if (o->device) snprintf(m->device, sizeof m->device, "%s", o->device);
  m->has_device = m->device[0] != 0;
  m->interval_ns = curl_interval(o->interval_ns, 2000000000u);
  m->timeout_ns = o->timeout_ns ? o->timeout_ns : 2000000000u;
  return 0;
}

int mlfab_curl_monitor_start(mlfab *ctx, const mlfab_curl_monitor_options *options,
                             mlfab_curl_monitor **monitor_p, mlfab_error *error_p) {
  mlfab_curl_monitor_options o;
  char *text = NULL, fabric[128] = "";
  size_t bytes = 0;
  memset(&o, 0, sizeof o);
  if (!ctx || !monitor_p || (options && !options->size))
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "monitor: an argument is NULL or 0");
  curl_take(&o, sizeof o, options, options ? options->size : 0);
  int code = mlfab_set_other_traffic(ctx, 0, 0, 0);
  if (code) return curl_context_fail(ctx, code, error_p);
  mlfab_curl_monitor *m = calloc(1, sizeof *m);
  if (!m) return mlfab__http_fail(error_p, MLFAB_ERR_MEMORY, "monitor: no memory");
  code = curl_monitor_take(m, &o, error_p);
  if (code) {
    free(m);
    return code;
  }
  /* Without telemetry the fabrics of this user share a page. */
  if (!curl_text(ctx, &text, &bytes) && curl_labels(text))
    (void)curl_label(curl_labels(text), "fabric", fabric, sizeof fabric);
  free(text);
  curl_share(&m->shared, fabric);
  m->worker.ctx = ctx;
  m->worker.step = curl_monitor_step;
  m->worker.self = m;
  m->state.size = sizeof m->state;
  code = curl_start(&m->worker, error_p);
  if (code) {
    curl_unshare(&m->shared);
    free(m);
    return code;
  }
  *monitor_p = m;
  return 0;
}

int mlfab_curl_monitor_get(mlfab_curl_monitor *monitor, mlfab_curl_monitor_state *state_p) {
  if (!monitor || !state_p || !state_p->size) return MLFAB_ERR_ARGUMENT;
  if (monitor->worker.pid != getpid()) return MLFAB_ERR_STATE; /* the lock may never be released */
  uint32_t size = state_p->size;
  if (size > sizeof *state_p) size = sizeof *state_p;
  pthread_mutex_lock(&monitor->worker.lock);
  memcpy(state_p, &monitor->state, size);
  pthread_mutex_unlock(&monitor->worker.lock);
  state_p->size = size;
  return 0;
}

void mlfab_curl_monitor_stop(mlfab_curl_monitor **monitor_p) {
  mlfab_curl_monitor *m = monitor_p ? *monitor_p : NULL;
  if (!m) return;
  *monitor_p = NULL;
  if (!curl_stop(&m->worker, 1)) return; /* the parent's */
  curl_monitor_add(m);
  curl_unshare(&m->shared);
  (void)mlfab_set_other_traffic(m->worker.ctx, 0, 0, 0);
  free(m);
}

/* --- the Pushgateway --- */

struct mlfab_curl_push {
  curl_worker worker;
  char group[URL_ROOM * 2], ca_file[URL_ROOM]; /* group: the URL of this node's metrics */
  uint64_t interval_ns, timeout_ns;
  int remove, spoken;
  uint64_t taken, failed; /* under worker.lock, as error */
  mlfab_error error;
};

/* Appends a label and its value to a path, in base64 if the value is empty or has a character that names lack. Returns
 * 0 if there is no room. */
static int curl_push_label(char *path, size_t room, const char *label, const char *value) {
  static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.+";
  size_t bytes = strlen(value), used = strlen(path);
  int encoded = !bytes || value[strspn(value, plain)] || value[0] == '.';
  if (used + strlen(label) + bytes / 3 * 4 + bytes + 16 > room) return 0;
  used += (size_t)snprintf(path + used, room - used, "/%s%s/", label, encoded ? "@base64" : "");
  if (!encoded) return snprintf(path + used, room - used, "%s", value) >= 0;
  if (!bytes) path[used++] = '=';
  for (size_t i = 0; i < bytes; i += 3) {
    uint32_t group = 0;
    for (size_t k = 0; k < 3; k++)
      group = group << 8 | (i + k < bytes ? (unsigned char)value[i + k] : 0u);
    for (size_t k = 0; k < 4; k++)
      path[used++] = i + k <= bytes ? digits[group >> (18 - 6 * k) & 63] : '=';
  }
  path[used] = 0;
  return 1;
}

/* Sends the metrics of this node, or deletes them. Errors: those of mlfab_metrics and mlfab__http_run. */
static int curl_push_send(mlfab_curl_push *p, mlfab__http *http, int removes, mlfab_error *error) {
  static const char *const head[] = {"Content-Type: text/plain; version=0.0.4; charset=utf-8",
                                     "Expect:"};
  mlfab__http_answer answer;
  mlfab__http_request r;
  char *text = NULL;
  size_t bytes = 0;
  int code = removes ? 0 : curl_text(p->worker.ctx, &text, &bytes);
  if (code) return curl_context_fail(p->worker.ctx, code, error);
  memset(&r, 0, sizeof r);
  r.method = removes ? "DELETE" : "PUT";
  r.url = p->group;
  r.awaited = "a Pushgateway to take the metrics";
  r.headers = head;
  r.nheaders = removes ? 0 : 2;
  r.flags = MLFAB__HTTP_DIRECT;
  r.body = text;
  r.body_bytes = bytes;
  r.timeout_ns = p->timeout_ns;
  r.stall_ns = p->timeout_ns;
  r.ca_file = p->ca_file[0] ? p->ca_file : NULL;
  code = mlfab__http_run(http, &r, &answer, error);
  free(text);
  if (code == MLFAB_ERR_REFUSED && answer.kept > 0) {
    char why[sizeof error->text];
    snprintf(why, sizeof why, "%s", error->text);
    for (char *c = answer.body; *c; c++) *c = (unsigned char)*c < 32 || *c == 127 ? ' ' : *c;
    mlfab__http_fail(error, code, "%s: %.120s", why, answer.body);
  }
  return code;
}

static uint64_t curl_push_step(void *self, uint64_t now) {
  mlfab_curl_push *p = self;
  mlfab_error error;
  int code = curl_push_send(p, p->worker.http, 0, &error);
  pthread_mutex_lock(&p->worker.lock);
  p->taken += !code;
  p->failed += code != 0;
  if (code) p->error = error;
  pthread_mutex_unlock(&p->worker.lock);
  if (code && !p->spoken) {
    char line[512];
    snprintf(line, sizeof line, "push: %s", error.text);
    curl_tell(p->worker.ctx, line);
  }
  if (!code && p->spoken) curl_tell(p->worker.ctx, "push: the Pushgateway takes metrics again");
  p->spoken = code != 0;
  return now + p->interval_ns;
}

/* Makes the URL of the group from the options and the labels of this node. Errors: ARGUMENT, UNSUPPORTED. */
static int curl_push_take(mlfab_curl_push *p, mlfab *ctx, const mlfab_curl_push_options *o,
                          mlfab_error *error_p) {
  char *text = NULL, fabric[256] = "", role[32] = "", rank[16] = "", node[64];
  size_t bytes = 0, n = o->url ? strlen(o->url) : 0;
  if (!n || n >= URL_ROOM || (o->ca_file && strlen(o->ca_file) >= sizeof p->ca_file) ||
      (o->job && strlen(o->job) > 256))
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "push: no URL, or a text is too long");
  if (strncmp(o->url, "http://", 7) != 0 && strncmp(o->url, "https://", 8) != 0)
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT,
                            "push: the URL does not begin with http:// or https://");
  if (strpbrk(o->url, "?#") || (o->interval_ns > 0 && o->interval_ns < interval_least_ns) ||
      (o->job && !*o->job))
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT,
                            "push: a URL with a query, an empty job, or an interval below 100 ms");
  int code = curl_text(ctx, &text, &bytes);
  if (code) return curl_context_fail(ctx, code, error_p);
  const char *labels = curl_labels(text);
  if (labels) {
    (void)curl_label(labels, "fabric", fabric, sizeof fabric);
    (void)curl_label(labels, "role", role, sizeof role);
    if (!curl_label(labels, "rank", rank, sizeof rank))
      (void)curl_label(labels, "server", rank, sizeof rank);
  }
  free(text);
  snprintf(node, sizeof node, "%s%s%s", strcmp(role, "worker+server") ? role : "worker",
           rank[0] ? "-" : "", rank);
  memcpy(p->group, o->url, n + 1);
  while (n > 8 && p->group[n - 1] == '/') p->group[--n] = 0;
  snprintf(p->group + n, sizeof p->group - n, "/metrics");
  if (!curl_push_label(p->group, sizeof p->group, "job", o->job ? o->job : "mlfab") ||
      !curl_push_label(p->group, sizeof p->group, "fabric", fabric) ||
      !curl_push_label(p->group, sizeof p->group, "node", node))
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "push: the URL is too long");
  if (o->ca_file) snprintf(p->ca_file, sizeof p->ca_file, "%s", o->ca_file);
  p->interval_ns = curl_interval(o->interval_ns, 15000000000u);
  p->timeout_ns = o->timeout_ns ? o->timeout_ns : 5000000000u;
  p->remove = o->remove != 0;
  return 0;
}

int mlfab_curl_push_start(mlfab *ctx, const mlfab_curl_push_options *options,
                          mlfab_curl_push **push_p, mlfab_error *error_p) {
  mlfab_curl_push_options o;
  memset(&o, 0, sizeof o);
  if (!ctx || !push_p || !options || !options->size)
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "push: an argument is NULL or 0");
  curl_take(&o, sizeof o, options, options->size);
  mlfab_curl_push *p = calloc(1, sizeof *p);
  if (!p) return mlfab__http_fail(error_p, MLFAB_ERR_MEMORY, "push: no memory");
  p->worker.ctx = ctx;
  p->worker.step = curl_push_step;
  p->worker.self = p;
  int code = curl_push_take(p, ctx, &o, error_p);
  if (!code) code = curl_start(&p->worker, error_p);
  if (code) {
    free(p);
    return code;
  }
  *push_p = p;
  return 0;
}

int mlfab_curl_push_get(mlfab_curl_push *push, uint64_t *taken_p, uint64_t *failed_p,
                        mlfab_error *error_p) {
  if (!push) return MLFAB_ERR_ARGUMENT;
  if (push->worker.pid != getpid()) return MLFAB_ERR_STATE;
  pthread_mutex_lock(&push->worker.lock);
  if (taken_p) *taken_p = push->taken;
  if (failed_p) *failed_p = push->failed;
  if (error_p) *error_p = push->error;
  pthread_mutex_unlock(&push->worker.lock);
  return 0;
}

void mlfab_curl_push_stop(mlfab_curl_push **push_p) {
  mlfab_curl_push *p = push_p ? *push_p : NULL;
  mlfab__http *http = NULL;
  mlfab_error error;
  if (!p) return;
  *push_p = NULL;
  uint64_t began = curl_now();
  /* A push under way ends first: the Pushgateway may take a cancelled push behind the last request. */
  if (!curl_stop(&p->worker, 0)) return; /* the parent's */
  uint64_t spent = curl_now() - began, least = 1000000;
  p->timeout_ns = p->timeout_ns > spent + least ? p->timeout_ns - spent : least;
  if (!mlfab__http_open(&http)) {
    int code = curl_push_send(p, http, p->remove, &error);
    if (code && !p->spoken) {
      char line[512];
      snprintf(line, sizeof line, "push, at the end: %s", error.text);
      curl_tell(p->worker.ctx, line);
    }
  }
  mlfab__http_close(http);
  free(p);
}
