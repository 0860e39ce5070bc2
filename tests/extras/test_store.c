/* test_store.c - extras/mlfab_store.c against a server that answers what a case says, byte for byte: attempts, pauses, parts
 * that go on, answers that lie, break off or do not end, and what errors say. tests/process/store_test.py has real servers. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif

#include "../testing.h"

#include "../../extras/mlfab_store.h"
#include "../../mlfab_transport.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { STEPS = 16, HEAD = 8192, ENDLESS = 40 << 20 };

/* One answer. `want`: texts that the request's head must contain, as many as there are; `not_want`: one that it must not. */
typedef struct step {
  const char *want[4], *not_want;
  const char *
      answer; /* head and body; "": the connection is closed without one; NULL: nothing comes, for 20 s */
  size_t zeros;      /* bytes behind the answer */
  size_t body_bytes; /* that the request's body must have */
  int keeps;         /* the connection stays for the next request, which has half a second */
} step;

typedef struct server {
  int listener, port;
  const step *steps;
  size_t nsteps;
  pthread_t thread;
  /* What was seen. With the lock. */
  pthread_mutex_t lock;
  size_t served;
  int closing;
  char wrong[HEAD + 256]; /* the first thing that was not as wanted; "": nothing */
  char body[1024];        /* the beginning of the last request's body */
} server;

static void server_wrong(server *s, size_t i, const char *what, const char *head) {
  if (!s->wrong[0]) snprintf(s->wrong, sizeof s->wrong, "step %zu: %s\n%s", i, what, head);
}

/* Reads a head: its bytes, and those of the body that came with it in *more_p. 0: the connection was closed. */
static size_t server_head(int fd, char *head, size_t *more_p) {
  size_t n = 0;
  for (;;) {
    ssize_t got = recv(fd, head + n, HEAD - 1 - n, 0);
    if (got <= 0) return 0;
    n += (size_t)got;
    head[n] = 0;
    char *end = strstr(head, "\r\n\r\n");
    if (!end) continue;
    *more_p = n - (size_t)(end + 4 - head);
    return (size_t)(end + 4 - head);
  }
}

static size_t server_body(server *s, int fd, const char *head, size_t begin, size_t more) {
  const char *length = strcasestr(head, "\r\nContent-Length:");
  size_t bytes = length ? strtoul(length + 17, NULL, 10) : 0, got = more, kept = 0;
  char block[65536];
  memset(s->body, 0, sizeof s->body);
  kept = more < sizeof s->body - 1 ? more : sizeof s->body - 1;
  memcpy(s->body, head + begin, kept);
  while (got < bytes) {
    ssize_t n = recv(fd, block, sizeof block, 0);
    if (n <= 0) break;
    size_t room = sizeof s->body - 1 - kept, part = (size_t)n < room ? (size_t)n : room;
    memcpy(s->body + kept, block, part);
    kept += part;
    got += (size_t)n;
  }
  return got;
}

static void server_send(int fd, const char *data, size_t bytes) {
  while (bytes > 0) {
    ssize_t n = send(fd, data, bytes, MSG_NOSIGNAL);
    if (n <= 0) return;
    data += n;
    bytes -= (size_t)n;
  }
}

static int server_closes(server *s) {
  pthread_mutex_lock(&s->lock);
  int closing = s->closing;
  pthread_mutex_unlock(&s->lock);
  return closing;
}

/* Answers a request; 1: the connection stays. */
static int server_answer_one(server *s, int fd, char *head) {
  static const char zeros[65536];
  int keeps = 0;
  size_t more = 0, begin = server_head(fd, head, &more);
  if (begin > 0) {
    size_t got = server_body(s, fd, head, begin, more);
    head[begin] = 0;
    pthread_mutex_lock(&s->lock);
    size_t i = s->served++;
    const step *now = i < s->nsteps ? &s->steps[i] : NULL;
    if (!now) server_wrong(s, i, "a request too many", head);
    for (int k = 0; now && k < 4 && now->want[k]; k++)
      if (!strstr(head, now->want[k])) server_wrong(s, i, now->want[k], head);
    if (now && now->not_want && strstr(head, now->not_want))
      server_wrong(s, i, now->not_want, head);
    if (now && now->body_bytes != got) server_wrong(s, i, "the length of its body", head);
    pthread_mutex_unlock(&s->lock);
    for (int k = 0; now && !now->answer && k < 2000 && !server_closes(s); k++) usleep(10000);
    if (now && now->answer) server_send(fd, now->answer, strlen(now->answer));
    for (size_t n = now ? now->zeros : 0; n > 0; n -= n < sizeof zeros ? n : sizeof zeros)
      server_send(fd, zeros, n < sizeof zeros ? n : sizeof zeros);
    keeps = now && now->keeps;
  }
  return keeps;
}

static void server_answer(server *s, int fd) {
  const struct timeval half = {0, 500000};
  char *head = calloc(1, HEAD);
  while (server_answer_one(s, fd, head))
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &half, sizeof half);
  free(head);
  close(fd);
}

static void *server_run(void *user) {
  server *s = user;
  for (;;) {
    int fd = accept(s->listener, NULL, NULL);
    if (fd < 0 || server_closes(s)) {
      if (fd >= 0) close(fd);
      return NULL;
    }
    server_answer(s, fd);
  }
}

static void server_start(server *s, const step *steps, size_t nsteps) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t bytes = sizeof address;
  memset(s, 0, sizeof *s);
  s->steps = steps;
  s->nsteps = nsteps;
  pthread_mutex_init(&s->lock, NULL);
  s->listener = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(bind(s->listener, (struct sockaddr *)&address, sizeof address), 0);
  assert_int_equal(listen(s->listener, 16), 0);
  assert_int_equal(getsockname(s->listener, (struct sockaddr *)&address, &bytes), 0);
  s->port = ntohs(address.sin_port);
  assert_int_equal(pthread_create(&s->thread, NULL, server_run, s), 0);
}

/* All steps were asked for, and as they say. */
static void server_stop(server *s) {
  pthread_mutex_lock(&s->lock);
  s->closing = 1;
  pthread_mutex_unlock(&s->lock);
  shutdown(s->listener, SHUT_RDWR);
  pthread_join(s->thread, NULL);
  close(s->listener);
  pthread_mutex_destroy(&s->lock);
  if (s->wrong[0]) fail_msg("%s", s->wrong);
  assert_int_equal(s->served, s->nsteps);
}

/* --- a store and its server --- */

#define KEY "AKIDEXAMPLE"
#define SECRET "wJalrXUtnFEMI-EXAMPLEKEY"
#define TOKEN "the-session-token"
#define PASSWORD "open-sesame-9"

typedef struct world {
  server server;
  mlfab_store *store;
  const mlfab_files *f;
  char root[64], why[256];
} world;

static void begin_with(world *w, const step *steps, size_t nsteps, mlfab_store_options *o) {
  mlfab_error error = {0};
  server_start(&w->server, steps, nsteps);
  snprintf(w->root, sizeof w->root, "http://127.0.0.1:%d", w->server.port);
  o->size = sizeof *o;
  o->endpoint = w->root;
  if (o->timeout_ns == 0) o->timeout_ns = 20000000000u;
  if (!o->access_key) o->access_key = KEY;
  if (!o->secret_key) o->secret_key = SECRET;
  if (mlfab_store_open(o, &w->store, &error)) fail_msg("%s", error.text);
  w->f = mlfab_store_files(w->store);
}

static void begin(world *w, const step *steps, size_t nsteps) {
  mlfab_store_options o = {0};
  begin_with(w, steps, nsteps, &o);
}

#define BEGIN(w, steps) begin(w, steps, sizeof(steps) / sizeof *(steps))

static void end(world *w) {
  mlfab_store_close(&w->store);
  assert_null(w->store);
  server_stop(&w->server);
}

static const char *path_of(const world *w, int s3, const char *name) {
  static char paths[4][256];
  static int turn;
  char *path = paths[turn++ % 4];
  snprintf(path, sizeof paths[0], "%s/%s", s3 ? "s3://the-bucket/runs/7" : w->root, name);
  return path;
}

/* The call has failed with this number, and its reason has these texts, and nothing secret. */
static void expect_why(world *w, int64_t result, int number, const char *text, const char *other) {
  assert_int_equal(w->f->explain(w->f->user, w->why, sizeof w->why), 0);
  if (result != -number) fail_msg("%lld: %s", (long long)result, w->why);
  if (text && !strstr(w->why, text)) fail_msg("'%s' is not in '%s'", text, w->why);
  if (other && !strstr(w->why, other)) fail_msg("'%s' is not in '%s'", other, w->why);
  assert_null(strstr(w->why, SECRET));
  assert_null(strstr(w->why, TOKEN));
  assert_null(strstr(w->why, "Signature="));
  assert_null(strstr(w->why, PASSWORD));
}

/* Writes a file as core/api/disk.c does. Its first failure. */
static int64_t store_file_of(world *w, int s3, size_t bytes) {
  char *data = malloc(bytes + 1);
  memset(data, 'x', bytes);
  const char *part = path_of(w, s3, "checkpoint-3.manifest.part");
  const char *name = path_of(w, s3, "checkpoint-3.manifest");
  int file = w->f->open(w->f->user, part, 1);
  assert_true(file >= 0);
  int64_t code = 0;
  for (size_t at = 0; at < bytes && code >= 0;) {
    code = w->f->write(w->f->user, file, data + at, bytes - at);
    if (code > 0) at += (size_t)code;
  }
  free(data);
  if (code >= 0) code = w->f->sync(w->f->user, file);
  int closed = w->f->close(w->f->user, file);
  if (code >= 0) code = closed;
  return code < 0 ? code : w->f->rename(w->f->user, part, name);
}

static int64_t read_file_of(world *w, int s3, void *data, size_t bytes, uint64_t offset) {
  int file = w->f->open(w->f->user, path_of(w, s3, "checkpoint-3.manifest"), 0);
  assert_true(file >= 0);
  int64_t n = w->f->read(w->f->user, file, data, bytes, offset);
  assert_int_equal(w->f->close(w->f->user, file), 0);
  return n;
}

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* An answer of so many bytes, with more lines in its head; one without bytes; one that ends with the connection. */
#define SIZED(status, lines, bytes) \
  "HTTP/1.1 " status "\r\n" lines "Content-Length: " bytes "\r\nConnection: close\r\n\r\n"
#define PLAIN(status) SIZED(status, "", "0")
#define CUT(status, body) "HTTP/1.1 " status "\r\nConnection: close\r\n\r\n" body

/* --- attempts --- */

TEST(test_repeats) {
  static const step steps[] = {{.want = {"PUT /checkpoint-3.manifest.part HTTP/1.1\r\n"},
                                .answer = PLAIN("503 Busy"),
                                .body_bytes = 100000},
                               {.want = {"PUT /checkpoint-3.manifest.part HTTP/1.1\r\n"},
                                .answer = "",
                                .body_bytes = 100000},
                               {.want = {"PUT /checkpoint-3.manifest.part HTTP/1.1\r\n"},
                                .answer = SIZED("429 Slow", "Retry-After: 1\r\n", "0"),
                                .body_bytes = 100000},
                               {.want = {"PUT /"},
                                .not_want = "Expect:",
                                .answer = PLAIN("201 Created"),
                                .body_bytes = 100000},
                               {.want = {"MOVE /checkpoint-3.manifest.part HTTP/1.1\r\n",
                                         "/checkpoint-3.manifest\r\n", "Overwrite: T\r\n"},
                                .answer = PLAIN("204 No Content")}};
  world w;
  BEGIN(&w, steps);
  const double began = now_s();
  assert_int_equal(store_file_of(&w, 0, 100000), 0);
  const double seconds = now_s() - began;
  assert_true(seconds >= 1.0 + 0.125 + 0.25 && seconds < 10);
  end(&w);
}

/* What a server refuses is not repeated, nor is the next request sent. */
TEST(test_refused) {
  static const struct {
    const char *answer;
    int number;
    const char *text;
  } cases[] = {{PLAIN("507 Insufficient Storage"), ENOSPC, "507 Insufficient Storage"},
               {PLAIN("403 Forbidden"), EACCES, "403 Forbidden"},
               {PLAIN("401 Unauthorized"), EACCES, "401"},
               {PLAIN("413 Too Large"), EFBIG, "413"},
               {PLAIN("409 Conflict"), EIO, "409 Conflict"},
               {PLAIN("501 Not Implemented"), EIO, "501"},
               {SIZED("302 Found", "Location: file:///etc/passwd\r\n", "0"), EIO,
                "302 Found, a redirect to file:///etc/passwd"},
               {SIZED("307 Moved", "Location: http://127.0.0.1:1/\r\n", "0"), EIO,
                "307 Moved, a redirect to http://127.0.0.1:1/"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const step steps[] = {{.want = {"PUT /"}, .answer = cases[i].answer, .body_bytes = 10}};
    world w;
    BEGIN(&w, steps);
    int64_t code = store_file_of(&w, 0, 10);
    expect_why(&w, code, cases[i].number, "PUT: the answer is ", cases[i].text);
    end(&w);
  }
}

TEST(test_gives_up) {
  static const step one = {.want = {"GET /checkpoint-3.manifest "}, .answer = PLAIN("500 Broken")};
  step steps[6];
  world w;
  char data[10];
  for (int i = 0; i < 6; i++) steps[i] = one;
  BEGIN(&w, steps);
  int64_t n = read_file_of(&w, 0, data, sizeof data, 0);
  expect_why(&w, n, ETIMEDOUT, "500 Broken, 6 attempts in ", "GET: ");
  end(&w);
  /* Nobody listens: until the deadline. */
  mlfab_store_options o = {.timeout_ns = 1500000000u};
  begin_with(&w, NULL, 0, &o);
  snprintf(w.root, sizeof w.root, "http://127.0.0.1:1");
  const double began = now_s();
  n = read_file_of(&w, 0, data, sizeof data, 0);
  expect_why(&w, n, ETIMEDOUT, "attempts in ", "GET: ");
  assert_true(now_s() - began < 4);
  end(&w);
}

/* --- reading --- */

#define PART(first, last, all, tag)                                                               \
  "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes " first "-" last "/" all "\r\nETag: " tag \
  "\r\nConnection: close\r\n"

#define LETTERS "abcdefghijklmnopqrst"

#define RANGE(first) "Range: bytes=" first "-24\r\n"
#define FROM(first, tag, more) PART(first, "24", "100", tag) more "\r\n\r\n"

/* Asks for bytes from `first` to 24, with these texts in its head. */
#define ASKS(first, says, ...) \
  { .want = {"GET /checkpoint-3.manifest ", RANGE(first), __VA_ARGS__}, .answer = says }
#define FIRST(says) \
  { .want = {RANGE("5")}, .not_want = "If-Range", .answer = says }

/* Reads 20 bytes from byte 5 on. */
static const struct {
  const char *what, *data; /* data: the bytes that come; NULL: it fails */
  step steps[4];           /* ended by an empty one */
} reads[] = {
    {"a part that breaks off goes on behind its last byte",
     LETTERS,
     {FIRST(FROM("5", "\"a\"", "Content-Length: 20") "abcdef"),
      ASKS("11", FROM("11", "\"a\"", "Content-Length: 14") "ghij", "If-Range: \"a\"\r\n"),
      ASKS("15", FROM("15", "\"a\"", "Content-Length: 10") "klmnopqrst", "If-Range: \"a\"\r\n")}},
    {"the file has changed while it was read",
     NULL,
     {FIRST(FROM("5", "\"a\"", "Content-Length: 20") "abcdef"),
      ASKS("11", SIZED("200 OK", "ETag: \"b\"\r\n", "10") "0123456789", "If-Range: \"a\"\r\n")}},
    {"without an ETag it begins again",
     "ABCDEFGHIJKLMNOPQRST",
     {FIRST(FROM("5", "W/\"a\"", "Content-Length: 20") "abcdef"),
      FIRST(FROM("5", "W/\"b\"", "Content-Length: 20") "ABCDEFGHIJKLMNOPQRST")}},
    {"the connection breaks off behind the part",
     LETTERS,
     {FIRST(FROM("5", "\"a\"", "Transfer-Encoding: chunked") "14\r\n" LETTERS "\r\n")}},
};

static size_t steps_of(const step *steps) {
  size_t n = 0;
  while (steps[n].want[0] || steps[n].answer) n++;
  return n;
}

TEST(test_reads) {
  for (size_t i = 0; i < sizeof reads / sizeof *reads; i++) {
    world w;
    char data[21] = "";
    begin(&w, reads[i].steps, steps_of(reads[i].steps));
    int64_t n = read_file_of(&w, 0, data, 20, 5);
    if (!reads[i].data) expect_why(&w, n, EIO, reads[i].what, NULL);
    if (reads[i].data && (n != 20 || strcmp(data, reads[i].data) != 0))
      fail_msg("%s: %lld bytes, %s", reads[i].what, (long long)n, data);
    end(&w);
  }
}

/* Answers with other bytes than those that were asked for. */
TEST(test_wrong_parts) {
  static const struct {
    const char *answer;
    size_t zeros;
    const char *text;
  } cases[] = {
      {PART("0", "19", "100", "\"a\"") "Content-Length: 20\r\n\r\nabcdefghijklmnopqrst", 0,
       "another part than the one from byte 5 on"},
      {"HTTP/1.1 206 Partial\r\nConnection: close\r\nContent-Length: "
       "20\r\n\r\nabcdefghijklmnopqrst",
       0, "another part than"},
      {PART("5", "30000", "40000", "\"a\"") "Content-Length: 29996\r\n\r\n", 29996, "more than 20"},
      {PART("5", "24", "100", "\"a\"") "\r\n", ENDLESS, "more than 20"},
      {CUT("200 OK", ""), ENDLESS, "the server has no parts of files"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const step steps[] = {{.want = {"GET /"}, .answer = cases[i].answer, .zeros = cases[i].zeros}};
    world w;
    char data[20];
    BEGIN(&w, steps);
    int64_t n = read_file_of(&w, 0, data, sizeof data, 5);
    assert_true(n == -EIO || n == -EFBIG);
    expect_why(&w, n, (int)-n, cases[i].text, "GET: ");
    end(&w);
  }
}

TEST(test_ends) {
  static const step steps[] = {
      {.want = {"Range: bytes=5-24\r\n"},
       .answer = PART("5", "9", "10", "\"a\"") "Content-Length: 5\r\n\r\nabcde"},
      {.want = {"Range: bytes=10-29\r\n"}, .answer = PLAIN("416 Range Not Satisfiable")},
      {.want = {"GET /"}, .answer = PLAIN("404 Not Found")}};
  world w;
  char data[20];
  BEGIN(&w, steps);
  assert_int_equal(read_file_of(&w, 0, data, 20, 5), 5);
  assert_int_equal(read_file_of(&w, 0, data, 20, 10), 0);
  expect_why(&w, read_file_of(&w, 0, data, 20, 0), ENOENT, "GET: the answer is 404 Not Found",
             NULL);
  end(&w);
}

/* --- S3 --- */

#define XML(status, body_bytes) SIZED(status, "", body_bytes)

TEST(test_skew) {
  char answers[2][1024], body[512], there[32];
  for (int i = 0; i < 2; i++) {
    time_t now = time(NULL) + (i ? -7200 : 1000);
    struct tm t;
    gmtime_r(&now, &t);
    strftime(there, sizeof there, i ? "%a, %d %b %Y %H:%M:%S GMT" : "%Y-%m-%dT%H:%M:%SZ", &t);
    snprintf(
        body, sizeof body,
        "<?xml version=\"1.0\"?>\n<Error><Code>RequestTimeTooSkewed</Code><Message>The difference"
        "</Message>%s%s%s</Error>",
        i ? "" : "<ServerTime>", i ? "" : there, i ? "" : "</ServerTime>");
    snprintf(
        answers[i], sizeof answers[i],
        "HTTP/1.1 403 Forbidden\r\nDate: %s\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n%s",
        i ? there : "", strlen(body), body);
  }
  for (int i = 0; i < 2; i++) {
    const step steps[] = {{.want = {"PUT /the-bucket/runs/7/checkpoint-3.manifest HTTP/1.1\r\n",
                                    "Authorization: AWS4-"},
                           .answer = answers[i],
                           .body_bytes = 10}};
    world w;
    BEGIN(&w, steps);
    int64_t code = store_file_of(&w, 1, 10);
    expect_why(&w, code, EACCES, "RequestTimeTooSkewed: this host's clock is ",
               i ? " s ahead of the server's" : " s behind the server's");
    long seconds = strtol(strstr(w.why, "clock is ") + 9, NULL, 10);
    assert_true(labs(seconds - (i ? 7200 : 1000)) <= 2);
    end(&w);
  }
}

static const char created[] =
    XML("200 OK", "104") "<InitiateMultipartUploadResult><Bucket>b</Bucket><UploadId>up&amp;1/2</UploadId></InitiateMultipartUploadResult>";
static const char part_done[] = SIZED("200 OK", "ETag: \"e1\"\r\n", "0");
#define OBJECT "/the-bucket/runs/7/checkpoint-3.manifest"
#define BEGUN \
  { .want = {"POST " OBJECT "?uploads= HTTP/1.1\r\n"}, .answer = created }
#define UPLOADED(number, bytes)                                                        \
  {                                                                                    \
    .want = {"PUT " OBJECT "?partNumber=" number "&uploadId=up%261%2F2 HTTP/1.1\r\n"}, \
    .answer = part_done, .body_bytes = bytes                                           \
  }
#define UPLOAD BEGUN, UPLOADED("1", 65536), UPLOADED("2", 34464)
#define END(says) \
  { .want = {"POST " OBJECT "?uploadId=up%261%2F2 "}, .body_bytes = 163, .answer = says }
#define COMPLETED XML("200 OK", "58") "<CompleteMultipartUploadResult><ETag>\"x-2\"</ETag></Comp>  "
#define ERROR(bytes, code) XML("200 OK", bytes) "<Error><Code>" code "</Code></Error> "
#define PUT \
  { .answer = PLAIN("201 Created"), .body_bytes = 10 }
#define KEPT \
  { .answer = "HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n", .body_bytes = 10, .keeps = 1 }
#define MOVE(says) \
  { .want = {"MOVE /"}, .answer = says }
#define HAS(path, bytes) \
  { .want = {"HEAD " path}, .answer = XML("200 OK", bytes) }

/* Stores a file: of 100,000 bytes in parts, in S3; of 10 bytes over WebDAV. */
static const struct {
  step steps[7];  /* ended by an empty one */
  int s3, number; /* number: how it fails; 0: not at all */
  const char *text, *other;
} stores[] = {
    {.steps = {UPLOAD, END(COMPLETED)}, .s3 = 1},
    /* The end of an upload may be answered 200 with an error. */
    {.steps = {UPLOAD, END(ERROR("42", "InternalError")), END(COMPLETED)}, .s3 = 1},
    {.steps = {UPLOAD, END(ERROR("40", "InvalidPart"))},
     .s3 = 1,
     .number = EIO,
     .text = "POST: ",
     .other = "200 with InvalidPart"},
    /* Its answer was lost, and it has succeeded: the object has its length. */
    {.steps = {UPLOAD, END(""), END(PLAIN("404 Not Found")), HAS(OBJECT, "100000")}, .s3 = 1},
    {.steps = {UPLOAD, END(""), END(PLAIN("404 Not Found")), HAS("/", "99999")},
     .s3 = 1,
     .number = ENOENT,
     .text = "POST: the answer is 404"},
    /* The answer to a MOVE was lost. */
    {.steps = {PUT, MOVE(""), MOVE(PLAIN("404 Not Found")), HAS("/checkpoint-3.manifest ", "10")}},
    {.steps = {PUT, MOVE(PLAIN("404 Not Found"))},
     .number = ENOENT,
     .text = "MOVE: the answer is 404"},
    /* libcurl itself repeats a request for which a kept connection was closed. */
    {.steps = {KEPT, MOVE(""), MOVE(PLAIN("404 Not Found")), HAS("/checkpoint-3.manifest ", "10")}},
    /* 207 says that a part of it has failed: the file has not got its name. */
    {.steps = {PUT, MOVE(XML("207 Multi-Status", "36") "<D:multistatus>423</D:multistatus>  ")},
     .number = EIO,
     .text = "MOVE: the answer is 207"},
};

TEST(test_stores) {
  for (size_t i = 0; i < sizeof stores / sizeof *stores; i++) {
    mlfab_store_options o = {.part_bytes = 65536};
    world w;
    begin_with(&w, stores[i].steps, steps_of(stores[i].steps), &o);
    int64_t code = store_file_of(&w, stores[i].s3, stores[i].s3 ? 100000 : 10);
    if (stores[i].number)
      expect_why(&w, code, stores[i].number, stores[i].text, stores[i].other);
    else if (code)
      fail_msg("case %zu: %lld", i, (long long)code);
    if (i == 0)
      assert_string_equal(
          w.server.body,
          "<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>\"e1\"</ETag></Part>"
          "<Part><PartNumber>2</PartNumber><ETag>\"e1\"</ETag></Part></CompleteMultipartUpload>");
    end(&w);
  }
}

/* --- lists --- */

TEST(test_lists) {
  static const char dav[] =
      CUT("207 Multi-Status", "<?xml version=\"1.0\"?>\n<D:multistatus xmlns:D=\"DAV:\">")
      "<D:response><D:href>/runs/7/</D:href></D:response><D:response><D:href>/runs/7/"
      "checkpoint-1.manifest</D:href>"
      "</D:response><x:response><x:href "
      "xmlns:x=\"DAV:\">http://h/runs/7/checkpoint%2D2.shard%20x</x:href></x:response>"
      "<D:response><D:href/></D:response><D:response><D:href>/runs/7/other</D:href></D:response>"
      "<D:response><D:href>/runs/7/checkpoint-%32.manifest%</D:href></D:response></D:multistatus>";
  static const step dav_steps[] = {{.want = {"PROPFIND /runs/7/ HTTP/1.1\r\n", "Depth: 1\r\n"},
                                    .answer = dav,
                                    .body_bytes = 95}};
  static const char page1[] =
      CUT("200 OK", "") "<ListBucketResult><Prefix>runs/7/checkpoint-</Prefix>"
      "<Contents><Key>runs/7/checkpoint-1.manifest</Key><Size>1</Size></"
      "Contents><Contents><Key>runs/7/checkpoint-a/b"
      "</Key></Contents><IsTruncated>true</IsTruncated><NextContinuationToken>1&amp;/=</"
      "NextContinuationToken></ListBucketResult>";
  static const char page2[] =
      CUT("200 OK", "") "<ListBucketResult><IsTruncated>false</IsTruncated><Contents>"
      "<Key>runs/7/checkpoint-2&amp;3</Key></Contents></ListBucketResult>";
  static const char uploads[] =
      CUT("200 OK", "") "<ListMultipartUploadsResult><Upload><Key>runs/7/checkpoint-4</Key>"
      "<UploadId>1</UploadId></Upload><Upload><UploadId>2</UploadId><Key>runs/7/checkpoint-5</"
      "Key></Upload>"
      "</ListMultipartUploadsResult>";
  static const step s3_steps[] = {
      {.want = {"GET /the-bucket/?delimiter=%2F&list-type=2&prefix=runs%2F7%2Fcheckpoint- "
                "HTTP/1.1\r\n"},
       .answer = page1},
      {.want = {"GET "
                "/the-bucket/"
                "?continuation-token=1%26%2F%3D&delimiter=%2F&list-type=2&prefix=runs%2F7%"
                "2Fcheckpoint- "},
       .answer = page2},
      {.want = {"GET /the-bucket/?delimiter=%2F&prefix=runs%2F7%2Fcheckpoint-&uploads= "},
       .answer = uploads}};
  static const step denied[] = {{.want = {"list-type=2"}, .answer = page2},
                                {.want = {"uploads="}, .answer = PLAIN("403 Forbidden")}};
  static const step endless[] = {{.want = {"PROPFIND /"},
                                  .answer = CUT("207 Multi-Status", ""),
                                  .zeros = 20 << 20,
                                  .body_bytes = 95}};
  static const step page[] = {
      {.want = {"PROPFIND /"}, .answer = XML("200 OK", "11") "<html>hello", .body_bytes = 95}};
  char names[256] = "", path[128];
  world w;
  BEGIN(&w, dav_steps);
  snprintf(path, sizeof path, "%s/runs/7", w.root);
  int64_t n = w.f->list(w.f->user, path, "checkpoint-", names, sizeof names);
  assert_int_equal(n, strlen("checkpoint-1.manifest\ncheckpoint-2.manifest%\n"));
  assert_memory_equal(names, "checkpoint-1.manifest\ncheckpoint-2.manifest%\n", (size_t)n);
  end(&w);
  BEGIN(&w, s3_steps);
  n = w.f->list(w.f->user, "s3://the-bucket/runs/7", "checkpoint-", names, sizeof names);
  assert_int_equal(
      n, strlen("checkpoint-1.manifest\ncheckpoint-2&3\ncheckpoint-4.part\ncheckpoint-5.part\n"));
  assert_memory_equal(
      names, "checkpoint-1.manifest\ncheckpoint-2&3\ncheckpoint-4.part\ncheckpoint-5.part\n",
      (size_t)n);
  end(&w);
  BEGIN(&w, denied);
  n = w.f->list(w.f->user, "s3://the-bucket/runs/7/", "checkpoint-", names, sizeof names);
  assert_int_equal(n, strlen("checkpoint-2&3\n"));
  end(&w);
  BEGIN(&w, endless);
  n = w.f->list(w.f->user, w.root, "checkpoint-", names, sizeof names);
  expect_why(&w, n, EFBIG, "more than 16777216 bytes", "PROPFIND: ");
  end(&w);
  BEGIN(&w, page);
  n = w.f->list(w.f->user, w.root, "checkpoint-", names, sizeof names);
  expect_why(&w, n, EIO, "200, not 207", NULL);
  end(&w);
  BEGIN(&w, dav_steps);
  snprintf(path, sizeof path, "%s/runs/7/", w.root);
  assert_int_equal(w.f->list(w.f->user, path, "checkpoint-", names, 40), -ERANGE);
  end(&w);
}

/* An answer that is not a whole list is no list without checkpoints. */
TEST(test_lists_that_are_cut) {
  static const struct {
    int s3;
    const char *answer, *text;
  } cases[] = {
      {1, CUT("200 OK", "<html>Please log in</html>"), "GET: the answer is not a whole list"},
      {1,
       CUT("200 OK",
           "<ListBucketResult><Contents><Key>runs/7/checkpoint-1.manifest</Key></Contents>"),
       "GET: the answer is not a whole list"},
      {1, CUT("200 OK", "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"),
       "GET: the list does not say how it goes on"},
      {0,
       CUT("207 Multi-Status",
           "<D:multistatus><D:response><D:href>/checkpoint-1.manifest</D:href>"),
       "PROPFIND: the answer is not a whole list"}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const step steps[] = {{.answer = cases[i].answer, .body_bytes = cases[i].s3 ? 0 : 95}};
    char names[256];
    world w;
    BEGIN(&w, steps);
    const char *path = cases[i].s3 ? "s3://the-bucket/runs/7" : w.root;
    int64_t n = w.f->list(w.f->user, path, "checkpoint-", names, sizeof names);
    expect_why(&w, n, EIO, cases[i].text, NULL);
    end(&w);
  }
}

/* --- removal --- */

TEST(test_removes) {
  static const char uploads[] =
      CUT("200 OK", "") "<R><Upload><Key>runs/7/checkpoint-4</Key><UploadId>one</UploadId></Upload>"
      "<Upload><UploadId>two</UploadId><Key>runs/7/checkpoint-40</Key></Upload>"
      "<Upload><UploadId>three</UploadId><Key>runs/7/checkpoint-4</Key></Upload></R>";
  static const step steps[] = {
      {.want = {"DELETE /the-bucket/runs/7/checkpoint-4 HTTP/1.1\r\n"},
       .answer = PLAIN("204 No Content")},
      {.want = {"GET /the-bucket/?delimiter=%2F&prefix=runs%2F7%2Fcheckpoint-4&uploads= "},
       .answer = uploads},
      {.want = {"DELETE /the-bucket/runs/7/checkpoint-4?uploadId=one "},
       .answer = PLAIN("204 No Content")},
      {.want = {"DELETE /the-bucket/runs/7/checkpoint-4?uploadId=three "},
       .answer = PLAIN("404 Not Found")},
      {.want = {"DELETE /checkpoint-4.part HTTP/1.1\r\n"}, .answer = PLAIN("404 Not Found")}};
  world w;
  BEGIN(&w, steps);
  assert_int_equal(w.f->remove(w.f->user, path_of(&w, 1, "checkpoint-4")), 0);
  assert_int_equal(w.f->remove(w.f->user, path_of(&w, 1, "checkpoint-4.part")), 0);
  assert_int_equal(w.f->remove(w.f->user, path_of(&w, 0, "checkpoint-4.part")), -ENOENT);
  end(&w);
}

/* --- secrets --- */

TEST(test_passwords) {
  static const step steps[] = {
      {.want = {"GET /", "Authorization: Basic bWU6b3Blbi1zZXNhbWUtOQ==\r\n"},
       .answer = PLAIN("401 Who")}};
  static const step signed_steps[] = {
      {.want =
           {"x-amz-security-token: " TOKEN "\r\n",
            "SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token, Signature="},
       .not_want = "Basic",
       .answer = PLAIN("403 No")}};
  mlfab_store_options o = {.user = "me", .password = PASSWORD, .session_token = TOKEN};
  world w;
  char data[10];
  begin_with(&w, steps, 1, &o);
  expect_why(&w, read_file_of(&w, 0, data, 10, 0), EACCES, "401 Who", NULL);
  int code = w.f->open(w.f->user, "http://far.example/checkpoint-1", 0);
  expect_why(&w, code, EACCES, "over https only", NULL);
  code = w.f->open(w.f->user, "http://me:" PASSWORD "@127.0.0.1/checkpoint-1", 0);
  expect_why(&w, code, EINVAL, "no '?', '#', space, user", NULL);
  end(&w);
  begin_with(&w, signed_steps, 1, &o);
  expect_why(&w, read_file_of(&w, 1, data, 10, 0), EACCES, "403 No", NULL);
  end(&w);
}

/* A password that may go to this host in clear does not go to a proxy. */
TEST(test_no_password_for_a_proxy) {
  static const step steps[] = {
      {.want = {"GET /checkpoint-3.manifest ", "Authorization: Basic "},
       .answer = PART("0", "9", "10", "\"a\"") "Content-Length: 10\r\n\r\nabcdefghij"}};
  mlfab_store_options o = {.user = "me", .password = PASSWORD, .timeout_ns = 1000000000};
  world w;
  char data[10];
  begin_with(&w, steps, 1, &o);
  setenv("http_proxy", "http://127.0.0.1:1", 1);
  int64_t n = read_file_of(&w, 0, data, 10, 0);
  unsetenv("http_proxy");
  assert_int_equal(n, 10);
  end(&w);
}

/* --- cancel --- */

static void *cancels(void *user) {
  world *w = user;
  usleep(300000);
  w->f->cancel(w->f->user, 1);
  return NULL;
}

TEST(test_cancel) {
  static const step hangs[] = {{.answer = NULL}};
  static const step pauses[] = {{.answer = "HTTP/1.1 503 Busy\r\nRetry-After: "
                                           "15\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"}};
  for (int i = 0; i < 2; i++) {
    world w;
    pthread_t thread;
    char data[10];
    begin(&w, i ? pauses : hangs, 1);
    assert_int_equal(pthread_create(&thread, NULL, cancels, &w), 0);
    const double began = now_s();
    int64_t n = read_file_of(&w, 0, data, 10, 0);
    expect_why(&w, n, ECANCELED, "GET: cancelled", NULL);
    assert_true(now_s() - began < 4);
    pthread_join(thread, NULL);
    w.f->cancel(w.f->user, 0);
    end(&w);
  }
}

typedef struct sender {
  world *w;
  int file, code;
} sender;

static void *sends(void *user) {
  sender *s = user;
  s->code = s->w->f->sync(s->w->f->user, s->file);
  return NULL;
}

/* A child that was forked during a transfer closes its copy, and waits for nobody. The parent's transfer goes on. */
TEST(test_fork) {
  static const step steps[] = {{.want = {"PUT /"}, .answer = NULL, .body_bytes = 10}};
  world w;
  pthread_t thread;
  int status = -1;
  BEGIN(&w, steps);
  sender s = {.w = &w, .file = w.f->open(w.f->user, path_of(&w, 0, "checkpoint-1.part"), 1)};
  assert_true(s.file >= 0);
  assert_int_equal(w.f->write(w.f->user, s.file, "0123456789", 10), 10);
  assert_int_equal(pthread_create(&thread, NULL, sends, &s), 0);
  usleep(300000);
  pid_t child = fork();
  if (child == 0) {
    alarm(100);
    int code = w.f->close(w.f->user, s.file);
    int opened = w.f->open(w.f->user, path_of(&w, 0, "checkpoint-1"), 0);
    char byte;
    int64_t n = w.f->read(w.f->user, opened, &byte, 1, 0);
    mlfab_store_close(&w.store);
    _exit(code == 0 && n < 0 && !w.store ? 0 : 1);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  w.f->cancel(w.f->user, 1);
  pthread_join(thread, NULL);
  assert_int_equal(s.code, -ECANCELED);
  w.f->cancel(w.f->user, 0);
  assert_int_equal(w.f->close(w.f->user, s.file), 0);
  end(&w);
}

/* --- the table --- */

TEST(test_table) {
  world w;
  char path[64], data[8] = "";
  begin(&w, NULL, 0);
  /* Other paths are local. */
  snprintf(path, sizeof path, "/tmp/mlfab-store-test-%d", (int)getpid());
  int file = w.f->open(w.f->user, path, 1);
  assert_true(file >= 0);
  assert_int_equal(w.f->write(w.f->user, file, "hello", 5), 5);
  assert_int_equal(w.f->sync(w.f->user, file), 0);
  assert_int_equal(w.f->close(w.f->user, file), 0);
  file = w.f->open(w.f->user, path, 0);
  assert_int_equal(w.f->read(w.f->user, file, data, 8, 1), 4);
  assert_string_equal(data, "ello");
  assert_int_equal(w.f->close(w.f->user, file), 0);
  assert_int_equal(w.f->rename(w.f->user, path, path_of(&w, 0, "checkpoint-1")), -EXDEV);
  assert_int_equal(w.f->remove(w.f->user, path), 0);
  assert_int_equal(w.f->open(w.f->user, path, 0), -ENOENT);
  assert_int_equal(w.f->explain(w.f->user, w.why, sizeof w.why), -1);
  /* Of a store only files of checkpoints. */
  expect_why(&w, w.f->open(w.f->user, path_of(&w, 0, "model.safetensors"), 0), EINVAL,
             "only files of checkpoints", NULL);
  expect_why(&w, w.f->open(w.f->user, "s3://B/checkpoint-1", 0), EINVAL, "s3://BUCKET/PREFIX",
             NULL);
  expect_why(&w, w.f->open(w.f->user, "http:///checkpoint-1", 0), EINVAL, "http[s]://HOST/PATH",
             NULL);
  expect_why(
      &w,
      w.f->rename(w.f->user, path_of(&w, 0, "checkpoint-1.part"), path_of(&w, 0, "checkpoint-1")),
      ENOENT, "not written by this process", NULL);
  /* Files that are given up: no more than there is room for are kept. */
  for (int i = 0; i < 40; i++) {
    snprintf(path, sizeof path, "s3://the-bucket/checkpoint-%d.part", i);
    file = w.f->open(w.f->user, path, 1);
    assert_true(file >= 0);
    assert_int_equal(w.f->sync(w.f->user, file), 0);
    assert_int_equal(w.f->close(w.f->user, file), 0);
    assert_int_equal(w.f->close(w.f->user, file), -EBADF);
    assert_int_equal(w.f->write(w.f->user, file, "x", 1), -EBADF);
  }
  end(&w);
  /* Where nothing can be spooled. */
  mlfab_store_options o = {.spool_dir = "/does/not/exist"};
  begin_with(&w, NULL, 0, &o);
  expect_why(&w, w.f->open(w.f->user, path_of(&w, 0, "checkpoint-1.part"), 1), ENOENT,
             "a temporary file in '/does/not/exist'", NULL);
  end(&w);
}

static void refused(mlfab_store_options o, const char *text) {
  mlfab_store *store = NULL;
  mlfab_error error = {0};
  if (o.size == 0) o.size = sizeof o;
  assert_int_equal(mlfab_store_open(&o, &store, &error), MLFAB_ERR_ARGUMENT);
  assert_null(store);
  if (!strstr(error.text, text)) fail_msg("'%s' is not in '%s'", text, error.text);
  assert_null(strstr(error.text, SECRET));
}

TEST(test_options) {
  mlfab_store *store = NULL;
  refused((mlfab_store_options){.size = 4}, "options.size");
  refused((mlfab_store_options){.reserved = 1}, "options.size");
  refused((mlfab_store_options){.part_bytes = 1}, "part_bytes");
  refused((mlfab_store_options){.timeout_ns = UINT64_MAX}, "timeout_ns");
  refused((mlfab_store_options){.access_key = KEY}, "need each other");
  refused((mlfab_store_options){.secret_key = SECRET}, "need each other");
  refused((mlfab_store_options){.password = SECRET}, "without user");
  refused((mlfab_store_options){.user = "a:b"}, "a user with ':'");
  refused((mlfab_store_options){.user = "a\nb"}, "user has a line break");
  refused((mlfab_store_options){.secret_key = SECRET "\r\n", .access_key = KEY},
          "secret_key has a line break");
  refused((mlfab_store_options){.region = "eu/1"}, "region");
  refused((mlfab_store_options){.endpoint = "ftp://host"}, "endpoint");
  refused((mlfab_store_options){.endpoint = "https://user@host"}, "endpoint");
  refused((mlfab_store_options){.endpoint = "https://host/path"}, "endpoint");
  assert_int_equal(mlfab_store_open(NULL, NULL, NULL), MLFAB_ERR_ARGUMENT);
  static const char *const wrong[] = {"0",
                                      "0MB",
                                      "16mb",
                                      "16 MB",
                                      "1.5MB",
                                      "-1",
                                      "MB",
                                      "1ms",
                                      "1e6",
                                      "20000000TB",
                                      "99999999999999999999"};
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    setenv("MLFAB_STORE_PART_BYTES", wrong[i], 1);
    refused((mlfab_store_options){0}, "MLFAB_STORE_PART_BYTES is not a size above 0");
  }
  setenv("MLFAB_STORE_PART_BYTES", "6GiB", 1); /* the unit counts: the limit is 5 GiB */
  refused((mlfab_store_options){0}, "part_bytes is not from 64 KiB to 5 GiB");
  setenv("MLFAB_STORE_PART_BYTES", "63KiB", 1);
  refused((mlfab_store_options){0}, "part_bytes is not from 64 KiB to 5 GiB");
  setenv("MLFAB_STORE_PART_BYTES", "5MB", 1);
  static const char *const times[] = {"0s", "5MB", "1sec", "99999999999h"};
  for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
    setenv("MLFAB_STORE_TIMEOUT_MS", times[i], 1);
    refused((mlfab_store_options){0}, "MLFAB_STORE_TIMEOUT_MS is not a time above 0");
  }
  setenv("MLFAB_STORE_TIMEOUT_MS", "25h", 1);
  refused((mlfab_store_options){0}, "timeout_ns is more than a day");
  setenv("MLFAB_STORE_TIMEOUT_MS", "30s", 1);
  setenv("AWS_ENDPOINT_URL", "https://host:9000/", 1);
  assert_int_equal(mlfab_store_open(NULL, &store, NULL), 0);
  mlfab_store_close(&store);
  mlfab_store_close(&store);
  mlfab_store_close(NULL);
  unsetenv("MLFAB_STORE_TIMEOUT_MS");
  unsetenv("MLFAB_STORE_PART_BYTES");
  unsetenv("AWS_ENDPOINT_URL");
}

int main(int argc, char **argv) {
  static const char *variables[] = {
      "AWS_ACCESS_KEY_ID",  "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",   "AWS_REGION",
      "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL",      "AWS_ENDPOINT_URL_S3", "http_proxy",
      "MLFAB_STORE_USER",   "MLFAB_STORE_PASSWORD",  "MLFAB_STORE_CA",      "TMPDIR"};
  for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) unsetenv(variables[i]);
  return testing_run(argc - 1, argv + 1, NULL, NULL);
}
