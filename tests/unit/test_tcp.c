/* test_tcp.c - properties of TCP only: addresses, refusals, interface names, strangers. tests/conform
 * checks that frames arrive correctly. */
#include "../../core/wire/wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fenv.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sched.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/uio.h>
#include <unistd.h>
#if defined(__linux__)
#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/tcp.h>
#include <sys/syscall.h>
#else
#include <netinet/tcp.h>
#endif

#include "../testing.h"

/* --- a simulated kernel ----------------------------------------------------------------------- */

#if defined(SYS_epoll_pwait2) && defined(__LP64__)
static int pwaits;      /* number of calls of epoll_pwait2 */
static int pwait_error; /* its result */

/* Replaces the C library's function. The transport calls epoll_pwait2 only through it. */
long syscall(long number, ...) {
  if (number == SYS_epoll_pwait2) pwaits++;
  errno = number == SYS_epoll_pwait2 ? pwait_error : ENOSYS;
  return -1;
}
#endif

#if defined(__linux__)
static const struct tcp_info *tcp_told; /* TCP_INFO of every connection, unless NULL */

int getsockopt(int fd, int level, int name, void *value, socklen_t *bytes) {
  int (*real)(int, int, int, void *, socklen_t *);
  void *address = dlsym(RTLD_NEXT, "getsockopt");
  if (tcp_told && level == IPPROTO_TCP && name == TCP_INFO) {
    if (*bytes > sizeof *tcp_told) *bytes = sizeof *tcp_told;
    memcpy(value, tcp_told, *bytes);
    return 0;
  }
  memcpy(&real, &address, sizeof real);
  return real(fd, level, name, value, bytes);
}
#endif

/* --- one end ---------------------------------------------------------------------------------- */

typedef struct end {
  void *self;
  char address[256];
  mlfab_error error;
  mlfab_env env;
  int64_t bytes;
  int allocations_left; /* negative: unlimited */
  char logged[512];
  int ups, downs, frames, refused;
  int heads, midst; /* headers that were reported before their frames; in the midst of a frame */
  uint32_t link;
  int32_t code;
  char text[400];
  uint64_t now_ns; /* the time of its clock */
} end;

static end a, b; /* of the test that runs */

static void *end_allocate(void *user, size_t bytes) {
  end *e = user;
  if (e->allocations_left == 0) return NULL;
  if (e->allocations_left > 0) e->allocations_left--;
  e->bytes += (int64_t)bytes;
  return malloc(bytes);
}

static void end_release(void *user, void *memory, size_t bytes) {
  end *e = user;
  e->bytes -= (int64_t)bytes;
  free(memory);
}

static uint64_t end_clock(void *user) { return ((end *)user)->now_ns; }

static void end_log(void *user, int level, const char *line) {
  end *e = user;
  (void)level;
  snprintf(e->logged, sizeof e->logged, "%s", line);
}

static const mlfab_transport *tcp(void) { return mlfab_transport_tcp(); }

static int unkeyed;              /* 1: ends have neither a key nor allow_insecure */
static const mlfab_layer *layer; /* of the ends */

static int end_open_limited(end *e, const char *listen, const char *ifname, uint32_t insecure,
                            int allocations) {
  memset(e, 0, sizeof *e);
  e->allocations_left = allocations;
  e->env = (mlfab_env){.size = sizeof e->env,
                       .log_level = MLFAB_LOG_DEBUG,
                       .user = e,
                       .allocate = end_allocate,
                       .release = end_release,
                       .clock = end_clock,
                       .log = end_log};
  mlfab_transport_options options = {.size = sizeof options,
                                     .allow_insecure = insecure,
                                     .keyed = unkeyed ? 0 : 1,
                                     .listen = listen,
                                     .ifname = ifname,
                                     .job = "test",
                                     .env = &e->env,
                                     .error = &e->error,
                                     .layer = layer};
  return tcp()->open(&options, &e->self, e->address);
}

static int end_open(end *e, const char *listen, const char *ifname, uint32_t insecure) {
  int status = end_open_limited(e, listen, ifname, insecure, -1);
  if (status) {
    assert_null(e->self);
    assert_int_equal(e->error.code, status);
    assert_int_equal(e->bytes, 0);
  }
  return status;
}

static void end_close(end *e) {
  if (e->self) tcp()->close(e->self);
  e->self = NULL;
  assert_int_equal(e->bytes, 0);
}

static void end_poll(end *e) {
  mlfab_io_event event;
  tcp()->flush(e->self);
  while (tcp()->poll(e->self, &event)) {
    if (event.kind == MLFAB_IO_UP) e->ups++, e->link = event.link;
    if (event.kind == MLFAB_IO_DOWN) e->downs++;
    if (event.kind == MLFAB_IO_FRAME) e->frames++;
    if (event.kind == MLFAB_IO_HEAD) event.token ? e->midst++ : e->heads++;
    if (event.kind == MLFAB_IO_REFUSED) e->refused++;
    if (event.code) e->code = event.code;
    if (event.text) snprintf(e->text, sizeof e->text, "%s", event.text);
    tcp()->release(e->self, &event);
  }
}

/* Polls one or two ends until the condition holds; fails after twenty seconds. */
#define UNTIL(a, b, condition)                                 \
  for (int tries = 0; !(condition); tries++) {                 \
    if (tries > 100000) fail_msg("waited for %s", #condition); \
    end_poll(a);                                               \
    end_poll(b);                                               \
    usleep(200);                                               \
  }

static uint16_t port_of(const char *address) {
  return (uint16_t)strtoul(strrchr(address, ':') + 1, NULL, 10);
}

static int stranger(const end *e) {
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port_of(e->address))};
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_true(fd >= 0);
  assert_int_equal(connect(fd, (const struct sockaddr *)(const void *)&to, sizeof to), 0);
  assert_int_equal(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)), 0);
  return fd;
}

static uint32_t frame(uint8_t head[128], uint8_t protocol) {
  mlfab__header header = {.protocol = MLFAB_PROTOCOL, .type = MLFAB__HEARTBEAT};
  mlfab__heartbeat beat = {.sent_ns = 5};
  header.meta_bytes = mlfab__encode_heartbeat(head + MLFAB_HEADER_BYTES, &beat);
  mlfab__wire_seal(head, &header, NULL);
  /* Sealing refuses protocol 0, so the byte is set afterwards and the header's checksum computed again. */
  head[4] = protocol;
  memset(head + 8, 0, 4);
  uint32_t crc = mlfab__crc32c(0, head, MLFAB_HEADER_BYTES);
  for (int i = 0; i < 4; i++) head[8 + i] = (uint8_t)(crc >> 8 * i);
  return MLFAB_HEADER_BYTES + header.meta_bytes;
}

/* Sends a small frame from an end, or from a plain socket. */
static void beat(const end *e, uint32_t link) {
  uint8_t head[128];
  uint32_t bytes = frame(head, MLFAB_PROTOCOL);
  assert_int_equal(tcp()->send(e->self, link, head, bytes, NULL, 0, 0), 0);
}

static void stranger_beats(int fd) {
  uint8_t head[128];
  uint32_t bytes = frame(head, MLFAB_PROTOCOL);
  assert_int_equal(send(fd, head, bytes, MSG_NOSIGNAL), bytes);
}

/* The head of a chunk, in `head`. */
static void seal_chunk(uint8_t *head, const void *bulk, uint32_t bytes) {
  mlfab__header header = {.protocol = MLFAB_PROTOCOL,
                          .type = MLFAB__CHUNK,
                          .flags = MLFAB__WIRE_BULK_CRC,
                          .bulk_bytes = bytes};
  mlfab__wire_seal(head, &header, bulk);
}

/* Sends this chunk until there is no room. Returns how often. */
static int fill(const void *head, const void *bulk, uint32_t bytes, uint64_t token) {
  int sent = 0;
  while (!tcp()->send(a.self, a.link, head, MLFAB_HEADER_BYTES, bulk, bytes, token)) sent++;
  return sent;
}

static void poll_for(end *e, int times, useconds_t us) {
  for (int i = 0; i < times; i++) {
    end_poll(e);
    usleep(us);
  }
}

/* All descriptors of the process are taken, up to a limit. */
static int taken[4096], ntaken;
static struct rlimit before_taking;

static void take_descriptors(rlim_t limit) {
  assert_int_equal(getrlimit(RLIMIT_NOFILE, &before_taking), 0);
  struct rlimit few = before_taking;
  few.rlim_cur = mlfab__min(few.rlim_cur, limit);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
  while (ntaken < 4096 && (taken[ntaken] = dup(0)) >= 0) ntaken++;
  assert_int_equal(errno, EMFILE);
}

static void give_descriptors_back(void) {
  while (ntaken > 0) close(taken[--ntaken]);
  assert_int_equal(setrlimit(RLIMIT_NOFILE, &before_taking), 0);
}
/* A first frame. */
static void greet(end *from, end *to) {
  int before = to->frames;
  beat(from, from->link);
  UNTIL(from, to, to->frames == before + 1);
  to->frames = before;
}

static int one_end(void **state) { return (void)state, end_open(&a, "", "", 0); }

static int two_ends(void **state) { return one_end(state) | end_open(&b, "", "", 0); }

static int close_ends(void **state) {
  (void)state;
  end_close(&a);
  end_close(&b);
  return 0;
}

static void connect_ends(void) {
  int before = a.ups;
  assert_int_equal(tcp()->connect(a.self, b.address, 1), 0);
  UNTIL(&a, &b, a.ups > before);
}

/* --- addresses -------------------------------------------------------------------------------- */

TEST_WITH(test_addresses, one_end, close_ends) {
  static const char *const good[] = {"tcp:127.0.0.1:5", "tcp:[::1]:5",    "127.0.0.1:5",
                                     "[::1]:5",         "node7.local:80", "tcp:node7:65535",
                                     "unix:/tmp/x",     "unix:@x"};
  static const char *const bad[] = {
      "",          "tcp:",        "tcp:host",   "tcp:host:",      "tcp::5",      "tcp:host:99999",
      "tcp:::1:5", "tcp:[::1]5",  "tcp:[::1:5", "tcp:[]:5",       "tcp:host:5x", "tcp:host:-1",
      "tcp:a b:5", "tcp:host:+5", "unix:",      "unix:here",      "unix:/a b",   "unix:@",
      "shm:name",  "shm:name:5",  "sim:0",      "sim:5",          "mpi:5",       ":",
      "]:5",       "[:5",         "tcp:]:5",    "tcp:host:123456"};
  char longer[400];
  for (size_t i = 0; i < MLFAB__COUNT(good); i++)
    if (!tcp()->reach(a.self, good[i])) fail_msg("%s", good[i]);
  for (size_t i = 0; i < MLFAB__COUNT(bad); i++) {
    end other;
    if (tcp()->reach(a.self, bad[i])) fail_msg("%s", bad[i]);
    assert_int_equal(tcp()->connect(a.self, bad[i], 1), MLFAB_ERR_ADDRESS);
    if (!bad[i][0]) continue;
    assert_int_equal(end_open(&other, bad[i], "", 1), MLFAB_ERR_ADDRESS);
    assert_non_null(strstr(other.error.text, bad[i]));
  }
  assert_int_equal(tcp()->reach(a.self, "tcp:host:0"), 0);
  memset(longer, 'x', sizeof longer);
  longer[sizeof longer - 1] = 0;
  memcpy(longer, "unix:/", 6);
  assert_int_equal(tcp()->reach(a.self, longer), 0);
  memcpy(longer, "tcp:xx", 6);
  memcpy(longer + 390, ":5", 3);
  assert_int_equal(tcp()->reach(a.self, longer), 0);
  end_poll(&a);
  assert_int_equal(a.downs, 0);
}

TEST(test_listen) {
  assert_int_equal(end_open(&a, "", "", 0), 0);
  assert_int_equal(strncmp(a.address, "tcp:127.0.0.1:", 14), 0);
  assert_true(port_of(a.address) > 0);
  end_close(&a);
  assert_int_equal(end_open(&a, "127.0.0.1:0", "", 0), 0);
  assert_int_equal(strncmp(a.address, "tcp:127.0.0.1:", 14), 0);
  end_close(&a);
  assert_int_equal(end_open(&a, NULL, NULL, 0), 0);
  end_close(&a);
  /* A label of more than 63 letters is refused without a query. */
  const char *nowhere =
      "tcp:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.invalid:5";
  assert_int_equal(end_open(&a, nowhere, "", 1), MLFAB_ERR_ADDRESS);
  assert_non_null(strstr(a.error.text, nowhere));
  assert_int_equal(end_open(&a, "", "", 0), 0);
  assert_int_equal(tcp()->connect(a.self, nowhere, 1), 0);
  UNTIL(&a, &a, a.downs == 1);
  assert_int_equal(a.code, MLFAB_ERR_ADDRESS);
  assert_non_null(strstr(a.text, nowhere));
  end_close(&a);
  assert_int_equal(end_open(&a, "tcp:203.0.113.7:0", "", 1), MLFAB_ERR_ADDRESS);
  assert_non_null(strstr(a.error.text, "tcp:203.0.113.7:0"));
}

/* A name may have several addresses; it is enough that one of them accepts. */
TEST_WITH(test_names, NULL, close_ends) {
  char address[64];
  assert_int_equal(end_open(&a, "", "", 0), 0);
  assert_int_equal(end_open(&b, "tcp:localhost:0", "", 0), 0);
  assert_null(strstr(b.address, "localhost"));
  end_close(&b);
  assert_int_equal(end_open(&b, "", "", 0), 0);
  snprintf(address, sizeof address, "tcp:localhost:%u", (unsigned)port_of(b.address));
  assert_int_equal(tcp()->connect(a.self, address, 3), 0);
  UNTIL(&a, &b, a.ups || a.downs);
  assert_int_equal(a.ups, 1);
}

TEST(test_insecure) {
  static const char *const open[] = {"tcp:0.0.0.0:0", "tcp:[::]:0", "tcp:203.0.113.7:0",
                                     "tcp:[2001:db8::1]:5", "tcp:[::ffff:203.0.113.7]:5"};
  static const char *const closed[] = {"tcp:127.0.0.2:9", "tcp:[::ffff:127.0.0.1]:9"};
  end e, keeper;
  assert_int_equal(end_open(&keeper, "", "", 0), 0);
  for (size_t i = 0; i < MLFAB__COUNT(open); i++) {
    assert_int_equal(end_open(&e, open[i], "", 0), MLFAB_ERR_INSECURE);
    assert_non_null(strstr(e.error.text, open[i]));
    assert_non_null(strstr(e.error.text, "allow_insecure"));
    keeper.logged[0] = 0;
    assert_int_equal(tcp()->connect(keeper.self, open[i], 1), MLFAB_ERR_INSECURE);
    assert_non_null(strstr(keeper.logged, "allow_insecure"));
  }
  for (size_t i = 0; i < MLFAB__COUNT(closed); i++)
    assert_int_equal(tcp()->connect(keeper.self, closed[i], 1 + i), 0);
  end_close(&keeper);
  /* If wildcards are allowed, the published address is one that can be dialled. */
  assert_int_equal(end_open(&e, "tcp:0.0.0.0:0", "", 1), 0);
  assert_null(strstr(e.address, "0.0.0.0"));
  assert_int_equal(end_open(&keeper, "", "", 1), 0);
  assert_int_equal(tcp()->connect(keeper.self, e.address, 1), 0);
  UNTIL(&keeper, &e, keeper.ups || keeper.downs);
  assert_int_equal(keeper.ups, 1);
  end_close(&e);
  end_close(&keeper);
}

/* Without a key and allow_insecure only Unix sockets are used. */
TEST(test_closed) {
  static const char *const refused[] = {"tcp:127.0.0.1:0", "tcp:[::1]:0", "tcp:localhost:0",
                                        "tcp:0.0.0.0:0", "127.0.0.1:0"};
  unkeyed = 1;
  for (size_t i = 0; i < MLFAB__COUNT(refused); i++) {
    assert_int_equal(end_open(&a, refused[i], "", 0), MLFAB_ERR_INSECURE);
    assert_non_null(strstr(a.error.text, "MLFAB_KEY"));
  }
  assert_int_equal(two_ends(NULL), 0);
  assert_int_equal(strncmp(a.address, "unix:", 5), 0);
  assert_true(strcmp(a.address, b.address) != 0);
  assert_int_equal(tcp()->connect(a.self, "tcp:127.0.0.1:9", 1), MLFAB_ERR_INSECURE);
  assert_non_null(strstr(a.logged, "MLFAB_KEY"));
  assert_int_equal(tcp()->connect(a.self, b.address, 2), 0);
  UNTIL(&a, &b, a.ups || a.downs);
  assert_int_equal(a.ups, 1);
  close_ends(NULL);
  unkeyed = 0;
}

TEST(test_interfaces) {
  char lo[IFNAMSIZ] = "", name[64];
  struct ifaddrs *list = NULL;
  assert_int_equal(getifaddrs(&list), 0);
  for (const struct ifaddrs *i = list; i; i = i->ifa_next)
    if (i->ifa_flags & IFF_LOOPBACK) snprintf(lo, sizeof lo, "%s", i->ifa_name);
  freeifaddrs(list);
  assert_true(strlen(lo) >= 2);
  static const char *const fit[] = {"%s", "=%s", "nothing,%s", "=nothing0,%s", "%.1s", "=%s,x"};
  static const char *const miss[] = {"=%.1s", "nothing", "=x%s", "=%sx"};
  for (size_t i = 0; i < MLFAB__COUNT(fit); i++) {
    snprintf(name, sizeof name, fit[i], lo);
    assert_int_equal(end_open(&a, "", name, 1), 0);
    assert_int_equal(strncmp(a.address, "tcp:127.0.0.1:", 14), 0);
    end_close(&a);
  }
  for (size_t i = 0; i < MLFAB__COUNT(miss); i++) {
    snprintf(name, sizeof name, miss[i], lo);
    assert_int_equal(end_open(&a, "", name, 1), MLFAB_ERR_ADDRESS);
    assert_non_null(strstr(a.error.text, name));
    assert_int_equal(end_open(&a, "", name, 0), 0); /* loopback needs no interface */
    end_close(&a);
  }
  /* Excludes every first letter: no interface is left. */
  assert_int_equal(end_open(&a, "",
                            "^a,b,c,d,e,f,g,h,i,j,k,l,m,n,o,p,q,r,s,t,u,v,w,x,y,z,A,B,C,D,E,F,G,H,"
                            "I,J,K,L,M,N,O,P,Q,R,S,T,U,V,W,X,Y,Z",
                            1),
                   MLFAB_ERR_ADDRESS);
}

/* --- addresses in use ------------------------------------------------------------------------- */

TEST_WITH(test_in_use, NULL, close_ends) {
  char address[256];
  assert_int_equal(end_open(&a, "", "", 0), 0);
  memcpy(address, a.address, sizeof address);
  assert_int_equal(end_open(&b, address, "", 0), MLFAB_ERR_ADDRESS_IN_USE);
  assert_non_null(strstr(b.error.text, address));
  end_close(&a);
  assert_int_equal(end_open(&b, address, "", 0), 0);
}

TEST_WITH(test_unix_path, NULL, close_ends) {
  struct sockaddr_un local = {.sun_family = AF_UNIX};
  struct stat info;
  char address[100];
  snprintf(local.sun_path, sizeof local.sun_path, "/tmp/mlfab-test-%ld.sock", (long)getpid());
  snprintf(address, sizeof address, "unix:%.90s", local.sun_path);
  /* A socket file left by a dead process. */
  int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  assert_int_equal(bind(fd, (const struct sockaddr *)(const void *)&local, sizeof local), 0);
  close(fd);
  assert_int_equal(stat(local.sun_path, &info), 0);
  assert_int_equal(end_open(&a, address, "", 0), 0);
  assert_string_equal(a.address, address);
  /* One of a living process. */
  assert_int_equal(end_open(&b, address, "", 0), MLFAB_ERR_ADDRESS_IN_USE);
  assert_non_null(strstr(b.error.text, address));
  assert_int_equal(stat(local.sun_path, &info), 0);
  end_close(&a);
  assert_int_not_equal(stat(local.sun_path, &info), 0);
  /* A file that is not a socket is not removed; neither is another process's socket. */
  FILE *file = fopen(local.sun_path, "w");
  assert_non_null(file);
  fclose(file);
  assert_int_equal(end_open(&a, address, "", 0), MLFAB_ERR_ADDRESS_IN_USE);
  assert_int_equal(stat(local.sun_path, &info), 0);
  unlink(local.sun_path);
  assert_int_equal(end_open(&a, address, "", 0), 0);
  unlink(local.sun_path);
  file = fopen("/dev/null", "r"); /* so that the inode number is not reused at once */
  assert_int_equal(end_open(&b, address, "", 0), 0);
  if (file) fclose(file);
  end_close(&b);
  assert_int_not_equal(stat(local.sun_path, &info), 0);
}

/* --- strangers -------------------------------------------------------------------------------- */

/* Connections that send nothing, or a little from time to time, neither pile up nor keep others out. */
TEST_WITH(test_slow_strangers, two_ends, close_ends) {
  enum { MANY = 200 };
  int fds[MANY];
  for (int i = 0; i < MANY; i++) {
    fds[i] = stranger(&b);
    if (i % 2) assert_int_equal(send(fds[i], "M", 1, MSG_NOSIGNAL), 1);
    if (i % 20 == 0) end_poll(&b);
  }
  UNTIL(&b, &b, b.refused == MANY - 64);
  assert_int_equal(b.code, MLFAB_ERR_LIMIT);
  assert_non_null(strstr(b.text, "tcp:127.0.0.1:"));
  connect_ends();
  beat(&a, a.link);
  UNTIL(&a, &b, b.ups && b.frames);
  for (int i = 0; i < MANY; i++) close(fds[i]);
  for (int i = 0; i < MANY; i++) fds[i] = stranger(&b);
  UNTIL(&b, &b, b.refused >= MANY + MANY - 64);
  beat(&a, a.link);
  UNTIL(&a, &b, b.frames == 2); /* a peer that has sent a frame is no stranger */
  assert_int_equal(b.downs, 0);
  for (int i = 0; i < MANY; i++) close(fds[i]);
}

/* A job of many workers starts: all have connected and introduced themselves before this node polls for the
 * first time. None is refused for the wait. */
TEST_WITH(test_many_call_at_once, one_end, close_ends) {
  enum { MANY = 300 };
  static int fds[MANY];
  for (int i = 0; i < MANY; i++) {
    fds[i] = stranger(&a);
    stranger_beats(fds[i]);
  }
  UNTIL(&a, &a, a.frames + a.refused >= MANY);
  assert_int_equal(a.refused, 0);
  assert_int_equal(a.ups, MANY);
  for (int i = 0; i < MANY; i++) close(fds[i]);
}

/* A header alone, which announces a bulk of `bulk` bytes. */
static void announce(int fd, uint8_t type, uint32_t bulk) {
  uint8_t head[MLFAB_HEADER_BYTES];
  mlfab__header header = {.protocol = MLFAB_PROTOCOL, .type = type, .bulk_bytes = bulk};
  mlfab__wire_seal(head, &header, NULL);
  assert_int_equal(send(fd, head, sizeof head, MSG_NOSIGNAL), sizeof head);
}

/* In a fabric with a key a header is reported before the rest of its frame is awaited; and one with which bytes begin
 * that come in the midst of a frame. */
TEST(test_headers) {
  enum { PART = 20, BULK = PART + 2 * MLFAB_HEADER_BYTES };
  for (int keyed = 0; keyed < 2; keyed++) {
    uint8_t head[128], other[MLFAB_HEADER_BYTES] = "MLFB\x09 and no header";
    (void)frame(head, MLFAB_PROTOCOL);
    end e;
    unkeyed = !keyed;
    assert_int_equal(end_open(&e, "tcp:127.0.0.1:0", "", 1), 0);
    int fd = stranger(&e);
    const struct piece {
      const uint8_t *at;
      ssize_t bytes;
      int midst; /* reported so far */
    } pieces[] = {{head, PART, 0}, {head, MLFAB_HEADER_BYTES, keyed}};
    stranger_beats(fd);
    UNTIL(&e, &e, e.frames == 1);
    announce(fd, MLFAB__CHUNK, BULK);
    UNTIL(&e, &e, tcp()->probe(e.self, e.link) == 1); /* it has come */
    assert_int_equal(e.heads, keyed);
    for (size_t i = 0; i < MLFAB__COUNT(pieces); i++) {
      assert_int_equal(send(fd, pieces[i].at, (size_t)pieces[i].bytes, MSG_NOSIGNAL),
                       pieces[i].bytes);
      UNTIL(&e, &e, tcp()->probe(e.self, e.link) == 1);
      assert_int_equal(e.midst, pieces[i].midst);
    }
    assert_int_equal(send(fd, other, sizeof other, MSG_NOSIGNAL), sizeof other);
    UNTIL(&e, &e, e.frames == 2);
    assert_int_equal(e.heads, keyed);
    assert_int_equal(e.midst, keyed);
    close(fd);
    end_close(&e);
  }
  unkeyed = 0;
}

/* Before admission no large frame is accepted: neither as the first frame nor after a JOIN. */
TEST_WITH(test_little_before_admission, one_end, close_ends) {
  enum { MANY = 40 };
  uint8_t head[MLFAB_HEADER_BYTES + 2048];
  mlfab__header header = {.protocol = MLFAB_PROTOCOL, .type = MLFAB__JOIN};
  mlfab__join join;
  int fds[MANY];
  memset(&join, 0, sizeof join);
  memset(join.addresses, 'x', sizeof join.addresses - 1); /* the longest possible */
  header.meta_bytes = mlfab__encode_join(head + MLFAB_HEADER_BYTES, &join);
  mlfab__wire_seal(head, &header, NULL);
  for (int i = 0; i < MANY; i++) {
    fds[i] = stranger(&a);
    announce(fds[i], MLFAB__PUSH, MLFAB_BULK_MAX);
  }
  UNTIL(&a, &a, a.refused == MANY);
  assert_int_equal(a.code, MLFAB_ERR_LIMIT);
  for (int i = 0; i < MANY; i++) {
    ssize_t bytes = (ssize_t)(MLFAB_HEADER_BYTES + header.meta_bytes);
    close(fds[i]);
    fds[i] = stranger(&a);
    assert_int_equal(send(fds[i], head, (size_t)bytes, MSG_NOSIGNAL), bytes);
  }
  UNTIL(&a, &a, a.ups == MANY && a.frames == MANY);
  for (int i = 0; i < MANY; i++) announce(fds[i], MLFAB__PUSH, MLFAB_BULK_MAX);
  UNTIL(&a, &a, a.downs == MANY);
  assert_int_equal(a.code, MLFAB_ERR_LIMIT);
  assert_true(a.bytes < 4 << 20);
  for (int i = 0; i < MANY; i++) close(fds[i]);
}

/* The process has no descriptor left: a connection that waits for admission is closed for a newer caller. */
TEST_WITH(test_descriptors_for_newcomers, one_end, close_ends) {
  enum { MANY = 10 };
  int fds[MANY];
  for (int i = 0; i < MANY; i++) fds[i] = stranger(&a);
  poll_for(&a, 200, 100);
  take_descriptors(256);
  close(taken[--ntaken]);
  int fd = stranger(&a);
  stranger_beats(fd);
  UNTIL(&a, &a, a.ups == 1 && a.frames == 1);
  assert_int_equal(a.refused, 1);
  give_descriptors_back();
  for (int i = 0; i < MANY; i++) close(fds[i]);
  close(fd);
}

TEST_WITH(test_protocol, one_end, close_ends) {
  static const struct {
    uint8_t protocol;
    int code;
    const char *word;
  } cases[] = {{MLFAB_PROTOCOL - 1, MLFAB_ERR_PROTOCOL_OLDER, "older"},
               {MLFAB_PROTOCOL + 1, MLFAB_ERR_PROTOCOL_NEWER, "newer"}};
  for (int i = 0; i < 2; i++) {
    uint8_t head[128];
    uint32_t bytes = frame(head, cases[i].protocol);
    int fd = stranger(&a);
    assert_int_equal(send(fd, head, bytes, MSG_NOSIGNAL), bytes);
    UNTIL(&a, &a, a.refused == i + 1);
    assert_int_equal(a.code, cases[i].code);
    assert_non_null(strstr(a.text, cases[i].word));
    assert_non_null(strstr(a.text, "tcp:127.0.0.1:"));
    assert_int_equal(a.ups, i);
    close(fd);
    fd = stranger(&a);
    stranger_beats(fd);
    assert_int_equal(send(fd, head, bytes, MSG_NOSIGNAL), bytes);
    UNTIL(&a, &a, a.downs == i + 1);
    assert_int_equal(a.frames, i + 1);
    assert_int_equal(a.code, cases[i].code);
    close(fd);
  }
}

/* Frames accepted before disconnect are copied and written later if the socket is full. */
TEST_WITH(test_linger, two_ends, close_ends) {
  static uint8_t bulk[MLFAB_BULK_MAX];
  uint8_t head[128];
  connect_ends();
  beat(&a, a.link);
  UNTIL(&a, &b, b.ups);
  memset(bulk, 7, sizeof bulk);
  seal_chunk(head, bulk, sizeof bulk);
  int sent = 1 + fill(head, bulk, sizeof bulk, 5);
  tcp()->disconnect(a.self, a.link);
  memset(bulk, 8, sizeof bulk);
  UNTIL(&a, &b, b.downs);
  assert_int_equal(b.frames, sent);
  assert_int_equal(b.code, MLFAB_ERR_PEER_CLOSED);
}

/* --- memory ----------------------------------------------------------------------------------- */

TEST_WITH(test_idle_links, two_ends, close_ends) {
  enum { MANY = 200 };
  for (int i = 1; i <= MANY; i++) {
    connect_ends();
    beat(&a, a.link);
    UNTIL(&a, &b, b.ups == i && b.frames == i);
  }
  assert_true(a.bytes < MANY * 8192 + 300000);
  assert_true(b.bytes < MANY * 8192 + 300000);
}

/* --- a layer that refuses ---------------------------------------------------------------------- */

typedef struct session {
  int fd, called;
  uint32_t attempt;
} session;

static uint32_t attempts; /* of the calling end */

static int layer_begin(void *user, int fd, int called, uint32_t attempt, void **session_p) {
  session *new = malloc(sizeof *new);
  (void)user;
  assert_non_null(new);
  *new = (session){fd, called, attempt};
  if (!called) assert_int_equal(attempt, attempts++);
  *session_p = new;
  return 0;
}

static int layer_shake(void *of, int *out_p) {
  const session *s = of;
  (void)out_p;
  return !s->called && s->attempt < 3 ? MLFAB_ERR_REFUSED : 0;
}

static ptrdiff_t layer_send(void *of, const struct iovec *pieces, int count) {
  return writev(((session *)of)->fd, pieces, count);
}

static ptrdiff_t layer_receive(void *of, const struct iovec *pieces, int count) {
  return readv(((session *)of)->fd, pieces, count);
}

static void layer_finish(void *of) { (void)of; }
static const char *layer_why(void *of) { return (void)of, ""; }

/* It refuses a call three times, and is told each time how often: so it can try another key. */
TEST_WITH(test_attempts, NULL, close_ends) {
  const mlfab_layer played = {.size = sizeof played,
                              .name = "played",
                              .begin = layer_begin,
                              .shake = layer_shake,
                              .send = layer_send,
                              .receive = layer_receive,
                              .finish = layer_finish,
                              .why = layer_why,
                              .end = free,
                              .close = layer_finish};
  layer = &played;
  attempts = 0;
  two_ends(NULL);
  connect_ends();
  assert_int_equal(attempts, 4);
  greet(&a, &b);
  close_ends(NULL);
  layer = NULL;
}

/* One detach returns all bulks sent with a token, because the chunks of an update share one. The receiver
 * gets the bytes as they were sent, whatever the sender writes there afterwards. */
TEST_WITH(test_detach_all, NULL, close_ends) {
  enum { BYTES = 262144 };
  assert_int_equal(end_open(&a, "tcp:127.0.0.1:0", "", 0), 0);
  assert_int_equal(end_open(&b, "tcp:127.0.0.1:0", "", 0), 0);
  connect_ends();
  greet(&a, &b);
  uint8_t *bulk = malloc(BYTES), head[128];
  int came = 0, wrong = 0;
  assert_non_null(bulk);
  memset(bulk, 7, BYTES);
  seal_chunk(head, bulk, BYTES);
  int sent = fill(head, bulk, BYTES, 99);
  tcp()->flush(a.self);
  assert_int_equal(tcp()->detach(a.self, a.link, 99), 0);
  memset(bulk, 9, BYTES);
  for (int tries = 0; came < sent; tries++) {
    mlfab_io_event event;
    assert_true(tries < 100000);
    end_poll(&a);
    while (tcp()->poll(b.self, &event)) {
      const uint8_t *got = event.bulk;
      if (event.kind == MLFAB_IO_FRAME) came++;
      if (event.kind == MLFAB_IO_FRAME) wrong += got[0] != 7 || got[BYTES - 1] != 7;
      tcp()->release(b.self, &event);
    }
    usleep(200);
  }
  assert_true(sent > 2);
  assert_int_equal(wrong, 0);
  free(bulk);
}

/* The process has no descriptor left when a peer connects, and frees some later: then the peer is admitted,
 * although no link of this transport was closed. */
TEST_WITH(test_no_descriptors, one_end, close_ends) {
  a.now_ns = 5;
  int fd = stranger(&a);
  take_descriptors((rlim_t)fd + 100);
  stranger_beats(fd);
  for (int i = 0; i < 100 && !a.logged[0]; i++) end_poll(&a), usleep(1000);
  assert_non_null(strstr(a.logged, strerror(EMFILE)));
  a.logged[0] = 0;
  for (int i = 0; i < 30; i++) a.now_ns += 100000000, end_poll(&a);
  assert_int_equal(a.logged[0], 0); /* logged once */
  give_descriptors_back();
  end_poll(&a);
  assert_int_equal(a.ups, 0);               /* not before its time */
  tcp()->wait(a.self, 10ull * 1000000000u); /* returns early, to look again */
  a.now_ns += 100000000;
  UNTIL(&a, &a, a.ups == 1 && a.frames == 1);
  close(fd);
}

#if defined(__linux__)
/* A peer that has sent a good frame, so that a link of `e` is up; fd_p: its socket. */
static uint32_t raw_peer(end *e, int *fd_p) {
  int ups = e->ups;
  *fd_p = stranger(e);
  stranger_beats(*fd_p);
  UNTIL(e, e, e->ups > ups);
  return e->link;
}

/* A process that does not read, so that its window is closed, is on a host that answers: its connection
 * stays up for any time. A host that accepts no packet (a filter drops them before TCP) does not answer,
 * until the filter is removed. */
TEST_WITH(test_probe, one_end, close_ends) {
  struct sock_filter nothing[] = {BPF_STMT(BPF_RET | BPF_K, 0)};
  struct sock_fprog drop = {1, nothing};
  static uint8_t bulk[MLFAB_BULK_MAX];
  uint8_t head[MLFAB_HEADER_BYTES];
  mlfab__header header = {.type = MLFAB__HEARTBEAT, .bulk_bytes = MLFAB_BULK_MAX};
  int idle, full, gone, status;
  uint32_t to_idle = raw_peer(&a, &idle), to_full = raw_peer(&a, &full);
  uint32_t to_gone = raw_peer(&a, &gone);
  mlfab__wire_seal(head, &header, NULL);
  while ((status = tcp()->send(a.self, to_full, head, sizeof head, bulk, sizeof bulk, 1)) == 0)
    end_poll(&a);
  assert_int_equal(status, MLFAB_ERR_AGAIN);
  assert_int_equal(setsockopt(gone, SOL_SOCKET, SO_ATTACH_FILTER, &drop, sizeof drop), 0);
  beat(&a, to_idle);
  beat(&a, to_gone);
  /* At first the probe succeeds; then answers are missing. */
  assert_int_equal(tcp()->probe(a.self, to_gone), 0);
  UNTIL(&a, &a, tcp()->probe(a.self, to_gone) == MLFAB_ERR_AGAIN);
  assert_int_equal(setsockopt(gone, SOL_SOCKET, SO_DETACH_FILTER, &drop, sizeof drop), 0);
  UNTIL(&a, &a, tcp()->probe(a.self, to_gone) == 0);
  for (int i = 0, answered = 0; i < 35 || answered < 10; i++) {
    answered += tcp()->probe(a.self, to_full) == 0; /* not while the kernel probes its window */
    assert_int_equal(tcp()->probe(a.self, to_idle), 0);
    end_poll(&a);
    usleep(100000);
  }
  assert_int_equal(a.downs, 0);
  close(idle);
  UNTIL(&a, &a, a.downs == 1);
  assert_int_equal(tcp()->probe(a.self, to_idle), MLFAB_ERR_AGAIN);
  close(full);
  close(gone);
}

/* Over a Unix socket the probe asks for the process: a child that holds the socket does not count. */
TEST(test_probe_of_a_child) {
  struct sockaddr_un to = {.sun_family = AF_UNIX};
  uint8_t head[128];
  char address[64];
  int told[2], tell[2];
  pid_t heir = 0;
  uint32_t bytes = frame(head, MLFAB_PROTOCOL);
  int n = snprintf(address, sizeof address, "unix:@mlfab-probe-%ld", (long)getpid());
  memcpy(to.sun_path + 1, address + 6, (size_t)n - 6);
  assert_int_equal(pipe(told) | pipe(tell), 0);
  assert_int_equal(end_open(&a, address, "", 0), 0);
  pid_t child = fork();
  if (child == 0) {
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    socklen_t room = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)n - 5);
    if (connect(fd, (const struct sockaddr *)(const void *)&to, room)) _exit(1);
    if (send(fd, head, bytes, 0) != (ssize_t)bytes) _exit(1);
    pid_t mine = fork();
    for (; mine == 0;) pause();
    if (write(told[1], &mine, sizeof mine) < 0 || read(tell[0], head, 1) != 1) _exit(1);
    _exit(0);
  }
  UNTIL(&a, &a, a.ups);
  assert_int_equal(read(told[0], &heir, sizeof heir), sizeof heir);
  assert_int_equal(tcp()->probe(a.self, a.link), 0);
  assert_int_equal(write(tell[1], "x", 1), 1);
  assert_int_equal(waitpid(child, NULL, 0), child);
  assert_int_equal(tcp()->probe(a.self, a.link), MLFAB_ERR_AGAIN);
  assert_int_equal(kill(heir, SIGKILL), 0);
  UNTIL(&a, &a, a.downs);
  end_close(&a);
  for (int i = 0; i < 2; i++) close(told[i]), close(tell[i]);
}
#else
TEST(test_probe) { skip(); }
TEST(test_probe_of_a_child) { skip(); }
#endif

/* The k-th allocation fails, for every k: an error, and no leak. */
TEST(test_out_of_memory) {
  uint8_t head[128], first[128];
  static uint8_t bulk[100000];
  seal_chunk(head, bulk, sizeof bulk);
  uint32_t first_bytes = frame(first, MLFAB_PROTOCOL);
  for (int k = 0, clean = 0; !clean; k++) {
    int status = end_open_limited(&a, "", "", 0, k);
    if (status) {
      assert_int_equal(status, MLFAB_ERR_MEMORY);
      assert_null(a.self);
      assert_int_equal(a.bytes, 0);
      continue;
    }
    assert_int_equal(end_open_limited(&b, "", "", 0, 6), 0);
    b.allocations_left = k;
    status = tcp()->connect(a.self, b.address, 1);
    int greeted = 0;
    for (int i = 0; !status && i < 50; i++) {
      end_poll(&a);
      end_poll(&b);
      usleep(100);
      if (!a.ups || i % 10) continue;
      int sent = greeted
                     ? tcp()->send(a.self, a.link, head, MLFAB_HEADER_BYTES, bulk, sizeof bulk, 0)
                     : tcp()->send(a.self, a.link, first, first_bytes, NULL, 0, 0);
      greeted |= sent == 0;
      assert_true(sent == 0 || sent == MLFAB_ERR_MEMORY || sent == MLFAB_ERR_PEER_CLOSED);
    }
    assert_true(status == 0 || status == MLFAB_ERR_MEMORY);
    clean = a.allocations_left > 0 && b.allocations_left > 0 && b.frames > 2;
    assert_true(k < 100);
    close_ends(NULL);
  }
}

/* --- measuring -------------------------------------------------------------------------------- */

enum { SLICE = 10000000 }; /* nanoseconds */

static int measure(end *e, uint64_t later_ns, mlfab_measure *m) {
  e->now_ns += later_ns;
  feclearexcept(FE_ALL_EXCEPT);
  int told = tcp()->measure(e->self, e->now_ns, m);
  assert_int_equal(fetestexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW), 0);
  return told;
}

/* Writes from a plain socket, and lets the end read everything. */
static void write_all(end *e, int fd, const uint8_t *data, size_t bytes) {
  for (size_t at = 0; at < bytes;) {
    ssize_t n = send(fd, data + at, bytes - at, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n > 0) at += (size_t)n;
    end_poll(e);
  }
  poll_for(e, 50, 200);
}

/* The same in pieces of equal size, one each SLICE. */
static void write_slowly(int fd, const uint8_t *data, int pieces, size_t bytes) {
  for (int i = 0; i < pieces; i++) {
    a.now_ns += SLICE;
    write_all(&a, fd, data + (size_t)i * bytes, bytes);
  }
}

/* A peer that has sent half a frame has more to send, so the rate of arrival is then the network's. The
 * test provides the transport's clock, so that rates are exact. */
TEST_WITH(test_measure_in, one_end, close_ends) {
  enum { BULK = 1000000, HEAD = MLFAB_HEADER_BYTES };
  static uint8_t bytes[HEAD + BULK];
  uint8_t small[128];
  uint32_t smallest = frame(small, MLFAB_PROTOCOL);
  mlfab_measure m;
  seal_chunk(bytes, bytes + HEAD, BULK);
  int fd = stranger(&a);
  a.now_ns = 5 * SLICE;
  write_all(&a, fd, small, smallest);
  assert_int_equal(a.frames, 1);
  assert_int_equal(measure(&a, 0, &m), 0); /* start of the window */
  assert_int_equal(measure(&a, 0, &m), 0); /* no time has passed */
  /* Small frames with pauses: it is unknown whether the peer has more. */
  for (int i = 0; i < 10; i++) {
    a.now_ns += SLICE;
    write_all(&a, fd, small, smallest);
  }
  assert_int_equal(measure(&a, 0, &m), 1);
  assert_int_equal(m.elapsed_ns, 10 * SLICE);
  assert_int_equal(m.bytes_in, 10 * smallest);
  assert_int_equal(m.bytes_out, 0);
  assert_true(m.delivery_in == 0 && m.delivery_out == 0 && m.nominal == 0);
  assert_int_equal(m.limited_in, 1);
  assert_int_equal(m.limited_out, 1);
  /* A large one in slices: idle for 100 ms, then its beginning, then 400 KB in 200 ms. */
  a.now_ns += 10 * SLICE;
  write_all(&a, fd, bytes, HEAD + 20000);
  write_slowly(fd, bytes + HEAD + 20000, 20, 20000);
  assert_int_equal(measure(&a, 0, &m), 1);
  assert_int_equal(m.bytes_in, HEAD + 420000);
  assert_true(m.delivery_in > 1.99e6 && m.delivery_in < 2.01e6);
  assert_int_equal(m.limited_in, 1);
  /* Only this frame during the whole next window. */
  write_slowly(fd, bytes + HEAD + 420000, 20, 10000);
  assert_int_equal(measure(&a, 0, &m), 1);
  assert_int_equal(m.bytes_in, 200000);
  assert_int_equal(m.limited_in, 0);
  assert_true(m.delivery_in > 0.99e6 && m.delivery_in < 1.01e6);
  /* The peer stops in the middle: that says nothing about the network. */
  assert_int_equal(measure(&a, 30 * SLICE, &m), 1);
  assert_int_equal(m.bytes_in, 0);
  assert_int_equal(m.limited_in, 1);
  assert_true(m.delivery_in == 0);
  write_all(&a, fd, bytes + HEAD + 620000, 380000);
  assert_int_equal(a.frames, 12);
  close(fd);
}

/* A link for whose window there was no memory is measured later. */
TEST_WITH(test_measure_without_memory, one_end, close_ends) {
  uint8_t small[128];
  uint32_t smallest = frame(small, MLFAB_PROTOCOL);
  mlfab_measure m;
  int all = a.allocations_left, fd = stranger(&a);
  write_all(&a, fd, small, smallest);
  a.allocations_left = 1; /* for the meter */
  assert_int_equal(measure(&a, SLICE, &m), 0);
  write_all(&a, fd, small, smallest);
  assert_int_equal(measure(&a, SLICE, &m), 1);
  assert_int_equal(m.bytes_in, 0);
  a.allocations_left = all;
  assert_int_equal(measure(&a, SLICE, &m), 1);
  write_all(&a, fd, small, smallest);
  assert_int_equal(measure(&a, SLICE, &m), 1);
  assert_int_equal(m.bytes_in, smallest);
  assert_int_equal(a.frames, 3);
  close(fd);
}

/* Two peers: all bytes count while one of them is known to have more. */
TEST_WITH(test_measure_two, one_end, close_ends) {
  enum { BULK = 1000000, HEAD = MLFAB_HEADER_BYTES };
  static uint8_t bytes[HEAD + BULK];
  uint8_t small[128];
  uint32_t smallest = frame(small, MLFAB_PROTOCOL);
  mlfab_measure m;
  int fds[2];
  seal_chunk(bytes, bytes + HEAD, BULK);
  a.now_ns = SLICE;
  for (int i = 0; i < 2; i++) {
    fds[i] = stranger(&a);
    write_all(&a, fds[i], small, smallest);
  }
  assert_int_equal(measure(&a, 0, &m), 0);
  for (int i = 0; i < 2; i++) write_all(&a, fds[i], bytes, HEAD + 20000);
  for (int i = 0; i < 20; i++) {
    a.now_ns += SLICE;
    write_all(&a, fds[0], bytes + HEAD + 20000 + i * 40000, 40000);
    write_all(&a, fds[1], bytes + HEAD + 20000 + i * 10000, 10000);
  }
  assert_int_equal(measure(&a, 0, &m), 1);
  assert_int_equal(m.bytes_in, 2 * (HEAD + 20000) + 1000000);
  assert_true(m.delivery_in > 4.9e6 && m.delivery_in < 5.2e6);
  assert_int_equal(m.limited_in, 0);
  for (int i = 0; i < 2; i++) close(fds[i]);
}

/* A full socket shows that there was more to send; but if nothing moves, the peer may have stopped. */
TEST_WITH(test_measure_out, two_ends, close_ends) {
  enum { BULK = 262144, HEAD = MLFAB_HEADER_BYTES };
  static uint8_t bulk[BULK], head[128];
  mlfab_measure m, n;
  seal_chunk(head, bulk, BULK);
  a.now_ns = b.now_ns = SLICE;
  connect_ends();
  beat(&a, a.link);
  UNTIL(&a, &b, b.frames == 1);
  assert_int_equal(measure(&a, 0, &m), 0);
  assert_int_equal(measure(&b, 0, &n), 0);
  int sent = fill(head, bulk, BULK, 5); /* b's buffers are full */
  poll_for(&a, 100, 500);
  assert_int_equal(measure(&a, 20 * SLICE, &m), 1);
  assert_true(m.bytes_out > 0 && m.bytes_out < (uint64_t)sent * (HEAD + BULK));
  uint64_t out = m.bytes_out;
  for (int i = 0; i < 3; i++) { /* b does not read */
    end_poll(&a);
    assert_int_equal(measure(&a, 20 * SLICE, &n), 1);
    assert_int_equal(n.bytes_out, 0);
    assert_int_equal(n.limited_out, 1);
    assert_true(n.delivery_out == 0);
  }
  UNTIL(&a, &b, b.frames == 1 + sent);
  assert_int_equal(measure(&a, 20 * SLICE, &m), 1);
  assert_int_equal(measure(&b, 100 * SLICE, &n), 1);
  assert_int_equal(out + m.bytes_out, (uint64_t)sent * (HEAD + BULK)); /* every byte once */
  assert_int_equal(n.bytes_in, (uint64_t)sent * (HEAD + BULK));
}

#if defined(__linux__)
/* TCP_INFO of two sending links: their rates are added while both have bytes in flight and more to send. No
 * rate follows when the application or the reader limited the link, or when there was too little data. */
TEST_WITH(test_measure_told, two_ends, close_ends) {
  enum { RATE = 20000000, LOAD = 1 << 20, LITTLE = 4 << 10 };
  struct tcp_info info = {0};
  mlfab_measure m;
  a.now_ns = b.now_ns = SLICE;
  for (int i = 1; i <= 2; i++) {
    connect_ends();
    greet(&a, &b);
  }
  tcp_told = &info;
  assert_int_equal(measure(&a, 0, &m), 0);
  static const struct {
    uint64_t acked, busy_us, stalled_us; /* since the last measurement */
    uint32_t unacked, notsent;
    int limited;
    double rate; /* sum of both */
  } cases[] = {{LOAD, 50000, 0, 3, 5, 0, 2.0 * RATE},
               {LOAD, 50000, 0, 0, 5, 0, 0}, /* no bytes in flight */
               {LOAD, 50000, 0, 3, 0, 0, 0}, /* no unsent bytes */
               {LOAD, 50000, 0, 3, 5, 1, 0},
               {LOAD, 50000, 50000, 3, 5, 0, 2.0 * RATE}, /* a quarter of the 200 ms */
               {LOAD, 50000, 50001, 3, 5, 0, 0},
               {LOAD - 1, 99999, 0, 3, 5, 0, 0},
               {LITTLE, 100000, 0, 3, 5, 0, 2.0 * RATE},
               {LITTLE - 1, 100000, 0, 3, 5, 0, 0},
               {LOAD, 0, 0, 3, 5, 0, 0}};
  info.tcpi_delivery_rate = RATE;
  for (size_t i = 0; i < MLFAB__COUNT(cases); i++) {
    info.tcpi_bytes_acked += cases[i].acked;
    info.tcpi_busy_time += cases[i].busy_us;
    info.tcpi_rwnd_limited += cases[i].stalled_us;
    info.tcpi_unacked = cases[i].unacked;
    info.tcpi_notsent_bytes = cases[i].notsent;
    info.tcpi_delivery_rate_app_limited = cases[i].limited ? 1 : 0;
    assert_int_equal(measure(&a, 20 * SLICE, &m), 1);
    if (m.delivery_out < cases[i].rate || m.delivery_out > cases[i].rate)
      fail_msg("case %zu: %g", i, m.delivery_out);
    assert_int_equal(m.limited_out, 1);
  }
  tcp_told = NULL;
}

/* Sends as much as fits while the other end reads a little. */
static void send_against(uint32_t link, int fd) {
  enum { BULK = 262144, HEAD = MLFAB_HEADER_BYTES };
  static uint8_t bulk[BULK], head[128], sink[65536];
  seal_chunk(head, bulk, BULK);
  for (size_t bytes = 0; bytes < BULK;) {
    while (tcp()->send(a.self, link, head, HEAD, bulk, BULK, 5) == 0) continue;
    end_poll(&a);
    ssize_t n = recv(fd, sink, sizeof sink, MSG_DONTWAIT);
    if (n > 0) bytes += (size_t)n;
    if (n < 0) usleep(200);
  }
}

/* Sockets that were full: bytes over busy time are their rates, which are added only while they send; the
 * network limits them, unless the reader does. */
TEST_WITH(test_measure_told_full, one_end, close_ends) {
  enum { LINKS = 2 };
  struct sockaddr_in at = {.sin_family = AF_INET};
  socklen_t bytes = sizeof at;
  struct tcp_info info = {0};
  uint32_t links[LINKS];
  int fds[LINKS];
  char address[64];
  mlfab_measure m;
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  assert_int_equal(bind(listener, (const struct sockaddr *)(const void *)&at, bytes), 0);
  assert_int_equal(listen(listener, LINKS), 0);
  assert_int_equal(getsockname(listener, (struct sockaddr *)(void *)&at, &bytes), 0);
  snprintf(address, sizeof address, "tcp:127.0.0.1:%u", (unsigned)ntohs(at.sin_port));
  a.now_ns = SLICE;
  for (int i = 0; i < LINKS; i++) {
    assert_int_equal(tcp()->connect(a.self, address, 1), 0);
    UNTIL(&a, &a, a.ups == i + 1);
    links[i] = a.link;
    fds[i] = accept(listener, NULL, NULL);
    assert_true(fds[i] >= 0);
    beat(&a, a.link);
  }
  tcp_told = &info;
  assert_int_equal(measure(&a, 0, &m), 0);
  int full = 0; /* number of such windows; while the kernel's buffers grow there is still room */
  for (int window = 0; full < 4; window++) {
    int stalled = full == 1; /* limited by the reader */
    int unknown = full == 2; /* limited by the application, according to the kernel */
    assert_true(window < 100);
    for (int i = 0; i < LINKS; i++) send_against(links[i], fds[i]);
    info.tcpi_bytes_acked += 1 << 20;
    info.tcpi_busy_time += 1 << 16;
    info.tcpi_rwnd_limited += stalled ? 50001 : 0;
    info.tcpi_delivery_rate_app_limited = unknown ? 1 : 0;
    assert_int_equal(measure(&a, 20 * SLICE, &m), 1);
    double rate = stalled || unknown ? 0 : 16e6;
    assert_true(m.delivery_out >= rate && m.delivery_out <= rate);
    if (stalled) assert_int_equal(m.limited_out, 1);
    full += stalled || !m.limited_out;
  }
  tcp_told = NULL;
  for (int i = 0; i < LINKS; i++) (void)close(fds[i]);
  (void)close(listener);
}
#endif

/* Two nodes of one host that also listen for others: their traffic uses no network. */
TEST_WITH(test_measure_within_the_host, NULL, close_ends) {
  enum { BULK = 262144, HEAD = MLFAB_HEADER_BYTES };
  static uint8_t bulk[BULK], head[128];
  mlfab_measure m;
  seal_chunk(head, bulk, BULK);
  assert_int_equal(end_open(&a, "tcp:0.0.0.0:0", "", 1), 0);
  assert_int_equal(end_open(&b, "tcp:0.0.0.0:0", "", 1), 0);
  if (!strncmp(a.address, "tcp:127.", 8)) {
    print_message("no network interface here\n");
    close_ends(NULL);
    skip();
  }
  a.now_ns = b.now_ns = SLICE;
  connect_ends();
  greet(&a, &b);
  assert_int_equal(measure(&a, 0, &m), 0);
  assert_int_equal(measure(&b, 0, &m), 0);
  for (int round = 0; round < 20; round++) {
    int sent = fill(head, bulk, BULK, 5);
    a.now_ns += SLICE;
    b.now_ns += SLICE;
    UNTIL(&a, &b, b.frames >= sent);
    b.frames = 0;
  }
  assert_int_equal(measure(&a, 0, &m), 1);
  assert_int_equal(m.limited_out, 1);
  assert_true(m.delivery_out == 0);
  assert_int_equal(measure(&b, 0, &m), 1);
  assert_int_equal(m.limited_in, 1);
  assert_true(m.delivery_in == 0);
}

/* Runs in its own network namespace, with an interface that leads nowhere: the interface's counters are the
 * measure, whoever sent. Returns the exit status; 77: not possible here. */
static int measure_interface(void) {
  enum { DATAGRAMS = 200, BYTES = 1000 };
  struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9)};
  uint8_t bytes[BYTES] = {0};
  mlfab_measure m;
  end e;
  if (unshare(CLONE_NEWNET)) return 77;
  if (system("{ ip link add mlfab0 type veth peer name mlfab1 && ip link set mlfab1 up && ip addr "
             "add 10.78.0.1/24 dev mlfab0 &&"
             " ip link set mlfab0 up &&"
             " ip neigh add 10.78.0.9 lladdr 02:00:00:00:00:09 dev mlfab0; } >/dev/null 2>&1"))
    return 77;
  if (end_open_limited(&e, "tcp:0.0.0.0:0", "", 1, -1)) return 1;
  if (strncmp(e.address, "tcp:10.78.0.1:", 14) != 0) return 2;
  e.now_ns = SLICE;
  if (measure(&e, 0, &m) != 0) return 3;
  int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  to.sin_addr.s_addr = htonl(0x0a4e0009);
  for (int i = 0; i < DATAGRAMS; i++)
    if (sendto(fd, bytes, BYTES, 0, (const struct sockaddr *)(const void *)&to, sizeof to) != BYTES)
      return 4;
  close(fd);
  if (measure(&e, SLICE, &m) != 1) return 5;
  /* Plus a few bytes of the kernel's own. */
  if (m.bytes_out < DATAGRAMS * BYTES || m.bytes_out > DATAGRAMS * (BYTES + 100)) return 6;
  if (m.bytes_in > DATAGRAMS * 100 || !m.limited_in || !m.limited_out) return 7;
  /* /sys belongs to the machine, which may have another interface of this name: a virtual one has no speed. */
  if (m.nominal > 0) return 8;
  /* The interface disappears: from then on the node's own bytes are the measure. */
  if (system("ip link del mlfab0")) return 77;
  if (measure(&e, SLICE, &m) != 0) return 9;
  if (measure(&e, SLICE, &m) != 1 || m.bytes_out || m.bytes_in) return 10;
  end_close(&e);
  return 0;
}

TEST(test_measure_interface) {
  int status = 0;
  pid_t child = fork();
  assert_true(child >= 0);
  if (child == 0) _exit(measure_interface());
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_true(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) {
    print_message("no network namespaces here (root, and ip)\n");
    skip();
  }
  assert_int_equal(WEXITSTATUS(status), 0);
}

/* A socket of another user at an abstract name, listening or connected to it. Returns -1 in a child that
 * could not change its user. */
static int other_users_socket(const char *name, int listening) {
  struct sockaddr_un at = {.sun_family = AF_UNIX};
  size_t n = (size_t)snprintf(at.sun_path + 1, sizeof at.sun_path - 1, "%s", name);
  socklen_t bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + n);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const struct sockaddr *to = (const struct sockaddr *)(const void *)&at;
  if (fd < 0 || setresuid(65534, 65534, 65534)) return -1;
  if (listening ? bind(fd, to, bytes) || listen(fd, 8) : connect(fd, to, bytes)) return -1;
  return fd;
}

/* Starts a child of another user with such a socket. Returns when the socket exists, with the pipe that
 * ends the child. */
static pid_t other_user(const char *name, int listening, int *hold_p) {
  int ready[2], hold[2];
  char byte = 0;
  assert_int_equal(pipe(ready) | pipe(hold), 0);
  pid_t pid = fork();
  if (pid == 0) {
    close(hold[1]);
    byte = other_users_socket(name, listening) >= 0;
    if (write(ready[1], &byte, 1) == 1 && read(hold[0], &byte, 1) < 0) _exit(2);
    _exit(0);
  }
  assert_true(pid > 0);
  close(hold[0]);
  assert_int_equal(read(ready[0], &byte, 1), 1);
  assert_int_equal(byte, 1);
  close(ready[0]);
  close(ready[1]);
  *hold_p = hold[1];
  return pid;
}

/* A Unix socket refuses another user of the host, and does not talk to one that listens. */
TEST_WITH(test_other_user, NULL, close_ends) {
  char name[64], address[96];
  int hold;
  if (geteuid() != 0) skip();
  snprintf(name, sizeof name, "mlfab-test-user-%ld", (long)getpid());
  snprintf(address, sizeof address, "unix:@%s", name);
  assert_int_equal(end_open(&a, address, "", 0), 0);
  assert_int_equal(end_open(&b, "", "", 0), 0);
  pid_t pid = other_user(name, 0, &hold);
  UNTIL(&a, &b, a.refused == 1);
  assert_int_equal(a.code, MLFAB_ERR_REFUSED);
  assert_non_null(strstr(a.text, "another user"));
  close(hold);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
  assert_int_equal(tcp()->connect(b.self, address, 7), 0);
  UNTIL(&a, &b, b.ups == 1);
  assert_int_equal(a.frames + a.ups, 0);
  snprintf(name, sizeof name, "mlfab-test-bait-%ld", (long)getpid());
  snprintf(address, sizeof address, "unix:@%s", name);
  pid = other_user(name, 1, &hold);
  assert_int_equal(tcp()->connect(b.self, address, 8), 0);
  UNTIL(&a, &b, b.downs == 1);
  assert_int_equal(b.code, MLFAB_ERR_REFUSED);
  assert_int_equal(b.ups, 1);
  assert_non_null(strstr(b.text, "another user"));
  close(hold);
  assert_int_equal(waitpid(pid, NULL, 0), pid);
}

/* A kernel without epoll_pwait2, or a filter that refuses it, is tried once; EINTR does not count. */
TEST(test_no_pwait2) {
#if defined(SYS_epoll_pwait2) && defined(__LP64__)
  static const int errors[] = {ENOSYS, EPERM, EINTR};
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
    end e;
    assert_int_equal(end_open(&e, "tcp:127.0.0.1:0", NULL, 0), 0);
    pwaits = 0;
    pwait_error = errors[i];
    for (int k = 0; k < 4; k++) tcp()->wait(e.self, 1000000);
    assert_int_equal(pwaits, errors[i] == EINTR ? 4 : 1);
    end_close(&e);
  }
#else
  skip();
#endif
}

TESTS(NULL, NULL)
