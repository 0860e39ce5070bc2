/* mlfab_remote.c - reads, writes and lists files at a WebDAV server, and objects in S3. See mlfab_remote.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab_remote.h"

#include "mlfab_sigv4.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  REMOTE_ATTEMPTS = 6,
  REMOTE_PAUSE_MS = 250,
  REMOTE_PAUSE_MOST_MS = 8000,
  REMOTE_RATE = 100000, /* bytes per second: minimum mean rate of a transfer */
  REMOTE_LIST_MOST = 16 << 20,
  REMOTE_PAGES = 1000,
  REMOTE_PAGE_BYTES = 4 << 20,
  REMOTE_LINE = 1400,
  REMOTE_TOKEN = 4096, /* limit of a session's token */
  REMOTE_BLOCK = 65536
};

/* A request with the data to repeat it. */
typedef struct remote_call {
  const mlfab__place *place;
  const char *method, *awaited;
  mlfab__sigv4_pair query[8]; /* for S3 */
  uint32_t nquery;
  const char *headers[4]; /* for WebDAV, besides the headers of every request */
  uint32_t nheaders;
  char payload[MLFAB__SIGV4_HEX]; /* for S3: SHA-256 of the body; "": there is no body */
  mlfab__http_request request;    /* body, range, limits */
  /* Limit and start of the operation. */
  uint64_t deadline_ns, began_ns;
  uint32_t attempts, in_vain;
  mlfab_error error;
} remote_call;

static uint64_t remote_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int remote_cancelled(const mlfab__remote *remote) {
  return __atomic_load_n(&remote->cancelled, __ATOMIC_ACQUIRE);
}

/* --- errors --- */

static int remote_fail(mlfab__remote *remote, int number, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
static int remote_fail(mlfab__remote *remote, int number, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(remote->why, sizeof remote->why, format, arguments);
  va_end(arguments);
  for (char *c = remote->why; *c; c++) {
    if ((unsigned char)*c < 32 || *c == 127) *c = '?';
  }
  return -number;
}

/* Finds the next element with this local name from *at_p on, and its text; then *at_p is behind it. 0: none is left. */
static int remote_element(const char **at_p, const char *end, const char *name, const char **text_p,
                          size_t *bytes_p) {
  size_t n = strlen(name);
  for (const char *at = *at_p; (at = memchr(at, '<', (size_t)(end - at))) != NULL;) {
    const char *close = memchr(at, '>', (size_t)(end - at));
    if (!close) return 0;
    const char *tag = at + 1, *colon = memchr(tag, ':', strcspn(tag, " >\t\r\n/"));
    if (colon && colon < close) tag = colon + 1;
    int found = (size_t)(close - tag) >= n && !memcmp(tag, name, n) &&
                strchr("> \t\r\n", tag[n]) != NULL && close[-1] != '/';
    at = close + 1;
    if (!found) continue;
    close = memchr(at, '<', (size_t)(end - at));
    if (!close) return 0;
    *text_p = at;
    *bytes_p = (size_t)(close - at);
    *at_p = close;
    return 1;
  }
  return 0;
}

/* Copies an element's text with its entities replaced: returns 1; or "" and 0 if it is missing or too long. */
static int remote_text(const char *from, size_t bytes, const char *name, char *text, size_t room) {
  static const struct {
    const char *name;
    char is;
  } entities[] = {{"&amp;", '&'},  {"&lt;", '<'},  {"&gt;", '>'},
                  {"&quot;", '"'}, {"&#34;", '"'}, {"&apos;", '\''}};
  const char *value;
  size_t n, at = 0;
  text[0] = 0;
  if (!remote_element(&from, from + bytes, name, &value, &n)) return 0;
  for (size_t i = 0; i < n; i++) {
    char c = value[i];
    for (size_t e = 0; c == '&' && e < sizeof entities / sizeof *entities; e++) {
      size_t k = strlen(entities[e].name);
      if (n - i < k || memcmp(value + i, entities[e].name, k) != 0) continue;
      c = entities[e].is;
      i += k - 1;
      break;
    }
    if (at + 1 == room) {
      text[0] = 0;
      return 0;
    }
    text[at++] = c;
  }
  text[at] = 0;
  return at > 0;
}

/* Converts to seconds since 1970: "2026-05-24T00:00:00Z", "20260524T000000Z" "Sun, 24 May 2026 00:00:00 GMT"; or -1. */
static int64_t remote_time(const char *text) {
  static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
  struct tm t;
  char month[4] = "";
  memset(&t, 0, sizeof t);
  if (sscanf(text, "%4d-%2d-%2dT%2d:%2d:%2d", &t.tm_year, &t.tm_mon, &t.tm_mday, &t.tm_hour,
             &t.tm_min, &t.tm_sec) == 6 ||
      sscanf(text, "%4d%2d%2dT%2d%2d%2d", &t.tm_year, &t.tm_mon, &t.tm_mday, &t.tm_hour, &t.tm_min,
             &t.tm_sec) == 6) {
    t.tm_mon--;
  } else if (sscanf(text, "%*3s, %2d %3s %4d %2d:%2d:%2d", &t.tm_mday, month, &t.tm_year,
                    &t.tm_hour, &t.tm_min, &t.tm_sec) == 6 &&
             strlen(month) == 3 && strstr(months, month)) {
    t.tm_mon = (int)((strstr(months, month) - months) / 3);
  } else {
    return -1;
  }
  t.tm_year -= 1900;
  return (int64_t)timegm(&t);
}

/* Reports that the server's clock differs from ours. */
static int remote_skewed(mlfab__remote *remote, const remote_call *call) {
  const mlfab__http_answer *answer = &remote->answer;
  char text[64];
  int64_t there = -1, here = (int64_t)time(NULL);
  if (remote_text(answer->body, answer->kept, "ServerTime", text, sizeof text))
    there = remote_time(text);
  if (there < 0) there = remote_time(answer->date);
  if (there < 0)
    return remote_fail(remote, EACCES, "%s: RequestTimeTooSkewed: this host's clock is wrong",
                       call->method);
  return remote_fail(remote, EACCES,
                     "%s: RequestTimeTooSkewed: this host's clock is %lld s %s the server's",
                     call->method, (long long)(here < there ? there - here : here - there),
                     here < there ? "behind" : "ahead of");
}

/* Returns the text of mlfab_http.h without method and URL, which the caller's error has. */
static const char *remote_detail(const remote_call *call, const char *url) {
  char start[400], name[128];
  mlfab__http_name(url, name, sizeof name);
  int n = snprintf(start, sizeof start, "%s %s, for %s: ", call->method, name, call->awaited);
  if (n > 0 && !strncmp(call->error.text, start, (size_t)n)) return call->error.text + n;
  return call->error.text;
}

static int remote_number(const mlfab__remote *remote, const remote_call *call) {
  switch (remote->answer.status) {
    case 404:
      return ENOENT;
    case 401:
    case 403:
      return EACCES;
    case 413:
      return EFBIG;
    case 507:
      return ENOSPC;
    case 501:
    case 505:
      return EIO;
    default:
      break;
  }
  if (call->error.code == MLFAB_ERR_LIMIT) return EFBIG;
  if (call->error.code == MLFAB_ERR_MEMORY) return ENOMEM;
  if (call->error.code == MLFAB_ERR_TIMEOUT || remote->answer.retryable) return ETIMEDOUT;
  return EIO;
}

/* Ends a call whose last attempt has failed for good. */
static int remote_give_up(mlfab__remote *remote, const remote_call *call, const char *url) {
  char code[48], tried[48] = "";
  uint64_t tenths = (remote_now() - call->began_ns) / 100000000u;
  const mlfab__http_answer *answer = &remote->answer;
  if (remote_cancelled(remote))
    return remote_fail(remote, ECANCELED, "%s: cancelled", call->method);
  remote_text(answer->body, answer->kept, "Code", code, sizeof code);
  if (!strcmp(code, "RequestTimeTooSkewed")) return remote_skewed(remote, call);
  if (call->attempts > 1)
    snprintf(tried, sizeof tried, ", %u attempts in %llu.%llu s", call->attempts,
             (unsigned long long)(tenths / 10), (unsigned long long)(tenths % 10));
  return remote_fail(remote, remote_number(remote, call), "%s: %.90s%s%s%s", call->method,
                     remote_detail(call, url), code[0] ? ", " : "", code, tried);
}

/* --- places --- */

int mlfab__remote_knows(const char *path) {
  return !mlfab__http_compare(path, "http://", 7) || !mlfab__http_compare(path, "https://", 8) ||
         !strncmp(path, "s3://", 5);
}

/* Joins directory and name by one "/", however many there were. */
static int remote_key(const char *from, int directory, char *key, size_t room) {
  const char *slash = strrchr(from, '/');
  size_t before = directory ? strlen(from) : slash ? (size_t)(slash - from) : 0;
  while (before > 0 && from[before - 1] == '/') before--;
  int n = snprintf(key, room, "%.*s%s%s", (int)before, from, before ? "/" : "",
                   directory ? ""
                   : slash   ? slash + 1
                             : from);
  return n < 0 || (size_t)n >= room;
}

/* "s3://bucket/key" */
static int remote_place_s3(mlfab__remote *remote, const char *path, int directory,
                           mlfab__place *place) {
  const mlfab_store_options *o = &remote->options;
  const char *bucket = path + 5;
  size_t n = strcspn(bucket, "/");
  int wrong = n < 3 || n > 63;
  for (size_t i = 0; i < n; i++)
    wrong |= !strchr("abcdefghijklmnopqrstuvwxyz0123456789.-", bucket[i]);
  place->s3 = 1;
  if (wrong ||
      remote_key(bucket + n + (bucket[n] == '/'), directory, place->key, sizeof place->key))
    return remote_fail(remote, EINVAL, "it is not s3://BUCKET/PREFIX");
  if (!o->access_key || !o->secret_key)
    return remote_fail(remote, EACCES, "no keys for S3 (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)");
  if (o->endpoint)
    snprintf(place->root, sizeof place->root, "%.200s/%.*s", o->endpoint, (int)n, bucket);
  else if (memchr(bucket, '.', n)) /* certificates cannot match such a host */
    snprintf(place->root, sizeof place->root, "https://s3.%.60s.amazonaws.com/%.*s", o->region,
             (int)n, bucket);
  else
    snprintf(place->root, sizeof place->root, "https://%.*s.s3.%.60s.amazonaws.com", (int)n, bucket,
             o->region);
  return 0;
}

/* Is it this host? Then a password may go in clear. */
static int remote_near(const char *root) {
  const char *host = root + 7;
  size_t n = strcspn(host, ":/");
  if (!strncmp(host, "[::1]", 5)) return 1;
  return (n == 9 && (!strncmp(host, "127.0.0.1", n) || !mlfab__http_compare(host, "localhost", n)));
}

int mlfab__remote_place(mlfab__remote *remote, const char *path, int directory,
                        mlfab__place *place) {
  memset(place, 0, sizeof *place);
  if (!strncmp(path, "s3://", 5)) return remote_place_s3(remote, path, directory, place);
  const char *host = strstr(path, "://") + 3;
  size_t n = strcspn(host, "/?#");
  size_t before = (size_t)(host - path) + n;
  if (n == 0 || memchr(host, '@', n) || strpbrk(path, "?#\r\n ") || before >= sizeof place->root)
    return remote_fail(remote, EINVAL,
                       "it is no http[s]://HOST/PATH: no '?', '#', space, user or password");
  memcpy(place->root, path, before);
  /* Points behind the host; the key keeps the first "/". */
  place->key[0] = '/';
  if (remote_key(host + n + (host[n] == '/'), directory, place->key + 1, sizeof place->key - 1))
    return remote_fail(remote, EINVAL, "its path is too long");
  if (remote->options.user && mlfab__http_compare(place->root, "https://", 8) != 0 &&
      !remote_near(place->root))
    return remote_fail(remote, EACCES, "a password goes over https only: MLFAB_STORE_USER is set");
  return 0;
}

/* --- headers --- */

typedef struct remote_head {
  const char *list[MLFAB__HTTP_HEADERS];
  uint32_t n;
  char host[320], date[64], payload[128], authorization[MLFAB__SIGV4_AUTH + 32];
  char token[REMOTE_TOKEN + 32];
  char url[MLFAB__REMOTE_URL];
} remote_head;

static void remote_header(remote_head *head, const char *line) {
  if (head->n < MLFAB__HTTP_HEADERS) head->list[head->n++] = line;
}

/* Adds path, query, and their signature. Returns 0 or -1. */
static int remote_sign(const mlfab__remote *remote, const remote_call *call, remote_head *head) {
  const mlfab_store_options *o = &remote->options;
  const char *root = call->place->root, *host = strstr(root, "://") + 3;
  char path[MLFAB__REMOTE_URL], query[MLFAB__REMOTE_URL], stamp[20];
  mlfab__sigv4_pair headers[4];
  time_t now = time(NULL);
  struct tm t;
  size_t bucket = strcspn(host, "/");
  gmtime_r(&now, &t);
  strftime(stamp, sizeof stamp, "%Y%m%dT%H%M%SZ", &t);
  int n = snprintf(path, sizeof path, "%s/", host + bucket);
  if (n < 0 || mlfab__sigv4_path(call->place->key, path + n, sizeof path - (size_t)n) ||
      mlfab__sigv4_query(call->query, call->nquery, query, sizeof query))
    return -1;
  n = snprintf(head->url, sizeof head->url, "%.*s%s%s%s", (int)(host - root + (long)bucket), root,
               path, call->nquery ? "?" : "", query);
  if (n < 0 || (size_t)n >= sizeof head->url) return -1;
  snprintf(head->host, sizeof head->host, "Host: %.*s", (int)bucket, host);
  snprintf(head->date, sizeof head->date, "x-amz-date: %s", stamp);
  char payload[MLFAB__SIGV4_HEX];
  if (call->payload[0])
    memcpy(payload, call->payload, sizeof payload);
  else if (mlfab__sigv4_hash("", 0, payload))
    return -1;
  snprintf(head->payload, sizeof head->payload, "x-amz-content-sha256: %s", payload);
  headers[0] = (mlfab__sigv4_pair){"host", head->host + strlen("Host: ")};
  headers[1] = (mlfab__sigv4_pair){"x-amz-date", stamp};
  headers[2] = (mlfab__sigv4_pair){"x-amz-content-sha256", payload};
  headers[3] = (mlfab__sigv4_pair){"x-amz-security-token", o->session_token};
  mlfab__sigv4_request sign = {.method = call->method,
                               .path = path,
                               .query = call->query,
                               .nquery = call->nquery,
                               .headers = headers,
                               .nheaders = o->session_token ? 4 : 3,
                               .payload = payload,
                               .date = stamp,
                               .region = o->region,
                               .service = "s3",
                               .access_key = o->access_key,
                               .secret_key = o->secret_key};
  memcpy(head->authorization, "Authorization: ", 15);
  if (mlfab__sigv4_sign(&sign, head->authorization + 15, sizeof head->authorization - 15))
    return -1;
  remote_header(head, head->host);
  remote_header(head, head->date);
  remote_header(head, head->payload);
  remote_header(head, head->authorization);
  if (!o->session_token) return 0;
  snprintf(head->token, sizeof head->token, "x-amz-security-token: %s", o->session_token);
  remote_header(head, head->token);
  return 0;
}

/* Adds basic authentication. Returns 0 or -1. */
static int remote_login(const mlfab__remote *remote, remote_head *head) {
  const mlfab_store_options *o = &remote->options;
  char text[512];
  if (!o->user) return 0;
  int n = snprintf(text, sizeof text, "%s:%s", o->user, o->password ? o->password : "");
  if (n < 0 || (size_t)n >= sizeof text) return -1;
  memcpy(head->authorization, "Authorization: Basic ", 21);
  EVP_EncodeBlock((unsigned char *)head->authorization + 21, (const unsigned char *)text, n);
  OPENSSL_cleanse(text, sizeof text);
  remote_header(head, head->authorization);
  return 0;
}

static int remote_head_of(const mlfab__remote *remote, const remote_call *call, remote_head *head) {
  head->n = 0;
  remote_header(head, "Expect:"); /* no pause before a body is sent */
  for (uint32_t i = 0; i < call->nheaders; i++) remote_header(head, call->headers[i]);
  if (call->place->s3) return remote_sign(remote, call, head);
  int n = snprintf(head->url, sizeof head->url, "%s%s", call->place->root, call->place->key);
  if (n < 0 || (size_t)n >= sizeof head->url) return -1;
  return remote_login(remote, head);
}

/* --- attempts --- */

static int remote_progress(void *user, uint64_t sent, uint64_t received, uint64_t length) {
  (void)sent, (void)received, (void)length;
  return remote_cancelled(user);
}

/* Makes a call for an operation that moves so many bytes. */
static remote_call remote_begin(mlfab__remote *remote, const char *method,
                                const mlfab__place *place, const char *awaited, uint64_t bytes) {
  remote_call call = {.method = method, .place = place, .awaited = awaited};
  call.began_ns = remote_now();
  call.deadline_ns = call.began_ns + remote->options.timeout_ns + bytes / REMOTE_RATE * 1000000000u;
  return call;
}

/* Makes one attempt. Returns 0, or MLFAB_ERR_*. */
static int remote_once(mlfab__remote *remote, remote_call *call, char url[MLFAB__REMOTE_URL]) {
  remote_head *head = malloc(sizeof *head);
  url[0] = 0;
  memset(&call->error, 0, sizeof call->error);
  if (!head) return call->error.code = MLFAB_ERR_MEMORY;
  uint64_t now = remote_now();
  int code = MLFAB_ERR_ARGUMENT;
  if (remote_head_of(remote, call, head) == 0) {
    mlfab__http_request *r = &call->request;
    r->method = call->method;
    r->url = head->url;
    r->awaited = call->awaited;
    r->headers = head->list;
    r->nheaders = head->n;
    r->ca_file = remote->options.ca_file;
    r->timeout_ns = call->deadline_ns > now ? call->deadline_ns - now : 1;
    if (r->stall_ns == 0) r->stall_ns = remote->options.timeout_ns / 2 + 1;
    if (!r->progress) r->progress = remote_progress;
    if (!r->user) r->user = remote;
    /* A password in clear is for this host; a proxy must not get it. */
    if (!call->place->s3 && remote->options.user &&
        mlfab__http_compare(call->place->root, "https://", 8) != 0)
      r->flags |= MLFAB__HTTP_DIRECT;
    call->attempts++;
    code = mlfab__http_run(remote->http, r, &remote->answer, &call->error);
    if (!remote->http) mlfab__http_fail(&call->error, code, "a forked child cannot use it");
    memcpy(url, head->url, MLFAB__REMOTE_URL);
  } else {
    mlfab__http_fail(&call->error, code, "the URL, a key or a password is too long");
    remote->answer.status = 0;
    remote->answer.retryable = 0;
    remote->answer.kept = 0;
  }
  OPENSSL_cleanse(head, sizeof *head);
  free(head);
  return code;
}

/* Sleeps; returns 0 if it was cancelled, or if the deadline comes earlier. */
static int remote_pause(mlfab__remote *remote, const remote_call *call) {
  uint64_t ms = REMOTE_PAUSE_MS;
  for (uint32_t i = 1; i < call->in_vain && ms < REMOTE_PAUSE_MOST_MS; i++) ms *= 2;
  if (ms > REMOTE_PAUSE_MOST_MS) ms = REMOTE_PAUSE_MOST_MS;
  ms = ms / 2 + (uint64_t)rand_r(&remote->dice) % (ms / 2);
  uint64_t asked = remote->answer.status ? remote->answer.retry_after_s : 0;
  if (asked > 3600) asked = 3600;
  if (asked * 1000 > ms) ms = asked * 1000;
  uint64_t until = remote_now() + ms * 1000000u;
  if (until >= call->deadline_ns) return 0;
  while (remote_now() < until) {
    const struct timespec slice = {0, 20000000};
    if (remote_cancelled(remote)) return 0;
    nanosleep(&slice, NULL);
  }
  return 1;
}

/* May the request succeed at a later attempt? */
static int remote_again(const mlfab__remote *remote, const remote_call *call, int code) {
  const mlfab__http_answer *answer = &remote->answer;
  char text[48];
  if (remote_cancelled(remote) || code == MLFAB_ERR_MEMORY) return 0;
  if (answer->status == 400 && remote_text(answer->body, answer->kept, "Code", text, sizeof text) &&
      !strcmp(text, "RequestTimeout"))
    return 1;
  /* If the server refuses while the body is being sent, this looks like a broken connection. */
  if (answer->status >= 300 && answer->status < 500 && answer->status != 408 &&
      answer->status != 429)
    return 0;
  if (answer->status == 501 || answer->status == 505 || answer->status == 507) return 0;
  return answer->retryable && call->in_vain < REMOTE_ATTEMPTS;
}

/* Repeats a call until it succeeds or fails for good. Returns 0 or a negative errno. */
static int remote_run(mlfab__remote *remote, remote_call *call) {
  char url[MLFAB__REMOTE_URL];
  for (;;) {
    int code = remote_once(remote, call, url);
    if (!code) return 0;
    call->in_vain++;
    if (!remote_again(remote, call, code) || !remote_pause(remote, call))
      return remote_give_up(remote, call, url);
  }
}

/* For one file: 207 reports that some members have failed, so the file itself may have. */
static int remote_run_whole(mlfab__remote *remote, remote_call *call) {
  int code = remote_run(remote, call);
  if (code || remote->answer.status != 207) return code;
  return remote_fail(remote, EIO, "%s: the answer is 207, so it may have failed", call->method);
}

/* --- reading --- */

typedef struct remote_sink {
  mlfab__remote *remote;
  char *data;
  uint64_t offset; /* offset of data in the file */
  size_t room, got;
} remote_sink;

static int remote_on_write(void *user, const void *data, size_t bytes, uint64_t offset) {
  remote_sink *sink = user;
  if (offset != sink->offset + sink->got || bytes > sink->room - sink->got) return MLFAB_ERR_LIMIT;
  memcpy(sink->data + sink->got, data, bytes);
  sink->got += bytes;
  return 0;
}

static int remote_sink_progress(void *user, uint64_t sent, uint64_t received, uint64_t length) {
  const remote_sink *sink = user;
  return remote_progress(sink->remote, sent, received, length);
}

int64_t mlfab__remote_get(mlfab__remote *remote, const mlfab__place *place, void *data,
                          size_t bytes, uint64_t offset, uint64_t *total_p) {
  static const uint16_t behind[] = {416, 0}; /* the file ends before */
  remote_call call = remote_begin(remote, "GET", place, "a part of a file", bytes);
  remote_sink sink = {.remote = remote, .data = data, .offset = offset, .room = bytes};
  char url[MLFAB__REMOTE_URL], etag[sizeof remote->answer.etag] = "";
  call.request.write = remote_on_write;
  call.request.progress = remote_sink_progress;
  call.request.user = &sink;
  call.request.accepted = behind;
  *total_p = UINT64_MAX;
  for (;;) {
    size_t before = sink.got;
    call.request.range_first = offset + sink.got;
    call.request.range_bytes = bytes - sink.got;
    call.request.body_most = bytes - sink.got;
    call.request.if_range = etag[0] ? etag : NULL;
    int code = remote_once(remote, &call, url);
    const mlfab__http_answer *answer = &remote->answer;
    if (!code && answer->status == 416) return (int64_t)sink.got;
    if (answer->status == 200 && (call.request.range_first > 0 || code == MLFAB_ERR_LIMIT))
      return remote_fail(remote, EIO, "GET: %s",
                         sink.got > 0 ? "the file has changed while it was read"
                                      : "the server has no parts of files (Range)");
    if (answer->total != UINT64_MAX) *total_p = answer->total;
    if (!code) return (int64_t)sink.got;
    /* All bytes had arrived before it broke off. */
    if (sink.got == bytes && answer->retryable) return (int64_t)sink.got;
    /* Continues behind the last byte, if the file is still the same. */
    if (!etag[0] && strncmp(answer->etag, "W/", 2) != 0) memcpy(etag, answer->etag, sizeof etag);
    if (!etag[0]) sink.got = 0;
    call.in_vain = sink.got > before ? 1 : call.in_vain + 1;
    if (!remote_again(remote, &call, code) || !remote_pause(remote, &call))
      return remote_give_up(remote, &call, url);
  }
}

/* --- writing --- */

/* Computes the SHA-256 of a part of the bytes. Returns 0 or a negative errno. */
static int remote_sum(mlfab__remote *remote, const mlfab__source *source, uint64_t first,
                      uint64_t bytes, char hex[MLFAB__SIGV4_HEX]) {
  unsigned char sum[EVP_MAX_MD_SIZE];
  char *block = malloc(REMOTE_BLOCK);
  EVP_MD_CTX *ctx = EVP_MD_CTX_new();
  int bad = !block || !ctx || EVP_DigestInit_ex(ctx, EVP_sha256(), NULL) != 1;
  int64_t n = 1;
  for (uint64_t at = 0; at < bytes && !bad; at += (uint64_t)n) {
    size_t room = bytes - at < REMOTE_BLOCK ? (size_t)(bytes - at) : REMOTE_BLOCK;
    n = source->read(source->user, block, room, first + at);
    bad = n <= 0 || EVP_DigestUpdate(ctx, block, (size_t)n) != 1;
  }
  bad = bad || EVP_DigestFinal_ex(ctx, sum, NULL) != 1;
  EVP_MD_CTX_free(ctx);
  free(block);
  if (bad) return remote_fail(remote, n <= 0 ? EIO : ENOMEM, "the spooled file cannot be read");
  mlfab__sigv4_hex(sum, 32, hex);
  return 0;
}

/* A part of a source, as a body. */
typedef struct remote_body {
  mlfab__remote *remote;
  const mlfab__source *source;
  uint64_t first;
} remote_body;

static int64_t remote_on_read(void *user, void *data, size_t room, uint64_t offset) {
  const remote_body *body = user;
  return body->source->read(body->source->user, data, room, body->first + offset);
}

static int remote_body_progress(void *user, uint64_t sent, uint64_t received, uint64_t length) {
  const remote_body *body = user;
  return remote_progress(body->remote, sent, received, length);
}

/* Sends a part of a source as the call's body. */
static int remote_send(mlfab__remote *remote, remote_call *call, const mlfab__source *source,
                       uint64_t first, uint64_t bytes) {
  remote_body body = {.remote = remote, .source = source, .first = first};
  int code = call->place->s3 ? remote_sum(remote, source, first, bytes, call->payload) : 0;
  if (code) return code;
  call->request.read = remote_on_read;
  call->request.progress = remote_body_progress;
  call->request.user = &body;
  call->request.body_bytes = bytes;
  return remote_run(remote, call);
}

int mlfab__remote_put(mlfab__remote *remote, const mlfab__place *place,
                      const mlfab__source *source) {
  remote_call call = remote_begin(remote, "PUT", place, "the file to be stored", source->bytes);
  return remote_send(remote, &call, source, 0, source->bytes);
}

/* Has the file this length? A failure counts as no. */
static int remote_is_there(mlfab__remote *remote, const mlfab__place *place, uint64_t bytes) {
  char why[MLFAB__REMOTE_WHY];
  memcpy(why, remote->why, sizeof why);
  remote_call call = remote_begin(remote, "HEAD", place, "the length of a file", 0);
  int there = remote_run(remote, &call) == 0 && remote->answer.total == bytes;
  memcpy(remote->why, why, sizeof why);
  return there;
}

int mlfab__remote_move(mlfab__remote *remote, const mlfab__place *from, const mlfab__place *to,
                       uint64_t bytes) {
  char line[REMOTE_LINE];
  remote_call call = remote_begin(remote, "MOVE", from, "the file to get its name", 0);
  snprintf(line, sizeof line, "Destination: %s%s", to->root, to->key);
  call.headers[0] = line;
  call.headers[1] = "Overwrite: T";
  call.nheaders = 2;
  call.request.flags = MLFAB__HTTP_FRESH; /* so that a 404 after a lost answer is recognized */
  int code = remote_run_whole(remote, &call);
  if (code == -ENOENT && call.attempts > 1 && remote_is_there(remote, to, bytes)) return 0;
  return code;
}

int mlfab__remote_delete(mlfab__remote *remote, const mlfab__place *place) {
  remote_call call = remote_begin(remote, "DELETE", place, "a file to be removed", 0);
  return remote_run_whole(remote, &call);
}

/* --- uploads to S3 --- */

void mlfab__remote_forget(mlfab__upload *upload) {
  free(upload->etags);
  memset(upload, 0, sizeof *upload);
}

static int remote_create_upload(mlfab__remote *remote, const mlfab__place *place,
                                mlfab__upload *upload) {
  remote_call call = remote_begin(remote, "POST", place, "the number of an upload", 0);
  call.query[call.nquery++] = (mlfab__sigv4_pair){"uploads", ""};
  int code = remote_run(remote, &call);
  if (code) return code;
  if (!remote_text(remote->answer.body, remote->answer.kept, "UploadId", upload->id,
                   sizeof upload->id))
    return remote_fail(remote, EIO, "POST: the server's answer has no UploadId");
  return 0;
}

static int remote_send_part(mlfab__remote *remote, const mlfab__place *place,
                            const mlfab__source *source, mlfab__upload *upload, uint64_t first,
                            uint64_t bytes) {
  char number[16];
  remote_call call = remote_begin(remote, "PUT", place, "a part to be stored", bytes);
  snprintf(number, sizeof number, "%u", upload->parts + 1);
  call.query[0] = (mlfab__sigv4_pair){"partNumber", number};
  call.query[1] = (mlfab__sigv4_pair){"uploadId", upload->id};
  call.nquery = 2;
  int code = remote_send(remote, &call, source, first, bytes);
  if (code) return code;
  const char *etag = remote->answer.etag;
  if (!etag[0] || strlen(etag) >= MLFAB__REMOTE_ETAG || strpbrk(etag, "<>&"))
    return remote_fail(remote, EIO, "PUT: the server's answer about a part has no ETag");
  memcpy(upload->etags[upload->parts++], etag, strlen(etag) + 1);
  return 0;
}

int mlfab__remote_upload(mlfab__remote *remote, const mlfab__place *place,
                         const mlfab__source *source, mlfab__upload *upload) {
  uint64_t part = remote->options.part_bytes, first = 0;
  if (source->bytes / part >= MLFAB__REMOTE_PARTS)
    part = source->bytes / MLFAB__REMOTE_PARTS + 1; /* the smallest part that S3's limit allows */
  mlfab__remote_forget(upload);
  upload->parts_most = (uint32_t)((source->bytes + part - 1) / part);
  upload->etags = calloc(upload->parts_most, sizeof *upload->etags);
  if (!upload->etags) return remote_fail(remote, ENOMEM, "out of memory for an upload");
  int code = remote_create_upload(remote, place, upload);
  for (; first < source->bytes && !code; first += part) {
    uint64_t bytes = source->bytes - first < part ? source->bytes - first : part;
    code = remote_send_part(remote, place, source, upload, first, bytes);
  }
  return code;
}

/* Makes the end of an upload: the list of its parts. NULL: no memory. */
static char *remote_parts(const mlfab__upload *upload, size_t *bytes_p) {
  size_t room = 128 + upload->parts * (size_t)(MLFAB__REMOTE_ETAG + 80), at;
  char *xml = malloc(room);
  if (!xml) return NULL;
  at = (size_t)snprintf(xml, room, "<CompleteMultipartUpload>");
  for (uint32_t i = 0; i < upload->parts; i++)
    at += (size_t)snprintf(xml + at, room - at,
                           "<Part><PartNumber>%u</PartNumber><ETag>%s</ETag></Part>", i + 1,
                           upload->etags[i]);
  at += (size_t)snprintf(xml + at, room - at, "</CompleteMultipartUpload>");
  *bytes_p = at;
  return xml;
}

/* An answer of 200 may have an error in its body. */
static int remote_completed(mlfab__remote *remote, remote_call *call) {
  mlfab__http_answer *answer = &remote->answer;
  char text[64];
  if (remote_text(answer->body, answer->kept, "ETag", text, sizeof text)) return 0;
  int named = remote_text(answer->body, answer->kept, "Code", text, sizeof text);
  int later = !named || !strcmp(text, "InternalError");
  if (later && ++call->in_vain < REMOTE_ATTEMPTS && remote_pause(remote, call)) return 1;
  if (remote_cancelled(remote)) return remote_fail(remote, ECANCELED, "POST: cancelled");
  return remote_fail(remote, later ? ETIMEDOUT : EIO,
                     "POST: the end of an upload was answered 200 with %s",
                     named ? text : "no ETag");
}

int mlfab__remote_complete(mlfab__remote *remote, const mlfab__place *place, mlfab__upload *upload,
                           uint64_t bytes) {
  size_t n = 0;
  char *xml = remote_parts(upload, &n);
  if (!xml) return remote_fail(remote, ENOMEM, "out of memory for the end of an upload");
  remote_call call = remote_begin(remote, "POST", place, "the end of an upload", bytes);
  call.query[0] = (mlfab__sigv4_pair){"uploadId", upload->id};
  call.nquery = 1;
  call.request.flags = MLFAB__HTTP_FRESH; /* like MOVE */
  call.request.body = xml;
  call.request.body_bytes = n;
  int code = mlfab__sigv4_hash(xml, n, call.payload) ? -ENOMEM : 1;
  while (code == 1) {
    code = remote_run(remote, &call);
    if (!code) code = remote_completed(remote, &call);
  }
  free(xml);
  if (code == -ENOENT && call.attempts > 1 && remote_is_there(remote, place, bytes)) return 0;
  return code;
}

/* --- lists --- */

typedef struct remote_page {
  mlfab__remote *remote;
  char *text;
  size_t bytes, room, most;
} remote_page;

static int remote_on_page(void *user, const void *data, size_t bytes, uint64_t offset) {
  remote_page *page = user;
  if (offset != page->bytes) return MLFAB_ERR_INTERNAL;
  if (bytes >= page->room - page->bytes) {
    size_t room = page->bytes + bytes + page->room + REMOTE_BLOCK;
    char *text = realloc(page->text, room);
    if (!text) return MLFAB_ERR_MEMORY;
    page->text = text;
    page->room = room;
  }
  memcpy(page->text + page->bytes, data, bytes);
  page->bytes += bytes;
  page->text[page->bytes] = 0;
  return 0;
}

static int remote_page_progress(void *user, uint64_t sent, uint64_t received, uint64_t length) {
  const remote_page *page = user;
  return remote_progress(page->remote, sent, received, length);
}

/* Gets an answer's whole body, again from its beginning at each attempt. */
static int remote_get_page(mlfab__remote *remote, remote_call *call, remote_page *page) {
  char url[MLFAB__REMOTE_URL];
  page->remote = remote;
  call->request.write = remote_on_page;
  call->request.progress = remote_page_progress;
  call->request.user = page;
  call->request.body_most = page->most;
  for (;;) {
    page->bytes = 0;
    int code = remote_once(remote, call, url);
    if (!code && page->text) return 0;
    if (!code) return remote_fail(remote, EIO, "%s: an empty answer", call->method);
    call->in_vain++;
    if (!remote_again(remote, call, code) || !remote_pause(remote, call))
      return remote_give_up(remote, call, url);
  }
}

/* Does the document end with this element's end? A page that is cut off, or a page for people, is not an empty list. */
static int remote_is_whole(const remote_page *page, const char *element) {
  const char *at = memrchr(page->text, '<', page->bytes);
  if (!at || at[1] != '/') return 0;
  at += 2;
  size_t n = strcspn(at, "> \t\r\n");
  const char *colon = memchr(at, ':', n);
  if (colon) n -= (size_t)(colon + 1 - at);
  if (colon) at = colon + 1;
  return n == strlen(element) && !memcmp(at, element, n) && strchr(at, '>') != NULL;
}

/* Names that were found. */
typedef struct remote_names {
  const char *prefix;
  char *text;
  size_t room, at;
} remote_names;

/* Adds a name, if it has the prefix. -ERANGE: there is no room. Skips names with other characters than ours. */
static int remote_add_name(remote_names *names, const char *name, const char *suffix) {
  size_t n = strlen(name) + strlen(suffix);
  if (strncmp(name, names->prefix, strlen(names->prefix)) != 0) return 0;
  for (const char *c = name; *c; c++) {
    if ((unsigned char)*c <= 32 || (unsigned char)*c >= 127 || *c == '/') return 0;
  }
  if (n + 2 > names->room - names->at) return -ERANGE;
  memcpy(names->text + names->at, name, strlen(name));
  memcpy(names->text + names->at + strlen(name), suffix, strlen(suffix));
  names->at += n;
  names->text[names->at++] = '\n';
  return 0;
}

static int remote_hex(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  c = (char)(c | 32);
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Returns the last part of an href, decoded in place. */
static char *remote_last(char *href) {
  char *slash = strrchr(href, '/'), *name = slash ? slash + 1 : href, *to = name;
  for (const char *from = name; *from; from++) {
    int high = *from == '%' ? remote_hex(from[1]) : -1;
    int low = high >= 0 ? remote_hex(from[2]) : -1;
    *to++ = low >= 0 ? (char)(high * 16 + low) : *from;
    if (low >= 0) from += 2;
  }
  *to = 0;
  return name;
}

static int remote_list_dav(mlfab__remote *remote, const mlfab__place *place, remote_names *names) {
  static const char body[] =
      "<?xml version=\"1.0\"?><D:propfind xmlns:D=\"DAV:\"><D:prop><D:resourcetype/></D:prop>"
      "</D:propfind>";
  remote_page page = {.most = REMOTE_LIST_MOST};
  remote_call call =
      remote_begin(remote, "PROPFIND", place, "the list of a directory", REMOTE_PAGE_BYTES);
  call.headers[0] = "Depth: 1";
  call.headers[1] = "Content-Type: application/xml";
  call.nheaders = 2;
  call.request.body = body;
  call.request.body_bytes = sizeof body - 1;
  int code = remote_get_page(remote, &call, &page);
  if (!code && remote->answer.status != 207)
    code = remote_fail(remote, EIO, "PROPFIND: the answer is %d, not 207 Multi-Status",
                       (int)remote->answer.status);
  if (!code && !remote_is_whole(&page, "multistatus"))
    code = remote_fail(remote, EIO, "PROPFIND: the answer is not a whole list");
  const char *at = page.text, *text;
  size_t bytes;
  char href[MLFAB__REMOTE_URL];
  while (!code && remote_element(&at, page.text + page.bytes, "href", &text, &bytes)) {
    if (bytes >= sizeof href || bytes == 0) continue;
    memcpy(href, text, bytes);
    href[bytes] = 0;
    code = remote_add_name(names, remote_last(href), "");
  }
  free(page.text);
  return code;
}

/* Takes all names in a page of one of S3's lists: the texts of `name` in the elements `item`. */
static int remote_take_page(const remote_page *page, const char *item, size_t before,
                            remote_names *names, const char *suffix) {
  const char *at = page->text, *end = page->text + page->bytes, *text;
  size_t bytes;
  char key[MLFAB__REMOTE_KEY];
  int code = 0;
  while (!code && remote_element(&at, end, item, &text, &bytes)) {
    const char *inside = text, *next = text;
    if (!remote_element(&next, end, item, &text, &bytes)) next = end;
    if (!remote_text(inside, (size_t)(next - inside), "Key", key, sizeof key)) continue;
    if (strlen(key) > before) code = remote_add_name(names, key + before, suffix);
  }
  return code;
}

/* The continuation of a list of S3. */
typedef struct remote_pages {
  const char *item, *suffix;
  int uploads;
  char token[1100], upload[MLFAB__REMOTE_ID];
} remote_pages;

/* Returns 1: there is another page; 0: there is none; -1: there is, but the answer does not name it. */
static int remote_next_page(const remote_page *page, remote_pages *pages) {
  char more[8];
  if (!remote_text(page->text, page->bytes, "IsTruncated", more, sizeof more) ||
      mlfab__http_compare(more, "true", 5) != 0)
    return 0;
  remote_text(page->text, page->bytes, "NextUploadIdMarker", pages->upload, sizeof pages->upload);
  int named = remote_text(page->text, page->bytes,
                          pages->uploads ? "NextKeyMarker" : "NextContinuationToken", pages->token,
                          sizeof pages->token);
  return named ? 1 : -1;
}

static int remote_list_page(mlfab__remote *remote, const mlfab__place *root, const char *prefix,
                            remote_pages *pages, remote_page *page) {
  remote_call call = remote_begin(remote, "GET", root, "a list of the bucket", REMOTE_PAGE_BYTES);
  mlfab__sigv4_pair *q = call.query;
  uint32_t n = 0;
  q[n++] =
      pages->uploads ? (mlfab__sigv4_pair){"uploads", ""} : (mlfab__sigv4_pair){"list-type", "2"};
  q[n++] = (mlfab__sigv4_pair){"prefix", prefix};
  q[n++] = (mlfab__sigv4_pair){"delimiter", "/"};
  if (pages->token[0])
    q[n++] =
        (mlfab__sigv4_pair){pages->uploads ? "key-marker" : "continuation-token", pages->token};
  if (pages->token[0] && pages->uploads && pages->upload[0])
    q[n++] = (mlfab__sigv4_pair){"upload-id-marker", pages->upload};
  call.nquery = n;
  return remote_get_page(remote, &call, page);
}

/* Lists objects, or unfinished uploads. A server that cannot list uploads (403, 404, 405, 501) has none. */
static int remote_list_s3(mlfab__remote *remote, const mlfab__place *place, int uploads,
                          remote_names *names) {
  mlfab__place root = *place;
  char prefix[MLFAB__REMOTE_KEY + 64];
  remote_pages *pages = calloc(1, sizeof *pages);
  remote_page page = {.most = REMOTE_PAGE_BYTES};
  int code = pages ? 0 : remote_fail(remote, ENOMEM, "out of memory for a list");
  root.key[0] = 0;
  snprintf(prefix, sizeof prefix, "%s%.60s", place->key, names->prefix);
  if (pages) pages->uploads = uploads;
  for (int i = 0; !code; i++) {
    code = i < REMOTE_PAGES ? remote_list_page(remote, &root, prefix, pages, &page)
                            : remote_fail(remote, ERANGE, "GET: the list has no end");
    int status = remote->answer.status;
    if (code && uploads && (status == 403 || status == 404 || status == 405 || status == 501)) {
      code = 0;
      break;
    }
    if (!code && !uploads && !remote_is_whole(&page, "ListBucketResult"))
      code = remote_fail(remote, EIO, "GET: the answer is not a whole list");
    if (!code)
      code = remote_take_page(&page, uploads ? "Upload" : "Contents", strlen(place->key), names,
                              uploads ? ".part" : "");
    int more = code ? 0 : remote_next_page(&page, pages);
    if (more < 0 && !uploads)
      code = remote_fail(remote, EIO, "GET: the list does not say how it goes on");
    if (more <= 0) break;
  }
  free(page.text);
  free(pages);
  return code;
}

int64_t mlfab__remote_list(mlfab__remote *remote, const mlfab__place *directory, const char *prefix,
                           char *names, size_t room) {
  remote_names found = {.prefix = prefix, .text = names, .room = room};
  int code = directory->s3 ? remote_list_s3(remote, directory, 0, &found)
                           : remote_list_dav(remote, directory, &found);
  if (!code && directory->s3) code = remote_list_s3(remote, directory, 1, &found);
  return code ? code : (int64_t)found.at;
}

/* --- unfinished uploads --- */

static int remote_abort_one(mlfab__remote *remote, const mlfab__place *place, const char *id) {
  remote_call call = remote_begin(remote, "DELETE", place, "an upload to be aborted", 0);
  call.query[0] = (mlfab__sigv4_pair){"uploadId", id};
  call.nquery = 1;
  int code = remote_run(remote, &call);
  return code == -ENOENT ? 0 : code;
}

int mlfab__remote_abort(mlfab__remote *remote, const mlfab__place *place) {
  mlfab__place root = *place;
  remote_page page = {.most = REMOTE_PAGE_BYTES};
  remote_pages pages = {.uploads = 1};
  char key[MLFAB__REMOTE_KEY], id[MLFAB__REMOTE_ID];
  const char *text;
  size_t bytes;
  root.key[0] = 0;
  /* The first page has all uploads of one object, except if there are very many; the rest are aborted next time. */
  int code = remote_list_page(remote, &root, place->key, &pages, &page);
  const char *at = page.text;
  while (!code && remote_element(&at, page.text + page.bytes, "Upload", &text, &bytes)) {
    const char *inside = text, *next = text;
    if (!remote_element(&next, page.text + page.bytes, "Upload", &text, &bytes))
      next = page.text + page.bytes;
    if (remote_text(inside, (size_t)(next - inside), "Key", key, sizeof key) &&
        remote_text(inside, (size_t)(next - inside), "UploadId", id, sizeof id) &&
        !strcmp(key, place->key))
      code = remote_abort_one(remote, place, id);
  }
  free(page.text);
  return code;
}
