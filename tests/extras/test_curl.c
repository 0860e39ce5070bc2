/* test_curl.c - extras/mlfab_http.c against a server that answers what no server should, and extras/mlfab_curl.c against
 * exporters and a Pushgateway that it makes up. tests/process/curl_test.py has the real ones. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "../../extras/mlfab_curl.h"
#include "../../extras/mlfab_http.h"
#include "../../mlfab_transport.h"

#include "../testing.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <locale.h>
#include <math.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LETTERS "abcdefghijklmnopqrstuvwxyz"

static int listener = -1;
static unsigned port;
static mlfab__http *http;
static mlfab__http_answer answer;
static mlfab_error error;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void sleep_ms(int ms) {
  struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
  nanosleep(&t, NULL);
}

/* --- the server --- */

/* What the made-up exporter says; under the lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double rate_in, rate_out; /* bytes a second */
static uint64_t since_ns;
static enum { TRUE_NUMBERS, NO_DEVICE, DEAD, GARBAGE, ENDLESS, TO_FILE } exporter;
static char pushed_head[8192], pushed[65536];           /* what the Pushgateway got last */
static int pushes, deletes, refuses, arriving, slow_ms; /* slow_ms: before it takes a PUT */

static int put(int fd, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int put(int fd, const char *format, ...) {
  char text[8192];
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return send(fd, text, (size_t)n, MSG_NOSIGNAL) == n;
}

static void endless(int fd, const char *line) {
  char block[8192];
  size_t n = strlen(line), used = 0;
  for (; used + n <= sizeof block; used += n) memcpy(block + used, line, n);
  while (send(fd, block, used, MSG_NOSIGNAL) == (ssize_t)used) {
  }
}

static void wait_for_close(int fd) {
  char byte;
  while (recv(fd, &byte, 1, 0) > 0) {
  }
}

static const char *header(const char *head, const char *name) {
  const char *at = strcasestr(head, name);
  return at ? at + strlen(name) : NULL;
}

static void serve_metrics(int fd) {
  char text[4096];
  pthread_mutex_lock(&lock);
  double seconds = (double)(now_ns() - since_ns) * 1e-9;
  double in = 1e15 + rate_in * seconds, out = rate_out * seconds;
  int how = exporter;
  pthread_mutex_unlock(&lock);
  static const char *const bad[] = {
      [DEAD] = "500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
      [TO_FILE] = "302 Found\r\nLocation: file:///proc/self/environ\r\nContent-Length: 0\r\n\r\n",
      [GARBAGE] =
          "200 OK\r\nConnection: close\r\n\r\n"
          "node_network_receive_bytes_total{device=\"eth0\n}}}{{\x01\xff\n"
          "node_network_receive_bytes_total{device=\"eth0\"} NaN\n"
          "node_network_transmit_bytes_total{device=\"eth0\"} 1e99999\n"
          "node_network_transmit_bytes_total{device=} 1\nnode_network_receive_bytes_total{} 2\n\n",
      [ENDLESS] = "200 OK\r\nConnection: close\r\n\r\n"};
  if (bad[how]) put(fd, "HTTP/1.1 %s", bad[how]);
  if (how == ENDLESS)
    endless(
        fd,
        "node_network_receive_bytes_total{device=\"eth0\"} 5e3\n# and so on and so on and so on\n");
  if (bad[how]) return;
  const char *first = how == NO_DEVICE ? "docker0" : "eth0";
  const char *second = how == NO_DEVICE ? "br-7" : "wla\\\\n\\\"0"; /* wla\n"0 */
  int n =
      snprintf(text, sizeof text,
               "# HELP node_network_receive_bytes_total Network device statistic receive_bytes.\n"
               "# TYPE node_network_receive_bytes_total counter\n"
               "node_network_receive_bytes_total{device=\"lo\"} 9.9e+18\n"
               "node_network_receive_bytes_total{device=\"%s\"} %.9e\n"
               "node_network_receive_bytes_total{device=\"veth12ab\"} 8e+17\n"
               "node_network_receive_bytes_total{device=\"%s\"} 1.5e+03\n"
               "node_network_transmit_bytes_total{device=\"lo\"} 9.9e+18\n"
               "node_network_transmit_bytes_total{device=\"%s\"} %.3f\n"
               "node_network_transmit_bytes_total{device=\"veth12ab\"} 8e+17\n"
               "node_network_transmit_bytes_total{device=\"%s\"} 17\n"
               "node_network_speed_bytes{device=\"%s\"} 1.25e+08\n"
               "node_network_speed_bytes{device=\"%s\"} -125000\n",
               first, in, second, first, out, second, first, second);
  put(fd, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", n, text);
}

/* The Pushgateway: takes all, or refuses all. */
static void serve_push(int fd, const char *head, const char *begun, size_t have) {
  const char *length = header(head, "\nContent-Length: ");
  size_t bytes = length ? (size_t)atoi(length) : 0;
  pthread_mutex_lock(&lock);
  arriving++;
  int ms = strncmp(head, "PUT", 3) ? 0 : slow_ms;
  pthread_mutex_unlock(&lock);
  sleep_ms(ms);
  pthread_mutex_lock(&lock);
  snprintf(pushed_head, sizeof pushed_head, "%s", head);
  if (!strncmp(head, "PUT", 3)) {
    if (bytes > sizeof pushed - 1) bytes = sizeof pushed - 1;
    if (have > bytes) have = bytes;
    memcpy(pushed, begun, have);
    while (have < bytes) {
      ssize_t n = recv(fd, pushed + have, bytes - have, 0);
      if (n <= 0) break;
      have += (size_t)n;
    }
    pushed[have] = 0;
    pushes++;
  } else {
    deletes++;
  }
  int no = refuses;
  pthread_mutex_unlock(&lock);
  if (no)
    put(fd, "HTTP/1.1 400 Bad Request\r\nContent-Length: 20\r\n\r\ninconsistent\x1b[31mmetrics");
  else
    put(fd, "HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n");
}

/* Paths, and their answers to any request. */
static const char *const answers[][2] = {
    {"/ok", "200 OK\r\nETag: \"e1\"\r\nContent-Length: 26\r\n\r\n" LETTERS},
    {"/whole", "200 OK\r\nETag: \"e1\"\r\nContent-Length: 26\r\n\r\n" LETTERS},
    {"/unasked",
     "206 Partial Content\r\nContent-Range: bytes 0-25/26\r\nContent-Length: 26\r\n\r\n" LETTERS},
    {"/large", "200 OK\r\nContent-Length: 9000000000\r\n\r\nxyz"},
    {"/short", "200 OK\r\nContent-Length: 100\r\n\r\n" LETTERS},
    {"/file",
     "302 Found\r\nLocation: file:///etc/passwd\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"},
    {"/loop", "302 Found\r\nLocation: /loop\r\nConnection: close\r\nContent-Length: 4\r\n\r\nloop"},
    {"/to", "302 Found\r\nLocation: /ok\r\nConnection: close\r\nContent-Length: 4\r\n\r\nhere"},
    {"/stall", "200 OK\r\nContent-Length: 100\r\n\r\nabc"},
    {"/endless", "200 OK\r\nConnection: close\r\n\r\n"},
    {"/head", "200 OK\r\n"},
    {"/503", "503 Busy\x07\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno"},
    {"/503?key=secret", "503 Busy\x07\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\nno"},
    {"/404", "404 Not Found\r\nContent-Length: 2\r\n\r\nno"},
};

static void serve(int fd, const char *head, const char *body, size_t have) {
  char path[128] = "";
  sscanf(head, "%*s %127s", path);
  const char *range = header(head, "\nRange: bytes=");
  int first = range ? atoi(range) : 0;
  for (size_t i = 0; i < sizeof answers / sizeof answers[0]; i++)
    if (!strcmp(path, answers[i][0])) put(fd, "HTTP/1.1 %s", answers[i][1]);
  if (!strcmp(path, "/endless")) endless(fd, LETTERS LETTERS LETTERS LETTERS);
  if (!strcmp(path, "/head")) endless(fd, "X-More: " LETTERS LETTERS "\r\n");
  if (!strcmp(path, "/stall") || !strcmp(path, "/silent")) wait_for_close(fd);
  if (!strcmp(path, "/metrics")) serve_metrics(fd);
  if (!strncmp(path, "/gate/", 6)) serve_push(fd, head, body, have);
  first += !strcmp(path, "/wrong"); /* another part than the one that was asked for */
  if (!strcmp(path, "/part") || !strcmp(path, "/wrong"))
    put(fd,
        "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes %d-25/26\r\nContent-Length: "
        "%d\r\n\r\n%s",
        first, 26 - first, LETTERS + first);
  if (!strncmp(head, "CONNECT ", 8)) put(fd, "HTTP/1.1 200 Tunnel\r\n\r\n");
  if (!strcmp(path, "/binary")) put(fd, "\x16\x03\x01\x02 what is this\r\n\r\n");
  if (!strcmp(path, "/echo")) {
    const char *user = header(head, "\nAuthorization: Basic ");
    put(fd, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n%.20s", user ? user : "nobody");
  }
}

static void *serve_one(void *opaque) {
  int fd = (int)(intptr_t)opaque;
  char head[8192];
  size_t used = 0;
  for (;;) {
    ssize_t n = recv(fd, head + used, sizeof head - 1 - used, 0);
    if (n <= 0) break;
    used += (size_t)n;
    head[used] = 0;
    char *end = strstr(head, "\r\n\r\n");
    if (!end) continue;
    end[2] = 0;
    serve(fd, head, end + 4, used - (size_t)(end + 4 - head));
    break;
  }
  shutdown(fd, SHUT_WR);
  close(fd);
  return NULL;
}

static void *serve_all(void *opaque) {
  (void)opaque;
  for (;;) {
    pthread_t thread;
    int fd = accept(listener, NULL, NULL);
    if (fd < 0) return NULL;
    if (!pthread_create(&thread, NULL, serve_one, (void *)(intptr_t)fd)) pthread_detach(thread);
  }
}

static int begin(void **state) {
  struct sockaddr_in at = {.sin_family = AF_INET};
  socklen_t room = sizeof at;
  pthread_t thread;
  (void)state;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 64) ||
      getsockname(listener, (struct sockaddr *)&at, &room))
    return -1;
  port = ntohs(at.sin_port);
  if (pthread_create(&thread, NULL, serve_all, NULL)) return -1;
  pthread_detach(thread);
  return mlfab__http_open(&http);
}

static int end(void **state) {
  (void)state;
  mlfab__http_close(http);
  return 0;
}

/* --- requests --- */

static const char *url_of(const char *path) {
  static char url[4][256];
  static int next;
  next = (next + 1) % 4;
  snprintf(url[next], sizeof url[next], "http://127.0.0.1:%u%s", port, path);
  return url[next];
}

/* Collects what `write` gets; notes if it is out of order. */
typedef struct sink {
  char bytes[4096];
  uint64_t from, used;
  int began, odd, code;
} sink;

static int sink_write(void *user, const void *data, size_t bytes, uint64_t offset) {
  sink *s = user;
  if (!s->began) s->from = offset;
  s->began = 1;
  s->odd |= offset != s->from + s->used;
  if (s->used + bytes < sizeof s->bytes) memcpy(s->bytes + s->used, data, bytes);
  s->used += bytes;
  return s->code;
}

static mlfab__http_request request_of(const char *path, sink *s) {
  if (s) memset(s, 0, sizeof *s);
  return (mlfab__http_request){.url = url_of(path),
                               .awaited = "this test",
                               .flags = MLFAB__HTTP_DIRECT,
                               .timeout_ns = 20000000000u,
                               .write = s ? sink_write : NULL,
                               .user = s};
}

/* Runs it; the error has this code and, unless NULL, this text. */
static void runs(const mlfab__http_request *r, int code, const char *text) {
  memset(&error, 0, sizeof error);
  int is = mlfab__http_run(http, r, &answer, &error);
  if (is != code) fail_msg("%s: %d (%s), not %d", r->url, is, error.text, code);
  if (text && !strstr(error.text, text)) fail_msg("\"%s\" has no \"%s\"", error.text, text);
}

TEST(test_answers) {
  sink s;
  mlfab__http_request r = request_of("/ok", NULL);
  runs(&r, 0, NULL);
  assert_int_equal(answer.status, 200);
  assert_string_equal(answer.body, LETTERS);
  assert_string_equal(answer.etag, "\"e1\"");
  assert_int_equal(answer.total, 26);
  r = request_of("/ok", &s);
  runs(&r, 0, NULL);
  assert_true(s.used == 26 && s.from == 0 && !s.odd && !memcmp(s.bytes, LETTERS, 26));
  s.code = MLFAB_ERR_LIMIT;
  runs(&r, MLFAB_ERR_LIMIT, "the answer cannot be stored");
  r = request_of("/503", &s);
  runs(&r, MLFAB_ERR_REFUSED, ", for this test: the answer is 503 Busy?");
  assert_true(s.used == 0 && answer.retryable && answer.retry_after_s == 7);
  assert_string_equal(answer.body, "no");
  r = request_of("/404", &s);
  runs(&r, MLFAB_ERR_REFUSED, "404 Not Found");
  assert_true(!answer.retryable && s.used == 0);
  const uint16_t fine[] = {404, 0};
  r.accepted = fine;
  runs(&r, 0, NULL);
  assert_true(s.used == 0 && answer.status == 404);
  r = request_of("/binary", &s);
  runs(&r, MLFAB_ERR_REFUSED, NULL); /* HTTP/0.9 */
}

TEST(test_parts) {
  sink s;
  mlfab__http_request r = request_of("/part", &s);
  r.range_first = 20;
  runs(&r, 0, NULL);
  assert_true(s.from == 20 && s.used == 6 && !s.odd && !memcmp(s.bytes, "uvwxyz", 6));
  assert_int_equal(answer.total, 26);
  r = request_of("/whole", &s); /* it does not know parts */
  r.range_first = 20;
  runs(&r, 0, NULL);
  assert_true(s.from == 0 && s.used == 26 && !s.odd);
  r = request_of("/wrong", &s);
  r.range_first = 20;
  runs(&r, MLFAB_ERR_REFUSED, "the server sent another part than the one from byte 20 on");
  assert_int_equal(s.used, 0);
  r = request_of("/unasked", &s);
  runs(&r, MLFAB_ERR_REFUSED, "another part");
  assert_int_equal(s.used, 0);
}

TEST(test_limits) {
  sink s;
  mlfab__http_request r = request_of("/endless", &s);
  r.body_most = 1000;
  runs(&r, MLFAB_ERR_LIMIT, "the answer has more than 1000 bytes (status 200 OK)");
  assert_true(s.used <= 1000);
  r = request_of("/endless", NULL);
  runs(&r, MLFAB_ERR_LIMIT, "more than 1048576 bytes");
  r = request_of("/large", &s);
  runs(&r, MLFAB_ERR_LIMIT, "the answer has 9000000000 bytes");
  assert_int_equal(s.used, 0);
  r = request_of("/head", &s);
  runs(&r, MLFAB_ERR_LIMIT, "the head of the answer has more than 65536 bytes");
  r = request_of("/short", &s);
  runs(&r, MLFAB_ERR_IO, NULL);
  assert_true(s.used == 26 && answer.retryable);
  r = request_of("/stall", &s);
  r.timeout_ns = 200000000;
  uint64_t began = now_ns();
  runs(&r, MLFAB_ERR_TIMEOUT, "(status 200 OK)");
  assert_true(now_ns() - began < 5000000000u && answer.retryable);
  r = request_of("/silent", &s);
  r.timeout_ns = 200000000;
  runs(&r, MLFAB_ERR_TIMEOUT, "/silent, for this test: ");
  r = request_of("/stall", &s);
  r.stall_ns = 1000000000;
  runs(&r, MLFAB_ERR_TIMEOUT, NULL);
}

TEST(test_redirects) {
  sink s;
  mlfab__http_request r = request_of("/to", &s);
  runs(&r, MLFAB_ERR_REFUSED, "the answer is 302 Found, a redirect to /ok");
  r.redirects = 1;
  runs(&r, 0, NULL);
  assert_true(s.used == 26 && !memcmp(s.bytes, LETTERS, 26));
  r = request_of("/loop", &s);
  r.redirects = 5;
  runs(&r, MLFAB_ERR_REFUSED, NULL);
  assert_int_equal(s.used, 0);
  r = request_of("/file", &s);
  r.redirects = 5;
  runs(&r, MLFAB_ERR_REFUSED, NULL);
  assert_int_equal(s.used, 0);
}

TEST(test_mistakes) {
  const char *const urls[] = {"file:///etc/passwd", "ftp://127.0.0.1/", "127.0.0.1", "",
                              "http://127.0.0.1/a\r\nb"};
  const char *const broken[] = {"A: b\r\nC: d"};
  mlfab__http_request r = request_of("/ok", NULL);
  for (size_t i = 0; i < sizeof urls / sizeof urls[0]; i++) {
    r.url = urls[i];
    runs(&r, MLFAB_ERR_ARGUMENT, NULL);
  }
  r = request_of("/ok", NULL);
  r.headers = broken;
  r.nheaders = 1;
  runs(&r, MLFAB_ERR_ARGUMENT, "line break");
  r = request_of("/ok", NULL);
  r.body_bytes = 5;
  runs(&r, MLFAB_ERR_ARGUMENT, "body");
  r = request_of("/ok", NULL);
  r.url = "http://127.0.0.1:1/x";
  runs(&r, MLFAB_ERR_IO, "GET http://127.0.0.1:1/x, for this test: ");
  assert_true(answer.retryable && answer.status == 0);
}

TEST(test_names) {
  static const char *const cases[][2] = {
      {"http://a/b", "http://a/b"},
      {"http://me:word@a:80/b?key=secret#x", "http://a:80/b"},
      {"https://me@a/b@c", "https://a/b@c"},
      {"http://me:wo@rd@a/", "http://a/"},
      {"http://me:wo/rd@a/b", "http://a/b"}, /* somebody forgot to escape it */
      {"http://[::1]:80/a@b", "http://[::1]:80/a@b"},
      {"http://a/\x1b[31m\n", "http://a/?[31m?"},
  };
  char text[64], url[128];
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    mlfab__http_name(cases[i][0], text, sizeof text);
    assert_string_equal(text, cases[i][1]);
  }
  snprintf(url, sizeof url, "http://me:secret@127.0.0.1:%u/echo", port);
  mlfab__http_request r = request_of("", NULL);
  r.url = url;
  runs(&r, 0, NULL);
  assert_int_equal(strncmp(answer.body, "bWU6c2VjcmV0\r\n", 14), 0); /* me:secret */
  snprintf(url, sizeof url, "http://me:secret@127.0.0.1:%u/503?key=secret", port);
  runs(&r, MLFAB_ERR_REFUSED, "/503");
  assert_null(strstr(error.text, "secret"));
}

/* A tunnel that a proxy has made is no answer of the server. */
TEST(test_tunnel) {
  unsetenv("no_proxy");
  setenv("https_proxy", url_of(""), 1);
  mlfab__http_request r = request_of("/ok", NULL);
  r.url = "https://far.example/";
  r.flags = 0;
  runs(&r, MLFAB_ERR_IO, "GET https://far.example/, for this test: ");
  unsetenv("https_proxy");
  assert_int_equal(answer.status, 0);
  assert_true(answer.retryable && !strstr(error.text, "200"));
}

/* libcurl's errors may show what is in the environment. */
TEST(test_passwords_of_proxies) {
  unsetenv("no_proxy");
  setenv("http_proxy", "http://me:sec/ret@nobody.invalid:80", 1);
  mlfab__http_request r = request_of("/ok", NULL);
  r.url = "http://far.example/";
  r.flags = 0;
  runs(&r, MLFAB_ERR_ADDRESS, "GET http://far.example/, for this test: ");
  unsetenv("http_proxy");
  assert_null(strstr(error.text, "sec"));
  assert_null(strstr(error.text, "ret@"));
}

static void *stop_soon(void *opaque) {
  sleep_ms(100);
  mlfab__http_stop(opaque);
  return NULL;
}

TEST(test_stop) {
  mlfab__http *other = NULL;
  pthread_t thread;
  assert_int_equal(mlfab__http_open(&other), 0);
  mlfab__http_request r = request_of("/silent", NULL);
  assert_int_equal(pthread_create(&thread, NULL, stop_soon, other), 0);
  uint64_t began = now_ns();
  assert_int_equal(mlfab__http_run(other, &r, &answer, &error), MLFAB_ERR_CANCELLED);
  assert_true(now_ns() - began < 5000000000u);
  pthread_join(thread, NULL);
  assert_int_equal(mlfab__http_run(other, &r, &answer, &error), MLFAB_ERR_CANCELLED);
  mlfab__http_close(other);
}

/* --- the monitor --- */

enum { LINES = 64 };
static char lines[LINES][512];
static int nlines; /* under lock */

static void on_log(void *user, int level, const char *text) {
  (void)user, (void)level;
  pthread_mutex_lock(&lock);
  if (nlines < LINES) snprintf(lines[nlines++], sizeof lines[0], "%s", text);
  pthread_mutex_unlock(&lock);
}

/* How many lines of the log have this text. */
static int said(const char *text) {
  int n = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < nlines; i++) n += strstr(lines[i], text) != NULL;
  pthread_mutex_unlock(&lock);
  return n;
}

static void is_now(int how, double in, double out) {
  pthread_mutex_lock(&lock);
  exporter = how;
  rate_in = in;
  rate_out = out;
  since_ns = now_ns();
  pthread_mutex_unlock(&lock);
}

/* Each measurement: 100 kB in a millisecond both ways, of which `own` are this node's. */
static uint64_t own_bytes;
static int fake_measure(void *self, uint64_t now, mlfab_measure *measure_p) {
  (void)self, (void)now;
  *measure_p = (mlfab_measure){.elapsed_ns = 1000000,
                               .bytes_in = 100000,
                               .bytes_out = 100000,
                               .own_in = __atomic_load_n(&own_bytes, __ATOMIC_RELAXED)};
  return 1;
}

static mlfab *ctx; /* of the test that runs */
static mlfab_curl_monitor *m;
static mlfab_curl_push *p;

static int open_fabric(void **state) {
  static mlfab_transport table;
  static mlfab_env env = {.size = sizeof env, .log = on_log};
  mlfab_config c;
  (void)state;
  if (!table.size) table = *mlfab_transport_tcp();
  table.measure = fake_measure;
  mlfab_config_init(&c);
  snprintf(c.job, sizeof c.job, "test-curl-%d", (int)getpid());
  c.transport = &table;
  c.scheduler = MLFAB_SCHEDULER_BESIDE;
  c.heartbeat_ns = 20000000;
  c.env = &env;
  nlines = 0;
  own_bytes = 0;
  pushes = deletes = refuses = arriving = 0;
  is_now(TRUE_NUMBERS, 50e6, 20e6);
  return mlfab_open(&c, &ctx, &error);
}

static int close_fabric(void **state) {
  (void)state;
  mlfab_curl_monitor_stop(&m);
  mlfab_curl_push_stop(&p);
  return mlfab_close(&ctx);
}

#define FABRIC_TEST(name) TEST_WITH(name, open_fabric, close_fabric)

static mlfab_curl_monitor_options monitor_options(void) {
  return (mlfab_curl_monitor_options){.size = sizeof(mlfab_curl_monitor_options),
                                      .url = url_of("/metrics"),
                                      .interval_ns = 100000000,
                                      .timeout_ns = 10000000000u};
}

static void monitor(const char *device) {
  mlfab_curl_monitor_options o = monitor_options();
  o.device = device;
  if (mlfab_curl_monitor_start(ctx, &o, &m, &error)) fail_msg("%s", error.text);
}

static mlfab_curl_monitor_state monitor_state(void) {
  mlfab_curl_monitor_state s = {.size = sizeof s};
  assert_int_equal(mlfab_curl_monitor_get(m, &s), 0);
  return s;
}

static int near(double is, double wanted) { return fabs(is - wanted) <= 0.25 * wanted; }

/* The scheduler is told the capacity (125 MB/s: the speed) less the traffic of others; at its end all of it again. */
FABRIC_TEST(test_the_traffic_of_others) {
  mlfab_stats stats;
  mlfab_curl_monitor_state s;
  monitor(NULL);
  for (int i = 0; i < 100; i++, sleep_ms(100)) {
    s = monitor_state();
    assert_int_equal(mlfab_get_stats(ctx, &stats, sizeof stats), 0);
    if (near(s.other_in, 50e6) && near((double)stats.link_in, 75e6)) break;
  }
  assert_string_equal(s.device, "eth0");
  assert_true(s.alive && s.failures == 0 && s.speed == 1.25e8);
  assert_true(near(s.in, 50e6) && near(s.out, 20e6) && near(s.other_in, 50e6) &&
              near(s.other_out, 20e6));
  assert_true(near((double)stats.link_in, 75e6));
  mlfab_curl_monitor_stop(&m);
  assert_null(m);
  for (int i = 0; i < 100 && stats.link_in < 90000000; i++, sleep_ms(50))
    assert_int_equal(mlfab_get_stats(ctx, &stats, sizeof stats), 0);
  assert_true(stats.link_in >= 90000000);
  assert_int_equal(nlines, 0);
}

/* What this node moves is not of others. A measurement comes each 10 ms. */
FABRIC_TEST(test_own_traffic_is_not_of_others) {
  mlfab_curl_monitor_state s;
  is_now(TRUE_NUMBERS, 50e6, 1e6);
  monitor("eth0");
  uint64_t before = 0, began = 0;
  mlfab_stats stats;
  __atomic_store_n(&own_bytes, 200000, __ATOMIC_RELAXED);
  for (int i = 0; i < 20; i++, sleep_ms(100)) {
    assert_int_equal(mlfab_get_stats(ctx, &stats, sizeof stats), 0);
    if (i == 10) before = stats.network_received, began = now_ns();
    s = monitor_state();
  }
  double own = (double)(stats.network_received - before) / ((double)(now_ns() - began) * 1e-9);
  double other = 50e6 - 1.05 * own;
  if (fabs(s.other_in - (other > 0 ? other : 0)) > 0.3 * 50e6)
    fail_msg("%g of others, with %g of ours", s.other_in, own);
  assert_true(s.other_in < 45e6);
}

static void wait_for_failures(uint64_t more) {
  uint64_t until = monitor_state().failures + more;
  for (int i = 0; i < 200 && monitor_state().failures < until; i++) sleep_ms(50);
  assert_true(monitor_state().failures >= until && !monitor_state().alive);
}

static void wait_until_alive(void) {
  for (int i = 0; i < 200 && !monitor_state().alive; i++) sleep_ms(50);
  assert_true(monitor_state().alive);
}

/* Each way to fail is one line; so is its end. After three failures nothing is known of others. */
FABRIC_TEST(test_bad_exporters) {
  static const struct {
    int how;
    const char *text;
  } cases[] = {{DEAD, "the answer is 500"},
               {GARBAGE, "the answer has no node_network_*_bytes_total of a network interface"},
               {ENDLESS, "the answer has more than 8388608 bytes"},
               {NO_DEVICE, "the answer has no node_network_*_bytes_total of a network interface"},
               {TO_FILE, "GET http://127.0.0.1:"}};
  is_now(TRUE_NUMBERS, 50e6, 50e6);
  monitor(NULL);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    wait_until_alive();
    is_now(cases[i].how, 50e6, 50e6);
    wait_for_failures(4);
    mlfab_curl_monitor_state s = monitor_state();
    assert_true(s.other_in == 0 && s.other_out == 0);
    if (!strstr(s.error.text, cases[i].text)) fail_msg("%s: %s", cases[i].text, s.error.text);
    assert_true(said("the scheduler does not know the traffic of others") == (int)i + 1);
    assert_true(said("answers again") == (int)i);
    is_now(TRUE_NUMBERS, 50e6, 50e6);
  }
  wait_until_alive();
  assert_null(strstr(lines[nlines - 1], "environ"));
  mlfab_curl_monitor_stop(&m);
  is_now(TRUE_NUMBERS, 50e6, 50e6);
  monitor("eth7");
  wait_for_failures(1);
  assert_true(said("of the interface eth7") == 1);
}

/* A counter that begins again, and a program with decimal commas. */
FABRIC_TEST(test_counters_and_commas) {
  (void)setlocale(LC_ALL, "de_DE.UTF-8");
  monitor("wla\\n\"0");
  wait_until_alive();
  mlfab_curl_monitor_state s = monitor_state();
  assert_true(s.speed == 0 && s.other_in == 0);
  mlfab_curl_monitor_stop(&m);
  monitor(NULL);
  for (int i = 0; i < 30; i++, sleep_ms(30)) {
    if (i % 10 == 9) is_now(TRUE_NUMBERS, 50e6, 20e6); /* back to 0 */
    s = monitor_state();
    assert_true(s.other_in >= 0 && s.other_in < 100e6 && s.other_out < 50e6);
  }
  assert_true(s.failures == 0);
  (void)setlocale(LC_ALL, "C");
}

FABRIC_TEST(test_monitor_mistakes) {
  mlfab_config c;
  mlfab_curl_monitor_options o;
  mlfab *plain = NULL;
  memset(&o, 0, sizeof o);
  assert_int_equal(mlfab_curl_monitor_start(ctx, &o, &m, &error), MLFAB_ERR_ARGUMENT);
  o.size = sizeof o;
  assert_int_equal(mlfab_curl_monitor_start(NULL, &o, &m, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_curl_monitor_start(ctx, &o, NULL, NULL), MLFAB_ERR_ARGUMENT);
  o.url = "file:///proc/net/dev";
  assert_int_equal(mlfab_curl_monitor_start(ctx, &o, &m, &error), MLFAB_ERR_ARGUMENT);
  o.url = NULL;
  o.interval_ns = 1;
  assert_int_equal(mlfab_curl_monitor_start(ctx, &o, &m, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_curl_monitor_get(NULL, NULL), MLFAB_ERR_ARGUMENT);
  mlfab_curl_monitor_stop(NULL);
  mlfab_config_init(&c);
  assert_int_equal(mlfab_open(&c, &plain, &error), 0);
  assert_int_equal(mlfab_curl_monitor_start(plain, NULL, &m, &error), MLFAB_ERR_STATE);
  assert_non_null(strstr(error.text, "links are not measured"));
  assert_null(m);
  assert_int_equal(mlfab_close(&plain), 0);
}

/* The page of a fabric whose lock somebody keeps does not hold up a start. */
FABRIC_TEST(test_a_page_that_is_locked) {
  char line[512], path[256] = "";
  monitor(NULL);
  FILE *maps = fopen("/proc/self/maps", "re");
  assert_non_null(maps);
  while (fgets(line, sizeof line, maps)) {
    const char *at = strstr(line, "/dev/shm/mlfab-traffic-");
    if (at) sscanf(at, "%255s", path);
  }
  (void)fclose(maps);
  mlfab_curl_monitor_stop(&m);
  assert_true(path[0] != 0);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  assert_true(file >= 0);
  assert_int_equal(flock(file, LOCK_EX), 0);
  alarm(200);
  monitor(NULL);
  alarm(0);
  wait_until_alive();
  mlfab_curl_monitor_stop(&m);
  unlink(path);
  close(file);
}

static mlfab_curl_push_options push_options(void) {
  return (mlfab_curl_push_options){.size = sizeof(mlfab_curl_push_options),
                                   .url = url_of("/gate/"),
                                   .interval_ns = 100000000,
                                   .timeout_ns = 2000000000};
}

/* A child has no thread: stop returns there, and does not touch what is the parent's. */
FABRIC_TEST(test_fork) {
  int status = -1;
  monitor(NULL);
  wait_until_alive();
  mlfab_curl_push_options o = push_options();
  assert_int_equal(mlfab_curl_push_start(ctx, &o, &p, &error), 0);
  pid_t child = fork();
  if (child == 0) {
    alarm(100);
    mlfab_curl_monitor_state s = {.size = sizeof s};
    int code = mlfab_curl_monitor_get(m, &s);
    int other = mlfab_curl_push_get(p, NULL, NULL, NULL);
    mlfab_curl_monitor_stop(&m);
    mlfab_curl_push_stop(&p);
    _exit(m || p || code != MLFAB_ERR_STATE || other != MLFAB_ERR_STATE);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  uint64_t scrapes = monitor_state().scrapes;
  for (int i = 0; i < 100 && monitor_state().scrapes < scrapes + 2; i++) sleep_ms(50);
  assert_true(monitor_state().alive && monitor_state().scrapes >= scrapes + 2);
}

/* --- the Pushgateway --- */

static int count_of(const int *what) {
  pthread_mutex_lock(&lock);
  int n = *what;
  pthread_mutex_unlock(&lock);
  return n;
}

FABRIC_TEST(test_push) {
  mlfab_curl_push_options o = push_options();
  uint64_t taken = 0, failed = 0;
  char wanted[128];
  o.job = "a job/\xc3\xa4";
  assert_int_equal(mlfab_curl_push_start(ctx, &o, &p, &error), 0);
  for (int i = 0; i < 200 && count_of(&pushes) < 2; i++) sleep_ms(50);
  mlfab_curl_push_stop(&p);
  assert_true(pushes >= 3 && deletes == 0 && nlines == 0 && !p);
  snprintf(
      wanted, sizeof wanted,
      "PUT /gate/metrics/job@base64/YSBqb2Ivw6Q=/fabric/test-curl-%d/node/worker-0 HTTP/1.1\r\n",
      (int)getpid());
  if (strncmp(pushed_head, wanted, strlen(wanted)) != 0) fail_msg("%s", pushed_head);
  assert_non_null(header(pushed_head, "\nContent-Type: text/plain; version=0.0.4"));
  assert_non_null(strstr(pushed, "# TYPE mlfab_commits_total counter\n"));
  assert_null(strstr(pushed, "# EOF"));
  assert_int_equal(pushed[strlen(pushed) - 1], '\n');
  o = push_options();
  o.remove = 1;
  pthread_mutex_lock(&lock);
  refuses = 1;
  pthread_mutex_unlock(&lock);
  assert_int_equal(mlfab_curl_push_start(ctx, &o, &p, &error), 0);
  for (int i = 0; i < 200 && failed < 3; i++, sleep_ms(50))
    assert_int_equal(mlfab_curl_push_get(p, &taken, &failed, &error), 0);
  assert_true(failed >= 3 && taken == 0);
  assert_non_null(strstr(error.text, "400 Bad Request: inconsistent [31mm"));
  assert_int_equal(said("push: PUT http"), 1);
  pthread_mutex_lock(&lock);
  refuses = 0;
  pthread_mutex_unlock(&lock);
  for (int i = 0; i < 200 && !taken; i++, sleep_ms(50))
    assert_int_equal(mlfab_curl_push_get(p, &taken, NULL, NULL), 0);
  mlfab_curl_push_stop(&p);
  assert_int_equal(said("takes metrics again"), 1);
  assert_int_equal(deletes, 1);
  assert_int_equal(strncmp(pushed_head, "DELETE /gate/metrics/job/mlfab/fabric/", 38), 0);
}

/* A push is under way when the node stops. A Pushgateway that takes it late must not take it behind the last request. */
FABRIC_TEST(test_push_under_way) {
  mlfab_curl_push_options o = push_options();
  slow_ms = 300;
  o.remove = 1;
  assert_int_equal(mlfab_curl_push_start(ctx, &o, &p, &error), 0);
  for (int i = 0; i < 2000 && count_of(&arriving) < 1; i++) sleep_ms(5);
  mlfab_curl_push_stop(&p);
  sleep_ms(600);
  assert_int_equal(count_of(&deletes), 1);
  assert_int_equal(count_of(&pushes), 1);
  assert_int_equal(strncmp(pushed_head, "DELETE ", 7), 0);
  slow_ms = 0;
}

/* An interval without end: one scrape and one push at the beginning. */
FABRIC_TEST(test_endless_intervals) {
  mlfab_curl_monitor_options how = monitor_options();
  mlfab_curl_push_options o = push_options();
  uint64_t taken = 0;
  how.interval_ns = how.timeout_ns = o.interval_ns = UINT64_MAX;
  assert_int_equal(mlfab_curl_monitor_start(ctx, &how, &m, &error), 0);
  assert_int_equal(mlfab_curl_push_start(ctx, &o, &p, &error), 0);
  for (int i = 0; i < 200 && (taken < 1 || !monitor_state().alive); i++) {
    sleep_ms(50);
    assert_int_equal(mlfab_curl_push_get(p, &taken, NULL, NULL), 0);
  }
  sleep_ms(300);
  assert_int_equal(mlfab_curl_push_get(p, &taken, NULL, NULL), 0);
  assert_int_equal(taken, 1);
  assert_int_equal(monitor_state().scrapes, 1);
}

FABRIC_TEST(test_push_mistakes) {
  mlfab_curl_push_options o = push_options();
  const char *const urls[] = {NULL, "", "file:///tmp/x", "http://a/?b=c", "a"};
  for (size_t i = 0; i < sizeof urls / sizeof urls[0]; i++) {
    o.url = urls[i];
    assert_int_equal(mlfab_curl_push_start(ctx, &o, &p, &error), MLFAB_ERR_ARGUMENT);
  }
  o = push_options();
  o.job = "";
  assert_int_equal(mlfab_curl_push_start(ctx, &o, &p, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_curl_push_start(ctx, NULL, &p, &error), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_curl_push_get(NULL, NULL, NULL, NULL), MLFAB_ERR_ARGUMENT);
  mlfab_curl_push_stop(NULL);
  /* A Pushgateway that is not there holds stop up for no longer than timeout_ns. */
  o = push_options();
  o.url = url_of("/silent");
  o.timeout_ns = 500000000;
  assert_int_equal(mlfab_curl_push_start(ctx, &o, &p, &error), 0);
  sleep_ms(50);
  uint64_t began = now_ns();
  mlfab_curl_push_stop(&p);
  assert_true(now_ns() - began < 3000000000u);
}

TESTS(begin, end)
