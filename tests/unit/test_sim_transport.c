/* test_sim_transport.c - transports/sim.c: the arithmetic of time, every fault, and driving contexts.
 *
 * Works at the level of the transport's table. The test defines the functions of contexts that the
 * simulator calls; they stand for a context and count the calls. */
#include "budget.h"
#include "../testing.h"

#include "../../core/base/base.h"
#include "../../mlfab_sim.h"
#include "../../core/base/env.h"
#include "../../core/sched/monitor.h"

enum { HOSTS = 8, HEAD = 64 };
#define SECOND 1000000000ull
#define MILLI 1000000ull
#define RATE 1000000u /* bytes a second: a byte takes 1 us */
#define LATENCY 1000000u

/* ---- a substitute for a context ---- */

struct mlfab {
  mlfab_config config;
  mlfab_env env;
  void *self;
  int progressed, frames, downs;
  uint64_t deadline_ns, driven_at_ns, blocks;
};

static int abandoned;

void mlfab_config_init(mlfab_config *config) {
  memset(config, 0, sizeof *config);
  config->size = sizeof *config;
}

/* Opens the transport at a host. */
static int transport_open(const mlfab_env *env, void *host, mlfab_error *error_p, void **self_p,
                          char address[256]) {
  mlfab_error scratch;
  mlfab_transport_options options = {.size = sizeof options,
                                     .listen = "",
                                     .env = env,
                                     .user = host,
                                     .error = error_p ? error_p : &scratch};
  return mlfab_transport_sim()->open(&options, self_p, address);
}

int mlfab_open_start(const mlfab_config *config, mlfab **ctx_p, mlfab_error *error_p) {
  char address[256];
  mlfab *ctx = config->env->allocate(config->env->user, sizeof *ctx);
  *ctx = (mlfab){.config = *config, .env = *config->env, .deadline_ns = MLFAB__NEVER};
  assert_int_equal(transport_open(&ctx->env, config->transport_user, error_p, &ctx->self, address),
                   0);
  *ctx_p = ctx;
  return 0;
}

int mlfab_progress(mlfab *ctx, uint64_t timeout_ns) {
  const mlfab_transport *t = ctx->config.transport;
  mlfab_io_event event;
  int any = 0;
  assert_int_equal(timeout_ns, 0);
  ctx->progressed++;
  ctx->driven_at_ns = ctx->env.clock(ctx->env.user);
  while (t->poll(ctx->self, &event)) {
    any = 1;
    ctx->frames += event.kind == MLFAB_IO_FRAME;
    ctx->downs += event.kind == MLFAB_IO_DOWN;
    t->release(ctx->self, &event);
  }
  if (ctx->deadline_ns <= ctx->driven_at_ns) ctx->deadline_ns = MLFAB__NEVER;
  return any;
}

int mlfab_deadline(mlfab *ctx, uint64_t *at_ns_p) {
  *at_ns_p = ctx->deadline_ns;
  return 0;
}

int mlfab_is_ready(mlfab *ctx, mlfab_error *error_p) { return (void)ctx, (void)error_p, 1; }

static void context_free(mlfab *ctx) {
  mlfab_env env = ctx->env;
  ctx->config.transport->close(ctx->self);
  env.release(env.user, ctx, sizeof *ctx);
}

int mlfab_abandon(mlfab **ctx_p) {
  abandoned++;
  context_free(*ctx_p);
  *ctx_p = NULL;
  return 0;
}

/* ---- a rig: hosts with endpoints, and their events ---- */

typedef struct told {
  mlfab_io_event event;
  uint64_t at_ns;
  uint8_t first; /* first byte of the bulk */
} told;

typedef struct rig {
  mlfab_sim *sim;
  const mlfab_transport *t;
  void *self[HOSTS];
  told log[HOSTS][256];
  int count[HOSTS];
  int deaf[HOSTS]; /* does not poll */
} rig;

static rig *r; /* of the test that runs */

/* The options of most tests, with these changes. */
#define OPTIONS(...)                                                          \
  (mlfab_sim_options) {                                                       \
    .size = sizeof(mlfab_sim_options), .hosts = HOSTS, .latency_ns = LATENCY, \
    .rate_bytes_per_s = RATE, __VA_ARGS__                                     \
  }

static mlfab_sim_options plain(void) { return OPTIONS(.seed = 0); }

static void *endpoint(mlfab_sim *sim, uint32_t host) {
  mlfab_env env = {0};
  char address[256], expected[32];
  void *self = NULL;
  assert_int_equal(transport_open(&env, mlfab_sim_host(sim, host), NULL, &self, address), 0);
  snprintf(expected, sizeof expected, "sim:%u", (unsigned)host);
  assert_string_equal(address, expected);
  return self;
}

/* With `shared`, hosts 1 and 2 use host 0's ports. */
static void rig_make(const mlfab_sim_options *o, int shared) {
  r = calloc(1, sizeof *r);
  assert_int_equal(mlfab_sim_create(o, &r->sim), 0);
  r->t = mlfab_transport_sim();
  if (shared) {
    assert_int_equal(mlfab_sim_share(r->sim, 2, 1), 0);
    assert_int_equal(mlfab_sim_share(r->sim, 1, 0), 0); /* host 2 shares them too */
  }
  for (uint32_t i = 0; i < HOSTS; i++) r->self[i] = endpoint(r->sim, i);
}

static void rig_free(void) {
  for (int i = 0; i < HOSTS; i++)
    if (r->self[i]) r->t->close(r->self[i]);
  mlfab_sim_destroy(&r->sim);
  assert_null(r->sim);
  free(r);
  r = NULL;
}

static int make(void **state, int shared) {
  mlfab_sim_options o = plain();
  (void)state;
  rig_make(&o, shared);
  return 0;
}

static int make_plain(void **state) { return make(state, 0); }
static int make_shared(void **state) { return make(state, 1); }

static int unmake(void **state) {
  (void)state;
  rig_free();
  return 0;
}

/* A test of hosts with their own ports; of hosts that share ports; of hosts that it makes itself. */
#define RIG_TEST(name) TEST_WITH(name, make_plain, unmake)
#define SHARED_TEST(name) TEST_WITH(name, make_shared, unmake)
#define OWN_RIG_TEST(name) TEST_WITH(name, NULL, unmake)

static uint64_t now(void) { return mlfab_sim_clock(r->sim); }

static void rig_listen(void *unused) {
  (void)unused;
  for (int i = 0; i < HOSTS; i++) {
    mlfab_io_event event;
    while (r->self[i] && !r->deaf[i] && r->t->poll(r->self[i], &event)) {
      assert_true(r->count[i] < 256);
      told *x = &r->log[i][r->count[i]++];
      x->event = event;
      x->at_ns = now();
      if (event.bulk) x->first = *(const uint8_t *)event.bulk;
      r->t->release(r->self[i], &event);
    }
  }
}

static void rig_run(uint64_t duration_ns) {
  uint64_t until = now() + duration_ns;
  int more = 1;
  rig_listen(NULL);
  mlfab_sim_at(r->sim, until, rig_listen, NULL);
  while (more && now() < until) {
    more = mlfab_sim_step(r->sim);
    rig_listen(NULL);
  }
}

/* The n-th event (from 0) of that kind at a host, or NULL. */
static const told *seen(int host, uint32_t kind, int n) {
  for (int i = 0; i < r->count[host]; i++)
    if (r->log[host][i].event.kind == kind && n-- == 0) return &r->log[host][i];
  return NULL;
}

static int times(int host, uint32_t kind) {
  int n = 0;
  while (seen(host, kind, n)) n++;
  return n;
}

/* A link's number at either end. */
typedef struct pair {
  uint32_t a, b;
} pair;

static uint32_t link_of(int host, int n, uint64_t token) {
  const told *up = seen(host, MLFAB_IO_UP, n);
  assert_non_null(up);
  assert_int_equal(up->event.token, token);
  return up->event.link;
}

static pair connect_pair(int a, int b) {
  char address[32];
  int ups_a = times(a, MLFAB_IO_UP), ups_b = times(b, MLFAB_IO_UP);
  snprintf(address, sizeof address, "sim:%d", b);
  assert_int_equal(r->t->reach(r->self[a], address), 1);
  assert_int_equal(r->t->connect(r->self[a], address, 77), 0);
  rig_run(4 * LATENCY);
  return (pair){link_of(a, ups_a, 77), link_of(b, ups_b, 0)};
}

/* So many events of this kind at hosts 0, 1 and so on. */
static void all_times(uint32_t kind, const int *counts, int n) {
  for (int i = 0; i < n; i++)
    if (times(i, kind) != counts[i])
      fail_msg("host %d: %d events of kind %u, not %d", i, times(i, kind), kind, counts[i]);
}
#define TIMES(kind, ...)                                 \
  all_times(MLFAB_IO_##kind, (const int[]){__VA_ARGS__}, \
            (int)(sizeof((const int[]){__VA_ARGS__}) / sizeof(int)))

static uint64_t at(int host, uint32_t kind, int n) {
  assert_non_null(seen(host, kind, n));
  return seen(host, kind, n)->at_ns;
}

static void set_rate(uint32_t host, uint64_t in, uint64_t out) {
  assert_int_equal(mlfab_sim_set_rate(r->sim, host, in, out), 0);
}

static void partition(uint32_t one, uint32_t other, int apart) {
  assert_int_equal(mlfab_sim_partition(r->sim, one, other, apart), 0);
}

/* Sends a ghost frame of `bytes` in total. */
static int send_ghost(int host, uint32_t link, uint32_t bytes, uint64_t token) {
  uint8_t head[HEAD] = {(uint8_t)token};
  return r->t->send(r->self[host], link, head, HEAD, NULL, bytes - HEAD, token);
}

static void ghost(int host, uint32_t link, uint32_t bytes, uint64_t token) {
  assert_int_equal(send_ghost(host, link, bytes, token), 0);
}

/* Sends some in a row. */
static void ghosts(int count, int host, uint32_t link, uint32_t bytes, uint64_t token) {
  while (count-- > 0) ghost(host, link, bytes, token);
}

/* ---- time ---- */

RIG_TEST(test_rate_and_latency_are_exact) {
  pair p = connect_pair(0, 1);
  uint64_t start = now();
  ghost(0, p.a, 1000000, 5);
  rig_run(3 * SECOND);
  /* A second to send, the latency, a second to receive. */
  assert_int_equal(at(0, MLFAB_IO_SENT, 0), start + SECOND);
  assert_int_equal(seen(0, MLFAB_IO_SENT, 0)->event.token, 5);
  const told *frame = seen(1, MLFAB_IO_FRAME, 0);
  assert_int_equal(frame->at_ns, start + 2 * SECOND + LATENCY);
  assert_int_equal(frame->event.link, p.b);
  assert_int_equal(frame->event.head_bytes, HEAD);
  assert_int_equal(frame->event.bulk_bytes, 1000000 - HEAD);
  assert_null(frame->event.bulk);
  /* Ten frames in a row take eleven frame times. */
  start = now();
  for (uint64_t i = 0; i < 10; i++) ghost(0, p.a, 100000, 10 + i);
  rig_run(3 * SECOND);
  assert_int_equal(at(1, MLFAB_IO_FRAME, 10), start + 1100 * MILLI + LATENCY);
}

OWN_RIG_TEST(test_order_and_bytes) {
  rig_make(&OPTIONS(.latency_jitter = 1, .reorder = 0.3), 0);
  pair p = connect_pair(0, 1);
  uint8_t head[HEAD] = {0}, bulk[100];
  for (int i = 0; i < 100; i++) { /* token 0: copied at once, so the buffer may change */
    memset(bulk, i, sizeof bulk);
    assert_int_equal(r->t->send(r->self[0], p.a, head, HEAD, bulk, sizeof bulk, 0), 0);
  }
  rig_run(3 * SECOND);
  TIMES(FRAME, 0, 100);
  TIMES(SENT, 0);
  for (int i = 0; i < 100; i++) assert_int_equal(seen(1, MLFAB_IO_FRAME, i)->first, i);
}

RIG_TEST(test_bulk_is_borrowed_until_sent) {
  pair p = connect_pair(0, 1);
  uint8_t head[HEAD] = {0}, bulk[3][1000];
  memset(bulk, 1, sizeof bulk);
  for (uint64_t i = 0; i < 3; i++)
    assert_int_equal(r->t->send(r->self[0], p.a, head, HEAD, bulk[i], 1000, 20 + i), 0);
  assert_int_equal(r->t->detach(r->self[0], p.a, 21), 0);
  memset(bulk[1], 2, 1000); /* detached: the receiver does not see it */
  memset(bulk[2], 3, 1000); /* borrowed: the receiver sees it */
  rig_run(SECOND);
  assert_int_equal(seen(1, MLFAB_IO_FRAME, 0)->first, 1);
  assert_int_equal(seen(1, MLFAB_IO_FRAME, 1)->first, 1);
  assert_int_equal(seen(1, MLFAB_IO_FRAME, 2)->first, 3);
  assert_non_null(seen(0, MLFAB_IO_SENT, 2));
}

RIG_TEST(test_two_senders_share_the_receiver) {
  pair p = connect_pair(0, 2), q = connect_pair(1, 2);
  uint64_t start = now();
  int early = 0;
  for (uint64_t i = 0; i < 20; i++) {
    ghost(0, p.a, 50000, 1);
    ghost(1, q.a, 50000, 2);
  }
  rig_run(4 * SECOND);
  /* 2 MB into a port of 1 MB/s: two seconds, plus the first frame's time on the out-port. */
  assert_int_equal(times(2, MLFAB_IO_FRAME), 40);
  assert_int_equal(at(2, MLFAB_IO_FRAME, 39), start + 2050 * MILLI + LATENCY);
  /* In turns: neither link is more than a frame ahead. */
  for (int i = 0; i < 40; i++) {
    early += seen(2, MLFAB_IO_FRAME, i)->event.link == p.b ? 1 : -1;
    assert_in_range(early + 1, 0, 2);
  }
}

RIG_TEST(test_small_frames_do_not_wait_for_other_links) {
  pair p = connect_pair(0, 2), q = connect_pair(0, 1);
  ghosts(40, 0, p.a, 100000, 1);
  uint64_t start = now();
  ghost(0, q.a, HEAD, 2);
  rig_run(5 * SECOND);
  assert_true(at(1, MLFAB_IO_FRAME, 0) < start + 150 * MILLI);
  assert_int_equal(times(2, MLFAB_IO_FRAME), 40);
}

/* One frame each in turn: links with different frame sizes get different shares. */
RIG_TEST(test_a_port_serves_its_lanes_in_turn) {
  pair p = connect_pair(0, 1), q = connect_pair(0, 2), s = connect_pair(0, 3);
  uint64_t start = now();
  ghosts(10, 0, p.a, 30000, 1);
  ghosts(10, 0, q.a, 10000, 2);
  ghosts(5, 0, s.a, 20000, 3);
  rig_run(2 * SECOND);
  for (int i = 0; i < 20; i++) {
    static const uint64_t turn[2][3] = {{1, 2, 3}, {1, 2, 0}};
    uint64_t token = i < 15 ? turn[0][i % 3] : turn[1][(i - 15) % 2];
    assert_int_equal(seen(0, MLFAB_IO_SENT, i)->event.token, token);
  }
  assert_int_equal(at(0, MLFAB_IO_SENT, 2), start + 60 * MILLI);
  assert_int_equal(at(0, MLFAB_IO_SENT, 24), start + 500 * MILLI);
}

RIG_TEST(test_rate_changes_in_the_middle) {
  pair p = connect_pair(0, 1);
  uint64_t start = now();
  ghost(0, p.a, 1000000, 5);
  rig_run(SECOND / 4);
  set_rate(0, RATE, 0); /* a quarter has been sent; now the port stops */
  rig_run(SECOND);
  TIMES(SENT, 0);
  set_rate(0, RATE, 3 * RATE); /* the rest takes 0.25 s */
  rig_run(3 * SECOND);
  assert_int_equal(at(0, MLFAB_IO_SENT, 0), start + 1500 * MILLI);
  assert_int_equal(at(1, MLFAB_IO_FRAME, 0), start + 2500 * MILLI + LATENCY);
  assert_int_equal(mlfab_sim_set_rate(r->sim, HOSTS, 1, 1), MLFAB_ERR_ARGUMENT);
  /* Half a second at half the rate, then at a quarter, then at an eighth. */
  set_rate(0, RATE, RATE / 2);
  start = now();
  ghost(0, p.a, 1000000, 6);
  for (uint64_t k = 0; k < 3; k++) {
    set_rate(0, RATE, RATE / (2u << k));
    rig_run(k == 0 ? SECOND / 2 : k == 1 ? SECOND : 6 * SECOND);
  }
  assert_int_equal(at(0, MLFAB_IO_SENT, 1), start + 5500 * MILLI);
}

OWN_RIG_TEST(test_again_and_writable) {
  rig_make(&OPTIONS(.buffer_bytes = 100000), 0);
  pair p = connect_pair(0, 1);
  r->deaf[1] = 1;
  ghosts(10, 0, p.a, 10000, 1);
  assert_int_equal(send_ghost(0, p.a, HEAD, 1), MLFAB_ERR_AGAIN);
  rig_run(2 * SECOND); /* all of it has arrived, and nobody reads: no room */
  TIMES(WRITABLE, 0);
  assert_int_equal(send_ghost(0, p.a, HEAD, 1), MLFAB_ERR_AGAIN);
  r->deaf[1] = 0;
  rig_run(SECOND);
  TIMES(WRITABLE, 1);
  ghost(0, p.a, 500000, 1); /* larger than the buffer, but alone */
  assert_int_equal(send_ghost(0, p.a, HEAD, 1), MLFAB_ERR_AGAIN);
  rig_run(3 * SECOND);
  TIMES(WRITABLE, 2);
  TIMES(FRAME, 0, 11);
}

/* ---- hosts that share their ports ---- */

TEST(test_shared_ports_share_the_rate) {
  for (int shared = 0; shared < 2; shared++) {
    rig_make(&OPTIONS(.seed = 0), shared);
    pair out_a = connect_pair(0, 5), out_b = connect_pair(1, 6);
    pair in_a = connect_pair(5, 0), in_b = connect_pair(6, 2);
    uint64_t start = now(), twice = shared ? 2 : 1;
    for (int i = 0; i < 10; i++) {
      ghost(0, out_a.a, 10000, 1);
      ghost(1, out_b.a, 10000, 1);
      ghost(5, in_a.a, 10000, 1);
      ghost(6, in_b.a, 10000, 1);
    }
    rig_run(SECOND);
    assert_int_equal(at(1, MLFAB_IO_SENT, 9), start + twice * 100 * MILLI);
    assert_int_equal(at(5, MLFAB_IO_SENT, 9), start + 100 * MILLI);
    assert_int_equal(at(2, MLFAB_IO_FRAME, 9), start + (10 + twice * 100) * MILLI + LATENCY);
    assert_int_equal(times(0, MLFAB_IO_FRAME), 10);
    /* The rate of one host is that of all that share its port. */
    set_rate(1, RATE, RATE / 10);
    start = now();
    ghost(0, out_a.a, 10000, 7);
    rig_run(SECOND);
    assert_int_equal(at(0, MLFAB_IO_SENT, 10), start + (shared ? 100 : 10) * MILLI);
    rig_free();
  }
}

/* Traffic between sharing hosts uses no port, so it continues when the ports stand still; partitions and
 * pauses are per host. */
OWN_RIG_TEST(test_sharing_hosts_talk_past_their_ports) {
  rig_make(&OPTIONS(.loss = 1, .duplicate = 1), 1);
  set_rate(2, 0, 0);
  pair p = connect_pair(0, 1), q = connect_pair(2, 1);
  uint64_t start = now();
  ghost(0, p.a, 500000, 1);
  ghost(1, p.b, 500000, 1);
  rig_run(MILLI);
  assert_int_equal(at(1, MLFAB_IO_FRAME, 0), start + 1000);
  assert_int_equal(at(0, MLFAB_IO_FRAME, 0), start + 1000);
  partition(0, 1, 1);
  assert_int_equal(mlfab_sim_pause(r->sim, 2, 100 * MILLI), 0);
  start = now();
  ghost(0, p.a, 1000, 1);
  ghost(2, q.a, 1000, 1);
  ghost(1, q.b, 1000, 1);
  rig_run(SECOND);
  TIMES(FRAME, 1, 2, 1);
  assert_int_equal(at(1, MLFAB_IO_FRAME, 1), start + 1000);
  assert_int_equal(at(2, MLFAB_IO_FRAME, 0), start + 100 * MILLI);
  partition(0, 1, 0);
  rig_run(SECOND);
  TIMES(FRAME, 1, 3);
  r->t->disconnect(r->self[0], p.a);
  rig_run(MILLI);
  TIMES(DOWN, 0, 1);
}

/* A sharing host that crashes leaves the ports to the others. */
SHARED_TEST(test_a_crash_leaves_shared_ports) {
  pair p = connect_pair(0, 5), q = connect_pair(1, 5);
  uint64_t start = now();
  ghost(1, q.a, 500000, 1);
  ghost(0, p.a, 100000, 1);
  rig_run(100 * MILLI);
  assert_int_equal(mlfab_sim_crash(r->sim, 1), 0);
  rig_run(SECOND);
  assert_int_equal(at(0, MLFAB_IO_SENT, 0), start + 200 * MILLI);
  assert_int_equal(times(5, MLFAB_IO_FRAME), 1);
}

TEST(test_sharing_is_refused_late) {
  mlfab_sim_options o = plain();
  mlfab_sim *sim = NULL;
  assert_int_equal(mlfab_sim_create(&o, &sim), 0);
  assert_int_equal(mlfab_sim_share(NULL, 0, 1), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_sim_share(sim, 0, 0), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_sim_share(sim, HOSTS, 0), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_sim_share(sim, 0, HOSTS), MLFAB_ERR_ARGUMENT);
  void *self = endpoint(sim, 1);
  assert_int_equal(mlfab_sim_share(sim, 1, 2), MLFAB_ERR_STATE);
  assert_int_equal(mlfab_sim_share(sim, 2, 1), 0); /* the other way round is allowed */
  assert_int_equal(mlfab_sim_share(sim, 1, 2), 0); /* and now it is set */
  assert_int_equal(mlfab_sim_share(sim, 2, 3), MLFAB_ERR_STATE);
  mlfab_transport_sim()->close(self);
  assert_int_equal(mlfab_sim_share(sim, 2, 3), MLFAB_ERR_STATE);
  mlfab_sim_destroy(&sim);
}

/* ---- measuring ---- */

static int measure(int host, mlfab_measure *m) { return r->t->measure(r->self[host], now(), m); }

RIG_TEST(test_measure_is_exact) {
  pair p = connect_pair(0, 1);
  mlfab_measure m, n;
  assert_int_equal(measure(0, &m), 0); /* start of the window */
  assert_int_equal(measure(1, &m), 0);
  assert_int_equal(measure(0, &m), 0); /* no time has passed */
  ghost(0, p.a, 1000000, 5);
  rig_run(SECOND / 4); /* in the middle of the frame */
  assert_int_equal(measure(0, &m), 1);
  assert_int_equal(m.elapsed_ns, SECOND / 4);
  assert_int_equal(m.bytes_out, 250000);
  assert_int_equal(m.bytes_in, 0);
  assert_true(m.delivery_out == 1e6 && m.delivery_in == 0 && m.nominal == 0);
  assert_int_equal(m.limited_out, 0);
  assert_int_equal(m.limited_in, 1);
  /* the port stands still, but is not idle */
  set_rate(0, RATE, 0);
  rig_run(SECOND);
  assert_int_equal(measure(0, &m), 1);
  assert_int_equal(m.bytes_out, 0);
  assert_int_equal(m.limited_out, 0);
  set_rate(0, RATE, 2 * RATE);
  rig_run(SECOND); /* out in 375 ms, then in for a second */
  assert_int_equal(measure(0, &m), 1);
  assert_int_equal(m.bytes_out, 750000);
  assert_true(m.delivery_out == 2e6);
  assert_int_equal(m.limited_out, 1);
  assert_int_equal(measure(1, &n), 1);
  assert_int_equal(n.elapsed_ns, 9 * SECOND / 4);
  assert_int_equal(n.bytes_in, 624000); /* 625 ms minus the latency */
  assert_int_equal(n.bytes_out, 0);
  assert_true(n.delivery_in == 1e6);
  /* Of a lost frame the bytes that had passed count. */
  r->t->close(r->self[0]);
  r->self[0] = NULL;
  assert_int_equal(mlfab_sim_crash(r->sim, 1), 0);
  assert_int_equal(measure(1, &n), 0); /* a dead endpoint measures nothing */
}

SHARED_TEST(test_measure_counts_for_all_that_share) {
  pair p = connect_pair(0, 5), q = connect_pair(1, 5), local = connect_pair(0, 2);
  mlfab_measure m[3];
  for (int i = 0; i < 3; i++) assert_int_equal(measure(i, &m[i]), 0);
  ghost(0, p.a, 100000, 1);
  ghost(1, q.a, 200000, 1);
  ghost(0, local.a, 400000, 1);
  rig_run(250 * MILLI);
  assert_int_equal(mlfab_sim_crash(r->sim, 1), 0); /* with 50000 bytes to go */
  rig_run(SECOND);
  for (int i = 0; i < 3; i += 2) {
    assert_int_equal(measure(i, &m[i]), 1);
    assert_int_equal(m[i].bytes_out, 250000);
    assert_true(m[i].delivery_out == 1e6);
  }
}

/* Under load the monitor finds the rate, and a changed one within two seconds. */
OWN_RIG_TEST(test_the_monitor_finds_the_rate) {
  static const uint64_t rates[] = {RATE, RATE / 4, 3 * RATE, RATE / 10};
  rig_make(&OPTIONS(.seed = 0), 0);
  pair p = connect_pair(0, 1);
  mlfab__monitor monitor;
  mlfab_measure m;
  double in, out;
  mlfab__monitor_init(&monitor, SECOND / 2);
  assert_int_equal(measure(0, &m), 0);
  for (size_t k = 0; k < MLFAB__COUNT(rates); k++) {
    set_rate(0, RATE, rates[k]);
    for (int i = 0; i < 12; i++) {
      while (send_ghost(0, p.a, 100000, 1) == 0) continue;
      rig_run(SECOND / 4);
      r->count[0] = r->count[1] = 0;
      assert_int_equal(measure(0, &m), 1);
      mlfab__monitor_sample(&monitor, &m, now());
      (void)mlfab__monitor_take(&monitor, now(), &in, &out);
      if (i >= 8) assert_true(out > 0.9 * (double)rates[k] && out < 1.1 * (double)rates[k]);
    }
  }
  assert_true(in < 0);
}

/* ---- connecting and closing ---- */

RIG_TEST(test_connect_refused_and_nonsense) {
  uint64_t start = now();
  r->t->close(r->self[3]);
  r->self[3] = NULL;
  assert_int_equal(r->t->connect(r->self[0], "sim:3", 9), 0);
  rig_run(SECOND);
  const told *down = seen(0, MLFAB_IO_DOWN, 0);
  assert_int_equal(down->at_ns, start + 2 * LATENCY);
  assert_int_equal(down->event.link, 0);
  assert_int_equal(down->event.token, 9);
  static const char *const wrong[] = {"sim:8", "sim:", "sim:1x", "tcp:1",
                                      "sim:99999999999999999999"};
  for (size_t i = 0; i < MLFAB__COUNT(wrong); i++)
    assert_int_equal(r->t->connect(r->self[0], wrong[i], 1), MLFAB_ERR_ADDRESS);
  assert_int_equal(send_ghost(0, 1, HEAD, 0), MLFAB_ERR_PEER_CLOSED);
  assert_int_equal(send_ghost(0, 0, HEAD, 0), MLFAB_ERR_PEER_CLOSED);
}

RIG_TEST(test_second_connect_replaces_the_first) {
  for (uint64_t pause = 0; pause < 3; pause++) { /* before it arrives, and on its way back */
    int ups = times(0, MLFAB_IO_UP), theirs = times(2, MLFAB_IO_UP);
    assert_int_equal(r->t->connect(r->self[0], "sim:1", 4), 0);
    rig_run(pause * LATENCY * 3 / 4);
    assert_int_equal(r->t->connect(r->self[0], "sim:2", 4), 0);
    rig_run(SECOND);
    assert_int_equal(times(0, MLFAB_IO_UP), ups + 1);
    assert_int_equal(times(2, MLFAB_IO_UP), theirs + 1);
  }
  assert_int_equal(times(1, MLFAB_IO_UP), times(1, MLFAB_IO_DOWN));
  assert_int_equal(times(0, MLFAB_IO_DOWN), 0);
}

RIG_TEST(test_disconnect_sends_what_was_accepted) {
  pair p = connect_pair(0, 1);
  uint8_t head[HEAD] = {0}, bulk[1000];
  memset(bulk, 6, sizeof bulk);
  for (int i = 0; i < 5; i++)
    assert_int_equal(r->t->send(r->self[0], p.a, head, HEAD, bulk, sizeof bulk, 3), 0);
  r->t->disconnect(r->self[0], p.a);
  memset(bulk, 7, sizeof bulk); /* nothing is borrowed any more */
  assert_int_equal(send_ghost(0, p.a, HEAD, 0), MLFAB_ERR_PEER_CLOSED);
  rig_run(SECOND);
  TIMES(SENT, 0);
  TIMES(DOWN, 0);
  TIMES(FRAME, 0, 5);
  for (int i = 0; i < 5; i++) assert_int_equal(seen(1, MLFAB_IO_FRAME, i)->first, 6);
  assert_int_equal(r->log[1][r->count[1] - 1].event.kind, MLFAB_IO_DOWN);
  assert_int_equal(r->log[1][r->count[1] - 1].event.link, p.b);
  r->t->disconnect(r->self[0], p.a);
  r->t->disconnect(r->self[1], p.b);
}

OWN_RIG_TEST(test_a_host_talks_to_itself) {
  rig_make(&OPTIONS(.loss = 1), 0);
  assert_int_equal(r->t->connect(r->self[0], "sim:0", 3), 0);
  rig_run(MILLI);
  TIMES(UP, 2);
  uint64_t start = now();
  ghost(0, seen(0, MLFAB_IO_UP, 1)->event.link, 500000, 1);
  rig_run(MILLI);
  assert_int_equal(at(0, MLFAB_IO_FRAME, 0), start + 1000);
  assert_int_equal(seen(0, MLFAB_IO_FRAME, 0)->event.link, seen(0, MLFAB_IO_UP, 0)->event.link);
  r->t->disconnect(r->self[0], seen(0, MLFAB_IO_UP, 0)->event.link);
  rig_run(MILLI);
  assert_int_equal(times(0, MLFAB_IO_DOWN), 1);
}

/* ---- faults ---- */

OWN_RIG_TEST(test_loss_breaks_the_connection) {
  rig_make(&OPTIONS(.loss = 1), 0);
  pair p = connect_pair(0, 1), q = connect_pair(2, 3);
  uint64_t start = now();
  ghost(0, p.a, 1000, 5);
  ghost(0, p.a, 1000, 6);
  ghost(1, p.b, 2000, 7);
  rig_run(SECOND);
  TIMES(FRAME, 0, 0);
  TIMES(DOWN, 1, 1, 0, 0);
  assert_int_equal(at(0, MLFAB_IO_DOWN, 0), start + MILLI);
  assert_int_equal(at(1, MLFAB_IO_DOWN, 0), start + MILLI + LATENCY);
  assert_int_equal(seen(0, MLFAB_IO_DOWN, 0)->event.link, p.a);
  ghost(2, q.a, HEAD, 0);
}

OWN_RIG_TEST(test_duplicate_delivers_and_breaks) {
  rig_make(&OPTIONS(.duplicate = 1), 0);
  pair p = connect_pair(0, 1);
  uint64_t start = now();
  ghost(0, p.a, 1000, 5);
  ghost(0, p.a, 1000, 6);
  rig_run(SECOND);
  TIMES(FRAME, 0, 1);
  assert_int_equal(at(1, MLFAB_IO_DOWN, 0), start + 2 * MILLI + LATENCY);
  assert_int_equal(at(0, MLFAB_IO_DOWN, 0), start + 2 * MILLI + 2 * LATENCY);
}

OWN_RIG_TEST(test_reorder_lets_other_links_overtake) {
  rig_make(&OPTIONS(.reorder = 0.5), 0);
  pair p = connect_pair(0, 1), q = connect_pair(0, 1);
  uint64_t order = 0, overtaken = 0;
  for (int i = 0; i < 20; i++) {
    ghost(0, p.a, 1000, 1);
    ghost(0, q.a, 1000, 1);
  }
  rig_run(2 * SECOND);
  TIMES(FRAME, 0, 40);
  for (uint64_t i = 0; i < 40; i++) {
    order += seen(1, MLFAB_IO_FRAME, (int)i)->event.link == p.b;
    if (order > i / 2 + 2 || order + 2 < i / 2) overtaken++;
  }
  assert_true(overtaken > 0);
  TIMES(DOWN, 0, 0);
}

RIG_TEST(test_partition_stalls_and_heals) {
  pair p = connect_pair(0, 1), q = connect_pair(0, 2);
  partition(0, 1, 1);
  uint64_t start = now();
  ghosts(3, 0, p.a, 1000, 1);
  ghost(1, p.b, 1000, 1);
  ghost(0, q.a, 1000, 1);
  assert_int_equal(r->t->connect(r->self[1], "sim:0", 8), 0);
  rig_run(5 * SECOND);
  TIMES(FRAME, 0, 0, 1);
  const told *down = seen(1, MLFAB_IO_DOWN, 0);
  assert_int_equal(down->event.token, 8);
  assert_int_equal(down->event.code, MLFAB_ERR_TIMEOUT);
  assert_int_equal(down->at_ns, start + 3 * SECOND);
  TIMES(DOWN, 0);
  partition(1, 0, 0);
  rig_run(SECOND);
  TIMES(FRAME, 1, 3, 1);
  assert_int_equal(mlfab_sim_partition(r->sim, 1, 1, 1), MLFAB_ERR_ARGUMENT);
}

RIG_TEST(test_partition_while_connecting) {
  assert_int_equal(r->t->connect(r->self[0], "sim:1", 3), 0);
  rig_run(LATENCY + 1000); /* 1 has accepted, 0 does not know yet */
  partition(0, 1, 1);
  ghost(1, seen(1, MLFAB_IO_UP, 0)->event.link, 1000, 1);
  rig_run(SECOND);
  assert_int_equal(r->count[0], 0);
  partition(0, 1, 0);
  rig_run(SECOND);
  assert_int_equal(r->log[0][0].event.kind, MLFAB_IO_UP);
  assert_int_equal(r->log[0][1].event.kind, MLFAB_IO_FRAME);
  /* If the partition does not heal in time, both ends report DOWN, the far one later. */
  assert_int_equal(r->t->connect(r->self[2], "sim:3", 3), 0);
  rig_run(LATENCY + 1000);
  partition(2, 3, 1);
  rig_run(4 * SECOND);
  assert_int_equal(seen(2, MLFAB_IO_DOWN, 0)->event.token, 3);
  assert_int_equal(seen(2, MLFAB_IO_DOWN, 0)->event.link, 0);
  assert_int_equal(times(3, MLFAB_IO_DOWN), 0);
  partition(2, 3, 0);
  rig_run(SECOND);
  assert_int_equal(times(3, MLFAB_IO_DOWN), 1);
}

RIG_TEST(test_pause_keeps_what_comes) {
  pair p = connect_pair(0, 1);
  assert_int_equal(mlfab_sim_pause(r->sim, 1, SECOND), 0);
  uint64_t start = now();
  ghosts(3, 0, p.a, 1000, 1);
  rig_run(2 * SECOND);
  assert_int_equal(times(1, MLFAB_IO_FRAME), 3);
  assert_int_equal(at(1, MLFAB_IO_FRAME, 0), start + SECOND);
}

/* A stopped process is on a host that answers probes; a partitioned host, or one without its network card,
 * does not answer. */
RIG_TEST(test_probes) {
  pair p = connect_pair(0, 1);
  assert_int_equal(mlfab_sim_pause(r->sim, 1, SECOND), 0);
  assert_int_equal(r->t->probe(r->self[0], p.a), 0);
  assert_int_equal(r->t->probe(r->self[1], p.b), 0);
  partition(0, 1, 1);
  assert_int_equal(r->t->probe(r->self[0], p.a), MLFAB_ERR_AGAIN);
  partition(0, 1, 0);
  assert_int_equal(r->t->probe(r->self[0], p.a), 0);
  set_rate(1, 0, RATE);
  assert_int_equal(r->t->probe(r->self[0], p.a), MLFAB_ERR_AGAIN);
  set_rate(1, RATE, RATE);
  r->t->disconnect(r->self[1], p.b);
  rig_run(SECOND);
  assert_int_equal(r->t->probe(r->self[0], p.a), MLFAB_ERR_AGAIN);
}

static int restarts;
static void on_restart(void *user, uint32_t host) {
  (void)user;
  restarts++;
  if (r->self[host]) r->t->close(r->self[host]);
  r->self[host] = endpoint(r->sim, host);
}

RIG_TEST(test_crash_and_restart) {
  pair p = connect_pair(0, 1), q = connect_pair(2, 1);
  restarts = 0;
  assert_int_equal(mlfab_sim_on_crash(r->sim, 1, on_restart, NULL), 0);
  partition(1, 2, 1);
  ghost(1, p.b, 1000, 1);
  ghost(0, p.a, 1000, 1);
  uint64_t start = now();
  assert_int_equal(mlfab_sim_crash(r->sim, 1), 0);
  assert_int_equal(mlfab_sim_crash(r->sim, 1), MLFAB_ERR_STATE);
  assert_int_equal(send_ghost(1, p.b, 1000, 1), MLFAB_ERR_PEER_CLOSED);
  ghost(2, q.a, 1000, 7); /* it does not know of the crash yet */
  rig_run(2 * SECOND);
  assert_int_equal(restarts, 1);
  assert_int_equal(at(0, MLFAB_IO_DOWN, 0), start + LATENCY);
  TIMES(FRAME, 0);
  TIMES(DOWN, 1, 0, 0); /* host 2 is partitioned: it learns nothing */
  TIMES(SENT, 0, 0, 1);
  partition(1, 2, 0);
  rig_run(SECOND);
  TIMES(DOWN, 1, 0, 1);
  connect_pair(0, 1);
}

/* Random traffic with all faults; returns a hash of the events. */
static uint64_t storm(uint64_t seed, int shared, int *downs_p, int *frames_p, int *restarts_p) {
  uint64_t hash = 0;
  rig_make(&OPTIONS(.seed = seed, .latency_jitter = 0.5, .loss = 0.002, .duplicate = 0.002,
                    .reorder = 0.05, .partition = 0.5, .crash = 0.05, .pause = 0.05, .slow = 0.05),
           shared);
  restarts = 0;
  *downs_p = *frames_p = 0;
  for (uint32_t i = 0; i < HOSTS; i++)
    assert_int_equal(mlfab_sim_on_crash(r->sim, i, on_restart, NULL), 0);
  for (int round = 0; round < 400; round++) {
    for (int i = 0; i < HOSTS; i++) {
      char address[32];
      snprintf(address, sizeof address, "sim:%d", (i + 1 + round % 3) % HOSTS);
      if (round % 20 == 0) r->t->connect(r->self[i], address, 1);
      for (int k = 0; k < r->count[i]; k++) {
        const mlfab_io_event *event = &r->log[i][k].event;
        if (event->kind == MLFAB_IO_DOWN) ++*downs_p;
        if (event->kind == MLFAB_IO_FRAME) ++*frames_p;
        if (event->kind == MLFAB_IO_UP || event->kind == MLFAB_IO_FRAME)
          send_ghost(i, event->link, HEAD + (uint32_t)(round * 37 % 999), 1);
      }
      r->count[i] = 0;
    }
    mlfab_sim_run(r->sim, 50 * MILLI);
    rig_listen(NULL);
  }
  assert_int_equal(mlfab_sim_trace_hash(r->sim, &hash), 0);
  *restarts_p = restarts;
  rig_free();
  return hash;
}

TEST(test_same_seed_same_hash) {
  uint64_t last = 0;
  for (uint64_t seed = 1; seed < 17; seed++) {
    int downs, frames, back, downs2, frames2, back2, shared = seed > 11;
    uint64_t hash = storm(seed, shared, &downs, &frames, &back);
    assert_true(hash == storm(seed, shared, &downs2, &frames2, &back2));
    assert_int_equal(downs, downs2);
    assert_int_equal(frames, frames2);
    assert_true(downs > 0 && frames > 0 && back > 0);
    assert_true(hash != last);
    last = hash;
  }
}

/* ---- contexts ---- */

static void push_forward(void *user) {
  mlfab *ctx = *(mlfab **)user;
  /* as every call on a context does */
  ctx->deadline_ns = ctx->env.clock(ctx->env.user) + 5 * MILLI;
}

TEST(test_contexts_are_driven) {
  mlfab_sim_options o = plain();
  mlfab_sim *sim = NULL;
  mlfab *a = NULL, *b = NULL;
  mlfab_config config;
  mlfab_error error;
  abandoned = 0;
  mlfab_config_init(&config);
  assert_int_equal(mlfab_sim_create(&o, &sim), 0);
  assert_int_equal(mlfab_sim_open(sim, 0, &config, &a, &error), 0);
  assert_int_equal(mlfab_sim_open(sim, 1, &config, &b, &error), 0);
  assert_int_equal(mlfab_sim_open(sim, 1, &config, &b, &error), MLFAB_ERR_ADDRESS_IN_USE);
  assert_string_equal(a->config.coordinator, "sim:0");
  /* A deadline, and a callback that moves it forward. */
  uint64_t start = mlfab_sim_clock(sim);
  a->deadline_ns = start + 100 * MILLI;
  a->env.clock(a->env.user);
  mlfab_sim_at(sim, start + 10 * MILLI, push_forward, &a);
  while (mlfab_sim_clock(sim) < start + 15 * MILLI) assert_int_equal(mlfab_sim_step(sim), 1);
  assert_int_equal(a->driven_at_ns, start + 15 * MILLI);
  assert_int_equal(mlfab_sim_step(sim), 0);
  /* An event. */
  const mlfab_transport *t = mlfab_transport_sim();
  assert_int_equal(t->connect(a->self, "sim:1", 1), 0);
  mlfab_sim_run(sim, SECOND);
  assert_int_equal(mlfab_sim_clock(sim), start + 15 * MILLI + SECOND);
  assert_true(b->progressed >= 2);
  /* A pause: the context is driven after it. */
  assert_int_equal(mlfab_sim_pause(sim, 1, SECOND), 0);
  start = mlfab_sim_clock(sim);
  context_free(a);
  a = NULL;
  mlfab_sim_run(sim, 2 * SECOND);
  assert_int_equal(b->downs, 1);
  assert_int_equal(b->driven_at_ns, start + SECOND);
  /* A crash. */
  assert_int_equal(mlfab_sim_crash(sim, 1), 0);
  assert_null(b);
  assert_int_equal(abandoned, 1);
  assert_int_equal(mlfab_sim_open(sim, 1, &config, &b, &error), 0);
  context_free(b);
  mlfab_sim_destroy(&sim);
}

static void crash_zero(void *user) { assert_int_equal(mlfab_sim_crash(user, 0), 0); }

TEST(test_wait_runs_the_others) {
  mlfab_sim_options o = plain();
  mlfab_sim *sim = NULL;
  mlfab *a = NULL, *b = NULL;
  mlfab_config config;
  mlfab_config_init(&config);
  assert_int_equal(mlfab_sim_create(&o, &sim), 0);
  assert_int_equal(mlfab_sim_open(sim, 0, &config, &a, NULL), 0);
  assert_int_equal(mlfab_sim_open(sim, 1, &config, &b, NULL), 0);
  mlfab_sim_run(sim, 1);
  const mlfab_transport *t = mlfab_transport_sim();
  uint64_t start = mlfab_sim_clock(sim);
  int progressed = a->progressed;
  assert_int_equal(t->connect(a->self, "sim:1", 1), 0);
  t->wait(a->self, SECOND); /* ends with UP */
  assert_int_equal(mlfab_sim_clock(sim), start + 2 * LATENCY);
  assert_int_equal(a->progressed, progressed);
  assert_true(b->progressed > 1);
  mlfab_io_event event;
  assert_int_equal(t->poll(a->self, &event), 1);
  start = mlfab_sim_clock(sim);
  t->wait(a->self, 3 * MILLI); /* no event: exactly the timeout */
  assert_int_equal(mlfab_sim_clock(sim), start + 3 * MILLI);
  t->wake(a->self);
  t->wait(a->self, SECOND);
  assert_int_equal(mlfab_sim_clock(sim), start + 3 * MILLI);
  /* A crash of the waiting host takes effect when its call returns. */
  mlfab_sim_at(sim, start + 4 * MILLI, crash_zero, sim);
  t->wait(a->self, 3 * MILLI);
  assert_non_null(a);
  mlfab_sim_run(sim, 0);
  assert_null(a);
  context_free(b);
  mlfab_sim_destroy(&sim);
}

/* ---- size and memory ---- */

TEST(test_a_thousand_hosts) {
  enum { MANY = 1000 };
  static void *self[MANY];
  mlfab_sim_options o = plain();
  mlfab_sim *sim = NULL;
  int up = 0, frames = 0;
  o.hosts = MANY;
  o.rate_bytes_per_s = 1000000000;
  assert_int_equal(mlfab_sim_create(&o, &sim), 0);
  const mlfab_transport *t = mlfab_transport_sim();
  for (uint32_t i = 0; i < MANY; i++) self[i] = endpoint(sim, i);
  for (uint64_t i = 1; i < MANY; i++) assert_int_equal(t->connect(self[i], "sim:0", i), 0);
  for (int steps = 0; steps < 100 * MANY && mlfab_sim_step(sim); steps++) {
    for (int i = 0; i < MANY; i = i ? MANY : 1) { /* the server polls at every step */
      mlfab_io_event event;
      while (t->poll(self[0], &event)) {
        frames += event.kind == MLFAB_IO_FRAME;
        t->release(self[0], &event);
      }
    }
    if (steps % 50) continue;
    for (int i = 1; i < MANY; i++) {
      mlfab_io_event event;
      uint8_t head[HEAD] = {0};
      while (t->poll(self[i], &event)) {
        up += event.kind == MLFAB_IO_UP;
        if (event.kind == MLFAB_IO_UP)
          for (int k = 0; k < 10; k++)
            assert_int_equal(t->send(self[i], event.link, head, HEAD, NULL, 100000, 0), 0);
      }
    }
  }
  assert_int_equal(up, MANY - 1);
  assert_int_equal(frames, 10 * (MANY - 1));
  for (int i = 0; i < MANY; i++) t->close(self[i]);
  mlfab_sim_destroy(&sim);
}

/* Whichever allocation fails: no crash, no leak, and every accepted frame arrives or its link breaks. */
TEST(test_out_of_memory_at_every_step) {
  for (uint64_t limit = 0; limit < 60; limit++) {
    budget b = {limit, 0};
    mlfab_env env = budget_env(&b);
    mlfab_sim_options o = plain();
    o.env = &env;
    r = calloc(1, sizeof *r);
    r->t = mlfab_transport_sim();
    if (mlfab_sim_create(&o, &r->sim) == 0) {
      char address[256];
      int accepted = 0;
      for (uint32_t i = 0; i < 2; i++)
        if (transport_open(NULL, mlfab_sim_host(r->sim, i), NULL, &r->self[i], address))
          r->self[i] = NULL;
      if (r->self[0] && r->t->connect(r->self[0], "sim:1", 1) == 0) {
        rig_run(10 * MILLI);
        const told *up = seen(0, MLFAB_IO_UP, 0);
        assert_true(up || seen(0, MLFAB_IO_DOWN, 0));
        uint8_t head[HEAD] = {0}, bulk[5000] = {0};
        for (uint64_t i = 0; up && i < 8; i++)
          accepted += !r->t->send(r->self[0], up->event.link, head, HEAD, bulk,
                                  (uint32_t)(500 * (i + 1)), i % 3);
        rig_run(SECOND);
        if (up && times(1, MLFAB_IO_FRAME) < accepted) {
          assert_int_equal(seen(0, MLFAB_IO_DOWN, 0)->event.code, MLFAB_ERR_MEMORY);
          assert_non_null(seen(1, MLFAB_IO_DOWN, 0));
        }
      }
      for (int i = 0; i < 2; i++)
        if (r->self[i]) r->t->close(r->self[i]);
      mlfab_sim_destroy(&r->sim);
    }
    assert_int_equal(b.bytes, 0);
    free(r);
  }
}

TEST(test_bad_options) {
  mlfab_sim *sim = NULL;
  mlfab_sim_options o = plain();
  assert_int_equal(mlfab_sim_create(NULL, &sim), MLFAB_ERR_ARGUMENT);
  o.hosts = 0;
  assert_int_equal(mlfab_sim_create(&o, &sim), MLFAB_ERR_ARGUMENT);
  o = plain();
  o.loss = 1.5;
  assert_int_equal(mlfab_sim_create(&o, &sim), MLFAB_ERR_ARGUMENT);
  o = plain();
  o.size = offsetof(mlfab_sim_options, loss); /* an older caller: later fields are not read */
  o.loss = 7;
  assert_int_equal(mlfab_sim_create(&o, &sim), 0);
  assert_null(mlfab_sim_host(sim, HOSTS));
  assert_int_equal(mlfab_sim_at(sim, 0, NULL, NULL), MLFAB_ERR_ARGUMENT);
  assert_int_equal(mlfab_sim_step(sim), 0);
  mlfab_sim_destroy(&sim);
  mlfab_sim_destroy(&sim);
}

TESTS(NULL, NULL)
