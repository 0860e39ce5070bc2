/* test_node.c - hand-driven nodes, and their reaction to broken or hostile frames.
 *
 * Queues join three nodes (node 0 serves), see queues.h. The outside sends whatever a test asks for. Node 0 then closes
 * the link and counts the error; the model keeps its bits, and the other nodes continue. */
#include "core/api/parts.h"
#include "core/coll/comm.h"
#include "core/base/rng.h"
#include "core/wire/peer_wire.h"
#include "core/server/server.h"

enum { COUNT = 6000, QUEUE = 4096, LINKS = 512 };
#include "queues.h"

static struct {
  uint64_t job;          /* of frames from the outside */
  uint64_t nonce[NODES]; /* of the nodes that joined */
} n;

static void carry(int from, int to, mlfab_io_event frame) { (void)from, post(to, frame); }

static void turn(void) {
  q.now += 10000;
  for (int i = 0; i < NODES; i++) {
    if (!q.node[i]) continue;
    if (q.taken[i] != q.put[i] && q.due[i][q.taken[i] % QUEUE] <= q.now) {
      mlfab_io_event *e = &q.queue[i][q.taken[i]++ % QUEUE];
      mlfab_node_event(q.node[i], e, q.now);
      drop_event(e);
    }
    if (mlfab_node_deadline(q.node[i]) <= q.now) mlfab_node_tick(q.node[i], q.now);
    acts(i);
  }
}

static void begin(void) {
  memset(&n, 0, sizeof n);
  memset(&q, 0, sizeof q);
  n.job = mlfab__hash(0, "mlfab", 5);
}

/* Opens all nodes with this configuration; `by_hand`: one of them, or -1. */
static void open_nodes(const mlfab_config *common, int by_hand) {
  begin();
  for (int i = 0; i < NODES; i++) {
    mlfab_config c = *common;
    char address[24];
    c.rank = i;
    c.workers = NODES;
    if (i == by_hand) c.progress = MLFAB_PROGRESS_HAND;
    strcpy(c.coordinator, "queue:0");
    snprintf(address, sizeof address, "queue:%d", i);
    assert_int_equal(mlfab_node_open(&c, address, 0, &q.node[i], NULL), 0);
    n.nonce[i] = q.node[i]->nonce;
  }
}

static void await_nodes(void) {
  for (int i = 0; i < NODES; turn()) i += mlfab_node_ready(q.node[i], NULL) == 1;
}

static int setup_job(uint32_t sync, uint32_t scheduler, uint32_t servers, int by_hand) {
  static float w[COUNT];
  mlfab_buf first = {0, 0, w, COUNT};
  mlfab_model_options o = {.size = sizeof o, .sync = sync, .slices = 5};
  mlfab_config c;
  mlfab_config_init(&c);
  c.eager_bytes = 4096;
  c.scheduler = scheduler;
  c.servers = servers;
  c.timeout_ns = 20000000000u;
  open_nodes(&c, by_hand);
  await_nodes();
  for (int k = 0; k < COUNT; k++) w[k] = (float)k;
  for (int i = 0; i < NODES; i++) {
    BEGIN(i, NULL, TENSOR_ADD, .tensor = 0, .dtype = MLFAB_F32, .count = COUNT);
    CALL(i, MODEL_START, .options = &o, .bufs = &first, .n = 1);
  }
  return 0;
}

#define SETUP(name, sync, scheduler, servers, by_hand)                                  \
  static int name(void **state) {                                                       \
    (void)state;                                                                        \
    return setup_job(MLFAB_SYNC_##sync, MLFAB_SCHEDULER_##scheduler, servers, by_hand); \
  }

SETUP(setup, ASYNC, NONE, 1, -1)
SETUP(setup_rounds, BSP, NONE, 1, -1)
SETUP(setup_beside, ASYNC, BESIDE, 1, -1)
SETUP(setup_beside_two, ASYNC, BESIDE, 2, -1)
SETUP(setup_two_servers, ASYNC, NONE, 2, -1)
SETUP(setup_by_hand, ASYNC, NONE, 2, 2)

static int teardown(void **state) {
  (void)state;
  for (int i = NODES - 1; i >= 0; i--) shut(i);
  return 0;
}

static void pull(int i, float *w) {
  mlfab_buf b = {0, 0, w, COUNT};
  CALL(i, PULL, .bufs = &b, .n = 1);
}

/* The model is as it began. */
static void unchanged(int i) {
  float w[COUNT];
  pull(i, w);
  for (int k = 0; k < COUNT; k++) assert_true(w[k] == (float)k);
}

/* The model is unchanged, and the two honest workers can still push and pull. */
static void all_is_well(void) {
  float minus[COUNT], one[COUNT];
  for (int k = 0; k < COUNT; k++) one[k] = 1, minus[k] = -1;
  for (int i = 1; i < NODES; i++) {
    mlfab_buf u = {0, 0, one, COUNT}, back = {0, 0, minus, COUNT};
    unchanged(i);
    CALL(i, PUSH, .bufs = &u, .n = 1);
    CALL(i, PUSH, .bufs = &back, .n = 1);
  }
}

/* --- the outside --- */

static uint32_t dial_to(int to) { return dial_with(to, 0); }
static uint32_t dial(void) { return dial_to(0); }

/* A frame under construction: head in place, meta after it. */
typedef struct made {
  uint8_t head[MLFAB_HEADER_BYTES + 4096], bulk[8192];
  mlfab__header h;
} made;

static void made_begin(made *m, uint8_t type, uint32_t meta_bytes, uint32_t bulk_bytes) {
  m->h = (mlfab__header){.type = type,
                         .meta_bytes = meta_bytes,
                         .bulk_bytes = bulk_bytes,
                         .job = n.job,
                         .epoch = 1,
                         .sender = 1,
                         .incarnation = 9};
}

static void deliver(uint32_t link, const void *head, uint32_t head_bytes, const void *bulk,
                    uint32_t bulk_bytes) {
  post(q.link[link].from == OUTSIDE ? q.link[link].to : 0,
       frame_event(link, head, head_bytes, bulk, bulk_bytes));
  run(100000);
}

static void send(uint32_t link, made *m) {
  if (m->h.bulk_bytes) m->h.flags = MLFAB__WIRE_BULK_CRC;
  mlfab__wire_seal(m->head, &m->h, m->h.bulk_bytes ? m->bulk : NULL);
  deliver(link, m->head, MLFAB_HEADER_BYTES + m->h.meta_bytes, m->bulk, m->h.bulk_bytes);
}

/* A frame without bulk, as mlfab__encode_<type> writes it. */
#define MAKE(m, TYPE, type, message) \
  made_begin(m, MLFAB__##TYPE, mlfab__encode_##type((m)->head + MLFAB_HEADER_BYTES, message), 0)
#define SAY(link, TYPE, type, message) \
  do {                                 \
    made m_;                           \
    MAKE(&m_, TYPE, type, message);    \
    send(link, &m_);                   \
  } while (0)

static void say_hello_as(uint32_t link, uint32_t worker, uint32_t incarnation, uint32_t roles,
                         uint64_t nonce) {
  mlfab__hello hello = {worker, incarnation, roles, 0, 0, 0, nonce, 0};
  SAY(link, HELLO, hello, &hello);
}

/* A correct one, which is not sealed yet. */
static void make_hello(made *m) {
  const mlfab__hello hello = {1, 1, MLFAB_ROLE_WORKER, 0, 0, 0, 0, 0};
  MAKE(m, HELLO, hello, &hello);
}

static uint32_t dial_hello(int to, uint32_t worker, uint32_t incarnation, uint32_t roles,
                           uint64_t nonce) {
  uint32_t link = dial_to(to);
  say_hello_as(link, worker, incarnation, roles, nonce);
  return link;
}

static void say_hello(uint32_t link, uint32_t worker, uint32_t incarnation) {
  say_hello_as(link, worker, incarnation, MLFAB_ROLE_WORKER, worker < NODES ? n.nonce[worker] : 0);
}

static void refused_as(int code) {
  assert_int_equal(q.heard_type, MLFAB__REFUSE);
  assert_int_equal(q.refuse.code, code);
}

/* The link is down because node 0 closed it. */
static void given_up(uint32_t link, const char *what) {
  run(1000000);
  if (q.link[link].up) fail_msg("%s: the link still stands", what);
  assert_true(q.closed >= 1);
}

/* Node 2's process ends silently, and its peers still count on it. */
static void vanish(void) { shut(2); }

/* The incarnation that node 0 gave to a worker. */
static uint32_t incarnation_of(int i) { return q.node[i]->incarnation; }

/* Takes the place of worker 2 on a link of the test's own, with its true incarnation: from now on the
 * outside acts as worker 2. */
static uint32_t impersonate(void) {
  uint32_t number = incarnation_of(2);
  vanish();
  uint32_t link = dial();
  say_hello(link, 2, number);
  assert_int_equal(q.heard_type, MLFAB__HELLO_ACK);
  q.closed = q.heard = 0;
  return link;
}

/* The model is as it began, whatever the outside has said as worker 2. */
static void spared(void) {
  q.node[2] = NULL;
  unchanged(1);
}

static void again(uint32_t *link) {
  if (q.link[*link].up) return;
  *link = dial();
  say_hello(*link, 2, q.node[0]->parts->server->peers[2].incarnation);
  assert_int_equal(q.heard_type, MLFAB__HELLO_ACK);
  q.closed = q.heard = 0;
}

/* --- malformed frames --- */

/* Cut at every length, and each bit flipped: node 0 refuses the frame, counts it and closes the link. */
static void damaged(const made *m, uint32_t bytes, const char *what) {
  uint64_t refused = stats(0).frames_refused;
  uint32_t link = dial();
  deliver(link, m->head, bytes, NULL, 0);
  given_up(link, what);
  assert_int_equal(stats(0).frames_refused, refused + 1);
}

TEST_WITH(test_damage, setup, teardown) {
  made m;
  make_hello(&m);
  uint32_t all = MLFAB_HEADER_BYTES + m.h.meta_bytes;
  mlfab__wire_seal(m.head, &m.h, NULL);
  for (uint32_t cut = 0; cut < all && q.links <= LINKS - 300; cut += cut < 60 ? 7 : 1)
    damaged(&m, cut, "a cut frame");
  for (uint32_t bit = 0; bit < all * 8; bit += 5) {
    m.head[bit / 8] ^= (uint8_t)(1u << bit % 8);
    damaged(&m, all, "a flipped bit");
    m.head[bit / 8] ^= (uint8_t)(1u << bit % 8);
  }
  all_is_well();
}

/* A process of a later start of the job ends this node, which says which starts meet. */
TEST_WITH(test_restarts, setup, teardown) {
  made m;
  mlfab_error error;
  uint32_t link = dial();
  make_hello(&m);
  m.h.job += UINT64_C(7) << 48;
  send(link, &m);
  assert_int_equal(mlfab_node_ready(q.node[0], &error), MLFAB_ERR_FENCED);
  assert_non_null(strstr(error.text, "of restart 0, and restart 7 is here"));
}

/* Another job, another protocol, an empty frame: strangers. */
TEST_WITH(test_strangers, setup, teardown) {
  made m;
  uint64_t strangers = stats(0).strangers_refused;
  uint32_t link = dial();
  make_hello(&m);
  m.h.job++;
  send(link, &m);
  given_up(link, "another job");
  assert_int_equal(q.heard_type, MLFAB__REFUSE);
  assert_int_equal(stats(0).strangers_refused, strangers + 1);
  m.h.job--;
  for (int protocol = 0; protocol < 256; protocol += 51) {
    if (protocol == MLFAB_PROTOCOL) continue;
    m.h.protocol = (uint8_t)(protocol ? protocol : 2);
    link = dial();
    send(link, &m);
    given_up(link, "another protocol");
  }
  link = dial(); /* sends nothing */
  run(6 * 500000000ull);
  given_up(link, "silence");
  all_is_well();
}

/* The number of the outside's open links. */
static uint32_t standing_outside(uint32_t from) {
  uint32_t count = 0;
  for (uint32_t i = from; i <= q.links; i++)
    count += q.link[i].up && (q.link[i].from == OUTSIDE || q.link[i].to == OUTSIDE);
  return count;
}

/* Silent callers do not pile up: the oldest are closed, and the newest is heard. */
TEST_WITH(test_many_strangers, setup, teardown) {
  uint32_t links[200];
  for (uint32_t i = 0; i < MLFAB__COUNT(links); i++) links[i] = dial();
  run(1000000);
  assert_int_equal(standing_outside(links[0]), 64 + NODES);
  for (uint32_t i = 0; i < MLFAB__COUNT(links); i++)
    assert_int_equal(q.link[links[i]].up, i >= MLFAB__COUNT(links) - 64 - NODES);
  uint32_t link = dial();
  made m;
  made_begin(&m, MLFAB__HEARTBEAT, 12, 0);
  send(link, &m);
  assert_int_equal(q.heard_type, MLFAB__REFUSE);
  all_is_well();
  run(6 * 500000000ull);
  assert_int_equal(standing_outside(links[0]), 0);
}

static mlfab__join join_of(int32_t rank, uint32_t servers, uint64_t nonce) {
  return (mlfab__join){.rank = rank,
                       .roles = MLFAB_ROLE_WORKER,
                       .workers = NODES,
                       .founders = NODES,
                       .servers = servers,
                       .founding = servers,
                       .nonce = nonce,
                       .heartbeat_ns = q.node[0]->config.heartbeat_ns};
}

static uint32_t dial_join(int32_t rank, uint64_t nonce) {
  mlfab__join join = join_of(rank, 1, nonce);
  uint32_t link = dial();
  strcpy(join.addresses, "queue:2");
  SAY(link, JOIN, join, &join);
  return link;
}

static void say_beat(uint32_t link, uint64_t sent_ns, uint32_t kind) {
  SAY(link, HEARTBEAT, heartbeat, (&(mlfab__heartbeat){sent_ns, kind}));
}

/* A process that joins again and again has one connection, and loses it in the end whatever it sends. */
TEST_WITH(test_joins_again_and_again, setup, teardown) {
  vanish();
  run(6 * 500000000ull); /* until the rank is free */
  uint32_t first = q.links + 1, link = 0;
  for (uint32_t i = 0; i < 50; i++) {
    link = dial_join(2, 77);
    assert_int_equal(q.heard_type, MLFAB__WELCOME);
    assert_int_equal(standing_outside(first), 1);
    assert_int_equal(q.link[link].up, 1);
  }
  for (int i = 0; i < 24 && q.link[link].up; i++) {
    const uint64_t began = q.now;
    run(500000000ull);
    if (q.link[link].up) say_beat(link, began, MLFAB__BEAT);
  }
  assert_int_equal(standing_outside(first), 0);
}

/* The first frame of a link must say who it is. */
TEST_WITH(test_first_frames, setup, teardown) {
  made m;
  for (uint32_t type = 1; type < MLFAB__FRAME_TYPES; type++) {
    uint32_t link = dial();
    memset(m.head, 0, sizeof m.head);
    made_begin(&m, (uint8_t)type, 8, 0);
    send(link, &m);
    given_up(link, mlfab__frame_name((uint8_t)type));
  }
  /* Ranks that do not exist. */
  for (uint32_t i = 0; i < 2; i++) {
    uint32_t link = dial();
    say_hello(link, i ? UINT32_MAX : NODES, 1);
    given_up(link, "a worker out of range");
  }
  all_is_well();
}

/* A frame with a past incarnation, or with a future one that was never given out, is fenced; the living
 * process is unaffected. */
TEST_WITH(test_incarnations, setup, teardown) {
  uint32_t now = incarnation_of(2);
  for (int i = -1; i <= 1; i += 2) {
    uint32_t link = dial();
    say_hello(link, 2, now + (uint32_t)i);
    assert_int_equal(q.heard_type, MLFAB__REFUSE);
    given_up(link, "another incarnation");
  }
  all_is_well();
}

/* The roles of one node are linked internally: a caller that claims to be one of them is refused, and the
 * internal links do not change. */
TEST_WITH(test_roles_beside, setup_beside, teardown) {
  const uint32_t *planner = q.node[0]->pairs[MLFAB__PAIR_PLANNER];
  const uint32_t *server = q.node[0]->pairs[MLFAB__PAIR_SERVER];
  for (uint32_t incarnation = 0; incarnation < 3; incarnation++) {
    uint32_t link =
        dial_hello(0, 0, incarnation == 2 ? UINT32_MAX : incarnation, MLFAB_ROLE_SCHEDULER, 0);
    refused_as(MLFAB_ERR_RANK_TAKEN);
    given_up(link, "a second scheduler");
    link = dial();
    say_hello(link, 0, incarnation);
    assert_int_equal(q.heard_type, MLFAB__REFUSE);
    given_up(link, "a second worker 0");
  }
  assert_int_equal(q.node[0]->links[planner[0]].kind, MLFAB__LINK_PLANNER);
  assert_int_equal(q.node[0]->links[planner[1]].kind, MLFAB__LINK_SCHEDULER);
  assert_int_equal(q.node[0]->links[server[1]].kind, MLFAB__LINK_WORKER);
  assert_int_equal(q.node[0]->callers[NODES].link, planner[1]);
  all_is_well();
}

/* --- two processes claim one rank --- */

enum { BEAT = 500000000 };

static void say_join(uint32_t link, int32_t rank, uint64_t nonce) {
  mlfab__join join = join_of(rank, 2, nonce);
  SAY(link, JOIN, join, &join);
}

/* The same on a new link, which it returns. */
static uint32_t joins(uint64_t nonce) {
  uint32_t link = dial();
  say_join(link, 2, nonce);
  return link;
}

/* The outside closes the link. */
static void hang_up(uint32_t link) {
  post_down(0, link);
  run(100000);
}

static void taken(uint32_t link, const char *what) {
  given_up(link, what);
  refused_as(MLFAB_ERR_RANK_TAKEN);
}

/* A living process keeps its rank, whatever incarnation another process claims. */
TEST_WITH(test_number_of_a_live_process, setup_two_servers, teardown) {
  uint32_t number = incarnation_of(2);
  uint32_t link = joins(77);
  taken(link, "a second JOIN");
  assert_non_null(strstr(q.refuse.text, "worker 2"));
  for (uint32_t i = 0; i < 3; i++) {
    link = dial_hello(1, 2, i == 2 ? UINT32_MAX : number + i, MLFAB_ROLE_WORKER, 77);
    taken(link, "a second HELLO");
  }
  link = dial_hello(0, 2, number, MLFAB_ROLE_WORKER, 77);
  given_up(link, "another process at server 0, which knows who joined");
  assert_int_equal(q.refuse.code, MLFAB_ERR_FENCED);
  assert_int_equal(q.node[1]->parts->server->peers[2].incarnation, number);
  assert_int_equal(q.node[0]->peers[2].incarnation, number);
  assert_int_equal(stats(0).reconnects + stats(1).reconnects, 0);
  all_is_well();
  /* The same process does not wait; its old link is closed. */
  link = dial_to(1);
  say_hello(link, 2, number);
  assert_int_equal(q.heard_type, MLFAB__HELLO_ACK);
  assert_int_equal(stats(1).reconnects, 1);
}

/* A restarted process waits until the probe of its predecessor has failed; frames that the predecessor sent
 * before it died are no answer. Of two that wait only one is admitted. */
TEST_WITH(test_number_of_a_dead_process, setup_two_servers, teardown) {
  uint32_t old = incarnation_of(2), last = q.node[0]->links[q.node[0]->callers[2].link].id;
  vanish();
  uint32_t link = joins(77);
  say_beat(last, q.now, MLFAB__BEAT);
  say_beat(last, 12345, MLFAB__BEAT_ANSWER);
  run(2ull * BEAT);
  assert_true(q.link[link].up);
  assert_int_equal(q.heard_all, 0);
  uint32_t second = joins(78);
  run(4ull * BEAT);
  assert_int_equal(q.heard_type, MLFAB__WELCOME);
  assert_true(q.welcome.incarnation > old);
  assert_int_equal(q.node[0]->peers[2].nonce, 77);
  assert_true(q.link[second].up);
  /* The second waits for the first, which answers. */
  say_beat(link, q.heartbeat.sent_ns, MLFAB__BEAT_ANSWER);
  assert_int_equal(q.heartbeat.kind, MLFAB__BEAT_PROBE);
  taken(second, "the second");
  /* The same at the other server: its link to the dead process has gone meanwhile, or goes now. */
  link = dial_hello(1, 2, q.welcome.incarnation, MLFAB_ROLE_WORKER, 77);
  run(6ull * BEAT);
  assert_int_equal(q.node[1]->parts->server->peers[2].incarnation, q.welcome.incarnation);
  assert_int_equal(q.node[1]->claims + q.node[0]->claims, 0);
}

/* A hand-driven process may compute: it keeps its rank while its connection stands. */
TEST_WITH(test_number_of_a_silent_process, setup_by_hand, teardown) {
  vanish();
  uint32_t link = joins(77);
  run(4ull * BEAT);
  assert_true(q.link[link].up);
  run(2ull * BEAT);
  taken(link, "a number whose process computes");
  /* When the connection breaks, the process that waits is admitted at once. */
  link = joins(77);
  hang_up(q.node[0]->links[q.node[0]->callers[2].link].id);
  assert_int_equal(q.heard_type, MLFAB__WELCOME);
}

/* A welcomed process owns its rank before it has a link, because its HELLO is on the way. It loses the rank
 * when HELLO does not arrive in time. */
TEST_WITH(test_number_between_links, setup_two_servers, teardown) {
  vanish();
  run(6ull * BEAT); /* until the rank is free */
  for (int late = 0; late < 2; late++) {
    uint64_t nonce = 77 + (uint64_t)late;
    uint32_t link = joins(nonce);
    assert_int_equal(q.heard_type, MLFAB__WELCOME);
    uint32_t incarnation = q.welcome.incarnation, second = dial();
    say_join(second, 2, 90);
    hang_up(link);
    /* it must call again, whether it called before or after the hang-up */
    assert_int_equal(q.heard, 0);
    assert_false(q.link[second].up);
    if (late) break;
    second = joins(90);
    assert_int_equal(q.heard, 0);
    link = dial_hello(0, 2, incarnation, MLFAB_ROLE_WORKER, nonce);
    assert_int_equal(q.heard_type, MLFAB__HELLO_ACK);
    hang_up(link); /* after HELLO it may leave: another process is admitted at once */
  }
  run(4ull * BEAT);
  (void)joins(91);
  assert_int_equal(q.heard, 0);
  run(1ull * BEAT);
  (void)joins(91);
  assert_int_equal(q.heard_type, MLFAB__WELCOME);
}

static void say_scheduler_join(uint32_t link, uint64_t nonce) {
  mlfab__join join = join_of(0, 1, nonce);
  join.roles = MLFAB_ROLE_SCHEDULER;
  join.scheduler = MLFAB_SCHEDULER_OWN;
  SAY(link, JOIN, join, &join);
}

/* A scheduler process owns its role as a worker owns its rank: a living one keeps it and may reconnect. */
TEST_WITH(test_number_of_the_scheduler, NULL, teardown) {
  mlfab_config c;
  mlfab_config_init(&c);
  c.scheduler = MLFAB_SCHEDULER_OWN;
  open_nodes(&c, -1);
  uint32_t joining = dial(), link;
  say_scheduler_join(joining, 77);
  await_nodes();
  assert_int_equal(q.heard_type, MLFAB__WELCOME);
  uint32_t incarnation = q.welcome.incarnation;
  for (int again = 0; again < 2; again++) {
    link = dial_hello(0, NODES, incarnation, MLFAB_ROLE_SCHEDULER, 77);
    assert_int_equal(q.node[0]->links[q.node[0]->callers[NODES].link].id, link);
    hang_up(again ? link : joining);
    if (again) break;
    uint32_t second = dial();
    say_scheduler_join(second, 78);
    assert_int_equal(q.heartbeat.kind, MLFAB__BEAT_PROBE);
    say_beat(link, q.heartbeat.sent_ns, MLFAB__BEAT_ANSWER);
    taken(second, "a second scheduler");
    assert_non_null(strstr(q.refuse.text, "the scheduler"));
  }
  say_scheduler_join(dial(), 78);
  assert_int_equal(q.heard_type, MLFAB__WELCOME);
  assert_true(q.welcome.incarnation > incarnation);
}

static void fenced(uint32_t link, const char *what) {
  given_up(link, what);
  refused_as(MLFAB_ERR_FENCED);
}

/* A process that claims to be a server or the scheduler is accepted only if server 0 has given it that
 * role. */
TEST_WITH(test_roles_that_were_not_given, setup_beside_two, teardown) {
  const uint32_t first = incarnation_of(0), second = incarnation_of(1);
  for (uint32_t i = 0; i < 6; i++) {
    uint32_t link = dial_hello(1, 0, i >= 4 ? UINT32_MAX : first + i / 2,
                               i % 2 ? MLFAB_ROLE_SCHEDULER : MLFAB_ROLE_SERVER, 77);
    fenced(link, i % 2 ? "another process as the scheduler" : "another process as server 0");
  }
  uint32_t link = dial_hello(1, 2, first, MLFAB_ROLE_SCHEDULER, 77);
  given_up(link, "a worker as the scheduler");
  for (uint32_t i = 0; i < 2; i++) {
    link = dial_hello(0, 1, second + i, MLFAB_ROLE_SERVER, i ? n.nonce[1] : 77);
    fenced(link, i ? "another incarnation of server 1" : "another process as server 1");
  }
  assert_int_equal(q.node[1]->reshard_links[0], MLFAB__NO_LINK);
  assert_int_equal(q.node[0]->reshard_links[1], MLFAB__NO_LINK);
  assert_int_equal(q.node[1]->callers[NODES].incarnation, first);
  unchanged(2);
}

/* The link of this worker to server 0. */
static uint32_t link_of(int i) { return q.node[i]->links[q.node[i]->routes[0].link].id; }

static void break_link(int i, uint32_t link) {
  q.link[link].up = 0;
  post_down(0, link);
  post_down(i, link);
}

/* A server whose window is ahead of this worker's own numbers has served another process: the worker does
 * not take its "applied" for its own updates. */
TEST_WITH(test_window_ahead, setup, teardown) {
  float one[COUNT] = {0};
  mlfab_buf u = {0, 0, one, COUNT};
  mlfab__window *window = &q.node[0]->parts->server->windows.windows[2];
  for (int ahead = 0; ahead < 2; ahead++) {
    /* A window that matches what the worker sent is accepted. */
    CALL(2, PUSH, .bufs = &u, .n = 1);
    if (ahead) {
      window->top += 200;
      memset(window->applied, 0xff, sizeof window->applied);
    }
    break_link(2, link_of(2));
    run(BEAT);
  }
  assert_int_equal(SUBMIT(2, NULL, PUSH, .bufs = &u, .n = 1), MLFAB_ERR_PEER_DEAD);
  assert_int_equal(q.node[2]->routes[0].dead, 1);
}

/* A waiting process that closes its link is forgotten; one that sends more frames is refused. */
TEST_WITH(test_claims_end, setup_two_servers, teardown) {
  vanish();
  uint32_t link = joins(77), second = joins(78);
  assert_int_equal(q.node[0]->claims, 2);
  post_down(0, link);
  say_join(second, 2, 78);
  run(100000);
  assert_int_equal(q.refuse.code, MLFAB_ERR_FRAME);
  assert_int_equal(q.node[0]->claims, 0);
}

/* A stopped holder loses its rank to a process that waits for it, but not to one that has closed its link. */
TEST_WITH(test_claim_without_claimant, setup_two_servers, teardown) {
  uint32_t last = q.node[0]->links[q.node[0]->callers[2].link].id;
  vanish();
  for (int back = 0; back < 2; back++) {
    uint32_t link = joins(77);
    assert_int_equal(q.node[0]->claims, 1);
    hang_up(link);
    for (int i = 0; i < (back ? 5 : 8); i++) {
      say_beat(last, q.now, MLFAB__BEAT);
      run(1ull * BEAT);
      assert_true(q.link[last].up);
    }
  }
  run(BEAT / 4);
  (void)joins(77); /* it calls again, and does not wait for another probe */
  run(BEAT / 4);
  assert_int_equal(q.heard_type, MLFAB__WELCOME);
}

static uint32_t say_meet(uint64_t nonce) {
  mlfab__meet meet = {2, UINT32_MAX, nonce};
  uint32_t link = dial_to(1);
  SAY(link, MEET, meet, &meet);
  run(100000);
  return link;
}

/* Links between workers: another process is refused while the first one answers; the first one may
 * reconnect. One that does not answer loses its rank after two heartbeats. */
TEST_WITH(test_meets, setup_two_servers, teardown) {
  uint32_t links[3];
  static const uint64_t nonces[] = {77, 78, 77};
  for (int i = 0; i < 3; i++) {
    links[i] = say_meet(nonces[i]);
    assert_int_equal(q.link[links[0]].up, i < 2);
    if (i == 1) {
      assert_int_equal(q.heartbeat.kind, MLFAB__BEAT_PROBE);
      say_beat(links[0], q.heartbeat.sent_ns, MLFAB__BEAT_ANSWER);
      run(3ull * BEAT);
    }
  }
  assert_false(q.link[links[1]].up);
  assert_true(q.link[links[2]].up);
  say_beat(links[2], 4711, MLFAB__BEAT_PROBE);
  assert_int_equal(q.heartbeat.kind, MLFAB__BEAT_ANSWER);
  assert_int_equal(q.heartbeat.sent_ns, 4711);
  assert_false(q.link[say_meet(78)].up);
  assert_true(q.link[links[2]].up);
  run(2ull * BEAT + BEAT / 2);
  assert_false(q.link[links[2]].up);
  assert_true(q.link[say_meet(78)].up);
}

/* A worker that has read the goodbye closes its link. That is no death, however long the server waits for
 * the others to read it. */
TEST_WITH(test_goodbye_is_no_death, setup, teardown) {
  q.slow_ns[2] = 100ull * BEAT;
  assert_int_equal(mlfab_node_leave(q.node[0], q.now), 0);
  run(4ull * BEAT);
  assert_int_equal(q.node[0]->callers[1].link, MLFAB__NO_LINK);
  assert_int_not_equal(q.node[0]->callers[2].link, MLFAB__NO_LINK);
  assert_int_equal(stats(0).peers_died, 0);
  run(2ull * BEAT);
  assert_int_equal(q.node[0]->callers[2].link, MLFAB__NO_LINK);
  assert_int_equal(stats(0).peers_died, 0);
}

/* A hand-driven worker that has computed for long says goodbye before it reads the frames that arrived
 * meanwhile: it may judge its links silent, but its goodbye is sent. */
TEST_WITH(test_goodbye_after_computing, setup_by_hand, teardown) {
  mlfab_node *node = q.node[2];
  q.node[2] = NULL;
  run(10ull * BEAT);
  q.node[2] = node;
  assert_int_equal(mlfab_node_leave(node, q.now), 0);
  run(4ull * BEAT);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(q.node[i]->parts->server->peers[2].left, 1);
    assert_int_equal(stats(i).peers_died, 0);
  }
}

/* --- a worker that violates the protocol --- */

/* Frames that no worker sends, and unparsable metas, of every type. */
TEST_WITH(test_wrong_types, setup, teardown) {
  made m;
  uint32_t link = impersonate();
  for (uint32_t type = 1; type < MLFAB__FRAME_TYPES; type++) {
    if (type == MLFAB__HEARTBEAT || type == MLFAB__BYE) continue; /* harmless */
    again(&link);
    uint64_t refused = stats(0).frames_refused;
    memset(m.head, 0xee, sizeof m.head);
    made_begin(&m, (uint8_t)type, 3, 0);
    send(link, &m);
    given_up(link, mlfab__frame_name((uint8_t)type));
    assert_true(stats(0).frames_refused > refused);
  }
  spared();
}

/* A frame whose meta is in place, with a bulk of zeros. */
static void send_zeros(uint32_t link, made *m, uint8_t type, uint32_t meta, uint32_t bulk) {
  made_begin(m, type, meta, bulk);
  memset(m->bulk, 0, sizeof m->bulk);
  send(link, m);
}

static void say_push(uint32_t link, const mlfab__push *push, const mlfab__segment *segments,
                     const uint64_t *versions, uint32_t bulk) {
  made m;
  uint32_t meta = mlfab__encode_push(m.head + MLFAB_HEADER_BYTES, push, segments, versions);
  send_zeros(link, &m, MLFAB__PUSH, meta, bulk);
}

static void say_chunk(uint32_t link, uint64_t seq, uint64_t offset, uint32_t generation,
                      uint32_t bulk) {
  made m;
  mlfab__chunk chunk = {seq, offset, generation};
  uint32_t meta = mlfab__encode_chunk(m.head + MLFAB_HEADER_BYTES, &chunk);
  send_zeros(link, &m, MLFAB__CHUNK, meta, bulk);
}

/* A correct push: 400 bytes from the model's beginning, all eager. */
static mlfab__push right_push(void) {
  return (mlfab__push){.seq = 1000,
                       .members = 1,
                       .generation = q.hello_ack.generation,
                       .eager = 400,
                       .bytes = 400,
                       .scale = 1.0,
                       .segments = 1,
                       .versions = 1};
}

TEST_WITH(test_wrong_pushes, setup, teardown) {
  mlfab__segment s = {0, 400}, far = {COUNT * 4, 400}, cut = {2, 400};
  uint64_t many[MLFAB__SLICES_MAX] = {0};
  mlfab__push p;
  uint32_t link = impersonate();
#define PUSH(segment, bulk, ...) \
  p = right_push();              \
  __VA_ARGS__;                   \
  say_push(link, &p, segment, many, bulk)
#define WRONG(segment, bulk, what, ...) \
  again(&link);                         \
  PUSH(segment, bulk, __VA_ARGS__);     \
  given_up(link, what)
  WRONG(&s, 400, "first weights of another", p.flags = MLFAB__PUSH_INIT);
  WRONG(&s, 400, "unknown flags", p.flags = 128);
  WRONG(&s, 400, "number zero", p.seq = 0);
  WRONG(&far, 400, "outside the model", (void)0);
  WRONG(&cut, 400, "between elements", (void)0);
  WRONG(&s, 400, "more than eager", p.eager = 64);
  WRONG(&s, 0, "more than credit", s.bytes = p.bytes = 8000, p.eager = 5000);
  s.bytes = 400;
  /* The credit covers all updates in progress together. */
  again(&link);
  s.bytes = 8000;
  PUSH(&s, 0, p.seq = 2000, p.bytes = 8000, p.eager = 4096);
  assert_true(q.link[link].up);
  PUSH(&s, 64, p.seq = 2001, p.bytes = 8000, p.eager = 64);
  given_up(link, "credit twice");
  /* A decreasing number. */
  again(&link);
  PUSH(&s, 64, p.seq = 3000, p.bytes = 8000, p.eager = 64);
  PUSH(&s, 0, p.seq = 2999, p.bytes = 8000, p.eager = 0);
  given_up(link, "a number that went back");
  /* Chunks: of an unknown update (ignored: the server may have refused it), at a wrong offset, beyond the
   * end. */
  again(&link);
  say_chunk(link, 77777, 0, q.hello_ack.generation, 64);
  assert_true(q.link[link].up);
  PUSH(&s, 64, p.seq = 4000, p.bytes = 8000, p.eager = 64);
  say_chunk(link, 4000, 4096, q.hello_ack.generation, 64);
  given_up(link, "a chunk out of place");
  again(&link);
  PUSH(&s, 64, p.seq = 4001, p.bytes = 4000, p.eager = 64, s.bytes = 4000);
  say_chunk(link, 4001, 64, q.hello_ack.generation, 8000);
  given_up(link, "a chunk that is too long");
  again(&link);
  PUSH(&s, 64, p.seq = 4002, p.bytes = 4000, p.eager = 64);
  say_chunk(link, 4002, 64, q.hello_ack.generation, 6); /* cuts an element: the update is refused */
  assert_int_equal(q.heard_type, MLFAB__PUSH_ACK);
  assert_int_equal(q.push_ack.code, MLFAB_ERR_FRAME);
  /* Chunks and pushes of a former generation are ignored. */
  uint64_t updates = stats(0).updates_applied;
  PUSH(&s, 400, p.seq = 5000, p.generation--, s.bytes = 400);
  say_chunk(link, 5000, 0, q.hello_ack.generation - 1, 64);
  assert_true(q.link[link].up);
  assert_int_equal(stats(0).updates_applied, updates);
  spared();
  /* A correct one is applied once. */
  q.heard = 0;
  PUSH(&s, 400, p.seq = 6000);
  say_push(link, &p, &s, many, 400);
#undef PUSH
#undef WRONG
  assert_int_equal(q.heard_type, MLFAB__PUSH_ACK);
  assert_int_equal(q.heard, 2);
  assert_int_equal(stats(0).updates_applied, updates + 1);
}

/* Fewer versions than slices touched: refused, and not read. */
TEST_WITH(test_few_versions, setup, teardown) {
  mlfab__segment s = {0, COUNT * 4};
  uint64_t versions[2] = {0, 1};
  uint32_t link = impersonate();
  mlfab__push p = right_push();
  p.bytes = COUNT * 4;
  p.eager = 64;
  p.versions = 2;
  q.push_ack.code = 0;
  say_push(link, &p, &s, versions, 64);
  assert_int_equal(q.heard_type, MLFAB__PUSH_ACK);
  assert_int_equal(q.push_ack.code, MLFAB_ERR_ARGUMENT);
  spared();
}

static void say_pull(uint32_t link, const mlfab__pull *pull, const mlfab__segment *segment) {
  made m;
  uint32_t bytes = mlfab__encode_pull(m.head + MLFAB_HEADER_BYTES, pull, segment, NULL);
  made_begin(&m, MLFAB__PULL, bytes, 0);
  send(link, &m);
}

TEST_WITH(test_wrong_pulls, setup, teardown) {
  static const mlfab__segment bad[] = {
      {COUNT * 4, 8}, {2, 4}, {0, COUNT * 4 + 4}, {UINT64_MAX - 3, 4}};
  uint32_t link = impersonate();
  for (size_t i = 0; i < 5; i++) {
    mlfab__pull p = {i == 4 ? 0 : 7, 0, 0, 0, 1, 0};
    mlfab__segment s = {0, 8};
    again(&link);
    say_pull(link, &p, i < 4 ? &bad[i] : &s);
    given_up(link, "a wrong pull");
  }
  /* More pulls at once than the server has room for: the last one is refused with an answer. */
  again(&link);
  for (uint64_t i = 1; i <= 12; i++) /* of a round that would never come, if there were rounds */
    say_pull(link, &(mlfab__pull){i, 1000, 0, 0, 1, 0}, &(mlfab__segment){0, 8});
  assert_true(q.link[link].up);
  spared();
}

/* Random metas after valid headers, of every type, thousands of times. */
TEST_WITH(test_random_metas, setup, teardown) {
  mlfab__rng prng;
  made m;
  mlfab__rng_seed(&prng, 7);
  uint32_t link = impersonate();
  for (int i = 0; i < 3000 && q.links < LINKS - 2; i++) {
    again(&link);
    uint32_t type = 1 + (uint32_t)mlfab__rng_below(&prng, MLFAB__FRAME_TYPES - 1);
    if (type == MLFAB__BYE || type == MLFAB__DONE) continue; /* the worker may send these */
    uint32_t meta = (uint32_t)mlfab__rng_below(&prng, 200);
    uint32_t bulk = mlfab__rng_below(&prng, 2) ? (uint32_t)mlfab__rng_below(&prng, 600) : 0;
    for (uint32_t k = 0; k < meta; k++)
      m.head[MLFAB_HEADER_BYTES + k] =
          (uint8_t)(mlfab__rng_below(&prng, 3) ? 0 : mlfab__rng_next(&prng));
    send_zeros(link, &m, (uint8_t)type, meta, bulk);
  }
  spared();
}

/* An update is withdrawn before it was sent: a pull behind it does not wait for its round. */
TEST_WITH(test_pull_behind_withdrawn, setup_rounds, teardown) {
  static float u[COUNT], w[COUNT];
  mlfab_buf update = {0, 0, u, COUNT}, weights = {0, 0, w, COUNT};
  mlfab_request push, get;
  BEGIN(1, &push, PUSH, .bufs = &update, .n = 1);
  BEGIN(1, &get, PULL, .bufs = &weights, .n = 1);
  assert_int_equal(mlfab_node_cancel(q.node[1], push, q.now), 0);
  assert_int_equal(finish(1, push), MLFAB_ERR_CANCELLED);
  assert_int_equal(finish(1, get), 0);
}

/* A joining process is told why it is refused; it cannot refuse server 0 itself. */
TEST_WITH(test_refusing_server_0, NULL, teardown) {
  mlfab_config c;
  begin();
  mlfab_config_init(&c);
  c.workers = NODES;
  strcpy(c.coordinator, "queue:0");
  assert_int_equal(mlfab_node_open(&c, "queue:0", 0, &q.node[0], NULL), 0);
  for (int welcome = 0; welcome < 2; welcome++) {
    mlfab__join join = join_of(1, 1, 0);
    mlfab__refuse refuse = {.code = MLFAB_ERR_WORLD};
    mlfab__welcome in = {7, 0, 0, 0, 0};
    uint32_t link = dial();
    SAY(link, JOIN, join, &join);
    if (welcome)
      SAY(link, WELCOME, welcome, &in);
    else
      SAY(link, REFUSE, refuse, &refuse);
    given_up(link, "a frame of server 0's");
    assert_int_equal(mlfab_node_ready(q.node[0], NULL), 0);
    assert_int_equal(q.node[0]->phase, MLFAB__BOOTSTRAP_JOINING);
  }
}

/* Frames between worker and server of one node do not wait for a timer: while there are more, the node asks
 * to be called at once. */
TEST_WITH(test_inner_link_goes_on, NULL, teardown) {
  static float u[COUNT];
  mlfab_buf update = {0, 0, u, COUNT};
  mlfab_config c;
  mlfab_request request = 0;
  mlfab_result result;
  int done = 0;
  begin();
  mlfab_config_init(&c);
  c.chunk_bytes = 64; /* hundreds of frames */
  assert_int_equal(mlfab_node_open(&c, "", 0, &q.node[0], NULL), 0);
  BEGIN(0, NULL, TENSOR_ADD, .tensor = 0, .dtype = MLFAB_F32, .count = COUNT);
  BEGIN(0, &request, MODEL_START, .options = NULL, .bufs = NULL, .n = 0);
  assert_int_equal(mlfab_node_test(q.node[0], request, &done, &result), 0);
  assert_int_equal(done, 1);
  mlfab_node_tick(q.node[0], 1); /* the next tick is far away */
  assert_true(mlfab_node_deadline(q.node[0]) > 1000);
  q.now = 1;
  BEGIN(0, &request, PUSH, .bufs = &update, .n = 1);
  for (;;) {
    assert_int_equal(mlfab_node_test(q.node[0], request, &done, &result), 0);
    if (done) break;
    assert_true(mlfab_node_deadline(q.node[0]) <= 1);
    mlfab_node_tick(q.node[0], 1);
  }
  assert_int_equal(result.status, 0);
}

/* Its process ends; frames that it has sent are still on their way. */
static void end_process(int i, uint32_t link) {
  post_down(0, link);
  shut(i);
}

/* A send fails because the worker is gone before its goodbye was read: the goodbye still arrives, and no
 * death is reported. */
TEST_WITH(test_goodbye_unread, setup, teardown) {
  float w[COUNT];
  uint32_t link = link_of(2);
  const mlfab__server_peer *peer = &q.node[0]->parts->server->peers[2];
  run(1000000);
  q.slow_ns[0] = 1200000000; /* more than two heartbeats: by then a broken link counts as a death */
  assert_int_equal(mlfab_node_leave(q.node[2], q.now), 0);
  run(1000000);
  q.refuses = link;
  end_process(2, link);
  run(1100000000);
  assert_true(q.refused > 0);
  assert_false(peer->left || peer->dead);
  q.slow_ns[0] = 0;
  run(2000000000);
  assert_true(peer->left);
  assert_false(peer->dead);
  assert_int_equal(stats(0).peers_died, 0);
  pull(1, w);
}

static uint32_t standing(int i) {
  uint32_t links = 0;
  for (uint32_t l = 0; l < q.node[i]->nlinks; l++)
    links += q.node[i]->links[l].kind != MLFAB__LINK_FREE && !q.node[i]->links[l].self;
  return links;
}

/* A leaving worker reads on until server 0 has acknowledged its goodbye, and then closes the link. */
TEST_WITH(test_goodbye_heard, setup, teardown) {
  uint32_t link = link_of(2);
  run(1000000);
  q.slow_ns[0] = 50000000;
  assert_int_equal(mlfab_node_leave(q.node[2], q.now), 0);
  run(40000000);
  assert_true(q.link[link].up);
  assert_int_equal(standing(2), 1);
  assert_false(q.node[0]->parts->server->peers[2].left);
  run(20000000);
  assert_true(q.node[0]->parts->server->peers[2].left);
  assert_false(q.link[link].up);
  assert_int_equal(standing(2), 0);
}

/* All nodes leave at once: none waits for another. */
TEST_WITH(test_goodbyes_cross, setup, teardown) {
  run(1000000);
  for (int i = 0; i < NODES; i++) assert_int_equal(mlfab_node_leave(q.node[i], q.now), 0);
  run(1000000);
  for (int i = 0; i < NODES; i++) assert_int_equal(standing(i), 0);
}

/* A leaving worker does not wait for a peer that computes. */
TEST_WITH(test_goodbye_to_a_hand_driven_peer, setup, teardown) {
  run(1000000);
  for (uint32_t s = 0; s < q.node[2]->config.servers; s++) q.node[2]->places[s].info.hand = 1;
  q.slow_ns[0] = 5000000000;
  assert_int_equal(mlfab_node_leave(q.node[2], q.now), 0);
  run(1000000);
  assert_int_equal(standing(2), 0);
}

/* Every worker sends every other a small message, which is acknowledged by a timer only. */
static void all_reduce(void) {
  static float data[NODES][100];
  mlfab_request request[NODES];
  for (int i = 0; i < NODES; i++)
    BEGIN(i, &request[i], ALLREDUCE, .vecs = &(mlfab_vec){data[i], 100}, .n = 1,
          .dtype = MLFAB_F32);
  for (int i = 0; i < NODES; i++) assert_int_equal(finish(i, request[i]), 0);
}

/* A worker that leaves after a collective waits for a round trip, not for a timer ... */
TEST_WITH(test_leaving_asks, setup, teardown) {
  all_reduce();
  assert_false(mlfab__comm_quiet(q.node[2]->parts->comm));
  assert_int_equal(mlfab_node_leave(q.node[2], q.now), 0);
  run(2000000);
  assert_true(q.node[0]->parts->server->peers[2].left);
  assert_int_equal(standing(2), 0);
}

/* ... and not for a worker that leaves too. */
TEST_WITH(test_leaving_together, setup, teardown) {
  all_reduce();
  for (int i = NODES; i-- > 0; run(200000)) assert_int_equal(mlfab_node_leave(q.node[i], q.now), 0);
  run(2000000);
  for (int i = 0; i < NODES; i++) assert_int_equal(standing(i), 0);
}

/* A leaving worker does not wait for data on their way to a peer that has said goodbye. */
TEST_WITH(test_leaving_after_a_peer, setup, teardown) {
  uint8_t data[64] = {0};
  mlfab_request request[NODES];
  all_reduce();
  run(300000000);
  assert_true(mlfab__comm_quiet(q.node[2]->parts->comm));
  q.slow_ns[1] = 400000000;
  for (int i = 0; i < NODES; i += 2)
    BEGIN(i, &request[i], BROADCAST, .root = 2, .data = data, .count = sizeof data);
  for (int i = 0; i < NODES; i += 2) assert_int_equal(finish(i, request[i]), 0);
  assert_int_equal(mlfab_node_leave(q.node[1], q.now), 0);
  run(1000000);
  for (int i = 2; i >= 0; i -= 2) { /* one of them has forwarded it */
    assert_int_equal(mlfab_node_leave(q.node[i], q.now), 0);
    run(2000000);
    assert_int_equal(q.node[i]->leaving, MLFAB__PARTS_ALL);
    assert_int_equal(standing(i), 0);
  }
}

/* --- who sends next --- */

enum { SENDERS = 4 };

/* A role whose number is in `self`: it has always something to send. */
static int sends_always(void *self, mlfab__at at, mlfab__frame_out *frame) {
  (void)at;
  frame->slot = *(const uint32_t *)self;
  return 1;
}

static void no_more(void *self, mlfab__at at, const mlfab__frame_out *frame) {
  (void)self, (void)at, (void)frame;
}

static int sends_never(void *self, mlfab__at at, mlfab__frame_out *frame) {
  (void)self, (void)at, (void)frame;
  return 0;
}

/* An urgent role is asked before the others each time, wherever it is in the table; the others take turns. */
TEST(test_senders) {
  static mlfab_node node;
  static uint8_t head[MLFAB_HEADER_BYTES + MLFAB_META_MAX];
  uint32_t numbers[SENDERS], sent[SENDERS] = {0}, last = SENDERS;
  mlfab__link link = {.kind = MLFAB__LINK_SERVER, .greeted = 1};
  node.links = &link;
  node.nlinks = 1;
  node.head = head;
  for (uint32_t i = 0; i < SENDERS; i++) {
    numbers[i] = i;
    node.roles[node.nroles++] = (mlfab__role){.self = &numbers[i],
                                              .links = MLFAB__ON(SERVER),
                                              .sends = MLFAB__ON(SERVER),
                                              .urgent = i == 2 ? MLFAB__ON(SERVER) : 0,
                                              .next = i == 2 ? sends_never : sends_always,
                                              .taken = no_more};
  }
  mlfab__roles_list(&node);
  for (uint32_t k = 0; k < 30; k++) {
    node.roles[2].next = k % 3 == 0 ? sends_always : sends_never;
    assert_int_equal(mlfab__outbox_yield(&node, 0), 1);
    uint32_t who = node.frame.slot;
    assert_int_equal(who == 2, k % 3 == 0);
    if (who != 2) assert_int_not_equal(who, last);
    if (who != 2) last = who;
    sent[who]++;
    mlfab__outbox_taken(&node);
  }
  for (uint32_t i = 0; i < SENDERS; i++) assert_in_range(sent[i], 6, 10);
}

/* --- a caller of server 0, whose callee the test plays --- */

typedef struct caller {
  mlfab_node *node;
  uint64_t now, token;
  uint32_t link;
  char called[64]; /* since the last look */
} caller;

/* Takes what the caller does. */
static void caller_acts(caller *c) {
  mlfab_action a;
  while (mlfab_node_next(c->node, c->now, &a)) {
    if (a.kind == MLFAB_ACTION_CONNECT) {
      snprintf(c->called, sizeof c->called, "%s", a.address);
      c->token = a.token;
    }
    mlfab_node_done(c->node, &a, 0, c->now);
  }
}

/* Waits until it calls, or has failed. Returns how long. */
static uint64_t caller_calls(caller *c, const char *at) {
  uint64_t since = c->now;
  while (!c->called[0] && !mlfab_node_ready(c->node, NULL)) {
    c->now = mlfab__max(c->now + 1, mlfab_node_deadline(c->node));
    mlfab_node_tick(c->node, c->now);
    caller_acts(c);
    assert_true(c->now < 100000000000ull);
  }
  if (!mlfab_node_ready(c->node, NULL)) assert_string_equal(c->called, at);
  c->called[0] = 0;
  return c->now - since;
}

/* It has called at this address. */
static void caller_opens(caller *c, const char *coordinator, const char *at) {
  mlfab_config config;
  memset(c, 0, sizeof *c);
  mlfab_config_init(&config);
  config.workers = 2;
  config.rank = 1;
  config.timeout_ns = 60000000000;
  snprintf(config.coordinator, sizeof config.coordinator, "%s", coordinator);
  assert_int_equal(mlfab_node_open(&config, "queue:1", 0, &c->node, NULL), 0);
  caller_acts(c);
  (void)caller_calls(c, at);
}

static void caller_event(caller *c, mlfab_io_event e) {
  e.link = c->link;
  mlfab_node_event(c->node, &e, c->now);
  caller_acts(c);
}

/* Its call is answered. */
static void caller_up(caller *c) {
  c->link++;
  caller_event(c, (mlfab_io_event){.kind = MLFAB_IO_UP, .token = c->token});
}

static void caller_down(caller *c) {
  c->now += 1000;
  caller_event(c, (mlfab_io_event){.kind = MLFAB_IO_DOWN, .code = MLFAB_ERR_PEER_CLOSED});
}

static void caller_hears(caller *c, made *m) {
  m->h.job = c->node->job;
  m->h.sender = m->h.incarnation = 0;
  c->now += 1000;
  mlfab__wire_seal(m->head, &m->h, m->bulk);
  caller_event(c, (mlfab_io_event){.kind = MLFAB_IO_FRAME,
                                   .head = m->head,
                                   .bulk = m->bulk,
                                   .bulk_bytes = m->h.bulk_bytes,
                                   .head_bytes = MLFAB_HEADER_BYTES + m->h.meta_bytes});
}

/* Of several ports another one is called if the callee is no server 0 of this job, whatever its words are. If it is, the
 * error comes at once. */
TEST(test_causes_of_a_refusal) {
  for (uint32_t cause = 0; cause <= MLFAB__CAUSE_STRANGE_KEY; cause++) {
    for (int ports = 1; ports <= 3; ports += 2) {
      caller c;
      made m;
      mlfab_error error;
      mlfab__refuse refuse = {MLFAB_ERR_REFUSED, 0, cause, "any words (MLFAB_KEY)"};
      caller_opens(&c, ports == 1 ? "tcp:h:1" : "tcp:h:1-3", "tcp:h:1");
      caller_up(&c);
      MAKE(&m, REFUSE, refuse, &refuse);
      caller_hears(&c, &m);
      if (ports == 3 && cause >= MLFAB__CAUSE_ELSEWHERE) {
        assert_int_equal(mlfab_node_ready(c.node, &error), 0);
        (void)caller_calls(&c, "tcp:h:2");
      } else {
        assert_int_equal(mlfab_node_ready(c.node, &error), MLFAB_ERR_REFUSED);
        assert_non_null(strstr(error.text, "any words"));
      }
      mlfab_node_close(&c.node);
    }
  }
}

/* A callee that hangs up before any frame is called ever less often, until a frame comes. All ports of a range come before the
 * pace slows down. */
TEST(test_pace_of_calls) {
  const uint64_t fifth = 100000000;
  caller c;
  made m;
  caller_opens(&c, "tcp:h:7", "tcp:h:7");
  uint64_t took = 0, last = 0;
  for (uint32_t i = 0; i < 9; i++) {
    caller_up(&c);
    caller_down(&c);
    took = caller_calls(&c, "tcp:h:7");
    assert_true(took >= fifth << mlfab__min(i + 1, 5u));
    assert_true(took <= 2 * (fifth << mlfab__min(i + 1, 5u)));
    assert_true(i == 0 || i > 4 || took > last);
    last = took;
  }
  caller_up(&c);
  mlfab__heartbeat beat = {0, MLFAB__BEAT};
  MAKE(&m, HEARTBEAT, heartbeat, &beat);
  caller_hears(&c, &m);
  caller_down(&c);
  assert_true(caller_calls(&c, "tcp:h:7") <= 2 * fifth);
  mlfab_node_close(&c.node);

  caller_opens(&c, "tcp:h:1-3", "tcp:h:1");
  for (uint32_t i = 1; i <= 8; i++) {
    char at[24];
    caller_up(&c);
    caller_down(&c);
    snprintf(at, sizeof at, "tcp:h:%u", i % 3 + 1);
    took = caller_calls(&c, at);
    assert_true(took >= fifth << i / 3 && took <= 2 * (fifth << i / 3));
  }
  mlfab_node_close(&c.node);
}

/* So it is with a server that has joined, until it is known; the last error names the other program. */
TEST(test_pace_of_calls_to_a_server) {
  const uint64_t fifth = 100000000;
  mlfab__member_info info = {.node = 0, .roles = MLFAB_ROLE_SERVER, .incarnation = 1, .nonce = 5};
  mlfab__welcome welcome = {.incarnation = 2, .nodes = 1, .fresh = 1, .fabric = 5};
  mlfab_error error;
  caller c;
  made m;
  caller_opens(&c, "tcp:h:7", "tcp:h:7");
  caller_up(&c);
  strcpy(info.addresses, "tcp:h:8");
  uint32_t bulk = mlfab__encode_member_info(m.bulk, sizeof m.bulk, &info);
  uint32_t meta = mlfab__encode_welcome(m.head + MLFAB_HEADER_BYTES, &welcome);
  made_begin(&m, MLFAB__WELCOME, meta, bulk);
  caller_hears(&c, &m);
  uint64_t calls = 0;
  for (;;) {
    uint64_t took = caller_calls(&c, "tcp:h:8");
    if (mlfab_node_ready(c.node, &error)) break;
    assert_true(calls == 0 || took >= fifth << mlfab__min(calls, 5u));
    caller_up(&c);
    caller_down(&c);
    calls++;
  }
  assert_in_range(calls, 10, 25);
  assert_int_equal(mlfab_node_ready(c.node, &error), MLFAB_ERR_TIMEOUT);
  assert_non_null(strstr(error.text, "another program answers at tcp:h:"));
  mlfab_node_close(&c.node);
}

/* A server that has joined, or that a server calls, is dead after 5 beats. So calls to it stay frequent. */
TEST(test_pace_of_calls_with_a_patience) {
  static const struct {
    uint8_t kind, added, slows;
  } rows[] = {{MLFAB__LINK_SERVER, 0, 1},  {MLFAB__LINK_SERVER, 1, 0},
              {MLFAB__LINK_PLANNER, 0, 1}, {MLFAB__LINK_PLANNER, 1, 0},
              {MLFAB__LINK_RESHARD, 0, 0}, {MLFAB__LINK_RESHARD, 1, 0}};
  for (size_t i = 0; i < MLFAB__COUNT(rows); i++) {
    caller c;
    caller_opens(&c, "tcp:h:7", "tcp:h:7");
    mlfab_node *node = c.node;
    mlfab__route *route = &node->routes[mlfab__node_route_of(node, rows[i].kind, 0)];
    node->places[0].info.added = rows[i].added;
    for (uint32_t ends = 1; ends < 8; ends++) {
      const mlfab__link was = {.kind = rows[i].kind, .peer = 0};
      route->link = 7;
      mlfab__server_link_down(node, &was, 7, "it ends");
      uint64_t fifths = rows[i].slows ? 1u << mlfab__min(ends, 5u) : 1;
      assert_int_equal(route->retry_ns - node->now_ns, fifths * mlfab__node_beat(node) / 5);
    }
    mlfab_node_close(&c.node);
  }
}

TESTS(NULL, NULL)
