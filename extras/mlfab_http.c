/* mlfab_http.c - runs one HTTP request with limits, by libcurl. See mlfab_http.h. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "mlfab_http.h"

#include <curl/curl.h>
#include <errno.h>
#include <locale.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  HTTP_HEAD_MOST = 65536, /* limit of an answer's head, redirects included, bytes */
  HTTP_BODY_MOST = 1 << 20,
  HTTP_NAME = 128,
  HTTP_POLL_MS = 1000, /* longest time between two looks at `progress` */
  HTTP_CONNECT_MS = 10000,
  HTTP_PARTIAL = 206
};
static const uint64_t http_timeout_ns = 30000000000u, http_stall_ns = 10000000000u;
static const uint64_t http_unknown = UINT64_MAX;

struct mlfab__http {
  CURLM *multi;
  CURL *easy;
  int stopped; /* atomic */
  /* The running request. */
  const mlfab__http_request *request;
  mlfab__http_answer *answer;
  uint64_t sent, head_bytes, length; /* length: of the answer's body; http_unknown */
  uint64_t part_first;               /* first byte in Content-Range; http_unknown: there is none */
  int begun;                         /* the body's first byte was checked */
  int code;                          /* error of a function below that ended it; 0: none */
  char reason[64];                   /* text behind the status */
  char why[CURL_ERROR_SIZE];
  char detail[160]; /* details of `code` */
};

/* --- texts --- */

int mlfab__http_fail(mlfab_error *error_p, int code, const char *format, ...) {
  va_list arguments;
  if (!error_p) return code;
  memset(error_p, 0, sizeof *error_p);
  error_p->code = code;
  error_p->rank = MLFAB_NO_RANK;
  va_start(arguments, format);
  vsnprintf(error_p->text, sizeof error_p->text, format, arguments);
  va_end(arguments);
  return code;
}

static void http_clean(char *text) {
  for (; *text; text++) {
    if ((unsigned char)*text < 32 || *text == 127) *text = '?';
  }
}

/* Returns how much of `host` is user and password: all before an '@'. An '@' behind the host's end counts, too, if the
 * text before cannot be host:port: then a '/' in a password was not escaped. */
static size_t http_secret(const char *host, size_t all) {
  size_t authority = strcspn(host, "/\\?#"), secret = 0;
  const char *colon = memchr(host, ':', authority);
  if (colon && host[0] != '[' && !(colon[1] >= '0' && colon[1] <= '9')) authority = all;
  for (size_t i = 0; i < authority; i++) {
    if (host[i] == '@') secret = i + 1;
  }
  return secret;
}

void mlfab__http_name(const char *url, char *text, size_t room) {
  const char *scheme = strstr(url, "://"), *host = scheme ? scheme + 3 : url;
  size_t all = strcspn(host, "?#"), secret = http_secret(host, all);
  if (room == 0) return;
  snprintf(text, room, "%.*s%.*s", (int)(host - url), url, (int)(all - secret), host + secret);
  http_clean(text);
}

/* --- callbacks of libcurl --- */

/* Ends the request. */
static void http_end(mlfab__http *http, int code, const char *format, ...) {
  va_list arguments;
  if (http->code) return;
  http->code = code;
  va_start(arguments, format);
  vsnprintf(http->detail, sizeof http->detail, format, arguments);
  va_end(arguments);
}

static size_t http_on_read(char *data, size_t size, size_t count, void *user) {
  mlfab__http *http = user;
  const mlfab__http_request *request = http->request;
  uint64_t left = request->body_bytes - http->sent;
  size_t room = size * count;
  if (room > left) room = (size_t)left;
  if (room == 0) return 0;
  if (!request->read) {
    memcpy(data, (const char *)request->body + http->sent, room);
    http->sent += room;
    return room;
  }
  int64_t got = request->read(request->user, data, room, http->sent);
  if (got <= 0 || (uint64_t)got > room) {
    if (got < 0)
      http_end(http, (int)got, "the body to send cannot be read");
    else
      http_end(http, MLFAB_ERR_IO, "the body to send ended after %llu of %llu bytes",
               (unsigned long long)http->sent, (unsigned long long)request->body_bytes);
    return CURL_READFUNC_ABORT;
  }
  http->sent += (uint64_t)got;
  return (size_t)got;
}

static int http_on_seek(void *user, curl_off_t offset, int origin) {
  mlfab__http *http = user;
  if (origin != SEEK_SET || offset < 0 || (uint64_t)offset > http->request->body_bytes)
    return CURL_SEEKFUNC_FAIL;
  http->sent = (uint64_t)offset;
  return CURL_SEEKFUNC_OK;
}

static int http_lower(char c) { return c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : (unsigned char)c; }

int mlfab__http_compare(const char *a, const char *b, size_t most) {
  for (; most > 0; a++, b++, most--) {
    int difference = http_lower(*a) - http_lower(*b);
    if (difference != 0 || !*a) return difference;
  }
  return 0;
}

const char *mlfab__http_reason(int number) {
  locale_t c = newlocale(LC_ALL_MASK, "C", (locale_t)0);
  locale_t before = c ? uselocale(c) : c;
  const char *text = strerror(number);
  if (!c) return text;
  uselocale(before);
  freelocale(c);
  return text;
}

/* Returns the value of a header line if it has this name, else NULL. */
static const char *http_header(const char *line, const char *name) {
  size_t n = strlen(name);
  if (strlen(line) <= n || mlfab__http_compare(line, name, n) != 0 || line[n] != ':') return NULL;
  line += n + 1;
  return line + strspn(line, " \t");
}

/* Copies a header's value; a value that is too long counts as missing. */
static void http_take(char *to, size_t room, const char *value) {
  size_t n = strlen(value);
  if (n >= room) return;
  memcpy(to, value, n + 1);
  http_clean(to);
}

/* "bytes 5-9/100", "bytes 5-9/ *", "bytes * /100" (without the blanks). */
static void http_content_range(mlfab__http *http, const char *value) {
  char *end = NULL;
  if (mlfab__http_compare(value, "bytes ", 6) != 0) return;
  value += 6;
  if (*value >= '0' && *value <= '9') http->part_first = strtoull(value, &end, 10);
  value = strchr(value, '/');
  if (value && value[1] >= '0' && value[1] <= '9')
    http->answer->total = strtoull(value + 1, &end, 10);
}

/* Begins a new head: values of an earlier head (of a redirect, or 100) no longer count. */
static void http_status_line(mlfab__http *http, const char *line) {
  mlfab__http_answer *answer = http->answer;
  const char *blank = strchr(line, ' ');
  memset(answer, 0, offsetof(mlfab__http_answer, body) + 1);
  answer->total = http->part_first = http->length = http_unknown;
  http->reason[0] = 0;
  if (!blank) return;
  answer->status = (int32_t)strtol(blank, NULL, 10);
  blank = strchr(blank + 1, ' ');
  if (blank) http_take(http->reason, sizeof http->reason, blank);
}

static size_t http_on_header(char *data, size_t size, size_t count, void *user) {
  mlfab__http *http = user;
  mlfab__http_answer *answer = http->answer;
  size_t bytes = size * count, n = bytes;
  char line[1024] = "";
  const char *value;
  http->head_bytes += bytes;
  if (http->head_bytes > HTTP_HEAD_MOST) {
    http_end(http, MLFAB_ERR_LIMIT, "the head of the answer has more than %d bytes",
             HTTP_HEAD_MOST);
    return 0;
  }
  while (n > 0 && (data[n - 1] == '\r' || data[n - 1] == '\n' || data[n - 1] == ' ')) n--;
  if (n >= sizeof line) return bytes;
  memcpy(line, data, n);
  line[n] = 0;
  if (!strncmp(line, "HTTP/", 5)) http_status_line(http, line);
  if ((value = http_header(line, "ETag")) != NULL)
    http_take(answer->etag, sizeof answer->etag, value);
  if ((value = http_header(line, "Date")) != NULL)
    http_take(answer->date, sizeof answer->date, value);
  if ((value = http_header(line, "Location")) != NULL)
    http_take(answer->location, sizeof answer->location, value);
  if ((value = http_header(line, "Retry-After")) != NULL)
    answer->retry_after_s = strtoull(value, NULL, 10);
  if ((value = http_header(line, "Content-Range")) != NULL) http_content_range(http, value);
  if ((value = http_header(line, "Content-Length")) != NULL && *value >= '0' && *value <= '9')
    http->length = strtoull(value, NULL, 10);
  return bytes;
}

static int http_success(int32_t status) { return status >= 200 && status < 300; }

/* Called before the first byte of a body: is it the requested part? */
static void http_begin(mlfab__http *http) {
  const mlfab__http_request *request = http->request;
  mlfab__http_answer *answer = http->answer;
  uint64_t most = request->body_most ? request->body_most : HTTP_BODY_MOST;
  int ranged = request->range_first > 0 || request->range_bytes > 0;
  http->begun = 1;
  answer->first = 0;
  if (http->length != http_unknown && http->length > most && http_success(answer->status))
    http_end(http, MLFAB_ERR_LIMIT, "the answer has %llu bytes, more than %llu",
             (unsigned long long)http->length, (unsigned long long)most);
  if (answer->status != HTTP_PARTIAL) return;
  if (!ranged || http->part_first == http_unknown || http->part_first != request->range_first)
    http_end(http, MLFAB_ERR_REFUSED, "the server sent another part than the one from byte %llu on",
             (unsigned long long)request->range_first);
  answer->first = request->range_first;
}

static void http_keep(mlfab__http_answer *answer, const char *data, size_t bytes) {
  size_t room = sizeof answer->body - 1 - answer->kept;
  if (bytes > room) bytes = room;
  memcpy(answer->body + answer->kept, data, bytes);
  answer->kept += bytes;
  answer->body[answer->kept] = 0;
}

static size_t http_on_write(char *data, size_t size, size_t count, void *user) {
  mlfab__http *http = user;
  const mlfab__http_request *request = http->request;
  mlfab__http_answer *answer = http->answer;
  uint64_t most = request->body_most ? request->body_most : HTTP_BODY_MOST;
  size_t bytes = size * count;
  if (!http->begun) http_begin(http);
  if (http->code) return 0;
  if (answer->received + bytes > most) {
    http_end(http, MLFAB_ERR_LIMIT, "the answer has more than %llu bytes",
             (unsigned long long)most);
    return 0;
  }
  if (!http_success(answer->status) || !request->write) {
    http_keep(answer, data, bytes);
  } else {
    int code = request->write(request->user, data, bytes, answer->first + answer->received);
    if (code) http_end(http, code, "the answer cannot be stored");
    if (code) return 0;
  }
  answer->received += bytes;
  return bytes;
}

static int http_on_progress(void *user, curl_off_t down_all, curl_off_t down, curl_off_t up_all,
                            curl_off_t up) {
  mlfab__http *http = user;
  const mlfab__http_request *request = http->request;
  (void)down_all, (void)down, (void)up_all;
  if (!request->progress) return 0;
  int stop = request->progress(request->user, (uint64_t)up, http->answer->received,
                               http->length == http_unknown ? 0 : http->length);
  if (stop) http_end(http, MLFAB_ERR_CANCELLED, "the caller ended it");
  return stop != 0;
}

/* --- a request --- */

static int http_has_breaks(const char *text) { return strpbrk(text, "\r\n") != NULL; }

/* Errors: ARGUMENT. */
static int http_check(const mlfab__http_request *r, const char *name, mlfab_error *error_p) {
  const char *what = NULL;
  if (mlfab__http_compare(r->url, "http://", 7) != 0 &&
      mlfab__http_compare(r->url, "https://", 8) != 0)
    what = "the URL does not begin with http:// or https://";
  else if (http_has_breaks(r->url) || (r->method && http_has_breaks(r->method)))
    what = "a line break";
  else if (r->nheaders > MLFAB__HTTP_HEADERS || (r->nheaders > 0 && !r->headers))
    what = "headers";
  else if (r->body_bytes > INT64_MAX || (r->body_bytes > 0 && !r->body && !r->read))
    what = "a body without bytes";
  else if (r->body_bytes > 0 && r->redirects > 0)
    what = "redirects of a request with a body";
  for (uint32_t i = 0; !what && i < r->nheaders; i++) {
    if (!r->headers[i] || http_has_breaks(r->headers[i])) what = "a header with a line break";
  }
  return what ? mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "%s: %s", name, what) : 0;
}

/* Errors: MEMORY. */
static int http_headers(const mlfab__http_request *r, struct curl_slist **list_p) {
  for (uint32_t i = 0; i < r->nheaders; i++) {
    struct curl_slist *longer = curl_slist_append(*list_p, r->headers[i]);
    if (!longer) return MLFAB_ERR_MEMORY;
    *list_p = longer;
  }
  if (!r->if_range) return 0;
  char line[192];
  snprintf(line, sizeof line, "If-Range: %s", r->if_range);
  struct curl_slist *longer = curl_slist_append(*list_p, line);
  if (!longer) return MLFAB_ERR_MEMORY;
  *list_p = longer;
  return 0;
}

static long http_ms(uint64_t ns, uint64_t other) {
  uint64_t ms = (ns ? ns : other) / 1000000;
  return ms < 1 ? 1 : ms > 0x7fffffff ? 0x7fffffff : (long)ms;
}

#define HTTP_SET(option, value) \
  if (!code) code = curl_easy_setopt(easy, option, value)

static CURLcode http_set_protocols(CURL *easy, int is_https) {
  CURLcode code = CURLE_OK;
#if LIBCURL_VERSION_NUM >= 0x075500
  HTTP_SET(CURLOPT_PROTOCOLS_STR, "http,https");
  HTTP_SET(CURLOPT_REDIR_PROTOCOLS_STR, is_https ? "https" : "http,https");
#else
  HTTP_SET(CURLOPT_PROTOCOLS, (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
  HTTP_SET(CURLOPT_REDIR_PROTOCOLS,
           is_https ? (long)CURLPROTO_HTTPS : (long)(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
  return code;
}

/* Method, body and part. */
static CURLcode http_set_method(CURL *easy, const mlfab__http_request *r) {
  CURLcode code = CURLE_OK;
  const char *method = r->method ? r->method : "GET";
  char range[64];
  if (r->body_bytes > 0 || !strcmp(method, "PUT") || !strcmp(method, "POST")) {
    HTTP_SET(CURLOPT_UPLOAD, 1L);
    HTTP_SET(CURLOPT_INFILESIZE_LARGE, (curl_off_t)r->body_bytes);
  } else if (!strcmp(method, "HEAD")) {
    HTTP_SET(CURLOPT_NOBODY, 1L);
  }
  if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
    HTTP_SET(CURLOPT_CUSTOMREQUEST, method);
  if (r->range_first > 0 || r->range_bytes > 0) {
    int n = snprintf(range, sizeof range, "%llu-", (unsigned long long)r->range_first);
    if (r->range_bytes > 0)
      snprintf(range + n, sizeof range - (size_t)n, "%llu",
               (unsigned long long)(r->range_first + r->range_bytes - 1));
    HTTP_SET(CURLOPT_RANGE, range);
  }
  return code;
}

static CURLcode http_set_limits(CURL *easy, const mlfab__http_request *r) {
  CURLcode code = CURLE_OK;
  long timeout_ms = http_ms(r->timeout_ns, http_timeout_ns);
  uint64_t stall_ns = r->stall_ns ? r->stall_ns : http_stall_ns;
  HTTP_SET(CURLOPT_TIMEOUT_MS, timeout_ms);
  HTTP_SET(CURLOPT_CONNECTTIMEOUT_MS, timeout_ms < HTTP_CONNECT_MS ? timeout_ms : HTTP_CONNECT_MS);
  HTTP_SET(CURLOPT_LOW_SPEED_LIMIT, 1L);
  HTTP_SET(CURLOPT_LOW_SPEED_TIME, (long)((stall_ns - 1) / 1000000000u + 1));
  HTTP_SET(CURLOPT_FOLLOWLOCATION, r->redirects > 0 ? 1L : 0L);
  HTTP_SET(CURLOPT_MAXREDIRS, (long)(r->redirects < 50 ? r->redirects : 50));
  HTTP_SET(CURLOPT_HTTP_CONTENT_DECODING, 0L);
  HTTP_SET(CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
  HTTP_SET(CURLOPT_NOSIGNAL, 1L);
#if LIBCURL_VERSION_NUM >= 0x075700
  HTTP_SET(CURLOPT_QUICK_EXIT, 1L); /* a slow name server does not delay `stop` */
#endif
  return code;
}

static CURLcode http_set(mlfab__http *http, const mlfab__http_request *r,
                         struct curl_slist *headers) {
  CURL *easy = http->easy;
  curl_easy_reset(easy);
  CURLcode code = http_set_protocols(easy, !mlfab__http_compare(r->url, "https://", 8));
  if (!code) code = http_set_method(easy, r);
  if (!code) code = http_set_limits(easy, r);
  HTTP_SET(CURLOPT_URL, r->url);
  HTTP_SET(CURLOPT_PATH_AS_IS, 1L);
  HTTP_SET(CURLOPT_HTTPHEADER, headers);
  HTTP_SET(CURLOPT_HTTPAUTH, (long)CURLAUTH_BASIC);
  HTTP_SET(CURLOPT_USERAGENT, "mlfab/" MLFAB_VERSION);
  if (r->flags & MLFAB__HTTP_DIRECT) HTTP_SET(CURLOPT_PROXY, "");
  if (r->flags & MLFAB__HTTP_FRESH) HTTP_SET(CURLOPT_FRESH_CONNECT, 1L);
  if (r->ca_file) HTTP_SET(CURLOPT_CAINFO, r->ca_file);
  HTTP_SET(CURLOPT_ERRORBUFFER, http->why);
  HTTP_SET(CURLOPT_READFUNCTION, http_on_read);
  HTTP_SET(CURLOPT_READDATA, http);
  HTTP_SET(CURLOPT_SEEKFUNCTION, http_on_seek);
  HTTP_SET(CURLOPT_SEEKDATA, http);
  HTTP_SET(CURLOPT_WRITEFUNCTION, http_on_write);
  HTTP_SET(CURLOPT_WRITEDATA, http);
  HTTP_SET(CURLOPT_HEADERFUNCTION, http_on_header);
  HTTP_SET(CURLOPT_HEADERDATA, http);
  HTTP_SET(CURLOPT_XFERINFOFUNCTION, http_on_progress);
  HTTP_SET(CURLOPT_XFERINFODATA, http);
  HTTP_SET(CURLOPT_NOPROGRESS, 0L);
  return code;
}
#undef HTTP_SET

static int http_is_stopped(mlfab__http *http) {
  return __atomic_load_n(&http->stopped, __ATOMIC_ACQUIRE);
}

/* Runs the prepared request; returns libcurl's code. */
static CURLcode http_perform(mlfab__http *http) {
  CURLcode code = CURLE_OK;
  int running = 1;
  if (curl_multi_add_handle(http->multi, http->easy)) return CURLE_OUT_OF_MEMORY;
  while (running && !http_is_stopped(http)) {
    if (curl_multi_perform(http->multi, &running)) code = CURLE_OUT_OF_MEMORY;
    if (code) break;
    if (running) curl_multi_poll(http->multi, NULL, 0, HTTP_POLL_MS, NULL);
  }
  CURLMsg *message;
  int left;
  while ((message = curl_multi_info_read(http->multi, &left)) != NULL) {
    if (message->msg == CURLMSG_DONE) code = message->data.result;
  }
  if (running && http_is_stopped(http)) {
    http_end(http, MLFAB_ERR_CANCELLED, "stopped");
    code = CURLE_ABORTED_BY_CALLBACK;
  }
  curl_multi_remove_handle(http->multi, http->easy);
  return code;
}

/* Returns the code of an error of libcurl, and if a later attempt may succeed. */
static int http_code(CURLcode code, uint32_t *retryable_p) {
  *retryable_p = 0;
  switch (code) {
    case CURLE_OUT_OF_MEMORY:
      return MLFAB_ERR_MEMORY;
    case CURLE_URL_MALFORMAT:
      return MLFAB_ERR_ARGUMENT;
    case CURLE_UNSUPPORTED_PROTOCOL: /* of a redirect */
    case CURLE_TOO_MANY_REDIRECTS:
    case CURLE_LOGIN_DENIED:
      return MLFAB_ERR_REFUSED;
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
      return MLFAB_ERR_IO;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
      *retryable_p = 1;
      return MLFAB_ERR_ADDRESS;
    case CURLE_OPERATION_TIMEDOUT:
      *retryable_p = 1;
      return MLFAB_ERR_TIMEOUT;
    default:
      *retryable_p = 1;
      return MLFAB_ERR_IO;
  }
}

static int http_accepts(const mlfab__http_request *r, int32_t status) {
  for (const uint16_t *one = r->accepted; one && *one; one++) {
    if (*one == status) return 1;
  }
  return http_success(status);
}

static int http_retryable(int32_t status) {
  return status == 408 || status == 429 || status >= 500;
}

/* Returns the outcome, as an error or 0. */
static int http_result(mlfab__http *http, CURLcode result, const char *name, mlfab_error *error_p) {
  const mlfab__http_request *r = http->request;
  mlfab__http_answer *answer = http->answer;
  const char *method = r->method ? r->method : "GET", *awaited = r->awaited ? r->awaited : "it";
  char status[96] = "";
  if (answer->status)
    snprintf(status, sizeof status, " (status %d%s)", (int)answer->status, http->reason);
  if (http->code)
    return mlfab__http_fail(error_p, http->code, "%s %s, for %s: %s%s", method, name, awaited,
                            http->detail, status);
  if (result != CURLE_OK) {
    if (strchr(http->why, '@')) http->why[0] = 0; /* a URL of the environment, with its password */
    http_clean(http->why);
    int code = http_code(result, &answer->retryable);
    return mlfab__http_fail(error_p, code, "%s %s, for %s: %s%s", method, name, awaited,
                            http->why[0] ? http->why : curl_easy_strerror(result), status);
  }
  if (http_accepts(r, answer->status)) return 0;
  answer->retryable = (uint32_t)http_retryable(answer->status);
  char target[HTTP_NAME];
  mlfab__http_name(answer->location, target, sizeof target);
  return mlfab__http_fail(error_p, MLFAB_ERR_REFUSED, "%s %s, for %s: the answer is %d%s%s%s",
                          method, name, awaited, (int)answer->status, http->reason,
                          target[0] ? ", a redirect to " : "", target);
}

/* Hides SIGPIPE of a TLS connection that the peer has closed. */
static CURLcode http_perform_quietly(mlfab__http *http) {
  sigset_t pipe, before, pending;
  struct timespec none = {0, 0};
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  sigpending(&pending);
  pthread_sigmask(SIG_BLOCK, &pipe, &before);
  CURLcode result = http_perform(http);
  if (!sigismember(&pending, SIGPIPE)) {
    while (sigtimedwait(&pipe, NULL, &none) == -1 && errno == EINTR) {
    }
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return result;
}

/* A proxy has made a tunnel without a byte through it: the server has not answered. */
static void http_forget_tunnel(mlfab__http *http) {
  long status = 0, tunnel = 0;
  if (curl_easy_getinfo(http->easy, CURLINFO_RESPONSE_CODE, &status) || status) return;
  if (curl_easy_getinfo(http->easy, CURLINFO_HTTP_CONNECTCODE, &tunnel) ||
      !http_success((int32_t)tunnel))
    return;
  http->answer->status = 0;
  http->reason[0] = 0;
}

int mlfab__http_run(mlfab__http *http, const mlfab__http_request *request,
                    mlfab__http_answer *answer_p, mlfab_error *error_p) {
  char name[HTTP_NAME];
  struct curl_slist *headers = NULL;
  if (!answer_p) return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "the answer is NULL");
  memset(answer_p, 0, offsetof(mlfab__http_answer, body) + 1);
  answer_p->total = http_unknown;
  if (!http || !request || !request->url)
    return mlfab__http_fail(error_p, MLFAB_ERR_ARGUMENT, "a request without a URL");
  mlfab__http_name(request->url, name, sizeof name);
  int code = http_check(request, name, error_p);
  if (code) return code;
  http->request = request;
  http->answer = answer_p;
  http->sent = http->head_bytes = 0;
  http->length = http->part_first = http_unknown;
  http->begun = http->code = 0;
  http->reason[0] = http->why[0] = http->detail[0] = 0;
  CURLcode result = http_headers(request, &headers) ? CURLE_OUT_OF_MEMORY : CURLE_OK;
  if (!result) result = http_set(http, request, headers);
  if (!result) result = http_perform_quietly(http);
  curl_slist_free_all(headers);
  if (result) http_forget_tunnel(http);
  if (answer_p->total == http_unknown && http_success(answer_p->status) &&
      answer_p->status != HTTP_PARTIAL)
    answer_p->total = http->length;
  if (!result && !http->code) http_on_progress(http, 0, 0, 0, (curl_off_t)http->sent);
  code = http_result(http, result, name, error_p);
  http->request = NULL;
  http->answer = NULL;
  return code;
}

/* --- sessions --- */

static pthread_once_t http_once = PTHREAD_ONCE_INIT;
static CURLcode http_begun = CURLE_FAILED_INIT;

static void http_global(void) { http_begun = curl_global_init(CURL_GLOBAL_DEFAULT); }

int mlfab__http_open(mlfab__http **http_p) {
  pthread_once(&http_once, http_global);
  if (http_begun) return MLFAB_ERR_UNSUPPORTED;
  mlfab__http *http = calloc(1, sizeof *http);
  if (!http) return MLFAB_ERR_MEMORY;
  http->multi = curl_multi_init();
  http->easy = curl_easy_init();
  if (!http->multi || !http->easy) {
    mlfab__http_close(http);
    return MLFAB_ERR_MEMORY;
  }
  *http_p = http;
  return 0;
}

void mlfab__http_close(mlfab__http *http) {
  if (!http) return;
  if (http->easy) curl_easy_cleanup(http->easy);
  if (http->multi) curl_multi_cleanup(http->multi);
  free(http);
}

void mlfab__http_stop(mlfab__http *http) {
  __atomic_store_n(&http->stopped, 1, __ATOMIC_RELEASE);
  curl_multi_wakeup(http->multi);
}
