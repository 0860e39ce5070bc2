/* test_middle.c - a fabric with a key over TCP, and somebody between two nodes who changes the stream of bytes.
 *
 * Two hand-driven nodes with real sockets and virtual time: node 0 serves, both are workers. All connections of node 1 go
 * through the test. It cuts the streams into frames, and repeats, leaves out, inserts or changes bytes of a chosen one. It
 * makes checksums right, since everybody can compute them. The oracle: each such frame costs its link, long before
 * silent_death_ns; the calls end well; the model has every push once. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1
#endif
#include "core/node/node.h"
#include "core/wire/wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../testing.h"

#define BEAT 50000000u
#define STEP 10000000u
#define LIMIT (100 * (uint64_t)BEAT) /* a sixth of silent_death_ns */
enum { PAIRS = 8, HEADS = 140, COUNT_MOST = 100000, STREAM = 1 << 20 };
static const char KEY[] = "0123456789abcdef0123456789abcdef";

#define SUBMIT(i, request_p, name, ...)                                                         \
  mlfab_node_submit(                                                                            \
      n.node[i],                                                                                \
      &(mlfab_call){.size = sizeof(mlfab_call), .kind = MLFAB_CALL_##name, __VA_ARGS__}, n.now, \
      request_p)

/* The change at byte k of the frame. */
enum {
  REPEAT_BEFORE, /* the first k bytes come once more, before it */
  REPEAT_BEHIND, /* or behind it */
  CUT_BEGIN,     /* the first k bytes are left out */
  CUT_END,       /* those from k on */
  HOLE,          /* some bytes from k on */
  INSERT,        /* bytes are inserted at k */
  CHANGE,        /* a bit of byte k */
  HOWS
};
static const char *const names[HOWS] = {"a repeat before", "a repeat behind", "the begin cut",
                                        "the end cut",     "a hole",          "an insertion",
                                        "a change"};

/* One direction of a connection: bytes that are no whole frame yet. */
typedef struct stream {
  uint8_t *bytes;
  size_t held;
} stream;

typedef struct pair {
  int fd[2]; /* to node 1, to node 0; -1: free */
  stream from[2];
} pair;

static struct {
  mlfab_node *node[2];
  void *self[2];
  char address[2][256];
  mlfab_env env;
  uint64_t now;
  pair pairs[PAIRS];
  int listener;
  char middle[64]; /* the address of the test */
  /* The frame to change: the next of this type on a stream from this node. */
  int armed, from, how;
  uint8_t type;
  size_t at;
  size_t bytes; /* of the last such frame */
  uint32_t words;
  char logged[256];
} n;

static uint64_t clock_now(void *user) { return (void)user, n.now; }

static void log_line(void *user, int level, const char *line) {
  (void)user, (void)level;
  if (!strstr(line, "was altered or repeated on its way")) return;
  n.words++;
  snprintf(n.logged, sizeof n.logged, "%s", line);
}

static const mlfab_transport *tcp(void) { return mlfab_transport_tcp(); }

/* --- in between --- */

static void put(int fd, const uint8_t *at, size_t bytes) {
  while (bytes > 0) {
    ssize_t k = send(fd, at, bytes, MSG_NOSIGNAL);
    if (k < 0 && errno == EINTR) continue;
    if (k < 0) return; /* the end has closed it */
    at += k;
    bytes -= (size_t)k;
  }
}

static void checksum(uint8_t *frame, size_t head_bytes) {
  uint8_t tag[MLFAB__TAG_BYTES];
  uint32_t crc =
      mlfab__crc32c(0, frame + MLFAB_HEADER_BYTES, (uint32_t)head_bytes - MLFAB_HEADER_BYTES);
  memcpy(frame + 12, &crc, 4);
  memcpy(tag, frame + MLFAB__TAG_AT, sizeof tag);
  mlfab__wire_tag(frame, tag);
}

static void alter(int fd, uint8_t *frame, size_t bytes, size_t head_bytes) {
  static const uint8_t extra[40] = "MLFB\x09\x0b what somebody has inserted here";
  size_t k = n.at, some = 1 + k % 61;
  switch (n.how) {
    case REPEAT_BEFORE:
      put(fd, frame, k);
      put(fd, frame, bytes);
      break;
    case REPEAT_BEHIND:
      put(fd, frame, bytes);
      put(fd, frame, k);
      break;
    case CUT_BEGIN:
      put(fd, frame + k, bytes - k);
      break;
    case CUT_END:
      put(fd, frame, k);
      break;
    case HOLE:
      put(fd, frame, k);
      if (k + some < bytes) put(fd, frame + k + some, bytes - k - some);
      break;
    case INSERT:
      put(fd, frame, k);
      put(fd, extra, some < sizeof extra ? some : sizeof extra);
      put(fd, frame + k, bytes - k);
      break;
    default:
      frame[k] ^= 1;
      checksum(frame, head_bytes);
      put(fd, frame, bytes);
      break;
  }
}

/* Passes whole frames on. 1: some. */
static int pass(pair *p, int side) {
  stream *s = &p->from[side];
  ssize_t k = recv(p->fd[side], s->bytes + s->held, STREAM - s->held, MSG_DONTWAIT);
  if (k < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
  if (k <= 0) {
    close(p->fd[0]);
    close(p->fd[1]);
    p->fd[0] = p->fd[1] = -1;
    return 1;
  }
  s->held += (size_t)k;
  size_t done = 0;
  for (uint32_t head_bytes, bulk_bytes; s->held - done >= MLFAB_HEADER_BYTES;) {
    uint64_t header[MLFAB_HEADER_BYTES / 8];
    uint8_t *frame = s->bytes + done;
    memcpy(header, frame, sizeof header);
    assert_int_equal(mlfab_frame_check(header, &head_bytes, &bulk_bytes), 0);
    size_t bytes = (size_t)head_bytes + bulk_bytes;
    if (s->held - done < bytes) break;
    int from = side == 0, armed = n.armed && from == n.from && frame[5] == n.type;
    if (armed) {
      n.armed = 0;
      n.bytes = bytes;
      alter(p->fd[!side], frame, bytes, head_bytes);
    } else {
      put(p->fd[!side], frame, bytes);
    }
    done += bytes;
  }
  s->held -= done;
  memmove(s->bytes, s->bytes + done, s->held);
  return 1;
}

static uint16_t port_of(const char *address) {
  return (uint16_t)strtoul(strrchr(address, ':') + 1, NULL, 10);
}

static int meet(void) {
  int fd = accept(n.listener, NULL, NULL), i = 0;
  if (fd < 0) return 0;
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port_of(n.address[0]))};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  while (i < PAIRS && n.pairs[i].fd[0] >= 0) i++;
  assert_true(i < PAIRS);
  pair *p = &n.pairs[i];
  p->fd[0] = fd;
  p->fd[1] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(connect(p->fd[1], (const struct sockaddr *)(const void *)&to, sizeof to), 0);
  for (int side = 0; side < 2; side++) {
    setsockopt(p->fd[side], IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    p->from[side].held = 0;
    if (!p->from[side].bytes) p->from[side].bytes = malloc(STREAM);
  }
  return 1;
}

/* --- the nodes --- */

static int act(int i, const mlfab_action *a) {
  switch (a->kind) {
    case MLFAB_ACTION_CONNECT:
      return tcp()->connect(n.self[i], i ? n.middle : a->address, a->token);
    case MLFAB_ACTION_SEND:
      return tcp()->send(n.self[i], a->link, a->head, a->head_bytes, a->bulk, a->bulk_bytes,
                         a->token);
    case MLFAB_ACTION_DETACH:
      return tcp()->detach(n.self[i], a->link, a->token);
    case MLFAB_ACTION_PROBE:
      return tcp()->probe(n.self[i], a->link);
    case MLFAB_ACTION_DISCONNECT:
      tcp()->disconnect(n.self[i], a->link);
      return 0;
    default:
      return MLFAB_ERR_UNSUPPORTED;
  }
}

static int move(int i) {
  mlfab_io_event event;
  mlfab_action a;
  int moved = 0;
  for (;;) {
    while (mlfab_node_next(n.node[i], n.now, &a)) {
      mlfab_node_done(n.node[i], &a, act(i, &a), n.now);
      moved = 1;
    }
    tcp()->flush(n.self[i]);
    if (!tcp()->poll(n.self[i], &event)) break;
    if (event.kind == MLFAB_IO_UP) event.caps |= tcp()->caps;
    mlfab_node_event(n.node[i], &event, n.now);
    tcp()->release(n.self[i], &event);
    moved = 1;
  }
  if (mlfab_node_deadline(n.node[i]) <= n.now) mlfab_node_tick(n.node[i], n.now);
  return moved;
}

/* Time passes when nothing moves. */
static void turn(void) {
  int moved = meet();
  for (int i = 0; i < 2; i++) moved |= move(i);
  for (int i = 0; i < PAIRS; i++)
    for (int side = 0; side < 2; side++)
      if (n.pairs[i].fd[0] >= 0) moved |= pass(&n.pairs[i], side);
  if (moved) return;
  n.now += STEP;
  usleep(100); /* bytes may be on their way */
}

static int finish(int i, mlfab_request request) {
  mlfab_result result = {0};
  for (int done = 0; !done; turn())
    assert_int_equal(mlfab_node_test(n.node[i], request, &done, &result), 0);
  if (result.status) {
    mlfab_error error;
    mlfab_node_last_error(n.node[i], &error);
    fail_msg("%s", error.text);
  }
  return result.status;
}

static uint64_t refused(void) {
  uint64_t sum = 0;
  for (int i = 0; i < 2; i++) {
    mlfab_stats s;
    assert_int_equal(mlfab_node_stats(n.node[i], &s, sizeof s), 0);
    sum += s.frames_refused + s.strangers_refused;
  }
  return sum;
}

static void node_begin(int i) {
  mlfab_config c;
  mlfab_error error;
  mlfab_config_init(&c);
  c.rank = i;
  c.workers = 2;
  c.heartbeat_ns = BEAT;
  c.timeout_ns = 60000000000u;
  c.env = &n.env;
  c.entropy[0] = (uint8_t)i;
  strcpy(c.key, KEY);
  snprintf(c.coordinator, sizeof c.coordinator, "%s", n.address[0]);
  assert_int_equal(mlfab_node_open(&c, n.address[i], n.now, &n.node[i], &error), 0);
}

static void begin(uint32_t count) {
  static float w[COUNT_MOST];
  mlfab_buf first = {0, 0, w, count};
  mlfab_model_options o = {.size = sizeof o, .sync = MLFAB_SYNC_ASYNC};
  mlfab_request request[2];
  memset(&n, 0, sizeof n);
  n.now = 1000000000;
  n.env = (mlfab_env){.size = sizeof n.env, .clock = clock_now, .log = log_line};
  n.env.log_level = MLFAB_LOG_WARN;
  for (int i = 0; i < PAIRS; i++) n.pairs[i].fd[0] = -1;
  mlfab__env env;
  assert_int_equal(mlfab__env_init(&env, &n.env), 0);
  for (int i = 0; i < 2; i++) {
    mlfab_error error = {0};
    mlfab_transport_options options = {.size = sizeof options,
                                       .keyed = 1,
                                       .listen = "tcp:127.0.0.1:0",
                                       .job = "test",
                                       .env = &env.hooks,
                                       .error = &error};
    assert_int_equal(tcp()->open(&options, &n.self[i], n.address[i]), 0);
  }
  struct sockaddr_in at = {.sin_family = AF_INET};
  socklen_t bytes = sizeof at;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  n.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  assert_int_equal(bind(n.listener, (const struct sockaddr *)(const void *)&at, sizeof at), 0);
  assert_int_equal(listen(n.listener, 16), 0);
  assert_int_equal(getsockname(n.listener, (struct sockaddr *)(void *)&at, &bytes), 0);
  snprintf(n.middle, sizeof n.middle, "tcp:127.0.0.1:%u", ntohs(at.sin_port));
  for (int i = 0; i < 2; i++) node_begin(i);
  while (mlfab_node_ready(n.node[0], NULL) != 1 || mlfab_node_ready(n.node[1], NULL) != 1) turn();
  for (int i = 0; i < 2; i++) {
    assert_int_equal(SUBMIT(i, NULL, TENSOR_ADD, .tensor = 0, .dtype = MLFAB_F32, .count = count),
                     0);
    assert_int_equal(SUBMIT(i, &request[i], MODEL_START, .options = &o, .bufs = &first, .n = 1), 0);
  }
  for (int i = 0; i < 2; i++) finish(i, request[i]);
  assert_int_equal(refused(), 0);
}

static void end(void) {
  for (int i = 1; i >= 0; i--) {
    mlfab_node_close(&n.node[i]);
    tcp()->close(n.self[i]);
  }
  for (int i = 0; i < PAIRS; i++) {
    if (n.pairs[i].fd[0] >= 0) (void)close(n.pairs[i].fd[0]), (void)close(n.pairs[i].fd[1]);
    for (int side = 0; side < 2; side++) free(n.pairs[i].from[side].bytes);
  }
  close(n.listener);
}

/* --- tests --- */

/* Node 1 pushes and pulls; the oracle is above. `type`: of the frame that is changed, of one of the calls. */
static void once(uint32_t count, float pushes, int from, uint8_t type, int how, size_t at) {
  static float one[COUNT_MOST], w[COUNT_MOST];
  mlfab_buf u = {0, 0, one, count}, b = {0, 0, w, count};
  mlfab_request request;
  for (uint32_t k = 0; k < count; k++) one[k] = 1;
  uint64_t before = refused(), since = n.now;
  uint32_t words = n.words;
  n.armed = how < HOWS;
  n.from = from;
  n.type = type;
  n.how = how;
  n.at = at;
  assert_int_equal(SUBMIT(1, &request, PUSH, .bufs = &u, .n = 1), 0);
  finish(1, request);
  assert_int_equal(SUBMIT(1, &request, PULL, .bufs = &b, .n = 1), 0);
  finish(1, request);
  for (uint32_t k = 0; k < count; k++)
    if (w[k] != pushes)
      fail_msg("weight %u is %g after %g pushes", k, (double)w[k], (double)pushes);
  assert_int_equal(n.armed, 0);
  if (how == HOWS) return;
  while (refused() == before && n.now - since < LIMIT) turn();
  if (n.now - since >= LIMIT || refused() == before)
    fail_msg("%s at byte %zu of a %s with %zu: %g beats, %s", names[how], at,
             mlfab__frame_name(type), n.bytes, (double)(n.now - since) / BEAT,
             refused() == before ? "and nobody noticed" : "until the link was made anew");
  assert_true(n.words > words);
  assert_non_null(
      strstr(n.logged, from ? "a frame from worker 1 was" : "a frame from server 0 was"));
}

/* Every way at bytes of a frame of this type: each `step` in its head, each `stride` behind it. */
static void everywhere(uint32_t count, int from, uint8_t type, size_t step, size_t stride) {
  float pushes = 0;
  begin(count);
  once(count, ++pushes, from, type, CHANGE, MLFAB_HEADER_BYTES);
  size_t bytes = n.bytes;
  for (int how = 0; how < HOWS; how++) {
    size_t whole = how == REPEAT_BEFORE || how == REPEAT_BEHIND || how == CUT_BEGIN;
    for (size_t k = whole; k < bytes + whole; k += k < HEADS ? step : stride) {
      if (how == CHANGE && k >= 8 && k < 16) continue; /* the checksums, which are made right */
      once(count, ++pushes, from, type, how, k);
    }
  }
  end();
}

TEST(test_small_push) { everywhere(30, 1, MLFAB__PUSH, 2, 17); }
TEST(test_push) { everywhere(300, 1, MLFAB__PUSH, 13, 197); }
TEST(test_model) { everywhere(300, 0, MLFAB__MODEL, 3, 197); }
TEST(test_large_push) { everywhere(COUNT_MOST, 1, MLFAB__PUSH, 47, 16001); }
TEST(test_chunk) { everywhere(COUNT_MOST, 1, MLFAB__CHUNK, 47, 48001); }
TEST(test_large_model) { everywhere(COUNT_MOST, 0, MLFAB__MODEL, 47, 16001); }

TESTS(NULL, NULL)
