/* test_names.c - host names that resolve late, slowly or never, and the deadline of joining. The file
 * defines getaddrinfo itself, so that nothing depends on a name server. */
#include "../../core/base/base.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "world.h"
#include "../../mlfab_transport.h"
#include "../testing.h"

#define MS 1000000u
#define SECOND 1000000000u

/* --- the test's own name server --------------------------------------------------------------------- */

/* queries in total; queries in progress, and their maximum */
static atomic_int asked, asking, most;
static atomic_int held;   /* queries for "held" names block */
static atomic_int late;   /* this many queries for "late" names fail */
static atomic_int masked; /* queries by a thread that blocks fault signals, or accepts others */

static int answer(const char *host, struct in_addr *address) {
  if (!strncmp(host, "held", 4))
    while (atomic_load(&held)) usleep(1000);
  if (!strncmp(host, "never", 5)) return EAI_AGAIN;
  if (!strncmp(host, "late", 4) && atomic_fetch_sub(&late, 1) > 0) return EAI_NONAME;
  *address = (struct in_addr){htonl(!strncmp(host, "far", 3) ? 0xcb007107u : INADDR_LOOPBACK)};
  return 0;
}

int getaddrinfo(const char *host, const char *port, const struct addrinfo *hints,
                struct addrinfo **list_p) {
  struct in_addr address;
  int named = inet_pton(AF_INET, host, &address) != 1;
  if (named && hints->ai_flags & AI_NUMERICHOST) return EAI_NONAME;
  if (named) {
    atomic_fetch_add(&asked, 1);
    int now = atomic_fetch_add(&asking, 1) + 1;
    sigset_t mask;
    if (pthread_sigmask(SIG_BLOCK, NULL, &mask) || !sigismember(&mask, SIGTERM) ||
        !sigismember(&mask, SIGCHLD) || sigismember(&mask, SIGSEGV) || sigismember(&mask, SIGABRT))
      atomic_fetch_add(&masked, 1);
    if (now > atomic_load(&most)) atomic_store(&most, now);
    int status = answer(host, &address);
    atomic_fetch_sub(&asking, 1);
    if (status) return status;
  }
  struct addrinfo *list = calloc(1, sizeof *list + sizeof(struct sockaddr_in));
  struct sockaddr_in *at = (struct sockaddr_in *)(void *)(list + 1);
  at->sin_family = AF_INET;
  at->sin_addr = address;
  at->sin_port = htons((uint16_t)strtoul(port, NULL, 10));
  list->ai_family = AF_INET;
  list->ai_addr = (struct sockaddr *)(void *)at;
  list->ai_addrlen = sizeof *at;
  *list_p = list;
  return 0;
}

void freeaddrinfo(struct addrinfo *list) { free(list); }

/* From now on queries for "held" names block, or the first `fail` ones for "late" names fail. */
static void begin(int hold, int fail) {
  atomic_store(&asked, 0);
  atomic_store(&most, 0);
  atomic_store(&held, hold);
  atomic_store(&late, fail);
}

/* Lets the blocked queries return; their threads then free what they hold. */
static void let_go(void) {
  atomic_store(&held, 0);
  for (int i = 0; i < 20000 && atomic_load(&asking); i++) usleep(1000);
  assert_int_equal(atomic_load(&asking), 0);
  usleep(20000);
}

/* --- one transport ------------------------------------------------------------------------------ */

typedef struct end {
  void *self;
  char address[256], text[400];
  mlfab_error error;
  mlfab_env env;
  int ups, downs;
  int32_t code;
} end;

static uint64_t clock_now(void *user) {
  struct timespec t;
  (void)user;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static void *allocate(void *user, size_t bytes) { return (void)user, malloc(bytes); }
static void release(void *user, void *memory, size_t bytes) {
  (void)user, (void)bytes, free(memory);
}
static void hush(void *user, int level, const char *line) { (void)user, (void)level, (void)line; }

static const mlfab_transport *tcp(void) { return mlfab_transport_tcp(); }

static int end_open(end *e, const char *listen, uint64_t timeout_ns) {
  memset(e, 0, sizeof *e);
  e->env = (mlfab_env){.size = sizeof e->env,
                       .log_level = MLFAB_LOG_ERROR,
                       .allocate = allocate,
                       .release = release,
                       .clock = clock_now,
                       .log = hush};
  mlfab_transport_options options = {.size = sizeof options,
                                     .keyed = 1,
                                     .listen = listen,
                                     .ifname = "",
                                     .job = "test",
                                     .env = &e->env,
                                     .error = &e->error,
                                     .timeout_ns = timeout_ns};
  return tcp()->open(&options, &e->self, e->address);
}

static void end_poll(end *e) {
  mlfab_io_event event;
  tcp()->flush(e->self);
  while (tcp()->poll(e->self, &event)) {
    e->ups += event.kind == MLFAB_IO_UP;
    e->downs += event.kind == MLFAB_IO_DOWN;
    if (event.code) e->code = event.code;
    if (event.text) snprintf(e->text, sizeof e->text, "%s", event.text);
    tcp()->release(e->self, &event);
  }
}

#define UNTIL(e, condition)                                    \
  for (int tries = 0; !(condition); tries++) {                 \
    if (tries > 100000) fail_msg("waited for %s", #condition); \
    end_poll(e);                                               \
    usleep(200);                                               \
  }

/* Many names, none of which is answered: one thread queries, no call blocks, and closing does not wait for
 * the query. */
TEST(test_one_question_at_a_time) {
  char address[64];
  end e, there;
  begin(1, 0);
  assert_int_equal(end_open(&there, "", 0) | end_open(&e, "", 0), 0);
  for (int i = 0; i < 5; i++) {
    snprintf(address, sizeof address, "tcp:held%d:1", i);
    assert_int_equal(tcp()->connect(e.self, address, 10 + (uint64_t)i), 0);
  }
  assert_int_equal(tcp()->connect(e.self, there.address, 1), 0); /* other names still connect */
  UNTIL(&e, e.ups == 1);
  UNTIL(&e, e.downs == 5); /* DOWN says that there is no answer yet */
  assert_int_equal(e.code, MLFAB_ERR_TIMEOUT);
  assert_non_null(strstr(e.text, "tcp:held"));
  assert_int_equal(tcp()->connect(e.self, "tcp:held0:1", 20), 0);
  tcp()->close(e.self);
  tcp()->close(there.self);
  assert_int_equal(atomic_load(&asked), 1);
  assert_int_equal(atomic_load(&most), 1);
  let_go();
  assert_int_equal(atomic_load(&masked), 0);
}

/* An answer that arrives after its connect was given up serves the next one. */
TEST(test_slow_answer) {
  char address[64];
  end e, there;
  begin(1, 0);
  assert_int_equal(end_open(&there, "", 0) | end_open(&e, "", 0), 0);
  snprintf(address, sizeof address, "tcp:held%s", strrchr(there.address, ':'));
  assert_int_equal(tcp()->connect(e.self, address, 1), 0);
  UNTIL(&e, e.downs == 1);
  let_go();
  end_poll(&e);
  assert_int_equal(tcp()->connect(e.self, address, 1), 0);
  UNTIL(&e, e.ups == 1);
  assert_int_equal(atomic_load(&asked), 1);
  tcp()->close(e.self);
  tcp()->close(there.self);
}

/* A listening name is queried again until the deadline. */
TEST(test_listen) {
  end e;
  begin(0, 2);
  assert_int_equal(end_open(&e, "tcp:late:0", 0), MLFAB_ERR_ADDRESS); /* queries only once */
  assert_non_null(strstr(e.error.text, "tcp:late:0"));
  assert_int_equal(end_open(&e, "tcp:late:0", 60ull * SECOND), 0);
  tcp()->close(e.self);
  assert_int_equal(end_open(&e, "tcp:never:0", 700 * MS), MLFAB_ERR_ADDRESS);
  assert_non_null(strstr(e.error.text, gai_strerror(EAI_AGAIN)));
  atomic_store(&held, 1);
  assert_int_equal(end_open(&e, "tcp:held:0", 200 * MS), MLFAB_ERR_TIMEOUT);
  let_go();
}

/* --- joining ------------------------------------------------------------------------------------ */

static mlfab_config config_of(int32_t rank, const char *coordinator, uint64_t timeout_ns) {
  mlfab_config c;
  mlfab_config_init(&c);
  c.rank = rank;
  c.workers = 2;
  c.transports = MLFAB_USE_TCP;
  if (strcmp(coordinator, "tcp:far:9") != 0) strcpy(c.key, "the-key-of-this-test");
  c.timeout_ns = timeout_ns;
  c.heartbeat_ns = 400ull * SECOND; /* joining has its own deadline */
  snprintf(c.coordinator, sizeof c.coordinator, "%s", coordinator);
  return c;
}

static int try_open(const char *coordinator, int32_t rank, uint64_t timeout_ns,
                    mlfab_error *error) {
  mlfab_config c = config_of(rank, coordinator, timeout_ns);
  mlfab *fabric = NULL;
  uint64_t begin = clock_now(NULL);
  int code = mlfab_open(&c, &fabric, error);
  assert_null(fabric);
  if (clock_now(NULL) - begin > 60ull * SECOND) fail_msg("%s: waited too long", coordinator);
  return code;
}

TEST(test_deadline) {
  mlfab_error error;
  begin(1, 0);
  assert_int_equal(try_open("tcp:held:9", 1, 1500 * MS, &error), MLFAB_ERR_TIMEOUT);
  assert_non_null(strstr(error.text, "tcp:held:9"));
  assert_non_null(strstr(error.text, "not resolved yet"));
  assert_int_equal(try_open("tcp:held:9", 0, 300 * MS, &error), MLFAB_ERR_TIMEOUT);
  let_go();
  assert_int_equal(try_open("tcp:never:9", 1, 300 * MS, &error), MLFAB_ERR_TIMEOUT);
  assert_non_null(strstr(error.text, gai_strerror(EAI_AGAIN)));
  assert_int_equal(try_open("tcp:127.0.0.1:1", 1, 300 * MS, &error), MLFAB_ERR_TIMEOUT);
  assert_int_equal(try_open("tcp:far:9", 1, 300ull * SECOND, &error), MLFAB_ERR_INSECURE);
  assert_non_null(strstr(error.text, "tcp:far:9"));
}

static atomic_int over;

static void *open_server_0(void *argument) {
  mlfab_config c = config_of(0, argument, 60ull * SECOND);
  mlfab *fabric = NULL;
  mlfab_error error;
  usleep(300000);
  int code = mlfab_open(&c, &fabric, &error);
  while (!code && !atomic_load(&over)) usleep(1000);
  if (!code) mlfab_abandon(&fabric);
  return code ? "server 0 did not open" : NULL;
}

/* The name is registered when server 0 starts, which is after the others have started. */
TEST(test_late_name) {
  char address[64];
  pthread_t thread;
  mlfab_error error;
  mlfab *fabric = NULL;
  void *failed;
  end e;
  begin(0, 0);
  assert_int_equal(end_open(&e, "", 0), 0); /* a free port */
  snprintf(address, sizeof address, "tcp:late%s", strrchr(e.address, ':'));
  tcp()->close(e.self);
  atomic_store(&late, 3);
  assert_int_equal(pthread_create(&thread, NULL, open_server_0, address), 0);
  mlfab_config c = config_of(1, address, 60ull * SECOND);
  memset(&error, 0, sizeof error);
  int code = mlfab_open(&c, &fabric, &error);
  atomic_store(&over, 1);
  pthread_join(thread, &failed);
  if (code || failed) fail_msg("%s, %s", error.text, failed ? (const char *)failed : "");
  mlfab_abandon(&fabric);
}

/* In virtual time: the deadline of joining and the rate of calls to server 0 do not depend on the
 * heartbeat. */
TEST(test_joining_and_heartbeats) {
  mlfab_error error;
  world w;
  for (uint64_t heartbeat = 20 * MS; heartbeat < 10000ull * SECOND; heartbeat *= 20) {
    world_init(&w, 2, 1, 0);
    w.config.heartbeat_ns = heartbeat;
    w.config.timeout_ns = 3ull * SECOND;
    world_network(&w, 1);
    mlfab_config c = world_config(&w, 1);
    assert_int_equal(mlfab_sim_open(w.sim, 1, &c, &w.node[1], &error), 0);
    mlfab_sim_run(w.sim, 2999ull * MS);
    assert_int_equal(mlfab_is_ready(w.node[1], &error), 0);
    mlfab_sim_run(w.sim, 2 * MS);
    assert_int_equal(mlfab_is_ready(w.node[1], &error), MLFAB_ERR_TIMEOUT);
    mlfab_abandon(&w.node[1]);
    assert_int_equal(mlfab_sim_open(w.sim, 1, &c, &w.node[1], &error), 0);
    mlfab_sim_run(w.sim, 2ull * SECOND);
    c = world_config(&w, 0);
    assert_int_equal(mlfab_sim_open(w.sim, 0, &c, &w.node[0], &error), 0);
    mlfab_sim_run(w.sim, 500ull * MS);
    for (int i = 0; i < 2; i++) assert_int_equal(mlfab_is_ready(w.node[i], &error), 1);
    world_close(&w);
  }
}

TESTS(NULL, NULL)
